// lib/kernels_x86.c - the tiles of Intel's AMX, which multiply matrices, for weights of bf16, behind the table of
// kernels.c. And the packed rows of PATS by AVX-512 VBMI. A reader of the methods never needs this file.
//
// It is compiled for AVX-512 with VNNI, which every processor with tiles has; what needs more says so by TARGET.
// simd_find in kernels.c sees to it that nothing here runs where it cannot. What the instructions of tiles compute
// stands beside them in plain C (walk_plain), from Intel's manual, and can take their place. So what is built on
// them is tested on machines without them.
#define _GNU_SOURCE
#include "kernels.h"
#if defined(KERNELS_X86)
#include <cpuid.h>
#include <float.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define TARGET(what) __attribute__((target(what)))
#define TARGET_AMX TARGET("amx-tile,amx-bf16")
// GCC does not know that tileloadd and ldtilecfg read memory: it must be told to have stored what they read.
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(enable)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

enum {
    TILE       = 16,    // rows of a tile
    TILE_COLS  = 32,    // columns of a tile of bf16: a step
    TILE_PANEL = 32,    // rows of W that a job takes
    TILE_BLOCK = 256,   // rows of x that a job takes: three terms of TILE_CHUNK columns fill 768 KiB of L2
    TILE_CHUNK = 512,   // columns that one sum runs over
    TILE_ROWS  = 512,   // rows of x that are split into terms at a time, a multiple of TILE_BLOCK
    TILE_BYTES = TILE * 64,
};

// ---- tiles
// A tile is up to 16 rows of 64 bytes: 16 floats, or 16 pairs of bf16.

// to (TILE,TILE) = from (TILE,TILE) with rows and columns exchanged, elements of 4 bytes.
// Sixteen registers of 16 elements. Rows 0 and 1, 2 and 3, .. are interleaved, then pairs of rows; now register 4 g + c
// has, in its part i of 128 bits, column 4 i + c of rows 4 g to 4 g + 3. The last steps bring the parts of one column
// together.
INLINE void tile_turn(void *to, const void *from) {
    __m512i a[TILE], b[TILE], *out = to;
    UNROLL for (int i = 0; i < TILE; i++) a[i] = _mm512_loadu_si512((const __m512i *)from + i);
    UNROLL for (int i = 0; i < TILE; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < TILE; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);              // parts 0 and 2
        __m512i odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);               // parts 1 and 3
        __m512i even2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(out + c, _mm512_shuffle_i32x4(even, even2, 0x88));
        _mm512_storeu_si512(out + 4 + c, _mm512_shuffle_i32x4(odd, odd2, 0x88));
        _mm512_storeu_si512(out + 8 + c, _mm512_shuffle_i32x4(even, even2, 0xdd));
        _mm512_storeu_si512(out + 12 + c, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
    }
}

// ---- products in tiles
// A tile of W is 16 of its rows by 32 columns, as they lie in memory. It meets a tile of x: 16 pairs
// of columns by 16 rows of x. Their product is a tile of y^T: 16 rows of W by 16 rows of x.
//
// Tiles are multiplied as numbers of bf16, so a number of x is split into `terms` of them
// (--bf16-terms): x rounded to bf16, what is left rounded, and what is left then. A bf16 has 8 bits and
// x has 24, so three terms are x exactly, and the error is that of the sums. Two leave at most 2^-17 of
// x, one leaves 2^-8. With 2,048 columns of random numbers the rms error of y, as a share of y's rms, is
//   three terms 1.4e-7     two 2.5e-6     one 1.7e-3     vectors (f32) 1.6e-7
//
// The order of a sum: 32 columns after 32 columns, and of those the first terms, the second, the third,
// all added to one tile (plain_product says in which order within the 32). The sums of TILE_CHUNK
// columns each are added in order; one longer sum would lose accuracy (2.6e-7 over all 2,048). Rows of
// x do not meet each other and what is missing is zeros, so a row of y has the same bits in every place
// of every block, and in decode, where a tile of x has one column. Subnormal numbers count as zero. An
// infinity in x gives a NaN, as a NaN does.
//
// Two tiles of W by two of x are four sums, and each tile that is loaded is used twice. A product takes
// 16 cycles, and its sum is ready after 52, so the four sums take turns.

// Where the tiles of a walk lie, and what it asks memory for.
typedef struct {
    const char *w;      // the first tile of W
    size_t row;         // bytes from a row of it to the next,
    size_t tile;        // to the second tile,
    size_t step;        // and to the next step's first tile
    const char *x[2];   // the first tiles of two groups of rows of x; the terms and steps follow
    size_t columns;     // of a tile of x
    int steps, terms;
    const char *next;   // rows of W that are read later: so many of them, ldw bytes apart
    int next_rows;
    size_t ldw;
} TileWalk;

// A function that walks: c = two tiles of W by one or two of x (groups), each (TILE,columns), summed over the steps:
// W 0 by x 0, W 1 by x 0, W 0 by x 1, W 1 by x 1.
typedef void Walk(float (*c)[TILE * TILE], const TileWalk *a, int groups);

// Subnormal numbers count as zero, as they come in and as they go out.
static float no_subnormal(float x) { return fabsf(x) < FLT_MIN ? 0 : x; }

// In plain C, c (TILE,columns) += a tile of W by one of x. The products of the first numbers of all pairs are summed,
// pair after pair, and so are the second ones; then the two sums are added, and that is added to c. Every sum is
// rounded to the nearest f32. A product of two bf16 has 16 bits, so it is exact in f32.
static void plain_product(float *c, const char *w, size_t row, const uint16_t *x, int columns) {
    float b[TILE_COLS][TILE];
    for (int k = 0; k < TILE_COLS; k++)
        for (int j = 0; j < columns; j++)
            b[k][j] = no_subnormal(bf16_to_f32(x[k / 2 * 2 * columns + 2 * j + k % 2]));
    for (int i = 0; i < TILE; i++, w += row, c += columns) {
        float sum[2][TILE] = {{0}};
        for (int k = 0; k < TILE_COLS; k++) {
            uint16_t h;
            memcpy(&h, w + 2 * k, sizeof h);
            float a = no_subnormal(bf16_to_f32(h)), *s = sum[k % 2];
            for (int j = 0; j < columns; j++) s[j] = no_subnormal(s[j] + a * b[k][j]);
        }
        for (int j = 0; j < columns; j++) c[j] = no_subnormal(c[j] + no_subnormal(sum[0][j] + sum[1][j]));
    }
}

static void walk_plain(float (*c)[TILE * TILE], const TileWalk *a, int groups) {
    size_t tile = TILE * 2 * a->columns;                // numbers of a tile of x
    memset(c, 0, 2 * (size_t)groups * sizeof *c);
    for (int i = 0; i < 2 * groups; i++)
        for (int n = 0; n < a->steps * a->terms; n++)
            plain_product(c[i], a->w + n / a->terms * a->step + i % 2 * a->tile, a->row,
                          (const uint16_t *)a->x[i / 2] + n * tile, (int)a->columns);
}

// By AMX, whose numbers of tiles must be literals: 0 to 3 are the sums, 4 and 5 tiles of W, 6 and 7 of x. Meanwhile
// the next rows are asked for: 64 bytes a step for each of them, but row after row, as memory has them, and into the
// second-level cache, because there may be as many bytes as the first has.
TARGET_AMX INLINE void walk_amx(float (*c)[TILE * TILE], const TileWalk *a, int groups) {
    const char *w = a->w, *x0 = a->x[0], *x1 = a->x[1], *next = a->next;
    size_t row = 4 * a->columns, tile = TILE * row;
    size_t at = 0, width = (size_t)a->steps * 64;       // of a row that is asked for
    MEMORY_IS_READ;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < a->steps; k++, w += a->step) {
        _tile_loadd(4, w, a->row);
        _tile_loadd(5, w + a->tile, a->row);
        for (int q = 0; q < a->terms; q++, x0 += tile, x1 += tile) {
            _tile_loadd(6, x0, row);
            if (groups == 2) _tile_loadd(7, x1, row);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (groups == 1) continue;
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = 0; i < a->next_rows; i++) {
            __builtin_prefetch(next + at, 0, 2);
            at += 64;
            if (at < width) continue;
            at = 0;
            next += a->ldw;
        }
    }
    _tile_stored(0, c[0], row);
    _tile_stored(1, c[1], row);
    if (groups == 1) return;
    _tile_stored(2, c[2], row);
    _tile_stored(3, c[3], row);
}

// A product of matrices in tiles: y (m,n) = x w^T, whose columns come in several calls: k0 to k1-1 in this one.
typedef struct {
    float *y;           // (m,n), after the call with k1 = K
    size_t ldy;
    float *sums;        // (groups of TILE rows of x,2,TILE,columns): y^T, from call to call
    size_t group;       // elements of sums from a group to the next
    const uint16_t *x;  // (groups,steps,terms,TILE,columns,2), as tile_terms makes it
    const char *w;      // (n,K)
    int m, n;           // n: at most TILE_PANEL
    int K, k0, k1;      // k0: a multiple of TILE_CHUNK
    int columns;        // of a tile of x: TILE, or 1 where x is a single row
    int terms;          // numbers of bf16 that make one of x
} Tiles;

// Steps of TILE_COLS columns; the last may be shorter.
static int tile_steps(int cols) { return (cols + TILE_COLS - 1) / TILE_COLS; }

// to (steps,terms,TILE,columns,2) = m <= columns rows of x, ldx apart, of n columns, step by step. Missing rows
// and columns are zeros.
static void tile_terms(uint16_t *to, const float *x, size_t ldx, int m, int n, int columns, int terms) {
    uint16_t part[3][TILE][TILE_COLS] __attribute__((aligned(64))) = {0};
    for (int k = 0; k < n; k += TILE_COLS) {
        for (int t = 0; t < m; t++) {
            float rest[TILE_COLS] = {0};
            if (n - k >= TILE_COLS) memcpy(rest, x + t * ldx + k, sizeof rest);
            else memcpy(rest, x + t * ldx + k, (size_t)(n - k) * sizeof *rest);
            for (int q = 0; q < terms; q++)
                for (int i = 0; i < TILE_COLS; i++) {
                    uint16_t term = part[q][t][i] = bf16_nearest(rest[i]);
                    rest[i] -= bf16_to_f32(term);
                }
        }
        for (int q = 0; q < terms; q++, to += TILE_COLS * columns) {
            if (columns == TILE) tile_turn(to, part[q]);
            else memcpy(to, part[q], TILE_COLS * sizeof *to);
        }
    }
}

// panel (steps,2,TILE,TILE_COLS) = rows of w (n, at most TILE_PANEL) of `cols` columns, ldw bytes
// apart, as tiles that lie side by side. Rows 4 KB apart would drive each other out of the first-level
// cache. Missing rows and columns are zeros.
INLINE void tile_panel(char *panel, const char *w, size_t ldw, int n, int cols) {
    if (n < TILE_PANEL || cols % TILE_COLS) memset(panel, 0, TILE_PANEL * TILE_CHUNK * 2);
    for (int r = 0; r < n; r++) {
        char *to = panel + r * 64;
        const char *from = w + r * ldw;
        int k = 0;
        for (; k + TILE_COLS <= cols; k += TILE_COLS, to += 2 * TILE_BYTES, from += 64)
            memcpy(to, from, 64);
        if (k < cols) memcpy(to, from, (size_t)(cols - k) * 2);
    }
}

// y (m,n) = the transpose of c (TILE,columns).
INLINE void tile_out(float *y, size_t ldy, const float *c, int columns, int m, int n) {
    float turned[TILE][TILE] __attribute__((aligned(64)));
    if (columns == TILE) tile_turn(turned, c);
    else memcpy(turned, c, TILE * sizeof *c);
    for (int t = 0; t < m; t++, y += ldy) {
        if (n == TILE) memcpy(y, turned[t], TILE * sizeof *y);
        else memcpy(y, turned[t], (size_t)n * sizeof *y);
    }
}

// A walk for the one or two groups of x that begin with row t. What it sums up is added to the sums
// of earlier columns. first: there are none; last: none follow, and the sums go to y.
TARGET_AMX INLINE void tile_groups(const Tiles *a, const TileWalk *walk, Walk *sums_of, int t, int first, int last) {
    float c[4][TILE * TILE] __attribute__((aligned(64)));
    size_t n_sums = TILE * walk->columns;
    int groups = a->m - t > TILE ? 2 : 1;
    sums_of(c, walk, groups);
    for (int i = 0; i < 2 * groups; i++) {
        int t0 = t + i / 2 * TILE, r0 = i % 2 * TILE;
        float *sums = a->sums + t0 / TILE * a->group + i % 2 * n_sums;
        for (size_t j = 0; j < n_sums && !first; j++) c[i][j] += sums[j];
        if (!last) memcpy(sums, c[i], n_sums * sizeof *sums);
        else if (r0 < a->n)
            tile_out(a->y + t0 * a->ldy + r0, a->ldy, c[i], a->columns, min_int(a->m - t0, TILE),
                     min_int(a->n - r0, TILE));
    }
}

// TILE_CHUNK columns after TILE_CHUNK columns. A lone group of x reads W where it lies,
// and asks for the columns after these, or after the last ones for the next panel. Where more groups
// meet a panel of W, it is copied (tile_panel), and they ask for these columns of the next panel, each
// two of them for their share of its rows.
TARGET_AMX INLINE void tile_block(const Tiles *a, Walk *sums_of) {
    char panel[TILE_PANEL * TILE_CHUNK * 2] __attribute__((aligned(64)));
    size_t ldw = (size_t)a->K * 2, group = (size_t)tile_steps(a->K) * a->terms * a->columns * 64;
    int lone = a->m <= TILE, pairs = (a->m + 2 * TILE - 1) / (2 * TILE);
    for (int k = a->k0; k < a->k1; k += TILE_CHUNK) {
        int cols = min_int(a->k1 - k, TILE_CHUNK), last = k + cols == a->K;
        const char *w = a->w + (size_t)k * 2, *below = w + TILE_PANEL * ldw;
        const char *x = (const char *)a->x + (size_t)k / TILE_COLS * a->terms * a->columns * 64;
        TileWalk walk = {
            .w = w, .row = ldw, .tile = TILE * ldw, .step = 64,
            .columns = (size_t)a->columns, .steps = tile_steps(cols), .terms = a->terms,
            .next = !lone ? below : last ? a->w + TILE_PANEL * ldw : w + TILE_CHUNK * 2, .ldw = ldw,
        };
        if (!lone || a->n < TILE_PANEL || cols % TILE_COLS) {
            tile_panel(panel, w, ldw, a->n, cols);
            walk.w = panel;
            walk.row = 64;
            walk.tile = TILE_BYTES;
            walk.step = 2 * TILE_BYTES;
        }
        for (int p = 0; p < pairs; p++) {
            int from = p * TILE_PANEL / pairs, to = (p + 1) * TILE_PANEL / pairs;
            walk.x[0] = x + 2 * p * group;
            walk.x[1] = walk.x[0] + group;
            walk.next_rows = to - from;
            tile_groups(a, &walk, sums_of, p * 2 * TILE, k == 0, last);
            walk.next += (to - from) * ldw;
        }
    }
}

TARGET_AMX static void tile_block_plain(const Tiles *a) { tile_block(a, walk_plain); }

// The same between the instructions that give every tile its shape and end the use of tiles.
TARGET_AMX static void tile_block_amx(const Tiles *a) {
    struct {
        uint8_t palette;                // 1: the eight tiles of AMX
        uint8_t start, zero[14];
        uint16_t bytes[16];             // of a row, for each tile
        uint8_t rows[16];
    } shape = { .palette = 1 };
    for (int t = 0; t < 8; t++) {
        shape.rows[t] = TILE;
        shape.bytes[t] = (uint16_t)(t == 4 || t == 5 ? 64 : 4 * a->columns);        // W; x and sums
    }
    MEMORY_IS_READ;
    _tile_loadconfig(&shape);
    tile_block(a, walk_amx);
    _tile_release();
}

// Kernels.product in tiles, TILE_ROWS rows of x after TILE_ROWS rows. First x is split into terms. Then a job is
// at most TILE_BLOCK rows of x (as many in each, about) and TILE_PANEL rows of W. A single group of x goes
// through all columns of a panel, so that W streams in order. Several go through TILE_CHUNK columns of
// all panels before the next, so that their terms stay in the second-level cache; a thread meets the
// same jobs again. Sums wait as tiles, because to exchange their rows and columns takes far longer than
// to add them.
static void product_tiles(float *y, const float *x, const Tensor *w, int T, void (*block_of)(const Tiles *)) {
    for (; T > TILE_ROWS; T -= TILE_ROWS, y += (size_t)TILE_ROWS * w->rows, x += (size_t)TILE_ROWS * w->cols)
        product_tiles(y, x, w, TILE_ROWS, block_of);
    int K = w->cols, columns = T == 1 ? 1 : TILE, terms = bf16_terms;
    int part = T <= TILE ? K : TILE_CHUNK, groups = (T + TILE - 1) / TILE;
    int pairs = (groups + 1) / 2, blocks = (T + TILE_BLOCK - 1) / TILE_BLOCK;
    int block = (pairs + blocks - 1) / blocks * 2 * TILE;
    size_t step = (size_t)terms * TILE_COLS * columns, group = tile_steps(K) * step;
    size_t panels = ((size_t)w->rows + TILE_PANEL - 1) / TILE_PANEL, panel = TILE_PANEL * columns;
    size_t ldy = (size_t)w->rows, ldx = (size_t)K;
    uint16_t *split = product_room(groups * (group * sizeof *split + panels * panel * sizeof(float)));
    float *sums = (float *)(split + groups * group);
    #pragma omp parallel if ((size_t)T * w->rows * K > 1 << 16)
    {
        #pragma omp for collapse(2) schedule(static)
        for (int g = 0; g < groups; g++)
            for (int k = 0; k < K; k += TILE_CHUNK)
                tile_terms(split + g * group + k / TILE_COLS * step, x + g * TILE * ldx + k, ldx,
                             min_int(T - g * TILE, TILE), min_int(K - k, TILE_CHUNK), columns, terms);

        for (int k = 0; k < K; k += part) {
            #pragma omp for collapse(2) schedule(static) nowait
            for (int t = 0; t < T; t += block)
                for (int r = 0; r < w->rows; r += TILE_PANEL)
                    block_of(&(Tiles){
                        .y = y + t * ldy + r, .ldy = ldy,
                        .sums = sums + (t / TILE * panels + r / TILE_PANEL) * panel,
                        .group = panels * panel,
                        .x = split + t / TILE * group,
                        .w = (const char *)w->data + (size_t)r * K * 2,
                        .m = min_int(T - t, block), .n = min_int(w->rows - r, TILE_PANEL),
                        .K = K, .k0 = k, .k1 = min_int(k + part, K),
                        .columns = columns, .terms = terms,
                    });
        }
    }
}

static void product_amx(float *y, const float *x, const Tensor *w, int T) { product_tiles(y, x, w, T, tile_block_amx); }

static void product_plain(float *y, const float *x, const Tensor *w, int T) {
    product_tiles(y, x, w, T, tile_block_plain);
}

// Kernels.product_room
static size_t room_amx(size_t T, size_t n) { return min_size(T, TILE_ROWS) * n * (2 * (size_t)bf16_terms + 4); }

// ---- packed rows by VBMI: 32 elements from the bytes they stand in, 4 from each lane of 64 bits
// For every w, the 8 bytes of each lane, and for each byte of a result the bit of the lane it begins at.
static struct {
    unsigned char bytes[64], bits[64];
} packed[17];

// Elements 4j .. 4j+3 start at bit 4jw, on a whole or a half byte. An element is to fill the top w bits of an
// f16, so the 16 bits begin 16 - w bits before the element does.
static void packed_init(void) {
    for (int w = 1; w <= 16; w++)
        for (int j = 0; j < 8; j++)
            for (int b = 0; b < 8; b++) {
                int start = j * w % 2 * 4 + b / 2 * w, bit = start + w - 16 + b % 2 * 8;
                packed[w].bytes[8 * j + b] = (unsigned char)(j * w / 2 + b);
                packed[w].bits[8 * j + b] = (unsigned char)(bit & 63);
            }
}

// Kernels.unpack: groups of 32 elements, four at a time while 64 bytes can be read from the start of each, then
// one at a time with masks.
TARGET("avx512vbmi") INLINE __m512i unpack_32(__m512i x, __m512i bytes, __m512i bits, __m512i kept) {
    x = _mm512_multishift_epi64_epi8(bits, _mm512_permutexvar_epi8(bytes, x));
    return _mm512_and_si512(x, kept);
}

TARGET("avx512vbmi") static void unpack_vbmi(uint16_t *h, const unsigned char *p, int n, int w) {
    __m512i bytes = _mm512_loadu_si512(packed[w].bytes), bits = _mm512_loadu_si512(packed[w].bits);
    __m512i kept = _mm512_set1_epi16((short)(0xffff << (16 - w)));
    int i = 0;
    for (; (n - i - 96) * w >= 512; i += 128, p += 16 * w)
        UNROLL for (int j = 0; j < 4; j++) {
            __m512i x = _mm512_loadu_si512(p + 4 * w * j);
            _mm512_storeu_si512(h + i + 32 * j, unpack_32(x, bytes, bits, kept));
        }
    for (; i < n; i += 32, p += 4 * w) {
        int m = min_int(n - i, 32);
        __m512i x = _mm512_maskz_loadu_epi8(~(__mmask64)0 >> (64 - (m * w + 7) / 8), p);
        _mm512_mask_storeu_epi16(h + i, ~(__mmask32)0 >> (32 - m), unpack_32(x, bytes, bits, kept));
    }
}

// ---- the sets
// AMX with bf16, and Linux lets this process use it. The tiles' 8 KB are part of what the system saves for a
// thread, so a process has to ask once.
static int amx_can(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return 0;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
#else
    return 0;
#endif
}

// Adds to *k, which is avx512vnni, what the set of that name has -> 0; -1: this processor cannot.
int simd_x86(Kernels *k, const char *name) {
    int amx = !strcmp(name, "amx"), bf16 = !strcmp(name, "avx512bf16"), vnni = !strcmp(name, "avx512vnni");
    if (__builtin_cpu_supports("avx512vbmi")) {
        packed_init();
        k->unpack = unpack_vbmi;
    }
    if (vnni) return 0;
    k->name = name;
    k->terms = 1;
    if (bf16) k->dots[PAIRS] = k->dots[PAIRS_BF16];
    if (bf16) return __builtin_cpu_supports("avx512bf16") ? 0 : -1;
    if (!strcmp(name, "pairs-plain")) return 0;
    k->product = amx ? product_amx : product_plain;
    k->product_room = room_amx;
    k->terms = 3;
    return amx && !amx_can() ? -1 : 0;
}
#endif  // KERNELS_X86
