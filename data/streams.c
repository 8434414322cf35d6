// How fast do one thread and two read 512 MB of weights as decode reads them, and what do the two
// multiply-adds of AVX-512 do? What products of one row of x are held against (NOTES.md).
//
//     gcc -O3 -march=native -fopenmp data/streams.c -o /tmp/streams && /tmp/streams
//
// The weights are bf16, in rows of 2,048 and of 8,192 columns; a panel of rows is multiplied with one row
// of x, 1,024 columns after 1,024 columns. Medians of seven rounds, in which the ways take turns. It needs
// AVX-512 with BF16.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CHUNK = 1024, ROUNDS = 7, HUGE = 2 << 20 };
static const size_t BYTES = (size_t)512 << 20;

// What a panel asks memory for while it is read.
enum { NOTHING, SAME_PLACE, IN_ORDER, IN_ORDER_L2 };

#define UNROLL _Pragma("GCC unroll 32")

// The 16 numbers of bf16 at p as f32.
static inline __m512 load(const char *p) {
    __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
}

// y = x w^T for rows from .. to-1 of w (rows,K), a panel of N rows at a time. Way SAME_PLACE asks for the
// same columns of the next panel, 1 KB farther on; IN_ORDER asks for the next panel as it lies in memory,
// and IN_ORDER_L2 wants it in the second-level cache only.
static inline __attribute__((always_inline)) void product(float *y, const float *x, const char *w, int K,
                                                          size_t from, size_t to, int N, int way) {
    size_t row = (size_t)K * 2;
    for (size_t r = from; r + N <= to; r += N) {
        for (int c = 0; c < K; c += CHUNK) {
            const char *p = w + r * row + (size_t)c * 2, *next = w + (r + N) * row + (size_t)c * 2 * N;
            __m512 sum[8];
            UNROLL for (int i = 0; i < N; i++) sum[i] = _mm512_setzero_ps();
            for (int k = 0; k < CHUNK; k += 32, p += 64, next += N * 64) {
                __m512 a = _mm512_loadu_ps(x + c + k), b = _mm512_loadu_ps(x + c + k + 16);
                UNROLL for (int i = 0; i < N; i++) {
                    if (way == SAME_PLACE) __builtin_prefetch(p + (N + i) * row + 1024);
                    if (way == IN_ORDER) __builtin_prefetch(next + i * 64);
                    if (way == IN_ORDER_L2) __builtin_prefetch(next + i * 64, 0, 2);
                }
                UNROLL for (int i = 0; i < N; i++) sum[i] = _mm512_fmadd_ps(a, load(p + i * row), sum[i]);
                UNROLL for (int i = 0; i < N; i++) sum[i] = _mm512_fmadd_ps(b, load(p + i * row + 32), sum[i]);
            }
            UNROLL for (int i = 0; i < N; i++) y[r + i] = (c ? y[r + i] : 0) + _mm512_reduce_add_ps(sum[i]);
        }
    }
}

typedef void Product(float *y, const float *x, const char *w, int K, size_t from, size_t to);

#define WAY(name, N, way) \
    static __attribute__((noinline)) void name(float *y, const float *x, const char *w, int K, size_t from, \
                                               size_t to) { \
        product(y, x, w, K, from, to, N, way); \
    }
WAY(four_in_order, 4, IN_ORDER)
WAY(four_in_order_l2, 4, IN_ORDER_L2)
WAY(four_same_place, 4, SAME_PLACE)
WAY(four_alone, 4, NOTHING)
WAY(eight_alone, 8, NOTHING)

static const struct { const char *name; Product *make; } ways[] = {
    { "4 rows, the next panel in order", four_in_order },
    { "4 rows, the next panel in order, into the second-level cache", four_in_order_l2 },
    { "4 rows, the same place of the next panel and 1 KB more", four_same_place },
    { "4 rows, nothing", four_alone },
    { "8 rows, nothing", eight_alone },
};
enum { WAYS = sizeof ways / sizeof *ways };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void streams(const char *w, const float *x, float *y, int K, int threads) {
    double t[WAYS][ROUNDS];
    size_t rows = BYTES / 2 / K;
    for (int r = 0; r < ROUNDS; r++) {
        for (int i = 0; i < WAYS; i++) {
            double from = omp_get_wtime();
            #pragma omp parallel num_threads(threads)
            {
                size_t k = (size_t)omp_get_thread_num();
                ways[i].make(y, x, w, K, rows * k / threads, rows * (k + 1) / threads);
            }
            t[i][r] = omp_get_wtime() - from;
        }
    }
    for (int i = 0; i < WAYS; i++) {
        qsort(t[i], ROUNDS, sizeof **t, by_value);
        printf("%d columns, %d threads, %-62s %.1f GB/s\n", K, threads, ways[i].name,
               (double)BYTES / t[i][ROUNDS / 2] * 1e-9);
    }
}

// Multiply-adds of registers, in GFLOP/s of one core: f32, and pairs of bf16.
static void multiply_adds(int pairs) {
    enum { SUMS = 20, TIMES = 20000000 };
    __m512 sum[SUMS], a = _mm512_set1_ps(1e-3f);
    double best = 1e9;
    for (int r = 0; r < ROUNDS; r++) {
        UNROLL for (int i = 0; i < SUMS; i++) sum[i] = _mm512_set1_ps((float)i);
        double from = omp_get_wtime();
        for (int n = 0; n < TIMES; n++) {
            __asm__ volatile("" : "+v"(a));             // the compiler must not see that a is the same
            if (pairs) {
                __m512bh h = (__m512bh)a;
                UNROLL for (int i = 0; i < SUMS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], h, h);
            } else {
                UNROLL for (int i = 0; i < SUMS; i++) sum[i] = _mm512_fmadd_ps(a, a, sum[i]);
            }
        }
        UNROLL for (int i = 0; i < SUMS; i++) __asm__ volatile("" : : "v"(sum[i]));
        double t = omp_get_wtime() - from;
        best = t < best ? t : best;
    }
    double flops = (pairs ? 64. : 32.) * SUMS * TIMES;
    printf("%s: %.0f GFLOP/s\n", pairs ? "pairs of bf16" : "f32", flops / best * 1e-9);
}

int main(void) {
    char *room = mmap(NULL, BYTES + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    float *x = calloc(8192, sizeof *x), *y = calloc(BYTES / 2 / 2048, sizeof *y);
    if (room == MAP_FAILED || !x || !y) {
        fprintf(stderr, "streams: no memory for %zu bytes\n", BYTES);
        return 4;
    }
    char *w = (char *)(((uintptr_t)room + HUGE - 1) / HUGE * HUGE);
    madvise(w, BYTES, MADV_HUGEPAGE);
    memset(w, 1, BYTES);
    for (int K = 2048; K <= 8192; K *= 4) {
        for (int threads = 1; threads <= 2; threads++) streams(w, x, y, K, threads);
    }
    multiply_adds(0);
    multiply_adds(1);
    return 0;
}
