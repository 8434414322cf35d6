// kvcomp.h - the nouns of the subject, and what its CPU half (kvcomp.c) and its GPU half (kvcomp.cu) share.
//
// Read this header first. Then kvcomp.c from the top: MODEL (forward is the whole transformer on one
// screen), CACHE, ATTENTION, THE DECODE LOOP, and STREAMINGLLM, the smallest method. Then the paper you
// came for. What all of it stands on is in lib/, each part with a header of its own; what people use it
// through is in app/.
//
// SHAPE LEGEND, used beside every pointer of the project:
//   L  layers                  H  query heads           G  KV heads        R = H/G  query heads that share a KV head
//   D  head_dim                C  model width           F  hidden width of the MLP      V  vocabulary rows
//   T  tokens of the pass: a whole turn in a prefill, 1 in a decode step                N  rows that a KV head holds
// (T,H,D) is row-major: element [t][h][d] stands at (t*H + h)*D + d. Offsets into big arrays are
// size_t.
//
// A function returns normally or ends the program through die() with a documented exit code, unless its
// comment says otherwise. Where a function returns a status, success is 0.
#ifndef KVCOMP_H
#define KVCOMP_H
#include "lib/checkpoint.h"
#include <stdarg.h>

// ------------------------------------------------------------------------ tokens, rows, views
enum { MAX_G = 64 };            // KV heads a kernel's argument has room for

enum {                          // Token.kind
    TOK_USER,                   // fed by a prefill
    TOK_REPLY,                  // fed by a decode step
    TOK_EXTRA,                  // a method's own token (SONIC's Nexus)
};

typedef struct {                // one token of the dialogue. A session keeps every token; rows point back here
    int id;                     // vocabulary id; negative: -1-i is the method's own token i
    int pos;                    // RoPE position
    int seg;                    // the turn, from 0; under VIS_SEGMENT the message, -1: the system message
    int kind;                   // TOK_*
} Token;

typedef struct {                // PATS: rows [row0,row0+n) packed with w bits an element from byte `base` of pk and pv
    int row0, n, w;
    size_t base;
} Region;

enum { KV_STEP = 64 };          // rows: the memory of a head grows in steps of so many

enum { OF_K, OF_V };            // which of a head's rows: its keys or its values. A parameter v is one of them

typedef struct KVHead {         // the rows one KV head of one layer holds, oldest first. Heads differ in length
    int    len;                 // rows held, N of the legend
    int    cap;                 // rows the raw part has room for
    int    room;                // rows src, pos and mass have room for: packed ones and cap
    int   *src;                 // (len) the row's token: index into Session.tok, ascending
    int *pos;                   // (len) RoPE position of its key; tok[src].pos unless a method moved it
    // (len) attention received, summed over the R query heads; NULL unless a part wants KV_MASS. In a
    // device session it lies on the device: mass_fetch_cuda brings it
    float *mass;
    char *k, *v;                // raw rows [packed,len): row r at (r - packed) * row_bytes of the format
    int packed;                 // rows [0,packed) are regions of pk and pv (PATS); else 0
    char  *pk, *pv;             // dense bit-packed rows
    Region *reg;                // (n_reg) ascending by row0, covering [0,packed)
    int    n_reg;
    size_t pk_bytes;            // bytes allocated for pk, and for pv
} KVHead;

typedef struct {                // rows of one head that move: row keep[i] becomes row i, i < n
    KVHead *h;
    const int *keep;            // (n) ascending, so no row moves to a place behind its own
    int n;
    int n_packed, old_packed;   // the first rows that are packed: of those that stay, and before
    int cap;                    // raw rows there is room for afterwards
} Move;

typedef struct {                // what ONE QUERY HEAD reads in a decode step: rows idx[0..n) and all from `tail` on
    int  n, tail;               // n == 0 and tail == 0: every row
    int *idx;                   // (cap) ascending, all < tail
    int  cap;
    int  is_near;               // 1: near holds the listed rows side by side (view_near)
    char *near;                 // (room bytes) n keys, then n values, as they are stored
    size_t room;
} View;

typedef struct Format {         // how raw rows are stored: one Format for K, one for V
    const char *name;
    size_t (*row_bytes)(int D);
    void (*pack)  (char *dst, const float *row, int D);             // row (D) -> dst (row_bytes)
    void (*unpack)(float *row, const char *src, int n, int D);      // n neighbouring rows -> row (n,D)
} Format;

extern const Format formats[];  // "f16" "f32" "bf16" "q8_0" "q4", ended by name NULL

// ------------------------------------------------------------------------ methods
typedef struct Session Session;

enum {                          // Method.rule: what a prefill's query may see, see kv_visible below
    VIS_CAUSAL,
    VIS_SEGMENT,                // SONIC, computed turn by turn
    VIS_SEGMENT_EXACT,          // SONIC's mask as the paper has it: a Nexus token sees later Nexus tokens too
};
enum {                          // Method.wants
    KV_MASS  = 1,               // attention adds its probabilities into KVHead.mass
    // commit reads the query of a pass's last token, or in a decode step must run before the next
    // layer does. Without it a GPU takes the whole step in one go and calls commit for every layer
    // afterwards
    KV_QUERY = 2,
};

enum {                          // Method.steady
    UNSTEADY,                   // the step is launched with its hooks, layer by layer
    STEADY,                     // as the one before it
};

enum {                          // Method.role: what a method decides. Two parts of a "+" must not share a role
    ROLE_PREFILL = 1,           // the prefill's attention
    ROLE_SELECT  = 2,           // which rows are kept or read
    ROLE_STORE   = 4,           // how rows are stored
};

// A method is one table entry of optional hooks, called along the timeline of a pass in the order in
// which they stand here. `ms` is the part's own state: .state bytes, zeroed. q, k and v are f32. A
// prefill goes through a layer in spans of about -b tokens, so that the queries of a whole turn are
// never held, unless a hook `attend` wants them (D2, D90). With Session.dev set, q, k, v and out are
// device memory: hand them on to the functions below, which know, or bring them to the host with
// near_here(). Room for a while is scratch(): what a hook takes is given back when those of all parts have returned.
typedef struct Method {
    const char *name;
    const char *paper;          // citation, for --help METHOD
    const char *keeps;          // one line: what is stored, what is read
    const char *limits;         // what it cannot be combined with, what it needs
    int         budget;         // --budget when the user gives none; 0: the method has no budget
    const char *uses;           // other options it reads, with their defaults: "--sink 4, ..."
    const Opt  *opts;           // its own options, ended by name NULL; NULL: none
    // a file beside the model that it cannot do without, and the option that names another; NULL: none
    const char *file, *file_option;
    const char *rows;           // the format that keys and values are stored in (q8, q4); NULL: -ctk and -ctv
    int role, wants, rule;      // ROLE_* bits, KV_* bits, VIS_*
    int evicts;                 // 1: rows are really dropped; 0: it saves reads only, or bytes a row
    size_t state;

    // Opening: read s->opt, load own weights. Returns 0, or refuse(s, ...), which is -1 with the reason
    // in s->err.
    int  (*open) (Session *s, void *ms);
    void (*close)(Session *s, void *ms);

    // A prefill begins: reset what lives for one turn.
    void (*turn) (Session *s, void *ms);
    // Before the pass of a prefill: rewrite its tokens t (n, room for cap) and return their new number.
    // May truncate.
    int  (*enter)(Session *s, void *ms, Token *t, int n, int cap);
    // x (C): the embedding of a token with a negative id.
    void (*embed)(Session *s, void *ms, const Token *t, float *x);

    // In every layer, after bias and QK-norm, before RoPE, span by span: q (n,H,D), k and v
    // (n,G,D) are those of the tokens base+t0 .. base+t0+n-1.
    void (*project)(Session *s, void *ms, int l, const float *q, const float *k, const float *v, int t0, int n);
    // Prefill attention instead of attn_prefill. out and q (T,H,D); the pass's rows are the last T of
    // each head.
    void (*attend) (Session *s, void *ms, int l, float *out, const float *q, int T);
    // Decode, before attention: set the views. q (H,D), rotated; the current token's row is appended
    // already.
    void (*select) (Session *s, void *ms, int l, const float *q);
    // After attention of layer l: index rows, drop rows. q (T,H,D), rotated, are the last queries of the
    // pass: Session.queries of them, or all if there are fewer; NULL when no part wants any. Called
    // once more with l == L and q NULL when the pass is over.
    void (*commit) (Session *s, void *ms, int l, const float *q, int T);
    // Asked on a device before a decode step: STEADY when project will do nothing, select will launch what
    // it launched in the last step and commit will move no rows, so that the step can be replayed as it
    // was recorded, else UNSTEADY. NULL: STEADY without select, else UNSTEADY.
    int  (*steady) (const Session *s, const void *ms);

    size_t (*bytes) (const Session *s, const void *ms);             // metadata the part holds
    // most metadata for n tokens; NULL: what it holds once open
    size_t (*plan) (const Session *s, const void *ms, int n);
    // tokens from n_tok on were truncated
    void (*forget)(Session *s, void *ms, int n_tok);
    // After a pass that --trace writes down: the part's own values of layer l, by trace_f32 and its
    // like; with l == L what all layers share.
    void (*trace) (Session *s, void *ms, int l);

    // For an observer (observe): called at every moment WATCH_* of a pass and in every layer l, with the
    // numbers x that the moment names, on the device in a device session. While somebody watches, a pass
    // is one span, and all logits come to the host.
    void (*watch) (Session *s, void *ms, int moment, int l, const float *x);
} Method;

enum {                          // moments of a pass at which Method.watch is called
    WATCH_TOKENS,               // the tokens of the pass are there
    WATCH_KEYS,                 // x: the keys (T,G,D) of layer l, not rotated
    WATCH_ROWS,                 // x: the queries (T,H,D) of layer l, rotated; its new rows are appended
    WATCH_OUT,                  // x: what attention of layer l made, (T,H,D)
    WATCH_END,                  // the pass is over, its logits are there
};

extern const Method *const methods[];           // ended by NULL; the model knows no method by name
#define EACH_METHOD(m) for (const Method *const *m = methods; *m; m++)
#define EACH_PART(s, p) for (Part *p = (s)->part; p < (s)->part + (s)->n_part + (s)->n_observer; p++)
// The parts that have this hook; the scratch memory that they take in it is given back behind them.
#define EACH_HOOK(s, p, hook) \
    for (size_t taken = scratch_mark(s), once = 1; once; once = 0, scratch_reset(s, taken)) \
        EACH_PART(s, p) if (p->m->hook)

typedef struct Packing {        // rows that are not stored one by one (PATS)
    // buf (n,D) f16 = rows r0..r0+n-1 of K (OF_K) or V (OF_V).
    void (*load)(const Session *s, const KVHead *h, int v, int r0, int n, uint16_t *buf);
    // Where these rows lie, or the first of them.
    Ahead (*stored)(const Session *s, const KVHead *h, int v, int r0, int n);
    // Of rows [0,packed) keep these (n, ascending), with the bits that their tokens have by now.
    void (*keep)(Session *s, KVHead *h, const int *keep, int n);
    // The most bytes that the packed rows of a head take in a dialogue of n tokens, K and V
    // together, and the most rows beside them that are raw between two passes.
    size_t (*plan)(const Session *s, int n, int *raw);
    int dense;                  // 1: row after row without gaps, as decode_kernel reads them
} Packing;

enum { MAX_PARTS = 4 };          // of a method
enum { MAX_OBSERVERS = 2 };      // of a session
typedef struct {                // "loopserve-p+lychee+pats" is three parts, in timeline order
    const Method *m;
    void *ms;                   // (m->state bytes)
} Part;

// ------------------------------------------------------------------------ the best of the logits
enum { MAX_BEST = 128 };       // the most logits that a device brings instead of all
enum { BEST_CHUNK = 4096 };     // logits that one block looks through

typedef struct {                // an id that may be drawn
    float x;                    // its logit
    int id;
} Cand;

typedef struct {                // what a device brings of a step's logits when the reply needs no more
    int worst;                  // the largest of their bits without the sign: NaN and infinity show here
    int n;
    Cand best[MAX_BEST];       // (n) the largest, by ascending id; of equal ones those with lower ids
} BestLogits;

// ------------------------------------------------------------------------ sessions
typedef struct {                // where the time of a session went, in seconds, and what attention read
    double prefill, decode;     // whole passes
    double attend, select, commit, index;
    long   n_prefill, n_decode; // tokens
    double bytes_attended;      // bytes of K and V rows that attention read in decode, summed
    long   steps;               // decode steps
    size_t peak;                // most KV bytes ever held
} Clock;

struct Session {                // one dialogue: its tokens, its rows, its method
    const Config  *c;           // read only, shared by sessions
    const Weights *w;
    const Options *opt;
    Part part[MAX_PARTS + MAX_OBSERVERS];       // the method's parts, and then the observers
    int  n_part, n_observer;
    int  watched;               // 1: some observer has a hook watch
    int  wants, rule;           // of all parts together
    int  attends, evicts;       // 1: some part has a hook attend; drops rows
    // 1: rule or hooks act in a prefill beyond what the model does. Then a part that packs rows waits for the end of
    // the pass, because others read them until then
    int  acts;
    // queries of a turn's last tokens that commit gets at least: 1 with KV_QUERY; an open hook, or who
    // adds a part, may raise it
    int  queries;
    const Format *fk, *fv;      // how raw rows of K and V are stored

    Token *tok;                 // (cap_tok) every token seen
    int n_tok, cap_tok;
    int base;                   // index of this pass's first token
    int n_sys;                  // leading ids of the next prefill that are the system message ...
    int n_foot;                 // ... that end the previous reply ...
    int n_head;                 // ... and trailing ids that open the next reply (a chat sets, prefill clears them)
    int pos_next;               // RoPE position of the next token
    int pos_end;                // a method whose positions end: there; 0: nowhere
    int pos_extra;              // positions that a turn takes beside its tokens', at most
    int turn;                   // prefills before this one
    int decoding;               // 1 in a decode pass
    int step;                   // decode passes since the last prefill, this one not counted

    int budget;                 // B, rows a KV head; of dililazy and headkv a query head, on average
    double ratio;               // --ratio: budget = N - floor(N ratio + 1e-6) at a prefill's end; < 0: off
    int applied;                // the budget that held at the end of the last prefill

    KVHead *head;               // (L,G), see kv_head()
    View   *view;               // (L,H), see kv_view()
    const Packing *packing;     // storage of rows [0,packed); NULL: no part packs
    const Layer *alt;           // (L) weights for tokens of kind TOK_EXTRA; NULL: the model's own

    int chunk;                  // --chunk: most tokens of a prefill's pass; 0: a prefill is one pass
    int batch;                  // rows of a prefill block: -b, or what suits the device
    struct Arena *scratch;      // memory of a pass
    float *logits;              // (V) of the pass's last token
    int picks;                  // so many of the largest logits of a decode step come from a device; 0: all
    const BestLogits *picked;   // those of the last pass; NULL: logits has them all
    Clock clk;
    struct Device *dev;         // what kvcomp.cu holds for the session; NULL on the CPU
    // grows when a view is set, or the memory of rows or of what select reads moves: whatever was
    // told to the GPU is old then
    unsigned changes;
    jmp_buf *stop;              // where a pass goes that is not wanted any more; NULL: it runs to its end
    int (*unwanted)(void);      // 1: the pass is not wanted any more; NULL: nobody says so
    struct Trace *trace;        // where passes are written down (--trace); NULL: nowhere
    Token *coming;              // the tokens of the prefill that runs, owned; NULL: none runs
    // forward(): what hooks call for a pass of their own
    float *(*forward)(Session *s, const Token *t, int T);
    char err[512];              // why open refused
};

// May the query token a (index i) see the key token b (index j)? One definition for both devices.
// window: the layer's sliding window, 0 for none. The segment rules are SONIC's Eq. 3 to 5.
KV_HD static inline int kv_visible(int rule, int window, const Token *a, int i, const Token *b, int j) {
    if (window && b->pos <= a->pos - window) return 0;
    if (rule == VIS_CAUSAL) return j <= i;

    int both_nexus = a->kind == TOK_EXTRA && b->kind == TOK_EXTRA;
    if (both_nexus) return rule == VIS_SEGMENT_EXACT || b->seg <= a->seg;       // Eq. 5

    int in_message = b->kind != TOK_EXTRA && b->seg >= 0;
    if (j <= i && in_message) return b->seg == a->seg;                          // Eq. 4
    return j <= i;                                                              // Eq. 3
}

// ------------------------------------------------------------------------ numbers both compilers share
static inline size_t bit_bytes(int n) { return ((size_t)n + 63) / 64 * 8; }     // of n bits, in words of 64

// Bytes of a growing buffer on a device that must hold n: a quarter more, but not much more of a
// large one.
static inline size_t room_bytes(size_t n) { return n + min_size(n / 4, (size_t)64 << 20) + 256; }

// ------------------------------------------------------------------------ heads and views
static inline KVHead *kv_head(const Session *s, int l, int g) { return &s->head[(size_t)l * s->c->G + g]; }
static inline View   *kv_view(const Session *s, int l, int h) { return &s->view[(size_t)l * s->c->H + h]; }

static inline int same_view(View a, View b) {
    if (a.n != b.n || a.tail != b.tail) return 0;
    return !a.n || !memcmp(a.idx, b.idx, (size_t)a.n * sizeof(int));
}

// Does head h > 0 of layer l read what head h - 1 reads?
static inline int same_as_before(const Session *s, int l, int h) {
    return same_view(*kv_view(s, l, h - 1), *kv_view(s, l, h));
}

// ------------------------------------------------------------------------ scores (sections 6 and 8)
enum { PAGE = 16 };                             // rows of a Quest page
enum {                                          // the order of window scores' steps
    JOIN_POOL,                                  // join the heads of a group, then pool over neighbouring rows
    POOL_ONLY,                                  // pool; every query head keeps its own
};

// ------------------------------------------------------------------------ PATS' numbers (section 10)
enum { PATS_BLOCK = 64 };                       // bytes of the paper's block
enum { PATS_GUARD = 16 };                       // bytes that can be read behind the last packed element

// ------------------------------------------------------------------------ LoopServe's lines (sections 7 and 9)
typedef struct {                // what one query head reads in one prefill
    int n, p0;                  // rows its KV head holds; the first row, and query, of this pass
    int dense;                  // 1: every cell is read, v and s do not matter
    uint64_t *v;                // (n bits) vertical lines: columns
    uint64_t *s;                // (n bits) slashes, row - column; among them 0: every row sees itself
} Lines;

typedef struct {                // how LoopServe chooses them
    double alpha;               // share of the sampled attention that must be recovered
    int sink, local;            // lines that are always taken
    int holdout;                // 1: odd samples only validate
    double max_cells;           // beyond this share of the cells: dense
} LoopRule;

typedef struct {                // what a choice came to
    double mass;                // share of the sampled attention
    double cells;               // share of the cells
} LoopFound;

// ------------------------------------------------------------------------ text, for LycheeCluster's chunks (section 11)
typedef struct TokenText {      // the text of tokens, given by whoever has a tokenizer
    const void *ctx;            // the tokenizer; NULL: every token is empty, and none is special
    // What the id adds to the text, *len bytes; a SentencePiece blank is a space.
    const char *(*bytes)(const void *ctx, int id, int *len);
    // 1: a control token, which has no text and ends the stream before it.
    int (*special)(const void *ctx, int id);
} TokenText;
extern TokenText token_text;

// ------------------------------------------------------------------------ LycheeCluster's index (section 11)
typedef struct {                // one level of a tree: n nodes over some children. On the device in a device session
    int n;
    uint16_t *mu;               // (n,D) centres, bf16
    float *r;                   // (n) radii: every chunk key below lies so near to the rounded mu
    int *tokens;                // (n) of the chunks below; 0: the node is empty
    int *of;                    // (children) the node above a child
} Nodes;

typedef struct {                // the index of one KV head of one layer
    Nodes fine;                 // clusters of chunks
    Nodes coarse;               // units of clusters; n 0 without --lychee-kg
} Tree;

enum {
    KMEANS_ITERATIONS = 10,
    MOST_UNITS = 64,            // coarse units of a tree
};

typedef struct {                // the index of a session
    int bound;                  // --paper: a node's score is the bound of Eq. 2; 0: q.mu
    int kg;                     // coarse units opened in a step, at least; 0: there are none
    int min, max;               // tokens of a chunk
    int buffer, sink;           // recent rows and first rows outside the index
    int full_layers;            // the first layers read every row
    int B;                      // the budget of this turn, sinks included

    unsigned char *level;       // boundary levels of the tokens whose successor is known (stb_ds)
    int *start;                 // (M+1) chunk j is tokens start[j]..start[j+1]-1 (stb_ds)
    int M;                      // chunks
    int M_built;                // chunks when the trees were built; 0: there are none
    int changed;                // 1: the last pass has built the trees or grafted on them
    Tree *tree;                 // (L,G)
    char *mem;                  // (bytes) where all trees lie
    size_t bytes;
} Lychee;

// Tokens that the chunks of a list may have together.
static inline int chunk_room(const Lychee *x) { return max_int(x->B - x->sink, 0); }

#ifdef __cplusplus
extern "C" {
#endif

// ------------------------------------------------------------------------ finding by name (sections 2, 4 and 15)
const Method *method_find(const char *name, size_t n);         // the n bytes at name; NULL: there is none
const char   *nearest_method(const char *typed, size_t n);     // the one that is meant; NULL: nothing is near
const Format *format_find(const char *name);                   // NULL: there is none
int           batch_rows(const Options *o, const char *device); // rows of a prefill block: -b, or what suits it
void          ids_must_have_rows(const Config *c, const int *ids, int n);       // exit 3

// path = the file that the method needs beside the model. 0: it is not there
int           method_file(const Method *m, const Config *c, const Options *o, char path[1100]);

// What an open hook returns when its options do not fit: writes the reason into s->err and returns -1.
int   refuse(Session *s, const char *fmt, ...) KV_PRINTF(2, 3);

// Memory of a pass: arena_take and its like (lib/base.h) from the session's arena.
static inline void  *scratch(Session *s, size_t bytes)      { return arena_take(s->scratch, bytes); }
static inline size_t scratch_mark(Session *s)               { return arena_mark(s->scratch); }
static inline void   scratch_reset(Session *s, size_t mark) { arena_reset(s->scratch, mark); }

// ------------------------------------------------------------------------ cache (section 2)
// Appends the rows of tokens base+t0 .. base+t0+n-1 of this pass: k and v (n,G,D), k rotated. Its three
// steps: room for n more rows in every head of layer l; their bytes; and last their tokens, positions
// and lengths.
void kv_append (Session *s, int l, const float *k, const float *v, int t0, int n);
void kv_reserve(Session *s, int l, int n);
void kv_note   (Session *s, int l, int t0, int n);

// Every head g of layer l keeps n[g] of its rows, those of keep + g stride, ascending; stride 0: the n[0] rows of
// keep. The rest is given back; views reset.
void kv_keep    (Session *s, int l, const int *keep, size_t stride, const int *n);
void kv_compact (Session *s, int l);            // drop rows that no view of their group reads; renumber views
void kv_truncate(Session *s, int n_tok);        // forget tokens from n_tok on, and their rows; views reset
void kv_repos   (Session *s, int l, int g, int row, int pos);   // rotate one key to another position

// buf (n,D): the listed rows, or rows r0..r0+n-1 when rows is NULL.
void kv_load_k(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf);
void kv_load_v(const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf);

const void *near_here(Session *s, const void *p, size_t bytes); // bytes at p, where the rows lie, where C can read them

int    kv_longest   (const Session *s, int l);  // rows of the longest head of layer l
size_t kv_bytes     (const Session *s);         // what the allocator holds for rows
size_t kv_bytes_full(const Session *s);         // what full attention would hold for the same tokens
size_t kv_meta_bytes(const Session *s);         // views, and the parts' indexes
int    layer_acts   (const Session *s, int l);  // 0: hooks skip this layer, which has a window (D6)
int    layer_window (const Session *s, int l);  // its sliding window; 0: it has none
int    pos_fits     (const Session *s, int n, int extra);   // are there positions for n + extra tokens?
int    budget_now   (const Session *s);         // that at a prefill's end, which the decode steps behind it have too
int    sinks        (const Session *s, int own);    // first rows a method always keeps or reads: --sink, else its own

// the format full attention is compared in: the session's, but f16 where that one compresses
const Format *full_format(const Session *s, int v);

// ---- views: idx (n) ascending, all < tail
void view_set  (Session *s, int l, int h, const int *idx, int n, int tail);
void view_group(Session *s, int l, int g, const int *idx, int n, int tail);     // for all query heads of KV head g
void view_all  (Session *s);                                // every view: every row
int  view_rows (const Session *s, int l, int h, int *rows); // rows (N): the view spelled out -> count

// ------------------------------------------------------------------------ attention (section 3)
// One token through the views: q and out (H,D).
void attn_decode  (Session *s, int l, float *out, const float *q);
// Tokens base+t0 .. base+t0+n-1 of this pass over every row that the rule lets them see: q and out
// (n,H,D).
void attn_prefill (Session *s, int l, float *out, const float *q, int t0, int n);
// score (H,N), N = kv_longest: the mean softmax row of the last min(W,T) queries of q (T,H,D), whose
// last one is the session's last token.
void window_scores(Session *s, int l, const float *q, int T, int W, float *score);

// ------------------------------------------------------------------------ model (sections 1 and 4)
// session_try: NULL, and the reason in err, where the options and the method do not fit; session_open: exit 2
Session *session_try (const Config *c, const Weights *w, const Options *o, const char *method, char err[512]);
Session *session_open(const Config *c, const Weights *w, const Options *o, const char *method);
void     session_close(Session *s);
void     session_reset(Session *s);             // forget every token; exit 2
int      session_try_reset(Session *s);         // 0, or -1 with the reason in s->err, and then nothing is forgotten

// Adds an observer as the last part: a Method that looks and decides nothing -> its state, zeroed. NULL
// when MAX_OBSERVERS look already. unobserve takes it away; session_close does, too.
void *observe(Session *s, const Method *m);
void  unobserve(Session *s, const Method *m);
void  watch(Session *s, int moment, int l, const float *x);     // calls the hook watch of every observer

const float *prefill(Session *s, const int *ids, int n);    // one turn -> logits (V) of its last id
const float *decode (Session *s, int id);       // one token -> logits (V), unless Session.picked has the best
static inline int session_evicts(const Session *s) { return s->evicts; }       // does a part drop rows?

// -c allows no more rows: compresses at once, as at a prefill's end -> rows fewer in the longest head; 0: none
int session_compress(Session *s);

void   add_tokens(Session *s, const Token *in, int T);  // one with pos < 0 gets the next position
float *forward(Session *s, const Token *t, int T);      // one pass over tokens already rewritten by enter
void   pass_poll(Session *s);                           // gives the pass up if it is not wanted any more

// What a pass of either half is made of
// attention of n tokens of a pass of T tokens, from t0 on, and the hooks around it; late 1: but the commit hooks
void   attend_rows(Session *s, int l, float *out, const float *q, int t0, int n, int T, int late);
int    same_weights(const Session *s, int t, int end, const Layer **y, int l);  // tokens t.. of one product, weights *y
void   pass_angles(const Session *s, float *cs, int T); // cs (T,D): of the tokens' positions, on the host
double timed(double *sum, double t0);                   // adds the seconds since t0 -> the time now
void   note_peak(Session *s);                           // keeps the most bytes of rows ever held

// Where the span of a pass of T tokens ends that begins with token t0, and how long one can be.
int span_end (const Session *s, int t0, int T);
int span_room(const Session *s, int T);

enum { PLAN_LINES = 32 };
static const size_t DEVICE_OWN   = (size_t)256 << 20;   // cuBLAS, the graph of a step, gaps between rows
static const size_t SCORES_BYTES = (size_t)64 << 20;    // of some queries' scores at once; those of one may take more
static const size_t PROBS_BYTES  = (size_t)1 << 30;     // of all heads' sampled probabilities; more: of a KV head's

typedef struct {                // one allocation of a memory plan, or a few that belong together
    const char *what;
    size_t bytes;
} PlanLine;

typedef struct {                // bytes that a dialogue of ctx tokens needs on a device
    size_t weights;
    size_t kv;                  // rows
    size_t parts;               // what the method adds
    size_t pass;                // scratch memory of the largest pass on a GPU
    size_t pass_cpu;            // and on the CPU
    int ctx;
    PlanLine line[PLAN_LINES];  // what these sums are made of
    int n_line;
} MemoryPlan;

MemoryPlan memory_plan(const Session *s);

// ------------------------------------------------------------------------ scores of heads (section 13)
// The kinds of scores: those of DiliLazyKV, then those of HeadKV.
enum { SCORE_INF, SCORE_DILI, SCORE_LAZY, SCORE_R, SCORE_R2, SCORES };
extern const char *score_names[SCORES][2];    // ours, and the authors' (NULL: none)

// ------------------------------------------------------------------------ traces (section 14)
// A method writes its own values down by trace_f32 and its like, where traced() says so: where it computes them, or
// in its hook trace. What every method has is written by an observer (app/trace.h).
typedef struct Trace {
    // takes a tensor: its name, its type as safetensors names it, bytes of a number, its numbers in memory of the host,
    // and its shape dim (dims)
    void (*put)(struct Trace *x, const char *name, const char *type, size_t size, const void *data, const int *dim,
                int dims);
    unsigned char *layer;       // (L) 1: it is written down
    int pass;                   // passes that have begun
} Trace;

// 1: layer l of this pass is written down; l == L: something of this pass is.
static inline int traced(const Session *s, int l) { return s->trace && (l == s->c->L || s->trace->layer[l]); }

// x of shape (n,d), or (n) if d is 0, in memory of the host, by the name that the format makes:
// "layer%02d.head%02d.snapkv.score".
void trace_f32(Session *s, const float *x, int n, int d, const char *fmt, ...) KV_PRINTF(5, 6);
void trace_i32(Session *s, const int *x, int n, int d, const char *fmt, ...) KV_PRINTF(5, 6);
void trace_u8 (Session *s, const void *x, int n, int d, const char *fmt, ...) KV_PRINTF(5, 6);

// The same of any type, as Trace.put takes it.
void trace_put(Session *s, const char *type, size_t size, const void *x, const int *dim, int dims, const char *fmt,
               va_list ap);

// ------------------------------------------------------------------------ the GPU half (kvcomp.cu)
// When Session.dev is set, KVHead.k and .v are device memory and the functions above call these.
#ifdef KVCOMP_CUDA
#define KV_DEV(s) ((s)->dev != NULL)
#else
#define KV_DEV(s) 0             // built without CUDA: the compiler drops the calls below
#endif

// ---- the device and a session on it
int    device_there(void);              // does a GPU answer?
int    device_bars(const Session *s, char why[512]);    // 0: and it holds memory_plan; else the exit code, and why
int    device_open(Session *s);         // sets s->dev; 0, or -1 with s->err set; exit 4
void   device_reset(Session *s);
void   device_close(Session *s);        // after every row has been given back
float *pass_cuda(Session *s, int T);    // forward() of section 1
void   tokens_give_cuda(Session *s);    // s->tok to the device, for hooks without a pass

// ---- memory: floats and bytes here and there
float *device_floats(const float *x, size_t n);                     // x (n) in device memory; device_drop gives it back
void   device_drop(float *x);
void   bytes_load_cuda(void *to, const void *from, size_t n);       // n bytes to the host
char  *near_grow_cuda(char *old, size_t have, size_t want);         // a method's memory there: keeps what is in it
char  *near_zero_cuda(size_t n);                                    // n zero bytes of it
void   near_free_cuda(char *p);
double device_copy_rate(void);          // bytes a second that a copy on the device reads and writes

// ---- rows
void rows_resize_cuda(Session *s, KVHead *h, int cap);  // room for cap raw rows; h->packed is the new number already
void rows_free_cuda  (Session *s, KVHead *h);           // all of them; leaves k, v, pk and pv NULL

// k and v on the device; h->len is still the old one
void rows_append_cuda(Session *s, int l, const float *k, const float *v, int t0, int n);

// raw rows, src and mass of n_moves heads, to memory of the size that head_reserve asks for next
void rows_move_cuda(Session *s, const Move *move, int n_moves);
void rows_load_cuda(const Format *f, const char *from, int n, int D, float *buf);   // neighbours -> buf (n,D) here
void rows_store_cuda(char *to, const char *raw, size_t bytes);

// h's packed memory anew: the regions reg (n_reg), `bytes` long for K and for V. Row i was row keep[i],
// packed or raw
void rows_repack_cuda(Session *s, KVHead *h, const Region *reg, int n_reg, size_t bytes, const int *keep, int rows64);

// ---- attention
void attn_prefill_cuda (Session *s, int l, float *out, const float *q, int t0, int n);
void attn_decode_cuda  (Session *s, int l, float *out, const float *q);
void window_scores_cuda(Session *s, int l, const float *q, int T, int W, float *score);
void mass_fetch_cuda(Session *s, KVHead *h);    // h->mass, to which attention adds on the device
void views_fetch_cuda(Session *s);              // views that the device chose and kept, to the host
void views_drop_cuda(Session *s);

// ---- baselines (section 6). Everything a function returns lies on the device
// q (T,H,D), n (G) -> (G,N); POOL_ONLY: (H,N)
float *pooled_scores_cuda(Session *s, int l, const float *q, int T, int W, const int *n, int width,
                          int mean, int order);

// score (H,N), n (G) -> (G,N): sums over the heads of a group, divided by `over`
float *join_rows_cuda(Session *s, const float *score, const int *n, int N, int over);

// x (S,stride) on the device; n, k, count (S) and idx (S,per) on the host.
void top_k_rows_cuda(Session *s, const float *x, int S, size_t stride, const int *n, const int *k, int *idx, int per,
                     int *count);
float *adakv_pooled_cuda(Session *s, const float *score, int N, const int *n);  // score (G,N), n (G) -> (sum of n)

// sum (H,D), outer (H,D,D) += of q (n,H,D), which are the pass's from t0 on, at positions >= sink
void moments_add_cuda(Session *s, double *sum, double *outer, const float *q, int t0, int n, int sink);

// mu (H,D), cov (H,D,D) -> z (H,N), squares (G,N): |v|^2, on the host
void expected_scores_cuda(Session *s, int l, const float *mu, const float *cov, float *z, float *squares, int N);

// ---- lines (section 7). q, out (T,H,D) and P on the device; lines (H) here
void   lines_attend_cuda(Session *s, int l, const Lines *lines, float *out, const float *q, int T);
int    line_batch_cuda(const Session *s, int l, int m);         // KV heads that line_probs_cuda should do at once
float *line_probs_cuda(Session *s, int l, int g0, int ng, const float *q, const int *t, int m);     // -> (ng R,m,N)
float *line_sums_cuda(Session *s, int l, int g0, int ng, const float *P, int T, int m, int slash,
                      int least);                               // -> (ng R,N)

// ---- Quest (section 8)
// pages from..to-1; bound (pages,2,D) there
void page_bounds_cuda(Session *s, int l, int g, char *bound, int from, int to, int dtype);

// bound (G) of those, cap pages long; q (H,D); u (G,pages): the scores come here, or NULL
void quest_select_cuda(Session *s, int l, const char *const *bound, int pages, int cap, int best,
                       const float *q, int dtype, float *u);

// ---- LoopServe (section 9). P (ng R,m,N) and ring (obs,H,D) on the device; lines and found (ng R)
// here
void   choose_lines_cuda(Session *s, int l, int g0, int ng, const LoopRule *rule, const float *P, int T, int m,
                         Lines *lines, LoopFound *found);
void   ring_keep_cuda(Session *s, float *ring, int obs);        // ring (L,obs,H,D): steps put their queries there
void   ring_put_cuda(float *slot, const float *q, size_t n);    // slot, q (n)
float *ring_scores_cuda(Session *s, int l, const float *ring, int obs, int first, int w);       // -> (H,N)

// score (G,N) on the device, n (G) here
void   ring_select_cuda(Session *s, int l, const float *score, const int *n, int budget);

// ---- LycheeCluster (section 11). t (G): the trees of layer l, with room made
void lychee_build_cuda(Session *s, const Lychee *x, int l, const Tree *t);
void lychee_graft_cuda(Session *s, const Lychee *x, int l, int from);

// q (H,D) on the device; S (G,clusters): the scores come here, or NULL
void lychee_seek_cuda(Session *s, const Lychee *x, int l, const Tree *t, const float *q, float *S);

#ifdef __cplusplus
}
#endif
#endif
