// lib/kernels.h - everything that is arithmetic only: number formats, products of matrices, the two products
// of attention, exponentials, and the k largest of n numbers.
//
// Compiled for every instruction set and chosen at run time. Results depend neither on the number of threads
// nor on T: row t of a product has the same bits whatever the batch. (m,n) is row-major.
#ifndef LIB_KERNELS_H
#define LIB_KERNELS_H
#include "base.h"
#include <math.h>

// types of weights and of plain rows; see dtype_size()
enum { DT_F32, DT_F16, DT_BF16,
       DT_Q8,                   // matrices only, on the CPU (--weights q8_0): panels of blocks, see q8_store
       ROWS_Q8 };               // rows in the hands of a kernel only: of format q8_0

typedef struct {                // a matrix W (rows,cols): y = W x has rows numbers, x has cols. A vector has rows 1
    const void *data;           // NULL: there is no such tensor
    int dtype;                  // DT_*
    int rows, cols;
} Tensor;

static inline size_t dtype_size(int dt) { return dt == DT_F32 ? 4 : 2; }        // of a number; DT_Q8 has none

typedef struct {                // memory that will be read next: a kernel asks for it in portions while it computes
    const char *p;
    size_t bytes;
} Ahead;

#define LOG2_E 1.44269504f

// ---- number formats, for both compilers
typedef union {                 // a float and its bits
    float f;
    uint32_t u;
} FloatBits;

KV_HD static inline float bf16_to_f32(uint16_t h) {
    FloatBits x;
    x.u = (uint32_t)h << 16;
    return x.f;
}

// To the nearest bf16, ties to even. Saturates at the largest finite bf16; NaN stays NaN.
KV_HD static inline uint16_t f32_to_bf16(float f) {
    FloatBits x;
    x.f = f;
    if ((x.u & 0x7fffffff) > 0x7f800000) return (uint16_t)(x.u >> 16 | 64);
    uint32_t r = (x.u + 0x7fff + (x.u >> 16 & 1)) >> 16;
    if ((r & 0x7fff) >= 0x7f80) r = (r & 0x8000) | 0x7f7f;
    return (uint16_t)r;
}

// The bf16 nearest to x, which does not saturate: for products, in which an infinity must not look finite.
static inline uint16_t bf16_nearest(float x) {
    FloatBits a;
    a.f = x;
    if (a.f != a.f) return 0x7fc0;
    return (uint16_t)((a.u + 0x7fff + (a.u >> 16 & 1)) >> 16);
}

KV_HD static inline float f16_to_f32(uint16_t h) {
    FloatBits x;
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) x.u = sign | 0x7f800000 | mantissa << 13;               // infinity, NaN
    else if (exponent) x.u = sign | (exponent + 112) << 23 | mantissa << 13;    // biases 15 and 127
    else {                                                                      // subnormal: mantissa * 2^-24
        x.f = (float)mantissa * 5.9604644775390625e-8f;
        x.u |= sign;
    }
    return x.f;
}

// To the nearest f16, ties to even. Saturates at 65504; NaN stays NaN.
KV_HD static inline uint16_t f32_to_f16(float f) {
    FloatBits x;
    x.f = f;
    uint32_t sign = x.u >> 16 & 0x8000;
    uint32_t a = x.u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);                       // NaN
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7bff);                      // rounds past 65504
    if (a < 0x38800000) {               // below 2^-14 the result is subnormal. The float adder rounds it: 0.5f's last
        x.u = a;                        // bit stands for 2^-24, which is the unit of a subnormal f16
        x.f += 0.5f;
        return (uint16_t)(sign | (x.u - 0x3f000000));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}

// A float as an unsigned number with the same order; -0 counts as +0. Every bit of a negative float
// is turned around, and only the sign of any other.
KV_HD static inline uint32_t order_key(float x) {
    union { float f; uint32_t u; int32_t i; } v;
    v.f = x + 0.0f;
    return v.u ^ ((uint32_t)(v.i >> 31) | 0x80000000u);
}

#ifdef __cplusplus
extern "C" {
#endif

// Numbers of dtype to f32 and back, rounded to the nearest.
void to_f32  (float *dst, const void *src, int dtype, size_t n);
void from_f32(void *dst, const float *src, int dtype, size_t n);

// ---- rows of format q8_0: blocks of 32 values, the last one may be shorter; a block is an f16 scale
// d = max|x| / 127, and then one signed byte round(x / d) a value
enum { Q8_BLOCK = 32 };
static inline size_t q8_bytes(int D) { return (size_t)D + 2 * ((D + Q8_BLOCK - 1) / Q8_BLOCK); }       // a row
static inline size_t kind_bytes(int dtype, int D) {            // of a row of D values of dtype, or ROWS_Q8
    return dtype == ROWS_Q8 ? q8_bytes(D) : D * dtype_size(dtype);
}

// o = the row x (D). The scale of a block is a NaN where a number of it is none, or infinite.
void   q8_pack  (char *o, const float *x, int D);
void   q8_unpack(float *x, const char *o, int n, int D);        // x (n,D) = n rows

// ---- rows of format q4: blocks of 32 values, the last one may be shorter, turned by a Hadamard transform and
// rounded to 4 bits. A block of n values is turned in parts of m, the largest power of two that divides n:
//   y = H x, H[i][j] = -1 where i & j has an odd number of bits, else 1;     x = H y / m
//   y_j is stored as u_j = 0 .. 15, which stands for the odd number 2 u_j - 15, in units of m d = max|y| / 15
//   x_i = d sum_j H[i][j] (2 u_j - 15)
// The sum is one of small integers: reading is exact, in any order. A block is the f16 d, then four planes: bit j
// of plane b is bit b of u_j. A plane is one word of 16 bits for up to 16 values, else two.
enum { Q4_BLOCK = 32, Q4_BYTES = 18 };
KV_HD static inline int q4_words(int n) { return n > 16 ? 2 : 1; }             // of a plane of a block of n
KV_HD static inline int q4_part(int n) { return n & -n; }                      // m
static inline size_t q4_bytes(int D) {                                         // a row
    int rest = D % Q4_BLOCK;
    return (size_t)(D / Q4_BLOCK * Q4_BYTES + (rest ? 2 + 8 * q4_words(rest) : 0));
}

// o = the row x (D). The scale of a block is a NaN where a number of it is none, or infinite.
void   q4_pack  (char *o, const float *x, int D);
void   q4_unpack(float *x, const char *o, int n, int D);        // x (n,D) = n rows

// ---- weights in 8 bits (DT_Q8)
size_t q8_tensor_bytes(int rows, int cols);
#define Q8_MOST (127 * 65504.0f)        // the largest weight that they hold
float  q8_store(char *to, const Tensor *w);     // to = w, which is of another dtype -> its largest |weight|

// ---- products of matrices
// y (T,rows) = x (T,cols) W^T
void matmul(float *y, const float *x, const Tensor *w, int T);
void tensor_row(float *dst, const Tensor *w, int r);            // dst (cols) = row r of w

extern int bf16_terms;                  // numbers of bf16 that make one of x: 1, 2 or 3
int    terms_matter(int terms);         // does the set in use make its products by them?
size_t product_bytes(int dtype, size_t T, size_t n);    // that a product of T rows of n numbers takes beside them

void add_bias(float *y, const Tensor *b, int T);                // y (T,b.cols) += b; nothing when b.data is NULL
void rmsnorm(float *y, const float *x, const Tensor *w, int T, int n, float eps);       // y and x (T,n)
void swiglu(float *g, const float *u, size_t n);                // g = silu(g) * u

// ---- the products of attention. k and v (n,D) are of dtype: DT_F32, DT_F16, DT_BF16 or ROWS_Q8; next is read
// afterwards
// s (m,n) = scale * q (m,D) k (n,D)^T, and o (m,D) = p (m,n) v (n,D); add 1: o += that. q is of f32, or a Q8Query where
// the keys are of q8_0
void scores_of(float *s, const void *q, const void *k, int dtype, int m, int n, int D, float scale, Ahead next);
void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add, Ahead next);
void attn_scores(float *s, const float *q, const float *k, int m, int n, int D, float scale);  // all f32

// Scores of keys of q8_0 are sums of integers (D89). A Q8Query holds up to Q8_COLS columns of four queries, so four of
// head_dim D take q8_pieces(D) of them.
typedef struct Q8Query Q8Query;
enum { Q8_COLS = 512 };         // columns that one factor of an integer query holds for, at most
static inline int q8_pieces(int D) { return (D + Q8_COLS - 1) / Q8_COLS; }
size_t q8_query_bytes(int m, int D);
void   q8_queries(Q8Query *to, const float *q, int m, int D);

// y (m,n) = x (m,K) w (n,K)^T, all f32; rows of y lie ldy numbers apart. add 1: y += that.
void dots_of(float *y, size_t ldy, const float *x, const float *w, int m, int n, int K, int add);
float dot_f32(const float *a, const float *b, int n);           // in the same order of lanes as attn_scores

// x = exp(x - max), *sum += all of x; -INFINITY gives 0
void exp_shift(float *x, float max, int n, float *sum);

// x (n,m) = 2^(x - max) down each column; max and sum (m) go on from what earlier rows left
void softmax_columns(float *x, int n, int m, float *max, float *sum);

// ---- packed rows: n elements of w bits at p become h (n) f16 whose cut bits are 0. It may read 16 bytes
// behind the last one
void unpack_f16(uint16_t *h, const unsigned char *p, int n, int w);

// ---- choosing
float max_f32(const float *x, int n);                           // the largest; -INFINITY when n is 0
int   top_k(const float *x, int n, int k, int *idx);            // places of the k largest (ties: the lower), ascending -> count
extern void (*top_k_chosen)(const float *x, int n, const int *idx, int k);     // tests look at a choice

// "amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "neon", "plain"; KVCOMP_SIMD overrides the choice.
// "amx-plain" and "pairs-plain" are for tests: the tiles of AMX in plain C, products in pairs without their instruction
const char *simd_name(void);

// ---- behind the interface: for lib/kernels.c, lib/kernels_x86.c and tests
enum {
    LANES   = 16,       // floats of a vector, on every instruction set
    Q8_TOP  = 32512,    // the largest integer of a query
    Q8_PANEL = LANES * (2 + Q8_BLOCK),  // bytes of 16 rows by 32 columns of DT_Q8
};

struct Q8Query {        // four rows of x (4,Q8_COLS) as integers t, x = factor t
    int16_t t[Q8_COLS / 8][4][8];               // 8 columns of every row, then the next 8
    float factor[LANES];                        // lane 4i + j: of row i
};

// A block of a product. dots: y (m,n) = scale * x (m,K) w (n,K)^T; mix: y (m,K) = x (m,n) w (n,K); or y += that
typedef struct {
    float *y;
    size_t ldy;         // numbers from a row of y to the next
    const void *x;      // of f32. dots[PAIRS]: of bf16; dots[DT_Q8]: whole numbers, int16; dots[ROWS_Q8]: Q8Query,
                        // group after group of four rows
    size_t ldx;         // numbers from a row of x to the next
    const float *unit;  // dots[DT_Q8]: what a 1 stands for in each Q8_BLOCK columns of x, ldx / Q8_BLOCK a row
    const char *w;      // of the kind whose function is called. DT_Q8: panels (K / Q8_BLOCK,Q8_PANEL)
    size_t ldw;         // bytes from a row of w to the next; mix: they lie side by side
    int m, n, K;        // dots[DT_Q8]: n at most LANES, K a multiple of Q8_BLOCK
    int add;            // 1: y += the products
    float scale;        // dots, but not of DT_Q8
    Ahead next;         // memory that is read after this block; none: the rows of w that follow
} KernelBlock;

// Kinds of products beside those of DT_* and ROWS_Q8: w and x of bf16, in pairs, and the same by AVX-512 BF16.
enum { PAIRS = ROWS_Q8 + 1, PAIRS_BF16, PRODUCT_KINDS };

// The kernels of one instruction set. NULL: not in this set.
typedef struct {
    const char *name;
    void (*dots[PRODUCT_KINDS])(const KernelBlock *a);
    void (*mix[PRODUCT_KINDS])(const KernelBlock *a);       // w: DT_F32, DT_F16, DT_BF16, ROWS_Q8
    float (*whole)(int16_t *t, const float *x, int n, float most, float least);
    void (*whole_blocks)(int16_t *t, float *unit, const float *x, int n);       // for dots[DT_Q8]
    void (*widen[3])(float *dst, const void *src, size_t n);
    void (*unpack_q8)(float *dst, const char *src, int n, int D);
    void (*unpack_q4)(float *dst, const char *src, size_t n);   // n whole blocks
    void (*unpack)(uint16_t *h, const unsigned char *p, int n, int w);
    void (*exp_shift)(float *x, float max, size_t n, float *sum);
    void (*softmax_columns)(float *x, int n, int m, float *max, float *sum);
    void (*swiglu)(float *g, const float *u, size_t n);
    float (*max)(const float *x, size_t n);
    int (*count_from)(const float *x, int n, uint32_t key);                     // keys (order_key) of at least `key`

    // For weights of bf16, a product by numbers of bf16 and the bytes of room that it takes (kernels_x86.c); NULL:
    // dots_pairs. terms: the most numbers for which it is used; 0: none, dots serves.
    void (*product)(float *y, const float *x, const Tensor *w, int T);
    size_t (*product_room)(size_t T, size_t n);
    int terms;
} Kernels;

extern const char *const simd_names[];  // of all sets this program has, best first; NULL ends the list
int simd_set(const char *name);         // takes that set, NULL: the best -> 0; -1: this machine cannot run it
int simd_x86(Kernels *k, const char *name);     // adds to *k what that set has beside vectors -> 0, or -1
void *product_room(size_t bytes);       // one room for another form of x, 64-byte aligned, kept and reused

#ifdef __cplusplus
}
#endif
#endif
