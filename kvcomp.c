// kvcomp.c - the subject: a Llama-style language model whose key-value cache can be kept in many ways.
//
// This is the CPU half of kvcomp: the model, the cache, the decode loop and every method. The same
// methods on a GPU are in kvcomp.cu; kvcomp.h holds the nouns that both halves share. What all of it
// stands on (memory, kernels, checkpoints, tokenizers, chat templates) is in lib/, what people use it
// through (the chat, evaluation, pictures, the command line) in app/.
//
// WHAT IT IS
//
// A language model keeps the key and the value of every token it has read, and that cache soon
// outweighs the model. kvcomp loads a checkpoint as it is published on Hugging Face, plays a dialogue
// of many turns through it, and lets you swap the way its cache is kept: full attention, five recent
// papers, and the older methods those papers compare themselves with. Every method is one section of
// this file, with its equations beside the lines that compute them.
//   - It is a reference: the plain algorithm stands first, and what makes it fast lies below it, or in
//     lib/kernels, behind a name.
//   - It is exact about bits: a logit depends on the weights, the tokens, the method and the
//     instruction set, never on the number of threads (-t) or on how many tokens a block has (-b).
//
// WHAT IT IS NOT
//
//   - not a server: one process plays one dialogue, with batch size 1;
//   - not a trainer: weights are read, never changed;
//   - not a reader of quantised checkpoints: weights are F32, F16 or BF16, and anything else is
//     refused by name (--weights q8_0 rounds them to 8 bits in memory). Rows of the cache may have
//     fewer bits, because that is the subject;
//   - not a collection of architectures: decoder-only models of the Llama, Mistral, Qwen2 and Qwen3
//     families, nothing else;
//   - not distributed: one machine, and at most one GPU.
//
// HOW TO READ IT
//
// First kvcomp.h, which explains the nouns (Session, KVHead, View, Method) and the letters of all
// shapes, (T,H,D) and so on. Then sections 1 to 4: `forward` is the whole transformer on one screen,
// and it calls the methods through hooks. Then section 5, the shortest complete method, and after it
// the paper you came for. "D9" in a comment is decision 9 of NOTES.md, where its reasons are.
//
// To add a method, write a section like section 5, and name its table entry in section 15.
//
// CONTENTS (`grep -n '^// ====' kvcomp.c` gives the lines)
//    1 MODEL: forward is the whole transformer on one screen; where methods hook into it
//    2 CACHE: lists of rows, how a row is stored, views (what a head reads), dropping rows, bytes
//    3 ATTENTION: softmax over rows, tile by tile, in a prefill and through views in decode
//    4 THE DECODE LOOP: one prefill a turn, then one decode a token; opening and closing a session
//    5 STREAMINGLLM: the first rows and the last ones, the shortest complete method; TOVA
//    6 BASELINES: SnapKV, AdaKV, PyramidKV, H2O, ExpectedAttention, KNorm and KeyDiff drop rows; q8, q4
//    7 SPARSE PREFILL BASELINES: A-shape, Tri-shape and MInference: a prefill along lines
//    8 QUEST: every step reads the pages of rows with the largest bound
//    9 LOOPSERVE: a prefill along lines chosen for this input, and rows chosen anew while decoding
//   10 PATS: old rows lose low bits and are packed
//   11 LYCHEECLUSTER: every step reads the text chunks of the best clusters
//   12 SONIC INFERENCE: a finished message is compressed into a few learned rows
//   13 DILILAZYKV: heads that find facts keep more rows than others; HeadKV, its nearest rival
//   14 TRACES: what a method says of itself while a pass is written down
//   15 THE TABLE OF METHODS: one line a method
//   16 MEMORY PLAN: what a dialogue will take, before it takes it
#define _GNU_SOURCE
#include "kvcomp.h"
#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <stb/stb_ds.h>

// A hook is given what any method may need, and so a method need not look at all of it.
#pragma GCC diagnostic ignored "-Wunused-parameter"

// ==================================================================================================== 1 MODEL
// A session is one dialogue: its tokens, its rows of keys and values, and its method. `forward`, at
// the end of this section, is the whole transformer in the order in which it is computed. It goes
// layer by layer over all T tokens of the pass, so that a hook sees a whole layer and a prefill
// holds one uncompressed layer at most; -b only cuts a layer into spans and blocks (D2).
//
// forward knows no method by name. A session's method is a list of parts ("snapkv+q8" is two), each
// a row of hooks that may be NULL, and forward calls them at these places:
//   embed     a token with a negative id, which is a method's own, needs an embedding
//   project   q, k and v of a layer are there, not rotated yet
//   select    decode only: the rows that the query heads of this layer will read are chosen now
//   attend    prefill only: the part computes the attention of this layer itself
//   commit    a layer's attention is done: index its rows, or drop some; once more when the pass ends
//   watch     an observer, which decides nothing, looks at what was computed
// Two more, turn and enter, are called by `prefill` (section 4) before the pass.

// ---- RoPE: where a token stands, as a rotation of its queries and keys
// cs (D): cosines of the D/2 angles of a position, times scale, then sines. Angle i is pos * freq_i in double
// (D5); the frequencies, as the model wants them, are made in lib/checkpoint.c.
static void rope_angles(const Weights *w, int D, int pos, double scale, float *cs) {
    for (int i = 0; i < D / 2; i++) {
        double a = pos * w->inv_freq64[i];
        cs[i] = (float)(cos(a) * scale);
        cs[D / 2 + i] = (float)(sin(a) * scale);
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

// ---- the room a pass works in
// A span is the run of tokens whose queries, keys and values exist at the same time: all T of the
// pass if a hook wants to see a whole turn, or an observer watches; otherwise about -b
// (span_end). b is a block: min(-b, T).
typedef struct {
    float *x;           // (T,C) the residual stream: one vector a token, to which every layer adds
    float *cs;          // (T,D) RoPE cosines and sines of every token's position
    float *q;           // (span,H,D) queries
    float *out;         // (span,H,D) what attention makes of them
    float *k, *v;       // (span,G,D) keys and values
    float *h;           // (b,C) a normed input, or the output of a product
    float *gate, *up;   // (b,F) inside the MLP
} Pass;

// Must the queries of a whole turn be there at once, for an attend hook or the rule?
static int sees_whole_turn(const Session *s) { return s->attends || s->rule != VIS_CAUSAL; }

// Tokens of a span when a turn has several: -b. Attention adds to a row's mass block by block, so
// with KV_MASS spans are whole blocks; on a device, which adds up a span at once, the turn is one
// (D90).
static int span_tokens(const Session *s) {
    int per = MAX_R / (s->c->H / s->c->G);          // tokens of a block of attention (Q_BLOCK)
    if (s->watched || sees_whole_turn(s)) return INT_MAX;
    if (!(s->wants & KV_MASS)) return s->batch;
    return KV_DEV(s) ? INT_MAX : max_int(s->batch / per, 1) * per;
}

// Where the span of a pass of T tokens ends that begins with token t0. The last one is longer where
// it has to hold the queries that commit hooks want.
int span_end(const Session *s, int t0, int T) {
    int n = span_tokens(s), left = T - t0;
    return left < n || left - n < s->queries ? T : t0 + n;
}

// The tokens of the longest span of a pass of T tokens.
int span_room(const Session *s, int T) {
    int n = span_tokens(s);
    return T < n || T - n < s->queries ? T : n + s->queries;
}

// Room for a pass over T tokens.
static Pass pass_room(Session *s, int T) {
    const Config *c = s->c;
    Pass r = { 0 };
    size_t f = sizeof(float), n = span_room(s, T), b = min_int(s->batch, T);
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

// ---- a pass that ends before its time
// Is this pass not wanted any more? Only a pass whose caller has set Session.stop can be given up.
static int pass_unwanted(const Session *s) {
    return s->stop && s->unwanted && s->unwanted();
}

// Called at least once a layer, and between the blocks of a long one. A pass that is not wanted any
// more ends here, with a jump to whoever set Session.stop; what it leaves behind has to be undone
// there. No memory is lost: a pass has its memory from the arena.
void pass_poll(Session *s) {
    if (pass_unwanted(s)) longjmp(*s->stop, 1);
}

// ---- the steps of a layer
// x (T,C) = the embeddings of the tokens of the pass.
static void embed(Session *s, float *x, int T) {
    int C = s->c->C;
    for (int t = 0; t < T; t++, x += C) {
        const Token *k = &s->tok[s->base + t];
        if (k->id >= 0) {
            tensor_row(x, &s->w->embed, k->id);
            continue;
        }
        EACH_HOOK(s, p, embed) {
            p->m->embed(s, p->ms, k, x);
            break;
        }
    }
}

// cs (T,D) = the angles of the positions of the tokens of the pass.
void pass_angles(const Session *s, float *cs, int T) {
    int D = s->c->D;
    for (int t = 0; t < T; t++)
        rope_angles(s->w, D, s->tok[s->base + t].pos, s->w->rope_scale, cs + (size_t)t * D);
}

// How many of the tokens t .. end-1 of the pass, counted from t, can go through one product: at
// most -b, and all with the same weights *y. SONIC's Nexus tokens have weights of their own.
int same_weights(const Session *s, int t, int end, const Layer **y, int l) {
    int alt = s->alt && s->tok[s->base + t].kind == TOK_EXTRA;
    int most = min_int(end - t, s->batch), n = 0;
    while (n < most && (s->alt && s->tok[s->base + t + n].kind == TOK_EXTRA) == alt) n++;
    *y = alt ? &s->alt[l] : &s->w->layer[l];            // SONIC: Sec. 3.1
    return n;
}

// q (n,H,D), k and v (n,G,D) of tokens t0 .. t1-1 of the pass, block by block:  h = norm(x);  q = W_q h + b_q, and so
// on. Some models norm every head of q and k, too (Qwen3).
static void project_rows(Session *s, int l, Pass *r, int t0, int t1) {
    const Config *c = s->c;
    size_t C = c->C, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    for (int t = t0, n; t < t1; t += n) {
        const Layer *y;
        float *q = r->q + (t - t0) * HD, *k = r->k + (t - t0) * GD, *v = r->v + (t - t0) * GD;
        pass_poll(s);
        n = same_weights(s, t, t1, &y, l);
        rmsnorm(r->h, r->x + t * C, &y->attn_norm, n, c->C, c->eps);
        matmul(q, r->h, &y->wq, n);
        matmul(k, r->h, &y->wk, n);
        matmul(v, r->h, &y->wv, n);
        add_bias(q, &y->bq, n);
        add_bias(k, &y->bk, n);
        add_bias(v, &y->bv, n);
        if (y->q_norm.data) rmsnorm(q, q, &y->q_norm, n * c->H, c->D, c->eps);
        if (y->k_norm.data) rmsnorm(k, k, &y->k_norm, n * c->G, c->D, c->eps);
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

// The output product of attention and the MLP, for the tokens from .. t1-1, block by block. The span in r begins with
// token t0:
//   x += W_o out, where out (n,H,D) is what attention made
//   x += W_down (silu(W_gate h) * W_up h), where h = norm(x)
static void mlp_rows(Session *s, int l, Pass *r, int t0, int from, int t1) {
    const Config *c = s->c;
    size_t C = c->C, HD = (size_t)c->H * c->D;
    float *h = r->h, *gate = r->gate, *up = r->up;
    for (int t = from, n; t < t1; t += n) {
        const Layer *y;
        float *x = r->x + t * C;
        pass_poll(s);
        n = same_weights(s, t, t1, &y, l);
        matmul(h, r->out + (t - t0) * HD, &y->wo, n);
        add_bias(h, &y->bo, n);
        add_to(x, h, n * C);

        rmsnorm(h, x, &y->mlp_norm, n, c->C, c->eps);
        matmul(gate, h, &y->gate, n);
        add_bias(gate, &y->bgate, n);
        matmul(up, h, &y->up, n);
        add_bias(up, &y->bup, n);
        swiglu(gate, up, (size_t)n * c->F);
        matmul(h, gate, &y->down, n);
        add_bias(h, &y->bdown, n);
        add_to(x, h, n * C);
    }
}

// ---- the clock and the progress of a pass
// Adds the seconds since t0 to *sum -> the time now.
double timed(double *sum, double t0) {
    double t = now();
    *sum += t - t0;
    return t;
}

// ---- attention of a layer, and the whole transformer
// Attention of layer l of the n tokens from t0 on of a pass of T tokens, and the hooks around it: q and out (n,H,D),
// where the rows lie. late 1: the commit hooks of this layer are called later.
void attend_rows(Session *s, int l, float *out, const float *q, int t0, int n, int T, int late) {
    int acts = layer_acts(s, l), sparse = 0;
    double t = now();
    if (s->decoding) {
        // select: a method that reads only some rows sets the views of this layer's query heads.
        if (acts)
            EACH_HOOK(s, p, select) p->m->select(s, p->ms, l, q);
        t = timed(&s->clk.select, t);
        attn_decode(s, l, out, q);
    } else {
        // attend: a sparse prefill computes the attention itself; without one it is dense.
        if (acts)
            EACH_HOOK(s, p, attend) {
                p->m->attend(s, p->ms, l, out, q, n);
                sparse = 1;
                break;
            }
        if (!sparse) attn_prefill(s, l, out, q, t0, n);
        pass_poll(s);           // before commit: an attention that was cut short has made no numbers
    }
    t = timed(&s->clk.attend, t);
    watch(s, WATCH_OUT, l, out);

    // The peak of a prefill is here, where this layer still holds every row.
    if (!s->decoding) note_peak(s);

    // commit: the rows of this layer are complete. A method indexes, drops or packs some.
    if (acts && !late && t0 + n == T) {
        int last = min_int(s->queries, T);
        const float *from = last ? q + (size_t)(n - last) * s->c->H * s->c->D : NULL;
        EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, l, from, last);
    }
    timed(&s->clk.commit, t);
}

// Calls the hook watch of every observer: x is what the moment names.
void watch(Session *s, int moment, int l, const float *x) {
    if (s->watched)
        EACH_HOOK(s, p, watch) p->m->watch(s, p->ms, moment, l, x);
}

// Adds T tokens to the session. A token with pos < 0 gets the next position.
void add_tokens(Session *s, const Token *in, int T) {
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
    watch(s, WATCH_TOKENS, 0, NULL);
    if (KV_DEV(s)) return pass_cuda(s, T);

    const Config *c = s->c;
    size_t mark = scratch_mark(s);
    Pass r = pass_room(s, T);

    // Every token becomes a vector: its row of the embedding matrix, or what the embed hook says.
    embed(s, r.x, T);
    pass_angles(s, r.cs, T);

    for (int l = 0; l < c->L; l++) {
        if (l && T > 1) progress_tell("prefill", (double)l / c->L);
        kv_reserve(s, l, T);

        for (int t0 = 0, t1; t0 < T; t0 = t1) {
            t1 = span_end(s, t0, T);

            // Queries, keys and values of the span. The project hook sees them unrotated.
            project_rows(s, l, &r, t0, t1);
            watch(s, WATCH_KEYS, l, r.k);
            if (layer_acts(s, l))
                EACH_HOOK(s, p, project) p->m->project(s, p->ms, l, r.q, r.k, r.v, t0, t1 - t0);

            // They are rotated to their positions, and keys and values become rows of the cache.
            rope_span(s, &r, t0, t1);
            kv_append(s, l, r.k, r.v, t0, t1 - t0);
            watch(s, WATCH_ROWS, l, r.q);

            // Attention reads all rows as they are stored, the new ones too (D1).
            // Hooks: select, attend, commit.
            attend_rows(s, l, r.out, r.q, t0, t1 - t0, T, 0);

            // Output product and MLP, each added to x. The last layer needs the last token only.
            int from = l < c->L - 1 ? t0 : T - 1;
            mlp_rows(s, l, &r, t0, from, t1);
        }
    }

    // The end of the pass: every commit hook once more, with l == L.
    double t = now();
    EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, c->L, NULL, 0);
    timed(&s->clk.commit, t);

    // The last token's vector becomes one logit for every token of the vocabulary.
    rmsnorm(r.h, r.x + (size_t)(T - 1) * c->C, &s->w->norm, 1, c->C, c->eps);
    matmul(s->logits, r.h, &s->w->head, 1);

    watch(s, WATCH_END, c->L, NULL);
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
// Memory is asked for in steps of KV_STEP rows, so that a decode step rarely allocates; a head on a
// device that grows gets an eighth more, because growing copies it (kv_reserve). Rows
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

const Format formats[] = {
    { "f16",  half_bytes, f16_pack,  f16_unpack  },
    { "f32",  f32_bytes,  f32_pack,  f32_unpack  },
    { "bf16", half_bytes, bf16_pack, bf16_unpack },
    { "q8_0", q8_bytes,   q8_pack,   q8_unpack   },
    { "q4",   q4_bytes,   q4_pack,   q4_unpack   },
    { NULL, NULL, NULL, NULL },
};

// The format of this name; NULL: there is none.
const Format *format_find(const char *name) {
    for (const Format *f = formats; f->name; f++)
        if (!strcmp(f->name, name)) return f;
    return NULL;
}

// The format of V rows (OF_V) or K rows (OF_K).
static const Format *format_of(const Session *s, int v) {
    return v ? s->fv : s->fk;
}

// The dtype a kernel reads rows of this format in: their own if it can read them where they lie,
// otherwise f32. q8_0 has kernels for rows of whole blocks.
static int dtype_in_place(const Format *f, int D) {
    if (f->unpack == f16_unpack) return DT_F16;
    if (f->unpack == bf16_unpack) return DT_BF16;
    return f->unpack == q8_unpack && D % Q8_BLOCK == 0 ? ROWS_Q8 : DT_F32;
}

// Bytes of one raw row, its key and its value together.
static size_t raw_row_bytes(const Session *s) {
    return s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
}

// The rows that a head has room for when it holds so many.
static size_t round_to_step(size_t rows) {
    return (rows + KV_STEP - 1) / KV_STEP * KV_STEP;
}

// ---- memory of one head
// Makes room for `raw` raw rows behind the packed ones: keeps what is there, gives back the rest.
static void head_reserve(Session *s, KVHead *h, int raw) {
    int D = s->c->D, cap = (int)round_to_step(raw), all = h->packed + cap;
    if (cap == h->cap && all == h->room) return;
    if (KV_DEV(s)) {
        s->changes++;                       // only a device asks, and here threads work side by side
        rows_resize_cuda(s, h, cap);
    } else {
        size_t k = s->fk->row_bytes(D), v = s->fv->row_bytes(D);
        h->k = xrealloc(h->k, cap * k);
        h->v = xrealloc(h->v, cap * v);
    }
    h->cap = cap;
    h->room = all;
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
    arrfree(h->reg);
    memset(h, 0, sizeof *h);
}

// Bytes of a head's K and V rows, as allocated.
static size_t head_row_bytes(const Session *s, const KVHead *h) {
    return (size_t)h->cap * raw_row_bytes(s) + 2 * h->pk_bytes;
}

// ---- new rows
enum { KV_GROWTH = 4096 };              // rows: on a device it grows by more, by so many at most

// Makes room for n more rows in every head of layer l. On a device a growth copies the head, and the graph of a step is
// captured anew: there it grows by an eighth, by KV_GROWTH rows at most, and not past the rows that -c allows.
void kv_reserve(Session *s, int l, int n) {
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        int raw = h->len - h->packed + n;
        if (raw <= h->cap) continue;
        if (KV_DEV(s) && h->cap) {
            int ctx = opt_int(s->opt, "ctx-size"), most = (ctx ? ctx : s->c->max_pos) - h->packed;
            raw = max_int(raw, min_int(h->cap + min_int(h->cap / 8, KV_GROWTH), most));
        }
        head_reserve(s, h, raw);
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
// DT_F16, DT_BF16 or ROWS_Q8 if that is how raw rows are stored; packed rows exist beside f16 rows
// only.
static void load_range(const Session *s, const KVHead *h, int v, int r0, int n, char *buf,
                       int dtype) {
    int D = s->c->D, packed = max_int(0, min_int(n, h->packed - r0));
    const Format *f = format_of(s, v);
    size_t size = dtype == DT_F32 ? 4 : 2, front = packed * (size_t)D;

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
    size_t bytes = kind_bytes(dtype, s->c->D);
    for (int i = 0, end; i < n; i = end) {
        end = rows ? i + 1 : n;
        while (end < n && rows[end] == rows[end - 1] + 1) end++;
        load_range(s, h, v, rows ? rows[i] : r0, end - i, (char *)buf + i * bytes, dtype);
    }
}

// buf (n,D) f32 = keys, or values.
void kv_load_k(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf) {
    load_rows(s, h, OF_K, rows, r0, n, buf, DT_F32);
}

void kv_load_v(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf) {
    load_rows(s, h, OF_V, rows, r0, n, buf, DT_F32);
}

// ---- memory that lies where the rows lie: on the device in a device session

// `have` bytes at p become `want`, and what was there stays.
static void *near_grow(const Session *s, void *p, size_t have, size_t want) {
    return KV_DEV(s) ? near_grow_cuda(p, have, want) : xrealloc(p, want);
}

static void near_drop(const Session *s, void *p) {
    if (KV_DEV(s)) near_free_cuda(p);
    else free(p);
}

// The bytes at p, where the host can read them: a copy in scratch memory, if they lie on a device.
const void *near_here(Session *s, const void *p, size_t bytes) {
    if (!KV_DEV(s)) return p;
    void *copy = scratch(s, bytes);
    bytes_load_cuda(copy, p, bytes);
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
// query heads of a group (view_group). Attention compares the lists of neighbouring heads: those that
// are the same share one reading of the rows (decode_groups).
//
// The rows of a list that many steps read can be copied side by side (view_near, section 3): is_near
// says that the copy is valid. Whatever changes the list, or a key that it names, clears is_near.

// Makes room for a list of n rows of query head h, so that no later step has to ask for memory.
static void view_room(Session *s, int l, int h, int n) {
    View *w = kv_view(s, l, h);
    if (n <= w->cap) return;
    w->cap = n;
    w->idx = xrealloc(w->idx, (size_t)n * sizeof(int));
}

// Query head h reads idx (n) and the rows from tail on. What the other heads read stays as it is.
void view_set(Session *s, int l, int h, const int *idx, int n, int tail) {
    View *w = kv_view(s, l, h);
    if (KV_DEV(s)) s->changes++;            // only a device asks, and here threads work side by side
    if (n > w->cap) view_room(s, l, h, n + n / 4 + KV_STEP);
    if (n) memcpy(w->idx, idx, (size_t)n * sizeof(int));
    w->n = n;
    w->tail = tail;
    w->is_near = 0;
}

// All query heads of KV head g read idx (n) and the rows from tail on.
void view_group(Session *s, int l, int g, const int *idx, int n, int tail) {
    int R = s->c->H / s->c->G;
    for (int r = 0; r < R; r++) view_set(s, l, g * R + r, idx, n, tail);
}

// Every query head of the session reads every row.
void view_all(Session *s) {
    s->changes++;
    if (KV_DEV(s)) views_drop_cuda(s);
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        View *w = &s->view[i];
        w->n = w->tail = w->is_near = 0;
    }
}

// A device may have kept the lists it chose in the last step: brings them here to be read.
static void views_here(const Session *s) {
    if (KV_DEV(s)) views_fetch_cuda((Session *)s);
}

// rows (N) = the rows query head h reads, in ascending order -> how many.
int view_rows(const Session *s, int l, int h, int *rows) {
    views_here(s);
    const View *w = kv_view(s, l, h);
    int n = w->n, len = kv_head(s, l, h / (s->c->H / s->c->G))->len;
    if (n) memcpy(rows, w->idx, (size_t)n * sizeof(int));
    for (int r = w->tail; r < len; r++) rows[n++] = r;
    return n;
}

// ---- dropping rows
// Row keep[i] of a head becomes its row i, for i < n, and the memory of the others is given back. On the CPU rows
// move in order, which overwrites nothing that is still needed.
static void move_rows(Session *s, const Move *move, int n_moves) {
    size_t k_bytes = s->fk->row_bytes(s->c->D), v_bytes = s->fv->row_bytes(s->c->D);
    if (KV_DEV(s)) rows_move_cuda(s, move, n_moves);
    for (const Move *m = move; m < move + n_moves; m++) {
        KVHead *h = m->h;
        if (m->n_packed < m->old_packed) s->packing->keep(s, h, m->keep, m->n_packed);      // sets h->packed = n_packed
        for (int i = 0; i < m->n; i++) {
            int r = m->keep[i];
            if (i >= m->n_packed && !KV_DEV(s)) {
                size_t to = i - m->n_packed, from = r - m->old_packed;
                memmove(h->k + to * k_bytes, h->k + from * k_bytes, k_bytes);
                memmove(h->v + to * v_bytes, h->v + from * v_bytes, v_bytes);
            }
            h->src[i] = h->src[r];
            h->pos[i] = h->pos[r];
            if (h->mass) h->mass[i] = h->mass[r];
        }
        h->len = m->n;
        head_reserve(s, h, m->n - m->n_packed);
    }
}

// Every head g of layer l keeps n[g] of its rows, those of keep + g stride, ascending; stride 0: the n[0] rows of keep.
static void heads_keep(Session *s, int l, const int *keep, size_t stride, const int *n) {
    Move *move = scratch(s, s->c->G * sizeof *move);
    int n_moves = 0;
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        Move m = { h, keep + g * stride, n[stride ? g : 0], 0, h->packed, 0 };
        while (m.n_packed < m.n && m.keep[m.n_packed] < h->packed) m.n_packed++;
        m.cap = (int)round_to_step(m.n - m.n_packed);
        if (m.n < h->len) move[n_moves++] = m;
    }
    move_rows(s, move, n_moves);
}

// The same, and query heads read every row afterwards.
void kv_keep(Session *s, int l, const int *keep, size_t stride, const int *n) {
    for (int g = 0; g < s->c->G; g++) view_group(s, l, g, NULL, 0, 0);
    heads_keep(s, l, keep, stride, n);
}

// keep (len) = the rows of KV head g that one of its query heads reads -> how many. Renumbers their views. map
// (len + 1) is room.
static int views_compact(Session *s, int l, int g, int *keep, int *map) {
    int R = s->c->H / s->c->G, len = kv_head(s, l, g)->len, n = 0;
    memset(map, 0, (size_t)(len + 1) * sizeof *map);
    for (int h = g * R; h < (g + 1) * R; h++) {
        const View *w = kv_view(s, l, h);
        for (int i = 0; i < w->n; i++) map[w->idx[i]] = 1;
        for (int r = w->tail; r < len; r++) map[r] = 1;
    }

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
        for (int i = 0; i < w->n; i++) w->idx[i] = map[w->idx[i]];
        w->tail = map[w->tail];
    }
    return n;
}

// Drops the rows of layer l that no query head of their group reads, and renumbers the views.
void kv_compact(Session *s, int l) {
    int G = s->c->G, N = kv_longest(s, l) + 1;
    int *keep = scratch(s, (size_t)G * N * sizeof *keep), *n = scratch(s, G * sizeof *n);
    int *map = scratch(s, N * sizeof *map);
    for (int g = 0; g < G; g++) n[g] = views_compact(s, l, g, keep + (size_t)g * N, map);
    heads_keep(s, l, keep, N, n);
}

// Forgets the tokens from n_tok on and their rows, the last ones of every head, and gives back the room
// that a prefill which was given up has left. Every view reads every row afterwards.
void kv_truncate(Session *s, int n_tok) {
    int G = s->c->G;
    if (n_tok >= s->n_tok) return;
    for (int l = 0; l < s->c->L; l++) {
        size_t mark = scratch_mark(s), N = kv_longest(s, l);
        int *keep = scratch(s, G * N * sizeof *keep), *n = scratch(s, G * sizeof *n);
        for (int g = 0; g < G; g++) {
            const KVHead *h = kv_head(s, l, g);
            for (n[g] = 0; n[g] < h->len && h->src[n[g]] < n_tok; n[g]++) keep[g * N + n[g]] = n[g];
        }
        heads_keep(s, l, keep, N, n);
        for (int g = 0; g < G; g++) head_reserve(s, kv_head(s, l, g), n[g] - kv_head(s, l, g)->packed);
        scratch_reset(s, mark);
    }
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

    size_t mark = scratch_mark(s), bytes = s->fk->row_bytes(D);
    float *k = scratch(s, (size_t)D * sizeof(float)), *cs = scratch(s, (size_t)D * sizeof(float));
    char *raw = scratch(s, bytes), *to = h->k + (row - h->packed) * bytes;
    kv_load_k(s, h, NULL, row, 1, k);
    rope_angles(s->w, D, shift, 1, cs);
    rope_apply(k, 1, D, cs);
    s->fk->pack(raw, k, D);
    if (KV_DEV(s)) rows_store_cuda(to, raw, bytes);
    else memcpy(to, raw, bytes);
    scratch_reset(s, mark);
    h->pos[row] = pos;
    for (int r = 0; r < R; r++) kv_view(s, l, g * R + r)->is_near = 0;     // a copy holds the old key
}

// ---- accounting: what the allocator holds
// Bytes of all K and V rows, the unused part of the last step of KV_STEP rows included.
size_t kv_bytes(const Session *s) {
    size_t n = 0;
    for (int i = 0; i < s->c->L * s->c->G; i++) n += head_row_bytes(s, &s->head[i]);
    return n;
}

// The format full attention is compared in: the session's, but f16 where that one compresses, which is to fewer
// than 16 bits a number.
const Format *full_format(const Session *s, int v) {
    const Format *f = format_of(s, v);
    return s->packing || f->row_bytes(32) < 2 * 32 ? format_find("f16") : f;
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
    for (int i = 0; i < s->c->L * s->c->H; i++) n += (size_t)s->view[i].cap * sizeof(int) + s->view[i].room;
    for (int i = 0; i < s->n_part; i++) {
        const Part *p = &s->part[i];
        if (p->m->bytes) n += p->m->bytes(s, p->ms);
    }
    return n;
}

// Keeps the most bytes of rows ever held.
void note_peak(Session *s) {
    s->clk.peak = max_size(s->clk.peak, kv_bytes(s));
}

// ---- what a method asks
// The budget B at the end of a prefill: --budget rows a KV head. --ratio F instead removes the
// share F of the N tokens seen: B = N - floor(N F + 1e-6) (D8). Decode steps have the B of the
// prefill before them.
int budget_now(const Session *s) {
    if (s->decoding) return s->applied;
    if (s->ratio >= 0) return s->n_tok - (int)floor(s->n_tok * s->ratio + 1e-6);
    return s->budget;
}

// How many first rows a method always keeps or reads: --sink, and where that is not given `own`, the method's own.
int sinks(const Session *s, int own) {
    int n = opt_int(s->opt, "sink");
    return n < 0 ? own : n;
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
// attn_prefill and attn_decode do that for many queries at once, without keeping n scores a query: they
// take the rows in tiles of KV_TILE and fold each tile into a running softmax (tile_fold), which holds
// for every query the largest score so far, and the sums of exp(s_j - max) and of exp(s_j - max) v_j.
// Rows are taken KV_CHUNK at a time; what each chunk gives is joined in order (chunks_join), so that
// threads can share the rows of one query.
//
// A query's result depends only on its own list of rows: never on the queries beside it, on -b, or
// on the number of threads. Prefill and decode do the same arithmetic, so a token's logits do not
// depend on how it came in (D2).

enum {
    KV_TILE = 64,           // rows of a tile: their keys as f32 lie in the first-level cache
    Q_BLOCK = MAX_R,        // most queries of a tile: R heads, times as many tokens as fit
    KV_CHUNK = 2048,        // rows of one running softmax
};

// ---- tiles: m queries meet n rows
typedef struct {            // keys or values as a kernel takes them
    const void *x;          // (n,D) of dtype
    int dtype;              // DT_* or ROWS_Q8
    Ahead next;             // memory that will be read next, to ask for meanwhile; {0}: none
} TileRows;

typedef struct {            // what one thread works on
    int m;                  // the queries,
    float *q;               // (m,D)
    struct Q8Query *q8;     // the same as integers, for keys of q8_0 (D89); NULL: keys are not
    int tok[Q_BLOCK];       // (m) their tokens, the oldest first: indices into Session.tok
    int p, n;               // the rows they meet, those at places p .. p+n-1 of a view,
    const int *row;         // (n) their numbers, ascending
    int rows[KV_TILE];      // room for these
    float *kv;              // (KV_TILE,D) room for their keys, and then for their values
    float *sc;              // (m,n) scores, then exp(score - max)
    float max[Q_BLOCK];     // the running softmax of each query: the largest score so far,
    float sum[Q_BLOCK];     // the sum of exp(score - max),
    float *acc;             // (m,D) and the sum of exp(score - max) v
    const float *skip_v;    // lines (section 7): query i reads row c only where skip_v[c], or else skip_s[c - i], is 0
    const float *skip_s;    // and not -INFINITY; NULL: it reads every row it may see
} Tile;

static const View every_row;    // that of a head in a prefill

// A Tile for every thread, in scratch memory.
static Tile *tiles_new(Session *s) {
    int n = n_threads(), D = s->c->D, whole = dtype_in_place(s->fk, D) == ROWS_Q8;
    Tile *t = scratch(s, (size_t)n * sizeof(Tile));
    for (int i = 0; i < n; i++) {
        t[i].kv  = scratch(s, (size_t)KV_TILE * D * sizeof(float));
        t[i].q   = scratch(s, (size_t)Q_BLOCK * D * sizeof(float));
        t[i].q8  = whole ? scratch(s, q8_query_bytes(Q_BLOCK, D)) : NULL;
        t[i].sc  = scratch(s, (size_t)Q_BLOCK * KV_TILE * sizeof(float));
        t[i].acc = scratch(s, (size_t)Q_BLOCK * D * sizeof(float));
        t[i].skip_v = NULL;
    }
    return t;
}

// The tile's queries: those of n tokens, the t0-th of q and the next ones or, with `at`, those that at (n) lists, and
// of R heads from h0 on. Query i R + r is head h0 + r of the i-th; the 0-th of q is token tok0.
static void tile_queries(const Session *s, Tile *t, const float *q, const int *at, int t0, int n, int tok0, int h0,
                         int R) {
    size_t D = s->c->D, H = s->c->H;
    t->m = n * R;
    for (int i = 0; i < n; i++) {
        int from = at ? at[i] : t0 + i;
        memcpy(t->q + i * R * D, q + (from * H + h0) * D, R * D * sizeof(float));
        for (int r = 0; r < R; r++) t->tok[i * R + r] = tok0 + from;
    }
    if (dtype_in_place(s->fk, (int)D) == ROWS_Q8) q8_queries(t->q8, t->q, t->m, (int)D);
}

// The tile's rows: those at places p .. p+n-1 of the view w.
static void tile_rows(Tile *t, const View *w, int p, int n) {
    int listed = max_int(0, min_int(n, w->n - p));
    t->p = p;
    t->n = n;
    t->row = listed == n ? w->idx + p : t->rows;
    if (listed == n) return;
    for (int i = 0; i < listed; i++) t->rows[i] = w->idx[p + i];
    for (int i = listed; i < n; i++) t->rows[i] = w->tail + p + i - w->n;
}

// The sliding window of layer l; 0: it has none.
int layer_window(const Session *s, int l) {
    return s->c->windowed && s->c->windowed[l] ? s->c->window : 0;
}

// 1: every query of the tile sees every row of it; 0: look at each pair. The first query is the oldest and rows are
// ascending, so the causal part is settled by that query and the newest row.
static int all_visible(const Session *s, const KVHead *hd, const Tile *t) {
    // The head's newest row is asked first: it settles most decode steps and lies in the cache,
    // while the tile's newest one would have to come from memory.
    int causal = hd->src[hd->len - 1] <= t->tok[0] || hd->src[t->row[t->n - 1]] <= t->tok[0];
    if (!causal || s->rule == VIS_CAUSAL) return causal;

    // SONIC: the rows of a message are seen by that message alone, Nexus rows by whoever comes later.
    // Queries and rows of one message, beside rows of the system message, are the usual case.
    int seg = s->tok[t->tok[0]].seg;
    for (int i = 0; i < t->m; i++) {
        const Token *query = &s->tok[t->tok[i]];
        if (query->kind == TOK_EXTRA || query->seg != seg) return 0;
    }
    for (int j = 0; j < t->n; j++) {
        const Token *key = &s->tok[hd->src[t->row[j]]];
        if (key->kind != TOK_EXTRA && key->seg >= 0 && key->seg != seg) return 0;
    }
    return 1;
}

// Sets the scores of the rows that a query may not see to -INFINITY: query i and row j of the tile meet at
// x[i * by + j * bx]. Returns 0 if no query sees any row.
static int mask_tile(const Session *s, int l, const KVHead *hd, const Tile *t, float *x, size_t by, size_t bx) {
    int window = layer_window(s, l), any = 0;
    if (!window && all_visible(s, hd, t)) return 1;
    for (int i = 0; i < t->m; i++)
        for (int j = 0; j < t->n; j++) {
            int query = t->tok[i], key = hd->src[t->row[j]];
            if (kv_visible(s->rule, window, &s->tok[query], query, &s->tok[key], key)) any = 1;  // SONIC: Eq. 3 to 5
            else x[i * by + j * bx] = -INFINITY;
        }
    return any;
}

// Masks the cells of a tile that lie on no line of their query.
static void skip_cells(const Tile *t) {
    int first = t->row[0], side = t->row[t->n - 1] - first == t->n - 1;
    for (int i = 0; i < t->m; i++)
        for (int j = 0; j < t->n; j++) {
            int c = side ? first + j : t->row[j];
            float v = t->skip_v[c], o = t->skip_s[c - i];
            t->sc[i * t->n + j] += v > o ? v : o;
        }
}

// Can a row of the tile lie inside the sliding window of its first query, or of a later one? If not, it need not be
// read at all. Positions are those of tokens, as in kv_visible; SONIC's need not rise from row to row, so under its
// rules every tile is read.
static int tile_in_window(const Session *s, int l, const KVHead *hd, const Tile *t) {
    int w = layer_window(s, l);
    return !w || s->rule != VIS_CAUSAL || s->tok[hd->src[t->row[t->n - 1]]].pos > s->tok[t->tok[0]].pos - w;
}

// ---- reading a tile, in a prefill and in decode
// A decode step reads each row once, so it is as fast as memory is. Rows that lie as numbers side by
// side are read where they are: the processor sees the pattern, and the kernel asks for what lies
// beyond. Others are brought together in a tile, and meanwhile the kernel asks for what is read next, the
// next tile (Ahead). To ask for single rows of a list gains nothing: each has its own page to be found.

// The memory of rows r0 .. r0+n-1, of one tile of them at most, for a kernel to ask for while it
// computes. Packed rows and raw rows lie in different places: of those that begin packed, only the
// packed ones.
static Ahead tile_ahead(const Session *s, const KVHead *h, int v, int r0, int n) {
    n = min_int(n, KV_TILE);
    if (n <= 0) return (Ahead){0};
    if (r0 < h->packed) return s->packing->stored(s, h, v, r0, n);
    return (Ahead){ raw_row(s, h, v, r0), n * format_of(s, v)->row_bytes(s->c->D) };
}

// Single rows from anywhere come from memory at a fraction of its speed, however early they are asked
// for. A list that stays for some steps pays for a copy of its rows, which those steps read in order.
// Packed rows may change under a copy, and a GPU gathers fast enough: no copies there.
static int copies_views(const Session *s) {
    return !KV_DEV(s) && !s->packing;
}

// Makes room for the copy of a list of n rows of query head h, so that no later step has to ask for memory.
static void view_near_room(Session *s, int l, int h, int n) {
    View *w = kv_view(s, l, h);
    size_t bytes = n * raw_row_bytes(s);
    if (!copies_views(s) || bytes <= w->room) return;
    w->room = bytes;
    w->near = xrealloc(w->near, bytes);
}

// The keys (OF_K) or values (OF_V) of a list's copy.
static char *near_rows(const Session *s, const View *w, int v) {
    return w->near + (v == OF_V ? w->n * s->fk->row_bytes(s->c->D) : 0);
}

// Copies the rows that the list of query head h names side by side: its keys, then its values.
static void view_near(Session *s, int l, int h) {
    View *w = kv_view(s, l, h);
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    if (!copies_views(s) || !w->n) return;
    view_near_room(s, l, h, w->n);
    for (int v = 0; v < 2; v++) {
        size_t bytes = format_of(s, v)->row_bytes(s->c->D);
        char *to = near_rows(s, w, v);
        for (int i = 0; i < w->n; i++, to += bytes) memcpy(to, raw_row(s, hd, v, w->idx[i]), bytes);
    }
    w->is_near = 1;
}

// The keys (OF_K) or values (OF_V) of the tile's rows, of the view w: where they lie, or brought together.
// The rows this thread reads end at place `end` of the view. many 1: many queries read them, and so they become
// f32 first, but for keys of q8_0, which have their own product (D89).
static TileRows tile_read(const Session *s, const KVHead *h, const View *w, const Tile *t, int v, int many, int end) {
    const Format *f = format_of(s, v);
    int first = t->row[0], next = t->row[t->n - 1] + 1;
    TileRows x = { .x = t->kv, .dtype = dtype_in_place(f, s->c->D) };
    if (many && !(v == OF_K && x.dtype == ROWS_Q8)) x.dtype = DT_F32;
    int in_place = x.dtype != DT_F32 || f->unpack == f32_unpack;
    if (w->is_near && t->p + t->n <= w->n) {                // a tile of the copy
        const char *from = near_rows(s, w, v) + t->p * f->row_bytes(s->c->D);
        if (in_place) x.x = from;
        else f->unpack(t->kv, from, t->n, s->c->D);
        return x;
    }
    int side = next - first == t->n;                        // they lie side by side
    if (in_place && first >= h->packed && side) x.x = raw_row(s, h, v, first);
    else load_rows(s, h, v, side ? NULL : t->row, first, t->n, t->kv, x.dtype);
    if (t->p >= w->n && !(in_place && next >= h->packed)) x.next = tile_ahead(s, h, v, next, end - t->p - t->n);
    return x;
}

// Pass 1 for a tile of the view w: t->sc (m,n) = q k / sqrt(D), masked. Returns 0 if no query sees any row. many, end:
// see tile_read.
static int tile_scores(const Session *s, int l, const KVHead *hd, const View *w, Tile *t, int many, int end) {
    TileRows k = tile_read(s, hd, w, t, OF_K, many, end);
    int D = s->c->D;
    float scale = 1 / sqrtf((float)D);
    const void *q = k.dtype == ROWS_Q8 ? (const void *)t->q8 : t->q;
    scores_of(t->sc, q, k.x, k.dtype, t->m, t->n, D, scale, k.next);
    if (t->skip_v) skip_cells(t);
    return mask_tile(s, l, hd, t, t->sc, (size_t)t->n, 1);
}

// Passes 2 and 3 for a tile whose scores are in t->sc (m,n): folds it into the running softmax of its queries. Values
// take the place of keys: two tiles, and the rows they come from, would not fit into the first-level cache.
static void tile_fold(const Session *s, const KVHead *hd, const View *w, Tile *t, int many, int end) {
    TileRows v = tile_read(s, hd, w, t, OF_V, many, end);
    int D = s->c->D, n = t->n;

    // Pass 2: exponentials and their sum. What was gathered under a smaller maximum is scaled first.
    for (int i = 0; i < t->m; i++) {
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
    mix_of(t->acc, t->sc, v.x, v.dtype, t->m, n, D, 1, v.next);
}

// ---- chunks: what KV_CHUNK rows give, and how it is joined
// The running softmax of the tile's m queries over places p0 .. p1-1 of the view w -> part (m,D+2): of each query
// max, sum, and the D numbers of acc. many 1: many queries read the rows.
static void attend_chunk(const Session *s, int l, const KVHead *hd, const View *w, Tile *t, int many,
                         int p0, int p1, float *part) {
    size_t D = s->c->D;
    memset(t->acc, 0, t->m * D * sizeof(float));
    for (int i = 0; i < t->m; i++) {        // no row has been seen
        t->max[i] = -INFINITY;
        t->sum[i] = 0;
    }
    for (int p = p0; p < p1; p += KV_TILE) {
        tile_rows(t, w, p, min_int(KV_TILE, p1 - p));
        if (tile_in_window(s, l, hd, t) && tile_scores(s, l, hd, w, t, many, p1)) tile_fold(s, hd, w, t, many, p1);
    }
    for (int i = 0; i < t->m; i++, part += D + 2) {
        part[0] = t->max[i];
        part[1] = t->sum[i];
        memcpy(part + 2, t->acc + i * D, D * sizeof(float));
    }
}

// Joins the chunks of query i of a tile, `stride` floats apart: with M the largest max,
//   sum = sum_c exp(max_c - M) sum_c      out (D) = sum_c exp(max_c - M) acc_c / sum
// t->max[i] and t->sum[i] become M and sum.
static void chunks_join(Tile *t, int i, const float *part, size_t stride, int chunks, int D, float *out) {
    float max = -INFINITY, sum = 0;
    part += (size_t)i * (D + 2);
    memset(out, 0, (size_t)D * sizeof(float));
    for (int c = 0; c < chunks; c++) max = fmaxf(max, part[c * stride]);
    for (int c = 0; c < chunks; c++) {
        const float *p = part + c * stride;
        if (p[0] == -INFINITY) continue;    // the query sees no row of this chunk
        float f = expf(p[0] - max);
        sum += f * p[1];
        for (int d = 0; d < D; d++) out[d] += f * p[2 + d];
    }
    for (int d = 0; d < D; d++) out[d] /= sum;
    t->max[i] = max;
    t->sum[i] = sum;
}

// Adds to hd->mass, for methods that want KV_MASS (H2O), the attention that the tile's m queries pay to the first
// n_rows rows of the view w, whose keys are read once more: the sum over the queries of exp(score - max) / sum.
static void add_mass(const Session *s, int l, KVHead *hd, const View *w, Tile *t, int n_rows) {
    float unused = 0;
    for (int p = 0; p < n_rows; p += KV_TILE) {
        float mass[KV_TILE] = { 0 };
        tile_rows(t, w, p, min_int(KV_TILE, n_rows - p));
        if (!tile_scores(s, l, hd, w, t, 1, n_rows)) continue;
        for (int i = 0; i < t->m; i++) {
            float *x = t->sc + (size_t)i * t->n;
            exp_shift(x, t->max[i], t->n, &unused);
            for (int j = 0; j < t->n; j++) mass[j] += x[j] / t->sum[i];
        }
        for (int j = 0; j < t->n; j++) hd->mass[t->row[j]] += mass[j];
    }
}

// ---- prefill: every row held that the mask lets a query see
// No token of tok0 .. last_tok sees a row from the returned one on. Only Nexus tokens see rows that
// come after them (Eq. 5 of SONIC).
static int last_visible(const Session *s, const KVHead *hd, int tok0, int last_tok) {
    int n = hd->len;
    if (s->rule != VIS_CAUSAL)
        for (int i = tok0; i <= last_tok; i++)
            if (s->tok[i].kind == TOK_EXTRA) return n;
    while (n > 0 && hd->src[n - 1] > last_tok) n--;
    return n;
}

// Attention of tokens base+t0 .. base+t0+n-1 of this pass over every row held that the mask lets
// them see. q, out (n,H,D).
void attn_prefill(Session *s, int l, float *out, const float *q, int t0, int n) {
    if (KV_DEV(s)) {
        attn_prefill_cuda(s, l, out, q, t0, n);
        return;
    }
    int D = s->c->D, H = s->c->H, G = s->c->G, R = H / G;
    int per = Q_BLOCK / R;                  // tokens of a block
    int blocks = (n + per - 1) / per;       // of a group
    size_t mark = scratch_mark(s), N = kv_longest(s, l), chunk = Q_BLOCK * ((size_t)D + 2);
    size_t room = (N / KV_CHUNK + 1) * chunk;                       // for the chunks of one block
    Tile *tiles = tiles_new(s);
    float *parts = scratch(s, (size_t)n_threads() * room * sizeof(float));

    // A thread takes one block of one group at a time. Where a head's mass is summed, it takes all
    // blocks of a group, so that the sums have one order.
    int at_once = s->wants & KV_MASS ? blocks : 1;
    #pragma omp parallel for schedule(dynamic) if (worth_threads(n * N * H * D))
    for (int item = 0; item < G * blocks / at_once; item++) {
        int g = item % G, first = item / G * at_once;
        Tile *t = &tiles[thread_id()];
        float *part = parts + thread_id() * room;
        KVHead *hd = kv_head(s, l, g);
        for (int i0 = first * per; i0 < min_int((first + at_once) * per, n); i0 += per) {
            int tokens = min_int(per, n - i0), tok0 = s->base + t0, chunks = 0;
            int rows = last_visible(s, hd, tok0 + i0, tok0 + i0 + tokens - 1);
            if (pass_unwanted(s)) continue;         // the pass ends behind this attention
            tile_queries(s, t, q, NULL, i0, tokens, tok0, g * R, R);
            for (int r = 0; r < rows; r += KV_CHUNK, chunks++)
                attend_chunk(s, l, hd, &every_row, t, 1, r, min_int(r + KV_CHUNK, rows), part + chunks * chunk);
            for (int i = 0; i < t->m; i++)
                chunks_join(t, i, part, chunk, chunks, D, out + ((size_t)(i0 + i / R) * H + g * R + i % R) * D);
            if (hd->mass) add_mass(s, l, hd, &every_row, t, rows);
        }
    }
    scratch_reset(s, mark);
}

// ---- decode: one query a head, through the views
// Query heads h0 .. h0+m-1 of KV head g have views that agree: their n rows are read once for all, in
// `chunks` chunks.
typedef struct {
    int g, h0, m, n, chunks;
} DecodeGroup;

// out (H) = the groups of layer l -> how many.
static int decode_groups(Session *s, int l, DecodeGroup *out) {
    int R = s->c->H / s->c->G, n = 0;
    for (int h = 0; h < s->c->H; ) {
        int g = h / R, h0 = h++;
        while (h < (g + 1) * R && h - h0 < Q_BLOCK && same_as_before(s, l, h)) h++;
        const View *w = kv_view(s, l, h0);
        int rows = w->n + kv_head(s, l, g)->len - w->tail;
        out[n++] = (DecodeGroup){ g, h0, h - h0, rows, (rows + KV_CHUNK - 1) / KV_CHUNK };
    }
    return n;
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
    size_t mark = scratch_mark(s), chunk = Q_BLOCK * ((size_t)D + 2);

    DecodeGroup *group = scratch(s, (size_t)H * sizeof *group);
    int n_groups = decode_groups(s, l, group), most = (kv_longest(s, l) + KV_CHUNK - 1) / KV_CHUNK;
    float *part = scratch(s, n_groups * most * chunk * sizeof(float));
    Tile *tiles = tiles_new(s);
    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)H * kv_longest(s, l) * D))
    for (int item = 0; item < n_groups * most; item++) {
        const DecodeGroup *d = &group[item / most];
        int p0 = item % most * KV_CHUNK, p1 = min_int(p0 + KV_CHUNK, d->n);
        Tile *t = &tiles[thread_id()];
        if (p0 >= d->n) continue;
        tile_queries(s, t, q, NULL, 0, 1, s->base, d->h0, d->m);
        attend_chunk(s, l, kv_head(s, l, d->g), kv_view(s, l, d->h0), t, 0, p0, p1, part + item * chunk);
    }

    for (const DecodeGroup *d = group; d < group + n_groups; d++) {
        KVHead *hd = kv_head(s, l, d->g);
        const float *own = part + (d - group) * most * chunk;
        for (int i = 0; i < d->m; i++)
            chunks_join(tiles, i, own, chunk, d->chunks, D, out + (size_t)(d->h0 + i) * D);
        double bytes_a_row = (double)head_row_bytes(s, hd) / (hd->packed + hd->cap);
        s->clk.bytes_attended += (double)d->n * bytes_a_row;
        if (!hd->mass) continue;
        tile_queries(s, tiles, q, NULL, 0, 1, s->base, d->h0, d->m);
        add_mass(s, l, hd, kv_view(s, l, d->h0), tiles, d->n);
    }
    scratch_reset(s, mark);
}

// ---- mean softmax rows of many queries: what SnapKV, DiliLazyKV and LoopServe choose rows by
// A query head h has w queries q_1 .. q_w, and its KV head N rows with keys k_j. mean_rows computes
// the mean of the w softmax rows (SnapKV; DiliLazyKV, Sec. 3.3; LoopServe, Algorithm 3):
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
    return min_int((chunk + 1) * COLUMN_CHUNK, c->hd->len);
}

// Step 1 for a chunk: masked scores and their exponentials, with a running maximum and sum.
static void column_exps(const Session *s, const Columns *c, Tile *t, int chunk) {
    int D = s->c->D, m = c->m, to = column_end(c, chunk);
    float *max = c->max + (size_t)chunk * m, *sum = c->sum + (size_t)chunk * m;
    t->m = m;
    for (int j = 0; j < m; j++) {
        t->tok[j] = c->tok0 + j % c->n;
        max[j] = -INFINITY;
        sum[j] = 0;
    }
    for (int r = chunk * COLUMN_CHUNK; r < to; r += COLUMN_TILE) {
        int n = min_int(COLUMN_TILE, to - r);
        float *x = c->e + (size_t)r * m;
        tile_rows(t, &every_row, r, n);
        kv_load_k(s, c->hd, NULL, r, n, t->kv);
        Ahead next = tile_ahead(s, c->hd, OF_K, r + n, min_int(n, to - r - n));
        mix_of(x, t->kv, c->x, DT_F32, n, D, m, 0, next);
        mask_tile(s, c->l, c->hd, t, x, 1, (size_t)m);
        softmax_columns(x, n, m, max, sum);
        memcpy(c->top + (size_t)(r / COLUMN_TILE) * m, max, (size_t)m * sizeof *max);
    }
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
        dots_of(score + r, N, weight, c->e + (size_t)r * m, lists, min_int(COLUMN_TILE, to - r), m, add);
    }
}

// q (w,H,D), of the tokens from tok0 on -> score (G lists,N), N = kv_longest(s,l); rows behind the
// end of a shorter head are 0. Threads share the rows of a KV head, chunk by chunk.
static void mean_rows(Session *s, int l, const float *q, int tok0, int w, int lists, float *score) {
    int H = s->c->H, G = s->c->G, R = H / G, D = s->c->D, per = Q_BLOCK / R;    // queries of a head in a block
    size_t mark = scratch_mark(s), N = kv_longest(s, l), most = R * min_int(w, per);
    size_t all_chunks = N / COLUMN_CHUNK + 1, f = sizeof(float);
    Tile *tiles = tiles_new(s);
    Columns c = {
        .l   = l,
        .x   = scratch(s, D * most * f),
        .e   = scratch(s, N * most * f),
        .top = scratch(s, (N / COLUMN_TILE + 1) * most * f),
        .max = scratch(s, all_chunks * most * f),
        .sum = scratch(s, all_chunks * most * f),
    };
    for (int first = 0; first < w; first += per)
        for (int g = 0; g < G; g++) {
            float *to = score + (size_t)g * lists * N;
            c.g = g;
            c.hd = kv_head(s, l, g);
            c.n = min_int(per, w - first);
            c.m = R * c.n;
            c.q = q + (size_t)first * H * D;
            c.tok0 = tok0 + first;
            int len = c.hd->len, chunks = (len + COLUMN_CHUNK - 1) / COLUMN_CHUNK;
            column_queries(s, &c);
            #pragma omp parallel for schedule(static) if (worth_threads((size_t)c.m * len * D))
            for (int k = 0; k < chunks; k++) column_exps(s, &c, &tiles[thread_id()], k);
            columns_join(&c, chunks, w);
            #pragma omp parallel for schedule(static) if (worth_threads((size_t)c.m * len * D))
            for (int k = 0; k < chunks; k++) column_sums(&c, &tiles[thread_id()], k, lists, first > 0, to, N);
            for (int k = 0; k < lists; k++) memset(to + k * N + len, 0, (N - len) * f);
        }
    scratch_reset(s, mark);
}

// The last w = min(T,W) queries of the pass score the rows. score (H,N) = the mean of their
// softmax rows over the rows held, for every query head (D11). q (T,H,D) ends with the pass;
// N = kv_longest(s,l). A method that asks for more queries than its open hook has had kept gets a line,
// not a mean over fewer of them.
void window_scores(Session *s, int l, const float *q, int T, int W, float *score) {
    if (W > s->queries && s->base + T < s->n_tok)
        die(EXIT_RUN, "window_scores: %d queries are asked for, %d are kept (a method's open sets Session.queries)",
            W, s->queries);
    if (KV_DEV(s)) {
        window_scores_cuda(s, l, q, T, W, score);
        return;
    }
    int w = min_int(T, W), H = s->c->H;
    mean_rows(s, l, q + (size_t)(T - w) * H * s->c->D, s->n_tok - w, w, H / s->c->G, score);
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
// its sign, a float as an integer grows with its size, and infinity and NaN are the largest. A
// device that brings only some of the logits has looked itself.
static const float *checked(const Session *s, const float *logits) {
    const uint32_t infinity = 0x7f800000;
    uint32_t worst = s->picked ? (uint32_t)s->picked->worst : 0;
    for (int i = 0; i < s->c->V && !s->picked; i++) {
        FloatBits x = { logits[i] };
        if ((x.u & 0x7fffffff) > worst) worst = x.u & 0x7fffffff;
    }
    if (worst >= infinity)
        die(EXIT_MODEL, "%.300s: a logit of token %d is %s: its weights are damaged", s->c->dir,
            s->n_tok - 1, worst > infinity ? "not a number" : "infinite");
    return logits;
}

// Ends the program (exit 3) when one of the ids (n) has no row in the embedding. Every id that
// comes from outside passes here before anything is read at its place: a tokenizer, a template or a
// text may name ids that the model does not have.
void ids_must_have_rows(const Config *c, const int *ids, int n) {
    int i = ids_with_rows(c, ids, n);
    if (i < n)
        die(EXIT_MODEL, "%.300s: token id %d has no row in the embedding, which has %d rows", c->dir, ids[i],
            c->V);
}

// 1: there are positions for n more tokens and `extra` positions beside them.
int pos_fits(const Session *s, int n, int extra) {
    return !s->pos_end || s->pos_next + n + extra <= s->pos_end;
}

// One turn: the ids (n) that it adds to the dialogue -> the logits (V) of the last one. It goes through the
// model in one pass, or under --chunk N in passes of N tokens. At the end of each a method that drops rows does
// so, as at a turn's end, so that no head ever holds more than its budget and N rows.
const float *prefill(Session *s, const int *ids, int n) {
    double t0 = now();
    ids_must_have_rows(s->c, ids, n);

    // The tokens of the pass, with room for what an enter hook may add: even the whole dialogue again.
    int cap = 2 * (n + s->n_tok) + 4096;
    Token *t = s->coming = xmalloc((size_t)cap * sizeof(Token));
    for (int i = 0; i < n; i++)
        t[i] = (Token){ .id = ids[i], .pos = -1, .seg = s->turn, .kind = TOK_USER };

    // turn: a prefill begins. enter: a method may truncate the dialogue, add tokens, run own passes.
    s->decoding = s->step = 0;
    EACH_HOOK(s, p, turn) p->m->turn(s, p->ms);
    view_all(s);
    EACH_HOOK(s, p, enter) n = p->m->enter(s, p->ms, t, n, cap);

    const float *logits = NULL;
    int most = s->chunk ? s->chunk : n;
    for (int t0 = 0; t0 < n; t0 += most) logits = s->forward(s, t + t0, min_int(n - t0, most));
    free(t);
    s->coming = NULL;
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

// ---- a full context
// When -c allows no more rows, a session whose method drops rows is compressed at once, as at a prefill's
// end: the last w tokens, whose queries score the rows (Session.queries), are taken back and fed once more
// as one pass, and that pass ends as every prefill does. Returns how many rows fewer the longest head
// holds; 0: the method drops none, or no more.
int session_compress(Session *s) {
    int held = 0, left = 0, w = min_int(max_int(s->queries, 1), s->n_tok - 1);
    for (int i = 0; i < s->n_part; i++)
        if (s->part[i].m->enter) return 0;              // its own tokens cannot be fed once more
    if (!session_evicts(s) || w < 1) return 0;
    for (int l = 0; l < s->c->L; l++) held = max_int(held, kv_longest(s, l));

    Token *t = s->coming = xmalloc((size_t)w * sizeof(Token));
    memcpy(t, s->tok + s->n_tok - w, (size_t)w * sizeof(Token));
    kv_truncate(s, s->n_tok - w);
    s->decoding = 0;
    view_all(s);
    s->forward(s, t, w);
    free(t);
    s->coming = NULL;
    s->applied = budget_now(s);
    for (int l = 0; l < s->c->L; l++) left = max_int(left, kv_longest(s, l));
    return held - left;
}

// ---- the parts of a method
// The method whose name is the n characters at `name`; NULL: there is none.
const Method *method_find(const char *name, size_t n) {
    EACH_METHOD(m)
        if (strlen((*m)->name) == n && !strncmp((*m)->name, name, n)) return *m;
    return NULL;
}

// path = the file that a method needs beside the model: what its option says, else that of its name in the model's
// folder. 1: the option says it, or it is there; and where the method needs none.
int method_file(const Method *m, const Config *c, const Options *o, char path[1100]) {
    const char *given = m->file ? opt_str(o, m->file_option) : "none";
    if (*given) snprintf(path, 1100, "%s", given);
    else snprintf(path, 1100, "%s/%s", c->dir, m->file);
    return *given || file_exists(path);
}

// From "loopserve-p+lychee+pats" to three parts, each with its state, in the order of the timeline: prefill, select,
// store; and the session gets what they want together. 0, or -1 with the reason in s->err: two parts that decide the
// same thing cannot be combined, and --chunk is not for a part that looks at a turn as a whole, at its tokens before
// the pass or at all its queries at once.
static int parts_parse(Session *s, const char *spec) {
    static const char *decides[] = {        // by bit of a role
        "the prefill attention", "which rows are kept or read", "how rows are stored",
    };
    for (const char *name = spec; name; ) {
        size_t n = strcspn(name, "+");
        const Method *m = method_find(name, n);
        const char *near = m ? NULL : nearest_method(name, n);
        if (!m)
            return refuse(s, "--method: no method is called '%.*s' (%s%s%ssee --list-methods)", (int)n, name,
                          near ? "did you mean " : "", near ? near : "", near ? "? " : "");
        if (s->n_part == MAX_PARTS) return refuse(s, "--method=%s: more than %d parts", spec, MAX_PARTS);
        EACH_PART(s, p)
            for (int bit = 0; bit < 3; bit++)
                if (p->m->role & m->role & 1 << bit)
                    return refuse(s, "--method=%s: %s and %s cannot be combined, both decide %s", spec,
                                  p->m->name, m->name, decides[bit]);
        s->wants |= m->wants;
        if (m->wants & KV_QUERY) s->queries = 1;
        if (m->rule) s->rule = m->rule;
        s->attends |= m->attend != NULL;
        s->evicts |= m->evicts;
        s->acts |= m->attend || m->rule || m->project || (m->commit && m->role != ROLE_STORE);

        int at = s->n_part++;
        for (; at > 0 && m->role < s->part[at - 1].m->role; at--) s->part[at] = s->part[at - 1];
        s->part[at] = (Part){ m, xcalloc(1, m->state + 1) };
        name = name[n] ? name + n + 1 : NULL;
    }
    EACH_PART(s, p)
        if (s->chunk && (p->m->enter || p->m->attend))
            return refuse(s, "--chunk %d: %s sees a whole turn at once", s->chunk, p->m->name);
    return 0;
}

// Opens every part, whose state is all zeros, the last one first: a storage format says how rows are
// stored, and others ask. The part that has a budget sets it if the user gave none. 0, or -1 with
// the reason in s->err.
static int parts_open(Session *s) {
    for (int i = s->n_part - 1; i >= 0; i--) {
        const Method *m = s->part[i].m;
        if (m->rows && (opt_given(s->opt, "ctk") || opt_given(s->opt, "ctv")))
            return refuse(s, "%s: sets -ctk and -ctv to %s itself, leave them out", m->name, m->rows);
        if (m->rows) s->fk = s->fv = format_find(m->rows);
        if (!s->budget) s->budget = m->budget;
        if (m->open && m->open(s, s->part[i].ms)) return -1;
    }
    return 0;
}

// Closes the first n parts of a session.
static void parts_close(Session *s, int n) {
    for (Part *p = s->part; p < s->part + n; p++) {
        if (p->m->close) p->m->close(s, p->ms);
        free(p->ms);
    }
}

// ---- observers
// An observer is a method that is added behind the parts of a session and decides nothing: --trace,
// calibration, pictures. Its hooks are called as those of any part.

void *observe(Session *s, const Method *m) {
    if (s->n_observer == MAX_OBSERVERS) return NULL;
    Part *p = &s->part[s->n_part + s->n_observer++];
    *p = (Part){ m, xcalloc(1, m->state + 1) };
    if (m->wants & KV_QUERY) s->queries = max_int(s->queries, 1);
    s->watched |= m->watch != NULL;
    return p->ms;
}

void unobserve(Session *s, const Method *m) {
    Part *o = s->part + s->n_part;
    int left = 0;
    s->watched = 0;
    for (int i = 0; i < s->n_observer; i++) {
        if (o[i].m == m) {
            free(o[i].ms);
            continue;
        }
        s->watched |= o[i].m->watch != NULL;
        o[left++] = o[i];
    }
    s->n_observer = left;
}

// ---- sessions
// The budget the user asked for. A part's open hook may know better.
static void budget_options(Session *s) {
    s->budget = opt_int(s->opt, "budget");
    s->ratio = opt_given(s->opt, "ratio") ? opt_real(s->opt, "ratio") : -1;
}

// Rows of a prefill block: -b, or what suits the device. A GPU's products of 512 rows are too small
// to keep all of it at work.
int batch_rows(const Options *o, const char *device) {
    int b = opt_int(o, "batch-size");
    if (b) return b;
    return strcmp(device, "cuda") ? 512 : 2048;
}

// A session for this model, these options and this method; NULL, and the reason in err, if they do
// not fit.
Session *session_try(const Config *c, const Weights *w, const Options *o, const char *method,
                     char err[512]) {
    Session *s = xcalloc(1, sizeof *s);
    *s = (Session){ .c = c, .w = w, .opt = o, .forward = forward, .scratch = arena_new() };
    s->fk = format_find(opt_str(o, "ctk"));
    s->fv = format_find(opt_str(o, "ctv"));
    s->batch = batch_rows(o, opt_str(o, "device"));
    s->chunk = opt_int(o, "chunk");
    budget_options(s);
    s->head = xcalloc((size_t)c->L * c->G, sizeof(KVHead));
    s->view = xcalloc((size_t)c->L * c->H, sizeof(View));
    s->logits = xcalloc(c->V, sizeof(float));
    int bad = parts_parse(s, method) || parts_open(s);
#ifdef KVCOMP_CUDA
    // -d auto has become cuda or cpu on the command line.
    if (!bad && !strcmp(opt_str(o, "device"), "cuda")) bad = device_open(s);
#endif
    if (bad) {
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
    parts_close(s, s->n_part + s->n_observer);
    for (int i = 0; i < s->c->L * s->c->G; i++) head_free(s, &s->head[i]);
    if (KV_DEV(s)) device_close(s);
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        free(s->view[i].idx);
        free(s->view[i].near);
    }
    free(s->head);
    free(s->view);
    free(s->tok);
    free(s->coming);
    free(s->logits);
    arena_free(s->scratch);
    free(s);
}

// Forgets the dialogue: opens every part anew, closes what it was, and drops every row. 0, or -1 with
// the reason in s->err when a part does not open, as one whose file has gone away; then the session
// is as it was. So the new states are opened, in a copy of the session, before the old ones are closed.
int session_try_reset(Session *s) {
    Session fresh = *s;
    fresh.alt = NULL;
    fresh.packing = NULL;
    fresh.pos_end = fresh.pos_extra = 0;
    budget_options(&fresh);
    for (int i = 0; i < s->n_part; i++) fresh.part[i].ms = xcalloc(1, s->part[i].m->state + 1);
    int bad = parts_open(&fresh);

    // What goes is closed: the old states, or the new ones when a part did not open.
    parts_close(bad ? &fresh : s, s->n_part);
    if (bad) return refuse(s, "%s", fresh.err);

    *s = fresh;
    for (int i = 0; i < s->c->L * s->c->G; i++) head_free(s, &s->head[i]);
    if (KV_DEV(s)) device_reset(s);
    view_all(s);
    s->n_tok = s->pos_next = s->turn = s->decoding = s->step = 0;
    s->n_sys = s->n_foot = s->n_head = 0;
    memset(&s->clk, 0, sizeof s->clk);
    return 0;
}

// The same, but the program ends (exit 2) when a part does not open.
void session_reset(Session *s) {
    if (session_try_reset(s)) die(EXIT_USAGE, "%s", s->err);
}

// What an open hook returns when the options do not fit: puts the reason into s->err, and is -1.
int refuse(Session *s, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s->err, sizeof s->err, fmt, ap);
    va_end(ap);
    return -1;
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
// So a head holds at most B rows, at the end of a prefill and after every decoded token: the rolling cache of the
// paper.
//
// **Differs from the paper:** rows keep their positions; --streaming-rerotate numbers them anew inside the cache, as
// the paper does.
// Options: --budget B, --sink, --streaming-rerotate. The method `window` is the same without sinks.

typedef struct {
    int sink;                   // first rows that are always kept; of `window` none
    int rerotate;               // 1: a row's position becomes its place in the cache
} Streaming;

// `window` has no sinks, so any budget is legal.
static int window_open(Session *s, void *ms) {
    Streaming *x = ms;
    x->rerotate = opt_int(s->opt, "streaming-rerotate");
    if (x->rerotate && s->c->windowed)
        return refuse(s, "--streaming-rerotate: this model's sliding windows count original positions");
    return 0;
}

static int streaming_open(Session *s, void *ms) {
    Streaming *x = ms;
    x->sink = sinks(s, 4);
    if (s->ratio < 0 && s->budget <= x->sink)
        return refuse(s, "--budget %d leaves no recent row beside --sink %d", s->budget, x->sink);
    return window_open(s, ms);
}

// Drops rows of layer l when a pass is over: as many as a prefill left too many, or the oldest one behind the sinks
// after a decode step. Every head holds the same rows.
static void streaming_commit(Session *s, void *ms, int l, const float *q, int T) {
    Streaming *x = ms;
    int B = budget_now(s), sink = min_int(x->sink, B);
    if (s->n_tok <= B) return;                          // D10
    if (l == s->c->L) {                                 // the pass is over: the next token stands behind the rows
        if (x->rerotate) s->pos_next = kv_longest(s, 0);
        return;
    }

    int N = kv_longest(s, l), n = 0, *keep = scratch(s, (size_t)N * sizeof *keep);
    for (int r = 0; r < N; r++)
        if (r < sink || r >= N - (B - sink)) keep[n++] = r;
    kv_keep(s, l, keep, 0, &n);                         // one list for all heads
    for (int g = 0; g < s->c->G && x->rerotate; g++)
        for (int r = 0; r < n; r++) kv_repos(s, l, g, r, r);
}

// Method.steady of what drops rows in decode: nothing moves while the budget is not full; then every step
// drops a row.
static int rolling_steady(const Session *s, const void *ms) {
    return s->n_tok <= budget_now(s) ? STEADY : UNSTEADY;
}

static const Opt streaming_opts[] = {
    { "streaming-rerotate", 'b', "0", "re-number positions inside the cache" },
    { NULL, 0, NULL, NULL },
};

const Method streaming_method = {
    .name   = "streaming",
    .paper  = "StreamingLLM, arXiv 2309.17453",
    .keeps  = "keeps the first --sink and the most recent rows, B in all; in decode too",
    .budget = 1024,
    .uses   = "--sink 4",
    .opts   = streaming_opts,
    .role   = ROLE_SELECT,
    .evicts = 1,
    .state  = sizeof(Streaming),
    .open   = streaming_open,
    .steady = rolling_steady,
    .commit = streaming_commit,
};

const Method window_method = {
    .name   = "window",
    .paper  = "streaming without sinks",
    .keeps  = "keeps the B most recent rows; in decode too",
    .budget = 1024,
    .opts   = streaming_opts,
    .role   = ROLE_SELECT,
    .evicts = 1,
    .state  = sizeof(Streaming),
    .open   = window_open,
    .steady = rolling_steady,
    .commit = streaming_commit,
};

// ---- TOVA
// Oren, Hassid, Yarden, Adi, Schwartz: Transformers are Multi-State RNNs. arXiv 2401.06104.
//
// The smallest method that looks at a query. Whenever a layer holds more than B rows, those are dropped to which
// the last query attends least, in its mean over all heads: after a prefill as many as are too many, after a
// decode step one. All heads of a layer keep the same rows.
//
//   a[r] = sum over heads h of softmax_r(q_h . k_r / sqrt(D)), q the last query;   keep the B rows with the largest a
//
// **Differs from the paper:** nothing; a prompt is read whole and cut once, as in the authors' code.
// Options: --budget B.

static void tova_commit(Session *s, void *ms, int l, const float *q, int T) {
    if (l == s->c->L) return;
    int H = s->c->H, B = budget_now(s), N = kv_longest(s, l);
    if (N <= B) return;

    float *a = scratch(s, (size_t)H * N * sizeof *a);
    int *keep = scratch(s, (size_t)B * sizeof *keep);
    window_scores(s, l, q, T, 1, a);                    // a (H,N): one softmax row a head
    for (int h = 1; h < H; h++)                         // the first row becomes the sum of all
        for (int r = 0; r < N; r++) a[r] += a[(size_t)h * N + r];

    int n = top_k(a, N, B, keep);
    kv_keep(s, l, keep, 0, &n);
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
// table entry. All of them compute a prefill densely over the rows held. All but q8 and q4 drop rows
// once, at the end of every turn's prefill (D9); H2O drops rows in decode, too.
//
// N is the number of tokens seen and B the budget: the rows a KV head may keep. While N <= B a
// method keeps everything, at equality too (D10). n is a number of rows: those a head holds, or
// those it may drop.

// ---- the chain that SnapKV, AdaKV and PyramidKV share
// The last w rows of a head always stay (D11). The rows before them are the candidates; `cap` of
// them stay.
//   1. window_scores   how much each query head's last w queries attend to every row, as a mean
//   2. join_heads      the scores of the R query heads of a KV head become one
//   3. pool            every candidate takes the largest score among its neighbours, or their mean
//   4. top_k_rows      the `cap` candidates with the largest scores stay
// SnapKV, AdaKV and PyramidKV differ in the caps only. DiliLazyKV (section 13) does not join.

typedef struct {
    int window;                 // w, --obs-window: the last queries, whose attention is the score
    int kernel;                 // --kernel, odd: width of the neighbourhood a score is pooled over
    int mean;                   // 1: --pool avg, a neighbourhood's mean; 0: its maximum
} Snap;

// Reads the options of the chain into x; `window` is the method's default for w. Returns 0,
// or -1 with the reason in s->err. With --ratio there is no budget yet that could be too small for
// the window.
static int snap_options(Session *s, Snap *x, int window) {
    x->window = opt_given(s->opt, "obs-window") ? opt_int(s->opt, "obs-window") : window;
    x->kernel = opt_int(s->opt, "kernel");
    x->mean = !strcmp(opt_str(s->opt, "pool"), "avg");
    s->queries = max_int(s->queries, x->window);
    if (x->kernel % 2 == 0) return refuse(s, "--kernel must be odd, found %d", x->kernel);
    if (s->ratio < 0 && s->budget <= x->window)
        return refuse(s, "--budget %d leaves no row beside --obs-window %d", s->budget, x->window);
    return 0;
}

// Does layer l drop rows now? Yes at the end of a prefill that has seen more than B tokens. The
// call with l == L ends the whole pass and belongs to no layer.
static int snap_due(const Session *s, int l, int B) {
    return !s->decoding && l < s->c->L && s->n_tok > B;
}

// The number of candidates of a head: its rows before the last w.
static int candidates(const KVHead *h, int w) {
    return max_int(h->len - w, 0);
}

// Link 2. out (n): the R rows of score (R,stride) become one, their mean. out may be the first of them.
static void join_heads(float *out, const float *score, int n, size_t stride, int R) {
    for (int j = 0; j < n; j++) {
        float sum = score[j];
        for (int r = 1; r < R; r++) sum += score[r * stride + j];
        out[j] = sum / (float)R;
    }
}

// Link 3. out[j] = max of score[t] over |t-j| <= width/2; out, score (n). Neighbours are neighbours in the
// list of rows a head holds, whatever their positions in the text (D11). The width may exceed n. With --pool
// avg it is their mean, in which a neighbour outside [0,n) counts as a zero: so the authors of SnapKV compute,
// and kvpress.
static void pool(const Snap *x, float *out, const float *score, int n) {
    for (int j = 0; j < n; j++) {
        int first = max_int(j - x->kernel / 2, 0);
        int last = j + min_int(x->kernel / 2, n - 1 - j);
        float top = score[first], sum = 0;
        for (int t = first; t <= last; t++) {
            top = fmaxf(top, score[t]);
            sum += score[t];
        }
        out[j] = x->mean ? sum / (float)x->kernel : top;
    }
}

// Links 1 to 3: the pooled scores of layer l's candidates, and their numbers n (G). q (T,H,D) are the
// last queries of the pass; the last w rows of a head are no candidates. order is JOIN_POOL, whose
// result is (G,N), or POOL_ONLY, whose result is (H,N); N = kv_longest. The result lies in scratch, in
// a device session on the device.
static float *pooled_scores(Session *s, const Snap *x, int l, const float *q, int T, int w,
                            int order, int *n) {
    int H = s->c->H, G = s->c->G, R = H / G;
    size_t N = kv_longest(s, l);
    for (int g = 0; g < G; g++) n[g] = candidates(kv_head(s, l, g), w);
    if (KV_DEV(s)) return pooled_scores_cuda(s, l, q, T, x->window, n, x->kernel, x->mean, order);

    int lists = order == JOIN_POOL ? 1 : R;                 // of a group
    float *score = scratch(s, H * N * sizeof(float));
    float *pooled = scratch(s, H * N * sizeof(float));
    window_scores(s, l, q, T, x->window, score);
    for (int i = 0; i < G * lists; i++) {
        float *from = score + i * (R / lists) * N;
        if (lists == 1) join_heads(from, from, n[i], N, R);
        pool(x, pooled + i * N, from, n[i / lists]);
    }
    return pooled;
}

// For --trace: the scores of layer l's candidates, the first n (G) rows of each KV head. lists: H if
// score is (H,N), or G if it is (G,N); it lies where the cache lies, and on a device it is `sums`
// times as large. kind: "qhead" or "head".
static void trace_scores(Session *s, int l, const char *method, const char *kind, const float *score,
                         int lists, const int *n, int sums) {
    size_t N = kv_longest(s, l);
    if (!traced(s, l)) return;
    for (int i = 0; i < lists; i++) {
        int m = n[i * s->c->G / lists];
        float *x = (float *)near_here(s, score + i * N, m * sizeof *x);
        for (int r = 0; r < m && KV_DEV(s); r++) x[r] /= (float)sums;            // of the copy here
        trace_f32(s, x, m, 0, "layer%02d.%s%02d.%s.scores", l, kind, i, method);
    }
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

// Every KV head of layer l keeps its k rows with the largest score (G,N). score lies on the host.
static void keep_best(Session *s, int l, const float *score, int k) {
    size_t N = kv_longest(s, l), G = s->c->G;
    int *keep = scratch(s, G * N * sizeof *keep), *kept = scratch(s, G * sizeof *kept);
    for (size_t g = 0; g < G; g++) kept[g] = top_k(score + g * N, kv_head(s, l, g)->len, k, keep + g * N);
    kv_keep(s, l, keep, N, kept);
}

// The end of a prefill by the chain: every KV head g of layer l keeps its cap_g best candidates and the
// rows behind them. caps says how many: cap (G) from score (G,N), n (G) candidates, and base = B - w.
// q (T,H,D) are the last queries of the pass; `method` is its name in a trace.
static void snap_commit(Session *s, const Snap *x, int l, const float *q, int T, const char *method,
                        void (*caps)(Session *s, int l, const float *score, const int *n, int base, int *cap)) {
    int G = s->c->G, B = budget_now(s), w = min_int(x->window, B);           // --ratio may make B the smaller one
    if (!snap_due(s, l, B)) return;
    size_t N = kv_longest(s, l), ints = G * sizeof(int);
    int *n = scratch(s, ints), *cap = scratch(s, ints), *kept = scratch(s, ints);
    int *keep = scratch(s, N * ints);
    float *score = pooled_scores(s, x, l, q, T, w, JOIN_POOL, n);
    trace_scores(s, l, method, "head", score, G, n, 1);
    caps(s, l, score, n, B - w, cap);
    top_k_rows(s, score, G, N, n, cap, keep, N, kept);
    for (int g = 0; g < G; g++) {
        int *to = keep + g * N;
        for (int r = n[g]; r < kv_head(s, l, g)->len; r++) to[kept[g]++] = r;
    }
    kv_keep(s, l, keep, N, kept);
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
// rows held. With --pool avg --kernel 5 --obs-window 64 a first turn keeps the rows of kvpress's
// snapkv_press.py.
// Options: --budget (1024), --obs-window (32), --kernel (7), --pool (max).

// Reads the options of the chain, with w 32.
static int snapkv_open(Session *s, void *ms) {
    return snap_options(s, ms, 32);
}

// cap_g: the same for every head.
static void snapkv_caps(Session *s, int l, const float *score, const int *n, int base, int *cap) {
    for (int g = 0; g < s->c->G; g++) cap[g] = base;
}

static void snapkv_commit(Session *s, void *ms, int l, const float *q, int T) {
    snap_commit(s, ms, l, q, T, "snapkv", snapkv_caps);
}

// What the entries of the chain's methods share.
#define SNAP_CHAIN \
    .budget = 1024, .uses = "--obs-window 32, --kernel 7, --pool max", .role = ROLE_SELECT, .evicts = 1, \
    .state = sizeof(Snap), .open = snapkv_open

const Method snapkv_method = {
    SNAP_CHAIN,
    .name    = "snapkv",
    .paper   = "SnapKV, arXiv 2404.14469",
    .keeps   = "keeps the rows the last --obs-window queries attend to most, and those last "
               "rows; B in all",
    .limits  = "B must exceed --obs-window",
    .commit  = snapkv_commit,
};

// ---- ADAKV
// Feng et al.: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation.
// arXiv 2407.11550.
// A layer's budget goes where its scores are: a head whose scores are flat gets more rows than a head
// with a few high ones. The candidates of all heads compete by their scores.
//   base    = B - w
//   cnt_g   = candidates of head g among the G base best of the layer
//   cap_g   = rint(0.8 cnt_g + floor(0.2 base)), at most the candidates there are
// So it is in the authors' program (FFY0/AdaKV, adaptive_snapkv).
// **Differs from the paper:** heads are KV heads; a layer drops rows iff its candidates
// exceed G base; what a short head leaves over is not given to another; ties go to the lower (head,
// row).
// Options: --budget (1024 a head, on average), --obs-window (32), --kernel (7), --pool (max).

// The scores of all candidates of a layer, head after head: score (G,N), n (G) -> (sum of n), where score lies.
static float *adakv_pooled(Session *s, const float *score, int N, const int *n) {
    if (KV_DEV(s)) return adakv_pooled_cuda(s, score, N, n);
    float *all = scratch(s, (size_t)s->c->G * N * sizeof(float)), *to = all;
    for (int g = 0; g < s->c->G; to += n[g++]) memcpy(to, score + (size_t)g * N, n[g] * sizeof(float));
    return all;
}

// cap_g: the KV heads of layer l share G base rows. All stay where there are no more.
static void adakv_caps(Session *s, int l, const float *score, const int *n, int base, int *cap) {
    int G = s->c->G, N = kv_longest(s, l);
    int total = 0, want = G * base, found;
    for (int g = 0; g < G; g++) total += cap[g] = n[g];
    if (total <= want) return;
    int *idx = scratch(s, (size_t)want * sizeof(int));
    float *all = adakv_pooled(s, score, N, n);
    top_k_rows(s, all, 1, 0, &total, &want, idx, want, &found);

    // idx ascends: head g's winners follow those of head g-1, and its candidates end at `end`.
    int i = 0, end = 0;
    for (int g = 0; g < G; g++) {
        int first = i;
        end += n[g];
        while (i < found && idx[i] < end) i++;
        int cnt = i - first;                                                    // cnt_g
        cap[g] = (int)rint(0.8 * cnt + base / 5);                               // cap_g
    }
    if (traced(s, l)) trace_i32(s, cap, G, 0, "layer%02d.adakv.budgets", l);
}

static void adakv_commit(Session *s, void *ms, int l, const float *q, int T) {
    snap_commit(s, ms, l, q, T, "adakv", adakv_caps);
}

const Method adakv_method = {
    SNAP_CHAIN,
    .name    = "adakv",
    .paper   = "Ada-KV, arXiv 2407.11550",
    .keeps   = "snapkv with the budget shared out among a layer's heads by their scores; B a "
               "head on average",
    .limits  = "B must exceed --obs-window",
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
// **Differs from the paper:** integers throughout, so the floored step can raise the mean
// above the budget by up to (L-1)/2 rows a layer; SnapKV when N < 2 base or the model has one
// layer; a KV head keeps one set. Budgets are those of the authors' program; kvpress's pyramidkv_press.py
// counts the window into them, so its rows are others.
// Options: --budget (1024 a head, on average), --obs-window (32), --kernel (7), --pool (max).

// cap_g: that of the layer.
static void pyramidkv_caps(Session *s, int l, const float *score, const int *n, int base, int *cap) {
    int L = s->c->L, most = s->n_tok - (budget_now(s) - base);              // N - w
    int lo = base / 20, hi = 2 * base - lo, plain = L == 1 || s->n_tok < 2 * base;
    if (hi >= most) {
        hi = most;
        lo = 2 * base - hi;
    }
    for (int g = 0; g < s->c->G; g++) cap[g] = plain ? base : hi - l * ((hi - lo) / (L - 1));
}

static void pyramidkv_commit(Session *s, void *ms, int l, const float *q, int T) {
    snap_commit(s, ms, l, q, T, "pyramidkv", pyramidkv_caps);
}

const Method pyramidkv_method = {
    SNAP_CHAIN,
    .name    = "pyramidkv",
    .paper   = "PyramidKV, arXiv 2406.02069",
    .keeps   = "snapkv with budgets that fall from the first layer to the last; B a head on "
               "average",
    .limits  = "B must exceed --obs-window; snapkv while fewer than 2 (B - w) tokens were seen",
    .commit  = pyramidkv_commit,
};

// ---- H2O
// Zhang et al.: H2O: Heavy-Hitter Oracle for Efficient Generative Inference. arXiv 2306.14048.
// A few rows, the heavy hitters, draw most of the attention. So a KV head keeps them beside the
// recent rows. The mass of a row is all attention it has drawn so far, from every query and every
// query head of its group.
//   keep the last floor(B/2) rows, and of the rows before them the B - floor(B/2) of largest mass
// So it is at the end of a prefill; a decode step drops the row of least mass outside the recent half.
// **Differs from the paper:** a prefill is dense over the rows held.
// Options: --budget (1024).

// The end of a prefill, and of every decode step: the KV heads of layer l drop rows.
static void h2o_commit(Session *s, void *ms, int l, const float *q, int T) {
    int B = budget_now(s), recent = B / 2;
    if (l == s->c->L || s->n_tok <= B) return;
    size_t N = kv_longest(s, l);
    float *score = scratch(s, s->c->G * N * sizeof *score);
    for (int g = 0; g < s->c->G; g++) {
        KVHead *h = kv_head(s, l, g);
        if (KV_DEV(s)) mass_fetch_cuda(s, h);
        for (int r = 0; r < h->len; r++) score[g * N + r] = r < candidates(h, recent) ? h->mass[r] : INFINITY;
    }
    keep_best(s, l, score, B);
}

const Method h2o_method = {
    .name    = "h2o",
    .paper   = "H2O, arXiv 2306.14048",
    .keeps   = "keeps the last B/2 rows and the B/2 others that drew most attention so far; in decode too",
    .limits  = "needs a dense prefill: not with loopserve-p, a-shape, tri-shape, minference",
    .budget  = 1024,
    .role    = ROLE_SELECT | ROLE_PREFILL,
    .wants   = KV_MASS,
    .evicts  = 1,
    .steady  = rolling_steady,
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
//   score_c = (mean over the group of softmax_c(z) + epsilon) * |v_c|
// The rows of the first --sink tokens always stay and count inside B. The candidates, over which
// the softmax runs too, are the other rows held. mu and Sg (divided by the count, not by the count
// less one) are those of all queries that the prefills of the dialogue have fed at positions >=
// --sink.
// **Differs from the paper:** applied at every turn's end; a query once counted is not taken back
// when tokens are truncated. epsilon is 0, as in kvpress's expected_attention_press.py; its leaderboard
// takes .01, which lets long values stay that little attention is expected for.
// Options: --budget (1024), --sink (4), --ea-epsilon (0).

enum { FUTURE = 512 };          // positions Rbar is the mean of

typedef struct {
    long *n;                    // (L) queries counted
    double *sum;                // (L,H,D) sum of q, (L,H,D,D) sum of q q^T; the first prefill makes it, where q lies
} Expected;

// Reads the options. Returns 0, or -1 with the reason in s->err.
static int expected_open(Session *s, void *ms) {
    Expected *x = ms;
    if (s->ratio < 0 && s->budget <= sinks(s, 4))
        return refuse(s, "--budget %d leaves no row beside --sink %d", s->budget, sinks(s, 4));
    x->n = xcalloc(s->c->L, sizeof(long));
    return 0;
}

// Gives the sums back.
static void expected_close(Session *s, void *ms) {
    Expected *x = ms;
    free(x->n);
    near_drop(s, x->sum);
}

// The bytes of n, sum and outer, whether or not a prefill has made the sums yet.
static size_t expected_bytes(const Session *s, const void *ms) {
    size_t L = s->c->L, H = s->c->H, D = s->c->D;
    return L * sizeof(long) + L * H * D * (D + 1) * sizeof(double);
}

// Adds the queries q (n,H,D) of tokens t0 .. t0+n-1 of this pass at positions >= sink to sum (H,D)
// and outer (H,D,D).
static void moments_add(const Session *s, double *sum, double *outer, const float *q, int t0,
                        int n, int sink) {
    int H = s->c->H, D = s->c->D;
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        double *a = sum + (size_t)h * D, *b = outer + (size_t)h * D * D;
        for (int t = 0; t < n; t++) {
            const float *p = q + ((size_t)t * H + h) * D;
            if (s->tok[s->base + t0 + t].pos < sink) continue;
            for (int i = 0; i < D; i++) {
                a[i] += p[i];
                for (int j = 0; j < D; j++) b[(size_t)i * D + j] += (double)p[i] * p[j];
            }
        }
    }
}

// Counts the queries of a prefill, which are not rotated yet. q (n,H,D), from token t0 on. The sums
// of all layers are made at once.
static void expected_project(Session *s, void *ms, int l, const float *q, const float *k,
                             const float *v, int t0, int n) {
    Expected *x = ms;
    if (s->decoding) return;
    int H = s->c->H, D = s->c->D, sink = sinks(s, 4);
    size_t all = (size_t)s->c->L * H * D, bytes = all * (D + 1) * sizeof(double);
    if (!x->sum) x->sum = KV_DEV(s) ? (double *)near_zero_cuda(bytes) : xcalloc(1, bytes);
    for (int t = 0; t < n; t++)
        if (s->tok[s->base + t0 + t].pos >= sink) x->n[l]++;
    double *sum = x->sum + (size_t)l * H * D, *outer = x->sum + all + (size_t)l * H * D * D;
    if (KV_DEV(s)) moments_add_cuda(s, sum, outer, q, t0, n, sink);
    else moments_add(s, sum, outer, q, t0, n, sink);
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

// mu (H,D) and cov (H,D,D), on the host: mean and covariance of the queries of layer l's query heads as they will
// stand at future positions.
static void expected_queries(Session *s, const Expected *x, int l, float *mu, float *cov) {
    int H = s->c->H, D = s->c->D;
    size_t n = (size_t)H * D, square = (size_t)D * D;
    double count = x->n[l] ? (double)x->n[l] : 1;
    double *cs = scratch(s, (size_t)D * sizeof(double));
    double *tmp = scratch(s, n_threads() * (square + D) * sizeof(double));
    const double *sum = near_here(s, x->sum + l * n, n * sizeof(double));
    const double *outer = near_here(s, x->sum + s->c->L * n + l * n * D, n * D * sizeof(double));
    expected_rope(s, cs);
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        double *Sg = tmp + thread_id() * (square + D), *mean = Sg + square;
        for (int i = 0; i < D; i++) mean[i] = sum[h * D + i] / count;
        for (int i = 0; i < D; i++)
            for (int j = 0; j < D; j++)
                Sg[i * D + j] = outer[h * square + i * D + j] / count - mean[i] * mean[j];
        for (int i = 0; i < D; i++) expected_turn(Sg + i, D, D, cs);                // columns: Rbar Sg
        for (int i = 0; i < D; i++) expected_turn(Sg + (size_t)i * D, 1, D, cs);    // rows: .. Rbar^T
        expected_turn(mean, 1, D, cs);                                              // Rbar mu
        for (int i = 0; i < D; i++) mu[h * D + i] = (float)mean[i];
        for (size_t i = 0; i < square; i++) cov[h * square + i] = (float)Sg[i];
    }
}

// z (H,N), on the host: z_c of the rows of layer l, as each query head sees them; square (G,N): |v_c|^2. mu (H,D),
// cov (H,D,D).
static void expected_scores(Session *s, int l, const float *mu, const float *cov, float *z, float *square, int N) {
    int H = s->c->H, D = s->c->D, R = H / s->c->G;
    size_t tile = (size_t)KV_TILE * D, room = 2 * tile + KV_TILE;
    float *rooms = scratch(s, n_threads() * room * sizeof(float));
    if (KV_DEV(s)) {
        expected_scores_cuda(s, l, mu, cov, z, square, N);
        return;
    }
    #pragma omp parallel for schedule(static)
    for (int h = 0; h < H; h++) {
        const KVHead *hd = kv_head(s, l, h / R);
        float *k = rooms + thread_id() * room, *y = k + tile, *linear = y + tile;
        for (int r = 0; r < hd->len; r += KV_TILE) {
            int m = min_int(hd->len - r, KV_TILE);
            kv_load_k(s, hd, NULL, r, m, k);
            attn_scores(linear, mu + (size_t)h * D, k, 1, m, D, 1 / sqrtf((float)D));       // mu . k / sqrt(D)
            attn_scores(y, cov + (size_t)h * D * D, k, D, m, D, 1 / (2 * (float)D));        // y (D,m) = Sg k^T / 2D
            for (int j = 0; j < m; j++) {
                double a = linear[j];
                for (int d = 0; d < D; d++) a += (double)k[(size_t)j * D + d] * y[(size_t)d * m + j];
                z[(size_t)h * N + r + j] = (float)a;                                        // z_c
            }
            if (h % R) continue;
            kv_load_v(s, hd, NULL, r, m, k);
            for (int j = 0; j < m; j++)
                square[(size_t)h / R * N + r + j] = dot_f32(k + (size_t)j * D, k + (size_t)j * D, D);
        }
    }
}

// The end of a prefill: every KV head of layer l keeps its sinks and the candidates with the best
// scores, B in all.
static void expected_commit(Session *s, void *ms, int l, const float *q, int T) {
    int B = budget_now(s), H = s->c->H, D = s->c->D, G = s->c->G, R = H / G;
    if (!snap_due(s, l, B)) return;
    int sink = sinks(s, 4);
    float epsilon = (float)opt_real(s->opt, "ea-epsilon");
    size_t N = kv_longest(s, l), HD = (size_t)H * D, f = sizeof(float);
    float *mu = scratch(s, HD * (D + 1) * f), *cov = mu + HD;
    float *z = scratch(s, H * N * f), *score = scratch(s, G * N * f), *square = scratch(s, G * N * f);
    expected_queries(s, ms, l, mu, cov);
    expected_scores(s, l, mu, cov, z, square, N);
    #pragma omp parallel for schedule(static)
    for (int g = 0; g < G; g++) {
        const KVHead *hd = kv_head(s, l, g);
        float *to = score + g * N;
        int first = 0, n = hd->len;
        for (; first < n && hd->src[first] < sink; first++) to[first] = INFINITY;        // the first rows stay
        for (int r = 0; r < R; r++) {
            float *p = z + (g * R + r) * N, sum = 0;
            exp_shift(p + first, max_f32(p + first, n - first), n - first, &sum);
            for (int c = first; c < n; c++) p[c] /= sum;                                    // softmax_c(z)
        }
        join_heads(to + first, z + g * R * N + first, n - first, N, R);
        for (int c = first; c < n; c++) to[c] = (to[c] + epsilon) * sqrtf(square[g * N + c]);    // score_c
    }
    keep_best(s, l, score, B);
}

static const Opt expected_opts[] = {
    { "ea-epsilon", 'f', "0", "added to every expected attention before the value's length multiplies it", 0, 1 },
    { NULL, 0, NULL, NULL },
};

const Method expected_attention_method = {
    .name    = "expected-attention",
    .paper   = "Expected Attention, arXiv 2510.00636",
    .keeps   = "keeps the first --sink rows and those future queries are expected to attend "
               "to; B in all",
    .limits  = "B must exceed --sink",
    .budget  = 1024,
    .uses    = "--sink 4",
    .opts    = expected_opts,
    .role    = ROLE_SELECT,
    .evicts  = 1,
    .state   = sizeof(Expected),
    .open    = expected_open,
    .close   = expected_close,
    .project = expected_project,
    .commit  = expected_commit,
    .bytes   = expected_bytes,
};

// ---- KNORM
// Devoto, Zhao, Scardapane, Minervini: A Simple and Effective L2 Norm-Based Strategy for KV Cache
// Compression. arXiv 2406.11430.
// Keys of small norm draw much attention. So the rows with the smallest keys stay, and nobody has to
// look at a query.
//   score_r = -|k_r|
// **Differs from the paper:** every layer drops rows (the paper spares the first two); rows are dropped
// again at every turn's end. A first turn keeps the rows of kvpress's knorm_press.py.
// Options: --budget (1024).

// The end of a prefill, for methods that score a row by its key alone: every KV head of layer l keeps
// the B rows with the best scores. `score` fills out (N) for keys k (N,D), behind which is room for a row.
static void keep_by_keys(Session *s, int l, void (*score)(float *out, float *k, int N, int D)) {
    int B = budget_now(s), D = s->c->D;
    if (!snap_due(s, l, B)) return;
    size_t N = kv_longest(s, l);
    float *k = scratch(s, (N + 1) * D * sizeof *k), *x = scratch(s, s->c->G * N * sizeof *x);
    for (int g = 0; g < s->c->G; g++) {
        const KVHead *h = kv_head(s, l, g);
        kv_load_k(s, h, NULL, 0, h->len, k);
        score(x + g * N, k, h->len, D);
    }
    keep_best(s, l, x, B);
}

// out (N): -|k| of every key of k (N,D).
static void knorm_scores(float *out, float *k, int N, int D) {
    for (int r = 0; r < N; r++) out[r] = -sqrtf(dot_f32(k + (size_t)r * D, k + (size_t)r * D, D));
}

static void knorm_commit(Session *s, void *ms, int l, const float *q, int T) {
    keep_by_keys(s, l, knorm_scores);
}

const Method knorm_method = {
    .name   = "knorm",
    .paper  = "L2 norm of keys, arXiv 2406.11430",
    .keeps  = "keeps the B rows whose keys have the smallest norm",
    .budget = 1024,
    .role   = ROLE_SELECT,
    .evicts = 1,
    .commit = knorm_commit,
};

// ---- KEYDIFF
// Park et al.: KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
// Resource-Constrained Environments. arXiv 2504.15364.
// Keys that resemble all others say little that is new. So the rows stay whose keys point elsewhere than
// the mean direction of the head's keys.
//   mu = mean over the rows of k_r / |k_r|,     score_r = -cos(k_r, mu)
// **Differs from the paper:** rows are dropped at a prefill's end, not block by block (--chunk N does
// that). A first turn keeps the rows of kvpress's keydiff_press.py.
// Options: --budget (1024).

// out (N): -cos(k, mu) of every key of k (N,D). mu takes the room behind them.
static void keydiff_scores(float *out, float *k, int N, int D) {
    float *mu = k + (size_t)N * D;
    memset(mu, 0, (size_t)D * sizeof *mu);
    for (int r = 0; r < N; r++) {
        const float *key = k + (size_t)r * D;
        float length = sqrtf(dot_f32(key, key, D));
        for (int d = 0; d < D; d++) mu[d] += key[d] / length / (float)N;
    }
    for (int r = 0; r < N; r++) {
        const float *key = k + (size_t)r * D;
        out[r] = -dot_f32(key, mu, D) / sqrtf(dot_f32(key, key, D));        // |mu| is the same for all
    }
}

static void keydiff_commit(Session *s, void *ms, int l, const float *q, int T) {
    keep_by_keys(s, l, keydiff_scores);
}

const Method keydiff_method = {
    .name   = "keydiff",
    .paper  = "KeyDiff, arXiv 2504.15364",
    .keeps  = "keeps the B rows whose keys differ most from the mean direction of the keys",
    .budget = 1024,
    .role   = ROLE_SELECT,
    .evicts = 1,
    .commit = keydiff_commit,
};

// ---- Q8
// The plain way to halve a cache, after llama.cpp's q8_0: nothing is dropped, but every row is
// stored in blocks of 32 values, each an 8-bit integer, with one f16 scale a block. The format
// itself stands in lib/kernels.h.
//   value i of a block = scale * integer i,   34 bytes for 32 values: 8.5 bits a value
// Options: none. The method sets -ctk and -ctv, so they are refused beside it.

const Method q8_method = {
    .name    = "q8",
    .paper   = "blocks of 32 values with one f16 scale, as llama.cpp's q8_0",
    .keeps   = "keeps every row at 8.5 bits an element",
    .limits  = "sets -ctk and -ctv itself",
    .role    = ROLE_STORE,
    .rows    = "q8_0",
};

// ---- Q4
// Ashkboos, Mohtashami, Croci, Li, Cameron, Jaggi, Alistarh, Hoefler, Hensman: QuaRot, Outlier-Free
// 4-Bit Inference in Rotated LLMs. arXiv 2404.00456.
// 4 bits a value, beside a largest value that sets the step: one channel that is much larger than
// the others, as keys have them, leaves nothing of the others. A Hadamard transform H, a matrix of 1
// and -1 with orthogonal columns, spreads it over all numbers of its block, and is undone when a row
// is read.
//   y = H x,   y_j rounded to the nearest of the 16 odd numbers -15 .. 15 in units of max|y| / 15,
//   x = H y / 32
// for each block of 32 values with one f16 scale: 18 bytes, 4.5 bits a value. Normal numbers come
// back with an error of 9.1 %, those beside an outlier of 30 with 28 %. The format itself, which
// also says how a head_dim that is no multiple of 32 ends, stands in lib/kernels.h.
// **Differs from the paper:** H has 32 columns, where QuaRot's has head_dim: each block is read by
// itself, as an exact sum of integers, and KL is the same (NOTES.md, section 7). Levels are symmetric
// without a 0, where QuaRot's rows have a zero point a group; -7 to 7 have a larger KL. A row is
// turned back when it is read; QuaRot turns queries, and the weights behind the values, instead,
// which gives the same numbers.
//   y = H x -> q4_pack, row_put_q4 (kvcomp.cu);    x = H y / 32 -> q4_unpack, row_get_q4
// Options: none. The method sets -ctk and -ctv, so they are refused beside it.

const Method q4_method = {
    .name    = "q4",
    .paper   = "QuaRot, arXiv 2404.00456",
    .keeps   = "keeps every row at 4.5 bits an element, after a Hadamard transform of each 32",
    .limits  = "sets -ctk and -ctv itself",
    .role    = ROLE_STORE,
    .rows    = "q4",
};

// ==================================================================================================== 7 SPARSE PREFILL BASELINES
// Prefill attention over lines, and three methods whose lines, or their numbers, are fixed
// beforehand. A head holds n rows; the last of them, p0..n-1, are the rows of this pass, whose
// queries attend. Think of a matrix of cells: query row r attends to column c <= r in the cell
// (r,c). A vertical c is the column c. A slash o is the diagonal of the cells (r, r-o), o its
// offset. Row r of a head with verticals V and slashes S attends, with one softmax, to
//   M(r) = { c in V : c <= r }  u  { r-o : o in S, o <= r }
// in the head's own row numbers. Lines know the causal mask alone; a part with another one decides the
// prefill's attention itself (SONIC), and is not combined with them.
//   A-shape      the first columns and the nearest offsets
//   Tri-shape    the same, and the last rows of a turn see everything
//   MInference   the columns and offsets to which the last 64 rows attend most
// LoopServe (section 9) chooses as many lines as its input needs and uses the same code.

// ---- sets of lines
// A set of columns or offsets is a bit set (Lines, in kvcomp.h): bit i stands in word i / 64.

// Is bit i set?
static int bit_get(const uint64_t *b, int i) {
    return (int)(b[i >> 6] >> (i & 63) & 1);
}

// Sets bit i.
static void bit_set(uint64_t *b, int i) {
    b[i >> 6] |= (uint64_t)1 << (i & 63);
}

// Sets the bits lo..hi-1.
static void bit_fill(uint64_t *b, int lo, int hi) {
    while (lo < hi) {
        int end = min_int((lo | 63) + 1, hi);
        b[lo >> 6] |= ~(uint64_t)0 >> (64 - (end - lo)) << (lo & 63);
        lo = end;
    }
}

enum { LINE_BLOCK = 64 };       // query rows computed together, counted from p0; at most Q_BLOCK

typedef struct {                // what a choice of lines looks at: sampled rows of one query head
    int m;                      // sampled rows
    int n;                      // rows the head holds
    int p0;                     // the first row of this pass
    const int *R;               // (m) row numbers of the samples, ascending
    const float *P;             // (m,n) their attention A; P[i][c] = 0 for c > R[i]
} LineSample;

// list: the set bits of b (n bits), ascending. Returns their number.
static int bit_list(const uint64_t *b, int n, int *list) {
    int count = 0;
    for (int w = 0; w < (n + 63) / 64; w++)
        for (uint64_t u = b[w]; u; u &= u - 1)          // each step clears the lowest set bit of u
            list[count++] = w * 64 + __builtin_ctzll(u);
    return count;
}

// Lines (H) for the query heads of layer l, without a line yet, in scratch. n is the number of rows
// held now, the T rows of this pass included.
static Lines *lines_new(Session *s, int l, int T) {
    int H = s->c->H, R = H / s->c->G;
    Lines *a = scratch(s, (size_t)H * sizeof *a);
    for (int h = 0; h < H; h++) {
        int n = kv_head(s, l, h / R)->len;
        a[h] = (Lines){ .n = n, .p0 = n - T, .v = scratch(s, bit_bytes(n)), .s = scratch(s, bit_bytes(n)) };
        memset(a[h].v, 0, bit_bytes(n));
        memset(a[h].s, 0, bit_bytes(n));
    }
    return a;
}

// The cells of vertical x. Slash x has as many.
static long line_len(int x, int p0, int n) {
    return n - max_int(x, p0);
}

// ---- attention over lines, a block of rows at a time
// The rows of a block read the columns that any of them needs: a list, which attention reads as it does a view's
// (attend_chunk), masking the cells that lie on none of a row's lines (skip_cells).
// A lone slash makes a block read as many columns as the block has rows. So a block has few rows,
// LINE_ROWS, where runs of slashes are short, and LINE_BLOCK elsewhere, which share more.

enum { LINE_ROWS = 16 };

typedef struct {                // the lines of one query head, as its blocks use them
    const Lines *line;
    int *slash;                 // (n_slash) offsets of S, ascending
    int n_slash;
    int rows;                   // rows of a block: LINE_ROWS or LINE_BLOCK
    float *skip_v;              // (n) 0 where column c is a vertical, else -INFINITY; NULL: the head is dense
    float *skip_s;              // (n) skip_s[n-1-o]: the same of offset o; behind them LINE_BLOCK that no row has
} LinePlan;

// The plan of one head with lines a, in scratch. A dense head needs none.
static LinePlan plan_new(Session *s, const Lines *a) {
    LinePlan p = { .line = a, .rows = LINE_BLOCK };
    size_t n = a->n;
    if (a->dense) return p;
    p.slash = scratch(s, n * sizeof(int));
    p.n_slash = bit_list(a->s, a->n, p.slash);

    int runs = 0;                                       // of neighbouring slashes
    for (int i = 0; i < p.n_slash; i++) runs += !i || p.slash[i] > p.slash[i - 1] + 1;
    if (p.n_slash < LINE_BLOCK * runs) p.rows = LINE_ROWS;
    p.skip_v = scratch(s, n * sizeof(float));
    p.skip_s = scratch(s, (n + LINE_BLOCK) * sizeof(float));
    for (int x = 0; x < a->n; x++) {
        p.skip_v[x] = bit_get(a->v, x) ? 0 : -INFINITY;
        p.skip_s[a->n - 1 - x] = bit_get(a->s, x) ? 0 : -INFINITY;
    }
    for (int i = 0; i < LINE_BLOCK; i++) p.skip_s[n + i] = -INFINITY;
    return p;
}

// cols (n) = the columns that the rows r0 .. E-1 need, ascending -> how many. At the offset o these rows see the
// columns r0-o .. E-o-1. need (n bits) is room.
static int block_columns(const LinePlan *p, int r0, int E, uint64_t *need, int *cols) {
    memcpy(need, p->line->v, bit_bytes(E));
    if (p->line->dense) bit_fill(need, 0, E);
    for (int i = 0; i < p->n_slash && p->slash[i] < E; i++)
        bit_fill(need, max_int(r0 - p->slash[i], 0), E - p->slash[i]);
    int n = bit_list(need, E, cols);
    while (n && cols[n - 1] >= E) n--;                  // the last word has columns behind the block
    return n;
}

// Attention of the R query heads of KV head g over their lines (H). out, q (T,H,D). Many blocks read the same rows,
// and so they become f32 first: `as` and `hd` are session and head with such rows. The blocks of all heads are shared
// out among the threads, those with the longest rows first, so that the threads finish together.
static void group_attend(Session *s, int l, int g, const Lines *lines, float *out, const float *q,
                         int T, Tile *tiles) {
    int D = s->c->D, H = s->c->H, R = H / s->c->G;
    int blocks = (T + LINE_BLOCK - 1) / LINE_BLOCK;
    KVHead hd = *kv_head(s, l, g);
    Session as = *s;
    size_t mark = scratch_mark(s), n = hd.len, words = bit_bytes(hd.len) / sizeof(uint64_t);
    size_t room = (size_t)LINE_BLOCK * (D + 2);
    float *rows[] = { scratch(s, n * D * sizeof(float)), scratch(s, n * D * sizeof(float)) };
    LinePlan *plan = scratch(s, (size_t)R * sizeof *plan);
    uint64_t *need = scratch(s, (size_t)n_threads() * words * sizeof *need);
    int *cols = scratch(s, (size_t)n_threads() * n * sizeof *cols);
    float *parts = scratch(s, (size_t)n_threads() * room * sizeof *parts);
    #pragma omp parallel for collapse(2) schedule(static) if (worth_threads(n * D))
    for (int v = 0; v < 2; v++)
        for (int r = 0; r < hd.len; r += KV_TILE)
            load_rows(s, &hd, v, NULL, r, min_int(hd.len - r, KV_TILE), rows[v] + (size_t)r * D, DT_F32);
    for (int r = 0; r < R; r++) plan[r] = plan_new(s, &lines[g * R + r]);
    as.fk = as.fv = format_find("f32");
    hd.packed = 0;
    hd.k = (char *)rows[OF_K];
    hd.v = (char *)rows[OF_V];

    #pragma omp parallel for schedule(dynamic) if (worth_threads((size_t)T * n * R * D))
    for (int item = R * blocks - 1; item >= 0; item--) {
        const LinePlan *p = &plan[item % R];
        int h = g * R + item % R, own = thread_id(), t0 = item / R * LINE_BLOCK, end = min_int(t0 + LINE_BLOCK, T);
        Tile *t = &tiles[own];
        float *part = parts + own * room;
        if (pass_unwanted(s)) continue;             // the pass ends behind this attention
        for (int m; t0 < end; t0 += m) {
            m = min_int(end - t0, p->rows);
            int r0 = hd.len - T + t0;
            View w = { .idx = cols + own * n };
            w.n = block_columns(p, r0, r0 + m, need + own * words, w.idx);
            tile_queries(&as, t, q, NULL, t0, m, s->base, h, 1);
            t->skip_v = p->skip_v;
            if (p->skip_s) t->skip_s = p->skip_s + hd.len - 1 - r0;
            attend_chunk(&as, l, &hd, &w, t, 1, 0, w.n, part);
            for (int i = 0; i < m; i++) chunks_join(t, i, part, 0, 1, D, out + ((size_t)(t0 + i) * H + h) * D);
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
    Tile *tiles = tiles_new(s);
    for (int g = 0; g < s->c->G; g++) group_attend(s, l, g, lines, out, q, T, tiles);
}

// ---- what the methods with lines share: a sample of attention, and a choice by it
// What MInference and LoopServe look at: softmax rows of a few queries of one head. P (m,n): the
// probabilities with which the rows (m) of the pass, counted from its first, attend to the n rows of head h, 0 where
// they may not look. q (T,H,D) are the queries of the pass; t is room.
static void line_probs(const Session *s, int l, int h, const float *q, const int *rows, int m, float *P, Tile *t) {
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    int n = hd->len;

    // The scores, a block of queries against a tile of keys at a time.
    for (int i0 = 0; i0 < m; i0 += Q_BLOCK) {
        tile_queries(s, t, q, rows + i0, 0, min_int(m - i0, Q_BLOCK), s->base, h, 1);
        for (int r = 0; r < n; r += KV_TILE) {
            tile_rows(t, &every_row, r, min_int(n - r, KV_TILE));
            tile_scores(s, l, hd, &every_row, t, 1, n);
            for (int i = 0; i < t->m; i++) {
                float *to = P + (size_t)(i0 + i) * n + r;
                memcpy(to, t->sc + (size_t)i * t->n, (size_t)t->n * sizeof(float));
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

typedef struct {                // the choice of lines in one layer of one prefill
    int l, T;                   // layer; tokens of the pass
    const float *q;             // (T,H,D) queries
    const int *rows;            // (m) sampled rows of the pass, from 0; the same for all heads
    int m;
    Lines *lines;               // (H) the choice
    LoopFound *found;           // (H) what it recovers and costs; LoopServe only
} LineChoice;

// Chooses the lines of one head from its sample, for a method with the state x. room (5 n). Sets a->dense when the
// choice fails.
typedef void ChooseLines(const void *x, const LineSample *p, Lines *a, double *room, LoopFound *f);

// The choice for query heads h0 .. h1-1, as far as they are not dense already, a head a thread. In a device session
// it has computed their probabilities P (heads,m,N).
static void lines_choose(Session *s, const LineChoice *c, int h0, int h1, const float *P, ChooseLines *choose,
                         const void *x) {
    size_t mark = scratch_mark(s), N = kv_longest(s, c->l), m = c->m, threads = n_threads();
    Tile *tiles = tiles_new(s);
    double *rooms = scratch(s, threads * 5 * N * sizeof *rooms);
    float *probs = scratch(s, threads * m * N * sizeof *probs);
    int *rows = scratch(s, threads * m * sizeof *rows);
    #pragma omp parallel for schedule(dynamic) if (worth_threads(m * N * (h1 - h0) * s->c->D))
    for (int h = h0; h < h1; h++) {
        size_t own = thread_id();
        Lines *a = &c->lines[h];
        float *p = probs + own * m * N;
        int *R = rows + own * m;
        if (a->dense) continue;
        for (size_t i = 0; i < m; i++) R[i] = a->p0 + c->rows[i];
        // Algorithm 2, line 4: A[X~], the softmax rows of the samples
        if (!KV_DEV(s)) line_probs(s, c->l, h, c->q, c->rows, c->m, p, &tiles[own]);
        for (size_t i = 0; i < m && KV_DEV(s); i++)
            bytes_load_cuda(p + i * a->n, P + ((h - h0) * m + i) * N, a->n * sizeof *P);
        choose(x, &(LineSample){ c->m, a->n, a->p0, R, p }, a, rooms + own * 5 * N, &c->found[h]);
    }
    scratch_reset(s, mark);
}

// ---- A-SHAPE
// Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks.
// arXiv 2309.17453.
// What StreamingLLM keeps (section 5) serves as a mask: a prefill row sees the first rows of its head
// and the most recent ones. Every row stays in the cache.
//   V = { 0 .. init-1 },   S = { 0 .. local-1 }
// **Differs from the paper:** a mask of the prefill only: decode reads every row.
// Options: --shape-init (128), --shape-local (3968).

// Prefill attention over the lines of A-shape. out, q (T,H,D). A head is dense when no row lacks a
// column: the last row lacks the columns [init,n-local), and no row lacks more.
static void a_shape_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    int init = opt_int(s->opt, "shape-init"), local = opt_int(s->opt, "shape-local");
    Lines *a = lines_new(s, l, T);
    for (int h = 0; h < s->c->H; h++) {
        a[h].dense = a[h].n - init <= local;
        bit_fill(a[h].v, 0, min_int(init, a[h].n));
        bit_fill(a[h].s, 0, min_int(local, a[h].n));
    }
    lines_attend(s, l, a, out, q, T);
}

#define SHAPE_OPTS \
    { "shape-init", 'i', "128", "first columns every row sees", 0, INT_MAX }, \
    { "shape-local", 'i', "3968", "last columns every row sees, itself included", 1, INT_MAX }

static const Opt a_shape_opts[] = { SHAPE_OPTS, { NULL, 0, NULL, NULL } };

const Method a_shape_method = {
    .name    = "a-shape",
    .paper   = "A-shape prefill mask, after StreamingLLM, arXiv 2309.17453",
    .keeps   = "keeps every row; a prefill row reads the first --shape-init and the last "
               "--shape-local (saves reads only)",
    .limits  = "decides the prefill attention only; combine it with a decode method by +",
    .opts    = a_shape_opts,
    .role    = ROLE_PREFILL,
    .attend  = a_shape_attend,
};

// ---- TRI-SHAPE
// Li et al.: SCBench: A KV Cache-Centric Analysis of Long-Context Methods. arXiv 2412.10319.
// The lines of A-shape, but the last rows of a turn, where a question usually stands, see everything.
//   V = { 0 .. init-1 },   S = { 0 .. local-1 }
//   M(r) = { 0 .. r } for the last --shape-last rows r of the turn
// Options: --shape-init (128), --shape-local (3968), --shape-last (100).

// A-shape's attention, and behind it that of the last rows anew, which is dense.
static void tri_shape_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    int last = min_int(opt_int(s->opt, "shape-last"), T);
    size_t before = (size_t)(T - last) * s->c->H * s->c->D;
    a_shape_attend(s, ms, l, out, q, T);
    if (last) attn_prefill(s, l, out + before, q + before, T - last, last);
}

static const Opt tri_shape_opts[] = {
    SHAPE_OPTS,
    { "shape-last", 'i', "100", "last rows of a turn that see everything", 0, INT_MAX },
    { NULL, 0, NULL, NULL },
};

const Method tri_shape_method = {
    .name    = "tri-shape",
    .paper   = "Tri-shape, SCBench, arXiv 2412.10319",
    .keeps   = "keeps every row; a-shape in which a turn's last --shape-last rows read "
               "everything (saves reads only)",
    .limits  = "decides the prefill attention only; combine it with a decode method by +",
    .opts    = tri_shape_opts,
    .role    = ROLE_PREFILL,
    .attend  = tri_shape_attend,
};

// ---- MINFERENCE
// Jiang et al.: MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse
// Attention. arXiv 2407.02490.
// The last rows of a prompt show which columns and which diagonals a head attends to. So a head
// reads the heaviest of both, measured on the attention P of the turn's last 64 rows r.
//   weight of vertical c = sum over r of P(r,c)
//   weight of slash o    = sum over r of P(r,r-o)
//   V = the first 30 columns and the heaviest others, --minference-verticals in all
//   S = the nearest 100 offsets (or as many as there are) and the heaviest others, --minference-slashes in all
// **Differs from the paper:** every head is of the vertical-slash kind, and one size serves all heads
// instead of an offline search per head: 512 columns and 2,048 offsets, the authors' newer table
// for all heads of Llama-3.1-8B, and as in their code at least 30 and 50.
// Options: --minference-verticals (512), --minference-slashes (2048).

enum { MINF_LAST = 64 };        // rows looked at
static const int minference_least[] = { 30, 100 };      // columns and offsets that come first

// ChooseLines: as many columns and offsets as x (2) says. Lines always taken get an infinite weight.
static void minference_choose(const void *x, const LineSample *p, Lines *a, double *room, LoopFound *f) {
    float *sum = (float *)room;
    int *idx = (int *)(sum + a->n);
    for (int slash = 0; slash < 2; slash++) {
        memset(sum, 0, (size_t)a->n * sizeof(float));
        for (int i = 0; i < p->m; i++)
            for (int c = 0; c <= p->R[i]; c++) sum[slash ? p->R[i] - c : c] += p->P[(size_t)i * a->n + c];
        for (int j = 0; j < a->n && j < minference_least[slash]; j++) sum[j] = INFINITY;
        int k = top_k(sum, a->n, ((const int *)x)[slash], idx);
        for (int j = 0; j < k; j++) bit_set(slash ? a->s : a->v, idx[j]);
    }
}

// Chooses the lines of all heads in a device session, some KV heads at a time. Dense heads get lines too, which
// nothing reads.
static void minference_device(Session *s, const int *most, const LineChoice *c) {
    int G = s->c->G, R = s->c->H / G, l = c->l, N = kv_longest(s, l);
    int ng = line_batch_cuda(s, l, c->m), heads = ng * R;
    int *idx = scratch(s, (size_t)heads * N * sizeof(int));
    int *n = scratch(s, (size_t)3 * heads * sizeof(int)), *k = n + heads, *found = k + heads;
    for (int g = 0; g < G; g += ng) {
        Lines *a = c->lines + g * R;
        float *P = line_probs_cuda(s, l, g, ng, c->q, c->rows, c->m);
        for (int slash = 0; slash < 2; slash++) {
            for (int i = 0; i < heads; i++) {
                n[i] = a[i].n;
                k[i] = most[slash];
            }
            float *sum = line_sums_cuda(s, l, g, ng, P, c->T, c->m, slash, minference_least[slash]);
            top_k_rows(s, sum, heads, N, n, k, idx, N, found);
            for (int i = 0; i < heads; i++) {
                uint64_t *bits = slash ? a[i].s : a[i].v;
                for (int j = 0; j < found[i]; j++) bit_set(bits, idx[(size_t)i * N + j]);
            }
        }
    }
}

// Prefill attention: chooses the lines of every head, then attends over them. out, q (T,H,D). A
// head with no more rows than it takes offsets is dense.
static void minference_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    int H = s->c->H, m = min_int(T, MINF_LAST), rows[MINF_LAST];
    int most[] = { opt_int(s->opt, "minference-verticals"), opt_int(s->opt, "minference-slashes") };
    double t = now();
    LineChoice c = { l, T, q, rows, m, lines_new(s, l, T), scratch(s, H * sizeof(LoopFound)) };
    for (int i = 0; i < m; i++) rows[i] = T - m + i;
    for (int h = 0; h < H; h++) c.lines[h].dense = c.lines[h].n <= most[1];
    if (KV_DEV(s)) minference_device(s, most, &c);
    else lines_choose(s, &c, 0, H, NULL, minference_choose, most);
    timed(&s->clk.index, t);
    lines_attend(s, l, c.lines, out, q, T);
}

static const Opt minference_opts[] = {
    { "minference-verticals", 'i', "512", "columns a head, 30 at least", 30, INT_MAX },
    { "minference-slashes", 'i', "2048", "diagonals a head, 50 at least", 50, INT_MAX },
    { NULL, 0, NULL, NULL },
};

const Method minference_method = {
    .name    = "minference",
    .paper   = "MInference 1.0, arXiv 2407.02490",
    .keeps   = "keeps every row; prefill reads the heaviest columns and diagonals of a turn's "
               "last 64 rows (saves reads only)",
    .limits  = "decides the prefill attention only; combine it with a decode method by +. Its "
               "sizes are for 32k rows and more: on short contexts give fewer diagonals",
    .opts    = minference_opts,
    .role    = ROLE_PREFILL,
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
// **Differs from the paper:**
//   - one set of pages a KV head: u is the largest over its query heads;
//   - the current page is always read, inside the budget, and takes no part in the ranking;
//   - a budget that covers the context reads every row.
// Map:
//   max_d -> page_bounds, page_bounds_kernel
//   min_d -> page_bounds, page_bounds_kernel
//   u(page) -> page_scores, page_select_kernel
// Options: --budget (1024; at least 3 pages are read), --full-layers (2: the first layers read
// everything).

// ---- pages and their bounds
typedef struct {
    int full_layers;            // --full-layers
    int dtype;                  // of the bounds: that of the rows, so that bounds are exact
    int *cap;                   // (L) pages that each head's bounds have room for
    char **bound;               // (L,G) (pages,2D) of each full page max_d, then min_d
} Quest;

// Reads the options.
static int quest_open(Session *s, void *ms) {
    Quest *x = ms;
    int rows = dtype_in_place(s->fk, s->c->D);
    x->full_layers = opt_int(s->opt, "full-layers");
    x->dtype = rows == ROWS_Q8 ? DT_F32 : rows;
    x->cap = xcalloc(s->c->L, sizeof *x->cap);
    x->bound = xcalloc((size_t)s->c->L * s->c->G, sizeof *x->bound);
    return 0;
}

// Gives the bounds back. There are none when another part has refused to open.
static void quest_close(Session *s, void *ms) {
    Quest *x = ms;
    for (int i = 0; x->bound && i < s->c->L * s->c->G; i++) near_drop(s, x->bound[i]);
    free(x->bound);
    free(x->cap);
}

// Bytes of the bounds of one page.
static size_t bounds_bytes(const Session *s, const Quest *x) {
    return (size_t)2 * s->c->D * dtype_size(x->dtype);
}

// The room that is made for so many pages: a quarter more, so that it seldom has to grow.
static int quest_cap(int pages) {
    return pages + pages / 4 + 4;
}

// The bounds of one page of a head, at `to`. room (PAGE + 2,D) is room.
static void page_bounds(const Session *s, const Quest *x, const KVHead *hd, int page, float *room,
                        char *to) {
    int D = s->c->D;
    float *bound = room + (size_t)PAGE * D;
    kv_load_k(s, hd, NULL, page * PAGE, PAGE, room);
    for (int d = 0; d < D; d++) {
        float hi = room[d], lo = room[d];
        for (int r = 1; r < PAGE; r++) {
            float k = room[(size_t)r * D + d];
            hi = k > hi ? k : hi;
            lo = k < lo ? k : lo;
        }
        bound[d] = hi;                                          // max_d
        bound[D + d] = lo;                                      // min_d
    }
    from_f32(to, bound, x->dtype, (size_t)2 * D);
}

// Hook commit, after attention: the pages that this pass has filled in layer l, from .. to - 1, get their bounds.
// A page that tokens were truncated from is filled once more.
static void quest_commit(Session *s, void *ms, int l, const float *q, int T) {
    Quest *x = ms;
    int G = s->c->G, from = s->base / PAGE, to = s->n_tok / PAGE;
    size_t per = (size_t)(PAGE + 2) * s->c->D, bytes = bounds_bytes(s, x);
    if (l == s->c->L || l < x->full_layers || from == to) return;
    char **bound = x->bound + l * G;
    if (to > x->cap[l]) {
        int old = x->cap[l];
        s->changes++;                           // a device was told where the bounds lie, and they may move
        x->cap[l] = quest_cap(to);
        for (int g = 0; g < G; g++) bound[g] = near_grow(s, bound[g], old * bytes, x->cap[l] * bytes);
    }
    float *room = scratch(s, (size_t)n_threads() * per * sizeof(float));
    #pragma omp parallel for schedule(static) if (!s->decoding && !KV_DEV(s))
    for (int g = 0; g < G; g++) {
        if (KV_DEV(s)) page_bounds_cuda(s, l, g, bound[g], from, to, x->dtype);
        for (int p = from; p < to && !KV_DEV(s); p++)
            page_bounds(s, x, kv_head(s, l, g), p, room + thread_id() * per, bound[g] + p * bytes);
    }
}

// ---- before attention in a decode step: the pages with the largest bound

// u (n) of pages 0..n-1 of one KV head, the largest over its R query heads. With q split into its
// positive part q+ and its negative part q-, max(q_d max_d, q_d min_d) is q+_d max_d + q-_d min_d,
// so u is one dot product with a page's bounds. bound (n,2D), q (R,D); room (R,2D + n) is room.
static void page_scores(const Quest *x, const char *bound, int n, const float *q, int R, int D,
                        float *room, float *u) {
    float *split = room, *sc = split + (size_t)R * 2 * D;       // (R,2D) (R,n)
    for (int i = 0; i < R * D; i++) {
        float *positive = split + (size_t)(i / D) * 2 * D + i % D, *negative = positive + D;
        *positive = q[i] > 0 ? q[i] : 0;
        *negative = q[i] > 0 ? 0 : q[i];
    }
    scores_of(sc, split, bound, x->dtype, R, n, 2 * D, 1, (Ahead){0});      // u(page), for every query head
    memcpy(u, sc, (size_t)n * sizeof *u);
    for (int h = 1; h < R; h++) {
        const float *other = sc + (size_t)h * n;
        for (int p = 0; p < n; p++) u[p] = other[p] > u[p] ? other[p] : u[p];
    }
}

// Sets the views of layer l: each KV head reads its `best` pages by u, of its first `pages`, and
// every row behind those. u (G,pages) are the scores.
static void quest_choose(Session *s, const Quest *x, int l, const float *q, int pages, int best, float *u) {
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    size_t per = (size_t)R * (2 * D + pages);
    float *room = scratch(s, (size_t)n_threads() * per * sizeof *room);
    int *rows_of = scratch(s, (size_t)G * best * (PAGE + 1) * sizeof *rows_of);
    #pragma omp parallel for schedule(static) if (pages > 64)
    for (int g = 0; g < G; g++) {
        float *ug = u + (size_t)g * pages;
        int *page = rows_of + (size_t)g * best * (PAGE + 1), *rows = page + best;
        page_scores(x, x->bound[l * G + g], pages, q + (size_t)g * R * D, R, D, room + thread_id() * per, ug);
        int n = top_k(ug, pages, best, page) * PAGE;
        for (int i = 0; i < n; i++) rows[i] = page[i / PAGE] * PAGE + i % PAGE;
        view_group(s, l, g, rows, n, pages * PAGE);
    }
}

// Up to so many tokens every row is read.
static int quest_dense(const Session *s) {
    return max_int(budget_now(s), PAGE);
}

// A step launches what the step before launched, but for the first step that chooses pages.
static int quest_steady(const Session *s, const void *ms) {
    return s->n_tok - 1 != quest_dense(s);
}

// Hook select: what layer l reads in this decode step; q (H,D). Where it returns at once, the views
// say: every row.
static void quest_select(Session *s, void *ms, int l, const float *q) {
    Quest *x = ms;
    int G = s->c->G;
    int pages = (s->n_tok - 1) / PAGE;                          // those before the current page
    int best = max_int(budget_now(s) / PAGE, 3) - 1;            // the current page is read too
    if (l < x->full_layers || s->n_tok <= quest_dense(s)) return;
    double t0 = now();
    float *u = scratch(s, (size_t)G * pages * sizeof *u);
    const char *const *bound = (const char *const *)x->bound + l * G;
    if (KV_DEV(s)) quest_select_cuda(s, l, bound, pages, x->cap[l], best, q, x->dtype, traced(s, l) ? u : NULL);
    else quest_choose(s, x, l, q, pages, best, u);
    for (int g = 0; g < G && traced(s, l); g++)
        trace_f32(s, u + (size_t)g * pages, pages, 0, "layer%02d.head%02d.quest.scores", l, g);
    timed(&s->clk.index, t0);
}

// The bytes allocated for bounds now, and at most so many when n tokens are held.
static size_t quest_bytes(const Session *s, const void *ms) {
    const Quest *x = ms;
    size_t n = 0;
    for (int l = 0; l < s->c->L; l++) n += s->c->G * x->cap[l] * bounds_bytes(s, x);
    return n;
}

static size_t quest_plan(const Session *s, const void *ms, int n) {
    const Quest *x = ms;
    size_t layers = max_int(s->c->L - x->full_layers, 0);
    return layers * s->c->G * quest_cap(n / PAGE) * bounds_bytes(s, x);
}

// Hook trace: the bounds of a layer, (pages,2D), after a pass that has filled a page.
static void quest_trace(Session *s, void *ms, int l) {
    const Quest *x = ms;
    int D = s->c->D, n = s->n_tok / PAGE;
    if (l == s->c->L || l < x->full_layers || n == s->base / PAGE) return;
    size_t numbers = (size_t)n * 2 * D;
    float *bound = scratch(s, numbers * sizeof *bound);
    for (int g = 0; g < s->c->G; g++) {
        to_f32(bound, near_here(s, x->bound[l * s->c->G + g], n * bounds_bytes(s, x)), x->dtype, numbers);
        trace_f32(s, bound, n, 2 * D, "layer%02d.head%02d.quest.bounds", l, g);
    }
}

// ---- the table entry
const Method quest_method = {
    .name    = "quest",
    .paper   = "Quest, arXiv 2406.10774",
    .keeps   = "keeps every row; reads the pages of 16 rows with the largest bound, budget in "
               "all: saves reads only",
    .limits  = "needs every row: not with methods that drop some. Goes with loopserve-p and "
               "pats",
    .budget  = 1024,
    .uses    = "--full-layers 2",
    .role    = ROLE_SELECT,
    .state   = sizeof(Quest),
    .open    = quest_open,
    .close   = quest_close,
    .select  = quest_select,
    .steady  = quest_steady,
    .commit  = quest_commit,
    .bytes   = quest_bytes,
    .plan    = quest_plan,
    .trace   = quest_trace,
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
//     The bound is loose: a head may run out of lines before alpha (of the shipped model's 36 heads
//     none or one does). The default, variant b, keeps the exact residual of every line instead.
//     Variant a (--paper, with alpha .955) is the paper's loop with what it leaves out: a chosen
//     line leaves its list, a gain is at least 0, and a head without a gain left is computed in
//     full (D33).
//   - The sampled rows are stratified (D31). In variant b half of them, if there are 32 or more, only
//     validate the choice, which must recover alpha of their attention too. Variant b always takes
//     the first --sink columns and the last --loopserve-local offsets, variant a offset 0 only (D33).
//   - A short pass is computed in full, and in variant b a head whose lines would cover too many
//     cells. With alpha 1, or when no head uses its lines, the pass equals full attention bit for bit.
//   - Decode chooses at n_o >= 16 only; the paper's formula would also choose at n_o = 0, because
//     (0 - 16) % 16 is 0. The candidates are the rows held at the end of the prefill, and the rows of
//     this answer are read on top of B (D29, D37). A KV head has one set of rows, for all its query
//     heads.
//   - Algorithm 3 also hands the lines of all prefills to decode, but no formula uses them: here
//     they are not kept.
//
// No row is ever dropped, since any row may be chosen again later: the method saves reads, not
// memory. On a CPU the chosen rows are even held twice, side by side until the next choice
// (view_near).
//
// Map:
//   Definition 1 -> loopserve_enter
//   Eq. 1 -> cells_of, select_exact, select_lines_kernel
//   Algorithm 1, line 3 -> loopserve_enter
//   Algorithm 1, line 5 -> loopserve_attend, lines_choose, loop_heads_device, choose_lines_cuda
//   Algorithm 1, line 7 -> loopserve_select
//   Algorithm 2, line 1 -> sample_rows
//   Algorithm 2, line 4 -> line_probs, line_probs_cuda
//   Algorithm 2, line 5 -> residuals, line_residuals
//   Algorithm 2, line 6 -> select_faithful, best_line
//   Algorithm 2, lines 9 to 17 -> select_faithful, best_line, take_line, segment_best, take_one
//   Algorithm 3, lines 3, 6 -> loopserve_steady
//   Algorithm 3, line 4 -> loop_select, loopserve_select, ring_put, ring_put_cuda, head_put
//   Algorithm 3, line 5 -> loop_scores, loop_select, mean_rows, ring_scores_cuda, top_k_rows
//   Algorithm 3, line 7 -> view_group, view_set
//
// Options: --sink (4), --loopserve-alpha, -samples, -min-context, -max-cells, -local (prefill);
// --loopserve-first, -interval, -obs (decode); --budget (B, 1024) and --paper.

typedef struct {
    // The prefill.
    LoopRule rule;              // alpha, kept lines, hold-out, limits
    int variant_a;              // 1: Algorithm 2 as in the paper
    int m;                      // sampled rows of a pass
    int min_context;            // heads with at most so many rows are computed in full

    // Decode, Algorithm 3.
    int first;                  // the token of an answer at which the first choice is made
    int interval;               // n_d: tokens from one choice to the next
    int obs;                    // queries that choose, |X^obs|; 0: this part chooses none in decode (loopserve-p)
    int prompt_end;             // number of tokens when the last prefill ended
    int ring_from;              // the ring holds no queries of tokens before this one
    float *ring;                // (L,obs,H,D) queries, token i in slot i % obs; NULL before the first
} LoopServe;

// ---- samples and lengths

// RandomSelect: m = min(want, nh) of the nh rows of a pass, one at random from each of m strata of
// equal size; the last sample is the last row. The rows depend on turn and layer only (D31).
// R (m): the rows, ascending, counted from the first row of the pass. Returns m.
static int sample_rows(int nh, int want, int turn, int layer, int *R) {
    int m = min_int(want, nh);
    uint64_t state = mix64(mix64(mix64(1) ^ (uint64_t)turn) ^ (uint64_t)layer);
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

// The sum of the lengths of all lines, which Eq. 1 minimises. A cell where a vertical and a slash cross counts twice,
// as it does there.
static double cells_of(const Lines *a) {
    double sum = 0;
    for (int x = 0; x < a->n; x++) {
        int lines = bit_get(a->v, x) + bit_get(a->s, x);
        sum += lines * (double)line_len(x, a->p0, a->n);         // Eq. 1: l_x
    }
    return sum;
}

// ---- what a line is worth
// Line `id` of a head with n rows is slash id, or vertical id - n: of equal lines the one with the smaller id is
// chosen.

typedef struct {                // attention of the sampled rows: [0] selecting, [1] validating ones
    double rec[2];              // in the cells of the lines that are always taken, and then of all chosen ones
    double tot[2];              // in all cells
} Tally;

// The sum of x[0..31], by a tree of additions. Destroys x.
static double sum_lanes32(double *x) {
    for (int h = 16; h; h >>= 1)
        for (int i = 0; i < h; i++) x[i] += x[i + h];
    return x[0];
}

// The attention that every line would add to the lines that are always taken, into g (2n); selecting samples only.
// Even samples select; with 32 samples or more the odd ones validate. A row is summed in 32 lanes, so that a warp of
// the GPU can add in the same order.
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
                g[n + c] += x;                           // Algorithm 2, line 5, less the kept lines
                g[o] += x;
            }
        }
        t.rec[half] += sum_lanes32(rec);
        t.tot[half] += sum_lanes32(tot);
    }
    return t;
}

enum { GAIN_BLOCK = 64 };                                // lines whose largest gain is remembered
static const double LEAST_GAIN = 1e-12;                  // a residual of no more counts as nothing

// The line with the largest of the gains g (n); -1: none gains anything. With p, g are residuals, and the largest one
// per length is wanted. Gains only fall, so the largest of a block as it was at some earlier moment, top (n /
// GAIN_BLOCK, rounded up; INFINITY at first), is never too small: if the block with the largest one still has it, the
// best line is there.
static int best_line(const double *g, double *top, int n, const LineSample *p) {
    for (;;) {
        int block = 0, best = -1;
        for (int i = 1; i * GAIN_BLOCK < n; i++)
            if (top[i] > top[block]) block = i;
        double now = 0;
        for (int id = block * GAIN_BLOCK; id < min_int((block + 1) * GAIN_BLOCK, n); id++) {
            double gain = g[id];
            if (p) gain = gain > LEAST_GAIN ? gain / (double)line_len(id % p->n, p->p0, p->n) : 0;
            if (gain <= now) continue;
            now = gain;
            best = id;
        }
        if (now == top[block]) return best;
        top[block] = now;
    }
}

// ---- variant a: Algorithm 2 of the paper

// Chooses lines until the sum of their gains reaches alpha of the sampled attention. The sum is a
// lower bound of what the lines recover: a cell that a slash and a vertical share is charged once,
// by at least its own size, because it is no larger than w^max of the line that was chosen first.
// Offset 0 is added at the end: a row must see itself (D33). Returns 1 when no line promises a gain
// before alpha is reached, which makes the head dense; otherwise 0. room (5 n).
static int select_faithful(const LineSample *p, const LoopRule *u, Lines *a, double *room, LoopFound *f) {
    int n = p->n, blocks = (n + GAIN_BLOCK - 1) / GAIN_BLOCK;
    double *w = room;                                    // (2n) weights of the lines that are left
    double *heaviest = w + 2 * (size_t)n;                // what best_line remembers, of slashes and of verticals
    float *w_max = (float *)(heaviest + 2 * blocks);     // (2n) w^max: the largest cell of a line
    double tot = residuals(p, &(LoopRule){ 0 }, w).tot[0], sum = 0;
    double ol[2] = { 0, 0 };                             // ol_s, ol_v
    int taken[2] = { 0, 0 };                             // |S^|, |V^|
    memset(w_max, 0, 2 * (size_t)n * sizeof *w_max);
    for (int i = 0; i < p->m; i++)
        for (int c = 0; c <= p->R[i]; c++) {
            float x = p->P[(size_t)i * n + c], *slash = &w_max[p->R[i] - c], *vertical = &w_max[n + c];
            if (x > *slash) *slash = x;
            if (x > *vertical) *vertical = x;
        }
    for (int i = 0; i < 2 * blocks; i++) heaviest[i] = INFINITY;

    while (sum < u->alpha * tot) {                       // Algorithm 2, line 9
        int x[2];
        double gain[2] = { 0, 0 }, per_cell[2] = { 0, 0 };
        for (int v = 0; v < 2; v++) {                    // 0: slashes, 1: verticals
            // Algorithm 2, line 6; line 10: s = s[n_s]
            x[v] = best_line(w + v * n, heaviest + v * blocks, n, NULL);
            if (x[v] < 0) continue;
            gain[v] = fmax(0, w[v * n + x[v]] - ol[!v]);         // Algorithm 2, line 11: w_s - ol_v, w_v - ol_s
            double cells = line_len(x[v], p->p0, n) - taken[!v]; // l_s - |V^|, l_v - |S^|
            per_cell[v] = gain[v] / fmax(1, cells);
        }
        if (gain[0] <= 0 && gain[1] <= 0) break;
        int v = per_cell[1] > per_cell[0], line = v * n + x[v];          // Algorithm 2, line 12
        bit_set(v ? a->v : a->s, x[v]);                  // Algorithm 2, lines 13-14, 16-17
        w[line] = 0;
        taken[v]++;
        ol[v] += w_max[line];
        sum += gain[v];
    }

    bit_set(a->s, 0);
    f->mass = tot > 0 ? sum / tot : 1;
    f->cells = cells_of(a) / cells_all(a);
    return sum < u->alpha * tot;
}

// ---- variant b: exact residuals
// The residual of a line is what it would add to the attention that the chosen lines recover.

// Algorithm 2, line 13, with exact gains: chooses line `id` and books what it gains. In every sampled row one
// line of the other kind crosses it: the shared cell, if it was not covered before, leaves that line's residual.
static void take_line(const LineSample *p, const LoopRule *u, Lines *a, double *g, int id, Tally *t) {
    int n = p->n, slash = id < n, x = slash ? id : id - n;
    t->rec[0] += g[id];
    g[id] = 0;
    bit_set(slash ? a->s : a->v, x);
    for (int i = 0; i < p->m; i++) {
        int other = p->R[i] - x;
        if (other < 0 || bit_get(slash ? a->v : a->s, other)) continue;
        double cell = p->P[(size_t)i * n + (slash ? other : x)];
        if (u->holdout & i) t->rec[1] += cell;
        else g[slash ? n + other : other] -= cell;
    }
}

// Greedy for Eq. 1: takes the line with the largest residual per length until both halves of the
// samples recover alpha. Returns 1, and the head is dense, when the lines cover more than max_cells
// of the pass or no line is left before the validating half recovers alpha; otherwise 0. room (5 n).
static int select_exact(const LineSample *p, const LoopRule *u, Lines *a, double *room, LoopFound *f) {
    double *g = room, *best = g + 2 * (size_t)p->n;      // residuals of slashes, then of verticals; best_line's
    double all = cells_all(a), alpha = u->alpha;
    int failed = 0;
    for (int c = 0; c < u->sink && c < a->n; c++) bit_set(a->v, c);      // lines that are always taken
    for (int o = 0; o < u->local && o < a->n; o++) bit_set(a->s, o);
    double cells = cells_of(a);
    Tally t = residuals(p, u, g);
    for (int i = 0; i * GAIN_BLOCK < 2 * p->n; i++) best[i] = INFINITY;

    // Eq. 1: the constraint
    while (!failed && !(t.rec[0] >= alpha * t.tot[0] && t.rec[1] >= alpha * t.tot[1])) {
        int id = best_line(g, best, 2 * p->n, p);        // Algorithm 2, line 12, with exact gains
        if (id < 0) break;
        take_line(p, u, a, g, id, &t);
        cells += (double)line_len(id % p->n, p->p0, p->n);       // Eq. 1: the cost so far
        failed = cells > u->max_cells * all;
    }

    double tot = t.tot[0] + t.tot[1];
    *f = (LoopFound){ tot > 0 ? (t.rec[0] + t.rec[1]) / tot : 1, cells / all };
    return failed || (u->holdout && t.rec[1] < alpha * t.tot[1]);
}

// ---- prefill: Algorithm 1, line 5

// ChooseLines, by the variant that the options say.
static void loop_choose(const void *ms, const LineSample *p, Lines *a, double *room, LoopFound *f) {
    const LoopServe *x = ms;
    a->dense = (x->variant_a ? select_faithful : select_exact)(p, &x->rule, a, room, f);
}

// The choice on a device, some KV heads at a time: the GPU computes the probabilities and chooses the lines. Only
// the paper's own loop (variant a) chooses on the host.
static void loop_heads_device(Session *s, const LoopServe *x, const LineChoice *c) {
    int G = s->c->G, R = s->c->H / G, l = c->l, groups = line_batch_cuda(s, l, c->m), heads = groups * R;
    for (int h0 = 0; h0 < G * R; h0 += heads) {
        // Algorithm 2, line 4: A[X~]
        float *P = line_probs_cuda(s, l, h0 / R, groups, c->q, c->rows, c->m);
        if (x->variant_a) {
            lines_choose(s, c, h0, h0 + heads, P, loop_choose, x);
            continue;
        }
        choose_lines_cuda(s, l, h0 / R, groups, &x->rule, P, c->T, c->m, c->lines + h0, c->found + h0);
        for (int h = h0; h < h0 + heads; h++) c->lines[h].dense |= c->lines[h].n <= x->min_context;
    }
}

// For --trace: the sampled tokens and, of every query head, the chosen columns as tokens, the chosen
// offsets row - column, the share of the sampled attention and of the cells. A head in full has none
// of the former, and 1 for both shares.
static void loop_trace(Session *s, const LineChoice *c) {
    int H = s->c->H, l = c->l, m = c->m;
    size_t N = kv_longest(s, l);
    int *at = scratch(s, max_size(N, m) * sizeof *at), *dense = scratch(s, H * sizeof *dense);
    float *mass = scratch(s, H * sizeof *mass), *cells = scratch(s, H * sizeof *cells);
    for (int i = 0; i < m; i++) at[i] = s->base + c->rows[i];
    trace_i32(s, at, m, 0, "layer%02d.loopserve.sampled", l);
    for (int h = 0; h < H; h++) {
        const Lines *a = &c->lines[h];
        const int *src = kv_head(s, l, h * s->c->G / H)->src;
        int n = a->dense ? 0 : bit_list(a->v, a->n, at);
        for (int i = 0; i < n; i++) at[i] = src[at[i]];
        trace_i32(s, at, n, 0, "layer%02d.qhead%02d.loopserve.verticals", l, h);
        n = a->dense ? 0 : bit_list(a->s, a->n, at);
        trace_i32(s, at, n, 0, "layer%02d.qhead%02d.loopserve.slashes", l, h);
        dense[h] = a->dense;
        mass[h] = a->dense ? 1 : (float)c->found[h].mass;
        cells[h] = a->dense ? 1 : (float)c->found[h].cells;
    }
    trace_i32(s, dense, H, 0, "layer%02d.loopserve.dense", l);
    trace_f32(s, mass, H, 0, "layer%02d.loopserve.recovered", l);
    trace_f32(s, cells, H, 0, "layer%02d.loopserve.cells", l);
}

// Method.attend: chooses the lines of every head of layer l and attends along them. With alpha 1,
// or with fewer than 4 times as many rows as samples, the pass attends in full: choosing would cost
// more than it saves.
static void loopserve_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    LoopServe *x = ms;
    int H = s->c->H, m = x->m;
    if (x->rule.alpha >= 1 || T / 4 < m) {
        attn_prefill(s, l, out, q, 0, T);
        return;
    }

    double t = now();
    int *rows = scratch(s, (size_t)m * sizeof(int));
    LineChoice c = { l, T, q, rows, m, lines_new(s, l, T), scratch(s, H * sizeof(LoopFound)) };
    sample_rows(T, m, s->turn, l, rows);
    for (int h = 0; h < H; h++) c.lines[h].dense = c.lines[h].n <= x->min_context;
    if (kv_longest(s, l) > x->min_context) {             // Algorithm 1, line 5
        if (KV_DEV(s)) loop_heads_device(s, x, &c);
        else lines_choose(s, &c, 0, H, NULL, loop_choose, x);
    }
    timed(&s->clk.index, t);
    if (traced(s, l)) loop_trace(s, &c);

    lines_attend(s, l, c.lines, out, q, T);
}

// Method.enter, Definition 1: the rows of the previous answer are dropped, and its tokens are
// prefilled again in front of this turn's n tokens t (room: cap). Those rows came one by one from
// decode steps that read chosen rows only. The last token of an answer was never fed: it
// comes with this turn's ids. Returns the new number of tokens; ends the program where they do not
// fit.
static int loopserve_enter(Session *s, void *ms, Token *t, int n, int cap) {
    LoopServe *x = ms;
    int k = s->n_tok - x->prompt_end;
    if (k <= 0) return n;
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
    size_t n = (size_t)s->c->H * s->c->D, all = (size_t)s->c->L * x->obs * n * sizeof(float);
    if (!x->ring) {
        x->ring = near_grow(s, NULL, 0, all);
        if (KV_DEV(s)) ring_keep_cuda(s, x->ring, x->obs);
    }
    if (KV_DEV(s)) ring_put_cuda(ring_slot(s, x, l, token), q, n);
    else memcpy(ring_slot(s, x, l, token), q, n * sizeof(float));
}

// What every row of layer l receives from the queries in the ring, those of the tokens from `first`
// on: their softmax rows over every row held, summed over the queries and over the heads of a group
// (the sum ranks like the mean). The tokens of the ring are the last ones held, and each sees the
// rows up to its own. end (G): number of candidates, the first rows of each head. Returns (G,N), in
// the memory that the rows are in.
static float *loop_scores(Session *s, const LoopServe *x, int l, int first, const int *end) {
    int G = s->c->G, N = kv_longest(s, l), w = s->base - first + 1;     // w queries
    size_t row = (size_t)s->c->H * s->c->D;
    if (KV_DEV(s)) {
        float *score = ring_scores_cuda(s, l, ring_slot(s, x, l, 0), x->obs, first, w);
        return join_rows_cuda(s, score, end, N, 1);
    }
    float *obs = scratch(s, w * row * sizeof(float));
    float *score = scratch(s, (size_t)G * N * sizeof(float));
    for (int i = 0; i < w; i++)
        memcpy(obs + i * row, ring_slot(s, x, l, first + i), row * sizeof(float));
    mean_rows(s, l, obs, first, w, 1, score);            // Algorithm 3, line 5: sums of A[b][a]
    return score;
}

// Chooses the rows that layer l reads from now on: of the prompt_end rows that every KV head held at the end of the
// prefill the B with the largest score, and every row behind them. No more than B are read as they are.
static void loop_select(Session *s, const LoopServe *x, int l) {
    int G = s->c->G, R = s->c->H / G, B = budget_now(s);
    int first = max_int(s->base - x->obs + 1, x->ring_from);     // Algorithm 3, line 4: X^obs
    if (x->prompt_end <= B) return;
    int *idx = scratch(s, (size_t)G * B * sizeof(int));
    int *end = scratch(s, (size_t)3 * G * sizeof(int)), *want = end + G, *found = want + G;
    for (int g = 0; g < G; g++) {
        end[g] = x->prompt_end;
        want[g] = B;
    }
    float *score = loop_scores(s, x, l, first, end);
    trace_scores(s, l, "loopserve", "head", score, G, end, s->base - first + 1);
    if (KV_DEV(s)) {
        ring_select_cuda(s, l, score, end, B);
        return;
    }
    top_k_rows(s, score, G, kv_longest(s, l), end, want, idx, B, found);     // Algorithm 3, line 5: arg max
    for (int g = 0; g < G; g++)                          // Algorithm 3, line 7: what decode reads
        view_group(s, l, g, idx + (size_t)g * B, B, x->prompt_end);
    // They are read until the next choice. The first head's copy serves its group (decode_groups).
    #pragma omp parallel for schedule(static) if (worth_threads((size_t)G * B * s->c->D))
    for (int g = 0; g < G; g++) view_near(s, l, g * R);
}

// Method.steady: a step that chooses nothing launches the same kernels as the one before it. It chooses rows when it is
// due: n_o counts the tokens of the answer so far, this step's included.
static int loopserve_steady(const Session *s, const void *ms) {
    const LoopServe *x = ms;
    int n_o = s->step + 1;                               // Algorithm 3, line 6
    int n = n_o - x->first;
    return n < 0 || n % x->interval;                     // Algorithm 3, line 3
}

// Method.select: remembers the queries q (H,D) of this step and, when a choice is due, chooses the
// rows of layer l.
static void loopserve_select(Session *s, void *ms, int l, const float *q) {
    LoopServe *x = ms;
    // A device that knows the ring puts them there with the rows of K and V.
    if (!KV_DEV(s) || !x->ring) ring_put(s, x, l, s->base, q);   // Algorithm 3, line 4
    if (!loopserve_steady(s, x)) loop_select(s, x, l);   // Algorithm 1, line 7
}

// Method.commit: a prefill fills the ring of layer l anew, with the last of its queries q (T,H,D). At its end
// (l == L) the candidates and the budget are fixed, and there is room for the views, so that decode allocates
// nothing.
static void loopserve_commit(Session *s, void *ms, int l, const float *q, int T) {
    LoopServe *x = ms;
    int H = s->c->H, R = H / s->c->G, L = s->c->L, n = min_int(T, x->obs);
    if (s->decoding) return;
    if (l == L) {
        x->prompt_end = s->n_tok;
        int B = budget_now(s), most = x->prompt_end > B ? B : 0;
        for (int i = 0; x->obs && i < L * H; i++) {
            if (!layer_acts(s, i / H)) continue;
            view_room(s, i / H, i % H, most);
            if (i % R == 0) view_near_room(s, i / H, i % H, most);
        }
    }
    if (l == L || !x->obs) return;
    x->ring_from = s->n_tok - n;
    for (int i = 0; i < n; i++) ring_put(s, x, l, x->ring_from + i, q + (size_t)(T - n + i) * H * s->c->D);
}

// Method.forget: tokens from n_tok on are gone; the ring starts anew.
static void loopserve_forget(Session *s, void *ms, int n_tok) {
    LoopServe *x = ms;
    x->prompt_end = min_int(x->prompt_end, n_tok);
    x->ring_from = n_tok;
}

// ---- opening and closing

// Method.open of the prefill alone.
static int loopserve_p_open(Session *s, void *ms) {
    LoopServe *x = ms;
    const Options *o = s->opt;
    x->variant_a = opt_int(o, "paper");
    x->rule.alpha = opt_real(o, "loopserve-alpha");
    if (x->variant_a && !opt_given(o, "loopserve-alpha")) x->rule.alpha = .955;
    x->rule.max_cells = opt_real(o, "loopserve-max-cells");
    x->rule.sink = sinks(s, 4);
    x->rule.local = opt_int(o, "loopserve-local");
    x->min_context = opt_int(o, "loopserve-min-context");
    x->m = opt_int(o, "loopserve-samples");
    x->rule.holdout = x->m >= 32;
    return 0;
}

// Method.open of both halves, and of decode, which makes nothing of the rest.
static int loopserve_open(Session *s, void *ms) {
    LoopServe *x = ms;
    x->first = opt_int(s->opt, "loopserve-first");
    x->interval = opt_int(s->opt, "loopserve-interval");
    x->obs = opt_int(s->opt, "loopserve-obs");
    if (!x->obs) x->obs = x->interval;
    s->queries = max_int(s->queries, x->obs);
    return loopserve_p_open(s, x);
}

// Method.close: gives the ring back.
static void loopserve_close(Session *s, void *ms) {
    near_drop(s, ((LoopServe *)ms)->ring);
}

// Method.bytes: the ring.
static size_t loopserve_bytes(const Session *s, const void *ms) {
    const LoopServe *x = ms;
    return (size_t)s->c->L * x->obs * s->c->H * s->c->D * sizeof(float);
}

#define LOOPSERVE_OPTS_P \
    { "loopserve-alpha", 'f', "0.98", \
      "share of the attention the lines recover (--paper: .955); 1: dense", 0, 1 }, \
    { "loopserve-samples", 'i', "64", \
      "query rows looked at; a turn of fewer than 4 times as many is dense", 1, 1 << 16 }, \
    { "loopserve-min-context", 'i', "1024", "heads with no more rows are dense", 0, INT_MAX }, \
    { "loopserve-max-cells", 'f', "0.33", \
      "share of the causal cells beyond which a head is dense", 0, 1 }, \
    { "loopserve-local", 'i', "64", "last rows always read, the query's own included", 1, INT_MAX }

#define LOOPSERVE_OPTS_D \
    { "loopserve-first", 'i', "16", "first selection, at this token of an answer", 1, INT_MAX }, \
    { "loopserve-interval", 'i', "16", "n_d, tokens between selections", 1, 1 << 16 }, \
    { "loopserve-obs", 'i', "0", "last queries that choose; 0: --loopserve-interval", 0, 1 << 16 }

static const Opt loopserve_opts[]   = { LOOPSERVE_OPTS_P, LOOPSERVE_OPTS_D, { NULL, 0, NULL, NULL } };
static const Opt loopserve_p_opts[] = { LOOPSERVE_OPTS_P, { NULL, 0, NULL, NULL } };
static const Opt loopserve_d_opts[] = { LOOPSERVE_OPTS_D, { NULL, 0, NULL, NULL } };

// What the entries of both halves and of each share.
#define LOOPSERVE_BOTH \
    .state = sizeof(LoopServe), .enter = loopserve_enter, .commit = loopserve_commit, .forget = loopserve_forget
#define LOOPSERVE_DECODE \
    .budget = 1024, .open = loopserve_open, .close = loopserve_close, .select = loopserve_select, \
    .steady = loopserve_steady, .bytes = loopserve_bytes

const Method loopserve_method = {
    LOOPSERVE_BOTH,
    LOOPSERVE_DECODE,
    .name    = "loopserve",
    .paper   = "LoopServe, arXiv 2507.13681",
    .keeps   = "keeps every row; prefill reads chosen lines, decode the B rows the last "
               "queries like best and this answer (saves reads only)",
    .limits  = "prefills each answer again at the next turn. Dense up to "
               "--loopserve-min-context rows and in short turns; the first --loopserve-first "
               "tokens of an answer read every row. On a CPU the chosen rows are held twice",
    .uses    = "--sink 4, --paper",
    .opts    = loopserve_opts,
    .role    = ROLE_PREFILL | ROLE_SELECT,
    .attend  = loopserve_attend,
};

const Method loopserve_p_method = {
    LOOPSERVE_BOTH,
    .name    = "loopserve-p",
    .paper   = "LoopServe-P: its prefill alone, arXiv 2507.13681",
    .keeps   = "keeps every row; prefill reads chosen lines (saves reads only)",
    .limits  = "goes with any decode method by +, but h2o and sonic. Prefills each answer "
               "again at the next turn",
    .uses    = "--sink 4, --paper",
    .opts    = loopserve_p_opts,
    .role    = ROLE_PREFILL,
    .open    = loopserve_p_open,
    .attend  = loopserve_attend,
};

const Method loopserve_d_method = {
    LOOPSERVE_BOTH,
    LOOPSERVE_DECODE,
    .name    = "loopserve-d",
    .paper   = "LoopServe-D: its decode alone, arXiv 2507.13681",
    .keeps   = "keeps every row; decode reads the B rows the last queries like best and this "
               "answer (saves reads only)",
    .limits  = "prefills each answer again at the next turn. On a CPU the chosen rows are held twice",
    .opts    = loopserve_d_opts,
    .role    = ROLE_SELECT,
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
// the last `window` tokens, and of all tokens since the last re-pack. Rows are packed, and packed
// again, whenever T has grown by an eighth.
//   --pats-format=dense    element e of a region starts at bit e*w; a row takes D*w/8 bytes
//   --pats-format=rows64   the paper's format; a row takes 64 ceil(D/B) bytes
// While tokens arrive b(t,T) changes, but bits that are cut are gone: B[t] only grows.
//   the ratchet:     B[t] = max(B[t], b(t,T)) at every re-pack
//   --pats-tend T_end:  B[t] = b(t,T_end), as the paper, whose T is known beforehand
//
// **Differs from the paper:**
//   - The paper says nothing about decoding, packing across rows, the formula of f, or rounding: the
//     re-packs, the ratchet and all of these are ours (D24, D25, D27).
//   - The first `sink` tokens lose b_min bits only, the last `window` tokens none. The paper keeps
//     sinks and a recent window at high precision, too, but gives no sizes, and its formula alone
//     cuts b_min bits of every row (--sink=0 --pats-window=0).
//   - Rows are packed densely: the paper's blocks save nothing for w >= 12 at D = 128 and for w >=
//     9 at D = 64.
//   - Rows are f16 whatever dtype the model computes in: cutting 8 bits of a bf16 would cut into
//     its exponent (D27).
//
// Map:
//   Sec. 3, b(t) -> pats_schedule, pats_bits
//   Sec. 3, w -> regions_of, pats_repacked, repack_kernel
//   Sec. 3, B -> block_elements, pats_row_bytes, pats_write_row, repack_kernel, packed_half
//   Sec. 3, fetch -> unpack_f16, pats_load_region, packed_half, rows_unpack
//
// Options: --sink (16), --pats-schedule, -bmin, -bmax, -window, -tend, -format.

enum {
    PATS_ALIGN = 64,                // bytes: a region starts at a multiple of it
    PATS_MAX_D = 1024,              // largest head_dim
};

typedef struct {
    Packing packing;                // what the storage of rows calls (Session.packing)

    // Options.
    int schedule;                   // PATS_MIDDLE, ..
    int rows64;                     // 1: the paper's format, 0: dense
    int b_min, b_max;               // fewest and most bits a row outside the window loses
    int sink;                       // first tokens, which lose b_min bits only
    int window;                     // last tokens, which stay raw
    int T_end;                      // static: tokens of the whole dialogue; 0: the ratchet

    // State.
    int T_last;                     // tokens seen at the last re-pack
    int cut;                        // tokens [0,cut) are packed, in every head that holds them
    int decided;                    // tokens seen in the pass for which `due` holds; 0: not decided yet
    int due;                        // 1: this pass packs rows, layer by layer
    unsigned char *bits;            // (cap) B[t]: bits that the rows of token t have lost
    int cap;
} Pats;

enum {                              // Pats.schedule
    PATS_MIDDLE,
    PATS_OLD,
    PATS_NEW,
};

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
    return pats_schedule(x->schedule, x->b_min, x->b_max, src + 1, x->T_end ? x->T_end : T);     // Sec. 3, b(t)
}

// ---- rows of w bits an element

// Packs n elements of w bits, the upper w bits of h (n), to p: low bits first. Eight elements take
// w bytes, so a row (D is a multiple of 8) begins and ends on a byte.
static void pack_bits(unsigned char *p, const uint16_t *h, int n, int w) {
    uint64_t acc = 0;                                    // bits not written yet: `fill` of them
    int fill = 0;
    for (int i = 0; i < n; i++) {
        acc |= (uint64_t)(h[i] >> (16 - w)) << fill;
        for (fill += w; fill >= 8; fill -= 8, acc >>= 8) *p++ = (unsigned char)acc;
    }
    if (fill) *p = (unsigned char)acc;
}

// Elements of w bits that one of the paper's blocks holds.
static int block_elements(int w) {
    return 8 * PATS_BLOCK / w;                           // Sec. 3, B
}

// Bytes of a row of D elements of w bits.
static size_t pats_row_bytes(int rows64, int D, int w) {
    int B = block_elements(w);
    return rows64 ? (size_t)PATS_BLOCK * ((D + B - 1) / B) : (size_t)D * w / 8;
}

// Packs one row h (D) f16 to p: its bits below the upper w are cut.
static void pats_write_row(unsigned char *p, const uint16_t *h, int D, int w, int rows64) {
    int B = rows64 ? block_elements(w) : D;              // Sec. 3, B
    for (int c = 0; c < D; c += B, p += PATS_BLOCK) pack_bits(p, h + c, min_int(B, D - c), w);
}

// n rows of region g, packed at p, to buf (n,D) f16, cut bits 0. Rows of the dense format are one
// stream of elements.
static void pats_load_region(int rows64, const Region *g, const unsigned char *p, int n, int D,
                             uint16_t *buf) {
    if (!rows64) {
        unpack_f16(buf, p, n * D, g->w);
        return;
    }
    int B = block_elements(g->w);
    size_t bytes = pats_row_bytes(rows64, D, g->w);
    for (int r = 0; r < n; r++, p += bytes, buf += D)
        for (int c = 0; c < D; c += B)                   // Sec. 3, fetch: the block
            unpack_f16(buf + c, p + c / B * PATS_BLOCK, min_int(B, D - c), g->w);
}

// ---- regions

// The region that holds row r, at g or behind it.
static const Region *region_of(const Region *g, int r) {
    while (g->row0 + g->n <= r) g++;
    return g;
}

// Where row r of region g lies in the packed memory of K or V.
static unsigned char *pats_row(int rows64, char *memory, const Region *g, int r, int D) {
    return (unsigned char *)memory + g->base + (size_t)(r - g->row0) * pats_row_bytes(rows64, D, g->w);
}

// The table (an stb array) of n packed rows. Row i is row keep[i] of a head whose rows are the tokens src; it has lost
// the bits that `lost` says of its token. *bytes: what K takes under it, the guard behind the last row included; V
// takes as many.
static Region *regions_of(const unsigned char *lost, const int *src, const int *keep, int n, int rows64, int D,
                          size_t *bytes) {
    Region *reg = NULL;
    size_t end = 0;
    for (int i = 0; i < n; i++) {
        int w = 16 - lost[src[keep[i]]];                 // Sec. 3, w
        if (!i || arrlast(reg).w != w) {
            end = (end + PATS_ALIGN - 1) / PATS_ALIGN * PATS_ALIGN;
            Region next = { .row0 = i, .w = w, .base = end };
            arrput(reg, next);
        }
        arrlast(reg).n++;
        end += pats_row_bytes(rows64, D, w);
    }
    *bytes = n ? end + PATS_GUARD : 0;
    return reg;
}

// ---- reading rows: what attention calls

// The session's Pats, for the storage hooks: they are called without it.
static const Pats *pats_of(const Session *s) { return (const Pats *)s->packing; }

// Packing.load: rows r0 .. r0+n-1 of K (OF_K) or V (OF_V), all of them packed, to buf (n,D) f16.
static void pats_load(const Session *s, const KVHead *h, int v, int r0, int n, uint16_t *buf) {
    const Pats *x = pats_of(s);
    const Region *g = region_of(h->reg, r0);
    int D = s->c->D;
    while (n > 0) {
        size_t bytes = pats_row_bytes(x->rows64, D, g->w);
        int m = min_int(n, g->row0 + g->n - r0);
        const void *at = pats_row(x->rows64, v ? h->pv : h->pk, g, r0, D);
        const void *p = near_here((Session *)s, at, m * bytes + PATS_GUARD);
        pats_load_region(x->rows64, g, p, m, D, buf);
        buf += (size_t)m * D;
        r0 += m;
        n -= m;
        g++;
    }
}

// Packing.stored: where rows r0 .. r0+n-1 of K (OF_K) or V (OF_V) lie, for prefetching; only those in
// the region of r0.
static Ahead pats_stored(const Session *s, const KVHead *h, int v, int r0, int n) {
    const Region *g = region_of(h->reg, r0);
    int rows64 = pats_of(s)->rows64, D = s->c->D, rows = min_int(n, g->row0 + g->n - r0);
    const unsigned char *p = pats_row(rows64, v ? h->pv : h->pk, g, r0, D);
    return (Ahead){ (const char *)p, rows * pats_row_bytes(rows64, D, g->w) };
}

// ---- cutting rows

// -> the packed bytes of K (OF_K) or V (OF_V), `total` of them, under the table reg of n rows. Row i is the head's row
// keep[i], packed or raw now.
static char *pats_repacked(const Session *s, const KVHead *h, int v, const Region *reg, int n, size_t total,
                           const int *keep) {
    int D = s->c->D, rows64 = pats_of(s)->rows64;
    char *held = v ? h->pv : h->pk, *raw = v ? h->v : h->k;
    char *to = total ? xcalloc(total, 1) : NULL;
    const Region *old = h->reg;
    uint16_t row[PATS_MAX_D];
    for (int i = 0; i < n; i++) {
        int from = keep[i], packed = from < h->packed;
        reg = region_of(reg, i);
        if (packed) old = region_of(old, from);
        const unsigned char *p = packed ? pats_row(rows64, held, old, from, D) : NULL;
        unsigned char *place = pats_row(rows64, to, reg, i, D);
        if (packed && old->w == reg->w) {                // nothing is cut
            memcpy(place, p, pats_row_bytes(rows64, D, reg->w));
            continue;
        }
        if (packed) pats_load_region(rows64, old, p, 1, D, row);
        else memcpy(row, raw + (size_t)(from - h->packed) * D * 2, (size_t)D * 2);
        pats_write_row(place, row, D, reg->w, rows64);   // Sec. 3, w
    }
    return to;
}

// Packing.keep, and what packs: a head gets n packed rows with the bits that B[t] says, of which row i is its row
// keep[i], packed or raw now. Bits that are cut stay cut, for a row is made of what is stored. The number of packed
// rows may have changed, so move_rows follows and sizes src, pos and mass anew.
static void pats_repack(Session *s, KVHead *h, const int *keep, int n) {
    const Pats *x = pats_of(s);
    size_t total;
    Region *reg = regions_of(x->bits, h->src, keep, n, x->rows64, s->c->D, &total);
    if (KV_DEV(s)) {
        rows_repack_cuda(s, h, reg, (int)arrlen(reg), total, keep, x->rows64);
    } else {
        char *k = pats_repacked(s, h, OF_K, reg, n, total, keep);
        char *v = pats_repacked(s, h, OF_V, reg, n, total, keep);
        free(h->pk);
        free(h->pv);
        h->pk = k;
        h->pv = v;
    }
    arrfree(h->reg);
    h->reg = reg;
    h->n_reg = (int)arrlen(reg);
    h->packed = n;
    h->pk_bytes = total;
}

// Packs the rows of a head that belong to the tokens [0,cut); the others move up. same: row i for every i.
static void pats_pack_head(Session *s, const Pats *x, KVHead *h, const int *same) {
    int old = h->packed, n = 0;
    while (n < h->len && h->src[n] < x->cut) n++;
    if (!n) return;
    pats_repack(s, h, same, n);
    move_rows(s, &(Move){ h, same, h->len, n, old, (int)round_to_step(h->len - n) }, 1);
}

// Decides after a pass whether it packs rows, and raises B[t]: when the T tokens seen are an eighth
// more than at the last re-pack (D24). -> 1: rows are to be packed.
static int pats_decide(Pats *x, int T) {
    int cut = T - x->window;
    if (T > x->cap) {                           // room for them; new entries are 0
        int cap = T + T / 4 + 1024;
        x->bits = xrealloc(x->bits, (size_t)cap);
        memset(x->bits + x->cap, 0, (size_t)(cap - x->cap));
        x->cap = cap;
    }
    if (8 * (int64_t)T < 9 * (int64_t)x->T_last) return 0;
    x->T_last = T;
    for (int t = 0; t < cut; t++)
        x->bits[t] = (unsigned char)max_int(x->bits[t], pats_bits(x, t, T));
    x->cut = max_int(x->cut, cut);
    return cut > 0;
}

// Method.commit. Rows of a layer are packed when all of the pass has read them raw (D26), before
// the next layer has any: so there is never more than one layer of raw rows. At the end of the pass
// (l == L) the layers follow in which hooks do not act. Beside a part that sees whole turns every
// layer waits for the end, because that part may read raw rows there.
static void pats_commit(Session *s, void *ms, int l, const float *q, int T_pass) {
    Pats *x = ms;
    int L = s->c->L, G = s->c->G, end = l == L, late = s->acts;
    if (!x->b_max) return;
    if (x->decided != s->n_tok) {
        x->due = pats_decide(x, s->n_tok);
        x->decided = s->n_tok;
    }
    if (end) x->decided = 0;
    if (!x->due) return;
    int *same = scratch(s, (size_t)s->n_tok * sizeof *same);
    for (int i = 0; i < s->n_tok; i++) same[i] = i;
    for (int i = end ? 0 : l; i < min_int(l + 1, L); i++) {
        int now = late || !layer_acts(s, i);            // is this layer's time the end of the pass?
        if (now != end) continue;
        #pragma omp parallel for schedule(dynamic) if (s->n_tok > 1024 && !KV_DEV(s))
        for (int g = 0; g < G; g++) pats_pack_head(s, x, kv_head(s, i, g), same);
    }
}

// Method.forget: B[t] goes with the rows of the tokens from n_tok on, T_last stays.
static void pats_forget(Session *s, void *ms, int n_tok) {
    Pats *x = ms;
    if (n_tok < x->cap) memset(x->bits + n_tok, 0, (size_t)(x->cap - n_tok));
    x->cut = min_int(x->cut, n_tok);
    x->decided = 0;
}

// ---- opening, bytes, traces

// Packing.plan. What is packed lost the bits that B[t] says. The last ninth is raw, at most: B[t] was
// last raised when there were 8/9 n tokens, or the pass has ended just now.
static size_t pats_plan(const Session *s, int n, int *raw) {
    const Pats *x = pats_of(s);
    int D = s->c->D, last = n - n / 9, cut = x->b_max ? max_int(last - x->window, 0) : 0;
    size_t all = 4096 + PATS_GUARD;             // what a device rounds up to (PACK_STEP)
    *raw = n - cut;
    for (int t = 0, b, before = -1; t < cut; t++, before = b) {
        b = pats_bits(x, t, last);
        all += pats_row_bytes(x->rows64, D, 16 - b) + (b != before ? PATS_ALIGN : 0);
    }
    return cut ? 2 * all : 0;
}

// Method.open. Refuses options that do not fit each other, the model, or the other parts.
static int pats_open(Session *s, void *ms) {
    Pats *x = ms;
    const Options *o = s->opt;
    x->schedule = opt_choice(o, "pats-schedule", "middle|old|new");
    x->rows64 = opt_choice(o, "pats-format", "dense|rows64");
    x->b_max = opt_int(o, "pats-bmax");
    x->b_min = min_int(opt_int(o, "pats-bmin"), x->b_max);       // b_max 0: full attention
    x->sink = sinks(s, 16);
    x->window = opt_int(o, "pats-window");
    x->T_end = opt_int(o, "pats-tend");
    if (x->schedule == PATS_NEW && !x->T_end)
        return refuse(s, "pats: --pats-schedule=new cannot follow a dialogue that grows, for bits that are cut are "
                         "gone: give --pats-tend, the tokens of the whole dialogue");
    if (s->c->D % 8 || s->c->D > PATS_MAX_D)
        return refuse(s, "pats: head_dim is %d, needs a multiple of 8 up to %d "
                         "(a packed row must end on a byte)", s->c->D, PATS_MAX_D);
    if (strcmp(opt_str(o, "ctk"), "f16") || strcmp(opt_str(o, "ctv"), "f16"))
        return refuse(s, "pats: packs f16 rows, so -ctk and -ctv must be f16");
    for (int i = 0; i < s->n_part; i++)
        if (!strcmp(s->part[i].m->name, "streaming") && opt_int(o, "streaming-rerotate"))
            return refuse(s, "pats: --streaming-rerotate would rotate keys whose bits are cut already");
    s->fk = s->fv = format_find("f16");
    x->packing = (Packing){ pats_load, pats_stored, pats_repack, pats_plan, !x->rows64 };
    s->packing = &x->packing;
    return 0;
}

// Method.close.
static void pats_close(Session *s, void *ms) {
    free(((Pats *)ms)->bits);
}

// Method.bytes: B[t].
static size_t pats_bytes(const Session *s, const void *ms) {
    return (size_t)((const Pats *)ms)->cap;
}

// Hook trace, after a pass that has packed rows: B[t] of every token; of every head its regions (row0,
// n, w, base) and its packed bytes, up to a multiple of 8: behind the last row lies the guard, all zeros.
static void pats_trace(Session *s, void *ms, int l) {
    const Pats *x = ms;
    if (!x->b_max || !x->due) return;
    if (l == s->c->L) {
        int *bits = scratch(s, (size_t)s->n_tok * sizeof *bits);
        for (int t = 0; t < s->n_tok; t++) bits[t] = x->bits[t];
        trace_i32(s, bits, s->n_tok, 0, "pats.bits");
    }
    for (int g = 0; g < s->c->G && l < s->c->L; g++) {
        const KVHead *h = kv_head(s, l, g);
        int *reg = scratch(s, (size_t)(4 * h->n_reg + 1) * sizeof *reg);
        int used = h->n_reg ? (int)(h->pk_bytes - PATS_GUARD + 7) / 8 * 8 : 0;
        for (int i = 0; i < h->n_reg; i++) {
            const Region r = h->reg[i];
            memcpy(reg + 4 * i, (int[]){ r.row0, r.n, r.w, (int)r.base }, 4 * sizeof *reg);
        }
        trace_i32(s, reg, h->n_reg, 4, "layer%02d.head%02d.pats.regions", l, g);
        for (int v = 0; v < 2; v++) {
            const void *packed = used ? near_here(s, v ? h->pv : h->pk, used) : "";
            trace_u8(s, packed, used, 0, "layer%02d.head%02d.pats.packed_%s", l, g, v ? "v" : "k");
        }
    }
}

static const Opt pats_opts[] = {
    { "pats-schedule", 'c', "middle|old|new", "which rows lose most bits; new: with --pats-tend only" },
    { "pats-bmin",     'i', "2",
      "bits every row outside the window loses, and the first --sink tokens no more", 0, 10 },
    { "pats-bmax",     'i', "8",   "most bits a row loses, of 10 that an f16 has for it; 0: none, as full", 0, 10 },
    { "pats-window",   'i', "128", "last tokens that stay raw", 0, INT_MAX },
    { "pats-tend",     'i', "0",
      "tokens of the whole dialogue, for the bits of its end; 0: more bits as it grows", 0, INT_MAX },
    { "pats-format",   'c', "dense|rows64",
      "packed bytes: bit after bit, or the paper's 64-byte blocks; the same values" },
    { NULL, 0, NULL, NULL },
};

const Method pats_method = {
    .name    = "pats",
    .paper   = "PATS: Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs",
    .keeps   = "keeps every row; rows outside the last --pats-window tokens lose 2..8 low "
               "bits of f16 and are packed",
    .limits  = "needs head_dim % 8 == 0 and -ctk/-ctv f16; schedule new needs --pats-tend, "
               "without it middle drifts towards more cutting in long decodes",
    .uses    = "--sink 16",
    .opts    = pats_opts,
    .role    = ROLE_STORE,
    .state   = sizeof(Pats),
    .open    = pats_open,
    .close   = pats_close,
    .commit  = pats_commit,
    .bytes   = pats_bytes,
    .forget  = pats_forget,
    .trace   = pats_trace,
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
//   r_u = max over the chunks v below node u of |v - mu_u|          (Sec. 4.1, covering radius)
//   q.v <= q.mu_u + |q| r_u        for every chunk v below node u   (Eq. 2, the upper bound UB)
//
// The index of one KV head of one layer is a tree: coarse units -> clusters -> chunks. A step reads
// the first rows [0,sink), the rows of the chunks it retrieves, budget rows in all, and on top of
// them every row from t_idx on: the recent buffer, which is not indexed yet. Nothing is dropped.
//
// **Differs from the paper:**
//   - A score is q.mu without |q| r, because the bound favours loose clusters; --paper takes the
//     bound. A KV head has one list of chunks: of its query heads, each as long as 1, the best counts.
//   - Eq. 2 bounds chunk keys, not token keys. A unit's radius covers the chunks below it, not only
//     the centres of its clusters; otherwise it bounds nothing.
//   - A centre that moves adds its shift to the radius; "moving average + expansion" alone loses
//     the older members. The new ball is the smallest that holds the old ball and the new key.
//     Centres are kept in bf16, and the radius covers what rounding shifts.
//   - A new chunk joins the nearest cluster and the unit above that, not the nearest unit.
//   - A buffer of 128 (Appendix A) holds the last rows all the time, outside the index and always
//     read; Algorithm 1 starts with an empty one (D29, D43). A mark of Table 4 inside 3.14, a.b,
//     a::b, 10:30 or -> ends no chunk.
//   - The index is built again when the chunks have doubled, because grafting alone never makes a
//     cluster (D41).
//   - The paper gives k_g and k_c no value: clusters are taken until the budget is full, and
//     there are no coarse units unless --lychee-kg says how many a step opens.
//   - k-means starts from evenly spaced chunks, so that runs repeat. Of equally good ends of a chunk
//     the last one is taken, and a control token ends a chunk as an empty line does.
// As the paper (Appendix A): 16 sinks, chunks of 8 to 16 tokens, two chunks a cluster, 10 rounds of
// k-means, and two first layers that read every row.
//
// Map:
//   Table 4 -> delimiter_level
//   Sec. 4.1 -> chunk_key, node_cover, chunk_keys_kernel, cover_kernel
//   Sec. 4.3 -> chunk_end, kmeans, assign_kernel, centres_kernel
//   Sec. 4.4 -> node_absorb, graft_kernel
//   Eq. 2 -> score_nodes, node_score, cluster_select_kernel
//   Algorithm 1, line 2 -> lychee_commit, chunk_end, cut_chunks
//   Algorithm 1, line 3 -> lychee_update, tree_build, lychee_build_cuda
//   Algorithm 1, line 9 -> score_clusters, open_units
//   Algorithm 1, line 10 -> open_units
//   Algorithm 1, line 13 -> score_clusters, cluster_scores
//   Algorithm 1, line 14 -> take_rows, take_clusters
//   Algorithm 1, line 16 -> take_rows
//   Algorithm 1, line 21 -> cut_chunks
//   Algorithm 1, line 22 -> lychee_commit, lychee_update, tree_graft, graft_kernel
// Eq. 1 and line 17 are attention over the rows of a view (section 3). The text is cut on the host in
// a device session too.
//
// Options: --budget (1024, the first rows included), --sink (16), --full-layers (2), --paper and lychee_opts below.

// ---- the chunker: where may a chunk end? (Table 4)
enum {                          // level of the boundary after a token; the lower, the better an end
    CUT_STRUCTURE = 1,          // empty line, closing bracket, code fence
    CUT_SENTENCE,               // . ? ! and a line end
    CUT_PHRASE,                 // , ; :
    CUT_BLANK,                  // between two words
    CUT_NONE,                   // none of these
    CUT_INSIDE = 9,             // inside a UTF-8 character: only where there is no other end

    // What a character says instead of a level:
    WALK_ON = 0,                // a closing quote or parenthesis: the character before it decides
    WALK_ENDS = -1,             // no delimiter
};
enum { WALK_CHARS = 8 };        // characters that are looked at, from the last one backwards
enum { TEXT_TAIL = 64 };        // bytes of the text that are looked at, and tokens that they come from

TokenText token_text;

// The text of a token, n bytes; "" without a tokenizer and for a method's own tokens.
static const char *text_of(int id, int *n) {
    *n = 0;
    return token_text.ctx && id >= 0 ? token_text.bytes(token_text.ctx, id, n) : "";
}

// Is the id a control token?
static int special_token(int id) {
    return token_text.ctx && id >= 0 && token_text.special(token_text.ctx, id);
}

// The end of the text up to token i, as far as there is no control token in it, to the end of b (TEXT_TAIL).
// -> where it begins there.
static int text_tail(const Token *tok, int i, unsigned char *b) {
    int at = TEXT_TAIL, n;
    for (int j = i; j > i - TEXT_TAIL && j >= 0 && at && !special_token(tok[j].id); j--) {
        const char *text = text_of(tok[j].id, &n);
        while (n && at) b[--at] = (unsigned char)text[--n];
    }
    return at;
}

// The character of b that ends before byte `end` (> 0); *at: its first byte. -1: b ends inside a character there. A
// byte that is not part of valid UTF-8 is a character by itself: its value when it is ASCII, otherwise 0xfffd.
static int char_before(const unsigned char *b, int end, int *at) {
    uint32_t c;
    int k = end - 1;
    while (k > 0 && end - k < 4 && (b[k] & 0xc0) == 0x80) k--;
    int first = b[k], need = first < 0xc0 || first >= 0xf8 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    *at = k;
    if (utf8_read((const char *)b + k, (size_t)(end - k), &c) == end - k) return (int)c;
    if (end - k < need) return -1;
    *at = end - 1;
    return b[end - 1] < 0x80 ? b[end - 1] : 0xfffd;
}

// The level of the character c, which stands at byte `at` of b, read backwards from there; WALK_ON or WALK_ENDS when
// it is no delimiter.
// next: the byte after c. A mark inside 3.14, a.b, a::b, 10:30 or -> is none.
static int delimiter_level(const unsigned char *b, int at, int c, int next) {
    int before = at > 0 ? b[at - 1] : 0, blank = at, run = 1;
    int arrow = before == '-' || before == '=' || before == '<';  // -> => <>: one sign
    int inside = next < 128 && (isalnum(next) || next == '_' || next == '=' || next == ':');
    while (at >= run && b[at - run] == b[at]) run++;              // 3 for the last '-' of ---
    while (blank > 0 && (b[blank - 1] == ' ' || b[blank - 1] == '\t' || b[blank - 1] == '\r')) blank--;
    int empty_line = blank > 0 && b[blank - 1] == '\n';
    switch (c) {                                                  // Table 4
    case '\n': return empty_line ? CUT_STRUCTURE : CUT_SENTENCE;
    case '}': case ']': return CUT_STRUCTURE;
    case '>': return arrow ? WALK_ENDS : CUT_STRUCTURE;
    case '-': case '*': case '`': return run >= 3 ? CUT_STRUCTURE : WALK_ENDS;
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

// The level of the boundary behind the text b (len), whose last token has n bytes; next: the byte that follows, 0 of
// an empty token. It walks backwards over delimiters and closing quotes, as in `."` or `),`, and the best of them
// counts.
static int boundary_level(const unsigned char *b, int len, int n, int next) {
    int level = CUT_NONE, blank = n > 0;
    for (int i = max_int(len - n, 0); i < len; i++) blank &= b[i] == ' ' || b[i] == '\t';
    if (blank) return CUT_BLANK;
    for (int i = 0, end = len, at; i < WALK_CHARS && end > 0; i++, end = at) {
        int c = char_before(b, end, &at);
        if (c < 0 && end == len) return CUT_INSIDE;
        int found = delimiter_level(b, at, c, end < len ? b[end] : next);
        if (found == WALK_ENDS) break;
        if (found != WALK_ON) level = min_int(level, found);
    }
    int word_ends = next == ' ' || next == '\t' || next == '\r' || next == '\n';
    return level == CUT_NONE && word_ends ? CUT_BLANK : level;
}

// The level of the boundary behind token i of tok (i + 2). A control token ends what is before it as a line end does.
static int level_after(const Token *tok, int i) {
    unsigned char b[TEXT_TAIL];
    int n, n_next, id = tok[i].id, then = tok[i + 1].id, from = text_tail(tok, i, b);
    if (special_token(id)) return CUT_STRUCTURE;
    const char *after = text_of(then, &n_next);
    int next = special_token(then) ? '\n' : n_next ? (unsigned char)after[0] : 0;
    text_of(id, &n);
    return boundary_level(b + from, TEXT_TAIL - from, n, next);
}

// The last token of the chunk that starts at token s and has min to max tokens. It is the possible
// end with the best level, and among equals the last one. Where no end has a level, the last end of a
// character is taken, and where there is none, the chunk has max tokens.
static int chunk_end(const unsigned char *level, int s, int min, int max) {
    int best = s + max - 1, found = CUT_INSIDE;
    for (int e = s + min - 1; e < s + max; e++) {                 // Sec. 4.3
        if (level[e] == CUT_INSIDE || level[e] > found) continue;
        best = e;
        found = level[e];
    }
    return best;
}

// The first token of the recent buffer: the index ends before it.
static int t_idx(const Lychee *x) {
    return x->start[x->M];
}

// Cuts every chunk whose end is certain: max tokens have been seen, and behind them the recent rows;
// at least one, because the level of a boundary depends on the token that follows (D43).
static void cut_chunks(const Session *s, Lychee *x) {
    int behind = max_int(x->buffer, 1) + x->max;
    for (int i = (int)arrlen(x->level); i < s->n_tok - 1; i++) {
        unsigned char level = (unsigned char)level_after(s->tok, i);
        arrput(x->level, level);
    }
    while (s->n_tok - t_idx(x) >= behind) {
        int e = chunk_end(x->level, t_idx(x), x->min, x->max);
        arrput(x->start, e + 1);                                  // Algorithm 1, line 21: Pack(B)
        x->M++;
    }
}

// ---- the index: Nodes, Tree and Lychee are in kvcomp.h
enum { CHUNKS_PER_CLUSTER = 2 };                                  // on average (App. A)

// Does layer l have an index?
static int indexed_layer(const Session *s, const Lychee *x, int l) {
    return l >= x->full_layers && layer_acts(s, l);
}

static int chunk_tokens(const Lychee *x, int j) {
    return x->start[j + 1] - x->start[j];
}

// The next `bytes` of a block of memory, rounded up to 64. mem NULL: they are only counted in *at.
static void *carve(char *mem, size_t *at, size_t bytes) {
    void *p = mem ? mem + *at : NULL;
    *at += (bytes + 63) & ~(size_t)63;
    return p;
}

// Lays out a level of n nodes with room for so many children in mem, from *at on.
static void nodes_carve(Nodes *u, char *mem, size_t *at, int n, int children, int D) {
    u->n = n;
    u->mu = carve(mem, at, (size_t)n * D * sizeof *u->mu);
    u->r = carve(mem, at, (size_t)n * sizeof *u->r);
    u->tokens = carve(mem, at, (size_t)n * sizeof *u->tokens);
    u->of = carve(mem, at, n ? (size_t)children * sizeof *u->of : 0);
}

// Lays out the trees of all KV heads in mem -> the bytes they take; mem NULL: they are only counted. A tree built of M
// chunks has room for as many more, after which it is built anew: grafting never asks for memory.
static size_t trees_carve(const Session *s, const Lychee *x, char *mem, int M) {
    int D = s->c->D, G = s->c->G, K = (M + CHUNKS_PER_CLUSTER - 1) / CHUNKS_PER_CLUSTER;
    int P = x->kg ? min_int((K + 1) / 2, MOST_UNITS) : 0;         // clusters and coarse units (App. A)
    size_t at = 0;
    for (int i = 0; i < s->c->L * G; i++) {
        Tree none, *t = mem ? &x->tree[i] : &none;
        if (!indexed_layer(s, x, i / G)) continue;
        nodes_carve(&t->fine, mem, &at, K, 2 * M, D);
        nodes_carve(&t->coarse, mem, &at, P, K, D);
    }
    return at;
}

// ---- keys and k-means: sums are f32; a centre becomes bf16 once, before the last assignment

// x (D) = x / |x|. The small number keeps a vector of zeros finite.
static void normalise(float *x, int D) {
    float f = 1 / sqrtf(dot_f32(x, x, D) + 1e-12f);
    for (int d = 0; d < D; d++) x[d] *= f;
}

// key (D): the mean key of the rows of chunk j, of length 1. rows (chunk-max,D) is room.
static void chunk_key(const Session *s, const Lychee *x, const KVHead *hd, int j, float *rows, float *key) {
    int D = s->c->D, n = chunk_tokens(x, j);
    kv_load_k(s, hd, NULL, x->start[j], n, rows);
    memcpy(key, rows, (size_t)D * sizeof *key);
    for (int i = 1; i < n; i++)
        for (int d = 0; d < D; d++) key[d] += rows[(size_t)i * D + d];
    for (int d = 0; d < D; d++) key[d] /= (float)n;
    normalise(key, D);                                            // Sec. 4.1: kbar_j
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

// The node with the largest of the scores S (n), equal ones by number; -1: all are -INFINITY.
static int best_node(const float *S, int n) {
    float top = max_f32(S, n);
    for (int j = 0; j < n && top > -INFINITY; j++)
        if (S[j] == top) return j;
    return -1;
}

// Spherical k-means of the points x (n,D) into the nodes of u: their centres in bf16, of[] the node of
// every point by the last assignment, which is made against the rounded centres; radii and tokens are
// 0. The first centres are evenly spaced points. mu (K,D) gets the centres in f32, sum (K,D) is
// room.
static void kmeans(const float *x, int n, Nodes *u, int D, int iters, float *mu, float *sum) {
    int K = u->n, *points = u->tokens;          // of a centre
    size_t row = (size_t)D * sizeof *mu, numbers = (size_t)K * D;
    for (int j = 0; j < K; j++) {
        int64_t from = ((int64_t)2 * j + 1) * n / ((int64_t)2 * K);
        memcpy(mu + (size_t)j * D, x + (size_t)from * D, row);
    }
    for (int it = 0; ; it++) {                                    // Sec. 4.3
        if (it == iters) from_f32(u->mu, mu, DT_BF16, numbers);
        if (it == iters) to_f32(mu, u->mu, DT_BF16, numbers);
        for (int i = 0; i < n; i++) {           // to the centre with the largest product; equal ones: the lower
            attn_scores(sum, x + (size_t)i * D, mu, 1, K, D, 1);
            u->of[i] = max_int(best_node(sum, K), 0);
        }
        memset(points, 0, (size_t)K * sizeof *points);
        if (it == iters) break;
        memset(sum, 0, K * row);
        for (int i = 0; i < n; i++) {
            float *to = sum + (size_t)u->of[i] * D;
            points[u->of[i]]++;
            for (int d = 0; d < D; d++) to[d] += x[(size_t)i * D + d];
        }
        for (int j = 0; j < K; j++) {           // a centre without points stays
            if (!points[j]) continue;
            normalise(sum + (size_t)j * D, D);
            memcpy(mu + (size_t)j * D, sum + (size_t)j * D, row);
        }
    }
    memset(u->r, 0, (size_t)K * sizeof *u->r);
}

// ---- building the trees (Algorithm 1, line 3)

// The node has one more chunk below it, of this key (D) and so many tokens; its centre stays.
static void node_cover(Nodes *u, int node, const float *key, int tokens, int D) {
    double away = distance(key, u->mu + (size_t)node * D, D);
    u->tokens[node] += tokens;
    u->r[node] = fmaxf(u->r[node], above(away));                  // Sec. 4.1: r_u
}

// The tree of one KV head, from all M chunks: keys, clusters of chunks, units of clusters, and what
// covers what.
static void tree_build(const Session *s, const Lychee *x, Tree *t, const KVHead *hd, float *room) {
    int D = s->c->D, M = x->M, K = t->fine.n, P = t->coarse.n;
    float *key = room, *mu = key + (size_t)M * D, *units = mu + (size_t)K * D, *sum = units + (size_t)P * D;
    for (int j = 0; j < M; j++) chunk_key(s, x, hd, j, sum, key + (size_t)j * D);

    // Algorithm 1, line 3: the fine level C, then the coarse level G
    kmeans(key, M, &t->fine, D, KMEANS_ITERATIONS, mu, sum);
    if (P) kmeans(mu, K, &t->coarse, D, KMEANS_ITERATIONS, units, sum);
    for (int j = 0; j < M; j++) {
        int c = t->fine.of[j];
        node_cover(&t->fine, c, key + (size_t)j * D, chunk_tokens(x, j), D);
        if (P) node_cover(&t->coarse, t->coarse.of[c], key + (size_t)j * D, chunk_tokens(x, j), D);
    }
}

// ---- scores

// S (n): the scores of nodes from..from+n-1 of a level for the query heads q (R,D) of a group;
// -INFINITY for an empty node. Every query counts with length 1, so that no head wins by its scale;
// w (R) are 1 / their lengths. bound 1: with the nodes' radii. sc (R,n) is room.
static void score_nodes(const Nodes *u, int from, int n, const float *q, const float *w, int R, int D,
                        int bound, float *sc, float *S) {
    scores_of(sc, q, u->mu + (size_t)from * D, DT_BF16, R, n, D, 1, (Ahead){0});
    for (int j = 0; j < n; j++) S[j] = -INFINITY;
    for (int i = 0; i < R; i++) {
        const float *row = sc + (size_t)i * n;
        for (int j = 0; j < n; j++) S[j] = row[j] * w[i] > S[j] ? row[j] * w[i] : S[j];
    }
    for (int j = 0; bound && j < n; j++) S[j] += u->r[from + j];      // Eq. 2: q.mu_u + |q| r_u, |q| = 1
    for (int j = 0; j < n; j++) S[j] = u->tokens[from + j] ? S[j] : -INFINITY;
}

// ---- grafting: a chunk that is complete joins the index (Algorithm 1, lines 18-23)

// The node takes in one more chunk of key v (D). Its new ball is the smallest that holds the old one
// and v, and then its radius covers what rounding the centre to bf16 has shifted.
//   r' = max(r + |mu' - mu|, |v - mu'|)
static void node_absorb(Nodes *u, int node, const float *v, int tokens, int D) {
    uint16_t *mu = u->mu + (size_t)node * D;
    double d = distance(v, mu, D), r = u->r[node], shift = 0;
    u->tokens[node] += tokens;
    if (d <= r) return;
    double step = (d - r) / (2 * d);            // 0: the centre stays, 1: it moves onto v
    for (int i = 0; i < D; i++) {
        float old = bf16_to_f32(mu[i]);
        mu[i] = f32_to_bf16((float)(old + step * ((double)v[i] - old)));
        double e = (double)bf16_to_f32(mu[i]) - old;
        shift += e * e;
    }
    u->r[node] = above(fmax(r + sqrt(shift), distance(v, mu, D)));          // Sec. 4.4
}

// Chunk j joins the cluster whose centre has the largest product with its key, and the unit above it.
// room (chunk-max + 1,D) and sc (2,K) are room.
static void tree_graft(const Session *s, const Lychee *x, Tree *t, const KVHead *hd, int j, float *room,
                       float *sc) {
    int D = s->c->D, K = t->fine.n, tokens = chunk_tokens(x, j);
    float *key = room, *S = sc + K, one = 1;
    chunk_key(s, x, hd, j, room + D, key);
    score_nodes(&t->fine, 0, K, key, &one, 1, D, 0, sc, S);
    int c = t->fine.of[j] = max_int(best_node(S, K), 0);
    node_absorb(&t->fine, c, key, tokens, D);
    if (t->coarse.n) node_absorb(&t->coarse, t->coarse.of[c], key, tokens, D);
}

// The chunks from..M-1 are new: they are grafted onto every tree, in order, or all trees are built anew from all
// chunks, when these have doubled (D41). On the session's device.
static void lychee_update(Session *s, Lychee *x, int from) {
    int L = s->c->L, G = s->c->G, D = s->c->D, M = x->M, anew = M >= 2 * x->M_built;
    if (anew) {
        x->M_built = M;
        x->bytes = trees_carve(s, x, NULL, M);
        near_drop(s, x->mem);
        x->mem = NULL;
        x->mem = near_grow(s, NULL, 0, x->bytes);
        trees_carve(s, x, x->mem, M);
        s->changes++;                           // the trees lie elsewhere now
    }
    for (int l = 0; l < L && KV_DEV(s); l++) {
        if (!indexed_layer(s, x, l)) continue;
        if (anew) lychee_build_cuda(s, x, l, &x->tree[l * G]);            // Algorithm 1, line 3
        else lychee_graft_cuda(s, x, l, from);                            // Algorithm 1, line 22: LazyUpdate
    }
    if (KV_DEV(s)) return;
    // Room for the rows of a chunk, and for all keys and the centres of both levels, or two scores of every cluster
    size_t keys = (size_t)(x->max + 1) * D, all = (2 * (size_t)M + MOST_UNITS + 2) * D;
    size_t per = keys + (anew ? all : 2 * (size_t)M);
    float *rooms = scratch(s, (size_t)n_threads() * per * sizeof *rooms);
    #pragma omp parallel for schedule(dynamic) if (anew || M > 256)
    for (int i = 0; i < L * G; i++) {
        float *room = rooms + thread_id() * per;
        if (!indexed_layer(s, x, i / G)) continue;
        if (anew) tree_build(s, x, &x->tree[i], &s->head[i], room);
        for (int j = from; j < M && !anew; j++) tree_graft(s, x, &x->tree[i], &s->head[i], j, room, room + keys);
    }
}

// ---- retrieval (Algorithm 1, lines 8-16)

// open (P) = 1 for the best kg units, and for more while those opened hold less than four times what
// the budget has room for. S (P): the units' scores, which are used up.
static void open_units(const Lychee *x, const Nodes *u, float *S, char *open) {
    int enough = 4 * chunk_room(x), tokens = 0;
    memset(open, 0, (size_t)u->n);
    for (int i = 0; i < x->kg || tokens < enough; i++) {
        int g = best_node(S, u->n);                               // Algorithm 1, line 10: TopK
        if (g < 0) break;
        S[g] = -INFINITY;
        open[g] = 1;
        tokens += u->tokens[g];
    }
}

// S (K): the scores of the clusters that take part in this step, for the queries q (R,D); -INFINITY
// for the others. Below coarse units those of opened ones take part. room (R + (R + 1) K + 2 P).
static void score_clusters(const Lychee *x, const Tree *t, const float *q, int R, int D, float *room, float *S) {
    int K = t->fine.n, P = t->coarse.n;
    float *w = room, *sc = w + R, *Sg = sc + (size_t)R * K;
    char *open = (char *)(Sg + P);
    for (int i = 0; i < R; i++) {
        const float *qi = q + (size_t)i * D;
        w[i] = 1 / fmaxf(sqrtf(dot_f32(qi, qi, D)), 1e-20f);
    }
    if (!P) {
        score_nodes(&t->fine, 0, K, q, w, R, D, x->bound, sc, S);
        return;
    }
    score_nodes(&t->coarse, 0, P, q, w, R, D, x->bound, sc, Sg);   // Algorithm 1, line 9: Scores_g
    open_units(x, &t->coarse, Sg, open);
    for (int c = 0; c < K; c++) {                                 // Algorithm 1, line 13: Scores_c
        S[c] = -INFINITY;
        if (open[t->coarse.of[c]]) score_nodes(&t->fine, c, 1, q, w, R, D, x->bound, sc, S + c);
    }
}

// rows: the first rows and those of the chunks that are read, ascending, n of them: the chunks of the best cluster,
// then of the next, equal ones by number, until one does not fit into the budget. take (K) = 1 for each cluster that
// gives some. S (K): scores, which are used up. -> the cluster at which the budget is full, or -1.
static int take_rows(const Lychee *x, const Nodes *u, float *S, char *take, int *rows, int *n) {
    int room = chunk_room(x), last;
    memset(take, 0, (size_t)u->n);
    while ((last = best_node(S, u->n)) >= 0 && u->tokens[last] <= room) {         // Algorithm 1, line 14: C_top
        S[last] = -INFINITY;
        take[last] = 1;
        room -= u->tokens[last];
    }
    *n = 0;
    for (int r = 0; r < x->sink; r++) rows[(*n)++] = r;
    for (int j = 0; j < x->M; j++) {                              // Algorithm 1, line 16: KV_active
        int c = u->of[j];
        if (c == last) room -= chunk_tokens(x, j);                // below 0 from the first that does not fit on
        if (c == last ? room < 0 : !take[c]) continue;
        take[c] = 1;
        for (int r = x->start[j]; r < x->start[j + 1]; r++) rows[(*n)++] = r;
    }
    return last;
}

// A level of a tree as the host can read it.
static Nodes nodes_here(Session *s, const Nodes *u, int children) {
    size_t n = u->n, D = s->c->D;
    return (Nodes){
        u->n,
        (uint16_t *)near_here(s, u->mu, n * D * sizeof *u->mu),
        (float *)near_here(s, u->r, n * sizeof *u->r),
        (int *)near_here(s, u->tokens, n * sizeof *u->tokens),
        (int *)near_here(s, u->of, children * sizeof *u->of),
    };
}

// For --trace: the scores S (K) of all clusters of a head, -INFINITY of those that were not looked at,
// and the clusters that gave chunks; those with the score at which the budget is full come last.
static void trace_seek(Session *s, const Lychee *x, int l, int g, const float *S) {
    Nodes u = nodes_here(s, &x->tree[l * s->c->G + g].fine, x->M);
    size_t K = (size_t)u.n;
    float *left = scratch(s, K * sizeof *left);
    char *take = scratch(s, K);
    int *rows = scratch(s, (size_t)s->n_tok * sizeof *rows), *used = scratch(s, K * sizeof *used), n;
    memcpy(left, S, K * sizeof *left);
    int full = take_rows(x, &u, left, take, rows, &n);
    n = 0;
    for (int at_end = 0; at_end < 2; at_end++)
        for (int c = 0; c < u.n; c++)
            if (take[c] && (full >= 0 && S[c] == S[full]) == at_end) used[n++] = c;
    trace_f32(s, S, u.n, 0, "layer%02d.head%02d.lychee.scores", l, g);
    trace_i32(s, used, n, 0, "layer%02d.head%02d.lychee.clusters", l, g);
}

// Up to so many tokens every row is read, and there is nothing to select.
static long lychee_dense(const Lychee *x) {
    return (long)x->B + x->buffer;
}

// A step launches what the last one did, but for the first that reads a list.
static int lychee_steady(const Session *s, const void *ms) {
    return !s->trace && s->n_tok != lychee_dense(ms) + 1;
}

// Hook select: what the query heads of layer l read in this step; q (H,D). Where it returns at once,
// the views say: every row.
static void lychee_select(Session *s, void *ms, int l, const float *q) {
    Lychee *x = ms;
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    if (l < x->full_layers || !x->M_built || s->n_tok <= lychee_dense(x)) return;
    double t0 = now();
    const Tree *tree = &x->tree[l * G];         // (G)
    size_t K = (size_t)tree->fine.n, per = R + (R + 1) * K + 2 * (size_t)tree->coarse.n;
    int most = x->sink + chunk_room(x);         // rows of a list
    float *S = scratch(s, G * K * sizeof *S);
    if (KV_DEV(s)) {
        lychee_seek_cuda(s, x, l, tree, q, traced(s, l) ? S : NULL);
    } else {
        float *room = scratch(s, (size_t)n_threads() * per * sizeof *room);
        int *rows = scratch(s, (size_t)n_threads() * most * sizeof *rows);
        #pragma omp parallel for schedule(static) if (x->M > 256)
        for (int g = 0; g < G; g++) {
            int *mine = rows + (size_t)thread_id() * most, n;
            float *own = room + thread_id() * per;
            score_clusters(x, &tree[g], q + (size_t)g * R * D, R, D, own, S + g * K);
            memcpy(own, S + g * K, K * sizeof *own);
            take_rows(x, &tree[g].fine, own, (char *)(own + K), mine, &n);
            view_group(s, l, g, mine, n, t_idx(x));
        }
    }
    for (int g = 0; g < G && traced(s, l); g++) trace_seek(s, x, l, g, S + g * K);
    timed(&s->clk.index, t0);
}

// Hook commit, at the end of a pass (l == L). There is no index as long as every row is read anyway; it is built
// anew when the chunks have doubled, and grafted on in between (D41).
static void lychee_commit(Session *s, void *ms, int l, const float *q, int T) {
    Lychee *x = ms;
    int old = x->M;
    if (l < s->c->L) return;
    x->changed = 0;
    if (kv_longest(s, 0) != s->n_tok)
        die(EXIT_USAGE, "--method: lychee needs every row, another part has dropped some of %d",
            s->n_tok);
    x->B = budget_now(s);
    if (!x->M_built && s->n_tok <= lychee_dense(x)) return;

    double t0 = now();
    cut_chunks(s, x);                                             // Algorithm 1, line 2
    x->changed = x->M > old;
    if (x->changed) lychee_update(s, x, old);
    timed(&s->clk.index, t0);
}

// For --trace: one level of the tree of a head, by names that begin with `what`: centres (n,D), radii
// (n), and the node above each of its children.
static void trace_nodes(Session *s, int l, int g, const char *what, const char *child, const Nodes *from,
                        int children) {
    Nodes u = nodes_here(s, from, children);
    size_t numbers = (size_t)u.n * s->c->D;
    float *mu = scratch(s, numbers * sizeof *mu);
    to_f32(mu, u.mu, DT_BF16, numbers);
    trace_f32(s, mu, u.n, s->c->D, "layer%02d.head%02d.lychee.%scentres", l, g, what);
    trace_f32(s, u.r, u.n, 0, "layer%02d.head%02d.lychee.%sradii", l, g, what);
    trace_i32(s, u.of, children, 0, "layer%02d.head%02d.lychee.%sparents", l, g, child);
}

// Hook trace, after a pass that has changed the index: where every chunk ends (the token behind it;
// the first one begins behind the --sink tokens), and the tree of every head of a layer.
static void lychee_trace(Session *s, void *ms, int l) {
    const Lychee *x = ms;
    if (!x->changed) return;
    if (l == s->c->L) trace_i32(s, x->start + 1, x->M, 0, "lychee.chunk_ends");
    for (int g = 0; g < s->c->G && l < s->c->L && indexed_layer(s, x, l); g++) {
        const Tree *t = &x->tree[l * s->c->G + g];
        trace_nodes(s, l, g, "", "", &t->fine, x->M);
        if (t->coarse.n) trace_nodes(s, l, g, "unit_", "cluster_", &t->coarse, t->fine.n);
    }
}

// ---- the other hooks

// Tokens from n_tok on are gone. The level behind the last one that stays depended on the next; an index of only the
// tokens that stay is kept, one that reaches further is dropped.
static void lychee_forget(Session *s, void *ms, int n_tok) {
    Lychee *x = ms;
    arrsetlen(x->level, (size_t)min_int((int)arrlen(x->level), max_int(n_tok - 1, 0)));
    if (t_idx(x) <= n_tok) return;
    arrsetlen(x->start, 1);
    x->M = 0;
    x->M_built = 0;
}

static const Opt lychee_opts[] = {
    { "lychee-kg", 'i', "0", "coarse units opened in a step; 0: there is no coarse level", 0, 1 << 20 },
    { "lychee-chunk-min", 'i', "8", "fewest tokens of a chunk", 1, 4096 },
    { "lychee-chunk-max", 'i', "16", "most tokens of a chunk", 1, 4096 },
    { "lychee-buffer", 'i', "128", "recent rows outside the index, always read, on top of the budget", 0, 1 << 30 },
    { NULL, 0, NULL, NULL },
};

// Reads the options: an index without chunks. 0, or -1 with s->err set when they make no sense.
static int lychee_open(Session *s, void *ms) {
    Lychee *x = ms;
    const Options *o = s->opt;
    x->bound       = opt_int(o, "paper");                         // Eq. 2; it favours loose clusters
    x->kg          = opt_int(o, "lychee-kg");
    x->min         = opt_int(o, "lychee-chunk-min");
    x->max         = opt_int(o, "lychee-chunk-max");
    x->buffer      = opt_int(o, "lychee-buffer");
    x->sink        = sinks(s, 16);
    x->full_layers = opt_int(o, "full-layers");
    x->B           = s->budget;
    if (x->max < x->min) return refuse(s, "--lychee-chunk-min %d is more than --lychee-chunk-max %d", x->min, x->max);
    if (s->ratio < 0 && s->budget < x->sink)
        return refuse(s, "--budget %d is smaller than --sink %d", s->budget, x->sink);
    x->tree = xcalloc((size_t)s->c->L * s->c->G, sizeof *x->tree);
    arrput(x->start, x->sink);
    return 0;
}

// Gives everything back; open may have failed half way.
static void lychee_close(Session *s, void *ms) {
    Lychee *x = ms;
    near_drop(s, x->mem);
    free(x->tree);
    arrfree(x->start);
    arrfree(x->level);
}

// Bytes the index holds: levels, starts, trees.
static size_t lychee_bytes(const Session *s, const void *ms) {
    const Lychee *x = ms;
    return arrcap(x->level) + arrcap(x->start) * sizeof(int) + x->bytes;
}

// The most bytes it takes for n tokens: those of an index in which every chunk is as short as it
// may be.
static size_t lychee_plan(const Session *s, const void *ms, int n) {
    const Lychee *x = ms;
    int M = n / x->min;
    return (size_t)n + (size_t)(M + 1) * sizeof(int) + trees_carve(s, x, NULL, M);
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
    .uses    = "--sink 16, --full-layers 2, --paper",
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
    .trace   = lychee_trace,
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
//     a Nexus token sees those of its own and of earlier segments. --paper has the exact
//     mask (VIS_SEGMENT_EXACT): the whole history goes through one pass, every turn.
//   - K_i = max(1, min(K, |B_i|)), or by --ratio a share of every message.
//   - The first --sink tokens count as system message: the rows of the first tokens draw
//     attention and must stay.
//   - The paper does not say which positions Nexus tokens have, what T_max is, or what exactly a
//     body is (here: all tokens of a message, control tokens included). NOTES.md says what we
//     chose.
//   - Eq. 6 to 14 are the training: models/make_nexus.py. There Eq. 6 is a mean, and w(x) of Eq. 8
//     belongs to the row that reads (the paper's to history tokens, over which Eq. 8 has no sum).
//     Eq. 10's target passes no gradient on, and K of Eq. 13 may be a share of a message. Beside the
//     paper's losses stand three of ours (models/README.md).
//   - The bound h K <= B of Eq. 15 is not enforced.
//
// Map:
//   Eq. 1 -> sonic_enter, sonic_finish, sonic_nexus, sonic_one_shot
//   Eq. 2 -> sonic_embed, embed_cuda
//   Eq. 3 -> kv_visible, mask_tile, attn_prefill, attend_kernel, prefill_kernel, decode_kernel
//   Eq. 4 -> kv_visible, mask_tile, work_sees, sonic_drop, kv_keep, rows_move_cuda, gather_kernel
//   Eq. 5 -> kv_visible, mask_tile, work_sees, attn_prefill, attend_kernel, prefill_kernel
//   Sec. 3.1 -> same_weights, project_rows, mlp_rows
//   Sec. 4.3 -> sonic_K, sonic_open
// kv_visible stands in kvcomp.h: one mask for both devices. The hooks of this section run on the
// host on both. A device has no kernel for SONIC alone: embed_cuda uploads what sonic_embed makes,
// the attention kernels ask kv_visible, same_weights picks the matrices for a run of rows, and
// kv_keep gathers the rows that stay.
//
// Options: --sonic-k, --sonic-weights, --paper, --sink (4), and --ratio.

typedef struct {
    // the adapter
    SafeFile *file;             // mapped; NULL: untrained
    Layer *alt;                 // (L) the Nexus branch
    float *embed;               // e_base (C), e_pos (K_max,C), e_turn (T_max,C)
    int K_max;                  // rows of e_pos
    int T_max;                  // rows of e_turn
    // how it is used
    int K;                      // Nexus tokens of a message
    double ratio;               // share of a body to remove; < 0: K counts instead
    int original;               // 1: text has positions as if there were no Nexus tokens; 0: as in S_aug
    // the dialogue
    int sys;                    // its leading tokens that are the system message
    int h;                      // finished messages, whose text rows commit drops; the segment of the current turn
    int cur;                    // first token of the current turn, as an index into Session.tok
    int n_user;                 // how many tokens of the current turn are the user's message
    int warned;                 // 1: a Nexus token had a turn beyond T_max
} Sonic;

// ---- the adapter's file
// A safetensors file: embeddings nexus.embed.*, matrices nexus.layers.N.*, and metadata that say which
// base model it was trained for. Everything that the base can contradict is checked. All functions that
// return int return 0, or -1 with s->err set.

// The hash by which an adapter knows its base: FNV-1a 64 over the embedding and then layer 0's
// q_proj, as the file has them: with --weights q8_0 they are read once more from there.
static uint64_t sonic_fingerprint(const Weights *w) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (const Tensor *t = w->known; t < w->known + 2; t++) {
        const unsigned char *p = t->data, *end = p + tensor_bytes(t);
        for (; p < end; p++) h = (h ^ *p) * 0x100000001b3ull;
    }
    return h;
}

// The metadata: is it an adapter as this program knows them, and was it trained for this base? Numbers go into x.
static int sonic_meta(Session *s, Sonic *x) {
    const char *path = x->file->path;
    const struct { const char *key, *want, *or; } words[] = {
        { "format", "sonic-nexus", NULL },
        { "version", "1", NULL },
        { "body", "full_message", NULL },
        { "position_mode", "augmented", "original" },
        { "mlp", "dedicated", "shared" },
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        const char *v = safetensors_meta(x->file, words[i].key), *want = words[i].want, *or = words[i].or;
        if (v && (!strcmp(v, want) || (or && !strcmp(v, or)))) continue;
        return refuse(s, "sonic: %.200s: metadata %s is %.60s, expected %s%s%s", path, words[i].key,
                      v ? v : "missing", want, or ? " or " : "", or ? or : "");
    }

    const struct { const char *key; int *to; } numbers[] = {
        { "k_max", &x->K_max }, { "k_default", &x->K }, { "t_max", &x->T_max },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const char *v = safetensors_meta(x->file, numbers[i].key);
        char *end = NULL;
        long n = v ? strtol(v, &end, 10) : 0;
        if (n < 1 || n > 65536 || *end)
            return refuse(s, "sonic: %.200s: metadata %s is %.60s, expected a number from 1 to 65536", path,
                          numbers[i].key, v ? v : "missing");
        *numbers[i].to = (int)n;
    }

    // The fingerprint is written in hexadecimal, with or without 0x.
    char own[20];
    const char *made = safetensors_meta(x->file, "base_fingerprint");
    snprintf(own, sizeof own, "%016llx", (unsigned long long)sonic_fingerprint(s->w));
    if (made && !strncmp(made, "0x", 2)) made += 2;
    if (made && !strcasecmp(made, own)) return 0;
    return refuse(s, "sonic: %.200s: metadata base_fingerprint is %.40s, base has %s (trained on other weights?)",
                  path, made ? made : "missing", own);
}

// Reads the tensor nexus.layers.<l>.<what>, or nexus.embed.<what> when l is -1. Its shape must be
// (rows,cols) or, with rows 0, (cols), its type that of the file's first tensor.
static int sonic_tensor(Session *s, SafeFile *f, Tensor *t, int l, const char *what, int rows, int cols) {
    char name[128];
    if (l < 0) snprintf(name, sizeof name, "nexus.embed.%s", what);
    else snprintf(name, sizeof name, "nexus.layers.%d.%s", l, what);

    const SafeTensor *x = safetensors_find(f, name), *first = safetensors_find(f, "nexus.embed.base");
    if (!x) return refuse(s, "sonic: %.200s: %s is missing", f->path, name);
    char why[256];
    if (!safe_has_shape(x, rows, cols, why))
        return refuse(s, "sonic: %s: %s (adapter made for another model?)", name, why);
    if (x->dtype < 0) return refuse(s, "sonic: %s is %s, expected F32, F16 or BF16", name, x->type);
    if (x->dtype != first->dtype)
        return refuse(s, "sonic: %s is %s, but %s is %s: all tensors must have one type", name, x->type,
                      first->name, first->type);
    *t = (Tensor){ x->data, x->dtype, max_int(rows, 1), cols };
    return 0;
}

// Replaces the matrices in y, a copy of the base's layer l: q, k, v, o with the biases that the
// base has, and the MLP if the adapter has its own (mlp 1). The norms stay the base's.
static int sonic_layer(Session *s, SafeFile *f, Layer *y, int l, int mlp) {
    const Config *c = s->c;
    int C = c->C, F = c->F, HD = c->H * c->D, GD = c->G * c->D;
    const struct { int there; Tensor *t; const char *name; int rows, cols; } parts[] = {
        { 1,                   &y->wq,   "self_attn.q_proj.weight", HD, C  },
        { 1,                   &y->wk,   "self_attn.k_proj.weight", GD, C  },
        { 1,                   &y->wv,   "self_attn.v_proj.weight", GD, C  },
        { 1,                   &y->wo,   "self_attn.o_proj.weight", C,  HD },
        { y->bq.data != NULL,  &y->bq,   "self_attn.q_proj.bias",   0,  HD },
        { y->bk.data != NULL,  &y->bk,   "self_attn.k_proj.bias",   0,  GD },
        { y->bv.data != NULL,  &y->bv,   "self_attn.v_proj.bias",   0,  GD },
        { mlp,                 &y->gate, "mlp.gate_proj.weight",    F,  C  },
        { mlp,                 &y->up,   "mlp.up_proj.weight",      F,  C  },
        { mlp,                 &y->down, "mlp.down_proj.weight",    C,  F  },
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].there && sonic_tensor(s, f, parts[i].t, l, parts[i].name, parts[i].rows, parts[i].cols))
            return -1;
    return 0;
}

// Reads the adapter file into x. x->alt holds a copy of the base's layers already. x->embed becomes
// one block of f32.
static int sonic_load(Session *s, Sonic *x, const char *path) {
    const int C = s->c->C;
    char why[512];
    SafeFile *f = x->file = safetensors_open(path, why);
    if (!f) return refuse(s, "sonic: %.200s: %.250s", path, why);
    if (sonic_meta(s, x)) return -1;
    x->original = !strcmp(safetensors_meta(f, "position_mode"), "original");

    const char *const embed[] = { "base", "pos", "turn" };
    const int rows[] = { 0, x->K_max, x->T_max };
    size_t at = 0;
    for (int i = 0; i < 3; i++) {
        Tensor t;
        if (sonic_tensor(s, f, &t, -1, embed[i], rows[i], C)) return -1;
        size_t n = (size_t)t.rows * C;
        x->embed = xrealloc(x->embed, (at + n) * sizeof(float));
        to_f32(x->embed + at, t.data, t.dtype, n);
        at += n;
    }

    // The layers. A tensor that nothing has asked for by then is one that is not understood.
    int mlp = !strcmp(safetensors_meta(f, "mlp"), "dedicated");
    for (int l = 0; l < s->c->L; l++)
        if (sonic_layer(s, f, &x->alt[l], l, mlp)) return -1;
    for (int i = 0; i < f->n; i++)
        if (!f->tensor[i].used)
            return refuse(s, "sonic: %.200s: unexpected tensor %.200s", path, f->tensor[i].name);
    return 0;
}

// ---- the untrained adapter

// A sample of the standard normal distribution, by Box and Muller, from two numbers in [0,1).
static double sonic_normal(uint64_t *state) {
    double u = (double)(splitmix64(state) >> 11) / 9007199254740992.0;       // 53 bits over 2^53
    double v = (double)(splitmix64(state) >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(1 - u)) * cos(2 * M_PI * v);
}

// --sonic-weights none: fills x for trials without an adapter. The branch stays the base model itself.
// e_base is the mean of the embedding table; e_pos is noise as large as the table's entries, and
// e_turn noise of 0.3 times that size.
static void sonic_untrained(Session *s, Sonic *x) {
    const Tensor *e = &s->w->embed;
    int C = s->c->C;
    int rows = min_int(e->rows, 4096);                  // enough for a mean
    uint64_t state = mix64(1);
    x->K_max = 64;
    x->T_max = 32;
    x->K = 16;
    x->embed = xcalloc((size_t)(1 + x->K_max + x->T_max) * C, sizeof(float));

    // The mean of the rows, and the size of their entries
    double square = 0;
    float *row = xmalloc((size_t)C * sizeof *row);
    for (int r = 0; r < rows; r++) {
        tensor_row(row, e, r);
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
    warn("WARNING: --sonic-weights none: the Nexus tokens were never trained. "
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
        x->warned = 1;
        turn = x->T_max - 1;
    }
    const float *pos = x->embed + (size_t)(1 + j) * C, *of_turn = x->embed + (size_t)(1 + x->K_max + turn) * C;
    for (int c = 0; c < C; c++) out[c] = x->embed[c] + pos[c] + of_turn[c];     // Eq. 2: e(N_j^t)
}

// The segment of the text token that is token i of the session: -1 in the system message, else that
// of the current message.
static int sonic_seg(const Sonic *x, int i) {
    return i < x->sys ? -1 : x->h;
}

// ---- dropping what nobody sees any more

// Drops the text rows of finished messages from layer l. Eq. 4 hides them from every later token,
// so they are of no use. Every head holds the same rows.
static void sonic_drop(Session *s, const Sonic *x, int l) {
    const KVHead *h = kv_head(s, l, 0);
    int n = 0, *keep = scratch(s, (size_t)(h->len + 1) * sizeof(int));
    for (int r = 0; r < h->len; r++) {
        const Token *t = &s->tok[h->src[r]];
        int hidden = t->kind != TOK_EXTRA && t->seg >= 0 && t->seg < x->h;               // Eq. 4
        if (!hidden) keep[n++] = r;
    }
    kv_keep(s, l, keep, 0, &n);
}

// Hook commit: drops rows behind the attention of every layer, so that a one-shot pass holds the
// whole history in one layer at a time. At the end of the pass (l == L) it serves the layers with a window that
// hooks skip, and sets the next position.
static void sonic_commit(Session *s, void *ms, int l, const float *q, int T) {
    const Sonic *x = ms;
    int end = l == s->c->L, last = s->n_tok - 1;
    if (s->decoding) return;
    for (int k = end ? 0 : l; k < min_int(l + 1, s->c->L); k++)
        if (!end || !layer_acts(s, k)) sonic_drop(s, x, k);

    // With original positions, text goes on where text ended: Nexus tokens take no position away
    if (!end || !x->original) return;
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
    Token *t = scratch(s, (size_t)K * sizeof *t);
    for (int j = 0; j < K; j++)
        t[j] = sonic_token(x, turn, j, x->h, x->original ? s->pos_next + j : -1);        // Eq. 1: N^(i)
    x->h++;
    s->forward(s, t, K);
}

// Finishes the two messages of the turn before: steps 1 to 5 of the box. t (n): the ids of the new
// turn, of which the first `foot` still belong to the old reply. They are taken out; returns how
// many are left in t.
static int sonic_finish(Session *s, Sonic *x, Token *t, int n, int foot) {
    int user_end = x->cur + x->n_user, turn = s->turn - 1;
    int n_old = s->n_tok - user_end, n_reply = n_old + foot;

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
        reply[i] = (Token){ reply[i].id, -1, sonic_seg(x, first + i), TOK_REPLY };      // Eq. 1: m_i
    if (n_reply) s->forward(s, reply, n_reply);

    // Step 5
    sonic_nexus(s, x, first, turn);
    memmove(t, t + foot, (size_t)(n - foot) * sizeof *t);
    return n - foot;
}

// ---- one-shot mode

// Rewrites the prefill as the whole of Eq. 1 and empties the session, so that one pass encodes everything under
// the exact mask. t (n): the ids of the new turn, of which the first `foot` belong to the old reply. What the
// session holds is Eq. 1 of the turn before: its history stays in front as it is, and the two messages of that
// turn get their Nexus tokens. Returns the new n; the current turn begins at t[x->cur].
static int sonic_one_shot(Session *s, Sonic *x, Token *t, int n, int foot) {
    int i = x->cur, pos = s->tok[i].pos;                // where the next token stands
    int first = i, user_end = i + x->n_user, reply_end = s->n_tok + foot;
    Token *own = scratch(s, (size_t)n * sizeof *own);
    memcpy(own, t, (size_t)n * sizeof *own);
    memcpy(t, s->tok, (size_t)i * sizeof *t);           // Eq. 1: I_sys, m_1, N^(1), ..
    for (int k = i; k < s->n_tok + n; k++) {
        t[i] = k < s->n_tok ? s->tok[k] : own[k - s->n_tok];     // Eq. 1: m_i, Q_curr
        t[i].pos = pos++;
        t[i++].seg = sonic_seg(x, k);
        if (k + 1 != user_end && k + 1 != reply_end) continue;

        // A message has ended. All of it may belong to the system message
        int body = k + 1 - max_int(first, x->sys), K = body > 0 ? sonic_K(x, body) : 0;
        for (int j = 0; j < K; j++) t[i++] = sonic_token(x, s->turn - 1, j, x->h, pos + j);      // Eq. 1: N^(i)
        if (!x->original) pos += K;                     // else they take no position away
        x->h += K > 0;
        first = k + 1;
    }
    x->cur = i - (n - foot);
    kv_truncate(s, 0);
    return i;
}

// ---- the beginning of a turn

// Hook enter: compresses the turn before, then marks the new turn's tokens t (n) with their
// segment. Returns the new n. t has room for 2 (n + n_tok) tokens, and a message never has more
// Nexus tokens than text, so `cap` needs no check. Exit 1 when a position would pass
// max_position_embeddings.
static int sonic_enter(Session *s, void *ms, Token *t, int n, int cap) {
    Sonic *x = ms;
    int foot = min_int(s->n_foot, n - 1);               // at least one token is the new turn's own
    int one_shot = s->turn && s->rule == VIS_SEGMENT_EXACT;
    if (!s->turn) x->sys = max_int(s->n_sys, sinks(s, 4));
    else n = one_shot ? sonic_one_shot(s, x, t, n, foot) : sonic_finish(s, x, t, n, foot);
    if (!one_shot) x->cur = s->n_tok;

    // The current turn is t[from..n). Its last n_head tokens open the reply: they belong to the
    // reply's message
    int from = x->cur - s->n_tok, own = n - from;
    for (int i = from; i < n; i++) t[i].seg = sonic_seg(x, s->n_tok + i);               // Eq. 1: Q_curr
    x->n_user = own - min_int(s->n_head, own);

    int last = t[n - 1].pos < 0 ? s->pos_next + n - 1 : t[n - 1].pos;
    if (last >= s->pos_end)
        die(EXIT_RUN, "sonic: position %d is past max_position_embeddings %d (a shorter dialogue%s)", last,
            s->pos_end, x->original ? "" : ", or an adapter trained with position_mode original");
    return n;
}

// ---- opening and closing

// Finds the adapter (--sonic-weights, or nexus.safetensors in the model's folder), or makes the
// untrained one of --sonic-weights none, and sets up the branch, which is the base model's layers with the adapter's
// matrices in place of its own. Returns 0, or -1 with s->err set.
static int sonic_adapter(Session *s, Sonic *x) {
    char path[1100];
    int untrained = !strcmp(opt_str(s->opt, "sonic-weights"), "none");
    if (!method_file(method_find("sonic", 5), s->c, s->opt, path))
        return refuse(s, "sonic: needs trained Nexus weights, and %.300s is not there: "
                         "--sonic-weights FILE, or --sonic-weights none for a trial", path);

    size_t bytes = (size_t)s->c->L * sizeof(Layer);
    x->alt = xmalloc(bytes);
    memcpy(x->alt, s->w->layer, bytes);
    if (!untrained) return sonic_load(s, x, path);
    sonic_untrained(s, x);
    return 0;
}

// Hook open.
static int sonic_open(Session *s, void *ms) {
    Sonic *x = ms;
    s->budget = 0;                                      // K says what is kept
    if (sonic_adapter(s, x)) return -1;

    // K and the ratio: the options against what the adapter allows
    int K = opt_int(s->opt, "sonic-k");
    x->ratio = s->ratio;
    s->ratio = -1;                              // it was a share of each message, not a budget
    if (K && x->ratio >= 0)
        return refuse(s, "sonic: --sonic-k and --ratio are two ways to say the same, give one");
    if (K > x->K_max)
        return refuse(s, "sonic: --sonic-k %d: the adapter knows 1 to %d Nexus tokens a message", K, x->K_max);
    if (K) x->K = K;                            // else the adapter's K_0: Sec. 4.3
    if (x->K > x->K_max) return refuse(s, "sonic: metadata k_default is %d, but k_max is %d", x->K, x->K_max);
    s->pos_end = s->c->max_pos;
    int most = x->ratio >= 0 ? x->K_max : x->K;
    s->pos_extra = x->original ? 0 : 2 * most;  // two messages finish when a turn begins
    s->alt = x->alt;                            // Sec. 3.1: the matrices of Nexus rows
    s->rule = opt_int(s->opt, "paper") ? VIS_SEGMENT_EXACT : VIS_SEGMENT;
    return 0;
}

// Hook close.
static void sonic_close(Session *s, void *ms) {
    Sonic *x = ms;
    s->alt = NULL;
    safetensors_close(x->file);
    free(x->alt);
    free(x->embed);
}

// Hook bytes: the embeddings and the layer table. The matrices of the branch are weights, not cache.
static size_t sonic_bytes(const Session *s, const void *ms) {
    const Sonic *x = ms;
    size_t embed = (size_t)(1 + x->K_max + x->T_max) * s->c->C * sizeof(float);
    return embed + (size_t)s->c->L * sizeof(Layer);
}

// Hook plan: the same, and the adapter's matrices.
static size_t sonic_plan(const Session *s, const void *ms, int n) {
    const Sonic *x = ms;
    size_t bytes = sonic_bytes(s, ms);
    for (int i = 0; x->file && i < x->file->n; i++) bytes += x->file->tensor[i].bytes;
    return bytes;
}

// Hook trace: of every token of the dialogue its segment, and whether it is a Nexus token.
static void sonic_trace(Session *s, void *ms, int l) {
    if (l < s->c->L) return;
    int n = s->n_tok;
    int *segment = scratch(s, (size_t)n * sizeof *segment), *nexus = scratch(s, (size_t)n * sizeof *nexus);
    for (int i = 0; i < n; i++) {
        segment[i] = s->tok[i].seg;
        nexus[i] = s->tok[i].kind == TOK_EXTRA;
    }
    trace_i32(s, segment, n, 0, "sonic.segments");
    trace_i32(s, nexus, n, 0, "sonic.nexus");
}

static const Opt sonic_opts[] = {
    { "sonic-k",         'i', "0",
      "Nexus tokens a message, never more than it has tokens; 0: the adapter's default (untrained: 16). "
      "--ratio says instead which share of each message goes", 0, 65536 },
    { "sonic-weights",   'p', "",
      "adapter file (default: nexus.safetensors in the model's folder); none: without trained weights, the base's own "
      "and random embeddings" },
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
    .uses    = "--sink 4, --paper",
    .opts    = sonic_opts,
    .file    = "nexus.safetensors",
    .file_option = "sonic-weights",
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
    .trace   = sonic_trace,
};

// ==================================================================================================== 13 DILILAZYKV
// DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression. Anonymous ACL submission.
//
// Some heads find the facts that an answer needs (diligent heads), others look over the whole text
// (lazy heads). Both properties are measured once per model, by hiding facts in long texts, and
// joined in one score per head. At the end of every turn's prefill the budget is shared out by
// these scores: a head with a high score, in a layer with high scores, reads more rows.
//
// Stage 1, once per model (--calibrate, app/measure). A needle, whose tokens are the set N, is
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
//     hold those. By its text DiliScore is a number of keys, and LazyScore a weighted sum of three:
//     keys of T outside N, of N outside T, and of neither.
//   - The window is part of the budget, b_c = B - w; the paper's b_c is the budget itself.
//   - Line 17 spends 1 + eps L times B_total. We divide that out, so that the mean of the
//     capacities is b_c.
//   - A score is found by its key "layer-head". The authors' program ignores the keys, and the
//     files it comes with are shuffled.
//   - The rows of a KV head are stored once, not once per query head: it holds the union of what
//     its query heads read, and each query head has a view. A later turn's prefill therefore reads
//     the union.
//   - Scores are of the last min(w,T) queries of this turn, smoothed by a maximum over --kernel
//     neighbours (D11).
//
// Map:
//   Sec. 3.1 -> head_scores, head_probe_commit
//   Eq. 1 -> head_scores
//   Algorithm 1, lines 3, 4, 8, 13, 14, 16, 17, 18, 19 -> dililazy_caps
//   Sec. 3.3 -> dililazy_commit, pooled_scores, top_k_rows, pool_kernel, top_k_rows_cuda
// Both stages are host hooks, stage 1's in app/measure.c (head_scores, head_probe_commit). Algorithm 1
// runs on the host on either device, because it is a few hundred numbers. The rows that no view reads
// any more are given back by kv_compact, on a device through rows_move_cuda and gather_kernel.
//
// Options: --budget (128, per query head), --obs-window (16), --kernel (7), --head-scores, --head-beta (1.351),
// --dililazy-score; stage 1: --calibrate OUT.json, --calibrate-needles, -f.

// cap (L,H) from the scores inf (L,H) >= 0 and b_c = base >= 0.
typedef void HeadCaps(const double *inf, int L, int H, int base, double beta, int *cap);

// The state of dililazy, and of headkv.
typedef struct {
    Snap snap;                  // w, kernel width
    const char *name;           // of the method: dililazy or headkv
    HeadCaps *caps;             // its capacities
    int base;                   // b_c that `cap` was made for; -1: none yet
    double beta;
    double *inf;                // (L,H) head scores
    int *cap;                   // (L,H) candidates a head may read: C of Algorithm 1
} DiliLazy;

// ---- files of scores
// JSON with an object "layer-head" -> a number, or a list of numbers whose mean counts. The object may
// stand inside another one under one of these names: --dililazy-score, --headkv-score and ours, then
// those of DiliLazyKV's authors; HeadKV's publish one map a file, without a name.
const char *score_names[SCORES][2] = {
    [SCORE_INF]  = { "inf",  "average_infscores_weighted" },
    [SCORE_DILI] = { "dili", "average_precisions_weighted" },
    [SCORE_LAZY] = { "lazy", "average_recalls_weighted" },
    [SCORE_R]    = { "r",    NULL },
    [SCORE_R2]   = { "r2",   NULL },
};

// The map of score `which` in the file j: the object under one of its names, else j itself.
static const Json *scores_find(const Json *j, const char *which) {
    for (int i = 0; i < 2 * SCORES; i++) {
        const char *ours = score_names[i / 2][0], *name = score_names[i / 2][i % 2];
        const Json *v = name && !strcmp(which, ours) ? json_get(j, name) : NULL;
        if (json_is(v, JSON_OBJECT)) return v;
    }
    return j;
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
    if (j->type != JSON_OBJECT) return fault(err, "expected an object with keys \"layer-head\"");
    for (int i = 0; i < j->n; i++) {
        char layer[9], head[9];
        int end = 0, two = sscanf(j->key[i], "%8[0-9]-%8[0-9]%n", layer, head, &end) == 2;
        int l = two ? atoi(layer) : L, h = two ? atoi(head) : H;
        double v = scores_value(&j->item[i]);
        if (l >= L || h >= H || j->key[i][end])
            return fault(err, "key \"%.40s\": expected \"layer-head\" of a model with %d layers and %d heads",
                         j->key[i], L, H);
        if (x[l * H + h] >= 0) return fault(err, "head %d-%d stands there twice", l, h);
        if (!(v >= 0)) return fault(err, "head %d-%d: expected a number of at least 0, or a list of them", l, h);
        x[l * H + h] = v;
    }
    for (int i = 0; i < L * H; i++)
        if (x[i] < 0) return fault(err, "no score of head %d-%d: expected all %d x %d", i / H, i % H, L, H);
    return 0;
}

// The scores (L,H) called `which` (a name in score_names) of a file; the caller frees them. NULL,
// with the reason in err, when the file cannot be read or does not fit the model.
static double *scores_read(const char *path, const char *which, int L, int H, char err[512]) {
    char why[512];
    Json *j = json_read(path, MOST_CONFIG, err);
    if (!j) return NULL;
    const Json *map = scores_find(j, which);
    double *x = xmalloc((size_t)L * H * sizeof *x);
    for (int i = 0; i < L * H; i++) x[i] = -1;
    int lacks = map == j && json_get(j, "format");      // a file of ours, without that map
    int bad = lacks ? fault(why, "holds no scores \"%s\"; --calibrate makes them", which)
                    : scores_fill(map, L, H, x, why);
    json_free(j);
    if (!bad) return x;
    fault(err, "%.200s: %.250s", path, why);
    free(x);
    return NULL;
}

// Opens dililazy or headkv: reads the options of the chain, with `window` as default; x->inf from the method's file
// (method_file), the scores that --NAME-score says; and --head-beta, or `beta` where that is not given. Returns 0, or
// -1 with s->err set.
static int head_scores_open(Session *s, DiliLazy *x, const char *name, HeadCaps *caps, int window, double beta) {
    const Config *c = s->c;
    char path[1100], which[32], why[512];
    if (snap_options(s, &x->snap, window)) return -1;
    x->name = name;
    x->caps = caps;
    x->beta = opt_real(s->opt, "head-beta") > 0 ? opt_real(s->opt, "head-beta") : beta;
    snprintf(which, sizeof which, "%s-score", name);
    if (!method_file(method_find(name, strlen(name)), c, s->opt, path))
        return refuse(s, "%s needs the scores of the model's heads: --head-scores FILE, "
                         "or make them: --calibrate %.300s", name, path);
    x->inf = scores_read(path, opt_str(s->opt, which), c->L, c->H, why);
    if (!x->inf) return refuse(s, "--head-scores: %.470s", why);
    x->cap = xcalloc((size_t)c->L * c->H, sizeof(int));
    x->base = -1;
    return 0;
}

// ---- Algorithm 1

static const double LEAST_SHARE = 0.01;         // eps of line 17: what a layer without any score gets

// HeadCaps, Algorithm 1: cap = C. A layer without any score shares evenly, and so does a model without any.
static void dililazy_caps(const double *inf, int L, int H, int base, double beta, int *cap) {
    const double eps = LEAST_SHARE;
    double fixed = base * (1 - 1 / beta);               // Algorithm 1, line 3: b_fixed
    double pool = base / beta * L * H;                  // Algorithm 1, line 4: B_total
    double L_s = 0;
    for (int i = 0; i < L * H; i++) L_s += inf[i];      // Algorithm 1, line 13: L_s
    pool /= 1 + eps * L;                                // the weights of line 17 sum to 1 + eps L
    for (int i = 0; i < L; i++) {
        double L_alpha = 0;
        for (int j = 0; j < H; j++) L_alpha += inf[i * H + j];   // Algorithm 1, line 8: L_{i,alpha}
        double L_h = L_s > 0 ? L_alpha / L_s : 1.0 / L;          // Algorithm 1, line 16: L_{i,h}
        for (int j = 0; j < H; j++) {
            double S = L_alpha > 0 ? inf[i * H + j] / L_alpha : 1.0 / H;     // Algorithm 1, line 14: S_{j,h}
            double b_dyn = pool * ((eps + L_h) * S);             // Algorithm 1, line 17
            double b = fixed + b_dyn;                            // Algorithm 1, line 18: b_{i,j}
            double C = floor(fmax(0, b) + .5);                   // Algorithm 1, line 19: C_{i,j}
            cap[i * H + j] = (int)fmin(C, INT_MAX);
        }
    }
}

// ---- opening and closing

// Hook open.
static int dililazy_open(Session *s, void *ms) {
    return head_scores_open(s, ms, "dililazy", dililazy_caps, 16, 1.351);
}

// Hook close.
static void dililazy_close(Session *s, void *ms) {
    DiliLazy *x = ms;
    free(x->inf);
    free(x->cap);
}

// Hook bytes: scores and capacities.
static size_t dililazy_bytes(const Session *s, const void *ms) {
    return (size_t)s->c->L * s->c->H * (sizeof(double) + sizeof(int));
}

// ---- the selection at the end of a prefill

// For --trace, when layer l is compressed: scores of the candidates, n (G) a KV head; the capacities,
// and the scores of the heads that they were made from.
static void dililazy_trace_scores(Session *s, const DiliLazy *x, int l, const float *score, const int *n) {
    int H = s->c->H;
    if (!traced(s, l)) return;
    float *inf = scratch(s, (size_t)H * sizeof *inf);
    for (int h = 0; h < H; h++) inf[h] = (float)x->inf[l * H + h];
    trace_scores(s, l, x->name, "qhead", score, H, n, 1);
    trace_f32(s, inf, H, 0, "layer%02d.%s.head_scores", l, x->name);
    trace_i32(s, x->cap + l * H, H, 0, "layer%02d.%s.budgets", l, x->name);
}

// Hook commit: compresses layer l at the end of a turn's prefill. q (T,H,D) are its last queries.
static void dililazy_commit(Session *s, void *ms, int l, const float *q, int T) {
    DiliLazy *x = ms;
    int L = s->c->L, H = s->c->H, R = H / s->c->G, B = budget_now(s), w = min_int(x->snap.window, B);
    if (!snap_due(s, l, B)) return;

    // The capacities are made once, or at every turn's end where --ratio changes the budget
    if (x->base != B - w) {
        x->base = B - w;
        x->caps(x->inf, L, H, x->base, x->beta, x->cap);
    }

    // Sec. 3.3: every query head gets a view of its own: of the candidates, n (G) in each KV head, the best by score
    // (H,N), as many as its capacity allows, and the last w rows. Candidates that no view of the group reads are
    // dropped
    size_t N = kv_longest(s, l), ints = H * sizeof(int);
    int *n = scratch(s, ints), *n_of = scratch(s, ints), *kept = scratch(s, ints), *keep = scratch(s, N * ints);
    float *score = pooled_scores(s, &x->snap, l, q, T, w, POOL_ONLY, n);
    dililazy_trace_scores(s, x, l, score, n);
    for (int h = 0; h < H; h++) n_of[h] = n[h / R];
    top_k_rows(s, score, H, N, n_of, x->cap + (size_t)l * H, keep, (int)N, kept);
    for (int h = 0; h < H; h++) view_set(s, l, h, keep + h * N, kept[h], n_of[h]);
    kv_compact(s, l);
}

// Hook trace, after a prefill: the tokens whose rows each query head will read. What a KV head keeps
// is their union.
static void dililazy_trace(Session *s, void *ms, int l) {
    const DiliLazy *x = ms;
    if (l == s->c->L || s->decoding) return;
    int *rows = scratch(s, (size_t)kv_longest(s, l) * sizeof *rows);
    for (int h = 0; h < s->c->H; h++) {
        const KVHead *hd = kv_head(s, l, h * s->c->G / s->c->H);
        int n = view_rows(s, l, h, rows);
        for (int i = 0; i < n; i++) rows[i] = hd->src[rows[i]];
        trace_i32(s, rows, n, 0, "layer%02d.qhead%02d.%s.chosen", l, h, x->name);
    }
}

static const Opt dililazy_opts[] = {
    { "dililazy-score",    'c', "inf|dili|lazy",
      "which score shares out the budget (dili, lazy: the paper's ablation)" },
    { "calibrate",         'p', "", "measure the heads of the model and write their scores to this file" },
    { "calibrate-needles", 'p', "",
      "JSON list of {question, needle, answer, distractor, reasoning} instead of our three" },
    { NULL, 0, NULL, NULL },
};

// What its entry shares with HeadKV's.
#define BY_HEAD_SCORES \
    .limits = "needs head scores (--head-scores or --calibrate). B must exceed --obs-window", \
    .budget = 128, .file = "head_scores.json", .file_option = "head-scores", .role = ROLE_SELECT, .evicts = 1, \
    .state = sizeof(DiliLazy), .close = dililazy_close, .commit = dililazy_commit, .bytes = dililazy_bytes, \
    .trace = dililazy_trace

const Method dililazy_method = {
    BY_HEAD_SCORES,
    .name    = "dililazy",
    .paper   = "DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression (ACL "
               "submission)",
    .keeps   = "every query head reads its own rows, B on average, more for heads that find "
               "facts; a KV head stores their union",
    .uses    = "--obs-window 16, --kernel 7, --head-scores FILE, --head-beta 1.351",
    .opts    = dililazy_opts,
    .open    = dililazy_open,
};

// ---- HEADKV
// Fu et al.: Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated
// Retrieval and Reasoning. arXiv 2410.19258. DiliLazyKV's nearest rival.
//
// A head is scored by what it looks at while the answer is written, not at the prompt's last token.
// N are the tokens of the needle, and a^t is the head's softmax row from which the answer's token t
// is chosen. A score S_h is the mean over the runs the model answers (app/measure):
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
// Selection, views, unions and the device's part are DiliLazyKV's: dililazy_commit.
// Options: --budget (128, per query head), --obs-window (8), --kernel (7), --head-scores, --head-beta (1.2),
// --headkv-score; the scores are made by --calibrate.

// HeadCaps: cap (L,H) = b_h of all n = L H heads, from their scores (L,H) >= 0. A model without any score shares
// evenly.
static void headkv_caps(const double *score, int L, int H, int base, double beta, int *cap) {
    int n = L * H, pool = (int)floor(base / beta);  // what a head gives to the pool
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
    double beta = opt_real(s->opt, "head-beta");
    if (beta > 0 && beta <= 1) return refuse(s, "headkv: --head-beta is more than 1, found %g", beta);
    return head_scores_open(s, ms, "headkv", headkv_caps, 8, 1.2);
}

static const Opt headkv_opts[] = {
    { "headkv-score", 'c', "r2|r", "retrieval and reasoning (HeadKV-R2), or retrieval alone (HeadKV-R)" },
    { NULL, 0, NULL, NULL },
};

const Method headkv_method = {
    BY_HEAD_SCORES,
    .name    = "headkv",
    .paper   = "HeadKV, arXiv 2410.19258",
    .keeps   = "every query head reads its own rows, B on average, more for heads that look at the "
               "right answer while it is written; a KV head stores their union",
    .uses    = "--obs-window 8, --kernel 7, --head-scores FILE, --head-beta 1.2",
    .opts    = headkv_opts,
    .open    = headkv_open,
};

// ==================================================================================================== 14 TRACES
// What a method says of itself while somebody writes passes down (Session.trace): its scores, its choices, its
// index. What every method has (tokens, queries, rows, outputs) is written by an observer, app/trace.c.

// x (dim[0], ..), `dims` numbers, by the name that fmt makes.
void trace_put(Session *s, const char *type, size_t size, const void *x, const int *dim, int dims, const char *fmt,
               va_list ap) {
    char name[160];
    vsnprintf(name, sizeof name, fmt, ap);
    s->trace->put(s->trace, name, type, size, x, dim, dims);
}

#define TRACE_AS(function, type, width, T) \
    void function(Session *s, const T *x, int n, int d, const char *fmt, ...) { \
        int dim[] = { n, d }; \
        va_list ap; \
        va_start(ap, fmt); \
        trace_put(s, type, width, x, dim, d ? 2 : 1, fmt, ap); \
        va_end(ap); \
    }
TRACE_AS(trace_f32, "F32", 4, float)
TRACE_AS(trace_i32, "I32", 4, int)
TRACE_AS(trace_u8, "U8", 1, void)

// ==================================================================================================== 15 THE TABLE OF METHODS
// An entry is a Method (kvcomp.h); every one stands at the end of its method's section. A hook that is NULL
// does nothing, so the entry of full attention is three texts and no hook.
//
// --method=loopserve-p+lychee+pats names parts, MAX_PARTS at most; every part is an entry with a
// state of its own. The role of an entry says what it decides: the attention of the prefill, which
// rows are kept or read, or how rows are stored. Two parts that decide the same thing are refused,
// and the others are sorted into that order, which is the order of a pass. A hook is called for one
// part after the other (attend and embed: for the first part that has it). What no part decides is
// as in full attention.
//
// --list-methods shows the names in this order. Behind each name: what it decides.

const Method full_method = {
    .name    = "full",
    .paper   = "Vaswani et al., Attention Is All You Need, arXiv 1706.03762",
    .keeps   = "keeps every row, reads every row",
};

const Method *const methods[] = {
    &full_method,
    &streaming_method,              // rows kept
    &window_method,                 // rows kept
    &tova_method,                   // rows kept
    &snapkv_method,                 // rows kept
    &adakv_method,                  // rows kept
    &pyramidkv_method,              // rows kept
    &h2o_method,                    // rows kept, and the prefill for its sums
    &expected_attention_method,     // rows kept
    &knorm_method,                  // rows kept
    &keydiff_method,                // rows kept
    &a_shape_method,                // attention of the prefill
    &tri_shape_method,              // attention of the prefill
    &minference_method,             // attention of the prefill
    &quest_method,                  // rows read
    &loopserve_method,              // attention of the prefill, rows read
    &loopserve_p_method,            // attention of the prefill
    &loopserve_d_method,            // rows read
    &pats_method,                   // how rows are stored
    &q8_method,                     // how rows are stored
    &q4_method,                     // how rows are stored
    &lychee_method,                 // rows read
    &sonic_method,                  // the prefill, rows kept
    &dililazy_method,               // rows kept
    &headkv_method,                 // rows kept
    NULL,
};

// The method whose name is nearest to the n bytes at typed, or NULL when nothing is near.
const char *nearest_method(const char *typed, size_t n) {
    char name[64];
    const char *best = NULL;
    if (!n || n >= sizeof name) return NULL;
    snprintf(name, sizeof name, "%.*s", (int)n, typed);
    int distance = farthest_misspelling(name);
    EACH_METHOD(m) nearer_name(name, (*m)->name, &best, &distance);
    return best;
}

// ==================================================================================================== 16 MEMORY PLAN
// What a dialogue will take, before it takes it, worked out from the shapes. --inspect prints the
// sums, --plan every line, and a device that cannot hold it is refused before the first turn
// (device_bars).

// The most rows a KV head keeps of a dialogue of ctx tokens.
static int rows_kept(const Session *s, int ctx) {
    if (!session_evicts(s)) return ctx;
    if (s->ratio >= 0) return ctx - (int)(ctx * s->ratio);
    return s->budget ? min_int(s->budget, ctx) : ctx;
}

// The most rows a KV head holds at once, while a layer is computed.
static int rows_at_once(const Session *s, int ctx) {
    return s->chunk ? min_int(rows_kept(s, ctx) + s->chunk, ctx) : ctx;
}

// One line more of the plan; nothing for 0 bytes. -> bytes
static size_t plan_line(MemoryPlan *p, const char *what, size_t bytes) {
    if (!bytes) return 0;
    if (p->n_line == PLAN_LINES) die(EXIT_RUN, "a memory plan of more than %d lines", PLAN_LINES);
    p->line[p->n_line++] = (PlanLine){ what, bytes };
    return bytes;
}

// The rooms of the largest pass there is, a turn of ctx tokens, or a chunk of one: those of pass_cuda, and those of
// them that the CPU has as well. sparse 1: a sparse prefill samples probabilities.
static void plan_pass(MemoryPlan *p, const Session *s, int sparse) {
    const Config *c = s->c;
    size_t f = sizeof(float), H = c->H, G = c->G, D = c->D, C = c->C, F = c->F, V = c->V;
    size_t T = s->chunk ? min_int(s->chunk, p->ctx) : p->ctx;
    size_t N = rows_at_once(s, p->ctx);             // rows that a pass may read
    size_t block = min_int(s->batch, p->ctx);       // tokens of a product
    size_t widest = max_size(F, max_size(C, H * D));                            // inputs of one
    size_t span = s->wants & KV_MASS ? T : (size_t)span_room(s, (int)T);        // tokens whose queries live at once
    size_t scores = H * N * f;
    int wide = opt_int(s->opt, "exact") || c->dtype == DT_F32;

    // Attention without tensor cores comes in pieces: 512, and one a block of 32 queries, if a
    // block does not have fewer pairs of tiles.
    size_t works = span * H / 32 + G, pieces = min_size(512 + works, works * (T / 64 + 1)) + 1;

    // Packed, q8_0, q4 or mixed rows become f16 for tensor cores, a layer at a time.
    int halves = s->fk == s->fv && s->fk == full_format(s, OF_K) && !s->packing;
    int f32 = !strcmp(s->fk->name, "f32") || !strcmp(s->fv->name, "f32");

    enum { GPU, BOTH };
    const struct { const char *what; size_t bytes; int where; } room[] = {
        { "residual stream (T,C)", T * C * f, BOTH },
        { "RoPE angles (T,D)", T * D * f, BOTH },
        { span == T ? "q, k, v, attention's output, whole turn" : "q, k, v, attention's output, -b tokens",
          2 * span * (H + G) * D * f, BOTH },
        { "gate and up, -b tokens", block * 2 * F * f, BOTH },
        { "products, -b tokens", block * max_size((H + 2 * G) * D, C) * f, BOTH },
        { "inputs of products in 16 bits, with a scale each", block * (2 * widest + f), GPU },
        { "inputs of products in 32 bits", wide ? block * max_size(C, F) * f : 0, GPU },
        { "pieces of attention", pieces * 32 * (D + 2) * f, GPU },
        { "rows as f16 for tensor cores", halves || f32 ? 0 : 4 * G * N * D, GPU },
        { "maximum and sum of every query", 2 * span * H * f, BOTH },
        { "logits", V * f, BOTH },
        { "the best of the logits", sizeof(BestLogits) + (V / BEST_CHUNK + 1) * (MAX_BEST * sizeof(Cand) + f), GPU },
        { "tokens", p->ctx * (sizeof(Token) + sizeof(int)), BOTH },
        { "second copy of a head that grows", round_to_step((int)N) * raw_row_bytes(s), GPU },
        { "scores of every row", (s->acts ? 4 : 1) * scores, BOTH },              // 4: hooks choose rows by them
        { "scores of queries", s->acts ? max_size(scores, min_size(span * scores, SCORES_BYTES)) : 0, GPU },
        { "samples of a sparse prefill", sparse ? min_size(64 * scores, PROBS_BYTES) : 0, BOTH },
    };
    for (size_t i = 0; i < sizeof room / sizeof *room; i++) {
        size_t n = room[i].bytes;
        p->pass += plan_line(p, room[i].what, n ? room_bytes(n) : 0);       // on a device a buffer that grows
        if (room[i].where == BOTH) p->pass_cpu += n + n / 2;                // a block of the arena
    }
    p->pass_cpu += product_bytes(c->as_q8 ? DT_Q8 : c->dtype, block, widest);
}

// The rows of a dialogue: what is kept in every layer, to which decode appends, and one layer uncompressed, because a
// prefill compresses layer by layer.
static void plan_rows(MemoryPlan *p, const Session *s) {
    const Config *c = s->c;
    size_t row = raw_row_bytes(s), heads = (size_t)c->L * c->G;
    int kept = rows_kept(s, p->ctx), raw = min_int(kept + min_int(kept / 8, KV_GROWTH), p->ctx);
    int by_layer = s->packing && !s->acts;           // else packing waits for the end of a pass
    size_t packed = by_layer ? s->packing->plan(s, p->ctx, &raw) : 0;
    size_t held = round_to_step(raw), all = round_to_step(rows_at_once(s, p->ctx));
    size_t others = heads - c->G;
    size_t tokens = others * (packed ? all : held) + c->G * all;
    p->kv += plan_line(p, "packed rows of every layer", heads * packed);
    p->kv += plan_line(p, packed ? "raw rows of every layer but one" : "rows of every layer but one",
                       others * held * row);
    p->kv += plan_line(p, "raw rows of the layer that is computed", c->G * all * row);
    p->kv += plan_line(p, "tokens of the rows", tokens * sizeof(int));
}

// What a dialogue of -c tokens takes on a device, every allocation a line.
MemoryPlan memory_plan(const Session *s) {
    const Config *c = s->c;
    int ctx = opt_int(s->opt, "ctx-size"), sparse = 0;
    if (!ctx) ctx = c->max_pos;

    MemoryPlan p = { .weights = s->w->bytes, .ctx = ctx, .pass_cpu = ARENA_BLOCK };
    plan_line(&p, "weights", p.weights);
    plan_rows(&p, s);
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        const void *ms = s->part[i].ms;
        size_t bytes = m->plan ? m->plan(s, ms, ctx) : m->bytes ? m->bytes(s, ms) : 0;
        sparse |= m->attend && m->role & ROLE_PREFILL;
        p.parts += plan_line(&p, m->name, bytes);
    }
    plan_pass(&p, s, sparse);
    return p;
}
