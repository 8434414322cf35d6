// test/twin.h - the slow twin: a transformer of plain loops in double, which shares no code with the program;
// tiny models, and scripts of turns that both play.
#ifndef TEST_TWIN_H
#define TEST_TWIN_H
#include "check.h"
#include "../app/chat.h"
#include <stb/stb_ds.h>

// ==================================================================================================== 2 THE SLOW TWIN

// A transformer of plain loops in double, sharing no code with the program: every key and value in its own small
// array, one softmax per query over the rows a callback lets it see. Each method's twin is built on it.

enum { TWIN_D = 64 };           // the widest head of a twin

// K, v (D), rounded as the cache stores them.
typedef struct {
    int src, pos;
    double mass, k[TWIN_D], v[TWIN_D];
} TwinRow;
typedef struct Twin Twin;

typedef struct {
    void *u;
    // May query head h of the pass's token i attend to this row? NULL: causal.
    int (*sees)(void *u, Twin *t, int l, int h, int i, int row);
    // Rows appended, attention to come; q (n,H,D) post-RoPE.
    void (*before)(void *u, Twin *t, int l, const double *q, int n);
    // After attention; q_pre before RoPE. l == L: end of pass.
    void (*after)(void *u, Twin *t, int l, const double *q, const double *q_pre, int n);
    // X (C) of a token with a negative id.
    void (*embed)(void *u, Twin *t, int i, double *x);
    // A turn's prefill; NULL: twin_prefill.
    void (*prefill)(void *u, Twin *t, const int *ids, int n, double *logits);
} TwinHooks;

struct Twin {
    const Config *c;
    const Weights *w;
    const Layer *alt;            // for tokens with a negative id
    TwinRow **row;               // (L*G) stb_ds arrays
    int *id, *pos;               // stb_ds arrays: every token seen
    int base, pos_next, decoding, step, turn;
    int format;  // DT_F32 or DT_F16: how rows are rounded
    TwinHooks hook;
    // (L*H) 1: query i of the layer's last pass read row j, (n,rows) by twin_mask; NULL: it read every row that it sees.
    char **mask;
    int attending;  // 1: they count
};

// A twin without tokens that rounds the rows it stores to `format` (DT_F32 or DT_F16).
static Twin *twin_new(const Config *c, const Weights *w, int format) {
    Twin *t = xcalloc(1, sizeof *t);
    CHECK(c->D <= TWIN_D, "a head of %d", c->D);
    *t = (Twin){ .c = c, .w = w, .format = format };
    t->row = xcalloc((size_t)c->L * c->G, sizeof *t->row);
    t->mask = xcalloc((size_t)c->L * c->H, sizeof *t->mask);
    return t;
}

// Keep (n) ascending.
static void twin_keep(Twin *t, int l, int g, const int *keep, int n) {
    TwinRow **r = &t->row[l * t->c->G + g];
    for (int i = 0; i < n; i++) (*r)[i] = (*r)[keep[i]];
    arrsetlen(*r, n);
}

// Forgets the tokens from n_tok on, and their rows in all heads.
static void twin_truncate(Twin *t, int n_tok) {
    if (n_tok >= (int)arrlen(t->id)) return;
    for (int i = 0; i < t->c->L * t->c->G; i++)
        while (arrlen(t->row[i]) && arrlast(t->row[i]).src >= n_tok) (void)arrpop(t->row[i]);
    t->pos_next = t->pos[n_tok];
    arrsetlen(t->id, n_tok);
    arrsetlen(t->pos, n_tok);
}

// Frees a twin and all its rows.
static void twin_free(Twin *t) {
    for (int i = 0; i < t->c->L * t->c->G; i++) arrfree(t->row[i]);
    for (int i = 0; i < t->c->L * t->c->H; i++) free(t->mask[i]);
    arrfree(t->id);
    arrfree(t->pos);
    free(t->row);
    free(t->mask);
    free(t);
}

// A value as the cache stores it.
static double twin_round(const Twin *t, double x) {
    return t->format == DT_F16 ? f16_to_f32(f32_to_f16((float)x)) : (float)x;
}

// Element i of a tensor.
static double twin_weight(const Tensor *w, size_t i) {
    const uint16_t *h = w->data;
    if (w->dtype == DT_F32) return ((const float *)w->data)[i];
    return w->dtype == DT_F16 ? f16_to_f32(h[i]) : bf16_to_f32(h[i]);
}

// The scalar product of two vectors (D), and the length of one.
static double twin_dot(const double *a, const double *b, int D) {
    double s = 0;
    for (int d = 0; d < D; d++) s += a[d] * b[d];
    return s;
}

static double twin_length(const double *x, int D) { return sqrt(twin_dot(x, x, D)); }

// y = W x + b; a model may lack b.
static void twin_linear(double *y, const double *x, const Tensor *w, const Tensor *b) {
    for (int r = 0; r < w->rows; r++) {
        double sum = b && b->data ? twin_weight(b, r) : 0;
        size_t at = (size_t)r * w->cols;
        const float *f = w->dtype == DT_F32 ? (const float *)w->data + at : NULL;      // most are, and it is quicker
        for (int c = 0; c < w->cols; c++) sum += (f ? f[c] : twin_weight(w, at + c)) * x[c];
        y[r] = sum;
    }
}

// RMSNorm of n vectors x: y = x / sqrt(mean(x^2) + eps) * w. Nothing happens to them where the model lacks w.
static void twin_norm(const Twin *t, double *y, const double *x, const Tensor *w, int n) {
    int cols = w->cols;
    for (; w->data && n > 0; n--, x += cols, y += cols) {
        double ss = 0;
        for (int i = 0; i < cols; i++) ss += x[i] * x[i];
        for (int i = 0; i < cols; i++) y[i] = x[i] / sqrt(ss / cols + t->c->eps) * twin_weight(w, i);
    }
}

// Rotates x (D), a query or key of one head, to position pos; halves make the pairs.
static void twin_rope(const Twin *t, double *x, int pos) {
    int D = t->c->D;
    for (int i = 0; i < D / 2; i++) {
        double a = pos * t->w->inv_freq64[i], c = cos(a) * t->w->rope_scale;
        double s = sin(a) * t->w->rope_scale, u = x[i], v = x[i + D / 2];
        x[i] = u * c - v * s;
        x[i + D / 2] = v * c + u * s;
    }
}

// Whether token i of the pass may look at row r in layer l: not later, and within the layer's
// window.
static int twin_causal(const Twin *t, int l, int i, const TwinRow *r) {
    int w = t->c->windowed && t->c->windowed[l] ? t->c->window : 0;
    return r->src <= t->base + i && (!w || r->pos > t->pos[t->base + i] - w);
}

// The rows that query head h reads: their head's, a stb_ds array.
static TwinRow *twin_rows(const Twin *t, int l, int h) { return t->row[l * t->c->G + h / (t->c->H / t->c->G)]; }

// For a hook before attention: the rows of layer l that query head h reads in this pass, (n,rows), all 0 at first. Those
// that it does not see it does not read.
static char *twin_mask(Twin *t, int l, int h, int n) {
    return t->mask[l * t->c->H + h] = xcalloc((size_t)n * arrlen(twin_rows(t, l, h)) + 1, 1);
}

// Probabilities of query head h of token i, of which q (n,H,D) has the queries, over the layer's rows: p (rows), 0 where
// not seen.
static void twin_probs(Twin *t, int l, int h, int i, const double *q, double *p) {
    TwinRow *r = twin_rows(t, l, h);
    double max = -INFINITY, sum = 0;
    int n = (int)arrlen(r), D = t->c->D;
    const char *mask = t->attending ? t->mask[l * t->c->H + h] : NULL;
    q += ((long)i * t->c->H + h) * D;
    for (int j = 0; j < n; j++) {
        p[j] = -INFINITY;
        if (!(t->hook.sees ? t->hook.sees(t->hook.u, t, l, h, i, j) : twin_causal(t, l, i, &r[j]))) continue;
        if (mask && !mask[(size_t)i * n + j]) continue;
        p[j] = twin_dot(q, r[j].k, D) / sqrt(D);
        max = fmax(max, p[j]);
    }
    for (int j = 0; j < n; j++) {
        p[j] = exp(p[j] - max);
        sum += p[j];
    }
    for (int j = 0; j < n; j++) p[j] /= sum;
}

// Softmax attention of n tokens: q (n,H,D) to out (n,H,D). Adds each row's probability to its mass.
static void twin_attend(Twin *t, int l, double *out, const double *q, int n) {
    int D = t->c->D, H = t->c->H;
    for (int k = 0; k < n * H; k++, out += D) {
        TwinRow *r = twin_rows(t, l, k % H);
        OWN double *p = xmalloc((arrlen(r) + 1) * sizeof *p);
        twin_probs(t, l, k % H, k / H, q, p);
        for (int d = 0; d < D; d++) out[d] = 0;
        for (int j = 0; j < (int)arrlen(r); j++) {
            for (int d = 0; d < D; d++) out[d] += p[j] * r[j].v[d];
            r[j].mass += p[j];
        }
    }
}

// The weights of layer l for token i of the pass.
static const Layer *twin_layer(const Twin *t, int l, int i) {
    return t->id[t->base + i] < 0 && t->alt ? &t->alt[l] : &t->w->layer[l];
}

// Token i of the pass enters layer l with the normed state h: its queries after and before RoPE, and a row in every head.
static void twin_enter(Twin *t, int l, int i, const double *h, double *q, double *q_pre) {
    const Config *c = t->c;
    const Layer *y = twin_layer(t, l, i);
    int D = c->D, pos = t->pos[t->base + i];
    OWN double *k = xcalloc((size_t)c->G * D, 8), *v = xcalloc((size_t)c->G * D, 8);
    twin_linear(q_pre, h, &y->wq, &y->bq);
    twin_norm(t, q_pre, q_pre, &y->q_norm, c->H);
    memcpy(q, q_pre, (size_t)c->H * D * sizeof *q);
    for (int a = 0; a < c->H; a++) twin_rope(t, q + a * D, pos);
    twin_linear(k, h, &y->wk, &y->bk);
    twin_linear(v, h, &y->wv, &y->bv);
    twin_norm(t, k, k, &y->k_norm, c->G);
    for (int g = 0; g < c->G; g++) {
        TwinRow r = { t->base + i, pos };
        twin_rope(t, k + g * D, pos);
        for (int d = 0; d < D; d++) {
            r.k[d] = twin_round(t, k[g * D + d]);
            r.v[d] = twin_round(t, v[g * D + d]);
        }
        arrput(t->row[l * c->G + g], r);
    }
}

// Token i of the pass leaves layer l with the state x (C) and what its heads have read, o (H,D).
static void twin_leave(const Twin *t, int l, int i, double *x, const double *o) {
    const Layer *y = twin_layer(t, l, i);
    int C = t->c->C, F = t->c->F;
    OWN double *a = xcalloc(C, 8), *h = xcalloc(C, 8), *g = xcalloc(F, 8), *u = xcalloc(F, 8);
    twin_linear(a, o, &y->wo, &y->bo);
    for (int k = 0; k < C; k++) x[k] += a[k];
    twin_norm(t, h, x, &y->mlp_norm, 1);
    twin_linear(g, h, &y->gate, &y->bgate);
    twin_linear(u, h, &y->up, &y->bup);
    for (int k = 0; k < F; k++) g[k] = g[k] / (1 + exp(-g[k])) * u[k];
    twin_linear(a, g, &y->down, &y->bdown);
    for (int k = 0; k < C; k++) x[k] += a[k];
}

// One pass. The tokens base.. are in t->id and pos already; logits (V) of the last, NULL: none are wanted.
static void twin_run(Twin *t, int n, double *logits) {
    const Config *c = t->c;
    int C = c->C, HD = c->H * c->D;
    OWN double *x = xcalloc((size_t)n * C, 8), *q = xcalloc((size_t)n * HD, 8), *h = xcalloc(C, 8);
    OWN double *q_pre = xcalloc((size_t)n * HD, 8), *o = xcalloc((size_t)n * HD, 8);
    for (int i = 0; i < n; i++) {
        int id = t->id[t->base + i];
        if (id < 0) t->hook.embed(t->hook.u, t, i, x + i * C);
        for (int d = 0; d < C && id >= 0; d++) x[i * C + d] = twin_weight(&t->w->embed, (size_t)id * C + d);
    }
    for (int l = 0; l < c->L; l++) {
        for (int i = 0; i < n; i++) {
            twin_norm(t, h, x + i * C, &twin_layer(t, l, i)->attn_norm, 1);
            twin_enter(t, l, i, h, q + i * HD, q_pre + i * HD);
        }
        for (int k = l * c->H; k < (l + 1) * c->H; k++) {
            free(t->mask[k]);
            t->mask[k] = NULL;
        }
        if (t->hook.before) t->hook.before(t->hook.u, t, l, q, n);
        t->attending = 1;
        twin_attend(t, l, o, q, n);
        t->attending = 0;
        if (t->hook.after) t->hook.after(t->hook.u, t, l, q, q_pre, n);
        for (int i = 0; i < n; i++) twin_leave(t, l, i, x + i * C, o + i * HD);
    }
    if (t->hook.after) t->hook.after(t->hook.u, t, c->L, NULL, NULL, n);
    twin_norm(t, h, x + (n - 1) * C, &t->w->norm, 1);
    if (logits) twin_linear(logits, h, &t->w->head, NULL);
}

// Appends a token to the twin's sequence.
static void twin_token(Twin *t, int id, int pos) {
    arrput(t->id, id);
    arrput(t->pos, pos);
}

// Ids (n) get the next positions.
static void twin_prefill(Twin *t, const int *ids, int n, double *logits) {
    t->decoding = t->step = 0;
    t->base = (int)arrlen(t->id);
    for (int i = 0; i < n; i++) twin_token(t, ids[i], t->pos_next++);
    twin_run(t, n, logits);
    t->turn++;
}

// One decode step: token id to logits (V).
static void twin_decode(Twin *t, int id, double *logits) {
    t->decoding = 1;
    t->base = (int)arrlen(t->id);
    twin_token(t, id, t->pos_next++);
    twin_run(t, 1, logits);
    t->step++;
}

// ---- tiny models made in memory

// F32, peaky attention (q.k/sqrt(D) has std about 2), logits with std about 2.5.
typedef struct {
    Config *c;
    Weights *w;
} Tiny;

// A random matrix (rows,cols) of the given standard deviation, F32.
static Tensor tiny_tensor(int rows, int cols, double std) {
    return (Tensor){ normals((size_t)rows * cols, std), DT_F32, rows, cols };
}

// Random weights of a norm, near 1.
static Tensor tiny_norm(int n) {
    Tensor t = tiny_tensor(1, n, .1);
    for (int i = 0; i < n; i++) ((float *)t.data)[i] += 1;
    return t;
}

// A model of random weights with the shape given; the same seed gives the same model.
static Tiny tiny_model(int L, int H, int G, int D, int C, int F, int V, uint64_t seed) {
    rnd_seed(seed);
    Tiny m = { xcalloc(1, sizeof *m.c), xcalloc(1, sizeof *m.w) };
    *m.c = (Config){ "llama", L, H, G, D, C, F, V, .max_pos = 1 << 20, .eps = 1e-5f, .theta = 10000, .factor = 1,
                     .bos = -1, .dtype = DT_F32, .dir = "tiny" };
    double *f = xmalloc(D / 2 * sizeof *f), one = 1 / sqrt(C);
    for (int i = 0; i < D / 2; i++) f[i] = pow(10000, -2.0 * i / D);
    *m.w = (Weights){ .embed = tiny_tensor(V, C, 1),
                      .norm = tiny_norm(C),
                      .head = tiny_tensor(V, C, 2.5 * one),
                      .inv_freq64 = f,
                      .rope_scale = 1 };
    m.w->layer = xcalloc(L, sizeof(Layer));
    for (int l = 0; l < L; l++)
        m.w->layer[l] = (Layer){ .attn_norm = tiny_norm(C),
                                 .mlp_norm = tiny_norm(C),
                                 .wq = tiny_tensor(H * D, C, 1.5 * one),
                                 .wk = tiny_tensor(G * D, C, 1.5 * one),
                                 .wv = tiny_tensor(G * D, C, one),
                                 .wo = tiny_tensor(C, H * D, .7 / sqrt(H * D)),
                                 .gate = tiny_tensor(F, C, one),
                                 .up = tiny_tensor(F, C, one),
                                 .down = tiny_tensor(C, F, .7 / sqrt(F)) };
    m.w->known[0] = m.w->embed;
    m.w->known[1] = m.w->layer[0].wq;
    return m;
}

// The k-th tensor of a layer, in the order in which Layer names them.
enum { LAYER_TENSORS = sizeof(Layer) / sizeof(Tensor) };
static Tensor *layer_tensor(Layer *y, int k) { return (Tensor *)y + k; }

// Frees a tiny model with all its weights.
static void tiny_free(Tiny m) {
    for (int k = 0; k < m.c->L * LAYER_TENSORS; k++) free((void *)layer_tensor(m.w->layer, k)->data);
    free((void *)m.w->embed.data);
    free((void *)m.w->norm.data);
    if (m.w->head.data != m.w->embed.data) free((void *)m.w->head.data);
    free((void *)m.w->inv_freq64);
    free(m.w->layer);
    free(m.w);
    free(m.c->windowed);
    free(m.c);
}

// ---- scripts

// Turns of random ids, some prefilled, some decoded; logits of the last prefilled id and of every
// decoded one.
typedef struct {
    int turns, pre[8], dec[8];
    uint64_t seed;
} Script;

// How many rows of logits a script gives: one a prefill and one a decode step.
static int script_rows(const Script *p) {
    int n = 0;
    for (int i = 0; i < p->turns; i++) n += 1 + p->dec[i];
    return n;
}

// Ids (pre+dec): the turn's.
static void script_ids(const Script *p, int turn, int V, int *ids) {
    uint64_t x = p->seed * 1000003 + turn;
    for (int i = 0; i < p->pre[turn] + p->dec[turn]; i++)
        ids[i] = (int)(splitmix64(&x) % (uint64_t)V);
}

// A pass of a script: the prefill of a turn (step -1), or a step; its ids (n), and which of the rows of logits it gives.
typedef struct {
    int turn, step, row, n;
    const int *id;
    int all[8192];              // the turn's
} PassAt;

#define EACH_PASS(x, p, V) for (PassAt x = { .step = -2, .row = -1 }; next_pass(&x, p, V);)
static int next_pass(PassAt *x, const Script *p, int V) {
    x->row++;
    if (++x->step == p->dec[x->turn]) {
        x->turn++;
        x->step = -1;
    }
    if (x->turn == p->turns) return 0;
    if (x->step < 0) script_ids(p, x->turn, V, x->all);
    x->n = x->step < 0 ? p->pre[x->turn] : 1;
    x->id = x->step < 0 ? x->all : x->all + p->pre[x->turn] + x->step;
    return 1;
}

static const float *run_pass(Session *s, const PassAt *x) {
    return x->step < 0 ? prefill(s, x->id, x->n) : decode(s, *x->id);
}

// Returns logits (script_rows,V), to be freed.
static float *run_session(Session *s, const Script *p) {
    int V = s->c->V;
    float *out = xmalloc((size_t)script_rows(p) * V * sizeof *out);
    EACH_PASS(x, p, V) memcpy(out + (size_t)x.row * V, run_pass(s, &x), V * sizeof *out);
    return out;
}

// Runs a script on the twin. Returns logits (script_rows,V), to be freed.
static float *run_twin(Twin *t, const Script *p) {
    int V = t->c->V;
    OWN double *lo = xmalloc(V * sizeof *lo);
    float *out = xmalloc((size_t)script_rows(p) * V * sizeof *out);
    EACH_PASS(x, p, V) {
        if (x.step >= 0) twin_decode(t, *x.id, lo);
        else if (t->hook.prefill) t->hook.prefill(t->hook.u, t, x.id, x.n, lo);
        else twin_prefill(t, x.id, x.n, lo);
        for (int v = 0; v < V; v++) out[(size_t)x.row * V + v] = (float)lo[v];
    }
    return out;
}

// n ids below V, no two of which in a row are equal, until the next call.
static const int *seven_ids(int n, int V) {
    static int ids[8192];
    for (int i = 0; i < n; i++) ids[i] = i * 7 % V;
    return ids;
}

// n random ids below V.
static void draw_ids(int *ids, int n, int V) {
    for (int i = 0; i < n; i++) ids[i] = rnd_int(V);
}

// Sets words of "name=value", or "name" of a flag. Returns how many are refused; err: why the last one is.
static int options_words(Options *o, const char *text, char *err) {
    char buf[1024];
    int bad = 0;
    snprintf(buf, sizeof buf, "%s", text);
    for (char *w = strtok(buf, " "); w; w = strtok(NULL, " ")) {
        char *v = strchr(w, '=');
        if (v) *v++ = 0;
        bad += options_set(o, w, v ? v : "1", err) != 0;
    }
    return bad;
}

// Options of such words; rows are stored as f32 unless said otherwise.
static Options *options_of(const char *text) {
    Options *o = options_of_program();
    char err[512];
    options_words(o, "ctk=f32 ctv=f32", err);
    if (options_words(o, text, err)) CHECK(0, "%s", err);
    return o;
}

// The same numbers in another dtype; t is freed.
static Tensor tiny_as(Tensor t, int dtype) {
    Tensor x = { xmalloc((size_t)t.rows * t.cols * dtype_size(dtype)), dtype, t.rows, t.cols };
    from_f32((void *)x.data, t.data, dtype, (size_t)t.rows * t.cols);
    free((void *)t.data);
    return x;
}

// The layers of these bits (0: the first) get a sliding window of that width.
static void tiny_window(Tiny m, unsigned layers, int width) {
    m.c->window = width;
    m.c->windowed = xcalloc(m.c->L, 1);
    for (int l = 0; l < m.c->L; l++) m.c->windowed[l] = layers >> l & 1;
}

// What a tiny model may have beside f32 weights. HALVES: f16 ones; MIXED: bf16 ones, f16 and f32 among them; BEYOND: what
// the last matrix of a layer reads is a million times as large.
enum { NORMS = 1, BIASES = 2, TIED = 4, WINDOW = 8, HALVES = 16, MIXED = 32, BEYOND = 64 };

// Gives these to a tiny model.
static void tiny_give(Tiny m, int has) {
    int L = m.c->L, H = m.c->H, G = m.c->G, D = m.c->D;
    if (has & WINDOW) tiny_window(m, 2, 9);
    for (int l = 0; l < L; l++) {
        Layer *y = &m.w->layer[l];
        if (has & NORMS) {
            y->q_norm = tiny_norm(D);
            y->k_norm = tiny_norm(D);
        }
        if (has & BIASES) {
            y->bq = tiny_tensor(1, H * D, .1);
            y->bk = tiny_tensor(1, G * D, .1);
            y->bv = tiny_tensor(1, G * D, .1);
            y->bo = tiny_tensor(1, m.c->C, .1);
        }
        for (int i = 0; has & BEYOND && i < y->up.rows * y->up.cols; i++) ((float *)y->up.data)[i] *= 1e6f;
        for (int k = 0; has & (HALVES | MIXED) && k < LAYER_TENSORS; k++) {
            Tensor *x = layer_tensor(y, k);
            int dtype = l && x == &y->up ? DT_F32 : DT_BF16;
            if (has & HALVES || (l && x == &y->wk)) dtype = DT_F16;
            if (x->data) *x = tiny_as(*x, dtype);
        }
    }
    if (has & (HALVES | MIXED)) m.w->embed = tiny_as(m.w->embed, has & HALVES ? DT_F16 : DT_BF16);
    if (has & TIED) {
        free((void *)m.w->head.data);
        m.w->head = m.w->embed;
        m.c->tied = 1;
    }
}

// A session of this method with these options, which are freed with it by session_done.
static Session *session_of(Tiny m, const char *method, const char *text) {
    return session_open(m.c, m.w, options_of(text), method);
}

// The options of a session, as the test that made them may change them.
static Options *options_in(const Session *s) { return (Options *)(uintptr_t)s->opt; }

// Closes a session, which may be NULL, and frees its options.
static void session_done(Session *s) {
    Options *o = s ? options_in(s) : NULL;
    session_close(s);
    options_free(o);
}

// A prefill, and a step. Returns the exit code with which it ended the program, 0: it did not. Each try has its own frame,
// so that longjmp out of die() cannot clobber a caller's variables.
__attribute__((noinline)) static int try_prefill(Session *s, const int *ids, int n) {
    int code;
    EXPECT_DIE(code, prefill(s, ids, n));
    return code;
}

__attribute__((noinline)) static int try_decode(Session *s, int id) {
    int code;
    EXPECT_DIE(code, decode(s, id));
    return code;
}

// What is declared with these is freed, or closed, where its block ends: a session before its model, which stands above.
#define OWN_MODEL __attribute__((cleanup(own_model)))
#define OWN_OPTIONS __attribute__((cleanup(own_options)))
#define OWN_SESSION __attribute__((cleanup(own_session)))
#define OWN_BESIDE __attribute__((cleanup(beside_done)))
static void own_model(Tiny *m) { tiny_free(*m); }
static void own_options(Options **o) { options_free(*o); }
static void own_session(Session **s) { session_done(*s); }

// Kept rows of every head equal the twin's? Returns the number of heads that differ.
static int rows_differ(const Session *s, const Twin *t) {
    int bad = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        int n = s->head[i].len, diff = n != (int)arrlen(t->row[i]);
        for (int r = 0; r < n && !diff; r++) diff = s->head[i].src[r] != t->row[i][r].src;
        bad += diff;
    }
    return bad;
}

// How many query heads have read other rows in the last pass, a step, than the twin's?
static int reads_differ(const Session *s, const Twin *t) {
    static int rows[8192];
    int bad = 0, H = s->c->H;
    for (int i = 0; i < s->c->L * H && t->decoding; i++) {
        int len = (int)arrlen(t->row[i / (H / s->c->G)]), n = view_rows(s, i / H, i % H, rows), at = 0, diff = 0;
        for (int r = 0; r < len; r++) {
            int in = at < n && rows[at] == r;
            at += in;
            diff |= in != (!t->mask[i] || t->mask[i][r]);
        }
        bad += diff || at < n;
    }
    return bad;
}

// The number of heads in which two sessions hold the rows of other tokens.
static int heads_differ(const Session *a, const Session *b) {
    int bad = 0;
    for (int i = 0; i < a->c->L * a->c->G; i++) {
        const KVHead *x = &a->head[i], *y = &b->head[i];
        bad += x->len != y->len || (x->len && memcmp(x->src, y->src, (size_t)x->len * sizeof *x->src));
    }
    return bad;
}

// A session and a twin that have run the same script. Both are open for what a test asks beside.
typedef struct {
    Session *s;
    Twin *t;
} Beside;

// Runs a script on a session of this method and on the twin with these hooks: their logits differ by 1e-5 at most,
// absolute and relative, their heads hold the same rows, and the last step read the same.
static Beside run_beside(Tiny m, const char *method, const char *text, TwinHooks hooks, const Script *p) {
    Beside x = { session_of(m, method, text), twin_new(m.c, m.w, DT_F32) };
    x.t->hook = hooks;
    OWN float *a = run_session(x.s, p), *b = run_twin(x.t, p);
    double e = worst(a, b, (size_t)script_rows(p) * m.c->V, 1e-5, 1e-5, NULL);
    CHECK(e <= 1, "%s %s, H %d G %d L %d: logits are %g times the bound off", method, text, m.c->H, m.c->G, m.c->L, e);
    CHECK(!rows_differ(x.s, x.t), "%s %s, H %d G %d L %d: %d heads hold other rows", method, text, m.c->H, m.c->G,
          m.c->L, rows_differ(x.s, x.t));
    CHECK(!reads_differ(x.s, x.t), "%s %s, H %d G %d L %d: %d heads read other rows", method, text, m.c->H, m.c->G,
          m.c->L, reads_differ(x.s, x.t));
    return x;
}

// Closes both.
static void beside_done(Beside *x) {
    session_done(x->s);
    twin_free(x->t);
}

// A progress hook: Ctrl-C, as its handler counts it, when .4 of a prefill is done.
static void ctrl_c_in_layers(const char *what, double share) {
    (void)what;
    if (share >= .4) interrupts = 1;
}

// Plays a script with --trace on a session, which is closed. Returns the trace, and all logits in *logits, to be freed.
// Two traces can be open at a time.
static SafeFile *trace_played(Tiny m, Session *s, const char *method, const Script *p, float **logits) {
    static int made;
    char err[512];
    const char *path = tmp_path(formatted("trace-%d", made++ % 2));
    App a = { .o = options_in(s), .c = m.c, .w = m.w, .s = s, .method = (char *)(uintptr_t)method };
    options_set(a.o, "trace", path, err);
    trace_open(&a);
    *logits = run_session(s, p);
    trace_close(&a, 1);
    session_done(s);
    SafeFile *f = safetensors_open(path, err);
    CHECK(f, "%s", err);
    return f;
}

// How tensor b differs from a: "" if it does not. Numbers may differ by rounding, and so one packed
// byte in fifty: an f16 number may round the other way.
static const char *trace_differs(const SafeTensor *a, const SafeTensor *b) {
    static char text[200];
    size_t other = 0;
    int u8 = !strcmp(a->type, "U8"), alike = a->n_dim == b->n_dim && !strcmp(a->type, b->type);
    for (int i = 0; alike && i < a->n_dim; i++) alike = a->dim[i] == b->dim[i];
    if (!alike) return "another type or shape";
    if (a->dtype == DT_F32) {
        double e = worst(b->data, a->data, a->bytes / 4, 2e-3, 2e-3, NULL);
        snprintf(text, sizeof text, "%g times the bound", e);
        return e > 1 ? text : "";
    }
    for (size_t i = 0; i < a->bytes; i++)
        other += ((const char *)a->data)[i] != ((const char *)b->data)[i];
    snprintf(text, sizeof text, "%zu of %zu bytes", other, a->bytes);
    return other * (u8 ? 50 : a->bytes) > (u8 ? a->bytes : 0) ? text : "";
}
#endif
