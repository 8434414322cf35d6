// kvcomp.h - the one header of kvcomp: what the CPU half (kvcomp.c) and the GPU half (kvcomp.cu) share.
//
// Reading order for a newcomer: this header (the nouns), then in kvcomp.c the sections MODEL (forward: one screen that
// is the whole transformer), CACHE, ATTENTION, and any one method, say STREAMINGLLM; then the paper you came for.
//
// Shape legend, used beside every pointer of the project:
//   L  layers             H  query heads         G  KV heads           R = H/G query heads that share a KV head
//   D  head_dim           C  model width         F  hidden width of the MLP                  V  vocabulary rows
//   T  tokens of the pass (a whole turn's prefill, or 1 in decode)     N  rows a KV head holds
// (T,H,D) is row-major: element [t][h][d] stands at (t*H + h)*D + d. Offsets into big arrays are size_t.
//
// Every function returns normally or ends the program through die() with a documented exit code, unless its comment
// says otherwise. Success is 0 everywhere.
#ifndef KVCOMP_H
#define KVCOMP_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define KVCOMP_VERSION "0.1"

enum { EXIT_OK = 0, EXIT_RUN = 1, EXIT_USAGE = 2, EXIT_MODEL = 3, EXIT_MEMORY = 4, EXIT_CHECK = 5, EXIT_INTERRUPT = 130 };

// ------------------------------------------------------------------------------------------------ config and weights
enum { DT_F32, DT_F16, DT_BF16 };               // dtypes of weights and of plain KV rows; bytes: dtype_size()
enum { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

typedef struct {                // sizes and constants of one checkpoint, all read from its config.json
    char  model_type[32];       // "llama", "mistral", "qwen2", "qwen3"
    int   L, H, G, D, C, F, V;  // see the legend
    int   max_pos;              // max_position_embeddings
    float eps;                  // of every RMSNorm
    int   tied;                 // 1: the output matrix is the embedding
    int   qk_norm;              // 1: RMSNorm per head on q and k, before RoPE (Qwen3)
    int   window;               // sliding window W: a query at position p sees keys p-W+1..p; 0: none
    unsigned char *windowed;    // (L) 1: this layer uses the window; NULL: no layer does
    int   rope_type;            // ROPE_*
    double theta, factor;       // base frequency; scaling factor
    double low_freq, high_freq, beta_fast, beta_slow, attn_factor;  // llama3: low, high; yarn: betas and cos/sin scale (0: 0.1 ln f + 1)
    int   orig_pos;             // original_max_position_embeddings
    int   bos, eos[8], n_eos;   // bos -1: none; eos ids of config and generation_config together
    int   dtype;                // DT_* most weights have
    char  dir[1024];            // the folder it came from ("synthetic:NAME" when made from a seed)
} Config;

typedef struct { const void *data; int dtype, rows, cols; } Tensor;   // W (rows,cols): y = W x maps cols -> rows; a vector has rows 1

typedef struct {                // one decoder layer. SONIC's Nexus branch is a second one of these with its own matrices
    Tensor attn_norm, mlp_norm;         // (C)
    Tensor wq, wk, wv, wo;              // (H*D,C) (G*D,C) (G*D,C) (C,H*D)
    Tensor bq, bk, bv, bo;              // biases; data NULL: none
    Tensor q_norm, k_norm;              // (D); data NULL: none
    Tensor gate, up, down;              // (F,C) (F,C) (C,F)
    Tensor bgate, bup, bdown;           // biases of the MLP; data NULL: none
} Layer;

typedef struct {
    Tensor embed, norm, head;           // (V,C) (C) (V,C); head.data == embed.data when tied
    Layer *layer;                       // (L)
    const float *inv_freq;              // (D/2) RoPE frequencies after scaling, f32 copies for the GPU
    const double *inv_freq64;           // (D/2) the same in double: angles are pos*freq in double
    float rope_scale;                   // factor on cos and sin (yarn), 1 otherwise
    size_t bytes;                       // of all tensors in use
    void *files;                        // the mapped files, for weights_close
} Weights;

// ------------------------------------------------------------------------------------------------ tokens, rows, views
enum { MAX_G = 64 };                            // KV heads a kernel's argument has room for
enum { MAX_R = 64 };                            // query heads a KV head may have: a tile of attention holds them all
enum { TOK_USER, TOK_REPLY, TOK_EXTRA };        // fed by prefill; fed by decode; a method's own token (SONIC's Nexus)

typedef struct {            // one token of the dialogue. A session keeps every token it has seen; rows point back here
    int id;                 // vocabulary id; negative: -1-i is the method's own token i
    int pos;                // RoPE position
    int seg;                // the turn, from 0; under VIS_SEGMENT: message number, -1 for the system message
    int kind;               // TOK_*
} Token;

typedef struct { int row0, n, w; size_t base; } Region;  // PATS: rows [row0,row0+n) packed with w bits an element from byte base of pk/pv

typedef struct KVHead {     // the rows one KV head of one layer holds, oldest first. Heads differ in length
    int len, cap;           // rows held; rows the raw part has room for
    int   *src;             // (len) the row's token: index into Session.tok, ascending
    int   *pos;             // (len) RoPE position its key is rotated to; == tok[src].pos unless a method moved it
    float *mass;            // (len) attention received, summed over the R query heads; NULL unless a part wants KV_MASS. On a device: mass_fetch_cuda
    char  *k, *v;           // raw rows [packed,len): row r at (r-packed)*row_bytes of the format
    int   packed;           // rows [0,packed) live in pk, pv as regions (PATS); 0 for every other format
    char  *pk, *pv;         // dense bit-packed rows
    Region *reg; int n_reg; // ascending by row0, covering [0,packed)
    size_t pk_bytes;        // bytes allocated for pk (and for pv)
} KVHead;

typedef struct {            // what ONE QUERY HEAD reads in a decode step: rows idx[0..n) and every row from tail on
    int n, tail, cap;       // idx ascending, all < tail; n == 0 and tail == 0: every row
    int *idx;               // (cap)
    int same;               // 1: reads what the head before reads, whose idx and near serve both (view_of)
    int is_near;            // 1: near holds the rows of idx side by side, K then V, as they are stored (view_near)
    char *near; size_t room; // (room) bytes
} View;

typedef struct Format {     // how raw rows are stored. One for K and one for V
    const char *name;
    size_t (*row_bytes)(int D);
    void (*pack)  (char *dst, const float *row, int D);     // row (D) f32 -> dst (row_bytes)
    void (*unpack)(float *row, const char *src, int n, int D); // n rows
} Format;
extern const Format formats[];                  // "f32" "f16" "bf16" "q8_0", ended by name NULL

// ------------------------------------------------------------------------------------------------ methods, sessions
typedef struct Session Session;
typedef struct Options Options;                 // every command-line value; read with opt_int() and friends below
typedef struct { const char *name; char kind; const char *def, *help; } Opt;   // kind 'i' int, 'f' real, 's' text, 'b' flag, 'c' choice (def "a|b|c", the first is the default)

enum { VIS_CAUSAL, VIS_SEGMENT, VIS_SEGMENT_EXACT };   // prefill mask: kv_visible below
enum {                          // Method.wants
    KV_MASS  = 1,               // attention adds its probabilities into KVHead.mass
    KV_QUERY = 2,               // in a decode step commit reads q, or must run before the next layer does. Without it
};                              // a GPU takes the whole step in one go and calls commit for every layer afterwards
enum { ROLE_PREFILL = 1, ROLE_SELECT = 2, ROLE_STORE = 4 };   // what a method decides; two parts of a "+" must not share a role

// A method is a table line of optional hooks along the timeline of one pass. ms is the part's own state (zeroed, .state bytes).
// q, k, v are f32. Hooks see a whole turn: -b never changes what they get. With Session.dev set, q, k, v and out are device
// memory: hand them on, or bring them with on_host().
typedef struct Method {
    const char *name;
    const char *paper;          // citation for --help METHOD
    const char *keeps;          // one line: what is stored, what is read (also: "saves reads only")
    const char *limits;         // what cannot be combined, what it needs; printed by --help METHOD
    int budget;                 // --budget when the user gives none; 0: the method has no budget
    const char *uses;           // the other shared options it reads, with its defaults: "--sink 4, ..."
    const Opt *opts;            // its own options, ended by name NULL; NULL: none
    int role, wants, rule;      // ROLE_* bits, KV_MASS, VIS_*
    int evicts;                 // 1: rows are really dropped; 0: saves reads only, or bytes a row
    size_t state;
    int  (*open)   (Session *s, void *ms);                                        // read s->opt, load own weights; 0, or -1 with s->err set
    void (*close)  (Session *s, void *ms);
    int  (*enter)  (Session *s, void *ms, Token *t, int n, int cap);              // prefill only, before the pass: rewrite its tokens -> new n. May truncate
    void (*embed)  (Session *s, void *ms, const Token *t, float *x);              // x (C): the embedding of a token with a negative id
    void (*project)(Session *s, void *ms, int l, const float *q, const float *k, const float *v, int T); // after bias and QK-norm, before RoPE. q (T,H,D) k,v (T,G,D)
    void (*attend) (Session *s, void *ms, int l, float *out, const float *q, int T);   // prefill attention. out, q (T,H,D); rows of the pass are the last T of each head
    void (*select) (Session *s, void *ms, int l, const float *q);                 // decode: set the views. q (H,D), post-RoPE; the current token's row is appended
    int  (*steady) (const Session *s, const void *ms);                            // on a device, before a decode step. 1: project would do nothing, and select launch what it
                                                                                  // launched in the last step, with lengths found in device memory, as long as Session.changes is the same;
                                                                                  // 0 also where commit moves rows in every step. NULL: no such hooks, or never steady
    void (*commit) (Session *s, void *ms, int l, const float *q, int T);          // after attention of layer l: index, drop rows. l == L: end of the pass, q NULL
    void (*turn)   (Session *s, void *ms);                                        // a prefill begins (before enter): reset what lives one turn
    size_t (*bytes)(const Session *s, const void *ms);                            // metadata the part holds
    size_t (*plan) (const Session *s, const void *ms, int n);                     // at most so many when n tokens are held; NULL: what it holds once open
    void (*forget) (Session *s, void *ms, int n_tok);                             // tokens from n_tok on were truncated
    void (*stats)  (const Session *s, const void *ms, FILE *out);                 // statistics on request, one line each
} Method;
extern const Method *const methods[];           // ended by NULL; the model knows no method by name
#define EACH_METHOD(m) for (const Method *const *m = methods; *m; m++)

typedef struct { const char *p; size_t bytes; } Ahead;  // memory that will be read next: a kernel asks for it, in portions, while it computes

typedef struct Packing {        // rows that are not stored one by one (PATS): how to read them, how to drop some
    void (*load)(const Session *s, const KVHead *h, int v, int r0, int n, uint16_t *buf);  // buf (n,D) f16 = rows r0.. of K (v 0) or V (v 1)
    Ahead (*stored)(const Session *s, const KVHead *h, int v, int r0, int n);           // where rows r0.. lie, or the first of them
    void (*keep)(Session *s, KVHead *h, const int *keep, int n);                        // of rows [0,packed) keep these (ascending), exactly as stored
} Packing;

typedef struct { const Method *m; void *ms; } Part;     // "loopserve-p+lychee+pats" is three parts, in timeline order
enum { MAX_PARTS = 4 };

typedef struct {            // where the time of a session went, seconds; attended rows for kv_bytes_attended
    double prefill, decode, attend, select, commit, index;
    long n_prefill, n_decode;                   // tokens
    double bytes_attended; long steps;          // bytes of K and V rows read by attention in decode, summed; decode steps
    size_t peak;                                // most KV bytes ever held
} Clock;

struct Session {
    const Config *c; const Weights *w;          // read only, shared by sessions
    const Options *opt;
    Part part[MAX_PARTS]; int n_part;
    int wants, rule;                            // of all parts together
    const Format *fk, *fv;                      // how raw rows are stored
    Token *tok; int n_tok, cap_tok, base;       // every token seen; base: index of this pass's first
    int n_sys, n_foot, n_head;                  // set by a chat before prefill: leading ids that are the system message; that end the
                                                // previous reply; trailing ids that open the next reply. 0 with --ids. Cleared by prefill
    int pos_next;                               // RoPE position of the next token
    int pos_end, pos_extra;                     // a method whose positions end: there (0: nowhere); positions a turn takes beside its tokens', at most
    int turn;                                   // prefills before this one
    int decoding, step;                         // 1 in a decode pass; decode passes since the last prefill, this one not counted
    int budget;                                 // rows per KV head (0: the method's default); open may set it
    int applied;                                // what it came to at the end of the last prefill
    double ratio;                               // --ratio: budget = N - floor(N*ratio + 1e-6) at each prefill end; < 0: off
    KVHead *head; View *view;                   // (L,G), (L,H)
    const char *made_for;                       // chat template that a method's own weights were trained with; NULL: none, or not said
    const Layer *alt;                           // (L) weights for rows of kind TOK_EXTRA; NULL: the model's own
    const struct Packing *packing;              // storage of rows [0,packed); NULL: no part packs
    int batch;                                  // -b
    struct Arena *scratch;                      // per-pass memory
    float *logits;                              // (V) of the pass's last token
    Clock clk;
    struct Device *dev;                         // what kvcomp.cu holds for the session; NULL on the CPU
    unsigned changes;                           // grows when a view is set, or the memory of rows or of what select reads moves: what was told to the GPU is old then
    float *(*forward)(Session *s, const Token *t, int T);   // forward(): what hooks call for a pass of their own
    char err[512];
};

// May the query token a (index i) see the key token b (index j)? window: the layer's sliding window, 0 for none.
// One definition for both devices. The segment rules are SONIC's Eq. 3-5; EXACT lets a Nexus token see later Nexus tokens.
#if defined(__CUDACC__)
#define KV_HD __host__ __device__
#else
#define KV_HD
#endif
KV_HD static inline int kv_visible(int rule, int window, const Token *a, int i, const Token *b, int j) {
    if (window && b->pos <= a->pos - window) return 0;
    if (rule != VIS_CAUSAL && a->kind == TOK_EXTRA && b->kind == TOK_EXTRA) return rule == VIS_SEGMENT_EXACT || b->seg <= a->seg;  // Eq. 5
    if (rule != VIS_CAUSAL && j <= i && b->kind != TOK_EXTRA && b->seg >= 0) return b->seg == a->seg;                            // Eq. 4
    return j <= i;                                                                                                                // Eq. 3
}

// ------------------------------------------------------------------------------------------------ numbers both compilers share
KV_HD static inline float bf16_to_f32(uint16_t h) { union { uint32_t u; float f; } x; x.u = (uint32_t)h << 16; return x.f; }
KV_HD static inline uint16_t f32_to_bf16(float f) {     // nearest even; saturates at the largest finite bf16
    union { uint32_t u; float f; } x; x.f = f;
    if ((x.u & 0x7fffffff) > 0x7f800000) return (uint16_t)(x.u >> 16 | 64);              // NaN stays NaN
    uint32_t r = (x.u + 0x7fff + (x.u >> 16 & 1)) >> 16;
    if ((r & 0x7fff) >= 0x7f80) r = (r & 0x8000) | 0x7f7f;
    return (uint16_t)r;
}
KV_HD static inline float f16_to_f32(uint16_t h) {
    union { uint32_t u; float f; } x;
    uint32_t s = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) x.u = s | 0x7f800000 | m << 13;
    else if (e) x.u = s | (e + 112) << 23 | m << 13;
    else { x.f = (float)m * 5.9604644775390625e-8f; x.u |= s; }                           // subnormal: m * 2^-24
    return x.f;
}
KV_HD static inline uint16_t f32_to_f16(float f) {      // nearest even; saturates at 65504
    union { uint32_t u; float f; } x; x.f = f;
    uint32_t s = x.u >> 16 & 0x8000, a = x.u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(s | 0x7e00);                                    // NaN
    if (a >= 0x477ff000) return (uint16_t)(s | 0x7bff);                                   // rounds past 65504
    if (a < 0x38800000) {                                                                 // below 2^-14: subnormal, rounded by the float adder
        x.u = a; x.f += 0.5f; return (uint16_t)(s | (x.u - 0x3f000000));                  // ulp of 0.5f is 2^-24
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(s | (a - 0x38000000) >> 13);
}
enum { AGG_MEAN, AGG_MAX, AGG_SUM };                    // how the query heads of a group become one
enum { PAGE = 16 };                                     // rows of a Quest page
enum { JOIN_POOL, POOL_ONLY, POOL_JOIN };               // window scores: heads first, then neighbours; neighbours only; neighbours, then heads
KV_HD static inline int64_t fixed_mass(float x) { return (int64_t)rint((double)x * 1099511627776.0); }     // 2^40 x: sums of these do not depend on their order
enum { PATS_TRUNC, PATS_NEAREST, PATS_MID };            // how PATS rounds; mid: truncated, and half a step added on every read
enum { PATS_BLOCK = 64, PATS_GUARD = 16 };              // the paper's block; bytes readable behind the last packed element
KV_HD static inline uint16_t pats_cut(uint16_t h, int b, int rounding) {                  // one element: h an f16, b bits to lose
    if (!b) return h;
    unsigned m = h & 0x7fff, top = 0x7bffu >> b << b;
    if (rounding != PATS_NEAREST || m > 0x7c00) return (uint16_t)(h >> b << b);           // a NaN is never rounded
    m = (m + (1u << (b - 1)) - 1 + (m >> b & 1)) >> b << b;                               // nearest even; the carry into the exponent is right
    return (uint16_t)((h & 0x8000) | (m > top ? top : m));
}
KV_HD static inline uint64_t splitmix64(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
KV_HD static inline uint64_t mix64(uint64_t x) { return splitmix64(&x); }                 // first output of state x (rules.md B3)

typedef struct {            // what one query head reads in one prefill (section 10b)
    int n, p0;              // rows its KV head holds; the first row of this pass: the queries are rows p0..n-1
    int dense;              // 1: every cell; v and s do not matter
    int tile64;             // 1: slashes rounded up to ranges of columns, 0: exactly the cells of the lines
    uint64_t *v, *s;        // (n bits) columns; offsets. s must hold offset 0, so that every row sees itself
} Lines;
typedef struct {            // how LoopServe chooses them (section 11)
    double alpha;
    int sink, local;        // lines always taken
    int holdout;            // 1: odd samples only validate
    double max_cells, max_tiles;        // beyond these shares of dense: dense
} LoopRule;
typedef struct { double mass, cells; } LoopFound;        // shares: of the sampled mass; of the cells (tile64: tiles)
static inline size_t bit_bytes(int n) { return ((size_t)n + 63) / 64 * 8; }

// ------------------------------------------------------------------------------------------------ LycheeCluster's index (section 13), on the device in a device session
typedef struct {            // one level of a tree: n nodes over some children
    int n;
    uint16_t *mu;           // (n,D) centres, bf16
    float *r;               // (n) covers every chunk key below the node, measured against the rounded mu
    int *chunks, *tokens;   // (n) below the node
    int *first, *last;      // (n) its children, ascending; -1: none
    int *next;              // (children) the sibling after a child; -1: none
} Nodes;
typedef struct {            // the index of one KV head of one layer
    Nodes fine, coarse;     // clusters of chunks; units of clusters (n 0 where nothing reads them)
    int *parent;            // (clusters) their unit
    float *rho;             // (units) max over its clusters c of |mu_c - mu_g| + beta r_c: what exact pruning needs
    char *mem; size_t bytes;
} Tree;
enum { GQA_MAX, GQA_SUM, GQA_HEAD };
enum { LAZY_BALL, LAZY_MEAN, LAZY_FREEZE };
enum { LIST_ROWS, LIST_TAIL, LIST_TOKENS, LIST_CLUSTERS, LIST_HEAD };  // numbers before the rows of a list made on the device: a View's n and tail; of LycheeCluster's, tokens and clusters used
typedef struct {            // what the kernels need to know of a session's index
    float beta, beta_coarse;
    int gqa, units, lazy, unit, tokens, pool_max, iters;        // units: coarse units opened at least, 0: a flat scan
    int min, room, sink;                            // fewest tokens of a chunk; tokens the chunks of a list may have; rows before the index
    int M, cap; const int *start;                   // chunks; most there will be before the next build; their first tokens (M+1), on the host
} LycheeRule;

KV_HD static inline int    min_int (int a, int b)       { return a < b ? a : b; }
KV_HD static inline int    max_int (int a, int b)       { return a > b ? a : b; }
KV_HD static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
KV_HD static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

static inline size_t dtype_size(int dt) { return dt == DT_F32 ? 4 : 2; }
static inline KVHead *kv_head(const Session *s, int l, int g) { return &s->head[(size_t)l * s->c->G + g]; }
static inline View   *kv_view(const Session *s, int l, int h) { return &s->view[(size_t)l * s->c->H + h]; }
static inline View view_of(const Session *s, int l, int h) {     // with the idx and near it reads by
    View w = *kv_view(s, l, h);
    while (kv_view(s, l, h)->same) { const View *b = kv_view(s, l, --h); w.idx = b->idx; w.near = b->near; w.is_near = b->is_near; }
    return w;
}
static inline int same_view(View a, View b) { return a.n == b.n && a.tail == b.tail && (!a.n || !memcmp(a.idx, b.idx, (size_t)a.n * sizeof(int))); }
static inline int same_as_before(const Session *s, int l, int h) { return kv_view(s, l, h)->same || same_view(view_of(s, l, h - 1), view_of(s, l, h)); }    // head h > 0 of its layer

#ifdef __cplusplus
extern "C" {
#endif
// ------------------------------------------------------------------------------------------------ helpers (section 1)
#if defined(__GNUC__)
#define KV_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define KV_PRINTF(a, b)
#endif
void  die(int code, const char *fmt, ...) KV_PRINTF(2, 3);   // one line on stderr, then exit(code). Never returns
void *xmalloc(size_t n);                        // exit 4 when there is no memory
void *xcalloc(size_t n, size_t size);
void *xrealloc(void *p, size_t n);
int   refuse(Session *s, const char *fmt, ...) KV_PRINTF(2, 3);   // what an open hook returns when options do not fit: s->err, -1
double now(void);                               // seconds, monotonic
typedef struct Arena Arena;                     // bump memory of one pass: no malloc in the decode path once it has grown
void *scratch(Session *s, size_t bytes);        // 64-byte aligned, valid until the end of the pass (or scratch_reset)
size_t scratch_mark(Session *s);                // remember the fill level ...
void  scratch_reset(Session *s, size_t mark);   // ... and fall back to it

// ------------------------------------------------------------------------------------------------ options (section 8): one table drives parsing, --help and defaults
Options *options_new(void);                                             // every option of the program and of every method at its default
void     options_free(Options *o);
int      options_set(Options *o, const char *name, const char *value, char err[256]);  // 0, or -1 with the reason in err. name without dashes
int         opt_given(const Options *o, const char *name);              // 1: set by the user, not the default
int         opt_int (const Options *o, const char *name);               // also flags: 0 or 1
double      opt_real(const Options *o, const char *name);
const char *opt_str (const Options *o, const char *name);               // "" when empty
int         opt_choice(const Options *o, const char *name, const char *words);     // place of the value in words, "a|b|c"

// ------------------------------------------------------------------------------------------------ math (section 4), dispatched at run time
// Results do not depend on the number of threads, nor on T: row t of a product is the same bits whatever the batch.
void matmul(float *y, const float *x, const Tensor *w, int T);          // y (T,rows) = x (T,cols) W^T
void matmul_strided(float *y, size_t ldy, const float *x, size_t ldx, const Tensor *w, int T);
void add_bias(float *y, const Tensor *b, int T);                        // y (T,b.cols) += b; nothing if b.data NULL
void rmsnorm(float *y, const float *x, const Tensor *w, int T, int n, float eps);   // y, x (T,n)
void swiglu(float *g, const float *u, size_t n);                        // g = silu(g) * u
void to_f32(float *dst, const void *src, int dtype, size_t n);
void from_f32(void *dst, const float *src, int dtype, size_t n);
void attn_scores(float *s, const float *q, const float *k, int m, int n, int D, float scale);  // s (m,n) = scale * q (m,D) k (n,D)^T
void attn_mix(float *o, const float *p, const float *v, int m, int n, int D);                  // o (m,D) += p (m,n) v (n,D)
void exp_shift(float *x, float max, int n, float *sum);                 // x = exp(x - max), *sum += them; -INFINITY gives 0
float dot_f32(const float *a, const float *b, int n);                   // the same lane order as attn_scores
const char *simd_name(void);                                            // "avx512", "avx2", "plain"; chosen at start, KVCOMP_SIMD overrides it
int  top_k(const float *x, int n, int k, int *idx);                     // the k largest (ties: lower index), indices ascending -> count

// ------------------------------------------------------------------------------------------------ cache (section 5)
void   kv_append  (Session *s, int l, const float *k, const float *v, int t0, int n);  // k, v (n,G,D), rotated: tokens base+t0 .. of this pass; KV_DEV: in device memory
void   kv_reserve (Session *s, int l, int n);                                      // the three parts of it: room for n more rows in every head of layer l,
void   kv_note    (Session *s, int l, int t0, int n);                              // their bytes, and last their tokens, positions, lengths
void   kv_keep    (Session *s, int l, int g, const int *keep, int n);              // keep (n) ascending; the rest is given back; the group's views reset
void   kv_compact (Session *s, int l, int g);                                      // drop rows no view of the group reads, renumber the views
void   kv_truncate(Session *s, int n_tok);                                         // forget tokens (and their rows) from n_tok on; views reset
void   kv_repos   (Session *s, int l, int g, int row, int pos);                    // re-rotate one key to another position
void   kv_load_k  (const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf); // buf (n,D) f32; rows NULL: rows r0..r0+n-1
void   kv_load_v  (const Session *s, const KVHead *h, const int *rows, int r0, int n, float *buf);
const float *on_host(Session *s, const float *q, int t0, int n);                   // rows t0..t0+n-1 (n,H,D) of a hook's q, where C can read them
int    kv_longest (const Session *s, int l);                                       // rows of the longest head of layer l
void   view_set   (Session *s, int l, int h, const int *idx, int n, int tail);     // idx (n) ascending, all < tail
void   view_group (Session *s, int l, int g, const int *idx, int n, int tail);     // the same for all query heads of KV head g
void   view_room  (Session *s, int l, int h, int n, int near);                     // room for a list of n rows, and for view_near
void   view_near  (Session *s, int l, int h);                                      // copies the listed rows side by side: for a list that many steps will read
void   view_all   (Session *s);                                                    // every view: every row
int    view_rows  (const Session *s, int l, int h, int *rows);                     // rows (N): the view spelled out -> count
size_t kv_bytes   (const Session *s);                                              // rows, src, pos, mass, regions: what the allocator holds
size_t kv_bytes_full(const Session *s);                                            // what full attention would hold for the same tokens and -ctk/-ctv
size_t kv_meta_bytes(const Session *s);                                            // views and the parts' indexes
int    layer_acts (const Session *s, int l);                                       // 0: a windowed layer of a model that also has global ones: hooks skip it (rules.md A9)
int    pos_fits   (const Session *s, int n, int extra);                            // are there positions for n tokens and `extra` more?
int    budget_now (const Session *s);                                              // B at a prefill end: --budget, or from --ratio and N = n_tok

// ------------------------------------------------------------------------------------------------ attention (section 6)
void attn_rows   (Session *s, int l, int h, const float *q, const int *rows, int n, float *out, float *prob); // one softmax over exactly these rows; q, out (D); prob (n) or NULL
void attn_decode (Session *s, int l, float *out, const float *q);                  // (H,D), through the views
void attn_prefill(Session *s, int l, float *out, const float *q, int t0, int n);   // out, q (n,H,D): tokens base+t0 .. of this pass, rule and causality
void window_scores(Session *s, int l, const float *q, int T, int W, float *score); // (H,N) mean over the last min(W,T) queries of their softmax rows; N = kv_longest

// ------------------------------------------------------------------------------------------------ model (section 7)
Config  *config_load(const char *dir);                                             // exit 3 with the key's name
Config  *config_synthetic(const char *shape);                                      // "llama-3.2-1b", ... or "L16,H32,G8,D64,C2048,F8192,V128256"; exit 2
Weights *weights_load(Config *c);                                                  // exit 3 with the tensor's name
Weights *weights_synthetic(Config *c, uint64_t seed);
void     weights_close(Weights *w, Config *c);
Session *session_open(const Config *c, const Weights *w, const Options *o, const char *method);   // exit 2 with the reason
void     session_close(Session *s);
void     session_reset(Session *s);                                                // forget every token
const float *prefill(Session *s, const int *ids, int n);                           // one turn -> logits (V) of the last id
const float *decode(Session *s, int id);                                           // one token -> logits (V)
float *forward(Session *s, const Token *t, int T);                                 // one pass over tokens already rewritten by enter
void rope(const Weights *w, float *x, int heads, int D, int pos);                  // x (heads,D) rotated in place, half layout

typedef struct { size_t weights, kv, parts, pass; int ctx; } MemoryPlan;           // bytes a dialogue of ctx tokens needs: weights, rows, what the method adds, rooms of the largest pass
MemoryPlan memory_plan(const Session *s);
void   progress_tell(const char *what, double share);                             // 0: begins, 1: over

// ---- the GPU half (kvcomp.cu). When Session.dev is set, KVHead.k and .v are device memory and the functions above call these.
#ifdef KVCOMP_CUDA
#define KV_DEV(s) ((s)->dev != NULL)
#else
#define KV_DEV(s) 0                             // built without CUDA: the calls below are dropped by the compiler
#endif
int    device_there(void);                                                         // does a GPU answer?
int    device_bars (const Session *s, char why[512]);                              // 0: a GPU answers and holds all of memory_plan; else the exit code, and why
int    device_open (Session *s);                                                   // sets s->dev; 0, or -1 with s->err set; exit 4
void   device_reset(Session *s);
void   device_close(Session *s);                                                   // after every row has been given back
float *pass_cuda(Session *s, int T);                                               // pass() of section 7
void   tokens_give_cuda(Session *s);                                               // s->tok to the device, for hooks without a pass
void   rows_resize_cuda(Session *s, KVHead *h, int cap);                           // room for cap raw rows; h->packed is the new number already
void   rows_append_cuda(Session *s, int l, const float *k, const float *v, int t0, int n);  // k, v: device memory; h->len is still the old one
void   rows_free_cuda(Session *s, KVHead *h);                                      // all of them; leaves k, v, pk and pv NULL
void   rows_move_cuda(Session *s, KVHead *h, const int *keep, int n, int n_packed, int old_packed);    // row i = row keep[i]
// h's packed memory anew: reg (n_reg) are the regions, `bytes` long for K and for V; its first `stay` bytes are as they were. rows: row i was packed row rows[i];
// NULL: packed rows stay where they are and the raw ones behind them follow
void   rows_repack_cuda(Session *s, KVHead *h, const Region *reg, int n_reg, size_t bytes, size_t stay, const int *rows, int rounding, int rows64);
void   rows_drop_cuda(Session *s, KVHead *h, int gone, int left);                  // raw rows gone.. move up: those before are packed
void   rows_cut_cuda(Session *s, int l, const unsigned char *bits, int T, int rounding);   // the last T rows lose bits (T), in place
void   bytes_load_cuda(void *to, const void *from, size_t n);
void   rows_load_cuda(const Format *f, const char *from, int n, int D, float *buf);  // n neighbours unpacked to buf (n,D) on the host
void   rows_store_cuda(char *to, const char *raw, size_t bytes);
void   attn_prefill_cuda(Session *s, int l, float *out, const float *q, int t0, int n);
void   attn_decode_cuda(Session *s, int l, float *out, const float *q);
void   window_scores_cuda(Session *s, int l, const float *q, int T, int W, float *score);
float *device_floats(const float *x, size_t n);                                    // x (n) in device memory, for kv_append; to be dropped
void   device_drop(float *x);
double device_copy_rate(void);                                                     // bytes a second a copy inside device memory reads and writes
double device_gemm_rate(Session *s, int O, int I, int T);                          // FLOP/s of the product (T,I) (O,I)^T in bf16
void   host_copy_cuda(float *to, const float *from, size_t n);                     // n floats to the host
float *pooled_scores_cuda(Session *s, int l, const float *q, int T, int W, const int *n, int agg, int width, int order);   // q (T,H,D), n (G) -> (G,N) or, POOL_ONLY, (H,N) on the device
void   top_k_rows_cuda(Session *s, const float *x, int S, size_t stride, const int *n, const int *k, int *idx, int per, int *count);   // x (S,stride) on the device; n, k, count (S), idx (S,per)
float *adakv_shares_cuda(Session *s, const float *score, int N, const int *n, int base);   // score (G,N), n (G) -> (sum of n), both on the device
void   mass_fetch_cuda(Session *s, KVHead *h);                                     // h->mass, which attention adds to on the device
void   moments_add_cuda(Session *s, double *sum, double *outer, const float *q, int T, int sink);   // sum (H,D), outer (H,D,D) += of q (T,H,D), tokens at position >= sink; all on the device
void   expected_scores_cuda(Session *s, int l, const float *mu, const float *cov, float *z, float *squares, int N);    // mu (H,D), cov (H,D,D) -> z (H,N), squares (G,N): |v|^2, all on the host
float *join_rows_cuda(Session *s, const float *score, const int *n, int N, int agg);       // score (H,N), n (G) -> (G,N), both on the device
char  *near_grow_cuda(char *old, size_t have, size_t want);                        // memory of a method, on the device: keeps what is there
char  *near_zero_cuda(size_t n);                                                   // n bytes of it, all 0
void   near_free_cuda(char *p);
void   lines_attend_cuda(Session *s, int l, const Lines *lines, float *out, const float *q, int T);     // lines (H); out, q (T,H,D) on the device
int    line_batch_cuda(const Session *s, int l, int m);                            // KV heads that line_probs_cuda should do at once
float *line_probs_cuda(Session *s, int l, int g0, int ng, const float *q, int T, const int *t, int m);  // (ng R,m,N) on the device
float *line_sums_cuda(Session *s, int l, int g0, int ng, const float *P, int T, int m, int slash, int least);   // (ng R,N) on the device
void   choose_lines_cuda(Session *s, int l, int g0, int ng, const LoopRule *rule, int tile64, const float *P, int T, int m, Lines *lines, LoopFound *found);   // P (ng R,m,N); lines, found (ng R)
void   page_bounds_cuda(Session *s, int l, int g, char *bound, int from, int to, int dtype);       // pages from..to-1 of head g; bound (pages,2,D) of dtype, on the device
void   quest_select_cuda(Session *s, int l, const char *const *bound, int pages, int cap, int best, const float *q, int dtype);    // bound (G) of those, cap pages long; q (H,D) on the device
void   views_fetch_cuda(Session *s);                                               // views the device chose and kept, to the host
void   views_drop_cuda(Session *s);
void   ring_put_cuda(Session *s, float *ring, int obs, int token, const float *q); // ring (obs,H,D), q (H,D), both on the device
float *ring_scores_cuda(Session *s, int l, const float *ring, int obs, int first, int w);               // ring (obs,H,D) -> (H,N), both on the device
void   lychee_build_cuda(Session *s, const LycheeRule *x, int l, const Tree *t);   // t (G): the trees of layer l, room made
void   lychee_graft_cuda(Session *s, const LycheeRule *x, int l, int from);
int   *lychee_seek_cuda(Session *s, const LycheeRule *x, int l, const Tree *t, const float *q, int per, int bring);   // bring: -> (lists,LIST_HEAD + 2 per) on the host

#ifdef __cplusplus
}
#endif
#endif
