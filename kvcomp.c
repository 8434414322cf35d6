// kvcomp.c - chat with a Llama-style language model, and shrink its key-value cache.
//
// This file is the CPU half of kvcomp: the model, the cache, every method, and the program around
// them. The same methods on a GPU are in kvcomp.cu; kvcomp.h holds the nouns that both halves share.
// Build it with `make`, or without the GPU half:
//
//     gcc -std=c11 -O3 -fopenmp -o kvcomp kvcomp.c -lm
//
// WHAT IT IS
//
// A language model keeps the key and the value of every token it has read, and that cache soon
// outweighs the model. kvcomp loads a checkpoint as it is published on Hugging Face, plays a dialogue
// of many turns through it, and lets you swap the way its cache is kept: full attention, five recent
// papers, and the older methods those papers compare themselves with. Every method is one section of
// this file, with its equations beside the lines that compute them.
//   - It is a reference: where readability and speed disagree, Part I shows the plain algorithm, and
//     Part II holds the fast one.
//   - It is exact about bits: a logit depends on the weights, the tokens, the method and the
//     instruction set, never on the number of threads (-t) or on how many tokens a block has (-b).
//
// WHAT IT IS NOT
//
//   - not a server: one process plays one dialogue, with batch size 1;
//   - not a trainer: weights are read, never changed;
//   - not a reader of quantised checkpoints: weights are F32, F16 or BF16, and anything else is
//     refused by name. Rows of the cache may have fewer bits, because that is the subject;
//   - not a collection of architectures: decoder-only models of the Llama, Mistral, Qwen2 and Qwen3
//     families, nothing else;
//   - not distributed: one machine, and at most one GPU.
//
// HOW TO READ IT
//
// First kvcomp.h, which explains the nouns (Session, KVHead, View, Method) and the letters of all
// shapes, (T,H,D) and so on. Then sections 1 to 4: `forward` is the whole transformer on one screen,
// and it calls the methods through hooks. Then section 5, the shortest complete method, and after it
// the paper you came for. Part II can wait until you want to know how something is done; Part III is
// what a user touches. "D9" in a comment is decision 9 of NOTES.md, where its reasons are.
//
// To add a method, write a section like section 5, and name its table entry in section 14.
//
// CONTENTS (`grep -n '^// ====' kvcomp.c` gives the lines)
// Part I, the subject
//    1 MODEL: forward is the whole transformer on one screen; where methods hook into it
//    2 CACHE: lists of rows, how a row is stored, views (what a head reads), dropping rows, bytes
//    3 ATTENTION: softmax over rows, tile by tile, in a prefill and through views in decode
//    4 THE DECODE LOOP: one prefill a turn, then one decode a token; opening and closing a session
//    5 STREAMINGLLM: the first rows and the last ones; the shortest complete method
//    6 BASELINES: SnapKV, AdaKV, PyramidKV, H2O and ExpectedAttention: rows dropped after a prefill
//    7 SPARSE PREFILL BASELINES: A-shape, Tri-shape and MInference: a prefill along fixed lines
//    8 QUEST: every step reads the pages of rows with the largest bound
//    9 LOOPSERVE: a prefill along lines chosen for this input, and rows chosen anew while decoding
//   10 PATS: old rows lose low bits and are packed
//   11 LYCHEECLUSTER: every step reads the text chunks of the best clusters
//   12 SONIC INFERENCE: a finished message is compressed into a few learned rows
//   13 DILILAZYKV: heads that find facts keep more rows than others; HeadKV, its nearest rival
//   14 THE TABLE OF METHODS: one line a method
// Part II, what it stands on
//   15 HELPERS: the end of the program, memory, the clock, scratch memory of a pass, threads
//   16 NUMBERS AND KERNELS: products, softmax, norms and top-k for every instruction set
//   17 FAST PATHS: what makes attention and packed rows quick without changing a bit
//   18 OPTIONS: one table for parsing, help and defaults
//   19 JSON: a strict reader
//   20 CHECKPOINTS: from a folder of Hugging Face files to a Config and Weights
//   21 TOKENIZER: from text to ids and back
//   22 CHAT TEMPLATES: what a model expects around the turns of a dialogue
//   23 MEMORY PLAN: what a dialogue will take, before it takes it
// Part III, what people use it through
//   24 GENERATION AND RECORDS: sampling, replies, the record of a dialogue
//   25 CHAT: the line editor, the commands, Ctrl-C
//   26 EVALUATION: what a method costs in quality
//   27 CALIBRATION: which heads find facts, for DiliLazyKV and HeadKV
//   28 BENCHMARK: what a method saves in time
//   29 REPORT: measurements and pictures as one page
//   30 COMMAND LINE: options, help, main
#ifndef SIMD     // defined while this file includes itself for the kernels: section 16
#define _GNU_SOURCE
#include "kvcomp.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
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

// Asked before every allocation of this file; 1 makes it fail. A test counts, and lets the n-th fail.
#ifndef ALLOCATION_FAILS
#define ALLOCATION_FAILS() 0
#endif

#define STB_DS_IMPLEMENTATION       // growing arrays and hash maps (Debian package libstb-dev)
#define STBDS_REALLOC(c, p, n) xrealloc(p, n)
#define STBDS_FREE(c, p) free(p)
#include <stb/stb_ds.h>

// ---- what Part I calls of Parts II and III (what the GPU half calls too is in kvcomp.h)
typedef struct Json Json;               // a parsed JSON text (section 19)
typedef struct SafeFile SafeFile;       // a mapped safetensors file (section 20)
typedef struct Tokenizer Tokenizer;     // section 21
typedef struct ViewTile ViewTile;       // some of the rows a view lists (section 2)
typedef struct TileRows TileRows;       // their keys or values, ready for a kernel (section 3)

// Memory of one pass: an arena that is kept from pass to pass.
struct Arena *arena_new(void);
void arena_free(struct Arena *a);

// Reads a whole file, with a 0 byte behind it; NULL, and the reason in err, when it cannot.
static char *read_file(const char *path, size_t *size, char err[256]);
// The same of a text: a 0 byte inside it is refused.
static char *read_plain_text(const char *path, size_t *size, char err[256]);
// 1: there is something at this path.
static int file_exists(const char *path);
// 0: the text is a legal value of this option; otherwise -1 and the reason in err.
static int opt_check(const Opt *o, const char *value, char err[256]);
// The value of a key in the metadata of a safetensors file; NULL: it has none.
static const char *safetensors_meta(const SafeFile *f, const char *key);
static void safetensors_close(SafeFile *f);
// Scores (L,H) of a file made by --calibrate; NULL, and the reason in err, when it does not fit.
static double *scores_read(const char *path, const char *which, int L, int H, char err[512]);

// Threads: how many a parallel region gets; this one's number; how many this region has.
static int n_threads(void);
static int thread_id(void);
static int team_size(void);
// 1: so many multiply-adds are worth the microseconds that starting a team of threads costs.
static int worth_threads(size_t multiply_adds);

// The largest of n numbers; -INFINITY if n is 0.
static float max_f32(const float *x, int n);
// s (m,n) = scale * q (m,D) k (n,D)^T with k of any dtype; meanwhile it asks for the memory `next`.
static void scores_of(float *s, const float *q, const void *k, int dtype, int m, int n, int D,
                      float scale, Ahead next);
// o (m,D) = p (m,n) v (n,D) with v of any dtype; add 1: o += that. It asks for `next` likewise.
static void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add,
                   Ahead next);
// The sum of w (n) over those i whose order_key(x[i]) is at least key; w NULL: how many there are.
static int weight_from(const float *x, const int *w, int n, uint32_t key);
// Widens n rows of format q8_0 to f32.
static void q8_unpack(float *x, const char *o, int n, int D);

// Mean softmax rows of w queries, a list for each query head (lists R) or one for a group (lists 1).
static void mean_rows(Session *s, int l, const float *q, int tok0, int w, int lists, float *score);
// The keys (v 0) or values (v 1) of a tile of a view, ready for a kernel. end: where the view's
// rows end for this thread; buf (KV_TILE,D) is used if the rows have to be brought together.
static TileRows tile_read(const Session *s, const KVHead *h, const View *w, const ViewTile *a,
                          int v, int end, float *buf);
// Asks for the first memory of every run of rows among the rows p0..p1-1 of a view.
static void fetch_runs(const Session *s, const KVHead *h, const View *w, int p0, int p1);
// Chooses the fastest way this processor has of unpacking PATS's elements.
static void unpack_choose(void);

// ---- what is small and used everywhere
enum { KV_STEP = 64 };                  // rows: the memory of a head grows in steps of so many

// A float as an unsigned number with the same order; -0 counts as +0. Every bit of a negative float
// is turned around, and only the sign of any other.
static inline uint32_t order_key(float x) {
    union { float f; uint32_t u; int32_t i; } v;
    v.f = x + 0.0f;
    return v.u ^ ((uint32_t)(v.i >> 31) | 0x80000000u);
}

// ---- what section 1 calls of section 2
static void note_peak(Session *s);

// ####################################################################################################
// PART I: THE SUBJECT
// ####################################################################################################

// ==================================================================================================== 1 MODEL
// A session is one dialogue: its tokens, its rows of keys and values, and its method. `forward`, at
// the end of this section, is the whole transformer in the order in which it is computed. It goes
// layer by layer over all T tokens of the pass, so that a hook sees a whole turn and a prefill
// holds one uncompressed layer at most; -b only cuts the matrix products into blocks (D2).
//
// forward knows no method by name. A session's method is a list of parts ("snapkv+q8" is two), each
// a row of hooks that may be NULL, and forward calls them at these places:
//   embed     a token with a negative id, which is a method's own, needs an embedding
//   project   q, k and v of a layer are there, not rotated yet (D4)
//   select    decode only: the rows that the query heads of this layer will read are chosen now
//   attend    prefill only: the part computes the attention of this layer itself
//   commit    a layer's attention is done: index its rows, or drop some; once more when the pass ends
// Two more, turn and enter, are called by `prefill` (section 4) before the pass.

#define EACH_PART(s, p) for (Part *p = (s)->part; p < (s)->part + (s)->n_part; p++)
#define EACH_HOOK(s, p, hook) EACH_PART(s, p) if (p->m->hook)      // the parts that have this hook

// ---- RoPE: where a token stands, as a rotation of its queries and keys
// cs (D): cosines of the D/2 angles of a position, then sines. Angle i is pos * freq_i in double (D5).
static void rope_angles(const Weights *w, int D, int pos, float *cs) {
    for (int i = 0; i < D / 2; i++) {
        double a = pos * w->inv_freq64[i];
        cs[i] = (float)(cos(a) * w->rope_scale);
        cs[D / 2 + i] = (float)(sin(a) * w->rope_scale);
    }
}

// Rotates x (heads,D) by the angles cs (D): channels i and i + D/2 are a point in the plane.
static void rope_apply(float *x, int heads, int D, const float *cs) {
    for (int h = 0; h < heads; h++, x += D)
        for (int i = 0; i < D / 2; i++) {
            float a = x[i], b = x[i + D / 2];
            x[i] = a * cs[i] - b * cs[i + D / 2];
            x[i + D / 2] = b * cs[i] + a * cs[i + D / 2];
        }
}

// Rotates x (heads,D) to a position.
void rope(const Weights *w, float *x, int heads, int D, int pos) {
    float cs[1024];
    rope_angles(w, D, pos, cs);
    rope_apply(x, heads, D, cs);
}

// ---- the room a pass works in
// A span is the run of tokens whose queries, keys and values exist at the same time: all T of the
// pass if a hook wants to see a whole turn, otherwise a block of -b. b is a block: min(-b, T).
typedef struct {
    float *x;           // (T,C) the residual stream: one vector a token, to which every layer adds
    float *cs;          // (T,D) RoPE cosines and sines of every token's position
    float *q;           // (span,H,D) queries
    float *out;         // (span,H,D) what attention makes of them
    float *k, *v;       // (span,G,D) keys and values
    float *h;           // (b,C) a normed input, or the output of a product
    float *gate, *up;   // (b,F) inside the MLP
    int span;
} Pass;

// Room for a pass over T tokens.
static Pass pass_room(Session *s, int T) {
    const Config *c = s->c;
    int whole = s->rule != VIS_CAUSAL, block = min_int(s->batch, T);
    EACH_PART(s, p) whole |= p->m->project || p->m->attend || p->m->commit;

    Pass r = { .span = whole ? T : block };
    size_t f = sizeof(float), n = r.span, b = block;
    r.x    = scratch(s, (size_t)T * c->C * f);
    r.cs   = scratch(s, (size_t)T * c->D * f);
    r.q    = scratch(s, n * c->H * c->D * f);
    r.out  = scratch(s, n * c->H * c->D * f);
    r.k    = scratch(s, n * c->G * c->D * f);
    r.v    = scratch(s, n * c->G * c->D * f);
    r.h    = scratch(s, b * c->C * f);
    r.gate = scratch(s, b * c->F * f);
    r.up   = scratch(s, b * c->F * f);
    return r;
}

// ---- the steps of a layer
// x (T,C) = the embeddings of the tokens of the pass.
static void embed(Session *s, float *x, int T) {
    int C = s->c->C;
    const Tensor *w = &s->w->embed;
    size_t row = (size_t)C * dtype_size(w->dtype);
    for (int t = 0; t < T; t++, x += C) {
        const Token *k = &s->tok[s->base + t];
        if (k->id >= 0) {
            to_f32(x, (const char *)w->data + k->id * row, w->dtype, C);
            continue;
        }
        EACH_HOOK(s, p, embed) {
            p->m->embed(s, p->ms, k, x);
            break;
        }
    }
}

// cs (T,D) = the angles of the positions of the tokens of the pass.
static void pass_angles(const Session *s, float *cs, int T) {
    int D = s->c->D;
    for (int t = 0; t < T; t++) rope_angles(s->w, D, s->tok[s->base + t].pos, cs + (size_t)t * D);
}

// How many of the tokens t .. end-1 of the pass, counted from t, can go through one product: at
// most -b, and all with the same weights *y. SONIC's Nexus tokens have weights of their own.
static int same_weights(const Session *s, int t, int end, const Layer **y, int l) {
    int alt = s->alt && s->tok[s->base + t].kind == TOK_EXTRA;
    int most = min_int(end - t, s->batch), n = 0;
    while (n < most && (s->alt && s->tok[s->base + t + n].kind == TOK_EXTRA) == alt) n++;
    *y = alt ? &s->alt[l] : &s->w->layer[l];
    return n;
}

// RMSNorm of n heads x (n,D) in place, for models that norm their queries and keys (Qwen3).
static void norm_heads(float *x, const Tensor *w, int n, int D, float eps) {
    if (w->data) rmsnorm(x, x, w, n, D, eps);
}

// q (n,H,D), k and v (n,G,D) of n tokens x (n,C):  h = norm(x);  q = W_q h + b_q, and so on.
static void project_rows(const Session *s, const Layer *y, const float *x, float *h,
                         float *q, float *k, float *v, int n) {
    const Config *c = s->c;
    rmsnorm(h, x, &y->attn_norm, n, c->C, c->eps);
    matmul(q, h, &y->wq, n);
    matmul(k, h, &y->wk, n);
    matmul(v, h, &y->wv, n);
    add_bias(q, &y->bq, n);
    add_bias(k, &y->bk, n);
    add_bias(v, &y->bv, n);
    norm_heads(q, &y->q_norm, n * c->H, c->D, c->eps);
    norm_heads(k, &y->k_norm, n * c->G, c->D, c->eps);
}

// The same for tokens t0 .. t1-1 of the pass, block by block: q, k and v of the span.
static void project_span(Session *s, int l, Pass *r, int t0, int t1) {
    size_t C = s->c->C, HD = (size_t)s->c->H * s->c->D, GD = (size_t)s->c->G * s->c->D;
    for (int t = t0, n; t < t1; t += n) {
        const Layer *y;
        size_t i = t - t0;
        n = same_weights(s, t, t1, &y, l);
        project_rows(s, y, r->x + t * C, r->h, r->q + i * HD, r->k + i * GD, r->v + i * GD, n);
    }
}

// Rotates the queries and keys of tokens t0 .. t1-1 to their positions.
static void rope_span(const Session *s, Pass *r, int t0, int t1) {
    int D = s->c->D, H = s->c->H, G = s->c->G;
    #pragma omp parallel for schedule(static) if (t1 - t0 > 32)
    for (int t = t0; t < t1; t++) {
        size_t i = t - t0;
        const float *cs = r->cs + (size_t)t * D;
        rope_apply(r->q + i * H * D, H, D, cs);
        rope_apply(r->k + i * G * D, G, D, cs);
    }
}

static void add_to(float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] += y[i];
}

// x (n,C) += W_o out, where out (n,H,D) is what attention made. h (n,C) is room.
static void output_rows(const Session *s, const Layer *y, float *x, const float *out, float *h,
                        int n) {
    matmul(h, out, &y->wo, n);
    add_bias(h, &y->bo, n);
    add_to(x, h, (size_t)n * s->c->C);
}

// x (n,C) += W_down (silu(W_gate h) * W_up h), where h = norm(x). Room: h (n,C), gate and up (n,F).
static void mlp_rows(const Session *s, const Layer *y, float *x, float *h, float *gate, float *up,
                     int n) {
    const Config *c = s->c;
    rmsnorm(h, x, &y->mlp_norm, n, c->C, c->eps);
    matmul(gate, h, &y->gate, n);
    add_bias(gate, &y->bgate, n);
    matmul(up, h, &y->up, n);
    add_bias(up, &y->bup, n);
    swiglu(gate, up, (size_t)n * c->F);
    matmul(h, gate, &y->down, n);
    add_bias(h, &y->bdown, n);
    add_to(x, h, (size_t)n * c->C);
}

// Both for the tokens from .. t1-1, block by block. The span in r begins with token t0.
static void mlp_span(Session *s, int l, Pass *r, int t0, int from, int t1) {
    size_t C = s->c->C, HD = (size_t)s->c->H * s->c->D;
    for (int t = from, n; t < t1; t += n) {
        const Layer *y;
        float *x = r->x + t * C;
        n = same_weights(s, t, t1, &y, l);
        output_rows(s, y, x, r->out + (t - t0) * HD, r->h, n);
        mlp_rows(s, y, x, r->h, r->gate, r->up, n);
    }
}

// ---- the clock and the progress of a pass
// Set by the command line; NULL: nobody watches.
static void (*progress_hook)(const char *what, double share);

// Tells whoever watches that a share (0..1) of something long is done.
void progress_tell(const char *what, double share) {
    if (progress_hook) progress_hook(what, share);
}

// Adds the seconds since t0 to *sum -> the time now.
static double timed(double *sum, double t0) {
    double t = now();
    *sum += t - t0;
    return t;
}

// ---- attention of a layer, and the whole transformer
static Part *part_with_attend(Session *s) {
    EACH_HOOK(s, p, attend) return p;
    return NULL;
}

// r->out (n,H,D) = attention of the n tokens of the pass from t0 on, and the hooks around it.
// acts 0: hooks skip this layer.
static void attend_rows(Session *s, int l, Pass *r, int t0, int n, int acts) {
    double t = now();
    if (s->decoding) {
        // select: a method that reads only some rows sets the views of this layer's query heads.
        if (acts)
            EACH_HOOK(s, p, select) p->m->select(s, p->ms, l, r->q);
        t = timed(&s->clk.select, t);
        attn_decode(s, l, r->out, r->q);
    } else {
        // attend: a sparse prefill computes the attention itself; without one it is dense.
        Part *sparse = acts ? part_with_attend(s) : NULL;
        if (sparse) sparse->m->attend(s, sparse->ms, l, r->out, r->q, n);
        else attn_prefill(s, l, r->out, r->q, t0, n);
    }
    t = timed(&s->clk.attend, t);

    // The peak of a prefill is here, where this layer still holds every row.
    if (!s->decoding) note_peak(s);

    // commit: the rows of this layer are complete. A method indexes, drops or packs some.
    if (acts)
        EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, l, r->q, n);
    timed(&s->clk.commit, t);
}

// Adds T tokens to the session. A token with pos < 0 gets the next position.
static void add_tokens(Session *s, const Token *in, int T) {
    if (s->n_tok + T > s->cap_tok) {
        s->cap_tok = s->n_tok + T + 1024;
        s->tok = xrealloc(s->tok, (size_t)s->cap_tok * sizeof(Token));
    }
    s->base = s->n_tok;
    for (int t = 0; t < T; t++) {
        Token *k = &s->tok[s->n_tok++];
        *k = in[t];
        if (k->pos < 0) k->pos = s->pos_next;
        if (k->pos >= s->pos_next) s->pos_next = k->pos + 1;
    }
}

// The whole transformer: one pass over T new tokens -> the logits (V) of the last one.
float *forward(Session *s, const Token *in, int T) {
    add_tokens(s, in, T);
    if (KV_DEV(s)) return pass_cuda(s, T);

    const Config *c = s->c;
    size_t mark = scratch_mark(s);
    Pass r = pass_room(s, T);

    // Every token becomes a vector: its row of the embedding matrix, or what the embed hook says.
    embed(s, r.x, T);
    pass_angles(s, r.cs, T);

    for (int l = 0; l < c->L; l++) {
        int acts = layer_acts(s, l);
        if (l && T > 1) progress_tell("prefill", (double)l / c->L);

        for (int t0 = 0, t1; t0 < T; t0 = t1) {
            t1 = min_int(t0 + r.span, T);

            // Queries, keys and values of the span. The project hook sees them unrotated.
            project_span(s, l, &r, t0, t1);
            if (acts)
                EACH_HOOK(s, p, project) p->m->project(s, p->ms, l, r.q, r.k, r.v, t1 - t0);

            // They are rotated to their positions, and keys and values become rows of the cache.
            rope_span(s, &r, t0, t1);
            kv_append(s, l, r.k, r.v, t0, t1 - t0);

            // Attention reads all rows as they are stored, the new ones too (D1).
            // Hooks: select, attend, commit.
            attend_rows(s, l, &r, t0, t1 - t0, acts);

            // Output product and MLP, each added to x. The last layer needs the last token only.
            int from = l < c->L - 1 ? t0 : T - 1;
            mlp_span(s, l, &r, t0, from, t1);
        }
    }

    // The end of the pass: every commit hook once more, with l == L.
    double t = now();
    EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, c->L, NULL, T);
    timed(&s->clk.commit, t);

    // The last token's vector becomes one logit for every token of the vocabulary.
    rmsnorm(r.h, r.x + (size_t)(T - 1) * c->C, &s->w->norm, 1, c->C, c->eps);
    matmul(s->logits, r.h, &s->w->head, 1);

    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// ==================================================================================================== 2 CACHE
// A head is a list of rows. Each KV head of each layer owns `len` rows, oldest first; a row is the
// token it came from, the RoPE position its key is rotated to, and its K and V bytes. Heads differ
// in length once a method drops rows, and the memory of dropped rows goes back to the allocator at
// once, so that "bytes held" means what it says. Keys are stored rotated.
//
// Memory is asked for in steps of KV_STEP rows, so that a decode step rarely allocates. Rows
// [0,packed) of a head may be packed at fewer bits (PATS, section 10); all others are raw rows, one
// format for K and one for V (-ctk, -ctv). In a device session the bytes of rows are device memory,
// and the functions here call their twins in kvcomp.cu.

// ---- formats of raw rows: bytes a row; a row of f32 to bytes; n rows of bytes to f32
static size_t f32_bytes(int D)  { return (size_t)D * 4; }
static size_t half_bytes(int D) { return (size_t)D * 2; }

static void f32_pack   (char *o, const float *x, int D)        { memcpy(o, x, (size_t)D * 4); }
static void f32_unpack (float *x, const char *o, int n, int D) { memcpy(x, o, (size_t)n * D * 4); }
static void f16_pack   (char *o, const float *x, int D)        { from_f32(o, x, DT_F16, D); }
static void f16_unpack (float *x, const char *o, int n, int D) { to_f32(x, o, DT_F16, (size_t)n * D); }
static void bf16_pack  (char *o, const float *x, int D)        { from_f32(o, x, DT_BF16, D); }
static void bf16_unpack(float *x, const char *o, int n, int D) { to_f32(x, o, DT_BF16, (size_t)n * D); }

// q8_0: a row is blocks of 32 values; the last block may be shorter. A block is an f16 scale
// d = max|x| / 127, and then one signed byte round(x / d) a value. Unpacking, d times the byte, is a
// kernel of section 16.
enum { Q8_BLOCK = 32 };

static size_t q8_bytes(int D) {
    return (size_t)D + 2 * ((D + Q8_BLOCK - 1) / Q8_BLOCK);
}

static void q8_pack(char *o, const float *x, int D) {
    for (int b = 0; b < D; b += Q8_BLOCK) {
        int n = min_int(Q8_BLOCK, D - b);
        float top = 0;
        for (int i = 0; i < n; i++) top = fmaxf(top, fabsf(x[b + i]));
        uint16_t d = f32_to_f16(top / 127);
        float scale = f16_to_f32(d);
        memcpy(o, &d, 2);
        for (int i = 0; i < n; i++) {
            float q = scale > 0 ? rintf(x[b + i] / scale) : 0;
            if (q > 127) q = 127;           // the scale was rounded, so q may be past 127
            if (q < -127) q = -127;
            ((signed char *)o)[2 + i] = (signed char)q;
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

// The format of this name; NULL: there is none.
static const Format *format_find(const char *name) {
    for (const Format *f = formats; f->name; f++)
        if (!strcmp(f->name, name)) return f;
    return NULL;
}

// The format of V rows (v 1) or K rows (v 0).
static const Format *format_of(const Session *s, int v) {
    return v ? s->fv : s->fk;
}

// Bytes of one raw row, its key and its value together.
static size_t raw_row_bytes(const Session *s) {
    return s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
}

static size_t round_to_step(size_t rows) {
    return (rows + KV_STEP - 1) / KV_STEP * KV_STEP;
}

// ---- memory of one head
// Makes room for `raw` raw rows behind the packed ones: keeps what is there, gives back the rest.
static void head_reserve(Session *s, KVHead *h, int raw) {
    int D = s->c->D, cap = (int)round_to_step(raw), all = h->packed + cap;
    if (cap == h->cap && h->src) return;
    s->changes++;
    if (KV_DEV(s)) {
        rows_resize_cuda(s, h, cap);
    } else {
        h->k = xrealloc(h->k, (size_t)cap * s->fk->row_bytes(D));
        h->v = xrealloc(h->v, (size_t)cap * s->fv->row_bytes(D));
    }
    h->cap = cap;
    h->src = xrealloc(h->src, (size_t)all * sizeof(int));
    h->pos = xrealloc(h->pos, (size_t)all * sizeof(int));
    if (s->wants & KV_MASS) h->mass = xrealloc(h->mass, (size_t)all * sizeof(float));
}

// Gives back everything a head holds: it has no rows afterwards.
static void head_free(Session *s, KVHead *h) {
    if (KV_DEV(s)) rows_free_cuda(s, h);
    free(h->src);
    free(h->pos);
    free(h->mass);
    free(h->k);
    free(h->v);
    free(h->pk);
    free(h->pv);
    free(h->reg);
    memset(h, 0, sizeof *h);
}

// Bytes of a head's K and V rows, as allocated.
static size_t head_row_bytes(const Session *s, const KVHead *h) {
    return (size_t)h->cap * raw_row_bytes(s) + 2 * h->pk_bytes;
}

// ---- new rows
// Makes room for n more rows in every head of layer l.
void kv_reserve(Session *s, int l, int n) {
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        int raw = h->len - h->packed + n;
        if (raw > h->cap) head_reserve(s, h, raw);
    }
}

// The bytes of n new rows of every head of layer l are there: writes down the tokens they come from,
// base+t0 .. base+t0+n-1, and their positions.
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

// Appends the rows of tokens base+t0 .. base+t0+n-1 to every head of layer l. k, v (n,G,D), where
// the rows live: in device memory in a device session.
void kv_append(Session *s, int l, const float *k, const float *v, int t0, int n) {
    int G = s->c->G, D = s->c->D;
    size_t k_bytes = s->fk->row_bytes(D), v_bytes = s->fv->row_bytes(D);
    kv_reserve(s, l, n);
    if (KV_DEV(s)) {
        rows_append_cuda(s, l, k, v, t0, n);
    } else {
        #pragma omp parallel for collapse(2) schedule(static) if (n > 32)
        for (int g = 0; g < G; g++)
            for (int t = 0; t < n; t++) {
                KVHead *h = kv_head(s, l, g);
                size_t raw = h->len - h->packed + t, from = ((size_t)t * G + g) * D;
                s->fk->pack(h->k + raw * k_bytes, k + from, D);
                s->fv->pack(h->v + raw * v_bytes, v + from, D);
            }
    }
    kv_note(s, l, t0, n);
}

// ---- reading rows
// In this file v says which half of a row is meant: 0 its key, 1 its value. Several rows are either
// listed (rows (n), ascending) or, where rows is NULL, the n neighbours r0 .. r0+n-1.

// The bytes of raw row r >= h->packed.
static const char *raw_row(const Session *s, const KVHead *h, int v, int r) {
    return (v ? h->v : h->k) + (size_t)(r - h->packed) * format_of(s, v)->row_bytes(s->c->D);
}

// buf (n,D) of dtype = rows r0 .. r0+n-1. dtype is DT_F32 for rows of any storage. It may also be
// DT_F16 or DT_BF16 if that is how raw rows are stored; packed rows exist beside f16 rows only.
static void load_range(const Session *s, const KVHead *h, int v, int r0, int n, char *buf,
                       int dtype) {
    int D = s->c->D, packed = max_int(0, min_int(n, h->packed - r0));
    const Format *f = format_of(s, v);
    size_t size = dtype_size(dtype), front = packed * (size_t)D;

    // Packed rows give f16 numbers. Where f32 is wanted, they go to the rear half of their place
    // and are widened from the front.
    if (packed) {
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

// The same for listed rows or for neighbours. Listed rows that are neighbours are loaded together.
static void load_rows(const Session *s, const KVHead *h, int v, const int *rows, int r0, int n,
                      void *buf, int dtype) {
    size_t bytes = s->c->D * dtype_size(dtype);
    if (!rows) {
        load_range(s, h, v, r0, n, buf, dtype);
        return;
    }
    for (int i = 0, end; i < n; i = end) {
        end = i + 1;
        while (end < n && rows[end] == rows[end - 1] + 1) end++;
        load_range(s, h, v, rows[i], end - i, (char *)buf + i * bytes, dtype);
    }
}

// buf (n,D) f32 = keys, or values.
void kv_load_k(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf) {
    load_rows(s, h, 0, rows, r0, n, buf, DT_F32);
}

void kv_load_v(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf) {
    load_rows(s, h, 1, rows, r0, n, buf, DT_F32);
}

// (n,H,D): tokens t0 .. t0+n-1 of the queries q (T,H,D) that a hook was given, where C can read them.
const float *on_host(Session *s, const float *q, int t0, int n) {
    size_t row = (size_t)s->c->H * s->c->D;
    if (!KV_DEV(s)) return q + t0 * row;
    float *copy = scratch(s, n * row * sizeof(float));
    host_copy_cuda(copy, q + t0 * row, n * row);
    return copy;
}

// Rows of the longest head of layer l.
int kv_longest(const Session *s, int l) {
    int n = 0;
    for (int g = 0; g < s->c->G; g++) n = max_int(n, kv_head(s, l, g)->len);
    return n;
}

// ---- views: which rows a query head reads in a decode step
// A view is one query head's list: the rows idx[0..n), ascending, and then every row from `tail`
// on, so that new rows are read without anybody listing them. n = 0 and tail = 0 is every row,
// which is how a view begins (view_all). Place p of a view is the p-th row it reads.
//
// Rows belong to KV heads and views to query heads, but most methods choose one list for the R
// query heads of a group. view_group stores it once, with the group's first head; each later head
// of the group has same = 1, which means "I read what the head before me reads". view_of follows
// these marks back to the head that owns the list, and attention sees from them which heads can
// share one reading of the rows (decode_groups); it compares lists only where there is no mark.
//
// A list that many steps will read can be copied side by side (view_near, section 17): is_near says
// that the copy is valid. Whatever changes the list or a key it names clears is_near.

// Makes *w the list idx (n) and the rows from tail on.
static void view_fill(Session *s, View *w, const int *idx, int n, int tail) {
    if (KV_DEV(s)) s->changes++;            // only a device asks, and here threads work side by side
    if (n > w->cap) {
        w->cap = n + n / 4 + KV_STEP;
        w->idx = xrealloc(w->idx, (size_t)w->cap * sizeof(int));
    }
    if (n) memcpy(w->idx, idx, (size_t)n * sizeof(int));
    w->n = n;
    w->tail = tail;
    w->same = 0;
    w->is_near = 0;
}

// Query head h reads idx (n) and the rows from tail on. What the other heads read stays as it is.
void view_set(Session *s, int l, int h, const int *idx, int n, int tail) {
    int R = s->c->H / s->c->G, last_of_group = (h + 1) % R == 0;
    View *w = kv_view(s, l, h), old = view_of(s, l, h);
    // The next head may read through this one's list: then it gets the list, before that changes.
    if (!last_of_group && w[1].same) view_fill(s, w + 1, old.idx, old.n, old.tail);
    view_fill(s, w, idx, n, tail);
}

// All query heads of KV head g read idx (n) and the rows from tail on.
void view_group(Session *s, int l, int g, const int *idx, int n, int tail) {
    int R = s->c->H / s->c->G;
    View *w = kv_view(s, l, g * R);
    view_fill(s, w, idx, n, tail);
    for (int r = 1; r < R; r++) {
        w[r].n = n;
        w[r].tail = tail;
        w[r].same = 1;
    }
}

// Every query head of the session reads every row.
void view_all(Session *s) {
    s->changes++;
    if (KV_DEV(s)) views_drop_cuda(s);
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        View *w = &s->view[i];
        w->n = w->tail = w->same = w->is_near = 0;
    }
}

// The query heads of KV head g read every row.
static void views_reset(Session *s, int l, int g) {
    view_group(s, l, g, NULL, 0, 0);
}

// A device may have kept the lists it chose in the last step: brings them here to be read.
static void views_here(const Session *s) {
    (void)s;
    if (KV_DEV(s)) views_fetch_cuda((Session *)s);
}

// rows (N) = the rows query head h reads, in ascending order -> how many.
int view_rows(const Session *s, int l, int h, int *rows) {
    views_here(s);
    const View w = view_of(s, l, h);
    int n = w.n, len = kv_head(s, l, h / (s->c->H / s->c->G))->len;
    if (n) memcpy(rows, w.idx, (size_t)n * sizeof(int));
    for (int r = w.tail; r < len; r++) rows[n++] = r;
    return n;
}

struct ViewTile {           // the rows at places p .. p+n-1 of a view
    int p, n;
    const int *rows;        // (n) their numbers; NULL: they are the neighbours r0 .. r0+n-1
    int r0;
};

// The j-th of these rows.
static int row_at(const int *rows, int r0, int j) {
    return rows ? rows[j] : r0 + j;
}

// The rows at places p .. p+n-1 of a view. room (n) is used where the list ends among them.
static ViewTile view_tile(const View *w, int p, int n, int *room) {
    ViewTile a = { .p = p, .n = n };
    if (p >= w->n) {                        // behind the list
        a.r0 = w->tail + p - w->n;
    } else if (p + n <= w->n) {             // inside the list
        a.rows = w->idx + p;
    } else {                                // the end of the list and the first rows behind it
        int listed = w->n - p;
        for (int i = 0; i < n; i++) room[i] = i < listed ? w->idx[p + i] : w->tail + i - listed;
        a.rows = room;
    }
    return a;
}

// ---- dropping rows
// Row i of a head becomes its row keep[i], for i < n, and the memory of the others is given back.
// keep is ascending, so a row never moves to a place behind its own, and moving them in order
// overwrites nothing that is still needed.
static void move_rows(Session *s, KVHead *h, const int *keep, int n) {
    size_t k_bytes = s->fk->row_bytes(s->c->D), v_bytes = s->fv->row_bytes(s->c->D);
    int n_packed = 0, old_packed = h->packed;
    while (n_packed < n && keep[n_packed] < old_packed) n_packed++;
    if (old_packed && n_packed < old_packed)
        s->packing->keep(s, h, keep, n_packed);         // sets h->packed = n_packed
    if (KV_DEV(s)) rows_move_cuda(s, h, keep, n, n_packed, old_packed);

    for (int i = 0; i < n; i++) {
        int r = keep[i];
        if (i >= n_packed && !KV_DEV(s)) {
            size_t to = i - n_packed, from = r - old_packed;
            memmove(h->k + to * k_bytes, h->k + from * k_bytes, k_bytes);
            memmove(h->v + to * v_bytes, h->v + from * v_bytes, v_bytes);
        }
        h->src[i] = h->src[r];
        h->pos[i] = h->pos[r];
        if (h->mass) h->mass[i] = h->mass[r];
    }
    h->len = n;
    head_reserve(s, h, n - n_packed);
}

// Keeps the rows keep (n), ascending, of KV head g. Its query heads read every row afterwards.
void kv_keep(Session *s, int l, int g, const int *keep, int n) {
    KVHead *h = kv_head(s, l, g);
    if (n < h->len) move_rows(s, h, keep, n);
    views_reset(s, l, g);
}

// Marks in seen (len) the rows that some query head of KV head g reads.
static void mark_rows_read(Session *s, int l, int g, int len, int *seen) {
    int R = s->c->H / s->c->G;
    for (int h = g * R; h < (g + 1) * R; h++) {
        const View *w = kv_view(s, l, h);
        int listed = w->same ? 0 : w->n;    // the head that owns the list marks it
        for (int i = 0; i < listed; i++) seen[w->idx[i]] = 1;
        for (int r = w->tail; r < len; r++) seen[r] = 1;
    }
}

// Drops the rows of KV head g that none of its query heads reads, and renumbers its views.
void kv_compact(Session *s, int l, int g) {
    KVHead *hd = kv_head(s, l, g);
    int R = s->c->H / s->c->G, len = hd->len, n = 0;
    size_t mark = scratch_mark(s), bytes = (size_t)(len + 1) * sizeof(int);
    int *map = scratch(s, bytes), *keep = scratch(s, bytes);
    memset(map, 0, bytes);
    mark_rows_read(s, l, g, len, map);

    // From marks to a map: the new number of row r is how many rows below it are kept.
    for (int r = 0; r < len; r++) {
        int seen = map[r];
        if (seen) keep[n] = r;
        map[r] = n;
        n += seen;
    }
    map[len] = n;                           // a tail may stand behind the last row

    s->changes++;
    for (int h = g * R; h < (g + 1) * R; h++) {
        View *w = kv_view(s, l, h);
        int listed = w->same ? 0 : w->n;
        for (int i = 0; i < listed; i++) w->idx[i] = map[w->idx[i]];
        w->tail = map[w->tail];
    }
    if (n < len) move_rows(s, hd, keep, n);
    scratch_reset(s, mark);
}

// Drops the rows of a head that came from tokens n_tok and later. They are its last ones.
static void head_truncate(Session *s, KVHead *h, int n_tok) {
    int n = h->len;
    while (n > 0 && h->src[n - 1] >= n_tok) n--;
    if (n == h->len) return;
    size_t mark = scratch_mark(s);
    int *keep = scratch(s, (size_t)(n + 1) * sizeof(int));
    for (int r = 0; r < n; r++) keep[r] = r;
    move_rows(s, h, keep, n);
    scratch_reset(s, mark);
}

// Forgets the tokens from n_tok on and their rows. Every view reads every row afterwards.
void kv_truncate(Session *s, int n_tok) {
    if (n_tok >= s->n_tok) return;
    for (int i = 0; i < s->c->L * s->c->G; i++) head_truncate(s, &s->head[i], n_tok);
    view_all(s);
    s->pos_next = s->tok[n_tok].pos;
    s->n_tok = n_tok;
    EACH_HOOK(s, p, forget) p->m->forget(s, p->ms, n_tok);
}

// Rotates one raw key from its position to another. RoPE's angles add, so one rotation by the
// difference does it: R(new) k = R(new - old) R(old) k. It is not scaled by rope_scale, because the
// stored key has been.
void kv_repos(Session *s, int l, int g, int row, int pos) {
    KVHead *h = kv_head(s, l, g);
    int D = s->c->D, R = s->c->H / s->c->G, shift = pos - h->pos[row];
    if (!shift) return;

    float *k = scratch(s, (size_t)D * sizeof(float));
    kv_load_k(s, h, NULL, row, 1, k);
    for (int i = 0; i < D / 2; i++) {
        double angle = shift * s->w->inv_freq64[i];
        float c = (float)cos(angle), n = (float)sin(angle), x = k[i], y = k[i + D / 2];
        k[i] = x * c - y * n;
        k[i + D / 2] = y * c + x * n;
    }

    char *to = h->k + (size_t)(row - h->packed) * s->fk->row_bytes(D);
    if (KV_DEV(s)) {
        char *raw = scratch(s, s->fk->row_bytes(D));
        s->fk->pack(raw, k, D);
        rows_store_cuda(to, raw, s->fk->row_bytes(D));
    } else {
        s->fk->pack(to, k, D);
    }
    h->pos[row] = pos;
    for (int r = 0; r < R; r++) kv_view(s, l, g * R + r)->is_near = 0;     // copies hold the old key
}

// ---- accounting: what the allocator holds
// Bytes of all K and V rows, the unused part of the last step of KV_STEP rows included.
size_t kv_bytes(const Session *s) {
    size_t n = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) n += head_row_bytes(s, &s->head[i]);
    return n;
}

// The format full attention is compared in: the session's, but f16 where that one compresses.
static const Format *full_format(const Session *s, int v) {
    const Format *f = format_of(s, v);
    return s->packing || !strcmp(f->name, "q8_0") ? format_find("f16") : f;
}

// The bytes full attention would hold for the same tokens. It has no tokens of a method's own.
size_t kv_bytes_full(const Session *s) {
    int D = s->c->D;
    size_t rows = 0;
    for (int i = 0; i < s->n_tok; i++) rows += s->tok[i].kind != TOK_EXTRA;
    size_t row = full_format(s, 0)->row_bytes(D) + full_format(s, 1)->row_bytes(D);
    return (size_t)s->c->L * s->c->G * round_to_step(rows) * row;
}

// Bytes beside the rows: sources, positions, masses, tables of regions, views, the parts' indexes.
size_t kv_meta_bytes(const Session *s) {
    size_t n = 0;
    views_here(s);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        size_t a_row = 2 * sizeof(int) + (h->mass ? sizeof(float) : 0);
        n += (size_t)(h->packed + h->cap) * a_row + (size_t)h->n_reg * sizeof(Region);
    }
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        const View *w = &s->view[i];
        n += (size_t)w->cap * sizeof(int) + w->room;
    }
    for (int i = 0; i < s->n_part; i++) {
        const Part *p = &s->part[i];
        if (p->m->bytes) n += p->m->bytes(s, p->ms);
    }
    return n;
}

// Keeps the most bytes of rows ever held.
static void note_peak(Session *s) {
    s->clk.peak = max_size(s->clk.peak, kv_bytes(s));
}

// ---- what a method asks
// The budget B at the end of a prefill: --budget rows a KV head. --ratio F instead removes the
// share F of the N tokens seen: B = N - floor(N F + 1e-6) (D8).
int budget_now(const Session *s) {
    if (s->ratio >= 0) return s->n_tok - (int)floor(s->n_tok * s->ratio + 1e-6);
    return s->budget;
}

// 0: hooks skip this layer, because it has a sliding window and other layers of the model have
// none. In a model with windowed layers only, methods act on all of them (D6).
int layer_acts(const Session *s, int l) {
    if (!s->c->windowed || !s->c->windowed[l]) return 1;
    for (int i = 0; i < s->c->L; i++)
        if (!s->c->windowed[i]) return 0;
    return 1;
}

// ==================================================================================================== 3 ATTENTION
// A query q of head h attends to rows 0..n-1 of its KV head, with keys k_j and values v_j:
//   Pass 1   s_j = q . k_j / sqrt(D)      scores; -infinity where the query may not see the row
//   Pass 2   p_j = exp(s_j - max s) / sum_i exp(s_i - max s)      softmax
//   Pass 3   out = sum_j p_j v_j          the weighted sum of the values
// attn_rows is exactly that. attn_prefill and attn_decode do the same for many queries at once,
// without keeping n scores a query: they take the rows in tiles of KV_TILE and fold each tile into
// a running softmax (tile_fold), which holds for every query the largest score so far, and the sums
// of exp(s_j - max) and of exp(s_j - max) v_j. Rows are taken KV_CHUNK at a time; what each chunk
// gives is joined in order (chunks_join), so that threads can share the rows of one query.
//
// A query's result depends only on its own list of rows: never on the queries beside it, on -b, or
// on the number of threads. Prefill and decode do the same arithmetic, so a token's logits do not
// depend on how it came in (D2).

enum {
    KV_TILE = 64,           // rows of a tile: their keys as f32 lie in the first-level cache
    Q_BLOCK = MAX_R,        // most queries of a tile: R heads, times as many tokens as fit
    KV_CHUNK = 2048,        // rows of one running softmax
};

// ---- the definition: one query, all three passes
// One softmax of query head h over exactly the rows listed; which of them are visible is the
// caller's business. q, out (D); prob (n): the probabilities, or NULL.
void attn_rows(Session *s, int l, int h, const float *q, const int *rows, int n, float *out,
               float *prob) {
    int D = s->c->D;
    size_t mark = scratch_mark(s);
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    float *kv = scratch(s, (size_t)KV_TILE * D * sizeof(float));
    float *p = prob ? prob : scratch(s, (size_t)(n + 1) * sizeof(float));
    float scale = 1 / sqrtf((float)D), max = -INFINITY, sum = 0;

    // Pass 1: the scores, and the largest of them.
    for (int r = 0; r < n; r += KV_TILE) {
        int m = min_int(KV_TILE, n - r);
        kv_load_k(s, hd, rows + r, 0, m, kv);
        attn_scores(p + r, q, kv, 1, m, D, scale);
        for (int j = 0; j < m; j++) max = p[r + j] > max ? p[r + j] : max;
    }

    // Passes 2 and 3: p = exp(score - max) and its sum; the values weighted by p.
    memset(out, 0, (size_t)D * sizeof(float));
    for (int r = 0; r < n; r += KV_TILE) {
        int m = min_int(KV_TILE, n - r);
        exp_shift(p + r, max, m, &sum);
        kv_load_v(s, hd, rows + r, 0, m, kv);
        attn_mix(out, p + r, kv, 1, m, D);
    }
    for (int d = 0; d < D; d++) out[d] /= sum;
    if (prob)
        for (int i = 0; i < n; i++) prob[i] /= sum;
    scratch_reset(s, mark);
}

// ---- tiles: m queries meet n rows
typedef struct {            // what one thread works in
    float *k, *v;           // (KV_TILE,D) rows as f32
    float *q;               // (Q_BLOCK,D) the queries
    int tok[Q_BLOCK];       // the token of each query, an index into Session.tok
    int rows[KV_TILE];      // room for the row numbers of a tile
    float *sc;              // (m,n) scores of the tile, then exp(score - max)
    float max[Q_BLOCK];     // the running softmax of each query: the largest score so far,
    float sum[Q_BLOCK];     // the sum of exp(score - max),
    float *acc;             // (Q_BLOCK,D) and the sum of exp(score - max) v
} Tile;

struct TileRows {           // keys or values as a kernel takes them
    const void *x;          // (n,D) of dtype
    int dtype;              // DT_*
    Ahead next;             // memory that will be read next, to ask for meanwhile; {0}: none
};

// A Tile for every thread, in scratch memory.
static Tile *tiles_new(Session *s) {
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

// The sliding window of layer l; 0: it has none.
static int layer_window(const Session *s, int l) {
    return s->c->windowed && s->c->windowed[l] ? s->c->window : 0;
}

// Sets the scores of the rows that a query may not see to -INFINITY: of the tile's m queries and n
// rows (listed, or neighbours from r0 on), query i and row j meet at x[i * by + j * bx]. Returns 0
// if no query sees any row.
static int mask_tile(const Session *s, int l, const KVHead *hd, const Tile *t, int m,
                     const int *rows, int r0, int n, float *x, size_t by, size_t bx) {
    int window = layer_window(s, l), any = 0, first = INT_MAX;
    for (int i = 0; i < m; i++) first = min_int(first, t->tok[i]);

    // Nothing is masked if the newest row is not newer than the oldest query. The head's newest row
    // is asked first: it settles most decode steps and lies in the cache, while the tile's newest
    // one would have to come from memory.
    if (s->rule == VIS_CAUSAL && !window) {
        if (hd->src[hd->len - 1] <= first) return 1;
        if (hd->src[row_at(rows, r0, n - 1)] <= first) return 1;
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            int query = t->tok[i], key = hd->src[row_at(rows, r0, j)];
            if (kv_visible(s->rule, window, &s->tok[query], query, &s->tok[key], key)) any = 1;
            else x[i * by + j * bx] = -INFINITY;
        }
    return any;
}

// Pass 1 for a tile: t->sc (m,n) = q k / sqrt(D), masked. Returns 0 if no query sees any row.
static int tile_scores_of(const Session *s, int l, const KVHead *hd, Tile *t, int m,
                          const int *rows, int r0, int n, TileRows k) {
    int D = s->c->D;
    scores_of(t->sc, t->q, k.x, k.dtype, m, n, D, 1 / sqrtf((float)D), k.next);
    return mask_tile(s, l, hd, t, m, rows, r0, n, t->sc, (size_t)n, 1);
}

// The same with the keys in t->k.
static int tile_scores(const Session *s, int l, const KVHead *hd, Tile *t, int m,
                       const int *rows, int r0, int n) {
    return tile_scores_of(s, l, hd, t, m, rows, r0, n, (TileRows){ .x = t->k, .dtype = DT_F32 });
}

// The running softmax of m queries begins: no row has been seen.
static void tile_begin(Tile *t, int m, int D) {
    memset(t->acc, 0, (size_t)m * D * sizeof(float));
    for (int i = 0; i < m; i++) {
        t->max[i] = -INFINITY;
        t->sum[i] = 0;
    }
}

// Passes 2 and 3 for a tile whose scores are in t->sc (m,n): folds it into the running softmax of
// its m queries. v (n,D); v.x NULL: only max and sum are wanted.
static void tile_fold_of(Tile *t, int m, int n, int D, TileRows v) {
    // Pass 2: exponentials and their sum. What was gathered under a smaller maximum is scaled first.
    for (int i = 0; i < m; i++) {
        float *p = t->sc + (size_t)i * n, *acc = t->acc + (size_t)i * D;
        float top = fmaxf(t->max[i], max_f32(p, n));
        if (top == -INFINITY) {             // this query has seen no row yet
            memset(p, 0, (size_t)n * sizeof(float));
            continue;
        }
        if (top > t->max[i]) {
            float c = expf(t->max[i] - top);
            t->sum[i] *= c;
            for (int d = 0; d < D; d++) acc[d] *= c;
            t->max[i] = top;
        }
        exp_shift(p, top, n, &t->sum[i]);
    }

    // Pass 3: the weighted sum.
    if (v.x) mix_of(t->acc, t->sc, v.x, v.dtype, m, n, D, 1, v.next);
}

// The same with f32 values v (n,D), or NULL.
static void tile_fold(Tile *t, int m, int n, int D, const float *v) {
    tile_fold_of(t, m, n, D, (TileRows){ .x = v, .dtype = DT_F32 });
}

// Can a row up to r_last lie inside the sliding window of token first_tok? If not, the tile that
// ends with r_last need not be read at all. Positions are those of tokens, as in kv_visible.
static int tile_in_window(const Session *s, int l, const KVHead *hd, int r_last, int first_tok) {
    int w = layer_window(s, l);
    return !w || s->tok[hd->src[r_last]].pos > s->tok[first_tok].pos - w;
}

// ---- chunks: what KV_CHUNK rows give, and how it is joined
// part (m,D+2) = the running softmax of m queries: max, sum, and the D numbers of acc.
static void chunk_put(float *part, const Tile *t, int m, int D) {
    for (int i = 0; i < m; i++) {
        float *o = part + (size_t)i * (D + 2);
        o[0] = t->max[i];
        o[1] = t->sum[i];
        memcpy(o + 2, t->acc + (size_t)i * D, (size_t)D * sizeof(float));
    }
}

// Joins the chunks of one query, `stride` floats apart: with M the largest max,
//   sum = sum_c exp(max_c - M) sum_c      out (D) = sum_c exp(max_c - M) acc_c / sum
static void chunks_join(const float *part, size_t stride, int chunks, int D, float *out, float *max,
                        float *sum) {
    *max = -INFINITY;
    *sum = 0;
    memset(out, 0, (size_t)D * sizeof(float));
    for (int c = 0; c < chunks; c++) *max = fmaxf(*max, part[c * stride]);
    for (int c = 0; c < chunks; c++) {
        const float *p = part + c * stride;
        if (p[0] == -INFINITY) continue;    // the query sees no row of this chunk
        float f = expf(p[0] - *max);
        *sum += f * p[1];
        for (int d = 0; d < D; d++) out[d] += f * p[2 + d];
    }
    for (int d = 0; d < D; d++) out[d] /= *sum;
}

// ---- attention mass: how much attention every row has drawn, for methods that want KV_MASS (H2O)
// Max and sum of the m queries over all their rows are known, and t->sc (m,n) holds the scores of a
// tile. mass (n) = sum over the queries of exp(score - max) / sum: the attention each row draws.
static void tile_mass(Tile *t, int m, int n, const float *max, const float *sum, float *mass) {
    float unused = 0;
    memset(mass, 0, (size_t)n * sizeof(float));
    for (int i = 0; i < m; i++) {
        float *p = t->sc + (size_t)i * n;
        exp_shift(p, max[i], n, &unused);
        for (int j = 0; j < n; j++) mass[j] += p[j] / sum[i];
    }
}

// Adds to hd->mass the attention that the tile's m queries pay to rows 0 .. n_rows-1, whose keys are
// read once more.
static void add_mass(Session *s, int l, KVHead *hd, Tile *t, int m, int n_rows) {
    float mass[KV_TILE];
    for (int r = 0; r < n_rows; r += KV_TILE) {
        int n = min_int(KV_TILE, n_rows - r);
        kv_load_k(s, hd, NULL, r, n, t->k);
        if (!tile_scores(s, l, hd, t, m, NULL, r, n)) continue;
        tile_mass(t, m, n, t->max, t->sum, mass);
        for (int j = 0; j < n; j++) hd->mass[r + j] += mass[j];
    }
}

// ---- prefill: every row held that the mask lets a query see
// Gathers the queries of n tokens, from the t0-th of q on, and of the R heads of group g: query
// i*R+r of the tile is head r of the i-th token, which is token tok0+i. -> how many queries.
static int gather_queries(const Session *s, Tile *t, const float *q, int t0, int n, int tok0,
                          int g) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G, m = 0;
    for (int i = 0; i < n; i++)
        for (int r = 0; r < R; r++, m++) {
            const float *from = q + ((size_t)(t0 + i) * H + g * R + r) * D;
            memcpy(t->q + (size_t)m * D, from, (size_t)D * sizeof(float));
            t->tok[m] = tok0 + i;
        }
    return m;
}

// Under the causal mask, token last_tok sees no row from the returned one on.
static int last_visible(const Session *s, const KVHead *hd, int last_tok) {
    int n = hd->len;
    if (s->rule != VIS_CAUSAL) return n;
    while (n > 0 && hd->src[n - 1] > last_tok) n--;
    return n;
}

// The running softmax of the tile's m queries over rows r0 .. r1-1.
static void prefill_chunk(Session *s, int l, const KVHead *hd, Tile *t, int m, int r0, int r1) {
    int D = s->c->D;
    tile_begin(t, m, D);
    for (int r = r0; r < r1; r += KV_TILE) {
        int n = min_int(KV_TILE, r1 - r);
        if (!tile_in_window(s, l, hd, r + n - 1, t->tok[0])) continue;

        // Pass 1: scores.
        kv_load_k(s, hd, NULL, r, n, t->k);
        if (!tile_scores(s, l, hd, t, m, NULL, r, n)) continue;

        // Passes 2 and 3: softmax and weighted sum. The values are loaded over the keys: two tiles,
        // and the rows they come from, would not fit into the first-level cache.
        kv_load_v(s, hd, NULL, r, n, t->k);
        tile_fold(t, m, n, D, t->k);
    }
}

// Attention of the R heads of group g for n tokens, from the i0-th of q, out (..,H,D) on; that one
// is token tok0. part: room for all chunks of a tile.
static void prefill_block(Session *s, int l, int g, float *out, const float *q, int i0, int n,
                          int tok0, Tile *t, float *part) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G;
    size_t stride = (size_t)D + 2, chunk = Q_BLOCK * stride;
    KVHead *hd = kv_head(s, l, g);
    int m = gather_queries(s, t, q, i0, n, tok0, g);
    int n_rows = last_visible(s, hd, tok0 + n - 1), chunks = 0;

    for (int r = 0; r < n_rows; r += KV_CHUNK, chunks++) {
        prefill_chunk(s, l, hd, t, m, r, min_int(r + KV_CHUNK, n_rows));
        chunk_put(part + chunks * chunk, t, m, D);
    }
    for (int i = 0; i < m; i++) {
        float *o = out + ((size_t)(i0 + i / R) * H + g * R + i % R) * D;
        chunks_join(part + i * stride, chunk, chunks, D, o, &t->max[i], &t->sum[i]);
    }
    if (hd->mass) add_mass(s, l, hd, t, m, n_rows);
}

// Attention of tokens base+t0 .. base+t0+n-1 of this pass over every row held that the mask lets
// them see. q, out (n,H,D).
void attn_prefill(Session *s, int l, float *out, const float *q, int t0, int n) {
    if (KV_DEV(s)) {
        attn_prefill_cuda(s, l, out, q, t0, n);
        return;
    }
    int D = s->c->D, H = s->c->H, G = s->c->G;
    int per = Q_BLOCK / (H / G);            // tokens of a block
    int blocks = (n + per - 1) / per;       // of a group
    size_t mark = scratch_mark(s), N = kv_longest(s, l);
    Tile *tiles = tiles_new(s);
    size_t room = (N / KV_CHUNK + 1) * Q_BLOCK * ((size_t)D + 2);   // for the chunks of one block
    float *parts = scratch(s, (size_t)n_threads() * room * sizeof(float));

    // A thread takes one block of one group at a time. Where a head's mass is summed, it takes all
    // blocks of a group, so that the sums have one order.
    int at_once = s->wants & KV_MASS ? blocks : 1;
    #pragma omp parallel for schedule(dynamic) if (worth_threads(n * N * H * D))
    for (int item = 0; item < G * blocks / at_once; item++) {
        int g = item % G, first = item / G * at_once;
        Tile *t = &tiles[thread_id()];
        float *part = parts + thread_id() * room;
        for (int b = first; b < first + at_once; b++) {
            int i0 = b * per;
            prefill_block(s, l, g, out, q, i0, min_int(per, n - i0), s->base + t0 + i0, t, part);
        }
    }
    scratch_reset(s, mark);
}

// ---- decode: one query a head, through the views
// Query heads h0 .. h0+m-1 of KV head g have views that agree: their n rows are read once for all.
typedef struct {
    int g, h0, m, n;
} DecodeGroup;

// out (H) = the groups of layer l -> how many.
static int decode_groups(Session *s, int l, DecodeGroup *out) {
    int R = s->c->H / s->c->G, n = 0;
    for (int h = 0; h < s->c->H; ) {
        int g = h / R, h0 = h++;
        while (h < (g + 1) * R && h - h0 < Q_BLOCK && same_as_before(s, l, h)) h++;
        const View *w = kv_view(s, l, h0);
        out[n++] = (DecodeGroup){ g, h0, h - h0, w->n + kv_head(s, l, g)->len - w->tail };
    }
    return n;
}

// The queries of a group go into the tile. q (H,D).
static void decode_queries(const Session *s, const DecodeGroup *d, const float *q, Tile *t) {
    size_t D = s->c->D;
    memcpy(t->q, q + d->h0 * D, d->m * D * sizeof(float));
    for (int i = 0; i < d->m; i++) t->tok[i] = s->base;
}

// The running softmax of a group over places p0 .. p1-1 of its view -> part (m,D+2). q (H,D).
static void decode_chunk(Session *s, int l, const DecodeGroup *d, int p0, int p1, const float *q,
                         Tile *t, float *part) {
    int D = s->c->D, m = d->m;
    const KVHead *hd = kv_head(s, l, d->g);
    const View w = view_of(s, l, d->h0);
    decode_queries(s, d, q, t);
    tile_begin(t, m, D);
    fetch_runs(s, hd, &w, p0, p1);
    for (int p = p0; p < p1; p += KV_TILE) {
        ViewTile a = view_tile(&w, p, min_int(KV_TILE, p1 - p), t->rows);
        if (!tile_in_window(s, l, hd, row_at(a.rows, a.r0, a.n - 1), s->base)) continue;

        // Pass 1: scores.
        TileRows k = tile_read(s, hd, &w, &a, 0, p1, t->k);
        if (!tile_scores_of(s, l, hd, t, m, a.rows, a.r0, a.n, k)) continue;

        // Passes 2 and 3: softmax and weighted sum. Values may take the place of keys, as in a prefill.
        TileRows v = tile_read(s, hd, &w, &a, 1, p1, t->k);
        tile_fold_of(t, m, a.n, D, v);
    }
    chunk_put(part, t, m, D);
}

// Adds to the mass of a group's KV head the attention its rows draw; their keys are read once more.
// max, sum (H).
static void decode_mass(Session *s, int l, const DecodeGroup *d, const float *q, Tile *t,
                        const float *max, const float *sum) {
    KVHead *hd = kv_head(s, l, d->g);
    const View w = view_of(s, l, d->h0);
    float mass[KV_TILE];
    decode_queries(s, d, q, t);
    for (int p = 0; p < d->n; p += KV_TILE) {
        ViewTile a = view_tile(&w, p, min_int(KV_TILE, d->n - p), t->rows);
        kv_load_k(s, hd, a.rows, a.r0, a.n, t->k);
        if (!tile_scores(s, l, hd, t, d->m, a.rows, a.r0, a.n)) continue;
        tile_mass(t, d->m, a.n, max + d->h0, sum + d->h0, mass);
        for (int j = 0; j < a.n; j++) hd->mass[row_at(a.rows, a.r0, j)] += mass[j];
    }
}

// Attention of the one token of a decode step, through the views. out, q (H,D). An item is one
// chunk of one group; threads take items as they come, and one thread joins the chunks of each head
// in order.
void attn_decode(Session *s, int l, float *out, const float *q) {
    if (KV_DEV(s)) {
        attn_decode_cuda(s, l, out, q);
        return;
    }
    int D = s->c->D, H = s->c->H;
    size_t mark = scratch_mark(s), stride = (size_t)D + 2, chunk = Q_BLOCK * stride;

    // The items: those of group i are first[i] .. first[i+1]-1.
    DecodeGroup *group = scratch(s, (size_t)H * sizeof *group);
    int n_groups = decode_groups(s, l, group), items = 0;
    int *first = scratch(s, (size_t)(n_groups + 1) * sizeof(int));
    size_t pairs = 0;                       // of a query and a row
    for (int i = 0; i < n_groups; i++) {
        first[i] = items;
        items += (group[i].n + KV_CHUNK - 1) / KV_CHUNK;
        pairs += (size_t)group[i].n * group[i].m;
    }
    first[n_groups] = items;

    float *part = scratch(s, (size_t)items * chunk * sizeof(float));
    float *max = scratch(s, (size_t)H * sizeof(float));
    float *sum = scratch(s, (size_t)H * sizeof(float));
    Tile *tiles = tiles_new(s);
    int team = worth_threads(pairs * D);
    (void)team;                             // read by OpenMP only
    #pragma omp parallel for schedule(dynamic) if (team)
    for (int item = 0; item < items; item++) {
        int i = 0;
        while (first[i + 1] <= item) i++;
        int p0 = (item - first[i]) * KV_CHUNK, p1 = min_int(p0 + KV_CHUNK, group[i].n);
        decode_chunk(s, l, &group[i], p0, p1, q, &tiles[thread_id()], part + item * chunk);
    }

    for (int i = 0; i < n_groups; i++) {
        const KVHead *hd = kv_head(s, l, group[i].g);
        const float *from = part + first[i] * chunk;
        int chunks = first[i + 1] - first[i];
        for (int j = 0; j < group[i].m; j++) {
            int h = group[i].h0 + j;
            chunks_join(from + j * stride, chunk, chunks, D, out + (size_t)h * D, &max[h], &sum[h]);
        }
        double bytes_a_row = (double)head_row_bytes(s, hd) / (hd->packed + hd->cap);
        s->clk.bytes_attended += (double)group[i].n * bytes_a_row;
        if (hd->mass) decode_mass(s, l, &group[i], q, tiles, max, sum);
    }
    scratch_reset(s, mark);
}

// ---- scores for methods
// The last w = min(T,W) queries of the pass are the observers. score (H,N) = the mean of their
// softmax rows over the rows held, for every query head (D11). q (T,H,D); N = kv_longest(s,l).
void window_scores(Session *s, int l, const float *q, int T, int W, float *score) {
    if (KV_DEV(s)) {
        window_scores_cuda(s, l, q, T, W, score);
        return;
    }
    int w = min_int(T, W), H = s->c->H;
    mean_rows(s, l, q + (size_t)(T - w) * H * s->c->D, s->base + T - w, w, H / s->c->G, score);
}

// ==================================================================================================== 4 THE DECODE LOOP
// A turn of the dialogue is one prefill, over all tokens the turn brings, and then one decode a
// token of the reply:
//
//     const float *logits = prefill(s, ids, n);
//     while (the reply goes on) logits = decode(s, the token chosen from logits);
//
// A session is opened for a method of one or more parts, lives as long as the dialogue, and can be
// made to forget it. Rows stay from turn to turn; every prefill ends with one compression over all
// rows held, and decode compresses nothing unless the method says so (D9).

// ---- a turn
// Logits (V) as they are, after a look for NaN and infinity, with which the program ends (exit 3):
// damaged weights would speak nonsense quietly, because every comparison with NaN is false. Without
// its sign, a float as an integer grows with its size, and infinity and NaN are the largest.
static const float *checked(const Session *s, const float *logits) {
    const uint32_t infinity = 0x7f800000;
    uint32_t worst = 0;
    for (int i = 0; i < s->c->V; i++) {
        union { float f; uint32_t u; } x = { logits[i] };
        uint32_t size = x.u & 0x7fffffff;
        worst = size > worst ? size : worst;
    }
    if (worst >= infinity)
        die(EXIT_MODEL, "%.300s: a logit of token %d is %s: its weights are damaged", s->c->dir,
            s->n_tok - 1, worst > infinity ? "not a number" : "infinite");
    return logits;
}

// How many of the ids (n), from the first on, have a row in the embedding: n when all of them do.
static int ids_with_rows(const Config *c, const int *ids, int n) {
    int i = 0;
    while (i < n && ids[i] >= 0 && ids[i] < c->V) i++;
    return i;
}

// Ends the program (exit 3) when one of the ids (n) has no row in the embedding. Every id that
// comes from outside passes here before anything is read at its place: a tokenizer, a template or a
// text may name ids that the model does not have.
static void ids_must_have_rows(const Config *c, const int *ids, int n) {
    int i = ids_with_rows(c, ids, n);
    if (i < n)
        die(EXIT_MODEL, "%.300s: token id %d has no row in the embedding, which has %d rows", c->dir, ids[i],
            c->V);
}

// 1: there are positions for n more tokens and `extra` positions beside them.
int pos_fits(const Session *s, int n, int extra) {
    return !s->pos_end || s->pos_next + n + extra <= s->pos_end;
}

// One turn: the ids (n) that it adds to the dialogue -> the logits (V) of the last one.
const float *prefill(Session *s, const int *ids, int n) {
    double t0 = now();
    ids_must_have_rows(s->c, ids, n);

    // The tokens of the pass, with room for what an enter hook may add: even the whole dialogue again.
    int cap = 2 * (n + s->n_tok) + 4096;
    Token *t = xmalloc((size_t)cap * sizeof(Token));
    for (int i = 0; i < n; i++)
        t[i] = (Token){ .id = ids[i], .pos = -1, .seg = s->turn, .kind = TOK_USER };

    // turn: a prefill begins. enter: a method may truncate the dialogue, add tokens, run own passes.
    s->decoding = s->step = 0;
    EACH_HOOK(s, p, turn) p->m->turn(s, p->ms);
    view_all(s);
    EACH_HOOK(s, p, enter) n = p->m->enter(s, p->ms, t, n, cap);

    const float *logits = s->forward(s, t, n);
    free(t);
    s->turn++;
    s->applied = budget_now(s);
    s->n_sys = s->n_foot = s->n_head = 0;
    s->clk.n_prefill += n;
    timed(&s->clk.prefill, t0);
    return checked(s, logits);
}

// One token of the reply, which belongs to the segment of the token before it -> its logits (V).
const float *decode(Session *s, int id) {
    double t0 = now();
    ids_must_have_rows(s->c, &id, 1);
    if (!pos_fits(s, 1, 0))
        die(EXIT_RUN, "position %d is past max_position_embeddings %d", s->pos_next, s->pos_end);
    int seg = s->n_tok ? s->tok[s->n_tok - 1].seg : 0;
    Token t = { .id = id, .pos = -1, .seg = seg, .kind = TOK_REPLY };
    s->decoding = 1;
    const float *logits = s->forward(s, &t, 1);
    s->step++;
    s->clk.n_decode++;
    s->clk.steps++;
    timed(&s->clk.decode, t0);
    return checked(s, logits);
}

// ---- the parts of a method
// The method whose name is the n characters at `name`; NULL: there is none.
static const Method *method_find(const char *name, size_t n) {
    EACH_METHOD(m)
        if (strlen((*m)->name) == n && !strncmp((*m)->name, name, n)) return *m;
    return NULL;
}

// Adds a part with this method. 0, or -1 with the reason in s->err: two parts that decide the same
// thing cannot be combined.
static int part_add(Session *s, const Method *m, const char *spec) {
    static const char *decides[] = {        // by bit of a role
        "the prefill attention", "which rows are kept or read", "how rows are stored",
    };
    if (s->n_part == MAX_PARTS)
        return refuse(s, "--method=%s: more than %d parts", spec, MAX_PARTS);
    EACH_PART(s, p)
        for (int bit = 0; bit < 3; bit++)
            if (p->m->role & m->role & 1 << bit)
                return refuse(s, "--method=%s: %s and %s cannot be combined, both decide %s", spec,
                              p->m->name, m->name, decides[bit]);
    s->part[s->n_part++].m = m;
    return 0;
}

// Puts the parts into the order of the timeline, prefill, select, store, by insertion sort.
static void parts_sort(Session *s) {
    for (int i = 1; i < s->n_part; i++)
        for (int j = i; j > 0 && s->part[j].m->role < s->part[j - 1].m->role; j--) {
            Part x = s->part[j];
            s->part[j] = s->part[j - 1];
            s->part[j - 1] = x;
        }
}

// From "loopserve-p+lychee+pats" to three parts. 0, or -1 with the reason in s->err.
static int parts_parse(Session *s, const char *spec) {
    for (const char *name = spec; name; ) {
        size_t n = strcspn(name, "+");
        const Method *m = method_find(name, n);
        if (!m)
            return refuse(s, "--method: no method is called '%.*s' (see --list-methods)", (int)n,
                          name);
        if (part_add(s, m, spec)) return -1;
        name = name[n] ? name + n + 1 : NULL;
    }
    parts_sort(s);
    return 0;
}

// Opens every part, whose state is all zeros. The first part that has a budget sets it if the user
// gave none. 0, or -1 with the reason in s->err.
static int parts_begin(Session *s) {
    EACH_PART(s, p) {
        if (!s->budget) s->budget = p->m->budget;
        if (p->m->open && p->m->open(s, p->ms)) return -1;
    }
    return 0;
}

// Gives every part its state, and the session what the parts want together; then opens them.
static int parts_open(Session *s) {
    EACH_PART(s, p) {
        s->wants |= p->m->wants;
        if (p->m->rule) s->rule = p->m->rule;
        p->ms = xcalloc(1, p->m->state + 1);
    }
    return parts_begin(s);
}

// ---- sessions
// With -d cuda the session moves to the device. 0, or -1 with the reason in s->err. (-d auto has
// become cuda or cpu on the command line.)
static int on_device(Session *s) {
#ifdef KVCOMP_CUDA
    if (!strcmp(opt_str(s->opt, "device"), "cuda")) return device_open(s);
#endif
    (void)s;
    return 0;
}

// The budget the user asked for. A part's open hook may know better.
static void budget_options(Session *s) {
    s->budget = opt_int(s->opt, "budget");
    s->ratio = opt_given(s->opt, "ratio") ? opt_real(s->opt, "ratio") : -1;
}

// A session for this model, these options and this method; NULL, and the reason in err, if they do
// not fit.
static Session *session_try(const Config *c, const Weights *w, const Options *o, const char *method,
                            char err[512]) {
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

// The same, but the program ends (exit 2) when they do not fit.
Session *session_open(const Config *c, const Weights *w, const Options *o, const char *method) {
    char err[512];
    Session *s = session_try(c, w, o, method, err);
    if (!s) die(EXIT_USAGE, "%s", err);
    return s;
}

// Gives back everything a session holds. Rows go before the device that may hold them.
void session_close(Session *s) {
    if (!s) return;
    EACH_PART(s, p) {
        if (p->ms && p->m->close) p->m->close(s, p->ms);
        free(p->ms);
    }
    for (int i = 0; i < s->c->L * s->c->G; i++) head_free(s, &s->head[i]);
    if (KV_DEV(s)) device_close(s);
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        free(s->view[i].idx);
        free(s->view[i].near);
    }
    free(s->head);
    free(s->view);
    free(s->tok);
    free(s->logits);
    arena_free(s->scratch);
    free(s);
}

// Forgets the dialogue: closes every part and opens it again, and drops every row.
void session_reset(Session *s) {
    EACH_PART(s, p) {
        if (p->m->close) p->m->close(s, p->ms);
        memset(p->ms, 0, p->m->state);
    }
    for (int i = 0; i < s->c->L * s->c->G; i++) head_free(s, &s->head[i]);
    if (KV_DEV(s)) device_reset(s);
    view_all(s);

    s->n_tok = s->pos_next = s->turn = s->decoding = s->step = 0;
    s->n_sys = s->n_foot = s->n_head = 0;
    budget_options(s);
    s->alt = NULL;
    s->packing = NULL;
    s->made_for = NULL;
    s->pos_end = s->pos_extra = 0;
    memset(&s->clk, 0, sizeof s->clk);
    if (parts_begin(s)) die(EXIT_USAGE, "%s", s->err);
}

// ==================================================================================================== 5 STREAMINGLLM
// Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks. arXiv 2309.17453.
//
// The smallest method, and the one to copy for a new one. The first tokens of a text draw attention whatever they say:
// they are sinks. A model that keeps them and its most recent rows goes on fluently for ever, and everything between is
// dropped. A prefill is dense over the rows held.
//
//   keep row r of a head with N rows  iff  r < sink  or  r >= N - (B - sink)
//
// **Differs from the paper:**
//   - rows are dropped at the end of a prefill, not at every decoded token (D9, D14);
//   - rows keep their positions; --streaming-rerotate numbers them anew inside the cache, as the paper does.
// Options: --budget B, --sink, --streaming-rerotate. The method `window` is the same without sinks.

typedef struct {
    int sink;                   // first rows that are always kept
    int rerotate;               // 1: a row's position becomes its place in the cache
} Streaming;

// Reads the options of `window`: there are no sinks, so any budget is legal.
static int window_open(Session *s, void *ms) {
    Streaming *x = ms;
    x->rerotate = opt_int(s->opt, "streaming-rerotate");
    if (x->rerotate && s->c->windowed)
        return refuse(s, "--streaming-rerotate: this model's sliding windows count original positions");
    return 0;
}

static int streaming_open(Session *s, void *ms) {
    Streaming *x = ms;
    x->sink = opt_int(s->opt, "sink");
    if (window_open(s, ms)) return -1;
    if (s->ratio < 0 && s->budget <= x->sink)
        return refuse(s, "--budget %d leaves no recent row beside --sink %d", s->budget, x->sink);
    return 0;
}

// Drops rows of layer l at the end of a prefill. Every head holds the same rows.
static void streaming_commit(Session *s, void *ms, int l, const float *q, int T) {
    Streaming *x = ms;
    int B = budget_now(s), sink = min_int(x->sink, B);
    (void)q;
    (void)T;
    if (s->decoding || s->n_tok <= B) return;           // D9, D10
    if (l == s->c->L) {                                 // the pass is over: the next token stands behind the rows
        if (x->rerotate) s->pos_next = kv_longest(s, 0);
        return;
    }

    for (int g = 0; g < s->c->G; g++) {
        int N = kv_head(s, l, g)->len, n = 0;
        int *keep = scratch(s, (size_t)N * sizeof *keep);
        for (int r = 0; r < N; r++)
            if (r < sink || r >= N - (B - sink)) keep[n++] = r;
        kv_keep(s, l, g, keep, n);
        if (!x->rerotate) continue;
        for (int r = 0; r < n; r++) kv_repos(s, l, g, r, r);
    }
}

static const Opt streaming_opts[] = {
    { "streaming-rerotate", 'b', "0", "re-number positions inside the cache" },
    { NULL, 0, NULL, NULL },
};

const Method streaming_method = {
    .name   = "streaming",
    .paper  = "StreamingLLM, arXiv 2309.17453",
    .keeps  = "keeps the first --sink and the most recent rows, B in all",
    .budget = 1024,
    .uses   = "--sink 4",
    .opts   = streaming_opts,
    .role   = ROLE_SELECT,
    .evicts = 1,
    .state  = sizeof(Streaming),
    .open   = streaming_open,
    .commit = streaming_commit,
};

const Method window_method = {
    .name   = "window",
    .paper  = "streaming without sinks",
    .keeps  = "keeps the B most recent rows",
    .budget = 1024,
    .opts   = streaming_opts,
    .role   = ROLE_SELECT,
    .evicts = 1,
    .state  = sizeof(Streaming),
    .open   = window_open,
    .commit = streaming_commit,
};

// ---- TOVA
// Oren, Hassid, Yarden, Adi, Schwartz: Transformers are Multi-State RNNs. arXiv 2401.06104.
//
// The smallest method that looks at a query. Whenever a layer holds more than B rows, the rows go to which the last
// query attends least, in its mean over all heads: after a prefill as many as are too many, after a decode step one.
// All heads of a layer keep the same rows.
//
//   a[r] = sum over heads h of softmax_r(q_h . k_r / sqrt(D)), q the last query;   keep the B rows with the largest a
//
// **Differs from the paper:** nothing; a prompt is read whole and cut once, as in the authors' code.
// Options: --budget B.

static void tova_commit(Session *s, void *ms, int l, const float *q, int T) {
    (void)ms;
    if (l == s->c->L) return;
    int H = s->c->H, B = budget_now(s), N = kv_longest(s, l);
    if (N <= B) return;

    float *a = scratch(s, (size_t)H * N * sizeof *a);
    int *keep = scratch(s, (size_t)B * sizeof *keep);
    window_scores(s, l, q, T, 1, a);                    // a (H,N): one softmax row a head
    for (int h = 1; h < H; h++)                         // the first row becomes the sum of all
        for (int r = 0; r < N; r++) a[r] += a[(size_t)h * N + r];

    int n = top_k(a, N, B, keep);
    for (int g = 0; g < s->c->G; g++) kv_keep(s, l, g, keep, n);
}

const Method tova_method = {
    .name   = "tova",
    .paper  = "TOVA, arXiv 2401.06104",
    .keeps  = "keeps the B rows the last query attends to most, the same in all heads of a layer; in decode too",
    .budget = 1024,
    .role   = ROLE_SELECT,
    .wants  = KV_QUERY,
    .evicts = 1,
    .commit = tova_commit,
};

// ==================================================================================================== 6 BASELINES
// The methods that the five papers compare themselves with, each in a subsection that ends with its
// table entry. All of them compute a prefill densely over the rows held. All but q8 drop rows once,
// at the end of every turn's prefill (D9), and nothing in decode; only --h2o=stream drops rows in
// decode too.
//
// N is the number of tokens seen and B the budget: the rows a KV head may keep. While N <= B a
// method keeps everything, at equality too (D10). n is a number of rows: those a head holds, or
// those it may drop.

// ---- the chain that SnapKV, AdaKV and PyramidKV share
// The last w rows of a head always stay (D11). The rows before them are the candidates; `cap` of
// them stay.
//   1. window_scores   how much each query head's last w queries attend to every row, as a mean
//   2. join_heads      the scores of the R query heads of a KV head become one
//   3. pool_max        every candidate takes the largest score among its neighbours
//   4. top_k_rows      the `cap` candidates with the largest scores stay
// SnapKV, AdaKV and PyramidKV differ in the caps only. DiliLazyKV (section 13) pools before it
// joins, or does not join (D12).

typedef struct {
    int window;                 // w, --obs-window: the last queries, whose attention is the score
    int kernel;                 // --kernel, odd: width of the neighbourhood a score is pooled over
    int agg;                    // --gqa-agg, an AGG_*: how the query heads of a group become one
} Snap;

// The AGG_* that --gqa-agg names.
static int gqa_agg_option(const Session *s) {
    const char *agg = opt_str(s->opt, "gqa-agg");
    if (!strcmp(agg, "max")) return AGG_MAX;
    if (!strcmp(agg, "sum")) return AGG_SUM;
    return AGG_MEAN;
}

// Reads the options of the chain into x; `window` is the method's default for w (D13). Returns 0,
// or -1 with the reason in s->err. With --ratio there is no budget yet that could be too small for
// the window.
static int snap_options(Session *s, Snap *x, int window) {
    x->window = opt_given(s->opt, "obs-window") ? opt_int(s->opt, "obs-window") : window;
    x->kernel = opt_int(s->opt, "kernel");
    x->agg = gqa_agg_option(s);
    if (x->window < 1) return refuse(s, "--obs-window must be at least 1, found %d", x->window);
    if (x->kernel < 1 || x->kernel % 2 == 0)
        return refuse(s, "--kernel must be odd, found %d", x->kernel);
    if (s->ratio < 0 && s->budget <= x->window)
        return refuse(s, "--budget %d leaves no row beside --obs-window %d", s->budget, x->window);
    return 0;
}

// Does layer l drop rows now? Yes at the end of a prefill that has seen more than B tokens. The
// call with l == L ends the whole pass and belongs to no layer.
static int snap_due(const Session *s, int l, int B) {
    return !s->decoding && l < s->c->L && s->n_tok > B;
}

// The last rows that always stay: w of them, or B where --ratio makes B the smaller number.
static int snap_kept_window(const Snap *x, int B) {
    return min_int(x->window, B);
}

// The number of candidates of a head: its rows before the last w.
static int candidates(const KVHead *h, int w) {
    return max_int(h->len - w, 0);
}

// Link 2. out (n): the R rows of score (R,stride) become one, by their mean, maximum or sum.
static void join_heads(float *out, const float *score, int n, size_t stride, int R, int agg) {
    for (int j = 0; j < n; j++) {
        float joined = score[j];
        for (int r = 1; r < R; r++) {
            float x = score[r * stride + j];
            joined = agg == AGG_MAX ? fmaxf(joined, x) : joined + x;
        }
        out[j] = agg == AGG_MEAN ? joined / (float)R : joined;
    }
}

// Link 3. out[j] = max of x[t] over |t-j| <= width/2; out, x (n). Neighbours are neighbours in the
// list of rows a head holds, whatever their positions in the text (D11). The width may exceed n.
static void pool_max(float *out, const float *x, int n, int width) {
    for (int j = 0; j < n; j++) {
        int first = max_int(j - width / 2, 0);
        int last = j + min_int(width / 2, n - 1 - j);
        float top = x[first];
        for (int t = first + 1; t <= last; t++) top = fmaxf(top, x[t]);
        out[j] = top;
    }
}

// Links 1 to 3: the pooled scores of layer l's candidates, and their numbers n (G). q (T,H,D) are
// the queries of the pass; the last w rows of a head are no candidates. order is JOIN_POOL or
// POOL_JOIN, whose result is (G,N), or POOL_ONLY, whose result is (H,N); N = kv_longest. The result
// lies in scratch, in a device session on the device.
static float *pooled_scores(Session *s, const Snap *x, int l, const float *q, int T, int w,
                            int order, int *n) {
    int H = s->c->H, G = s->c->G, R = H / G;
    int agg = order == JOIN_POOL ? x->agg : AGG_MEAN;
    size_t N = kv_longest(s, l);
    for (int g = 0; g < G; g++) n[g] = candidates(kv_head(s, l, g), w);
    if (KV_DEV(s)) return pooled_scores_cuda(s, l, q, T, x->window, n, agg, x->kernel, order);

    float *score = scratch(s, H * N * sizeof(float));
    float *pooled = scratch(s, H * N * sizeof(float));
    float *joined = scratch(s, N * sizeof(float));
    window_scores(s, l, q, T, x->window, score);
    for (int g = 0; g < G; g++) {
        const float *from = score + g * R * N;
        if (order == JOIN_POOL) {
            join_heads(joined, from, n[g], N, R, agg);
            pool_max(pooled + g * N, joined, n[g], x->kernel);
            continue;
        }
        float *to = pooled + g * R * N;
        for (int r = 0; r < R; r++) pool_max(to + r * N, from + r * N, n[g], x->kernel);
        // The joined row overwrites rows of this group or of finished ones, each read before.
        if (order == POOL_JOIN) join_heads(pooled + g * N, to, n[g], N, R, agg);
    }
    return pooled;
}

// Link 4. For each of S rows of x (S,stride): the places of the k[i] largest of its first n[i]
// numbers, ascending, in idx (S,per), and how many there are in count (S). n, k (S). x lies where
// the cache lies; the rest is on the host.
static void top_k_rows(Session *s, const float *x, int S, size_t stride, const int *n,
                       const int *k, int *idx, int per, int *count) {
    if (KV_DEV(s)) {
        top_k_rows_cuda(s, x, S, stride, n, k, idx, per, count);
        return;
    }
    #pragma omp parallel for schedule(static) if (S > 1 && n[0] > 64)
    for (int i = 0; i < S; i++) count[i] = top_k(x + i * stride, n[i], k[i], idx + (size_t)i * per);
}

// The end of the chain: each KV head g of layer l keeps its cap[g] best candidates by score (G,N),
// and every row behind its n[g] candidates. n, cap (G).
static void snap_keep(Session *s, int l, const float *score, const int *n, const int *cap) {
    int G = s->c->G, N = kv_longest(s, l);
    int *keep = scratch(s, (size_t)G * N * sizeof(int));
    int *kept = scratch(s, (size_t)G * sizeof(int));
    top_k_rows(s, score, G, N, n, cap, keep, N, kept);
    for (int g = 0; g < G; g++) {
        int *to = keep + (size_t)g * N;
        for (int r = n[g]; r < kv_head(s, l, g)->len; r++) to[kept[g]++] = r;
        kv_keep(s, l, g, to, kept[g]);
    }
}

// ---- SNAPKV
// Li et al.: SnapKV: LLM Knows What You Are Looking for Before Generation. arXiv 2404.14469.
// What the last queries of a prompt look at is what its answer will look at. So every KV head keeps
// the rows to which the last w queries attend most, in their neighbourhoods, and those last w rows.
//   a_t     = mean over the last w queries q_i, and over the group, of softmax(q_i K^T / sqrt(D))_t
//   score_c = max over |t-c| <= kernel/2 of a_t
//   cap_g   = B - w
// **Differs from the paper:** a KV head keeps one set, not one set a query head (scores are means
// over the group); kernel 7, maximum, w 32; rows are dropped again at every turn's end, among all
// rows held.
// Options: --budget (1024), --obs-window (32), --kernel (7), --gqa-agg (mean).

// Reads the options of the chain, with w 32.
static int snapkv_open(Session *s, void *ms) {
    return snap_options(s, ms, 32);
}

// The end of a prefill: every KV head of layer l keeps B rows.
static void snapkv_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Snap *x = ms;
    int B = budget_now(s), w = snap_kept_window(x, B);
    if (!snap_due(s, l, B)) return;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)s->c->G * sizeof(int));
    int *cap = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    for (int g = 0; g < s->c->G; g++) cap[g] = B - w;
    snap_keep(s, l, score, n, cap);
    scratch_reset(s, mark);
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

// ---- ADAKV
// Feng et al.: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation.
// arXiv 2407.11550.
// A layer's budget goes where its scores are: a head whose scores are flat gets more rows than a head
// with a few high ones. The candidates of all heads compete, each weighted by the share of its head's
// scores that a plain budget keeps.
//   base    = B - w
//   share_g = (sum of the `base` best scores of head g) / (sum of all scores of head g)
//   cnt_g   = candidates of head g among the G base best of score * share
//   cap_g   = rint(0.8 cnt_g + floor(0.2 base)), at most the candidates there are
// **Differs from the paper** (D17): heads are KV heads; a layer drops rows iff its candidates
// exceed G base; what a short head leaves over is not given to another; ties go to the lower (head,
// row).
// Options: --budget (1024 a head, on average), --obs-window (32), --kernel (7), --gqa-agg (mean).

// score * share of every candidate, head after head: score (G,N), n (G) -> (sum of n), where score
// lies. Because the heads of a layer compete for rows, two devices must get the same shares. So the
// sums are of fixed-point numbers, whose order does not matter.
static float *adakv_shares(Session *s, const float *score, int N, const int *n, int base) {
    if (KV_DEV(s)) return adakv_shares_cuda(s, score, N, n, base);
    float *all = scratch(s, (size_t)s->c->G * N * sizeof(float)), *to = all;
    int *idx = scratch(s, (size_t)N * sizeof(int));
    for (int g = 0; g < s->c->G; g++) {
        const float *x = score + (size_t)g * N;
        int64_t best = 0, sum = 0;
        int k = top_k(x, n[g], base, idx);
        for (int i = 0; i < k; i++) best += fixed_mass(x[idx[i]]);
        for (int r = 0; r < n[g]; r++) sum += fixed_mass(x[r]);
        double share = sum > 0 ? (double)best / (double)sum : 0;                // share_g
        for (int r = 0; r < n[g]; r++) *to++ = sum > 0 ? (float)(x[r] * share) : 0;
    }
    return all;
}

// cap (G): how many candidates each KV head of layer l keeps. score (G,N); n (G) candidates.
static void adakv_caps(Session *s, int l, const float *score, const int *n, int base, int *cap) {
    int G = s->c->G, N = kv_longest(s, l);
    int total = 0, want = G * base, found;
    for (int g = 0; g < G; g++) total += n[g];
    int *idx = scratch(s, (size_t)want * sizeof(int));
    float *weighted = adakv_shares(s, score, N, n, base);
    top_k_rows(s, weighted, 1, 0, &total, &want, idx, want, &found);

    // idx ascends: head g's winners follow those of head g-1, and its candidates end at `end`.
    int i = 0, end = 0;
    for (int g = 0; g < G; g++) {
        int first = i;
        end += n[g];
        while (i < found && idx[i] < end) i++;
        int cnt = i - first;                                                    // cnt_g
        cap[g] = (int)rint(0.8 * cnt + base / 5);                               // cap_g
    }
}

// The end of a prefill: the KV heads of layer l share G B rows.
static void adakv_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Snap *x = ms;
    int B = budget_now(s), w = snap_kept_window(x, B);
    if (!snap_due(s, l, B)) return;
    long rows = 0;
    for (int g = 0; g < s->c->G; g++) rows += candidates(kv_head(s, l, g), w);
    if (rows <= (long)s->c->G * (B - w)) return;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)s->c->G * sizeof(int));
    int *cap = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    adakv_caps(s, l, score, n, B - w, cap);
    snap_keep(s, l, score, n, cap);
    scratch_reset(s, mark);
}

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

// ---- PYRAMIDKV
// Cai et al.: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling.
// arXiv 2406.02069.
// Lower layers spread their attention over many rows, upper layers gather it on a few. So the
// budget falls by the same step from each layer to the next, around the same mean.
//   base = B - w,  lo = base / 20,  hi = 2 base - lo
//   where hi > N - w:  hi = N - w,  lo = 2 base - hi
//   cap of layer l = hi - l (hi - lo) / (L - 1)
// **Differs from the paper** (D18): integers throughout, so the floored step can raise the mean
// above the budget by up to (L-1)/2 rows a layer; SnapKV when N < 2 base or the model has one
// layer; a KV head keeps one set.
// Options: --budget (1024 a head, on average), --obs-window (32), --kernel (7), --gqa-agg (mean).

// The cap of layer l of L, for N tokens seen.
static int pyramid_cap(int l, int L, int N, int B, int w) {
    int base = B - w, lo = base / 20, hi = 2 * base - lo;
    if (L == 1 || N < 2 * base) return base;
    if (hi >= N - w) {
        hi = N - w;
        lo = 2 * base - hi;
    }
    return hi - l * ((hi - lo) / (L - 1));
}

// The end of a prefill: every KV head of layer l keeps the layer's cap and the last w rows.
static void pyramidkv_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Snap *x = ms;
    int B = budget_now(s), w = snap_kept_window(x, B);
    if (!snap_due(s, l, B)) return;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)s->c->G * sizeof(int));
    int *cap = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    for (int g = 0; g < s->c->G; g++) cap[g] = pyramid_cap(l, s->c->L, s->n_tok, B, w);
    snap_keep(s, l, score, n, cap);
    scratch_reset(s, mark);
}

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

// ---- H2O
// Zhang et al.: H2O: Heavy-Hitter Oracle for Efficient Generative Inference. arXiv 2306.14048.
// A few rows, the heavy hitters, draw most of the attention. So a KV head keeps them beside the
// recent rows. The mass of a row is all attention it has drawn so far, from every query and every
// query head of its group (D15).
//   keep the last floor(B/2) rows, and of the rows before them the B - floor(B/2) of largest mass
// --h2o=stream also drops, in every decode step, the row of least mass outside the recent half, as
// the paper does.
// **Differs from the paper:** oneshot is the default; a prefill is dense over the rows held.
// Options: --budget (1024), --h2o (oneshot, stream).

typedef struct {
    int stream;                 // 1: --h2o=stream
    int B;                      // the budget at the last prefill's end, which decode steps keep to
} H2o;

// Reads --h2o. Returns 0, or -1 with the reason in s->err.
static int h2o_open(Session *s, void *ms) {
    H2o *x = ms;
    x->stream = !strcmp(opt_str(s->opt, "h2o"), "stream");
    if (s->budget < 1) return refuse(s, "--budget must be at least 1, found %d", s->budget);
    return 0;
}

// Under --h2o=stream every decode step moves rows, so no step repeats the one before.
static int h2o_steady(const Session *s, const void *ms) {
    const H2o *x = ms;
    (void)s;
    return !x->stream;
}

// keep: the `cap` best of rows [0,n) by score, and every row of [n,len), ascending. Returns their
// number.
static int keep_best(int *keep, const float *score, int n, int cap, int len) {
    int kept = top_k(score, n, cap, keep);
    for (int r = n; r < len; r++) keep[kept++] = r;
    return kept;
}

// The end of a prefill, and of every decode step under --h2o=stream: the KV heads of layer l drop
// rows.
static void h2o_commit(Session *s, void *ms, int l, const float *q, int T) {
    H2o *x = ms;
    (void)q;
    (void)T;
    if (!s->decoding) x->B = budget_now(s);
    if (s->decoding && !x->stream) return;
    if (l == s->c->L || s->n_tok <= x->B) return;
    size_t mark = scratch_mark(s);
    int recent = x->B / 2;
    int *keep = scratch(s, (size_t)kv_longest(s, l) * sizeof(int));
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        if (KV_DEV(s)) mass_fetch_cuda(s, h);
        int kept = keep_best(keep, h->mass, candidates(h, recent), x->B - recent, h->len);
        kv_keep(s, l, g, keep, kept);
    }
    scratch_reset(s, mark);
}

static const Opt h2o_opts[] = {
    { "h2o", 'c', "oneshot|stream", "drop rows at prefill ends only, or in every decode step too" },
    { NULL, 0, NULL, NULL },
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

// ---- EXPECTED ATTENTION
// Devoto, Jeblick, Jegou: Expected Attention: KV Cache Compression by Estimating Attention from
// Future Queries Distribution. arXiv 2510.00636.
// Queries before RoPE look Gaussian, with a mean mu and a covariance Sg of their own in every query
// head. So the attention that a key will draw from the next 512 positions can be written down, and
// the rows that will draw most stay.
//   mu <- Rbar mu,   Sg <- Rbar Sg Rbar^T,   Rbar = mean RoPE matrix of positions N .. N+511
//   z_c     = mu . k_c / sqrt(D) + k_c^T Sg k_c / (2 D)
//   score_c = (mean over the group of softmax_c(z)) * |v_c|
// The rows of the first --sink tokens always stay and count inside B. The candidates, over which
// the softmax runs too, are the other rows held. mu and Sg (divided by the count, not by the count
// less one) are those of all queries that the prefills of the dialogue have fed at positions >=
// --sink (D19).
// **Differs from the paper:** applied at every turn's end; a query once counted is not taken back
// when tokens are truncated.
// Options: --budget (1024), --sink (4).

enum { FUTURE = 512 };          // positions Rbar is the mean of

typedef struct {
    int sink;                   // --sink
    long *n;                    // (L) queries counted
    double *sum;                // (L,H,D) sum of q; the first prefill makes it, where q lies
    double *outer;              // (L,H,D,D) sum of q q^T, in the same memory behind sum
} Expected;

// Reads --sink. Returns 0, or -1 with the reason in s->err.
static int expected_open(Session *s, void *ms) {
    Expected *x = ms;
    x->sink = opt_int(s->opt, "sink");
    if (x->sink < 0) return refuse(s, "--sink must not be negative, found %d", x->sink);
    if (s->ratio < 0 && s->budget <= x->sink)
        return refuse(s, "--budget %d leaves no row beside --sink %d", s->budget, x->sink);
    x->n = xcalloc(s->c->L, sizeof(long));
    return 0;
}

// Gives the sums back.
static void expected_close(Session *s, void *ms) {
    Expected *x = ms;
    (void)s;
    free(x->n);
    if (KV_DEV(s)) near_free_cuda((char *)x->sum);
    else free(x->sum);
}

// The bytes of n, sum and outer, whether or not a prefill has made the sums yet.
static size_t expected_bytes(const Session *s, const void *ms) {
    size_t L = s->c->L, H = s->c->H, D = s->c->D;
    (void)ms;
    return L * sizeof(long) + L * H * D * (D + 1) * sizeof(double);
}

// Adds the queries q (T,H,D) of this pass at positions >= sink to sum (H,D) and outer (H,D,D).
static void moments_add(const Session *s, double *sum, double *outer, const float *q, int T,
                        int sink) {
    int H = s->c->H, D = s->c->D;
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        double *a = sum + (size_t)h * D, *b = outer + (size_t)h * D * D;
        for (int t = 0; t < T; t++) {
            const float *p = q + ((size_t)t * H + h) * D;
            if (s->tok[s->base + t].pos < sink) continue;
            for (int i = 0; i < D; i++) {
                a[i] += p[i];
                for (int j = 0; j < D; j++) b[(size_t)i * D + j] += (double)p[i] * p[j];
            }
        }
    }
}

// Counts the queries of a prefill, which are not rotated yet. q (T,H,D). The sums of all layers are
// made at once.
static void expected_project(Session *s, void *ms, int l, const float *q, const float *k,
                             const float *v, int T) {
    Expected *x = ms;
    int H = s->c->H, D = s->c->D;
    size_t n = (size_t)s->c->L * H * D;
    (void)k;
    (void)v;
    if (s->decoding) return;
    if (!x->sum) {
        if (KV_DEV(s)) x->sum = (double *)near_zero_cuda(n * (D + 1) * sizeof(double));
        else x->sum = xcalloc(n * (D + 1), sizeof(double));
        x->outer = x->sum + n;
    }
    for (int t = 0; t < T; t++)
        if (s->tok[s->base + t].pos >= x->sink) x->n[l]++;
    double *sum = x->sum + (size_t)l * H * D, *outer = x->outer + (size_t)l * H * D * D;
    if (KV_DEV(s)) moments_add_cuda(s, sum, outer, q, T, x->sink);
    else moments_add(s, sum, outer, q, T, x->sink);
}

// Always 1: neither project nor commit does anything in a decode step.
static int expected_steady(const Session *s, const void *ms) {
    (void)s;
    (void)ms;
    return 1;
}

// Rbar, as cs (D): for the D/2 frequencies the means of cos over the next FUTURE positions, then
// those of sin.
static void expected_rope(const Session *s, double *cs) {
    int D = s->c->D;
    for (int i = 0; i < D / 2; i++) {
        double cosine = 0, sine = 0;
        for (int p = s->n_tok; p < s->n_tok + FUTURE; p++) {
            cosine += cos(p * s->w->inv_freq64[i]);
            sine += sin(p * s->w->inv_freq64[i]);
        }
        cs[i] = cosine * s->w->rope_scale / FUTURE;
        cs[D / 2 + i] = sine * s->w->rope_scale / FUTURE;
    }
}

// Multiplies by Rbar, in place, the vector whose D elements are x[0], x[step], x[2 step], ...
static void expected_turn(double *x, size_t step, int D, const double *cs) {
    for (int i = 0; i < D / 2; i++) {
        double a = x[i * step], b = x[(i + D / 2) * step];
        x[i * step] = a * cs[i] - b * cs[D / 2 + i];
        x[(i + D / 2) * step] = b * cs[i] + a * cs[D / 2 + i];
    }
}

// mu (D) and cov (D,D): mean and covariance of one query head's n queries as they will stand at
// future positions. sum (D), outer (D,D) are over the n queries; cs (D) from expected_rope; tmp
// (D,D+1) is room.
static void expected_moments(double n, const double *sum, const double *outer, int D,
                             const double *cs, float *mu, float *cov, double *tmp) {
    double *Sg = tmp, *mean = tmp + (size_t)D * D;
    for (int i = 0; i < D; i++) mean[i] = sum[i] / n;
    for (int i = 0; i < D; i++) {
        size_t row = (size_t)i * D;
        for (int j = 0; j < D; j++) Sg[row + j] = outer[row + j] / n - mean[i] * mean[j];
    }
    for (int i = 0; i < D; i++) expected_turn(Sg + i, D, D, cs);                // columns: Rbar Sg
    for (int i = 0; i < D; i++) expected_turn(Sg + (size_t)i * D, 1, D, cs);    // rows: .. Rbar^T
    expected_turn(mean, 1, D, cs);                                              // Rbar mu
    for (int i = 0; i < D; i++) mu[i] = (float)mean[i];
    for (size_t i = 0; i < (size_t)D * D; i++) cov[i] = (float)Sg[i];
}

// z_c for the rows of a head from n0 on, as one query head sees them. z (N), of which [n0,len) is
// written; mu (D), cov (D,D); buf is room for 2 KV_TILE D + KV_TILE numbers.
static void expected_exponents(const Session *s, const KVHead *hd, int n0, const float *mu,
                               const float *cov, float *buf, float *z) {
    int D = s->c->D;
    float *k = buf, *y = k + (size_t)KV_TILE * D, *linear = y + (size_t)KV_TILE * D;
    for (int r = n0; r < hd->len; r += KV_TILE) {
        int m = min_int(hd->len - r, KV_TILE);
        kv_load_k(s, hd, NULL, r, m, k);
        attn_scores(linear, mu, k, 1, m, D, 1 / sqrtf((float)D));           // mu . k / sqrt(D)
        attn_scores(y, cov, k, D, m, D, 1 / (2 * (float)D));                // y (D,m) = Sg k^T / 2D
        for (int j = 0; j < m; j++) {
            double a = linear[j];
            for (int d = 0; d < D; d++) a += (double)k[(size_t)j * D + d] * y[(size_t)d * m + j];
            z[r + j] = (float)a;                                            // z_c
        }
    }
}

// out (N): |v|^2 of every row of a head. v (KV_TILE,D) is room.
static void value_squares(const Session *s, const KVHead *hd, float *v, float *out) {
    int D = s->c->D;
    for (int r = 0; r < hd->len; r += KV_TILE) {
        int m = min_int(hd->len - r, KV_TILE);
        kv_load_v(s, hd, NULL, r, m, v);
        for (int j = 0; j < m; j++) out[r + j] = dot_f32(v + (size_t)j * D, v + (size_t)j * D, D);
    }
}

// mu (H,D) and cov (H,D,D) of layer l's query heads at future positions, on the host.
static void expected_queries(Session *s, const Expected *x, int l, float *mu, float *cov) {
    int H = s->c->H, D = s->c->D;
    size_t n = (size_t)H * D;
    double count = x->n[l] ? (double)x->n[l] : 1;
    double *cs = scratch(s, (size_t)D * sizeof(double));
    double *tmp = scratch(s, (size_t)n_threads() * D * (D + 1) * sizeof(double));
    double *sum = x->sum + (size_t)l * n, *outer = x->outer + (size_t)l * n * D;
    if (KV_DEV(s)) {
        double *copy = scratch(s, n * (D + 1) * sizeof(double));
        bytes_load_cuda(copy, sum, n * sizeof(double));
        bytes_load_cuda(copy + n, outer, n * D * sizeof(double));
        sum = copy;
        outer = copy + n;
    }
    expected_rope(s, cs);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        size_t at = (size_t)h * D;
        double *own = tmp + (size_t)thread_id() * D * (D + 1);
        expected_moments(count, sum + at, outer + at * D, D, cs, mu + at, cov + at * D, own);
    }
}

// p (H,N): for each query head the softmax of z over its candidates, the rows from sink[g] on; the
// rows before are not written. sq (G,N): |v|^2 of the rows. sink (G). Both are on the host.
static void expected_scores(Session *s, const Expected *x, int l, const int *sink, float *p,
                            float *sq, int N) {
    int H = s->c->H, D = s->c->D, R = H / s->c->G;
    size_t n = (size_t)H * D, room = 2 * (size_t)KV_TILE * D + KV_TILE;
    float *mu = scratch(s, n * (D + 1) * sizeof(float)), *cov = mu + n;
    float *buf = scratch(s, n_threads() * room * sizeof(float));
    expected_queries(s, x, l, mu, cov);
    if (KV_DEV(s)) expected_scores_cuda(s, l, mu, cov, p, sq, N);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        const KVHead *hd = kv_head(s, l, h / R);
        int n0 = sink[h / R];
        float *z = p + (size_t)h * N, *own = buf + thread_id() * room;
        if (!KV_DEV(s)) {
            expected_exponents(s, hd, n0, mu + (size_t)h * D, cov + (size_t)h * D * D, own, z);
            if (h % R == 0) value_squares(s, hd, own, sq + (size_t)(h / R) * N);
        }
        float max = -INFINITY, sum = 0;
        for (int r = n0; r < hd->len; r++) max = fmaxf(max, z[r]);
        exp_shift(z + n0, max, hd->len - n0, &sum);
        for (int r = n0; r < hd->len; r++) z[r] /= sum;
    }
}

// The number of rows of a head that hold the first `sink` tokens of the dialogue.
static int sink_rows(const KVHead *h, int sink) {
    int n = 0;
    while (n < h->len && h->src[n] < sink) n++;
    return n;
}

// The end of a prefill: every KV head of layer l keeps its sinks and the candidates with the best
// scores, B in all.
static void expected_commit(Session *s, void *ms, int l, const float *q, int T) {
    Expected *x = ms;
    int B = budget_now(s), G = s->c->G, R = s->c->H / G;
    (void)q;
    (void)T;
    if (s->decoding || l == s->c->L || s->n_tok <= B) return;
    size_t mark = scratch_mark(s);
    int N = kv_longest(s, l);
    int *keep = scratch(s, (size_t)(N + 1) * sizeof(int));
    int *sink = scratch(s, (size_t)G * sizeof(int));
    float *p = scratch(s, (size_t)s->c->H * N * sizeof(float));
    float *score = scratch(s, (size_t)N * sizeof(float));
    float *sq = scratch(s, (size_t)G * N * sizeof(float));
    for (int g = 0; g < G; g++) sink[g] = sink_rows(kv_head(s, l, g), x->sink);
    expected_scores(s, x, l, sink, p, sq, N);
    for (int g = 0; g < G; g++) {
        int n0 = sink[g], n = kv_head(s, l, g)->len - n0, first = min_int(n0, B);
        join_heads(score, p + (size_t)g * R * N + n0, n, N, R, AGG_MEAN);
        for (int r = 0; r < n; r++) score[r] *= sqrtf(sq[(size_t)g * N + n0 + r]);      // score_c
        int kept = top_k(score, n, B - first, keep + first);
        for (int i = 0; i < first; i++) keep[i] = i;
        for (int i = 0; i < kept; i++) keep[first + i] += n0;
        kv_keep(s, l, g, keep, first + kept);
    }
    scratch_reset(s, mark);
}

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

// ---- Q8
// The plain way to halve a cache, after llama.cpp's q8_0: nothing is dropped, but every row is
// stored in blocks of 32 values, each an 8-bit integer, with one f16 scale a block. The format
// itself is q8_0 in section 2.
//   value i of a block = scale * integer i,   34 bytes for 32 values: 8.5 bits a value
// Options: none. The method sets -ctk and -ctv, so it refuses them.

// Chooses q8_0 for keys and values. Returns 0, or -1 with the reason in s->err.
static int q8_open(Session *s, void *ms) {
    (void)ms;
    if (opt_given(s->opt, "ctk") || opt_given(s->opt, "ctv"))
        return refuse(s, "q8: sets -ctk and -ctv to q8_0 itself, leave them out");
    s->fk = format_find("q8_0");
    s->fv = s->fk;
    return 0;
}

const Method q8_method = {
    .name    = "q8",
    .paper   = "blocks of 32 values with one f16 scale, as llama.cpp's q8_0",
    .keeps   = "keeps every row at 8.5 bits an element",
    .limits  = "sets -ctk and -ctv itself",
    .role    = ROLE_STORE,
    .open    = q8_open,
};

// ==================================================================================================== 7 SPARSE PREFILL BASELINES
// Prefill attention over lines, and three methods that fix the lines beforehand. A head holds n
// rows; the last of them, p0..n-1, are the rows of this pass, whose queries attend. Think of a
// matrix of cells: query row r attends to column c <= r in the cell (r,c). A vertical c is the
// column c. A slash o is the diagonal of the cells (r, r-o), o its offset. Row r of a head with
// verticals V and slashes S attends, with one softmax, to
//   M(r) = { c in V : c <= r }  u  { r-o : o in S, o <= r }
// in the head's own row numbers (D39). Under tile64 the slashes are rounded up to what a GPU block
// of 64 rows reads: whole ranges of columns (block_index).
//   A-shape      the first columns and the nearest offsets
//   Tri-shape    the same, and the last rows of a turn see everything
//   MInference   the columns and offsets to which the last 64 rows attend most; tile64
// LoopServe (section 9) chooses its lines anew in every prefill and uses the same code.

// ---- sets of lines
// A set of columns or offsets is a bit set (Lines, in kvcomp.h): bit i stands in word i / 64.

typedef struct { int lo, hi; } LineRange;       // the numbers lo..hi-1

enum { LINE_BLOCK = 64 };       // query rows computed together, counted from p0; at most Q_BLOCK

// Is bit i set?
static int bit_get(const uint64_t *b, int i) {
    return (int)(b[i >> 6] >> (i & 63) & 1);
}

// Sets bit i.
static void bit_set(uint64_t *b, int i) {
    b[i >> 6] |= (uint64_t)1 << (i & 63);
}

// list: the set bits of b (n bits), ascending. Returns their number; with list NULL it only counts.
static int bit_list(const uint64_t *b, int n, int *list) {
    int count = 0;
    for (int w = 0; w < (n + 63) / 64; w++) {
        for (uint64_t u = b[w]; u; u &= u - 1) {        // each step clears the lowest set bit of u
            if (list) list[count] = w * 64 + __builtin_ctzll(u);
            count++;
        }
    }
    return count;
}

// run: the maximal runs of set bits of b (n bits), ascending. Returns their number.
static int bit_runs(const uint64_t *b, int n, LineRange *run) {
    int count = 0, i = 0;
    while (i < n) {
        if (!b[i >> 6]) {                               // no bit up to the end of this word
            i = (i | 63) + 1;
            continue;
        }
        int end = i;
        while (end < n && bit_get(b, end)) end++;
        if (end > i) run[count++] = (LineRange){ i, end };
        i = end + 1;
    }
    return count;
}

// Takes every line out of a.
static void lines_clear(Lines *a) {
    memset(a->v, 0, bit_bytes(a->n));
    memset(a->s, 0, bit_bytes(a->n));
}

// Lines (H) for the query heads of layer l, without a line yet, in scratch. n is the number of rows
// held now, the T rows of this pass included.
static Lines *lines_new(Session *s, int l, int T) {
    int H = s->c->H, R = H / s->c->G;
    Lines *a = scratch(s, (size_t)H * sizeof *a);
    for (int h = 0; h < H; h++) {
        int n = kv_head(s, l, h / R)->len;
        uint64_t *v = scratch(s, bit_bytes(n));
        uint64_t *o = scratch(s, bit_bytes(n));
        a[h] = (Lines){ .n = n, .p0 = n - T, .v = v, .s = o };
        lines_clear(&a[h]);
    }
    return a;
}

// The cells of vertical x. Slash x has as many.
static long line_len(int x, int p0, int n) {
    return n - max_int(x, p0);
}

// What the 64 rows from p0+b on read under tile64: disjoint ascending ranges of columns, and in
// cols (n_cols) the single columns outside of them, which all lie left of the block (a column
// inside the block lies in the range of offset 0). run (n_run) are the runs of S, v (nv) the
// columns of V, both ascending. Returns the number of ranges.
static int block_index(const Lines *a, int b, const LineRange *run, int n_run, const int *v, int nv,
                       LineRange *range, int *cols, int *n_cols) {
    int start = a->p0 + b, end = min_int(start + LINE_BLOCK, a->n);
    int k = 0;

    // At the offsets lo..hi-1 of a run, the rows start..end-1 see the columns from start-hi+1 to
    // end-lo-1. Offsets are walked downwards, so columns come upwards, and a range that touches the
    // one before extends it.
    for (int j = n_run - 1; j >= 0; j--) {
        if (run[j].lo >= end) continue;
        int lo = max_int(start - run[j].hi + 1, 0), hi = end - run[j].lo;
        if (k && lo <= range[k - 1].hi) range[k - 1].hi = hi;
        else range[k++] = (LineRange){ lo, hi };
    }

    // Verticals that no range covers; `at` is the first range that ends behind the vertical.
    int at = 0;
    *n_cols = 0;
    for (int j = 0; j < nv && v[j] < start; j++) {
        while (at < k && range[at].hi <= v[j]) at++;
        if (at == k || v[j] < range[at].lo) cols[(*n_cols)++] = v[j];
    }
    return k;
}

// ---- the plan of one head: bands of offsets, single runs, verticals
// Chosen offsets that stand close together are computed as one band: all columns that its offsets
// reach are scored, and the cells at offsets not chosen are masked. The other offsets are computed
// diagonal by diagonal: every cell reads its own rows, which costs LONE_CELL times as much as a
// cell of a band.

enum { LONE_CELL = 8 };

typedef struct {
    int lo, hi;                 // the offsets lo..hi-1
    int used;                   // how many of them are chosen
    int run0, run1;             // they are the runs run0..run1-1
} LineBand;

typedef struct {
    const Lines *line;
    LineRange *run;             // (n_run) runs of S; where lines are exact, those in no band
    int n_run;
    int *v, nv;                 // (nv) columns of V
    float *vertical_k;          // (nv,D) their keys, side by side; exact only
    float *vertical_v;          // (nv,D) their values
    LineBand *band;             // (n_band) exact only
    int n_band;
    float *miss;                // (n) exact only; miss[n-1-o]: 0 if offset o is chosen, else -INFINITY
} LinePlan;

// The columns that a block of LINE_BLOCK rows reads of a band.
static int band_width(const LineBand *b) {
    return b->hi - b->lo + LINE_BLOCK - 1;
}

// Is the band cheaper as a whole than diagonal by diagonal?
static int band_whole(const LineBand *b) {
    return band_width(b) <= LONE_CELL * b->used;
}

// The cost of the band, in cells a row, in the cheaper way.
static int band_cost(const LineBand *b) {
    return band_whole(b) ? band_width(b) : LONE_CELL * b->used;
}

// Makes bands of the runs: neighbours join as long as that costs no more. Those that are cheaper as
// a whole become p->band; the runs of the others stay in p->run. A run of ten offsets or more
// always becomes part of a band.
static void plan_bands(LinePlan *p) {
    LineBand *band = p->band;
    int joined = 0;
    for (int j = 0; j < p->n_run; j++) {
        LineBand one = { p->run[j].lo, p->run[j].hi, p->run[j].hi - p->run[j].lo, j, j + 1 };
        if (joined) {
            LineBand *before = &band[joined - 1];
            LineBand both = { before->lo, one.hi, before->used + one.used, before->run0, j + 1 };
            if (band_cost(&both) <= band_cost(before) + band_cost(&one)) {
                *before = both;
                continue;
            }
        }
        band[joined++] = one;
    }

    int whole = 0, lone = 0;
    for (int j = 0; j < joined; j++) {
        if (band_whole(&band[j])) {
            band[whole++] = band[j];
            continue;
        }
        for (int r = band[j].run0; r < band[j].run1; r++) p->run[lone++] = p->run[r];
    }
    p->n_band = whole;
    p->n_run = lone;
}

// The plan of one head with lines a, in scratch. K, V (n,D): the unpacked rows of its KV head. A
// dense head needs none.
static LinePlan plan_new(Session *s, const Lines *a, const float *K, const float *V) {
    LinePlan p = { .line = a };
    size_t D = s->c->D, row = D * sizeof(float);
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
    p.vertical_k = scratch(s, p.nv * row);
    p.vertical_v = scratch(s, p.nv * row);
    #pragma omp parallel for schedule(static) if (worth_threads((size_t)p.nv * D))
    for (int j = 0; j < p.nv; j++) {
        memcpy(p.vertical_k + j * D, K + p.v[j] * D, row);
        memcpy(p.vertical_v + j * D, V + p.v[j] * D, row);
    }
    return p;
}

// ---- one block of query rows of one head
// Every fold_ function scores some columns of the block, masks the cells that do not belong to its
// lines, and folds the rest into the running softmax of the tile (section 3).

typedef struct {
    Tile *t;
    const float *K, *V;         // (n,D) the unpacked rows of the KV head
    int D;
    int m, r0;                  // the block is the rows r0..r0+m-1
    int first[LINE_BLOCK];      // (m) first row each query may see: 0, or where its window begins
} RowBlock;

// The tile's scores (m,n): the block's queries against the keys k (n,D), not masked.
static void block_scores(RowBlock *b, const float *k, int n) {
    attn_scores(b->t->sc, b->t->q, k, b->m, n, b->D, 1 / sqrtf((float)b->D));
}

// Folds in the columns [lo,hi). Without a band, row r sees those up to itself. With a band of the
// plan p, row r sees the columns r-o for the chosen offsets o of the band.
static void fold_range(RowBlock *b, int lo, int hi, const LinePlan *p, const LineBand *band) {
    int gaps = band && band->used < band->hi - band->lo;
    for (int c = lo; c < hi; c += KV_TILE) {
        int n = min_int(hi - c, KV_TILE);
        block_scores(b, b->K + (size_t)c * b->D, n);
        for (int i = 0; i < b->m; i++) {
            float *sc = b->t->sc + (size_t)i * n;
            int r = b->r0 + i;
            // Row r sees columns [from,to).
            int from = max_int(band ? r - band->hi + 1 : 0, b->first[i]);
            int to = r + 1 - (band ? band->lo : 0);
            for (int j = 0; j < n && c + j < from; j++) sc[j] = -INFINITY;
            for (int j = max_int(to - c, 0); j < n; j++) sc[j] = -INFINITY;
            if (!gaps || to <= c) continue;
            const float *miss = p->miss + (p->line->n - 1 - (r - c));   // miss[j]: offset r - (c + j)
            int end = min_int(to - c, n);
            for (int j = max_int(from - c, 0); j < end; j++) sc[j] += miss[j];
        }
        tile_fold(b->t, b->m, n, b->D, b->V + (size_t)c * b->D);
    }
}

// Folds in the n <= KV_TILE single columns c (n), whose keys and values are gathered in k, v (n,D).
// With a given, a cell that lies on a chosen slash of a is left out, so that it does not count
// twice.
static void fold_columns(RowBlock *b, const int *c, int n, const float *k, const float *v,
                         const Lines *a) {
    block_scores(b, k, n);
    for (int i = 0; i < b->m; i++) {
        float *sc = b->t->sc + (size_t)i * n;
        for (int j = 0; j < n; j++) {
            int o = b->r0 + i - c[j];
            if (o < 0 || c[j] < b->first[i] || (a && bit_get(a->s, o))) sc[j] = -INFINITY;
        }
    }
    tile_fold(b->t, b->m, n, b->D, v);
}

// Of the columns that row i of the block reaches at the offsets of run it sees [*lo,*hi), maybe
// none. Returns the column of the run's first cell, which may be negative.
static int run_columns(const RowBlock *b, int i, const LineRange *run, int *lo, int *hi) {
    int r = b->r0 + i, first = r - run->hi + 1;
    *lo = max_int(first, b->first[i]);
    *hi = max_int(r - run->lo + 1, *lo);
    return first;
}

// The tile's scores (m,n) of the runs run[0..n_run-1], n offsets in all: a row has its cells run
// after run, and -INFINITY where it sees nothing. Run by run and not row by row, so that the keys
// read follow each other.
static void runs_score(RowBlock *b, const LineRange *run, int n_run, int n) {
    Tile *t = b->t;
    float scale = 1 / sqrtf((float)b->D);
    int at = 0;
    for (int j = 0; j < n_run; j++) {
        int width = run[j].hi - run[j].lo;
        for (int i = 0; i < b->m; i++) {
            int lo, hi, first = run_columns(b, i, &run[j], &lo, &hi);
            const float *query = t->q + (size_t)i * b->D, *key = b->K + (size_t)lo * b->D;
            float *sc = t->sc + (size_t)i * n + at;
            for (int c = 0; c < width; c++) sc[c] = -INFINITY;
            if (hi > lo) attn_scores(sc + (lo - first), query, key, 1, hi - lo, b->D, scale);
        }
        at += width;
    }
}

// Adds the values of the same cells, weighted by the probabilities that runs_score and tile_fold
// left in the tile.
static void runs_mix(RowBlock *b, const LineRange *run, int n_run, int n) {
    Tile *t = b->t;
    int at = 0;
    for (int j = 0; j < n_run; j++) {
        for (int i = 0; i < b->m; i++) {
            int lo, hi, first = run_columns(b, i, &run[j], &lo, &hi);
            const float *p = t->sc + (size_t)i * n + at + (lo - first);
            attn_mix(t->acc + (size_t)i * b->D, p, b->V + (size_t)lo * b->D, 1, hi - lo, b->D);
        }
        at += run[j].hi - run[j].lo;
    }
}

// Folds in single runs of offsets, as many at a time as have at most KV_TILE cells a row. Each run
// alone has fewer.
static void fold_runs(RowBlock *b, const LineRange *run, int n_run) {
    int begin = 0;
    while (begin < n_run) {
        int end = begin, n = 0;
        while (end < n_run && n + run[end].hi - run[end].lo <= KV_TILE) {
            n += run[end].hi - run[end].lo;
            end++;
        }
        runs_score(b, run + begin, end - begin, n);
        tile_fold(b->t, b->m, n, b->D, NULL);           // maximum, sum, scores into probabilities
        runs_mix(b, run + begin, end - begin, n);
        begin = end;
    }
}

// Attention of the block over exactly the cells of its lines: bands, then single runs, then
// verticals.
static void block_exact(RowBlock *b, const LinePlan *p) {
    const Lines *a = p->line;
    int last = b->r0 + b->m - 1, n_run = p->n_run;
    for (int j = 0; j < p->n_band && p->band[j].lo <= last; j++) {
        const LineBand *d = &p->band[j];
        fold_range(b, max_int(b->r0 - d->hi + 1, 0), last - d->lo + 1, p, d);
    }
    while (n_run && p->run[n_run - 1].lo > last) n_run--;       // no row reaches so far back
    fold_runs(b, p->run, n_run);
    for (int j = 0; j < p->nv && p->v[j] <= last; j += KV_TILE) {
        size_t at = (size_t)j * b->D;
        int n = min_int(p->nv - j, KV_TILE);
        fold_columns(b, p->v + j, n, p->vertical_k + at, p->vertical_v + at, a);
    }
}

// Attention of the block over what a GPU block would read of its lines (tile64). range, cols (n)
// are room.
static void block_tiles(RowBlock *b, const LinePlan *p, LineRange *range, int *cols) {
    const Lines *a = p->line;
    int D = b->D, n_cols;
    size_t row = (size_t)D * sizeof(float);
    int n_range = block_index(a, b->r0 - a->p0, p->run, p->n_run, p->v, p->nv, range, cols, &n_cols);
    for (int j = 0; j < n_range; j++) fold_range(b, range[j].lo, range[j].hi, NULL, NULL);
    for (int j = 0; j < n_cols; j += KV_TILE) {
        int n = min_int(n_cols - j, KV_TILE);
        for (int i = 0; i < n; i++) {
            memcpy(b->t->k + (size_t)i * D, b->K + (size_t)cols[j + i] * D, row);
            memcpy(b->t->v + (size_t)i * D, b->V + (size_t)cols[j + i] * D, row);
        }
        fold_columns(b, cols + j, n, b->t->k, b->t->v, NULL);
    }
}

// Sets b->first. A row lies outside the sliding window by its token's position, as kv_visible says.
// Positions rise with the rows, so the window's first row only moves on from query to query.
static void window_starts(const Session *s, int l, const KVHead *hd, RowBlock *b) {
    int w = layer_window(s, l), c = 0;
    for (int i = 0; i < b->m; i++) {
        int pos = s->tok[hd->src[b->r0 + i]].pos;
        while (w && s->tok[hd->src[c]].pos <= pos - w) c++;
        b->first[i] = c;
    }
}

// ---- all heads of a layer

// Unpacks every row of a head into K, V (n,D).
static void rows_unpack(const Session *s, const KVHead *hd, float *K, float *V) {
    size_t D = s->c->D;
    #pragma omp parallel for schedule(static) if (worth_threads(hd->len * D))
    for (int r = 0; r < hd->len; r += KV_TILE) {
        int m = min_int(hd->len - r, KV_TILE);
        kv_load_k(s, hd, NULL, r, m, K + r * D);
        kv_load_v(s, hd, NULL, r, m, V + r * D);
    }
}

// Attention of the R query heads of KV head g over their lines (H). out, q (T,H,D). The blocks of
// all heads are shared out among the threads, those with the longest rows first, so that the
// threads finish together.
static void group_attend(Session *s, int l, int g, const Lines *lines, float *out, const float *q,
                         int T, Tile *tiles) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G;
    int blocks = (T + LINE_BLOCK - 1) / LINE_BLOCK;
    const KVHead *hd = kv_head(s, l, g);
    size_t mark = scratch_mark(s), n = hd->len;
    float *K = scratch(s, n * D * sizeof(float)), *V = scratch(s, n * D * sizeof(float));
    LinePlan *plan = scratch(s, (size_t)R * sizeof *plan);
    LineRange *range = scratch(s, (size_t)n_threads() * n * sizeof *range);
    int *cols = scratch(s, (size_t)n_threads() * n * sizeof *cols);
    rows_unpack(s, hd, K, V);
    for (int r = 0; r < R; r++) plan[r] = plan_new(s, &lines[g * R + r], K, V);
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)T * n * R * D))
    for (int item = R * blocks - 1; item >= 0; item--) {
        const LinePlan *p = &plan[item % R];
        int h = g * R + item % R, t0 = item / R * LINE_BLOCK, m = min_int(T - t0, LINE_BLOCK);
        size_t own = thread_id();
        Tile *t = &tiles[own];
        RowBlock b = { .t = t, .K = K, .V = V, .D = D, .m = m, .r0 = hd->len - T + t0 };
        for (int i = 0; i < m; i++) {
            const float *from = q + ((size_t)(t0 + i) * H + h) * D;
            memcpy(t->q + (size_t)i * D, from, (size_t)D * sizeof(float));
        }
        window_starts(s, l, hd, &b);
        tile_begin(t, m, D);
        if (lines[h].dense) fold_range(&b, 0, b.r0 + m, NULL, NULL);
        else if (lines[h].tile64) block_tiles(&b, p, range + own * n, cols + own * n);
        else block_exact(&b, p);
        for (int i = 0; i < m; i++) {
            float *to = out + ((size_t)(t0 + i) * H + h) * D;
            for (int d = 0; d < D; d++) to[d] = t->acc[(size_t)i * D + d] / t->sum[i];
        }
    }
    scratch_reset(s, mark);
}

// Prefill attention of layer l's query heads over their lines (H). out, q (T,H,D). When every head
// is dense it is full attention, bit for bit.
static void lines_attend(Session *s, int l, const Lines *lines, float *out, const float *q, int T) {
    int dense = 0, H = s->c->H;
    for (int h = 0; h < H; h++) dense += lines[h].dense;
    if (dense == H) {
        attn_prefill(s, l, out, q, 0, T);
        return;
    }
    if (KV_DEV(s)) {
        lines_attend_cuda(s, l, lines, out, q, T);
        return;
    }
    size_t mark = scratch_mark(s);
    Tile *tiles = tiles_new(s);
    for (int g = 0; g < s->c->G; g++) group_attend(s, l, g, lines, out, q, T, tiles);
    scratch_reset(s, mark);
}

// ---- what the methods with lines share: checks of their options, and a sample of attention

// Every part of the session must have a causal mask, the only one that lines know. `name` is the
// method that asks. Returns 0, or -1 with the reason in s->err.
static int lines_open(Session *s, const char *name) {
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        if (m->rule != VIS_CAUSAL)
            return refuse(s, "%s and %s cannot be combined: the first knows causal masks only",
                          name, m->name);
    }
    return 0;
}

// Reads an int option that must be at least `least` into *value. Returns 0, or -1 with the reason
// in s->err.
static int opt_least(Session *s, const char *name, int least, int *value) {
    *value = opt_int(s->opt, name);
    if (*value < least) return refuse(s, "--%s must be at least %d, found %d", name, least, *value);
    return 0;
}

// What MInference and LoopServe look at: softmax rows of a few queries of one head. P (m,n): the
// probabilities with which query row R[i] of head h attends to its n rows, 0 where it may not look.
// R (m) are row numbers; q (T,H,D) are the queries of the last T rows; t is room.
static void line_probs(const Session *s, int l, int h, const float *q, int T, const int *R, int m,
                       float *P, Tile *t) {
    int D = s->c->D, H = s->c->H, per = H / s->c->G;
    const KVHead *hd = kv_head(s, l, h / per);
    int n = hd->len, p0 = n - T;

    // The scores, a block of queries against a tile of keys at a time.
    for (int i0 = 0; i0 < m; i0 += Q_BLOCK) {
        int mb = min_int(m - i0, Q_BLOCK);
        for (int i = 0; i < mb; i++) {
            int row = R[i0 + i];
            const float *from = q + ((size_t)(row - p0) * H + h) * D;
            memcpy(t->q + (size_t)i * D, from, (size_t)D * sizeof(float));
            t->tok[i] = hd->src[row];
        }
        for (int r = 0; r < n; r += KV_TILE) {
            int nr = min_int(n - r, KV_TILE);
            kv_load_k(s, hd, NULL, r, nr, t->k);
            tile_scores(s, l, hd, t, mb, NULL, r, nr);
            for (int i = 0; i < mb; i++) {
                float *to = P + (size_t)(i0 + i) * n + r;
                memcpy(to, t->sc + (size_t)i * nr, (size_t)nr * sizeof(float));
            }
        }
    }

    // The softmax of every row.
    for (int i = 0; i < m; i++) {
        float *p = P + (size_t)i * n, sum = 0;
        exp_shift(p, max_f32(p, n), n, &sum);
        for (int c = 0; c < n; c++) p[c] *= 1 / sum;
    }
}

// ---- A-SHAPE
// Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks.
// arXiv 2309.17453.
// What StreamingLLM keeps (section 5) serves as a mask: a prefill row sees the first rows of its head
// and the most recent ones. Every row stays in the cache.
//   V = { 0 .. init-1 },   S = { 0 .. local-1 }
// **Differs from the paper:** a mask of the prefill only: decode reads every row.
// Options: --a-shape-init (128), --a-shape-local (3968).

typedef struct {
    int init;                   // first columns every row sees
    int local;                  // last columns every row sees, itself included
    int last;                   // Tri-shape: last rows of a turn that see everything; A-shape: 0
} LineShape;

// Reads the options. Returns 0, or -1 with the reason in s->err.
static int a_shape_open(Session *s, void *ms) {
    LineShape *x = ms;
    if (lines_open(s, "a-shape")) return -1;
    if (opt_least(s, "a-shape-init", 0, &x->init)) return -1;
    return opt_least(s, "a-shape-local", 1, &x->local);
}

// Prefill attention of A-shape and Tri-shape. out, q (T,H,D). A head is dense when no row lacks a
// column: the last row lacks the columns [init,n-local), and no row lacks more.
static void shape_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    LineShape *x = ms;
    size_t mark = scratch_mark(s), row = (size_t)s->c->H * s->c->D;
    Lines *a = lines_new(s, l, T);
    int last = min_int(x->last, T);
    for (int h = 0; h < s->c->H; h++) {
        a[h].dense = a[h].n - x->init <= x->local;
        for (int c = 0; c < a[h].n && c < x->init; c++) bit_set(a[h].v, c);
        for (int o = 0; o < a[h].n && o < x->local; o++) bit_set(a[h].s, o);
    }
    lines_attend(s, l, a, out, q, T);
    if (last) attn_prefill(s, l, out + (T - last) * row, q + (T - last) * row, T - last, last);
    scratch_reset(s, mark);
}

static const Opt a_shape_opts[] = {
    { "a-shape-init", 'i', "128", "first columns every row sees" },
    { "a-shape-local", 'i', "3968", "last columns every row sees, itself included" },
    { NULL, 0, NULL, NULL },
};

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

// ---- TRI-SHAPE
// Li et al.: SCBench: A KV Cache-Centric Analysis of Long-Context Methods. arXiv 2412.10319.
// The lines of A-shape, but the last rows of a turn, where a question usually stands, see everything.
//   V = { 0 .. init-1 },   S = { 0 .. local-1 }
//   M(r) = { 0 .. r } for the last --tri-shape-last rows r of the turn
// Options: --tri-shape-init (128), --tri-shape-local (3968), --tri-shape-last (100).

// Reads the options. Returns 0, or -1 with the reason in s->err.
static int tri_shape_open(Session *s, void *ms) {
    LineShape *x = ms;
    if (lines_open(s, "tri-shape")) return -1;
    if (opt_least(s, "tri-shape-init", 0, &x->init)) return -1;
    if (opt_least(s, "tri-shape-local", 1, &x->local)) return -1;
    return opt_least(s, "tri-shape-last", 0, &x->last);
}

static const Opt tri_shape_opts[] = {
    { "tri-shape-init", 'i', "128", "first columns every row sees" },
    { "tri-shape-local", 'i', "3968", "last columns every row sees, itself included" },
    { "tri-shape-last", 'i', "100", "last rows of a turn that see everything" },
    { NULL, 0, NULL, NULL },
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

// ---- MINFERENCE
// Jiang et al.: MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse
// Attention. arXiv 2407.02490.
// The last rows of a prompt show which columns and which diagonals a head attends to. So a head
// reads the heaviest of both, measured on the attention P of the turn's last 64 rows r.
//   weight of vertical c = sum over r of P(r,c)
//   weight of slash o    = sum over r of P(r,r-o)
//   V = the first 30 columns and the heaviest others, --minference-verticals in all
//   S = the nearest 100 offsets and the heaviest others, --minference-slashes in all
// The slashes are rounded up to blocks of 64 rows (tile64).
// **Differs from the paper:** every head is of the vertical-slash kind, and one size serves all heads
// instead of an offline search per head.
// Options: --minference-verticals (1000), --minference-slashes (6096), --minference-ratio (1).

enum { MINF_LAST = 64 };        // rows looked at
enum { MINF_V = 30 };           // columns always taken
enum { MINF_S = 100 };          // offsets always taken

typedef struct {
    int nv, ns;                 // columns and offsets asked for, --minference-ratio included
} Minference;

// Reads the options. Returns 0, or -1 with the reason in s->err.
static int minference_open(Session *s, void *ms) {
    Minference *x = ms;
    double ratio = opt_real(s->opt, "minference-ratio");
    if (lines_open(s, "minference")) return -1;
    if (opt_least(s, "minference-verticals", 0, &x->nv)) return -1;
    if (opt_least(s, "minference-slashes", 0, &x->ns)) return -1;
    if (ratio < 0) return refuse(s, "--minference-ratio must not be negative, found %g", ratio);
    x->nv = (int)fmin(x->nv * ratio, INT_MAX);
    x->ns = (int)fmin(x->ns * ratio, INT_MAX);
    return 0;
}

// How many lines of a kind are always taken.
static int minference_least(int slash) {
    return slash ? MINF_S : MINF_V;
}

// How many lines of a kind a head reads.
static int minference_count(const Minference *x, int slash) {
    return max_int(slash ? x->ns : x->nv, minference_least(slash));
}

// Chooses the lines of one head from P (m,n), the probabilities of its query rows R (m). sum, idx
// (n) are room. Lines always taken get an infinite weight.
static void minference_lines(const Minference *x, Lines *a, const int *R, int m, const float *P,
                             float *sum, int *idx) {
    for (int slash = 0; slash < 2; slash++) {
        memset(sum, 0, (size_t)a->n * sizeof(float));
        for (int i = 0; i < m; i++)
            for (int c = 0; c <= R[i]; c++) sum[slash ? R[i] - c : c] += P[(size_t)i * a->n + c];
        for (int j = 0; j < a->n && j < minference_least(slash); j++) sum[j] = INFINITY;
        int k = top_k(sum, a->n, minference_count(x, slash), idx);
        for (int j = 0; j < k; j++) bit_set(slash ? a->s : a->v, idx[j]);
    }
}

// Chooses the lines a (H) of all heads of layer l in a device session, some KV heads at a time,
// from the last m tokens of the pass. Dense heads get lines too, which nothing reads. q (T,H,D).
static void minference_device(Session *s, const Minference *x, int l, const float *q, int T,
                              Lines *a, int m) {
    int G = s->c->G, R = s->c->H / G, N = kv_longest(s, l);
    int ng = line_batch_cuda(s, l, m), heads = ng * R, t[MINF_LAST];
    int *idx = scratch(s, (size_t)heads * N * sizeof(int));
    int *n = scratch(s, (size_t)3 * heads * sizeof(int)), *k = n + heads, *found = k + heads;
    for (int i = 0; i < m; i++) t[i] = T - m + i;
    for (int g = 0; g < G; g += ng, a += heads) {
        float *P = line_probs_cuda(s, l, g, ng, q, T, t, m);
        for (int slash = 0; slash < 2; slash++) {
            for (int i = 0; i < heads; i++) {
                n[i] = a[i].n;
                k[i] = minference_count(x, slash);
            }
            float *sum = line_sums_cuda(s, l, g, ng, P, T, m, slash, minference_least(slash));
            top_k_rows(s, sum, heads, N, n, k, idx, N, found);
            for (int i = 0; i < heads; i++) {
                uint64_t *bits = slash ? a[i].s : a[i].v;
                for (int j = 0; j < found[i]; j++) bit_set(bits, idx[(size_t)i * N + j]);
            }
        }
    }
}

// The same on the host, a head a thread, for the heads that are not dense.
static void minference_host(Session *s, const Minference *x, int l, const float *q, int T,
                            Lines *a, int m) {
    int H = s->c->H, N = kv_longest(s, l);
    size_t room = (size_t)n_threads();
    Tile *tiles = tiles_new(s);
    float *P = scratch(s, room * m * N * sizeof(float));
    float *sum = scratch(s, room * N * sizeof(float));
    int *idx = scratch(s, room * N * sizeof(int));
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)m * N * H * s->c->D))
    for (int h = 0; h < H; h++) {
        int R[MINF_LAST];
        size_t own = thread_id();
        if (a[h].dense) continue;
        for (int i = 0; i < m; i++) R[i] = a[h].n - m + i;
        line_probs(s, l, h, q, T, R, m, P + own * m * N, &tiles[own]);
        minference_lines(x, &a[h], R, m, P + own * m * N, sum + own * N, idx + own * N);
    }
}

// Prefill attention: chooses the lines of every head, then attends over them. out, q (T,H,D). A
// head of at most MINF_S rows is dense, because the offsets always taken are every cell.
static void minference_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    int m = min_int(T, MINF_LAST);
    size_t mark = scratch_mark(s);
    Lines *a = lines_new(s, l, T);
    double t = now();
    for (int h = 0; h < s->c->H; h++) {
        a[h].tile64 = 1;
        a[h].dense = a[h].n <= MINF_S;
    }
    if (KV_DEV(s)) minference_device(s, ms, l, q, T, a, m);
    else minference_host(s, ms, l, q, T, a, m);
    timed(&s->clk.index, t);
    lines_attend(s, l, a, out, q, T);
    scratch_reset(s, mark);
}

static const Opt minference_opts[] = {
    { "minference-verticals", 'i', "1000", "columns a head, 30 at least" },
    { "minference-slashes", 'i', "6096", "diagonals a head, 100 at least" },
    { "minference-ratio", 'f', "1", "factor on both, for short contexts" },
    { NULL, 0, NULL, NULL },
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
// Tang, Zhao, Zhu, Xiao, Kasikci, Han: Quest: Query-Aware Sparsity for Efficient Long-Context LLM
// Inference. arXiv 2406.10774.
// Rows are read in pages of 16. The largest and the smallest key value of a page, channel by
// channel, bound q.k for every row in it. A decode step reads the pages with the largest bound and
// the page it writes to; nothing is dropped.
//   max_d   = max over the page's keys k of k_d,     min_d = min over the page's keys k of k_d
//   u(page) = sum_d max(q_d max_d, q_d min_d) >= q.k        for every key k of the page
// **Differs from the paper** (D16):
//   - one set of pages a KV head: u is the largest over its query heads;
//   - the current page is always read, inside the budget, and takes no part in the ranking;
//   - a budget that covers the context reads every row.
// Map:
//   max_d -> page_bounds, page_bounds_kernel
//   min_d -> page_bounds, page_bounds_kernel
//   u(page) -> page_scores, page_scores_kernel
// Options: --budget (1024; at least 3 pages are read), --quest-full-layers (2: the first layers
// read everything).

typedef struct {
    int n, cap;                 // full pages; pages that bound has room for
    char *bound;                // (n,2D) of each page max_d, then min_d; lies where the rows lie
} PageList;

typedef struct {
    int full_layers;            // --quest-full-layers
    int B;                      // budget of this turn
    int dtype;                  // of the bounds: that of the rows, so that bounds are exact
    PageList *head;             // (L,G)
} Quest;

// The dtype that holds the numbers of a format exactly.
static int bound_dtype(const Format *f) {
    if (!strcmp(f->name, "f16")) return DT_F16;
    if (!strcmp(f->name, "bf16")) return DT_BF16;
    return DT_F32;
}

// Reads the options. Returns 0, or -1 with the reason in s->err.
static int quest_open(Session *s, void *ms) {
    Quest *x = ms;
    x->full_layers = opt_int(s->opt, "quest-full-layers");
    if (x->full_layers < 0)
        return refuse(s, "--quest-full-layers must not be negative, found %d", x->full_layers);
    x->B = s->budget;
    x->dtype = bound_dtype(s->fk);
    x->head = xcalloc((size_t)s->c->L * s->c->G, sizeof *x->head);
    return 0;
}

// Gives the bounds back. head is NULL when open has refused.
static void quest_close(Session *s, void *ms) {
    Quest *x = ms;
    for (int i = 0; x->head && i < s->c->L * s->c->G; i++) {
        if (KV_DEV(s)) near_free_cuda(x->head[i].bound);
        else free(x->head[i].bound);
    }
    free(x->head);
}

// The room that is made for so many pages: a quarter more, so that it seldom has to grow.
static int quest_cap(int pages) {
    return pages + pages / 4 + 4;
}

// Makes room for so many pages of `row` bytes in a head's list. The bounds may move, and a device was
// told where they lie: Session.changes says that this is old.
static void quest_room(Session *s, PageList *a, int pages, size_t row) {
    int old = a->cap;
    if (pages <= old) return;
    s->changes++;
    a->cap = quest_cap(pages);
    if (KV_DEV(s)) a->bound = near_grow_cuda(a->bound, old * row, a->cap * row);
    else a->bound = xrealloc(a->bound, a->cap * row);
}

// ---- after attention: the bounds of every page that has become full

// bound (2D): max_d of one page, then min_d. rows (PAGE,D) is room.
static void page_bounds(const Session *s, const KVHead *hd, int page, float *rows, float *bound) {
    int D = s->c->D;
    kv_load_k(s, hd, NULL, page * PAGE, PAGE, rows);
    for (int d = 0; d < D; d++) {
        float hi = rows[d], lo = rows[d];
        for (int r = 1; r < PAGE; r++) {
            float k = rows[(size_t)r * D + d];
            hi = k > hi ? k : hi;
            lo = k < lo ? k : lo;
        }
        bound[d] = hi;                                          // max_d
        bound[D + d] = lo;                                      // min_d
    }
}

// Brings the bounds of layer l's heads up to date on the host. T: tokens of the pass; row: bytes of
// a page's bounds.
static void quest_update(Session *s, Quest *x, int l, int T, size_t row) {
    int G = s->c->G, D = s->c->D;
    (void)T;                                                    // read by OpenMP only
    float *room = scratch(s, (size_t)n_threads() * (PAGE + 2) * D * sizeof(float));
    #pragma omp parallel for schedule(static) if (T > PAGE)
    for (int g = 0; g < G; g++) {
        const KVHead *hd = kv_head(s, l, g);
        PageList *a = &x->head[l * G + g];
        float *rows = room + (size_t)thread_id() * (PAGE + 2) * D, *bound = rows + (size_t)PAGE * D;
        int n = hd->len / PAGE;
        for (int p = a->n; p < n; p++) {
            page_bounds(s, hd, p, rows, bound);
            from_f32(a->bound + p * row, bound, x->dtype, (size_t)2 * D);
        }
        a->n = n;
    }
}

// Adds the pages that this pass has filled in layer l. At the end of a prefill it also fixes the
// turn's budget.
static void quest_commit(Session *s, void *ms, int l, const float *q, int T) {
    Quest *x = ms;
    int G = s->c->G;
    size_t row = (size_t)2 * s->c->D * dtype_size(x->dtype), mark = scratch_mark(s);
    (void)q;
    if (l == s->c->L && !s->decoding) x->B = budget_now(s);
    if (l == s->c->L || l < x->full_layers) return;
    for (int g = 0; g < G; g++) {
        PageList *a = &x->head[l * G + g];
        int n = kv_head(s, l, g)->len / PAGE;
        quest_room(s, a, n, row);
        if (!KV_DEV(s)) continue;
        if (n > a->n) page_bounds_cuda(s, l, g, a->bound, a->n, n, x->dtype);
        a->n = n;
    }
    if (!KV_DEV(s)) quest_update(s, x, l, T, row);
    scratch_reset(s, mark);
}

// ---- before attention in a decode step: the pages with the largest bound

// u (n) of pages 0..n-1 of one KV head, the largest over its R query heads. With q split into its
// positive part q+ and its negative part q-, max(q_d max_d, q_d min_d) is q+_d max_d + q-_d min_d,
// so u is one dot product with a page's bounds. bound (n,2D), q (R,D); split (R,2D) and sc (R,n)
// are room.
static void page_scores(const Quest *x, const char *bound, int n, const float *q, int R, int D,
                        float *split, float *sc, float *u) {
    for (int h = 0; h < R; h++) {
        float *positive = split + (size_t)h * 2 * D, *negative = positive + D;
        for (int d = 0; d < D; d++) {
            float a = q[(size_t)h * D + d];
            positive[d] = a > 0 ? a : 0;
            negative[d] = a > 0 ? 0 : a;
        }
    }
    matmul(sc, split, &(Tensor){ bound, x->dtype, n, 2 * D }, R);   // u(page), for every query head
    for (int p = 0; p < n; p++) u[p] = sc[p];
    for (int h = 1; h < R; h++) {
        const float *other = sc + (size_t)h * n;
        for (int p = 0; p < n; p++) u[p] = other[p] > u[p] ? other[p] : u[p];
    }
}

// u (G,pages) of layer l's KV heads, in scratch. q (H,D).
static float *quest_scores(Session *s, const Quest *x, int l, const float *q, int pages) {
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    size_t n_split = (size_t)2 * R * D, per = n_split + (size_t)R * pages;
    float *room = scratch(s, (size_t)n_threads() * per * sizeof(float));
    float *u = scratch(s, (size_t)G * pages * sizeof(float));
    #pragma omp parallel for schedule(static) if (pages > 64)
    for (int g = 0; g < G; g++) {
        float *split = room + (size_t)thread_id() * per, *sc = split + n_split;
        const char *bound = x->head[l * G + g].bound;
        page_scores(x, bound, pages, q + (size_t)g * R * D, R, D, split, sc, u + (size_t)g * pages);
    }
    return u;
}

// Sets the views of layer l: each KV head reads its `best` pages by u, of its first `pages`, and
// every row behind those.
static void quest_select_host(Session *s, const Quest *x, int l, const float *q, int pages,
                              int best) {
    int G = s->c->G;
    int *idx = scratch(s, (size_t)G * best * sizeof(int));
    int *rows = scratch(s, (size_t)best * PAGE * sizeof(int));
    int *n = scratch(s, (size_t)3 * G * sizeof(int)), *k = n + G, *found = k + G;
    for (int g = 0; g < G; g++) {
        n[g] = pages;
        k[g] = best;
    }
    float *u = quest_scores(s, x, l, q, pages);
    top_k_rows(s, u, G, pages, n, k, idx, best, found);
    for (int g = 0; g < G; g++) {
        int n_rows = found[g] * PAGE;
        for (int i = 0; i < n_rows; i++) rows[i] = idx[g * best + i / PAGE] * PAGE + i % PAGE;
        view_group(s, l, g, rows, n_rows, pages * PAGE);
    }
}

// Up to so many tokens every row is read.
static int quest_dense(const Quest *x) {
    return max_int(x->B, PAGE);
}

// A step launches what the step before launched, but for the first step that chooses pages.
static int quest_steady(const Session *s, const void *ms) {
    return s->n_tok != quest_dense(ms) + 1;
}

// Chooses what layer l reads in this decode step; q (H,D). Where it returns at once, the views say:
// every row.
static void quest_select(Session *s, void *ms, int l, const float *q) {
    Quest *x = ms;
    int G = s->c->G;
    int pages = (s->n_tok - 1) / PAGE;                          // those before the current page
    int best = max_int(x->B / PAGE, 3) - 1;                     // the current page is read too
    if (l < x->full_layers || s->n_tok <= quest_dense(x)) return;
    double t0 = now();
    size_t mark = scratch_mark(s);
    if (KV_DEV(s)) {
        const char *bound[MAX_G];
        for (int g = 0; g < G; g++) bound[g] = x->head[l * G + g].bound;
        quest_select_cuda(s, l, bound, pages, x->head[l * G].cap, best, q, x->dtype);
    } else {
        quest_select_host(s, x, l, q, pages, best);
    }
    scratch_reset(s, mark);
    timed(&s->clk.index, t0);
}

// Forgets the pages that are not full any more when tokens from n_tok on are truncated.
static void quest_forget(Session *s, void *ms, int n_tok) {
    Quest *x = ms;
    for (int i = 0; i < s->c->L * s->c->G; i++) x->head[i].n = min_int(x->head[i].n, n_tok / PAGE);
}

// ---- what the bounds take

// The bytes allocated for bounds now.
static size_t quest_bytes(const Session *s, const void *ms) {
    const Quest *x = ms;
    size_t n = 0, row = (size_t)2 * s->c->D * dtype_size(x->dtype);
    for (int i = 0; i < s->c->L * s->c->G; i++) n += x->head[i].cap * row;
    return n;
}

// At most so many when n tokens are held.
static size_t quest_plan(const Session *s, const void *ms, int n) {
    const Quest *x = ms;
    int layers = s->c->L - x->full_layers;
    if (layers <= 0) return 0;
    return (size_t)layers * s->c->G * quest_cap(n / PAGE) * 2 * s->c->D * dtype_size(x->dtype);
}

static const Opt quest_opts[] = {
    { "quest-full-layers", 'i', "2", "first layers that read every row" },
    { NULL, 0, NULL, NULL },
};

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
// Li, Xu, Li, Chen, Li, Tian, Xiao, Deng, Wang, Li, Chen, Yuan: LoopServe: An Adaptive Dual-phase
// LLM Inference Acceleration System for Multi-Turn Dialogues. arXiv 2507.13681.
//
// A turn's prefill attends only along a few vertical and slash lines of the attention matrix
// (section 7). Every layer and query head chooses its lines anew for this input, from a sample of
// the pass's own query rows. In decode the rows to read are chosen anew every n_d tokens, by the
// queries of the last n_d tokens.
//
//   Definition 1   X^ = [y_(j-1), X_j]: a turn prefills the previous answer again, then its tokens
//   Eq. 1          min  sum over S^ of l_s + sum over V^ of l_v
//                  s.t. the cells of the chosen lines hold at least alpha of the attention of X^
//   Algorithm 2    greedy for Eq. 1 on sampled rows, by gain / length:
//                  (w_s - ol_v) / (l_s - |V^|) for a slash s,
//                  (w_v - ol_s) / (l_v - |S^|) for a vertical v
//   Algorithm 3    if n_o = 16 or (n_o - 16) % n_d = 0:
//                  decode reads the B rows a with the largest sum over b in X^obs of A[b][a]
//
// Both kinds of lines have the length l_x = n - max(x, p0) (line_len): a head holds n rows, of
// which the rows from p0 on are the queries of this pass.
//
// **Differs from the paper:**
//   - Algorithm 2 bounds what two kinds of lines share by the largest cell of every chosen line.
//     The bound is so loose that heads run out of lines. The default, variant b, keeps the exact
//     residual of every line instead. Variant a (--paper, with alpha .955) is the paper's loop with
//     what it leaves out: a chosen line leaves its list, a gain is at least 0, and a head without a
//     gain left is computed in full (D33, D36).
//   - The sampled rows are stratified (D31), and half of them only validate the choice, which must
//     recover alpha of their attention too (D34). Variant b always takes the first
//     --loopserve-sink columns and the last --loopserve-local offsets, variant a offset 0 only
//     (D33).
//   - A head whose lines would cover too many cells is computed in full, and so is a short pass
//     (D39). With alpha 1, or when no head uses its lines, the pass equals full attention bit for
//     bit.
//   - Decode chooses at n_o >= 16 only; the paper's formula would also choose at n_o = 0, because
//     (0 - 16) % 16 is 0 (D37). The candidates are the rows held at the end of the prefill, and the
//     rows of this answer are read on top of B; with --loopserve-gen=literal they compete for B
//     like the others. A KV head has one set of rows; with --loopserve-sel=q every query head has
//     its own (D32).
//   - Algorithm 3 also hands the lines of all prefills to decode, but no formula uses them: here
//     they are not kept.
//
// No row is ever dropped, since any row may be chosen again later: the method saves reads, not
// memory. On a CPU the chosen rows are even held twice, side by side for the steps until the next
// choice (view_near).
//
// Map:
//   Definition 1 -> loopserve_enter
//   Eq. 1 -> cells_of, tally_done, select_exact, select_tiles, recovered, select_lines_kernel
//   Algorithm 1, line 3 -> loopserve_enter
//   Algorithm 1, line 5 -> loopserve_attend, loop_heads, loop_heads_device, choose_lines_cuda
//   Algorithm 1, line 7 -> loopserve_select
//   Algorithm 2, line 1 -> sample_rows
//   Algorithm 2, line 4 -> line_probs, line_probs_cuda
//   Algorithm 2, line 5 -> line_sums, residuals, band_residuals, line_residuals
//   Algorithm 2, line 6 -> by_weight
//   Algorithm 2, line 9 -> select_faithful
//   Algorithm 2, line 10 -> select_faithful
//   Algorithm 2, line 11 -> select_faithful
//   Algorithm 2, line 12 -> select_faithful
//   Algorithm 2, lines 13-14 -> select_faithful
//   Algorithm 2, lines 16-17 -> select_faithful
//   Algorithm 3, line 3 -> loop_due
//   Algorithm 3, line 4 -> loop_select, ring_put, ring_put_cuda, ring_put_kernel
//   Algorithm 3, line 5 -> loop_scores, loop_select, mean_rows, ring_scores_cuda, top_k_rows
//   Algorithm 3, line 6 -> loop_due
//   Algorithm 3, line 7 -> view_group, view_set
//
// Options: --loopserve-alpha, -variant, -unit, -samples, -min-context, -max-cells, -max-tiles,
// -sink, -local, -holdout, -seed (prefill); --loopserve-first, -interval, -obs, -sel, -gen
// (decode); --loopserve-keep-answer-kv; --budget (B, 1024) and --paper.

typedef struct {                // what a choice of lines looks at: sampled rows of one query head
    int m;                      // sampled rows
    int n;                      // rows the head holds
    int p0;                     // the first row of this pass
    const int *R;               // (m) row numbers of the samples, ascending
    const float *P;             // (m,n) their attention A; P[i][c] = 0 for c > R[i]
} LineSample;

typedef struct {                // a line in a heap or in a sorted list
    double key;                 // what lines are ordered by: weight, or gain / length
    int id;                     // variant b: the vertical id < n, or the slash id - n;
                                // variant a, where each kind has its list: the line's number
} LineItem;

typedef struct {                // working memory of one thread; a head holds at most N rows
    float *P;                   // (m,N) softmax rows
    double *g;                  // (2N) residuals of the lines on the selecting samples (tile64: int64_t)
    double *one;                // (2N) tile64, int64_t: the most that one sample gave to g at first
    float *top;                 // (2N) variant a: w^max, the largest cell of every line
    LineItem *item;             // (2N) variant b: the heap; variant a: two sorted lists of N
    LineRange *run;             // (N) tile64: runs of chosen offsets
    LineRange *range;           // (N) tile64: ranges of columns of a block
    int *v;                     // (N) tile64: chosen columns
    int *cols;                  // (N) tile64: single columns of a block
    int *R;                     // (m) sampled rows
} LoopRoom;

typedef struct {
    // The prefill.
    LoopRule rule;              // alpha, kept lines, hold-out, limits
    int variant_a;              // 1: Algorithm 2 as in the paper
    int tile64;                 // 1: --loopserve-unit=tile64
    int m;                      // sampled rows of a pass
    int min_context;            // heads with at most so many rows are computed in full
    uint64_t seed;              // of the sampled rows

    // Decode, Algorithm 3.
    int decodes;                // 1: this part chooses rows in decode (loopserve, loopserve-d)
    int first;                  // the token of an answer at which the first choice is made: 16
    int interval;               // n_d: tokens from one choice to the next
    int obs;                    // queries that choose, |X^obs|
    int per_query;              // 1: a set of rows for each query head, 0: for each KV head
    int literal;                // 1: the rows of this answer compete for the budget
    int keep_answer;            // 1: do not prefill the previous answer again
    int prompt_end;             // number of tokens when the last prefill ended
    int ring_from;              // the ring holds no queries of tokens before this one
    int budget;                 // B: rows to choose
    float *ring;                // (L,obs,H,D) queries, token i in slot i % obs; NULL before the first

    // Statistics.
    long passes, dense;         // prefills of single heads; how many of these were computed in full
    double mass, least;         // of the others: sum and least of the shares of attention recovered
    double cells;               // sum of their shares of the cells (tile64: of the tiles)
    double n_v, n_s;            // sums of their numbers of verticals and slashes
    long selections, steps;     // choices of rows; decode steps
    long steps_all;             // decode steps that read every row
} LoopServe;

// Section 17: the line with the largest residual per length is taken from a heap (2n). best_line
// returns -1 when none is left.
static int line_heap(const LineSample *p, const double *g, LineItem *heap);
static int best_line(const LineSample *p, const double *g, LineItem *heap, int *n_heap);

// ---- samples and lengths

// RandomSelect: m = min(want, nh) of the nh rows of a pass, one at random from each of m strata of
// equal size; the last sample is the last row. The rows depend on (seed, turn, layer) only (D31).
// R (m): the rows, ascending, counted from the first row of the pass. Returns m.
static int sample_rows(int nh, int want, uint64_t seed, int turn, int layer, int *R) {
    int m = min_int(want, nh);
    uint64_t state = mix64(mix64(mix64(seed) ^ (uint64_t)turn) ^ (uint64_t)layer);
    for (int i = 0; i < m; i++) {
        int lo = (int)((long)i * nh / m), hi = (int)((long)(i + 1) * nh / m);
        R[i] = lo + (int)(splitmix64(&state) % (uint64_t)(hi - lo));     // Algorithm 2, line 1
    }
    R[m - 1] = nh - 1;
    return m;
}

// The number of cells of the whole pass: n - p0 query rows, of which row r sees r + 1 columns.
static double cells_all(const Lines *a) {
    return .5 * ((double)a->n * (a->n + 1) - (double)a->p0 * (a->p0 + 1));
}

// The sum of the lengths of the lines in `bits` (n bits): one of the two sums that Eq. 1 minimises.
// A cell where a vertical and a slash cross counts twice, as it does there.
static double cells_of(const Lines *a, const uint64_t *bits) {
    double sum = 0;
    for (int x = 0; x < a->n; x++)
        if (bit_get(bits, x)) sum += (double)line_len(x, a->p0, a->n);   // Eq. 1: l_x
    return sum;
}

// ---- variant a: Algorithm 2 of the paper

// Order of Desc_Sort, for qsort: larger weights first, equal weights by line number.
static int by_weight(const void *pa, const void *pb) {
    const LineItem *a = pa, *b = pb;
    if (a->key != b->key) return a->key < b->key ? 1 : -1;
    return a->id - b->id;
}

// VerticalSum and SlashSum: the weights w_v of the verticals and w_s of the slashes, into the keys
// of v (n) and s (n). top (2n): w^max of the verticals, then of the slashes. Returns the weight of
// all cells.
static double line_sums(const LineSample *p, LineItem *v, LineItem *s, float *top) {
    int n = p->n;
    double tot = 0;
    for (int j = 0; j < n; j++) {
        v[j] = (LineItem){ 0, j };
        s[j] = (LineItem){ 0, j };
        top[j] = 0;
        top[n + j] = 0;
    }
    for (int i = 0; i < p->m; i++)
        for (int c = 0; c <= p->R[i]; c++) {
            float x = p->P[(size_t)i * n + c];
            int o = p->R[i] - c;
            v[c].key += x;                               // Algorithm 2, line 5
            s[o].key += x;
            tot += x;
            if (x > top[c]) top[c] = x;
            if (x > top[n + o]) top[n + o] = x;
        }
    return tot;
}

// Chooses lines until the sum of their gains reaches alpha of the sampled attention. The sum is a
// lower bound of what the lines recover: a cell that a slash and a vertical share is charged once,
// by at least its own size, because it is no larger than w^max of the line that was chosen first.
// Offset 0 is added at the end: a row must see itself (D33). Returns 1 when no line promises a gain
// before alpha is reached, which makes the head dense; otherwise 0.
static int select_faithful(const LineSample *p, const LoopRule *u, Lines *a, LoopRoom *w, LoopFound *f) {
    int n = p->n;
    int n_v = 0, n_s = 0;                                // |V^|, |S^|: so much of a list is used up
    LineItem *v = w->item, *s = w->item + n;
    double ol_v = 0, ol_s = 0, sum = 0;
    double tot = line_sums(p, v, s, w->top);
    qsort(v, n, sizeof *v, by_weight);                   // Algorithm 2, line 6
    qsort(s, n, sizeof *s, by_weight);

    while (sum < u->alpha * tot && (n_v < n || n_s < n)) {       // Algorithm 2, line 9
        double gain_v = -INFINITY, gain_s = -INFINITY, len_v = 1, len_s = 1;
        if (n_s < n) {                                   // Algorithm 2, line 10: s = s[n_s]
            gain_s = fmax(0, s[n_s].key - ol_v);         // Algorithm 2, line 11: w_s - ol_v
            len_s = fmax(1, line_len(s[n_s].id, p->p0, n) - n_v);        // l_s - |V^|
        }
        if (n_v < n) {
            gain_v = fmax(0, v[n_v].key - ol_s);         // w_v - ol_s
            len_v = fmax(1, line_len(v[n_v].id, p->p0, n) - n_s);        // l_v - |S^|
        }
        if (gain_s <= 0 && gain_v <= 0) break;
        if (gain_s / len_s >= gain_v / len_v) {          // Algorithm 2, line 12
            int o = s[n_s++].id;
            bit_set(a->s, o);                            // Algorithm 2, lines 13-14
            ol_s += w->top[n + o];
            sum += gain_s;
        } else {
            int c = v[n_v++].id;
            bit_set(a->v, c);                            // Algorithm 2, lines 16-17
            ol_v += w->top[c];
            sum += gain_v;
        }
    }

    int failed = sum < u->alpha * tot;
    bit_set(a->s, 0);
    f->mass = tot > 0 ? sum / tot : 1;
    f->cells = (cells_of(a, a->v) + cells_of(a, a->s)) / cells_all(a);
    return failed;
}

// ---- variant b: exact residuals

typedef struct {                // attention of the sampled rows: [0] selecting, [1] validating ones
    double rec[2];              // in the cells of the chosen lines
    double tot[2];              // in all cells
} Tally;

// The condition of Eq. 1: both halves of the samples recover alpha of their attention.
static int tally_done(const Tally *t, double alpha) {
    return t->rec[0] >= alpha * t->tot[0] && t->rec[1] >= alpha * t->tot[1];     // Eq. 1
}

// The share of the attention of all samples that is recovered.
static double tally_share(const Tally *t) {
    double all = t->tot[0] + t->tot[1];
    return all > 0 ? (t->rec[0] + t->rec[1]) / all : 1;
}

// Chooses the lines that are always taken: the first columns and the last offsets.
static void keep_lines(const LoopRule *u, Lines *a) {
    for (int c = 0; c < u->sink && c < a->n; c++) bit_set(a->v, c);
    for (int o = 0; o < u->local && o < a->n; o++) bit_set(a->s, o);
}

// The sum of x[0..31], by a tree of additions. Destroys x.
static double sum_lanes32(double *x) {
    for (int h = 16; h; h >>= 1)
        for (int i = 0; i < h; i++) x[i] += x[i + h];
    return x[0];
}

// The attention that every line would add to the kept lines, into g (2n): verticals, then slashes;
// selecting samples only. Even samples select; with --loopserve-holdout the odd ones validate
// (D34). Returns what the kept lines recover. A row is summed in 32 lanes, so that a warp of the
// GPU can add in the same order.
static Tally residuals(const LineSample *p, const LoopRule *u, double *g) {
    Tally t = { { 0, 0 }, { 0, 0 } };
    int n = p->n;
    memset(g, 0, 2 * (size_t)n * sizeof *g);
    for (int i = 0; i < p->m; i++) {
        int half = u->holdout & i;
        double rec[32] = { 0 }, tot[32] = { 0 };
        for (int c = 0; c <= p->R[i]; c++) {
            double x = p->P[(size_t)i * n + c];
            int o = p->R[i] - c;
            tot[c % 32] += x;
            if (c < u->sink || o < u->local) rec[c % 32] += x;
            else if (!half) {
                g[c] += x;                               // Algorithm 2, line 5, less the kept lines
                g[n + o] += x;
            }
        }
        t.rec[half] += sum_lanes32(rec);
        t.tot[half] += sum_lanes32(tot);
    }
    return t;
}

// Chooses line `id` and books its gain. In every sampled row one line of the other kind crosses it:
// the shared cell, if it was not covered before, leaves that line's residual.
static void take_line(const LineSample *p, const LoopRule *u, Lines *a, double *g, int id, Tally *t) {
    int n = p->n, slash = id >= n, x = slash ? id - n : id;
    t->rec[0] += g[id];
    bit_set(slash ? a->s : a->v, x);
    for (int i = 0; i < p->m; i++) {
        int other = p->R[i] - x;
        if (other < 0 || bit_get(slash ? a->v : a->s, other)) continue;
        double cell = p->P[(size_t)i * n + (slash ? other : x)];
        if (u->holdout & i) t->rec[1] += cell;
        else g[slash ? other : n + other] -= cell;
    }
}

// Greedy for Eq. 1: takes the line with the largest residual per length until both halves of the
// samples recover alpha. Returns 1, and the head is dense, when the lines cover more than max_cells
// of the pass or no line is left before the validating half recovers alpha; otherwise 0.
static int select_exact(const LineSample *p, const LoopRule *u, Lines *a, LoopRoom *w, LoopFound *f) {
    int failed = 0;
    double all = cells_all(a);
    keep_lines(u, a);
    double cells = cells_of(a, a->v) + cells_of(a, a->s);
    Tally t = residuals(p, u, w->g);
    int n_heap = line_heap(p, w->g, w->item);

    while (!tally_done(&t, u->alpha) && !failed) {       // Eq. 1: the constraint
        int id = best_line(p, w->g, w->item, &n_heap);
        if (id < 0) break;
        take_line(p, u, a, w->g, id, &t);
        cells += (double)line_len(id % p->n, p->p0, p->n);       // Eq. 1: the cost so far
        failed = cells > u->max_cells * all;
    }

    *f = (LoopFound){ tally_share(&t), cells / all };
    return failed || (u->holdout && t.rec[1] < u->alpha * t.tot[1]);
}

// ---- --loopserve-unit=tile64: verticals, and bands of 64 slashes, for GPUs that read 64x64 tiles
// Lines are chosen by thresholds, which a GPU can do without a heap. Attention is summed in fixed
// point (fixed_mass), so that a GPU that adds in another order finds the same lines (D30). Line
// ids: id < n is the vertical id, n + k is band k.

enum { BAND = 64 };             // offsets of a band; band k: offsets [k*BAND,(k+1)*BAND)

// The sum of the lengths of the slashes of band k.
static double band_len(int k, int p0, int n) {
    double sum = 0;
    for (int o = k * BAND; o < n && o < (k + 1) * BAND; o++) sum += (double)line_len(o, p0, n);
    return sum;
}

// The attention that verticals and bands would add to the lines in `a`, into g: g[c] for column c,
// g[n+k] for band k. one (2n), or NULL: the largest part of each that a single selecting sample
// gives. Returns what `a` recovers.
static Tally band_residuals(const LineSample *p, const LoopRule *u, const Lines *a,
                            int64_t *g, int64_t *one) {
    int64_t rec[2] = { 0, 0 }, tot[2] = { 0, 0 };
    int n = p->n;
    memset(g, 0, 2 * (size_t)n * sizeof *g);
    if (one) memset(one, 0, 2 * (size_t)n * sizeof *one);
    for (int i = 0; i < p->m; i++) {
        int half = u->holdout & i;
        int64_t part = 0;                                // what this row gives to column c's band
        for (int c = 0; c <= p->R[i]; c++) {
            int64_t x = fixed_mass(p->P[(size_t)i * n + c]);
            int o = p->R[i] - c, k = n + o / BAND;
            tot[half] += x;
            if (bit_get(a->v, c) || bit_get(a->s, o)) rec[half] += x;
            else if (!half) {
                g[c] += x;                               // Algorithm 2, line 5, less chosen lines
                g[k] += x;
                part += x;
                if (one && x > one[c]) one[c] = x;
            }
            if (o % BAND == 0) {                         // the row's last cell in this band
                if (one && part > one[k]) one[k] = part;
                part = 0;
            }
        }
    }
    return (Tally){ { (double)rec[0], (double)rec[1] }, { (double)tot[0], (double)tot[1] } };
}

// The share of the 64-wide tiles of full attention that the row blocks of the pass read: their
// ranges of columns cut into tiles, and their single columns gathered 64 at a time.
static double tile_share(const Lines *a, LoopRoom *w) {
    double tiles = 0, dense = 0;
    int nv = bit_list(a->v, a->n, w->v), n_run = bit_runs(a->s, a->n, w->run), n_cols;
    for (int b = 0; b < a->n - a->p0; b += LINE_BLOCK) {
        int E = min_int(a->p0 + b + LINE_BLOCK, a->n);
        int k = block_index(a, b, w->run, n_run, w->v, nv, w->range, w->cols, &n_cols);
        for (int j = 0; j < k; j++)
            tiles += (w->range[j].hi - w->range[j].lo + KV_TILE - 1) / KV_TILE;
        tiles += (n_cols + KV_TILE - 1) / KV_TILE;
        dense += (E + KV_TILE - 1) / KV_TILE;
    }
    return tiles / dense;
}

// The gain of line `id` per cell, less what its best single sample gave: a line needs the support
// of two samples. 0 when it gains no more than 2^-40.
static double gain_of(const int64_t *g, const int64_t *one, int id, int p0, int n) {
    int64_t gain = g[id] - one[id];
    if (gain <= 1) return 0;
    return (double)gain / (id < n ? (double)line_len(id, p0, n) : band_len(id - n, p0, n));
}

// Greedy for Eq. 1 in rounds: every line within .9 of the best gain per cell is taken at once, then
// all residuals are computed anew. The threshold only falls from round to round.
// Returns 1, and the head is dense, when the lines read more than max_tiles of the tiles or when no
// line is left that two samples support; otherwise 0.
static int select_tiles(const LineSample *p, const LoopRule *u, Lines *a, LoopRoom *w, LoopFound *f) {
    int n = p->n, ids = n + (n + BAND - 1) / BAND;
    int64_t *g = (int64_t *)w->g, *one = (int64_t *)w->one;     // as large as variant b's doubles
    double threshold = INFINITY;
    keep_lines(u, a);

    Tally t = band_residuals(p, u, a, g, one);
    *f = (LoopFound){ tally_share(&t), tile_share(a, w) };
    while (!tally_done(&t, u->alpha)) {                  // Eq. 1: the constraint
        double best = 0;
        for (int id = 0; id < ids; id++) best = fmax(best, gain_of(g, one, id, p->p0, n));
        if (best <= 0) return 1;

        threshold = .9 * fmin(threshold, best);
        for (int id = 0; id < ids; id++) {
            if (gain_of(g, one, id, p->p0, n) < threshold) continue;
            if (id < n) {
                bit_set(a->v, id);
                continue;
            }
            int from = (id - n) * BAND;
            for (int o = from; o < n && o < from + BAND; o++) bit_set(a->s, o);
        }

        t = band_residuals(p, u, a, g, NULL);
        *f = (LoopFound){ tally_share(&t), tile_share(a, w) };
        if (f->cells > u->max_tiles) return 1;
    }
    return 0;
}

// ---- prefill: Algorithm 1, line 5

typedef struct {                // one layer of one prefill
    int l, T;                   // layer; tokens of the pass
    const float *q;             // (T,H,D) queries
    const int *rows;            // (m) sampled rows of the pass, from 0; the same for all heads
    Lines *lines;               // (H) the choice
    LoopFound *found;           // (H) what it recovers and costs; not set where nothing was chosen
    LoopRoom *room;             // (threads) working memory; NULL where the GPU chooses
} LoopPass;

// Working memory for every thread, in scratch: m samples of heads with at most N rows.
static LoopRoom *loop_rooms(Session *s, int m, int N) {
    int threads = n_threads();
    LoopRoom *w = scratch(s, (size_t)threads * sizeof *w);
    size_t n = (size_t)N;
    for (int i = 0; i < threads; i++) {
        w[i].P = scratch(s, m * n * sizeof(float));
        w[i].g = scratch(s, 2 * n * sizeof(double));
        w[i].one = scratch(s, 2 * n * sizeof(double));
        w[i].top = scratch(s, 2 * n * sizeof(float));
        w[i].item = scratch(s, 2 * n * sizeof(LineItem));
        w[i].run = scratch(s, n * sizeof(LineRange));
        w[i].range = scratch(s, n * sizeof(LineRange));
        w[i].v = scratch(s, n * sizeof(int));
        w[i].cols = scratch(s, n * sizeof(int));
        w[i].R = scratch(s, m * sizeof(int));
    }
    return w;
}

// The sample of head h: its row numbers are filled in, its probabilities are not.
static LineSample head_sample(const LoopPass *pass, int m, int h, LoopRoom *w) {
    const Lines *a = &pass->lines[h];
    for (int i = 0; i < m; i++) w->R[i] = a->p0 + pass->rows[i];
    return (LineSample){ m, a->n, a->p0, w->R, w->P };
}

// Chooses the lines of one head from its sample, by the variant and unit the options say. Sets
// a->dense when the choice fails.
static void loop_choose(const LoopServe *x, const LineSample *p, Lines *a, LoopRoom *w, LoopFound *f) {
    a->tile64 = x->tile64;
    if (x->variant_a) a->dense = select_faithful(p, &x->rule, a, w, f);
    else if (x->tile64) a->dense = select_tiles(p, &x->rule, a, w, f);
    else a->dense = select_exact(p, &x->rule, a, w, f);
}

// Chooses the lines of every head that is not dense already, on the CPU.
static void loop_heads(Session *s, const LoopServe *x, const LoopPass *pass) {
    int H = s->c->H, l = pass->l, m = x->m;
    Tile *tiles = tiles_new(s);
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)m * kv_longest(s, l) * H * s->c->D))
    for (int h = 0; h < H; h++) {
        if (pass->lines[h].dense) continue;
        LoopRoom *w = &pass->room[thread_id()];
        LineSample p = head_sample(pass, m, h, w);
        // Algorithm 2, line 4: A[X~], the softmax rows of the samples
        line_probs(s, l, h, pass->q, pass->T, w->R, m, w->P, &tiles[thread_id()]);
        loop_choose(x, &p, &pass->lines[h], w, &pass->found[h]);
    }
}

// The same on a device, some KV heads at a time: the GPU computes the probabilities and chooses the
// lines. Only the paper's own loop (variant a) sorts and chooses on the host.
static void loop_heads_device(Session *s, const LoopServe *x, const LoopPass *pass) {
    int G = s->c->G, R = s->c->H / G, l = pass->l, N = kv_longest(s, l), m = x->m;
    int groups = line_batch_cuda(s, l, m), heads = groups * R;
    Lines *lines = pass->lines;
    for (int h0 = 0; h0 < G * R; h0 += heads) {
        // Algorithm 2, line 4: A[X~]
        float *P = line_probs_cuda(s, l, h0 / R, groups, pass->q, pass->T, pass->rows, m);
        if (!x->variant_a) {
            choose_lines_cuda(s, l, h0 / R, groups, &x->rule, x->tile64, P, pass->T, m,
                              lines + h0, pass->found + h0);
            for (int h = h0; h < h0 + heads; h++) lines[h].dense |= lines[h].n <= x->min_context;
            continue;
        }
        #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)m * N * heads))
        for (int h = h0; h < h0 + heads; h++) {
            if (lines[h].dense) continue;
            LoopRoom *w = &pass->room[thread_id()];
            LineSample p = head_sample(pass, m, h, w);
            for (int i = 0; i < m; i++)
                host_copy_cuda(w->P + (size_t)i * p.n, P + ((size_t)(h - h0) * m + i) * N, p.n);
            loop_choose(x, &p, &lines[h], w, &pass->found[h]);
        }
    }
}

// Adds one head's prefill to the statistics.
static void loop_count(LoopServe *x, const Lines *a, const LoopFound *f) {
    x->passes++;
    if (a->dense) {
        x->dense++;
        return;
    }
    if (x->passes - x->dense == 1 || f->mass < x->least) x->least = f->mass;
    x->mass += f->mass;
    x->cells += f->cells;
    x->n_v += bit_list(a->v, a->n, NULL);
    x->n_s += bit_list(a->s, a->n, NULL);
}

// Method.attend: chooses the lines of every head of layer l and attends along them. With alpha 1,
// or with fewer than 4 times as many rows as samples, the pass attends in full: choosing would cost
// more than it saves.
static void loopserve_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    LoopServe *x = ms;
    int H = s->c->H, m = x->m, all_dense = 1;
    if (x->rule.alpha >= 1 || T / 4 < m) {
        x->passes += H;
        x->dense += H;
        attn_prefill(s, l, out, q, 0, T);
        return;
    }

    size_t mark = scratch_mark(s);
    double t = now();
    LoopPass pass = { .l = l, .T = T, .q = q };
    pass.lines = lines_new(s, l, T);
    if (!KV_DEV(s) || x->variant_a) pass.room = loop_rooms(s, m, kv_longest(s, l));
    pass.found = scratch(s, (size_t)H * sizeof *pass.found);
    int *rows = scratch(s, (size_t)m * sizeof(int));

    sample_rows(T, m, x->seed, s->turn, l, rows);
    pass.rows = rows;
    for (int h = 0; h < H; h++) {
        pass.lines[h].dense = pass.lines[h].n <= x->min_context;
        all_dense &= pass.lines[h].dense;
    }

    if (!all_dense) {                                    // Algorithm 1, line 5
        if (KV_DEV(s)) loop_heads_device(s, x, &pass);
        else loop_heads(s, x, &pass);
    }
    for (int h = 0; h < H; h++) loop_count(x, &pass.lines[h], &pass.found[h]);
    timed(&s->clk.index, t);

    lines_attend(s, l, pass.lines, out, q, T);
    scratch_reset(s, mark);
}

// Method.enter, Definition 1: the rows of the previous answer are dropped, and its tokens are
// prefilled again in front of this turn's n tokens t (room: cap). Those rows came one by one from
// decode steps that read chosen rows only (D38). The last token of an answer was never fed: it
// comes with this turn's ids. Returns the new number of tokens; ends the program where they do not
// fit.
static int loopserve_enter(Session *s, void *ms, Token *t, int n, int cap) {
    LoopServe *x = ms;
    int k = s->n_tok - x->prompt_end;
    if (x->keep_answer || k <= 0) return n;
    if (n + k > cap) die(EXIT_RUN, "loopserve: no room to prefill an answer of %d tokens again", k);
    memmove(t + k, t, (size_t)n * sizeof *t);            // Definition 1: X^ = [y_(j-1), X_j]
    for (int i = 0; i < k; i++) {                        // Algorithm 1, line 3
        t[i] = s->tok[x->prompt_end + i];
        t[i].pos = -1;
    }
    kv_truncate(s, x->prompt_end);
    return n + k;
}

// ---- decode: Algorithm 3

// Where the ring keeps the queries (H,D) of a token in layer l.
static float *ring_slot(const Session *s, const LoopServe *x, int l, int token) {
    return x->ring + ((size_t)l * x->obs + token % x->obs) * s->c->H * s->c->D;
}

// Puts the queries q (H,D) of a token into the ring of layer l.
static void ring_put(Session *s, LoopServe *x, int l, int token, const float *q) {
    size_t row = (size_t)s->c->H * s->c->D * sizeof(float), all = (size_t)s->c->L * x->obs * row;
    if (!x->ring) x->ring = KV_DEV(s) ? (float *)near_grow_cuda(NULL, 0, all) : xcalloc(1, all);
    if (KV_DEV(s)) ring_put_cuda(s, ring_slot(s, x, l, 0), x->obs, token, q);
    else memcpy(ring_slot(s, x, l, token), q, row);
}

// What every row of layer l receives from the queries in the ring, those of the tokens from `first`
// on: their softmax rows over every row held, summed over the queries and over the heads of a group
// (the sum ranks like the mean). The tokens of the ring are the last ones held, and each sees the
// rows up to its own.
// end (G): number of candidates, the first rows of each head. Returns (lists,N), lists = G or, per
// query head, H, in the memory that the rows are in: sums or means over the queries.
static float *loop_scores(Session *s, const LoopServe *x, int l, int first, const int *end) {
    int H = s->c->H, G = s->c->G, N = kv_longest(s, l), lists = x->per_query ? H : G;
    int w = s->base - first + 1;                         // queries
    size_t row = (size_t)H * s->c->D;
    if (KV_DEV(s)) {
        float *score = ring_scores_cuda(s, l, ring_slot(s, x, l, 0), x->obs, first, w);
        return x->per_query ? score : join_rows_cuda(s, score, end, N, AGG_SUM);
    }
    float *obs = scratch(s, w * row * sizeof(float));
    float *score = scratch(s, (size_t)lists * N * sizeof(float));
    for (int i = 0; i < w; i++)
        memcpy(obs + i * row, ring_slot(s, x, l, first + i), row * sizeof(float));
    mean_rows(s, l, obs, first, w, lists / G, score);    // Algorithm 3, line 5: sums of A[b][a]
    return score;
}

// The number of candidates of a KV head: its rows older than this answer, or than this step
// (--loopserve-gen=literal).
static int candidate_rows(const Session *s, const LoopServe *x, int l, int g) {
    const KVHead *hd = kv_head(s, l, g);
    int limit = x->literal ? s->base : x->prompt_end, n = hd->len;
    while (n > 0 && hd->src[n - 1] >= limit) n--;
    return n;
}

// Chooses the rows that layer l reads from now on: for every KV head (or query head) the B
// candidates with the largest score, and every row behind the candidates. A head with at most B
// candidates reads every row.
static void loop_select(Session *s, LoopServe *x, int l) {
    int H = s->c->H, G = s->c->G, R = H / G, N = kv_longest(s, l);
    int lists = x->per_query ? H : G;                    // lists of rows
    int each = H / lists;                                // query heads that share one
    int first = max_int(s->base - x->obs + 1, x->ring_from);     // Algorithm 3, line 4: X^obs

    size_t mark = scratch_mark(s);
    int *idx = scratch(s, (size_t)lists * x->budget * sizeof(int));
    int *end = scratch(s, (size_t)(G + 3 * lists) * sizeof(int));
    int *n = end + G, *want = n + lists, *found = want + lists;
    for (int g = 0; g < G; g++) end[g] = candidate_rows(s, x, l, g);

    float *score = loop_scores(s, x, l, first, end);
    for (int i = 0; i < lists; i++) {
        n[i] = end[i * each / R];
        want[i] = n[i] > x->budget ? x->budget : 0;
    }
    // Algorithm 3, line 5: arg max
    top_k_rows(s, score, lists, N, n, want, idx, x->budget, found);

    for (int i = 0; i < lists; i++) {                    // Algorithm 3, line 7: what decode reads
        int tail = n[i] > x->budget ? n[i] : 0, *list = idx + (size_t)i * x->budget;
        if (each == R) view_group(s, l, i, list, found[i], tail);
        else view_set(s, l, i, list, found[i], tail);
    }
    // On a CPU the chosen rows are copied side by side.
    #pragma omp parallel for schedule(static) if (worth_threads((size_t)lists * x->budget * s->c->D))
    for (int i = 0; i < lists; i++) view_near(s, l, i * each);
    scratch_reset(s, mark);
}

// Are rows chosen in this step? n_o counts the tokens of the answer so far, this step's included
// (D37).
static int loop_due(const Session *s, const LoopServe *x) {
    int n_o = s->step + 1;                               // Algorithm 3, line 6
    return n_o >= x->first && (n_o - x->first) % x->interval == 0;       // Algorithm 3, line 3
}

// Method.steady: a step that chooses nothing launches the same kernels as the one before it.
static int loopserve_steady(const Session *s, const void *ms) {
    return !loop_due(s, ms);
}

// Method.select: remembers the queries q (H,D) of this step and, when a choice is due, chooses the
// rows of layer l.
static void loopserve_select(Session *s, void *ms, int l, const float *q) {
    LoopServe *x = ms;
    ring_put(s, x, l, s->base, q);                       // Algorithm 3, line 4
    if (loop_due(s, x)) loop_select(s, x, l);            // Algorithm 1, line 7
}

// The end of a prefill: fixes the candidates and the budget, and makes room for the views now, so
// that decode allocates nothing.
static void loop_prompt_done(Session *s, LoopServe *x) {
    int H = s->c->H, G = s->c->G, each = x->per_query ? 1 : H / G;
    x->prompt_end = s->n_tok;
    x->budget = budget_now(s);
    if (!x->decodes) return;
    for (int l = 0; l < s->c->L; l++)
        for (int h = 0; h < H; h += each) {
            int n = kv_head(s, l, h * G / H)->len;
            int room = x->budget < n + x->literal * 1024 ? x->budget : 0;
            view_room(s, l, h, room, 1);
        }
}

// The end of a decode step, for the statistics.
static void loop_count_step(const Session *s, LoopServe *x) {
    int chosen = 0;
    for (int i = 0; i < s->c->L * s->c->H; i++) chosen |= s->view[i].tail > 0;
    x->steps++;
    x->steps_all += !chosen;
    x->selections += x->decodes && chosen && loop_due(s, x);
}

// Method.commit: a prefill fills the ring of layer l anew, with the last of its queries q (T,H,D).
static void loopserve_commit(Session *s, void *ms, int l, const float *q, int T) {
    LoopServe *x = ms;
    int n = min_int(T, x->obs);
    size_t row = (size_t)s->c->H * s->c->D;
    if (l == s->c->L) {
        if (s->decoding) loop_count_step(s, x);
        else loop_prompt_done(s, x);
        return;
    }
    if (s->decoding || !x->decodes) return;
    x->ring_from = s->base + T - n;
    for (int i = 0; i < n; i++) ring_put(s, x, l, x->ring_from + i, q + (T - n + i) * row);
}

// Method.forget: tokens from n_tok on are gone; the ring starts anew.
static void loopserve_forget(Session *s, void *ms, int n_tok) {
    LoopServe *x = ms;
    (void)s;
    x->prompt_end = min_int(x->prompt_end, n_tok);
    x->ring_from = n_tok;
}

// ---- opening, bytes, statistics

// Reads the options of the prefill. Returns 0, or -1 with s->err set.
static int loop_rule(Session *s, LoopServe *x) {
    const Options *o = s->opt;
    int paper = opt_int(o, "paper");
    const char *hold = opt_str(o, "loopserve-holdout");
    x->variant_a = paper;
    if (opt_given(o, "loopserve-variant"))
        x->variant_a = !strcmp(opt_str(o, "loopserve-variant"), "a");
    x->tile64 = !strcmp(opt_str(o, "loopserve-unit"), "tile64");
    x->seed = (uint64_t)opt_int(o, "loopserve-seed");
    x->rule.alpha = opt_real(o, "loopserve-alpha");
    if (paper && !opt_given(o, "loopserve-alpha")) x->rule.alpha = .955;
    x->rule.max_cells = opt_real(o, "loopserve-max-cells");
    x->rule.max_tiles = opt_real(o, "loopserve-max-tiles");

    if (opt_least(s, "loopserve-samples", 1, &x->m)) return -1;
    if (opt_least(s, "loopserve-min-context", 0, &x->min_context)) return -1;
    if (opt_least(s, "loopserve-sink", 0, &x->rule.sink)) return -1;
    if (opt_least(s, "loopserve-local", 1, &x->rule.local)) return -1;
    x->rule.holdout = !strcmp(hold, "auto") ? x->m >= 32 : !strcmp(hold, "on");
    if (x->rule.alpha < 0)
        return refuse(s, "--loopserve-alpha is a share, 0 to 1, found %g", x->rule.alpha);
    if (x->variant_a && x->tile64)
        return refuse(s, "--loopserve-unit=tile64 has no variant a (nor --paper)");
    return lines_open(s, "loopserve");
}

// Method.open of the prefill alone.
static int loopserve_p_open(Session *s, void *ms) {
    LoopServe *x = ms;
    x->keep_answer = opt_int(s->opt, "loopserve-keep-answer-kv");
    return loop_rule(s, x);
}

// Method.open of decode alone.
static int loopserve_d_open(Session *s, void *ms) {
    LoopServe *x = ms;
    x->keep_answer = opt_int(s->opt, "loopserve-keep-answer-kv");
    x->per_query = !strcmp(opt_str(s->opt, "loopserve-sel"), "q");
    x->literal = !strcmp(opt_str(s->opt, "loopserve-gen"), "literal");
    if (opt_least(s, "loopserve-first", 1, &x->first)) return -1;
    if (opt_least(s, "loopserve-interval", 1, &x->interval)) return -1;
    if (opt_least(s, "loopserve-obs", 0, &x->obs)) return -1;
    if (!x->obs) x->obs = x->interval;
    x->decodes = 1;
    return 0;
}

// Method.open of both halves.
static int loopserve_open(Session *s, void *ms) {
    return loopserve_p_open(s, ms) || loopserve_d_open(s, ms) ? -1 : 0;
}

// Method.close: gives the ring back.
static void loopserve_close(Session *s, void *ms) {
    float *ring = ((LoopServe *)ms)->ring;
    (void)s;
    if (KV_DEV(s)) near_free_cuda((char *)ring);
    else free(ring);
}

// Method.bytes: the ring.
static size_t loopserve_bytes(const Session *s, const void *ms) {
    const LoopServe *x = ms;
    return x->decodes ? (size_t)s->c->L * x->obs * s->c->H * s->c->D * sizeof(float) : 0;
}

// Method.stats: a line for the prefill, one for the lines of its sparse heads, one for decode.
static void loopserve_stats(const Session *s, const void *ms, FILE *out) {
    const LoopServe *x = ms;
    double sparse = x->passes > x->dense ? (double)(x->passes - x->dense) : 1;
    (void)s;
    if (x->m)
        fprintf(out, "loopserve prefill: %ld head passes, %ld of them dense\n", x->passes, x->dense);
    if (x->passes > x->dense)
        fprintf(out, "loopserve lines: %.1f verticals, %.1f slashes a sparse head, %.4f of its %s, "
                     "sampled mass %.4f (least %.4f)\n",
                x->n_v / sparse, x->n_s / sparse, x->cells / sparse, x->tile64 ? "tiles" : "cells",
                x->mass / sparse, x->least);
    if (!x->decodes) return;
    fprintf(out, "loopserve decode: %ld selections, %ld steps, %ld of them read every row\n",
            x->selections, x->steps, x->steps_all);
}

#define LOOPSERVE_OPTS_P \
    { "loopserve-alpha", 'f', "0.98", \
      "share of the attention the lines recover (--paper: .955); 1: dense" }, \
    { "loopserve-variant", 'c', "b|a", "b: exact overlaps, a: the paper's bound (--paper: a)" }, \
    { "loopserve-unit", 'c', "line|tile64", \
      "what is chosen and read: single lines, or what fits 64x64 tiles" }, \
    { "loopserve-samples", 'i', "64", \
      "query rows looked at; a turn of fewer than 4 times as many is dense" }, \
    { "loopserve-min-context", 'i', "1024", "heads with no more rows are dense" }, \
    { "loopserve-max-cells", 'f', "0.33", \
      "share of the causal cells beyond which a head is dense (unit line)" }, \
    { "loopserve-max-tiles", 'f', "0.6", "the same for tiles (unit tile64)" }, \
    { "loopserve-sink", 'i', "4", "first columns always read" }, \
    { "loopserve-local", 'i', "64", "last rows always read, the query's own included" }, \
    { "loopserve-holdout", 'c', "auto|on|off", \
      "odd samples only validate; auto: from 32 samples on" }, \
    { "loopserve-seed", 'i', "1", "of the sampled rows" }

#define LOOPSERVE_OPTS_D \
    { "loopserve-first", 'i', "16", "first selection, at this token of an answer" }, \
    { "loopserve-interval", 'i', "16", "n_d, tokens between selections" }, \
    { "loopserve-obs", 'i', "0", "last queries that choose; 0: --loopserve-interval" }, \
    { "loopserve-sel", 'c', "kv|q", "one set of rows a KV head, or one a query head" }, \
    { "loopserve-gen", 'c', "keep|literal", \
      "this answer's tokens: read on top of B, or chosen like the others" }

#define LOOPSERVE_OPTS_PD \
    { "loopserve-keep-answer-kv", 'b', "0", "do not prefill the previous answer again" }, \
    { NULL, 0, NULL, NULL }

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
// PATS: Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs.
//
// No token is dropped; the rows of old tokens lose low mantissa bits. How many bits b a token loses
// depends only on its position t among the T tokens seen, so one table B[t] serves all layers and
// heads. Rows that have lost the same number of bits are packed side by side, with w = 16 - b bits
// an element.
//
//   Sec. 3, b(t)    b(t,T) = max(b_min, min(b_max, f(t,T))), t = 1..T
//                   f = round(b_min + b_max u), with x = (t-1)/(T-1) and
//                     old:     u = 1 - x             old tokens lose most
//                     new:     u = x                 new tokens lose most
//                     middle:  u = 1 - |2x - 1|      tokens in the middle lose most
//   Sec. 3, w       w = 16 - b(t) bits an element
//   Sec. 3, B       the paper's format, rows64: a block of 64 bytes holds B = floor(512/w) elements,
//                   and a row starts a block
//   Sec. 3, fetch   element [t,c] is in block floor(c/B), at bit (c mod B) w: a load, a shift, a mask
//
// A head's packed rows lie in regions of one w each (KVHead.reg). Its raw f16 rows follow: those of
// the last `window` tokens and, under the ratchet, of all tokens since the last re-pack.
//   --pats-format=dense    element e of a region starts at bit e*w; a row takes D*w/8 bytes
//   --pats-format=rows64   the paper's format; a row takes 64 ceil(D/B) bytes
// While tokens arrive b(t,T) changes, but bits that are cut are gone: B[t] only grows. The policy
// says when rows are cut:
//   ratchet   at re-packs, whenever T has grown by an eighth: B[t] = max(B[t], b(t,T))
//   static    once, when a row leaves the raw window, with b(t,T_end)
//   frozen    once: with b(t,T_1) the T_1 rows of the first prefill, with b_min all later ones
//
// **Differs from the paper:**
//   - The paper's T is known beforehand, and it says nothing about decoding, packing across rows,
//     the formula of f, or rounding: the policies and all of these are ours (D24, D25, D27).
//   - The first `sink` tokens lose b_min bits only, the last `window` tokens none (as the paper:
//     --pats-sink=0 --pats-window=0).
//   - Rows are packed densely: the paper's blocks save nothing for w >= 12 at D = 128 and for w >=
//     9 at D = 64.
//   - Rows are f16 whatever dtype the model computes in: cutting 8 bits of a bf16 would cut into
//     its exponent (D27).
//
// Map:
//   Sec. 3, b(t) -> pats_schedule, pats_bits
//   Sec. 3, w -> pats_pack_head, pats_recut, repacked_half, cut_kernel
//   Sec. 3, B -> block_elements, pats_row_bytes, pats_write_row, repack_kernel
//   Sec. 3, fetch -> unpack_bits, pats_read_row, pats_load_region, packed_half, packed_read
//
// Options: --pats-schedule, -policy, -bmin, -bmax, -sink, -window, -tend, -format, -round, -when.

enum {                              // Pats.schedule
    PATS_MIDDLE,
    PATS_OLD,
    PATS_NEW,
};
enum {                              // Pats.policy
    PATS_RATCHET,
    PATS_STATIC,
    PATS_FROZEN,
};
enum {
    PATS_ALIGN = 64,                // bytes: a region starts at a multiple of it
    PATS_MAX_D = 1024,              // largest head_dim
};

typedef struct {
    // Options.
    int schedule, policy;           // PATS_MIDDLE, ..; PATS_RATCHET, ..
    int rounding;                   // PATS_TRUNC, PATS_NEAREST or PATS_MID
    int rows64;                     // 1: the paper's format, 0: dense
    int write;                      // 1: --pats-when=write, a pass reads its own rows cut already
    int b_min, b_max;               // fewest and most bits a row outside the window loses
    int sink;                       // first tokens, which lose b_min bits only
    int window;                     // last tokens, which stay raw
    int T_end;                      // static: tokens of the whole dialogue

    // State.
    int T_last;                     // ratchet: tokens seen at the last re-pack
    int repacks;                    // ratchet: re-packs so far
    int T1;                         // frozen: tokens of the first prefill; 0: it has not been yet
    int n1;                         // frozen: tokens [0,n1) are the first prefill's: T1, or fewer when
                                    // some of them were truncated
    int cut;                        // tokens [0,cut) are packed, in every head that holds them
    unsigned char *bits;            // (cap) B[t]: bits that the rows of token t have lost
    int cap;
} Pats;

// ---- how many bits a token loses

// b(t,T) of a schedule, in integers: u = a/n, f is rounded half up. t = 1..T; a larger t, in a
// static dialogue that ran on beyond its T_end, counts as the end.
static int pats_schedule(int schedule, int b_min, int b_max, int t, int T) {
    int64_t n = T - 1, a, f;
    if (schedule == PATS_OLD) a = T - t;
    else if (schedule == PATS_NEW) a = t - 1;
    else a = 2 * min_int(t - 1, T - t);
    if (a < 0) a = 0;
    else if (a > n) a = n;

    if (n == 0) f = schedule == PATS_OLD ? b_min + b_max : b_min;        // T = 1: x is 0
    else f = (2 * b_min * n + 2 * b_max * a + n) / (2 * n);
    return max_int(b_min, min_int(b_max, (int)f));       // Sec. 3, b(t)
}

// The number of bits that token src, counted from 0, should have lost when T tokens have been seen
// (D25).
static int pats_bits(const Pats *x, int src, int T) {
    if (src >= T - x->window) return 0;
    if (src < x->sink) return x->b_min;
    if (x->policy == PATS_FROZEN && src >= x->n1) return x->b_min;
    if (x->policy == PATS_STATIC) T = x->T_end;
    if (x->policy == PATS_FROZEN) T = x->T1;
    return pats_schedule(x->schedule, x->b_min, x->b_max, src + 1, T);
}

// ---- elements: an f16 that loses b bits is pats_cut of kvcomp.h

// --pats-round=mid, on reading: adds half a step, bit b-1, to n elements that have lost b bits.
// Zeros stay zero.
static void pats_mid(uint16_t *h, int n, int b) {
    if (!b) return;
    #pragma omp simd
    for (int i = 0; i < n; i++) h[i] = (uint16_t)(h[i] | ((h[i] & 0x7fff) ? 1 << (b - 1) : 0));
}

// Packs n elements of w bits, the upper w bits of h (n), to p: low bits first. Eight elements take
// w bytes, so a row (D is a multiple of 8) begins and ends on a byte.
static void pack_bits(unsigned char *p, const uint16_t *h, int n, int w) {
    uint64_t acc = 0;                                    // bits not written yet: `fill` of them
    int fill = 0;
    for (int i = 0; i < n; i++) {
        acc |= (uint64_t)(h[i] >> (16 - w)) << fill;
        fill += w;
        if (fill < 32) continue;
        memcpy(p, &acc, 4);
        p += 4;
        acc >>= 32;
        fill -= 32;
    }
    for (; fill > 0; fill -= 8) {
        *p++ = (unsigned char)acc;
        acc >>= 8;
    }
}

// Unpacks n elements of w bits from p to h (n) f16, whose cut bits are 0. May read PATS_GUARD bytes
// behind the last one.
static void unpack_bits(uint16_t *h, const unsigned char *p, int n, int w) {
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
    if (mid) pats_mid(h, n, 16 - w);
}

// What attention calls; unpack_choose (section 17) may set a faster function with the same results.
static void (*unpack_f16)(uint16_t *h, const unsigned char *p, int n, int w, int mid)
    = unpack_plain;

// ---- rows

// Elements of w bits that one of the paper's blocks holds.
static int block_elements(int w) {
    return 8 * PATS_BLOCK / w;                           // Sec. 3, B
}

// Bytes of a row of D elements of w bits.
static size_t pats_row_bytes(int rows64, int D, int w) {
    int B = block_elements(w);
    return rows64 ? (size_t)PATS_BLOCK * ((D + B - 1) / B) : (size_t)D * w / 8;
}

// Packs one row to p; h (D) f16 is cut already.
static void pats_write_row(unsigned char *p, const uint16_t *h, int D, int w, int rows64) {
    int B = rows64 ? block_elements(w) : D;
    for (int c = 0; c < D; c += B, p += PATS_BLOCK) pack_bits(p, h + c, min_int(B, D - c), w);
}

// Unpacks one row from p to h (D) f16, cut bits 0.
static void pats_read_row(uint16_t *h, const unsigned char *p, int D, int w, int rows64) {
    int B = rows64 ? block_elements(w) : D;
    for (int c = 0; c < D; c += B, p += PATS_BLOCK) unpack_bits(h + c, p, min_int(B, D - c), w);
}

// Where row r of a head lies: in region g, whose rows have `bytes` bytes; K (v 0) or V (v 1).
static const unsigned char *pats_row(const KVHead *h, const Region *g, int v, int r, size_t bytes) {
    return (const unsigned char *)(v ? h->pv : h->pk) + g->base + (size_t)(r - g->row0) * bytes;
}

// The region that holds row r, at g or behind it.
static const Region *region_of(const Region *g, int r) {
    while (g->row0 + g->n <= r) g++;
    return g;
}

static int pats_open(Session *s, void *ms);

// The session's Pats, for the storage hooks: they are called without it.
static const Pats *pats_of(const Session *s) {
    for (int i = 0; i < s->n_part; i++)
        if (s->part[i].m->open == pats_open) return s->part[i].ms;
    return NULL;
}

// ---- reading rows: the hot path of attention

// n rows of region g, packed at p, to buf (n,D) f16. Rows of the dense format are one stream of
// elements.
static void pats_load_region(const Pats *x, const Region *g, const unsigned char *p, int n, int D,
                             uint16_t *buf) {
    int mid = x->rounding == PATS_MID && g->w < 16 ? 1 << (15 - g->w) : 0;
    if (!x->rows64) {
        unpack_f16(buf, p, n * D, g->w, mid);
        return;
    }
    int B = block_elements(g->w);
    size_t bytes = pats_row_bytes(x->rows64, D, g->w);
    for (int r = 0; r < n; r++, p += bytes, buf += D)
        for (int c = 0; c < D; c += B)                   // Sec. 3, fetch: the block
            unpack_f16(buf + c, p + c / B * PATS_BLOCK, min_int(B, D - c), g->w, mid);
}

// The same where p is in device memory: the packed bytes are copied to the host, some rows at a
// time.
static void pats_load_device(const Pats *x, const Region *g, const unsigned char *p, int n, int D,
                             uint16_t *buf) {
    unsigned char raw[1 << 14];
    size_t bytes = pats_row_bytes(x->rows64, D, g->w);
    int step = (int)((sizeof raw - PATS_GUARD) / bytes);
    for (int r = 0; r < n; r += step) {
        int m = min_int(step, n - r);
        bytes_load_cuda(raw, p + r * bytes, m * bytes + PATS_GUARD);
        pats_load_region(x, g, raw, m, D, buf + (size_t)r * D);
    }
}

// Packing.load: rows r0 .. r0+n-1 of K (v 0) or V (v 1), all of them packed, to buf (n,D) f16.
static void pats_load(const Session *s, const KVHead *h, int v, int r0, int n, uint16_t *buf) {
    const Pats *x = pats_of(s);
    const Region *g = region_of(h->reg, r0);
    int D = s->c->D;
    while (n > 0) {
        const unsigned char *p = pats_row(h, g, v, r0, pats_row_bytes(x->rows64, D, g->w));
        int m = min_int(n, g->row0 + g->n - r0);
        if (KV_DEV(s)) pats_load_device(x, g, p, m, D, buf);
        else pats_load_region(x, g, p, m, D, buf);
        buf += (size_t)m * D;
        r0 += m;
        n -= m;
        g++;
    }
}

// ---- tables of regions

// Adds one row of width w behind the others of the table reg (an stb array). Returns the table,
// which may have moved.
static Region *region_add(Region *reg, int w, int rows64, int D) {
    int n = (int)arrlen(reg);
    if (n && reg[n - 1].w == w) {
        reg[n - 1].n++;
        return reg;
    }
    Region next = { .n = 1, .w = w };
    if (n) {
        const Region *last = &reg[n - 1];
        size_t end = last->base + last->n * pats_row_bytes(rows64, D, last->w);
        next.row0 = last->row0 + last->n;
        next.base = (end + PATS_ALIGN - 1) / PATS_ALIGN * PATS_ALIGN;
    }
    arrput(reg, next);
    return reg;
}

// Bytes that K takes under a table of n regions, the guard behind the last row included; V takes as
// many.
static size_t regions_bytes(const Region *reg, int n, int rows64, int D) {
    if (!n) return 0;
    const Region *last = &reg[n - 1];
    return last->base + last->n * pats_row_bytes(rows64, D, last->w) + PATS_GUARD;
}

// Gives a head the table reg as its own: an exact copy of the stb array, which is freed. The number
// of packed rows, and so the size of src and pos, may have changed: cap -1 makes head_reserve size
// them anew.
static void regions_set(KVHead *h, Region *reg) {
    int n = (int)arrlen(reg);
    h->n_reg = n;
    h->packed = n ? reg[n - 1].row0 + reg[n - 1].n : 0;
    if (n) {
        h->reg = xrealloc(h->reg, n * sizeof(Region));
        memcpy(h->reg, reg, n * sizeof(Region));
    } else {
        free(h->reg);
        h->reg = NULL;
    }
    h->cap = -1;
    arrfree(reg);
}

// Packing.keep: of the packed rows of a head only keep (n), ascending, stay, bit for bit as they
// are.
static void pats_keep(Session *s, KVHead *h, const int *keep, int n) {
    const Pats *x = pats_of(s);
    const Region *from = h->reg;
    int D = s->c->D;
    Region *reg = NULL;
    for (int i = 0; i < n; i++) {
        from = region_of(from, keep[i]);
        reg = region_add(reg, from->w, x->rows64, D);
    }
    int n_reg = (int)arrlen(reg);
    size_t total = regions_bytes(reg, n_reg, x->rows64, D);
    if (KV_DEV(s)) rows_repack_cuda(s, h, reg, n_reg, total, 0, keep, x->rounding, x->rows64);
    for (int v = 0; v < 2 && !KV_DEV(s); v++) {
        char **held = v ? &h->pv : &h->pk;
        char *to = total ? xcalloc(total, 1) : NULL;
        const Region *g = h->reg, *t = reg;
        for (int i = 0; i < n; i++) {
            g = region_of(g, keep[i]);
            t = region_of(t, i);
            size_t bytes = pats_row_bytes(x->rows64, D, g->w);
            size_t at = t->base + (size_t)(i - t->row0) * bytes;
            memcpy(to + at, pats_row(h, g, v, keep[i], bytes), bytes);
        }
        free(*held);
        *held = to;
    }
    h->pk_bytes = total;
    regions_set(h, reg);
}

// Section 17: where rows lie, for prefetching; what a new table leaves as it is.
static Ahead pats_stored(const Session *s, const KVHead *h, int v, int r0, int n);
static int rows_unmoved(const KVHead *h, const Region *reg);
static size_t bytes_unmoved(const Region *reg, int unmoved, int rows64, int D);

static const Packing pats_packing = { pats_load, pats_stored, pats_keep };

// ---- cutting rows

// Makes the rows from `from` on of the new table reg, at `to`: K (v 0) or V (v 1). Rows are read
// from where they are stored now, packed or raw. Bits that are cut stay cut: a row is never made
// anew.
static void pats_recut(const Session *s, const Pats *x, const KVHead *h, int v, const Region *reg,
                       int from, char *to) {
    int D = s->c->D;
    const Region *g = h->reg;
    uint16_t row[PATS_MAX_D];
    for (int i = 0; i < (int)arrlen(reg); i++) {
        size_t bytes = pats_row_bytes(x->rows64, D, reg[i].w);
        for (int r = max_int(from, reg[i].row0); r < reg[i].row0 + reg[i].n; r++) {
            int b = 16 - reg[i].w, lost = 0;             // bits to lose; bits lost already
            if (r < h->packed) {
                g = region_of(g, r);
                const unsigned char *p = pats_row(h, g, v, r, pats_row_bytes(x->rows64, D, g->w));
                lost = 16 - g->w;
                pats_read_row(row, p, D, g->w, x->rows64);
            } else {
                memcpy(row, (v ? h->v : h->k) + (size_t)(r - h->packed) * D * 2, (size_t)D * 2);
            }
            if (b > lost)
                for (int d = 0; d < D; d++) row[d] = pats_cut(row[d], b, x->rounding);
            size_t at = reg[i].base + (size_t)(r - reg[i].row0) * bytes;
            pats_write_row((unsigned char *)to + at, row, D, reg[i].w, x->rows64);
        }
    }
}

// Stores K and V of a head under the new table reg of n packed rows, on the host. `unmoved` rows
// keep their bytes: when these are all rows packed so far, the new ones go behind them in place.
static void pats_repack(const Session *s, const Pats *x, KVHead *h, const Region *reg, int n,
                        int unmoved) {
    int D = s->c->D, gone = n - h->packed;
    size_t total = regions_bytes(reg, (int)arrlen(reg), x->rows64, D), old = h->pk_bytes;
    for (int v = 0; v < 2; v++) {
        char **held = v ? &h->pv : &h->pk;
        char *raw = v ? h->v : h->k;
        if (unmoved == h->packed) {
            *held = xrealloc(*held, total);
            memset(*held + old, 0, total - old);
            pats_recut(s, x, h, v, reg, unmoved, *held);
        } else {
            char *to = xcalloc(total, 1);
            if (unmoved) memcpy(to, *held, bytes_unmoved(reg, unmoved, x->rows64, D));
            pats_recut(s, x, h, v, reg, unmoved, to);
            free(*held);
            *held = to;
        }
        memmove(raw, raw + (size_t)gone * D * 2, (size_t)(h->len - n) * D * 2);
    }
}

// Packs the rows of a head that belong to the tokens [0,cut), with the bits that B[t] says. Only
// the ratchet cuts packed rows again; under the other policies a table of regions is only added to.
static void pats_pack_head(Session *s, const Pats *x, KVHead *h) {
    int D = s->c->D, first = x->policy == PATS_RATCHET ? 0 : h->packed, n = first;
    Region *reg = NULL;
    for (int i = 0; first && i < h->n_reg; i++) arrput(reg, h->reg[i]);
    for (; n < h->len && h->src[n] < x->cut; n++)
        reg = region_add(reg, 16 - x->bits[h->src[n]], x->rows64, D);    // Sec. 3, w

    int unmoved = rows_unmoved(h, reg);
    int gone = n - h->packed;                            // raw rows that are packed now
    if (unmoved == n && !gone) {
        arrfree(reg);
        return;
    }
    size_t total = regions_bytes(reg, (int)arrlen(reg), x->rows64, D);
    if (KV_DEV(s)) {
        size_t stay = bytes_unmoved(reg, unmoved, x->rows64, D);
        rows_repack_cuda(s, h, reg, (int)arrlen(reg), total, stay, NULL, x->rounding, x->rows64);
        rows_drop_cuda(s, h, gone, h->len - n);
    } else {
        pats_repack(s, x, h, reg, n, unmoved);
    }
    h->pk_bytes = total;
    regions_set(h, reg);
    head_reserve(s, h, h->len - n);
}

// Room in B[t] for T tokens; new entries are 0.
static void bits_room(Pats *x, int T) {
    int cap = T + T / 4 + 1024;
    if (T <= x->cap) return;
    x->bits = xrealloc(x->bits, (size_t)cap);
    memset(x->bits + x->cap, 0, (size_t)(cap - x->cap));
    x->cap = cap;
}

// B[t] = max(B[t], b(t,T)) for the tokens from .. to-1.
static void bits_raise(Pats *x, int from, int to, int T) {
    for (int t = from; t < to; t++) {
        int b = pats_bits(x, t, T);
        if (b > x->bits[t]) x->bits[t] = (unsigned char)b;
    }
}

// Method.commit. At the end of a pass (l == L), when T tokens have been seen, B[t] is raised and
// the heads are packed. The ratchet does so only when T has grown by an eighth since the last time
// (D24). Rows are cut after all layers have read them raw (D26).
static void pats_commit(Session *s, void *ms, int l, const float *q, int T_pass) {
    Pats *x = ms;
    int T = s->n_tok, cut = T - x->window, ratchet = x->policy == PATS_RATCHET;
    (void)q;
    (void)T_pass;
    if (l < s->c->L || !x->b_max) return;
    if (!x->T1) x->T1 = x->n1 = T;
    bits_room(x, T);
    if (x->write) bits_raise(x, s->base, cut, T);        // pats_write has cut these rows by so much
    if (ratchet) {
        if (8 * (int64_t)T < 9 * (int64_t)x->T_last) return;
        x->T_last = T;
        x->repacks++;
    }
    bits_raise(x, ratchet ? 0 : x->cut, cut, T);
    if (cut <= 0) return;
    x->cut = max_int(x->cut, cut);
    #pragma omp parallel for schedule(dynamic) if (T > 1024 && !KV_DEV(s))
    for (int i = 0; i < s->c->L * s->c->G; i++) pats_pack_head(s, x, &s->head[i]);
}

// ---- --pats-when=write: the pass reads its own rows cut already

// Cuts the last T_pass rows of layer l before attention reads them. Only their values change: their
// bytes are packed at the end of the pass.
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
            for (int v = 0; v < 2; v++) {
                uint16_t *row = (uint16_t *)(v ? h->v : h->k) + (size_t)(r - h->packed) * D;
                for (int d = 0; d < D; d++) row[d] = pats_cut(row[d], b, x->rounding);
                if (x->rounding == PATS_MID) pats_mid(row, D, b);
            }
        }
    }
}

// Method.attend: full attention.
static void pats_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    pats_write(s, ms, l, T);
    attn_prefill(s, l, out, q, 0, T);
}

// Method.steady: without --pats-when=write a decode step does nothing before its end.
static int pats_steady(const Session *s, const void *ms) {
    (void)s;
    return !((const Pats *)ms)->write;
}

// Method.select: cuts the step's own row under --pats-when=write; chooses no rows.
static void pats_select(Session *s, void *ms, int l, const float *q) {
    (void)q;
    pats_write(s, ms, l, 1);
}

// Method.forget: B[t] goes with the rows of the tokens from n_tok on, T_last stays (D28).
static void pats_forget(Session *s, void *ms, int n_tok) {
    Pats *x = ms;
    (void)s;
    if (n_tok < x->cap) memset(x->bits + n_tok, 0, (size_t)(x->cap - n_tok));
    x->cut = min_int(x->cut, n_tok);
    x->n1 = min_int(x->n1, n_tok);
}

// ---- opening, bytes, statistics

// How many numbers an --ids file holds. Returns -1, and the reason in err, when it cannot be read.
static int count_ids(const char *path, char err[256]) {
    size_t size, n = 0;
    char *text = read_plain_text(path, &size, err);
    if (!text) return -1;
    for (size_t i = 0; i < size; i++)
        n += isdigit((unsigned char)text[i]) && (!i || !isdigit((unsigned char)text[i - 1]));
    free(text);
    return n > INT_MAX ? INT_MAX : (int)n;
}

// Refuses options that do not fit each other, the model, or the other parts. Returns 0, or -1 with
// s->err set.
static int pats_check(Session *s, const Pats *x) {
    const Options *o = s->opt;
    if (x->b_max < 0 || x->b_max > 10)
        return refuse(s, "pats: --pats-bmax wants 0..10: an f16 has 10 mantissa bits");
    if (x->b_min < 0) return refuse(s, "pats: --pats-bmin wants 0 or more");
    if (x->sink < 0 || x->window < 0 || x->T_end < 0)
        return refuse(s, "pats: --pats-sink, --pats-window and --pats-tend want 0 or more");
    if (s->c->D % 8 || s->c->D > PATS_MAX_D)
        return refuse(s, "pats: head_dim is %d, needs a multiple of 8 up to %d "
                         "(a packed row must end on a byte)", s->c->D, PATS_MAX_D);
    if (strcmp(opt_str(o, "ctk"), "f16") || strcmp(opt_str(o, "ctv"), "f16"))
        return refuse(s, "pats: packs f16 rows, so -ctk and -ctv must be f16");
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        if (x->write && m->attend && m->open != pats_open)
            return refuse(s, "pats: --pats-when=write cannot be combined with a method "
                             "that has its own prefill attention");
        if (!strcmp(m->name, "streaming") && opt_int(o, "streaming-rerotate"))
            return refuse(s, "pats: --streaming-rerotate would rotate keys whose bits are cut already");
    }
    for (int l = 0; l < s->c->L; l++)
        if (x->write && !layer_acts(s, l))
            return refuse(s, "pats: --pats-when=write needs a model whose layers are "
                             "all global or all windowed");
    return 0;
}

// Policy static without --pats-tend: the dialogue is as long as --ids. Returns 0, or -1 with s->err
// set.
static int pats_find_end(Session *s, Pats *x) {
    const char *ids = opt_str(s->opt, "ids");
    char err[256];
    if (!*ids)
        return refuse(s, "pats: --pats-policy=static must know how long the dialogue gets: "
                         "give --pats-tend");
    x->T_end = count_ids(ids, err);
    if (x->T_end < 0) return refuse(s, "pats: %s", err);
    if (x->T_end == 0) return refuse(s, "pats: --ids holds no ids, so --pats-tend must be given");
    return 0;
}

// Method.open.
static int pats_open(Session *s, void *ms) {
    Pats *x = ms;
    const Options *o = s->opt;
    int policy = opt_choice(o, "pats-policy", "auto|ratchet|static|frozen");
    x->schedule = opt_choice(o, "pats-schedule", "middle|old|new");
    if (policy) x->policy = policy - 1;
    else x->policy = x->schedule == PATS_NEW ? PATS_FROZEN : PATS_RATCHET;       // D25
    x->rounding = opt_choice(o, "pats-round", "trunc|nearest|mid");
    x->rows64 = opt_choice(o, "pats-format", "dense|rows64");
    x->write = opt_choice(o, "pats-when", "after|write");
    x->b_max = opt_int(o, "pats-bmax");
    x->b_min = min_int(opt_int(o, "pats-bmin"), x->b_max);       // D23
    x->sink = opt_int(o, "pats-sink");
    x->window = opt_int(o, "pats-window");
    x->T_end = opt_int(o, "pats-tend");
    if (pats_check(s, x)) return -1;
    if (x->policy == PATS_STATIC && !x->T_end && pats_find_end(s, x)) return -1;
    unpack_choose();
    s->fk = s->fv = format_find("f16");
    s->packing = &pats_packing;
    return 0;
}

// Method.close.
static void pats_close(Session *s, void *ms) {
    (void)s;
    free(((Pats *)ms)->bits);
}

// Method.bytes: B[t].
static size_t pats_bytes(const Session *s, const void *ms) {
    (void)s;
    return (size_t)((const Pats *)ms)->cap;
}

// Method.stats: the share of the bits that are cut, and the share of the bytes that is really
// saved.
static void pats_stats(const Session *s, const void *ms, FILE *out) {
    const Pats *x = ms;
    size_t rows = 0, packed = 0, bits = 0, regions = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        rows += h->len;
        packed += h->packed;
        regions += h->n_reg;
        for (int r = 0; r < h->packed; r++) bits += x->bits[h->src[r]];
    }
    double f16 = (double)rows * s->c->D * 4;             // bytes of K and V if every row were raw
    double held = (double)kv_bytes(s) + (double)regions * sizeof(Region) + x->cap;
    double mean_bits = rows ? (double)bits / rows : 0;
    double ideal = rows ? 100.0 * bits / rows / 16 : 0;
    double real = rows ? 100 * (1 - held / f16) : 0;
    fprintf(out, "pats: %zu of %zu rows cut, %d re-packs, %.2f bits an element; saved of f16 rows: "
                 "ideal %.2f %%, really %.2f %% (tables, raw rows, slack)\n",
            packed, rows, x->repacks, mean_bits, ideal, real);
}

static const Opt pats_opts[] = {
    { "pats-schedule", 'c', "middle|old|new", "which rows lose most bits" },
    { "pats-policy",   'c', "auto|ratchet|static|frozen",
      "when rows are cut; auto: ratchet, frozen for schedule new" },
    { "pats-bmin",     'i', "2",   "bits every row outside the window loses" },
    { "pats-bmax",     'i', "8",   "most bits a row loses, at most 10; 0: none, as full" },
    { "pats-sink",     'i', "16",  "first tokens that lose bmin bits only" },
    { "pats-window",   'i', "128", "last tokens that stay raw" },
    { "pats-tend",     'i', "0",   "static: tokens of the whole dialogue; 0: all of --ids" },
    { "pats-format",   'c', "dense|rows64",
      "packed bytes: bit after bit, or the paper's 64-byte blocks; the same values" },
    { "pats-round",    'c', "trunc|nearest|mid",
      "how bits are cut; mid: half a step is added on reading" },
    { "pats-when",     'c', "after|write",
      "cut at the end of a pass; or own rows before its attention (perplexity protocol)" },
    { NULL, 0, NULL, NULL },
};

const Method pats_method = {
    .name    = "pats",
    .paper   = "PATS: Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs",
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
// Li, Liu, Lin, Hu, Zhang: LycheeCluster: Efficient Long-Context Inference with Structure-Aware
// Chunking and Hierarchical KV Indexing.
//
// The text is cut into chunks that end where sentences, lines or brackets end, and the mean key of
// a chunk stands for all its tokens. Chunk keys are clustered by k-means, and cluster centres once
// more into coarse units; a decode step reads only the chunks of the clusters that score best for
// its query. While the answer grows, a new chunk is grafted onto the nearest cluster, so that the
// index stays fresh without being built again.
//
//   kbar_j = normalise(mean of the keys of chunk j)                 (Sec. 4.1, the key of a chunk)
//   r_u = max over the children v of node u of |v - mu_u|           (Sec. 4.1, covering radius)
//   q.v <= q.mu_u + |q| r_u        for every child v of node u      (Eq. 2, the upper bound UB)
//   J(S_t, S_t-1) = |S_t n S_t-1| / |S_t u S_t-1|                   (Eq. 3, S_t: clusters read)
//   WindowHit(S_t) = |S_t n (S_t-1 u .. u S_t-32)| / |S_t|          (Eq. 4)
//
// The index of one KV head of one layer is a tree: coarse units -> clusters -> chunks. A step reads
// the first rows [0,sink), the rows of the chunks it retrieves, budget rows in all, and on top of
// them every row from t_idx on: the recent buffer, which is not indexed yet. Nothing is dropped.
//
// **Differs from the paper:**
//   - A cluster's score is q.mu + beta |q| r with beta 0: the bound favours loose clusters.
//     --paper: beta 1 at both levels (D40).
//   - Eq. 2 bounds chunk keys, not token keys. A unit's radius covers the chunks below it, not only
//     the centres of its clusters; otherwise it bounds nothing (D46).
//   - A centre that moves adds its shift to the radius; "moving average + expansion" alone loses
//     the older members. By default the new ball is the smallest that holds the old ball and the
//     new key (D49).
//   - The first 16 tokens and the last 128 stay outside the index and are always read; Algorithm 1
//     starts with an empty buffer (D29, D43).
//   - The index is built again when the chunks have doubled, because grafting alone never makes a
//     cluster (D41).
//   - The paper gives k_g and k_c no value: clusters are taken until the budget is full (D44), and
//     no coarse unit is pruned unless --lychee-kg or --lychee-prune asks for it (D46).
//   - k-means starts from evenly spaced chunks, so that runs repeat. The first two layers read
//     every row, as in Quest (D50).
//
// Map:
//   Table 4 -> delimiter_level
//   Sec. 4.1 -> chunk_key, node_cover, chunk_keys_kernel, cover_kernel
//   Sec. 4.3 -> chunk_end, kmeans, assign_kernel, centres_kernel
//   Sec. 4.4 -> node_absorb, graft_kernel
//   Eq. 2 -> upper_bounds, cluster_scores_kernel
//   Eq. 3 -> watch_step
//   Eq. 4 -> watch_step
//   Algorithm 1, line 2 -> lychee_commit, chunk_end, cut_chunks
//   Algorithm 1, line 3 -> lychee_build, tree_build, lychee_build_cuda
//   Algorithm 1, line 9 -> units_by_score, open_units_kernel
//   Algorithm 1, line 10 -> open_top, open_units_kernel
//   Algorithm 1, line 13 -> score_unit, cluster_scores_kernel
//   Algorithm 1, line 14 -> retrieve, take_kernel
//   Algorithm 1, line 16 -> rows_to_read, take_kernel
//   Algorithm 1, line 21 -> cut_chunks
//   Algorithm 1, line 22 -> lychee_graft, tree_graft, graft_kernel
// Eq. 1 and line 17 are attention over the rows of a view (section 3). The text is cut and the
// statistics are measured on the host in a device session too.
//
// Options: --budget (1024, the first rows included) and lychee_opts below.

// ---- what section 17 does for this one
static void assign_points(const float *x, int n, const float *mu, int K, int D, const float *len,
                          float *sc, int *label);
static void heapify(int *heap, int n, const float *S);
static int  pop_best(int *heap, int *n, const float *S);
static int  tokens_above(const Nodes *u, const float *S, float bound);
static int  clusters_that_fill(const Nodes *u, const float *S, int room, int *order);

// ---- the chunker: where may a chunk end? (Table 4, D48)
typedef struct TokenText {      // the text of tokens, given by whoever has a tokenizer
    const void *ctx;            // the tokenizer; NULL: every token is empty, and none is special
    // What the id adds to the text, *len bytes; a SentencePiece blank is a space.
    const char *(*bytes)(const void *ctx, int id, int *len);
    // 1: a control token, which has no text and ends the stream before it.
    int (*special)(const void *ctx, int id);
} TokenText;
static TokenText token_text;

enum {                          // level of the boundary after a token; the lower, the better an end
    CUT_STRUCTURE = 1,          // empty line, closing bracket, code fence
    CUT_SENTENCE,               // . ? ! and a line end
    CUT_PHRASE,                 // , ; :
    CUT_BLANK,                  // between two words
    CUT_NONE,                   // none of these
    CUT_INSIDE = 9,             // inside a UTF-8 character: only where there is no other end
};
enum {                          // what a character says instead of a level
    WALK_ON = 0,                // a closing quote or parenthesis: the character before it decides
    WALK_ENDS = -1,             // no delimiter
};
enum {                          // given instead of the first byte of the next token
    NEXT_END = -1,              // the stream ends here
    NEXT_EMPTY = -2,            // the next token has no text
};
enum { STREAM_TAIL = 64 };      // bytes of the stream that are remembered
enum { WALK_CHARS = 8 };        // characters of it that are looked at, from the last one backwards

typedef struct {                // the last bytes of the stream; a special token empties it
    unsigned char b[STREAM_TAIL];
    int n;                      // bytes there are
} TextTail;

// The text of a token, n bytes; "" without a tokenizer and for a method's own tokens.
static const char *text_of(int id, int *n) {
    *n = 0;
    return token_text.ctx && id >= 0 ? token_text.bytes(token_text.ctx, id, n) : "";
}

// Is the id a control token?
static int special_token(int id) {
    return token_text.ctx && id >= 0 && token_text.special(token_text.ctx, id);
}

// Appends the n bytes p to the tail and forgets the oldest ones that have no room any more.
static void tail_push(TextTail *t, const char *p, int n) {
    if (n > STREAM_TAIL) {
        p += n - STREAM_TAIL;
        n = STREAM_TAIL;
    }
    int keep = min_int(t->n, STREAM_TAIL - n);
    memmove(t->b, t->b + t->n - keep, (size_t)keep);
    if (n) memcpy(t->b + keep, p, (size_t)n);
    t->n = keep + n;
}

// Bytes of the UTF-8 character whose first byte is c; 0: no character begins with c.
static int claimed_length(int c) {
    if (c < 0x80) return 1;
    if (c < 0xc0) return 0;
    if (c < 0xe0) return 2;
    if (c < 0xf0) return 3;
    return c < 0xf8 ? 4 : 0;
}

// Does the stream end where a character ends? Bytes that are no UTF-8 count as characters of their
// own.
static int tail_complete(const TextTail *t) {
    int k = 0;                                  // continuation bytes at the end
    while (k < 3 && k < t->n && (t->b[t->n - 1 - k] & 0xc0) == 0x80) k++;
    if (k == t->n) return 1;
    return k + 1 >= claimed_length(t->b[t->n - 1 - k]);
}

// The character of b that ends before byte `end` (> 0); *at: its first byte. A byte that is not
// part of valid UTF-8 is a character by itself: its value when it is ASCII, otherwise 0xfffd.
static int char_before(const unsigned char *b, int end, int *at) {
    static const int least[5] = { 0, 0, 0x80, 0x800, 0x10000 };     // smallest that needs n bytes
    int k = end - 1;
    while (k > 0 && end - k < 4 && (b[k] & 0xc0) == 0x80) k--;
    int c = b[k], len = claimed_length(c);
    *at = end - 1;
    if (len != end - k) return b[end - 1] < 0x80 ? b[end - 1] : 0xfffd;

    *at = k;
    c &= len == 1 ? 0x7f : 0xff >> (len + 1);
    for (int i = 1; i < len; i++) c = c << 6 | (b[k + i] & 0x3f);
    return c < least[len] ? 0xfffd : c;         // written with more bytes than it needs: not valid
}

// The length of the run of equal bytes that ends at b[at]: 3 for the last '-' of "---".
static int run_length_before(const unsigned char *b, int at) {
    int n = 1;
    while (at - n >= 0 && b[at - n] == b[at]) n++;
    return n;
}

// The level of the line end at b[at]: an empty line before it makes it a paragraph's end.
static int newline_level(const unsigned char *b, int at) {
    while (at > 0 && (b[at - 1] == ' ' || b[at - 1] == '\t' || b[at - 1] == '\r')) at--;
    return at > 0 && b[at - 1] == '\n' ? CUT_STRUCTURE : CUT_SENTENCE;
}

// Does the byte after a mark make the mark part of a word, as in 3.14, a.b, a::b, 10:30, :=?
static int joins(int next) {
    return next >= 0 && next < 128 && (isalnum(next) || next == '_' || next == '=' || next == ':');
}

// The level of character c, which stands at byte `at` of the tail; WALK_ON or WALK_ENDS when it is
// no delimiter. next: the byte after c, or NEXT_*. guard 1: a mark inside 3.14, a.b, a::b or -> is
// no delimiter.
static int delimiter_level(const TextTail *t, int at, int c, int next, int guard) {
    int before = at > 0 ? t->b[at - 1] : 0;
    int arrow = guard && (before == '-' || before == '=' || before == '<');  // -> => <>: one sign
    int inside = guard && joins(next);
    int long_run = run_length_before(t->b, at) >= 3;              // --- *** ```
    switch (c) {                                                  // Table 4
    case '\n': return newline_level(t->b, at);
    case '}': case ']': return CUT_STRUCTURE;
    case '>': return arrow ? WALK_ENDS : CUT_STRUCTURE;
    case '-': case '*': case '`': return long_run ? CUT_STRUCTURE : WALK_ENDS;
    case '.': case '?': case '!': return inside ? WALK_ENDS : CUT_SENTENCE;
    case ',': case ';': case ':': return inside ? WALK_ENDS : CUT_PHRASE;
    case 0x3002: case 0xff1f: case 0xff01: return CUT_SENTENCE;   // ideographic . ? !
    case 0xff0c: case 0xff1b: case 0xff1a: return CUT_PHRASE;     // ideographic , ; :
    case 0x3001: case 0xb7: return CUT_PHRASE;                    // enumeration comma, middle dot
    case ' ': case '\t': case '\r': case 0x3000: return CUT_BLANK;
    case ')': case '"': case '\'': return WALK_ON;
    case 0x201d: case 0x2019: return WALK_ON;                     // closing quotes
    case 0x300d: case 0x300f: case 0x3011: case 0xff09: return WALK_ON;  // closing brackets
    default: return WALK_ENDS;
    }
}

// Is the text of n bytes nothing but blanks, and at least one?
static int all_blank(const char *p, int n) {
    for (int i = 0; i < n; i++) {
        if (p[i] != ' ' && p[i] != '\t') return 0;
    }
    return n > 0;
}

// The level (CUT_*) of the boundary after the token (text, n), whose bytes end the tail; next: the
// first byte of the next token, or NEXT_*. It walks backwards over delimiters and closing quotes,
// as in `."` or `),`, and the best of them counts.
static int boundary_level(const TextTail *t, const char *text, int n, int next, int guard) {
    int level = CUT_NONE, end = t->n;
    if (!tail_complete(t)) return CUT_INSIDE;
    if (all_blank(text, n)) return CUT_BLANK;
    for (int i = 0; i < WALK_CHARS && end > 0; i++) {
        int at;
        int c = char_before(t->b, end, &at);
        int found = delimiter_level(t, at, c, end < t->n ? t->b[end] : next, guard);
        if (found == WALK_ENDS) break;
        if (found != WALK_ON) level = min_int(level, found);
        end = at;
    }
    if (level < CUT_NONE) return level;
    int word_ends = next == NEXT_END || next == ' ' || next == '\t' || next == '\r' || next == '\n';
    return word_ends ? CUT_BLANK : CUT_NONE;
}

// Finds level[from..n), the boundaries after those tokens; t is the text before token `from` and
// grows with them. The level after token n-1 depends on the token that follows it, so tok has n + 1
// entries.
static void levels_extend(unsigned char *level, int from, int n, TextTail *t, const Token *tok,
                          int guard) {
    for (int i = from; i < n; i++) {
        if (special_token(tok[i].id)) {
            t->n = 0;
            level[i] = CUT_STRUCTURE;
            continue;
        }
        int len, next_len, next = NEXT_EMPTY;
        const char *text = text_of(tok[i].id, &len);
        const char *after = text_of(tok[i + 1].id, &next_len);
        if (special_token(tok[i + 1].id)) next = NEXT_END;
        else if (next_len) next = (unsigned char)after[0];
        tail_push(t, text, len);
        level[i] = (unsigned char)boundary_level(t, text, len, next, guard);
    }
}

// The last token of the chunk that starts at token s and has min to max tokens. It is the possible
// end with the best level; among equals the last one, or with `first` the first one. Where no end
// has a level, the last end of a character is taken, and where there is none, the chunk has max
// tokens.
static int chunk_end(const unsigned char *level, int s, int min, int max, int first) {
    int best = s + max - 1, found = CUT_INSIDE;
    for (int e = s + min - 1; e < s + max; e++) {                 // Sec. 4.3
        int later_wins = !first || found >= CUT_NONE;
        if (level[e] == CUT_INSIDE) continue;
        if (level[e] < found || (level[e] == found && later_wins)) {
            best = e;
            found = level[e];
        }
    }
    return best;
}

// ---- the index: the state of the method; Nodes and Tree are in kvcomp.h
typedef struct {                // statistics of one tree, on request (D51)
    double recall;              // sums over n_recall head steps: share read of the best k rows
    double covered;             // attention that the rows read receive
    double covered_indexed;     // the same of the indexed rows alone
    long n_recall;
    double jaccard, hit;        // sums of Eq. 3 over n_jaccard steps, of Eq. 4 over n_hit steps
    long n_jaccard, n_hit;
    int *seen, cap;             // (cap) the step a cluster was last used in; room
    int step;                   // steps since the build
    int size;                   // |S_t-1|: clusters used in the step before
} Watch;

typedef struct {
    float beta, beta_coarse;    // weight of |q| r in the score of a cluster, of a unit
    int gqa;                    // GQA_*: how the query heads of a group share a list
    int kg;                     // units opened in a step: a number, KG_FLAT or KG_AUTO
    int exact;                  // 1: units are opened by upper bound until none can matter
    int lazy;                   // LAZY_*: what a grafted chunk does to a centre
    int unit;                   // 1: centres lie on the unit sphere, 0: they are plain means
    int tokens;                 // 1: centre and radius of a cluster are those of its raw token keys
    int pool_max;               // 1: a chunk's key is the largest value of every dimension
    int first_tie, guard;       // see chunk_end and delimiter_level
    int min, max;               // tokens of a chunk
    int buffer, sink;           // recent rows and first rows outside the index
    int full_layers;            // the first layers read every row
    int iters;                  // of k-means
    int per_cluster;            // chunks a cluster has on average
    int coarse_max;             // most units
    int stats;                  // 1: measure
    int B;                      // the budget of this turn, sinks included

    unsigned char *level;       // (cap_level) boundary levels of the tokens
    int n_level, cap_level;     // levels known, the last token seen has none yet; room
    TextTail tail;              // the text up to token n_level-1
    int *start;                 // (cap+1) chunk j is tokens start[j]..start[j+1]-1
    int M, cap;                 // chunks; room
    int M_built;                // chunks when the index was built; 0: there is none
    long ends[CUT_INSIDE + 1];  // chunks by the level of their end
    Tree *tree;                 // (L,G)
    Watch *watch;               // (L,G); NULL without --lychee-stats
} Lychee;
enum { KG_FLAT = 0, KG_AUTO = -1 };
enum { WINDOW_HIT = 32 };       // w of Eq. 4, steps

// Does layer l have an index?
static int indexed_layer(const Session *s, const Lychee *x, int l) {
    return l >= x->full_layers && layer_acts(s, l);
}

// The first token of the recent buffer: the index ends before it.
static int t_idx(const Lychee *x) {
    return x->start[x->M];
}

// Does anything read the coarse level?
static int wants_coarse(const Lychee *x) {
    return x->kg != KG_FLAT || x->exact;
}

// Tokens that the chunks of one list may have together.
static int room_for_chunks(const Lychee *x) {
    return max_int(x->B - x->sink, 0);
}

// k_g: how many of P coarse units a step opens at least.
static int units_to_open(const Lychee *x, int P) {
    return x->kg == KG_AUTO ? max_int((P + 3) / 4, 8) : x->kg;
}

// The number of clusters K and of coarse units P for M chunks (paper, App. A).
static void tree_shape(const Lychee *x, int M, int *K, int *P) {
    *K = (M + x->per_cluster - 1) / x->per_cluster;
    *P = wants_coarse(x) ? min_int((*K + 1) / 2, x->coarse_max) : 0;
}

// What the kernels need to know; P: coarse units. On a device exact pruning is a flat scan, which
// reads the same rows.
static LycheeRule lychee_rule(const Lychee *x, int P) {
    return (LycheeRule){
        .beta = x->beta,
        .beta_coarse = x->beta_coarse,
        .gqa = x->gqa,
        .units = x->exact ? 0 : units_to_open(x, P),
        .lazy = x->lazy,
        .unit = x->unit,
        .tokens = x->tokens,
        .pool_max = x->pool_max,
        .iters = x->iters,
        .min = x->min,
        .room = room_for_chunks(x),
        .sink = x->sink,
        .M = x->M,
        .cap = 2 * x->M_built,
        .start = x->start,
    };
}

// A tree is one block of memory, out of which its arrays are carved one after the other.
typedef struct {
    char *mem;                  // NULL: only the size is wanted
    size_t at;                  // bytes carved so far
} Block;

// The next `bytes` of the block, rounded up to 64.
static void *carve(Block *b, size_t bytes) {
    void *p = b->mem ? b->mem + b->at : NULL;
    b->at += (bytes + 63) & ~(size_t)63;
    return p;
}

// The arrays of one level: n nodes over so many children.
static void nodes_carve(Nodes *u, Block *b, int n, int children, int D) {
    size_t ints = (size_t)n * sizeof(int);
    u->n = n;
    u->mu = carve(b, (size_t)n * D * sizeof *u->mu);
    u->r = carve(b, (size_t)n * sizeof *u->r);
    u->chunks = carve(b, ints);
    u->tokens = carve(b, ints);
    u->first = carve(b, ints);
    u->last = carve(b, ints);
    u->next = carve(b, (size_t)children * sizeof(int));
}

// Lays out a tree of K clusters and P units for up to cap chunks in mem -> the bytes it takes. mem
// NULL: only counts them.
static size_t tree_carve(Tree *t, char *mem, int cap, int K, int P, int D) {
    Block b = { mem, 0 };
    nodes_carve(&t->fine, &b, K, cap, D);
    nodes_carve(&t->coarse, &b, P, P ? K : 0, D);
    t->parent = carve(&b, P ? (size_t)K * sizeof(int) : 0);
    t->rho = carve(&b, (size_t)P * sizeof(float));
    return b.at;
}

// Gives the memory of the tree back, wherever it lies.
static void tree_free(const Session *s, Tree *t) {
    (void)s;                                    // read in a build with CUDA only
    if (KV_DEV(s)) near_free_cuda(t->mem);
    else free(t->mem);
}

// Gives the tree memory of its size. cap: the most chunks there will be before the next build, so
// that grafting never asks for memory.
static void tree_room(const Session *s, Tree *t, int cap, int K, int P, int D) {
    Tree size;
    size_t bytes = tree_carve(&size, NULL, cap, K, P, D);
    if (bytes != t->bytes) {
        tree_free(s, t);
        t->mem = KV_DEV(s) ? near_grow_cuda(NULL, 0, bytes) : xmalloc(bytes);
    }
    t->bytes = bytes;
    tree_carve(t, t->mem, cap, K, P, D);
}

// Makes every node of the level empty; centres stay.
static void nodes_clear(Nodes *u) {
    for (int j = 0; j < u->n; j++) {
        u->r[j] = 0;
        u->chunks[j] = 0;
        u->tokens[j] = 0;
        u->first[j] = -1;
        u->last[j] = -1;
    }
}

// Appends a child, whose number is larger than those the node has, to the node's list.
static void child_append(Nodes *u, int node, int child) {
    u->next[child] = -1;
    if (u->first[node] < 0) u->first[node] = child;
    else u->next[u->last[node]] = child;
    u->last[node] = child;
}

// ---- opening: the options
static const Opt lychee_opts[] = {
    { "lychee-beta", 'f', "0",
      "weight of |q| r in a cluster's score; 1: the upper bound of Eq. 2" },
    { "lychee-beta-coarse", 'f', "0",
      "the same for coarse units" },
    { "lychee-gqa", 'c', "max|sum|head",
      "query heads of a group: best of them, their sum, or a list for each" },
    { "lychee-kg", 's', "flat",
      "coarse units opened in a step: flat (no coarse level), auto, or a number" },
    { "lychee-prune", 'c', "none|exact",
      "exact: open units by upper bound until none can matter; reads what flat reads" },
    { "lychee-lazy", 'c', "ball|mean|freeze",
      "what a grafted chunk does to its cluster's centre" },
    { "lychee-centroid", 'c', "unit|mean",
      "centres on the unit sphere, or plain means" },
    { "lychee-pool", 'c', "mean|max",
      "a chunk's key: the mean of its keys, or their largest value in every dimension (Table 3)" },
    { "lychee-bound", 'c', "chunk|token",
      "token: a cluster's centre and radius are those of its raw token keys, "
      "so Eq. 2 bounds tokens" },
    { "lychee-tie", 'c', "last|first",
      "of equally good ends of a chunk" },
    { "lychee-guard", 'i', "1",
      "0: marks inside 3.14, a.b, a::b, -> may end a chunk too" },
    { "lychee-chunk-min", 'i', "8",
      "fewest tokens of a chunk" },
    { "lychee-chunk-max", 'i', "16",
      "most tokens of a chunk" },
    { "lychee-buffer", 'i', "128",
      "recent rows outside the index, always read, on top of the budget" },
    { "lychee-sink", 'i', "16",
      "first rows outside the index, always read, inside the budget" },
    { "lychee-full-layers", 'i', "2",
      "first layers that read every row" },
    { "lychee-iters", 'i', "10",
      "iterations of k-means" },
    { "lychee-chunks-per-cluster", 'i', "2",
      "chunks a cluster has on average" },
    { "lychee-coarse-max", 'i', "64",
      "most coarse units" },
    { "lychee-stats", 'b', "0",
      "measure recall, attention covered, Jaccard and WindowHit (slow)" },
    { NULL, 0, NULL, NULL },
};

// A weight of |q| r: what the user gave, otherwise 1 under --paper (D40).
static float beta_option(const Options *o, const char *name) {
    if (opt_int(o, "paper") && !opt_given(o, name)) return 1;
    return (float)opt_real(o, name);
}

// Reads every option but --lychee-kg.
static void lychee_read(Lychee *x, const Options *o) {
    x->beta        = beta_option(o, "lychee-beta");
    x->beta_coarse = beta_option(o, "lychee-beta-coarse");
    x->gqa         = opt_choice(o, "lychee-gqa", "max|sum|head");
    x->exact       = opt_choice(o, "lychee-prune", "none|exact");
    x->lazy        = opt_choice(o, "lychee-lazy", "ball|mean|freeze");
    x->unit        = opt_choice(o, "lychee-centroid", "mean|unit");
    x->pool_max    = opt_choice(o, "lychee-pool", "mean|max");
    x->tokens      = opt_choice(o, "lychee-bound", "chunk|token");
    x->first_tie   = opt_choice(o, "lychee-tie", "last|first");
    x->guard       = opt_int(o, "lychee-guard");
    x->min         = opt_int(o, "lychee-chunk-min");
    x->max         = opt_int(o, "lychee-chunk-max");
    x->buffer      = opt_int(o, "lychee-buffer");
    x->sink        = opt_int(o, "lychee-sink");
    x->full_layers = opt_int(o, "lychee-full-layers");
    x->iters       = opt_int(o, "lychee-iters");
    x->per_cluster = opt_int(o, "lychee-chunks-per-cluster");
    x->coarse_max  = opt_int(o, "lychee-coarse-max");
    x->stats       = opt_int(o, "lychee-stats");
}

// --lychee-kg: a word, or a number of units. 0, or -1 with s->err set.
static int lychee_read_kg(Session *s, Lychee *x) {
    const char *kg = opt_str(s->opt, "lychee-kg");
    const Opt number = { "lychee-kg", 'i', NULL, NULL };
    x->kg = KG_FLAT;
    if (!strcmp(kg, "flat")) return 0;
    x->kg = KG_AUTO;
    if (!strcmp(kg, "auto")) return 0;
    x->kg = atoi(kg);
    if (opt_check(&number, kg, s->err) || x->kg < 1)
        return refuse(s, "--lychee-kg wants flat, auto or a number of at least 1");
    return 0;
}

// 0, or -1 with s->err set when a value makes no sense.
static int lychee_check(Session *s, const Lychee *x) {
    if (x->beta < 0 || x->beta_coarse < 0)
        return refuse(s, "--lychee-beta and --lychee-beta-coarse must not be negative");
    if (x->min < 1 || x->max < x->min || x->max > 4096)
        return refuse(s, "--lychee-chunk-min and -max: 1 <= min <= max <= 4096 is needed");
    if (x->buffer < 0 || x->sink < 0 || x->full_layers < 0 || x->iters < 0)
        return refuse(s, "--lychee-buffer, -sink, -full-layers and -iters must not be negative");
    if (x->per_cluster < 1 || x->coarse_max < 1)
        return refuse(s, "--lychee-chunks-per-cluster and --lychee-coarse-max must be at least 1");
    if (s->ratio < 0 && s->budget < x->sink)
        return refuse(s, "--budget %d is smaller than --lychee-sink %d", s->budget, x->sink);
    return 0;
}

// An empty index: there are no chunks yet. 0, or -1 with s->err set when the options do not fit.
static int lychee_open(Session *s, void *ms) {
    Lychee *x = ms;
    size_t trees = (size_t)s->c->L * s->c->G;
    lychee_read(x, s->opt);
    if (lychee_read_kg(s, x) || lychee_check(s, x)) return -1;
    x->B = s->budget;
    x->tree = xcalloc(trees, sizeof *x->tree);
    if (x->stats) x->watch = xcalloc(trees, sizeof *x->watch);
    x->cap = 64;
    x->start = xmalloc(sizeof(int) * (size_t)(x->cap + 1));
    x->start[0] = x->sink;
    return 0;
}

// Gives everything back; open may have failed half way.
static void lychee_close(Session *s, void *ms) {
    Lychee *x = ms;
    int trees = s->c->L * s->c->G;
    for (int i = 0; x->tree && i < trees; i++) tree_free(s, &x->tree[i]);
    for (int i = 0; x->watch && i < trees; i++) free(x->watch[i].seen);
    free(x->tree);
    free(x->watch);
    free(x->start);
    free(x->level);
}

// ---- keys and k-means: sums are f32; a centre becomes bf16 once, before the last assignment (D42)

// x (D) = x / |x|. The small number keeps a vector of zeros finite (D50).
static void normalise(float *x, int D) {
    float f = 1 / sqrtf(dot_f32(x, x, D) + 1e-12f);
    for (int d = 0; d < D; d++) x[d] *= f;
}

// key (D): the key of the chunk of rows r0..r0+n-1. It is their mean or, under pool_max, their
// largest value in every dimension (Table 3), of length 1. rows (n,D) is room, which holds the
// rows' keys afterwards.
static void chunk_key(const Session *s, int pool_max, const KVHead *hd, int r0, int n, float *rows,
                      float *key) {
    int D = s->c->D;
    kv_load_k(s, hd, NULL, r0, n, rows);
    memcpy(key, rows, (size_t)D * sizeof *key);
    for (int i = 1; i < n; i++) {
        const float *k = rows + (size_t)i * D;
        for (int d = 0; d < D; d++) key[d] = pool_max ? fmaxf(key[d], k[d]) : key[d] + k[d];
    }
    for (int d = 0; d < D && !pool_max; d++) key[d] /= (float)n;
    normalise(key, D);                                            // Sec. 4.1: kbar_j
}

// dst (D) = x (D) rounded to bf16, and x is rounded with it.
static void round_bf16(uint16_t *dst, float *x, int D) {
    for (int d = 0; d < D; d++) {
        dst[d] = f32_to_bf16(x[d]);
        x[d] = bf16_to_f32(dst[d]);
    }
}

// |v - mu|, summed in double. v, mu (D).
static double distance(const float *v, const uint16_t *mu, int D) {
    double ss = 0;
    for (int d = 0; d < D; d++) {
        double e = (double)v[d] - bf16_to_f32(mu[d]);
        ss += e * e;
    }
    return sqrt(ss);
}

// An f32 that is not below r: a radius is rounded up, so that it still covers.
static float above(double r) {
    return nextafterf((float)r, INFINITY);
}

typedef struct {                // what one thread builds a tree in; M chunks, K clusters, P units
    float *key;                 // (M,D) chunk keys
    float *mu;                  // (K,D) centres of the clusters in f32
    float *gmu;                 // (P,D) centres of the units in f32
    float *sum;                 // (K,D) sums of the points of a centre
    float *sc;                  // (KV_TILE,KV_TILE) scores of points and centres
    float *len;                 // (K) 1/|mu|, for --lychee-centroid=mean
    float *rows;                // (chunk-max,D) keys of the rows of a chunk
    int *label;                 // (M) the cluster of a chunk
    int *glabel;                // (K) the unit of a cluster
    int *count;                 // (K) points of a centre
} BuildRoom;

// Every centre becomes the mean of its points, on the unit sphere if `unit`; a centre without
// points stays. x (n,D) points, label (n) their centres, mu (K,D).
static void update_centres(const float *x, int n, const int *label, float *mu, int K, int D,
                           int unit, const BuildRoom *w) {
    memset(w->sum, 0, (size_t)K * D * sizeof(float));
    memset(w->count, 0, (size_t)K * sizeof(int));
    for (int i = 0; i < n; i++) {
        float *to = w->sum + (size_t)label[i] * D;
        w->count[label[i]]++;
        for (int d = 0; d < D; d++) to[d] += x[(size_t)i * D + d];
    }
    for (int j = 0; j < K; j++) {
        float *to = w->sum + (size_t)j * D;
        if (!w->count[j]) continue;
        if (unit) {
            normalise(to, D);
        } else {
            for (int d = 0; d < D; d++) to[d] /= (float)w->count[j];
        }
        memcpy(mu + (size_t)j * D, to, (size_t)D * sizeof(float));
    }
}

// len (K) = 1/|mu|, by which cosines are made of dot products; NULL when centres have length 1
// anyway.
static const float *inverse_lengths(const float *mu, int K, int D, int unit, float *len) {
    if (unit) return NULL;
    for (int j = 0; j < K; j++) {
        const float *m = mu + (size_t)j * D;
        len[j] = 1 / sqrtf(dot_f32(m, m, D) + 1e-12f);
    }
    return len;
}

// Spherical k-means of the points x (n,D) into K centres. dst (K,D) are the centres in bf16, mu
// (K,D) the same in f32, label (n) the last assignment, which is made against the rounded centres.
// The first centres are evenly spaced points (D50).
static void kmeans(const float *x, int n, int K, int D, int iters, int unit, const BuildRoom *w,
                   float *mu, uint16_t *dst, int *label) {
    for (int j = 0; j < K; j++) {
        int64_t from = ((int64_t)2 * j + 1) * n / ((int64_t)2 * K);
        memcpy(mu + (size_t)j * D, x + (size_t)from * D, (size_t)D * sizeof(float));
    }
    for (int it = 0; it < iters; it++) {                          // Sec. 4.3
        const float *len = inverse_lengths(mu, K, D, unit, w->len);
        assign_points(x, n, mu, K, D, len, w->sc, label);
        update_centres(x, n, label, mu, K, D, unit, w);
    }
    for (int j = 0; j < K; j++) round_bf16(dst + (size_t)j * D, mu + (size_t)j * D, D);
    const float *len = inverse_lengths(mu, K, D, unit, w->len);
    assign_points(x, n, mu, K, D, len, w->sc, label);
}

// ---- building the trees (Algorithm 1, line 3)

// The node has one more chunk below it, of this key (D) and so many tokens: counts and radius
// follow, the centre stays.
static void node_cover(Nodes *u, int node, const float *key, int tokens, int D) {
    u->chunks[node]++;
    u->tokens[node] += tokens;
    double away = distance(key, u->mu + (size_t)node * D, D);
    u->r[node] = fmaxf(u->r[node], above(away));                  // Sec. 4.1: r_u
}

// rho of unit g = max over its clusters c of |mu_c - mu_g| + beta r_c: q.mu_g + |q| rho_g bounds
// the score of all of them. mu (D) is room.
static void unit_rho(Tree *t, int g, float beta, int D, float *mu) {
    t->rho[g] = 0;
    for (int c = t->coarse.first[g]; c >= 0; c = t->coarse.next[c]) {
        if (!t->fine.chunks[c]) continue;
        to_f32(mu, t->fine.mu + (size_t)c * D, DT_BF16, (size_t)D);
        double away = distance(mu, t->coarse.mu + (size_t)g * D, D);
        t->rho[g] = fmaxf(t->rho[g], above(away + (double)beta * t->fine.r[c]));
    }
}

// --lychee-bound=token: centre and radius of every cluster anew, from the raw keys of its tokens.
// The index has the same bytes and Eq. 2 the same form, but what it bounds are token keys.
static void cover_tokens(const Session *s, const Lychee *x, Tree *t, const KVHead *hd,
                         const BuildRoom *w) {
    Nodes *u = &t->fine;
    int D = s->c->D;
    for (int c = 0; c < u->n; c++) {
        uint16_t *mu = u->mu + (size_t)c * D;
        if (!u->chunks[c]) continue;

        // The centre: the mean of the keys.
        memset(w->sum, 0, (size_t)D * sizeof *w->sum);
        for (int j = u->first[c]; j >= 0; j = u->next[j]) {
            int n = x->start[j + 1] - x->start[j];
            kv_load_k(s, hd, NULL, x->start[j], n, w->rows);
            for (int i = 0; i < n; i++) {
                const float *k = w->rows + (size_t)i * D;
                for (int d = 0; d < D; d++) w->sum[d] += k[d] / (float)u->tokens[c];
            }
        }
        round_bf16(mu, w->sum, D);

        // The radius: the farthest key.
        u->r[c] = 0;
        for (int j = u->first[c]; j >= 0; j = u->next[j]) {
            int n = x->start[j + 1] - x->start[j];
            kv_load_k(s, hd, NULL, x->start[j], n, w->rows);
            for (int i = 0; i < n; i++) {
                double away = distance(w->rows + (size_t)i * D, mu, D);
                u->r[c] = fmaxf(u->r[c], above(away));
            }
        }
    }
}

// The tree of one KV head, from all M chunks: keys, clusters of chunks, units of clusters, and what
// covers what.
static void tree_build(const Session *s, const Lychee *x, Tree *t, const KVHead *hd,
                       const BuildRoom *w) {
    int D = s->c->D, M = x->M, K = t->fine.n, P = t->coarse.n;
    for (int j = 0; j < M; j++) {
        int n = x->start[j + 1] - x->start[j];
        chunk_key(s, x->pool_max, hd, x->start[j], n, w->rows, w->key + (size_t)j * D);
    }

    // Algorithm 1, line 3: the fine level C, then the coarse level G
    kmeans(w->key, M, K, D, x->iters, x->unit, w, w->mu, t->fine.mu, w->label);
    if (P) kmeans(w->mu, K, P, D, x->iters, x->unit, w, w->gmu, t->coarse.mu, w->glabel);

    nodes_clear(&t->fine);
    nodes_clear(&t->coarse);
    for (int c = 0; c < K && P; c++) {
        t->parent[c] = w->glabel[c];
        child_append(&t->coarse, w->glabel[c], c);
    }
    for (int j = 0; j < M; j++) {
        const float *key = w->key + (size_t)j * D;
        int c = w->label[j], tokens = x->start[j + 1] - x->start[j];
        child_append(&t->fine, c, j);
        node_cover(&t->fine, c, key, tokens, D);
        if (P) node_cover(&t->coarse, t->parent[c], key, tokens, D);
    }
    if (x->tokens) cover_tokens(s, x, t, hd, w);
    for (int g = 0; g < P; g++) unit_rho(t, g, x->beta, D, w->rows);
}

// The room of one thread for trees of M chunks, K clusters and P units.
static BuildRoom build_room(Session *s, const Lychee *x, int K, int P) {
    size_t M = (size_t)x->M, row = (size_t)s->c->D * sizeof(float);
    return (BuildRoom){
        .key = scratch(s, M * row),
        .mu = scratch(s, (size_t)K * row),
        .gmu = scratch(s, (size_t)P * row),
        .sum = scratch(s, (size_t)K * row),
        .sc = scratch(s, (size_t)KV_TILE * KV_TILE * sizeof(float)),
        .len = scratch(s, (size_t)K * sizeof(float)),
        .rows = scratch(s, (size_t)x->max * row),
        .label = scratch(s, M * sizeof(int)),
        .glabel = scratch(s, (size_t)K * sizeof(int)),
        .count = scratch(s, (size_t)K * sizeof(int)),
    };
}

// Builds the trees of all indexed layers on the CPU, a tree a thread.
static void build_host(Session *s, Lychee *x, int K, int P) {
    int L = s->c->L, G = s->c->G, threads = n_threads();
    size_t mark = scratch_mark(s);
    BuildRoom *room = scratch(s, (size_t)threads * sizeof *room);
    for (int i = 0; i < threads; i++) room[i] = build_room(s, x, K, P);
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < L * G; i++) {
        if (!indexed_layer(s, x, i / G)) continue;
        tree_build(s, x, &x->tree[i], &s->head[i], &room[thread_id()]);
    }
    scratch_reset(s, mark);
}

// Starts the statistics of a tree anew: cluster numbers mean something else after a build.
static void watch_restart(Watch *a, int clusters) {
    if (clusters > a->cap) {
        a->cap = clusters;
        a->seen = xrealloc(a->seen, (size_t)clusters * sizeof(int));
    }
    for (int c = 0; c < clusters; c++) a->seen[c] = -2 * WINDOW_HIT;
    a->step = 0;
    a->size = 0;
}

// Builds the index of all layers from the M chunks there are, on the session's device.
static void lychee_build(Session *s, Lychee *x) {
    int G = s->c->G, K, P;
    tree_shape(x, x->M, &K, &P);
    LycheeRule rule = lychee_rule(x, P);
    for (int l = 0; l < s->c->L; l++) {
        if (!indexed_layer(s, x, l)) continue;
        for (int i = l * G; i < (l + 1) * G; i++) {
            tree_room(s, &x->tree[i], 2 * x->M, K, P, s->c->D);
            if (x->watch) watch_restart(&x->watch[i], K);
        }
        if (KV_DEV(s)) lychee_build_cuda(s, &rule, l, &x->tree[l * G]);
    }
    if (!KV_DEV(s)) build_host(s, x, K, P);
    x->M_built = x->M;
    s->changes++;                               // the trees may lie elsewhere now
}

// ---- scores
typedef struct {                // what a list is sought with: the query heads of a group, or one
    const float *q;             // (m,D)
    int m;
    float w[Q_BLOCK];           // (m) weights: a node's dot product is max over i of (q_i . mu) w_i
    float slack;                // |q| of Eq. 2
} Probe;

typedef struct {                // what one thread retrieves in; R query heads a group, N rows
    float *sc;                  // (R,max(K,P)) dot products
    float *S, *Sg;              // (K) (P) scores of clusters, of units; -INFINITY: not to be read
    int *unit;                  // (P) units, a heap
    int *used;                  // (K+1) clusters to take chunks from, in order
    int n_used;                 // so many of them gave a chunk
    unsigned char *taken;       // (M) 1: the chunk is read
    int *rows;                  // (N) rows
    float *q;                   // (D) summed query
    float *mu;                  // (KV_TILE,D) gathered centres; also keys, for statistics
    float *prob;                // (N) with --lychee-stats
} SeekRoom;

// A room a thread, for trees of the size of t and R queries at once.
static SeekRoom *seek_rooms(Session *s, const Lychee *x, const Tree *t, int R) {
    int threads = n_threads();
    size_t K = (size_t)t->fine.n, P = (size_t)t->coarse.n;
    size_t D = (size_t)s->c->D, N = (size_t)s->n_tok;
    SeekRoom *w = scratch(s, (size_t)threads * sizeof *w);
    for (int i = 0; i < threads; i++) {
        w[i] = (SeekRoom){
            .sc = scratch(s, (size_t)R * max_size(K, P) * sizeof(float)),
            .S = scratch(s, K * sizeof(float)),
            .Sg = scratch(s, P * sizeof(float)),
            .unit = scratch(s, P * sizeof(int)),
            .used = scratch(s, (K + 1) * sizeof(int)),
            .taken = scratch(s, (size_t)x->M),
            .rows = scratch(s, N * sizeof(int)),
            .q = scratch(s, D * sizeof(float)),
            .mu = scratch(s, KV_TILE * D * sizeof(float)),
            .prob = x->watch ? scratch(s, N * sizeof(float)) : NULL,
        };
    }
    return w;
}

// --lychee-gqa=max: every one of the m query heads q (m,D) may win. Each counts with length 1, so
// that no head wins by its scale (D45).
static void probe_max(Probe *p, const float *q, int m, int D) {
    *p = (Probe){ .q = q, .m = m, .slack = 1 };
    for (int i = 0; i < m; i++) {
        const float *qi = q + (size_t)i * D;
        p->w[i] = 1 / fmaxf(sqrtf(dot_f32(qi, qi, D)), 1e-20f);
    }
}

// --lychee-gqa=sum: the sum of the query heads; with m == 1 also --lychee-gqa=head. sum (D) is room
// for it.
static void probe_sum(Probe *p, const float *q, int m, int D, float *sum) {
    *p = (Probe){ .q = sum, .m = 1, .w = { 1 } };
    memset(sum, 0, (size_t)D * sizeof *sum);
    for (int i = 0; i < m; i++) {
        const float *qi = q + (size_t)i * D;
        for (int d = 0; d < D; d++) sum[d] += qi[d];
        p->slack += sqrtf(dot_f32(qi, qi, D));
    }
}

// S (n): the scores of n nodes with radii r (n), which are the upper bound UB when beta is 1. sc
// (m,n): q_i . mu.
static void upper_bounds(const Probe *p, const float *sc, int n, const float *r, float beta,
                         float *S) {
    float slack = beta * p->slack;
    for (int j = 0; j < n; j++) S[j] = -INFINITY;
    for (int i = 0; i < p->m; i++) {
        const float *row = sc + (size_t)i * n;
        float w = p->w[i];
        for (int j = 0; j < n; j++) S[j] = row[j] * w > S[j] ? row[j] * w : S[j];
    }
    for (int j = 0; beta && j < n; j++) S[j] += slack * r[j];     // Eq. 2: q.mu_u + |q| r_u
}

// The scores S (n) of all nodes of a level, with radii r (n); an empty node has -INFINITY. sc (m,n)
// is room.
static void score_level(const Probe *p, const Nodes *u, const float *r, float beta, int D,
                        float *sc, float *S) {
    scores_of(sc, p->q, u->mu, DT_BF16, p->m, u->n, D, 1, (Ahead){0});
    upper_bounds(p, sc, u->n, r, beta, S);
    for (int j = 0; j < u->n; j++) S[j] = u->chunks[j] ? S[j] : -INFINITY;
}

// The scores of the clusters below unit g, into w->S. They lie apart, so their centres are gathered
// tile by tile.
static void score_unit(const Lychee *x, const Tree *t, const Probe *p, int g, int D, SeekRoom *w) {
    const Nodes *u = &t->fine;
    float sc[Q_BLOCK * KV_TILE], r[KV_TILE], S[KV_TILE];
    int id[KV_TILE];
    int c = t->coarse.first[g];
    while (c >= 0) {
        int k = 0;
        for (; c >= 0 && k < KV_TILE; c = t->coarse.next[c]) {
            if (!u->chunks[c]) continue;
            to_f32(w->mu + (size_t)k * D, u->mu + (size_t)c * D, DT_BF16, (size_t)D);
            r[k] = u->r[c];
            id[k] = c;
            k++;
        }
        attn_scores(sc, p->q, w->mu, p->m, k, D, 1);
        upper_bounds(p, sc, k, r, x->beta, S);                    // Algorithm 1, line 13: Scores_c
        for (int j = 0; j < k; j++) w->S[id[j]] = S[j];
    }
}

// ---- grafting: a chunk that is complete joins the index (Algorithm 1, lines 18-23)

// How far a centre moves towards a new key: 0 not at all, 1 onto it. n: members so far, d: the key's
// distance, r: the radius. LAZY_MEAN makes it the mean of n + 1 members, LAZY_BALL the centre of the
// smallest ball that holds the old ball and the key, and LAZY_FREEZE leaves it.
static double centre_step(int lazy, int n, double d, double r) {
    if (lazy == LAZY_MEAN) return 1 / (n + 1.0);
    if (lazy == LAZY_BALL && d > r) return (d - r) / (2 * d);
    return 0;
}

// Moves the centre mu (D) by `step` of the way to v (D), and onto the unit sphere if `unit` -> the
// length of its shift, as rounded to bf16. room (D) is room.
static double centre_move(uint16_t *mu, const float *v, double step, int unit, int D, float *room) {
    double shift = 0;
    to_f32(room, mu, DT_BF16, (size_t)D);
    for (int i = 0; i < D; i++) room[i] = (float)(room[i] + step * ((double)v[i] - room[i]));
    if (unit) normalise(room, D);
    for (int i = 0; i < D; i++) {
        uint16_t to = f32_to_bf16(room[i]);
        double e = (double)bf16_to_f32(to) - bf16_to_f32(mu[i]);
        shift += e * e;
        mu[i] = to;
    }
    return sqrt(shift);
}

// The node takes in one more key v (D) beside the n it has: its centre follows, and its radius goes
// on covering all of them (D49). unit: under LAZY_MEAN the centre stays on the sphere. room (D) is
// room.
//   r' = max(r + |mu' - mu|, |v - mu'|)
static void node_absorb(const Lychee *x, Nodes *u, int node, int n, const float *v, int unit, int D,
                        float *room) {
    uint16_t *mu = u->mu + (size_t)node * D;
    double d = distance(v, mu, D), r = u->r[node], shift = 0;
    double step = centre_step(x->lazy, n, d, r);
    if (step > 0) {
        shift = centre_move(mu, v, step, x->lazy == LAZY_MEAN && unit, D, room);
        d = distance(v, mu, D);
    }
    if (shift > 0 || d > r) u->r[node] = above(fmax(r + shift, d));  // Sec. 4.4
}

// The cluster whose centre has the largest dot product with the chunk key v (D); mu (D) is room.
static int nearest_cluster(const Lychee *x, const Tree *t, const float *v, int D, float *mu,
                           SeekRoom *w) {
    Probe p = { .q = v, .m = 1, .w = { 1 } };
    score_level(&p, &t->fine, t->fine.r, 0, D, w->sc, w->S);
    for (int i = 0; i < t->fine.n && x->tokens; i++) {      // centres of raw keys differ in length
        to_f32(mu, t->fine.mu + (size_t)i * D, DT_BF16, (size_t)D);
        w->S[i] /= sqrtf(dot_f32(mu, mu, D) + 1e-12f);
    }
    int c = 0;
    for (int i = 0; i < t->fine.n; i++) {
        if (w->S[i] > w->S[c]) c = i;
    }
    return c;
}

// Chunk j joins the nearest cluster and the unit above it. room (chunk-max + 2,D) is room.
static void tree_graft(const Session *s, const Lychee *x, Tree *t, const KVHead *hd, int j,
                       float *room, SeekRoom *w) {
    int D = s->c->D, n = x->start[j + 1] - x->start[j];
    float *v = room, *mu = room + D, *rows = room + (size_t)2 * D;
    chunk_key(s, x->pool_max, hd, x->start[j], n, rows, v);
    int c = nearest_cluster(x, t, v, D, mu, w);
    if (x->tokens) {
        for (int i = 0; i < n; i++) {
            const float *k = rows + (size_t)i * D;
            node_absorb(x, &t->fine, c, t->fine.tokens[c] + i, k, 0, D, mu);
        }
    } else {
        node_absorb(x, &t->fine, c, t->fine.chunks[c], v, x->unit, D, mu);
    }
    child_append(&t->fine, c, j);
    t->fine.chunks[c]++;
    t->fine.tokens[c] += n;
    if (!t->coarse.n) return;

    int g = t->parent[c];
    node_absorb(x, &t->coarse, g, t->coarse.chunks[g], v, x->unit, D, mu);
    t->coarse.chunks[g]++;
    t->coarse.tokens[g] += n;
    unit_rho(t, g, x->beta, D, mu);
}

// Grafts chunks from..M-1 onto the trees on the CPU, in order in every tree.
static void graft_host(Session *s, Lychee *x, int from) {
    int L = s->c->L, G = s->c->G;
    int first = 0;                              // the first layer with an index
    while (first < L && !indexed_layer(s, x, first)) first++;
    if (first == L) return;
    size_t mark = scratch_mark(s), per = (size_t)(x->max + 2) * s->c->D;
    SeekRoom *w = seek_rooms(s, x, &x->tree[first * G], 1);
    float *room = scratch(s, (size_t)n_threads() * per * sizeof(float));
    #pragma omp parallel for schedule(static) if (x->M > 256)
    for (int i = first * G; i < L * G; i++) {
        int me = thread_id();
        for (int j = from; j < x->M && indexed_layer(s, x, i / G); j++)
            tree_graft(s, x, &x->tree[i], &s->head[i], j, room + me * per, &w[me]);
    }
    scratch_reset(s, mark);
}

// Grafts chunks from..M-1 onto the index, on the session's device.
static void lychee_graft(Session *s, Lychee *x, int from) {
    if (!KV_DEV(s)) {
        graft_host(s, x, from);
        return;
    }
    LycheeRule rule = lychee_rule(x, 0);
    for (int l = 0; l < s->c->L; l++) {
        if (indexed_layer(s, x, l)) lychee_graft_cuda(s, &rule, l, from);
    }
}

// ---- retrieval (Algorithm 1, lines 8-16)

// Makes w->unit a heap of the P units by score, and says that no cluster is opened yet -> how many
// units hold anything. r (P), beta: what their score adds to q.mu_g.
static int units_by_score(const Tree *t, const Probe *p, const float *r, float beta, int D,
                          SeekRoom *w) {
    int n = 0;
    score_level(p, &t->coarse, r, beta, D, w->sc, w->Sg);         // Algorithm 1, line 9: Scores_g
    for (int g = 0; g < t->coarse.n; g++) {
        if (!t->coarse.chunks[g]) continue;
        w->unit[n] = g;
        n++;
    }
    heapify(w->unit, n, w->Sg);
    for (int c = 0; c < t->fine.n; c++) w->S[c] = -INFINITY;
    return n;
}

// Opens the best k_g units, and more while those opened hold less than four times what the budget
// has room for (D46).
static void open_top(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {
    int kg = units_to_open(x, t->coarse.n), enough = 4 * room_for_chunks(x), tokens = 0;
    int units = units_by_score(t, p, t->coarse.r, x->beta_coarse, D, w);
    for (int i = 0; units > 0 && (i < kg || tokens < enough); i++) {
        int g = pop_best(w->unit, &units, w->Sg);                 // Algorithm 1, line 10: TopK
        tokens += t->coarse.tokens[g];
        score_unit(x, t, p, g, D, w);
    }
}

// --lychee-prune=exact: opens units by their upper bound, until the budget fills with clusters that
// score above the bound of every unit left. The bound gets 1e-4 |q| on top, which is more than dot
// products in f32 lose by rounding; so the result is that of a flat scan.
static void open_exact(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {
    int units = units_by_score(t, p, t->rho, 1, D, w);
    while (units > 0) {
        float bound = w->Sg[w->unit[0]] + 1e-4f * p->slack;
        if (tokens_above(&t->fine, w->S, bound) > room_for_chunks(x)) break;
        int g = pop_best(w->unit, &units, w->Sg);
        score_unit(x, t, p, g, D, w);
    }
}

// The scores of the clusters that take part in this step -> w->S (K).
static void open_clusters(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {
    if (x->exact) open_exact(x, t, p, D, w);
    else if (x->kg != KG_FLAT) open_top(x, t, p, D, w);
    else score_level(p, &t->fine, t->fine.r, x->beta, D, w->sc, w->S);
}

// Takes the chunks of cluster c in their order, as long as they fit -> 0 when one did not. *tokens:
// those of the chunks taken so far.
static int take_chunks(const Lychee *x, const Tree *t, int c, int *tokens, SeekRoom *w) {
    for (int j = t->fine.first[c]; j >= 0; j = t->fine.next[j]) {
        int n = x->start[j + 1] - x->start[j];
        if (*tokens + n > room_for_chunks(x)) return 0;
        if (j == t->fine.first[c]) w->n_used++;
        w->taken[j] = 1;
        *tokens += n;
    }
    return 1;
}

// Marks the chunks to read in w->taken (M) -> their tokens. Takes the chunks of the best cluster,
// then those of the next one, equal ones by number, until the first chunk that does not fit into the
// budget (D44). clusters_that_fill gives the clusters in such an order without sorting them.
static int retrieve(const Lychee *x, const Tree *t, const Probe *p, int D, SeekRoom *w) {
    int tokens = 0, fits = 1;
    open_clusters(x, t, p, D, w);
    int n = clusters_that_fill(&t->fine, w->S, room_for_chunks(x), w->used);
    memset(w->taken, 0, (size_t)x->M);
    w->n_used = 0;
    for (int i = 0; i < n && fits; i++) {                         // Algorithm 1, line 14: C_top
        fits = take_chunks(x, t, w->used[i], &tokens, w);
    }
    return tokens;
}

// rows: the first rows and those of the chunks taken, ascending -> how many.
static int rows_to_read(const Lychee *x, const unsigned char *taken, int *rows) {
    int n = 0;
    for (int r = 0; r < x->sink; r++) rows[n++] = r;
    for (int j = 0; j < x->M; j++) {                              // Algorithm 1, line 16: KV_active
        if (!taken[j]) continue;
        for (int r = x->start[j]; r < x->start[j + 1]; r++) rows[n++] = r;
    }
    return n;
}

// ---- statistics on request (D51): against exact dot products, for every query head

// Adds one head step to the sums of `a`: which of the k best indexed rows were read, and what share
// of the attention the rows read receive. q (D); k: tokens of the chunks taken; top (N) is room.
static void watch_head(Session *s, const Lychee *x, Watch *a, const KVHead *hd, const float *q,
                       int k, SeekRoom *w, int *top) {
    int D = s->c->D, N = hd->len, lo = x->sink, hi = t_idx(x), hits = 0;
    double read = 0, indexed = 0, read_indexed = 0;             // sums of exponentials
    if (!k) return;

    // Scores of all rows, and the best k of the indexed ones.
    for (int r = 0; r < N; r += KV_TILE) {
        int n = min_int(KV_TILE, N - r);
        kv_load_k(s, hd, NULL, r, n, w->mu);
        attn_scores(w->prob + r, q, w->mu, 1, n, D, 1 / sqrtf((float)D));
    }
    int m = top_k(w->prob + lo, hi - lo, k, top), i = 0;
    float max = max_f32(w->prob, N);

    // Indexed rows; top ascends as they do.
    for (int j = 0; j < x->M; j++) {
        for (int r = x->start[j]; r < x->start[j + 1]; r++) {
            double e = exp((double)w->prob[r] - max);
            int is_top = i < m && top[i] == r - lo;
            i += is_top;
            indexed += e;
            if (!w->taken[j]) continue;
            hits += is_top;
            read_indexed += e;
        }
    }

    // First and recent rows, which are read anyway.
    for (int r = 0; r < lo; r++) read += exp((double)w->prob[r] - max);
    for (int r = hi; r < N; r++) read += exp((double)w->prob[r] - max);
    a->recall += (double)hits / k;
    a->covered += (read + read_indexed) / (read + indexed);
    a->covered_indexed += read_indexed / indexed;
    a->n_recall++;
}

typedef struct {                // the clusters S_t of one step
    int size;                   // |S_t|
    int again;                  // |S_t n S_t-1|
    int recent;                 // |S_t n (S_t-1 u .. u S_t-32)|
} StepSet;

// S_t grows by the clusters used (n). One that another query head of the group has brought counts
// once.
static void watch_mark(Watch *a, const int *used, int n, StepSet *set) {
    for (int i = 0; i < n; i++) {
        int ago = a->step - a->seen[used[i]];
        if (!ago) continue;
        set->size++;
        set->again += ago == 1;
        set->recent += ago <= WINDOW_HIT;
        a->seen[used[i]] = a->step;
    }
}

// Adds the step's Eq. 3 and Eq. 4 to the sums. The first step after a build has no past.
static void watch_step(Watch *a, const StepSet *set) {
    int united = set->size + a->size - set->again;
    if (a->step > 1 && united) {
        a->jaccard += (double)set->again / united;                // Eq. 3: J(S_t, S_t-1)
        a->n_jaccard++;
    }
    if (a->step > 1 && set->size) {
        a->hit += (double)set->recent / set->size;                // Eq. 4: WindowHit(S_t)
        a->n_hit++;
    }
    a->size = set->size;
}

// ---- hook select: what the query heads of a layer read in this decode step

// The rows that the heads q (m,D) of one list read: w->rows (*n) -> the tokens of the chunks among
// them.
static int seek(const Lychee *x, const Tree *t, const float *q, int m, int D, SeekRoom *w, int *n) {
    Probe p;
    if (x->gqa == GQA_MAX) probe_max(&p, q, m, D);
    else probe_sum(&p, q, m, D, w->q);
    int tokens = retrieve(x, t, &p, D, w);
    *n = rows_to_read(x, w->taken, w->rows);
    return tokens;
}

// As seek(), from the list that the GPU has found: LIST_HEAD numbers, the rows (per), the clusters
// used (per).
static int seek_found(const Lychee *x, const int *found, int per, SeekRoom *w, int *n) {
    *n = found[LIST_ROWS];
    w->n_used = found[LIST_CLUSTERS];
    memcpy(w->rows, found + LIST_HEAD, (size_t)*n * sizeof(int));
    memcpy(w->used, found + LIST_HEAD + per, (size_t)w->n_used * sizeof(int));
    int i = x->sink;                            // statistics want the chunks marked
    for (int j = 0; j < x->M && x->watch; j++) {
        w->taken[j] = i < *n && w->rows[i] == x->start[j];
        if (w->taken[j]) i += x->start[j + 1] - x->start[j];
    }
    return found[LIST_TOKENS];
}

// Sets the views of the query heads q (R,D) of KV head g: one list for the group or, under
// --lychee-gqa=head, one for each. found: what the GPU has found, (lists,LIST_HEAD + 2 per); NULL:
// look here.
static void select_group(Session *s, const Lychee *x, int l, int g, const float *q,
                         const int *found, int per, SeekRoom *w) {
    int R = s->c->H / s->c->G, D = s->c->D;
    int lists = x->gqa == GQA_HEAD ? R : 1, each = R / lists;
    const Tree *t = &x->tree[l * s->c->G + g];
    Watch *a = x->watch ? &x->watch[l * s->c->G + g] : NULL;
    StepSet step = {0};
    if (a) a->step++;
    for (int i = 0; i < lists; i++) {
        const float *qi = q + (size_t)i * each * D;
        int n, tokens;
        if (found) tokens = seek_found(x, found + (size_t)i * (LIST_HEAD + 2 * per), per, w, &n);
        else tokens = seek(x, t, qi, each, D, w, &n);
        if (lists == 1) view_group(s, l, g, w->rows, n, t_idx(x));
        else view_set(s, l, g * R + i, w->rows, n, t_idx(x));
        if (!a) continue;
        watch_mark(a, w->used, w->n_used, &step);
        for (int h = 0; h < each; h++) {
            watch_head(s, x, a, kv_head(s, l, g), qi + (size_t)h * D, tokens, w, w->rows);
        }
    }
    if (a) watch_step(a, &step);
}

// Up to so many tokens every row is read, and there is nothing to select.
static long lychee_dense(const Lychee *x) {
    return (long)x->B + x->buffer;
}

// Must the host see what the GPU finds? It measures the statistics, and it sets views that differ
// between the heads of a group.
static int lychee_bring(const Lychee *x) {
    return x->watch || x->gqa == GQA_HEAD;
}

// A step launches what the last one did, but for the first that reads a list.
static int lychee_steady(const Session *s, const void *ms) {
    return !lychee_bring(ms) && s->n_tok != lychee_dense(ms) + 1;
}

// Sets the views of layer l for this step; q (H,D). Where it returns at once, the views say: every
// row.
static void lychee_select(Session *s, void *ms, int l, const float *q) {
    Lychee *x = ms;
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    if (l < x->full_layers || !x->M_built || s->n_tok <= lychee_dense(x)) return;
    double t0 = now();
    size_t mark = scratch_mark(s);
    const Tree *tree = &x->tree[l * G];         // (G)
    int per = x->sink + room_for_chunks(x);     // most rows of a list
    int bring = lychee_bring(x), *found = NULL;
    int lists = x->gqa == GQA_HEAD ? R : 1;     // of a KV head
    size_t each = (size_t)lists * (LIST_HEAD + 2 * per);    // numbers the GPU finds for a KV head
    if (KV_DEV(s)) {
        LycheeRule rule = lychee_rule(x, tree->coarse.n);
        found = lychee_seek_cuda(s, &rule, l, tree, q, per, bring);
        if (x->watch) q = on_host(s, q, 0, 1);
    }
    if (!KV_DEV(s) || bring) {
        SeekRoom *w = seek_rooms(s, x, tree, R);
        #pragma omp parallel for schedule(static) if (x->M > 256 && !found)
        for (int g = 0; g < G; g++) {
            const int *of_head = found ? found + g * each : NULL;
            select_group(s, x, l, g, q + (size_t)g * R * D, of_head, per, &w[thread_id()]);
        }
    }
    scratch_reset(s, mark);
    timed(&s->clk.index, t0);
}

// ---- hook commit: at the end of a pass chunks are cut, and the index is built or grafted on

// Cuts every chunk whose end is certain: max tokens have been seen, and behind them the recent rows;
// at least one, because the level of a boundary depends on the token that follows (D43).
static void cut_chunks(const Session *s, Lychee *x) {
    int N = s->n_tok, behind = max_int(x->buffer, 1) + x->max;
    if (N > x->cap_level) {
        x->cap_level = N + N / 2 + 256;
        x->level = xrealloc(x->level, (size_t)x->cap_level);
    }
    if (x->n_level < N - 1) {
        levels_extend(x->level, x->n_level, N - 1, &x->tail, s->tok, x->guard);
        x->n_level = N - 1;
    }
    while (N - t_idx(x) >= behind) {
        int e = chunk_end(x->level, t_idx(x), x->min, x->max, x->first_tie);
        if (x->M == x->cap) {
            x->cap += x->cap / 2;
            x->start = xrealloc(x->start, (size_t)(x->cap + 1) * sizeof(int));
        }
        x->ends[x->level[e]]++;
        x->M++;
        x->start[x->M] = e + 1;                                   // Algorithm 1, line 21: Pack(B)
    }
}

// At the end of a pass (l == L). There is no index as long as every row is read anyway; it is built
// anew when the chunks have doubled, and grafted on in between (D41).
static void lychee_commit(Session *s, void *ms, int l, const float *q, int T) {
    Lychee *x = ms;
    int old = x->M;
    (void)q;
    (void)T;
    if (l < s->c->L) return;
    if (kv_longest(s, 0) != s->n_tok)
        die(EXIT_USAGE, "--method: lychee needs every row, another part has dropped some of %d",
            s->n_tok);
    if (!s->decoding) x->B = budget_now(s);
    if (!x->M_built && s->n_tok <= lychee_dense(x)) return;

    double t0 = now();
    cut_chunks(s, x);                                             // Algorithm 1, line 2
    if (x->M == old) return;
    if (x->M >= 2 * x->M_built) lychee_build(s, x);               // Algorithm 1, line 3
    else lychee_graft(s, x, old);                                 // Algorithm 1, line 22: LazyUpdate
    timed(&s->clk.index, t0);
}

// ---- the other hooks

// Tokens from n_tok on are gone. Other tokens may follow, so the text is read again when it is
// needed. An index of only the tokens that stay is kept; one that reaches further is dropped (D47).
static void lychee_forget(Session *s, void *ms, int n_tok) {
    Lychee *x = ms;
    (void)s;
    x->n_level = 0;
    x->tail.n = 0;
    if (t_idx(x) <= n_tok) return;
    x->M = 0;
    x->M_built = 0;
    x->start[0] = x->sink;
}

// Bytes the index holds: levels, starts, trees, statistics.
static size_t lychee_bytes(const Session *s, const void *ms) {
    const Lychee *x = ms;
    size_t n = (size_t)x->cap_level + (size_t)(x->cap + 1) * sizeof(int);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        n += x->tree[i].bytes;
        if (x->watch) n += sizeof(Watch) + (size_t)x->watch[i].cap * sizeof(int);
    }
    return n;
}

// The most bytes it takes for n tokens: those of an index in which every chunk is as short as it
// may be.
static size_t lychee_plan(const Session *s, const void *ms, int n) {
    const Lychee *x = ms;
    int M = n / x->min, K, P, heads = 0;
    Tree t = {0};
    tree_shape(x, M, &K, &P);
    for (int l = 0; l < s->c->L; l++) heads += indexed_layer(s, x, l) ? s->c->G : 0;
    size_t tree = tree_carve(&t, NULL, 2 * M, K, P, s->c->D);
    return (size_t)n + (size_t)(M + 1) * sizeof(int) + heads * tree;
}

// The sums of all trees.
static Watch watch_total(const Session *s, const Lychee *x) {
    Watch a = {0};
    for (int i = 0; x->watch && i < s->c->L * s->c->G; i++) {
        const Watch *b = &x->watch[i];
        a.recall += b->recall;
        a.covered += b->covered;
        a.covered_indexed += b->covered_indexed;
        a.n_recall += b->n_recall;
        a.jaccard += b->jaccard;
        a.n_jaccard += b->n_jaccard;
        a.hit += b->hit;
        a.n_hit += b->n_hit;
    }
    return a;
}

typedef struct {                // clusters of all trees, by their chunks
    long all, single, empty;    // all of them; with one chunk; with none
    long most;                  // chunks of the largest
} ClusterCount;

// Counts the clusters; those of a device session are fetched first.
static ClusterCount clusters_count(const Session *s, const Lychee *x) {
    ClusterCount n = {0};
    for (int i = 0; i < s->c->L * s->c->G && x->M_built; i++) {
        const Nodes *u = &x->tree[i].fine;
        int *copy = KV_DEV(s) ? xmalloc((size_t)(u->n + 1) * sizeof(int)) : NULL;
        const int *chunks = copy ? copy : u->chunks;
        if (copy) bytes_load_cuda(copy, u->chunks, (size_t)u->n * sizeof(int));
        for (int c = 0; c < u->n; c++) {
            n.all++;
            n.single += chunks[c] == 1;
            n.empty += !chunks[c];
            if (chunks[c] > n.most) n.most = chunks[c];
        }
        free(copy);
    }
    return n;
}

// Prints how chunks end, how full clusters are and, with --lychee-stats, what was measured.
static void lychee_stats(const Session *s, const void *ms, FILE *out) {
    const Lychee *x = ms;
    const long *ends = x->ends;
    long forced = ends[CUT_NONE] + ends[CUT_INSIDE], cut = forced;
    for (int k = CUT_STRUCTURE; k < CUT_NONE; k++) cut += ends[k];
    ClusterCount n = clusters_count(s, x);
    if (!n.all) {
        fprintf(out, "lychee: no index yet (it starts past %ld tokens)\n", (long)x->B + x->buffer);
        return;
    }
    fprintf(out, "lychee: %d chunks of %.2f tokens; ends: %.0f%% structure, %.0f%% sentence, %.0f%% phrase, "
                 "%.0f%% blank, %.0f%% forced\n",
            x->M, (double)(t_idx(x) - x->sink) / x->M, 100.0 * ends[CUT_STRUCTURE] / cut,
            100.0 * ends[CUT_SENTENCE] / cut, 100.0 * ends[CUT_PHRASE] / cut, 100.0 * ends[CUT_BLANK] / cut,
            100.0 * forced / cut);
    fprintf(out, "lychee: %ld clusters, %.1f%% of one chunk, %.1f%% empty, largest %ld chunks; "
                 "index %zu bytes, %.2f%% of the rows'\n",
            n.all, 100.0 * n.single / n.all, 100.0 * n.empty / n.all, n.most, lychee_bytes(s, x),
            100.0 * lychee_bytes(s, x) / kv_bytes(s));
    Watch a = watch_total(s, x);
    if (a.n_recall)
        fprintf(out, "lychee: recall %.4f, attention covered %.4f, of the indexed rows' %.4f, "
                     "over %ld head steps\n",
                a.recall / a.n_recall, a.covered / a.n_recall, a.covered_indexed / a.n_recall, a.n_recall);
    if (a.n_jaccard && a.n_hit)
        fprintf(out, "lychee: Jaccard %.4f, WindowHit(%d) %.4f\n", a.jaccard / a.n_jaccard, WINDOW_HIT,
                a.hit / a.n_hit);
}

// ---- the table entry
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
// Chen, Liu, Wang, Fan, Chu, Li, Chu, Hu: SONIC: Segmented Optimized Nexus for Information
// Compression in Key-Value Caching. arXiv 2601.21927.
//
// When a message of a dialogue is finished, K learned Nexus tokens are fed behind it. They read the
// message through weight matrices of their own, and afterwards only their K and V rows stay: the
// rows of the message itself are dropped. The system message and the current turn are never
// compressed, and the weights of the base model stay as they are.
//
//   S_aug = { I_sys, m_1, N^(1), m_2, N^(2), .., m_h, N^(h), Q_curr }                    Eq. 1
//   e(N_j^t) = e_base + e_pos[j] + e_turn[t]       user and assistant message of a turn share t  Eq. 2
//   a text token at p sees a text token at q  iff  q <= p                                Eq. 3
//   behind N^(i), nobody sees the body B_i of m_i                                        Eq. 4
//   Nexus tokens see each other, in both directions                                      Eq. 5
//   a Nexus row has its own W_Q, W_K, W_V, W_O and MLP; the norms are the base model's   Sec. 3.1
//   K can be chosen for every run, up to K_max; the adapter names the default K_0        Sec. 4.3
//
// Incremental mode (the default) encodes each message once and keeps its Nexus rows for the rest of
// the dialogue. When a turn begins, the turn before it is finished in five steps:
//   1. truncate the session behind the user's message
//   2. the Nexus pass of the user's message
//   3. drop the rows of the user's message
//   4. encode the answer again
//   5. the Nexus pass of the answer; drop the answer's rows
// The answer has to be encoded again because it was generated while the user's raw message was
// visible, and Eq. 4 forbids that for a finished message.
//
// **Differs from the paper:**
//   - By Eq. 5 an old Nexus token sees the later ones, so its rows would change with every message
//     and could not be cached. Incremental mode is therefore causal across segments (VIS_SEGMENT):
//     a Nexus token sees those of its own and of earlier segments. --sonic-oneshot has the exact
//     mask (VIS_SEGMENT_EXACT): the whole history goes through one pass, every turn.
//   - K_i = max(1, min(K, |B_i|)), or by --sonic-ratio a share of every message.
//   - The first --sonic-sink tokens count as system message: the rows of the first tokens draw
//     attention and must stay.
//   - The paper does not say which positions Nexus tokens have, what T_max is, or what exactly a
//     body is (here: all tokens of a message, control tokens included). NOTES.md says what we
//     chose.
//   - Eq. 6 to 14 are the training: models/make_nexus.py. The bound h K <= B of Eq. 15 is not
//     enforced.
//
// Map:
//   Eq. 1 -> sonic_enter, sonic_finish, sonic_nexus, sonic_one_shot
//   Eq. 2 -> sonic_embed, embed_cuda
//   Eq. 3 -> kv_visible, attn_prefill, attend_kernel, tensor_kernel, decode_kernel
//   Eq. 4 -> kv_visible, sonic_drop, kv_keep, rows_move_cuda, gather_kernel
//   Eq. 5 -> kv_visible, attn_prefill, attend_kernel, tensor_kernel
//   Sec. 3.1 -> same_weights, project_rows, mlp_rows
//   Sec. 4.3 -> sonic_K, sonic_numbers
// kv_visible stands in kvcomp.h: one mask for both devices. The hooks of this section run on the
// host on both. A device has no kernel for SONIC alone: embed_cuda uploads what sonic_embed makes,
// the attention kernels ask kv_visible, same_weights (each half has one) picks the matrices for a
// run of rows, and kv_keep gathers the rows that stay.
//
// Options: --sonic-k, --sonic-ratio (or --ratio), --sonic-weights, --sonic-untrained, --sonic-seed,
// --sonic-pos, --sonic-oneshot, --sonic-sink, --sonic-force.

// A finished message m_i.
typedef struct {
    int n;                      // |B_i|, tokens of its body
    int turn;                   // t of Eq. 2
} SonicMessage;

typedef struct {
    // the adapter
    SafeFile *file;             // mapped; NULL: untrained
    Layer *alt;                 // (L) the Nexus branch
    float *embed;               // (C) e_base. One block holds all three, and begins here
    float *pos;                 // (K_max,C) e_pos
    float *turn;                // (T_max,C) e_turn
    int K_max;                  // rows of e_pos
    int T_max;                  // rows of e_turn
    // how it is used
    int K;                      // Nexus tokens of a message
    double ratio;               // share of a body to remove; < 0: K counts instead
    int original;               // 1: text has positions as if there were no Nexus tokens; 0: as in S_aug
    int oneshot;                // 1: exact mask, the whole history every turn
    int sink;                   // least number of tokens that count as system message
    // the dialogue
    int sys;                    // its leading tokens that are the system message
    int h;                      // finished messages; also the segment number of the current turn
    int cur;                    // first token of the current turn, as an index into Session.tok
    int n_user;                 // how many tokens of the current turn are the user's message
    int drop;                   // commit drops the text rows of segments [0,drop)
    SonicMessage *msg;          // (h) the finished messages, stb_ds array; one-shot mode only
    // statistics
    long n_body, n_nexus;       // sums of |B_i| and of K_i
    double seconds;             // spent at turn starts on finished messages
    int warned;                 // Nexus tokens embedded with a turn beyond T_max
} Sonic;

// Reads the adapter at `path` into x (section 20). Returns 0, or -1 with s->err set.
static int sonic_load(Session *s, Sonic *x, const char *path);
// Bytes of the adapter's tensors (section 20).
static size_t sonic_file_bytes(const Sonic *x);

// ---- the untrained adapter

// A sample of the standard normal distribution, by Box and Muller, from two numbers in [0,1).
static double sonic_normal(uint64_t *state) {
    double u = (double)(splitmix64(state) >> 11) / 9007199254740992.0;       // 53 bits over 2^53
    double v = (double)(splitmix64(state) >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(1 - u)) * cos(2 * M_PI * v);
}

// --sonic-untrained: fills x for trials without an adapter. The branch stays the base model itself.
// e_base is the mean of the embedding table; e_pos is noise as large as the table's entries, and
// e_turn noise of 0.3 times that size.
static void sonic_untrained(Session *s, Sonic *x) {
    const Tensor *e = &s->w->embed;
    int C = s->c->C;
    int rows = min_int(e->rows, 4096);                  // enough for a mean
    uint64_t state = mix64((uint64_t)opt_int(s->opt, "sonic-seed"));
    x->K_max = 64;
    x->T_max = 32;
    x->K = 16;
    x->embed = xcalloc((size_t)(1 + x->K_max + x->T_max) * C, sizeof(float));

    // The mean of the rows, and the size of their entries
    double square = 0;
    float *row = xmalloc((size_t)C * sizeof *row);
    for (int r = 0; r < rows; r++) {
        to_f32(row, (const char *)e->data + (size_t)r * C * dtype_size(e->dtype), e->dtype, C);
        for (int i = 0; i < C; i++) {
            x->embed[i] += row[i] / (float)rows;
            square += (double)row[i] * row[i];
        }
    }
    free(row);

    // Row 0 is e_base; then come the K_max rows of e_pos, then e_turn
    double std = sqrt(square / rows / C);
    for (int r = 1; r < 1 + x->K_max + x->T_max; r++) {
        double factor = r > x->K_max ? .3 : 1;
        float *to = x->embed + (size_t)r * C;
        for (int i = 0; i < C; i++) to[i] = (float)(sonic_normal(&state) * std * factor);
    }
    if (opt_int(s->opt, "quiet")) return;
    warn("WARNING: --sonic-untrained: the Nexus tokens were never trained. "
         "What leaves the current turn is LOST to the model;");
    warn("WARNING: good for trials of memory and speed only.");
}

// ---- Nexus tokens

// K_i: the Nexus tokens of a body of n >= 1 tokens. A share is rounded, halves up; the 1e-6 lets .1
// * 15, which is a little less than 1.5 in double, count as the half it is.
static int sonic_K(const Sonic *x, int n) {
    int K = x->K;                                       // Sec. 4.3
    if (x->ratio >= 0) K = (int)floor((1 - x->ratio) * n + .5 + 1e-6);
    return max_int(1, min_int(K, min_int(x->K_max, n)));
}

// Nexus token j of segment `seg`, whose message belongs to `turn`. Its id names the rows of e_pos
// and e_turn for sonic_embed. pos -1: the next position of the session.
static Token sonic_token(const Sonic *x, int turn, int j, int seg, int pos) {
    return (Token){ -1 - (turn * x->K_max + j), pos, seg, TOK_EXTRA };
}

// Hook embed: out (C) = the embedding of Nexus token t. Turns beyond T_max get the last turn
// embedding, with one warning.
static void sonic_embed(Session *s, void *ms, const Token *t, float *out) {
    Sonic *x = ms;
    int i = -1 - t->id, C = s->c->C;
    int j = i % x->K_max, turn = i / x->K_max;
    if (turn >= x->T_max) {
        if (!x->warned && !opt_int(s->opt, "quiet"))
            warn("sonic: turn %d is past the %d the adapter knows; "
                 "the last turn embedding is used from here on", turn, x->T_max);
        x->warned++;
        turn = x->T_max - 1;
    }
    const float *pos = x->pos + (size_t)j * C, *of_turn = x->turn + (size_t)turn * C;
    for (int c = 0; c < C; c++) out[c] = x->embed[c] + pos[c] + of_turn[c];     // Eq. 2: e(N_j^t)
}

// The segment of the text token that is token i of the session: -1 in the system message, else that
// of the current message.
static int sonic_seg(const Sonic *x, int i) {
    return i < x->sys ? -1 : x->h;
}

// ---- dropping what nobody sees any more

// Drops the text rows of segments [0,drop) from layer l. Eq. 4 hides them from every later token,
// so they are of no use.
static void sonic_drop(Session *s, const Sonic *x, int l) {
    for (int g = 0; g < s->c->G; g++) {
        const KVHead *h = kv_head(s, l, g);
        size_t mark = scratch_mark(s);
        int n = 0, *keep = scratch(s, (size_t)(h->len + 1) * sizeof(int));
        for (int r = 0; r < h->len; r++) {
            const Token *t = &s->tok[h->src[r]];
            int hidden = t->kind != TOK_EXTRA && t->seg >= 0 && t->seg < x->drop;        // Eq. 4
            if (!hidden) keep[n++] = r;
        }
        if (n < h->len) kv_keep(s, l, g, keep, n);
        scratch_reset(s, mark);
    }
}

// Hook commit: drops rows behind the attention of every layer, so that a one-shot pass holds the
// whole history in one layer at a time. At the end of the pass (l == L) it serves the layers that
// hooks skip, and sets the next position.
static void sonic_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Sonic *x = ms;
    (void)q;
    (void)T;
    if (s->decoding) return;
    if (l < s->c->L) {
        sonic_drop(s, x, l);
        return;
    }
    // Windowed layers that hooks skip drop the rows too
    for (int k = 0; k < s->c->L; k++) {
        if (!layer_acts(s, k)) sonic_drop(s, x, k);
    }

    // With original positions, text goes on where text ended: Nexus tokens take no position away
    if (!x->original) return;
    int last = s->n_tok - 1;
    while (last > 0 && s->tok[last].kind == TOK_EXTRA) last--;
    s->pos_next = s->tok[last].pos + 1;
}

// ---- incremental mode

// The Nexus pass of the message that begins at token `first` of the session and ends it. While the
// pass goes through the layers, commit drops the rows of the body. Tokens of the system message do
// not count; without others nothing happens.
static void sonic_nexus(Session *s, Sonic *x, int first, int turn) {
    int n = s->n_tok - max_int(first, x->sys);
    if (n <= 0) return;
    int K = sonic_K(x, n);
    size_t mark = scratch_mark(s);
    Token *t = scratch(s, (size_t)K * sizeof *t);
    for (int j = 0; j < K; j++)
        t[j] = sonic_token(x, turn, j, x->h, x->original ? s->pos_next + j : -1);        // Eq. 1: N^(i)
    x->h++;
    x->drop = x->h;
    x->n_body += n;
    x->n_nexus += K;
    s->forward(s, t, K);
    scratch_reset(s, mark);
}

// Finishes the two messages of the turn before: steps 1 to 5 of the box. t (n): the ids of the new
// turn, of which the first `foot` still belong to the old reply. They are taken out; returns how
// many are left in t.
static int sonic_finish(Session *s, Sonic *x, Token *t, int n, int foot) {
    int user_end = x->cur + x->n_user, turn = s->turn - 1;
    int n_old = s->n_tok - user_end, n_reply = n_old + foot;
    size_t mark = scratch_mark(s);

    // Step 1: the reply's tokens are set aside, and the session ends behind the user's message
    Token *reply = scratch(s, (size_t)(n_reply + 1) * sizeof *reply);
    memcpy(reply, s->tok + user_end, (size_t)n_old * sizeof *reply);
    memcpy(reply + n_old, t, (size_t)foot * sizeof *reply);
    kv_truncate(s, user_end);

    // Steps 2 and 3
    sonic_nexus(s, x, x->cur, turn);

    // Step 4: the reply again, which now sees the user's message through its Nexus tokens only
    int first = s->n_tok;
    for (int i = 0; i < n_reply; i++)
        reply[i] = (Token){ reply[i].id, -1, sonic_seg(x, first + i), TOK_REPLY };
    if (n_reply) s->forward(s, reply, n_reply);

    // Step 5
    sonic_nexus(s, x, first, turn);
    scratch_reset(s, mark);
    memmove(t, t + foot, (size_t)(n - foot) * sizeof *t);
    return n - foot;
}

// ---- one-shot mode

// Notes tokens [first,end) of the session as a finished message, unless all of them belong to the
// system message.
static void sonic_message(Sonic *x, int first, int end, int turn) {
    SonicMessage m = { end - max_int(first, x->sys), turn };
    if (m.n > 0) arrput(x->msg, m);
}

// Collects the text tokens of the session, without Nexus tokens, and behind them t (foot), the end
// of the old reply. text has room for all of them. Returns their number.
static int sonic_text(const Session *s, const Token *t, int foot, Token *text) {
    int n = 0;
    for (int k = 0; k < s->n_tok; k++)
        if (s->tok[k].kind != TOK_EXTRA) text[n++] = s->tok[k];
    memcpy(text + n, t, (size_t)foot * sizeof *text);
    return n + foot;
}

// Writes the finished part of S_aug into t: the system message, then every message with its Nexus
// tokens. text (n_text): all finished text. Returns the number of text tokens written, which is the
// original position of the next one.
static int sonic_history(const Sonic *x, Token *t, const Token *text, int n_text) {
    int i = 0, p = 0;                                   // the place in S_aug; the place in the text
    for (; p < x->sys && p < n_text; p++, i++)
        t[i] = (Token){ text[p].id, p, -1, text[p].kind };               // Eq. 1: I_sys
    for (int m = 0; m < x->h; m++) {
        const SonicMessage *msg = &x->msg[m];
        int K = sonic_K(x, msg->n);
        for (int end = p + msg->n; p < end; p++, i++)
            t[i] = (Token){ text[p].id, x->original ? p : i, m, text[p].kind };  // Eq. 1: m_i
        for (int j = 0; j < K; j++, i++)
            t[i] = sonic_token(x, msg->turn, j, m, x->original ? p + j : i);     // Eq. 1: N^(i)
    }
    return p;
}

// Rewrites the prefill as the whole of Eq. 1 and empties the session, so that one pass encodes
// everything under the exact mask. t (n): the ids of the new turn, of which the first `foot` belong
// to the old reply. Returns the new n; the current turn begins at t[x->cur].
static int sonic_one_shot(Session *s, Sonic *x, Token *t, int n, int foot) {
    int user_end = x->cur + x->n_user, turn = s->turn - 1;
    size_t mark = scratch_mark(s);
    Token *text = scratch(s, (size_t)(s->n_tok + foot) * sizeof *text);
    int n_text = sonic_text(s, t, foot, text);

    // The two messages of the turn before are finished now
    sonic_message(x, x->cur, user_end, turn);
    sonic_message(x, user_end, s->n_tok + foot, turn);
    x->h = (int)arrlen(x->msg);
    x->n_body = x->n_nexus = 0;
    for (int m = 0; m < x->h; m++) {
        x->n_body += x->msg[m].n;
        x->n_nexus += sonic_K(x, x->msg[m].n);
    }

    // The current turn moves behind the history; then the history is written in front of it
    x->cur = n_text + (int)x->n_nexus;
    memmove(t + x->cur, t + foot, (size_t)(n - foot) * sizeof *t);
    n += x->cur - foot;
    int p = sonic_history(x, t, text, n_text);
    for (int i = x->cur; i < n; i++) t[i].pos = x->original ? p++ : i;          // Eq. 1: Q_curr
    scratch_reset(s, mark);
    kv_truncate(s, 0);
    return n;
}

// ---- the beginning of a turn

// Hook enter: compresses the turn before, then marks the new turn's tokens t (n) with their
// segment. Returns the new n. t has room for 2 (n + n_tok) tokens, and a message never has more
// Nexus tokens than text, so `cap` needs no check. Exit 1 when a position would pass
// max_position_embeddings.
static int sonic_enter(Session *s, void *ms, Token *t, int n, int cap) {
    Sonic *x = ms;
    double t0 = now();
    int foot = min_int(s->n_foot, n - 1);               // at least one token is the new turn's own
    (void)cap;
    if (!s->turn) x->sys = max_int(s->n_sys, x->sink);
    else if (x->oneshot) n = sonic_one_shot(s, x, t, n, foot);
    else n = sonic_finish(s, x, t, n, foot);
    if (!x->oneshot || !s->turn) x->cur = s->n_tok;

    // The current turn is t[from..n). Its last n_head tokens open the reply: they belong to the
    // reply's message
    int from = x->cur - s->n_tok, own = n - from;
    for (int i = from; i < n; i++) t[i].seg = sonic_seg(x, s->n_tok + i);
    x->n_user = own - min_int(s->n_head, own);
    x->drop = x->h;

    int last = t[n - 1].pos < 0 ? s->pos_next + n - 1 : t[n - 1].pos;
    if (last >= s->pos_end)
        die(EXIT_RUN, "sonic: position %d is past max_position_embeddings %d (a shorter dialogue%s)", last,
            s->pos_end, x->original ? "" : ", or --sonic-pos=original with an adapter trained so");
    x->seconds += now() - t0;
    return n;
}

// ---- opening and closing

// Settles K, the ratio and the positions: the options against what the adapter allows. Returns 0,
// or -1 with s->err set.
static int sonic_numbers(Session *s, Sonic *x) {
    const Options *o = s->opt;
    const char *pos = opt_str(o, "sonic-pos");
    int own_ratio = opt_given(o, "sonic-ratio"), any_ratio = own_ratio || opt_given(o, "ratio");
    int K = opt_int(o, "sonic-k");

    x->ratio = own_ratio ? opt_real(o, "sonic-ratio") : s->ratio;
    if (x->ratio > 1 || (x->ratio < 0 && any_ratio))
        return refuse(s, "sonic: --sonic-ratio %g: expected 0 to 1", x->ratio);
    if (K && x->ratio >= 0)
        return refuse(s, "sonic: --sonic-k and a ratio are two ways to say the same, give one");
    if (K < 0 || K > x->K_max)
        return refuse(s, "sonic: --sonic-k %d: the adapter knows 1 to %d Nexus tokens a message", K,
                      x->K_max);
    if (K) x->K = K;                                    // else the adapter's K_0: Sec. 4.3
    if (x->K > x->K_max)
        return refuse(s, "sonic: metadata k_default is %d, but k_max is %d", x->K, x->K_max);

    int want_original = !strcmp(pos, "original");
    if (strcmp(pos, "adapter") && x->file && x->original != want_original)
        return refuse(s, "sonic: --sonic-pos=%s, but the adapter was trained with %s positions", pos,
                      x->original ? "original" : "augmented");
    if (!x->file) x->original = want_original;
    if (x->sink < 0) return refuse(s, "sonic: --sonic-sink %d: expected 0 or more", x->sink);
    return 0;
}

// Finds the adapter (--sonic-weights, or nexus.safetensors in the model's folder) or makes the
// untrained one, and sets up the branch, which is the base model's layers with the adapter's
// matrices in place of its own. Returns 0, or -1 with s->err set.
static int sonic_adapter(Session *s, Sonic *x) {
    const Options *o = s->opt;
    char path[1100];
    int untrained = opt_int(o, "sonic-untrained");
    snprintf(path, sizeof path, "%s", opt_str(o, "sonic-weights"));
    if (*path && untrained)
        return refuse(s, "sonic: --sonic-weights and --sonic-untrained exclude each other");
    if (!*path) snprintf(path, sizeof path, "%s/nexus.safetensors", s->c->dir);
    if (!untrained && !opt_given(o, "sonic-weights") && !file_exists(path))
        return refuse(s, "sonic: needs trained Nexus weights, and %.300s is not there: "
                         "--sonic-weights=FILE, or --sonic-untrained for a trial", path);

    size_t bytes = (size_t)s->c->L * sizeof(Layer);
    x->alt = xmalloc(bytes);
    memcpy(x->alt, s->w->layer, bytes);
    if (untrained) sonic_untrained(s, x);
    else if (sonic_load(s, x, path)) return -1;
    x->pos = x->embed + s->c->C;
    x->turn = x->pos + (size_t)x->K_max * s->c->C;
    return 0;
}

// Hook open.
static int sonic_open(Session *s, void *ms) {
    Sonic *x = ms;
    x->oneshot = opt_int(s->opt, "sonic-oneshot");
    x->sink = opt_int(s->opt, "sonic-sink");
    s->budget = 0;                                      // K says what is kept
    if (sonic_adapter(s, x) || sonic_numbers(s, x)) return -1;
    s->ratio = -1;                              // it was a share of each message, not a budget
    s->pos_end = s->c->max_pos;
    int most = x->ratio >= 0 ? x->K_max : x->K;
    s->pos_extra = x->original ? 0 : 2 * most;  // two messages finish when a turn begins
    s->made_for = x->file ? safetensors_meta(x->file, "chat_template") : NULL;
    s->alt = x->alt;                            // Sec. 3.1: the matrices of Nexus rows
    s->rule = x->oneshot ? VIS_SEGMENT_EXACT : VIS_SEGMENT;
    return 0;
}

// Hook close.
static void sonic_close(Session *s, void *ms) {
    Sonic *x = ms;
    s->alt = NULL;
    safetensors_close(x->file);
    free(x->alt);
    free(x->embed);
    arrfree(x->msg);
}

// ---- what it costs, what it did

// Hook bytes: the embeddings, the layer table, the messages. The matrices of the branch are
// weights, not cache.
static size_t sonic_bytes(const Session *s, const void *ms) {
    const Sonic *x = ms;
    size_t embed = (size_t)(1 + x->K_max + x->T_max) * s->c->C * sizeof(float);
    return embed + (size_t)s->c->L * sizeof(Layer) + arrlenu(x->msg) * sizeof(SonicMessage);
}

// Hook plan: the same for a dialogue of n tokens, and the adapter's matrices. A message takes 8
// tokens or more.
static size_t sonic_plan(const Session *s, const void *ms, int n) {
    return sonic_bytes(s, ms) + sonic_file_bytes(ms) + (size_t)n / 8 * sizeof(SonicMessage);
}

// Hook stats. hist_ratio is the share of the finished messages' tokens that is gone, total_ratio
// that of all tokens.
static void sonic_stats(const Session *s, const void *ms, FILE *out) {
    const Sonic *x = ms;
    long now_rows = s->n_tok - x->cur, sys = min_int(x->sys, s->n_tok);
    size_t bytes = sonic_file_bytes(x);
    if (!x->h && now_rows > sys) now_rows -= sys;       // the first turn holds the system message itself
    double hist = x->n_body ? 1 - (double)x->n_nexus / x->n_body : 0;
    double all = (double)(sys + x->n_body + now_rows);
    double total = all > 0 ? 1 - (double)(sys + x->n_nexus + now_rows) / all : 0;
    fprintf(out, "sonic: %d messages, %ld tokens in %ld Nexus tokens: hist_ratio %.4f, total_ratio %.4f, "
                 "%s, %s positions\n", x->h, x->n_body, x->n_nexus, hist, total,
            x->oneshot ? "one-shot" : "incremental", x->original ? "original" : "augmented");
    fprintf(out, "sonic: %.3f s at turn starts for finished messages; adapter %zu bytes%s\n", x->seconds,
            bytes, x->file ? "" : " (untrained: the base's weights)");
}

static const Opt sonic_opts[] = {
    { "sonic-k",         'i', "0",    "Nexus tokens a message, never more than it has tokens; 0: the adapter's default (untrained: 16)" },
    { "sonic-ratio",     'f', "0",    "share of each message to remove instead (also --ratio); at most the adapter's k_max tokens stay" },
    { "sonic-weights",   's', "",     "adapter file (default: nexus.safetensors in the model's folder)" },
    { "sonic-untrained", 'b', "0",    "go on without trained weights: the base's own, random embeddings" },
    { "sonic-seed",      'i', "1",    "of those embeddings" },
    { "sonic-pos",       'c', "adapter|augmented|original",
      "as trained (untrained: augmented); Nexus tokens take positions of their own; text keeps its own" },
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
// DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression. Anonymous ACL submission.
//
// Some heads find the facts that an answer needs (diligent heads), others look over the whole text
// (lazy heads). Both properties are measured once per model, by hiding facts in long texts, and
// joined in one score per head. At the end of every turn's prefill the budget is shared out by
// these scores: a head with a high score, in a layer with high scores, reads more rows.
//
// Stage 1, once per model (--calibrate, section 27). A needle, whose tokens are the set N, is
// hidden in a long text and asked for. a is a head's softmax row of the last prompt token, and T
// are the k keys with the largest a. A score is the mean over the runs the model answers:
//   Dili = sum_{T & N} a / sum_T a      Lazy = sum_{T & N} a / sum_N a                   Sec. 3.1
//   Inf  = 2 Dili Lazy / (Dili + Lazy)                                                   Eq. 1
//
// Stage 2, at the end of every turn's prefill: Algorithm 1 makes of the scores H_{j,inf} of layer i
// the capacity C_{i,j} of head j, where b_c = B - w and w is the window:
//   b_fixed = b_c (1 - 1/beta)                                                           line 3
//   B_total = b_c / beta L H                                                             line 4
//   L_{i,alpha} = sum_j H_{j,inf}        L_s = sum_i L_{i,alpha}                         lines 8, 13
//   S_{j,h} = H_{j,inf} / L_{i,alpha}    L_{i,h} = L_{i,alpha} / L_s                     lines 14, 16
//   b_dyn = B_total (eps + L_{i,h}) S_{j,h}          eps = 0.01                          line 17
//   C_{i,j} = floor(max(0, b_fixed + b_dyn) + 0.5)                                       lines 18, 19
// Query head j of layer i then reads the C_{i,j} rows its last w queries attend to most, and the
// last w rows (Sec. 3.3).
//
// **Differs from the paper:**
//   - Dili and Lazy are shares of attention, a weighted precision and recall: the paper's tables
//     hold those. By its text they are numbers of keys: --calibrate-score=count.
//   - Line 17 spends 1 + eps L times B_total. We divide that out, so that the mean of the
//     capacities is b_c. --dililazy-alloc=paper-literal is line 17 as printed,
//     --dililazy-alloc=code what the authors' program computes.
//   - A score is found by its key "layer-head". The authors' program ignores the keys, and the
//     files it comes with are shuffled.
//   - The rows of a KV head are stored once, not once per query head: it holds the union of what
//     its query heads read, and each query head has a view. A later turn's prefill therefore reads
//     the union (D21).
//   - Scores are of the last min(w,T) queries of this turn, smoothed by a maximum over --kernel
//     neighbours (D11). Under --dililazy-gqa=kv, which is ours, a KV head has one capacity and one
//     set of rows; neighbours first, then heads (D12).
//
// Map:
//   Sec. 3.1 -> head_scores, head_probe_commit
//   Eq. 1 -> head_scores
//   Algorithm 1, line 3 -> dililazy_caps
//   Algorithm 1, line 4 -> dililazy_caps
//   Algorithm 1, line 8 -> dililazy_weights
//   Algorithm 1, line 13 -> dililazy_weights
//   Algorithm 1, line 14 -> dililazy_weights
//   Algorithm 1, line 16 -> dililazy_weights
//   Algorithm 1, line 17 -> dililazy_weights, dililazy_caps
//   Algorithm 1, line 18 -> dililazy_caps
//   Algorithm 1, line 19 -> dililazy_caps
//   Sec. 3.3 -> dililazy_commit, dililazy_views, pooled_scores, top_k_rows, pool_max_kernel, top_k_kernel
// Both stages are host hooks, and Algorithm 1 runs on the host on either device, because it is a
// few hundred numbers. A device has no kernel for this section alone. Attention of the last
// queries: window_scores, window_scores_cuda, column_kernel. Neighbours and heads: pool_max,
// join_heads, pool_max_kernel, join_heads_kernel. Best rows: top_k, top_k_kernel. The rows that no
// view reads any more are given back by kv_compact, on a device through rows_move_cuda and
// gather_kernel.
//
// Options: --budget (128, per query head), --obs-window (16), --kernel (7), --dililazy-*; stage 1:
// --calibrate OUT.json.

// --dililazy-alloc, in the order of its words
enum {
    ALLOC_PAPER,                // Algorithm 1, its overspending divided out
    ALLOC_LITERAL,              // as printed
    ALLOC_CODE,                 // as the authors' program computes it
    ALLOC_HEADKV,               // not among those words: the pool of headkv, below
};

// The state of dililazy, and of headkv.
typedef struct {
    Snap snap;                  // w, kernel width
    int heads;                  // capacities of a layer: H, or G under --dililazy-gqa=kv
    int alloc;                  // ALLOC_*
    int base;                   // b_c that `cap` was made for; -1: none yet
    double beta, eps;
    double *inf;                // (L,heads) head scores
    int *cap;                   // (L,heads) candidates a head may read: C of Algorithm 1
} DiliLazy;

static void headkv_caps(const double *score, int n, int base, double beta, int *cap);

// ---- Algorithm 1

// The share of the pool that each head gets: weight (L,n) from the scores inf (L,n) >= 0. n is the
// number of heads of a layer. A layer without any score shares evenly, and so does a model without
// any. The authors' program weights a head by its raw score plus eps times its share of the layer,
// and divides by the sum of all.
static void dililazy_weights(const double *inf, int L, int n, double eps, int alloc, double *weight) {
    double L_s = 0, sum = 0;
    for (int i = 0; i < L * n; i++) L_s += inf[i];      // Algorithm 1, line 13: L_s
    for (int i = 0; i < L; i++) {
        double L_alpha = 0;
        for (int j = 0; j < n; j++) L_alpha += inf[i * n + j];   // Algorithm 1, line 8: L_{i,alpha}
        double L_h = L_s > 0 ? L_alpha / L_s : 1.0 / L;          // Algorithm 1, line 16: L_{i,h}
        for (int j = 0; j < n; j++) {
            double H_inf = inf[i * n + j], *to = &weight[i * n + j];
            double S = L_alpha > 0 ? H_inf / L_alpha : 1.0 / n;  // Algorithm 1, line 14: S_{j,h}
            if (alloc != ALLOC_CODE) *to = (eps + L_h) * S;      // Algorithm 1, line 17: b_dyn / B_total
            else *to = L_s > 0 ? H_inf + eps * H_inf / (L_alpha + 1e-9) : 1;
            sum += *to;
        }
    }
    if (alloc != ALLOC_CODE) return;
    for (int i = 0; i < L * n; i++) weight[i] /= sum;
}

// Algorithm 1: cap (L,n) = C from the scores inf (L,n) >= 0 and b_c = base >= 0.
static void dililazy_caps(const double *inf, int L, int n, int base, double beta, double eps, int alloc,
                          int *cap) {
    double fixed = base * (1 - 1 / beta);               // Algorithm 1, line 3: b_fixed
    double pool = base / beta * L * n;                  // Algorithm 1, line 4: B_total
    if (alloc == ALLOC_PAPER) pool /= 1 + eps * L;      // the weights of line 17 sum to 1 + eps L
    if (alloc == ALLOC_CODE) {
        // Whole rows; half a row of each head is set aside and given to all. dyn is Python's base
        // // beta, where floor(base / beta) would be wrong: the quotient could round up to a whole
        // number first
        double dyn = rint((base - fmod(base, beta)) / beta);
        fixed = base - dyn + .5;
        pool = fmax(0, dyn * L * n - .5 * L * n);
    }
    double *weight = xmalloc((size_t)L * n * sizeof *weight);
    dililazy_weights(inf, L, n, eps, alloc, weight);
    for (int i = 0; i < L * n; i++) {
        double b = fixed + pool * weight[i];            // Algorithm 1, line 18: b_{i,j}
        if (alloc == ALLOC_CODE) b = nearbyint(b);
        else b = floor(fmax(0, b) + .5);                // Algorithm 1, line 19: C_{i,j}
        cap[i] = (int)fmin(fmax(b, 0), INT_MAX);
    }
    free(weight);
}

// ---- opening and closing

// Reads x->inf for the method `name`: from the file of --NAME-scores, or from head_scores.json in
// the model's folder, the scores that --NAME-score says. Under --dililazy-gqa=kv the scores of a
// group's R query heads become their mean. Returns 0, or -1 with s->err set.
static int dililazy_scores(Session *s, DiliLazy *x, const char *name) {
    const Config *c = s->c;
    char path[1100], file[32], which[32], why[512];
    snprintf(file, sizeof file, "%s-scores", name);
    snprintf(which, sizeof which, "%s-score", name);
    snprintf(path, sizeof path, "%s", opt_str(s->opt, file));
    if (!*path) {
        snprintf(path, sizeof path, "%s/head_scores.json", c->dir);
        if (!file_exists(path))
            return refuse(s, "%s needs the scores of the model's heads: --%s FILE, "
                             "or make them: --calibrate %.300s", name, file, path);
    }
    x->inf = scores_read(path, opt_str(s->opt, which), c->L, c->H, why);
    if (!x->inf) return refuse(s, "--%s: %.470s", file, why);
    if (x->heads == c->H) return 0;

    int R = c->H / c->G;
    for (int i = 0; i < c->L * c->G; i++) {
        double sum = 0;
        for (int r = 0; r < R; r++) sum += x->inf[i * R + r];
        x->inf[i] = sum / R;                    // in place: i <= i R, so it is not read again
    }
    return 0;
}

// Hook open.
static int dililazy_open(Session *s, void *ms) {
    DiliLazy *x = ms;
    x->alloc = opt_choice(s->opt, "dililazy-alloc", "paper|paper-literal|code");
    x->heads = opt_choice(s->opt, "dililazy-gqa", "q|kv") ? s->c->G : s->c->H;
    x->beta = opt_real(s->opt, "dililazy-beta");
    x->eps = opt_real(s->opt, "dililazy-eps");
    x->base = -1;
    if (!(x->beta > 0)) return refuse(s, "--dililazy-beta must be above 0, found %g", x->beta);
    if (!(x->eps >= 0)) return refuse(s, "--dililazy-eps must not be negative, found %g", x->eps);
    if (snap_options(s, &x->snap, 16) || dililazy_scores(s, x, "dililazy")) return -1;
    x->cap = xcalloc((size_t)s->c->L * x->heads, sizeof(int));
    return 0;
}

// Hook close.
static void dililazy_close(Session *s, void *ms) {
    DiliLazy *x = ms;
    (void)s;
    free(x->inf);
    free(x->cap);
}

// Hook bytes: scores and capacities.
static size_t dililazy_bytes(const Session *s, const void *ms) {
    const DiliLazy *x = ms;
    return (size_t)s->c->L * x->heads * (sizeof(double) + sizeof(int));
}

// ---- the selection at the end of a prefill

// Every query head gets a view of its own: the best rows by score (H,N), as many as its capacity
// cap (H) allows, and the last w rows. Of the candidates, n (G) in each KV head, those that no view
// of the group reads are dropped.
static void dililazy_views(Session *s, int l, const float *score, const int *n, const int *cap) {
    int N = kv_longest(s, l), H = s->c->H, G = s->c->G, R = H / G;
    int *keep = scratch(s, (size_t)H * N * sizeof(int));
    int *kept = scratch(s, (size_t)H * sizeof(int));
    int *n_of = scratch(s, (size_t)H * sizeof(int));    // candidates of a query head: its KV head's
    for (int h = 0; h < H; h++) n_of[h] = n[h / R];
    top_k_rows(s, score, H, N, n_of, cap, keep, N, kept);
    for (int h = 0; h < H; h++) view_set(s, l, h, keep + (size_t)h * N, kept[h], n[h / R]);
    for (int g = 0; g < G; g++) kv_compact(s, l, g);
}

// Hook commit: compresses layer l at the end of a turn's prefill. q (T,H,D) are the turn's queries.
static void dililazy_commit(Session *s, void *ms, int l, const float *q, int T) {
    DiliLazy *x = ms;
    int B = budget_now(s), w = snap_kept_window(&x->snap, B);
    if (!snap_due(s, l, B)) return;

    // The capacities are made once, or at every turn's end where --ratio changes the budget
    if (x->base != B - w) {
        x->base = B - w;
        if (x->alloc == ALLOC_HEADKV) headkv_caps(x->inf, s->c->L * x->heads, x->base, x->beta, x->cap);
        else dililazy_caps(x->inf, s->c->L, x->heads, x->base, x->beta, x->eps, x->alloc, x->cap);
    }

    // Sec. 3.3: candidates by the attention of the last queries, best ones kept
    size_t mark = scratch_mark(s);
    int per_kv_head = x->heads < s->c->H;
    const int *cap = x->cap + (size_t)l * x->heads;
    int *n = scratch(s, (size_t)s->c->G * sizeof(int));
    float *score = pooled_scores(s, &x->snap, l, q, T, w, per_kv_head ? POOL_JOIN : POOL_ONLY, n);
    if (per_kv_head) snap_keep(s, l, score, n, cap);
    else dililazy_views(s, l, score, n, cap);
    scratch_reset(s, mark);
}

// Hook stats: one line with the capacities, the rows read and the rows held.
static void dililazy_stats(const Session *s, const void *ms, FILE *f) {
    const DiliLazy *x = ms;
    int L = s->c->L, H = s->c->H, G = s->c->G, R = H / G;
    int n = L * x->heads, lo = INT_MAX, hi = 0;
    double cap = 0, read = 0, held = 0;
    for (int i = 0; i < n; i++) {
        lo = min_int(lo, x->cap[i]);
        hi = max_int(hi, x->cap[i]);
        cap += x->cap[i];
    }
    for (int i = 0; i < L * H; i++) read += s->view[i].n + s->head[i / R].len - s->view[i].tail;
    for (int i = 0; i < L * G; i++) held += s->head[i].len;
    fprintf(f, "%s: caps %d..%d, mean %.1f; rows read per query head %.1f, "
               "rows held per KV head (union) %.1f\n",
            x->alloc == ALLOC_HEADKV ? "headkv" : "dililazy", lo, hi, cap / n, read / (L * H), held / (L * G));
}

static const Opt dililazy_opts[] = {
    { "dililazy-scores",    's', "", "head scores; default: head_scores.json in the model's folder" },
    { "dililazy-score",     'c', "inf|dili|lazy", "which score shares out the budget (dili, lazy: the paper's ablation)" },
    { "dililazy-alloc",     'c', "paper|paper-literal|code",
      "Algorithm 1 without its overspending; as printed; as the authors' code does it" },
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
    { "calibrate-needles",  's', "", "JSON list of {question, needle, answer, distractor, reasoning} instead of our three" },
    { "calibrate-haystack", 's', "", "text to hide them in, instead of ours" },
    { "calibrate-boundary", 'b', "0", "hide the needle between two sentences" },
    { "calibrate-prefix",   's', "", "what stands before the text, for instance the beginning of a chat; special tokens are read" },
    { "calibrate-prompt",   's', "Based on the content in the book, answer the question: {}\nAnswer:",
      "what follows it; {}: the question" },
    { NULL, 0, NULL, NULL },
};

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

// ---- HEADKV
// Fu et al.: Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated
// Retrieval and Reasoning. arXiv 2410.19258. DiliLazyKV's nearest rival.
//
// A head is scored by what it looks at while the answer is written, not at the prompt's last token.
// N are the tokens of the needle, and a^t is the head's softmax row from which the answer's token t
// is chosen. A score S_h is the mean over the runs the model answers (section 27):
//   R    S_h = sum_t 1/|N|  where the largest a^t lies in N and its row holds token t
//   R2   S_h = sum_{t <= |N|} sum_{i <= |N|} a_i^t [row i in c2]
// where a_i^t is the i-th largest number of a^t. R2's needle is a reasoning sentence, a wrong
// answer c1 and the right answer c2, one behind the other.
//
// At the end of every turn's prefill, with b_c = B - w, query head h reads the b_h rows its last w
// queries attend to most, and the last w rows:
//   b_h = b_c - floor(b_c / beta) + S_h / sum_h S_h floor(b_c / beta) L H
//
// **Differs from the paper:**
//   - b_h are whole numbers whose mean is b_c: what rounding down leaves over goes to the largest
//     remainders, on ties to the lower head. The public code rounds each head for itself.
//   - A KV head stores the union of what its query heads read, as for DiliLazyKV.
// Selection, views, unions and the device's part are DiliLazyKV's: dililazy_commit. Options:
// --budget (128, per query head), --obs-window (8), --kernel (7), --headkv-*; the scores are made by
// --calibrate.

// cap (n) = b_h of all n = L H heads, from their scores (n) >= 0 and b_c = base >= 0. A model
// without any score shares evenly.
static void headkv_caps(const double *score, int n, int base, double beta, int *cap) {
    int pool = (int)floor(base / beta);             // what a head gives to the pool
    long left = (long)pool * n;
    double sum = 0;
    double *rest = xmalloc((size_t)n * sizeof *rest);
    for (int h = 0; h < n; h++) sum += score[h];
    for (int h = 0; h < n; h++) {
        double share = sum > 0 ? score[h] / sum * pool * n : pool;
        cap[h] = (int)floor(share);
        rest[h] = share - cap[h];
        left -= cap[h];
    }

    // The rows that rounding down has left over, fewer than n, by largest remainder
    for (; left > 0; left--) {
        int best = 0;
        for (int h = 1; h < n; h++) {
            if (rest[h] > rest[best]) best = h;
        }
        cap[best]++;
        rest[best] = -1;
    }
    for (int h = 0; h < n; h++) cap[h] += base - pool;
    free(rest);
}

// Hook open.
static int headkv_open(Session *s, void *ms) {
    DiliLazy *x = ms;
    x->alloc = ALLOC_HEADKV;
    x->heads = s->c->H;
    x->beta = opt_real(s->opt, "headkv-beta");
    x->base = -1;
    if (!(x->beta > 1)) return refuse(s, "--headkv-beta must be above 1, found %g", x->beta);
    if (snap_options(s, &x->snap, 8) || dililazy_scores(s, x, "headkv")) return -1;
    x->cap = xcalloc((size_t)s->c->L * x->heads, sizeof(int));
    return 0;
}

static const Opt headkv_opts[] = {
    { "headkv-scores", 's', "", "head scores; default: head_scores.json in the model's folder" },
    { "headkv-score",  'c', "r2|r", "retrieval and reasoning (HeadKV-R2), or retrieval alone (HeadKV-R)" },
    { "headkv-beta",   'f', "1.2", "1/beta of the budget is shared out by score; the rest is the same for all" },
    { NULL, 0, NULL, NULL },
};

const Method headkv_method = {
    .name    = "headkv",
    .paper   = "HeadKV, arXiv 2410.19258",
    .keeps   = "every query head reads its own rows, B on average, more for heads that look at the "
               "right answer while it is written; a KV head stores their union",
    .limits  = "needs head scores (--headkv-scores or --calibrate). B must exceed --obs-window",
    .budget  = 128,
    .uses    = "--obs-window 8, --kernel 7",
    .opts    = headkv_opts,
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(DiliLazy),
    .open    = headkv_open,
    .close   = dililazy_close,
    .commit  = dililazy_commit,
    .bytes   = dililazy_bytes,
    .stats   = dililazy_stats,
};

// ==================================================================================================== 14 THE TABLE OF METHODS
// An entry is a Method (kvcomp.h): a name, what --help says of it, its default budget and its own
// options, the size of its state, and the hooks that a pass calls in the order of its timeline -
// enter, project, attend, select, commit and so on. A hook that is NULL does nothing, so the entry
// of full attention is three texts and no hook. Every entry stands at the end of its method's
// section. The model knows no method by name; to add one is to write a section and to name its
// entry here.
//
// --method=loopserve-p+lychee+pats names parts, MAX_PARTS at most; every part is an entry with a
// state of its own. The role of an entry says what it decides: the attention of the prefill, which
// rows are kept or read, or how rows are stored. Two parts that decide the same thing are refused,
// and the others are sorted into that order, which is the order of a pass. A hook is called for one
// part after the other (attend and embed: for the first part that has it). What no part decides is
// as in full attention.
//
// What the table decides:
//   - which names --method takes, and the order in which --list-methods shows them;
//   - which options there are beside the program's own, and their defaults: .opts;
//   - the budget when the user gives none: .budget of the first part that has one;
//   - what a pass does beside full attention: the hooks;
//   - what a session holds beside rows: .state bytes a part, and attention mass where .wants says
//     KV_MASS.
// Behind each name: what it decides.

const Method full_method = {
    .name    = "full",
    .paper   = "Vaswani et al., Attention Is All You Need, arXiv 1706.03762",
    .keeps   = "keeps every row, reads every row",
};

const Method *const methods[] = {
    &full_method,
    &streaming_method,              // rows kept
    &window_method,                 // rows kept
    &tova_method,                  // rows kept
    &snapkv_method,                 // rows kept
    &adakv_method,                  // rows kept
    &pyramidkv_method,              // rows kept
    &h2o_method,                    // rows kept, and the prefill for its sums
    &expected_attention_method,     // rows kept
    &a_shape_method,                // attention of the prefill
    &tri_shape_method,              // attention of the prefill
    &minference_method,             // attention of the prefill
    &quest_method,                  // rows read
    &loopserve_method,              // attention of the prefill, rows read
    &loopserve_p_method,            // attention of the prefill
    &loopserve_d_method,            // rows read
    &pats_method,                   // how rows are stored
    &q8_method,                     // how rows are stored
    &lychee_method,                 // rows read
    &sonic_method,                  // the prefill, rows kept
    &dililazy_method,               // rows kept
    &headkv_method,                 // rows kept
    NULL,
};

// ####################################################################################################
// PART II: WHAT IT STANDS ON
// ####################################################################################################

// ==================================================================================================== 15 HELPERS
// What is shown of texts from outside, how the program ends on an error, memory, the clock, the
// arena a pass works in, whole files, and how a method refuses.

// ---- texts from outside
// A file, a user or a model may hold control characters, and a terminal obeys them: a file name
// could clear the screen, a reply could rename the window. What goes to stderr, or into a chat on a
// terminal, shows them instead. Standard output that is no terminal stays as it is.
static int utf8_length(const char *s, size_t n);        // section 19

// What stands for the character that the n > 0 bytes at s begin with, NUL-terminated in out. Returns
// how many of the bytes that is. Control characters become \x1b, or \u009b where two bytes of UTF-8
// hold one; newline, tab and everything else stay.
static int shown_char(const char *s, size_t n, char out[8]) {
    int k = max_int(utf8_length(s, n), 1), c = (unsigned char)s[0], d = k == 2 ? (unsigned char)s[1] : 0;
    if (k == 2 && c == 0xc2 && d < 0xa0) {
        snprintf(out, 8, "\\u%04x", (unsigned)d);
    } else if (c != '\n' && c != '\t' && (c < ' ' || (c >= 127 && c < 0xa0))) {
        snprintf(out, 8, "\\x%02x", (unsigned)c);
    } else {
        memcpy(out, s, (size_t)k);
        out[k] = 0;
    }
    return k;
}

// Writes n bytes of text with its control characters shown.
static void show(FILE *f, const char *s, size_t n) {
    char buf[4096], one[8];
    size_t used = 0;
    for (size_t i = 0; i < n; ) {
        i += (size_t)shown_char(s + i, n - i, one);
        size_t k = strlen(one);
        if (used + k > sizeof buf) {
            fwrite(buf, 1, used, f);
            used = 0;
        }
        memcpy(buf + used, one, k);
        used += k;
    }
    fwrite(buf, 1, used, f);
}

enum { LINE_ROOM = 2048 };      // bytes of the longest line on stderr; what is longer is cut

// Writes who and text as one line on stderr. Line breaks in the text, which may quote a file, become
// blanks.
static void say_line(const char *who, char *text) {
    char line[LINE_ROOM + 16];
    for (char *p = text; *p; p++) {
        if (*p == '\n' || *p == '\r') *p = ' ';
    }
    int n = snprintf(line, sizeof line, "%s%s\n", who, text);
    show(stderr, line, (size_t)n);
}

// One line on stderr that begins with the program's name.
void warn(const char *fmt, ...) {
    char text[LINE_ROOM];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    say_line("kvcomp: ", text);
}

// One line on stderr as it is.
KV_PRINTF(1, 2) static void tell(const char *fmt, ...) {
    char text[LINE_ROOM];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    say_line("", text);
}

// ---- the end of the program
jmp_buf *die_jump;              // tests and fuzzers: die() jumps here with its exit code and does not exit
char die_text[1024];            // the message of the last die()

// Ends the program with this exit code and one line on stderr. The message may quote a file, so
// line breaks in it become blanks.
void die(int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(die_text, sizeof die_text, fmt, ap);
    va_end(ap);
    for (char *p = die_text; *p; p++) {
        if (*p == '\n' || *p == '\r') *p = ' ';
    }
    if (die_jump) longjmp(*die_jump, code);
    fflush(stdout);
    say_line("kvcomp: ", die_text);
    exit(code);
}

// ---- memory. All of it comes from here: exit 4 when there is none.

#define NO_MEMORY "out of memory: %zu bytes could not be had (a smaller -c, -b or --budget needs less)"

// realloc. Zero bytes are taken as one, because realloc of none may return NULL.
void *xrealloc(void *p, size_t n) {
    void *r = ALLOCATION_FAILS() ? NULL : realloc(p, max_size(n, 1));
    if (!r) die(EXIT_MEMORY, NO_MEMORY, n);
    return r;
}

// malloc.
void *xmalloc(size_t n) {
    return xrealloc(NULL, n);
}

// calloc: n elements of `size` bytes, all zero.
void *xcalloc(size_t n, size_t size) {
    if (size && n > SIZE_MAX / size) die(EXIT_MEMORY, "out of memory: %zu x %zu bytes overflow", n, size);
    void *p = ALLOCATION_FAILS() ? NULL : calloc(max_size(n, 1), max_size(size, 1));
    if (!p) die(EXIT_MEMORY, NO_MEMORY, n * size);
    return p;
}

// A copy of the first n bytes of a text, NUL-terminated; the caller frees it.
static char *copy_bytes(const char *s, size_t n) {
    char *copy = xmalloc(n + 1);
    if (n) memcpy(copy, s, n);
    copy[n] = 0;
    return copy;
}

// A copy of a text; the caller frees it.
static char *copy_text(const char *s) {
    return copy_bytes(s, strlen(s));
}

// n bytes at an address that is a multiple of `align`; NULL when there is no memory. For two places
// that say what would need less.
static void *aligned_bytes(size_t align, size_t n) {
    return ALLOCATION_FAILS() ? NULL : aligned_alloc(align, n);
}

// A stream that writes into memory: *text (malloc'd) and *n hold what was written once
// memory_stream_close has closed it.
static FILE *memory_stream(char **text, size_t *n) {
    FILE *f = ALLOCATION_FAILS() ? NULL : open_memstream(text, n);
    if (!f) die(EXIT_MEMORY, "out of memory: a text could not be written into memory");
    return f;
}

static void memory_stream_close(FILE *f) {
    int bad = ferror(f);
    if (fclose(f) || bad) die(EXIT_MEMORY, "out of memory: a text could not be written into memory");
}

// ---- the clock

// Seconds of a clock that only goes forward.
double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- the arena
// The arena hands out memory that lives until the end of a pass. Its blocks stay from pass to pass,
// so that a decode step allocates nothing once the first has run. Memory is given back in the
// reverse order: a mark is the number of bytes handed out so far, and falling back to it frees
// everything handed out since.

typedef struct {
    char *p;
    size_t size;
    size_t start;               // bytes of all blocks before this one
} ArenaBlock;

struct Arena {
    ArenaBlock *block;          // stb_ds array
    size_t used;                // bytes handed out, and the unused ends of blocks before them
};

struct Arena *arena_new(void) {
    return xcalloc(1, sizeof(struct Arena));
}

void arena_free(struct Arena *a) {
    if (!a) return;
    for (int i = 0; i < (int)arrlen(a->block); i++) free(a->block[i].p);
    arrfree(a->block);
    free(a);
}

// Appends a block with room for n bytes, at least 1 MiB. A block is half as large again as what it
// is for: much of what is asked for grows by a row a step, and would find a block of the exact size
// too small by one row, every time.
static ArenaBlock *arena_grow(struct Arena *a, size_t n) {
    ArenaBlock b = { .size = max_size(n + n / 128 * 64, (size_t)1 << 20) };
    if (arrlen(a->block)) b.start = arrlast(a->block).start + arrlast(a->block).size;
    b.p = aligned_bytes(64, b.size);
    if (!b.p) die(EXIT_MEMORY, "out of memory: %zu bytes of scratch (a smaller -b needs less)", b.size);
    arrput(a->block, b);
    return &arrlast(a->block);
}

// `bytes` bytes of the session's arena, 64-byte aligned, in the first block with room behind what
// is handed out.
void *scratch(Session *s, size_t bytes) {
    struct Arena *a = s->scratch;
    size_t n = max_size((bytes + 63) & ~(size_t)63, 64);
    for (int i = 0; i < (int)arrlen(a->block); i++) {
        const ArenaBlock *b = &a->block[i];
        size_t at = max_size(a->used, b->start);
        if (at + n > b->start + b->size) continue;
        a->used = at + n;
        return b->p + (at - b->start);
    }
    const ArenaBlock *b = arena_grow(a, n);
    a->used = b->start + n;
    return b->p;
}

// How much is handed out now, for scratch_reset.
size_t scratch_mark(Session *s) {
    return s->scratch->used;
}

// Takes back everything handed out since the mark.
void scratch_reset(Session *s, size_t mark) {
    s->scratch->used = mark;
}

// ---- files
// A path may name what is no file: a FIFO that nobody writes to, a device that never ends, a socket.
// Nothing here waits for one, and nothing is read without a bound. The exception is what was handed
// over open, standard input and the /dev/fd/N of a shell's <(command): it may be a pipe, which is
// waited for, but the bound holds as well.
enum {
    READ_BLOCK = 65536,
    MOST_CONFIG = 64 << 20,         // bytes of config.json and its like: an index, scores, needles
    MOST_TOKENIZER = 256 << 20,
    MOST_TEXT = 256 << 20,          // of a prompt, ids, dialogues, a chat template, a session
};

// The number of the open descriptor that a path names: /dev/stdin, /dev/fd/N. -1: it names none.
static int path_descriptor(const char *path) {
    int fd = -1, end = 0;
    if (!strcmp(path, "/dev/stdin")) return 0;
    if (sscanf(path, "/dev/fd/%9d%n", &fd, &end) != 1 || path[end]) return -1;
    return fd;
}

// What a file that is no regular one is.
static const char *file_kind(mode_t mode) {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

// Opens a regular file for reading, and describes it in *st. A FIFO, a device, a socket or a folder
// is refused without waiting. Returns the descriptor; -1, and the reason without the path in err.
static int open_input(const char *path, struct stat *st, char err[256]) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    int why = errno;
    // A socket cannot be opened, so it is looked at by its name.
    if (fd < 0 && (why != ENXIO || stat(path, st))) {
        snprintf(err, 256, "%s", strerror(why));
        return -1;
    }
    if (fd >= 0 && fstat(fd, st)) {
        snprintf(err, 256, "%s", strerror(errno));
        close(fd);
        return -1;
    }
    if (fd >= 0 && S_ISREG(st->st_mode)) return fd;
    if (fd >= 0) close(fd);
    snprintf(err, 256, "%s, expected a file", file_kind(st->st_mode));
    return -1;
}

// Opens what read_bounded reads: a regular file, or a copy of a descriptor that was handed over.
static int open_or_copy(const char *path, struct stat *st, char err[256]) {
    int handed = path_descriptor(path);
    if (handed < 0) return open_input(path, st, err);
    int fd = fcntl(handed, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && !fstat(fd, st)) return fd;
    snprintf(err, 256, "%s", strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

// Reads up to n bytes, as read does, and again after a signal.
static ssize_t read_some(int fd, char *to, size_t n) {
    ssize_t got;
    do got = read(fd, to, n);
    while (got < 0 && errno == EINTR);
    return got;
}

// Reads a descriptor to its end into *buf (malloc'd), with a 0 byte behind it. Returns the number of
// bytes; -1 when reading fails; most + 1 or more when there are more than `most`.
static ssize_t read_all(int fd, size_t most, char **buf) {
    size_t n = 0, cap = 0;
    ssize_t got;
    do {
        if (n + READ_BLOCK + 1 > cap) {
            cap = 2 * cap + READ_BLOCK + 1;
            *buf = xrealloc(*buf, cap);
        }
        got = read_some(fd, *buf + n, READ_BLOCK);
        if (got < 0) return -1;
        n += (size_t)got;
    } while (got && n <= most);
    (*buf)[n] = 0;
    return (ssize_t)n;
}

// The whole file at `path`, NUL-terminated, *size bytes without the NUL; the caller frees it. NULL,
// with the reason in err, when it cannot be read or has more than `most` bytes.
static char *read_bounded(const char *path, size_t most, size_t *size, char err[256]) {
    struct stat st;
    char why[256], *buf = NULL;
    int fd = open_or_copy(path, &st, why);
    if (fd < 0) {
        snprintf(err, 256, "%.190s: %.60s", path, why);
        return NULL;
    }
    ssize_t n = S_ISREG(st.st_mode) && st.st_size > (off_t)most ? st.st_size : read_all(fd, most, &buf);
    int failed = errno;
    close(fd);
    if (n >= 0 && (size_t)n <= most) {
        *size = (size_t)n;
        return buf;
    }
    if (n < 0) snprintf(err, 256, "%.190s: cannot be read: %.40s", path, strerror(failed));
    else snprintf(err, 256, "%.190s: more than %zu MiB, the most that is read", path, most >> 20);
    free(buf);
    return NULL;
}

// The same for a file whose kind has no bound of its own.
static char *read_file(const char *path, size_t *size, char err[256]) {
    return read_bounded(path, MOST_TEXT, size, err);
}

// The same of a text that is used as a C string: what stands behind a 0 byte would be lost, so a
// text that holds one is refused.
static char *read_plain_text(const char *path, size_t *size, char err[256]) {
    char *text = read_file(path, size, err);
    size_t n = text ? strlen(text) : 0;
    if (!text || n == *size) return text;
    snprintf(err, 256, "%.190s: byte %zu is 0: expected a text", path, n + 1);
    free(text);
    return NULL;
}

// 1: there is something at `path`, a file or a folder.
static int file_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

// ---- methods that refuse

// What an open hook returns when the options do not fit: puts the reason into s->err, and is -1.
int refuse(Session *s, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s->err, sizeof s->err, fmt, ap);
    va_end(ap);
    return -1;
}

// ---- threads: OpenMP's numbers, or those of one thread where the compiler has no OpenMP
// How many threads a parallel region gets.
static int n_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

// The number of this thread in its region, from 0.
static int thread_id(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// How many threads this region has.
static int team_size(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

// Starting a team of threads costs microseconds, and on a loaded machine much more: only for work
// that is worth it. Results do not depend on it.
static int worth_threads(size_t multiply_adds) {
    return multiply_adds > (size_t)1 << 18;
}

// The physical cores among the processors this process may run on: two hardware threads of a core
// share the units that arithmetic waits for. A core is known by the first of its siblings.
static int physical_cores(void) {
    int n = 0;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return 1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char path[96];
        int first = cpu;
        if (!CPU_ISSET(cpu, &allowed)) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        FILE *f = fopen(path, "r");
        if (f && fscanf(f, "%d", &first) != 1) first = cpu;
        if (f) fclose(f);
        n += first == cpu || first >= CPU_SETSIZE || !CPU_ISSET(first, &allowed);
    }
    return max_int(n, 1);
}

// Threads for a model of so many parameters, when the user names no number. A product of a small
// model is over before a second thread has begun: one thread is the fastest, whatever else runs.
static int threads_for(size_t parameters) {
    const size_t small = (size_t)16 << 20;
    return parameters < small ? 1 : physical_cores();
}

// GNU OpenMP lets a thread that waits for others spin for milliseconds. Where the cores are shared,
// the thread that is waited for does not run meanwhile, and a token takes a second. Its environment
// variable is read before main begins, so the program sets it and starts itself again, once. What the
// user has set stands. Returns if nothing has to be done, or it cannot be done.
static void spin_shortly(char **argv) {
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv("/proc/self/exe", argv);
#endif
    (void)argv;
}

// Sets the number of threads: n, or what suits a model of so many parameters when n is 0.
static void threads_use(int n, size_t parameters) {
    if (!n) n = threads_for(parameters);
#ifdef _OPENMP
    omp_set_num_threads(n);
#endif
    (void)n;
}

// ==================================================================================================== 16 NUMBERS AND KERNELS
// Everything that is arithmetic only: products of matrices, the two products of attention,
// exponentials, conversions between f32 and the 16-bit formats, and the k largest of n numbers.
//
// One kernel serves weights and attention: a block of dot products y (m,n) = x (m,K) w (n,K)^T. Its
// right side is f32, f16 or bf16 and is widened to f32 in registers. All kernels compute on vectors
// of 16 floats, the lanes. An instruction set (plain C, AVX2 or AVX-512) supplies the vector type
// and some operations on it. The kernels are written once over these operations and compiled once
// for each set. The best set that the processor has is chosen when the program starts.
//
// The order of every sum is fixed. In a dot product, lane j adds the products at k = j, j+16, j+32,
// ... with fused multiply-adds; then the 16 lanes are folded, 8 onto 8, 4 onto 4, 2 onto 2 and 1
// onto 1. A product of matrices does this for every K_CHUNK columns and adds the results of the
// chunks in order. No tile size, batch, thread count or position in a block has an influence. A row
// of a product is therefore the same bits in decode and in prefill, and AVX2 and AVX-512 give the
// same bits. Plain C has no fused multiply-add, because fmaf would be a call into the library, and
// agrees with them up to rounding.
//
// The dot-product instructions for bf16 are not used. They round x to bf16, so the accuracy of f32
// needs two of them (x = hi + lo), and one does no more multiply-adds a cycle than two f32 FMA
// pipes do here (Zen 5: 233 against 256 GFLOP/s a core, each counted per product).
//
// Reading order: the vector in plain C, the kernels, and then, if wanted, the same vector in AVX2
// and AVX-512.

enum {
    LANES     = 16,     // floats of a vector
    K_CHUNK   = 1024,   // columns that one sum of a matrix product runs over
    T_BLOCK   = 128,    // rows of x that a job takes: with K_CHUNK columns they fill 512 KiB of L2
    ROW_BLOCK = 64,     // rows of W that a job takes
};

#define LOG2_E 1.44269504f

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
    const char *w;      // (n,K), of the dtype whose function is called
    size_t ldw;         // bytes from a row of w to the next
    int m, n, K;
    int add;            // 1: y += the products; 0: y = the products
    float scale;
    Ahead next;         // memory that is read after this block; none: the rows of w that follow
} Dots;

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
    void (*mix[3])(const Mix *a);

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

// ---- memory that is read next
// A kernel asks for the memory that is read after it (a prefetch) while it computes, a little at a
// time. A burst of requests would fill the queue to memory and then leave it idle.

// Asks for the next `bytes` bytes of a, or for what is left of it, and moves a past them.
static inline __attribute__((always_inline)) void ask_ahead(Ahead *a, size_t bytes) {
    if (bytes > a->bytes) bytes = a->bytes;
    for (size_t b = 0; b < bytes; b += 64) __builtin_prefetch(a->p + b);
    a->p += bytes;
    a->bytes -= bytes;
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
// operations in the two other sets in _avx2 and _avx512. The kernels say vec_add and mean that of
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

enum { MR_plain = 1, NR_plain = 2, MX_plain = 1, NV_plain = 2 };    // see the list of names
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

// ---- the kernels: this file includes itself
// The kernels, from here to the line "#endif // SIMD", are compiled once for each instruction set.
// To this end the file includes itself three times (after AVX-512, below), with the macro SIMD
// defined as plain, as avx2 and as avx512. While SIMD is defined, the preprocessor drops all of the
// file but the kernels; while it is not, it drops the kernels alone.
//
// C has no name spaces, so the functions of each copy need names of their own. OWN(vec_add) is
// vec_add_avx2 in the copy for AVX2. With the list of names below, the kernels are ordinary C that
// says vec_add, and dots_tile is defined as dots_tile_avx2. A name that the list lacks is an error
// at once: it would be defined three times.
//
// A macro that holds all kernels would do the same, but it would be one line for a debugger and in
// error messages. Here the lines of a kernel are lines of this file:
//   gdb -ex 'break dots_tile_avx2' -ex run --args ./tests math_matmul
#else   // SIMD

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
#define vec_store       OWN(vec_store)
#define vec_store_f16   OWN(vec_store_f16)
#define vec_fold        OWN(vec_fold)
#define vec_folds       OWN(vec_folds)
#define vec_largest     OWN(vec_largest)
#define vec_at_least    OWN(vec_at_least)
// the sizes of tiles, as many as the registers of the set hold
#define MR              OWN(MR)         // rows of x in a tile of dots; of o in a small tile of mix
#define NR              OWN(NR)         // rows of w in a tile of dots
#define MX              OWN(MX)         // rows of o in a tile of mix
#define NV              OWN(NV)         // vectors of columns in a tile of mix or of softmax_columns
// the kernels
#define dots_step       OWN(dots_step)
#define dots_store      OWN(dots_store)
#define dots_tile       OWN(dots_tile)
#define dots_block      OWN(dots_block)
#define dots_f32        OWN(dots_f32)
#define dots_f16        OWN(dots_f16)
#define dots_bf16       OWN(dots_bf16)
#define mix_tile        OWN(mix_tile)
#define mix_rows        OWN(mix_rows)
#define mix_block       OWN(mix_block)
#define mix_f32         OWN(mix_f32)
#define mix_f16         OWN(mix_f16)
#define mix_bf16        OWN(mix_bf16)
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
#define simd_entry      OWN(simd_entry)

// Where an INLINE function takes dtype, M, whole or vectors, its callers pass constants. Every call
// is compiled for its values: loops are written out and branches disappear.

// -- dot products, in tiles of MR rows of x by NR rows of w

// One step of a tile: acc (M,NR) += x (M) w (NR)^T in columns k .. k+n-1, lane by lane. Each vector
// is loaded once; one of w is used M times, one of x NR times. ahead: bytes from here to the part
// of w to ask memory for; 0: do not ask.
INLINE void dots_step(Vec *acc, const float *const *x, const char *const *w, int dtype, int M,
                      int k, int n, size_t ahead) {
    size_t size = dtype == DT_F32 ? 4 : 2;
    Vec b[NR];
    if (ahead) {
        UNROLL for (int j = 0; j < NR; j++) __builtin_prefetch(w[j] + (size_t)k * size + ahead);
    }
    UNROLL for (int j = 0; j < NR; j++) b[j] = vec_load(w[j] + (size_t)k * size, dtype, n);
    UNROLL for (int i = 0; i < M; i++) {
        Vec a = vec_load(x[i] + k, DT_F32, n);
        UNROLL for (int j = 0; j < NR; j++) acc[i * NR + j] = vec_fma(a, b[j], acc[i * NR + j]);
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
// hardware does not see them coming. Where a tile is the only one of its panel, it asks for them as
// it goes: with one row of x 1 KB past the same place in the next panel, with the few queries that
// share keys 4 KB past it (decode: 23 -> 34 GB/s a thread, where 38 can be read).
INLINE void dots_tile(const Dots *a, int dtype, int M, int i0, int j0, int whole) {
    Vec acc[MR * NR];
    const float *x[MR];
    const char *w[NR];
    float sum[MR * NR];
    int m = whole || a->m - i0 > M ? M : a->m - i0;
    int n = whole || a->n - j0 > NR ? NR : a->n - j0;
    size_t ahead = 0;
    if (!a->next.p && (M == 1 || a->m <= MR)) ahead = NR * a->ldw + (M == 1 ? 1024 : 4096);

    UNROLL for (int i = 0; i < M; i++) x[i] = a->x + (size_t)(i0 + (i < m ? i : m - 1)) * a->ldx;
    UNROLL for (int j = 0; j < NR; j++) w[j] = a->w + (size_t)(j0 + (j < n ? j : n - 1)) * a->ldw;
    UNROLL for (int i = 0; i < M * NR; i++) acc[i] = vec_all(0);

    int k = 0;
    for (; k + LANES <= a->K; k += LANES) dots_step(acc, x, w, dtype, M, k, LANES, ahead);
    if (!whole && k < a->K) dots_step(acc, x, w, dtype, M, k, a->K - k, 0);

    vec_folds(sum, acc, M * NR, a->scale);
    dots_store(a, sum, i0, j0, m, n, whole);
}

// All tiles of a block: panels of NR rows of w, and for each panel MR rows of x at a time. What is
// to be read after the block is asked for between the panels. Where a panel has many tiles, each
// asks for one line of each row of the next panel (8 % of prefill).
INLINE void dots_block(const Dots *a, int dtype) {
    Ahead next = a->next;
    size_t share = next.bytes ? ahead_share(next, (a->n + NR - 1) / NR) : 0;
    for (int j = 0; j < a->n; j += NR) {
        int i = 0;
        if (next.bytes) ask_ahead(&next, share);
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

// -- weighted sums of rows, in tiles of MX rows of o by NV vectors

// The tile of M rows of o from row i0 on, of which m are there, and `vectors` vectors of columns
// from d0 on, each of `width` columns. Each output adds its n products in the order of the rows of
// v. Missing rows of o repeat the last one. next is asked for in n portions.
INLINE void mix_tile(const Mix *a, int dtype, int M, int i0, int m, int d0, int vectors, int width,
                     Ahead next) {
    Vec acc[MX * NV];
    int n = a->n, D = a->D;
    size_t size = dtype == DT_F32 ? 4 : 2;
    size_t share = next.bytes ? ahead_share(next, n) : 0;
    float *o = a->o + (size_t)i0 * D + d0;
    const float *p = a->p + (size_t)i0 * n;
    const char *v = a->v + d0 * size;

    UNROLL for (int i = 0; i < M; i++) {
        const float *from = o + (size_t)(i < m ? i : m - 1) * D;
        UNROLL for (int c = 0; c < vectors; c++)
            acc[i * NV + c] = a->add ? vec_load(from + c * LANES, DT_F32, width) : vec_all(0);
    }
    for (int r = 0; r < n; r++) {
        Vec b[NV];
        if (next.bytes) ask_ahead(&next, share);
        UNROLL for (int c = 0; c < vectors; c++)
            b[c] = vec_load(v + ((size_t)r * D + c * LANES) * size, dtype, width);
        UNROLL for (int i = 0; i < M; i++) {
            Vec weight = vec_all(p[(size_t)(i < m ? i : m - 1) * n + r]);
            UNROLL for (int c = 0; c < vectors; c++)
                acc[i * NV + c] = vec_fma(weight, b[c], acc[i * NV + c]);
        }
    }
    UNROLL for (int i = 0; i < M; i++) {
        float *to = o + (size_t)(i < m ? i : m - 1) * D;
        UNROLL for (int c = 0; c < vectors; c++) vec_store(to + c * LANES, acc[i * NV + c], width);
    }
}

// All columns of M rows of o from row i0 on, of which m are there. The first columns ask for what
// is read next: what the caller says or, of stored rows, those 16 further on. In a decode step over
// 32k rows of head_dim 128 the kernel takes about four fifths of the time that it takes without
// asking.
INLINE void mix_rows(const Mix *a, int dtype, int M, int i0, int m, Ahead next) {
    int d = 0, D = a->D;
    const Ahead none = {0};
    size_t row = D * sizeof(uint16_t);
    if (!next.p && dtype != DT_F32) next = (Ahead){ a->v + 16 * row, a->n * row };
    for (; d + NV * LANES <= D; d += NV * LANES)
        mix_tile(a, dtype, M, i0, m, d, NV, LANES, d ? none : next);
    for (; d + LANES <= D; d += LANES)
        mix_tile(a, dtype, M, i0, m, d, 1, LANES, d ? none : next);
    if (d < D) mix_tile(a, dtype, M, i0, m, d, 1, D - d, d ? none : next);
}

// A block: MX rows of o at a time, then MR where fewer are left (the heads of a decode step), then
// a last single one. Each of these groups asks for its part of what is read after the block.
INLINE void mix_block(const Mix *a, int dtype) {
    int i = 0, m = a->m;
    int group = 0, groups = m / MX + (m % MX + MR - 1) / MR;
    for (; m - i >= MX; i += MX)
        mix_rows(a, dtype, MX, i, MX, ahead_part(a->next, group++, groups));
    for (; m - i > 1; i += MR)
        mix_rows(a, dtype, MR, i, min_int(m - i, MR), ahead_part(a->next, group++, groups));
    if (i < m) mix_rows(a, dtype, 1, i, 1, ahead_part(a->next, group, groups));
}

TARGET static void mix_f32(const Mix *a) { mix_block(a, DT_F32); }
TARGET static void mix_f16(const Mix *a) { mix_block(a, DT_F16); }
TARGET static void mix_bf16(const Mix *a) { mix_block(a, DT_BF16); }

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

// What this copy adds to the table of instruction sets.
static const Simd simd_entry = {
    .name            = TEXT(SIMD),
    .dots            = { dots_f32, dots_f16, dots_bf16 },
    .mix             = { mix_f32, mix_f16, mix_bf16 },
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
#ifndef SIMD

#if defined(__x86_64__)
// ---- the vector in AVX2: sixteen lanes are a pair of registers
// The operations mean what their namesakes in plain C say; vec_fma rounds once.
#define TARGET_avx2 __attribute__((target("avx2,fma,f16c")))
#define INLINE_avx2 TARGET_avx2 static inline __attribute__((always_inline))

enum { MR_avx2 = 3, NR_avx2 = 2, MX_avx2 = 3, NV_avx2 = 2 };
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

INLINE_avx2 void vec_folds_avx2(float *out, const Vec_avx2 *a, int n, float scale) {
    for (int i = 0; i < n; i++) out[i] = vec_fold_avx2(a[i]) * scale;
}

INLINE_avx2 float vec_largest_avx2(Vec_avx2 x) {
    __m256 y = _mm256_max_ps(x.a, x.b);
    __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_max_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_max_ss(z, _mm_movehdup_ps(z)));
}

// 8 bits of vec_at_least: order_key as in the preamble, and x >= key where the larger of both is x.
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

// ---- the vector in AVX-512: one register, with a mask where fewer than 16 lanes count
#define TARGET_avx512 __attribute__((target("avx512f,avx512bw,avx512vl,fma,f16c")))
#define INLINE_avx512 TARGET_avx512 static inline __attribute__((always_inline))

enum { MR_avx512 = 4, NR_avx512 = 4, MX_avx512 = 6, NV_avx512 = 4 };
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
#endif  // __x86_64__

// ---- the copies, and the choice of one
#define SIMD plain
#include "kvcomp.c"
#undef SIMD

#if defined(__x86_64__)
#define SIMD avx2
#include "kvcomp.c"
#undef SIMD

#define SIMD avx512
#include "kvcomp.c"
#undef SIMD
#endif

static const Simd *const simd_table[] = {       // best first
#if defined(__x86_64__)
    &simd_entry_avx512,
    &simd_entry_avx2,
#endif
    &simd_entry_plain,
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
    if (!strcmp(s->name, "avx512")) return avx512;
#endif
    return !strcmp(s->name, "plain");
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

// Runs before main, so no thread ever sees the choice change. The environment variable KVCOMP_SIMD
// (plain, avx2 or avx512) is for tests and comparisons; a set that cannot be had leaves the best
// there is.
__attribute__((constructor)) static void simd_choose(void) {
    const char *name = getenv("KVCOMP_SIMD");
    if (!name || simd_set(name) < 0) simd_set(NULL);
}

const char *simd_name(void) { return simd->name; }

// ---- products

// y (T,rows) = x (T,cols) W^T; rows of y are ldy elements apart, rows of x ldx. A job is a block of
// T_BLOCK rows of x and ROW_BLOCK rows of W. For few rows of x it finishes 4 rows of W before the
// next 4, so that W streams in order.
void matmul_strided(float *y, size_t ldy, const float *x, size_t ldx, const Tensor *w, int T) {
    int K = w->cols, panel = T > 4 ? ROW_BLOCK : 4;
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
                    simd->dots[w->dtype](&block);
                }
            }
        }
    }
}

// y (T,rows) = x (T,cols) W^T, rows side by side.
void matmul(float *y, const float *x, const Tensor *w, int T) {
    matmul_strided(y, (size_t)w->rows, x, (size_t)w->cols, w, T);
}

// The two products of attention for a tile of queries and rows. They run inside threads and are
// never parallel themselves. Rows of K and V may be f32 tiles or the cache's own f16 and bf16 rows.
// The results are the same bits, and decode need not copy rows first (13 -> 21 GB/s a thread).

// s (m,n) = scale * q (m,D) k (n,D)^T. next: see Dots.
static void scores_of(float *s, const float *q, const void *k, int dtype, int m, int n, int D,
                      float scale, Ahead next) {
    Dots block = {
        .y = s, .ldy = (size_t)n,
        .x = q, .ldx = (size_t)D,
        .w = k, .ldw = (size_t)D * dtype_size(dtype),
        .m = m, .n = n, .K = D,
        .scale = scale, .next = next,
    };
    simd->dots[dtype](&block);
}

// o (m,D) = p (m,n) v (n,D); add: o += that. next: see Mix.
static void mix_of(float *o, const float *p, const void *v, int dtype, int m, int n, int D, int add,
                   Ahead next) {
    Mix block = { .o = o, .p = p, .v = v, .m = m, .n = n, .D = D, .add = add, .next = next };
    simd->mix[dtype](&block);
}

// s (m,n) = scale * q (m,D) k (n,D)^T, all f32.
void attn_scores(float *s, const float *q, const float *k, int m, int n, int D, float scale) {
    scores_of(s, q, k, DT_F32, m, n, D, scale, (Ahead){0});
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
static float max_f32(const float *x, int n) { return simd->max(x, (size_t)n); }

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
static void q8_unpack(float *x, const char *o, int n, int D) { simd->unpack_q8(x, o, n, D); }

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
#ifdef KV_CHOSEN                                                        // tests.c notes how close the choice was
    KV_CHOSEN(x, n, idx, count);
#endif
    return count;
}

// The sum of w (n) over the places where x (n) is at least the number whose order_key is
// `key`; w NULL: how many such places there are.
static int weight_from(const float *x, const int *w, int n, uint32_t key) {
    return simd->sum_from(x, w, n, key);
}

// ==================================================================================================== 17 FAST PATHS
// What attention and the methods run on where the plain algorithm would be too slow; each function says what it computes.

// ---- reading ahead: the rows of a decode step, asked for before they are needed
// A decode step reads each row once, so it is as fast as memory is. Rows that follow each other
// come by themselves: the processor sees the pattern, and a kernel asks for what lies beyond
// (Ahead). The rows of a list lie anywhere and have to be asked for one by one, in time: half a
// tile at a time, so that the queue to memory is never empty nor flooded. None of this changes a
// result; NOTES.md, Speed on the CPU, says what each part brought and what was tried in vain.

// Asks for the keys (v 0) or values (v 1) of n listed rows, so that their ways from memory overlap;
// packed rows are left out.
static void fetch_rows(const Session *s, const KVHead *h, int v, const int *rows, int n) {
    size_t bytes = format_of(s, v)->row_bytes(s->c->D);
    const char *raw = raw_row(s, h, v, h->packed);
    for (int i = 0; i < n; i++) {
        if (rows[i] < h->packed) continue;
        Ahead row = { raw + (size_t)(rows[i] - h->packed) * bytes, bytes };
        ask_ahead(&row, bytes);
    }
}

// Asks for the beginning of every run of rows among places p0 .. p1-1 of a view's list. Runs begin
// on memory pages of their own; one request to each, all at once, has the processor look up their
// addresses side by side.
static void fetch_runs(const Session *s, const KVHead *h, const View *w, int p0, int p1) {
    int end = w->is_near ? 0 : min_int(p1, w->n);       // a copy lies in order
    for (int p = p0; p < end; p++) {
        int row = w->idx[p], begins = p == p0 || row != w->idx[p - 1] + 1;
        if (!begins || row < h->packed) continue;
        __builtin_prefetch(raw_row(s, h, 0, row));
        __builtin_prefetch(raw_row(s, h, 1, row));
    }
}

// The memory of rows r0 .. r0+n-1, of one tile of them at most, for a kernel to ask for while it
// computes. Packed rows and raw rows lie in different places: of those that begin packed, only the
// packed ones.
static Ahead tile_ahead(const Session *s, const KVHead *h, int v, int r0, int n) {
    n = min_int(n, KV_TILE);
    if (n <= 0) return (Ahead){0};
    if (r0 < h->packed) return s->packing->stored(s, h, v, r0, n);
    return (Ahead){ raw_row(s, h, v, r0), n * format_of(s, v)->row_bytes(s->c->D) };
}

// Can a kernel read rows of this format where they lie? q8_0 has to be unpacked first.
static int rows_in_place(const Format *f) {
    return f->unpack == f16_unpack || f->unpack == bf16_unpack || f->unpack == f32_unpack;
}

// The dtype a kernel reads rows of this format in: their own if in place, otherwise f32.
static int dtype_in_place(const Format *f) {
    if (f->unpack == f16_unpack) return DT_F16;
    if (f->unpack == bf16_unpack) return DT_BF16;
    return DT_F32;
}

// The keys (v 0) or values (v 1) of the copy that view_near made: w->n keys, then w->n values.
static char *near_rows(const Session *s, const View *w, int v) {
    return w->near + (v ? w->n * s->fk->row_bytes(s->c->D) : 0);
}

// The keys or values of a tile, as numbers side by side: where they lie if they are that already,
// otherwise brought together in buf. A decode step has few queries and reads a tile once, so a tile
// is not copied unless it must be.
static const void *rows_ready(const Session *s, const KVHead *h, const View *w, const ViewTile *a,
                              int v, float *buf) {
    const Format *f = format_of(s, v);
    if (w->is_near && a->p + a->n <= w->n) {
        const char *from = near_rows(s, w, v) + a->p * f->row_bytes(s->c->D);
        if (rows_in_place(f)) return from;
        f->unpack(buf, from, a->n, s->c->D);
        return buf;
    }
    int first = row_at(a->rows, a->r0, 0), last = row_at(a->rows, a->r0, a->n - 1);
    int neighbours = last - first == a->n - 1;
    if (first >= h->packed && neighbours && rows_in_place(f)) return raw_row(s, h, v, first);
    load_rows(s, h, v, a->rows, a->r0, a->n, buf, dtype_in_place(f));
    return buf;
}

// The listed rows to ask for while a tile's keys (v 0) or values (v 1) are read: with its keys its
// own values, with its values the next tile's keys. -> how many; 0 where the rows are neighbours,
// or a copy.
static int listed_next(const View *w, const ViewTile *a, int v, const int **rows) {
    int next = a->p + a->n;
    if (v == 0) {
        int copied = w->is_near && next <= w->n;
        *rows = a->rows;
        return a->rows && !copied ? a->n : 0;
    }
    if (next >= w->n || w->is_near) return 0;
    *rows = w->idx + next;
    return min_int(w->n - next, KV_TILE);
}

// The keys (v 0) or values (v 1) of the tile *a of a view, and the requests that go with them: half
// of the listed rows to come before the tile is read, and half behind it. The rows this thread
// reads end at place `end` of the view.
static TileRows tile_read(const Session *s, const KVHead *h, const View *w, const ViewTile *a,
                          int v, int end, float *buf) {
    const Format *f = format_of(s, v);
    const int *rows = NULL;
    int listed = listed_next(w, a, v, &rows), half = listed / 2;
    if (half) fetch_rows(s, h, !v, rows, half);
    TileRows t = { .x = rows_ready(s, h, w, a, v, buf), .dtype = dtype_in_place(f) };
    if (listed) fetch_rows(s, h, !v, rows + half, listed - half);

    // Neighbours that have to be unpacked: the kernel asks for the next tile of them.
    int next = a->r0 + a->n, in_place = next >= h->packed && rows_in_place(f);
    if (!a->rows && !in_place) t.next = tile_ahead(s, h, v, next, end - a->p - a->n);
    return t;
}

// ---- lists copied side by side
// Rows that lie anywhere come from memory at a fraction of its speed: LoopServe's single rows at an
// eighth (NOTES.md, Speed on the CPU). A list that stays for some steps pays for a copy of its
// rows. Packed rows may change under a copy, and a GPU gathers fast enough: no copies there.
static int copies_views(const Session *s) {
    return !KV_DEV(s) && !s->packing;
}

// Makes room for a list of n rows for query head h, and for the copy of its rows if near is 1, so
// that no later step has to ask for memory.
void view_room(Session *s, int l, int h, int n, int near) {
    View *w = kv_view(s, l, h);
    size_t bytes = near && copies_views(s) ? n * raw_row_bytes(s) : 0;
    if (n > w->cap) {
        w->cap = n;
        w->idx = xrealloc(w->idx, (size_t)n * sizeof(int));
    }
    if (bytes > w->room) {
        w->room = bytes;
        w->near = xrealloc(w->near, bytes);
    }
}

// Copies n listed keys or values to `to`, asking for them 16 rows ahead.
static void copy_rows(const Session *s, const KVHead *h, int v, const int *rows, int n, char *to) {
    size_t bytes = format_of(s, v)->row_bytes(s->c->D);
    for (int i = 0; i < n; i++) {
        if (i % 16 == 0 && n - i > 16) fetch_rows(s, h, v, rows + i + 16, min_int(16, n - i - 16));
        memcpy(to + i * bytes, raw_row(s, h, v, rows[i]), bytes);
    }
}

// Copies the rows that the list of query head h names side by side, keys and then values, for a
// list that many steps will read.
void view_near(Session *s, int l, int h) {
    View *w = kv_view(s, l, h);
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    if (!copies_views(s) || !w->n) return;
    view_room(s, l, h, w->n, 1);
    for (int v = 0; v < 2; v++) copy_rows(s, hd, v, w->idx, w->n, near_rows(s, w, v));
    w->is_near = 1;
}

// ---- mean softmax rows of many queries: what SnapKV, DiliLazyKV and LoopServe choose rows by
// A query head h has w queries q_1 .. q_w, and its KV head N rows with keys k_j. mean_rows computes
// the mean of the w softmax rows (SnapKV; DiliLazyKV, Sec. 4.1.3; LoopServe, Algorithm 3):
//   x_i[j] = log2 e  q_i . k_j / sqrt(D)
//   p_i[j] = 2^(x_i[j] - max_i) / sum_i      max_i = max_j x_i[j],  sum_i = sum_j 2^(x_i[j] - max_i)
//   score_h[j] = (1/w) sum_i p_i[j]
// where j runs over the rows that query i may see; the others have p = 0. With lists = R there is one
// such list of scores a query head; with lists = 1 there is one a group, the sum over its R heads.
//
// It goes group by group, for a block of queries at a time, in three steps:
//   column_exps    2^(x - maximum so far) of every row and query, kept in memory; and the maximum and
//                  sum of each query over a chunk of rows
//   columns_join   maximum and sum of each query over all chunks
//   column_sums    the exponentials become probabilities and are summed over the queries: a product
//                  with one weight a query, 2^(maximum so far - maximum) / (w sum)
// Scores lie with one row of the cache a line and the m queries of the whole group side by side as
// columns. So a key is unpacked once for all of them, and neither products nor sums of exponentials
// need 16 lanes folded into one number. Exponentials are powers of 2 because those cost two
// instructions of seventeen less.
enum {
    COLUMN_TILE = 36,                   // rows whose keys and scores lie in L1 beside the queries,
                                        // and which mix can take 6 at a time
    COLUMN_CHUNK = 57 * COLUMN_TILE,    // rows of one running softmax, which one thread computes
};

typedef struct {            // a block of queries and the rows of one KV head
    const KVHead *hd;
    int l, g;               // layer; KV head
    const float *q;         // (n,H,D) the block's queries, of the tokens from tok0 on
    int n, tok0;
    int m;                  // columns, R n of them: column r n + i is query i of head r of the group
    float *x;               // (D,m) the queries as columns, times log2 e / sqrt(D)
    float *e;               // (len,m) 2^(x - maximum of the chunk so far)
    float *top;             // (tiles,m) that maximum, tile by tile; in step 3 2^(top - max)
    float *max, *sum;       // (chunks,m) of each chunk; after step 2 the first m hold max and
                            // 1 / (w sum) over all chunks
} Columns;

// The queries become columns.
static void column_queries(const Session *s, const Columns *c) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G;
    float scale = LOG2_E / sqrtf((float)D);
    for (int j = 0; j < c->m; j++) {
        const float *from = c->q + ((size_t)(j % c->n) * H + c->g * R + j / c->n) * D;
        for (int d = 0; d < D; d++) c->x[(size_t)d * c->m + j] = from[d] * scale;
    }
}

// A chunk is rows chunk * COLUMN_CHUNK .. column_end - 1.
static int column_end(const Columns *c, int chunk) {
    int from = chunk * COLUMN_CHUNK;
    return from + min_int(COLUMN_CHUNK, c->hd->len - from);
}

// Step 1 for a chunk: masked scores and their exponentials, with a running maximum and sum.
static void column_exps(const Session *s, const Columns *c, Tile *t, int chunk) {
    int D = s->c->D, m = c->m, to = column_end(c, chunk);
    int plain = s->rule == VIS_CAUSAL && !layer_window(s, c->l);
    int seen = plain ? last_visible(s, c->hd, c->tok0) : 0;     // rows that every query may see
    for (int j = 0; j < m; j++) {
        t->tok[j] = c->tok0 + j % c->n;
        t->max[j] = -INFINITY;
        t->sum[j] = 0;
    }
    for (int r = chunk * COLUMN_CHUNK; r < to; r += COLUMN_TILE) {
        int n = min_int(COLUMN_TILE, to - r);
        float *x = c->e + (size_t)r * m;
        kv_load_k(s, c->hd, NULL, r, n, t->k);
        Ahead next = tile_ahead(s, c->hd, 0, r + n, min_int(n, to - r - n));
        mix_of(x, t->k, c->x, DT_F32, n, D, m, 0, next);
        if (r + n > seen) mask_tile(s, c->l, c->hd, t, m, NULL, r, n, x, 1, (size_t)m);
        simd->softmax_columns(x, n, m, t->max, t->sum);
        memcpy(c->top + (size_t)(r / COLUMN_TILE) * m, t->max, (size_t)m * sizeof *c->top);
    }
    memcpy(c->max + (size_t)chunk * m, t->max, (size_t)m * sizeof *c->max);
    memcpy(c->sum + (size_t)chunk * m, t->sum, (size_t)m * sizeof *c->sum);
}

// Step 2: for every column the maximum over all chunks, and 1 / (w sum).
static void columns_join(const Columns *c, int chunks, int w) {
    int m = c->m;
    for (int j = 0; j < m; j++) {
        float max = -INFINITY, sum = 0;
        for (int k = 0; k < chunks; k++) max = fmaxf(max, c->max[k * m + j]);
        for (int k = 0; k < chunks; k++) sum += c->sum[k * m + j] * exp2f(c->max[k * m + j] - max);
        c->max[j] = max;
        c->sum[j] = 1 / (sum * (float)w);
    }
}

// Step 3 for a chunk: score (lists,N) = the weighted sum of the columns of each head, or of all as
// one list; add 1: += that. The weight of a column is 2^(top - max) / (w sum). Several lists are
// one product, in which the columns of the other heads weigh 0.
static void column_sums(const Columns *c, Tile *t, int chunk, int lists, int add, float *score,
                        size_t N) {
    int m = c->m, each = m / lists, from = chunk * COLUMN_CHUNK, to = column_end(c, chunk);
    int tiles = (to - from + COLUMN_TILE - 1) / COLUMN_TILE;
    float *top = c->top + (size_t)from / COLUMN_TILE * m, *weight = t->sc, unused = 0;

    // top = 2^(top - max), by the natural exponential.
    for (int i = 0; i < tiles; i++)
        for (int j = 0; j < m; j++) top[i * m + j] = (top[i * m + j] - c->max[j]) / LOG2_E;
    exp_shift(top, 0, tiles * m, &unused);

    memset(weight, 0, (size_t)lists * m * sizeof *weight);
    for (int r = from; r < to; r += COLUMN_TILE, top += m) {
        for (int k = 0; k < lists; k++)
            for (int j = k * each; j < (k + 1) * each; j++) weight[k * m + j] = top[j] * c->sum[j];
        simd->dots[DT_F32](&(Dots){
            .y = score + r, .ldy = N,
            .x = weight, .ldx = (size_t)m,
            .w = (const char *)(c->e + (size_t)r * m), .ldw = m * sizeof(float),
            .m = lists, .n = min_int(COLUMN_TILE, to - r), .K = m,
            .add = add, .scale = 1,
        });
    }
}

// The three steps for the block of queries in c, shared out among threads by chunks -> score
// (lists,N); add 1: += that.
static void column_block(Session *s, const Columns *c, Tile *tiles, int w, int lists, int add,
                         float *score, size_t N) {
    int len = c->hd->len, chunks = (len + COLUMN_CHUNK - 1) / COLUMN_CHUNK;
    int team = worth_threads((size_t)c->m * len * s->c->D);
    (void)team;                             // read by OpenMP only
    column_queries(s, c);

    #pragma omp parallel if (team)
    for (int k = 0; k < chunks; k++)
        if (k % team_size() == thread_id()) column_exps(s, c, &tiles[thread_id()], k);

    columns_join(c, chunks, w);

    // A thread sums the chunks it has made, the last one first: the exponentials of a group are
    // more than its cache holds, and those are still there.
    #pragma omp parallel if (team)
    for (int k = chunks - 1; k >= 0; k--)
        if (k % team_size() == thread_id())
            column_sums(c, &tiles[thread_id()], k, lists, add, score, N);

    for (int k = 0; k < lists; k++) memset(score + k * N + len, 0, (N - len) * sizeof *score);
}

// q (w,H,D), of the tokens from tok0 on -> score (G lists,N), N = kv_longest(s,l); rows behind the
// end of a shorter head are 0.
static void mean_rows(Session *s, int l, const float *q, int tok0, int w, int lists, float *score) {
    int H = s->c->H, G = s->c->G, R = H / G, D = s->c->D;
    int per = Q_BLOCK / R;                  // queries of a head in a block
    int blocks = (w + per - 1) / per;
    size_t mark = scratch_mark(s), N = kv_longest(s, l), most = R * min_int(w, per);
    size_t chunks = N / COLUMN_CHUNK + 1, f = sizeof(float);
    Tile *tiles = tiles_new(s);
    Columns c = {
        .l   = l,
        .x   = scratch(s, D * most * f),
        .e   = scratch(s, N * most * f),
        .top = scratch(s, (N / COLUMN_TILE + 1) * most * f),
        .max = scratch(s, chunks * most * f),
        .sum = scratch(s, chunks * most * f),
    };
    for (int b = 0; b < blocks; b++)
        for (int g = 0; g < G; g++) {
            int first = b * per;
            c.g = g;
            c.hd = kv_head(s, l, g);
            c.n = min_int(per, w - first);
            c.m = R * c.n;
            c.q = q + (size_t)first * H * D;
            c.tok0 = tok0 + first;
            column_block(s, &c, tiles, w, lists, b > 0, score + (size_t)g * lists * N, N);
        }
    scratch_reset(s, mark);
}

// ---- PATS: what new rows leave as it is, and where rows lie

// How many leading rows keep both place and width when a head gets the new table reg (an stb
// array): their bytes need not be touched. Up to the first region that differs, both tables agree
// in row0 and base.
static int rows_unmoved(const KVHead *h, const Region *reg) {
    int rows = 0;
    for (int i = 0; i < (int)arrlen(reg) && i < h->n_reg; i++) {
        const Region *a = &h->reg[i], *b = &reg[i];
        if (a->w != b->w) break;
        rows = a->row0 + min_int(a->n, b->n);
        if (a->n != b->n) break;
    }
    return rows;
}

// The bytes of these rows under the table reg (an stb array), with the gaps between regions.
static size_t bytes_unmoved(const Region *reg, int unmoved, int rows64, int D) {
    size_t bytes = 0;
    for (int i = 0; i < (int)arrlen(reg) && reg[i].row0 < unmoved; i++) {
        int rows = min_int(unmoved - reg[i].row0, reg[i].n);
        bytes = reg[i].base + rows * pats_row_bytes(rows64, D, reg[i].w);
    }
    return bytes;
}

// Packing.stored: where rows r0 .. r0+n-1 of K (v 0) or V (v 1) lie, for prefetching; only those in
// the region of r0.
static Ahead pats_stored(const Session *s, const KVHead *h, int v, int r0, int n) {
    const Region *g = region_of(h->reg, r0);
    size_t bytes = pats_row_bytes(pats_of(s)->rows64, s->c->D, g->w);
    int rows = min_int(n, g->row0 + g->n - r0);
    return (Ahead){ (const char *)pats_row(h, g, v, r0, bytes), rows * bytes };
}

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
static void unpack_choose(void) {
    unpack_lanes_init();
    __builtin_cpu_init();
    int vbmi = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi");
    if (vbmi) unpack_f16 = unpack_vbmi;
    else if (__builtin_cpu_supports("avx2")) unpack_f16 = unpack_avx2;
}
#else
// Without x86 vectors unpack_plain stays.
static void unpack_choose(void) { }
#endif
// ---- LoopServe: the line with the largest residual per length, by a heap
// Every line has its residual per length as it was at some earlier moment for a key. Residuals only
// fall, so a key is an upper bound: a top entry that stays the first after its key is renewed is
// the best line there is (D35).

static const double LEAST_GAIN = 1e-12;                  // what gains no more counts as nothing

// The order of the greedy choice: larger keys first; of equal keys slashes before verticals, then
// the smaller number.
static int item_before(LineItem a, LineItem b, int n) {
    int slash_a = a.id >= n, slash_b = b.id >= n;
    if (a.key != b.key) return a.key > b.key;
    if (slash_a != slash_b) return slash_a;
    return a.id < b.id;
}

// Moves entry i of the heap h (n_heap) down to its place.
static void heap_down(LineItem *h, int n_heap, int i, int n) {
    for (int child = 2 * i + 1; child < n_heap; child = 2 * i + 1) {
        if (child + 1 < n_heap && item_before(h[child + 1], h[child], n)) child++;
        if (!item_before(h[child], h[i], n)) return;
        LineItem x = h[i];
        h[i] = h[child];
        h[child] = x;
        i = child;
    }
}

// The key of line `id`, g (2n): its residual per length.
static double line_gain(const LineSample *p, const double *g, int id) {
    return g[id] / (double)line_len(id % p->n, p->p0, p->n);
}

// Makes a heap (2n) of the lines that gain something. Returns how many they are.
static int line_heap(const LineSample *p, const double *g, LineItem *heap) {
    int n_heap = 0;
    for (int id = 0; id < 2 * p->n; id++)
        if (g[id] > LEAST_GAIN) heap[n_heap++] = (LineItem){ line_gain(p, g, id), id };
    for (int i = n_heap / 2 - 1; i >= 0; i--) heap_down(heap, n_heap, i, p->n);
    return n_heap;
}

// Takes the line with the largest residual per length out of the heap and returns its id, or -1
// when no line is left that gains something.
static int best_line(const LineSample *p, const double *g, LineItem *heap, int *n_heap) {
    while (*n_heap > 0) {
        int id = heap[0].id, gains = g[id] > LEAST_GAIN;
        if (gains) {
            heap[0].key = line_gain(p, g, id);
            heap_down(heap, *n_heap, 0, p->n);
            if (heap[0].id != id) continue;              // another line's bound is larger
        }
        heap[0] = heap[--*n_heap];
        heap_down(heap, *n_heap, 0, p->n);
        if (gains) return id;
    }
    return -1;
}

// ---- LycheeCluster: k-means in tiles, units in a heap, clusters without sorting them

// label (n): the centre with the largest cosine for every point x (n,D); equal ones: the lower
// number. mu (K,D) are the centres and len (K) 1 / their lengths, NULL when those are 1. Tiles of
// points meet tiles of centres, so that both stay in L1 and the (n,K) scores never exist at once;
// sc (KV_TILE,KV_TILE) is room.
static void assign_points(const float *x, int n, const float *mu, int K, int D, const float *len,
                          float *sc, int *label) {
    for (int i0 = 0; i0 < n; i0 += KV_TILE) {
        int m = min_int(KV_TILE, n - i0);
        float best[KV_TILE];                    // of these points, over the centres so far
        for (int i = 0; i < m; i++) {
            best[i] = -INFINITY;
            label[i0 + i] = 0;
        }
        for (int j0 = 0; j0 < K; j0 += KV_TILE) {
            int k = min_int(KV_TILE, K - j0);
            attn_scores(sc, x + (size_t)i0 * D, mu + (size_t)j0 * D, m, k, D, 1);
            for (int i = 0; i < m; i++) {
                float *row = sc + (size_t)i * k;
                for (int j = 0; len && j < k; j++) row[j] *= len[j0 + j];
                float top = max_f32(row, k);
                if (!(top > best[i])) continue;
                int j = 0;
                while (row[j] != top) j++;
                best[i] = top;
                label[i0 + i] = j0 + j;
            }
        }
    }
}

// A heap of nodes, the best on top. Only the units that a step opens leave it, which is cheaper than
// sorting all of them. Is node a better than b: a larger score, or the same one and a lower number?
static int before_in(const float *S, int a, int b) {
    return S[a] > S[b] || (S[a] == S[b] && a < b);
}

// Moves heap[i] down to where neither node below it is better.
static void sift_down(int *heap, int n, int i, const float *S) {
    int x = heap[i];
    for (;;) {
        int k = 2 * i + 1;
        if (k + 1 < n && before_in(S, heap[k + 1], heap[k])) k++;
        if (k >= n || !before_in(S, heap[k], x)) break;
        heap[i] = heap[k];
        i = k;
    }
    heap[i] = x;
}

// Makes a heap of n nodes in any order. S: their scores, by node.
static void heapify(int *heap, int n, const float *S) {
    for (int i = n / 2 - 1; i >= 0; i--) sift_down(heap, n, i, S);
}

// Takes the best of *n > 0 nodes off the heap -> its number.
static int pop_best(int *heap, int *n, const float *S) {
    int top = heap[0];
    --*n;
    heap[0] = heap[*n];
    if (*n) sift_down(heap, *n, 0, S);
    return top;
}

// The tokens of the clusters that score above `bound`.
static int tokens_above(const Nodes *u, const float *S, float bound) {
    return weight_from(S, u->tokens, u->n, order_key(bound) + 1);
}

// The largest score (as its order_key) at which the budget overflows: the clusters that score that
// much or more hold more than `room` tokens, and those that score more than it fit. 0 when all
// clusters fit together.
//
// order_key gives every float an unsigned number in the same order, and the fewer clusters count,
// the less they hold. So the number is found like a word in a dictionary, one bit after the other
// from the top: a bit is 1 if the clusters from there on still hold too much. That takes 32 sums
// over the clusters, whatever their number, and no sorting.
static uint32_t score_that_fills(const Nodes *u, const float *S, int room) {
    uint32_t key = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (weight_from(S, u->tokens, u->n, key | bit) > room) key |= bit;
    }
    return key;
}

// Asks for the first chunk of the n clusters in `order` and for the one behind it. They lie
// anywhere in memory, so all of them are asked for at once and not one after the other.
static void chunks_ask_ahead(const Nodes *u, const int *order, int n) {
    for (int i = 0; i < n; i++) __builtin_prefetch(&u->first[order[i]]);
    for (int i = 0; i < n; i++) __builtin_prefetch(&u->next[u->first[order[i]]]);
}

// order (K+1): the clusters to take chunks from until `room` tokens are full -> how many. S (K) are
// the scores; a cluster with -INFINITY does not take part. Taking their chunks in this order reads
// what best first reads, larger score, then lower number: the clusters that score above
// score_that_fills all fit, so their order does not matter, and they come by number. Those that
// score exactly that much follow, by number too, and the last of them is the first that does not
// fit as a whole.
static int clusters_that_fill(const Nodes *u, const float *S, int room, int *order) {
    uint32_t full = score_that_fills(u, S, room);
    int n = 0, tokens = 0;
    for (int c = 0; c < u->n; c++) {
        int above = order_key(S[c]) > full && S[c] > -INFINITY;
        order[n] = c;                           // overwritten unless it counts: takes no branch
        n += above;
        tokens += above ? u->tokens[c] : 0;
    }
    for (int c = 0; c < u->n && tokens <= room; c++) {
        if (order_key(S[c]) != full || !(S[c] > -INFINITY)) continue;
        order[n] = c;
        n++;
        tokens += u->tokens[c];
    }
    chunks_ask_ahead(u, order, n);
    return n;
}

// ==================================================================================================== 18 OPTIONS
// One table drives parsing, --help, defaults and suggestions. The options of a method stand in its
// section; this table has the program's. A value is kept as text under its option's name and
// checked when it is set, so a getter cannot fail.

static const Opt program_options[] = {
    // Model and run
    { "model",         's', "",     "a Hugging Face folder (default: the shipped model)" },
    { "device",        'c', "auto|cpu|cuda",
      "where to run; auto: a GPU that answers, has room and computes what the CPU computes, else the CPU" },
    { "threads",       'i', "0",    "threads; 0: one for a small model, all physical cores for others" },
    { "ctx-size",      'i', "4096",
      "most rows a head may hold in a chat (--ids is replayed whatever its length); 0: the model's own limit" },
    { "batch-size",    'i', "512",
      "rows of a prefill block; changes speed and memory, never a logit (on a GPU: their rounding)" },
    { "ctk",           'c', "f16|f32|bf16|q8_0", "how K rows are stored" },
    { "ctv",           'c', "f16|f32|bf16|q8_0", "how V rows are stored" },
    { "tokenizer",     's', "",     "tokenizer.json or tokenizer.model instead of the model's" },
    { "chat-template", 's', "",     "template by name, or a file, instead of the model's" },
    { "synthetic",     's', "",
      "random weights of a shape: llama-3.2-1b, llama-3.1-8b, qwen3-4b, tiny, or L..,H..,G..,D..,C..,F..,V.." },
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
    { "eval",          's', "",
      "quality through the compressed cache: all, or needle,multiturn,coref,facts,json,fewshot,summary; file, ppl, kld" },
    { "eval-file",     's', "",     "dialogues or LongBench items (json lines) for file, any text for ppl and kld" },
    { "eval-items",    'i', "8",    "texts of each task" },
    { "eval-length",   's', "512",  "tokens of a text, or several lengths: 512,1024" },
    { "eval-seed",     'i', "1",    "of the texts and of the intervals" },
    { "eval-history",  'c', "own|gold", "whose replies the later turns see: the model's own or the right ones" },
    { "eval-window",   'i', "512",  "ppl, kld: tokens of a window; half is prefilled, half decoded" },
    { "eval-windows",  'i', "8",    "ppl, kld: most windows of the text" },
    { "compare",       's', "",
      "methods, comma-separated: the same items through each (--eval all unless given)" },
    { "compare-base",  's', "full", "the method of --compare that score_gap is measured from, at the same budget" },
    { "budgets",       's', "",     "budgets for --compare, comma-separated" },
    { "report",        's', "",
      "write OUT.html: scores of --eval and pictures of what each method keeps, as one page; numbers in OUT.csv" },
    { "bench",         'b', "0",    "measure speed; with --synthetic or a model" },
    { "bench-depths",  's', "0,4096,16384,32768", "decode at these context lengths" },
    { "bench-prompts", 's', "512,4096", "prefill of these lengths" },
    { "bench-suite",   's', "",
      "the papers' methods one after another, prefill and decode: a table, and this file as CSV" },
    { "repeat",        'i', "5",    "runs per number, the median counts" },
    // Other
    { "list-methods",  'b', "0",    "one name a line" },
    { "version",       'b', "0",    "print the version" },
    { NULL, 0, NULL, NULL },
};

// The least and the largest value of an option, both allowed; checked before anything is opened.
static const struct Range {
    const char *name;
    double lo, hi;
} ranges[] = {
    { "threads",             0,    1024 },
    { "ctx-size",            0,    1 << 30 },
    { "batch-size",          1,    1 << 20 },
    { "n-predict",           -1,   INT_MAX },
    { "temp",                0,    100 },
    { "top-k",               0,    INT_MAX },
    { "top-p",               0,    1 },
    { "min-p",               0,    1 },
    { "repeat-penalty",      0.01, 100 },
    { "repeat-last-n",       0,    INT_MAX },
    { "budget",              0,    INT_MAX },
    { "ratio",               0,    0.9999 },
    { "sink",                0,    INT_MAX },
    { "obs-window",          1,    1 << 20 },
    { "kernel",              1,    1023 },
    { "eval-items",          1,    1 << 20 },
    { "eval-window",         4,    1 << 20 },
    { "eval-windows",        1,    1 << 20 },
    { "repeat",              1,    1000 },
    { "lychee-buffer",       0,    1 << 30 },
    { "lychee-sink",         0,    1 << 30 },
    { "lychee-iters",        0,    1000 },
    { "lychee-guard",        0,    1 },
    { "loopserve-alpha",     0,    1 },
    { "loopserve-max-cells", 0,    1 },
    { "loopserve-max-tiles", 0,    1 },
    { "loopserve-interval",  1,    1 << 16 },
    { "loopserve-obs",       0,    1 << 16 },
    { "loopserve-samples",   1,    1 << 16 },
};

// Every option of the program and of every method. Both are stb_ds string maps.
struct Options {
    struct { char *key; char *value; } *map;    // the value as text, malloc'd
    struct { char *key; int value; } *given;    // the options the user has set; their value is 1
};

// ---- finding an option

// The option called `name` in a table ended by name NULL; NULL: there is none, or no table.
static const Opt *opt_find_in(const Opt *o, const char *name) {
    for (; o && o->name; o++) {
        if (!strcmp(o->name, name)) return o;
    }
    return NULL;
}

// The option called `name`, the program's or a method's; NULL: there is none.
static const Opt *opt_find(const char *name) {
    const Opt *o = opt_find_in(program_options, name);
    EACH_METHOD(m) {
        if (!o) o = opt_find_in((*m)->opts, name);
    }
    return o;
}

// The place of word v in "a|b|c", from 0; -1: it is none of them.
static int word_place(const char *words, const char *v) {
    size_t len = strlen(v);
    for (int i = 0; ; i++) {
        size_t n = strcspn(words, "|");
        if (n == len && !strncmp(words, v, n)) return i;
        if (!words[n]) return -1;
        words += n + 1;
    }
}

// ---- making a set of options

// Adds the options of a table at their defaults: the whole text, or a choice's first word. Two
// methods may share an option.
static void options_add(Options *o, const Opt *t) {
    for (; t && t->name; t++) {
        if (shgeti(o->map, t->name) >= 0) continue;
        size_t n = t->kind == 'c' ? strcspn(t->def, "|") : strlen(t->def);
        shput(o->map, t->name, copy_bytes(t->def, n));
    }
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

// ---- setting a value

// 1: v is a whole number that an int holds.
static int is_whole(const char *v) {
    char *end;
    errno = 0;
    long n = strtol(v, &end, 10);
    return *v && !*end && !errno && n >= INT_MIN && n <= INT_MAX;
}

// 1: v is a finite number.
static int is_real(const char *v) {
    char *end;
    double x = strtod(v, &end);
    return *v && !*end && isfinite(x);
}

// May option t have the value v? 0, or -1 with the reason in err.
static int opt_check(const Opt *t, const char *v, char err[256]) {
    switch (t->kind) {
    case 'i':
        if (is_whole(v)) return 0;
        snprintf(err, 256, "--%s wants a whole number, found '%.60s'", t->name, v);
        return -1;
    case 'f':
        if (is_real(v)) return 0;
        snprintf(err, 256, "--%s wants a number, found '%.60s'", t->name, v);
        return -1;
    case 'b':
        if (!strcmp(v, "0") || !strcmp(v, "1")) return 0;
        snprintf(err, 256, "--%s is a flag and takes no value, found '%.60s'", t->name, v);
        return -1;
    case 'c':
        if (word_place(t->def, v) >= 0) return 0;
        snprintf(err, 256, "--%s wants one of %s, found '%.60s'", t->name, t->def, v);
        return -1;
    }
    return 0;                                           // a text may be anything
}

// Sets an option, whose name has no dashes. 0, or -1 with the reason in err.
int options_set(Options *o, const char *name, const char *value, char err[256]) {
    const Opt *t = opt_find(name);
    if (!t) {
        snprintf(err, 256, "unknown option --%s", name);
        return -1;
    }
    if (opt_check(t, value, err)) return -1;
    char *copy = copy_text(value);      // `value` may be the text that is freed now
    free(shget(o->map, name));
    shput(o->map, name, copy);
    shput(o->given, name, 1);
    return 0;
}

// 1, with the reason in err, when the option called `name` lies outside its range; when name is
// NULL, when any option does.
static int out_of_range(const Options *o, const char *name, char err[256]) {
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const struct Range *r = &ranges[i];
        if (name && strcmp(name, r->name)) continue;
        double x = opt_real(o, r->name);
        if (x >= r->lo && x <= r->hi) continue;
        snprintf(err, 256, "--%s %.10g is outside %.10g..%.10g", r->name, x, r->lo, r->hi);
        return 1;
    }
    return 0;
}

// ---- reading a value

// The value as text. A name that no table has is a mistake of the program: exit 1.
static const char *opt_value(const Options *o, const char *name) {
    Options *w = (Options *)o;                  // a search of stb_ds notes its place inside the map
    if (shgeti(w->map, name) < 0) die(EXIT_RUN, "no option is called --%s", name);
    return shget(w->map, name);
}

// 1: the user has set it.
int opt_given(const Options *o, const char *name) {
    Options *w = (Options *)o;                  // as in opt_value
    return shgeti(w->given, name) >= 0;
}

// A whole number, or a flag as 0 or 1.
int opt_int(const Options *o, const char *name) {
    return atoi(opt_value(o, name));
}

double opt_real(const Options *o, const char *name) {
    return strtod(opt_value(o, name), NULL);
}

const char *opt_str(const Options *o, const char *name) {
    return opt_value(o, name);
}

// The place of a choice in words, "a|b|c": 0 for a. Words are listed by the caller in the order of
// its enum.
int opt_choice(const Options *o, const char *name, const char *words) {
    return max_int(word_place(words, opt_str(o, name)), 0);
}

// Adds from, from + step, .. up to `to` to an stb_ds array, each number once.
static void list_add(int **list, long from, long to, long step) {
    for (; from <= to; from += step) {
        int known = 0;
        for (int i = 0; i < (int)arrlen(*list); i++) known |= (*list)[i] == from;
        if (!known) arrput(*list, (int)from);
    }
}

// The numbers of a text as an stb_ds array, each once: "2048", "512,1024", "2:98:3" (from, to,
// step), or a mix of them. All must lie in [lo,hi]. Exit 2 when the text is anything else; `name`
// is the option to blame.
static int *number_list(const char *name, const char *text, long lo, long hi) {
    int *list = NULL;
    const char *p = text;
    while (*p) {
        long from, to, step = 1;
        int n;
        if (sscanf(p, "%ld%n", &from, &n) != 1) break;
        p += n;
        to = from;
        if (sscanf(p, ":%ld:%ld%n", &to, &step, &n) == 2) p += n;
        if ((*p && *p != ',') || from < lo || to > hi || to < from || step < 1) break;
        list_add(&list, from, to, step);
        if (!*p) return list;
        p++;                                            // the comma
    }
    arrfree(list);
    die(EXIT_USAGE, "--%s wants numbers from %ld to %ld like 5,10 or 2:98:3, found '%.60s'", name, lo, hi,
        text);
    return NULL;
}

// ==================================================================================================== 19 JSON
// A strict reader of JSON (RFC 8259) for config.json, tokenizer.json, safetensors headers and score
// files, and a writer of JSON strings. A text is copied once; strings are unescaped in place inside
// that copy. Nodes wait on a stack until their array or object closes, and then move side by side
// into the memory of the document. The root owns everything: json_free(root) gives all of it back.

enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };
enum { JSON_DEPTH = 64 };       // most arrays and objects inside one another

struct Json {
    int type;                   // JSON_*
    int is_int;                 // 1: a number without fraction or exponent that fits int64
    int n;                      // children of an array or object
    double num;                 // value of a number; a bool is 0 or 1
    int64_t i;                  // the same value where is_int is set; a bool is 0 or 1
    char *str;                  // a string's bytes, UTF-8 as written, and a NUL. NULs may stand inside
    size_t len;                 // bytes of str without the last NUL
    Json *item;                 // (n) children of an array or object, in the order of the text
    char **key;                 // (n) keys of an object, as often as they are written
};

// A value whose array or object is still open.
typedef struct {
    Json value;
    char *key;                  // NULL inside an array
} JsonSlot;

// A parsed text. The root is the first field, because json_free casts the root's address back to
// the document.
typedef struct {
    Json root;
    char *text;                 // the copy that all strings point into
    char **block;               // stb_ds array: memory of the nodes
} JsonDoc;

typedef struct {
    JsonDoc *doc;
    char *p;                    // reading position in doc->text
    char *end;                  // end of the text, where a NUL stands
    char *err;                  // (256) receives the complaint
    JsonSlot *stack;            // stb_ds array: values whose container is still open
    char *mem;                  // free part of the newest block ...
    size_t left;                // ... and its bytes
    int depth;                  // containers open
} JsonReader;

// Writes "byte N: expected .., found .." about the place `at` into r->err. Returns -1.
static int json_fail(JsonReader *r, const char *at, const char *what) {
    size_t byte = (size_t)(at - r->doc->text);
    int c = at < r->end ? (unsigned char)*at : 0;

    if (at >= r->end) snprintf(r->err, 256, "byte %zu: %s, found the end of the text", byte, what);
    else if (c > 32 && c < 127) snprintf(r->err, 256, "byte %zu: %s, found '%c'", byte, what, c);
    else snprintf(r->err, 256, "byte %zu: %s, found byte %d", byte, what, c);
    return -1;
}

// n bytes for nodes, n a multiple of 8; NULL when n is 0. Blocks double from 1 KB up to 1 MB.
static void *json_alloc(JsonReader *r, size_t n) {
    if (!n) return NULL;
    if (n > r->left) {
        int doublings = min_int((int)arrlen(r->doc->block), 10);
        r->left = max_size(n, (size_t)1024 << doublings);
        r->mem = xmalloc(r->left);
        arrput(r->doc->block, r->mem);
    }
    void *p = r->mem;
    r->mem += n;
    r->left -= n;
    return p;
}

// Skips white space.
static void json_space(JsonReader *r) {
    while (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t') r->p++;
}

// ---- strings
// The value of the 4 hexadecimal digits at p, 0 to 65535, or -1 when one of them is none. Never
// reads beyond a NUL.
static int json_hex4(const char *p) {
    int v = 0;
    for (int i = 0; i < 4; i++) {
        int c = (unsigned char)p[i];
        int low = c | 32;       // a letter in lower case
        int digit;
        if (c >= '0' && c <= '9') digit = c - '0';
        else if (low >= 'a' && low <= 'f') digit = low - 'a' + 10;
        else return -1;
        v = v * 16 + digit;
    }
    return v;
}

// Writes code point c in UTF-8 to o and returns the byte behind it.
static char *utf8_put(char *o, unsigned c) {
    static const unsigned char lead[] = { 0, 0xc0, 0xe0, 0xf0 };
    int more;                   // continuation bytes; each holds 6 bits
    if (c < 0x80) more = 0;
    else if (c < 0x800) more = 1;
    else if (c < 0x10000) more = 2;
    else more = 3;

    *o++ = (char)(lead[more] | c >> 6 * more);
    while (more-- > 0) *o++ = (char)(0x80 | (c >> 6 * more & 63));
    return o;
}

// Reads what follows "\u": *p stands on its 4 digits and moves behind the escape. A high and a low
// surrogate, each in an escape of its own, make one code point; half a pair becomes U+FFFD. Returns
// the code point, or -1 with r->err set.
static int json_code_point(JsonReader *r, char **p) {
    int high = json_hex4(*p);
    if (high < 0) return json_fail(r, *p, "expected 4 hexadecimal digits after \\u");
    *p += 4;
    if (high < 0xd800 || high >= 0xe000) return high;

    int low = -1;
    if (high < 0xdc00 && (*p)[0] == '\\' && (*p)[1] == 'u') low = json_hex4(*p + 2);
    if (low < 0xdc00 || low >= 0xe000) return 0xfffd;
    *p += 6;
    return 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
}

// Reads one escape: *p stands on the backslash and moves behind the escape; what it stands for is
// written to *o, which moves too. Returns 0, or -1 with r->err set.
static int json_unescape(JsonReader *r, char **p, char **o) {
    int c = (unsigned char)(*p)[1], code;
    *p += 2;
    switch (c) {
    case '"':
    case '\\':
    case '/': break;            // these stand for themselves
    case 'b': c = '\b'; break;
    case 'f': c = '\f'; break;
    case 'n': c = '\n'; break;
    case 'r': c = '\r'; break;
    case 't': c = '\t'; break;
    case 'u':
        code = json_code_point(r, p);
        if (code < 0) return -1;
        *o = utf8_put(*o, (unsigned)code);
        return 0;
    default: return json_fail(r, *p - 1, "expected one of \"\\/bfnrtu after a backslash");
    }
    *(*o)++ = (char)c;
    return 0;
}

// Reads the string whose opening quote r->p stands on. An escape is never shorter than what it
// stands for, so the string shrinks in place, and its NUL overwrites the closing quote or a byte
// before it. Returns 0, or -1 with r->err set.
static int json_string(JsonReader *r, char **str, size_t *len) {
    char *p = r->p + 1;         // read here
    char *o = p;                // written here
    *str = o;
    for (;;) {
        char *run = p;
        while ((unsigned char)*p >= ' ' && *p != '"' && *p != '\\') p++;
        if (o != run) memmove(o, run, (size_t)(p - run));
        o += p - run;
        if (*p == '"') break;

        // What stands here is a backslash, or a control character or the text's end, which no
        // string may hold.
        if (*p != '\\') return json_fail(r, p, "expected '\"' at the end of a string");
        if (json_unescape(r, &p, &o)) return -1;
    }
    *o = 0;
    *len = (size_t)(o - *str);
    r->p = p + 1;
    return 0;
}

// ---- numbers
// Skips decimal digits.
static char *json_digits(char *p) {
    while (isdigit((unsigned char)*p)) p++;
    return p;
}

// Reads the number that r->p stands on. Returns 0, or -1 with r->err set, also when r->p stands on
// no value at all.
static int json_number(JsonReader *r, Json *v) {
    char *p = r->p;
    int negative = *p == '-', whole = 1, fits = 1;
    uint64_t u = 0;

    // The whole part. -2^63 counts as too large for an int64: no file needs it.
    if (negative) p++;
    char *digits = p;
    if (!isdigit((unsigned char)*p))
        return json_fail(r, p, negative ? "expected a digit after '-'" : "expected a value");
    for (; isdigit((unsigned char)*p); p++) {
        unsigned d = (unsigned)(*p - '0');
        fits &= u <= ((uint64_t)INT64_MAX - d) / 10;
        u = u * 10 + d;
    }
    if (*digits == '0' && p - digits > 1) return json_fail(r, digits, "expected no leading zero");

    // Fraction and exponent
    if (*p == '.') {
        whole = 0;
        p++;
        if (!isdigit((unsigned char)*p)) return json_fail(r, p, "expected a digit after '.'");
        p = json_digits(p);
    }
    if (*p == 'e' || *p == 'E') {
        whole = 0;
        p++;
        if (*p == '+' || *p == '-') p++;
        if (!isdigit((unsigned char)*p)) return json_fail(r, p, "expected a digit in the exponent");
        p = json_digits(p);
    }

    // The value. The grammar above is narrower than strtod's, so strtod stops at p too.
    v->type = JSON_NUMBER;
    v->is_int = whole && fits;
    if (v->is_int) {
        v->i = negative ? -(int64_t)u : (int64_t)u;
        v->num = (double)v->i;
    } else {
        v->num = strtod(r->p, NULL);
    }
    if (!isfinite(v->num)) return json_fail(r, r->p, "expected a number a double can hold");
    r->p = p;
    return 0;
}

// ---- values
static int json_value(JsonReader *r, Json *v);

// Reads `"key" :` and the white space around the colon. Returns 0, or -1 with r->err set.
static int json_key(JsonReader *r, char **key) {
    size_t len;
    if (*r->p != '"') return json_fail(r, r->p, "expected a key");
    if (json_string(r, key, &len)) return -1;
    json_space(r);
    if (*r->p != ':') return json_fail(r, r->p, "expected ':' after a key");
    r->p++;
    json_space(r);
    return 0;
}

// Moves the values above stack height `base` into v, an array or object that has just closed.
static int json_close(JsonReader *r, Json *v, int object, size_t base) {
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

// Reads the array or object whose '[' or '{' r->p stands on. Returns 0, or -1 with r->err set.
static int json_container(JsonReader *r, Json *v) {
    int object = *r->p == '{';
    char close = object ? '}' : ']';
    size_t base = arrlenu(r->stack);

    r->depth++;
    if (r->depth > JSON_DEPTH)
        return json_fail(r, r->p, "expected at most 64 nested arrays and objects");
    r->p++;
    json_space(r);
    while (*r->p != close) {
        JsonSlot slot = { .key = NULL };
        if (object && json_key(r, &slot.key)) return -1;
        if (json_value(r, &slot.value)) return -1;
        arrput(r->stack, slot);
        json_space(r);
        if (*r->p == close) break;
        if (*r->p != ',')
            return json_fail(r, r->p, object ? "expected ',' or '}'" : "expected ',' or ']'");
        r->p++;
        json_space(r);
        if (*r->p == close) return json_fail(r, r->p, "expected a value after ','");
    }
    r->p++;
    r->depth--;
    return json_close(r, v, object, base);
}

// Reads one of the words null, true and false. Returns 0, or -1 with r->err set when another word
// stands there.
static int json_word(JsonReader *r, Json *v, const char *word, int type, int value) {
    size_t n = strlen(word);
    if (strncmp(r->p, word, n)) return json_fail(r, r->p, "expected null, true or false");
    r->p += n;
    v->type = type;
    v->i = value;
    v->num = value;
    return 0;
}

// Reads the value that r->p stands on into *v. Returns 0, or -1 with r->err set.
static int json_value(JsonReader *r, Json *v) {
    *v = (Json){ .type = JSON_NULL };
    switch (*r->p) {
    case '{':
    case '[': return json_container(r, v);
    case '"':
        v->type = JSON_STRING;
        return json_string(r, &v->str, &v->len);
    case 'n': return json_word(r, v, "null", JSON_NULL, 0);
    case 't': return json_word(r, v, "true", JSON_BOOL, 1);
    case 'f': return json_word(r, v, "false", JSON_BOOL, 0);
    default: return json_number(r, v);
    }
}

// Gives back the document whose root is j; NULL is allowed.
static void json_free(Json *j) {
    JsonDoc *d = (JsonDoc *)j;
    if (!d) return;
    for (size_t i = 0; i < arrlenu(d->block); i++) free(d->block[i]);
    arrfree(d->block);
    free(d->text);
    free(d);
}

// Parses a text of n bytes. Returns its root, or NULL with the place and the reason in err when the
// text is malformed.
static Json *json_parse(const char *text, size_t n, char err[256]) {
    JsonDoc *d = xcalloc(1, sizeof *d);
    d->text = xmalloc(n + 1);
    memcpy(d->text, text, n);
    d->text[n] = 0;

    JsonReader r = { .doc = d, .p = d->text, .end = d->text + n, .err = err };
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

// The value of a key, the last one when the key is written twice. NULL when it is absent, or when
// obj is NULL or no object. The search is linear: a caller that needs many keys of a large object
// walks it instead.
static const Json *json_get(const Json *obj, const char *key) {
    if (!obj || obj->type != JSON_OBJECT) return NULL;
    for (int i = obj->n - 1; i >= 0; i--) {
        if (!strcmp(obj->key[i], key)) return &obj->item[i];
    }
    return NULL;
}

// ---- UTF-8 and the writer
// The length that a UTF-8 character has by its first byte, 1 to 4; 0 when no character begins with
// that byte.
static int utf8_lead_length(unsigned char lead) {
    if (lead < 0x80) return 1;
    if (lead < 0xc2) return 0;  // a continuation byte, or the overlong form of an ASCII character
    if (lead < 0xe0) return 2;
    if (lead < 0xf0) return 3;
    if (lead < 0xf5) return 4;
    return 0;
}

// The length of the well-formed character that the n bytes at s begin with; 0 when they begin with
// none.
static int utf8_length(const char *s, size_t n) {
    const unsigned char *p = (const unsigned char *)s;
    int k = n ? utf8_lead_length(p[0]) : 0;
    if ((size_t)k > n) return 0;
    for (int i = 1; i < k; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
    }
    if (k == 3 && p[0] == 0xe0 && p[1] < 0xa0) return 0;        // overlong
    if (k == 3 && p[0] == 0xed && p[1] >= 0xa0) return 0;       // a surrogate
    if (k == 4 && p[0] == 0xf0 && p[1] < 0x90) return 0;        // overlong
    if (k == 4 && p[0] == 0xf4 && p[1] >= 0x90) return 0;       // beyond U+10FFFF
    return k;
}

// Does any text in v hold a 0 byte ("\\u0000")? Where texts are used as C strings, what stands behind
// it would be lost.
static int json_holds_nul(const Json *v) {
    if (v->type == JSON_STRING) return memchr(v->str, 0, v->len) != NULL;
    int found = 0;
    for (int i = 0; i < v->n && !found; i++) found = json_holds_nul(&v->item[i]);
    return found;
}

// Writes the n bytes at s as a JSON string, quotes included. A byte of broken UTF-8 becomes U+FFFD.
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

// ==================================================================================================== 20 CHECKPOINTS
// From a folder of Hugging Face files to a Config and Weights. All of it reads files that others
// wrote, so every number is checked before it is used, and a file that cannot be used is refused
// with one line that names the key or the tensor. Tensors are read where their file is mapped; only
// one that lies at an odd address is copied.
//   config_load       config.json and generation_config.json -> Config
//   weights_load      model.safetensors, or the shards of model.safetensors.index.json -> Weights
//   config_synthetic, weights_synthetic: both from a shape and a seed, without a checkpoint
//   inspect           what --inspect prints of them
//   sonic_load        SONIC's adapter, a safetensors file of its own

// Writes one line into err. Returns -1.
KV_PRINTF(2, 3)
static int fault(char err[512], const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, 512, fmt, ap);
    va_end(ap);
    return -1;
}

// ---- safetensors
// The format: a u64 with the length of the header, the header (JSON: name -> dtype, shape,
// data_offsets), the data. The file is mapped, never read whole. What safetensors_open returns can
// be used without further checks: every tensor lies inside the file and has exactly the bytes of
// its shape, and the tensors fill the data without gap or overlap.
enum {
    DT_OTHER = -1,              // a dtype that weights are not read from
    DT_QUANTIZED = -2,          // one by which a quantized checkpoint is known
};
enum {
    SAFE_DIMS = 8,              // most dimensions of a tensor
    SAFE_HEADER = 100 << 20,    // most bytes of a header
};

typedef struct {
    const char *name;
    const char *type;           // dtype as written: "BF16"
    int dtype;                  // DT_*, DT_OTHER or DT_QUANTIZED
    int n_dim;
    int used;                   // 1: safetensors_find has returned it
    int64_t dim[SAFE_DIMS];
    const void *data;           // aligned for its dtype once safetensors_find has returned it
    size_t bytes;
} SafeTensor;

struct SafeFile {
    char *path;
    char *map;                  // the whole file
    size_t size;                // bytes of the file
    Json *header;               // owns the names
    SafeTensor *tensor;         // (n) sorted by name
    int n;
    void **copy;                // stb_ds array: copies of tensors that lie at odd addresses
    struct SafeFile *next;      // in the list of mapped files
};

// The dtypes of the format and the bits of an element. Quantized checkpoints keep their weights in
// numbers of a byte or less.
static const struct { const char *name; int bits, dtype; } safe_types[] = {
    { "F32", 32, DT_F32 },   { "F16", 16, DT_F16 },   { "BF16", 16, DT_BF16 },
    { "F64", 64, DT_OTHER }, { "C64", 64, DT_OTHER }, { "I64", 64, DT_OTHER },
    { "U64", 64, DT_OTHER }, { "I32", 32, DT_OTHER }, { "U32", 32, DT_OTHER },
    { "I16", 16, DT_OTHER }, { "U16", 16, DT_OTHER }, { "BOOL", 8, DT_OTHER },
    { "I8", 8, DT_QUANTIZED },          { "U8", 8, DT_QUANTIZED },
    { "F8_E4M3", 8, DT_QUANTIZED },     { "F8_E5M2", 8, DT_QUANTIZED },
    { "F8_E8M0", 8, DT_QUANTIZED },     { "F8_E4M3FNUZ", 8, DT_QUANTIZED },
    { "F8_E5M2FNUZ", 8, DT_QUANTIZED }, { "F4", 4, DT_QUANTIZED },
    { "F6_E2M3", 6, DT_QUANTIZED },     { "F6_E3M2", 6, DT_QUANTIZED },
    { NULL, 0, 0 },
};

// ---- a file that shrinks while it is mapped
// Reading a page of the mapping that the file has no more, or that its disk cannot give, raises
// SIGBUS in the thread that reads: a download that starts again, or an editor, can do that to a
// running chat. There is nothing to go on with, so the program ends, with its line and the
// terminal's own settings.
static SafeFile *mapped_files;
static void terminal_restore(void);             // section 25

// Writes the line about the file f to stderr, by calls that a signal handler may make.
static void lost_page_line(const SafeFile *f) {
    const char *part[] = { "kvcomp: ", f->path, ": cannot be read any more: the file has become shorter while it "
                           "was in use, or its disk fails\n" };
    char line[2000];
    size_t n = 0;
    for (int i = 0; i < 3; i++) {
        size_t k = min_size(strlen(part[i]), sizeof line / 3);
        memcpy(line + n, part[i], k);
        n += k;
    }
    ssize_t written = write(2, line, n);
    (void)written;
}

// SIGBUS. The first of the threads that read a lost page speaks, the others wait for the end. A
// SIGBUS from anywhere else ends the program as it would without this.
static void on_lost_page(int sig, siginfo_t *info, void *context) {
    static int told;
    const char *at = info->si_addr;
    const SafeFile *f = mapped_files;
    (void)context;
    while (f && (at < f->map || at >= f->map + f->size)) f = f->next;
    if (!f || info->si_code <= 0) {             // SI_USER and the like: somebody sent it
        signal(sig, SIG_DFL);
        raise(sig);
        return;
    }
    if (__atomic_exchange_n(&told, 1, __ATOMIC_SEQ_CST)) {
        for (;;) pause();
    }
    terminal_restore();
    lost_page_line(f);
    _exit(EXIT_MODEL);
}

// Puts f, which is mapped, into the list that on_lost_page looks through.
static void watch_mapping(SafeFile *f) {
    struct sigaction sa = { .sa_sigaction = on_lost_page, .sa_flags = SA_SIGINFO };
    f->next = mapped_files;
    mapped_files = f;
    sigaction(SIGBUS, &sa, NULL);
}

// Takes f out of the list.
static void unwatch_mapping(const SafeFile *f) {
    SafeFile **at = &mapped_files;
    while (*at && *at != f) at = &(*at)->next;
    if (*at) *at = f->next;
}

// Gives everything back; NULL is allowed.
static void safetensors_close(SafeFile *f) {
    if (!f) return;
    for (size_t i = 0; i < arrlenu(f->copy); i++) free(f->copy[i]);
    arrfree(f->copy);
    unwatch_mapping(f);
    if (f->map) munmap(f->map, f->size);
    json_free(f->header);
    free(f->tensor);
    free(f->path);
    free(f);
}

// Orders tensors by name, for qsort and bsearch.
static int safe_by_name(const void *a, const void *b) {
    return strcmp(((const SafeTensor *)a)->name, ((const SafeTensor *)b)->name);
}

// Orders pointers to tensors by the place of their data. An empty tensor stands before the one that
// starts where it lies.
static int safe_by_place(const void *a, const void *b) {
    const SafeTensor *x = *(SafeTensor *const *)a, *y = *(SafeTensor *const *)b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q) return p > q ? 1 : -1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

// Reads the dimensions of t, whose elements have `width` bits, and sets *bits to the size of the
// whole tensor. Returns 0, or -1 with err set.
static int safe_shape(SafeTensor *t, const Json *shape, int width, uint64_t *bits, char err[512]) {
    uint64_t count = 1;
    if (shape->n > SAFE_DIMS)
        return fault(err, "tensor %.200s: expected at most %d dimensions, found %d", t->name, SAFE_DIMS,
                     shape->n);
    t->n_dim = shape->n;
    for (int i = 0; i < shape->n; i++) {
        const Json *d = &shape->item[i];
        if (d->type != JSON_NUMBER || !d->is_int || d->i < 0)
            return fault(err, "tensor %.200s: dimension %d is no whole number >= 0", t->name, i);
        t->dim[i] = d->i;
        if (__builtin_mul_overflow(count, (uint64_t)d->i, &count))
            return fault(err, "tensor %.200s: the product of its dimensions overflows", t->name);
    }
    if (__builtin_mul_overflow(count, (uint64_t)width, bits))
        return fault(err, "tensor %.200s: the product of its dimensions overflows", t->name);
    return 0;
}

// Reads one header entry v into t. `data` is where the file's data begin, and they have `size`
// bytes. Returns 0, or -1 with err set.
static int safe_entry(SafeTensor *t, const char *name, const Json *v, const char *data, size_t size,
                      char err[512]) {
    const Json *type = json_get(v, "dtype");
    const Json *shape = json_get(v, "shape");
    const Json *place = json_get(v, "data_offsets");
    if (!type || type->type != JSON_STRING || !shape || shape->type != JSON_ARRAY || !place
        || place->type != JSON_ARRAY || place->n != 2 || !place->item[0].is_int || !place->item[1].is_int)
        return fault(err, "tensor %.200s: expected a dtype, a shape and two data_offsets", name);

    int k = 0;
    while (safe_types[k].name && strcmp(safe_types[k].name, type->str)) k++;
    if (!safe_types[k].name)
        return fault(err, "tensor %.200s: unknown dtype \"%.40s\"", name, type->str);
    *t = (SafeTensor){ .name = name, .type = safe_types[k].name, .dtype = safe_types[k].dtype };

    // The place of the data must lie in the file and have the size that the shape needs.
    uint64_t bits = 0;
    if (safe_shape(t, shape, safe_types[k].bits, &bits, err)) return -1;
    int64_t begin = place->item[0].i, end = place->item[1].i;
    if (begin < 0 || end < begin || (uint64_t)end > size)
        return fault(err, "tensor %.200s: data_offsets [%lld,%lld) lie outside the %zu bytes of data "
                     "(is the file truncated?)", name, (long long)begin, (long long)end, size);
    if (bits % 8 || (uint64_t)(end - begin) != bits / 8)
        return fault(err, "tensor %.200s: its shape needs %llu bytes, its data_offsets span %lld", name,
                     (unsigned long long)(bits + 7) / 8, (long long)(end - begin));
    t->data = data + begin;
    t->bytes = (size_t)(end - begin);
    return 0;
}

// Are all values of __metadata__ strings? Returns 0, or -1 with err set.
static int safe_metadata(const Json *v, char err[512]) {
    if (v->type != JSON_OBJECT) return fault(err, "__metadata__ is no JSON object");
    for (int i = 0; i < v->n; i++) {
        if (v->item[i].type != JSON_STRING)
            return fault(err, "__metadata__: %.200s is no string", v->key[i]);
    }
    return 0;
}

// The byte behind a tensor's data in the mapped file.
static const char *safe_end(const SafeTensor *t) {
    return (const char *)t->data + t->bytes;
}

// Do the tensors lie side by side from `data` to the end of the file? Returns 0, or -1 with err
// set.
static int safe_layout(const SafeFile *f, const char *data, char err[512]) {
    SafeTensor **order = xmalloc((size_t)f->n * sizeof *order);
    for (int i = 0; i < f->n; i++) order[i] = &f->tensor[i];
    qsort(order, (size_t)f->n, sizeof *order, safe_by_place);

    // In the order of place, the first tensor that overlaps another one overlaps its neighbour.
    int clash = 0;
    for (int i = 1; i < f->n && !clash; i++) {
        if (safe_end(order[i - 1]) > (const char *)order[i]->data) clash = i;
    }

    // Without an overlap, a gap before, between or behind the tensors remains to be looked for.
    const char *end = data;
    long long gap = 0;
    for (int i = 0; i < f->n && !gap; i++) {
        gap = (const char *)order[i]->data - end;
        end = safe_end(order[i]);
    }
    if (!gap) gap = f->map + f->size - end;

    int bad = 0;
    if (clash)
        bad = fault(err, "tensors %.200s and %.200s overlap", order[clash - 1]->name, order[clash]->name);
    else if (gap)
        bad = fault(err, "%lld bytes of data belong to no tensor: the header's length or its data_offsets "
                    "are wrong", gap);
    free(order);
    return bad;
}

// Reads the header, `len` bytes behind the u64, into f->tensor. Returns 0, or -1 with err set.
static int safe_header(SafeFile *f, size_t len, char err[512]) {
    const char *data = f->map + 8 + len;
    size_t size = f->size - 8 - len;
    char why[256];
    f->header = json_parse(f->map + 8, len, why);
    if (!f->header) return fault(err, "the header is not JSON: %s", why);
    if (f->header->type != JSON_OBJECT) return fault(err, "the header is no JSON object");

    // Every entry is a tensor, except for the metadata.
    f->tensor = xcalloc((size_t)f->header->n, sizeof *f->tensor);
    for (int i = 0; i < f->header->n; i++) {
        const char *name = f->header->key[i];
        const Json *v = &f->header->item[i];
        int bad;
        if (!strcmp(name, "__metadata__")) bad = safe_metadata(v, err);
        else bad = safe_entry(&f->tensor[f->n++], name, v, data, size, err);
        if (bad) return -1;
    }

    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name);
    for (int i = 1; i < f->n; i++) {
        if (!strcmp(f->tensor[i].name, f->tensor[i - 1].name))
            return fault(err, "tensor %.200s stands in the header twice", f->tensor[i].name);
    }
    return safe_layout(f, data, err);
}

// Maps the file f->path: sets f->map and f->size. Returns 0, or -1 with err set.
static int safe_map(SafeFile *f, char err[512]) {
    struct stat st;
    char reason[256];
    int fd = open_input(f->path, &st, reason);
    if (fd < 0) return fault(err, "%s", reason);
    if (st.st_size < 8) {
        close(fd);
        return fault(err, "not a safetensors file: expected a regular file of at least 8 bytes");
    }

    // The mapping stays when its file descriptor is closed.
    f->size = (size_t)st.st_size;
    void *p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    int why = errno;
    close(fd);
    if (p == MAP_FAILED && why == ENOMEM)
        die(EXIT_MEMORY, "out of memory: %s, %zu bytes, could not be mapped", f->path, f->size);
    if (p == MAP_FAILED) return fault(err, "cannot be mapped: %s", strerror(why));
    f->map = p;
    watch_mapping(f);
    return 0;
}

// Maps the file f->path and reads its header. Returns 0, or -1 with err set.
static int safe_read(SafeFile *f, char err[512]) {
    if (safe_map(f, err)) return -1;
    uint64_t len = 0;           // little endian in the file
    for (int i = 7; i >= 0; i--) len = len << 8 | (unsigned char)f->map[i];

    if (!memcmp(f->map, "version ", 8))
        return fault(err, "only a git-lfs pointer, not the weights themselves (git lfs pull fetches them)");
    if (len > SAFE_HEADER)
        return fault(err, "not a safetensors file: a header of %llu bytes, the limit is %d",
                     (unsigned long long)len, SAFE_HEADER);
    if (len > f->size - 8)
        return fault(err, "truncated: a header of %llu bytes in a file of %zu", (unsigned long long)len,
                     f->size);
    return safe_header(f, (size_t)len, err);
}

// Opens a file. Returns NULL, and the reason without the path in err, when it is missing or broken.
static SafeFile *safetensors_open(const char *path, char err[512]) {
    SafeFile *f = xcalloc(1, sizeof *f);
    f->path = xmalloc(strlen(path) + 1);
    strcpy(f->path, path);
    if (!safe_read(f, err)) return f;
    safetensors_close(f);
    return NULL;
}

// The tensor of that name, or NULL when there is none. The format allows data at any address, C
// does not: a tensor at an address that does not fit its dtype is copied to one that does.
static SafeTensor *safetensors_find(SafeFile *f, const char *name) {
    SafeTensor key = { .name = name }, *t = NULL;
    if (f->n) t = bsearch(&key, f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name);
    if (!t) return NULL;

    if (!t->used && t->dtype >= 0 && (uintptr_t)t->data % dtype_size(t->dtype)) {
        void *p = xmalloc(t->bytes);
        memcpy(p, t->data, t->bytes);
        t->data = p;
        arrput(f->copy, p);
    }
    t->used = 1;
    return t;
}

// A string of __metadata__, or NULL when there is none under that key.
static const char *safetensors_meta(const SafeFile *f, const char *key) {
    const Json *v = json_get(json_get(f->header, "__metadata__"), key);
    return v ? v->str : NULL;
}

// Has t the shape (rows,cols)? rows 0 asks for a vector (cols).
static int safe_has_shape(const SafeTensor *t, int rows, int cols) {
    if (!rows) return t->n_dim == 1 && t->dim[0] == cols;
    return t->n_dim == 2 && t->dim[0] == rows && t->dim[1] == cols;
}

// The two shapes of a complaint, as "2,3": the one that t has, and the one that safe_has_shape
// asked for.
static void safe_shape_texts(const SafeTensor *t, int rows, int cols, char found[200],
                             char want[64]) {
    int n = 0;
    found[0] = 0;
    for (int i = 0; i < t->n_dim; i++)
        n += snprintf(found + n, 200 - (size_t)n, "%s%lld", i ? "," : "", (long long)t->dim[i]);
    if (rows) snprintf(want, 64, "%d,%d", rows, cols);
    else snprintf(want, 64, "%d", cols);
}

// ---- config.json
// The reader keeps the first complaint and goes on with defaults, so that everything can be freed
// before die() is called. No value that is read after a complaint is ever used.
typedef struct {
    const char *file;           // its path, for the complaint
    char err[512];              // the first complaint; "": none
} ConfigReader;
enum { ABSENT_IS_ERROR = -1000000 };    // as a default: the key must be there

// The families of models by their model_type and by the class that "architectures" names.
static const struct { const char *type, *arch; } families[] = {
    { "llama", "LlamaForCausalLM" },
    { "mistral", "MistralForCausalLM" },
    { "qwen2", "Qwen2ForCausalLM" },
    { "qwen3", "Qwen3ForCausalLM" },
    { NULL, NULL },
};
#define FAMILIES "supported: llama (LlamaForCausalLM), mistral (MistralForCausalLM), " \
                 "qwen2 (Qwen2ForCausalLM), qwen3 (Qwen3ForCausalLM)"

// Writes the complaint "file: ..." unless there is one already.
KV_PRINTF(2, 3)
static void config_fail(ConfigReader *r, const char *fmt, ...) {
    if (r->err[0]) return;
    va_list ap;
    int n = snprintf(r->err, sizeof r->err, "%s: ", r->file);
    if (n < 0 || n >= (int)sizeof r->err) return;
    va_start(ap, fmt);
    vsnprintf(r->err + n, sizeof r->err - (size_t)n, fmt, ap);
    va_end(ap);
}

// Writes what was found into buf, for a complaint. Returns buf.
static const char *json_show(const Json *v, char buf[64]) {
    // by JSON_*
    static const char *const what[] = { "null", "a bool", "", "", "an array", "an object" };
    if (v->type == JSON_NUMBER && v->is_int) snprintf(buf, 64, "%lld", (long long)v->i);
    else if (v->type == JSON_NUMBER) snprintf(buf, 64, "%g", v->num);
    else if (v->type == JSON_STRING) snprintf(buf, 64, "\"%.50s\"", v->str);
    else snprintf(buf, 64, "%s", what[v->type]);
    return buf;
}

// The value of a key of o, or NULL when it is absent; null counts as absent.
static const Json *config_key(const Json *o, const char *key) {
    const Json *v = json_get(o, key);
    return v && v->type != JSON_NULL ? v : NULL;
}

// The whole number under a key, from lo to hi; def when the key is absent. def need not lie in the
// range.
static int config_int(ConfigReader *r, const Json *o, const char *key, int def, int lo, int hi) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v && def == ABSENT_IS_ERROR) config_fail(r, "%s is missing", key);
    if (!v) return def;
    if (v->type == JSON_NUMBER && v->is_int && v->i >= lo && v->i <= hi) return (int)v->i;
    config_fail(r, "%s: expected a whole number from %d to %d, found %s", key, lo, hi,
                json_show(v, buf));
    return def;
}

// The number under a key, from lo to hi; def when the key is absent. def need not lie in the range.
static double config_real(ConfigReader *r, const Json *o, const char *key, double def, double lo,
                          double hi) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v && def == ABSENT_IS_ERROR) config_fail(r, "%s is missing", key);
    if (!v) return def;
    if (v->type == JSON_NUMBER && v->num >= lo && v->num <= hi) return v->num;
    config_fail(r, "%s: expected a number from %g to %g, found %s", key, lo, hi, json_show(v, buf));
    return def;
}

// The bool under a key, as 0 or 1; def when the key is absent.
static int config_flag(ConfigReader *r, const Json *o, const char *key, int def) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v) return def;
    if (v->type == JSON_BOOL) return (int)v->i;
    config_fail(r, "%s: expected true or false, found %s", key, json_show(v, buf));
    return def;
}

// The string under a key; def when the key is absent.
static const char *config_str(ConfigReader *r, const Json *o, const char *key, const char *def) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v) return def;
    if (v->type == JSON_STRING) return v->str;
    config_fail(r, "%s: expected a string, found %s", key, json_show(v, buf));
    return def;
}

// The index in families[] of a model_type, or of an architecture when the model_type is ""; the end
// mark's if unknown.
static int family_find(const char *type, const char *arch) {
    int k = 0;
    for (; families[k].type; k++) {
        if (*type ? !strcmp(type, families[k].type) : !strcmp(arch, families[k].arch)) break;
    }
    return k;
}

// Reads the family of the model into c->model_type. Refuses unknown families, quantized checkpoints
// and MLPs without SiLU.
static void config_family(ConfigReader *r, Config *c, const Json *o) {
    const Json *list = config_key(o, "architectures");
    const char *type = config_str(r, o, "model_type", ""), *arch = "";
    if (list && list->type == JSON_ARRAY && list->n && list->item[0].type == JSON_STRING)
        arch = list->item[0].str;
    else if (list)
        config_fail(r, "architectures: expected a list of names");

    // Gemma-3 is refused with a reason of its own: it differs in more than a name.
    if (!strncmp(type, "gemma3", 6) || !strncmp(arch, "Gemma3", 6))
        config_fail(r, "Gemma-3 is not supported (its norms, GeGLU and second RoPE base are not written); "
                    FAMILIES);
    if (!*type && !*arch)
        config_fail(r, "model_type and architectures are missing: not a model's config; " FAMILIES);
    int k = family_find(type, arch);
    if (!families[k].type || (*arch && strcmp(arch, families[k].arch)))
        config_fail(r, "model_type \"%.60s\", architecture \"%.60s\" is not supported; " FAMILIES, type,
                    arch);
    else
        snprintf(c->model_type, sizeof c->model_type, "%s", families[k].type);

    if (config_key(o, "quantization_config") || config_key(o, "compression_config")) {
        const char *how = config_str(r, config_key(o, "quantization_config"), "quant_method", "?");
        config_fail(r, "quantized checkpoint (quantization_config, %.40s): kvcomp reads F32, F16 and BF16 "
                    "weights; take the unquantized model", how);
    }
    const char *act = config_str(r, o, "hidden_activation", "silu");
    act = config_str(r, o, "hidden_act", act);
    if (strcmp(act, "silu") && strcmp(act, "swish"))
        config_fail(r, "hidden_act: expected \"silu\", found \"%.40s\"", act);
}

// Reads the sizes of the model. c->dtype is what the file says; weights_load replaces it by what
// most tensors have.
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

    // What is absent is derived, and the sizes must fit each other.
    if (!c->D) {
        if (c->C % c->H)
            config_fail(r, "hidden_size %d is no multiple of num_attention_heads %d, and there is no "
                        "head_dim", c->C, c->H);
        c->D = c->C / c->H;
    }
    if (c->H % c->G)
        config_fail(r, "num_attention_heads %d is no multiple of num_key_value_heads %d", c->H, c->G);
    if (c->H / c->G > MAX_R)
        config_fail(r, "num_attention_heads %d, num_key_value_heads %d: expected at most %d query heads a "
                    "KV head", c->H, c->G, MAX_R);
    if (c->D % 2 || c->D < 2 || c->D > 1024)
        config_fail(r, "head_dim %d: expected an even number from 2 to 1024 (RoPE turns pairs)", c->D);

    const char *key = config_key(o, "dtype") ? "dtype" : "torch_dtype";
    const char *dtype = config_str(r, o, key, "bfloat16");
    if (!strcmp(dtype, "float32")) c->dtype = DT_F32;
    else if (!strcmp(dtype, "float16")) c->dtype = DT_F16;
    else c->dtype = DT_BF16;
}

// Reads which layers have a sliding window (D6, D7). Mistral: all of them. Qwen: those that
// layer_types names or, without layer_types, those from max_window_layers on if use_sliding_window
// is set. An absent sliding_window means 4096, the default of the models' classes; null means none.
static void config_window(ConfigReader *r, Config *c, const Json *o) {
    int qwen = !strncmp(c->model_type, "qwen", 4), mistral = !strcmp(c->model_type, "mistral");
    if (r->err[0] || !(mistral || qwen)) return;
    const Json *types = qwen ? config_key(o, "layer_types") : NULL;
    int use = mistral || config_flag(r, o, "use_sliding_window", 0);
    int from = qwen ? config_int(r, o, "max_window_layers", 28, 0, 1 << 30) : 0;
    int absent = use && !json_get(o, "sliding_window") ? 4096 : 0;
    int window = config_int(r, o, "sliding_window", absent, 1, 1 << 30);
    if (types && (types->type != JSON_ARRAY || types->n != c->L)) {
        config_fail(r, "layer_types: expected a list of %d names, one a layer", c->L);
        return;
    }

    // One flag a layer; when no layer has a window, c->windowed is NULL.
    int any = 0;
    c->windowed = xcalloc((size_t)c->L, 1);
    for (int l = 0; l < c->L; l++) {
        const Json *t = types ? &types->item[l] : NULL;
        char buf[64];
        if (!t) c->windowed[l] = use && window && l >= from;
        else if (t->type == JSON_STRING && !strcmp(t->str, "sliding_attention")) c->windowed[l] = 1;
        else if (t->type != JSON_STRING || strcmp(t->str, "full_attention"))
            config_fail(r, "layer_types[%d]: expected full_attention or sliding_attention, found %s", l,
                        json_show(t, buf));
        any |= c->windowed[l];
    }
    if (any && !window)
        config_fail(r, "layer_types names sliding_attention layers, but sliding_window is missing");
    if (any) {
        c->window = window;
    } else {
        free(c->windowed);
        c->windowed = NULL;
    }
}

// Do a and b hold the same numbers and strings under the same keys?
static int json_same(const Json *a, const Json *b) {
    if (a->type != b->type || a->n != b->n || a->num != b->num || a->len != b->len) return 0;
    if (a->len && memcmp(a->str, b->str, a->len)) return 0;
    for (int i = 0; i < a->n; i++) {
        const Json *y = a->type == JSON_OBJECT ? json_get(b, a->key[i]) : &b->item[i];
        if (!y || !json_same(&a->item[i], y)) return 0;
    }
    return 1;
}

// The object with the parameters of RoPE, or NULL: rope_scaling in old files, rope_parameters in
// new ones. The new one may hold one object per layer type; they must be the same.
static const Json *config_rope_object(ConfigReader *r, const Json *o) {
    const char *key = "rope_scaling";
    const Json *p = config_key(o, key);
    char buf[64];
    if (!p || (p->type == JSON_OBJECT && !p->n)) {
        key = "rope_parameters";
        p = config_key(o, key);
    }
    if (p && p->type != JSON_OBJECT)
        config_fail(r, "%s: expected an object, found %s", key, json_show(p, buf));

    const Json *full = config_key(p, "full_attention");
    const Json *sliding = config_key(p, "sliding_attention");
    if (!full) return p;
    if (sliding && !json_same(full, sliding))
        config_fail(r, "rope_parameters: full_attention and sliding_attention differ, which is not "
                    "supported");
    return full;
}

// Reads what the scaling c->rope_type needs from the object p.
static void config_rope_scaling(ConfigReader *r, Config *c, const Json *p) {
    c->factor = config_real(r, p, "factor", ABSENT_IS_ERROR, 1, 1e6);
    if (c->rope_type == ROPE_LLAMA3) {
        c->low_freq = config_real(r, p, "low_freq_factor", ABSENT_IS_ERROR, 1e-6, 1e6);
        c->high_freq = config_real(r, p, "high_freq_factor", ABSENT_IS_ERROR, 1e-6, 1e6);
        if (c->low_freq >= c->high_freq)
            config_fail(r, "low_freq_factor %g: expected less than high_freq_factor %g", c->low_freq,
                        c->high_freq);
    }
    if (c->rope_type == ROPE_YARN) {
        c->beta_fast = config_real(r, p, "beta_fast", 32, 1e-6, 1e6);
        c->beta_slow = config_real(r, p, "beta_slow", 1, 1e-6, 1e6);
        c->attn_factor = config_real(r, p, "attention_factor", 0, 1e-6, 1e6);
        if (c->beta_fast < c->beta_slow)
            config_fail(r, "beta_fast %g: expected at least beta_slow %g", c->beta_fast, c->beta_slow);
        if (config_key(p, "mscale") || config_key(p, "mscale_all_dim"))
            config_fail(r, "yarn with mscale is not supported");
        if (!config_flag(r, p, "truncate", 1))
            config_fail(r, "yarn with truncate false is not supported");
    }
}

// Reads the kind of RoPE (D5). Old files have rope_theta and rope_scaling{type|rope_type, ..}, new
// ones rope_parameters{rope_theta, rope_type, ..}. A rope_type that is not understood is refused:
// ignoring it gives fluent nonsense after a few thousand tokens.
static void config_rope(ConfigReader *r, Config *c, const Json *o) {
    const Json *p = config_rope_object(r, o);
    const char *type = config_str(r, p, "type", "default");
    type = config_str(r, p, "rope_type", type);
    c->theta = config_real(r, o, "rope_theta", 0, 1.5, 1e12);
    c->theta = config_real(r, p, "rope_theta", c->theta, 1.5, 1e12);
    if (c->theta == 0) {
        c->theta = 10000;
        if (!r->err[0]) warn("%s: no rope_theta, 10000 is used", r->file);
    }
    double partial = config_real(r, o, "partial_rotary_factor", 1, 0, 1);
    partial = config_real(r, p, "partial_rotary_factor", partial, 0, 1);
    if (partial != 1) config_fail(r, "partial_rotary_factor: only 1 is supported");

    // Defaults of the scaling. The positions of training may stand in either object; the outer
    // one wins.
    c->factor = 1;
    c->low_freq = 1;
    c->high_freq = 4;
    c->beta_fast = 32;
    c->beta_slow = 1;
    c->orig_pos = config_int(r, p, "original_max_position_embeddings", c->max_pos, 1, 1 << 30);
    c->orig_pos = config_int(r, o, "original_max_position_embeddings", c->orig_pos, 1, 1 << 30);

    if (!strcmp(type, "default")) return;
    if (!strcmp(type, "linear")) c->rope_type = ROPE_LINEAR;
    else if (!strcmp(type, "llama3")) c->rope_type = ROPE_LLAMA3;
    else if (!strcmp(type, "yarn")) c->rope_type = ROPE_YARN;
    else config_fail(r, "rope_type \"%.40s\" is not supported; supported: default, linear, llama3, yarn",
                     type);
    config_rope_scaling(r, c, p);
}

// Adds the eos ids of o, one number or a list, to those of c. An id without an embedding is never
// generated, so it is left out.
static void config_eos(ConfigReader *r, Config *c, const Json *o) {
    const Json *v = config_key(o, "eos_token_id");
    if (!v) return;
    const int most = sizeof c->eos / sizeof *c->eos;
    int list = v->type == JSON_ARRAY, n = list ? v->n : 1;
    for (int i = 0; i < n; i++) {
        const Json *e = list ? &v->item[i] : v;
        char buf[64];
        if (e->type != JSON_NUMBER || !e->is_int) {
            config_fail(r, "eos_token_id: expected whole numbers, found %s", json_show(e, buf));
            return;
        }
        int skip = e->i < 0 || e->i >= c->V;
        for (int k = 0; k < c->n_eos; k++) skip |= c->eos[k] == e->i;
        if (skip) continue;
        if (c->n_eos == most) config_fail(r, "eos_token_id: more than 8 different ids");
        else c->eos[c->n_eos++] = (int)e->i;
    }
}

// Says what a file of another format is and what to do about it. NULL: the name tells of no such
// file.
static const char *foreign_file(const char *name) {
    size_t n = strlen(name);
    if (!strncmp(name, "pytorch_model", 13))
        return "pickled weights, which are not read: in Python, "
               "AutoModelForCausalLM.from_pretrained(IN).save_pretrained(OUT) writes safetensors";
    if (!strncmp(name, "consolidated.", 13))
        return "weights in the vendor's own layout (interleaved RoPE), which is not read: fetch the Hugging "
               "Face files, config.json and model*.safetensors";
    if (n > 5 && !strcmp(name + n - 5, ".gguf"))
        return "a GGUF file, which is not read: fetch the Hugging Face folder it was made from";
    return NULL;
}

// Looks in a folder for weights of another format: 1 and a complaint in err when it finds some,
// else 0. readdir has no order; the complaint is about the first name of the alphabet.
static int foreign_files(const char *dir, char err[512]) {
    DIR *d = opendir(dir);
    struct dirent *e;
    char found[256] = "";
    if (!d) return 0;
    while ((e = readdir(d)) != NULL) {
        if (foreign_file(e->d_name) && (!found[0] || strcmp(e->d_name, found) < 0))
            snprintf(found, sizeof found, "%s", e->d_name);
    }
    closedir(d);
    if (!found[0]) return 0;
    snprintf(err, 512, "%.200s: only %.100s: %s", dir, found, foreign_file(found));
    return 1;
}

// Parses the object in dir/name. Returns NULL with the reason in err, or with err "" when the file
// is absent and not needed.
static Json *config_file(const char *dir, const char *name, int needed, char err[512]) {
    char path[1400], why[256];
    size_t n;
    struct stat st;
    err[0] = 0;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    if (!needed && !file_exists(path)) return NULL;

    // The folder itself first, then weights that another format would need, then the file.
    if (stat(dir, &st)) {
        fault(err, "%.300s: no such folder", dir);
        return NULL;
    }
    if (!S_ISDIR(st.st_mode)) {
        fault(err, "%.300s: expected a Hugging Face folder (config.json, model.safetensors, "
              "tokenizer.json), found a file", dir);
        return NULL;
    }
    if (!file_exists(path) && foreign_files(dir, err)) return NULL;
    char *text = read_bounded(path, MOST_CONFIG, &n, why);
    if (!text) {
        fault(err, "%s", why);
        return NULL;
    }

    Json *j = json_parse(text, n, why);
    free(text);
    if (!j) fault(err, "%.220s/%s: %s", dir, name, why);
    else if (j->type != JSON_OBJECT) fault(err, "%.300s/%s: expected a JSON object", dir, name);
    if (!err[0]) return j;
    json_free(j);
    return NULL;
}

// Reads config.json's object o into c. r->err tells whether c can be used.
static void config_read(ConfigReader *r, Config *c, const Json *o) {
    config_family(r, c, o);
    config_sizes(r, c, o);
    config_window(r, c, o);
    config_rope(r, c, o);
    c->bos = config_int(r, o, "bos_token_id", -1, -1, INT_MAX);
    if (c->bos >= c->V) c->bos = -1;
    config_eos(r, c, o);
}

// Gives a config back; NULL is allowed.
static void config_free(Config *c) {
    if (c) free(c->windowed);
    free(c);
}

// Reads config.json of a folder, and the eos ids of generation_config.json if it is there. Exit 3
// with the key's name.
Config *config_load(const char *dir) {
    Config *c = xcalloc(1, sizeof *c);
    char file[400];
    ConfigReader r = { .file = file };

    // c->dir is the path without slashes at its end.
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    if (n >= sizeof c->dir) {
        config_free(c);
        die(EXIT_MODEL, "%.60s...: the path is longer than %zu bytes", dir, sizeof c->dir - 1);
    }
    memcpy(c->dir, dir, n);

    // The path in `file` follows the file that is read, because complaints name it.
    Json *config = config_file(c->dir, "config.json", 1, r.err), *generation = NULL;
    snprintf(file, sizeof file, "%.300s/config.json", c->dir);
    if (!r.err[0]) config_read(&r, c, config);
    if (!r.err[0]) generation = config_file(c->dir, "generation_config.json", 0, r.err);
    if (generation) {
        snprintf(file, sizeof file, "%.300s/generation_config.json", c->dir);
        config_eos(&r, c, generation);
    }
    json_free(config);
    json_free(generation);
    if (r.err[0]) {
        config_free(c);
        die(EXIT_MODEL, "%s", r.err);
    }
    return c;
}

// ---- a config without a checkpoint
// Shapes of known models, for --synthetic.
static const struct { const char *name; Config c; } synthetic_shapes[] = {
    { "llama-3.2-1b", { .model_type = "llama", .L = 16, .H = 32, .G = 8, .D = 64, .C = 2048, .F = 8192,
                        .V = 128256, .tied = 1, .eps = 1e-5f, .theta = 5e5, .rope_type = ROPE_LLAMA3,
                        .factor = 32 } },
    { "llama-3.1-8b", { .model_type = "llama", .L = 32, .H = 32, .G = 8, .D = 128, .C = 4096, .F = 14336,
                        .V = 128256, .eps = 1e-5f, .theta = 5e5, .rope_type = ROPE_LLAMA3,
                        .factor = 8 } },
    { "qwen3-4b",     { .model_type = "qwen3", .L = 36, .H = 32, .G = 8, .D = 128, .C = 2560, .F = 9728,
                        .V = 151936, .tied = 1, .qk_norm = 1, .eps = 1e-6f, .theta = 1e6,
                        .factor = 1 } },
    { "tiny",         { .model_type = "llama", .L = 8, .H = 8, .G = 4, .D = 64, .C = 512, .F = 1408,
                        .V = 8192, .tied = 1, .eps = 1e-5f, .theta = 1e4, .factor = 1 } },
};
enum { N_SHAPES = sizeof synthetic_shapes / sizeof *synthetic_shapes };

// Reads sizes such as "L16,H32" into c; a size that is not named stays. Returns 0, or -1 when the
// text is malformed or a size is out of range.
static int synthetic_sizes(Config *c, const char *text) {
    const struct { char letter; int *at, max; } size[] = {
        { 'L', &c->L, 1024 },
        { 'H', &c->H, 1024 },
        { 'G', &c->G, 1024 },
        { 'D', &c->D, 1024 },
        { 'C', &c->C, 1 << 18 },
        { 'F', &c->F, 1 << 20 },
        { 'V', &c->V, 1 << 22 },
    };
    const size_t sizes = sizeof size / sizeof *size;

    // p stands on a letter, or on the text's end where a letter should stand.
    for (const char *p = text; ; p++) {
        size_t i = 0;
        while (i < sizes && size[i].letter != *p) i++;
        if (i == sizes || !isdigit((unsigned char)p[1])) return -1;
        char *end;
        long v = strtol(p + 1, &end, 10);
        if (v < 1 || v > size[i].max || (*end && *end != ',')) return -1;
        *size[i].at = (int)v;
        if (!*end) return 0;
        p = end;                // the comma
    }
}

// A config for runs that measure speed: a known name, or sizes that replace those of llama-3.2-1b.
// Exit 2 for a shape that cannot be.
Config *config_synthetic(const char *shape) {
    int k = 0;
    while (k < N_SHAPES && strcmp(shape, synthetic_shapes[k].name)) k++;
    Config c = synthetic_shapes[k < N_SHAPES ? k : 0].c;
    c.max_pos = 131072;
    c.orig_pos = 8192;
    c.bos = -1;
    c.dtype = DT_BF16;
    c.low_freq = 1;
    c.high_freq = 4;
    c.beta_fast = 32;
    c.beta_slow = 1;
    snprintf(c.dir, sizeof c.dir, "synthetic:%s", shape);

    // A shape that is no known name is a list of sizes.
    if (k == N_SHAPES && synthetic_sizes(&c, shape))
        die(EXIT_USAGE, "shape \"%.60s\": expected llama-3.2-1b, llama-3.1-8b, qwen3-4b, tiny or sizes such "
            "as L16,H32,G8,D64,C2048,F8192,V128256", shape);
    if (c.H % c.G) die(EXIT_USAGE, "shape \"%.60s\": H %d is no multiple of G %d", shape, c.H, c.G);
    if (c.H / c.G > MAX_R)
        die(EXIT_USAGE, "shape \"%.60s\": H %d, G %d: expected at most %d query heads a KV head", shape,
            c.H, c.G, MAX_R);
    if (c.D % 2) die(EXIT_USAGE, "shape \"%.60s\": D %d is odd (RoPE turns pairs)", shape, c.D);
    Config *out = xmalloc(sizeof *out);
    *out = c;
    return out;
}

// ---- weights
// One table names every tensor of a layer, its sizes and when it must be there. Loading, making and
// printing walk it.
enum {
    TENSOR_NEEDED,              // every model has it
    TENSOR_OPTIONAL,            // taken when the file has it
    TENSOR_QWEN2,               // needed by Qwen2, optional elsewhere
    TENSOR_QK_NORM,             // needed by a model with QK-norm, not looked for elsewhere
};

// rows and cols are letters of the legend; Q is H*D, K is G*D, and 1 row makes a vector.
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
    { "mlp.down_proj.bias",              offsetof(Layer, bdown),     '1', 'C', TENSOR_OPTIONAL },
};
enum { N_LAYER_TENSORS = sizeof layer_tensors / sizeof *layer_tensors };

static const char *const dtype_names[] = { "F32", "F16", "BF16" };      // by DT_*

// The tensor of a layer that line i of the table names.
static Tensor *layer_tensor(Layer *ly, int i) {
    return (Tensor *)((char *)ly + layer_tensors[i].at);
}

// The size that a letter of the table stands for.
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

// Rows of the tensor in line i of the table.
static int tensor_rows(const Config *c, int i) {
    return config_size(c, layer_tensors[i].rows);
}

// Its columns.
static int tensor_cols(const Config *c, int i) {
    return config_size(c, layer_tensors[i].cols);
}

// Must this model have it?
static int tensor_needed(const Config *c, int i) {
    switch (layer_tensors[i].when) {
    case TENSOR_NEEDED:  return 1;
    case TENSOR_QWEN2:   return !strcmp(c->model_type, "qwen2");
    case TENSOR_QK_NORM: return c->qk_norm;
    default:             return 0;
    }
}

// Bytes of a tensor's data.
static size_t tensor_bytes(const Tensor *t) {
    return (size_t)t->rows * (size_t)t->cols * dtype_size(t->dtype);
}

// ---- RoPE frequencies
// yarn: the pair i, a real number, whose angle makes `beta` full turns in the positions of training
//   orig_pos * theta^(-2i/D) = 2 pi beta   =>   i = D log(orig_pos / (2 pi beta)) / (2 log theta)
static double yarn_pair(const Config *c, double beta) {
    double log_ratio = log(c->orig_pos / (beta * 2 * M_PI));
    return c->D * log_ratio / (2 * log(c->theta));
}

// yarn: the factor on cos and sin, which is attention_factor or, without it, 0.1 ln(factor) + 1.
static double yarn_scale(const Config *c) {
    if (c->attn_factor > 0) return c->attn_factor;
    if (c->factor > 1) return 0.1 * log(c->factor) + 1;
    return 1;
}

// llama3: the frequency x after scaling. With wavelen = 2 pi / x:
//   wavelen < orig_pos / high_freq:  x            a short wave stays
//   wavelen > orig_pos / low_freq:   x / factor   a long one is stretched
//   between:                         (1 - s) x / factor + s x, where
//                                    s = (orig_pos / wavelen - low_freq) / (high_freq - low_freq)
static double llama3_frequency(const Config *c, double x) {
    double wavelen = 2 * M_PI / x;
    if (wavelen < c->orig_pos / c->high_freq) return x;
    if (wavelen > c->orig_pos / c->low_freq) return x / c->factor;
    double s = (c->orig_pos / wavelen - c->low_freq) / (c->high_freq - c->low_freq);
    return (1 - s) * x / c->factor + s * x;
}

// Sets f (D/2), one frequency per pair (i, i+D/2): theta^(-2i/D), then the scaling of config.json
// (D5). *scale is the factor on cos and sin. All in double.
static void rope_frequencies(const Config *c, double *f, float *scale) {
    double low = 0, high = 0;
    *scale = 1;
    if (c->rope_type == ROPE_YARN) {
        low = fmax(floor(yarn_pair(c, c->beta_fast)), 0);
        high = fmin(ceil(yarn_pair(c, c->beta_slow)), c->D - 1);
        if (low == high) high += 0.001;
        *scale = (float)yarn_scale(c);
    }
    for (int i = 0; i < c->D / 2; i++) {
        double x = pow(c->theta, -2.0 * i / c->D);
        if (c->rope_type == ROPE_LINEAR) x /= c->factor;
        if (c->rope_type == ROPE_LLAMA3) x = llama3_frequency(c, x);
        if (c->rope_type == ROPE_YARN) {
            // Pairs below low turn fast enough to stay as they are, pairs above high are stretched,
            // a ramp lies between.
            double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
            x = x / c->factor * ramp + x * (1 - ramp);
        }
        f[i] = x;
    }
}

// ---- loading
// What Weights.files points to: the mapped files of a checkpoint, or one block of weights made from
// a seed.
typedef struct {
    SafeFile **file;            // stb_ds array
    Json *index;                // model.safetensors.index.json; NULL: the folder has none
    void *block;
    size_t block_bytes;
} WeightFiles;

// Weights with their RoPE frequencies and no tensors yet.
static Weights *weights_new(const Config *c) {
    Weights *w = xcalloc(1, sizeof *w);
    double *f64 = xmalloc((size_t)(c->D / 2) * sizeof *f64);
    float *f32 = xmalloc((size_t)(c->D / 2) * sizeof *f32);
    w->layer = xcalloc((size_t)c->L, sizeof *w->layer);
    w->files = xcalloc(1, sizeof(WeightFiles));

    rope_frequencies(c, f64, &w->rope_scale);
    for (int i = 0; i < c->D / 2; i++) f32[i] = (float)f64[i];
    w->inv_freq64 = f64;
    w->inv_freq = f32;
    return w;
}

// Gives both back; either may be NULL.
void weights_close(Weights *w, Config *c) {
    if (w) {
        WeightFiles *wf = w->files;
        for (size_t i = 0; i < arrlenu(wf->file); i++) safetensors_close(wf->file[i]);
        arrfree(wf->file);
        json_free(wf->index);
        if (wf->block) munmap(wf->block, wf->block_bytes);
        free(wf);
        free((void *)w->inv_freq);
        free((void *)w->inv_freq64);
        free(w->layer);
        free(w);
    }
    config_free(c);
}

// Opens dir/name, unless it is open already. The name of a shard comes from a file, so only a plain
// name in that folder is opened. Returns 0, or -1 with err set.
static int weights_open_file(WeightFiles *wf, const char *dir, const char *name, char err[512]) {
    char path[1400], why[512];
    if (!*name || *name == '.' || strchr(name, '/') || strlen(name) > 255)
        return fault(err, "%.200s/model.safetensors.index.json: weight_map names the file \"%.80s\", "
                     "expected a name in the same folder", dir, name);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    for (size_t i = 0; i < arrlenu(wf->file); i++) {
        if (!strcmp(wf->file[i]->path, path)) return 0;
    }
    if (arrlenu(wf->file) == 4096)
        return fault(err, "%.200s/model.safetensors.index.json: more than 4096 shards", dir);
    SafeFile *f = safetensors_open(path, why);
    if (!f) return fault(err, "%.200s/%.100s: %.200s", dir, name, why);
    arrput(wf->file, f);
    return 0;
}

// The open file dir/name, or NULL.
static SafeFile *weights_file_of(const WeightFiles *wf, const char *dir, const char *name) {
    size_t n = strlen(dir);
    for (size_t i = 0; i < arrlenu(wf->file); i++) {
        if (!strcmp(wf->file[i]->path + n + 1, name)) return wf->file[i];
    }
    return NULL;
}

// Opens the files of a folder: those that model.safetensors.index.json names or, without it,
// model.safetensors. Other weights may lie beside them, so the folder is never searched. Returns 0,
// or -1 with err set.
static int weights_open(WeightFiles *wf, const char *dir, char err[512]) {
    char path[1400];
    wf->index = config_file(dir, "model.safetensors.index.json", 0, err);
    if (err[0]) return -1;

    if (!wf->index) {
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        if (!file_exists(path) && foreign_files(dir, err)) return -1;
        return weights_open_file(wf, dir, "model.safetensors", err);
    }

    // weight_map: name of a tensor -> name of its file
    const Json *map = json_get(wf->index, "weight_map");
    if (!map || map->type != JSON_OBJECT || !map->n)
        return fault(err, "%.300s/model.safetensors.index.json: no weight_map", dir);
    for (int i = 0; i < map->n; i++) {
        const Json *v = &map->item[i];
        if (v->type != JSON_STRING)
            return fault(err, "%.200s/model.safetensors.index.json: weight_map: %.100s is no file name",
                         dir, map->key[i]);
        if (weights_open_file(wf, dir, v->str, err)) return -1;
    }
    return 0;
}

// Says that a tensor is missing, or that the checkpoint is quantized when a tensor of a quantized
// one stands in its place. Returns -1.
static int weights_missing(const WeightFiles *wf, const Config *c, const char *name,
                           char err[512]) {
    static const char *const traces[] = {
        "qweight",              // GPTQ and AWQ
        "weight_packed",        // compressed-tensors
        "weight_scale",         // FP8
        "weight.absmax",        // bitsandbytes
    };
    char packed[200];
    size_t n = strlen(name), stem = n > 7 && !strcmp(name + n - 7, ".weight") ? n - 7 : 0;
    for (size_t i = 0; stem && i < sizeof traces / sizeof *traces; i++) {
        snprintf(packed, sizeof packed, "%.*s.%s", (int)stem, name, traces[i]);
        for (size_t k = 0; k < arrlenu(wf->file); k++) {
            if (safetensors_find(wf->file[k], packed))
                return fault(err, "%.200s: quantized checkpoint: tensor %s instead of %s; take the "
                             "unquantized model", c->dir, packed, name);
        }
    }
    return fault(err, "%.200s: tensor %s is missing", c->dir, name);
}

// Finds the tensor of that name, checks its dtype and its shape (rows,cols) or, with rows 0,
// (cols), and sets *out. Returns 0, or -1 with err set. A tensor that is absent and not needed
// leaves out->data NULL and is no error.
static int weights_take(WeightFiles *wf, const Config *c, const char *name, int needed, int rows,
                        int cols, Tensor *out, char err[512]) {
    // With an index, the tensor is where the index says and nowhere else.
    const Json *place = json_get(json_get(wf->index, "weight_map"), name);
    SafeTensor *t = NULL;
    if (place) {
        t = safetensors_find(weights_file_of(wf, c->dir, place->str), name);
        if (!t)
            return fault(err, "%.200s: tensor %s is not in %.100s, where model.safetensors.index.json says "
                         "it is", c->dir, name, place->str);
    } else if (!wf->index) {
        t = safetensors_find(wf->file[0], name);
    }
    if (!t) return needed ? weights_missing(wf, c, name, err) : 0;

    if (t->dtype == DT_QUANTIZED)
        return fault(err, "%.200s: quantized checkpoint: tensor %s is %s, expected F32, F16 or BF16; take "
                     "the unquantized model", c->dir, name, t->type);
    if (t->dtype < 0)
        return fault(err, "%.200s: tensor %s is %s, expected F32, F16 or BF16", c->dir, name, t->type);
    if (!safe_has_shape(t, rows, cols)) {
        char found[200], want[64];
        safe_shape_texts(t, rows, cols, found, want);
        return fault(err, "%.110s: tensor %.100s: found shape (%.180s), expected (%s) from config.json",
                     c->dir, name, found, want);
    }
    *out = (Tensor){ t->data, t->dtype, max_int(rows, 1), cols };
    return 0;
}

// Opens the files of c->dir and finds every tensor. Returns 0, or -1 with err set. QK-norm tensors
// of a family that does not use them are left alone, so that weights_load reports them. A tied
// output matrix wins over an lm_head (D7).
static int weights_read(Weights *w, Config *c, char err[512]) {
    WeightFiles *wf = w->files;
    char name[200];
    if (weights_open(wf, c->dir, err)) return -1;
    if (weights_take(wf, c, "model.embed_tokens.weight", 1, c->V, c->C, &w->embed, err)) return -1;
    for (int l = 0; l < c->L; l++) {
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            if (layer_tensors[i].when == TENSOR_QK_NORM && !c->qk_norm) continue;
            int rows = layer_tensors[i].rows == '1' ? 0 : tensor_rows(c, i), cols = tensor_cols(c, i);
            Tensor *t = layer_tensor(&w->layer[l], i);
            snprintf(name, sizeof name, "model.layers.%d.%s", l, layer_tensors[i].name);
            if (weights_take(wf, c, name, tensor_needed(c, i), rows, cols, t, err)) return -1;
        }
    }
    if (weights_take(wf, c, "model.norm.weight", 1, 0, c->C, &w->norm, err)) return -1;
    if (weights_take(wf, c, "lm_head.weight", !c->tied, c->V, c->C, &w->head, err)) return -1;
    if (c->tied) {
        if (w->head.data)
            warn("warning: %s: lm_head.weight is not used, config.json ties the output to the embedding",
                 c->dir);
        w->head = w->embed;
    }
    return 0;
}

// Sets w->bytes to the sum over all tensors, and c->dtype to the dtype that most bytes have.
static void weights_count(Weights *w, Config *c) {
    size_t by[3] = { 0 };       // bytes by DT_*
    by[w->embed.dtype] += tensor_bytes(&w->embed);
    by[w->norm.dtype] += tensor_bytes(&w->norm);
    if (w->head.data != w->embed.data) by[w->head.dtype] += tensor_bytes(&w->head);
    for (int l = 0; l < c->L; l++) {
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            const Tensor *t = layer_tensor(&w->layer[l], i);
            if (t->data) by[t->dtype] += tensor_bytes(t);
        }
    }
    w->bytes = by[0] + by[1] + by[2];
    if (by[DT_BF16] >= by[DT_F16] && by[DT_BF16] >= by[DT_F32]) c->dtype = DT_BF16;
    else if (by[DT_F16] >= by[DT_F32]) c->dtype = DT_F16;
    else c->dtype = DT_F32;
}

// Warns of tensors that nobody asked for. Stored RoPE frequencies are none of them: older
// checkpoints have them.
static void weights_leftovers(const WeightFiles *wf, const Config *c) {
    const char *first = NULL;
    int left = 0;
    for (size_t i = 0; i < arrlenu(wf->file); i++) {
        for (int k = 0; k < wf->file[i]->n; k++) {
            const SafeTensor *t = &wf->file[i]->tensor[k];
            if (t->used || strstr(t->name, "rotary_emb.inv_freq")) continue;
            if (!left) first = t->name;
            left++;
        }
    }
    if (left)
        warn("warning: %s: %d tensor%s not used, the first: %s", c->dir, left, left > 1 ? "s are" : " is",
             first);
}

// The weights of the checkpoint that c was read from. Exit 3 with the tensor's name. Sets c->dtype.
Weights *weights_load(Config *c) {
    Weights *w = weights_new(c);
    char err[512] = "";
    if (weights_read(w, c, err)) {
        weights_close(w, NULL);
        die(EXIT_MODEL, "%s", err);
    }
    weights_count(w, c);
    weights_leftovers(w->files, c);
    return w;
}

// ---- weights from a seed
// Fills p (n) with uniform bf16 numbers of the given standard deviation. One draw of 64 bits makes
// four of them.
static void random_bf16(uint16_t *p, size_t n, double std, uint64_t seed) {
    float unit = (float)(std * 1.7320508075688772 / 32768);     // uniform: sqrt(3) std to both sides
    for (size_t i = 0; i < n; ) {
        uint64_t z = splitmix64(&seed);
        for (int k = 0; k < 4 && i < n; k++) {
            p[i++] = f32_to_bf16((float)(int16_t)(z & 0xffff) * unit);
            z >>= 16;
        }
    }
}

// Bytes that a made tensor takes: bf16, rounded up to 64.
static size_t synthetic_bytes(int rows, int cols) {
    return ((size_t)rows * (size_t)cols * 2 + 63) & ~(size_t)63;
}

// Makes a tensor at *next, which moves behind it. std 0 asks for all ones. Each row has a seed of
// its own, so the number of threads does not change the bits.
static void make_tensor(Tensor *t, char **next, int rows, int cols, double std, uint64_t seed) {
    const uint16_t one = 0x3f80;
    uint16_t *p = (uint16_t *)*next;
    *t = (Tensor){ p, DT_BF16, rows, cols };
    *next += synthetic_bytes(rows, cols);
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        uint16_t *row = p + (size_t)r * (size_t)cols;
        if (std > 0) {
            random_bf16(row, (size_t)cols, std, mix64(seed ^ mix64((uint64_t)r + 1)));
        } else {
            for (int i = 0; i < cols; i++) row[i] = one;
        }
    }
}

// Maps one block for all tensors of c. Exit 4 when there is no memory.
static void synthetic_block(Weights *w, const Config *c) {
    WeightFiles *wf = w->files;
    // The embedding, the output matrix if it is not tied, the last norm, and what the layers hold
    size_t total = synthetic_bytes(c->V, c->C) * (c->tied ? 1 : 2) + synthetic_bytes(1, c->C);
    for (int i = 0; i < N_LAYER_TENSORS; i++) {
        if (!tensor_needed(c, i)) continue;
        total += (size_t)c->L * synthetic_bytes(tensor_rows(c, i), tensor_cols(c, i));
    }

    wf->block = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (wf->block == MAP_FAILED) {
        wf->block = NULL;
        weights_close(w, NULL);
        die(EXIT_MEMORY, "out of memory: %zu bytes of synthetic weights could not be had (a smaller shape "
            "needs less)", total);
    }
    wf->block_bytes = total;
    madvise(wf->block, total, MADV_HUGEPAGE);
}

// Random bf16 weights of the right sizes, for measurements of speed and for tests. Logits get a
// standard deviation of about 2.5, and every branch writes into the residual stream at the scale of
// the embedding, so that depth changes nothing. Sets c->dtype.
Weights *weights_synthetic(Config *c, uint64_t seed) {
    Weights *w = weights_new(c);
    synthetic_block(w, c);
    char *next = ((WeightFiles *)w->files)->block;

    // The last norm gives x (C) the length sqrt(C), so its products with rows of deviation std have
    // the deviation 2.5.
    double std = 2.5 / sqrt(c->C);
    make_tensor(&w->embed, &next, c->V, c->C, std, mix64(seed ^ 1));
    for (int l = 0; l < c->L; l++) {
        for (int i = 0; i < N_LAYER_TENSORS; i++) {
            if (!tensor_needed(c, i)) continue;
            int rows = tensor_rows(c, i), cols = tensor_cols(c, i);
            // A matrix keeps the size of its input. The two that write into the residual stream,
            // those with C rows, bring it down to the embedding's. Norms are all ones.
            double spread = (layer_tensors[i].rows == 'C' ? std : 1) / sqrt(cols);
            if (strstr(layer_tensors[i].name, "norm")) spread = 0;
            uint64_t own = mix64(seed ^ mix64((uint64_t)l * 64 + (uint64_t)i + 16));
            make_tensor(layer_tensor(&w->layer[l], i), &next, rows, cols, spread, own);
        }
    }

    make_tensor(&w->norm, &next, 1, c->C, 0, 0);
    w->head = w->embed;
    if (!c->tied) make_tensor(&w->head, &next, c->V, c->C, std, mix64(seed ^ 2));
    weights_count(w, c);
    return w;
}

// ---- --inspect
// Prints one line about a tensor that stands in `times` layers, in different dtypes if `mixed`;
// none if it is absent.
static void inspect_tensor(FILE *f, const char *name, const Tensor *t, int mixed, int times) {
    char shape[40];
    if (!t->data) return;
    if (t->rows == 1) snprintf(shape, sizeof shape, "%d", t->cols);
    else snprintf(shape, sizeof shape, "%d x %d", t->rows, t->cols);
    fprintf(f, "  %-46s %-5s ", name, mixed ? "mixed" : dtype_names[t->dtype]);
    if (times > 1) fprintf(f, "%-16s in %d layers\n", shape, times);
    else fprintf(f, "%s\n", shape);
}

// Prints one line about the tensor in line i of the table, over all layers.
static void inspect_layers(FILE *f, const Config *c, const Weights *w, int i) {
    char name[200];
    int times = 0, mixed = 0;
    const Tensor *first = NULL;
    for (int l = 0; l < c->L; l++) {
        const Tensor *t = layer_tensor(&w->layer[l], i);
        if (!t->data) continue;
        if (!first) first = t;
        times++;
        mixed |= t->dtype != first->dtype;
    }
    snprintf(name, sizeof name, "model.layers.*.%s", layer_tensors[i].name);
    if (first) inspect_tensor(f, name, first, mixed, times);
}

// Prints the config.
static void inspect_config(FILE *f, const Config *c) {
    static const char *const ropes[] = { "default", "linear", "llama3", "yarn" };       // by ROPE_*
    int windowed = 0;
    for (int l = 0; l < c->L; l++) windowed += c->windowed && c->windowed[l];
    fprintf(f, "model      %s, %s\n", c->model_type, c->dir);
    fprintf(f, "sizes      L %d layers, H %d query heads, G %d KV heads, D %d head_dim, C %d width, "
            "F %d MLP, V %d vocabulary\n", c->L, c->H, c->G, c->D, c->C, c->F, c->V);
    fprintf(f, "rope       %s, theta %g, factor %g, trained for %d positions, max_position_embeddings %d\n",
            ropes[c->rope_type], c->theta, c->factor, c->orig_pos, c->max_pos);
    fprintf(f, "norm       eps %g, QK-norm %s\n", c->eps, c->qk_norm ? "yes" : "no");
    if (c->window)
        fprintf(f, "window     %d positions in %d of %d layers\n", c->window, windowed, c->L);
    fprintf(f, "tokens     bos %d, eos", c->bos);
    for (int i = 0; i < c->n_eos; i++) fprintf(f, " %d", c->eos[i]);
    fprintf(f, "%s\n", c->n_eos ? "" : " none");
    fprintf(f, "output     %s\n", c->tied ? "tied to the embedding" : "own matrix");
}

// What --inspect prints: the config, the tensors, their bytes, and what one token costs in the
// cache.
static void inspect(const Config *c, const Weights *w, FILE *f) {
    inspect_config(f, c);
    fprintf(f, "tensors\n");
    inspect_tensor(f, "model.embed_tokens.weight", &w->embed, 0, 1);
    for (int i = 0; i < N_LAYER_TENSORS; i++) inspect_layers(f, c, w, i);
    inspect_tensor(f, "model.norm.weight", &w->norm, 0, 1);
    if (!c->tied) inspect_tensor(f, "lm_head.weight", &w->head, 0, 1);

    size_t token = (size_t)c->L * (size_t)c->G * (size_t)c->D * 2;
    fprintf(f, "weights    %zu bytes, mostly %s\n", w->bytes, dtype_names[c->dtype]);
    fprintf(f, "KV cache   %zu bytes a token in f32, %zu in f16 (uncompressed)\n", token * 4, token * 2);
}

// ---- SONIC's adapter
// A safetensors file with the Nexus branch of section 12: embeddings nexus.embed.*, matrices
// nexus.layers.N.*, and metadata that say which base model it was trained for. Everything that the
// base can contradict is checked. All functions that return int return 0, or -1 with s->err set.
typedef struct {
    Session *s;
    SafeFile *f;
    const SafeTensor *first;    // the tensor that was read first: all must have its dtype
} SonicFile;

// The metadata string must be `want`, or `or` where that is not NULL.
static int sonic_meta(SonicFile *a, const char *key, const char *want, const char *or) {
    const char *v = safetensors_meta(a->f, key);
    if (v && (!strcmp(v, want) || (or && !strcmp(v, or)))) return 0;
    return refuse(a->s, "sonic: %.200s: metadata %s is %.60s, expected %s%s%s", a->f->path, key,
                  v ? v : "missing", want, or ? " or " : "", or ? or : "");
}

// Reads a metadata number from 1 to 65536 into *value.
static int sonic_meta_int(SonicFile *a, const char *key, int *value) {
    const char *v = safetensors_meta(a->f, key);
    char *end = NULL;
    long n = v ? strtol(v, &end, 10) : 0;
    if (!v || !*v || *end || n < 1 || n > 65536)
        return refuse(a->s, "sonic: %.200s: metadata %s is %.60s, expected a number from 1 to 65536",
                      a->f->path, key, v ? v : "missing");
    *value = (int)n;
    return 0;
}

// The metadata number must be `want`, a size of the base model.
static int sonic_meta_same(SonicFile *a, const char *key, int want) {
    char text[16];
    snprintf(text, sizeof text, "%d", want);
    const char *v = safetensors_meta(a->f, key);
    if (v && !strcmp(v, text)) return 0;
    return refuse(a->s, "sonic: %.200s: metadata %s is %.60s, base has %d (adapter made for another "
                  "model?)", a->f->path, key, v ? v : "missing", want);
}

// Reads the tensor nexus.layers.<l>.<what>, or nexus.embed.<what> when l is -1. Its shape must be
// (rows,cols) or, with rows 0, (cols).
static int sonic_tensor(SonicFile *a, Tensor *t, int l, const char *what, int rows, int cols) {
    char name[128];
    if (l < 0) snprintf(name, sizeof name, "nexus.embed.%s", what);
    else snprintf(name, sizeof name, "nexus.layers.%d.%s", l, what);

    const SafeTensor *x = safetensors_find(a->f, name);
    if (!x) return refuse(a->s, "sonic: %.200s: %s is missing", a->f->path, name);
    if (!safe_has_shape(x, rows, cols)) {
        char found[200], want[64];
        safe_shape_texts(x, rows, cols, found, want);
        return refuse(a->s, "sonic: %s is [%s], base needs [%s] (adapter made for another model?)", name,
                      found, want);
    }
    if (x->dtype < 0)
        return refuse(a->s, "sonic: %s is %s, expected F32, F16 or BF16", name, x->type);
    if (!a->first) a->first = x;
    if (x->dtype != a->first->dtype)
        return refuse(a->s, "sonic: %s is %s, but %s is %s: all tensors must have one type", name, x->type,
                      a->first->name, a->first->type);
    *t = (Tensor){ x->data, x->dtype, max_int(rows, 1), cols };
    return 0;
}

// Replaces the matrices in y, a copy of the base's layer l: q, k, v, o with the biases that the
// base has, and the MLP if the adapter has its own (mlp 1). The norms stay the base's.
static int sonic_layer(SonicFile *a, Layer *y, int l, int mlp) {
    const Config *c = a->s->c;
    int C = c->C, F = c->F, HD = c->H * c->D, GD = c->G * c->D;
    if (sonic_tensor(a, &y->wq, l, "self_attn.q_proj.weight", HD, C)) return -1;
    if (sonic_tensor(a, &y->wk, l, "self_attn.k_proj.weight", GD, C)) return -1;
    if (sonic_tensor(a, &y->wv, l, "self_attn.v_proj.weight", GD, C)) return -1;
    if (sonic_tensor(a, &y->wo, l, "self_attn.o_proj.weight", C, HD)) return -1;
    if (y->bq.data && sonic_tensor(a, &y->bq, l, "self_attn.q_proj.bias", 0, HD)) return -1;
    if (y->bk.data && sonic_tensor(a, &y->bk, l, "self_attn.k_proj.bias", 0, GD)) return -1;
    if (y->bv.data && sonic_tensor(a, &y->bv, l, "self_attn.v_proj.bias", 0, GD)) return -1;
    if (!mlp) return 0;
    if (sonic_tensor(a, &y->gate, l, "mlp.gate_proj.weight", F, C)) return -1;
    if (sonic_tensor(a, &y->up, l, "mlp.up_proj.weight", F, C)) return -1;
    return sonic_tensor(a, &y->down, l, "mlp.down_proj.weight", C, F);
}

// Continues the FNV-1a 64 hash h over the bytes of a tensor.
static uint64_t fnv1a(uint64_t h, const Tensor *t) {
    const unsigned char *p = t->data;
    size_t n = tensor_bytes(t);
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3ull;
    return h;
}

// The hash by which an adapter knows its base: FNV-1a 64 over the embedding and then layer 0's
// q_proj, as stored.
static uint64_t sonic_fingerprint(const Weights *w) {
    return fnv1a(fnv1a(0xcbf29ce484222325ull, &w->embed), &w->layer[0].wq);
}

// Was the adapter trained for this base? Its kind, its sizes and the fingerprint must agree;
// --sonic-force takes any fingerprint.
static int sonic_check_base(SonicFile *a) {
    const Config *c = a->s->c;
    const struct { const char *key, *want, *or; } words[] = {
        { "format", "sonic-nexus", NULL },
        { "version", "1", NULL },
        { "model_type", c->model_type, NULL },
        { "body", "full_message", NULL },
        { "attention_bias", a->s->w->layer[0].bq.data ? "true" : "false", NULL },
        { "position_mode", "augmented", "original" },
        { "mlp", "dedicated", "shared" },
    };
    const struct { const char *key; int want; } sizes[] = {
        { "hidden_size", c->C },
        { "num_hidden_layers", c->L },
        { "num_attention_heads", c->H },
        { "num_key_value_heads", c->G },
        { "head_dim", c->D },
        { "intermediate_size", c->F },
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (sonic_meta(a, words[i].key, words[i].want, words[i].or)) return -1;
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sonic_meta_same(a, sizes[i].key, sizes[i].want)) return -1;
    }

    // The fingerprint is written in hexadecimal, with or without 0x.
    char own[20];
    const char *made = safetensors_meta(a->f, "base_fingerprint");
    snprintf(own, sizeof own, "%016llx", (unsigned long long)sonic_fingerprint(a->s->w));
    if (made && !strncmp(made, "0x", 2)) made += 2;
    if (opt_int(a->s->opt, "sonic-force") || (made && !strcasecmp(made, own))) return 0;
    return refuse(a->s, "sonic: %.200s: metadata base_fingerprint is %.40s, base has %s (trained on other "
                  "weights? --sonic-force tries it)", a->f->path, made ? made : "missing", own);
}

// Reads the adapter file into x. x->alt holds a copy of the base's layers already. x->embed becomes
// one block of f32: e_base (C), e_pos (K_max,C), e_turn (T_max,C).
static int sonic_load(Session *s, Sonic *x, const char *path) {
    const int C = s->c->C;
    char why[512];
    Tensor base, pos, turn;
    x->file = safetensors_open(path, why);
    if (!x->file) return refuse(s, "sonic: %.200s: %.250s", path, why);

    SonicFile a = { .s = s, .f = x->file };
    if (sonic_check_base(&a)) return -1;

    // Sizes and embeddings
    if (sonic_meta_int(&a, "k_max", &x->K_max)) return -1;
    if (sonic_meta_int(&a, "k_default", &x->K)) return -1;
    if (sonic_meta_int(&a, "t_max", &x->T_max)) return -1;
    if (sonic_tensor(&a, &base, -1, "base", 0, C)) return -1;
    if (sonic_tensor(&a, &pos, -1, "pos", x->K_max, C)) return -1;
    if (sonic_tensor(&a, &turn, -1, "turn", x->T_max, C)) return -1;

    // The layers. A tensor that nothing has asked for by then is one that is not understood.
    int mlp = !strcmp(safetensors_meta(a.f, "mlp"), "dedicated");
    for (int l = 0; l < s->c->L; l++) {
        if (sonic_layer(&a, &x->alt[l], l, mlp)) return -1;
    }
    for (int i = 0; i < a.f->n; i++) {
        const SafeTensor *t = &a.f->tensor[i];
        if (!t->used) return refuse(s, "sonic: %.200s: unexpected tensor %.200s", path, t->name);
    }

    x->original = !strcmp(safetensors_meta(a.f, "position_mode"), "original");
    x->embed = xmalloc((size_t)(1 + x->K_max + x->T_max) * C * sizeof(float));
    to_f32(x->embed, base.data, base.dtype, C);
    to_f32(x->embed + C, pos.data, pos.dtype, (size_t)x->K_max * C);
    to_f32(x->embed + (size_t)(1 + x->K_max) * C, turn.data, turn.dtype, (size_t)x->T_max * C);
    return 0;
}

// Bytes of the adapter's tensors; 0 without an adapter file.
static size_t sonic_file_bytes(const Sonic *x) {
    size_t n = 0;
    for (int i = 0; x->file && i < x->file->n; i++) n += x->file->tensor[i].bytes;
    return n;
}

// ==================================================================================================== 21 TOKENIZER
// A tokenizer turns text into ids and ids into text. It is read from a folder's tokenizer.json
// (byte-level BPE, or SentencePiece-style BPE with byte fallback) or from a bare SentencePiece
// tokenizer.model of type BPE. A text takes this road:
//
//     text -> added tokens of the raw text are cut out          cut_added, encode_segment
//          -> the normalizer rewrites what lies between them    normalize
//          -> added tokens of the normalized text are cut out   cut_added, encode_piece
//          -> the pre-tokenizer cuts the rest into words        split_piece, match
//          -> BPE merges the characters of each word into ids   word_bpe
//
// What a file asks for and this section does not do exactly is refused by name, because wrong ids
// make a model that quietly talks nonsense. No step is quadratic in the length of a text: BPE keeps
// its candidate merges in a heap, so a megabyte without a blank is fine.
//
// Broken UTF-8 is legal input. A byte that starts no well-formed character counts as one character
// that is neither letter, digit, mark nor space, as U+FFFD would. Every byte-level model and every
// model with byte fallback gives it back as the byte it was.

// ---- Maps from 64-bit keys to non-negative values
typedef struct {
    uint64_t key;               // UINT64_MAX: the slot is empty. No caller uses that key
    int64_t val;
} MapSlot;
typedef struct {
    MapSlot *slot;              // (cap) a key stands at its hash, or in a slot behind it
    size_t cap;                 // a power of two, or 0
    size_t n;                   // slots in use, at most half of cap
} Map;

// The index of the slot that holds key, or of the empty slot where it would stand. cap is not 0.
static size_t map_slot(const Map *m, uint64_t key) {
    size_t i = mix64(key) & (m->cap - 1);
    while (m->slot[i].key != UINT64_MAX && m->slot[i].key != key) i = (i + 1) & (m->cap - 1);
    return i;
}

// The value of key, or -1 when the key is absent.
static int64_t map_get(const Map *m, uint64_t key) {
    if (!m->cap) return -1;
    const MapSlot *slot = &m->slot[map_slot(m, key)];
    return slot->key == UINT64_MAX ? -1 : slot->val;
}

static void map_put(Map *m, uint64_t key, int64_t val);

// Doubles the slots and puts every key in anew.
static void map_grow(Map *m) {
    Map old = *m;
    m->cap = old.cap ? 2 * old.cap : 64;
    m->n = 0;
    m->slot = xmalloc(m->cap * sizeof(MapSlot));
    for (size_t i = 0; i < m->cap; i++) m->slot[i].key = UINT64_MAX;
    for (size_t i = 0; i < old.cap; i++) {
        if (old.slot[i].key != UINT64_MAX) map_put(m, old.slot[i].key, old.slot[i].val);
    }
    free(old.slot);
}

// Gives key the value val, in place of a value it has already.
static void map_put(Map *m, uint64_t key, int64_t val) {
    if (2 * (m->n + 1) > m->cap) map_grow(m);
    size_t i = map_slot(m, key);
    if (m->slot[i].key == UINT64_MAX) m->n++;
    m->slot[i] = (MapSlot){ key, val };
}

// ---- What a tokenizer is made of
enum {                          // Piece.flags
    PIECE_USED = 1,             // the id exists
    PIECE_MODEL = 2,            // the piece is in the BPE vocabulary
    PIECE_ADDED = 4,            // it is in added_tokens
    PIECE_SPECIAL = 8,          // it is a special token: decoding may skip it
    PIECE_NORMALIZED = 16       // it is an added token that stands for its normalized text
};
typedef struct {                // one token of the vocabulary
    size_t text;                // the text as the file writes it: offset into Tokenizer.chars
    size_t bytes;               // the decoded form: offset into Tokenizer.chars
    int n_text, n_bytes;        // their lengths in bytes
    int flags;                  // PIECE_*
} Piece;

typedef struct {                // a token that is cut out of a text before BPE sees it
    int id;
    int guarded;                // 1: only a text encoded with parse_special may name it
    int lstrip, rstrip;         // 1: it swallows the white space before it, behind it
} AddedToken;

enum {                          // steps of a normalizer
    NORM_NFC,                   // Unicode normalization form C
    NORM_PREPEND,               // puts `to` before every segment
    NORM_PREPEND_START,         // puts `to` before the segment with which everything begins
    NORM_REPLACE                // replaces every `from` by `to`
};
typedef struct {
    int kind;                   // NORM_*
    char from[8], to[8];
} NormStep;

enum {                          // how a pre-tokenizer splits a text
    SPLIT_LLAMA3,               // the regular expression of Llama 3: numbers in groups of 3 digits
    SPLIT_QWEN2,                // Qwen 2: the same with single digits
    SPLIT_GPT2,                 // GPT-2, and ByteLevel with use_regex
    SPLIT_TEKKEN,               // Mistral's Tekken: also splits where a capital begins a word
    SPLIT_DIGITS,               // Digits, individual_digits true: every digit is a word
    SPLIT_NUMBERS,              // Digits, individual_digits false: every run of digits is a word
    SPLIT_METASPACE             // Metaspace: a word begins at every U+2581
};
enum {                          // does the pre-tokenizer Metaspace put a U+2581 before a text?
    META_NONE,                  // there is no Metaspace
    META_NEVER,                 // no
    META_FIRST,                 // only where everything begins
    META_ALWAYS                 // before every text between added tokens
};
enum { MAX_STEPS = 4 };         // steps of a normalizer at most, and splits of a pre-tokenizer

struct Tokenizer {
    // The vocabulary
    Piece *piece;               // (tokenizer_size) by id; flags 0: a hole in the numbering
    char *chars;                // every text and every decoded form
    int *by_text;               // (n_by_text) hash table from texts to ids; -1: an empty slot
    size_t n_by_text;           // a power of two
    Map merges;                 // left << 32 | right -> rank << 32 | result

    // Added tokens: matched on the raw text [0], or on the normalized text [1]. In a trie node 0 is
    // the root, node << 9 | byte leads to a node, and node << 9 | 256 to an index into `added`.
    AddedToken *added;
    Map trie[2];
    int nodes[2];               // number of the newest node
    unsigned char starts[2][256];   // 1: some added token begins with the byte

    // Encoding
    NormStep *norm;             // at most MAX_STEPS from a file
    int *split;                 // SPLIT_* in their order
    int meta;                   // META_*
    int byte_level;             // 1: words are written in the byte alphabet before BPE
    int ignore_merges;          // 1: a word that is in the vocabulary is not merged, but one id
    int byte_fallback;          // 1: a character that is not in the vocabulary becomes its bytes
    int byte_id[256];           // id of the piece <0xNN>, or -1
    int unk;                    // id for characters that are not in the vocabulary; -1: they vanish
    int fuse_unk;               // 1: neighbouring unknown characters make one unk

    // Decoding
    int dec_byte_level;         // 1: pieces are written in the byte alphabet
    int dec_space;              // 1: U+2581 is a blank
    int dec_bytes;              // 1: <0xNN> is a byte
    int dec_strip;              // 1: the text's first blank goes

    // Tokens with a role
    int bos, eos;               // -1: none
    int add_bos;                // 1: the model was trained with BOS before every text
};

// The slot of by_text that holds the text s of n bytes, or the empty slot where it would stand.
static size_t text_slot(const Tokenizer *t, const char *s, size_t n) {
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3ull;
    size_t i = mix64(h) & (t->n_by_text - 1);
    for (; t->by_text[i] >= 0; i = (i + 1) & (t->n_by_text - 1)) {
        const Piece *p = &t->piece[t->by_text[i]];
        if ((size_t)p->n_text == n && !memcmp(t->chars + p->text, s, n)) break;
    }
    return i;
}

// The id of the token whose text is s, or -1.
static int text_id(const Tokenizer *t, const char *s, size_t n) {
    return t->by_text[text_slot(t, s, n)];
}

// The id of the text s in the BPE vocabulary, or -1. Added tokens outside of it do not count.
static int model_id(const Tokenizer *t, const char *s, size_t n) {
    int id = text_id(t, s, n);
    return id >= 0 && t->piece[id].flags & PIECE_MODEL ? id : -1;
}

// The number of ids, holes in the numbering included.
static int tokenizer_size(const Tokenizer *t) { return (int)arrlen(t->piece); }

// Is id a special token? An id outside the tokenizer is none.
static int tokenizer_is_special(const Tokenizer *t, int id) {
    return id >= 0 && id < tokenizer_size(t) && (t->piece[id].flags & PIECE_SPECIAL) != 0;
}

// The bytes that id adds to a text, and their number in *len. An id outside the tokenizer adds
// none.
static const char *tokenizer_bytes(const Tokenizer *t, int id, int *len) {
    *len = 0;
    if (id < 0 || id >= tokenizer_size(t)) return "";
    *len = t->piece[id].n_bytes;
    return *len ? t->chars + t->piece[id].bytes : "";
}

// LycheeCluster's chunker (section 11) cuts chunks at sentence ends and blanks, so it needs the
// text of a token. It knows no Tokenizer: it calls two functions with a pointer it does not look
// into.
static const char *chunker_bytes(const void *t, int id, int *len) {
    return tokenizer_bytes(t, id, len);
}
static int chunker_special(const void *t, int id) { return tokenizer_is_special(t, id); }

// Lets the chunker read its texts from t. With t NULL every token is empty text.
static void lychee_text(const Tokenizer *t) {
    token_text = (TokenText){ t, chunker_bytes, chunker_special };
}

// ---- Characters and their classes
// A character's code is its code point, or BROKEN + byte for a byte that starts no well-formed
// character.
enum { BROKEN = 0x110000 };
enum {                          // classes of code points; Unicode's general categories in brackets
    U_UPPER = 1,                // capitals [Lu Lt]
    U_LOWER = 2,                // small letters [Ll]
    U_OTHER_LETTER = 4,         // letters without case [Lm Lo]
    U_MARK = 8,                 // marks [M]
    U_NUMBER = 16,              // digits and other numbers [N]
    U_SPACE = 32,               // white space
    U_REST = 64,                // everything else
    U_INSIDE = 128,             // set beside the class: a byte of a character that is not its first
    U_LETTER = U_UPPER | U_LOWER | U_OTHER_LETTER,      // \p{L}
    U_SIGN = U_MARK | U_REST,                           // [^\s\p{L}\p{N}]
    U_NO_NUMBER = 127 & ~U_NUMBER                       // \P{N}
};

#include "data/unicode.h"       // unicode_range, unicode_combining, unicode_decomposition

// The tables of data/unicode.h, unpacked by unicode_load.
static unsigned char *unicode_class;    // (BROKEN) U_* of a code point
static unsigned char *unicode_ccc;      // (BROKEN) its canonical combining class
static Map nfc_parts;                   // code point -> index into unicode_decomposition
static Map nfc_pairs;                   // first part << 32 | second part -> the composed code point

// Gives the code points [from, to) the class that `code` stands for in unicode_range. Codes 7 and 8
// stand for alternating capitals and small letters.
static void unicode_fill(uint32_t from, uint32_t to, uint32_t code) {
    static const unsigned char name[] = {
        U_REST, U_UPPER, U_LOWER, U_OTHER_LETTER, U_MARK, U_NUMBER, U_SPACE
    };
    for (uint32_t c = from; c < to; c++) {
        if (code < 7) unicode_class[c] = name[code];
        else unicode_class[c] = (c & 1) == (code & 1) ? U_LOWER : U_UPPER;
    }
}

// Fills the two maps of NFC from unicode_decomposition.
static void unicode_load_nfc(void) {
    const uint32_t *d = unicode_decomposition;
    size_t n = sizeof unicode_decomposition / sizeof *d, i = 0;
    while (i < n) {
        uint32_t c = d[i] >> 8, end = c + (d[i] & 255);
        i++;
        for (; c < end; c++, i += 2) {
            int composes = d[i + 1] && !(d[i] >> 31);
            map_put(&nfc_parts, c, (int64_t)i);
            if (composes) map_put(&nfc_pairs, (uint64_t)d[i] << 32 | d[i + 1], c);
        }
    }
}

// Unpacks the tables at the first call.
static void unicode_load(void) {
    if (unicode_class) return;
    unicode_class = xmalloc(BROKEN);
    unicode_ccc = xcalloc(BROKEN, 1);

    const uint32_t *r = unicode_range;
    size_t n = sizeof unicode_range / sizeof *r;
    for (size_t i = 0; i < n; i++) {
        uint32_t end = i + 1 < n ? r[i + 1] >> 4 : BROKEN;
        unicode_fill(r[i] >> 4, end, r[i] & 15);
    }

    const uint32_t *k = unicode_combining;
    n = sizeof unicode_combining / sizeof *k;
    for (size_t i = 0; i + 1 < n; i++) {
        memset(unicode_ccc + (k[i] >> 8), (int)(k[i] & 255), (k[i + 1] >> 8) - (k[i] >> 8));
    }
    unicode_load_nfc();
}

// The code of the character that the n >= 1 bytes at s begin with, and its length in *len.
static uint32_t char_code(const char *s, size_t n, int *len) {
    const unsigned char *p = (const unsigned char *)s;
    *len = utf8_length(s, n);
    if (*len == 0) {
        *len = 1;
        return BROKEN + p[0];
    }
    if (*len == 1) return p[0];

    // The first of k bytes holds 7 - k bits of the code, each other byte 6.
    uint32_t code = p[0] & (0x7fu >> *len);
    for (int i = 1; i < *len; i++) code = code << 6 | (p[i] & 63);
    return code;
}

// Appends n bytes to the stb array *out.
static void bytes_put(char **out, const char *s, size_t n) {
    if (n) memcpy(arraddnptr(*out, n), s, n);
}

// Appends the character of code c to the stb array *out.
static void char_put(char **out, uint32_t c) {
    if (c < 0x80 || c >= BROKEN) {      // one byte: BROKEN is a multiple of 256, so its low bits are the byte
        arrput(*out, (char)(c & 255));
        return;
    }
    char utf8[4];
    const char *end = utf8_put(utf8, c);
    bytes_put(out, utf8, (size_t)(end - utf8));
}

// Do the n >= 1 bytes at s begin with white space? *len is the length of their first character.
static int is_space(const char *s, size_t n, int *len) {
    uint32_t c = char_code(s, n, len);
    return c < BROKEN && unicode_class[c] == U_SPACE;
}

// The length of the white-space character that ends at s[end] and begins at s[from] or behind it; 0
// when no such character stands there.
static size_t space_before(const char *s, size_t from, size_t end) {
    if (end == from) return 0;
    size_t i = end - 1;
    while (i > from && end - i < 4 && (s[i] & 0xc0) == 0x80) i--;
    int len, space = is_space(s + i, end - i, &len);
    return space && i + (size_t)len == end ? end - i : 0;
}

// ---- Two alphabets: byte-level and SentencePiece
// SentencePiece writes a blank as U+2581, and a byte that belongs to no known character as the
// piece <0xNN>.
#define BLANK_MARK "\xe2\x96\x81"

// GPT-2's byte alphabet writes every byte as a printable character: 188 printable bytes of Latin-1
// stand for themselves, the 68 others become U+0100, U+0101 and so on, in their order.
static int byte_printable(int b) {
    return (b > 32 && b < 127) || (b > 160 && b != 173 && b < 256);
}

// The character of byte b in the byte alphabet.
static uint32_t byte_char(int b) {
    static uint32_t map[256];   // built at the first call; byte 0 is U+0100, so map[0] tells
    if (!map[0]) {
        uint32_t extra = 256;
        for (uint32_t i = 0; i < 256; i++) map[i] = byte_printable((int)i) ? i : extra++;
    }
    return map[b];
}

// The byte that character c of the byte alphabet stands for, or -1 when c is not of the alphabet.
static int char_byte(uint32_t c) {
    if (c < 256) return byte_printable((int)c) ? (int)c : -1;
    int nth = (int)c - 256;                     // of the bytes that are not printable:
    if (c < 256 + 33) return nth;               // 0 to 32,
    if (c < 256 + 67) return nth - 33 + 127;    // 127 to 160,
    return c == 256 + 67 ? 173 : -1;            // and 173
}

// ---- Normalisation
// NFC (Unicode annex 15) decomposes every character, puts marks into canonical order and composes
// again. Hangul syllables are decomposed and composed by arithmetic.
enum {
    HANGUL_S = 0xac00,          // the first syllable
    HANGUL_L = 0x1100,          // the first leading consonant
    HANGUL_V = 0x1161,          // the first vowel
    HANGUL_T = 0x11a7,          // the code before the first trailing consonant
    N_HANGUL_L = 19,
    N_HANGUL_V = 21,
    N_HANGUL_T = 28,            // "no trailing consonant" included
    N_HANGUL_S = N_HANGUL_L * N_HANGUL_V * N_HANGUL_T
};

// The canonical combining class of a character: 0 for a starter, more for a mark.
static int code_ccc(uint32_t c) { return c < BROKEN ? unicode_ccc[c] : 0; }

// Appends the full decomposition of c to the stb array *out.
static void nfc_decompose(uint32_t **out, uint32_t c) {
    uint32_t s = c - HANGUL_S;
    if (s < N_HANGUL_S) {
        arrput(*out, HANGUL_L + s / (N_HANGUL_V * N_HANGUL_T));
        arrput(*out, HANGUL_V + s / N_HANGUL_T % N_HANGUL_V);
        if (s % N_HANGUL_T) arrput(*out, HANGUL_T + s % N_HANGUL_T);
        return;
    }
    int64_t at = c < 0xc0 ? -1 : map_get(&nfc_parts, c);    // U+00C0 is the first that decomposes
    if (at < 0) {
        arrput(*out, c);
        return;
    }
    const uint32_t *part = &unicode_decomposition[at];
    nfc_decompose(out, part[0] & 0x7fffffff);
    if (part[1]) nfc_decompose(out, part[1]);
}

// The character that a and b compose, or -1 when they do not.
static int64_t nfc_compose(uint32_t a, uint32_t b) {
    uint32_t l = a - HANGUL_L, s = a - HANGUL_S, v = b - HANGUL_V, t = b - HANGUL_T;
    if (l < N_HANGUL_L && v < N_HANGUL_V) return HANGUL_S + (l * N_HANGUL_V + v) * N_HANGUL_T;
    if (s < N_HANGUL_S && s % N_HANGUL_T == 0 && t - 1 < N_HANGUL_T - 1) return a + t;
    return map_get(&nfc_pairs, (uint64_t)a << 32 | b);
}

// Sorts n marks by their combining class: a counting sort, which is stable and linear.
static void nfc_sort(uint32_t *code, size_t n) {
    size_t start[257] = { 0 };
    uint32_t *old = xmalloc(n * sizeof *old);
    memcpy(old, code, n * sizeof *old);
    for (size_t i = 0; i < n; i++) start[code_ccc(old[i]) + 1]++;
    for (int k = 0; k < 256; k++) start[k + 1] += start[k];
    for (size_t i = 0; i < n; i++) code[start[code_ccc(old[i])]++] = old[i];
    free(old);
}

// Puts every run of marks among the n codes into canonical order.
static void nfc_order(uint32_t *code, size_t n) {
    size_t from = 0, to;
    for (; from < n; from = to) {
        int sorted = 1;
        for (to = from + 1; to < n && code_ccc(code[from]) && code_ccc(code[to]); to++) {
            sorted &= code_ccc(code[to - 1]) <= code_ccc(code[to]);
        }
        if (!sorted) nfc_sort(code + from, to - from);
    }
}

// Composes n codes in place and returns how many are left. A code joins the last starter unless a
// code kept between them blocks it, which is one of the same or a higher class.
static size_t nfc_compose_all(uint32_t *code, size_t n) {
    size_t kept = 0;
    int64_t starter = -1;       // index of the last starter kept; -1: none yet
    int last = -1;              // class of the last code kept behind the starter; -1: none was
    for (size_t i = 0; i < n; i++) {
        int ccc = code_ccc(code[i]);
        if (starter >= 0 && last < ccc) {
            int64_t both = nfc_compose(code[starter], code[i]);
            if (both >= 0) {
                code[starter] = (uint32_t)both;
                continue;
            }
        }
        if (ccc) {
            last = ccc;
        } else {
            starter = (int64_t)kept;
            last = -1;
        }
        code[kept++] = code[i];
    }
    return kept;
}

// Rewrites the stb array *text in NFC.
static void nfc(char **text) {
    size_t n = arrlenu(*text), i = 0;
    while (i < n && (unsigned char)(*text)[i] < 0xcc) i++;
    if (i == n) return;         // every code point is below U+0300: there is nothing to do

    uint32_t *code = NULL;
    int len;
    for (i = 0; i < n; i += (size_t)len) nfc_decompose(&code, char_code(*text + i, n - i, &len));
    nfc_order(code, arrlenu(code));
    n = nfc_compose_all(code, arrlenu(code));

    arrsetlen(*text, 0);
    for (i = 0; i < n; i++) char_put(text, code[i]);
    arrfree(code);
}

// Replaces every `from` in the stb array *text by `to`. The result is built in *spare, and the two
// arrays change places.
static void replace_all(char **text, char **spare, const char *from, const char *to) {
    size_t n = arrlenu(*text), n_from = strlen(from), n_to = strlen(to), i = 0;
    arrsetlen(*spare, 0);
    while (i < n) {
        if (n - i >= n_from && !memcmp(*text + i, from, n_from)) {
            bytes_put(spare, to, n_to);
            i += n_from;
        } else {
            arrput(*spare, (*text)[i]);
            i++;
        }
    }
    char *built = *spare;
    *spare = *text;
    *text = built;
}

// Puts s before the stb array *text.
static void prepend(char **text, const char *s) {
    size_t n = arrlenu(*text), k = strlen(s);
    arrsetlen(*text, n + k);
    memmove(*text + k, *text, n);
    memcpy(*text, s, k);
}

// Runs the normalizer over *text, an stb array that is not empty. at_start: everything begins here.
static void normalize(const Tokenizer *t, char **text, char **spare, int at_start) {
    for (int i = 0; i < (int)arrlen(t->norm); i++) {
        const NormStep *step = &t->norm[i];
        switch (step->kind) {
        case NORM_NFC:
            nfc(text);
            break;
        case NORM_PREPEND:
            prepend(text, step->to);
            break;
        case NORM_PREPEND_START:
            if (at_start) prepend(text, step->to);
            break;
        case NORM_REPLACE:
            replace_all(text, spare, step->from, step->to);
            break;
        }
    }
}

// ---- Pre-tokenizers
// Each known pattern has a matcher written by hand; the exact text of the pattern in the file
// chooses it (split_patterns, below). Every byte of a text carries the class of its character, and
// all bytes of a character but the first carry U_INSIDE too, so a run of a class is a plain loop
// over bytes. A matcher gets a position i < n and returns the end of the match, always behind i.
typedef struct {
    const char *s;
    const unsigned char *cls;   // U_* of every byte
    size_t n;                   // where the text ends, for the matcher
} Text;

// Fills the stb array *cls with the class of every byte of s.
static void classify(const char *s, size_t n, unsigned char **cls) {
    arrsetlen(*cls, n);
    for (size_t i = 0; i < n; ) {
        int len;
        uint32_t c = char_code(s + i, n - i, &len);
        unsigned char u = c < BROKEN ? unicode_class[c] : U_REST;
        (*cls)[i++] = u;
        while (--len) (*cls)[i++] = u | U_INSIDE;
    }
}

// The end of the run of characters from i on whose class is in `set`.
static size_t run_end(const Text *t, size_t i, int set) {
    while (i < t->n && t->cls[i] & set) i++;
    return i;
}

// Where the character behind the one at i begins.
static size_t next_char(const Text *t, size_t i) {
    i++;
    while (i < t->n && t->cls[i] & U_INSIDE) i++;
    return i;
}

static int is_newline(char c) { return c == '\n' || c == '\r'; }

// [\r\n]*, or with `slash` [\r\n/]*
static size_t match_newlines(const Text *t, size_t i, int slash) {
    while (i < t->n && (is_newline(t->s[i]) || (slash && t->s[i] == '/'))) i++;
    return i;
}

// \s+(?!\S)|\s+ takes all blanks but the last one before a word, and a single blank too.
static size_t match_blanks(const Text *t, size_t i) {
    size_t end = run_end(t, i, U_SPACE);
    if (end == t->n) return end;
    size_t last = end - 1;
    while (t->cls[last] & U_INSIDE) last--;
    return last > i ? last : end;
}

// Byte c; with any_case an ASCII capital becomes its small letter.
static int fold_case(char c, int any_case) {
    return any_case && isupper((unsigned char)c) ? c | 32 : c;
}

// 's|'t|'re|'ve|'m|'ll|'d, with any_case in capitals too. 0: there is no contraction at i.
static size_t match_contraction(const Text *t, size_t i, int any_case) {
    if (t->s[i] != '\'' || i + 1 >= t->n) return 0;
    int a = fold_case(t->s[i + 1], any_case);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
    if (i + 2 >= t->n) return 0;
    int b = fold_case(t->s[i + 2], any_case);
    if ((a == 'r' || a == 'v') && b == 'e') return i + 3;
    if (a == 'l' && b == 'l') return i + 3;

    // U+017F, the long s, is an s to a pattern that ignores case.
    return any_case && !memcmp(t->s + i + 1, "\xc5\xbf", 2) ? i + 3 : 0;
}

// [^\r\n\p{L}\p{N}]? takes one character or none.
static size_t match_lead(const Text *t, size_t i) {
    if (t->cls[i] & (U_LETTER | U_NUMBER) || is_newline(t->s[i])) return i;
    return next_char(t, i);
}

//  ?[^\s\p{L}\p{N}]+[\r\n]*, or with `slash` [\r\n/]* at its end. 0: no match at i.
static size_t match_signs(const Text *t, size_t i, int slash) {
    size_t start = i + (t->s[i] == ' '), end = run_end(t, start, U_SIGN);
    return end > start ? match_newlines(t, end, slash) : 0;
}

// \s*[\r\n]+ reaches to the last newline of the blanks. 0: no match at i.
static size_t match_lines(const Text *t, size_t i) {
    size_t end = run_end(t, i, U_SPACE);
    while (end > i && !is_newline(t->s[end - 1])) end--;
    return end > i ? end : 0;
}

// What the patterns of Llama 3, Qwen 2 and Tekken end with: signs, else lines, else blanks.
static size_t match_rest(const Text *t, size_t i, int slash) {
    size_t end = match_signs(t, i, slash);
    if (!end) end = match_lines(t, i);
    return end ? end : match_blanks(t, i);
}

// GPT-2: a contraction; letters, digits or signs after at most one blank; or blanks.
static size_t match_gpt2(const Text *t, size_t i) {
    static const int set[] = { U_LETTER, U_NUMBER, U_SIGN };
    size_t end = match_contraction(t, i, 0);
    if (end) return end;
    size_t start = i + (t->s[i] == ' ');
    for (int k = 0; k < 3; k++) {
        end = run_end(t, start, set[k]);
        if (end > start) return end;
    }
    return match_blanks(t, i);
}

// Llama 3 and Qwen 2. digits: the most digits of a number in one word, 3 for Llama 3, 1 for Qwen 2.
static size_t match_llama3(const Text *t, size_t i, int digits) {
    size_t end = match_contraction(t, i, 1);
    if (end) return end;

    // [^\r\n\p{L}\p{N}]?\p{L}+
    size_t start = match_lead(t, i);
    end = run_end(t, start, U_LETTER);
    if (end > start) return end;

    // \p{N}{1,digits}
    end = i;
    for (int k = 0; k < digits && end < t->n && t->cls[end] & U_NUMBER; k++) {
        end = next_char(t, end);
    }
    return end > i ? end : match_rest(t, i, 0);
}

// [upper]*[lower]+ at i, or with `capital` [upper]+[lower]*. 0: no match. Letters without case and
// marks are in both sets, so in the first form [upper]* may have to give characters back: then
// [lower]+ gets only the last such character of the run.
static size_t match_cased(const Text *t, size_t i, int capital) {
    enum { BOTH = U_OTHER_LETTER | U_MARK, UPPER = U_UPPER | BOTH, LOWER = U_LOWER | BOTH };
    size_t up = run_end(t, i, UPPER), end = run_end(t, up, LOWER);
    if (capital) return up > i ? end : 0;
    if (end > up) return end;
    for (; up > i; up--) {
        if (t->cls[up - 1] & BOTH) return up;
    }
    return 0;
}

// Tekken: a word in one of the two forms of match_cased, each first behind the optional lead
// character and then without it, because a mark may be the lead or the first character of the word.
static size_t match_tekken(const Text *t, size_t i) {
    size_t start = match_lead(t, i);
    for (int capital = 0; capital < 2; capital++) {
        size_t end = match_cased(t, start, capital);
        if (!end && start > i) end = match_cased(t, i, capital);
        if (end) return end;
    }
    if (t->cls[i] & U_NUMBER) return next_char(t, i);
    return match_rest(t, i, 1);
}

// Metaspace: up to the next U+2581 behind i.
static size_t match_metaspace(const Text *t, size_t i) {
    for (i++; i < t->n; i++) {
        if (t->n - i >= 3 && !memcmp(t->s + i, BLANK_MARK, 3)) break;
    }
    return i;
}

// Digits: a number, single digit by single digit or as a run, or everything up to the next number.
static size_t match_digits(const Text *t, size_t i, int single) {
    if (!(t->cls[i] & U_NUMBER)) return run_end(t, i, U_NO_NUMBER);
    return single ? next_char(t, i) : run_end(t, i, U_NUMBER);
}

// The end of the word that a split of kind SPLIT_* finds at i.
static size_t match(int kind, const Text *t, size_t i) {
    switch (kind) {
    case SPLIT_LLAMA3:    return match_llama3(t, i, 3);
    case SPLIT_QWEN2:     return match_llama3(t, i, 1);
    case SPLIT_GPT2:      return match_gpt2(t, i);
    case SPLIT_TEKKEN:    return match_tekken(t, i);
    case SPLIT_METASPACE: return match_metaspace(t, i);
    case SPLIT_DIGITS:    return match_digits(t, i, 1);
    default:              return match_digits(t, i, 0);
    }
}

// ---- BPE merges
// A word is a linked list of symbols, one a character at first. Every neighbouring pair that merges
// waits in a heap, lowest rank first, leftmost first among equals. An entry is stale, and is
// skipped when it comes up, when the pair of its left symbol has changed since. (SentencePiece
// models of type unigram have no merges and are refused.)
typedef struct {
    int id;
    int prev, next;             // indices of the neighbours; -1: none
    int rank;                   // of the pair (this, next); NO_RANK: the pair does not merge
    int into;                   // the id the pair merges into
} Symbol;
enum { NO_RANK = INT_MAX };

typedef struct {                // everything one call of encode_at works with; stb arrays
    const Tokenizer *t;
    int special;                // 1: the text may name special tokens
    int *ids;                   // what comes out
    char *text;                 // the segment after the normalizer
    char *spare;                // what replace_all writes into
    char *mapped;               // the segment after Metaspace, or, in a byte-level model, the word
    unsigned char *cls;         // classes of the segment's bytes
    Symbol *sym;                // the word's symbols
    uint64_t *heap;             // rank << 32 | index of the left symbol
} Encoder;

// Puts x into a binary heap whose smallest entry stands first.
static void heap_push(uint64_t **heap, uint64_t x) {
    arrput(*heap, x);
    uint64_t *h = *heap;
    size_t i = arrlenu(h) - 1;
    while (i && h[(i - 1) / 2] > x) {
        h[i] = h[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h[i] = x;
}

// Takes the smallest entry out of the heap.
static uint64_t heap_pop(uint64_t *h) {
    uint64_t top = h[0], x = arrpop(h);
    size_t n = arrlenu(h), i = 0;
    while (2 * i + 1 < n) {
        size_t child = 2 * i + 1;
        if (child + 1 < n && h[child + 1] < h[child]) child++;
        if (h[child] >= x) break;
        h[i] = h[child];
        i = child;
    }
    if (n) h[i] = x;
    return top;
}

// May BPE make this id? It must be in the BPE vocabulary, and it may be a special token only in a
// text that may name special tokens: the words of a user never become one.
static int bpe_may_make(const Encoder *e, int id) {
    if (id < 0) return 0;
    int flags = e->t->piece[id].flags;
    return flags & PIECE_MODEL && (e->special || !(flags & PIECE_SPECIAL));
}

// Looks up the pair that symbol i makes with its right neighbour, and puts it into the heap when it
// merges.
static void pair_offer(Encoder *e, int i) {
    Symbol *s = &e->sym[i];
    s->rank = NO_RANK;
    if (s->next < 0) return;
    int64_t merge = map_get(&e->t->merges, (uint64_t)s->id << 32 | (uint64_t)e->sym[s->next].id);
    if (merge < 0) return;
    int into = (int)(merge & INT_MAX);
    if (!bpe_may_make(e, into)) return;
    s->rank = (int)(merge >> 32);
    s->into = into;
    heap_push(&e->heap, (uint64_t)s->rank << 32 | (uint64_t)i);
}

// Appends a symbol to the word.
static void symbol_put(Encoder *e, int id) {
    int i = (int)arrlen(e->sym);
    Symbol s = { id, i - 1, i + 1, NO_RANK, -1 };
    arrput(e->sym, s);
}

// Byte fallback: appends a symbol <0xNN> for each of a character's n bytes. Returns 0, with nothing
// appended, when the model has no byte fallback or a byte has no piece.
static int symbols_of_bytes(Encoder *e, const char *s, int n) {
    const int *byte_id = e->t->byte_id;
    if (!e->t->byte_fallback) return 0;
    for (int i = 0; i < n; i++) {
        if (byte_id[(unsigned char)s[i]] < 0) return 0;
    }
    for (int i = 0; i < n; i++) symbol_put(e, byte_id[(unsigned char)s[i]]);
    return 1;
}

// Makes the symbols of a word: one a character. A character that is not in the vocabulary becomes
// its bytes, else unk, else nothing. Bytes do not end the wait of an unk, and so stand before it.
static void word_symbols(Encoder *e, const char *s, size_t n) {
    const Tokenizer *t = e->t;
    int waits = 0;              // 1: an unk waits for the characters it may swallow
    int len;
    arrsetlen(e->sym, 0);
    for (size_t i = 0; i < n; i += (size_t)len) {
        char_code(s + i, n - i, &len);
        int id = text_id(t, s + i, (size_t)len);
        if (bpe_may_make(e, id)) {
            if (waits) symbol_put(e, t->unk);
            waits = 0;
            symbol_put(e, id);
        } else if (!symbols_of_bytes(e, s + i, len) && t->unk >= 0) {
            if (waits && !t->fuse_unk) symbol_put(e, t->unk);
            waits = 1;
        }
    }
    if (waits) symbol_put(e, t->unk);
    if (arrlen(e->sym)) arrlast(e->sym).next = -1;
}

// Merges the symbols of the word, best pair first, until no pair merges.
static void word_merge(Encoder *e) {
    arrsetlen(e->heap, 0);
    for (int i = 0; i < (int)arrlen(e->sym); i++) pair_offer(e, i);
    while (arrlen(e->heap)) {
        uint64_t top = heap_pop(e->heap);
        int i = (int)(top & INT_MAX);
        Symbol *left = &e->sym[i];
        if (left->rank != (int)(top >> 32)) continue;       // stale

        // The left symbol becomes the merged one, the right one leaves the list.
        Symbol *right = &e->sym[left->next];
        left->id = left->into;
        left->next = right->next;
        right->rank = NO_RANK;
        if (left->next >= 0) e->sym[left->next].prev = i;
        pair_offer(e, i);
        if (left->prev >= 0) pair_offer(e, left->prev);
    }
}

// Appends the ids of one word.
static void word_bpe(Encoder *e, const char *s, size_t n) {
    if (e->t->byte_level) {
        arrsetlen(e->mapped, 0);
        for (size_t i = 0; i < n; i++) char_put(&e->mapped, byte_char((unsigned char)s[i]));
        s = e->mapped;
        n = arrlenu(e->mapped);
    }
    int whole = e->t->ignore_merges ? text_id(e->t, s, n) : -1;
    if (bpe_may_make(e, whole)) {
        arrput(e->ids, whole);
        return;
    }
    word_symbols(e, s, n);
    if (!arrlen(e->sym)) return;
    word_merge(e);
    for (int i = 0; i >= 0; i = e->sym[i].next) arrput(e->ids, e->sym[i].id);
}

// ---- Encoding
// Cuts the bytes [i, t.n) of t by the pre-tokenizer's splits from `step` on, each split inside the
// words of the one before it, and hands the words to BPE.
static void split_piece(Encoder *e, Text t, size_t i, size_t step) {
    if (step == arrlenu(e->t->split)) {
        word_bpe(e, t.s + i, t.n - i);
        return;
    }
    size_t end = t.n;
    while (i < end) {
        t.n = end;
        size_t word_end = match(e->t->split[step], &t, i);
        t.n = word_end;
        split_piece(e, t, i, step + 1);
        i = word_end;
    }
}

// Encodes a normalized text without added tokens.
static void encode_piece(Encoder *e, const char *s, size_t n, int at_start) {
    const Tokenizer *t = e->t;
    if (t->meta != META_NONE) {
        arrsetlen(e->mapped, 0);
        bytes_put(&e->mapped, s, n);
        replace_all(&e->mapped, &e->spare, " ", BLANK_MARK);
        int marked = arrlen(e->mapped) >= 3 && !memcmp(e->mapped, BLANK_MARK, 3);
        int wanted = t->meta == META_ALWAYS || (t->meta == META_FIRST && at_start);
        if (wanted && !marked) prepend(&e->mapped, BLANK_MARK);
        s = e->mapped;
        n = arrlenu(e->mapped);
    }
    if (arrlen(t->split)) classify(s, n, &e->cls);
    split_piece(e, (Text){ s, e->cls, n }, 0, 0);
}

// The longest added token that begins at s[i]: its index in `added` with its end in *end, or -1
// with *end untouched.
static int added_here(const Tokenizer *t, int which, const char *s, size_t n, size_t i,
                      size_t *end) {
    const Map *trie = &t->trie[which];
    int64_t node = 0, hit = -1;
    if (!t->starts[which][(unsigned char)s[i]]) return -1;
    for (; i < n; i++) {
        node = map_get(trie, (uint64_t)node << 9 | (unsigned char)s[i]);
        if (node < 0) break;
        int64_t leaf = map_get(trie, (uint64_t)node << 9 | 256);
        if (leaf < 0) continue;
        hit = leaf;
        *end = i + 1;
    }
    return (int)hit;
}

// The next added token of s[0,n) at or after `from`: the leftmost one, and the longest of those
// that begin there. Returns its index in `added`, or -1. [*start, *end) includes the white space it
// swallows (lstrip, rstrip).
static int added_next(const Encoder *e, int which, const char *s, size_t n, size_t from,
                      size_t *start, size_t *end) {
    const Tokenizer *t = e->t;
    for (size_t i = from, stop; i < n; i = stop) {
        stop = i + 1;
        int hit = added_here(t, which, s, n, i, &stop);
        if (hit < 0) continue;
        const AddedToken *a = &t->added[hit];
        if (a->guarded && !e->special) continue;    // here its characters are plain text

        *start = i;
        *end = stop;
        while (a->lstrip) {
            size_t blank = space_before(s, from, *start);
            if (!blank) break;
            *start -= blank;
        }
        int len;
        while (a->rstrip && *end < n && is_space(s + *end, n - *end, &len)) *end += (size_t)len;
        return hit;
    }
    return -1;
}

// Cuts the added tokens out of s[0,n), those of the raw text (which 0) or of the normalized text
// (which 1). Appends their ids, and calls encode_rest for every text between them.
static void cut_added(Encoder *e, int which, const char *s, size_t n, int at_start,
                      void (*encode_rest)(Encoder *e, const char *s, size_t n, int at_start)) {
    size_t from = 0, start, end;
    for (;;) {
        int a = added_next(e, which, s, n, from, &start, &end);
        if (a < 0) break;
        if (start > from) encode_rest(e, s + from, start - from, at_start && !from);
        arrput(e->ids, e->t->added[a].id);
        from = end;
    }
    if (n > from) encode_rest(e, s + from, n - from, at_start && !from);
}

// Normalizes and encodes a text between the added tokens of the raw text.
static void encode_segment(Encoder *e, const char *s, size_t n, int at_start) {
    if (arrlen(e->t->norm)) {
        arrsetlen(e->text, 0);
        bytes_put(&e->text, s, n);
        normalize(e->t, &e->text, &e->spare, at_start);
        s = e->text;
        n = arrlenu(e->text);
    }
    cut_added(e, 1, s, n, at_start, encode_piece);
}

// Appends the ids of a text to the stb array ids and returns it.
// parse_special: 1 where the text may name special tokens. at_start: 1 where everything begins, the
// only place where some SentencePiece models put a blank before the text.
static int *encode_at(const Tokenizer *t, const char *text, size_t n, int parse_special,
                      int at_start, int *ids) {
    if (n > INT_MAX / 8) {
        die(EXIT_USAGE, "a text of %zu bytes is too long, at most %d", n, INT_MAX / 8);
    }
    Encoder e = { .t = t, .special = parse_special, .ids = ids };
    cut_added(&e, 0, text, n, at_start, encode_segment);
    arrfree(e.text);
    arrfree(e.spare);
    arrfree(e.mapped);
    arrfree(e.cls);
    arrfree(e.sym);
    arrfree(e.heap);
    return e.ids;
}

// encode_at for a text with which everything begins.
static int *tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int parse_special,
                             int *ids) {
    return encode_at(t, text, n, parse_special, 1, ids);
}

// ---- Decoding
// A Decoder is a stream: ids go in, whole characters come out. Bytes that may still become a
// character are held back. Bytes that cannot become one come out as U+FFFD, one for each longest
// beginning of a character. A new Decoder has t, and skip_special if wanted; the rest is 0.
typedef struct {
    const Tokenizer *t;
    int skip_special;           // 1: special tokens add nothing
    int started;                // 1: a byte of the text has come
    int n;                      // bytes held back
    char held[4];
} Decoder;

// Can the n bytes at s, which hold no whole character, still become one? Some continuations of a
// beginning may be illegal, but the lowest one or the highest one is legal.
static int utf8_begins(const char *s, int n) {
    char low[4], high[4];
    memset(low, 0x80, 4);
    memset(high, 0xbf, 4);
    memcpy(low, s, (size_t)n);
    memcpy(high, s, (size_t)n);
    return utf8_length(low, 4) > n || utf8_length(high, 4) > n;
}

// Feeds one byte. Appends what it completes to the stb array out, which is returned.
static char *decode_byte(Decoder *d, char c, char *out) {
    d->held[d->n++] = c;
    while (d->n) {
        int len = utf8_length(d->held, (size_t)d->n), done = len;
        if (!len && utf8_begins(d->held, d->n)) return out;
        if (len) {
            bytes_put(&out, d->held, (size_t)len);
        } else {
            bytes_put(&out, "\xef\xbf\xbd", 3);
            done = max_int(d->n - 1, 1);        // without the newest byte it was a beginning
        }
        d->n -= done;
        memmove(d->held, d->held + done, (size_t)d->n);
    }
    return out;
}

// Feeds one id. Appends what it completes to the stb array out, which is returned.
static char *decode_token(Decoder *d, int id, char *out) {
    int n;
    const char *s = tokenizer_bytes(d->t, id, &n);
    if (d->skip_special && tokenizer_is_special(d->t, id)) return out;
    for (int i = 0; i < n; i++) {
        // The blank that SentencePiece puts before a text is no part of it.
        int drop = !d->started && d->t->dec_strip && s[i] == ' ';
        d->started = 1;
        if (!drop) out = decode_byte(d, s[i], out);
    }
    return out;
}

// Ends the stream: what is held back cannot become a character any more.
static char *decode_flush(Decoder *d, char *out) {
    if (d->n) bytes_put(&out, "\xef\xbf\xbd", 3);
    d->n = 0;
    return out;
}

// ---- Loading: what every format shares
// The functions below that return int return 0, or -1 with the reason in err.
static void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    arrfree(t->piece);
    arrfree(t->chars);
    arrfree(t->added);
    arrfree(t->norm);
    arrfree(t->split);
    free(t->by_text);
    free(t->merges.slot);
    free(t->trie[0].slot);
    free(t->trie[1].slot);
    free(t);
}

// An empty tokenizer with room for about n pieces: ids may reach n_by_text + 1023 (piece_add).
static Tokenizer *tokenizer_new(size_t n) {
    Tokenizer *t = xcalloc(1, sizeof *t);
    unicode_load();
    t->unk = -1;
    t->bos = -1;
    t->eos = -1;
    t->n_by_text = 64;
    while (t->n_by_text < 2 * n + 2) t->n_by_text *= 2;
    t->by_text = xmalloc(t->n_by_text * sizeof(int));
    for (size_t i = 0; i < t->n_by_text; i++) t->by_text[i] = -1;
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    return t;
}

// How many of a piece's n bytes a message shows.
static int shown(size_t n) { return (int)min_size(n, 100); }

// Is the whole of s well-formed UTF-8?
static int utf8_whole(const char *s, size_t n) {
    size_t i = 0;
    while (i < n) {
        int len = utf8_length(s + i, n - i);
        if (!len) return 0;
        i += (size_t)len;
    }
    return 1;
}

// Gives the text s the id and the flags (PIECE_*). A text that has the id already gets the flags as
// well: an added token may stand in the BPE vocabulary too.
static int piece_add(Tokenizer *t, int64_t id, const char *s, size_t n, int flags, char err[512]) {
    size_t limit = t->n_by_text + 1024, size = arrlenu(t->piece), slot = text_slot(t, s, n);
    int has = t->by_text[slot];         // the id that the text has, or -1
    if (!utf8_whole(s, n) || (flags & PIECE_ADDED && memchr(s, 0, n)))
        return fault(err, "token %lld is not UTF-8, or holds a NUL", (long long)id);
    if (id < 0 || (uint64_t)id >= limit)
        return fault(err, "token '%.*s' has id %lld: expected 0..%zu", shown(n), s, (long long)id,
                     limit - 1);
    if (has >= 0 && has != id)
        return fault(err, "token '%.*s' has two ids, %d and %lld", shown(n), s, has, (long long)id);
    if ((size_t)id < size && t->piece[id].flags && has != id)
        return fault(err, "id %lld belongs to two tokens, '%.100s' and '%.*s'", (long long)id,
                     t->chars + t->piece[id].text, shown(n), s);
    if (has == id) {
        if (t->piece[id].flags & flags)
            return fault(err, "token '%.*s' is listed twice", shown(n), s);
        t->piece[id].flags |= flags;
        return 0;
    }

    if ((size_t)id >= size) {
        arrsetlen(t->piece, (size_t)id + 1);
        memset(t->piece + size, 0, ((size_t)id + 1 - size) * sizeof(Piece));
    }
    t->piece[id] = (Piece){ .text = arrlenu(t->chars), .n_text = (int)n };
    t->piece[id].flags = PIECE_USED | flags;
    bytes_put(&t->chars, s, n);
    arrput(t->chars, 0);
    t->by_text[slot] = (int)id;
    return 0;
}

// Finds the pieces <0x00> to <0xFF>.
static void byte_ids(Tokenizer *t) {
    for (int b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        t->byte_id[b] = model_id(t, name, 6);
    }
}

// Notes that left and right merge into the id `into`; lower ranks merge first.
static void merge_put(Tokenizer *t, int left, int right, int rank, int into) {
    map_put(&t->merges, (uint64_t)left << 32 | (uint64_t)right, (int64_t)rank << 32 | into);
}

// Puts added token number `index` into the trie of its kind. A normalized one goes in as the
// normalizer writes it.
static void trie_add(Tokenizer *t, int index, int normalized) {
    const Piece *p = &t->piece[t->added[index].id];
    Map *trie = &t->trie[normalized];
    char *text = NULL, *spare = NULL;
    bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
    if (normalized) normalize(t, &text, &spare, 1);

    int64_t node = 0;
    for (size_t i = 0; i < arrlenu(text); i++) {
        uint64_t key = (uint64_t)node << 9 | (unsigned char)text[i];
        node = map_get(trie, key);
        if (node >= 0) continue;
        node = ++t->nodes[normalized];
        map_put(trie, key, node);
    }
    map_put(trie, (uint64_t)node << 9 | 256, index);
    t->starts[normalized][(unsigned char)text[0]] = 1;
    arrfree(text);
    arrfree(spare);
}

// The byte whose piece <0xNN> has this id, or -1.
static int byte_of_id(const Tokenizer *t, int id) {
    for (int b = 255; b >= 0; b--) {
        if (t->byte_id[b] == id) return b;
    }
    return -1;
}

// Appends the bytes that n bytes of text stand for in the byte alphabet. Returns 0, with *out
// empty, when a character is not of the alphabet.
static int bytes_of_alphabet(const char *text, int n, char **out) {
    int len;
    for (int i = 0; i < n; i += len) {
        int b = char_byte(char_code(text + i, (size_t)(n - i), &len));
        if (b < 0) {
            arrsetlen(*out, 0);
            return 0;
        }
        arrput(*out, (char)b);
    }
    return 1;
}

// Writes the decoded form of a piece whose text is *text to *out, which is empty. Both are stb
// arrays, and *text may be used up. A piece with a character outside the byte alphabet stands for
// itself.
static void decode_piece(const Tokenizer *t, int id, char **text, char **out) {
    int added = t->piece[id].flags & PIECE_ADDED, n = (int)arrlen(*text);
    int byte = t->dec_bytes ? byte_of_id(t, id) : -1;
    if (byte >= 0) {
        arrput(*out, (char)byte);
        return;
    }
    if (t->dec_byte_level && !added && bytes_of_alphabet(*text, n, out)) return;
    bytes_put(out, *text, (size_t)n);
    if (t->dec_space) replace_all(out, text, BLANK_MARK, " ");
}

// Makes the decoded form of every piece, from the flags dec_*.
static void decode_table(Tokenizer *t) {
    char *text = NULL, *out = NULL;
    for (int id = 0; id < tokenizer_size(t); id++) {
        Piece *p = &t->piece[id];
        arrsetlen(text, 0);
        bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
        arrsetlen(out, 0);
        if (p->flags & PIECE_NORMALIZED) normalize(t, &text, &out, 1);
        arrsetlen(out, 0);
        decode_piece(t, id, &text, &out);
        p->bytes = arrlenu(t->chars);
        p->n_bytes = (int)arrlen(out);
        bytes_put(&t->chars, out, arrlenu(out));
    }
    arrfree(text);
    arrfree(out);
}

// ---- Loading tokenizer.json
// Each reader takes one member of the file; an absent or null member is legal where the format says
// so. Readers of members that may be a "Sequence" call themselves, at most 4 levels deep.
static int json_is(const Json *j, int type) { return j && j->type == type; }
static int json_none(const Json *j) { return !j || j->type == JSON_NULL; }

// The bool of a key: 0 or 1; `absent` when it is absent or null; 2 when it is no bool.
static int json_flag(const Json *obj, const char *key, int absent) {
    const Json *j = json_get(obj, key);
    if (json_none(j)) return absent;
    return j->type == JSON_BOOL ? (int)j->i : 2;
}

// The text of a key; "" when it is absent, no text, or a text with a NUL inside.
static const char *json_text(const Json *obj, const char *key) {
    const Json *j = json_get(obj, key);
    return json_is(j, JSON_STRING) && strlen(j->str) == j->len ? j->str : "";
}

// Refuses an object for its type. what: "a normalizer" and the like.
static int refuse_type(char err[512], const char *what, const Json *obj) {
    const char *type = json_text(obj, "type");
    if (!*type) return fault(err, "%s without a type is not supported", what);
    return fault(err, "%s of type '%.100s' is not supported", what, type);
}

// The list of a "Sequence" object under `key`; NULL when obj is none, or lies too deep.
static const Json *sequence_list(const Json *obj, const char *key, int depth) {
    const Json *list = json_get(obj, key);
    if (strcmp(json_text(obj, "type"), "Sequence") || depth >= 4) return NULL;
    return json_is(list, JSON_ARRAY) ? list : NULL;
}

// model.vocab: an object from texts to ids.
static int load_vocab(Tokenizer *t, const Json *vocab, char err[512]) {
    for (int i = 0; i < vocab->n; i++) {
        const Json *id = &vocab->item[i];
        const char *text = vocab->key[i];
        if (id->type != JSON_NUMBER || !id->is_int)
            return fault(err, "model.vocab: the id of '%.100s' is no integer", text);
        if (piece_add(t, id->i, text, strlen(text), PIECE_MODEL, err)) return -1;
    }
    return 0;
}

// Adds the merge of the texts a and b. *both is an stb array to work in.
static int merge_add(Tokenizer *t, int rank, const char *a, size_t na, const char *b, size_t nb,
                     char **both, char err[512]) {
    arrsetlen(*both, 0);
    bytes_put(both, a, na);
    bytes_put(both, b, nb);
    if (!na || !nb) return fault(err, "model.merges[%d] has an empty side", rank);

    const char *const text[3] = { a, b, *both };
    size_t n[3] = { na, nb, na + nb };
    int id[3];
    for (int i = 0; i < 3; i++) {
        id[i] = model_id(t, text[i], n[i]);
        if (id[i] < 0)
            return fault(err, "model.merges[%d] needs '%.*s', which is not in the vocabulary", rank,
                         shown(n[i]), text[i]);
    }
    merge_put(t, id[0], id[1], rank, id[2]);
    return 0;
}

// One member of model.merges: "left right", or ["left", "right"].
static int load_merge(Tokenizer *t, const Json *m, int rank, char **both, char err[512]) {
    if (m->type == JSON_STRING && m->len) {
        const char *left = m->str, *gap = memchr(left, ' ', m->len);
        const char *right = gap ? gap + 1 : left;
        size_t n_left = gap ? (size_t)(gap - left) : 0, n_right = m->len - (size_t)(right - left);
        if (gap && !memchr(right, ' ', n_right))
            return merge_add(t, rank, left, n_left, right, n_right, both, err);
    }
    if (m->type == JSON_ARRAY && m->n == 2) {
        const Json *a = &m->item[0], *b = &m->item[1];
        if (a->type == JSON_STRING && b->type == JSON_STRING)
            return merge_add(t, rank, a->str, a->len, b->str, b->len, both, err);
    }
    return fault(err, "model.merges[%d]: expected \"left right\" or [\"left\", \"right\"]", rank);
}

// model.merges. A merge's rank is its index.
static int load_merges(Tokenizer *t, const Json *merges, char err[512]) {
    char *both = NULL;
    int bad = 0;
    for (int i = 0; i < merges->n && !bad; i++) {
        bad = load_merge(t, &merges->item[i], i, &both, err);
    }
    arrfree(both);
    return bad;
}

// Refuses what a BPE model may ask for and BPE here does not do.
static int check_model(const Json *m, char err[512]) {
    static const char *const affix[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    const Json *vocab = json_get(m, "vocab"), *merges = json_get(m, "merges");
    const Json *dropout = json_get(m, "dropout");
    if (!json_none(json_get(m, "type")) && strcmp(json_text(m, "type"), "BPE"))
        return refuse_type(err, "a model", m);
    if (!json_is(vocab, JSON_OBJECT) || !vocab->n)
        return fault(err, "model.vocab: expected an object with tokens");
    if (!json_is(merges, JSON_ARRAY) || !merges->n)
        return fault(err, "model.merges: expected a list with merges");
    for (int i = 0; i < 2; i++) {
        const Json *j = json_get(m, affix[i]);
        if (json_none(j)) continue;
        if (j->type != JSON_STRING || j->len)
            return fault(err, "model.%s is not supported", affix[i]);
    }
    if (!json_none(dropout) && (dropout->type != JSON_NUMBER || dropout->num != 0))
        return fault(err, "model.dropout is not supported");
    return 0;
}

// "model": vocabulary, merges, and what becomes of unknown characters.
static int load_model(Tokenizer *t, const Json *m, char err[512]) {
    if (check_model(m, err)) return -1;
    t->ignore_merges = json_flag(m, "ignore_merges", 0);
    t->byte_fallback = json_flag(m, "byte_fallback", 0);
    t->fuse_unk = json_flag(m, "fuse_unk", 0);
    if (t->ignore_merges > 1 || t->byte_fallback > 1 || t->fuse_unk > 1)
        return fault(err, "model: ignore_merges, byte_fallback and fuse_unk are true or false");
    if (load_vocab(t, json_get(m, "vocab"), err)) return -1;
    if (load_merges(t, json_get(m, "merges"), err)) return -1;
    byte_ids(t);

    const Json *unk = json_get(m, "unk_token");
    if (json_none(unk)) return 0;
    t->unk = unk->type == JSON_STRING ? model_id(t, unk->str, unk->len) : -1;
    return t->unk >= 0 ? 0 : fault(err, "model.unk_token is not in the vocabulary");
}

// Does an added token look like a turn mark? DeepSeek's <｜User｜> and its like are not "special" in
// their files, but a user must not be able to write them either.
static int looks_special(const char *s, size_t n) {
    int opens = !strncmp(s, "<|", 2) || !strncmp(s, "<｜", 4);
    return n > 4 && opens && s[n - 1] == '>';
}

// Member i of added_tokens.
static int load_added_token(Tokenizer *t, const Json *j, int i, char err[512]) {
    const Json *id = json_get(j, "id"), *content = json_get(j, "content");
    int special = json_flag(j, "special", 0), normalized = json_flag(j, "normalized", !special);
    AddedToken a = { .lstrip = json_flag(j, "lstrip", 0), .rstrip = json_flag(j, "rstrip", 0) };
    if (!json_is(id, JSON_NUMBER) || !id->is_int)
        return fault(err, "added_tokens[%d].id is not an integer", i);
    if (!json_is(content, JSON_STRING) || !content->len)
        return fault(err, "added_tokens[%d].content is no text, or empty", i);
    if (special > 1 || normalized > 1 || a.lstrip > 1 || a.rstrip > 1)
        return fault(err, "added_tokens[%d]: a flag is neither true nor false", i);
    if (json_flag(j, "single_word", 0))
        return fault(err, "added token '%.100s': single_word is not supported", content->str);

    int flags = PIECE_ADDED;
    if (special) flags |= PIECE_SPECIAL;
    if (normalized) flags |= PIECE_NORMALIZED;
    if (piece_add(t, id->i, content->str, content->len, flags, err)) return -1;
    a.id = (int)id->i;
    a.guarded = special || looks_special(content->str, content->len);
    arrput(t->added, a);
    trie_add(t, i, normalized);
    return 0;
}

// "added_tokens". Needs the normalizer, which rewrites those that are normalized.
static int load_added(Tokenizer *t, const Json *list, char err[512]) {
    if (json_none(list)) return 0;
    if (list->type != JSON_ARRAY) return fault(err, "added_tokens: expected a list");
    for (int i = 0; i < list->n; i++) {
        if (load_added_token(t, &list->item[i], i, err)) return -1;
    }
    return 0;
}

// "normalizer": NFC, Prepend, Replace of a text, or a Sequence of them.
static int load_normalizer(Tokenizer *t, const Json *n, int depth, char err[512]) {
    if (json_none(n)) return 0;
    const Json *list = sequence_list(n, "normalizers", depth);
    if (list) {
        for (int i = 0; i < list->n; i++) {
            if (load_normalizer(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }

    const char *type = json_text(n, "type");
    const char *from = json_text(json_get(n, "pattern"), "String"), *to = json_text(n, "content");
    NormStep step = { .kind = NORM_NFC };
    if (!strcmp(type, "Prepend")) {
        step.kind = NORM_PREPEND;
        to = json_text(n, "prepend");
    } else if (!strcmp(type, "Replace")) {
        step.kind = NORM_REPLACE;
    } else if (strcmp(type, "NFC")) {
        return refuse_type(err, "a normalizer", n);
    }
    if (step.kind == NORM_REPLACE && (!*from || strlen(from) >= sizeof step.from))
        return fault(err, "normalizer Replace: only a short pattern {\"String\": ...} is supported");
    if (step.kind != NORM_NFC && (!*to || strlen(to) >= sizeof step.to))
        return fault(err, "normalizer %s: only a short text is supported", type);
    if (arrlen(t->norm) == MAX_STEPS)
        return fault(err, "normalizer: more than %d steps are not supported", MAX_STEPS);
    if (step.kind == NORM_REPLACE) strcpy(step.from, from);
    if (step.kind != NORM_NFC) strcpy(step.to, to);
    arrput(t->norm, step);
    return 0;
}

// The patterns as tokenizer.json files write them. A file's pattern equals one of them, or is
// refused.
#define CONTRACTIONS_AND_WORDS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define SIGNS_AND_BLANKS "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TEKKEN_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define TEKKEN_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
static const struct {
    const char *regex;
    int split;                  // SPLIT_*
} split_patterns[] = {
    { CONTRACTIONS_AND_WORDS "\\p{N}{1,3}" SIGNS_AND_BLANKS, SPLIT_LLAMA3 },
    { CONTRACTIONS_AND_WORDS "\\p{N}" SIGNS_AND_BLANKS, SPLIT_QWEN2 },
    { "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2 },
    { "[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "*" TEKKEN_LOWER "+"
      "|[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "+" TEKKEN_LOWER "*"
      "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", SPLIT_TEKKEN },
};

// Pre-tokenizer "Split": a regular expression.
static int load_split(Tokenizer *t, const Json *p, char err[512]) {
    const char *regex = json_text(json_get(p, "pattern"), "Regex");
    if (strcmp(json_text(p, "behavior"), "Isolated") || json_flag(p, "invert", 0))
        return fault(err, "pre_tokenizer Split: only behavior Isolated without invert is supported");
    for (size_t i = 0; i < sizeof split_patterns / sizeof *split_patterns; i++) {
        if (strcmp(regex, split_patterns[i].regex)) continue;
        arrput(t->split, split_patterns[i].split);
        return 0;
    }
    return fault(err, "pre_tokenizer Split: this pattern is not supported: %.400s", regex);
}

// Pre-tokenizer "Metaspace": blanks become U+2581. Older files say add_prefix_space where newer
// ones say prepend_scheme.
static int load_metaspace(Tokenizer *t, const Json *p, char err[512]) {
    const char *scheme = json_text(p, "prepend_scheme");
    int split = json_flag(p, "split", 1), prefix = json_flag(p, "add_prefix_space", 1);
    if (strcmp(json_text(p, "replacement"), BLANK_MARK))
        return fault(err, "pre_tokenizer Metaspace: only U+2581 as replacement is supported");
    if (t->meta || arrlen(t->split) || split > 1)
        return fault(err, "pre_tokenizer Metaspace: supported only as the first step");

    if (!strcmp(scheme, "first")) t->meta = META_FIRST;
    else if (!strcmp(scheme, "never") || !prefix) t->meta = META_NEVER;
    else t->meta = META_ALWAYS;
    if (*scheme && t->meta == META_ALWAYS && strcmp(scheme, "always"))
        return fault(err, "pre_tokenizer Metaspace: prepend_scheme '%.50s' is not supported", scheme);
    if (split) arrput(t->split, SPLIT_METASPACE);
    return 0;
}

// Pre-tokenizer "Digits".
static int load_digits(Tokenizer *t, const Json *p, char err[512]) {
    int single = json_flag(p, "individual_digits", 0);
    if (single > 1)
        return fault(err, "pre_tokenizer Digits: individual_digits is neither true nor false");
    arrput(t->split, single ? SPLIT_DIGITS : SPLIT_NUMBERS);
    return 0;
}

// Pre-tokenizer "ByteLevel": words are written in the byte alphabet; with use_regex GPT-2's pattern
// splits them first.
static int load_byte_level(Tokenizer *t, const Json *p, char err[512]) {
    int regex = json_flag(p, "use_regex", 1);
    if (json_flag(p, "add_prefix_space", 1))
        return fault(err, "pre_tokenizer ByteLevel: add_prefix_space is not supported");
    if (regex > 1)
        return fault(err, "pre_tokenizer ByteLevel: use_regex is neither true nor false");
    if (t->meta) return fault(err, "pre_tokenizer ByteLevel is not supported after Metaspace");
    if (regex) arrput(t->split, SPLIT_GPT2);
    t->byte_level = 1;
    return 0;
}

// "pre_tokenizer": one of the four above, or a Sequence of them.
static int load_pre_tokenizer(Tokenizer *t, const Json *p, int depth, char err[512]) {
    if (json_none(p)) return 0;
    if (t->byte_level) return fault(err, "pre_tokenizer: a step after ByteLevel is not supported");
    if (arrlen(t->split) == MAX_STEPS)
        return fault(err, "pre_tokenizer: more than %d steps are not supported", MAX_STEPS);
    const Json *list = sequence_list(p, "pretokenizers", depth);
    if (list) {
        for (int i = 0; i < list->n; i++) {
            if (load_pre_tokenizer(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }

    const char *type = json_text(p, "type");
    if (!strcmp(type, "Split")) return load_split(t, p, err);
    if (!strcmp(type, "Metaspace")) return load_metaspace(t, p, err);
    if (!strcmp(type, "Digits")) return load_digits(t, p, err);
    if (!strcmp(type, "ByteLevel")) return load_byte_level(t, p, err);
    return refuse_type(err, "a pre_tokenizer", p);
}

// Decoder "Strip": blanks at the start of the text go, at most one.
static int load_strip(Tokenizer *t, const Json *d, char err[512]) {
    const Json *start = json_get(d, "start"), *stop = json_get(d, "stop");
    int start_known = json_is(start, JSON_NUMBER) && (start->num == 0 || start->num == 1);
    int stop_known = !json_is(stop, JSON_NUMBER) || stop->num == 0;
    if (strcmp(json_text(d, "content"), " ") || !start_known || !stop_known)
        return fault(err, "decoder Strip: only one blank at the start is supported");
    t->dec_strip = start->num == 1;
    return 0;
}

// "decoder": ByteLevel, ByteFallback, Metaspace, Replace, Strip, Fuse, or a Sequence of them. Fuse
// joins the pieces, which is what happens anyway.
static int load_decoder(Tokenizer *t, const Json *d, int depth, char err[512]) {
    if (json_none(d)) return 0;
    const Json *list = sequence_list(d, "decoders", depth);
    if (list) {
        for (int i = 0; i < list->n; i++) {
            if (load_decoder(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }

    const char *type = json_text(d, "type");
    if (!strcmp(type, "ByteLevel")) {
        t->dec_byte_level = 1;
    } else if (!strcmp(type, "ByteFallback")) {
        t->dec_bytes = 1;
    } else if (!strcmp(type, "Metaspace")) {
        const char *scheme = json_text(d, "prepend_scheme");
        t->dec_space = 1;
        t->dec_strip = strcmp(scheme, "never") && json_flag(d, "add_prefix_space", 1);
    } else if (!strcmp(type, "Replace")) {
        const char *from = json_text(json_get(d, "pattern"), "String");
        if (strcmp(from, BLANK_MARK) || strcmp(json_text(d, "content"), " "))
            return fault(err, "decoder Replace: only U+2581 to a blank is supported");
        t->dec_space = 1;
    } else if (!strcmp(type, "Strip")) {
        return load_strip(t, d, err);
    } else if (strcmp(type, "Fuse")) {
        return refuse_type(err, "a decoder", d);
    }
    return 0;
}

// Post-processor "TemplateProcessing": its list "single" is [BOS, text], or the text alone.
static int load_bos(Tokenizer *t, const Json *p, const Json *list, char err[512]) {
    int seen = 0;               // 1: the text came
    for (int i = 0; i < list->n; i++) {
        const Json *special = json_get(&list->item[i], "SpecialToken");
        if (!special) {
            seen = 1;
            continue;
        }
        const char *name = json_text(special, "id");
        const Json *ids = json_get(json_get(json_get(p, "special_tokens"), name), "ids");
        if (seen || t->add_bos)
            return fault(err, "post_processor: only one token before the text is supported, "
                         "not '%.100s' as well", name);
        const Json *id = json_is(ids, JSON_ARRAY) && ids->n == 1 ? &ids->item[0] : NULL;
        if (!id || !id->is_int || id->i < 0 || id->i >= tokenizer_size(t))
            return fault(err, "post_processor: '%.100s' has no id of the vocabulary", name);
        t->bos = (int)id->i;
        t->add_bos = 1;
    }
    return 0;
}

// "post_processor": what stands before a text. ByteLevel changes only offsets, which kvcomp does
// not use.
static int load_post_processor(Tokenizer *t, const Json *p, int depth, char err[512]) {
    const char *type = json_text(p, "type");
    int sequence = !strcmp(type, "Sequence");
    const Json *list = json_get(p, sequence ? "processors" : "single");
    if (json_none(p) || !strcmp(type, "ByteLevel")) return 0;
    if (!json_is(list, JSON_ARRAY) || depth > 3) return refuse_type(err, "a post_processor", p);
    if (sequence) {
        for (int i = 0; i < list->n; i++) {
            if (load_post_processor(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }
    if (strcmp(type, "TemplateProcessing")) return refuse_type(err, "a post_processor", p);
    return load_bos(t, p, list, err);
}

// Reads the members of the file j into t, each after those it needs.
static int load_members(Tokenizer *t, const Json *j, char err[512]) {
    if (load_normalizer(t, json_get(j, "normalizer"), 0, err)) return -1;
    if (load_pre_tokenizer(t, json_get(j, "pre_tokenizer"), 0, err)) return -1;
    if (load_model(t, json_get(j, "model"), err)) return -1;
    if (load_added(t, json_get(j, "added_tokens"), err)) return -1;
    if (load_decoder(t, json_get(j, "decoder"), 0, err)) return -1;
    if (load_post_processor(t, json_get(j, "post_processor"), 0, err)) return -1;
    decode_table(t);
    return 0;
}

// The tokenizer that a parsed tokenizer.json describes; NULL and err when it is refused.
static Tokenizer *load_json(const Json *j, char err[512]) {
    const Json *model = json_get(j, "model"), *vocab = json_get(model, "vocab");
    const Json *added = json_get(j, "added_tokens");
    if (!json_is(model, JSON_OBJECT)) {
        fault(err, "no 'model' inside: expected a tokenizer.json");
        return NULL;
    }
    size_t n_vocab = vocab ? (size_t)vocab->n : 0, n_added = added ? (size_t)added->n : 0;
    Tokenizer *t = tokenizer_new(n_vocab + n_added);
    if (load_members(t, j, err)) {
        tokenizer_free(t);
        return NULL;
    }
    return t;
}

// ---- Loading a SentencePiece tokenizer.model
// The file is a protobuf message: pieces (text, score, type) and two messages with settings. In a
// protobuf every field is a tag, which is field number << 3 | wire type, and a value.
enum {                          // wire types
    WIRE_VARINT = 0,            // 7 bits a byte, low ones first; the top bit says that more follow
    WIRE_64 = 1,
    WIRE_BYTES = 2,             // a length, and so many bytes: a text, or a message
    WIRE_32 = 5
};
enum {                          // field numbers in SentencePiece's ModelProto
    SP_FILE_PIECE = 1,
    SP_FILE_TRAINER = 2,
    SP_FILE_NORMALIZER = 3,

    SP_PIECE_TEXT = 1,          // in a piece
    SP_PIECE_SCORE = 2,
    SP_PIECE_TYPE = 3,

    SP_TRAINER_TYPE = 3,        // in the trainer's settings: 1 unigram, 2 BPE, 3 word, 4 char
    SP_TRAINER_SUFFIX = 24,     // treat_whitespace_as_suffix
    SP_TRAINER_BYTES = 35,      // byte_fallback

    SP_NORM_CHARSMAP = 2,       // in the normalizer's settings: a precompiled table
    SP_NORM_PREFIX = 3,         // add_dummy_prefix
    SP_NORM_STRIP = 4,          // remove_extra_whitespaces
    SP_NORM_ESCAPE = 5          // escape_whitespaces
};
enum { SP_NORMAL = 1, SP_UNKNOWN, SP_CONTROL, SP_USER, SP_UNUSED, SP_BYTE };    // types of pieces

typedef struct {                // a message, or the rest of one
    const unsigned char *p, *end;
    int bad;                    // 1: it is malformed
} Proto;
typedef struct {
    int field, wire;            // its number; WIRE_*
    uint64_t num;               // the value of a WIRE_VARINT or WIRE_32, the length of a WIRE_BYTES
    Proto sub;                  // the value's bytes
} ProtoField;

// Reads a varint. At a malformed one it returns 0 and sets bad.
static uint64_t proto_varint(Proto *b) {
    uint64_t x = 0;
    for (int shift = 0; shift < 64 && b->p < b->end; shift += 7) {
        unsigned char byte = *b->p++;
        x |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128)) return x;
    }
    b->bad = 1;
    return 0;
}

// Reads the next field. Returns 0 at the end, and at a malformed field, which sets bad.
static int proto_next(Proto *b, ProtoField *f) {
    if (b->p == b->end || b->bad) return 0;
    uint64_t tag = proto_varint(b), size = 0;
    *f = (ProtoField){ .field = (int)(tag >> 3 & 0x1fffffff), .wire = (int)(tag & 7) };
    switch (f->wire) {
    case WIRE_VARINT:
        f->num = proto_varint(b);
        break;
    case WIRE_64:
        size = 8;
        break;
    case WIRE_BYTES:
        f->num = proto_varint(b);
        size = f->num;
        break;
    case WIRE_32:
        size = 4;
        break;
    default:
        b->bad = 1;
    }
    if (b->bad || size > (uint64_t)(b->end - b->p)) {
        b->bad = 1;
        return 0;
    }
    f->sub = (Proto){ b->p, b->p + size, 0 };
    if (f->wire == WIRE_32) {
        uint32_t x;
        memcpy(&x, b->p, 4);
        f->num = x;
    }
    b->p += size;
    return 1;
}

// Is it the field of this number and wire type?
static int proto_is(const ProtoField *f, int field, int wire) {
    return f->field == field && f->wire == wire;
}

typedef struct {
    float score;
    int id;
} Scored;

// For qsort: the best score first; ids keep the order of equals stable.
static int scored_order(const void *a, const void *b) {
    const Scored *x = a, *y = b;
    if (x->score == y->score) return x->id - y->id;
    return x->score < y->score ? 1 : -1;
}

// Reads piece number id from its message b. Normal pieces are appended to the stb array *scored.
static int load_sp_piece(Tokenizer *t, int id, Proto b, Scored **scored, char err[512]) {
    Proto text = { 0 };
    ProtoField f;
    int type = SP_NORMAL;
    float score = 0;
    while (proto_next(&b, &f)) {
        if (proto_is(&f, SP_PIECE_TEXT, WIRE_BYTES)) text = f.sub;
        if (proto_is(&f, SP_PIECE_SCORE, WIRE_32)) memcpy(&score, f.sub.p, 4);
        if (proto_is(&f, SP_PIECE_TYPE, WIRE_VARINT)) type = f.num > SP_BYTE ? 0 : (int)f.num;
    }
    size_t n = (size_t)(text.end - text.p);
    if (b.bad || !n || n > INT_MAX || !isfinite(score))
        return fault(err, "piece %d is malformed (text, score or type)", id);
    if (type < SP_NORMAL || type == SP_UNUSED)
        return fault(err, "piece %d has type %d, which is not supported", id, type);

    int special = type == SP_UNKNOWN || type == SP_CONTROL, added = special || type == SP_USER;
    int flags = added ? PIECE_ADDED : PIECE_MODEL;
    if (special) flags |= PIECE_SPECIAL;
    if (piece_add(t, id, (const char *)text.p, n, flags, err)) return -1;
    if (type == SP_UNKNOWN) t->unk = id;
    if (type == SP_NORMAL) {
        Scored s = { score, id };
        arrput(*scored, s);
    }
    if (added) {
        AddedToken a = { .id = id, .guarded = special };
        arrput(t->added, a);
    }
    return 0;
}

// Reads the two settings messages. *prefix: 1 when a text gets a blank before it.
static int load_sp_settings(Tokenizer *t, Proto trainer, Proto norm, int *prefix, char err[512]) {
    static const char *const kind[] = { "?", "unigram", "BPE", "word", "char" };
    ProtoField f;
    uint64_t type = 1, strip = 1;           // these are the format's defaults
    *prefix = 1;
    while (proto_next(&trainer, &f)) {
        if (proto_is(&f, SP_TRAINER_TYPE, WIRE_VARINT)) type = f.num;
        if (proto_is(&f, SP_TRAINER_BYTES, WIRE_VARINT)) t->byte_fallback = f.num != 0;
        if (proto_is(&f, SP_TRAINER_SUFFIX, WIRE_VARINT) && f.num)
            return fault(err, "treat_whitespace_as_suffix is not supported");
    }
    while (proto_next(&norm, &f)) {
        if (proto_is(&f, SP_NORM_CHARSMAP, WIRE_BYTES) && f.num)
            return fault(err, "a precompiled normalizer is not supported, only 'identity'");
        if (proto_is(&f, SP_NORM_PREFIX, WIRE_VARINT)) *prefix = f.num != 0;
        if (proto_is(&f, SP_NORM_STRIP, WIRE_VARINT)) strip = f.num;
        if (proto_is(&f, SP_NORM_ESCAPE, WIRE_VARINT) && !f.num)
            return fault(err, "escape_whitespaces = false is not supported");
    }
    if (trainer.bad || norm.bad) return fault(err, "the settings are malformed");
    if (type != 2)
        return fault(err, "a SentencePiece model of type '%s' is not supported, only BPE",
                     kind[type < 5 ? type : 0]);
    return strip ? fault(err, "remove_extra_whitespaces is not supported") : 0;
}

// Makes the merges. SentencePiece joins the neighbours whose joined text has the best score, so
// every way to cut a piece into two pieces of the vocabulary is a merge. Its rank is the place of
// the piece's score among all scores: equal scores have equal rank, and the leftmost merges first.
static void sp_merges(Tokenizer *t, Scored *scored) {
    size_t n = arrlenu(scored);
    int rank = -1;
    if (n) qsort(scored, n, sizeof *scored, scored_order);
    for (size_t i = 0; i < n; i++) {
        const Piece *p = &t->piece[scored[i].id];
        const char *s = t->chars + p->text;
        if (!i || scored[i].score != scored[i - 1].score) rank++;
        for (int cut = 0, len; cut < p->n_text; cut += len) {
            size_t n_left = (size_t)cut, n_right = (size_t)(p->n_text - cut);
            char_code(s + cut, n_right, &len);
            int left = model_id(t, s, n_left), right = model_id(t, s + cut, n_right);
            if (left >= 0 && right >= 0) merge_put(t, left, right, rank, scored[i].id);
        }
    }
}

// Appends a step to the normalizer.
static void norm_put(Tokenizer *t, NormStep step) { arrput(t->norm, step); }

// Completes a tokenizer whose pieces are loaded.
static void sp_finish(Tokenizer *t, Scored *scored, int prefix) {
    byte_ids(t);
    sp_merges(t, scored);

    // The user's symbols are normalized already: they enter the trie before t->norm has steps.
    for (int i = 0; i < (int)arrlen(t->added); i++) trie_add(t, i, !t->added[i].guarded);
    if (prefix) norm_put(t, (NormStep){ NORM_PREPEND, "", BLANK_MARK });
    norm_put(t, (NormStep){ NORM_REPLACE, " ", BLANK_MARK });
    t->fuse_unk = 1;
    t->dec_space = 1;
    t->dec_bytes = 1;
    t->dec_strip = prefix;
    t->bos = text_id(t, "<s>", 3);
    t->add_bos = t->bos >= 0;
    decode_table(t);
}

// The tokenizer of a tokenizer.model of n bytes; NULL and err when it is refused.
static Tokenizer *load_sentencepiece(const char *data, size_t n, char err[512]) {
    const unsigned char *p = (const unsigned char *)data;
    Proto file = { p, p + n, 0 }, trainer = { 0 }, norm = { 0 };
    ProtoField f;

    // Pass 1: count the pieces and find the settings.
    Proto b = file;
    size_t n_pieces = 0;
    while (proto_next(&b, &f)) {
        if (proto_is(&f, SP_FILE_PIECE, WIRE_BYTES)) n_pieces++;
        if (proto_is(&f, SP_FILE_TRAINER, WIRE_BYTES)) trainer = f.sub;
        if (proto_is(&f, SP_FILE_NORMALIZER, WIRE_BYTES)) norm = f.sub;
    }
    if (b.bad || !n_pieces) {
        fault(err, b.bad ? "not a SentencePiece model, or cut short" : "no pieces inside");
        return NULL;
    }

    // Pass 2: load them. A piece's id is its place in the file.
    Tokenizer *t = tokenizer_new(n_pieces);
    Scored *scored = NULL;
    int id = 0, prefix, bad = load_sp_settings(t, trainer, norm, &prefix, err);
    b = file;
    while (!bad && proto_next(&b, &f)) {
        if (!proto_is(&f, SP_FILE_PIECE, WIRE_BYTES)) continue;
        bad = load_sp_piece(t, id, f.sub, &scored, err);
        id++;
    }
    if (!bad) sp_finish(t, scored, prefix);
    arrfree(scored);
    if (!bad) return t;
    tokenizer_free(t);
    return NULL;
}

// ---- Loading a folder
// The id of the token that a key of tokenizer_config.json names, as "text" or {"content": "text"};
// `otherwise` when it names none.
static int token_named(const Tokenizer *t, const Json *config, const char *key, int otherwise) {
    const Json *j = json_get(config, key);
    if (json_is(j, JSON_OBJECT)) j = json_get(j, "content");
    int id = json_is(j, JSON_STRING) ? text_id(t, j->str, j->len) : -1;
    return id >= 0 ? id : otherwise;
}

// Reads tokenizer_config.json, if there is one: BOS, EOS, and whether BOS stands before every text.
static int load_tokenizer_config(Tokenizer *t, const char *path, int sentencepiece, char err[512]) {
    char why[256];
    size_t n;
    char *text = file_exists(path) ? read_bounded(path, MOST_CONFIG, &n, why) : NULL;
    Json *j = text ? json_parse(text, n, why) : NULL;
    free(text);
    if (file_exists(path) && !j) return fault(err, "%s: %s", path, why);

    int add = json_flag(j, "add_bos_token", t->add_bos), legacy = json_flag(j, "legacy", 1);
    t->bos = token_named(t, j, "bos_token", t->bos);
    t->eos = token_named(t, j, "eos_token", text_id(t, "</s>", 4));
    t->add_bos = add == 1 && t->bos >= 0;

    // Older Llama tokenizers ("legacy") treat the text after every special token as a new text,
    // with a blank before it.
    int prepends = sentencepiece && t->norm[0].kind == NORM_PREPEND;
    if (prepends && !legacy) t->norm[0].kind = NORM_PREPEND_START;
    json_free(j);
    if (add > 1 || legacy > 1)
        return fault(err, "%s: add_bos_token and legacy are true or false", path);
    return 0;
}

// Writes the path of the file to load to file: path itself, or in a folder tokenizer.json, else
// tokenizer.model.
static int tokenizer_file(const char *path, char file[1200], char err[512]) {
    struct stat st;
    int folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    if (strlen(path) > 1100) return fault(err, "the path of the tokenizer is too long");
    snprintf(file, 1200, folder ? "%s/tokenizer.json" : "%s", path);
    if (!folder || file_exists(file)) return 0;
    snprintf(file, 1200, "%s/tokenizer.model", path);
    if (file_exists(file)) return 0;
    return fault(err, "%s: no tokenizer.json and no tokenizer.model here", path);
}

// Is a file of n bytes a tokenizer.model? One begins with the tag of its first piece, which is a
// newline. So may a JSON text, but its first visible character is '{'.
static int is_sentencepiece(const char *text, size_t n) {
    return n > 0 && text[0] == '\n' && text[strspn(text, " \t\r\n")] != '{';
}

// The tokenizer of the text of a tokenizer.json; NULL and err when it is malformed or refused.
static Tokenizer *load_json_text(const char *text, size_t n, char err[512]) {
    char why[256];
    Json *j = json_parse(text, n, why);
    if (!j) {
        fault(err, "%s", why);
        return NULL;
    }
    Tokenizer *t = load_json(j, err);
    json_free(j);
    return t;
}

// Loads a tokenizer. path: a folder (tokenizer.json, else tokenizer.model) or one of the two files.
// tokenizer_config.json beside it is read too. Returns NULL with the reason in err when there is
// none or it is refused.
static Tokenizer *tokenizer_load(const char *path, char err[512]) {
    char file[1200], config[1300], why[256], reason[512] = "";
    size_t n;
    if (tokenizer_file(path, file, err)) return NULL;
    char *text = read_bounded(file, MOST_TOKENIZER, &n, why);
    if (!text) {
        fault(err, "%s", why);
        return NULL;
    }

    int sentencepiece = is_sentencepiece(text, n);
    Tokenizer *t;
    if (sentencepiece) t = load_sentencepiece(text, n, reason);
    else t = load_json_text(text, n, reason);
    free(text);
    if (!t) {
        fault(err, "%.200s: %.300s", file, reason);
        return NULL;
    }

    const char *slash = strrchr(file, '/');
    int folder_length = slash ? (int)(slash + 1 - file) : 0;
    snprintf(config, sizeof config, "%.*stokenizer_config.json", folder_length, file);
    if (load_tokenizer_config(t, config, sentencepiece, err)) {
        tokenizer_free(t);
        return NULL;
    }
    return t;
}

// ==================================================================================================== 22 CHAT TEMPLATES
// A chat template says what a model expects around the turns of a dialogue. Templates arrive as
// programs in the Jinja language. kvcomp runs none of them: it knows the texts of the families it
// supports, picks a family by a substring of the program (or by its name), and refuses every other
// program.
//
// A turn is rendered once and appended to the cache, and never rendered again. Some templates
// rewrite history when they render a whole dialogue: Qwen3 and DeepSeek-R1 drop old thoughts, the
// newer Mistral moves the system text to the last question, Llama 2 trims replies. A cache that
// only grows cannot follow, and the model sees what it really said.
//
// In the texts below {bos} and {eos} stand for those tokens, and the name of a special token stands
// for its id. In the words of the user and in the system text no name stands for an id, whatever
// they contain (unless parse_user, the option --parse-special).

// ---- The families
enum {                          // which white space goes
    TRIM_NONE,                  // none
    TRIM_BOTH,                  // at the ends of the system text, at the ends of the user's words
    TRIM_WHOLE                  // at the ends of the two taken as one text
};
typedef struct {                // the texts in the order in which they stand; NULL: nothing
    const char *name;
    const char *needs;          // a token without which the template makes no sense
    const char *open;           // before everything
    const char *sys, *sys_end;  // around the system text
    const char *user, *user_end;        // around the user's words
    const char *head;           // opens the reply
    const char *think;          // behind head when the model may think
    const char *no_think;       // behind head when it must not
    const char *end;            // the token that ends a reply; the model makes it
    const char *foot;           // behind end
    const char *stops;          // further tokens that end a reply, blank-separated
    const char *system;         // the default system text; NULL: no system message unless given
    int in_user;                // 1: the system message stands behind `user` of the first turn
    int always;                 // 1: there is a system message even when its text is empty
    int trim;                   // TRIM_*
} TemplateText;

#define LLAMA3(label, lines, must) { \
    .name = label, .needs = "<|start_header_id|>", .open = "{bos}", \
    .sys = "<|start_header_id|>system<|end_header_id|>\n\n" lines, .sys_end = "<|eot_id|>", \
    .user = "<|start_header_id|>user<|end_header_id|>\n\n", .user_end = "<|eot_id|>", \
    .head = "<|start_header_id|>assistant<|end_header_id|>\n\n", \
    .end = "<|eot_id|>", .stops = "<|eom_id|> <|end_of_text|>", .always = must, .trim = TRIM_BOTH }

// The date is fixed, so that a dialogue has the same ids every day.
#define LLAMA31_LINES "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"

#define CHATML(label, off) { \
    .name = label, .needs = "<|im_start|>", \
    .sys = "<|im_start|>system\n", .sys_end = "<|im_end|>\n", \
    .user = "<|im_start|>user\n", .user_end = "<|im_end|>\n", \
    .head = "<|im_start|>assistant\n", .no_think = off, \
    .end = "<|im_end|>", .foot = "\n", .stops = "<|endoftext|>" }

#define MISTRAL(label, before, after) { \
    .name = label, .needs = "{eos}", .open = "{bos}", .sys_end = "\n\n", \
    .user = before, .user_end = after, .end = "{eos}", .in_user = 1 }

static const TemplateText templates[] = {
    LLAMA3("llama3", "", 0),
    LLAMA3("llama3.1", LLAMA31_LINES, 1),
    LLAMA3("llama3.2", LLAMA31_LINES, 1),
    CHATML("chatml", NULL),
    CHATML("qwen3", "<think>\n\n</think>\n\n"),
    MISTRAL("mistral-v1", "[INST] ", " [/INST]"),
    MISTRAL("mistral-v1-spaced", " [INST] ", " [/INST]"),
    MISTRAL("mistral-v3", "[INST] ", "[/INST]"),
    MISTRAL("mistral-tekken", "[INST]", "[/INST]"),
    {
        .name = "llama2", .needs = "{eos}",
        .sys = "<<SYS>>\n", .sys_end = "\n<</SYS>>\n\n",
        .user = "{bos}[INST] ", .user_end = " [/INST]",
        .end = "{eos}", .in_user = 1, .trim = TRIM_WHOLE
    },
    {
        .name = "tinyllama", .needs = "{eos}",
        .sys = "<|system|>\n", .sys_end = "{eos}\n",
        .user = "<|user|>\n", .user_end = "{eos}\n",
        .head = "<|assistant|>\n", .end = "{eos}", .foot = "\n"
    },
    {
        .name = "vicuna", .needs = "{eos}", .open = "{bos}",
        .sys_end = " ",
        .user = "USER: ", .user_end = " ",
        .head = "ASSISTANT:", .end = "{eos}",
        .system = "A chat between a curious user and an artificial intelligence assistant. "
                  "The assistant gives helpful, detailed, and polite answers to the user's questions."
    },
    {
        .name = "deepseek-r1", .needs = "<｜User｜>", .open = "{bos}",
        .user = "<｜User｜>",
        .head = "<｜Assistant｜>", .think = "<think>\n", .no_think = "<think>\n\n</think>\n\n",
        .end = "{eos}", .stops = "<｜end▁of▁sentence｜>"
    },
    { .name = "none", .sys_end = "\n" },        // the last: a folder without a program has it
};
enum { N_TEMPLATES = sizeof templates / sizeof *templates };

typedef struct {                // a family, fitted to a model
    TemplateText x;
    char *system;               // the default system text; NULL: none
    int *stop;                  // stb array: ids that end a reply, first the template's `end`
    int parse_user;             // 1: the user's text may name special tokens (--parse-special)
} Template;

static void template_free(Template *tp) {
    if (!tp) return;
    free(tp->system);
    arrfree(tp->stop);
    free(tp);
}

// The id of the {bos}, the {eos} or the longest special token that stands at s, and the length of
// its name in *len. -1: none stands there, or the tokenizer has no such token.
static int token_at(const Tokenizer *t, const char *s, int *len) {
    int best = -1;
    *len = 5;
    if (!strncmp(s, "{bos}", 5)) return t->bos;
    if (!strncmp(s, "{eos}", 5)) return t->eos;
    *len = 0;
    for (int i = 0; i < (int)arrlen(t->added); i++) {
        const Piece *p = &t->piece[t->added[i].id];
        if (!t->added[i].guarded || p->n_text <= *len) continue;
        if (strncmp(s, t->chars + p->text, (size_t)p->n_text)) continue;
        best = t->added[i].id;
        *len = p->n_text;
    }
    return best;
}

// A copy of n bytes, NUL-terminated; the caller frees it.
static char *text_copy(const char *s, size_t n) {
    char *copy = xmalloc(n + 1);
    memcpy(copy, s, n);
    copy[n] = 0;
    return copy;
}

// Does the text begin with {bos}? NULL does not.
static int opens_with_bos(const char *text) { return text && !strncmp(text, "{bos}", 5); }

// ---- Picking a family
// The family of a name, or NULL.
static const TemplateText *template_named(const char *name) {
    for (int k = 0; k < N_TEMPLATES; k++) {
        if (!strcmp(templates[k].name, name)) return &templates[k];
    }
    return NULL;
}

// The family of a Jinja program, or NULL when it is of none. The first rule whose two texts both
// stand in the program decides. A rule without a name refuses.
static const TemplateText *template_detect(const char *program) {
    static const struct { const char *has, *also, *name; } rule[] = {
        { "[SYSTEM_PROMPT]",     "",                       "" },
        { "<|start_header_id|>", "strftime_now",           "llama3.2" },
        { "<|start_header_id|>", "Cutting Knowledge Date", "llama3.1" },
        { "<|start_header_id|>", "",                       "llama3" },
        { "<｜Assistant｜>",     "",                       "deepseek-r1" },
        { "<|im_start|>",        "enable_thinking",        "qwen3" },
        { "<|im_start|>",        "",                       "chatml" },
        { "[INST]",              "<<SYS>>",                "llama2" },
        { "[INST]",              "' [INST] '",             "mistral-v1-spaced" },
        { "[INST]",              "\" [INST] \"",           "mistral-v1-spaced" },
        { "[INST]",              " [/INST]",               "mistral-v1" },
        { "[INST]",              "[INST] ",                "mistral-v3" },
        { "[INST]",              "",                       "mistral-tekken" },
        { "<|user|>",            "eos_token",              "tinyllama" },
        { "USER:",               "ASSISTANT:",             "vicuna" },
    };
    for (size_t i = 0; i < sizeof rule / sizeof *rule; i++) {
        if (strstr(program, rule[i].has) && strstr(program, rule[i].also))
            return template_named(rule[i].name);
    }
    return NULL;
}

// The default system text of a chatml program: the words that the program itself writes between
// "<|im_start|>system\n" and "<|im_end|>". NULL: it writes none. The caller frees the text.
static char *chatml_system(const char *program) {
    static const char *const open[] = { "<|im_start|>system\\n", "<|im_start|>system\n" };
    for (int i = 0; i < 2; i++) {
        const char *p = strstr(program, open[i]);
        for (; p; p = strstr(p, open[i])) {
            p += strlen(open[i]);
            const char *end = strstr(p, "<|im_end|>");
            size_t n = end ? (size_t)(end - p) : 0;
            if (n && strcspn(p, "'\"{}\\") >= n) return text_copy(p, n);   // words only, no code
        }
    }
    return NULL;
}

// The program in a parsed tokenizer_config.json: its chat_template is a text, or a list of {name,
// template} of which "default" counts. Returns a copy, "" when there is none, NULL and err when the
// member is neither.
static char *config_program(const Json *config, const char *file, char err[512]) {
    const Json *c = json_get(config, "chat_template");
    if (json_none(c)) return text_copy("", 0);
    if (c->type == JSON_ARRAY) {
        const Json *list = c;
        c = NULL;
        for (int i = 0; i < list->n; i++) {
            const Json *item = &list->item[i];
            if (!strcmp(json_text(item, "name"), "default")) c = json_get(item, "template");
        }
        if (!c) fault(err, "%s: chat_template is a list without a \"default\"", file);
    }
    if (!c) return NULL;
    if (c->type == JSON_STRING) return text_copy(c->str, c->len);
    fault(err, "%s: chat_template is neither a text nor a list", file);
    return NULL;
}

// The program of a folder: chat_template.jinja, else that of tokenizer_config.json. Returns a copy,
// "" when there is none, NULL and err when a file is broken.
static char *template_program(const char *dir, char err[512]) {
    char file[1200], why[256];
    size_t n;
    snprintf(file, sizeof file, "%.1100s/chat_template.jinja", dir);
    if (file_exists(file)) {
        char *text = read_plain_text(file, &n, why);
        if (!text) fault(err, "%s", why);
        return text;
    }

    snprintf(file, sizeof file, "%.1100s/tokenizer_config.json", dir);
    if (!file_exists(file)) return text_copy("", 0);
    char *text = read_file(file, &n, why);
    Json *j = text ? json_parse(text, n, why) : NULL;
    free(text);
    if (!j) {
        fault(err, "%s: %s", file, why);
        return NULL;
    }
    char *program = config_program(j, file, err);
    json_free(j);
    return program;
}

// ---- Fitting a family to a model
// The id of the token that stands at s; -1 and err when the tokenizer does not have it. show: how
// many bytes of s the message shows.
static int template_token(const Template *tp, const Tokenizer *t, const char *s, int show,
                          char err[512]) {
    int len, id = token_at(t, s, &len);
    if (id < 0)
        fault(err, "chat template %s needs the token %.*s, which this tokenizer does not have",
              tp->x.name, show, s);
    return id;
}

// Checks that the tokenizer has the tokens that the template needs, and fills tp->stop. Returns 0,
// or
// -1 with the reason in err.
static int template_fit(Template *tp, const Tokenizer *t, char err[512]) {
    const TemplateText *x = &tp->x;
    if (opens_with_bos(x->open) && template_token(tp, t, x->open, 5, err) < 0) return -1;
    if (opens_with_bos(x->user) && template_token(tp, t, x->user, 5, err) < 0) return -1;
    if (x->needs && template_token(tp, t, x->needs, 100, err) < 0) return -1;
    if (x->end) {
        int id = template_token(tp, t, x->end, 100, err);
        if (id < 0) return -1;
        arrput(tp->stop, id);
    }

    // The further stop tokens, as far as the tokenizer has them.
    const char *s = x->stops ? x->stops : "";
    while (*s) {
        size_t n = strcspn(s, " ");
        int id = text_id(t, s, n);
        if (id >= 0 && id != tp->stop[0]) arrput(tp->stop, id);
        s += n;
        s += strspn(s, " ");
    }
    return 0;
}

// The template of family x. program: the Jinja program that chose it, or NULL. NULL and err when
// the tokenizer lacks a token.
static Template *template_make(const TemplateText *x, const char *program, const Tokenizer *t,
                               char err[512]) {
    Template *tp = xcalloc(1, sizeof *tp);
    tp->x = *x;
    int chatml = x->needs && !strcmp(x->needs, "<|im_start|>");
    if (x->system) tp->system = text_copy(x->system, strlen(x->system));
    else if (program && chatml) tp->system = chatml_system(program);

    // The programs of R1's first releases do not open the thought themselves.
    if (program && !strstr(program, "<｜Assistant｜><think>")) tp->x.think = NULL;
    if (template_fit(tp, t, err)) {
        template_free(tp);
        return NULL;
    }
    return tp;
}

// The program in the file that --chat-template names; NULL and err, with the names of the families,
// when it cannot be read.
static char *program_file(const char *name, char err[512]) {
    char why[256];
    size_t n;
    char *program = read_plain_text(name, &n, why);
    if (program) return program;
    int used = snprintf(err, 512, "chat template '%.200s' is neither a readable file nor one of", name);
    for (int k = 0; k < N_TEMPLATES; k++) {
        used += snprintf(err + used, (size_t)(512 - used), " %s", templates[k].name);
    }
    return NULL;
}

// The template of a model whose folder is dir. name: a family, or the path of a Jinja program;
// NULL: what the folder says, and "none" when it says nothing. NULL and err when it is refused.
static Template *template_load(const char *dir, const char *name, const Tokenizer *t,
                               char err[512]) {
    const TemplateText *x = name ? template_named(name) : NULL;
    if (x) return template_make(x, NULL, t, err);

    char *program = name ? program_file(name, err) : template_program(dir, err);
    if (!program) return NULL;
    x = *program ? template_detect(program) : &templates[N_TEMPLATES - 1];
    Template *tp = NULL;
    if (x)
        tp = template_make(x, program, t, err);
    else
        fault(err, "this chat template is not supported: %.100s... "
              "(name one with --chat-template, or use --raw)", program);
    free(program);
    return tp;
}

// ---- Rendering a turn
// Plain text collects until a token cuts it off. So the user's words and the template's own text,
// where they touch, are encoded together, as they are when a whole dialogue is encoded.
typedef struct {                // a place in the turn
    int at;                     // ids of the turn that stand before it
    int *upto;                  // stb array: ids of `plain` up to the place, while that is inside
} RenderMark;
typedef struct {
    const Template *tp;
    const Tokenizer *t;
    char *plain;                // stb array: text that is not encoded yet
    int *ids;                   // stb array: what comes out
    int from;                   // where this turn begins in ids
    int at_start;               // 1: everything begins with the plain text
    int special;                // 1: the plain text may name special tokens
    RenderMark mark[2];
} Render;

// Encodes the plain text. A mark inside it goes behind the ids with which both encodings begin,
// that of the text up to the mark and that of the whole text.
static void render_flush(Render *r) {
    if (!arrlen(r->plain)) return;
    int before = (int)arrlen(r->ids);
    r->ids = encode_at(r->t, r->plain, arrlenu(r->plain), r->special, r->at_start, r->ids);

    int added = (int)arrlen(r->ids) - before;
    for (int k = 0; k < 2; k++) {
        int *upto = r->mark[k].upto, same = 0;
        int n = min_int((int)arrlen(upto), added);
        while (same < n && upto[same] == r->ids[before + same]) same++;
        r->mark[k].at += same;
        if (upto) arrsetlen(upto, 0);
    }
    arrsetlen(r->plain, 0);
    r->at_start = 0;
    r->special = 0;
}

// Appends a text of the template; NULL is nothing.
static void render_text(Render *r, const char *s) {
    int len;
    for (; s && *s; s += len) {
        int id = token_at(r->t, s, &len);
        if (id >= 0) {
            render_flush(r);
            arrput(r->ids, id);
            r->at_start = 0;
        } else {
            arrput(r->plain, *s);
            len = 1;
        }
    }
}

// Appends a text of a person. trim_left, trim_right: 1 where the white space at that end goes.
static void render_words(Render *r, const char *s, int trim_left, int trim_right) {
    size_t n = strlen(s);
    int len;
    while (trim_left && n && is_space(s, n, &len)) {
        s += len;
        n -= (size_t)len;
    }
    while (trim_right) {
        size_t blank = space_before(s, 0, n);
        if (!blank) break;
        n -= blank;
    }
    if (r->tp->parse_user) r->special = 1;
    bytes_put(&r->plain, s, n);
}

// Sets mark k here.
static void render_mark(Render *r, int k) {
    RenderMark *m = &r->mark[k];
    m->at = (int)arrlen(r->ids) - r->from;
    if (!arrlen(r->plain)) return;
    m->upto = encode_at(r->t, r->plain, arrlenu(r->plain), r->special, r->at_start, m->upto);
}

// Renders the system message, if the first turn has one. Returns 1 when it has.
static int render_system(Render *r, const char *system) {
    const TemplateText *x = &r->tp->x;
    int trim = x->trim == TRIM_BOTH;
    if (!*system && !x->always) return 0;
    render_text(r, x->sys);
    render_words(r, system, trim, trim);
    render_text(r, x->sys_end);
    return 1;
}

// Appends the ids of one turn to the stb array ids and returns it.
//
// first: the dialogue begins, so BOS and the system message come before the words (system NULL: the
// template's default; "": none). In a later turn what closes the reply before comes first;
// reply_closed says that the reply's last token, `end`, is in the cache already. think, for models
// that can: 1 leaves thinking to the template, 0 turns it off.
//
// *n_sys, *n_foot: ids at the start that are BOS and system message, or close the reply before.
// *n_head: ids at the end that open the next reply.
static int *template_turn(const Template *tp, const Tokenizer *t, int first, const char *system,
                          const char *user, int think, int reply_closed, int *ids,
                          int *n_sys, int *n_foot, int *n_head) {
    enum {                      // the marks
        BODY,                   // behind the system message, or behind what closes the reply before
        HEAD                    // before what opens the reply
    };
    const TemplateText *x = &tp->x;
    Render r = { .tp = tp, .t = t, .ids = ids, .from = (int)arrlen(ids), .at_start = first };
    int has_system = 0;

    // What stands before the words
    if (first) {
        int writes_bos = opens_with_bos(x->open) || opens_with_bos(x->user);
        if (t->add_bos && !writes_bos) arrput(r.ids, t->bos);
        render_text(&r, x->open);
    } else {
        if (!reply_closed) render_text(&r, x->end);
        render_text(&r, x->foot);
        render_mark(&r, BODY);
    }
    if (x->in_user) render_text(&r, x->user);
    if (first) {
        if (!system) system = tp->system ? tp->system : "";
        has_system = render_system(&r, system);
        render_mark(&r, BODY);
    }
    if (!x->in_user) render_text(&r, x->user);

    // The words. TRIM_WHOLE trims them at the left only where no system text stands before them.
    int trim_left = x->trim == TRIM_BOTH || (x->trim == TRIM_WHOLE && !has_system);
    render_words(&r, user, trim_left, x->trim != TRIM_NONE);

    // What opens the reply: head, or without a head what ends the words
    if (!x->head) render_mark(&r, HEAD);
    render_text(&r, x->user_end);
    if (x->head) render_mark(&r, HEAD);
    render_text(&r, x->head);
    render_text(&r, think ? x->think : x->no_think);
    render_flush(&r);

    *n_sys = first ? r.mark[BODY].at : 0;
    *n_foot = first ? 0 : r.mark[BODY].at;
    *n_head = (int)arrlen(r.ids) - r.from - r.mark[HEAD].at;
    arrfree(r.plain);
    arrfree(r.mark[BODY].upto);
    arrfree(r.mark[HEAD].upto);
    return r.ids;
}

// ---- Does the tokenizer belong to the model?
// The first id without a row in the embedding that the template writes around a first turn or a
// later one, or -1 when all have rows.
static int template_stray_id(const Template *tp, const Tokenizer *t, const Config *c) {
    int stray = -1, n_sys, n_foot, n_head;
    for (int way = 0; way < 8 && stray < 0; way++) {
        int first = way & 1, think = way >> 1 & 1, reply_closed = way >> 2;
        int *ids = template_turn(tp, t, first, "a", "a", think, reply_closed, NULL, &n_sys, &n_foot, &n_head);
        int n = (int)arrlen(ids), known = ids_with_rows(c, ids, n);
        if (known < n) stray = ids[known];
        arrfree(ids);
    }
    return stray;
}

// Has the embedding a row for every id that any dialogue needs: those of the BPE vocabulary, the
// tokens with a role, and what the template (NULL: none) writes? Returns 0, or -1 with the reason in
// err.
//
// Other added tokens may lie behind the last row. Published checkpoints have a <pad> there, or
// tokens kept for later, and their model never sees them. Such a token is refused only in a text
// that names it.
static int tokenizer_fits(const Tokenizer *t, const Template *tp, const Config *c, char err[512]) {
    int vocab = tokenizer_size(t) - 1;
    while (vocab >= c->V && (t->piece[vocab].flags & (PIECE_MODEL | PIECE_ADDED)) != PIECE_MODEL) vocab--;
    const struct { const char *what; int id; } needed[] = {
        { "the tokenizer's vocabulary goes up to", vocab },
        { "the tokenizer's BOS is", t->add_bos ? t->bos : -1 },
        { "the tokenizer's EOS is", t->eos },
        { "the tokenizer's unknown token is", t->unk },
        { "the chat template writes", tp ? template_stray_id(tp, t, c) : -1 },
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (needed[i].id >= c->V)
            return fault(err, "%.300s: %s token id %d, the embedding has %d rows: tokenizer and model do not "
                         "belong together", c->dir, needed[i].what, needed[i].id, c->V);
    }
    return 0;
}

// ==================================================================================================== 23 MEMORY PLAN
// What a dialogue will take, before it takes it, worked out from the shapes. --inspect prints it, and
// a device that cannot hold it is refused before the first turn (device_bars).

// The most rows a KV head keeps of a dialogue of ctx tokens.
static int rows_kept(const Session *s, int ctx, int evicts) {
    if (!evicts) return ctx;
    if (s->ratio >= 0) return ctx - (int)(ctx * s->ratio);
    return s->budget ? min_int(s->budget, ctx) : ctx;
}

// Bytes that a part's index, bounds or adapter take when ctx tokens are held.
static size_t part_bytes(const Session *s, const Part *p, int ctx) {
    if (p->m->plan) return p->m->plan(s, p->ms, ctx);
    return p->m->bytes ? p->m->bytes(s, p->ms) : 0;
}

// The rooms of the largest pass there is, a turn of ctx tokens. hooks 1: some hook sees the whole
// turn, so queries of all its tokens live at once, and scores of every row may be needed. sparse 1:
// a sparse prefill samples probabilities. These are the rooms of pass_cuda; the CPU needs the same
// but for the halves, the pieces and the second copy of a head.
static size_t pass_bytes(const Session *s, int ctx, int hooks, int sparse) {
    const Config *c = s->c;
    size_t f = sizeof(float), T = ctx, H = c->H, G = c->G, D = c->D, C = c->C, F = c->F, V = c->V;
    size_t block = min_int(s->batch, ctx);          // tokens of a product
    size_t span = hooks ? T : block;                // tokens whose queries live at once
    size_t row = s->fk->row_bytes(c->D) + s->fv->row_bytes(c->D);

    size_t residual    = T * (C + D) * f;                   // x and the RoPE angles
    size_t projections = 2 * span * (H + G) * D * f;        // q and what attention makes of it, k, v
    size_t mlp         = block * (C + 2 * F) * f;           // h, gate, up
    size_t halves      = 2 * block * max_size(F, H * D);    // a product's input in 16 bits
    size_t n_pieces    = 512 + (span * H / 32 + G);         // 512, and one a block of 32 queries
    size_t pieces      = n_pieces * 32 * (D + 2) * f;       // of attention without tensor cores
    size_t sums        = 2 * span * H * f;                  // maximum and sum of every query
    size_t logits      = V * f;
    size_t tokens      = T * (sizeof(Token) + sizeof(int));
    size_t second_copy = round_to_step(T) * row;            // of a head that grows
    size_t scores      = H * T * f;
    size_t gather      = hooks ? 3 * scores : 0;            // hooks choose rows by the scores of all
    size_t samples     = sparse ? min_size(64 * scores, (size_t)1 << 30) : 0;      // line_batch_cuda

    size_t all = residual + projections + mlp + halves + pieces + sums + logits + tokens
               + second_copy + gather + samples;
    return all + all / 4;                                   // rooms grow by more than is asked for
}

// What a dialogue of -c tokens takes. kv: the rows kept in every layer, and one layer uncompressed,
// because a prefill compresses layer by layer. PATS packs when a prefill is over: until then its
// rows are f16 rows, and they are counted as such.
MemoryPlan memory_plan(const Session *s) {
    const Config *c = s->c;
    int ctx = opt_int(s->opt, "ctx-size"), hooks = s->rule != VIS_CAUSAL, evicts = 0, sparse = 0;
    if (!ctx) ctx = c->max_pos;

    MemoryPlan p = { .weights = s->w->bytes, .ctx = ctx };
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        hooks |= m->project || m->attend || m->commit;
        evicts |= m->evicts;
        sparse |= m->attend && m->role & ROLE_PREFILL;
        p.parts += part_bytes(s, &s->part[i], ctx);
    }
    size_t row = s->fk->row_bytes(c->D) + s->fv->row_bytes(c->D) + sizeof(int);
    size_t held = round_to_step(rows_kept(s, ctx, evicts)), uncompressed = round_to_step(ctx);
    p.kv = ((c->L - 1) * held + uncompressed) * c->G * row;
    p.pass = pass_bytes(s, ctx, hooks, sparse);
    return p;
}

// ####################################################################################################
// PART III: WHAT PEOPLE USE IT THROUGH
// ####################################################################################################

// ==================================================================================================== 24 GENERATION AND RECORDS
// An App is what the command line opened: a model, a tokenizer, a template, one session, and the
// record of its turns. The record is the whole dialogue as ids. Because a session computes the same
// bits for the same ids, the record is enough to make a dialogue anew: /method, /regen, /load and
// --session all replay it from an empty cache. stdout gets generated text or the asked-for result;
// everything else goes to stderr.

typedef struct {            // one turn of the record
    int *pre;               // ids fed by one prefill (stb_ds array)
    int *dec;               // ids fed by decode, one after the other (stb_ds array)
    int n_sys;              // leading ids of pre that are the system message
    int n_foot;             // leading ids of pre that end the previous reply
    int n_head;             // trailing ids of pre that open the next reply
} Turn;

typedef struct {
    Options *o;
    Config *c;
    Weights *w;
    Tokenizer *tok;         // NULL with --ids on a folder without a tokenizer
    Template *tp;           // NULL: raw text
    Session *s;
    char *method;           // the spec the session was opened with
    Turn *turn;             // the record (stb_ds array)
    float *logits;          // (V) after the last prefill or decode, a copy
    uint64_t rng;           // the sampler's state
    int closed;             // 1: the reply's end-of-turn id is already in the cache
    double ttft;            // seconds from the start of the last prefill to its logits
} App;

static volatile sig_atomic_t interrupts;        // Ctrl-C since the reply began
static int quiet;                               // --quiet: errors only on stderr

// ---- progress
static double progress_start;
static int progress_shown;

// Shows how far a long piece of work is, as one line on stderr that is rewritten. share 0 begins,
// share 1 ends and clears the line. The line appears only on a terminal, and only when the work has
// taken a second.
static void progress(const char *what, double share) {
    if (quiet || !isatty(2)) return;
    if (share <= 0) {
        progress_start = now();
        progress_shown = 0;
    } else if (share >= 1) {
        if (progress_shown) fprintf(stderr, "\r\x1b[K");
        progress_shown = 0;
    } else if (now() - progress_start >= 1) {
        fprintf(stderr, "\r%s %3.0f %%", what, 100 * share);
        progress_shown = 1;
    }
}

// ---- sampling: repeat penalty, top-k, top-p, min-p, temperature, in this order
typedef struct {            // an id that may be drawn
    float x;                // its logit, after the penalty
    int id;
} Cand;

// Order for qsort: larger logits first, equal ones by id.
static int cand_order(const void *a, const void *b) {
    const Cand *p = a, *q = b;
    if (p->x < q->x) return 1;
    if (p->x > q->x) return -1;
    return p->id - q->id;
}

// The index of the largest of x (n); the first of equal ones.
static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// Is id among these n tokens?
static int id_among(const Token *tok, int n, int id) {
    for (int i = 0; i < n; i++)
        if (tok[i].id == id) return 1;
    return 0;
}

// --repeat-penalty: every id among the last --repeat-last-n tokens has its logit in x (V) divided
// by the penalty if positive, multiplied by it if negative, once however often the id occurs. A
// method's own tokens (id < 0) have no logit.
static void penalise(const App *a, float *x) {
    double penalty = opt_real(a->o, "repeat-penalty");
    int last = opt_int(a->o, "repeat-last-n"), n = a->s->n_tok;
    if (penalty == 1) return;
    int from = max_int(n - last, 0);
    const Token *recent = a->s->tok + from;
    for (int i = 0; i < n - from; i++) {
        int id = recent[i].id;
        if (id < 0 || id_among(recent, i, id)) continue;
        x[id] = (float)(x[id] > 0 ? x[id] / penalty : x[id] * penalty);
    }
}

// --top-k: the k largest of x (V), the best first, in scratch memory. k <= 0: all of them. *n: how
// many they are.
static Cand *best_candidates(Session *s, const float *x, int V, int k, int *n) {
    int *idx = scratch(s, (size_t)V * sizeof *idx);
    if (k <= 0 || k > V) k = V;
    *n = top_k(x, V, k, idx);
    Cand *c = scratch(s, (size_t)*n * sizeof *c);
    for (int i = 0; i < *n; i++) c[i] = (Cand){ x[idx[i]], idx[i] };
    qsort(c, *n, sizeof *c, cand_order);
    return c;
}

// How many of the n sorted candidates stay. --top-p: the fewest whose probabilities sum to top_p.
// --min-p: those with at least min_p times the probability of the best. The best always stays.
static int probable_candidates(const Cand *c, int n, double top_p, double min_p) {
    double sum = 0, seen = 0;
    float top = c[0].x;
    for (int i = 0; i < n; i++) sum += exp(c[i].x - top);
    int keep = 0;
    for (; keep < n; keep++) {
        double weight = exp(c[keep].x - top);
        if (keep && (seen >= top_p || weight < min_p)) break;
        seen += weight / sum;
    }
    return keep;
}

// Draws one of n candidates with probability proportional to exp(logit / temp), and returns its id.
static int draw(const Cand *c, int n, double temp, uint64_t *rng) {
    double z = 0;
    float top = c[0].x;
    for (int i = 0; i < n; i++) z += exp((c[i].x - top) / temp);
    double r = (double)(splitmix64(rng) >> 11) / 9007199254740992.0 * z;   // 53 bits: uniform in [0,z)
    int pick = 0;
    for (; pick < n - 1; pick++) {
        r -= exp((c[pick].x - top) / temp);
        if (r < 0) break;
    }
    return c[pick].id;
}

// The next id, drawn from the App's logits as the sampling options say. --temp 0 takes the largest
// logit and leaves the random numbers alone.
static int sample(App *a) {
    int V = a->c->V, id;
    double temp = opt_real(a->o, "temp");
    size_t mark = scratch_mark(a->s);
    float *x = scratch(a->s, (size_t)V * sizeof *x);
    memcpy(x, a->logits, (size_t)V * sizeof *x);
    penalise(a, x);
    if (temp <= 0) {
        id = argmax(x, V);
    } else {
        int n;
        Cand *c = best_candidates(a->s, x, V, opt_int(a->o, "top-k"), &n);
        n = probable_candidates(c, n, opt_real(a->o, "top-p"), opt_real(a->o, "min-p"));
        id = draw(c, n, temp, &a->rng);
    }
    scratch_reset(a->s, mark);
    return id;
}

// ---- the record
// Frees the ids of one turn.
static void turn_free(Turn t) {
    arrfree(t.pre);
    arrfree(t.dec);
}

// Frees the turns of an stb_ds array; the array stays, empty.
static void turns_clear(Turn *turns) {
    while (arrlen(turns)) turn_free(arrpop(turns));
}

// Forgets all turns; the session keeps its rows until it is reset.
static void record_clear(App *a) { turns_clear(a->turn); }

// The turn that the next message of the record prefills: text as the chat template renders it
// behind the turns so far, or, without a template, the plain text, with BOS in front of the first
// turn where the tokenizer adds one.
static Turn render_turn(const App *a, const char *text) {
    Turn t = { 0 };
    int first = !arrlen(a->turn);
    if (a->tp) {
        const char *system = opt_given(a->o, "system") ? opt_str(a->o, "system") : NULL;
        int think = !opt_int(a->o, "no-think");
        t.pre = template_turn(a->tp, a->tok, first, system, text, think, a->closed, NULL,
                              &t.n_sys, &t.n_foot, &t.n_head);
    } else {
        if (first && a->tok->add_bos) arrput(t.pre, a->tok->bos);
        t.pre = tokenizer_encode(a->tok, text, strlen(text), opt_int(a->o, "parse-special"), t.pre);
    }
    return t;
}

// One prefill of a turn's ids; the logits of the last one and the time it took stay in the App.
static void feed_prefill(App *a, const Turn *t) {
    double t0 = now();
    a->s->n_sys = t->n_sys;
    a->s->n_foot = t->n_foot;
    a->s->n_head = t->n_head;
    progress("prefill", 0);
    memcpy(a->logits, prefill(a->s, t->pre, (int)arrlen(t->pre)), (size_t)a->c->V * sizeof(float));
    progress("prefill", 1);
    a->ttft = now() - t0;
}

// One decode step; its logits stay in the App.
static void feed_decode(App *a, int id) {
    memcpy(a->logits, decode(a->s, id), (size_t)a->c->V * sizeof(float));
}

// Feeds the first turns of the record once more, from an empty cache. The same method gives the
// same bits.
static void replay(App *a, int turns) {
    session_reset(a->s);
    for (int i = 0; i < turns; i++) {
        const Turn *t = &a->turn[i];
        feed_prefill(a, t);
        for (int j = 0; j < (int)arrlen(t->dec); j++) feed_decode(a, t->dec[j]);
    }
}

// Do these turns, fed from an empty cache, fit into the positions that the method of s has? 0, or
// -1 with err.
static int record_fits(const Session *s, const Turn *turns, char err[512]) {
    long n = 0;
    for (int i = 0; i < (int)arrlen(turns); i++)
        n += (long)arrlen(turns[i].pre) + (long)arrlen(turns[i].dec) + s->pos_extra;
    if (!s->pos_end || n <= s->pos_end) return 0;
    snprintf(err, 512, "the dialogue takes %ld positions, this method goes to max_position_embeddings %d",
             n, s->pos_end);
    return -1;
}

// ---- generating a reply
// The most rows a head may hold: -c, or with -c 0 the model's own limit.
static int ctx_limit(const App *a) {
    int c = opt_int(a->o, "ctx-size");
    return c ? c : a->c->max_pos;
}

// The rows of the longest head of any layer.
static int rows_held(const App *a) {
    int n = 0;
    for (int l = 0; l < a->c->L; l++) n = max_int(n, kv_longest(a->s, l));
    return n;
}

// Does every head have room for n more rows?
static int rows_fit(const App *a, int n) { return rows_held(a) + n <= ctx_limit(a); }

// Does id end a reply? Ids of the config, of the tokenizer and of the template do, unless
// --ignore-eos.
static int is_stop(const App *a, int id) {
    if (opt_int(a->o, "ignore-eos")) return 0;
    for (int i = 0; i < a->c->n_eos; i++)
        if (a->c->eos[i] == id) return 1;
    if (a->tok && a->tok->eos == id) return 1;
    for (int i = 0; a->tp && i < (int)arrlen(a->tp->stop); i++)
        if (a->tp->stop[i] == id) return 1;
    return 0;
}

// Writes the bytes of the stb_ds array *text at once, so that they are seen while the reply goes
// on, and empties it. A terminal gets the control characters in them shown, because it would obey
// them; a file or a pipe gets the bytes.
static void write_text(char **text, FILE *out) {
    size_t n = arrlenu(*text);
    if (n && isatty(fileno(out))) show(out, *text, n);
    else if (n) fwrite(*text, 1, n, out);
    arrsetlen(*text, 0);
    fflush(out);
}

// May a reply go on by one token? It needs a row and a position; when there is none, a line on
// stderr says so.
static int reply_has_room(const App *a) {
    if (!rows_fit(a, 1)) {
        fprintf(stderr, "\nkvcomp: the context is full: %d rows held, -c %d "
                        "(a method that drops rows, or a larger -c, goes on)\n", rows_held(a), ctx_limit(a));
        return 0;
    }
    if (!pos_fits(a->s, 1, 0)) {
        fprintf(stderr, "\nkvcomp: the positions are used up: %s goes to max_position_embeddings %d\n",
                a->method, a->s->pos_end);
        return 0;
    }
    return 1;
}

// Makes a reply: decodes until a stop id, n tokens (n < 0: no limit), a full context or Ctrl-C, and
// writes the text to out as whole UTF-8 characters. Its ids go into the record's last turn; the
// stop id is neither fed nor recorded. Returns the number of tokens made.
static int generate(App *a, int n, FILE *out) {
    int made = 0;
    Decoder d = { .t = a->tok, .skip_special = 1 };
    char *text = NULL;
    a->closed = 0;
    while ((n < 0 || made < n) && !interrupts) {
        int id = sample(a);
        if (is_stop(a, id)) break;
        text = decode_token(&d, id, text);
        write_text(&text, out);
        if (!reply_has_room(a)) break;
        arrput(arrlast(a->turn).dec, id);
        feed_decode(a, id);
        made++;
    }
    text = decode_flush(&d, text);
    write_text(&text, out);
    arrfree(text);
    return made;
}

// ---- results: what the numbers mean
// n per second; 0 before any time has passed.
static double rate(long n, double seconds) { return seconds > 0 ? (double)n / seconds : 0; }

// Bytes of K and V rows that attention reads in a decode step, the mean over all steps; 0 before
// the first.
static double bytes_a_step(const Session *s) {
    return s->clk.steps ? s->clk.bytes_attended / (double)s->clk.steps : 0;
}

// Do the parts choose what is computed or read, while every row stays stored as it came?
static int saves_reads_only(const Session *s) {
    int role = 0;
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        if (m->evicts || m->role & ROLE_STORE) return 0;
        role |= m->role;
    }
    return role != 0;
}

// What the method is for: "reads" (or prefill work), "memory", or "nothing".
static const char *what_is_saved(const Session *s) {
    if (saves_reads_only(s)) return "reads";
    if (s->n_part == 1 && !s->part[0].m->role) return "nothing";       // full
    return "memory";
}

// The name of a DT_* constant.
static const char *dtype_name(int dt) {
    if (dt == DT_F32) return "f32";
    return dt == DT_F16 ? "f16" : "bf16";
}

// n bytes in the unit that leaves a number below 1000: "840 B", "1.2 MB", "120 MB".
static void human_bytes(double n, char out[32]) {
    const char *unit[] = { "B", "KB", "MB", "GB", "TB" };
    int i = 0;
    while (n >= 1000 && i < 4) {
        n /= 1000;
        i++;
    }
    snprintf(out, 32, i && n < 100 ? "%.1f %s" : "%.0f %s", n, unit[i]);
}

// ---- results as JSON (--json)
// "key":"text", with the comma behind it.
static void json_pair(FILE *f, const char *key, const char *text) {
    fprintf(f, "\"%s\":", key);
    json_escape(f, text, strlen(text));
    fputc(',', f);
}

// The options that the user set, as one object.
static void json_options(const App *a, FILE *f) {
    fprintf(f, "\"options\":{");
    for (int i = 0; i < (int)shlen(a->o->given); i++) {
        const char *name = a->o->given[i].key, *value = opt_str(a->o, name);
        if (i) fputc(',', f);
        fprintf(f, "\"%s\":", name);
        json_escape(f, value, strlen(value));
    }
    fprintf(f, "}");
}

// ,"rows": [layer][KV head] = the source tokens of the rows held.
static void json_rows(const Session *s, FILE *f) {
    fprintf(f, ",\"rows\":[");
    for (int l = 0; l < s->c->L; l++) {
        fputs(l ? ",[" : "[", f);
        for (int g = 0; g < s->c->G; g++) {
            const KVHead *h = kv_head(s, l, g);
            fputs(g ? ",[" : "[", f);
            for (int r = 0; r < h->len; r++) fprintf(f, "%s%d", r ? "," : "", h->src[r]);
            fputs("]", f);
        }
        fputs("]", f);
    }
    fprintf(f, "]");
}

// ,"views": [layer][query head] = the row numbers that the last decode step read: idx, and every
// row from tail on. An empty idx with tail 0 is every row.
static void json_views(const Session *s, FILE *f) {
    fprintf(f, ",\"views\":[");
    for (int l = 0; l < s->c->L; l++) {
        fputs(l ? ",[" : "[", f);
        for (int h = 0; h < s->c->H; h++) {
            const View w = view_of(s, l, h);
            fprintf(f, "%s{\"tail\":%d,\"idx\":[", h ? "," : "", w.tail);
            for (int i = 0; i < w.n; i++) fprintf(f, "%s%d", i ? "," : "", w.idx[i]);
            fputs("]}", f);
        }
        fputs("]", f);
    }
    fprintf(f, "]");
}

// Tokens of the session, tokens a second, and milliseconds to the last prefill's logits.
static void json_speed(const App *a, FILE *f) {
    const Clock *k = &a->s->clk;
    fprintf(f, "\"n_prompt\":%ld,\"n_gen\":%ld,", k->n_prefill, k->n_decode);
    fprintf(f, "\"pp_tok_s\":%.3f,", rate(k->n_prefill, k->prefill));
    fprintf(f, "\"tg_tok_s\":%.3f,", rate(k->n_decode, k->decode));
    fprintf(f, "\"ttft_ms\":%.3f,", 1e3 * a->ttft);
}

// Bytes of the cache: held, what full attention would hold, read in a decode step, of indexes and
// views, held at most.
static void json_bytes(const Session *s, FILE *f) {
    fprintf(f, "\"kv_bytes_stored\":%zu,\"kv_bytes_full\":%zu,", kv_bytes(s), kv_bytes_full(s));
    fprintf(f, "\"kv_bytes_attended\":%.0f,\"meta_bytes\":%zu,", bytes_a_step(s), kv_meta_bytes(s));
    fprintf(f, "\"kv_bytes_peak\":%zu,", s->clk.peak);
}

// The whole run as one object on one line.
static void print_json(const App *a, FILE *f) {
    const Session *s = a->s;
    fprintf(f, "{");
    json_pair(f, "method", a->method);
    fprintf(f, "\"budget\":%d,", s->turn ? s->applied : budget_now(s));
    json_pair(f, "model", a->c->dir);
    json_pair(f, "dtype", dtype_name(a->c->dtype));
    json_pair(f, "device", s->dev ? "cuda" : "cpu");
    json_pair(f, "saves", what_is_saved(s));
    json_speed(a, f);
    json_bytes(s, f);
    fprintf(f, "\"attend_s\":%.6f,\"select_s\":%.6f,\"commit_s\":%.6f,\"index_s\":%.6f,",
            s->clk.attend, s->clk.select, s->clk.commit, s->clk.index);
    fprintf(f, "\"seed\":%d,\"simd\":\"%s\",", opt_int(a->o, "seed"), simd_name());
    fprintf(f, "\"build\":\"%s\",", KVCOMP_VERSION);
    json_options(a, f);
    if (opt_int(a->o, "json-rows")) {
        json_rows(s, f);
        json_views(s, f);
    }
    fprintf(f, "}\n");
    fflush(f);
}

// ---- results for people
// The line after each reply: n_pre tokens prefilled, n_gen made in so many seconds.
static void print_summary(const App *a, int n_pre, int n_gen, double seconds) {
    const Session *s = a->s;
    char held[32], full[32];
    int lo = INT_MAX, hi = 0;
    if (quiet || opt_int(a->o, "no-stats")) return;
    for (int i = 0; i < a->c->L * a->c->G; i++) {
        lo = min_int(lo, s->head[i].len);
        hi = max_int(hi, s->head[i].len);
    }
    human_bytes((double)kv_bytes(s), held);
    human_bytes((double)kv_bytes_full(s), full);
    double share = 100.0 * (double)kv_bytes(s) / (double)kv_bytes_full(s);
    fprintf(stderr, "[turn %d | %d+%d tok | %.1f tok/s | KV %s of %s (%.1f %%) | kept/head %d..%d%s]\n",
            s->turn, n_pre, n_gen, rate(n_gen, seconds), held, full, share, lo, hi,
            saves_reads_only(s) ? " | saves reads, not memory" : "");
}

// /stats and --stats: three lines of the session, then what each part of the method says of itself.
static void print_stats(const App *a, FILE *f) {
    const Session *s = a->s;
    const Clock *k = &s->clk;
    char held[32], full[32], meta[32], peak[32], read[32];
    human_bytes((double)kv_bytes(s), held);
    human_bytes((double)kv_bytes_full(s), full);
    human_bytes((double)kv_meta_bytes(s), meta);
    human_bytes((double)k->peak, peak);
    human_bytes(bytes_a_step(s), read);
    fprintf(f, "method %s, %d tokens seen in %d turns, most rows in a head %d\n",
            a->method, s->n_tok, s->turn, rows_held(a));
    fprintf(f, "stored %s of %s, metadata %s, peak %s, read per decode step %s\n",
            held, full, meta, peak, read);
    fprintf(f, "prefill %ld tok at %.1f tok/s, decode %ld tok at %.1f tok/s; ",
            k->n_prefill, rate(k->n_prefill, k->prefill), k->n_decode, rate(k->n_decode, k->decode));
    fprintf(f, "seconds: attention %.3f, selection %.3f, bookkeeping %.3f, index %.3f\n",
            k->attend, k->select, k->commit, k->index);
    for (int i = 0; i < s->n_part; i++)
        if (s->part[i].m->stats) s->part[i].m->stats(s, s->part[i].ms, f);
}

// ---- --ids FILE: teacher forcing (D3)
// Each line is a turn: the ids to prefill, then optionally | and the ids to decode one by one.

// Reads the id that *p begins with into *id and moves *p behind it. 0, or -1 with err.
static int id_parse(const char **p, int V, int *id, char err[256]) {
    char *end;
    errno = 0;
    long value = strtol(*p, &end, 10);
    if (end == *p) {
        snprintf(err, 256, "'%.12s' is no id", *p);
        return -1;
    }
    if (errno || value < 0 || value >= V) {
        snprintf(err, 256, "id %ld is outside the vocabulary of %d", value, V);
        return -1;
    }
    *id = (int)value;
    *p = end;
    return 0;
}

// Appends the ids of the text [p,end) to the turn. 0, or -1 with err; the turn may then hold some
// ids.
static int ids_parse(const char *p, const char *end, int V, Turn *t, char err[256]) {
    int decoding = 0, id;
    while (p < end) {
        if (isspace((unsigned char)*p)) {
            p++;
        } else if (*p == '|') {
            if (decoding) {
                snprintf(err, 256, "a second '|'");
                return -1;
            }
            decoding = 1;
            p++;
        } else {
            if (id_parse(&p, V, &id, err)) return -1;
            if (decoding) arrput(t->dec, id);
            else arrput(t->pre, id);
        }
    }
    if (arrlen(t->pre)) return 0;
    snprintf(err, 256, "a turn needs ids to prefill before '|'");
    return -1;
}

// Is there nothing but white space in [p,end)?
static int is_blank(const char *p, const char *end) {
    while (p < end && isspace((unsigned char)*p)) p++;
    return p == end;
}

// The turns of a file, as a record; blank lines are skipped. Exit 2 with the line when there is
// something else in it.
static Turn *ids_read(const char *path, int V) {
    char err[256];
    size_t n;
    char *text = read_plain_text(path, &n, err);
    if (!text) die(EXIT_USAGE, "--ids %s", err);
    Turn *turns = NULL;
    const char *end = text + n, *line_end;
    int number = 1;
    for (const char *line = text; line < end; line = line_end + 1, number++) {
        line_end = line;
        while (line_end < end && *line_end != '\n') line_end++;
        if (is_blank(line, line_end)) continue;
        Turn t = { 0 };
        if (ids_parse(line, line_end, V, &t, err)) die(EXIT_USAGE, "%s:%d: %s", path, number, err);
        arrput(turns, t);
    }
    free(text);
    if (!turns) die(EXIT_USAGE, "--ids %s: no turn in the file", path);
    return turns;
}

// Appends one row of logits x (V) to the file, if there is one.
static void write_row(FILE *f, const float *x, int V, const char *path) {
    if (f && fwrite(x, sizeof *x, V, f) != (size_t)V) die(EXIT_RUN, "%s: %s", path, strerror(errno));
}

// Feeds the file's turns to the session, and writes the logits of every prefill and decode to
// --dump-logits.
static int run_ids(App *a) {
    const char *path = opt_str(a->o, "dump-logits");
    record_clear(a);
    a->turn = ids_read(opt_str(a->o, "ids"), a->c->V);
    FILE *f = *path ? fopen(path, "wb") : NULL;
    if (*path && !f) die(EXIT_RUN, "--dump-logits %s: %s", path, strerror(errno));
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        const Turn *t = &a->turn[i];
        feed_prefill(a, t);
        write_row(f, a->logits, a->c->V, path);
        for (int j = 0; j < (int)arrlen(t->dec); j++) {
            feed_decode(a, t->dec[j]);
            write_row(f, a->logits, a->c->V, path);
        }
    }
    if (f && fclose(f)) die(EXIT_RUN, "--dump-logits %s: %s", path, strerror(errno));
    if (opt_int(a->o, "json")) print_json(a, stdout);
    if (opt_int(a->o, "stats")) print_stats(a, stderr);
    return 0;
}

// ---- sessions on disk: the record with the model's fingerprint
// No rows are stored. Loading replays the record, which is exact for every method. The file is
// text:
//   kvcomp session 1
//   model FINGERPRINT
//   method SPEC
//   turn N_SYS N_FOOT N_HEAD : ids to prefill | ids decoded        (a line for each turn)
//   end CLOSED

// Writes the file's text.
static void session_write(const App *a, FILE *f) {
    fprintf(f, "kvcomp session 1\n");
    fprintf(f, "model %016llx\n", (unsigned long long)sonic_fingerprint(a->w));
    fprintf(f, "method %s\n", a->method);
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        const Turn *t = &a->turn[i];
        fprintf(f, "turn %d %d %d :", t->n_sys, t->n_foot, t->n_head);
        for (int j = 0; j < (int)arrlen(t->pre); j++) fprintf(f, " %d", t->pre[j]);
        fprintf(f, " |");
        for (int j = 0; j < (int)arrlen(t->dec); j++) fprintf(f, " %d", t->dec[j]);
        fprintf(f, "\n");
    }
    fprintf(f, "end %d\n", a->closed);
}

// Writes the file beside its place and renames it, so that a full disk does not cost the session
// that was there. 0, or -1 with err.
static int session_save(const App *a, const char *path, char err[512]) {
    char tmp[4200];
    snprintf(tmp, sizeof tmp, "%s.part", path);
    FILE *f = fopen(tmp, "w");
    if (!f) {
        snprintf(err, 512, "%.400s: %s", tmp, strerror(errno));
        return -1;
    }
    session_write(a, f);
    int bad = ferror(f);
    if (fclose(f)) bad = 1;
    if (bad || rename(tmp, path)) {
        snprintf(err, 512, "%s: %s", path, strerror(errno));
        remove(tmp);
        return -1;
    }
    return 0;
}

// Checks the first three lines. The number of their bytes, or -1 with err.
static int session_header(const App *a, const char *path, const char *text, char err[512]) {
    unsigned long long found = 0, wanted = sonic_fingerprint(a->w);
    int at = 0;
    if (sscanf(text, "kvcomp session 1\nmodel %llx\nmethod %*[^\n]\n%n", &found, &at) != 1 || !at) {
        snprintf(err, 512, "%s: not a kvcomp session file", path);
        return -1;
    }
    if (found != wanted) {
        snprintf(err, 512, "%s: made with another model (fingerprint %016llx, this one has %016llx)",
                 path, found, wanted);
        return -1;
    }
    return at;
}

// One "turn" line [p,end). 0, or -1 when it is not what session_write writes; the turn may then
// hold some ids.
static int session_turn(const App *a, const char *p, const char *end, Turn *t) {
    int used = 0;
    char err[256];
    if (sscanf(p, "turn %d %d %d :%n", &t->n_sys, &t->n_foot, &t->n_head, &used) != 3) return -1;
    if (!used || p + used > end) return -1;
    if (ids_parse(p + used, end, a->c->V, t, err)) return -1;
    int n = (int)arrlen(t->pre);
    if (t->n_sys < 0 || t->n_foot < 0 || t->n_head < 0) return -1;
    if (t->n_sys > n || t->n_foot > n || t->n_head > n) return -1;
    return 0;
}

// The "turn" lines from p on and the "end" line behind them, into *turns and *closed. 0, or -1 with
// err.
static int session_turns(const App *a, const char *path, const char *p, Turn **turns, int *closed,
                         char err[512]) {
    int bad = 0;
    while (!bad && !strncmp(p, "turn ", 5)) {
        const char *end = strchr(p, '\n');
        bad = 1;
        if (!end) break;
        Turn t = { 0 };
        bad = session_turn(a, p, end, &t) != 0;
        arrput(*turns, t);
        p = end + 1;
    }
    if (!bad && sscanf(p, "end %d", closed) == 1) return 0;
    snprintf(err, 512, "%s: damaged at turn %d", path, (int)arrlen(*turns) + !bad);
    return -1;
}

// Loads a session file and replays it. 0, or -1 with err, and then nothing has changed.
static int session_read(App *a, const char *path, char err[512]) {
    char why[256];
    size_t n;
    char *text = read_file(path, &n, why);
    if (!text) {
        snprintf(err, 512, "%s", why);
        return -1;
    }
    Turn *turns = NULL;
    int closed = 0, at = session_header(a, path, text, err);
    int bad = at < 0 || session_turns(a, path, text + at, &turns, &closed, err);
    if (!bad && record_fits(a->s, turns, err)) bad = 1;
    free(text);
    if (bad) {
        turns_clear(turns);
        arrfree(turns);
        return -1;
    }
    record_clear(a);
    arrfree(a->turn);
    a->turn = turns;
    a->closed = closed;
    replay(a, (int)arrlen(a->turn));
    return 0;
}

// ==================================================================================================== 25 CHAT
// A small line editor (UTF-8, history, multi-line pastes), the commands, and Ctrl-C: the first
// stops the reply and keeps it in the history and in the cache, a second within a second leaves
// with 130. Without a terminal every input line is a turn.

// ---- the terminal
// While a line is edited the terminal is raw: every key comes to the editor at once and nothing is
// shown but what the editor draws. While a reply is made it has its own settings back, so that
// Ctrl-C is a signal.

// Bracketed paste: the terminal puts ESC [ 200 ~ before a paste and ESC [ 201 ~ behind it, so that
// a pasted newline does not send the line.
#define PASTE_MARKS_ON  "\x1b[?2004h"
#define PASTE_MARKS_OFF "\x1b[?2004l"

static struct termios terminal_before;      // the terminal's own settings, while terminal_raw
static int terminal_raw;

// Gives the terminal its settings back. Called in signal handlers and at exit as well; a second
// call does nothing.
static void terminal_restore(void) {
    if (!terminal_raw) return;
    tcsetattr(0, TCSANOW, &terminal_before);
    ssize_t written = write(1, PASTE_MARKS_OFF, strlen(PASTE_MARKS_OFF));
    (void)written;                          // there is nothing left to do about a terminal that is gone
    terminal_raw = 0;
}

// Makes the terminal raw. 0, or -1 when standard input is no terminal or does not answer.
static int terminal_enter(void) {
    if (tcgetattr(0, &terminal_before)) return -1;
    struct termios raw = terminal_before;
    // Local modes off. ICANON: bytes come as they are typed, not line by line. ECHO: the terminal does
    // not show them, the editor does. ISIG: Ctrl-C and Ctrl-Z come as bytes (3, 26), not as SIGINT and
    // SIGTSTP. IEXTEN: Ctrl-V comes as a byte, and the terminal does not wait for a key to quote.
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG | IEXTEN);
    // Input modes off. IXON: Ctrl-S and Ctrl-Q come as bytes, and do not stop and start the output.
    // ICRNL: Return comes as \r (13), and is not turned into \n.
    raw.c_iflag &= ~(tcflag_t)(IXON | ICRNL);
    // A read returns as soon as there is one byte, and waits for it as long as it takes.
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    if (tcsetattr(0, TCSANOW, &raw)) return -1;
    terminal_raw = 1;
    ssize_t n = (ssize_t)strlen(PASTE_MARKS_ON);
    return write(1, PASTE_MARKS_ON, n) == n ? 0 : -1;
}

// The width of the screen in columns; 80 when the terminal does not say.
static int screen_columns(void) {
    struct winsize w;
    if (ioctl(1, TIOCGWINSZ, &w) || !w.ws_col) return 80;
    return w.ws_col;
}

// ---- Ctrl-C
static double interrupt_at;                 // when it was last pressed, in seconds of now()

// Notes that Ctrl-C is pressed. 1: it was pressed less than a second ago, too.
static int interrupt_again(void) {
    double before = interrupt_at;
    interrupt_at = now();
    return interrupt_at - before < 1;
}

// SIGINT, which comes while a reply is made. The reply sees interrupts and stops. The handler calls
// only what a handler may call: clock_gettime (now), tcsetattr, write, _exit.
static void on_interrupt(int sig) {
    (void)sig;
    if (interrupt_again() && interrupts) {
        terminal_restore();
        _exit(EXIT_INTERRUPT);
    }
    interrupts++;
}

// Ctrl-C on an empty prompt, where it comes as a byte: twice within a second leaves.
static void interrupt_at_prompt(void) {
    if (interrupt_again()) {
        terminal_restore();
        exit(EXIT_INTERRUPT);
    }
    fprintf(stderr, "(Ctrl-C again leaves, so does Ctrl-D)\n");
}

// ---- the line editor: text and cursor
typedef struct {
    char *text;             // what is typed so far, UTF-8 (stb_ds array of bytes, no NUL)
    int cursor;             // a byte offset at a character's start, or the length
    int row;                // the screen row of the cursor, counted from the prompt's
    char **history;         // the messages sent (stb_ds array of strings), oldest first
    int at;                 // the history entry shown; its length: the new line
} Line;

enum {                      // the bytes of keys that edit
    CTRL_A = 1,             // to the start
    CTRL_C = 3,             // deletes the line; on an empty line, leaves
    CTRL_D = 4,             // deletes the character under the cursor; on an empty line, leaves
    CTRL_E = 5,             // to the end
    CTRL_H = 8,             // the same as Backspace on some terminals
    TAB = 9,                // typed like a letter
    CTRL_K = 11,            // deletes to the end
    ENTER = 13,             // sends the line
    CTRL_U = 21,            // deletes to the start
    CTRL_W = 23,            // deletes the word before the cursor
    ESCAPE = 27,            // begins the sequence of an arrow, Home, End, Delete, or a paste
    BACKSPACE = 127,        // deletes the character before the cursor
};

// Is b a byte inside a UTF-8 character, not its first?
static int inside_char(char b) { return (b & 0xc0) == 0x80; }

// The offset of the character behind the one at i.
static int char_next(const Line *e, int i) {
    do i++;
    while (i < (int)arrlen(e->text) && inside_char(e->text[i]));
    return i;
}

// The offset of the character before i.
static int char_prev(const Line *e, int i) {
    do i--;
    while (i > 0 && inside_char(e->text[i]));
    return i;
}

// Inserts n bytes at the cursor and moves it behind them.
static void line_insert(Line *e, const char *s, int n) {
    int len = (int)arrlen(e->text);
    arrsetlen(e->text, len + n);
    memmove(e->text + e->cursor + n, e->text + e->cursor, len - e->cursor);
    memcpy(e->text + e->cursor, s, n);
    e->cursor += n;
}

// Deletes the bytes [from,to) and leaves the cursor there.
static void line_delete(Line *e, int from, int to) {
    memmove(e->text + from, e->text + to, arrlen(e->text) - to);
    arrsetlen(e->text, arrlen(e->text) - (to - from));
    e->cursor = from;
}

// Ctrl-W: deletes the word before the cursor, with the blanks behind it.
static void line_delete_word(Line *e) {
    int from = e->cursor;
    while (from > 0 && e->text[from - 1] == ' ') from--;
    while (from > 0 && e->text[from - 1] != ' ') from--;
    line_delete(e, from, e->cursor);
}

// Shows the history entry `step` away (-1: the one before); behind the last stands an empty line.
static void line_history(Line *e, int step) {
    int at = e->at + step, n = (int)arrlen(e->history);
    if (at < 0 || at > n) return;
    e->at = at;
    arrsetlen(e->text, 0);
    e->cursor = 0;
    if (at < n) line_insert(e, e->history[at], (int)strlen(e->history[at]));
}

// ---- the line editor: drawing
typedef struct { int x, y; } Place;         // a column, and a row counted from the prompt's

// Code points [from,to) that take no column.
static const struct { unsigned from, to; } narrow_chars[] = {
    { 0x300,  0x370  },     // combining marks
    { 0x200d, 0x200e },     // the joiner of emoji
    { 0xfe00, 0xfe10 },     // variation selectors
};

// Code points [from,to) that take two columns.
static const struct { unsigned from, to; } wide_chars[] = {
    { 0x1100,  0x1160 },    // Hangul letters
    { 0x2e80,  0xa4d0 },    // Chinese, Japanese, Yi
    { 0xac00,  0xd7a4 },    // Hangul syllables
    { 0xf900,  0xfb00 },    // compatibility ideographs
    { 0xff00,  0xff61 },    // fullwidth forms
    { 0x1f300, UINT_MAX },  // emoji, and the ideographs beyond
};

// The code point of a character of n >= 2 bytes. Bytes that are no UTF-8 give some number.
static unsigned code_point(const char *s, int n) {
    unsigned c = (unsigned char)s[0];
    if (n == 2) return (c & 31) << 6 | (s[1] & 63);
    if (n == 3) return (c & 15) << 12 | (s[1] & 63) << 6 | (s[2] & 63);
    return (c & 7) << 18 | (s[1] & 63) << 12 | (s[2] & 63) << 6 | (s[3] & 63);
}

// Is the character of n bytes drawn as it is? A control character, as of a paste, and bytes that are
// no UTF-8 are not: they stand as a blank.
static int is_drawn(const char *s, int n) {
    char shown[8];
    return utf8_length(s, (size_t)n) == n && shown_char(s, (size_t)n, shown) == n
        && !memcmp(s, shown, (size_t)n) && *s != '\t';
}

// The columns that one character of n bytes takes: 2 for East Asian wide ranges and emoji, 0 for
// combining marks.
static int char_width(const char *s, int n) {
    if ((unsigned char)s[0] < 0x80 || !is_drawn(s, n)) return 1;
    unsigned c = code_point(s, n);
    for (size_t i = 0; i < sizeof narrow_chars / sizeof *narrow_chars; i++)
        if (c >= narrow_chars[i].from && c < narrow_chars[i].to) return 0;
    for (size_t i = 0; i < sizeof wide_chars / sizeof *wide_chars; i++)
        if (c >= wide_chars[i].from && c < wide_chars[i].to) return 2;
    return 1;
}

// Where the screen goes on after the character s of n bytes was written at p. A character that does
// not fit into the row stands in the next; a full row is followed by the next one, except by the
// last character, after which the terminal waits in the last column.
static Place place_after(Place p, const char *s, int n, int last, int cols) {
    int width = char_width(s, n);
    if (*s == '\n') return (Place){ 0, p.y + 1 };
    if (p.x + width > cols) p = (Place){ 0, p.y + 1 };
    p.x += width;
    if (p.x == cols && !last) p = (Place){ 0, p.y + 1 };
    return p;
}

// Writes one character.
static void char_draw(const char *s, int n) {
    if (*s == '\n') fputs("\r\n", stdout);
    else if (is_drawn(s, n)) fwrite(s, 1, n, stdout);
    else fputc(' ', stdout);
}

// Writes prompt and text anew and puts the cursor where it belongs. e->row is the row it stood in,
// and then stands in.
static void line_draw(Line *e) {
    int cols = screen_columns(), n = (int)arrlen(e->text);
    Place end = { 2, 0 }, cursor = end;

    // The prompt's row again, everything from there on cleared. ESC [ n A: n rows up. ESC [ J: clear.
    if (e->row) printf("\x1b[%dA", e->row);
    printf("\r\x1b[J> ");

    // The text, behind the two columns of the prompt.
    for (int i = 0, next; i < n; i = next) {
        if (i == e->cursor) cursor = end;
        next = char_next(e, i);
        char_draw(e->text + i, next - i);
        end = place_after(end, e->text + i, next - i, next == n, cols);
    }
    if (e->cursor == n) cursor = end;
    if (end.x >= cols) {        // it ends in the last column: the next row is opened for the cursor
        fputs("\r\n", stdout);
        if (cursor.x >= cols) cursor = (Place){ 0, cursor.y + 1 };
        end.y++;
    }

    // From the text's end to the cursor. ESC [ n C: n columns to the right.
    if (end.y > cursor.y) printf("\x1b[%dA", end.y - cursor.y);
    printf("\r");
    if (cursor.x) printf("\x1b[%dC", cursor.x);
    e->row = cursor.y;
    fflush(stdout);
}

// ---- the line editor: keys
// Input comes in big reads, so that a long paste is drawn once, not once a byte.
typedef struct {
    unsigned char buf[65536];
    int n;                  // bytes read
    int at;                 // of which so many are used
} Input;
static Input input;

// Is there a byte to be had without waiting?
static int input_ready(void) {
    fd_set f;
    struct timeval t = { 0, 0 };
    if (input.at < input.n) return 1;
    FD_ZERO(&f);
    FD_SET(0, &f);
    return select(1, &f, NULL, NULL, &t) > 0;
}

// The next byte, waited for; -1: the end of the input.
static int input_byte(void) {
    while (input.at == input.n) {
        ssize_t n = read(0, input.buf, sizeof input.buf);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        input.n = (int)n;
        input.at = 0;
    }
    return input.buf[input.at++];
}

// Inserts a paste, up to the mark behind it (ESC [ 201 ~). Newlines stay in the text.
static void line_paste(Line *e) {
    static const char mark[] = "\x1b[201~";
    int length = (int)strlen(mark), seen = 0;       // seen: bytes of the mark that the text ends with
    for (int c = input_byte(); c >= 0; c = input_byte()) {
        char b = (char)(c == '\r' ? '\n' : c);
        line_insert(e, &b, 1);
        seen = c == mark[seen] ? seen + 1 : c == mark[0];
        if (seen < length) continue;
        line_delete(e, e->cursor - length, e->cursor);
        return;
    }
}

// The rest of a key that sends ESC [ number letter (or ESC O letter): returns the letter, 0 when it
// is something else. *number is the last of the numbers: ESC [ 1 ; 5 D, Ctrl and an arrow, gives D
// and 5.
static int escape_sequence(int *number) {
    int c = input_ready() ? input_byte() : 0;
    *number = 0;
    if (c != '[' && c != 'O') return 0;
    for (c = input_byte(); c == ';' || (c >= '0' && c <= '9'); c = input_byte()) {
        if (c == ';') *number = 0;
        else *number = *number % 1000 * 10 + c - '0';
    }
    return c;
}

// A key whose sequence ends in ~ is known by its number.
static void line_numbered_key(Line *e, int number) {
    int n = (int)arrlen(e->text);
    switch (number) {
    case 1: case 7:                                         // Home
        e->cursor = 0;
        break;
    case 4: case 8:                                         // End
        e->cursor = n;
        break;
    case 3:                                                 // Delete
        if (e->cursor < n) line_delete(e, e->cursor, char_next(e, e->cursor));
        break;
    case 200:
        line_paste(e);
        break;
    }
}

// What follows an ESC byte.
static void line_escape(Line *e) {
    int number, n = (int)arrlen(e->text);
    switch (escape_sequence(&number)) {
    case 'A':                                               // up
        line_history(e, -1);
        break;
    case 'B':                                               // down
        line_history(e, 1);
        break;
    case 'C':                                               // right
        if (e->cursor < n) e->cursor = char_next(e, e->cursor);
        break;
    case 'D':                                               // left
        if (e->cursor > 0) e->cursor = char_prev(e, e->cursor);
        break;
    case 'H':                                               // Home
        e->cursor = 0;
        break;
    case 'F':                                               // End
        e->cursor = n;
        break;
    case '~':
        line_numbered_key(e, number);
        break;
    }
}

// One key that edits the line.
static void line_key(Line *e, int c) {
    int n = (int)arrlen(e->text);
    char b = (char)c;
    switch (c) {
    case CTRL_C:
        line_delete(e, 0, n);
        break;
    case CTRL_D:
        if (e->cursor < n) line_delete(e, e->cursor, char_next(e, e->cursor));
        break;
    case BACKSPACE: case CTRL_H:
        if (e->cursor > 0) line_delete(e, char_prev(e, e->cursor), e->cursor);
        break;
    case CTRL_A:
        e->cursor = 0;
        break;
    case CTRL_E:
        e->cursor = n;
        break;
    case CTRL_K:
        line_delete(e, e->cursor, n);
        break;
    case CTRL_U:
        line_delete(e, 0, e->cursor);
        break;
    case CTRL_W:
        line_delete_word(e);
        break;
    case ESCAPE:
        line_escape(e);
        break;
    default:
        if (c >= ' ' || c == TAB) line_insert(e, &b, 1);
    }
}

enum {                      // how reading a line or a message ends
    READ_INTERRUPTED = -1,  // Ctrl-C on an empty line
    READ_END = 0,           // the end of the input, or Ctrl-D on an empty line
    READ_DONE = 1,
};

// One edited line in e->text. Returns READ_*.
static int line_edit(Line *e) {
    arrsetlen(e->text, 0);
    e->cursor = e->row = 0;
    e->at = (int)arrlen(e->history);
    line_draw(e);
    for (;;) {
        int c = input_byte(), empty = !arrlen(e->text);
        if (c < 0) return empty ? READ_END : READ_DONE;
        if (c == ENTER || c == '\n') break;
        if (c == CTRL_C && empty) return READ_INTERRUPTED;
        if (c == CTRL_D && empty) return READ_END;
        line_key(e, c);
        if (!input_ready()) line_draw(e);
    }
    e->cursor = (int)arrlen(e->text);
    line_draw(e);
    fputs("\r\n", stdout);
    fflush(stdout);
    return READ_DONE;
}

// ---- one user message: an edited line, or a line of standard input; a line ending in \ continues
// Appends a line of standard input without its newline to the stb_ds array. READ_DONE, READ_END
// when there is none.
static int read_plain(char **out) {
    int any = 0, c = getchar();
    while (c != EOF && c != '\n') {
        arrput(*out, (char)c);
        any = 1;
        c = getchar();
    }
    return any || c == '\n' ? READ_DONE : READ_END;
}

// Appends a line edited on the terminal, which is raw. Returns READ_*.
static int read_edited(Line *e, char **out) {
    int r = line_edit(e), n = (int)arrlen(e->text);
    if (r == READ_DONE && n) memcpy(arraddnptr(*out, n), e->text, n);
    return r;
}

// The next message into *out, an stb_ds array that ends in NUL. On a terminal it goes into the
// history. Returns READ_*.
static int read_message(Line *e, int tty, char **out) {
    arrsetlen(*out, 0);
    for (;;) {
        if (tty && terminal_enter()) return READ_END;
        int r = tty ? read_edited(e, out) : read_plain(out);
        terminal_restore();
        if (r != READ_DONE && !arrlen(*out)) return r;
        if (!arrlen(*out) || arrlast(*out) != '\\') break;
        arrlast(*out) = '\n';
    }
    if (arrlen(*out) && memchr(*out, 0, arrlenu(*out))) {
        warn("the message holds a 0 byte: expected a text; it is not sent");
        arrsetlen(*out, 0);
    }
    arrput(*out, 0);
    if (tty && (*out)[0]) arrput(e->history, copy_text(*out));
    return READ_DONE;
}

// ---- a turn of the chat
// Is there room for n more tokens? When there is not, a line on stderr says what is short.
static int message_fits(const App *a, int n) {
    if (!rows_fit(a, n)) {
        warn("%d tokens do not fit: %d rows held, -c %d (see /clear, or start with a larger -c)",
             n, rows_held(a), ctx_limit(a));
        return 0;
    }
    if (!pos_fits(a->s, n, a->s->pos_extra)) {
        warn("%d tokens do not fit: the next position is %d, "
             "%s goes to max_position_embeddings %d (see /clear, or /method)",
             n, a->s->pos_next, a->method, a->s->pos_end);
        return 0;
    }
    return 1;
}

// The reply to the record's last turn, with a newline behind it, and the summary line.
static void chat_reply(App *a, FILE *out) {
    double t0 = now();
    int made = generate(a, opt_int(a->o, "n-predict"), out);
    fputc('\n', out);
    fflush(out);
    print_summary(a, (int)arrlen(arrlast(a->turn).pre), made, now() - t0);
}

// Sends one message and writes the reply to out. 0, or -1 when it does not fit, or names a token
// that the model does not have, and nothing was fed.
static int chat_turn(App *a, const char *text, FILE *out) {
    Turn t = render_turn(a, text);
    int n = (int)arrlen(t.pre), known = ids_with_rows(a->c, t.pre, n);
    if (known < n) {
        fprintf(stderr, "kvcomp: this text names token id %d, the embedding has %d rows\n", t.pre[known],
                a->c->V);
        turn_free(t);
        return -1;
    }
    if (!n || !message_fits(a, n)) {
        turn_free(t);
        return n ? -1 : 0;
    }
    arrput(a->turn, t);
    interrupts = 0;
    feed_prefill(a, &t);
    chat_reply(a, out);
    return 0;
}

// Makes the last reply again: everything up to its first token is replayed, and new random numbers
// go on from there.
static void chat_regen(App *a, FILE *out) {
    if (!arrlen(a->turn)) {
        fprintf(stderr, "nothing to make again\n");
        return;
    }
    arrfree(arrlast(a->turn).dec);
    replay(a, (int)arrlen(a->turn));
    interrupts = 0;
    chat_reply(a, out);
}

// Warns when the method brought weights of its own that were trained with another chat template.
// Only the beginning of the name counts: llama3.1 and llama3.2 mark messages as llama3 does.
static void template_differs(const App *a) {
    const char *made = a->s->made_for;
    if (!made || !a->tp || quiet || !strncmp(a->tp->x.name, made, strlen(made))) return;
    warn("WARNING: the weights of %s were trained with chat template %s, this chat uses %s",
         a->method, made, a->tp->x.name);
}

// Opens the session again with another method (or the same) and replays the dialogue into it. 0, or
// -1: the reason is on stderr and the old session stays.
static int chat_method(App *a, const char *spec) {
    char err[512];
    Session *s = session_try(a->c, a->w, a->o, spec, err);
    if (!s || record_fits(s, a->turn, err)) {
        warn("%s", err);
        session_close(s);
        return -1;
    }
    session_close(a->s);
    a->s = s;
    char *copy = copy_text(spec);              // before the old name goes: spec may be that name
    free(a->method);
    a->method = copy;
    template_differs(a);
    replay(a, (int)arrlen(a->turn));
    return 0;
}

// Opens the method again with another budget. --budget takes the place of --ratio if that was
// given. When the value or the method refuses, the options are as they were.
static void chat_budget(App *a, const char *value) {
    char err[256], *old = copy_text(opt_str(a->o, "budget"));
    int ratio = opt_given(a->o, "ratio");
    int bad = options_set(a->o, "budget", value, err) || out_of_range(a->o, "budget", err);
    if (bad) warn("%s", err);
    if (ratio) (void)shdel(a->o->given, "ratio");
    if (bad || chat_method(a, a->method)) {
        options_set(a->o, "budget", old, err);
        if (ratio) shput(a->o->given, "ratio", 1);
    }
    free(old);
}

// Forgets the dialogue.
static void chat_clear(App *a) {
    record_clear(a);
    session_reset(a->s);
    a->closed = 0;
}

// ---- commands. arg is what stands behind the name, "" when nothing does
static const char *chat_help =
    "/help            this list              /stats           bytes, rows, speed, the method's own numbers\n"
    "/method NAME     another method; the dialogue is played into it again\n"
    "/budget N        another budget, likewise\n"
    "/clear           forget the dialogue    /regen           make the last reply again\n"
    "/system TEXT     another system message, with a new dialogue\n"
    "/read FILE       a file's text as your message\n"
    "/save FILE       keep the dialogue      /load FILE       go on with a kept one\n"
    "/quit            leave (so does Ctrl-D); Ctrl-C stops a reply\n";

static void command_help(App *a, const char *arg) {
    (void)a;
    (void)arg;
    fputs(chat_help, stderr);
}

static void command_stats(App *a, const char *arg) {
    (void)arg;
    print_stats(a, stderr);
}

static void command_clear(App *a, const char *arg) {
    (void)arg;
    chat_clear(a);
}

static void command_regen(App *a, const char *arg) {
    (void)arg;
    chat_regen(a, stdout);
}

// Without a name: prints the one in use.
static void command_method(App *a, const char *arg) {
    if (*arg) chat_method(a, arg);
    else fprintf(stderr, "%s\n", a->method);
}

// Without a number: prints the one in use.
static void command_budget(App *a, const char *arg) {
    if (*arg) chat_budget(a, arg);
    else fprintf(stderr, "%d\n", a->s->budget);
}

// The system message is in the first turn, so a new one needs a new dialogue.
static void command_system(App *a, const char *arg) {
    char err[256];
    if (!options_set(a->o, "system", arg, err)) chat_clear(a);
}

static void command_read(App *a, const char *arg) {
    char err[256];
    size_t n;
    char *text = read_plain_text(arg, &n, err);
    if (!text) {
        warn("%s", err);
        return;
    }
    chat_turn(a, text, stdout);
    free(text);
}

static void command_save(App *a, const char *arg) {
    char err[512];
    if (session_save(a, arg, err)) warn("%s", err);
}

static void command_load(App *a, const char *arg) {
    char err[512];
    if (session_read(a, arg, err)) warn("%s", err);
}

// A new command is a function above, a line here, and a line of chat_help. /quit is chat_command's
// own.
static const struct {
    const char *name;
    void (*run)(App *a, const char *arg);
    int wants_file;         // 1: nothing is done without an argument
} commands[] = {
    { "/help",   command_help,   0 },
    { "/stats",  command_stats,  0 },
    { "/clear",  command_clear,  0 },
    { "/regen",  command_regen,  0 },
    { "/method", command_method, 0 },
    { "/budget", command_budget, 0 },
    { "/system", command_system, 0 },
    { "/read",   command_read,   1 },
    { "/save",   command_save,   1 },
    { "/load",   command_load,   1 },
};

// Runs a line that begins with /, which is cut into name and argument. 1: the chat is over.
static int chat_command(App *a, char *line) {
    char *arg = line + strcspn(line, " \t\n");
    while (isspace((unsigned char)*arg)) *arg++ = 0;
    if (!strcmp(line, "/quit") || !strcmp(line, "/exit")) return 1;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(line, commands[i].name)) continue;
        if (commands[i].wants_file && !*arg) fprintf(stderr, "%s wants a file\n", line);
        else commands[i].run(a, arg);
        return 0;
    }
    tell("no command %s; /help lists them", line);
    return 0;
}

// ---- the chat
// --session FILE: goes on with the dialogue in it, if there is one.
static void session_begin(App *a) {
    char err[512];
    const char *path = opt_str(a->o, "session");
    if (*path && file_exists(path) && session_read(a, path, err)) die(EXIT_RUN, "--session %s", err);
}

// --session FILE: keeps the dialogue in it.
static void session_end(const App *a) {
    char err[512];
    const char *path = opt_str(a->o, "session");
    if (*path && session_save(a, path, err)) die(EXIT_RUN, "--session %s", err);
}

// From here on Ctrl-C stops a reply, and the terminal gets its settings back however the program
// ends.
static void watch_keyboard(void) {
    struct sigaction sa = { .sa_handler = on_interrupt };
    sigaction(SIGINT, &sa, NULL);
    atexit(terminal_restore);
}

// Messages and commands until one of them ends the chat, or the input does.
static void chat_loop(App *a, Line *e, int tty) {
    char *text = NULL;
    for (int done = 0; !done; ) {
        int r = read_message(e, tty, &text);
        if (r == READ_END) break;
        if (r == READ_INTERRUPTED) {
            interrupt_at_prompt();
        } else if (text[0] == '/') {
            done = chat_command(a, text);
        } else if (text[0]) {
            chat_turn(a, text, stdout);
            done = opt_int(a->o, "single-turn");
        }
    }
    arrfree(text);
}

// The mode without a prompt: the whole chat, on a terminal or through pipes. Returns the exit code.
static int chat(App *a) {
    int tty = isatty(0);
    Line e = { 0 };
    watch_keyboard();
    session_begin(a);
    if (tty && !quiet)
        tell("kvcomp %s, %s, --method=%s. /help lists commands, Ctrl-D leaves.",
             KVCOMP_VERSION, a->c->dir, a->method);
    chat_loop(a, &e, tty);
    session_end(a);
    if (opt_int(a->o, "json")) print_json(a, stdout);
    while (arrlen(e.history)) free(arrpop(e.history));
    arrfree(e.history);
    arrfree(e.text);
    return 0;
}

// ==================================================================================================== 26 EVALUATION
// What a method costs in quality, measured through its own compressed cache. There are two kinds of
// measurement:
//   Dialogues   --eval TASK plays dialogues with greedy decoding. They are made here from a seed
//               (needle, multiturn, coref, facts, json, fewshot, summary), or read from --eval-file
//               (task `file`).
//   Plain text  --eval ppl and kld cut a text into windows. Half a window is prefilled as one turn,
//               the other half is decoded token by token. The probability of every next token is
//               compared with the text (ppl), and with full attention over the same tokens (kld).
// --compare plays the same items through several methods and --budgets, one row each, so that the
// differences between rows are paired.
//
// Every dialogue is played twice.
//   Free pass    The method answers, and its own answers are the history of the next turn
//                (--eval-history gold puts the right ones there instead). Scores, bytes and seconds
//                come from this pass.
//   Forced pass  The right replies are fed token by token, to the method and to full attention
//                alike. NLL, KLD and top-1 agreement come from this pass, over the tokens of scored
//                replies, so these numbers do not depend on what a method happened to say.
//
// Reading order: what an item is, how items are made (a subsection for each task), items from a
// file, how an item is played, metrics, scores and intervals, tables, the modes.

// ---- what an item is
// An item is a dialogue with its right answers: a list of turns, some of which are scored.

// The metrics by which a reply can be scored, and their names in a file of dialogues.
enum {
    METRIC_F1,                  // F1 of the two bags of words
    METRIC_CLASS,               // accuracy among the labels of the turn
    METRIC_ROUGE,               // Rouge-L over words in their order
    METRIC_ROUGE_LONGBENCH,     // Rouge-L as LongBench's package counts it
    METRIC_FOUND,               // 1 if the reply holds the answer
    METRIC_EXACT,               // 1 if the reply is the answer
    METRICS
};
static const char *eval_metrics[METRICS] = {
    "f1", "accuracy", "rouge", "rouge-longbench", "found", "exact"
};

typedef struct {
    char *user;                 // what the visitor says
    char *reply;                // a right reply, as a whole sentence; NULL: only the answer is known
    int *span;                  // stb_ds: where in the reply its answer stands, as pairs of byte offsets
                                //   [from,to); none: the whole reply is the answer
    char **answers;             // stb_ds: the right answers; none: the turn is not scored
    char **classes;             // stb_ds: labels to choose from (METRIC_CLASS)
    char **evidence;            // stb_ds: the sentences, of this turn and of earlier ones, from which
                                //   the answer follows
    int position, depth;        // as in Answer
} EvalTurn;

typedef struct {
    const char *task;           // "needle", ... ; for a file: its type or dataset
    int number;                 // of the text in the run; all versions of one text share it
    int length;                 // tokens: for a made item as asked for, for one of a file as counted
    int metric;                 // METRIC_*
    int first_line;             // 1: only the first line of a reply is scored
    EvalTurn *turn;             // stb_ds
} EvalItem;

typedef struct {
    EvalItem *item;             // stb_ds
    stbds_string_arena mem;     // every text of the items
} EvalSet;

// ---- what a run measures

// One scored answer. Tables, intervals and the report are made from lists of these.
typedef struct {
    const char *task;           // "needle", "multiturn", ... ; a static string or owned by the item set
    int item, turn, turns;      // item number in the run, turn of the item, turns the item has
    int position;               // where the query stands: 0 begin, 1 middle, 2 end, -1 does not apply
    int length;                 // tokens of the context
    int depth;                  // of the evidence in the text, in per cent; -1 does not apply
    double score;               // 0..1 by the task's own metric
    double nll;                 // NLL of the right answer per token, in nats (forced pass)
} Answer;

// One row of the result: a method at a budget.
typedef struct {
    char name[160];
    int budget, items;
    double exact, found, f1, rouge, rouge_lb;   // sums over the answers, one of every metric
    double nll;                                 // ppl, kld: sum over predicted tokens
    double kld, kld_top, top1;                  // sums over predicted tokens, but kld_top is the 99th
                                                //   percentile of the KLD
    double *each;                               // stb_ds: the KLD of every predicted token
    long predicted;                             // predicted tokens
    double stored, full, attended;              // bytes, sums over the items: the rows held, the rows
                                                //   full attention would hold, those read a step
    double prefill_s, decode_s;                 // seconds, sums over the items
    double n_prefill, n_decode;                 // tokens of those seconds
    double peak;                                // bytes of rows, the most that any item held
    Answer *answers;                            // stb_ds
    double lo, hi;                              // 95 % interval of the mean score
} Score;

// ---- item sets and turns

// Frees the lists of a turn; its texts belong to the set.
static void turn_free_lists(EvalTurn *t) {
    arrfree(t->span);
    arrfree(t->answers);
    arrfree(t->classes);
    arrfree(t->evidence);
}

// Frees a set with all its items and texts.
static void eval_set_free(EvalSet *e) {
    for (int i = 0; i < (int)arrlen(e->item); i++) {
        EvalItem *it = &e->item[i];
        for (int j = 0; j < (int)arrlen(it->turn); j++) turn_free_lists(&it->turn[j]);
        arrfree(it->turn);
    }
    arrfree(e->item);
    strreset(&e->mem);
}

// The number of scored turns of an item.
static int scored_turns(const EvalItem *it) {
    int n = 0;
    for (int j = 0; j < (int)arrlen(it->turn); j++) n += it->turn[j].answers != NULL;
    return n;
}

// A copy of n bytes of text that lives as long as the set. An empty stb_ds array is NULL, so with
// n 0 the text may be NULL.
static char *set_text(EvalSet *e, const char *text, size_t n) {
    char *s = copy_bytes(text, n);
    char *kept = stralloc(&e->mem, s);
    free(s);
    return kept;
}

// A printed text that lives as long as the set.
KV_PRINTF(2, 3) static char *set_printf(EvalSet *e, const char *fmt, ...) {
    char *s = NULL;
    va_list ap;
    va_start(ap, fmt);
    if (ALLOCATION_FAILS() || vasprintf(&s, fmt, ap) < 0) die(EXIT_MEMORY, "out of memory: a sentence of the evaluation");
    va_end(ap);
    char *kept = stralloc(&e->mem, s);
    free(s);
    return kept;
}

// A scored turn, from a reply that has its answer in braces: "The code is {4821}." The reply
// without the braces becomes t.reply, and the bytes that were inside them become t.span. Several
// pairs of braces make one answer, with blanks between its parts.
static EvalTurn gold_turn(EvalSet *e, const char *user, const char *reply) {
    EvalTurn t = { .user = (char *)user, .position = -1, .depth = -1 };
    char *text = NULL, *answer = NULL;
    for (const char *p = reply; *p; p++) {
        if (*p == '{' && arrlen(answer)) arrput(answer, ' ');
        if (*p == '{' || *p == '}') {
            arrput(t.span, (int)arrlen(text));
            continue;
        }
        arrput(text, *p);
        if (arrlen(t.span) % 2) arrput(answer, *p);     // between { and }
    }
    t.reply = set_text(e, text, (size_t)arrlen(text));
    arrput(t.answers, set_text(e, answer, (size_t)arrlen(answer)));
    arrfree(text);
    arrfree(answer);
    return t;
}

// A turn that is not scored.
static EvalTurn plain_turn(const char *user, const char *reply) {
    return (EvalTurn){ .user = (char *)user, .reply = (char *)reply, .position = -1, .depth = -1 };
}

// A copy of a list (stb_ds); the texts are shared.
static char **list_copy(char **list) {
    char **c = NULL;
    for (int i = 0; i < (int)arrlen(list); i++) arrput(c, list[i]);
    return c;
}

// A copy of a turn with lists of its own; the texts are shared.
static EvalTurn turn_copy(const EvalTurn *t) {
    EvalTurn c = *t;
    c.span = NULL;
    for (int i = 0; i < (int)arrlen(t->span); i++) arrput(c.span, t->span[i]);
    c.answers = list_copy(t->answers);
    c.classes = list_copy(t->classes);
    c.evidence = list_copy(t->evidence);
    return c;
}

// ---- how items are made: the words
// The sentences are those that models/data_gen.py teaches the shipped model; any model can read
// them. The values are that file's held-out words and numbers (a held-out number has a digit sum
// that is a multiple of 8). A text is a list of lines: the facts, near misses (the same sentence
// about something else) and filler, --eval-length tokens in all.
//
// An item is made from the seed, its task, its length and its number alone, so more items never
// change the first ones.
//
// LoopServe's benchmark ends every message with the same cue, wherever the query stands. Here the
// opening of the reply, which the chat template writes, is that cue.
static const char eval_names[] =
    "Max Hugo Peter Frank Noah Yara George Omar Amir Ida Ruth Chris Kevin Toby Dennis Lars Tara Ravi "
    "Ahmed Jim";
static const char eval_cities[] =
    "Madrid Delhi Munich Bern Istanbul Denver Nairobi Cologne Bristol Hanoi";
static const char eval_animals[] = "cat goose tiger shark otter camel bat";
static const char eval_colours[] =
    "red blue green yellow black white orange purple pink brown grey silver golden violet turquoise "
    "crimson";
static const char eval_things[] =
    "box bag door key book chest drawer car boat tent lamp chair table bottle cup coat hat shoe ring "
    "clock phone letter map coin bell basket jar safe locker suitcase bike kite drum ball pen knife "
    "rope mirror camera wallet";
static const char eval_rooms[] =
    "kitchen garden cellar attic garage bedroom bathroom hall office library barn shed tower cave";
static const char eval_adjs[] =
    "old new small big red blue green quiet long short dark bright cold warm soft heavy round strange "
    "pretty clean dusty wooden broken empty narrow wide tall deep slow quick gentle busy lazy happy "
    "tired clever";
static const char eval_nouns[] =
    "house garden river road tree bridge hill field market street window wall table room village "
    "forest lake mountain boat train station school church shop park cloud wind rain sun moon star "
    "stone leaf flower bird farm mill gate path fence";
static const char eval_beasts[] =
    "fox owl bear wolf mouse cat dog rabbit horse cow sheep goat duck goose hen frog turtle snail bee "
    "ant lion tiger elephant monkey";
static const char eval_foods[] = "pizza pasta soup bread cheese rice salad cake chocolate apples";
static const char eval_jobs[] = "teacher doctor nurse baker farmer painter singer writer driver pilot";
static const char eval_days[] = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday";
static const char eval_labels[] = "zip zap foo bar left right one two";
static const char eval_syllables[] =
    "ba be bo da do fi ga go ka ki ko la le li lo ma mi mo na ne ni no pa pi ra ri ro sa se si so ta "
    "te ti to va ve vi vo za zo bra dre kli sto tru";

// $n, $m stand for nouns, $a, $b for adjectives, $x for an animal, $d for a day.
static const char *const filler_forms[] = {
    "The $n was $a and $b.",
    "There is a $n near the $m.",
    "A $a $n stood behind the $m.",
    "On $d the $n looked $a.",
    "The $x walked along the $a $n.",
    "We saw a $a $x by the $n.",
    "The $n is $a in the morning.",
    "People say that the $n was once $a.",
    "It rained on the $n all day.",
    "The wind moved the $n and the $m.",
    "Nobody knew why the $n was so $a.",
    "A $x slept under the $m.",
    "The $a $n leads to the $b $m.",
    "Every $d the $m is $b.",
    "The sun shone on the $n.",
    "It was a $a day in the $m.",
    "They painted the $n and cleaned the $m.",
    "The $m was full of people.",
    "From the $n you can see the $m.",
    "Some like the $n, others like the $m.",
};

// ---- how items are made: drawing
// C leaves the order in which the arguments of a call are evaluated to the compiler. The texts must
// not depend on it, so no call here has two arguments that draw.

// What a generator works with.
typedef struct {
    const Tokenizer *tok;
    EvalSet *set;           // where the items go
    const char *task;
    int number;             // of the item in its task; it chooses the kind and the depth
    int text;               // number of the text in the run
    int length;             // tokens wanted
    int metric;             // METRIC_* of the task
    uint64_t rng;
    char **used;            // stb_ds: words drawn in this item
} Gen;

// A whole number in [0,n).
static int gen_int(Gen *g, int n) {
    return (int)(splitmix64(&g->rng) % (uint64_t)n);
}

// The depth in per cent that an item of this number has: 0, 30, 60, 90, 10, 40, ...
static int gen_depth(const Gen *g) {
    return 30 * g->number % 110;
}

// The tokens of a text. Ends the program if the tokenizer makes none of a text that is not empty:
// no text would ever be long enough.
static int gen_tokens(const Gen *g, const char *text) {
    int *ids = tokenizer_encode(g->tok, text, strlen(text), 0, NULL), n = (int)arrlen(ids);
    arrfree(ids);
    if (!n && *text) die(EXIT_USAGE, "--eval: the tokenizer makes nothing of \"%.60s\"", text);
    return n;
}

// The index of w among the words (stb_ds), or -1.
static int word_in(char **words, const char *w) {
    for (int i = 0; i < (int)arrlen(words); i++) {
        if (!strcmp(words[i], w)) return i;
    }
    return -1;
}

// One of the words of a list, which are separated by single blanks.
static char *gen_word(Gen *g, const char *list) {
    int n = 1;
    for (const char *p = list; *p; p++) n += *p == ' ';
    for (int k = gen_int(g, n); k; k--) list = strchr(list, ' ') + 1;
    return set_text(g->set, list, strcspn(list, " "));
}

// An invented word of n syllables.
static char *gen_syllables(Gen *g, int n) {
    char text[32] = "";
    for (int i = 0; i < n; i++) strncat(text, gen_word(g, eval_syllables), 4);
    return set_text(g->set, text, strlen(text));
}

// A number whose digit sum is a multiple of 8. Half of the draws are brought to four digits, so
// most numbers have four; the other half has three to five.
static char *gen_code(Gen *g) {
    for (;;) {
        int n = 100 + gen_int(g, 99900), sum = 0;
        if (gen_int(g, 2)) n = n % 9000 + 1000;
        for (int x = n; x; x /= 10) sum += x % 10;
        if (sum % 8 == 0) return set_printf(g->set, "%d", n);
    }
}

// A person's name: seven times of ten one of the list, otherwise two or three syllables.
static char *gen_name(Gen *g) {
    if (gen_int(g, 10) < 7) return gen_word(g, eval_names);
    char *name = gen_syllables(g, 2 + gen_int(g, 2));
    *name = (char)toupper((unsigned char)*name);
    return name;
}

// A colour and a thing: "red box".
static char *gen_thing(Gen *g) {
    char *colour = gen_word(g, eval_colours);
    return set_printf(g->set, "%s %s", colour, gen_word(g, eval_things));
}

// The kinds of values.
enum { A_NAME, A_KEY, A_CODE, A_THING, A_CITY, A_ANIMAL, A_ROOM, AN_AGE };

// A value of a kind.
static char *gen_value(Gen *g, int what) {
    switch (what) {
    case A_NAME:   return gen_name(g);
    case A_KEY:    return gen_syllables(g, 3);
    case A_CODE:   return gen_code(g);
    case A_THING:  return gen_thing(g);
    case A_CITY:   return gen_word(g, eval_cities);
    case A_ANIMAL: return gen_word(g, eval_animals);
    case A_ROOM:   return gen_word(g, eval_rooms);
    default:       return set_printf(g->set, "%d", 8 + gen_int(g, 87));      // AN_AGE
    }
}

// A word of a list or, with list NULL, a value of a kind, that this item does not have yet. After
// 200 more draws the last one is taken all the same: a short list may be used up.
static char *gen_unused(Gen *g, const char *list, int what) {
    char *v = NULL;
    for (int tries = 0; tries <= 200; tries++) {
        v = list ? gen_word(g, list) : gen_value(g, what);
        if (word_in(g->used, v) < 0) break;
    }
    arrput(g->used, v);
    return v;
}

// A value of a kind that this item does not have yet.
static char *gen_fresh(Gen *g, int what) {
    return gen_unused(g, NULL, what);
}

// A word of a list that this item does not have yet.
static char *gen_fresh_word(Gen *g, const char *list) {
    return gen_unused(g, list, 0);
}

// For "red box": another thing of that colour, or the same thing in another colour, new in this
// item.
static char *near_miss(Gen *g, const char *thing) {
    int blank = (int)strcspn(thing, " ");
    for (;;) {
        char *v;
        if (gen_int(g, 2)) v = set_printf(g->set, "%.*s %s", blank, thing, gen_word(g, eval_things));
        else v = set_printf(g->set, "%s%s", gen_word(g, eval_colours), thing + blank);
        if (word_in(g->used, v) >= 0) continue;
        arrput(g->used, v);
        return v;
    }
}

// ---- how items are made: texts

// The words that may stand for $kind in a filler form.
static const char *filler_words(char kind) {
    switch (kind) {
    case 'n':
    case 'm': return eval_nouns;
    case 'x': return eval_beasts;
    case 'd': return eval_days;
    default:  return eval_adjs;
    }
}

// A sentence that says nothing of interest.
static char *filler_line(Gen *g) {
    const char *form = filler_forms[gen_int(g, sizeof filler_forms / sizeof *filler_forms)];
    char *text = NULL;
    for (const char *p = form; *p; p++) {
        if (*p != '$') {
            arrput(text, *p);
            continue;
        }
        p++;
        const char *w = gen_word(g, filler_words(*p));
        bytes_put(&text, w, strlen(w));
    }
    char *line = set_text(g->set, text, (size_t)arrlen(text));
    arrfree(text);
    return line;
}

// Orders ints, for qsort.
static int int_order(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

// About `tokens` tokens of lines (stb_ds): filler with the keys in it, in their order, at places
// that are drawn. With a depth >= 0, keys[0] stands at that share of the lines (in per cent)
// instead.
static char **document(Gen *g, int tokens, char **keys, int depth) {
    char **lines = NULL;
    int *at = NULL, n = (int)arrlen(keys);
    int first = depth >= 0;                             // the first key whose place is drawn

    for (int i = 0; i < n; i++) tokens -= gen_tokens(g, set_printf(g->set, " %s", keys[i]));
    while (tokens > 4) {
        arrput(lines, filler_line(g));
        tokens -= gen_tokens(g, set_printf(g->set, " %s", arrlast(lines)));
    }

    // Insert from the last place to the first, so that the places before stay right.
    for (int i = first; i < n; i++) arrput(at, gen_int(g, (int)arrlen(lines) + 1));
    if (at) qsort(at, (size_t)arrlen(at), sizeof *at, int_order);
    for (int i = (int)arrlen(at) - 1; i >= 0; i--) {
        int k = at[i];
        arrins(lines, k, keys[i + first]);
    }
    if (depth >= 0) {
        int own = (int)arrlen(lines) * depth / 100;
        arrins(lines, own, keys[0]);
    }
    arrfree(at);
    return lines;
}

// Appends a part to a text (stb_ds of bytes), behind a separator unless it is the first.
static void put_part(char **text, const char *sep, const char *part) {
    if (arrlen(*text)) bytes_put(text, sep, strlen(sep));
    bytes_put(text, part, strlen(part));
}

// One message: the query before (position 0), amid (1) or behind (2) the lines. With query NULL it
// is the lines alone.
static char *message(EvalSet *e, char **lines, const char *sep, const char *query, int position) {
    char *text = NULL;
    int n = (int)arrlen(lines), at = n;
    if (position == 0) at = 0;
    if (position == 1) at = n / 2;
    for (int i = 0; i <= n; i++) {
        if (query && i == at) put_part(&text, sep, query);
        if (i < n) put_part(&text, sep, lines[i]);
    }
    char *kept = set_text(e, text, (size_t)arrlen(text));
    arrfree(text);
    return kept;
}

// The lines as one message without a query.
static char *joined(EvalSet *e, char **lines, const char *sep) {
    return message(e, lines, sep, NULL, 2);
}

// ---- how items are made: versions of a dialogue

// A turn before its query is placed.
typedef struct {
    char **lines;           // stb_ds: the text to read; NULL: the turn is taken as it is
    const char *sep;        // between the lines
    EvalTurn turn;          // its `user` is the question about the lines
} Passage;

// A dialogue comes in up to four versions of the same texts.
enum {
    BEFORE_TEXT,            // the query stands before its text
    AMID_TEXT,
    BEHIND_TEXT,
    OWN_TURN,               // the query is a turn of its own behind its text
    VERSIONS
};

// Appends a passage to the dialogue *p (stb_ds). The passage owns the lines.
static void add_passage(Passage **p, char **lines, const char *sep, EvalTurn turn) {
    arrput(*p, ((Passage){ lines, sep, turn }));
}

// Appends a turn without a text to read.
static void add_turn(Passage **p, EvalTurn turn) {
    add_passage(p, NULL, NULL, turn);
}

// Adds the versions from..to-1 of a dialogue to the set, one item each, and frees the passages.
static void add_versions(Gen *g, Passage *p, int from, int to) {
    for (int v = from; v < to; v++) {
        EvalItem it = { .task = g->task, .number = g->text, .length = g->length, .metric = g->metric };
        for (int i = 0; i < (int)arrlen(p); i++) {
            EvalTurn t = turn_copy(&p[i].turn);
            if (p[i].lines && v == OWN_TURN) {
                char *text = joined(g->set, p[i].lines, p[i].sep);
                arrput(it.turn, plain_turn(text, "I have read it."));
            } else if (p[i].lines) {
                t.user = message(g->set, p[i].lines, p[i].sep, t.user, v);
                t.position = v;
            }
            arrput(it.turn, t);
        }
        arrput(g->set->item, it);
    }
    for (int i = 0; i < (int)arrlen(p); i++) {
        arrfree(p[i].lines);
        turn_free_lists(&p[i].turn);
    }
    arrfree(p);
}

// ---- how items are made: facts

// A kind of fact: the sentence that tells it, the question, and the reply. Each is a printf form:
// `say` and `reply` of who and what, `ask` of who.
typedef struct {
    const char *say, *ask, *reply;
    int value;              // the kind of the value: A_CODE, ...
} Fact;

static const Fact thing_facts[] = {
    { "The secret code of the %s is %s.", "What is the secret code of the %s?",
      "The secret code of the %s is {%s}.", A_CODE },
    { "The number of the %s is %s.", "What is the number of the %s?",
      "The number of the %s is {%s}.", A_CODE },
    { "The %s costs %s coins.", "How much does the %s cost?", "The %s costs {%s} coins.", A_CODE },
    { "The %s is in the %s.", "Where is the %s?", "The %s is in the {%s}.", A_ROOM },
};

static const Fact people_facts[] = {
    { "%s lives in %s.", "Where does %s live?", "You said that %s lives in {%s}.", A_CITY },
    { "%s is %s years old.", "How old is %s?", "You said that %s is {%s} years old.", AN_AGE },
    { "%s saw a %s.", "What did %s see?", "You said that %s saw a {%s}.", A_ANIMAL },
    { "%s's number is %s.", "What is %s's number?", "You said that %s's number is {%s}.", A_CODE },
};

// Appends the sentence of a fact with a new value to *lines and returns the question about it.
static EvalTurn tell_fact(Gen *g, const Fact *f, const char *who, char ***lines) {
    char *what = gen_fresh(g, f->value);
    char *ask = set_printf(g->set, f->ask, who);
    EvalTurn t = gold_turn(g->set, ask, set_printf(g->set, f->reply, who, what));
    arrput(*lines, set_printf(g->set, f->say, who, what));
    arrput(t.evidence, arrlast(*lines));
    return t;
}

// Appends the sentence of a fact with a new value that nobody asks for.
static void tell_only(Gen *g, const Fact *f, const char *who, char ***lines) {
    arrput(*lines, set_printf(g->set, f->say, who, gen_fresh(g, f->value)));
}

// Tells three numbers of one thing in *lines[0], *lines[1] and *lines[2], which may be one list,
// and one number of a near miss in one of them. Returns the question about the three.
static EvalTurn tell_values(Gen *g, char ***lines[3]) {
    const char *t = gen_fresh(g, A_THING), *v[3];
    for (int i = 0; i < 3; i++) v[i] = gen_fresh(g, A_CODE);
    char *ask = set_printf(g->set, "What are the numbers of the %s?", t);
    char *reply = set_printf(g->set, "The numbers of the %s are {%s}, {%s}, {%s}.", t, v[0], v[1], v[2]);
    EvalTurn q = gold_turn(g->set, ask, reply);
    for (int i = 0; i < 3; i++) {
        arrput(q.evidence, set_printf(g->set, "A number of the %s is %s.", t, v[i]));
        arrput(*lines[i], arrlast(q.evidence));
    }
    char ***other = lines[gen_int(g, 3)], *near = near_miss(g, t);
    arrput(*other, set_printf(g->set, "A number of the %s is %s.", near, gen_fresh(g, A_CODE)));
    return q;
}

// ---- task needle
// Facts about things stand somewhere in filler. The item's number chooses one of four kinds:
//   0  one needle
//   1  six needles, asked for one and, in the next turn, for another
//   2  three numbers of one thing
//   3  four needles, two of them asked for in one question
// The first fact that is asked for stands at the item's depth (not for kind 2).

// One message with two questions and one reply with both answers. Frees the lists of both turns.
static EvalTurn ask_both(Gen *g, EvalTurn *a, EvalTurn *b) {
    EvalTurn t = turn_copy(a);
    int shift = (int)strlen(a->reply) + 1;
    t.user = set_printf(g->set, "%s %s", a->user, b->user);
    t.reply = set_printf(g->set, "%s %s", a->reply, b->reply);
    t.answers[0] = set_printf(g->set, "%s %s", a->answers[0], b->answers[0]);
    for (int i = 0; i < (int)arrlen(b->span); i++) arrput(t.span, b->span[i] + shift);
    for (int i = 0; i < (int)arrlen(b->evidence); i++) arrput(t.evidence, b->evidence[i]);
    turn_free_lists(a);
    turn_free_lists(b);
    return t;
}

// Makes a needle item in all four versions.
static void gen_needle(Gen *g) {
    static const int needles[4] = { 1, 6, 4, 4 };
    int kind = g->number % 4, n = needles[kind], depth = kind == 2 ? -1 : gen_depth(g);
    const Fact *f = &thing_facts[gen_int(g, 4)];
    char **keys = NULL;
    Passage *p = NULL;
    EvalTurn q, second = { 0 };
    if (kind == 2) {
        q = tell_values(g, (char ***[3]){ &keys, &keys, &keys });
    } else {
        char *thing = gen_fresh(g, A_THING);
        q = tell_fact(g, f, thing, &keys);
        if (n > 1) second = tell_fact(g, f, near_miss(g, thing), &keys);
        for (int i = 2; i < n; i++) tell_only(g, f, gen_fresh(g, A_THING), &keys);
    }
    if (kind == 3) q = ask_both(g, &q, &second);
    q.depth = depth;
    add_passage(&p, document(g, g->length - gen_tokens(g, q.user), keys, depth), " ", q);
    if (kind == 1) add_turn(&p, second);
    arrfree(keys);
    add_versions(g, p, BEFORE_TEXT, VERSIONS);
}

// ---- task multiturn
// Three messages to read, each with a question for which 1 to j of the first j messages are needed.
// Between them, a list of twelve names comes in two parts. At the end, in turns of their own, two
// questions follow: where the thing is that moved in every message, and what the whole list is.

// Tells a chain of two steps, who is with whom (in *works) and where that person lives (in *lives),
// and then another chain like it. Returns the question about the first.
static EvalTurn tell_chain(Gen *g, char ***works, char ***lives) {
    static const char *verbs[][2] = {
        { "works with", "Where does the person live who %s works with?" },
        { "is married to", "Where does the person live who %s is married to?" },
        { "is a friend of", "Where does the friend of %s live?" },
    };
    const char **verb = verbs[gen_int(g, 3)];
    EvalTurn q = { 0 };
    for (int i = 0; i < 2; i++) {
        char *a = gen_fresh(g, A_NAME), *b = gen_fresh(g, A_NAME), *city = gen_fresh(g, A_CITY);
        arrput(*works, set_printf(g->set, "%s %s %s.", a, verb[0], b));
        arrput(*lives, set_printf(g->set, "%s lives in %s.", b, city));
        if (i) break;
        char *ask = set_printf(g->set, verb[1], a);
        q = gold_turn(g->set, ask, set_printf(g->set, "You said that %s %s %s, and %s lives in {%s}.",
                                              a, verb[0], b, b, city));
        arrput(q.evidence, arrlast(*works));
        arrput(q.evidence, arrlast(*lives));
    }
    return q;
}

// A question of `hops` steps (at most j+1) whose facts are told in as many different messages of
// keys[0..j], each with a near miss beside it, as in LoopServe's benchmark.
//   One hop     a fact about a thing
//   Two hops    who is with whom, and where that person lives
//   Three hops  three numbers of one thing
static EvalTurn tell_hops(Gen *g, char **keys[], int j, int hops) {
    int at[3] = { 0, 1, 2 };                            // the messages: the first steps of a shuffle
    for (int i = 0; i < hops && i < j + 1; i++) {
        int k = i + gen_int(g, j + 1 - i), x = at[i];
        at[i] = at[k];
        at[k] = x;
    }
    if (hops == 3) return tell_values(g, (char ***[3]){ &keys[at[0]], &keys[at[1]], &keys[at[2]] });
    if (hops == 2) return tell_chain(g, &keys[at[0]], &keys[at[1]]);

    const Fact *f = &thing_facts[gen_int(g, 3)];
    char *thing = gen_fresh(g, A_THING);
    EvalTurn q = tell_fact(g, f, thing, &keys[at[0]]);
    tell_only(g, f, near_miss(g, thing), &keys[at[0]]);
    return q;
}

// Tells where a thing is: keys[0] says it, keys[1] and keys[2] change it, and the last one is
// right. Another thing moves as well.
static EvalTurn tell_moves(Gen *g, char **keys[3]) {
    char *thing = gen_fresh(g, A_THING), *other = near_miss(g, thing), *room = NULL, *last = NULL;
    for (int i = 0; i < 3; i++) {
        const char *form = i ? "I moved the %s to the %s." : "The %s is in the %s.";
        int turn_of_thing = gen_int(g, 2);
        for (int k = 0; k < 2; k++) {
            char *what = k == turn_of_thing ? thing : other, *where = gen_fresh(g, A_ROOM);
            arrput(keys[i], set_printf(g->set, form, what, where));
            if (what != thing) continue;
            room = where;
            last = arrlast(keys[i]);
        }
    }
    char *ask = set_printf(g->set, "Where is the %s now?", thing);
    EvalTurn q = gold_turn(g->set, ask, set_printf(g->set, "The %s is in the {%s}.", thing, room));
    arrput(q.evidence, last);
    return q;
}

// The names [from,to) as a user lists them: "a, b and c".
static char *listed_names(EvalSet *e, char **names, int from, int to) {
    char *text = set_printf(e, "%s", names[from]);
    for (int i = from + 1; i < to; i++)
        text = set_printf(e, "%s%s%s", text, i == to - 1 ? " and " : ", ", names[i]);
    return text;
}

// The names [from,to) as an answer for gold_turn: "{a}, {b}, {c}".
static char *answered_names(EvalSet *e, char **names, int from, int to) {
    char *text = set_printf(e, "{%s}", names[from]);
    for (int i = from + 1; i < to; i++) text = set_printf(e, "%s, {%s}", text, names[i]);
    return text;
}

// Makes a multiturn item, with the queries before, amid and behind their texts.
static void gen_multiturn(Gen *g) {
    EvalSet *e = g->set;
    char **keys[3] = { 0 }, **names = NULL;
    EvalTurn q[3];
    Passage *p = NULL;
    for (int j = 0; j < 3; j++) q[j] = tell_hops(g, keys, j, 1 + gen_int(g, j + 1));
    EvalTurn moved = tell_moves(g, keys);
    for (int i = 0; i < 12; i++) arrput(names, gen_fresh(g, A_NAME));
    char *half[2] = {
        set_printf(e, "My guest list: %s.", listed_names(e, names, 0, 6)),
        set_printf(e, "Add %s.", listed_names(e, names, 6, 12)),
    };

    // The three messages, with the halves of the list between them
    int room = g->length - gen_tokens(g, half[0]) - gen_tokens(g, half[1])
             - 2 * gen_tokens(g, moved.user);
    for (int j = 0; j < 3; j++) {
        add_passage(&p, document(g, room / 3 - gen_tokens(g, q[j].user), keys[j], -1), " ", q[j]);
        if (j < 2) add_turn(&p, plain_turn(half[j], "Okay."));
        arrfree(keys[j]);
    }

    // The two last questions
    char *all = answered_names(e, names, 0, 12);
    EvalTurn list = gold_turn(e, "What is on my guest list?", set_printf(e, "Your guest list: %s.", all));
    for (int i = 0; i < 2; i++) arrput(list.evidence, half[i]);
    add_turn(&p, moved);
    add_turn(&p, list);
    arrfree(names);
    add_versions(g, p, BEFORE_TEXT, OWN_TURN);
}

// ---- task coref
// Somebody is named once. Two facts follow with a pronoun alone, with messages about nothing
// between them. Facts of the same kinds about somebody else came before. Both facts are asked for.

// Adds at most eight messages of about 100 tokens that no question is about, `tokens` in all.
static void add_filler_turns(Gen *g, Passage **p, int tokens) {
    int n = tokens < 150 ? 1 : min_int(tokens / 100, 8);
    for (int i = 0; i < n; i++) {
        char **lines = document(g, tokens / n, NULL, -1);
        add_turn(p, plain_turn(joined(g->set, lines, " "), "I see."));
        arrfree(lines);
    }
}

// Draws two different ones of the four kinds of facts about people.
static void gen_two_kinds(Gen *g, const Fact *kinds[2]) {
    int first = gen_int(g, 4), second = (first + 1 + gen_int(g, 3)) % 4;
    kinds[0] = &people_facts[first];
    kinds[1] = &people_facts[second];
}

// Makes a coref item, with the questions in turns of their own.
static void gen_coref(Gen *g) {
    Passage *p = NULL;
    char *name = gen_fresh(g, A_NAME), *other = gen_fresh(g, A_NAME), **lines = NULL;
    int female = gen_int(g, 2);
    const Fact *kinds[2];
    EvalTurn q[2];
    gen_two_kinds(g, kinds);

    // Two facts about somebody else, then the name
    for (int i = 0; i < 2; i++) tell_only(g, kinds[i], other, &lines);
    int room = g->length - 7 * gen_tokens(g, lines[0]); // four facts, the name and two questions are
                                                        // about as long as seven facts
    for (int i = 0; i < 2; i++) add_turn(&p, plain_turn(lines[i], "Okay."));
    char *met = set_printf(g->set, "I have a friend called %s.", name);
    add_turn(&p, plain_turn(met, "Okay."));

    // The two facts, told with a pronoun: "She lives in ...", "Her number is ..."
    for (int i = 0; i < 2; i++) {
        int owns = kinds[i] == &people_facts[3];
        const char *form = owns ? "%s number is %s." : kinds[i]->say, *pronoun;
        if (owns) pronoun = female ? "Her" : "His";
        else pronoun = female ? "She" : "He";
        add_filler_turns(g, &p, room / 3);
        q[i] = tell_fact(g, kinds[i], name, &lines);
        q[i].evidence[0] = set_printf(g->set, form, pronoun, q[i].answers[0]);
        arrput(q[i].evidence, met);
        add_turn(&p, plain_turn(q[i].evidence[0], "Okay."));
    }
    add_filler_turns(g, &p, room / 3);
    for (int i = 0; i < 2; i++) add_turn(&p, q[i]);
    arrfree(lines);
    add_versions(g, p, OWN_TURN, VERSIONS);
}

// ---- task facts
// Two facts about each of five people are scattered over four messages with filler. Then two facts
// are asked for, about two people; the second question comes when the first one has already gone
// through the cache.

// Makes a facts item, with the questions in turns of their own.
static void gen_facts(Gen *g) {
    Passage *p = NULL;
    const Fact *kinds[2];
    gen_two_kinds(g, kinds);
    int a = gen_int(g, 5), b = (a + 1 + gen_int(g, 4)) % 5;
    int asked[2] = { a, b };                            // who is asked for with each kind
    char **keys[4] = { 0 };
    EvalTurn q[2] = { 0 };
    for (int i = 0; i < 5; i++) {
        char *name = gen_fresh(g, A_NAME);
        for (int k = 0; k < 2; k++) {
            EvalTurn t = tell_fact(g, kinds[k], name, &keys[gen_int(g, 4)]);
            if (i == asked[k]) q[k] = t;
            else turn_free_lists(&t);
        }
    }
    for (int j = 0; j < 4; j++) {
        char **lines = document(g, g->length / 4 - 5, keys[j], -1);     // 5: room for the questions
        add_turn(&p, plain_turn(joined(g->set, lines, " "), "Okay."));
        arrfree(lines);
        arrfree(keys[j]);
    }
    for (int k = 0; k < 2; k++) add_turn(&p, q[k]);
    add_versions(g, p, OWN_TURN, VERSIONS);
}

// ---- task json
// Look-up of one key among many that fill the text: by the item's number in two JSON objects, in
// code or in prose. One other key differs from the one asked for in its last syllable; it is asked
// for in the next turn.
enum { FORM_JSON, FORM_CODE, FORM_PROSE, FORMS };

// A key that differs from this one in its last syllable, new in this item.
static char *similar_key(Gen *g, const char *key) {
    for (;;) {
        int kept = (int)strlen(key) - 2;
        char *near = set_printf(g->set, "%.*s%s", kept, key, gen_word(g, eval_syllables));
        if (word_in(g->used, near) >= 0) continue;
        arrput(g->used, near);
        return near;
    }
}

// Appends facts about new keys to *lines until about g->length tokens are full. Room is left for
// four sentences as long as `sentence`: two more facts and two questions. The steps become ever
// smaller, since the whole text is counted after each.
static void fill_with_facts(Gen *g, const Fact *f, char ***lines, const char *sep, const char *sentence) {
    for (;;) {
        int left = g->length - 4 * gen_tokens(g, sentence) - gen_tokens(g, joined(g->set, *lines, sep));
        if (left <= 8) return;
        for (int i = 0; i <= left / 20; i++) tell_only(g, f, gen_fresh(g, A_KEY), lines);
    }
}

// Makes two lines of the list, a JSON object each: the first half of the lines and the second.
static void lines_to_objects(EvalSet *e, char ***lines) {
    char **half[2] = { 0 };
    int n = (int)arrlen(*lines);
    for (int i = 0; i < n; i++) arrput(half[i >= n / 2], (*lines)[i]);
    arrsetlen(*lines, 0);
    for (int i = 0; i < 2; i++) {
        arrput(*lines, set_printf(e, "{%s}", joined(e, half[i], ", ")));
        arrfree(half[i]);
    }
}

// Makes a json item in all four versions.
static void gen_json(Gen *g) {
    static const char *forms[FORMS] = { "\"%s\": %s", "%s = %s", "%s is %s." };
    static const char *seps[FORMS] = { ", ", "\n", " " };
    int form = g->number % FORMS, depth = gen_depth(g);
    char **lines = NULL, *key = gen_fresh(g, A_KEY), *near = similar_key(g, key);
    Fact f = { forms[form], "What is the value of %s?", "The value of %s is {%s}.", A_CODE };
    Passage *p = NULL;
    EvalTurn q = tell_fact(g, &f, key, &lines), second = tell_fact(g, &f, near, &lines);
    q.depth = depth;

    // All other facts come first; then the second one anywhere, and the first one at its depth.
    arrsetlen(lines, 0);
    fill_with_facts(g, &f, &lines, seps[form], q.evidence[0]);
    int other = gen_int(g, (int)arrlen(lines) + 1);
    arrins(lines, other, second.evidence[0]);
    int own = (int)arrlen(lines) * depth / 100;
    arrins(lines, own, q.evidence[0]);

    if (form == FORM_JSON) lines_to_objects(g->set, &lines);
    add_passage(&p, lines, form == FORM_PROSE ? " " : "\n", q);
    add_turn(&p, second);
    add_versions(g, p, BEFORE_TEXT, VERSIONS);
}

// ---- task fewshot
// Three labels that examples alone define, three examples each. The first four examples come in one
// message behind filler, the rest in the next message, with the word to label. By a draw the labels
// are the names of the kinds ("animal") or words without a meaning ("zip").

// Puts the n texts into a random order.
static void gen_shuffle(Gen *g, char **list, int n) {
    for (int i = n - 1; i > 0; i--) {
        int k = gen_int(g, i + 1);
        char *x = list[i];
        list[i] = list[k];
        list[k] = x;
    }
}

// Makes a fewshot item, with the question in a turn of its own.
static void gen_fewshot(Gen *g) {
    static const struct { const char *label, *words; } pools[6] = {
        { "animal", eval_beasts }, { "food", eval_foods }, { "job", eval_jobs },
        { "city", eval_cities }, { "colour", eval_colours }, { "thing", eval_things },
    };
    char **shots = NULL, **classes = NULL, **part[2] = { 0 };
    char **lines = document(g, g->length - 50, NULL, -1);   // 50: room for the examples
    int first = gen_int(g, 6), step = 1 + gen_int(g, 2);    // label k is of pool (first + k step) % 6
    int named = gen_int(g, 2), right = gen_int(g, 3);       // the labels are names; the right label
    Passage *p = NULL;

    for (int k = 0; k < 3; k++) {
        int pool = (first + k * step) % 6;
        if (named) arrput(classes, set_printf(g->set, "%s", pools[pool].label));
        else arrput(classes, gen_fresh_word(g, eval_labels));
        for (int i = 0; i < 3; i++) {
            char *word = gen_fresh_word(g, pools[pool].words);
            arrput(shots, set_printf(g->set, "%s: %s", word, classes[k]));
        }
    }
    char *ask = set_printf(g->set, "%s:", gen_fresh_word(g, pools[(first + right * step) % 6].words));
    EvalTurn q = gold_turn(g->set, ask, set_printf(g->set, "The label is {%s}.", classes[right]));
    for (int i = 0; i < 3; i++) arrput(q.evidence, shots[3 * right + i]);
    gen_shuffle(g, shots, 9);
    for (int i = 0; i < 9; i++) arrput(part[i >= 4], shots[i]);

    char *text = joined(g->set, lines, " "), *shown = joined(g->set, part[0], "\n");
    q.user = message(g->set, part[1], "\n", q.user, BEHIND_TEXT);
    q.classes = classes;
    add_turn(&p, plain_turn(set_printf(g->set, "%s\n%s", text, shown), "I have read it."));
    add_turn(&p, q);
    arrfree(shots);
    arrfree(lines);
    arrfree(part[0]);
    arrfree(part[1]);
    add_versions(g, p, OWN_TURN, VERSIONS);
}

// ---- task summary
// One sentence of the text says that it is the one that matters; the right reply repeats it.

// What the sentence says: "Tara will come to Bern on Friday". Each item draws the words of all four
// kinds.
static char *gen_point(Gen *g) {
    int kind = gen_int(g, 4), hour = 1 + gen_int(g, 12);
    char *name = gen_value(g, A_NAME), *city = gen_value(g, A_CITY), *day = gen_word(g, eval_days);
    char *noun = gen_word(g, eval_nouns), *thing = gen_word(g, eval_things);
    switch (kind) {
    case 0:  return set_printf(g->set, "the %s is closed on %s", noun, day);
    case 1:  return set_printf(g->set, "%s will come to %s on %s", name, city, day);
    case 2:  return set_printf(g->set, "the meeting is in the %s at %d", gen_value(g, A_ROOM), hour);
    default: return set_printf(g->set, "the %s needs a new %s", noun, thing);
    }
}

// Makes a summary item in all four versions.
static void gen_summary(Gen *g) {
    static const char *marks[] = {
        "The main point is that %s.", "Important: %s.", "The most important thing is that %s."
    };
    int depth = gen_depth(g);
    char *point = gen_point(g), **keys = NULL;
    Passage *p = NULL;
    arrput(keys, set_printf(g->set, marks[gen_int(g, 3)], point));
    const char *ask = gen_int(g, 2) ? "What is the main point?" : "Give me a summary.";
    EvalTurn q = gold_turn(g->set, ask, set_printf(g->set, "The main point is that {%s.}", point));
    q.depth = depth;
    arrput(q.evidence, keys[0]);
    add_passage(&p, document(g, g->length - gen_tokens(g, q.user), keys, depth), " ", q);
    arrfree(keys);
    add_versions(g, p, BEFORE_TEXT, VERSIONS);
}

// ---- the table of tasks
static const struct {
    const char *name;
    int metric;
    void (*make)(Gen *g);
} eval_tasks[] = {
    { "needle",    METRIC_F1,    gen_needle },
    { "multiturn", METRIC_F1,    gen_multiturn },
    { "coref",     METRIC_F1,    gen_coref },
    { "facts",     METRIC_F1,    gen_facts },
    { "json",      METRIC_F1,    gen_json },
    { "fewshot",   METRIC_CLASS, gen_fewshot },
    { "summary",   METRIC_ROUGE, gen_summary },
};
enum { EVAL_TASKS = sizeof eval_tasks / sizeof *eval_tasks };

// Adds the texts 0..n-1 of a task, in all their versions, at every length (stb_ds).
static void make_items(EvalSet *e, const Tokenizer *tok, int task, const int *lengths, int n,
                       uint64_t seed) {
    for (int k = 0; k < (int)arrlen(lengths); k++) {
        uint64_t of_length = mix64(mix64(mix64(seed) + (uint64_t)task) + (uint64_t)lengths[k]);
        for (int i = 0; i < n; i++) {
            Gen g = {
                .tok = tok, .set = e, .task = eval_tasks[task].name, .number = i,
                .text = arrlen(e->item) ? arrlast(e->item).number + 1 : 0,
                .length = lengths[k], .metric = eval_tasks[task].metric,
                .rng = mix64(of_length + (uint64_t)i),
            };
            eval_tasks[task].make(&g);
            arrfree(g.used);
        }
    }
}

// ---- items from a file
// --eval-file has one JSON object a line; blank lines are skipped. A line is one of two things:
//   A dialogue   {"type":..,"metric":..,"turns":[{"user":..,"answers":[..],"classes":[..],"reply":..},..]}
//                In place of "user" a turn may have "paras":[..] and "query":.. A turn without answers
//                is not scored. The reply is the whole sentence around the first answer.
//   LongBench    {"input":..,"context":..,"answers":[..],"all_classes":[..] or null,"dataset":..}
//                It becomes one turn: the context, and behind it the input.
// The readers return 0; or -1, with err filled, when the line is neither.

// Appends the texts of the list obj[key], if there is one, to *list (stb_ds).
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

// Reads the text obj[key]. *text stays as it is when there is none.
static int read_text(EvalSet *e, const Json *obj, const char *key, char **text, char err[512]) {
    const Json *j = json_get(obj, key);
    if (json_none(j)) return 0;
    if (j->type != JSON_STRING) return fault(err, "'%s' is no text", key);
    *text = set_text(e, j->str, j->len);
    return 0;
}

// The name obj[key] of an item's task, or `other` if there is none.
static const char *read_task(EvalSet *e, const Json *obj, const char *key, const char *other) {
    const char *name = json_text(obj, key);
    return *name ? set_text(e, name, strlen(name)) : other;
}

// Reads one turn of a dialogue into *t, whose fields are 0.
static int read_turn(EvalSet *e, const Json *obj, EvalTurn *t, char err[512]) {
    char **paras = NULL, *query = NULL;
    if (obj->type != JSON_OBJECT) return fault(err, "is no object");
    t->position = t->depth = -1;
    int bad = read_text(e, obj, "user", &t->user, err)
           || read_text(e, obj, "query", &query, err)
           || read_text(e, obj, "reply", &t->reply, err)
           || read_list(e, obj, "paras", &paras, err)
           || read_list(e, obj, "answers", &t->answers, err)
           || read_list(e, obj, "classes", &t->classes, err);
    if (!bad && !t->user && (paras || query)) {
        t->user = message(e, paras, "\n\n", query, BEHIND_TEXT);
        if (paras && query) t->position = BEHIND_TEXT;
    }
    arrfree(paras);
    if (bad) return -1;

    // Where the first answer stands in the reply
    const char *at = t->reply && t->answers ? strstr(t->reply, t->answers[0]) : NULL;
    if (at) {
        int from = (int)(at - t->reply);
        arrput(t->span, from);
        arrput(t->span, from + (int)strlen(t->answers[0]));
    }
    return t->user ? 0 : fault(err, "has neither 'user' nor 'paras' and 'query'");
}

// Reads a dialogue into *it.
static int read_dialogue(EvalSet *e, const Json *obj, const Json *turns, EvalItem *it, char err[512]) {
    const char *metric = json_text(obj, "metric");
    char why[512];
    if (turns->type != JSON_ARRAY || !turns->n) return fault(err, "'turns' is no list of turns");

    it->metric = METRIC_FOUND;
    if (*metric) {
        it->metric = 0;
        while (it->metric < METRICS && strcmp(metric, eval_metrics[it->metric])) it->metric++;
    }
    if (it->metric == METRICS)
        return fault(err, "'metric' wants one of f1, accuracy, rouge, rouge-longbench, found, exact, "
                     "found '%.40s'", metric);
    it->task = read_task(e, obj, "type", it->task);

    for (int i = 0; i < turns->n; i++) {
        EvalTurn t = { 0 };
        int bad = read_turn(e, &turns->item[i], &t, why);
        arrput(it->turn, t);
        if (bad) return fault(err, "turn %d: %.400s", i + 1, why);
        if (it->metric == METRIC_CLASS && t.answers && !t.classes)
            return fault(err, "turn %d: metric accuracy wants 'classes'", i + 1);
    }
    return 0;
}

// Does the name of a LongBench dataset begin with one of the n beginnings? ("trec_e" is a trec.)
static int begins_with_one(const char *name, const char *const *beginnings, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!strncmp(name, beginnings[i], strlen(beginnings[i]))) return 1;
    }
    return 0;
}

// Reads a LongBench item into *it. The metric is Rouge-L for the summaries, accuracy where there
// are classes, otherwise F1; some datasets score the first line of a reply only.
static int read_longbench(EvalSet *e, const Json *obj, EvalItem *it, char err[512]) {
    static const char *const summaries[] = {
        "gov_report", "qmsum", "multi_news", "vcsum", "samsum", "dureader"
    };
    static const char *const one_line[] = { "trec", "lsht", "triviaqa", "samsum" };
    char *context = NULL, *input = NULL, **lines = NULL;
    EvalTurn t = { .position = BEHIND_TEXT, .depth = -1 };

    // The turn
    int bad = read_text(e, obj, "context", &context, err)
           || read_text(e, obj, "input", &input, err)
           || read_list(e, obj, "answers", &t.answers, err)
           || read_list(e, obj, "all_classes", &t.classes, err);
    if (!bad && !t.answers) bad = fault(err, "a LongBench item without 'answers'");
    if (!bad && context && *context) arrput(lines, context);
    t.user = message(e, lines, "\n\n", input && *input ? input : NULL, BEHIND_TEXT);
    arrfree(lines);
    arrput(it->turn, t);
    if (!bad && !*t.user) bad = fault(err, "'context' and 'input' are both empty");

    // The item
    it->task = read_task(e, obj, "dataset", it->task);
    it->metric = t.classes ? METRIC_CLASS : METRIC_F1;
    if (begins_with_one(it->task, summaries, sizeof summaries / sizeof *summaries))
        it->metric = METRIC_ROUGE_LONGBENCH;
    it->first_line = begins_with_one(it->task, one_line, sizeof one_line / sizeof *one_line);
    return bad;
}

// Reads one line of n bytes and appends its item to the set, a faulty one as well: the set frees
// it.
static int read_item(EvalSet *e, const Tokenizer *tok, const char *line, size_t n, char err[512]) {
    Json *obj = json_parse(line, n, err);
    if (!obj) return -1;
    const Json *turns = json_get(obj, "turns");
    EvalItem it = { .task = "file", .number = (int)arrlen(e->item) };
    int bad;
    if (obj->type != JSON_OBJECT) bad = fault(err, "is no object");
    else if (json_holds_nul(obj)) bad = fault(err, "a text holds the character \\u0000");
    else if (turns) bad = read_dialogue(e, obj, turns, &it, err);
    else if (json_get(obj, "input") || json_get(obj, "context")) bad = read_longbench(e, obj, &it, err);
    else bad = fault(err, "neither 'turns' (a dialogue) nor 'input' and 'context' (LongBench)");

    for (int i = 0; i < (int)arrlen(it.turn) && !bad; i++) {
        int *ids = tokenizer_encode(tok, it.turn[i].user, strlen(it.turn[i].user), 0, NULL);
        it.length += (int)arrlen(ids);
        arrfree(ids);
    }
    arrput(e->item, it);
    json_free(obj);
    return bad;
}

// Reads all items of a file. Ends the program with EXIT_USAGE, and the number of the line, on the
// first one that is malformed, and when no turn of the file is scored.
static void read_items(EvalSet *e, const Tokenizer *tok, const char *path) {
    char err[512];
    size_t n;
    char *text = read_file(path, &n, err);
    if (!text) die(EXIT_USAGE, "--eval-file %s", err);

    char *stop = text + n, *end;
    int line = 1, scored = 0;
    for (char *p = text; p < stop; p = end + 1, line++) {
        end = memchr(p, '\n', (size_t)(stop - p));
        if (!end) end = stop;
        char *solid = p;
        while (solid < end && isspace((unsigned char)*solid)) solid++;
        if (solid == end) continue;
        if (!read_item(e, tok, p, (size_t)(end - p), err)) continue;
        free(text);
        die(EXIT_USAGE, "--eval-file %s, line %d: %s", path, line, err);
    }
    free(text);
    for (int i = 0; i < (int)arrlen(e->item); i++) scored += scored_turns(&e->item[i]);
    if (!scored) die(EXIT_USAGE, "--eval-file %s: no turn has 'answers'", path);
}

// ---- how an item is played
static void note_answer(const EvalItem *it, int turn, const char *said, Score *sc);     // see metrics
static void note_logits(const float *ref, const float *y, int V, Score *sc);
static double log_sum_exp(const float *x, int n);

// An empty record and an empty cache.
static void play_start(App *a) {
    record_clear(a);
    session_reset(a->s);
    a->closed = 0;
    interrupts = 0;
}

// Renders a message by the chat template, appends it to the record and prefills it.
static void play_prefill(App *a, const char *text) {
    Turn t = render_turn(a, text);
    arrput(a->turn, t);
    feed_prefill(a, &t);
}

// The right reply as ids (stb_ds): the sentence, else the first answer. A turn that is not scored
// and has no reply is answered with "Okay."
static int *gold_ids(const App *a, const EvalTurn *t) {
    const char *text = "Okay.";
    if (t->reply) text = t->reply;
    else if (t->answers) text = t->answers[0];
    int *ids = tokenizer_encode(a->tok, text, strlen(text), 0, NULL);
    ids_must_have_rows(a->c, ids, (int)arrlen(ids));             // their logits are read before they are fed
    return ids;
}

// Adds what the session cost. Called once an item.
static void note_cost(const Session *s, Score *sc) {
    sc->items++;
    sc->peak = fmax(sc->peak, (double)s->clk.peak);
    sc->stored += (double)kv_bytes(s);
    sc->full += (double)kv_bytes_full(s);
    sc->attended += bytes_a_step(s);
    sc->prefill_s += s->clk.prefill;
    sc->decode_s += s->clk.decode;
    sc->n_prefill += (double)s->clk.n_prefill;
    sc->n_decode += (double)s->clk.n_decode;
}

// The free pass: the method answers every turn. A reply may be as long as --n-predict, by default
// 64 tokens or twice the right reply, whichever is more.
static void play_free(App *a, const EvalItem *it, Score *sc) {
    int gold = !strcmp(opt_str(a->o, "eval-history"), "gold");
    int limit = opt_int(a->o, "n-predict");             // negative: the default
    play_start(a);
    for (int i = 0; i < (int)arrlen(it->turn); i++) {
        char *said = NULL;
        size_t n = 0;
        int *right = gold_ids(a, &it->turn[i]), most = max_int(2 * (int)arrlen(right), 64);
        FILE *f = memory_stream(&said, &n);
        play_prefill(a, it->turn[i].user);
        generate(a, limit < 0 ? most : limit, f);
        memory_stream_close(f);
        if (it->turn[i].answers) note_answer(it, i, said, sc);
        free(said);

        if (gold) {                                     // the history changes, so the cache is rebuilt
            arrfree(arrlast(a->turn).dec);
            arrlast(a->turn).dec = right;
            replay(a, (int)arrlen(a->turn));
        } else {
            arrfree(right);
        }
    }
    note_cost(a->s, sc);
}

// Does a token of the reply, its bytes [from,to), touch the answer?
static int in_answer(const EvalTurn *t, int from, int to) {
    int hit = !arrlen(t->span);
    for (int i = 0; i + 1 < (int)arrlen(t->span); i += 2)
        hit |= from < t->span[i + 1] && to > t->span[i];
    return hit;
}

// The forced pass: the right replies are fed whatever the method would say. It is played twice an
// item.
//   sc NULL  Full attention plays. Its logits at every token of a scored reply are appended to *ref
//            (stb_ds, V a row).
//   sc       A method plays. Its logits are compared with the rows of *ref, and the NLL of every right
//            answer goes to the answers that play_free appended to sc->answers.
static void play_forced(App *a, const EvalItem *it, float **ref, Score *sc) {
    int V = a->c->V, turns = (int)arrlen(it->turn);
    int answer = sc ? (int)arrlen(sc->answers) - scored_turns(it) : 0;      // the item's next answer
    size_t row = 0;                                                         // the next row of *ref
    play_start(a);
    for (int i = 0; i < turns; i++) {
        const EvalTurn *t = &it->turn[i];
        int *ids = gold_ids(a, t), n = (int)arrlen(ids), counted = 0;
        Decoder d = { .t = a->tok };
        char *text = NULL;
        double nll = 0;                                 // sum over the `counted` tokens of the answer
        play_prefill(a, t->user);
        for (int k = 0; k < n; k++) {
            int from = (int)arrlen(text);
            text = decode_token(&d, ids[k], text);
            if (t->answers && !sc) memcpy(arraddnptr(*ref, V), a->logits, (size_t)V * sizeof **ref);
            if (t->answers && sc) {
                note_logits(*ref + V * row++, a->logits, V, sc);
                if (in_answer(t, from, (int)arrlen(text))) {
                    nll += log_sum_exp(a->logits, V) - a->logits[ids[k]];
                    counted++;
                }
            }
            // Nothing is asked behind the last token of the dialogue.
            if (i < turns - 1 || k < n - 1) feed_decode(a, ids[k]);
        }
        if (t->answers && sc) sc->answers[answer++].nll = counted ? nll / counted : 0;
        arrfree(ids);
        arrfree(text);
    }
}

// ---- metrics: words
// Every metric takes two texts, what was said and what is right (gold), and returns 0..1.

// How a text is cut into words.
enum {
    WORDS_RAW,      // at white space
    WORDS_PLAIN,    // also in lower case and without ASCII punctuation
    WORDS_BARE      // also without the articles a, an, the
};

// The words of a text: an stb_ds array of malloc'd strings, for words_free.
static char **words_of(const char *text, int how) {
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
            int article = !strcmp(w, "a") || !strcmp(w, "an") || !strcmp(w, "the");
            if (how != WORDS_BARE || !article) arrput(words, copy_text(w));
            arrsetlen(w, 0);
        }
        if (!c) break;
    }
    arrfree(w);
    return words;
}

// Frees a list that words_of made.
static void words_free(char **w) {
    while (arrlen(w)) free(arrpop(w));
    arrfree(w);
}

// The harmonic mean of precision same/n and recall same/m: F = 2 P R / (P + R).
static double f_measure(double same, double n, double m) {
    return same > 0 ? 2 * (same / n) * (same / m) / (same / n + same / m) : 0;
}

// F1 of the two bags of words: a word that comes twice in both counts twice.
static double word_f1(const char *said, const char *gold) {
    char **a = words_of(said, WORDS_BARE), **b = words_of(gold, WORDS_BARE);
    int n = (int)arrlen(a), m = (int)arrlen(b), same = 0;
    for (int i = 0; i < n; i++) {
        int j = word_in(b, a[i]);
        if (j < 0) continue;
        free(b[j]);
        arrdelswap(b, j);
        same++;
    }
    words_free(a);
    words_free(b);
    return f_measure(same, n, m);
}

// Does the reply hold the answer as whole words in their order? With `whole`: and nothing else?
static int holds_answer(const char *said, const char *gold, int whole) {
    char **a = words_of(said, WORDS_BARE), **b = words_of(gold, WORDS_BARE);
    int n = (int)arrlen(a), m = (int)arrlen(b), hit = 0;
    int possible = m > 0 && (!whole || n == m);
    for (int i = 0; possible && !hit && i + m <= n; i++) {
        int j = 0;
        while (j < m && !strcmp(a[i + j], b[j])) j++;
        hit = j == m;
    }
    words_free(a);
    words_free(b);
    return hit;
}

// Accuracy on TREC as LongBench means it, from the first line of the reply. If the line names the
// right label, the point is shared among all labels that the line names. Labels that are a part of
// the right one do not count: whoever says the right one says them, too.
static double class_accuracy(const char *said, const char *gold, char **classes) {
    while (*said == '\n') said++;
    char *line = copy_bytes(said, strcspn(said, "\n"));
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

// ---- metrics: Rouge-L

// Fills table (n+1,m+1): entry [i][j] is the length of the longest common subsequence of the first
// i words of a and the first j words of b. Malloc'd.
static int *lcs_table(char **a, int n, char **b, int m) {
    int *t = xcalloc((size_t)(n + 1) * (m + 1), sizeof *t), w = m + 1;
    for (int i = 1; i <= n; i++) {
        for (int j = 1; j <= m; j++) {
            int up = t[(size_t)(i - 1) * w + j], left = t[(size_t)i * w + j - 1];
            int diagonal = t[(size_t)(i - 1) * w + j - 1];
            t[(size_t)i * w + j] = strcmp(a[i - 1], b[j - 1]) ? max_int(up, left) : diagonal + 1;
        }
    }
    return t;
}

// Rouge-L: the F measure of the longest common subsequence of words.
static double rouge_l(const char *said, const char *gold) {
    char **a = words_of(said, WORDS_RAW), **b = words_of(gold, WORDS_RAW);
    int n = (int)arrlen(a), m = (int)arrlen(b), *t = lcs_table(a, n, b, m);
    int same = t[(size_t)(n + 1) * (m + 1) - 1];
    free(t);
    words_free(a);
    words_free(b);
    return f_measure(same, n, m);
}

// The sentences of a text, each a list of words: an stb_ds array of stb_ds arrays. Sentences end at
// full stops. A sentence of blanks counts as one empty word, as it does in LongBench's package.
static char ***sentences_of(const char *text) {
    char ***list = NULL;
    for (const char *p = text; *p; p += *p == '.') {
        size_t n = strcspn(p, ".");
        if (!n) continue;
        char *one = copy_bytes(p, n), **words = words_of(one, WORDS_RAW);
        if (!words) arrput(words, copy_text(""));
        arrput(list, words);
        free(one);
        p += n;
    }
    return list;
}

// Frees a list that sentences_of made.
static void sentences_free(char ***list) {
    while (arrlen(list)) words_free(arrpop(list));
    arrfree(list);
}

// Adds a word to a set (stb_ds) if it is new. The set does not own it.
static void set_add(char ***set, char *w) {
    if (word_in(*set, w) < 0) arrput(*set, w);
}

// The number of different words in all sentences.
static int count_words(char ***sentences) {
    char **set = NULL;
    for (int i = 0; i < (int)arrlen(sentences); i++) {
        for (int j = 0; j < (int)arrlen(sentences[i]); j++) set_add(&set, sentences[i][j]);
    }
    int n = (int)arrlen(set);
    arrfree(set);
    return n;
}

// Adds the words of one longest common subsequence of the sentences a and b to *common. The path
// through the table is walked backwards; at a tie it goes to the left, as LongBench's package does.
static void add_common(char ***common, char **a, char **b) {
    int i = (int)arrlen(a), j = (int)arrlen(b), w = j + 1, *t = lcs_table(a, i, b, j);
    while (i && j) {
        int up = t[(size_t)(i - 1) * w + j], left = t[(size_t)i * w + j - 1];
        if (!strcmp(a[i - 1], b[j - 1])) {
            set_add(common, a[i - 1]);
            i--;
            j--;
        } else if (up > left) {
            i--;
        } else {
            j--;
        }
    }
    free(t);
}

// Rouge-L as LongBench's package counts it: the words of the longest common subsequences of all
// pairs of sentences are united as a set, and P and R are its shares of the sets of words of the
// two texts.
static double rouge_l_longbench(const char *said, const char *gold) {
    char ***a = sentences_of(gold), ***b = sentences_of(said), **common = NULL;
    for (int x = 0; x < (int)arrlen(a); x++) {
        for (int y = 0; y < (int)arrlen(b); y++) add_common(&common, a[x], b[y]);
    }
    double same = (double)arrlen(common);
    double r = same / (double)max_int(count_words(a), 1);
    double p = same / (double)max_int(count_words(b), 1);
    arrfree(common);
    sentences_free(a);
    sentences_free(b);
    return 2 * p * r / (p + r + 1e-8);
}

// ---- metrics: the score of a reply

// The score of a reply against one right answer.
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

// The best score over the right answers of a turn.
static double best_score(int metric, const char *said, const EvalTurn *t) {
    double best = 0;
    for (int i = 0; i < (int)arrlen(t->answers); i++)
        best = fmax(best, score_by(metric, said, t->answers[i], t->classes));
    return best;
}

// The words of the right reply without its answer: "The code is" for "The code is {4821}." Plain
// words, for words_free.
static char **frame_words(const EvalTurn *t) {
    char *text = NULL;
    int passed = 0;                                     // borders of t->span; odd: inside the answer
    for (int i = 0; t->reply[i]; i++) {
        while (passed < (int)arrlen(t->span) && i >= t->span[passed]) passed++;
        arrput(text, passed % 2 ? ' ' : t->reply[i]);
    }
    arrput(text, 0);
    char **frame = words_of(text, WORDS_PLAIN);
    arrfree(text);
    return frame;
}

// The reply without the sentence around its answer: "The code is 4821." leaves "4821.", so that a
// model that answers in whole sentences is scored as one that answers in a word. Each word of the
// right reply's frame goes once; a wrong value stays. Without a known frame the reply is copied.
// Malloc'd.
static char *without_frame(const EvalTurn *t, const char *said) {
    if (!arrlen(t->span)) return copy_text(said);
    char **frame = frame_words(t), **words = words_of(said, WORDS_RAW), *out = NULL;
    for (int i = 0; i < (int)arrlen(words); i++) {
        char **plain = words_of(words[i], WORDS_PLAIN);
        int at = plain ? word_in(frame, plain[0]) : -1;
        words_free(plain);
        if (at >= 0) {
            free(frame[at]);
            arrdelswap(frame, at);
        } else {
            put_part(&out, " ", words[i]);
        }
    }
    arrput(out, 0);
    char *rest = copy_text(out);
    arrfree(out);
    words_free(frame);
    words_free(words);
    return rest;
}

// Scores what was said in a turn by all metrics and appends the Answer. Its NLL is left at 0 for
// play_forced.
static void note_answer(const EvalItem *it, int turn, const char *said, Score *sc) {
    const EvalTurn *t = &it->turn[turn];
    while (it->first_line && *said == '\n') said++;
    char *line = copy_bytes(said, it->first_line ? strcspn(said, "\n") : strlen(said));
    char *rest = without_frame(t, line);
    arrput(sc->answers, ((Answer){
        .task = it->task, .item = it->number, .turn = turn, .turns = (int)arrlen(it->turn),
        .position = t->position, .length = it->length, .depth = t->depth,
        .score = best_score(it->metric, rest, t),
    }));
    sc->exact += best_score(METRIC_EXACT, rest, t);
    sc->found += best_score(METRIC_FOUND, rest, t);
    sc->f1 += best_score(METRIC_F1, rest, t);
    sc->rouge += best_score(METRIC_ROUGE, rest, t);
    sc->rouge_lb += best_score(METRIC_ROUGE_LONGBENCH, rest, t);
    free(rest);
    free(line);
}

// ---- metrics: logits

// log(sum of exp(x)) of n logits, so that log p_i = x_i - log_sum_exp(x).
static double log_sum_exp(const float *x, int n) {
    double max = x[argmax(x, n)], sum = 0;
    for (int i = 0; i < n; i++) sum += exp(x[i] - max);
    return max + log(sum);
}

// KL(softmax p || softmax q) of two rows of logits (n), in nats. Rounding never makes it negative.
static double divergence(const float *p, const float *q, int n) {
    double zp = log_sum_exp(p, n), zq = log_sum_exp(q, n), sum = 0;
    for (int i = 0; i < n; i++) sum += exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
    return sum > 0 ? sum : 0;
}

// Adds one predicted token: full attention's logits ref (V) against the method's y (V).
static void note_logits(const float *ref, const float *y, int V, Score *sc) {
    double d = divergence(ref, y, V);
    sc->kld += d;
    sc->top1 += argmax(ref, V) == argmax(y, V);
    sc->predicted++;
    arrput(sc->each, d);
}

// ---- scores and intervals
// An interval holds the 95 % in the middle of 1,000 means, each over texts drawn with replacement.
// A text is drawn with all its versions and turns, because their scores go together.
enum { RESAMPLES = 1000 };

// Orders doubles, for qsort.
static int double_order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The 2.5th (*lo) and the 97.5th percentile (*hi) of the mean score of n answers, those of a text
// side by side. With base, the scores of another row for the same answers, it is the interval of
// the difference of the two means.
static void bootstrap(const Answer *x, const Answer *base, int n, uint64_t seed, double *lo, double *hi) {
    double *sum = NULL, mean[RESAMPLES];
    int *count = NULL;

    // The sum and the number of the scores of every text
    for (int i = 0; i < n; i++) {
        if (!i || x[i].item != x[i - 1].item) {
            arrput(sum, 0);
            arrput(count, 0);
        }
        arrlast(sum) += x[i].score - (base ? base[i].score : 0);
        arrlast(count)++;
    }

    // The means
    int texts = (int)arrlen(sum);
    for (int r = 0; r < RESAMPLES; r++) {
        double s = 0;
        long c = 0;
        for (int i = 0; i < texts; i++) {
            int k = (int)(splitmix64(&seed) % (uint64_t)texts);
            s += sum[k];
            c += count[k];
        }
        mean[r] = c ? s / (double)c : 0;
    }
    qsort(mean, RESAMPLES, sizeof *mean, double_order);
    *lo = mean[RESAMPLES / 40];
    *hi = mean[RESAMPLES - 1 - RESAMPLES / 40];
    arrfree(sum);
    arrfree(count);
}

// Which answers of a row: a position -1..2 (see Answer), or one of these.
enum {
    ANY_PLACE = -2,
    LAST_TURN = -3      // the last turns of the items
};

// Does the answer belong to the place?
static int is_at(const Answer *x, int place) {
    if (place == ANY_PLACE) return 1;
    if (place == LAST_TURN) return x->turn == x->turns - 1;
    return x->position == place;
}

// The answers of a task (NULL: any task) at a place. stb_ds; NULL when there are none.
static Answer *answers_of(const Answer *x, const char *task, int place) {
    Answer *some = NULL;
    for (int i = 0; i < (int)arrlen(x); i++) {
        if (task && strcmp(task, x[i].task)) continue;
        if (is_at(&x[i], place)) arrput(some, x[i]);
    }
    return some;
}

// The mean score of the answers (stb_ds).
static double mean_score(const Answer *x) {
    double sum = 0;
    for (int i = 0; i < (int)arrlen(x); i++) sum += x[i].score;
    return sum / (double)arrlen(x);
}

// The mean NLL of the answers (stb_ds).
static double mean_nll(const Answer *x) {
    double sum = 0;
    for (int i = 0; i < (int)arrlen(x); i++) sum += x[i].nll;
    return sum / (double)arrlen(x);
}

// Fills what needs all items of the row: the interval of the mean score, and the 99th percentile of
// the KLD.
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

// ---- tables: the fields of a row

// One number of a row. CSV and JSON print all fields, the Markdown table some.
typedef struct {
    char name[48];
    double x;               // as CSV and JSON print it
    int in_table;           // 1: the Markdown table has it
    char text[48];          // as the table prints it
} Field;

// What the rows of a run share.
typedef struct {
    const App *a;
    const Score *rows;      // all rows (stb_ds)
    uint64_t seed;          // of the intervals
    int ppl;                // 1: --eval ppl and kld
} EvalRun;

static void add_field(Field **c, int in_table, const char *name, double x, const char *fmt, ...)
    KV_PRINTF(5, 6);

// Appends a field to *c (stb_ds); fmt and what follows print its text.
static void add_field(Field **c, int in_table, const char *name, double x, const char *fmt, ...) {
    Field k = { .x = x, .in_table = in_table };
    va_list ap;
    va_start(ap, fmt);
    snprintf(k.name, sizeof k.name, "%s", name);
    for (char *p = k.name; *p; p++) {                   // the task name of a file must not break a table
        if (!isalnum((unsigned char)*p) && !strchr("_.-", *p)) *p = '_';
    }
    vsnprintf(k.text, sizeof k.text, fmt, ap);
    va_end(ap);
    arrput(*c, k);
}

// Appends a number of bytes.
static void add_bytes(Field **c, int in_table, const char *name, double x) {
    char text[32];
    human_bytes(x, text);
    add_field(c, in_table, name, x, "%s", text);
}

// How much of a mean score is printed, and where.
enum {
    MEAN_HIDDEN,            // the mean alone, for CSV and JSON
    MEAN_SHOWN,             // the mean in the table; its interval and its gap to full for CSV and JSON
    ALL_SHOWN               // all of it in the table
};

// Appends a mean score. With base, it is the gap between the means of x and base.
static void add_mean(Field **c, int detail, const char *name, const Answer *x, const Answer *base,
                     uint64_t seed) {
    const char *form = base ? "%+.3f" : "%.3f", *forms = base ? "%+.3f..%+.3f" : "%.3f..%.3f";
    const char *gap = base ? "_gap" : "";
    double mean = mean_score(x) - (base ? mean_score(base) : 0), lo, hi;
    char full_name[64];
    snprintf(full_name, sizeof full_name, "%.40s%s", name, gap);
    add_field(c, detail >= (base ? ALL_SHOWN : MEAN_SHOWN), full_name, mean, form, mean);
    if (detail == MEAN_HIDDEN) return;

    bootstrap(x, base, (int)arrlen(x), seed, &lo, &hi);
    snprintf(full_name, sizeof full_name, "%.40s%s_lo", name, gap);
    add_field(c, 0, full_name, lo, form, lo);
    snprintf(full_name, sizeof full_name, "%.40s%s_hi", name, gap);
    add_field(c, detail == ALL_SHOWN, full_name, hi, forms, lo, hi);
}

// The row that the gaps of row s are measured from: that of --compare-base, the one with the same
// budget if it has several. NULL: there is none, or the run has no answers.
static const Score *base_of(const Score *s, const EvalRun *run) {
    const char *name = opt_str(run->a->o, "compare-base");
    const Score *base = NULL;
    for (int r = 0; r < (int)arrlen(run->rows) && !run->ppl; r++) {
        const Score *x = &run->rows[r];
        if (strcmp(x->name, name)) continue;
        if (!base || x->budget == s->budget) base = x;
    }
    return base;
}

// Appends the mean score of some answers of the row, if there are any, and its gap to the row of
// --compare-base.
static void add_score(Field **c, int detail, const char *name, const Score *s, const EvalRun *run,
                      const char *task, int place) {
    Answer *x = answers_of(s->answers, task, place);
    const Score *from = base_of(s, run);
    Answer *base = from ? answers_of(from->answers, task, place) : NULL;
    if (x) add_mean(c, detail, name, x, NULL, run->seed);
    if (x && base && detail != MEAN_HIDDEN) add_mean(c, detail, name, x, base, run->seed);
    arrfree(x);
    arrfree(base);
}

// Is answer i the first one of its task?
static int first_of_task(const Answer *x, int i) {
    for (int j = 0; j < i; j++) {
        if (!strcmp(x[i].task, x[j].task)) return 0;
    }
    return 1;
}

// Appends the fields of a row that holds answers: the score over everything, by task in the order
// of the items, by position and over last turns; then the other metrics and the NLL.
static void score_fields(Field **c, const Score *s, const EvalRun *run) {
    static const char *places[] = { "alone", "begin", "middle", "end" };        // position -1..2
    const Answer *x = s->answers;
    double n = (double)arrlen(x), nll = mean_nll(x);
    char name[48];
    add_score(c, ALL_SHOWN, "score", s, run, NULL, ANY_PLACE);
    for (int i = 0; i < (int)n; i++) {
        if (!first_of_task(x, i)) continue;
        add_score(c, MEAN_SHOWN, x[i].task, s, run, x[i].task, ANY_PLACE);
        for (int p = -1; p < 3; p++) {
            snprintf(name, sizeof name, "%.30s_%s", x[i].task, places[p + 1]);
            add_score(c, MEAN_HIDDEN, name, s, run, x[i].task, p);
        }
    }
    for (int p = -1; p < 3; p++) add_score(c, MEAN_SHOWN, places[p + 1], s, run, NULL, p);
    add_score(c, MEAN_SHOWN, "last_turn", s, run, NULL, LAST_TURN);

    add_field(c, 0, "exact", s->exact / n, "%.3f", s->exact / n);
    add_field(c, 1, "found", s->found / n, "%.3f", s->found / n);
    add_field(c, 0, "f1", s->f1 / n, "%.3f", s->f1 / n);
    add_field(c, 0, "rouge_l", s->rouge / n, "%.3f", s->rouge / n);
    add_field(c, 0, "rouge_l_longbench", s->rouge_lb / n, "%.3f", s->rouge_lb / n);
    add_field(c, 1, "nll", nll, "%.3f", nll);
}

// All fields of a row (stb_ds): scores, perplexity and divergence where they were measured, bytes
// and speed.
static Field *row_fields(const Score *s, const EvalRun *run) {
    Field *c = NULL;
    double items = s->items ? s->items : 1, n = s->predicted ? (double)s->predicted : 1;
    double stored = s->stored / (s->full > 0 ? s->full : 1), perplexity = exp(s->nll / n);
    double prefill_rate = rate((long)s->n_prefill, s->prefill_s);
    double decode_rate = rate((long)s->n_decode, s->decode_s);
    if (s->answers) score_fields(&c, s, run);
    if (run->ppl) add_field(&c, 1, "ppl", perplexity, "%.4f", perplexity);
    if (s->each) {
        add_field(&c, 1, "kld_mean", s->kld / n, "%.4f", s->kld / n);
        add_field(&c, run->ppl, "kld_p99", s->kld_top, "%.3f", s->kld_top);
        add_field(&c, 1, "top1", s->top1 / n, "%.3f", s->top1 / n);
    }
    add_field(&c, 1, "stored", stored, "%.1f %%", 100 * stored);
    add_bytes(&c, 1, "kv_bytes_stored", s->stored / items);
    add_bytes(&c, 0, "kv_bytes_full", s->full / items);
    add_bytes(&c, 1, "kv_bytes_attended", s->attended / items);
    add_bytes(&c, 1, "kv_bytes_peak", s->peak);
    add_field(&c, 1, "prefill_s", s->prefill_s, "%.2f", s->prefill_s);
    add_field(&c, 0, "pp_tok_s", prefill_rate, "%.4g", prefill_rate);
    add_field(&c, 1, "tg_tok_s", decode_rate, "%.4g", decode_rate);
    return c;
}

// ---- tables: text, CSV, JSON
enum { AS_TABLE, AS_CSV, AS_JSON };

// A row of the Markdown table, with the head of the table before the first one.
static void print_table_row(const Score *s, const Field *c, int first, FILE *f) {
    int n = (int)arrlen(c);
    if (first) {
        fprintf(f, "| method | budget");
        for (int i = 0; i < n; i++) {
            if (c[i].in_table) fprintf(f, " | %s", strstr(c[i].name, "_hi") ? "95 %" : c[i].name);
        }
        fprintf(f, " |\n|---|---:");
        for (int i = 0; i < n; i++) {
            if (c[i].in_table) fprintf(f, "|---:");
        }
        fprintf(f, "|\n");
    }
    fprintf(f, "| %s | %d", s->name, s->budget);
    for (int i = 0; i < n; i++) {
        if (c[i].in_table) fprintf(f, " | %s", c[i].text);
    }
    fprintf(f, " |\n");
}

// A line of CSV, with the line of names before the first one.
static void print_csv_row(const Score *s, const Field *c, int first, FILE *f) {
    int n = (int)arrlen(c);
    if (first) {
        fprintf(f, "method,budget,items,scored");
        for (int i = 0; i < n; i++) fprintf(f, ",%s", c[i].name);
        fprintf(f, "\n");
    }
    fprintf(f, "%s,%d,%d,%d", s->name, s->budget, s->items, (int)arrlen(s->answers));
    for (int i = 0; i < n; i++) fprintf(f, ",%.6g", c[i].x);
    fprintf(f, "\n");
}

// A JSON object on one line, with the options that the user set.
static void print_json_row(const Score *s, const Field *c, const App *a, FILE *f) {
    fprintf(f, "{");
    json_pair(f, "method", s->name);
    fprintf(f, "\"budget\":%d,", s->budget);
    json_pair(f, "model", a->c->dir);
    fprintf(f, "\"items\":%d,\"scored\":%d,", s->items, (int)arrlen(s->answers));
    for (int i = 0; i < (int)arrlen(c); i++) fprintf(f, "\"%s\":%.6g,", c[i].name, c[i].x);
    json_options(a, f);
    fprintf(f, "}\n");
}

// Prints a row in the form `how` (AS_*).
static void print_row(const Score *s, const EvalRun *run, int how, int first, FILE *f) {
    Field *c = row_fields(s, run);
    if (how == AS_JSON) print_json_row(s, c, run->a, f);
    else if (how == AS_CSV) print_csv_row(s, c, first, f);
    else print_table_row(s, c, first, f);
    arrfree(c);
    fflush(f);
}

// ---- the modes: the rows of a run

// Writes the k-th word of the list "a,b,c" to out and returns out; NULL behind the last word.
static const char *list_word(const char *list, int k, char out[160]) {
    for (; k; k--) {
        list = strchr(list, ',');
        if (!list) return NULL;
        list++;
    }
    snprintf(out, 160, "%.*s", (int)strcspn(list, ","), list);
    return out;
}

// A copy of the options that the user set. A session reads its options again at every reset, so
// each row has its own.
static Options *options_copy(const Options *o) {
    Options *c = options_new();
    char err[256];
    for (int i = 0; i < (int)shlen(o->given); i++) {
        const char *key = o->given[i].key;
        if (options_set(c, key, opt_str(o, key), err)) die(EXIT_RUN, "%s", err);
    }
    return c;
}

// The session of a row and the options it was opened with.
typedef struct {
    Options *o;
    Session *s;
} OpenRow;

// Closes a row's session.
static void open_close(OpenRow *p) {
    session_close(p->s);
    options_free(p->o);
}

// Does the budget matter to this session? A method that selects rows has one.
static int has_budget(const Session *s) {
    for (int i = 0; i < s->n_part; i++) {
        if (s->part[i].m->role & ROLE_SELECT) return s->budget > 0;
    }
    return 0;
}

// Opens every row of --compare x --budgets before anything runs, so that a wrong name ends the
// program at once. A method without a budget gets one row. Returns the rows (stb_ds), their
// sessions in *open.
static Score *open_rows(const App *a, OpenRow **open) {
    char name[160], budget[160], err[256];
    const char *list = *opt_str(a->o, "compare") ? opt_str(a->o, "compare") : a->method;
    const char *budgets = opt_str(a->o, "budgets");
    Score *rows = NULL;
    for (int i = 0; list_word(list, i, name); i++) {
        for (int j = 0; list_word(budgets, j, budget); j++) {
            OpenRow p = { .o = options_copy(a->o) };
            Score sc = { 0 };
            if (opt_given(a->o, "budgets")) {
                int bad = options_set(p.o, "budget", budget, err) || out_of_range(p.o, "budget", err);
                if (bad) die(EXIT_USAGE, "--budgets: %s", err);
            }
            p.s = session_open(a->c, a->w, p.o, name);
            snprintf(sc.name, sizeof sc.name, "%s", name);
            sc.budget = has_budget(p.s) ? p.s->budget : 0;
            arrput(*open, p);
            arrput(rows, sc);
            if (!has_budget(p.s)) break;
        }
    }
    return rows;
}

// ---- the modes: dialogues

// Shows how far the run is: on a terminal one line that is rewritten; elsewhere, with -v, a line at
// every tenth of the items.
static void eval_progress(const App *a, int done, int all, double t0) {
    int seconds = done ? (int)((now() - t0) * (all - done) / done) : 0, terminal = isatty(2);
    if (quiet) return;
    if (terminal) {
        fprintf(stderr, "\r\x1b[K%d of %d items, %d:%02d left", done, all, seconds / 60, seconds % 60);
        if (done == all) fprintf(stderr, "\r\x1b[K");
    } else if (opt_int(a->o, "verbose") && done * 10 / all != (done - 1) * 10 / all) {
        fprintf(stderr, "%d of %d items, %d:%02d left\n", done, all, seconds / 60, seconds % 60);
    }
}

// Plays the items, each through every row before the next one. So the logits of full attention are
// held for one item only, and what else the machine does falls on all rows.
static void play_items(App *a, const EvalSet *e, Score *rows, OpenRow *open) {
    OpenRow full = { .o = options_copy(a->o) };
    float *ref = NULL;                                  // stb_ds, V a row
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
            session_reset(a->s);                        // gives its rows back: many sessions are open
        }
        eval_progress(a, i + 1, n, t0);
    }
    arrfree(ref);
    open_close(&full);
}

// Ends the program if an item with its right replies is longer than the context.
static void check_fit(const App *a, const EvalSet *e) {
    enum { TEMPLATE_TOKENS = 16 };                      // about what the chat template adds to a turn
    for (int i = 0; i < (int)arrlen(e->item); i++) {
        int need = 0;
        for (int j = 0; j < (int)arrlen(e->item[i].turn); j++) {
            const EvalTurn *t = &e->item[i].turn[j];
            int *ids = tokenizer_encode(a->tok, t->user, strlen(t->user), 0, gold_ids(a, t));
            need += (int)arrlen(ids) + TEMPLATE_TOKENS;
            arrfree(ids);
        }
        if (need > ctx_limit(a))
            die(EXIT_USAGE, "--eval: %s, item %d needs about %d tokens, the context has %d (-c)",
                e->item[i].task, i + 1, need, ctx_limit(a));
    }
}

// Makes the items of --eval A,B,.. or all.
static void eval_items(const App *a, const char *what, EvalSet *e) {
    char word[160];
    int *lengths = number_list("eval-length", opt_str(a->o, "eval-length"), 96, 1 << 20);
    int n = opt_int(a->o, "eval-items");
    uint64_t seed = (uint64_t)opt_int(a->o, "eval-seed");
    for (int i = 0; list_word(what, i, word); i++) {
        int found = 0;
        for (int t = 0; t < EVAL_TASKS; t++) {
            if (strcmp(word, "all") && strcmp(word, eval_tasks[t].name)) continue;
            make_items(e, a->tok, t, lengths, n, seed);
            found = 1;
        }
        if (!found)
            die(EXIT_USAGE, "--eval wants all, file, ppl, kld or a list of needle, multiturn, coref, "
                "facts, json, fewshot, summary; found '%s'", word);
    }
    arrfree(lengths);
    check_fit(a, e);
}

// ---- the modes: perplexity and divergence of a text

// Plays windows of a text through a->s. Half a window is prefilled, and each further token is
// decoded; every token of the second half is predicted from what came before it. With with_full
// (--eval kld), a session of full attention sees the same tokens and the logits are compared.
static void eval_text(App *a, const char *path, int with_full, Score *sc) {
    char err[256];
    size_t n;
    int V = a->c->V, window = opt_int(a->o, "eval-window"), half = window / 2;
    char *text = read_file(path, &n, err);
    if (!text) die(EXIT_USAGE, "--eval-file %s", err);
    int *ids = tokenizer_encode(a->tok, text, n, 0, NULL), windows = (int)arrlen(ids) / window;
    free(text);
    ids_must_have_rows(a->c, ids, (int)arrlen(ids));             // their logits are read before they are fed
    if (!windows)
        die(EXIT_USAGE, "--eval-file %s: %d tokens, one window needs %d (--eval-window)", path,
            (int)arrlen(ids), window);
    windows = min_int(windows, opt_int(a->o, "eval-windows"));

    Options *plain = options_new();
    Session *full = with_full ? session_open(a->c, a->w, plain, "full") : NULL;
    for (int w = 0; w < windows; w++) {
        const int *x = ids + (size_t)w * window;
        session_reset(a->s);
        if (full) session_reset(full);
        for (int i = half - 1; i < window - 1; i++) {   // token i is the last one seen, i+1 is predicted
            const float *y = i < half ? prefill(a->s, x, half) : decode(a->s, x[i]);
            sc->nll += log_sum_exp(y, V) - y[x[i + 1]];
            if (full) note_logits(i < half ? prefill(full, x, half) : decode(full, x[i]), y, V, sc);
            else sc->predicted++;
        }
        note_cost(a->s, sc);
    }
    session_close(full);
    options_free(plain);
    arrfree(ids);
}

// ---- the run
static int report_write(App *a, const char *path, const Score *rows);    // section 29

// --eval: makes or reads the items, plays them through every row, prints the rows and, with
// --report, writes the page. Returns 0.
static int evaluate(App *a) {
    const char *path = opt_str(a->o, "eval-file"), *what = opt_str(a->o, "eval");
    if (!*what) what = *path ? "file" : "all";
    int file = !strcmp(what, "file"), kld = !strcmp(what, "kld"), ppl = kld || !strcmp(what, "ppl");
    int how = AS_TABLE;
    if (opt_int(a->o, "csv")) how = AS_CSV;
    if (opt_int(a->o, "json")) how = AS_JSON;
    char err[256];
    EvalSet e = { 0 };
    OpenRow *open = NULL;
    EvalRun run = { .a = a, .seed = (uint64_t)opt_int(a->o, "eval-seed"), .ppl = ppl };
    Session *own = a->s;
    double t0 = now();

    // The items
    if ((ppl || file) && !*path) die(EXIT_USAGE, "--eval %s wants --eval-file FILE", what);
    if (options_set(a->o, "temp", "0", err)) die(EXIT_RUN, "%s", err);
    if (file) {
        read_items(&e, a->tok, path);
        check_fit(a, &e);
    } else if (!ppl) {
        eval_items(a, what, &e);
    }

    // The rows
    Score *rows = open_rows(a, &open);
    run.rows = rows;
    if (opt_given(a->o, "compare-base") && !base_of(rows, &run) && !ppl)
        die(EXIT_USAGE, "--compare-base %s is not among the methods that are compared", opt_str(a->o, "compare-base"));
    if (!ppl) play_items(a, &e, rows, open);
    for (int r = 0; r < (int)arrlen(rows); r++) {
        a->s = open[r].s;
        if (ppl) eval_text(a, path, kld, &rows[r]);
        open_close(&open[r]);
    }
    for (int r = 0; r < (int)arrlen(rows); r++) {
        finish_row(&rows[r], run.seed);
        print_row(&rows[r], &run, how, !r, stdout);
    }
    if (!quiet)
        fprintf(stderr, "%d rows, %d items, %d answers each, %.1f s\n", (int)arrlen(rows), rows[0].items,
                (int)arrlen(rows[0].answers), now() - t0);
    a->s = own;
    if (*opt_str(a->o, "report")) report_write(a, opt_str(a->o, "report"), rows);

    for (int r = 0; r < (int)arrlen(rows); r++) {
        arrfree(rows[r].answers);
        arrfree(rows[r].each);
    }
    arrfree(rows);
    arrfree(open);
    eval_set_free(&e);
    return 0;
}

// ==================================================================================================== 27 CALIBRATION
// Head scores of DiliLazyKV and HeadKV (section 13): the files that hold them, and --calibrate,
// which measures them, once per model.

// ---- score files
// A score file maps "layer-head" to a number or to a list of numbers, which stands for its mean.
// The keys come in any order, and every head of the model has exactly one. The map is the whole
// file, the only object inside it, or one of several objects under a name that we write or that the
// authors' script writes (D22).

// The kinds of scores: those of DiliLazyKV, then those of HeadKV.
enum { SCORE_INF, SCORE_DILI, SCORE_LAZY, SCORE_R, SCORE_R2, SCORES };

// The names of their maps: --dililazy-score, --headkv-score and ours, then those of DiliLazyKV's
// authors; HeadKV's publish one map a file, without a name.
static const char *score_names[SCORES][2] = {
    [SCORE_INF]  = { "inf",  "average_infscores_weighted" },
    [SCORE_DILI] = { "dili", "average_precisions_weighted" },
    [SCORE_LAZY] = { "lazy", "average_recalls_weighted" },
    [SCORE_R]    = { "r",    NULL },
    [SCORE_R2]   = { "r2",   NULL },
};

// The map of score `which` in the file j: the object under one of its names, else the only object
// inside j, else j itself.
static const Json *scores_find(const Json *j, const char *which) {
    if (j->type != JSON_OBJECT) return j;
    for (int i = 0; i < SCORES; i++) {
        if (strcmp(which, score_names[i][0])) continue;
        for (int k = 0; k < 2 && score_names[i][k]; k++) {
            const Json *v = json_get(j, score_names[i][k]);
            if (v && v->type == JSON_OBJECT) return v;
        }
    }
    const Json *only = NULL;
    int objects = 0;
    for (int i = 0; i < j->n; i++) {
        if (j->item[i].type != JSON_OBJECT) continue;
        only = &j->item[i];
        objects++;
    }
    return objects == 1 ? only : j;
}

// The place layer * H + head of a key "layer-head"; -1: not a head of a model with L layers and H
// heads.
static int scores_index(const char *key, int L, int H) {
    char *end;
    if (!isdigit((unsigned char)key[0]) || strlen(key) > 16) return -1;
    long l = strtol(key, &end, 10);
    if (*end != '-' || !isdigit((unsigned char)end[1])) return -1;
    long h = strtol(end + 1, &end, 10);
    if (*end || l >= L || h >= H) return -1;
    return (int)(l * H + h);
}

// A number, or the mean of a list of numbers of at least 0; -1: neither.
static double scores_value(const Json *v) {
    double sum = 0;
    if (v->type == JSON_NUMBER) return v->num;
    if (v->type != JSON_ARRAY || !v->n) return -1;
    for (int i = 0; i < v->n; i++) {
        if (v->item[i].type != JSON_NUMBER || v->item[i].num < 0) return -1;
        sum += v->item[i].num;
    }
    return sum / v->n;
}

// Fills x (L,H), which is all -1, from the map j. Returns 0, or -1 with the reason in err.
static int scores_fill(const Json *j, int L, int H, double *x, char err[512]) {
    if (j->type != JSON_OBJECT) {
        snprintf(err, 512, "expected an object with keys \"layer-head\"");
        return -1;
    }
    for (int i = 0; i < j->n; i++) {
        int at = scores_index(j->key[i], L, H);
        double v = scores_value(&j->item[i]);
        if (at < 0) {
            snprintf(err, 512, "key \"%.40s\": expected \"layer-head\" of a model "
                               "with %d layers and %d heads", j->key[i], L, H);
            return -1;
        }
        if (x[at] >= 0) {
            snprintf(err, 512, "head %d-%d stands there twice", at / H, at % H);
            return -1;
        }
        if (!(v >= 0)) {
            snprintf(err, 512, "head %d-%d: expected a number of at least 0, or a list of them", at / H,
                     at % H);
            return -1;
        }
        x[at] = v;
    }
    for (int i = 0; i < L * H; i++) {
        if (x[i] >= 0) continue;
        snprintf(err, 512, "no score of head %d-%d: expected all %d x %d", i / H, i % H, L, H);
        return -1;
    }
    return 0;
}

// The scores (L,H) called `which` (a name in score_names) of a file; the caller frees them. NULL,
// with the reason in err, when the file cannot be read or does not fit the model.
static double *scores_read(const char *path, const char *which, int L, int H, char err[512]) {
    char why[512];
    size_t size;
    char *text = read_bounded(path, MOST_CONFIG, &size, why);
    if (!text) {
        snprintf(err, 512, "%.400s", why);
        return NULL;
    }
    Json *j = json_parse(text, size, why);
    double *x = xmalloc((size_t)L * H * sizeof *x);
    for (int i = 0; i < L * H; i++) x[i] = -1;
    const Json *map = j ? scores_find(j, which) : NULL;
    int bad = !j;
    if (map && map == j && json_get(j, "format")) {     // a file of ours, without that map
        snprintf(why, sizeof why, "holds no scores \"%s\"; --calibrate makes them", which);
        bad = 1;
    }
    if (!bad) bad = scores_fill(map, L, H, x, why);
    if (bad) {
        snprintf(err, 512, "%.200s: %.250s", path, why);
        free(x);
    }
    json_free(j);
    free(text);
    return bad ? NULL : x;
}

// The same for --dililazy-scores, which err then names.
static double *scores_load(const char *path, const char *which, int L, int H, char err[512]) {
    char why[512];
    double *x = scores_read(path, which, L, H, why);
    if (!x) snprintf(err, 512, "--dililazy-scores: %.470s", why);
    return x;
}

// ---- needles and hay
// --calibrate hides a sentence, the needle, in a long text, the hay, asks for it, and looks at the
// attention of the last prompt token and of the answer. A run is one needle at one depth of a text
// of one length. For HeadKV-R2 there is a second run, in which a sentence of reasoning and a wrong
// answer stand before the needle.

typedef struct {
    const char *question, *needle, *answer;
    const char *distractor;     // a sentence with a wrong answer; NULL: no second run
    const char *reasoning;      // what tells the right answer from the wrong one; NULL: no second run
} Needle;

static const Needle own_needles[] = {
    {
        .question = "What is the best thing to do on a free afternoon in Merrow?",
        .needle   = "The best thing to do on a free afternoon in Merrow is to row out to the lighthouse.",
        .answer   = "Row out to the lighthouse.",
        .distractor = "The best thing to do on a free afternoon in Harlow is to feed the ducks.",
        .reasoning  = "What is best in Merrow is not what is best in Harlow.",
    }, {
        .question = "What keeps the keeper of the old mill healthy?",
        .needle   = "The keeper of the old mill stays healthy through long walks and barley soup.",
        .answer   = "Long walks and barley soup.",
        .distractor = "The keeper of the new bridge stays healthy through cold baths and plums.",
        .reasoning  = "The keeper of the old mill and the keeper of the new bridge are two people.",
    }, {
        .question = "In which year did Anna begin her apprenticeship?",
        .needle   = "Anna was born in 1931. Anna began her apprenticeship sixteen years after she was born.",
        .answer   = "Anna began her apprenticeship in 1947.",
        .distractor = "Clara was born in 1931. Clara began her apprenticeship eighteen years after she was born.",
        .reasoning  = "Who was born in the same year need not have begun in the same year.",
    },
};

// A sentence of the hay is one of each line: who, did, what, and when or where.
static const char *hay_words[4][12] = {
    {
        "The baker", "A tall ferryman", "My aunt", "The youngest of the sailors", "Our neighbour",
        "The clockmaker", "A stranger in grey", "The schoolteacher", "An old gardener",
        "The captain", "Her cousin", "The bell ringer",
    },
    {
        "carried", "forgot", "was looking for", "sold", "painted", "had borrowed", "dreamed of",
        "repaired", "hid", "counted", "lost", "gave away",
    },
    {
        "a lantern", "three copper kettles", "the blue umbrella", "a basket of pears",
        "an unfinished letter", "the heavy ladder", "two silver spoons", "a map of the marshes",
        "the harbour bell", "a sack of flour", "some torn nets", "the key to the cellar",
    },
    {
        "before the rain came.", "while the others slept.", "at the edge of the village.",
        "because nobody had asked.", "on the way to the market.", "and said nothing about it.",
        "under the chestnut trees.", "for the second time that week.", "when the tide went out.",
        "in the narrow street behind the church.", "without a lamp.", "as the winter began.",
    },
};

// At least n ids of the file at `path`, as an stb_ds array. Exit 2 when it is shorter, or cannot be
// read.
static int *hay_file(const Tokenizer *t, const char *path, int n) {
    char why[256];
    size_t size;
    char *text = read_file(path, &size, why);
    if (!text) die(EXIT_USAGE, "--calibrate-haystack: %s", why);
    int *ids = encode_at(t, text, size, 0, 1, NULL);
    free(text);
    if ((int)arrlen(ids) < n)
        die(EXIT_USAGE, "--calibrate-haystack: %s has %d tokens, %d are needed", path, (int)arrlen(ids), n);
    return ids;
}

// At least n ids of hay, as an stb_ds array: of the file at `path`, or, when that is empty, of our
// own sentences. These are drawn from a fixed seed and encoded one by one, so that the ids do not
// depend on n.
static int *hay_ids(const Tokenizer *t, const char *path, int n) {
    uint64_t state = 1;
    int *ids = NULL;
    char line[256];
    if (*path) return hay_file(t, path, n);
    while ((int)arrlen(ids) < n) {
        const char *word[4];
        for (int i = 0; i < 4; i++) word[i] = hay_words[i][splitmix64(&state) % 12];
        int old = (int)arrlen(ids);
        int len = snprintf(line, sizeof line, "%s%s %s %s %s", old ? " " : "",
                           word[0], word[1], word[2], word[3]);
        ids = encode_at(t, line, len, 0, !old, ids);
        if ((int)arrlen(ids) == old)
            die(EXIT_RUN, "--calibrate: the tokenizer makes nothing of \"%s\"", line);
    }
    return ids;
}

// A text of the needle object v under `key`. Exit 2 when it is empty or too long, or missing unless
// it is optional; NULL then.
static const char *needle_text(const Json *v, const char *path, const char *key, int optional) {
    const Json *x = json_get(v, key);
    if (!x && optional) return NULL;
    if (!x || x->type != JSON_STRING || !x->len || x->len > 2000)
        die(EXIT_USAGE, "--calibrate-needles: %s: expected a list of {\"question\", \"needle\", \"answer\"}, "
                        "each a text up to 2000 bytes", path);
    return x->str;
}

// The needles of the file at `path`, or, when that is empty, our own, as an stb_ds array. Their
// texts live in *file, which the caller frees. Exit 2 when the file is no list of needles.
static Needle *needles_load(const char *path, Json **file) {
    Needle *list = NULL;
    char why[256];
    size_t size;
    if (!*path) {
        int n = (int)(sizeof own_needles / sizeof *own_needles);
        for (int i = 0; i < n; i++) arrput(list, own_needles[i]);
        return list;
    }
    char *text = read_bounded(path, MOST_CONFIG, &size, why);
    if (text) *file = json_parse(text, size, why);
    if (!text || !*file) die(EXIT_USAGE, "--calibrate-needles: %s: %s", path, why);
    free(text);
    if (json_holds_nul(*file))
        die(EXIT_USAGE, "--calibrate-needles: %s: a text holds the character \\u0000", path);
    for (int i = 0; i < (*file)->n; i++) {
        const Json *v = &(*file)->item[i];
        Needle x = {
            .question   = needle_text(v, path, "question", 0),
            .needle     = needle_text(v, path, "needle", 0),
            .answer     = needle_text(v, path, "answer", 0),
            .distractor = needle_text(v, path, "distractor", 1),
            .reasoning  = needle_text(v, path, "reasoning", 1),
        };
        arrput(list, x);
    }
    if (!list) die(EXIT_USAGE, "--calibrate-needles: %s holds no needle", path);
    return list;
}

// ---- did the model find the needle?

// The next word at *p, folded to lower case, as far as word has room; *p moves behind it. A word is
// a run of letters, digits and bytes of characters beyond ASCII. Returns the length in word, 0 at
// the end of the text.
static int next_word(const char **p, const char *end, char word[64]) {
    int n = 0;
    const char *c = *p;
    while (c < end && !isalnum((unsigned char)*c) && (unsigned char)*c < 128) c++;
    for (; c < end && (isalnum((unsigned char)*c) || (unsigned char)*c >= 128); c++) {
        if (n < 63) word[n++] = (char)tolower((unsigned char)*c);
    }
    word[n] = 0;
    *p = c;
    return n;
}

// How often `word` is among the words of text (n bytes).
static int word_count(const char *word, const char *text, size_t n) {
    int count = 0;
    char w[64];
    for (const char *p = text; next_word(&p, text + n, w); ) count += !strcmp(word, w);
    return count;
}

// The share of the answer's words that the text (n bytes) has too. A word that the answer has twice
// must be there twice; case and punctuation do not count.
static double word_recall(const char *answer, const char *text, size_t n) {
    int words = 0, found = 0;
    char word[64];
    const char *end = answer + strlen(answer);
    for (const char *p = answer; next_word(&p, end, word); words++) {
        int need = word_count(word, answer, (size_t)(p - answer));       // in the answer up to here
        found += word_count(word, text, n) >= need;
    }
    return words ? (double)found / words : 1;
}

// ---- the scores of one run

typedef struct {
    int at, n;                  // N, the needle's keys: the first one, and how many
    int right;                  // the first key of c2, the right answer, which ends where N ends
    int k;                      // size of T; 0: as many as N has
    int count;                  // 1: --calibrate-score=count
    double *score;              // (SCORES,L,H) of this run
    double *sum;                // (SCORES,L,H) their sums over the accepted runs
    double counts[4];           // mean over the heads of this run: see head_scores
    double total[4];            // sums of counts over the accepted runs
    int reasoned;               // accepted runs with a wrong answer, R2's; the others are counted elsewhere
    int *top;                   // (L,H) the key with the largest weight of the row looked at last
    double *mass;               // (L,H) the weights of c2's keys among the |N| largest of that row
} Calibration;

// The scores of one head from its softmax row a (n): score = Inf, Dili, Lazy. counts are keys in
// both T and N (Diligent), in T only (Distracted), in N only (Subconscious), in neither (Diffuse).
// idx (n) is room. T is chosen among all keys, those of the first tokens and of the question too,
// as in the published scores. Under --calibrate-score=count, Lazy is the weighted sum of the
// paper's text. The paper does not give the weights; 1/3 each is our choice.
static void head_scores(const Calibration *r, const float *a, int n, int *idx, double score[3],
                        double counts[4]) {
    double hit = 0, top = 0, needle = 0, hits = 0;      // a summed over T & N, T, N; keys of T & N
    int k = top_k(a, n, r->k ? r->k : r->n, idx);
    for (int i = 0; i < k; i++) {
        int in = idx[i] >= r->at && idx[i] < r->at + r->n;
        top += a[idx[i]];
        if (in) hit += a[idx[i]];
        hits += in;
    }
    for (int i = r->at; i < r->at + r->n; i++) needle += a[i];
    counts[0] = hits;
    counts[1] = k - hits;
    counts[2] = r->n - hits;
    counts[3] = n - r->n - counts[1];

    double dili, lazy, inf = 0;
    if (r->count) {
        dili = hits / k;
        lazy = (counts[1] / k + counts[2] / r->n + counts[3] / (n - r->n)) / 3;
    } else {
        dili = top > 1e-9 ? hit / top : 0;              // Sec. 3.1: DiliScore, a weighted precision
        lazy = needle > 1e-9 ? hit / needle : 0;        // Sec. 3.1: LazyScore, a weighted recall
    }
    if (dili + lazy > 1e-9) inf = 2 * dili * lazy / (dili + lazy);       // Eq. 1: InfScore
    score[0] = inf;
    score[1] = dili;
    score[2] = lazy;
}

// HeadKV's part: what head i = l H + h looks at in its softmax row a (n), from which the next token
// will be chosen. idx (n) is room.
static void head_look(Calibration *r, int i, const float *a, int n, int *idx) {
    int k = top_k(a, n, r->n, idx), best = idx[0];
    double mass = 0;
    for (int j = 0; j < k; j++) {
        if (a[idx[j]] > a[best]) best = idx[j];
        if (idx[j] >= r->right && idx[j] < r->at + r->n) mass += a[idx[j]];
    }
    r->top[i] = best;
    r->mass[i] = mass;
}

// Adds what the LH heads looked at when token `step` of the answer, `id`, was chosen. ids are the
// prompt's.
static void head_said(Calibration *r, size_t LH, const int *ids, int step, int id) {
    double *retrieval = r->score + SCORE_R * LH, *reasoning = r->score + SCORE_R2 * LH;
    for (size_t i = 0; i < LH; i++) {
        int in = r->top[i] >= r->at && r->top[i] < r->at + r->n;
        if (in && ids[r->top[i]] == id) retrieval[i] += 1.0 / r->n;             // R
        if (step < r->n) reasoning[i] += r->mass[i];                            // R2
    }
}

// The probe is a method that keeps everything and writes down scores. It rides on "full" and is not
// in the table of methods.
typedef struct {
    Calibration *run;
} HeadProbe;

// Hook commit of the probe: the scores of layer l's heads, from the softmax rows of the prompt's
// last token, and HeadKV's from those of the answer too. Only these rows are made, so memory grows
// with the length and not with its square.
static void head_probe_commit(Session *s, void *ms, int l, const float *q, int T) {
    Calibration *r = ((HeadProbe *)ms)->run;
    if (l == s->c->L) return;
    size_t mark = scratch_mark(s), LH = (size_t)s->c->L * s->c->H;
    int N = kv_longest(s, l), H = s->c->H;
    int *idx = scratch(s, (size_t)N * sizeof(int));
    float *row = scratch(s, (size_t)H * N * sizeof(float));
    window_scores(s, l, q, T, 1, row);
    for (int h = 0; h < H; h++) {
        double score[3], counts[4];
        head_look(r, l * H + h, row + (size_t)h * N, N, idx);
        if (s->decoding) continue;
        head_scores(r, row + (size_t)h * N, N, idx, score, counts);
        for (int i = 0; i < 3; i++) r->score[i * LH + (size_t)l * H + h] = score[i];
        for (int i = 0; i < 4; i++) r->counts[i] += counts[i] / (double)LH;
    }
    scratch_reset(s, mark);
}

static const Method head_probe = {
    .name   = "probe",
    .wants  = KV_QUERY,
    .state  = sizeof(HeadProbe),
    .commit = head_probe_commit,
};

// ---- one run

typedef struct {
    const Needle *needle;
    int length;                 // ids of the prompt, about
    int depth;                  // where the needle stands, percent of the hay
    int reasoning;              // 1: the run of HeadKV-R2, with reasoning and a wrong answer
} Run;

// Appends x (n) to an stb_ds array of ids.
static int *ids_put(int *ids, const int *x, int n) {
    for (int i = 0; i < n; i++) arrput(ids, x[i]);
    return ids;
}

// The question of a run in the frame of --calibrate-prompt. Exit 2 when the frame has no place for
// it.
static void run_question(const Options *o, const Run *run, char *text, size_t size) {
    const char *prompt = opt_str(o, "calibrate-prompt"), *hole = strstr(prompt, "{}");
    if (!hole || strlen(prompt) > 2000)
        die(EXIT_USAGE, "--calibrate-prompt wants a text up to 2000 bytes with {} where the question goes");
    snprintf(text, size, "%.*s%s%s", (int)(hole - prompt), prompt, run->needle->question, hole + 2);
}

// Where the needle goes among n ids of hay: at depth % of them, or at the end of the sentence
// before (--calibrate-boundary).
static int needle_place(const Tokenizer *t, const Options *o, const Run *run, const int *hay, int n) {
    int at = (int)((long)n * run->depth / 100), len;
    if (!opt_int(o, "calibrate-boundary")) return at;
    for (; at > 0; at--) {
        const char *b = tokenizer_bytes(t, hay[at - 1], &len);
        if (len && b[len - 1] == '.') break;
    }
    return at;
}

// The ids N of a run, as an stb_ds array: the needle, with reasoning and a wrong answer before it in
// R2's run. *right is the place of the right answer among them. What is planted is encoded by
// itself, and the right answer too, so that their ids are known exactly.
static int *run_needle(const Tokenizer *t, const Run *run, int *right) {
    char text[8192];
    int *ids = NULL;
    if (run->reasoning) {
        snprintf(text, sizeof text, " %s %s", run->needle->reasoning, run->needle->distractor);
        ids = encode_at(t, text, strlen(text), 0, 0, ids);
    }
    *right = (int)arrlen(ids);
    snprintf(text, sizeof text, " %s", run->needle->needle);
    return encode_at(t, text, strlen(text), 0, 0, ids);
}

// The ids of hay and needle together: about 200 of the length are left for the rest, half of a
// length below 400.
static int run_room(const Run *run) {
    return run->length - (run->length < 400 ? run->length / 2 : 200);
}

// Has a run a second one, for HeadKV-R2? The needle has a wrong answer and a sentence of reasoning,
// and the length has room for them.
static int has_reasoning(const Tokenizer *t, const Run *run) {
    Run second = { run->needle, run->length, run->depth, 1 };
    int right;
    if (!run->needle->distractor || !run->needle->reasoning) return 0;
    int *ids = run_needle(t, &second, &right), n = (int)arrlen(ids);
    arrfree(ids);
    return n < run_room(run);
}

// The prompt of a run as an stb_ds array of ids: [BOS] prefix, hay with the needle in it, question.
// Sets r->at, r->n and r->right.
static int *run_prompt(const Tokenizer *t, const Options *o, const Run *run, const int *hay, Calibration *r) {
    char question[4096];
    const char *prefix = opt_str(o, "calibrate-prefix");
    int right;
    run_question(o, run, question, sizeof question);
    int *needle = run_needle(t, run, &right), n_needle = (int)arrlen(needle);
    int n_hay = run_room(run) - n_needle;
    if (n_hay < 1)
        die(EXIT_USAGE, "--calibrate-lengths: %d tokens do not hold a needle of %d beside the question",
            run->length, n_needle);
    int at = needle_place(t, o, run, hay, n_hay);

    int *ids = NULL;
    if (t->add_bos && t->bos >= 0) arrput(ids, t->bos);
    ids = encode_at(t, prefix, strlen(prefix), 1, 1, ids);
    r->at = (int)arrlen(ids) + at;
    r->n = n_needle;
    r->right = r->at + right;
    ids = ids_put(ids, hay, at);
    ids = ids_put(ids, needle, n_needle);
    ids = ids_put(ids, hay + at, n_hay - at);
    ids = encode_at(t, question, strlen(question), 1, 0, ids);
    arrfree(needle);
    return ids;
}

// The greedy answer behind the logits of the prompt ids: the bytes of at most n tokens, as an stb_ds
// array without a NUL. What the heads look at meanwhile is added to r.
static char *greedy_answer(Session *s, const Tokenizer *t, Calibration *r, const int *ids,
                           const float *logits, int n) {
    char *text = NULL;
    for (int i = 0; i < n; i++) {
        int id = 0, end = 0, len;
        for (int v = 1; v < s->c->V; v++) {
            if (logits[v] > logits[id]) id = v;
        }
        for (int e = 0; e < s->c->n_eos; e++) end |= s->c->eos[e] == id;
        if (end) break;
        head_said(r, (size_t)s->c->L * s->c->H, ids, i, id);
        const char *b = tokenizer_bytes(t, id, &len);
        if (len) memcpy(arraddnptr(text, len), b, (size_t)len);
        if (i + 1 < n) logits = decode(s, id);
    }
    return text;
}

// One run, in a session with the probe as its last part. A run is accepted when its answer has half
// of the expected words, or when every run is (--calibrate-accept all); then its scores are added
// to r->sum: R2 in the run made for it, all others in the plain one. *recall is the share of the
// words, -1 when the answer does not count. Returns 1 for an accepted run, else 0.
static int calibrate_run(Session *s, const Tokenizer *t, const Options *o, const Run *run, const int *hay,
                         Calibration *r, double *recall) {
    int *ids = run_prompt(t, o, run, hay, r);
    int accepted = 1;
    size_t LH = (size_t)s->c->L * s->c->H;
    session_reset(s);
    ((HeadProbe *)s->part[s->n_part - 1].ms)->run = r;
    memset(r->counts, 0, sizeof r->counts);
    memset(r->score, 0, SCORES * LH * sizeof *r->score);
    const float *logits = prefill(s, ids, (int)arrlen(ids));
    char *answer = greedy_answer(s, t, r, ids, logits, opt_int(o, "calibrate-predict"));

    *recall = -1;
    if (strcmp(opt_str(o, "calibrate-accept"), "all")) {
        *recall = word_recall(run->needle->answer, answer ? answer : "", arrlenu(answer));
        accepted = *recall >= .5;
    }
    arrfree(answer);
    arrfree(ids);
    if (!accepted) return 0;

    size_t first = run->reasoning ? SCORE_R2 * LH : 0, end = run->reasoning ? SCORES * LH : SCORE_R2 * LH;
    for (size_t i = first; i < end; i++) r->sum[i] += r->score[i];
    for (int i = 0; i < 4 && !run->reasoning; i++) r->total[i] += r->counts[i];
    return 1;
}

// ---- all runs

// What --calibrate goes through: every length with every depth with every needle is a run.
typedef struct {
    int *length, *depth;        // stb_ds arrays
    Needle *needle;             // stb_ds array
    Json *file;                 // of the needles; NULL: they are ours
} Plan;

// The plan from the options; exit 2 when they do not fit. The default length is cut to what a small
// model can hold.
static Plan plan_read(const Config *c, const Options *o) {
    Plan p = { .file = NULL };
    char limit[16];
    snprintf(limit, sizeof limit, "%d", c->max_pos);
    int cut = !opt_given(o, "calibrate-lengths") && c->max_pos < 2048;
    const char *lengths = cut ? limit : opt_str(o, "calibrate-lengths");
    p.length = number_list("calibrate-lengths", lengths, 16, c->max_pos);
    p.depth = number_list("calibrate-depths", opt_str(o, "calibrate-depths"), 0, 100);
    p.needle = needles_load(opt_str(o, "calibrate-needles"), &p.file);
    if (opt_int(o, "calibrate-k") < 0)
        die(EXIT_USAGE, "--calibrate-k must not be negative, found %d", opt_int(o, "calibrate-k"));
    return p;
}

static void plan_free(Plan *p) {
    arrfree(p->length);
    arrfree(p->depth);
    arrfree(p->needle);
    json_free(p->file);
}

// Goes through the plan with a session of method full and the probe beside it, with a line on
// stderr for each run and for its second one, with a wrong answer, where the needle has one. Fills
// r->sum, r->total and r->reasoned; returns how many plain runs were accepted.
static int calibrate_runs(const Config *c, const Weights *w, const Tokenizer *t, const Options *o,
                          const Plan *p, Calibration *r) {
    int n_depths = (int)arrlen(p->depth), n_needles = (int)arrlen(p->needle);
    int runs = (int)arrlen(p->length) * n_depths * n_needles, accepted = 0, longest = 0;
    for (int i = 0; i < (int)arrlen(p->length); i++) longest = max_int(longest, p->length[i]);
    int *hay = hay_ids(t, opt_str(o, "calibrate-haystack"), longest);
    Session *s = session_open(c, w, o, "full");
    s->part[s->n_part] = (Part){ &head_probe, xcalloc(1, sizeof(HeadProbe)) };
    s->n_part++;
    for (int i = 0; i < runs; i++) {
        int needle = i % n_needles, depth = i / n_needles % n_depths, length = i / n_needles / n_depths;
        Run run = { &p->needle[needle], p->length[length], p->depth[depth], 0 };
        int both = has_reasoning(t, &run);
        for (int reasoning = 0; reasoning <= both; reasoning++) {
            run.reasoning = reasoning;
            double recall;
            int *count = reasoning ? &r->reasoned : &accepted;
            *count += calibrate_run(s, t, o, &run, hay, r, &recall);
            if (opt_int(o, "quiet")) continue;
            fprintf(stderr, "calibrate: %d of %d, length %d, depth %d %%, needle %d%s", i + 1, runs,
                    run.length, run.depth, needle + 1, reasoning ? ", a wrong answer before it" : "");
            if (recall >= 0) fprintf(stderr, ": recall %.2f, %d accepted", recall, *count);
            fputc('\n', stderr);
        }
    }
    session_close(s);
    arrfree(hay);
    return accepted;
}

// ---- the file

// Writes "name": [..] of an stb_ds array, and a comma.
static void list_write(FILE *f, const char *name, const int *list) {
    fprintf(f, "  \"%s\": [", name);
    for (int i = 0; i < (int)arrlen(list); i++) fprintf(f, "%s%d", i ? ", " : "", list[i]);
    fprintf(f, "],\n");
}

// Writes a score file: how it was made, then the means over the accepted runs; R2 only where it had
// any. The model is named by its folder's last name, because the file travels and the path does not.
static void scores_write(FILE *f, const Config *c, const Options *o, const Plan *p, const Calibration *r,
                         int accepted) {
    const char *slash = strrchr(c->dir, '/');
    const char *name = slash && slash[1] ? slash + 1 : c->dir;
    fprintf(f, "{\n  \"format\": \"kvcomp head scores\",\n  \"model\": ");
    json_escape(f, name, strlen(name));
    fprintf(f, ",\n  \"layers\": %d, \"heads\": %d, \"score\": \"%s\", \"k\": %d, ",
            c->L, c->H, opt_str(o, "calibrate-score"), opt_int(o, "calibrate-k"));
    fprintf(f, "\"accept\": \"%s\", \"needles\": %d, \"accepted\": %d, \"accepted_r2\": %d,\n",
            opt_str(o, "calibrate-accept"), (int)arrlen(p->needle), accepted, r->reasoned);
    list_write(f, "lengths", p->length);
    list_write(f, "depths", p->depth);
    fprintf(f, "  \"diligent_distracted_subconscious_diffuse\": [");
    for (int i = 0; i < 4; i++) fprintf(f, "%s%.6g", i ? ", " : "", r->total[i] / accepted);
    fprintf(f, "]");
    for (int k = 0; k < SCORES; k++) {
        const double *sum = r->sum + (size_t)k * c->L * c->H;
        int runs = k == SCORE_R2 ? r->reasoned : accepted;
        if (!runs) continue;
        fprintf(f, ",\n  \"%s\": {", score_names[k][0]);
        for (int i = 0; i < c->L * c->H; i++)
            fprintf(f, "%s\n    \"%d-%d\": [%.9g]", i ? "," : "", i / c->H, i % c->H, sum[i] / runs);
        fprintf(f, "\n  }");
    }
    fprintf(f, "\n}\n");
}

// --calibrate OUT.json: makes the score file of a model. Returns the exit code; exit 1 when no run
// is accepted or the file cannot be written. The text goes to OUT.json.part, which is opened before
// the work begins, so that a bad path shows at once, and takes the name OUT.json when it is
// complete.
static int calibrate(const Config *c, const Weights *w, const Tokenizer *t, const Options *o) {
    const char *out = opt_str(o, "calibrate");
    char part[1100];
    if (!t) die(EXIT_USAGE, "--calibrate needs the model's tokenizer");
    Plan p = plan_read(c, o);
    snprintf(part, sizeof part, "%.1000s.part", out);
    FILE *f = fopen(part, "wb");
    if (!f) die(EXIT_RUN, "--calibrate: %s: %s", part, strerror(errno));

    size_t LH = (size_t)c->L * c->H;
    Calibration r = {
        .k = opt_int(o, "calibrate-k"),
        .count = opt_choice(o, "calibrate-score", "mass|count"),
    };
    r.score = xcalloc(SCORES * LH, sizeof(double));
    r.sum = xcalloc(SCORES * LH, sizeof(double));
    r.mass = xcalloc(LH, sizeof(double));
    r.top = xcalloc(LH, sizeof(int));
    int accepted = calibrate_runs(c, w, t, o, &p, &r);
    if (accepted) scores_write(f, c, o, &p, &r, accepted);

    int bad = ferror(f);
    bad |= fclose(f);
    if (bad || !accepted) remove(part);
    if (!accepted)
        die(EXIT_RUN, "--calibrate: no answer had half of the expected words "
                      "(--calibrate-accept all takes every run)");
    if (bad || rename(part, out)) {
        int why = errno;
        remove(part);
        die(EXIT_RUN, "--calibrate: %s: %s", out, strerror(why));
    }
    free(r.score);
    free(r.sum);
    free(r.mass);
    free(r.top);
    plan_free(&p);
    return EXIT_OK;
}

// ==================================================================================================== 28 BENCHMARK
// --bench measures a model, or random weights of a shape (--synthetic): prefill ("pp N": N ids from
// an empty cache) and decode ("tg at D": one token with D rows behind it). A decode step is bytes:
// weights, the K and V rows attention reads, and the method's index. They stand beside the read
// bandwidth of this machine, measured again before every line, so that the last column says how far
// from the roofline a step is, whatever else the machine is doing. A deep cache is filled with
// random rows instead of a prefill: only the speed of the layers' products is skipped, every hook
// of the method runs.

typedef struct {            // one line of the table
    const char *test;       // "pp": prefill; "tg": decode
    int n;                  // ids of the prefill, or rows behind the token
    double tok_s;           // tokens a second, the median of --repeat
    double attend;          // seconds a token: attention
    double select;          //   choosing what to read
    double commit;          //   compressing and bookkeeping
    double index;           //   building indexes
    double bandwidth;       // bytes a second that this machine reads (GPU: copies)
    double weights;         // bytes a decode step moves: weights
    double kv;              //   rows of K and V
    double meta;            //   the method's index
    double flops;           // of a prefill: products and causal attention, each counted once
    double growth;          // seconds that one growth of the heads' memory costs, 0: none was seen
    size_t stored;          // bytes of rows held
} BenchLine;

// LoopServe chooses rows first at its 16th step and then every 16. By default a repetition is
// therefore one whole cycle of it, and 16 steps of the methods that choose at every step.
enum {
    BENCH_WARM = 16,        // decode steps before the clock starts
    BENCH_STEPS = 16,       // decode steps of one repetition
};
static void open_model(App *a);             // section 30
static void choose_device(App *a);          // section 30

// ---- what this machine reads
enum { READ_PIECE = 1024 };                 // floats that a thread reads at a time
static const size_t read_floats = (size_t)1 << 26;         // 256 MiB: no cache holds them

// A buffer of read_floats floats j & 255, made by the first call and kept.
static const float *read_buffer(void) {
    static float *buf;
    if (buf) return buf;
    size_t bytes = read_floats * sizeof *buf;
    buf = aligned_bytes((size_t)1 << 21, bytes);
    if (!buf) die(EXIT_MEMORY, "out of memory: --bench reads a buffer of %zu bytes", bytes);
    madvise(buf, bytes, MADV_HUGEPAGE);
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < read_floats; i += READ_PIECE) {
        for (size_t j = i; j < i + READ_PIECE; j++) buf[j] = (float)(j & 255);
    }
    return buf;
}

// Bytes a second that all threads read together: the best of three passes over the buffer. Each
// piece's largest value is 255, so that the reads have a result that is checked and cannot be left
// out.
static double read_bandwidth(void) {
    const float *buf = read_buffer();
    double best = 0;
    for (int r = 0; r < 3; r++) {
        int odd = 0;
        double t = now();
        #pragma omp parallel for schedule(static) reduction(+ : odd)
        for (size_t i = 0; i < read_floats; i += READ_PIECE) odd += max_f32(buf + i, READ_PIECE) != 255;
        t = now() - t;
        if (odd) die(EXIT_RUN, "--bench: memory gave back other values than were written");
        best = fmax(best, (double)(read_floats * sizeof *buf) / t);
    }
    return best;
}

// Bytes a second: what a decode step is measured by. On the GPU a copy's, read and written.
static double bandwidth(const Session *s) {
    (void)s;                                // a build without CUDA does not look at it
    return KV_DEV(s) ? device_copy_rate() : read_bandwidth();
}

// ---- measuring
// Stands in for forward while a cache is filled: T random rows in every head, then the hooks of the
// method, no products.
static float *fill_pass(Session *s, const Token *in, int T) {
    const Config *c = s->c;
    size_t nk = (size_t)T * c->G * c->D, nq = (size_t)T * c->H * c->D, n = nq + 2 * nk;
    float *x = xmalloc(n * sizeof *x);      // q (T,H,D), k (T,G,D), v (T,G,D)
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) x[i] = (float)(int32_t)(uint32_t)mix64(i) * 0x1p-31f;
    float *q = KV_DEV(s) ? device_floats(x, n) : x;         // where the device, if any, has them
    const float *k = q + nq, *v = k + nk;
    add_tokens(s, in, T);
    if (KV_DEV(s)) tokens_give_cuda(s);
    for (int l = 0; l < c->L; l++) {
        int acts = layer_acts(s, l);
        EACH_PART(s, p) {
            if (acts && p->m->project) p->m->project(s, p->ms, l, q, k, v, T);
        }
        kv_append(s, l, k, v, 0, T);
        EACH_PART(s, p) {
            if (acts && p->m->commit) p->m->commit(s, p->ms, l, q, T);
        }
    }
    EACH_PART(s, p) {
        if (p->m->commit) p->m->commit(s, p->ms, c->L, NULL, T);
    }
    if (KV_DEV(s)) device_drop(q);
    free(x);
    return s->logits;
}

// n ids below V, the same at every call (stb_ds array).
static int *random_ids(int n, int V) {
    int *ids = NULL;
    for (int i = 0; i < n; i++) arrput(ids, (int)(mix64((uint64_t)i) % (uint64_t)V));
    return ids;
}

// The median of x (n), which is sorted; of an even number the mean of the middle two.
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, double_order);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

// Where the time of so many tokens went, a token, and the rows held.
static void bench_clock(BenchLine *b, const Session *s, long tokens) {
    b->attend = s->clk.attend / (double)tokens;
    b->select = s->clk.select / (double)tokens;
    b->commit = s->clk.commit / (double)tokens;
    b->index = s->clk.index / (double)tokens;
    b->stored = kv_bytes(s);
}

// FLOP of a prefill of n tokens: every product of the layers, the output product of the last token,
// causal attention.
static double prefill_flops(const Config *c, double n) {
    double HD = (double)c->H * c->D, GD = (double)c->G * c->D;
    double products = 2 * HD * c->C + 2 * GD * c->C + 3.0 * c->F * c->C;   // q and o, k and v, the MLP
    return 2 * (n * c->L * products + (double)c->V * c->C) + 2 * n * (n + 1) * HD * c->L;
}

// Prefill of n ids into an empty cache, `repeat` times. The times by kind are those of the last.
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

// A cache of `depth` random rows a head (at least 1 real one), and the steps before the clock
// starts.
static void fill_cache(Session *s, int depth) {
    int n = max_int(depth, 1), *ids = random_ids(n, s->c->V);
    session_reset(s);
    if (depth) s->forward = fill_pass;
    prefill(s, ids, n);
    s->forward = forward;
    for (int i = 0; i < BENCH_WARM; i++) decode(s, ids[0]);
    memset(&s->clk, 0, sizeof s->clk);
    arrfree(ids);
}

// Bytes of weights that a decode step reads: all, but of an embedding that is not the output
// matrix, too, only one row.
static double step_weights(const Session *s) {
    const Tensor *embed = &s->w->embed;
    double bytes = (double)s->w->bytes;
    if (s->w->head.data != embed->data)
        bytes -= (double)s->c->V * s->c->C * (double)dtype_size(embed->dtype);
    return bytes;
}

// The steps of a decode, one by one: a head's memory grows every KV_STEP tokens, which costs that
// step, and on the GPU also the two behind it (an ordinary step, and a graph captured anew).
typedef struct {
    double *seconds;        // of each step (stb_ds array)
    char *grew;             // 1: heads grew in it (stb_ds array)
    int last;               // the last step that grew, -1: none
} BenchSteps;
enum { GROWTH_STEPS = 3 };  // steps that a growth costs, at most

// What all heads have room for: rows and packed bytes.
static size_t heads_room(const Session *s) {
    size_t n = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) n += (size_t)s->head[i].cap + s->head[i].pk_bytes;
    return n;
}

// One step more, its id by its number.
static void bench_step(Session *s, BenchSteps *x) {
    size_t room = heads_room(s);
    double t = s->clk.decode;
    decode(s, (int)(mix64((uint64_t)arrlen(x->seconds)) % (uint64_t)s->c->V));
    int grew = heads_room(s) != room;
    if (grew) x->last = (int)arrlen(x->seconds);
    arrput(x->seconds, s->clk.decode - t);
    arrput(x->grew, (char)grew);
}

// Seconds that a growth takes beside what its steps take anyway: the mean over all growths with
// their steps, 0 when there was none.
static double growth_cost(const BenchSteps *x) {
    int n = (int)arrlen(x->seconds), count = 0;
    double sum = 0, *sorted = xmalloc((size_t)n * sizeof *sorted);
    memcpy(sorted, x->seconds, (size_t)n * sizeof *sorted);
    double usual = median(sorted, n);
    free(sorted);
    for (int i = 0; i + GROWTH_STEPS <= n; i++) {
        if (!x->grew[i]) continue;
        count++;
        for (int j = i; j < i + GROWTH_STEPS; j++) sum += x->seconds[j] - usual;
    }
    return count ? sum / count : 0;
}

// Decode behind `depth` rows: `repeat` times BENCH_STEPS steps, which all go on in the same
// dialogue. On the GPU it goes on, off the clock, until heads have grown once.
static BenchLine bench_decode(Session *s, int depth, int repeat) {
    BenchLine b = { .test = "tg", .n = depth };
    BenchSteps x = { .last = -1 };
    double *seconds = xmalloc((size_t)repeat * sizeof *seconds);
    fill_cache(s, depth);
    b.bandwidth = bandwidth(s);
    for (int r = 0; r < repeat; r++) {
        double t = s->clk.decode;
        for (int i = 0; i < BENCH_STEPS; i++) bench_step(s, &x);
        seconds[r] = s->clk.decode - t;
    }
    b.tok_s = BENCH_STEPS / median(seconds, repeat);
    b.weights = step_weights(s);
    b.kv = bytes_a_step(s);
    EACH_PART(s, p) {
        if (p->m->bytes) b.meta += (double)p->m->bytes(s, p->ms);
    }
    bench_clock(&b, s, s->clk.steps);
    for (int i = 0; KV_DEV(s) && i < KV_STEP && x.last < 0; i++) bench_step(s, &x);
    while (KV_DEV(s) && x.last >= 0 && (int)arrlen(x.seconds) < x.last + GROWTH_STEPS) bench_step(s, &x);
    b.growth = growth_cost(&x);
    arrfree(x.seconds);
    arrfree(x.grew);
    free(seconds);
    return b;
}

// ---- the table, as text, CSV or JSON lines
// Bytes of a decode step.
static double step_bytes(const BenchLine *b) { return b->weights + b->kv + b->meta; }

// What stands above the lines: nothing for JSON, the names for CSV, else what is measured and the
// table's head.
static void bench_header(FILE *f, const Options *o, const Config *c, const Weights *w) {
    if (opt_int(o, "csv")) {
        fprintf(f, "test,n,method,model,tok_s,weight_bytes,kv_bytes_attended,index_bytes,gb_s,read_gb_s,"
                   "share,attend_ms,select_ms,commit_ms,index_ms,kv_bytes_stored,threads,simd,growth_ms\n");
        return;
    }
    if (opt_int(o, "json")) return;
    fprintf(f, "%s, %s weights (%.2f GB), ", c->dir, dtype_name(c->dtype), (double)w->bytes * 1e-9);
    fprintf(f, "method %s, K %s, V %s, ", opt_str(o, "method"), opt_str(o, "ctk"), opt_str(o, "ctv"));
    fprintf(f, "%d threads, %s\n\n", n_threads(), simd_name());
    fprintf(f, "| test        |    tok/s | weights MB | KV MB | index MB |  GB/s | machine reads "
               "| share | attend ms | select ms | commit ms | index ms | KV held MB | growth ms |\n");
    fprintf(f, "|-------------|---------:|-----------:|------:|---------:|------:|--------------:"
               "|------:|----------:|----------:|----------:|---------:|-----------:|----------:|\n");
}

// One JSON line.
static void bench_json(FILE *f, const BenchLine *b, const Options *o, const Config *c) {
    double gb_s = step_bytes(b) * b->tok_s * 1e-9, read = b->bandwidth * 1e-9;
    fprintf(f, "{\"test\":\"%s\",\"n\":%d,", b->test, b->n);
    json_pair(f, "method", opt_str(o, "method"));
    json_pair(f, "model", c->dir);
    fprintf(f, "\"tok_s\":%.3f,\"weight_bytes\":%.0f,", b->tok_s, b->weights);
    fprintf(f, "\"kv_bytes_attended\":%.0f,\"index_bytes\":%.0f,", b->kv, b->meta);
    fprintf(f, "\"gb_s\":%.2f,\"read_gb_s\":%.2f,\"share\":%.4f,", gb_s, read, gb_s / read);
    fprintf(f, "\"attend_ms\":%.4f,\"select_ms\":%.4f,\"commit_ms\":%.4f,\"index_ms\":%.4f,",
            b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3);
    fprintf(f, "\"kv_bytes_stored\":%zu,\"threads\":%d,", b->stored, n_threads());
    fprintf(f, "\"simd\":\"%s\",\"growth_ms\":%.4f}\n", simd_name(), b->growth * 1e3);
}

// One CSV line.
static void bench_csv(FILE *f, const BenchLine *b, const Options *o, const Config *c) {
    double gb_s = step_bytes(b) * b->tok_s * 1e-9, read = b->bandwidth * 1e-9;
    fprintf(f, "%s,%d,%s,\"%s\",", b->test, b->n, opt_str(o, "method"), c->dir);
    fprintf(f, "%.3f,%.0f,%.0f,%.0f,", b->tok_s, b->weights, b->kv, b->meta);
    fprintf(f, "%.2f,%.2f,%.4f,", gb_s, read, gb_s / read);
    fprintf(f, "%.4f,%.4f,%.4f,%.4f,", b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3);
    fprintf(f, "%zu,%d,%s,%.4f\n", b->stored, n_threads(), simd_name(), b->growth * 1e3);
}

// A row of the table. The bytes of a step are left empty for a prefill, which is not bound by them.
static void bench_row(FILE *f, const BenchLine *b) {
    double gb_s = step_bytes(b) * b->tok_s * 1e-9, read = b->bandwidth * 1e-9;
    int prefills = *b->test == 'p';
    char name[32];
    snprintf(name, sizeof name, prefills ? "pp %d" : "tg at %d", b->n);
    fprintf(f, "| %-11s | %8.2f ", name, b->tok_s);
    if (prefills) {
        fprintf(f, "| %10s | %5s | %8s | %5s | %13.1f | %5s ", "", "", "", "", read, "");
    } else {
        fprintf(f, "| %10.1f | %5.1f | %8.1f ", b->weights * 1e-6, b->kv * 1e-6, b->meta * 1e-6);
        fprintf(f, "| %5.1f | %13.1f | %4.0f%% ", gb_s, read, 100 * gb_s / read);
    }
    fprintf(f, "| %9.3f | %9.3f | %9.3f | %8.3f | %10.1f ",
            b->attend * 1e3, b->select * 1e3, b->commit * 1e3, b->index * 1e3, (double)b->stored * 1e-6);
    if (b->growth) fprintf(f, "| %9.3f |\n", b->growth * 1e3);
    else fprintf(f, "| %9s |\n", "");
}

// One line in the form that --json or --csv asks for.
static void bench_print(FILE *f, const BenchLine *b, const Options *o, const Config *c) {
    if (opt_int(o, "json")) bench_json(f, b, o, c);
    else if (opt_int(o, "csv")) bench_csv(f, b, o, c);
    else bench_row(f, b);
    fflush(f);
}

// ---- the suite (--bench-suite, `make gpu-bench`)
// The methods of the five papers and what they are compared with, on one model, in one table. A
// method that refuses, or that would take the suite past its time, is a row that says so.

typedef struct {
    const char *name;       // in the table
    const char *method;     // --method
    const char *options;    // what it is set to, "x=1 y=2"
    int prompts, depths;    // 1: takes part in prefill, in decode
} SuiteRun;

static const SuiteRun suite_runs[] = {
    { "full",           "full",        "",             1, 1 },
    { "streaming 1024", "streaming",   "budget=1024",  0, 1 },
    { "snapkv 1024",    "snapkv",      "budget=1024",  0, 1 },
    { "dililazy 128",   "dililazy",    "budget=128",   0, 1 },
    { "quest 1024",     "quest",       "budget=1024",  0, 1 },
    { "lychee",         "lychee",      "",             0, 1 },
    { "pats 8",         "pats",        "pats-bmax=8",  0, 1 },
    { "pats 10",        "pats",        "pats-bmax=10", 0, 1 },
    { "loopserve-d",    "loopserve-d", "",             0, 1 },
    { "loopserve-p",    "loopserve-p", "",             1, 0 },         // last: it may take the suite's time
};
enum { SUITE_SECONDS = 400 };               // no measurement begins that is expected to end later

typedef struct {
    App *a;
    FILE *table, *csv;
    int *prompt, *depth;    // lengths to prefill, rows to decode behind (stb_ds arrays)
    int repeat;
    double t0;              // when the suite began
    char scores[64];        // a file of made-up scores for DiliLazyKV
} Suite;

// What stands above the lines of both files. copy: bytes a second of a copy; gemm: FLOP/s of a
// matrix product.
static void suite_header(const Suite *u, double copy, double gemm) {
    const App *a = u->a;
    const Config *c = a->c;
    fprintf(u->table, "%s, %.2f GB of weights, ", c->dir, (double)a->w->bytes * 1e-9);
    fprintf(u->table, "-d %s: ", opt_str(a->o, "device"));
    fprintf(u->table, "copy %.1f GB/s (read and written), ", copy * 1e-9);
    fprintf(u->table, "bf16 product of %d x %d x %d %.1f TFLOP/s; ", c->F, c->C, c->C, gemm * 1e-12);
    fprintf(u->table, "K %s, V %s; share: of the copy rate, measured beside every line\n\n",
            opt_str(a->o, "ctk"), opt_str(a->o, "ctv"));
    fprintf(u->table, "| method         | test      |     tok/s | ms/token |  GB/step |    GB/s | share "
                      "| TFLOP/s | attend ms | select   | commit   | index    | rows GB  | growth   |\n");
    fprintf(u->table, "|----------------|-----------|----------:|---------:|---------:|--------:|------:"
                      "|--------:|---------:|---------:|---------:|---------:|---------:|---------:|\n");
    fprintf(u->csv, "method,test,n,tok_s,weight_bytes,kv_bytes_attended,index_bytes,gb_s,copy_gb_s,"
                    "share,tflop_s,attend_ms,select_ms,commit_ms,index_ms,kv_bytes_stored,growth_ms,note\n");
}

// One line of both files. instead: why there are no numbers, or NULL.
static void suite_row(const Suite *u, const SuiteRun *r, const BenchLine *b, const char *instead) {
    double bytes = step_bytes(b), gb_s = bytes * b->tok_s * 1e-9;
    double share = b->bandwidth > 0 ? 1e9 * gb_s / b->bandwidth : 0;
    double tera = b->n ? b->flops * b->tok_s / b->n * 1e-12 : 0;
    double attend = b->attend * 1e3, select = b->select * 1e3;         // milliseconds a token
    double commit = b->commit * 1e3, index = b->index * 1e3;
    fprintf(u->table, "| %-14s | %s %6d | ", r->name, b->test, b->n);
    if (instead) {
        fprintf(u->table, "%s |\n", instead);
    } else {
        fprintf(u->table, "%9.2f | %8.3f | ", b->tok_s, 1e3 / b->tok_s);
        fprintf(u->table, "%8.3f | %7.1f | ", bytes * 1e-9, gb_s);
        fprintf(u->table, "%4.0f%% | %7.1f | %8.3f | %8.3f | ", 100 * share, tera, attend, select);
        fprintf(u->table, "%8.3f | %8.3f | %8.3f | ", commit, index, (double)b->stored * 1e-9);
        fprintf(u->table, "%8.3f |\n", b->growth * 1e3);
    }
    fprintf(u->csv, "\"%s\",%s,%d,", r->name, b->test, b->n);
    fprintf(u->csv, "%.3f,%.0f,%.0f,%.0f,", b->tok_s, b->weights, b->kv, b->meta);
    fprintf(u->csv, "%.2f,%.2f,%.4f,%.3f,", gb_s, b->bandwidth * 1e-9, share, tera);
    fprintf(u->csv, "%.4f,%.4f,%.4f,%.4f,", attend, select, commit, index);
    fprintf(u->csv, "%zu,%.4f,\"%s\"\n", b->stored, b->growth * 1e3, instead ? instead : "");
    fflush(u->table);
    fflush(u->csv);
}

// The user's options with those of the run on top.
static Options *suite_options(const Suite *u, const SuiteRun *r) {
    Options *o = options_copy(u->a->o);
    char err[256], text[128], *rest = text;
    snprintf(text, sizeof text, "%s", r->options);
    for (char *word = strsep(&rest, " "); word; word = strsep(&rest, " ")) {
        char *value = strchr(word, '=');
        if (!value) continue;
        *value = 0;
        options_set(o, word, value + 1, err);
    }
    options_set(o, "method", r->method, err);
    options_set(o, "dililazy-scores", u->scores, err);
    return o;
}

// The run's prefills, or its decodes, one line each. The lengths ascend. A line is expected to take
// as long as the one before, times the ratio of their lengths, and half as long again; when that is
// past the suite's time, the rest is left out.
static void suite_lines(const Suite *u, const SuiteRun *r, Session *s, int decodes) {
    const int *n = decodes ? u->depth : u->prompt;
    double last = 0;
    for (int i = 0; i < (int)arrlen(n); i++) {
        double t = now(), guess = i && n[i - 1] ? 1.5 * last * n[i] / n[i - 1] : 0;
        BenchLine b = { .test = decodes ? "tg" : "pp", .n = n[i] };
        if (t - u->t0 + guess > SUITE_SECONDS) {
            suite_row(u, r, &b, "left out: no time");
            return;
        }
        b = decodes ? bench_decode(s, n[i], u->repeat) : bench_prefill(s, n[i], u->repeat);
        suite_row(u, r, &b, NULL);
        last = now() - t;
    }
}

// All lines of one run. A method that cannot go on ends its rows, not the suite: die() jumps back
// here.
static void suite_run(const Suite *u, const SuiteRun *r) {
    jmp_buf jump, *outer = die_jump;
    char err[512];
    Options *o = suite_options(u, r);
    Session *volatile s = NULL;
    BenchLine none = { .test = r->depths ? "tg" : "pp" };
    die_jump = &jump;
    if (setjmp(jump)) {
        suite_row(u, r, &none, die_text);
    } else {
        s = session_try(u->a->c, u->a->w, o, r->method, err);
        if (!s) suite_row(u, r, &none, err);
        if (s && r->prompts) suite_lines(u, r, s, 0);
        if (s && r->depths) suite_lines(u, r, s, 1);
    }
    die_jump = outer;
    session_close(s);
    options_free(o);
}

// DiliLazyKV needs scores of a model's heads. Made-up ones, in [0,1), go into a temporary file.
static void suite_scores(Suite *u) {
    snprintf(u->scores, sizeof u->scores, "/tmp/kvcomp_scores_XXXXXX");
    int fd = mkstemp(u->scores), H = u->a->c->H, n = u->a->c->L * H;
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f) die(EXIT_RUN, "--bench-suite: %s cannot be written", u->scores);
    for (int i = 0; i < n; i++) {
        double score = (double)(mix64((uint64_t)i) >> 11) * 0x1p-53;
        fprintf(f, "%c\"%d-%d\": [%.6f]%s", i ? ',' : '{', i / H, i % H, score, i + 1 < n ? "" : "}");
    }
    fclose(f);
}

// The whole suite. A session of full stays open all the while, so that the weights stay on the
// device.
static void suite(App *a, int *prompt, int *depth, int repeat, FILE *table, FILE *csv) {
    Suite u = { .a = a, .table = table, .csv = csv, .t0 = now() };
    u.prompt = prompt;
    u.depth = depth;
    u.repeat = repeat;
    const Config *c = a->c;
    Session *base = session_open(c, a->w, a->o, "full");
    double gemm = KV_DEV(base) ? device_gemm_rate(base, c->F, c->C, c->C) : 0, copy = bandwidth(base);
    suite_scores(&u);
    suite_header(&u, copy, gemm);
    for (size_t i = 0; i < sizeof suite_runs / sizeof *suite_runs; i++) suite_run(&u, &suite_runs[i]);
    unlink(u.scores);
    session_close(base);
}

// ---- --bench
// Tells the memory plan, through -c, the longest context there will be.
static void bench_context(Options *o, const int *prompt, const int *depth) {
    int n = 0;
    char text[16], err[256];
    for (int i = 0; i < (int)arrlen(prompt); i++) n = max_int(n, prompt[i]);
    for (int i = 0; i < (int)arrlen(depth); i++) n = max_int(n, depth[i]);
    snprintf(text, sizeof text, "%d", n + 1 + BENCH_WARM + BENCH_STEPS * opt_int(o, "repeat") + KV_STEP + GROWTH_STEPS);
    options_set(o, "ctx-size", text, err);
}

// One table, of the method that --method names.
static void bench_method(const App *a, const int *prompt, const int *depth) {
    int repeat = opt_int(a->o, "repeat");
    Session *s = session_open(a->c, a->w, a->o, opt_str(a->o, "method"));
    bench_header(stdout, a->o, a->c, a->w);
    for (int i = 0; i < (int)arrlen(prompt); i++) {
        BenchLine b = bench_prefill(s, prompt[i], repeat);
        bench_print(stdout, &b, a->o, a->c);
    }
    for (int i = 0; i < (int)arrlen(depth); i++) {
        BenchLine b = bench_decode(s, depth[i], repeat);
        bench_print(stdout, &b, a->o, a->c);
    }
    session_close(s);
}

// The mode --bench: opens the model and prints the table of one method or, with --bench-suite, of
// all. Returns the exit code.
static int bench(Options *o) {
    App a = { .o = o };
    const char *path = opt_str(o, "bench-suite");
    int *prompt = number_list("bench-prompts", opt_str(o, "bench-prompts"), 1, 1 << 24);
    int *depth = number_list("bench-depths", opt_str(o, "bench-depths"), 0, 1 << 24);
    FILE *csv = *path ? fopen(path, "w") : NULL;
    if (*path && !csv) die(EXIT_USAGE, "--bench-suite %s: %s", path, strerror(errno));
    bench_context(o, prompt, depth);
    open_model(&a);
    choose_device(&a);
    if (csv) {
        suite(&a, prompt, depth, opt_int(o, "repeat"), stdout, csv);
        fclose(csv);
    } else {
        bench_method(&a, prompt, depth);
    }
    weights_close(a.w, a.c);
    arrfree(prompt);
    arrfree(depth);
    return 0;
}

// ==================================================================================================== 29 REPORT
// `--report OUT.html` writes what was measured and what the methods do as one page with nine
// pictures. The page needs nothing else: no network, no library, and a script for two sliders only.
// OUT.csv beside it holds the numbers.
//
// Pictures 1 and 2 show the scores of --eval. Pictures 3 to 9 come from a demonstration: a built-in
// dialogue of seven turns is played through each method of --compare, or else of --method, or else
// of a default set. Full attention speaks first. The other methods are fed its replies, so that all
// of them hold the same tokens, and each answers only the last question itself.
//
// Small drawings are inline SVG, in pixels, with y downwards. Attention maps are PNG images,
// embedded as base64.

enum {
    DEMO_TURNS  = 7,
    DEMO_BUDGET = 96,           // rows per KV head in the demonstration when the user gives no budget
    DEMO_MOST   = 256,          // a larger budget is cut to this: the dialogue has about 450 tokens
    MAP_SIDE    = 256,          // pixels of an attention map's side, at most
    MAP_MOST    = 36,           // attention maps of a model, about
    SHADES      = 16,           // colours of the viridis scale
    TEXT_SHADES = 8,            // colours of picture 8's text, beside grey
    SERIES      = 9,            // line colours of a chart; colour 0 belongs to full attention
};
enum { PHASE_PREFILL, PHASE_DECODE, PHASES };
enum { IN_ATTEND, IN_SELECT, IN_COMMIT, IN_REST, PHASE_PARTS };     // where the time of a phase goes

static const char *demo_turns[DEMO_TURNS] = {           // what the user says
    "My name is Tara.",

    "Please read: The old mill was dusty and quiet. There is a garden near the river. A tall lamp "
    "stood behind the church. The wind moved the gate and the leaf. On Monday the street looked "
    "empty. The secret code of the red box is 4821. A badger slept under the bridge. The narrow "
    "path leads to the warm kitchen. People say that the market was once busy. It rained on the "
    "fence all day. From the hill you can see the lake. Every Friday the school is full.",

    "Here is a text: The fox walked along the quiet road. They painted the wall and cleaned the "
    "window. Nobody knew why the forest was so dark. The sun shone on the mountain. The golden key "
    "is in the cellar. We saw a clever swan by the boat. Some like the moon, others like the star. "
    "It was a cold day in the village. The shop was full of people. There is a stone near the "
    "station. A slow cloud stood behind the tree. The farm is pretty in the morning.",

    "What is my name?",

    "Remember this. The bird was small and happy. The green door costs 57 coins. The train is busy "
    "in the morning. On Sunday the park looked tired. The otter walked along the deep river. They "
    "painted the bridge and cleaned the house. Nobody knew why the table was so heavy. The wooden "
    "gate leads to the soft field. It rained on the church all day. A hedgehog slept under the "
    "flower. The room was full of people. From the window you can see the moon.",

    "Where is the golden key?",

    "What is the secret code of the red box?",
};
static const char *demo_answer = "4821";                // to the last question
static const char *demo_methods = "streaming,snapkv,h2o,dililazy,sonic,loopserve,lychee,pats";

// Option values that show a method at work on a dialogue this short. Options that the user gives win.
static const char *demo_values[][2] = {
    { "lychee-buffer", "32" },
    { "lychee-kg", "2" },
    { "loopserve-min-context", "0" },
    { "loopserve-local", "8" },
    { "loopserve-alpha", "0.9" },
    { "loopserve-first", "4" },
    { "loopserve-interval", "4" },
    { "loopserve-obs", "16" },
    { "pats-window", "32" },
    { "pats-sink", "4" },
};
enum { DEMO_VALUES = sizeof demo_values / sizeof *demo_values };

typedef struct {
    FILE *f, *csv;              // the page; its numbers
    App *a;
    Options *o;                 // of the demonstration
    char *source;               // stb array, NUL-terminated: what stands under every picture (report_source)
    Turn *script;               // stb array (DEMO_TURNS): the dialogue with full attention's replies
    int pictures;               // drawn so far
} Report;

typedef struct {                // the demonstration through one method
    char name[160];
    char why[512];              // the reason why it was not played; empty: it was
    double stored[DEMO_TURNS];  // bytes of K and V held when a turn ends
    double read[DEMO_TURNS];    // bytes of K and V that a decode step of the turn reads, on average
    double seconds[PHASES][PHASE_PARTS];
    long tokens[PHASES];
    char *said;                 // stb array, NUL-terminated: its own answer to the last question
    Token *tok;                 // stb array (N): the tokens it has seen
    float *share;               // stb array (N): share of all L*H query heads that read it in the last step
} DemoRun;

static int arg_count;           // the command line, for Report.source
static char **args;

// ---- text in a page and in the table of numbers

// Writes n bytes of s as text of a page. The five characters of markup become entities; control
// characters and bytes that are not UTF-8 become visible as <0xHH>.
static void html_bytes(FILE *f, const char *s, size_t n) {
    size_t i = 0;
    while (i < n) {
        int k = utf8_length(s + i, n - i);
        int c = (unsigned char)s[i];
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

// Writes s as text between two pieces of markup, which are written as they are.
static void html_between(FILE *f, const char *before, const char *s, const char *after) {
    fputs(before, f);
    html_text(f, s);
    fputs(after, f);
}

// Writes s as one field of a CSV line, in quotes where a comma, a quote or a line end in it asks
// for them.
static void csv_text(FILE *f, const char *s) {
    if (!strpbrk(s, ",\"\r\n")) {
        fputs(s, f);
        return;
    }
    putc('"', f);
    for (; *s; s++) {
        if (*s == '"') putc('"', f);
        putc(*s, f);
    }
    putc('"', f);
}

// Writes one line of numbers. `what` names x, y and value; lo and hi are an interval of value, or
// what `what` says.
static void csv_row(Report *r, const char *picture, const char *series, const char *what,
                    double x, double y, double value, double lo, double hi) {
    csv_text(r->csv, picture);
    putc(',', r->csv);
    csv_text(r->csv, series);
    putc(',', r->csv);
    csv_text(r->csv, what);
    fprintf(r->csv, ",%.6g,%.6g,%.6g,%.6g,%.6g\n", x, y, value, lo, hi);
}

// Appends the bytes of n tokens to the stb array `text`. A method's own tokens (negative ids) have
// none.
static char *token_bytes(const Report *r, char *text, const Token *t, int n) {
    for (int i = 0; i < n; i++) {
        int len = 0;
        const char *b = t[i].id >= 0 ? tokenizer_bytes(r->a->tok, t[i].id, &len) : NULL;
        if (b && len) memcpy(arraddnptr(text, len), b, (size_t)len);
    }
    return text;
}

// Writes n tokens as one text of the page, so that characters split over tokens stay whole.
static void tokens_text(Report *r, const Token *t, int n) {
    char *text = token_bytes(r, NULL, t, n);
    if (text) html_bytes(r->f, text, arrlenu(text));
    arrfree(text);
}

// ---- PNG images: a palette of 16 colours, four bits a pixel, stored (not compressed) deflate blocks

static const unsigned char viridis[SHADES][3] = {
    { 68, 1, 84 },    { 72, 26, 108 },  { 71, 47, 125 },  { 65, 68, 135 },
    { 57, 86, 140 },  { 49, 104, 142 }, { 42, 120, 142 }, { 35, 136, 142 },
    { 31, 152, 139 }, { 34, 168, 132 }, { 53, 183, 121 }, { 84, 197, 104 },
    { 122, 209, 81 }, { 165, 219, 54 }, { 210, 226, 27 }, { 253, 231, 37 },
};

// The CRC-32 that closes a PNG chunk. crc: that of the bytes that come earlier, 0 at the start.
static uint32_t crc32_of(uint32_t crc, const unsigned char *p, size_t n) {
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int b = 0; b < 8; b++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

// The Adler-32 checksum that closes a zlib stream.
static uint32_t adler32_of(const unsigned char *p, size_t n) {
    uint32_t a = 1, b = 0;
    for (size_t i = 0; i < n; i++) {
        a = (a + p[i]) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

// Appends x as four bytes, highest first, to the stb array.
static unsigned char *big_endian(unsigned char *to, uint32_t x) {
    for (int shift = 24; shift >= 0; shift -= 8) arrput(to, (unsigned char)(x >> shift));
    return to;
}

// Appends one chunk to the stb array: length, type, data, and the CRC of type and data.
static unsigned char *png_chunk(unsigned char *png, const char *type, const unsigned char *data, size_t n) {
    png = big_endian(png, (uint32_t)n);
    size_t from = arrlenu(png);
    memcpy(arraddnptr(png, 4), type, 4);
    if (n) memcpy(arraddnptr(png, n), data, n);
    return big_endian(png, crc32_of(0, png + from, arrlenu(png) - from));
}

// The image's rows as PNG filters them: a byte 0 (no filter), then two pixels a byte, the left one
// in the high bits.
static unsigned char *png_rows(const unsigned char *pixel, int w, int h) {
    unsigned char *raw = NULL;
    for (int y = 0; y < h; y++) {
        const unsigned char *row = pixel + (size_t)y * w;
        arrput(raw, 0);
        for (int x = 0; x < w; x += 2) {
            int right = x + 1 < w ? row[x + 1] : 0;
            arrput(raw, (unsigned char)(row[x] << 4 | right));
        }
    }
    return raw;
}

// raw (n) as a zlib stream of stored blocks. A block is: 1 if it is the last, its length and the
// length's complement (two bytes each, lowest first), its bytes.
static unsigned char *zlib_stored(const unsigned char *raw, size_t n) {
    unsigned char *z = NULL;
    arrput(z, 0x78);
    arrput(z, 0x01);
    size_t at = 0;
    while (at < n) {
        size_t len = min_size(n - at, 65535);
        arrput(z, at + len == n);
        arrput(z, (unsigned char)len);
        arrput(z, (unsigned char)(len >> 8));
        arrput(z, (unsigned char)~len);
        arrput(z, (unsigned char)(~len >> 8));
        memcpy(arraddnptr(z, len), raw + at, len);
        at += len;
    }
    return big_endian(z, adler32_of(raw, n));
}

// The image file of pixel (h,w), values 0..15, as an stb array.
static unsigned char *png_make(const unsigned char *pixel, int w, int h) {
    unsigned char *raw = png_rows(pixel, w, h);
    unsigned char *z = zlib_stored(raw, arrlenu(raw));
    unsigned char *head = NULL, *png = NULL;
    head = big_endian(head, (uint32_t)w);
    head = big_endian(head, (uint32_t)h);
    memcpy(arraddnptr(head, 5), "\x04\x03\0\0\0", 5);   // 4 bits, palette

    memcpy(arraddnptr(png, 8), "\x89PNG\r\n\x1a\n", 8);
    png = png_chunk(png, "IHDR", head, 13);
    png = png_chunk(png, "PLTE", viridis[0], sizeof viridis);
    png = png_chunk(png, "IDAT", z, arrlenu(z));
    png = png_chunk(png, "IEND", NULL, 0);
    arrfree(raw);
    arrfree(z);
    arrfree(head);
    return png;
}

// Writes n bytes in base64: three bytes as four digits, '=' where bytes are missing at the end.
static void base64_write(FILE *f, const unsigned char *p, size_t n) {
    static const char *digit = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t second = i + 1 < n ? p[i + 1] : 0;
        uint32_t third = i + 2 < n ? p[i + 2] : 0;
        uint32_t u = (uint32_t)p[i] << 16 | second << 8 | third;
        putc(digit[u >> 18], f);
        putc(digit[u >> 12 & 63], f);
        putc(i + 1 < n ? digit[u >> 6 & 63] : '=', f);
        putc(i + 2 < n ? digit[u & 63] : '=', f);
    }
}

// ---- the page's style

static const char *report_style =
    // Colours of a light and of a dark screen.
    ":root{--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d5dae0;--card:#f5f7f9;--kept:31,152,139;"
    "--ok:#11784f;--bad:#c23a20;color-scheme:light dark}\n"
    "@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e3e7eb;--dim:#98a2ad;--line:#343b43;"
    "--card:#1d2227;--kept:18,134,118;--ok:#4cc492;--bad:#ff7a5c}}\n"

    // The page: headings, the explanation (how), remarks (note) and the command line (src) of a
    // picture.
    "body{background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif;max-width:72rem;"
    "margin:1.5rem auto;padding:0 1rem}\n"
    "section{border-top:1px solid var(--line);margin-top:2.5rem}"
    "h1{margin-bottom:.3rem}"
    "h2{margin:1.2rem 0 .3rem}"
    "h3{font-size:1rem;margin:1rem 0 .3rem}\n"
    "p.how{max-width:60rem;margin:.2rem 0 .8rem}"
    "p.note{color:var(--dim);font-size:.9rem}"
    "p.src{color:var(--dim);font-size:.75rem;overflow-wrap:anywhere}\n"
    "nav a{margin-right:1rem}"
    "a{color:#2a88c8}"

    // Drawings, and a row of them.
    "svg{max-width:100%;height:auto}"
    "svg text{fill:var(--fg);font:12px system-ui,sans-serif}"
    "svg text.dim{fill:var(--dim)}\n"
    "svg .grid{stroke:var(--line);stroke-width:1;fill:none}"
    ".row{display:flex;flex-wrap:wrap;gap:1.5rem;align-items:flex-start}\n"

    // Tables: numbers right, text (t) left; a wide one scrolls.
    "table{border-collapse:collapse;font-size:.9rem;margin:.5rem 0}"
    "th,td{white-space:nowrap;padding:.2rem .6rem;border:1px solid var(--line);text-align:right;"
    "font-variant-numeric:tabular-nums}\n"
    "th{background:var(--card);font-weight:600}\n"
    "td.t,th.t{text-align:left;white-space:normal}"
    "caption{white-space:nowrap;text-align:left;font-weight:600;padding:.2rem 0}"
    "div.wide{overflow-x:auto}"
    "div.wide th,div.wide td{font-size:.8rem;padding:.2rem .4rem}"
    "div.wide th{white-space:normal}\n"
    "ul.legend{list-style:none;padding:0;margin:.4rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;"
    "font-size:.9rem}"
    "ul.legend svg{vertical-align:middle;margin-right:.4rem}\n"

    // Series of a chart: s0 is full attention's wide band; `again` marks a colour used a second time.
    ".s0{--c:var(--fg)}"
    ".s1{--c:#1f83c4}"
    ".s2{--c:#e09a00}"
    ".s3{--c:#0fa37a}"
    ".s4{--c:#cc6fa3}"
    ".s5{--c:#dd5a1e}"
    ".s6{--c:#58b4e8}"
    ".s7{--c:#9273bd}"
    ".s8{--c:#9a9a18}\n"
    "path.s{fill:none;stroke:var(--c);stroke-width:2.2}"
    "path.s0.s{stroke-width:7;opacity:.3}"
    "circle.s,rect.s{fill:var(--c)}\n"
    "path.s6,path.s7{stroke-dasharray:7 4}"
    "path.s8{stroke-dasharray:2 3}"
    "path.again{stroke-dasharray:11 3 2 3}\n"
    "path.front{fill:none;stroke:var(--fg);stroke-dasharray:5 5;stroke-width:1.3;opacity:.7}"
    "path.bar{fill:none;stroke:var(--c);stroke-width:1.3}\n"

    // Picture 8, the coloured text: k0 is read by no head, b is the answer.
    ".tokens{background:var(--card);padding:.6rem .9rem;white-space:pre-wrap;overflow-wrap:anywhere;"
    "font-size:.85rem;line-height:1.55}\n"
    ".tokens .k0{color:var(--dim);opacity:.7}"
    ".tokens b{font-weight:600;border-bottom:3px solid #e0662a}\n"
    ".side{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));"
    "gap:0 1.5rem}\n"

    // Boxes of pictures 5 and 9: b0 sign, b1 exponent, b2 mantissa, b3 what is cut, b4 padding;
    // `off` is a bit 0.
    ".b0{fill:#7b52ab}"
    ".b1{fill:#2a78b5}"
    ".b2{fill:#22a884}"
    ".b3{fill:var(--line)}"
    ".b4{fill:none;stroke:var(--dim);stroke-dasharray:3 2}"
    ".off{opacity:.45}\n"

    // Picture 6, the tree: branches that were read, skipped, or hold the answer (gold).
    ".tree{background:var(--card);padding:.6rem .9rem;font-size:.85rem}"
    ".tree details{margin:.15rem 0 .15rem 1.2rem}"
    ".tree summary{cursor:pointer}"
    ".tree p{margin:.15rem 0 .15rem 2.4rem}\n"
    ".tree i{display:inline-block;width:.9em;height:.9em;border-radius:.2em;margin-right:.4em;"
    "vertical-align:-.1em}\n"
    ".tree .read{font-weight:600}"
    ".tree .gold{border-bottom:3px solid #e0662a}"
    ".tree .skip{color:var(--dim)}\n"

    // Picture 7, the maps: all of them small, or with the script (one) a single large one.
    ".maps{display:flex;flex-wrap:wrap;gap:.8rem}"
    ".maps figure{margin:0;width:11rem}"
    ".maps figcaption{font-size:.75rem;line-height:1.3}"
    ".maps svg{width:100%;display:block}\n"
    ".maps.one figure{display:none;width:min(34rem,100%)}"
    ".maps.one figure.on{display:block}"
    ".maps.one figcaption{font-size:.9rem}"
    ".maps image{image-rendering:pixelated}\n"
    ".maps .void{fill:var(--bg)}"
    ".maps .line{fill:#ff4d4d;fill-opacity:.18;stroke:#ff4d4d;stroke-width:1;"
    "vector-effect:non-scaling-stroke}\n"
    ".maps .whole{fill:#f2a33c;stroke:#f2a33c;fill-opacity:.12;stroke-dasharray:3 3;stroke-opacity:.7}"
    "#lines:not(:checked)~.maps .line{display:none}\n"
    ".sliders{display:none}"
    ".js .sliders{display:flex;flex-wrap:wrap;gap:.4rem 1.5rem;margin:.4rem 0}"
    ".sliders input{vertical-align:middle;width:14rem}"

    // Right and wrong answers.
    ".ok{color:var(--ok)}"
    ".bad{color:var(--bad)}\n";

// Writes the style classes of the colour scales: v0..v15 viridis; r0..r10 from red to green
// (picture 2); k1..k8 for the share of heads that read a token (picture 8).
static void report_shades(FILE *f) {
    for (int i = 0; i < SHADES; i++) {
        const unsigned char *v = viridis[i];
        fprintf(f, ".v%d{fill:#%02x%02x%02x;", i, v[0], v[1], v[2]);
        fprintf(f, "background:#%02x%02x%02x}%s", v[0], v[1], v[2], i % 4 == 3 ? "\n" : "");
    }
    fprintf(f, "svg text.on-dark{fill:#fff}svg text.on-light{fill:#111}\n");
    for (int i = 0; i <= 10; i++)
        fprintf(f, "td.r%d{background:hsl(%d,70%%,%d%%);color:#111}", i, 12 * i, 66 - i);
    for (int i = 1; i <= TEXT_SHADES; i++)
        fprintf(f, ".k%d{background:rgba(var(--kept),%.3g)}", i, .12 + .68 * i / TEXT_SHADES);
    fputc('\n', f);
}

// ---- the frame of a picture: heading, explanation, remarks, source; panels and legends inside it

// Opens the section `id` with its number, its title and how to read it.
static void picture_begin(Report *r, const char *id, const char *title, const char *how) {
    fprintf(r->f, "<section id=\"%s\">\n<h2>%d. ", id, ++r->pictures);
    html_between(r->f, "", title, "</h2>\n");
    html_between(r->f, "<p class=\"how\">", how, "</p>\n");
}

static void picture_end(Report *r) {
    html_between(r->f, "<p class=\"src\">", r->source, "</p>\n</section>\n");
}

// Writes one plain sentence below a picture, or in place of one that could not be drawn.
KV_PRINTF(2, 3) static void picture_note(Report *r, const char *fmt, ...) {
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    html_between(r->f, "<p class=\"note\">", text, "</p>\n");
}

// Opens one of several drawings of a picture, under its own small heading.
static void panel_begin(FILE *f, const char *title) {
    html_between(f, "<div><h3>", title, "</h3>");
}

// Opens a drawing of w by h pixels.
static void svg_begin(FILE *f, int w, int h) {
    fprintf(f, "<svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n", w, h, w, h);
}

static void legend_begin(FILE *f) { fprintf(f, "<ul class=\"legend\">\n"); }
static void legend_end(FILE *f) { fprintf(f, "</ul>\n"); }

// A legend's entry: a small box of a style class, and its name.
static void legend_box(FILE *f, const char *class, const char *name) {
    fprintf(f, "<li><svg width=\"16\" height=\"12\">"
               "<rect class=\"%s\" x=\"1\" y=\"1\" width=\"14\" height=\"10\"/></svg>", class);
    html_between(f, "", name, "</li>\n");
}

// A legend's entry for colour `shade` of the viridis scale.
static void legend_shade(FILE *f, int shade, const char *name) {
    char class[16];
    snprintf(class, sizeof class, "v%d", shade);
    legend_box(f, class, name);
}

// ---- a chart of lines: x linear or logarithmic, y linear from 0

typedef struct {                // one point
    double x, y;
    double lo, hi;              // error bar, if lo < hi
    char what[32];              // written beside the point
} Spot;

typedef struct {
    const char *name;
    int colour;                 // 0: full attention's wide band
    Spot *spot;                 // stb array, in the order of the line
} Series;

typedef struct {
    const char *x_name, *y_name;
    int log_x;
    int bytes_x, bytes_y;       // 1: the axis is labelled in KiB, MiB, ..
    int dots;                   // 1: every point has a dot and its text
    double y_top;               // upper end of y; 0: by the data
} Axes;

typedef struct {                // the ranges shown
    const Axes *ax;
    double x0, x1, y1;
} Frame;

enum { CHART_W = 520, CHART_H = 330 };                  // pixels of a chart, and of its margins
enum { CHART_LEFT = 66, CHART_RIGHT = 16, CHART_TOP = 14, CHART_BOTTOM = 48 };

// The distance of grid lines, 1, 2 or 5 times a power of ten, that cuts `range` into about n parts.
static double nice_step(double range, int n) {
    double p = pow(10, floor(log10(range / n)));
    double k = range / n / p;
    if (k < 1.5) return p * 1;
    if (k < 3.5) return p * 2;
    if (k < 7.5) return p * 5;
    return p * 10;
}

// The pixel column of x. On a logarithmic axis what lies left of x0, and 0, stands at the left end.
static double chart_x(const Frame *c, double x) {
    double share = (x - c->x0) / (c->x1 - c->x0);
    if (c->ax->log_x) share = log(fmax(x, c->x0) / c->x0) / log(c->x1 / c->x0);
    return CHART_LEFT + share * (CHART_W - CHART_LEFT - CHART_RIGHT);
}

// The pixel row of y.
static double chart_y(const Frame *c, double y) {
    return CHART_H - CHART_BOTTOM - y / c->y1 * (CHART_H - CHART_BOTTOM - CHART_TOP);
}

// The ranges that hold all points of n series: 5 % of room above, 30 % on both sides of a
// logarithmic x.
static Frame chart_frame(const Axes *ax, const Series *s, int n) {
    Frame c = { ax, INFINITY, -INFINITY, ax->y_top };
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++) {
            const Spot *p = &s[i].spot[j];
            if (!ax->log_x || p->x > 0) {
                c.x0 = fmin(c.x0, p->x);
                c.x1 = fmax(c.x1, p->x);
            }
            if (!ax->y_top) c.y1 = fmax(c.y1, 1.05 * fmax(p->y, p->hi));
        }
    if (c.x0 > c.x1) {                                  // no point at all
        c.x0 = 1;
        c.x1 = 1;
    }
    if (ax->log_x) {
        c.x0 /= 1.3;
        c.x1 *= 1.3;
    }
    if (c.x0 == c.x1) c.x1 += 1;
    if (!(c.y1 > 0)) c.y1 = 1;
    return c;
}

// The label of a grid line at x: bytes with their unit, or the plain number.
static void tick_label(double x, int bytes, char b[32]) {
    if (bytes) human_bytes(x, b);
    else snprintf(b, 32, "%g", x);
}

// A vertical grid line with its label below.
static void tick_x(FILE *f, const Frame *c, double x) {
    char b[32];
    double at = chart_x(c, x);
    tick_label(x, c->ax->bytes_x, b);
    fprintf(f, "<path class=\"grid\" d=\"M%.1f %dV%d\"/>", at, CHART_TOP, CHART_H - CHART_BOTTOM);
    fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            at, CHART_H - CHART_BOTTOM + 16, b);
}

// A horizontal grid line with its label on the left.
static void tick_y(FILE *f, const Frame *c, double y) {
    char b[32];
    double at = chart_y(c, y);
    tick_label(y, c->ax->bytes_y, b);
    fprintf(f, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>", CHART_LEFT, at, CHART_W - CHART_RIGHT);
    fprintf(f, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", CHART_LEFT - 6, at + 4, b);
}

// The vertical grid lines of a logarithmic axis: 1, 2, 5 times the powers of ten; over two decades
// the powers only.
static void ticks_log(FILE *f, const Frame *c) {
    static const int mark[] = { 1, 2, 5 };
    int marks = c->x1 / c->x0 > 100 ? 1 : 3;
    for (int k = (int)floor(log10(c->x0)); k <= log10(c->x1); k++)
        for (int i = 0; i < marks; i++) {
            double x = mark[i] * pow(10, k);
            if (x >= c->x0 && x <= c->x1) tick_x(f, c, x);
        }
}

// The grid and the names of both axes.
static void chart_grid(FILE *f, const Frame *c) {
    double step = nice_step(c->y1, 5);
    for (int i = 0; i * step <= c->y1 * 1.0001; i++) tick_y(f, c, i * step);
    if (c->ax->log_x) {
        ticks_log(f, c);
    } else {
        step = nice_step(c->x1 - c->x0, 8);
        for (double x = ceil(c->x0 / step) * step; x <= c->x1 * 1.0001; x += step) tick_x(f, c, x);
    }
    fprintf(f, "<text class=\"dim\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">",
            (CHART_LEFT + CHART_W - CHART_RIGHT) / 2, CHART_H - 10);
    html_between(f, "", c->ax->x_name, "</text>\n");
    fprintf(f, "<text class=\"dim\" transform=\"translate(12 %d) rotate(-90)\" text-anchor=\"middle\">",
            (CHART_TOP + CHART_H - CHART_BOTTOM) / 2);
    html_between(f, "", c->ax->y_name, "</text>\n");
}

// The style class of a series' colour. Behind the last colour the first ones come again, with other
// dashes.
static const char *series_class(int colour, char class[24]) {
    int c = colour ? 1 + (colour - 1) % (SERIES - 1) : 0;
    snprintf(class, 24, "s%d s%s", c, colour >= SERIES ? " again" : "");
    return class;
}

// A series' dots with their error bars. A dot's text is left out where it would cover the last one
// written.
static void chart_dots(FILE *f, const Frame *c, const Series *s, const char *class) {
    double at_x = -99, at_y = -99;                      // the last text
    for (int j = 0; j < (int)arrlen(s->spot); j++) {
        const Spot *p = &s->spot[j];
        double x = chart_x(c, p->x), y = chart_y(c, p->y);
        double lo = chart_y(c, p->lo), hi = chart_y(c, p->hi);
        if (p->lo < p->hi)
            fprintf(f, "<path class=\"%.2s bar\" d=\"M%.1f %.1fV%.1fM%.1f %.1fh8M%.1f %.1fh8\"/>",
                    class, x, lo, hi, x - 4, lo, x - 4, hi);
        fprintf(f, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\">", class, x, y);
        html_between(f, "<title>", s->name, "");
        fprintf(f, " %s: %.4g</title></circle>", p->what, p->y);

        int room = fabs(x + 7 - at_x) > 20 || fabs(y - 6 - at_y) > 12;
        if (*p->what && room) {
            at_x = x + 7;
            at_y = y - 6;
            fprintf(f, "<text class=\"dim\" x=\"%.1f\" y=\"%.1f\">%s</text>", at_x, at_y, p->what);
        }
        fputc('\n', f);
    }
}

// A series' line, and its dots where the chart has them.
static void chart_series(FILE *f, const Frame *c, const Series *s) {
    char class[24];
    fprintf(f, "<path class=\"%s\" d=\"", series_class(s->colour, class));
    for (int j = 0; j < (int)arrlen(s->spot); j++) {
        const Spot *p = &s->spot[j];
        fprintf(f, "%s%.1f %.1f", j ? "L" : "M", chart_x(c, p->x), chart_y(c, p->y));
    }
    fprintf(f, "\"/>\n");
    if (c->ax->dots) chart_dots(f, c, s, class);
}

// A dashed staircase through the points of a frontier (stb array), on to the right end.
static void chart_front(FILE *f, const Frame *c, const Spot *front) {
    fprintf(f, "<path class=\"front\" d=\"");
    for (int i = 0; i < (int)arrlen(front); i++)
        fprintf(f, i ? "H%.1fV%.1f" : "M%.1f %.1f", chart_x(c, front[i].x), chart_y(c, front[i].y));
    fprintf(f, "H%d\"/>\n", CHART_W - CHART_RIGHT);
}

// Draws n series. front: stb array of a frontier's points, or NULL.
static void chart(FILE *f, const Axes *ax, const Series *s, int n, const Spot *front) {
    Frame c = chart_frame(ax, s, n);
    svg_begin(f, CHART_W, CHART_H);
    chart_grid(f, &c);
    if (front) chart_front(f, &c, front);
    for (int i = 0; i < n; i++) chart_series(f, &c, &s[i]);
    fprintf(f, "</svg>\n");
}

// The legend of n series: a piece of each line, with its dot if the chart has dots.
static void legend_lines(FILE *f, const Series *s, int n, int dots) {
    char class[24];
    legend_begin(f);
    for (int i = 0; i < n; i++) {
        series_class(s[i].colour, class);
        fprintf(f, "<li><svg width=\"34\" height=\"12\"><path class=\"%s\" d=\"M1 6H33\"/>", class);
        if (dots) fprintf(f, "<circle class=\"%s\" cx=\"17\" cy=\"6\" r=\"4.5\"/>", class);
        html_between(f, "</svg>", s[i].name, "</li>\n");
    }
    legend_end(f);
}

static void series_free(Series *s) {
    for (int i = 0; i < (int)arrlen(s); i++) arrfree(s[i].spot);
    arrfree(s);
}

// ---- 1: quality against bytes
// Two charts with a line a method and a dot a budget: x is bytes (logarithmic), held on the left,
// read for one new token on the right. y is the mean score with its 95 % interval, or KL
// divergence, or perplexity; a table of all columns follows.

enum { BY_SCORE, BY_KLD, BY_PPL };                      // what y is
static const char *report_metrics[] = {
    "mean score (0 to 1; higher is better)",
    "KL divergence from full (nats; lower is better)",
    "perplexity (lower is better)",
};

// BY_*: scores if any row has answers, else the divergence if any was measured, else perplexity.
static int rows_metric(const Score *rows) {
    int metric = BY_PPL;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        if (arrlen(rows[i].answers)) return BY_SCORE;
        if (rows[i].kld > 0) metric = BY_KLD;
    }
    return metric;
}

// The mean score of the answers (stb array) of one task (NULL: of all) and of one place of the
// question (-1: of all). -1 if there are none.
static double report_mean(const Answer *x, const char *task, int position) {
    double sum = 0;
    int n = 0;
    for (int i = 0; i < (int)arrlen(x); i++) {
        if (task && strcmp(task, x[i].task)) continue;
        if (position >= 0 && position != x[i].position) continue;
        sum += x[i].score;
        n++;
    }
    return n ? sum / n : -1;
}

// The height of a row's point: mean score, nats a token, or perplexity.
static double row_quality(const Score *s, int metric) {
    double n = s->predicted ? (double)s->predicted : 1;
    if (metric == BY_SCORE) return fmax(0, report_mean(s->answers, NULL, -1));
    if (metric == BY_KLD) return s->kld / n;
    return exp(s->nll / n);
}

// Bytes of an item, on average: read by a decode step (read 1), or held at the end (read 0).
static double row_bytes(const Score *s, int read) {
    return (read ? s->attended : s->stored) / (s->items ? s->items : 1);
}

// The budget to print beside a row's name; 0 for full attention, which has none.
static int row_budget(const Score *s) { return strcmp(s->name, "full") ? s->budget : 0; }

static int spot_order(const void *a, const void *b) {
    const Spot *p = a, *q = b;
    return (p->x > q->x) - (p->x < q->x);
}

// The points of n series that nothing cheaper beats, by rising x (stb array). higher 1: more y is
// better.
static Spot *frontier(const Series *s, int n, int higher) {
    Spot *all = NULL, *best = NULL;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < (int)arrlen(s[i].spot); j++) arrput(all, s[i].spot[j]);
    if (all) qsort(all, arrlen(all), sizeof *all, spot_order);

    for (int i = 0; i < (int)arrlen(all); i++) {
        if (!arrlen(best)) {
            arrput(best, all[i]);
            continue;
        }
        int better = higher ? all[i].y > arrlast(best).y : all[i].y < arrlast(best).y;
        if (better && arrlast(best).x == all[i].x) arrlast(best) = all[i];
        else if (better) arrput(best, all[i]);
    }
    arrfree(all);
    return best;
}

// The place of a method's series; a new one is appended when the name is new. *colours: colours
// given so far.
static int series_of(Series **s, const char *name, int *colours) {
    int k = 0;
    while (k < (int)arrlen(*s) && strcmp((*s)[k].name, name)) k++;
    if (k < (int)arrlen(*s)) return k;
    Series one = { name, 0, NULL };
    if (strcmp(name, "full")) one.colour = ++*colours;
    arrput(*s, one);
    return k;
}

// One series a method, with its budgets as points (stb array). read: as in row_bytes.
static Series *score_series(Report *r, const Score *rows, int metric, int read) {
    Series *s = NULL;
    int colours = 0;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        const Score *row = &rows[i];
        int k = series_of(&s, row->name, &colours);
        Spot p = { .x = row_bytes(row, read), .y = row_quality(row, metric), .lo = row->lo, .hi = row->hi };
        if (row_budget(row)) snprintf(p.what, sizeof p.what, "%d", row->budget);
        arrput(s[k].spot, p);
        csv_row(r, "pareto", row->name, read ? "bytes read a step, score" : "bytes stored, score",
                p.x, row->budget, p.y, p.lo, p.hi);
    }
    return s;
}

// The table below the charts has a column for every task, for every place of the question, and for
// what was measured at all.
enum {
    COL_QUALITY,                // row_quality
    COL_INTERVAL,               // 95 % interval of the mean score
    COL_MEAN,                   // mean score of one task, or of one place of the question
    COL_KLD,                    // nats a token
    COL_STORED,                 // bytes held at the end of an item
    COL_SHARE,                  // the same in per cent of full attention's
    COL_READ,                   // bytes read by a decode step
    COL_PEAK,                   // most bytes ever held
    COL_PREFILL,                // seconds
    COL_DECODE,                 // tokens a second
};
typedef struct {
    const char *name;
    int kind;                   // COL_*
    const char *task;           // of COL_MEAN, as in report_mean
    int position;
} TableColumn;

// Appends a column unless there is one of that name.
static TableColumn *table_column(TableColumn *c, const char *name, int kind, const char *task, int position) {
    for (int i = 0; i < (int)arrlen(c); i++)
        if (!strcmp(c[i].name, name)) return c;
    TableColumn one = { name, kind, task, position };
    arrput(c, one);
    return c;
}

// Appends a column for every task, in order of appearance, if there is more than one task.
static TableColumn *task_columns(TableColumn *c, const Score *rows) {
    TableColumn *tasks = NULL;
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            const char *task = rows[i].answers[j].task;
            tasks = table_column(tasks, task, COL_MEAN, task, -1);
        }
    if (arrlen(tasks) > 1)
        for (int i = 0; i < (int)arrlen(tasks); i++) arrput(c, tasks[i]);
    arrfree(tasks);
    return c;
}

// Appends a column for every place of the question that an answer has.
static TableColumn *place_columns(TableColumn *c, const Score *rows) {
    static const char *place[] = { "asked first", "asked amid", "asked last" };
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            int p = rows[i].answers[j].position;
            if (p >= 0 && p < 3) c = table_column(c, place[p], COL_MEAN, NULL, p);
        }
    return c;
}

// The columns of the table (stb array).
static TableColumn *table_columns(const Score *rows, int metric) {
    static const char *quality[] = { "mean score", "KLD (nats)", "perplexity" };       // by BY_*
    TableColumn *c = NULL;
    int spread = 0, kld = 0;
    for (int i = 0; i < (int)arrlen(rows); i++) {
        spread |= rows[i].lo < rows[i].hi;
        kld |= rows[i].kld > 0;
    }
    c = table_column(c, quality[metric], COL_QUALITY, NULL, -1);
    if (spread) c = table_column(c, "95 % interval", COL_INTERVAL, NULL, -1);
    c = task_columns(c, rows);
    c = place_columns(c, rows);
    if (kld) c = table_column(c, "KLD (nats)", COL_KLD, NULL, -1);
    c = table_column(c, "held", COL_STORED, NULL, -1);
    c = table_column(c, "of full", COL_SHARE, NULL, -1);
    c = table_column(c, "read a step", COL_READ, NULL, -1);
    c = table_column(c, "peak", COL_PEAK, NULL, -1);
    c = table_column(c, "prefill s", COL_PREFILL, NULL, -1);
    c = table_column(c, "tok/s", COL_DECODE, NULL, -1);
    return c;
}

// The mean score of a COL_MEAN column; empty where the row has no such answer.
static void mean_cell(const Score *s, const TableColumn *c, char b[32]) {
    double x = report_mean(s->answers, c->task, c->position);
    *b = 0;
    if (x >= 0) snprintf(b, 32, "%.3f", x);
}

// The text of one cell.
static void score_cell(const Score *s, const TableColumn *c, int metric, char b[32]) {
    double n = s->predicted ? (double)s->predicted : 1;
    double full = s->full > 0 ? s->full : 1;
    switch (c->kind) {
    case COL_QUALITY:  snprintf(b, 32, metric == BY_KLD ? "%.5f" : "%.3f", row_quality(s, metric)); break;
    case COL_INTERVAL: snprintf(b, 32, "%.3f to %.3f", s->lo, s->hi); break;
    case COL_MEAN:     mean_cell(s, c, b); break;
    case COL_KLD:      snprintf(b, 32, "%.5f", s->kld / n); break;
    case COL_STORED:   human_bytes(row_bytes(s, 0), b); break;
    case COL_SHARE:    snprintf(b, 32, "%.1f %%", 100 * s->stored / full); break;
    case COL_READ:     human_bytes(row_bytes(s, 1), b); break;
    case COL_PEAK:     human_bytes(s->peak, b); break;
    case COL_PREFILL:  snprintf(b, 32, "%.2f", s->prefill_s); break;
    case COL_DECODE:   snprintf(b, 32, "%.0f", rate((long)s->n_decode, s->decode_s)); break;
    }
}

// The table: a line for every method and budget.
static void score_table(Report *r, const Score *rows, int metric) {
    TableColumn *c = table_columns(rows, metric);
    char b[32];
    fprintf(r->f, "<div class=\"wide\"><table><tr><th class=\"t\">method</th><th>budget</th>");
    for (int k = 0; k < (int)arrlen(c); k++) html_between(r->f, "<th>", c[k].name, "</th>");
    fprintf(r->f, "</tr>\n");
    for (int i = 0; i < (int)arrlen(rows); i++) {
        const Score *row = &rows[i];
        html_between(r->f, "<tr><td class=\"t\">", row->name, "</td><td>");
        if (row_budget(row)) fprintf(r->f, "%d", row->budget);
        fprintf(r->f, "</td>");
        for (int k = 0; k < (int)arrlen(c); k++) {
            score_cell(row, &c[k], metric, b);
            fprintf(r->f, "<td>%s</td>", b);
            if (c[k].kind == COL_MEAN && *b)
                csv_row(r, "scores", row->name, c[k].name, row->budget, 0, atof(b), 0, 0);
        }
        fprintf(r->f, "</tr>\n");
    }
    fprintf(r->f, "</table></div>\n");
    arrfree(c);
}

// The two charts, the legend they share, and the table.
static void pareto_charts(Report *r, const Score *rows) {
    int metric = rows_metric(rows);
    Axes ax = { .y_name = report_metrics[metric], .log_x = 1, .bytes_x = 1, .dots = 1 };
    if (metric == BY_SCORE) ax.y_top = 1.06;
    fprintf(r->f, "<div class=\"row\">\n");
    for (int read = 0; read < 2; read++) {
        Series *s = score_series(r, rows, metric, read);
        Spot *front = frontier(s, (int)arrlen(s), metric == BY_SCORE);
        ax.x_name = read ? "bytes read per decode step (log scale)"
                         : "bytes of K and V held after a dialogue (log scale)";
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

static void draw_pareto(Report *r, const Score *rows) {
    int up = rows_metric(rows) == BY_SCORE || !arrlen(rows);
    char how[640];
    snprintf(how, sizeof how,
             "Each point is one method at one budget (the small number: rows kept or read per "
             "head). Good is left and %s. Bars, if there are any, are 95 %% bootstrap intervals; "
             "on the dashed line nothing cheaper is better. Left chart: bytes held; right chart: "
             "bytes read for one new token (methods that only save reads gain there).",
             up ? "up: right answers from few bytes" : "down: close to full attention from few bytes");
    picture_begin(r, "pareto", "Quality against bytes", how);
    if (arrlen(rows))
        pareto_charts(r, rows);
    else
        picture_note(r, "No scores were measured: give --eval TASK (and --compare METHODS --budgets LIST) "
                        "together with --report.");
    picture_end(r);
}

// ---- 2: needles by depth and length
// One table a method and budget: columns are lengths of the text in tokens, rows are depths of the
// fact in per cent. A cell is the mean score of the answers there, its colour runs from red (0)
// over yellow (one half) to green (1).

static int on_grid(const Answer *x) { return x->depth >= 0 && x->length > 0; }

// The ascending values of one axis (stb array): depths, or lengths. Lengths vary by a few tokens
// with the item, so a length within an eighth of the first of its class counts as that one; so does
// a depth within 3 per cent.
static double *grid_axis(const Score *rows, int depth) {
    double *v = NULL;
    for (int i = 0; i < (int)arrlen(rows); i++)
        for (int j = 0; j < (int)arrlen(rows[i].answers); j++) {
            const Answer *x = &rows[i].answers[j];
            if (on_grid(x)) arrput(v, depth ? x->depth : x->length);
        }
    if (!v) return NULL;
    qsort(v, arrlen(v), sizeof *v, double_order);

    int n = 1;
    for (int i = 1; i < (int)arrlen(v); i++) {
        double first = v[n - 1];
        if (v[i] > first + (depth ? 3 : first / 8)) v[n++] = v[i];
    }
    arrsetlen(v, n);
    return v;
}

// The class of x on an axis: the last value that is not above x.
static int grid_at(const double *v, double x) {
    int i = (int)arrlen(v) - 1;
    while (i > 0 && v[i] > x) i--;
    return i;
}

// The rows of one table. sum, n (depths,lengths): the scores of a cell and their number.
static void needle_cells(Report *r, const Score *s, const double *len, const double *depth,
                         const double *sum, const double *n) {
    int lengths = (int)arrlen(len);
    for (int d = 0; d < (int)arrlen(depth); d++) {
        fprintf(r->f, "<tr><th>%g %%</th>", depth[d]);
        for (int l = 0; l < lengths; l++) {
            int at = d * lengths + l;
            if (!n[at]) {
                fprintf(r->f, "<td></td>");
                continue;
            }
            double x = sum[at] / n[at];
            fprintf(r->f, "<td class=\"r%d\">%.2f</td>", (int)(10 * fmin(fmax(x, 0), 1) + .5), x);
            csv_row(r, "needle", s->name, "length, depth, score", len[l], depth[d], x, s->budget, n[at]);
        }
        fprintf(r->f, "</tr>\n");
    }
}

// The table of one method and budget.
static void needle_table(Report *r, const Score *s, const double *len, const double *depth) {
    int lengths = (int)arrlen(len), depths = (int)arrlen(depth);
    double *sum = xcalloc((size_t)lengths * depths, sizeof *sum);
    double *n = xcalloc((size_t)lengths * depths, sizeof *n);
    for (int i = 0; i < (int)arrlen(s->answers); i++) {
        const Answer *x = &s->answers[i];
        if (!on_grid(x)) continue;
        int at = grid_at(depth, x->depth) * lengths + grid_at(len, x->length);
        sum[at] += x->score;
        n[at]++;
    }
    html_between(r->f, "<table><caption>", s->name, "");
    if (row_budget(s)) fprintf(r->f, ", budget %d", s->budget);
    fprintf(r->f, "</caption><tr><th>depth</th>");
    for (int l = 0; l < lengths; l++) fprintf(r->f, "<th>%g</th>", len[l]);
    fprintf(r->f, "</tr>\n");
    needle_cells(r, s, len, depth, sum, n);
    fprintf(r->f, "</table>\n");
    free(sum);
    free(n);
}

// 1: the row has an answer with a depth.
static int has_needles(const Score *s) {
    for (int j = 0; j < (int)arrlen(s->answers); j++)
        if (on_grid(&s->answers[j])) return 1;
    return 0;
}

static void draw_needle(Report *r, const Score *rows) {
    double *len = grid_axis(rows, 0), *depth = grid_axis(rows, 1);
    picture_begin(r, "needle", "Needles found, by depth and length",
                  "A fact was hidden in a long text and asked for at the end. Columns: length of "
                  "the text in tokens; rows: how deep the fact stands (0 %: at the beginning). The "
                  "number is the share of right answers; green is 1, yellow one half, red 0. A "
                  "method that forgets shows red where it forgets.");
    if (arrlen(depth)) {
        fprintf(r->f, "<div class=\"row\">\n");
        for (int i = 0; i < (int)arrlen(rows); i++)
            if (has_needles(&rows[i])) needle_table(r, &rows[i], len, depth);
        fprintf(r->f, "</div>\n");
    } else {
        picture_note(r, "No answers with a depth were measured: --eval needle makes them.");
    }
    picture_end(r);
    arrfree(len);
    arrfree(depth);
}

// ---- the demonstration: the built-in dialogue through every method

// Adds what the clocks gained between a and b to one phase of the run.
static void phase_note(DemoRun *d, int phase, const Clock *a, const Clock *b) {
    int decode = phase == PHASE_DECODE;
    double all = decode ? b->decode - a->decode : b->prefill - a->prefill;
    double part[PHASE_PARTS] = { b->attend - a->attend, b->select - a->select, b->commit - a->commit };
    part[IN_REST] = fmax(0, all - part[IN_ATTEND] - part[IN_SELECT] - part[IN_COMMIT]);
    for (int i = 0; i < PHASE_PARTS; i++) d->seconds[phase][i] += part[i];
    d->tokens[phase] += decode ? b->n_decode - a->n_decode : b->n_prefill - a->n_prefill;
}

// Lets the session speak a reply of its own, at most 32 tokens. *said becomes its text (stb array,
// NUL-terminated).
static void demo_say(App *a, char **said) {
    char *text = NULL;
    size_t n = 0;
    FILE *f = memory_stream(&text, &n);
    generate(a, 32, f);
    memory_stream_close(f);
    arrsetlen(*said, 0);
    memcpy(arraddnptr(*said, n + 1), text, n + 1);
    free(text);
}

// Where the answer to the last question first stands among n tokens: tokens [*from,*to); both are n
// if it is nowhere.
static void answer_at(const Report *r, const Token *t, int n, int *from, int *to) {
    char *text = token_bytes(r, NULL, t, n);
    arrput(text, 0);
    *from = n;
    *to = n;
    const char *hit = strstr(text, demo_answer);
    if (hit) {
        long begin = hit - text, end = begin + (long)strlen(demo_answer);
        long at = 0;                                    // bytes of the tokens up to and with i
        for (int i = 0; i < n && at < end; i++) {
            int len;
            if (t[i].id >= 0 && tokenizer_bytes(r->a->tok, t[i].id, &len)) at += len;
            if (at > begin && *from == n) *from = i;
            if (at >= end) *to = i + 1;
        }
    }
    arrfree(text);
}

// Notes what the last step read: for every token the share of all L*H query heads that have a row
// of it in their view.
static void demo_shares(const Session *s, DemoRun *d) {
    int L = s->c->L, H = s->c->H, R = H / s->c->G;
    int *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    memcpy(arraddnptr(d->tok, s->n_tok), s->tok, (size_t)s->n_tok * sizeof *d->tok);
    memset(arraddnptr(d->share, s->n_tok), 0, (size_t)s->n_tok * sizeof *d->share);
    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++) {
            const KVHead *head = kv_head(s, l, h / R);
            int n = view_rows(s, l, h, rows);
            for (int j = 0; j < n; j++) d->share[head->src[rows[j]]] += 1.f / (float)(L * H);
        }
    free(rows);
}

// Notes the bytes of a turn that has ended; `before` is the clock at the end of its prefill.
static void turn_bytes(const Session *s, DemoRun *d, int turn, const Clock *before) {
    const Clock *after = &s->clk;
    d->stored[turn] = (double)kv_bytes(s);
    d->read[turn] = 0;
    if (after->steps > before->steps) {
        double bytes = after->bytes_attended - before->bytes_attended;
        d->read[turn] = bytes / (double)(after->steps - before->steps);
    }
}

// Plays the dialogue through the session. The first run writes the script: full attention's
// replies. Later runs are fed the script's tokens. Of the last reply they are fed the first `given`
// tokens, or speak it themselves (given -1).
static void demo_play(Report *r, Session *s, DemoRun *d, int given) {
    App a = *r->a;
    int first = !arrlen(r->script);
    a.o = r->o;
    a.s = s;
    a.turn = NULL;
    a.closed = 0;
    a.logits = xcalloc(s->c->V, sizeof(float));
    for (int i = 0; i < DEMO_TURNS; i++) {
        Turn t = first ? render_turn(&a, demo_turns[i]) : r->script[i];
        int last = i == DEMO_TURNS - 1;
        int speaks = first || (last && given < 0);
        int n = last && given >= 0 ? given : (int)arrlen(t.dec);
        Clock start = s->clk;
        if (speaks) t.dec = NULL;
        arrput(a.turn, t);
        feed_prefill(&a, &t);
        Clock prefilled = s->clk;
        if (speaks) {
            demo_say(&a, &d->said);
        } else {
            for (int j = 0; j < n; j++) feed_decode(&a, t.dec[j]);
        }
        phase_note(d, PHASE_PREFILL, &start, &prefilled);
        phase_note(d, PHASE_DECODE, &prefilled, &s->clk);
        turn_bytes(s, d, i, &prefilled);
    }
    if (first) {
        r->script = a.turn;
    } else {
        if (given < 0) arrfree(arrlast(a.turn).dec);    // its own reply; everything else belongs to the script
        arrfree(a.turn);
    }
    free(a.logits);
}

// Plays the dialogue through a fresh session of one method. `why` is set when the method does not
// fit.
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

// The runs of full attention and of the methods asked for (stb array).
static DemoRun *demo_runs(Report *r) {
    const Options *o = r->a->o;
    const char *list = demo_methods;
    if (*opt_str(o, "compare")) list = opt_str(o, "compare");
    else if (opt_given(o, "method")) list = opt_str(o, "method");

    DemoRun *d = NULL;
    char name[160];
    arrput(d, demo_run(r, "full"));
    for (int i = 0; list_word(list, i, name); i++) {
        if (!strcmp(name, "full")) continue;
        arrput(d, demo_run(r, name));
    }
    return d;
}

static void demo_free(DemoRun *d) {
    for (int i = 0; i < (int)arrlen(d); i++) {
        arrfree(d[i].said);
        arrfree(d[i].tok);
        arrfree(d[i].share);
    }
    arrfree(d);
}

// 1: the method's own answer to the last question holds the right number.
static int right_answer(const DemoRun *d) { return d->said && strstr(d->said, demo_answer); }

// ---- 3: memory over turns
// Two charts with a line a method: x is the turn, y (linear) the bytes of K and V held when the
// turn ends on the left, and the bytes a decode step of it reads on the right. A table gives the
// last turn's numbers, and each method's own answer.

// The table: a line for every method that was played.
static void memory_table(Report *r, const DemoRun *d) {
    const int last = DEMO_TURNS - 1;
    char held[32], read[32];
    fprintf(r->f, "<div class=\"wide\"><table><tr><th class=\"t\">method</th><th>held at the end</th>"
                  "<th>of full</th>"
                  "<th>read per step</th><th class=\"t\">its answer to the last "
                  "question</th></tr>\n");
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (*d[i].why) continue;
        human_bytes(d[i].stored[last], held);
        human_bytes(d[i].read[last], read);
        html_between(r->f, "<tr><td class=\"t\">", d[i].name, "</td>");
        fprintf(r->f, "<td>%s</td><td>%.0f %%</td><td>%s</td><td class=\"t\"><span class=\"%s</span> ",
                held, 100 * d[i].stored[last] / fmax(1, d[0].stored[last]), read,
                right_answer(&d[i]) ? "ok\">right:" : "bad\">wrong:");
        html_between(r->f, "", d[i].said ? d[i].said : "", "</td></tr>\n");
    }
    fprintf(r->f, "</table></div>\n");
}

// One series a method, its turns as points (stb array). read 0: bytes held; 1: bytes read. A
// method's place among the runs is its colour.
static Series *memory_series(Report *r, const DemoRun *d, int read) {
    Series *s = NULL;
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (*d[i].why) continue;
        Series one = { d[i].name, i, NULL };
        for (int t = 0; t < DEMO_TURNS; t++) {
            Spot p = { .x = t + 1, .y = read ? d[i].read[t] : d[i].stored[t] };
            arrput(one.spot, p);
            csv_row(r, "memory", d[i].name, read ? "turn, bytes read a step" : "turn, bytes held",
                    t + 1, 0, p.y, 0, 0);
        }
        arrput(s, one);
    }
    return s;
}

static void draw_memory(Report *r, const DemoRun *d) {
    Axes ax = { .x_name = "turn of the dialogue", .bytes_y = 1, .dots = 1 };
    picture_begin(r, "memory", "Memory over the turns of a dialogue",
                  "The built-in dialogue, turn by turn. Left: bytes of keys and values held when a "
                  "turn ends; a line that stays flat is a method that really gives memory back. "
                  "Right: bytes read for each new token; methods that keep everything but read "
                  "little are low here only.");
    fprintf(r->f, "<div class=\"row\">\n");
    for (int read = 0; read < 2; read++) {
        Series *s = memory_series(r, d, read);
        ax.y_name = read ? "bytes read per decode step" : "bytes held at the end of the turn";
        chart(r->f, &ax, s, (int)arrlen(s), NULL);
        if (read) {
            fprintf(r->f, "</div>\n");
            legend_lines(r->f, s, (int)arrlen(s), 1);
        }
        series_free(s);
    }
    memory_table(r, d);
    for (int i = 0; i < (int)arrlen(d); i++)
        if (*d[i].why) picture_note(r, "%s was left out: %s", d[i].name, d[i].why);
    picture_end(r);
}

// ---- 4: head scores
// Four grids with a cell a query head: columns are heads, rows are layers. The first three show
// DiliLazyKV's scores of --calibrate, the last one the rows a head may read; the brightest viridis
// colour is the grid's largest value.

typedef struct {
    int cell, tall;             // pixels of a cell: width, height
    int named;                  // 1: cells have room for their number
} HeadGrid;
enum { GRID_LEFT = 40, GRID_TOP = 20 };                 // where the first cell stands

// The sizes of a grid of H heads: the more heads, the smaller the cells.
static HeadGrid head_grid_size(int H) {
    HeadGrid g = { .cell = 6, .tall = 6, .named = 0 };
    if (H <= 12) {
        g.cell = 44;
        g.tall = 24;
        g.named = 1;
    } else if (H <= 32) {
        g.cell = 16;
        g.tall = 16;
    }
    return g;
}

// The numbers of heads above and of layers beside the grid; every one, or every eighth head and
// fourth layer.
static void head_grid_labels(FILE *f, const HeadGrid *g, int L, int H) {
    for (int h = 0; h < H; h += g->named ? 1 : 8) {
        int px = GRID_LEFT + h * g->cell + g->cell / 2;
        fprintf(f, "<text x=\"%d\" y=\"14\" text-anchor=\"middle\">%d</text>", px, h);
    }
    for (int l = 0; l < L; l += g->named ? 1 : 4) {
        int py = GRID_TOP + l * g->tall + g->tall / 2 + 4;
        fprintf(f, "<text x=\"34\" y=\"%d\" text-anchor=\"end\">%d</text>", py, l);
    }
}

// Draws one grid. x (L,H); whole 1: numbers without decimals.
static void head_grid(Report *r, const char *name, const double *x, int whole) {
    int L = r->a->c->L, H = r->a->c->H;
    HeadGrid g = head_grid_size(H);
    double top = 0;
    for (int i = 0; i < L * H; i++) top = fmax(top, x[i]);

    panel_begin(r->f, name);
    svg_begin(r->f, 44 + H * g.cell, 36 + L * g.tall);
    head_grid_labels(r->f, &g, L, H);
    for (int i = 0; i < L * H; i++) {
        int l = i / H, h = i % H;
        int shade = top > 0 ? (int)(x[i] / top * (SHADES - 1) + .5) : 0;
        int px = GRID_LEFT + h * g.cell, py = GRID_TOP + l * g.tall;
        fprintf(r->f, "<rect class=\"v%d\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\">",
                shade, px, py, g.cell - 1, g.tall - 1);
        fprintf(r->f, "<title>layer %d, head %d: %.4g</title></rect>", l, h, x[i]);
        if (g.named)
            fprintf(r->f, "<text class=\"%s\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.*f</text>",
                    shade < 9 ? "on-dark" : "on-light", px + g.cell / 2, py + g.tall / 2 + 4,
                    whole ? 0 : 3, x[i]);
        csv_row(r, "heads", name, "layer, head", l, h, x[i], 0, 0);
    }
    fprintf(r->f, "\n<text class=\"dim\" x=\"40\" y=\"%d\">head; rows: layer; brightest = %.4g</text>",
            32 + L * g.tall, top);
    fprintf(r->f, "</svg></div>\n");
}

// The file of head scores: --dililazy-scores, or the one in the model's folder.
static void scores_path(const Report *r, char path[1100]) {
    const char *given = opt_str(r->o, "dililazy-scores");
    if (*given) snprintf(path, 1100, "%s", given);
    else snprintf(path, 1100, "%s/head_scores.json", r->a->c->dir);
}

// The fourth grid: the rows that DiliLazyKV lets each head read beside the recent ones. inf (L,H).
static void head_budgets(Report *r, const double *inf) {
    int L = r->a->c->L, H = r->a->c->H;
    int budget = opt_int(r->o, "budget") ? opt_int(r->o, "budget") : 128;
    int window = opt_given(r->o, "obs-window") ? opt_int(r->o, "obs-window") : 16;
    int base = budget > window ? budget - window : budget;
    double beta = opt_real(r->o, "dililazy-beta"), eps = opt_real(r->o, "dililazy-eps");
    int *cap = xmalloc((size_t)L * H * sizeof *cap);
    double *rows = xmalloc((size_t)L * H * sizeof *rows);
    dililazy_caps(inf, L, H, base, beta, eps, ALLOC_PAPER, cap);
    for (int i = 0; i < L * H; i++) rows[i] = cap[i];
    head_grid(r, "Rows each head may read beside the recent ones", rows, 1);
    fprintf(r->f, "</div>\n");
    picture_note(r, "%d rows a head on average, before the last %d that every head keeps; beta %g.",
                 base, window, beta);
    free(cap);
    free(rows);
}

static void draw_heads(Report *r) {
    static const char *kind[] = { "dili", "lazy", "inf" };
    static const char *title[] = {
        "Dili: of what the head looks at most, the needle's share",
        "Lazy: of its looks at the needle, those among its strongest",
        "Inf: both together (harmonic mean)",
    };
    char path[1100], err[512];
    double *x[3];
    picture_begin(r, "heads", "Which heads find facts, and the budget that earns them (DiliLazyKV)",
                  "Each cell is one attention head: how strongly it looked at a fact hidden in a "
                  "long text, measured once per model with --calibrate. Bright heads find facts; "
                  "DiliLazyKV gives them more rows (last map) and takes them from the dark ones.");
    scores_path(r, path);
    for (int i = 0; i < 3; i++) x[i] = scores_load(path, kind[i], r->a->c->L, r->a->c->H, err);
    if (x[2]) {
        fprintf(r->f, "<div class=\"row\">\n");
        for (int i = 0; i < 3; i++)
            if (x[i]) head_grid(r, title[i], x[i], 0);
        head_budgets(r, x[2]);
    } else {
        picture_note(r, "No head scores: %s", err);
    }
    for (int i = 0; i < 3; i++) free(x[i]);
    picture_end(r);
}

// ---- 5: PATS
// Two charts with a step line a schedule: x is a token's position t, y the low bits b(t,T) cut from
// each element of its rows, 0 to 10. Below, one key row as a grid of its bits (columns: elements;
// sign on top), and bars of a row's bytes.

// The schedule's b(t,T) of every token in a first prefill of T tokens, as a step line.
static Series pats_line(Report *r, const char *name, int colour, const Pats *x, int T) {
    Series s = { name, colour, NULL };
    Pats y = *x;
    y.T1 = T;                                           // the frozen policy: all tokens are the first prefill's
    y.n1 = T;
    int b = -1;                                         // of the step so far
    for (int t = 0; t <= T; t++) {
        int next = t < T ? pats_bits(&y, t, T) : b;
        if (next == b && t < T) continue;
        Spot end = { .x = t, .y = b }, begin = { .x = t, .y = next };
        if (b >= 0) arrput(s.spot, end);
        if (t < T) arrput(s.spot, begin);
        b = next;
        csv_row(r, "pats", name, "tokens, position, bits cut", T, t, b, 0, 0);
    }
    return s;
}

// One chart of such lines; frees them.
static void pats_chart(Report *r, Series *s, const char *title) {
    Axes ax = { .x_name = "position t of the token (0: oldest)", .y_top = 11 };
    ax.y_name = "b(t,T): low bits cut from each element";
    panel_begin(r->f, title);
    fprintf(r->f, "\n");
    chart(r->f, &ax, s, (int)arrlen(s), NULL);
    legend_lines(r->f, s, (int)arrlen(s), 0);
    fprintf(r->f, "</div>\n");
    series_free(s);
}

// The chosen schedule at three lengths, and the three schedules at one length.
static void pats_schedules(Report *r, const Pats *x) {
    static const char *kind[] = { "middle", "old", "new" };
    static const char *name[] = { "T = 256 tokens", "T = 512", "T = 1,024" };
    static const int T[] = { 256, 512, 1024 };
    Series *s = NULL;
    fprintf(r->f, "<div class=\"row\">\n");
    for (int i = 0; i < 3; i++) arrput(s, pats_line(r, name[i], i + 1, x, T[i]));
    pats_chart(r, s, "The chosen schedule as the dialogue grows");

    s = NULL;
    for (int i = 0; i < 3; i++) {
        Pats y = *x;
        y.schedule = i;
        y.policy = PATS_RATCHET;
        arrput(s, pats_line(r, kind[i], i + 1, &y, 1024));
    }
    pats_chart(r, s, "The three schedules at 1,024 tokens");
    fprintf(r->f, "</div>\n");
}

// The bits of one element, from the sign down. Neighbouring bits of one kind and one value are one
// rectangle.
static void pats_element_bits(FILE *f, uint16_t element, int b, int px, int cell, int tall) {
    int from[] = { 0, 1, 6, 16 - b, 16 };               // sign, exponent, mantissa kept, mantissa cut, end
    for (int kind = 0; kind < 4; kind++) {
        int i = from[kind];
        while (i < from[kind + 1]) {
            int on = element >> (15 - i) & 1;
            int n = 1;
            while (i + n < from[kind + 1] && (element >> (15 - i - n) & 1) == on) n++;
            fprintf(f, "<rect class=\"b%d%s\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>",
                    kind, on ? "" : " off", px, i * tall, cell - 1, n * tall - 1);
            i += n;
        }
    }
}

// One key row h (D) in f16, of which b low bits are cut.
static void pats_row_bits(Report *r, const uint16_t *h, int D, int b) {
    int cell = D <= 64 ? 16 : 8, tall = 9;
    svg_begin(r->f, 80 + D * cell, 16 * tall + 18);
    fprintf(r->f, "<text x=\"70\" y=\"9\" text-anchor=\"end\">sign</text>");
    fprintf(r->f, "<text x=\"70\" y=\"%d\" text-anchor=\"end\">exponent</text>", 4 * tall);
    fprintf(r->f, "<text x=\"70\" y=\"%d\" text-anchor=\"end\">mantissa</text>\n", 10 * tall);
    for (int d = 0; d < D; d++) pats_element_bits(r->f, h[d], b, 76 + d * cell, cell, tall);
    fprintf(r->f, "\n<text class=\"dim\" x=\"76\" y=\"%d\">elements 0 to %d of one key row; %d bits cut</text>",
            16 * tall + 14, D - 1, b);
    fprintf(r->f, "</svg>\n");
    legend_begin(r->f);
    legend_box(r->f, "b0", "sign");
    legend_box(r->f, "b1", "exponent");
    legend_box(r->f, "b2", "mantissa, kept");
    legend_box(r->f, "b3", "mantissa, cut: not stored");
    fprintf(r->f, "<li>full colour: bit 1, pale: bit 0</li>\n");
    legend_end(r->f);
}

// One bar at height y: the bytes of a row of D elements with b bits cut, packed densely (rows64 0:
// this program's way) or in 64-byte blocks of its own (rows64 1: the paper's way). A dashed box is
// padding. scale: pixels a byte.
static void pats_bar(Report *r, int rows64, int D, int b, int y, int scale) {
    int bytes = (int)pats_row_bytes(rows64, D, 16 - b), used = D * (16 - b) / 8;
    fprintf(r->f, "<text x=\"180\" y=\"%d\" text-anchor=\"end\">%d bits cut, %s</text>",
            y + 11, b, rows64 ? "64-byte blocks" : "dense");
    fprintf(r->f, "<rect class=\"b2\" x=\"188\" y=\"%d\" width=\"%d\" height=\"13\"/>", y, used * scale);
    if (bytes > used)
        fprintf(r->f, "<rect class=\"b4\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"13\"/>",
                188 + used * scale, y, (bytes - used) * scale);
    int end = max_int(bytes, used) * scale;
    fprintf(r->f, "<text x=\"%d\" y=\"%d\">%d bytes</text>\n", 194 + end, y + 11, bytes);
    csv_row(r, "pats", rows64 ? "64-byte blocks" : "dense", "bits cut, elements, bytes of a row",
            b, D, bytes, 0, 0);
}

// How many bytes a row takes as 0, 2, .. 10 bits are cut, with grid lines every 64 bytes.
static void pats_row_blocks(Report *r, int D) {
    int wide = (int)pats_row_bytes(1, D, 16);
    int scale = 1, y = 0;
    if (wide <= 128) scale = 4;
    else if (wide <= 256) scale = 2;
    svg_begin(r->f, 330 + wide * scale, 250);
    for (int b = 0; b <= 10; b += 2)
        for (int rows64 = 0; rows64 < 2; rows64++) {
            pats_bar(r, rows64, D, b, y, scale);
            y += 17;
        }
    for (int x = 0; x <= wide; x += 64) {
        int px = 188 + x * scale;
        fprintf(r->f, "<path class=\"grid\" d=\"M%d 0V206\"/>", px);
        fprintf(r->f, "<text class=\"dim\" x=\"%d\" y=\"222\" text-anchor=\"middle\">%d</text>", px, x);
    }
    fprintf(r->f, "<text class=\"dim\" x=\"188\" y=\"240\">bytes of one row; lines every 64</text></svg>\n");
    legend_begin(r->f);
    legend_box(r->f, "b2", "bits of the row");
    legend_box(r->f, "b4", "padding of the last block: nothing saved");
    legend_end(r->f);
}

// One key row of this model, from the middle of the first turn and of the layers, cut as token 128
// of 256 is.
static void pats_example(Report *r, const Pats *x) {
    int D = r->a->c->D, l = r->a->c->L / 2;
    int n = (int)arrlen(r->script[0].pre), at = n / 2;
    float *row = xmalloc((size_t)D * sizeof *row);
    uint16_t *h = xmalloc((size_t)D * sizeof *h);
    Session *full = session_open(r->a->c, r->a->w, r->o, "full");
    prefill(full, r->script[0].pre, n);
    kv_load_k(full, kv_head(full, l, 0), NULL, at, 1, row);
    from_f32(h, row, DT_F16, (size_t)D);
    fprintf(r->f, "<h3>One key row: token %d, layer %d, KV head 0</h3>\n<div class=\"wide\">", at, l);
    pats_row_bits(r, h, D, pats_bits(x, 128, 256));
    fprintf(r->f, "</div>\n");
    session_close(full);
    free(row);
    free(h);
}

static void draw_pats(Report *r) {
    char err[512];
    Session *s = session_try(r->a->c, r->a->w, r->o, "pats", err);
    picture_begin(r, "pats", "Fewer bits for some tokens (PATS)",
                  "PATS keeps every token but cuts low mantissa bits of 16-bit numbers, by the "
                  "token's place in the dialogue: the curves say how many. Below: one key row of "
                  "this model with its bits, and how many bytes such a row takes.");
    if (s) {
        const Pats *x = s->part[0].ms;
        pats_schedules(r, x);
        pats_example(r, x);
        fprintf(r->f, "<h3>Bytes of a row</h3>\n<div class=\"wide\">");
        pats_row_blocks(r, r->a->c->D);
        fprintf(r->f, "</div>\n");
        picture_note(r, "Schedule %s, %d to %d bits; the first %d tokens lose %d bits only, the last %d none.",
                     opt_str(r->o, "pats-schedule"), x->b_min, x->b_max, x->sink, x->b_min, x->window);
    } else {
        picture_note(r, "PATS does not fit this model or these options: %s", err);
    }
    session_close(s);
    picture_end(r);
}

// ---- 6: the tree of LycheeCluster
// An outline to open and close: coarse units, their clusters, their chunks with the text. A branch
// is bold where the step read it and grey where it did not; the square's viridis colour is the
// node's upper bound, and the answer is underlined.

typedef struct { float *q; } QueryProbe;                // (L,H,D): the queries of the last decode step

// A method's select hook that only notes the queries. q (H,D).
static void query_probe_select(Session *s, void *ms, int l, const float *q) {
    QueryProbe *probe = ms;
    size_t n = (size_t)s->c->H * s->c->D;
    memcpy(probe->q + (size_t)l * n, q, n * sizeof *q);
}

// Rides on lychee as a second part; it is not in the table of methods.
static const Method query_probe = {
    .name = "probe",
    .state = sizeof(QueryProbe),
    .select = query_probe_select,
};

typedef struct {                // what the tree is drawn from: one layer and KV head
    const Session *s;
    const Lychee *x;
    const Tree *t;
    Probe p;                    // the queries of the group
    unsigned char *read;        // (n_tok) 1: a row that the step read
    float lo, hi;               // the least and the largest bound of its nodes
    float *mu;                  // (D) room for a centre
} TreeView;

// How well the node's centre matches: q.mu / |q|, of the query head where it is best.
static float node_match(TreeView *v, const Nodes *u, int node) {
    int D = v->s->c->D;
    float best = -INFINITY;
    to_f32(v->mu, u->mu + (size_t)node * D, DT_BF16, (size_t)D);
    for (int i = 0; i < v->p.m; i++) {
        const float *q = v->p.q + (size_t)i * D;
        best = fmaxf(best, dot_f32(q, v->mu, D) * v->p.w[i]);
    }
    return best;
}

// The upper bound of how well any chunk below the node can match: centre plus radius.
static float node_bound(TreeView *v, const Nodes *u, int node) {
    return node_match(v, u, node) + u->r[node];
}

// How many chunks of cluster c the step read.
static int cluster_read(const TreeView *v, int c) {
    int n = 0;
    for (int j = v->t->fine.first[c]; j >= 0; j = v->t->fine.next[j]) n += v->read[v->x->start[j]];
    return n;
}

// 1: chunk j holds the answer.
static int chunk_answers(const Report *r, const TreeView *v, int j) {
    const int *start = v->x->start;
    int from, to;
    answer_at(r, v->s->tok + start[j], start[j + 1] - start[j], &from, &to);
    return from < to;
}

// 1: a chunk of cluster c holds the answer.
static int cluster_answers(const Report *r, const TreeView *v, int c) {
    for (int j = v->t->fine.first[c]; j >= 0; j = v->t->fine.next[j])
        if (chunk_answers(r, v, j)) return 1;
    return 0;
}

// Opens a node's branch: its line with the numbers. Branches that were read, or hold the answer,
// start open.
static void node_begin(Report *r, TreeView *v, const Nodes *u, int node, const char *what, int n_read,
                       int answers) {
    float match = node_match(v, u, node);
    float bound = match + u->r[node];
    int shade = v->hi > v->lo ? (int)((bound - v->lo) / (v->hi - v->lo) * (SHADES - 1) + .5f) : 0;
    int chunks = u->chunks[node];
    fprintf(r->f, "<details%s><summary class=\"%s\"><i class=\"v%d\"></i>",
            n_read || answers ? " open=\"open\"" : "", n_read ? "read" : "skip", shade);
    fprintf(r->f, "%s %d: %d chunk%s, %d read; bound %.2f = match %.2f + radius %.2f",
            what, node, chunks, chunks == 1 ? "" : "s", n_read, bound, match, u->r[node]);
    fprintf(r->f, "%s</summary>\n", answers ? " <b class=\"gold\">the answer is in here</b>" : "");
    csv_row(r, "lychee", what, "node, chunks read, upper bound, radius, match",
            node, n_read, bound, u->r[node], match);
}

static void node_end(Report *r) { fprintf(r->f, "</details>\n"); }

// One cluster with the texts of its chunks.
static void tree_cluster(Report *r, TreeView *v, int c) {
    const int *start = v->x->start;
    node_begin(r, v, &v->t->fine, c, "cluster", cluster_read(v, c), cluster_answers(r, v, c));
    for (int j = v->t->fine.first[c]; j >= 0; j = v->t->fine.next[j]) {
        int read = v->read[start[j]];
        fprintf(r->f, "<p class=\"%s\">%s, tokens %d to %d: <span%s>",
                read ? "read" : "skip", read ? "read" : "skipped", start[j], start[j + 1] - 1,
                chunk_answers(r, v, j) ? " class=\"gold\"" : "");
        tokens_text(r, v->s->tok + start[j], start[j + 1] - start[j]);
        fprintf(r->f, "</span></p>\n");
    }
    node_end(r);
}

// The nodes of a list that have chunks, best bound first (stb array). The list starts at `first`
// and goes on by `next`; next NULL: all nodes of the level. There are few, so an insertion sort
// does; equal bounds keep their order.
static int *by_bound(TreeView *v, const Nodes *u, int first, const int *next) {
    int *order = NULL;
    int node = first;
    while (node >= 0) {
        if (u->chunks[node]) arrput(order, node);
        if (next) node = next[node];
        else node = node + 1 < u->n ? node + 1 : -1;
    }
    for (int i = 1; i < (int)arrlen(order); i++)
        for (int j = i; j > 0 && node_bound(v, u, order[j]) > node_bound(v, u, order[j - 1]); j--) {
            int x = order[j];
            order[j] = order[j - 1];
            order[j - 1] = x;
        }
    return order;
}

// The clusters of a list, as in by_bound.
static void tree_clusters(Report *r, TreeView *v, int first, const int *next) {
    int *order = by_bound(v, &v->t->fine, first, next);
    for (int i = 0; i < (int)arrlen(order); i++) tree_cluster(r, v, order[i]);
    arrfree(order);
}

// One coarse unit with its clusters.
static void tree_unit(Report *r, TreeView *v, int unit) {
    const Nodes *top = &v->t->coarse;
    int n_read = 0, answers = 0;
    for (int c = top->first[unit]; c >= 0; c = top->next[c]) {
        n_read += cluster_read(v, c);
        answers |= cluster_answers(r, v, c);
    }
    node_begin(r, v, top, unit, "unit", n_read, answers);
    tree_clusters(r, v, top->first[unit], top->next);
    node_end(r);
}

// The whole tree; without a coarse level its clusters only.
static void tree_draw(Report *r, TreeView *v) {
    fprintf(r->f, "<div class=\"tree\">\n");
    if (v->t->coarse.n) {
        int *order = by_bound(v, &v->t->coarse, 0, NULL);
        for (int i = 0; i < (int)arrlen(order); i++) tree_unit(r, v, order[i]);
        arrfree(order);
    } else {
        tree_clusters(r, v, 0, NULL);
    }
    fprintf(r->f, "</div>\n");
}

// Every third colour with its bound.
static void tree_legend(Report *r, const TreeView *v) {
    char text[32];
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        float bound = v->lo + (v->hi - v->lo) * i / (SHADES - 1);
        snprintf(text, sizeof text, "%s%.2f", i ? "" : "upper bound ", bound);
        legend_shade(r->f, i, text);
    }
    legend_end(r->f);
}

// The range of all bounds, for the colours.
static void tree_range(TreeView *v) {
    const Nodes *level[] = { &v->t->fine, &v->t->coarse };
    v->lo = INFINITY;
    v->hi = -INFINITY;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < level[k]->n; i++) {
            if (!level[k]->chunks[i]) continue;
            float bound = node_bound(v, level[k], i);
            v->lo = fminf(v->lo, bound);
            v->hi = fmaxf(v->hi, bound);
        }
}

// The query head to look at, as l*H + h: of the layers from `first` on the one with the best score,
// or the last layer's first head when there are no scores.
static int fact_head(const Report *r, int first) {
    const Config *c = r->a->c;
    char path[1100], err[512];
    scores_path(r, path);
    double *inf = scores_load(path, "inf", c->L, c->H, err);
    int best = (c->L - 1) * c->H;
    if (inf)
        for (int i = first * c->H; i < c->L * c->H; i++)
            if (inf[i] > inf[best]) best = i;
    free(inf);
    return best;
}

// The tree of layer l and KV head g, and which rows its last step read. q (L,H,D): the queries of
// that step.
static TreeView tree_view_open(const Session *s, const float *q, int l, int g) {
    int H = s->c->H, G = s->c->G, D = s->c->D, R = H / G;
    const Lychee *x = s->part[0].ms;
    TreeView v = { .s = s, .x = x, .t = &x->tree[l * G + g] };
    v.read = xcalloc((size_t)s->n_tok + 1, 1);
    v.mu = xmalloc((size_t)D * sizeof(float));
    probe_max(&v.p, q + ((size_t)l * H + g * R) * D, R, D);
    int *rows = xmalloc((size_t)(s->n_tok + 1) * sizeof *rows);
    int n = view_rows(s, l, g * R, rows);
    for (int i = 0; i < n; i++) v.read[rows[i]] = 1;
    free(rows);
    return v;
}

// The sentence above the tree: the question, the reply so far, and how much is read to go on.
static void tree_question(Report *r, const TreeView *v, int l, int g) {
    const Session *s = v->s;
    int used = 0;
    for (int j = 0; j < v->x->M; j++) used += v->read[v->x->start[j]];
    html_between(r->f, "<p>The user asks <b>", demo_turns[DEMO_TURNS - 1], "</b>");
    fprintf(r->f, " and the reply has reached <b>");
    tokens_text(r, s->tok + s->n_tok - s->step, s->step);
    fprintf(r->f, "</b>\xe2\x80\xa6 Layer %d, KV head %d (the head that finds facts best) reads %d of %d "
                  "chunks to go on.</p>\n", l, g, used, v->x->M);
}

// Draws the tree of the head that finds facts best. q (L,H,D): the queries of the last step.
static void lychee_picture(Report *r, Session *s, const float *q) {
    const Lychee *x = s->part[0].ms;
    int H = s->c->H, R = H / s->c->G;
    int at = fact_head(r, x->full_layers), l = at / H, g = at % H / R;
    if (!x->M_built || l < x->full_layers) {
        picture_note(r, "No index was built: the dialogue fits into the budget, or --lychee-full-layers covers "
                        "every layer.");
        return;
    }
    TreeView v = tree_view_open(s, q, l, g);
    tree_range(&v);
    tree_question(r, &v, l, g);
    tree_draw(r, &v);
    tree_legend(r, &v);
    picture_note(r, "Match: q.mu / |q| of the best query head with the node's centre mu (1: the same "
                    "direction); radius: how far the key of a chunk below lies from mu at most. The choice "
                    "goes by match + %g radius (--lychee-beta). The first %d tokens and the last "
                    "%d are outside the tree and always read. The chunk with the answer is "
                    "underlined.", x->beta, x->sink, s->n_tok - t_idx(x));
    free(v.read);
    free(v.mu);
}

// How many tokens of full attention's last reply stand before the answer; all of them if the answer
// is not in it.
static int tokens_before_answer(const Report *r) {
    const int *id = r->script[DEMO_TURNS - 1].dec;
    Token *t = NULL;
    int from, to;
    for (int i = 0; i < (int)arrlen(id); i++) {
        Token one = { .id = id[i] };
        arrput(t, one);
    }
    answer_at(r, t, (int)arrlen(t), &from, &to);
    arrfree(t);
    return from;
}

static void draw_lychee(Report *r) {
    char err[512];
    Session *s = session_try(r->a->c, r->a->w, r->o, "lychee", err);
    picture_begin(r, "lychee", "The tree a question walks down (LycheeCluster)",
                  "The text is cut into chunks, alike chunks form clusters, alike clusters form "
                  "units. For each new token only the chunks of the best matching clusters are "
                  "read: bold branches were read, grey ones skipped. The square's colour is the "
                  "upper bound of how well anything below can match (brighter: better). Click to "
                  "open a branch.");
    if (s) {
        DemoRun d = { 0 };
        QueryProbe *probe = xcalloc(1, sizeof *probe);
        float *q = xcalloc((size_t)s->c->L * s->c->H * s->c->D, sizeof(float));
        probe->q = q;
        s->part[s->n_part++] = (Part){ &query_probe, probe };       // session_close frees the probe
        demo_play(r, s, &d, tokens_before_answer(r));
        lychee_picture(r, s, q);
        session_close(s);
        free(q);
    } else {
        picture_note(r, "LycheeCluster does not fit these options: %s", err);
    }
    picture_end(r);
}

// ---- 7: attention maps with LoopServe's lines
// A square a head: the row is the token that reads, the column the token that is read, oldest top
// left. A pixel's viridis colour is the probability, logarithmic from 1e-4 (dark) to 1; red shapes
// over it are the lines that LoopServe computes. The whole dialogue is prefilled as one turn, and
// the maps are written layer by layer while it runs.

typedef struct {
    Report *r;
    LoopServe *x;               // LoopServe's options
} MapProbe;

// The colour of a probability: 0 at 1e-4 and below, the last one at 1.
static int map_shade(float p) {
    float v = p > 1e-4f ? (log10f(p) + 4) / 4 * (SHADES - 1) + .5f : 0;
    return v > SHADES - 1 ? SHADES - 1 : (int)v;
}

// Every how many layers, or heads, of n a map is drawn: all of a small model, some from all over a
// large one.
static int map_step(int n) {
    int most = 1;
    while (most * most < MAP_MOST) most++;
    return (n + most - 1) / most;
}

// Fills pixel (side,side) with the colours of head h's whole attention (T,T). Where several cells
// fall on one pixel it shows the largest. q (T,H,D).
static void map_pixels(Session *s, int l, int h, const float *q, int T, int side, Tile *tile,
                       unsigned char *pixel) {
    float *P = scratch(s, (size_t)LINE_BLOCK * T * sizeof(float));
    int R[LINE_BLOCK];
    memset(pixel, 0, (size_t)side * side);
    for (int r0 = 0; r0 < T; r0 += LINE_BLOCK) {
        int m = min_int(T - r0, LINE_BLOCK);
        for (int i = 0; i < m; i++) R[i] = r0 + i;
        line_probs(s, l, h, q, T, R, m, P, tile);
        for (int i = 0; i < m; i++) {
            unsigned char *row = pixel + (size_t)((int64_t)(r0 + i) * side / T) * side;
            for (int c = 0; c <= r0 + i; c++) {
                unsigned char *to = &row[(int64_t)c * side / T];
                int v = map_shade(P[(size_t)i * T + c]);
                if (v > *to) *to = (unsigned char)v;
            }
        }
    }
}

// Draws a head's lines, neighbours as one shape: columns down from the diagonal, slashes along it.
// They are pale if in the end the head is read whole. run (n): room.
static void map_lines(Report *r, const Lines *a, LineRange *run) {
    int n = a->n;
    int k = bit_runs(a->v, n, run);
    fprintf(r->f, "<path class=\"line%s\" d=\"", a->dense ? " whole" : "");
    for (int i = 0; i < k; i++)
        fprintf(r->f, "M%d %dV%dH%dV%dz", run[i].lo, run[i].lo, n, run[i].hi, run[i].hi);
    k = bit_runs(a->s, n, run);
    for (int i = 0; i < k; i++)
        fprintf(r->f, "M0 %dV%dL%d %dH%dz", run[i].lo, run[i].hi, n - run[i].hi, n, n - run[i].lo);
    fprintf(r->f, "\"/>");
}

// The lines that LoopServe takes for head h in a first prefill of T tokens. *found: what share of
// the attention they hold, in what share of the cells. q (T,H,D); w, tile: room.
static Lines map_choose(Session *s, const LoopServe *x, int l, int h, const float *q, int T,
                        LoopRoom *w, Tile *tile, LoopFound *found) {
    Lines a = { .n = T };
    a.v = scratch(s, bit_bytes(T));
    a.s = scratch(s, bit_bytes(T));
    LineSample p = { .n = T, .R = w->R, .P = w->P };
    p.m = sample_rows(T, x->m, x->seed, 0, l, w->R);
    lines_clear(&a);
    line_probs(s, l, h, q, T, w->R, p.m, w->P, tile);
    *found = (LoopFound){ 1, 1 };
    if (x->rule.alpha >= 1) a.dense = 1;
    else loop_choose(x, &p, &a, w, found);
    return a;
}

// Writes the figure of one head: the image, a triangle over the cells above the diagonal, the
// lines, and the caption.
static void map_figure(Report *r, Session *s, const LoopServe *x, int l, int h, const float *q, int T,
                       LoopRoom *w, Tile *tile) {
    int side = min_int(T, MAP_SIDE);
    unsigned char *pixel = scratch(s, (size_t)side * side);
    LoopFound found;
    Lines a = map_choose(s, x, l, h, q, T, w, tile, &found);
    int columns = bit_list(a.v, T, NULL), diagonals = bit_list(a.s, T, NULL);
    map_pixels(s, l, h, q, T, side, tile, pixel);
    unsigned char *png = png_make(pixel, side, side);

    fprintf(r->f, "<figure data-l=\"%d\" data-h=\"%d\"%s>", l / map_step(s->c->L), h / map_step(s->c->H),
            a.dense ? "" : " data-lines=\"1\"");
    fprintf(r->f, "<svg viewBox=\"0 0 %d %d\" role=\"img\">", T, T);
    fprintf(r->f, "<image width=\"%d\" height=\"%d\" preserveAspectRatio=\"none\" ", T, T);
    fprintf(r->f, "href=\"data:image/png;base64,");
    base64_write(r->f, png, arrlenu(png));
    fprintf(r->f, "\"/><path class=\"void\" d=\"M0 0H%dV%dz\"/>", T, T);
    map_lines(r, &a, w->run);
    fprintf(r->f, "</svg><figcaption>layer %d, head %d: ", l, h);
    fprintf(r->f, "%s%d columns and %d diagonals, %.0f %% of the cells, hold %.1f %% of the attention",
            a.dense ? "read whole, for " : "", columns, diagonals, 100 * found.cells, 100 * found.mass);
    fprintf(r->f, "</figcaption></figure>\n");
    csv_row(r, "attention", a.dense ? "dense" : "lines",
            "layer, head, share of cells, share of attention, verticals", l, h, found.cells, found.mass, columns);
    arrfree(png);
}

// A method's commit hook that writes the maps of layer l. q (T,H,D).
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

// Rides on full attention as a second part; it is not in the table of methods.
static const Method map_probe = {
    .name = "maps",
    .state = sizeof(MapProbe),
    .commit = map_probe_commit,
};

// A slider from 0 to max that stands at `at`; one place is `step` layers or heads.
static void map_slider(FILE *f, const char *name, const char *id, int max, int at, int step) {
    fprintf(f, "<label>%s <input type=\"range\" id=\"%s\" ", name, id);
    fprintf(f, "min=\"0\" max=\"%d\" value=\"%d\" data-step=\"%d\"/> <output>0</output></label>", max, at, step);
}

// The switch for the lines and the sliders for layer and head. Without the script all maps show,
// and no slider.
static void map_controls(Report *r) {
    int L = r->a->c->L, H = r->a->c->H;
    int layers = (L - 1) / map_step(L), heads = (H - 1) / map_step(H);     // the sliders' last places
    fprintf(r->f, "<input type=\"checkbox\" id=\"lines\" checked=\"checked\"/>"
                  "<label for=\"lines\"> show LoopServe's lines</label>\n"
                  "<div class=\"sliders\">");
    map_slider(r->f, "layer", "map-l", layers, layers / 2, map_step(L));
    map_slider(r->f, "head", "map-h", heads, 0, map_step(H));
    fprintf(r->f, "</div>\n");
}

// Every third colour with its probability.
static void map_legend(Report *r) {
    char text[48];
    legend_begin(r->f);
    for (int i = 0; i < SHADES; i += 3) {
        double p = pow(10, 4.0 * i / (SHADES - 1) - 4);
        snprintf(text, sizeof text, i ? "%.2g" : "at most %.2g of a row's attention", p);
        legend_shade(r->f, i, text);
    }
    legend_end(r->f);
}

// The ids of the whole dialogue (stb array).
static int *dialogue_ids(const Report *r) {
    int *ids = NULL;
    for (int i = 0; i < DEMO_TURNS; i++) {
        const Turn *t = &r->script[i];
        ids = ids_put(ids, t->pre, (int)arrlen(t->pre));
        ids = ids_put(ids, t->dec, (int)arrlen(t->dec));
    }
    return ids;
}

static void draw_attention(Report *r) {
    LoopServe x = { 0 };
    MapProbe *probe = xcalloc(1, sizeof *probe);
    Session *s = session_open(r->a->c, r->a->w, r->o, "full");
    picture_begin(r, "attention", "Where heads look, and the lines LoopServe keeps",
                  "One square per head: each row is a token that reads, each column a token that "
                  "is read, bright where much attention goes. Red columns (single tokens everyone "
                  "reads) and diagonals (a fixed distance back) are the lines LoopServe would "
                  "compute in this prefill; all else is skipped. Where few lines do not hold "
                  "enough (orange, dashed), the head is read whole.");
    map_controls(r);
    fprintf(r->f, "<div class=\"maps\" id=\"maps\">\n");
    if (loop_rule(s, &x)) die(EXIT_USAGE, "--report: %s", s->err);
    *probe = (MapProbe){ r, &x };
    s->part[s->n_part++] = (Part){ &map_probe, probe };             // session_close frees the probe
    int *ids = dialogue_ids(r);
    prefill(s, ids, (int)arrlen(ids));
    fprintf(r->f, "</div>\n");
    map_legend(r);
    picture_note(r, "%d tokens, one prefill; alpha %g. Where a pixel covers several cells it shows the "
                    "largest. Logarithmic colours.", (int)arrlen(ids), x.rule.alpha);
    picture_end(r);
    arrfree(ids);
    session_close(s);
}

// ---- 8: the text, coloured by what is kept
// The whole dialogue once a method, as the method sees it at its last step: grey where no head
// reads a token, else one of eight strengths of one colour by the share of all heads that read it.
// The answer to the last question is underlined.

// The strength of a share: 0 where no head reads, 1..8 else.
static int text_shade(float share) {
    if (share <= 0) return 0;
    return (int)fminf(TEXT_SHADES, 1 + share * (TEXT_SHADES - .5f));
}

// Writes a run of text (stb array) in one strength, and empties it. answer 1: the run is the answer.
static void kept_run(FILE *f, char *run, int shade, int answer) {
    const char *tag = answer ? "b" : "span";
    fprintf(f, "<%s class=\"k%d\">", tag, shade);
    html_bytes(f, run, arrlenu(run));
    fprintf(f, "</%s>", tag);
    arrsetlen(run, 0);
}

// The dialogue's text as one method sees it. Tokens of one strength are one span, so that
// characters split over tokens stay whole. A method's own token is a diamond.
static void kept_text(Report *r, const DemoRun *d) {
    int n = (int)arrlen(d->tok), from, to;
    answer_at(r, d->tok, n, &from, &to);
    char *run = NULL;
    int run_shade = 0, run_answer = 0;
    fprintf(r->f, "<div class=\"tokens\">");
    for (int i = 0; i < n; i++) {
        int shade = text_shade(d->share[i]), answer = i >= from && i < to;
        int changes = shade != run_shade || answer != run_answer;
        if (changes && arrlen(run)) kept_run(r->f, run, run_shade, run_answer);
        run_shade = shade;
        run_answer = answer;

        const char *b = "\xe2\x97\x86";
        int len = 3;
        if (d->tok[i].id >= 0) b = tokenizer_bytes(r->a->tok, d->tok[i].id, &len);
        if (len) memcpy(arraddnptr(run, len), b, (size_t)len);
        csv_row(r, "text", d->name, "token, id, share of heads", i, d->tok[i].id, d->share[i], 0, 0);
    }
    if (arrlen(run)) kept_run(r->f, run, run_shade, run_answer);
    fprintf(r->f, "</div>\n");
    arrfree(run);
}

static void text_legend(Report *r) {
    legend_begin(r->f);
    fprintf(r->f, "<li><span class=\"tokens\"><span class=\"k0\"> grey </span></span> no head</li>"
                  "<li><span class=\"k1\"> word </span> few heads</li><li><span class=\"k4\"> word "
                  "</span> half</li><li><span class=\"k8\"> word </span> all "
                  "heads</li><li>\xe2\x97\x86 a row the method made itself, to stand for a whole "
                  "message (SONIC)</li>\n");
    legend_end(r->f);
}

// The heading of one method, with its answer, and its text. mean: the mean share over all tokens.
static void text_panel(Report *r, const DemoRun *d, double mean) {
    html_between(r->f, "<div><h3>", d->name, "");
    fprintf(r->f, ": reads %.0f %% of %d tokens; answers <span class=\"%s\">",
            mean, (int)arrlen(d->share), right_answer(d) ? "ok" : "bad");
    html_between(r->f, "", d->said ? d->said : "", "</span></h3>\n");
    kept_text(r, d);
    fprintf(r->f, "</div>\n");
}

static void draw_text(Report *r, const DemoRun *d) {
    int drawn = 0;
    picture_begin(r, "text", "What is still there when the last question is answered",
                  "The whole dialogue as each method sees it at its last step. The stronger the "
                  "colour, the more heads read that word; grey words are read by no head. Look at "
                  "the answer, underlined: where it is grey the method cannot know it, where it is "
                  "coloured it may.");
    text_legend(r);
    for (int i = 0; i < (int)arrlen(d); i++) {
        int n = (int)arrlen(d[i].share);
        float least = 1;
        double sum = 0;
        for (int j = 0; j < n; j++) {
            least = fminf(least, d[i].share[j]);
            sum += d[i].share[j];
        }
        if (*d[i].why || least > .999f) continue;       // a method that reads everything shows nothing
        if (!drawn) fprintf(r->f, "<div class=\"side\">\n");
        drawn = 1;
        text_panel(r, &d[i], 100 * sum / fmax(1, (double)n));
    }
    if (drawn) fprintf(r->f, "</div>\n");
    else picture_note(r, "Every method shown here reads every token in every head.");
    picture_end(r);
}

// ---- 9: where time goes
// Two bar charts, prefill and decode, with a bar a method: milliseconds for one token. A bar has
// four parts, one a kind of work; the longest bar of a chart has the full width.

// Milliseconds a token of one part of the work.
static double part_ms(const DemoRun *d, int phase, int part) {
    return 1e3 * d->seconds[phase][part] / (double)d->tokens[phase];
}

// Milliseconds a token of a whole phase.
static double phase_ms(const DemoRun *d, int phase) {
    double sum = 0;
    for (int k = 0; k < PHASE_PARTS; k++) sum += d->seconds[phase][k];
    return 1e3 * sum / (double)d->tokens[phase];
}

// One method's bar at height y. top: the milliseconds of the longest bar.
static void time_bar(Report *r, const DemoRun *d, int phase, int y, double top) {
    static const char *class[] = { "b1", "s2 s", "s5 s", "b3" };
    static const char *part[] = { "attention", "choosing rows", "bookkeeping", "the rest of the model" };
    double x = 130, sum = 0;
    fprintf(r->f, "<text x=\"122\" y=\"%d\" text-anchor=\"end\">%.18s</text>", y + 16, d->name);
    for (int k = 0; k < PHASE_PARTS; k++) {
        double ms = part_ms(d, phase, k);
        double w = top > 0 ? ms / top * (CHART_W - 220) : 0;
        fprintf(r->f, "<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"17\">",
                class[k], x, y + 3, w);
        fprintf(r->f, "<title>%s: %.4f ms</title></rect>", part[k], ms);
        csv_row(r, "time", d->name, part[k], phase, k, ms, 0, 0);
        x += w;
        sum += ms;
    }
    fprintf(r->f, "<text x=\"%.1f\" y=\"%d\">%.3f ms</text>\n", x + 6, y + 16, sum);
}

// The bar chart of one phase.
static void time_bars(Report *r, const DemoRun *d, int phase) {
    double top = 0;                                     // the longest bar
    int n = 0, y = 0;
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (!d[i].tokens[phase]) continue;
        top = fmax(top, phase_ms(&d[i], phase));
        n++;
    }
    panel_begin(r->f, phase == PHASE_DECODE ? "Decode: one new token" : "Prefill: one token of the prompt");
    svg_begin(r->f, CHART_W, 24 * n + 8);
    for (int i = 0; i < (int)arrlen(d); i++) {
        if (!d[i].tokens[phase]) continue;
        time_bar(r, &d[i], phase, y, top);
        y += 24;
    }
    fprintf(r->f, "</svg></div>\n");
}

static void draw_time(Report *r, const DemoRun *d) {
    picture_begin(r, "time", "Where the time goes",
                  "Milliseconds for one token of the built-in dialogue, on this machine. On a "
                  "small model and a short text the rest of the model dominates; attention and "
                  "what a method adds to it grow with the length of the text. Compare shares, not "
                  "machines; --bench measures speed properly.");
    fprintf(r->f, "<div class=\"row\">\n");
    for (int phase = 0; phase < PHASES; phase++) time_bars(r, d, phase);
    fprintf(r->f, "</div>\n");
    legend_begin(r->f);
    legend_box(r->f, "b1", "attention (in a prefill also LoopServe's choice of lines)");
    legend_box(r->f, "s2 s", "choosing the rows to read");
    legend_box(r->f, "s5 s", "bookkeeping: indexing, packing, dropping rows");
    legend_box(r->f, "b3", "the rest of the model");
    legend_end(r->f);
    picture_end(r);
}

// ---- the whole page

static FILE *report_file(const char *path, const char *mode) {
    FILE *f = fopen(path, mode);
    if (!f) die(EXIT_RUN, "--report %.900s: cannot be written: %s", path, strerror(errno));
    return f;
}

// NAME.html or NAME.htm -> NAME.csv, any other name with .csv behind it; malloc'd.
static char *csv_path(const char *path) {
    size_t n = strlen(path);
    char *csv = xmalloc(n + 5);
    if (n > 5 && !strcmp(path + n - 5, ".html")) n -= 5;
    else if (n > 4 && !strcmp(path + n - 4, ".htm")) n -= 4;
    snprintf(csv, n + 5, "%.*s.csv", (int)n, path);
    return csv;
}

// Ends the program if the page or its table cannot be written. Called before any work is done.
static void report_check(const char *path) {
    char *csv = csv_path(path);
    fclose(report_file(path, "ab"));
    fclose(report_file(csv, "ab"));
    free(csv);
}

static void source_put(Report *r, const char *s) { memcpy(arraddnptr(r->source, strlen(s)), s, strlen(s)); }

// Appends one word of the command line as a shell would take it: in single quotes where it has a
// special character.
static void source_word(Report *r, const char *word) {
    int plain = *word && !word[strcspn(word, " \t\n\"'\\$&|;<>()*?`!#~")];
    if (plain) {
        source_put(r, word);
        return;
    }
    arrput(r->source, '\'');
    for (const char *p = word; *p; p++) {
        if (*p == '\'') source_put(r, "'\\''");
        else arrput(r->source, *p);
    }
    arrput(r->source, '\'');
}

// Makes Report.source: the command line, the model and its shape, the seeds, the version.
static void report_source(Report *r) {
    const Config *c = r->a->c;
    char text[160];
    for (int i = 0; i < arg_count; i++) {
        if (i) arrput(r->source, ' ');
        source_word(r, args[i]);
    }
    source_put(r, " | model ");
    source_put(r, c->dir);
    snprintf(text, sizeof text,
             " (%d layers, %d heads, %d KV heads of %d) | greedy, --seed %d, --eval-seed %d | "
             "kvcomp %s",
             c->L, c->H, c->G, c->D, opt_int(r->a->o, "seed"), opt_int(r->a->o, "eval-seed"), KVCOMP_VERSION);
    source_put(r, text);
    arrput(r->source, 0);
}

// The options of the demonstration: the user's, with demo_values where nothing is given, greedy,
// and the first budget of --budgets or --budget, at most DEMO_MOST. With --ratio the budget stays
// as it is.
static Options *demo_options(const App *a) {
    Options *o = options_copy(a->o);
    char err[256], budget[160] = "";
    for (int i = 0; i < DEMO_VALUES; i++)
        if (!opt_given(o, demo_values[i][0])) options_set(o, demo_values[i][0], demo_values[i][1], err);
    list_word(*opt_str(o, "budgets") ? opt_str(o, "budgets") : opt_str(o, "budget"), 0, budget);
    if (atoi(budget) > DEMO_MOST) snprintf(budget, sizeof budget, "%d", DEMO_MOST);
    if (atoi(budget) <= 0) snprintf(budget, sizeof budget, "%d", DEMO_BUDGET);
    if (!opt_given(o, "ratio")) options_set(o, "budget", budget, err);
    options_set(o, "temp", "0", err);
    return o;
}

// The page up to the first picture, and the header of the table of numbers.
static void report_head(Report *r) {
    static const char *parts[][2] = {                   // id of a picture, its name in the list of links
        { "pareto", "quality and bytes" },
        { "needle", "needles" },
        { "memory", "memory" },
        { "heads", "heads" },
        { "pats", "bits" },
        { "lychee", "tree" },
        { "attention", "attention" },
        { "text", "kept text" },
        { "time", "time" },
    };
    fputs("<!DOCTYPE html>\n"
          "<html lang=\"en\">\n"
          "<head>\n"
          "<meta charset=\"utf-8\"/>\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
          "<title>kvcomp report</title>\n"
          "<style>\n", r->f);
    fputs(report_style, r->f);
    report_shades(r->f);
    fputs("</style>\n"
          "</head>\n"
          "<body>\n"
          "<h1>kvcomp: what KV-cache compression keeps, and what it costs</h1>\n"
          "<p class=\"how\">A language model remembers a conversation as rows of numbers: two (key "
          "and value) for every token, in every layer and KV head. Together they are the KV cache, "
          "and it grows with every word. The methods on this page make it smaller or read less of "
          "it: some drop rows, some keep all but read few, some store fewer bits.</p>\n"
          "<nav>", r->f);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        fprintf(r->f, "<a href=\"#%s\">%zu %s</a> ", parts[i][0], i + 1, parts[i][1]);
    fprintf(r->f, "</nav>\n");
    fprintf(r->csv, "picture,series,what,x,y,value,lo,hi\n");
}

// The dialogue with full attention's replies, as a table to open.
static void report_script(Report *r) {
    fprintf(r->f, "<details><summary>The questions, and full attention's replies</summary>\n"
                  "<table><tr><th>turn</th><th class=\"t\">the user says</th>"
                  "<th class=\"t\">full attention replies</th></tr>\n");
    for (int i = 0; i < DEMO_TURNS; i++) {
        const int *reply = r->script[i].dec;
        fprintf(r->f, "<tr><td>%d</td>", i + 1);
        html_between(r->f, "<td class=\"t\">", demo_turns[i], "</td>");
        fprintf(r->f, "<td class=\"t\">");
        for (int j = 0; j < (int)arrlen(reply); j++) {
            Token t = { .id = reply[j] };
            tokens_text(r, &t, 1);
        }
        fprintf(r->f, "</td></tr>\n");
    }
    fprintf(r->f, "</table></details>\n");
}

// What pictures 3 to 9 were made from: the budget, the options, the dialogue.
static void report_demo(Report *r) {
    const char *limit = opt_given(r->o, "ratio") ? "ratio" : "budget";
    fprintf(r->f, "<section>\n<p class=\"how\">The pictures below come from one short conversation, played through "
                  "every method with --%s %s. The methods get the same words; each answers the last "
                  "question itself. So that methods made for long texts show themselves on a short "
                  "one, these options were set unless given: ",
            limit, opt_str(r->o, limit));
    for (int i = 0; i < DEMO_VALUES; i++)
        fprintf(r->f, "%s--%s %s", i ? ", " : "", demo_values[i][0], opt_str(r->o, demo_values[i][0]));
    fprintf(r->f, ".</p>\n");
    report_script(r);
    fprintf(r->f, "</section>\n");
}

// The script of the sliders of picture 7: one map at a time. It starts with the last map whose head
// is not read whole.
static const char *report_script_text =
    "<script>\n"
    "(function(){var d=document,m=d.getElementById('maps'),l=d.getElementById('map-l'),h=d.getEleme"
    "ntById('map-h');\n"
    "d.documentElement.classList.add('js');"
    "m.classList.add('one');\n"

    // Shows the figure of the chosen layer and head, and the sliders' values in the model's own
    // numbers.
    "function show(){"
    "m.querySelectorAll('figure').forEach(function(f){"
    "f.classList.toggle('on',f.dataset.l==l.value?f.dataset.h==h.value:false)"
    "});\n"
    "[l,h].forEach(function(x){"
    "x.parentNode.querySelector('output').textContent=x.value*x.dataset.step"
    "})"
    "}\n"

    "l.oninput=h.oninput=show;"
    "var s=m.querySelectorAll('figure[data-lines]'),f=s[s.length-1];"
    "if(f){l.value=f.dataset.l;h.value=f.dataset.h}"
    "show()"
    "})();\n"
    "</script>\n";

static void report_foot(Report *r) {
    fputs(report_script_text, r->f);
    fputs("</body>\n</html>\n", r->f);
}

// Draws the nine pictures in order. The demonstration is played behind the first two.
static void report_pictures(Report *r, const Score *rows) {
    draw_pareto(r, rows);
    draw_needle(r, rows);
    DemoRun *d = demo_runs(r);
    report_demo(r);
    draw_memory(r, d);
    draw_heads(r);
    draw_pats(r);
    draw_lychee(r);
    draw_attention(r);
    draw_text(r, d);
    draw_time(r, d);
    demo_free(d);
}

// Writes the page and its numbers. rows: what --eval measured (stb array), or NULL. Ends the
// program when writing fails.
static int report_write(App *a, const char *path, const Score *rows /* stb_ds */) {
    char *csv = csv_path(path);
    Report r = { .a = a, .f = report_file(path, "wb"), .csv = report_file(csv, "wb"), .o = demo_options(a) };
    report_source(&r);
    report_head(&r);
    report_pictures(&r, rows);
    report_foot(&r);

    int bad = ferror(r.f) | ferror(r.csv);
    bad |= fclose(r.f) | fclose(r.csv);
    if (bad) die(EXIT_RUN, "--report %.900s: writing failed (is the disk full?)", path);
    if (!quiet) tell("report: %s, numbers in %s", path, csv);
    while (arrlen(r.script)) turn_free(arrpop(r.script));
    arrfree(r.script);
    arrfree(r.source);
    options_free(r.o);
    free(csv);
    return 0;
}

// ==================================================================================================== 30 COMMAND LINE
// Options are read from the environment, then from the command line, then checked against each
// other. What they name is opened, the rest of the program runs, everything is closed.

// Flags with an option's other name.
static const struct { const char *flag, *name; } short_options[] = {
    { "-m", "model" },      { "-d", "device" },     { "-t", "threads" },    { "-c", "ctx-size" },
    { "-b", "batch-size" }, { "-ctk", "ctk" },      { "-ctv", "ctv" },      { "-p", "prompt" },
    { "-f", "file" },       { "-sys", "system" },   { "-n", "n-predict" },  { "-st", "single-turn" },
    { "-s", "seed" },       { "-v", "verbose" },    { "-q", "quiet" },      { "-r", "repeat" },
    { "--keep-answer-kv", "loopserve-keep-answer-kv" },
};
enum { N_SHORT = sizeof short_options / sizeof *short_options };

// The flag in front of an option's name in --help, or NULL.
static const char *short_of(const char *name) {
    for (int i = 0; i < N_SHORT; i++)
        if (!strcmp(short_options[i].name, name)) return short_options[i].flag;
    return NULL;
}

// The option's name that a flag of the command line stands for: "-m" and "--model" are both
// "model". NULL: none.
static const char *long_of(const char *flag) {
    for (int i = 0; i < N_SHORT; i++)
        if (!strcmp(short_options[i].flag, flag)) return short_options[i].name;
    return flag[1] == '-' ? flag + 2 : NULL;
}

// ---- suggestions for misspelt names
// How many characters must be inserted, deleted or replaced to make b of a (Levenshtein's distance),
// 99 for very long names. row[j] is the distance of the first i characters of a and the first j of b;
// diagonal is row[j-1] for one character of a less.
static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(a), m = (int)strlen(b), row[64];
    if (m >= 63 || n >= 63) return 99;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (int i = 1; i <= n; i++) {
        int diagonal = row[0]++;
        for (int j = 1; j <= m; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_int(replaced, min_int(row[j], row[j - 1]) + 1);
        }
    }
    return row[m];
}

// Takes into *best the option of the list that is nearer to name than *distance.
static void nearer_option(const Opt *list, const char *name, const char **best, int *distance) {
    for (const Opt *o = list; o && o->name; o++) {
        int d = edit_distance(name, o->name);
        if (d >= *distance) continue;
        *best = o->name;
        *distance = d;
    }
}

// The option whose name is nearest to a name that is none, or NULL when nothing is near.
static const char *nearest_option(const char *name) {
    const char *best = NULL;
    int distance = 3 + (int)strlen(name) / 4;               // farther away than this is no misspelling
    nearer_option(program_options, name, &best, &distance);
    EACH_METHOD(m) nearer_option((*m)->opts, name, &best, &distance);
    return best;
}

// ---- help
// The paragraphs of --help and the option that each begins with.
static const struct { const char *title, *first; } help_parts[] = {
    { "Model and run", "model" },
    { "Prompt",        "prompt" },
    { "Sampling",      "temp" },
    { "Compression",   "method" },
    { "Output",        "json" },
    { "Measure",       "eval" },
    { "Other",         "list-methods" },
};

// What stands behind an option's name: " N", " TEXT", or "=a|b|c" for a choice.
static void help_value(const Opt *o, char out[96]) {
    const char *text = " TEXT";
    if (o->kind == 'b') text = "";
    if (o->kind == 'i') text = " N";
    if (o->kind == 'f') text = " F";
    if (o->kind == 'c') snprintf(out, 96, "=%s", o->def);
    else snprintf(out, 96, "%s", text);
}

// One line of help: flag, name, value, what it is for, and the default where there is one.
static void help_option(const Opt *o) {
    char value[96], left[128];
    const char *flag = short_of(o->name);
    help_value(o, value);
    snprintf(left, sizeof left, "%s%s--%s%s", flag ? flag : "", flag ? " " : "", o->name, value);
    printf("  %-38s %s", left, o->help);
    if (o->kind != 'b' && o->kind != 'c' && *o->def) printf(" [%s]", o->def);
    printf("\n");
}

// --help
static void help(void) {
    printf("kvcomp %s: chat with a Llama-style model under KV-cache compression\n", KVCOMP_VERSION);
    printf("usage: kvcomp [options] [DIR]\n");
    for (const Opt *o = program_options; o->name; o++) {
        for (size_t i = 0; i < sizeof help_parts / sizeof *help_parts; i++)
            if (!strcmp(help_parts[i].first, o->name)) printf("%s\n", help_parts[i].title);
        help_option(o);
    }
    printf("  %-38s %s\n", "--help METHOD", "a method's paper, what it keeps, its options and limits");
    printf("Each turn is rendered once and appended; templates that would rewrite history are not re-rendered.\n"
           "Examples\n  kvcomp                                    chat with the shipped model\n"
           "  kvcomp -m DIR --method=streaming --budget 512    a long chat in constant memory\n"
           "  kvcomp -m DIR -f long.txt --temp 0 -n 64 --json\n");
}

// What a method saves, as a sentence.
static const char *help_saves(const Method *m) {
    if (m->evicts) return "Memory is really given back.";
    if (m->role & ROLE_STORE) return "Rows take fewer bytes.";
    if (m->role & ROLE_SELECT) return "Saves reads, not memory: every row stays stored.";
    if (m->role) return "Saves prefill work, not memory.";
    return "Saves nothing: the reference.";
}

// --help METHOD
static void help_method(const char *name) {
    const Method *m = method_find(name, strlen(name));
    if (!m) die(EXIT_USAGE, "--help: no method is called '%s' (see --list-methods)", name);
    printf("%s: %s\n  %s\n", m->name, m->paper ? m->paper : "", m->keeps);
    printf("  %s\n", help_saves(m));
    if (m->limits) printf("  %s\n", m->limits);
    if (m->budget)
        printf("Uses --budget %d%s%s; or --ratio instead of --budget\n",
               m->budget, m->uses ? ", " : "", m->uses ? m->uses : "");
    if (m->opts) printf("Options (with their defaults)\n");
    for (const Opt *o = m->opts; o && o->name; o++) help_option(o);
}

// Prints help if any argument asks for it, whatever the others are. 1: it did.
static int help_wanted(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *next = i + 1 < argc && argv[i + 1][0] != '-' ? argv[i + 1] : NULL;
        int plain = !strcmp(argv[i], "-h") || !strcmp(argv[i], "--help");
        if (!plain && strncmp(argv[i], "--help=", 7)) continue;
        if (!plain) help_method(argv[i] + 7);
        else if (next) help_method(next);
        else help();
        return 1;
    }
    return 0;
}

// --list-methods
static void list_methods(void) {
    EACH_METHOD(m) printf("%-22s %s\n", (*m)->name, (*m)->keeps);
}

// ---- parsing: --x=v, --x v, flags without a value, short names, one positional folder
// Sets one option; exit 2 with the reason, and with a suggestion where there is one.
static void parse_one(Options *o, const char *name, const char *value) {
    char err[256];
    const char *hint = NULL;
    if (!options_set(o, name, value, err)) return;
    if (!strcmp(name, "threads") && strchr(value, '.')) hint = "temp";     // -t 0.7 means --temp
    else if (!opt_find(name)) hint = nearest_option(name);
    if (hint) die(EXIT_USAGE, "%s (did you mean --%s?)", err, hint);
    die(EXIT_USAGE, "%s", err);
}

// The option that begins at argv[i]. Returns how many arguments it takes: 1, or 2 with its value
// behind it.
static int parse_arg(Options *o, int argc, char **argv, int i) {
    char flag[64], *arg = argv[i], *eq = strchr(arg, '=');
    const char *value = eq ? eq + 1 : NULL;
    if (arg[0] != '-' || !arg[1]) {
        parse_one(o, "model", arg);
        return 1;
    }
    snprintf(flag, sizeof flag, "%.*s", eq ? (int)(eq - arg) : 63, arg);
    const char *name = long_of(flag);
    if (!name) die(EXIT_USAGE, "unknown option %s (kvcomp --help lists them)", flag);
    const Opt *known = opt_find(name);
    if (value || !known || known->kind == 'b') {
        parse_one(o, name, value ? value : "1");
        return 1;
    }
    if (i + 1 == argc) die(EXIT_USAGE, "--%s wants a value", name);
    parse_one(o, name, argv[i + 1]);
    return 2;
}

// The whole command line.
static void parse_args(Options *o, int argc, char **argv) {
    for (int i = 1; i < argc; ) i += parse_arg(o, argc, argv, i);
}

// Options from the environment; the command line, read later, wins.
static void parse_env(Options *o) {
    static const struct { const char *variable, *name; } env[] = {
        { "KVCOMP_MODEL",    "model" },
        { "KVCOMP_DEVICE",   "device" },
        { "KVCOMP_THREADS",  "threads" },
        { "KVCOMP_CTX_SIZE", "ctx-size" },
    };
    char err[256];
    for (size_t i = 0; i < sizeof env / sizeof *env; i++) {
        const char *value = getenv(env[i].variable);
        if (!value || !*value) continue;
        if (options_set(o, env[i].name, value, err)) die(EXIT_USAGE, "%s: %s", env[i].variable, err);
    }
}

// Is the run an evaluation?
static int evaluates(const Options *o) {
    return *opt_str(o, "eval") || *opt_str(o, "eval-file") || *opt_str(o, "compare");
}

// Ranges, and options that do not go together: exit 2.
static void check_options(const Options *o) {
    char err[256];
    int eval = evaluates(o), bench = opt_int(o, "bench"), ids = *opt_str(o, "ids") != 0;
    if (out_of_range(o, NULL, err)) die(EXIT_USAGE, "%s", err);
    if (opt_int(o, "kernel") % 2 == 0)
        die(EXIT_USAGE, "--kernel %d: the pooling width is odd", opt_int(o, "kernel"));
    if (opt_given(o, "budget") && opt_given(o, "ratio"))
        die(EXIT_USAGE, "--budget and --ratio both say how much to keep; give one");
    if (*opt_str(o, "dump-logits") && !ids) die(EXIT_USAGE, "--dump-logits goes with --ids FILE");
    if (*opt_str(o, "bench-suite") && !bench) die(EXIT_USAGE, "--bench-suite goes with --bench");
    if (*opt_str(o, "budgets") && !eval) die(EXIT_USAGE, "--budgets goes with --compare or --eval");
    if (opt_int(o, "csv") && !eval && !bench) die(EXIT_USAGE, "--csv goes with --eval or --bench");
    if (opt_int(o, "json-rows") && !opt_int(o, "json")) die(EXIT_USAGE, "--json-rows goes with --json");
    if (*opt_str(o, "report") && (ids || *opt_str(o, "file") || opt_given(o, "prompt") || bench))
        die(EXIT_USAGE, "--report goes alone or with --eval, not with -p, -f, --ids or --bench");
}

// ---- opening the model
// The shipped model: models/ beside the program, else in the working directory.
static void default_model(Options *o) {
    const char *shipped = "models/kvcomp-tiny";
    char path[1100], err[256];
    ssize_t n = readlink("/proc/self/exe", path, 1000);
    while (n > 0 && path[n - 1] != '/') n--;                // path[0,n): the program's folder
    n = n > 0 ? n : 0;
    snprintf(path + n, 100, "%s", shipped);
    options_set(o, "model", n && file_exists(path) ? path : shipped, err);
}

// Touches every page of a mapped tensor.
static void load_pages(const Tensor *t) {
    const volatile unsigned char *p = t->data;
    size_t bytes = (size_t)t->rows * t->cols * dtype_size(t->dtype);
    for (size_t i = 0; i < bytes; i += 4096) (void)p[i];
}

// A mapped file is read when it is first touched. With somebody watching, that happens here, with a
// progress line, and not as a silence before the first token.
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

// The numbers in a model's matrices.
static size_t parameters_of(const Config *c) {
    size_t C = c->C, F = c->F, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    size_t layer = C * (HD + 2 * GD) + HD * C + 3 * C * F;
    return c->L * layer + (c->tied ? 1 : 2) * (size_t)c->V * C;
}

// Would the program, started again, read what it has read? Text from a pipe is gone.
static int can_start_again(const Options *o) {
    struct stat st;
    const char *file = opt_str(o, "file");
    return !*file || (!stat(file, &st) && S_ISREG(st.st_mode));
}

// Opens config and weights: of --model, of the shipped model, or of random weights in the shape of
// --synthetic.
static void open_model(App *a) {
    const char *shape = opt_str(a->o, "synthetic");
    if (!*shape && !*opt_str(a->o, "model")) default_model(a->o);
    a->c = *shape ? config_synthetic(shape) : config_load(opt_str(a->o, "model"));
    threads_use(opt_int(a->o, "threads"), parameters_of(a->c));
    if (n_threads() > 1 && can_start_again(a->o)) spin_shortly(args);
    if (*shape) {
        a->w = weights_synthetic(a->c, 1);
        return;
    }
    a->w = weights_load(a->c);
    load_weights(a->c, a->w);
}

// ---- choosing the device of -d auto
#ifdef KVCOMP_CUDA
enum {
    TRIAL_IDS = 300,        // of the prefill: enough for the kernels on tensor cores
    TRIAL_STEPS = 4,        // decode steps behind it
};

// The largest difference that bf16 weights and f16 rows may make. A broken kernel is off by the
// logits themselves.
static const double trial_tolerance = 1e-2;

// The logits of a prefill and a few steps on a device, out (1+TRIAL_STEPS,V).
static void trial_logits(const Config *c, const Weights *w, const char *device, float *out) {
    char err[512];
    size_t row = (size_t)c->V * sizeof(float);
    Options *o = options_new();
    int *ids = random_ids(TRIAL_IDS, c->V);
    options_set(o, "device", device, err);
    Session *s = session_open(c, w, o, "full");
    memcpy(out, prefill(s, ids, TRIAL_IDS), row);
    for (int i = 1; i <= TRIAL_STEPS; i++) memcpy(out + (size_t)i * c->V, decode(s, ids[i]), row);
    session_close(s);
    arrfree(ids);
    options_free(o);
}

// The largest difference of x and y (n), by the largest |x|. NaN differs by infinity.
static double largest_difference(const float *x, const float *y, int n) {
    double worst = 0, top = 0;
    for (int i = 0; i < n; i++) {
        double e = fabs((double)x[i] - y[i]);
        if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
        top = fmax(top, fabs((double)x[i]));
    }
    return worst / top;
}

// Does the GPU compute what the CPU computes? Random weights run on both, because a kernel that is
// wrong on somebody's card must not chat there. Returns the largest difference of logits by the
// largest logit; -1: the trial died on the way, and its line is in die_text.
static double device_trial(void) {
    jmp_buf jump, *outer = die_jump;
    Config *c = config_synthetic("L2,H4,G2,D64,C128,F256,V512");
    Weights *w = weights_synthetic(c, 1);
    int n = (1 + TRIAL_STEPS) * c->V;
    float *both = xcalloc(2 * (size_t)n, sizeof *both);     // the CPU's logits, then the GPU's
    die_jump = &jump;
    int died = setjmp(jump);
    if (!died) {
        trial_logits(c, w, "cpu", both);
        trial_logits(c, w, "cuda", both + n);
    }
    die_jump = outer;
    double e = died ? -1 : largest_difference(both, both + n, n);
    free(both);
    weights_close(w, c);
    return e;
}

// Does the GPU pass the trial? why says how it went, and when it fails the user is told.
static int trial_passes(char why[512]) {
    double e = device_trial();
    int good = e >= 0 && e < trial_tolerance;
    if (e < 0) snprintf(why, 512, "a trial of the GPU ended with: %.400s", die_text);
    else if (good) snprintf(why, 512, "logits of a trial differ by %.1e of the largest", e);
    else snprintf(why, 512, "its logits differ by %.1e of the largest: that is wrong", e);
    if (!good && !quiet) warn("-d auto keeps to the CPU: %s", why);
    return good;
}

// Is there a GPU that answers, holds the memory plan of --method, and passes the trial? -d is cpu
// while this is asked. A method that cannot be opened at all keeps to the CPU: the session that is
// wanted then gives the reason.
static int device_serves(const App *a, char why[512]) {
    char err[512];
    if (!device_there()) {
        snprintf(why, 512, "no GPU answers");
        return 0;
    }
    Session *s = session_try(a->c, a->w, a->o, opt_str(a->o, "method"), err);
    if (!s) {
        snprintf(why, 512, "%.500s", err);
        return 0;
    }
    int good = !device_bars(s, why) && trial_passes(why);
    session_close(s);
    return good;
}
#else
// Without CUDA no GPU can serve.
static int device_serves(const App *a, char why[512]) {
    (void)a;
    snprintf(why, 512, "this kvcomp was built without CUDA");
    return 0;
}
#endif

// Makes cuda or cpu of -d auto, and says with -v why. The plan is that of --method; other methods
// of a comparison ask again.
static void choose_device(App *a) {
    char err[512], why[512];
    if (strcmp(opt_str(a->o, "device"), "auto")) return;
    options_set(a->o, "device", "cpu", err);
    int good = device_serves(a, why);
    if (good) options_set(a->o, "device", "cuda", err);
    if (opt_int(a->o, "verbose")) tell("device     %s (%s)", good ? "cuda" : "cpu", why);
}

// -d cuda in a program that has no GPU half: exit 1.
static void check_device(const Options *o) {
#ifndef KVCOMP_CUDA
    if (!strcmp(opt_str(o, "device"), "cuda"))
        die(EXIT_RUN, "-d cuda: this kvcomp was built without CUDA (nvcc was not found); -d cpu works");
#endif
    (void)o;
}

// ---- opening the rest, and closing
// The chat template of --chat-template or of the model. Without one the chat goes on with raw text,
// unless it was named.
static void open_template(App *a, const char *tokenizer_path, int needed) {
    char err[512];
    const char *model = opt_str(a->o, "model"), *name = opt_str(a->o, "chat-template");
    const char *path = *name || !*model ? tokenizer_path : model;
    a->tp = template_load(path, *name ? name : NULL, a->tok, err);
    if (!a->tp && *name) die(EXIT_MODEL, "%s", err);
    if (a->tp) a->tp->parse_user = opt_int(a->o, "parse-special");
    else if (needed && !quiet) warn("%s; going on with raw text", err);
}

// Opens tokenizer and template. needed: text will be read or written, so a missing tokenizer, or one
// that names ids the model does not have, ends the program; without it a line on stderr says that
// there is none. (--dump-tokens has no model.)
static void open_tokenizer(App *a, int needed) {
    char err[512];
    const char *given = opt_str(a->o, "tokenizer"), *path = *given ? given : opt_str(a->o, "model");
    if (!*path) {
        if (needed) die(EXIT_USAGE, "--synthetic has no tokenizer; give one with --tokenizer FILE");
        return;
    }
    a->tok = tokenizer_load(path, err);
    if (!a->tok && needed) die(EXIT_MODEL, "%s", err);
    if (!a->tok) {
        if (!quiet)
            warn("%s; going on without text (lychee then cuts chunks of 16)", err);
        return;
    }
    lychee_text(a->tok);
    if (!opt_int(a->o, "raw")) open_template(a, path, needed);
    if (needed && a->c && tokenizer_fits(a->tok, a->tp, a->c, err)) die(EXIT_MODEL, "%s", err);
}

// Opens the session of --method and seeds the sampler.
static void open_session(App *a) {
    a->method = copy_text(opt_str(a->o, "method"));
    a->s = session_open(a->c, a->w, a->o, a->method);
    template_differs(a);
    a->logits = xcalloc(a->c->V, sizeof(float));
    int seed = opt_int(a->o, "seed");
    a->rng = seed < 0 ? (uint64_t)time(NULL) ^ (uint64_t)(now() * 1e9) : (uint64_t)seed;
}

// Closes whatever was opened.
static void app_close(App *a) {
    record_clear(a);
    arrfree(a->turn);
    session_close(a->s);
    template_free(a->tp);
    lychee_text(NULL);                                      // its texts go with the tokenizer
    tokenizer_free(a->tok);
    if (a->w) weights_close(a->w, a->c);
    options_free(a->o);
    free(a->method);
    free(a->logits);
}

// ---- what is asked beside the model's text
// --inspect and -v: the bytes that a dialogue would take. A session on the CPU is asked, which has
// opened its parts but holds no rows yet.
static void print_memory(const App *a, FILE *f) {
    char err[512], device[8];
    const char *method = opt_str(a->o, "method");
    snprintf(device, sizeof device, "%s", opt_str(a->o, "device"));
    options_set(a->o, "device", "cpu", err);
    Session *s = session_try(a->c, a->w, a->o, method, err);
    if (s) {
        MemoryPlan p = memory_plan(s);
        fprintf(f, "memory     -c %d, method %s, K %s, V %s: ", p.ctx, method, s->fk->name, s->fv->name);
        fprintf(f, "weights %.3f GB + rows %.3f GB + ", (double)p.weights * 1e-9, (double)p.kv * 1e-9);
        fprintf(f, "method %.3f GB + passes %.3f GB = ", (double)p.parts * 1e-9, (double)p.pass * 1e-9);
        fprintf(f, "%.3f GB with -d cuda\n", (double)(p.weights + p.kv + p.parts + p.pass) * 1e-9);
        session_close(s);
    } else {
        fprintf(f, "memory     not known: %s\n", err);
    }
    options_set(a->o, "device", device, err);
}

// -v: every effective value.
static void print_values(const Options *o) {
    for (int i = 0; i < (int)shlen(o->map); i++) {
        const char *name = o->map[i].key;
        const char *value = o->map[i].value;
        fprintf(stderr, "  --%s=", name);
        show(stderr, value, strlen(value));
        fprintf(stderr, "%s\n", opt_given(o, name) ? "  (given)" : "");
    }
}

// --dump-tokens: the ids of the prompt on one line. Needs a tokenizer, but no weights.
static int dump_tokens(App *a, const char *text) {
    if (!text) die(EXIT_USAGE, "--dump-tokens wants -p TEXT or -f FILE");
    if (!*opt_str(a->o, "model") && !*opt_str(a->o, "tokenizer")) default_model(a->o);
    open_tokenizer(a, 1);
    int *ids = tokenizer_encode(a->tok, text, strlen(text), opt_int(a->o, "parse-special"), NULL);
    for (int i = 0; i < (int)arrlen(ids); i++) printf("%s%d", i ? " " : "", ids[i]);
    printf("\n");
    arrfree(ids);
    return 0;
}

// ---- running
// The text of -p or -f, malloc'd. NULL: neither is given.
static char *prompt_text(const App *a) {
    char err[256];
    size_t n;
    const char *file = opt_str(a->o, "file");
    if (opt_given(a->o, "prompt")) return copy_text(opt_str(a->o, "prompt"));
    if (!*file) return NULL;
    char *text = read_plain_text(strcmp(file, "-") ? file : "/dev/stdin", &n, err);
    if (!text) die(EXIT_USAGE, "-f %s", err);
    return text;
}

// -p, -f: one reply, of at most 256 tokens unless -n says otherwise. With --json the text itself is
// not printed.
static int answer_prompt(App *a, const char *text) {
    char err[256];
    session_begin(a);
    if (opt_int(a->o, "n-predict") < 0) options_set(a->o, "n-predict", "256", err);
    if (!arrlen(a->turn) && !*text) die(EXIT_USAGE, "the prompt is empty");
    FILE *out = opt_int(a->o, "json") ? fopen("/dev/null", "w") : stdout;
    if (!out) die(EXIT_RUN, "/dev/null: %s", strerror(errno));
    if (chat_turn(a, text, out)) return EXIT_RUN;
    if (out != stdout) fclose(out);
    if (opt_int(a->o, "json")) print_json(a, stdout);
    if (opt_int(a->o, "stats")) print_stats(a, stderr);
    session_end(a);
    return 0;
}

// The modes that need a session. text: the prompt, or NULL.
static int run_mode(App *a, const char *text) {
    if (*opt_str(a->o, "ids")) return run_ids(a);
    if (evaluates(a->o)) return evaluate(a);
    if (*opt_str(a->o, "report")) return report_write(a, opt_str(a->o, "report"), NULL);
    if (text) return answer_prompt(a, text);
    return chat(a);
}

// Opens what the mode needs, step by step, and runs it. Returns the exit code.
static int run_app(App *a, const char *text) {
    Options *o = a->o;
    if (opt_int(o, "dump-tokens")) return dump_tokens(a, text);
    open_model(a);
    if (opt_int(o, "verbose")) print_values(o);
    choose_device(a);
    if (opt_int(o, "inspect")) {
        inspect(a->c, a->w, stdout);
        print_memory(a, stdout);
        return 0;
    }
    if (opt_int(o, "verbose")) print_memory(a, stderr);
    open_tokenizer(a, !*opt_str(o, "ids"));
    if (*opt_str(o, "calibrate")) return calibrate(a->c, a->w, a->tok, o);
    open_session(a);
    return run_mode(a, text);
}

// Everything behind the options that only print something.
static int run_options(App *a) {
    Options *o = a->o;
    check_device(o);
    if (opt_int(o, "bench")) return bench(o);
    if (*opt_str(o, "report")) report_check(opt_str(o, "report"));     // before hours of evaluation
    char *text = prompt_text(a);
    int rc = run_app(a, text);
    free(text);
    return rc;
}

// The program, without the last look at its output. Returns the exit code.
static int run_program(int argc, char **argv) {
    if (help_wanted(argc, argv)) return 0;
    App a = { .o = options_new() };
    int rc = 0;
    arg_count = argc;
    args = argv;
    parse_env(a.o);
    parse_args(a.o, argc, argv);
    check_options(a.o);
    quiet = opt_int(a.o, "quiet");
    progress_hook = progress;
    if (opt_int(a.o, "version")) printf("kvcomp %s\n", KVCOMP_VERSION);
    else if (opt_int(a.o, "list-methods")) list_methods();
    else rc = run_options(&a);
    app_close(&a);
    return rc;
}

// main, for whoever includes this file. Output that could not be written (a full disk) makes a
// failure of success.
int kvcomp_main(int argc, char **argv) {
    int rc = run_program(argc, argv);
    int lost = fflush(stdout) || ferror(stdout);
    if (lost && !rc) die(EXIT_RUN, "stdout: not everything could be written (%s)", strerror(errno));
    return rc;
}

#ifndef KVCOMP_NO_MAIN
int main(int argc, char **argv) { return kvcomp_main(argc, argv); }
#endif

#endif  // SIMD
