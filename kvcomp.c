// kvcomp.c - the CPU half of kvcomp.
#define _GNU_SOURCE
#include "kvcomp.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STB_DS_IMPLEMENTATION       // growing arrays and hash maps (Debian package libstb-dev)
#define STBDS_REALLOC(c, p, n) xrealloc(p, n)
#define STBDS_FREE(c, p) free(p)
#include <stb/stb_ds.h>

// ---- what Part I calls of Part II. Shared with the GPU half: kvcomp.h
typedef struct Json Json;
typedef struct SafeFile SafeFile;
typedef struct Tokenizer Tokenizer;

enum { KV_STEP = 64 };                          // rows: memory of a head grows by so many
struct Arena *arena_new(void);
void  arena_free(struct Arena *a);
static char *read_file(const char *path, size_t *size, char err[256]);
static int   file_exists(const char *path);
static int   opt_check(const Opt *o, const char *value, char err[256]);
static void  json_escape(FILE *f, const char *s, size_t n);
static const char *safetensors_meta(const SafeFile *f, const char *key);
static void  safetensors_close(SafeFile *f);
static double *scores_load(const char *path, const char *which, int L, int H, char err[512]);     // (L,H)

static inline void ask_ahead(Ahead *a, size_t bytes);
static float max_f32(const float *x, int n);
static void scores_of(float *s, const float *q, const void *k, int dtype, int m, int n, int D, float scale, Ahead next);
static void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add, Ahead next);
static int  weight_from(const float *x, const int *w, int n, uint32_t key);
static void q8_unpack(float *x, const char *o, int n, int D);
static void mean_rows(Session *s, int l, const float *q, int tok0, int w, int lists, float *score);
static void unpack_choose(void);

static inline uint32_t order_key(float x) {              // floats as unsigned numbers in the same order; -0 counts as +0
    union { float f; uint32_t u; int32_t i; } v;
    v.f = x + 0.0f;
    return v.u ^ ((uint32_t)(v.i >> 31) | 0x80000000u); // negative: every bit the other way; else the sign's
}

// ---- what Part I calls before it stands
static void note_peak(Session *s);
static void head_free(Session *s, KVHead *h);

// ####################################################################################################
// PART I: THE SUBJECT
// ####################################################################################################

// ==================================================================================================== 1 MODEL
// A session is one dialogue: its tokens, its rows, its method. forward() is the whole transformer; nothing in it knows a
// method by name. A pass goes layer by layer over the whole turn (so hooks see a whole turn and a prefill holds one
// uncompressed layer at most); -b only cuts the matrix products into blocks.

#define EACH_PART(s, p) for (Part *p = (s)->part; p < (s)->part + (s)->n_part; p++)

static Part *part_with_attend(Session *s) { EACH_PART(s, p) if (p->m->attend) return p; return NULL; }

// Rotates x (heads,D) by its position: pairs (i, i+D/2), angle pos * freq_i in double.
static void rope_angles(const Weights *w, int D, int pos, float *cs) {       // cs (D): cos of D/2 angles, then sin
    for (int i = 0; i < D / 2; i++) {
        double a = pos * w->inv_freq64[i];
        cs[i] = (float)(cos(a) * w->rope_scale);
        cs[D / 2 + i] = (float)(sin(a) * w->rope_scale);
    }
}
static void rope_apply(float *x, int heads, int D, const float *cs) {
    for (int h = 0; h < heads; h++, x += D)
        for (int i = 0; i < D / 2; i++) {
            float a = x[i], b = x[i + D / 2];
            x[i] = a * cs[i] - b * cs[i + D / 2];
            x[i + D / 2] = b * cs[i] + a * cs[i + D / 2];
        }
}
void rope(const Weights *w, float *x, int heads, int D, int pos) {
    float cs[1024];
    rope_angles(w, D, pos, cs);
    rope_apply(x, heads, D, cs);
}

// x (T,C): the embeddings of the pass's tokens. A negative id is some part's own token.
static void embed(Session *s, float *x, int T) {
    int C = s->c->C;
    size_t row = (size_t)C * dtype_size(s->w->embed.dtype);
    for (int t = 0; t < T; t++) {
        const Token *k = &s->tok[s->base + t];
        if (k->id >= 0) to_f32(x + (size_t)t * C, (const char *)s->w->embed.data + k->id * row, s->w->embed.dtype, C);
        else EACH_PART(s, p) if (p->m->embed) { p->m->embed(s, p->ms, k, x + (size_t)t * C); break; }
    }
}
// The longest run of tokens t, t+1, .. < end with the same weights (SONIC's Nexus rows have their own), at most -b of them.
static int same_weights(const Session *s, int t, int end, const Layer **y, int l) {
    int n = 0, alt = s->alt && s->tok[s->base + t].kind == TOK_EXTRA;
    while (t + n < end && n < s->batch && (s->alt && s->tok[s->base + t + n].kind == TOK_EXTRA) == alt) n++;
    *y = alt ? &s->alt[l] : &s->w->layer[l];
    return n;
}
static void norm_heads(float *x, const Tensor *w, int n, int D, float eps) { if (w->data) rmsnorm(x, x, w, n, D, eps); }

// q (n,H,D), k, v (n,G,D) of n rows that share the weights y; h (n,C) is room for the normed input.
static void project_rows(const Session *s, const Layer *y, const float *x, float *h, float *q, float *k, float *v, int n) {
    const Config *c = s->c;
    rmsnorm(h, x, &y->attn_norm, n, c->C, c->eps);
    matmul(q, h, &y->wq, n); add_bias(q, &y->bq, n);
    matmul(k, h, &y->wk, n); add_bias(k, &y->bk, n);
    matmul(v, h, &y->wv, n); add_bias(v, &y->bv, n);
    norm_heads(q, &y->q_norm, n * c->H, c->D, c->eps);
    norm_heads(k, &y->k_norm, n * c->G, c->D, c->eps);
}
// x += W_o out; x += W_down (silu(W_gate h) * W_up h), h the normed x. Room: h (n,C), gate, up (n,F).
static void mlp_rows(const Session *s, const Layer *y, float *x, const float *out, float *h, float *gate, float *up, int n) {
    const Config *c = s->c;
    size_t nC = (size_t)n * c->C;
    matmul(h, out, &y->wo, n); add_bias(h, &y->bo, n);
    for (size_t i = 0; i < nC; i++) x[i] += h[i];
    rmsnorm(h, x, &y->mlp_norm, n, c->C, c->eps);
    matmul(gate, h, &y->gate, n); add_bias(gate, &y->bgate, n);
    matmul(up, h, &y->up, n);     add_bias(up, &y->bup, n);
    swiglu(gate, up, (size_t)n * c->F);
    matmul(h, gate, &y->down, n); add_bias(h, &y->bdown, n);
    for (size_t i = 0; i < nC; i++) x[i] += h[i];
}

// Room of one pass. span: tokens whose queries live at once; all T when a hook wants to see them.
typedef struct { float *x, *q, *k, *v, *out, *h, *gate, *up, *cs; int span; } Pass;

static Pass pass_room(Session *s, int T) {
    const Config *c = s->c;
    int whole = s->rule != VIS_CAUSAL, b = s->batch < T ? s->batch : T;
    EACH_PART(s, p) whole |= p->m->project || p->m->attend || p->m->commit;
    Pass r = { .span = whole ? T : b };
    size_t f = sizeof(float), n = r.span;
    r.x = scratch(s, (size_t)T * c->C * f);         r.cs = scratch(s, (size_t)T * c->D * f);
    r.q = scratch(s, n * c->H * c->D * f);          r.out = scratch(s, n * c->H * c->D * f);
    r.k = scratch(s, n * c->G * c->D * f);          r.v = scratch(s, n * c->G * c->D * f);
    r.h = scratch(s, (size_t)b * c->C * f);         r.gate = scratch(s, (size_t)b * c->F * f);
    r.up = scratch(s, (size_t)b * c->F * f);
    return r;
}
static void (*progress_hook)(const char *what, double share);    // the command line shows how far a long prefill is
void progress_tell(const char *what, double share) { if (progress_hook) progress_hook(what, share); }
static double timed(double *sum, double t0) { double t = now(); *sum += t - t0; return t; }

// Attention of tokens t0..t0+n-1 of the pass in layer l, and the hooks around it.
static void attend_rows(Session *s, int l, Pass *r, int t0, int n, int acts) {
    double t = now();
    Part *sparse = acts ? part_with_attend(s) : NULL;
    if (s->decoding) {
        if (acts) EACH_PART(s, p) if (p->m->select) p->m->select(s, p->ms, l, r->q);
        t = timed(&s->clk.select, t);
        attn_decode(s, l, r->out, r->q);
    }
    else if (sparse) sparse->m->attend(s, sparse->ms, l, r->out, r->q, n);
    else attn_prefill(s, l, r->out, r->q, t0, n);
    t = timed(&s->clk.attend, t);
    if (!s->decoding) note_peak(s);                      // the peak of a prefill: this layer still holds every row
    if (acts) EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, l, r->q, n);
    timed(&s->clk.commit, t);
}
// One pass over the tokens tok[base..base+T), already in the session: returns the logits (V) of the last one.
static float *pass(Session *s, int T) {
    const Config *c = s->c;
    size_t mark = scratch_mark(s), HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    Pass r = pass_room(s, T);
    embed(s, r.x, T);
    for (int t = 0; t < T; t++) rope_angles(s->w, c->D, s->tok[s->base + t].pos, r.cs + (size_t)t * c->D);
    for (int l = 0; l < c->L; l++) {
        int acts = layer_acts(s, l), n;
        const Layer *y;
        if (progress_hook && l && T > 1) progress_hook("prefill", (double)l / c->L);
        for (int t0 = 0, t1; t0 < T; t0 = t1) {          // spans: one if a hook wants the whole turn, else blocks of -b
            t1 = t0 + r.span < T ? t0 + r.span : T;
            for (int t = t0; t < t1; t += n) {
                n = same_weights(s, t, t1, &y, l);
                project_rows(s, y, r.x + (size_t)t * c->C, r.h, r.q + (t - t0) * HD, r.k + (t - t0) * GD, r.v + (t - t0) * GD, n);
            }
            if (acts) EACH_PART(s, p) if (p->m->project) p->m->project(s, p->ms, l, r.q, r.k, r.v, t1 - t0);
            #pragma omp parallel for schedule(static) if (t1 - t0 > 32)
            for (int t = t0; t < t1; t++) {
                rope_apply(r.q + (t - t0) * HD, c->H, c->D, r.cs + (size_t)t * c->D);
                rope_apply(r.k + (t - t0) * GD, c->G, c->D, r.cs + (size_t)t * c->D);
            }
            kv_append(s, l, r.k, r.v, t0, t1 - t0);
            attend_rows(s, l, &r, t0, t1 - t0, acts);
            for (int t = l < c->L - 1 ? t0 : T - 1; t < t1; t += n) {     // of the last layer's rows only the very last is read
                n = same_weights(s, t, t1, &y, l);
                mlp_rows(s, y, r.x + (size_t)t * c->C, r.out + (t - t0) * HD, r.h, r.gate, r.up, n);
            }
        }
    }
    double t = now();
    EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, c->L, NULL, T);
    timed(&s->clk.commit, t);
    rmsnorm(r.h, r.x + (size_t)(T - 1) * c->C, &s->w->norm, 1, c->C, c->eps);
    matmul(s->logits, r.h, &s->w->head, 1);
    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// Adds T tokens to the session. A token with pos < 0 gets the next position.
static void add_tokens(Session *s, const Token *in, int T) {
    if (s->n_tok + T > s->cap_tok) s->tok = xrealloc(s->tok, (size_t)(s->cap_tok = s->n_tok + T + 1024) * sizeof(Token));
    s->base = s->n_tok;
    for (int t = 0; t < T; t++) {
        Token *k = &s->tok[s->n_tok++];
        *k = in[t];
        if (k->pos < 0) k->pos = s->pos_next;
        if (k->pos >= s->pos_next) s->pos_next = k->pos + 1;
    }
}
float *forward(Session *s, const Token *in, int T) {     // one pass over T new tokens
    add_tokens(s, in, T);
    return KV_DEV(s) ? pass_cuda(s, T) : pass(s, T);
}

// ==================================================================================================== 2 CACHE
// A head is a list of rows. Each (layer, KV head) owns len rows, oldest first: source token, RoPE position, K and V bytes.
// Heads differ in length once a method drops rows; dropped rows are given back to the allocator at once. Keys are stored
// rotated. Row counts are rounded up to KV_STEP when memory is asked for, so that a decode step rarely allocates.


// ---- formats of raw rows
static size_t f32_bytes(int D)  { return (size_t)D * 4; }
static size_t half_bytes(int D) { return (size_t)D * 2; }
static void f32_pack   (char *o, const float *x, int D)        { memcpy(o, x, (size_t)D * 4); }
static void f32_unpack (float *x, const char *o, int n, int D) { memcpy(x, o, (size_t)n * D * 4); }
static void f16_pack   (char *o, const float *x, int D)        { from_f32(o, x, DT_F16, D); }
static void f16_unpack (float *x, const char *o, int n, int D) { to_f32(x, o, DT_F16, (size_t)n * D); }
static void bf16_pack  (char *o, const float *x, int D)        { from_f32(o, x, DT_BF16, D); }
static void bf16_unpack(float *x, const char *o, int n, int D) { to_f32(x, o, DT_BF16, (size_t)n * D); }

enum { Q8_BLOCK = 32 };
static size_t q8_bytes(int D) { return (size_t)D + 2 * ((D + Q8_BLOCK - 1) / Q8_BLOCK); }
// q8_0: blocks of 32 values, each an f16 scale d = max|x|/127 and 32 bytes round(x/d); the last of a row may be shorter
static void q8_pack(char *o, const float *x, int D) {
    for (int b = 0; b < D; b += Q8_BLOCK) {
        int n = D - b < Q8_BLOCK ? D - b : Q8_BLOCK;
        float top = 0;
        for (int i = 0; i < n; i++) top = fmaxf(top, fabsf(x[b + i]));
        uint16_t d = f32_to_f16(top / 127);
        float scale = f16_to_f32(d);
        memcpy(o, &d, 2);
        for (int i = 0; i < n; i++) {
            float q = scale > 0 ? rintf(x[b + i] / scale) : 0;
            ((signed char *)o)[2 + i] = (signed char)(q > 127 ? 127 : q < -127 ? -127 : q);
        }
        o += 2 + n;
    }
}

const Format formats[] = {
    { "f16",  half_bytes, f16_pack,  f16_unpack  },
    { "f32",  f32_bytes,  f32_pack,  f32_unpack  },
    { "bf16", half_bytes, bf16_pack, bf16_unpack },
    { "q8_0", q8_bytes,   q8_pack,   q8_unpack   },
    { NULL, NULL, NULL, NULL },
};
static const Format *format_find(const char *name) {
    for (const Format *f = formats; f->name; f++) if (!strcmp(f->name, name)) return f;
    return NULL;
}

// ---- memory of one head
static void head_reserve(Session *s, KVHead *h, int raw) {       // room for `raw` raw rows; keeps what is there, gives back what is not needed
    int D = s->c->D, cap = (raw + KV_STEP - 1) / KV_STEP * KV_STEP, all = h->packed + cap;
    if (cap == h->cap && h->src) return;
    s->changes++;
    if (KV_DEV(s)) rows_resize_cuda(s, h, cap);
    else {
        h->k = xrealloc(h->k, (size_t)cap * s->fk->row_bytes(D));
        h->v = xrealloc(h->v, (size_t)cap * s->fv->row_bytes(D));
    }
    h->cap = cap;
    h->src = xrealloc(h->src, (size_t)all * sizeof(int));
    h->pos = xrealloc(h->pos, (size_t)all * sizeof(int));
    if (s->wants & KV_MASS) h->mass = xrealloc(h->mass, (size_t)all * sizeof(float));
}
static void head_free(Session *s, KVHead *h) {
    if (KV_DEV(s)) rows_free_cuda(s, h);
    free(h->src); free(h->pos); free(h->mass); free(h->k); free(h->v); free(h->pk); free(h->pv); free(h->reg);
    memset(h, 0, sizeof *h);
}
static size_t head_row_bytes(const Session *s, const KVHead *h) {     // bytes of K and V rows, as allocated
    return (size_t)h->cap * (s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D)) + 2 * h->pk_bytes;
}

void kv_reserve(Session *s, int l, int n) {
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        if (h->len - h->packed + n > h->cap) head_reserve(s, h, h->len - h->packed + n);
    }
}
void kv_note(Session *s, int l, int t0, int n) {
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        for (int t = 0; t < n; t++) {
            int r = h->len + t, i = s->base + t0 + t;
            h->src[r] = i;
            h->pos[r] = s->tok[i].pos;
            if (h->mass) h->mass[r] = 0;
        }
        h->len += n;
    }
}
// Appends the rows of tokens base+t0 .. base+t0+n-1 to every KV head of layer l. k, v (n,G,D).
void kv_append(Session *s, int l, const float *k, const float *v, int t0, int n) {
    int G = s->c->G, D = s->c->D;
    size_t bk = s->fk->row_bytes(D), bv = s->fv->row_bytes(D);
    kv_reserve(s, l, n);
    if (KV_DEV(s)) rows_append_cuda(s, l, k, v, t0, n);          // k, v lie where the rows lie
    else {
        #pragma omp parallel for collapse(2) schedule(static) if (n > 32)
        for (int g = 0; g < G; g++)
            for (int t = 0; t < n; t++) {
                KVHead *h = kv_head(s, l, g);
                int raw = h->len - h->packed + t;
                s->fk->pack(h->k + raw * bk, k + ((size_t)t * G + g) * D, D);
                s->fv->pack(h->v + raw * bv, v + ((size_t)t * G + g) * D, D);
            }
    }
    kv_note(s, l, t0, n);
}

static const char *raw_row(const Session *s, const KVHead *h, int v, int r) {       // r >= h->packed
    return (v ? h->v : h->k) + (size_t)(r - h->packed) * (v ? s->fv : s->fk)->row_bytes(s->c->D);
}
// Unpacks rows to f32, whatever their storage, or brings f16 and bf16 rows together as they are (dtype, of raw and packed rows alike).
static void load_range(const Session *s, const KVHead *h, int v, int r0, int n, char *buf, int dtype) {     // buf (n,D) of dtype
    int D = s->c->D, packed = r0 < h->packed ? (r0 + n <= h->packed ? n : h->packed - r0) : 0;
    const Format *f = v ? s->fv : s->fk;
    size_t size = dtype_size(dtype), front = packed * (size_t)D;
    if (packed) {                                        // f32: the f16 numbers go to the rear half of their place, and are widened from the front
        char *half = buf + front * (size - 2);
        s->packing->load(s, h, v, r0, packed, (uint16_t *)half);
        if (dtype == DT_F32) to_f32((float *)buf, half, DT_F16, front);
    }
    if (packed == n) return;
    const char *raw = raw_row(s, h, v, r0 + packed);
    if (dtype != DT_F32) memcpy(buf + front * size, raw, (size_t)(n - packed) * f->row_bytes(D));
    else if (KV_DEV(s)) rows_load_cuda(f, raw, n - packed, D, (float *)buf + front);
    else f->unpack((float *)buf + front, raw, n - packed, D);
}
static void load_rows(const Session *s, const KVHead *h, int v, const int *rows, int r0, int n, void *buf, int dtype) {    // rows NULL: rows r0..r0+n-1
    size_t row = s->c->D * dtype_size(dtype);
    if (!rows) { load_range(s, h, v, r0, n, buf, dtype); return; }
    for (int i = 0, j; i < n; i = j) {                   // runs of neighbours at once
        for (j = i + 1; j < n && rows[j] == rows[j - 1] + 1; ) j++;
        load_range(s, h, v, rows[i], j - i, (char *)buf + i * row, dtype);
    }
}
// Rows of a list lie anywhere: ask for them all before the first is needed, so that their ways from memory overlap.
static void fetch_rows(const Session *s, const KVHead *h, int v, const int *rows, int n) {
    size_t bytes = (v ? s->fv : s->fk)->row_bytes(s->c->D);
    const char *raw = raw_row(s, h, v, h->packed);
    for (int i = 0; i < n; i++)
        if (rows[i] >= h->packed) ask_ahead(&(Ahead){ raw + (size_t)(rows[i] - h->packed) * bytes, bytes }, bytes);
}
// The runs of a list begin on pages of their own. One request to each, all at once, has the processor look up their addresses side by side.
static void fetch_runs(const Session *s, const KVHead *h, const int *rows, int n) {
    for (int i = 0; i < n; i++)
        for (int v = 0; v < 2 && rows[i] >= h->packed && (!i || rows[i] != rows[i - 1] + 1); v++) __builtin_prefetch(raw_row(s, h, v, rows[i]));
}
static int rows_in_place(const Format *f) { return f->unpack == f16_unpack || f->unpack == bf16_unpack || f->unpack == f32_unpack; }
static int dtype_in_place(const Format *f) { return f->unpack == f16_unpack ? DT_F16 : f->unpack == bf16_unpack ? DT_BF16 : DT_F32; }
// n rows ready for arithmetic: where they lie if they are plain numbers side by side, otherwise together in buf (n,D), f16 and bf16 as they are.
static const void *rows_ready(const Session *s, const KVHead *h, int v, const int *rows, int r0, int n, float *buf, int *dtype) {
    const Format *f = v ? s->fv : s->fk;
    int first = rows ? rows[0] : r0;
    *dtype = dtype_in_place(f);
    if (first >= h->packed && (!rows || rows[n - 1] - first == n - 1) && rows_in_place(f))
        return raw_row(s, h, v, first);
    load_rows(s, h, v, rows, r0, n, buf, *dtype);
    return buf;
}
static const void *near_ready(const Session *s, const View *w, int v, int p, int n, float *buf, int *dtype) {      // rows p.. of the view's copy
    const Format *f = v ? s->fv : s->fk;
    const char *from = w->near + (v ? w->n * s->fk->row_bytes(s->c->D) : 0) + p * f->row_bytes(s->c->D);
    *dtype = dtype_in_place(f);
    if (rows_in_place(f)) return from;
    f->unpack(buf, from, n, s->c->D);
    return buf;
}
void kv_load_k(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf) { load_rows(s, h, 0, rows, r0, n, buf, DT_F32); }
void kv_load_v(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf) { load_rows(s, h, 1, rows, r0, n, buf, DT_F32); }

const float *on_host(Session *s, const float *q, int t0, int n) {
    size_t row = (size_t)s->c->H * s->c->D;
    if (!KV_DEV(s)) return q + t0 * row;
    float *copy = scratch(s, n * row * sizeof(float));
    host_copy_cuda(copy, q + t0 * row, n * row);
    return copy;
}
int kv_longest(const Session *s, int l) {
    int n = 0;
    for (int g = 0; g < s->c->G; g++) if (kv_head(s, l, g)->len > n) n = kv_head(s, l, g)->len;
    return n;
}

// ---- views
static void view_fill(Session *s, View *w, const int *idx, int n, int tail) {
    if (KV_DEV(s)) s->changes++;                         // on a CPU nobody asks, and threads set views side by side
    if (n > w->cap) w->idx = xrealloc(w->idx, (size_t)(w->cap = n + n / 4 + KV_STEP) * sizeof(int));
    if (n) memcpy(w->idx, idx, (size_t)n * sizeof(int));
    w->n = n; w->tail = tail; w->same = w->is_near = 0;
}
void view_set(Session *s, int l, int h, const int *idx, int n, int tail) {
    View old = view_of(s, l, h), *w = kv_view(s, l, h);
    if ((h + 1) % (s->c->H / s->c->G) && w[1].same) view_fill(s, w + 1, old.idx, old.n, old.tail);   // the next head goes on reading what it read
    view_fill(s, w, idx, n, tail);
}
void view_group(Session *s, int l, int g, const int *idx, int n, int tail) {
    int R = s->c->H / s->c->G;
    View *w = kv_view(s, l, g * R);
    view_fill(s, w, idx, n, tail);
    for (int r = 1; r < R; r++) { w[r].n = n; w[r].tail = tail; w[r].same = 1; }
}
// Rows that lie anywhere come from memory at a fraction of its speed (LoopServe's single rows at an eighth: NOTES.md, Speed on the CPU). A
// list that stays for some steps pays for a copy. Packed rows may change under it, and a GPU gathers fast enough: not there.
static int copies_views(const Session *s) { return !KV_DEV(s) && !s->packing; }
void view_room(Session *s, int l, int h, int n, int near) {
    View *w = kv_view(s, l, h);
    size_t bytes = near && copies_views(s) ? n * (s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D)) : 0;
    if (n > w->cap) w->idx = xrealloc(w->idx, (size_t)(w->cap = n) * sizeof(int));
    if (bytes > w->room) w->near = xrealloc(w->near, w->room = bytes);
}
void view_near(Session *s, int l, int h) {
    View *w = kv_view(s, l, h);
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    if (!copies_views(s) || !w->n) return;
    view_room(s, l, h, w->n, 1);
    char *to = w->near;
    for (int v = 0; v < 2; v++) {
        size_t bytes = (v ? s->fv : s->fk)->row_bytes(s->c->D);
        for (int i = 0; i < w->n; i++, to += bytes) {
            if (i % 16 == 0 && w->n - i > 16) fetch_rows(s, hd, v, w->idx + i + 16, w->n - i - 16 < 16 ? w->n - i - 16 : 16);
            memcpy(to, raw_row(s, hd, v, w->idx[i]), bytes);
        }
    }
    w->is_near = 1;
}
static void views_here(const Session *s) { (void)s; if (KV_DEV(s)) views_fetch_cuda((Session *)s); }     // a device may have kept the last step's
void view_all(Session *s) {
    s->changes++;
    if (KV_DEV(s)) views_drop_cuda(s);
    for (int i = 0; i < s->c->L * s->c->H; i++) s->view[i].n = s->view[i].tail = s->view[i].same = s->view[i].is_near = 0;
}
int view_rows(const Session *s, int l, int h, int *rows) {
    views_here(s);
    const View w = view_of(s, l, h);
    int n = w.n, len = kv_head(s, l, h / (s->c->H / s->c->G))->len;
    if (n) memcpy(rows, w.idx, (size_t)n * sizeof(int));
    for (int r = w.tail; r < len; r++) rows[n++] = r;
    return n;
}
static void views_reset(Session *s, int l, int g) { view_group(s, l, g, NULL, 0, 0); }

// ---- dropping rows
static void move_rows(Session *s, KVHead *h, const int *keep, int n) {
    size_t bk = s->fk->row_bytes(s->c->D), bv = s->fv->row_bytes(s->c->D);
    int n_packed = 0, old_packed = h->packed;
    while (n_packed < n && keep[n_packed] < old_packed) n_packed++;
    if (old_packed && n_packed < old_packed) s->packing->keep(s, h, keep, n_packed);        // sets h->packed = n_packed
    if (KV_DEV(s)) rows_move_cuda(s, h, keep, n, n_packed, old_packed);
    for (int i = 0; i < n; i++) {
        int r = keep[i];
        if (i >= n_packed && !KV_DEV(s)) {
            memmove(h->k + (size_t)(i - n_packed) * bk, h->k + (size_t)(r - old_packed) * bk, bk);
            memmove(h->v + (size_t)(i - n_packed) * bv, h->v + (size_t)(r - old_packed) * bv, bv);
        }
        h->src[i] = h->src[r]; h->pos[i] = h->pos[r];
        if (h->mass) h->mass[i] = h->mass[r];
    }
    h->len = n;
    head_reserve(s, h, n - n_packed);
}
void kv_keep(Session *s, int l, int g, const int *keep, int n) {
    KVHead *h = kv_head(s, l, g);
    if (n < h->len) move_rows(s, h, keep, n);
    views_reset(s, l, g);
}
void kv_compact(Session *s, int l, int g) {
    KVHead *hd = kv_head(s, l, g);
    int R = s->c->H / s->c->G, n = 0;
    size_t mark = scratch_mark(s);
    int *map = scratch(s, (size_t)(hd->len + 1) * sizeof(int)), *keep = scratch(s, (size_t)(hd->len + 1) * sizeof(int));
    memset(map, 0, (size_t)(hd->len + 1) * sizeof(int));
    for (int h = g * R; h < (g + 1) * R; h++) {
        View *w = kv_view(s, l, h);
        for (int i = 0; i < w->n && !w->same; i++) map[w->idx[i]] = 1;
        for (int r = w->tail; r < hd->len; r++) map[r] = 1;
    }
    for (int r = 0; r < hd->len; r++) {                          // map becomes: rows kept below r
        int seen = map[r];
        if (seen) keep[n] = r;
        map[r] = n;
        n += seen;
    }
    map[hd->len] = n;
    s->changes++;
    for (int h = g * R; h < (g + 1) * R; h++) {
        View *w = kv_view(s, l, h);
        for (int i = 0; i < w->n && !w->same; i++) w->idx[i] = map[w->idx[i]];
        w->tail = map[w->tail];
    }
    if (n < hd->len) move_rows(s, hd, keep, n);
    scratch_reset(s, mark);
}
void kv_truncate(Session *s, int n_tok) {
    if (n_tok >= s->n_tok) return;
    for (int l = 0; l < s->c->L; l++)
        for (int g = 0; g < s->c->G; g++) {
            KVHead *h = kv_head(s, l, g);
            int n = h->len;
            while (n > 0 && h->src[n - 1] >= n_tok) n--;
            if (n == h->len) continue;
            size_t mark = scratch_mark(s);
            int *keep = scratch(s, (size_t)(n + 1) * sizeof(int));
            for (int r = 0; r < n; r++) keep[r] = r;
            move_rows(s, h, keep, n);
            scratch_reset(s, mark);
        }
    view_all(s);
    s->pos_next = s->tok[n_tok].pos;
    s->n_tok = n_tok;
    for (int i = 0; i < s->n_part; i++) if (s->part[i].m->forget) s->part[i].m->forget(s, s->part[i].ms, n_tok);
}

// Rotates one raw key from its position to another: RoPE angles add, so R(new - old) does it in one step.
void kv_repos(Session *s, int l, int g, int row, int pos) {
    KVHead *h = kv_head(s, l, g);
    int D = s->c->D, shift = pos - h->pos[row];
    if (!shift) return;
    float *k = scratch(s, (size_t)D * sizeof(float));
    kv_load_k(s, h, NULL, row, 1, k);
    for (int i = 0; i < D / 2; i++) {                            // no rope_scale here: the stored key has it already
        double a = shift * s->w->inv_freq64[i];
        float c = (float)cos(a), n = (float)sin(a), x = k[i], y = k[i + D / 2];
        k[i] = x * c - y * n; k[i + D / 2] = y * c + x * n;
    }
    char *to = h->k + (size_t)(row - h->packed) * s->fk->row_bytes(D);
    if (KV_DEV(s)) {
        char *raw = scratch(s, s->fk->row_bytes(D));
        s->fk->pack(raw, k, D);
        rows_store_cuda(to, raw, s->fk->row_bytes(D));
    } else s->fk->pack(to, k, D);
    h->pos[row] = pos;
    for (int r = 0, R = s->c->H / s->c->G; r < R; r++) kv_view(s, l, g * R + r)->is_near = 0;
}

// ---- accounting: what the allocator holds
size_t kv_bytes(const Session *s) {
    size_t n = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) n += head_row_bytes(s, &s->head[i]);
    return n;
}
size_t kv_bytes_full(const Session *s) {
    const Format *fk = s->packing ? format_find("f16") : s->fk, *fv = s->packing ? fk : s->fv;
    if (!strcmp(fk->name, "q8_0")) fk = format_find("f16");     // q8_0 is a way of compressing, so full means f16
    if (!strcmp(fv->name, "q8_0")) fv = format_find("f16");
    size_t rows = 0;
    for (int i = 0; i < s->n_tok; i++) rows += s->tok[i].kind != TOK_EXTRA;      // full attention has no tokens of a method's own
    rows = (rows + KV_STEP - 1) / KV_STEP * KV_STEP;
    return (size_t)s->c->L * s->c->G * rows * (fk->row_bytes(s->c->D) + fv->row_bytes(s->c->D));
}
size_t kv_meta_bytes(const Session *s) {
    size_t n = 0;
    views_here(s);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        n += (size_t)(h->packed + h->cap) * (2 * sizeof(int) + (h->mass ? sizeof(float) : 0)) + (size_t)h->n_reg * sizeof(Region);
    }
    for (int i = 0; i < s->c->L * s->c->H; i++) n += (size_t)s->view[i].cap * sizeof(int) + s->view[i].room;
    for (int i = 0; i < s->n_part; i++) if (s->part[i].m->bytes) n += s->part[i].m->bytes(s, s->part[i].ms);
    return n;
}
static void note_peak(Session *s) {
    size_t n = kv_bytes(s);
    if (n > s->clk.peak) s->clk.peak = n;
}

// B at a prefill end. --ratio F removes the share F of the N tokens seen: B = N - floor(N F + 1e-6) (rules.md A32).
int budget_now(const Session *s) {
    if (s->ratio >= 0) return s->n_tok - (int)floor(s->n_tok * s->ratio + 1e-6);
    return s->budget;
}
int layer_acts(const Session *s, int l) {
    if (!s->c->windowed || !s->c->windowed[l]) return 1;
    for (int i = 0; i < s->c->L; i++) if (!s->c->windowed[i]) return 0;
    return 1;
}

// ==================================================================================================== 3 ATTENTION
// One engine for prefill, decode and scores: keys are unpacked tile by tile (KV_TILE rows, f32, in L1), a block of query
// rows is scored against the tile, masked, and folded into an online softmax (running max, sum and weighted V). A query's
// result depends only on its own list of rows, never on the block it sits in, the batch size or the number of threads.

enum { KV_TILE = 64, Q_BLOCK = MAX_R, KV_CHUNK = 2048 };   // rows of a tile; most query rows of a block; rows of one online softmax

typedef struct {            // what one thread works in
    float *k, *v;           // (KV_TILE,D) unpacked rows
    float *q;               // (Q_BLOCK,D) gathered queries
    float *sc;              // (Q_BLOCK,KV_TILE) scores, then probabilities
    float *acc;             // (Q_BLOCK,D) running sum of p v
    float max[Q_BLOCK], sum[Q_BLOCK];
    int tok[Q_BLOCK];       // token index of each query row
    int rows[KV_TILE];
} Tile;

static int n_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
// Starting a team of threads costs microseconds: only for work that is worth it. Results do not depend on it.
static int worth_threads(size_t multiply_adds) { return multiply_adds > (size_t)1 << 18; }
static int thread_id(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}
static int team_size(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}
static Tile *tiles_new(Session *s) {                     // one Tile a thread, in scratch
    int n = n_threads(), D = s->c->D;
    Tile *t = scratch(s, (size_t)n * sizeof(Tile));
    for (int i = 0; i < n; i++) {
        t[i].k   = scratch(s, (size_t)KV_TILE * D * sizeof(float));
        t[i].v   = scratch(s, (size_t)KV_TILE * D * sizeof(float));
        t[i].q   = scratch(s, (size_t)Q_BLOCK * D * sizeof(float));
        t[i].sc  = scratch(s, (size_t)Q_BLOCK * KV_TILE * sizeof(float));
        t[i].acc = scratch(s, (size_t)Q_BLOCK * D * sizeof(float));
    }
    return t;
}
static int layer_window(const Session *s, int l) { return s->c->windowed && s->c->windowed[l] ? s->c->window : 0; }

// Which of n rows can m queries not see? Their scores become -INFINITY; row j and query i meet at x[i * by + j * bx].
// rows NULL: rows r0..; returns 0 when nothing is visible.
static int mask_tile(const Session *s, int l, const KVHead *hd, const Tile *t, int m, const int *rows, int r0, int n, float *x, size_t by, size_t bx) {
    int window = layer_window(s, l), any = 0, first = INT_MAX;
    for (int i = 0; i < m; i++) if (t->tok[i] < first) first = t->tok[i];
    // The head's newest row settles most decode steps, and lies in the cache; the tile's newest would have to come from memory.
    if (s->rule == VIS_CAUSAL && !window && (hd->src[hd->len - 1] <= first || hd->src[rows ? rows[n - 1] : r0 + n - 1] <= first)) return 1;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            int src = hd->src[rows ? rows[j] : r0 + j];
            if (kv_visible(s->rule, window, &s->tok[t->tok[i]], t->tok[i], &s->tok[src], src)) any = 1;
            else x[i * by + j * bx] = -INFINITY;
        }
    return any;
}
// Scores of m queries against n rows whose keys are k (n,D) of any dtype: t->sc (m,n) = q k / sqrt(D), masked. 0 when nothing is visible
static int tile_scores_of(const Session *s, int l, const KVHead *hd, Tile *t, int m, const int *rows, int r0, int n, const void *k, int dtype, Ahead next) {
    scores_of(t->sc, t->q, k, dtype, m, n, s->c->D, 1 / sqrtf((float)s->c->D), next);
    return mask_tile(s, l, hd, t, m, rows, r0, n, t->sc, (size_t)n, 1);
}
static int tile_scores(const Session *s, int l, const KVHead *hd, Tile *t, int m, const int *rows, int r0, int n) {     // t->k holds the keys
    return tile_scores_of(s, l, hd, t, m, rows, r0, n, t->k, DT_F32, (Ahead){0});
}
static void tile_begin(Tile *t, int m, int D) {
    memset(t->acc, 0, (size_t)m * D * sizeof(float));
    for (int i = 0; i < m; i++) { t->max[i] = -INFINITY; t->sum[i] = 0; }
}
// Folds one scored tile into the running softmax of its m queries. v (n,D) of any dtype; NULL: only max and sum are wanted.
static void tile_fold_of(Tile *t, int m, int n, int D, const void *v, int dtype, Ahead next) {
    for (int i = 0; i < m; i++) {
        float *p = t->sc + (size_t)i * n, top = fmaxf(t->max[i], max_f32(p, n));
        if (top == -INFINITY) { memset(p, 0, (size_t)n * sizeof(float)); continue; }
        if (top > t->max[i]) {                           // rescale what was gathered under the old maximum
            float c = expf(t->max[i] - top);
            t->sum[i] *= c;
            for (int d = 0; d < D; d++) t->acc[(size_t)i * D + d] *= c;
            t->max[i] = top;
        }
        exp_shift(p, top, n, &t->sum[i]);
    }
    if (v) mix_of(t->acc, t->sc, v, dtype, m, n, D, 1, next);
}
static void tile_fold(Tile *t, int m, int n, int D, const float *v) { tile_fold_of(t, m, n, D, v, DT_F32, (Ahead){0}); }
// Can any of the rows lie inside the sliding window of the oldest query? Otherwise the tile need not be read at all.
static int tile_in_window(const Session *s, int l, const KVHead *hd, int r_last, int first_tok) {
    int w = layer_window(s, l);
    return !w || s->tok[hd->src[r_last]].pos > s->tok[first_tok].pos - w;      // by token, as kv_visible does
}

// Gathers the queries of tokens t0..t0+n-1 (relative to q's first) and the R heads of group g: row i*R+r of t->q.
static int gather_queries(const Session *s, Tile *t, const float *q, int t0, int n, int tok0, int g) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G, m = 0;
    for (int i = 0; i < n; i++)
        for (int r = 0; r < R; r++, m++) {
            memcpy(t->q + (size_t)m * D, q + ((size_t)(t0 + i) * H + g * R + r) * D, (size_t)D * sizeof(float));
            t->tok[m] = tok0 + i;
        }
    return m;
}
static int last_visible(const Session *s, const KVHead *hd, int last_tok) {     // rows [0,return) can hold what token last_tok sees
    int n = hd->len;
    if (s->rule == VIS_CAUSAL) while (n > 0 && hd->src[n - 1] > last_tok) n--;
    return n;
}
// Probabilities from a scored tile, once max and sum of its m queries are known; sum_j adds up over the queries. sum (n)
static void tile_mass(Tile *t, int m, int n, const float *max, const float *sum, float *out) {
    float unused = 0;
    memset(out, 0, (size_t)n * sizeof(float));
    for (int i = 0; i < m; i++) {
        float *p = t->sc + (size_t)i * n;
        exp_shift(p, max[i], n, &unused);
        for (int j = 0; j < n; j++) out[j] += p[j] / sum[i];
    }
}
static void add_mass(Session *s, int l, KVHead *hd, Tile *t, int m, int n_rows) {   // second pass: probabilities into mass
    float mass[KV_TILE];
    for (int r = 0; r < n_rows; r += KV_TILE) {
        int n = n_rows - r < KV_TILE ? n_rows - r : KV_TILE;
        kv_load_k(s, hd, NULL, r, n, t->k);
        if (!tile_scores(s, l, hd, t, m, NULL, r, n)) continue;
        tile_mass(t, m, n, t->max, t->sum, mass);
        for (int j = 0; j < n; j++) hd->mass[r + j] += mass[j];
    }
}
// Rows are taken KV_CHUNK at a time, and what each chunk gives is joined in order: prefill and decode do the same arithmetic, so a token's
// logits do not depend on how it came in. part: max, sum, sum of p v of every query of a tile, D + 2 apart
static void chunk_put(float *part, const Tile *t, int m, int D) {
    for (int i = 0; i < m; i++) {
        float *o = part + (size_t)i * (D + 2);
        o[0] = t->max[i]; o[1] = t->sum[i];
        memcpy(o + 2, t->acc + (size_t)i * D, (size_t)D * sizeof(float));
    }
}
static void chunks_join(const float *part, size_t stride, int chunks, int D, float *out, float *max, float *sum) {
    *max = -INFINITY; *sum = 0;
    for (int c = 0; c < chunks; c++) *max = fmaxf(*max, part[c * stride]);
    memset(out, 0, (size_t)D * sizeof(float));
    for (int c = 0; c < chunks; c++) {
        const float *p = part + c * stride;
        if (p[0] == -INFINITY) continue;
        float f = expf(p[0] - *max);
        *sum += f * p[1];
        for (int d = 0; d < D; d++) out[d] += f * p[2 + d];
    }
    for (int d = 0; d < D; d++) out[d] /= *sum;
}
// Attention of tokens base+t0 .. base+t0+n-1 of this pass over every row held that the rule lets them see. q, out (n,H,D).
void attn_prefill(Session *s, int l, float *out, const float *q, int t0, int n) {
    if (KV_DEV(s)) { attn_prefill_cuda(s, l, out, q, t0, n); return; }
    int D = s->c->D, H = s->c->H, G = s->c->G, R = H / G, per = Q_BLOCK / R, blocks = (n + per - 1) / per;
    size_t mark = scratch_mark(s), stride = (size_t)D + 2, chunk = Q_BLOCK * stride, all = ((size_t)kv_longest(s, l) / KV_CHUNK + 1) * chunk;
    Tile *tiles = tiles_new(s);
    float *parts = scratch(s, (size_t)n_threads() * all * sizeof(float));
    int inner = s->wants & KV_MASS ? blocks : 1;         // mass of a head is summed by one thread, block after block
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)n * kv_longest(s, l) * H * D))
    for (int item = 0; item < G * blocks / inner; item++) {
        int g = item % G;
        for (int b = item / G * inner; b < item / G * inner + inner; b++) {
            Tile *t = &tiles[thread_id()];
            float *part = parts + (size_t)thread_id() * all;
            KVHead *hd = kv_head(s, l, g);
            int i0 = b * per, nb = n - i0 < per ? n - i0 : per, tok0 = s->base + t0 + i0;
            int m = gather_queries(s, t, q, i0, nb, tok0, g), n_rows = last_visible(s, hd, tok0 + nb - 1), n_chunks = 0;
            for (int r = 0; r < n_rows; r += KV_TILE) {
                int nr = n_rows - r < KV_TILE ? n_rows - r : KV_TILE;
                if (r % KV_CHUNK == 0) tile_begin(t, m, D);
                if (tile_in_window(s, l, hd, r + nr - 1, tok0)) {
                    kv_load_k(s, hd, NULL, r, nr, t->k);
                    if (tile_scores(s, l, hd, t, m, NULL, r, nr)) {
                        kv_load_v(s, hd, NULL, r, nr, t->k);     // over the keys: both tiles and what they come from would not fit in L1
                        tile_fold(t, m, nr, D, t->k);
                    }
                }
                if ((r + KV_TILE) % KV_CHUNK == 0 || r + nr == n_rows) chunk_put(part + n_chunks++ * chunk, t, m, D);
            }
            for (int i = 0; i < m; i++)
                chunks_join(part + i * stride, chunk, n_chunks, D, out + ((size_t)(i0 + i / R) * H + g * R + i % R) * D, &t->max[i], &t->sum[i]);
            if (hd->mass) add_mass(s, l, hd, t, m, n_rows);
        }
    }
    scratch_reset(s, mark);
}

// One softmax over exactly these rows (visible or not is the caller's business). q, out (D); prob (n) or NULL.
void attn_rows(Session *s, int l, int h, const float *q, const int *rows, int n, float *out, float *prob) {
    int D = s->c->D;
    size_t mark = scratch_mark(s);
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    float *k = scratch(s, (size_t)KV_TILE * D * sizeof(float)), *p = prob ? prob : scratch(s, (size_t)(n + 1) * sizeof(float)), max = -INFINITY, sum = 0;
    for (int r = 0; r < n; r += KV_TILE) {
        int nr = n - r < KV_TILE ? n - r : KV_TILE;
        kv_load_k(s, hd, rows + r, 0, nr, k);
        attn_scores(p + r, q, k, 1, nr, D, 1 / sqrtf((float)D));
        for (int j = 0; j < nr; j++) max = p[r + j] > max ? p[r + j] : max;
    }
    memset(out, 0, (size_t)D * sizeof(float));
    for (int r = 0; r < n; r += KV_TILE) {
        int nr = n - r < KV_TILE ? n - r : KV_TILE;
        exp_shift(p + r, max, nr, &sum);
        kv_load_v(s, hd, rows + r, 0, nr, k);
        attn_mix(out, p + r, k, 1, nr, D);
    }
    for (int d = 0; d < D; d++) out[d] /= sum;
    if (prob) for (int i = 0; i < n; i++) prob[i] /= sum;
    scratch_reset(s, mark);
}

// ---- decode: through the views, split into chunks of KV_CHUNK rows that threads take and one thread joins in order
typedef struct { int g, h0, m, n; } DecodeGroup;        // query heads h0..h0+m-1 of KV head g read the same n rows

static int decode_groups(Session *s, int l, DecodeGroup *out) {
    int R = s->c->H / s->c->G, n = 0;
    for (int g = 0; g < s->c->G; g++)
        for (int h = g * R; h < (g + 1) * R; ) {
            const View *w = kv_view(s, l, h);
            int h0 = h++;
            while (h < (g + 1) * R && h - h0 < Q_BLOCK && same_as_before(s, l, h)) h++;
            out[n++] = (DecodeGroup){ g, h0, h - h0, w->n + kv_head(s, l, g)->len - w->tail };
        }
    return n;
}
static const int *view_slice(const View *w, int p, int n, int *rows, int *r0) { // rows at positions p..p+n-1 of the view; NULL: r0..
    if (p >= w->n) { *r0 = w->tail + p - w->n; return NULL; }
    if (p + n <= w->n) return w->idx + p;
    for (int i = 0; i < n; i++) rows[i] = p + i < w->n ? w->idx[p + i] : w->tail + p + i - w->n;
    return rows;
}
// A tile of rows from r0 on, at most n, that will be unpacked: what to ask memory for.
static Ahead tile_ahead(const Session *s, const KVHead *h, int v, int r0, int n) {
    const Format *f = v ? s->fv : s->fk;
    if (n > KV_TILE) n = KV_TILE;
    if (n <= 0) return (Ahead){0};
    if (r0 < h->packed) return s->packing->stored(s, h, v, r0, n);
    return (Ahead){ raw_row(s, h, v, r0), n * f->row_bytes(s->c->D) };
}
// The same in decode, where rows that are read in place, or by a list, are asked for elsewhere.
static Ahead rows_ahead(const Session *s, const KVHead *h, int v, const int *rows, int r0, int n) {
    return rows || (r0 >= h->packed && rows_in_place(v ? s->fv : s->fk)) ? (Ahead){0} : tile_ahead(s, h, v, r0, n);
}
static void decode_chunk(Session *s, int l, const DecodeGroup *d, int p0, int p1, const float *q, Tile *t, float *part) { // part (m,D+2)
    int D = s->c->D;
    const KVHead *hd = kv_head(s, l, d->g);
    const View view = view_of(s, l, d->h0), *w = &view;
    memcpy(t->q, q + (size_t)d->h0 * D, (size_t)d->m * D * sizeof(float));
    for (int i = 0; i < d->m; i++) t->tok[i] = s->base;
    tile_begin(t, d->m, D);
    if (p0 < w->n && !w->is_near) fetch_runs(s, hd, w->idx + p0, (p1 < w->n ? p1 : w->n) - p0);
    for (int p = p0; p < p1; p += KV_TILE) {
        int n = p1 - p < KV_TILE ? p1 - p : KV_TILE, r0 = 0, dtype;
        const int *rows = view_slice(w, p, n, t->rows, &r0);
        if (!tile_in_window(s, l, hd, rows ? rows[n - 1] : r0 + n - 1, s->base)) continue;
        // Rows of a list are asked for in time, half a tile at a time, so that memory is never idle nor flooded: this tile's values
        // while its keys are scored, the next tile's keys while the values are added up.
        int near = w->is_near && p + n <= w->n, half = rows && !near ? n / 2 : 0, rest = rows && !near ? n - half : 0;
        int next = p + n >= w->n || w->is_near ? 0 : w->n - p - n < KV_TILE ? w->n - p - n : KV_TILE;
        const int *after = next ? w->idx + p + n : NULL;
        fetch_rows(s, hd, 1, rows, half);
        const void *x = near ? near_ready(s, w, 0, p, n, t->k, &dtype) : rows_ready(s, hd, 0, rows, r0, n, t->k, &dtype);      // few queries: a tile is read once, so not copied if it need not be
        if (rest) fetch_rows(s, hd, 1, rows + half, rest);
        if (!tile_scores_of(s, l, hd, t, d->m, rows, r0, n, x, dtype, rows_ahead(s, hd, 0, rows, r0 + n, p1 - p - n))) continue;
        fetch_rows(s, hd, 0, after, next / 2);
        x = near ? near_ready(s, w, 1, p, n, t->k, &dtype) : rows_ready(s, hd, 1, rows, r0, n, t->k, &dtype);     // over the keys, see attn_prefill
        if (next) fetch_rows(s, hd, 0, after + next / 2, next - next / 2);
        tile_fold_of(t, d->m, n, D, x, dtype, rows_ahead(s, hd, 1, rows, r0 + n, p1 - p - n));
    }
    chunk_put(part, t, d->m, D);
}
static void decode_mass(Session *s, int l, const DecodeGroup *d, const float *q, Tile *t, const float *max, const float *sum) {
    KVHead *hd = kv_head(s, l, d->g);
    const View view = view_of(s, l, d->h0), *w = &view;
    memcpy(t->q, q + (size_t)d->h0 * s->c->D, (size_t)d->m * s->c->D * sizeof(float));
    for (int i = 0; i < d->m; i++) t->tok[i] = s->base;
    for (int p = 0; p < d->n; p += KV_TILE) {
        int n = d->n - p < KV_TILE ? d->n - p : KV_TILE, r0 = 0;
        const int *rows = view_slice(w, p, n, t->rows, &r0);
        kv_load_k(s, hd, rows, r0, n, t->k);
        if (!tile_scores(s, l, hd, t, d->m, rows, r0, n)) continue;
        float mass[KV_TILE];
        tile_mass(t, d->m, n, max + d->h0, sum + d->h0, mass);
        for (int j = 0; j < n; j++) hd->mass[rows ? rows[j] : r0 + j] += mass[j];
    }
}
void attn_decode(Session *s, int l, float *out, const float *q) {       // out, q (H,D)
    if (KV_DEV(s)) { attn_decode_cuda(s, l, out, q); return; }
    int D = s->c->D, H = s->c->H, items = 0;
    size_t mark = scratch_mark(s), stride = (size_t)D + 2;
    DecodeGroup *group = scratch(s, (size_t)H * sizeof *group);
    size_t rows = 0;
    int n_groups = decode_groups(s, l, group), *first = scratch(s, (size_t)(n_groups + 1) * sizeof(int));
    for (int i = 0; i < n_groups; i++) { first[i] = items; items += (group[i].n + KV_CHUNK - 1) / KV_CHUNK; rows += (size_t)group[i].n * group[i].m; }
    first[n_groups] = items;
    float *part = scratch(s, (size_t)items * Q_BLOCK * stride * sizeof(float)), *max = scratch(s, (size_t)H * 4), *sum = scratch(s, (size_t)H * 4);
    Tile *tiles = tiles_new(s);
    int team = worth_threads(rows * D);
    (void)team;                                          // read by OpenMP only
    #pragma omp parallel for schedule(dynamic) if (team)
    for (int item = 0; item < items; item++) {
        int i = 0;
        while (first[i + 1] <= item) i++;
        int p0 = (item - first[i]) * KV_CHUNK, p1 = p0 + KV_CHUNK < group[i].n ? p0 + KV_CHUNK : group[i].n;
        decode_chunk(s, l, &group[i], p0, p1, q, &tiles[thread_id()], part + (size_t)item * Q_BLOCK * stride);
    }
    for (int i = 0; i < n_groups; i++) {
        const KVHead *hd = kv_head(s, l, group[i].g);
        for (int j = 0; j < group[i].m; j++) {
            int h = group[i].h0 + j;
            chunks_join(part + (size_t)first[i] * Q_BLOCK * stride + j * stride, Q_BLOCK * stride, first[i + 1] - first[i], D, out + (size_t)h * D, &max[h], &sum[h]);
        }
        s->clk.bytes_attended += (double)group[i].n * ((double)head_row_bytes(s, hd) / (hd->packed + hd->cap));
        if (hd->mass) decode_mass(s, l, &group[i], q, tiles, max, sum);
    }
    scratch_reset(s, mark);
}

void window_scores(Session *s, int l, const float *q, int T, int W, float *score) {
    int w = T < W ? T : W;
    if (KV_DEV(s)) window_scores_cuda(s, l, q, T, W, score);
    else mean_rows(s, l, q + (size_t)(T - w) * s->c->H * s->c->D, s->base + T - w, w, s->c->H / s->c->G, score);
}

// ==================================================================================================== 4 THE DECODE LOOP
// A turn is one prefill and then one decode a token. A session is opened for a method of one or more parts, lives as long as the
// dialogue, and can forget it.

// ---- a turn: prefill once, then decode token by token
static const float *sound(const Session *s, const float *logits) {      // (V). Weights that hold NaN or overflow speak nonsense, and every comparison finds it equal
    uint32_t worst = 0;
    for (int i = 0; i < s->c->V; i++) {
        union { float f; uint32_t u; } x = { logits[i] };
        worst = (x.u & 0x7fffffff) > worst ? x.u & 0x7fffffff : worst;
    }
    if (worst >= 0x7f800000) die(EXIT_MODEL, "%.300s: a logit of token %d is %s: its weights are damaged", s->c->dir, s->n_tok - 1, worst > 0x7f800000 ? "not a number" : "infinite");
    return logits;
}
int pos_fits(const Session *s, int n, int extra) { return !s->pos_end || s->pos_next + n + extra <= s->pos_end; }
const float *prefill(Session *s, const int *ids, int n) {
    double t0 = now();
    int cap = 2 * (n + s->n_tok) + 4096;
    Token *t = xmalloc((size_t)cap * sizeof(Token));     // once a turn, not in the decode path
    for (int i = 0; i < n; i++) t[i] = (Token){ ids[i], -1, s->turn, TOK_USER };
    s->decoding = s->step = 0;
    EACH_PART(s, p) if (p->m->turn) p->m->turn(s, p->ms);
    view_all(s);
    EACH_PART(s, p) if (p->m->enter) n = p->m->enter(s, p->ms, t, n, cap);
    const float *logits = s->forward(s, t, n);
    free(t);
    s->turn++;
    s->applied = budget_now(s);
    s->n_sys = s->n_foot = s->n_head = 0;
    s->clk.n_prefill += n;
    timed(&s->clk.prefill, t0);
    return sound(s, logits);
}
const float *decode(Session *s, int id) {
    double t0 = now();
    if (!pos_fits(s, 1, 0)) die(EXIT_RUN, "position %d is past max_position_embeddings %d", s->pos_next, s->pos_end);
    Token t = { id, -1, s->n_tok ? s->tok[s->n_tok - 1].seg : 0, TOK_REPLY };       // the segment goes on
    s->decoding = 1;
    const float *logits = s->forward(s, &t, 1);
    s->step++;
    s->clk.n_decode++; s->clk.steps++;
    timed(&s->clk.decode, t0);
    return sound(s, logits);
}

// ---- opening: "loopserve-p+lychee+pats" is three parts; two that decide the same thing cannot be combined
static const Method *method_find(const char *name, size_t n) {
    EACH_METHOD(m) if (strlen((*m)->name) == n && !strncmp((*m)->name, name, n)) return *m;
    return NULL;
}
static int parts_parse(Session *s, const char *spec) {
    static const char *decides[] = { "the prefill attention", "which rows are kept or read", "how rows are stored" };
    for (const char *a = spec, *b; a; a = *b ? b + 1 : NULL) {
        b = a + strcspn(a, "+");
        const Method *m = method_find(a, b - a);
        if (!m) { snprintf(s->err, sizeof s->err, "--method: no method is called '%.*s' (see --list-methods)", (int)(b - a), a); return -1; }
        if (s->n_part == MAX_PARTS) { snprintf(s->err, sizeof s->err, "--method=%s: more than %d parts", spec, MAX_PARTS); return -1; }
        EACH_PART(s, p)
            for (int bit = 0; bit < 3; bit++)
                if (p->m->role & m->role & 1 << bit) {
                    snprintf(s->err, sizeof s->err, "--method=%s: %s and %s cannot be combined, both decide %s", spec, p->m->name, m->name, decides[bit]);
                    return -1;
                }
        s->part[s->n_part++].m = m;
    }
    for (int i = 1; i < s->n_part; i++)                  // timeline order: prefill, select, store
        for (int j = i; j > 0 && s->part[j].m->role < s->part[j - 1].m->role; j--) { Part x = s->part[j]; s->part[j] = s->part[j - 1]; s->part[j - 1] = x; }
    return 0;
}
// Opens every part, whose state is all zeros. A part may name the budget to take when the user gave none.
static int parts_begin(Session *s) {
    EACH_PART(s, p) {
        if (!s->budget) s->budget = p->m->budget;
        if (p->m->open && p->m->open(s, p->ms)) return -1;
    }
    return 0;
}
static int parts_open(Session *s) {
    EACH_PART(s, p) {
        s->wants |= p->m->wants;
        if (p->m->rule) s->rule = p->m->rule;
        p->ms = xcalloc(1, p->m->state + 1);
    }
    return parts_begin(s);
}
static int on_device(Session *s) {                       // -d cuda; the command line has made cuda or cpu of auto
#ifdef KVCOMP_CUDA
    if (!strcmp(opt_str(s->opt, "device"), "cuda")) return device_open(s);
#endif
    (void)s;
    return 0;
}
static void budget_options(Session *s) {                 // what the user asked for; open may know better
    s->budget = opt_int(s->opt, "budget");
    s->ratio = opt_given(s->opt, "ratio") ? opt_real(s->opt, "ratio") : -1;
}
// NULL, with the reason in err, when the options or the method do not fit.
static Session *session_try(const Config *c, const Weights *w, const Options *o, const char *method, char err[512]) {
    Session *s = xcalloc(1, sizeof *s);
    *s = (Session){ .c = c, .w = w, .opt = o, .forward = forward, .scratch = arena_new() };
    s->fk = format_find(opt_str(o, "ctk"));
    s->fv = format_find(opt_str(o, "ctv"));
    s->batch = opt_int(o, "batch-size");
    budget_options(s);
    s->head = xcalloc((size_t)c->L * c->G, sizeof(KVHead));
    s->view = xcalloc((size_t)c->L * c->H, sizeof(View));
    s->logits = xcalloc(c->V, sizeof(float));
    if (parts_parse(s, method) || parts_open(s) || on_device(s)) {
        snprintf(err, 512, "%s", s->err);
        session_close(s);
        return NULL;
    }
    return s;
}
Session *session_open(const Config *c, const Weights *w, const Options *o, const char *method) {
    char err[512];
    Session *s = session_try(c, w, o, method, err);
    if (!s) die(EXIT_USAGE, "%s", err);
    return s;
}
void session_close(Session *s) {
    if (!s) return;
    EACH_PART(s, p) { if (p->ms && p->m->close) p->m->close(s, p->ms); free(p->ms); }
    for (int i = 0; i < s->c->L * s->c->G; i++) head_free(s, &s->head[i]);
    if (KV_DEV(s)) device_close(s);
    for (int i = 0; i < s->c->L * s->c->H; i++) { free(s->view[i].idx); free(s->view[i].near); }
    free(s->head); free(s->view); free(s->tok); free(s->logits);
    arena_free(s->scratch);
    free(s);
}
// Forgets the dialogue: close and open every part again, drop every row.
void session_reset(Session *s) {
    EACH_PART(s, p) { if (p->m->close) p->m->close(s, p->ms); memset(p->ms, 0, p->m->state); }
    for (int i = 0; i < s->c->L * s->c->G; i++) head_free(s, &s->head[i]);
    if (KV_DEV(s)) device_reset(s);
    view_all(s);
    s->n_tok = s->pos_next = s->turn = s->decoding = s->step = s->n_sys = s->n_foot = s->n_head = 0;
    budget_options(s);
    s->alt = NULL; s->packing = NULL; s->pos_end = s->pos_extra = 0; s->made_for = NULL;
    memset(&s->clk, 0, sizeof s->clk);
    if (parts_begin(s)) die(EXIT_USAGE, "%s", s->err);
}

// ==================================================================================================== 5 STREAMINGLLM
// Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks. arXiv 2309.17453.
// The first tokens of a text draw attention whatever they say (sinks); with them and the most recent rows kept, a model
// goes on fluently for ever. Everything between is dropped, and a prefill is dense over what is held.
//   keep row r of a head with N rows iff  r < sink  or  r >= N - (B - sink)
// **Differs from the paper:**
//   - rows are dropped at the end of a prefill, not at every decoded token (rules.md A13);
//   - rows keep their original positions; --streaming-rerotate re-numbers them inside the cache as the paper does.
// Options: --budget (1024), --sink (4), --streaming-rerotate. `window` is the same with no sink.

typedef struct { int sink, rerotate; } Streaming;

static int window_open(Session *s, void *ms) {           // no sinks, so any budget is legal
    Streaming *x = ms;
    x->rerotate = opt_int(s->opt, "streaming-rerotate");
    if (x->rerotate && s->c->windowed) return refuse(s, "--streaming-rerotate: this model's sliding windows count original positions");
    return 0;
}
static int streaming_open(Session *s, void *ms) {
    Streaming *x = ms;
    x->sink = opt_int(s->opt, "sink");
    if (window_open(s, ms)) return -1;
    if (s->ratio < 0 && s->budget <= x->sink) return refuse(s, "--budget %d leaves no recent row beside --sink %d", s->budget, x->sink);
    return 0;
}
static void streaming_commit(Session *s, void *ms, int l, const float *q, int T) {
    Streaming *x = ms;
    int B = budget_now(s), sink = x->sink < B ? x->sink : B;
    (void)q; (void)T;
    if (s->decoding || s->n_tok <= B) return;
    if (l == s->c->L) {
        if (x->rerotate) s->pos_next = kv_longest(s, 0);         // the next token stands right behind the rows
        return;
    }
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        int n = 0, *keep = scratch(s, (size_t)h->len * sizeof(int));
        for (int r = 0; r < h->len; r++)
            if (r < sink || r >= h->len - (B - sink)) keep[n++] = r;
        kv_keep(s, l, g, keep, n);
        for (int r = 0; x->rerotate && r < n; r++) kv_repos(s, l, g, r, r);      // position = place in the cache
    }
}
static const Opt streaming_opts[] = { { "streaming-rerotate", 'b', "0", "re-number positions inside the cache" }, { NULL, 0, NULL, NULL } };


const Method streaming_method = {
    .name    = "streaming",
    .paper   = "StreamingLLM, arXiv 2309.17453",
    .keeps   = "keeps the first --sink and the most recent rows, B in all",
    .budget  = 1024,
    .uses    = "--sink 4",
    .opts    = streaming_opts,
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Streaming),
    .open    = streaming_open,
    .commit  = streaming_commit,
};

const Method window_method = {
    .name    = "window",
    .paper   = "streaming without sinks",
    .keeps   = "keeps the B most recent rows",
    .budget  = 1024,
    .opts    = streaming_opts,
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Streaming),
    .open    = window_open,
    .commit  = streaming_commit,
};

// ==================================================================================================== 6 BASELINES
// The methods the five papers compare themselves with. All of them are dense in a prefill, drop rows at the end of every
// turn's prefill, and never in decode (but for --h2o=stream). N is the number of tokens seen and B the budget; N <= B
// keeps everything, at equality too. n is the number of rows a head holds.
// SnapKV, AdaKV and PyramidKV share one chain, and DiliLazyKV takes its links in another order:
//   window_scores -> one score a KV head -> max over neighbours -> the best `cap` rows and the last w

typedef struct { int window, kernel, agg; } Snap;       // --obs-window w, --kernel, --gqa-agg

static int snap_options(Session *s, Snap *x, int window) {       // window: the method's default
    const char *agg = opt_str(s->opt, "gqa-agg");
    x->window = opt_given(s->opt, "obs-window") ? opt_int(s->opt, "obs-window") : window;
    x->kernel = opt_int(s->opt, "kernel");
    x->agg = !strcmp(agg, "max") ? AGG_MAX : !strcmp(agg, "sum") ? AGG_SUM : AGG_MEAN;
    if (x->window < 1) return refuse(s, "--obs-window must be at least 1, found %d", x->window);
    if (x->kernel < 1 || x->kernel % 2 == 0) return refuse(s, "--kernel must be odd, found %d", x->kernel);
    if (s->ratio < 0 && s->budget <= x->window) return refuse(s, "--budget %d leaves no row beside --obs-window %d", s->budget, x->window);
    return 0;
}
static int snap_due(const Session *s, int l, int B) { return !s->decoding && l < s->c->L && s->n_tok > B; }
static int snap_kept_window(const Snap *x, int B) { return x->window < B ? x->window : B; }     // --ratio can make B the smaller one
static int candidates(const KVHead *h, int w) { return h->len > w ? h->len - w : 0; }           // the rows before the last w

// out (n): the R rows of score (R,stride) as one
static void join_heads(float *out, const float *score, int n, size_t stride, int R, int agg) {
    for (int j = 0; j < n; j++) {
        float a = score[j];
        for (int r = 1; r < R; r++) { float b = score[r * stride + j]; a = agg == AGG_MAX ? fmaxf(a, b) : a + b; }
        out[j] = agg == AGG_MEAN ? a / (float)R : a;
    }
}
// out[j] = max of x[t] over |t-j| <= width/2. Neighbours in the head's row list, not in position. out, x (n)
static void pool_max(float *out, const float *x, int n, int width) {
    for (int j = 0; j < n; j++) {
        int a = j > width / 2 ? j - width / 2 : 0, b = width / 2 < n - 1 - j ? j + width / 2 : n - 1;
        float top = x[a];
        for (int t = a + 1; t <= b; t++) top = fmaxf(top, x[t]);
        out[j] = top;
    }
}
// keep: the best `cap` of rows [0,n) by score, and every row of [n,len); ascending -> count
static int keep_best(int *keep, const float *score, int n, int cap, int len) {
    int kept = top_k(score, n, cap, keep);
    for (int r = n; r < len; r++) keep[kept++] = r;
    return kept;
}
// Pooled scores of each KV head's candidates n[g], (G,N) or, under POOL_ONLY, (H,N); N = kv_longest. Device memory in a device session.
static float *pooled_scores(Session *s, const Snap *x, int l, const float *q, int T, int w, int order, int *n) {     // n (G) is set here
    int H = s->c->H, G = s->c->G, R = H / G, agg = order == JOIN_POOL ? x->agg : AGG_MEAN;
    size_t N = kv_longest(s, l);
    for (int g = 0; g < G; g++) n[g] = candidates(kv_head(s, l, g), w);
    if (KV_DEV(s)) return pooled_scores_cuda(s, l, q, T, x->window, n, agg, x->kernel, order);
    float *row = scratch(s, H * N * sizeof(float)), *pooled = scratch(s, H * N * sizeof(float)), *one = scratch(s, N * sizeof(float));
    window_scores(s, l, q, T, x->window, row);
    for (int g = 0; g < G; g++) {
        float *from = row + g * R * N, *to = pooled + g * R * N;
        if (order == JOIN_POOL) {
            join_heads(one, from, n[g], N, R, agg);
            pool_max(pooled + g * N, one, n[g], x->kernel);
            continue;
        }
        for (int r = 0; r < R; r++) pool_max(to + r * N, from + r * N, n[g], x->kernel);
        if (order == POOL_JOIN) join_heads(pooled + g * N, to, n[g], N, R, agg);
    }
    return pooled;
}
// idx (S,per), count (S): the k[i] largest of the first n[i] of each row of x (S,stride), which lies where the rows lie
static void top_k_rows(Session *s, const float *x, int S, size_t stride, const int *n, const int *k, int *idx, int per, int *count) {
    if (KV_DEV(s)) { top_k_rows_cuda(s, x, S, stride, n, k, idx, per, count); return; }
    #pragma omp parallel for schedule(static) if (S > 1 && n[0] > 64)
    for (int i = 0; i < S; i++) count[i] = top_k(x + i * stride, n[i], k[i], idx + (size_t)i * per);
}
static void snap_keep(Session *s, int l, const float *score, const int *n, const int *cap) {     // score (G,N); n, cap (G): candidates, and how many of them stay
    int G = s->c->G, N = kv_longest(s, l), *keep = scratch(s, (size_t)G * N * sizeof(int)), *kept = scratch(s, (size_t)G * sizeof(int));
    top_k_rows(s, score, G, N, n, cap, keep, N, kept);
    for (int g = 0; g < G; g++) {
        int *to = keep + (size_t)g * N;
        for (int r = n[g]; r < kv_head(s, l, g)->len; r++) to[kept[g]++] = r;
        kv_keep(s, l, g, to, kept[g]);
    }
}

// ---- SnapKV. Li et al.: SnapKV: LLM Knows What You Are Looking for Before Generation. arXiv 2404.14469.
// What the last queries of a prompt look at is what its answer will look at. Every KV head keeps the B-w best candidates.
// **Differs from the paper:** one kept set a KV head, not a query head (mean over the group); kernel 7 max, w 32.
static int snapkv_open(Session *s, void *ms) { return snap_options(s, ms, 32); }
static void snapkv_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Snap *x = ms;
    int B = budget_now(s), w = snap_kept_window(x, B);
    if (!snap_due(s, l, B)) return;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)s->c->G * sizeof(int)), *cap = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    for (int g = 0; g < s->c->G; g++) cap[g] = B - w;
    snap_keep(s, l, score, n, cap);
    scratch_reset(s, mark);
}

// ---- AdaKV. Feng et al.: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation. arXiv 2407.11550.
// The layer's budget goes where the scores are: heads with flat scores get more rows than heads with a few high ones.
//   base = B-w;  share_g = sum(best base of g) / sum(all of g);  cnt_g = rows of g among the G*base best of score * share
//   cap_g = rint(0.8 cnt_g + floor(0.2 base)), at most the rows there are; what a short head leaves over is not given on
// **Differs from the paper:** heads are KV heads; a layer is compressed iff its candidates exceed G*base.
// Shares are of sums in fixed point: a layer's heads compete for rows, so two devices must get the same sums in any order.
static float *adakv_shares(Session *s, const float *score, int N, const int *n, int base) {      // score (G,N) -> (sum of n), where score lies
    if (KV_DEV(s)) return adakv_shares_cuda(s, score, N, n, base);
    float *all = scratch(s, (size_t)s->c->G * N * sizeof(float)), *to = all;
    int *idx = scratch(s, (size_t)N * sizeof(int));
    for (int g = 0; g < s->c->G; g++) {
        const float *x = score + (size_t)g * N;
        int64_t best = 0, sum = 0;
        for (int i = 0, k = top_k(x, n[g], base, idx); i < k; i++) best += fixed_mass(x[idx[i]]);
        for (int r = 0; r < n[g]; r++) sum += fixed_mass(x[r]);
        for (int r = 0; r < n[g]; r++) *to++ = sum > 0 ? (float)(x[r] * ((double)best / (double)sum)) : 0;
    }
    return all;
}
static void adakv_caps(Session *s, int l, const float *score, const int *n, int base, int *cap) {   // score (G,N); n, cap (G)
    int G = s->c->G, N = kv_longest(s, l), total = 0, want = G * base, k, from = 0;
    for (int g = 0; g < G; g++) total += n[g];
    int *idx = scratch(s, (size_t)want * sizeof(int));
    top_k_rows(s, adakv_shares(s, score, N, n, base), 1, 0, &total, &want, idx, want, &k);       // ties go to the lower (head, row)
    for (int g = 0, i = 0; g < G; g++) {
        int cnt = 0;
        for (from += n[g]; i < k && idx[i] < from; i++) cnt++;
        cap[g] = (int)rint(0.8 * cnt + base / 5);
    }
}
static void adakv_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Snap *x = ms;
    int B = budget_now(s), w = snap_kept_window(x, B);
    long rows = 0;
    if (!snap_due(s, l, B)) return;
    for (int g = 0; g < s->c->G; g++) rows += candidates(kv_head(s, l, g), w);
    if (rows <= (long)s->c->G * (B - w)) return;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)s->c->G * sizeof(int)), *cap = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    adakv_caps(s, l, score, n, B - w, cap);
    snap_keep(s, l, score, n, cap);
    scratch_reset(s, mark);
}

// ---- PyramidKV. Cai et al.: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling. arXiv 2406.02069.
// Lower layers spread their attention, upper ones gather it: budgets fall by a constant step from layer to layer.
//   base = B-w, lo = base/20, hi = 2 base - lo;  hi > N-w: hi = N-w, lo = 2 base - hi;  layer l: hi - l (hi-lo)/(L-1)
// **Differs from the paper:** integers throughout; SnapKV when N < 2 base or L = 1; one kept set a KV head.
static int pyramid_cap(int l, int L, int N, int B, int w) {
    int base = B - w, lo = base / 20, hi = 2 * base - lo;
    if (L == 1 || N < 2 * base) return base;
    if (hi >= N - w) { hi = N - w; lo = 2 * base - hi; }
    return hi - l * ((hi - lo) / (L - 1));
}
static void pyramidkv_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Snap *x = ms;
    int B = budget_now(s), w = snap_kept_window(x, B);
    if (!snap_due(s, l, B)) return;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)s->c->G * sizeof(int)), *cap = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    for (int g = 0; g < s->c->G; g++) cap[g] = pyramid_cap(l, s->c->L, s->n_tok, B, w);
    snap_keep(s, l, score, n, cap);
    scratch_reset(s, mark);
}

// ---- H2O. Zhang et al.: H2O: Heavy-Hitter Oracle for Efficient Generative Inference. arXiv 2306.14048.
// A few rows draw most of the attention: keep those (heavy hitters) beside the recent ones.
//   floor(B/2) last rows, and of the others the best by mass: all attention the row ever drew, from every query of the group
// --h2o=stream also drops the row of least mass outside the recent half in every decode step, as the paper does.
// **Differs from the paper:** oneshot is the default; a prefill is dense over what is held.
typedef struct { int stream, B; } H2o;                  // B: the budget at the last prefill's end, which decode steps go by

static int h2o_open(Session *s, void *ms) {
    ((H2o *)ms)->stream = !strcmp(opt_str(s->opt, "h2o"), "stream");
    if (s->budget < 1) return refuse(s, "--budget must be at least 1, found %d", s->budget);
    return 0;
}
static int h2o_steady(const Session *s, const void *ms) { (void)s; return !((const H2o *)ms)->stream; }
static void h2o_commit(Session *s, void *ms, int l, const float *q, int T) {
    H2o *x = ms;
    (void)q; (void)T;
    if (!s->decoding) x->B = budget_now(s);
    if (l == s->c->L || s->n_tok <= x->B || (s->decoding && !x->stream)) return;
    size_t mark = scratch_mark(s);
    int recent = x->B / 2, *keep = scratch(s, (size_t)kv_longest(s, l) * sizeof(int));
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        if (KV_DEV(s)) mass_fetch_cuda(s, h);
        kv_keep(s, l, g, keep, keep_best(keep, h->mass, candidates(h, recent), x->B - recent, h->len));
    }
    scratch_reset(s, mark);
}
static const Opt h2o_opts[] = {
    { "h2o", 'c', "oneshot|stream", "drop rows at prefill ends only, or in every decode step too" },
    { NULL, 0, NULL, NULL },
};

// ---- ExpectedAttention. Devoto, Jeblick, Jegou: Expected Attention: KV Cache Compression by Estimating Attention from
// Future Queries Distribution. arXiv 2510.00636.
// Queries before RoPE look Gaussian, so the attention a key will draw from the next 512 positions can be written down:
//   mu <- Rbar mu, Sg <- Rbar Sg Rbar^T,  Rbar = mean RoPE matrix of positions N..N+511
//   z_c = mu.k_c / sqrt(D) + k_c^T Sg k_c / (2D);  score_c = mean over the group of softmax_c(z) times |v_c|
// The first --sink tokens always stay and count inside B; candidates and softmax are the other rows held.
// mu and Sg (divided by the count) are of every query a prefill of the dialogue fed at position >= --sink.
// **Differs from the paper:** applied at every turn's end; a query once counted is not taken back when tokens are truncated.
enum { FUTURE = 512 };                                  // positions Rbar is a mean of
typedef struct { int sink; long *n; double *sum, *outer; } Expected;       // n (L); sum (L,H,D) of q; outer (L,H,D,D) of q q^T, made by the first prefill where q lies

static int expected_open(Session *s, void *ms) {
    Expected *x = ms;
    x->sink = opt_int(s->opt, "sink");
    if (x->sink < 0) return refuse(s, "--sink must not be negative, found %d", x->sink);
    if (s->ratio < 0 && s->budget <= x->sink) return refuse(s, "--budget %d leaves no row beside --sink %d", s->budget, x->sink);
    x->n = xcalloc(s->c->L, sizeof(long));
    return 0;
}
static void expected_close(Session *s, void *ms) {
    Expected *x = ms;
    (void)s;
    free(x->n);
    if (KV_DEV(s)) near_free_cuda((char *)x->sum); else free(x->sum);
}
static size_t expected_bytes(const Session *s, const void *ms) {
    size_t L = s->c->L, H = s->c->H, D = s->c->D;
    (void)ms;
    return L * sizeof(long) + L * H * D * (D + 1) * sizeof(double);
}
static void expected_project(Session *s, void *ms, int l, const float *q, const float *k, const float *v, int T) {
    Expected *x = ms;
    int H = s->c->H, D = s->c->D;
    size_t n = (size_t)s->c->L * H * D;
    (void)k; (void)v;
    if (s->decoding) return;
    if (!x->sum) {
        x->sum = KV_DEV(s) ? (double *)near_zero_cuda(n * (D + 1) * sizeof(double)) : xcalloc(n * (D + 1), sizeof(double));
        x->outer = x->sum + n;
    }
    double *sums = x->sum + (size_t)l * H * D, *outers = x->outer + (size_t)l * H * D * D;
    for (int t = 0; t < T; t++) x->n[l] += s->tok[s->base + t].pos >= x->sink;
    if (KV_DEV(s)) { moments_add_cuda(s, sums, outers, q, T, x->sink); return; }
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        double *sum = sums + (size_t)h * D, *outer = outers + (size_t)h * D * D;
        for (int t = 0; t < T; t++) {
            const float *p = q + ((size_t)t * H + h) * D;
            if (s->tok[s->base + t].pos < x->sink) continue;
            for (int i = 0; i < D; i++) {
                sum[i] += p[i];
                for (int j = 0; j < D; j++) outer[(size_t)i * D + j] += (double)p[i] * p[j];
            }
        }
    }
}
static int expected_steady(const Session *s, const void *ms) { (void)s; (void)ms; return 1; }     // a decode step is not looked at
// cs (D): means of cos over the next FUTURE positions for the D/2 frequencies, then of sin
static void expected_rope(const Session *s, double *cs) {
    int D = s->c->D;
    for (int i = 0; i < D / 2; i++) {
        double c = 0, n = 0;
        for (int p = s->n_tok; p < s->n_tok + FUTURE; p++) { c += cos(p * s->w->inv_freq64[i]); n += sin(p * s->w->inv_freq64[i]); }
        cs[i] = c * s->w->rope_scale / FUTURE;
        cs[D / 2 + i] = n * s->w->rope_scale / FUTURE;
    }
}
static void expected_turn(double *x, size_t step, int D, const double *cs) {    // the vector x[0], x[step], .. (D) times Rbar
    for (int i = 0; i < D / 2; i++) {
        double a = x[i * step], b = x[(i + D / 2) * step];
        x[i * step] = a * cs[i] - b * cs[D / 2 + i];
        x[(i + D / 2) * step] = b * cs[i] + a * cs[D / 2 + i];
    }
}
// mu (D), cov (D,D) of one head's n queries as they will stand at future positions. sum (D), outer (D,D); tmp (D,D+1) is room
static void expected_moments(double n, const double *sum, const double *outer, int D, const double *cs, float *mu, float *cov, double *tmp) {
    double *mean = tmp + (size_t)D * D;
    for (int i = 0; i < D; i++) mean[i] = sum[i] / n;
    for (int i = 0; i < D; i++)
        for (int j = 0; j < D; j++) tmp[(size_t)i * D + j] = outer[(size_t)i * D + j] / n - mean[i] * mean[j];
    for (int i = 0; i < D; i++) expected_turn(tmp + i, D, D, cs);                // columns: Rbar Sg
    for (int i = 0; i < D; i++) expected_turn(tmp + (size_t)i * D, 1, D, cs);    // rows:    .. Rbar^T
    expected_turn(mean, 1, D, cs);
    for (int i = 0; i < D; i++) mu[i] = (float)mean[i];
    for (size_t i = 0; i < (size_t)D * D; i++) cov[i] = (float)tmp[i];
}
static void expected_exponents(const Session *s, const KVHead *hd, int n0, const float *mu, const float *cov, float *buf, float *z) {     // z (N) from row n0 on; buf is room
    int D = s->c->D;
    float *k = buf, *y = k + (size_t)KV_TILE * D, *lin = y + (size_t)KV_TILE * D;
    for (int r = n0; r < hd->len; r += KV_TILE) {
        int m = hd->len - r < KV_TILE ? hd->len - r : KV_TILE;
        kv_load_k(s, hd, NULL, r, m, k);
        attn_scores(lin, mu, k, 1, m, D, 1 / sqrtf((float)D));
        attn_scores(y, cov, k, D, m, D, 1 / (2 * (float)D));                     // y (D,m) = Sg k^T / 2D
        for (int j = 0; j < m; j++) {
            double a = lin[j];
            for (int d = 0; d < D; d++) a += (double)k[(size_t)j * D + d] * y[(size_t)d * m + j];
            z[r + j] = (float)a;
        }
    }
}
static void value_squares(const Session *s, const KVHead *hd, float *v, float *out) {      // out (N): |v|^2; v is room
    int D = s->c->D;
    for (int r = 0; r < hd->len; r += KV_TILE) {
        int m = hd->len - r < KV_TILE ? hd->len - r : KV_TILE;
        kv_load_v(s, hd, NULL, r, m, v);
        for (int j = 0; j < m; j++) out[r + j] = dot_f32(v + (size_t)j * D, v + (size_t)j * D, D);
    }
}
// p (H,N): softmax of z over rows sink[g].. of each query head's KV head g; the rows before are left alone. sq (G,N): |v|^2. sink (G)
static void expected_scores(Session *s, const Expected *x, int l, const int *sink, float *p, float *sq, int N) {
    int H = s->c->H, D = s->c->D, R = H / s->c->G;
    size_t n = (size_t)H * D, room = 2 * (size_t)KV_TILE * D + KV_TILE;
    double *cs = scratch(s, (size_t)D * sizeof(double)), *tmp = scratch(s, (size_t)n_threads() * D * (D + 1) * sizeof(double));
    double *sum = x->sum + (size_t)l * n, *outer = x->outer + (size_t)l * n * D;
    float *mu = scratch(s, n * (D + 1) * sizeof(float)), *cov = mu + n, *buf = scratch(s, n_threads() * room * sizeof(float));
    if (KV_DEV(s)) {
        double *copy = scratch(s, n * (D + 1) * sizeof(double));
        bytes_load_cuda(copy, sum, n * sizeof(double)); bytes_load_cuda(copy + n, outer, n * D * sizeof(double));
        sum = copy; outer = copy + n;
    }
    expected_rope(s, cs);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++)
        expected_moments(x->n[l] ? (double)x->n[l] : 1, sum + (size_t)h * D, outer + (size_t)h * D * D, D, cs, mu + (size_t)h * D, cov + (size_t)h * D * D, tmp + (size_t)thread_id() * D * (D + 1));
    if (KV_DEV(s)) expected_scores_cuda(s, l, mu, cov, p, sq, N);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        const KVHead *hd = kv_head(s, l, h / R);
        float *z = p + (size_t)h * N, max = -INFINITY, all = 0, *own = buf + thread_id() * room;
        int n0 = sink[h / R];
        if (!KV_DEV(s)) expected_exponents(s, hd, n0, mu + (size_t)h * D, cov + (size_t)h * D * D, own, z);
        if (!KV_DEV(s) && h % R == 0) value_squares(s, hd, own, sq + (size_t)(h / R) * N);
        for (int r = n0; r < hd->len; r++) max = fmaxf(max, z[r]);
        exp_shift(z + n0, max, hd->len - n0, &all);
        for (int r = n0; r < hd->len; r++) z[r] /= all;
    }
}
static void expected_commit(Session *s, void *ms, int l, const float *q, int T) {
    Expected *x = ms;
    int B = budget_now(s), G = s->c->G, R = s->c->H / G;
    (void)q; (void)T;
    if (s->decoding || l == s->c->L || s->n_tok <= B) return;
    size_t mark = scratch_mark(s);
    int N = kv_longest(s, l), *keep = scratch(s, (size_t)(N + 1) * sizeof(int)), *sink = scratch(s, (size_t)G * sizeof(int));
    float *p = scratch(s, (size_t)s->c->H * N * sizeof(float)), *one = scratch(s, (size_t)N * sizeof(float));
    float *sq = scratch(s, (size_t)G * N * sizeof(float));
    for (int g = 0; g < G; g++) {
        const KVHead *h = kv_head(s, l, g);
        for (sink[g] = 0; sink[g] < h->len && h->src[sink[g]] < x->sink; ) sink[g]++;
    }
    expected_scores(s, x, l, sink, p, sq, N);
    for (int g = 0; g < G; g++) {
        const KVHead *h = kv_head(s, l, g);
        int n0 = sink[g], n = h->len - n0, first = n0 < B ? n0 : B;
        join_heads(one, p + (size_t)g * R * N + n0, n, N, R, AGG_MEAN);
        for (int r = 0; r < n; r++) one[r] *= sqrtf(sq[(size_t)g * N + n0 + r]);
        int kept = top_k(one, n, B - first, keep + first);
        for (int i = 0; i < first; i++) keep[i] = i;
        for (int i = 0; i < kept; i++) keep[first + i] += n0;
        kv_keep(s, l, g, keep, first + kept);
    }
    scratch_reset(s, mark);
}

// ---- q8, the plain way to halve a cache: every row in blocks of 32 values with one scale (format q8_0)
static int q8_open(Session *s, void *ms) {
    (void)ms;
    if (opt_given(s->opt, "ctk") || opt_given(s->opt, "ctv")) {
        snprintf(s->err, sizeof s->err, "q8: sets -ctk and -ctv to q8_0 itself, leave them out");
        return -1;
    }
    s->fk = s->fv = format_find("q8_0");
    return 0;
}


const Method snapkv_method = {
    .name    = "snapkv",
    .paper   = "SnapKV, arXiv 2404.14469",
    .keeps   = "keeps the rows the last --obs-window queries attend to most, and those last "
               "rows; B in all",
    .limits  = "B must exceed --obs-window",
    .budget  = 1024,
    .uses    = "--obs-window 32, --kernel 7, --gqa-agg mean",
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Snap),
    .open    = snapkv_open,
    .commit  = snapkv_commit,
};

const Method adakv_method = {
    .name    = "adakv",
    .paper   = "Ada-KV, arXiv 2407.11550",
    .keeps   = "snapkv with the budget shared out among a layer's heads by their scores; B a "
               "head on average",
    .limits  = "B must exceed --obs-window",
    .budget  = 1024,
    .uses    = "--obs-window 32, --kernel 7, --gqa-agg mean",
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Snap),
    .open    = snapkv_open,
    .commit  = adakv_commit,
};

const Method pyramidkv_method = {
    .name    = "pyramidkv",
    .paper   = "PyramidKV, arXiv 2406.02069",
    .keeps   = "snapkv with budgets that fall from the first layer to the last; B a head on "
               "average",
    .limits  = "B must exceed --obs-window; snapkv while fewer than 2 (B - w) tokens were seen",
    .budget  = 1024,
    .uses    = "--obs-window 32, --kernel 7, --gqa-agg mean",
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Snap),
    .open    = snapkv_open,
    .commit  = pyramidkv_commit,
};

const Method h2o_method = {
    .name    = "h2o",
    .paper   = "H2O, arXiv 2306.14048",
    .keeps   = "keeps the last B/2 rows and the B/2 others that drew most attention so far",
    .limits  = "needs a dense prefill, so no loopserve-p",
    .budget  = 1024,
    .opts    = h2o_opts,
    .role    = ROLE_SELECT | ROLE_PREFILL,
    .wants   = KV_MASS,
    .evicts  = 1,
    .state   = sizeof(H2o),
    .open    = h2o_open,
    .steady  = h2o_steady,
    .commit  = h2o_commit,
};

const Method expected_attention_method = {
    .name    = "expected-attention",
    .paper   = "Expected Attention, arXiv 2510.00636",
    .keeps   = "keeps the first --sink rows and those future queries are expected to attend "
               "to; B in all",
    .limits  = "B must exceed --sink",
    .budget  = 1024,
    .uses    = "--sink 4",
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Expected),
    .open    = expected_open,
    .close   = expected_close,
    .project = expected_project,
    .steady  = expected_steady,
    .commit  = expected_commit,
    .bytes   = expected_bytes,
};

const Method q8_method = {
    .name    = "q8",
    .paper   = "blocks of 32 values with one f16 scale, as llama.cpp's q8_0",
    .keeps   = "keeps every row at 8.5 bits an element",
    .limits  = "sets -ctk and -ctv itself",
    .role    = ROLE_STORE,
    .open    = q8_open,
};

// ==================================================================================================== 7 SPARSE PREFILL BASELINES
// Prefill attention over lines, and three methods that fix the lines beforehand. In the matrix of n - p0 new rows r (queries)
// against n rows held (columns c <= r), a vertical c is the column c, and a slash o is the diagonal of the cells (r, r-o).
// Row r of a head with verticals V and slashes S attends, with one softmax, to
//   M(r) = { c in V : c <= r }  u  { r-o : o in S, o <= r }
// in the head's own row numbers (rules.md B27). Under tile64 the slashes are rounded up to what a GPU block of 64 rows reads:
// whole ranges of columns (block_index). LoopServe (section 11) chooses its lines anew in every prefill and uses the same code.
//   a-shape      V = the first --a-shape-init columns, S = the last --a-shape-local       (arXiv 2309.17453, as a prefill mask)
//   tri-shape    the same, and the last --tri-shape-last rows see everything              (SCBench, arXiv 2412.10319)
//   minference   V, S = the heaviest columns and diagonals of the last 64 rows; tile64    (MInference, arXiv 2407.02490)
// **Differs from MInference:** one size (--minference-verticals, -slashes) for all heads instead of an offline search per head.

typedef struct { int lo, hi; } LineRange;                    // [lo,hi)

enum { LINE_BLOCK = 64 };                                // rows done together, counted from p0; at most Q_BLOCK

static int  bit_get(const uint64_t *b, int i) { return (int)(b[i >> 6] >> (i & 63) & 1); }
static void bit_set(uint64_t *b, int i) { b[i >> 6] |= (uint64_t)1 << (i & 63); }
static int bit_list(const uint64_t *b, int n, int *list) {          // the set bits below n, ascending -> count; NULL: count only
    int k = 0;
    for (int w = 0; w < (n + 63) / 64; w++)
        for (uint64_t u = b[w]; u; u &= u - 1) { if (list) list[k] = w * 64 + __builtin_ctzll(u); k++; }
    return k;
}
static int bit_runs(const uint64_t *b, int n, LineRange *run) {         // maximal runs of set bits, ascending -> count
    int k = 0;
    for (int i = 0; i < n; ) {
        if (!b[i >> 6]) { i = (i | 63) + 1; continue; }
        int j = i;
        while (j < n && bit_get(b, j)) j++;
        if (j > i) run[k++] = (LineRange){ i, j };
        i = j + 1;
    }
    return k;
}
static void lines_clear(Lines *a) { memset(a->v, 0, bit_bytes(a->n)); memset(a->s, 0, bit_bytes(a->n)); }
// One Lines a query head, empty, in scratch; n and p0 from the rows held now.
static Lines *lines_new(Session *s, int l, int T) {
    int H = s->c->H, R = H / s->c->G;
    Lines *a = scratch(s, (size_t)H * sizeof *a);
    for (int h = 0; h < H; h++) {
        int n = kv_head(s, l, h / R)->len;
        a[h] = (Lines){ .n = n, .p0 = n - T, .v = scratch(s, bit_bytes(n)), .s = scratch(s, bit_bytes(n)) };
        lines_clear(&a[h]);
    }
    return a;
}
static long line_len(int x, int p0, int n) { return n - (x > p0 ? x : p0); }      // cells of vertical x, and as many of slash x

// What the 64 rows from p0+b read: disjoint ascending ranges of columns, and single columns outside of them, all left of the
// block (a column inside it lies in the range of offset 0). run (n_run): the runs of S; v (nv): V, ascending. -> ranges
static int block_index(const Lines *a, int b, const LineRange *run, int n_run, const int *v, int nv,
                       LineRange *range, int *cols, int *n_cols) {
    int s0 = a->p0 + b, E = s0 + LINE_BLOCK < a->n ? s0 + LINE_BLOCK : a->n, k = 0, at = 0;
    for (int j = n_run - 1; j >= 0; j--) {               // offsets descending: columns ascending
        if (run[j].lo >= E) continue;
        int lo = s0 - run[j].hi + 1, hi = E - run[j].lo;
        if (lo < 0) lo = 0;
        if (k && lo <= range[k - 1].hi) range[k - 1].hi = hi;
        else range[k++] = (LineRange){ lo, hi };
    }
    *n_cols = 0;
    for (int j = 0; j < nv && v[j] < s0; j++) {
        while (at < k && range[at].hi <= v[j]) at++;
        if (at == k || v[j] < range[at].lo) cols[(*n_cols)++] = v[j];
    }
    return k;
}

// ---- how one head is computed. Chosen offsets that stand close together are done as one band, scored as a whole and masked;
// the others diagonal by diagonal: each of their cells reads its own rows, at LONE_CELL times the cost of a cell in a band.
enum { LONE_CELL = 8 };

typedef struct { int a, b, used, run0, run1; } LineBand; // runs run0..run1-1: `used` offsets chosen among [a,b)
typedef struct {
    const Lines *line;
    LineRange *run; int n_run;  // all runs of S; exact lines: those outside the bands
    int *v; int nv;
    float *kv, *vv;             // (nv,D) rows of V, gathered; exact lines only
    LineBand *band; int n_band;
    float *miss;                // (n) miss[n-1-o] = 0 where offset o is chosen, else -INFINITY; exact lines only
} LinePlan;

static int band_whole(const LineBand *b) { return b->b - b->a + LINE_BLOCK - 1 <= LONE_CELL * b->used; }
static int band_cost(const LineBand *b)  { return band_whole(b) ? b->b - b->a + LINE_BLOCK - 1 : LONE_CELL * b->used; }
static void plan_bands(LinePlan *p) {                    // neighbours join while that costs no more
    LineBand *d = p->band;
    int k = 0, lone = 0, n = 0;
    for (int j = 0; j < p->n_run; j++) {
        LineBand one = { p->run[j].lo, p->run[j].hi, p->run[j].hi - p->run[j].lo, j, j + 1 };
        if (k) {
            LineBand both = { d[k - 1].a, one.b, d[k - 1].used + one.used, d[k - 1].run0, j + 1 };
            if (band_cost(&both) <= band_cost(&d[k - 1]) + band_cost(&one)) { d[k - 1] = both; continue; }
        }
        d[k++] = one;
    }
    for (int j = 0; j < k; j++) {
        if (band_whole(&d[j])) { d[n++] = d[j]; continue; }
        for (int r = d[j].run0; r < d[j].run1; r++) p->run[lone++] = p->run[r];
    }
    p->n_band = n;
    p->n_run = lone;
}
static LinePlan plan_new(Session *s, const Lines *a, const float *K, const float *V) {
    LinePlan p = { .line = a };
    size_t row = (size_t)s->c->D * sizeof(float);
    if (a->dense) return p;
    p.v = scratch(s, (size_t)bit_list(a->v, a->n, NULL) * sizeof(int));
    p.nv = bit_list(a->v, a->n, p.v);
    p.run = scratch(s, ((size_t)bit_list(a->s, a->n, NULL) + 1) * sizeof(LineRange));
    p.n_run = bit_runs(a->s, a->n, p.run);
    if (a->tile64) return p;
    p.band = scratch(s, (size_t)p.n_run * sizeof(LineBand));
    plan_bands(&p);
    p.miss = scratch(s, (size_t)a->n * sizeof(float));
    for (int o = 0; o < a->n; o++) p.miss[a->n - 1 - o] = bit_get(a->s, o) ? 0 : -INFINITY;
    p.kv = scratch(s, p.nv * row); p.vv = scratch(s, p.nv * row);
    #pragma omp parallel for schedule(static) if (worth_threads((size_t)p.nv * s->c->D))
    for (int j = 0; j < p.nv; j++) {
        memcpy(p.kv + (size_t)j * s->c->D, K + (size_t)p.v[j] * s->c->D, row);
        memcpy(p.vv + (size_t)j * s->c->D, V + (size_t)p.v[j] * s->c->D, row);
    }
    return p;
}

// ---- one block of rows r0..r0+m-1 of one head against the unpacked rows K, V (n,D) of its KV head
typedef struct {
    Tile *t;
    const float *K, *V;
    int D, m, r0;
    int first[LINE_BLOCK];      // the first row each query may see: 0, or where its sliding window begins
} RowBlock;

static void block_scores(RowBlock *b, const float *k, int n) {
    attn_scores(b->t->sc, b->t->q, k, b->m, n, b->D, 1 / sqrtf((float)b->D));
}

// Columns [lo,hi), of which row r sees those up to itself and, when a band of p is given, at a chosen offset of the band.
static void fold_range(RowBlock *b, int lo, int hi, const LinePlan *p, const LineBand *band) {
    int gaps = band && band->used < band->b - band->a;
    for (int c = lo; c < hi; c += KV_TILE) {
        int n = hi - c < KV_TILE ? hi - c : KV_TILE;
        block_scores(b, b->K + (size_t)c * b->D, n);
        for (int i = 0; i < b->m; i++) {
            float *sc = b->t->sc + (size_t)i * n;
            int r = b->r0 + i, from = band ? r - band->b + 1 : 0, to = r + 1 - (band ? band->a : 0);     // columns [from,to)
            if (from < b->first[i]) from = b->first[i];
            for (int j = 0; j < n && c + j < from; j++) sc[j] = -INFINITY;
            for (int j = to > c ? to - c : 0; j < n; j++) sc[j] = -INFINITY;
            if (!gaps || to <= c) continue;
            const float *miss = p->miss + (p->line->n - 1 - (r - c));            // offset r - c - j stands at miss[j]
            for (int j = from > c ? from - c : 0, e = to - c < n ? to - c : n; j < e; j++) sc[j] += miss[j];
        }
        tile_fold(b->t, b->m, n, b->D, b->V + (size_t)c * b->D);
    }
}
// n <= KV_TILE single columns c with gathered rows k, v (n,D). a given: cells that lie on a chosen slash are not counted twice.
static void fold_columns(RowBlock *b, const int *c, int n, const float *k, const float *v, const Lines *a) {
    block_scores(b, k, n);
    for (int i = 0; i < b->m; i++)
        for (int j = 0; j < n; j++) {
            int o = b->r0 + i - c[j];
            if (o < 0 || c[j] < b->first[i] || (a && bit_get(a->s, o))) b->t->sc[(size_t)i * n + j] = -INFINITY;
        }
    tile_fold(b->t, b->m, n, b->D, v);
}
// Row i at the offsets of run: columns [*lo,*hi) of which it sees some; -> the column of the run's first cell
static int run_columns(const RowBlock *b, int i, const LineRange *run, int *lo, int *hi) {
    int r = b->r0 + i, first = r - run->hi + 1;
    *lo = first > b->first[i] ? first : b->first[i];
    *hi = r - run->lo + 1 > *lo ? r - run->lo + 1 : *lo;
    return first;
}
// Narrow runs of offsets, KV_TILE cells a row at a time. Run by run and not row by row: the rows read then follow each other.
static void fold_runs(RowBlock *b, const LineRange *run, int n_run) {
    Tile *t = b->t;
    int D = b->D, lo, hi;
    float scale = 1 / sqrtf((float)D);
    for (int a = 0, e; a < n_run; a = e) {
        int n = 0, at = 0;
        for (e = a; e < n_run && n + run[e].hi - run[e].lo <= KV_TILE; e++) n += run[e].hi - run[e].lo;
        for (int j = a; j < e; at += run[j].hi - run[j].lo, j++)
            for (int i = 0; i < b->m; i++) {
                int first = run_columns(b, i, &run[j], &lo, &hi);
                float *p = t->sc + (size_t)i * n + at;
                for (int c = 0; c < run[j].hi - run[j].lo; c++) p[c] = -INFINITY;
                if (hi > lo) attn_scores(p + (lo - first), t->q + (size_t)i * D, b->K + (size_t)lo * D, 1, hi - lo, D, scale);
            }
        tile_fold(t, b->m, n, D, NULL);
        at = 0;
        for (int j = a; j < e; at += run[j].hi - run[j].lo, j++)
            for (int i = 0; i < b->m; i++) {
                int first = run_columns(b, i, &run[j], &lo, &hi);
                attn_mix(t->acc + (size_t)i * D, t->sc + (size_t)i * n + at + (lo - first), b->V + (size_t)lo * D, 1, hi - lo, D);
            }
    }
}
static void block_exact(RowBlock *b, const LinePlan *p) {
    const Lines *a = p->line;
    int last = b->r0 + b->m - 1, n_run = p->n_run;
    for (int j = 0; j < p->n_band && p->band[j].a <= last; j++) {
        const LineBand *d = &p->band[j];
        fold_range(b, b->r0 - d->b + 1 > 0 ? b->r0 - d->b + 1 : 0, last - d->a + 1, p, d);
    }
    while (n_run && p->run[n_run - 1].lo > last) n_run--;
    fold_runs(b, p->run, n_run);
    for (int j = 0; j < p->nv && p->v[j] <= last; j += KV_TILE) {
        size_t at = (size_t)j * b->D;
        fold_columns(b, p->v + j, p->nv - j < KV_TILE ? p->nv - j : KV_TILE, p->kv + at, p->vv + at, a);
    }
}
static void block_tiles(RowBlock *b, const LinePlan *p, LineRange *range, int *cols) {
    int n_cols, n_range = block_index(p->line, b->r0 - p->line->p0, p->run, p->n_run, p->v, p->nv, range, cols, &n_cols), D = b->D;
    for (int j = 0; j < n_range; j++) fold_range(b, range[j].lo, range[j].hi, NULL, NULL);
    for (int j = 0; j < n_cols; j += KV_TILE) {
        int n = n_cols - j < KV_TILE ? n_cols - j : KV_TILE;
        for (int i = 0; i < n; i++) {
            memcpy(b->t->k + (size_t)i * D, b->K + (size_t)cols[j + i] * D, (size_t)D * sizeof(float));
            memcpy(b->t->v + (size_t)i * D, b->V + (size_t)cols[j + i] * D, (size_t)D * sizeof(float));
        }
        fold_columns(b, cols + j, n, b->t->k, b->t->v, NULL);
    }
}
static void window_starts(const Session *s, int l, const KVHead *hd, RowBlock *b) {
    int w = layer_window(s, l), c = 0;
    for (int i = 0; i < b->m; i++) {                     // positions rise with the rows, so c only moves on
        while (w && s->tok[hd->src[c]].pos <= s->tok[hd->src[b->r0 + i]].pos - w) c++;     // by token, as kv_visible does
        b->first[i] = c;
    }
}
// The R heads of KV head g over their lines. out, q (T,H,D)
static void group_attend(Session *s, int l, int g, const Lines *lines, float *out, const float *q, int T, Tile *tiles) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G, blocks = (T + LINE_BLOCK - 1) / LINE_BLOCK;
    const KVHead *hd = kv_head(s, l, g);
    size_t mark = scratch_mark(s), n = hd->len;
    float *K = scratch(s, n * D * sizeof(float)), *V = scratch(s, n * D * sizeof(float));
    LinePlan *plan = scratch(s, (size_t)R * sizeof *plan);
    LineRange *range = scratch(s, (size_t)n_threads() * n * sizeof *range);
    int *cols = scratch(s, (size_t)n_threads() * n * sizeof *cols);
    #pragma omp parallel for schedule(static) if (worth_threads(n * D))
    for (int r = 0; r < hd->len; r += KV_TILE) {
        int m = hd->len - r < KV_TILE ? hd->len - r : KV_TILE;
        kv_load_k(s, hd, NULL, r, m, K + (size_t)r * D);
        kv_load_v(s, hd, NULL, r, m, V + (size_t)r * D);
    }
    for (int r = 0; r < R; r++) plan[r] = plan_new(s, &lines[g * R + r], K, V);
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)T * n * R * D))
    for (int item = R * blocks - 1; item >= 0; item--) { // long rows first: threads finish together
        int h = g * R + item % R, t0 = item / R * LINE_BLOCK;
        RowBlock b = { &tiles[thread_id()], K, V, D, T - t0 < LINE_BLOCK ? T - t0 : LINE_BLOCK, hd->len - T + t0, {0} };
        const float *from = q + ((size_t)t0 * H + h) * D;
        for (int i = 0; i < b.m; i++) memcpy(b.t->q + (size_t)i * D, from + (size_t)i * H * D, (size_t)D * sizeof(float));
        window_starts(s, l, hd, &b);
        tile_begin(b.t, b.m, D);
        if (lines[h].dense) fold_range(&b, 0, b.r0 + b.m, NULL, NULL);
        else if (lines[h].tile64) block_tiles(&b, &plan[item % R], range + thread_id() * n, cols + thread_id() * n);
        else block_exact(&b, &plan[item % R]);
        for (int i = 0; i < b.m; i++)
            for (int d = 0; d < D; d++) out[((size_t)(t0 + i) * H + h) * D + d] = b.t->acc[(size_t)i * D + d] / b.t->sum[i];
    }
    scratch_reset(s, mark);
}
// Prefill attention of all heads over their lines (H); when every head is dense, full attention bit for bit. out, q (T,H,D)
static void lines_attend(Session *s, int l, const Lines *lines, float *out, const float *q, int T) {
    int dense = 0, H = s->c->H;
    for (int h = 0; h < H; h++) dense += lines[h].dense;
    if (dense == H) { attn_prefill(s, l, out, q, 0, T); return; }
    if (KV_DEV(s)) { lines_attend_cuda(s, l, lines, out, q, T); return; }
    size_t mark = scratch_mark(s);
    Tile *tiles = tiles_new(s);
    for (int g = 0; g < s->c->G; g++) group_attend(s, l, g, lines, out, q, T, tiles);
    scratch_reset(s, mark);
}
static int lines_open(Session *s, const char *name) {    // what every method with line attention needs of the parts beside it
    for (int i = 0; i < s->n_part; i++)
        if (s->part[i].m->rule != VIS_CAUSAL) {
            snprintf(s->err, sizeof s->err, "%s and %s cannot be combined: the first knows causal masks only", name,
                     s->part[i].m->name);
            return -1;
        }
    return 0;
}
static int opt_least(Session *s, const char *name, int least, int *value) {        // an int option, refused below its least value
    *value = opt_int(s->opt, name);
    if (*value >= least) return 0;
    snprintf(s->err, sizeof s->err, "--%s must be at least %d, found %d", name, least, *value);
    return -1;
}

// ---- A-shape and Tri-shape: fixed lines
typedef struct { int init, local, last; } LineShape;

static int a_shape_open(Session *s, void *ms) {
    LineShape *x = ms;
    if (lines_open(s, "a-shape") || opt_least(s, "a-shape-init", 0, &x->init)) return -1;
    return opt_least(s, "a-shape-local", 1, &x->local);
}
static int tri_shape_open(Session *s, void *ms) {
    LineShape *x = ms;
    if (lines_open(s, "tri-shape") || opt_least(s, "tri-shape-init", 0, &x->init)) return -1;
    return opt_least(s, "tri-shape-local", 1, &x->local) || opt_least(s, "tri-shape-last", 0, &x->last) ? -1 : 0;
}
static void shape_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    LineShape *x = ms;
    size_t mark = scratch_mark(s), row = (size_t)s->c->H * s->c->D;
    Lines *a = lines_new(s, l, T);
    int last = x->last < T ? x->last : T;
    for (int h = 0; h < s->c->H; h++) {
        a[h].dense = a[h].n - x->init <= x->local;      // row n-1 lacks columns [init,n-local) only
        for (int c = 0; c < a[h].n && c < x->init; c++) bit_set(a[h].v, c);
        for (int o = 0; o < a[h].n && o < x->local; o++) bit_set(a[h].s, o);
    }
    lines_attend(s, l, a, out, q, T);
    if (last) attn_prefill(s, l, out + (T - last) * row, q + (T - last) * row, T - last, last);
    scratch_reset(s, mark);
}

// ---- softmax rows of a few queries of one head: what MInference and LoopServe look at
// P (m,n): the probabilities of query row R[i] of head h over its n rows, 0 where it may not look. q (T,H,D) are the queries of the last T rows
static void line_probs(const Session *s, int l, int h, const float *q, int T, const int *R, int m, float *P, Tile *t) {
    int D = s->c->D, H = s->c->H, per = H / s->c->G;
    const KVHead *hd = kv_head(s, l, h / per);
    int n = hd->len, p0 = n - T;
    for (int i0 = 0; i0 < m; i0 += Q_BLOCK) {
        int mb = m - i0 < Q_BLOCK ? m - i0 : Q_BLOCK;
        for (int i = 0; i < mb; i++) {
            memcpy(t->q + (size_t)i * D, q + ((size_t)(R[i0 + i] - p0) * H + h) * D, (size_t)D * sizeof(float));
            t->tok[i] = hd->src[R[i0 + i]];
        }
        for (int r = 0; r < n; r += KV_TILE) {
            int nr = n - r < KV_TILE ? n - r : KV_TILE;
            kv_load_k(s, hd, NULL, r, nr, t->k);
            tile_scores(s, l, hd, t, mb, NULL, r, nr);
            for (int i = 0; i < mb; i++) memcpy(P + (size_t)(i0 + i) * n + r, t->sc + (size_t)i * nr, (size_t)nr * sizeof(float));
        }
    }
    for (int i = 0; i < m; i++) {
        float *p = P + (size_t)i * n, sum = 0;
        exp_shift(p, max_f32(p, n), n, &sum);
        for (int c = 0; c < n; c++) p[c] *= 1 / sum;
    }
}

// ---- MInference, the vertical-slash kind
typedef struct { int nv, ns; } Minference;
enum { MINF_LAST = 64, MINF_V = 30, MINF_S = 100 };      // rows looked at; columns and offsets always taken

static int minference_open(Session *s, void *ms) {
    Minference *x = ms;
    double ratio = opt_real(s->opt, "minference-ratio");
    if (lines_open(s, "minference")) return -1;
    if (opt_least(s, "minference-verticals", 0, &x->nv) || opt_least(s, "minference-slashes", 0, &x->ns)) return -1;
    if (ratio < 0) return refuse(s, "--minference-ratio must not be negative, found %g", ratio);
    x->nv = (int)fmin(x->nv * ratio, INT_MAX); x->ns = (int)fmin(x->ns * ratio, INT_MAX);
    return 0;
}
// sum, idx (n)
static void minference_lines(const Minference *x, Lines *a, const int *R, int m, const float *P, float *sum, int *idx) {
    for (int slash = 0; slash < 2; slash++) {
        int least = slash ? MINF_S : MINF_V, want = slash ? x->ns : x->nv;
        memset(sum, 0, (size_t)a->n * sizeof(float));
        for (int i = 0; i < m; i++)
            for (int c = 0; c <= R[i]; c++) sum[slash ? R[i] - c : c] += P[(size_t)i * a->n + c];
        for (int j = 0; j < a->n && j < least; j++) sum[j] = INFINITY;
        int k = top_k(sum, a->n, want > least ? want : least, idx);
        for (int j = 0; j < k; j++) bit_set(slash ? a->s : a->v, idx[j]);
    }
}
static void minference_device(Session *s, const Minference *x, int l, const float *q, int T, Lines *a, int m) {     // a (H): dense is set, lines are chosen
    int G = s->c->G, R = s->c->H / G, N = kv_longest(s, l), ng = line_batch_cuda(s, l, m), heads = ng * R, t[MINF_LAST];
    int *idx = scratch(s, (size_t)heads * N * sizeof(int)), *n = scratch(s, (size_t)3 * heads * sizeof(int)), *k = n + heads, *found = k + heads;
    for (int i = 0; i < m; i++) t[i] = T - m + i;
    for (int g = 0; g < G; g += ng, a += heads) {
        float *P = line_probs_cuda(s, l, g, ng, q, T, t, m);
        for (int slash = 0; slash < 2; slash++) {
            int least = slash ? MINF_S : MINF_V, want = slash ? x->ns : x->nv;
            for (int i = 0; i < heads; i++) { n[i] = a[i].n; k[i] = want > least ? want : least; }
            top_k_rows(s, line_sums_cuda(s, l, g, ng, P, T, m, slash, least), heads, N, n, k, idx, N, found);
            for (int i = 0; i < heads; i++) for (int j = 0; j < found[i]; j++) bit_set(slash ? a[i].s : a[i].v, idx[(size_t)i * N + j]);
        }
    }
}
static void minference_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    int H = s->c->H, N = kv_longest(s, l), m = T < MINF_LAST ? T : MINF_LAST;
    size_t mark = scratch_mark(s), room = (size_t)n_threads();
    Lines *a = lines_new(s, l, T);
    Tile *tiles = tiles_new(s);
    float *P = scratch(s, room * m * N * sizeof(float)), *sum = scratch(s, room * N * sizeof(float));
    int *idx = scratch(s, room * N * sizeof(int));
    double t = now();
    for (int h = 0; h < H; h++) {
        a[h].tile64 = 1;
        a[h].dense = a[h].n <= MINF_S;                   // the offsets always taken are every cell
    }
    if (KV_DEV(s)) minference_device(s, ms, l, q, T, a, m);
    #pragma omp parallel for schedule(dynamic) if (!KV_DEV(s) && worth_threads((size_t)m * N * H * s->c->D))
    for (int h = 0; h < H; h++) {
        int id = thread_id(), R[MINF_LAST];
        if (a[h].dense || KV_DEV(s)) continue;
        for (int i = 0; i < m; i++) R[i] = a[h].n - m + i;
        line_probs(s, l, h, q, T, R, m, P + (size_t)id * m * N, &tiles[id]);
        minference_lines(ms, &a[h], R, m, P + (size_t)id * m * N, sum + (size_t)id * N, idx + (size_t)id * N);
    }
    timed(&s->clk.index, t);
    lines_attend(s, l, a, out, q, T);
    scratch_reset(s, mark);
}
static const Opt a_shape_opts[] = {
    { "a-shape-init", 'i', "128", "first columns every row sees" },
    { "a-shape-local", 'i', "3968", "last columns every row sees, itself included" },
    { NULL, 0, NULL, NULL } };
static const Opt tri_shape_opts[] = {
    { "tri-shape-init", 'i', "128", "first columns every row sees" },
    { "tri-shape-local", 'i', "3968", "last columns every row sees, itself included" },
    { "tri-shape-last", 'i', "100", "last rows of a turn that see everything" },
    { NULL, 0, NULL, NULL } };
static const Opt minference_opts[] = {
    { "minference-verticals", 'i', "1000", "columns a head, 30 at least" },
    { "minference-slashes", 'i', "6096", "diagonals a head, 100 at least" },
    { "minference-ratio", 'f', "1", "factor on both, for short contexts" },
    { NULL, 0, NULL, NULL } };


const Method a_shape_method = {
    .name    = "a-shape",
    .paper   = "A-shape prefill mask, after StreamingLLM, arXiv 2309.17453",
    .keeps   = "keeps every row; a prefill row reads the first --a-shape-init and the last "
               "--a-shape-local (saves reads only)",
    .limits  = "decides the prefill attention only; combine it with a decode method by +",
    .opts    = a_shape_opts,
    .role    = ROLE_PREFILL,
    .state   = sizeof(LineShape),
    .open    = a_shape_open,
    .attend  = shape_attend,
};

const Method tri_shape_method = {
    .name    = "tri-shape",
    .paper   = "Tri-shape, SCBench, arXiv 2412.10319",
    .keeps   = "keeps every row; a-shape in which a turn's last --tri-shape-last rows read "
               "everything (saves reads only)",
    .limits  = "decides the prefill attention only; combine it with a decode method by +",
    .opts    = tri_shape_opts,
    .role    = ROLE_PREFILL,
    .state   = sizeof(LineShape),
    .open    = tri_shape_open,
    .attend  = shape_attend,
};

const Method minference_method = {
    .name    = "minference",
    .paper   = "MInference 1.0, arXiv 2407.02490",
    .keeps   = "keeps every row; prefill reads the heaviest columns and diagonals of a turn's "
               "last 64 rows (saves reads only)",
    .limits  = "decides the prefill attention only; combine it with a decode method by +. Its "
               "sizes are for 32k rows and more: on short contexts give a small "
               "--minference-ratio",
    .opts    = minference_opts,
    .role    = ROLE_PREFILL,
    .state   = sizeof(Minference),
    .open    = minference_open,
    .attend  = minference_attend,
};

// ==================================================================================================== 8 QUEST
// Tang, Zhao, Zhu, Xiao, Kasikci, Han: Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference. arXiv 2406.10774.
// Rows are read in pages of 16. The smallest and largest key value of a page, channel by channel, bound q.k for every row in it:
//   u(page) = sum_d max(q_d max_d, q_d min_d) >= q.k        for every key k of the page
// A decode step reads the pages with the largest bound and the page it writes to. Nothing is dropped.
// **Differs from the paper** (rules.md A8): one page set per KV head, u is the largest over its query heads; the current page is
// always read, inside the budget, and takes no part in the ranking; a budget that covers the context reads every row.
// Options: --budget (1024; at least 3 pages are read), --quest-full-layers (2: the first layers read everything).

typedef struct {
    int full_layers, B;         // B: budget of this turn
    int dtype;                  // of the bounds: that of the rows, so bounds are exact
    struct { int n, cap; char *bound; } *head;      // (L,G) full pages; bound (n,2D): largest, then smallest
} Quest;

static int quest_open(Session *s, void *ms) {
    Quest *x = ms;
    x->full_layers = opt_int(s->opt, "quest-full-layers");
    if (x->full_layers < 0) return refuse(s, "--quest-full-layers must not be negative, found %d", x->full_layers);
    x->B = s->budget;
    x->dtype = !strcmp(s->fk->name, "f16") ? DT_F16 : !strcmp(s->fk->name, "bf16") ? DT_BF16 : DT_F32;
    x->head = xcalloc((size_t)s->c->L * s->c->G, sizeof *x->head);
    return 0;
}
static void quest_close(Session *s, void *ms) {
    Quest *x = ms;
    for (int i = 0; x->head && i < s->c->L * s->c->G; i++) { if (KV_DEV(s)) near_free_cuda(x->head[i].bound); else free(x->head[i].bound); }
    free(x->head);
}
static void quest_room(Session *s, Quest *x, int i, int pages, size_t row) {     // of head i
    int old = x->head[i].cap;
    if (pages <= old) return;
    s->changes++;
    x->head[i].cap = pages + pages / 4 + 4;
    if (KV_DEV(s)) x->head[i].bound = near_grow_cuda(x->head[i].bound, old * row, x->head[i].cap * row);
    else x->head[i].bound = xrealloc(x->head[i].bound, x->head[i].cap * row);
}
static void page_bounds(const Session *s, const KVHead *hd, int page, float *rows, float *bound) {     // rows (PAGE,D) is room; bound (2D)
    int D = s->c->D;
    kv_load_k(s, hd, NULL, page * PAGE, PAGE, rows);
    for (int d = 0; d < D; d++) {
        float hi = rows[d], lo = rows[d];
        for (int r = 1; r < PAGE; r++) { float k = rows[(size_t)r * D + d]; hi = k > hi ? k : hi; lo = k < lo ? k : lo; }
        bound[d] = hi; bound[D + d] = lo;
    }
}
static void quest_commit(Session *s, void *ms, int l, const float *q, int T) {
    Quest *x = ms;
    int G = s->c->G, D = s->c->D;
    size_t row = (size_t)2 * D * dtype_size(x->dtype), mark = scratch_mark(s);
    (void)q; (void)T;
    if (l == s->c->L && !s->decoding) x->B = budget_now(s);
    if (l == s->c->L || l < x->full_layers) return;
    float *room = scratch(s, (size_t)n_threads() * (PAGE + 2) * D * sizeof(float));
    for (int g = 0; g < G; g++) {
        int i = l * G + g, n = kv_head(s, l, g)->len / PAGE;
        quest_room(s, x, i, n, row);
        if (!KV_DEV(s) || n <= x->head[i].n) continue;
        page_bounds_cuda(s, l, g, x->head[i].bound, x->head[i].n, n, x->dtype);
        x->head[i].n = n;
    }
    #pragma omp parallel for schedule(static) if (T > PAGE)
    for (int g = 0; g < G; g++) {
        const KVHead *hd = kv_head(s, l, g);
        float *rows = room + (size_t)thread_id() * (PAGE + 2) * D, *bound = rows + (size_t)PAGE * D;
        int i = l * G + g, n = hd->len / PAGE;
        for (int p = x->head[i].n; p < n; p++) {
            page_bounds(s, hd, p, rows, bound);
            from_f32(x->head[i].bound + p * row, bound, x->dtype, (size_t)2 * D);
        }
        x->head[i].n = n;
    }
    scratch_reset(s, mark);
}
// u of pages 0..n-1 (n): the largest over the R query heads. With q split into its positive and negative part, u is one dot
// product: max(q max, q min) = q+ max + q- min, channel by channel.
static void page_scores(const Quest *x, const char *bound, int n, const float *q, int R, int D, float *split, float *sc, float *u) {
    for (int h = 0; h < R; h++)
        for (int d = 0; d < D; d++) {
            float a = q[(size_t)h * D + d];
            split[(size_t)h * 2 * D + d] = a > 0 ? a : 0;
            split[(size_t)h * 2 * D + D + d] = a > 0 ? 0 : a;
        }
    matmul(sc, split, &(Tensor){ bound, x->dtype, n, 2 * D }, R);
    for (int p = 0; p < n; p++) u[p] = sc[p];
    for (int h = 1; h < R; h++)
        for (int p = 0; p < n; p++) u[p] = sc[(size_t)h * n + p] > u[p] ? sc[(size_t)h * n + p] : u[p];
}
static float *quest_scores(Session *s, const Quest *x, int l, const float *q, int pages) {       // (G,pages)
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    size_t per = (size_t)2 * R * D + (size_t)R * pages;
    float *room = scratch(s, (size_t)n_threads() * per * sizeof(float)), *u = scratch(s, (size_t)G * pages * sizeof(float));
    #pragma omp parallel for schedule(static) if (pages > 64)
    for (int g = 0; g < G; g++) {
        float *split = room + (size_t)thread_id() * per;
        page_scores(x, x->head[l * G + g].bound, pages, q + (size_t)g * R * D, R, D, split, split + (size_t)2 * R * D, u + (size_t)g * pages);
    }
    return u;
}
static void quest_select_host(Session *s, const Quest *x, int l, const float *q, int pages, int best) {
    int G = s->c->G, *idx = scratch(s, (size_t)G * best * sizeof(int)), *rows = scratch(s, (size_t)best * PAGE * sizeof(int));
    int *n = scratch(s, (size_t)3 * G * sizeof(int)), *k = n + G, *found = k + G;
    for (int g = 0; g < G; g++) { n[g] = pages; k[g] = best; }
    top_k_rows(s, quest_scores(s, x, l, q, pages), G, pages, n, k, idx, best, found);
    for (int g = 0; g < G; g++) {
        for (int i = 0; i < found[g] * PAGE; i++) rows[i] = idx[g * best + i / PAGE] * PAGE + i % PAGE;
        view_group(s, l, g, rows, found[g] * PAGE, pages * PAGE);
    }
}
static int quest_dense(const Quest *x) { return x->B > PAGE ? x->B : PAGE; }     // up to so many tokens every row is read
static int quest_steady(const Session *s, const void *ms) { return s->n_tok != quest_dense(ms) + 1; }
static void quest_select(Session *s, void *ms, int l, const float *q) {
    Quest *x = ms;
    int G = s->c->G, pages = (s->n_tok - 1) / PAGE, best = (x->B / PAGE > 3 ? x->B / PAGE : 3) - 1;        // the current page is read too
    if (l < x->full_layers || s->n_tok <= quest_dense(x)) return;          // the views say: every row
    double t0 = now();
    size_t mark = scratch_mark(s);
    const char *bound[MAX_G];
    for (int g = 0; g < G && KV_DEV(s); g++) bound[g] = x->head[l * G + g].bound;
    if (KV_DEV(s)) quest_select_cuda(s, l, bound, pages, x->head[l * G].cap, best, q, x->dtype);
    else quest_select_host(s, x, l, q, pages, best);
    scratch_reset(s, mark);
    timed(&s->clk.index, t0);
}
static void quest_forget(Session *s, void *ms, int n_tok) {
    Quest *x = ms;
    for (int i = 0; i < s->c->L * s->c->G; i++) if (x->head[i].n > n_tok / PAGE) x->head[i].n = n_tok / PAGE;
}
static size_t quest_bytes(const Session *s, const void *ms) {
    const Quest *x = ms;
    size_t n = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) n += (size_t)x->head[i].cap * 2 * s->c->D * dtype_size(x->dtype);
    return n;
}
static size_t quest_plan(const Session *s, const void *ms, int n) {        // quest_grow asks for a quarter more than it needs
    const Quest *x = ms;
    int pages = n / PAGE, layers = s->c->L - x->full_layers;
    return layers > 0 ? (size_t)layers * s->c->G * (pages + pages / 4 + 4) * 2 * s->c->D * dtype_size(x->dtype) : 0;
}
static const Opt quest_opts[] = { { "quest-full-layers", 'i', "2", "first layers that read every row" }, { NULL, 0, NULL, NULL } };


const Method quest_method = {
    .name    = "quest",
    .paper   = "Quest, arXiv 2406.10774",
    .keeps   = "keeps every row; reads the pages of 16 rows with the largest bound, budget in "
               "all: saves reads only",
    .limits  = "needs every row: not with methods that drop some. Goes with loopserve-p and "
               "pats",
    .budget  = 1024,
    .opts    = quest_opts,
    .role    = ROLE_SELECT,
    .state   = sizeof(Quest),
    .open    = quest_open,
    .close   = quest_close,
    .select  = quest_select,
    .steady  = quest_steady,
    .commit  = quest_commit,
    .bytes   = quest_bytes,
    .plan    = quest_plan,
    .forget  = quest_forget,
};

// ==================================================================================================== 9 LOOPSERVE
// Li, Xu, Li, Chen, Li, Tian, Xiao, Deng, Wang, Li, Chen, Yuan: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration
// System for Multi-Turn Dialogues. arXiv 2507.13681.
// A turn's prefill attends along few vertical and slash lines, chosen for this input in every layer and head from a sample of
// its own query rows; in decode the rows to read are chosen anew every n_d tokens, by the queries of the last n_d tokens.
//   Definition 1   X^ = [y_(j-1), X_j]: a turn prefills the previous answer again, then its own ids         loopserve_enter
//   Eq. 1          min  sum of l_s over S^ + sum of l_v over V^   while their cells recover >= alpha of the attention of X^
//   Algorithm 2    RandomSelect, SlashSum, VerticalSum, greedy on (weight - overlap) / (length - crossings)  select_faithful
//   Algorithm 3    if n_o = 16 or (n_o - 16) % n_d = 0:  X^_i = arg max over B rows a of sum A[b][a], b in X^obs     loop_select
// Lengths are l_x = n - max(x, p0) for both kinds (line_len): n rows held, of which p0.. are this pass's queries.
// **Differs from the paper:**
//   - Algorithm 2 bounds the overlap of two kinds of lines by the largest cell of every chosen line. The bound is so loose that
//     heads run out of lines, so the default (variant b) keeps the exact residual of every line, and a heap; variant a (--paper,
//     alpha .955) is the paper's loop with what it lacks: lines are popped, gains stop at 0, no gain left means dense;
//   - sampled rows are stratified, with a hold-out half that must be recovered too; the first --loopserve-sink columns and the
//     last --loopserve-local offsets are always taken (a: offset 0 only); a head that needs too many cells is dense, and so is
//     a short pass. With alpha 1, or all heads dense, the pass equals full attention bit for bit;
//   - n_o = 0 does not trigger ((0 - 16) % 16 would), candidates are the rows held at the prefill's end, and the tokens of this
//     answer are read on top of B (--loopserve-gen=literal: they compete); one set a KV head (--loopserve-sel=q: a query head).
// Nothing is ever dropped: any row may be chosen again later. It saves reads, not memory; on a CPU the chosen rows are even held twice, side by
// side for the steps until the next choice (view_near).
// --loopserve-unit=tile64 chooses bands of 64 offsets at what a 64x64 GPU tile costs, by thresholds instead of a heap.

typedef struct {            // what a selection looks at: sampled softmax rows of one head
    int m, n, p0;
    const int *R;           // (m) their row numbers, ascending
    const float *P;         // (m,n) P[i][c] = 0 for c > R[i]
} LineSample;
typedef struct { double key; int id; } LineItem;         // id < n: vertical id; else slash id-n
typedef struct {            // room of one thread
    float *P;               // (m,N) softmax rows
    double *g;              // (2N) residual gain of every line on the selecting samples
    double *one;            // (2N) tile64: the largest part of it that a single sample gave at the start
    float *top;             // (2N) variant a: the largest cell of every line
    LineItem *item;         // (2N) heap, or sorted lists
    LineRange *run, *range; // (N) tile64: runs of offsets; ranges of a block
    int *v, *cols, *R;      // (N) tile64: columns; columns of a block. (m) sampled rows
} LoopRoom;

typedef struct {
    LoopRule rule;
    int variant_a, tile64, m, min_context;
    uint64_t seed;
    int first, interval, obs, per_query, literal, keep_answer, decodes;      // Algorithm 3; decodes: 1 unless loopserve-p
    int prompt_end;         // tokens when the last prefill ended
    int ring_from;          // the ring holds the queries of tokens from here on, at most obs of them
    int budget;             // rows to choose
    float *ring;            // (L,obs,H,D), made by the first query: token i stands in slot i % obs
    // statistics: head passes, dense ones; selections, decode steps, those that read every row; sums over sparse head passes
    long passes, dense, selections, steps, steps_all;
    double mass, least, cells, n_v, n_s;
} LoopServe;

// ---- RandomSelect: one row of each of m strata of the nh new rows, and the last row (rules.md B3). R (m) ascending, less p0
static int sample_rows(int nh, int want, uint64_t seed, int turn, int layer, int *R) {
    int m = want < nh ? want : nh;
    uint64_t state = mix64(mix64(mix64(seed) ^ (uint64_t)turn) ^ (uint64_t)layer);
    for (int i = 0; i < m; i++) {
        int lo = (int)((long)i * nh / m), hi = (int)((long)(i + 1) * nh / m);
        R[i] = lo + (int)(splitmix64(&state) % (uint64_t)(hi - lo));
    }
    R[m - 1] = nh - 1;
    return m;
}

// ---- lengths: cells of lines, and of the whole pass. A crossing counts twice, as in Eq. 1
static double cells_all(const Lines *a) { return .5 * ((double)a->n * (a->n + 1) - (double)a->p0 * (a->p0 + 1)); }
static double cells_of(const Lines *a, const uint64_t *bits) {
    double sum = 0;
    for (int x = 0; x < a->n; x++) if (bit_get(bits, x)) sum += (double)line_len(x, a->p0, a->n);
    return sum;
}

// ---- variant a: Algorithm 2 to the letter where it has letters
static int item_before(LineItem a, LineItem b, int n) {          // key descending, slashes first, then the smaller index
    if (a.key != b.key) return a.key > b.key;
    return (a.id >= n) != (b.id >= n) ? a.id >= n : a.id < b.id;
}
static int by_weight(const void *pa, const void *pb) {
    const LineItem *a = pa, *b = pb;
    return a->key != b->key ? (a->key < b->key ? 1 : -1) : a->id - b->id;
}
// The sum of gains is a lower bound of the mass recovered: every shared cell of a slash and a vertical is charged once, by at
// least its own size (w^max of the earlier line). Fails (1) when no line promises a gain before alpha is reached.
static int select_faithful(const LineSample *p, const LoopRule *u, Lines *a, LoopRoom *w, LoopFound *f) {
    int n = p->n, na = 0, nb = 0;                        // |V|, |S|: also how many of each sorted list are used up
    LineItem *iv = w->item, *is = w->item + n;
    double tot = 0, sum = 0, ol_v = 0, ol_s = 0;
    for (int j = 0; j < n; j++) { iv[j] = (LineItem){ 0, j }; is[j] = (LineItem){ 0, j }; w->top[j] = w->top[n + j] = 0; }
    for (int i = 0; i < p->m; i++)
        for (int c = 0; c <= p->R[i]; c++) {             // SlashSum, VerticalSum
            float x = p->P[(size_t)i * n + c];
            int o = p->R[i] - c;
            iv[c].key += x; is[o].key += x; tot += x;
            if (x > w->top[c]) w->top[c] = x;
            if (x > w->top[n + o]) w->top[n + o] = x;
        }
    qsort(iv, n, sizeof *iv, by_weight);
    qsort(is, n, sizeof *is, by_weight);
    while (sum < u->alpha * tot && (na < n || nb < n)) {
        double gs = nb < n ? fmax(0, is[nb].key - ol_v) : -INFINITY, gv = na < n ? fmax(0, iv[na].key - ol_s) : -INFINITY;
        if (gs <= 0 && gv <= 0) break;
        double ls = nb < n ? fmax(1, line_len(is[nb].id, p->p0, n) - na) : 1;
        double lv = na < n ? fmax(1, line_len(iv[na].id, p->p0, n) - nb) : 1;
        if (nb < n && (na >= n || gs / ls >= gv / lv)) { bit_set(a->s, is[nb].id); ol_s += w->top[n + is[nb++].id]; sum += gs; }
        else                                           { bit_set(a->v, iv[na].id); ol_v += w->top[iv[na++].id];     sum += gv; }
    }
    int failed = sum < u->alpha * tot;
    bit_set(a->s, 0);                                    // a row must see itself (rules.md B7)
    *f = (LoopFound){ tot > 0 ? sum / tot : 1, (cells_of(a, a->v) + cells_of(a, a->s)) / cells_all(a) };
    return failed;
}

// ---- variant b: exact residuals
typedef struct { double rec[2], tot[2]; } Tally;         // mass recovered, and all of it; [0] selecting samples, [1] validating

static int tally_done(const Tally *t, double alpha) { return t->rec[0] >= alpha * t->tot[0] && t->rec[1] >= alpha * t->tot[1]; }
static double tally_share(const Tally *t) {
    double all = t->tot[0] + t->tot[1];
    return all > 0 ? (t->rec[0] + t->rec[1]) / all : 1;
}
static void keep_lines(const LoopRule *u, Lines *a) {
    for (int c = 0; c < u->sink && c < a->n; c++) bit_set(a->v, c);
    for (int o = 0; o < u->local && o < a->n; o++) bit_set(a->s, o);
}
// Residual gains with the kept lines taken out. g (2n). A row is summed in 32 lanes, so that a warp of the GPU can add in the same order.
static double lanes32(double *x) { for (int h = 16; h; h >>= 1) for (int i = 0; i < h; i++) x[i] += x[i + h]; return x[0]; }
static Tally residuals(const LineSample *p, const LoopRule *u, double *g) {
    Tally t = {{0, 0}, {0, 0}};
    int n = p->n;
    memset(g, 0, 2 * (size_t)n * sizeof *g);
    for (int i = 0; i < p->m; i++) {
        int half = u->holdout & i;                       // even samples select
        double rec[32] = { 0 }, tot[32] = { 0 };
        for (int c = 0; c <= p->R[i]; c++) {
            double x = p->P[(size_t)i * n + c];
            tot[c % 32] += x;
            if (c < u->sink || p->R[i] - c < u->local) rec[c % 32] += x;
            else if (!half) { g[c] += x; g[n + p->R[i] - c] += x; }
        }
        t.rec[half] += lanes32(rec);
        t.tot[half] += lanes32(tot);
    }
    return t;
}
static void heap_down(LineItem *h, int n_heap, int i, int n) {
    for (int j; (j = 2 * i + 1) < n_heap; i = j) {
        if (j + 1 < n_heap && item_before(h[j + 1], h[j], n)) j++;
        if (!item_before(h[j], h[i], n)) return;
        LineItem x = h[i]; h[i] = h[j]; h[j] = x;
    }
}
// Chooses a line; what it covers leaves the residuals of the lines that cross it.
static void take_line(const LineSample *p, const LoopRule *u, Lines *a, double *g, int id, Tally *t) {
    int n = p->n, slash = id >= n, x = slash ? id - n : id;
    t->rec[0] += g[id];
    bit_set(slash ? a->s : a->v, x);
    for (int i = 0; i < p->m; i++) {
        int other = p->R[i] - x;                         // the line of the other kind that crosses it in this row
        if (other < 0 || bit_get(slash ? a->v : a->s, other)) continue;
        double cell = p->P[(size_t)i * n + (slash ? other : x)];
        if (u->holdout & i) t->rec[1] += cell;
        else g[slash ? other : n + other] -= cell;
    }
}
// Greedy on residual / length until alpha of both halves is recovered (Eq. 1). A gain only ever falls, so a popped entry whose
// refreshed key still precedes the top is the best line there is (rules.md B10). Fails (1): too many cells, or nothing left.
static int select_exact(const LineSample *p, const LoopRule *u, Lines *a, LoopRoom *w, LoopFound *f) {
    int n = p->n, n_heap = 0, failed = 0;
    LineItem *h = w->item;
    double all = cells_all(a), cells;
    keep_lines(u, a);
    cells = cells_of(a, a->v) + cells_of(a, a->s);
    Tally t = residuals(p, u, w->g);
    for (int id = 0; id < 2 * n; id++)
        if (w->g[id] > 1e-12) h[n_heap++] = (LineItem){ w->g[id] / (double)line_len(id % n, p->p0, n), id };
    for (int i = n_heap / 2 - 1; i >= 0; i--) heap_down(h, n_heap, i, n);
    while (!tally_done(&t, u->alpha) && n_heap && !failed) {
        int id = h[0].id;
        if (w->g[id] > 1e-12) {
            h[0].key = w->g[id] / (double)line_len(id % n, p->p0, n);
            heap_down(h, n_heap, 0, n);
            if (h[0].id != id) continue;
            take_line(p, u, a, w->g, id, &t);
            cells += (double)line_len(id % n, p->p0, n);
            failed = cells > u->max_cells * all;
        }
        h[0] = h[--n_heap];
        heap_down(h, n_heap, 0, n);
    }
    *f = (LoopFound){ tally_share(&t), cells / all };
    return failed || (u->holdout && t.rec[1] < u->alpha * t.tot[1]);
}

// ---- unit tile64: verticals, and bands of 64 offsets, by thresholds: what a GPU does without a heap, at what its tiles cost. Masses are
// counted in fixed point (fixed_mass), so a GPU that adds them in another order finds the same lines.
enum { BAND = 64 };

static double band_len(int k, int p0, int n) {
    double sum = 0;
    for (int o = k * BAND; o < n && o < (k + 1) * BAND; o++) sum += (double)line_len(o, p0, n);
    return sum;
}
// Residual gains given the lines in a: g[c], g[n+k]. one (2n) or NULL: the largest part of each that one selecting sample gives
static Tally band_residuals(const LineSample *p, const LoopRule *u, const Lines *a, int64_t *g, int64_t *one) {
    int64_t rec[2] = { 0, 0 }, tot[2] = { 0, 0 };
    int n = p->n;
    memset(g, 0, 2 * (size_t)n * sizeof *g);
    if (one) memset(one, 0, 2 * (size_t)n * sizeof *one);
    for (int i = 0; i < p->m; i++) {
        int half = u->holdout & i;
        int64_t part = 0;                                // of the band this cell is in, in this row
        for (int c = 0; c <= p->R[i]; c++) {
            int64_t x = fixed_mass(p->P[(size_t)i * n + c]);
            int o = p->R[i] - c, k = n + o / BAND;
            tot[half] += x;
            if (bit_get(a->v, c) || bit_get(a->s, o)) rec[half] += x;
            else if (!half) {
                g[c] += x; g[k] += x; part += x;
                if (one && x > one[c]) one[c] = x;
            }
            if (o % BAND) continue;
            if (one && part > one[k]) one[k] = part;
            part = 0;
        }
    }
    return (Tally){ { (double)rec[0], (double)rec[1] }, { (double)tot[0], (double)tot[1] } };
}
// Share of the dense 64-wide tiles that the row blocks need: ranges cut into tiles, single columns gathered 64 at a time
static double tile_share(const Lines *a, LoopRoom *w) {
    double tiles = 0, dense = 0;
    int nv = bit_list(a->v, a->n, w->v), n_run = bit_runs(a->s, a->n, w->run), n_cols;
    for (int b = 0; b < a->n - a->p0; b += LINE_BLOCK) {
        int E = a->p0 + b + LINE_BLOCK < a->n ? a->p0 + b + LINE_BLOCK : a->n;
        int k = block_index(a, b, w->run, n_run, w->v, nv, w->range, w->cols, &n_cols);
        for (int j = 0; j < k; j++) tiles += (w->range[j].hi - w->range[j].lo + KV_TILE - 1) / KV_TILE;
        tiles += (n_cols + KV_TILE - 1) / KV_TILE;
        dense += (E + KV_TILE - 1) / KV_TILE;
    }
    return tiles / dense;
}
// Rounds: every line within .9 of the best residual per cost (less what its best single sample gave: a line needs two) is
// taken at once, then all residuals anew. Fails (1): too many tiles, or nothing left that two samples support.
static double gain_of(const int64_t *g, const int64_t *one, int id, int p0, int n) {   // per cost; 0: not even 2^-40
    int64_t gain = g[id] - one[id];
    return gain > 1 ? (double)gain / (id < n ? (double)line_len(id, p0, n) : band_len(id - n, p0, n)) : 0;
}
static int select_tiles(const LineSample *p, const LoopRule *u, Lines *a, LoopRoom *w, LoopFound *f) {
    int n = p->n, ids = n + (n + BAND - 1) / BAND;
    int64_t *g = (int64_t *)w->g, *one = (int64_t *)w->one;                     // as many bytes as the doubles of variant b
    double lam = INFINITY;
    keep_lines(u, a);
    Tally t = band_residuals(p, u, a, g, one);
    *f = (LoopFound){ tally_share(&t), tile_share(a, w) };
    while (!tally_done(&t, u->alpha)) {
        double best = 0;
        for (int id = 0; id < ids; id++) best = fmax(best, gain_of(g, one, id, p->p0, n));
        if (best <= 0) return 1;
        lam = .9 * fmin(lam, best);
        for (int id = 0; id < ids; id++) {
            if (gain_of(g, one, id, p->p0, n) < lam) continue;
            if (id < n) bit_set(a->v, id);
            else for (int o = (id - n) * BAND; o < n && o < (id - n + 1) * BAND; o++) bit_set(a->s, o);
        }
        t = band_residuals(p, u, a, g, NULL);
        *f = (LoopFound){ tally_share(&t), tile_share(a, w) };
        if (f->cells > u->max_tiles) return 1;
    }
    return 0;
}

// ---- prefill
static LoopRoom *loop_rooms(Session *s, int m, int N) {  // one a thread
    int threads = n_threads();
    LoopRoom *w = scratch(s, (size_t)threads * sizeof *w);
    size_t n = (size_t)N, f = sizeof(float), d = sizeof(double);
    for (int i = 0; i < threads; i++)
        w[i] = (LoopRoom){ .P = scratch(s, m * n * f), .g = scratch(s, 2 * n * d), .one = scratch(s, 2 * n * d),
                           .top = scratch(s, 2 * n * f), .item = scratch(s, 2 * n * sizeof(LineItem)),
                           .run = scratch(s, n * sizeof(LineRange)), .range = scratch(s, n * sizeof(LineRange)),
                           .v = scratch(s, n * sizeof(int)), .cols = scratch(s, n * sizeof(int)), .R = scratch(s, m * sizeof(int)) };
    return w;
}
static void loop_choose(const LoopServe *x, const LineSample *p, Lines *a, LoopRoom *w, LoopFound *f) {
    a->tile64 = x->tile64;
    a->dense = (x->variant_a ? select_faithful : x->tile64 ? select_tiles : select_exact)(p, &x->rule, a, w, f);
}
static void loop_count(LoopServe *x, const Lines *a, const LoopFound *f) {
    x->passes++;
    if (a->dense) { x->dense++; return; }
    if (x->passes - x->dense == 1 || f->mass < x->least) x->least = f->mass;
    x->mass += f->mass; x->cells += f->cells;
    x->n_v += bit_list(a->v, a->n, NULL); x->n_s += bit_list(a->s, a->n, NULL);
}
static void loop_heads(Session *s, LoopServe *x, int l, const float *q, int T, const int *rows, Lines *a, LoopRoom *room, LoopFound *found) {      // on the host
    int H = s->c->H, m = x->m;
    Tile *tiles = tiles_new(s);
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)m * kv_longest(s, l) * H * s->c->D))
    for (int h = 0; h < H; h++) {
        LoopRoom *w = &room[thread_id()];
        LineSample p = { m, a[h].n, a[h].p0, w->R, w->P };
        if (a[h].dense) continue;
        for (int i = 0; i < m; i++) w->R[i] = a[h].p0 + rows[i];
        line_probs(s, l, h, q, T, w->R, m, w->P, &tiles[thread_id()]);
        loop_choose(x, &p, &a[h], w, &found[h]);
    }
}
// The GPU makes the probabilities and chooses; the paper's own loop (variant a) sorts and pops on the host.
static void loop_heads_device(Session *s, LoopServe *x, int l, const float *q, int T, const int *rows, Lines *a, LoopRoom *room, LoopFound *found) {
    int G = s->c->G, R = s->c->H / G, N = kv_longest(s, l), m = x->m, ng = line_batch_cuda(s, l, m);
    for (int h0 = 0; h0 < G * R; h0 += ng * R) {
        float *P = line_probs_cuda(s, l, h0 / R, ng, q, T, rows, m);
        if (!x->variant_a) {
            choose_lines_cuda(s, l, h0 / R, ng, &x->rule, x->tile64, P, T, m, a + h0, found + h0);
            for (int h = h0; h < h0 + ng * R; h++) a[h].dense |= a[h].n <= x->min_context;
            continue;
        }
        #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)m * N * ng * R))
        for (int h = h0; h < h0 + ng * R; h++) {
            LoopRoom *w = &room[thread_id()];
            LineSample p = { m, a[h].n, a[h].p0, w->R, w->P };
            if (a[h].dense) continue;
            for (int i = 0; i < m; i++) {
                w->R[i] = a[h].p0 + rows[i];
                host_copy_cuda(w->P + (size_t)i * a[h].n, P + ((size_t)(h - h0) * m + i) * N, a[h].n);
            }
            loop_choose(x, &p, &a[h], w, &found[h]);
        }
    }
}
static void loopserve_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    LoopServe *x = ms;
    int H = s->c->H, m = x->m, all_dense = 1;
    if (x->rule.alpha >= 1 || T / 4 < m) {               // choosing would cost more than it saves
        x->passes += H; x->dense += H;
        attn_prefill(s, l, out, q, 0, T);
        return;
    }
    size_t mark = scratch_mark(s);
    double t = now();
    Lines *a = lines_new(s, l, T);
    LoopRoom *room = KV_DEV(s) && !x->variant_a ? NULL : loop_rooms(s, m, kv_longest(s, l));
    LoopFound *found = scratch(s, (size_t)H * sizeof *found);
    int *rows = scratch(s, (size_t)m * sizeof(int));
    sample_rows(T, m, x->seed, s->turn, l, rows);        // the same tokens for all heads
    for (int h = 0; h < H; h++) { a[h].dense = a[h].n <= x->min_context; all_dense &= a[h].dense; }
    if (!all_dense) (KV_DEV(s) ? loop_heads_device : loop_heads)(s, x, l, q, T, rows, a, room, found);
    for (int h = 0; h < H; h++) loop_count(x, &a[h], &found[h]);
    timed(&s->clk.index, t);
    lines_attend(s, l, a, out, q, T);
    scratch_reset(s, mark);
}
// Definition 1: the previous answer is dropped and prefilled again in front of this turn's ids. Its rows came one by one from
// passes that read chosen rows only. (Its last token was never fed: it comes with this turn's ids.)
static int loopserve_enter(Session *s, void *ms, Token *t, int n, int cap) {
    LoopServe *x = ms;
    int k = s->n_tok - x->prompt_end;
    if (x->keep_answer || k <= 0) return n;
    if (n + k > cap) die(EXIT_RUN, "loopserve: no room to prefill an answer of %d tokens again", k);
    memmove(t + k, t, (size_t)n * sizeof *t);
    for (int i = 0; i < k; i++) { t[i] = s->tok[x->prompt_end + i]; t[i].pos = -1; }
    kv_truncate(s, x->prompt_end);
    return n + k;
}

// ---- decode: Algorithm 3
static float *ring_slot(const Session *s, const LoopServe *x, int l, int token) {       // (H,D)
    return x->ring + ((size_t)l * x->obs + token % x->obs) * s->c->H * s->c->D;
}
static void ring_put(Session *s, LoopServe *x, int l, int token, const float *q) {      // q (H,D)
    size_t row = (size_t)s->c->H * s->c->D * sizeof(float), all = (size_t)s->c->L * x->obs * row;
    if (!x->ring) x->ring = KV_DEV(s) ? (float *)near_grow_cuda(NULL, 0, all) : xcalloc(1, all);
    if (KV_DEV(s)) ring_put_cuda(s, ring_slot(s, x, l, 0), x->obs, token, q);
    else memcpy(ring_slot(s, x, l, token), q, row);
}
// Line 5: for every KV head of layer l (or query head) the B candidates that the queries in the ring attend to most. The scores
// are softmax rows over every row held, the ring's tokens being its last w: each sees the rows up to its own. The sum over a group's
// heads ranks like their mean.
static float *loop_scores(Session *s, const LoopServe *x, int l, int first, const int *end) {      // end (G): candidates -> (lists,N), where the rows lie: sums over the ring, or means
    int H = s->c->H, G = s->c->G, N = kv_longest(s, l), w = s->base - first + 1, lists = x->per_query ? H : G;
    size_t row = (size_t)H * s->c->D;
    if (KV_DEV(s)) {
        float *score = ring_scores_cuda(s, l, ring_slot(s, x, l, 0), x->obs, first, w);
        return x->per_query ? score : join_rows_cuda(s, score, end, N, AGG_SUM);
    }
    float *obs = scratch(s, w * row * sizeof(float)), *score = scratch(s, (size_t)lists * N * sizeof(float));
    for (int i = 0; i < w; i++) memcpy(obs + i * row, ring_slot(s, x, l, first + i), row * sizeof(float));
    mean_rows(s, l, obs, first, w, lists / G, score);
    return score;
}
static void loop_select(Session *s, LoopServe *x, int l) {
    int H = s->c->H, G = s->c->G, R = H / G, N = kv_longest(s, l), first = s->base - x->obs + 1, lists = x->per_query ? H : G, each = H / lists;
    size_t mark = scratch_mark(s);
    int *idx = scratch(s, (size_t)lists * x->budget * sizeof(int)), *end = scratch(s, (size_t)(G + 3 * lists) * sizeof(int));
    int *n = end + G, *want = n + lists, *found = want + lists;
    for (int g = 0; g < G; g++) {                        // candidates: rows [0,end)
        const KVHead *hd = kv_head(s, l, g);
        for (end[g] = hd->len; end[g] > 0 && hd->src[end[g] - 1] >= (x->literal ? s->base : x->prompt_end); ) end[g]--;
    }
    float *score = loop_scores(s, x, l, first > x->ring_from ? first : x->ring_from, end);
    for (int i = 0; i < lists; i++) { n[i] = end[i * each / R]; want[i] = n[i] > x->budget ? x->budget : 0; }
    top_k_rows(s, score, lists, N, n, want, idx, x->budget, found);
    for (int i = 0; i < lists; i++) {
        int last = end[i * each / R], tail = last <= x->budget ? 0 : last, *list = idx + (size_t)i * x->budget;
        if (each == R) view_group(s, l, i, list, found[i], tail); else view_set(s, l, i, list, found[i], tail);
    }
    #pragma omp parallel for schedule(static) if (worth_threads((size_t)lists * x->budget * s->c->D))
    for (int i = 0; i < lists; i++) view_near(s, l, i * each);
    scratch_reset(s, mark);
}
static int loop_due(const Session *s, const LoopServe *x) {      // line 3: n_o tokens of the answer so far, this one included
    int n_o = s->step + 1;
    return n_o >= x->first && (n_o - x->first) % x->interval == 0;
}
static int loopserve_steady(const Session *s, const void *ms) { return !loop_due(s, ms); }
static void loopserve_select(Session *s, void *ms, int l, const float *q) {
    LoopServe *x = ms;
    ring_put(s, x, l, s->base, q);
    if (loop_due(s, x)) loop_select(s, x, l);
}
static void loop_prompt_done(Session *s, LoopServe *x) {         // the end of a prefill
    x->prompt_end = s->n_tok;
    x->budget = budget_now(s);
    for (int l = 0; x->decodes && l < s->c->L; l++)              // room for the views now, so that decode allocates nothing
        for (int h = 0; h < s->c->H; h += x->per_query ? 1 : s->c->H / s->c->G) {
            int n = kv_head(s, l, h * s->c->G / s->c->H)->len, room = x->budget < n + x->literal * 1024 ? x->budget : 0;
            view_room(s, l, h, room, 1);
        }
}
static void loopserve_commit(Session *s, void *ms, int l, const float *q, int T) {
    LoopServe *x = ms;
    int L = s->c->L, n = T < x->obs ? T : x->obs;
    size_t row = (size_t)s->c->H * s->c->D;
    if (l == L && !s->decoding) loop_prompt_done(s, x);
    if (l == L && s->decoding) {
        int chosen = 0;
        for (int i = 0; i < L * s->c->H; i++) chosen |= s->view[i].tail > 0;
        x->steps++;
        x->steps_all += !chosen;
        x->selections += x->decodes && chosen && loop_due(s, x);
    }
    if (l == L || s->decoding || !x->decodes) return;
    x->ring_from = s->base + T - n;                              // a prefill refills the ring
    for (int i = 0; i < n; i++) ring_put(s, x, l, x->ring_from + i, q + (T - n + i) * row);
}
static void loopserve_forget(Session *s, void *ms, int n_tok) {
    LoopServe *x = ms;
    (void)s;
    if (x->prompt_end > n_tok) x->prompt_end = n_tok;
    x->ring_from = n_tok;
}

// ---- opening, bytes, statistics
static int loop_rule(Session *s, LoopServe *x) {                 // the options of the prefill
    const Options *o = s->opt;
    int paper = opt_int(o, "paper");
    const char *hold = opt_str(o, "loopserve-holdout");
    x->variant_a = opt_given(o, "loopserve-variant") ? !strcmp(opt_str(o, "loopserve-variant"), "a") : paper;
    x->tile64 = !strcmp(opt_str(o, "loopserve-unit"), "tile64");
    x->seed = (uint64_t)opt_int(o, "loopserve-seed");
    x->rule.alpha = paper && !opt_given(o, "loopserve-alpha") ? .955 : opt_real(o, "loopserve-alpha");
    x->rule.max_cells = opt_real(o, "loopserve-max-cells");
    x->rule.max_tiles = opt_real(o, "loopserve-max-tiles");
    if (opt_least(s, "loopserve-samples", 1, &x->m) || opt_least(s, "loopserve-min-context", 0, &x->min_context) ||
        opt_least(s, "loopserve-sink", 0, &x->rule.sink) || opt_least(s, "loopserve-local", 1, &x->rule.local)) return -1;
    x->rule.holdout = !strcmp(hold, "auto") ? x->m >= 32 : !strcmp(hold, "on");
    if (x->rule.alpha < 0) snprintf(s->err, sizeof s->err, "--loopserve-alpha is a share, 0 to 1, found %g", x->rule.alpha);
    else if (x->variant_a && x->tile64) snprintf(s->err, sizeof s->err, "--loopserve-unit=tile64 has no variant a (nor --paper)");
    else return lines_open(s, "loopserve");
    return -1;
}
static int loopserve_p_open(Session *s, void *ms) {
    LoopServe *x = ms;
    x->keep_answer = opt_int(s->opt, "loopserve-keep-answer-kv");
    return loop_rule(s, x);
}
static int loopserve_d_open(Session *s, void *ms) {
    LoopServe *x = ms;
    x->keep_answer = opt_int(s->opt, "loopserve-keep-answer-kv");
    x->per_query = !strcmp(opt_str(s->opt, "loopserve-sel"), "q");
    x->literal = !strcmp(opt_str(s->opt, "loopserve-gen"), "literal");
    if (opt_least(s, "loopserve-first", 1, &x->first) || opt_least(s, "loopserve-interval", 1, &x->interval)) return -1;
    if (opt_least(s, "loopserve-obs", 0, &x->obs)) return -1;
    if (!x->obs) x->obs = x->interval;
    x->decodes = 1;
    return 0;
}
static int loopserve_open(Session *s, void *ms) { return loopserve_p_open(s, ms) || loopserve_d_open(s, ms) ? -1 : 0; }
static void loopserve_close(Session *s, void *ms) {
    float *ring = ((LoopServe *)ms)->ring;
    (void)s;
    if (KV_DEV(s)) near_free_cuda((char *)ring); else free(ring);
}
static size_t loopserve_bytes(const Session *s, const void *ms) {
    const LoopServe *x = ms;
    return x->decodes ? (size_t)s->c->L * x->obs * s->c->H * s->c->D * sizeof(float) : 0;
}
static void loopserve_stats(const Session *s, const void *ms, FILE *out) {
    const LoopServe *x = ms;
    double sparse = x->passes > x->dense ? (double)(x->passes - x->dense) : 1;
    (void)s;
    if (x->m) fprintf(out, "loopserve prefill: %ld head passes, %ld of them dense\n", x->passes, x->dense);
    if (x->passes > x->dense)
        fprintf(out, "loopserve lines: %.1f verticals, %.1f slashes a sparse head, %.4f of its %s, sampled mass %.4f (least %.4f)\n",
                x->n_v / sparse, x->n_s / sparse, x->cells / sparse, x->tile64 ? "tiles" : "cells", x->mass / sparse, x->least);
    if (!x->decodes) return;
    fprintf(out, "loopserve decode: %ld selections, %ld steps, %ld of them read every row\n", x->selections, x->steps, x->steps_all);
}
#define LOOPSERVE_OPTS_P \
    { "loopserve-alpha", 'f', "0.98", "share of the attention the lines recover (--paper: .955); 1: dense" }, \
    { "loopserve-variant", 'c', "b|a", "b: exact overlaps, a: the paper's bound (--paper: a)" }, \
    { "loopserve-unit", 'c', "line|tile64", "what is chosen and read: single lines, or what fits 64x64 tiles" }, \
    { "loopserve-samples", 'i', "64", "query rows looked at; a turn of fewer than 4 times as many is dense" }, \
    { "loopserve-min-context", 'i', "1024", "heads with no more rows are dense" }, \
    { "loopserve-max-cells", 'f', "0.33", "share of the causal cells beyond which a head is dense (unit line)" }, \
    { "loopserve-max-tiles", 'f', "0.6", "the same for tiles (unit tile64)" }, \
    { "loopserve-sink", 'i', "4", "first columns always read" }, \
    { "loopserve-local", 'i', "64", "last rows always read, the query's own included" }, \
    { "loopserve-holdout", 'c', "auto|on|off", "odd samples only validate; auto: from 32 samples on" }, \
    { "loopserve-seed", 'i', "1", "of the sampled rows" }
#define LOOPSERVE_OPTS_D \
    { "loopserve-first", 'i', "16", "first selection, at this token of an answer" }, \
    { "loopserve-interval", 'i', "16", "n_d, tokens between selections" }, \
    { "loopserve-obs", 'i', "0", "last queries that choose; 0: --loopserve-interval" }, \
    { "loopserve-sel", 'c', "kv|q", "one set of rows a KV head, or one a query head" }, \
    { "loopserve-gen", 'c', "keep|literal", "this answer's tokens: read on top of B, or chosen like the others" }
#define LOOPSERVE_OPTS_PD \
    { "loopserve-keep-answer-kv", 'b', "0", "do not prefill the previous answer again" }, { NULL, 0, NULL, NULL }
static const Opt loopserve_opts[]   = { LOOPSERVE_OPTS_P, LOOPSERVE_OPTS_D, LOOPSERVE_OPTS_PD };
static const Opt loopserve_p_opts[] = { LOOPSERVE_OPTS_P, LOOPSERVE_OPTS_PD };
static const Opt loopserve_d_opts[] = { LOOPSERVE_OPTS_D, LOOPSERVE_OPTS_PD };


const Method loopserve_method = {
    .name    = "loopserve",
    .paper   = "LoopServe, arXiv 2507.13681",
    .keeps   = "keeps every row; prefill reads chosen lines, decode the B rows the last "
               "queries like best and this answer (saves reads only)",
    .limits  = "prefills each answer again at the next turn. Dense up to "
               "--loopserve-min-context rows and in short turns; the first --loopserve-first "
               "tokens of an answer read every row. On a CPU the chosen rows are held twice",
    .budget  = 1024,
    .opts    = loopserve_opts,
    .role    = ROLE_PREFILL | ROLE_SELECT,
    .state   = sizeof(LoopServe),
    .open    = loopserve_open,
    .close   = loopserve_close,
    .enter   = loopserve_enter,
    .attend  = loopserve_attend,
    .select  = loopserve_select,
    .steady  = loopserve_steady,
    .commit  = loopserve_commit,
    .bytes   = loopserve_bytes,
    .forget  = loopserve_forget,
    .stats   = loopserve_stats,
};

const Method loopserve_p_method = {
    .name    = "loopserve-p",
    .paper   = "LoopServe-P: its prefill alone, arXiv 2507.13681",
    .keeps   = "keeps every row; prefill reads chosen lines (saves reads only)",
    .limits  = "goes with any decode method by +, but h2o and sonic. Prefills each answer "
               "again at the next turn",
    .opts    = loopserve_p_opts,
    .role    = ROLE_PREFILL,
    .state   = sizeof(LoopServe),
    .open    = loopserve_p_open,
    .enter   = loopserve_enter,
    .attend  = loopserve_attend,
    .commit  = loopserve_commit,
    .forget  = loopserve_forget,
    .stats   = loopserve_stats,
};

const Method loopserve_d_method = {
    .name    = "loopserve-d",
    .paper   = "LoopServe-D: its decode alone, arXiv 2507.13681",
    .keeps   = "keeps every row; decode reads the B rows the last queries like best and this "
               "answer (saves reads only)",
    .limits  = "prefills each answer again at the next turn. On a CPU the chosen rows are "
               "held twice",
    .budget  = 1024,
    .opts    = loopserve_d_opts,
    .role    = ROLE_SELECT,
    .state   = sizeof(LoopServe),
    .open    = loopserve_d_open,
    .close   = loopserve_close,
    .enter   = loopserve_enter,
    .select  = loopserve_select,
    .steady  = loopserve_steady,
    .commit  = loopserve_commit,
    .bytes   = loopserve_bytes,
    .forget  = loopserve_forget,
    .stats   = loopserve_stats,
};

// ==================================================================================================== 10 PATS
// Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs (papers/001).
// No token is dropped; old rows lose low mantissa bits. How many bits b a token loses depends on its position t in T tokens
// only, so one table serves every layer and head, and rows of one b lie packed side by side with w = 16-b bits an element.
//   b(t,T) = max(b_min, min(b_max, f(t,T))), f = round(b_min + b_max u), x = (t-1)/(T-1)                  (3.1; spec B1)
//            old: u = 1-x      new: u = x      middle: u = 1-|2x-1|
// Storage: the rows of a head are regions of one w (table KVHead.reg), then raw f16 rows: those of the last `window` tokens.
//   dense  (D) element e of a region starts at bit e*w                                   row: D*w/8 bytes
//   rows64 (A) the paper's: blocks of 64 bytes, floor(512/w) elements each, a row starts a block
// While tokens arrive b(t,T) changes, and cut bits are gone: B[t] only grows. When rows are cut is the policy:
//   ratchet  at re-packs, whenever T has grown by an eighth: B[t] = max(B[t], b(t,T))
//   static   once, when a row leaves the raw window, with b(t,T_end)
//   frozen   once; b(t,T_1) for the rows of the first prefill, b_min for all later ones
// **Differs from the paper:**
//   - it is silent about decoding (its T is known), packing across rows, f's formula and rounding: all of the above is ours;
//   - the first `sink` tokens are cut by b_min only, the last `window` not at all (--pats-sink=0 --pats-window=0: as the paper);
//   - rows are packed densely: the paper's blocks save nothing for w >= 12 at D = 128, for w >= 9 at D = 64;
//   - always f16, whatever dtype the model computes in: cutting 8 bits of bf16 would cut the exponent.
// Options: --pats-schedule, -policy, -bmin, -bmax, -sink, -window, -tend, -format, -round, -when.

enum { PATS_MIDDLE, PATS_OLD, PATS_NEW };               // schedules
enum { PATS_RATCHET, PATS_STATIC, PATS_FROZEN };        // policies
// Start of a region; largest head_dim.
enum { PATS_ALIGN = 64, PATS_MAX_D = 1024 };

typedef struct {
    int schedule, policy, rounding, rows64, write;
    int b_min, b_max, sink, window, T_end;
    int T_last, repacks;        // tokens seen at the last re-pack; how many there were
    int T1, n1;                 // frozen: length of the first prefill; tokens [0,n1) are still its own
    int cut;                    // tokens [0,cut) are packed, in every head that holds them
    unsigned char *bits;        // (cap) B[t]: bits cut off the rows of token t so far
    int cap;
} Pats;

// ---- schedules: Eq. of 3.1 in integers. t = 1..T; u = a/n, rounded half up
static int pats_schedule(int schedule, int b_min, int b_max, int t, int T) {
    int64_t n = T - 1, a = schedule == PATS_OLD ? T - t : schedule == PATS_NEW ? t - 1 : 2 * (t - 1 < T - t ? t - 1 : T - t), b;
    a = a < 0 ? 0 : a > n ? n : a;                                              // t beyond T_end: a static dialogue that ran on
    if (!n) b = schedule == PATS_OLD ? b_min + b_max : b_min;                   // T = 1
    else b = (2 * b_min * n + 2 * b_max * a + n) / (2 * n);
    return b > b_max ? b_max : b < b_min ? b_min : (int)b;
}
// Bits token `src` (from 0) should lose when T tokens have been seen (rules.md A18, A21).
static int pats_bits(const Pats *x, int src, int T) {
    if (src >= T - x->window) return 0;
    if (src < x->sink) return x->b_min;
    if (x->policy == PATS_STATIC) return pats_schedule(x->schedule, x->b_min, x->b_max, src + 1, x->T_end);
    if (x->policy == PATS_FROZEN) return src < x->n1 ? pats_schedule(x->schedule, x->b_min, x->b_max, src + 1, x->T1) : x->b_min;
    return pats_schedule(x->schedule, x->b_min, x->b_max, src + 1, T);
}

// ---- one element: an f16 that loses b bits is pats_cut of kvcomp.h
static void pats_mid(uint16_t *h, int n, int b) {       // bit b-1 on, except in a zero
    if (!b) return;
    #pragma omp simd
    for (int i = 0; i < n; i++) h[i] = (uint16_t)(h[i] | ((h[i] & 0x7fff) ? 1 << (b - 1) : 0));
}

// ---- n elements of w bits. Eight of them are w bytes, so a row (D a multiple of 8) begins and ends on a byte
static void pack_bits(unsigned char *p, const uint16_t *h, int n, int w) {
    uint64_t acc = 0;
    int fill = 0;
    for (int i = 0; i < n; i++) {
        acc |= (uint64_t)(h[i] >> (16 - w)) << fill;
        if ((fill += w) < 32) continue;
        memcpy(p, &acc, 4);
        p += 4; acc >>= 32; fill -= 32;
    }
    for (; fill > 0; fill -= 8, acc >>= 8) *p++ = (unsigned char)acc;
}
// h (n) = the elements as f16, cut bits 0. May read PATS_GUARD bytes past the last one.
static void unpack_bits(uint16_t *h, const unsigned char *p, int n, int w) {
    for (int i = 0; i < n; i++) {
        size_t bit = (size_t)i * w;
        uint32_t u;
        memcpy(&u, p + bit / 8, 4);
        h[i] = (uint16_t)(u >> bit % 8 << (16 - w));    // bits of the next elements fall off at the top
    }
}
// The same as attention reads it. mid: the bit to add on reading, 0 for none
static void unpack_plain(uint16_t *h, const unsigned char *p, int n, int w, int mid) {
    unpack_bits(h, p, n, w);
    for (int i = 0; mid && i < n; i++) if (h[i] & 0x7fff) h[i] = (uint16_t)(h[i] | mid);
}
static void (*unpack_f16)(uint16_t *h, const unsigned char *p, int n, int w, int mid) = unpack_plain;

// ---- one row, and rows of a head
static size_t pats_row_bytes(int rows64, int D, int w) {
    int B = 8 * PATS_BLOCK / w;
    return rows64 ? (size_t)PATS_BLOCK * ((D + B - 1) / B) : (size_t)D * w / 8;
}
static void pats_write_row(unsigned char *p, const uint16_t *h, int D, int w, int rows64) {     // h (D) f16, already cut
    int B = rows64 ? 8 * PATS_BLOCK / w : D;
    for (int c = 0; c < D; c += B, p += PATS_BLOCK) pack_bits(p, h + c, D - c < B ? D - c : B, w);
}
static void pats_read_row(uint16_t *h, const unsigned char *p, int D, int w, int rows64) {
    int B = rows64 ? 8 * PATS_BLOCK / w : D;
    for (int c = 0; c < D; c += B, p += PATS_BLOCK) unpack_bits(h + c, p, D - c < B ? D - c : B, w);
}
static const unsigned char *pats_row(const KVHead *h, const Region *g, int v, int r, size_t bytes) {
    return (const unsigned char *)(v ? h->pv : h->pk) + g->base + (size_t)(r - g->row0) * bytes;
}
static int pats_open(Session *s, void *ms);
static const Pats *pats_of(const Session *s) {          // the state, for the storage hooks, which are called without it
    for (int i = 0; i < s->n_part; i++) if (s->part[i].m->open == pats_open) return s->part[i].ms;
    return NULL;
}

// Packing.load, the hot path of attention: rows r0 .. r0+n-1, all packed, as f16. p: n rows of region g
static void pats_load_region(const Pats *x, const Region *g, const unsigned char *p, int n, int D, uint16_t *buf) {
    size_t bytes = pats_row_bytes(x->rows64, D, g->w);
    int mid = x->rounding == PATS_MID && g->w < 16 ? 1 << (15 - g->w) : 0, B = 8 * PATS_BLOCK / g->w;
    if (!x->rows64) { unpack_f16(buf, p, n * D, g->w, mid); return; }           // dense rows are one stream of elements
    for (int r = 0; r < n; r++, p += bytes, buf += D)
        for (int c = 0; c < D; c += B) unpack_f16(buf + c, p + c / B * PATS_BLOCK, D - c < B ? D - c : B, g->w, mid);
}
static void pats_load_device(const Pats *x, const Region *g, const unsigned char *p, int n, int D, uint16_t *buf) {   // p lies on the GPU
    unsigned char raw[1 << 14];
    size_t bytes = pats_row_bytes(x->rows64, D, g->w);
    int step = (int)((sizeof raw - PATS_GUARD) / bytes);
    for (int r = 0; r < n; r += step) {
        int m = n - r < step ? n - r : step;
        bytes_load_cuda(raw, p + r * bytes, m * bytes + PATS_GUARD);
        pats_load_region(x, g, raw, m, D, buf + (size_t)r * D);
    }
}
static void pats_load(const Session *s, const KVHead *h, int v, int r0, int n, uint16_t *buf) {
    const Pats *x = pats_of(s);
    const Region *g = h->reg;
    int D = s->c->D;
    while (g->row0 + g->n <= r0) g++;
    for (int m; n > 0; g++, r0 += m, n -= m, buf += (size_t)m * D) {
        const unsigned char *p = pats_row(h, g, v, r0, pats_row_bytes(x->rows64, D, g->w));
        m = g->row0 + g->n - r0 < n ? g->row0 + g->n - r0 : n;
        if (KV_DEV(s)) pats_load_device(x, g, p, m, D, buf); else pats_load_region(x, g, p, m, D, buf);
    }
}

// Adds one row of width w behind the others of a region table (stb array); a new region starts on PATS_ALIGN bytes.
static Region *region_add(Region *reg, int w, int rows64, int D) {
    int n = (int)arrlen(reg);
    if (n && reg[n - 1].w == w) { reg[n - 1].n++; return reg; }
    Region next = { .n = 1, .w = w };
    if (n) {
        next.row0 = reg[n - 1].row0 + reg[n - 1].n;
        next.base = (reg[n - 1].base + reg[n - 1].n * pats_row_bytes(rows64, D, reg[n - 1].w) + PATS_ALIGN - 1) / PATS_ALIGN * PATS_ALIGN;
    }
    arrput(reg, next);
    return reg;
}
static size_t regions_bytes(const Region *reg, int n, int rows64, int D) {      // of pk, the guard included
    return n ? reg[n - 1].base + reg[n - 1].n * pats_row_bytes(rows64, D, reg[n - 1].w) + PATS_GUARD : 0;
}
static void regions_set(KVHead *h, Region *reg) {       // an exact copy of the stb array, which is freed
    h->n_reg = (int)arrlen(reg);
    h->packed = h->n_reg ? reg[h->n_reg - 1].row0 + reg[h->n_reg - 1].n : 0;
    if (!h->n_reg) { free(h->reg); h->reg = NULL; }
    else memcpy(h->reg = xrealloc(h->reg, h->n_reg * sizeof(Region)), reg, h->n_reg * sizeof(Region));
    arrfree(reg);
}

// Packing.stored: where rows r0 .. r0+n-1 lie, for prefetching (rows of the next region not counted).
static Ahead pats_stored(const Session *s, const KVHead *h, int v, int r0, int n) {
    const Region *g = h->reg;
    while (g->row0 + g->n <= r0) g++;
    size_t bytes = pats_row_bytes(pats_of(s)->rows64, s->c->D, g->w);
    return (Ahead){ (const char *)pats_row(h, g, v, r0, bytes), (n < g->row0 + g->n - r0 ? n : g->row0 + g->n - r0) * bytes };
}
// Packing.keep: of the packed rows only keep[0..n) stay, bit for bit as they are.
static void pats_keep(Session *s, KVHead *h, const int *keep, int n) {
    const Pats *x = pats_of(s);
    int D = s->c->D;
    Region *reg = NULL;
    for (int i = 0, g = 0; i < n; i++) {
        while (h->reg[g].row0 + h->reg[g].n <= keep[i]) g++;
        reg = region_add(reg, h->reg[g].w, x->rows64, D);
    }
    size_t total = regions_bytes(reg, (int)arrlen(reg), x->rows64, D);
    if (KV_DEV(s)) rows_repack_cuda(s, h, reg, (int)arrlen(reg), total, 0, keep, x->rounding, x->rows64);
    for (int v = 0; v < 2 && !KV_DEV(s); v++) {
        unsigned char *to = total ? xcalloc(total, 1) : NULL;
        const Region *g = h->reg, *t = reg;
        for (int i = 0; i < n; i++) {
            while (g->row0 + g->n <= keep[i]) g++;
            while (t->row0 + t->n <= i) t++;
            size_t bytes = pats_row_bytes(x->rows64, D, g->w);
            memcpy(to + t->base + (size_t)(i - t->row0) * bytes, pats_row(h, g, v, keep[i], bytes), bytes);
        }
        free(v ? h->pv : h->pk);
        if (v) h->pv = (char *)to; else h->pk = (char *)to;
    }
    h->pk_bytes = total;
    regions_set(h, reg);
    h->cap = -1;                                        // packed changed: head_reserve must size src and pos anew
}
static const Packing pats_packing = { pats_load, pats_stored, pats_keep };

// ---- cutting
// Leading rows that keep both place and width under the new table: they need not be touched.
static int regions_same(const KVHead *h, const Region *reg) {
    int same = 0;
    for (int i = 0; i < (int)arrlen(reg) && i < h->n_reg; i++) {
        const Region *a = &h->reg[i], *b = &reg[i];
        if (a->w != b->w) break;                        // all before are alike, so row0 and base are too
        same = a->row0 + (a->n < b->n ? a->n : b->n);
        if (a->n != b->n) break;
    }
    return same;
}
static size_t regions_stay(const Region *reg, int n, int same, int rows64, int D) {     // bytes of rows [0,same), with the gaps between
    size_t bytes = 0;
    for (int i = 0; i < n && reg[i].row0 < same; i++)
        bytes = reg[i].base + (same - reg[i].row0 < reg[i].n ? same - reg[i].row0 : reg[i].n) * pats_row_bytes(rows64, D, reg[i].w);
    return bytes;
}
// Rows same .. of the new table `reg` into `to`, read from where they are stored now: through already cut bits, never anew.
static void pats_recut(const Session *s, const Pats *x, const KVHead *h, int v, const Region *reg, int same, unsigned char *to) {
    int D = s->c->D;
    const Region *g = h->reg;
    uint16_t row[PATS_MAX_D];
    for (int i = 0; i < (int)arrlen(reg); i++) {
        size_t bytes = pats_row_bytes(x->rows64, D, reg[i].w);
        for (int r = reg[i].row0 > same ? reg[i].row0 : same; r < reg[i].row0 + reg[i].n; r++) {
            int b = 16 - reg[i].w, old = 0;
            if (r < h->packed) {
                while (g->row0 + g->n <= r) g++;
                old = 16 - g->w;
                pats_read_row(row, pats_row(h, g, v, r, pats_row_bytes(x->rows64, D, g->w)), D, g->w, x->rows64);
            }
            else memcpy(row, (v ? h->v : h->k) + (size_t)(r - h->packed) * D * 2, (size_t)D * 2);
            for (int d = 0; b > old && d < D; d++) row[d] = pats_cut(row[d], b, x->rounding);
            pats_write_row(to + reg[i].base + (size_t)(r - reg[i].row0) * bytes, row, D, reg[i].w, x->rows64);
        }
    }
}
static void pats_pack_head(Session *s, const Pats *x, KVHead *h) {
    int D = s->c->D, first = x->policy == PATS_RATCHET ? 0 : h->packed, n = first;   // cut once: regions are only added to
    Region *reg = NULL;
    for (int i = 0; first && i < h->n_reg; i++) arrput(reg, h->reg[i]);
    for (; n < h->len && h->src[n] < x->cut; n++) reg = region_add(reg, 16 - x->bits[h->src[n]], x->rows64, D);
    int same = regions_same(h, reg), gone = n - h->packed;
    if (same == n && !gone) { arrfree(reg); return; }
    size_t total = regions_bytes(reg, (int)arrlen(reg), x->rows64, D), stay = regions_stay(reg, (int)arrlen(reg), same, x->rows64, D), old = h->pk_bytes;
    if (KV_DEV(s)) {
        rows_repack_cuda(s, h, reg, (int)arrlen(reg), total, stay, NULL, x->rounding, x->rows64);
        rows_drop_cuda(s, h, gone, h->len - n);
    }
    for (int v = 0; v < 2 && !KV_DEV(s); v++) {
        char **p = v ? &h->pv : &h->pk, *raw = v ? h->v : h->k;
        if (same == h->packed) {                        // only new rows: they go behind the others
            *p = xrealloc(*p, total);
            memset(*p + old, 0, total - old);
            pats_recut(s, x, h, v, reg, same, (unsigned char *)*p);
        } else {
            char *to = xcalloc(total, 1);
            if (stay) memcpy(to, *p, stay);
            pats_recut(s, x, h, v, reg, same, (unsigned char *)to);
            free(*p);
            *p = to;
        }
        memmove(raw, raw + (size_t)gone * D * 2, (size_t)(h->len - n) * D * 2);
    }
    h->pk_bytes = total;
    regions_set(h, reg);
    h->cap = -1;                                        // as in pats_keep
    head_reserve(s, h, h->len - n);
}

// The end of a pass. T tokens seen. Ratchet: only when T has grown by an eighth since the last time (rules.md A17).
static void pats_commit(Session *s, void *ms, int l, const float *q, int T_pass) {
    Pats *x = ms;
    int T = s->n_tok, cut = T - x->window;
    (void)q; (void)T_pass;
    if (l < s->c->L || !x->b_max) return;
    if (!x->T1) x->T1 = x->n1 = T;
    if (T > x->cap) {
        x->bits = xrealloc(x->bits, (size_t)(T + T / 4 + 1024));
        memset(x->bits + x->cap, 0, (size_t)(T + T / 4 + 1024 - x->cap));
        x->cap = T + T / 4 + 1024;
    }
    for (int t = s->base; x->write && t < cut; t++) {   // cut before attention already: remember by how much
        int b = pats_bits(x, t, T);
        if (b > x->bits[t]) x->bits[t] = (unsigned char)b;
    }
    if (x->policy == PATS_RATCHET && 8 * (int64_t)T < 9 * (int64_t)x->T_last) return;
    if (x->policy == PATS_RATCHET) { x->T_last = T; x->repacks++; }
    for (int t = x->policy == PATS_RATCHET ? 0 : x->cut; t < cut; t++) {
        int b = pats_bits(x, t, T);
        if (b > x->bits[t]) x->bits[t] = (unsigned char)b;
    }
    if (cut <= 0) return;
    x->cut = cut > x->cut ? cut : x->cut;
    #pragma omp parallel for schedule(dynamic) if (T > 1024 && !KV_DEV(s))
    for (int i = 0; i < s->c->L * s->c->G; i++) pats_pack_head(s, x, &s->head[i]);
}

// --pats-when=write: the pass reads its own rows cut already. Values only; bytes follow at the end of the pass.
static void pats_write(Session *s, Pats *x, int l, int T_pass) {
    int D = s->c->D, T = s->n_tok;
    if (!x->write || !x->b_max) return;
    if (!x->T1) x->T1 = x->n1 = T;
    if (KV_DEV(s)) {
        size_t mark = scratch_mark(s);
        unsigned char *bits = scratch(s, (size_t)T_pass);
        for (int t = 0; t < T_pass; t++) bits[t] = (unsigned char)pats_bits(x, s->base + t, T);
        rows_cut_cuda(s, l, bits, T_pass, x->rounding);
        scratch_reset(s, mark);
        return;
    }
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        for (int r = h->len - T_pass; r < h->len; r++) {
            int b = pats_bits(x, h->src[r], T);
            uint16_t *row[2] = { (uint16_t *)h->k + (size_t)(r - h->packed) * D, (uint16_t *)h->v + (size_t)(r - h->packed) * D };
            for (int v = 0; v < 2; v++) {
                for (int d = 0; d < D; d++) row[v][d] = pats_cut(row[v][d], b, x->rounding);
                if (x->rounding == PATS_MID) pats_mid(row[v], D, b);
            }
        }
    }
}
static void pats_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    pats_write(s, ms, l, T);
    attn_prefill(s, l, out, q, 0, T);
}
static int pats_steady(const Session *s, const void *ms) { (void)s; return !((const Pats *)ms)->write; }
static void pats_select(Session *s, void *ms, int l, const float *q) {
    (void)q;
    pats_write(s, ms, l, 1);
}
static void pats_forget(Session *s, void *ms, int n_tok) {     // B[t] goes with the rows, T_last stays (rules.md A35)
    Pats *x = ms;
    (void)s;
    if (n_tok < x->cap) memset(x->bits + n_tok, 0, (size_t)(x->cap - n_tok));
    if (n_tok < x->cut) x->cut = n_tok;
    if (n_tok < x->n1) x->n1 = n_tok;
}

// ---- opening
static int count_ids(const char *path, char err[256]) {        // numbers in an --ids file
    size_t size, n = 0;
    char *text = read_file(path, &size, err);
    if (!text) return -1;
    for (size_t i = 0; i < size; i++) n += isdigit((unsigned char)text[i]) && (!i || !isdigit((unsigned char)text[i - 1]));
    free(text);
    return n > INT_MAX ? INT_MAX : (int)n;
}

static int pats_open(Session *s, void *ms) {
    Pats *x = ms;
    const Options *o = s->opt;
    int policy = opt_choice(o, "pats-policy", "auto|ratchet|static|frozen");
    x->schedule = opt_choice(o, "pats-schedule", "middle|old|new");
    x->policy = policy ? policy - 1 : x->schedule == PATS_NEW ? PATS_FROZEN : PATS_RATCHET;     // rules.md A24
    x->rounding = opt_choice(o, "pats-round", "trunc|nearest|mid");
    x->rows64 = opt_choice(o, "pats-format", "dense|rows64");
    x->write = opt_choice(o, "pats-when", "after|write");
    x->b_max = opt_int(o, "pats-bmax");
    x->b_min = opt_int(o, "pats-bmin") < x->b_max ? opt_int(o, "pats-bmin") : x->b_max;         // rules.md A16
    x->sink = opt_int(o, "pats-sink");
    x->window = opt_int(o, "pats-window");
    x->T_end = opt_int(o, "pats-tend");
    if (x->b_max < 0 || x->b_max > 10) return refuse(s, "pats: --pats-bmax wants 0..10: an f16 has 10 mantissa bits");
    if (x->b_min < 0) return refuse(s, "pats: --pats-bmin wants 0 or more");
    if (x->sink < 0 || x->window < 0 || x->T_end < 0) return refuse(s, "pats: --pats-sink, --pats-window and --pats-tend want 0 or more");
    if (s->c->D % 8 || s->c->D > PATS_MAX_D) {
        snprintf(s->err, sizeof s->err, "pats: head_dim is %d, needs a multiple of 8 up to %d (a packed row must end on a byte)",
                 s->c->D, PATS_MAX_D);
        return -1;
    }
    if (strcmp(opt_str(o, "ctk"), "f16") || strcmp(opt_str(o, "ctv"), "f16"))
        return refuse(s, "pats: packs f16 rows, so -ctk and -ctv must be f16");
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        if (x->write && m->attend && m->open != pats_open)
            return refuse(s, "pats: --pats-when=write cannot be combined with a method that has its own prefill attention");
        if (!strcmp(m->name, "streaming") && opt_int(o, "streaming-rerotate"))
            return refuse(s, "pats: --streaming-rerotate would rotate keys whose bits are cut already");
    }
    for (int l = 0; l < s->c->L; l++)
        if (x->write && !layer_acts(s, l)) return refuse(s, "pats: --pats-when=write needs a model whose layers are all global or all windowed");
    if (x->policy == PATS_STATIC && !x->T_end) {
        if (!*opt_str(o, "ids")) return refuse(s, "pats: --pats-policy=static must know how long the dialogue gets: give --pats-tend");
        char err[256];
        if ((x->T_end = count_ids(opt_str(o, "ids"), err)) <= 0)
            return refuse(s, "pats: %s", x->T_end < 0 ? err : "--ids holds no ids, so --pats-tend must be given");
    }
    unpack_choose();
    s->fk = s->fv = format_find("f16");
    s->packing = &pats_packing;
    return 0;
}
static void pats_close(Session *s, void *ms) { (void)s; free(((Pats *)ms)->bits); }
static size_t pats_bytes(const Session *s, const void *ms) { (void)s; return (size_t)((const Pats *)ms)->cap; }

static void pats_stats(const Session *s, const void *ms, FILE *out) {
    const Pats *x = ms;
    size_t rows = 0, packed = 0, bits = 0, regions = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        rows += h->len; packed += h->packed; regions += h->n_reg;
        for (int r = 0; r < h->packed; r++) bits += x->bits[h->src[r]];
    }
    double f16 = (double)rows * s->c->D * 4, held = (double)kv_bytes(s) + (double)regions * sizeof(Region) + x->cap;
    fprintf(out, "pats: %zu of %zu rows cut, %d re-packs, %.2f bits an element; saved of f16 rows: ideal %.2f %%, really %.2f %% (tables, raw rows, slack)\n",
            packed, rows, x->repacks, rows ? (double)bits / rows : 0, rows ? 100.0 * bits / rows / 16 : 0, rows ? 100 * (1 - held / f16) : 0);
}
static const Opt pats_opts[] = {
    { "pats-schedule", 'c', "middle|old|new", "which rows lose most bits" },
    { "pats-policy",   'c', "auto|ratchet|static|frozen", "when rows are cut; auto: ratchet, frozen for schedule new" },
    { "pats-bmin",     'i', "2",   "bits every row outside the window loses" },
    { "pats-bmax",     'i', "8",   "most bits a row loses, at most 10; 0: none, as full" },
    { "pats-sink",     'i', "16",  "first tokens that lose bmin bits only" },
    { "pats-window",   'i', "128", "last tokens that stay raw" },
    { "pats-tend",     'i', "0",   "static: tokens of the whole dialogue; 0: all of --ids" },
    { "pats-format",   'c', "dense|rows64", "packed bytes: bit after bit, or the paper's 64-byte blocks; the same values" },
    { "pats-round",    'c', "trunc|nearest|mid", "how bits are cut; mid: half a step is added on reading" },
    { "pats-when",     'c', "after|write", "cut at the end of a pass; or own rows before its attention (perplexity protocol)" },
    { NULL, 0, NULL, NULL },
};


const Method pats_method = {
    .name    = "pats",
    .paper   = "PATS: Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs "
               "(papers/001)",
    .keeps   = "keeps every row; rows outside the last --pats-window tokens lose 2..8 low "
               "bits of f16 and are packed",
    .limits  = "needs head_dim % 8 == 0 and -ctk/-ctv f16; schedule new cannot stream "
               "(frozen), middle drifts towards more cutting in long decodes (ratchet)",
    .opts    = pats_opts,
    .role    = ROLE_STORE,
    .state   = sizeof(Pats),
    .open    = pats_open,
    .close   = pats_close,
    .attend  = pats_attend,
    .select  = pats_select,
    .steady  = pats_steady,
    .commit  = pats_commit,
    .bytes   = pats_bytes,
    .forget  = pats_forget,
    .stats   = pats_stats,
};

// ==================================================================================================== 11 LYCHEECLUSTER
// Li, Liu, Lin, Hu, Zhang: LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and Hierarchical KV Indexing.
// The text is cut into chunks that end where sentences, lines or brackets end; the mean key of a chunk stands for its tokens. Chunk
// keys are clustered (spherical k-means), clusters again into coarse units, and a decode step reads only the chunks of the clusters
// that score best for its query. New chunks are grafted onto the nearest cluster, whose covering radius grows to hold them.
//   kbar_j = normalise(mean of the keys of chunk j);  r_u = max over the chunks v below u of |v - mu_u|
//   q.v <= q.mu_u + |q| r_u                                                                (Eq. 2, the bound UB; beta = 1 ranks by it)
//   J(S_t, S_t-1) = |S_t n S_t-1| / |S_t u S_t-1|   (Eq. 3);    WindowHit(S_t) = |S_t n (S_t-1 u .. u S_t-32)| / |S_t|   (Eq. 4)
// A step reads: sinks [0,sink) + chunks retrieved, budget rows in all, + every row from t_idx on, the recent buffer. Nothing is dropped.
// **Differs from the paper:**
//   - clusters are ranked by q.mu + beta |q| r with beta 0: the bound favours loose clusters (--paper: beta 1 at both levels);
//   - Eq. 2 bounds chunk keys, not token keys; coarse radii cover the chunks below, not only the centroids (else they bound nothing);
//   - a moved centre also adds its shift to the radius; "moving average + expansion" alone loses members. Default: smallest enclosing ball;
//   - the first 16 tokens and the last 128 stay outside the index and are always read (Algorithm 1 starts with an empty buffer);
//   - the index is built again when the chunks have doubled (grafting alone never makes a cluster); the scan is flat unless --lychee-kg;
//   - k-means starts from every second chunk, so that runs repeat; the first two layers stay full, as in Quest and ClusterKV.
// Options: --budget (1024, sinks included) and lychee_opts below. The tree of one (layer, KV head): units -> clusters -> chunks.

// ---- the chunker: where may a chunk end? (paper Table 4)
typedef struct TokenText {          // the text of a token, given by whoever has a tokenizer. ctx NULL: every token is empty, none special
    const void *ctx;
    const char *(*bytes)(const void *ctx, int id, int *len);     // what the id adds to the text (a SentencePiece blank is a space)
    int (*special)(const void *ctx, int id);                     // 1: a control token; it has no text and ends the stream before it
} TokenText;
static TokenText token_text;

// Level of the boundary after a token: structure, sentence, phrase, blank; none of them; inside a character
enum { CUT_STRUCTURE = 1, CUT_SENTENCE, CUT_PHRASE, CUT_BLANK, CUT_NONE, CUT_INSIDE = 9 };
enum { STREAM_TAIL = 64, WALK_CHARS = 8 };              // bytes of the stream remembered; characters looked back at
enum { NEXT_END = -1, NEXT_EMPTY = -2 };                // instead of the next byte: the stream ends; the next token has no text

typedef struct { unsigned char b[STREAM_TAIL]; int n; } TextTail;   // the last bytes of the stream; a special token empties it

static const char *text_of(int id, int *n) {
    *n = 0;
    return token_text.ctx && id >= 0 ? token_text.bytes(token_text.ctx, id, n) : "";
}
static int special_token(int id) { return token_text.ctx && id >= 0 && token_text.special(token_text.ctx, id); }

static void tail_push(TextTail *t, const char *p, int n) {
    if (n > STREAM_TAIL) { p += n - STREAM_TAIL; n = STREAM_TAIL; }
    int keep = t->n + n > STREAM_TAIL ? STREAM_TAIL - n : t->n;
    memmove(t->b, t->b + t->n - keep, (size_t)keep);
    if (n) memcpy(t->b + keep, p, (size_t)n);
    t->n = keep + n;
}
static int tail_complete(const TextTail *t) {           // does the stream end at the end of a character? Invalid bytes do
    int k = 0;
    while (k < 3 && k < t->n && (t->b[t->n - 1 - k] & 0xc0) == 0x80) k++;
    if (k == t->n) return 1;
    int c = t->b[t->n - 1 - k], need = c >= 0xc0 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : c >= 0xf0 && c < 0xf8 ? 3 : 0;
    return k >= need;
}
static int char_before(const unsigned char *b, int end, int *at) {      // the character that ends at `end` (> 0); *at: its first byte. Invalid: one byte, 0xfffd
    int k = end - 1;
    while (k > 0 && end - k < 4 && (b[k] & 0xc0) == 0x80) k--;
    int c = b[k], len = c < 0x80 ? 1 : c >= 0xc0 && c < 0xe0 ? 2 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xf0 && c < 0xf8 ? 4 : 0;
    *at = end - 1;
    if (len != end - k) return b[end - 1] < 0x80 ? b[end - 1] : 0xfffd;
    *at = k;
    c &= len == 1 ? 0x7f : 0xff >> (len + 1);
    for (int i = 1; i < len; i++) c = c << 6 | (b[k + i] & 0x3f);
    static const int least[5] = { 0, 0, 0x80, 0x800, 0x10000 };
    return c < least[len] ? 0xfffd : c;                 // written longer than need be: invalid
}
static int run_before(const unsigned char *b, int at) { int n = 1; while (at - n >= 0 && b[at - n] == b[at]) n++; return n; }
static int newline_level(const unsigned char *b, int at) {
    while (at > 0 && (b[at - 1] == ' ' || b[at - 1] == '\t' || b[at - 1] == '\r')) at--;
    return at > 0 && b[at - 1] == '\n' ? CUT_STRUCTURE : CUT_SENTENCE;
}
static int joins(int next) { return next >= 0 && next < 128 && (isalnum(next) || next == '_' || next == '=' || next == ':'); }   // 3.14, a.b, a::b, 10:30

// Level of the character c at byte `at`; 0: a closer, which lets the walk go on; -1: the walk stops. next: the byte after it.
static int delimiter_level(const TextTail *t, int at, int c, int next, int guard) {
    int before = at > 0 ? t->b[at - 1] : 0;
    switch (c) {
    case '\n': return newline_level(t->b, at);
    case '}': case ']': return CUT_STRUCTURE;
    case '>': return guard && (before == '-' || before == '=' || before == '<') ? -1 : CUT_STRUCTURE;    // -> => <> are one sign
    case '-': case '*': case '`': return run_before(t->b, at) >= 3 ? CUT_STRUCTURE : -1;
    case '.': case '?': case '!': return guard && joins(next) ? -1 : CUT_SENTENCE;
    case ',': case ';': case ':': return guard && joins(next) ? -1 : CUT_PHRASE;
    case 0x3002: case 0xff1f: case 0xff01: return CUT_SENTENCE;                                          // ideographic . ? !
    case 0xff0c: case 0xff1b: case 0xff1a: case 0x3001: case 0xb7: return CUT_PHRASE;                    // ideographic , ; : enumeration comma, middle dot
    case ' ': case '\t': case '\r': case 0x3000: return CUT_BLANK;
    case ')': case '"': case '\'': case 0x201d: case 0x2019: case 0x300d: case 0x300f: case 0x3011: case 0xff09: return 0;
    }
    return -1;
}
static int all_blank(const char *p, int n) {
    for (int i = 0; i < n; i++) if (p[i] != ' ' && p[i] != '\t') return 0;
    return n > 0;
}
// Level of the boundary after the token (text, n), whose bytes end the tail; next: first byte of the next token, or NEXT_*.
static int boundary_level(const TextTail *t, const char *text, int n, int next, int guard) {
    int level = CUT_NONE, end = t->n, at;
    if (!tail_complete(t)) return CUT_INSIDE;
    if (all_blank(text, n)) return CUT_BLANK;
    for (int i = 0; i < WALK_CHARS && end > 0; i++, end = at) {
        int c = char_before(t->b, end, &at), v = delimiter_level(t, at, c, end < t->n ? t->b[end] : next, guard);
        if (v < 0) break;
        if (v && v < level) level = v;
    }
    if (level < CUT_NONE) return level;
    return next == NEXT_END || next == ' ' || next == '\t' || next == '\r' || next == '\n' ? CUT_BLANK : CUT_NONE;
}
// Appends levels until level[0..n) is known; token n-1 has a successor, so id has n+1 entries.
static void levels_extend(unsigned char *level, int from, int n, TextTail *t, const Token *tok, int guard) {
    for (int i = from; i < n; i++) {
        int len, next_len;
        if (special_token(tok[i].id)) { t->n = 0; level[i] = CUT_STRUCTURE; continue; }
        const char *text = text_of(tok[i].id, &len), *after = text_of(tok[i + 1].id, &next_len);
        tail_push(t, text, len);
        int next = special_token(tok[i + 1].id) ? NEXT_END : next_len ? (unsigned char)after[0] : NEXT_EMPTY;
        level[i] = (unsigned char)boundary_level(t, text, len, next, guard);
    }
}
// Last token of the chunk that starts at s: the best level among its possible ends; of equals the last (or first); failing all, the
// last end of a character; failing that, the longest chunk.
static int chunk_end(const unsigned char *level, int s, int min, int max, int first) {
    int best = s + max - 1, found = CUT_INSIDE;
    for (int e = s + min - 1; e < s + max; e++) {
        int better = level[e] < found || (level[e] == found && !(first && found < CUT_NONE));
        if (level[e] != CUT_INSIDE && better) { best = e; found = level[e]; }
    }
    return best;
}

// ---- the index: Nodes and Tree of kvcomp.h
typedef struct {            // statistics of one tree, on request (A7)
    double recall, covered, covered_indexed, jaccard, hit;
    long n_recall, n_jaccard, n_hit;
    int *seen, cap;         // (clusters) the step a cluster was last used in
    int step, size;         // steps since the build; |S_t-1|
} Watch;
typedef struct {
    float beta, beta_coarse;
    int gqa, kg, exact, lazy, unit, tokens, pool_max, first_tie, guard, min, max, buffer, sink, full_layers, iters, per_cluster, coarse_max, stats;
    int B;                              // the budget of this turn, sinks included
    unsigned char *level; int n_level, cap_level;       // boundary levels; the last token seen has none yet
    TextTail tail;                      // the text up to token n_level-1
    int *start, M, cap;                 // (M+1) chunk j is tokens start[j]..start[j+1]-1; start[M] is t_idx, the first token of the buffer
    int M_built;                        // chunks when the index was built; 0: there is none
    Tree *tree; Watch *watch;           // (L,G)
    long ends[CUT_INSIDE + 1];          // chunks by the level of their end
} Lychee;
enum { KG_FLAT = 0, KG_AUTO = -1 };
enum { WINDOW_HIT = 32 };

static const Opt lychee_opts[] = {
    { "lychee-beta",         'f', "0",    "weight of |q| r in a cluster's score; 1: the upper bound of Eq. 2" },
    { "lychee-beta-coarse",  'f', "0",    "the same for coarse units" },
    { "lychee-gqa",          'c', "max|sum|head", "query heads of a group: best of them, their sum, or a list for each" },
    { "lychee-kg",           's', "flat", "coarse units opened in a step: flat (no coarse level), auto, or a number" },
    { "lychee-prune",        'c', "none|exact", "exact: open units by upper bound until none can matter; reads what flat reads" },
    { "lychee-lazy",         'c', "ball|mean|freeze", "what a grafted chunk does to its cluster's centre" },
    { "lychee-centroid",     'c', "unit|mean", "centres on the unit sphere, or plain means" },
    { "lychee-pool",         'c', "mean|max", "a chunk's key: the mean of its keys, or their largest value in every dimension (Table 3)" },
    { "lychee-bound",        'c', "chunk|token", "token: a cluster's centre and radius are those of its raw token keys, so Eq. 2 bounds tokens" },
    { "lychee-tie",          'c', "last|first", "of equally good ends of a chunk" },
    { "lychee-guard",        'i', "1",    "0: marks inside 3.14, a.b, a::b, -> may end a chunk too" },
    { "lychee-chunk-min",    'i', "8",    "fewest tokens of a chunk" },
    { "lychee-chunk-max",    'i', "16",   "most tokens of a chunk" },
    { "lychee-buffer",       'i', "128",  "recent rows outside the index, always read, on top of the budget" },
    { "lychee-sink",         'i', "16",   "first rows outside the index, always read, inside the budget" },
    { "lychee-full-layers",  'i', "2",    "first layers that read every row" },
    { "lychee-iters",        'i', "10",   "iterations of k-means" },
    { "lychee-chunks-per-cluster", 'i', "2", "chunks a cluster has on average" },
    { "lychee-coarse-max",   'i', "64",   "most coarse units" },
    { "lychee-stats",        'b', "0",    "measure recall, attention covered, Jaccard and WindowHit (slow)" },
    { NULL, 0, NULL, NULL },
};
static int lychee_open(Session *s, void *ms) {
    Lychee *x = ms;
    const Options *o = s->opt;
    float paper = opt_int(o, "paper") ? 1 : 0;
    x->beta        = paper && !opt_given(o, "lychee-beta")        ? paper : (float)opt_real(o, "lychee-beta");
    x->beta_coarse = paper && !opt_given(o, "lychee-beta-coarse") ? paper : (float)opt_real(o, "lychee-beta-coarse");
    x->gqa    = opt_choice(o, "lychee-gqa", "max|sum|head");           x->lazy      = opt_choice(o, "lychee-lazy", "ball|mean|freeze");
    x->exact  = opt_choice(o, "lychee-prune", "none|exact");           x->unit      = opt_choice(o, "lychee-centroid", "mean|unit");
    x->tokens = opt_choice(o, "lychee-bound", "chunk|token");          x->first_tie = opt_choice(o, "lychee-tie", "last|first");
    x->pool_max = opt_choice(o, "lychee-pool", "mean|max");
    x->guard = opt_int(o, "lychee-guard");         x->min = opt_int(o, "lychee-chunk-min");         x->max = opt_int(o, "lychee-chunk-max");
    x->buffer = opt_int(o, "lychee-buffer");       x->sink = opt_int(o, "lychee-sink");             x->full_layers = opt_int(o, "lychee-full-layers");
    x->iters = opt_int(o, "lychee-iters");         x->per_cluster = opt_int(o, "lychee-chunks-per-cluster");
    x->coarse_max = opt_int(o, "lychee-coarse-max");   x->stats = opt_int(o, "lychee-stats");
    const char *kg = opt_str(o, "lychee-kg");
    int flat = !strcmp(kg, "flat"), by_itself = !strcmp(kg, "auto");
    x->kg = flat ? KG_FLAT : by_itself ? KG_AUTO : atoi(kg);
    if (!flat && !by_itself && (opt_check(&(Opt){ "lychee-kg", 'i', NULL, NULL }, kg, s->err) || x->kg < 1)) return refuse(s, "--lychee-kg wants flat, auto or a number of at least 1");
    if (x->beta < 0 || x->beta_coarse < 0) return refuse(s, "--lychee-beta and --lychee-beta-coarse must not be negative");
    if (x->min < 1 || x->max < x->min || x->max > 4096) return refuse(s, "--lychee-chunk-min and -max: 1 <= min <= max <= 4096 is needed");
    if (x->buffer < 0 || x->sink < 0 || x->full_layers < 0 || x->iters < 0) return refuse(s, "--lychee-buffer, -sink, -full-layers and -iters must not be negative");
    if (x->per_cluster < 1 || x->coarse_max < 1) return refuse(s, "--lychee-chunks-per-cluster and --lychee-coarse-max must be at least 1");
    if (s->ratio < 0 && s->budget < x->sink) return refuse(s, "--budget %d is smaller than --lychee-sink %d", s->budget, x->sink);
    x->B = s->budget;
    x->tree = xcalloc((size_t)s->c->L * s->c->G, sizeof *x->tree);
    if (x->stats) x->watch = xcalloc((size_t)s->c->L * s->c->G, sizeof *x->watch);
    x->start = xmalloc(sizeof(int) * (size_t)((x->cap = 64) + 1));
    x->start[0] = x->sink;
    return 0;
}
static void tree_free(const Session *s, Tree *t) {
    (void)s;
    if (KV_DEV(s)) near_free_cuda(t->mem); else free(t->mem);
}
static void lychee_close(Session *s, void *ms) {
    Lychee *x = ms;
    for (int i = 0; x->tree && i < s->c->L * s->c->G; i++) tree_free(s, &x->tree[i]);
    for (int i = 0; x->watch && i < s->c->L * s->c->G; i++) free(x->watch[i].seen);
    free(x->tree); free(x->watch); free(x->start); free(x->level);
}
static int indexed_layer(const Session *s, const Lychee *x, int l) { return l >= x->full_layers && layer_acts(s, l); }
static int t_idx(const Lychee *x) { return x->start[x->M]; }
static int wants_coarse(const Lychee *x) { return x->kg != KG_FLAT || x->exact; }

static int room_for_chunks(const Lychee *x) { return x->B > x->sink ? x->B - x->sink : 0; }
static LycheeRule lychee_rule(const Lychee *x, int P) {          // for the kernels; P: coarse units
    int kg = x->kg == KG_AUTO ? ((P + 3) / 4 > 8 ? (P + 3) / 4 : 8) : x->kg;
    return (LycheeRule){ .beta = x->beta, .beta_coarse = x->beta_coarse, .gqa = x->gqa, .units = x->exact ? 0 : kg, .lazy = x->lazy, .unit = x->unit,
                         .tokens = x->tokens, .pool_max = x->pool_max, .iters = x->iters, .min = x->min, .room = room_for_chunks(x), .sink = x->sink,
                         .M = x->M, .cap = 2 * x->M_built, .start = x->start };
}

typedef struct { char *mem; size_t at; } Block;          // mem NULL: only the size is wanted
static void *carve(Block *b, size_t bytes) { void *p = b->mem ? b->mem + b->at : NULL; b->at += (bytes + 63) & ~(size_t)63; return p; }
static void nodes_carve(Nodes *u, Block *at, int n, int children, int D) {
    u->n = n;
    u->mu = carve(at, (size_t)n * D * sizeof *u->mu);       u->r = carve(at, (size_t)n * sizeof *u->r);
    u->chunks = carve(at, (size_t)n * sizeof(int));         u->tokens = carve(at, (size_t)n * sizeof(int));
    u->first = carve(at, (size_t)n * sizeof(int));          u->last = carve(at, (size_t)n * sizeof(int));
    u->next = carve(at, (size_t)children * sizeof(int));
}
static size_t tree_carve(Tree *t, char *mem, int cap, int K, int P, int D) {    // -> bytes
    Block at = { mem, 0 };
    nodes_carve(&t->fine, &at, K, cap, D);
    nodes_carve(&t->coarse, &at, P, P ? K : 0, D);
    t->parent = carve(&at, P ? (size_t)K * sizeof(int) : 0);
    t->rho = carve(&at, (size_t)P * sizeof(float));
    return at.at;
}
static void tree_shape(const Lychee *x, int M, int *K, int *P) {                // clusters and coarse units of M chunks
    *K = (M + x->per_cluster - 1) / x->per_cluster;
    *P = !wants_coarse(x) ? 0 : (*K + 1) / 2 < x->coarse_max ? (*K + 1) / 2 : x->coarse_max;
}
// One block for everything; cap: chunks there will be at most before the next build, so grafting never asks for memory.
static void tree_room(const Session *s, Tree *t, int cap, int K, int P, int D) {
    Tree size;
    size_t bytes = tree_carve(&size, NULL, cap, K, P, D);
    if (bytes != t->bytes) { tree_free(s, t); t->mem = KV_DEV(s) ? near_grow_cuda(NULL, 0, bytes) : xmalloc(bytes); }
    t->bytes = bytes;
    tree_carve(t, t->mem, cap, K, P, D);
}
static void child_append(Nodes *u, int node, int child) {
    u->next[child] = -1;
    if (u->first[node] < 0) u->first[node] = child; else u->next[u->last[node]] = child;
    u->last[node] = child;
}

// ---- keys, distances, k-means
static void normalise(float *x, int D) {
    float f = 1 / sqrtf(dot_f32(x, x, D) + 1e-12f);
    for (int d = 0; d < D; d++) x[d] *= f;
}
// kbar of rows r0..r0+n-1: their mean or, for Table 3, their largest value in every dimension; rows (n,D) is room
static void chunk_key(const Session *s, int pool_max, const KVHead *hd, int r0, int n, float *rows, float *key) {
    int D = s->c->D;
    kv_load_k(s, hd, NULL, r0, n, rows);
    memcpy(key, rows, (size_t)D * sizeof *key);
    for (int i = 1; i < n; i++) for (int d = 0; d < D; d++) { float k = rows[(size_t)i * D + d]; key[d] = pool_max ? fmaxf(key[d], k) : key[d] + k; }
    for (int d = 0; d < D && !pool_max; d++) key[d] /= (float)n;
    normalise(key, D);
}
static void round_bf16(uint16_t *dst, float *x, int D) { for (int d = 0; d < D; d++) x[d] = bf16_to_f32(dst[d] = f32_to_bf16(x[d])); }
static double distance(const float *v, const uint16_t *mu, int D) {
    double ss = 0;
    for (int d = 0; d < D; d++) { double e = (double)v[d] - bf16_to_f32(mu[d]); ss += e * e; }
    return sqrt(ss);
}
static float above(double r) { return nextafterf((float)r, INFINITY); }      // f32 never below r

typedef struct {            // what one thread builds in
    float *key;             // (M,D) chunk keys
    float *mu;              // (K,D) centres in f32
    float *gmu;             // (P,D) of the units
    float *sum;             // (K,D)
    float *sc;              // (KV_TILE,KV_TILE)
    float *len;             // (K) 1/|mu|, for centroid=mean
    float *rows;            // (chunk-max,D)
    int *label, *glabel;    // (M) (K)
    int *count;             // (K)
} BuildRoom;

// label (n): the centre with the largest cosine; ties: the lower one. len NULL: centres have length 1. The (n,K) scores never exist at once.
static void assign_points(const float *x, int n, const float *mu, int K, int D, const float *len, float *sc, int *label) {
    for (int i0 = 0; i0 < n; i0 += KV_TILE) {
        int m = n - i0 < KV_TILE ? n - i0 : KV_TILE;
        float best[KV_TILE];
        for (int i = 0; i < m; i++) { best[i] = -INFINITY; label[i0 + i] = 0; }
        for (int j0 = 0; j0 < K; j0 += KV_TILE) {
            int k = K - j0 < KV_TILE ? K - j0 : KV_TILE;
            attn_scores(sc, x + (size_t)i0 * D, mu + (size_t)j0 * D, m, k, D, 1);
            for (int i = 0; i < m; i++) {
                float *row = sc + (size_t)i * k;
                for (int j = 0; len && j < k; j++) row[j] *= len[j0 + j];
                float top = max_f32(row, k);
                if (!(top > best[i])) continue;
                int j = 0;
                while (row[j] != top) j++;
                best[i] = top; label[i0 + i] = j0 + j;
            }
        }
    }
}
static void update_centres(const float *x, int n, const int *label, float *mu, int K, int D, int unit, const BuildRoom *w) {
    memset(w->sum, 0, (size_t)K * D * sizeof(float));
    memset(w->count, 0, (size_t)K * sizeof(int));
    for (int i = 0; i < n; i++) {
        float *to = w->sum + (size_t)label[i] * D;
        w->count[label[i]]++;
        for (int d = 0; d < D; d++) to[d] += x[(size_t)i * D + d];
    }
    for (int j = 0; j < K; j++) {                           // an empty cluster keeps its centre
        float *to = w->sum + (size_t)j * D;
        if (!w->count[j]) continue;
        if (unit) normalise(to, D); else for (int d = 0; d < D; d++) to[d] /= (float)w->count[j];
        memcpy(mu + (size_t)j * D, to, (size_t)D * sizeof(float));
    }
}
static const float *inverse_lengths(const float *mu, int K, int D, int unit, float *len) {
    for (int j = 0; j < K && !unit; j++) len[j] = 1 / sqrtf(dot_f32(mu + (size_t)j * D, mu + (size_t)j * D, D) + 1e-12f);
    return unit ? NULL : len;
}
// Spherical k-means of x (n,D) into K centres: mu (K,D) as rounded to bf16 in dst (K,D); label (n) is the last assignment, made against those.
static void kmeans(const float *x, int n, int K, int D, int iters, int unit, const BuildRoom *w, float *mu, uint16_t *dst, int *label) {
    for (int j = 0; j < K; j++) memcpy(mu + (size_t)j * D, x + (size_t)(((int64_t)2 * j + 1) * n / ((int64_t)2 * K)) * D, (size_t)D * sizeof(float));
    for (int it = 0; it < iters; it++) {
        assign_points(x, n, mu, K, D, inverse_lengths(mu, K, D, unit, w->len), w->sc, label);
        update_centres(x, n, label, mu, K, D, unit, w);
    }
    for (int j = 0; j < K; j++) round_bf16(dst + (size_t)j * D, mu + (size_t)j * D, D);
    assign_points(x, n, mu, K, D, inverse_lengths(mu, K, D, unit, w->len), w->sc, label);
}

// ---- building the trees
static void nodes_clear(Nodes *u) {
    for (int j = 0; j < u->n; j++) { u->r[j] = 0; u->chunks[j] = u->tokens[j] = 0; u->first[j] = u->last[j] = -1; }
}
static void node_cover(Nodes *u, int node, const float *key, int tokens, int D) {       // one more chunk below the node, centre unmoved
    u->chunks[node]++;
    u->tokens[node] += tokens;
    u->r[node] = fmaxf(u->r[node], above(distance(key, u->mu + (size_t)node * D, D)));
}
static void unit_rho(Tree *t, int g, float beta, int D, float *mu) {                    // mu (D) is room
    t->rho[g] = 0;
    for (int c = t->coarse.first[g]; c >= 0; c = t->coarse.next[c]) {
        if (!t->fine.chunks[c]) continue;
        to_f32(mu, t->fine.mu + (size_t)c * D, DT_BF16, (size_t)D);
        t->rho[g] = fmaxf(t->rho[g], above(distance(mu, t->coarse.mu + (size_t)g * D, D) + (double)beta * t->fine.r[c]));
    }
}
// bound=token: centre and radius of a cluster from the raw keys of its tokens (A4), the same bytes and the same formula.
static void cover_tokens(const Session *s, const Lychee *x, Tree *t, const KVHead *hd, const BuildRoom *w) {
    int D = s->c->D;
    for (int c = 0; c < t->fine.n; c++) {
        float *sum = w->sum;
        memset(sum, 0, (size_t)D * sizeof *sum);
        for (int pass = 0; pass < 2; pass++) {
            for (int j = t->fine.first[c]; j >= 0; j = t->fine.next[j]) {
                int n = x->start[j + 1] - x->start[j];
                kv_load_k(s, hd, NULL, x->start[j], n, w->rows);
                for (int i = 0; i < n; i++) {
                    const float *k = w->rows + (size_t)i * D;
                    if (pass) t->fine.r[c] = fmaxf(t->fine.r[c], above(distance(k, t->fine.mu + (size_t)c * D, D)));
                    else for (int d = 0; d < D; d++) sum[d] += k[d] / (float)t->fine.tokens[c];
                }
            }
            if (pass || !t->fine.chunks[c]) continue;
            round_bf16(t->fine.mu + (size_t)c * D, sum, D);
            t->fine.r[c] = 0;
        }
    }
}
static void tree_build(const Session *s, const Lychee *x, Tree *t, const KVHead *hd, const BuildRoom *w) {
    int D = s->c->D, M = x->M, K = t->fine.n, P = t->coarse.n;
    for (int j = 0; j < M; j++) chunk_key(s, x->pool_max, hd, x->start[j], x->start[j + 1] - x->start[j], w->rows, w->key + (size_t)j * D);
    kmeans(w->key, M, K, D, x->iters, x->unit, w, w->mu, t->fine.mu, w->label);
    if (P) kmeans(w->mu, K, P, D, x->iters, x->unit, w, w->gmu, t->coarse.mu, w->glabel);
    nodes_clear(&t->fine);
    nodes_clear(&t->coarse);
    for (int c = 0; c < K && P; c++) { t->parent[c] = w->glabel[c]; child_append(&t->coarse, w->glabel[c], c); }
    for (int j = 0; j < M; j++) {
        int c = w->label[j], tokens = x->start[j + 1] - x->start[j];
        child_append(&t->fine, c, j);
        node_cover(&t->fine, c, w->key + (size_t)j * D, tokens, D);
        if (P) node_cover(&t->coarse, t->parent[c], w->key + (size_t)j * D, tokens, D);
    }
    if (x->tokens) cover_tokens(s, x, t, hd, w);
    for (int g = 0; g < P; g++) unit_rho(t, g, x->beta, D, w->rows);
}
static void watch_restart(Watch *w, int clusters) {      // cluster numbers change with a build
    if (clusters > w->cap) w->seen = xrealloc(w->seen, (size_t)(w->cap = clusters) * sizeof(int));
    for (int c = 0; c < clusters; c++) w->seen[c] = -2 * WINDOW_HIT;
    w->step = w->size = 0;
}
static void build_host(Session *s, Lychee *x, int K, int P) {
    int L = s->c->L, G = s->c->G, D = s->c->D, M = x->M, n = n_threads();
    size_t mark = scratch_mark(s), f = sizeof(float);
    BuildRoom *room = scratch(s, (size_t)n * sizeof *room);
    for (int i = 0; i < n; i++)
        room[i] = (BuildRoom){
            .key = scratch(s, (size_t)M * D * f), .mu = scratch(s, (size_t)K * D * f), .gmu = scratch(s, (size_t)P * D * f), .sum = scratch(s, (size_t)K * D * f),
            .sc = scratch(s, (size_t)KV_TILE * KV_TILE * f), .len = scratch(s, (size_t)K * f), .rows = scratch(s, (size_t)x->max * D * f),
            .label = scratch(s, (size_t)M * sizeof(int)), .glabel = scratch(s, (size_t)K * sizeof(int)), .count = scratch(s, (size_t)K * sizeof(int)) };
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < L * G; i++) if (indexed_layer(s, x, i / G)) tree_build(s, x, &x->tree[i], &s->head[i], &room[thread_id()]);
    scratch_reset(s, mark);
}
static void lychee_build(Session *s, Lychee *x) {
    int G = s->c->G, M = x->M, K, P;
    tree_shape(x, M, &K, &P);
    LycheeRule rule = lychee_rule(x, P);
    for (int l = 0; l < s->c->L; l++) {
        if (!indexed_layer(s, x, l)) continue;
        for (int i = l * G; i < (l + 1) * G; i++) {
            tree_room(s, &x->tree[i], 2 * M, K, P, s->c->D);
            if (x->watch) watch_restart(&x->watch[i], K);
        }
        if (KV_DEV(s)) lychee_build_cuda(s, &rule, l, &x->tree[l * G]);
    }
    if (!KV_DEV(s)) build_host(s, x, K, P);
    x->M_built = M;
    s->changes++;
}

// ---- scores
typedef struct {            // what a group, or one query head, looks for
    const float *q;         // (m,D)
    int m;
    float w[Q_BLOCK];       // score of a node = max over i of (q_i . mu) w_i, + beta slack r
    float slack;
} Probe;
typedef struct {            // what one thread retrieves in
    float *sc;              // (R,max(K,P)) dot products
    float *S, *Sg;          // (K) (P) scores
    int *unit;              // (P) units, a heap
    int *used, n_used;      // (K+1) clusters a chunk was taken from
    unsigned char *taken;   // (M) chunks
    int *rows;              // (N) rows
    float *q;               // (D) summed query
    float *mu;              // (KV_TILE,D) gathered centres; also keys, for statistics
    float *prob;            // (N) with --lychee-stats
} SeekRoom;

static void probe_max(Probe *p, const float *q, int m, int D) {                 // gqa=max: scale free, every head may win
    *p = (Probe){ .q = q, .m = m, .slack = 1 };
    for (int i = 0; i < m; i++) p->w[i] = 1 / fmaxf(sqrtf(dot_f32(q + (size_t)i * D, q + (size_t)i * D, D)), 1e-20f);
}
static void probe_sum(Probe *p, const float *q, int m, int D, float *sum) {     // gqa=sum; with m == 1 also gqa=head
    *p = (Probe){ .q = sum, .m = 1, .w = { 1 } };
    memset(sum, 0, (size_t)D * sizeof *sum);
    for (int i = 0; i < m; i++) {
        for (int d = 0; d < D; d++) sum[d] += q[(size_t)i * D + d];
        p->slack += sqrtf(dot_f32(q + (size_t)i * D, q + (size_t)i * D, D));
    }
}
static void probe_scores(const Probe *p, const float *sc, int n, const float *r, float beta, float *S) {        // S (n) of n nodes; sc (m,n): q_i . mu
    float slack = beta * p->slack;
    for (int j = 0; j < n; j++) S[j] = -INFINITY;
    for (int i = 0; i < p->m; i++, sc += n) {
        float w = p->w[i];
        for (int j = 0; j < n; j++) S[j] = sc[j] * w > S[j] ? sc[j] * w : S[j];
    }
    for (int j = 0; beta && j < n; j++) S[j] += slack * r[j];
}
static void score_all(const Probe *p, const Nodes *u, const float *r, float beta, int D, float *sc, float *S) {
    scores_of(sc, p->q, u->mu, DT_BF16, p->m, u->n, D, 1, (Ahead){0});
    probe_scores(p, sc, u->n, r, beta, S);
    for (int j = 0; j < u->n; j++) S[j] = u->chunks[j] ? S[j] : -INFINITY;
}
static void score_unit(const Lychee *x, const Tree *t, const Probe *p, int g, int D, SeekRoom *w) {      // the clusters of one unit: w->S
    const Nodes *u = &t->fine;
    float sc[Q_BLOCK * KV_TILE], r[KV_TILE], S[KV_TILE];
    int c = t->coarse.first[g], id[KV_TILE];
    while (c >= 0) {
        int k = 0;
        for (; c >= 0 && k < KV_TILE; c = t->coarse.next[c]) {
            if (!u->chunks[c]) continue;
            to_f32(w->mu + (size_t)k * D, u->mu + (size_t)c * D, DT_BF16, (size_t)D);
            r[k] = u->r[c];
            id[k++] = c;
        }
        attn_scores(sc, p->q, w->mu, p->m, k, D, 1);
        probe_scores(p, sc, k, r, x->beta, S);
        for (int j = 0; j < k; j++) w->S[id[j]] = S[j];
    }
}

// ---- a heap of nodes, best on top: larger score, then lower number
static int before_in(const float *S, int a, int b) { return S[a] > S[b] || (S[a] == S[b] && a < b); }
static void sift_down(int *heap, int n, int i, const float *S) {
    for (int k, x = heap[i]; ; i = k) {
        k = 2 * i + 1;
        if (k + 1 < n && before_in(S, heap[k + 1], heap[k])) k++;
        if (k >= n || !before_in(S, heap[k], x)) { heap[i] = x; return; }
        heap[i] = heap[k];
    }
}
static void heapify(int *heap, int n, const float *S) { for (int i = n / 2 - 1; i >= 0; i--) sift_down(heap, n, i, S); }
static int pop_best(int *heap, int *n, const float *S) {
    int top = heap[0];
    heap[0] = heap[--*n];
    if (*n) sift_down(heap, *n, 0, S);
    return top;
}
// ---- retrieval (Algorithm 1, lines 8-16). Scores of the clusters opened go to w->S (K); a cluster that is empty or not opened has -INFINITY.
static void open_flat(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) { score_all(p, &t->fine, t->fine.r, x->beta, D, w->sc, w->S); }

static int units_by_score(const Tree *t, const Probe *p, const float *r, float beta, int D, SeekRoom *w) {
    int n = 0;
    score_all(p, &t->coarse, r, beta, D, w->sc, w->Sg);
    for (int g = 0; g < t->coarse.n; g++) if (t->coarse.chunks[g]) w->unit[n++] = g;
    heapify(w->unit, n, w->Sg);
    for (int c = 0; c < t->fine.n; c++) w->S[c] = -INFINITY;
    return n;
}
static void open_top(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {      // the best k_g units, more while they hold too little
    int P = t->coarse.n, tokens = 0, kg = x->kg == KG_AUTO ? ((P + 3) / 4 > 8 ? (P + 3) / 4 : 8) : x->kg;
    int units = units_by_score(t, p, t->coarse.r, x->beta_coarse, D, w);
    for (int i = 0; units > 0 && (i < kg || tokens < 4 * room_for_chunks(x)); i++) {
        int g = pop_best(w->unit, &units, w->Sg);
        tokens += t->coarse.tokens[g];
        score_unit(x, t, p, g, D, w);
    }
}
// Units by their upper bound, until the budget fills with clusters that score above the bound of every unit not opened.
// The bound gets 1e-4 |q| of air, more than the rounding of f32 dot products takes, so the result is that of a flat scan.
static void open_exact(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {
    int units = units_by_score(t, p, t->rho, 1, D, w);
    while (units > 0) {
        float bound = w->Sg[w->unit[0]] + 1e-4f * p->slack;
        if (weight_from(w->S, t->fine.tokens, t->fine.n, order_key(bound) + 1) > room_for_chunks(x)) break;
        score_unit(x, t, p, pop_best(w->unit, &units, w->Sg), D, w);
    }
}
static int take_chunks(const Lychee *x, const Tree *t, int c, int *used, SeekRoom *w) {        // of cluster c, in order; 0: one did not fit
    for (int j = t->fine.first[c]; j >= 0; j = t->fine.next[j]) {
        int tokens = x->start[j + 1] - x->start[j];
        if (*used + tokens > room_for_chunks(x)) return 0;
        if (j == t->fine.first[c]) w->used[w->n_used++] = c;
        w->taken[j] = 1;
        *used += tokens;
    }
    return 1;
}
// Marks the chunks to read in w->taken (M), notes their clusters in w->used; returns their tokens. Clusters are taken by score, then number,
// and the first chunk that does not fit ends it. That needs no order but one threshold: the score from which on clusters hold more than
// there is room for. All above it fit, and those that equal it are taken as long as they do.
static int retrieve(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {
    int used = 0, n = 0, K = t->fine.n, room = room_for_chunks(x);
    uint32_t key = 0;
    (x->exact ? open_exact : x->kg != KG_FLAT ? open_top : open_flat)(x, t, p, D, w);
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) if (weight_from(w->S, t->fine.tokens, K, key | bit) > room) key |= bit;
    memset(w->taken, 0, (size_t)x->M);
    for (int c = 0; c < K; c++) { w->used[n] = c; n += order_key(w->S[c]) > key && w->S[c] > -INFINITY; }
    for (int i = 0; i < n; i++) __builtin_prefetch(&t->fine.first[w->used[i]]);  // anywhere in memory: all at once, and not one after the other
    for (int i = 0; i < n; i++) __builtin_prefetch(&t->fine.next[t->fine.first[w->used[i]]]);
    w->n_used = 0;                                       // each of the n writes itself back to its place
    for (int i = 0; i < n; i++) take_chunks(x, t, w->used[i], &used, w);
    for (int c = 0; c < K; c++) if (order_key(w->S[c]) == key && w->S[c] > -INFINITY && !take_chunks(x, t, c, &used, w)) break;
    return used;
}
static int rows_to_read(const Lychee *x, const unsigned char *taken, int *rows) {       // sinks and chunks taken, ascending
    int n = 0;
    for (int r = 0; r < x->sink; r++) rows[n++] = r;
    for (int j = 0; j < x->M; j++)
        if (taken[j]) for (int r = x->start[j]; r < x->start[j + 1]; r++) rows[n++] = r;
    return n;
}

// ---- statistics on request (A7, rules B30): against exact dot products, for every query head
static void watch_head(Session *s, const Lychee *x, Watch *a, const KVHead *hd, const float *q, int k, SeekRoom *w, int *top) {
    int D = s->c->D, N = hd->len, lo = x->sink, hi = t_idx(x), hits = 0;
    double sum = 0, got = 0, sum_indexed = 0, got_indexed = 0;
    for (int r = 0; r < N; r += KV_TILE) {
        int n = N - r < KV_TILE ? N - r : KV_TILE;
        kv_load_k(s, hd, NULL, r, n, w->mu);
        attn_scores(w->prob + r, q, w->mu, 1, n, D, 1 / sqrtf((float)D));
    }
    int m = top_k(w->prob + lo, hi - lo, k, top);
    float max = max_f32(w->prob, N);
    for (int j = 0, i = 0; j < x->M; j++)                                  // rows of the index: top is ascending too
        for (int r = x->start[j]; r < x->start[j + 1]; r++) {
            double e = exp((double)w->prob[r] - max);
            int is_top = i < m && top[i] == r - lo;
            i += is_top;
            sum_indexed += e;
            if (w->taken[j]) { hits += is_top; got_indexed += e; }
        }
    for (int r = 0; r < lo; r++) sum += exp((double)w->prob[r] - max);
    for (int r = hi; r < N; r++) sum += exp((double)w->prob[r] - max);
    got = sum + got_indexed;                                               // sinks and recent rows are read anyway
    sum += sum_indexed;
    if (!k) return;
    a->recall += (double)hits / k;
    a->covered += got / sum;
    a->covered_indexed += got_indexed / sum_indexed;
    a->n_recall++;
}
static void watch_mark(Watch *a, const int *used, int n, int *size, int *inter, int *hit) {     // S_t grows by these clusters
    for (int i = 0; i < n; i++) {
        int ago = a->step - a->seen[used[i]];
        if (!ago) continue;                                                // another head of the group brought it
        ++*size;
        *inter += ago == 1;
        *hit += ago <= WINDOW_HIT;
        a->seen[used[i]] = a->step;
    }
}
static void watch_step(Watch *a, int size, int inter, int hit) {           // Eq. 3 and 4; a step after a build has no past
    int united = size + a->size - inter;
    if (a->step > 1 && united) { a->jaccard += (double)inter / united; a->n_jaccard++; }
    if (a->step > 1 && size)   { a->hit += (double)hit / size; a->n_hit++; }
    a->size = size;
}

// ---- hooks
static SeekRoom *seek_rooms(Session *s, const Lychee *x, const Tree *t, int R) {
    int n = n_threads(), K = t->fine.n, P = t->coarse.n, wide = K > P ? K : P, D = s->c->D, N = s->n_tok;
    SeekRoom *w = scratch(s, (size_t)n * sizeof *w);
    for (int i = 0; i < n; i++)
        w[i] = (SeekRoom){
            .sc = scratch(s, (size_t)R * wide * sizeof(float)), .S = scratch(s, (size_t)K * sizeof(float)), .Sg = scratch(s, (size_t)P * sizeof(float)),
            .unit = scratch(s, (size_t)P * sizeof(int)), .used = scratch(s, (size_t)(K + 1) * sizeof(int)),
            .taken = scratch(s, (size_t)x->M), .rows = scratch(s, (size_t)N * sizeof(int)), .q = scratch(s, (size_t)D * sizeof(float)),
            .mu = scratch(s, (size_t)KV_TILE * D * sizeof(float)), .prob = x->watch ? scratch(s, (size_t)N * sizeof(float)) : NULL };
    return w;
}
static int seek(const Lychee *x, const Tree *t, const float *q, int m, int D, SeekRoom *w, int *n) {     // q (m,D) -> tokens of the chunks; w->rows (n)
    Probe p;
    if (x->gqa == GQA_MAX) probe_max(&p, q, m, D); else probe_sum(&p, q, m, D, w->q);
    int k = retrieve(x, t, &p, D, w);
    *n = rows_to_read(x, w->taken, w->rows);
    return k;
}
static int seek_found(const Lychee *x, const int *found, int per, SeekRoom *w, int *n) {       // the same from what the GPU found (LIST_HEAD + 2 per)
    *n = found[LIST_ROWS]; w->n_used = found[LIST_CLUSTERS];
    memcpy(w->rows, found + LIST_HEAD, (size_t)*n * sizeof(int));
    memcpy(w->used, found + LIST_HEAD + per, (size_t)w->n_used * sizeof(int));
    for (int j = 0, i = x->sink; j < x->M && x->watch; j++) {
        w->taken[j] = i < *n && w->rows[i] == x->start[j];
        if (w->taken[j]) i += x->start[j + 1] - x->start[j];
    }
    return found[LIST_TOKENS];
}
// q (R,D): the heads of KV head g. found: of its lists, (lists,LIST_HEAD + 2 per), or NULL
static void select_group(Session *s, const Lychee *x, int l, int g, const float *q, const int *found, int per, SeekRoom *w) {
    int R = s->c->H / s->c->G, D = s->c->D, lists = x->gqa == GQA_HEAD ? R : 1, each = R / lists, size = 0, inter = 0, hit = 0;
    const Tree *t = &x->tree[l * s->c->G + g];
    Watch *a = x->watch ? &x->watch[l * s->c->G + g] : NULL;
    if (a) a->step++;
    for (int i = 0; i < lists; i++) {
        int n, k = found ? seek_found(x, found + (size_t)i * (LIST_HEAD + 2 * per), per, w, &n) : seek(x, t, q + (size_t)i * each * D, each, D, w, &n);
        if (lists == 1) view_group(s, l, g, w->rows, n, t_idx(x)); else view_set(s, l, g * R + i, w->rows, n, t_idx(x));
        if (!a) continue;
        watch_mark(a, w->used, w->n_used, &size, &inter, &hit);
        for (int h = i * each; h < (i + 1) * each; h++) watch_head(s, x, a, kv_head(s, l, g), q + (size_t)h * D, k, w, w->rows);
    }
    if (a) watch_step(a, size, inter, hit);
}
static long lychee_dense(const Lychee *x) { return (long)x->B + x->buffer; }               // up to so many tokens every row is read
static int lychee_bring(const Lychee *x) { return x->watch || x->gqa == GQA_HEAD; }        // the host must see what the GPU finds
static int lychee_steady(const Session *s, const void *ms) { return !lychee_bring(ms) && s->n_tok != lychee_dense(ms) + 1; }
static void lychee_select(Session *s, void *ms, int l, const float *q) {
    Lychee *x = ms;
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    if (l < x->full_layers || !x->M_built || s->n_tok <= lychee_dense(x)) return;              // the views say: every row
    double t0 = now();
    size_t mark = scratch_mark(s);
    int per = x->sink + room_for_chunks(x), *found = NULL, bring = lychee_bring(x);
    size_t each = (size_t)(x->gqa == GQA_HEAD ? R : 1) * (LIST_HEAD + 2 * per);   // of a KV head
    if (KV_DEV(s)) {
        LycheeRule rule = lychee_rule(x, x->tree[l * G].coarse.n);
        found = lychee_seek_cuda(s, &rule, l, &x->tree[l * G], q, per, bring);
        if (x->watch) q = on_host(s, q, 0, 1);                             // statistics are measured on the host
    }
    SeekRoom *w = KV_DEV(s) && !bring ? NULL : seek_rooms(s, x, &x->tree[l * G], R);
    #pragma omp parallel for schedule(static) if (x->M > 256 && !found)
    for (int g = 0; g < G; g++) if (w) select_group(s, x, l, g, q + (size_t)g * R * D, found ? found + g * each : NULL, per, &w[thread_id()]);
    scratch_reset(s, mark);
    timed(&s->clk.index, t0);
}

// Cuts every chunk whose end can be known: it and the recent rows after it have been seen, and one token more (B16).
static void cut_chunks(const Session *s, Lychee *x) {
    int N = s->n_tok, behind = (x->buffer > 1 ? x->buffer : 1) + x->max;
    if (N > x->cap_level) x->level = xrealloc(x->level, (size_t)(x->cap_level = N + N / 2 + 256));
    if (x->n_level < N - 1) levels_extend(x->level, x->n_level, N - 1, &x->tail, s->tok, x->guard);
    if (x->n_level < N - 1) x->n_level = N - 1;
    while (N - t_idx(x) >= behind) {
        int e = chunk_end(x->level, t_idx(x), x->min, x->max, x->first_tie);
        if (x->M == x->cap) x->start = xrealloc(x->start, (size_t)((x->cap += x->cap / 2) + 1) * sizeof(int));
        x->ends[x->level[e]]++;
        x->start[++x->M] = e + 1;
    }
}
// The node takes in one more key v beside the n it has: its centre follows, its radius goes on covering all (A6).
static void node_absorb(const Lychee *x, Nodes *u, int node, int n, const float *v, int unit, int D, float *room) {
    uint16_t *mu = u->mu + (size_t)node * D;
    double d = distance(v, mu, D), r = u->r[node], delta = 0;
    double step = x->lazy == LAZY_MEAN ? 1 / (n + 1.0) : x->lazy == LAZY_BALL && d > r ? (d - r) / (2 * d) : 0;     // ball: the smallest that holds the old one and v
    if (step > 0) {
        to_f32(room, mu, DT_BF16, (size_t)D);
        for (int i = 0; i < D; i++) room[i] = (float)(room[i] + step * ((double)v[i] - room[i]));
        if (x->lazy == LAZY_MEAN && unit) normalise(room, D);
        for (int i = 0; i < D; i++) {
            uint16_t to = f32_to_bf16(room[i]);
            double e = (double)bf16_to_f32(to) - bf16_to_f32(mu[i]);
            delta += e * e;
            mu[i] = to;
        }
        delta = sqrt(delta);
        d = distance(v, mu, D);
    }
    if (delta > 0 || d > r) u->r[node] = above(fmax(r + delta, d));
}
static int nearest_cluster(const Lychee *x, const Tree *t, const float *v, int D, float *mu, SeekRoom *w) {    // mu (D) is room
    int c = 0;
    Probe p = { .q = v, .m = 1, .w = { 1 } };
    score_all(&p, &t->fine, t->fine.r, 0, D, w->sc, w->S);                 // -INFINITY for an empty cluster
    for (int i = 0; i < t->fine.n; i++) {
        if (x->tokens) {                                                   // raw centres differ in length: compare directions
            to_f32(mu, t->fine.mu + (size_t)i * D, DT_BF16, (size_t)D);
            w->S[i] /= sqrtf(dot_f32(mu, mu, D) + 1e-12f);
        }
        if (w->S[i] > w->S[c]) c = i;
    }
    return c;
}
static void tree_graft(const Session *s, const Lychee *x, Tree *t, const KVHead *hd, int j, float *room, SeekRoom *w) {   // room (chunk-max + 2,D)
    int D = s->c->D, n = x->start[j + 1] - x->start[j];
    float *v = room, *rows = room + (size_t)2 * D;
    room += D;
    chunk_key(s, x->pool_max, hd, x->start[j], n, rows, v);
    int c = nearest_cluster(x, t, v, D, room, w);
    if (!x->tokens) node_absorb(x, &t->fine, c, t->fine.chunks[c], v, x->unit, D, room);
    for (int i = 0; i < n && x->tokens; i++) node_absorb(x, &t->fine, c, t->fine.tokens[c] + i, rows + (size_t)i * D, 0, D, room);
    child_append(&t->fine, c, j);
    t->fine.chunks[c]++; t->fine.tokens[c] += n;
    if (!t->coarse.n) return;
    int g = t->parent[c];
    node_absorb(x, &t->coarse, g, t->coarse.chunks[g], v, x->unit, D, room);
    t->coarse.chunks[g]++; t->coarse.tokens[g] += n;
    unit_rho(t, g, x->beta, D, room);
}
static void lychee_graft(Session *s, Lychee *x, int from) {                // chunks from..M-1, in order
    LycheeRule rule = lychee_rule(x, 0);
    for (int l = 0; KV_DEV(s) && l < s->c->L; l++) if (indexed_layer(s, x, l)) lychee_graft_cuda(s, &rule, l, from);
    if (KV_DEV(s)) return;
    int L = s->c->L, G = s->c->G, D = s->c->D, n = n_threads(), l0 = 0;
    while (l0 < L && !indexed_layer(s, x, l0)) l0++;
    if (l0 == L) return;
    size_t mark = scratch_mark(s);
    SeekRoom *w = seek_rooms(s, x, &x->tree[l0 * G], 1);
    float *room = scratch(s, (size_t)n * (x->max + 2) * D * sizeof(float));
    #pragma omp parallel for schedule(static) if (x->M > 256)
    for (int i = l0 * G; i < L * G; i++) {
        for (int j = from; j < x->M && indexed_layer(s, x, i / G); j++)
            tree_graft(s, x, &x->tree[i], &s->head[i], j, room + (size_t)thread_id() * (x->max + 2) * D, &w[thread_id()]);
    }
    scratch_reset(s, mark);
}
static void lychee_commit(Session *s, void *ms, int l, const float *q, int T) {
    Lychee *x = ms;
    int old = x->M;
    (void)q; (void)T;
    if (l < s->c->L) return;
    if (kv_longest(s, 0) != s->n_tok) die(EXIT_USAGE, "--method: lychee needs every row, another part has dropped some of %d", s->n_tok);
    if (!s->decoding) x->B = budget_now(s);
    if (!x->M_built && s->n_tok <= lychee_dense(x)) return;                      // everything is read anyway: no index yet (B13)
    double t0 = now();
    cut_chunks(s, x);
    if (x->M == old) return;
    if (x->M >= 2 * x->M_built) lychee_build(s, x); else lychee_graft(s, x, old);
    timed(&s->clk.index, t0);
}
static void lychee_forget(Session *s, void *ms, int n_tok) {
    Lychee *x = ms;
    (void)s;
    x->n_level = x->tail.n = 0;                                            // other tokens may follow: the text is read again when needed
    if (t_idx(x) > n_tok) { x->M = x->M_built = 0; x->start[0] = x->sink; }
}
static size_t lychee_bytes(const Session *s, const void *ms) {
    const Lychee *x = ms;
    size_t n = (size_t)x->cap_level + (size_t)(x->cap + 1) * sizeof(int);
    for (int i = 0; i < s->c->L * s->c->G; i++) n += x->tree[i].bytes + (x->watch ? sizeof(Watch) + (size_t)x->watch[i].cap * sizeof(int) : 0);
    return n;
}
static size_t lychee_plan(const Session *s, const void *ms, int n) {       // if every chunk is as short as it may be
    const Lychee *x = ms;
    int M = n / x->min, K, P, heads = 0;
    tree_shape(x, M, &K, &P);
    for (int l = 0; l < s->c->L; l++) heads += indexed_layer(s, x, l) ? s->c->G : 0;
    return (size_t)n + (size_t)(M + 1) * sizeof(int) + heads * tree_carve(&(Tree){ 0 }, NULL, 2 * M, K, P, s->c->D);
}
static Watch watch_total(const Session *s, const Lychee *x) {
    Watch a = {0};
    for (int i = 0; x->watch && i < s->c->L * s->c->G; i++) {
        const Watch *b = &x->watch[i];
        a.recall += b->recall;      a.covered += b->covered;        a.covered_indexed += b->covered_indexed;    a.n_recall += b->n_recall;
        a.jaccard += b->jaccard;    a.n_jaccard += b->n_jaccard;    a.hit += b->hit;                            a.n_hit += b->n_hit;
    }
    return a;
}
static void lychee_stats(const Session *s, const void *ms, FILE *out) {
    const Lychee *x = ms;
    long single = 0, empty = 0, clusters = 0, most = 0, forced = x->ends[CUT_NONE] + x->ends[CUT_INSIDE], cut = forced;
    for (int i = 0; i < s->c->L * s->c->G && x->M_built; i++) {
        const Nodes *u = &x->tree[i].fine;
        int *copy = KV_DEV(s) ? xmalloc((size_t)(u->n + 1) * sizeof(int)) : NULL;
        if (copy) bytes_load_cuda(copy, u->chunks, (size_t)u->n * sizeof(int));
        for (int c = 0; c < u->n; c++, clusters++) {
            int n = (copy ? copy : u->chunks)[c];
            single += n == 1; empty += !n; most = n > most ? n : most;
        }
        free(copy);
    }
    for (int k = CUT_STRUCTURE; k < CUT_NONE; k++) cut += x->ends[k];
    if (!clusters) { fprintf(out, "lychee: no index yet (it starts past %ld tokens)\n", (long)x->B + x->buffer); return; }
    fprintf(out, "lychee: %d chunks of %.2f tokens; ends: %.0f%% structure, %.0f%% sentence, %.0f%% phrase, %.0f%% blank, %.0f%% forced\n",
            x->M, (double)(t_idx(x) - x->sink) / x->M, 100.0 * x->ends[CUT_STRUCTURE] / cut, 100.0 * x->ends[CUT_SENTENCE] / cut,
            100.0 * x->ends[CUT_PHRASE] / cut, 100.0 * x->ends[CUT_BLANK] / cut, 100.0 * forced / cut);
    fprintf(out, "lychee: %ld clusters, %.1f%% of one chunk, %.1f%% empty, largest %ld chunks; index %zu bytes, %.2f%% of the rows'\n",
            clusters, 100.0 * single / clusters, 100.0 * empty / clusters, most, lychee_bytes(s, x), 100.0 * lychee_bytes(s, x) / kv_bytes(s));
    Watch a = watch_total(s, x);
    if (a.n_recall) fprintf(out, "lychee: recall %.4f, attention covered %.4f, of the indexed rows' %.4f, over %ld head steps\n",
                            a.recall / a.n_recall, a.covered / a.n_recall, a.covered_indexed / a.n_recall, a.n_recall);
    if (a.n_jaccard && a.n_hit) fprintf(out, "lychee: Jaccard %.4f, WindowHit(%d) %.4f\n", a.jaccard / a.n_jaccard, WINDOW_HIT, a.hit / a.n_hit);
}


const Method lychee_method = {
    .name    = "lychee",
    .paper   = "LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking "
               "and Hierarchical KV Indexing",
    .keeps   = "keeps every row; reads sinks, the text chunks of the best clusters (budget in "
               "all) and the recent rows: saves reads only",
    .limits  = "needs every row: not with methods that drop some. Goes with loopserve-p and "
               "pats. Chunks follow the text only where a tokenizer is known",
    .budget  = 1024,
    .opts    = lychee_opts,
    .role    = ROLE_SELECT,
    .state   = sizeof(Lychee),
    .open    = lychee_open,
    .close   = lychee_close,
    .select  = lychee_select,
    .steady  = lychee_steady,
    .commit  = lychee_commit,
    .bytes   = lychee_bytes,
    .plan    = lychee_plan,
    .forget  = lychee_forget,
    .stats   = lychee_stats,
};

// ==================================================================================================== 12 SONIC INFERENCE
// SONIC: Segmented Optimized Nexus for Information Compression in Key-Value Caching. arXiv 2601.21927 (papers/003).
// A finished message is read once more by K learned Nexus tokens with their own weight matrices; afterwards only their K and
// V rows stay and the message's own rows are dropped. System message and current turn are never compressed. The base model is frozen.
//   S_aug = { I_sys, m_1, N^(1), m_2, N^(2), .., m_h, N^(h), Q_curr }                                     (1)
//   e(N_j^t) = e_base + e_pos[j] + e_turn[t]          t: the turn, user and assistant share it              (2)
//   text sees text at or before it                                                                        (3)
//   the body of m_i is invisible behind N^(i)                                                             (4)
//   Nexus tokens see each other                                                                           (5)
//   a Nexus row uses W^N for q,k,v,o and the MLP; norms are the base's                                     (3.1; Session.alt)
// Incremental (default): when the next turn begins, each message of the turn before it is encoded once and cached for ever:
//   truncate behind the user message | its Nexus pass, drop it | encode the answer again | its Nexus pass, drop it
// The answer is encoded again because it was generated while the raw user message was visible, which (4) forbids.
// **Differs from the paper:**
//   - (5) across segments lets old Nexus tokens see later ones, so their rows could not be cached: incremental is causal
//     across segments (VIS_SEGMENT). --sonic-oneshot has the exact mask: the whole history in one pass, every turn;
//   - K_i = max(1, min(K, |B_i|)), or by --sonic-ratio per message; the first --sonic-sink tokens count as system message;
//   - positions, T_max, and what a body is (all tokens of a message) are not in the paper: see NOTES.md.
// Options: --sonic-k, -ratio, -weights, -untrained, -seed, -pos, -oneshot, -sink, -force.

typedef struct { int n, turn; } SonicMessage;           // a finished message: tokens of its body, its turn

typedef struct {
    SafeFile *file;             // the adapter, mapped; NULL: untrained
    Layer *alt;                 // (L) the Nexus branch
    float *embed, *pos, *turn;  // (C) e_base, (K_max,C) e_pos, (T_max,C) e_turn: one block, `embed` first
    int K_max, T_max, K;
    double ratio;               // share of a body to remove; < 0: K counts
    int original, oneshot, sink;
    int sys;                    // leading tokens that are the system message
    int h;                      // finished messages; the segment number of the current turn
    int cur, n_user;            // first token of the current turn; how many of its tokens are the user's message
    int drop;                   // commit drops text rows of segments [0,drop)
    SonicMessage *msg;          // stb_ds array, one-shot only: the h messages
    long n_body, n_nexus;       // sums of |B_i| and K_i
    double seconds;             // spent at turn starts on finished messages
    int warned;
} Sonic;
static int sonic_load(Session *s, Sonic *x, const char *path);  // reads the adapter (section 20); 0, or -1 with s->err set
static size_t sonic_file_bytes(const Sonic *x);                 // the adapter's tensors


// ---- the adapter file
// No adapter: the branch is the base itself, e_base the mean of the embedding, e_pos and e_turn small noise of its size.
static double sonic_normal(uint64_t *state) {
    double u = (double)(splitmix64(state) >> 11) / 9007199254740992.0, v = (double)(splitmix64(state) >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(1 - u)) * cos(2 * M_PI * v);
}
static void sonic_untrained(Session *s, Sonic *x) {
    const Tensor *e = &s->w->embed;
    int C = s->c->C, rows = e->rows < 4096 ? e->rows : 4096;    // enough for a mean
    uint64_t state = mix64((uint64_t)opt_int(s->opt, "sonic-seed"));
    double square = 0;
    x->K_max = 64; x->T_max = 32; x->K = 16;
    x->embed = xcalloc((size_t)(1 + x->K_max + x->T_max) * C, sizeof(float));
    float *row = xmalloc((size_t)C * sizeof *row);
    for (int r = 0; r < rows; r++) {
        to_f32(row, (const char *)e->data + (size_t)r * C * dtype_size(e->dtype), e->dtype, C);
        for (int i = 0; i < C; i++) { x->embed[i] += row[i] / (float)rows; square += (double)row[i] * row[i]; }
    }
    double std = sqrt(square / rows / C);
    for (int r = 1; r < 1 + x->K_max + x->T_max; r++)
        for (int i = 0; i < C; i++) x->embed[(size_t)r * C + i] = (float)(sonic_normal(&state) * std * (r > x->K_max ? .3 : 1));
    free(row);
    if (!opt_int(s->opt, "quiet"))
        fprintf(stderr, "kvcomp: WARNING: --sonic-untrained: the Nexus tokens were never trained. What leaves the current turn is LOST to the model;\n"
                        "kvcomp: WARNING: good for trials of memory and speed only.\n");
}

// ---- the augmented sequence
static int sonic_K(const Sonic *x, int n) {             // Nexus tokens for a body of n >= 1 tokens
    int K = x->ratio >= 0 ? (int)floor((1 - x->ratio) * n + .5 + 1e-6) : x->K, most = x->K_max < n ? x->K_max : n;
    return K < 1 ? 1 : K > most ? most : K;
}
// Token j of a segment. Its id says which row of e_pos and e_turn it is made of.
static Token sonic_token(const Sonic *x, int turn, int j, int seg, int pos) {
    return (Token){ -1 - (turn * x->K_max + j), pos, seg, TOK_EXTRA };
}

static void sonic_embed(Session *s, void *ms, const Token *t, float *out) {     // Eq. 2. out (C)
    Sonic *x = ms;
    int i = -1 - t->id, j = i % x->K_max, turn = i / x->K_max, C = s->c->C;
    if (turn >= x->T_max) {
        if (!x->warned++ && !opt_int(s->opt, "quiet"))
            fprintf(stderr, "kvcomp: sonic: turn %d is past the %d the adapter knows; the last turn embedding is used from here on\n", turn, x->T_max);
        turn = x->T_max - 1;
    }
    for (int c = 0; c < C; c++) out[c] = x->embed[c] + x->pos[(size_t)j * C + c] + x->turn[(size_t)turn * C + c];
}
static int sonic_seg(const Sonic *x, int i) { return i < x->sys ? -1 : x->h; }  // segment of a text token that is token i of the session

// Drops what Eq. 4 hides for ever: text rows of finished messages.
static void sonic_drop(Session *s, const Sonic *x, int l) {
    for (int g = 0; g < s->c->G; g++) {
        const KVHead *h = kv_head(s, l, g);
        size_t mark = scratch_mark(s);
        int n = 0, *keep = scratch(s, (size_t)(h->len + 1) * sizeof(int));
        for (int r = 0; r < h->len; r++) {
            const Token *t = &s->tok[h->src[r]];
            if (t->kind == TOK_EXTRA || t->seg < 0 || t->seg >= x->drop) keep[n++] = r;
        }
        if (n < h->len) kv_keep(s, l, g, keep, n);
        scratch_reset(s, mark);
    }
}
static void sonic_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Sonic *x = ms;
    (void)q; (void)T;
    if (s->decoding) return;
    if (l < s->c->L) { sonic_drop(s, x, l); return; }
    for (int k = 0; k < s->c->L; k++) if (!layer_acts(s, k)) sonic_drop(s, x, k);       // a storage rule: every layer
    if (!x->original) return;
    int i = s->n_tok - 1;                               // original positions: text goes on where text ended
    while (i > 0 && s->tok[i].kind == TOK_EXTRA) i--;
    s->pos_next = s->tok[i].pos + 1;
}

// ---- incremental: section 5 of the spec, steps 1 to 5
// Nexus pass for the body that begins at token `first` and ends the session; the body's rows are dropped layer by layer.
static void sonic_nexus(Session *s, Sonic *x, int first, int turn) {
    int n = s->n_tok - (first > x->sys ? first : x->sys);
    if (n <= 0) return;                                 // empty, or counted as system message
    int K = sonic_K(x, n);
    size_t mark = scratch_mark(s);
    Token *t = scratch(s, (size_t)K * sizeof *t);
    for (int j = 0; j < K; j++) t[j] = sonic_token(x, turn, j, x->h, x->original ? s->pos_next + j : -1);
    x->drop = ++x->h;
    x->n_body += n; x->n_nexus += K;
    s->forward(s, t, K);
    scratch_reset(s, mark);
}
static int sonic_finish(Session *s, Sonic *x, Token *t, int n, int foot) {      // the messages of the last turn; -> ids left in t
    int user = x->cur + x->n_user, n_old = s->n_tok - user, n_reply = n_old + foot, turn = s->turn - 1;
    size_t mark = scratch_mark(s);
    Token *reply = scratch(s, (size_t)(n_reply + 1) * sizeof *reply);
    memcpy(reply, s->tok + user, (size_t)n_old * sizeof *reply);
    memcpy(reply + n_old, t, (size_t)foot * sizeof *reply);
    kv_truncate(s, user);                                                       // step 1
    sonic_nexus(s, x, x->cur, turn);                                            // 2, 3
    int first = s->n_tok;
    for (int i = 0; i < n_reply; i++) reply[i] = (Token){ reply[i].id, -1, sonic_seg(x, first + i), TOK_REPLY };
    if (n_reply) s->forward(s, reply, n_reply);                                 // 4
    sonic_nexus(s, x, first, turn);                                             // 5
    scratch_reset(s, mark);
    memmove(t, t + foot, (size_t)(n - foot) * sizeof *t);
    return n - foot;
}

// ---- one-shot: the whole of Eq. 1 again, every turn. -> ids in t, the current turn's from x->cur on
static void sonic_message(Sonic *x, int first, int end, int turn) {
    SonicMessage m = { end - (first > x->sys ? first : x->sys), turn };
    if (m.n > 0) arrput(x->msg, m);
}
static int sonic_again(Session *s, Sonic *x, Token *t, int n, int foot) {
    int n_text = 0, user = x->cur + x->n_user, i = 0, p = 0;
    size_t mark = scratch_mark(s);
    Token *text = scratch(s, (size_t)(s->n_tok + foot) * sizeof *text);
    for (int k = 0; k < s->n_tok; k++) if (s->tok[k].kind != TOK_EXTRA) text[n_text++] = s->tok[k];
    memcpy(text + n_text, t, (size_t)foot * sizeof *text);
    n_text += foot;
    sonic_message(x, x->cur, user, s->turn - 1);
    sonic_message(x, user, s->n_tok + foot, s->turn - 1);
    x->h = (int)arrlen(x->msg);
    x->n_body = x->n_nexus = 0;
    for (int m = 0; m < x->h; m++) { x->n_body += x->msg[m].n; x->n_nexus += sonic_K(x, x->msg[m].n); }
    x->cur = n_text + (int)x->n_nexus;
    memmove(t + x->cur, t + foot, (size_t)(n - foot) * sizeof *t);
    for (; p < x->sys && p < n_text; p++, i++) t[i] = (Token){ text[p].id, p, -1, text[p].kind };
    for (int m = 0; m < x->h; m++) {
        int K = sonic_K(x, x->msg[m].n);
        for (int end = p + x->msg[m].n; p < end; p++, i++) t[i] = (Token){ text[p].id, x->original ? p : i, m, text[p].kind };
        for (int j = 0; j < K; j++, i++) t[i] = sonic_token(x, x->msg[m].turn, j, m, x->original ? p + j : i);
    }
    for (n += x->cur - foot; i < n; i++) t[i].pos = x->original ? p++ : i;
    scratch_reset(s, mark);
    kv_truncate(s, 0);
    return n;
}

static int sonic_enter(Session *s, void *ms, Token *t, int n, int cap) {
    Sonic *x = ms;
    double t0 = now();
    int foot = s->n_foot < n ? s->n_foot : n - 1;      // at least one token is the new turn's
    (void)cap;                                          // text and at most as many Nexus tokens: below 2 (n + n_tok)
    if (!s->turn) x->sys = s->n_sys > x->sink ? s->n_sys : x->sink;
    else if (x->oneshot) n = sonic_again(s, x, t, n, foot);
    else n = sonic_finish(s, x, t, n, foot);
    if (!x->oneshot || !s->turn) x->cur = s->n_tok;
    int from = x->cur - s->n_tok, own = n - from;       // the current turn is t[from..n)
    for (int i = from; i < n; i++) t[i].seg = sonic_seg(x, s->n_tok + i);
    x->n_user = own - (s->n_head < own ? s->n_head : own);
    x->drop = x->h;
    int last = t[n - 1].pos < 0 ? s->pos_next + n - 1 : t[n - 1].pos;
    if (last >= s->pos_end)
        die(EXIT_RUN, "sonic: position %d is past max_position_embeddings %d (a shorter dialogue%s)", last, s->pos_end,
            x->original ? "" : ", or --sonic-pos=original with an adapter trained so");
    x->seconds += now() - t0;
    return n;
}

// ---- opening
static int sonic_numbers(Session *s, Sonic *x) {        // K, ratio, positions: options against what the adapter allows
    const Options *o = s->opt;
    const char *pos = opt_str(o, "sonic-pos");
    int K = opt_int(o, "sonic-k");
    x->ratio = opt_given(o, "sonic-ratio") ? opt_real(o, "sonic-ratio") : s->ratio;
    if (x->ratio > 1 || (x->ratio < 0 && (opt_given(o, "sonic-ratio") || opt_given(o, "ratio"))))
        return refuse(s, "sonic: --sonic-ratio %g: expected 0 to 1", x->ratio);
    if (K && x->ratio >= 0) return refuse(s, "sonic: --sonic-k and a ratio are two ways to say the same, give one");
    if (K < 0 || K > x->K_max) return refuse(s, "sonic: --sonic-k %d: the adapter knows 1 to %d Nexus tokens a message", K, x->K_max);
    if (K) x->K = K;
    if (x->K > x->K_max) return refuse(s, "sonic: metadata k_default is %d, but k_max is %d", x->K, x->K_max);
    if (strcmp(pos, "adapter") && x->file && x->original != !strcmp(pos, "original"))
        return refuse(s, "sonic: --sonic-pos=%s, but the adapter was trained with %s positions", pos, x->original ? "original" : "augmented");
    if (!x->file) x->original = !strcmp(pos, "original");
    if (x->sink < 0) return refuse(s, "sonic: --sonic-sink %d: expected 0 or more", x->sink);
    return 0;
}
static int sonic_open(Session *s, void *ms) {
    Sonic *x = ms;
    const Options *o = s->opt;
    char path[1100];
    int untrained = opt_int(o, "sonic-untrained");
    x->oneshot = opt_int(o, "sonic-oneshot");
    x->sink = opt_int(o, "sonic-sink");
    s->budget = 0;                                      // K says what is kept
    snprintf(path, sizeof path, "%s", opt_str(o, "sonic-weights"));
    if (*path && untrained) return refuse(s, "sonic: --sonic-weights and --sonic-untrained exclude each other");
    if (!*path) snprintf(path, sizeof path, "%s/nexus.safetensors", s->c->dir);
    if (!untrained && !opt_given(o, "sonic-weights") && !file_exists(path))
        return refuse(s, "sonic: needs trained Nexus weights, and %.300s is not there: --sonic-weights=FILE, or --sonic-untrained for a trial", path);
    x->alt = xmalloc((size_t)s->c->L * sizeof(Layer));
    memcpy(x->alt, s->w->layer, (size_t)s->c->L * sizeof(Layer));
    if (untrained) sonic_untrained(s, x);
    else if (sonic_load(s, x, path)) return -1;
    x->pos = x->embed + s->c->C;
    x->turn = x->pos + (size_t)x->K_max * s->c->C;
    if (sonic_numbers(s, x)) return -1;
    s->ratio = -1;                                      // it was a share of each message
    s->pos_end = s->c->max_pos;
    s->pos_extra = x->original ? 0 : 2 * (x->ratio >= 0 ? x->K_max : x->K);      // two messages finish at a turn's start
    s->made_for = x->file ? safetensors_meta(x->file, "chat_template") : NULL;
    s->alt = x->alt;
    s->rule = x->oneshot ? VIS_SEGMENT_EXACT : VIS_SEGMENT;
    return 0;
}
static void sonic_close(Session *s, void *ms) {
    Sonic *x = ms;
    s->alt = NULL;
    safetensors_close(x->file);
    free(x->alt); free(x->embed); arrfree(x->msg);
}
static size_t sonic_bytes(const Session *s, const void *ms) {      // embeddings and layer table; the branch's matrices are weights, not cache
    const Sonic *x = ms;
    size_t embed = (size_t)(1 + x->K_max + x->T_max) * s->c->C * sizeof(float);
    return embed + (size_t)s->c->L * sizeof(Layer) + arrlenu(x->msg) * sizeof(SonicMessage);
}
static size_t sonic_plan(const Session *s, const void *ms, int n) { return sonic_bytes(s, ms) + sonic_file_bytes(ms) + (size_t)n / 8 * sizeof(SonicMessage); }   // a message takes 8 tokens or more
static void sonic_stats(const Session *s, const void *ms, FILE *out) {
    const Sonic *x = ms;
    long now_rows = s->n_tok - x->cur, sys = x->sys < s->n_tok ? x->sys : s->n_tok;
    size_t bytes = sonic_file_bytes(x);
    if (!x->h && now_rows > sys) now_rows -= sys;       // the first turn holds the system message itself
    double hist = x->n_body ? 1 - (double)x->n_nexus / x->n_body : 0, all = (double)(sys + x->n_body + now_rows);
    double total = all > 0 ? 1 - (double)(sys + x->n_nexus + now_rows) / all : 0;
    fprintf(out, "sonic: %d messages, %ld tokens in %ld Nexus tokens: hist_ratio %.4f, total_ratio %.4f, %s, %s positions\n",
            x->h, x->n_body, x->n_nexus, hist, total, x->oneshot ? "one-shot" : "incremental", x->original ? "original" : "augmented");
    fprintf(out, "sonic: %.3f s at turn starts for finished messages; adapter %zu bytes%s\n", x->seconds, bytes, x->file ? "" : " (untrained: the base's weights)");
}
static const Opt sonic_opts[] = {
    { "sonic-k",         'i', "0",    "Nexus tokens a message, never more than it has tokens; 0: the adapter's default (untrained: 16)" },
    { "sonic-ratio",     'f', "0",    "share of each message to remove instead (also --ratio); at most the adapter's k_max tokens stay" },
    { "sonic-weights",   's', "",     "adapter file (default: nexus.safetensors in the model's folder)" },
    { "sonic-untrained", 'b', "0",    "go on without trained weights: the base's own, random embeddings" },
    { "sonic-seed",      'i', "1",    "of those embeddings" },
    { "sonic-pos",       'c', "adapter|augmented|original", "as trained (untrained: augmented); Nexus tokens take positions of their own; text keeps its own" },
    { "sonic-oneshot",   'b', "0",    "the paper's exact mask: the whole history in one pass, every turn" },
    { "sonic-sink",      'i', "4",    "first tokens that count as system message at least" },
    { "sonic-force",     'b', "0",    "take an adapter whose fingerprint does not fit" },
    { NULL, 0, NULL, NULL },
};


const Method sonic_method = {
    .name    = "sonic",
    .paper   = "SONIC: Segmented Optimized Nexus for Information Compression in Key-Value "
               "Caching, arXiv 2601.21927",
    .keeps   = "keeps the system message, K Nexus rows a finished message, and the current "
               "turn; the rest is dropped when the next turn begins",
    .limits  = "needs an adapter trained for the model; --budget does not apply (see "
               "--sonic-k); a dialogue ends where its positions pass max_position_embeddings; "
               "goes with a storage format (sonic+pats), with no other selection or sparse "
               "prefill",
    .opts    = sonic_opts,
    .role    = ROLE_PREFILL | ROLE_SELECT,
    .rule    = VIS_SEGMENT,
    .evicts  = 1,
    .state   = sizeof(Sonic),
    .open    = sonic_open,
    .close   = sonic_close,
    .enter   = sonic_enter,
    .embed   = sonic_embed,
    .commit  = sonic_commit,
    .bytes   = sonic_bytes,
    .plan    = sonic_plan,
    .stats   = sonic_stats,
};

// ==================================================================================================== 13 DILILAZYKV
// DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression (anonymous ACL submission).
// Stage 1, once per model: a fact (the needle, key set N) is hidden in a long text and asked for. How the last prompt row a of
// a head (softmax, n keys, its k largest are T) looks at the needle gives the head three scores, means over the runs:
//   Dili = sum_{T&N} a / sum_T a      Lazy = sum_{T&N} a / sum_N a      Inf = 2 Dili Lazy / (Dili + Lazy)              (Eq. 1)
// Stage 2, at the end of every turn's prefill: heads that find needles get more rows (Algorithm 1; b_c = B - w):
//   b_fixed = b_c (1 - 1/beta)        pool = L H b_c / beta             S_ij = Inf_ij / Lam_i, Lam_i = sum_j Inf_ij (line 14)
//   lam_i = Lam_i / sum_i Lam_i (16)  b_ij = b_fixed + pool (eps + lam_i) S_ij / (1 + eps L)   (17, 18)   C_ij = floor(max(0, b_ij) + .5)
// Query head j of layer i then reads the C_ij candidates it attends to most (last w queries, max over 7 neighbours) and the last
// w rows. A KV head stores the union of its query heads' rows, each once; a view per query head says which ones it reads.
// **Differs from the paper:**
//   - Dili and Lazy are weighted precision and recall, as the paper's tables were made; --calibrate-score=count is its text;
//   - line 17 spends 1 + eps L times the pool: divided out, so that the caps' mean is b_c. paper-literal: as printed;
//   - a score file's keys are read. (The published loader ignores them, and the published files are shuffled.)
//   - one KV head's rows are stored once, not once per query head; so a later turn's prefill reads the union (rules.md A4).
// Options: --budget (128, per query head), --obs-window (16), --kernel, --dililazy-*; for stage 1 --calibrate OUT.json.

enum { ALLOC_PAPER, ALLOC_LITERAL, ALLOC_CODE };
typedef struct {
    Snap snap;
    int heads, alloc, base;     // heads a layer with a cap of their own: H, or G under --dililazy-gqa=kv; b_c the caps are for
    double beta, eps;
    double *inf;                // (L,heads)
    int *cap;                   // (L,heads) candidates a head may read
} DiliLazy;

// ---- Algorithm 1. inf (L,n) >= 0, b_c = base >= 0 -> cap (L,n)
static void dililazy_caps(const double *inf, int L, int n, int base, double beta, double eps, int alloc, int *cap) {
    double total = 0, weights = 0, fixed = base * (1 - 1 / beta), pool = base / beta * L * n;
    if (alloc == ALLOC_PAPER) pool /= 1 + eps * L;
    if (alloc == ALLOC_CODE) {                          // the authors' code: whole rows, half a row a head set aside and given to all
        double dyn = rint((base - fmod(base, beta)) / beta);    // Python's //: floor(base / beta) could round up to a whole number first
        fixed = base - dyn + .5;
        pool = fmax(0, dyn * L * n - .5 * L * n);
    }
    for (int i = 0; i < L * n; i++) total += inf[i];
    for (int pass = 0; pass < 2; pass++)                // code mode divides by the sum of the weights, so they are walked twice
        for (int i = 0; i < L; i++) {
            double Lam = 0;
            for (int j = 0; j < n; j++) Lam += inf[i * n + j];
            for (int j = 0; j < n; j++) {
                double x = inf[i * n + j], S = Lam > 0 ? x / Lam : 1.0 / n, lam = total > 0 ? Lam / total : 1.0 / L;   // (14), (16)
                double weight = alloc != ALLOC_CODE ? (eps + lam) * S : total > 0 ? x + eps * x / (Lam + 1e-9) : 1;
                if (!pass) { weights += weight; continue; }
                double b = fixed + pool * (alloc == ALLOC_CODE ? weight / weights : weight);                           // (17), (18)
                b = alloc == ALLOC_CODE ? nearbyint(b) : floor(fmax(0, b) + .5);                                        // (19)
                cap[i * n + j] = (int)fmin(fmax(b, 0), INT_MAX);
            }
        }
}

static int dililazy_scores(Session *s, DiliLazy *x) {   // x->inf from the file; under gqa=kv the means over the groups
    const Config *c = s->c;
    char path[1100];
    snprintf(path, sizeof path, "%s", opt_str(s->opt, "dililazy-scores"));
    if (!*path) {
        snprintf(path, sizeof path, "%s/head_scores.json", c->dir);
        if (!file_exists(path))
            return refuse(s, "dililazy needs the scores of the model's heads: --dililazy-scores FILE, or make them: --calibrate %.300s", path);
    }
    x->inf = scores_load(path, opt_str(s->opt, "dililazy-score"), c->L, c->H, s->err);
    for (int i = 0; x->inf && i < c->L * x->heads && x->heads < c->H; i++) {
        double sum = 0;
        int R = c->H / c->G;
        for (int r = 0; r < R; r++) sum += x->inf[i * R + r];
        x->inf[i] = sum / R;                            // i <= i*R: never read again
    }
    return x->inf ? 0 : -1;
}
static int dililazy_open(Session *s, void *ms) {
    DiliLazy *x = ms;
    const char *alloc = opt_str(s->opt, "dililazy-alloc");
    x->alloc = !strcmp(alloc, "code") ? ALLOC_CODE : !strcmp(alloc, "paper-literal") ? ALLOC_LITERAL : ALLOC_PAPER;
    x->heads = !strcmp(opt_str(s->opt, "dililazy-gqa"), "kv") ? s->c->G : s->c->H;
    x->beta = opt_real(s->opt, "dililazy-beta");
    x->eps = opt_real(s->opt, "dililazy-eps");
    x->base = -1;
    if (!(x->beta > 0)) return refuse(s, "--dililazy-beta must be above 0, found %g", x->beta);
    if (!(x->eps >= 0)) return refuse(s, "--dililazy-eps must not be negative, found %g", x->eps);
    if (snap_options(s, &x->snap, 16) || dililazy_scores(s, x)) return -1;
    x->cap = xcalloc((size_t)s->c->L * x->heads, sizeof(int));
    return 0;
}
static void dililazy_close(Session *s, void *ms) {
    DiliLazy *x = ms;
    (void)s;
    free(x->inf); free(x->cap);
}
static size_t dililazy_bytes(const Session *s, const void *ms) {
    const DiliLazy *x = ms;
    return (size_t)s->c->L * x->heads * (sizeof(double) + sizeof(int));
}

// ---- Selection. Pooled per query head; gqa=kv takes the mean after that (the other order than SnapKV's, rules.md A6)
static void dililazy_commit(Session *s, void *ms, int l, const float *q, int T) {
    DiliLazy *x = ms;
    int B = budget_now(s), w = snap_kept_window(&x->snap, B), H = s->c->H, G = s->c->G, R = H / G;
    if (!snap_due(s, l, B)) return;
    if (x->base != B - w) {                             // once, or at every turn's end under --ratio
        x->base = B - w;
        dililazy_caps(x->inf, s->c->L, x->heads, x->base, x->beta, x->eps, x->alloc, x->cap);
    }
    size_t mark = scratch_mark(s);
    int N = kv_longest(s, l), per_group = x->heads < H, *keep = scratch(s, (size_t)H * N * sizeof(int));      // per_group: --dililazy-gqa=kv
    int *n = scratch(s, (size_t)G * sizeof(int)), *wide = scratch(s, (size_t)H * sizeof(int)), *kept = scratch(s, (size_t)H * sizeof(int));
    float *score = pooled_scores(s, &x->snap, l, q, T, w, per_group ? POOL_JOIN : POOL_ONLY, n);
    if (per_group) snap_keep(s, l, score, n, x->cap + (size_t)l * G);
    else {
        for (int h = 0; h < H; h++) wide[h] = n[h / R];
        top_k_rows(s, score, H, N, wide, x->cap + (size_t)l * H, keep, N, kept);
        for (int h = 0; h < H; h++) view_set(s, l, h, keep + (size_t)h * N, kept[h], n[h / R]);
        for (int g = 0; g < G; g++) kv_compact(s, l, g); // rows that no query head of the group reads are given back
    }
    scratch_reset(s, mark);
}
static void dililazy_stats(const Session *s, const void *ms, FILE *f) {
    const DiliLazy *x = ms;
    int n = s->c->L * x->heads, lo = INT_MAX, hi = 0;
    double cap = 0, read = 0, held = 0;
    for (int i = 0; i < n; i++) { lo = x->cap[i] < lo ? x->cap[i] : lo; hi = x->cap[i] > hi ? x->cap[i] : hi; cap += x->cap[i]; }
    for (int i = 0; i < s->c->L * s->c->H; i++) read += s->view[i].n + s->head[i / (s->c->H / s->c->G)].len - s->view[i].tail;
    for (int i = 0; i < s->c->L * s->c->G; i++) held += s->head[i].len;
    fprintf(f, "dililazy: caps %d..%d, mean %.1f; rows read per query head %.1f, rows held per KV head (union) %.1f\n", lo, hi, cap / n,
            read / (s->c->L * s->c->H), held / (s->c->L * s->c->G));
}

static const Opt dililazy_opts[] = {
    { "dililazy-scores",    's', "", "head scores; default: head_scores.json in the model's folder" },
    { "dililazy-score",     'c', "inf|dili|lazy", "which score shares out the budget (dili, lazy: the paper's ablation)" },
    { "dililazy-alloc",     'c', "paper|paper-literal|code", "Algorithm 1 without its overspending; as printed; as the authors' code does it" },
    { "dililazy-gqa",       'c', "q|kv", "caps and kept rows per query head, or one set per KV head (ours)" },
    { "dililazy-beta",      'f', "1.351", "1/beta of the budget is shared out by score; the rest is the same for all" },
    { "dililazy-eps",       'f', "0.01", "least share of a layer" },
    { "calibrate",          's', "", "measure the heads of the model and write their scores to this file" },
    { "calibrate-lengths",  's', "2048", "prompt lengths: 512,1024 or 512:2048:512; not above the model's limit" },
    { "calibrate-depths",   's', "2:98:3", "where the needle goes, percent of the text" },
    { "calibrate-k",        'i', "10", "largest keys of a row that count; 0: as many as the needle has" },
    { "calibrate-score",    'c', "mass|count", "attention (the paper's tables), or numbers of keys (its text)" },
    { "calibrate-accept",   'c', "recall|all", "runs whose answer has half of the words; or every run" },
    { "calibrate-predict",  'i', "32", "longest answer" },
    { "calibrate-needles",  's', "", "JSON list of {question, needle, answer} instead of our three" },
    { "calibrate-haystack", 's', "", "text to hide them in, instead of ours" },
    { "calibrate-boundary", 'b', "0", "hide the needle between two sentences" },
    { "calibrate-prefix",   's', "", "what stands before the text, for instance the beginning of a chat; special tokens are read" },
    { "calibrate-prompt",   's', "Based on the content in the book, answer the question: {}\nAnswer:", "what follows it; {}: the question" },
    { NULL, 0, NULL, NULL },
};

// What LycheeCluster's chunker reads: the bytes of a token, and whether it is special.


const Method dililazy_method = {
    .name    = "dililazy",
    .paper   = "DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression (ACL "
               "submission)",
    .keeps   = "every query head reads its own rows, B on average, more for heads that find "
               "facts; a KV head stores their union",
    .limits  = "needs head scores (--dililazy-scores or --calibrate). B must exceed "
               "--obs-window",
    .budget  = 128,
    .uses    = "--obs-window 16, --kernel 7",
    .opts    = dililazy_opts,
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(DiliLazy),
    .open    = dililazy_open,
    .close   = dililazy_close,
    .commit  = dililazy_commit,
    .bytes   = dililazy_bytes,
    .stats   = dililazy_stats,
};

// ==================================================================================================== 14 THE TABLE OF METHODS
const Method full_method = {
    .name    = "full",
    .paper   = "Vaswani et al., Attention Is All You Need, arXiv 1706.03762",
    .keeps   = "keeps every row, reads every row",
};

// Every method kvcomp has. Each entry stands at the end of its own section; a new method is one more line here.
// The model knows no method by name.
const Method *const methods[] = {
    &full_method,
    &streaming_method,
    &window_method,
    &snapkv_method,
    &adakv_method,
    &pyramidkv_method,
    &h2o_method,
    &expected_attention_method,
    &a_shape_method,
    &tri_shape_method,
    &minference_method,
    &quest_method,
    &loopserve_method,
    &loopserve_p_method,
    &loopserve_d_method,
    &pats_method,
    &q8_method,
    &lychee_method,
    &sonic_method,
    &dililazy_method,
    NULL,
};

// ####################################################################################################
// PART II: WHAT IT STANDS ON
// ####################################################################################################

// ==================================================================================================== 15 HELPERS
// die, memory that ends the program cleanly when there is none, the clock, and the arena a pass works in.

jmp_buf *die_jump;                  // tests and fuzzers: die() jumps here with its exit code instead of leaving
char die_text[1024];                // the line it would have printed

void die(int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(die_text, sizeof die_text, fmt, ap);
    va_end(ap);
    for (char *p = die_text; *p; p++) if (*p == '\n' || *p == '\r') *p = ' ';      // one line, whatever a file put into it
    if (die_jump) longjmp(*die_jump, code);
    fflush(stdout);
    fprintf(stderr, "kvcomp: %s\n", die_text);
    exit(code);
}

void *xrealloc(void *p, size_t n) {
    void *r = realloc(p, n ? n : 1);
    if (!r) die(EXIT_MEMORY, "out of memory: %zu bytes could not be had (a smaller -c, -b or --budget needs less)", n);
    return r;
}
void *xmalloc(size_t n) { return xrealloc(NULL, n); }
void *xcalloc(size_t n, size_t size) {
    if (size && n > SIZE_MAX / size) die(EXIT_MEMORY, "out of memory: %zu x %zu bytes overflow", n, size);
    void *p = calloc(n ? n : 1, size ? size : 1);
    if (!p) die(EXIT_MEMORY, "out of memory: %zu bytes could not be had (a smaller -c, -b or --budget needs less)", n * size);
    return p;
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The arena: blocks that are kept from pass to pass, so that a decode step allocates nothing once the first has run.
// A mark is the number of bytes handed out so far; falling back to it frees everything handed out since. A new block is half as large again
// as what it is for, because much of what is asked for grows by a row a step, and would find every block too small by one.
struct Arena { struct { char *p; size_t size, start; } *block; size_t used; };

void *scratch(Session *s, size_t bytes) {
    struct Arena *a = s->scratch;
    size_t n = (bytes + 63) & ~(size_t)63;
    if (!n) n = 64;
    for (int i = 0; i < (int)arrlen(a->block); i++) {
        size_t end = a->block[i].start + a->block[i].size;
        if (a->used > end) continue;
        size_t at = a->used > a->block[i].start ? a->used : a->block[i].start;
        if (at + n <= end) { a->used = at + n; return a->block[i].p + (at - a->block[i].start); }
    }
    size_t start = arrlen(a->block) ? arrlast(a->block).start + arrlast(a->block).size : 0, size = n + n / 128 * 64;
    if (size < (size_t)1 << 20) size = (size_t)1 << 20;
    arrsetlen(a->block, arrlen(a->block) + 1);
    arrlast(a->block).start = start; arrlast(a->block).size = size;
    arrlast(a->block).p = aligned_alloc(64, size);
    if (!arrlast(a->block).p) die(EXIT_MEMORY, "out of memory: %zu bytes of scratch (a smaller -b needs less)", size);
    a->used = start + n;
    return arrlast(a->block).p;
}
size_t scratch_mark(Session *s) { return s->scratch->used; }
void scratch_reset(Session *s, size_t mark) { s->scratch->used = mark; }

struct Arena *arena_new(void) { return xcalloc(1, sizeof(struct Arena)); }
void arena_free(struct Arena *a) {
    if (!a) return;
    for (int i = 0; i < (int)arrlen(a->block); i++) free(a->block[i].p);
    arrfree(a->block);
    free(a);
}

static char *read_file(const char *path, size_t *size, char err[256]) {      // whole file, NUL-terminated; NULL and err when it cannot be read
    FILE *f = fopen(path, "rb");
    if (!f) { snprintf(err, 256, "%.190s: %s", path, strerror(errno)); return NULL; }
    char *buf = NULL; size_t n = 0, cap = 0, got;
    do {
        if (n + 65536 + 1 > cap) buf = xrealloc(buf, cap = 2 * cap + 65536 + 1);
        n += got = fread(buf + n, 1, 65536, f);
    } while (got);
    int bad = ferror(f);
    fclose(f);
    if (bad) { snprintf(err, 256, "%.190s: cannot be read (is it a folder?)", path); free(buf); return NULL; }
    buf[n] = 0;
    *size = n;
    return buf;
}
static int file_exists(const char *path) { struct stat st; return stat(path, &st) == 0; }

int refuse(Session *s, const char *fmt, ...) {   // what an open hook returns when the options do not fit
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s->err, sizeof s->err, fmt, ap);
    va_end(ap);
    return -1;
}

// ==================================================================================================== 16 NUMBERS AND KERNELS
// Everything that is arithmetic only. One kernel serves weights and attention: a block of dot products y (m,n) = x (m,K)
// w (n,K)^T, whose right side is f32, f16 or bf16 and is widened in registers. Each instruction set names a vector of 16
// lanes and a dozen operations on it; the kernels are written once over those (KERNELS below) and chosen at run time.
//
// The order of every sum is fixed: lane j adds k = j, j+16, ... with fused multiply-adds, then the 16 lanes fold as 8+8, 4+4,
// 2+2, 1+1. A matrix product does this for every K_CHUNK columns and adds the chunks in order. No tile size, batch, thread
// count or position in a block enters, so a row of a product is the same bits in decode and in prefill, and AVX2 and
// AVX-512 agree; plain C has no fused multiply-add (fmaf would be a library call) and agrees to rounding.
//
// bf16 dot-product instructions are not used: they round x to bf16, so f32-like accuracy takes two of them (x = hi + lo), and
// one does no more multiply-adds a cycle than two f32 FMA pipes here (Zen 5: 233 against 256 GFLOP/s a core, counted per product).

enum { LANES = 16, K_CHUNK = 1024, T_BLOCK = 128, ROW_BLOCK = 64 };    // columns a sum runs over; rows of x in L2 (512 KiB); rows of W one job takes

// Asks for `bytes` more of it. Spread over the arithmetic, because a burst of requests fills the queue to memory and then leaves it idle;
// the share of each time is divided out before a loop of products, not in it.
static inline __attribute__((always_inline)) void ask_ahead(Ahead *a, size_t bytes) {
    if (bytes > a->bytes) bytes = a->bytes;
    for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(a->p + b);
    a->p += bytes; a->bytes -= bytes;
}
static inline __attribute__((always_inline)) size_t ahead_share(Ahead a, size_t parts) { return (a.bytes / parts + 63) / 64 * 64; }     // whole lines
static Ahead ahead_part(Ahead a, size_t part, size_t parts) {      // the part as an Ahead of its own
    size_t each = ahead_share(a, parts), from = part * each, left = a.bytes > from ? a.bytes - from : 0;
    return left ? (Ahead){ a.p + from, left < each ? left : each } : (Ahead){0};
}

typedef struct {            // y (m,n) = scale * x (m,K) w (n,K)^T; add: y += that
    float *y; size_t ldy;           // element strides of the rows of y and x
    const float *x; size_t ldx;
    const char *w; size_t ldw;      // byte stride of the rows of w
    int m, n, K, add;
    float scale;
    Ahead next;                     // none: rows of w that follow these
} Dots;

typedef struct {            // one instruction set
    const char *name;
    void  (*dots[3])(const Dots *a);                                    // by dtype of w
    void  (*widen[3])(float *dst, const void *src, size_t n);           // by dtype of src
    void  (*narrow_f16)(uint16_t *dst, const float *src, size_t n);
    void  (*unpack_q8)(float *dst, const char *src, int n, int D);      // n rows of format q8_0 (section 5)
    void  (*mix[3])(float *o, const float *p, const void *v, int m, int n, int D, int add, Ahead next);      // by dtype of v; add, next as in Dots
    void  (*exp_shift)(float *x, float max, size_t n, float *sum);
    void  (*softmax_columns)(float *x, int n, int m, float *max, float *sum);      // x (n,m) = 2^(x - max) down each column; max, sum (m) go on from before
    void  (*swiglu)(float *g, const float *u, size_t n);
    float (*max)(const float *x, size_t n);
    int   (*sum_from)(const float *x, const int *w, int n, uint32_t key);   // w (n) summed where order_key(x) >= key; NULL: their number
    int   (*list_from)(const float *x, int i, int n, uint32_t key, int *idx);      // of x (n), idx (as many) = those from the i-th on, ascending -> how many
} Simd;

#define UNROLL _Pragma("GCC unroll 16")
#define LOG2_E 1.44269504f


// ---- vectors in plain C, with the compiler's own vectors of four (SSE2, NEON, or whatever the processor has)
#define INLINE_plain static inline __attribute__((always_inline))
#define TARGET_plain
typedef float    F4 __attribute__((vector_size(16)));
typedef int32_t  I4 __attribute__((vector_size(16)));
typedef uint16_t H4 __attribute__((vector_size(8)));
typedef struct { F4 a, b, c, d; } V_plain;
#define EACH_QUARTER(x) (V_plain){ x(a), x(b), x(c), x(d) }
INLINE_plain F4 four(float x)            { return (F4){ x, x, x, x }; }
INLINE_plain F4 pick(I4 mask, F4 x, F4 y) { return (F4)((mask & (I4)x) | (~mask & (I4)y)); }
#define ALL(q) four(x)
#define ADD(q) x.q + y.q
#define MUL(q) x.q * y.q
#define DIV(q) x.q / y.q
#define FMA(q) x.q * y.q + z.q
#define MAX(q) pick(x.q > y.q, x.q, y.q)        // NaN in x: y
#define MIN(q) pick(x.q < y.q, x.q, y.q)
INLINE_plain V_plain all_plain(float x)                         { return EACH_QUARTER(ALL); }
INLINE_plain V_plain add_plain(V_plain x, V_plain y)            { return EACH_QUARTER(ADD); }
INLINE_plain V_plain mul_plain(V_plain x, V_plain y)            { return EACH_QUARTER(MUL); }
INLINE_plain V_plain div_plain(V_plain x, V_plain y)            { return EACH_QUARTER(DIV); }
INLINE_plain V_plain fma_plain(V_plain x, V_plain y, V_plain z) { return EACH_QUARTER(FMA); }
INLINE_plain V_plain max_plain(V_plain x, V_plain y)            { return EACH_QUARTER(MAX); }
INLINE_plain V_plain min_plain(V_plain x, V_plain y)            { return EACH_QUARTER(MIN); }
INLINE_plain F4 scale4_plain(F4 x, F4 k) {                      // x 2^k, in two steps, because 2^k alone may be below the smallest float
    I4 i = __builtin_convertvector(k, I4), h = i >> 1;
    return x * (F4)((h + 127) << 23) * (F4)((i - h + 127) << 23);
}
#define SCALE(q) scale4_plain(x.q, k.q)
INLINE_plain V_plain scale_plain(V_plain x, V_plain k) { return EACH_QUARTER(SCALE); }
INLINE_plain F4 load4_plain(const char *p, int dtype) {
    F4 f;
    H4 h;
    if (dtype == DT_F32) { memcpy(&f, p, sizeof f); return f; }
    memcpy(&h, p, sizeof h);
    I4 u = __builtin_convertvector(h, I4), sign = (u & 0x8000) << 16, special = (u & 0x7c00) == 0x7c00;     // infinity or NaN
    if (dtype == DT_BF16) return (F4)(u << 16);
    f = (F4)((u & 0x7fff) << 13) * four(0x1p112f);              // the exponent's bias differs by 112; subnormals come out right
    return (F4)((I4)f | (special & 0x7f800000) | sign);
}
#define LOAD(q) load4_plain(at + (#q[0] - 'a') * 4 * size, dtype)
INLINE_plain V_plain load_plain(const void *p, int dtype, int n) {         // n < 16: the other lanes are 0
    size_t size = dtype == DT_F32 ? 4 : 2;
    char part[LANES * 4] = {0};
    const char *at = n < LANES ? memcpy(part, p, (size_t)n * size) : p;
    return EACH_QUARTER(LOAD);
}
INLINE_plain V_plain load_bytes_plain(const signed char *p) {              // 16 small integers
    float f[LANES];
    V_plain x;
    for (int i = 0; i < LANES; i++) f[i] = p[i];
    memcpy(&x, f, sizeof x);
    return x;
}
INLINE_plain void store_plain(float *p, V_plain x, int n) { memcpy(p, &x, (size_t)n * 4); }
INLINE_plain void store_f16_plain(uint16_t *p, V_plain x) {
    float f[LANES];
    memcpy(f, &x, sizeof f);
    for (int i = 0; i < LANES; i++) p[i] = f32_to_f16(f[i]);
}
INLINE_plain float fold_plain(V_plain x) {
    F4 s = (x.a + x.c) + (x.b + x.d);
    return (s[0] + s[2]) + (s[1] + s[3]);
}
INLINE_plain float most_plain(V_plain x) {
    F4 y = pick(x.a > x.b, x.a, x.b), z = pick(x.c > x.d, x.c, x.d);
    y = pick(y > z, y, z);
    return fmaxf(fmaxf(y[0], y[1]), fmaxf(y[2], y[3]));
}
INLINE_plain uint32_t from_plain(const float *p, uint32_t key) {           // of 16, a bit each: order_key >= key
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(order_key(p[i]) >= key) << i;
    return bits;
}
INLINE_plain void folds_plain(float *out, V_plain *a, int n, float scale) { for (int i = 0; i < n; i++) out[i] = fold_plain(a[i]) * scale; }
#undef ALL
#undef ADD
#undef MUL
#undef DIV
#undef FMA
#undef MAX
#undef MIN
#undef SCALE
#undef LOAD

#if defined(__x86_64__)
// ---- AVX2: sixteen lanes are a pair of registers
#define TARGET_avx2 __attribute__((target("avx2,fma,f16c")))
#define INLINE_avx2 static inline __attribute__((always_inline, target("avx2,fma,f16c")))
typedef struct { __m256 a, b; } V_avx2;
INLINE_avx2 V_avx2 all_avx2(float x)                        { return (V_avx2){ _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
INLINE_avx2 V_avx2 add_avx2(V_avx2 x, V_avx2 y)             { return (V_avx2){ _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b) }; }
INLINE_avx2 V_avx2 mul_avx2(V_avx2 x, V_avx2 y)             { return (V_avx2){ _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) }; }
INLINE_avx2 V_avx2 div_avx2(V_avx2 x, V_avx2 y)             { return (V_avx2){ _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b) }; }
INLINE_avx2 V_avx2 fma_avx2(V_avx2 x, V_avx2 y, V_avx2 z)   { return (V_avx2){ _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) }; }
INLINE_avx2 V_avx2 max_avx2(V_avx2 x, V_avx2 y)             { return (V_avx2){ _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b) }; }
INLINE_avx2 V_avx2 min_avx2(V_avx2 x, V_avx2 y)             { return (V_avx2){ _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b) }; }
INLINE_avx2 __m256 scale8_avx2(__m256 x, __m256 k) {        // in two steps, because 2^k alone may be below the smallest float
    __m256i i = _mm256_cvtps_epi32(k), h = _mm256_srai_epi32(i, 1), one = _mm256_set1_epi32(127);
    __m256 f = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(h, one), 23));
    __m256 g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, h), one), 23));
    return _mm256_mul_ps(_mm256_mul_ps(x, f), g);
}
INLINE_avx2 V_avx2 scale_avx2(V_avx2 x, V_avx2 k) { return (V_avx2){ scale8_avx2(x.a, k.a), scale8_avx2(x.b, k.b) }; }
INLINE_avx2 __m256 load8_avx2(const void *p, int dtype) {
    if (dtype == DT_F32) return _mm256_loadu_ps(p);
    __m128i h = _mm_loadu_si128(p);
    return dtype == DT_F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
INLINE_avx2 V_avx2 load_avx2(const void *p, int dtype, int n) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    char part[LANES * 4] = {0};
    if (n < LANES) p = memcpy(part, p, (size_t)n * size);
    return (V_avx2){ load8_avx2(p, dtype), load8_avx2((const char *)p + 8 * size, dtype) };
}
INLINE_avx2 __m256 bytes8_avx2(const signed char *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p))); }
INLINE_avx2 V_avx2 load_bytes_avx2(const signed char *p) { return (V_avx2){ bytes8_avx2(p), bytes8_avx2(p + 8) }; }
INLINE_avx2 void store_avx2(float *p, V_avx2 x, int n) {
    float part[LANES], *to = n < LANES ? part : p;
    _mm256_storeu_ps(to, x.a); _mm256_storeu_ps(to + 8, x.b);
    if (n < LANES) memcpy(p, part, (size_t)n * 4);
}
INLINE_avx2 __m128i half8_avx2(__m256 x) {                  // f32_to_f16 of 8: saturates, any NaN becomes the quiet one of its sign
    __m256 top = _mm256_set1_ps(65504), sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f)), nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    x = _mm256_max_ps(_mm256_min_ps(x, top), _mm256_set1_ps(-65504));
    return _mm256_cvtps_ph(_mm256_blendv_ps(x, _mm256_or_ps(sign, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000))), nan), _MM_FROUND_TO_NEAREST_INT);
}
INLINE_avx2 void store_f16_avx2(uint16_t *p, V_avx2 x) {
    _mm_storeu_si128((void *)p, half8_avx2(x.a)); _mm_storeu_si128((void *)(p + 8), half8_avx2(x.b));
}
INLINE_avx2 float fold8_avx2(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE_avx2 float fold_avx2(V_avx2 x) { return fold8_avx2(_mm256_add_ps(x.a, x.b)); }
INLINE_avx2 float most_avx2(V_avx2 x) {
    __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}
INLINE_avx2 uint32_t from8_avx2(const float *p, uint32_t key) {
    __m256i x = _mm256_castps_si256(_mm256_add_ps(_mm256_loadu_ps(p), _mm256_setzero_ps())), sign = _mm256_set1_epi32((int)0x80000000u);
    x = _mm256_xor_si256(x, _mm256_or_si256(_mm256_srai_epi32(x, 31), sign));
    x = _mm256_cmpeq_epi32(_mm256_max_epu32(x, _mm256_set1_epi32((int)key)), x);
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(x));
}
INLINE_avx2 uint32_t from_avx2(const float *p, uint32_t key) { return from8_avx2(p, key) | from8_avx2(p + 8, key) << 8; }
INLINE_avx2 void folds_avx2(float *out, V_avx2 *a, int n, float scale) { for (int i = 0; i < n; i++) out[i] = fold_avx2(a[i]) * scale; }

// ---- AVX-512
#define TARGET_avx512 __attribute__((target("avx512f,avx512bw,avx512vl,fma,f16c")))
#define INLINE_avx512 static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,fma,f16c")))
typedef __m512 V_avx512;
INLINE_avx512 __m512 all_avx512(float x)                            { return _mm512_set1_ps(x); }
INLINE_avx512 __m512 add_avx512(__m512 x, __m512 y)                 { return _mm512_add_ps(x, y); }
INLINE_avx512 __m512 mul_avx512(__m512 x, __m512 y)                 { return _mm512_mul_ps(x, y); }
INLINE_avx512 __m512 div_avx512(__m512 x, __m512 y)                 { return _mm512_div_ps(x, y); }
INLINE_avx512 __m512 fma_avx512(__m512 x, __m512 y, __m512 z)       { return _mm512_fmadd_ps(x, y, z); }
INLINE_avx512 __m512 max_avx512(__m512 x, __m512 y)                 { return _mm512_max_ps(x, y); }
INLINE_avx512 __m512 min_avx512(__m512 x, __m512 y)                 { return _mm512_min_ps(x, y); }
INLINE_avx512 __m512 scale_avx512(__m512 x, __m512 k)               { return _mm512_scalef_ps(x, k); }
INLINE_avx512 __mmask16 mask_avx512(int n)                          { return (__mmask16)((1u << n) - 1); }
INLINE_avx512 __m512 load_avx512(const void *p, int dtype, int n) {
    if (dtype == DT_F32) return n < LANES ? _mm512_maskz_loadu_ps(mask_avx512(n), p) : _mm512_loadu_ps(p);
    __m256i h = n < LANES ? _mm256_maskz_loadu_epi16(mask_avx512(n), p) : _mm256_loadu_si256(p);
    return dtype == DT_F16 ? _mm512_cvtph_ps(h) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
INLINE_avx512 __m512 load_bytes_avx512(const signed char *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }
INLINE_avx512 void store_avx512(float *p, __m512 x, int n) {
    if (n < LANES) _mm512_mask_storeu_ps(p, mask_avx512(n), x); else _mm512_storeu_ps(p, x);
}
INLINE_avx512 void store_f16_avx512(uint16_t *p, __m512 x) {
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(65504)), _mm512_set1_ps(-65504));
    x = _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(_mm512_or_si512(sign, _mm512_set1_epi32(0x7fc00000))));
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE_avx512 float fold_avx512(__m512 x) {
    __m512 s = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));         // lanes 8..15 onto 0..7
    s = _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0xb1));
    __m128 q = _mm512_castps512_ps128(s);
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
INLINE_avx512 uint32_t from_avx512(const float *p, uint32_t key) {
    __m512i x = _mm512_castps_si512(_mm512_add_ps(_mm512_loadu_ps(p), _mm512_setzero_ps())), sign = _mm512_set1_epi32((int)0x80000000u);
    x = _mm512_xor_si512(x, _mm512_or_si512(_mm512_srai_epi32(x, 31), sign));
    return _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32((int)key));
}
INLINE_avx512 float most_avx512(__m512 x)                           { return _mm512_reduce_max_ps(x); }
// Folds 16 vectors at once: a step puts one half of x beside the same half of y, the other halves likewise, and adds the two. These are
// the additions of fold, between lanes 8, 4, 2 and 1 apart; vectors are paired so that lane i ends with the sum of a[i].
#define FOLD_TWO(shuffle, x, y, some, others) _mm512_add_ps(shuffle(x, y, some), shuffle(x, y, others))
INLINE_avx512 __m512 fold16_avx512(const __m512 *a) {
    __m512 b[8], c[4], d[2];
    UNROLL for (int i = 0; i < 8; i++) b[i] = FOLD_TWO(_mm512_shuffle_f32x4, a[i / 4 * 8 + i % 4], a[i / 4 * 8 + i % 4 + 4], 0x44, 0xee);
    UNROLL for (int i = 0; i < 4; i++) c[i] = FOLD_TWO(_mm512_shuffle_f32x4, b[i], b[i + 4], 0x88, 0xdd);
    UNROLL for (int i = 0; i < 2; i++) d[i] = FOLD_TWO(_mm512_shuffle_ps, c[2 * i], c[2 * i + 1], 0x44, 0xee);
    return FOLD_TWO(_mm512_shuffle_ps, d[0], d[1], 0x88, 0xdd);
}
INLINE_avx512 void folds_avx512(float *out, __m512 *a, int n, float scale) {
    if (n == LANES) _mm512_storeu_ps(out, _mm512_mul_ps(fold16_avx512(a), _mm512_set1_ps(scale)));
    else for (int i = 0; i < n; i++) out[i] = fold_avx512(a[i]) * scale;
}
#endif

// ---- the kernels, once for all instruction sets
// dots: tiles of MR rows of x by NR rows of w; a tile loads each vector once and uses it NR or MR times. Rows past the end of
// the block repeat its last one and are not stored; a whole tile of whole vectors is compiled without that. The rows of the next
// panel are short, far apart, and the hardware does not see them coming, so they are asked for in time: by a single tile as it goes
// (decode: 23 -> 34 GB/s a thread where 38 can be read; 1 KB past the panel for one row of x, 4 KB for the few queries that share
// keys), by many tiles one line of each row each (8 % of prefill).
// mix: tiles of MX rows of o by NV vectors, of MR where fewer are left (the heads of a decode step); each output adds its n products
// in order. The first columns ask for what comes next: what the caller says, or stored rows 16 further on (a decode step over 32k rows of head_dim 128: about four fifths of the time).
// exp: x = k ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^k e^r. Adding 1.5 * 2^23 rounds x / ln 2 to the integer k; ln 2 is split in
// two so that r is exact to f32; e^r = 1 + r + r^2 (c2 + .. + c6 r^4), minimax with relative error 3.1e-9. The clamp at -150 gives
// 0 for everything below the smallest subnormal, and for -INFINITY - -INFINITY; above, x may be 150 at most.
// exp2: x = k + r is exact as it stands: no products to reduce x, and no 1 + r apart, which saves two of seventeen instructions.
// 2^r = 1 + r (c1 + .. + c6 r^5), minimax with relative error 2.0e-9. For scores that can be had times log2 e.
#define KERNELS(S, MR, NR, NV, MX) \
INLINE_##S void dots_step_##S(V_##S *acc, const float *const *x, const char *const *w, int dtype, int M, int k, int n, size_t ahead) { \
    size_t size = dtype == DT_F32 ? 4 : 2; \
    V_##S b[NR]; \
    if (ahead) UNROLL for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + (size_t)k * size + ahead); \
    UNROLL for (int j = 0; j < NR; j++) b[j] = load_##S(w[j] + (size_t)k * size, dtype, n); \
    UNROLL for (int i = 0; i < M; i++) { \
        V_##S a = load_##S(x[i] + k, DT_F32, n); \
        UNROLL for (int j = 0; j < NR; j++) acc[i * NR + j] = fma_##S(a, b[j], acc[i * NR + j]); \
    } \
} \
INLINE_##S void dots_tile_##S(const Dots *a, int dtype, int M, int i0, int j0, int whole) { \
    V_##S acc[MR * NR]; \
    const float *x[MR]; const char *w[NR]; \
    float sum[MR * NR]; \
    size_t ahead = !a->next.p && (M == 1 || a->m <= MR) ? NR * a->ldw + (M == 1 ? 1024 : 4096) : 0; \
    int m = whole || a->m - i0 > M ? M : a->m - i0, n = whole || a->n - j0 > NR ? NR : a->n - j0, k = 0; \
    UNROLL for (int i = 0; i < M; i++) x[i] = a->x + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldx; \
    UNROLL for (int j = 0; j < NR; j++) w[j] = a->w + (size_t)(j0 + (j < n ? j : n - 1)) * a->ldw; \
    UNROLL for (int i = 0; i < M * NR; i++) acc[i] = all_##S(0); \
    for (; k + LANES <= a->K; k += LANES) dots_step_##S(acc, x, w, dtype, M, k, LANES, ahead); \
    if (!whole && k < a->K) dots_step_##S(acc, x, w, dtype, M, k, a->K - k, 0); \
    folds_##S(sum, acc, M * NR, a->scale); \
    for (int i = 0; i < m; i++) { \
        float *y = a->y + (size_t)(i0 + i) * a->ldy + j0; \
        if (whole || (n == NR && !a->add)) memcpy(y, sum + i * NR, NR * sizeof *y); \
        else for (int j = 0; j < n; j++) y[j] = a->add ? y[j] + sum[i * NR + j] : sum[i * NR + j]; \
    } \
} \
INLINE_##S void dots_any_##S(const Dots *a, int dtype) { \
    Ahead next = a->next; \
    size_t share = next.bytes ? ahead_share(next, (a->n + NR - 1) / NR) : 0; \
    for (int j = 0; j < a->n; j += NR) { \
        int i = 0; \
        if (next.bytes) ask_ahead(&next, share); \
        for (; a->m - i > 1; i += MR) { \
            for (int p = j + NR; a->m > MR && p < j + 2 * NR; p++) __builtin_prefetch(a->w + (size_t)p * a->ldw + i / MR * 64); \
            if (a->m - i >= MR && a->n - j >= NR && a->K % LANES == 0 && !a->add) dots_tile_##S(a, dtype, MR, i, j, 1); \
            else dots_tile_##S(a, dtype, MR, i, j, 0); \
        } \
        if (i < a->m) dots_tile_##S(a, dtype, 1, i, j, 0); \
    } \
} \
TARGET_##S static void dots_f32_##S (const Dots *a) { dots_any_##S(a, DT_F32); } \
TARGET_##S static void dots_f16_##S (const Dots *a) { dots_any_##S(a, DT_F16); } \
TARGET_##S static void dots_bf16_##S(const Dots *a) { dots_any_##S(a, DT_BF16); } \
\
INLINE_##S void mix_tile_##S(float *o, const float *p, const char *v, int dtype, int M, int m, int n, int D, int add, int vectors, int width, Ahead next) { \
    V_##S acc[MX * NV]; \
    size_t size = dtype == DT_F32 ? 4 : 2, share = next.bytes ? ahead_share(next, n) : 0; \
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int c = 0; c < vectors; c++) \
        acc[i * NV + c] = add ? load_##S(o + (size_t)(i < m ? i : m - 1) * D + c * LANES, DT_F32, width) : all_##S(0); \
    for (int r = 0; r < n; r++) { \
        V_##S b[NV]; \
        if (next.bytes) ask_ahead(&next, share); \
        UNROLL for (int c = 0; c < vectors; c++) b[c] = load_##S(v + ((size_t)r * D + c * LANES) * size, dtype, width); \
        UNROLL for (int i = 0; i < M; i++) { \
            V_##S a = all_##S(p[(size_t)(i < m ? i : m - 1) * n + r]); \
            UNROLL for (int c = 0; c < vectors; c++) acc[i * NV + c] = fma_##S(a, b[c], acc[i * NV + c]); \
        } \
    } \
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int c = 0; c < vectors; c++) \
        store_##S(o + (size_t)(i < m ? i : m - 1) * D + c * LANES, acc[i * NV + c], width); \
} \
INLINE_##S void mix_rows_##S(float *o, const float *p, const char *v, int dtype, int M, int m, int n, int D, int add, Ahead next) { \
    size_t size = dtype == DT_F32 ? 4 : 2; \
    int d = 0; \
    if (!next.p && dtype != DT_F32) next = (Ahead){ v + 16 * D * size, n * D * size }; \
    for (; d + NV * LANES <= D; d += NV * LANES) mix_tile_##S(o + d, p, v + d * size, dtype, M, m, n, D, add, NV, LANES, d ? (Ahead){0} : next); \
    for (; d + LANES <= D; d += LANES) mix_tile_##S(o + d, p, v + d * size, dtype, M, m, n, D, add, 1, LANES, d ? (Ahead){0} : next); \
    if (d < D) mix_tile_##S(o + d, p, v + d * size, dtype, M, m, n, D, add, 1, D - d, d ? (Ahead){0} : next); \
} \
INLINE_##S void mix_any_##S(float *o, const float *p, const char *v, int dtype, int m, int n, int D, int add, Ahead next) { \
    int i = 0, block = 0, blocks = m / MX + (m % MX + MR - 1) / MR; \
    for (; m - i >= MX; i += MX) \
        mix_rows_##S(o + (size_t)i * D, p + (size_t)i * n, v, dtype, MX, MX, n, D, add, ahead_part(next, block++, blocks)); \
    for (; m - i > 1; i += MR) \
        mix_rows_##S(o + (size_t)i * D, p + (size_t)i * n, v, dtype, MR, m - i < MR ? m - i : MR, n, D, add, ahead_part(next, block++, blocks)); \
    if (i < m) mix_rows_##S(o + (size_t)i * D, p + (size_t)i * n, v, dtype, 1, 1, n, D, add, ahead_part(next, block, blocks)); \
} \
TARGET_##S static void mix_f32_##S (float *o, const float *p, const void *v, int m, int n, int D, int add, Ahead next) { mix_any_##S(o, p, v, DT_F32, m, n, D, add, next); } \
TARGET_##S static void mix_f16_##S (float *o, const float *p, const void *v, int m, int n, int D, int add, Ahead next) { mix_any_##S(o, p, v, DT_F16, m, n, D, add, next); } \
TARGET_##S static void mix_bf16_##S(float *o, const float *p, const void *v, int m, int n, int D, int add, Ahead next) { mix_any_##S(o, p, v, DT_BF16, m, n, D, add, next); } \
\
INLINE_##S V_##S exp_##S(V_##S x) { \
    x = max_##S(x, all_##S(-150)); \
    V_##S magic = all_##S(12582912), k = add_##S(fma_##S(x, all_##S(LOG2_E), magic), all_##S(-12582912)); \
    V_##S r = fma_##S(k, all_##S(-1.42860677e-6f), fma_##S(k, all_##S(-0.693145752f), x)); \
    V_##S p = fma_##S(r, all_##S(0.00138145986f), all_##S(0.00836871688f)); \
    p = fma_##S(r, p, all_##S(0.0416683880f)); \
    p = fma_##S(r, p, all_##S(0.166665206f)); \
    p = fma_##S(r, p, all_##S(0.499999934f)); \
    p = add_##S(fma_##S(mul_##S(r, r), p, r), all_##S(1)); \
    return scale_##S(p, k); \
} \
INLINE_##S V_##S exp2_##S(V_##S x) { \
    x = max_##S(x, all_##S(-150)); \
    V_##S k = add_##S(add_##S(x, all_##S(12582912)), all_##S(-12582912)), r = fma_##S(k, all_##S(-1), x); \
    V_##S p = fma_##S(r, all_##S(0.000153533620f), all_##S(0.00133988750f)); \
    p = fma_##S(r, p, all_##S(0.00961843692f)); \
    p = fma_##S(r, p, all_##S(0.0555033237f)); \
    p = fma_##S(r, p, all_##S(0.240226477f)); \
    p = fma_##S(r, p, all_##S(0.693147182f)); \
    return scale_##S(fma_##S(r, p, all_##S(1)), k); \
} \
TARGET_##S static void exp_shift_##S(float *x, float max, size_t n, float *sum) { \
    V_##S shift = all_##S(-max), total = all_##S(0); \
    size_t i = 0; \
    for (; i + LANES <= n; i += LANES) { \
        V_##S e = exp_##S(add_##S(load_##S(x + i, DT_F32, LANES), shift)); \
        store_##S(x + i, e, LANES); \
        total = add_##S(total, e); \
    } \
    if (i < n) { \
        float part[LANES]; \
        for (int j = 0; j < LANES; j++) part[j] = i + j < n ? x[i + j] : -INFINITY; \
        V_##S e = exp_##S(add_##S(load_##S(part, DT_F32, LANES), shift)); \
        store_##S(x + i, e, (int)(n - i)); \
        total = add_##S(total, e); \
    } \
    *sum += fold_##S(total); \
} \
INLINE_##S void swiglu_step_##S(float *g, const float *u, int n) { \
    V_##S x = load_##S(g, DT_F32, n), e = exp_##S(min_##S(mul_##S(x, all_##S(-1)), all_##S(150))); \
    store_##S(g, mul_##S(div_##S(x, add_##S(all_##S(1), e)), load_##S(u, DT_F32, n)), n); \
} \
TARGET_##S static void swiglu_##S(float *g, const float *u, size_t n) { \
    size_t i = 0; \
    for (; i + LANES <= n; i += LANES) swiglu_step_##S(g + i, u + i, LANES); \
    if (i < n) swiglu_step_##S(g + i, u + i, (int)(n - i)); \
} \
INLINE_##S void softmax_down_##S(float *x, int n, size_t m, float *max, float *sum, int vectors, int width) { /* `vectors` side by side: rows are read from end to end, and no exponential waits for another */ \
    V_##S top[NV], shift[NV], total[NV]; \
    UNROLL for (int c = 0; c < vectors; c++) top[c] = load_##S(max + c * LANES, DT_F32, width); \
    for (int j = 0; j < n; j++) UNROLL for (int c = 0; c < vectors; c++) top[c] = max_##S(load_##S(x + j * m + c * LANES, DT_F32, width), top[c]); \
    UNROLL for (int c = 0; c < vectors; c++) { \
        shift[c] = mul_##S(top[c], all_##S(-1)); \
        total[c] = mul_##S(load_##S(sum + c * LANES, DT_F32, width), exp2_##S(add_##S(load_##S(max + c * LANES, DT_F32, width), shift[c])));     /* what was gathered under the old maximum */ \
    } \
    for (int j = 0; j < n; j++) UNROLL for (int c = 0; c < vectors; c++) { \
        V_##S e = exp2_##S(add_##S(load_##S(x + j * m + c * LANES, DT_F32, width), shift[c])); \
        store_##S(x + j * m + c * LANES, e, width); \
        total[c] = add_##S(total[c], e); \
    } \
    UNROLL for (int c = 0; c < vectors; c++) { store_##S(max + c * LANES, top[c], width); store_##S(sum + c * LANES, total[c], width); } \
} \
TARGET_##S static void softmax_columns_##S(float *x, int n, int m, float *max, float *sum) { \
    int c = 0; \
    for (; c + NV * LANES <= m; c += NV * LANES) softmax_down_##S(x + c, n, (size_t)m, max + c, sum + c, NV, LANES); \
    for (; c + LANES <= m; c += LANES) softmax_down_##S(x + c, n, (size_t)m, max + c, sum + c, 1, LANES); \
    if (c < m) softmax_down_##S(x + c, n, (size_t)m, max + c, sum + c, 1, m - c); \
} \
TARGET_##S static float max_of_##S(const float *x, size_t n) { \
    V_##S top = all_##S(-INFINITY); \
    size_t i = 0; \
    for (; i + LANES <= n; i += LANES) top = max_##S(load_##S(x + i, DT_F32, LANES), top); \
    float best = most_##S(top);                          /* no lane is a NaN */ \
    for (; i < n; i++) best = x[i] > best ? x[i] : best; \
    return best; \
} \
\
TARGET_##S static int sum_from_##S(const float *x, const int *w, int n, uint32_t key) {      /* simple enough for the compiler to make vectors of it */ \
    int sum = 0; \
    if (w) for (int i = 0; i < n; i++) sum += order_key(x[i]) >= key ? w[i] : 0; \
    else   for (int i = 0; i < n; i++) sum += order_key(x[i]) >= key; \
    return sum; \
} \
\
TARGET_##S static int list_from_##S(const float *x, int i, int n, uint32_t key, int *idx) { \
    int count = 0; \
    for (; i + LANES <= n; i += LANES) for (uint32_t bits = from_##S(x + i, key); bits; bits &= bits - 1) idx[count++] = i + __builtin_ctz(bits); \
    for (; i < n; i++) if (order_key(x[i]) >= key) idx[count++] = i; \
    return count; \
} \
\
INLINE_##S void widen_##S(float *dst, const char *src, int dtype, size_t n) { \
    size_t size = dtype == DT_F32 ? 4 : 2, i = 0; \
    for (; i + LANES <= n; i += LANES) store_##S(dst + i, load_##S(src + i * size, dtype, LANES), LANES); \
    if (i < n) store_##S(dst + i, load_##S(src + i * size, dtype, (int)(n - i)), (int)(n - i)); \
} \
TARGET_##S static void widen_f32_##S (float *dst, const void *src, size_t n) { widen_##S(dst, src, DT_F32, n); } \
TARGET_##S static void widen_f16_##S (float *dst, const void *src, size_t n) { widen_##S(dst, src, DT_F16, n); } \
TARGET_##S static void widen_bf16_##S(float *dst, const void *src, size_t n) { widen_##S(dst, src, DT_BF16, n); } \
TARGET_##S static void narrow_f16_##S(uint16_t *dst, const float *src, size_t n) { \
    size_t i = 0; \
    for (; i + LANES <= n; i += LANES) store_f16_##S(dst + i, load_##S(src + i, DT_F32, LANES)); \
    for (; i < n; i++) dst[i] = f32_to_f16(src[i]); \
} \
TARGET_##S static void unpack_q8_##S(float *dst, const char *src, int n, int D) { \
    for (int left = n * D, col = 0, m; left > 0; left -= m, dst += m, col = col + m < D ? col + m : 0) { \
        uint16_t d; \
        int i = 0; \
        memcpy(&d, src, 2); \
        float scale = f16_to_f32(d); \
        const signed char *q = (const signed char *)src + 2; \
        m = D - col < Q8_BLOCK ? D - col : Q8_BLOCK; \
        for (; i + LANES <= m; i += LANES) store_##S(dst + i, mul_##S(load_bytes_##S(q + i), all_##S(scale)), LANES); \
        for (; i < m; i++) dst[i] = scale * q[i]; \
        src += 2 + m; \
    } \
}
#define SIMD_LINE(S) { #S, { dots_f32_##S, dots_f16_##S, dots_bf16_##S }, { widen_f32_##S, widen_f16_##S, widen_bf16_##S }, \
                       narrow_f16_##S, unpack_q8_##S, { mix_f32_##S, mix_f16_##S, mix_bf16_##S }, exp_shift_##S, softmax_columns_##S, swiglu_##S, max_of_##S, sum_from_##S, list_from_##S }

KERNELS(plain, 1, 2, 2, 1)
#if defined(__x86_64__)
KERNELS(avx2, 3, 2, 2, 3)
KERNELS(avx512, 4, 4, 4, 6)
#endif
static const Simd simd_table[] = {                      // best first
#if defined(__x86_64__)
    SIMD_LINE(avx512), SIMD_LINE(avx2),
#endif
    SIMD_LINE(plain),
};
static const Simd *simd;

static int simd_can(const Simd *s) {                    // does this processor (and its operating system) have what the version needs?
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");      // every processor with AVX2 has F16C
    if (!strcmp(s->name, "avx2")) return avx2;
    if (!strcmp(s->name, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
    return !strcmp(s->name, "plain");
}
static int simd_set(const char *name) {                 // NULL: the best there is. 0, or -1 when this machine cannot run it
    for (size_t i = 0; i < sizeof simd_table / sizeof *simd_table; i++)
        if ((!name || !strcmp(name, simd_table[i].name)) && simd_can(&simd_table[i])) { simd = &simd_table[i]; return 0; }
    return -1;
}
__attribute__((constructor)) static void simd_choose(void) {       // before main, so no thread ever sees it change
    const char *name = getenv("KVCOMP_SIMD");                      // plain, avx2, avx512: for tests and comparisons
    if (!name || simd_set(name) < 0) simd_set(NULL);
}
const char *simd_name(void) { return simd->name; }

// ---- products
void matmul_strided(float *y, size_t ldy, const float *x, size_t ldx, const Tensor *w, int T) {   // y (T,rows) = x (T,cols) W^T
    int K = w->cols, t_blocks = (T + T_BLOCK - 1) / T_BLOCK, row_blocks = (w->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int panel = T > 4 ? ROW_BLOCK : 4;                  // few rows of x: finish 4 rows of W before the next, so W streams in order
    size_t size = dtype_size(w->dtype);
    #pragma omp parallel for collapse(2) schedule(static) if ((size_t)T * w->rows * K > 1 << 16)
    for (int tb = 0; tb < t_blocks; tb++)
        for (int rb = 0; rb < row_blocks; rb++) {
            int t0 = tb * T_BLOCK, m = T - t0 < T_BLOCK ? T - t0 : T_BLOCK, end = (rb + 1) * ROW_BLOCK < w->rows ? (rb + 1) * ROW_BLOCK : w->rows;
            for (int r = rb * ROW_BLOCK; r < end; r += panel)
                for (int k = 0; k < K; k += K_CHUNK)
                    simd->dots[w->dtype](&(Dots){
                        .y = y + t0 * ldy + r, .ldy = ldy, .x = x + t0 * ldx + k, .ldx = ldx,
                        .w = (const char *)w->data + ((size_t)r * K + k) * size, .ldw = K * size,
                        .m = m, .n = end - r < panel ? end - r : panel, .K = K - k < K_CHUNK ? K - k : K_CHUNK, .add = k > 0, .scale = 1 });
        }
}
void matmul(float *y, const float *x, const Tensor *w, int T) { matmul_strided(y, (size_t)w->rows, x, (size_t)w->cols, w, T); }

// The tiles of attention. They run inside threads and are never parallel themselves. Rows of K and V may be f32 tiles or the
// cache's own f16 and bf16 rows: the results are the same bits, and decode need not copy rows first (13 -> 21 GB/s a thread).
static void scores_of(float *s, const float *q, const void *k, int dtype, int m, int n, int D, float scale, Ahead next) {   // s (m,n) = scale * q (m,D) k (n,D)^T
    simd->dots[dtype](&(Dots){ .y = s, .ldy = (size_t)n, .x = q, .ldx = (size_t)D, .w = k, .ldw = (size_t)D * dtype_size(dtype), .m = m, .n = n, .K = D, .scale = scale, .next = next });
}
static void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add, Ahead next) {          // o (m,D) = p (m,n) v (n,D); add: o += that
    simd->mix[dtype](o, p, v, m, n, D, add, next);
}
void attn_scores(float *s, const float *q, const float *k, int m, int n, int D, float scale) { scores_of(s, q, k, DT_F32, m, n, D, scale, (Ahead){0}); }
void attn_mix(float *o, const float *p, const float *v, int m, int n, int D) { mix_of(o, p, v, DT_F32, m, n, D, 1, (Ahead){0}); }
void exp_shift(float *x, float max, int n, float *sum) { simd->exp_shift(x, max, (size_t)n, sum); }
float dot_f32(const float *a, const float *b, int n) {
    float s;
    attn_scores(&s, a, b, 1, 1, n, 1);
    return s;
}
static float max_f32(const float *x, int n) { return simd->max(x, (size_t)n); }            // -INFINITY when n == 0

// ---- rows
void to_f32(float *dst, const void *src, int dtype, size_t n) { simd->widen[dtype](dst, src, n); }
void from_f32(void *dst, const float *src, int dtype, size_t n) {
    uint16_t *h = dst;
    if (dtype == DT_F32) memcpy(dst, src, n * sizeof(float));
    else if (dtype == DT_F16) simd->narrow_f16(h, src, n);
    else for (size_t i = 0; i < n; i++) h[i] = f32_to_bf16(src[i]);
}
enum { PIECE = 256 };                                   // elements of a weight vector widened at a time

void add_bias(float *y, const Tensor *b, int T) {       // y (T,cols) += b
    float piece[PIECE];
    for (int c = 0; b->data && c < b->cols; c += PIECE) {
        int n = b->cols - c < PIECE ? b->cols - c : PIECE;
        to_f32(piece, (const char *)b->data + c * dtype_size(b->dtype), b->dtype, (size_t)n);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < n; i++) y[(size_t)t * b->cols + c + i] += piece[i];
    }
}
void rmsnorm(float *y, const float *x, const Tensor *w, int T, int n, float eps) {      // y = x / sqrt(mean(x^2) + eps) * w; y may be x
    #pragma omp parallel for schedule(static) if ((size_t)T * n > 1 << 15)
    for (int t = 0; t < T; t++) {
        const float *a = x + (size_t)t * n;
        float *o = y + (size_t)t * n, piece[PIECE], inv = 1 / sqrtf(dot_f32(a, a, n) / (float)n + eps);
        for (int c = 0; c < n; c += PIECE) {
            int m = n - c < PIECE ? n - c : PIECE;
            to_f32(piece, (const char *)w->data + c * dtype_size(w->dtype), w->dtype, (size_t)m);
            for (int i = 0; i < m; i++) o[c + i] = a[c + i] * inv * piece[i];
        }
    }
}
void swiglu(float *g, const float *u, size_t n) {       // g = g / (1 + e^-g) * u
    const size_t piece = 4096;
    #pragma omp parallel for schedule(static) if (n > 1 << 15)
    for (size_t i = 0; i < n; i += piece) simd->swiglu(g + i, u + i, n - i < piece ? n - i : piece);
}

// ---- the k largest
// The k-th largest key is found bit by bit, highest first: a bit is set if k keys are at least as large with it. One pass over the values
// each, as vectors; it ends early when exactly k keys are left.
int top_k(const float *x, int n, int k, int *idx) {     // x (n) -> idx (min(k,n)) ascending; ties go to the lower index
    uint32_t key = 0;
    int take = k < n ? k : n, above = 0, from = -1, last = n;           // keys above the k-th; keys from the bits so far on
    if (take <= 0) return 0;
    for (uint32_t bit = 1u << 31; bit && from != take; bit >>= 1) {
        int c = simd->sum_from(x, NULL, n, key | bit);
        if (c < take) above = c; else { key |= bit; from = c; }
    }
    if (from != take)                                                   // more than that: some keys that equal the k-th stay behind
        for (last = 0; above < take; last++) above += order_key(x[last]) == key;
    int count = simd->list_from(x, 0, last, key, idx);
    if (count < take) count += simd->list_from(x, last, n, key + 1, idx + count);
    return count;
}

static void q8_unpack  (float *x, const char *o, int n, int D) { simd->unpack_q8(x, o, n, D); }

// The sum of w (n) over the places where x (n) is at least the number whose order_key is `key`; w NULL: how many places.
static int weight_from(const float *x, const int *w, int n, uint32_t key) {
    return simd->sum_from(x, w, n, key);
}

// ==================================================================================================== 17 FAST PATHS
// What attention and the methods run on where the plain algorithm would be too slow; each function says what it computes.

enum { COLUMN_TILE = 36, COLUMN_CHUNK = 57 * COLUMN_TILE };     // rows of a tile: its keys and scores lie in L1 beside the queries, and mix takes them 6 at a time; of one softmax
// Mean softmax row of w queries over all rows held, of every query head (lists = R), or the sum of those of a group (lists = 1): q (w,H,D), of
// the tokens from tok0 on, -> score (G lists,N), N = kv_longest(s,l) (SnapKV; DiliLazyKV 4.1.3; LoopServe, Algorithm 3). A tile's scores
// lie with keys along rows and the queries of a whole group along columns: a key is unpacked once for all of them, and neither products
// nor sums of exponentials need folding. Rows a query may not see count as 0.
typedef struct {
    const KVHead *hd;
    const float *q;         // (n,H,D) the block's queries, of the tokens from tok0 on
    int l, g, n, m, tok0;   // m = R n columns; k n + i: query i of head k
    float *x;               // (D,m) its queries as columns, times log2 e / sqrt(D): probabilities are powers of 2 here
    float *e, *top;         // (len,m) 2^(score - maximum of the chunk so far); (tiles,m) that maximum, tile by tile
    float *max, *sum;       // (chunks,m) of a chunk; then, in the first chunk's place, of all: maximum, and 1 / (w sum)
} Columns;

static void column_queries(const Session *s, const Columns *c) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G;
    float scale = LOG2_E / sqrtf((float)D);
    for (int j = 0; j < c->m; j++) {
        const float *from = c->q + ((size_t)(j % c->n) * H + c->g * R + j / c->n) * D;
        for (int d = 0; d < D; d++) c->x[(size_t)d * c->m + j] = from[d] * scale;
    }
}
static int column_end(const Columns *c, int chunk) { return c->hd->len - chunk * COLUMN_CHUNK < COLUMN_CHUNK ? c->hd->len : (chunk + 1) * COLUMN_CHUNK; }
static void column_exps(const Session *s, const Columns *c, Tile *t, int chunk) {
    int D = s->c->D, m = c->m, from = chunk * COLUMN_CHUNK, to = column_end(c, chunk);
    int seen = s->rule == VIS_CAUSAL && !layer_window(s, c->l) ? last_visible(s, c->hd, c->tok0) : 0;      // by all queries
    for (int j = 0; j < m; j++) { t->tok[j] = c->tok0 + j % c->n; t->max[j] = -INFINITY; t->sum[j] = 0; }
    for (int r = from; r < to; r += COLUMN_TILE) {
        int n = to - r < COLUMN_TILE ? to - r : COLUMN_TILE;
        float *x = c->e + (size_t)r * m;
        kv_load_k(s, c->hd, NULL, r, n, t->k);
        mix_of(x, t->k, c->x, DT_F32, n, D, m, 0, tile_ahead(s, c->hd, 0, r + n, to - r - n < n ? to - r - n : n));
        if (r + n > seen) mask_tile(s, c->l, c->hd, t, m, NULL, r, n, x, 1, (size_t)m);
        simd->softmax_columns(x, n, m, t->max, t->sum);
        memcpy(c->top + (size_t)(r / COLUMN_TILE) * m, t->max, (size_t)m * sizeof *c->top);
    }
    memcpy(c->max + (size_t)chunk * m, t->max, (size_t)m * sizeof *c->max);
    memcpy(c->sum + (size_t)chunk * m, t->sum, (size_t)m * sizeof *c->sum);
}
static void columns_join(const Columns *c, int chunks, int w) {
    for (int j = 0; j < c->m; j++) {
        float max = -INFINITY, sum = 0;
        for (int k = 0; k < chunks; k++) max = fmaxf(max, c->max[k * c->m + j]);
        for (int k = 0; k < chunks; k++) sum += c->sum[k * c->m + j] * exp2f(c->max[k * c->m + j] - max);
        c->max[j] = max; c->sum[j] = 1 / (sum * (float)w);
    }
}
// score (lists,N) = the columns of each head, or of all as one list, times what makes the exponentials of a tile probabilities, over w; add: +=
// that. Several lists are one product, with 0 for the weights of the other heads' columns.
static void column_sums(const Columns *c, Tile *t, int chunk, int lists, int add, float *score, size_t N) {
    int m = c->m, from = chunk * COLUMN_CHUNK, to = column_end(c, chunk), tiles = (to - from + COLUMN_TILE - 1) / COLUMN_TILE;
    float *top = c->top + (size_t)from / COLUMN_TILE * m, unused = 0;
    for (int i = 0; i < tiles; i++) for (int j = 0; j < m; j++) top[i * m + j] = (top[i * m + j] - c->max[j]) / LOG2_E;
    exp_shift(top, 0, tiles * m, &unused);
    memset(t->sc, 0, (size_t)lists * m * sizeof *t->sc);
    for (int r = from; r < to; r += COLUMN_TILE, top += m) {
        int n = to - r < COLUMN_TILE ? to - r : COLUMN_TILE;
        for (int k = 0, j = 0; k < lists; k++)
            for (int end = j + m / lists; j < end; j++) t->sc[k * m + j] = top[j] * c->sum[j];
        simd->dots[DT_F32](&(Dots){ .y = score + r, .ldy = N, .x = t->sc, .ldx = (size_t)m, .w = (const char *)(c->e + (size_t)r * m), .ldw = m * sizeof(float),
                                    .m = lists, .n = n, .K = m, .add = add, .scale = 1 });
    }
}
static void mean_rows(Session *s, int l, const float *q, int tok0, int w, int lists, float *score) {
    int H = s->c->H, G = s->c->G, R = H / G, per = Q_BLOCK / R;
    size_t mark = scratch_mark(s), N = (size_t)kv_longest(s, l), most = R * (w < per ? w : per), chunks_most = N / COLUMN_CHUNK + 1;
    Tile *tiles = tiles_new(s);
    Columns c = { .l = l, .x = scratch(s, s->c->D * most * sizeof(float)), .e = scratch(s, N * most * sizeof(float)), .top = scratch(s, (N / COLUMN_TILE + 1) * most * sizeof(float)),
                  .max = scratch(s, chunks_most * most * sizeof(float)), .sum = scratch(s, chunks_most * most * sizeof(float)) };
    for (int item = 0; item < G * ((w + per - 1) / per); item++) {
        int i = item / G * per;
        c.g = item % G; c.n = w - i < per ? w - i : per; c.m = R * c.n; c.tok0 = tok0 + i;
        c.hd = kv_head(s, l, c.g); c.q = q + (size_t)i * H * s->c->D;
        int len = c.hd->len, chunks = (len + COLUMN_CHUNK - 1) / COLUMN_CHUNK, team = worth_threads((size_t)c.m * len * s->c->D);
        float *sums = score + (size_t)c.g * lists * N;
        (void)team;                                      // read by OpenMP only
        column_queries(s, &c);
        // A thread sums the chunks it has made, the last one first: a group's exponentials are more than its cache holds, and those are still there.
        #pragma omp parallel if (team)
        for (int k = 0; k < chunks; k++) if (k % team_size() == thread_id()) column_exps(s, &c, &tiles[thread_id()], k);
        columns_join(&c, chunks, w);
        #pragma omp parallel if (team)
        for (int k = chunks - 1; k >= 0; k--) if (k % team_size() == thread_id()) column_sums(&c, &tiles[thread_id()], k, lists, i > 0, sums, N);
        for (int k = 0; k < lists; k++) memset(sums + k * N + len, 0, (N - len) * sizeof *sums);
    }
    scratch_reset(s, mark);
}

#if defined(__x86_64__)
// Where the elements of a group stand, per w: bytes to bring together, then bits to shift by.
static struct {
    unsigned char perm8[32]; int shift8[8];             // AVX2: 8 elements, 4 bytes each
    unsigned char perm32[64], shift32[64];              // VBMI: 32 elements, 4 in each 8 bytes
} unpack_lanes[17];

static void unpack_lanes_init(void) {
    for (int w = 1; w <= 16; w++) {
        for (int i = 0; i < 8; i++) {
            unpack_lanes[w].shift8[i] = i * w % 8;
            for (int b = 0, at = i * w / 8; b < 4; b++) unpack_lanes[w].perm8[4 * i + b] = (unsigned char)(at + b < 16 ? at + b : 128);   // 128: a zero
        }
        for (int j = 0; j < 8; j++)                     // 8 bytes from bit 4jw on, which is a whole or a half byte
            for (int b = 0; b < 8; b++) {
                unpack_lanes[w].perm32[8 * j + b] = (unsigned char)(j * w / 2 + b);
                unpack_lanes[w].shift32[8 * j + b] = (unsigned char)((j * w % 2 * 4 + b / 2 * w + w - 16 + b % 2 * 8) & 63);   // the element on top
            }
    }
}
__attribute__((target("avx2"))) static void unpack_avx2(uint16_t *h, const unsigned char *p, int n, int w, int mid) {
    __m256i perm = _mm256_loadu_si256((const void *)unpack_lanes[w].perm8);
    __m256i shift = _mm256_loadu_si256((const void *)unpack_lanes[w].shift8);
    __m256i mask = _mm256_set1_epi32((1 << w) - 1), add = _mm256_set1_epi16((short)mid), zero = _mm256_setzero_si256();
    __m128i b = _mm_cvtsi32_si128(16 - w);
    int i = 0;
    for (; i + 16 <= n; i += 16, p += 2 * w) {
        __m256i lo = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)p));
        __m256i hi = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(p + w)));
        lo = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(lo, perm), shift), mask);
        hi = _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(hi, perm), shift), mask);
        lo = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);       // packus works in halves: put them in order
        lo = _mm256_sll_epi16(lo, b);
        hi = _mm256_cmpeq_epi16(_mm256_add_epi16(lo, lo), zero);                // +0 and -0 double to 0
        _mm256_storeu_si256((void *)(h + i), _mm256_or_si256(lo, _mm256_andnot_si256(hi, add)));
    }
    _mm256_zeroupper();                                 // the compiler leaves it out before a tail call
    if (i < n) unpack_plain(h + i, p, n - i, w, mid);
}
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vbmi")))
VBMI __attribute__((always_inline)) static inline __m512i unpack_32(__m512i x, const __m512i *lanes, __m512i kept, __m512i add, int mid) {
    x = _mm512_and_si512(_mm512_multishift_epi64_epi8(lanes[1], _mm512_permutexvar_epi8(lanes[0], x)), kept);
    return mid ? _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff)), x, add) : x;
}
VBMI static void unpack_vbmi(uint16_t *h, const unsigned char *p, int n, int w, int mid) {
    const __m512i lanes[2] = { _mm512_loadu_si512(unpack_lanes[w].perm32), _mm512_loadu_si512(unpack_lanes[w].shift32) };
    __m512i kept = _mm512_set1_epi16((short)(0xffff << (16 - w))), add = _mm512_set1_epi16((short)mid);
    int i = 0;
    for (; (n - i - 96) * w >= 512; i += 128, p += 16 * w)      // four at a time; 64 bytes are there to be read behind the start of each
        UNROLL for (int j = 0; j < 4; j++) _mm512_storeu_si512(h + i + 32 * j, unpack_32(_mm512_loadu_si512(p + 4 * w * j), lanes, kept, add, mid));
    for (; i < n; i += 32, p += 4 * w) {
        int m = n - i < 32 ? n - i : 32;
        __m512i x = _mm512_maskz_loadu_epi8(~(__mmask64)0 >> (64 - (m * w + 7) / 8), p);
        _mm512_mask_storeu_epi16(h + i, ~(__mmask32)0 >> (32 - m), unpack_32(x, lanes, kept, add, mid));
    }
    _mm256_zeroupper();
}
#undef VBMI
static void unpack_choose(void) {
    unpack_lanes_init();
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) unpack_f16 = unpack_avx2;
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi")) unpack_f16 = unpack_vbmi;
}
#else
static void unpack_choose(void) { }
#endif

// ==================================================================================================== 18 OPTIONS
// One table drives parsing, --help, defaults and suggestions. A method's own options are in its section; this table is
// the program's. Values are kept as text by name and checked when they are set, so a getter cannot fail.

static const Opt program_options[] = {
    // Model and run
    { "model",         's', "",     "a Hugging Face folder (default: the shipped model)" },
    { "device",        'c', "auto|cpu|cuda", "where to run; auto: a GPU that answers, has room and computes what the CPU computes, else the CPU" },
    { "threads",       'i', "0",    "OpenMP threads; 0: all cores" },
    { "ctx-size",      'i', "4096", "most rows a head may hold in a chat (--ids is replayed whatever its length); 0: the model's own limit" },
    { "batch-size",    'i', "512",  "rows of a prefill block; changes speed and memory, never a logit (on a GPU: their rounding)" },
    { "ctk",           'c', "f16|f32|bf16|q8_0", "how K rows are stored" },
    { "ctv",           'c', "f16|f32|bf16|q8_0", "how V rows are stored" },
    { "tokenizer",     's', "",     "tokenizer.json or tokenizer.model instead of the model's" },
    { "chat-template", 's', "",     "template by name, or a file, instead of the model's" },
    { "synthetic",     's', "",     "random weights of a shape: llama-3.2-1b, llama-3.1-8b, qwen3-4b, tiny, or L..,H..,G..,D..,C..,F..,V.." },
    { "inspect",       'b', "0",    "print config, tensors, bytes, KV bytes per token, and leave" },
    // Prompt
    { "prompt",        's', "",     "text to answer once" },
    { "file",          's', "",     "the same from a file; - is standard input" },
    { "system",        's', "",     "system message" },
    { "n-predict",     'i', "-1",   "most tokens to make; -1: no limit in a chat, 256 otherwise" },
    { "raw",           'b', "0",    "no chat template: the text as it is" },
    { "parse-special", 'b', "0",    "read special tokens in the prompt's text" },
    { "ignore-eos",    'b', "0",    "go on after an end token" },
    { "keep",          'i', "0",    "accepted for scripts; never changes a method, each says what it keeps" },
    { "think",         'b', "0",    "let a thinking model think (it does unless --no-think)" },
    { "no-think",      'b', "0",    "turn a thinking model's thoughts off" },
    { "single-turn",   'b', "0",    "leave after one reply" },
    { "session",       's', "",     "load this session before, save it after" },
    // Sampling
    { "temp",          'f', "0.8",  "temperature; 0: greedy" },
    { "top-k",         'i', "40",   "0: off" },
    { "top-p",         'f', "0.95", "1: off" },
    { "min-p",         'f', "0.05", "0: off" },
    { "repeat-penalty",'f', "1.0",  "1: off" },
    { "repeat-last-n", 'i', "64",   "tokens the penalty looks at" },
    { "seed",          'i', "-1",   "of the sampler; -1: from the clock" },
    // Compression
    { "method",        's', "full", "NAME or NAME+NAME, see --list-methods" },
    { "budget",        'i', "0",    "rows kept (or read) per KV head, window included; 0: the method's default" },
    { "ratio",         'f', "0",    "share of the rows to remove at each prefill end, instead of --budget" },
    { "sink",          'i', "4",    "first tokens always kept (streaming, expected-attention)" },
    { "obs-window",    'i', "32",   "last queries that score the rows (snapkv, adakv, pyramidkv)" },
    { "kernel",        'i', "7",    "pooling width of those scores, odd" },
    { "gqa-agg",       'c', "mean|max|sum", "query heads of a KV head to one score (snapkv, adakv, pyramidkv)" },
    { "paper",         'b', "0",    "the paper's own numbers where ours differ (loopserve, lychee)" },
    // Output
    { "json",          'b', "0",    "one object per run on stdout" },
    { "json-rows",     'b', "0",    "with --json: the rows kept by every head" },
    { "csv",           'b', "0",    "the same names as --json, as a table" },
    { "dump-tokens",   'b', "0",    "print the ids of -p on one line and leave" },
    { "ids",           's', "",     "teacher forcing: each line is a turn, ids to prefill | ids to decode" },
    { "dump-logits",   's', "",     "with --ids: write the logits rows here (float32, V a row)" },
    { "stats",         'b', "0",    "print the method's statistics on stderr" },
    { "no-stats",      'b', "0",    "no summary line after each reply" },
    { "verbose",       'b', "0",    "print every effective value at the start" },
    { "quiet",         'b', "0",    "errors only on stderr" },
    { "color",         'c', "auto|on|off", "colours in the chat" },
    // Measure
    { "eval",          's', "",     "quality through the compressed cache: all, or needle,multiturn,coref,facts,json,fewshot,summary; file, ppl, kld" },
    { "eval-file",     's', "",     "dialogues or LongBench items (json lines) for file, any text for ppl and kld" },
    { "eval-items",    'i', "8",    "texts of each task" },
    { "eval-length",   's', "512",  "tokens of a text, or several lengths: 512,1024" },
    { "eval-seed",     'i', "1",    "of the texts and of the intervals" },
    { "eval-history",  'c', "own|gold", "whose replies the later turns see: the model's own or the right ones" },
    { "eval-window",   'i', "512",  "ppl, kld: tokens of a window; half is prefilled, half decoded" },
    { "eval-windows",  'i', "8",    "ppl, kld: most windows of the text" },
    { "compare",       's', "",     "methods, comma-separated: the same items through each (--eval all unless given)" },
    { "budgets",       's', "",     "budgets for --compare, comma-separated" },
    { "report",        's', "",     "write OUT.html: scores of --eval and pictures of what each method keeps, as one page; numbers in OUT.csv" },
    { "bench",         'b', "0",    "measure speed; with --synthetic or a model" },
    { "bench-depths",  's', "0,4096,16384,32768", "decode at these context lengths" },
    { "bench-prompts", 's', "512,4096", "prefill of these lengths" },
    { "bench-suite",   's', "",     "the papers' methods one after another, prefill and decode: a table, and this file as CSV" },
    { "repeat",        'i', "5",    "runs per number, the median counts" },
    // Other
    { "list-methods",  'b', "0",    "one name a line" },
    { "version",       'b', "0",    "print the version" },
    { NULL, 0, NULL, NULL },
};

struct Options { struct { char *key; char *value; } *map; struct { char *key; int value; } *given; };   // stb_ds string maps

static const Opt *opt_find_in(const Opt *o, const char *name) {
    for (; o && o->name; o++) if (!strcmp(o->name, name)) return o;
    return NULL;
}
static const Opt *opt_find(const char *name) {
    const Opt *o = opt_find_in(program_options, name);
    EACH_METHOD(m) if (!o) o = opt_find_in((*m)->opts, name);
    return o;
}
static char *opt_default(const Opt *o) {                 // malloc'd; a choice's first word
    char *v = xmalloc(strlen(o->def) + 1);
    strcpy(v, o->def);
    if (o->kind == 'c') v[strcspn(v, "|")] = 0;
    return v;
}
static void options_add(Options *o, const Opt *t) {
    for (; t && t->name; t++) if (shgeti(o->map, t->name) < 0) shput(o->map, t->name, opt_default(t));
}
Options *options_new(void) {
    Options *o = xcalloc(1, sizeof *o);
    sh_new_arena(o->map);
    sh_new_arena(o->given);
    options_add(o, program_options);
    EACH_METHOD(m) options_add(o, (*m)->opts);
    return o;
}
void options_free(Options *o) {
    if (!o) return;
    for (int i = 0; i < (int)shlen(o->map); i++) free(o->map[i].value);
    shfree(o->map);
    shfree(o->given);
    free(o);
}
static int opt_check(const Opt *t, const char *v, char err[256]) {
    char *end = NULL;
    if (t->kind == 'i') {
        errno = 0;
        long n = strtol(v, &end, 10);
        if (!*v || *end || errno || n < INT_MIN || n > INT_MAX) { snprintf(err, 256, "--%s wants a whole number, found '%.60s'", t->name, v); return -1; }
    }
    if (t->kind == 'f') {
        double x = strtod(v, &end);
        if (!*v || *end || !isfinite(x)) { snprintf(err, 256, "--%s wants a number, found '%.60s'", t->name, v); return -1; }
    }
    if (t->kind == 'b' && strcmp(v, "0") && strcmp(v, "1")) { snprintf(err, 256, "--%s is a flag and takes no value, found '%.60s'", t->name, v); return -1; }
    if (t->kind == 'c') {
        size_t n = strlen(v);
        for (const char *a = t->def; a && !strchr(v, '|'); a = strchr(a, '|') ? strchr(a, '|') + 1 : NULL)
            if (n && !strncmp(a, v, n) && (a[n] == '|' || !a[n])) return 0;
        snprintf(err, 256, "--%s wants one of %s, found '%.60s'", t->name, t->def, v);
        return -1;
    }
    return 0;
}
int options_set(Options *o, const char *name, const char *value, char err[256]) {
    const Opt *t = opt_find(name);
    if (!t) { snprintf(err, 256, "unknown option --%s", name); return -1; }
    if (opt_check(t, value, err)) return -1;
    char *v = xmalloc(strlen(value) + 1);
    strcpy(v, value);
    free(shget(o->map, name));
    shput(o->map, name, v);
    shput(o->given, name, 1);
    return 0;
}
static const char *opt_value(const Options *o, const char *name) {
    Options *w = (Options *)o;                           // stb_ds macros cache a search inside the map
    if (shgeti(w->map, name) < 0) die(EXIT_RUN, "no option is called --%s", name);
    return shget(w->map, name);
}
int         opt_given(const Options *o, const char *name) { Options *w = (Options *)o; return shgeti(w->given, name) >= 0; }
int         opt_int (const Options *o, const char *name) { return atoi(opt_value(o, name)); }
double      opt_real(const Options *o, const char *name) { return strtod(opt_value(o, name), NULL); }
const char *opt_str (const Options *o, const char *name) { return opt_value(o, name); }

// What an option may be; checked before anything is opened
static const struct Range { const char *name; double lo, hi; } ranges[] = {
    { "threads", 0, 1024 }, { "ctx-size", 0, 1 << 30 }, { "batch-size", 1, 1 << 20 }, { "n-predict", -1, INT_MAX }, { "temp", 0, 100 }, { "top-k", 0, INT_MAX }, { "top-p", 0, 1 },
    { "min-p", 0, 1 }, { "repeat-penalty", 0.01, 100 }, { "repeat-last-n", 0, INT_MAX }, { "budget", 0, INT_MAX }, { "ratio", 0, 0.9999 }, { "sink", 0, INT_MAX }, { "obs-window", 1, 1 << 20 },
    { "kernel", 1, 1023 }, { "eval-items", 1, 1 << 20 }, { "eval-window", 4, 1 << 20 }, { "eval-windows", 1, 1 << 20 }, { "repeat", 1, 1000 },
    { "lychee-buffer", 0, 1 << 30 }, { "lychee-sink", 0, 1 << 30 }, { "lychee-iters", 0, 1000 }, { "lychee-guard", 0, 1 },
    { "loopserve-alpha", 0, 1 }, { "loopserve-max-cells", 0, 1 }, { "loopserve-max-tiles", 0, 1 }, { "loopserve-interval", 1, 1 << 16 }, { "loopserve-obs", 0, 1 << 16 }, { "loopserve-samples", 1, 1 << 16 },
};
static int out_of_range(const Options *o, const char *name, char err[256]) {     // of this option, or of any (NULL)
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const struct Range *r = &ranges[i];
        double x = opt_real(o, r->name);
        if ((name && strcmp(name, r->name)) || (x >= r->lo && x <= r->hi)) continue;
        snprintf(err, 256, "--%s %.10g is outside %.10g..%.10g", r->name, x, r->lo, r->hi);
        return 1;
    }
    return 0;
}

int opt_choice(const Options *o, const char *name, const char *words) {      // place of the value in "a|b|c"
    const char *v = opt_str(o, name);
    int i = 0;
    for (size_t n; *words; words += n + (words[n] == '|'), i++)
        if ((n = strcspn(words, "|")) == strlen(v) && !strncmp(words, v, n)) return i;
    return 0;
}

// "2048", "512,1024", "2:98:3" (from, to, step), or a mix of them -> stb array of numbers in [lo,hi], each once
static int *number_list(const char *name, const char *text, long lo, long hi) {
    int *list = NULL, n;
    for (const char *p = text; *p; ) {
        long a, b, step = 1;
        if (sscanf(p, "%ld%n", &a, &n) != 1) break;
        b = a; p += n;
        if (sscanf(p, ":%ld:%ld%n", &b, &step, &n) == 2) p += n;
        if ((*p && *p != ',') || a < lo || b > hi || b < a || step < 1) break;
        for (; a <= b; a += step) {
            int known = 0;
            for (int i = 0; i < (int)arrlen(list); i++) known |= list[i] == a;
            if (!known) arrput(list, (int)a);
        }
        if (!*p) return list;
        p++;
    }
    arrfree(list);
    die(EXIT_USAGE, "--%s wants numbers from %ld to %ld like 5,10 or 2:98:3, found '%.60s'", name, lo, hi, text);
    return NULL;
}

// ==================================================================================================== 19 JSON
// From a folder of Hugging Face files to a Config and Weights. Everything here is fed by files that others wrote: every
// number is checked before it is used, a refused file gives one line that names the key or tensor, and no tensor is copied
// (it is read where the file is mapped) unless it lies at an odd address.

// ---- JSON: a strict reader (RFC 8259). One parsed text owns its nodes: json_free of the root gives everything back.
// The text is copied once and strings are unescaped in place; nodes wait on a stack until their array or object closes.
enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };
enum { JSON_DEPTH = 64 };                       // arrays and objects inside one another


struct Json {
    int type, is_int, n;        // JSON_*; number written without fraction or exponent that fits int64; children
    double num;                 // number; bool: 0 or 1
    int64_t i;                  // the same when is_int; bool: 0 or 1
    char *str; size_t len;      // string: bytes (UTF-8 as written), NUL-terminated; NULs may stand inside
    Json *item;                 // (n) children of an array or object, in the order of the text
    char **key;                 // (n) keys of an object. A key written twice stands here twice: json_get finds the last one
};

typedef struct { Json value; char *key; } JsonSlot;
typedef struct { Json root; char *text; char **block; } JsonDoc;        // root first: json_free casts back
typedef struct {
    JsonDoc *doc;
    char *p, *end, *err;        // reading position in doc->text; end: a NUL
    JsonSlot *stack;            // values read whose container is still open
    char *mem; size_t left;     // free part of the newest block
    int depth;
} JsonReader;

static int json_fail(JsonReader *r, const char *at, const char *what) {
    int c = at < r->end ? (unsigned char)*at : 0;
    if (at >= r->end) snprintf(r->err, 256, "byte %zu: %s, found the end of the text", (size_t)(at - r->doc->text), what);
    else snprintf(r->err, 256, c > 32 && c < 127 ? "byte %zu: %s, found '%c'" : "byte %zu: %s, found byte %d",
                  (size_t)(at - r->doc->text), what, c);
    return -1;
}

static void *json_alloc(JsonReader *r, size_t n) {      // n a multiple of 8. Blocks double up to 1 MB
    if (!n) return NULL;
    if (n > r->left) {
        size_t size = (size_t)1024 << (arrlen(r->doc->block) < 10 ? arrlen(r->doc->block) : 10);
        r->left = n > size ? n : size;
        r->mem = xmalloc(r->left);
        arrput(r->doc->block, r->mem);
    }
    void *p = r->mem;
    r->mem += n; r->left -= n;
    return p;
}

static void json_space(JsonReader *r) { while (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t') r->p++; }

static int json_hex4(const char *p) {           // p: 4 hexadecimal digits -> 0..65535, or -1. Stops at a NUL
    int v = 0;
    for (int i = 0; i < 4; i++) {
        int c = (unsigned char)p[i], low = c | 32;
        int d = c >= '0' && c <= '9' ? c - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

static char *utf8_put(char *o, unsigned c) {    // writes code point c -> the byte after it
    int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char lead[] = { 0, 0xc0, 0xe0, 0xf0 };
    *o++ = (char)(lead[more] | c >> 6 * more);
    while (more-- > 0) *o++ = (char)(0x80 | (c >> 6 * more & 63));
    return o;
}

// r->p stands on the opening quote. An escape is never shorter than what it stands for, so the string shrinks in place
// and its NUL overwrites at latest the closing quote.
static int json_string(JsonReader *r, char **str, size_t *len) {
    char *o = ++r->p, *p = r->p;
    *str = o;
    for (;;) {
        char *run = p;
        while ((unsigned char)*p >= ' ' && *p != '"' && *p != '\\') p++;
        if (o != run) memmove(o, run, (size_t)(p - run));
        o += p - run;
        if (*p == '"') break;
        // a control character, or the text ends
        if (*p != '\\') return json_fail(r, p, "expected '\"' at the end of a string");
        int c = (unsigned char)p[1], hex, low;
        p += 2;
        switch (c) {
        case '"': case '\\': case '/': *o++ = (char)c; break;
        case 'b': *o++ = '\b'; break;
        case 'f': *o++ = '\f'; break;
        case 'n': *o++ = '\n'; break;
        case 'r': *o++ = '\r'; break;
        case 't': *o++ = '\t'; break;
        case 'u':
            if ((hex = json_hex4(p)) < 0) return json_fail(r, p, "expected 4 hexadecimal digits after \\u");
            p += 4;
            if (hex >= 0xd800 && hex < 0xdc00 && p[0] == '\\' && p[1] == 'u'
                && (low = json_hex4(p + 2)) >= 0xdc00 && low < 0xe000) {
                hex = 0x10000 + ((hex - 0xd800) << 10) + (low - 0xdc00);
                p += 6;
            } else if (hex >= 0xd800 && hex < 0xe000) hex = 0xfffd;                         // half a surrogate pair
            o = utf8_put(o, (unsigned)hex);
            break;
        default: return json_fail(r, p - 1, "expected one of \"\\/bfnrtu after a backslash");
        }
    }
    *o = 0;
    *len = (size_t)(o - *str);
    r->p = p + 1;
    return 0;
}

static int json_number(JsonReader *r, Json *v) {
    char *p = r->p, *digits;
    int neg = *p == '-', whole = 1, fits = 1;
    uint64_t u = 0;
    p += neg;
    if (!isdigit((unsigned char)*p)) return json_fail(r, p, neg ? "expected a digit after '-'" : "expected a value");
    for (digits = p; isdigit((unsigned char)*p); p++) {
        unsigned d = (unsigned)(*p - '0');
        fits &= u <= ((uint64_t)INT64_MAX - d) / 10;        // -2^63 itself counts as too large: no file needs it
        u = u * 10 + d;
    }
    if (*digits == '0' && p - digits > 1) return json_fail(r, digits, "expected no leading zero");
    if (*p == '.') {
        whole = 0;
        if (!isdigit((unsigned char)*++p)) return json_fail(r, p, "expected a digit after '.'");
        while (isdigit((unsigned char)*p)) p++;
    }
    if (*p == 'e' || *p == 'E') {
        whole = 0; p++;
        if (*p == '+' || *p == '-') p++;
        if (!isdigit((unsigned char)*p)) return json_fail(r, p, "expected a digit in the exponent");
        while (isdigit((unsigned char)*p)) p++;
    }
    v->type = JSON_NUMBER;
    v->is_int = whole && fits;
    if (v->is_int) { v->i = neg ? -(int64_t)u : (int64_t)u; v->num = (double)v->i; }
    else v->num = strtod(r->p, NULL);                       // the grammar above is narrower than strtod's, so it stops at p too
    if (!isfinite(v->num)) return json_fail(r, r->p, "expected a number a double can hold");
    r->p = p;
    return 0;
}

static int json_value(JsonReader *r, Json *v);

static int json_container(JsonReader *r, Json *v) {         // r->p stands on '[' or '{'
    int object = *r->p++ == '{';
    char close = object ? '}' : ']';
    size_t base = arrlenu(r->stack), len;
    if (++r->depth > JSON_DEPTH) return json_fail(r, r->p - 1, "expected at most 64 nested arrays and objects");
    json_space(r);
    while (*r->p != close) {
        JsonSlot slot = { .key = NULL };
        if (object) {
            if (*r->p != '"') return json_fail(r, r->p, "expected a key");
            if (json_string(r, &slot.key, &len)) return -1;
            json_space(r);
            if (*r->p != ':') return json_fail(r, r->p, "expected ':' after a key");
            r->p++;
            json_space(r);
        }
        if (json_value(r, &slot.value)) return -1;
        arrput(r->stack, slot);
        json_space(r);
        if (*r->p == close) break;
        if (*r->p != ',') return json_fail(r, r->p, object ? "expected ',' or '}'" : "expected ',' or ']'");
        r->p++;
        json_space(r);
        if (*r->p == close) return json_fail(r, r->p, "expected a value after ','");
    }
    r->p++;
    r->depth--;
    size_t n = arrlenu(r->stack) - base;
    if (n > INT_MAX) return json_fail(r, r->p - 1, "expected fewer than 2^31 values");
    v->type = object ? JSON_OBJECT : JSON_ARRAY;
    v->n = (int)n;
    v->item = json_alloc(r, n * sizeof(Json));
    v->key = object ? json_alloc(r, n * sizeof(char *)) : NULL;
    for (size_t i = 0; i < n; i++) {
        v->item[i] = r->stack[base + i].value;
        if (object) v->key[i] = r->stack[base + i].key;
    }
    arrsetlen(r->stack, base);
    return 0;
}

static int json_value(JsonReader *r, Json *v) {
    *v = (Json){ .type = JSON_NULL };
    switch (*r->p) {
    case '{': case '[': return json_container(r, v);
    case '"': v->type = JSON_STRING; return json_string(r, &v->str, &v->len);
    case 'n': if (!strncmp(r->p, "null", 4)) { r->p += 4; return 0; } break;
    case 't': if (!strncmp(r->p, "true", 4)) { r->p += 4; v->type = JSON_BOOL; v->num = (double)(v->i = 1); return 0; } break;
    case 'f': if (!strncmp(r->p, "false", 5)) { r->p += 5; v->type = JSON_BOOL; return 0; } break;
    default: return json_number(r, v);
    }
    return json_fail(r, r->p, "expected null, true or false");
}

static void json_free(Json *j) {
    JsonDoc *d = (JsonDoc *)j;
    if (!d) return;
    for (size_t i = 0; i < arrlenu(d->block); i++) free(d->block[i]);
    arrfree(d->block);
    free(d->text);
    free(d);
}

// NULL, with the place and the reason in err, when the text is malformed.
static Json *json_parse(const char *text, size_t n, char err[256]) {
    JsonDoc *d = xcalloc(1, sizeof *d);
    JsonReader r = { .doc = d, .err = err };
    d->text = xmalloc(n + 1);
    memcpy(d->text, text, n);
    d->text[n] = 0;
    r.p = d->text; r.end = d->text + n;
    json_space(&r);
    int bad = json_value(&r, &d->root);
    if (!bad) {
        json_space(&r);
        if (r.p < r.end) bad = json_fail(&r, r.p, "expected nothing more");
    }
    arrfree(r.stack);
    if (!bad) return &d->root;
    json_free(&d->root);
    return NULL;
}

// NULL when absent or obj is no object. Linear: a big object is walked, not searched
static const Json *json_get(const Json *obj, const char *key) {
    if (!obj || obj->type != JSON_OBJECT) return NULL;
    for (int i = obj->n - 1; i >= 0; i--) if (!strcmp(obj->key[i], key)) return &obj->item[i];
    return NULL;
}

static int utf8_length(const char *s, size_t n) {       // bytes of the well-formed character s begins with, 0: none
    const unsigned char *p = (const unsigned char *)s;
    int k = n == 0 ? 0 : p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0;
    if ((size_t)k > n) return 0;
    for (int i = 1; i < k; i++) if ((p[i] & 0xc0) != 0x80) return 0;
    if (k == 3 && ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] >= 0xa0))) return 0;      // overlong; a surrogate
    if (k == 4 && ((p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] >= 0x90))) return 0;      // overlong; beyond U+10FFFF
    return k;
}

// s as a JSON string, quotes included; broken UTF-8 becomes U+FFFD
static void json_escape(FILE *f, const char *s, size_t n) {
    putc('"', f);
    for (size_t i = 0; i < n; ) {
        int k = utf8_length(s + i, n - i), c = (unsigned char)s[i];
        if (c == '"' || c == '\\') fprintf(f, "\\%c", c);
        else if (c == '\n') fputs("\\n", f);
        else if (c < ' ' || c == 127) fprintf(f, "\\u%04x", (unsigned)c);
        else if (k) fwrite(s + i, 1, (size_t)k, f);
        else fputs("\\ufffd", f);
        i += k ? (size_t)k : 1;
    }
    putc('"', f);
}

KV_PRINTF(2, 3) static int fault(char err[512], const char *fmt, ...) {        // one line into err -> -1
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, 512, fmt, ap);
    va_end(ap);
    return -1;
}

// ==================================================================================================== 20 CHECKPOINTS
// ---- SAFETENSORS: u64 length of the header, the header (JSON: name -> dtype, shape, data_offsets), then the data.
// The file is mapped, never read whole. A file that passes safetensors_open can be used without further checks: every
// tensor lies inside it, has exactly the bytes of its shape and shares none with another. Gaps are tolerated.
enum { DT_OTHER = -1, DT_QUANTIZED = -2 };      // what a SafeTensor may be besides DT_*
enum { SAFE_DIMS = 8, SAFE_HEADER = 100 << 20 };

typedef struct {
    const char *name, *type;    // type as written: "BF16"
    int dtype, n_dim, used;     // DT_*, DT_OTHER or DT_QUANTIZED; used: safetensors_find has returned it
    int64_t dim[SAFE_DIMS];
    const void *data; size_t bytes;     // data is aligned for its dtype once safetensors_find has returned it
} SafeTensor;

struct SafeFile {
    char *path, *map; size_t size;      // the whole file
    Json *header;                       // owns the names
    SafeTensor *tensor; int n;          // sorted by name
    void **copy;                        // tensors that lay at odd addresses
};

static const struct { const char *name; int bits, dtype; } safe_types[] = {
    { "F32", 32, DT_F32 }, { "F16", 16, DT_F16 }, { "BF16", 16, DT_BF16 },
    { "F64", 64, DT_OTHER }, { "C64", 64, DT_OTHER }, { "I64", 64, DT_OTHER }, { "U64", 64, DT_OTHER }, { "I32", 32, DT_OTHER },
    { "U32", 32, DT_OTHER }, { "I16", 16, DT_OTHER }, { "U16", 16, DT_OTHER }, { "BOOL", 8, DT_OTHER },
    { "I8", 8, DT_QUANTIZED }, { "U8", 8, DT_QUANTIZED }, { "F8_E4M3", 8, DT_QUANTIZED }, { "F8_E5M2", 8, DT_QUANTIZED },
    { "F8_E8M0", 8, DT_QUANTIZED }, { "F8_E4M3FNUZ", 8, DT_QUANTIZED }, { "F8_E5M2FNUZ", 8, DT_QUANTIZED },
    { "F4", 4, DT_QUANTIZED }, { "F6_E2M3", 6, DT_QUANTIZED }, { "F6_E3M2", 6, DT_QUANTIZED }, { NULL, 0, 0 } };

static void safetensors_close(SafeFile *f) {
    if (!f) return;
    for (size_t i = 0; i < arrlenu(f->copy); i++) free(f->copy[i]);
    arrfree(f->copy);
    if (f->map) munmap(f->map, f->size);
    json_free(f->header);
    free(f->tensor);
    free(f->path);
    free(f);
}

static int safe_by_name(const void *a, const void *b) {
    return strcmp(((const SafeTensor *)a)->name, ((const SafeTensor *)b)->name);
}
// of pointers; an empty tensor before the one that starts where it stands
static int safe_by_place(const void *a, const void *b) {
    const SafeTensor *x = *(SafeTensor *const *)a, *y = *(SafeTensor *const *)b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    return p != q ? (p > q) - (p < q) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

// One header entry -> t. data: where the file's data begin; size: how many bytes of them there are.
static int safe_entry(SafeTensor *t, const char *name, const Json *v, const char *data, size_t size, char err[512]) {
    const Json *type = json_get(v, "dtype"), *shape = json_get(v, "shape"), *place = json_get(v, "data_offsets");
    if (!type || type->type != JSON_STRING || !shape || shape->type != JSON_ARRAY || !place || place->type != JSON_ARRAY
        || place->n != 2 || !place->item[0].is_int || !place->item[1].is_int)
        return fault(err, "tensor %.200s: expected a dtype, a shape and two data_offsets", name);
    int k = 0;
    while (safe_types[k].name && strcmp(safe_types[k].name, type->str)) k++;
    if (!safe_types[k].name) return fault(err, "tensor %.200s: unknown dtype \"%.40s\"", name, type->str);
    *t = (SafeTensor){ .name = name, .type = safe_types[k].name, .dtype = safe_types[k].dtype, .n_dim = shape->n };
    if (shape->n > SAFE_DIMS)
        return fault(err, "tensor %.200s: expected at most %d dimensions, found %d", name, SAFE_DIMS, shape->n);
    uint64_t count = 1, bits;
    for (int i = 0; i < shape->n; i++) {
        const Json *d = &shape->item[i];
        if (d->type != JSON_NUMBER || !d->is_int || d->i < 0)
            return fault(err, "tensor %.200s: dimension %d is no whole number >= 0", name, i);
        t->dim[i] = d->i;
        if (__builtin_mul_overflow(count, (uint64_t)d->i, &count))
            return fault(err, "tensor %.200s: the product of its dimensions overflows", name);
    }
    if (__builtin_mul_overflow(count, (uint64_t)safe_types[k].bits, &bits))
        return fault(err, "tensor %.200s: the product of its dimensions overflows", name);
    int64_t begin = place->item[0].i, end = place->item[1].i;
    if (begin < 0 || end < begin || (uint64_t)end > size)
        return fault(err, "tensor %.200s: data_offsets [%lld,%lld) lie outside the %zu bytes of data (is the file truncated?)",
                     name, (long long)begin, (long long)end, size);
    if (bits % 8 || (uint64_t)(end - begin) != bits / 8)
        return fault(err, "tensor %.200s: its shape needs %llu bytes, its data_offsets span %lld", name,
                     (unsigned long long)(bits + 7) / 8, (long long)(end - begin));
    t->data = data + begin;
    t->bytes = (size_t)(end - begin);
    return 0;
}

static int safe_header(SafeFile *f, size_t len, char err[512]) {        // f->map, size and a header of len bytes -> f->tensor
    char why[256];
    f->header = json_parse(f->map + 8, len, why);
    if (!f->header) return fault(err, "the header is not JSON: %s", why);
    if (f->header->type != JSON_OBJECT) return fault(err, "the header is no JSON object");
    f->tensor = xcalloc((size_t)f->header->n, sizeof *f->tensor);
    for (int i = 0; i < f->header->n; i++) {
        const Json *v = &f->header->item[i];
        if (!strcmp(f->header->key[i], "__metadata__")) {
            if (v->type != JSON_OBJECT) return fault(err, "__metadata__ is no JSON object");
            for (int j = 0; j < v->n; j++)
                if (v->item[j].type != JSON_STRING) return fault(err, "__metadata__: %.200s is no string", v->key[j]);
        } else if (safe_entry(&f->tensor[f->n++], f->header->key[i], v, f->map + 8 + len, f->size - 8 - len, err)) return -1;
    }
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name);
    for (int i = 1; i < f->n; i++)
        if (!strcmp(f->tensor[i].name, f->tensor[i - 1].name))
            return fault(err, "tensor %.200s stands in the header twice", f->tensor[i].name);
    const char *end = f->map + 8 + len;                 // of the tensors so far: they lie side by side and fill the file
    SafeTensor **order = xmalloc((size_t)f->n * sizeof *order), *clash = NULL, *with = NULL;
    for (int i = 0; i < f->n; i++) order[i] = &f->tensor[i];
    qsort(order, (size_t)f->n, sizeof *order, safe_by_place);
    for (int i = 1; i < f->n && !clash; i++)            // ordered by place, only neighbours can be the first to overlap
        if ((const char *)order[i - 1]->data + order[i - 1]->bytes > (const char *)order[i]->data) {
            clash = order[i];
            with = order[i - 1];
        }
    long long gap = 0;
    for (int i = 0; i < f->n && !clash && !gap; i++) {
        gap = (const char *)order[i]->data - end;
        end = (const char *)order[i]->data + order[i]->bytes;
    }
    free(order);
    if (clash) return fault(err, "tensors %.200s and %.200s overlap", with->name, clash->name);
    if (!gap) gap = f->map + f->size - end;
    if (gap) return fault(err, "%lld bytes of data belong to no tensor: the header's length or its data_offsets are wrong", gap);
    return 0;
}

static int safe_map(SafeFile *f, char err[512]) {
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0) return fault(err, "%s", strerror(errno));
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size < 8) {
        close(fd);
        return fault(err, "not a safetensors file: expected a regular file of at least 8 bytes");
    }
    f->size = (size_t)st.st_size;
    void *p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    int why = errno;
    close(fd);
    if (p == MAP_FAILED) return fault(err, "cannot be mapped: %s", strerror(why));
    f->map = p;
    return 0;
}

// NULL, and the reason without the path in err, when the file is missing or broken.
static SafeFile *safetensors_open(const char *path, char err[512]) {
    SafeFile *f = xcalloc(1, sizeof *f);
    uint64_t len = 0;
    f->path = xmalloc(strlen(path) + 1);
    strcpy(f->path, path);
    int bad = safe_map(f, err);
    if (!bad) {
        for (int i = 7; i >= 0; i--) len = len << 8 | (unsigned char)f->map[i];
        if (!memcmp(f->map, "version ", 8))
            bad = fault(err, "only a git-lfs pointer, not the weights themselves (git lfs pull fetches them)");
        else if (len > SAFE_HEADER)
            bad = fault(err, "not a safetensors file: a header of %llu bytes, the limit is %d", (unsigned long long)len, SAFE_HEADER);
        else if (len > f->size - 8)
            bad = fault(err, "truncated: a header of %llu bytes in a file of %zu", (unsigned long long)len, f->size);
        else bad = safe_header(f, (size_t)len, err);
    }
    if (!bad) return f;
    safetensors_close(f);
    return NULL;
}

static SafeTensor *safetensors_find(SafeFile *f, const char *name) {     // NULL: no such tensor
    SafeTensor key = { .name = name }, *t = f->n ? bsearch(&key, f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name) : NULL;
    if (!t) return NULL;
    if (!t->used && t->dtype >= 0 && (uintptr_t)t->data % dtype_size(t->dtype)) {        // legal in the format, not in C
        void *p = xmalloc(t->bytes);
        memcpy(p, t->data, t->bytes);
        t->data = p;
        arrput(f->copy, p);
    }
    t->used = 1;
    return t;
}

static const char *safetensors_meta(const SafeFile *f, const char *key) {       // a string of __metadata__, or NULL
    const Json *v = json_get(json_get(f->header, "__metadata__"), key);
    return v ? v->str : NULL;
}

// ---- CONFIG. The reader keeps the first complaint and goes on with defaults, so that everything can be freed before
// die() is called; no value read after a complaint is ever used.
typedef struct { const char *file; char err[512]; } ConfigReader;
enum { ABSENT_IS_ERROR = -1000000 };            // as default: the key must be there

static const struct { const char *type, *arch; } families[] = {
    { "llama", "LlamaForCausalLM" }, { "mistral", "MistralForCausalLM" },
    { "qwen2", "Qwen2ForCausalLM" }, { "qwen3", "Qwen3ForCausalLM" }, { NULL, NULL } };
#define FAMILIES "supported: llama (LlamaForCausalLM), mistral (MistralForCausalLM), qwen2 (Qwen2ForCausalLM), " \
                 "qwen3 (Qwen3ForCausalLM)"

KV_PRINTF(2, 3) static void config_fail(ConfigReader *r, const char *fmt, ...) {
    if (r->err[0]) return;
    va_list ap;
    int n = snprintf(r->err, sizeof r->err, "%s: ", r->file);
    if (n < 0 || n >= (int)sizeof r->err) return;
    va_start(ap, fmt);
    vsnprintf(r->err + n, sizeof r->err - (size_t)n, fmt, ap);
    va_end(ap);
}

static const char *json_show(const Json *v, char buf[64]) {     // what was found, for a message
    static const char *const what[] = { "null", "a bool", "", "", "an array", "an object" };
    if (v->type == JSON_NUMBER && v->is_int) snprintf(buf, 64, "%lld", (long long)v->i);
    else if (v->type == JSON_NUMBER) snprintf(buf, 64, "%g", v->num);
    else if (v->type == JSON_STRING) snprintf(buf, 64, "\"%.50s\"", v->str);
    else snprintf(buf, 64, "%s", what[v->type]);
    return buf;
}

static const Json *config_key(const Json *o, const char *key) {         // null counts as absent
    const Json *v = json_get(o, key);
    return v && v->type != JSON_NULL ? v : NULL;
}
static int config_int(ConfigReader *r, const Json *o, const char *key, int def, int lo, int hi) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v && def == ABSENT_IS_ERROR) config_fail(r, "%s is missing", key);
    if (!v) return def;
    if (v->type == JSON_NUMBER && v->is_int && v->i >= lo && v->i <= hi) return (int)v->i;
    config_fail(r, "%s: expected a whole number from %d to %d, found %s", key, lo, hi, json_show(v, buf));
    return def;
}
static double config_real(ConfigReader *r, const Json *o, const char *key, double def, double lo, double hi) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v && def == ABSENT_IS_ERROR) config_fail(r, "%s is missing", key);
    if (!v) return def;
    if (v->type == JSON_NUMBER && v->num >= lo && v->num <= hi) return v->num;
    config_fail(r, "%s: expected a number from %g to %g, found %s", key, lo, hi, json_show(v, buf));
    return def;
}
static int config_flag(ConfigReader *r, const Json *o, const char *key, int def) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v) return def;
    if (v->type == JSON_BOOL) return (int)v->i;
    config_fail(r, "%s: expected true or false, found %s", key, json_show(v, buf));
    return def;
}
static const char *config_str(ConfigReader *r, const Json *o, const char *key, const char *def) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v) return def;
    if (v->type == JSON_STRING) return v->str;
    config_fail(r, "%s: expected a string, found %s", key, json_show(v, buf));
    return def;
}

static void config_family(ConfigReader *r, Config *c, const Json *o) {
    const Json *list = config_key(o, "architectures");
    const char *type = config_str(r, o, "model_type", ""), *arch = "";
    int k = 0;
    if (list && list->type == JSON_ARRAY && list->n && list->item[0].type == JSON_STRING) arch = list->item[0].str;
    else if (list) config_fail(r, "architectures: expected a list of names");
    if (!strncmp(type, "gemma3", 6) || !strncmp(arch, "Gemma3", 6))
        config_fail(r, "Gemma-3 is not supported (its norms, GeGLU and second RoPE base are not written); " FAMILIES);
    if (!*type && !*arch) config_fail(r, "model_type and architectures are missing: not a model's config; " FAMILIES);
    while (families[k].type && strcmp(*type ? type : arch, *type ? families[k].type : families[k].arch)) k++;
    if (!families[k].type || (*arch && strcmp(arch, families[k].arch)))
        config_fail(r, "model_type \"%.60s\", architecture \"%.60s\" is not supported; " FAMILIES, type, arch);
    else snprintf(c->model_type, sizeof c->model_type, "%s", families[k].type);
    if (config_key(o, "quantization_config") || config_key(o, "compression_config")) {
        const char *how = config_str(r, config_key(o, "quantization_config"), "quant_method", "?");
        config_fail(r, "quantized checkpoint (quantization_config, %.40s): kvcomp reads F32, F16 and BF16 weights; "
                       "take the unquantized model", how);
    }
    const char *act = config_str(r, o, "hidden_act", config_str(r, o, "hidden_activation", "silu"));
    if (strcmp(act, "silu") && strcmp(act, "swish")) config_fail(r, "hidden_act: expected \"silu\", found \"%.40s\"", act);
}

static void config_sizes(ConfigReader *r, Config *c, const Json *o) {
    c->C = config_int(r, o, "hidden_size", ABSENT_IS_ERROR, 1, 1 << 18);
    c->F = config_int(r, o, "intermediate_size", ABSENT_IS_ERROR, 1, 1 << 20);
    c->L = config_int(r, o, "num_hidden_layers", ABSENT_IS_ERROR, 1, 1024);
    c->H = config_int(r, o, "num_attention_heads", ABSENT_IS_ERROR, 1, 1024);
    c->G = config_int(r, o, "num_key_value_heads", c->H, 1, 1024);
    c->V = config_int(r, o, "vocab_size", ABSENT_IS_ERROR, 1, 1 << 22);
    c->D = config_int(r, o, "head_dim", 0, 2, 1024);
    c->max_pos = config_int(r, o, "max_position_embeddings", 2048, 1, 1 << 30);
    c->eps = (float)config_real(r, o, "rms_norm_eps", 1e-6, 1e-12, 1);
    c->tied = config_flag(r, o, "tie_word_embeddings", 0);
    c->qk_norm = !strcmp(c->model_type, "qwen3");
    if (r->err[0]) return;
    if (!c->D) {
        if (c->C % c->H)
            config_fail(r, "hidden_size %d is no multiple of num_attention_heads %d, and there is no head_dim", c->C, c->H);
        c->D = c->C / c->H;
    }
    if (c->H % c->G) config_fail(r, "num_attention_heads %d is no multiple of num_key_value_heads %d", c->H, c->G);
    if (c->H / c->G > MAX_R) config_fail(r, "num_attention_heads %d, num_key_value_heads %d: expected at most %d query heads a KV head", c->H, c->G, MAX_R);
    if (c->D % 2 || c->D < 2 || c->D > 1024)
        config_fail(r, "head_dim %d: expected an even number from 2 to 1024 (RoPE turns pairs)", c->D);
    const char *dtype = config_str(r, o, config_key(o, "dtype") ? "dtype" : "torch_dtype", "bfloat16");
    // weights_load looks at the tensors
    c->dtype = !strcmp(dtype, "float32") ? DT_F32 : !strcmp(dtype, "float16") ? DT_F16 : DT_BF16;
}

// The sliding window: Mistral all layers; Qwen from max_window_layers on if use_sliding_window, or as layer_types says.
static void config_window(ConfigReader *r, Config *c, const Json *o) {
    int qwen = !strncmp(c->model_type, "qwen", 4), mistral = !strcmp(c->model_type, "mistral"), any = 0;
    const Json *types = qwen ? config_key(o, "layer_types") : NULL;
    if (r->err[0] || !(mistral || qwen)) return;
    int use = mistral || config_flag(r, o, "use_sliding_window", 0);
    int from = qwen ? config_int(r, o, "max_window_layers", 28, 0, 1 << 30) : 0;
    // absent: the classes' default; null: none
    int window = config_int(r, o, "sliding_window", use && !json_get(o, "sliding_window") ? 4096 : 0, 1, 1 << 30);
    if (types && (types->type != JSON_ARRAY || types->n != c->L)) {
        config_fail(r, "layer_types: expected a list of %d names, one a layer", c->L);
        return;
    }
    c->windowed = xcalloc((size_t)c->L, 1);
    for (int l = 0; l < c->L; l++) {
        const Json *t = types ? &types->item[l] : NULL;
        char buf[64];
        if (t && (t->type != JSON_STRING || (strcmp(t->str, "full_attention") && strcmp(t->str, "sliding_attention"))))
            config_fail(r, "layer_types[%d]: expected full_attention or sliding_attention, found %s", l, json_show(t, buf));
        else c->windowed[l] = t ? t->str[0] == 's' : use && window && l >= from;
        any |= c->windowed[l];
    }
    if (any && !window) config_fail(r, "layer_types names sliding_attention layers, but sliding_window is missing");
    if (any) c->window = window;
    else { free(c->windowed); c->windowed = NULL; }
}

static int json_same(const Json *a, const Json *b) {        // the same numbers and strings under the same keys
    if (a->type != b->type || a->n != b->n || a->num != b->num || a->len != b->len || (a->len && memcmp(a->str, b->str, a->len)))
        return 0;
    for (int i = 0; i < a->n; i++) {
        const Json *y = a->type == JSON_OBJECT ? json_get(b, a->key[i]) : &b->item[i];
        if (!y || !json_same(&a->item[i], y)) return 0;
    }
    return 1;
}

// RoPE: old form rope_theta + rope_scaling{type|rope_type}; new form rope_parameters{rope_theta, rope_type}, perhaps one per
// layer type. A rope_type that is not understood is refused: ignoring it gives fluent nonsense after a few thousand tokens.
static void config_rope(ConfigReader *r, Config *c, const Json *o) {
    const Json *p = config_key(o, "rope_scaling"), *sub;
    char buf[64];
    const char *key = "rope_scaling";
    if (!p || (p->type == JSON_OBJECT && !p->n)) p = config_key(o, key = "rope_parameters");
    if (p && p->type != JSON_OBJECT) config_fail(r, "%s: expected an object, found %s", key, json_show(p, buf));
    if ((sub = config_key(p, "full_attention"))) {
        const Json *sliding = config_key(p, "sliding_attention");
        if (sliding && !json_same(sub, sliding))
            config_fail(r, "rope_parameters: full_attention and sliding_attention differ, which is not supported");
        p = sub;
    }
    const char *type = config_str(r, p, "rope_type", config_str(r, p, "type", "default"));
    c->theta = config_real(r, p, "rope_theta", config_real(r, o, "rope_theta", 0, 1.5, 1e12), 1.5, 1e12);
    if (c->theta == 0) {
        c->theta = 10000;
        if (!r->err[0]) fprintf(stderr, "kvcomp: %s: no rope_theta, 10000 is used\n", r->file);
    }
    if (config_real(r, p, "partial_rotary_factor", config_real(r, o, "partial_rotary_factor", 1, 0, 1), 0, 1) != 1)
        config_fail(r, "partial_rotary_factor: only 1 is supported");
    c->factor = 1; c->low_freq = 1; c->high_freq = 4; c->beta_fast = 32; c->beta_slow = 1;
    c->orig_pos = config_int(r, p, "original_max_position_embeddings", c->max_pos, 1, 1 << 30);
    c->orig_pos = config_int(r, o, "original_max_position_embeddings", c->orig_pos, 1, 1 << 30);
    if (!strcmp(type, "default")) return;
    if (!strcmp(type, "linear")) c->rope_type = ROPE_LINEAR;
    else if (!strcmp(type, "llama3")) c->rope_type = ROPE_LLAMA3;
    else if (!strcmp(type, "yarn")) c->rope_type = ROPE_YARN;
    else config_fail(r, "rope_type \"%.40s\" is not supported; supported: default, linear, llama3, yarn", type);
    c->factor = config_real(r, p, "factor", ABSENT_IS_ERROR, 1, 1e6);
    if (c->rope_type == ROPE_LLAMA3) {
        c->low_freq = config_real(r, p, "low_freq_factor", ABSENT_IS_ERROR, 1e-6, 1e6);
        c->high_freq = config_real(r, p, "high_freq_factor", ABSENT_IS_ERROR, 1e-6, 1e6);
        if (c->low_freq >= c->high_freq)
            config_fail(r, "low_freq_factor %g: expected less than high_freq_factor %g", c->low_freq, c->high_freq);
    }
    if (c->rope_type == ROPE_YARN) {
        c->beta_fast = config_real(r, p, "beta_fast", 32, 1e-6, 1e6);
        c->beta_slow = config_real(r, p, "beta_slow", 1, 1e-6, 1e6);
        c->attn_factor = config_real(r, p, "attention_factor", 0, 1e-6, 1e6);
        if (c->beta_fast < c->beta_slow)
            config_fail(r, "beta_fast %g: expected at least beta_slow %g", c->beta_fast, c->beta_slow);
        if (config_key(p, "mscale") || config_key(p, "mscale_all_dim")) config_fail(r, "yarn with mscale is not supported");
        if (!config_flag(r, p, "truncate", 1)) config_fail(r, "yarn with truncate false is not supported");
    }
}

static void config_eos(ConfigReader *r, Config *c, const Json *o) {     // adds the eos ids of o: one number or a list
    const Json *v = config_key(o, "eos_token_id");
    char buf[64];
    for (int i = 0; v && i < (v->type == JSON_ARRAY ? v->n : 1); i++) {
        const Json *e = v->type == JSON_ARRAY ? &v->item[i] : v;
        if (e->type != JSON_NUMBER || !e->is_int) config_fail(r, "eos_token_id: expected whole numbers, found %s", json_show(e, buf));
        int known = e->i < 0 || e->i >= c->V;           // an id without an embedding is never generated
        for (int k = 0; k < c->n_eos; k++) known |= c->eos[k] == e->i;
        if (known) continue;
        if (c->n_eos == (int)(sizeof c->eos / sizeof *c->eos)) config_fail(r, "eos_token_id: more than 8 different ids");
        else c->eos[c->n_eos++] = (int)e->i;
    }
}

// What else may lie in a folder that is not ours: the file's name and what to do go into err. 0: nothing known was found.
static int foreign_files(const char *dir, char err[512]) {
    DIR *d = opendir(dir);
    const char *what = NULL;
    char found[256] = "";
    for (struct dirent *e; d && (e = readdir(d)); ) {
        size_t n = strlen(e->d_name);
        const char *w = NULL;
        if (!strncmp(e->d_name, "pytorch_model", 13))
            w = "pickled weights, which are not read: in Python, AutoModelForCausalLM.from_pretrained(IN).save_pretrained(OUT) "
                "writes safetensors";
        else if (!strncmp(e->d_name, "consolidated.", 13))
            w = "weights in the vendor's own layout (interleaved RoPE), which is not read: fetch the Hugging Face files, "
                "config.json and model*.safetensors";
        else if (n > 5 && !strcmp(e->d_name + n - 5, ".gguf"))
            w = "a GGUF file, which is not read: fetch the Hugging Face folder it was made from";
        if (w && (!found[0] || strcmp(e->d_name, found) < 0)) {         // readdir has no order
            snprintf(found, sizeof found, "%s", e->d_name);
            what = w;
        }
    }
    if (d) closedir(d);
    if (what) snprintf(err, 512, "%.200s: only %.100s: %s", dir, found, what);
    return what != NULL;
}

// dir/name parsed. NULL with err "" when it is absent and not needed.
static Json *config_file(const char *dir, const char *name, int needed, char err[512]) {
    char path[1400], why[256], *text = NULL;
    size_t n;
    struct stat st;
    Json *j = NULL;
    err[0] = 0;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (!needed && !file_exists(path)) return NULL;
    if (stat(dir, &st)) fault(err, "%.300s: no such folder", dir);
    else if (!S_ISDIR(st.st_mode))
        fault(err, "%.300s: expected a Hugging Face folder (config.json, model.safetensors, tokenizer.json), found a file", dir);
    else if (file_exists(path) || !foreign_files(dir, err)) text = read_file(path, &n, why);
    if (err[0]) return NULL;
    if (text) j = json_parse(text, n, why);
    if (!text) fault(err, "%s", why);
    else if (!j) fault(err, "%.220s/%s: %s", dir, name, why);
    else if (j->type != JSON_OBJECT) fault(err, "%.300s/%s: expected a JSON object", dir, name);
    free(text);
    if (!err[0]) return j;
    json_free(j);
    return NULL;
}

static void config_read(ConfigReader *r, Config *c, const Json *o) {
    config_family(r, c, o);
    config_sizes(r, c, o);
    config_window(r, c, o);
    config_rope(r, c, o);
    c->bos = config_int(r, o, "bos_token_id", -1, -1, INT_MAX);
    if (c->bos >= c->V) c->bos = -1;
    config_eos(r, c, o);
}

static void config_free(Config *c) { if (c) free(c->windowed); free(c); }

Config *config_load(const char *dir) {
    Config *c = xcalloc(1, sizeof *c);
    char file[400];
    ConfigReader r = { .file = file };
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    if (n >= sizeof c->dir) {
        config_free(c);
        die(EXIT_MODEL, "%.60s...: the path is longer than %zu bytes", dir, sizeof c->dir - 1);
    }
    memcpy(c->dir, dir, n);
    Json *o = config_file(c->dir, "config.json", 1, r.err), *g = NULL;
    snprintf(file, sizeof file, "%.300s/config.json", c->dir);
    if (!r.err[0]) config_read(&r, c, o);
    if (!r.err[0] && (g = config_file(c->dir, "generation_config.json", 0, r.err))) {
        snprintf(file, sizeof file, "%.300s/generation_config.json", c->dir);
        config_eos(&r, c, g);
    }
    json_free(o);
    json_free(g);
    if (r.err[0]) { config_free(c); die(EXIT_MODEL, "%s", r.err); }
    return c;
}

static const struct { const char *name, *type; Config c; } synthetic_shapes[] = {
    { "llama-3.2-1b", "llama", { .L = 16, .H = 32, .G = 8, .D = 64, .C = 2048, .F = 8192, .V = 128256, .tied = 1,
                                 .eps = 1e-5f, .theta = 5e5, .rope_type = ROPE_LLAMA3, .factor = 32 } },
    { "llama-3.1-8b", "llama", { .L = 32, .H = 32, .G = 8, .D = 128, .C = 4096, .F = 14336, .V = 128256,
                                 .eps = 1e-5f, .theta = 5e5, .rope_type = ROPE_LLAMA3, .factor = 8 } },
    { "qwen3-4b",     "qwen3", { .L = 36, .H = 32, .G = 8, .D = 128, .C = 2560, .F = 9728, .V = 151936, .tied = 1, .qk_norm = 1,
                                 .eps = 1e-6f, .theta = 1e6, .factor = 1 } },
    { "tiny",         "llama", { .L = 8, .H = 8, .G = 4, .D = 64, .C = 512, .F = 1408, .V = 8192, .tied = 1,
                                 .eps = 1e-5f, .theta = 1e4, .factor = 1 } } };
enum { N_SHAPES = sizeof synthetic_shapes / sizeof *synthetic_shapes };

// A config without a checkpoint, for speed: a known name, or sizes that replace those of llama-3.2-1b.
Config *config_synthetic(const char *shape) {
    Config c;
    int k = 0;
    while (k < N_SHAPES && strcmp(shape, synthetic_shapes[k].name)) k++;
    c = synthetic_shapes[k < N_SHAPES ? k : 0].c;
    snprintf(c.model_type, sizeof c.model_type, "%s", synthetic_shapes[k < N_SHAPES ? k : 0].type);
    c.max_pos = 131072; c.orig_pos = 8192; c.bos = -1; c.dtype = DT_BF16;
    c.low_freq = 1; c.high_freq = 4; c.beta_fast = 32; c.beta_slow = 1;
    snprintf(c.dir, sizeof c.dir, "synthetic:%s", shape);
    const struct { char letter; int *at, max; } size[] = {
        { 'L', &c.L, 1024 }, { 'H', &c.H, 1024 }, { 'G', &c.G, 1024 }, { 'D', &c.D, 1024 }, { 'C', &c.C, 1 << 18 },
        { 'F', &c.F, 1 << 20 }, { 'V', &c.V, 1 << 22 } };
    const size_t sizes = sizeof size / sizeof *size;
    for (const char *p = shape; k == N_SHAPES; p++) {
        size_t i = 0;
        char *end = (char *)p;
        while (i < sizes && size[i].letter != *p) i++;
        long v = i < sizes && isdigit((unsigned char)p[1]) ? strtol(p + 1, &end, 10) : 0;
        if (v < 1 || v > size[i].max || (*end && *end != ','))
            die(EXIT_USAGE, "shape \"%.60s\": expected llama-3.2-1b, llama-3.1-8b, qwen3-4b, tiny or sizes such as "
                            "L16,H32,G8,D64,C2048,F8192,V128256", shape);
        *size[i].at = (int)v;
        p = end;
        if (!*p) break;
    }
    if (c.H % c.G) die(EXIT_USAGE, "shape \"%.60s\": H %d is no multiple of G %d", shape, c.H, c.G);
    if (c.H / c.G > MAX_R) die(EXIT_USAGE, "shape \"%.60s\": H %d, G %d: expected at most %d query heads a KV head", shape, c.H, c.G, MAX_R);
    if (c.D % 2) die(EXIT_USAGE, "shape \"%.60s\": D %d is odd (RoPE turns pairs)", shape, c.D);
    Config *out = xmalloc(sizeof *out);
    *out = c;
    return out;
}

// ---- WEIGHTS. One table names every tensor, its sizes and when it must be there: loading, making and printing walk it.
// optional: taken if the file has it; the last two: needed by that family
enum { TENSOR_NEEDED, TENSOR_OPTIONAL, TENSOR_QWEN2, TENSOR_QK_NORM };

// sizes: letters of the legend, Q = H*D, K = G*D, 1 = a vector
static const struct { const char *name; size_t at; char rows, cols; int when; } layer_tensors[] = {
    { "input_layernorm.weight",          offsetof(Layer, attn_norm), '1', 'C', TENSOR_NEEDED },
    { "self_attn.q_proj.weight",         offsetof(Layer, wq),        'Q', 'C', TENSOR_NEEDED },
    { "self_attn.k_proj.weight",         offsetof(Layer, wk),        'K', 'C', TENSOR_NEEDED },
    { "self_attn.v_proj.weight",         offsetof(Layer, wv),        'K', 'C', TENSOR_NEEDED },
    { "self_attn.q_proj.bias",           offsetof(Layer, bq),        '1', 'Q', TENSOR_QWEN2 },
    { "self_attn.k_proj.bias",           offsetof(Layer, bk),        '1', 'K', TENSOR_QWEN2 },
    { "self_attn.v_proj.bias",           offsetof(Layer, bv),        '1', 'K', TENSOR_QWEN2 },
    { "self_attn.q_norm.weight",         offsetof(Layer, q_norm),    '1', 'D', TENSOR_QK_NORM },
    { "self_attn.k_norm.weight",         offsetof(Layer, k_norm),    '1', 'D', TENSOR_QK_NORM },
    { "self_attn.o_proj.weight",         offsetof(Layer, wo),        'C', 'Q', TENSOR_NEEDED },
    { "self_attn.o_proj.bias",           offsetof(Layer, bo),        '1', 'C', TENSOR_OPTIONAL },
    { "post_attention_layernorm.weight", offsetof(Layer, mlp_norm),  '1', 'C', TENSOR_NEEDED },
    { "mlp.gate_proj.weight",            offsetof(Layer, gate),      'F', 'C', TENSOR_NEEDED },
    { "mlp.gate_proj.bias",              offsetof(Layer, bgate),     '1', 'F', TENSOR_OPTIONAL },
    { "mlp.up_proj.weight",              offsetof(Layer, up),        'F', 'C', TENSOR_NEEDED },
    { "mlp.up_proj.bias",                offsetof(Layer, bup),       '1', 'F', TENSOR_OPTIONAL },
    { "mlp.down_proj.weight",            offsetof(Layer, down),      'C', 'F', TENSOR_NEEDED },
    { "mlp.down_proj.bias",              offsetof(Layer, bdown),     '1', 'C', TENSOR_OPTIONAL } };
enum { N_LAYER_TENSORS = sizeof layer_tensors / sizeof *layer_tensors };

static const char *const dtype_names[] = { "F32", "F16", "BF16" };

static Tensor *layer_tensor(Layer *ly, int i) { return (Tensor *)((char *)ly + layer_tensors[i].at); }
static int config_size(const Config *c, char letter) {
    switch (letter) {
    case 'C': return c->C;
    case 'D': return c->D;
    case 'F': return c->F;
    case 'V': return c->V;
    case 'Q': return c->H * c->D;
    case 'K': return c->G * c->D;
    default:  return 1;
    }
}
static int tensor_rows(const Config *c, int i) { return config_size(c, layer_tensors[i].rows); }
static int tensor_cols(const Config *c, int i) { return config_size(c, layer_tensors[i].cols); }
static int tensor_needed(const Config *c, int i) {
    int when = layer_tensors[i].when;
    return when == TENSOR_NEEDED || (when == TENSOR_QK_NORM && c->qk_norm) || (when == TENSOR_QWEN2 && !strcmp(c->model_type, "qwen2"));
}
static size_t tensor_bytes(const Tensor *t) { return (size_t)t->rows * (size_t)t->cols * dtype_size(t->dtype); }

// RoPE frequencies (D/2), one per pair (i, i+D/2): f_i = theta^(-2i/D), then the scaling of config.json. All in double.
static void rope_frequencies(const Config *c, double *f, float *scale) {
    double low = 0, high = 0;
    *scale = 1;
    // pairs below low turn fast enough to extrapolate, above high they interpolate, between: a ramp
    if (c->rope_type == ROPE_YARN) {
        double turns = log(c->orig_pos / (c->beta_fast * 2 * M_PI));
        low = fmax(floor(c->D * turns / (2 * log(c->theta))), 0);
        turns = log(c->orig_pos / (c->beta_slow * 2 * M_PI));
        high = fmin(ceil(c->D * turns / (2 * log(c->theta))), c->D - 1);
        if (low == high) high += 0.001;
        *scale = (float)(c->attn_factor > 0 ? c->attn_factor : c->factor > 1 ? 0.1 * log(c->factor) + 1 : 1);
    }
    for (int i = 0; i < c->D / 2; i++) {
        double x = pow(c->theta, -2.0 * i / c->D), wavelen = 2 * M_PI / x;
        if (c->rope_type == ROPE_LINEAR) x /= c->factor;
        if (c->rope_type == ROPE_LLAMA3 && wavelen >= c->orig_pos / c->high_freq) {
            double s = (c->orig_pos / wavelen - c->low_freq) / (c->high_freq - c->low_freq);
            x = wavelen > c->orig_pos / c->low_freq ? x / c->factor : (1 - s) * x / c->factor + s * x;
        }
        if (c->rope_type == ROPE_YARN) {
            double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
            x = x / c->factor * ramp + x * (1 - ramp);
        }
        f[i] = x;
    }
}

// Weights.files: mapped shards, or one block made from a seed
typedef struct { SafeFile **file; Json *index; void *block; size_t block_bytes; } WeightFiles;

static Weights *weights_new(const Config *c) {
    Weights *w = xcalloc(1, sizeof *w);
    double *f64 = xmalloc((size_t)(c->D / 2) * sizeof *f64);
    float *f32 = xmalloc((size_t)(c->D / 2) * sizeof *f32);
    w->layer = xcalloc((size_t)c->L, sizeof *w->layer);
    w->files = xcalloc(1, sizeof(WeightFiles));
    rope_frequencies(c, f64, &w->rope_scale);
    for (int i = 0; i < c->D / 2; i++) f32[i] = (float)f64[i];
    w->inv_freq64 = f64; w->inv_freq = f32;
    return w;
}

void weights_close(Weights *w, Config *c) {     // gives back both; either may be NULL
    if (w) {
        WeightFiles *wf = w->files;
        for (size_t i = 0; i < arrlenu(wf->file); i++) safetensors_close(wf->file[i]);
        arrfree(wf->file);
        json_free(wf->index);
        if (wf->block) munmap(wf->block, wf->block_bytes);
        free(wf);
        free((void *)w->inv_freq); free((void *)w->inv_freq64);
        free(w->layer);
        free(w);
    }
    config_free(c);
}

// Opens dir/name. A shard's name comes from a file: only a plain name of that folder is opened.
static int weights_open_file(WeightFiles *wf, const char *dir, const char *name, char err[512]) {
    char path[1400], why[512];
    if (!*name || *name == '.' || strchr(name, '/') || strlen(name) > 255)
        return fault(err, "%.200s/model.safetensors.index.json: weight_map names the file \"%.80s\", expected a name in the same "
                     "folder", dir, name);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    for (size_t i = 0; i < arrlenu(wf->file); i++) if (!strcmp(wf->file[i]->path, path)) return 0;
    if (arrlenu(wf->file) == 4096) return fault(err, "%.200s/model.safetensors.index.json: more than 4096 shards", dir);
    SafeFile *f = safetensors_open(path, why);
    if (!f) return fault(err, "%.200s/%.100s: %.200s", dir, name, why);
    arrput(wf->file, f);
    return 0;
}

static SafeFile *weights_file_of(const WeightFiles *wf, const char *dir, const char *name) {    // the open shard of that name
    size_t n = strlen(dir);
    for (size_t i = 0; i < arrlenu(wf->file); i++) if (!strcmp(wf->file[i]->path + n + 1, name)) return wf->file[i];
    return NULL;
}

// model.safetensors.index.json decides, then model.safetensors; never a glob: other weights may lie beside them.
static int weights_open(WeightFiles *wf, const char *dir, char err[512]) {
    char path[1400];
    wf->index = config_file(dir, "model.safetensors.index.json", 0, err);
    if (err[0]) return -1;
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    if (!wf->index) {
        if (!file_exists(path) && foreign_files(dir, err)) return -1;
        return weights_open_file(wf, dir, "model.safetensors", err);
    }
    const Json *map = json_get(wf->index, "weight_map");
    if (!map || map->type != JSON_OBJECT || !map->n)
        return fault(err, "%.300s/model.safetensors.index.json: no weight_map", dir);
    for (int i = 0; i < map->n; i++) {
        const Json *v = &map->item[i];
        if (v->type != JSON_STRING)
            return fault(err, "%.200s/model.safetensors.index.json: weight_map: %.100s is no file name", dir, map->key[i]);
        if (weights_open_file(wf, dir, v->str, err)) return -1;
    }
    return 0;
}

static int weights_missing(const WeightFiles *wf, const Config *c, const char *name, char err[512]) {
    char packed[200];
    size_t stem = strlen(name) > 7 && !strcmp(name + strlen(name) - 7, ".weight") ? strlen(name) - 7 : 0;
    // GPTQ and AWQ, compressed-tensors, FP8, bitsandbytes
    static const char *const traces[] = { "qweight", "weight_packed", "weight_scale", "weight.absmax" };
    for (size_t i = 0; stem && i < sizeof traces / sizeof *traces; i++) {
        snprintf(packed, sizeof packed, "%.*s.%s", (int)stem, name, traces[i]);
        for (size_t k = 0; k < arrlenu(wf->file); k++)
            if (safetensors_find(wf->file[k], packed))
                return fault(err, "%.200s: quantized checkpoint: tensor %s instead of %s; take the unquantized model", c->dir,
                             packed, name);
    }
    return fault(err, "%.200s: tensor %s is missing", c->dir, name);
}

// The tensor called name -> *out, checked. 0 also when it is absent and not needed (data NULL).
static int weights_take(WeightFiles *wf, const Config *c, const char *name, int needed, Tensor *out, int n_dim, int rows, int cols,
                        char err[512]) {
    SafeTensor *t = NULL;
    const Json *place = json_get(json_get(wf->index, "weight_map"), name);
    if (place) {
        t = safetensors_find(weights_file_of(wf, c->dir, place->str), name);
        if (!t)
            return fault(err, "%.200s: tensor %s is not in %.100s, where model.safetensors.index.json says it is", c->dir, name,
                         place->str);
    }
    for (size_t i = 0; !t && !wf->index && i < arrlenu(wf->file); i++) t = safetensors_find(wf->file[i], name);
    if (!t) return needed ? weights_missing(wf, c, name, err) : 0;
    if (t->dtype == DT_QUANTIZED)
        return fault(err, "%.200s: quantized checkpoint: tensor %s is %s, expected F32, F16 or BF16; take the unquantized model",
                     c->dir, name, t->type);
    if (t->dtype < 0) return fault(err, "%.200s: tensor %s is %s, expected F32, F16 or BF16", c->dir, name, t->type);
    if (t->n_dim != n_dim || t->dim[n_dim - 1] != cols || (n_dim == 2 && t->dim[0] != rows)) {
        char found[200] = "", want[64];
        for (int i = 0; i < t->n_dim; i++)
            snprintf(found + strlen(found), sizeof found - strlen(found), "%s%lld", i ? "," : "", (long long)t->dim[i]);
        if (n_dim == 2) snprintf(want, sizeof want, "%d,%d", rows, cols);
        else snprintf(want, sizeof want, "%d", cols);
        return fault(err, "%.110s: tensor %.100s: found shape (%.180s), expected (%s) from config.json", c->dir, name, found,
                     want);
    }
    *out = (Tensor){ t->data, t->dtype, rows, cols };
    return 0;
}

static int weights_read(Weights *w, Config *c, char err[512]) {
    WeightFiles *wf = w->files;
    char name[200];
    if (weights_open(wf, c->dir, err)) return -1;
    if (weights_take(wf, c, "model.embed_tokens.weight", 1, &w->embed, 2, c->V, c->C, err)) return -1;
    for (int l = 0; l < c->L; l++)
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            int when = layer_tensors[i].when, n_dim = layer_tensors[i].rows == '1' ? 1 : 2;
            if (when == TENSOR_QK_NORM && !c->qk_norm) continue;        // another family with such tensors: reported as not used
            snprintf(name, sizeof name, "model.layers.%d.%s", l, layer_tensors[i].name);
            if (weights_take(wf, c, name, tensor_needed(c, i), layer_tensor(&w->layer[l], i), n_dim, tensor_rows(c, i),
                             tensor_cols(c, i), err)) return -1;
        }
    if (weights_take(wf, c, "model.norm.weight", 1, &w->norm, 1, 1, c->C, err)) return -1;
    if (weights_take(wf, c, "lm_head.weight", !c->tied, &w->head, 2, c->V, c->C, err)) return -1;
    if (c->tied) {
        if (w->head.data)
            fprintf(stderr, "kvcomp: warning: %s: lm_head.weight is not used, config.json ties the output to the embedding\n",
                    c->dir);
        w->head = w->embed;
    }
    return 0;
}

// Sums up w->bytes and finds the dtype most bytes have.
static void weights_count(Weights *w, Config *c) {
    size_t by[3] = { 0 };
    by[w->embed.dtype] += tensor_bytes(&w->embed);
    by[w->norm.dtype] += tensor_bytes(&w->norm);
    if (w->head.data != w->embed.data) by[w->head.dtype] += tensor_bytes(&w->head);
    for (int l = 0; l < c->L; l++)
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            const Tensor *t = layer_tensor(&w->layer[l], i);
            if (t->data) by[t->dtype] += tensor_bytes(t);
        }
    w->bytes = by[0] + by[1] + by[2];
    c->dtype = by[DT_BF16] >= by[DT_F16] && by[DT_BF16] >= by[DT_F32] ? DT_BF16 : by[DT_F16] >= by[DT_F32] ? DT_F16 : DT_F32;
}

Weights *weights_load(Config *c) {
    Weights *w = weights_new(c);
    WeightFiles *wf = w->files;
    char err[512] = "";
    int left = 0;
    const char *first = NULL;
    if (weights_read(w, c, err)) { weights_close(w, NULL); die(EXIT_MODEL, "%s", err); }
    weights_count(w, c);
    for (size_t i = 0; i < arrlenu(wf->file); i++)
        for (int k = 0; k < wf->file[i]->n; k++) {
            const SafeTensor *t = &wf->file[i]->tensor[k];
            if (!t->used && !strstr(t->name, "rotary_emb.inv_freq") && !left++) first = t->name;
        }
    if (left)
        fprintf(stderr, "kvcomp: warning: %s: %d tensor%s not used, the first: %s\n", c->dir, left, left > 1 ? "s are" : " is",
                first);
    return w;
}

// n bf16 of the given standard deviation, uniform. Four come from one 64-bit draw; seeded per row, so threads do not matter.
static void random_bf16(uint16_t *p, size_t n, double std, uint64_t seed) {
    float unit = (float)(std * 1.7320508075688772 / 32768);
    for (size_t i = 0; i < n; ) {
        uint64_t z = splitmix64(&seed);
        for (int k = 0; k < 4 && i < n; k++, z >>= 16) p[i++] = f32_to_bf16((float)(int16_t)(z & 0xffff) * unit);
    }
}

static size_t synthetic_bytes(int rows, int cols) { return ((size_t)rows * (size_t)cols * 2 + 63) & ~(size_t)63; }

static void make_tensor(Tensor *t, char **next, int rows, int cols, double std, uint64_t seed) {    // std 0: all ones
    uint16_t *p = (uint16_t *)*next;
    *t = (Tensor){ p, DT_BF16, rows, cols };
    *next += synthetic_bytes(rows, cols);
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        uint16_t *row = p + (size_t)r * (size_t)cols;
        if (std > 0) random_bf16(row, (size_t)cols, std, mix64(seed ^ mix64((uint64_t)r + 1)));
        else for (int i = 0; i < cols; i++) row[i] = 0x3f80;
    }
}

// Random bf16 weights of the right sizes, for speed and for tests. Logits get a standard deviation of about 2.5 and every
// branch writes into the residual stream at the scale of the embedding, so that depth changes nothing.
Weights *weights_synthetic(Config *c, uint64_t seed) {
    Weights *w = weights_new(c);
    WeightFiles *wf = w->files;
    size_t embed = synthetic_bytes(c->V, c->C), total = embed * (c->tied ? 1 : 2) + synthetic_bytes(1, c->C);
    double std = 2.5 / sqrt(c->C);
    for (int i = 0; i < N_LAYER_TENSORS; i++)
        if (tensor_needed(c, i)) total += (size_t)c->L * synthetic_bytes(tensor_rows(c, i), tensor_cols(c, i));
    wf->block = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (wf->block == MAP_FAILED) {
        wf->block = NULL;
        weights_close(w, NULL);
        die(EXIT_MEMORY, "out of memory: %zu bytes of synthetic weights could not be had (a smaller shape needs less)", total);
    }
    wf->block_bytes = total;
    madvise(wf->block, total, MADV_HUGEPAGE);
    char *next = wf->block;
    make_tensor(&w->embed, &next, c->V, c->C, std, mix64(seed ^ 1));
    for (int l = 0; l < c->L; l++)
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            if (!tensor_needed(c, i)) continue;
            int rows = tensor_rows(c, i), cols = tensor_cols(c, i), norm = strstr(layer_tensors[i].name, "norm") != NULL;
            double spread = norm ? 0 : (layer_tensors[i].rows == 'C' ? std : 1) / sqrt(cols);
            make_tensor(layer_tensor(&w->layer[l], i), &next, rows, cols, spread,
                        mix64(seed ^ mix64((uint64_t)l * 64 + (uint64_t)i + 16)));
        }
    make_tensor(&w->norm, &next, 1, c->C, 0, 0);
    w->head = w->embed;
    if (!c->tied) make_tensor(&w->head, &next, c->V, c->C, std, mix64(seed ^ 2));
    weights_count(w, c);
    return w;
}

static void inspect_tensor(FILE *f, const char *name, const Tensor *t, int mixed, int times) {
    char shape[40];
    if (!t->data) return;
    if (t->rows == 1) snprintf(shape, sizeof shape, "%d", t->cols);
    else snprintf(shape, sizeof shape, "%d x %d", t->rows, t->cols);
    fprintf(f, "  %-46s %-5s ", name, mixed ? "mixed" : dtype_names[t->dtype]);
    if (times > 1) fprintf(f, "%-16s in %d layers\n", shape, times);
    else fprintf(f, "%s\n", shape);
}

// What --inspect prints: config, tensors, bytes, and what one token costs in the cache.
static void inspect(const Config *c, const Weights *w, FILE *f) {
    static const char *const ropes[] = { "default", "linear", "llama3", "yarn" };
    int windowed = 0;
    for (int l = 0; l < c->L; l++) windowed += c->windowed && c->windowed[l];
    fprintf(f, "model      %s, %s\n", c->model_type, c->dir);
    fprintf(f, "sizes      L %d layers, H %d query heads, G %d KV heads, D %d head_dim, C %d width, F %d MLP, V %d vocabulary\n",
            c->L, c->H, c->G, c->D, c->C, c->F, c->V);
    fprintf(f, "rope       %s, theta %g, factor %g, trained for %d positions, max_position_embeddings %d\n", ropes[c->rope_type],
            c->theta, c->factor, c->orig_pos, c->max_pos);
    fprintf(f, "norm       eps %g, QK-norm %s\n", c->eps, c->qk_norm ? "yes" : "no");
    if (c->window) fprintf(f, "window     %d positions in %d of %d layers\n", c->window, windowed, c->L);
    fprintf(f, "tokens     bos %d, eos", c->bos);
    for (int i = 0; i < c->n_eos; i++) fprintf(f, " %d", c->eos[i]);
    fprintf(f, "%s\noutput     %s\ntensors\n", c->n_eos ? "" : " none", c->tied ? "tied to the embedding" : "own matrix");
    inspect_tensor(f, "model.embed_tokens.weight", &w->embed, 0, 1);
    for (int i = 0; i < N_LAYER_TENSORS; i++) {
        char name[200];
        int times = 0, mixed = 0;
        const Tensor *first = NULL;
        for (int l = 0; l < c->L; l++) {
            const Tensor *t = layer_tensor(&w->layer[l], i);
            if (!t->data) continue;
            if (!times++) first = t;
            mixed |= t->dtype != first->dtype;
        }
        snprintf(name, sizeof name, "model.layers.*.%s", layer_tensors[i].name);
        if (first) inspect_tensor(f, name, first, mixed, times);
    }
    inspect_tensor(f, "model.norm.weight", &w->norm, 0, 1);
    if (!c->tied) inspect_tensor(f, "lm_head.weight", &w->head, 0, 1);
    size_t token = (size_t)c->L * (size_t)c->G * (size_t)c->D * 2;
    fprintf(f, "weights    %zu bytes, mostly %s\n", w->bytes, dtype_names[c->dtype]);
    fprintf(f, "KV cache   %zu bytes a token in f32, %zu in f16 (uncompressed)\n", token * 4, token * 2);
}

typedef struct { Session *s; SafeFile *f; const SafeTensor *first; } SonicFile;

static int sonic_meta(SonicFile *a, const char *key, const char *want, const char *or) {      // the string must be one of two
    const char *v = safetensors_meta(a->f, key);
    if (v && (!strcmp(v, want) || (or && !strcmp(v, or)))) return 0;
    return refuse(a->s, "sonic: %.200s: metadata %s is %.60s, expected %s%s%s", a->f->path, key, v ? v : "missing", want,
                      or ? " or " : "", or ? or : "");
}
static int sonic_meta_int(SonicFile *a, const char *key, int *value) {          // a whole number from 1 to 65536
    const char *v = safetensors_meta(a->f, key);
    char *end = NULL;
    long n = v ? strtol(v, &end, 10) : 0;
    if (!v || !*v || *end || n < 1 || n > 65536)
        return refuse(a->s, "sonic: %.200s: metadata %s is %.60s, expected a number from 1 to 65536", a->f->path, key, v ? v : "missing");
    *value = (int)n;
    return 0;
}
static int sonic_meta_same(SonicFile *a, const char *key, int want) {           // a size of the base model
    char text[16];
    snprintf(text, sizeof text, "%d", want);
    const char *v = safetensors_meta(a->f, key);
    if (v && !strcmp(v, text)) return 0;
    return refuse(a->s, "sonic: %.200s: metadata %s is %.60s, base has %d (adapter made for another model?)", a->f->path, key, v ? v : "missing", want);
}
// rows 0: a vector (cols). The name may hold one %d for the layer.
static int sonic_tensor(SonicFile *a, Tensor *t, const char *pattern, int l, int rows, int cols) {
    char name[128], found[128] = "", want[64];
    const char *rest = strstr(pattern, "%d");
    if (rest) snprintf(name, sizeof name, "%.*s%d%s", (int)(rest - pattern), pattern, l, rest + 2);
    else snprintf(name, sizeof name, "%s", pattern);
    const SafeTensor *x = safetensors_find(a->f, name);
    if (!x) return refuse(a->s, "sonic: %.200s: %s is missing", a->f->path, name);
    if (rows) snprintf(want, sizeof want, "[%d,%d]", rows, cols); else snprintf(want, sizeof want, "[%d]", cols);
    for (int i = 0, n = 0; i < x->n_dim && n < 100; i++)
        n += snprintf(found + n, sizeof found - n, "%s%lld", i ? "," : "[", (long long)x->dim[i]);
    strcat(found, *found ? "]" : "[]");
    if (strcmp(found, want)) return refuse(a->s, "sonic: %s is %s, base needs %s (adapter made for another model?)", name, found, want);
    if (x->dtype < 0) return refuse(a->s, "sonic: %s is %s, expected F32, F16 or BF16", name, x->type);
    if (!a->first) a->first = x;
    if (x->dtype != a->first->dtype)
        return refuse(a->s, "sonic: %s is %s, but %s is %s: all tensors must have one type", name, x->type, a->first->name, a->first->type);
    *t = (Tensor){ x->data, x->dtype, rows ? rows : 1, cols };
    return 0;
}
static int sonic_layer(SonicFile *a, Layer *y, int l, int mlp) {                // y: a copy of the base's layer
    const Config *c = a->s->c;
    int HD = c->H * c->D, GD = c->G * c->D;
    if (sonic_tensor(a, &y->wq, "nexus.layers.%d.self_attn.q_proj.weight", l, HD, c->C)) return -1;
    if (sonic_tensor(a, &y->wk, "nexus.layers.%d.self_attn.k_proj.weight", l, GD, c->C)) return -1;
    if (sonic_tensor(a, &y->wv, "nexus.layers.%d.self_attn.v_proj.weight", l, GD, c->C)) return -1;
    if (sonic_tensor(a, &y->wo, "nexus.layers.%d.self_attn.o_proj.weight", l, c->C, HD)) return -1;
    if (y->bq.data && sonic_tensor(a, &y->bq, "nexus.layers.%d.self_attn.q_proj.bias", l, 0, HD)) return -1;
    if (y->bk.data && sonic_tensor(a, &y->bk, "nexus.layers.%d.self_attn.k_proj.bias", l, 0, GD)) return -1;
    if (y->bv.data && sonic_tensor(a, &y->bv, "nexus.layers.%d.self_attn.v_proj.bias", l, 0, GD)) return -1;
    if (!mlp) return 0;
    if (sonic_tensor(a, &y->gate, "nexus.layers.%d.mlp.gate_proj.weight", l, c->F, c->C)) return -1;
    if (sonic_tensor(a, &y->up, "nexus.layers.%d.mlp.up_proj.weight", l, c->F, c->C)) return -1;
    return sonic_tensor(a, &y->down, "nexus.layers.%d.mlp.down_proj.weight", l, c->C, c->F);
}
static uint64_t fnv1a(uint64_t h, const Tensor *t) {
    const unsigned char *p = t->data;
    for (size_t i = 0, n = (size_t)t->rows * t->cols * dtype_size(t->dtype); i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
    return h;
}
static uint64_t sonic_fingerprint(const Weights *w) {   // FNV-1a 64 over the bytes of the embedding, then layer 0's q_proj, as the base's file has them
    return fnv1a(fnv1a(0xcbf29ce484222325ull, &w->embed), &w->layer[0].wq);
}
static int sonic_check_base(SonicFile *a) {
    const Config *c = a->s->c;
    const struct { const char *key, *want, *or; } words[] = {
        { "format", "sonic-nexus", NULL }, { "version", "1", NULL }, { "model_type", c->model_type, NULL }, { "body", "full_message", NULL },
        { "attention_bias", a->s->w->layer[0].bq.data ? "true" : "false", NULL }, { "position_mode", "augmented", "original" }, { "mlp", "dedicated", "shared" } };
    const struct { const char *key; int want; } sizes[] = {
        { "hidden_size", c->C }, { "num_hidden_layers", c->L }, { "num_attention_heads", c->H }, { "num_key_value_heads", c->G }, { "head_dim", c->D }, { "intermediate_size", c->F } };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) if (sonic_meta(a, words[i].key, words[i].want, words[i].or)) return -1;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) if (sonic_meta_same(a, sizes[i].key, sizes[i].want)) return -1;
    char own[20];
    const char *made = safetensors_meta(a->f, "base_fingerprint");
    snprintf(own, sizeof own, "%016llx", (unsigned long long)sonic_fingerprint(a->s->w));
    if (made && !strncmp(made, "0x", 2)) made += 2;
    if (opt_int(a->s->opt, "sonic-force") || (made && !strcasecmp(made, own))) return 0;
    return refuse(a->s, "sonic: %.200s: metadata base_fingerprint is %.40s, base has %s (trained on other weights? --sonic-force tries it)",
                      a->f->path, made ? made : "missing", own);
}
static int sonic_load(Session *s, Sonic *x, const char *path) {
    const Config *c = s->c;
    char why[512];
    Tensor e, p, t;
    SonicFile a = { .s = s, .f = x->file = safetensors_open(path, why) };
    if (!a.f) return refuse(s, "sonic: %.200s: %.250s", path, why);
    if (sonic_check_base(&a)) return -1;
    if (sonic_meta_int(&a, "k_max", &x->K_max) || sonic_meta_int(&a, "k_default", &x->K) || sonic_meta_int(&a, "t_max", &x->T_max)) return -1;
    if (sonic_tensor(&a, &e, "nexus.embed.base", 0, 0, c->C)) return -1;
    if (sonic_tensor(&a, &p, "nexus.embed.pos", 0, x->K_max, c->C)) return -1;
    if (sonic_tensor(&a, &t, "nexus.embed.turn", 0, x->T_max, c->C)) return -1;
    int mlp = !strcmp(safetensors_meta(a.f, "mlp"), "dedicated");
    for (int l = 0; l < c->L; l++) if (sonic_layer(&a, &x->alt[l], l, mlp)) return -1;
    for (int i = 0; i < a.f->n; i++)
        if (!a.f->tensor[i].used) return refuse(s, "sonic: %.200s: unexpected tensor %.200s", path, a.f->tensor[i].name);
    x->original = !strcmp(safetensors_meta(a.f, "position_mode"), "original");
    x->embed = xmalloc((size_t)(1 + x->K_max + x->T_max) * c->C * sizeof(float));
    to_f32(x->embed, e.data, e.dtype, c->C);
    to_f32(x->embed + c->C, p.data, p.dtype, (size_t)x->K_max * c->C);
    to_f32(x->embed + (size_t)(1 + x->K_max) * c->C, t.data, t.dtype, (size_t)x->T_max * c->C);
    return 0;
}

static size_t sonic_file_bytes(const Sonic *x) {         // the adapter's tensors
    size_t n = 0;
    for (int i = 0; x->file && i < x->file->n; i++) n += x->file->tensor[i].bytes;
    return n;
}

// ==================================================================================================== 21 TOKENIZER
// Text to ids and back, from a folder's tokenizer.json (byte-level BPE, or SentencePiece-style BPE with byte fallback) or
// from a bare SentencePiece tokenizer.model. The road of a text:
//   added tokens cut out -> normalizer -> normalized added tokens cut out -> pre-tokenizer (pieces) -> BPE inside each piece.
// Whatever a file asks for that is not done here exactly is refused by name: wrong ids give a model that talks nonsense
// quietly. Nothing is quadratic: BPE keeps its candidate merges in a heap, so a megabyte without a blank is fine.
//
// Broken UTF-8 is legal input: a byte that starts no well-formed character counts as one character that is neither letter,
// digit, mark nor space (as U+FFFD would), and it comes back as the byte it was from every byte-level or byte-fallback model.

// ---- Maps: 64-bit keys to non-negative values, open addressing, never more than half full. ~0 marks an empty slot.
typedef struct { uint64_t key; int64_t val; } MapSlot;
typedef struct { MapSlot *slot; size_t cap, n; } Map;

static int64_t map_get(const Map *m, uint64_t key) {                // -1: absent
    if (!m->cap) return -1;
    for (size_t i = mix64(key) & (m->cap - 1); m->slot[i].key != UINT64_MAX; i = (i + 1) & (m->cap - 1))
        if (m->slot[i].key == key) return m->slot[i].val;
    return -1;
}
static void map_put(Map *m, uint64_t key, int64_t val) {            // a key that is there gets the new value
    if (2 * (m->n + 1) > m->cap) {
        Map old = *m;
        m->cap = old.cap ? 2 * old.cap : 64;
        m->n = 0;
        m->slot = xmalloc(m->cap * sizeof(MapSlot));
        for (size_t i = 0; i < m->cap; i++) m->slot[i].key = UINT64_MAX;
        for (size_t i = 0; i < old.cap; i++) if (old.slot[i].key != UINT64_MAX) map_put(m, old.slot[i].key, old.slot[i].val);
        free(old.slot);
    }
    size_t i = mix64(key) & (m->cap - 1);
    while (m->slot[i].key != UINT64_MAX && m->slot[i].key != key) i = (i + 1) & (m->cap - 1);
    if (m->slot[i].key == UINT64_MAX) m->n++;
    m->slot[i] = (MapSlot){ key, val };
}

// ---- What a tokenizer is
enum { PIECE_USED = 1, PIECE_MODEL = 2, PIECE_ADDED = 4, PIECE_SPECIAL = 8, PIECE_NORMALIZED = 16 };
// MODEL: in the BPE vocabulary; ADDED: in added_tokens; NORMALIZED: an added token that stands for its normalized text
typedef struct { size_t text, bytes; int n_text, n_bytes, flags; } Piece;   // offsets into Tokenizer.chars: as written; as decoded
typedef struct { int id, guarded, lstrip, rstrip; } AddedToken;      // guarded: only text with parse_special may name it
enum { NORM_NFC, NORM_PREPEND, NORM_PREPEND_START, NORM_REPLACE };       // START: only where everything begins
enum { MAX_STEPS = 4 };         // of a normalizer, and splits of a pre-tokenizer
typedef struct { int kind; char from[8], to[8]; } NormStep;
enum { SPLIT_LLAMA3, SPLIT_QWEN2, SPLIT_GPT2, SPLIT_TEKKEN, SPLIT_DIGITS, SPLIT_NUMBERS, SPLIT_METASPACE };
enum { META_NONE, META_NEVER, META_FIRST, META_ALWAYS };

#define BLANK_MARK "\xe2\x96\x81"                   // U+2581, how SentencePiece writes a blank

struct Tokenizer {
    Piece *piece;               // (size) by id; flags 0: a hole in the numbering
    char *chars;                // every text and every decoded form
    int *by_text; size_t n_by_text;             // hash of texts -> id, -1 empty; a power of two
    Map merges;                 // left << 32 | right -> rank << 32 | result
    AddedToken *added;
    Map trie[2];                // added tokens matched on the raw text [0], on the normalized text [1]: node << 9 | byte -> node,
    int nodes[2];               // node << 9 | 256 -> index into added. Node 0 is the root
    unsigned char starts[2][256];               // bytes some added token starts with
    NormStep *norm;
    int *split;                 // SPLIT_* in order
    int meta;                   // Metaspace pre-tokenizer: META_*
    int byte_level;             // 1: pieces are written in the byte alphabet before BPE
    int ignore_merges, byte_fallback, fuse_unk, unk;            // unk -1: characters that are not in the vocabulary vanish
    int byte_id[256];           // <0xNN>, or -1
    int dec_byte_level, dec_space, dec_bytes, dec_strip;        // byte alphabet; U+2581 is a blank; <0xNN> is a byte; first blank goes
    int bos, eos, add_bos;      // -1: none; add_bos: the model was trained with BOS before every text
};

#define REFUSE(...) return tok_error(err, __VA_ARGS__)
static int tok_error(char err[512], const char *fmt, ...) KV_PRINTF(2, 3);
static int tok_error(char err[512], const char *fmt, ...) {         // -> -1
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, 512, fmt, ap);
    va_end(ap);
    return -1;
}

static size_t text_slot(const Tokenizer *t, const char *s, size_t n) {         // where s stands in by_text, or would
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3ull;
    size_t i = mix64(h) & (t->n_by_text - 1);
    for (; t->by_text[i] >= 0; i = (i + 1) & (t->n_by_text - 1)) {
        const Piece *p = &t->piece[t->by_text[i]];
        if ((size_t)p->n_text == n && !memcmp(t->chars + p->text, s, n)) break;
    }
    return i;
}
static int text_id(const Tokenizer *t, const char *s, size_t n) { return t->by_text[text_slot(t, s, n)]; }

static int tokenizer_size(const Tokenizer *t) { return (int)arrlen(t->piece); }
static int tokenizer_is_special(const Tokenizer *t, int id) {
    return id >= 0 && id < tokenizer_size(t) && (t->piece[id].flags & PIECE_SPECIAL) != 0;
}
static const char *tokenizer_bytes(const Tokenizer *t, int id, int *len) {     // what the id adds to a text; unknown ids add nothing
    if (id < 0 || id >= tokenizer_size(t)) { *len = 0; return ""; }
    *len = t->piece[id].n_bytes;
    return *len ? t->chars + t->piece[id].bytes : "";
}

// ---- Characters. A code is a code point, or BROKEN + byte for a byte that starts no well-formed character.
enum { BROKEN = 0x110000 };
enum { U_UPPER = 1, U_LOWER = 2, U_OTHER_LETTER = 4, U_MARK = 8, U_NUMBER = 16, U_SPACE = 32, U_REST = 64, U_INSIDE = 128,
       U_LETTER = U_UPPER | U_LOWER | U_OTHER_LETTER, U_SIGN = U_MARK | U_REST };     // SIGN: [^\s\p{L}\p{N}]
#include "data/unicode.h"        // generated: unicode_table() and what it hands out
static unsigned char *unicode_class, *unicode_ccc;      // (BROKEN) U_* of a code point; its combining class. Made once
static Map nfc_parts, nfc_pairs;                        // code point -> index of its decomposition; first << 32 | second -> composed
static const uint32_t *nfc_table;

static uint32_t char_code(const char *s, size_t n, int *len) {      // n >= 1
    const unsigned char *p = (const unsigned char *)s;
    *len = utf8_length(s, n);
    switch (*len) {
    case 1: return p[0];
    case 2: return (uint32_t)(p[0] & 31) << 6 | (p[1] & 63);
    case 3: return (uint32_t)(p[0] & 15) << 12 | (uint32_t)(p[1] & 63) << 6 | (p[2] & 63);
    case 4: return (uint32_t)(p[0] & 7) << 18 | (uint32_t)(p[1] & 63) << 12 | (uint32_t)(p[2] & 63) << 6 | (p[3] & 63);
    default: *len = 1; return BROKEN + p[0];
    }
}
static void char_put(char **out, uint32_t c) {                      // appends to an stb array
    if (c < 0x80) { arrput(*out, (char)c); return; }
    if (c >= BROKEN) { arrput(*out, (char)(c - BROKEN)); return; }
    int k = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    char *p = arraddnptr(*out, k);
    for (int i = k - 1; i > 0; i--, c >>= 6) p[i] = (char)(0x80 | (c & 63));
    p[0] = (char)((k == 2 ? 0xc0 : k == 3 ? 0xe0 : 0xf0) | c);
}
static void bytes_put(char **out, const char *s, size_t n) { if (n) memcpy(arraddnptr(*out, n), s, n); }
static int is_space(const char *s, size_t n, int *len) {
    uint32_t c = char_code(s, n, len);
    return c < BROKEN && unicode_class[c] == U_SPACE;
}

static void unicode_load(void) {                        // spreads the range tables of section 3c out; runs once
    static const unsigned char name[] = { U_REST, U_UPPER, U_LOWER, U_OTHER_LETTER, U_MARK, U_NUMBER, U_SPACE };
    if (unicode_class) return;
    unicode_class = xmalloc(BROKEN);
    unicode_ccc = xcalloc(BROKEN, 1);
    size_t n;
    const uint32_t *r = unicode_table(0, &n);
    for (size_t i = 0; i < n; i++)
        for (uint32_t c = r[i] >> 4, end = i + 1 < n ? r[i + 1] >> 4 : BROKEN, k = r[i] & 15; c < end; c++)
            unicode_class[c] = k < 7 ? name[k] : (c & 1) == (k & 1) ? U_LOWER : U_UPPER;    // 7: even upper, odd lower; 8: odd upper
    r = unicode_table(1, &n);
    for (size_t i = 0; i + 1 < n; i++) memset(unicode_ccc + (r[i] >> 8), (int)(r[i] & 255), (r[i + 1] >> 8) - (r[i] >> 8));
    nfc_table = unicode_table(2, &n);
    for (size_t i = 0; i < n; )
        for (uint32_t c = nfc_table[i] >> 8, end = c + (nfc_table[i++] & 255); c < end; c++, i += 2) {
            map_put(&nfc_parts, c, (int64_t)i);
            if (nfc_table[i + 1] && !(nfc_table[i] >> 31)) map_put(&nfc_pairs, (uint64_t)nfc_table[i] << 32 | nfc_table[i + 1], c);
        }
}

// The byte alphabet of GPT-2: printable bytes stand for themselves, the 68 others for U+0100 and on.
static int byte_printable(int b) { return (b > 32 && b < 127) || (b > 160 && b != 173 && b < 256); }
static uint32_t byte_char(int b) {
    static uint32_t map[256];
    if (!map[0]) for (uint32_t i = 0, extra = 256; i < 256; i++) map[i] = byte_printable((int)i) ? i : extra++;
    return map[b];
}
static int char_byte(uint32_t c) {                      // -1: not of the alphabet
    if (c < 256) return byte_printable((int)c) ? (int)c : -1;
    return c < 256 + 33 ? (int)c - 256 : c < 256 + 67 ? (int)c - 256 - 33 + 127 : c == 256 + 67 ? 173 : -1;
}

// ---- NFC (Unicode annex 15): decompose, put marks into canonical order, compose. Hangul by arithmetic.
enum { HANGUL_S = 0xac00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11a7,
       N_HANGUL_L = 19, N_HANGUL_V = 21, N_HANGUL_T = 28, N_HANGUL_S = N_HANGUL_L * N_HANGUL_V * N_HANGUL_T };

static void nfc_decompose(uint32_t **out, uint32_t c) {
    uint32_t s = c - HANGUL_S;
    if (s < N_HANGUL_S) {
        arrput(*out, HANGUL_L + s / (N_HANGUL_V * N_HANGUL_T));
        arrput(*out, HANGUL_V + s / N_HANGUL_T % N_HANGUL_V);
        if (s % N_HANGUL_T) arrput(*out, HANGUL_T + s % N_HANGUL_T);
        return;
    }
    int64_t at = c < 0xc0 ? -1 : map_get(&nfc_parts, c);
    if (at < 0) { arrput(*out, c); return; }
    nfc_decompose(out, nfc_table[at] & 0x7fffffff);
    if (nfc_table[at + 1]) nfc_decompose(out, nfc_table[at + 1]);
}
static int64_t nfc_compose(uint32_t a, uint32_t b) {    // -1: the two do not compose
    uint32_t l = a - HANGUL_L, s = a - HANGUL_S, v = b - HANGUL_V, t = b - HANGUL_T;
    if (l < N_HANGUL_L && v < N_HANGUL_V) return HANGUL_S + (l * N_HANGUL_V + v) * N_HANGUL_T;
    if (s < N_HANGUL_S && s % N_HANGUL_T == 0 && t - 1 < N_HANGUL_T - 1) return a + t;
    return map_get(&nfc_pairs, (uint64_t)a << 32 | b);
}
static int code_ccc(uint32_t c) { return c < BROKEN ? unicode_ccc[c] : 0; }

static void nfc_sort(uint32_t *code, size_t n) {        // a run of marks: a counting sort, stable and linear
    size_t start[257] = { 0 };
    uint32_t *old = xmalloc(n * sizeof *old);
    memcpy(old, code, n * sizeof *old);
    for (size_t i = 0; i < n; i++) start[code_ccc(old[i]) + 1]++;
    for (int k = 0; k < 256; k++) start[k + 1] += start[k];
    for (size_t i = 0; i < n; i++) code[start[code_ccc(old[i])]++] = old[i];
    free(old);
}

static void nfc(char **text) {                          // an stb array, rewritten
    size_t n = arrlenu(*text), i = 0, kept = 0;
    while (i < n && (unsigned char)(*text)[i] < 0xcc) i++;
    if (i == n) return;                                 // every code point below U+0300: nothing to do
    uint32_t *code = NULL;
    int k;
    for (i = 0; i < n; i += (size_t)k) nfc_decompose(&code, char_code(*text + i, n - i, &k));
    n = arrlenu(code);
    for (size_t from = 0, to; from < n; from = to) {    // order the runs of marks
        int sorted = 1;
        for (to = from + 1; to < n && code_ccc(code[from]) && code_ccc(code[to]); to++)
            sorted &= code_ccc(code[to - 1]) <= code_ccc(code[to]);
        if (!sorted) nfc_sort(code + from, to - from);
    }
    int64_t starter = -1, last = -1, both;              // last: class of the code kept after the starter, -1: none was
    for (i = 0; i < n; i++) {
        int ccc = code_ccc(code[i]);
        if (starter >= 0 && last < ccc && (both = nfc_compose(code[starter], code[i])) >= 0) {
            code[starter] = (uint32_t)both;
            continue;
        }
        if (ccc) last = ccc;
        else { starter = (int64_t)kept; last = -1; }
        code[kept++] = code[i];
    }
    arrsetlen(*text, 0);
    for (i = 0; i < kept; i++) char_put(text, code[i]);
    arrfree(code);
}

// ---- Pre-tokenizers: one matcher per known pattern, written by hand and chosen by the exact text of the pattern.
// Every byte of a text carries the class of its character, bytes after the first also U_INSIDE, so a run of a class is a plain
// loop over bytes. A matcher gets a position and returns the end of the match, always > i; n is where its piece ends.
typedef struct { const char *s; const unsigned char *cls; size_t n; } Text;

static size_t run(const Text *t, size_t i, int set) { while (i < t->n && t->cls[i] & set) i++; return i; }
static size_t next_char(const Text *t, size_t i) {
    do i++; while (i < t->n && t->cls[i] & U_INSIDE);
    return i;
}
static size_t newlines(const Text *t, size_t i, int slash) {        // [\r\n]*, or [\r\n/]*
    while (i < t->n && (t->s[i] == '\n' || t->s[i] == '\r' || (slash && t->s[i] == '/'))) i++;
    return i;
}
static size_t match_blanks(const Text *t, size_t i) {               // \s+(?!\S)|\s+ : all but the last blank before a word
    size_t end = run(t, i, U_SPACE), last = end;
    if (end == t->n) return end;
    while (t->cls[--last] & U_INSIDE);
    return last > i ? last : end;
}
static size_t match_contraction(const Text *t, size_t i, int any_case) {       // 's|'t|'re|'ve|'m|'ll|'d -> its end, or 0
    if (t->s[i] != '\'' || i + 1 >= t->n) return 0;
    int up = any_case ? 32 : 0, a = t->s[i + 1] | (isupper((unsigned char)t->s[i + 1]) ? up : 0);
    if (strchr("stmd", a) && a) return i + 2;
    if (i + 2 >= t->n) return 0;
    int b = t->s[i + 2] | (isupper((unsigned char)t->s[i + 2]) ? up : 0);
    if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l')) return i + 3;
    return any_case && !memcmp(t->s + i + 1, "\xc5\xbf", 2) ? i + 3 : 0;       // U+017F is an s to a pattern without case
}
static size_t match_signs(const Text *t, size_t i, int slash) {     // [^\s\p{L}\p{N}]+[\r\n]* after at most one blank; 0: none
    size_t j = i + (t->s[i] == ' '), end = run(t, j, U_SIGN);
    return end > j ? newlines(t, end, slash) : 0;
}
static size_t match_lines(const Text *t, size_t i) {                // \s*[\r\n]+ : to the last newline of the blanks; 0: none
    size_t end = run(t, i, U_SPACE);
    while (end > i && t->s[end - 1] != '\n' && t->s[end - 1] != '\r') end--;
    return end > i ? end : 0;
}

static size_t match_gpt2(const Text *t, size_t i) {
    static const int set[] = { U_LETTER, U_NUMBER, U_SIGN };
    size_t end = match_contraction(t, i, 0), j = i + (t->s[i] == ' ');
    for (int k = 0; k < 3 && !end; k++) if (run(t, j, set[k]) > j) end = run(t, j, set[k]);
    return end ? end : match_blanks(t, i);
}
static size_t match_llama3(const Text *t, size_t i, int digits) {   // digits: numbers in one piece, 3 (Llama 3) or 1 (Qwen 2)
    size_t end = match_contraction(t, i, 1), j = i;
    if (end) return end;
    if (!(t->cls[i] & (U_LETTER | U_NUMBER)) && t->s[i] != '\n' && t->s[i] != '\r') j = next_char(t, i);
    if ((end = run(t, j, U_LETTER)) > j) return end;
    for (end = i; digits-- && end < t->n && t->cls[end] & U_NUMBER; ) end = next_char(t, end);
    if (end > i || (end = match_signs(t, i, 0)) || (end = match_lines(t, i))) return end;
    return match_blanks(t, i);
}
// [upper]*[lower]+ at j, or with `must` [upper]+[lower]*. upper and lower share the caseless letters and the marks, so the
// first form may have to give characters back: the last shared one of the upper run then is all that [lower]+ gets.
static size_t match_cased(const Text *t, size_t j, int must) {
    enum { BOTH = U_OTHER_LETTER | U_MARK, UP = U_UPPER | BOTH, LOW = U_LOWER | BOTH };
    size_t up = run(t, j, UP), end = run(t, up, LOW);
    if (must) return up > j ? end : 0;
    if (end > up) return end;
    for (; up > j; up--) if (t->cls[up - 1] & BOTH) return up;
    return 0;
}
static size_t match_tekken(const Text *t, size_t i) {
    size_t end, j = i;
    if (!(t->cls[i] & (U_LETTER | U_NUMBER)) && t->s[i] != '\n' && t->s[i] != '\r') j = next_char(t, i);
    for (int must = 0; must < 2; must++) {
        if ((end = match_cased(t, j, must))) return end;
        if (j > i && (end = match_cased(t, i, must))) return end;   // the optional first character may be a mark of the word itself
    }
    if (t->cls[i] & U_NUMBER) return next_char(t, i);
    if ((end = match_signs(t, i, 1)) || (end = match_lines(t, i))) return end;
    return match_blanks(t, i);
}
static size_t match_metaspace(const Text *t, size_t i) {            // up to the next U+2581
    while (++i < t->n && !(t->n - i >= 3 && !memcmp(t->s + i, BLANK_MARK, 3)));
    return i;
}
static size_t match(int kind, const Text *t, size_t i) {
    size_t j = i;
    switch (kind) {
    case SPLIT_LLAMA3: return match_llama3(t, i, 3);
    case SPLIT_QWEN2:  return match_llama3(t, i, 1);
    case SPLIT_GPT2:   return match_gpt2(t, i);
    case SPLIT_TEKKEN: return match_tekken(t, i);
    case SPLIT_METASPACE: return match_metaspace(t, i);
    case SPLIT_DIGITS: if (t->cls[i] & U_NUMBER) return next_char(t, i); break;
    default: if ((j = run(t, i, U_NUMBER)) > i) return j;
    }
    return run(t, i, 127 & ~U_NUMBER);                              // Digits: everything up to the next number
}

// ---- BPE. A word is a linked list of symbols. Every neighbouring pair that merges waits in a heap, lowest rank first, leftmost
// first among equals. An entry whose left symbol has got another pair since is skipped when it comes up.
typedef struct { int id, prev, next, rank, into; } Symbol;          // rank, into: of the pair (this, next)
enum { NO_RANK = INT_MAX };                             // the pair does not merge
typedef struct {
    const Tokenizer *t;
    int special;                // 1: the text may name special tokens
    int *ids;                   // what comes out
    char *text, *spare, *mapped;                // the text after the normalizer; after Metaspace; in the byte alphabet
    unsigned char *cls;
    Symbol *sym;
    uint64_t *heap;             // rank << 32 | index of the left symbol
} Encoder;

static void heap_push(uint64_t **heap, uint64_t x) {
    arrput(*heap, x);
    uint64_t *h = *heap;
    size_t i = arrlenu(h) - 1;
    for (; i && h[(i - 1) / 2] > x; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = x;
}
static uint64_t heap_pop(uint64_t *h) {
    uint64_t top = h[0], x = arrpop(h);
    size_t n = arrlenu(h), i = 0, k;
    while ((k = 2 * i + 1) < n) {
        if (k + 1 < n && h[k + 1] < h[k]) k++;
        if (h[k] >= x) break;
        h[i] = h[k];
        i = k;
    }
    if (n) h[i] = x;
    return top;
}

static int usable(const Encoder *e, int id) {           // may BPE make this id? User text never makes a special one
    return id >= 0 && e->t->piece[id].flags & PIECE_MODEL && (e->special || !(e->t->piece[id].flags & PIECE_SPECIAL));
}
static void offer(Encoder *e, int i) {                  // symbol i has a new right neighbour: does the pair merge?
    Symbol *s = &e->sym[i];
    int64_t m = s->next < 0 ? -1 : map_get(&e->t->merges, (uint64_t)s->id << 32 | (uint64_t)e->sym[s->next].id);
    if (m >= 0 && !usable(e, (int)(m & INT_MAX))) m = -1;
    s->rank = m < 0 ? NO_RANK : (int)(m >> 32);
    s->into = (int)(m & INT_MAX);
    if (m >= 0) heap_push(&e->heap, (uint64_t)s->rank << 32 | (uint64_t)i);
}
static void symbol_put(Encoder *e, int id) {
    int i = (int)arrlen(e->sym);
    Symbol s = { id, i - 1, i + 1, NO_RANK, -1 };
    arrput(e->sym, s);
}
static void word_symbols(Encoder *e, const char *s, size_t n) {     // one a character; for unknown ones bytes, unk, or nothing
    const Tokenizer *t = e->t;
    int unk = 0;                                        // 1: an unk waits for the characters it may swallow (fuse_unk)
    arrsetlen(e->sym, 0);
    for (size_t i = 0; i < n; ) {
        int k, b = 0, id;
        char_code(s + i, n - i, &k);
        id = text_id(t, s + i, (size_t)k);
        if (usable(e, id)) {
            if (unk) symbol_put(e, t->unk);
            unk = 0;
            symbol_put(e, id);
        } else {
            if (t->byte_fallback) while (b < k && t->byte_id[(unsigned char)s[i + (size_t)b]] >= 0) b++;
            if (b == k) for (b = 0; b < k; b++) symbol_put(e, t->byte_id[(unsigned char)s[i + (size_t)b]]);
            else if (t->unk >= 0) {
                if (unk && !t->fuse_unk) symbol_put(e, t->unk);
                unk = 1;
            }
        }
        i += (size_t)k;
    }
    if (unk) symbol_put(e, t->unk);
    if (arrlen(e->sym)) arrlast(e->sym).next = -1;
}
static void word_bpe(Encoder *e, const char *s, size_t n) {
    if (e->t->byte_level) {
        arrsetlen(e->mapped, 0);
        for (size_t i = 0; i < n; i++) char_put(&e->mapped, byte_char((unsigned char)s[i]));
        s = e->mapped; n = arrlenu(e->mapped);
    }
    int whole = e->t->ignore_merges ? text_id(e->t, s, n) : -1;
    if (usable(e, whole)) { arrput(e->ids, whole); return; }
    word_symbols(e, s, n);
    arrsetlen(e->heap, 0);
    for (int i = 0; i < (int)arrlen(e->sym); i++) offer(e, i);
    while (arrlen(e->heap)) {
        uint64_t top = heap_pop(e->heap);
        int i = (int)(top & INT_MAX), j;
        Symbol *left = &e->sym[i];
        if (left->rank != (int)(top >> 32)) continue;
        j = left->next;
        left->id = left->into;
        left->next = e->sym[j].next;
        e->sym[j].rank = NO_RANK;
        if (left->next >= 0) e->sym[left->next].prev = i;
        offer(e, i);
        if (e->sym[i].prev >= 0) offer(e, e->sym[i].prev);
    }
    for (int i = arrlen(e->sym) ? 0 : -1; i >= 0; i = e->sym[i].next) arrput(e->ids, e->sym[i].id);
}

// ---- Encoding
static void split_piece(Encoder *e, Text t, size_t i, size_t step) {           // bytes [i, t.n) of t, from split `step` on
    if (step == arrlenu(e->t->split)) { word_bpe(e, t.s + i, t.n - i); return; }
    for (size_t end = t.n, j; i < end; i = j) {
        t.n = end;
        t.n = j = match(e->t->split[step], &t, i);
        split_piece(e, t, i, step + 1);
    }
}

static void replace_all(char **text, char **spare, const char *from, const char *to) {
    size_t n = arrlenu(*text), k = strlen(from), m = strlen(to), i = 0;
    arrsetlen(*spare, 0);
    while (i < n) {
        int hit = n - i >= k && !memcmp(*text + i, from, k);
        if (hit) bytes_put(spare, to, m); else arrput(*spare, (*text)[i]);
        i += hit ? k : 1;
    }
    char *swap = *text; *text = *spare; *spare = swap;
}
static void prepend(char **text, const char *s) {
    size_t n = arrlenu(*text), k = strlen(s);
    arrsetlen(*text, n + k);
    memmove(*text + k, *text, n);
    memcpy(*text, s, k);
}
static void normalize(const Tokenizer *t, char **text, char **spare, int at_start) {   // an stb array that is not empty
    for (int i = 0; i < (int)arrlen(t->norm); i++) {
        const NormStep *step = &t->norm[i];
        if (step->kind == NORM_NFC) nfc(text);
        else if (step->kind == NORM_PREPEND || (step->kind == NORM_PREPEND_START && at_start)) prepend(text, step->to);
        else if (step->kind == NORM_REPLACE) replace_all(text, spare, step->from, step->to);
    }
}

static void classify(const char *s, size_t n, unsigned char **cls) {           // an stb array: U_* of every byte
    arrsetlen(*cls, n);
    for (size_t i = 0; i < n; ) {
        int k;
        uint32_t c = char_code(s + i, n - i, &k);
        unsigned char u = c < BROKEN ? unicode_class[c] : U_REST;
        (*cls)[i++] = u;
        while (--k) (*cls)[i++] = u | U_INSIDE;
    }
}
static void encode_piece(Encoder *e, const char *s, size_t n, int at_start) {  // between added tokens, normalized
    const Tokenizer *t = e->t;
    if (t->meta) {
        arrsetlen(e->mapped, 0);
        bytes_put(&e->mapped, s, n);
        replace_all(&e->mapped, &e->spare, " ", BLANK_MARK);
        int marked = arrlen(e->mapped) >= 3 && !memcmp(e->mapped, BLANK_MARK, 3);
        if (!marked && (t->meta == META_ALWAYS || (t->meta == META_FIRST && at_start))) prepend(&e->mapped, BLANK_MARK);
        s = e->mapped; n = arrlenu(e->mapped);
    }
    if (arrlen(t->split)) classify(s, n, &e->cls);
    split_piece(e, (Text){ s, e->cls, n }, 0, 0);
}

// The next added token of s[0,n) at or after `from`: leftmost, then longest -> its index in added, or -1. Blanks it swallows
// (lstrip, rstrip) are inside [*start, *end).
static int added_next(const Encoder *e, int which, const char *s, size_t n, size_t from, size_t *start, size_t *end) {
    const Map *trie = &e->t->trie[which];
    for (size_t i = from, stop = 0; i < n; i = stop) {
        int64_t node = 0, hit = -1, leaf;
        stop = i + 1;
        if (!e->t->starts[which][(unsigned char)s[i]]) continue;
        for (size_t j = i; j < n && (node = map_get(trie, (uint64_t)node << 9 | (unsigned char)s[j])) >= 0; j++)
            if ((leaf = map_get(trie, (uint64_t)node << 9 | 256)) >= 0) { hit = leaf; stop = j + 1; }
        const AddedToken *a = hit < 0 ? NULL : &e->t->added[hit];
        if (!a || (a->guarded && !e->special)) continue;            // in text that may not name it, a special token is letters
        *start = i; *end = stop;
        int k;
        for (size_t b; a->lstrip && *start > from; *start = b) {
            for (b = *start - 1; b > from && *start - b < 4 && (s[b] & 0xc0) == 0x80; b--);
            if (!is_space(s + b, *start - b, &k) || b + (size_t)k != *start) break;
        }
        while (a->rstrip && *end < n && is_space(s + *end, n - *end, &k)) *end += (size_t)k;
        return (int)hit;
    }
    return -1;
}

static void encode_segment(Encoder *e, const char *s, size_t n, int at_start) {        // between the added tokens of the raw text
    const Tokenizer *t = e->t;
    if (arrlen(t->norm)) {
        arrsetlen(e->text, 0);
        bytes_put(&e->text, s, n);
        normalize(t, &e->text, &e->spare, at_start);
        s = e->text; n = arrlenu(e->text);
    }
    size_t from = 0, start, end;
    for (int a; (a = added_next(e, 1, s, n, from, &start, &end)) >= 0; from = end) {
        if (start > from) encode_piece(e, s + from, start - from, at_start && !from);
        arrput(e->ids, t->added[a].id);
    }
    if (n > from) encode_piece(e, s + from, n - from, at_start && !from);
}

// Appends the ids of a text to the stb array ids and returns it. at_start: the text is the start of everything (some
// SentencePiece models put a blank there only).
static int *encode_at(const Tokenizer *t, const char *text, size_t n, int parse_special, int at_start, int *ids) {
    if (n > INT_MAX / 8) die(EXIT_USAGE, "a text of %zu bytes is too long, at most %d", n, INT_MAX / 8);
    Encoder e = { .t = t, .special = parse_special, .ids = ids };
    size_t from = 0, start, end;
    for (int a; (a = added_next(&e, 0, text, n, from, &start, &end)) >= 0; from = end) {
        if (start > from) encode_segment(&e, text + from, start - from, at_start && !from);
        arrput(e.ids, t->added[a].id);
    }
    if (n > from) encode_segment(&e, text + from, n - from, at_start && !from);
    arrfree(e.text); arrfree(e.spare); arrfree(e.mapped); arrfree(e.cls); arrfree(e.sym); arrfree(e.heap);
    return e.ids;
}
static int *tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int parse_special, int *ids) {
    return encode_at(t, text, n, parse_special, 1, ids);
}

// ---- Decoding as a stream: feed ids, get whole characters. Bytes that may still become one are held back; bytes that cannot
// become U+FFFD, one for each longest beginning of a character.
typedef struct { const Tokenizer *t; int skip_special, started, n; char held[4]; } Decoder;     // all but t 0: the start of a text

static int utf8_begins(const char *s, int n) {          // can s (n <= 3 bytes, no whole character) become one?
    int need = (unsigned char)s[0] >= 0xf0 ? 4 : (unsigned char)s[0] >= 0xe0 ? 3 : 2;
    char low[4] = "\x80\x80\x80", high[4] = "\xbf\xbf\xbf";         // a beginning goes with the lowest or the highest continuation
    if (n >= need) return 0;
    memcpy(low, s, (size_t)n);
    memcpy(high, s, (size_t)n);
    low[3] = (char)0x80; high[3] = (char)0xbf;
    return utf8_length(low, (size_t)need) == need || utf8_length(high, (size_t)need) == need;
}
static char *decode_byte(Decoder *d, char c, char *out) {
    d->held[d->n++] = c;
    while (d->n) {
        int k = utf8_length(d->held, (size_t)d->n), cut = k;
        if (!k && utf8_begins(d->held, d->n)) return out;
        if (k) bytes_put(&out, d->held, (size_t)k);
        else {
            bytes_put(&out, "\xef\xbf\xbd", 3);
            cut = d->n > 1 ? d->n - 1 : 1;              // without the newest byte it was a beginning
        }
        d->n -= cut;
        memmove(d->held, d->held + cut, (size_t)d->n);
    }
    return out;
}
static char *decode_token(Decoder *d, int id, char *out) {          // appends what id completes to the stb array out
    int n;
    const char *s = tokenizer_bytes(d->t, id, &n);
    if (d->skip_special && tokenizer_is_special(d->t, id)) return out;
    for (int i = 0; i < n; i++) {
        int drop = !d->started && d->t->dec_strip && s[i] == ' ';   // SentencePiece: the blank put before the text
        d->started = 1;
        if (!drop) out = decode_byte(d, s[i], out);
    }
    return out;
}
static char *decode_flush(Decoder *d, char *out) {
    if (d->n) bytes_put(&out, "\xef\xbf\xbd", 3);
    d->n = 0;
    return out;
}

// ---- Loading: what every format shares
static void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    arrfree(t->piece); arrfree(t->chars); arrfree(t->added); arrfree(t->norm); arrfree(t->split);
    free(t->by_text); free(t->merges.slot); free(t->trie[0].slot); free(t->trie[1].slot);
    free(t);
}
static Tokenizer *tokenizer_new(size_t n) {             // room for about n pieces
    Tokenizer *t = xcalloc(1, sizeof *t);
    unicode_load();
    t->unk = t->bos = t->eos = -1;
    for (t->n_by_text = 64; t->n_by_text < 2 * n + 2; t->n_by_text *= 2);
    t->by_text = xmalloc(t->n_by_text * sizeof(int));
    memset(t->by_text, 255, t->n_by_text * sizeof(int));
    memset(t->byte_id, 255, sizeof t->byte_id);
    return t;
}
static int shown(size_t n) { return n > 100 ? 100 : (int)n; }       // bytes of a piece that a message shows
static int piece_add(Tokenizer *t, int64_t id, const char *s, size_t n, int flags, char err[512]) {
    size_t limit = t->n_by_text + 1024, old = arrlenu(t->piece), slot = text_slot(t, s, n), k = 0;
    while (k < n && utf8_length(s + k, n - k)) k += (size_t)utf8_length(s + k, n - k);
    if (k < n || (flags & PIECE_ADDED && memchr(s, 0, n)))
        REFUSE("token %lld is not UTF-8, or holds a NUL", (long long)id);
    if (id < 0 || (uint64_t)id >= limit)
        REFUSE("token '%.*s' has id %lld: expected 0..%zu", shown(n), s, (long long)id, limit - 1);
    if (t->by_text[slot] >= 0 && t->by_text[slot] != id)
        REFUSE("token '%.*s' has two ids, %d and %lld", shown(n), s, t->by_text[slot], (long long)id);
    if ((size_t)id < old && t->piece[id].flags && t->by_text[slot] != id)
        REFUSE("id %lld belongs to two tokens, '%.100s' and '%.*s'", (long long)id, t->chars + t->piece[id].text, shown(n), s);
    if (t->by_text[slot] == id) {
        if (t->piece[id].flags & flags) REFUSE("token '%.*s' is listed twice", shown(n), s);
        t->piece[id].flags |= flags;
        return 0;
    }
    if ((size_t)id >= old) {
        arrsetlen(t->piece, (size_t)id + 1);
        memset(t->piece + old, 0, ((size_t)id + 1 - old) * sizeof(Piece));
    }
    t->piece[id] = (Piece){ .text = arrlenu(t->chars), .n_text = (int)n, .flags = PIECE_USED | flags };
    bytes_put(&t->chars, s, n);
    arrput(t->chars, 0);
    t->by_text[slot] = (int)id;
    return 0;
}
static int model_id(const Tokenizer *t, const char *s, size_t n) {  // id in the BPE vocabulary, -1: none
    int id = text_id(t, s, n);
    return id >= 0 && t->piece[id].flags & PIECE_MODEL ? id : -1;
}
static void byte_ids(Tokenizer *t) {
    for (int b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        t->byte_id[b] = model_id(t, name, 6);
    }
}
// Puts added token `index` into the trie of its kind; the normalized ones as the normalizer writes them.
static void trie_add(Tokenizer *t, int index, int normalized) {
    const Piece *p = &t->piece[t->added[index].id];
    char *text = NULL, *spare = NULL;
    bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
    if (normalized) normalize(t, &text, &spare, 1);
    int64_t node = 0, to;
    for (size_t i = 0; i < arrlenu(text); i++, node = to) {
        uint64_t key = (uint64_t)node << 9 | (unsigned char)text[i];
        if ((to = map_get(&t->trie[normalized], key)) < 0) map_put(&t->trie[normalized], key, to = ++t->nodes[normalized]);
    }
    map_put(&t->trie[normalized], (uint64_t)node << 9 | 256, index);
    t->starts[normalized][(unsigned char)text[0]] = 1;
    arrfree(text); arrfree(spare);
}
static void decode_piece(Tokenizer *t, int id, char **text, char **out) {      // text: what the piece stands for; both stb arrays
    const Piece *p = &t->piece[id];
    int k, b = -1, mapped = t->dec_byte_level && !(p->flags & PIECE_ADDED), n = (int)arrlen(*text);
    if (t->dec_bytes) for (b = 255; b >= 0 && t->byte_id[b] != id; b--);
    if (b >= 0) { arrput(*out, (char)b); return; }
    for (int i = 0, c; i < n && mapped; i += k) {
        if ((c = char_byte(char_code(*text + i, (size_t)(n - i), &k))) >= 0) arrput(*out, (char)c);
        else { mapped = 0; arrsetlen(*out, 0); }        // a piece with a character outside the byte alphabet stands for itself
    }
    if (mapped) return;
    bytes_put(out, *text, (size_t)n);
    if (t->dec_space) replace_all(out, text, BLANK_MARK, " ");
}
static void decode_table(Tokenizer *t) {                // the decoded form of every piece, from the decoder's flags
    char *text = NULL, *out = NULL;
    for (int id = 0; id < tokenizer_size(t); id++) {
        Piece *p = &t->piece[id];
        arrsetlen(text, 0); arrsetlen(out, 0);
        bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
        if (p->flags & PIECE_NORMALIZED) normalize(t, &text, &out, 1);
        arrsetlen(out, 0);
        decode_piece(t, id, &text, &out);
        p->bytes = arrlenu(t->chars);
        p->n_bytes = (int)arrlen(out);
        bytes_put(&t->chars, out, arrlenu(out));
    }
    arrfree(text); arrfree(out);
}

// ---- Loading tokenizer.json. Each reader takes one member; a NULL or null member is legal where the format says so.
static int json_is(const Json *j, int type) { return j && j->type == type; }
static int json_none(const Json *j) { return !j || j->type == JSON_NULL; }
static int json_flag(const Json *obj, const char *key, int absent) {            // 2: there, and no bool
    const Json *j = json_get(obj, key);
    return json_none(j) ? absent : j->type == JSON_BOOL ? (int)j->i : 2;
}
static const char *json_text(const Json *obj, const char *key) {                // "": absent or no text
    const Json *j = json_get(obj, key);
    return json_is(j, JSON_STRING) && strlen(j->str) == j->len ? j->str : "";
}
static int tok_refuse(char err[512], const char *where, const Json *obj) {      // for every type that is not done here
    const char *type = json_text(obj, "type");
    REFUSE(*type ? "%s of type '%.100s' is not supported" : "%s without a type is not supported", where, type);
}

static int load_vocab(Tokenizer *t, const Json *vocab, char err[512]) {
    for (int i = 0; i < vocab->n; i++) {
        const Json *id = &vocab->item[i];
        if (id->type != JSON_NUMBER || !id->is_int) REFUSE("model.vocab: the id of '%.100s' is no integer", vocab->key[i]);
        if (piece_add(t, id->i, vocab->key[i], strlen(vocab->key[i]), PIECE_MODEL, err)) return -1;
    }
    return 0;
}
static int merge_add(Tokenizer *t, int rank, const char *a, size_t na, const char *b, size_t nb, char **both, char err[512]) {
    arrsetlen(*both, 0);
    bytes_put(both, a, na);
    bytes_put(both, b, nb);
    int left = model_id(t, a, na), right = model_id(t, b, nb), into = model_id(t, *both, na + nb);
    if (!na || !nb) REFUSE("model.merges[%d] has an empty side", rank);
    const char *missing = left < 0 ? a : right < 0 ? b : *both;
    size_t n = left < 0 ? na : right < 0 ? nb : na + nb;
    if (left < 0 || right < 0 || into < 0)
        REFUSE("model.merges[%d] needs '%.*s', which is not in the vocabulary", rank, shown(n), missing);
    map_put(&t->merges, (uint64_t)left << 32 | (uint64_t)right, (int64_t)rank << 32 | into);
    return 0;
}
static int load_merges(Tokenizer *t, const Json *merges, char err[512]) {       // "a b", or ["a", "b"]; rank = index
    char *both = NULL;
    int bad = 0;
    for (int i = 0; i < merges->n && !bad; i++) {
        const Json *m = &merges->item[i];
        char *gap = m->type == JSON_STRING && m->len ? memchr(m->str, ' ', m->len) : NULL;
        if (gap && !memchr(gap + 1, ' ', m->len - (size_t)(gap + 1 - m->str)))
            bad = merge_add(t, i, m->str, (size_t)(gap - m->str), gap + 1, m->len - (size_t)(gap + 1 - m->str), &both, err);
        else if (m->type == JSON_ARRAY && m->n == 2 && m->item[0].type == JSON_STRING && m->item[1].type == JSON_STRING)
            bad = merge_add(t, i, m->item[0].str, m->item[0].len, m->item[1].str, m->item[1].len, &both, err);
        else bad = tok_error(err, "model.merges[%d]: expected \"left right\" or [\"left\", \"right\"]", i);
    }
    arrfree(both);
    return bad;
}
static int load_model(Tokenizer *t, const Json *m, char err[512]) {
    static const char *const affix[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    const Json *vocab = json_get(m, "vocab"), *merges = json_get(m, "merges"), *unk = json_get(m, "unk_token");
    const Json *dropout = json_get(m, "dropout");
    if (!json_none(json_get(m, "type")) && strcmp(json_text(m, "type"), "BPE")) return tok_refuse(err, "a model", m);
    if (!json_is(vocab, JSON_OBJECT) || !vocab->n) REFUSE("model.vocab: expected an object with tokens");
    if (!json_is(merges, JSON_ARRAY) || !merges->n) REFUSE("model.merges: expected a list with merges");
    for (int i = 0; i < 2; i++)
        if (!json_none(json_get(m, affix[i])) && (!json_is(json_get(m, affix[i]), JSON_STRING) || json_get(m, affix[i])->len))
            REFUSE("model.%s is not supported", affix[i]);
    if (!json_none(dropout) && (dropout->type != JSON_NUMBER || dropout->num != 0)) REFUSE("model.dropout is not supported");
    t->ignore_merges = json_flag(m, "ignore_merges", 0);
    t->byte_fallback = json_flag(m, "byte_fallback", 0);
    t->fuse_unk = json_flag(m, "fuse_unk", 0);
    if (t->ignore_merges > 1 || t->byte_fallback > 1 || t->fuse_unk > 1)
        REFUSE("model: ignore_merges, byte_fallback and fuse_unk are true or false");
    if (load_vocab(t, vocab, err) || load_merges(t, merges, err)) return -1;
    byte_ids(t);
    if (json_none(unk)) return 0;
    t->unk = unk->type == JSON_STRING ? model_id(t, unk->str, unk->len) : -1;
    return t->unk >= 0 ? 0 : tok_error(err, "model.unk_token is not in the vocabulary");
}

// DeepSeek's <｜User｜> and other turn marks are not "special" in their files, but a user must not be able to write them either.
static int looks_special(const char *s, size_t n) {
    return n > 4 && (!strncmp(s, "<|", 2) || !strncmp(s, "<｜", 4)) && s[n - 1] == '>';
}
static int load_added(Tokenizer *t, const Json *list, char err[512]) {
    if (json_none(list)) return 0;
    if (list->type != JSON_ARRAY) REFUSE("added_tokens: expected a list");
    for (int i = 0; i < list->n; i++) {
        const Json *j = &list->item[i], *id = json_get(j, "id"), *content = json_get(j, "content");
        int special = json_flag(j, "special", 0), normalized = json_flag(j, "normalized", !special);
        AddedToken a = { .lstrip = json_flag(j, "lstrip", 0), .rstrip = json_flag(j, "rstrip", 0) };
        if (!json_is(id, JSON_NUMBER) || !id->is_int) REFUSE("added_tokens[%d].id is not an integer", i);
        if (!json_is(content, JSON_STRING) || !content->len) REFUSE("added_tokens[%d].content is no text, or empty", i);
        if (special > 1 || normalized > 1 || a.lstrip > 1 || a.rstrip > 1)
            REFUSE("added_tokens[%d]: a flag is neither true nor false", i);
        if (json_flag(j, "single_word", 0)) REFUSE("added token '%.100s': single_word is not supported", content->str);
        int flags = PIECE_ADDED | (special ? PIECE_SPECIAL : 0) | (normalized ? PIECE_NORMALIZED : 0);
        if (piece_add(t, id->i, content->str, content->len, flags, err)) return -1;
        a.id = (int)id->i;
        a.guarded = special || looks_special(content->str, content->len);
        arrput(t->added, a);
        trie_add(t, i, normalized);
    }
    return 0;
}

static int load_normalizer(Tokenizer *t, const Json *n, int depth, char err[512]) {
    const char *type = json_text(n, "type"), *from = json_text(json_get(n, "pattern"), "String"), *to = json_text(n, "content");
    NormStep step = { .kind = NORM_NFC };
    if (json_none(n)) return 0;
    if (!strcmp(type, "Sequence") && json_is(json_get(n, "normalizers"), JSON_ARRAY) && depth < 4) {
        const Json *list = json_get(n, "normalizers");
        for (int i = 0; i < list->n; i++) if (load_normalizer(t, &list->item[i], depth + 1, err)) return -1;
        return 0;
    }
    if (!strcmp(type, "Prepend")) { step.kind = NORM_PREPEND; to = json_text(n, "prepend"); }
    else if (!strcmp(type, "Replace")) step.kind = NORM_REPLACE;
    else if (strcmp(type, "NFC")) return tok_refuse(err, "a normalizer", n);
    if (step.kind == NORM_REPLACE && (!*from || strlen(from) >= sizeof step.from))
        REFUSE("normalizer Replace: only a short pattern {\"String\": ...} is supported");
    if (step.kind != NORM_NFC && (!*to || strlen(to) >= sizeof step.to)) REFUSE("normalizer %s: only a short text is supported", type);
    if (arrlen(t->norm) == MAX_STEPS) REFUSE("normalizer: more than %d steps are not supported", MAX_STEPS);
    if (step.kind == NORM_REPLACE) strcpy(step.from, from);
    if (step.kind != NORM_NFC) strcpy(step.to, to);
    arrput(t->norm, step);
    return 0;
}

// The patterns as tokenizer.json files write them. Equal text, or refused.
#define NUMBERS_AND_SIGNS "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define CONTRACTIONS_AND_WORDS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define TEKKEN_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define TEKKEN_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
static const struct { const char *regex; int split; } split_patterns[] = {
    { CONTRACTIONS_AND_WORDS "\\p{N}{1,3}" NUMBERS_AND_SIGNS, SPLIT_LLAMA3 },
    { CONTRACTIONS_AND_WORDS "\\p{N}" NUMBERS_AND_SIGNS, SPLIT_QWEN2 },
    { "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2 },
    { "[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "*" TEKKEN_LOWER "+|[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "+" TEKKEN_LOWER "*"
      "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", SPLIT_TEKKEN },
};
static int load_split(Tokenizer *t, const Json *p, char err[512]) {
    const char *regex = json_text(json_get(p, "pattern"), "Regex");
    if (strcmp(json_text(p, "behavior"), "Isolated") || json_flag(p, "invert", 0))
        REFUSE("pre_tokenizer Split: only behavior Isolated without invert is supported");
    for (size_t i = 0; i < sizeof split_patterns / sizeof *split_patterns; i++)
        if (!strcmp(regex, split_patterns[i].regex)) { arrput(t->split, split_patterns[i].split); return 0; }
    REFUSE("pre_tokenizer Split: this pattern is not supported: %.400s", regex);
}
static int load_metaspace(Tokenizer *t, const Json *p, char err[512]) {
    const char *scheme = json_text(p, "prepend_scheme");
    int split = json_flag(p, "split", 1), prefix = json_flag(p, "add_prefix_space", 1);
    if (strcmp(json_text(p, "replacement"), BLANK_MARK)) REFUSE("pre_tokenizer Metaspace: only U+2581 as replacement is supported");
    if (t->meta || arrlen(t->split) || split > 1) REFUSE("pre_tokenizer Metaspace: supported only as the first step");
    t->meta = !strcmp(scheme, "first") ? META_FIRST : !strcmp(scheme, "never") || !prefix ? META_NEVER : META_ALWAYS;
    if (*scheme && t->meta == META_ALWAYS && strcmp(scheme, "always"))
        REFUSE("pre_tokenizer Metaspace: prepend_scheme '%.50s' is not supported", scheme);
    if (split) arrput(t->split, SPLIT_METASPACE);
    return 0;
}
static int load_pre_tokenizer(Tokenizer *t, const Json *p, int depth, char err[512]) {
    const char *type = json_text(p, "type");
    if (json_none(p)) return 0;
    if (t->byte_level) REFUSE("pre_tokenizer: a step after ByteLevel is not supported");
    if (arrlen(t->split) == MAX_STEPS) REFUSE("pre_tokenizer: more than %d steps are not supported", MAX_STEPS);
    if (!strcmp(type, "Sequence") && json_is(json_get(p, "pretokenizers"), JSON_ARRAY) && depth < 4) {
        const Json *list = json_get(p, "pretokenizers");
        for (int i = 0; i < list->n; i++) if (load_pre_tokenizer(t, &list->item[i], depth + 1, err)) return -1;
        return 0;
    }
    if (!strcmp(type, "Split")) return load_split(t, p, err);
    if (!strcmp(type, "Metaspace")) return load_metaspace(t, p, err);
    if (!strcmp(type, "Digits")) {
        int single = json_flag(p, "individual_digits", 0);
        if (single > 1) REFUSE("pre_tokenizer Digits: individual_digits is neither true nor false");
        arrput(t->split, single ? SPLIT_DIGITS : SPLIT_NUMBERS);
        return 0;
    }
    if (strcmp(type, "ByteLevel")) return tok_refuse(err, "a pre_tokenizer", p);
    int regex = json_flag(p, "use_regex", 1);
    if (json_flag(p, "add_prefix_space", 1)) REFUSE("pre_tokenizer ByteLevel: add_prefix_space is not supported");
    if (regex > 1) REFUSE("pre_tokenizer ByteLevel: use_regex is neither true nor false");
    if (t->meta) REFUSE("pre_tokenizer ByteLevel is not supported after Metaspace");
    if (regex) arrput(t->split, SPLIT_GPT2);
    t->byte_level = 1;
    return 0;
}

static int load_decoder(Tokenizer *t, const Json *d, int depth, char err[512]) {
    const char *type = json_text(d, "type");
    if (json_none(d)) return 0;
    if (!strcmp(type, "Sequence") && json_is(json_get(d, "decoders"), JSON_ARRAY) && depth < 4) {
        const Json *list = json_get(d, "decoders");
        for (int i = 0; i < list->n; i++) if (load_decoder(t, &list->item[i], depth + 1, err)) return -1;
        return 0;
    }
    if (!strcmp(type, "ByteLevel")) t->dec_byte_level = 1;
    else if (!strcmp(type, "ByteFallback")) t->dec_bytes = 1;
    else if (!strcmp(type, "Metaspace")) {
        t->dec_space = 1;
        t->dec_strip = strcmp(json_text(d, "prepend_scheme"), "never") && json_flag(d, "add_prefix_space", 1);
    } else if (!strcmp(type, "Replace")) {
        if (strcmp(json_text(json_get(d, "pattern"), "String"), BLANK_MARK) || strcmp(json_text(d, "content"), " "))
            REFUSE("decoder Replace: only U+2581 to a blank is supported");
        t->dec_space = 1;
    } else if (!strcmp(type, "Strip")) {
        const Json *start = json_get(d, "start"), *stop = json_get(d, "stop");
        int one = json_is(start, JSON_NUMBER) && (start->num == 0 || start->num == 1);
        one &= !json_is(stop, JSON_NUMBER) || stop->num == 0;
        if (strcmp(json_text(d, "content"), " ") || !one) REFUSE("decoder Strip: only one blank at the start is supported");
        t->dec_strip = start->num == 1;
    } else if (strcmp(type, "Fuse")) return tok_refuse(err, "a decoder", d);
    return 0;
}

static int load_post_processor(Tokenizer *t, const Json *p, int depth, char err[512]) {
    const char *type = json_text(p, "type");
    const Json *list = json_get(p, !strcmp(type, "Sequence") ? "processors" : "single");
    if (json_none(p) || !strcmp(type, "ByteLevel")) return 0;
    if (!json_is(list, JSON_ARRAY) || depth > 3) return tok_refuse(err, "a post_processor", p);
    if (!strcmp(type, "Sequence")) {
        for (int i = 0; i < list->n; i++) if (load_post_processor(t, &list->item[i], depth + 1, err)) return -1;
        return 0;
    }
    if (strcmp(type, "TemplateProcessing")) return tok_refuse(err, "a post_processor", p);
    for (int i = 0, seen = 0; i < list->n; i++) {       // [BOS, text]
        const Json *special = json_get(&list->item[i], "SpecialToken");
        if (!special) { seen = 1; continue; }
        const char *name = json_text(special, "id");
        const Json *ids = json_get(json_get(json_get(p, "special_tokens"), name), "ids");
        if (seen || t->add_bos) REFUSE("post_processor: only one token before the text is supported, not '%.100s' as well", name);
        if (!json_is(ids, JSON_ARRAY) || ids->n != 1 || !ids->item[0].is_int ||
            ids->item[0].i < 0 || ids->item[0].i >= tokenizer_size(t))
            REFUSE("post_processor: '%.100s' has no id of the vocabulary", name);
        t->bos = (int)ids->item[0].i;
        t->add_bos = 1;
    }
    return 0;
}

static Tokenizer *load_json(const Json *j, char err[512]) {
    const Json *model = json_get(j, "model"), *vocab = json_get(model, "vocab"), *added = json_get(j, "added_tokens");
    if (!json_is(model, JSON_OBJECT)) { tok_error(err, "no 'model' inside: expected a tokenizer.json"); return NULL; }
    Tokenizer *t = tokenizer_new((vocab ? (size_t)vocab->n : 0) + (added ? (size_t)added->n : 0));
    if (load_normalizer(t, json_get(j, "normalizer"), 0, err) || load_pre_tokenizer(t, json_get(j, "pre_tokenizer"), 0, err) ||
        load_model(t, model, err) || load_added(t, added, err) ||
        load_decoder(t, json_get(j, "decoder"), 0, err) || load_post_processor(t, json_get(j, "post_processor"), 0, err)) {
        tokenizer_free(t);
        return NULL;
    }
    decode_table(t);
    return t;
}

// ---- Loading a SentencePiece tokenizer.model: a protobuf of pieces (text, score, type) and two settings messages.
typedef struct { const unsigned char *p, *end; int bad; } Proto;
typedef struct { int field, wire; uint64_t num; Proto sub; } ProtoField;        // sub: the bytes of wire type 2

static uint64_t proto_varint(Proto *b) {
    uint64_t x = 0;
    for (int shift = 0; shift < 64 && b->p < b->end; shift += 7) {
        x |= (uint64_t)(*b->p & 127) << shift;
        if (!(*b->p++ & 128)) return x;
    }
    b->bad = 1;
    return 0;
}
static int proto_next(Proto *b, ProtoField *f) {        // 0: the end, or malformed (b->bad)
    if (b->p == b->end || b->bad) return 0;
    uint64_t tag = proto_varint(b), left;
    *f = (ProtoField){ .field = (int)(tag >> 3 & 0x1fffffff), .wire = (int)(tag & 7) };
    if (f->wire == 0 || f->wire == 2) f->num = proto_varint(b);
    left = (uint64_t)(b->end - b->p);
    uint64_t size = f->wire == 0 ? 0 : f->wire == 1 ? 8 : f->wire == 2 ? f->num : f->wire == 5 ? 4 : UINT64_MAX;
    if (b->bad || size > left) { b->bad = 1; return 0; }
    f->sub = (Proto){ b->p, b->p + size, 0 };
    if (f->wire == 5) { uint32_t x; memcpy(&x, b->p, 4); f->num = x; }
    b->p += size;
    return 1;
}

typedef struct { float score; int id; } Scored;
static int scored_order(const void *a, const void *b) {             // best score first; ids keep the order of equals stable
    const Scored *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score ? 1 : -1) : x->id - y->id;
}
enum { SP_NORMAL = 1, SP_UNKNOWN, SP_CONTROL, SP_USER, SP_UNUSED, SP_BYTE };

static int load_sp_piece(Tokenizer *t, int id, Proto b, Scored **scored, char err[512]) {
    Proto text = { 0 };
    ProtoField f;
    int type = SP_NORMAL;
    float score = 0;
    while (proto_next(&b, &f)) {
        if (f.field == 1 && f.wire == 2) text = f.sub;
        if (f.field == 2 && f.wire == 5) { uint32_t x = (uint32_t)f.num; memcpy(&score, &x, 4); }
        if (f.field == 3 && f.wire == 0) type = f.num > 6 ? 0 : (int)f.num;
    }
    size_t n = (size_t)(text.end - text.p);
    if (b.bad || !n || n > INT_MAX || !isfinite(score)) REFUSE("piece %d is malformed (text, score or type)", id);
    if (type < SP_NORMAL || type == SP_UNUSED) REFUSE("piece %d has type %d, which is not supported", id, type);
    int special = type == SP_UNKNOWN || type == SP_CONTROL, added = special || type == SP_USER;
    int flags = special ? PIECE_ADDED | PIECE_SPECIAL : added ? PIECE_ADDED : PIECE_MODEL;
    if (piece_add(t, id, (const char *)text.p, n, flags, err)) return -1;
    if (type == SP_UNKNOWN) t->unk = id;
    if (type == SP_NORMAL) { Scored s = { score, id }; arrput(*scored, s); }
    if (added) { AddedToken a = { .id = id, .guarded = special }; arrput(t->added, a); }
    return 0;
}
static int load_sp_settings(Tokenizer *t, Proto trainer, Proto norm, int *prefix, char err[512]) {
    static const char *const kind[] = { "?", "unigram", "BPE", "word", "char" };
    ProtoField f;
    uint64_t type = 1, strip = 1;                       // the format's defaults
    *prefix = 1;
    while (proto_next(&trainer, &f)) {
        if (f.field == 3 && f.wire == 0) type = f.num;
        if (f.field == 35 && f.wire == 0) t->byte_fallback = f.num != 0;
        if (f.field == 24 && f.wire == 0 && f.num) REFUSE("treat_whitespace_as_suffix is not supported");
    }
    while (proto_next(&norm, &f)) {
        if (f.field == 2 && f.wire == 2 && f.sub.p < f.sub.end) REFUSE("a precompiled normalizer is not supported, only 'identity'");
        if (f.field == 3 && f.wire == 0) *prefix = f.num != 0;
        if (f.field == 4 && f.wire == 0) strip = f.num;
        if (f.field == 5 && f.wire == 0 && !f.num) REFUSE("escape_whitespaces = false is not supported");
    }
    if (trainer.bad || norm.bad) REFUSE("the settings are malformed");
    if (type != 2) REFUSE("a SentencePiece model of type '%s' is not supported, only BPE", kind[type < 5 ? type : 0]);
    return strip ? tok_error(err, "remove_extra_whitespaces is not supported") : 0;
}
// SentencePiece joins the neighbours whose joined text has the best score, so every way to cut a piece in two pieces of the
// vocabulary is a merge, and its rank is the place of the score among all scores (equal scores: equal rank, leftmost first).
static void sp_merges(Tokenizer *t, Scored *scored) {
    int rank = -1;
    if (arrlen(scored)) qsort(scored, arrlenu(scored), sizeof *scored, scored_order);
    for (size_t i = 0; i < arrlenu(scored); i++) {
        const Piece *p = &t->piece[scored[i].id];
        const char *s = t->chars + p->text;
        if (!i || scored[i].score != scored[i - 1].score) rank++;
        for (int cut = 0, k; cut < p->n_text; cut += k) {
            char_code(s + cut, (size_t)(p->n_text - cut), &k);
            int left = model_id(t, s, (size_t)cut), right = model_id(t, s + cut, (size_t)(p->n_text - cut));
            if (left < 0 || right < 0) continue;
            map_put(&t->merges, (uint64_t)left << 32 | (uint64_t)right, (int64_t)rank << 32 | scored[i].id);
        }
    }
}
static Tokenizer *load_sentencepiece(const char *data, size_t n, char err[512]) {
    Proto file = { (const unsigned char *)data, (const unsigned char *)data + n, 0 }, b = file, trainer = { 0 }, norm = { 0 };
    ProtoField f;
    size_t n_pieces = 0;
    while (proto_next(&b, &f)) {
        if (f.wire != 2) continue;
        if (f.field == 1) n_pieces++;
        if (f.field == 2) trainer = f.sub;
        if (f.field == 3) norm = f.sub;
    }
    if (b.bad || !n_pieces) { tok_error(err, b.bad ? "not a SentencePiece model, or cut short" : "no pieces inside"); return NULL; }
    Tokenizer *t = tokenizer_new(n_pieces);
    Scored *scored = NULL;
    int id = 0, prefix, bad = load_sp_settings(t, trainer, norm, &prefix, err);
    for (b = file; !bad && proto_next(&b, &f); ) if (f.field == 1 && f.wire == 2) bad = load_sp_piece(t, id++, f.sub, &scored, err);
    if (!bad) {
        byte_ids(t);
        sp_merges(t, scored);
        for (int i = 0; i < (int)arrlen(t->added); i++) trie_add(t, i, !t->added[i].guarded);       // before t->norm is filled: user
        if (prefix) arrput(t->norm, ((NormStep){ NORM_PREPEND, "", BLANK_MARK }));              // symbols are normalized already
        arrput(t->norm, ((NormStep){ NORM_REPLACE, " ", BLANK_MARK }));
        t->fuse_unk = t->dec_space = t->dec_bytes = 1;
        t->dec_strip = prefix;
        t->add_bos = (t->bos = text_id(t, "<s>", 3)) >= 0;
        decode_table(t);
    }
    arrfree(scored);
    if (bad) { tokenizer_free(t); return NULL; }
    return t;
}

// ---- Loading a folder
static int token_named(const Tokenizer *t, const Json *config, const char *key, int otherwise) {
    const Json *j = json_get(config, key);              // "text", or {"content": "text"}
    if (json_is(j, JSON_OBJECT)) j = json_get(j, "content");
    int id = json_is(j, JSON_STRING) ? text_id(t, j->str, j->len) : -1;
    return id >= 0 ? id : otherwise;
}
static int load_tokenizer_config(Tokenizer *t, const char *path, int sentencepiece, char err[512]) {
    char why[256];
    size_t n;
    char *text = file_exists(path) ? read_file(path, &n, why) : NULL;
    Json *j = text ? json_parse(text, n, why) : NULL;
    free(text);
    if (file_exists(path) && !j) REFUSE("%s: %s", path, why);
    int add = json_flag(j, "add_bos_token", t->add_bos), legacy = json_flag(j, "legacy", 1);
    t->bos = token_named(t, j, "bos_token", t->bos);
    t->eos = token_named(t, j, "eos_token", text_id(t, "</s>", 4));
    t->add_bos = add == 1 && t->bos >= 0;
    // Older Llama tokenizers treat the text after every special token as a new text, with a blank before it ("legacy").
    if (sentencepiece && !legacy && t->norm[0].kind == NORM_PREPEND) t->norm[0].kind = NORM_PREPEND_START;
    json_free(j);
    return add > 1 || legacy > 1 ? tok_error(err, "%s: add_bos_token and legacy are true or false", path) : 0;
}

// path: a folder (tokenizer.json, else tokenizer.model) or one of the two files; tokenizer_config.json beside it is read too.
static Tokenizer *tokenizer_load(const char *path, char err[512]) {
    char file[1200], config[1300], why[256], *text;
    size_t n;
    struct stat st;
    int folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode), sentencepiece;
    if (strlen(path) > 1100) { tok_error(err, "the path of the tokenizer is too long"); return NULL; }
    snprintf(file, sizeof file, folder ? "%s/tokenizer.json" : "%s", path);
    if (folder && !file_exists(file)) snprintf(file, sizeof file, "%s/tokenizer.model", path);
    if (folder && !file_exists(file)) { tok_error(err, "%s: no tokenizer.json and no tokenizer.model here", path); return NULL; }
    const char *slash = strrchr(file, '/');
    snprintf(config, sizeof config, "%.*stokenizer_config.json", slash ? (int)(slash + 1 - file) : 0, file);
    if (!(text = read_file(file, &n, why))) { tok_error(err, "%s", why); return NULL; }
    sentencepiece = n > 0 && text[0] == '\n' && text[strspn(text, " \t\r\n")] != '{';         // the tag of a first piece
    Json *j = sentencepiece ? NULL : json_parse(text, n, why);
    char reason[512] = "";
    if (!sentencepiece && !j) snprintf(reason, sizeof reason, "%s", why);
    Tokenizer *t = sentencepiece ? load_sentencepiece(text, n, reason) : j ? load_json(j, reason) : NULL;
    json_free(j);
    free(text);
    if (!t) { tok_error(err, "%.200s: %.300s", file, reason); return NULL; }
    if (load_tokenizer_config(t, config, sentencepiece, err)) { tokenizer_free(t); return NULL; }
    return t;
}

static const char *glue_bytes(const void *t, int id, int *len) { return tokenizer_bytes(t, id, len); }
static int glue_special(const void *t, int id) { return tokenizer_is_special(t, id); }
static void lychee_text(const Tokenizer *t) { token_text = (TokenText){ t, glue_bytes, glue_special }; }

// ==================================================================================================== 22 CHAT TEMPLATES
// What a model expects around the turns of a dialogue. Templates arrive as programs in the Jinja language; kvcomp runs none of
// them: it knows the texts of the families it supports, picks one by a substring of the program (or by name), and REFUSES the rest.
//
// A turn is rendered once and appended to the cache, never rendered again. Some templates rewrite history when they render the
// whole dialogue (Qwen3 and DeepSeek-R1 drop old thoughts, the newer Mistral moves the system text to the last question, Llama 2
// trims replies); a cache that only grows cannot follow, and the model sees what it really said.
//
// In the texts {bos} and {eos} stand for those tokens. Special tokens named by a template become their ids; the user's and the
// system's words never do, whatever they contain (unless parse_user, the option --parse-special).
enum { TRIM_NONE, TRIM_BOTH, TRIM_WHOLE };      // outer blanks: stay; go from system text and words; from the two as one
typedef struct {
    const char *name, *needs;               // a token without which the template makes no sense
    const char *open;                       // before everything
    const char *sys, *sys_end;              // around the system text. in_user: they stand after `user` of the first turn
    const char *user, *user_end;
    const char *head, *think, *no_think;    // opens the reply; then: thinking on, thinking off
    const char *end, *foot;                 // the token that ends a reply (the model makes it); what follows it
    const char *stops;                      // further tokens that end a reply, blank-separated
    const char *system;                     // the default system text; NULL: no system message unless one is given
    int in_user, always, trim;              // always: a system message even when it is empty; trim: TRIM_*
} TemplateText;

#define LLAMA3(label, lines, must) { .name = label, .needs = "<|start_header_id|>", .open = "{bos}", .trim = TRIM_BOTH, .always = must, \
    .sys = "<|start_header_id|>system<|end_header_id|>\n\n" lines, .sys_end = "<|eot_id|>", \
    .user = "<|start_header_id|>user<|end_header_id|>\n\n", .user_end = "<|eot_id|>", \
    .head = "<|start_header_id|>assistant<|end_header_id|>\n\n", .end = "<|eot_id|>", .stops = "<|eom_id|> <|end_of_text|>" }
#define LLAMA31_LINES "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"      // fixed: the same ids every day
#define CHATML(label, off) { .name = label, .needs = "<|im_start|>", .sys = "<|im_start|>system\n", .sys_end = "<|im_end|>\n", \
    .user = "<|im_start|>user\n", .user_end = "<|im_end|>\n", .head = "<|im_start|>assistant\n", .no_think = off, \
    .end = "<|im_end|>", .foot = "\n", .stops = "<|endoftext|>" }
#define MISTRAL(label, before, after) { .name = label, .needs = "{eos}", .open = "{bos}", .in_user = 1, .sys_end = "\n\n", \
    .user = before, .user_end = after, .end = "{eos}" }

static const TemplateText templates[] = {
    LLAMA3("llama3", "", 0), LLAMA3("llama3.1", LLAMA31_LINES, 1), LLAMA3("llama3.2", LLAMA31_LINES, 1),
    CHATML("chatml", NULL), CHATML("qwen3", "<think>\n\n</think>\n\n"),
    MISTRAL("mistral-v1", "[INST] ", " [/INST]"), MISTRAL("mistral-v1-spaced", " [INST] ", " [/INST]"),
    MISTRAL("mistral-v3", "[INST] ", "[/INST]"), MISTRAL("mistral-tekken", "[INST]", "[/INST]"),
    { .name = "llama2", .needs = "{eos}", .in_user = 1, .trim = TRIM_WHOLE, .sys = "<<SYS>>\n", .sys_end = "\n<</SYS>>\n\n",
      .user = "{bos}[INST] ", .user_end = " [/INST]", .end = "{eos}" },
    { .name = "tinyllama", .needs = "{eos}", .sys = "<|system|>\n", .sys_end = "{eos}\n", .user = "<|user|>\n", .user_end = "{eos}\n",
      .head = "<|assistant|>\n", .end = "{eos}", .foot = "\n" },
    { .name = "vicuna", .needs = "{eos}", .open = "{bos}", .sys_end = " ", .user = "USER: ", .user_end = " ", .head = "ASSISTANT:",
      .end = "{eos}", .system = "A chat between a curious user and an artificial intelligence assistant. "
                "The assistant gives helpful, detailed, and polite answers to the user's questions." },
    { .name = "deepseek-r1", .needs = "<｜User｜>", .open = "{bos}", .user = "<｜User｜>", .head = "<｜Assistant｜>",
      .think = "<think>\n", .no_think = "<think>\n\n</think>\n\n", .end = "{eos}", .stops = "<｜end▁of▁sentence｜>" },
    { .name = "none", .sys_end = "\n" },
};
enum { N_TEMPLATES = sizeof templates / sizeof *templates };

typedef struct {
    TemplateText x;
    char *system;               // the default system text, NULL: none
    int *stop;                  // stb array: ids that end a reply
    int parse_user;             // 1: the user's text may name special tokens (--parse-special)
} Template;

static void template_free(Template *tp) {
    if (!tp) return;
    free(tp->system);
    arrfree(tp->stop);
    free(tp);
}

static int piece_id(const Tokenizer *t, const char *s, int *len) {  // the {bos}, {eos} or longest special token at s, or -1
    int best = -1;
    *len = 5;
    if (!strncmp(s, "{bos}", 5)) return t->bos;
    if (!strncmp(s, "{eos}", 5)) return t->eos;
    *len = 0;
    for (int i = 0; i < (int)arrlen(t->added); i++) {
        const Piece *p = &t->piece[t->added[i].id];
        if (!t->added[i].guarded || p->n_text <= *len || strncmp(s, t->chars + p->text, (size_t)p->n_text)) continue;
        best = t->added[i].id;
        *len = p->n_text;
    }
    return best;
}

static char *text_copy(const char *s, size_t n) { char *c = memcpy(xmalloc(n + 1), s, n); c[n] = 0; return c; }

// ---- Picking a template
static const TemplateText *template_named(const char *name) {      // NULL: no such name
    for (int k = 0; k < N_TEMPLATES; k++) if (!strcmp(templates[k].name, name)) return &templates[k];
    return NULL;
}
static const TemplateText *template_detect(const char *jinja) {     // NULL: none of ours
    static const struct { const char *has, *also, *name; } rule[] = {           // the first that fits
        { "[SYSTEM_PROMPT]", "", "" },
        { "<|start_header_id|>", "strftime_now", "llama3.2" }, { "<|start_header_id|>", "Cutting Knowledge Date", "llama3.1" },
        { "<|start_header_id|>", "", "llama3" }, { "<｜Assistant｜>", "", "deepseek-r1" },
        { "<|im_start|>", "enable_thinking", "qwen3" }, { "<|im_start|>", "", "chatml" },
        { "[INST]", "<<SYS>>", "llama2" }, { "[INST]", "' [INST] '", "mistral-v1-spaced" }, { "[INST]", "\" [INST] \"", "mistral-v1-spaced" },
        { "[INST]", " [/INST]", "mistral-v1" }, { "[INST]", "[INST] ", "mistral-v3" }, { "[INST]", "", "mistral-tekken" },
        { "<|user|>", "eos_token", "tinyllama" }, { "USER:", "ASSISTANT:", "vicuna" },
    };
    for (size_t i = 0; i < sizeof rule / sizeof *rule; i++)
        if (strstr(jinja, rule[i].has) && strstr(jinja, rule[i].also)) return template_named(rule[i].name);
    return NULL;
}
// The default system text of a chatml program: the words it writes itself between "<|im_start|>system\n" and "<|im_end|>".
static char *chatml_system(const char *jinja) {
    static const char *const open[] = { "<|im_start|>system\\n", "<|im_start|>system\n" };
    for (int i = 0; i < 2; i++)
        for (const char *p = jinja, *end; (p = strstr(p, open[i])); ) {
            p += strlen(open[i]);
            size_t n = (end = strstr(p, "<|im_end|>")) ? (size_t)(end - p) : 0;
            if (n && strcspn(p, "'\"{}\\") >= n) return text_copy(p, n);
        }
    return NULL;
}

// The program of a folder: chat_template.jinja, else chat_template of tokenizer_config.json (a text, or a list of {name, template}
// of which "default" counts) -> malloc, "" when there is none, NULL and err when a file is broken.
static char *template_program(const char *dir, char err[512]) {
    char file[1200], why[256];
    size_t n;
    snprintf(file, sizeof file, "%.1100s/chat_template.jinja", dir);
    if (file_exists(file)) {
        char *text = read_file(file, &n, why);
        if (!text) tok_error(err, "%s", why);
        return text;
    }
    snprintf(file, sizeof file, "%.1100s/tokenizer_config.json", dir);
    if (!file_exists(file)) return text_copy("", 0);
    char *text = read_file(file, &n, why), *program = NULL;
    Json *j = text ? json_parse(text, n, why) : NULL;
    free(text);
    if (!j) { tok_error(err, "%s: %s", file, why); return NULL; }
    const Json *c = json_get(j, "chat_template");
    if (json_is(c, JSON_ARRAY)) {
        const Json *list = c;
        c = NULL;
        for (int i = 0; i < list->n; i++)
            if (!strcmp(json_text(&list->item[i], "name"), "default")) c = json_get(&list->item[i], "template");
        if (!c) tok_error(err, "%s: chat_template is a list without a \"default\"", file);
    } else if (json_none(c)) program = text_copy("", 0);
    if (json_is(c, JSON_STRING)) program = text_copy(c->str, c->len);
    else if (!program && c) tok_error(err, "%s: chat_template is neither a text nor a list", file);
    json_free(j);
    return program;
}

static int template_fits(Template *tp, const Tokenizer *t, char err[512]) {    // the tokens it needs, and its stop ids
    const char *needs[] = { tp->x.open, tp->x.user, tp->x.needs, tp->x.end };
    int id, len;
    for (int i = 0; i < 4; i++) {
        const char *s = needs[i] ? needs[i] : "";
        if (i < 2 && strncmp(s, "{bos}", 5)) continue;
        if (*s && (id = piece_id(t, s, &len)) < 0)
            REFUSE("chat template %s needs the token %.*s, which this tokenizer does not have", tp->x.name, i < 2 ? 5 : 100, s);
        if (i == 3 && *s) arrput(tp->stop, id);
    }
    for (const char *s = tp->x.stops ? tp->x.stops : ""; *s; s += strcspn(s, " "), s += strspn(s, " "))
        if ((id = text_id(t, s, strcspn(s, " "))) >= 0 && id != tp->stop[0]) arrput(tp->stop, id);
    return 0;
}

// name: one of ours, or the path of a Jinja program; NULL: what the folder says ("none" when it says nothing). NULL and err: refused.
static Template *template_load(const char *dir, const char *name, const Tokenizer *t, char err[512]) {
    const TemplateText *x = name ? template_named(name) : NULL;
    char *program = NULL, why[256];
    size_t n;
    if (!x && name && !(program = read_file(name, &n, why))) {
        int used = snprintf(err, 512, "chat template '%.200s' is neither a readable file nor one of", name);
        for (int k = 0; k < N_TEMPLATES; k++) used += snprintf(err + used, (size_t)(512 - used), " %s", templates[k].name);
        return NULL;
    }
    if (!x && !name && !(program = template_program(dir, err))) return NULL;
    if (!x) x = *program ? template_detect(program) : &templates[N_TEMPLATES - 1];
    if (!x) {
        tok_error(err, "this chat template is not supported: %.100s... (name one with --chat-template, or use --raw)", program);
        free(program);
        return NULL;
    }
    Template *tp = xcalloc(1, sizeof *tp);
    tp->x = *x;
    if (x->system) tp->system = text_copy(x->system, strlen(x->system));
    else if (program && x->needs && !strcmp(x->needs, "<|im_start|>")) tp->system = chatml_system(program);
    if (program && !strstr(program, "<｜Assistant｜><think>")) tp->x.think = NULL;        // R1's first releases
    free(program);
    if (template_fits(tp, t, err)) { template_free(tp); return NULL; }
    return tp;
}

// ---- Rendering a turn. Plain text collects until a token cuts it off, so words and the template's own text that touch are
// encoded together, as they are when the whole text is.
typedef struct {
    const Template *tp; const Tokenizer *t;
    char *plain;                // stb array: text not encoded yet
    int *ids, from;             // from: where this turn begins
    int at_start, special;      // special: the plain text may name special tokens
    struct { int at, *upto; } mark[2];          // two places: ids before it; while it stands in plain text, ids of that text up to it
} Render;

static void render_flush(Render *r) {
    int before = (int)arrlen(r->ids);
    if (!arrlen(r->plain)) return;
    r->ids = encode_at(r->t, r->plain, arrlenu(r->plain), r->special, r->at_start, r->ids);
    for (int k = 0; k < 2; k++) {                       // a mark stands after the ids that both encodings begin with
        int same = 0, *upto = r->mark[k].upto;
        while (same < (int)arrlen(upto) && before + same < (int)arrlen(r->ids) && upto[same] == r->ids[before + same]) same++;
        r->mark[k].at += same;
        if (upto) arrsetlen(upto, 0);
    }
    arrsetlen(r->plain, 0);
    r->at_start = r->special = 0;
}
static void render_piece(Render *r, const char *s) {    // text of the template
    for (int len, id; s && *s; s += len) {
        if ((id = piece_id(r->t, s, &len)) >= 0) {
            render_flush(r);
            arrput(r->ids, id);
            r->at_start = 0;
        } else {
            len = 1;
            arrput(r->plain, *s);
        }
    }
}
static void render_words(Render *r, const char *s, int trim_left, int trim_right) {    // text of a person
    size_t n = strlen(s);
    int k;
    while (trim_left && n && is_space(s, n, &k)) { s += k; n -= (size_t)k; }
    for (size_t b = n; trim_right && n; n = b) {
        for (b = n - 1; b && n - b < 4 && (s[b] & 0xc0) == 0x80; b--);
        if (!is_space(s + b, n - b, &k) || b + (size_t)k != n) break;
    }
    if (r->tp->parse_user) r->special = 1;
    bytes_put(&r->plain, s, n);
}
static void render_mark(Render *r, int k) {             // remember how many ids stand here
    r->mark[k].at = (int)arrlen(r->ids) - r->from;
    if (arrlen(r->plain)) r->mark[k].upto = encode_at(r->t, r->plain, arrlenu(r->plain), r->special, r->at_start, r->mark[k].upto);
}

// Appends the ids of one turn to the stb array ids and returns it. first: the dialogue begins, so BOS and the system message come
// before the words (system NULL: the template's default; "": none). Later: what closes the reply before; reply_closed says that its
// last token is in the cache. think: for models that can, 1 leaves thinking to the template, 0 turns it off. *n_sys, *n_foot, *n_head:
// leading ids that are BOS and system message, leading ids that close the reply before, trailing ids that open the next.
static int *template_turn(const Template *tp, const Tokenizer *t, int first, const char *system, const char *user, int think,
                          int reply_closed, int *ids, int *n_sys, int *n_foot, int *n_head) {
    const TemplateText *x = &tp->x;
    Render r = { .tp = tp, .t = t, .ids = ids, .from = (int)arrlen(ids), .at_start = first };
    int writes_bos = (x->open && !strncmp(x->open, "{bos}", 5)) || (x->user && !strncmp(x->user, "{bos}", 5));
    if (!system) system = tp->system ? tp->system : "";
    if (first) {
        if (t->add_bos && !writes_bos) arrput(r.ids, t->bos);
        render_piece(&r, x->open);
    } else {
        if (!reply_closed) render_piece(&r, x->end);
        render_piece(&r, x->foot);
        render_mark(&r, 0);
    }
    if (x->in_user) render_piece(&r, x->user);
    int spoken = first && (*system || x->always);
    if (spoken) {
        render_piece(&r, x->sys);
        render_words(&r, system, x->trim == TRIM_BOTH, x->trim == TRIM_BOTH);
        render_piece(&r, x->sys_end);
    }
    if (first) render_mark(&r, 0);
    if (!x->in_user) render_piece(&r, x->user);
    render_words(&r, user, x->trim == TRIM_BOTH || (x->trim == TRIM_WHOLE && !spoken), x->trim != TRIM_NONE);
    if (!x->head) render_mark(&r, 1);                   // no head: what ends the words opens the reply
    render_piece(&r, x->user_end);
    if (x->head) render_mark(&r, 1);
    render_piece(&r, x->head);
    render_piece(&r, think ? x->think : x->no_think);
    render_flush(&r);
    *n_head = (int)arrlen(r.ids) - r.from - r.mark[1].at;
    *n_sys = first ? r.mark[0].at : 0;
    *n_foot = first ? 0 : r.mark[0].at;
    arrfree(r.plain); arrfree(r.mark[0].upto); arrfree(r.mark[1].upto);
    return r.ids;
}

// ==================================================================================================== 23 MEMORY PLAN
// What a dialogue will take, before it takes it.

// What a dialogue of -c tokens takes, worked out from the shapes. Rows: what is kept, and one layer uncompressed where a method
// drops rows, because a prefill compresses layer by layer. Pass: the rooms of pass_cuda for a turn as long as -c, the largest
// there is, scores of every row where hooks choose rows, and a sparse prefill's sampled probabilities (line_batch_cuda); the CPU needs
// the same but for the halves, the partial sums and the second copy of a head that grows. Parts: index, bounds, adapter. PATS packs when a prefill is over: until
// then its rows are f16 rows, and counted as such.
MemoryPlan memory_plan(const Session *s) {
    const Config *c = s->c;
    int ctx = opt_int(s->opt, "ctx-size"), kept, hooks = s->rule != VIS_CAUSAL, evicts = 0, sparse = 0, b;
    if (!ctx) ctx = c->max_pos;
    size_t parts = 0;
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        hooks |= m->project || m->attend || m->commit;
        evicts |= m->evicts;
        sparse |= m->attend && m->role & ROLE_PREFILL;
        parts += m->plan ? m->plan(s, s->part[i].ms, ctx) : m->bytes ? m->bytes(s, s->part[i].ms) : 0;
    }
    kept = !evicts ? ctx : s->ratio >= 0 ? ctx - (int)(ctx * s->ratio) : s->budget && s->budget < ctx ? s->budget : ctx;
    b = s->batch < ctx ? s->batch : ctx;
    size_t row = s->fk->row_bytes(c->D) + s->fv->row_bytes(c->D), f = sizeof(float), n = hooks ? ctx : b, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    size_t step = KV_STEP, held = (kept + step - 1) / step * step, all = (ctx + step - 1) / step * step, wide = (size_t)c->F > HD ? (size_t)c->F : HD;
    size_t scores = (size_t)c->H * ctx * f, part = (512 + (n * c->H / 32 + c->G)) * 32 * (c->D + 2) * f;         // of attention without tensor cores: 512 pieces and one a block
    MemoryPlan p = { .weights = s->w->bytes, .parts = parts, .ctx = ctx };
    p.kv = ((c->L - 1) * held + all) * c->G * (row + sizeof(int));
    p.pass = (size_t)ctx * (c->C + c->D) * f + 2 * n * (HD + GD) * f + (size_t)b * (c->C + 2 * (size_t)c->F) * f + 2 * b * wide + part
           + 2 * n * c->H * f + (size_t)c->V * f + (size_t)ctx * (sizeof(Token) + sizeof(int)) + all * row + (hooks ? 3 * scores : 0) + (sparse ? 64 * scores < (size_t)1 << 30 ? 64 * scores : (size_t)1 << 30 : 0);
    p.pass += p.pass / 4;                                        // rooms grow by more than is asked for
    return p;
}

// ####################################################################################################
// PART III: WHAT PEOPLE USE IT THROUGH
// ####################################################################################################

// ==================================================================================================== 24 GENERATION AND RECORDS
// An App is what the command line opened: a model, a tokenizer, a template, one session, and the record of its turns.
// stdout gets generated text or the asked-for result; everything else goes to stderr.

typedef struct { int *pre, *dec; int n_sys, n_foot, n_head; } Turn;     // ids prefilled and ids decoded (stb_ds arrays)

typedef struct {
    Options *o;
    Config *c; Weights *w;
    Tokenizer *tok; Template *tp;       // NULL with --ids on a folder without a tokenizer; tp NULL: raw text
    Session *s;
    char *method;                       // the spec the session was opened with
    Turn *turn;                         // stb_ds array: the record; replayed by /method, /load and --session
    float *logits;                      // (V) after the last prefill or decode, a copy
    uint64_t rng;
    int closed;                         // 1: the reply's end-of-turn id is already in the cache
    double ttft;                        // seconds from the start of the last prefill to its logits
} App;

static volatile sig_atomic_t interrupts;        // Ctrl-C since the reply began
static int quiet;

// ---- progress: one line on stderr, rewritten; only on a terminal and only after a second
static double progress_start;
static int progress_shown;
static void progress(const char *what, double share) {
    if (quiet || !isatty(2)) return;
    if (share <= 0) { progress_start = now(); progress_shown = 0; return; }
    if (share >= 1) { if (progress_shown) fprintf(stderr, "\r\x1b[K"); progress_shown = 0; return; }
    if (now() - progress_start < 1) return;
    fprintf(stderr, "\r%s %3.0f %%", what, 100 * share);
    progress_shown = 1;
}

// ---- sampling: repeat penalty, top-k, top-p, min-p, temperature, in this order
typedef struct { float x; int id; } Cand;
static int cand_order(const void *a, const void *b) {
    const Cand *p = a, *q = b;
    return p->x < q->x ? 1 : p->x > q->x ? -1 : p->id - q->id;
}
static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) if (x[i] > x[best]) best = i;
    return best;
}
static void penalise(const App *a, float *x) {           // divide positive, multiply negative logits of recent ids, once each
    double penalty = opt_real(a->o, "repeat-penalty");
    int last = opt_int(a->o, "repeat-last-n"), n = a->s->n_tok;
    if (penalty == 1) return;
    int from = n > last ? n - last : 0;
    for (int i = from; i < n; i++) {
        int id = a->s->tok[i].id, again = id < 0;
        for (int j = from; j < i && !again; j++) again = a->s->tok[j].id == id;
        if (!again) x[id] = (float)(x[id] > 0 ? x[id] / penalty : x[id] * penalty);
    }
}
static int sample(App *a) {
    int V = a->c->V, k = opt_int(a->o, "top-k"), n = 0;
    double temp = opt_real(a->o, "temp"), top_p = opt_real(a->o, "top-p"), min_p = opt_real(a->o, "min-p"), sum = 0, seen = 0;
    size_t mark = scratch_mark(a->s);
    float *x = scratch(a->s, (size_t)V * sizeof *x);
    memcpy(x, a->logits, (size_t)V * sizeof *x);
    penalise(a, x);
    if (temp <= 0) { n = argmax(x, V); scratch_reset(a->s, mark); return n; }
    int *idx = scratch(a->s, (size_t)V * sizeof *idx);
    if (k <= 0 || k > V) k = V;
    n = top_k(x, V, k, idx);
    Cand *c = scratch(a->s, (size_t)n * sizeof *c);
    for (int i = 0; i < n; i++) c[i] = (Cand){ x[idx[i]], idx[i] };
    qsort(c, n, sizeof *c, cand_order);
    float top = c[0].x;
    for (int i = 0; i < n; i++) sum += exp(c[i].x - top);
    int keep = 0;
    for (; keep < n; keep++) {                           // top-p: the smallest set with that share; min-p: at least that share of the best
        double p = exp(c[keep].x - top) / sum;
        if (keep && (seen >= top_p || exp(c[keep].x - top) < min_p)) break;
        seen += p;
    }
    double z = 0, r;
    for (int i = 0; i < keep; i++) z += exp((c[i].x - top) / temp);
    r = (double)(splitmix64(&a->rng) >> 11) / 9007199254740992.0 * z;
    int pick = 0;
    for (; pick < keep - 1; pick++) if ((r -= exp((c[pick].x - top) / temp)) < 0) break;
    int id = c[pick].id;
    scratch_reset(a->s, mark);
    return id;
}

// ---- feeding the session, with the record kept
static int ctx_limit(const App *a) { int c = opt_int(a->o, "ctx-size"); return c ? c : a->c->max_pos; }
static int rows_held(const App *a) {
    int n = 0;
    for (int l = 0; l < a->c->L; l++) { int m = kv_longest(a->s, l); if (m > n) n = m; }
    return n;
}
static void turn_free(Turn t) { arrfree(t.pre); arrfree(t.dec); }
static void record_clear(App *a) { while (arrlen(a->turn)) turn_free(arrpop(a->turn)); }

static void feed_prefill(App *a, const Turn *t) {
    double t0 = now();
    a->s->n_sys = t->n_sys; a->s->n_foot = t->n_foot; a->s->n_head = t->n_head;
    progress("prefill", 0);
    memcpy(a->logits, prefill(a->s, t->pre, (int)arrlen(t->pre)), (size_t)a->c->V * sizeof(float));
    progress("prefill", 1);
    a->ttft = now() - t0;
}
static void feed_decode(App *a, int id) { memcpy(a->logits, decode(a->s, id), (size_t)a->c->V * sizeof(float)); }

// The record once more through the session, from an empty cache: the same bits for the same method.
static void replay(App *a, int turns) {
    session_reset(a->s);
    for (int i = 0; i < turns; i++) {
        feed_prefill(a, &a->turn[i]);
        for (int j = 0; j < (int)arrlen(a->turn[i].dec); j++) feed_decode(a, a->turn[i].dec[j]);
    }
}
static int record_fits(const Session *s, const Turn *turns, char err[512]) {      // a record that s, still empty, is to replay: 0, or -1 with err
    long n = 0;
    for (int i = 0; i < (int)arrlen(turns); i++) n += (long)arrlen(turns[i].pre) + (long)arrlen(turns[i].dec) + s->pos_extra;
    if (!s->pos_end || n <= s->pos_end) return 0;
    snprintf(err, 512, "the dialogue takes %ld positions, this method goes to max_position_embeddings %d", n, s->pos_end);
    return -1;
}
static int is_stop(const App *a, int id) {
    if (opt_int(a->o, "ignore-eos")) return 0;
    for (int i = 0; i < a->c->n_eos; i++) if (a->c->eos[i] == id) return 1;
    if (a->tok && a->tok->eos == id) return 1;
    for (int i = 0; a->tp && i < (int)arrlen(a->tp->stop); i++) if (a->tp->stop[i] == id) return 1;
    return 0;
}
static void write_text(char **text, FILE *out) {         // whole characters only; the array is emptied
    if (arrlen(*text)) fwrite(*text, 1, arrlen(*text), out);
    arrsetlen(*text, 0);
    fflush(out);
}
// Decodes until a stop id, n tokens, a full context or Ctrl-C; writes the text to out as whole UTF-8 characters.
// Returns the number of tokens made; the reply's ids are in the record's last turn.
static int generate(App *a, int n, FILE *out) {
    int made = 0, limit = ctx_limit(a);
    Decoder d = { .t = a->tok, .skip_special = 1 };
    char *text = NULL;
    a->closed = 0;
    for (; (n < 0 || made < n) && !interrupts; made++) {
        int id = sample(a);
        if (is_stop(a, id)) break;
        text = decode_token(&d, id, text);
        write_text(&text, out);
        if (rows_held(a) + 1 > limit) {
            fprintf(stderr, "\nkvcomp: the context is full: %d rows held, -c %d (a method that drops rows, or a larger -c, goes on)\n", rows_held(a), limit);
            break;
        }
        if (!pos_fits(a->s, 1, 0)) {
            fprintf(stderr, "\nkvcomp: the positions are used up: %s goes to max_position_embeddings %d\n", a->method, a->s->pos_end);
            break;
        }
        arrput(arrlast(a->turn).dec, id);
        feed_decode(a, id);
    }
    text = decode_flush(&d, text);
    write_text(&text, out);
    arrfree(text);
    return made;
}
static int fits(const App *a, int n) { return rows_held(a) + n <= ctx_limit(a); }

// ---- results
static double rate(long n, double seconds) { return seconds > 0 ? (double)n / seconds : 0; }
static double bytes_a_step(const Session *s) { return s->clk.steps ? s->clk.bytes_attended / (double)s->clk.steps : 0; }
static int saves_reads_only(const Session *s) {
    int role = 0;
    for (int i = 0; i < s->n_part; role |= s->part[i++].m->role) if (s->part[i].m->evicts || s->part[i].m->role & ROLE_STORE) return 0;
    return role != 0;
}
static void json_pair(FILE *f, const char *key, const char *text) {
    fprintf(f, "\"%s\":", key);
    json_escape(f, text, strlen(text));
    fputc(',', f);
}
static void json_options(const App *a, FILE *f) {        // what the user set
    fprintf(f, "\"options\":{");
    for (int i = 0, n = 0; i < (int)shlen(a->o->given); i++) {
        fprintf(f, n++ ? "," : "");
        fprintf(f, "\"%s\":", a->o->given[i].key);
        json_escape(f, opt_str(a->o, a->o->given[i].key), strlen(opt_str(a->o, a->o->given[i].key)));
    }
    fprintf(f, "}");
}
static void json_rows(const Session *s, FILE *f) {       // rows[layer][head] = source tokens held
    fprintf(f, ",\"rows\":[");
    for (int l = 0; l < s->c->L; l++)
        for (int g = 0; g < s->c->G; g++) {
            const KVHead *h = kv_head(s, l, g);
            fprintf(f, "%s[", g ? "," : l ? ",[" : "[");
            for (int r = 0; r < h->len; r++) fprintf(f, "%s%d", r ? "," : "", h->src[r]);
            fprintf(f, g == s->c->G - 1 ? "]]" : "]");
        }
    fprintf(f, "],\"views\":[");                         // views[layer][query head] = row numbers the last decode step read; empty: every row
    for (int l = 0; l < s->c->L; l++)
        for (int h = 0; h < s->c->H; h++) {
            const View w = view_of(s, l, h);
            fprintf(f, "%s{\"tail\":%d,\"idx\":[", h ? "," : l ? ",[" : "[", w.tail);
            for (int i = 0; i < w.n; i++) fprintf(f, "%s%d", i ? "," : "", w.idx[i]);
            fprintf(f, h == s->c->H - 1 ? "]}]" : "]}");
        }
    fprintf(f, "]");
}
static const char *dtype_name(int dt) { return dt == DT_F32 ? "f32" : dt == DT_F16 ? "f16" : "bf16"; }
static void print_json(const App *a, FILE *f) {
    const Session *s = a->s;
    fprintf(f, "{");
    json_pair(f, "method", a->method);
    fprintf(f, "\"budget\":%d,", s->turn ? s->applied : budget_now(s));
    json_pair(f, "model", a->c->dir);
    json_pair(f, "dtype", dtype_name(a->c->dtype));
    json_pair(f, "device", s->dev ? "cuda" : "cpu");
    json_pair(f, "saves", saves_reads_only(s) ? "reads" : s->n_part == 1 && !s->part[0].m->role ? "nothing" : "memory");
    fprintf(f, "\"n_prompt\":%ld,\"n_gen\":%ld,\"pp_tok_s\":%.3f,\"tg_tok_s\":%.3f,\"ttft_ms\":%.3f,", s->clk.n_prefill, s->clk.n_decode,
            rate(s->clk.n_prefill, s->clk.prefill), rate(s->clk.n_decode, s->clk.decode), 1e3 * a->ttft);
    fprintf(f, "\"kv_bytes_stored\":%zu,\"kv_bytes_full\":%zu,\"kv_bytes_attended\":%.0f,\"meta_bytes\":%zu,\"kv_bytes_peak\":%zu,",
            kv_bytes(s), kv_bytes_full(s), bytes_a_step(s), kv_meta_bytes(s), s->clk.peak);
    fprintf(f, "\"attend_s\":%.6f,\"select_s\":%.6f,\"commit_s\":%.6f,\"index_s\":%.6f,", s->clk.attend, s->clk.select, s->clk.commit, s->clk.index);
    fprintf(f, "\"seed\":%d,\"simd\":\"%s\",\"build\":\"%s\",", opt_int(a->o, "seed"), simd_name(), KVCOMP_VERSION);
    json_options(a, f);
    if (opt_int(a->o, "json-rows")) json_rows(s, f);
    fprintf(f, "}\n");
    fflush(f);
}
static void human_bytes(double n, char out[32]) {
    const char *unit[] = { "B", "KB", "MB", "GB", "TB" };
    int i = 0;
    while (n >= 1000 && i < 4) { n /= 1000; i++; }
    snprintf(out, 32, i && n < 100 ? "%.1f %s" : "%.0f %s", n, unit[i]);
}
static void print_summary(const App *a, int n_pre, int n_gen, double seconds) {     // one line after each reply
    const Session *s = a->s;
    char held[32], full[32];
    int lo = INT_MAX, hi = 0;
    if (quiet || opt_int(a->o, "no-stats")) return;
    for (int i = 0; i < a->c->L * a->c->G; i++) { int n = s->head[i].len; lo = n < lo ? n : lo; hi = n > hi ? n : hi; }
    human_bytes((double)kv_bytes(s), held);
    human_bytes((double)kv_bytes_full(s), full);
    fprintf(stderr, "[turn %d | %d+%d tok | %.1f tok/s | KV %s of %s (%.1f %%) | kept/head %d..%d%s]\n", s->turn, n_pre, n_gen, rate(n_gen, seconds), held, full,
            100.0 * (double)kv_bytes(s) / (double)kv_bytes_full(s), lo, hi, saves_reads_only(s) ? " | saves reads, not memory" : "");
}
static void print_stats(const App *a, FILE *f) {         // /stats and --stats
    const Session *s = a->s;
    char b[6][32];
    human_bytes((double)kv_bytes(s), b[0]); human_bytes((double)kv_bytes_full(s), b[1]); human_bytes((double)kv_meta_bytes(s), b[2]);
    human_bytes((double)s->clk.peak, b[3]); human_bytes(bytes_a_step(s), b[4]);
    fprintf(f, "method %s, %d tokens seen in %d turns, most rows in a head %d\n", a->method, s->n_tok, s->turn, rows_held(a));
    fprintf(f, "stored %s of %s, metadata %s, peak %s, read per decode step %s\n", b[0], b[1], b[2], b[3], b[4]);
    fprintf(f, "prefill %ld tok at %.1f tok/s, decode %ld tok at %.1f tok/s; seconds: attention %.3f, selection %.3f, bookkeeping %.3f, index %.3f\n",
            s->clk.n_prefill, rate(s->clk.n_prefill, s->clk.prefill), s->clk.n_decode, rate(s->clk.n_decode, s->clk.decode), s->clk.attend, s->clk.select, s->clk.commit, s->clk.index);
    for (int i = 0; i < s->n_part; i++) if (s->part[i].m->stats) s->part[i].m->stats(s, s->part[i].ms, f);
}

// ---- --ids FILE: teacher forcing. Each line is a turn: ids to prefill, then optionally | and ids to decode one by one
static int ids_parse(const char *p, const char *end, int V, Turn *t, char err[256]) {      // 0, or -1 with err; t may then hold some ids
    int decoding = 0;
    while (p < end) {
        if (isspace((unsigned char)*p)) { p++; continue; }
        if (*p == '|') {
            if (decoding++) { snprintf(err, 256, "a second '|'"); return -1; }
            p++;
            continue;
        }
        char *q;
        errno = 0;
        long id = strtol(p, &q, 10);
        if (q == p) { snprintf(err, 256, "'%.12s' is no id", p); return -1; }
        if (errno || id < 0 || id >= V) { snprintf(err, 256, "id %ld is outside the vocabulary of %d", id, V); return -1; }
        if (decoding) arrput(t->dec, (int)id); else arrput(t->pre, (int)id);
        p = q;
    }
    if (!arrlen(t->pre)) { snprintf(err, 256, "a turn needs ids to prefill before '|'"); return -1; }
    return 0;
}
static Turn *ids_read(const char *path, int V) {         // the turns of a file, as a record
    char err[256];
    size_t n;
    char *text = read_file(path, &n, err), *end = text ? text + n : NULL;
    Turn *turns = NULL;
    if (!text) die(EXIT_USAGE, "--ids %s", err);
    int line = 1;
    for (char *p = text, *q; p < end; p = q + 1, line++) {
        for (q = p; q < end && *q != '\n'; ) q++;
        char *solid = p;
        while (solid < q && isspace((unsigned char)*solid)) solid++;
        if (solid == q) continue;                        // blank lines are skipped
        Turn t = { 0 };
        if (ids_parse(p, q, V, &t, err)) die(EXIT_USAGE, "%s:%d: %s", path, line, err);
        arrput(turns, t);
    }
    free(text);
    if (!turns) die(EXIT_USAGE, "--ids %s: no turn in the file", path);
    return turns;
}
static void write_row(FILE *f, const float *x, int V, const char *path) {
    if (f && fwrite(x, sizeof *x, V, f) != (size_t)V) die(EXIT_RUN, "%s: %s", path, strerror(errno));
}
static int run_ids(App *a) {
    const char *path = opt_str(a->o, "dump-logits");
    record_clear(a);
    a->turn = ids_read(opt_str(a->o, "ids"), a->c->V);
    FILE *f = *path ? fopen(path, "wb") : NULL;
    if (*path && !f) die(EXIT_RUN, "--dump-logits %s: %s", path, strerror(errno));
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        feed_prefill(a, &a->turn[i]);
        write_row(f, a->logits, a->c->V, path);
        for (int j = 0; j < (int)arrlen(a->turn[i].dec); j++) {
            feed_decode(a, a->turn[i].dec[j]);
            write_row(f, a->logits, a->c->V, path);
        }
    }
    if (f && fclose(f)) die(EXIT_RUN, "--dump-logits %s: %s", path, strerror(errno));
    if (opt_int(a->o, "json")) print_json(a, stdout);
    if (opt_int(a->o, "stats")) print_stats(a, stderr);
    return 0;
}

// ---- sessions on disk: the record of ids with the model's fingerprint; loading replays it, which is exact for every method
static int session_save(const App *a, const char *path, char err[512]) {
    char tmp[4200];
    snprintf(tmp, sizeof tmp, "%s.part", path);          // written beside and renamed: a full disk loses nothing
    FILE *f = fopen(tmp, "w");
    if (!f) { snprintf(err, 512, "%.400s: %s", tmp, strerror(errno)); return -1; }
    fprintf(f, "kvcomp session 1\nmodel %016llx\nmethod %s\n", (unsigned long long)sonic_fingerprint(a->w), a->method);
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        const Turn *t = &a->turn[i];
        fprintf(f, "turn %d %d %d :", t->n_sys, t->n_foot, t->n_head);
        for (int j = 0; j < (int)arrlen(t->pre); j++) fprintf(f, " %d", t->pre[j]);
        fprintf(f, " |");
        for (int j = 0; j < (int)arrlen(t->dec); j++) fprintf(f, " %d", t->dec[j]);
        fprintf(f, "\n");
    }
    fprintf(f, "end %d\n", a->closed);
    int bad = ferror(f) | fclose(f);
    if (bad || rename(tmp, path)) { snprintf(err, 512, "%s: %s", path, strerror(errno)); remove(tmp); return -1; }
    return 0;
}
// One "turn ..." line. 0, or -1: the line is not what session_save writes.
static int session_turn(const App *a, const char *p, const char *end, Turn *t) {
    int used = 0;
    char err[256];
    if (sscanf(p, "turn %d %d %d :%n", &t->n_sys, &t->n_foot, &t->n_head, &used) != 3 || !used || p + used > end) return -1;
    if (ids_parse(p + used, end, a->c->V, t, err)) return -1;
    int n = (int)arrlen(t->pre);
    return t->n_sys < 0 || t->n_foot < 0 || t->n_head < 0 || t->n_sys > n || t->n_foot > n || t->n_head > n ? -1 : 0;
}
static int session_read(App *a, const char *path, char err[512]) {     // 0, or -1 with err and nothing changed
    char why[256], *end;
    size_t n;
    unsigned long long print = 0;
    char *text = read_file(path, &n, why), *p = text;
    if (!text) { snprintf(err, 512, "%s", why); return -1; }
    Turn *turns = NULL;
    int at = 0, closed = 0, bad = 0;
    err[0] = 0;
    if (sscanf(text, "kvcomp session 1\nmodel %llx\nmethod %*[^\n]\n%n", &print, &at) != 1 || !at) snprintf(err, 512, "%s: not a kvcomp session file", path);
    else if (print != sonic_fingerprint(a->w)) snprintf(err, 512, "%s: made with another model (fingerprint %016llx, this one has %016llx)", path, print, (unsigned long long)sonic_fingerprint(a->w));
    for (p = text + at; !*err && !bad && !strncmp(p, "turn ", 5); p = end + 1) {
        Turn t = { 0 };
        end = strchr(p, '\n');
        if (!end) { bad = 1; break; }
        bad = session_turn(a, p, end, &t);
        arrput(turns, t);
    }
    if (!*err && (bad || sscanf(p, "end %d", &closed) != 1)) snprintf(err, 512, "%s: damaged at turn %d", path, (int)arrlen(turns) + !bad);
    if (!*err) record_fits(a->s, turns, err);
    free(text);
    if (*err) { while (arrlen(turns)) turn_free(arrpop(turns)); arrfree(turns); return -1; }
    record_clear(a);
    arrfree(a->turn);
    a->turn = turns;
    a->closed = closed;
    replay(a, (int)arrlen(a->turn));
    return 0;
}

static Turn render_turn(const App *a, const char *text) {                // what the next message of the record prefills
    Turn t = { 0 };
    int first = !arrlen(a->turn);
    const char *system = opt_given(a->o, "system") ? opt_str(a->o, "system") : NULL;
    if (a->tp) t.pre = template_turn(a->tp, a->tok, first, system, text, !opt_int(a->o, "no-think"), a->closed, NULL, &t.n_sys, &t.n_foot, &t.n_head);
    else {
        if (first && a->tok->add_bos) arrput(t.pre, a->tok->bos);
        t.pre = tokenizer_encode(a->tok, text, strlen(text), opt_int(a->o, "parse-special"), t.pre);
    }
    return t;
}

// ==================================================================================================== 25 CHAT
// A small line editor (UTF-8, history, multi-line pastes), the commands, and Ctrl-C: the first stops the reply and keeps
// it in the history and in the cache, a second within a second leaves with 130. Without a terminal every input line is a turn.

static struct termios tty_before;
static int tty_raw;
static void tty_restore(void) { if (tty_raw) { tcsetattr(0, TCSANOW, &tty_before); if (write(1, "\x1b[?2004l", 8) < 0) tty_raw = 0; } tty_raw = 0; }
static int tty_enter(void) {                             // raw input, bracketed paste. 0, or -1
    struct termios t;
    if (tcgetattr(0, &tty_before)) return -1;
    t = tty_before;
    t.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG | IEXTEN);
    t.c_iflag &= ~(tcflag_t)(IXON | ICRNL);
    t.c_cc[VMIN] = 1; t.c_cc[VTIME] = 0;
    if (tcsetattr(0, TCSANOW, &t)) return -1;
    tty_raw = 1;
    return write(1, "\x1b[?2004h", 8) == 8 ? 0 : -1;
}
static double interrupt_at;
static void on_interrupt(int sig) {
    (void)sig;
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    double t = (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
    if (interrupts && t - interrupt_at < 1) { tty_restore(); _exit(EXIT_INTERRUPT); }
    interrupts++;
    interrupt_at = t;
}

// ---- the line editor. text is an stb_ds array of bytes, cursor a byte offset at a character's start
typedef struct { char *text; int cursor, row; char **history; int at; } Line;

static int char_next(const Line *e, int i) { do i++; while (i < (int)arrlen(e->text) && (e->text[i] & 0xc0) == 0x80); return i; }
static int char_prev(const Line *e, int i) { do i--; while (i > 0 && (e->text[i] & 0xc0) == 0x80); return i; }
static int screen_columns(void) { struct winsize w; return ioctl(1, TIOCGWINSZ, &w) || !w.ws_col ? 80 : w.ws_col; }
static int code_width(const char *s, int n) {            // columns of one character: 2 for East Asian wide ranges and emoji, 0 for combining marks
    unsigned c = (unsigned char)s[0];
    if (c < 0x80 || n < 2) return 1;
    c = n == 2 ? (c & 31) << 6 | (s[1] & 63) : n == 3 ? (c & 15) << 12 | (s[1] & 63) << 6 | (s[2] & 63) : (c & 7) << 18 | (s[1] & 63) << 12 | (s[2] & 63) << 6 | (s[3] & 63);
    if ((c >= 0x300 && c < 0x370) || c == 0x200d || (c >= 0xfe00 && c < 0xfe10)) return 0;
    return (c >= 0x1100 && c < 0x1160) || (c >= 0x2e80 && c < 0xa4d0) || (c >= 0xac00 && c < 0xd7a4) || (c >= 0xf900 && c < 0xfb00) || (c >= 0xff00 && c < 0xff61) || c >= 0x1f300 ? 2 : 1;
}
// Writes prompt and text again and puts the cursor where it belongs; e->row is the screen row it was on.
static void line_draw(Line *e) {
    int cols = screen_columns(), x = 2, y = 0, cx = 2, cy = 0, n = (int)arrlen(e->text);
    if (e->row) printf("\x1b[%dA", e->row);
    printf("\r\x1b[J> ");
    for (int i = 0; i <= n; ) {
        if (i == e->cursor) { cx = x; cy = y; }
        if (i == n) break;
        int j = char_next(e, i), w = code_width(e->text + i, j - i);
        if (e->text[i] == '\n') { fputs("\r\n", stdout); x = 0; y++; }
        else {
            if (x + w > cols) { x = 0; y++; }
            if ((unsigned char)e->text[i] >= 32) fwrite(e->text + i, 1, j - i, stdout); else fputc(' ', stdout);
            if ((x += w) == cols && j < n) { x = 0; y++; }
        }
        i = j;
    }
    if (x >= cols) { fputs("\r\n", stdout); if (cx >= cols) { cx = 0; cy++; } y++; }
    if (y > cy) printf("\x1b[%dA", y - cy);
    printf("\r");
    if (cx) printf("\x1b[%dC", cx);
    e->row = cy;
    fflush(stdout);
}
static void line_insert(Line *e, const char *s, int n) {
    int len = (int)arrlen(e->text);
    arrsetlen(e->text, len + n);
    memmove(e->text + e->cursor + n, e->text + e->cursor, len - e->cursor);
    memcpy(e->text + e->cursor, s, n);
    e->cursor += n;
}
static void line_delete(Line *e, int a, int b) {         // bytes [a,b)
    memmove(e->text + a, e->text + b, arrlen(e->text) - b);
    arrsetlen(e->text, arrlen(e->text) - (b - a));
    e->cursor = a;
}
static void line_history(Line *e, int step) {
    int at = e->at + step;
    if (at < 0 || at > (int)arrlen(e->history)) return;
    e->at = at;
    arrsetlen(e->text, 0);
    e->cursor = 0;
    if (at < (int)arrlen(e->history)) line_insert(e, e->history[at], (int)strlen(e->history[at]));
}
// Input comes in big reads, so that a long paste is drawn once, not once a byte.
typedef struct { unsigned char buf[65536]; int n, at; } Input;
static Input input;
static int input_ready(void) {
    fd_set f; struct timeval t = { 0, 0 };
    if (input.at < input.n) return 1;
    FD_ZERO(&f); FD_SET(0, &f);
    return select(1, &f, NULL, NULL, &t) > 0;
}
static int input_byte(void) {                            // -1: end of input
    while (input.at == input.n) {
        ssize_t n = read(0, input.buf, sizeof input.buf);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        input.n = (int)n; input.at = 0;
    }
    return input.buf[input.at++];
}
static void line_paste(Line *e) {                        // until ESC [ 2 0 1 ~ ; newlines stay in the text
    static const char end[] = "\x1b[201~";
    for (int c, seen = 0; (c = input_byte()) >= 0; ) {
        char b = (char)(c == '\r' ? '\n' : c);
        line_insert(e, &b, 1);
        seen = c == end[seen] ? seen + 1 : c == end[0];
        if (seen == 6) { line_delete(e, e->cursor - 6, e->cursor); return; }
    }
}
static void line_escape(Line *e) {
    int c = input_ready() ? input_byte() : 0, arg = 0;
    if (c != '[' && c != 'O') return;
    while ((c = input_byte()) == ';' || (c >= '0' && c <= '9')) arg = c == ';' ? 0 : arg % 1000 * 10 + c - '0';     // ESC [ 1 ; 5 D: Ctrl and an arrow
    int n = (int)arrlen(e->text);
    if (c == 'A') line_history(e, -1);
    if (c == 'B') line_history(e, 1);
    if (c == 'C' && e->cursor < n) e->cursor = char_next(e, e->cursor);
    if (c == 'D' && e->cursor > 0) e->cursor = char_prev(e, e->cursor);
    if (c == 'H' || (c == '~' && (arg == 1 || arg == 7))) e->cursor = 0;
    if (c == 'F' || (c == '~' && (arg == 4 || arg == 8))) e->cursor = n;
    if (c == '~' && arg == 3 && e->cursor < n) line_delete(e, e->cursor, char_next(e, e->cursor));
    if (c == '~' && arg == 200) line_paste(e);
}
// One edited line: 1, 0 at the end of input (Ctrl-D on an empty line), -1 when Ctrl-C was pressed on an empty line.
static int line_edit(Line *e) {
    arrsetlen(e->text, 0);
    e->cursor = e->row = 0;
    e->at = (int)arrlen(e->history);
    line_draw(e);
    for (;;) {
        int c = input_byte(), n = (int)arrlen(e->text);
        if (c < 0) return n > 0;
        if (c == '\r' || c == '\n') break;
        if (c == 3) { if (!n) return -1; line_delete(e, 0, n); }
        else if (c == 4) { if (!n) return 0; if (e->cursor < n) line_delete(e, e->cursor, char_next(e, e->cursor)); }
        else if (c == 127 || c == 8) { if (e->cursor > 0) line_delete(e, char_prev(e, e->cursor), e->cursor); }
        else if (c == 1) e->cursor = 0;
        else if (c == 5) e->cursor = n;
        else if (c == 11) line_delete(e, e->cursor, n);
        else if (c == 21) line_delete(e, 0, e->cursor);
        else if (c == 23) {                              // Ctrl-W: the word before the cursor
            int a = e->cursor;
            while (a > 0 && e->text[a - 1] == ' ') a--;
            while (a > 0 && e->text[a - 1] != ' ') a--;
            line_delete(e, a, e->cursor);
        }
        else if (c == 27) line_escape(e);
        else if (c >= 32 || c == 9) { char b = (char)c; line_insert(e, &b, 1); }
        if (!input_ready()) line_draw(e);
    }
    e->cursor = (int)arrlen(e->text);
    line_draw(e);
    fputs("\r\n", stdout);
    fflush(stdout);
    return 1;
}

// ---- one user message: an edited line, or lines of standard input; a line ending in \ continues
static int read_plain(char **out) {                      // a line without its newline into the stb_ds array; 0 at the end
    int c, any = 0;
    while ((c = getchar()) != EOF && c != '\n') { arrput(*out, (char)c); any = 1; }
    return any || c == '\n';
}
static int read_message(Line *e, int tty, char **out) {  // *out: stb_ds array, NUL-terminated. 1, 0 at the end, -1 on Ctrl-C
    arrsetlen(*out, 0);
    for (;;) {
        int r = 1;
        if (tty) {
            if (tty_enter()) return 0;
            r = line_edit(e);
            tty_restore();
            if (r > 0 && arrlen(e->text)) memcpy(arraddnptr(*out, arrlen(e->text)), e->text, arrlen(e->text));
        }
        else r = read_plain(out);
        if (r <= 0 && !arrlen(*out)) return r;
        if (!arrlen(*out) || arrlast(*out) != '\\') break;
        arrlast(*out) = '\n';
    }
    arrput(*out, 0);
    if (tty && (*out)[0]) { char *copy = strdup(*out); arrput(e->history, copy); }
    return 1;
}

// ---- a turn of the chat
static int chat_turn(App *a, const char *text, FILE *out) {      // 0, or -1 when it does not fit
    Turn t = render_turn(a, text);
    int n = (int)arrlen(t.pre), n_predict = opt_int(a->o, "n-predict");
    if (!n) { turn_free(t); return 0; }
    if (!fits(a, n)) {
        fprintf(stderr, "kvcomp: %d tokens do not fit: %d rows held, -c %d (see /clear, or start with a larger -c)\n", n, rows_held(a), ctx_limit(a));
        turn_free(t);
        return -1;
    }
    if (!pos_fits(a->s, n, a->s->pos_extra)) {
        fprintf(stderr, "kvcomp: %d tokens do not fit: the next position is %d, %s goes to max_position_embeddings %d (see /clear, or /method)\n", n, a->s->pos_next, a->method, a->s->pos_end);
        turn_free(t);
        return -1;
    }
    arrput(a->turn, t);
    interrupts = 0;
    feed_prefill(a, &t);
    double t0 = now();
    int made = generate(a, n_predict, out);
    fputc('\n', out);
    fflush(out);
    print_summary(a, n, made, now() - t0);
    return 0;
}
static void chat_regen(App *a, FILE *out) {              // the last reply again
    if (!arrlen(a->turn)) { fprintf(stderr, "nothing to make again\n"); return; }
    arrfree(arrlast(a->turn).dec);
    arrlast(a->turn).dec = NULL;
    replay(a, (int)arrlen(a->turn));
    interrupts = 0;
    double t0 = now();
    int made = generate(a, opt_int(a->o, "n-predict"), out);
    fputc('\n', out);
    print_summary(a, (int)arrlen(arrlast(a->turn).pre), made, now() - t0);
}
static void template_differs(const App *a) {             // llama3.1 and llama3.2 mark messages as llama3 does
    const char *made = a->s->made_for;
    if (made && a->tp && !quiet && strncmp(a->tp->x.name, made, strlen(made)))
        fprintf(stderr, "kvcomp: WARNING: the weights of %s were trained with chat template %s, this chat uses %s\n", a->method, made, a->tp->x.name);
}
// Opens the session again with another method (or the same) and plays the dialogue into it. The old one stays on failure.
static int chat_method(App *a, const char *spec) {
    char err[512];
    Session *s = session_try(a->c, a->w, a->o, spec, err);
    if (!s || record_fits(s, a->turn, err)) { fprintf(stderr, "kvcomp: %s\n", err); session_close(s); return -1; }
    session_close(a->s);
    a->s = s;
    char *copy = strdup(spec);
    free(a->method);
    a->method = copy;
    template_differs(a);
    replay(a, (int)arrlen(a->turn));
    return 0;
}

// ---- commands
static const char *chat_help =
    "/help            this list              /stats           bytes, rows, speed, the method's own numbers\n"
    "/method NAME     another method; the dialogue is played into it again\n"
    "/budget N        another budget, likewise\n"
    "/clear           forget the dialogue    /regen           make the last reply again\n"
    "/system TEXT     another system message, with a new dialogue\n"
    "/read FILE       a file's text as your message\n"
    "/save FILE       keep the dialogue      /load FILE       go on with a kept one\n"
    "/quit            leave (so does Ctrl-D); Ctrl-C stops a reply\n";

static void chat_clear(App *a) { record_clear(a); session_reset(a->s); a->closed = 0; }
static void chat_budget(App *a, const char *value) {     // reopens the method, instead of --ratio if that was given; undone when refused
    char err[256], *old = strdup(opt_str(a->o, "budget"));
    int ratio = opt_given(a->o, "ratio"), bad = options_set(a->o, "budget", value, err) || out_of_range(a->o, "budget", err);
    if (bad) fprintf(stderr, "kvcomp: %s\n", err);
    if (ratio) (void)shdel(a->o->given, "ratio");
    if (bad || chat_method(a, a->method)) {
        options_set(a->o, "budget", old, err);
        if (ratio) shput(a->o->given, "ratio", 1);
    }
    free(old);
}
static void chat_read(App *a, const char *path) {
    char err[256];
    size_t n;
    char *text = read_file(path, &n, err);
    if (!text) { fprintf(stderr, "kvcomp: %s\n", err); return; }
    chat_turn(a, text, stdout);
    free(text);
}
static int chat_command(App *a, char *line) {            // 1: leave
    char err[512], *arg = line + strcspn(line, " \t\n");
    while (isspace((unsigned char)*arg)) *arg++ = 0;
    if (!strcmp(line, "/quit") || !strcmp(line, "/exit")) return 1;
    else if (!strcmp(line, "/help")) fputs(chat_help, stderr);
    else if (!strcmp(line, "/stats")) print_stats(a, stderr);
    else if (!strcmp(line, "/clear")) chat_clear(a);
    else if (!strcmp(line, "/regen")) chat_regen(a, stdout);
    else if (!strcmp(line, "/method")) { if (*arg) chat_method(a, arg); else fprintf(stderr, "%s\n", a->method); }
    else if (!strcmp(line, "/budget")) { if (*arg) chat_budget(a, arg); else fprintf(stderr, "%d\n", a->s->budget); }
    else if (!strcmp(line, "/system")) { if (!options_set(a->o, "system", arg, err)) chat_clear(a); }
    else if ((!strcmp(line, "/save") || !strcmp(line, "/load") || !strcmp(line, "/read")) && !*arg) fprintf(stderr, "%s wants a file\n", line);
    else if (!strcmp(line, "/save")) { if (session_save(a, arg, err)) fprintf(stderr, "kvcomp: %s\n", err); }
    else if (!strcmp(line, "/read")) chat_read(a, arg);
    else if (!strcmp(line, "/load")) { if (session_read(a, arg, err)) fprintf(stderr, "kvcomp: %s\n", err); }
    else fprintf(stderr, "no command %s; /help lists them\n", line);
    return 0;
}
static int chat(App *a) {
    int tty = isatty(0), r;
    Line e = { 0 };
    char *text = NULL;
    const char *path = opt_str(a->o, "session");
    char err[512];
    struct sigaction sa = { .sa_handler = on_interrupt };
    sigaction(SIGINT, &sa, NULL);
    atexit(tty_restore);
    if (*path && file_exists(path) && session_read(a, path, err)) die(EXIT_RUN, "--session %s", err);
    if (tty && !quiet) fprintf(stderr, "kvcomp %s, %s, --method=%s. /help lists commands, Ctrl-D leaves.\n", KVCOMP_VERSION, a->c->dir, a->method);
    while ((r = read_message(&e, tty, &text)) != 0) {
        if (r < 0) {                                     // Ctrl-C at the prompt: twice within a second leaves
            double t = now();
            if (t - interrupt_at < 1) { tty_restore(); exit(EXIT_INTERRUPT); }
            interrupt_at = t;
            fprintf(stderr, "(Ctrl-C again leaves, so does Ctrl-D)\n");
            continue;
        }
        if (!text[0]) continue;
        if (text[0] == '/') { if (chat_command(a, text)) break; }
        else { chat_turn(a, text, stdout); if (opt_int(a->o, "single-turn")) break; }
    }
    if (*path && session_save(a, path, err)) die(EXIT_RUN, "--session %s", err);
    if (opt_int(a->o, "json")) print_json(a, stdout);
    while (arrlen(e.history)) free(arrpop(e.history));
    arrfree(e.history); arrfree(e.text); arrfree(text);
    return 0;
}

// ==================================================================================================== 26 EVALUATION
// What a method costs in quality, measured through its own compressed cache. --eval TASK plays dialogues greedily: made up here
// (needle, multiturn, coref, facts, json, fewshot, summary; each says what its texts are), or read from --eval-file (file).
// --eval ppl and kld cut a text into windows: half a window is prefilled as one turn, the other half decoded token by token, and
// the probability of every next token is compared with the text (ppl) and with full attention over the same tokens (kld).
// --compare plays the same items through several methods and --budgets: one row each, so that differences are paired.
// Every dialogue is played twice. First freely: the method answers, and its own answers are the history of the next turn
// (--eval-history gold puts the right ones there instead); scores, bytes and seconds are of this pass. Then forced: the right
// replies are fed token by token, to the method and to full attention alike; NLL, KLD and top-1 agreement are of this pass, over
// the tokens of scored replies. So their numbers do not depend on what a method happened to say.

typedef struct {            // one scored answer: what tables, intervals and the report are made from
    const char *task;       // "needle", "multiturn", ... ; a static string or owned by the item list
    int item, turn, turns;  // item number in the run, turn of the item, turns it has
    int position;           // where the query stands: 0 begin, 1 middle, 2 end, -1 does not apply
    int length, depth;      // tokens of the context; depth of the evidence in per cent, -1 does not apply
    double score, nll;      // 0..1 by the task's own metric; NLL of the gold answer per token (nats)
} Answer;

typedef struct {            // one row of the result
    char name[160];
    int budget, items;
    double exact, found, f1, rouge, rouge_lb;   // sums over the answers, of every metric
    double nll;                                 // ppl, kld: sum over predicted tokens
    double kld, kld_top, top1;                  // sums over predicted tokens; kld_top: the 99th percentile
    double *each;                               // stb_ds: the KLD of every predicted token
    long predicted;
    double stored, full, attended, prefill_s, decode_s, n_prefill, n_decode;
    double peak;                                // bytes of rows, the most any item held
    Answer *answers;                            // stb_ds
    double lo, hi;                              // 95 % interval of the mean score
} Score;

// ---- metrics (loopserve.md 6), all of two texts: what was said and what is right
enum { WORDS_RAW, WORDS_PLAIN, WORDS_BARE };    // cut at white space; also lower case without ASCII punctuation; also without articles
static char **words_of(const char *text, int how) {      // stb_ds array of strdup'd words
    char **words = NULL, *w = NULL;
    for (const char *p = text; ; p++) {
        unsigned char c = (unsigned char)*p;
        if (c && !isspace(c)) {
            if (how == WORDS_RAW) arrput(w, (char)c);
            else if (!ispunct(c)) arrput(w, (char)tolower(c));
            continue;
        }
        if (arrlen(w)) {
            arrput(w, 0);
            if (how != WORDS_BARE || (strcmp(w, "a") && strcmp(w, "an") && strcmp(w, "the"))) arrput(words, strdup(w));
            arrsetlen(w, 0);
        }
        if (!c) break;
    }
    arrfree(w);
    return words;
}
static void words_free(char **w) { while (arrlen(w)) free(arrpop(w)); arrfree(w); }
static int word_in(char **words, const char *w) {        // index, or -1
    for (int i = 0; i < (int)arrlen(words); i++) if (!strcmp(words[i], w)) return i;
    return -1;
}
static double f_measure(double same, double n, double m) { return same > 0 ? 2 * (same / n) * (same / m) / (same / n + same / m) : 0; }
static double word_f1(const char *said, const char *gold) {             // of the bags of words
    char **a = words_of(said, WORDS_BARE), **b = words_of(gold, WORDS_BARE);
    int n = (int)arrlen(a), m = (int)arrlen(b), same = 0;
    for (int i = 0, j; i < n; i++)
        if ((j = word_in(b, a[i])) >= 0) { free(b[j]); arrdelswap(b, j); same++; }
    words_free(a); words_free(b);
    return f_measure(same, n, m);
}
// Does the reply hold the answer as whole words in their order? whole: and nothing else.
static int holds_answer(const char *said, const char *gold, int whole) {
    char **a = words_of(said, WORDS_BARE), **b = words_of(gold, WORDS_BARE);
    int n = (int)arrlen(a), m = (int)arrlen(b), hit = 0;
    for (int i = 0; i + m <= n && !hit && m > 0 && (!whole || n == m); i++) {
        int j = 0;
        while (j < m && !strcmp(a[i + j], b[j])) j++;
        hit = j == m;
    }
    words_free(a); words_free(b);
    return hit;
}
// TREC as LongBench means it: the labels that the first line names, but those that are part of the right one; shared among them.
static double class_accuracy(const char *said, const char *gold, char **classes) {
    while (*said == '\n') said++;
    char *line = strndup(said, strcspn(said, "\n"));
    int named = 0, hit = 0;
    for (int i = 0; i < (int)arrlen(classes); i++) {
        if (!strstr(line, classes[i])) continue;
        if (!strcmp(classes[i], gold)) hit = 1;
        else if (strstr(gold, classes[i])) continue;
        named++;
    }
    free(line);
    return hit ? 1.0 / named : 0;
}
// table (n+1, m+1): the longest common subsequence of the first i words of a and the first j of b. Malloc'd
static int *lcs_table(char **a, int n, char **b, int m) {
    int *t = xcalloc((size_t)(n + 1) * (m + 1), sizeof *t), w = m + 1;
    for (int i = 1; i <= n; i++)
        for (int j = 1; j <= m; j++) {
            int up = t[(size_t)(i - 1) * w + j], left = t[(size_t)i * w + j - 1];
            t[(size_t)i * w + j] = !strcmp(a[i - 1], b[j - 1]) ? t[(size_t)(i - 1) * w + j - 1] + 1 : up > left ? up : left;
        }
    return t;
}
static double rouge_l(const char *said, const char *gold) {
    char **a = words_of(said, WORDS_RAW), **b = words_of(gold, WORDS_RAW);
    int n = (int)arrlen(a), m = (int)arrlen(b), *t = lcs_table(a, n, b, m), same = t[(size_t)(n + 1) * (m + 1) - 1];
    free(t);
    words_free(a); words_free(b);
    return f_measure(same, n, m);
}
// Rouge-L as LongBench's package counts it: sentences end at full stops; the words of the longest common subsequences of all pairs of
// sentences are united as a set, and P and R are shares of the sets of words. A sentence of blanks counts as one empty word there.
static char ***sentences_of(const char *text) {          // stb_ds array of stb_ds arrays of words
    char ***list = NULL;
    for (const char *p = text; *p; p += *p == '.') {
        size_t n = strcspn(p, ".");
        if (!n) continue;
        char *one = strndup(p, n), **words = words_of(one, WORDS_RAW);
        if (!words) arrput(words, strdup(""));
        arrput(list, words);
        free(one);
        p += n;
    }
    return list;
}
static char **word_set(char ***sentences) {              // stb_ds array of words owned by the sentences
    char **set = NULL;
    for (int i = 0; i < (int)arrlen(sentences); i++)
        for (int j = 0; j < (int)arrlen(sentences[i]); j++) if (word_in(set, sentences[i][j]) < 0) arrput(set, sentences[i][j]);
    return set;
}
static double rouge_l_longbench(const char *said, const char *gold) {
    char ***a = sentences_of(gold), ***b = sentences_of(said), **sa = word_set(a), **sb = word_set(b), **common = NULL;
    for (int x = 0; x < (int)arrlen(a); x++)
        for (int y = 0; y < (int)arrlen(b); y++) {
            int n = (int)arrlen(a[x]), m = (int)arrlen(b[y]), w = m + 1, *t = lcs_table(a[x], n, b[y], m);
            for (int i = n, j = m; i && j; )
                if (!strcmp(a[x][i - 1], b[y][j - 1])) { if (word_in(common, a[x][i - 1]) < 0) arrput(common, a[x][i - 1]); i--; j--; }
                else if (t[(size_t)(i - 1) * w + j] > t[(size_t)i * w + j - 1]) i--;
                else j--;
            free(t);
        }
    double same = (double)arrlen(common), r = same / (double)(arrlen(sa) ? arrlen(sa) : 1), p = same / (double)(arrlen(sb) ? arrlen(sb) : 1);
    arrfree(common); arrfree(sa); arrfree(sb);
    while (arrlen(a)) words_free(arrpop(a));
    while (arrlen(b)) words_free(arrpop(b));
    arrfree(a); arrfree(b);
    return 2 * p * r / (p + r + 1e-8);
}

// ---- items: dialogues with their right answers
enum { METRIC_F1, METRIC_CLASS, METRIC_ROUGE, METRIC_ROUGE_LONGBENCH, METRIC_FOUND, METRIC_EXACT, METRICS };
static const char *eval_metrics[METRICS] = { "f1", "accuracy", "rouge", "rouge-longbench", "found", "exact" };

typedef struct {
    char *user, *reply;         // what the visitor says; what would be a right reply, as a whole sentence
    int *span;                  // stb_ds: where in the reply its answer stands, as pairs of byte offsets; none: the whole reply
    char **answers, **classes;  // stb_ds: the right answers (none: the turn is not scored); labels to choose from
    char **evidence;            // stb_ds: the sentences of this turn and of earlier ones that the answer follows from
    int position, depth;        // as in Answer
} EvalTurn;
typedef struct {
    const char *task;
    int number, length;         // versions of one text share a number; tokens of its texts
    int metric, first_line;     // METRIC_*; 1: only the first line of a reply is scored
    EvalTurn *turn;             // stb_ds
} EvalItem;
typedef struct { EvalItem *item; stbds_string_arena mem; } EvalSet;      // stb_ds; mem: every text in it

static void turn_free_lists(EvalTurn *t) { arrfree(t->span); arrfree(t->answers); arrfree(t->classes); arrfree(t->evidence); }
static void eval_set_free(EvalSet *e) {
    for (int i = 0; i < (int)arrlen(e->item); i++) {
        for (int j = 0; j < (int)arrlen(e->item[i].turn); j++) turn_free_lists(&e->item[i].turn[j]);
        arrfree(e->item[i].turn);
    }
    arrfree(e->item);
    strreset(&e->mem);
}
static char *set_text(EvalSet *e, const char *text, size_t n) {          // a copy that lives as long as the set
    char *s = strndup(n ? text : "", n), *kept = stralloc(&e->mem, s);      // text may be an empty array: NULL
    free(s);
    return kept;
}
KV_PRINTF(2, 3) static char *set_printf(EvalSet *e, const char *fmt, ...) {
    char *s = NULL;
    va_list ap;
    va_start(ap, fmt);
    if (vasprintf(&s, fmt, ap) < 0) die(EXIT_MEMORY, "out of memory: a sentence of the evaluation");
    va_end(ap);
    char *kept = stralloc(&e->mem, s);
    free(s);
    return kept;
}
// A scored turn from its reply with the answer in braces: "The code is {4821}." Several pieces make one answer, blanks between.
static EvalTurn gold_turn(EvalSet *e, const char *user, const char *reply) {
    EvalTurn t = { .user = (char *)user, .position = -1, .depth = -1 };
    char *text = NULL, *answer = NULL;
    for (const char *p = reply; *p; p++) {
        if (*p == '{' && arrlen(answer)) arrput(answer, ' ');
        if (*p == '{' || *p == '}') { arrput(t.span, (int)arrlen(text)); continue; }
        arrput(text, *p);
        if (arrlen(t.span) % 2) arrput(answer, *p);
    }
    t.reply = set_text(e, text, (size_t)arrlen(text));
    arrput(t.answers, set_text(e, answer, (size_t)arrlen(answer)));
    arrfree(text);
    arrfree(answer);
    return t;
}
static EvalTurn plain_turn(const char *user, const char *reply) { return (EvalTurn){ .user = (char *)user, .reply = (char *)reply, .position = -1, .depth = -1 }; }
static char **list_copy(char **list) { char **c = NULL; for (int i = 0; i < (int)arrlen(list); i++) arrput(c, list[i]); return c; }
static EvalTurn turn_copy(const EvalTurn *t) {
    EvalTurn c = *t;
    c.span = NULL;
    for (int i = 0; i < (int)arrlen(t->span); i++) arrput(c.span, t->span[i]);
    c.answers = list_copy(t->answers); c.classes = list_copy(t->classes); c.evidence = list_copy(t->evidence);
    return c;
}

// The reply without the sentence around its answer: "The code is 4821." leaves "4821.", so that a model that answers in whole
// sentences is scored as one that answers in a word. Each word of the right reply's frame goes once; a wrong value stays. Malloc'd
static char *without_frame(const EvalTurn *t, const char *said) {
    if (!arrlen(t->span)) return strdup(said);
    char *text = NULL, *out = NULL;
    for (int i = 0, k = 0; t->reply[i]; i++) {           // k: span borders passed
        while (k < (int)arrlen(t->span) && i >= t->span[k]) k++;
        arrput(text, k % 2 ? ' ' : t->reply[i]);
    }
    arrput(text, 0);
    char **frame = words_of(text, WORDS_PLAIN), **words = words_of(said, WORDS_RAW);
    for (int i = 0; i < (int)arrlen(words); i++) {
        char **plain = words_of(words[i], WORDS_PLAIN);
        int at = plain ? word_in(frame, plain[0]) : -1;
        if (at >= 0) { free(frame[at]); arrdelswap(frame, at); }
        else {
            if (arrlen(out)) arrput(out, ' ');
            for (const char *p = words[i]; *p; p++) arrput(out, *p);
        }
        words_free(plain);
    }
    arrput(out, 0);
    char *rest = strdup(out);
    arrfree(out); arrfree(text);
    words_free(frame); words_free(words);
    return rest;
}
static double score_by(int metric, const char *said, const char *gold, char **classes) {
    switch (metric) {
    case METRIC_CLASS:           return class_accuracy(said, gold, classes);
    case METRIC_ROUGE:           return rouge_l(said, gold);
    case METRIC_ROUGE_LONGBENCH: return rouge_l_longbench(said, gold);
    case METRIC_FOUND:           return holds_answer(said, gold, 0);
    case METRIC_EXACT:           return holds_answer(said, gold, 1);
    default:                     return word_f1(said, gold);
    }
}
static double best_score(int metric, const char *said, const EvalTurn *t) {              // over the right answers
    double best = 0;
    for (int i = 0; i < (int)arrlen(t->answers); i++) {
        double x = score_by(metric, said, t->answers[i], t->classes);
        if (x > best) best = x;
    }
    return best;
}

// ---- generators. The sentences are those that models/data_gen.py teaches the shipped model; any model can read them. Values are that
// file's held-out words and numbers (digits that sum to a multiple of 8). A text is a list of lines: the facts, near misses (the same
// sentence about something else) and filler, --eval-length tokens in all. An item is made from the seed, its task, length and number
// alone, so more items never change the first ones. LoopServe's benchmark ends every message with the same cue, wherever the query
// stands; here the opening of the reply, which the chat template writes, is that cue.
static const char eval_names[] = "Max Hugo Peter Frank Noah Yara George Omar Amir Ida Ruth Chris Kevin Toby Dennis Lars Tara Ravi Ahmed Jim";
static const char eval_cities[] = "Madrid Delhi Munich Bern Istanbul Denver Nairobi Cologne Bristol Hanoi";
static const char eval_animals[] = "cat goose tiger shark otter camel bat";
static const char eval_colours[] = "red blue green yellow black white orange purple pink brown grey silver golden violet turquoise crimson";
static const char eval_things[] = "box bag door key book chest drawer car boat tent lamp chair table bottle cup coat hat shoe ring clock phone letter map coin bell "
    "basket jar safe locker suitcase bike kite drum ball pen knife rope mirror camera wallet";
static const char eval_rooms[] = "kitchen garden cellar attic garage bedroom bathroom hall office library barn shed tower cave";
static const char eval_adjs[] = "old new small big red blue green quiet long short dark bright cold warm soft heavy round strange pretty clean dusty wooden broken "
    "empty narrow wide tall deep slow quick gentle busy lazy happy tired clever";
static const char eval_nouns[] = "house garden river road tree bridge hill field market street window wall table room village forest lake mountain boat train station "
    "school church shop park cloud wind rain sun moon star stone leaf flower bird farm mill gate path fence";
static const char eval_beasts[] = "fox owl bear wolf mouse cat dog rabbit horse cow sheep goat duck goose hen frog turtle snail bee ant lion tiger elephant monkey";
static const char eval_foods[] = "pizza pasta soup bread cheese rice salad cake chocolate apples";
static const char eval_jobs[] = "teacher doctor nurse baker farmer painter singer writer driver pilot";
static const char eval_days[] = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday";
static const char eval_labels[] = "zip zap foo bar left right one two";
static const char eval_syllables[] = "ba be bo da do fi ga go ka ki ko la le li lo ma mi mo na ne ni no pa pi ra ri ro sa se si so ta te ti to va ve vi vo za zo bra dre kli sto tru";
static const char *const filler_forms[] = {             // $n, $m nouns, $a, $b adjectives, $x an animal, $d a day
    "The $n was $a and $b.", "There is a $n near the $m.", "A $a $n stood behind the $m.", "On $d the $n looked $a.", "The $x walked along the $a $n.",
    "We saw a $a $x by the $n.", "The $n is $a in the morning.", "People say that the $n was once $a.", "It rained on the $n all day.", "The wind moved the $n and the $m.",
    "Nobody knew why the $n was so $a.", "A $x slept under the $m.", "The $a $n leads to the $b $m.", "Every $d the $m is $b.", "The sun shone on the $n.",
    "It was a $a day in the $m.", "They painted the $n and cleaned the $m.", "The $m was full of people.", "From the $n you can see the $m.", "Some like the $n, others like the $m.",
};

typedef struct {            // what a generator works with
    const Tokenizer *tok;
    EvalSet *set;
    const char *task;
    int number, text;       // of the item in its task (it chooses kind and depth); of the text in the run
    int length, metric;
    uint64_t rng;
    char **used;            // stb_ds: words drawn in this item
} Gen;

static int gen_int(Gen *g, int n) { return (int)(splitmix64(&g->rng) % (uint64_t)n); }  // [0,n)
static int gen_tokens(const Gen *g, const char *text) {
    int *ids = tokenizer_encode(g->tok, text, strlen(text), 0, NULL), n = (int)arrlen(ids);
    arrfree(ids);
    if (!n && *text) die(EXIT_USAGE, "--eval: the tokenizer makes nothing of \"%.60s\"", text);
    return n;
}
static char *gen_word(Gen *g, const char *list) {        // one of the words of a list
    int n = 1;
    for (const char *p = list; *p; p++) n += *p == ' ';
    for (int k = gen_int(g, n); k; k--) list = strchr(list, ' ') + 1;
    return set_text(g->set, list, strcspn(list, " "));
}
static char *gen_syllables(Gen *g, int n) {
    char text[32] = "";
    for (int i = 0; i < n; i++) strncat(text, gen_word(g, eval_syllables), 4);
    return set_text(g->set, text, strlen(text));
}
enum { A_NAME, A_KEY, A_CODE, A_THING, A_CITY, A_ANIMAL, A_ROOM, AN_AGE };
static char *gen_value(Gen *g, int what) {
    static const char *lists[] = { [A_CITY] = eval_cities, [A_ANIMAL] = eval_animals, [A_ROOM] = eval_rooms };
    if (what == A_CODE)
        for (;;) {
            int n = 100 + gen_int(g, 99900), sum = 0;
            if (gen_int(g, 2)) n = n % 9000 + 1000;      // four digits most of the time
            for (int x = n; x; x /= 10) sum += x % 10;
            if (sum % 8 == 0) return set_printf(g->set, "%d", n);
        }
    if (what == AN_AGE) return set_printf(g->set, "%d", 8 + gen_int(g, 87));
    if (what == A_THING) { char *colour = gen_word(g, eval_colours); return set_printf(g->set, "%s %s", colour, gen_word(g, eval_things)); }
    if (what == A_NAME && gen_int(g, 10) < 7) return gen_word(g, eval_names);
    if (what != A_NAME && what != A_KEY) return gen_word(g, lists[what]);
    char *name = gen_syllables(g, what == A_KEY ? 3 : 2 + gen_int(g, 2));
    if (what == A_NAME) *name = (char)toupper((unsigned char)*name);
    return name;
}
// A value, or a word of a list, that this item does not have yet, as far as the list goes.
static char *gen_fresh_word(Gen *g, const char *list, int what) {
    char *v;
    int tries = 0;
    do v = list ? gen_word(g, list) : gen_value(g, what); while (word_in(g->used, v) >= 0 && tries++ < 200);
    arrput(g->used, v);
    return v;
}
static char *gen_fresh(Gen *g, int what) { return gen_fresh_word(g, NULL, what); }
// "red box" -> another colour of the same thing, or another thing of that colour.
static char *near_miss(Gen *g, const char *thing) {
    char *v;
    int blank = (int)strcspn(thing, " ");
    do v = gen_int(g, 2) ? set_printf(g->set, "%.*s %s", blank, thing, gen_word(g, eval_things)) : set_printf(g->set, "%s%s", gen_word(g, eval_colours), thing + blank);
    while (word_in(g->used, v) >= 0);
    arrput(g->used, v);
    return v;
}
static char *filler_line(Gen *g) {
    const char *form = filler_forms[gen_int(g, sizeof filler_forms / sizeof *filler_forms)];
    char *text = NULL;
    for (const char *p = form; *p; p++) {
        if (*p != '$') { arrput(text, *p); continue; }
        p++;
        const char *w = gen_word(g, *p == 'n' || *p == 'm' ? eval_nouns : *p == 'x' ? eval_beasts : *p == 'd' ? eval_days : eval_adjs);
        bytes_put(&text, w, strlen(w));
    }
    char *line = set_text(g->set, text, (size_t)arrlen(text));
    arrfree(text);
    return line;
}
static int int_order(const void *a, const void *b) { int x = *(const int *)a, y = *(const int *)b; return (x > y) - (x < y); }
// About `tokens` tokens of lines (stb_ds): filler with the keys in it, in their order, anywhere; with a depth >= 0 keys[0] stands at
// that share of the lines instead.
static char **document(Gen *g, int tokens, char **keys, int depth) {
    char **lines = NULL;
    int *at = NULL, n = (int)arrlen(keys);
    for (int i = 0; i < n; i++) tokens -= gen_tokens(g, set_printf(g->set, " %s", keys[i]));
    while (tokens > 4) {
        arrput(lines, filler_line(g));
        tokens -= gen_tokens(g, set_printf(g->set, " %s", arrlast(lines)));
    }
    for (int i = depth >= 0; i < n; i++) arrput(at, gen_int(g, (int)arrlen(lines) + 1));
    if (at) qsort(at, (size_t)arrlen(at), sizeof *at, int_order);
    for (int i = (int)arrlen(at) - 1; i >= 0; i--) { int k = at[i]; arrins(lines, k, keys[i + (depth >= 0)]); }
    int own = (int)arrlen(lines) * depth / 100;
    if (depth >= 0) arrins(lines, own, keys[0]);
    arrfree(at);
    return lines;
}
// One message: the query before (0), amid (1) or behind (2) the lines; NULL: the lines alone.
static char *message(EvalSet *e, char **lines, const char *sep, const char *query, int position) {
    char *text = NULL;
    int n = (int)arrlen(lines), at = position == 0 ? 0 : position == 1 ? n / 2 : n;
    for (int i = 0; i <= n; i++)
        for (int mine = i == at && query; mine >= 0; mine--) {
            const char *p = mine ? query : i < n ? lines[i] : NULL;
            if (!p) continue;
            if (arrlen(text)) bytes_put(&text, sep, strlen(sep));
            bytes_put(&text, p, strlen(p));
        }
    char *kept = set_text(e, text, (size_t)arrlen(text));
    arrfree(text);
    return kept;
}

// A turn before its query is placed: lines to read and a question about them, or (lines NULL) a turn as it is.
typedef struct { char **lines; const char *sep; EvalTurn turn; } Passage;
// Adds versions from..to-1 of a dialogue, the same texts in each: with the query before, amid and behind its text, and (version 3) in a
// turn of its own after it. Takes the passages.
static void add_versions(Gen *g, Passage *p, int from, int to) {
    for (int v = from; v < to; v++) {
        EvalItem it = { .task = g->task, .number = g->text, .length = g->length, .metric = g->metric };
        for (int i = 0; i < (int)arrlen(p); i++) {
            EvalTurn t = turn_copy(&p[i].turn);
            if (p[i].lines && v == 3) arrput(it.turn, plain_turn(message(g->set, p[i].lines, p[i].sep, NULL, 2), "I have read it."));
            else if (p[i].lines) { t.user = message(g->set, p[i].lines, p[i].sep, t.user, v); t.position = v; }
            arrput(it.turn, t);
        }
        arrput(g->set->item, it);
    }
    for (int i = 0; i < (int)arrlen(p); i++) { arrfree(p[i].lines); turn_free_lists(&p[i].turn); }
    arrfree(p);
}
static void add_passage(Passage **p, char **lines, const char *sep, EvalTurn turn) { arrput(*p, ((Passage){ lines, sep, turn })); }

// A kind of fact: the sentence that tells it, the question, the reply, each of who and (not the question) what.
typedef struct { const char *say, *ask, *reply; int value; } Fact;
static const Fact thing_facts[] = {
    { "The secret code of the %s is %s.", "What is the secret code of the %s?", "The secret code of the %s is {%s}.", A_CODE },
    { "The number of the %s is %s.", "What is the number of the %s?", "The number of the %s is {%s}.", A_CODE },
    { "The %s costs %s coins.", "How much does the %s cost?", "The %s costs {%s} coins.", A_CODE },
    { "The %s is in the %s.", "Where is the %s?", "The %s is in the {%s}.", A_ROOM },
};
static const Fact people_facts[] = {
    { "%s lives in %s.", "Where does %s live?", "You said that %s lives in {%s}.", A_CITY },
    { "%s is %s years old.", "How old is %s?", "You said that %s is {%s} years old.", AN_AGE },
    { "%s saw a %s.", "What did %s see?", "You said that %s saw a {%s}.", A_ANIMAL },
    { "%s's number is %s.", "What is %s's number?", "You said that %s's number is {%s}.", A_CODE },
};
// A fact with a new value: the sentence goes into *lines, the question comes back. (Nowhere do two arguments of a call draw: C leaves
// their order to the compiler, and the texts shall not depend on it.)
static EvalTurn tell_fact(Gen *g, const Fact *f, const char *who, char ***lines) {
    char *what = gen_fresh(g, f->value);
    EvalTurn t = gold_turn(g->set, set_printf(g->set, f->ask, who), set_printf(g->set, f->reply, who, what));
    arrput(*lines, set_printf(g->set, f->say, who, what));
    arrput(t.evidence, arrlast(*lines));
    return t;
}
static void tell_only(Gen *g, const Fact *f, const char *who, char ***lines) { arrput(*lines, set_printf(g->set, f->say, who, gen_fresh(g, f->value))); }
// Three numbers of one thing, told in *lines[0..2] (which may be one list).
static EvalTurn tell_values(Gen *g, char ***lines[3]) {
    const char *t = gen_fresh(g, A_THING), *v[3];
    for (int i = 0; i < 3; i++) v[i] = gen_fresh(g, A_CODE);
    EvalTurn q = gold_turn(g->set, set_printf(g->set, "What are the numbers of the %s?", t), set_printf(g->set, "The numbers of the %s are {%s}, {%s}, {%s}.", t, v[0], v[1], v[2]));
    for (int i = 0; i < 3; i++) {
        arrput(q.evidence, set_printf(g->set, "A number of the %s is %s.", t, v[i]));
        arrput(*lines[i], arrlast(q.evidence));
    }
    char ***other = lines[gen_int(g, 3)], *near = near_miss(g, t);
    arrput(*other, set_printf(g->set, "A number of the %s is %s.", near, gen_fresh(g, A_CODE)));
    return q;
}

// One message with two questions, one reply with both answers. Takes both turns.
static EvalTurn ask_both(Gen *g, EvalTurn *a, EvalTurn *b) {
    EvalTurn t = turn_copy(a);
    int shift = (int)strlen(a->reply) + 1;
    t.user = set_printf(g->set, "%s %s", a->user, b->user);
    t.reply = set_printf(g->set, "%s %s", a->reply, b->reply);
    t.answers[0] = set_printf(g->set, "%s %s", a->answers[0], b->answers[0]);
    for (int i = 0; i < (int)arrlen(b->span); i++) arrput(t.span, b->span[i] + shift);
    for (int i = 0; i < (int)arrlen(b->evidence); i++) arrput(t.evidence, b->evidence[i]);
    turn_free_lists(a); turn_free_lists(b);
    return t;
}

// needle: facts about things somewhere in filler. By number: one needle; six, asked for one and, in the next turn, for another;
// three numbers of one thing; four, two of them asked for in one question. The first one asked for stands at the depth.
static void gen_needle(Gen *g) {
    int kind = g->number % 4, n = kind == 0 ? 1 : kind == 1 ? 6 : 4, depth = kind == 2 ? -1 : 30 * g->number % 110;
    const Fact *f = &thing_facts[gen_int(g, 4)];
    char **keys = NULL;
    Passage *p = NULL;
    EvalTurn q, second = { 0 };
    if (kind == 2) q = tell_values(g, (char ***[3]){ &keys, &keys, &keys });
    else {
        char *thing = gen_fresh(g, A_THING);
        q = tell_fact(g, f, thing, &keys);
        if (n > 1) second = tell_fact(g, f, near_miss(g, thing), &keys);
        for (int i = 2; i < n; i++) tell_only(g, f, gen_fresh(g, A_THING), &keys);
    }
    if (kind == 3) q = ask_both(g, &q, &second);
    q.depth = depth;
    add_passage(&p, document(g, g->length - gen_tokens(g, q.user), keys, depth), " ", q);
    if (kind == 1) add_passage(&p, NULL, NULL, second);
    arrfree(keys);
    add_versions(g, p, 0, 4);
}

// A question of `hops` steps whose facts are told in as many different messages of 0..j, each with a near miss beside it (loopserve.md 6).
// One hop: a fact about a thing. Two: who is with whom, and where that one lives. Three: three numbers of one thing.
static EvalTurn tell_hops(Gen *g, char **keys[], int j, int hops) {
    int at[3] = { 0, 1, 2 };
    for (int i = 0, n = j + 1; i < hops && i < n; i++) { int k = i + gen_int(g, n - i), x = at[i]; at[i] = at[k]; at[k] = x; }
    if (hops == 3) return tell_values(g, (char ***[3]){ &keys[at[0]], &keys[at[1]], &keys[at[2]] });
    if (hops == 1) {
        const Fact *f = &thing_facts[gen_int(g, 3)];
        char *thing = gen_fresh(g, A_THING);
        EvalTurn q = tell_fact(g, f, thing, &keys[at[0]]);
        tell_only(g, f, near_miss(g, thing), &keys[at[0]]);
        return q;
    }
    static const char *verbs[][2] = { { "works with", "Where does the person live who %s works with?" }, { "is married to", "Where does the person live who %s is married to?" },
                                      { "is a friend of", "Where does the friend of %s live?" } };
    const char **verb = verbs[gen_int(g, 3)];
    EvalTurn q = { 0 };
    for (int i = 0; i < 2; i++) {                        // the chain, and another one like it
        char *a = gen_fresh(g, A_NAME), *b = gen_fresh(g, A_NAME), *city = gen_fresh(g, A_CITY);
        arrput(keys[at[0]], set_printf(g->set, "%s %s %s.", a, verb[0], b));
        arrput(keys[at[1]], set_printf(g->set, "%s lives in %s.", b, city));
        if (i) break;
        q = gold_turn(g->set, set_printf(g->set, verb[1], a), set_printf(g->set, "You said that %s %s %s, and %s lives in {%s}.", a, verb[0], b, b, city));
        arrput(q.evidence, arrlast(keys[at[0]]));
        arrput(q.evidence, arrlast(keys[at[1]]));
    }
    return q;
}
// Where a thing is: told in the first message, changed in the two others; the last one is right. Another thing moves, too.
static EvalTurn tell_moves(Gen *g, char **keys[3]) {
    char *thing = gen_fresh(g, A_THING), *other = near_miss(g, thing), *room = NULL, *last = NULL;
    for (int i = 0; i < 3; i++) {
        const char *form = i ? "I moved the %s to the %s." : "The %s is in the %s.";
        for (int k = 0, swap = gen_int(g, 2); k < 2; k++) {
            char *what = k == swap ? thing : other, *where = gen_fresh(g, A_ROOM);
            arrput(keys[i], set_printf(g->set, form, what, where));
            if (what == thing) { room = where; last = arrlast(keys[i]); }
        }
    }
    EvalTurn q = gold_turn(g->set, set_printf(g->set, "Where is the %s now?", thing), set_printf(g->set, "The %s is in the {%s}.", thing, room));
    arrput(q.evidence, last);
    return q;
}
// names[from..to) as a user lists them, "a, b and c", or marked: as the answer does, "{a}, {b}, {c}".
static char *name_list(EvalSet *e, char **names, int from, int to, int marked) {
    char *text = "";
    for (int i = from; i < to; i++)
        text = set_printf(e, marked ? "%s%s{%s}" : "%s%s%s", text, i == from ? "" : i == to - 1 && !marked ? " and " : ", ", names[i]);
    return text;
}

// multiturn: three messages to read, each with a question that needs 1..j of the messages so far; between them a list of twelve names in
// two parts. At the end, in turns of their own: where the thing is that moved in every message, and the whole list.
static void gen_multiturn(Gen *g) {
    char **keys[3] = { 0 }, **names = NULL;
    EvalTurn q[3];
    Passage *p = NULL;
    for (int j = 0; j < 3; j++) q[j] = tell_hops(g, keys, j, 1 + gen_int(g, j + 1));
    EvalTurn moved = tell_moves(g, keys);
    for (int i = 0; i < 12; i++) arrput(names, gen_fresh(g, A_NAME));
    char *half[2] = { set_printf(g->set, "My guest list: %s.", name_list(g->set, names, 0, 6, 0)), set_printf(g->set, "Add %s.", name_list(g->set, names, 6, 12, 0)) };
    int room = g->length - gen_tokens(g, half[0]) - gen_tokens(g, half[1]) - 2 * gen_tokens(g, moved.user);
    for (int j = 0; j < 3; j++) {
        add_passage(&p, document(g, room / 3 - gen_tokens(g, q[j].user), keys[j], -1), " ", q[j]);
        if (j < 2) add_passage(&p, NULL, NULL, plain_turn(half[j], "Okay."));
        arrfree(keys[j]);
    }
    EvalTurn list = gold_turn(g->set, "What is on my guest list?", set_printf(g->set, "Your guest list: %s.", name_list(g->set, names, 0, 12, 1)));
    for (int i = 0; i < 2; i++) arrput(list.evidence, half[i]);
    add_passage(&p, NULL, NULL, moved);
    add_passage(&p, NULL, NULL, list);
    arrfree(names);
    add_versions(g, p, 0, 3);
}

static void add_filler_turns(Gen *g, Passage **p, int tokens) {          // messages of about 100 tokens that no question is about; at most eight
    int n = tokens < 150 ? 1 : tokens / 100 < 8 ? tokens / 100 : 8;
    for (int i = 0; i < n; i++) {
        char **lines = document(g, tokens / n, NULL, -1);
        add_passage(p, NULL, NULL, plain_turn(message(g->set, lines, " ", NULL, 2), "I see."));
        arrfree(lines);
    }
}
// coref: somebody is named once; two facts follow with a pronoun alone, messages about nothing lie between, and facts of the same kinds
// about somebody else came before. Both are asked.
static void gen_coref(Gen *g) {
    Passage *p = NULL;
    char *name = gen_fresh(g, A_NAME), *other = gen_fresh(g, A_NAME);
    const char *said = gen_int(g, 2) ? "She" : "He", *its = *said == 'S' ? "Her" : "His";
    int first = gen_int(g, 4), kinds[2] = { first, (first + 1 + gen_int(g, 3)) % 4 };
    EvalTurn q[2];
    char **lines = NULL;
    for (int i = 0; i < 2; i++) tell_only(g, &people_facts[kinds[i]], other, &lines);
    int room = g->length - 7 * gen_tokens(g, lines[0]);    // four facts, the name and two questions are about as long
    for (int i = 0; i < 2; i++) add_passage(&p, NULL, NULL, plain_turn(lines[i], "Okay."));
    char *met = set_printf(g->set, "I have a friend called %s.", name);
    add_passage(&p, NULL, NULL, plain_turn(met, "Okay."));
    for (int i = 0; i < 2; i++) {
        const Fact *f = &people_facts[kinds[i]];
        int owns = f == &people_facts[3];                // "Her number is ..."
        add_filler_turns(g, &p, room / 3);
        q[i] = tell_fact(g, f, name, &lines);
        q[i].evidence[0] = set_printf(g->set, owns ? "%s number is %s." : f->say, owns ? its : said, q[i].answers[0]);
        arrput(q[i].evidence, met);
        add_passage(&p, NULL, NULL, plain_turn(q[i].evidence[0], "Okay."));
    }
    add_filler_turns(g, &p, room / 3);
    for (int i = 0; i < 2; i++) add_passage(&p, NULL, NULL, q[i]);
    arrfree(lines);
    add_versions(g, p, 3, 4);
}

// facts: two facts about each of five people, scattered over four messages with filler; then two are asked, the second when the first
// question has already gone through the cache.
static void gen_facts(Gen *g) {
    Passage *p = NULL;
    int first = gen_int(g, 4), kinds[2] = { first, (first + 1 + gen_int(g, 3)) % 4 }, a = gen_int(g, 5), b = (a + 1 + gen_int(g, 4)) % 5;
    char **keys[4] = { 0 };
    EvalTurn q[2];
    for (int i = 0; i < 5; i++) {
        char *name = gen_fresh(g, A_NAME);
        for (int k = 0; k < 2; k++) {
            const Fact *f = &people_facts[kinds[k]];
            EvalTurn t = tell_fact(g, f, name, &keys[gen_int(g, 4)]);
            if (i == (k ? b : a)) q[k] = t; else turn_free_lists(&t);
        }
    }
    for (int j = 0; j < 4; j++) {
        char **lines = document(g, g->length / 4 - 5, keys[j], -1);         // room for the two questions
        add_passage(&p, NULL, NULL, plain_turn(message(g->set, lines, " ", NULL, 2), "Okay."));
        arrfree(lines); arrfree(keys[j]);
    }
    for (int k = 0; k < 2; k++) add_passage(&p, NULL, NULL, q[k]);
    add_versions(g, p, 3, 4);
}

// json: look-up of one key among many that fill the text, as two JSON objects, as code or as prose, by number; one other key differs from
// the one asked for in its last syllable. A second key is asked for in the next turn.
static void gen_json(Gen *g) {
    static const char *forms[] = { "\"%s\": %s", "%s = %s", "%s is %s." }, *seps[] = { ", ", "\n", " " };
    int kind = g->number % 3, depth = 30 * g->number % 110;
    char **lines = NULL, *key = gen_fresh(g, A_KEY), *near;
    Fact f = { forms[kind], "What is the value of %s?", "The value of %s is {%s}.", A_CODE };
    Passage *p = NULL;
    do near = set_printf(g->set, "%.*s%s", (int)strlen(key) - 2, key, gen_word(g, eval_syllables)); while (word_in(g->used, near) >= 0);
    arrput(g->used, near);
    EvalTurn q = tell_fact(g, &f, key, &lines), second = tell_fact(g, &f, near, &lines);
    arrsetlen(lines, 0);                                 // both, and their questions, come in later; the rest first, in ever smaller steps
    for (int left; (left = g->length - 4 * gen_tokens(g, q.evidence[0]) - gen_tokens(g, message(g->set, lines, seps[kind], NULL, 2))) > 8; )
        for (int i = 0; i <= left / 20; i++) tell_only(g, &f, gen_fresh(g, A_KEY), &lines);
    int other = gen_int(g, (int)arrlen(lines) + 1), own;
    arrins(lines, other, second.evidence[0]);
    own = (int)arrlen(lines) * depth / 100;
    arrins(lines, own, q.evidence[0]);
    q.depth = depth;
    if (kind == 0) {                                     // two lines: an object each
        char **half[2] = { 0 };
        for (int i = 0, n = (int)arrlen(lines); i < n; i++) arrput(half[i >= n / 2], lines[i]);
        arrsetlen(lines, 0);
        for (int i = 0; i < 2; i++) { arrput(lines, set_printf(g->set, "{%s}", message(g->set, half[i], ", ", NULL, 2))); arrfree(half[i]); }
    }
    add_passage(&p, lines, kind == 2 ? " " : "\n", q);
    add_passage(&p, NULL, NULL, second);
    add_versions(g, p, 0, 4);
}

// fewshot: three labels that examples alone define, three examples each; the first ones come in one message behind filler, the rest in
// the next, with the word to label.
static void gen_fewshot(Gen *g) {
    static const char *pools[] = { eval_beasts, eval_foods, eval_jobs, eval_cities, eval_colours, eval_things };
    static const char kinds[] = "animal food job city colour thing";
    char **shots = NULL, **classes = NULL, **lines = document(g, g->length - 50, NULL, -1);
    int first = gen_int(g, 6), step = 1 + gen_int(g, 2), own = gen_int(g, 2), right = gen_int(g, 3);
    Passage *p = NULL;
    for (int k = 0; k < 3; k++) {
        int pool = (first + k * step) % 6;
        const char *kind = kinds;
        for (int i = 0; i < pool; i++) kind = strchr(kind, ' ') + 1;
        arrput(classes, own ? set_text(g->set, kind, strcspn(kind, " ")) : gen_fresh_word(g, eval_labels, 0));
        for (int i = 0; i < 3; i++) arrput(shots, set_printf(g->set, "%s: %s", gen_fresh_word(g, pools[pool], 0), classes[k]));
    }
    char *word = gen_fresh_word(g, pools[(first + right * step) % 6], 0), **part[2] = { 0 };
    EvalTurn q = gold_turn(g->set, set_printf(g->set, "%s:", word), set_printf(g->set, "The label is {%s}.", classes[right]));
    for (int i = 0; i < 3; i++) arrput(q.evidence, shots[3 * right + i]);
    for (int i = 8; i > 0; i--) { int k = gen_int(g, i + 1); char *x = shots[i]; shots[i] = shots[k]; shots[k] = x; }
    for (int i = 0; i < 9; i++) arrput(part[i >= 4], shots[i]);
    char *text = message(g->set, lines, " ", NULL, 2), *shown = message(g->set, part[0], "\n", NULL, 2);
    q.user = message(g->set, part[1], "\n", q.user, 2);
    q.classes = classes;
    add_passage(&p, NULL, NULL, plain_turn(set_printf(g->set, "%s\n%s", text, shown), "I have read it."));
    add_passage(&p, NULL, NULL, q);
    arrfree(shots); arrfree(lines); arrfree(part[0]); arrfree(part[1]);
    add_versions(g, p, 3, 4);
}

// summary: one sentence of the text says that it is the one that matters; the right reply repeats it.
static void gen_summary(Gen *g) {
    static const char *marks[] = { "The main point is that %s.", "Important: %s.", "The most important thing is that %s." };
    int depth = 30 * g->number % 110, kind = gen_int(g, 4), hour = 1 + gen_int(g, 12);
    char *name = gen_value(g, A_NAME), *city = gen_value(g, A_CITY), *day = gen_word(g, eval_days), *noun = gen_word(g, eval_nouns), *thing = gen_word(g, eval_things);
    char *point = kind == 0 ? set_printf(g->set, "the %s is closed on %s", noun, day) : kind == 1 ? set_printf(g->set, "%s will come to %s on %s", name, city, day)
                : kind == 2 ? set_printf(g->set, "the meeting is in the %s at %d", gen_value(g, A_ROOM), hour) : set_printf(g->set, "the %s needs a new %s", noun, thing);
    char **keys = NULL;
    Passage *p = NULL;
    arrput(keys, set_printf(g->set, marks[gen_int(g, 3)], point));
    EvalTurn q = gold_turn(g->set, gen_int(g, 2) ? "What is the main point?" : "Give me a summary.", set_printf(g->set, "The main point is that {%s.}", point));
    q.depth = depth;
    arrput(q.evidence, keys[0]);
    add_passage(&p, document(g, g->length - gen_tokens(g, q.user), keys, depth), " ", q);
    arrfree(keys);
    add_versions(g, p, 0, 4);
}

static const struct { const char *name; int metric; void (*make)(Gen *g); } eval_tasks[] = {
    { "needle", METRIC_F1, gen_needle }, { "multiturn", METRIC_F1, gen_multiturn }, { "coref", METRIC_F1, gen_coref }, { "facts", METRIC_F1, gen_facts },
    { "json", METRIC_F1, gen_json }, { "fewshot", METRIC_CLASS, gen_fewshot }, { "summary", METRIC_ROUGE, gen_summary },
};
enum { EVAL_TASKS = sizeof eval_tasks / sizeof *eval_tasks };
// Adds items 0..n-1 of a task at every length.
static void make_items(EvalSet *e, const Tokenizer *tok, int task, const int *lengths, int n, uint64_t seed) {
    for (int k = 0; k < (int)arrlen(lengths); k++)
        for (int i = 0; i < n; i++) {
            Gen g = { .tok = tok, .set = e, .task = eval_tasks[task].name, .number = i, .length = lengths[k], .metric = eval_tasks[task].metric };
            g.text = arrlen(e->item) ? arrlast(e->item).number + 1 : 0;
            g.rng = mix64(mix64(mix64(mix64(seed) + (uint64_t)task) + (uint64_t)lengths[k]) + (uint64_t)i);
            eval_tasks[task].make(&g);
            arrfree(g.used);
        }
}

// ---- items from a file, one json object a line; blank lines are skipped. A dialogue: {"type":..,"metric":..,"turns":[{"user":.. or
// "paras":[..] and "query":.., "answers":[..], "classes":[..], "reply":..},..]}; turns without answers are not scored, a reply is the whole sentence around the first answer. LongBench:
// {"input":..,"context":..,"answers":[..],"all_classes":[..] or null,"dataset":..}: one turn, the context and behind it the input.
// err is filled and -1 comes back when a line is neither.
static int read_list(EvalSet *e, const Json *obj, const char *key, char ***list, char err[512]) {
    const Json *j = json_get(obj, key);
    if (json_none(j)) return 0;
    if (j->type != JSON_ARRAY || !j->n) return fault(err, "'%s' is no list of texts", key);
    for (int i = 0; i < j->n; i++) {
        if (j->item[i].type != JSON_STRING) return fault(err, "'%s' holds something else than texts", key);
        arrput(*list, set_text(e, j->item[i].str, j->item[i].len));
    }
    return 0;
}
static int read_text(EvalSet *e, const Json *obj, const char *key, char **text, char err[512]) {       // *text stays as it is when there is none
    const Json *j = json_get(obj, key);
    if (json_none(j)) return 0;
    if (j->type != JSON_STRING) return fault(err, "'%s' is no text", key);
    *text = set_text(e, j->str, j->len);
    return 0;
}
static int read_turn(EvalSet *e, const Json *obj, EvalTurn *t, char err[512]) {
    char **paras = NULL, *query = NULL;
    if (obj->type != JSON_OBJECT) return fault(err, "is no object");
    t->position = t->depth = -1;
    int bad = read_text(e, obj, "user", &t->user, err) || read_text(e, obj, "query", &query, err) || read_text(e, obj, "reply", &t->reply, err)
           || read_list(e, obj, "paras", &paras, err) || read_list(e, obj, "answers", &t->answers, err) || read_list(e, obj, "classes", &t->classes, err);
    if (!bad && !t->user && (paras || query)) {
        t->user = message(e, paras, "\n\n", query, 2);
        if (paras && query) t->position = 2;
    }
    const char *at = !bad && t->reply && t->answers ? strstr(t->reply, t->answers[0]) : NULL;
    if (at) { arrput(t->span, (int)(at - t->reply)); arrput(t->span, (int)(at - t->reply + (int)strlen(t->answers[0]))); }
    arrfree(paras);
    return bad ? -1 : t->user ? 0 : fault(err, "has neither 'user' nor 'paras' and 'query'");
}
static int read_dialogue(EvalSet *e, const Json *obj, const Json *turns, EvalItem *it, char err[512]) {
    const char *metric = json_text(obj, "metric");
    char why[512];
    if (turns->type != JSON_ARRAY || !turns->n) return fault(err, "'turns' is no list of turns");
    while (*metric && it->metric < METRICS && strcmp(metric, eval_metrics[it->metric])) it->metric++;
    if (it->metric == METRICS) return fault(err, "'metric' wants one of f1, accuracy, rouge, rouge-longbench, found, exact, found '%.40s'", metric);
    if (!*metric) it->metric = METRIC_FOUND;
    if (*json_text(obj, "type")) it->task = set_text(e, json_text(obj, "type"), strlen(json_text(obj, "type")));
    for (int i = 0; i < turns->n; i++) {
        EvalTurn t = { 0 };
        int bad = read_turn(e, &turns->item[i], &t, why);
        arrput(it->turn, t);
        if (bad) return fault(err, "turn %d: %.400s", i + 1, why);
        if (it->metric == METRIC_CLASS && t.answers && !t.classes) return fault(err, "turn %d: metric accuracy wants 'classes'", i + 1);
    }
    return 0;
}
static int read_longbench(EvalSet *e, const Json *obj, EvalItem *it, char err[512]) {
    static const char *summaries[] = { "gov_report", "qmsum", "multi_news", "vcsum", "samsum", "dureader" }, *one_line[] = { "trec", "lsht", "triviaqa", "samsum" };
    char *context = NULL, *input = NULL, **lines = NULL;
    EvalTurn t = { .position = 2, .depth = -1 };
    int bad = read_text(e, obj, "context", &context, err) || read_text(e, obj, "input", &input, err)
           || read_list(e, obj, "answers", &t.answers, err) || read_list(e, obj, "all_classes", &t.classes, err);
    if (!bad && !t.answers) bad = fault(err, "a LongBench item without 'answers'");
    if (!bad && context && *context) arrput(lines, context);
    t.user = message(e, lines, "\n\n", input && *input ? input : NULL, 2);
    arrfree(lines);
    arrput(it->turn, t);
    if (!bad && !*t.user) bad = fault(err, "'context' and 'input' are both empty");
    if (*json_text(obj, "dataset")) it->task = set_text(e, json_text(obj, "dataset"), strlen(json_text(obj, "dataset")));
    it->metric = t.classes ? METRIC_CLASS : METRIC_F1;
    for (size_t i = 0; i < sizeof summaries / sizeof *summaries; i++) if (!strncmp(it->task, summaries[i], strlen(summaries[i]))) it->metric = METRIC_ROUGE_LONGBENCH;
    for (size_t i = 0; i < sizeof one_line / sizeof *one_line; i++) it->first_line |= !strncmp(it->task, one_line[i], strlen(one_line[i]));
    return bad;
}
static int read_item(EvalSet *e, const Tokenizer *tok, const char *line, size_t n, char err[512]) {
    Json *obj = json_parse(line, n, err);
    if (!obj) return -1;
    const Json *turns = json_get(obj, "turns");
    EvalItem it = { .task = "file", .number = (int)arrlen(e->item) };
    int bad = obj->type != JSON_OBJECT ? fault(err, "is no object") : turns ? read_dialogue(e, obj, turns, &it, err)
            : json_get(obj, "input") || json_get(obj, "context") ? read_longbench(e, obj, &it, err)
            : fault(err, "neither 'turns' (a dialogue) nor 'input' and 'context' (LongBench)");
    for (int i = 0; i < (int)arrlen(it.turn) && !bad; i++) {
        int *ids = tokenizer_encode(tok, it.turn[i].user, strlen(it.turn[i].user), 0, NULL);
        it.length += (int)arrlen(ids);
        arrfree(ids);
    }
    arrput(e->item, it);
    json_free(obj);
    return bad;
}
static void read_items(EvalSet *e, const Tokenizer *tok, const char *path) {
    char err[512], *end;
    size_t n;
    char *text = read_file(path, &n, err);
    int line = 1, scored = 0;
    if (!text) die(EXIT_USAGE, "--eval-file %s", err);
    for (char *p = text, *stop = text + n; p < stop; p = end + 1, line++) {
        end = memchr(p, '\n', (size_t)(stop - p));
        if (!end) end = stop;
        char *solid = p;
        while (solid < end && isspace((unsigned char)*solid)) solid++;
        if (solid == end || !read_item(e, tok, p, (size_t)(end - p), err)) continue;
        free(text);
        die(EXIT_USAGE, "--eval-file %s, line %d: %s", path, line, err);
    }
    free(text);
    for (int i = 0; i < (int)arrlen(e->item); i++) for (int j = 0; j < (int)arrlen(e->item[i].turn); j++) scored += e->item[i].turn[j].answers != NULL;
    if (!scored) die(EXIT_USAGE, "--eval-file %s: no turn has 'answers'", path);
}

// ---- playing an item
static void play_start(App *a) {
    record_clear(a);
    session_reset(a->s);
    a->closed = 0;
    interrupts = 0;
}
static void play_prefill(App *a, const char *text) {
    Turn t = render_turn(a, text);
    arrput(a->turn, t);
    feed_prefill(a, &t);
}
// The right reply as ids: the sentence, else the first answer; a turn that nobody scores is answered with a nod.
static int *gold_ids(const App *a, const EvalTurn *t) {
    const char *text = t->reply ? t->reply : t->answers ? t->answers[0] : "Okay.";
    return tokenizer_encode(a->tok, text, strlen(text), 0, NULL);
}
static void note_answer(const EvalItem *it, int turn, const char *said, Score *sc) {
    const EvalTurn *t = &it->turn[turn];
    while (it->first_line && *said == '\n') said++;
    char *line = strndup(said, it->first_line ? strcspn(said, "\n") : strlen(said)), *rest = without_frame(t, line);
    arrput(sc->answers, ((Answer){ it->task, it->number, turn, (int)arrlen(it->turn), t->position, it->length, t->depth, best_score(it->metric, rest, t), 0 }));
    sc->exact += best_score(METRIC_EXACT, rest, t);
    sc->found += best_score(METRIC_FOUND, rest, t);
    sc->f1 += best_score(METRIC_F1, rest, t);
    sc->rouge += best_score(METRIC_ROUGE, rest, t);
    sc->rouge_lb += best_score(METRIC_ROUGE_LONGBENCH, rest, t);
    free(rest);
    free(line);
}
static void note_cost(const Session *s, Score *sc) {      // what the session cost, once an item
    sc->items++;
    sc->peak = fmax(sc->peak, (double)s->clk.peak);
    sc->stored += (double)kv_bytes(s); sc->full += (double)kv_bytes_full(s); sc->attended += bytes_a_step(s);
    sc->prefill_s += s->clk.prefill; sc->decode_s += s->clk.decode;
    sc->n_prefill += (double)s->clk.n_prefill; sc->n_decode += (double)s->clk.n_decode;
    if ((double)s->clk.peak > sc->peak) sc->peak = (double)s->clk.peak;
}
// The free pass. A reply may be as long as --n-predict, by default 64 tokens or twice the right reply.
static void play_free(App *a, const EvalItem *it, Score *sc) {
    int gold = !strcmp(opt_str(a->o, "eval-history"), "gold");
    play_start(a);
    for (int i = 0; i < (int)arrlen(it->turn); i++) {
        char *said = NULL;
        size_t n = 0;
        int *right = gold_ids(a, &it->turn[i]), most = 2 * (int)arrlen(right) > 64 ? 2 * (int)arrlen(right) : 64;
        FILE *f = open_memstream(&said, &n);
        play_prefill(a, it->turn[i].user);
        generate(a, opt_int(a->o, "n-predict") < 0 ? most : opt_int(a->o, "n-predict"), f);
        fclose(f);
        if (it->turn[i].answers) note_answer(it, i, said, sc);
        if (gold) {                                      // the history is rewritten, so the cache is built anew
            arrfree(arrlast(a->turn).dec);
            arrlast(a->turn).dec = right;
            replay(a, (int)arrlen(a->turn));
        } else arrfree(right);
        free(said);
    }
    note_cost(a->s, sc);
}
// Does token k of a reply touch its answer? from, to: the bytes of the token.
static int in_answer(const EvalTurn *t, int from, int to) {
    int hit = !arrlen(t->span);
    for (int i = 0; i + 1 < (int)arrlen(t->span); i += 2) hit |= from < t->span[i + 1] && to > t->span[i];
    return hit;
}
static double log_sum_exp(const float *x, int n) {
    double max = x[argmax(x, n)], sum = 0;
    for (int i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}
static double divergence(const float *p, const float *q, int n) {       // KL(softmax p || softmax q), nats
    double zp = log_sum_exp(p, n), zq = log_sum_exp(q, n), sum = 0;
    for (int i = 0; i < n; i++) sum += exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
    return sum > 0 ? sum : 0;
}
static void note_logits(const float *ref, const float *y, int V, Score *sc) {           // full attention's logits against the method's
    double d = divergence(ref, y, V);
    sc->kld += d;
    sc->top1 += argmax(ref, V) == argmax(y, V);
    sc->predicted++;
    arrput(sc->each, d);
}
// The forced pass. sc NULL: this is full attention, whose logits go into *ref (stb_ds, V a row) for the methods that follow.
static void play_forced(App *a, const EvalItem *it, float **ref, Score *sc) {
    int V = a->c->V, turns = (int)arrlen(it->turn), answer = sc ? (int)arrlen(sc->answers) : 0;
    size_t row = 0;
    for (int i = 0; i < turns && sc; i++) answer -= it->turn[i].answers != NULL;
    play_start(a);
    for (int i = 0; i < turns; i++) {
        const EvalTurn *t = &it->turn[i];
        int *ids = gold_ids(a, t), n = (int)arrlen(ids), counted = 0;
        Decoder d = { .t = a->tok };
        char *text = NULL;
        double nll = 0;
        play_prefill(a, t->user);
        for (int k = 0; k < n; k++) {
            int from = (int)arrlen(text);
            text = decode_token(&d, ids[k], text);
            if (t->answers && !sc) memcpy(arraddnptr(*ref, V), a->logits, (size_t)V * sizeof **ref);
            if (t->answers && sc) {
                note_logits(*ref + V * row++, a->logits, V, sc);
                if (in_answer(t, from, (int)arrlen(text))) { nll += log_sum_exp(a->logits, V) - a->logits[ids[k]]; counted++; }
            }
            if (i < turns - 1 || k < n - 1) feed_decode(a, ids[k]);      // behind the last token nothing is asked
        }
        if (t->answers && sc) sc->answers[answer++].nll = counted ? nll / counted : 0;
        arrfree(ids); arrfree(text);
    }
}

// ---- perplexity and divergence of a text, token by token
static int double_order(const void *a, const void *b) { double x = *(const double *)a, y = *(const double *)b; return (x > y) - (x < y); }
static void eval_text(App *a, const char *path, int with_full, Score *sc) {
    char err[256];
    size_t n;
    int V = a->c->V, window = opt_int(a->o, "eval-window"), half = window / 2;
    char *text = read_file(path, &n, err);
    if (!text) die(EXIT_USAGE, "--eval-file %s", err);
    int *ids = tokenizer_encode(a->tok, text, n, 0, NULL), windows = (int)arrlen(ids) / window;
    free(text);
    if (!windows) die(EXIT_USAGE, "--eval-file %s: %d tokens, one window needs %d (--eval-window)", path, (int)arrlen(ids), window);
    if (windows > opt_int(a->o, "eval-windows")) windows = opt_int(a->o, "eval-windows");
    Options *plain = options_new();
    Session *full = with_full ? session_open(a->c, a->w, plain, "full") : NULL;
    float *ref = xmalloc((size_t)V * sizeof *ref);
    for (int w = 0; w < windows; w++) {
        const int *x = ids + (size_t)w * window;
        session_reset(a->s);
        if (full) session_reset(full);
        for (int i = half - 1; i < window - 1; i++) {
            const float *y = i < half ? prefill(a->s, x, half) : decode(a->s, x[i]);
            if (full) memcpy(ref, i < half ? prefill(full, x, half) : decode(full, x[i]), (size_t)V * sizeof *ref);
            sc->nll += log_sum_exp(y, V) - y[x[i + 1]];
            if (full) note_logits(ref, y, V, sc); else sc->predicted++;
        }
        note_cost(a->s, sc);
    }
    session_close(full); options_free(plain);
    free(ref); arrfree(ids);
}

// ---- intervals: texts are drawn again with replacement, each with all its versions and turns, 1,000 times; the 2.5th and 97.5th
// percentile of the mean. With base, the same texts' scores of another row, of the difference of the means.
enum { RESAMPLES = 1000 };
static void bootstrap(const Answer *x, const Answer *base, int n, uint64_t seed, double *lo, double *hi) {
    double *sum = NULL, mean[RESAMPLES];
    int *count = NULL;
    for (int i = 0; i < n; i++) {                        // sums over a text
        if (!i || x[i].item != x[i - 1].item) { arrput(sum, 0); arrput(count, 0); }
        arrlast(sum) += x[i].score - (base ? base[i].score : 0);
        arrlast(count)++;
    }
    int texts = (int)arrlen(sum);
    for (int r = 0; r < RESAMPLES; r++) {
        double s = 0;
        long c = 0;
        for (int i = 0; i < texts; i++) { int k = (int)(splitmix64(&seed) % (uint64_t)texts); s += sum[k]; c += count[k]; }
        mean[r] = c ? s / (double)c : 0;
    }
    qsort(mean, RESAMPLES, sizeof *mean, double_order);
    *lo = mean[RESAMPLES / 40]; *hi = mean[RESAMPLES - 1 - RESAMPLES / 40];
    arrfree(sum); arrfree(count);
}
// The answers of a task (NULL: any) at a position (or ANY_PLACE), or those of last turns only. stb_ds
enum { ANY_PLACE = -2, LAST_TURN = -3 };
static Answer *answers_of(const Answer *x, const char *task, int place) {
    Answer *some = NULL;
    for (int i = 0; i < (int)arrlen(x); i++)
        if ((!task || !strcmp(task, x[i].task)) && (place == ANY_PLACE || (place == LAST_TURN ? x[i].turn == x[i].turns - 1 : x[i].position == place))) arrput(some, x[i]);
    return some;
}
static double mean_score(const Answer *x) {
    double sum = 0;
    for (int i = 0; i < (int)arrlen(x); i++) sum += x[i].score;
    return sum / (double)arrlen(x);
}
static double mean_nll(const Answer *x) {
    double sum = 0;
    for (int i = 0; i < (int)arrlen(x); i++) sum += x[i].nll;
    return sum / (double)arrlen(x);
}
static void finish_row(Score *s, uint64_t seed) {
    int n = (int)arrlen(s->each);
    if (s->answers) bootstrap(s->answers, NULL, (int)arrlen(s->answers), seed, &s->lo, &s->hi);
    if (!n) return;
    double *sorted = xmalloc((size_t)n * sizeof *sorted);
    memcpy(sorted, s->each, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, double_order);
    s->kld_top = sorted[(n - 1) * 99 / 100];
    free(sorted);
}

// ---- rows of the table
typedef struct { char name[48]; double x; int in_table; char text[48]; } Field;        // text: how the markdown table writes it
static void add_field(Field **c, int in_table, const char *name, double x, const char *fmt, ...) KV_PRINTF(5, 6);
static void add_field(Field **c, int in_table, const char *name, double x, const char *fmt, ...) {
    Field k = { .x = x, .in_table = in_table };
    va_list ap;
    va_start(ap, fmt);
    snprintf(k.name, sizeof k.name, "%s", name);
    for (char *p = k.name; *p; p++) if (!isalnum((unsigned char)*p) && !strchr("_.-", *p)) *p = '_';       // a file's task name must not break a table
    vsnprintf(k.text, sizeof k.text, fmt, ap);
    va_end(ap);
    arrput(*c, k);
}
static void add_bytes(Field **c, int in_table, const char *name, double x) {
    char text[32];
    human_bytes(x, text);
    add_field(c, in_table, name, x, "%s", text);
}
// What the rows of a run share: the row of full attention, if there is one, and the seed of the intervals; ppl: --eval ppl and kld.
typedef struct { const App *a; const Score *full; uint64_t seed; int ppl; } Shared;
// The mean score of some answers, where there are any. detail 0: for csv and json alone; 1: the mean in the table, and its interval and
// the gap to full for csv and json; 2: all of it in the table.
static void add_score(Field **c, int detail, const char *name, const Score *s, const Shared *run, const char *task, int place) {
    Answer *x = answers_of(s->answers, task, place), *base = run->full ? answers_of(run->full->answers, task, place) : NULL;
    char full_name[64];
    double lo, hi;
    for (int gap = 0; gap < 1 + (base && detail) && x; gap++) {
        double mean = mean_score(x) - (gap ? mean_score(base) : 0);
        const char *form = gap ? "%+.3f" : "%.3f", *forms = gap ? "%+.3f..%+.3f" : "%.3f..%.3f", *suffix[] = { gap ? "_gap" : "", gap ? "_gap_lo" : "_lo", gap ? "_gap_hi" : "_hi" };
        snprintf(full_name, sizeof full_name, "%.40s%s", name, suffix[0]);
        add_field(c, detail > gap, full_name, mean, form, mean);
        if (!detail) break;
        bootstrap(x, gap ? base : NULL, (int)arrlen(x), run->seed, &lo, &hi);
        snprintf(full_name, sizeof full_name, "%.40s%s", name, suffix[1]);
        add_field(c, 0, full_name, lo, form, lo);
        snprintf(full_name, sizeof full_name, "%.40s%s", name, suffix[2]);
        add_field(c, detail == 2, full_name, hi, forms, lo, hi);
    }
    arrfree(x); arrfree(base);
}
static void score_fields(Field **c, const Score *s, const Shared *run) {  // of rows that hold answers
    static const char *places[] = { "alone", "begin", "middle", "end" };
    const Answer *x = s->answers;
    double n = (double)arrlen(x), nll = mean_nll(x);
    char name[48];
    add_score(c, 2, "score", s, run, NULL, ANY_PLACE);
    for (int i = 0; i < (int)n; i++) {                   // every task, in the order of the items
        int known = 0;
        for (int j = 0; j < i && !known; j++) known = !strcmp(x[i].task, x[j].task);
        if (known) continue;
        add_score(c, 1, x[i].task, s, run, x[i].task, ANY_PLACE);
        for (int p = -1; p < 3; p++) { snprintf(name, sizeof name, "%.30s_%s", x[i].task, places[p + 1]); add_score(c, 0, name, s, run, x[i].task, p); }
    }
    for (int p = -1; p < 3; p++) add_score(c, 1, places[p + 1], s, run, NULL, p);
    add_score(c, 1, "last_turn", s, run, NULL, LAST_TURN);
    const struct { const char *name; double sum; } all[] = { { "exact", s->exact }, { "found", s->found }, { "f1", s->f1 }, { "rouge_l", s->rouge }, { "rouge_l_longbench", s->rouge_lb } };
    for (int i = 0; i < 5; i++) add_field(c, i == 1, all[i].name, all[i].sum / n, "%.3f", all[i].sum / n);
    add_field(c, 1, "nll", nll, "%.3f", nll);
}
static Field *row_fields(const Score *s, const Shared *run) {             // stb_ds
    Field *c = NULL;
    double items = s->items ? s->items : 1, n = s->predicted ? (double)s->predicted : 1, stored = s->stored / (s->full > 0 ? s->full : 1);
    double prefill_rate = rate((long)s->n_prefill, s->prefill_s), decode_rate = rate((long)s->n_decode, s->decode_s);
    if (s->answers) score_fields(&c, s, run);
    if (run->ppl) add_field(&c, 1, "ppl", exp(s->nll / n), "%.4f", exp(s->nll / n));
    if (s->each) {
        add_field(&c, 1, "kld_mean", s->kld / n, "%.4f", s->kld / n);
        add_field(&c, run->ppl, "kld_p99", s->kld_top, "%.3f", s->kld_top);
        add_field(&c, 1, "top1", s->top1 / n, "%.3f", s->top1 / n);
    }
    add_field(&c, 1, "stored", stored, "%.1f %%", 100 * stored);
    add_bytes(&c, 1, "kv_bytes_stored", s->stored / items); add_bytes(&c, 0, "kv_bytes_full", s->full / items);
    add_bytes(&c, 1, "kv_bytes_attended", s->attended / items); add_bytes(&c, 1, "kv_bytes_peak", s->peak);
    add_field(&c, 1, "prefill_s", s->prefill_s, "%.2f", s->prefill_s);
    add_field(&c, 0, "pp_tok_s", prefill_rate, "%.4g", prefill_rate);
    add_field(&c, 1, "tg_tok_s", decode_rate, "%.4g", decode_rate);
    return c;
}
enum { AS_TABLE, AS_CSV, AS_JSON };
static void print_row(const Score *s, const Shared *run, int how, int first, FILE *f) {
    Field *c = row_fields(s, run);
    int n = (int)arrlen(c);
    const char *sep = how == AS_CSV ? "," : " | ";
    if (how == AS_JSON) {
        fprintf(f, "{");
        json_pair(f, "method", s->name);
        fprintf(f, "\"budget\":%d,", s->budget);
        json_pair(f, "model", run->a->c->dir);
        fprintf(f, "\"items\":%d,\"scored\":%d,", s->items, (int)arrlen(s->answers));
        for (int i = 0; i < n; i++) fprintf(f, "\"%s\":%.6g,", c[i].name, c[i].x);
        json_options(run->a, f);
        fprintf(f, "}\n");
        arrfree(c);
        return;
    }
    if (first) {
        fprintf(f, how == AS_CSV ? "method,budget,items,scored" : "| method | budget");
        for (int i = 0; i < n; i++) if (how == AS_CSV || c[i].in_table) fprintf(f, "%s%s", sep, how == AS_TABLE && strstr(c[i].name, "_hi") ? "95 %" : c[i].name);
        fprintf(f, how == AS_CSV ? "\n" : " |\n|---|---:");
        for (int i = 0; i < n && how == AS_TABLE; i++) if (c[i].in_table) fprintf(f, "|---:");
        if (how == AS_TABLE) fprintf(f, "|\n");
    }
    if (how == AS_CSV) fprintf(f, "%s,%d,%d,%d", s->name, s->budget, s->items, (int)arrlen(s->answers));
    else fprintf(f, "| %s | %d", s->name, s->budget);
    for (int i = 0; i < n; i++) {
        if (how == AS_CSV) fprintf(f, ",%.6g", c[i].x);
        else if (c[i].in_table) fprintf(f, " | %s", c[i].text);
    }
    fprintf(f, how == AS_CSV ? "\n" : " |\n");
    arrfree(c);
    fflush(f);
}

// ---- the run
static const char *list_word(const char *list, int k, char out[160]) {  // the k-th word of a,b,c; NULL behind the last
    for (; k && (list = strchr(list, ',')); k--) list++;
    if (!list) return NULL;
    snprintf(out, 160, "%.*s", (int)strcspn(list, ","), list);
    return out;
}
static Options *options_copy(const Options *o) {         // a session reads its options again at every reset, so each row has its own
    Options *c = options_new();
    char err[256];
    for (int i = 0; i < (int)shlen(o->given); i++)
        if (options_set(c, o->given[i].key, opt_str(o, o->given[i].key), err)) die(EXIT_RUN, "%s", err);
    return c;
}
typedef struct { Options *o; Session *s; } Open;         // what a row's session stands on
static void open_close(Open *p) { session_close(p->s); options_free(p->o); }
static int has_budget(const Session *s) {
    for (int i = 0; i < s->n_part; i++) if (s->part[i].m->role & ROLE_SELECT) return s->budget > 0;
    return 0;
}
// Opens every row of --compare x --budgets before anything runs, so that a wrong name ends the program at once.
static Score *open_rows(const App *a, Open **open) {
    char name[160], budget[160], err[256];
    const char *list = *opt_str(a->o, "compare") ? opt_str(a->o, "compare") : a->method;
    Score *rows = NULL;
    for (int i = 0; list_word(list, i, name); i++)
        for (int j = 0; list_word(opt_str(a->o, "budgets"), j, budget); j++) {
            Open p = { .o = options_copy(a->o) };
            Score sc = { 0 };
            if (opt_given(a->o, "budgets") && (options_set(p.o, "budget", budget, err) || out_of_range(p.o, "budget", err))) die(EXIT_USAGE, "--budgets: %s", err);
            p.s = session_open(a->c, a->w, p.o, name);
            snprintf(sc.name, sizeof sc.name, "%s", name);
            sc.budget = has_budget(p.s) ? p.s->budget : 0;
            arrput(*open, p);
            arrput(rows, sc);
            if (!has_budget(p.s)) break;
        }
    return rows;
}
static void eval_progress(const App *a, int done, int all, double t0) {  // on a terminal one line that is rewritten; with -v a line a tenth
    int seconds = done ? (int)((now() - t0) * (all - done) / done) : 0, tty = isatty(2);
    if (quiet || (!tty && (!opt_int(a->o, "verbose") || done * 10 / all == (done - 1) * 10 / all))) return;
    fprintf(stderr, tty ? "\r\x1b[K%d of %d items, %d:%02d left" : "%d of %d items, %d:%02d left\n", done, all, seconds / 60, seconds % 60);
    if (tty && done == all) fprintf(stderr, "\r\x1b[K");
}
// Item by item through every row: the logits of full attention are held for one item only, and what else the machine does falls on all rows.
static void play_items(App *a, const EvalSet *e, Score *rows, Open *open) {
    Open full = { .o = options_copy(a->o) };
    float *ref = NULL;
    int n = (int)arrlen(e->item);
    double t0 = now();
    full.s = session_open(a->c, a->w, full.o, "full");
    for (int i = 0; i < n; i++) {
        a->s = full.s;
        arrsetlen(ref, 0);
        play_forced(a, &e->item[i], &ref, NULL);
        for (int r = 0; r < (int)arrlen(rows); r++) {
            a->s = open[r].s;
            play_free(a, &e->item[i], &rows[r]);
            play_forced(a, &e->item[i], &ref, &rows[r]);
            session_reset(a->s);                         // rows given back: many sessions are open
        }
        eval_progress(a, i + 1, n, t0);
    }
    arrfree(ref);
    open_close(&full);
}
static void check_fit(const App *a, const EvalSet *e) {
    for (int i = 0; i < (int)arrlen(e->item); i++) {
        int need = 0;
        for (int j = 0; j < (int)arrlen(e->item[i].turn); j++) {
            const EvalTurn *t = &e->item[i].turn[j];
            int *ids = tokenizer_encode(a->tok, t->user, strlen(t->user), 0, gold_ids(a, t));
            need += (int)arrlen(ids) + 16;               // and about that much for the template
            arrfree(ids);
        }
        if (need > ctx_limit(a)) die(EXIT_USAGE, "--eval: %s, item %d needs about %d tokens, the context has %d (-c)", e->item[i].task, i + 1, need, ctx_limit(a));
    }
}
static void eval_items(const App *a, const char *what, EvalSet *e) {     // the items of --eval A,B,..
    char word[160];
    int *lengths = number_list("eval-length", opt_str(a->o, "eval-length"), 96, 1 << 20);
    for (int i = 0; list_word(what, i, word); i++) {
        int found = 0;
        for (int t = 0; t < EVAL_TASKS; t++)
            if (!strcmp(word, "all") || !strcmp(word, eval_tasks[t].name)) { make_items(e, a->tok, t, lengths, opt_int(a->o, "eval-items"), (uint64_t)opt_int(a->o, "eval-seed")); found = 1; }
        if (!found) die(EXIT_USAGE, "--eval wants all, file, ppl, kld or a list of needle, multiturn, coref, facts, json, fewshot, summary; found '%s'", word);
    }
    arrfree(lengths);
    check_fit(a, e);
}
static int report_write(App *a, const char *path, const Score *rows);    // section 18c
static int evaluate(App *a) {
    const char *path = opt_str(a->o, "eval-file"), *what = *opt_str(a->o, "eval") ? opt_str(a->o, "eval") : *path ? "file" : "all";
    int ppl = !strcmp(what, "ppl") || !strcmp(what, "kld"), how = opt_int(a->o, "json") ? AS_JSON : opt_int(a->o, "csv") ? AS_CSV : AS_TABLE;
    char err[256];
    EvalSet e = { 0 };
    Open *open = NULL;
    Shared run = { .a = a, .seed = (uint64_t)opt_int(a->o, "eval-seed"), .ppl = ppl };
    Session *own = a->s;
    double t0 = now();
    if ((ppl || !strcmp(what, "file")) && !*path) die(EXIT_USAGE, "--eval %s wants --eval-file FILE", what);
    if (options_set(a->o, "temp", "0", err)) die(EXIT_RUN, "%s", err);
    if (!strcmp(what, "file")) { read_items(&e, a->tok, path); check_fit(a, &e); }
    else if (!ppl) eval_items(a, what, &e);
    Score *rows = open_rows(a, &open);
    if (!ppl) play_items(a, &e, rows, open);
    for (int r = 0; r < (int)arrlen(rows); r++) {
        a->s = open[r].s;
        if (ppl) eval_text(a, path, !strcmp(what, "kld"), &rows[r]);
        if (!strcmp(rows[r].name, "full") && !ppl) run.full = &rows[r];
        open_close(&open[r]);
    }
    for (int r = 0; r < (int)arrlen(rows); r++) {
        finish_row(&rows[r], run.seed);
        print_row(&rows[r], &run, how, !r, stdout);
    }
    if (!quiet) fprintf(stderr, "%d rows, %d items, %d answers each, %.1f s\n", (int)arrlen(rows), rows[0].items, (int)arrlen(rows[0].answers), now() - t0);
    a->s = own;
    if (*opt_str(a->o, "report")) report_write(a, opt_str(a->o, "report"), rows);
    for (int r = 0; r < (int)arrlen(rows); r++) { arrfree(rows[r].answers); arrfree(rows[r].each); }
    arrfree(rows); arrfree(open);
    eval_set_free(&e);
    return 0;
}

// ==================================================================================================== 27 CALIBRATION
// ---- Score files: {"layer-head": number or list of numbers}, in any order, every head exactly once; a list stands for its
// mean. The map may be the only object inside another, or one of several under a name we write or the authors' script writes.
static const char *score_names[3][2] = {
    { "inf", "average_infscores_weighted" }, { "dili", "average_precisions_weighted" }, { "lazy", "average_recalls_weighted" },
};

static const Json *scores_find(const Json *j, const char *which) {
    const Json *only = NULL, *v;
    int objects = 0;
    if (j->type != JSON_OBJECT) return j;
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++)
            if (!strcmp(which, score_names[i][0]) && (v = json_get(j, score_names[i][k])) && v->type == JSON_OBJECT) return v;
    for (int i = 0; i < j->n; i++) if (j->item[i].type == JSON_OBJECT) { only = &j->item[i]; objects++; }
    return objects == 1 ? only : j;
}
static int scores_index(const char *key, int L, int H) {        // "layer-head" -> layer*H + head, -1: not a head of the model
    char *end;
    if (!isdigit((unsigned char)key[0]) || strlen(key) > 16) return -1;
    long l = strtol(key, &end, 10);
    if (*end != '-' || !isdigit((unsigned char)end[1])) return -1;
    long h = strtol(end + 1, &end, 10);
    return *end || l >= L || h >= H ? -1 : (int)(l * H + h);
}
static double scores_value(const Json *v) {                     // mean of a list, or the number; -1: neither
    double sum = 0;
    if (v->type == JSON_NUMBER) return v->num;
    if (v->type != JSON_ARRAY || !v->n) return -1;
    for (int i = 0; i < v->n; i++) {
        if (v->item[i].type != JSON_NUMBER || v->item[i].num < 0) return -1;
        sum += v->item[i].num;
    }
    return sum / v->n;
}
static int scores_fill(const Json *j, int L, int H, double *x, char err[512]) {        // x (L,H), all -1
    if (j->type != JSON_OBJECT) return snprintf(err, 512, "expected an object with keys \"layer-head\""), -1;
    for (int i = 0; i < j->n; i++) {
        int at = scores_index(j->key[i], L, H);
        double v = scores_value(&j->item[i]);
        if (at < 0) return snprintf(err, 512, "key \"%.40s\": expected \"layer-head\" of a model with %d layers and %d heads", j->key[i], L, H), -1;
        if (x[at] >= 0) return snprintf(err, 512, "head %d-%d stands there twice", at / H, at % H), -1;
        if (!(v >= 0)) return snprintf(err, 512, "head %d-%d: expected a number of at least 0, or a list of them", at / H, at % H), -1;
        x[at] = v;
    }
    for (int i = 0; i < L * H; i++)
        if (x[i] < 0) return snprintf(err, 512, "no score of head %d-%d: expected all %d x %d", i / H, i % H, L, H), -1;
    return 0;
}
static double *scores_load(const char *path, const char *which, int L, int H, char err[512]) {     // (L,H), or NULL and err
    char why[512];
    size_t size;
    char *text = read_file(path, &size, why);
    if (!text) { snprintf(err, 512, "--dililazy-scores: %.400s", why); return NULL; }
    Json *j = json_parse(text, size, why);
    double *x = xmalloc((size_t)L * H * sizeof *x);
    for (int i = 0; i < L * H; i++) x[i] = -1;
    int bad = !j || scores_fill(scores_find(j, which), L, H, x, why);
    if (bad) { snprintf(err, 512, "--dililazy-scores: %.200s: %.250s", path, why); free(x); }
    json_free(j);
    free(text);
    return bad ? NULL : x;
}


// DiliLazyKV's stage 1 (its section has the scores' use): --calibrate plays needles in hay and writes the head scores.

// ---- Stage 1: --calibrate. One prefill a run; only the last row of every head is looked at, so memory stays O(n).
typedef struct { const char *question, *needle, *answer; } Needle;
static const Needle own_needles[] = {
    { "What is the best thing to do on a free afternoon in Merrow?",
      "The best thing to do on a free afternoon in Merrow is to row out to the lighthouse.", "Row out to the lighthouse." },
    { "What keeps the keeper of the old mill healthy?",
      "The keeper of the old mill stays healthy through long walks and barley soup.", "Long walks and barley soup." },
    { "In which year did Anna begin her apprenticeship?",
      "Anna was born in 1931. Anna began her apprenticeship sixteen years after she was born.", "Anna began her apprenticeship in 1947." },
};
static const char *hay_words[4][12] = {
    { "The baker", "A tall ferryman", "My aunt", "The youngest of the sailors", "Our neighbour", "The clockmaker",
      "A stranger in grey", "The schoolteacher", "An old gardener", "The captain", "Her cousin", "The bell ringer" },
    { "carried", "forgot", "was looking for", "sold", "painted", "had borrowed",
      "dreamed of", "repaired", "hid", "counted", "lost", "gave away" },
    { "a lantern", "three copper kettles", "the blue umbrella", "a basket of pears", "an unfinished letter", "the heavy ladder",
      "two silver spoons", "a map of the marshes", "the harbour bell", "a sack of flour", "some torn nets", "the key to the cellar" },
    { "before the rain came.", "while the others slept.", "at the edge of the village.", "because nobody had asked.",
      "on the way to the market.", "and said nothing about it.", "under the chestnut trees.", "for the second time that week.",
      "when the tide went out.", "in the narrow street behind the church.", "without a lamp.", "as the winter began." },
};
static int *hay_ids(const Tokenizer *t, const char *path, int n) {      // at least n ids of hay, as an stb array
    uint64_t state = 1;
    int *ids = NULL;
    char *text = NULL, why[256], line[256];
    if (*path) {
        size_t size;
        if (!(text = read_file(path, &size, why))) die(EXIT_USAGE, "--calibrate-haystack: %s", why);
        ids = encode_at(t, text, size, 0, 1, NULL);
        free(text);
        if ((int)arrlen(ids) < n) die(EXIT_USAGE, "--calibrate-haystack: %s has %d tokens, %d are needed", path, (int)arrlen(ids), n);
        return ids;
    }
    while ((int)arrlen(ids) < n) {                      // sentence by sentence, so that the ids do not depend on n
        const char *word[4];
        for (int i = 0; i < 4; i++) word[i] = hay_words[i][splitmix64(&state) % 12];
        int old = (int)arrlen(ids), k = snprintf(line, sizeof line, "%s%s %s %s %s", old ? " " : "", word[0], word[1], word[2], word[3]);
        ids = encode_at(t, line, k, 0, !old, ids);
        if ((int)arrlen(ids) == old) die(EXIT_RUN, "--calibrate: the tokenizer makes nothing of \"%s\"", line);
    }
    return ids;
}
// Share of the answer's words that the text has too (as often); case and punctuation do not count.
static int next_word(const char **p, const char *end, char word[64]) {
    int n = 0;
    while (*p < end && !isalnum((unsigned char)**p) && (unsigned char)**p < 128) ++*p;
    for (; *p < end && (isalnum((unsigned char)**p) || (unsigned char)**p >= 128); ++*p) if (n < 63) word[n++] = (char)tolower((unsigned char)**p);
    word[n] = 0;
    return n;
}
static double word_recall(const char *answer, const char *text, size_t n) {
    int words = 0, found = 0;
    char a[64], b[64];
    for (const char *p = answer, *end = answer + strlen(answer); next_word(&p, end, a); words++) {
        int want = 1, have = 0;
        const char *before = answer, *at = p;
        while (next_word(&before, end, b) && before < at) want += !strcmp(a, b);        // the how-manieth one is this?
        for (const char *t = text; next_word(&t, text + n, b); ) have += !strcmp(a, b);
        found += have >= want;
    }
    return words ? (double)found / words : 1;
}

typedef struct {
    int at, n, k, count;        // the needle's first key and length; size of T (0: n); 1: --calibrate-score=count
    double *score, *sum;        // (3,L,H): Inf, Dili, Lazy of this run; sums over the accepted ones
    double counts[4], total[4]; // keys per head and run, means: Diligent, Distracted, Subconscious, Diffuse; and their sums
} Calibration;

// One head's row a (n): score[0..3) = Inf, Dili, Lazy; counts as above. idx (n) is room.
static void head_scores(const Calibration *r, const float *a, int n, int *idx, double score[3], double counts[4]) {
    double hit = 0, top = 0, needle = 0, hits = 0, P, R;
    int k = top_k(a, n, r->k ? r->k : r->n, idx);       // T: sinks and question take part, as in the published scores
    for (int i = 0; i < k; i++) {
        int in = idx[i] >= r->at && idx[i] < r->at + r->n;
        top += a[idx[i]];
        if (in) { hit += a[idx[i]]; hits++; }
    }
    for (int i = r->at; i < r->at + r->n; i++) needle += a[i];
    counts[0] = hits; counts[1] = k - hits; counts[2] = r->n - hits; counts[3] = n - r->n - counts[1];
    if (r->count) {                                     // the paper's text; its three weights are not given: 1/3 each is our choice
        P = hits / k;
        R = (counts[1] / k + counts[2] / r->n + counts[3] / (n - r->n)) / 3;
    } else {
        P = top > 1e-9 ? hit / top : 0;
        R = needle > 1e-9 ? hit / needle : 0;
    }
    score[0] = P + R > 1e-9 ? 2 * P * R / (P + R) : 0;  // (1), in every run; then the mean
    score[1] = P; score[2] = R;
}
typedef struct { Calibration *run; } HeadProbe;
static void head_probe_commit(Session *s, void *ms, int l, const float *q, int T) {
    Calibration *r = ((HeadProbe *)ms)->run;
    if (s->decoding || l == s->c->L) return;
    size_t mark = scratch_mark(s), LH = (size_t)s->c->L * s->c->H;
    int N = kv_longest(s, l), H = s->c->H, *idx = scratch(s, (size_t)N * sizeof(int));
    float *row = scratch(s, (size_t)H * N * sizeof(float));
    window_scores(s, l, q, T, 1, row);
    for (int h = 0; h < H; h++) {
        double score[3], counts[4];
        head_scores(r, row + (size_t)h * N, N, idx, score, counts);
        for (int i = 0; i < 3; i++) r->score[i * LH + (size_t)l * H + h] = score[i];
        for (int i = 0; i < 4; i++) r->counts[i] += counts[i] / (double)LH;
    }
    scratch_reset(s, mark);
}
static const Method head_probe = { .name = "probe", .state = sizeof(HeadProbe), .commit = head_probe_commit };    // rides on "full"; not in the table

static char *greedy_answer(Session *s, const Tokenizer *t, const float *logits, int n) {        // stb array of at most n tokens' bytes
    char *text = NULL;
    for (int i = 0; i < n; i++) {
        int id = 0, end = 0, len;
        for (int v = 1; v < s->c->V; v++) if (logits[v] > logits[id]) id = v;
        for (int e = 0; e < s->c->n_eos; e++) end |= s->c->eos[e] == id;
        if (end) break;
        const char *b = tokenizer_bytes(t, id, &len);
        if (len) memcpy(arraddnptr(text, len), b, (size_t)len);
        if (i + 1 < n) logits = decode(s, id);
    }
    return text;
}
typedef struct { const Needle *needle; int length, depth; } Run;

static int *ids_put(int *ids, const int *x, int n) { for (int i = 0; i < n; i++) arrput(ids, x[i]); return ids; }

// [BOS] prefix, hay with the needle at depth % of it, question: ids as an stb array. Hay and needle have length - 200 ids.
static int *run_prompt(const Tokenizer *t, const Options *o, const Run *run, const int *hay, Calibration *r) {
    int *ids = NULL, *needle = NULL, room = run->length - (run->length < 400 ? run->length / 2 : 200), len;
    char text[4096], line[4096];
    const char *prefix = opt_str(o, "calibrate-prefix"), *prompt = opt_str(o, "calibrate-prompt"), *hole = strstr(prompt, "{}");
    if (!hole || strlen(prompt) > 2000) die(EXIT_USAGE, "--calibrate-prompt wants a text up to 2000 bytes with {} where the question goes");
    snprintf(text, sizeof text, " %s", run->needle->needle);
    snprintf(line, sizeof line, "%.*s%s%s", (int)(hole - prompt), prompt, run->needle->question, hole + 2);
    needle = encode_at(t, text, strlen(text), 0, 0, NULL);
    int n_hay = room - (int)arrlen(needle), at = (int)((long)n_hay * run->depth / 100);
    if (n_hay < 1) die(EXIT_USAGE, "--calibrate-lengths: %d tokens do not hold a needle of %d beside the question", run->length, (int)arrlen(needle));
    for (const char *b; opt_int(o, "calibrate-boundary") && at > 0; at--)       // back to the end of a sentence
        if (b = tokenizer_bytes(t, hay[at - 1], &len), len && b[len - 1] == '.') break;
    if (t->add_bos && t->bos >= 0) arrput(ids, t->bos);
    ids = encode_at(t, prefix, strlen(prefix), 1, 1, ids);
    r->at = (int)arrlen(ids) + at;
    r->n = (int)arrlen(needle);
    ids = ids_put(ids, hay, at);
    ids = ids_put(ids, needle, r->n);
    ids = ids_put(ids, hay + at, n_hay - at);
    ids = encode_at(t, line, strlen(line), 1, 0, ids);
    arrfree(needle);
    return ids;
}
// One run -> 1 if the model found the needle (or that is not asked)
static int calibrate_run(Session *s, const Tokenizer *t, const Options *o, const Run *run, const int *hay, Calibration *r, double *recall) {
    int *ids = run_prompt(t, o, run, hay, r);
    int all = !strcmp(opt_str(o, "calibrate-accept"), "all");
    size_t LH = (size_t)s->c->L * s->c->H;
    session_reset(s);
    ((HeadProbe *)s->part[s->n_part - 1].ms)->run = r;
    memset(r->counts, 0, sizeof r->counts);
    const float *logits = prefill(s, ids, (int)arrlen(ids));
    char *answer = all ? NULL : greedy_answer(s, t, logits, opt_int(o, "calibrate-predict"));
    *recall = all ? -1 : word_recall(run->needle->answer, answer ? answer : "", arrlenu(answer));       // -1: not asked
    int accepted = all || *recall >= .5;
    for (size_t i = 0; accepted && i < 3 * LH; i++) r->sum[i] += r->score[i];
    for (int i = 0; accepted && i < 4; i++) r->total[i] += r->counts[i];
    arrfree(answer);
    arrfree(ids);
    return accepted;
}
static const char *needle_text(const Json *v, const char *path, const char *key) {
    const Json *x = json_get(v, key);
    if (!x || x->type != JSON_STRING || !x->len || x->len > 2000)
        die(EXIT_USAGE, "--calibrate-needles: %s: expected a list of {\"question\", \"needle\", \"answer\"}, each a text up to 2000 bytes", path);
    return x->str;
}
static Needle *needles_load(const char *path, Json **file) {    // stb array; its texts live in *file
    Needle *list = NULL;
    char why[256];
    size_t size;
    for (size_t i = 0; !*path && i < sizeof own_needles / sizeof *own_needles; i++) arrput(list, own_needles[i]);
    if (!*path) return list;
    char *text = read_file(path, &size, why);
    if (!text || !(*file = json_parse(text, size, why))) die(EXIT_USAGE, "--calibrate-needles: %s: %s", path, why);
    free(text);
    for (int i = 0; i < (*file)->n; i++) {
        const Json *v = &(*file)->item[i];
        Needle x = { needle_text(v, path, "question"), needle_text(v, path, "needle"), needle_text(v, path, "answer") };
        arrput(list, x);
    }
    if (!list) die(EXIT_USAGE, "--calibrate-needles: %s holds no needle", path);
    return list;
}
typedef struct { int *length, *depth; Needle *needle; Json *file; } Plan;         // stb arrays: every length x depth x needle is a run

static void list_write(FILE *f, const char *name, const int *list) {
    fprintf(f, "  \"%s\": [", name);
    for (int i = 0; i < (int)arrlen(list); i++) fprintf(f, "%s%d", i ? ", " : "", list[i]);
    fprintf(f, "],\n");
}
static void scores_write(FILE *f, const Config *c, const Options *o, const Plan *p, const Calibration *r, int accepted) {
    const char *slash = strrchr(c->dir, '/'), *name = slash && slash[1] ? slash + 1 : c->dir;     // the folder's name: the file travels, the path to it does not
    fprintf(f, "{\n  \"format\": \"kvcomp head scores\",\n  \"model\": ");
    json_escape(f, name, strlen(name));
    fprintf(f, ",\n  \"layers\": %d, \"heads\": %d, \"score\": \"%s\", \"k\": %d, \"accept\": \"%s\", \"needles\": %d, \"accepted\": %d,\n",
            c->L, c->H, opt_str(o, "calibrate-score"), opt_int(o, "calibrate-k"), opt_str(o, "calibrate-accept"), (int)arrlen(p->needle), accepted);
    list_write(f, "lengths", p->length);
    list_write(f, "depths", p->depth);
    fprintf(f, "  \"diligent_distracted_subconscious_diffuse\": [");
    for (int i = 0; i < 4; i++) fprintf(f, "%s%.6g", i ? ", " : "", r->total[i] / accepted);
    fprintf(f, "]");
    for (int k = 0; k < 3; k++) {
        fprintf(f, ",\n  \"%s\": {", score_names[k][0]);
        for (int i = 0; i < c->L * c->H; i++)
            fprintf(f, "%s\n    \"%d-%d\": [%.9g]", i ? "," : "", i / c->H, i % c->H, r->sum[(size_t)k * c->L * c->H + i] / accepted);
        fprintf(f, "\n  }");
    }
    fprintf(f, "\n}\n");
}
static Plan plan_read(const Config *c, const Options *o) {
    Plan p = { .file = NULL };
    char limit[16];
    snprintf(limit, sizeof limit, "%d", c->max_pos);
    int cut = !opt_given(o, "calibrate-lengths") && c->max_pos < 2048;         // the default does not fit a small model
    p.length = number_list("calibrate-lengths", cut ? limit : opt_str(o, "calibrate-lengths"), 16, c->max_pos);
    p.depth = number_list("calibrate-depths", opt_str(o, "calibrate-depths"), 0, 100);
    p.needle = needles_load(opt_str(o, "calibrate-needles"), &p.file);
    if (opt_int(o, "calibrate-k") < 0) die(EXIT_USAGE, "--calibrate-k must not be negative, found %d", opt_int(o, "calibrate-k"));
    return p;
}
// All runs, with a session of method full and the probe beside it -> runs accepted
static int calibrate_runs(const Config *c, const Weights *w, const Tokenizer *t, const Options *o, const Plan *p, Calibration *r) {
    int nd = (int)arrlen(p->depth), nn = (int)arrlen(p->needle), runs = (int)arrlen(p->length) * nd * nn, accepted = 0, longest = 0;
    for (int i = 0; i < (int)arrlen(p->length); i++) longest = p->length[i] > longest ? p->length[i] : longest;
    int *hay = hay_ids(t, opt_str(o, "calibrate-haystack"), longest);
    Session *s = session_open(c, w, o, "full");
    s->part[s->n_part++] = (Part){ &head_probe, xcalloc(1, sizeof(HeadProbe)) };
    for (int i = 0; i < runs; i++) {
        Run run = { &p->needle[i % nn], p->length[i / nn / nd], p->depth[i / nn % nd] };
        double recall;
        accepted += calibrate_run(s, t, o, &run, hay, r, &recall);
        if (opt_int(o, "quiet")) continue;
        fprintf(stderr, "calibrate: %d of %d, length %d, depth %d %%, needle %d", i + 1, runs, run.length, run.depth, i % nn + 1);
        if (recall >= 0) fprintf(stderr, ": recall %.2f, %d accepted", recall, accepted);
        fputc('\n', stderr);
    }
    session_close(s);
    arrfree(hay);
    return accepted;
}
// Makes OUT.json of --calibrate. Returns the exit code.
static int calibrate(const Config *c, const Weights *w, const Tokenizer *t, const Options *o) {
    const char *out = opt_str(o, "calibrate");
    char part[1100];
    if (!t) die(EXIT_USAGE, "--calibrate needs the model's tokenizer");
    Plan p = plan_read(c, o);
    snprintf(part, sizeof part, "%.1000s.part", out);
    FILE *f = fopen(part, "wb");                        // before the work, not after it
    if (!f) die(EXIT_RUN, "--calibrate: %s: %s", part, strerror(errno));
    size_t LH = (size_t)c->L * c->H;
    Calibration r = { .k = opt_int(o, "calibrate-k"), .count = !strcmp(opt_str(o, "calibrate-score"), "count") };
    r.score = xcalloc(3 * LH, sizeof(double));
    r.sum = xcalloc(3 * LH, sizeof(double));
    int accepted = calibrate_runs(c, w, t, o, &p, &r);
    if (accepted) scores_write(f, c, o, &p, &r, accepted);
    int bad = ferror(f) | fclose(f);
    if (bad || !accepted) remove(part);
    if (!accepted) die(EXIT_RUN, "--calibrate: no answer had half of the expected words (--calibrate-accept all takes every run)");
    if (bad || rename(part, out)) { int why = errno; remove(part); die(EXIT_RUN, "--calibrate: %s: %s", out, strerror(why)); }
    free(r.score); free(r.sum);
    arrfree(p.length); arrfree(p.depth); arrfree(p.needle);
    json_free(p.file);
    return EXIT_OK;
}

// ==================================================================================================== 28 BENCHMARK
// --bench measures a model, or random weights of a shape (--synthetic): prefill ("pp N": N ids from an empty cache) and decode
// ("tg at D": one token with D rows behind it). A decode step is bytes: weights, the K and V rows attention reads, and the
// method's index. They stand beside the read bandwidth of this machine, measured again before every line, so that the last
// column says how far from the roofline a step is, whatever else the machine is doing.
// A deep cache is filled with random rows instead of a prefill: only the speed of the layers' products is skipped, every hook
// of the method runs.

typedef struct {            // one line of the table. Times are seconds a token
    const char *test; int n;
    double tok_s, attend, select, commit, index, bandwidth;     // bandwidth: bytes a second this machine reads
    double weights, kv, meta;                                   // bytes a decode step moves
    double flops;                                               // of a prefill: products and causal attention, each counted once
    size_t stored;                                              // bytes of rows held
} BenchLine;

// Decode steps before the clock starts, and of one repetition: LoopServe chooses rows first at its 16th step and then every 16, so by default a
// repetition is one whole cycle of it, and of the methods that choose at every step 16.
enum { BENCH_WARM = 16, BENCH_STEPS = 16 };
static void open_model(App *a);                         // section 20
static void choose_device(App *a);                      // the same

static double read_bandwidth(void) {                    // best of three passes over a buffer no cache holds
    static float *buf;
    const size_t piece = 1024, n = (size_t)1 << 26;     // 256 MiB
    double best = 0;
    if (!buf) {
        buf = aligned_alloc((size_t)1 << 21, n * sizeof *buf);
        if (!buf) die(EXIT_MEMORY, "out of memory: --bench reads a buffer of %zu bytes", n * sizeof *buf);
        madvise(buf, n * sizeof *buf, MADV_HUGEPAGE);
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i += piece) for (size_t j = i; j < i + piece; j++) buf[j] = (float)(j & 255);
    }
    for (int r = 0; r < 3; r++) {
        int odd = 0;
        double t = now();
        #pragma omp parallel for schedule(static) reduction(+ : odd)
        for (size_t i = 0; i < n; i += piece) odd += max_f32(buf + i, (int)piece) != 255;
        t = now() - t;
        if (odd) die(EXIT_RUN, "--bench: memory gave back other values than were written");
        if ((double)(n * sizeof *buf) / t > best) best = (double)(n * sizeof *buf) / t;
    }
    return best;
}

// Bytes a second: what a decode step is measured by. On the GPU a copy's, read and written.
static double bandwidth(const Session *s) { (void)s; return KV_DEV(s) ? device_copy_rate() : read_bandwidth(); }

// Stands in for forward while a cache is filled: T random rows in every head, then the hooks of the method, no products.
static float *fill_pass(Session *s, const Token *in, int T) {
    const Config *c = s->c;
    size_t nk = (size_t)T * c->G * c->D, nq = (size_t)T * c->H * c->D;
    float *x = xmalloc((nq + 2 * nk) * sizeof *x), *near = x;    // near: where the device, if any, has them
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < nq + 2 * nk; i++) x[i] = (float)(int32_t)(uint32_t)mix64(i) * 0x1p-31f;
    if (KV_DEV(s)) near = device_floats(x, nq + 2 * nk);
    add_tokens(s, in, T);
    if (KV_DEV(s)) tokens_give_cuda(s);
    for (int l = 0; l < c->L; l++) {
        int acts = layer_acts(s, l);
        if (acts) EACH_PART(s, p) if (p->m->project) p->m->project(s, p->ms, l, near, near + nq, near + nq + nk, T);
        kv_append(s, l, near + nq, near + nq + nk, 0, T);
        if (acts) EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, l, near, T);
    }
    EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, c->L, NULL, T);
    if (KV_DEV(s)) device_drop(near);
    free(x);
    return s->logits;
}
static int *random_ids(int n, int V) {                  // stb_ds array
    int *ids = NULL;
    for (int i = 0; i < n; i++) arrput(ids, (int)(mix64((uint64_t)i) % (uint64_t)V));
    return ids;
}
static double median(double *x, int n) { qsort(x, (size_t)n, sizeof *x, double_order); return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2; }

static void bench_clock(BenchLine *b, const Session *s, long tokens) {   // where the time went, a token
    b->attend = s->clk.attend / (double)tokens; b->select = s->clk.select / (double)tokens;
    b->commit = s->clk.commit / (double)tokens; b->index = s->clk.index / (double)tokens;
    b->stored = kv_bytes(s);
}
static double prefill_flops(const Config *c, double n) {
    double HD = (double)c->H * c->D, GD = (double)c->G * c->D, products = 2 * HD * c->C + 2 * GD * c->C + 3.0 * c->F * c->C;
    return 2 * (n * c->L * products + (double)c->V * c->C) + 2 * n * (n + 1) * HD * c->L;
}
static BenchLine bench_prefill(Session *s, int n, int repeat) {
    BenchLine b = { .test = "pp", .n = n, .bandwidth = bandwidth(s), .flops = prefill_flops(s->c, n) };
    double *seconds = xmalloc((size_t)repeat * sizeof *seconds);
    int *ids = random_ids(n, s->c->V);
    for (int r = 0; r < repeat; r++) {
        session_reset(s);
        prefill(s, ids, n);
        seconds[r] = s->clk.prefill;
        bench_clock(&b, s, n);
    }
    b.tok_s = n / median(seconds, repeat);
    arrfree(ids);
    free(seconds);
    return b;
}
static BenchLine bench_decode(Session *s, int depth, int repeat) {
    BenchLine b = { .test = "tg", .n = depth };
    double *seconds = xmalloc((size_t)repeat * sizeof *seconds);
    int *ids = random_ids(depth ? depth : 1, s->c->V), V = s->c->V;
    session_reset(s);
    if (depth) s->forward = fill_pass;
    prefill(s, ids, depth ? depth : 1);
    s->forward = forward;
    for (int i = 0; i < BENCH_WARM; i++) decode(s, ids[0]);
    memset(&s->clk, 0, sizeof s->clk);
    b.bandwidth = bandwidth(s);
    for (int r = 0; r < repeat; r++) {
        double t = s->clk.decode;
        for (int i = 0; i < BENCH_STEPS; i++) decode(s, (int)(mix64((uint64_t)(r * BENCH_STEPS + i)) % (uint64_t)V));
        seconds[r] = s->clk.decode - t;
    }
    b.tok_s = BENCH_STEPS / median(seconds, repeat);
    b.weights = (double)s->w->bytes;
    if (s->w->head.data != s->w->embed.data) b.weights -= (double)V * s->c->C * (double)dtype_size(s->w->embed.dtype);      // of which one row is read
    b.kv = bytes_a_step(s);
    EACH_PART(s, p) if (p->m->bytes) b.meta += (double)p->m->bytes(s, p->ms);
    bench_clock(&b, s, s->clk.steps);
    arrfree(ids);
    free(seconds);
    return b;
}

static void bench_header(FILE *f, const Options *o, const Config *c, const Weights *w) {
    if (opt_int(o, "csv"))
        fprintf(f, "test,n,method,model,tok_s,weight_bytes,kv_bytes_attended,index_bytes,gb_s,read_gb_s,share,attend_ms,select_ms,commit_ms,index_ms,kv_bytes_stored,threads,simd\n");
    else if (!opt_int(o, "json"))
        fprintf(f, "%s, %s weights (%.2f GB), method %s, K %s, V %s, %d threads, %s\n\n"
                "| test        |    tok/s | weights MB | KV MB | index MB |  GB/s | machine reads | share | attend ms | select ms | commit ms | index ms | KV held MB |\n"
                "|-------------|---------:|-----------:|------:|---------:|------:|--------------:|------:|----------:|----------:|----------:|---------:|-----------:|\n",
                c->dir, dtype_name(c->dtype), (double)w->bytes * 1e-9, opt_str(o, "method"), opt_str(o, "ctk"), opt_str(o, "ctv"), n_threads(), simd_name());
}
static void bench_print(FILE *f, const BenchLine *b, const Options *o, const Config *c) {
    double gb_s = (b->weights + b->kv + b->meta) * b->tok_s * 1e-9, read = b->bandwidth * 1e-9;
    if (opt_int(o, "json")) {
        fprintf(f, "{\"test\":\"%s\",\"n\":%d,", b->test, b->n);
        json_pair(f, "method", opt_str(o, "method"));
        json_pair(f, "model", c->dir);
        fprintf(f, "\"tok_s\":%.3f,\"weight_bytes\":%.0f,\"kv_bytes_attended\":%.0f,\"index_bytes\":%.0f,\"gb_s\":%.2f,\"read_gb_s\":%.2f,\"share\":%.4f,"
                "\"attend_ms\":%.4f,\"select_ms\":%.4f,\"commit_ms\":%.4f,\"index_ms\":%.4f,\"kv_bytes_stored\":%zu,\"threads\":%d,\"simd\":\"%s\"}\n",
                b->tok_s, b->weights, b->kv, b->meta, gb_s, read, gb_s / read, b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3, b->stored, n_threads(), simd_name());
    } else if (opt_int(o, "csv"))
        fprintf(f, "%s,%d,%s,\"%s\",%.3f,%.0f,%.0f,%.0f,%.2f,%.2f,%.4f,%.4f,%.4f,%.4f,%.4f,%zu,%d,%s\n", b->test, b->n, opt_str(o, "method"), c->dir, b->tok_s, b->weights, b->kv,
                b->meta, gb_s, read, gb_s / read, b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3, b->stored, n_threads(), simd_name());
    else {
        char name[32];
        snprintf(name, sizeof name, *b->test == 'p' ? "pp %d" : "tg at %d", b->n);
        fprintf(f, "| %-11s | %8.2f ", name, b->tok_s);
        if (*b->test == 'p') fprintf(f, "| %10s | %5s | %8s | %5s | %13.1f | %5s ", "", "", "", "", read, "");
        else fprintf(f, "| %10.1f | %5.1f | %8.1f | %5.1f | %13.1f | %4.0f%% ", b->weights * 1e-6, b->kv * 1e-6, b->meta * 1e-6, gb_s, read, 100 * gb_s / read);
        fprintf(f, "| %9.3f | %9.3f | %9.3f | %8.3f | %10.1f |\n", b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3, (double)b->stored * 1e-6);
    }
    fflush(f);
}
// ---- the suite: the methods of the five papers and what they are compared with, on one model, in one table (`make gpu-bench`).
// A method that refuses, or that would take the suite past its time, is a row that says so.

typedef struct { const char *name, *method, *options; int prompts, depths; } SuiteRun;      // options "x=1 y=2"; which tests it takes part in
static const SuiteRun suite_runs[] = {
    { "full", "full", "", 1, 1 }, { "loopserve-p", "loopserve-p", "", 1, 0 }, { "streaming 1024", "streaming", "budget=1024", 0, 1 }, { "snapkv 1024", "snapkv", "budget=1024", 0, 1 },
    { "dililazy 128", "dililazy", "budget=128", 0, 1 }, { "lychee", "lychee", "", 0, 1 }, { "pats 8", "pats", "pats-bmax=8", 0, 1 }, { "pats 10", "pats", "pats-bmax=10", 0, 1 },
    { "loopserve-d", "loopserve-d", "", 0, 1 },
};
enum { SUITE_SECONDS = 400 };
typedef struct { App *a; FILE *table, *csv; int *prompt, *depth, repeat; double t0; char scores[64]; } Suite;

static void suite_row(const Suite *u, const SuiteRun *r, const BenchLine *b, const char *instead) {     // instead: why there are no numbers, or NULL
    double bytes = b->weights + b->kv + b->meta, rate = bytes * b->tok_s * 1e-9, share = b->bandwidth > 0 ? 1e9 * rate / b->bandwidth : 0, tera = b->n ? b->flops * b->tok_s / b->n * 1e-12 : 0;
    fprintf(u->table, "| %-14s | %s %6d | ", r->name, b->test, b->n);
    if (instead) fprintf(u->table, "%s |\n", instead);
    else fprintf(u->table, "%9.2f | %8.3f | %8.3f | %7.1f | %4.0f%% | %7.1f | %8.3f | %8.3f | %8.3f | %8.3f | %8.3f |\n", b->tok_s, 1e3 / b->tok_s, bytes * 1e-9, rate, 100 * share, tera,
                 b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3, (double)b->stored * 1e-9);
    fprintf(u->csv, "\"%s\",%s,%d,%.3f,%.0f,%.0f,%.0f,%.2f,%.2f,%.4f,%.3f,%.4f,%.4f,%.4f,%.4f,%zu,\"%s\"\n", r->name, b->test, b->n, b->tok_s, b->weights, b->kv, b->meta, rate,
            b->bandwidth * 1e-9, share, tera, b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3, b->stored, instead ? instead : "");
    fflush(u->table); fflush(u->csv);
}
static Options *suite_options(const Suite *u, const SuiteRun *r) {
    Options *o = options_copy(u->a->o);
    char err[256], text[128], *next = text;
    snprintf(text, sizeof text, "%s", r->options);
    for (char *word; (word = strsep(&next, " ")); ) {
        char *value = strchr(word, '=');
        if (!value) continue;
        *value = 0;
        options_set(o, word, value + 1, err);
    }
    options_set(o, "method", r->method, err);
    options_set(o, "dililazy-scores", u->scores, err);
    return o;
}
static void suite_lines(const Suite *u, const SuiteRun *r, Session *s) {
    for (int decode = 0; decode < 2; decode++) {
        const int *n = decode ? u->depth : u->prompt;
        double last = 0;                                         // seconds of the line before; the next takes longer as contexts grow
        for (int i = 0; (decode ? r->depths : r->prompts) && i < (int)arrlen(n); i++) {
            double t = now(), guess = i && n[i - 1] ? 1.5 * last * n[i] / n[i - 1] : 0;
            BenchLine b = { .test = decode ? "tg" : "pp", .n = n[i] };
            int late = t - u->t0 + guess > SUITE_SECONDS;
            if (!late) b = decode ? bench_decode(s, n[i], u->repeat) : bench_prefill(s, n[i], u->repeat);
            suite_row(u, r, &b, late ? "left out: no time" : NULL);
            if (late) break;
            last = now() - t;
        }
    }
}
static void suite_run(const Suite *u, const SuiteRun *r) {
    jmp_buf jump, *outer = die_jump;
    char err[512];
    Options *o = suite_options(u, r);
    Session *volatile s = NULL;
    BenchLine none = { .test = r->depths ? "tg" : "pp" };
    die_jump = &jump;                                            // a method that cannot go on ends its rows, not the suite
    if (setjmp(jump)) suite_row(u, r, &none, die_text);
    else if (!(s = session_try(u->a->c, u->a->w, o, r->method, err))) suite_row(u, r, &none, err);
    else suite_lines(u, r, s);
    die_jump = outer;
    session_close(s);
    options_free(o);
}
static void suite_scores(Suite *u) {                             // DiliLazyKV needs scores of a model's heads: made-up ones
    snprintf(u->scores, sizeof u->scores, "/tmp/kvcomp_scores_XXXXXX");
    int fd = mkstemp(u->scores), n = u->a->c->L * u->a->c->H;
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f) die(EXIT_RUN, "--bench-suite: %s cannot be written", u->scores);
    for (int i = 0; i < n; i++) fprintf(f, "%c\"%d-%d\": [%.6f]%s", i ? ',' : '{', i / u->a->c->H, i % u->a->c->H, (double)(mix64((uint64_t)i) >> 11) * 0x1p-53, i + 1 < n ? "" : "}");
    fclose(f);
}
static void suite(App *a, int *prompt, int *depth, int repeat, FILE *table, FILE *csv) {
    Suite u = { .a = a, .table = table, .csv = csv, .prompt = prompt, .depth = depth, .repeat = repeat, .t0 = now() };
    const Config *c = a->c;
    Session *base = session_open(c, a->w, a->o, "full");         // stays open, so that the weights stay on the device
    double gemm = KV_DEV(base) ? device_gemm_rate(base, c->F, c->C, c->C) : 0, copy = bandwidth(base);
    suite_scores(&u);
    fprintf(table, "%s, %.2f GB of weights, -d %s: copy %.1f GB/s (read and written), bf16 product of %d x %d x %d %.1f TFLOP/s; K %s, V %s; share: of the copy rate, measured beside every line\n\n"
            "| method         | test      |     tok/s | ms/token |  GB/step |    GB/s | share | TFLOP/s | attend ms | select   | commit   | index    | rows GB  |\n"
            "|----------------|-----------|----------:|---------:|---------:|--------:|------:|--------:|---------:|---------:|---------:|---------:|---------:|\n",
            c->dir, (double)a->w->bytes * 1e-9, opt_str(a->o, "device"), copy * 1e-9, c->F, c->C, c->C, gemm * 1e-12, opt_str(a->o, "ctk"), opt_str(a->o, "ctv"));
    fprintf(csv, "method,test,n,tok_s,weight_bytes,kv_bytes_attended,index_bytes,gb_s,copy_gb_s,share,tflop_s,attend_ms,select_ms,commit_ms,index_ms,kv_bytes_stored,note\n");
    for (size_t i = 0; i < sizeof suite_runs / sizeof *suite_runs; i++) suite_run(&u, &suite_runs[i]);
    unlink(u.scores);
    session_close(base);
}
static void bench_context(Options *o, const int *prompt, const int *depth) {     // what the memory plan is told: the longest context there will be
    int n = 0;
    char text[16], err[256];
    for (int i = 0; i < (int)arrlen(prompt); i++) if (prompt[i] > n) n = prompt[i];
    for (int i = 0; i < (int)arrlen(depth); i++)  if (depth[i] > n) n = depth[i];
    snprintf(text, sizeof text, "%d", n + 1 + BENCH_WARM + BENCH_STEPS * opt_int(o, "repeat"));
    options_set(o, "ctx-size", text, err);
}
static int bench(Options *o) {
    App a = { .o = o };
    const char *path = opt_str(o, "bench-suite");
    int *prompt = number_list("bench-prompts", opt_str(o, "bench-prompts"), 1, 1 << 24), *depth = number_list("bench-depths", opt_str(o, "bench-depths"), 0, 1 << 24);
    int repeat = opt_int(o, "repeat");
    FILE *csv = *path ? fopen(path, "w") : NULL;
    if (*path && !csv) die(EXIT_USAGE, "--bench-suite %s: %s", path, strerror(errno));
    bench_context(o, prompt, depth);
    open_model(&a);
    choose_device(&a);
    if (csv) {
        suite(&a, prompt, depth, repeat, stdout, csv);
        fclose(csv);
    } else {
        Session *s = session_open(a.c, a.w, o, opt_str(o, "method"));
        bench_header(stdout, o, a.c, a.w);
        for (int i = 0; i < (int)arrlen(prompt); i++) { BenchLine b = bench_prefill(s, prompt[i], repeat); bench_print(stdout, &b, o, a.c); }
        for (int i = 0; i < (int)arrlen(depth); i++)  { BenchLine b = bench_decode(s, depth[i], repeat);   bench_print(stdout, &b, o, a.c); }
        session_close(s);
    }
    weights_close(a.w, a.c);
    arrfree(prompt);
    arrfree(depth);
    return 0;
}

// ==================================================================================================== 29 REPORT
// --report OUT.html: what was measured and what the methods do, as one page that needs nothing else: no network, no library, and
// a script for the sliders only. OUT.csv beside it holds the numbers. The scores come from --eval; everything else from a
// demonstration: a built-in dialogue of seven turns, played through each method of --compare, or --method, or a default set.
// Full attention speaks first; the others are fed its replies, so that all hold the same tokens, and answer only the last
// question themselves.
// Small drawings are inline svg, attention maps are png files written here (stored, not compressed) inside the page.

enum { DEMO_TURNS = 7, DEMO_BUDGET = 96, DEMO_MOST = 256, MAP_SIDE = 256, MAP_MOST = 36, SHADES = 16, TEXT_SHADES = 8, SERIES = 9 };
enum { IN_ATTEND, IN_SELECT, IN_COMMIT, IN_REST, PHASE_PARTS };

static const char *demo_turns[DEMO_TURNS] = {            // what the user says
    "My name is Tara.",
    "Please read: The old mill was dusty and quiet. There is a garden near the river. A tall lamp stood behind the church. The wind moved the gate and the leaf. "
    "On Monday the street looked empty. The secret code of the red box is 4821. A badger slept under the bridge. The narrow path leads to the warm kitchen. "
    "People say that the market was once busy. It rained on the fence all day. From the hill you can see the lake. Every Friday the school is full.",
    "Here is a text: The fox walked along the quiet road. They painted the wall and cleaned the window. Nobody knew why the forest was so dark. The sun shone on the "
    "mountain. The golden key is in the cellar. We saw a clever swan by the boat. Some like the moon, others like the star. It was a cold day in the village. "
    "The shop was full of people. There is a stone near the station. A slow cloud stood behind the tree. The farm is pretty in the morning.",
    "What is my name?",
    "Remember this. The bird was small and happy. The green door costs 57 coins. The train is busy in the morning. On Sunday the park looked tired. The otter walked "
    "along the deep river. They painted the bridge and cleaned the house. Nobody knew why the table was so heavy. The wooden gate leads to the soft field. "
    "It rained on the church all day. A hedgehog slept under the flower. The room was full of people. From the window you can see the moon.",
    "Where is the golden key?",
    "What is the secret code of the red box?",
};
static const char *demo_answer = "4821";                // to the last question
static const char *demo_methods = "streaming,snapkv,h2o,dililazy,sonic,loopserve,lychee,pats";
static const char *demo_values[][2] = {     // what a short dialogue needs to show a method at work; options given by the user win
    { "lychee-buffer", "32" }, { "lychee-kg", "2" }, { "loopserve-min-context", "0" }, { "loopserve-local", "8" },
    { "loopserve-alpha", "0.9" }, { "loopserve-first", "4" }, { "loopserve-interval", "4" }, { "loopserve-obs", "16" }, { "pats-window", "32" }, { "pats-sink", "4" },
};

typedef struct {
    FILE *f, *csv;
    App *a;
    Options *o;                 // of the demonstration
    char *source;               // stb array, NUL-terminated: command line, model, seed; stands under every picture
    Turn *script;               // stb array: the dialogue with full attention's replies
    int pictures;
} Report;

typedef struct {                // the demonstration through one method
    char name[160], why[512];   // why: the reason it was not played
    double stored[DEMO_TURNS], read[DEMO_TURNS];        // bytes held after a turn; bytes read a decode step of it
    double seconds[2][PHASE_PARTS]; long tokens[2];     // [0] prefill, [1] decode
    char *said;                 // stb array, NUL-terminated: its own answer to the last question
    Token *tok; float *share;   // stb arrays: tokens seen; share of all query heads that read each in the last step
} DemoRun;

static int arg_count;           // the command line, for captions
static char **args;

// ---- text in a page: the five characters of markup, control characters and broken UTF-8 made visible
static void html_bytes(FILE *f, const char *s, size_t n) {
    for (size_t i = 0; i < n; ) {
        int k = utf8_length(s + i, n - i), c = (unsigned char)s[i];
        if (c == '&') fputs("&amp;", f);
        else if (c == '<') fputs("&lt;", f);
        else if (c == '>') fputs("&gt;", f);
        else if (c == '"') fputs("&quot;", f);
        else if (c == '\'') fputs("&#39;", f);
        else if (!k || (c < ' ' && c != '\n') || c == 127) fprintf(f, "&lt;0x%02X&gt;", (unsigned)c);
        else fwrite(s + i, 1, (size_t)k, f);
        i += k ? (size_t)k : 1;
    }
}
static void html_text(FILE *f, const char *s) { html_bytes(f, s, strlen(s)); }
static void csv_text(FILE *f, const char *s) {           // quoted where a comma, quote or line end asks for it
    if (!strpbrk(s, ",\"\r\n")) { fputs(s, f); return; }
    putc('"', f);
    for (; *s; s++) { if (*s == '"') putc('"', f); putc(*s, f); }
    putc('"', f);
}
static void csv_row(Report *r, const char *picture, const char *series, const char *what, double x, double y, double value, double lo, double hi) {
    csv_text(r->csv, picture); putc(',', r->csv);
    csv_text(r->csv, series); putc(',', r->csv);
    csv_text(r->csv, what);
    fprintf(r->csv, ",%.6g,%.6g,%.6g,%.6g,%.6g\n", x, y, value, lo, hi);
}

// ---- png: up to 16 colours, four bits a pixel, stored deflate blocks
static const unsigned char viridis[SHADES][3] = {
    { 68, 1, 84 }, { 72, 26, 108 }, { 71, 47, 125 }, { 65, 68, 135 }, { 57, 86, 140 }, { 49, 104, 142 }, { 42, 120, 142 }, { 35, 136, 142 },
    { 31, 152, 139 }, { 34, 168, 132 }, { 53, 183, 121 }, { 84, 197, 104 }, { 122, 209, 81 }, { 165, 219, 54 }, { 210, 226, 27 }, { 253, 231, 37 },
};
static uint32_t crc32_of(uint32_t crc, const unsigned char *p, size_t n) {      // crc: 0, or of the bytes before
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int b = 0; b < 8; b++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return ~crc;
}
static uint32_t adler32_of(const unsigned char *p, size_t n) {
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < n; i++) { a = (a + p[i]) % 65521; b = (b + a) % 65521; }
    return b << 16 | a;
}
static unsigned char *big_endian(unsigned char *to, uint32_t x) {        // appends four bytes to the stb array
    for (int shift = 24; shift >= 0; shift -= 8) arrput(to, (unsigned char)(x >> shift));
    return to;
}
static unsigned char *png_chunk(unsigned char *png, const char *type, const unsigned char *data, size_t n) {
    png = big_endian(png, (uint32_t)n);
    size_t from = arrlenu(png);
    memcpy(arraddnptr(png, 4), type, 4);
    if (n) memcpy(arraddnptr(png, n), data, n);
    return big_endian(png, crc32_of(0, png + from, arrlenu(png) - from));
}
static unsigned char *png_make(const unsigned char *pixel, int w, int h) {       // pixel (h,w) 0..15 -> the file, as an stb array
    unsigned char *raw = NULL, *z = NULL, *head = NULL, *png = NULL;
    for (int y = 0; y < h; y++) {
        arrput(raw, 0);                                  // the row's filter: none
        for (int x = 0; x < w; x += 2) arrput(raw, (unsigned char)(pixel[(size_t)y * w + x] << 4 | (x + 1 < w ? pixel[(size_t)y * w + x + 1] : 0)));
    }
    arrput(z, 0x78); arrput(z, 0x01);
    for (size_t i = 0, n; i < arrlenu(raw); i += n) {    // stored blocks: last?, length, its complement, bytes
        n = arrlenu(raw) - i < 65535 ? arrlenu(raw) - i : 65535;
        arrput(z, i + n == arrlenu(raw));
        arrput(z, (unsigned char)n); arrput(z, (unsigned char)(n >> 8));
        arrput(z, (unsigned char)~n); arrput(z, (unsigned char)(~n >> 8));
        memcpy(arraddnptr(z, n), raw + i, n);
    }
    z = big_endian(z, adler32_of(raw, arrlenu(raw)));
    head = big_endian(big_endian(head, (uint32_t)w), (uint32_t)h);
    memcpy(arraddnptr(head, 5), "\x04\x03\0\0\0", 5);    // 4 bits, palette
    memcpy(arraddnptr(png, 8), "\x89PNG\r\n\x1a\n", 8);
    png = png_chunk(png, "IHDR", head, 13);
    png = png_chunk(png, "PLTE", viridis[0], sizeof viridis);
    png = png_chunk(png, "IDAT", z, arrlenu(z));
    png = png_chunk(png, "IEND", NULL, 0);
    arrfree(raw); arrfree(z); arrfree(head);
    return png;
}
static void base64_write(FILE *f, const unsigned char *p, size_t n) {
    static const char *digit = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t u = (uint32_t)p[i] << 16 | (uint32_t)(i + 1 < n ? p[i + 1] : 0) << 8 | (i + 2 < n ? p[i + 2] : 0);
        putc(digit[u >> 18], f);
        putc(digit[u >> 12 & 63], f);
        putc(i + 1 < n ? digit[u >> 6 & 63] : '=', f);
        putc(i + 2 < n ? digit[u & 63] : '=', f);
    }
}

// ---- the page
static const char *report_style =
    ":root{--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d5dae0;--card:#f5f7f9;--kept:31,152,139;--ok:#11784f;--bad:#c23a20;color-scheme:light dark}\n"
    "@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e3e7eb;--dim:#98a2ad;--line:#343b43;--card:#1d2227;--kept:18,134,118;--ok:#4cc492;--bad:#ff7a5c}}\n"
    "body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:1.5rem auto;padding:0 1rem}\n"
    "section{border-top:1px solid var(--line);margin-top:2.5rem}h1{margin-bottom:.3rem}h2{margin:1.2rem 0 .3rem}h3{font-size:1rem;margin:1rem 0 .3rem}\n"
    "p.how{max-width:60rem;margin:.2rem 0 .8rem}p.note{color:var(--dim);font-size:.9rem}p.src{color:var(--dim);font-size:.75rem;overflow-wrap:anywhere}\n"
    "nav a{margin-right:1rem}a{color:#2a88c8}svg{max-width:100%;height:auto}svg text{fill:var(--fg);font:12px system-ui,sans-serif}svg text.dim{fill:var(--dim)}\n"
    "svg .grid{stroke:var(--line);stroke-width:1;fill:none}.row{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-start}\n"
    "table{border-collapse:collapse;font-size:.9rem;margin:.5rem 0}th,td{white-space:nowrap;padding:.2rem .6rem;border:1px solid var(--line);text-align:right;font-variant-numeric:tabular-nums}\n"
    "th{background:var(--card);font-weight:600}\n"
    "td.t,th.t{text-align:left;white-space:normal}caption{white-space:nowrap;text-align:left;font-weight:600;padding:.2rem 0}div.wide{overflow-x:auto}div.wide th,div.wide td{font-size:.8rem;padding:.2rem .4rem}div.wide th{white-space:normal}\n"
    "ul.legend{list-style:none;padding:0;margin:.4rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.9rem}ul.legend svg{vertical-align:middle;margin-right:.4rem}\n"
    ".s0{--c:var(--fg)}.s1{--c:#1f83c4}.s2{--c:#e09a00}.s3{--c:#0fa37a}.s4{--c:#cc6fa3}.s5{--c:#dd5a1e}.s6{--c:#58b4e8}.s7{--c:#9273bd}.s8{--c:#9a9a18}\n"
    "path.s{fill:none;stroke:var(--c);stroke-width:2.2}path.s0.s{stroke-width:7;opacity:.3}circle.s,rect.s{fill:var(--c)}\n"
    "path.s6,path.s7{stroke-dasharray:7 4}path.s8{stroke-dasharray:2 3}path.again{stroke-dasharray:11 3 2 3}\n"
    "path.front{fill:none;stroke:var(--fg);stroke-dasharray:5 5;stroke-width:1.3;opacity:.7}path.bar{fill:none;stroke:var(--c);stroke-width:1.3}\n"
    ".tokens{background:var(--card);padding:.6rem .9rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem;line-height:1.55}\n"
    ".tokens .k0{color:var(--dim);opacity:.7}.tokens b{font-weight:600;border-bottom:3px solid #e0662a}\n"
    ".side{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:0 1.5rem}\n"
    ".b0{fill:#7b52ab}.b1{fill:#2a78b5}.b2{fill:#22a884}.b3{fill:var(--line)}.b4{fill:none;stroke:var(--dim);stroke-dasharray:3 2}.off{opacity:.45}\n"
    ".tree{background:var(--card);padding:.6rem .9rem;font-size:.85rem}.tree details{margin:.15rem 0 .15rem 1.2rem}.tree summary{cursor:pointer}.tree p{margin:.15rem 0 .15rem 2.4rem}\n"
    ".tree i{display:inline-block;width:.9em;height:.9em;border-radius:.2em;margin-right:.4em;vertical-align:-.1em}\n"
    ".tree .read{font-weight:600}.tree .gold{border-bottom:3px solid #e0662a}.tree .skip{color:var(--dim)}\n"
    ".maps{display:flex;flex-wrap:wrap;gap:.8rem}.maps figure{margin:0;width:11rem}.maps figcaption{font-size:.75rem;line-height:1.3}.maps svg{width:100%;display:block}\n"
    ".maps.one figure{display:none;width:min(34rem,100%)}.maps.one figure.on{display:block}.maps.one figcaption{font-size:.9rem}.maps image{image-rendering:pixelated}\n"
    ".maps .void{fill:var(--bg)}.maps .line{fill:#ff4d4d;fill-opacity:.18;stroke:#ff4d4d;stroke-width:1;vector-effect:non-scaling-stroke}\n"
    ".maps .whole{fill:#f2a33c;stroke:#f2a33c;fill-opacity:.12;stroke-dasharray:3 3;stroke-opacity:.7}#lines:not(:checked)~.maps .line{display:none}\n"
    ".sliders{display:none}.js .sliders{display:flex;flex-wrap:wrap;gap:.4rem 1.5rem;margin:.4rem 0}.sliders input{vertical-align:middle;width:14rem}.ok{color:var(--ok)}.bad{color:var(--bad)}\n";

static void report_shades(FILE *f) {                     // classes: v0..v15 viridis; r0..r10 red to green; k1..k8 the share of heads that keep a token
    for (int i = 0; i < SHADES; i++)
        fprintf(f, ".v%d{fill:#%02x%02x%02x;background:#%02x%02x%02x}%s", i, viridis[i][0], viridis[i][1], viridis[i][2], viridis[i][0], viridis[i][1], viridis[i][2], i % 4 == 3 ? "\n" : "");
    fprintf(f, "svg text.on-dark{fill:#fff}svg text.on-light{fill:#111}\n");
    for (int i = 0; i <= 10; i++) fprintf(f, "td.r%d{background:hsl(%d,70%%,%d%%);color:#111}", i, 12 * i, 66 - i);
    for (int i = 1; i <= TEXT_SHADES; i++) fprintf(f, ".k%d{background:rgba(var(--kept),%.3g)}", i, .12 + .68 * i / TEXT_SHADES);
    fputc('\n', f);
}
static void picture_begin(Report *r, const char *id, const char *title, const char *how) {
    fprintf(r->f, "<section id=\"%s\">\n<h2>%d. ", id, ++r->pictures);
    html_text(r->f, title);
    fprintf(r->f, "</h2>\n<p class=\"how\">");
    html_text(r->f, how);
    fprintf(r->f, "</p>\n");
}
static void picture_end(Report *r) {
    fprintf(r->f, "<p class=\"src\">");
    html_text(r->f, r->source);
    fprintf(r->f, "</p>\n</section>\n");
}
KV_PRINTF(2, 3) static void picture_note(Report *r, const char *fmt, ...) {      // one plain sentence
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    fprintf(r->f, "<p class=\"note\">");
    html_text(r->f, text);
    fprintf(r->f, "</p>\n");
}

// ---- a chart of lines: y from 0, x linear or logarithmic
typedef struct { double x, y, lo, hi; char what[32]; } Spot;    // lo < hi: an error bar
typedef struct { const char *name; int colour; Spot *spot; } Series;      // colour 0: full attention's wide band. spot: stb array
typedef struct { const char *x_name, *y_name; int log_x, bytes_x, bytes_y, dots; double y_top; } Axes;
typedef struct { const Axes *ax; double x0, x1, y1; } Frame;    // the ranges shown
enum { CHART_W = 520, CHART_H = 330, CHART_LEFT = 66, CHART_RIGHT = 16, CHART_TOP = 14, CHART_BOTTOM = 48 };

static double nice_step(double range, int n) {
    double p = pow(10, floor(log10(range / n))), k = range / n / p;
    return p * (k < 1.5 ? 1 : k < 3.5 ? 2 : k < 7.5 ? 5 : 10);
}
static double chart_x(const Frame *c, double x) {
    double share = c->ax->log_x ? log(fmax(x, c->x0) / c->x0) / log(c->x1 / c->x0) : (x - c->x0) / (c->x1 - c->x0);
    return CHART_LEFT + share * (CHART_W - CHART_LEFT - CHART_RIGHT);
}
static double chart_y(const Frame *c, double y) { return CHART_H - CHART_BOTTOM - y / c->y1 * (CHART_H - CHART_BOTTOM - CHART_TOP); }

static Frame chart_frame(const Axes *ax, const Series *s, int n) {
    Frame c = { ax, INFINITY, -INFINITY, ax->y_top };
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++) {
            const Spot *p = &s[i].spot[j];
            if (!ax->log_x || p->x > 0) { c.x0 = fmin(c.x0, p->x); c.x1 = fmax(c.x1, p->x); }
            if (!ax->y_top) c.y1 = fmax(c.y1, 1.05 * fmax(p->y, p->hi));
        }
    if (c.x0 > c.x1) c.x0 = c.x1 = 1;
    if (ax->log_x) { c.x0 /= 1.3; c.x1 *= 1.3; }
    if (c.x0 == c.x1) c.x1 += 1;
    if (!(c.y1 > 0)) c.y1 = 1;
    return c;
}
static void tick_x(FILE *f, const Frame *c, double x) {
    char b[32];
    if (c->ax->bytes_x) human_bytes(x, b); else snprintf(b, sizeof b, "%g", x);
    fprintf(f, "<path class=\"grid\" d=\"M%.1f %dV%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", chart_x(c, x), CHART_TOP, CHART_H - CHART_BOTTOM,
            chart_x(c, x), CHART_H - CHART_BOTTOM + 16, b);
}
static void chart_grid(FILE *f, const Frame *c) {
    char b[32];
    double step = nice_step(c->y1, 5);
    for (int i = 0; i * step <= c->y1 * 1.0001; i++) {
        if (c->ax->bytes_y) human_bytes(i * step, b); else snprintf(b, sizeof b, "%g", i * step);
        fprintf(f, "<path class=\"grid\" d=\"M%d %.1fH%d\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", CHART_LEFT, chart_y(c, i * step), CHART_W - CHART_RIGHT,
                CHART_LEFT - 6, chart_y(c, i * step) + 4, b);
    }
    if (c->ax->log_x) {
        static const int mark[] = { 1, 2, 5 };
        int wide = c->x1 / c->x0 > 100;
        for (int k = (int)floor(log10(c->x0)); k <= log10(c->x1); k++)
            for (int i = 0; i < (wide ? 1 : 3); i++) { double x = mark[i] * pow(10, k); if (x >= c->x0 && x <= c->x1) tick_x(f, c, x); }
    } else {
        step = nice_step(c->x1 - c->x0, 8);
        for (double x = ceil(c->x0 / step) * step; x <= c->x1 * 1.0001; x += step) tick_x(f, c, x);
    }
    fprintf(f, "<text class=\"dim\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">", (CHART_LEFT + CHART_W - CHART_RIGHT) / 2, CHART_H - 10);
    html_text(f, c->ax->x_name);
    fprintf(f, "</text>\n<text class=\"dim\" transform=\"translate(12 %d) rotate(-90)\" text-anchor=\"middle\">", (CHART_TOP + CHART_H - CHART_BOTTOM) / 2);
    html_text(f, c->ax->y_name);
    fprintf(f, "</text>\n");
}
static const char *series_class(int colour, char class[24]) {    // after the last colour again the first ones, dashed otherwise
    snprintf(class, 24, "s%d s%s", colour ? 1 + (colour - 1) % (SERIES - 1) : 0, colour >= SERIES ? " again" : "");
    return class;
}
static void chart_series(FILE *f, const Frame *c, const Series *s) {
    char class[24];
    fprintf(f, "<path class=\"%s\" d=\"", series_class(s->colour, class));
    for (int j = 0; j < (int)arrlen(s->spot); j++) fprintf(f, "%s%.1f %.1f", j ? "L" : "M", chart_x(c, s->spot[j].x), chart_y(c, s->spot[j].y));
    fprintf(f, "\"/>\n");
    double at_x = -99, at_y = -99;                       // the last number written: the next must not cover it
    for (int j = 0; c->ax->dots && j < (int)arrlen(s->spot); j++) {
        const Spot *p = &s->spot[j];
        double x = chart_x(c, p->x), y = chart_y(c, p->y), lo = chart_y(c, p->lo), hi = chart_y(c, p->hi);
        if (p->lo < p->hi) fprintf(f, "<path class=\"%.2s bar\" d=\"M%.1f %.1fV%.1fM%.1f %.1fh8M%.1f %.1fh8\"/>", class, x, lo, hi, x - 4, lo, x - 4, hi);
        fprintf(f, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\"><title>", class, x, y);
        html_text(f, s->name);
        fprintf(f, " %s: %.4g</title></circle>", p->what, p->y);
        int room = fabs(x + 7 - at_x) > 20 || fabs(y - 6 - at_y) > 12;
        if (*p->what && room) fprintf(f, "<text class=\"dim\" x=\"%.1f\" y=\"%.1f\">%s</text>", at_x = x + 7, at_y = y - 6, p->what);
        fputc('\n', f);
    }
}
static void legend_begin(FILE *f) { fprintf(f, "<ul class=\"legend\">\n"); }
static void legend_end(FILE *f) { fprintf(f, "</ul>\n"); }
static void legend_lines(FILE *f, const Series *s, int n, int dots) {
    char class[24];
    legend_begin(f);
    for (int i = 0; i < n; i++) {
        fprintf(f, "<li><svg width=\"34\" height=\"12\"><path class=\"%s\" d=\"M1 6H33\"/>", series_class(s[i].colour, class));
        if (dots) fprintf(f, "<circle class=\"%s\" cx=\"17\" cy=\"6\" r=\"4.5\"/>", class);
        fprintf(f, "</svg>");
        html_text(f, s[i].name);
        fprintf(f, "</li>\n");
    }
    legend_end(f);
}
static void legend_box(FILE *f, const char *class, const char *name) {
    fprintf(f, "<li><svg width=\"16\" height=\"12\"><rect class=\"%s\" x=\"1\" y=\"1\" width=\"14\" height=\"10\"/></svg>", class);
    html_text(f, name);
    fprintf(f, "</li>\n");
}
static void chart(FILE *f, const Axes *ax, const Series *s, int n, const Spot *front) {     // front: stb array of a frontier's points, or NULL
    Frame c = chart_frame(ax, s, n);
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", CHART_W, CHART_H, CHART_W, CHART_H);
    chart_grid(f, &c);
    if (front) fprintf(f, "<path class=\"front\" d=\"");
    for (int i = 0; i < (int)arrlen(front); i++) fprintf(f, i ? "H%.1fV%.1f" : "M%.1f %.1f", chart_x(&c, front[i].x), chart_y(&c, front[i].y));
    if (front) fprintf(f, "H%d\"/>\n", CHART_W - CHART_RIGHT);
    for (int i = 0; i < n; i++) chart_series(f, &c, &s[i]);
    fprintf(f, "</svg>\n");
}
static void series_free(Series *s) {
    for (int i = 0; i < (int)arrlen(s); i++) arrfree(s[i].spot);
    arrfree(s);
}

// ---- 1: quality against bytes
enum { BY_SCORE, BY_KLD, BY_PPL };
static const char *report_metrics[] = { "mean score (0 to 1; higher is better)", "KL divergence from full (nats; lower is better)", "perplexity (lower is better)" };

static int rows_metric(const Score *rows) {
    int metric = BY_PPL;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        if (arrlen(rows[i].answers)) return BY_SCORE;
        if (rows[i].kld > 0) metric = BY_KLD;
    }
    return metric;
}
static double report_mean(const Answer *x, const char *task, int position) {     // of one task, or of all (NULL); of one place, or of all (-1). -1: none
    double sum = 0;
    int n = 0;
    for (int i = 0; i < (int)arrlen(x); i++) if ((!task || !strcmp(task, x[i].task)) && (position < 0 || position == x[i].position)) { sum += x[i].score; n++; }
    return n ? sum / n : -1;
}
static double row_quality(const Score *s, int metric) {
    double n = s->predicted ? (double)s->predicted : 1;
    return metric == BY_SCORE ? fmax(0, report_mean(s->answers, NULL, -1)) : metric == BY_KLD ? s->kld / n : exp(s->nll / n);
}
static double row_bytes(const Score *s, int read) { return (read ? s->attended : s->stored) / (s->items ? s->items : 1); }

static int spot_order(const void *a, const void *b) { const Spot *p = a, *q = b; return (p->x > q->x) - (p->x < q->x); }
static Spot *frontier(const Series *s, int n, int higher) {      // the points nothing cheaper beats, by rising x
    Spot *all = NULL, *best = NULL;
    for (int i = 0; i < n; i++) for (int j = 0; j < (int)arrlen(s[i].spot); j++) arrput(all, s[i].spot[j]);
    if (all) qsort(all, arrlen(all), sizeof *all, spot_order);
    for (int i = 0; i < (int)arrlen(all); i++) {
        int better = !arrlen(best) || (higher ? all[i].y > arrlast(best).y : all[i].y < arrlast(best).y);
        if (better && arrlen(best) && arrlast(best).x == all[i].x) arrlast(best) = all[i];
        else if (better) arrput(best, all[i]);
    }
    arrfree(all);
    return best;
}
static Series *score_series(Report *r, const Score *rows, int metric, int read) {        // one a method, its budgets as points
    Series *s = NULL;
    int colours = 0;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        int k = 0;
        while (k < (int)arrlen(s) && strcmp(s[k].name, rows[i].name)) k++;
        if (k == (int)arrlen(s)) { Series one = { rows[i].name, strcmp(rows[i].name, "full") ? ++colours : 0, NULL }; arrput(s, one); }
        Spot p = { .x = row_bytes(&rows[i], read), .y = row_quality(&rows[i], metric), .lo = rows[i].lo, .hi = rows[i].hi };
        if (rows[i].budget && strcmp(rows[i].name, "full")) snprintf(p.what, sizeof p.what, "%d", rows[i].budget);
        arrput(s[k].spot, p);
        csv_row(r, "pareto", rows[i].name, read ? "bytes read a step, score" : "bytes stored, score", p.x, rows[i].budget, p.y, p.lo, p.hi);
    }
    return s;
}
// The table of --compare: a column for every task, for every place of the question, for what was measured at all.
enum { COL_QUALITY, COL_INTERVAL, COL_MEAN, COL_KLD, COL_STORED, COL_SHARE, COL_READ, COL_PEAK, COL_PREFILL, COL_DECODE };
typedef struct { const char *name; int kind; const char *task; int position; } TableColumn;      // task, position of COL_MEAN: as in report_mean

static TableColumn *table_column(TableColumn *c, const char *name, int kind, const char *task, int position) {
    for (int i = 0; i < (int)arrlen(c); i++) if (!strcmp(c[i].name, name)) return c;
    TableColumn one = { name, kind, task, position };
    arrput(c, one);
    return c;
}
static TableColumn *table_columns(const Score *rows, int metric) {    // stb array
    static const char *place[] = { "asked first", "asked amid", "asked last" };
    TableColumn *c = NULL, *tasks = NULL;
    int spread = 0, kld = 0;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        spread |= rows[i].lo < rows[i].hi;
        kld |= rows[i].kld > 0;
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) tasks = table_column(tasks, rows[i].answers[j].task, COL_MEAN, rows[i].answers[j].task, -1);
    }
    c = table_column(c, metric == BY_SCORE ? "mean score" : metric == BY_KLD ? "KLD (nats)" : "perplexity", COL_QUALITY, NULL, -1);
    if (spread) c = table_column(c, "95 % interval", COL_INTERVAL, NULL, -1);
    for (int i = 0; i < (int)arrlen(tasks) && arrlen(tasks) > 1; i++) arrput(c, tasks[i]);
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            int p = rows[i].answers[j].position;
            if (p >= 0 && p < 3) c = table_column(c, place[p], COL_MEAN, NULL, p);
        }
    if (kld) c = table_column(c, "KLD (nats)", COL_KLD, NULL, -1);
    c = table_column(c, "held", COL_STORED, NULL, -1);         c = table_column(c, "of full", COL_SHARE, NULL, -1);
    c = table_column(c, "read a step", COL_READ, NULL, -1);    c = table_column(c, "peak", COL_PEAK, NULL, -1);
    c = table_column(c, "prefill s", COL_PREFILL, NULL, -1);   c = table_column(c, "tok/s", COL_DECODE, NULL, -1);
    arrfree(tasks);
    return c;
}
static void score_cell(const Score *s, const TableColumn *c, int metric, char b[32]) {
    double x = c->kind == COL_MEAN ? report_mean(s->answers, c->task, c->position) : 0;
    switch (c->kind) {
    case COL_QUALITY:  snprintf(b, 32, metric == BY_KLD ? "%.5f" : "%.3f", row_quality(s, metric)); break;
    case COL_INTERVAL: snprintf(b, 32, "%.3f to %.3f", s->lo, s->hi); break;
    case COL_MEAN:     if (x < 0) *b = 0; else snprintf(b, 32, "%.3f", x); break;
    case COL_KLD:      snprintf(b, 32, "%.5f", s->kld / (s->predicted ? (double)s->predicted : 1)); break;
    case COL_STORED:   human_bytes(row_bytes(s, 0), b); break;
    case COL_SHARE:    snprintf(b, 32, "%.1f %%", 100 * s->stored / (s->full > 0 ? s->full : 1)); break;
    case COL_READ:     human_bytes(row_bytes(s, 1), b); break;
    case COL_PEAK:     human_bytes(s->peak, b); break;
    case COL_PREFILL:  snprintf(b, 32, "%.2f", s->prefill_s); break;
    case COL_DECODE:   snprintf(b, 32, "%.0f", rate((long)s->n_decode, s->decode_s)); break;
    }
}
static void score_table(Report *r, const Score *rows, int metric) {
    TableColumn *c = table_columns(rows, metric);
    char b[32];
    fprintf(r->f, "<div class=\"wide\"><table><tr><th class=\"t\">method</th><th>budget</th>");
    for (int k = 0; k < (int)arrlen(c); k++) { fprintf(r->f, "<th>"); html_text(r->f, c[k].name); fprintf(r->f, "</th>"); }
    fprintf(r->f, "</tr>\n");
    for (int i = 0; i < (int)arrlen(rows); i++) {
        fprintf(r->f, "<tr><td class=\"t\">");
        html_text(r->f, rows[i].name);
        if (rows[i].budget && strcmp(rows[i].name, "full")) fprintf(r->f, "</td><td>%d</td>", rows[i].budget); else fprintf(r->f, "</td><td></td>");
        for (int k = 0; k < (int)arrlen(c); k++) {
            score_cell(&rows[i], &c[k], metric, b);
            fprintf(r->f, "<td>%s</td>", b);
            if (c[k].kind == COL_MEAN && *b) csv_row(r, "scores", rows[i].name, c[k].name, rows[i].budget, 0, atof(b), 0, 0);
        }
        fprintf(r->f, "</tr>\n");
    }
    fprintf(r->f, "</table></div>\n");
    arrfree(c);
}
static void draw_pareto(Report *r, const Score *rows) {
    char how[640];
    snprintf(how, sizeof how, "Each point is one method at one budget (the small number: rows kept or read per head). Good is left and %s. Bars, if there are any, are 95 %% bootstrap intervals; "
             "on the dashed line nothing cheaper is better. Left chart: bytes held; right chart: bytes read for one new token (methods that only save reads gain there).",
             rows_metric(rows) == BY_SCORE || !arrlen(rows) ? "up: right answers from few bytes" : "down: close to full attention from few bytes");
    picture_begin(r, "pareto", "Quality against bytes", how);
    if (!arrlen(rows)) picture_note(r, "No scores were measured: give --eval TASK (and --compare METHODS --budgets LIST) together with --report.");
    else {
        int metric = rows_metric(rows);
        Axes ax = { .y_name = report_metrics[metric], .log_x = 1, .bytes_x = 1, .dots = 1, .y_top = metric == BY_SCORE ? 1.06 : 0 };
        fprintf(r->f, "<div class=\"row\">\n");
        for (int read = 0; read < 2; read++) {
            Series *s = score_series(r, rows, metric, read);
            Spot *front = frontier(s, (int)arrlen(s), metric == BY_SCORE);
            ax.x_name = read ? "bytes read per decode step (log scale)" : "bytes of K and V held after a dialogue (log scale)";
            chart(r->f, &ax, s, (int)arrlen(s), front);
            if (read) {
                fprintf(r->f, "</div>\n");
                legend_lines(r->f, s, (int)arrlen(s), 1);
            }
            arrfree(front);
            series_free(s);
        }
        score_table(r, rows, metric);
    }
    picture_end(r);
}

// ---- 2: needles by depth and length
static int on_grid(const Answer *x) { return x->depth >= 0 && x->length > 0; }
// Ascending values of an axis. Lengths vary by a few tokens with the item: what lies within an eighth of the first of its class counts as one.
static double *grid_axis(const Score *rows, int depth) {
    double *v = NULL;
    int n = 0;
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            const Answer *x = &rows[i].answers[j];
            if (on_grid(x)) arrput(v, depth ? x->depth : x->length);
        }
    if (v) qsort(v, arrlen(v), sizeof *v, double_order);
    for (int i = 0; i < (int)arrlen(v); i++) if (!n || v[i] > v[n - 1] + (depth ? 3 : v[n - 1] / 8)) v[n++] = v[i];
    if (v) arrsetlen(v, n);
    return v;
}
static int grid_at(const double *v, double x) { int i = (int)arrlen(v) - 1; while (i > 0 && v[i] > x) i--; return i; }

static void needle_table(Report *r, const Score *s, const double *len, const double *depth) {
    int nl = (int)arrlen(len), nd = (int)arrlen(depth);
    double *sum = xcalloc((size_t)nl * nd, sizeof *sum), *n = xcalloc((size_t)nl * nd, sizeof *n);
    for (int i = 0; i < (int)arrlen(s->answers); i++) {
        const Answer *x = &s->answers[i];
        if (!on_grid(x)) continue;
        int at = grid_at(depth, x->depth) * nl + grid_at(len, x->length);
        sum[at] += x->score; n[at]++;
    }
    fprintf(r->f, "<table><caption>");
    html_text(r->f, s->name);
    if (s->budget && strcmp(s->name, "full")) fprintf(r->f, ", budget %d", s->budget);
    fprintf(r->f, "</caption><tr><th>depth</th>");
    for (int l = 0; l < nl; l++) fprintf(r->f, "<th>%g</th>", len[l]);
    fprintf(r->f, "</tr>\n");
    for (int d = 0; d < nd; d++) {
        fprintf(r->f, "<tr><th>%g %%</th>", depth[d]);
        for (int l = 0; l < nl; l++) {
            int at = d * nl + l;
            double x = n[at] ? sum[at] / n[at] : 0;
            if (!n[at]) { fprintf(r->f, "<td></td>"); continue; }
            fprintf(r->f, "<td class=\"r%d\">%.2f</td>", (int)(10 * fmin(fmax(x, 0), 1) + .5), x);
            csv_row(r, "needle", s->name, "length, depth, score", len[l], depth[d], x, s->budget, n[at]);
        }
        fprintf(r->f, "</tr>\n");
    }
    fprintf(r->f, "</table>\n");
    free(sum); free(n);
}
static void draw_needle(Report *r, const Score *rows) {
    double *len = grid_axis(rows, 0), *depth = grid_axis(rows, 1);
    picture_begin(r, "needle", "Needles found, by depth and length",
                  "A fact was hidden in a long text and asked for at the end. Columns: length of the text in tokens; rows: how deep the fact stands (0 %: at the beginning). "
                  "The number is the share of right answers; green is 1, yellow one half, red 0. A method that forgets shows red where it forgets.");
    if (!arrlen(depth)) picture_note(r, "No answers with a depth were measured: --eval needle makes them.");
    else {
        fprintf(r->f, "<div class=\"row\">\n");
        for (int i = 0; i < (int)arrlen(rows); i++) {
            int any = 0;
            for (int j = 0; j < (int)arrlen(rows[i].answers) && !any; j++) any = on_grid(&rows[i].answers[j]);
            if (any) needle_table(r, &rows[i], len, depth);
        }
        fprintf(r->f, "</div>\n");
    }
    picture_end(r);
    arrfree(len); arrfree(depth);
}

// ---- the demonstration
static void phase_note(DemoRun *d, int phase, const Clock *a, const Clock *b) {  // what the clocks gained in one phase of a turn
    double *x = d->seconds[phase], all = phase ? b->decode - a->decode : b->prefill - a->prefill;
    double part[PHASE_PARTS] = { b->attend - a->attend, b->select - a->select, b->commit - a->commit };
    part[IN_REST] = fmax(0, all - part[0] - part[1] - part[2]);
    for (int i = 0; i < PHASE_PARTS; i++) x[i] += part[i];
    d->tokens[phase] += phase ? b->n_decode - a->n_decode : b->n_prefill - a->n_prefill;
}
static void demo_say(App *a, char **said) {              // a reply of its own; *said: its text as an stb array
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    generate(a, 32, f);
    fclose(f);
    arrsetlen(*said, 0);
    memcpy(arraddnptr(*said, n + 1), text, n + 1);
    free(text);
}
// Where the answer to the last question first stands among the ids: tokens [*from,*to), both n if nowhere.
static void answer_at(const Report *r, const Token *t, int n, int *from, int *to) {
    char *text = NULL;
    int len;
    for (int i = 0; i < n; i++) {
        const char *b = t[i].id >= 0 ? tokenizer_bytes(r->a->tok, t[i].id, &len) : NULL;
        if (b && len) memcpy(arraddnptr(text, len), b, (size_t)len);
    }
    arrput(text, 0);
    const char *hit = strstr(text, demo_answer);
    long at = 0, begin = hit ? hit - text : LONG_MAX, end = hit ? begin + (long)strlen(demo_answer) : LONG_MAX;
    *from = *to = n;
    for (int i = 0; i < n && at < end; i++) {
        if (t[i].id >= 0 && tokenizer_bytes(r->a->tok, t[i].id, &len)) at += len;
        if (at > begin && *from == n) *from = i;
        if (at >= end) *to = i + 1;
    }
    arrfree(text);
}
// What the last step read: for every token the share of all query heads with a row of it in their view.
static void demo_shares(const Session *s, DemoRun *d) {
    int heads = s->c->L * s->c->H, R = s->c->H / s->c->G, *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    memcpy(arraddnptr(d->tok, s->n_tok), s->tok, (size_t)s->n_tok * sizeof *d->tok);
    memset(arraddnptr(d->share, s->n_tok), 0, (size_t)s->n_tok * sizeof *d->share);
    for (int i = 0; i < heads; i++) {
        const KVHead *h = kv_head(s, i / s->c->H, i % s->c->H / R);
        int n = view_rows(s, i / s->c->H, i % s->c->H, rows);
        for (int j = 0; j < n; j++) d->share[h->src[rows[j]]] += 1.f / (float)heads;
    }
    free(rows);
}
// Plays the dialogue through the session. The first run writes the script: full attention's replies. Later runs are fed its
// tokens and speak for themselves in the last reply only, or are fed the first `given` tokens of that one too (given >= 0).
static void demo_play(Report *r, Session *s, DemoRun *d, int given) {
    App a = *r->a;
    int first = !arrlen(r->script);
    a.o = r->o; a.s = s; a.turn = NULL; a.closed = 0;
    a.logits = xcalloc(s->c->V, sizeof(float));
    for (int i = 0; i < DEMO_TURNS; i++) {
        Turn t = first ? render_turn(&a, demo_turns[i]) : r->script[i];
        int last = i == DEMO_TURNS - 1, speaks = first || (last && given < 0), n = last && given >= 0 ? given : (int)arrlen(t.dec);
        Clock c0 = s->clk;
        if (speaks) t.dec = NULL;
        arrput(a.turn, t);
        feed_prefill(&a, &t);
        Clock c1 = s->clk;
        if (speaks) demo_say(&a, &d->said); else for (int j = 0; j < n; j++) feed_decode(&a, t.dec[j]);
        phase_note(d, 0, &c0, &c1);
        phase_note(d, 1, &c1, &s->clk);
        d->stored[i] = (double)kv_bytes(s);
        d->read[i] = s->clk.steps > c1.steps ? (s->clk.bytes_attended - c1.bytes_attended) / (double)(s->clk.steps - c1.steps) : 0;
    }
    if (first) r->script = a.turn;
    else {
        if (given < 0) arrfree(arrlast(a.turn).dec);
        arrfree(a.turn);
    }
    free(a.logits);
}
static DemoRun demo_run(Report *r, const char *name) {
    DemoRun d = { 0 };
    snprintf(d.name, sizeof d.name, "%s", name);
    Session *s = session_try(r->a->c, r->a->w, r->o, name, d.why);
    if (!s) return d;
    demo_play(r, s, &d, -1);
    demo_shares(s, &d);
    session_close(s);
    return d;
}
static DemoRun *demo_runs(Report *r) {                   // full, and the methods asked for; stb array
    const Options *o = r->a->o;
    const char *list = *opt_str(o, "compare") ? opt_str(o, "compare") : opt_given(o, "method") ? opt_str(o, "method") : demo_methods;
    DemoRun *d = NULL;
    char name[160];
    arrput(d, demo_run(r, "full"));
    for (int i = 0; list_word(list, i, name); i++) if (strcmp(name, "full")) arrput(d, demo_run(r, name));
    return d;
}
static void demo_free(DemoRun *d) {
    for (int i = 0; i < (int)arrlen(d); i++) { arrfree(d[i].said); arrfree(d[i].tok); arrfree(d[i].share); }
    arrfree(d);
}
static int right_answer(const DemoRun *d) { return d->said && strstr(d->said, demo_answer); }

// ---- 3: memory over turns
static void memory_table(Report *r, const DemoRun *d) {
    char b[2][32];
    fprintf(r->f, "<div class=\"wide\"><table><tr><th class=\"t\">method</th><th>held at the end</th><th>of full</th><th>read per step</th><th class=\"t\">its answer to the last question</th></tr>\n");
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (*d[i].why) continue;
        human_bytes(d[i].stored[DEMO_TURNS - 1], b[0]);
        human_bytes(d[i].read[DEMO_TURNS - 1], b[1]);
        fprintf(r->f, "<tr><td class=\"t\">");
        html_text(r->f, d[i].name);
        fprintf(r->f, "</td><td>%s</td><td>%.0f %%</td><td>%s</td><td class=\"t\"><span class=\"%s</span> ", b[0], 100 * d[i].stored[DEMO_TURNS - 1] / fmax(1, d[0].stored[DEMO_TURNS - 1]), b[1],
                right_answer(&d[i]) ? "ok\">right:" : "bad\">wrong:");
        html_text(r->f, d[i].said ? d[i].said : "");
        fprintf(r->f, "</td></tr>\n");
    }
    fprintf(r->f, "</table></div>\n");
}
static void draw_memory(Report *r, const DemoRun *d) {
    Axes ax = { .x_name = "turn of the dialogue", .bytes_y = 1, .dots = 1 };
    picture_begin(r, "memory", "Memory over the turns of a dialogue",
                  "The built-in dialogue, turn by turn. Left: bytes of keys and values held when a turn ends; a line that stays flat is a method that really gives memory back. "
                  "Right: bytes read for each new token; methods that keep everything but read little are low here only.");
    fprintf(r->f, "<div class=\"row\">\n");
    for (int read = 0; read < 2; read++) {
        Series *s = NULL;
        for (int i = 0; i < (int)arrlen(d); i++) {
            if (*d[i].why) continue;
            Series one = { d[i].name, i, NULL };
            for (int t = 0; t < DEMO_TURNS; t++) {
                Spot p = { .x = t + 1, .y = read ? d[i].read[t] : d[i].stored[t] };
                arrput(one.spot, p);
                csv_row(r, "memory", d[i].name, read ? "turn, bytes read a step" : "turn, bytes held", t + 1, 0, p.y, 0, 0);
            }
            arrput(s, one);
        }
        ax.y_name = read ? "bytes read per decode step" : "bytes held at the end of the turn";
        chart(r->f, &ax, s, (int)arrlen(s), NULL);
        if (read) {
            fprintf(r->f, "</div>\n");
            legend_lines(r->f, s, (int)arrlen(s), 1);
        }
        series_free(s);
    }
    memory_table(r, d);
    for (int i = 0; i < (int)arrlen(d); i++) if (*d[i].why) picture_note(r, "%s was left out: %s", d[i].name, d[i].why);
    picture_end(r);
}

// ---- 4: head scores
static void head_grid(Report *r, const char *name, const double *x, int whole) {     // x (L,H); whole: numbers without decimals
    int L = r->a->c->L, H = r->a->c->H, cell = H <= 12 ? 44 : H <= 32 ? 16 : 6, tall = H <= 12 ? 24 : cell, named = H <= 12;
    double top = 0;
    for (int i = 0; i < L * H; i++) top = fmax(top, x[i]);
    fprintf(r->f, "<div><h3>");
    html_text(r->f, name);
    fprintf(r->f, "</h3><svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", 44 + H * cell, 36 + L * tall, 44 + H * cell, 36 + L * tall);
    for (int h = 0; h < H; h += named ? 1 : 8) fprintf(r->f, "<text x=\"%d\" y=\"14\" text-anchor=\"middle\">%d</text>", 40 + h * cell + cell / 2, h);
    for (int l = 0; l < L; l += named ? 1 : 4) fprintf(r->f, "<text x=\"34\" y=\"%d\" text-anchor=\"end\">%d</text>", 20 + l * tall + tall / 2 + 4, l);
    for (int i = 0; i < L * H; i++) {
        int v = top > 0 ? (int)(x[i] / top * (SHADES - 1) + .5) : 0, px = 40 + i % H * cell, py = 20 + i / H * tall;
        fprintf(r->f, "<rect class=\"v%d\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"><title>layer %d, head %d: %.4g</title></rect>", v, px, py, cell - 1, tall - 1, i / H, i % H, x[i]);
        if (named) fprintf(r->f, "<text class=\"%s\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.*f</text>", v < 9 ? "on-dark" : "on-light", px + cell / 2, py + tall / 2 + 4, whole ? 0 : 3, x[i]);
        csv_row(r, "heads", name, "layer, head", i / H, i % H, x[i], 0, 0);
    }
    fprintf(r->f, "\n<text class=\"dim\" x=\"40\" y=\"%d\">head; rows: layer; brightest = %.4g</text></svg></div>\n", 32 + L * tall, top);
}
static void scores_path(const Report *r, char path[1100]) {
    const char *given = opt_str(r->o, "dililazy-scores");
    if (*given) snprintf(path, 1100, "%s", given); else snprintf(path, 1100, "%s/head_scores.json", r->a->c->dir);
}
static void draw_heads(Report *r) {
    static const char *kind[] = { "dili", "lazy", "inf" }, *title[] = { "Dili: of what the head looks at most, the needle's share", "Lazy: of its looks at the needle, those among its strongest",
                                  "Inf: both together (harmonic mean)" };
    const Config *c = r->a->c;
    char path[1100], err[512];
    double *x[3], budget = opt_int(r->o, "budget") ? opt_int(r->o, "budget") : 128, window = opt_given(r->o, "obs-window") ? opt_int(r->o, "obs-window") : 16;
    picture_begin(r, "heads", "Which heads find facts, and the budget that earns them (DiliLazyKV)",
                  "Each cell is one attention head: how strongly it looked at a fact hidden in a long text, measured once per model with --calibrate. "
                  "Bright heads find facts; DiliLazyKV gives them more rows (last map) and takes them from the dark ones.");
    scores_path(r, path);
    for (int i = 0; i < 3; i++) x[i] = scores_load(path, kind[i], c->L, c->H, err);
    if (!x[2]) picture_note(r, "No head scores: %s", err);
    else {
        int n = c->L * c->H, base = budget > window ? (int)(budget - window) : (int)budget, *cap = xmalloc((size_t)n * sizeof *cap);
        double *rows = xmalloc((size_t)n * sizeof *rows);
        dililazy_caps(x[2], c->L, c->H, base, opt_real(r->o, "dililazy-beta"), opt_real(r->o, "dililazy-eps"), ALLOC_PAPER, cap);
        for (int i = 0; i < n; i++) rows[i] = cap[i];
        fprintf(r->f, "<div class=\"row\">\n");
        for (int i = 0; i < 3; i++) if (x[i]) head_grid(r, title[i], x[i], 0);
        head_grid(r, "Rows each head may read beside the recent ones", rows, 1);
        fprintf(r->f, "</div>\n");
        picture_note(r, "%d rows a head on average, before the last %g that every head keeps; beta %g.", base, window, opt_real(r->o, "dililazy-beta"));
        free(cap); free(rows);
    }
    for (int i = 0; i < 3; i++) free(x[i]);
    picture_end(r);
}

// ---- 5: PATS
static Series pats_line(Report *r, const char *name, int colour, const Pats *x, int T) {     // b(t,T) of every token, as a step line
    Series s = { name, colour, NULL };
    Pats y = *x;
    y.T1 = y.n1 = T;                                     // frozen: a first prefill of T tokens
    for (int t = 0, b = -1; t <= T; t++) {
        int next = t < T ? pats_bits(&y, t, T) : b;
        if (next == b && t < T) continue;
        Spot p = { .x = t, .y = b };
        if (b >= 0) arrput(s.spot, p);
        p.y = b = next;
        if (t < T) arrput(s.spot, p);
        csv_row(r, "pats", name, "tokens, position, bits cut", T, p.x, b, 0, 0);
    }
    return s;
}
static void pats_chart(Report *r, Series *s, const char *title) {
    Axes ax = { .x_name = "position t of the token (0: oldest)", .y_name = "b(t,T): low bits cut from each element", .y_top = 11 };
    fprintf(r->f, "<div><h3>");
    html_text(r->f, title);
    fprintf(r->f, "</h3>\n");
    chart(r->f, &ax, s, (int)arrlen(s), NULL);
    legend_lines(r->f, s, (int)arrlen(s), 0);
    fprintf(r->f, "</div>\n");
    series_free(s);
}
static void pats_schedules(Report *r, const Pats *x) {
    static const char *kind[] = { "middle", "old", "new" }, *name[] = { "T = 256 tokens", "T = 512", "T = 1,024" };
    static const int T[] = { 256, 512, 1024 };
    Series *s = NULL;
    fprintf(r->f, "<div class=\"row\">\n");
    for (int i = 0; i < 3; i++) arrput(s, pats_line(r, name[i], i + 1, x, T[i]));
    pats_chart(r, s, "The chosen schedule as the dialogue grows");
    s = NULL;
    for (int i = 0; i < 3; i++) {
        Pats y = *x;
        y.schedule = i; y.policy = PATS_RATCHET;
        arrput(s, pats_line(r, kind[i], i + 1, &y, 1024));
    }
    pats_chart(r, s, "The three schedules at 1,024 tokens");
    fprintf(r->f, "</div>\n");
}
// One key row, element by element (columns) and bit by bit (sign on top); bits of a kind and value that stand together are one rect.
static void pats_row_bits(Report *r, const uint16_t *h, int D, int b) {
    int cell = D <= 64 ? 16 : 8, tall = 9;
    fprintf(r->f, "<svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", 80 + D * cell, 16 * tall + 18, 80 + D * cell, 16 * tall + 18);
    fprintf(r->f, "<text x=\"70\" y=\"9\" text-anchor=\"end\">sign</text><text x=\"70\" y=\"%d\" text-anchor=\"end\">exponent</text>"
            "<text x=\"70\" y=\"%d\" text-anchor=\"end\">mantissa</text>\n", 4 * tall, 10 * tall);
    for (int d = 0; d < D; d++)
        for (int i = 0, n; i < 16; i += n) {
            int kind = i == 0 ? 0 : i < 6 ? 1 : i < 16 - b ? 2 : 3, on = h[d] >> (15 - i) & 1, end = i == 0 ? 1 : i < 6 ? 6 : i < 16 - b ? 16 - b : 16;
            for (n = 1; i + n < end && (h[d] >> (15 - i - n) & 1) == on; n++) { }
            fprintf(r->f, "<rect class=\"b%d%s\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>", kind, on ? "" : " off", 76 + d * cell, i * tall, cell - 1, n * tall - 1);
        }
    fprintf(r->f, "\n<text class=\"dim\" x=\"76\" y=\"%d\">elements 0 to %d of one key row; %d bits cut</text></svg>\n", 16 * tall + 14, D - 1, b);
    legend_begin(r->f);
    legend_box(r->f, "b0", "sign");
    legend_box(r->f, "b1", "exponent");
    legend_box(r->f, "b2", "mantissa, kept");
    legend_box(r->f, "b3", "mantissa, cut: not stored");
    fprintf(r->f, "<li>full colour: bit 1, pale: bit 0</li>\n");
    legend_end(r->f);
}
// How many bytes a row takes as more bits are cut, in blocks of 64 bytes: packed densely (ours), or each row in blocks of its own (the paper's)
static void pats_row_blocks(Report *r, int D) {
    int wide = (int)pats_row_bytes(1, D, 16), scale = wide <= 128 ? 4 : wide <= 256 ? 2 : 1, y = 0;
    fprintf(r->f, "<svg viewBox=\"0 0 %d 250\" width=\"%d\" height=\"250\" role=\"img\">\n", 330 + wide * scale, 330 + wide * scale);
    for (int b = 0; b <= 10; b += 2)
        for (int rows64 = 0; rows64 < 2; rows64++, y += 17) {
            int bytes = (int)pats_row_bytes(rows64, D, 16 - b), used = D * (16 - b) / 8;
            fprintf(r->f, "<text x=\"180\" y=\"%d\" text-anchor=\"end\">%d bits cut, %s</text><rect class=\"b2\" x=\"188\" y=\"%d\" width=\"%d\" height=\"13\"/>", y + 11, b,
                    rows64 ? "64-byte blocks" : "dense", y, used * scale);
            if (bytes > used) fprintf(r->f, "<rect class=\"b4\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"13\"/>", 188 + used * scale, y, (bytes - used) * scale);
            fprintf(r->f, "<text x=\"%d\" y=\"%d\">%d bytes</text>\n", 194 + (bytes > used ? bytes : used) * scale, y + 11, bytes);
            csv_row(r, "pats", rows64 ? "64-byte blocks" : "dense", "bits cut, elements, bytes of a row", b, D, bytes, 0, 0);
        }
    for (int x = 0; x <= wide; x += 64) fprintf(r->f, "<path class=\"grid\" d=\"M%d 0V206\"/><text class=\"dim\" x=\"%d\" y=\"222\" text-anchor=\"middle\">%d</text>", 188 + x * scale, 188 + x * scale, x);
    fprintf(r->f, "<text class=\"dim\" x=\"188\" y=\"240\">bytes of one row; lines every 64</text></svg>\n");
    legend_begin(r->f);
    legend_box(r->f, "b2", "bits of the row");
    legend_box(r->f, "b4", "padding of the last block: nothing saved");
    legend_end(r->f);
}
static void draw_pats(Report *r) {
    char err[512];
    Session *s = session_try(r->a->c, r->a->w, r->o, "pats", err), *full = NULL;
    picture_begin(r, "pats", "Fewer bits for some tokens (PATS)",
                  "PATS keeps every token but cuts low mantissa bits of 16-bit numbers, by the token's place in the dialogue: the curves say how many. "
                  "Below: one key row of this model with its bits, and how many bytes such a row takes.");
    if (!s) picture_note(r, "PATS does not fit this model or these options: %s", err);
    else {
        const Pats *x = s->part[0].ms;
        int D = r->a->c->D, at = s->n_tok, n = 0, b = pats_bits(x, 128, 256);
        float *row = xmalloc((size_t)D * sizeof *row);
        uint16_t *h = xmalloc((size_t)D * sizeof *h);
        pats_schedules(r, x);
        full = session_open(r->a->c, r->a->w, r->o, "full");
        n = (int)arrlen(r->script[0].pre);
        prefill(full, r->script[0].pre, n);
        at = n / 2;
        kv_load_k(full, kv_head(full, r->a->c->L / 2, 0), NULL, at, 1, row);
        from_f32(h, row, DT_F16, (size_t)D);
        fprintf(r->f, "<h3>One key row: token %d, layer %d, KV head 0</h3>\n<div class=\"wide\">", at, r->a->c->L / 2);
        pats_row_bits(r, h, D, b);
        fprintf(r->f, "</div>\n<h3>Bytes of a row</h3>\n<div class=\"wide\">");
        pats_row_blocks(r, D);
        fprintf(r->f, "</div>\n");
        picture_note(r, "Schedule %s, %d to %d bits; the first %d tokens lose %d bits only, the last %d none.", opt_str(r->o, "pats-schedule"), x->b_min, x->b_max, x->sink, x->b_min, x->window);
        free(row); free(h);
        session_close(full);
    }
    session_close(s);
    picture_end(r);
}

// ---- 6: the tree of LycheeCluster
typedef struct { float *q; } QueryProbe;                 // (L,H,D): the queries of the last decode step
static void query_probe_select(Session *s, void *ms, int l, const float *q) {
    size_t n = (size_t)s->c->H * s->c->D;
    memcpy(((QueryProbe *)ms)->q + (size_t)l * n, q, n * sizeof *q);
}
static const Method query_probe = { .name = "probe", .state = sizeof(QueryProbe), .select = query_probe_select };   // rides on lychee; not in the table

typedef struct {                // what the tree is drawn from: one layer and KV head
    const Session *s; const Lychee *x; const Tree *t;
    Probe p;
    unsigned char *read;        // (n_tok) 1: a row the step read
    float lo, hi;               // the bounds of its nodes
    float *mu;                  // (D) room
} TreeView;

static float node_match(TreeView *v, const Nodes *u, int node) {         // best over the query heads of q.mu / |q|
    float best = -INFINITY;
    int D = v->s->c->D;
    to_f32(v->mu, u->mu + (size_t)node * D, DT_BF16, (size_t)D);
    for (int i = 0; i < v->p.m; i++) best = fmaxf(best, dot_f32(v->p.q + (size_t)i * D, v->mu, D) * v->p.w[i]);
    return best;
}
static int cluster_read(const TreeView *v, int c) {      // chunks of the cluster the step read
    int n = 0;
    for (int j = v->t->fine.first[c]; j >= 0; j = v->t->fine.next[j]) n += v->read[v->x->start[j]];
    return n;
}
static int cluster_answers(const Report *r, const TreeView *v, int c) {  // does one of its chunks hold the answer?
    const int *start = v->x->start;
    int from, to, found = 0;
    for (int j = v->t->fine.first[c]; j >= 0 && !found; j = v->t->fine.next[j]) {
        answer_at(r, v->s->tok + start[j], start[j + 1] - start[j], &from, &to);
        found = from < to;
    }
    return found;
}
static void node_line(Report *r, TreeView *v, const Nodes *u, int node, const char *what, int n_read, int answers) {
    float match = node_match(v, u, node), bound = match + u->r[node];
    int shade = v->hi > v->lo ? (int)((bound - v->lo) / (v->hi - v->lo) * (SHADES - 1) + .5f) : 0;
    fprintf(r->f, "<details%s><summary class=\"%s\"><i class=\"v%d\"></i>%s %d: %d chunk%s, %d read; bound %.2f = match %.2f + radius %.2f%s</summary>\n", n_read || answers ? " open=\"open\"" : "",
            n_read ? "read" : "skip", shade, what, node, u->chunks[node], u->chunks[node] == 1 ? "" : "s", n_read, bound, match, u->r[node], answers ? " <b class=\"gold\">the answer is in here</b>" : "");
    csv_row(r, "lychee", what, "node, chunks read, upper bound, radius, match", node, n_read, bound, u->r[node], match);
}
static void tokens_text(Report *r, const Token *t, int n) {      // the tokens' bytes as one text
    char *text = NULL;
    int len;
    for (int i = 0; i < n; i++) {
        const char *b = t[i].id >= 0 ? tokenizer_bytes(r->a->tok, t[i].id, &len) : NULL;
        if (b) memcpy(arraddnptr(text, len), b, (size_t)len);
    }
    if (text) html_bytes(r->f, text, arrlenu(text));
    arrfree(text);
}
static void tree_cluster(Report *r, TreeView *v, int c) {
    const int *start = v->x->start;
    node_line(r, v, &v->t->fine, c, "cluster", cluster_read(v, c), cluster_answers(r, v, c));
    for (int j = v->t->fine.first[c]; j >= 0; j = v->t->fine.next[j]) {
        int from, to, n = start[j + 1] - start[j];
        answer_at(r, v->s->tok + start[j], n, &from, &to);
        fprintf(r->f, "<p class=\"%s\">%s, tokens %d to %d: <span%s>", v->read[start[j]] ? "read" : "skip", v->read[start[j]] ? "read" : "skipped", start[j], start[j + 1] - 1,
                from < to ? " class=\"gold\"" : "");
        tokens_text(r, v->s->tok + start[j], n);
        fprintf(r->f, "</span></p>\n");
    }
    fprintf(r->f, "</details>\n");
}
static int *by_bound(TreeView *v, const Nodes *u, int first, const int *next) {  // children in order of their bound, best first; stb array
    int *order = NULL;
    for (int i = first; i >= 0; i = next ? next[i] : i + 1 < u->n ? i + 1 : -1) if (u->chunks[i]) arrput(order, i);
    for (int i = 1; i < (int)arrlen(order); i++)         // few: insertion
        for (int j = i; j > 0 && node_match(v, u, order[j]) + u->r[order[j]] > node_match(v, u, order[j - 1]) + u->r[order[j - 1]]; j--) {
            int x = order[j]; order[j] = order[j - 1]; order[j - 1] = x;
        }
    return order;
}
static void tree_clusters(Report *r, TreeView *v, int first, const int *next) {
    int *order = by_bound(v, &v->t->fine, first, next);
    for (int i = 0; i < (int)arrlen(order); i++) tree_cluster(r, v, order[i]);
    arrfree(order);
}
static void tree_draw(Report *r, TreeView *v) {
    const Nodes *top = &v->t->coarse;
    fprintf(r->f, "<div class=\"tree\">\n");
    if (!top->n) tree_clusters(r, v, 0, NULL);
    else {
        int *order = by_bound(v, top, 0, NULL);
        for (int i = 0; i < (int)arrlen(order); i++) {
            int n = 0, answers = 0;
            for (int c = top->first[order[i]]; c >= 0; c = top->next[c]) { n += cluster_read(v, c); answers |= cluster_answers(r, v, c); }
            node_line(r, v, top, order[i], "unit", n, answers);
            tree_clusters(r, v, top->first[order[i]], top->next);
            fprintf(r->f, "</details>\n");
        }
        arrfree(order);
    }
    fprintf(r->f, "</div>\n");
}
static void tree_legend(Report *r, const TreeView *v) {
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        char text[32], class[8];
        snprintf(text, sizeof text, "%s%.2f", i ? "" : "upper bound ", v->lo + (v->hi - v->lo) * i / (SHADES - 1));
        snprintf(class, sizeof class, "v%d", i);
        legend_box(r->f, class, text);
    }
    legend_end(r->f);
}
static void tree_range(TreeView *v) {                    // of all bounds, for the colours
    v->lo = INFINITY; v->hi = -INFINITY;
    for (int level = 0; level < 2; level++) {
        const Nodes *u = level ? &v->t->coarse : &v->t->fine;
        for (int i = 0; i < u->n; i++) {
            float bound = u->chunks[i] ? node_match(v, u, i) + u->r[i] : NAN;
            v->lo = fminf(v->lo, bound); v->hi = fmaxf(v->hi, bound);        // a NaN is passed over
        }
    }
}
// The head to look at: of the indexed layers the query head with the best score, or the last layer's first when there are no scores.
static int fact_head(const Report *r, int first) {
    const Config *c = r->a->c;
    char path[1100], err[512];
    scores_path(r, path);
    double *inf = scores_load(path, "inf", c->L, c->H, err);
    int best = (c->L - 1) * c->H;
    for (int i = first * c->H; inf && i < c->L * c->H; i++) if (inf[i] > inf[best]) best = i;
    free(inf);
    return best;
}
static void lychee_picture(Report *r, Session *s, const float *q) {      // q (L,H,D)
    const Lychee *x = s->part[0].ms;
    int H = s->c->H, R = H / s->c->G, D = s->c->D, at = fact_head(r, x->full_layers), l = at / H, g = at % H / R, *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    TreeView v = { .s = s, .x = x, .t = &x->tree[l * s->c->G + g], .read = xcalloc((size_t)s->n_tok + 1, 1), .mu = xmalloc((size_t)D * sizeof(float)) };
    probe_max(&v.p, q + ((size_t)l * H + g * R) * D, R, D);
    int n = view_rows(s, l, g * R, rows), used = 0;
    for (int i = 0; i < n; i++) v.read[rows[i]] = 1;
    for (int j = 0; j < x->M; j++) used += v.read[x->start[j]];
    if (!x->M_built || l < x->full_layers) picture_note(r, "No index was built: the dialogue fits into the budget, or --lychee-full-layers covers every layer.");
    else {
        tree_range(&v);
        fprintf(r->f, "<p>The user asks <b>");
        html_text(r->f, demo_turns[DEMO_TURNS - 1]);
        fprintf(r->f, "</b> and the reply has reached <b>");
        tokens_text(r, s->tok + s->n_tok - s->step, s->step);
        fprintf(r->f, "</b>\xe2\x80\xa6 Layer %d, KV head %d (the head that finds facts best) reads %d of %d chunks to go on.</p>\n", l, g, used, x->M);
        tree_draw(r, &v);
        tree_legend(r, &v);
        picture_note(r, "Match: q.mu / |q| of the best query head with the node's centre mu (1: the same direction); radius: how far the key of a chunk below lies from mu at most. "
                     "The choice goes by match + %g radius (--lychee-beta). "
                     "The first %d tokens and the last %d are outside the tree and always read. The chunk with the answer is underlined.", x->beta, x->sink, s->n_tok - t_idx(x));
    }
    free(rows); free(v.read); free(v.mu);
}
static int tokens_before_answer(const Report *r) {       // of full attention's last reply; all of them if the answer is not in it
    const int *id = r->script[DEMO_TURNS - 1].dec;
    Token *t = NULL;
    int from, to;
    for (int i = 0; i < (int)arrlen(id); i++) { Token one = { .id = id[i] }; arrput(t, one); }
    answer_at(r, t, (int)arrlen(t), &from, &to);
    arrfree(t);
    return from;
}
static void draw_lychee(Report *r) {
    char err[512];
    Session *s = session_try(r->a->c, r->a->w, r->o, "lychee", err);
    picture_begin(r, "lychee", "The tree a question walks down (LycheeCluster)",
                  "The text is cut into chunks, alike chunks form clusters, alike clusters form units. For each new token only the chunks of the best matching clusters are read: "
                  "bold branches were read, grey ones skipped. The square's colour is the upper bound of how well anything below can match (brighter: better). Click to open a branch.");
    if (!s) picture_note(r, "LycheeCluster does not fit these options: %s", err);
    else {
        DemoRun d = { 0 };
        QueryProbe *probe = xcalloc(1, sizeof *probe);
        float *q = probe->q = xcalloc((size_t)s->c->L * s->c->H * s->c->D, sizeof(float));
        s->part[s->n_part++] = (Part){ &query_probe, probe };
        demo_play(r, s, &d, tokens_before_answer(r));
        lychee_picture(r, s, q);
        session_close(s);
        free(q);
    }
    picture_end(r);
}

// ---- 7: attention maps with LoopServe's lines
typedef struct { Report *r; LoopServe *x; } MapProbe;    // the whole dialogue is prefilled as one turn; maps are written layer by layer

static int map_shade(float p) {                          // logarithmic: 1e-4 and below 0, 1 the top
    float v = p > 1e-4f ? (log10f(p) + 4) / 4 * (SHADES - 1) + .5f : 0;
    return v > SHADES - 1 ? SHADES - 1 : (int)v;
}
// All layers and heads of a small model; of a large one some from all over.
static int map_step(int n) { int most = 1; while (most * most < MAP_MOST) most++; return (n + most - 1) / most; }

static void map_pixels(Session *s, int l, int h, const float *q, int T, int side, Tile *tile, unsigned char *pixel) {   // pixel (side,side)
    float *P = scratch(s, (size_t)LINE_BLOCK * T * sizeof(float));
    int R[LINE_BLOCK];
    memset(pixel, 0, (size_t)side * side);
    for (int r0 = 0; r0 < T; r0 += LINE_BLOCK) {
        int m = T - r0 < LINE_BLOCK ? T - r0 : LINE_BLOCK;
        for (int i = 0; i < m; i++) R[i] = r0 + i;
        line_probs(s, l, h, q, T, R, m, P, tile);
        for (int i = 0; i < m; i++)
            for (int c = 0; c <= r0 + i; c++) {          // the largest of what falls on a pixel
                unsigned char *to = &pixel[(size_t)((int64_t)(r0 + i) * side / T) * side + (size_t)((int64_t)c * side / T)];
                int v = map_shade(P[(size_t)i * T + c]);
                if (v > *to) *to = (unsigned char)v;
            }
    }
}
static void map_lines(Report *r, const Lines *a, LineRange *run) {       // neighbours as one shape; pale if in the end the head is read whole. run (n) is room
    int n = a->n, k = bit_runs(a->v, n, run);
    fprintf(r->f, "<path class=\"line%s\" d=\"", a->dense ? " whole" : "");
    for (int i = 0; i < k; i++) fprintf(r->f, "M%d %dV%dH%dV%dz", run[i].lo, run[i].lo, n, run[i].hi, run[i].hi);
    k = bit_runs(a->s, n, run);
    for (int i = 0; i < k; i++) fprintf(r->f, "M0 %dV%dL%d %dH%dz", run[i].lo, run[i].hi, n - run[i].hi, n, n - run[i].lo);
    fprintf(r->f, "\"/>");
}
static void map_figure(Report *r, Session *s, const LoopServe *x, int l, int h, const float *q, int T, LoopRoom *w, Tile *tile) {
    int side = T < MAP_SIDE ? T : MAP_SIDE;
    unsigned char *pixel = scratch(s, (size_t)side * side), *png;
    Lines a = { .n = T, .v = scratch(s, bit_bytes(T)), .s = scratch(s, bit_bytes(T)) };
    LoopFound found = { 1, 1 };
    LineSample p = { 0, T, 0, w->R, w->P };
    p.m = sample_rows(T, x->m, x->seed, 0, l, w->R);
    lines_clear(&a);
    line_probs(s, l, h, q, T, w->R, p.m, w->P, tile);
    if (x->rule.alpha >= 1) a.dense = 1; else loop_choose(x, &p, &a, w, &found);
    map_pixels(s, l, h, q, T, side, tile, pixel);
    png = png_make(pixel, side, side);
    fprintf(r->f, "<figure data-l=\"%d\" data-h=\"%d\"%s><svg viewBox=\"0 0 %d %d\" role=\"img\"><image width=\"%d\" height=\"%d\" preserveAspectRatio=\"none\" href=\"data:image/png;base64,",
            l / map_step(s->c->L), h / map_step(s->c->H), a.dense ? "" : " data-lines=\"1\"", T, T, T, T);
    base64_write(r->f, png, arrlenu(png));
    fprintf(r->f, "\"/><path class=\"void\" d=\"M0 0H%dV%dz\"/>", T, T);
    map_lines(r, &a, w->run);
    fprintf(r->f, "</svg><figcaption>layer %d, head %d: ", l, h);
    fprintf(r->f, "%s%d columns and %d diagonals, %.0f %% of the cells, hold %.1f %% of the attention", a.dense ? "read whole, for " : "", bit_list(a.v, T, NULL), bit_list(a.s, T, NULL),
            100 * found.cells, 100 * found.mass);
    fprintf(r->f, "</figcaption></figure>\n");
    csv_row(r, "attention", a.dense ? "dense" : "lines", "layer, head, share of cells, share of attention, verticals", l, h, found.cells, found.mass, bit_list(a.v, T, NULL));
    arrfree(png);
}
static void map_probe_commit(Session *s, void *ms, int l, const float *q, int T) {
    MapProbe *m = ms;
    if (l == s->c->L || l % map_step(s->c->L)) return;
    size_t mark = scratch_mark(s);
    Tile *tile = tiles_new(s);
    LoopRoom *w = loop_rooms(s, m->x->m, T);
    for (int h = 0; h < s->c->H; h += map_step(s->c->H)) {
        size_t inner = scratch_mark(s);
        map_figure(m->r, s, m->x, l, h, q, T, w, tile);
        scratch_reset(s, inner);
    }
    scratch_reset(s, mark);
}
static const Method map_probe = { .name = "maps", .state = sizeof(MapProbe), .commit = map_probe_commit };   // rides on full; not in the table

static void draw_attention(Report *r) {
    const Config *c = r->a->c;
    int *ids = NULL, nl = (c->L - 1) / map_step(c->L), nh = (c->H - 1) / map_step(c->H);
    LoopServe x = { 0 };
    MapProbe *probe = xcalloc(1, sizeof *probe);
    Session *s = session_open(c, r->a->w, r->o, "full");
    picture_begin(r, "attention", "Where heads look, and the lines LoopServe keeps",
                  "One square per head: each row is a token that reads, each column a token that is read, bright where much attention goes. Red columns (single tokens everyone reads) and "
                  "diagonals (a fixed distance back) are the lines LoopServe would compute in this prefill; all else is skipped. "
                  "Where few lines do not hold enough (orange, dashed), the head is read whole.");
    fprintf(r->f, "<input type=\"checkbox\" id=\"lines\" checked=\"checked\"/><label for=\"lines\"> show LoopServe's lines</label>\n"
            "<div class=\"sliders\"><label>layer <input type=\"range\" id=\"map-l\" min=\"0\" max=\"%d\" value=\"%d\" data-step=\"%d\"/> <output>0</output></label>"
            "<label>head <input type=\"range\" id=\"map-h\" min=\"0\" max=\"%d\" value=\"0\" data-step=\"%d\"/> <output>0</output></label></div>\n<div class=\"maps\" id=\"maps\">\n",
            nl, nl / 2, map_step(c->L), nh, map_step(c->H));
    if (loop_rule(s, &x)) die(EXIT_USAGE, "--report: %s", s->err);
    *probe = (MapProbe){ r, &x };
    s->part[s->n_part++] = (Part){ &map_probe, probe };
    for (int i = 0; i < DEMO_TURNS; i++) {
        ids = ids_put(ids, r->script[i].pre, (int)arrlen(r->script[i].pre));
        ids = ids_put(ids, r->script[i].dec, (int)arrlen(r->script[i].dec));
    }
    prefill(s, ids, (int)arrlen(ids));
    fprintf(r->f, "</div>\n");
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        char text[48], class[8];
        snprintf(text, sizeof text, i ? "%.2g" : "at most %.2g of a row's attention", pow(10, 4.0 * i / (SHADES - 1) - 4));
        snprintf(class, sizeof class, "v%d", i);
        legend_box(r->f, class, text);
    }
    legend_end(r->f);
    picture_note(r, "%d tokens, one prefill; alpha %g. Where a pixel covers several cells it shows the largest. Logarithmic colours.", (int)arrlen(ids), x.rule.alpha);
    picture_end(r);
    arrfree(ids);
    session_close(s);
}

// ---- 8: the text, coloured by what is kept
static int text_shade(float share) { return share <= 0 ? 0 : (int)fminf(TEXT_SHADES, 1 + share * (TEXT_SHADES - .5f)); }
static void kept_text(Report *r, const DemoRun *d) {
    char *run = NULL;
    int len, n = (int)arrlen(d->tok), shade = -1, from, to;      // shade: of the run, doubled; odd: the answer
    answer_at(r, d->tok, n, &from, &to);
    fprintf(r->f, "<div class=\"tokens\">");
    for (int i = 0; i <= n; i++) {                       // tokens of one shade are one span, so that characters split over tokens stay whole
        int next = i < n ? 2 * text_shade(d->share[i]) + (i >= from && i < to) : -1;
        if (next != shade && arrlen(run)) {
            fprintf(r->f, "<%s class=\"k%d\">", shade & 1 ? "b" : "span", shade / 2);
            html_bytes(r->f, run, arrlenu(run));
            fprintf(r->f, shade & 1 ? "</b>" : "</span>");
            arrsetlen(run, 0);
        }
        shade = next;
        if (i == n) break;
        const char *b = "\xe2\x97\x86";                  // a method's own token: a diamond
        len = 3;
        if (d->tok[i].id >= 0) b = tokenizer_bytes(r->a->tok, d->tok[i].id, &len);
        if (len) memcpy(arraddnptr(run, len), b, (size_t)len);
        csv_row(r, "text", d->name, "token, id, share of heads", i, d->tok[i].id, d->share[i], 0, 0);
    }
    fprintf(r->f, "</div>\n");
    arrfree(run);
}
static void draw_text(Report *r, const DemoRun *d) {
    int drawn = 0;
    picture_begin(r, "text", "What is still there when the last question is answered",
                  "The whole dialogue as each method sees it at its last step. The stronger the colour, the more heads read that word; grey words are read by no head. "
                  "Look at the answer, underlined: where it is grey the method cannot know it, where it is coloured it may.");
    legend_begin(r->f);
    fprintf(r->f, "<li><span class=\"tokens\"><span class=\"k0\"> grey </span></span> no head</li><li><span class=\"k1\"> word </span> few heads</li>"
            "<li><span class=\"k4\"> word </span> half</li><li><span class=\"k8\"> word </span> all heads</li>"
            "<li>\xe2\x97\x86 a row the method made itself, to stand for a whole message (SONIC)</li>\n");
    legend_end(r->f);
    for (int i = 0; i < (int)arrlen(d); i++) {
        float least = 1;
        double sum = 0;
        for (int j = 0; j < (int)arrlen(d[i].share); j++) { least = fminf(least, d[i].share[j]); sum += d[i].share[j]; }
        if (*d[i].why || least > .999f) continue;
        fprintf(r->f, "%s<div><h3>", drawn++ ? "" : "<div class=\"side\">\n");
        html_text(r->f, d[i].name);
        fprintf(r->f, ": reads %.0f %% of %d tokens; answers <span class=\"%s\">", 100 * sum / fmax(1, (double)arrlen(d[i].share)), (int)arrlen(d[i].share), right_answer(&d[i]) ? "ok" : "bad");
        html_text(r->f, d[i].said ? d[i].said : "");
        fprintf(r->f, "</span></h3>\n");
        kept_text(r, &d[i]);
        fprintf(r->f, "</div>\n");
    }
    if (drawn) fprintf(r->f, "</div>\n");
    else picture_note(r, "Every method shown here reads every token in every head.");
    picture_end(r);
}

// ---- 9: where time goes
static void time_bars(Report *r, const DemoRun *d, int phase) {
    double top = 0;
    int y = 0, n = 0;
    for (int i = 0; i < (int)arrlen(d); i++) {
        double sum = 0;
        for (int k = 0; k < PHASE_PARTS; k++) sum += d[i].seconds[phase][k];
        if (d[i].tokens[phase]) { top = fmax(top, 1e3 * sum / (double)d[i].tokens[phase]); n++; }
    }
    fprintf(r->f, "<div><h3>%s</h3><svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", phase ? "Decode: one new token" : "Prefill: one token of the prompt",
            CHART_W, 24 * n + 8, CHART_W, 24 * n + 8);
    for (int i = 0; i < (int)arrlen(d); i++) {
        static const char *class[] = { "b1", "s2 s", "s5 s", "b3" }, *part[] = { "attention", "choosing rows", "bookkeeping", "the rest of the model" };
        double x = 130, sum = 0;
        if (!d[i].tokens[phase]) continue;
        fprintf(r->f, "<text x=\"122\" y=\"%d\" text-anchor=\"end\">%.18s</text>", y + 16, d[i].name);
        for (int k = 0; k < PHASE_PARTS; k++) {
            double ms = 1e3 * d[i].seconds[phase][k] / (double)d[i].tokens[phase], w = top > 0 ? ms / top * (CHART_W - 220) : 0;
            fprintf(r->f, "<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"17\"><title>%s: %.4f ms</title></rect>", class[k], x, y + 3, w, part[k], ms);
            csv_row(r, "time", d[i].name, part[k], phase, k, ms, 0, 0);
            x += w; sum += ms;
        }
        fprintf(r->f, "<text x=\"%.1f\" y=\"%d\">%.3f ms</text>\n", x + 6, y + 16, sum);
        y += 24;
    }
    fprintf(r->f, "</svg></div>\n");
}
static void draw_time(Report *r, const DemoRun *d) {
    picture_begin(r, "time", "Where the time goes",
                  "Milliseconds for one token of the built-in dialogue, on this machine. On a small model and a short text the rest of the model dominates; attention and what a method adds "
                  "to it grow with the length of the text. Compare shares, not machines; --bench measures speed properly.");
    fprintf(r->f, "<div class=\"row\">\n");
    for (int phase = 0; phase < 2; phase++) time_bars(r, d, phase);
    fprintf(r->f, "</div>\n");
    legend_begin(r->f);
    legend_box(r->f, "b1", "attention (in a prefill also LoopServe's choice of lines)");
    legend_box(r->f, "s2 s", "choosing the rows to read");
    legend_box(r->f, "s5 s", "bookkeeping: indexing, packing, dropping rows");
    legend_box(r->f, "b3", "the rest of the model");
    legend_end(r->f);
    picture_end(r);
}

// ---- the whole
static FILE *report_file(const char *path, const char *mode) {
    FILE *f = fopen(path, mode);
    if (!f) die(EXIT_RUN, "--report %.900s: cannot be written: %s", path, strerror(errno));
    return f;
}
static char *csv_path(const char *path) {                // NAME.html -> NAME.csv; malloc'd
    size_t n = strlen(path);
    char *csv = xmalloc(n + 5);
    if (n > 5 && !strcmp(path + n - 5, ".html")) n -= 5;
    else if (n > 4 && !strcmp(path + n - 4, ".htm")) n -= 4;
    snprintf(csv, n + 5, "%.*s.csv", (int)n, path);
    return csv;
}
static void report_check(const char *path) {             // before any work is done: can it be written?
    char *csv = csv_path(path);
    fclose(report_file(path, "ab"));
    fclose(report_file(csv, "ab"));
    free(csv);
}
static void source_put(Report *r, const char *s) { memcpy(arraddnptr(r->source, strlen(s)), s, strlen(s)); }
static void report_source(Report *r) {                   // the command line as a shell would take it, model, seed
    char text[160];
    for (int i = 0; i < arg_count; i++) {
        int plain = *args[i] && !args[i][strcspn(args[i], " \t\n\"'\\$&|;<>()*?`!#~")];
        if (i) arrput(r->source, ' ');
        if (plain) { source_put(r, args[i]); continue; }
        arrput(r->source, '\'');
        for (const char *p = args[i]; *p; p++) { if (*p == '\'') source_put(r, "'\\''"); else arrput(r->source, *p); }
        arrput(r->source, '\'');
    }
    source_put(r, " | model ");
    source_put(r, r->a->c->dir);
    snprintf(text, sizeof text, " (%d layers, %d heads, %d KV heads of %d) | greedy, --seed %d, --eval-seed %d | kvcomp %s", r->a->c->L, r->a->c->H, r->a->c->G, r->a->c->D, opt_int(r->a->o, "seed"), opt_int(r->a->o, "eval-seed"), KVCOMP_VERSION);
    source_put(r, text);
    arrput(r->source, 0);
}
static Options *demo_options(const App *a) {
    Options *o = options_copy(a->o);
    char err[256], budget[160] = "";
    for (size_t i = 0; i < sizeof demo_values / sizeof *demo_values; i++) if (!opt_given(o, demo_values[i][0])) options_set(o, demo_values[i][0], demo_values[i][1], err);
    list_word(*opt_str(o, "budgets") ? opt_str(o, "budgets") : opt_str(o, "budget"), 0, budget);
    if (atoi(budget) > DEMO_MOST) snprintf(budget, sizeof budget, "%d", DEMO_MOST);     // the dialogue has about 450 tokens
    if (atoi(budget) <= 0) snprintf(budget, sizeof budget, "%d", DEMO_BUDGET);
    if (!opt_given(o, "ratio")) options_set(o, "budget", budget, err);
    options_set(o, "temp", "0", err);
    return o;
}
static void report_head(Report *r) {
    static const char *parts[][2] = { { "pareto", "quality and bytes" }, { "needle", "needles" }, { "memory", "memory" }, { "heads", "heads" }, { "pats", "bits" }, { "lychee", "tree" },
                                      { "attention", "attention" }, { "text", "kept text" }, { "time", "time" } };
    fprintf(r->f, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
            "<title>kvcomp report</title>\n<style>\n%s", report_style);
    report_shades(r->f);
    fprintf(r->f, "</style>\n</head>\n<body>\n<h1>kvcomp: what KV-cache compression keeps, and what it costs</h1>\n"
            "<p class=\"how\">A language model remembers a conversation as rows of numbers: two (key and value) for every token, in every layer and KV head. Together they are the KV cache, and it grows "
            "with every word. The methods on this page make it smaller or read less of it: some drop rows, some keep all but read few, some store fewer bits.</p>\n<nav>");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) fprintf(r->f, "<a href=\"#%s\">%zu %s</a> ", parts[i][0], i + 1, parts[i][1]);
    fprintf(r->f, "</nav>\n");
    fprintf(r->csv, "picture,series,what,x,y,value,lo,hi\n");
}
static void report_demo(Report *r) {                     // what pictures 3 to 9 were made from
    char budget[64];
    snprintf(budget, sizeof budget, opt_given(r->o, "ratio") ? "--ratio %s" : "--budget %s", opt_str(r->o, opt_given(r->o, "ratio") ? "ratio" : "budget"));
    fprintf(r->f, "<section>\n<p class=\"how\">The pictures below come from one short conversation, played through every method with %s. The methods get the same words; each answers the last question itself. "
            "So that methods made for long texts show themselves on a short one, these options were set unless given: ", budget);
    for (size_t i = 0; i < sizeof demo_values / sizeof *demo_values; i++) fprintf(r->f, "%s--%s %s", i ? ", " : "", demo_values[i][0], opt_str(r->o, demo_values[i][0]));
    fprintf(r->f, ".</p>\n<details><summary>The questions, and full attention's replies</summary>\n<table><tr><th>turn</th><th class=\"t\">the user says</th><th class=\"t\">full attention replies</th></tr>\n");
    for (int i = 0; i < DEMO_TURNS; i++) {
        fprintf(r->f, "<tr><td>%d</td><td class=\"t\">", i + 1);
        html_text(r->f, demo_turns[i]);
        fprintf(r->f, "</td><td class=\"t\">");
        Token t = { 0 };
        for (int j = 0; j < (int)arrlen(r->script[i].dec); j++) { t.id = r->script[i].dec[j]; tokens_text(r, &t, 1); }
        fprintf(r->f, "</td></tr>\n");
    }
    fprintf(r->f, "</table></details>\n</section>\n");
}
static void report_foot(Report *r) {
    fprintf(r->f, "<script>\n(function(){var d=document,m=d.getElementById('maps'),l=d.getElementById('map-l'),h=d.getElementById('map-h');\n"
            "d.documentElement.classList.add('js');m.classList.add('one');\n"
            "function show(){m.querySelectorAll('figure').forEach(function(f){f.classList.toggle('on',f.dataset.l==l.value?f.dataset.h==h.value:false)});\n"
            "[l,h].forEach(function(x){x.parentNode.querySelector('output').textContent=x.value*x.dataset.step})}\n"
            "l.oninput=h.oninput=show;var s=m.querySelectorAll('figure[data-lines]'),f=s[s.length-1];if(f){l.value=f.dataset.l;h.value=f.dataset.h}show()})();\n</script>\n</body>\n</html>\n");
}
// Writes the page and its numbers. rows: what --eval measured, or NULL.
static int report_write(App *a, const char *path, const Score *rows /* stb_ds */) {
    char *csv = csv_path(path);
    Report r = { .a = a, .f = report_file(path, "wb"), .csv = report_file(csv, "wb"), .o = demo_options(a) };
    report_source(&r);
    report_head(&r);
    draw_pareto(&r, rows);
    draw_needle(&r, rows);
    DemoRun *d = demo_runs(&r);
    report_demo(&r);
    draw_memory(&r, d);
    draw_heads(&r);
    draw_pats(&r);
    draw_lychee(&r);
    draw_attention(&r);
    draw_text(&r, d);
    draw_time(&r, d);
    report_foot(&r);
    int bad = ferror(r.f) | ferror(r.csv);
    bad |= fclose(r.f) | fclose(r.csv);
    if (bad) die(EXIT_RUN, "--report %.900s: writing failed (is the disk full?)", path);
    if (!quiet) fprintf(stderr, "report: %s, numbers in %s\n", path, csv);
    demo_free(d);
    while (arrlen(r.script)) turn_free(arrpop(r.script));
    arrfree(r.script); arrfree(r.source);
    options_free(r.o);
    free(csv);
    return 0;
}

// ==================================================================================================== 30 COMMAND LINE
static const struct { const char *flag, *name; } short_options[] = {
    { "-m", "model" }, { "-d", "device" }, { "-t", "threads" }, { "-c", "ctx-size" }, { "-b", "batch-size" }, { "-ctk", "ctk" }, { "-ctv", "ctv" }, { "-p", "prompt" },
    { "-f", "file" }, { "-sys", "system" }, { "-n", "n-predict" }, { "-st", "single-turn" }, { "-s", "seed" }, { "-v", "verbose" }, { "-q", "quiet" }, { "-r", "repeat" },
    { "--keep-answer-kv", "loopserve-keep-answer-kv" },
};
static const struct { const char *title, *first; } help_parts[] = {      // where a new paragraph of --help begins
    { "Model and run", "model" }, { "Prompt", "prompt" }, { "Sampling", "temp" }, { "Compression", "method" }, { "Output", "json" }, { "Measure", "eval" }, { "Other", "list-methods" },
};

static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(a), m = (int)strlen(b), row[64];
    if (m >= 63 || n >= 63) return 99;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (int i = 1; i <= n; i++)
        for (int j = 1, diagonal = row[0]++; j <= m; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    return row[m];
}
// The option whose name is nearest to a name that is none, or NULL when nothing is near.
static void nearer_option(const Opt *list, const char *name, const char **best, int *distance) {
    for (const Opt *o = list; o && o->name; o++) {
        int d = edit_distance(name, o->name);
        if (d >= *distance) continue;
        *best = o->name;
        *distance = d;
    }
}

static const char *nearest_option(const char *name) {
    const char *best = NULL;
    int distance = 3 + (int)strlen(name) / 4;           // farther away than this is no misspelling
    nearer_option(program_options, name, &best, &distance);
    EACH_METHOD(m) nearer_option((*m)->opts, name, &best, &distance);
    return best;
}

// ---- help
static const char *short_of(const char *name) {
    for (size_t i = 0; i < sizeof short_options / sizeof *short_options; i++) if (!strcmp(short_options[i].name, name)) return short_options[i].flag;
    return NULL;
}
static void help_option(const Opt *o) {
    char left[128];
    const char *flag = short_of(o->name), *arg = o->kind == 'b' ? "" : o->kind == 'i' ? " N" : o->kind == 'f' ? " F" : o->kind == 'c' ? "" : " TEXT";
    snprintf(left, sizeof left, "%s%s--%s%s%s", flag ? flag : "", flag ? " " : "", o->name, o->kind == 'c' ? "=" : arg, o->kind == 'c' ? o->def : "");
    printf("  %-38s %s", left, o->help);
    if (o->kind != 'b' && o->kind != 'c' && *o->def) printf(" [%s]", o->def);
    printf("\n");
}
static int help(void) {
    printf("kvcomp %s: chat with a Llama-style model under KV-cache compression\nusage: kvcomp [options] [DIR]\n", KVCOMP_VERSION);
    for (const Opt *o = program_options; o->name; o++) {
        for (size_t i = 0; i < sizeof help_parts / sizeof *help_parts; i++) if (!strcmp(help_parts[i].first, o->name)) printf("%s\n", help_parts[i].title);
        help_option(o);
    }
    printf("  %-38s %s\n", "--help METHOD", "a method's paper, what it keeps, its options and limits");
    printf("Each turn is rendered once and appended; templates that would rewrite history are not re-rendered.\n"
           "Examples\n  kvcomp                                    chat with the shipped model\n"
           "  kvcomp -m DIR --method=streaming --budget 512    a long chat in constant memory\n"
           "  kvcomp -m DIR -f long.txt --temp 0 -n 64 --json\n");
    return 0;
}
static int help_method(const char *name) {
    const Method *m = method_find(name, strlen(name));
    if (!m) die(EXIT_USAGE, "--help: no method is called '%s' (see --list-methods)", name);
    printf("%s: %s\n  %s\n", m->name, m->paper ? m->paper : "", m->keeps);
    printf("  %s\n", m->evicts ? "Memory is really given back." : m->role & ROLE_STORE ? "Rows take fewer bytes." : m->role & ROLE_SELECT ? "Saves reads, not memory: every row stays stored."
                     : m->role ? "Saves prefill work, not memory." : "Saves nothing: the reference.");
    if (m->limits) printf("  %s\n", m->limits);
    if (m->budget) printf("Uses --budget %d%s%s; or --ratio instead of --budget\n", m->budget, m->uses ? ", " : "", m->uses ? m->uses : "");
    if (m->opts) printf("Options (with their defaults)\n");
    for (const Opt *o = m->opts; o && o->name; o++) help_option(o);
    return 0;
}
static int list_methods(void) {
    EACH_METHOD(m) printf("%-22s %s\n", (*m)->name, (*m)->keeps);
    return 0;
}

// ---- parsing: --x=v, --x v, flags without a value, short names, one positional folder
static void parse_one(Options *o, const char *name, const char *value) {
    char err[256];
    if (!options_set(o, name, value, err)) return;
    const char *hint = !strcmp(name, "threads") && strchr(value, '.') ? "temp" : opt_find(name) ? NULL : nearest_option(name);
    if (hint) die(EXIT_USAGE, "%s (did you mean --%s?)", err, hint);
    die(EXIT_USAGE, "%s", err);
}
static void parse_args(Options *o, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        char name[64], *arg = argv[i], *eq = strchr(arg, '=');
        const char *value = NULL;
        if (arg[0] != '-' || !arg[1]) { parse_one(o, "model", arg); continue; }
        snprintf(name, sizeof name, "%.*s", eq ? (int)(eq - arg) : 63, arg);
        if (eq) value = eq + 1;
        const char *full = name[1] == '-' ? name + 2 : NULL;
        for (size_t k = 0; k < sizeof short_options / sizeof *short_options; k++) if (!strcmp(short_options[k].flag, name)) full = short_options[k].name;
        if (!full) die(EXIT_USAGE, "unknown option %s (kvcomp --help lists them)", name);
        const Opt *t = opt_find(full);
        if (!value && t) {
            if (t->kind == 'b') value = "1";
            else if (i + 1 < argc) value = argv[++i];
            else die(EXIT_USAGE, "--%s wants a value", full);
        }
        parse_one(o, full, value ? value : "1");
    }
}
static void parse_env(Options *o) {
    static const char *env[][2] = { { "KVCOMP_MODEL", "model" }, { "KVCOMP_DEVICE", "device" }, { "KVCOMP_THREADS", "threads" }, { "KVCOMP_CTX_SIZE", "ctx-size" } };
    char err[256];
    for (int i = 0; i < 4; i++) {
        const char *v = getenv(env[i][0]);
        if (v && *v && options_set(o, env[i][1], v, err)) die(EXIT_USAGE, "%s: %s", env[i][0], err);
    }
}
static void check_options(const Options *o) {
    char err[256];
    if (out_of_range(o, NULL, err)) die(EXIT_USAGE, "%s", err);
    if (opt_int(o, "kernel") % 2 == 0) die(EXIT_USAGE, "--kernel %d: the pooling width is odd", opt_int(o, "kernel"));
    if (opt_given(o, "budget") && opt_given(o, "ratio")) die(EXIT_USAGE, "--budget and --ratio both say how much to keep; give one");
    if (*opt_str(o, "dump-logits") && !*opt_str(o, "ids")) die(EXIT_USAGE, "--dump-logits goes with --ids FILE");
    int eval = *opt_str(o, "eval") || *opt_str(o, "eval-file") || *opt_str(o, "compare"), bench = opt_int(o, "bench");
    if (*opt_str(o, "bench-suite") && !bench) die(EXIT_USAGE, "--bench-suite goes with --bench");
    if (*opt_str(o, "budgets") && !eval) die(EXIT_USAGE, "--budgets goes with --compare or --eval");
    if (opt_int(o, "csv") && !eval && !bench) die(EXIT_USAGE, "--csv goes with --eval or --bench");
    if (opt_int(o, "json-rows") && !opt_int(o, "json")) die(EXIT_USAGE, "--json-rows goes with --json");
    if (*opt_str(o, "report") && (*opt_str(o, "ids") || *opt_str(o, "file") || opt_given(o, "prompt") || opt_int(o, "bench")))
        die(EXIT_USAGE, "--report goes alone or with --eval, not with -p, -f, --ids or --bench");
}

// ---- opening what the options name
static void default_model(Options *o) {                  // models/ beside the program, or here
    char path[1100], err[256];
    ssize_t n = readlink("/proc/self/exe", path, 1000);
    while (n > 0 && path[n - 1] != '/') n--;
    snprintf(path + (n > 0 ? n : 0), 100, "models/kvcomp-tiny");
    options_set(o, "model", n > 0 && file_exists(path) ? path : "models/kvcomp-tiny", err);
}
// A mapped file is read when it is first touched. With somebody watching, that happens here, with a progress line, and not as a
// silence before the first token.
static void load_pages(const Tensor *t) {
    const volatile unsigned char *p = t->data;
    for (size_t i = 0, n = (size_t)t->rows * t->cols * dtype_size(t->dtype); i < n; i += 4096) (void)p[i];
}
static void load_weights(const Config *c, const Weights *w) {
    if (quiet || !isatty(2)) return;
    progress("loading", 0);
    load_pages(&w->embed);
    for (int l = 0; l < c->L; l++) {
        const Layer *y = &w->layer[l];
        const Tensor *t[] = { &y->wq, &y->wk, &y->wv, &y->wo, &y->gate, &y->up, &y->down };
        progress("loading", (l + 1.0) / (c->L + 2));
        for (int i = 0; i < 7; i++) load_pages(t[i]);
    }
    load_pages(&w->head);
    progress("loading", 1);
}
static void open_model(App *a) {
    const char *shape = opt_str(a->o, "synthetic");
    if (*shape) {
        a->c = config_synthetic(shape);
        a->w = weights_synthetic(a->c, 1);
    } else {
        if (!*opt_str(a->o, "model")) default_model(a->o);
        a->c = config_load(opt_str(a->o, "model"));
        a->w = weights_load(a->c);
        load_weights(a->c, a->w);
    }
}
#ifdef KVCOMP_CUDA
enum { TRIAL_IDS = 300, TRIAL_STEPS = 4 };
static const double trial_tolerance = 1e-2;             // bf16 weights, f16 rows; a broken kernel is off by the logits themselves
static void trial_logits(const Config *c, const Weights *w, const char *device, float *out) {      // out (1+TRIAL_STEPS,V)
    char err[512];
    Options *o = options_new();
    int *ids = random_ids(TRIAL_IDS, c->V);
    options_set(o, "device", device, err);
    Session *s = session_open(c, w, o, "full");
    memcpy(out, prefill(s, ids, TRIAL_IDS), (size_t)c->V * sizeof(float));
    for (int i = 1; i <= TRIAL_STEPS; i++) memcpy(out + (size_t)i * c->V, decode(s, ids[i]), (size_t)c->V * sizeof(float));
    session_close(s);
    arrfree(ids);
    options_free(o);
}
// Does the GPU compute what the CPU computes? A prefill (long enough for the kernels on tensor cores) and a few steps of random weights
// on both: the largest difference of logits by the largest logit. -1: it died on the way, with its line in die_text. A kernel that is
// wrong on somebody's card must not chat there.
static double device_trial(void) {
    jmp_buf jump, *outer = die_jump;
    Config *c = config_synthetic("L2,H4,G2,D64,C128,F256,V512");
    Weights *w = weights_synthetic(c, 1);
    int n = (1 + TRIAL_STEPS) * c->V;
    float *both = xcalloc(2 * (size_t)n, sizeof *both);
    double worst = 0, top = 0;
    die_jump = &jump;
    int died = setjmp(jump);
    if (!died) { trial_logits(c, w, "cpu", both); trial_logits(c, w, "cuda", both + n); }
    die_jump = outer;
    for (int i = 0; i < n && !died; i++) {
        double e = fabs((double)both[i] - both[n + i]);
        if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
        top = fmax(top, fabs((double)both[i]));
    }
    free(both);
    weights_close(w, c);
    return died ? -1 : worst / top;
}
#endif
// Makes cuda or cpu of -d auto, and says with -v why. The plan is that of --method; other methods of a comparison ask again.
static void choose_device(App *a) {
    if (strcmp(opt_str(a->o, "device"), "auto")) return;
    char err[512], why[512] = "this kvcomp was built without CUDA";
    int good = 0;
    options_set(a->o, "device", "cpu", err);
#ifdef KVCOMP_CUDA
    int there = device_there();
    Session *s = there ? session_try(a->c, a->w, a->o, opt_str(a->o, "method"), err) : NULL;
    if (!s) snprintf(why, sizeof why, "%.500s", there ? err : "no GPU answers");    // err comes again, from the session that is wanted
    else if (!device_bars(s, why)) {
        double e = device_trial();
        good = e >= 0 && e < trial_tolerance;
        if (e < 0) snprintf(why, sizeof why, "a trial of the GPU ended with: %.400s", die_text);
        else snprintf(why, sizeof why, good ? "logits of a trial differ by %.1e of the largest" : "its logits differ by %.1e of the largest: that is wrong", e);
        if (!good && !quiet) fprintf(stderr, "kvcomp: -d auto keeps to the CPU: %s\n", why);
    }
    session_close(s);
#endif
    if (good) options_set(a->o, "device", "cuda", err);
    if (opt_int(a->o, "verbose")) fprintf(stderr, "device     %s (%s)\n", good ? "cuda" : "cpu", why);
}
static void open_tokenizer(App *a, int needed) {         // dies only when text has to be read or written
    char err[512];
    const char *path = *opt_str(a->o, "tokenizer") ? opt_str(a->o, "tokenizer") : opt_str(a->o, "model"), *name = opt_str(a->o, "chat-template");
    if (!*path) { if (needed) die(EXIT_USAGE, "--synthetic has no tokenizer; give one with --tokenizer FILE"); return; }
    a->tok = tokenizer_load(path, err);
    if (!a->tok && needed) die(EXIT_MODEL, "%s", err);
    if (!a->tok) { if (!quiet) fprintf(stderr, "kvcomp: %s; going on without text (lychee then cuts chunks of 16)\n", err); return; }
    lychee_text(a->tok);
    if (opt_int(a->o, "raw")) return;
    a->tp = template_load(*name || !*opt_str(a->o, "model") ? path : opt_str(a->o, "model"), *name ? name : NULL, a->tok, err);
    if (!a->tp && *name) die(EXIT_MODEL, "%s", err);
    if (a->tp) a->tp->parse_user = opt_int(a->o, "parse-special");
    if (!a->tp && needed && !quiet) fprintf(stderr, "kvcomp: %s; going on with raw text\n", err);
}
static void open_session(App *a) {
    a->method = strdup(opt_str(a->o, "method"));
    a->s = session_open(a->c, a->w, a->o, a->method);
    template_differs(a);
    a->logits = xcalloc(a->c->V, sizeof(float));
    int seed = opt_int(a->o, "seed");
    a->rng = seed < 0 ? (uint64_t)time(NULL) ^ (uint64_t)(now() * 1e9) : (uint64_t)seed;
}
static void app_close(App *a) {
    record_clear(a);
    arrfree(a->turn);
    session_close(a->s);
    template_free(a->tp);
    lychee_text(NULL);                                  // its texts go with the tokenizer
    tokenizer_free(a->tok);
    if (a->w) weights_close(a->w, a->c);
    options_free(a->o);
    free(a->method); free(a->logits);
}
// --inspect and -v: what the options will take, asked of a session on the CPU, which needs nothing of it yet.
static void print_memory(const App *a, FILE *f) {
    char err[512], keep[8];
    const char *method = opt_str(a->o, "method");
    snprintf(keep, sizeof keep, "%s", opt_str(a->o, "device"));
    options_set(a->o, "device", "cpu", err);
    Session *s = session_try(a->c, a->w, a->o, method, err);
    if (!s) { fprintf(f, "memory     not known: %s\n", err); }
    else {
        MemoryPlan p = memory_plan(s);
        fprintf(f, "memory     -c %d, method %s, K %s, V %s: weights %.3f GB + rows %.3f GB + method %.3f GB + passes %.3f GB = %.3f GB with -d cuda\n", p.ctx, method, s->fk->name,
                s->fv->name, (double)p.weights * 1e-9, (double)p.kv * 1e-9, (double)p.parts * 1e-9, (double)p.pass * 1e-9, (double)(p.weights + p.kv + p.parts + p.pass) * 1e-9);
        session_close(s);
    }
    options_set(a->o, "device", keep, err);
}
static void print_values(const Options *o) {             // -v: every effective value
    for (int i = 0; i < (int)shlen(o->map); i++)
        fprintf(stderr, "  --%s=%s%s\n", o->map[i].key, o->map[i].value, opt_given(o, o->map[i].key) ? "  (given)" : "");
}
static char *prompt_text(const App *a) {                 // -p or -f; NULL: chat. Malloc'd
    char err[256];
    size_t n;
    const char *file = opt_str(a->o, "file");
    if (opt_given(a->o, "prompt")) return strdup(opt_str(a->o, "prompt"));
    if (!*file) return NULL;
    char *text = read_file(strcmp(file, "-") ? file : "/dev/stdin", &n, err);
    if (!text) die(EXIT_USAGE, "-f %s", err);
    return text;
}
static int dump_tokens(const App *a, const char *text) {
    int *ids = tokenizer_encode(a->tok, text, strlen(text), opt_int(a->o, "parse-special"), NULL);
    for (int i = 0; i < (int)arrlen(ids); i++) printf("%s%d", i ? " " : "", ids[i]);
    printf("\n");
    arrfree(ids);
    return 0;
}
static int answer_prompt(App *a, const char *text) {        // one reply
    char err[512];
    const char *path = opt_str(a->o, "session");
    if (*path && file_exists(path) && session_read(a, path, err)) die(EXIT_RUN, "--session %s", err);
    if (opt_int(a->o, "n-predict") < 0) options_set(a->o, "n-predict", "256", err);
    if (!arrlen(a->turn) && !*text) die(EXIT_USAGE, "the prompt is empty");
    FILE *out = opt_int(a->o, "json") ? fopen("/dev/null", "w") : stdout;
    if (chat_turn(a, text, out)) return EXIT_RUN;
    if (out != stdout) fclose(out);
    if (opt_int(a->o, "json")) print_json(a, stdout);
    if (opt_int(a->o, "stats")) print_stats(a, stderr);
    if (*path && session_save(a, path, err)) die(EXIT_RUN, "--session %s", err);
    return 0;
}
static int run_app(App *a) {
    Options *o = a->o;
    if (opt_int(o, "bench")) return bench(o);
    if (*opt_str(o, "report")) report_check(opt_str(o, "report"));
    char *text = prompt_text(a);
    int ids = *opt_str(o, "ids") != 0, rc;
    if (opt_int(o, "dump-tokens")) {
        if (!text) die(EXIT_USAGE, "--dump-tokens wants -p TEXT or -f FILE");
        if (!*opt_str(o, "model") && !*opt_str(o, "tokenizer")) default_model(o);
        open_tokenizer(a, 1);
        rc = dump_tokens(a, text);
        free(text);
        return rc;
    }
    open_model(a);
    choose_device(a);
    if (opt_int(o, "inspect")) { inspect(a->c, a->w, stdout); print_memory(a, stdout); free(text); return 0; }
    if (opt_int(o, "verbose")) print_memory(a, stderr);
    open_tokenizer(a, !ids);
    if (*opt_str(o, "calibrate")) { free(text); return calibrate(a->c, a->w, a->tok, o); }
    open_session(a);
    rc = ids ? run_ids(a) : *opt_str(o, "eval") || *opt_str(o, "eval-file") || *opt_str(o, "compare") ? evaluate(a) : *opt_str(o, "report") ? report_write(a, opt_str(o, "report"), NULL) : text ? answer_prompt(a, text) : chat(a);
    free(text);
    return rc;
}

static int run_program(int argc, char **argv) {
    App a = { .o = options_new() };
    arg_count = argc; args = argv;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help")) return i + 1 < argc && argv[i + 1][0] != '-' ? help_method(argv[i + 1]) : help();
        else if (!strncmp(argv[i], "--help=", 7)) return help_method(argv[i] + 7);
    parse_env(a.o);
    parse_args(a.o, argc, argv);
    check_options(a.o);
    quiet = opt_int(a.o, "quiet");
    progress_hook = progress;
    if (opt_int(a.o, "version")) { printf("kvcomp %s\n", KVCOMP_VERSION); return 0; }
    if (opt_int(a.o, "list-methods")) return list_methods();
#ifndef KVCOMP_CUDA
    if (!strcmp(opt_str(a.o, "device"), "cuda")) die(EXIT_RUN, "-d cuda: this kvcomp was built without CUDA (nvcc was not found); -d cpu works");
#endif
#ifdef _OPENMP
    if (opt_int(a.o, "threads")) omp_set_num_threads(opt_int(a.o, "threads"));
#endif
    if (opt_int(a.o, "verbose")) print_values(a.o);
    int rc = run_app(&a);
    app_close(&a);
    return rc;
}
int kvcomp_main(int argc, char **argv) {
    int rc = run_program(argc, argv);
    if ((fflush(stdout) || ferror(stdout)) && !rc) die(EXIT_RUN, "stdout: not everything could be written (%s)", strerror(errno));
    return rc;
}
#ifndef KVCOMP_NO_MAIN
int main(int argc, char **argv) { return kvcomp_main(argc, argv); }
#endif

