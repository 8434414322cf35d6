// test/test_kernels.c - lib/kernels: conversions, matrix products, attention, exponentials, top_k, each on every
// instruction set that this machine runs. Links lib/base.o and the objects of the kernels, nothing else.
#define _GNU_SOURCE
#include "check.h"
#include "../lib/kernels.h"

// Every kernel of every instruction set this machine runs, against double, at sizes that enter the
// main loop, its tail and neither; the promises "no result depends on T, on the number of threads
// or on the place in a block" bit for bit.

// Every set that this machine can run, but those that are another one with products in pairs, which only
// --bf16-terms 1 calls for.
#define EACH_SIMD(i) \
    for (int i = 0; simd_names[i]; i++) \
        if (!in_pairs(simd_names[i]) && !simd_set(simd_names[i]))

// 1: the set makes products in pairs of bf16.
static int in_pairs(const char *name) { return !strcmp(name, "avx512bf16") || !strcmp(name, "pairs-plain"); }

// The bits of a float.
static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

// The float of these bits.
static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

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

// y (T,rows) against double. The bound is that of a sum in f32: a few roundings of the sum of
// magnitudes.
static double matmul_error(const float *y, const float *x, const Tensor *w, int T) {
    double bad = 0;
    for (int t = 0; t < T; t++)
        for (int r = 0; r < w->rows; r++) {
            double sum = 0, size = 0;
            for (int k = 0; k < w->cols; k++) {
                double p = x[(size_t)t * w->cols + k] * weight_at(w, (size_t)r * w->cols + k);
                sum += p;
                size += fabs(p);
            }
            double e = fabs(y[(size_t)t * w->rows + r] - sum) / (size * 4e-7 + 1e-30);
            if (!(e <= bad)) bad = isnan(e) ? INFINITY : e;
        }
    return bad;
}

TEST(math_matmul, "matmul equals double on every instruction set, dtype and odd size, and writes "
                  "nothing outside y") {
    static const int shape[][2] = { { 1, 1 },   { 7, 16 },   { 5, 40 },   { 66, 96 },
                                    { 3, 130 }, { 13, 576 }, { 2, 1024 }, { 9, 2100 } };
    static const int Ts[] = { 1, 2, 3, 5, 17, 33, 130 };
    rnd_seed(41);
    EACH_SIMD(i)
    for (size_t a = 0; a < sizeof shape / sizeof *shape; a++)
        for (int dt = DT_F32; dt <= DT_BF16; dt++) {
            int rows = shape[a][0], cols = shape[a][1];
            Tensor w = random_tensor(dt, rows, cols);
            for (size_t b = 0; b < sizeof Ts / sizeof *Ts; b++) {
                int T = Ts[b];
                size_t n = (size_t)T * rows;
                OWN float *x = random_floats((size_t)T * cols), *y = xmalloc((n + 1) * sizeof *y);
                y[n] = -77;
                matmul(y, x, &w, T);
                double e = matmul_error(y, x, &w, T);
                CHECK(e <= 1 && y[n] == -77, "%s dtype %d rows %d cols %d T %d: %.3g of the bound, %g behind it",
                      simd_name(), dt, rows, cols, T, e, y[n]);
            }
            free((void *)w.data);
        }
    simd_set(NULL);
}

// Products of rows from anywhere in x, for some T and one to three threads: how many rows have other bits than in
// y (T,rows), the product of all. Rows with a NaN are left out.
static int rows_with_other_bits(const float *y, const float *x, const Tensor *w, int T) {
    static const int Ts[] = { 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 129 };
    size_t rows = (size_t)w->rows;
    OWN float *z = xmalloc((size_t)T * rows * sizeof *z);
    int other = 0;
    for (int threads = 1; threads <= 3; threads++)
        for (size_t b = 0; b < sizeof Ts / sizeof *Ts; b++) {
            int n = Ts[b] < T ? Ts[b] : T, t0 = rnd_int(T - n + 1);
            set_threads(threads);
            matmul(z, x + (size_t)t0 * w->cols, w, n);
            for (int t = 0; t < n; t++) {
                const float *row = y + (size_t)(t0 + t) * rows;
                other += !isnan(row[0]) && memcmp(z + (size_t)t * rows, row, rows * sizeof *z) != 0;
            }
        }
    set_threads(2);
    return other;
}

// The rms of y (T,rows) less x w^T in double, as a share of the rms of x w^T.
static double matmul_rms(const float *y, const float *x, const Tensor *w, int T) {
    double off = 0, all = 0;
    for (int t = 0; t < T; t++)
        for (int r = 0; r < w->rows; r++) {
            double sum = 0;
            for (int k = 0; k < w->cols; k++)
                sum += x[t * w->cols + k] * weight_at(w, (size_t)r * w->cols + k);
            off += pow(y[t * w->rows + r] - sum, 2);
            all += sum * sum;
        }
    return sqrt(off / all);
}

TEST(math_tiles, "products in tiles: the rms errors that kernels_x86.c states for 3, 2 and 1 terms, the same "
                 "bits whatever T and the threads, and a NaN or an infinity in its own row") {
    static const double least[] = { 0, 1.5e-3, 2.3e-6, 1.25e-7 }, most[] = { 0, 1.9e-3, 2.7e-6, 1.55e-7 };

    enum { T = 67, ROWS = 75, COLS = 2048 };

    rnd_seed(61);
    Tensor w = random_tensor(DT_BF16, ROWS, COLS);
    OWN float *x = random_floats((size_t)T * COLS), *y = xmalloc((size_t)T * ROWS * sizeof *y);
    OWN float *z = xmalloc((size_t)T * ROWS * sizeof *z);
    EACH_SIMD(i) {
        if (strncmp(simd_name(), "amx", 3)) continue;
        for (bf16_terms = 3; bf16_terms >= 1; bf16_terms--) {
            matmul(y, x, &w, T);
            double e = matmul_rms(y, x, &w, T);
            int other = rows_with_other_bits(y, x, &w, T);
            CHECK(e >= least[bf16_terms] && e <= most[bf16_terms], "%s, %d terms: rms error %.3g", simd_name(),
                  bf16_terms, e);
            CHECK(!other, "%s, %d terms: %d rows have other bits", simd_name(), bf16_terms, other);
        }
        bf16_terms = 3;
        matmul(y, x, &w, T);
        for (int kind = 0; kind < 3; kind++) {
            // The second NaN has all bits set, which rounding carries beyond the exponent.
            float odd[] = { NAN, from_bits(0x7fffffff), INFINITY }, was = x[5 * COLS + 700];
            int wrong = 0;
            x[5 * COLS + 700] = odd[kind];
            matmul(z, x, &w, T);
            x[5 * COLS + 700] = was;
            for (int t = 0; t < T; t++)
                for (int r = t * ROWS; r < (t + 1) * ROWS; r++)
                    wrong += t == 5 ? !isnan(z[r]) : bits_of(z[r]) != bits_of(y[r]);
            CHECK(!wrong, "%s: %g in x, and %d numbers are not what they should be", simd_name(), odd[kind], wrong);
        }
    }
    free((void *)w.data);
    simd_set(NULL);
}

TEST(math_pairs, "products in pairs (--bf16-terms 1): the rms error that kernels.c states, the bits of another "
                 "set whatever T, the threads and the number of columns, and a NaN in its own row") {
    static const int shape[][2] = { { 1, 1 }, { 9, 31 }, { 7, 33 }, { 75, 2048 }, { 131, 1100 }, { 64, 2080 } };

    enum { T = 129 };

    if (simd_set("pairs-plain")) leave_out("AVX-512 with VNNI");
    rnd_seed(63);
    bf16_terms = 1;
    for (size_t a = 0; a < sizeof shape / sizeof *shape; a++) {
        int rows = shape[a][0], cols = shape[a][1];
        size_t ldx = (size_t)cols, bytes = (size_t)rows * sizeof(float);
        Tensor w = random_tensor(DT_BF16, rows, cols);
        OWN float *x = random_floats(T * ldx), *y = xmalloc(T * bytes);
        x[cols / 2] = from_bits(0x00000007);                    // subnormal: counts as zero
        x[ldx + cols / 2] = from_bits(0x7fffffff);              // a NaN that rounding would carry over
        CHECK(!simd_set("pairs-plain"), "there is no set pairs-plain");
        matmul(y, x, &w, T);
        CHECK(isnan(y[rows]) && !isnan(y[0]) && !isnan(y[2 * rows]), "%d x %d: a NaN is lost, or spreads",
              rows, cols);
        if (cols == 2048) {
            double e = matmul_rms(y + 2 * rows, x + 2 * (size_t)cols, &w, T - 2);
            CHECK(e >= 1.5e-3 && e <= 1.9e-3, "rms error %.3g", e);
        }
        for (int i = 0; simd_names[i]; i++) {
            if (!in_pairs(simd_names[i]) || simd_set(simd_names[i])) continue;
            int other = rows_with_other_bits(y, x, &w, T);
            CHECK(!other, "%s, %d x %d: %d rows have other bits", simd_name(), rows, cols, other);
        }
        free((void *)w.data);
    }
    bf16_terms = 3;
    simd_set(NULL);
}

// A matrix of dtype DT_Q8 and what its bytes mean, worked out from the format's definition: values
// (rows,cols).
static Tensor q8_tensor(const Tensor *w, double *values) {
    char *p = xmalloc(q8_tensor_bytes(w->rows, w->cols));
    OWN float *row = xmalloc((size_t)w->cols * sizeof *row);
    q8_store(p, w);
    for (int r = 0; r < w->rows; r++) {
        to_f32(row, (const char *)w->data + (size_t)r * w->cols * dtype_size(w->dtype), w->dtype,
               w->cols);
        for (int b = 0; b < w->cols; b += 32) {
            double top = 0;
            int n = w->cols - b < 32 ? w->cols - b : 32;
            for (int i = 0; i < n; i++) top = fmax(top, fabs(row[b + i]));
            double d = f16_to_f32(f32_to_f16((float)(top / 127)));
            for (int i = 0; i < n; i++) {
                double q = d > 0 ? rintf(row[b + i] / (float)d) : 0;
                values[(size_t)r * w->cols + b + i] = d * fmax(-127, fmin(127, q));
            }
        }
    }
    return (Tensor){ p, DT_Q8, w->rows, w->cols };
}

TEST(math_q8_weights,
     "a product with weights in 8 bits equals double over the rounded weights on every instruction "
     "set, with the same bits whatever T and threads; rows are read back; a NaN comes through") {
    static const int shape[][2] = { { 1, 1 },   { 7, 16 },     { 66, 96 },
                                    { 16, 33 }, { 130, 1100 }, { 9, 2100 } };

    enum { T = 133 };

    rnd_seed(57);
    EACH_SIMD(i)
    for (size_t a = 0; a < sizeof shape / sizeof *shape; a++) {
        int rows = shape[a][0], cols = shape[a][1], wrong = 0;
        Tensor w = random_tensor(a % 3, rows, cols);
        OWN double *v = xmalloc((size_t)rows * cols * sizeof *v);
        Tensor q = q8_tensor(&w, v);
        OWN float *row = xmalloc((size_t)cols * sizeof *row);
        for (int r = 0; r < rows; r++) {
            tensor_row(row, &q, r);
            for (int c = 0; c < cols; c++)
                wrong += fabs(row[c] - v[(size_t)r * cols + c]) > 1e-6 * fabs(row[c]);
        }
        CHECK(!wrong, "%d x %d: %d of the numbers read back are others", rows, cols, wrong);

        size_t ldx = (size_t)cols, ldy = (size_t)rows;
        OWN float *x = random_floats(T * ldx), *y = xmalloc((T * ldy + 1) * sizeof *y), *z = xmalloc(T * ldy * sizeof *z);
        y[T * ldy] = -77;
        set_threads(1);
        matmul(y, x, &q, T);
        for (int t = 0; t < T; t++) {
            for (int r = 0; r < rows; r++) {
                double sum = 0, bound = 0;
                for (int b = 0; b < cols; b += 32) {
                    double top = 0, weight = 0;
                    for (int c = b; c < cols && c < b + 32; c++) {
                        double vc = v[(size_t)r * cols + c];
                        sum += vc * x[t * ldx + c];
                        weight += fabs(vc);
                        top = fmax(top, fabs(x[t * ldx + c]));
                    }
                    bound += weight * top * (.51 / 32767 + 1e-6);
                }
                wrong += !(fabs(y[t * ldy + r] - sum) <= bound);
            }
        }
        CHECK(!wrong && y[T * ldy] == -77, "%s %d x %d: %d products are off", simd_name(), rows, cols, wrong);

        wrong = rows_with_other_bits(y, x, &q, T);
        CHECK(!wrong, "%s %d x %d: %d rows have other bits", simd_name(), rows, cols, wrong);

        // Every set that has a fused multiply-add gives these bits, by one or two instructions a
        // step.
        const char *was = simd_name();
        static const char *const fused[] = { "avx2", "avx512", "avx512vnni", "neon" };
        for (int i = 0; i < 4 && strcmp(was, "plain"); i++) {
            if (simd_set(fused[i])) continue;
            matmul(z, x, &q, T);
            wrong += memcmp(z, y, T * ldy * sizeof *z) != 0;
        }
        simd_set(was);
        CHECK(!wrong, "%s %d x %d: another instruction set gives other bits", simd_name(), rows,
              cols);

        x[cols / 2] = NAN;
        matmul(z, x, &q, 2);
        CHECK(isnan(z[0]) && !isnan(z[ldy]), "%s: a NaN in x is lost", simd_name());
        free((void *)q.data);
        free((void *)w.data);
    }
    float bad[40] = { [35] = NAN };
    Tensor w = { bad, DT_F32, 1, 40 };
    double v[40];
    Tensor q = q8_tensor(&w, v);
    float row[40];
    tensor_row(row, &q, 0);
    CHECK(row[0] == 0 && isnan(row[35]), "a NaN among the weights is lost");
    free((void *)q.data);
    simd_set(NULL);
}

TEST(math_row_independence, "a row of a product is the same bits whatever T, the number of threads and the rows of W around "
                            "it") {
    enum { T = 129, ROWS = 197, COLS = 1100, R0 = 31, N = 50 };

    rnd_seed(42);
    EACH_SIMD(i)
    for (int dt = DT_F32; dt <= DT_BF16; dt++) {
        Tensor w = random_tensor(dt, ROWS, COLS);
        Tensor part = { (const char *)w.data + (size_t)R0 * COLS * dtype_size(dt), dt, N, COLS };
        OWN float *x = random_floats((size_t)T * COLS), *y = xmalloc((size_t)T * ROWS * 4), *z = xmalloc(3 * N * 4);
        set_threads(1);
        matmul(y, x, &w, T);
        int other = rows_with_other_bits(y, x, &w, T);
        matmul(z, x, &part, 3);
        for (int t = 0; t < 3; t++) other += memcmp(z + t * N, y + t * ROWS + R0, N * 4) != 0;
        CHECK(!other, "%s dtype %d: %d rows have other bits", simd_name(), dt, other);
        free((void *)w.data);
    }
    simd_set(NULL);
}

TEST(math_simd_agree,
     "AVX2 and AVX-512 give the same bits: products, attention tiles, exp, softmax down columns") {
    enum { M = 5, N = 37, D = 72, W = 130 };

    float got[2][M * N + M * D + 100 + 100 + 2 * 20], q[M * D], k[N * D], v[N * D], e[100];
    float sum[2] = { 0, 0 };
    int n = 0;
    rnd_seed(43);
    for (int i = 0; i < M * D; i++) q[i] = rnd_normal();
    for (int i = 0; i < N * D; i++) {
        k[i] = rnd_normal();
        v[i] = rnd_normal();
    }
    for (int i = 0; i < 100; i++) e[i] = -20 * (float)rnd_unit();
    EACH_SIMD(i) {
        if (!strcmp(simd_name(), "plain") || n == 2) continue;
        float *s = got[n], *o = s + M * N, *x = o + M * D;
        attn_scores(s, q, k, M, N, D, 0.125f);
        memset(o, 0, M * D * 4);
        attn_mix(o, s, v, M, N, D);
        memcpy(x, e, sizeof e);
        memcpy(x + 100, e, sizeof e);
        exp_shift(x, 0.5f, 100, &sum[n++]);
        for (int j = 0; j < 20; j++) {
            x[200 + j] = e[j];
            x[220 + j] = 3;
        }
        softmax_columns(x + 100, 5, 20, x + 200, x + 220);
    }
    if (n == 2) CHECK(!memcmp(got[0], got[1], sizeof got[0]) && sum[0] == sum[1], "the two differ");
    simd_set(NULL);
}

TEST(math_attention_tiles, "attn_scores and attn_mix equal double for every head size and block, "
                           "and a row does not depend on m") {
    static const int Ds[] = { 2, 16, 36, 40, 48, 64, 80, 96, 128 };
    static const int Ms[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64 };
    static const int Ns[] = { 1, 2, 5, 33, 63, 64 };
    rnd_seed(44);
    EACH_SIMD(i)
    for (size_t a = 0; a < sizeof Ds / sizeof *Ds; a++) {
        int D = Ds[a];
        OWN float *q = random_floats((size_t)64 * D), *k = random_floats((size_t)64 * D);
        OWN float *o0 = random_floats((size_t)64 * D);
        OWN float *s = xmalloc(64 * 64 * 4), *o = xmalloc((size_t)64 * D * 4);
        OWN float *one = xmalloc((size_t)(64 + D) * 4);
        for (size_t b = 0; b < sizeof Ms / sizeof *Ms * (sizeof Ns / sizeof *Ns); b++) {
            int m = Ms[b % (sizeof Ms / sizeof *Ms)];
            int n = Ns[b / (sizeof Ms / sizeof *Ms)], t = rnd_int(m);
            double bad = 0;
            attn_scores(s, q, k, m, n, D, 0.3f);
            for (int x = 0; x < m * n; x++) {
                double sum = 0, size = 0;
                for (int d = 0; d < D; d++) {
                    double p = 0.3 * q[x / n * D + d] * k[x % n * D + d];
                    sum += p;
                    size += fabs(p);
                }
                bad = fmax(bad, fabs(s[x] - sum) / (size * 4e-7 + 1e-30));
            }
            CHECK(bad <= 1, "%s attn_scores m %d n %d D %d: %.3g of the bound", simd_name(), m, n, D,
                  bad);
            attn_scores(one, q + (size_t)t * D, k, 1, n, D, 0.3f);
            CHECK(!memcmp(one, s + (size_t)t * n, (size_t)n * 4),
                  "%s attn_scores: row %d of %d depends on m (n %d D %d)", simd_name(), t, m, n, D);
            int j = rnd_int(n);
            CHECK(s[t * n + j] == 0.3f * dot_f32(q + (size_t)t * D, k + (size_t)j * D, D),
                  "%s dot_f32 is not attn_scores (D %d)", simd_name(), D);

            memcpy(o, o0, (size_t)m * D * 4);
            attn_mix(o, s, k, m, n, D);
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
            CHECK(bad <= 1, "%s attn_mix m %d n %d D %d: %.3g of the bound", simd_name(), m, n, D,
                  bad);
            memcpy(one, o0 + (size_t)t * D, (size_t)D * 4);
            attn_mix(one, s + (size_t)t * n, k, 1, n, D);
            CHECK(!memcmp(one, o + (size_t)t * D, (size_t)D * 4),
                  "%s attn_mix: row %d of %d depends on m (n %d D %d)", simd_name(), t, m, n, D);
            // Rows as the cache holds them, and the same rows unpacked.
            for (int dt = DT_F16; dt <= DT_BF16; dt++) {
                uint16_t rows[64 * 128];
                OWN float *wide = xmalloc((size_t)n * D * 4);
                OWN float *s2 = xmalloc((size_t)m * n * 4);
                OWN float *o2 = xmalloc((size_t)m * D * 4);
                from_f32(rows, k, dt, (size_t)n * D);
                to_f32(wide, rows, dt, (size_t)n * D);
                // What to ask memory for changes no number.
                Ahead next = { (const char *)k, (size_t)n * D * 2 + 5 };
                scores_of(s, q, rows, dt, m, n, D, 0.3f, next);
                attn_scores(s2, q, wide, m, n, D, 0.3f);
                memcpy(o, o0, (size_t)m * D * 4);
                memcpy(o2, o0, (size_t)m * D * 4);
                mix_of(o, s, rows, dt, m, n, D, 1, next);
                attn_mix(o2, s, wide, m, n, D);
                CHECK(!memcmp(s, s2, (size_t)m * n * 4) && !memcmp(o, o2, (size_t)m * D * 4),
                      "%s dtype %d: unpacking rows changes a result (m %d n %d D %d)", simd_name(),
                      dt, m, n, D);
                for (int x = 0; x < m * D; x++) {
                    o[x] = NAN;
                    o2[x] = 0;
                }
                mix_of(o, s, rows, dt, m, n, D, 0, next);
                attn_mix(o2, s, wide, m, n, D);
                CHECK(!memcmp(o, o2, (size_t)m * D * 4),
                      "%s dtype %d: a product that begins anew is not that added to 0 (m %d n %d D "
                      "%d)",
                      simd_name(), dt, m, n, D);
            }
        }
    }
    simd_set(NULL);
}

TEST(math_max,
     "the largest of n numbers, wherever it stands; a NaN is passed over, none is -infinity") {
    float x[70];
    rnd_seed(48);
    EACH_SIMD(i)
    for (int n = 0; n <= 70; n++) {
        int at = n ? rnd_int(n) : 0, odd = n > 1 ? (at + 1 + rnd_int(n - 1)) % n : 70;
        for (int j = 0; j < n; j++) x[j] = j == at ? 3 : j == odd ? NAN : -rnd_unit();
        float top = max_f32(x, n);
        CHECK(top == (n ? 3 : -INFINITY), "%s n %d: %g, expected the %d-th number, 3", simd_name(),
              n, top, at);
    }
    simd_set(NULL);
}

TEST(math_q8, "rows of q8_0 unpack to scale times integer, within half a step of the numbers, for every head_dim and "
              "instruction set, and nothing is written past them; a block of zeros, subnormals, a NaN or an infinity") {
    enum { ROWS = 5, MOST = 131 };

    OWN char *packed = xmalloc(ROWS * q8_bytes(MOST));
    float x[ROWS * MOST], y[ROWS * MOST + 1];
    rnd_seed(47);
    EACH_SIMD(i)
    for (int D = 1; D <= MOST; D++) {
        int bad = 0;
        for (int j = 0; j < ROWS * D; j++) x[j] = rnd_normal() * (j % 7 ? 1 : 90);
        for (int r = 0; r < ROWS; r++) q8_pack(packed + r * q8_bytes(D), x + r * D, D);
        y[ROWS * D] = 77;
        q8_unpack(y, packed, ROWS, D);
        for (int j = 0; j < ROWS * D; j++) {
            const char *block = packed + j / D * q8_bytes(D) + j % D / Q8_BLOCK * (Q8_BLOCK + 2);
            uint16_t d;
            memcpy(&d, block, 2);
            bad += y[j] != f16_to_f32(d) * (signed char)block[2 + j % D % Q8_BLOCK] ||
                   fabsf(y[j] - x[j]) > f16_to_f32(d) * .56f;
        }
        CHECK(!bad && y[ROWS * D] == 77, "%s D %d: %d wrong numbers, behind them %g", simd_name(), D,
              bad, y[ROWS * D]);
    }
    simd_set(NULL);
    float odd[] = { 0, 1e-42f, NAN, INFINITY };
    for (int kind = 0; kind < 4; kind++) {
        int bad = 0;
        for (int j = 0; j < Q8_BLOCK; j++) x[j] = j == 3 ? odd[kind] : 0;
        q8_pack(packed, x, Q8_BLOCK);
        q8_unpack(y, packed, 1, Q8_BLOCK);
        for (int j = 0; j < Q8_BLOCK; j++) bad += kind < 2 ? y[j] != 0 : !isnan(y[j]);
        CHECK(!bad, "a block with %g: %d numbers are wrong", odd[kind], bad);
    }
}

TEST(math_q4, "rows of q4 unpack to the same bits with every instruction set, for every head_dim, and nothing is "
              "written past them") {
    enum { ROWS = 5, MOST = 131 };

    OWN char *packed = xmalloc(ROWS * q4_bytes(MOST));
    float x[ROWS * MOST], y[ROWS * MOST + 1], plain[ROWS * MOST];
    rnd_seed(59);
    for (int D = 1; D <= MOST; D++) {
        for (int j = 0; j < ROWS * D; j++) x[j] = rnd_normal() * (j % 7 ? 1 : 90);
        for (int r = 0; r < ROWS; r++) q4_pack(packed + r * q4_bytes(D), x + r * D, D);
        simd_set("plain");
        q4_unpack(plain, packed, ROWS, D);
        EACH_SIMD(i) {
            y[ROWS * D] = 77;
            q4_unpack(y, packed, ROWS, D);
            CHECK(!memcmp(y, plain, ROWS * D * sizeof *y), "%s D %d: other bits", simd_name(), D);
            CHECK(y[ROWS * D] == 77, "%s D %d: %g behind the rows", simd_name(), D, y[ROWS * D]);
        }
    }
    simd_set(NULL);
}

TEST(math_q8_products,
     "products with rows of q8_0: keys as sums of integers within the rounding of q "
     "to 16 bits, the same bits whatever stands beside a row and with every set that "
     "has fused multiply-add; values as the unpacked ones, to the bit; what is no "
     "number stays none") {
    enum { M = 9, N = 70, MOST = 1056 };

    static const int dims[] = { 32, 64, 96, 128, 256, 512, 544, 1056 };
    OWN float *x = random_floats(M * MOST), *k = random_floats(N * MOST),
          *unpacked = xmalloc(N * MOST * 4);
    OWN char *packed = xmalloc(N * q8_bytes(MOST));
    float *y = xmalloc((M * N + 1) * 4), *o = xmalloc(2 * M * MOST * 4), one[N], fused[M * N];
    OWN Q8Query *q = aligned_alloc(64, M * 3 * sizeof *q);
    for (int d = 0; d < 8; d++) {
        int D = dims[d], have = 0;
        for (int j = 0; j < N * D; j++) k[j] *= j % 7 ? 1 : 90;
        for (int r = 0; r < N; r++) q8_pack(packed + r * q8_bytes(D), k + r * D, D);
        q8_unpack(unpacked, packed, N, D);
        float most[M][3] = { { 0 } };  // of the columns that share a factor
        for (int i = 0; i < M; i++)
            for (int c = 0; c < D; c++)
                most[i][c / Q8_COLS] = fmaxf(most[i][c / Q8_COLS], fabsf(x[i * D + c]));
        EACH_SIMD(set)
        for (int n = N; n > N - 3; n -= 2) {
            double bad = 0;
            y[M * n] = 77;
            q8_queries(q, x, M, D);
            q8_scores(y, q, packed, M, n, D, .25f, (Ahead){ 0 });
            for (int i = 0; i < M; i++)
                for (int j = 0; j < n; j++) {
                    double want = 0, bound = 0;
                    for (int c = 0; c < D; c++) {
                        double v = unpacked[j * D + c] * .25, t = x[i * D + c];
                        want += t * v;
                        bound += (most[i][c / Q8_COLS] * .51 / Q8_TOP + fabs(t) * 4e-7) * fabs(v);
                    }
                    bad = fmax(bad, fabs(y[i * n + j] - want) / bound);
                }
            CHECK(bad <= 1 && y[M * n] == 77, "%s D %d n %d: %.3g of the bound", simd_name(), D, n,
                  bad);

            // A row alone, against the same keys in another place.
            for (int i = 0; i < M; i++) {
                q8_queries(q, x + i * D, 1, D);
                q8_scores(one, q, packed + q8_bytes(D), 1, n - 1, D, .25f, (Ahead){ 0 });
                CHECK(!memcmp(one, y + i * n + 1, (n - 1) * 4),
                      "%s D %d: row %d depends on its place", simd_name(), D, i);
            }
            if (strcmp(simd_name(), "plain") && n == N) {
                if (have) CHECK(!memcmp(fused, y, M * n * 4), "%s D %d: other bits", simd_name(), D);
                memcpy(fused, y, M * n * 4);
                have = 1;
            }

            // Values: as f32 ones, added to what is there.
            for (int j = 0; j < M * n; j++) y[j] = fabsf(y[j]);
            for (int j = 0; j < M * D; j++) o[j] = o[M * D + j] = (float)j;
            mix_of(o, y, packed, ROWS_Q8, M, n, D, 1, (Ahead){ 0 });
            mix_of(o + M * D, y, unpacked, DT_F32, M, n, D, 1, (Ahead){ 0 });
            CHECK(!memcmp(o, o + M * D, M * D * 4), "%s D %d: values differ from the unpacked ones",
                  simd_name(), D);
        }
    }
    EACH_SIMD(set)
    for (int kind = 0; kind < 4; kind++) {
        float row[64] = { 0 };
        row[37] = kind == 0 ? NAN : kind == 1 ? INFINITY : kind == 2 ? -INFINITY : 1e-40f;
        q8_queries(q, row, 1, 64);
        q8_scores(one, q, packed, 1, 4, 64, 1, (Ahead){ 0 });
        for (int j = 0; j < 4; j++)
            CHECK(kind < 3 ? one[j] != one[j] : one[j] == 0, "%s kind %d: %g", simd_name(), kind,
                  one[j]);
    }
    simd_set(NULL);
    free(y);
    free(o);
}

// Error in units in the last place of the right answer.
static double ulps(float got, double want) {
    int e;
    frexp(want, &e);
    return fabs(got - want) / ldexp(1, (e < -125 ? -125 : e) - 24);
}

TEST(math_exp, "exp_shift and the powers of 2 of softmax_columns are within 2 ulp from 0 to "
               "underflow, exact at 0 and -inf, and their sum is that of the values") {
    enum { N = 1 << 16 };

    OWN float *x = xmalloc(N * 4), *in = xmalloc(N * 4);
    EACH_SIMD(i) {
        double bad = 0, sum = 0;
        float got = 0, at = 0;
        for (int j = 0; j < N; j++) x[j] = in[j] = -110.0f * (float)j / N;
        exp_shift(x, 0, N, &got);
        for (int j = 0; j < N; j++) {
            double e = ulps(x[j], exp(in[j]));
            if (e > bad) {
                bad = e;
                at = in[j];
            }
            sum += x[j];
        }
        CHECK(bad <= 2, "%s: %.3f ulp at %g", simd_name(), bad, at);
        CHECK(fabs(got - sum) <= 1e-5 * sum, "%s: sum %g, should be %g", simd_name(), got, sum);
        // 2^x down four columns whose maximum is 0.
        float zeros[4] = { 0 }, four[4] = { 0 };
        for (int j = 0; j < N; j++) x[j] = in[j] = -160.0f * (float)j / N;
        softmax_columns(x, N / 4, 4, zeros, four);
        bad = sum = 0;
        for (int j = 0; j < N; j++) {
            double e = ulps(x[j], exp2(in[j]));
            if (e > bad) {
                bad = e;
                at = in[j];
            }
            sum += x[j];
        }
        CHECK(bad <= 2 && x[0] == 1, "%s: 2^x is off by %.3f ulp at %g; 2^0 = %g", simd_name(), bad,
              at, x[0]);
        got = four[0] + four[1] + four[2] + four[3];
        CHECK(fabs(got - sum) <= 1e-5 * sum, "%s: sum of powers %g, should be %g", simd_name(), got,
              sum);
        // Every tail; equal values in, equal values out, wherever they stand.
        for (int n = 0; n <= 35; n++) {
            float y[40], total = 1;
            for (int j = 0; j < 40; j++) y[j] = j % 3 == 0 ? 2.5f : j % 3 == 1 ? -INFINITY : 1.25f;
            exp_shift(y, 2.5f, n, &total);
            for (int j = 0; j < n; j++)
                CHECK(y[j] == (j % 3 == 0   ? 1
                               : j % 3 == 1 ? 0
                                            : y[2]) &&
                          y[j] < 1.1f,
                      "%s n %d: exp at %d is %g", simd_name(), n, j, y[j]);
            for (int j = n; j < 40; j++)
                CHECK(y[j] == (j % 3 == 0   ? 2.5f
                               : j % 3 == 1 ? -INFINITY
                                            : 1.25f),
                      "%s n %d: wrote past the end at %d", simd_name(), n, j);
            double want = 1 + (n + 2) / 3 + n / 3 * exp(-1.25);
            CHECK(fabs(total - want) < 1e-5 * want, "%s n %d: sum %g, should be %g", simd_name(), n,
                  total, want);
        }
        float none[3] = { -INFINITY, -INFINITY, -INFINITY }, zero = 0;
        exp_shift(none, -INFINITY, 3, &zero);
        CHECK(zero == 0 && none[0] == 0, "%s: a row that sees nothing gives %g, sum %g", simd_name(),
              none[0], zero);
    }
    simd_set(NULL);
}

TEST(math_softmax_columns,
     "softmax down columns, tile after tile: values, maxima and sums are those of double; masked "
     "cells give 0 and nothing beyond the tile is touched") {
    EACH_SIMD(i) {
        rnd_seed(47);
        for (int c = 0; c < 300; c++) {
            int m = 1 + rnd_int(70), tiles = 1 + rnd_int(4), bad = 0;
            float max[72], sum[72], *x = xmalloc((70 * 20 + 2) * sizeof *x);
            OWN float *was = xmalloc(70 * 20 * sizeof *was);
            double top[70], all[70];
            for (int j = 0; j < 72; j++) {
                max[j] = j < m ? -INFINITY : 7;
                sum[j] = j < m ? 0 : 7;
            }
            for (int j = 0; j < m; j++) {
                top[j] = -INFINITY;
                all[j] = 0;
            }
            for (int t = 0; t < tiles; t++) {
                int n = 1 + rnd_int(20);
                // Every third column begins with a tile it cannot see.
                for (int j = 0; j < n * m; j++)
                    was[j] = x[j] = rnd_int(4) && (t || j % m % 3) ? 10 * rnd_normal() : -INFINITY;
                x[n * m] = x[n * m + 1] = -77;
                softmax_columns(x, n, m, max, sum);
                for (int j = 0; j < m; j++) {
                    double old = top[j];
                    for (int r = 0; r < n; r++) top[j] = fmax(top[j], was[r * m + j]);
                    if (top[j] == -INFINITY) {
                        for (int r = 0; r < n; r++) bad += x[r * m + j] != 0;
                        continue;
                    }
                    all[j] *= exp2(old - top[j]);
                    for (int r = 0; r < n; r++) {
                        double e = exp2(was[r * m + j] - top[j]);
                        all[j] += e;
                        bad += !(fabs(x[r * m + j] - e) <= 1e-5 * e + 1e-44) ||
                               (was[r * m + j] == -INFINITY && x[r * m + j] != 0);
                    }
                }
                CHECK(x[n * m] == -77 && x[n * m + 1] == -77, "%s m %d n %d: wrote past the tile",
                      simd_name(), m, n);
            }
            for (int j = 0; j < m; j++)
                bad += max[j] != (float)top[j] || !(fabs(sum[j] - all[j]) <= 1e-5 * all[j]);
            CHECK(!bad && max[m] == 7 && sum[m] == 7, "%s m %d, %d tiles: %d values are wrong",
                  simd_name(), m, tiles, bad);
            free(x);
        }
    }
    simd_set(NULL);
}

TEST(math_convert, "all 65536 f16 and bf16 values widen exactly; narrowing gives the bits of "
                   "kvcomp.h at every tie and limit") {
    enum { ALL = 65536, N = 1 << 18 };

    OWN uint16_t *h = xmalloc(N * 2);
    OWN uint32_t *u = xmalloc(N * 4);
    OWN float *x = xmalloc(N * 4);
    rnd_seed(46);
    EACH_SIMD(i) {
        for (int dt = DT_F16; dt <= DT_BF16; dt++) {
            for (int j = 0; j < ALL; j++) h[j] = (uint16_t)j;
            to_f32(x, h, dt, ALL);
            for (int j = 0; j < ALL; j++) {
                float want = dt == DT_F16 ? f16_to_f32(h[j]) : bf16_to_f32(h[j]);
                CHECK(isnan(want) ? isnan(x[j]) : bits_of(x[j]) == bits_of(want),
                      "%s dtype %d: %04x widens to %g, should be %g", simd_name(), dt, j, x[j],
                      want);
            }
            // every value of the format, halfway to the next, and one f32 step to both sides of
            // that; then any bits
            for (int j = 0; j < N; j++) {
                uint32_t base = bits_of(dt == DT_F16 ? f16_to_f32((uint16_t)(j / 4))
                                                     : bf16_to_f32((uint16_t)(j / 4)));
                uint32_t half = dt == DT_F16 ? 0x1000 : 0x8000;
                u[j] = j % 4 == 0 ? base : base + half + (uint32_t)(j % 4 - 2);
            }
            for (int round = 0; round < 2; round++) {
                for (int j = 0; j < N && round; j++)
                    u[j] = (uint32_t)splitmix64(&rnd_state) & (j % 2 ? 0xffffffff : 0xcfffffff);
                memcpy(x, u, N * 4);
                from_f32(h, x, dt, N);
                for (int j = 0; j < N; j++) {
                    uint16_t want =
                        dt == DT_F16 ? f32_to_f16(from_bits(u[j])) : f32_to_bf16(from_bits(u[j]));
                    CHECK(h[j] == want, "%s dtype %d: %08x narrows to %04x, should be %04x",
                          simd_name(), dt, u[j], h[j], want);
                }
            }
        }
        for (int n = 0; n < 40; n++) {  // tails, and nothing past the end
            float a[40], b[41];
            uint16_t c[41];
            for (int j = 0; j < 40; j++) a[j] = (float)j / 3 - 5;
            for (int dt = DT_F32; dt <= DT_BF16; dt++) {
                memset(b, 0x55, sizeof b);
                memset(c, 0x55, sizeof c);
                if (dt == DT_F32)
                    to_f32(b, a, dt, (size_t)n);
                else {
                    from_f32(c, a, dt, (size_t)n);
                    to_f32(b, c, dt, (size_t)n);
                    CHECK(c[n] == 0x5555, "%s dtype %d: from_f32 of %d wrote one more", simd_name(),
                          dt, n);
                }
                for (int j = 0; j < n; j++)
                    CHECK(fabsf(b[j] - a[j]) <= fabsf(a[j]) / 128,
                          "%s dtype %d n %d: element %d is %g, was %g", simd_name(), dt, n, j, b[j],
                          a[j]);
                CHECK(bits_of(b[n]) == 0x55555555, "%s dtype %d: to_f32 of %d wrote one more",
                      simd_name(), dt, n);
            }
        }
    }
    simd_set(NULL);
}

TEST(math_rows,
     "rmsnorm, swiglu and add_bias equal double, in place too, for every dtype of their weights") {
    static const int ns[] = { 1, 40, 64, 130, 576, 1030 };
    rnd_seed(47);
    EACH_SIMD(i)
    for (int c = 0; c < 6; c++)
        for (int dt = DT_F32; dt <= DT_BF16; dt++)
            for (int T = 1; T <= 65; T += 32) {
                int n = ns[c];
                size_t all = (size_t)T * n, at = 0;
                Tensor w = random_tensor(dt, 1, n);
                OWN float *x = random_floats(all), *y = xmalloc(all * 4);
                OWN float *want = xmalloc(all * 4), *u = random_floats(all);
                for (int t = 0; t < T; t++) {
                    double ss = 0;
                    for (int j = 0; j < n; j++) ss += (double)x[t * n + j] * x[t * n + j];
                    for (int j = 0; j < n; j++)
                        want[t * n + j] =
                            (float)(x[t * n + j] / sqrt(ss / n + 1e-5) * weight_at(&w, (size_t)j));
                }
                rmsnorm(y, x, &w, T, n, 1e-5f);
                CHECK(worst(y, want, all, 1e-7, 1e-6, &at) <= 1,
                      "%s rmsnorm n %d dtype %d T %d: [%zu] %g, should be %g", simd_name(), n, dt, T,
                      at, y[at], want[at]);
                memcpy(y, x, all * 4);
                rmsnorm(y, y, &w, T, n, 1e-5f);
                CHECK(worst(y, want, all, 1e-7, 1e-6, &at) <= 1,
                      "%s rmsnorm in place n %d: [%zu] %g, should be %g", simd_name(), n, at, y[at],
                      want[at]);
                memcpy(y, x, all * 4);
                for (size_t j = 0; j < all; j++) {
                    y[j] *= 30;
                    want[j] = (float)(y[j] / (1 + exp(-(double)y[j])) * u[j]);
                }
                swiglu(y, u, all);
                CHECK(worst(y, want, all, 1e-30, 1e-6, &at) <= 1,
                      "%s swiglu n %zu: [%zu] %g, should be %g", simd_name(), all, at, y[at],
                      want[at]);
                memcpy(y, x, all * 4);
                add_bias(y, &w, T);
                for (size_t j = 0; j < all; j++)
                    CHECK(y[j] == x[j] + (float)weight_at(&w, j % n),
                          "%s add_bias n %d dtype %d: [%zu] is %g", simd_name(), n, dt, j, y[j]);
                add_bias(y, &(Tensor){ NULL, dt, 1, n }, T);
                free((void *)w.data);
            }
    simd_set(NULL);
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

TEST(math_top_k, "top_k takes the k largest, ties by lower index, indices ascending; -0 equals +0; "
                 "every n, k and many ties") {
    enum { MOST = 300 };

    float x[MOST];
    int got[MOST], want[MOST];
    rnd_seed(48);
    EACH_SIMD(s) for (int round = 0; round < 600; round++) {
        int n = round < 40 ? round / 4 : 1 + rnd_int(MOST), k = rnd_int(n + 3);
        int levels = 1 + rnd_int(round % 3 ? 6 : 1000);
        for (int j = 0; j < n; j++) {
            int r = rnd_int(levels);
            x[j] = round % 5 == 0 ? rnd_normal()
                   : r == 0       ? 0.0f
                   : r == 1       ? -0.0f
                   : r == 2       ? -INFINITY
                   : r == 3       ? INFINITY
                                  : (float)(r - levels / 2) * 1e-3f;
            // One last bit apart.
            if (round % 7 == 0 && j % 4 == 0)
                x[j] = from_bits(bits_of(1.0f) + (uint32_t)rnd_int(3));
            // Subnormal.
            if (round % 11 == 0) x[j] *= 1e-40f;
        }
        for (int j = 0; j < MOST; j++) got[j] = -1;
        int a = top_k(x, n, k, got), b = slow_top_k(x, n, k, want);
        CHECK(a == b && a == (k < n ? k : n) && !memcmp(got, want, (size_t)a * sizeof(int)),
              "%s round %d, n %d, k %d: %d taken, should be %d, or others", simd_name(), round, n, k,
              a, b);
        for (int j = a; j < MOST; j++)
            CHECK(got[j] == -1, "%s round %d, n %d, k %d: wrote past the list at %d", simd_name(),
                  round, n, k, j);
    }
    simd_set(NULL);
    CHECK(top_k(x, 5, -1, got) == 0 && top_k(x, 0, 3, got) == 0, "nothing to take");
}

TEST(math_unpack, "packed rows of every width give the elements that stand in their bits, and write nothing "
                  "past them") {
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
        CHECK(!bad && h[n] == 0x5555, "%s n %d w %d: %d wrong elements, behind them %04x", simd_name(), n, w, bad, h[n]);
    }
    simd_set(NULL);
}

int main(int argc, char **argv) {
    return check_main(argc, argv);
}
