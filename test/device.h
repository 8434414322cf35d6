// test/device.h - kvcomp.cu beside the CPU half: kernels, rows, attention, whole dialogues under every method, what is
// launched, memory, calls that fail. tests.c includes it. Without a GPU the kernels run under cuda_emu.h; every test goes
// through one of three orders of threads, or with KVCOMP_ORDERS=3 through all. Shapes are odd on purpose, and small: an
// emulated thread costs a microsecond a meeting.
void *cuda_put(const void *host, size_t bytes);
void cuda_get(void *host, const void *dev, size_t bytes);
void cuda_drop(void *dev);
size_t cuda_held(const Session *s);
void cuda_math(Session *s, char op, float *y, size_t ny, const float *x, size_t nx, const Tensor *w,
               int T);
void cuda_single_launches(Session *s, int single);
int cuda_stale(Session *s);
extern int cuda_poison;
size_t cuda_chunk(size_t total);
// What the emulator has beside CUDA's calls. On a real GPU these stand in for it, and do nothing.
#define ON_A_GPU __attribute__((weak))
ON_A_GPU int emu_no_graphs;
ON_A_GPU int emulated(void) { return 0; }
ON_A_GPU int emu_is_hard(void) { return 0; }
ON_A_GPU void emu_set_seed(int seed) { (void)seed; }
ON_A_GPU void emu_set_memory(size_t bytes) { (void)bytes; }
ON_A_GPU size_t emu_most_memory(void) { return 0; }
ON_A_GPU size_t emu_pooled(void) { return 0; }
ON_A_GPU long emu_count(const char *part) { return part != NULL; }
ON_A_GPU void emu_set_device(int major, int old_driver) { (void)(major + old_driver); }
ON_A_GPU void emu_fail_at(long n, int all) { (void)(n + all); }
ON_A_GPU long emu_calls(void) { return 0; }
ON_A_GPU void emu_provoke(int kind) { (void)kind; }

// Is this a run that takes its time (make race)?
static int thorough(void) {
    const char *orders = getenv("KVCOMP_ORDERS");
    return orders && atoi(orders) == 3;
}

// Another order of threads from now on, the order-th of three.
static void order_set(int order) {
    emu_set_seed((int[]){ 0, 1, 7 }[order % 3]);
}

// Were there n launches or calls whose name has this part, since emu_count(NULL)? On a GPU nobody counts.
static int counted(const char *part, long n) { return !emulated() || emu_count(part) == n; }

// The next of a test's n variants that is tried here becomes *i, under its order of threads; *turn counts. Returns 0 where
// there is none more. Each goes through one order, another one each time; with KVCOMP_ORDERS=3 every other one through
// each of the three. Where accesses are watched a fourth of them are tried, or half; where `make test` runs the harder
// emulator behind this program (KVCOMP_HARDER), they are left to it: what is asked of them is the same. A single one is
// tried everywhere.
static int next_variant(int *turn, int n, int *i) {
    static int next;
    int all = thorough() && !emu_is_hard() && emulated() ? 3 : 1;
    while (*turn < all * n) {
        int order = *turn / n, here = all == 3 ? (*turn % n + order) % 2 == 0 : !getenv("KVCOMP_HARDER") || *turn % 4;
        if (emu_is_hard()) here = *turn % (thorough() ? 2 : 4) == 0;
        *i = (*turn)++ % n;
        if (!here && n > 1) continue;
        order_set(all == 3 ? order : next++);
        return 1;
    }
    return 0;
}

#define EACH_VARIANT(i, n) for (int turn_ = 0, i; next_variant(&turn_, n, &i);)

// A session on the device, for session_done.
static Session *cuda_session(Tiny m, const char *method, const char *text) {
    return session_of(m, method, formatted("device=cuda %s", text));
}

// n floats on the device; those that are declared OWN_DEVICE are given back where their block ends.
static float *put_floats(const float *x, size_t n) { return cuda_put(x, n * sizeof *x); }
#define OWN_DEVICE __attribute__((cleanup(own_device)))
static void own_device(float **p) { cuda_drop(*p); }

// y = x W^T in double, x (T,I), W (O,I): y (T,O), to be freed.
static double *product_of(const Tensor *w, const float *x, int T) {
    int O = w->rows, I = w->cols;
    double *y = xcalloc((size_t)T * O, sizeof *y);
    OWN float *wf = xmalloc((size_t)O * I * sizeof *wf);
    to_f32(wf, w->data, w->dtype, (size_t)O * I);
    for (int t = 0; t < T; t++)
        for (int o = 0; o < O; o++)
            for (int i = 0; i < I; i++) y[(size_t)t * O + o] += (double)wf[(size_t)o * I + i] * x[(size_t)t * I + i];
    return y;
}

// y = x W^T on the device, and z += x W^T, x (T,I) of this deviation: how far y is from sums in double, in units of
// atol + rtol |y|, or z in units of twice that. W is freed.
static double product_off(Session *s, Tensor w, int T, double std, double atol, double rtol) {
    size_t nx = (size_t)T * w.cols, ny = (size_t)T * w.rows;
    OWN float *x = normals(nx, std), *y = normals(ny, std), *z = normals(ny, std);
    OWN float *want = xmalloc(ny * sizeof *want), *added = xmalloc(ny * sizeof *added);
    OWN double *sum = product_of(&w, x, T);
    for (size_t i = 0; i < ny; i++) {
        want[i] = (float)sum[i];
        added[i] = z[i] + want[i];
    }
    cuda_math(s, 'm', y, ny, x, nx, &w, T);
    cuda_math(s, 'p', z, ny, x, nx, &w, T);
    device_reset(s);                    // the tensor's copy, before its address is used again
    free((void *)w.data);
    return fmax(worst(y, want, ny, atol, rtol, NULL), worst(z, added, ny, 2 * atol, 2 * rtol, NULL));
}

TEST(cuda_math, "products (gemv, gemm with --exact; f32, f16, bf16), norms, SwiGLU at odd shapes agree "
                "with the CPU") {
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 16, 16, 11, 1);
    OWN_SESSION Session *s = cuda_session(m, "full", "exact");
    EACH_VARIANT(once, 1) {
        int shape[][2] = { { 1, 1 }, { 17, 40 }, { 33, 129 }, { 48, 512 }, { 5, 30 }, { 21, 1104 } };
        int T[] = { 1, 2, 7 };
        for (int k = 0; k < 6 * 3 * 3; k++) {
            int O = shape[k / 9][0], I = shape[k / 9][1], t = T[k / 3 % 3], d = k % 3;
            if (t > 1 && d != DT_F32 && I % 2) continue;
            // cuBLAS gets two bf16 an activation: 16 bits.
            double tol = d == DT_BF16 && t > 1 ? 2e-5 : 3e-6;
            double e = product_off(s, tiny_as(tiny_tensor(O, I, 1 / sqrt(I)), d), t, 1, tol, tol);
            CHECK(e <= 1, "O %d I %d T %d dtype %d: %g times the bound", O, I, t, d, e);
        }
        for (int i = 0; i < 5; i++) {
            int n = (int[]){ 40, 1, 515, 600, 2049 }[i];
            int rows = (int[]){ 3, 70, 2, 65, 2 }[i], dtype = i % 3;
            Tensor w = tiny_as(tiny_tensor(1, n, 1), dtype);
            size_t all = (size_t)rows * n;
            OWN float *x = normals(all, 3), *y = normals(all, 1), *ref = xmalloc(all * sizeof *ref);
            rmsnorm(ref, x, &w, rows, n, m.c->eps);
            cuda_math(s, 'h', y, all, x, all, &w, rows);
            CHECK(worst(y, ref, all, 2e-6, 2e-6, NULL) <= 1, "norm of %d x %d for a product", rows, n);
            // Gate and up of a row lie side by side.
            OWN float *both = xmalloc(2 * all * sizeof *both);
            for (int r = 0; r < rows; r++) {
                memcpy(both + (size_t)2 * r * n, ref + (size_t)r * n, n * sizeof *x);
                memcpy(both + (size_t)(2 * r + 1) * n, x + (size_t)r * n, n * sizeof *x);
            }
            cuda_math(s, 's', y, all, both, 2 * all, &w, rows);
            swiglu(ref, x, all);
            CHECK(worst(y, ref, all, 2e-6, 2e-6, NULL) <= 1, "swiglu of %d x %d", rows, n);
            device_reset(s);
            free((void *)w.data);
        }
    }
}

// ---- one product of 16-bit numbers

int cuda_matrix(Session *s, const Tensor *t, void *to, float *scale);

TEST(cuda_one_product, "one product is off by 2^-11 of an activation with f16 weights and with bf16 "
                       "weights that f16 holds, by 2^-8 with others; --exact by 2^-22 and 2^-16; rows of "
                       "any size") {
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 16, 16, 11, 1);
    Session *s[2] = { cuda_session(m, "full", ""), cuda_session(m, "full", "exact") };
    // A sum of 96 terms, each off by up to such a share of itself: the worst of 144 sums is off by
    // about 1.5 such shares.
    const struct {
        int dtype, tiny;
        double most[2];
    } kind[] = { { DT_F32, 0, { 2e-6, 2e-6 } },
                 { DT_F16, 0, { 1e-3, 2e-6 } },
                 { DT_BF16, 0, { 1e-3, 2e-5 } },
                 { DT_BF16, 4, { 1e-3, 2e-5 } },
                 { DT_BF16, 5, { 1e-2, 2e-5 } } };
    for (int k = 0; k < 5 * 4; k++) {
        int e = k % 4 == 3, shift = e ? 0 : (int[]){ 0, 40, -60 }[k % 4];       // two products are as f16 goes
        double most = kind[k / 4].most[e], size = ldexp(.02, shift) * sqrt(96);  // of an element
        Tensor w = tiny_as(tiny_tensor(48, 96, .02), kind[k / 4].dtype);
        for (int i = 0; i < kind[k / 4].tiny; i++) ((uint16_t *)w.data)[i * 7] = (127 - 60) << 7 | 1;   // f16 would round it
        double x = product_off(s[e], w, 3, ldexp(1, shift), size, 0);
        CHECK(x <= most, "dtype %d, %d tiny%s, rows of 2^%d: %g", kind[k / 4].dtype, kind[k / 4].tiny, e ? ", exact" : "",
              shift, x);
        CHECK(e || k / 4 != 4 || x > 2e-3, "a matrix that stays bf16 meets bf16 rows: %g", x);
    }
    for (int e = 0; e < 2; e++) session_done(s[e]);
}

enum { HALVED = 4096 };

// The device makes numbers of this dtype of bf16 ones h (HALVED), of which `lost`, times the scale, are others, by at most
// this share of the largest.
static void halved_is(Session *s, const uint16_t *h, int dtype, int lost, double most, const char *what) {
    Tensor t = { h, DT_BF16, 1, HALVED };
    uint16_t got[HALVED];
    float scale, top = 0;
    double off = 0;
    int is = cuda_matrix(s, &t, got, &scale), others = 0;
    for (int i = 0; i < HALVED; i++) top = fmaxf(top, fabsf(bf16_to_f32(h[i])));
    for (int i = 0; i < HALVED; i++) {
        float x = bf16_to_f32(h[i]), y = (is == DT_F16 ? f16_to_f32(got[i]) : bf16_to_f32(got[i])) * scale;
        others += memcmp(&y, &x, sizeof x) != 0;
        off = fmax(off, fabs((double)y - x) / top);
    }
    device_reset(s);
    CHECK(is == dtype && others == lost && off <= most, "%s: type %d, %d others, by %g", what, is, others, off);
}

TEST(cuda_halved, "bf16 becomes f16 bit for bit down to 2^-32 of the largest; one element in 1024 may be "
                  "smaller, and changes by 2^-40 of it; more, or what is no number, keep a matrix bf16; "
                  "a token's product is the same to the bit") {
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 16, 16, 11, 1);
    OWN_SESSION Session *s = cuda_session(m, "full", ""), *exact = cuda_session(m, "full", "exact");
    uint16_t h[HALVED];
    for (int top = 50; top < 255; top += 34) {
        // Exponents of the largest and of down to 2^-32 of it, every mantissa and sign, zeros.
        for (int i = 0; i < HALVED; i++) {
            int exponent = top - i % 33;
            h[i] = (uint16_t)(i % 64 == 63 ? i % 2 << 15 : exponent << 7 | (i * 37 & 127) | i % 2 << 15);
        }
        h[5] = (uint16_t)(top << 7 | 127);
        halved_is(s, h, DT_F16, 0, 0, formatted("largest 2^%d", top - 127));
        halved_is(exact, h, DT_BF16, 0, 0, "exact");
    }
    for (int n = 4; n < 6; n++) {
        for (int i = 0; i < HALVED; i++) h[i] = (uint16_t)(120 << 7 | (i & 127));
        for (int i = 0; i < n; i++) h[i * 9 + 1] = (uint16_t)((120 - 33 - i) << 7 | 127);
        halved_is(s, h, n == 4 ? DT_F16 : DT_BF16, n == 4 ? 4 : 0, ldexp(1, -40), formatted("%d smaller ones", n));
    }
    uint16_t none[] = { 0x7f80, 0xff80, 0x7fc1 };
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < HALVED; j++) h[j] = 0x3f80;
        h[77] = none[i];
        halved_is(s, h, DT_BF16, 0, 0, formatted("%x", none[i]));
    }
    memset(h, 0, sizeof h);
    halved_is(s, h, DT_F16, 0, 0, "zeros");

    // One token: f32 sums of the same numbers times a power of two.
    Tensor w = tiny_as(tiny_tensor(40, 96, .02), DT_BF16);
    float *x = normals(96, 1), y[2][40];
    cuda_math(s, 'm', y[0], 40, x, 96, &w, 1);
    cuda_math(exact, 'm', y[1], 40, x, 96, &w, 1);
    CHECK(!memcmp(y[0], y[1], sizeof y[0]), "other bits");
    free((void *)w.data);
    free(x);
}

// ---- two sessions with the same rows, one on each side

// Rows are put in directly, so the contents of the heads are known to the bit.
typedef struct {
    Tiny m;
    Session *c, *d;
} Pair;

// Two sessions with the same method and options, p.c on the CPU and p.d on the device.
static Pair pair_open(Tiny m, const char *method, const char *text) {
    return (Pair){ m, session_of(m, method, text), cuda_session(m, method, text) };
}

// Session *s is one, then the other.
#define EACH_SIDE(s, p) for (Session *s = (p)->c; s; s = s == (p)->c ? (p)->d : NULL)

// Closes both; those that are declared OWN_PAIR where their block ends.
#define OWN_PAIR __attribute__((cleanup(pair_close)))
static void pair_close(Pair *p) {
    session_done(p->c);
    session_done(p->d);
}

// A pass of n tokens: rows of every layer.
static void pair_append(Pair *p, int n, double k_std) {
    const Config *c = p->m.c;
    OWN Token *t = xcalloc(n, sizeof *t);
    for (int i = 0; i < n; i++) t[i] = (Token){ i % c->V, -1, p->c->turn, TOK_USER };
    EACH_SIDE(s, p) {
        add_tokens(s, t, n);
        s->turn++;
    }
    tokens_give_cuda(p->d);
    for (int l = 0; l < c->L; l++) {
        size_t all = (size_t)n * c->G * c->D;
        OWN float *k = normals(all, k_std), *v = normals(all, 1);
        OWN_DEVICE float *dk = put_floats(k, all), *dv = put_floats(v, all);
        kv_append(p->c, l, k, v, 0, n);
        kv_append(p->d, l, dk, dv, 0, n);
    }
}

// The end of a pass of n tokens on both sides: the commits of all parts, layer after layer.
static void pair_commit(Pair *p, int n) {
    EACH_SIDE(s, p)
        for (int l = 0; l <= s->c->L; l++)
            EACH_HOOK(s, x, commit) x->m->commit(s, x->ms, l, NULL, n);
}

// dev: device memory.
static int bytes_differ(const void *host, const void *dev, size_t n) {
    OWN char *x = xmalloc(n + 1);
    if (n) cuda_get(x, dev, n);
    int diff = n && memcmp(x, host, n);
    return diff;
}

// Rows, their tokens and positions, and the tables of packed ones.
static int held_differs(const KVHead *a, const KVHead *b) {
    size_t n = a->len * sizeof(int);
    int bad = a->len != b->len || a->packed != b->packed || a->n_reg != b->n_reg;
    if (bad || (n && (memcmp(a->src, b->src, n) || memcmp(a->pos, b->pos, n)))) return 1;
    for (int i = 0; i < a->n_reg && !bad; i++) {
        const Region *x = &a->reg[i], *y = &b->reg[i];
        bad = x->row0 != y->row0 || x->n != y->n || x->w != y->w || x->base != y->base;
    }
    return bad;
}

// A on the CPU, b on the device: all that, and the bytes.
static int head_differs(const Session *c, const KVHead *a, const KVHead *b) {
    size_t raw = a->len - a->packed;
    if (held_differs(a, b) || a->cap != b->cap || a->pk_bytes != b->pk_bytes) return 1;
    return bytes_differ(a->k, b->k, raw * c->fk->row_bytes(c->c->D)) ||
           bytes_differ(a->v, b->v, raw * c->fv->row_bytes(c->c->D)) ||
           bytes_differ(a->pk, b->pk, a->pk_bytes) || bytes_differ(a->pv, b->pv, a->pk_bytes);
}

// How many heads hold other rows on the device; sums of bytes that differ count, too.
static int pair_rows_differ(const Pair *p) {
    const Session *c = p->c, *d = p->d;
    int bad = 0;
    for (int i = 0; i < c->c->L * c->c->G; i++) bad += head_differs(c, &c->head[i], &d->head[i]);
    return bad + (kv_bytes(c) != kv_bytes(d)) +
           (kv_meta_bytes(c) - near_bytes(c) != kv_meta_bytes(d)) + (near_bytes(d) != 0);
}

// Do hooks read other keys or values of head (l,g) on the device, in these n rows (NULL: the first n)?
static int loads_differ(const Pair *p, int l, int g, const int *rows, int n) {
    size_t all = (size_t)n * p->m.c->D;
    OWN float *a = normals(all, 1), *b = normals(all, 1);
    int bad = 0;
    for (int v = 0; v < 2; v++) {
        (v ? kv_load_v : kv_load_k)(p->c, kv_head(p->c, l, g), rows, 0, n, a);
        (v ? kv_load_v : kv_load_k)(p->d, kv_head(p->d, l, g), rows, 0, n, b);
        bad += memcmp(a, b, all * sizeof *a) != 0;
    }
    return bad;
}

// Both sides drop rows of head (l,g): all but the first ones, and every step-th from `from` on.
static void pair_keep(Pair *p, int l, int g, int first, int step, int from) {
    int n = 0, len = kv_head(p->c, l, g)->len;
    OWN int *keep = xmalloc((len + 1) * sizeof(int));
    for (int r = 0; r < len; r++)
        if (r < first || (r >= from && (r - from) % step == 0)) keep[n++] = r;
    EACH_SIDE(s, p) keep_head(s, l, g, keep, n);
}

// Rows of n tokens, and the end of the pass where a part packs them.
static void pair_pass(Pair *p, int n, double k_std) {
    pair_append(p, n, k_std);
    pair_commit(p, n);
}

// The rows go through 24 changes, after each of which both sides hold and load the same, to the bit; keys of this
// deviation. Packed rows are not moved to other positions, and no part compacts them.
static void rows_agree(Pair *p, double k_std, const char *what) {
    enum { APPEND, KEEP, DROP, TRUNCATE, COMPACT, TURN, KINDS_OF_CHANGE };
    static const char *const name[] = { "append", "keep", "drop", "truncate", "compact", "re-rotate" };
    int packs = p->c->packing != NULL;
    pair_pass(p, 70, k_std);
    CHECK(!pair_rows_differ(p), "%s: first pass", what);
    for (int k = 0; k < 24; k++) {
        int kind = k % 2 ? APPEND : k / 2 % (packs ? COMPACT : KINDS_OF_CHANGE), l = rnd_int(2), g = rnd_int(3);
        int len = kv_head(p->c, l, g)->len, from = rnd_int(len + 1), list[] = { 1, 4, 7 }, some[64], n = 0;
        if (kind == APPEND) pair_pass(p, k % 8 == 1 ? 60 : 1 + rnd_int(13), k_std);
        if (kind == KEEP) pair_keep(p, l, g, rnd_int(from + 1), 1 + rnd_int(3), from);
        if (kind == DROP) pair_keep(p, l, g, 0, 1, len);
        EACH_SIDE(s, p) {
            if (kind == TRUNCATE) kv_truncate(s, s->n_tok - 10);
            if (kind == COMPACT && len > 25) {
                view_group(s, l, g, list, 3, 20);
                view_set(s, l, g * 2 + 1, list + 1, 1, 22);
                kv_compact(s, l);
                CHECK(kv_view(s, l, g * 2 + 1)->tail == 5 && kv_view(s, l, g * 2 + 1)->idx[0] == 1, "view renumbered");
                view_all(s);
            }
            if (kind == TURN && len > 3) kv_repos(s, l, g, 3, 77 + k);
        }
        CHECK(!pair_rows_differ(p), "%s: %s, change %d", what, name[kind], k);
        len = kv_head(p->c, l, g)->len;
        for (int r = rnd_int(3); r < len && n < 64; r += 1 + r % 3) some[n++] = r;
        CHECK(!n || (!loads_differ(p, l, g, NULL, len) && !loads_differ(p, l, g, some, n)), "%s: load behind change %d", what, k);
    }
}

// What is asked of two sessions behind their passes: single tokens, a whole pass on tensor cores, column sums on tensor
// cores, attention over lines without tensor cores, or on them.
enum { STEPS, PASS, SUMS, LINES, LINES_TENSOR };

// A row of the tests of attention: heads; tokens of two passes and of a last one, whose tokens ask; how keys and values
// are stored; the options of pats, or NULL; 1: SONIC's rule.
typedef struct {
    int ask, H, G, D, first, second, n;
    const char *k, *v, *pats;
    int rule;
} Shape;

// The tokens of both sessions become messages with Nexus tokens between them.
static void pair_messages(Pair *p) {
    int seg = -1;
    for (int i = 0; i < p->c->n_tok; i++) {
        if (!rnd_int(40)) seg++;
        p->c->tok[i].seg = p->d->tok[i].seg = seg;
        p->c->tok[i].kind = p->d->tok[i].kind = seg >= 0 && !rnd_int(15) ? TOK_EXTRA : TOK_USER;
    }
    tokens_give_cuda(p->d);
}

// A pair of two layers, the second of which has a sliding window, whose heads have lost rows and so differ in length.
// Very many rows: one layer, and all are kept.
static Pair pair_shaped(const Shape *x, int seed) {
    const char *text = formatted("ctk=%s ctv=%s %s", x->k, x->v, x->pats ? x->pats : "");
    int many = x->first > 9000;
    Tiny m = tiny_model(many ? 1 : 2, x->H, x->G, x->D, 16, 16, 11, seed);
    tiny_window(m, 2, 37);
    Pair p = pair_open(m, x->pats ? "pats" : "full", text);
    p.c->wants = p.d->wants = seed % 4 == 3 || x->ask >= LINES ? 0 : KV_MASS;
    for (int i = 0; i < 2; i++) {
        int n = i ? x->second : x->first;
        if (n) pair_append(&p, n, 1);
        if (n && x->pats) pair_commit(&p, n);
    }
    CHECK(!x->pats || kv_head(p.d, 0, 0)->packed > 10, "%s: %d packed rows", text, kv_head(p.d, 0, 0)->packed);
    for (int g = 0; g < x->G && !many; g++) pair_keep(&p, 0, g, 0, 2 + g, g);
    pair_append(&p, x->n, 1);
    p.c->rule = p.d->rule = x->rule;
    if (x->rule) pair_messages(&p);
    return p;
}

// Random queries of n tokens on both sides, and room for what attention makes of them. Those that are declared OWN_ASKED
// are given back where their block ends.
typedef struct {
    size_t all;                 // numbers of each
    float *q, *want, *got;      // want: the CPU's answer; got: the device's, once it is fetched
    float *dq, *dgot;           // on the device
} Asked;

static Asked asked_new(const Pair *p, int n) {
    size_t all = (size_t)n * p->m.c->H * p->m.c->D;
    Asked x = { all, normals(all, 1.5), xmalloc(all * sizeof(float)), xmalloc(all * sizeof(float)), NULL, NULL };
    x.dq = put_floats(x.q, all);
    x.dgot = put_floats(x.q, all);
    return x;
}

#define OWN_ASKED __attribute__((cleanup(asked_free)))
static void asked_free(Asked *x) {
    free(x->q);
    free(x->want);
    free(x->got);
    cuda_drop(x->dq);
    cuda_drop(x->dgot);
}

// Fetches n numbers of the device's answer. Returns how far they are from the CPU's, in units of the bound.
static double asked_error(Asked *x, size_t n, double bound) {
    cuda_get(x->got, x->dgot, n * sizeof *x->got);
    return worst(x->got, x->want, n, bound, bound, NULL);
}

// Window scores of the last 1 to `most` of n queries in layer l, and of all when more are asked for. Over very many rows,
// which take seconds, of the most alone.
static void pair_sums(Pair *p, int l, int n, const Asked *ask, int most, double tol) {
    size_t all = (size_t)p->m.c->H * kv_longest(p->c, l);
    OWN float *x = xmalloc(all * sizeof *x), *y = xmalloc(all * sizeof *y);
    int W = kv_longest(p->c, l) > 9000 ? most : 1, step = (most - 1) / 3;
    for (int taken = 0; W <= most && taken < n; taken = W, W += step) {
        window_scores(p->c, l, ask->q, n, W, x);
        window_scores(p->d, l, ask->dq, n, W, y);
        CHECK(worst(y, x, all, 1e-6, tol, NULL) <= 1, "window scores: layer %d, W %d, %d queries, D %d %s", l, W, n,
              p->m.c->D, p->c->fk->name);
    }
}

// The views of layer l. kind 0: all rows; 1: equal lists in a group; 2: different ones, some without rows of their own
// or without a tail.
static void pair_views(Pair *p, int l, int kind) {
    const Config *c = p->m.c;
    int R = c->H / c->G, idx[4096];
    for (int h = 0; h < c->H; h++) {
        int k = 0, len = kv_head(p->c, l, h / R)->len, tail = kind ? len - len / 4 - (kind == 2) * (h % R) : 0;
        if (kind == 2 && h % 4 == 3) tail = len;
        for (int r = kind == 2 ? h % 3 : 0; kind && r < tail && (kind == 1 || h % 4 != 2); r += 2 + kind) idx[k++] = r;
        if (!k && tail == len) tail = 0;
        view_set(p->c, l, h, idx, k, tail);
        view_set(p->d, l, h, idx, k, tail);
    }
}

// Both sides are in a step, or not, whose first token is `base`.
static void pair_step(Pair *p, int base, int decoding) {
    EACH_SIDE(s, p) {
        s->base = base;
        s->decoding = decoding;
    }
}

// The last n tokens ask, as a pass and for window scores; then the last token does in a step, with three kinds of
// views. fast: the kernel of steps is decode_kernel.
static void pair_attention(Pair *p, int l, int n, int fast) {
    const Config *c = p->m.c;
    size_t row = (size_t)c->H * c->D;
    OWN_ASKED Asked ask = asked_new(p, n);
    emu_count(NULL);
    attn_prefill(p->c, l, ask.want, ask.q, 0, n);
    attn_prefill(p->d, l, ask.dgot, ask.dq, 0, n);
    // Keys of q8_0: the CPU rounds q to 16 bits (D89). bf16 on tensor cores: q and p in 16 bits.
    int q8 = !strcmp(p->c->fk->name, "q8_0");
    double tol = q8 ? 1e-4 : 1e-5;
    CHECK(asked_error(&ask, ask.all, tol) <= 1, "prefill: layer %d, %d queries, H %d G %d D %d", l, n, c->H, c->G, c->D);
    pair_sums(p, l, n, &ask, 40, 1e-5);

    int base = p->c->base;
    pair_step(p, p->c->n_tok - 1, 1);
    if (!strcmp(p->c->fk->name, "bf16")) tol = 1e-4;
    for (int kind = 0; kind < 3; kind++) {
        pair_views(p, l, kind);
        attn_decode(p->c, l, ask.want, ask.q);
        attn_decode(p->d, l, ask.dgot, ask.dq);
        double e = asked_error(&ask, row, tol);
        CHECK(e <= 1, "decode: layer %d, views %d, H %d G %d D %d, %s: %g times the bound", l, kind, c->H, c->G, c->D,
              p->c->fk->name, e);
    }
    CHECK(counted("decode_kernel", 3 * fast), "H %d G %d D %d, %s: launches of decode_kernel", c->H, c->G, c->D,
          p->c->fk->name);
    for (int g = 0; g < c->G; g++) {
        const KVHead *x = kv_head(p->c, l, g);
        KVHead *y = kv_head(p->d, l, g);
        if (x->mass) mass_fetch_cuda(p->d, y);
        double most = q8 ? 1e-4 : 1e-5;
        CHECK(!x->mass || worst(y->mass, x->mass, x->len, most, most, NULL) <= 1, "mass: layer %d, head %d", l, g);
    }
    CHECK(p->c->clk.bytes_attended == p->d->clk.bytes_attended, "bytes attended: %g, expected %g",
          p->d->clk.bytes_attended, p->c->clk.bytes_attended);
    pair_step(p, base, 0);
    EACH_SIDE(s, p) view_all(s);
}

void cuda_tensor_min(int n);
void cuda_exact(Session *s, int on);

// What a prefill on tensor cores may differ by from the CPU's, absolute and relative. q and the
// probabilities are rounded once, to 16 bits: 11 significant ones in f16, 8 in bf16.
static double tensor_bound(const Session *s) {
    return strcmp(s->fk->name, "bf16") || strcmp(s->fv->name, "bf16") ? 2e-3 : 1.6e-2;
}

// Attention of the last n tokens in layer l on both sides, within the bound; the last third of the tokens alone gets the
// same bits, and q and P in f32 come within 1e-5. Of very many rows, which take seconds, the first is enough.
static void pair_prefill(Pair *p, int l, int n) {
    const Config *c = p->m.c;
    int last = (n + 2) / 3, many = kv_longest(p->c, l) > 9000;
    size_t row = (size_t)c->H * c->D, before = (n - last) * row;
    OWN_ASKED Asked ask = asked_new(p, n);
    attn_prefill(p->c, l, ask.want, ask.q, 0, n);
    emu_count(NULL);
    attn_prefill(p->d, l, ask.dgot, ask.dq, 0, n);
    CHECK(!emulated() || (emu_count("prefill_kernel") && emu_count("attend_kernel") == emu_count("columns_kernel")),
          "tensor cores, but for scores whose columns are summed: D %d", c->D);
    double bound = tensor_bound(p->d), e = asked_error(&ask, ask.all, bound), exact = 0;
    CHECK(e <= 1, "%s, H %d G %d D %d, %d tokens, rule %d, layer %d: %g times the bound", p->d->fk->name, c->H, c->G, c->D,
          n, p->d->rule, l, e);
    if (!many) {
        attn_prefill(p->d, l, ask.dgot, ask.dq + before, n - last, last);
        CHECK(!bytes_differ(ask.got + before, ask.dgot, last * row * sizeof(float)), "D %d: the last %d alone", c->D, last);
        cuda_exact(p->d, 1);
        attn_prefill(p->d, l, ask.dgot, ask.dq, 0, n);
        cuda_exact(p->d, 0);
        exact = asked_error(&ask, ask.all, 1e-5);
        CHECK(exact <= 1, "q and P in f32, D %d: %g times the bound", c->D, exact);
    }
    if (getenv("CUDA_VERBOSE"))
        printf("       D %d, %s: %.2g, with q and P in f32 %.2g\n", c->D, p->d->fk->name, e * bound, exact * 1e-5);
}

// Column sums of 1 to 70 queries.
static void pair_columns(Pair *p, int l, int n) {
    OWN_ASKED Asked ask = asked_new(p, n);
    emu_count(NULL);
    pair_sums(p, l, n, &ask, n, 1e-4);
    CHECK(!emulated() || emu_count("window_kernel") == emu_count("_kernel"), "D %d: other kernels", p->m.c->D);
}

// Kind 0: few lines; 1: many; 2: bands of 64 offsets; 3: dense; 4: the nearest 200 offsets too.
static void draw_lines(Lines *a, int kind) {
    bit_set(a->s, 0);
    for (int i = 0; i < a->n; i++)
        if (rnd_int(kind == 1 ? 3 : 25) == 0) bit_set(a->v, i);
    for (int i = 0; i < a->n; i++)
        if (rnd_int(kind == 1 ? 4 : 60) == 0) bit_set(a->s, i);
    for (int i = 64; i < 128 && i < a->n && kind == 2; i++) bit_set(a->s, i);
    for (int i = 0; i < 200 && i < a->n && kind == 4; i++) bit_set(a->s, i);
    a->dense = kind == 3;
}

// Head (l,h)'s part of the rows Q (H,m,N) that were sampled at the queries t (m) of T; r (m) and P (m,n) are its room.
static LineSample sample_of(const Pair *p, int l, int h, int T, const int *t, int m, const float *Q, int *r, float *P) {
    int N = kv_longest(p->c, l), n = kv_head(p->c, l, h / (p->m.c->H / p->m.c->G))->len;
    for (int j = 0; j < m; j++) {
        r[j] = n - T + t[j];
        memcpy(P + (size_t)j * n, Q + ((size_t)h * m + j) * N, n * sizeof *P);
    }
    return (LineSample){ m, n, n - T, r, P };
}

// select_exact from the same probabilities Q, which the device has, too, on both sides.
static void choices_agree(Pair *p, int l, int T, const int *t, int m, const float *dev, const float *Q) {
    int N = kv_longest(p->c, l), r[20];
    OWN double *room = xmalloc((size_t)5 * N * sizeof *room);
    OWN float *P = xmalloc((size_t)m * N * sizeof *P);
    for (int i = T % 3; i < 12; i += 3) {
        LoopRule u = { (double[]){ .3, .6, .9, .999 }[i / 3], i % 4, 1 + i % 5 * 7, i % 2, i % 4 ? .9 : .3 };
        Lines *a = lines_new(p->c, l, T), *b = lines_new(p->c, l, T);
        LoopFound f, g[16];
        choose_lines_cuda(p->d, l, 0, p->m.c->G, &u, dev, T, m, b, g);
        for (int h = 0; h < p->m.c->H; h++) {
            LineSample x = sample_of(p, l, h, T, t, m, Q, r, P);
            size_t bytes = bit_bytes(x.n);
            a[h].dense = select_exact(&x, &u, &a[h], room, &f);
            CHECK(a[h].dense == b[h].dense && f.mass == g[h].mass && f.cells == g[h].cells,
                  "rule %d, head %d: dense %d %d, mass %.17g %.17g, share %.17g %.17g", i, h, a[h].dense, b[h].dense, f.mass,
                  g[h].mass, f.cells, g[h].cells);
            CHECK(!memcmp(a[h].v, b[h].v, bytes) && !memcmp(a[h].s, b[h].s, bytes), "rule %d, head %d: other lines", i, h);
        }
    }
}

// The sampled softmax rows, and what is made of them.
static void pair_samples(Pair *p, int l, int T, const float *q, const float *dq) {
    const Config *c = p->m.c;
    int N = kv_longest(p->c, l), m = min_int(T, 20), t[20], r[20];
    size_t each = (size_t)m * N;
    for (int i = 0; i < m; i++) t[i] = (int)((long)(i + 1) * T / m) - 1;
    const float *dev = line_probs_cuda(p->d, l, 0, c->G, dq, t, m);
    OWN float *P = xmalloc(each * sizeof *P), *own = xmalloc(each * sizeof *own), *Q = xmalloc(c->H * each * sizeof *Q);
    OWN float *sum = xmalloc((size_t)c->H * N * sizeof *sum);
    cuda_get(Q, dev, c->H * each * sizeof *Q);
    for (int k = 0; k < c->H * 2; k++) {
        int h = k / 2, slash = k % 2;
        LineSample x = sample_of(p, l, h, T, t, m, Q, r, P);
        line_probs(p->c, l, h, q, t, m, own, tiles_new(p->c));
        CHECK(worst(P, own, (size_t)m * x.n, 1e-6, 1e-5, NULL) <= 1, "probabilities of head %d", h);
        cuda_get(sum, line_sums_cuda(p->d, l, 0, c->G, dev, T, m, slash, 3), (size_t)c->H * N * sizeof *sum);
        for (int line = 0; line < x.n; line++) {
            float want = 0;
            for (int i = 0; i < m; i++) {
                int at = slash ? r[i] - line : line;
                if (at >= 0 && at <= r[i]) want += P[(size_t)i * x.n + at];
            }
            CHECK(sum[(size_t)h * N + line] == (line < 3 ? INFINITY : want), "sum %d of head %d, slash %d", line, h, slash);
        }
    }
    choices_agree(p, l, T, t, m, dev, Q);
    // Many equal gains.
    for (size_t i = 0; i < c->H * each; i++) Q[i] = rintf(Q[i] * 64) / 64;
    OWN_DEVICE float *even = put_floats(Q, c->H * each);
    choices_agree(p, l, T, t, m, even, Q);
}

// Attention of the last T tokens over lines of all kinds in layer l. Without tensor cores their samples, too.
static void pair_lines(Pair *p, int l, int T, int tensor) {
    const Config *c = p->m.c;
    double bound = tensor ? tensor_bound(p->d) : 1e-5;
    OWN_ASKED Asked ask = asked_new(p, T);
    size_t mark = scratch_mark(p->c);
    Lines *lines = lines_new(p->c, l, T);
    for (int h = 0; h < c->H; h++) draw_lines(&lines[h], h % (tensor ? 5 : 4));
    emu_count(NULL);
    lines_attend(p->c, l, lines, ask.want, ask.q, T);
    lines_attend(p->d, l, lines, ask.dgot, ask.dq, T);
    CHECK(!tensor || counted("attend_kernel", 0), "lines on tensor cores");
    double e = asked_error(&ask, ask.all, bound);
    CHECK(e <= 1, "lines: layer %d, %d queries, H %d G %d D %d: %g times the bound", l, T, c->H, c->G, c->D, e);
    if (!tensor) pair_samples(p, l, T, ask.q, ask.dq);
    scratch_reset(p->c, mark);
}

#define PATS_ALL "pats-bmin=0 pats-window=9 sink=3 "

// Some 16 rows are a tile of a warp and 64 positions an item of a step, so lengths around these are tried.
static const Shape attention_shapes[] = {
    { STEPS, 6, 3, 40, 100, 0, 37, "f32", "f32" },       { STEPS, 3, 3, 48, 100, 0, 1, "bf16", "bf16" },
    { STEPS, 12, 1, 64, 100, 0, 5, "q8_0", "f16" },      { STEPS, 15, 3, 128, 100, 0, 3, "bf16", "f16" },
    { STEPS, 10, 2, 72, 100, 0, 2, "f32", "f32" },       { STEPS, 3, 3, 42, 100, 0, 2, "f16", "f16" },
    { STEPS, 2, 1, 256, 100, 0, 40, "bf16", "bf16" },    { STEPS, 9, 1, 160, 100, 0, 2, "f32", "f32" },
    // decode_kernel: 1 to 17 query heads a KV head.
    { STEPS, 4, 1, 64, 15, 30, 1, "f16", "f16" },        { STEPS, 16, 1, 64, 100, 30, 3, "bf16", "bf16" },
    { STEPS, 10, 2, 64, 143, 30, 2, "bf16", "bf16" },    { STEPS, 3, 3, 64, 15, 30, 17, "f16", "f16", NULL, 1 },
    { STEPS, 9, 1, 64, 100, 30, 2, "f16", "f16" },       { STEPS, 4, 2, 64, 143, 30, 6, "bf16", "bf16", NULL, 1 },
    { STEPS, 8, 2, 128, 15, 30, 2, "bf16", "bf16" },     { STEPS, 17, 1, 128, 100, 30, 1, "f16", "f16" },
    { STEPS, 8, 1, 128, 143, 30, 18, "f16", "f16", NULL, 1 }, { STEPS, 16, 1, 128, 15, 30, 1, "bf16", "bf16" },
    { STEPS, 5, 1, 128, 100, 30, 2, "f16", "f16" },      { STEPS, 2, 1, 128, 143, 30, 1, "f16", "f16", NULL, 1 },
    { STEPS, 12, 1, 128, 15, 30, 2, "bf16", "bf16" },
    { STEPS, 4, 1, 64, 11, 5, 1, "q8_0", "q8_0" },       { STEPS, 6, 2, 64, 59, 5, 6, "q8_0", "q8_0", NULL, 1 },
    { STEPS, 16, 1, 64, 80, 5, 1, "q8_0", "q8_0" },      { STEPS, 2, 2, 128, 12, 5, 2, "q8_0", "q8_0" },
    { STEPS, 8, 1, 128, 100, 5, 2, "q8_0", "q8_0" },     { STEPS, 7, 1, 128, 43, 5, 5, "q8_0", "q8_0", NULL, 1 },
    { STEPS, 4, 2, 128, 143, 5, 1, "q8_0", "q8_0" },     { STEPS, 17, 1, 128, 59, 5, 1, "q8_0", "q8_0" },
    { STEPS, 3, 1, 64, 26, 5, 6, "q8_0", "q8_0", NULL, 1 }, { STEPS, 1, 1, 128, 90, 5, 1, "q8_0", "q8_0" },
    { STEPS, 4, 1, 64, 59, 5, 6, "q4", "q4", NULL, 1 },  { STEPS, 16, 1, 64, 80, 5, 1, "q4", "q4" },
    { STEPS, 8, 1, 128, 100, 5, 2, "q4", "q4" },         { STEPS, 15, 1, 128, 43, 5, 5, "q4", "q4", NULL, 1 },
    // Regions that change amid a tile, raw rows behind them, every width at both head_dims.
    { STEPS, 4, 1, 64, 70, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=10" },
    { STEPS, 6, 3, 64, 41, 5, 6, "f16", "f16", PATS_ALL "pats-bmax=7", 1 },
    { STEPS, 7, 1, 64, 83, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=10" },
    { STEPS, 3, 1, 64, 66, 5, 5, "f16", "f16", PATS_ALL "pats-bmax=9 pats-schedule=old", 1 },
    { STEPS, 16, 1, 64, 75, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=10" },
    { STEPS, 8, 1, 128, 150, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=10" },
    { STEPS, 2, 1, 128, 90, 5, 6, "f16", "f16", PATS_ALL "pats-bmax=8", 1 },
    { STEPS, 17, 1, 128, 64, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=10 pats-schedule=old" },
    { STEPS, 16, 1, 128, 77, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=9" },
    { STEPS, 4, 2, 128, 71, 5, 1, "f16", "f16", PATS_ALL "pats-bmax=10" },
    { PASS, 16, 1, 64, 1, 0, 37, "f16", "f16" },         { PASS, 3, 3, 80, 100, 0, 130, "bf16", "bf16" },
    { PASS, 5, 1, 96, 240, 0, 65, "f16", "f16", NULL, VIS_SEGMENT },
    { PASS, 8, 2, 128, 1, 0, 40, "f16", "f16", NULL, VIS_SEGMENT_EXACT },
    { PASS, 6, 3, 128, 100, 0, 97, "bf16", "bf16", NULL, VIS_SEGMENT },
    { PASS, 7, 1, 256, 1, 0, 33, "bf16", "bf16", NULL, VIS_SEGMENT_EXACT },
    { PASS, 6, 3, 40, 100, 0, 150, "f16", "f16", NULL, VIS_SEGMENT },
    { PASS, 2, 1, 160, 240, 0, 70, "f16", "f16" },       { PASS, 12, 1, 72, 240, 0, 20, "bf16", "bf16" },
    { PASS, 2, 2, 128, 1, 0, 129, "f16", "f16" },        { PASS, 3, 3, 16, 70, 0, 97, "bf16", "bf16" },
    { PASS, 6, 3, 64, 100, 0, 70, "f16", "f16", "pats-window=9 sink=3" },
    { PASS, 6, 3, 48, 100, 0, 70, "q8_0", "q8_0" },      { PASS, 6, 3, 128, 100, 0, 70, "bf16", "f16" },
    { PASS, 6, 3, 72, 100, 0, 70, "f16", "q8_0" },
    { PASS, 3, 1, 64, 70, 0, 256, "bf16", "f16" },       { PASS, 2, 1, 128, 70, 0, 259, "f16", "bf16" },
    { PASS, 1, 1, 8, 33000, 0, 3, "f16", "f16" },        // a list has 512 tiles of 64 rows
    { SUMS, 4, 2, 64, 900, 0, 70, "f16", "f16" },        { SUMS, 3, 1, 128, 300, 0, 70, "bf16", "bf16" },
    { SUMS, 2, 2, 128, 600, 0, 70, "f16", "f16", NULL, 1 }, { SUMS, 1, 1, 64, 30, 0, 70, "bf16", "bf16", NULL, 1 },
    { SUMS, 2, 1, 64, 140, 0, 70, "bf16", "bf16" },      { SUMS, 2, 2, 128, 150, 0, 70, "f16", "f16", NULL, 1 },
    { SUMS, 1, 1, 128, 100, 0, 70, "f16", "f16" },       { SUMS, 3, 1, 64, 90, 0, 70, "bf16", "bf16", NULL, 1 },
    { SUMS, 16, 1, 64, 100, 70, 40, "f16", "f16" },      { SUMS, 9, 1, 128, 64, 0, 17, "bf16", "bf16", NULL, 1 },
    { SUMS, 14, 2, 128, 150, 60, 16, "f16", "q8_0" },    { SUMS, 10, 2, 64, 127, 0, 33, "bf16", "f32" },
    { SUMS, 1, 1, 64, 33000, 900, 19, "f16", "f16" },    // two tiles of 64 rows are a stretch
    { LINES, 6, 3, 40, 1, 0, 68, "f32", "f32" },         { LINES, 3, 3, 48, 90, 0, 70, "bf16", "q8_0" },
    { LINES, 8, 1, 128, 90, 0, 33, "f32", "f32" },
    { LINES, 6, 3, 64, 60, 0, 40, "f16", "f16", "pats-window=9" },
    { LINES_TENSOR, 10, 2, 40, 90, 0, 131, "f16", "f16" }, { LINES_TENSOR, 6, 3, 64, 200, 0, 70, "bf16", "bf16" },
    { LINES_TENSOR, 8, 2, 128, 300, 0, 65, "f16", "f16" }, { LINES_TENSOR, 5, 1, 160, 33, 0, 100, "bf16", "bf16" },
    { LINES_TENSOR, 5, 5, 96, 1, 0, 150, "q8_0", "q8_0" }, { LINES_TENSOR, 5, 1, 256, 150, 0, 64, "f16", "f16" },
    { LINES_TENSOR, 2, 1, 16, 6800, 0, 64, "f16", "f16" }, // more columns than a list has
};

// Every shape of which this is asked, in both layers.
static void shapes_agree(int ask) {
    int all = sizeof attention_shapes / sizeof *attention_shapes;
    EACH_VARIANT(i, all) {
        const Shape *x = &attention_shapes[i];
        if (min_int(x->ask, LINES) != ask) continue;
        int fast = (x->D == 64 || x->D == 128) && !strcmp(x->k, x->v) && strcmp(x->k, "f32");
        cuda_tensor_min((ask == PASS && x->n < 256) || x->ask == LINES_TENSOR);
        Pair p = pair_shaped(x, 5 + i);
        for (int l = 0; l < p.m.c->L; l++) {
            if (ask == STEPS) pair_attention(&p, l, x->n, fast);
            if (ask == PASS) pair_prefill(&p, l, x->n);
            if (ask == SUMS) pair_columns(&p, l, x->n);
            if (ask == LINES) pair_lines(&p, l, x->n, x->ask == LINES_TENSOR);
        }
        pair_close(&p);
        tiny_free(p.m);
    }
    cuda_tensor_min(0);
}

TEST(cuda_attention, "attention of a step and of few queries, and window scores, agree with the CPU: every row format and "
                     "width of PATS, head_dim 40 to 256, 1 to 17 query heads a KV head, unequal heads, lists, tails, "
                     "windows, SONIC's rule, lengths around a tile") {
    shapes_agree(STEPS);
}

TEST(cuda_tensor, "a prefill on tensor cores agrees with the CPU, and so it does with q and P in f32; a part alone gets the "
                  "same bits: head_dim 8 to 256, 1 to 16 query heads a KV head, windows, SONIC's rules, unequal heads, "
                  "packed, q8_0 and mixed rows, more tiles than a list") {
    shapes_agree(PASS);
}

TEST(cuda_columns, "column sums agree with the CPU: head_dim 64 and 128, f16 and bf16, 1 to 70 queries, "
                   "unequal heads, several tiles, a window, SONIC's rule") {
    shapes_agree(SUMS);
}

TEST(cuda_lines, "attention over lines agrees with the CPU, on tensor cores and without: dense heads beside them "
                 "alone and as whole groups, bands that fill tiles, unequal heads, packed rows, a sliding window, head_dim "
                 "16 to 256, more columns than a list; sampled softmax rows, their line sums and what is chosen too") {
    shapes_agree(LINES);
}

TEST(cuda_rows, "rows on the device are the CPU's to the bit in every format, packed ones and their tables too: append, keep, "
                "compact, truncate, re-rotate, pack again, load; attention reads packed rows; memory is given back") {
    static const struct {
        int D;
        const char *method, *text;
        double k_std;
    } run[] = {
        { 40, "full", "ctk=f32 ctv=f16", 1 },
        { 48, "full", "ctk=f16 ctv=bf16", 30000 },      // some saturate; so do the scales of q4
        { 64, "full", "ctk=bf16 ctv=q8_0", 1 },
        { 72, "full", "ctk=q8_0 ctv=q4", 1 },
        { 56, "full", "ctk=q4 ctv=f32", 1e9 },
        { 40, "pats", "ctk=f16 ctv=f16 pats-window=9 sink=3", 1 },
        { 64, "pats", "ctk=f16 ctv=f16 pats-window=9 sink=3 pats-bmax=10 pats-format=rows64", 1 },
        { 48, "pats", "ctk=f16 ctv=f16 pats-window=5 pats-schedule=new pats-tend=120", 1 },
        { 128, "pats", "ctk=f16 ctv=f16 pats-window=0 sink=0 pats-schedule=old pats-tend=150 pats-format=rows64", 1 },
        { 8, "pats", "ctk=f16 ctv=f16 pats-window=7 pats-tend=150 pats-bmax=10", 1 },
    };
    EACH_VARIANT(once, 1) for (int i = 0; i < 10; i++) {
        const char *text = run[i].text;
        int D = run[i].D;
        OWN_MODEL Tiny m = tiny_model(2, 6, 3, D, 16, 16, 11, 3);
        OWN_PAIR Pair p = pair_open(m, run[i].method, text);
        rows_agree(&p, run[i].k_std, text);
        if (text[4] == 'q') {                   // a block with an infinity has a NaN for its scale
            float a[72];
            pair_append(&p, 1, INFINITY);
            kv_load_k(p.c, kv_head(p.c, 0, 1), NULL, kv_head(p.c, 0, 1)->len - 1, 1, a);
            CHECK(!pair_rows_differ(&p) && isnan(a[0]) && isnan(a[D - 1]), "%s: an infinity in a row", text);
        }
        if (!p.c->packing) continue;
        pair_pass(&p, 40, 1);
        CHECK(kv_head(p.d, 0, 1)->packed > 30, "%s: %d packed rows", text, kv_head(p.d, 0, 1)->packed);
        pair_pass(&p, 13, 1);
        for (int l = 0; l < 2; l++) pair_attention(&p, l, 13, 0);
        size_t held = cuda_held(p.d), told = kv_bytes(p.d);
        CHECK(held >= told && held < told + 6 * 2 * 4096, "%s: %zu bytes held, %zu told: packed rows come in steps of 4096",
              text, held, told);
    }
}

// Values may be of any size, and their scales are folded into probabilities that f16 has to hold: the
// scales of a tile are therefore taken relative to the largest one seen so far.
TEST(cuda_attention_q8_scales, "decode over q8_0 rows with values from 1e-4 to 1e6, growing, falling "
                               "and mixed, agrees with the CPU within the size of each block") {
    enum { D = 128, N = 150, BLOCKS = D / 32 };
    EACH_VARIANT(kind, 3) {
        OWN_MODEL Tiny m = tiny_model(1, 4, 1, D, 16, 16, 11, 3);
        OWN_PAIR Pair p = pair_open(m, "full", "ctk=q8_0 ctv=q8_0");
        float v[D], size[BLOCKS] = { 0 };
        char all[N][BLOCKS * 34];  // an upload may read it late
        pair_append(&p, N, 1);
        for (int r = 0; r < N; r++) {
            for (int d = 0; d < D; d++) {
                float step = kind == 2 ? (float)((r * 7 + d / 32 * 3) % 11) / 10 : (float)r / N;
                v[d] = rnd_normal() * powf(10, kind == 1 ? 6 - 10 * step : 10 * step - 4);
                size[d / 32] = fmaxf(size[d / 32], fabsf(v[d]));
            }
            p.c->fv->pack(all[r], v, D);
            memcpy(kv_head(p.c, 0, 0)->v + r * sizeof all[r], all[r], sizeof all[r]);
            rows_store_cuda(kv_head(p.d, 0, 0)->v + r * sizeof all[r], all[r], sizeof all[r]);
        }
        OWN_ASKED Asked ask = asked_new(&p, 1);
        pair_step(&p, N - 1, 1);
        attn_decode(p.c, 0, ask.want, ask.q);
        attn_decode(p.d, 0, ask.dgot, ask.dq);
        cuda_get(ask.got, ask.dgot, ask.all * sizeof(float));
        for (int i = 0; i < 4 * BLOCKS; i++) {
            double e = worst(ask.got + i * 32, ask.want + i * 32, 32, 2e-6 * size[i % BLOCKS], 1e-5, NULL);
            CHECK(e <= 1, "kind %d, head %d, block %d: %g times the bound", kind, i / BLOCKS, i % BLOCKS, e);
        }
    }
}

void cuda_best(Session *s, const float *row, int V, int k, BestLogits *out);

// n numbers over which a choice may stumble, to be freed; kind: random, many ties, all equal but for their signs, infinities
// among them, ascending.
enum { PLAIN, TIES, ZEROS, INFINITIES, ASCENDING, VALUE_KINDS };
static float *values_of(int n, int kind) {
    float *x = normals(n, 3);
    for (int i = 0; i < n; i++) {
        if (kind == TIES) x[i] = (float)(i % 7 == 3) - (float)(i % 3 == 0);
        if (kind == ZEROS) x[i] = i % 3 ? -0.0f : 0;
        if (kind == INFINITIES && i % 5 == 0) x[i] = i % 2 ? INFINITY : -INFINITY;
        if (kind == ASCENDING) x[i] = (float)i - 20000;
    }
    return x;
}

// The device's k best of x (V) are top_k's, and it sees the largest bits without a sign.
static void best_agrees(Session *s, const float *x, int V, int k, int kind) {
    static BestLogits b;
    OWN int *idx = xmalloc((size_t)V * sizeof *idx);
    int n = top_k(x, V, k, idx), worst = 0, bad = 0;
    for (int i = 0; i < V; i++) {
        FloatBits u = { x[i] };
        worst = max_int(worst, (int)(u.u & 0x7fffffff));
    }
    cuda_best(s, x, V, k, &b);
    for (int i = 0; i < n && b.n == n; i++) bad += b.best[i].id != idx[i] || memcmp(&b.best[i].x, &x[idx[i]], 4);
    CHECK(b.n == n && b.worst == worst && !bad, "values %d: the best %d of %d: %d, %d others, %08x; on the CPU %d, %08x", kind,
          k, V, b.n, bad, b.worst, n, worst);
}

TEST(cuda_select, "top-k on the device is the CPU's to the bit, of rows - empty and short ones, k 0 to past n - and of the "
                  "logits: one block and many, ties between blocks, zeros of both signs, infinities; NaN is seen") {
    enum { S = 6, N = 1300 };
    static const int sizes[] = { 1, 53, 4096, 4097, 9001, 33000 }, wanted[] = { 1, 2, 40, 128 };
    static const int n[S] = { 1300, 1, 0, 513, 31, 700 }, k[S] = { 64, 3, 5, 513, 0, 699 };
    OWN_MODEL Tiny m = tiny_model(1, 6, 3, 16, 16, 16, 53, 2);
    OWN_SESSION Session *s = cuda_session(m, "full", "");
    EACH_VARIANT(once, 1) for (int kind = 0; kind < VALUE_KINDS; kind++) {
        int want[N], got[S], per = 700;
        OWN float *x = values_of(S * N, kind);
        OWN int *idx = xmalloc(S * per * sizeof *idx);
        OWN_DEVICE float *dx = put_floats(x, S * N);
        top_k_rows(s, dx, S, N, n, k, idx, per, got);
        for (int i = 0; i < S; i++) {
            int w = top_k(x + i * N, n[i], k[i], want);
            CHECK(got[i] == w && !memcmp(want, idx + i * per, w * sizeof(int)),
                  "values %d, row %d: %d, expected %d", kind, i, got[i], w);
        }
    }
    for (int i = 0; i < 6 * 4 * (VALUE_KINDS + 1); i++) {
        int V = sizes[i / 4 % 6], best = min_int(wanted[i % 4], V), kind = i / 24;
        OWN float *y = values_of(V, kind);              // the last kind: one is NaN
        order_set(i / 4 + i);
        if (kind == VALUE_KINDS) y[V / 3] = -NAN;
        if (kind < VALUE_KINDS) best_agrees(s, y, V, best, kind);
        BestLogits b = { 0 };
        if (kind == VALUE_KINDS) cuda_best(s, y, V, best, &b);
        CHECK(kind < VALUE_KINDS || b.worst > 0x7f800000, "%08x", b.worst);
    }
}

// ---- whole dialogues: the same script on both sides, compared after every pass

// The closest choice since it was last made INFINITY: the least gap of any call of top_k between
// the smallest value it took and the largest it left, by the larger of the two. A device that
// rounds otherwise may choose otherwise where the gap is of the size of a rounding error; where it
// is larger it is wrong.
static double closest = INFINITY;

// Keeps the smallest relative gap between a taken and a left score: how near two sides were to
// choosing differently.
static void note_gap(const float *x, int n, const int *idx, int k) {
    double taken = INFINITY, left = -INFINITY;
    for (int i = 0, j = 0; i < n; i++) {
        int chosen = j < k && idx[j] == i;
        j += chosen;
        if (chosen)
            taken = fmin(taken, (double)x[i]);
        else
            left = fmax(left, (double)x[i]);
    }
    if (isfinite(taken) && isfinite(left))
        closest = fmin(closest, (taken - left) / fmax(1e-30, fmax(fabs(taken), fabs(left))));
}

// How far the logits of the two sides may be apart: absolute and relative.
static double logit_bound = 1e-3;

// How many heads have another view, other rows or other tables.
static int views_differ(const Session *a, Session *b) {
    int bad = 0;
    views_fetch_cuda(b);
    for (int l = 0; l < a->c->L; l++)
        for (int h = 0; h < a->c->H; h++) bad += !same_view(*kv_view(a, l, h), *kv_view(b, l, h));
    for (int i = 0; i < a->c->L * a->c->G; i++) bad += held_differs(&a->head[i], &b->head[i]);
    return bad;
}

// The same script on both sides: a on the CPU, b on the device. text names their options. The device's logits go to out
// (script_rows,V), NULL: nowhere. Returns how many rows of logits were compared.
static int sides_agree(Session *a, Session *b, const char *method, const char *text, const Script *p, float *out) {
    const Config *c = a->c;
    int V = c->V;
    EACH_PASS(now, p, V) {
        closest = INFINITY;
        const float *x = run_pass(a, &now);
        double gap = closest;
        const float *y = run_pass(b, &now);
        if (gap < 1e-6 && views_differ(a, b)) {
            printf("       %s %s: turn %d, pass %d: both choices are as good as equal, by %.1e of a score; from "
                   "here on the sides are not compared\n", method, text, now.turn, now.step, gap);
            return now.row;
        }
        if (out) memcpy(out + (size_t)now.row * V, y, V * sizeof *y);
        double e = worst(y, x, V, logit_bound, logit_bound, NULL);
        CHECK(e <= 1, "%s %s: turn %d, pass %d: logits %g times the bound", method, text, now.turn, now.step, e);
        CHECK(!views_differ(a, b), "%s %s: turn %d, pass %d: other rows; the CPU's closest choice was by %.1e of a score",
              method, text, now.turn, now.step, gap);
    }
    for (int i = 0; a->wants & KV_MASS && i < c->L * c->G; i++) {
        mass_fetch_cuda(b, &b->head[i]);
        // A key that rounds to the next bf16 number moves by 2^-8.
        double tol = strstr(text, "ctk=bf16") ? 1e-3 : 1e-4;
        CHECK(worst(b->head[i].mass, a->head[i].mass, a->head[i].len, tol, tol, NULL) <= 1,
              "%s %s: mass of head %d", method, text, i);
    }
    // A session of `out` has been used before, and its methods' rooms are as large as they were then.
    CHECK(out || (kv_bytes(a) == kv_bytes(b) && kv_meta_bytes(a) - near_bytes(a) == kv_meta_bytes(b) && !near_bytes(b)),
          "%s: bytes", method);
    // The bytes of a packed row are a mean, so the two sums may be rounded differently.
    CHECK(fabs(a->clk.bytes_attended - b->clk.bytes_attended) < 1 && a->clk.peak == b->clk.peak,
          "%s: %.0f bytes attended, %zu at the peak; on the CPU %.0f and %zu", method, b->clk.bytes_attended,
          b->clk.peak, a->clk.bytes_attended, a->clk.peak);
    return script_rows(p);
}

// One order of threads a variant, another one each time. Behind the dialogue the newest tokens are taken back.
static void device_agrees(Tiny m, const char *spec, const char *more) {
    static const Script p = { 3, { 64, 1, 18 }, { 3, 1, 3 }, 4 };
    static int turn;
    order_set(turn++);
    OWN_SESSION Session *a = table_open(m, spec, 1, more), *b = table_open(m, spec, 1, formatted("%s device=cuda", more));
    CHECK(!a == !b, "%s %s: one side refuses: %s", spec, more, table_err);
    if (!a || !b || sides_agree(a, b, spec, more, &p, NULL) < script_rows(&p)) return;
    if (a->rule != VIS_CAUSAL) return;      // messages that SONIC has finished are not taken back
    for (Session *s = a; s; s = s == a ? b : NULL) kv_truncate(s, s->n_tok - 2);
    const float *x = decode(a, 7), *y = decode(b, 7);
    CHECK(worst(y, x, m.c->V, logit_bound, logit_bound, NULL) <= 1 && !views_differ(a, b), "%s %s: behind a rollback", spec,
          more);
}

TEST(cuda_table, "every method under every flag and choice of its own, and with packed rows: the device holds and reads "
                 "the CPU's rows, in as many bytes, and its logits are the CPU's within the bound") {
    int few = emu_is_hard();
    for (int windows = 0; windows < (few ? 1 : 2); windows++) {
        OWN_MODEL Tiny m = table_model(2, 4, 2, windows ? 2 : 0);
        EACH_METHOD(p) {
            char spec[96];
            snprintf(spec, sizeof spec, "%s+pats", (*p)->name);
            if (windows || few) device_agrees(m, (*p)->name, "");
            else each_variant(*p, m, device_agrees);
            if (!windows && !few && !((*p)->role & ROLE_STORE)) device_agrees(m, spec, "");
        }
    }
}

#define LYCHEE_SMALL "lychee-buffer=8 full-layers=0 sink=4 "
#define LOOP_SHORT "loopserve-min-context=0 loopserve-samples=6 loopserve-local=4 loopserve-alpha=.8 "

// A tiny model of L layers that has these.
static Tiny tiny_having(int L, int H, int G, int D, int C, int has) {
    Tiny m = tiny_model(L, H, G, D, C, 40, 53, 31);
    tiny_give(m, has);
    return m;
}

// Full attention gives the same bits in every order of threads and blocks; q, k and v of a step are one launch a layer.
static void orders_agree(Tiny m, const char *text, const Script *p) {
    size_t all = (size_t)script_rows(p) * m.c->V;
    int steps = script_rows(p) - p->turns;
    OWN float *first = NULL;
    for (int order = 0; emulated() && !emu_is_hard() && order < 3; order++) {
        order_set(order);
        emu_count(NULL);
        OWN_SESSION Session *s = cuda_session(m, "full", text);
        float *x = run_session(s, p);
        CHECK(emu_count("qkv_kernel") == steps * m.c->L, "%s, D %d: %ld launches", text, m.c->D, emu_count("qkv_kernel"));
        CHECK(!first || !memcmp(first, x, all * sizeof *x), "%s, D %d: another order, other bits", text, m.c->D);
        free(first);
        first = x;
    }
}

TEST(cuda_dialogues, "dialogues in models, shapes and formats that the table does not have agree with the CPU: tensor cores, "
                     "heads wider than a tile's sums, lists of 5 to 64 query heads, more works than a warp has lanes, "
                     "weights of Nexus rows' own; head_dim 2 to 256, qk-norm, biases, f16 and bf16 weights, tied ones, mixed "
                     "dtypes; full attention in every order of blocks the same bits") {
    static const struct {
        int L, H, G, D, first;
        const char *method, *text;
        double bound;
        int has, C;
    } run[] = {
        { 2, 6, 3, 40, 60, "adakv", "budget=20 obs-window=4 ctk=f16 ctv=f16", 1e-3 },
        { 2, 6, 3, 40, 60, "snapkv", "budget=20 obs-window=4 ctk=bf16", 1e-3 },
        { 2, 6, 3, 40, 60, "full", "ctk=q8_0 ctv=q8_0", 1e-3 },
        { 2, 6, 3, 40, 60, "pats", "batch-size=7 pats-window=8 ctk=f16 ctv=f16", 1e-3 },
        { 1, 34, 34, 8, 70, "full", "", 1e-3 },
        { 2, 4, 2, 64, 60, "full", "ctk=f16 ctv=f16", 1e-3 },
        { 2, 4, 2, 64, 60, "h2o", "budget=20 ctk=bf16 ctv=bf16", 1e-3 },
        { 2, 4, 2, 64, 60, "quest", "budget=48 full-layers=0 ctk=f16 ctv=f16", 1e-3 },
        { 2, 4, 2, 64, 60, "lychee", LYCHEE_SMALL "budget=40 ctk=f16 ctv=f16", 1e-3 },
        { 2, 6, 3, 16, 60, "quest", "ratio=.3 full-layers=1 ctk=f16 ctv=f16", 1e-3 },
        { 2, 10, 2, 16, 60, "quest", "budget=48 full-layers=0 ctk=bf16 ctv=bf16", 1e-3 },
        { 2, 9, 1, 16, 60, "quest", "budget=48 full-layers=0 ctk=bf16 ctv=bf16", 1e-3 },
        { 2, 12, 1, 16, 60, "quest", "budget=48 full-layers=0 ctk=q8_0 ctv=q8_0", 1e-3 },
        // The selections ask for more shared memory than a kernel has unasked.
        { 1, 64, 1, 256, 34, "quest", "budget=32 full-layers=0 ctk=f16 ctv=f16", 1e-3 },
        { 1, 64, 1, 256, 34, "lychee", LYCHEE_SMALL "budget=24 lychee-kg=3", 1e-3 },
        { 2, 2, 1, 256, 40, "full", "ctk=f16 ctv=f16", 1e-3 },
        { 2, 3, 3, 160, 40, "snapkv", "budget=20 obs-window=4", 1e-3 },
        { 2, 2, 1, 256, 50, "quest", "budget=48 full-layers=0", 1e-3 },
        { 2, 3, 3, 160, 60, "lychee", LYCHEE_SMALL "budget=40", 1e-3 },
        { 2, 2, 1, 256, 40, "loopserve", LOOP_SHORT "loopserve-max-cells=.95 loopserve-first=2 budget=24", 1e-3 },
        { 2, 3, 3, 160, 40, "expected-attention", "budget=20 sink=2", 1e-3 },
        { 2, 2, 1, 256, 40, "streaming", "budget=20 streaming-rerotate", 1e-3 },
        // A value that rounds to its neighbour moves by a step of its width.
        { 2, 3, 3, 160, 40, "pats", "ctk=f16 ctv=f16 pats-window=8 sink=3", 2e-3 },
        // A pass through tensor cores: bf16 rows, q and probabilities rounded to bf16.
        { 2, 2, 1, 256, 280, "full", "ctk=bf16 ctv=bf16", 2.5e-2 },
        { 2, 6, 3, 16, 53, "sonic", "sonic-weights=none sonic-k=2 quiet", 1e-3 },
        { 2, 6, 3, 16, 53, "sonic", "sonic-weights=none sonic-k=2 paper quiet", 1e-3 },
        { 2, 6, 3, 40, 37, "full", "exact", 1e-3, NORMS | BIASES | WINDOW },
        { 2, 6, 3, 40, 37, "snapkv", "exact budget=20 obs-window=4 ctk=f16 ctv=bf16", 1e-3, NORMS | BIASES | WINDOW },
        { 2, 6, 3, 40, 37, "full", "exact ctk=q8_0 ctv=q8_0", 1e-3, NORMS | BIASES | WINDOW },
        { 2, 6, 3, 40, 37, "full", "exact ctk=f16", 1e-3, NORMS | BIASES | WINDOW | TIED | HALVES },
        { 2, 6, 3, 40, 37, "snapkv", "exact budget=20 obs-window=4", 1e-3, NORMS | BIASES | WINDOW | TIED | HALVES },
        { 2, 6, 3, 40, 37, "full", "exact", 1e-3, NORMS | BIASES | WINDOW | MIXED },
        // One product of 16-bit numbers a matrix; a row's scale brings back activations far beyond f16's largest number.
        { 2, 6, 3, 40, 37, "full", "", 2e-3, NORMS | BIASES | WINDOW | TIED | HALVES },
        { 2, 6, 3, 40, 37, "full", "", 2e-3, NORMS | BIASES | WINDOW | MIXED },
        { 2, 6, 3, 40, 37, "full", "", 3e-3, MIXED | BEYOND },
        { 2, 6, 3, 40, 37, "full", "exact", 1e-3, MIXED | BEYOND },
        { 2, 2, 2, 128, 40, "full", "ctk=f16 ctv=f16", 1e-3, NORMS, 520 },
        { 2, 4, 2, 6, 40, "full", "", 1e-3, NORMS, 20 },
        { 2, 3, 3, 64, 40, "full", "ctk=f16 ctv=f16", 1e-3, BIASES | TIED },
        { 2, 2, 1, 80, 40, "full", "ctk=q8_0 ctv=q8_0", 1e-3, NORMS | BIASES, 40 },
        { 2, 2, 1, 256, 40, "full", "ctk=bf16 ctv=bf16", 1e-3, BIASES | TIED },
        { 2, 4, 1, 96, 40, "full", "ctk=bf16 ctv=q8_0", 1e-3, NORMS | TIED },
        { 2, 12, 4, 2, 40, "full", "ctk=f16 ctv=f16", 1e-3, NORMS, 16 },
    };
    EACH_VARIANT(i, (int)(sizeof run / sizeof *run)) {
        int H = run[i].H, G = run[i].G, D = run[i].D, C = run[i].C ? run[i].C : 24, nexus = !strcmp(run[i].method, "sonic");
        OWN_MODEL Tiny m = tiny_having(run[i].L, H, G, D, C, run[i].has);
        OWN_MODEL Tiny n = tiny_model(run[i].L, H, G, D, C, 40, 53, 77);
        Script p = { nexus ? 3 : 2, { run[i].first, 9, 1 }, { 4, 3, 2 }, 4 };
        logit_bound = run[i].bound;
        OWN_PAIR Pair both = pair_open(m, run[i].method, run[i].text);
        if (nexus) both.c->alt = both.d->alt = n.w->layer;
        sides_agree(both.c, both.d, run[i].method, run[i].text, &p, NULL);
        if (!strcmp(run[i].method, "full") && run[i].first == 40) orders_agree(m, run[i].text, &p);
    }
    logit_bound = 1e-3;
}

// A on the CPU.
static int nodes_differ(const Nodes *a, const Nodes *b, int children, int D) {
    size_t n = a->n;
    return a->n != b->n || bytes_differ(a->mu, b->mu, n * D * 2) || bytes_differ(a->r, b->r, n * 4) ||
           bytes_differ(a->tokens, b->tokens, n * 4) || (n && bytes_differ(a->of, b->of, (size_t)children * 4));
}

// To the bit.
static int trees_differ(const Session *c, const Lychee *a, const Lychee *b) {
    int bad = a->M != b->M || a->M_built != b->M_built || a->bytes != b->bytes, D = c->c->D;
    for (int i = 0; i < c->c->L * c->c->G && a->M_built; i++) {
        const Tree *x = &a->tree[i], *y = &b->tree[i];
        if (!x->fine.n) continue;
        bad += nodes_differ(&x->fine, &y->fine, a->M, D) ||
               nodes_differ(&x->coarse, &y->coarse, x->fine.n, D);
    }
    return bad;
}

// The first part selects rows of layer l on both sides, for a random query (scale > 0) or for one to which all rows are
// the same (0): every head reads the same.
static void select_agrees(Pair *p, int l, double scale, const char *text) {
    const Config *c = p->m.c;
    OWN float *q = normals((size_t)c->H * c->D, scale);
    OWN_DEVICE float *dq = put_floats(q, (size_t)c->H * c->D);
    p->c->part[0].m->select(p->c, p->c->part[0].ms, l, q);
    p->d->part[0].m->select(p->d, p->d->part[0].ms, l, dq);
    views_fetch_cuda(p->d);
    for (int h = 0; h < c->H; h++) {
        View a = *kv_view(p->c, l, h), b = *kv_view(p->d, l, h);
        CHECK(same_view(a, b), "%s, %d tokens, query times %g: layer %d, head %d reads %d rows before %d, on the CPU %d "
              "before %d", text, p->c->n_tok, scale, l, h, b.n, b.tail, a.n, a.tail);
    }
}

// Do both sides hold another index? LycheeCluster's trees, or Quest's bounds, to the bit.
static int index_differs(const Pair *p) {
    const Config *c = p->m.c;
    int bad = 0;
    if (*p->c->part[0].m->name == 'l') return trees_differ(p->c, p->c->part[0].ms, p->d->part[0].ms);
    const Quest *a = p->c->part[0].ms, *b = p->d->part[0].ms;
    size_t bytes = p->c->n_tok / PAGE * bounds_bytes(p->c, a);
    for (int i = 0; i < c->L * c->G; i++) bad += a->bound[i] && bytes_differ(a->bound[i], b->bound[i], bytes);
    return bad;
}

// Bytes of shared memory for the scores of a list; -1: as many as outside of tests.
void cuda_seek_shared(int bytes);

#define LYCHEE_SHORT "lychee-buffer=4 full-layers=0 sink=2 lychee-chunk-min=2 lychee-chunk-max=4 "

TEST(cuda_index, "from equal rows both devices make the same index to the bit, and a selection in one launch reads the same "
                 "rows: trees that are built, grafted and built anew, every score, with and without units; bounds of pages "
                 "that grow; every format, packed rows; few and many units, random, partly and all tied, scores in shared "
                 "memory and out of it, budgets of nothing and of nearly all") {
    static const struct {
        int L, H, G, D;
        const char *method, *text;
        int n[2];               // tokens of two passes; 0: of many that grow
        double std[2];          // and the deviation of their keys
    } run[] = {
        { 2, 6, 3, 40, "lychee", LYCHEE_SMALL "budget=40" },
        { 1, 2, 2, 20, "lychee", LYCHEE_SHORT "budget=303 paper", { 300, 300 }, { 0, 1 } },
        { 2, 12, 3, 16, "lychee", LYCHEE_SMALL "budget=50 paper lychee-kg=3 ctk=f16 ctv=f16" },
        { 2, 12, 3, 16, "lychee", LYCHEE_SMALL "budget=30 lychee-kg=2 paper" },
        { 1, 2, 2, 20, "quest", "full-layers=0 budget=1600 ctk=f16", { 8000, 2000 }, { 1, 0 } },    // 624 pages: three blocks
        { 2, 2, 2, 128, "lychee", LYCHEE_SMALL "budget=40 paper" },
        { 1, 5, 1, 24, "quest", "full-layers=0 budget=48 ctk=f16", { 40, 30 }, { 1, 1 } },          // 4 pages
        { 1, 2, 2, 20, "quest", "full-layers=0 budget=64 ctk=bf16", { 400, 300 }, { 0, 1 } },       // ties in the first pages
        { 2, 12, 3, 16, "lychee+pats", LYCHEE_SMALL "budget=40 pats-window=8 ctk=f16 ctv=f16" },
        { 1, 5, 1, 24, "lychee", LYCHEE_SHORT "budget=20", { 60, 9 }, { 1, 1 } },
        { 1, 2, 2, 20, "lychee", LYCHEE_SHORT "budget=2 lychee-kg=2", { 60, 20 }, { 1, 1 } },       // the sinks alone
        { 1, 5, 1, 24, "quest", "full-layers=0 budget=4700 ctk=f32", { 4500, 300 }, { 1, 1 } },     // all pages but a few
        { 2, 6, 3, 16, "quest", "budget=64 full-layers=0 ctk=bf16" },
        { 2, 6, 3, 40, "quest", "budget=64 full-layers=0 ctk=f32" },
        { 2, 6, 3, 64, "quest", "budget=64 full-layers=0 ctk=f16 ctv=f16" },
        { 2, 6, 3, 48, "quest", "budget=64 full-layers=0 ctk=q8_0" },
        { 1, 5, 1, 24, "lychee", LYCHEE_SHORT "budget=100 lychee-kg=16", { 3000, 200 }, { 1, 0 } }, // 400 clusters: two blocks
        { 1, 5, 1, 24, "lychee", LYCHEE_SHORT "budget=2900 lychee-kg=16", { 3000, 200 }, { 1, 0 } },
        { 2, 6, 3, 128, "quest+pats", "budget=64 full-layers=0 ctk=f16 ctv=f16 pats-window=8" },
    };
    if (!strcmp(simd_name(), "plain")) return;      // no fused multiply-add: equal to rounding only
    EACH_VARIANT(i, (int)(sizeof run / sizeof *run)) {
        int quest = *run[i].method == 'q', two = run[i].n[0] > 0, passes = two ? 2 : quest ? 7 : 15;
        OWN_MODEL Tiny m = tiny_model(run[i].L, run[i].H, run[i].G, run[i].D, 16, 16, 11, 3);
        OWN_PAIR Pair p = pair_open(m, run[i].method, run[i].text);
        for (int pass = 0; pass < passes; pass++) {
            int grown = quest ? 1 + 9 * pass : pass < 13 ? 7 : pass < 14 ? 130 : 30, n = pass ? grown : quest ? 77 : 90;
            if (two) n = run[i].n[pass];
            pair_append(&p, n, two ? run[i].std[pass] : 1);
            pair_commit(&p, n);
            CHECK((two && !run[i].std[0]) || !index_differs(&p), "%s: another index behind %d tokens", run[i].text,
                  p.c->n_tok);
            for (int way = 0; way < (two && pass ? 4 : two ? 0 : 1); way++)
                for (int l = 0; l < run[i].L; l++) {
                    cuda_seek_shared(way & 1 ? 0 : -1);
                    select_agrees(&p, l, way & 2 ? 0 : 1.5, run[i].text);
                }
            int first = !quest && p.c->n_tok < 120, last = run[i].L - 1;
            CHECK(first || (two && !pass) || kv_view(p.d, last, 0)->tail > (two ? 0 : 60), "%s: nothing was selected",
                  run[i].text);
        }
        cuda_seek_shared(-1);
    }
}

TEST(cuda_trace, "under every method traces of both devices have the same names, shapes and rows, numbers within rounding; "
                 "a traced run on the device gives the logits of an untraced one within rounding") {
    static const Script p = { 2, { 60, 7 }, { 5, 6 }, 4 };
    OWN_MODEL Tiny m = table_model(2, 4, 2, 0);
    size_t n = (size_t)script_rows(&p) * m.c->V;
    EACH_METHOD(x) {
        const char *method = (*x)->name;
        float *cpu, *device;
        SafeFile *a = trace_played(m, table_open(m, method, 1, ""), method, &p, &cpu);
        SafeFile *b = trace_played(m, table_open(m, method, 1, "device=cuda"), method, &p, &device);
        OWN_SESSION Session *s = table_open(m, method, 1, "device=cuda");
        OWN float *untraced = run_session(s, &p);
        CHECK(worst(device, cpu, n, 1e-3, 1e-3, NULL) <= 1, "%s: other logits than on the CPU", method);
        CHECK(worst(device, untraced, n, 1e-3, 1e-3, NULL) <= 1, "%s: other logits than without --trace", method);
        for (int k = 0; k < a->n; k++) {
            SafeTensor *on_device = safetensors_find(b, a->tensor[k].name);
            const char *how = on_device ? trace_differs(&a->tensor[k], on_device) : "not there";
            CHECK(!*how, "%s: %s: %s", method, a->tensor[k].name, how);
        }
        CHECK(a->n == b->n && a->n > 200, "%s: %d tensors on the CPU, %d on the device", method, a->n, b->n);
        safetensors_close(a);
        safetensors_close(b);
        free(cpu);
        free(device);
    }
}

// ---- steps in one go

// Of 56 steps in two turns, over heads that grow: how many go in one go; how many of those are launched one by one and
// captured, at the start of a turn and after rows or bounds have grown, an index was built, other views were set; and
// how many captures make another graph, because other kernels are launched: the others update the one there is.
typedef struct {
    int D, window;
    const char *method, *text;
    int graphs, captures, anew;
} Steady;

// The launches one by one give the same bits as the graph, and the CPU's rows and views.
static void steady_agrees(const Steady *x) {
    Script p = { 2, { 30, 22 }, { 38, 18 }, 4 }, once = { 1, { 110 }, { 18 }, 5 };
    OWN_MODEL Tiny m = tiny_model(2, 2, 1, x->D, 16, 16, 29, 31);
    if (x->window) tiny_window(m, 1, x->window);        // hooks skip that layer
    size_t row = (size_t)m.c->V * sizeof(float);
    OWN_SESSION Session *c = session_of(m, x->method, x->text), *s = cuda_session(m, x->method, x->text);
    // All rooms are there from now on: only what a step means asks for another graph.
    free(run_session(c, &once));
    free(run_session(s, &once));
    session_reset(c);
    session_reset(s);
    emu_count(NULL);
    OWN float *a = run_session(s, &p), *b = xmalloc(script_rows(&p) * row);
    if (emulated()) {
        long n = emu_count("cudaGraphLaunch"), k = emu_count("cudaStreamBeginCapture");
        long made = emu_count("cudaGraphInstantiate"), updated = emu_count("cudaGraphExecUpdate");
        CHECK(n == x->graphs - x->captures && k == x->captures && made + updated == k && made == x->anew,
              "%s %s: %ld steps were graphs, captured %ld times, %ld made, %ld updated", x->method, x->text, n, k, made,
              updated);
    }
    session_reset(s);
    cuda_single_launches(s, 1);
    int rows = sides_agree(c, s, x->method, x->text, &p, b);
    CHECK(!memcmp(a, b, rows * row), "%s %s: the graph gives other logits", x->method, x->text);

    // A device that takes no graph, and one that takes no early launches into it; the wide heads will do.
    for (int no = 1; emulated() && x->D > 16 && no < 3; no++) {
        emu_no_graphs = no;
        OWN_SESSION Session *plain = cuda_session(m, x->method, x->text);
        OWN float *y = run_session(plain, &p);
        emu_no_graphs = 0;
        CHECK(!memcmp(a, y, script_rows(&p) * row), "%s %s: without graphs (%d) other logits", x->method, x->text, no);
    }
}

TEST(cuda_steady, "steps as a graph, over grafts, ends of pages, selections, heads that grow and a second turn: the "
                  "launches one by one to the bit, the CPU's rows and views") {
    static const Steady run[] = {
        { 40, 0, "full", "ctk=q8_0 ctv=q8_0", 56, 3, 0 },
        { 64, 0, "full", "ctk=bf16 ctv=bf16", 56, 3, 0 },
        { 64, 0, "adakv", "budget=20 obs-window=4 ctk=f16 ctv=f16", 56, 2, 0 },
        // Tokens 31, 49 (the first choice), 65, 91, 97 go the ordinary way.
        { 16, 0, "quest", "budget=48 full-layers=1", 51, 5, 2 },
        // 31, 65, 91, 97.
        { 16, 40, "quest", "budget=20 full-layers=0 ctk=q8_0 ctv=q8_0", 52, 4, 0 },
        // 31, 49, 50 (just built), 65, 91.
        { 16, 0, "lychee", "budget=40 lychee-buffer=8 lychee-chunk-min=4 lychee-chunk-max=8 full-layers=1 sink=4", 51, 4, 2 },
        // 31, 41 (built again), 65, 91.
        { 16, 0, "loopserve-p+lychee", "budget=20 lychee-buffer=4 lychee-chunk-min=4 lychee-chunk-max=8 full-layers=0 sink=4 "
          "lychee-kg=2 ctk=f16 ctv=f16", 52, 4, 0 },
        // 31, 46, 62 (selections; the second one changes lists that the graph reads), 65, 91, 106. The first graph is another
        // one, too: the dialogue before this one ended with lists.
        { 16, 0, "loopserve-d", "budget=16 ctk=f16 ctv=f16", 50, 5, 4 },
        // Packed again at 34, 39, 44, ..
        { 16, 0, "pats", "pats-window=8 ctk=f16 ctv=f16", 56, 9, 0 },
        { 16, 0, "quest+pats", "budget=48 full-layers=1 pats-window=8 pats-format=rows64 ctk=f16 ctv=f16", 45, 11, 2 },
    };
    for (size_t n = 1; n < 3000000; n += n / 3 + 1)     // a step's works are cut into so many items
        CHECK((n + cuda_chunk(n) - 1) / cuda_chunk(n) <= 512, "%zu rows in pieces of %zu", n, cuda_chunk(n));
    for (int i = 0; i < (int)(sizeof run / sizeof *run); i++) {
        order_set(i);
        steady_agrees(&run[i]);
    }
}

TEST(cuda_limits, "on the device, too, what leaves nothing out is full attention bit for bit, over f32 rows and where a step "
                  "goes through tensor cores") {
    static const Script p = { 1, { 110 }, { 4 }, 5 };
    for (int f = 0; f < 2; f++) {
        OWN_MODEL Tiny m = table_model_of(2, 4, 2, f ? 64 : 16, 0);
        full_at_its_limit(m, f ? "device=cuda batch-size=50 ctk=f16 ctv=f16" : "device=cuda batch-size=50", 1000, &p);
    }
}

// The largest difference of a device's logits from the CPU's, by the largest logit: a prefill of 40 tokens and two steps.
static double path_error(Tiny m, const char *text) {
    enum { T = 40 };
    OWN_PAIR Pair p = pair_open(m, "full", text);
    const int *ids = seven_ids(T, m.c->V);
    double e = 0;
    for (int i = -1; i < 2; i++) {
        const float *x = i < 0 ? prefill(p.c, ids, T) : decode(p.c, ids[i]);
        const float *y = i < 0 ? prefill(p.d, ids, T) : decode(p.d, ids[i]);
        e = fmax(e, largest_difference(x, y, m.c->V));
    }
    return e;
}

TEST(cuda_prefill_error, "logits behind a prefill with bf16 weights: one product is off by a thousandth of the largest at "
                         "most, --exact by less than a ten thousandth; activations far beyond f16's largest number go "
                         "through one product, too: the row's scale brings them back") {
    Config *c = config_synthetic("L3,H4,G2,D64,C128,F256,V256");
    Weights *w = weights_synthetic(c, 1);
    double one = path_error((Tiny){ c, w }, ""), two = path_error((Tiny){ c, w }, "exact");
    CHECK(one < 1e-3 && two < 1e-4 && two < one, "one product %g, exact %g", one, two);
    weights_close(w, c);

    OWN_MODEL Tiny m = tiny_model(2, 2, 1, 16, 24, 40, 53, 31);
    for (int l = 0; l < 2; l++) {
        Layer *y = &m.w->layer[l];
        float *up = (float *)y->up.data;
        for (int i = 0; i < 40 * 24; i++) up[i] *= 1e6f;
        Tensor *all[] = { &y->wq, &y->wk, &y->wv, &y->wo, &y->gate, &y->up, &y->down };
        for (int i = 0; i < 7; i++) *all[i] = tiny_as(*all[i], DT_BF16);
    }
    one = path_error(m, "");
    CHECK(one < 2e-3, "logits differ by %g of the largest", one);
}

// The exit code opening a session ends with; 0: it opened.
static int cuda_try(Tiny m, const char *method, const char *text) {
    // static: longjmp leaves it alone.
    static Options *o;
    char err[256];
    int rc;
    o = options_of(text);
    options_set(o, "device", "cuda", err);
    EXPECT_DIE(rc, session_close(session_open(m.c, m.w, o, method)));
    options_free(o);
    return rc;
}

TEST(cuda_launches, "what a prefill in blocks launches, kernel by kernel") {
    // Two layers in three blocks of 128 tokens; behind its attention the last layer goes on with the last token.
    static const struct {
        const char *kernel;
        int n;
    } want[] = {
        { "embed_kernel", 1 },
        { "rows_kernel", 6 + 9 },       // norms, SwiGLU, activations in 16 bits
        { "cublasGemmEx", 6 + 9 },      // products
        { "finish_kernel", 6 },         // scales, biases, residuals
        { "heads_kernel", 6 },          // scales, biases, RoPE, append
        { "prefill_kernel", 6 },
        { "gemv_kernel", 4 },           // output, MLP, logits
        { "_kernel", 1 + 15 + 6 + 6 + 6 + 4 },
    };
    Config *c = config_synthetic("L2,H4,G2,D16,C32,F64,V64");
    Weights *w = weights_synthetic(c, 1);
    Session *s = cuda_session((Tiny){ c, w }, "full", "ctk=f16 ctv=f16 batch-size=128");
    emu_count(NULL);
    prefill(s, seven_ids(300, c->V), 300);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        CHECK(counted(want[i].kernel, want[i].n), "%s was not launched %d times", want[i].kernel, want[i].n);
    session_done(s);
    weights_close(w, c);
}

TEST(cuda_step_launches, "under every method a step that is replayed launches five kernels a layer and three more, where rows "
                         "are selected one more, and by an index one a layer, too; who drops rows in every step has none that is replayed") {
    enum { L = 3 };
    OWN_MODEL Tiny m = table_model(L, 4, 2, 0);
    EACH_METHOD(p) {
        if (!emulated()) break;
        OWN_SESSION Session *s = table_open(m, (*p)->name, 1, "device=cuda");
        long n = -1, want = 5 * L + 3;
        if ((*p)->select) want += (*p)->plan ? 1 + (L - 1) : 1;     // the first layer reads every row
        prefill(s, seven_ids(60, m.c->V), 60);
        for (int i = 0; n < 0 && i < 7; i++) {
            emu_count(NULL);
            decode(s, i);
            if (i > 3 && emu_count("cudaGraphLaunch")) n = emu_count("_kernel");
        }
        if (n < 0 && kv_longest(s, L - 1) <= budget_now(s)) continue;
        CHECK(n == want, "%s: %ld kernels in a step of %d layers, should be %ld", (*p)->name, n, L, want);
    }
}

// Two sessions play the same dialogue, one with the best of the logits and one with all of them. Both draw the same ids,
// which are those the dialogue goes on with. picks: how many the options ask for.
static void sampling_agrees(Tiny m, const char *method, const char *text, int picks) {
    enum { STEPS = 6 };
    size_t row = (size_t)m.c->V * sizeof(float);
    App a[2];
    Turn t = { 0 };
    for (int i = 0; i < 40; i++) arrput(t.pre, i * 7 % m.c->V);
    for (int k = 0; k < 2; k++) {
        a[k] = (App){ .c = m.c, .s = cuda_session(m, method, text), .rng = 11 };
        a[k].o = options_in(a[k].s);
        feed_prefill(&a[k], &t);
    }
    Session *best = a[0].s, *all = a[1].s;
    CHECK(!best->picked, "a prefill has all logits");
    CHECK(logits_needed(a[0].o) == picks, "%s: %d logits, should be %d", text, logits_needed(a[0].o), picks);
    emu_count(NULL);
    for (int i = 0; i < STEPS; i++) {
        best->picks = i == STEPS / 2 ? 0 : picks;           // once in between somebody wants all of them
        int x = sample(&a[0]), y = sample(&a[1]);
        CHECK(x == y && a[0].rng == a[1].rng, "%s %s: step %d draws %d, from all logits %d", method, text, i, x, y);
        for (int k = 0; k < 2; k++) decode(a[k].s, x);
        CHECK(!best->picked == !best->picks && !all->picked, "%s: step %d", text, i);
        CHECK(best->picked || !memcmp(best->logits, all->logits, row), "step %d", i);
    }
    CHECK(!picks || counted("pick_kernel", STEPS - 1), "%s: launches of pick_kernel", text);
    turn_free(t);
    for (int k = 0; k < 2; k++) session_done(a[k].s);
}

TEST(cuda_sampling, "ids drawn from the best logits, which a device brings, are those drawn from all: greedy, top-k, top-p, "
                    "min-p; a large top-k takes all logits; a damaged embedding is seen where only the best are brought") {
    OWN_MODEL Tiny large = tiny_model(2, 2, 1, 16, 16, 16, 4500, 31), m = tiny_model(2, 2, 1, 16, 16, 16, 300, 31);
    sampling_agrees(large, "full", "temp=1.5 top-k=128 top-p=1 min-p=0 ctk=f16 ctv=f16", 128);
    sampling_agrees(m, "full", "temp=0", 1);
    sampling_agrees(m, "full", "", 40);
    sampling_agrees(m, "full", "temp=3 top-k=7 top-p=0.6", 7);
    sampling_agrees(m, "full", "top-k=129", 0);
    sampling_agrees(m, "full", "top-k=0", 0);
    sampling_agrees(m, "quest", "budget=32 full-layers=0", 40);
    sampling_agrees(m, "h2o", "budget=20", 40);
    int ids[5] = { 1, 2, 3, 4, 5 };
    ((float *)(uintptr_t)m.w->embed.data)[7 * 16] = NAN;
    OWN_SESSION Session *s = cuda_session(m, "full", "temp=0");
    prefill(s, ids, 5);
    s->picks = 1;
    int rc = try_decode(s, 7);
    CHECK(rc == EXIT_MODEL && strstr(die_text, "not a number"), "%d: %s", rc, die_text);
}

// The bytes that a memory plan asks for in all.
static size_t planned(const MemoryPlan *p) { return p->weights + p->kv + p->parts + p->pass; }

// The first call sets the mark to what is held.
static size_t held_now(void) {
    emu_most_memory();
    return emu_most_memory();
}

TEST(cuda_memory, "a plan is at least what a dialogue takes and at most four times it, the sum of its lines, and enough: PATS "
                  "packs a prefill layer by layer where the raw rows of all would not fit; too small a device: exit 4 with "
                  "the numbers and what helps") {
    static const struct {
        const char *method, *text;
    } run[] = {
        { "full", "ctx-size=300 ctk=f32 ctv=f32" },
        { "full", "ctx-size=300 batch-size=64" },
        { "snapkv", "ctx-size=300 budget=64" },
        { "window", "ctx-size=300 budget=64" },
        { "pats", "ctx-size=300 ctk=f16 ctv=f16 pats-window=16" },
        { "quest", "ctx-size=300 budget=64" },
        { "lychee", "ctx-size=300 budget=64 lychee-buffer=8 sink=4" },
        { "loopserve", "ctx-size=300 loopserve-min-context=0" },
        { "pats", "ctx-size=510 batch-size=32 pats-window=8 pats-bmax=10 ctk=f16 ctv=f16" },
    };
    for (int i = 0; i < 9; i++) {
        int packs = i == 8, T = packs ? 500 : 299;
        OWN_MODEL Tiny m = packs ? tiny_model(8, 1, 1, 32, 16, 16, 53, 31) : tiny_model(4, 2, 1, 32, 48, 96, 53, 31);
        weights_count(m.w, m.c);
        CHECK(held_now() == 0, "%zu bytes were never given back", held_now());
        Session *s = cuda_session(m, run[i].method, run[i].text);
        MemoryPlan p = memory_plan(s);
        size_t need = planned(&p), raw = packs ? (size_t)8 * 512 * 32 * 4 : SIZE_MAX, sum = 0;   // K and V of all layers
        for (int k = 0; k < p.n_line; k++) sum += p.line[k].bytes;
        CHECK(sum == need, "the lines are %zu bytes, the sums %zu", sum, need);
        CHECK(!packs || need < p.weights + p.pass + raw, "%zu bytes planned; raw rows %zu, passes %zu", need, raw, p.pass);
        emu_set_memory(need);
        CHECK(isfinite(*prefill(s, seven_ids(T, 53), T)) && isfinite(*decode(s, 1)), "logits");
        size_t most = emu_most_memory();
        CHECK(!emulated() || (most <= need && need <= 4 * most), "%s %s: %zu bytes held at most, %zu planned", run[i].method,
              run[i].text, most, need);
        CHECK(cuda_held(s) < raw / 5 * 4, "%zu bytes of rows are held, raw ones would be %zu", cuda_held(s), raw);
        session_done(s);
        CHECK(cuda_try(m, run[i].method, run[i].text) == 0, "exactly enough: %s", die_text);
        if (!emulated()) continue;
        emu_set_memory(i == 1 ? p.weights / 2 : need - 1);
        int rc = cuda_try(m, run[i].method, run[i].text);
        CHECK(rc == EXIT_MEMORY && strstr(die_text, "needed") && strstr(die_text, i == 1 ? "the weights alone" : "-c"),
              "%d: %s", rc, die_text);
        emu_set_memory(0);
    }
}

// What -d auto takes for this model.
static const char *device_chosen(Tiny m) {
    static char took[16];
    App a = { .o = options_of("ctx-size=300"), .c = m.c, .w = m.w };
    int was = quiet;
    quiet = 1;
    choose_device(&a);
    quiet = was;
    snprintf(took, sizeof took, "%s", opt_str(a.o, "device"));
    options_free(a.o);
    return took;
}

TEST(cuda_auto, "-d auto takes the GPU after a trial against the CPU; a device too small for the model or for the trial, a "
                "GPU too old for the kernels, a driver too old for the runtime keep it on the CPU, and are told before "
                "anything is brought there; so is a head_dim past 256") {
    OWN_MODEL Tiny m = tiny_model(2, 2, 1, 32, 48, 96, 53, 31), wide = tiny_model(1, 2, 1, 258, 16, 16, 11, 1);
    weights_count(m.w, m.c);
    OWN_OPTIONS Options *like = options_of_program();
    double e = device_trial(like);
    CHECK(e >= 0 && e < 1e-3, "the trial: %g", e);
    CHECK(!strcmp(device_chosen(m), "cuda"), "-d auto: %s", device_chosen(m));
    CHECK(cuda_try(wide, "full", "") == EXIT_USAGE && strstr(die_text, "head_dim"), "%s", die_text);
    OWN_SESSION Session *s = session_of(m, "full", "ctx-size=300");
    MemoryPlan p = memory_plan(s);
    const struct {
        size_t memory;          // 0: enough
        int major, old_driver;
        const char *why;
    } lack[] = { { 1000, 8, 0, "needed" },
                 { planned(&p) + 1000, 8, 0, NULL },            // enough for this model, not for the trial's
                 { 0, 7, 0, "compute capability 7.0" },
                 { 0, 8, 1, "driver version is insufficient" } };
    for (int i = 0; emulated() && i < 4; i++) {
        size_t before = held_now();
        emu_set_memory(lack[i].memory);
        emu_set_device(lack[i].major, lack[i].old_driver);
        CHECK(!strcmp(device_chosen(m), "cpu"), "%d: -d auto: %s", i, device_chosen(m));
        CHECK(i != 1 || (device_trial(like) == -1 && strstr(die_text, "needed")), "the trial: %s", die_text);
        int rc = lack[i].why ? cuda_try(m, "full", "") : EXIT_USAGE;
        CHECK(rc == (i ? EXIT_USAGE : EXIT_MEMORY) && (i < 2 || strstr(die_text, "-d cpu works")) &&
                  (!lack[i].why || strstr(die_text, lack[i].why)), "%d: %d, %s", i, rc, die_text);
        CHECK(i < 2 || emu_most_memory() == before, "%d: something was brought there", i);
    }
    emu_set_memory(0);
    emu_set_device(8, 0);
    CHECK(cuda_try(m, "full", "") == 0, "%s", die_text);
}

TEST(cuda_turns, "six dialogues of ten turns on the device, one after the other, of every kind of method: as many bytes "
                 "held as at the start") {
    static const char *const method[] = { "streaming", "snapkv", "h2o", "lychee", "pats", "sonic" };
    for (int i = 0; emulated() && i < 6; i++) {
        OWN_MODEL Tiny m = tiny_model(1, 1, 1, 8, 16, 16, 23, 31);
        Session *s = table_open(m, method[i], 1, "device=cuda budget=12 full-layers=0");
        size_t first = 0;
        for (int t = 0; t < 60; t++) {
            int ids[3] = { t % 23, 3, 5 };
            if (t % 10 == 0) session_reset(s);
            if (t == 20) first = held_now();
            CHECK(t <= 20 || t % 10 || held_now() == first, "%s turn %d: %zu bytes, at first %zu", method[i], t,
                  held_now(), first);
            prefill(s, ids, 3);
            decode(s, 1);
            decode(s, 2);
        }
        session_done(s);
        CHECK(held_now() == 0, "%s: %zu bytes were never given back", method[i], held_now());
    }
}

TEST(cuda_pool, "rows that were given back stay in the pool; memory that is asked for elsewhere "
                "takes them from there") {
    OWN_MODEL Tiny m = tiny_model(2, 2, 1, 16, 16, 16, 53, 1);
    Script p = { 1, { 60 }, { 20 }, 4 };  // heads grow
    OWN_SESSION Session *s = cuda_session(m, "full", "");
    free(run_session(s, &p));
    size_t kept = emu_pooled();
    CHECK(!emulated() || kept > 0, "the heads' old rows went back to the device");
    emu_set_memory(held_now() + kept);  // nothing is left but the pool's
    cuda_drop(cuda_put(&p, sizeof p));
    emu_set_memory(0);
    CHECK(emu_pooled() == 0, "%zu bytes stay in the pool", emu_pooled());
}

TEST(cuda_rates, "the copy that --bench measures by needs no more memory than is free, and "
                 "decode is measured on the device") {
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 16, 16, 53, 1);
    OWN_SESSION Session *s = cuda_session(m, "full", "");
    // Of the 128 KB that a test's copy wants.
    emu_set_memory(held_now() + 70000);
    double copy = device_copy_rate();
    emu_set_memory(0);
    CHECK(copy > 0, "%g bytes/s", copy);
    CHECK(!emulated() || fabs(copy - 65536e3) < 100,
          "%g bytes/s of a copy of 32768 bytes in a millisecond", copy);
    Field *line = bench_line(s, 1, 20, 1);
    double rate = 0;
    for (int i = 0; i < (int)arrlen(line); i++)
        if (!strcmp(line[i].name, "tok_s")) rate = line[i].x;
    CHECK(s->n_tok == 20 + BENCH_WARM + BENCH_STEPS && rate > 0, "%d tokens, %g a second", s->n_tok, rate);
    arrfree(line);
}

TEST(cuda_growth, "a head on the device grows by an eighth, but not past -c; on the CPU by 64 rows") {
    OWN_MODEL Tiny m = tiny_model(1, 1, 1, 8, 16, 16, 11, 3);
    for (int i = 0; i < 2; i++) {
        OWN_PAIR Pair p = pair_open(m, "full", i ? "ctx-size=1060" : "ctx-size=9000");
        pair_append(&p, 1024, 1);
        CHECK(p.d->head[0].cap == 1024, "room for %d rows of 1024", p.d->head[0].cap);
        pair_append(&p, 1, 1);
        int want = i ? 1088 : 1152;
        CHECK(p.d->head[0].cap == want && p.c->head[0].cap == 1088, "room for %d rows, on the CPU %d",
              p.d->head[0].cap, p.c->head[0].cap);
    }
}

// ---- calls that fail

// A dialogue in a process of its own, in which a call of the runtime fails, or memory does not last.
static struct {
    Tiny m;
    const char *method, *text;
    int all;                    // 1: all calls behind the one that fails do, too
    long more;                  // bytes that the device has beside what an open session takes; 0: enough
} failing;

// The n-th call fails; 0: none. Says how many calls there were, and a number of all logits.
__attribute__((unused)) static void failing_run(long n) {
    Script p = { 2, { 60, 3 }, { 7, 2 }, 4 };       // graphs, heads that grow, a second turn
    emu_fail_at(n, failing.all);
    Session *s = cuda_session(failing.m, failing.method, failing.text);
    if (failing.more) emu_set_memory(held_now() + (size_t)failing.more);
    float *x = run_session(s, &p);
    double sum = 0;
    for (int i = 0; i < script_rows(&p) * failing.m.c->V; i++) sum += fabs((double)x[i]) * (1 + i % 7);
    session_done(s);
    fprintf(stderr, "%ld %.12g\n", emu_calls(), sum);
}

TEST(cuda_failures, "whichever call of the runtime fails, alone or with all behind it, and however little memory there is: "
                    "the same logits, or exit 4 for memory, 1 or 2 for the rest, and one line; never a crash") {
    const char *method[] = { "full", "snapkv", "quest", "lychee", "pats", "loopserve", "h2o" };
    const char *text[] = { "",
                           "budget=20 obs-window=4",
                           "budget=20 full-layers=0",
                           "budget=20 lychee-buffer=4 full-layers=0 sink=4",
                           "pats-window=8 ctk=f16 ctv=f16",
                           "budget=16 loopserve-min-context=0 loopserve-first=2",
                           "budget=20" };
    int said[5] = { 0 };  // runs by exit code
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 16, 16, 29, 31);
    for (int i = 0; emulated() && i < 7; i++) {
        char line[1000], good[1000], *sum;
        failing.m = m;
        failing.method = method[i];
        failing.text = text[i];
        int rc = in_a_process(failing_run, 0, good, sizeof good);
        long calls = strtol(good, &sum, 10), step = calls / (i ? 5 : 20) + 1;
        CHECK(rc == 0 && calls > 100, "%s: %d, %s", method[i], rc, good);
        // Every other one of an opening, then some; and some amounts of memory.
        for (long n = 1 + i, more = 0; more < 30000; n += n < 30 && !i ? 2 : step) {
            if (n > calls) more += more / 2 + 1000;
            failing.more = more;
            for (failing.all = 0; failing.all < 2 - (more > 0); failing.all++) {
                rc = in_a_process(failing_run, more ? 0 : n, line, sizeof line);
                int dies = (rc == EXIT_MEMORY || (!more && (rc == EXIT_RUN || rc == EXIT_USAGE))) &&
                           !strncmp(line, "kvcomp: ", 8) && lines_in(line) == 1;
                CHECK(dies || (rc == 0 && !failing.all && strchr(line, ' ') && !strcmp(strchr(line, ' '), sum)),
                      "%s: call %ld of %ld%s, %ld bytes: exit code %d: %s", method[i], n, calls,
                      failing.all ? " and all after it" : "", more, rc, line);
                if (rc >= 0 && rc < 5) said[rc]++;
            }
        }
        failing.more = failing.all = 0;
    }
    CHECK(!emulated() || (said[0] > 2 && said[EXIT_RUN] > 25 && said[EXIT_MEMORY] > 20),
          "%d runs went on, %d ended with 1, %d with 4", said[0], said[EXIT_RUN], said[EXIT_MEMORY]);
}

// Makes the emulator do something that its checks must find.
__attribute__((unused)) static void provoke(long kind) { emu_provoke((int)kind); }

TEST(cuda_emulator, "the emulator catches blocks that touch the same words, shared memory run over, host pointers in "
                    "structs, old contents of rooms, host memory changed too early, kernels that start early and do not wait, "
                    "a last block without its fence, shared memory that nobody has written, a race in a block; and lets pass "
                    "what is right") {
    static const char *want[] = {
        NULL,
        "neighbours: block 1,0,0 writes offset 0 of an allocation of 260 bytes",
        "reader: block 1,0,0 reads offset 0",
        "shared memory written at byte 120 of 120",
        "a struct of 16 bytes, holds a host pointer at byte 8",
        NULL,
        NULL,
        "early: reads what a kernel wrote that may still run",
        "early: writes device memory before dependency_wait",
        "returns without dependency_wait",
        "last: block 2,0,0 reads offset 0",
        "unwritten: reads shared memory that nobody has written",
        "race: thread 1 of block 0,0,0 writes what another thread has written",
    };
    for (int i = 0; emulated() && i < 13; i++) {
        char line[1000];
        emu_set_seed(0);
        int rc = in_a_process(provoke, i, line, sizeof line);
        int caught = want[i] && (emu_is_hard() || i == 3 || i == 4 || i == 9), late = i == 5;
        int fine = rc == 0 && (late ? !strcmp(line, emu_is_hard() ? "2 read" : "1 read") : !*line);
        CHECK(caught ? rc == 128 + SIGABRT && strstr(line, want[i]) : fine, "mistake %d: %d, %s", i, rc, line);
    }
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 16, 16, 11, 1);
    OWN_SESSION Session *s = cuda_session(m, "full", "");
    int was = cuda_poison;
    for (cuda_poison = 0; cuda_poison < 2; cuda_poison++)
        CHECK(cuda_stale(s) == cuda_poison, "poison %d", cuda_poison);
    cuda_poison = was;
}

TEST(cuda_stop, "a prefill on the device is given up between its layers, which empties the session; then it goes on as one "
                "that is new, bit for bit") {
    static const char *const method[] = { "full", "snapkv", "quest" };
    OWN_MODEL Tiny m = tiny_model(3, 4, 2, 16, 24, 40, 53, 31);
    for (int i = 0; i < 3; i++) {
        OWN_SESSION Session *s = cuda_session(m, method[i], "budget=20 obs-window=4");
        OWN_SESSION Session *fresh = cuda_session(m, method[i], "budget=20 obs-window=4");
        App a = { .c = m.c, .w = m.w, .s = s, .o = options_in(s) };
        Turn turn = { 0 };
        for (int k = 0; k < 40; k++) arrput(turn.pre, (k * 7 + 1) % m.c->V);
        feed_prefill(&a, &turn);
        progress_hook = ctrl_c_in_layers;
        CHECK(feed_message(&a, &turn) == -1 && a.stale && !s->n_tok, "%s: the prefill ran to its end", method[i]);
        progress_hook = NULL;
        interrupts = 0;
        for (int k = 0; k < 2; k++) {
            feed_prefill(&a, &turn);
            const float *want = prefill(fresh, turn.pre, 40);
            CHECK(!memcmp(s->logits, want, m.c->V * sizeof *want), "%s: other logits", method[i]);
        }
        turn_free(turn);
    }
}
