// test/test_kernels.c - lib/kernels: conversions, matrix products, attention, exponentials, top_k, each on every
// instruction set that this machine runs. Links lib/base.o and the objects of the kernels, nothing else.
#define _GNU_SOURCE
#include "check.h"
#include "../lib/kernels.h"

// Every kernel of every instruction set this machine runs, against double, at sizes that enter the
// main loop, its tail and neither; the promises "no result depends on T, on the number of threads
// or on the place in a block" bit for bit.

// Every set that this machine can run, but those that are another one with products in pairs, which only
// --bf16-terms 1 calls for. In the end the best one is chosen again.
#define EACH_SIMD(i) \
    for (int i = 0; simd_names[i] || simd_set(NULL); i++) \
        if (!in_pairs(simd_names[i]) && !simd_set(simd_names[i]))

// A CHECK that names the set.
#define CHECK_SET(cond, fmt, ...) CHECK(cond, "%s: " fmt, simd_name(), __VA_ARGS__)

#define COUNT(array) (int)(sizeof (array) / sizeof *(array))
#define NOTHING_AHEAD ((Ahead){ 0 })

// 1: the set makes products in pairs of bf16.
static int in_pairs(const char *name) { return !strcmp(name, "avx512bf16") || !strcmp(name, "pairs-plain"); }

// The bits of a float.
static uint32_t bits_of(float x) { return ((FloatBits){ .f = x }).u; }

// The float of these bits.
static float from_bits(uint32_t u) { return ((FloatBits){ .u = u }).f; }

// Are these the bits that every set with a fused multiply-add gives? *first: a number of the first one's, 0 before it.
static int same_bits(uint64_t *first, const void *x, size_t n) {
    uint64_t h = hash_bytes(1, x, n);
    if (!strcmp(simd_name(), "plain")) return 1;
    if (!*first) *first = h;
    return h == *first;
}

// ---- products of matrices

// A random matrix (rows,cols) of the given type.
static Tensor random_tensor(int dtype, int rows, int cols) {
    size_t n = (size_t)rows * cols;
    OWN float *x = random_floats(n);
    void *data = xmalloc(n * dtype_size(dtype));
    from_f32(data, x, dtype, n);
    return (Tensor){ data, dtype, rows, cols };
}

// Element i of a tensor in double.
static double weight_at(const Tensor *w, size_t i) {
    const uint16_t *h = w->data;
    return w->dtype == DT_F32   ? ((const float *)w->data)[i]
           : w->dtype == DT_F16 ? f16_to_f32(h[i])
                                : bf16_to_f32(h[i]);
}

// w as a matrix of dtype DT_Q8, and what its bytes mean by the format's definition: values (rows,cols).
static Tensor q8_tensor(const Tensor *w, double *values) {
    char *p = xmalloc(q8_tensor_bytes(w->rows, w->cols));
    q8_store(p, w);
    for (int r = 0; r < w->rows; r++)
        for (int b = 0; b < w->cols; b += 32) {
            size_t at = (size_t)r * w->cols + b;
            double top = 0;
            int n = w->cols - b < 32 ? w->cols - b : 32;
            for (int i = 0; i < n; i++) top = fmax(top, fabs(weight_at(w, at + i)));
            double d = f16_to_f32(f32_to_f16((float)(top / 127)));
            for (int i = 0; i < n; i++) {
                double q = d > 0 ? rintf((float)weight_at(w, at + i) / (float)d) : 0;
                values[at + i] = d * fmax(-127, fmin(127, q));
            }
        }
    return (Tensor){ p, DT_Q8, w->rows, w->cols };
}

// A random matrix of any type, and its values (rows,cols). One of DT_Q8 is made from one of the type `from`.
static Tensor random_weights(int dtype, int from, int rows, int cols, double *values) {
    Tensor w = random_tensor(dtype == DT_Q8 ? from : dtype, rows, cols);
    for (size_t i = 0; i < (size_t)rows * cols; i++) values[i] = weight_at(&w, i);
    if (dtype != DT_Q8) return w;
    Tensor q = q8_tensor(&w, values);
    free((void *)w.data);
    return q;
}

// How a product may err: by a share of the sum of magnitudes, a few roundings of a sum in f32; and where x is rounded
// to 16 bits, by a step of the largest number of a block of x, times the weights there.
typedef struct {
    double sum, step;
    int block;
} Errors;
static const Errors as_f32 = { 4e-7, 0, 32 };
static const Errors as_q8 = { 0, .51 / 32767 + 1e-6, 32 };

// x (T,cols) v (rows,cols)^T in double: for each product its value, and the bound of its error (T,rows,2).
static double *products_wanted(const float *x, const double *v, int T, int rows, int cols, Errors may) {
    double *want = xcalloc((size_t)T * rows * 2, sizeof *want);
    for (int i = 0; i < T * rows; i++) {
        const float *a = x + (size_t)(i / rows) * cols;
        const double *b = v + (size_t)(i % rows) * cols;
        for (int from = 0; from < cols; from += may.block) {
            double size = 0, top = 0, weight = 0;
            for (int k = from; k < cols && k < from + may.block; k++) {
                want[2 * i] += a[k] * b[k];
                size += fabs(a[k] * b[k]);
                top = fmax(top, fabs(a[k]));
                weight += fabs(b[k]);
            }
            want[2 * i + 1] += weight * top * may.step + size * may.sum;
        }
    }
    return want;
}

// The largest error of y (n) / scale, as a share of its bound. *rms: that of all of y, as a share of the rms of
// what is wanted.
static double product_error(const float *y, const double *want, size_t n, double scale, double *rms) {
    double bad = 0, off = 0, all = 0;
    for (size_t i = 0; i < n; i++, want += 2) {
        double e = fabs(y[i] / scale - want[0]), share = e / (want[1] + 1e-30);
        if (!(share <= bad)) bad = isnan(share) ? INFINITY : share;
        off += e * e;
        all += want[0] * want[0];
    }
    *rms = sqrt(off / all);
    return bad;
}

// Products of rows from anywhere in x, for some T and one to three threads: how many rows have other bits than in
// y (T,rows), the product of all, or something was written behind them. Rows with a NaN are left out.
static int rows_with_other_bits(const float *y, const float *x, const Tensor *w, int T) {
    static const int Ts[] = { 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 129 };
    size_t rows = (size_t)w->rows;
    OWN float *z = xmalloc(((size_t)T * rows + 1) * sizeof *z);
    int other = 0;
    for (int threads = 1; threads <= 3; threads++)
        for (int b = 0; b < COUNT(Ts); b++) {
            int n = Ts[b] < T ? Ts[b] : T, t0 = rnd_int(T - n + 1);
            set_threads(threads);
            z[n * rows] = -77;
            matmul(z, x + (size_t)t0 * w->cols, w, n);
            other += z[n * rows] != -77;
            for (int t = 0; t < n; t++) {
                const float *row = y + (size_t)(t0 + t) * rows;
                other += !isnan(row[0]) && memcmp(z + (size_t)t * rows, row, rows * sizeof *z) != 0;
            }
        }
    set_threads(2);
    return other;
}

TEST(math_matmul, "a product equals double on every instruction set, dtype and odd size, and writes nothing "
                  "outside y; a row of it is the same bits whatever T, the number of threads and the rows of W "
                  "around it, and with every set that has a fused multiply-add; a NaN stays in its row; rows of "
                  "W are read back") {
    static const int shape[][2] = { { 1, 1 },   { 7, 16 },   { 16, 33 },  { 5, 40 },   { 66, 96 },
                                    { 3, 130 }, { 13, 576 }, { 2, 1024 }, { 9, 2100 }, { 130, 1100 } };

    enum { T = 133 };

    rnd_seed(41);
    for (int a = 0; a < COUNT(shape); a++)
        for (int dt = DT_F32; dt <= DT_Q8; dt++) {
            int rows = shape[a][0], cols = shape[a][1], r0 = rows / 3;
            uint64_t fused = 0;
            size_t ldx = (size_t)cols, ldy = (size_t)rows, all = T * ldy;
            OWN double *v = xmalloc(ldy * ldx * sizeof *v);
            OWN float *x = random_floats(T * ldx), *row = xmalloc(ldx * sizeof *row);
            OWN float *y = xmalloc((all + 1) * 4), *z = xmalloc(all * 4);
            Tensor w = random_weights(dt, a % 3, rows, cols, v), part = { w.data, dt, rows - r0, cols };
            OWN double *want = products_wanted(x, v, T, rows, cols, dt == DT_Q8 ? as_q8 : as_f32);
            if (dt != DT_Q8) part.data = (const char *)w.data + r0 * ldx * dtype_size(dt);
            EACH_SIMD(i) {
                y[all] = -77;
                set_threads(1);
                matmul(y, x, &w, T);
                double rms, e = product_error(y, want, all, 1, &rms);
                CHECK_SET(e <= 1 && y[all] == -77, "dtype %d %d x %d: %.3g of the bound, %g behind it", dt, rows,
                      cols, e, y[all]);
                int other = rows_with_other_bits(y, x, &w, T), wrong = 0;
                matmul(z, x, &part, 3);
                for (int t = 0; t < 3 && dt != DT_Q8; t++)
                    other += memcmp(z + t * part.rows, y + t * rows + r0, part.rows * sizeof *z) != 0;
                CHECK_SET(!other, "dtype %d %d x %d: %d rows have other bits", dt, rows, cols, other);
                int other_sum = dt == DT_BF16 && !strncmp(simd_name(), "amx", 3);
                CHECK_SET(other_sum || same_bits(&fused, y, all * sizeof *y), "dtype %d %d x %d: other bits than another set",
                          dt, rows, cols);
                float was = x[cols / 2];
                x[cols / 2] = NAN;
                matmul(z, x, &w, 2);
                x[cols / 2] = was;
                CHECK_SET(isnan(z[0]) && !isnan(z[rows]), "dtype %d: a NaN in x is lost, or spreads", dt);
                for (int r = 0; r < rows; r++) {
                    tensor_row(row, &w, r);
                    for (int c = 0; c < cols; c++) wrong += fabs(row[c] - v[r * ldx + c]) > 1e-6 * fabs(row[c]);
                }
                CHECK_SET(!wrong, "dtype %d %d x %d: %d of the numbers read back are others", dt, rows, cols,
                          wrong);
            }
            free((void *)w.data);
        }
    float bad[40] = { [35] = NAN }, row[40];
    double v[40];
    Tensor w = { bad, DT_F32, 1, 40 }, q = q8_tensor(&w, v);
    tensor_row(row, &q, 0);
    CHECK(row[0] == 0 && isnan(row[35]), "a NaN among the weights is lost");
    free((void *)q.data);
}

TEST(math_terms, "products by numbers of bf16, in tiles and in pairs (--bf16-terms): the rms errors that "
                 "kernels_x86.c and kernels.c state, the same bits whatever T, the threads and the number of "
                 "columns, and by the instruction as in plain C; a NaN or an infinity in its own row") {
    static const struct {
        const char *set[2];     // in plain C, and by the instruction
        int terms, shapes;      // how many of the shapes, from the first
        double least, most;
    } kinds[] = {
        { { "amx-plain", "amx" }, 3, 2, 1.25e-7, 1.55e-7 },
        { { "amx-plain", "amx" }, 2, 2, 2.3e-6, 2.7e-6 },
        { { "amx-plain", "amx" }, 1, 2, 1.5e-3, 1.9e-3 },
        { { "pairs-plain", "avx512bf16" }, 1, 6, 1.5e-3, 1.9e-3 },
    };
    static const int shape[][2] = { { 75, 2048 }, { 7, 33 }, { 9, 31 }, { 1, 1 }, { 131, 1100 }, { 64, 2080 } };

    enum { T = 129 };

    if (simd_set("pairs-plain")) leave_out("AVX-512 with VNNI");
    // The second NaN has all bits set, which rounding carries beyond the exponent.
    const float odd[] = { NAN, from_bits(0x7fffffff), INFINITY };
    rnd_seed(61);
    for (int k = 0; k < COUNT(kinds); k++)
        for (int a = 0; a < kinds[k].shapes; a++) {
            int rows = shape[a][0], cols = shape[a][1];
            size_t n = (size_t)T * rows;
            OWN double *v = xmalloc((size_t)rows * cols * sizeof *v);
            OWN float *x = random_floats((size_t)T * cols), *y = xmalloc(n * sizeof *y), *z = xmalloc(n * sizeof *z);
            Tensor w = random_weights(DT_BF16, 0, rows, cols, v);
            x[cols / 2] = from_bits(0x00000007);                // subnormal: counts as zero
            OWN double *want = products_wanted(x, v, T, rows, cols, as_f32);
            bf16_terms = kinds[k].terms;
            for (int i = 0; i < 2; i++) {
                double rms;
                if (simd_set(kinds[k].set[i])) continue;
                if (!i) matmul(y, x, &w, T);
                product_error(y, want, n, 1, &rms);
                CHECK_SET(cols < 2048 || (rms >= kinds[k].least && rms <= kinds[k].most), "%d terms, %d x %d: "
                          "rms error %.3g", bf16_terms, rows, cols, rms);
                int other = rows_with_other_bits(y, x, &w, T);
                CHECK_SET(!other, "%d terms, %d x %d: %d rows have other bits", bf16_terms, rows, cols, other);
                for (int kind = 0; kind < COUNT(odd); kind++) {
                    float *at = x + 5 * (size_t)cols + cols / 3, was = *at;
                    int wrong = 0;
                    *at = odd[kind];
                    matmul(z, x, &w, T);
                    *at = was;
                    for (size_t j = 0; j < n; j++) {
                        int lost = kind < 2 || bf16_terms > 1 ? !isnan(z[j]) : isfinite(z[j]);
                        wrong += j / rows == 5 ? lost : bits_of(z[j]) != bits_of(y[j]);
                    }
                    CHECK_SET(!wrong, "%g in x, and %d numbers are not what they should be", odd[kind], wrong);
                }
            }
            free((void *)w.data);
        }
    bf16_terms = 3;
    simd_set(NULL);
}

// ---- the products of attention

TEST(math_attention_tiles, "attn_scores and mix_of equal double for every head size and block, the same bits with every "
                           "set that has fused multiply-add, a row does not depend on m, and rows as the cache holds them "
                           "give what the same rows unpacked give") {
    static const int Ds[] = { 2, 16, 36, 40, 48, 64, 80, 96, 128 };
    static const int Ms[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64 };
    static const int Ns[] = { 1, 2, 5, 33, 63, 64 };

    enum { MOST = 64 * 128 };

    OWN float *o = xmalloc(MOST * 4), *o2 = xmalloc(MOST * 4), *wide = xmalloc(MOST * 4), *one = xmalloc(MOST * 4);
    float s[64 * 64], s2[64 * 64];
    uint16_t rows[MOST];
    uint64_t fused = 0;
    EACH_SIMD(i) {
        uint64_t bits = 0;
        rnd_seed(44);
        for (int a = 0; a < COUNT(Ds); a++) {
            int D = Ds[a];
            size_t all = 64 * (size_t)D;
            OWN float *q = random_floats(all), *k = random_floats(all), *o0 = random_floats(all);
            OWN double *v = xmalloc(all * sizeof *v);
            for (size_t j = 0; j < all; j++) v[j] = k[j];
            for (int b = 0; b < COUNT(Ms) * COUNT(Ns); b++) {
                int m = Ms[b % COUNT(Ms)], n = Ns[b / COUNT(Ms)], t = rnd_int(m), j = rnd_int(n);
                size_t of_s = (size_t)m * n * 4, of_o = (size_t)m * D * 4;
                attn_scores(s, q, k, m, n, D, 0.3f);
                OWN double *want = products_wanted(q, v, m, n, D, as_f32);
                double rms, bad = product_error(s, want, (size_t)m * n, 0.3f, &rms);
                bits = hash_bytes(bits, s, of_s);
                CHECK_SET(bad <= 1, "attn_scores m %d n %d D %d: %.3g of the bound", m, n, D, bad);
                attn_scores(one, q + t * D, k, 1, n, D, 0.3f);
                CHECK_SET(!memcmp(one, s + t * n, (size_t)n * 4), "attn_scores: row %d of %d depends on m (n %d D "
                          "%d)", t, m, n, D);
                CHECK_SET(s[t * n + j] == 0.3f * dot_f32(q + t * D, k + j * D, D), "dot_f32 is not attn_scores (D "
                          "%d)", D);

                memcpy(o, o0, of_o);
                mix_of(o, s, k, DT_F32, m, n, D, 1, NOTHING_AHEAD);
                bad = 0;
                for (int x = 0; x < m * D; x++) {
                    double sum = o0[x], size = fabs(o0[x]);
                    for (int r = 0; r < n; r++) {
                        double p = (double)s[x / D * n + r] * k[r * D + x % D];
                        sum += p;
                        size += fabs(p);
                    }
                    bad = fmax(bad, fabs(o[x] - sum) / (size * 2e-6));
                }
                bits = hash_bytes(bits, o, of_o);
                CHECK_SET(bad <= 1, "mix_of m %d n %d D %d: %.3g of the bound", m, n, D, bad);
                memcpy(one, o0 + t * D, (size_t)D * 4);
                mix_of(one, s + t * n, k, DT_F32, 1, n, D, 1, NOTHING_AHEAD);
                CHECK_SET(!memcmp(one, o + t * D, (size_t)D * 4), "mix_of: row %d of %d depends on m (n %d D %d)", t,
                          m, n, D);

                for (int dt = DT_F16; dt <= DT_BF16; dt++) {
                    // What to ask memory for changes no number.
                    Ahead next = { (const char *)k, (size_t)n * D * 2 + 5 };
                    from_f32(rows, k, dt, (size_t)n * D);
                    to_f32(wide, rows, dt, (size_t)n * D);
                    scores_of(s, q, rows, dt, m, n, D, 0.3f, next);
                    attn_scores(s2, q, wide, m, n, D, 0.3f);
                    int other = memcmp(s, s2, of_s) != 0;
                    for (int add = 1; add >= 0; add--) {
                        memcpy(o, o0, of_o);
                        memcpy(o2, o0, of_o);
                        for (int x = 0; x < m * D && !add; x++) {       // what begins anew is what is added to 0
                            o[x] = NAN;
                            o2[x] = 0;
                        }
                        mix_of(o, s, rows, dt, m, n, D, add, next);
                        mix_of(o2, s, wide, DT_F32, m, n, D, 1, NOTHING_AHEAD);
                        other += memcmp(o, o2, of_o) != 0;
                    }
                    CHECK_SET(!other, "dtype %d: unpacking rows changes a result (m %d n %d D %d)", dt, m, n, D);
                }
            }
        }
        CHECK_SET(same_bits(&fused, &bits, sizeof bits), "%s", "other bits than another set");
    }
}

TEST(math_max, "the largest of n numbers, wherever it stands; a NaN is passed over, none is -infinity") {
    float x[70];
    rnd_seed(48);
    EACH_SIMD(i)
    for (int n = 0; n <= 70; n++) {
        int at = n ? rnd_int(n) : 0, odd = n > 1 ? (at + 1 + rnd_int(n - 1)) % n : 70;
        for (int j = 0; j < n; j++) x[j] = j == at ? 3 : j == odd ? NAN : -rnd_unit();
        float top = max_f32(x, n);
        CHECK_SET(top == (n ? 3 : -INFINITY), "n %d: %g, expected the %d-th number, 3", n, top, at);
    }
}

// ---- packed rows

// How many of the numbers y (D), which were read from a row of q8_0, are not scale times integer, or further than
// half a step from x.
static int q8_wrong(const float *y, const float *x, const char *row, int D) {
    int bad = 0;
    for (int j = 0; j < D; j++) {
        const char *block = row + j / Q8_BLOCK * (Q8_BLOCK + 2);
        uint16_t h;
        memcpy(&h, block, 2);
        float d = f16_to_f32(h);
        bad += y[j] != d * (signed char)block[2 + j % Q8_BLOCK] || fabsf(y[j] - x[j]) > d * .56f;
    }
    return bad;
}

// The same of a row of q4, by the sum that defines it.
static int q4_wrong(const float *y, const float *x, const char *row, int D) {
    int bad = 0;
    for (int first = 0; first < D; first += Q4_BLOCK) {
        int n = D - first < Q4_BLOCK ? D - first : Q4_BLOCK, m = n, words = n > 16 ? 2 : 1;
        uint16_t word[9];
        while (n % m || m & (m - 1)) m--;
        memcpy(word, row + first / Q4_BLOCK * Q4_BYTES, 2 + 8 * words);
        for (int i = 0; i < n; i++) {
            int sum = 0;
            double turned = 0, u = 0;       // y_i of the definition, and what is stored of it
            for (int j = i - i % m; j < i - i % m + m; j++) {
                int sign = __builtin_popcount(i & j & (m - 1)) % 2 ? -1 : 1, odd = -15;
                for (int b = 0; b < 4; b++) odd += (word[1 + b * words + j / 16] >> j % 16 & 1) * (2 << b);
                sum += sign * odd;
                turned += sign * (double)x[first + j];
                if (j == i) u = odd;
            }
            float d = f16_to_f32(word[0]);
            bad += y[first + i] != d * (float)sum;
            bad += !(fabs(turned - u * d * m) <= d * m * 1.02);     // half a step, and d's own rounding
        }
    }
    return bad;
}

static const struct {
    const char *name;
    void (*pack)(char *o, const float *x, int D);
    void (*unpack)(float *x, const char *o, int n, int D);
    size_t (*bytes)(int D);
    int (*wrong)(const float *y, const float *x, const char *row, int D);
} packed[] = { { "q8_0", q8_pack, q8_unpack, q8_bytes, q8_wrong }, { "q4", q4_pack, q4_unpack, q4_bytes, q4_wrong } };

TEST(math_packed, "rows of q8_0 and q4 unpack to what their definition says, number by number, within half a "
                  "step of the numbers, for every head_dim and instruction set, and nothing is written past "
                  "them; what was read is stored again as it is; a block of zeros, subnormals, a NaN or an infinity") {
    enum { ROWS = 5, MOST = 131 };

    OWN char *rows = xmalloc(ROWS * 2 * MOST);
    float x[ROWS * MOST], y[ROWS * MOST + 1], z[ROWS * MOST];
    rnd_seed(47);
    for (int f = 0; f < COUNT(packed); f++) {
        for (int D = 1; D <= MOST; D++) {
            size_t bytes = packed[f].bytes(D);
            double moved = 0;
            for (int j = 0; j < ROWS * D; j++) x[j] = rnd_normal() * (j % 7 ? 1 : 90);
            for (int r = 0; r < ROWS; r++) packed[f].pack(rows + r * bytes, x + r * D, D);
            EACH_SIMD(i) {
                int bad = 0;
                y[ROWS * D] = 77;
                packed[f].unpack(y, rows, ROWS, D);
                for (int r = 0; r < ROWS; r++) bad += packed[f].wrong(y + r * D, x + r * D, rows + r * bytes, D);
                CHECK_SET(!bad && y[ROWS * D] == 77, "%s D %d: %d wrong numbers, behind them %g", packed[f].name,
                      D, bad, y[ROWS * D]);
            }
            for (int r = 0; r < ROWS; r++) packed[f].pack(rows + r * bytes, y + r * D, D);
            packed[f].unpack(z, rows, ROWS, D);
            for (int j = 0; j < ROWS * D; j++) moved = fmax(moved, fabs(z[j] - y[j]) / (1e-3 + fabs(y[j])));
            CHECK(moved < 1e-2, "%s D %d: a row of the grid moves by %g", packed[f].name, D, moved);
        }
        const float odd[] = { 0, 1e-42f, NAN, INFINITY };
        for (int kind = 0; kind < 4; kind++) {
            int bad = 0;
            for (int j = 0; j < 32; j++) x[j] = j == 3 ? odd[kind] : 0;
            packed[f].pack(rows, x, 32);
            packed[f].unpack(y, rows, 1, 32);
            for (int j = 0; j < 32; j++) bad += kind < 2 ? y[j] != 0 : !isnan(y[j]);
            CHECK(!bad, "a block of %s with %g: %d numbers are wrong", packed[f].name, odd[kind], bad);
        }
    }
}

TEST(math_q4, "the error of normal numbers in rows of q4 is 9 %, and 28 % beside one of 30 in every block") {
    float x[64], y[64];
    char row[2 * Q4_BYTES];
    rnd_seed(53);
    // The error of normal numbers alone, and of those beside an outlier of 30 in every block. Not turned, they
    // would lie between the two middle levels, 4 apart, and err by more than they are.
    for (int outlier = 0; outlier < 2; outlier++) {
        double error = 0, sum = 0;
        for (int r = 0; r < 2000; r++) {
            for (int j = 0; j < 64; j++) x[j] = outlier && j % 32 == 5 ? 30 : rnd_normal();
            q4_pack(row, x, 64);
            q4_unpack(y, row, 1, 64);
            for (int j = 0; j < 64; j++) {
                if (outlier && j % 32 == 5) continue;
                error += pow((double)y[j] - x[j], 2);
                sum += (double)x[j] * x[j];
            }
        }
        double relative = sqrt(error / sum), want = outlier ? .28 : .0907;
        CHECK(fabs(relative / want - 1) < .03, "outlier %d: an error of %.4f", outlier, relative);
    }
}

TEST(math_q8_products, "products with rows of q8_0: keys as sums of integers within the rounding of q to 16 "
                       "bits, the same bits whatever stands beside a row and with every set that has fused "
                       "multiply-add; values as the unpacked ones, to the bit; what is no number stays none") {
    enum { M = 9, N = 70, MOST = 1056 };

    static const int dims[] = { 32, 64, 96, 128, 256, 512, 544, 1056 };
    static float y[M * N + 1], o[2 * M * MOST], one[N];
    OWN float *x = random_floats(M * MOST), *k = random_floats(N * MOST), *unpacked = xmalloc(N * MOST * 4);
    OWN double *v = xmalloc(N * MOST * sizeof *v);
    OWN char *rows = xmalloc(N * q8_bytes(MOST));
    OWN Q8Query *q = aligned_alloc(64, M * 3 * sizeof *q);
    for (int d = 0; d < COUNT(dims); d++) {
        int D = dims[d];
        uint64_t fused = 0;
        for (int j = 0; j < N * D; j++) k[j] *= j % 7 ? 1 : 90;
        for (int r = 0; r < N; r++) q8_pack(rows + r * q8_bytes(D), k + r * D, D);
        q8_unpack(unpacked, rows, N, D);
        for (int j = 0; j < N * D; j++) v[j] = unpacked[j];
        EACH_SIMD(set)
        for (int n = N; n > N - 3; n -= 2) {
            y[M * n] = 77;
            q8_queries(q, x, M, D);
            scores_of(y, q, rows, ROWS_Q8, M, n, D, .25f, NOTHING_AHEAD);
            OWN double *want = products_wanted(x, v, M, n, D, (Errors){ 4e-7, .51 / Q8_TOP, Q8_COLS });
            double rms, bad = product_error(y, want, M * n, .25, &rms);
            CHECK_SET(bad <= 1 && y[M * n] == 77, "D %d n %d: %.3g of the bound", D, n, bad);

            // A row alone, against the same keys in another place.
            for (int i = 0; i < M; i++) {
                q8_queries(q, x + i * D, 1, D);
                scores_of(one, q, rows + q8_bytes(D), ROWS_Q8, 1, n - 1, D, .25f, NOTHING_AHEAD);
                CHECK_SET(!memcmp(one, y + i * n + 1, (n - 1) * 4), "D %d: row %d depends on its place", D, i);
            }
            CHECK_SET(n < N || same_bits(&fused, y, M * n * 4), "D %d: other bits", D);

            // Values: as f32 ones, added to what is there.
            for (int j = 0; j < M * n; j++) y[j] = fabsf(y[j]);
            for (int j = 0; j < M * D; j++) o[j] = o[M * D + j] = (float)j;
            mix_of(o, y, rows, ROWS_Q8, M, n, D, 1, NOTHING_AHEAD);
            mix_of(o + M * D, y, unpacked, DT_F32, M, n, D, 1, NOTHING_AHEAD);
            CHECK_SET(!memcmp(o, o + M * D, M * D * 4), "D %d: values differ from the unpacked ones", D);
        }
    }
    const float odd[] = { NAN, INFINITY, -INFINITY, 1e-40f };
    EACH_SIMD(set)
    for (int kind = 0; kind < 4; kind++) {
        float row[64] = { [37] = odd[kind] };
        q8_queries(q, row, 1, 64);
        scores_of(one, q, rows, ROWS_Q8, 1, 4, 64, 1, NOTHING_AHEAD);
        for (int j = 0; j < 4; j++)
            CHECK_SET(kind < 3 ? isnan(one[j]) : one[j] == 0, "%g: %g", odd[kind], one[j]);
    }
}

// ---- exponentials

// The largest error of got (n) in units in the last place of f(in), and where it is. *sum: of all of got.
static double worst_ulps(const float *got, const float *in, int n, double (*f)(double), float *at, double *sum) {
    double bad = *sum = 0;
    for (int j = 0; j < n; j++) {
        int e;
        double want = f(in[j]);
        frexp(want, &e);
        double ulps = fabs(got[j] - want) / ldexp(1, (e < -125 ? -125 : e) - 24);
        if (ulps > bad) *at = in[j];
        bad = fmax(bad, ulps);
        *sum += got[j];
    }
    return bad;
}

TEST(math_exp, "exp_shift and the powers of 2 of softmax_columns are within 2 ulp from 0 to underflow, exact at "
               "0 and -inf, the same bits with every set that has fused multiply-add, and their sum is that of the "
               "values") {
    enum { N = 1 << 16 };

    static const float cycle[] = { 2.5f, -INFINITY, 1.25f };
    OWN float *x = xmalloc(N * 4), *in = xmalloc(N * 4);
    uint64_t fused[2] = { 0 };
    EACH_SIMD(i) {
        double sum;
        float got = 0, at = 0, zeros[4] = { 0 }, four[4] = { 0 };
        for (int j = 0; j < N; j++) x[j] = in[j] = -110.0f * (float)j / N;
        exp_shift(x, 0, N, &got);
        double bad = worst_ulps(x, in, N, exp, &at, &sum);
        CHECK_SET(bad <= 2, "%.3f ulp at %g", bad, at);
        CHECK_SET(same_bits(&fused[0], x, N * 4) && same_bits(&fused[1], &got, 4), "sum %g: other bits", got);
        CHECK_SET(fabs(got - sum) <= 1e-5 * sum, "sum %g, should be %g", got, sum);
        // 2^x down four columns whose maximum is 0.
        for (int j = 0; j < N; j++) x[j] = in[j] = -160.0f * (float)j / N;
        softmax_columns(x, N / 4, 4, zeros, four);
        bad = worst_ulps(x, in, N, exp2, &at, &sum);
        CHECK_SET(bad <= 2 && x[0] == 1, "2^x is off by %.3f ulp at %g; 2^0 = %g", bad, at, x[0]);
        got = four[0] + four[1] + four[2] + four[3];
        CHECK_SET(fabs(got - sum) <= 1e-5 * sum, "sum of powers %g, should be %g", got, sum);
        // Every tail; equal values in, equal values out, wherever they stand.
        for (int n = 0; n <= 35; n++) {
            float y[40], total = 1;
            for (int j = 0; j < 40; j++) y[j] = cycle[j % 3];
            exp_shift(y, 2.5f, n, &total);
            const float want[] = { 1, 0, y[2] };
            for (int j = 0; j < 40; j++)
                CHECK_SET(y[j] == (j < n ? want : cycle)[j % 3] && (j >= n || y[j] < 1.1f), "n %d: number %d is "
                          "%g", n, j, y[j]);
            double all = 1 + (n + 2) / 3 + n / 3 * exp(-1.25);
            CHECK_SET(fabs(total - all) < 1e-5 * all, "n %d: sum %g, should be %g", n, total, all);
        }
        float none[3] = { -INFINITY, -INFINITY, -INFINITY }, zero = 0;
        exp_shift(none, -INFINITY, 3, &zero);
        CHECK_SET(zero == 0 && none[0] == 0, "a row that sees nothing gives %g, sum %g", none[0], zero);
    }
}

TEST(math_softmax_columns, "softmax down columns, tile after tile: values, maxima and sums are those of double; "
                           "masked cells give 0 and nothing beyond the tile is touched") {
    uint64_t fused = 0;
    EACH_SIMD(i) {
        uint64_t bits = 0;
        rnd_seed(47);
        for (int c = 0; c < 300; c++) {
            int m = 1 + rnd_int(70), tiles = 1 + rnd_int(4), bad = 0;
            float max[72], sum[72], x[70 * 20 + 2], was[70 * 20];
            double top[72], all[72] = { 0 };
            for (int j = 0; j < 72; j++) {
                top[j] = -INFINITY;
                max[j] = j < m ? -INFINITY : 7;
                sum[j] = j < m ? 0 : 7;
            }
            for (int t = 0; t < tiles; t++) {
                int n = 1 + rnd_int(20);
                // Every third column begins with a tile it cannot see.
                for (int j = 0; j < n * m; j++)
                    was[j] = x[j] = rnd_int(4) && (t || j % m % 3) ? 10 * rnd_normal() : -INFINITY;
                x[n * m] = x[n * m + 1] = -77;
                softmax_columns(x, n, m, max, sum);
                bits = hash_bytes(hash_bytes(hash_bytes(bits, x, n * m * sizeof *x), max, sizeof max), sum, sizeof sum);
                for (int j = 0; j < m; j++) {
                    double old = top[j];
                    for (int r = 0; r < n; r++) top[j] = fmax(top[j], was[r * m + j]);
                    if (top[j] > -INFINITY) all[j] *= exp2(old - top[j]);
                    for (int r = j; r < n * m; r += m) {
                        double e = was[r] > -INFINITY ? exp2(was[r] - top[j]) : 0;
                        all[j] += e;
                        bad += !(fabs(x[r] - e) <= 1e-5 * e + 1e-44) || (was[r] == -INFINITY && x[r] != 0);
                    }
                }
                CHECK_SET(x[n * m] == -77 && x[n * m + 1] == -77, "m %d n %d: wrote past the tile", m, n);
            }
            for (int j = 0; j < m; j++) bad += max[j] != (float)top[j] || !(fabs(sum[j] - all[j]) <= 1e-5 * all[j]);
            CHECK_SET(!bad && max[m] == 7 && sum[m] == 7, "m %d, %d tiles: %d values are wrong", m, tiles, bad);
        }
        CHECK_SET(same_bits(&fused, &bits, sizeof bits), "%s", "other bits than another set");
    }
}

// ---- conversions, rows, choices

TEST(math_convert, "all 65536 f16 and bf16 values widen exactly; narrowing gives the bits of kernels.h at every "
                   "tie and limit") {
    enum { ALL = 65536, N = 1 << 18 };

    OWN uint16_t *h = xmalloc(N * 2);
    OWN float *x = xmalloc(N * 4);
    rnd_seed(46);
    EACH_SIMD(i) {
        for (int dt = DT_F16; dt <= DT_BF16; dt++) {
            float (*wide)(uint16_t) = dt == DT_F16 ? f16_to_f32 : bf16_to_f32;
            uint16_t (*narrow)(float) = dt == DT_F16 ? f32_to_f16 : f32_to_bf16;
            for (int j = 0; j < ALL; j++) h[j] = (uint16_t)j;
            to_f32(x, h, dt, ALL);
            for (int j = 0; j < ALL; j++) {
                float want = wide(h[j]);
                CHECK_SET(isnan(want) ? isnan(x[j]) : bits_of(x[j]) == bits_of(want), "dtype %d: %04x widens to "
                          "%g, should be %g", dt, j, x[j], want);
            }
            // every value of the format, halfway to the next, and one f32 step to both sides of that; then any bits
            for (int round = 0; round < 2; round++) {
                for (int j = 0; j < N; j++) {
                    uint32_t base = bits_of(wide((uint16_t)(j / 4))), half = dt == DT_F16 ? 0x1000 : 0x8000;
                    uint32_t u = j % 4 == 0 ? base : base + half + (uint32_t)(j % 4 - 2);
                    if (round) u = (uint32_t)splitmix64(&rnd_state) & (j % 2 ? 0xffffffff : 0xcfffffff);
                    x[j] = from_bits(u);
                }
                from_f32(h, x, dt, N);
                for (int j = 0; j < N; j++)
                    CHECK_SET(h[j] == narrow(x[j]), "dtype %d: %08x narrows to %04x, should be %04x", dt,
                          bits_of(x[j]), h[j], narrow(x[j]));
            }
        }
        // tails, and nothing past the end
        for (int n = 0; n < 40; n++)
            for (int dt = DT_F32; dt <= DT_BF16; dt++) {
                float a[40], b[41];
                char c[41 * 4];
                size_t written = n * dtype_size(dt);
                for (int j = 0; j < 40; j++) a[j] = (float)j / 3 - 5;
                memset(b, 0x55, sizeof b);
                memset(c, 0x55, sizeof c);
                from_f32(c, a, dt, (size_t)n);
                to_f32(b, c, dt, (size_t)n);
                CHECK_SET(!memcmp(c + written, b + 40, 4) && bits_of(b[n]) == 0x55555555,
                          "dtype %d: one more than %d was written", dt, n);
                for (int j = 0; j < n; j++)
                    CHECK_SET(fabsf(b[j] - a[j]) <= fabsf(a[j]) / 128, "dtype %d n %d: element %d is %g, was %g",
                              dt, n, j, b[j], a[j]);
            }
    }
}

TEST(math_rows, "rmsnorm, swiglu and add_bias equal double, in place too, for every dtype of their weights") {
    static const int ns[] = { 1, 40, 64, 130, 576, 1030 };
    rnd_seed(47);
    EACH_SIMD(i)
    for (int c = 0; c < 18 * 3; c++) {
        int n = ns[c % 6], dt = DT_F32 + c / 6 % 3, T = 1 + 32 * (c / 18);
        size_t all = (size_t)T * n, at = 0;
        Tensor w = random_tensor(dt, 1, n);
        OWN float *x = random_floats(all), *y = xmalloc(all * 4), *want = xmalloc(all * 4), *u = random_floats(all);
        for (int t = 0; t < T; t++) {
            double ss = 0;
            for (int j = 0; j < n; j++) ss += (double)x[t * n + j] * x[t * n + j];
            for (int j = 0; j < n; j++)
                want[t * n + j] = (float)(x[t * n + j] / sqrt(ss / n + 1e-5) * weight_at(&w, j));
        }
        for (int in_place = 0; in_place < 2; in_place++) {
            memcpy(y, x, all * 4);
            rmsnorm(y, in_place ? y : x, &w, T, n, 1e-5f);
            CHECK_SET(worst(y, want, all, 1e-7, 1e-6, &at) <= 1, "rmsnorm n %d dtype %d T %d, in place %d: [%zu] "
                      "%g, should be %g", n, dt, T, in_place, at, y[at], want[at]);
        }
        for (size_t j = 0; j < all; j++) {
            y[j] = x[j] * 30;
            want[j] = (float)(y[j] / (1 + exp(-(double)y[j])) * u[j]);
        }
        swiglu(y, u, all);
        CHECK_SET(worst(y, want, all, 1e-30, 1e-6, &at) <= 1, "swiglu n %zu: [%zu] %g, should be %g", all, at,
                  y[at], want[at]);
        memcpy(y, x, all * 4);
        add_bias(y, &w, T);
        add_bias(y, &(Tensor){ NULL, dt, 1, n }, T);
        for (size_t j = 0; j < all; j++)
            CHECK_SET(y[j] == x[j] + (float)weight_at(&w, j % n), "add_bias n %d dtype %d: [%zu] is %g", n, dt, j,
                  y[j]);
        free((void *)w.data);
    }
}

// Element i is taken iff fewer than k stand before it.
static int slow_top_k(const float *x, int n, int k, int *idx) {
    int count = 0;
    for (int i = 0; i < n; i++) {
        int before = 0;
        for (int j = 0; j < n; j++) before += x[j] > x[i] || (x[j] == x[i] && j < i);
        if (before < k) idx[count++] = i;
    }
    return count;
}

TEST(math_top_k, "top_k takes the k largest, ties by lower index, indices ascending; -0 equals +0; every n, k "
                 "and many ties") {
    enum { MOST = 300 };

    static const float few[] = { 0.0f, -0.0f, -INFINITY, INFINITY };
    float x[MOST];
    int got[MOST], want[MOST];
    rnd_seed(48);
    EACH_SIMD(s) for (int round = 0; round < 600; round++) {
        int n = round < 40 ? round / 4 : 1 + rnd_int(MOST), k = rnd_int(n + 3);
        int levels = 1 + rnd_int(round % 3 ? 6 : 1000);
        for (int j = 0; j < n; j++) {
            int r = rnd_int(levels);
            x[j] = round % 5 == 0 ? rnd_normal() : r < 4 ? few[r] : (float)(r - levels / 2) * 1e-3f;
            // One last bit apart.
            if (round % 7 == 0 && j % 4 == 0) x[j] = from_bits(bits_of(1.0f) + (uint32_t)rnd_int(3));
            // Subnormal.
            if (round % 11 == 0) x[j] *= 1e-40f;
        }
        memset(got, 0xff, sizeof got);          // -1
        memset(want, 0xff, sizeof want);
        int a = top_k(x, n, k, got), b = slow_top_k(x, n, k, want);
        CHECK_SET(a == b && a == (k < n ? k : n) && !memcmp(got, want, sizeof got), "round %d, n %d, k %d: %d "
                  "taken, should be %d, or others, or it wrote past the list", round, n, k, a, b);
    }
    CHECK(top_k(x, 5, -1, got) == 0 && top_k(x, 0, 3, got) == 0, "nothing to take");
}

TEST(math_unpack, "packed rows of every width give the elements that stand in their bits, and write nothing past "
                  "them") {
    enum { MOST = 300 };

    unsigned char p[2 * MOST + 16];
    uint16_t h[MOST + 1];
    rnd_seed(49);
    EACH_SIMD(i)
    for (int round = 0; round < 400; round++) {
        int w = 1 + round % 16, n = rnd_int(MOST + 1), bad = 0;
        for (size_t j = 0; j < sizeof p; j++) p[j] = (unsigned char)(rnd_int(3) ? rnd_int(256) : 0);
        h[n] = 0x5555;
        unpack_f16(h, p, n, w);
        for (int j = 0; j < n; j++) {
            size_t bit = (size_t)j * w;
            uint32_t u = 0;
            for (int b = 0; b < w; b++) u |= (uint32_t)(p[(bit + b) / 8] >> (bit + b) % 8 & 1) << b;
            bad += h[j] != u << (16 - w);
        }
        CHECK_SET(!bad && h[n] == 0x5555, "n %d w %d: %d wrong elements, behind them %04x", n, w, bad, h[n]);
    }
}

int main(int argc, char **argv) { return check_main(argc, argv); }
