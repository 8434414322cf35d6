// lib/kernels.c - see kernels.h. The kernels are written once; this file includes itself once for each
// instruction set, with SIMD defined.
#ifndef SIMD
#define _GNU_SOURCE
#include "kernels.h"
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <stb/stb_ds.h>

void (*top_k_chosen)(const float *x, int n, const int *idx, int k);

// ==================================================================================================== NUMBERS AND KERNELS
// Everything that is arithmetic only: products of matrices, the two products of attention,
// exponentials, conversions between f32 and the 16-bit formats, and the k largest of n numbers.
//
// One kernel serves weights and attention: a block of dot products y (m,n) = x (m,K) w (n,K)^T. Its
// right side is f32, f16 or bf16 and is widened to f32 in registers. Keys and values of q8_0 have
// kernels of their own, which read them as they are stored (D89). All kernels compute on vectors
// of 16 floats, the lanes. An instruction set (plain C, AVX2, AVX-512, NEON) supplies the vector type
// and some operations on it. The kernels are written once over these operations and compiled once
// for each set. The best set that the processor has is chosen when the program starts.
//
// A set may have tiles beside its vectors: Intel AMX, instructions that multiply two small matrices of
// bf16. Products with weights of bf16 are then made of those (see "products in tiles"), with the
// accuracy of f32. Weights of f32, f16 and q8_0 and attention stay with the vectors: f16 has 11 bits
// where bf16 has 8, so that its weights would have to be split, too.
//
// The order of every sum is fixed. In a dot product, lane j adds the products at k = j, j+16, j+32,
// ... with fused multiply-adds; then the 16 lanes are folded, 8 onto 8, 4 onto 4, 2 onto 2 and 1
// onto 1. A product of matrices does this for every K_CHUNK columns and adds the results of the
// chunks in order. No tile size, batch, thread count or position in a block has an influence. A row
// of a product is therefore the same bits in decode and in prefill, and AVX2, AVX-512 and NEON give
// the same bits. Plain C has no fused multiply-add, because fmaf would be a call into the library, and
// agrees with them up to rounding. So do products in tiles and in pairs, whose orders are others, as
// fixed.
//
// A product with weights in 8 bits (DT_Q8) is made of whole numbers: see the kernels' part about it.
//
// The dot-product instruction that vectors have for bf16 does twice the multiply-adds of f32, but both
// of its factors are bf16. So the accuracy of f32, which takes x = hi + lo, would gain nothing by it. It
// is used where x may be rounded to bf16 (--bf16-terms 1; see "products in pairs").
//
// Reading order: the vector in plain C, the kernels, and then, if wanted, the same vector in AVX2,
// AVX-512 and NEON. Tiles and pairs come after vectors in each of these places.

enum {
    LANES     = 16,     // floats of a vector
    K_CHUNK   = 1024,   // columns that one sum of a matrix product runs over
    T_BLOCK   = 128,    // rows of x that a job takes: with K_CHUNK columns they fill 512 KiB of L2
    ROW_BLOCK = 64,     // rows of W that a job takes
    SHORT_ROW = 512,    // columns of a block of attention, at most

    // products in tiles
    TILE       = 16,    // rows of a tile
    TILE_PAIRS = 16,    // pairs of columns of a tile of bf16
    TILE_COLS  = 32,    // columns of it: a step
    TILE_PANEL = 32,    // rows of W that a job takes
    TILE_BLOCK = 256,   // rows of x that a job takes: three terms of TILE_CHUNK columns fill 768 KiB of L2
    TILE_CHUNK = 512,   // columns that one sum runs over
    TILE_ROWS  = 512,   // rows of x that are split into terms at a time, a multiple of TILE_BLOCK
    FEW_AHEAD = 4096,   // bytes ahead of a key that its tile asks for
    Q8_PANEL  = LANES * (2 + Q8_BLOCK),     // bytes of 16 rows by 32 columns of DT_Q8
};

// Stands before a loop over registers. They have no index, so the compiler must write the loop out;
// otherwise the vectors lie in memory, and products take about three times as long.
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// A block of dot products: y (m,n) = scale * x (m,K) w (n,K)^T, or y += that.
typedef struct {
    float *y;           // (m,n)
    size_t ldy;         // elements from a row of y to the next
    const float *x;     // (m,K)
    size_t ldx;         // elements from a row of x to the next
    const uint16_t *x16;        // pairs: x as bf16
    const struct Q8Query *q8;   // dots_q8: x as integers, group after group of four rows
    const char *w;      // (n,K), of the dtype whose function is called
    size_t ldw;         // bytes from a row of w to the next
    int m, n, K;
    int add;            // 1: y += the products; 0: y = the products
    float scale;
    Ahead next;         // memory that is read after this block; none: the rows of w that follow
} Dots;

// The same for 16 rows of w of dtype DT_Q8, by x as whole numbers. It goes over `blocks` blocks of
// Q8_BLOCK columns.
typedef struct {
    float *y;           // (m,n)
    size_t ldy;
    const int16_t *x;   // (m,blocks,Q8_BLOCK)
    const float *scale; // (m,blocks)
    size_t all;         // blocks of a whole row of x, from one to the next
    const char *w;      // (blocks,Q8_PANEL)
    int m, n, blocks;   // n: rows of w that there are
    int add;            // 1: y += the products
} Dots8;

// A product of matrices in tiles: y (m,n) = x w^T, whose columns come in several calls: k0 to k1-1 in
// this one. x is as Simd.tile_x makes it, w is bf16.
typedef struct {
    float *y;           // (m,n), after the call with k1 = K
    size_t ldy;
    float *sums;        // (groups of TILE rows of x,2,TILE,columns): y^T, from call to call
    size_t group;       // elements of sums from a group to the next
    const uint16_t *x;  // (groups,steps,terms,TILE_PAIRS,columns,2)
    const char *w;      // (n,K)
    int m, n;           // n: at most TILE_PANEL
    int K, k0, k1;      // k0: a multiple of TILE_CHUNK
    int columns;        // of a tile of x: TILE, or 1 where x is a single row
    int terms;          // numbers of bf16 that make one of x
} Tiles;

// A block of weighted sums of rows: o (m,D) = p (m,n) v (n,D), or o += that. Rows lie side by side.
typedef struct {
    float *o;           // (m,D)
    const float *p;     // (m,n)
    const char *v;      // (n,D), of the dtype whose function is called
    int m, n, D;
    int add;            // 1: o += the sums; 0: o = the sums
    Ahead next;         // memory that is read after this block; none: the rows of v that follow
} Mix;

// The kernels of one instruction set. An array has an entry for each dtype (DT_F32 .. DT_BF16) of
// the right side of a product, or of src.
typedef struct {
    const char *name;
    void (*dots[3])(const Dots *a);
    void (*dots8)(const Dots8 *a);

    // q (blocks,Q8_BLOCK) and scale (blocks): x (n) as whole numbers times a scale for each block
    void (*whole)(int16_t *q, float *scale, const float *x, int n);
    void (*mix[3])(const Mix *a);

    // products with weights of bf16 in tiles; NULL: the set has none. tile_x: to = m <= columns rows
    // of x, ldx apart, of n columns, step by step: (steps,terms,TILE_PAIRS,columns,2)
    void (*tile_x)(uint16_t *to, const float *x, size_t ldx, int m, int n, int columns, int terms);
    void (*tiles)(const Tiles *a);

    // products with weights of bf16 by x of bf16; NULL: the set has none. to (n) = x (n), rounded
    void (*pairs)(const Dots *a);
    void (*round_bf16)(uint16_t *to, const float *x, size_t n);

    // dots and mix with rows of format q8_0, of whole blocks, as w and v. dots_q8 takes x as integers
    // (D89), as integers_q8 makes them: to = m <= 4 rows of x, ldx apart, of n <= Q8_COLS columns.
    void (*integers_q8)(struct Q8Query *to, const float *x, size_t ldx, int m, int n);
    void (*dots_q8)(const Dots *a);
    void (*mix_q8)(const Mix *a);

    // dst (n) = src (n) as f32
    void (*widen[3])(float *dst, const void *src, size_t n);

    // dst (n) = src (n) as f16
    void (*narrow_f16)(uint16_t *dst, const float *src, size_t n);

    // dst (n,D) = the n rows of format q8_0 (section 2) at src
    void (*unpack_q8)(float *dst, const char *src, int n, int D);

    // x (n) = e^(x - max), and *sum += them
    void (*exp_shift)(float *x, float max, size_t n, float *sum);

    // x (n,m) = 2^(x - max) down each column; max and sum (m) go on from what earlier rows left
    void (*softmax_columns)(float *x, int n, int m, float *max, float *sum);

    // g (n) = g / (1 + e^-g) * u
    void (*swiglu)(float *g, const float *u, size_t n);

    // the largest of x (n), NaNs passed over; -INFINITY when there is none
    float (*max)(const float *x, size_t n);

    // the sum of w (n) where order_key(x) >= key; w NULL: the number of such places
    int (*sum_from)(const float *x, const int *w, int n, uint32_t key);

    // idx = the places from i to n-1 where order_key(x) >= key, ascending -> how many
    int (*list_from)(const float *x, int i, int n, uint32_t key, int *idx);
} Simd;

// Four rows of x as integers t of 16 bits, for products with the bytes of q8_0 (D89): x is factor t.
// Where a block's integers stand depends on the instruction set (ints_arrange).
enum {
    Q8_COLS  = 512,     // columns that one factor holds for, at most
    Q8_WORDS = 160,     // room for a block's 4 x 32 integers, and for 16 sums of 32 bits
    Q8_ROWS  = 64,      // rows of w whose products are made before they are stored
    Q8_TOP   = 32512,   // the largest t, 127 * 256: its upper byte stays within 127
};
typedef struct Q8Query {
    short block[Q8_COLS / Q8_BLOCK][Q8_WORDS];
    float factor[LANES];                        // lane 4i + j: of row i
} Q8Query __attribute__((aligned(64)));

// ---- memory that is read next
// A kernel asks for the memory that is read after it (a prefetch) while it computes, a little at a
// time. A burst of requests would fill the queue to memory and then leave it idle.

// 1: weights of a decode step are asked into the second-level cache, because two panels of them and x
// do not fit into the first (Zen 4 has 32 KB). Speed alone depends on it (NOTES 10).
static int ask_l2;

// Asks for the line of weights at p.
static inline __attribute__((always_inline)) void ask_weights(const char *p) {
    if (ask_l2) __builtin_prefetch(p, 0, 2);
    else __builtin_prefetch(p);
}

// The bytes to ask for at each of `parts` times, in whole cache lines. A loop of products computes
// this before it begins, because the division is too slow inside.
static inline __attribute__((always_inline)) size_t ahead_share(Ahead a, size_t parts) {
    return (a.bytes / parts + 63) / 64 * 64;
}

// Part number `part` of the memory cut into `parts`; nothing where the parts before it cover all.
static Ahead ahead_part(Ahead a, size_t part, size_t parts) {
    size_t each = ahead_share(a, parts);
    size_t from = part * each;
    if (from >= a.bytes) return (Ahead){0};
    return (Ahead){ a.p + from, min_size(a.bytes - from, each) };
}

// ---- the vector in plain C
// Here stands what each operation of the vector means. The names end in _plain, those of the same
// operations in the other sets in _avx2, _avx512 and so on. The kernels say vec_add and mean that of
// the set for which they are compiled.
//
// The 16 lanes are four quarters of four floats. Four floats are a type of the compiler
// (vector_size, in GCC and clang): + - * / and comparisons work on each of the four, and a
// comparison gives -1 (all bits set) or 0. They become SSE2, NEON or whatever the processor has. A
// struct of 16 floats and loops over them would mean the same, but GCC keeps such a struct in
// memory, and the products take up to four times as long.
#define TARGET_plain
#define INLINE_plain static inline __attribute__((always_inline))
#define EACH_QUARTER(i) UNROLL for (int i = 0; i < 4; i++)

enum {                                          // see the list of names
    MR_plain = 1, NR_plain = 2, N1_plain = 2,
    MX_plain = 1, NV_plain = 2, MS_plain = 1, VS_plain = 2,
    M8_plain = 2,
};
typedef float    Float4   __attribute__((vector_size(16)));
typedef int32_t  Int4     __attribute__((vector_size(16)));
typedef uint16_t Uint16x4 __attribute__((vector_size(8)));
typedef struct { Float4 q[4]; } Vec_plain;      // lanes 0 to 3, 4 to 7, 8 to 11, 12 to 15

// Every lane is x.
INLINE_plain Vec_plain vec_all_plain(float x) {
    Vec_plain v;
    EACH_QUARTER(i) v.q[i] = (Float4){ x, x, x, x };
    return v;
}

// x + y
INLINE_plain Vec_plain vec_add_plain(Vec_plain x, Vec_plain y) {
    EACH_QUARTER(i) x.q[i] = x.q[i] + y.q[i];
    return x;
}

// x y
INLINE_plain Vec_plain vec_mul_plain(Vec_plain x, Vec_plain y) {
    EACH_QUARTER(i) x.q[i] = x.q[i] * y.q[i];
    return x;
}

// x / y
INLINE_plain Vec_plain vec_div_plain(Vec_plain x, Vec_plain y) {
    EACH_QUARTER(i) x.q[i] = x.q[i] / y.q[i];
    return x;
}

// x y + z, rounded after the product and after the sum; the other sets round once.
INLINE_plain Vec_plain vec_fma_plain(Vec_plain x, Vec_plain y, Vec_plain z) {
    EACH_QUARTER(i) x.q[i] = x.q[i] * y.q[i] + z.q[i];
    return x;
}

// x where the mask is -1, y where it is 0.
INLINE_plain Float4 choose_plain(Int4 mask, Float4 x, Float4 y) {
    return (Float4)((mask & (Int4)x) | (~mask & (Int4)y));
}

// x > y ? x : y, so y where one of the two is a NaN.
INLINE_plain Vec_plain vec_max_plain(Vec_plain x, Vec_plain y) {
    EACH_QUARTER(i) x.q[i] = choose_plain(x.q[i] > y.q[i], x.q[i], y.q[i]);
    return x;
}

// x < y ? x : y, so y where one of the two is a NaN.
INLINE_plain Vec_plain vec_min_plain(Vec_plain x, Vec_plain y) {
    EACH_QUARTER(i) x.q[i] = choose_plain(x.q[i] < y.q[i], x.q[i], y.q[i]);
    return x;
}

// x 2^k, where k holds integers. The powers are made of their bits: e + 127 is the exponent field
// of 2^e. They are two factors, 2^(k/2) each, because 2^k alone may be below the smallest float.
INLINE_plain Vec_plain vec_scale_plain(Vec_plain x, Vec_plain k) {
    EACH_QUARTER(i) {
        Int4 e = __builtin_convertvector(k.q[i], Int4), half = e >> 1;
        x.q[i] = x.q[i] * (Float4)((half + 127) << 23) * (Float4)((e - half + 127) << 23);
    }
    return x;
}

// Four f16 numbers u as f32. f16 stores its exponent plus 15, f32 plus 127. So the bits of u, moved
// to where f32 has them, are a number that is 2^112 times too small. The product corrects this, for
// subnormals too. Infinity and NaN get the highest exponent.
INLINE_plain Float4 f16_to_f32_plain(Int4 u) {
    Int4 special = (u & 0x7c00) == 0x7c00, sign = (u & 0x8000) << 16;
    Float4 f = (Float4)((u & 0x7fff) << 13) * 0x1p112f;
    return (Float4)((Int4)f | (special & 0x7f800000) | sign);
}

// The n elements of dtype at p as f32; the lanes from n on are 0.
INLINE_plain Vec_plain vec_load_plain(const void *p, int dtype, int n) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    char part[LANES * 4] = {0};
    const char *at = n < LANES ? memcpy(part, p, (size_t)n * size) : p;
    Vec_plain x;
    EACH_QUARTER(i) {
        if (dtype == DT_F32) {
            memcpy(&x.q[i], at + i * sizeof x.q[i], sizeof x.q[i]);     // at once: 3 times slower
            continue;
        }
        Uint16x4 h;
        memcpy(&h, at + i * sizeof h, sizeof h);
        Int4 u = __builtin_convertvector(h, Int4);
        x.q[i] = dtype == DT_F16 ? f16_to_f32_plain(u) : (Float4)(u << 16);
    }
    return x;
}

// 16 integers of a byte each.
INLINE_plain Vec_plain vec_load_bytes_plain(const signed char *p) {
    float lane[LANES];
    Vec_plain x;
    for (int i = 0; i < LANES; i++) lane[i] = p[i];
    memcpy(&x, lane, sizeof x);
    return x;
}

// 16 whole numbers of 32 bits; and two for each lane that came as bytes.
typedef struct { Int4 q[4]; } Ints_plain;
typedef struct { Int4 even[4], odd[4]; } Pairs_plain;

INLINE_plain Ints_plain ints_zero_plain(void) {
    return (Ints_plain){0};
}

INLINE_plain Ints_plain ints_add_plain(Ints_plain a, Ints_plain b) {
    EACH_QUARTER(i) a.q[i] += b.q[i];
    return a;
}

// Bytes 2 i and 2 i + 1 at p go to lane i.
INLINE_plain Pairs_plain pairs_load_plain(const char *p) {
    Pairs_plain w;
    EACH_QUARTER(i) {
        Uint16x4 h;
        memcpy(&h, p + i * sizeof h, sizeof h);
        Int4 u = __builtin_convertvector(h, Int4);
        w.even[i] = u << 24 >> 24;
        w.odd[i] = u << 16 >> 24;
    }
    return w;
}

// a + even x[0] + odd x[1]
INLINE_plain Ints_plain ints_madd_plain(Ints_plain a, Pairs_plain w, const int16_t *x) {
    EACH_QUARTER(i) a.q[i] += w.even[i] * x[0] + w.odd[i] * x[1];
    return a;
}

// The integers as floats.
INLINE_plain Vec_plain vec_of_ints_plain(Ints_plain a) {
    Vec_plain x;
    EACH_QUARTER(i) x.q[i] = __builtin_convertvector(a.q[i], Float4);
    return x;
}

// p (n) = the first n lanes.
INLINE_plain void vec_store_plain(float *p, Vec_plain x, int n) {
    memcpy(p, &x, (size_t)n * sizeof *p);
}

// p (16) = the lanes as f16.
INLINE_plain void vec_store_f16_plain(uint16_t *p, Vec_plain x) {
    float lane[LANES];
    memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < LANES; i++) p[i] = f32_to_f16(lane[i]);
}

// The sum of the lanes, in the order that every set keeps.
INLINE_plain float vec_fold_plain(Vec_plain x) {
    Float4 y = x.q[0] + x.q[2], z = x.q[1] + x.q[3];        // lanes 8 to 15 onto 0 to 7
    y = y + z;                                              // lanes 4 to 7 onto 0 to 3
    return (y[0] + y[2]) + (y[1] + y[3]);                   // 2 and 3 onto 0 and 1, and 1 onto 0
}

// out (n) = scale * vec_fold of each of a (n).
INLINE_plain void vec_folds_plain(float *out, const Vec_plain *a, int n, float scale) {
    for (int i = 0; i < n; i++) out[i] = vec_fold_plain(a[i]) * scale;
}

// The largest lane; no lane is a NaN.
INLINE_plain float vec_largest_plain(Vec_plain x) {
    Float4 y = choose_plain(x.q[0] > x.q[1], x.q[0], x.q[1]);
    Float4 z = choose_plain(x.q[2] > x.q[3], x.q[2], x.q[3]);
    y = choose_plain(y > z, y, z);
    return fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
}

// Bit i is 1 where order_key(p[i]) >= key, for the 16 floats at p.
INLINE_plain uint32_t vec_at_least_plain(const float *p, uint32_t key) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(order_key(p[i]) >= key) << i;
    return bits;
}

// -- integers: products of rows in 16 bits with q8_0's bytes (D89). Quarter i of Ints belongs to row i
// of four.
// p (16) = the lower 16 bits of each lane. Of an integer plus 1.5 * 2^23 those are the integer.
INLINE_plain void vec_store_words_plain(short *p, Vec_plain x) {
    uint32_t lane[LANES];
    memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < LANES; i++) p[i] = (short)lane[i];
}

// to = the 32 integers of a block of each of four rows, x[i] on: one row after the other.
INLINE_plain void ints_arrange_plain(short *to, const short (*x)[Q8_COLS]) {
    for (int i = 0; i < 4; i++) memcpy(to + i * Q8_BLOCK, x[i], Q8_BLOCK * sizeof *to);
}

// Each row's integers times the 32 bytes at k. The four lanes of quarter i add up to row i's sum. A
// sum of products of shorts is a loop that compilers know an instruction for.
INLINE_plain Ints_plain ints_block_plain(const short *x, const signed char *k) {
    Ints_plain sum;
    short u[Q8_BLOCK];
    for (int c = 0; c < Q8_BLOCK; c++) u[c] = k[c];
    for (int i = 0; i < 4; i++, x += Q8_BLOCK) {
        int32_t row = 0;
        for (int c = 0; c < Q8_BLOCK; c++) row += x[c] * u[c];
        sum.q[i] = (Int4){ row };
    }
    return sum;
}

// The sum of four lanes.
INLINE_plain int32_t quarter_sum_plain(Int4 x) { return x[0] + x[1] + x[2] + x[3]; }

// Lane 4i + j is the sum of quarter i of a[j], j < 4.
INLINE_plain Ints_plain ints_fold_plain(const Ints_plain *a) {
    Ints_plain sum;
    EACH_QUARTER(i) {
        sum.q[i] = (Int4){ quarter_sum_plain(a[0].q[i]), quarter_sum_plain(a[1].q[i]),
                           quarter_sum_plain(a[2].q[i]), quarter_sum_plain(a[3].q[i]) };
    }
    return sum;
}

// In every quarter, lane j is the f16 at p[j] + at.
INLINE_plain Vec_plain vec_four_f16_plain(const char *const *p, size_t at) {
    float f[4];
    Vec_plain v;
    for (int j = 0; j < 4; j++) {
        uint16_t h;
        memcpy(&h, p[j] + at, sizeof h);
        f[j] = f16_to_f32(h);
    }
    EACH_QUARTER(i) memcpy(&v.q[i], f, sizeof v.q[i]);
    return v;
}

// The quarters of x to p and to the places by, 2 by and 3 by behind it.
INLINE_plain void vec_store_quarters_plain(float *p, size_t by, Vec_plain x) {
    EACH_QUARTER(i) memcpy(p + i * by, &x.q[i], sizeof x.q[i]);
}

// Every lane is the f16 at p.
INLINE_plain Vec_plain vec_all_f16_plain(const char *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return vec_all_plain(f16_to_f32(h));
}

// ---- tiles in plain C
// A thread has eight tiles (Intel AMX). A tile has up to 16 rows of up to 64 bytes: 16 floats, or 16
// pairs of bf16. Here stands what each tile instruction means, from Intel's manual. AMX does the same
// in hardware, and so what is built on tiles can be tested on every machine.
//
// A tile is named by its number, which must be a literal: it is part of the instruction.

// The shape of every tile, as the instruction ldtilecfg reads it.
typedef struct {
    uint8_t palette;            // 1: the eight tiles of AMX
    uint8_t start, zero[14];
    uint16_t bytes[16];         // of a row, for each tile
    uint8_t rows[16];
} TileShape;

enum { TILES = 8, TILE_BYTES = TILE * 64 };

// Steps of TILE_COLS columns; the last may be shorter.
static int tile_steps(int cols) { return (cols + TILE_COLS - 1) / TILE_COLS; }

static _Thread_local struct {
    TileShape shape;
    unsigned char tile[TILES][TILE][64];
} tiles_plain;

#define TARGET_amx_plain
#define INLINE_amx_plain static inline __attribute__((always_inline))

// The tiles get these shapes, and are zeros.
static void tile_shape_amx_plain(const TileShape *shape) {
    memset(&tiles_plain, 0, sizeof tiles_plain);
    tiles_plain.shape = *shape;
}

// The end of the tiles' use.
static void tile_end_amx_plain(void) {
    memset(&tiles_plain.shape, 0, sizeof tiles_plain.shape);
}

// Tile t is zeros.
static void tile_zero_amx_plain(int t) {
    memset(tiles_plain.tile[t], 0, TILE_BYTES);
}

// The rows of tile t are those at p, `stride` bytes apart.
static void tile_load_amx_plain(int t, const void *p, size_t stride) {
    tile_zero_amx_plain(t);
    for (int i = 0; i < tiles_plain.shape.rows[t]; i++)
        memcpy(tiles_plain.tile[t][i], (const char *)p + i * stride, tiles_plain.shape.bytes[t]);
}

// The rows of tile t go to p, `stride` bytes apart.
static void tile_store_amx_plain(int t, void *p, size_t stride) {
    for (int i = 0; i < tiles_plain.shape.rows[t]; i++)
        memcpy((char *)p + i * stride, tiles_plain.tile[t][i], tiles_plain.shape.bytes[t]);
}

// Subnormal numbers count as zero, as they come in and as they go out.
static float no_subnormal(float x) { return fabsf(x) < FLT_MIN ? 0 : x; }

// The bf16 nearest to x. Unlike f32_to_bf16 it does not saturate: an infinity must not look finite.
static inline __attribute__((always_inline)) uint16_t bf16_nearest(float x) {
    FloatBits a = { x };
    if (a.f != a.f) return 0x7fc0;
    return (uint16_t)((a.u + 0x7fff + (a.u >> 16 & 1)) >> 16);
}

// The bf16 at p.
static float tile_number(const unsigned char *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return no_subnormal(bf16_to_f32(h));
}

// Tile c (rows of a,columns), f32, += a (rows,pairs) b (pairs,columns), pairs of bf16. The first
// numbers of all pairs are summed, pair after pair, and so are the second ones; then the two sums are
// added, and that is added to c. Every sum is rounded to the nearest f32. A product of two bf16
// has 16 bits, so it is exact in f32.
static void tile_product_amx_plain(int c, int a, int b) {
    int pairs = tiles_plain.shape.bytes[a] / 4, n = tiles_plain.shape.bytes[c] / 4;
    float x[TILE][2][TILE];                     // the numbers of b
    for (int k = 0; k < pairs; k++)
        for (int j = 0; j < 2 * n; j++) x[k][j % 2][j / 2] = tile_number(tiles_plain.tile[b][k] + 2 * j);
    for (int i = 0; i < tiles_plain.shape.rows[c]; i++) {
        float sum[2][TILE] = {{0}}, out[TILE];
        for (int k = 0; k < pairs; k++)
            for (int half = 0; half < 2; half++) {
                float w = tile_number(tiles_plain.tile[a][i] + 4 * k + 2 * half);
                for (int j = 0; j < n; j++)
                    sum[half][j] = no_subnormal(sum[half][j] + w * x[k][half][j]);
            }
        memcpy(out, tiles_plain.tile[c][i], sizeof out);
        for (int j = 0; j < n; j++)
            out[j] = no_subnormal(out[j] + no_subnormal(sum[0][j] + sum[1][j]));
        memcpy(tiles_plain.tile[c][i], out, sizeof out);
    }
}

// No instruction of AMX, but what tiles need: to (TILE,TILE) = from (TILE,TILE) with rows and columns
// exchanged, elements of 4 bytes.
static void tile_turn_amx_plain(void *to, const void *from) {
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < TILE; j++)
            memcpy((char *)to + (j * TILE + i) * 4, (const char *)from + (i * TILE + j) * 4, 4);
}

// ---- pairs of bf16 in plain C
// What the instruction vdpbf16ps of AVX-512 means, from Intel's manual.
#define TARGET_pairs_plain
#define INLINE_pairs_plain static inline __attribute__((always_inline))
enum { PM_pairs_plain = 2, PN_pairs_plain = 2, P1_pairs_plain = 1 };
#define Vec_pairs_plain         Vec_plain
#define vec_all_pairs_plain     vec_all_plain
#define vec_folds_pairs_plain   vec_folds_plain

typedef struct { uint16_t x[2 * LANES]; } Bf16s_pairs_plain;

// n numbers at p; the others are 0.
INLINE_pairs_plain Bf16s_pairs_plain bf16s_load_pairs_plain(const void *p, int n) {
    Bf16s_pairs_plain a = {{0}};
    memcpy(&a, p, (size_t)n * sizeof *a.x);
    return a;
}

// Lane j: sum + a b at place 2 j + 1, and then + a b at place 2 j. Each of the two sums is rounded
// once.
INLINE_pairs_plain Vec_plain vec_pairs_pairs_plain(Vec_plain sum, Bf16s_pairs_plain a,
                                                   Bf16s_pairs_plain b) {
    float lane[LANES];
    memcpy(lane, &sum, sizeof lane);
    for (int i = 2 * LANES - 1; i >= 0; i--) {
        float x = no_subnormal(bf16_to_f32(a.x[i])), w = no_subnormal(bf16_to_f32(b.x[i]));
        lane[i / 2] = no_subnormal(fmaf(x, w, no_subnormal(lane[i / 2])));
    }
    memcpy(&sum, lane, sizeof sum);
    return sum;
}

// ---- the kernels: this file includes itself
// The kernels, from here to the line "#endif // SIMD", are compiled once for each instruction set.
// To this end the file includes itself once for each (after NEON, below), with the macro SIMD
// defined as plain, as avx2 and so on. While SIMD is defined, the preprocessor drops all of the
// file but the kernels; while it is not, it drops the kernels alone.
//
// C has no name spaces, so the functions of each copy need names of their own. OWN(vec_add) is
// vec_add_avx2 in the copy for AVX2. With the list of names below, the kernels are ordinary C that
// says vec_add, and dots_tile is defined as dots_tile_avx2. A name that the list lacks is an error
// at once: every copy would define it.
//
// A macro that holds all kernels would do the same, but it would be one line for a debugger and in
// error messages. Here the lines of a kernel are lines of this file:
//   gdb -ex 'break dots_tile_avx2' -ex run --args ./tests math_matmul
#elif !defined(ON_TILES) && !defined(ON_PAIRS)      // SIMD

#define PASTE_(name, set) name##_##set
#define PASTE(name, set) PASTE_(name, set)      // two steps, so that SIMD becomes its value first
#define OWN(name) PASTE(name, SIMD)
#define TEXT_(set) #set
#define TEXT(set) TEXT_(set)

// attributes of functions: the machine instructions that they may use; these and always inline
#define TARGET          OWN(TARGET)
#define INLINE          OWN(INLINE)
// the vector and its operations
#define Vec             OWN(Vec)
#define vec_all         OWN(vec_all)
#define vec_add         OWN(vec_add)
#define vec_mul         OWN(vec_mul)
#define vec_div         OWN(vec_div)
#define vec_fma         OWN(vec_fma)
#define vec_max         OWN(vec_max)
#define vec_min         OWN(vec_min)
#define vec_scale       OWN(vec_scale)
#define vec_load        OWN(vec_load)
#define vec_load_bytes  OWN(vec_load_bytes)
#define Ints            OWN(Ints)
#define Pairs           OWN(Pairs)
#define ints_zero       OWN(ints_zero)
#define ints_add        OWN(ints_add)
#define pairs_load      OWN(pairs_load)
#define ints_madd       OWN(ints_madd)
#define vec_of_ints     OWN(vec_of_ints)
#define vec_store       OWN(vec_store)
#define vec_store_f16   OWN(vec_store_f16)
#define vec_fold        OWN(vec_fold)
#define vec_folds       OWN(vec_folds)
#define vec_largest     OWN(vec_largest)
#define vec_at_least    OWN(vec_at_least)
#define vec_four_f16    OWN(vec_four_f16)
#define vec_store_quarters  OWN(vec_store_quarters)
#define vec_all_f16     OWN(vec_all_f16)
#define vec_store_words OWN(vec_store_words)
#define ints_arrange    OWN(ints_arrange)
#define ints_block      OWN(ints_block)
#define ints_fold       OWN(ints_fold)
// the sizes of tiles, as many as the registers of the set hold
#define MR              OWN(MR)         // rows of x in a tile of dots; of o in a small tile of mix
#define NR              OWN(NR)         // rows of w in a tile of dots
#define N1              OWN(N1)         // rows of w in a tile of dots with one row of x
#define MX              OWN(MX)         // rows of o in a tile of mix
#define MS              OWN(MS)         // the same where rows of v are widened as they are read ..
#define VS              OWN(VS)         // .. and the vectors of columns then: few, so that all rows share them
#define NV              OWN(NV)         // vectors of columns in a tile of mix or of softmax_columns
#define M8              OWN(M8)         // rows of x in a tile of dots8
// the kernels
#define dots_step       OWN(dots_step)
#define dots_columns    OWN(dots_columns)
#define dots_store      OWN(dots_store)
#define dots_tile       OWN(dots_tile)
#define dots_few        OWN(dots_few)
#define dots_short      OWN(dots_short)
#define dots_block      OWN(dots_block)
#define dots_f32        OWN(dots_f32)
#define dots_f16        OWN(dots_f16)
#define dots_bf16       OWN(dots_bf16)
#define q8_integers     OWN(q8_integers)
#define q8_query        OWN(q8_query)
#define q8_panel        OWN(q8_panel)
#define dots_q8_rows    OWN(dots_q8_rows)
#define q8_vector       OWN(q8_vector)
#define mix_tile        OWN(mix_tile)
#define mix_rows        OWN(mix_rows)
#define mix_block       OWN(mix_block)
#define mix_f32         OWN(mix_f32)
#define mix_f16         OWN(mix_f16)
#define mix_bf16        OWN(mix_bf16)
#define mix_q8_rows     OWN(mix_q8_rows)
#define vec_exp         OWN(vec_exp)
#define vec_exp2        OWN(vec_exp2)
#define exp_row         OWN(exp_row)
#define softmax_strip   OWN(softmax_strip)
#define softmax_tile    OWN(softmax_tile)
#define swiglu_step     OWN(swiglu_step)
#define swiglu_row      OWN(swiglu_row)
#define largest_of      OWN(largest_of)
#define sum_at_least    OWN(sum_at_least)
#define list_at_least   OWN(list_at_least)
#define widen_row       OWN(widen_row)
#define widen_f32       OWN(widen_f32)
#define widen_f16       OWN(widen_f16)
#define widen_bf16      OWN(widen_bf16)
#define narrow_row      OWN(narrow_row)
#define unpack_q8_rows  OWN(unpack_q8_rows)
#define dots8_sums      OWN(dots8_sums)
#define dots8_tile      OWN(dots8_tile)
#define dots8_block     OWN(dots8_block)
#define whole_block     OWN(whole_block)
#define whole_row       OWN(whole_row)
#define simd_entry      OWN(simd_entry)

// Where an INLINE function takes dtype, M, whole or vectors, its callers pass constants. Every call
// is compiled for its values: loops are written out and branches disappear.

// -- dot products, in tiles of MR rows of x by NR rows of w

// One step of a tile: acc (M,NR) += x (M) w (NR)^T in columns k .. k+n-1, lane by lane. Each vector
// is loaded once; one of w is used M times, one of x NR times.
INLINE void dots_step(Vec *acc, const float *const *x, const char *const *w, int dtype, int M,
                      int k, int n) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    Vec b[NR];
    UNROLL for (int j = 0; j < NR; j++) b[j] = vec_load(w[j] + (size_t)k * size, dtype, n);
    UNROLL for (int i = 0; i < M; i++) {
        Vec a = vec_load(x[i] + k, DT_F32, n);
        UNROLL for (int j = 0; j < NR; j++) acc[i * NR + j] = vec_fma(a, b[j], acc[i * NR + j]);
    }
}

// acc (M,N) += x (M) w (N)^T in columns k .. k+LANES-1, lane by lane; rows of w are ldw bytes apart.
INLINE void dots_columns(Vec *acc, const float *const *x, const char *w, size_t ldw, int dtype,
                         int M, int N, int k) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    Vec b[LANES];
    UNROLL for (int j = 0; j < N; j++) b[j] = vec_load(w + j * ldw + (size_t)k * size, dtype, LANES);
    UNROLL for (int i = 0; i < M; i++) {
        Vec a = vec_load(x[i] + k, DT_F32, LANES);
        UNROLL for (int j = 0; j < N; j++) acc[i * N + j] = vec_fma(a, b[j], acc[i * N + j]);
    }
}

// y (m,n) at row i0 and column j0 = the sums (m,NR) of a tile. whole: m and n are full, and nothing
// is added to.
INLINE void dots_store(const Dots *a, const float *sum, int i0, int j0, int m, int n, int whole) {
    for (int i = 0; i < m; i++) {
        float *y = a->y + (size_t)(i0 + i) * a->ldy + j0;
        if (whole || (n == NR && !a->add)) {
            memcpy(y, sum + i * NR, NR * sizeof *y);
        } else {
            for (int j = 0; j < n; j++) y[j] = a->add ? y[j] + sum[i * NR + j] : sum[i * NR + j];
        }
    }
}

// The tile of M rows of x from i0 on and NR rows of w from j0 on. Where the block ends before the
// tile does, its last row is read again in place of the missing ones, and their results are not
// stored. whole: the tile lies inside the block, K is whole vectors and y is not added to; this
// common case is compiled without all that.
//
// A tile reads a panel, NR rows of w. The rows of the next panel are short and far apart, and the
// hardware does not see them coming. Where a tile is the only one of its panel (decode) and next is
// named, it asks for as many bytes of that as it reads, in the order in which they lie in memory (Zen 5:
// 25 -> 36 GB/s a thread, where 38 can be read; asked for line by line of four rows in turn, 33).
INLINE void dots_tile(const Dots *a, int dtype, int M, int i0, int j0, int whole) {
    Vec acc[MR * NR];
    const float *x[MR];
    const char *w[NR];
    float sum[MR * NR];
    int m = whole || a->m - i0 > M ? M : a->m - i0;
    int n = whole || a->n - j0 > NR ? NR : a->n - j0;
    int asks = a->next.bytes && a->m <= MR;
    size_t size = dtype == DT_F32 ? 4 : 2, step = NR * LANES * size;
    const char *ahead = asks ? a->next.p + (size_t)j0 * a->K * size : NULL;

    UNROLL for (int i = 0; i < M; i++) x[i] = a->x + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldx;
    UNROLL for (int j = 0; j < NR; j++) w[j] = a->w + (size_t)(j0 + (j < n ? j : n - 1)) * a->ldw;
    UNROLL for (int i = 0; i < M * NR; i++) acc[i] = vec_all(0);

    int k = 0;
    for (; k + LANES <= a->K; k += LANES) {
        if (asks) {
            UNROLL for (size_t i = 0; i < step; i += 64) ask_weights(ahead + i);
            ahead += step;
        }
        dots_step(acc, x, w, dtype, M, k, LANES);
    }
    if (!whole && k < a->K) dots_step(acc, x, w, dtype, M, k, a->K - k);

    vec_folds(sum, acc, M * NR, a->scale);
    dots_store(a, sum, i0, j0, m, n, whole);
}

// The tiles of M rows of x from i0 on, of which m are there, with all whole panels of N rows of w;
// K is whole vectors. -> how many rows of w that are. The rows of a tile of
// attention are short: 4 keys of 64 columns are 64 multiply-adds, and what begins and ends a tile
// took longer than those. So the panels are one loop here, whose setup is done once, and two vectors
// of columns are one pass of the inner one (64 keys, 4 queries: 5.9 -> 3.9 ns a key). Stored rows are
// asked for in the order in which they lie, a panel at a time: asked for line by line of four rows
// in turn, they come at half the speed on Zen 4.
INLINE int dots_few(const Dots *a, int dtype, int M, int N, int i0, int m, Ahead next) {
    size_t ldw = a->ldw, ldy = a->ldy;
    int K = a->K, j = 0;
    int asks = !a->next.p && !i0 && dtype != DT_F32 && K <= SHORT_ROW;
    if (asks) next = (Ahead){ a->w + FEW_AHEAD, a->n * ldw };
    size_t share = next.bytes ? ahead_share(next, (a->n + N - 1) / N) : 0;
    const float *x[MR];
    const char *w = a->w;
    float *y = a->y + (size_t)i0 * ldy;
    UNROLL for (int i = 0; i < M; i++) x[i] = a->x + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldx;

    for (; j + N <= a->n; j += N, w += N * ldw) {
        Vec acc[LANES];                 // M N of them; an array of M N would lie in memory
        float sum[LANES];
        int k = 0;
        if (next.bytes) ask_ahead(&next, share);
        UNROLL for (int i = 0; i < M * N; i++) acc[i] = vec_all(0);
        for (; k + 2 * LANES <= K; k += 2 * LANES) {
            dots_columns(acc, x, w, ldw, dtype, M, N, k);
            dots_columns(acc, x, w, ldw, dtype, M, N, k + LANES);
        }
        if (k < K) dots_columns(acc, x, w, ldw, dtype, M, N, k);
        vec_folds(sum, acc, M * N, a->scale);
        UNROLL for (int i = 0; i < M; i++) {
            if (i < m && !a->add) memcpy(y + i * ldy + j, sum + i * N, N * sizeof *y);
            for (int r = 0; i < m && a->add && r < N; r++) y[i * ldy + j + r] += sum[i * N + r];
        }
    }
    return j;
}

// A block of attention: MR rows of x at a time with all rows of w, which lie in the first-level
// cache when they are read again; then a last single row of x, with more rows of w.
INLINE void dots_short(const Dots *a, int dtype) {
    Ahead next = a->next;
    for (int i = 0, m; i < a->m; i += m) {
        int j, left = a->m - i;
        m = left > 1 ? min_int(left, MR) : 1;
        if (m > 1) j = dots_few(a, dtype, MR, NR, i, m, next);
        else j = dots_few(a, dtype, 1, N1, i, m, next);
        for (; j < a->n; j += NR) dots_tile(a, dtype, MR, i, j, 0);
        next.bytes = 0;
    }
}

// All tiles of a block: panels of NR rows of w, and for each panel MR rows of x at a time. What is
// to be read after the block is asked for between the panels, or by the tiles where a panel has only
// one. Where a panel has many tiles, each asks for one line of each row of the next panel (8 % of
// prefill). Where one row of x meets w and nothing is to be asked for, w is read 8 rows at a time.
INLINE void dots_block(const Dots *a, int dtype) {
    Ahead next = a->next;
    size_t share = next.bytes ? ahead_share(next, (a->n + NR - 1) / NR) : 0;
    if (a->K <= SHORT_ROW && a->K % LANES == 0 && !a->add) {
        dots_short(a, dtype);
        return;
    }
    if (a->m == 1 && a->K % LANES == 0 && !next.bytes) {
        for (int j = dots_few(a, dtype, 1, N1 < 8 ? N1 : 8, 0, 1, next); j < a->n; j += NR)
            dots_tile(a, dtype, 1, 0, j, 0);
        return;
    }
    for (int j = 0; j < a->n; j += NR) {
        int i = 0;
        if (next.bytes && a->m > MR) ask_ahead(&next, share);
        for (; a->m - i > 1; i += MR) {
            for (int p = j + NR; a->m > MR && p < j + 2 * NR; p++)
                __builtin_prefetch(a->w + (size_t)p * a->ldw + i / MR * 64);
            if (a->m - i >= MR && a->n - j >= NR && a->K % LANES == 0 && !a->add)
                dots_tile(a, dtype, MR, i, j, 1);
            else
                dots_tile(a, dtype, MR, i, j, 0);
        }
        if (i < a->m) dots_tile(a, dtype, 1, i, j, 0);      // one row is left
    }
}

// A function for each dtype, so that the dtype is a constant in all that is inlined into it.
TARGET static void dots_f32(const Dots *a) { dots_block(a, DT_F32); }
TARGET static void dots_f16(const Dots *a) { dots_block(a, DT_F16); }
TARGET static void dots_bf16(const Dots *a) { dots_block(a, DT_BF16); }

// -- dot products with rows of q8_0
// A row of x becomes integers t of 16 bits, x = f t with f = max|x| / Q8_TOP. A block of a key is
// 32 integers u and a scale d. So x . w = f sum_b d_b sum_i t_i u_i, and the inner sum is one of
// integers: exact, in any order, on any instruction set (D89). Four rows of x meet four rows of w.

// t (n) = x (n) in units of factor, for whole vectors. Returns the factor; it is no number where
// some x is none, or is infinite.
INLINE float q8_integers(short *t, const float *x, int n) {
    Vec top = vec_all(0), other = vec_all(0);
    for (int k = 0; k < n; k += LANES) {
        Vec v = vec_load(x + k, DT_F32, LANES);
        top = vec_max(vec_max(v, vec_mul(v, vec_all(-1))), top);
        other = vec_fma(v, vec_all(0), other);
    }
    float most = vec_largest(top), unit = most > 1e-30f ? Q8_TOP / most : 0;
    for (int k = 0; k < n; k += LANES) {
        Vec v = vec_mul(vec_load(x + k, DT_F32, LANES), vec_all(unit));
        vec_store_words(t + k, vec_add(v, vec_all(12582912)));
    }
    return most / Q8_TOP + vec_fold(other);
}

// Simd.integers_q8. Missing rows repeat the last one.
TARGET static void q8_query(Q8Query *to, const float *x, size_t ldx, int m, int n) {
    short t[4][Q8_COLS] __attribute__((aligned(64)));
    for (int i = 0; i < 4; i++) {
        float factor = q8_integers(t[i], x + (size_t)min_int(i, m - 1) * ldx, n);
        for (int j = 0; j < 4; j++) to->factor[4 * i + j] = factor;
    }
    for (int b = 0; b < n / Q8_BLOCK; b++)
        ints_arrange(to->block[b], (const short (*)[Q8_COLS])(t[0] + b * Q8_BLOCK));
}

// out (4,4), rows Q8_ROWS apart, = the products with rows j .. j+3 of w, for the `blocks` blocks from
// column k0 on. Missing rows repeat the last one.
INLINE void q8_panel(float *out, const Dots *a, const Q8Query *q, int j, int k0, int blocks) {
    const char *w[4];
    Vec sum = vec_all(0);
    UNROLL for (int r = 0; r < 4; r++)
        w[r] = a->w + (size_t)min_int(j + r, a->n - 1) * a->ldw + q8_bytes(k0);
    for (int b = 0; b < blocks; b++) {
        Ints part[4];
        size_t at = b * (size_t)(Q8_BLOCK + 2);
        UNROLL for (int r = 0; r < 4; r++)
            part[r] = ints_block(q->block[b], (const signed char *)w[r] + at + 2);
        sum = vec_fma(vec_of_ints(ints_fold(part)), vec_four_f16(w, at), sum);
    }
    Vec factor = vec_mul(vec_load(q->factor, DT_F32, LANES), vec_all(a->scale));
    vec_store_quarters(out, Q8_ROWS, vec_mul(sum, factor));
}

// Simd.dots_q8, Q8_ROWS rows of w at a time. Meanwhile it asks for those a few KB on, or for what
// the caller says.
TARGET static void dots_q8_rows(const Dots *a) {
    const Q8Query *q = a->q8;
    int pieces = (a->K + Q8_COLS - 1) / Q8_COLS;
    float out[4][Q8_ROWS];
    Ahead next = a->next;
    size_t share = next.bytes ? ahead_share(next, (a->n + 3) / 4) : 0;
    for (int k0 = 0; k0 < a->K; k0 += Q8_COLS) {
        int cols = min_int(a->K - k0, Q8_COLS), add = k0 || a->add;
        for (int j0 = 0; j0 < a->n; j0 += Q8_ROWS) {
            int n = min_int(a->n - j0, Q8_ROWS);
            for (int i = 0; i < a->m; i += 4) {
                const Q8Query *four = q + i / 4 * pieces + k0 / Q8_COLS;
                int asks = !a->next.p && !i && !k0;
                for (int j = 0; j < n; j += 4) {
                    const char *ahead = a->w + (j0 + j) * a->ldw + FEW_AHEAD;
                    if (next.bytes) ask_ahead(&next, share);
                    for (size_t b = 0; asks && b < 4 * a->ldw; b += 64)
                        __builtin_prefetch(ahead + b);
                    q8_panel(out[0] + j, a, four, j0 + j, k0, cols / Q8_BLOCK);
                }
                for (int r = 0; r < 4 && i + r < a->m; r++) {
                    float *y = a->y + (size_t)(i + r) * a->ldy + j0;
                    for (int j = 0; j < n; j++) y[j] = add ? y[j] + out[r][j] : out[r][j];
                }
            }
        }
    }
}

// -- weighted sums of rows, in tiles of MX rows of o by NV vectors

// A vector of columns of a row of q8_0, from d on, unpacked in registers as unpack_q8 does it: scale
// times integer.
INLINE Vec q8_vector(const char *row, int d) {
    row += d / Q8_BLOCK * (Q8_BLOCK + 2);
    const signed char *q = (const signed char *)row + 2 + d % Q8_BLOCK;
    return vec_mul(vec_load_bytes(q), vec_all_f16(row));
}

// The tile of M rows of o from row i0 on, of which m are there, and `vectors` vectors of columns
// from d0 on, each of `width` columns. Each output adds its n products in the order of the rows of
// v. Missing rows of o repeat the last one. next is asked for in n portions.
INLINE void mix_tile(const Mix *a, int dtype, int M, int i0, int m, int d0, int vectors, int width,
                     Ahead next) {
    Vec acc[MX * NV];
    int n = a->n, D = a->D;
    size_t size = dtype == DT_F32 ? 4 : 2, q8_row = q8_bytes(D);
    size_t share = next.bytes ? ahead_share(next, n) : 0;
    float *o = a->o + (size_t)i0 * D + d0;
    const float *p = a->p + (size_t)i0 * n;
    const char *v = a->v + d0 * size;

    UNROLL for (int i = 0; i < M; i++) {
        const float *from = o + (size_t)(i < m ? i : m - 1) * D;
        UNROLL for (int c = 0; c < vectors; c++)
            acc[i * vectors + c] = a->add ? vec_load(from + c * LANES, DT_F32, width) : vec_all(0);
    }
    for (int r = 0; r < n; r++) {
        Vec b[NV];
        if (next.bytes) ask_ahead(&next, share);
        UNROLL for (int c = 0; c < vectors; c++)
            b[c] = dtype == ROWS_Q8
                 ? q8_vector(a->v + r * q8_row, d0 + c * LANES)
                 : vec_load(v + ((size_t)r * D + c * LANES) * size, dtype, width);
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

// All columns of M rows of o from row i0 on, of which m are there. Each pass over wide columns asks
// for its part of what is read next: what the caller says or, of stored rows, those 16 further on,
// or as many as the block has where there are several passes. If the first pass asked for all, it
// would wait for memory, and the others would leave it idle.
INLINE void mix_rows(const Mix *a, int dtype, int M, int V, int i0, int m, Ahead next) {
    int d = 0, D = a->D, pass = 0, passes = max_int(1, D / (V * LANES));
    size_t row = dtype == ROWS_Q8 ? q8_bytes(D) : D * sizeof(uint16_t);
    if (!next.p && dtype != DT_F32)
        next = (Ahead){ a->v + (passes > 1 ? a->n : 16) * row, a->n * row };
    for (; d + V * LANES <= D; d += V * LANES)
        mix_tile(a, dtype, M, i0, m, d, V, LANES, ahead_part(next, pass++, passes));
    for (; d + LANES <= D; d += LANES)
        mix_tile(a, dtype, M, i0, m, d, 1, LANES, ahead_part(next, pass++, passes));
    if (d < D) mix_tile(a, dtype, M, i0, m, d, 1, D - d, ahead_part(next, pass, passes));
}

// A block: MX or MS rows of o at a time, then MR where fewer are left (the heads of a decode step),
// then a last single one. Each of these groups asks for its part of what is read after the block.
INLINE void mix_block(const Mix *a, int dtype) {
    const int M = dtype == DT_F32 ? MX : MS, V = dtype == DT_F32 ? NV : VS;
    int i = 0, m = a->m;
    int group = 0, groups = m / M + (m % M + MR - 1) / MR;
    for (; m - i >= M; i += M)
        mix_rows(a, dtype, M, V, i, M, ahead_part(a->next, group++, groups));
    for (; m - i > 1; i += MR)
        mix_rows(a, dtype, MR, NV, i, min_int(m - i, MR), ahead_part(a->next, group++, groups));
    if (i < m) mix_rows(a, dtype, 1, NV, i, 1, ahead_part(a->next, group, groups));
}

TARGET static void mix_f32(const Mix *a) { mix_block(a, DT_F32); }
TARGET static void mix_f16(const Mix *a) { mix_block(a, DT_F16); }
TARGET static void mix_bf16(const Mix *a) { mix_block(a, DT_BF16); }
TARGET static void mix_q8_rows(const Mix *a) { mix_block(a, ROWS_Q8); }

// -- exponentials

// e^x in every lane, x at most 150. With x = k ln 2 + r and |r| <= ln 2 / 2, e^x = 2^k e^r:
//   k    is x / ln 2 rounded. Adding 1.5 * 2^23 leaves no bits for a fraction, and subtracting it
//        again leaves the integer.
//   r    is x - k ln 2, with ln 2 as the sum of two numbers, so that r is exact to f32.
//   e^r  is 1 + r + r^2 (c2 + c3 r + .. + c6 r^4), a minimax polynomial with relative error 3.1e-9.
// The clamp at -150 makes 0 of everything below the smallest subnormal, and of the NaN that
// -INFINITY - -INFINITY is.
INLINE Vec vec_exp(Vec x) {
    x = vec_max(x, vec_all(-150));
    Vec k = vec_fma(x, vec_all(LOG2_E), vec_all(12582912));
    k = vec_add(k, vec_all(-12582912));
    Vec r = vec_fma(k, vec_all(-0.693145752f), x);
    r = vec_fma(k, vec_all(-1.42860677e-6f), r);
    Vec p = vec_fma(r, vec_all(0.00138145986f), vec_all(0.00836871688f));
    p = vec_fma(r, p, vec_all(0.0416683880f));
    p = vec_fma(r, p, vec_all(0.166665206f));
    p = vec_fma(r, p, vec_all(0.499999934f));
    p = vec_add(vec_fma(vec_mul(r, r), p, r), vec_all(1));
    return vec_scale(p, k);
}

// 2^x in every lane, x at most 150, for scores that carry a factor log2 e. The split x = k + r is
// exact as it stands, so it needs no products, and 1 + r is not added apart. This saves two of
// seventeen instructions.
//   2^r  is 1 + r (c1 + c2 r + .. + c6 r^5), a minimax polynomial with relative error 2.0e-9.
INLINE Vec vec_exp2(Vec x) {
    x = vec_max(x, vec_all(-150));
    Vec k = vec_add(x, vec_all(12582912));
    k = vec_add(k, vec_all(-12582912));
    Vec r = vec_fma(k, vec_all(-1), x);
    Vec p = vec_fma(r, vec_all(0.000153533620f), vec_all(0.00133988750f));
    p = vec_fma(r, p, vec_all(0.00961843692f));
    p = vec_fma(r, p, vec_all(0.0555033237f));
    p = vec_fma(r, p, vec_all(0.240226477f));
    p = vec_fma(r, p, vec_all(0.693147182f));
    return vec_scale(vec_fma(r, p, vec_all(1)), k);
}

// Simd.exp_shift. The last vector is filled up with -INFINITY, whose exponential adds 0 to the sum.
TARGET static void exp_row(float *x, float max, size_t n, float *sum) {
    Vec shift = vec_all(-max), total = vec_all(0);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Vec e = vec_exp(vec_add(vec_load(x + i, DT_F32, LANES), shift));
        vec_store(x + i, e, LANES);
        total = vec_add(total, e);
    }
    if (i < n) {
        float part[LANES];
        for (int j = 0; j < LANES; j++) part[j] = i + j < n ? x[i + j] : -INFINITY;
        Vec e = vec_exp(vec_add(vec_load(part, DT_F32, LANES), shift));
        vec_store(x + i, e, (int)(n - i));
        total = vec_add(total, e);
    }
    *sum += vec_fold(total);
}

// Simd.softmax_columns for `vectors` vectors of columns, each of `width` columns; rows of x are m
// elements apart. Several vectors stand side by side so that a row is read from end to end and no
// exponential waits for another.
INLINE void softmax_strip(float *x, int n, size_t m, float *max, float *sum, int vectors,
                          int width) {
    Vec top[NV], shift[NV], total[NV];

    // the maximum of each column, from the one of earlier rows on
    UNROLL for (int c = 0; c < vectors; c++) top[c] = vec_load(max + c * LANES, DT_F32, width);
    for (int j = 0; j < n; j++) {
        UNROLL for (int c = 0; c < vectors; c++)
            top[c] = vec_max(vec_load(x + j * m + c * LANES, DT_F32, width), top[c]);
    }
    // what was summed up under the old maximum, as it is under the new one
    UNROLL for (int c = 0; c < vectors; c++) {
        shift[c] = vec_mul(top[c], vec_all(-1));
        Vec factor = vec_exp2(vec_add(vec_load(max + c * LANES, DT_F32, width), shift[c]));
        total[c] = vec_mul(vec_load(sum + c * LANES, DT_F32, width), factor);
    }
    // the powers, and their sum
    for (int j = 0; j < n; j++) {
        UNROLL for (int c = 0; c < vectors; c++) {
            float *at = x + j * m + c * LANES;
            Vec e = vec_exp2(vec_add(vec_load(at, DT_F32, width), shift[c]));
            vec_store(at, e, width);
            total[c] = vec_add(total[c], e);
        }
    }
    UNROLL for (int c = 0; c < vectors; c++) {
        vec_store(max + c * LANES, top[c], width);
        vec_store(sum + c * LANES, total[c], width);
    }
}

// Simd.softmax_columns: strips of NV vectors, then of one, then what is left of one.
TARGET static void softmax_tile(float *x, int n, int m, float *max, float *sum) {
    int c = 0;
    for (; c + NV * LANES <= m; c += NV * LANES)
        softmax_strip(x + c, n, (size_t)m, max + c, sum + c, NV, LANES);
    for (; c + LANES <= m; c += LANES)
        softmax_strip(x + c, n, (size_t)m, max + c, sum + c, 1, LANES);
    if (c < m) softmax_strip(x + c, n, (size_t)m, max + c, sum + c, 1, m - c);
}

// g (n) = g / (1 + e^-g) * u for at most one vector.
INLINE void swiglu_step(float *g, const float *u, int n) {
    Vec x = vec_load(g, DT_F32, n);
    Vec e = vec_exp(vec_min(vec_mul(x, vec_all(-1)), vec_all(150)));
    Vec silu = vec_div(x, vec_add(vec_all(1), e));
    vec_store(g, vec_mul(silu, vec_load(u, DT_F32, n)), n);
}

// Simd.swiglu
TARGET static void swiglu_row(float *g, const float *u, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) swiglu_step(g + i, u + i, LANES);
    if (i < n) swiglu_step(g + i, u + i, (int)(n - i));
}

// -- the largest numbers

// Simd.max. A NaN loses every comparison that vec_max makes with it on the left, so no lane of
// `top` is one.
TARGET static float largest_of(const float *x, size_t n) {
    Vec top = vec_all(-INFINITY);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) top = vec_max(vec_load(x + i, DT_F32, LANES), top);
    float best = vec_largest(top);
    for (; i < n; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// Simd.sum_from. The loops are so simple that the compiler makes vectors of them itself.
TARGET static int sum_at_least(const float *x, const int *w, int n, uint32_t key) {
    int sum = 0;
    if (w) {
        for (int i = 0; i < n; i++) sum += order_key(x[i]) >= key ? w[i] : 0;
    } else {
        for (int i = 0; i < n; i++) sum += order_key(x[i]) >= key;
    }
    return sum;
}

// Simd.list_from. Each pass of the inner loop takes the lowest bit of a vector's 16 answers.
TARGET static int list_at_least(const float *x, int i, int n, uint32_t key, int *idx) {
    int count = 0;
    for (; i + LANES <= n; i += LANES) {
        for (uint32_t bits = vec_at_least(x + i, key); bits; bits &= bits - 1)
            idx[count++] = i + __builtin_ctz(bits);
    }
    for (; i < n; i++) {
        if (order_key(x[i]) >= key) idx[count++] = i;
    }
    return count;
}

// -- from and to f32

// dst (n) = src (n), which is of dtype.
INLINE void widen_row(float *dst, const char *src, int dtype, size_t n) {
    size_t size = dtype == DT_F32 ? 4 : 2, i = 0;
    for (; i + LANES <= n; i += LANES)
        vec_store(dst + i, vec_load(src + i * size, dtype, LANES), LANES);
    int left = (int)(n - i);
    if (left > 0) vec_store(dst + i, vec_load(src + i * size, dtype, left), left);
}

TARGET static void widen_f32(float *dst, const void *src, size_t n) {
    widen_row(dst, src, DT_F32, n);
}
TARGET static void widen_f16(float *dst, const void *src, size_t n) {
    widen_row(dst, src, DT_F16, n);
}
TARGET static void widen_bf16(float *dst, const void *src, size_t n) {
    widen_row(dst, src, DT_BF16, n);
}

// Simd.narrow_f16
TARGET static void narrow_row(uint16_t *dst, const float *src, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) vec_store_f16(dst + i, vec_load(src + i, DT_F32, LANES));
    for (; i < n; i++) dst[i] = f32_to_f16(src[i]);
}

// Simd.unpack_q8. A row is blocks of Q8_BLOCK columns, the last one perhaps shorter: an f16 scale,
// then a byte a column.
TARGET static void unpack_q8_rows(float *dst, const char *src, int n, int D) {
    for (int r = 0; r < n; r++) {
        for (int col = 0; col < D; col += Q8_BLOCK) {
            int m = min_int(D - col, Q8_BLOCK), i = 0;
            uint16_t d;
            memcpy(&d, src, sizeof d);
            float scale = f16_to_f32(d);
            const signed char *q = (const signed char *)src + sizeof d;
            for (; i + LANES <= m; i += LANES)
                vec_store(dst + i, vec_mul(vec_load_bytes(q + i), vec_all(scale)), LANES);
            for (; i < m; i++) dst[i] = scale * q[i];
            src += sizeof d + m;
            dst += m;
        }
    }
}

// -- products with weights in 8 bits
// A row of x becomes blocks of Q8_BLOCK whole numbers of 16 bits, each with a scale: q = round(x /
// scale), scale = max|x| / 32767, which is as good as exact beside the 8 bits of the weights. A
// block's products are then summed as whole numbers, at most 32 * 32767 * 127, and
//   y[r] += sum * (scale of x * scale of w[r]),   block after block.
// The 16 lanes are 16 rows of w, so nothing has to be folded. Sums of whole numbers have no order:
// every row of x gets the same bits in every tile, and AVX2 those of AVX-512.

// Simd.whole for one block of n columns; those from n on are 0. Adding 1.5 * 2^23 leaves the whole
// number in the lowest bits. Where x has a NaN or an infinity the scale is a NaN.
INLINE void whole_block(int16_t *q, float *scale, const float *x, int n) {
    float part[Q8_BLOCK];
    if (n < Q8_BLOCK) {
        memset(part, 0, sizeof part);
        x = memcpy(part, x, (size_t)n * sizeof *x);
    }
    Vec top = vec_all(0), odd = vec_all(0);
    UNROLL for (int i = 0; i < Q8_BLOCK; i += LANES) {
        Vec v = vec_load(x + i, DT_F32, LANES);
        top = vec_max(vec_max(v, vec_mul(v, vec_all(-1))), top);
        odd = vec_fma(v, vec_all(0), odd);
    }
    float most = vec_largest(top), inverse = most > 0 ? 32767 / most : 0;
    *scale = most / 32767 + vec_fold(odd);
    UNROLL for (int i = 0; i < Q8_BLOCK; i += LANES) {
        uint32_t bits[LANES];
        Vec v = vec_add(vec_mul(vec_load(x + i, DT_F32, LANES), vec_all(inverse)), vec_all(12582912));
        vec_store((float *)bits, v, LANES);
        for (int j = 0; j < LANES; j++) q[i + j] = (int16_t)bits[j];
    }
}

// Simd.whole
TARGET static void whole_row(int16_t *q, float *scale, const float *x, int n) {
    for (int i = 0; i < n; i += Q8_BLOCK)
        whole_block(q + i, scale++, x + i, min_int(n - i, Q8_BLOCK));
}

// sum (M) = the whole sums of one block: M rows of x by 16 rows of w, whose bytes lie in pairs of
// columns. A single row of x has four sums in turn, because each waits for itself.
INLINE void dots8_sums(Ints *sum, const int16_t *const *x, const char *w, int M) {
    Ints part[4];
    UNROLL for (int i = 0; i < 4; i++) part[i] = ints_zero();
    UNROLL for (int i = 0; i < M; i++) sum[i] = ints_zero();
    UNROLL for (int k = 0; k < Q8_BLOCK; k += 2) {
        Pairs two = pairs_load(w + k * LANES);
        if (M == 1) part[k / 2 % 4] = ints_madd(part[k / 2 % 4], two, x[0] + k);
        else {
            UNROLL for (int i = 0; i < M; i++) sum[i] = ints_madd(sum[i], two, x[i] + k);
        }
    }
    if (M == 1) sum[0] = ints_add(ints_add(part[0], part[1]), ints_add(part[2], part[3]));
}

// A tile: M rows of x from i0 on, of which m are there; missing ones repeat the last.
INLINE void dots8_tile(const Dots8 *a, int M, int i0, int m) {
    Vec acc[M8];
    Ints sum[M8];
    const int16_t *x[M8];
    const float *scale[M8];
    UNROLL for (int i = 0; i < M; i++) {
        size_t row = (size_t)(i0 + (i < m ? i : m - 1));
        x[i] = a->x + row * a->all * Q8_BLOCK;
        scale[i] = a->scale + row * a->all;
        acc[i] = a->add ? vec_load(a->y + row * a->ldy, DT_F32, a->n) : vec_all(0);
    }
    for (int b = 0; b < a->blocks; b++) {
        const char *w = a->w + (size_t)b * Q8_PANEL;
        Vec d = vec_load(w, DT_F16, LANES);
        if (M == 1) ask_ahead(&(Ahead){ w + 4096, Q8_PANEL }, Q8_PANEL);
        dots8_sums(sum, x, w + LANES * 2, M);
        UNROLL for (int i = 0; i < M; i++) {
            acc[i] = vec_fma(vec_of_ints(sum[i]), vec_mul(d, vec_all(scale[i][b])), acc[i]);
            x[i] += Q8_BLOCK;
        }
    }
    UNROLL for (int i = 0; i < M; i++)
        vec_store(a->y + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldy, acc[i], a->n);
}

// Simd.dots8
TARGET static void dots8_block(const Dots8 *a) {
    int i = 0;
    for (; a->m - i > 1; i += M8) dots8_tile(a, M8, i, min_int(a->m - i, M8));
    if (i < a->m) dots8_tile(a, 1, i, 1);
}

// What this copy adds to the table of instruction sets.
static const Simd simd_entry = {
    .name            = TEXT(SIMD),
    .dots            = { dots_f32, dots_f16, dots_bf16 },
    .dots8           = dots8_block,
    .whole           = whole_row,
    .mix             = { mix_f32, mix_f16, mix_bf16 },
    .integers_q8     = q8_query,
    .dots_q8         = dots_q8_rows,
    .mix_q8          = mix_q8_rows,
    .widen           = { widen_f32, widen_f16, widen_bf16 },
    .narrow_f16      = narrow_row,
    .unpack_q8       = unpack_q8_rows,
    .exp_shift       = exp_row,
    .softmax_columns = softmax_tile,
    .swiglu          = swiglu_row,
    .max             = largest_of,
    .sum_from        = sum_at_least,
    .list_from       = list_at_least,
};

#endif  // SIMD: the part that is compiled once for each instruction set ends here
#ifdef ON_TILES
// ---- products in tiles
// This part is compiled with SIMD defined as amx_plain, and as amx where the machine may have it.
//
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
// all added to one tile (tile_product says in which order within the 32). The sums of TILE_CHUNK
// columns each are added in order; one longer sum would lose accuracy (2.6e-7 over all 2,048). Rows of
// x do not meet each other and what is missing is zeros, so a row of y has the same bits in every place
// of every block, and in decode, where a tile of x has one column. Subnormal numbers count as zero. An
// infinity in x gives a NaN, as a NaN does.
//
// Two tiles of W by two of x are four sums, and each tile that is loaded is used twice. A product takes
// 16 cycles, and its sum is ready after 52, so the four sums take turns.
#define tile_shape      OWN(tile_shape)
#define tile_end        OWN(tile_end)
#define tile_zero       OWN(tile_zero)
#define tile_load       OWN(tile_load)
#define tile_store      OWN(tile_store)
#define tile_product    OWN(tile_product)
#define tile_turn       OWN(tile_turn)
#define TileWalk        OWN(TileWalk)
#define split_row       OWN(split_row)
#define tile_terms      OWN(tile_terms)
#define tile_panel      OWN(tile_panel)
#define tile_walk       OWN(tile_walk)
#define tile_out        OWN(tile_out)
#define tile_groups     OWN(tile_groups)
#define tile_block      OWN(tile_block)

// to (terms,TILE,TILE_COLS): row t of each = the terms of x (n).
INLINE void split_row(uint16_t (*to)[TILE][TILE_COLS], int t, const float *x, int n, int terms) {
    float rest[TILE_COLS];
    memcpy(rest, x, (size_t)n * sizeof *rest);
    for (int q = 0; q < terms; q++) {
        uint16_t *term = to[q][t];
        for (int i = 0; i < n; i++) {
            term[i] = bf16_nearest(rest[i]);
            rest[i] -= bf16_to_f32(term[i]);
        }
    }
}

// Simd.tile_x. Missing rows and columns are zeros.
TARGET static void tile_terms(uint16_t *to, const float *x, size_t ldx, int m, int n, int columns,
                              int terms) {
    uint16_t part[3][TILE][TILE_COLS] __attribute__((aligned(64)));
    for (int k = 0; k < n; k += TILE_COLS) {
        int cols = min_int(n - k, TILE_COLS);
        if (m < columns || cols < TILE_COLS) memset(part, 0, sizeof part);
        for (int t = 0; t < m; t++) {
            if (cols == TILE_COLS) split_row(part, t, x + t * ldx + k, TILE_COLS, terms);
            else split_row(part, t, x + t * ldx + k, cols, terms);
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

// Tiles 0 to 3 = two tiles of W by one or two of x, summed over the steps. Meanwhile the next rows
// are asked for: 64 bytes a step for each of them, but row after row, as memory has them, and into the
// second-level cache, because there may be as many bytes as the first has.
INLINE void tile_walk(const TileWalk *a, int groups) {
    const char *w = a->w, *x0 = a->x[0], *x1 = a->x[1], *next = a->next;
    size_t row = 4 * a->columns, tile = TILE * row;
    size_t at = 0, width = (size_t)a->steps * 64;       // of a row that is asked for
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int k = 0; k < a->steps; k++, w += a->step) {
        tile_load(4, w, a->row);
        tile_load(5, w + a->tile, a->row);
        for (int q = 0; q < a->terms; q++, x0 += tile, x1 += tile) {
            tile_load(6, x0, row);
            if (groups == 2) tile_load(7, x1, row);
            tile_product(0, 4, 6);
            tile_product(1, 5, 6);
            if (groups == 2) tile_product(2, 4, 7);
            if (groups == 2) tile_product(3, 5, 7);
        }
        for (int i = 0; i < a->next_rows; i++) {
            __builtin_prefetch(next + at, 0, 2);
            at += 64;
            if (at < width) continue;
            at = 0;
            next += a->ldw;
        }
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
INLINE void tile_groups(const Tiles *a, const TileWalk *walk, int t, int first, int last) {
    float c[4][TILE * TILE] __attribute__((aligned(64)));
    size_t row = 4 * walk->columns, n_sums = TILE * walk->columns;
    int groups = a->m - t > TILE ? 2 : 1;
    if (groups == 2) {
        tile_walk(walk, 2);
        tile_store(2, c[2], row);
        tile_store(3, c[3], row);
    } else {
        tile_walk(walk, 1);
    }
    tile_store(0, c[0], row);
    tile_store(1, c[1], row);
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

// Simd.tiles, TILE_CHUNK columns after TILE_CHUNK columns. A lone group of x reads W where it lies,
// and asks for the columns after these, or after the last ones for the next panel. Where more groups
// meet a panel of W, it is copied (tile_panel), and they ask for these columns of the next panel, each
// two of them for their share of its rows.
TARGET static void tile_block(const Tiles *a) {
    char panel[TILE_PANEL * TILE_CHUNK * 2] __attribute__((aligned(64)));
    size_t ldw = (size_t)a->K * 2, group = (size_t)tile_steps(a->K) * a->terms * a->columns * 64;
    int lone = a->m <= TILE, pairs = (a->m + 2 * TILE - 1) / (2 * TILE);
    TileShape shape = { .palette = 1 };
    for (int t = 0; t < TILES; t++) {
        shape.rows[t] = TILE;
        shape.bytes[t] = (uint16_t)(t == 4 || t == 5 ? 64 : 4 * a->columns);        // W; x and sums
    }
    tile_shape(&shape);

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
            tile_groups(a, &walk, p * 2 * TILE, k == 0, last);
            walk.next += (to - from) * ldw;
        }
    }
    tile_end();
}
#elif defined(ON_PAIRS)
// ---- products in pairs
// This part is compiled with SIMD defined as pairs_plain, and as avx512bf16 where the machine may have
// it.
//
// x is rounded to bf16 (--bf16-terms 1), as W is. A vector of 32 columns of x meets 32 of W: lane j adds
// the products of columns 2 j + 1 and 2 j to its sum, and 32 columns follow 32 columns; then the lanes
// are folded, as everywhere. A product of two bf16 is exact in f32. So the error is that of rounding x:
// 1.7e-3 of y's rms with 2,048 columns of random numbers, where f32 has 1.6e-7. Subnormal numbers count
// as zero. Again the order does not depend on tiles, batch or threads. The instruction does twice the
// multiply-adds of f32.
#define Vec             OWN(Vec)
#define Bf16s           OWN(Bf16s)
#define vec_all         OWN(vec_all)
#define vec_folds       OWN(vec_folds)
#define vec_pairs       OWN(vec_pairs)
#define bf16s_load      OWN(bf16s_load)
#define PM              OWN(PM)         // rows of x in a tile
#define PN              OWN(PN)         // rows of w in a tile
#define P1              OWN(P1)         // the same where a block has no more
#define round_row       OWN(round_row)
#define pairs_step      OWN(pairs_step)
#define pairs_tile      OWN(pairs_tile)
#define pairs_panels    OWN(pairs_panels)
#define pairs_block     OWN(pairs_block)

// Simd.round_bf16.
TARGET static void round_row(uint16_t *to, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = bf16_nearest(x[i]);
}

// acc (M,N) += x (M) w (N)^T in columns k .. k+n-1, pair by pair.
INLINE void pairs_step(Vec *acc, const uint16_t *const *x, const char *const *w, int M, int N, int k,
                       int n) {
    Bf16s b[PN];
    UNROLL for (int j = 0; j < N; j++) b[j] = bf16s_load(w[j] + (size_t)k * 2, n);
    UNROLL for (int i = 0; i < M; i++) {
        Bf16s a = bf16s_load(x[i] + k, n);
        UNROLL for (int j = 0; j < N; j++) acc[i * N + j] = vec_pairs(acc[i * N + j], a, b[j]);
    }
}

// The tile of M rows of x from i0 on and N rows of w from j0 on. Where the block ends before the tile
// does, its last row is read again in place of the missing ones. The first tile of a panel asks for as
// many bytes of what is read next as it reads (as dots_tile does).
INLINE void pairs_tile(const Dots *a, int M, int N, int i0, int j0) {
    Vec acc[PM * PN];
    const uint16_t *x[PM];
    const char *w[PN];
    float sum[PM * PN];
    int m = min_int(a->m - i0, M), n = min_int(a->n - j0, N), K = a->K, k = 0;
    int asks = a->next.bytes && !i0;
    const char *ahead = asks ? a->next.p + (size_t)j0 * K * 2 : NULL;

    UNROLL for (int i = 0; i < M; i++) x[i] = a->x16 + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldx;
    UNROLL for (int j = 0; j < N; j++) w[j] = a->w + (size_t)(j0 + (j < n ? j : n - 1)) * a->ldw;
    UNROLL for (int i = 0; i < M * N; i++) acc[i] = vec_all(0);

    for (; k + 2 * LANES <= K; k += 2 * LANES) {
        if (asks) {
            UNROLL for (int j = 0; j < N; j++, ahead += 64) ask_weights(ahead);
        }
        pairs_step(acc, x, w, M, N, k, 2 * LANES);
    }
    if (k < K) pairs_step(acc, x, w, M, N, k, K - k);

    vec_folds(sum, acc, M * N, a->scale);
    for (int i = 0; i < m; i++) {
        float *y = a->y + (size_t)(i0 + i) * a->ldy + j0;
        for (int j = 0; j < n; j++) y[j] = a->add ? y[j] + sum[i * N + j] : sum[i * N + j];
    }
}

// All tiles of a block: panels of N rows of w, and for each panel PM rows of x at a time.
INLINE void pairs_panels(const Dots *a, int N) {
    for (int j = 0; j < a->n; j += N) {
        int i = 0;
        for (; a->m - i > 1; i += PM) pairs_tile(a, PM, N, i, j);
        if (i < a->m) pairs_tile(a, 1, N, i, j);        // one row is left
    }
}

// Simd.pairs. Few rows of x (decode) come with P1 rows of w.
TARGET static void pairs_block(const Dots *a) {
    if (a->n <= P1) pairs_panels(a, P1);
    else pairs_panels(a, PN);
}
#endif  // ON_TILES, ON_PAIRS
#ifndef SIMD

#if defined(__x86_64__)
// ---- the vector in AVX2: sixteen lanes are a pair of registers
// The operations mean what their namesakes in plain C say; vec_fma rounds once.
#define TARGET_avx2 __attribute__((target("avx2,fma,f16c")))
#define INLINE_avx2 TARGET_avx2 static inline __attribute__((always_inline))

enum {
    MR_avx2 = 3, NR_avx2 = 2, N1_avx2 = 4,
    MX_avx2 = 3, NV_avx2 = 2, MS_avx2 = 4, VS_avx2 = 1,
    M8_avx2 = 3,
};
typedef struct { __m256 a, b; } Vec_avx2;       // lanes 0 to 7, lanes 8 to 15

INLINE_avx2 Vec_avx2 vec_all_avx2(float x) {
    return (Vec_avx2){ _mm256_set1_ps(x), _mm256_set1_ps(x) };
}

INLINE_avx2 Vec_avx2 vec_add_avx2(Vec_avx2 x, Vec_avx2 y) {
    return (Vec_avx2){ _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b) };
}

INLINE_avx2 Vec_avx2 vec_mul_avx2(Vec_avx2 x, Vec_avx2 y) {
    return (Vec_avx2){ _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) };
}

INLINE_avx2 Vec_avx2 vec_div_avx2(Vec_avx2 x, Vec_avx2 y) {
    return (Vec_avx2){ _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b) };
}

INLINE_avx2 Vec_avx2 vec_fma_avx2(Vec_avx2 x, Vec_avx2 y, Vec_avx2 z) {
    return (Vec_avx2){ _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) };
}

INLINE_avx2 Vec_avx2 vec_max_avx2(Vec_avx2 x, Vec_avx2 y) {
    return (Vec_avx2){ _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b) };
}

INLINE_avx2 Vec_avx2 vec_min_avx2(Vec_avx2 x, Vec_avx2 y) {
    return (Vec_avx2){ _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b) };
}

// 8 lanes of vec_scale.
INLINE_avx2 __m256 scale_8_avx2(__m256 x, __m256 k) {
    __m256i e = _mm256_cvtps_epi32(k), half = _mm256_srai_epi32(e, 1);
    __m256i bias = _mm256_set1_epi32(127);
    __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}

INLINE_avx2 Vec_avx2 vec_scale_avx2(Vec_avx2 x, Vec_avx2 k) {
    return (Vec_avx2){ scale_8_avx2(x.a, k.a), scale_8_avx2(x.b, k.b) };
}

// 8 elements of dtype as f32.
INLINE_avx2 __m256 load_8_avx2(const void *p, int dtype) {
    if (dtype == DT_F32) return _mm256_loadu_ps(p);
    __m128i h = _mm_loadu_si128(p);
    if (dtype == DT_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

INLINE_avx2 Vec_avx2 vec_load_avx2(const void *p, int dtype, int n) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    char part[LANES * 4] = {0};
    if (n < LANES) p = memcpy(part, p, (size_t)n * size);
    return (Vec_avx2){ load_8_avx2(p, dtype), load_8_avx2((const char *)p + 8 * size, dtype) };
}

INLINE_avx2 __m256 load_8_bytes_avx2(const signed char *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}

INLINE_avx2 Vec_avx2 vec_load_bytes_avx2(const signed char *p) {
    return (Vec_avx2){ load_8_bytes_avx2(p), load_8_bytes_avx2(p + 8) };
}

typedef struct { __m256i a, b; } Ints_avx2;     // quarters 0 and 1, 2 and 3
typedef Ints_avx2 Pairs_avx2;

INLINE_avx2 Ints_avx2 ints_zero_avx2(void) {
    return (Ints_avx2){ _mm256_setzero_si256(), _mm256_setzero_si256() };
}

INLINE_avx2 Ints_avx2 ints_add_avx2(Ints_avx2 a, Ints_avx2 b) {
    return (Ints_avx2){ _mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b) };
}

INLINE_avx2 Pairs_avx2 pairs_load_avx2(const char *p) {
    return (Pairs_avx2){ _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)),
                         _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(p + 16))) };
}

INLINE_avx2 Ints_avx2 ints_madd_avx2(Ints_avx2 a, Pairs_avx2 w, const int16_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    __m256i both = _mm256_set1_epi32(two);
    return ints_add_avx2(a, (Ints_avx2){ _mm256_madd_epi16(w.a, both), _mm256_madd_epi16(w.b, both) });
}

INLINE_avx2 Vec_avx2 vec_of_ints_avx2(Ints_avx2 a) {
    return (Vec_avx2){ _mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b) };
}

INLINE_avx2 void vec_store_avx2(float *p, Vec_avx2 x, int n) {
    float part[LANES], *to = n < LANES ? part : p;
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
    if (n < LANES) memcpy(p, part, (size_t)n * 4);
}

// f32_to_f16 of 8 lanes. The instruction gives infinity past 65504 and keeps bits of a NaN, so the
// lanes are clamped first, and a NaN is replaced by the quiet one of its sign.
INLINE_avx2 __m128i half_8_avx2(__m256 x) {
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    __m256 quiet = _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));
    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(65504)), _mm256_set1_ps(-65504));
    return _mm256_cvtps_ph(_mm256_blendv_ps(x, quiet, nan), _MM_FROUND_TO_NEAREST_INT);
}

INLINE_avx2 void vec_store_f16_avx2(uint16_t *p, Vec_avx2 x) {
    _mm_storeu_si128((void *)p, half_8_avx2(x.a));
    _mm_storeu_si128((void *)(p + 8), half_8_avx2(x.b));
}

INLINE_avx2 float vec_fold_avx2(Vec_avx2 x) {
    __m256 y = _mm256_add_ps(x.a, x.b);                                                 // 8 onto 8
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));      // 4 onto 4
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));                                             // 2 onto 2
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));                            // 1 onto 1
}

// The first steps of a fold: 8 onto 8, 4 onto 4.
INLINE_avx2 __m128 fold_to_4_avx2(Vec_avx2 x) {
    __m256 y = _mm256_add_ps(x.a, x.b);
    return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

// Four at a time: the last steps of two share their instructions, as in fold_16_avx512.
INLINE_avx2 void vec_folds_avx2(float *out, const Vec_avx2 *a, int n, float scale) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        __m128 w = fold_to_4_avx2(a[i]), x = fold_to_4_avx2(a[i + 1]);
        __m128 y = fold_to_4_avx2(a[i + 2]), z = fold_to_4_avx2(a[i + 3]);
        w = _mm_add_ps(_mm_movelh_ps(w, x), _mm_movehl_ps(x, w));               // 2 onto 2
        y = _mm_add_ps(_mm_movelh_ps(y, z), _mm_movehl_ps(z, y));
        w = _mm_add_ps(_mm_shuffle_ps(w, y, 0x88), _mm_shuffle_ps(w, y, 0xdd)); // 1 onto 1
        _mm_storeu_ps(out + i, _mm_mul_ps(w, _mm_set1_ps(scale)));
    }
    for (; i < n; i++) out[i] = vec_fold_avx2(a[i]) * scale;
}

INLINE_avx2 float vec_largest_avx2(Vec_avx2 x) {
    __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

// 8 bits of vec_at_least: order_key as above section 1, and x >= key where the larger of both is x.
INLINE_avx2 uint32_t at_least_8_avx2(const float *p, uint32_t key) {
    __m256i top = _mm256_set1_epi32((int)0x80000000u);
    __m256i x = _mm256_castps_si256(_mm256_add_ps(_mm256_loadu_ps(p), _mm256_setzero_ps()));
    x = _mm256_xor_si256(x, _mm256_or_si256(_mm256_srai_epi32(x, 31), top));
    x = _mm256_cmpeq_epi32(_mm256_max_epu32(x, _mm256_set1_epi32((int)key)), x);
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(x));
}

INLINE_avx2 uint32_t vec_at_least_avx2(const float *p, uint32_t key) {
    return at_least_8_avx2(p, key) | at_least_8_avx2(p + 8, key) << 8;
}

INLINE_avx2 void vec_store_words_avx2(short *p, Vec_avx2 x) {
    __m256i a = _mm256_slli_epi32(_mm256_castps_si256(x.a), 16);
    __m256i b = _mm256_slli_epi32(_mm256_castps_si256(x.b), 16);
    a = _mm256_packs_epi32(_mm256_srai_epi32(a, 16), _mm256_srai_epi32(b, 16));
    _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(a, 0xd8));     // packs works in halves
}

// to = 8 columns of every row after the other, then the next 8.
INLINE_avx2 void ints_arrange_avx2(short *to, const short (*x)[Q8_COLS]) {
    for (int c = 0; c < Q8_BLOCK; c += 8)
        for (int i = 0; i < 4; i++, to += 8) memcpy(to, x[i] + c, 8 * sizeof *to);
}

INLINE_avx2 Ints_avx2 ints_block_avx2(const short *x, const signed char *k) {
    Ints_avx2 sum = { _mm256_setzero_si256(), _mm256_setzero_si256() };
    UNROLL for (int c = 0; c < Q8_BLOCK; c += 8) {
        __m128i word = _mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)(k + c)));
        __m256i both = _mm256_broadcastsi128_si256(word);
        __m256i a = _mm256_load_si256((const void *)(x + 4 * c));
        __m256i b = _mm256_load_si256((const void *)(x + 4 * c + 16));
        sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(a, both));
        sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(b, both));
    }
    return sum;
}

// The quarters of ints_fold in two of four registers.
INLINE_avx2 __m256i fold_4_avx2(__m256i a, __m256i b, __m256i c, __m256i d) {
    a = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    c = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c));
}

INLINE_avx2 Ints_avx2 ints_fold_avx2(const Ints_avx2 *a) {
    return (Ints_avx2){ fold_4_avx2(a[0].a, a[1].a, a[2].a, a[3].a),
                        fold_4_avx2(a[0].b, a[1].b, a[2].b, a[3].b) };
}

// The f16 at p[j] + at, j < 4.
INLINE_avx2 __m128 four_f16_avx2(const char *const *p, size_t at) {
    uint16_t h[4];
    UNROLL for (int j = 0; j < 4; j++) memcpy(&h[j], p[j] + at, sizeof *h);
    return _mm_cvtph_ps(_mm_setr_epi16((short)h[0], (short)h[1], (short)h[2], (short)h[3], 0, 0, 0, 0));
}

INLINE_avx2 Vec_avx2 vec_four_f16_avx2(const char *const *p, size_t at) {
    __m256 x = _mm256_set_m128(four_f16_avx2(p, at), four_f16_avx2(p, at));
    return (Vec_avx2){ x, x };
}

INLINE_avx2 void vec_store_quarters_avx2(float *p, size_t by, Vec_avx2 x) {
    _mm_storeu_ps(p, _mm256_castps256_ps128(x.a));
    _mm_storeu_ps(p + by, _mm256_extractf128_ps(x.a, 1));
    _mm_storeu_ps(p + 2 * by, _mm256_castps256_ps128(x.b));
    _mm_storeu_ps(p + 3 * by, _mm256_extractf128_ps(x.b, 1));
}

INLINE_avx2 Vec_avx2 vec_all_f16_avx2(const char *p) {
    short h;
    memcpy(&h, p, sizeof h);
    __m256 x = _mm256_cvtph_ps(_mm_set1_epi16(h));
    return (Vec_avx2){ x, x };
}

// ---- the vector in AVX-512: one register, with a mask where fewer than 16 lanes count
#define TARGET_avx512 __attribute__((target("avx512f,avx512bw,avx512vl,fma,f16c")))
#define INLINE_avx512 TARGET_avx512 static inline __attribute__((always_inline))

enum {
    MR_avx512 = 4, NR_avx512 = 4, N1_avx512 = 16,
    MX_avx512 = 6, NV_avx512 = 4, MS_avx512 = 6, VS_avx512 = 4,
    M8_avx512 = 8,
};
typedef __m512 Vec_avx512;

INLINE_avx512 __m512 vec_all_avx512(float x) {
    return _mm512_set1_ps(x);
}

INLINE_avx512 __m512 vec_add_avx512(__m512 x, __m512 y) {
    return _mm512_add_ps(x, y);
}

INLINE_avx512 __m512 vec_mul_avx512(__m512 x, __m512 y) {
    return _mm512_mul_ps(x, y);
}

INLINE_avx512 __m512 vec_div_avx512(__m512 x, __m512 y) {
    return _mm512_div_ps(x, y);
}

INLINE_avx512 __m512 vec_fma_avx512(__m512 x, __m512 y, __m512 z) {
    return _mm512_fmadd_ps(x, y, z);
}

INLINE_avx512 __m512 vec_max_avx512(__m512 x, __m512 y) {
    return _mm512_max_ps(x, y);
}

INLINE_avx512 __m512 vec_min_avx512(__m512 x, __m512 y) {
    return _mm512_min_ps(x, y);
}

INLINE_avx512 __m512 vec_scale_avx512(__m512 x, __m512 k) {
    return _mm512_scalef_ps(x, k);
}

INLINE_avx512 float vec_largest_avx512(__m512 x) {
    return _mm512_reduce_max_ps(x);
}

// The lowest n bits, n < 16.
INLINE_avx512 __mmask16 first_lanes_avx512(int n) {
    return (__mmask16)((1u << n) - 1);
}

INLINE_avx512 __m512 vec_load_avx512(const void *p, int dtype, int n) {
    if (dtype == DT_F32 && n < LANES) return _mm512_maskz_loadu_ps(first_lanes_avx512(n), p);
    if (dtype == DT_F32) return _mm512_loadu_ps(p);
    __m256i h;
    if (n < LANES) h = _mm256_maskz_loadu_epi16(first_lanes_avx512(n), p);
    else h = _mm256_loadu_si256(p);
    if (dtype == DT_F16) return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

INLINE_avx512 __m512 vec_load_bytes_avx512(const signed char *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}

typedef __m512i Ints_avx512;
typedef __m512i Pairs_avx512;

INLINE_avx512 __m512i ints_zero_avx512(void) {
    return _mm512_setzero_si512();
}

INLINE_avx512 __m512i ints_add_avx512(__m512i a, __m512i b) {
    return _mm512_add_epi32(a, b);
}

INLINE_avx512 __m512i pairs_load_avx512(const char *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
}

INLINE_avx512 __m512i ints_madd_avx512(__m512i a, __m512i w, const int16_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    return _mm512_add_epi32(a, _mm512_madd_epi16(w, _mm512_set1_epi32(two)));
}

INLINE_avx512 __m512 vec_of_ints_avx512(__m512i a) {
    return _mm512_cvtepi32_ps(a);
}

INLINE_avx512 void vec_store_avx512(float *p, __m512 x, int n) {
    if (n < LANES) _mm512_mask_storeu_ps(p, first_lanes_avx512(n), x);
    else _mm512_storeu_ps(p, x);
}

// As half_8_avx2, for 16 lanes.
INLINE_avx512 void vec_store_f16_avx512(uint16_t *p, __m512 x) {
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u));
    __m512i quiet = _mm512_or_si512(sign, _mm512_set1_epi32(0x7fc00000));
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(65504)), _mm512_set1_ps(-65504));
    x = _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(quiet));
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE_avx512 float vec_fold_avx512(__m512 x) {
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));     // 8 onto 8
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));     // 4 onto 4
    __m128 z = _mm512_castps512_ps128(x);
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));                     // 2 onto 2
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));    // 1 onto 1
}

// Folds 16 vectors at once, with a quarter of the instructions: lane i of the result is vec_fold of
// a[i]. Each step takes two vectors x and y. It puts one half of x beside the same half of y, the
// other half of x beside the other half of y, and adds the two. These are the additions of
// vec_fold, first between lanes 8 apart, then 4, 2 and 1; the vectors are paired such that the sums
// end in their order.
#define FOLD_TWO(shuffle, x, y, some, others) \
    _mm512_add_ps(shuffle(x, y, some), shuffle(x, y, others))
INLINE_avx512 __m512 fold_16_avx512(const __m512 *a) {
    __m512 b[8], c[4], d[2];
    UNROLL for (int i = 0; i < 8; i++) {
        int x = i / 4 * 8 + i % 4;
        b[i] = FOLD_TWO(_mm512_shuffle_f32x4, a[x], a[x + 4], 0x44, 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++)
        c[i] = FOLD_TWO(_mm512_shuffle_f32x4, b[i], b[i + 4], 0x88, 0xdd);
    UNROLL for (int i = 0; i < 2; i++)
        d[i] = FOLD_TWO(_mm512_shuffle_ps, c[2 * i], c[2 * i + 1], 0x44, 0xee);
    return FOLD_TWO(_mm512_shuffle_ps, d[0], d[1], 0x88, 0xdd);
}

INLINE_avx512 void vec_folds_avx512(float *out, const __m512 *a, int n, float scale) {
    if (n == LANES) {
        _mm512_storeu_ps(out, _mm512_mul_ps(fold_16_avx512(a), _mm512_set1_ps(scale)));
    } else {
        for (int i = 0; i < n; i++) out[i] = vec_fold_avx512(a[i]) * scale;
    }
}

INLINE_avx512 uint32_t vec_at_least_avx512(const float *p, uint32_t key) {
    __m512i top = _mm512_set1_epi32((int)0x80000000u);
    __m512i x = _mm512_castps_si512(_mm512_add_ps(_mm512_loadu_ps(p), _mm512_setzero_ps()));
    x = _mm512_xor_si512(x, _mm512_or_si512(_mm512_srai_epi32(x, 31), top));
    return _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32((int)key));
}

INLINE_avx512 void vec_store_words_avx512(short *p, __m512 x) {
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(_mm512_castps_si512(x)));
}

INLINE_avx512 void ints_arrange_avx512(short *to, const short (*x)[Q8_COLS]) {
    ints_arrange_avx2(to, x);
}

INLINE_avx512 __m512i ints_block_avx512(const short *x, const signed char *k) {
    __m512i word = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)k));
    __m512i a = _mm512_madd_epi16(_mm512_shuffle_i32x4(word, word, 0x00), _mm512_load_si512(x));
    __m512i b = _mm512_madd_epi16(_mm512_shuffle_i32x4(word, word, 0x55), _mm512_load_si512(x + 32));
    __m512i c = _mm512_madd_epi16(_mm512_shuffle_i32x4(word, word, 0xaa), _mm512_load_si512(x + 64));
    __m512i d = _mm512_madd_epi16(_mm512_shuffle_i32x4(word, word, 0xff), _mm512_load_si512(x + 96));
    return _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d));
}

INLINE_avx512 __m512i ints_fold_avx512(const __m512i *x) {
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

INLINE_avx512 __m512 vec_four_f16_avx512(const char *const *p, size_t at) {
    return _mm512_broadcast_f32x4(four_f16_avx2(p, at));
}

INLINE_avx512 void vec_store_quarters_avx512(float *p, size_t by, __m512 x) {
    _mm_storeu_ps(p, _mm512_castps512_ps128(x));
    _mm_storeu_ps(p + by, _mm512_extractf32x4_ps(x, 1));
    _mm_storeu_ps(p + 2 * by, _mm512_extractf32x4_ps(x, 2));
    _mm_storeu_ps(p + 3 * by, _mm512_extractf32x4_ps(x, 3));
}

INLINE_avx512 __m512 vec_all_f16_avx512(const char *p) {
    short h;
    memcpy(&h, p, sizeof h);
    return _mm512_cvtph_ps(_mm256_set1_epi16(h));
}

// ---- AVX-512 with VNNI, as Ice Lake and Zen 4 have it
// The vector is that of AVX-512. What differs is the product of bytes: vpdpbusd multiplies four
// unsigned bytes with four signed ones and adds the products to a lane. So t is 256 hi + lo, two
// signed bytes, and a key's byte u becomes u + 128, whose surplus of 128 t is subtracted from the
// start: the sums begin at -128 sum t.
#define TARGET_avx512vnni \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")))
#define INLINE_avx512vnni TARGET_avx512vnni static inline __attribute__((always_inline))

enum {
    MR_avx512vnni = 4, NR_avx512vnni = 4, N1_avx512vnni = 16,
    MX_avx512vnni = 6, NV_avx512vnni = 4, MS_avx512vnni = 6, VS_avx512vnni = 4,
    M8_avx512vnni = 8,
};
#define Vec_avx512vnni             Vec_avx512
#define vec_all_avx512vnni         vec_all_avx512
#define vec_add_avx512vnni         vec_add_avx512
#define vec_mul_avx512vnni         vec_mul_avx512
#define vec_div_avx512vnni         vec_div_avx512
#define vec_fma_avx512vnni         vec_fma_avx512
#define vec_max_avx512vnni         vec_max_avx512
#define vec_min_avx512vnni         vec_min_avx512
#define vec_scale_avx512vnni       vec_scale_avx512
#define vec_load_avx512vnni        vec_load_avx512
#define vec_load_bytes_avx512vnni  vec_load_bytes_avx512
#define vec_store_avx512vnni       vec_store_avx512
#define vec_store_f16_avx512vnni   vec_store_f16_avx512
#define vec_fold_avx512vnni        vec_fold_avx512
#define vec_folds_avx512vnni       vec_folds_avx512
#define vec_largest_avx512vnni     vec_largest_avx512
#define vec_at_least_avx512vnni    vec_at_least_avx512
#define vec_four_f16_avx512vnni    vec_four_f16_avx512
#define vec_all_f16_avx512vnni     vec_all_f16_avx512
#define vec_store_quarters_avx512vnni vec_store_quarters_avx512
#define vec_of_ints_avx512vnni     vec_of_ints_avx512
#define vec_store_words_avx512vnni vec_store_words_avx512
#define Ints_avx512vnni            Ints_avx512
#define Pairs_avx512vnni           Pairs_avx512
#define ints_zero_avx512vnni       ints_zero_avx512
#define ints_add_avx512vnni        ints_add_avx512
#define pairs_load_avx512vnni      pairs_load_avx512
#define ints_fold_avx512vnni       ints_fold_avx512

// One instruction for what otherwise takes two.
INLINE_avx512vnni __m512i ints_madd_avx512vnni(__m512i a, __m512i w, const int16_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    return _mm512_dpwssd_epi32(a, w, _mm512_set1_epi32(two));
}

// to = for the first and the last 16 columns the upper bytes of the four rows, then the lower ones;
// last where the sums begin.
INLINE_avx512vnni void ints_arrange_avx512vnni(short *to, const short (*x)[Q8_COLS]) {
    __m512i *out = (void *)to;
    for (int i = 0; i < 4; i++) {
        __m512i word = _mm512_loadu_si512(x[i]);
        __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(word, _mm512_set1_epi16(128)), 8);
        __m256i hi = _mm512_cvtepi16_epi8(upper), lo = _mm512_cvtepi16_epi8(word);
        _mm_storeu_si128((__m128i *)(out + 0) + i, _mm256_castsi256_si128(hi));
        _mm_storeu_si128((__m128i *)(out + 1) + i, _mm256_castsi256_si128(lo));
        _mm_storeu_si128((__m128i *)(out + 2) + i, _mm256_extracti128_si256(hi, 1));
        _mm_storeu_si128((__m128i *)(out + 3) + i, _mm256_extracti128_si256(lo, 1));
    }
    __m512i top = _mm512_set1_epi8(-128), zero = _mm512_setzero_si512();
    __m512i hi = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, top, out[0]), top, out[2]);
    __m512i lo = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, top, out[1]), top, out[3]);
    out[4] = _mm512_sub_epi32(zero, _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo));
}

INLINE_avx512vnni __m512i ints_block_avx512vnni(const short *x, const signed char *k) {
    const __m512i *q = (const void *)x;
    __m512i top = _mm512_set1_epi8(-128);
    __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)k));
    __m512i last = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(k + 16)));
    first = _mm512_xor_si512(first, top);               // u + 128
    last = _mm512_xor_si512(last, top);
    __m512i hi = _mm512_dpbusd_epi32(_mm512_setzero_si512(), first, q[0]);
    __m512i lo = _mm512_dpbusd_epi32(q[4], first, q[1]);
    hi = _mm512_dpbusd_epi32(hi, last, q[2]);
    lo = _mm512_dpbusd_epi32(lo, last, q[3]);
    return _mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo);
}

// ---- pairs of bf16 in AVX-512
#define TARGET_avx512bf16 \
    __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")))
#define INLINE_avx512bf16 TARGET_avx512bf16 static inline __attribute__((always_inline))
enum { PM_avx512bf16 = 2, PN_avx512bf16 = 8, P1_avx512bf16 = 4 };
#define Vec_avx512bf16          __m512
#define Bf16s_avx512bf16        __m512i
#define vec_all_avx512bf16      vec_all_avx512
#define vec_folds_avx512bf16    vec_folds_avx512

INLINE_avx512bf16 __m512i bf16s_load_avx512bf16(const void *p, int n) {
    if (n == 2 * LANES) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
}

INLINE_avx512bf16 __m512 vec_pairs_avx512bf16(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// ---- tiles in AMX, as Intel's servers have them since Sapphire Rapids
// The numbers of tiles are literals in the instructions, so these are macros. GCC does not know that
// tileloadd and ldtilecfg read memory: it must be told to have stored what they read.
#define TARGET_amx \
    __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")))
#define INLINE_amx TARGET_amx static inline __attribute__((always_inline))
#define MEMORY_IS_READ __asm__ volatile("" ::: "memory")

#define tile_shape_amx(shape)   do { MEMORY_IS_READ; _tile_loadconfig(shape); } while (0)
#define tile_end_amx()          _tile_release()
#define tile_zero_amx(t)        _tile_zero(t)
#define tile_load_amx(t, p, stride) do { MEMORY_IS_READ; _tile_loadd(t, p, stride); } while (0)
#define tile_store_amx(t, p, stride) _tile_stored(t, p, stride)
#define tile_product_amx(c, a, b)   _tile_dpbf16ps(c, a, b)

// Sixteen registers of 16 elements. Rows 0 and 1, 2 and 3, .. are interleaved, then pairs of rows;
// now register 4 g + c has, in its part i of 128 bits, column 4 i + c of rows 4 g to 4 g + 3. The
// last steps bring the parts of one column together.
INLINE_amx void tile_turn_amx(void *to, const void *from) {
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

// 1: this processor has AMX with bf16, and Linux lets this process use it. The tiles' 8 KB are part
// of what the system saves for a thread, so a process has to ask once.
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
#elif defined(__aarch64__)
// ---- the vector in NEON: four registers, as in plain C
// Every 64-bit ARM processor has these instructions. The compiler makes them of plain C's
// operations; here stand those for which it knows none or a longer way: the fused multiply-add, f16,
// folds, masks and integers.
#define TARGET_neon
#define INLINE_neon static inline __attribute__((always_inline))

enum {
    MR_neon = 2, NR_neon = 2, N1_neon = 4,
    MX_neon = 4, NV_neon = 1, MS_neon = 4, VS_neon = 1,
    M8_neon = 2,
};
#define Vec_neon       Vec_plain
#define Ints_neon      Ints_plain
#define vec_all_neon   vec_all_plain
#define vec_add_neon   vec_add_plain
#define vec_mul_neon   vec_mul_plain
#define vec_div_neon   vec_div_plain
#define vec_max_neon   vec_max_plain
#define vec_min_neon   vec_min_plain
#define vec_scale_neon vec_scale_plain
#define Pairs_neon     Pairs_plain
#define ints_zero_neon          ints_zero_plain
#define ints_add_neon           ints_add_plain
#define pairs_load_neon         pairs_load_plain
#define ints_madd_neon          ints_madd_plain
#define vec_of_ints_neon        vec_of_ints_plain
#define vec_store_quarters_neon vec_store_quarters_plain
#define ints_arrange_neon       ints_arrange_plain

INLINE_neon Vec_plain vec_fma_neon(Vec_plain x, Vec_plain y, Vec_plain z) {
    EACH_QUARTER(i) x.q[i] = vfmaq_f32(z.q[i], x.q[i], y.q[i]);
    return x;
}

INLINE_neon Vec_plain vec_load_neon(const void *p, int dtype, int n) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    char part[LANES * 4] = {0};
    const char *at = n < LANES ? memcpy(part, p, (size_t)n * size) : p;
    Vec_plain x;
    EACH_QUARTER(i) {
        if (dtype == DT_F32) {
            memcpy(&x.q[i], at + 16 * i, 16);
            continue;
        }
        uint16x4_t h;
        memcpy(&h, at + 8 * i, 8);
        if (dtype == DT_F16) x.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(h));
        else x.q[i] = vreinterpretq_f32_u32(vshll_n_u16(h, 16));
    }
    return x;
}

INLINE_neon Vec_plain vec_load_bytes_neon(const signed char *p) {
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (Vec_plain){ { vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                          vcvtq_f32_s32(vmovl_high_s16(low)),
                          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                          vcvtq_f32_s32(vmovl_high_s16(high)) } };
}

INLINE_neon void vec_store_neon(float *p, Vec_plain x, int n) {
    if (n == LANES) memcpy(p, &x, sizeof x);
    else memcpy(p, &x, (size_t)n * sizeof *p);
}

// As half_8_avx2: clamped to +-65504, and a NaN is the quiet one of its sign.
INLINE_neon void vec_store_f16_neon(uint16_t *p, Vec_plain x) {
    EACH_QUARTER(i) {
        uint32x4_t number = vceqq_f32(x.q[i], x.q[i]);
        uint32x4_t sign = vandq_u32(vreinterpretq_u32_f32(x.q[i]), vdupq_n_u32(0x80000000u));
        uint32x4_t quiet = vorrq_u32(sign, vdupq_n_u32(0x7fc00000));
        float32x4_t y = vmaxq_f32(vminq_f32(x.q[i], vdupq_n_f32(65504)), vdupq_n_f32(-65504));
        y = vbslq_f32(number, y, vreinterpretq_f32_u32(quiet));
        vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(y)));
    }
}

// 8 onto 8 and 4 onto 4.
INLINE_neon float32x4_t quarters_neon(Vec_plain x) {
    float32x4_t y = vaddq_f32(x.q[0], x.q[2]), z = vaddq_f32(x.q[1], x.q[3]);
    return vaddq_f32(y, z);
}

INLINE_neon float vec_fold_neon(Vec_plain x) {
    float32x4_t y = quarters_neon(x);
    float32x2_t z = vadd_f32(vget_low_f32(y), vget_high_f32(y));        // 2 onto 2
    return vpadds_f32(z);                                               // 1 onto 1
}

// 2 onto 2, of x in the lower half and of y in the upper one.
INLINE_neon float32x4_t halves_neon(float32x4_t x, float32x4_t y) {
    float64x2_t a = vreinterpretq_f64_f32(x), b = vreinterpretq_f64_f32(y);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)), vreinterpretq_f32_f64(vzip2q_f64(a, b)));
}

// Four at a time: their last step, neighbours onto each other, is one instruction.
INLINE_neon void vec_folds_neon(float *out, const Vec_plain *a, int n, float scale) {
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t x = halves_neon(quarters_neon(a[i]), quarters_neon(a[i + 1]));
        float32x4_t y = halves_neon(quarters_neon(a[i + 2]), quarters_neon(a[i + 3]));
        vst1q_f32(out + i, vmulq_n_f32(vpaddq_f32(x, y), scale));
    }
    for (; i < n; i++) out[i] = vec_fold_neon(a[i]) * scale;
}

INLINE_neon float vec_largest_neon(Vec_plain x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[1]), vmaxq_f32(x.q[2], x.q[3])));
}

INLINE_neon uint32_t vec_at_least_neon(const float *p, uint32_t key) {
    const uint32x4_t bit = { 1, 2, 4, 8 };
    uint32_t bits = 0;
    EACH_QUARTER(i) {
        uint32x4_t x = vreinterpretq_u32_f32(vaddq_f32(vld1q_f32(p + 4 * i), vdupq_n_f32(0)));
        uint32x4_t sign = vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x), 31));
        x = veorq_u32(x, vorrq_u32(sign, vdupq_n_u32(0x80000000u)));
        bits |= vaddvq_u32(vandq_u32(vcgeq_u32(x, vdupq_n_u32(key)), bit)) << 4 * i;
    }
    return bits;
}

INLINE_neon void vec_store_words_neon(short *p, Vec_plain x) {
    EACH_QUARTER(i) vst1_s16(p + 4 * i, vmovn_s32(vreinterpretq_s32_f32(x.q[i])));
}

INLINE_neon Ints_plain ints_block_neon(const short *x, const signed char *k) {
    int32x4_t sum[4] = {0};
    UNROLL for (int c = 0; c < Q8_BLOCK; c += 8) {
        int16x8_t u = vmovl_s8(vld1_s8(k + c));
        EACH_QUARTER(i) {
            int16x8_t t = vld1q_s16(x + Q8_BLOCK * i + c);
            sum[i] = vmlal_s16(sum[i], vget_low_s16(t), vget_low_s16(u));
            sum[i] = vmlal_high_s16(sum[i], t, u);
        }
    }
    return (Ints_plain){ { (Int4)sum[0], (Int4)sum[1], (Int4)sum[2], (Int4)sum[3] } };
}

INLINE_neon Ints_plain ints_fold_neon(const Ints_plain *a) {
    Ints_plain sum;
    EACH_QUARTER(i) {
        int32x4_t x = vpaddq_s32((int32x4_t)a[0].q[i], (int32x4_t)a[1].q[i]);
        int32x4_t y = vpaddq_s32((int32x4_t)a[2].q[i], (int32x4_t)a[3].q[i]);
        sum.q[i] = (Int4)vpaddq_s32(x, y);
    }
    return sum;
}

INLINE_neon Vec_plain vec_four_f16_neon(const char *const *p, size_t at) {
    uint16_t h[4];
    UNROLL for (int j = 0; j < 4; j++) memcpy(&h[j], p[j] + at, sizeof *h);
    float32x4_t x = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
    return (Vec_plain){ { x, x, x, x } };
}

INLINE_neon Vec_plain vec_all_f16_neon(const char *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    float32x4_t x = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h)));
    return (Vec_plain){ { x, x, x, x } };
}
#endif  // __x86_64__, __aarch64__

// ---- the copies, and the choice of one
#define SIMD plain
#include "kernels.c"
#undef SIMD

#if defined(__x86_64__)
#define SIMD avx2
#include "kernels.c"
#undef SIMD

#define SIMD avx512
#include "kernels.c"
#undef SIMD

#define SIMD avx512vnni
#include "kernels.c"
#undef SIMD
#elif defined(__aarch64__)
#define SIMD neon
#include "kernels.c"
#undef SIMD
#endif

// With ON_TILES only the part on products in tiles is left of the file.
#define ON_TILES
#define SIMD amx_plain
#include "kernels.c"
#undef SIMD
#if defined(__x86_64__)
#define SIMD amx
#include "kernels.c"
#undef SIMD
#endif
#undef ON_TILES

// With ON_PAIRS, the part on products in pairs.
#define ON_PAIRS
#define SIMD pairs_plain
#include "kernels.c"
#undef SIMD
#if defined(__x86_64__)
#define SIMD avx512bf16
#include "kernels.c"
#undef SIMD
#endif
#undef ON_PAIRS

// Sets with tiles, or with pairs: another set's kernels, and those products (simd_choose). The plain
// ones are for tests, and only their names get them.
#if defined(__x86_64__)
static Simd simd_amx, simd_bf16;
#endif
static Simd simd_amx_plain, simd_pairs_plain;

static const Simd *const simd_table[] = {       // best first
#if defined(__x86_64__)
    &simd_amx,
    &simd_bf16,
    &simd_entry_avx512vnni,
    &simd_entry_avx512,
    &simd_entry_avx2,
#elif defined(__aarch64__)
    &simd_entry_neon,
#endif
    &simd_entry_plain,
    &simd_amx_plain,
    &simd_pairs_plain,
};
static const Simd *simd;                        // the one in use

// 1: this processor and its operating system have what the set needs.
static int simd_can(const Simd *s) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");   // and F16C
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
              && __builtin_cpu_supports("avx512vl");
    if (!strcmp(s->name, "avx2")) return avx2;
    int vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(s->name, "avx512")) return avx512;
    if (!strcmp(s->name, "avx512vnni")) return vnni;
    if (!strcmp(s->name, "avx512bf16")) return vnni && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(s->name, "amx")) return vnni && amx_can();
#elif defined(__aarch64__)
    if (!strcmp(s->name, "neon")) return 1;
#endif
    return !strcmp(s->name, "plain") || s == &simd_amx_plain || s == &simd_pairs_plain;
}

// Takes the set of that name, or the best there is when name is NULL. 0, or -1 when this machine
// cannot run it.
static int simd_set(const char *name) {
    for (size_t i = 0; i < sizeof simd_table / sizeof *simd_table; i++) {
        if (name && strcmp(name, simd_table[i]->name) != 0) continue;
        if (!simd_can(simd_table[i])) continue;
        simd = simd_table[i];
        return 0;
    }
    return -1;
}

#if defined(__x86_64__)
// 1: AMD's family 25, which with AVX-512 is Zen 4.
static int family_25(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    return (a >> 8 & 15) + (a >> 20 & 255) == 25;
}
#endif

// Runs before main, so no thread ever sees the choice change. The environment variable KVCOMP_SIMD
// (the name of a set) is for tests and comparisons; a set that cannot be had leaves the best
// there is. The sets with tiles or pairs are put together here; the plain ones stand beside the best
// vectors.
__attribute__((constructor)) static void simd_choose(void) {
    const char *name = getenv("KVCOMP_SIMD");
#if defined(__x86_64__)
    simd_amx = simd_entry_avx512vnni;
    simd_amx.name = "amx";
    simd_amx.tile_x = tile_terms_amx;
    simd_amx.tiles = tile_block_amx;
    simd_bf16 = simd_entry_avx512vnni;
    simd_bf16.name = "avx512bf16";
    simd_bf16.round_bf16 = round_row_avx512bf16;
    simd_bf16.pairs = pairs_block_avx512bf16;
    ask_l2 = family_25();
#endif
    simd_set(NULL);
    simd_pairs_plain = *simd;
    simd_pairs_plain.name = "pairs-plain";
    simd_pairs_plain.tiles = NULL;
    simd_pairs_plain.round_bf16 = round_row_pairs_plain;
    simd_pairs_plain.pairs = pairs_block_pairs_plain;
    simd_amx_plain = *simd;
    simd_amx_plain.name = "amx-plain";
    simd_amx_plain.tile_x = tile_terms_amx_plain;
    simd_amx_plain.tiles = tile_block_amx_plain;
    simd_amx_plain.pairs = NULL;
    if (name) simd_set(name);
}

const char *simd_name(void) { return simd->name; }

// ---- weights in 8 bits
// A tensor of dtype DT_Q8 has the numbers of q8_0: a block is Q8_BLOCK columns of a row, an f16
// scale d = max|w| / 127 and a byte round(w / d) a column. It lies in panels of 16 rows: the blocks
// of a panel follow each other, each with its 16 scales, and then, for every pair of columns, two
// bytes a row. Missing rows and columns are zeros.

static size_t q8_blocks(int cols) { return ((size_t)cols + Q8_BLOCK - 1) / Q8_BLOCK; }
static size_t q8_panels(int rows) { return ((size_t)rows + LANES - 1) / LANES; }

// Bytes of a tensor (rows,cols) of dtype DT_Q8.
size_t q8_tensor_bytes(int rows, int cols) {
    return q8_panels(rows) * q8_blocks(cols) * Q8_PANEL;
}

// Row r of a block (16 rows) at p = the n numbers x. A block with a NaN has a NaN for its scale.
// Returns the size of the largest number; 0 if that is infinite, which makes the scale a NaN as well.
static float q8_block_put(char *p, int r, const float *x, int n) {
    float top = 0, odd = 0;
    for (int i = 0; i < n; i++) {
        top = fmaxf(top, fabsf(x[i]));
        odd += x[i] * 0;
    }
    uint16_t d = f32_to_f16(top / 127 + odd);
    float scale = f16_to_f32(d);
    memcpy(p + 2 * r, &d, sizeof d);
    for (int i = 0; i < n; i++) {
        float q = scale > 0 ? fmaxf(-127, fminf(127, rintf(x[i] / scale))) : 0;
        p[2 * LANES + i / 2 * 2 * LANES + 2 * r + i % 2] = (char)(signed char)q;
    }
    return isfinite(top) ? top : 0;
}

// to (q8_tensor_bytes) = the matrix w of another dtype. Returns the size of its largest weight that is
// finite: above Q8_MOST what stands in `to` is not the matrix.
float q8_store(char *to, const Tensor *w) {
    size_t blocks = q8_blocks(w->cols), size = dtype_size(w->dtype);
    int panels = (int)q8_panels(w->rows);
    float top = 0;
    memset(to, 0, q8_tensor_bytes(w->rows, w->cols));
    #pragma omp parallel for schedule(static) reduction(max:top)
    for (int p = 0; p < panels; p++)
        for (size_t b = 0; b < blocks; b++)
            for (int r = 0; r < min_int(LANES, w->rows - p * LANES); r++) {
                int c = (int)b * Q8_BLOCK, n = min_int(Q8_BLOCK, w->cols - c);
                float x[Q8_BLOCK];
                to_f32(x, (const char *)w->data + ((size_t)(p * LANES + r) * w->cols + c) * size, w->dtype, n);
                top = fmaxf(top, q8_block_put(to + (p * blocks + b) * Q8_PANEL, r, x, n));
            }
    return top;
}

// dst (cols) = row r of w.
void tensor_row(float *dst, const Tensor *w, int r) {
    size_t blocks = q8_blocks(w->cols);
    if (w->dtype != DT_Q8) {
        to_f32(dst, (const char *)w->data + (size_t)r * w->cols * dtype_size(w->dtype), w->dtype, w->cols);
        return;
    }
    for (int c = 0; c < w->cols; c++) {
        const char *p = (const char *)w->data + (r / LANES * blocks + c / Q8_BLOCK) * Q8_PANEL;
        int i = c % Q8_BLOCK;
        uint16_t d;
        memcpy(&d, p + r % LANES * 2, sizeof d);
        dst[c] = f16_to_f32(d) * (signed char)p[2 * LANES + i / 2 * 2 * LANES + r % LANES * 2 + i % 2];
    }
}

// Room for another form of x, at a multiple of 64 bytes. It is kept from product to product and
// grows; products are never made side by side.
static void *product_room(size_t bytes) {
    static char *room;
    static size_t have;
    if (bytes > have) {
        room = xrealloc(room, bytes + 63);
        have = bytes;
    }
    return room + (64 - (uintptr_t)room % 64) % 64;
}

// matmul_strided for DT_Q8. A job is T_BLOCK rows of x and four panels of W, chunk by chunk.
static void matmul_q8(float *y, size_t ldy, const float *x, size_t ldx, const Tensor *w, int T) {
    size_t blocks = q8_blocks(w->cols);
    int t_blocks = (T + T_BLOCK - 1) / T_BLOCK, row_blocks = (w->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    // T rows as whole numbers, their scales behind them
    int16_t *whole = product_room(T * blocks * (Q8_BLOCK * sizeof(int16_t) + sizeof(float)));
    float *scale = (float *)(whole + T * blocks * Q8_BLOCK);
    #pragma omp parallel if ((size_t)T * w->rows * w->cols > 1 << 16)
    {
        #pragma omp for schedule(static)
        for (int t = 0; t < T; t++)
            simd->whole(whole + t * blocks * Q8_BLOCK, scale + t * blocks, x + t * ldx, w->cols);

        #pragma omp for collapse(2) schedule(static)
        for (int tb = 0; tb < t_blocks; tb++)
            for (int rb = 0; rb < row_blocks; rb++) {
                size_t t0 = (size_t)tb * T_BLOCK, chunk = K_CHUNK / Q8_BLOCK;
                int end = min_int((rb + 1) * ROW_BLOCK, w->rows);
                for (int r = rb * ROW_BLOCK; r < end; r += LANES)
                    for (size_t b = 0; b < blocks; b += chunk)
                        simd->dots8(&(Dots8){
                            .y = y + t0 * ldy + r, .ldy = ldy,
                            .x = whole + (t0 * blocks + b) * Q8_BLOCK,
                            .scale = scale + t0 * blocks + b, .all = blocks,
                            .w = (const char *)w->data + (r / LANES * blocks + b) * Q8_PANEL,
                            .m = min_int(T - tb * T_BLOCK, T_BLOCK), .n = min_int(end - r, LANES),
                            .blocks = (int)min_size(blocks - b, chunk), .add = b > 0,
                        });
            }
    }
}

// ---- products in tiles

int bf16_terms = 3;     // numbers of bf16 that make one of x: --bf16-terms

// matmul_strided for bf16 in tiles, T <= TILE_ROWS. First x is split into terms. Then a job is at most
// TILE_BLOCK rows of x (as many in each, about) and TILE_PANEL rows of W. A single group of x goes
// through all columns of a panel, so that W streams in order. Several go through TILE_CHUNK columns of
// all panels before the next, so that their terms stay in the second-level cache; a thread meets the
// same jobs again. Sums wait as tiles, because to exchange their rows and columns takes far longer than
// to add them.
static void matmul_tiles(float *y, size_t ldy, const float *x, size_t ldx, const Tensor *w, int T) {
    int K = w->cols, columns = T == 1 ? 1 : TILE, terms = bf16_terms;
    int part = T <= TILE ? K : TILE_CHUNK, groups = (T + TILE - 1) / TILE;
    int pairs = (groups + 1) / 2, blocks = (T + TILE_BLOCK - 1) / TILE_BLOCK;
    int block = (pairs + blocks - 1) / blocks * 2 * TILE;
    size_t step = (size_t)terms * TILE_COLS * columns, group = tile_steps(K) * step;
    size_t panels = ((size_t)w->rows + TILE_PANEL - 1) / TILE_PANEL, panel = TILE_PANEL * columns;
    uint16_t *split = product_room(groups * (group * sizeof *split + panels * panel * sizeof(float)));
    float *sums = (float *)(split + groups * group);
    #pragma omp parallel if ((size_t)T * w->rows * K > 1 << 16)
    {
        #pragma omp for collapse(2) schedule(static)
        for (int g = 0; g < groups; g++)
            for (int k = 0; k < K; k += TILE_CHUNK)
                simd->tile_x(split + g * group + k / TILE_COLS * step, x + g * TILE * ldx + k, ldx,
                             min_int(T - g * TILE, TILE), min_int(K - k, TILE_CHUNK), columns, terms);

        for (int k = 0; k < K; k += part) {
            #pragma omp for collapse(2) schedule(static) nowait
            for (int t = 0; t < T; t += block)
                for (int r = 0; r < w->rows; r += TILE_PANEL)
                    simd->tiles(&(Tiles){
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

// ---- products

// x (T,K), rows ldx apart, rounded to bf16 (T,K) in the products' room.
static const uint16_t *rounded(const float *x, size_t ldx, int T, int K) {
    uint16_t *to = product_room((size_t)T * K * sizeof *to);
    #pragma omp parallel for schedule(static) if (T > 1)
    for (int t = 0; t < T; t++) simd->round_bf16(to + (size_t)t * K, x + t * ldx, (size_t)K);
    return to;
}

// y (T,rows) = x (T,cols) W^T; rows of y are ldy elements apart, rows of x ldx. A job is a block of
// T_BLOCK rows of x and ROW_BLOCK rows of W. For few rows of x it finishes 4 rows of W (a panel)
// before the next ones, so that W streams in order; meanwhile each call asks for its share of the
// next panel. Short rows are one chunk, and in order anyway: the kernel gets all of them at once (a
// decode step of the shipped model, of 192 columns, takes .7 of the time that panels take).
void matmul_strided(float *y, size_t ldy, const float *x, size_t ldx, const Tensor *w, int T) {
    if (w->dtype == DT_Q8) {
        matmul_q8(y, ldy, x, ldx, w, T);
        return;
    }
    if (w->dtype == DT_BF16 && simd->tiles) {
        for (int t = 0; t < T; t += TILE_ROWS)
            matmul_tiles(y + t * ldy, ldy, x + t * ldx, ldx, w, min_int(T - t, TILE_ROWS));
        return;
    }
    int K = w->cols, panels = T <= 4 && K > SHORT_ROW, panel = panels ? 4 : ROW_BLOCK;
    int in_pairs = w->dtype == DT_BF16 && simd->pairs && bf16_terms == 1;
    const uint16_t *x16 = in_pairs ? rounded(x, ldx, T, K) : NULL;      // (T,K)
    void (*kernel)(const Dots *) = in_pairs ? simd->pairs : simd->dots[w->dtype];
    int t_blocks = (T + T_BLOCK - 1) / T_BLOCK, row_blocks = (w->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    size_t size = dtype_size(w->dtype);
    #pragma omp parallel for collapse(2) schedule(static) if ((size_t)T * w->rows * K > 1 << 16)
    for (int tb = 0; tb < t_blocks; tb++) {
        for (int rb = 0; rb < row_blocks; rb++) {
            int t0 = tb * T_BLOCK, end = min_int((rb + 1) * ROW_BLOCK, w->rows);
            for (int r = rb * ROW_BLOCK; r < end; r += panel) {
                for (int k = 0; k < K; k += K_CHUNK) {
                    Dots block = {
                        .y = y + t0 * ldy + r, .ldy = ldy,
                        .x = x + t0 * ldx + k, .ldx = ldx,
                        .w = (const char *)w->data + ((size_t)r * K + k) * size, .ldw = K * size,
                        .m = min_int(T - t0, T_BLOCK),
                        .n = min_int(end - r, panel),
                        .K = min_int(K - k, K_CHUNK),
                        .add = k > 0, .scale = 1,
                    };
                    if (in_pairs) {
                        block.x16 = x16 + (size_t)t0 * K + k;
                        block.ldx = (size_t)K;
                    }
                    if (panels) {
                        block.next.p = (const char *)w->data + ((size_t)(r + panel) * K + (size_t)panel * k) * size;
                        block.next.bytes = (size_t)panel * block.K * size;
                    }
                    kernel(&block);
                }
            }
        }
    }
}

// Does it matter here, with weights of bf16, of how many terms a number is made?
int terms_matter(int terms) {
    return simd->tiles || (simd->pairs && terms == 1);
}

// Bytes that a product of T rows of n numbers with weights of dtype takes for another form of x: whole
// numbers, terms and sums, or numbers that are rounded.
size_t product_bytes(int dtype, size_t T, size_t n) {
    if (dtype == DT_Q8) return T * n * 9 / 4;
    if (dtype != DT_BF16) return 0;
    if (simd->tiles) return min_size(T, TILE_ROWS) * n * (2 * (size_t)bf16_terms + 4);
    return simd->pairs && bf16_terms == 1 ? T * n * 2 : 0;
}

// y (T,rows) = x (T,cols) W^T, rows side by side.
void matmul(float *y, const float *x, const Tensor *w, int T) {
    matmul_strided(y, (size_t)w->rows, x, (size_t)w->cols, w, T);
}

// The two products of attention for a tile of queries and rows. They run inside threads and are
// never parallel themselves. Rows of K and V may be f32 tiles or the cache's own f16 and bf16 rows.
// The results are the same bits, and decode need not copy rows first (13 -> 21 GB/s a thread).

// s (m,n) = scale * q (m,D) k (n,D)^T. next: see Dots.
void scores_of(float *s, const float *q, const void *k, int dtype, int m, int n, int D,
                      float scale, Ahead next) {
    Dots block = {
        .y = s, .ldy = (size_t)n,
        .x = q, .ldx = (size_t)D,
        .w = k, .ldw = kind_bytes(dtype, D),
        .m = m, .n = n, .K = D,
        .scale = scale, .next = next,
    };
    simd->dots[dtype](&block);
}

// Q8Query of a group of four queries (m,D): one for every Q8_COLS columns.
int q8_pieces(int D) { return (D + Q8_COLS - 1) / Q8_COLS; }

// Bytes of m queries (m,D) as integers.
size_t q8_query_bytes(int m, int D) {
    return (size_t)(m / 4) * q8_pieces(D) * sizeof(Q8Query);
}

void q8_queries(Q8Query *to, const float *q, int m, int D) {
    for (int i = 0; i < m; i += 4)
        for (int c = 0; c < D; c += Q8_COLS, to++)
            simd->integers_q8(to, q + (size_t)i * D + c, (size_t)D, min_int(m - i, 4),
                              min_int(D - c, Q8_COLS));
}

void q8_scores(float *s, const Q8Query *q, const void *k, int m, int n, int D, float scale,
                      Ahead next) {
    Dots block = {
        .y = s, .ldy = (size_t)n,
        .q8 = q,
        .w = k, .ldw = q8_bytes(D),
        .m = m, .n = n, .K = D,
        .scale = scale, .next = next,
    };
    simd->dots_q8(&block);
}

// o (m,D) = p (m,n) v (n,D); add: o += that. next: see Mix.
void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add,
                   Ahead next) {
    Mix block = { .o = o, .p = p, .v = v, .m = m, .n = n, .D = D, .add = add, .next = next };
    if (dtype == ROWS_Q8) simd->mix_q8(&block);
    else simd->mix[dtype](&block);
}

// s (m,n) = scale * q (m,D) k (n,D)^T, all f32.
void attn_scores(float *s, const float *q, const float *k, int m, int n, int D, float scale) {
    scores_of(s, q, k, DT_F32, m, n, D, scale, (Ahead){0});
}

// y (m,n) = x (m,K) w (n,K)^T, all f32; rows of y lie ldy numbers apart. add 1: y += that.
void dots_of(float *y, size_t ldy, const float *x, const float *w, int m, int n, int K, int add) {
    simd->dots[DT_F32](&(Dots){
        .y = y, .ldy = ldy,
        .x = x, .ldx = (size_t)K,
        .w = (const char *)w, .ldw = K * sizeof(float),
        .m = m, .n = n, .K = K,
        .add = add, .scale = 1,
    });
}

// x (n,m) = 2^(x - max) down each column; max and sum (m) go on from what earlier rows left.
void softmax_columns(float *x, int n, int m, float *max, float *sum) {
    simd->softmax_columns(x, n, m, max, sum);
}

// o (m,D) += p (m,n) v (n,D), all f32.
void attn_mix(float *o, const float *p, const float *v, int m, int n, int D) {
    mix_of(o, p, v, DT_F32, m, n, D, 1, (Ahead){0});
}

// x (n) = e^(x - max), *sum += them.
void exp_shift(float *x, float max, int n, float *sum) { simd->exp_shift(x, max, (size_t)n, sum); }

// a (n) b (n), in the order of every other dot product.
float dot_f32(const float *a, const float *b, int n) {
    float s;
    attn_scores(&s, a, b, 1, 1, n, 1);
    return s;
}

// The largest of x (n); -INFINITY when n is 0.
float max_f32(const float *x, int n) { return simd->max(x, (size_t)n); }

// ---- rows

// dst (n) = src (n), which is of dtype.
void to_f32(float *dst, const void *src, int dtype, size_t n) { simd->widen[dtype](dst, src, n); }

// dst (n), which is of dtype, = src (n), rounded to the nearest.
void from_f32(void *dst, const float *src, int dtype, size_t n) {
    uint16_t *h = dst;
    if (dtype == DT_F32) {
        memcpy(dst, src, n * sizeof(float));
    } else if (dtype == DT_F16) {
        simd->narrow_f16(h, src, n);
    } else {
        for (size_t i = 0; i < n; i++) h[i] = f32_to_bf16(src[i]);
    }
}

// x (n,D) = the n rows of format q8_0 at o.
void q8_unpack(float *x, const char *o, int n, int D) { simd->unpack_q8(x, o, n, D); }

enum { PIECE = 256 };       // elements of a weight vector widened at a time

// piece = elements c .. of a vector of weights, at most PIECE of them -> how many
static int widen_piece(float *piece, const Tensor *w, int c, int n) {
    int m = min_int(n - c, PIECE);
    to_f32(piece, (const char *)w->data + c * dtype_size(w->dtype), w->dtype, (size_t)m);
    return m;
}

// y (T,cols) += b (cols); nothing where the layer has no bias.
void add_bias(float *y, const Tensor *b, int T) {
    float piece[PIECE];
    if (!b->data) return;
    for (int c = 0; c < b->cols; c += PIECE) {
        int n = widen_piece(piece, b, c, b->cols);
        for (int t = 0; t < T; t++) {
            for (int i = 0; i < n; i++) y[(size_t)t * b->cols + c + i] += piece[i];
        }
    }
}

// y (T,n) = x / sqrt(mean(x^2) + eps) * w, row by row; y may be x.
void rmsnorm(float *y, const float *x, const Tensor *w, int T, int n, float eps) {
    #pragma omp parallel for schedule(static) if ((size_t)T * n > 1 << 15)
    for (int t = 0; t < T; t++) {
        const float *a = x + (size_t)t * n;
        float *o = y + (size_t)t * n, piece[PIECE];
        float inv = 1 / sqrtf(dot_f32(a, a, n) / (float)n + eps);
        for (int c = 0; c < n; c += PIECE) {
            int m = widen_piece(piece, w, c, n);
            for (int i = 0; i < m; i++) o[c + i] = a[c + i] * inv * piece[i];
        }
    }
}

// g (n) = g / (1 + e^-g) * u
void swiglu(float *g, const float *u, size_t n) {
    const size_t piece = 4096;
    #pragma omp parallel for schedule(static) if (n > 1 << 15)
    for (size_t i = 0; i < n; i += piece) simd->swiglu(g + i, u + i, min_size(n - i, piece));
}

// ---- the k largest

// The indices of the k largest of x (n), ascending -> how many, min(k,n). Of equal numbers the
// lower index goes first.
//
// order_key makes unsigned numbers of the values. The k-th largest key is found bit by bit, the
// highest first: a bit is set if k keys are at least as large with it. Each bit takes one pass over
// the values, as vectors. The search ends early when exactly k keys are left.
int top_k(const float *x, int n, int k, int *idx) {
    uint32_t key = 0;           // the bits so far
    int take = min_int(k, n);
    int from = -1;              // keys >= key
    int above = 0;              // keys known to be larger than the k-th
    int last = n;               // places from here on do not get in with a key that equals the k-th
    if (take <= 0) return 0;
    for (uint32_t bit = 1u << 31; bit && from != take; bit >>= 1) {
        int c = simd->sum_from(x, NULL, n, key | bit);
        if (c < take) {
            above = c;
        } else {
            key |= bit;
            from = c;
        }
    }

    // Where more than k keys are left, the last ones that equal the k-th stay behind.
    if (from != take) {
        for (last = 0; above < take; last++) above += order_key(x[last]) == key;
    }
    int count = simd->list_from(x, 0, last, key, idx);
    if (count < take) count += simd->list_from(x, last, n, key + 1, idx + count);
    if (top_k_chosen) top_k_chosen(x, n, idx, count);
    return count;
}

// The sum of w (n) over the places where x (n) is at least the number whose order_key is
// `key`; w NULL: how many such places there are.
int weight_from(const float *x, const int *w, int n, uint32_t key) {
    return simd->sum_from(x, w, n, key);
}

size_t q8_bytes(int D) {
    return (size_t)D + 2 * ((D + Q8_BLOCK - 1) / Q8_BLOCK);
}

// Bytes of a row of D elements of that kind.
size_t kind_bytes(int dtype, int D) {
    return dtype == ROWS_Q8 ? q8_bytes(D) : D * dtype_size(dtype);
}

// ---- packed rows: elements of w bits
// Unpacks n elements of w bits from p to h (n) f16, whose cut bits are 0. May read PATS_GUARD bytes
// behind the last one.
void unpack_bits(uint16_t *h, const unsigned char *p, int n, int w) {
    for (int i = 0; i < n; i++) {
        size_t bit = (size_t)i * w;
        uint32_t u;
        memcpy(&u, p + bit / 8, 4);                      // Sec. 3, fetch: the load
        h[i] = (uint16_t)(u >> bit % 8 << (16 - w));     // the next element's bits fall off on top
    }
}

// Unpacks elements as attention reads them: with half a step where mid, the bit to add, is not 0.
static void unpack_plain(uint16_t *h, const unsigned char *p, int n, int w, int mid) {
    unpack_bits(h, p, n, w);
    if (!mid) return;
    #pragma omp simd
    for (int i = 0; i < n; i++) h[i] = (uint16_t)(h[i] | ((h[i] & 0x7fff) ? mid : 0));
}

// What attention calls; unpack_choose (section 3) may set a faster function with the same results.
void (*unpack_f16)(uint16_t *h, const unsigned char *p, int n, int w, int mid)
    = unpack_plain;

// ---- PATS: elements of w bits to f16, with the vectors of a processor
// The results are those of unpack_plain, to the bit: n elements of w bits at p become h (n) f16
// whose cut bits are 0, and `mid`, the bit that --pats-round=mid adds, is set in all but zeros.

#if defined(__x86_64__)
// For every w, where the elements of a group stand: the bytes to bring together, the bits to shift.
// AVX2 takes 8 elements, each in a 32-bit lane. VBMI takes 32 elements, 4 from each 64-bit lane.
static struct {
    unsigned char perm8[32];        // AVX2: the 4 bytes of each lane, from the one its element starts in
    int shift8[8];                  // AVX2: the bit of that byte it starts at
    unsigned char perm32[64];       // VBMI: the 8 bytes of each lane
    unsigned char shift32[64];      // VBMI: for each byte of a result, the bit of the lane it begins at
} unpack_lanes[17];

// Fills unpack_lanes.
static void unpack_lanes_init(void) {
    for (int w = 1; w <= 16; w++) {
        for (int i = 0; i < 8; i++) {
            int at = i * w / 8;                          // the byte element i starts in
            unpack_lanes[w].shift8[i] = i * w % 8;
            for (int b = 0; b < 4; b++)                  // 128: the shuffle puts a zero there
                unpack_lanes[w].perm8[4 * i + b] = (unsigned char)(at + b < 16 ? at + b : 128);
        }
        // Elements 4j .. 4j+3 start at bit 4jw, on a whole or a half byte. An element is to fill the
        // top w bits of an f16, so the 16 bits begin 16 - w bits before the element does.
        for (int j = 0; j < 8; j++)
            for (int b = 0; b < 8; b++) {
                int start = j * w % 2 * 4 + b / 2 * w, bit = start + w - 16 + b % 2 * 8;
                unpack_lanes[w].perm32[8 * j + b] = (unsigned char)(j * w / 2 + b);
                unpack_lanes[w].shift32[8 * j + b] = (unsigned char)(bit & 63);
            }
    }
}

// unpack_plain with AVX2: two groups of 8 elements at a time, each in 32-bit lanes, then narrowed
// to 16 bits.
__attribute__((target("avx2")))
static void unpack_avx2(uint16_t *h, const unsigned char *p, int n, int w, int mid) {
    __m256i perm = _mm256_loadu_si256((const void *)unpack_lanes[w].perm8);
    __m256i shift = _mm256_loadu_si256((const void *)unpack_lanes[w].shift8);
    __m256i mask = _mm256_set1_epi32((1 << w) - 1);
    __m256i add = _mm256_set1_epi16((short)mid), zero = _mm256_setzero_si256();
    __m128i b = _mm_cvtsi32_si128(16 - w);
    int i = 0;
    for (; i + 16 <= n; i += 16, p += 2 * w) {
        __m256i lo = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)p));
        __m256i hi = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(p + w)));
        lo = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(lo, perm), shift), mask);
        hi = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(hi, perm), shift), mask);
        lo = _mm256_packus_epi32(lo, hi);
        lo = _mm256_permute4x64_epi64(lo, 0xd8);         // packus works in halves: order them
        lo = _mm256_sll_epi16(lo, b);
        hi = _mm256_cmpeq_epi16(_mm256_add_epi16(lo, lo), zero);         // +0 and -0 double to 0
        _mm256_storeu_si256((void *)(h + i), _mm256_or_si256(lo, _mm256_andnot_si256(hi, add)));
    }
    _mm256_zeroupper();                                  // compilers leave it out before a tail call
    if (i < n) unpack_plain(h + i, p, n - i, w, mid);
}

#define VBMI __attribute__((target("avx512f,avx512bw,avx512vbmi")))

// 32 elements from the packed bytes x. lanes: perm32 and shift32; kept: the bits of an f16 that are
// not cut; add: mid.
VBMI __attribute__((always_inline))
static inline __m512i unpack_32(__m512i x, const __m512i *lanes, __m512i kept, __m512i add,
                                int mid) {
    x = _mm512_multishift_epi64_epi8(lanes[1], _mm512_permutexvar_epi8(lanes[0], x));
    x = _mm512_and_si512(x, kept);
    if (!mid) return x;
    __mmask32 not_zero = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff));
    return _mm512_mask_add_epi16(x, not_zero, x, add);
}

// unpack_plain with AVX-512 VBMI: groups of 32 elements, four at a time while 64 bytes can be read
// from the start of each, then one at a time with masks.
VBMI static void unpack_vbmi(uint16_t *h, const unsigned char *p, int n, int w, int mid) {
    const __m512i lanes[2] = {
        _mm512_loadu_si512(unpack_lanes[w].perm32),
        _mm512_loadu_si512(unpack_lanes[w].shift32),
    };
    __m512i kept = _mm512_set1_epi16((short)(0xffff << (16 - w)));
    __m512i add = _mm512_set1_epi16((short)mid);
    int i = 0;
    for (; (n - i - 96) * w >= 512; i += 128, p += 16 * w)
        UNROLL for (int j = 0; j < 4; j++) {
            __m512i x = _mm512_loadu_si512(p + 4 * w * j);
            _mm512_storeu_si512(h + i + 32 * j, unpack_32(x, lanes, kept, add, mid));
        }
    for (; i < n; i += 32, p += 4 * w) {
        int m = min_int(n - i, 32);
        __mmask64 bytes = ~(__mmask64)0 >> (64 - (m * w + 7) / 8);
        __mmask32 elements = ~(__mmask32)0 >> (32 - m);
        __m512i x = _mm512_maskz_loadu_epi8(bytes, p);
        _mm512_mask_storeu_epi16(h + i, elements, unpack_32(x, lanes, kept, add, mid));
    }
    _mm256_zeroupper();
}
#undef VBMI

// Sets unpack_f16 to the fastest of these that the processor has.
void unpack_choose(void) {
    unpack_lanes_init();
    __builtin_cpu_init();
    int vbmi = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi");
    if (vbmi) unpack_f16 = unpack_vbmi;
    else if (__builtin_cpu_supports("avx2")) unpack_f16 = unpack_avx2;
}
#else
// Without x86 vectors unpack_plain stays.
void unpack_choose(void) { }
#endif

#endif  // SIMD
