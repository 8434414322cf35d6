// lib/kernels.c - see kernels.h. The kernels are written once, over vector types of the compiler, and compiled
// once for each instruction set.
//
// Flags say which set it is. Compiled without SET this file is the set that every processor of a machine has,
// and all that depends on no set; with SET it is the table kernels_SET alone. The Makefile does so:
//
//     kernels.o               kernels_plain or kernels_neon, the choice of a set, the products' threads
//     kernels_avx2.o          -DSET=avx2 -mavx2 -mfma -mf16c
//     kernels_avx512.o        -DSET=avx512, and -mavx512f -mavx512bw -mavx512vl -mprefer-vector-width=512
//     kernels_avx512vnni.o    -DSET=avx512vnni, and -mavx512vnni
//     kernels_x86.o           kernels_x86.c with the flags of avx512vnni
//
// -DKERNELS_X86 says that the others are linked beside kernels.o; without it there is the base alone.
//
// ==================================================================================================== NUMBERS AND KERNELS
// One kernel serves weights and attention: a block of dot products y (m,n) = x (m,K) w (n,K)^T. Its right side
// is f32, f16 or bf16 and is widened to f32 in registers. Keys and values of q8_0 are read as they are stored
// (D89). All kernels compute on vectors of 16 floats, the lanes: one register of AVX-512, two of AVX2, four of
// NEON, of SSE2 and of a browser. Where a set has an instruction that the compiler does not find by itself, it
// is named in the first part ("what a set adds").
//
// The order of every sum is fixed. In a dot product, lane j adds the products at k = j, j+16, j+32, ... with
// fused multiply-adds; then the 16 lanes are folded, 8 onto 8, 4 onto 4, 2 onto 2 and 1 onto 1. A product of
// matrices does this for every K_CHUNK columns and adds the results of the chunks in order. No tile size,
// batch, thread count or position in a block has an influence. A row of a product is therefore the same bits in
// decode and in prefill, and AVX2, AVX-512 and NEON give the same bits. SSE2 and browsers have no fused
// multiply-add and agree with them up to rounding. So do the products of kernels_x86.c, and those in pairs
// (reg_pairs), whose orders are others, as fixed.
#define _GNU_SOURCE
#include "kernels.h"
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Stands before a loop over registers. They have no index, so the compiler must write the loop out; otherwise
// the vectors lie in memory, and products take about three times as long.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define INLINE static inline __attribute__((always_inline))

// ---- the vector
// WIDTH floats are a register. The sizes of tiles are as many as the registers of the set hold.
#if defined(__AVX512F__)
enum {
    WIDTH = 16,
    MR = 4,             // rows of x in a tile of dots, of o in a tile of mix
    NR = 4,             // rows of w in a tile of dots
    N1 = 16,            // the same with one row of x
    NV = 4,             // vectors of columns in a tile of mix
    M8 = 8,             // rows of x in a tile of dots8
};
#elif defined(__AVX2__)
enum { WIDTH = 8, MR = 3, NR = 2, N1 = 4, NV = 2, M8 = 3 };
#elif defined(__aarch64__)
enum { WIDTH = 4, MR = 2, NR = 2, N1 = 4, NV = 2, M8 = 2 };
#else
enum { WIDTH = 4, MR = 1, NR = 2, N1 = 2, NV = 2, M8 = 2 };
#endif
enum { PARTS = LANES / WIDTH };                 // registers of a vector
#define EACH_REG(i) UNROLL for (int i = 0; i < PARTS; i++)

// A register as numbers of other kinds; comparisons of two give -1 where they hold, and 0.
typedef float    F32 __attribute__((vector_size(4 * WIDTH)));
typedef int32_t  I32 __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t U32 __attribute__((vector_size(4 * WIDTH)));
typedef int16_t  I16 __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t U16 __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t U64 __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Half __attribute__((vector_size(2 * WIDTH)));         // WIDTH numbers of 16 bits
typedef signed char Bytes __attribute__((vector_size(2 * WIDTH)));
typedef uint64_t HalfU64 __attribute__((vector_size(2 * WIDTH)));
typedef struct { F32 p[PARTS]; } Vec;
typedef struct { I32 p[PARTS]; } Ints;

// Lists of places, one for each i below WIDTH, and the register of the numbers of a (places below WIDTH) and b
// (from there on) that stand at them.
#define FOUR_PLACES(LIST, n, i) LIST(n, i), LIST(n, i + 1), LIST(n, i + 2), LIST(n, i + 3)
#if defined(__AVX512F__)
#define PLACES(LIST, n) FOUR_PLACES(LIST, n, 0), FOUR_PLACES(LIST, n, 4), \
                        FOUR_PLACES(LIST, n, 8), FOUR_PLACES(LIST, n, 12)
#elif defined(__AVX2__)
#define PLACES(LIST, n) FOUR_PLACES(LIST, n, 0), FOUR_PLACES(LIST, n, 4)
#else
#define PLACES(LIST, n) FOUR_PLACES(LIST, n, 0)
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, LIST, n) __builtin_shufflevector(a, b, PLACES(LIST, n))
#else
#define SHUFFLE(a, b, LIST, n) __builtin_shuffle(a, b, (I32){ PLACES(LIST, n) })
#endif

// The lists: each place with the bits of n turned around; the n-th four, again and again; of each 2 n places the first
// or the second n, of a and of b by turns. Where n is 1 that is so for pairs: a0 a2 b0 b2 or a1 a3 b1 b3 of each four,
// for which all sets have an instruction.
#define ACROSS(n, i) (((i) ^ (n)) % WIDTH)
#define FOUR(n, i)   ((4 * (n) + (i) % 4) % WIDTH)
#define FIRST(n, i)  ((n) == 1 ? (i) / 4 * 4 + (i) % 2 * 2 + (i) / 2 % 2 * WIDTH \
                               : (i) / (2 * (n)) * 2 * (n) + (i) % (n) + (i) / (n) % 2 * WIDTH)
#define SECOND(n, i) ((FIRST(n, i) + (n)) % (2 * WIDTH))

// A step of a fold: of each 2 n places the two halves are added, and x and y take turns.
#define FOLD(type, x, y, n) ((type)SHUFFLE(x, y, FIRST, n) + (type)SHUFFLE(x, y, SECOND, n))

// ---- what a set adds: x y + z rounded once, numbers of 16 and 8 bits as 32, products of pairs
// reg_fma       x y + z
// reg_max       x > y ? x : y, so y where one of the two is a NaN
// reg_scale     x 2^k, where k holds whole numbers
// reg_half      WIDTH numbers of 16 bits at p;  reg_words: as 32 bits, unsigned
// reg_bytes     WIDTH signed bytes at p;  reg_pairs: 2 WIDTH of them, as 16 bits
// reg_from_f16  WIDTH numbers of f16
// reg_madd      sum + the products of a and b, of two neighbours each
// reg_dot2      the same of pairs of bf16: the product of the upper numbers first, each sum rounded once
INLINE Half reg_half(const void *p) {
    Half h;
    memcpy(&h, p, sizeof h);
    return h;
}

#if defined(__AVX2__)
#if defined(__AVX512F__)
#define MM(op) _mm512_##op
#define MM_HALF __m256i
#define MM_INTS __m512i
#define reg_scale(x, k) ((F32)_mm512_scalef_ps((__m512)(x), (__m512)(k)))
#define MM_QUARTER(p) _mm_loadu_si128((const void *)(p))
#else
#define MM(op) _mm256_##op
#define MM_HALF __m128i
#define MM_INTS __m256i
#define MM_QUARTER(p) _mm_loadl_epi64((const void *)(p))
#endif
INLINE F32 reg_fma(F32 x, F32 y, F32 z) { return MM(fmadd_ps)(x, y, z); }
INLINE F32 reg_max(F32 x, F32 y) { return MM(max_ps)(x, y); }
INLINE F32 reg_from_f16(Half h) { return MM(cvtph_ps)((MM_HALF)h); }
INLINE I32 reg_bytes(const void *p) { return (I32)MM(cvtepi8_epi32)(MM_QUARTER(p)); }

INLINE I32 reg_words(const void *p) { return (I32)MM(cvtepu16_epi32)((MM_HALF)reg_half(p)); }
INLINE I16 reg_pairs(const void *p) { return (I16)MM(cvtepi8_epi16)((MM_HALF)reg_half(p)); }

INLINE I32 reg_madd(I32 sum, I16 a, I16 b) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (I32)MM(madd_epi16)((MM_INTS)a, (MM_INTS)b);
#endif
}
#else
INLINE I32 reg_words(const void *p) { return __builtin_convertvector(reg_half(p), I32); }

INLINE I16 reg_pairs(const void *p) {
    Bytes b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, I16);
}

INLINE I32 reg_bytes(const void *p) {
    const signed char *b = p;
    return (I32){ b[0], b[1], b[2], b[3] };
}

INLINE F32 reg_max(F32 x, F32 y) {
    I32 mask = (I32)(x > y);
    return (F32)((mask & (I32)x) | (~mask & (I32)y));
}

INLINE I32 reg_madd(I32 sum, I16 a, I16 b) {
#if defined(__aarch64__)
    int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return sum + (I32)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
    return sum + ((I32)a << 16 >> 16) * ((I32)b << 16 >> 16) + ((I32)a >> 16) * ((I32)b >> 16);
#endif
}

#if defined(__aarch64__)
INLINE F32 reg_fma(F32 x, F32 y, F32 z) { return (F32)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y); }
INLINE F32 reg_from_f16(Half h) { return (F32)vcvt_f32_f16((float16x4_t)h); }
#else
// Rounded after the product and after the sum.
INLINE F32 reg_fma(F32 x, F32 y, F32 z) { return x * y + z; }

// f16 stores its exponent plus 15, f32 plus 127. So the bits of a number, moved to where f32 has them, are a
// number that is 2^112 times too small. The product corrects this, for subnormals too. Infinity and NaN get
// the highest exponent.
INLINE F32 reg_from_f16(Half h) {
    I32 u = __builtin_convertvector(h, I32);
    I32 special = (u & 0x7c00) == 0x7c00, sign = (u & 0x8000) << 16;
    F32 f = (F32)((u & 0x7fff) << 13) * 0x1p112f;
    return (F32)((I32)f | (special & 0x7f800000) | sign);
}

#endif
#endif

// bf16 1: by the instruction of AVX-512 BF16, which not every processor of this set has. The assembler is told
// which, because the compiler may use it nowhere else. Subnormal numbers count as zero.
INLINE F32 reg_dot2(F32 sum, F32 a, F32 b, int bf16) {
#if defined(__AVX512VNNI__)
    if (bf16) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
#endif
    (void)bf16;
    sum = reg_fma((F32)((U32)a & 0xffff0000), (F32)((U32)b & 0xffff0000), sum);
    return reg_fma((F32)((U32)a << 16), (F32)((U32)b << 16), sum);
}

// The powers are made of their bits: e + 127 is the exponent field of 2^e. They are two factors, 2^(k/2) each,
// because 2^k alone may be below the smallest float.
#if !defined(reg_scale)
INLINE F32 reg_scale(F32 x, F32 k) {
    I32 e = __builtin_convertvector(k, I32), half = e >> 1;
    return x * (F32)((half + 127) << 23) * (F32)((e - half + 127) << 23);
}
#endif

// ---- operations on vectors: lane by lane what their names say
#define VECTOR_FUNCTION(name, parameters, register_i) \
    INLINE Vec name parameters { \
        Vec v; \
        EACH_REG(i) v.p[i] = register_i; \
        return v; \
    }
VECTOR_FUNCTION(vec_all, (float x), x - (F32){0})             // of -0, too
VECTOR_FUNCTION(vec_add, (Vec x, Vec y), x.p[i] + y.p[i])
VECTOR_FUNCTION(vec_mul, (Vec x, Vec y), x.p[i] * y.p[i])
VECTOR_FUNCTION(vec_fma, (Vec x, Vec y, Vec z), reg_fma(x.p[i], y.p[i], z.p[i]))
VECTOR_FUNCTION(vec_max, (Vec x, Vec y), reg_max(x.p[i], y.p[i]))
VECTOR_FUNCTION(vec_negative, (Vec x), -x.p[i])
VECTOR_FUNCTION(vec_of_ints, (Ints x), __builtin_convertvector(x.p[i], F32))
VECTOR_FUNCTION(vec_repeat, (F32 x), x)

// A vector of the n numbers of a kind at p, as f32; the lanes from n on are 0. ROWS_Q8: bytes. PAIRS: two numbers of 16
// bits in each lane, as they are.
INLINE Vec vec_load(const void *p, int kind, int n) {
    size_t size = kind == ROWS_Q8 ? 1 : dtype_size(kind);
    int whole = kind >= PAIRS ? 2 * LANES : LANES;
    char part[LANES * 4] = {0};
    const char *at = n < whole ? memcpy(part, p, (size_t)n * size) : p;
    Vec x;
    EACH_REG(i) {
        const char *from = at + i * (whole / PARTS) * size;
        if (kind == DT_F32 || kind >= PAIRS) memcpy(&x.p[i], from, sizeof x.p[i]);
        if (kind == DT_F16) x.p[i] = reg_from_f16(reg_half(from));
        if (kind == DT_BF16) x.p[i] = (F32)(reg_words(from) << 16);
        if (kind == ROWS_Q8) x.p[i] = __builtin_convertvector(reg_bytes(from), F32);
    }
    return x;
}

// The vectors of n numbers: each begins at i, and `width` of its lanes are there, all but in the last one.
#define EACH_VECTOR(i, width, n) \
    for (size_t i = 0, last_ = (size_t)(n), width; width = min_size(last_ - i, LANES), i < last_; i += LANES)

// p (n) = the first n lanes.
INLINE void vec_store(float *p, Vec x, int n) {
    if (n == LANES) memcpy(p, &x, sizeof x);
    else memcpy(p, &x, min_size((size_t)n, LANES) * sizeof *p);
}

// Of a row of a kind, the n numbers from column d on. Those of q8_0 are scale times integer.
INLINE Vec vec_of_row(const char *row, int kind, size_t d, int n) {
    if (kind != ROWS_Q8) return vec_load(row + d * dtype_size(kind), kind, n);
    uint16_t scale;
    row += d / Q8_BLOCK * (Q8_BLOCK + 2);
    memcpy(&scale, row, sizeof scale);
    return vec_mul(vec_load(row + 2 + d % Q8_BLOCK, kind, n), vec_repeat(reg_from_f16(scale - (Half){0})));
}

// One register of the folds 8 onto 8 and 4 onto 4 of WIDTH / 4 vectors: a[0], a[4] .. a quarter each.
INLINE F32 fold_to_quarters(const Vec *a) {
    if (WIDTH == 4) return (a->p[0] + a->p[PARTS / 2]) + (a->p[PARTS / 4] + a->p[PARTS - 1]);
    F32 x[4];
    UNROLL for (int i = 0; i < WIDTH / 4; i++)
        x[i] = PARTS == 1 ? a[4 * i].p[0] : a[4 * i].p[0] + a[4 * i].p[PARTS - 1];
    if (WIDTH == 8) return FOLD(F32, x[0], x[1], 4);
    return FOLD(F32, FOLD(F32, x[0], x[2], 8), FOLD(F32, x[1], x[3], 8), 4);
}

// out (n) = scale * the sum of the lanes of each of a (n), in the order that every set keeps. WIDTH vectors
// share their instructions; missing ones repeat the last.
INLINE void vec_folds(float *out, const Vec *a, int n, float scale) {
    UNROLL for (int i = 0; i < n; i += WIDTH) {
        Vec v[WIDTH];
        F32 q[4];
        UNROLL for (int j = 0; j < WIDTH; j++) v[j] = a[i + j < n ? i + j : n - 1];
        UNROLL for (int j = 0; j < 4; j++) q[j] = fold_to_quarters(v + j);
        F32 sum = FOLD(F32, FOLD(F32, q[0], q[1], 2), FOLD(F32, q[2], q[3], 2), 1) * scale;
        memcpy(out + i, &sum, (n - i < WIDTH ? n - i : WIDTH) * sizeof *out);
    }
}

INLINE float vec_fold(Vec x) {
    float sum;
    vec_folds(&sum, &x, 1, 1);
    return sum;
}

// The largest lane; no lane is a NaN.
INLINE float vec_largest(Vec x) {
    F32 top = x.p[0];
    UNROLL for (int i = 1; i < PARTS; i++) top = reg_max(top, x.p[i]);
    if (WIDTH > 8) top = reg_max(top, SHUFFLE(top, top, ACROSS, 8));
    if (WIDTH > 4) top = reg_max(top, SHUFFLE(top, top, ACROSS, 4));
    top = reg_max(top, SHUFFLE(top, top, ACROSS, 2));
    return reg_max(top, SHUFFLE(top, top, ACROSS, 1))[0];
}

// ---- memory that is read next
// Decode reads every row once, so it is as fast as memory is. A kernel asks for what is read after it (next) while
// its first rows of x meet w, as many bytes as it reads itself: a burst of requests would fill the queue to memory
// and then leave it idle. Rows of attention that the caller names no successor of are asked for FEW_AHEAD bytes
// further on (rows_ahead).
// No bit depends on it. Asked for in bursts of 64 columns of four rows, and not with every vector, the products of
// a decode step with weights in memory take a tenth longer (Zen 5, one thread, in turns).
enum { FEW_AHEAD = 4096 };

// ---- dot products, in tiles of MR rows of x by NR rows of w
// Where an INLINE function takes dtype, M, N or vectors, its callers pass constants. Every call is compiled for
// its values: loops are written out and branches disappear.

// Products in pairs (--bf16-terms 1): x is rounded to bf16, as W is. Then a vector has 32 columns of both, and lane j
// adds the products of columns 2 j + 1 and 2 j, in this order. A product of two bf16 is exact in f32, so the error is
// that of rounding x: 1.7e-3 of y's rms with 2,048 columns of random numbers, where f32 has 1.6e-7. AVX-512 BF16
// does twice the multiply-adds so.

// acc (M,N) += x (M) w (N)^T in columns k .. k+n-1, lane by lane. Each vector is loaded once.
INLINE void dots_columns(Vec *acc, const char *const *x, const char *w, size_t ldw, int kind, int M, int N,
                         int k, int n) {
    int x_kind = kind >= PAIRS ? kind : DT_F32;
    Vec b[LANES];
    UNROLL for (int j = 0; j < N; j++) b[j] = vec_of_row(w + j * ldw, kind, k, n);
    UNROLL for (int i = 0; i < M; i++) {
        Vec v = vec_of_row(x[i], x_kind, k, n);
        UNROLL for (int j = 0; j < N; j++) {
            F32 *sum = acc[i * N + j].p;
            EACH_REG(r) sum[r] = kind >= PAIRS ? reg_dot2(sum[r], v.p[r], b[j].p[r], kind == PAIRS_BF16)
                                               : reg_fma(v.p[r], b[j].p[r], sum[r]);
        }
    }
}

// The tiles of M rows of x from i0 on, of which m are there, with rows of w from j on, N at a time as long as
// there are so many -> the first row of w that is left. Missing rows of x repeat the last one.
INLINE int dots_tiles(const KernelBlock *a, int kind, int M, int N, int i0, int m, int j) {
    size_t size = dtype_size(kind), ldw = a->ldw, ldy = a->ldy, x_size = kind >= PAIRS ? 2 : 4;
    size_t columns = kind >= PAIRS ? 2 * LANES : LANES, step = N * columns * size;
    int K = a->K, asks = !i0 && a->next.bytes;
    const char *w = a->w + j * ldw, *ahead = a->next.p + j * K * size;
    float *y = a->y + (size_t)i0 * ldy;
    const char *x[MR];
    UNROLL for (int i = 0; i < M; i++)
        x[i] = (const char *)a->x + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldx * x_size;

    for (; j + N <= a->n; j += N, w += N * ldw) {
        Vec acc[LANES];                         // M N of them; an array of M N would lie in memory
        float sum[LANES];
        int k = 0;
        UNROLL for (int i = 0; i < M * N; i++) acc[i] = vec_all(0);
        for (; k + (int)columns <= K; k += columns) {
            if (asks) {
                UNROLL for (size_t b = 0; b < step; b += 64) __builtin_prefetch(ahead + b);
                ahead += step;
            }
            dots_columns(acc, x, w, ldw, kind, M, N, k, columns);
        }
        if (k < K) dots_columns(acc, x, w, ldw, kind, M, N, k, K - k);
        vec_folds(sum, acc, M * N, a->scale);
        UNROLL for (int i = 0; i < M; i++) {
            if (i < m && !a->add) memcpy(y + i * ldy + j, sum + i * N, N * sizeof *y);
            for (int r = 0; i < m && a->add && r < N; r++) y[i * ldy + j + r] += sum[i * N + r];
        }
    }
    return j;
}

// A block: MR rows of x at a time with all rows of w, which lie in the first- or second-level cache when they
// are read again; then a last single row of x, with more rows of w.
INLINE void dots_block(const KernelBlock *a, int kind) {
    for (int i = 0, m; i < a->m; i += m) {
        int left = a->m - i, j = 0;
        m = left > 1 ? min_int(left, MR) : 1;
        if (m > 1) {
            j = dots_tiles(a, kind, MR, NR, i, m, j);
            dots_tiles(a, kind, MR, 1, i, m, j);
        } else {
            j = dots_tiles(a, kind, 1, N1, i, m, j);
            j = dots_tiles(a, kind, 1, NR, i, m, j);
            dots_tiles(a, kind, 1, 1, i, m, j);
        }
    }
}

// A function for each kind, so that the kind is a constant in all that is inlined into it.
static void dots_f32(const KernelBlock *a)  { dots_block(a, DT_F32); }
static void dots_f16(const KernelBlock *a)  { dots_block(a, DT_F16); }
static void dots_bf16(const KernelBlock *a) { dots_block(a, DT_BF16); }
static void dots_pairs(const KernelBlock *a) { dots_block(a, PAIRS); }
#if defined(__AVX512VNNI__)
static void dots_pairs_bf16(const KernelBlock *a) { dots_block(a, PAIRS_BF16); }
#endif

// ---- dot products with rows of q8_0
// A row of x becomes integers t of 16 bits, x = f t with f = max|x| / Q8_TOP, whose upper byte stays within 127.
// A block of a key is 32 integers u and a scale d. So x . w = f sum_b d_b sum_i t_i u_i, and the inner sum is one
// of integers: exact, in any order, on any set (D89). Four rows of x meet four rows of w, and a quarter of a
// vector belongs to a row of x.

// Kernels.whole: t (n) = x (n) in units of the factor that is returned, for whole vectors. The largest is most_t, or
// 0 where no x is larger than `least`. The factor is no number where some x is none, or is infinite. Adding 1.5 *
// 2^23 leaves the integer in the lowest bits.
INLINE float whole_numbers(int16_t *t, const float *x, int n, float most_t, float least) {
    Vec top = vec_all(0), odd = vec_all(0);
    for (int k = 0; k < n; k += LANES) {
        Vec v = vec_load(x + k, DT_F32, LANES);
        top = vec_max(vec_max(v, vec_negative(v)), top);
        odd = vec_fma(v, vec_all(0), odd);
    }
    float most = vec_largest(top), unit = most > least ? most_t / most : 0;
    for (int k = 0; k < n; k += LANES) {
        Vec v = vec_mul(vec_load(x + k, DT_F32, LANES), vec_all(unit));
        v = vec_add(v, vec_all(12582912));
        EACH_REG(i) {
            Half bits = __builtin_convertvector((U32)v.p[i], Half);
            memcpy(t + k + i * WIDTH, &bits, sizeof bits);
        }
    }
    return most / most_t + vec_fold(odd);
}

// sum, whose quarter i belongs to row i, += the products of t (4,8) with the key in every quarter.
INLINE Ints q8_eight(Ints sum, I32 key, const int16_t (*t)[8]) {
    EACH_REG(i) {
        I16 query;
        memcpy(&query, t[i * (WIDTH / 4)], sizeof query);
        sum.p[i] = reg_madd(sum.p[i], (I16)key, query);
    }
    return sum;
}

// The sums of block b by the 32 bytes at u, of which a register holds WIDTH / 4 times eight. The four lanes of
// quarter i add up to row i's sum.
INLINE Ints q8_block(const Q8Query *q, int b, const signed char *u) {
    const int16_t (*t)[4][8] = (const int16_t (*)[4][8])q->t + b * (Q8_BLOCK / 8);
    Ints sum = {0};
    UNROLL for (int c = 0; c < Q8_BLOCK / 8; c += WIDTH / 4) {
        I32 key = (I32)reg_pairs(u + 8 * c);
        sum = q8_eight(sum, SHUFFLE(key, key, FOUR, 0), t[c]);
        if (WIDTH > 4) sum = q8_eight(sum, SHUFFLE(key, key, FOUR, 1), t[c + 1]);
        if (WIDTH > 8) sum = q8_eight(sum, SHUFFLE(key, key, FOUR, 2), t[c + 2]);
        if (WIDTH > 8) sum = q8_eight(sum, SHUFFLE(key, key, FOUR, 3), t[c + 3]);
    }
    return sum;
}

// Lane 4i + j is the sum of quarter i of a[j], j < 4.
INLINE Vec q8_sums(const Ints *a) {
    Ints sum;
    EACH_REG(i) {
        F32 v[4];
        UNROLL for (int j = 0; j < 4; j++) v[j] = (F32)a[j].p[i];       // as floats: cheaper instructions
        UNROLL for (int j = 0; j < 2; j++) v[j] = (F32)FOLD(I32, v[2 * j], v[2 * j + 1], 2);
        sum.p[i] = FOLD(I32, v[0], v[1], 1);
    }
    return vec_of_ints(sum);
}

// In every quarter, lane j is the f16 at p[j] + at.
INLINE Vec four_f16(const char *const *p, size_t at) {
    uint16_t h[4];
    UNROLL for (int j = 0; j < 4; j++) memcpy(&h[j], p[j] + at, sizeof *h);
    uint64_t four = h[0] | (uint64_t)h[1] << 16 | (uint64_t)h[2] << 32 | (uint64_t)h[3] << 48;
    return vec_repeat(reg_from_f16((Half)(four - (HalfU64){0})));
}

// Four rows of w, from j on, by four rows of x, for the `blocks` blocks from column k0 on. Missing rows of w
// repeat the last one.
INLINE Vec q8_tile(const KernelBlock *a, const Q8Query *q, int j, int k0, int blocks) {
    const char *w[4];
    Vec sum = vec_all(0);
    UNROLL for (int r = 0; r < 4; r++) w[r] = a->w + (size_t)min_int(j + r, a->n - 1) * a->ldw + q8_bytes(k0);
    for (int b = 0; b < blocks; b++) {
        Ints part[4];
        size_t at = b * (size_t)(Q8_BLOCK + 2);
        UNROLL for (int r = 0; r < 4; r++)
            part[r] = q8_block(q, b, (const signed char *)w[r] + at + 2);
        sum = vec_fma(q8_sums(part), four_f16(w, at), sum);
    }
    return vec_mul(sum, vec_mul(vec_load(q->factor, DT_F32, LANES), vec_all(a->scale)));
}

// dots[ROWS_Q8]
static void dots_q8(const KernelBlock *a) {
    int pieces = q8_pieces(a->K);
    for (int k0 = 0; k0 < a->K; k0 += Q8_COLS) {
        int blocks = min_int(a->K - k0, Q8_COLS) / Q8_BLOCK, add = k0 || a->add;
        for (int i = 0; i < a->m; i += 4) {
            const Q8Query *q = (const Q8Query *)a->x + i / 4 * pieces + k0 / Q8_COLS;
            const char *ahead = a->next.p;
            int asks = !i && !k0 && a->next.bytes, rows = min_int(a->m - i, 4);
            for (int j = 0; j < a->n; j += 4, ahead += 4 * a->ldw) {
                float sum[4][4];
                int n = min_int(a->n - j, 4);
                for (size_t b = 0; asks && b < 4 * a->ldw; b += 64) __builtin_prefetch(ahead + b);
                vec_store(sum[0], q8_tile(a, q, j, k0, blocks), LANES);
                for (int r = 0; r < rows; r++) {
                    float *y = a->y + (size_t)(i + r) * a->ldy + j;
                    if (n == 4 && !add) memcpy(y, sum[r], sizeof sum[r]);
                    else for (int c = 0; c < n; c++) y[c] = add ? y[c] + sum[r][c] : sum[r][c];
                }
            }
        }
    }
}

// ---- weighted sums of rows, in tiles of MR rows of o by NV vectors

// The tile of M rows of o from row i0 on, of which m are there, and `vectors` vectors of columns from d0 on,
// each of `width` columns. Each output adds its n products in the order of the rows of v. Missing rows of o
// repeat the last one. With every row of v, `share` bytes are asked for.
INLINE void mix_tile(const KernelBlock *a, int kind, int M, int i0, int m, int d0, int vectors, int width,
                     const char *ahead, size_t share) {
    Vec acc[MR * NV];
    int n = a->n, D = a->K;
    size_t row = kind_bytes(kind, D);
    float *o = a->y + (size_t)i0 * D + d0;
    const float *p = (const float *)a->x + (size_t)i0 * n;
    const char *v = a->w;

    UNROLL for (int i = 0; i < M; i++) {
        const float *from = o + (size_t)(i < m ? i : m - 1) * D;
        UNROLL for (int c = 0; c < vectors; c++)
            acc[i * vectors + c] = a->add ? vec_load(from + c * LANES, DT_F32, width) : vec_all(0);
    }
    for (int r = 0; r < n; r++, v += row, ahead += share) {
        Vec b[NV];
        for (size_t at = 0; at < share; at += 64) __builtin_prefetch(ahead + at);
        UNROLL for (int c = 0; c < vectors; c++) b[c] = vec_of_row(v, kind, d0 + c * LANES, width);
        UNROLL for (int i = 0; i < M; i++) {
            Vec weight = vec_all(p[(size_t)(i < m ? i : m - 1) * n + r]);
            UNROLL for (int c = 0; c < vectors; c++)
                acc[i * vectors + c] = vec_fma(weight, b[c], acc[i * vectors + c]);
        }
    }
    UNROLL for (int i = 0; i < M; i++) {
        float *to = o + (size_t)(i < m ? i : m - 1) * D;
        UNROLL for (int c = 0; c < vectors; c++) vec_store(to + c * LANES, acc[i * vectors + c], width);
    }
}

// All columns of M rows of o from row i0 on, of which m are there. The first rows of o ask for what is read
// next, each pass over wide columns for its part: if the first pass asked for all, it would wait for memory,
// and the others would leave it idle.
INLINE void mix_rows(const KernelBlock *a, int kind, int M, int i0, int m) {
    int d = 0, D = a->K, passes = max_int(1, D / (NV * LANES));
    size_t share = 0;
    Ahead next = a->next;
    if (!i0) share = (next.bytes / ((size_t)a->n * passes) + 63) / 64 * 64;
    for (; d + NV * LANES <= D; d += NV * LANES, next.p += a->n * share)
        mix_tile(a, kind, M, i0, m, d, NV, LANES, next.p, share);
    for (; d + LANES <= D; d += LANES) mix_tile(a, kind, M, i0, m, d, 1, LANES, next.p, 0);
    if (d < D) mix_tile(a, kind, M, i0, m, d, 1, D - d, next.p, 0);
}

// A block: MR rows of o at a time, then a last single one.
INLINE void mix_block(const KernelBlock *a, int kind) {
    int i = 0;
    for (; a->m - i > 1; i += MR) mix_rows(a, kind, MR, i, min_int(a->m - i, MR));
    if (i < a->m) mix_rows(a, kind, 1, i, 1);
}

static void mix_f32(const KernelBlock *a)  { mix_block(a, DT_F32); }
static void mix_f16(const KernelBlock *a)  { mix_block(a, DT_F16); }
static void mix_bf16(const KernelBlock *a) { mix_block(a, DT_BF16); }
static void mix_q8(const KernelBlock *a)   { mix_block(a, ROWS_Q8); }

// ---- exponentials
// c[0] + c[1] x + .. + c[n-1] x^(n-1)
INLINE Vec vec_polynomial(Vec x, const float *c, int n) {
    Vec p = vec_all(c[n - 1]);
    UNROLL for (int i = n - 2; i >= 0; i--) p = vec_fma(x, p, vec_all(c[i]));
    return p;
}

// factor x, rounded to whole numbers: adding 1.5 * 2^23 leaves no bits for a fraction.
INLINE Vec vec_whole(Vec x, float factor) {
    return vec_add(vec_fma(x, vec_all(factor), vec_all(12582912)), vec_all(-12582912));
}

// e^x in every lane, x at most 150. With x = k ln 2 + r and |r| <= ln 2 / 2, e^x = 2^k e^r:
//   k    is x / ln 2 rounded.
//   r    is x - k ln 2, with ln 2 as the sum of two numbers, so that r is exact to f32.
//   e^r  is 1 + r + r^2 (c2 + c3 r + .. + c6 r^4), a minimax polynomial with relative error 3.1e-9.
// The clamp at -150 makes 0 of everything below the smallest subnormal, and of the NaN that -INFINITY -
// -INFINITY is.
INLINE Vec vec_exp(Vec x) {
    static const float c[] = { 0.499999934f, 0.166665206f, 0.0416683880f, 0.00836871688f, 0.00138145986f };
    x = vec_max(x, vec_all(-150));
    Vec k = vec_whole(x, LOG2_E);
    Vec r = vec_fma(k, vec_all(-1.42860677e-6f), vec_fma(k, vec_all(-0.693145752f), x));
    Vec p = vec_add(vec_fma(vec_mul(r, r), vec_polynomial(r, c, 5), r), vec_all(1));
    EACH_REG(i) p.p[i] = reg_scale(p.p[i], k.p[i]);
    return p;
}

// 2^x in every lane, x at most 150, for scores that carry a factor log2 e. The split x = k + r is exact as it
// stands, so it needs no products, and 1 + r is not added apart.
//   2^r  is 1 + r (c1 + c2 r + .. + c6 r^5), a minimax polynomial with relative error 2.0e-9.
INLINE Vec vec_exp2(Vec x) {
    static const float c[] = { 1, 0.693147182f, 0.240226477f, 0.0555033237f, 0.00961843692f, 0.00133988750f,
                               0.000153533620f };
    x = vec_max(x, vec_all(-150));
    Vec k = vec_whole(x, 1), p = vec_polynomial(vec_fma(k, vec_all(-1), x), c, 7);
    EACH_REG(i) p.p[i] = reg_scale(p.p[i], k.p[i]);
    return p;
}

// x = exp(x + shift) for at most one vector -> what is stored: 0 in the other lanes.
INLINE Vec exp_step(float *x, Vec shift, int n) {
    Vec e = vec_exp(vec_add(vec_load(x, DT_F32, n), shift));
    vec_store(x, e, n);
    return n == LANES ? e : vec_load(x, DT_F32, n);
}

// Kernels.exp_shift
static void exp_row(float *x, float max, size_t n, float *sum) {
    Vec shift = vec_all(-max), total = vec_all(0);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) total = vec_add(total, exp_step(x + i, shift, LANES));
    if (i < n) total = vec_add(total, exp_step(x + i, shift, (int)(n - i)));
    *sum += vec_fold(total);
}

// Kernels.softmax_columns, a vector of columns after the other.
static void softmax_tile(float *x, int n, int m, float *max, float *sum) {
    EACH_VECTOR(c, width, m) {
        // the maximum of each column, from the one of earlier rows on
        Vec before = vec_load(max + c, DT_F32, width), top = before;
        for (int j = 0; j < n; j++) top = vec_max(vec_load(x + j * (size_t)m + c, DT_F32, width), top);

        // what was summed up under the old maximum, as it is under the new one
        Vec shift = vec_negative(top), factor = vec_exp2(vec_add(before, shift));
        Vec total = vec_mul(vec_load(sum + c, DT_F32, width), factor);

        // the powers, and their sum
        for (int j = 0; j < n; j++) {
            float *at = x + j * (size_t)m + c;
            Vec e = vec_exp2(vec_add(vec_load(at, DT_F32, width), shift));
            vec_store(at, e, width);
            total = vec_add(total, e);
        }
        vec_store(max + c, top, width);
        vec_store(sum + c, total, width);
    }
}

// Kernels.swiglu: g (n) = g / (1 + e^-g) * u. Below -150, e^150 is an infinity.
static void swiglu_row(float *g, const float *u, size_t n) {
    EACH_VECTOR(i, width, n) {
        Vec x = vec_load(g + i, DT_F32, width), v = vec_load(u + i, DT_F32, width);
        Vec e = vec_exp(vec_negative(vec_max(x, vec_all(-150))));
        EACH_REG(r) x.p[r] = x.p[r] / (1 + e.p[r]) * v.p[r];
        vec_store(g + i, x, width);
    }
}

// ---- the largest numbers

// Kernels.max. A NaN loses every comparison that vec_max makes with it on the left, so no lane of `top` is one.
static float largest_of(const float *x, size_t n) {
    Vec top = vec_all(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) top = vec_max(vec_load(x + i, DT_F32, LANES), top);
    float best = vec_largest(top);
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// Kernels.count_from. The loop is so simple that the compiler makes vectors of it itself.
static int count_at_least(const float *x, int n, uint32_t key) {
    int count = 0;
    for (int i = 0; i < n; i++) count += order_key(x[i]) >= key;
    return count;
}

// ---- from and to f32

// dst (n) = src (n) of a kind.
INLINE void widen_row(float *dst, const char *src, int kind, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) vec_store(dst + i, vec_of_row(src, kind, i, LANES), LANES);
    if (i < n) vec_store(dst + i, vec_of_row(src, kind, i, (int)(n - i)), (int)(n - i));
}

static void widen_f32(float *dst, const void *src, size_t n)  { widen_row(dst, src, DT_F32, n); }
static void widen_f16(float *dst, const void *src, size_t n)  { widen_row(dst, src, DT_F16, n); }
static void widen_bf16(float *dst, const void *src, size_t n) { widen_row(dst, src, DT_BF16, n); }

// Kernels.unpack_q8
static void unpack_q8_rows(float *dst, const char *src, int n, int D) {
    for (; n > 0; n--, dst += D, src += q8_bytes(D)) widen_row(dst, src, ROWS_Q8, (size_t)D);
}

// A step of a Hadamard transform of 16 numbers: of those at i and i + s, where i lacks the bit s, the sum and the
// difference. They stand in one register, or s / WIDTH registers from each other. Steps of small integers are exact.
#define SIGN(s, i) ((i) & (s) ? -1 : 1)
#define HADAMARD_STEP(x, s) do { \
    Vec y = x; \
    EACH_REG(i) { \
        if ((s) < WIDTH) (x).p[i] = reg_fma(y.p[i], (F32){ PLACES(SIGN, s) }, SHUFFLE(y.p[i], y.p[i], ACROSS, s)); \
        else (x).p[i] = i & (s) / WIDTH ? y.p[i ^ (s) / WIDTH] - y.p[i] : y.p[i] + y.p[i ^ (s) / WIDTH]; \
    } \
} while (0)

INLINE Vec hadamard_16(Vec x) {
    HADAMARD_STEP(x, 1);
    HADAMARD_STEP(x, 2);
    HADAMARD_STEP(x, 4);
    HADAMARD_STEP(x, 8);
    return x;
}

// Kernels.unpack_q4. The two halves of a block go through the transform as one number, first + 65536 second: of
// sums of 16 odd numbers up to 15, which f32 holds exactly (240 * 65536 + 240 < 2^24). It / 65536,
// rounded, is the second one.
static void unpack_q4_blocks(float *dst, const char *src, size_t n) {
    for (size_t k = 0; k < n; k++, src += Q4_BYTES, dst += Q4_BLOCK) {
        uint16_t d;
        uint32_t plane[4];
        memcpy(&d, src, sizeof d);
        memcpy(plane, src + sizeof d, sizeof plane);

        // 2 u - 15 of both halves: lane j has the bits j and j + 16 of each plane.
        Ints odd;
        EACH_REG(i) {
            U32 u = {0}, j = (U32){ PLACES(ACROSS, 0) } + (uint32_t)(i * WIDTH);
            UNROLL for (int b = 0; b < 4; b++) u += (((plane[b] - (U32){0}) >> j) & 0x10001) << (b + 1);
            odd.p[i] = (I32)u - 0xf000f;
        }
        Vec both = hadamard_16(vec_of_ints(odd));
        Vec second = vec_whole(both, 1 / 65536.f);
        Vec first = vec_fma(second, vec_all(-65536), both), scale = vec_all(f16_to_f32(d));
        vec_store(dst, vec_mul(vec_add(first, second), scale), LANES);
        vec_store(dst + LANES, vec_mul(vec_add(first, vec_negative(second)), scale), LANES);
    }
}

// Kernels.unpack. A register takes 2 WIDTH elements, four from each lane of 64 bits. Four elements of w bits
// begin on a whole or a half byte; each is moved to the top of 16 bits of its own.
static void unpack_row(uint16_t *h, const unsigned char *p, int n, int w) {
    const U64 kept = (uint64_t)(0xffff >> (16 - w) << (16 - w)) - (U64){0};
    int i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH, p += 2 * WIDTH / 8 * w) {
        U64 x = {0}, four = {0};
        UNROLL for (int j = 0; j < WIDTH / 2; j++) {
            uint64_t lane;
            memcpy(&lane, p + j * w / 2, sizeof lane);
            x[j] = lane >> (j * w & 1) * 4;
        }
        UNROLL for (int b = 0; b < 4; b++) four |= (x << (16 - w) * (b + 1)) & (kept << 16 * b);
        U16 element = (U16)four;
        memcpy(h + i, &element, sizeof element);
    }
    for (size_t bit = 0; i < n; i++, bit += (size_t)w) {
        uint32_t u;                             // the bits of the next element fall off on top
        memcpy(&u, p + bit / 8, sizeof u);
        h[i] = (uint16_t)(u >> bit % 8 << (16 - w));
    }
}

// ---- products with weights in 8 bits
// A row of x becomes blocks of Q8_BLOCK whole numbers of 16 bits, each with a scale: q = round(x / scale), scale
// = max|x| / 32767, which is as good as exact beside the 8 bits of the weights. A block's products are then
// summed as whole numbers, at most 32 * 32767 * 127, and
//   y[r] += sum * (scale of x * scale of w[r]),   block after block.
// The 16 lanes are 16 rows of w, so nothing has to be folded. Sums of whole numbers have no order: every row of
// x gets the same bits in every tile, and on every set with a fused multiply-add.

// Kernels.whole_blocks. Columns behind the last one are 0.
static void whole_row(int16_t *t, float *unit, const float *x, int n) {
    for (int i = 0; i < n; i += Q8_BLOCK) {
        float part[Q8_BLOCK] = {0};
        const float *from = n - i < Q8_BLOCK ? memcpy(part, x + i, (size_t)(n - i) * sizeof *x) : x + i;
        *unit++ = whole_numbers(t + i, from, Q8_BLOCK, 32767, 0);
    }
}

// sum (M) = the whole sums of one block: M rows of x by 16 rows of w, whose bytes lie in pairs of columns. A
// single row of x has four sums in turn, because each waits for itself.
INLINE void dots8_sums(Ints *sum, const int16_t *const *x, const char *w, int M) {
    Ints part[4] = {0};
    UNROLL for (int i = 0; i < M; i++) sum[i] = (Ints){0};
    UNROLL for (int k = 0; k < Q8_BLOCK; k += 2) {
        I16 two[PARTS];
        EACH_REG(p) two[p] = reg_pairs(w + k * LANES + p * 2 * WIDTH);
        UNROLL for (int i = 0; i < M; i++) {
            Ints *to = M == 1 ? part + k / 2 % 4 : sum + i;
            int32_t both;
            memcpy(&both, x[i] + k, sizeof both);
            EACH_REG(p) to->p[p] = reg_madd(to->p[p], two[p], (I16)(both - (I32){0}));
        }
    }
    if (M > 1) return;
    EACH_REG(p) sum->p[p] = (part[0].p[p] + part[1].p[p]) + (part[2].p[p] + part[3].p[p]);
}

// A tile: M rows of x from i0 on, of which m are there; missing ones repeat the last.
INLINE void dots8_tile(const KernelBlock *a, int M, int i0, int m) {
    Vec acc[M8];
    Ints sum[M8];
    const int16_t *x[M8];
    const float *unit[M8];
    UNROLL for (int i = 0; i < M; i++) {
        size_t row = (size_t)(i0 + (i < m ? i : m - 1));
        x[i] = (const int16_t *)a->x + row * a->ldx;
        unit[i] = a->unit + row * (a->ldx / Q8_BLOCK);
        acc[i] = a->add ? vec_load(a->y + row * a->ldy, DT_F32, a->n) : vec_all(0);
    }
    for (int b = 0, blocks = a->K / Q8_BLOCK; b < blocks; b++) {
        const char *w = a->w + (size_t)b * Q8_PANEL;
        Vec d = vec_load(w, DT_F16, LANES);
        for (int at = 0; M == 1 && at < Q8_PANEL; at += 64) __builtin_prefetch(w + FEW_AHEAD + at);
        dots8_sums(sum, x, w + LANES * 2, M);
        UNROLL for (int i = 0; i < M; i++) {
            acc[i] = vec_fma(vec_of_ints(sum[i]), vec_mul(d, vec_all(unit[i][b])), acc[i]);
            x[i] += Q8_BLOCK;
        }
    }
    UNROLL for (int i = 0; i < M; i++)
        vec_store(a->y + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldy, acc[i], a->n);
}

// dots[DT_Q8]
static void dots8_block(const KernelBlock *a) {
    int i = 0;
    for (; a->m - i > 1; i += M8) dots8_tile(a, M8, i, min_int(a->m - i, M8));
    if (i < a->m) dots8_tile(a, 1, i, 1);
}

// ---- the table of this set
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)                // two steps, so that SET becomes its value first
#define TEXT_(set) #set
#define TEXT(set) TEXT_(set)
#if !defined(SET) && defined(__aarch64__)
#define SET neon
#define BASE
#elif !defined(SET)
#define SET plain
#define BASE
#endif

extern const Kernels PASTE(kernels_, SET);
const Kernels PASTE(kernels_, SET) = {
    .name            = TEXT(SET),
    .dots            = { dots_f32, dots_f16, dots_bf16, dots8_block, dots_q8, dots_pairs,
#if defined(__AVX512VNNI__)
                         dots_pairs_bf16,
#endif
                       },
    .mix             = { mix_f32, mix_f16, mix_bf16, NULL, mix_q8 },
    .whole           = whole_numbers,
    .whole_blocks    = whole_row,
    .widen           = { widen_f32, widen_f16, widen_bf16 },
    .unpack_q8       = unpack_q8_rows,
    .unpack_q4       = unpack_q4_blocks,
    .unpack          = unpack_row,
    .exp_shift       = exp_row,
    .softmax_columns = softmax_tile,
    .swiglu          = swiglu_row,
    .max             = largest_of,
    .count_from      = count_at_least,
};

#if defined(BASE)
// ==================================================================================================== WHAT DEPENDS ON NO SET
// The choice of a set, the blocks of a product and its threads, and the functions of kernels.h.

// ---- the choice of a set
const char *const simd_names[] = {              // best first
#if defined(KERNELS_X86)
    "amx", "avx512bf16", "avx512vnni", "avx512", "avx2",
#endif
    TEXT(SET),
#if defined(KERNELS_X86)
    "amx-plain", "pairs-plain",
#endif
    NULL,
};
static Kernels simd;                            // the one in use

// *k = the set of that name -> 0; -1: this processor or its operating system lacks something.
static int simd_find(Kernels *k, const char *name) {
#if defined(KERNELS_X86)
    extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512vnni;
    const Kernels *sets[] = { &kernels_plain, &kernels_avx2, &kernels_avx512, &kernels_avx512vnni };
    int set = 0;                                // each has what those before it have
    __builtin_cpu_init();
    int can = !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ? 0             // and F16C
            : !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")
              || !__builtin_cpu_supports("avx512vl") ? 1
            : !__builtin_cpu_supports("avx512vnni") ? 2 : 3;
    while (set < 3 && strcmp(name, sets[set]->name)) set++;
    *k = *sets[set];
    return set > can ? -1 : set < 3 ? 0 : simd_x86(k, name);
#else
    *k = PASTE(kernels_, SET);
    return strcmp(name, k->name) ? -1 : 0;
#endif
}

int simd_set(const char *name) {
    Kernels k;
    for (const char *const *n = simd_names; *n; n++) {
        if ((name && strcmp(name, *n)) || simd_find(&k, *n)) continue;
        simd = k;
        return 0;
    }
    return -1;
}

// Runs before main, so no thread ever sees the choice change. The environment variable KVCOMP_SIMD (the name of
// a set) is for tests and comparisons; a set that cannot be had leaves the best there is.
__attribute__((constructor)) static void simd_choose(void) {
    const char *name = getenv("KVCOMP_SIMD");
    if (!name || simd_set(name)) simd_set(NULL);
}

const char *simd_name(void) { return simd.name; }

// ---- products of matrices
enum {
    K_CHUNK   = 1024,   // columns that one sum of a matrix product runs over
    T_BLOCK   = 128,    // rows of x that a job takes: with K_CHUNK columns they fill 512 KiB of L2
    ROW_BLOCK = 64,     // rows of W that a job takes
    SHORT_ROW = 512,    // columns of a row of W that needs no panels
    PANEL     = 4,      // rows of W that a decode step reads at a time
    WIDE_T    = 32,     // rows of x from which on a job widens its rows of W to f32 once
};

int bf16_terms = 3;     // numbers of bf16 that make one of x: --bf16-terms

// Products are never made side by side.
void *product_room(size_t bytes) {
    static char *room;
    static size_t have;
    if (bytes > have) {
        room = xrealloc(room, bytes + 63);
        have = bytes;
    }
    return room + (64 - (uintptr_t)room % 64) % 64;
}

// ---- weights in 8 bits
// A tensor of dtype DT_Q8 has the numbers of q8_0: a block is Q8_BLOCK columns of a row, an f16 scale d =
// max|w| / 127 and a byte round(w / d) a column. It lies in panels of 16 rows: the blocks of a panel follow each
// other, each with its 16 scales, and then, for every pair of columns, two bytes a row. Missing rows and columns
// are zeros.
static size_t q8_blocks(int cols) { return ((size_t)cols + Q8_BLOCK - 1) / Q8_BLOCK; }

// The block of row r and column c.
static char *q8_at(const Tensor *w, int r, int c) {
    return (char *)w->data + (r / LANES * q8_blocks(w->cols) + c / Q8_BLOCK) * Q8_PANEL;
}

// Where the byte of column i of row r stands in its block, r < 16.
static size_t q8_place(int r, int i) { return 2 * LANES + i / 2 * 2 * LANES + 2 * r + i % 2; }

size_t q8_tensor_bytes(int rows, int cols) {
    return ((size_t)rows + LANES - 1) / LANES * q8_blocks(cols) * Q8_PANEL;
}

// *d = the largest of |x| (n) / units. It is a NaN where some x is none, or is infinite. Returns the size of the
// largest number; 0 if that is infinite.
static float block_scale(uint16_t *d, const float *x, int n, float units) {
    float top = 0;
    int bad = 0;
    for (int i = 0; i < n; i++) {
        top = fmaxf(top, fabsf(x[i]));
        bad |= !isfinite(x[i]);
    }
    *d = f32_to_f16(bad ? NAN : top / units);
    return isfinite(top) ? top : 0;
}

// One block of n numbers: bytes q of the scale d, of which the largest number is 127. Returns what block_scale does.
static float q8_block_of(uint16_t *d, signed char *q, const float *x, int n) {
    float top = block_scale(d, x, n, 127), scale = f16_to_f32(*d);
    for (int i = 0; i < n; i++) {
        float u = scale > 0 ? rintf(x[i] / scale) : 0;
        if (u > 127) u = 127;               // the scale was rounded, so x may be past 127 of it
        if (u < -127) u = -127;
        q[i] = (signed char)u;
    }
    return top;
}

// to (q8_tensor_bytes) = the matrix w of another dtype. Returns the size of its largest weight that is
// finite: above Q8_MOST what stands in `to` is not the matrix.
float q8_store(char *to, const Tensor *w) {
    const Tensor q8 = { to, DT_Q8, w->rows, w->cols };
    float top = 0;
    memset(to, 0, q8_tensor_bytes(w->rows, w->cols));
    #pragma omp parallel for schedule(static) reduction(max:top)
    for (int r = 0; r < w->rows; r++)
        for (int c = 0; c < w->cols; c += Q8_BLOCK) {
            int n = min_int(Q8_BLOCK, w->cols - c);
            float x[Q8_BLOCK];
            signed char q[Q8_BLOCK];
            uint16_t d;
            char *block = q8_at(&q8, r, c);
            to_f32(x, (const char *)w->data + ((size_t)r * w->cols + c) * dtype_size(w->dtype), w->dtype, n);
            top = fmaxf(top, q8_block_of(&d, q, x, n));
            memcpy(block + r % LANES * 2, &d, sizeof d);
            for (int i = 0; i < n; i++) block[q8_place(r % LANES, i)] = (char)q[i];
        }
    return top;
}

void tensor_row(float *dst, const Tensor *w, int r) {
    if (w->dtype != DT_Q8) {
        to_f32(dst, (const char *)w->data + (size_t)r * w->cols * dtype_size(w->dtype), w->dtype, w->cols);
        return;
    }
    for (int c = 0; c < w->cols; c++) {
        const char *p = q8_at(w, r, c);
        uint16_t d;
        memcpy(&d, p + r % LANES * 2, sizeof d);
        dst[c] = f16_to_f32(d) * (signed char)p[q8_place(r % LANES, c % Q8_BLOCK)];
    }
}

// x (T,K) as the kernels of `kind` read it, in the room if not as it is. PAIRS: rounded to bf16. DT_Q8: as blocks of
// whole numbers, and *unit (T,blocks), what a 1 stands for in each.
static const void *form_of(const float *x, int T, int K, int kind, float **unit) {
    if (kind != PAIRS && kind != DT_Q8) return x;
    size_t blocks = kind == DT_Q8 ? q8_blocks(K) : 0, ldx = kind == DT_Q8 ? blocks * Q8_BLOCK : (size_t)K;
    uint16_t *to = product_room(T * (ldx * sizeof *to + blocks * sizeof **unit));
    if (blocks) *unit = (float *)(to + T * ldx);
    #pragma omp parallel for schedule(static) if ((size_t)T * K > 1 << 15)
    for (int t = 0; t < T; t++) {
        const float *row = x + (size_t)t * K;
        if (kind == DT_Q8) simd.whole_blocks((int16_t *)to + t * ldx, *unit + t * blocks, row, K);
        else for (int i = 0; i < K; i++) to[t * ldx + i] = bf16_nearest(row[i]);
    }
    return to;
}

// Numbers of the rows of W, of K columns, that a thread widens at a time.
static size_t wide_row_block(size_t K) { return ROW_BLOCK * min_size(K, K_CHUNK); }

// A job is a block of T_BLOCK rows of x and ROW_BLOCK rows of W. For few rows of x it finishes a panel before
// the next one, so that W streams in order; meanwhile each call asks for its share of the next panel. Short
// rows are one chunk, and in order anyway: the kernel gets all of them at once (a decode step of the shipped
// model, of 192 columns, takes .7 of the time that panels take). Where many rows of x meet the same 16-bit rows
// of W, these are widened once for all of them (room), instead of in registers for every MR. Weights in 8 bits lie in
// panels of LANES rows, which ask for themselves.
void matmul(float *y, const float *x, const Tensor *w, int T) {
    int pairs = w->dtype == DT_BF16 && terms_matter(bf16_terms);
    if (pairs && simd.product) {
        simd.product(y, x, w, T);
        return;
    }
    int K = w->cols, q8 = w->dtype == DT_Q8, panels = T <= 4 && K > SHORT_ROW && !q8;
    int panel = q8 ? LANES : panels ? PANEL : ROW_BLOCK, wide = T >= WIDE_T && w->dtype != DT_F32 && !pairs && !q8;
    size_t size = dtype_size(w->dtype), block_size = wide_row_block(K), ldy = (size_t)w->rows;
    size_t ldx = q8 ? q8_blocks(K) * Q8_BLOCK : (size_t)K, x_size = pairs || q8 ? 2 : 4;
    int kind = pairs ? PAIRS : w->dtype;
    float *unit = NULL;
    const void *form = form_of(x, T, K, kind, &unit);
    float *room = wide ? product_room(n_threads() * block_size * sizeof *room) : NULL;
    #pragma omp parallel for collapse(2) schedule(static) if ((size_t)T * w->rows * K > 1 << 16)
    for (int t = 0; t < T; t += T_BLOCK)
        for (int r0 = 0; r0 < w->rows; r0 += ROW_BLOCK)
            for (int r = r0, end = min_int(r0 + ROW_BLOCK, w->rows); r < end; r += panel)
                for (int k = 0; k < K; k += K_CHUNK) {
                    const char *row = (const char *)w->data + (size_t)r * K * size;
                    KernelBlock block = {
                        .y = y + t * ldy + r, .ldy = ldy,
                        .x = (const char *)form + (t * ldx + k) * x_size, .ldx = ldx,
                        .unit = q8 ? unit + (t * ldx + k) / Q8_BLOCK : NULL,
                        .w = q8 ? q8_at(w, r, k) : row + k * size, .ldw = K * size,
                        .m = min_int(T - t, T_BLOCK), .n = min_int(end - r, panel),
                        .K = (int)min_size(ldx - k, K_CHUNK),
                        .add = k > 0, .scale = 1,
                    };
                    block.next.p = row + (size_t)panel * (K + k) * size;
                    block.next.bytes = panels ? (size_t)panel * block.K * size : 0;
                    if (wide) {
                        float *own = room + thread_id() * block_size;
                        for (int i = 0; i < block.n; i++)
                            to_f32(own + (size_t)i * block.K, block.w + i * block.ldw, w->dtype, (size_t)block.K);
                        block.w = (const char *)own;
                        block.ldw = (size_t)block.K * sizeof *own;
                    }
                    simd.dots[wide ? DT_F32 : kind](&block);
                }
}

int terms_matter(int terms) { return terms <= simd.terms; }

// Whole numbers, terms and sums, or numbers that are rounded; else rows of W as f32.
size_t product_bytes(int dtype, size_t T, size_t n) {
    if (dtype == DT_Q8) return T * n * 9 / 4;
    if (dtype == DT_BF16 && terms_matter(bf16_terms)) return simd.product_room ? simd.product_room(T, n) : T * n * 2;
    return T >= WIDE_T && dtype != DT_F32 ? n_threads() * wide_row_block(n) * sizeof(float) : 0;
}

// ---- the products of attention for a tile of queries and rows
// They run inside threads and are never parallel themselves. Rows of K and V may be f32 tiles or the cache's
// own rows. The results are the same bits, and decode need not copy rows first.

// What is read after n rows of `bytes` bytes: what the caller says, or the rows of a cache that follow.
static Ahead rows_ahead(Ahead next, const void *rows, int kind, int n, size_t bytes) {
    int asks = kind != DT_F32;                  // tiles of f32 are in the cache already
    return next.p ? next : (Ahead){ (const char *)rows + asks * FEW_AHEAD, asks * n * bytes };
}

static void dots(float *y, size_t ldy, const void *x, const void *w, int kind, int m, int n, int K, int add,
                 float scale, Ahead next) {
    size_t row = kind_bytes(kind, K);
    simd.dots[kind](&(KernelBlock){
        .y = y, .ldy = ldy,
        .x = x, .ldx = (size_t)K,
        .w = w, .ldw = row,
        .m = m, .n = n, .K = K,
        .add = add, .scale = scale, .next = rows_ahead(next, w, kind, n, row),
    });
}

void scores_of(float *s, const void *q, const void *k, int dtype, int m, int n, int D, float scale, Ahead next) {
    dots(s, (size_t)n, q, k, dtype, m, n, D, 0, scale, next);
}

size_t q8_query_bytes(int m, int D) { return (size_t)(m / 4) * q8_pieces(D) * sizeof(Q8Query); }

// Missing rows of a group of four repeat the last one.
void q8_queries(Q8Query *to, const float *q, int m, int D) {
    int16_t t[Q8_COLS];
    for (int i = 0; i < m; i += 4)
        for (int c = 0; c < D; c += Q8_COLS, to++)
            for (int r = 0; r < 4; r++) {
                int n = min_int(D - c, Q8_COLS);
                float factor = simd.whole(t, q + (size_t)min_int(i + r, m - 1) * D + c, n, Q8_TOP, 1e-30f);
                for (int j = 0; j < 4; j++) to->factor[4 * r + j] = factor;
                for (int j = 0; j < n; j += 8) memcpy(to->t[j / 8][r], t + j, 8 * sizeof *t);
            }
}

void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add, Ahead next) {
    next = rows_ahead(next, v, dtype, n, kind_bytes(dtype, D));
    simd.mix[dtype](&(KernelBlock){ .y = o, .x = p, .w = v, .m = m, .n = n, .K = D, .add = add, .next = next });
}

void attn_scores(float *s, const float *q, const float *k, int m, int n, int D, float scale) {
    scores_of(s, q, k, DT_F32, m, n, D, scale, (Ahead){0});
}

void dots_of(float *y, size_t ldy, const float *x, const float *w, int m, int n, int K, int add) {
    dots(y, ldy, x, w, DT_F32, m, n, K, add, 1, (Ahead){0});
}

float dot_f32(const float *a, const float *b, int n) {
    float s;
    attn_scores(&s, a, b, 1, 1, n, 1);
    return s;
}

void exp_shift(float *x, float max, int n, float *sum) { simd.exp_shift(x, max, (size_t)n, sum); }
void softmax_columns(float *x, int n, int m, float *max, float *sum) { simd.softmax_columns(x, n, m, max, sum); }
float max_f32(const float *x, int n) { return simd.max(x, (size_t)n); }

// ---- rows
void to_f32(float *dst, const void *src, int dtype, size_t n) { simd.widen[dtype](dst, src, n); }

void q8_pack(char *o, const float *x, int D) {
    for (int b = 0, n; b < D; b += n, o += 2 + n) {
        uint16_t d;
        n = min_int(Q8_BLOCK, D - b);
        q8_block_of(&d, (signed char *)o + 2, x + b, n);
        memcpy(o, &d, 2);
    }
}

void q8_unpack(float *x, const char *o, int n, int D) { simd.unpack_q8(x, o, n, D); }

// y (n) = H y, in parts of m. Each step has the sum and the difference of those at i and i + step.
static void hadamard(float *y, int n, int m) {
    for (int step = 1; step < m; step *= 2)
        for (int first = 0; first < n; first += 2 * step)
            for (int i = first; i < first + step; i++) {
                float a = y[i], b = y[i + step];
                y[i] = a + b;
                y[i + step] = a - b;
            }
}

// A block of n values.
static void q4_pack_block(char *o, const float *x, int n) {
    float y[Q4_BLOCK];
    int m = q4_part(n), words = q4_words(n);
    uint16_t d;
    memcpy(y, x, (size_t)n * sizeof *y);
    hadamard(y, n, m);
    block_scale(&d, y, n, (float)(15 * m));
    uint32_t plane[4] = {0};
    float unit = f16_to_f32(d) * (float)m;
    for (int i = 0; i < n; i++) {
        float u = unit > 0 ? y[i] / unit * .5f + 8 : 8;
        if (u > 15) u = 15;             // the scale was rounded, so u may be past 15
        if (u < 0) u = 0;
        for (int b = 0; b < 4; b++) plane[b] |= (uint32_t)((int)u >> b & 1) << i;
    }
    memcpy(o, &d, 2);
    for (int b = 0; b < 4; b++) memcpy(o + 2 + 2 * words * b, &plane[b], 2 * (size_t)words);
}

void q4_pack(char *o, const float *x, int D) {
    for (int b = 0; b < D; b += Q4_BLOCK, o += Q4_BYTES) q4_pack_block(o, x + b, min_int(Q4_BLOCK, D - b));
}

// A shorter block, the last one of a row: dst (n).
static void q4_unpack_short(float *dst, const char *src, int n) {
    uint16_t word[9];
    int words = q4_words(n);
    memcpy(word, src, (size_t)(2 + 8 * words));
    for (int i = 0; i < n; i++) {
        int u = 0;
        for (int b = 0; b < 4; b++) u |= (word[1 + b * words + i / 16] >> i % 16 & 1) << b;
        dst[i] = (float)(2 * u - 15);
    }
    hadamard(dst, n, q4_part(n));
    for (int i = 0; i < n; i++) dst[i] *= f16_to_f32(word[0]);
}

void q4_unpack(float *x, const char *o, int n, int D) {
    size_t whole = (size_t)(D / Q4_BLOCK);
    int rest = D % Q4_BLOCK;
    if (!rest) {                        // one block behind the other
        simd.unpack_q4(x, o, n * whole);
        return;
    }
    for (int r = 0; r < n; r++, o += q4_bytes(D), x += D) {
        simd.unpack_q4(x, o, whole);
        q4_unpack_short(x + whole * Q4_BLOCK, o + whole * Q4_BYTES, rest);
    }
}

void from_f32(void *dst, const float *src, int dtype, size_t n) {
    uint16_t *h = dst;
    if (dtype == DT_F32) memcpy(dst, src, n * sizeof(float));
    else if (dtype == DT_F16) for (size_t i = 0; i < n; i++) h[i] = f32_to_f16(src[i]);
    else for (size_t i = 0; i < n; i++) h[i] = f32_to_bf16(src[i]);
}

void unpack_f16(uint16_t *h, const unsigned char *p, int n, int w) { simd.unpack(h, p, n, w); }

// A vector of weights as f32, in the room.
static const float *widened(const Tensor *w) {
    float *to = product_room(w->cols * sizeof *to);
    to_f32(to, w->data, w->dtype, (size_t)w->cols);
    return to;
}

void add_bias(float *y, const Tensor *b, int T) {
    if (!b->data) return;
    const float *wide = widened(b);
    for (int t = 0; t < T; t++, y += b->cols)
        for (int i = 0; i < b->cols; i++) y[i] += wide[i];
}

// y (T,n) = x / sqrt(mean(x^2) + eps) * w, row by row; y may be x.
void rmsnorm(float *y, const float *x, const Tensor *w, int T, int n, float eps) {
    const float *wide = widened(w);
    #pragma omp parallel for schedule(static) if ((size_t)T * n > 1 << 15)
    for (int t = 0; t < T; t++) {
        const float *a = x + (size_t)t * n;
        float *o = y + (size_t)t * n, inv = 1 / sqrtf(dot_f32(a, a, n) / (float)n + eps);
        for (int i = 0; i < n; i++) o[i] = a[i] * inv * wide[i];
    }
}

void swiglu(float *g, const float *u, size_t n) {
    const size_t piece = 4096;
    #pragma omp parallel for schedule(static) if (n > 1 << 15)
    for (size_t i = 0; i < n; i += piece) simd.swiglu(g + i, u + i, min_size(n - i, piece));
}

// ---- the k largest
void (*top_k_chosen)(const float *x, int n, const int *idx, int k);

// The k-th largest key (order_key) is found bit by bit, the highest first: a bit is set if k keys are at least
// as large with it. Each bit takes one pass over the values, as vectors. The search ends early when exactly k
// keys are left.
int top_k(const float *x, int n, int k, int *idx) {
    uint32_t key = 0;           // the bits so far
    int take = min_int(k, n), count = 0;
    int from = -1;              // keys >= key
    int above = 0;              // keys known to be larger than the k-th
    for (uint32_t bit = 1u << 31; take > 0 && bit && from != take; bit >>= 1) {
        int c = simd.count_from(x, n, key | bit);
        if (c < take) {
            above = c;
        } else {
            key |= bit;
            from = c;
        }
    }

    // Where more than k keys are left, the last ones that equal the k-th stay behind.
    int equal = from == take ? n : take - above;
    for (int i = 0; i < n && count < take; i++) {
        uint32_t own = order_key(x[i]);
        if (own > key || (own == key && equal-- > 0)) idx[count++] = i;
    }
    if (top_k_chosen && take > 0) top_k_chosen(x, n, idx, count);
    return count;
}
#endif
