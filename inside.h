// inside.h - what is inside the methods of kvcomp.c, for the pictures and measurements of app/, which show it.
#ifndef KVCOMP_INSIDE_H
#define KVCOMP_INSIDE_H
#include "kvcomp.h"
#include <stb/stb_ds.h>

#define EACH_PART(s, p) for (Part *p = (s)->part; p < (s)->part + (s)->n_part + (s)->n_observer; p++)
#define EACH_HOOK(s, p, hook) EACH_PART(s, p) if (p->m->hook)      // the parts that have this hook

enum {
    KV_TILE = 64,           // rows of a tile: their keys as f32 lie in the first-level cache
    Q_BLOCK = MAX_R,        // most queries of a tile: R heads, times as many tokens as fit
    KV_CHUNK = 2048,        // rows of one running softmax
};

typedef struct {            // what one thread works in
    float *k, *v;           // (KV_TILE,D) rows as f32
    float *q;               // (Q_BLOCK,D) the queries
    struct Q8Query *q8;     // the same as integers, for keys of q8_0 (D89); NULL: keys are not
    int tok[Q_BLOCK];       // the token of each query, an index into Session.tok
    int rows[KV_TILE];      // room for the row numbers of a tile
    float *sc;              // (m,n) scores of the tile, then exp(score - max)
    float max[Q_BLOCK];     // the running softmax of each query: the largest score so far,
    float sum[Q_BLOCK];     // the sum of exp(score - max),
    float *acc;             // (Q_BLOCK,D) and the sum of exp(score - max) v
} Tile;

enum { LINE_BLOCK = 64 };       // query rows computed together, counted from p0; at most Q_BLOCK

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
    double *g;                  // (2N) residuals of the lines on the selecting samples
    float *top;                 // (2N) variant a: w^max, the largest cell of every line
    LineItem *item;             // (2N) variant b: the heap; variant a: two sorted lists of N
    int *R;                     // (m) sampled rows
} LoopRoom;

typedef struct {
    // The prefill.
    LoopRule rule;              // alpha, kept lines, hold-out, limits
    int variant_a;              // 1: Algorithm 2 as in the paper
    int m;                      // sampled rows of a pass
    int min_context;            // heads with at most so many rows are computed in full

    // Decode, Algorithm 3.
    int decodes;                // 1: this part chooses rows in decode (loopserve, loopserve-d)
    int first;                  // the token of an answer at which the first choice is made: 16
    int interval;               // n_d: tokens from one choice to the next
    int obs;                    // queries that choose, |X^obs|
    int prompt_end;             // number of tokens when the last prefill ended
    int ring_from;              // the ring holds no queries of tokens before this one
    int chosen;                 // 1: in this answer some head reads chosen rows only
    int budget;                 // B: rows to choose
    float *ring;                // (L,obs,H,D) queries, token i in slot i % obs; NULL before the first
} LoopServe;

enum {
    PATS_ALIGN = 64,                // bytes: a region starts at a multiple of it
    PATS_MAX_D = 1024,              // largest head_dim
};

typedef struct {
    // Options.
    int schedule;                   // PATS_MIDDLE, ..
    int is_static;                  // 1: the bits of the dialogue's end, 0: the ratchet
    int mid;                        // 1: half a step is added on reading
    int rows64;                     // 1: the paper's format, 0: dense
    int b_min, b_max;               // fewest and most bits a row outside the window loses
    int sink;                       // first tokens, which lose b_min bits only
    int window;                     // last tokens, which stay raw
    int T_end;                      // static: tokens of the whole dialogue

    // State.
    int T_last;                     // tokens seen at the last re-pack
    int cut;                        // tokens [0,cut) are packed, in every head that holds them
    int decided;                    // tokens seen in the pass for which `due` holds; 0: not decided yet
    int due;                        // 1: this pass packs rows, layer by layer
    unsigned char *bits;            // (cap) B[t]: bits that the rows of token t have lost
    int cap;
} Pats;

typedef struct TokenText {      // the text of tokens, given by whoever has a tokenizer
    const void *ctx;            // the tokenizer; NULL: every token is empty, and none is special
    // What the id adds to the text, *len bytes; a SentencePiece blank is a space.
    const char *(*bytes)(const void *ctx, int id, int *len);
    // 1: a control token, which has no text and ends the stream before it.
    int (*special)(const void *ctx, int id);
} TokenText;

enum {                          // level of the boundary after a token; the lower, the better an end
    CUT_STRUCTURE = 1,          // empty line, closing bracket, code fence
    CUT_SENTENCE,               // . ? ! and a line end
    CUT_PHRASE,                 // , ; :
    CUT_BLANK,                  // between two words
    CUT_NONE,                   // none of these
    CUT_INSIDE = 9,             // inside a UTF-8 character: only where there is no other end
};

enum { STREAM_TAIL = 64 };      // bytes of the stream that are remembered

typedef struct {                // the last bytes of the stream; a special token empties it
    unsigned char b[STREAM_TAIL];
    int n;                      // bytes there are
} TextTail;

typedef struct {
    float beta;                 // weight of |q| r in a node's score
    int kg;                     // units opened in a step; 0: there are none
    int min, max;               // tokens of a chunk
    int buffer, sink;           // recent rows and first rows outside the index
    int full_layers;            // the first layers read every row
    int iters;                  // of k-means
    int per_cluster;            // chunks a cluster has on average
    int B;                      // the budget of this turn, sinks included

    unsigned char *level;       // boundary levels of the tokens whose successor is known (stb_ds)
    TextTail tail;              // the text up to the last of them
    int *start;                 // (M+1) chunk j is tokens start[j]..start[j+1]-1 (stb_ds)
    int M;                      // chunks
    int M_built;                // chunks when the index was built; 0: there is none
    int changed;                // 1: the last pass has built the index or grafted on it
    Tree *tree;                 // (L,G)
} Lychee;

enum {                          // DiliLazy.alloc; the first two are the words of --dililazy-alloc
    ALLOC_PAPER,                // Algorithm 1, its overspending divided out
    ALLOC_CODE,                 // as the authors' program computes it
    ALLOC_HEADKV,               // the pool of headkv
};

// Tensors stand in the file in the order in which they were computed, and their names say what they
// are: pass0012.layer03.q is (T,H,D). Passes are numbered whether they are written down or not, so
// that a name means the same in a shorter trace. The model writes what every method has; a method
// adds its own values where it computes them, or in its trace hook.
struct Trace {
    SafeWriter out;
    unsigned char *layer;       // (L) 1: it is written down
    Numbers *step;              // decode steps that are (stb_ds); NULL: all
    int pass;                   // passes that have begun
    int on;                     // 1: this pass is written down
};

// The kinds of scores: those of DiliLazyKV, then those of HeadKV.
enum { SCORE_INF, SCORE_DILI, SCORE_LAZY, SCORE_R, SCORE_R2, SCORES };

// ---- attention of a layer, and the whole transformer
// Adds T tokens to the session. A token with pos < 0 gets the next position.
void add_tokens(Session *s, const Token *in, int T);

// The whole transformer: one pass over T new tokens -> the logits (V) of the last one.
float *forward(Session *s, const Token *in, int T);

// ---- formats of raw rows
// The format of this name; NULL: there is none.
const Format *format_find(const char *name);

// ---- new rows
// Appends the rows of tokens base+t0 .. base+t0+n-1 to every head of layer l. k, v (n,G,D), where
// the rows live: in device memory in a device session.
void kv_append(Session *s, int l, const float *k, const float *v, int t0, int n);

// ---- reading rows
// buf (n,D) f32 = keys, or values.
void kv_load_k(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf);

// Rows of the longest head of layer l.
int kv_longest(const Session *s, int l);

// ---- views
// rows (N) = the rows query head h reads, in ascending order -> how many.
int view_rows(const Session *s, int l, int h, int *rows);

// ---- dropping rows
// Forgets the tokens from n_tok on and their rows. Every view reads every row afterwards.
void kv_truncate(Session *s, int n_tok);

// ---- accounting
// Bytes of all K and V rows, the unused part of the last step of KV_STEP rows included.
size_t kv_bytes(const Session *s);

// The format full attention is compared in: the session's, but f16 where that one compresses.
const Format *full_format(const Session *s, int v);

// The bytes full attention would hold for the same tokens. It has no tokens of a method's own.
size_t kv_bytes_full(const Session *s);

// Bytes beside the rows: sources, positions, masses, tables of regions, views, the parts' indexes.
size_t kv_meta_bytes(const Session *s);

// ---- what a method asks
// The budget B at the end of a prefill: --budget rows a KV head. --ratio F instead removes the
// share F of the N tokens seen: B = N - floor(N F + 1e-6) (D8). Decode steps have the B of the
// prefill before them.
int budget_now(const Session *s);

// 0: hooks skip this layer, because it has a sliding window and other layers of the model have
// none. In a model with windowed layers only, methods act on all of them (D6).
int layer_acts(const Session *s, int l);

// ---- tiles
// A Tile for every thread, in scratch memory.
Tile *tiles_new(Session *s);

// ---- scores for methods
// The last w = min(T,W) queries of the pass are the observers. score (H,N) = the mean of their
// softmax rows over the rows held, for every query head (D11). q (T,H,D) ends with the pass;
// N = kv_longest(s,l).
void window_scores(Session *s, int l, const float *q, int T, int W, float *score);

// ---- a turn
// Ends the program (exit 3) when one of the ids (n) has no row in the embedding. Every id that
// comes from outside passes here before anything is read at its place: a tokenizer, a template or a
// text may name ids that the model does not have.
void ids_must_have_rows(const Config *c, const int *ids, int n);

// 1: there are positions for n more tokens and `extra` positions beside them.
int pos_fits(const Session *s, int n, int extra);

// One turn: the ids (n) that it adds to the dialogue -> the logits (V) of the last one.
const float *prefill(Session *s, const int *ids, int n);

// One token of the reply, which belongs to the segment of the token before it -> its logits (V).
const float *decode(Session *s, int id);

// ---- the parts of a method
// The method whose name is the n characters at `name`; NULL: there is none.
const Method *method_find(const char *name, size_t n);

// ---- observers
void *observe(Session *s, const Method *m);

// ---- sessions
// Rows of a prefill block: -b, or what suits the device. A GPU's products of 512 rows are too small
// to keep all of it at work.
int batch_rows(const Options *o, const char *device);

// A session for this model, these options and this method; NULL, and the reason in err, if they do
// not fit.
Session *session_try(const Config *c, const Weights *w, const Options *o, const char *method,
                     char err[512]);

// The same, but the program ends (exit 2) when they do not fit.
Session *session_open(const Config *c, const Weights *w, const Options *o, const char *method);

// Gives back everything a session holds. Rows go before the device that may hold them.
void session_close(Session *s);

// Forgets the dialogue: opens every part anew, closes what it was, and drops every row. 0, or -1 with
// the reason in s->err when a part does not open, as one whose file has gone away; then the session
// is as it was. So the new states are opened before the old ones are closed.
int session_try_reset(Session *s);

// The same, but the program ends (exit 2) when a part does not open.
void session_reset(Session *s);

// ---- sets of lines
// list: the set bits of b (n bits), ascending. Returns their number; with list NULL it only counts.
int bit_list(const uint64_t *b, int n, int *list);

// Takes every line out of a.
void lines_clear(Lines *a);

// ---- what the methods with lines share
// What MInference and LoopServe look at: softmax rows of a few queries of one head. P (m,n): the
// probabilities with which query row R[i] of head h attends to its n rows, 0 where it may not look.
// R (m) are row numbers; q (T,H,D) are the queries of the last T rows; t is room.
void line_probs(const Session *s, int l, int h, const float *q, int T, const int *R, int m,
                float *P, Tile *t);

// ---- samples and lengths
// RandomSelect: m = min(want, nh) of the nh rows of a pass, one at random from each of m strata of
// equal size; the last sample is the last row. The rows depend on turn and layer only (D31).
// R (m): the rows, ascending, counted from the first row of the pass. Returns m.
int sample_rows(int nh, int want, int turn, int layer, int *R);

// ---- prefill
// Working memory for every thread, in scratch: m samples of heads with at most N rows.
LoopRoom *loop_rooms(Session *s, int m, int N);

// Chooses the lines of one head from its sample, by the variant the options say. Sets a->dense when
// the choice fails.
void loop_choose(const LoopServe *x, const LineSample *p, Lines *a, LoopRoom *w, LoopFound *f);

// ---- opening and closing
// Reads the options of the prefill into the LoopServe *ms. Returns 0, or -1 with s->err set.
int loopserve_p_open(Session *s, void *ms);

// ---- how many bits a token loses
// The number of bits that token src, counted from 0, should have lost when T tokens have been seen
// (D25).
int pats_bits(const Pats *x, int src, int T);

// ---- rows
// Bytes of a row of D elements of w bits.
size_t pats_row_bytes(int rows64, int D, int w);

// ---- the chunker
// The text of a token, n bytes; "" without a tokenizer and for a method's own tokens.
const char *text_of(int id, int *n);

// ---- the index
// Does layer l have an index?
int indexed_layer(const Session *s, const Lychee *x, int l);

// The first token of the recent buffer: the index ends before it.
int t_idx(const Lychee *x);

// Tokens that the chunks of one list may have together.
int room_for_chunks(const Lychee *x);

// ---- Algorithm 1
// Algorithm 1: cap (L,H) = C from the scores inf (L,H) >= 0 and b_c = base >= 0.
void dililazy_caps(const double *inf, int L, int H, int base, double beta, double eps, int alloc,
                   int *cap);

// ---- suggestions for misspelt names
// The method whose name is nearest to the n bytes at typed, or NULL when nothing is near.
const char *nearest_method(const char *typed, size_t n);

// ---- SONIC's adapter
// The hash by which an adapter knows its base: FNV-1a 64 over the embedding and then layer 0's
// q_proj, as the file has them: with --weights q8_0 they are read once more from there.
uint64_t sonic_fingerprint(const Weights *w);

// One line more of the plan; nothing for 0 bytes. -> bytes
size_t plan_line(MemoryPlan *p, const char *what, size_t bytes, int host);

// What a dialogue of -c tokens takes on a device, every allocation a line.
MemoryPlan memory_plan(const Session *s);

// ---- --trace FILE
// From now on the passes of this session are written down in x; NULL: not any more.
void trace_session(Session *s, struct Trace *x);

// ---- score files
// The scores (L,H) called `which` (a name in score_names) of a file; the caller frees them. NULL,
// with the reason in err, when the file cannot be read or does not fit the model.
double *scores_read(const char *path, const char *which, int L, int H, char err[512]);

extern const Method pats_method;
extern TokenText token_text;
extern const char *score_names[SCORES][2];

#endif
