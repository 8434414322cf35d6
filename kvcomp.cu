// kvcomp.cu - the GPU half of kvcomp.
//
// It has the sections of kvcomp.c, under the same numbers and titles. A section here holds what its
// twin there computes when Session.dev is set, so read the twin first. What stands without a number is
// the device's own: HELPERS and PRODUCTS come first, because a kernel can only call device functions that
// are declared above it. What knows nothing of models stands in lib/cuda.h and lib/cuda_kernels.h.
//
// With Session.dev set, KVHead.k and KVHead.v are device memory. Everything else of a head (src,
// pos, lengths) stays on the host, which keeps the books. The arithmetic of a pass runs here, and
// the hooks of a method get q, k, v and out where they lie, on the device. Shapes and their letters
// are those of kvcomp.h: x is (T,C), q is (T,H,D), k and v are (T,G,D), and the bytes of a row are
// what its Format says.
//
// Kernels keep four rules: warps of 32 lanes, with all of them in every shuffle; blocks of whole
// warps; no thread returns before the last point where threads meet; shared memory of a template is
// one dynamic array. With these test/cuda_emu.h can run the kernels on a CPU, and it checks that they
// are kept.
//
// CONTENTS: what runs on the device, in the order of this file
//      HELPERS: growing buffers, what the device holds of a session, tensors on the device
//      PRODUCTS: weights as numbers, norms, matrix products
//    1 MODEL: a pass over the model, launch by launch
//    2 CACHE: rows of K and V: rotated, rounded, appended, moved; views that the device chooses
//    3 ATTENTION: four attention kernels, plans, sums over queries
//    4 THE DECODE LOOP: a decode step as one CUDA graph; opening and closing the device
//    5 STREAMINGLLM: nothing of its own; section 2 moves the rows that stay
//    6 BASELINES: selection at a prefill's end: pooled scores, top-k, AdaKV's shares; moments
//    7 SPARSE PREFILL BASELINES: attention over lines; softmax rows of sampled queries, their sums
//    8 QUEST: bounds of pages, scores of pages, the rows of the best pages
//    9 LOOPSERVE: the ring of decode queries, the choice of lines
//   10 PATS: bit-packed rows: cutting, packing, reading
//   11 LYCHEECLUSTER: building the index, grafting on it, searching it
//   12 SONIC INFERENCE: nothing of its own; its tokens are rows with other weights in a pass (1)
//   13 DILILAZYKV: nothing of its own; it selects as section 6 does
//      THE BEST OF THE LOGITS: the best of the logits, from which the host samples
//      BENCHMARK: the rates that --bench measures itself against
#include "kvcomp.h"
#include "lib/cuda_kernels.h"

// ==================================================================================================== HELPERS
// Launches, errors, device memory, warps, and what only PTX can say stand in lib/cuda.h. room() keeps one growing
// buffer for each purpose, so a decode step allocates nothing once the buffers have grown.

// ---- what a session holds on the device

// A growing buffer.
struct Room {
    char *p;                    // device memory
    size_t bytes;
};

// The growing buffers of a session, by purpose. A buffer's content lives until the next call of
// room() for it.
enum {
    ROOM_X,                     // (T,C) the pass's activations
    ROOM_Q,                     // (n,H,D)
    ROOM_K,                     // (n,G,D)
    ROOM_V,                     // (n,G,D)
    ROOM_OUT,                   // (n,H,D) what attention makes of q
    ROOM_GATE,                  // (b,2F) gate and up of a token; of one token alone (F) their SwiGLU
    ROOM_PRODUCT,               // (b,max((H+2G)D,C)) what a product leaves before it is scaled and added
    ROOM_COS,                   // (T,D) cosines and sines of RoPE
    ROOM_WIDE,                  // (b,I) the input of a product in f32
    ROOM_HALF,                  // (b,I) the input of a product in 16 bits
    ROOM_SCALE,                 // (b) what a row of ROOM_HALF is to be multiplied by
    ROOM_IDS,                   // (T) vocabulary ids of the pass
    ROOM_TOK,                   // (n_tok) a copy of Session.tok
    ROOM_PLAN,                  // works, items and lists of one call of attention
    ROOM_PLAIN,                 // (G,2,N,D) rows of a layer as f16, for prefill_kernel
    ROOM_PART,                  // (items,BQ,D+2) what the items of attention hand to join_row
    ROOM_STAT,                  // (n,H,2) max and sum of each softmax row
    ROOM_COL,                   // (H,N) sums over queries
    ROOM_STEP,                  // what a decode step in one go is told: Step
    ROOM_WORK,                  // the works of all layers of such a step
    ROOM_ITEM,                  // and their items
    ROOM_LIST,                  // a short list for the next kernel
    ROOM_LOGITS,                // (V)
    ROOM_BEST,                  // the best of them: PickPlan
    ROOM_POOL,                  // scores on their way to a selection
    ROOM_TOP,                   // small inputs of a selection
    ROOM_TOP_IDX,               // what top-k chose
    ROOM_START,                 // LycheeCluster: first tokens of the chunks
    ROOM_TREES,                 // LycheeCluster: (L,G) Tree
    ROOM_KEYS,                  // LycheeCluster: keys of chunks while an index is built
    ROOM_CENTRES,               // LycheeCluster: centres while an index is built
    ROOM_SEEK,                  // Quest, LycheeCluster: scores of pages or clusters
    ROOM_RING,                  // LoopServe: queries of the ring, oldest first
    ROOM_PROBS,                 // (heads,n_q,N) scores of queries; LoopServe: sampled softmax rows
    ROOM_PICKS,                 // LoopServe: what the choice of lines needs
    ROOM_VIEWS,                 // (L,G,stride) the lists that select hooks chose on the device
    ROOM_ARRIVED,               // counters of blocks that have come by, all 0 between two launches
    N_ROOMS
};

// Host tensors that lie on the device too: a hash table by host address, with linear probing.
enum { MAP_SIZE = 1 << 13 };
struct Copied {
    const void *host;           // NULL: a free slot
    char *dev;
    int owns;                   // 1: dev is memory of its own, or begins that of several tensors
    int dtype;                  // DT_* of the numbers there
    float scale;                // the numbers there times scale are the tensor
};
struct Map {
    Copied at[MAP_SIZE];
    int n;                      // slots taken
};

// One upload of a model, whatever the number of sessions that use it.
struct Shared {
    const Weights *w;
    int exact;                  // 1: for sessions with --exact, whose matrices are as stored
    int users;                  // sessions
    Map map;
    Shared *next;
};
static Shared *all_shared;

struct Packed;                  // a head's packed rows: section 10

// What the device holds of one KV head beside KVHead.k and KVHead.v.
struct Rows {
    int *src;                   // (n_src) copy of KVHead.src
    int n_src;
    float *mass;                // (n_src) KVHead.mass, NULL without KV_MASS. The host's is a copy
                                // (mass_fetch_cuda)
    int cap;                    // raw rows there is room for; KVHead.cap is the same, except while
                                // rows are being packed
    Packed *pack;               // table of the packed rows' regions, behind KVHead.pv
    size_t pk_bytes;            // bytes allocated for KVHead.pk, and for KVHead.pv
};

// Whose views of a layer count in the last step (Chosen.kept).
enum {
    KEPT_NONE,                  // the host's
    KEPT,                       // the lists on the device
    KEPT_SEEN                   // the lists on the device, and the host's views are a copy of them
};

// Which kernel attends (reader_of, section 3).
enum { BY_ATTEND, BY_DECODE, BY_PREFILL };      // attend_kernel, decode_kernel, prefill_kernel

struct Reader {
    int kernel;                 // BY_*
    int kind;                   // of decode_kernel: ROW_* or DECODE_PATS
    int BQ;                     // query rows of a block
    int blocks;                 // that fit on a multiprocessor
};

enum { LIST_ROWS, LIST_TAIL, LIST_HEAD };       // a View's n and tail, before the rows of a list made on the device

// Views that a select hook chose on the device and that stay there: one list a KV head.
struct Chosen {
    int stride;                 // ints of one list in ROOM_VIEWS (L,G,stride): LIST_HEAD numbers, then
                                // its rows
    char *kept;                 // (L) KEPT_*
    int *rows;                  // (L,G) pinned: rows of a list less its tail; with the head's length
                                // added, what is read
};

struct Device {                 // Session.dev
    cublasHandle_t blas;
    Chosen chosen;
    Room room[N_ROOMS];
    Shared *base;               // the model's tensors
    Map alt;                    // tensors of Session.alt
    struct Rows *held;          // (L*G) what the device holds of a head beside KVHead.k and .v
    float *ring;                // (L,obs,H,D) where decode steps keep their queries, too (section 9); NULL:
    int obs;                    // nowhere
    int n_tok;                  // tokens ROOM_TOK holds
    // The rest belongs to "a decode step in one go" (section 4).
    struct Step *step;          // pinned: what the next step is told
    BestLogits *picks;          // pinned: the best of a step's logits
    int n_picks;                // Session.picks when the graph was made
    const struct Step *told;    // step on the device, where kernels find its lengths; NULL in any other
                                // pass: the host gives them
    unsigned settled;           // Session.changes after select hooks were last called in an ordinary
                                // step: they have all the memory they need
    unsigned seen;              // Session.changes when what follows was made
    struct LayerWorks *works;   // (L)
    int grid;                   // items of a layer, at most
    Reader by;                  // the kernel that attends
    cudaGraphExec_t graph;      // the step, or one before the last change; NULL: there is none
    int replays;                // 1: graph is the step as it is now
    int no_graph;               // 1: this device would not take one
};

// Buffer `which` of the session, with room for n elements. Its content stays, unless it grows: then
// to what room_bytes says, more than asked for. Session.changes counts a move, because a captured
// graph holds the old address.
template <class T> static T *room_kept(Session *s, int which, size_t n) {
    Room *r = &s->dev->room[which];
    if (n * sizeof(T) > r->bytes) {
        size_t bytes = room_bytes(n * sizeof(T));
        device_free(r->p);
        *r = { NULL, 0 };                       // should device_new die, nothing is given back twice
        r->p = device_new(bytes);
        r->bytes = bytes;
        s->changes++;
    }
    return (T *)r->p;
}

// n counters on the device, all 0. A kernel that counts leaves them at 0.
static int *arrivals(Session *s, int n) {
    const Room *r = &s->dev->room[ROOM_ARRIVED];
    size_t before = r->bytes;
    int *p = room_kept<int>(s, ROOM_ARRIVED, n);
    if (r->bytes != before) KV_CUDA(cudaMemsetAsync(p, 0, r->bytes, kv_stream));
    return p;
}

#ifdef KVCOMP_TEST
#ifndef EMU_HARD
#define EMU_HARD 0
#endif
extern "C" { int cuda_poison = EMU_HARD; }      // 1: room() hands out NaN instead of an old content
#endif

// The same, for a caller who writes everything before anything is read.
template <class T> static T *room(Session *s, int which, size_t n) {
    T *p = room_kept<T>(s, which, n);
#ifdef KVCOMP_TEST
    if (cuda_poison && n) KV_CUDA(cudaMemsetAsync(p, 0xff, n * sizeof(T), kv_stream));
#endif
    return p;
}

// ---- tensors on the device

// The entry of a host address, or the free slot it would take.
static Copied *map_slot(Map *m, const void *host) {
    size_t i = (size_t)mix64((uint64_t)(uintptr_t)host) % MAP_SIZE;
    while (m->at[i].host && m->at[i].host != host) i = (i + 1) % MAP_SIZE;
    return &m->at[i];
}

struct Sent {                   // of the weights of a model, for the progress line
    size_t sent, all;           // bytes
};

// Brings n tensors to the device, none of which is there yet, one behind the other in one piece of
// memory. g: of a whole model, or NULL. -> where they lie.
static char *map_put(Map *m, const Tensor *const *t, int n, Sent *g) {
    size_t all = 0, at = 0;
    for (int i = 0; i < n; i++) all += tensor_bytes(t[i]);
    char *dev = device_new(all);
    for (int i = 0; i < n; i++) {
        size_t bytes = tensor_bytes(t[i]);
        if (++m->n > MAP_SIZE / 2) die(EXIT_RUN, "more than %d tensors on the GPU", MAP_SIZE / 2);
        upload(dev + at, t[i]->data, bytes);
        if (g) g->sent += bytes;
        if (g) progress_tell("uploading", g->sent < g->all ? (double)g->sent / (double)g->all : 0.999);
        *map_slot(m, t[i]->data) = { t[i]->data, dev + at, !i, t[i]->dtype, 1 };
        at += bytes;
    }
    return dev;
}

// Brings those of n tensors that exist and are not there yet, as stored, each by itself.
static void tensors_put(Map *m, const Tensor *const *t, int n, Sent *g) {
    for (int i = 0; i < n; i++)
        if (t[i]->data && !map_slot(m, t[i]->data)->host) map_put(m, t + i, 1, g);
}

// Frees every tensor of the map.
static void map_clear(Map *m) {
    for (int i = 0; i < MAP_SIZE; i++) device_free(m->at[i].owns ? m->at[i].dev : NULL);
    memset(m, 0, sizeof *m);
}

// The device's copy of tensor t: among the model's, or among those of Session.alt. NULL: there is
// none yet.
static Copied *copy_of(Session *s, const Tensor *t) {
    Copied *c = map_slot(&s->dev->base->map, t->data);
    if (!c->host) c = map_slot(&s->dev->alt, t->data);
    return c->host ? c : NULL;
}

// Where tensor t lies on the device, as stored. A tensor of Session.alt is brought when first asked
// for. NULL when the model has no such tensor.
static const char *on_device(Session *s, const Tensor *t) {
    if (!t->data) return NULL;
    const Copied *c = copy_of(s, t);
    return c ? c->dev : map_put(&s->dev->alt, &t, 1, NULL);
}

// ==================================================================================================== PRODUCTS
// A pass of one token multiplies weights by f32 activations (gemv_kernel). A pass of more tokens goes
// through cuBLAS, which wants both factors of one type. f32 weights meet f32 activations. 16-bit
// weights meet activations of 16 bits, one product, with f32 sums:
//
//     weights    on the device          an activation is rounded to
//     f16        as stored              11 bits: off by 2^-11 of itself at most
//     bf16       f16 times 2^-k         11 bits, because f16 holds what bf16 holds (matrix_halve)
//     bf16       as stored, where       8 bits: off by 2^-8 of itself at most
//                f16 would lose more
//
// A row of activations is multiplied by a power of two of its own first, so that its largest number
// lies in [2^14,2^15): SwiGLU's may be beyond f16, and small ones keep their bits (rows_kernel).
// With --exact bf16 weights stay as they are, and an activation goes in as two 16-bit numbers, the
// rounded value and what the rounding left over: two products, off by 2^-22 of it with f16 and by
// 2^-16 with bf16.

// Brings matrices that read the same input to the device. Where their types and widths are one they
// lie one behind the other, so that one product does for all. exact: bf16 stays bf16.
static void matrices_put(Map *m, const Tensor *const *t, int n, Sent *g, int exact) {
    int alike = 1;
    for (int i = 0; i < n; i++)
        alike &= t[i]->dtype == t[0]->dtype && t[i]->cols == t[0]->cols && !map_slot(m, t[i]->data)->host;
    if (!alike) {
        for (int i = 0; i < n && n > 1; i++) matrices_put(m, t + i, 1, g, exact);
        return;
    }
    char *dev = map_put(m, t, n, g);
    size_t all = 0;
    for (int i = 0; i < n; i++) all += (size_t)t[i]->rows * t[i]->cols;
    float scale = t[0]->dtype == DT_BF16 && !exact ? matrix_halve((uint16_t *)dev, all) : 0;
    for (int i = 0; i < n && scale; i++) {
        Copied *c = map_slot(m, t[i]->data);
        c->dtype = DT_F16;
        c->scale = scale;
    }
}

// The device's copies of n matrices that read the same input: c (n). Those of Session.alt are brought
// when first asked for.
static void matrices_of(Session *s, const Tensor *const *t, int n, const Copied **c) {
    int there = 1;
    for (int i = 0; i < n; i++) there &= copy_of(s, t[i]) != NULL;
    if (!there) {
        const Tensor *missing[3];
        int m = 0;
        for (int i = 0; i < n; i++)
            if (!copy_of(s, t[i])) missing[m++] = t[i];
        matrices_put(&s->dev->alt, missing, m, NULL, s->dev->base->exact);
    }
    for (int i = 0; i < n; i++) c[i] = copy_of(s, t[i]);
}

// ---- embeddings
// Bound by memory: each number is read and written once.

// x (T,C) = rows ids[t] of the table (V,C); n = T C. A thread an element. Rows whose id is negative
// are left alone.
static __global__ void embed_kernel(float *x, const void *table, int dtype, const int *ids, int C,
                                    size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && ids[i / C] >= 0) x[i] = number(table, dtype, (size_t)ids[i / C] * C + i % C);
}

struct Linear {                 // y (T,rows) = x W^T + b
    float *y;                   // on the device
    const Tensor *w, *b;        // host addresses; b NULL: none
};

// c (n) = the device's copies of the matrices of n Linears, which read the same x. -> 1: all are of one
// type there.
static int linear_matrices(Session *s, const Linear *p, int n, const Copied **c) {
    const Tensor *t[3];
    int alike = 1;
    for (int i = 0; i < n; i++) t[i] = p[i].w;
    matrices_of(s, t, n, c);
    for (int i = 1; i < n; i++) alike &= c[i]->dtype == c[0]->dtype;
    return alike;
}

// The argument of gemv_kernel for n matrices c of one type. norm: see Gemv.norm; NULL: none.
static Gemv gemv_args(Session *s, const Linear *p, int n, const Copied **c, const Tensor *norm) {
    Gemv a;
    memset(&a, 0, sizeof a);
    a.cols = p[0].w->cols;
    for (int i = 0; i < n; i++) {
        const char *b = p[i].b ? on_device(s, p[i].b) : NULL;
        GemvPart *to = &a.part[i];
        to->w = c[i]->dev;
        to->bias = b;
        to->y = p[i].y;
        to->scale = c[i]->scale;
        to->rows = p[i].w->rows;
        to->bias_type = b ? p[i].b->dtype : 0;
        a.rows += p[i].w->rows;
    }
    a.split = gemv_split(a.rows, a.cols, c[0]->dtype);
    a.norm = norm ? on_device(s, norm) : NULL;
    a.norm_type = norm ? norm->dtype : 0;
    a.eps = s->c->eps;
    return a;
}

// One token, or the RMSNorm of one, through n matrices that read it: one launch of gemv_kernel where
// their types are one. x is on the device.
template <int MODE>
static void gemv_cuda(Session *s, const float *x, const Linear *p, int n, const Tensor *norm) {
    const Copied *c[3];
    if (linear_matrices(s, p, n, c)) {
        gemv_launch<MODE>(gemv_args(s, p, n, c, norm), c[0]->dtype, x);
        return;
    }
    for (int i = 0; i < n; i++) gemv_cuda<MODE>(s, x, p + i, 1, norm);
}

// ---- products of more tokens
// Matrices that read the same rows are one product, and what it leaves is finished by whoever reads it:
// multiplied by the row's scale, with biases added.
//
//     x --rows_kernel--> 16 bits, scale (T) --cuBLAS--> y (T,cols) --+-- heads_kernel: q, rows of K and V
//                                                                    +-- rows_kernel: SwiGLU, the next input
//                                                                    +-- finish_kernel: x += y

// rows_kernel over T rows, which become numbers of type out. Plain rows are f32 already.
static void rows_launch(Session *s, void *y, float *scale, const Source &a, int T, int out) {
    int threads = a.n < 512 ? 32 : a.kind == ROWS_SWIGLU ? 512 : 256;
    size_t row = (size_t)a.n * sizeof(float), smem = row <= ROWS_KEPT ? row : 0;
    as_constant<ROWS_PLAIN, ROWS_NORM, ROWS_SWIGLU>(a.kind, [&](auto KIND) {
        as_constant<DT_F32, DT_F16, DT_BF16>(out, [&](auto OUT) {
            if constexpr (KIND != ROWS_PLAIN || OUT != DT_F32)
                KV_LAUNCH_WIDE((rows_kernel<KIND, OUT>), T, threads, smem, y, scale, a, s->c->eps, smem > 0);
        });
    });
}

struct Factor {                 // the rows (T,n) of a Source, ready for cuBLAS
    const float *wide;          // in f32, for f32 weights and for --exact; else NULL
    const uint16_t *half;       // in 16 bits; else NULL
    const float *scale;         // (T) what half is to be multiplied by; NULL: 1
    int n;
};

// Makes a factor for matrices of dtype.
static Factor factor_of(Session *s, const Source &a, int T, int dtype) {
    size_t all = (size_t)T * a.n;
    if (dtype != DT_F32 && !s->dev->base->exact) {
        uint16_t *half = room<uint16_t>(s, ROOM_HALF, all);
        float *scale = room_kept<float>(s, ROOM_SCALE, T);      // kept: a.scale may be here
        rows_launch(s, half, scale, a, T, dtype);
        return { NULL, half, scale, a.n };
    }
    if (a.kind == ROWS_PLAIN) return { a.x, NULL, NULL, a.n };
    float *wide = room<float>(s, ROOM_WIDE, all);
    rows_launch(s, wide, NULL, a, T, DT_F32);
    return { wide, NULL, NULL, a.n };
}

// cuBLAS' name of a dtype.
static cudaDataType blas_type(int dtype) {
    if (dtype == DT_F32) return CUDA_R_32F;
    return dtype == DT_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

// y (T,O), rows `stride` apart, = f W^T, or += with add; W (O,I) is c, perhaps with the matrices that lie
// behind it. cuBLAS counts column by column, where a row-major (T,O) is an (O,T): it computes y^T = W
// x^T from W, which it sees transposed, and x^T, which it sees as it is.
static void blas_product(Session *s, float *y, int stride, const Copied *c, int O, const void *x, int T,
                         int I, int add) {
    const float one = 1, zero = 0;
    cudaDataType type = blas_type(c->dtype);
    KV_BLAS(blas_gemm(s->dev->blas, CUBLAS_OP_T, CUBLAS_OP_N, O, T, I, &c->scale, c->dev, type, I,
                         x, type, I, add ? &one : &zero, y, CUDA_R_32F, stride, CUBLAS_COMPUTE_32F,
                         CUBLAS_GEMM_DEFAULT));
}

// The same for a factor: one product or, for 16-bit matrices and f32 rows, two, with the rounded rows and
// with the rest.
static void gemm_cuda(Session *s, float *y, int stride, const Copied *c, int O, const Factor &f, int T) {
    if (f.half || c->dtype == DT_F32) {
        blas_product(s, y, stride, c, O, f.half ? (const void *)f.half : f.wide, T, f.n, 0);
        return;
    }
    size_t all = (size_t)T * f.n;
    uint16_t *half = room<uint16_t>(s, ROOM_HALF, all);
    for (int rest = 0; rest < 2; rest++) {
        KV_LAUNCH(round_kernel, blocks(all, 256), 256, 0, half, f.wide, c->dtype, rest, all);
        blas_product(s, y, stride, c, O, half, T, f.n, rest);
    }
}

// T > 1 rows through up to three matrices that read them, into room `which`. Matrices that lie behind
// each other on the device are one product. Where their types differ, each type has its own factor
// and its scale is applied here.
static Product products(Session *s, int which, const Source &a, int T, const Linear *p, int n) {
    const Copied *c[3];
    int alike = linear_matrices(s, p, n, c), cols = 0, at = 0;
    for (int i = 0; i < n; i++) cols += p[i].w->rows;
    float *y = room<float>(s, which, (size_t)T * cols);
    Factor f;
    memset(&f, 0, sizeof f);
    for (int i = 0, j, O; i < n; i = j, at += O) {
        O = p[i].w->rows;
        const char *end = c[i]->dev + tensor_bytes(p[i].w);
        for (j = i + 1; j < n && !c[j]->owns && c[j]->dev == end; j++) {
            O += p[j].w->rows;
            end += tensor_bytes(p[j].w);
        }
        if (!i || !alike) f = factor_of(s, a, T, c[i]->dtype);
        gemm_cuda(s, y + at, cols, c[i], O, f, T);
        dim3 grid(T, blocks(O, 256));
        if (!alike && f.scale) KV_LAUNCH(scale_kernel, grid, 256, 0, y + at, f.scale, cols, O);
    }
    return { y, alike ? f.scale : NULL, T, cols };
}

// A product is added to the y of its Linear.
static void product_add(Session *s, const Product &m, const Linear &p) {
    const char *bias = p.b ? on_device(s, p.b) : NULL;
    dim3 grid(m.T, blocks(m.cols, 1024));
    KV_LAUNCH(finish_kernel, grid, 256, 0, p.y, m, bias, bias ? p.b->dtype : 0);
}

// Sources: rows (T,n) as they are; the norm of rows, with the model's w; SwiGLU of what a product of gate
// and up left.
static Source rows_plain(const float *x, int n) {
    Source a;
    memset(&a, 0, sizeof a);
    a.x = x;
    a.kind = ROWS_PLAIN;
    a.n = n;
    return a;
}

static Source rows_norm(Session *s, const float *x, const Tensor *w) {
    Source a = rows_plain(x, w->cols);
    a.kind = ROWS_NORM;
    a.w[0] = on_device(s, w);
    a.type[0] = w->dtype;
    return a;
}

static Source rows_swiglu(Session *s, const Product &m, const Linear in[2]) {
    Source a = rows_plain(m.y, m.cols / 2);
    a.kind = ROWS_SWIGLU;
    a.scale = m.scale;
    for (int i = 0; i < 2; i++) {
        a.w[i] = in[i].b ? on_device(s, in[i].b) : NULL;
        a.type[i] = a.w[i] ? in[i].b->dtype : 0;
    }
    return a;
}

// One token through gate and up: gate.y (2F) becomes SwiGLU of the normed x, (F). Matrices of two types
// are two products.
static void linear_swiglu(Session *s, const float *x, const Linear in[2], const Tensor *norm) {
    const Copied *c[2];
    if (linear_matrices(s, in, 2, c)) {
        gemv_cuda<GEMV_SWIGLU>(s, x, in, 2, norm);
        return;
    }
    int F = in[0].w->rows;
    Linear half[2] = { { in[0].y, in[0].w, NULL }, { in[0].y + F, in[1].w, NULL } };
    gemv_cuda<GEMV_STORE>(s, x, half, 2, norm);
    rows_launch(s, in[0].y, NULL, rows_swiglu(s, { in[0].y, NULL, 1, 2 * F }, in), 1, DT_F32);
}

// ==================================================================================================== 1 MODEL
// pass_cuda is forward of kvcomp.c line by line, and calls the hooks at the same places. One thing
// differs: in a decode step the commit hooks run when every layer is done, if none of them is
// KV_QUERY.

// ---- what this section calls before it stands
struct Step;
static void rope_append(Session *s, int l, float *q, const float *k, const float *v, const float *cs, int t0,
                        int n);
static void project(Session *s, const Layer *y, int l, const Step *step, const float *x, float *q, float *k,
                    float *v, const float *cs, int t0, int n, int ahead, int hooks);
static void lists_tell(Session *s);
static void lists_count(Session *s);
static int step_free(const Session *s);
static int step_settled(Session *s);
static float *step_cuda(Session *s);
struct PickPlan;
static size_t pick_carve(PickPlan *p, int V, int k, char *mem);
static void best_logits_cuda(Session *s, const float *logits, int V, int k);

// ---- hooks

// 1: some hook wants to see q, k and v before RoPE.
static int projects(const Session *s) {
    for (int i = 0; i < s->n_part + s->n_observer; i++)
        if (s->part[i].m->project) return 1;
    return 0;
}

// 1: this is a decode step, and no commit hook has to run before the next layer does.
static int commits_late(const Session *s) {
    for (int i = 0; i < s->n_part + s->n_observer; i++)
        if (s->part[i].m->commit && s->part[i].m->wants & KV_QUERY) return 0;
    return s->decoding;
}

// ---- what a pass needs on the device

// The buffers of one pass, all in device memory (ROOM_*). b: -b or T, whichever is less.
struct Pass {
    float *x;                   // (T,C) activations
    float *cs;                  // (T,D) cosines and sines of the tokens' angles
    float *q, *out;             // (span,H,D)
    float *k, *v;               // (span,G,D)
    float *gate;                // (b,2F)
    int late;                   // commits_late
};

// Makes room for a pass of T tokens.
static Pass pass_room(Session *s, int T) {
    const Config *c = s->c;
    int b = min_int(s->batch, T);
    Pass r;
    memset(&r, 0, sizeof r);
    r.late = commits_late(s);
    size_t n = span_room(s, T), HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    r.x = room<float>(s, ROOM_X, (size_t)T * c->C);
    r.cs = room<float>(s, ROOM_COS, (size_t)T * c->D);
    r.q = room<float>(s, ROOM_Q, n * HD);
    r.out = room<float>(s, ROOM_OUT, n * HD);
    r.k = room<float>(s, ROOM_K, n * GD);
    r.v = room<float>(s, ROOM_V, n * GD);
    r.gate = room<float>(s, ROOM_GATE, (size_t)b * 2 * c->F);
    return r;
}

// Brings the tokens to the device (ROOM_TOK). A prefill sends all of them again, because a method
// may have truncated some. A decode step sends its own, or none when step_works_kernel writes it (last
// 0). room() counts a move in Session.changes: the address alone would not tell, because a new
// place may have the old one.
static void upload_tokens(Session *s, int last) {
    Device *d = s->dev;
    unsigned before = s->changes;
    Token *tok = room_kept<Token>(s, ROOM_TOK, s->n_tok);
    int from = s->decoding && s->changes == before && d->n_tok == s->base ? s->base : 0;
    if (last || !from) upload(tok + from, s->tok + from, (size_t)(s->n_tok - from) * sizeof(Token));
    d->n_tok = s->n_tok;
}

// The same for hooks that compute without a pass.
void tokens_give_cuda(Session *s) {
    upload_tokens(s, 1);
}

// x (T,C) on the device: the embeddings of the pass's tokens. A method's own tokens are embedded by
// its hook on the host, and their rows are uploaded one by one.
static void embed_cuda(Session *s, float *x, int T) {
    int C = s->c->C;
    int *ids = (int *)scratch(s, (size_t)T * sizeof(int)), *dev = room<int>(s, ROOM_IDS, T);
    for (int t = 0; t < T; t++) ids[t] = s->tok[s->base + t].id;
    upload(dev, ids, (size_t)T * sizeof(int));
    size_t n = (size_t)T * C;
    KV_LAUNCH(embed_kernel, blocks(n, 256), 256, 0, x, on_device(s, &s->w->embed), s->w->embed.dtype,
              dev, C, n);
    for (int t = 0; t < T; t++) {
        if (ids[t] >= 0) continue;
        float *own = (float *)scratch(s, (size_t)C * sizeof(float));   // a row each: the copy may read it late
        EACH_HOOK(s, p, embed) {
            p->m->embed(s, p->ms, &s->tok[s->base + t], own);      // SONIC: Eq. 2
            break;
        }
        upload(x + (size_t)t * C, own, (size_t)C * sizeof(float));
    }
}

// cs (T,D) on the device: the angles of the pass's tokens.
static void upload_angles(Session *s, float *cs, int T) {
    int D = s->c->D;
    float *host = (float *)scratch(s, (size_t)T * D * sizeof(float));
    pass_angles(s, host, T);
    upload(cs, host, (size_t)T * D * sizeof(float));
}

// ---- the parts of a layer

// Launches, for n rows: x += W_o out; x += W_down (silu(W_gate h) * W_up h), where h is the normed x.
static void mlp_rows(Session *s, const Layer *y, float *x, const float *out, const Pass *r, int n) {
    Linear o = { x, &y->wo, &y->bo };
    Linear in[] = { { r->gate, &y->gate, &y->bgate }, { NULL, &y->up, &y->bup } };
    Linear down = { x, &y->down, &y->bdown };
    if (n == 1) {
        gemv_cuda<GEMV_ADD>(s, out, &o, 1, NULL);
        linear_swiglu(s, x, in, &y->mlp_norm);
        gemv_cuda<GEMV_ADD>(s, r->gate, &down, 1, NULL);
        return;
    }
    product_add(s, products(s, ROOM_PRODUCT, rows_plain(out, y->wo.cols), n, &o, 1), o);
    Product m = products(s, ROOM_GATE, rows_norm(s, x, &y->mlp_norm), n, in, 2);
    product_add(s, products(s, ROOM_PRODUCT, rows_swiglu(s, m, in), n, &down, 1), down);
}

// How many of the largest logits this pass brings to the host; 0: all of them.
static int n_picks(const Session *s) {
    return s->decoding && !s->watched ? min_int(s->picks, s->c->V) : 0;
}

// The logits of x (C), the last token's activations: one launch, and a copy to s->logits that is only on
// its way when the function returns; or a second launch, and the best of them are on their way.
static void logits_cuda(Session *s, const float *x) {
    size_t bytes = (size_t)s->c->V * sizeof(float);
    Linear head = { room<float>(s, ROOM_LOGITS, s->c->V), &s->w->head, NULL };
    gemv_cuda<GEMV_STORE>(s, x, &head, 1, &s->w->norm);
    if (n_picks(s)) best_logits_cuda(s, head.y, s->c->V, n_picks(s));
    else KV_CUDA(cudaMemcpyAsync(s->logits, head.y, bytes, cudaMemcpyDeviceToHost, kv_stream));
}

// Waits for the logits: Session.logits and Device.picks are the pinned memory they are copied to.
static void logits_wait(Session *s) {
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    s->picked = n_picks(s) ? s->dev->picks : NULL;
}

// The commit hooks of layers from.. and, as layer L, of the end of the pass.
static void commits(Session *s, int from) {
    double t = now();
    for (int l = from; l <= s->c->L; l++)
        if (l == s->c->L || layer_acts(s, l))
            EACH_HOOK(s, p, commit) p->m->commit(s, p->ms, l, NULL, 0);
    timed(&s->clk.commit, t);
}

// ---- the pass

// Tokens t0..t1-1 of the pass through layer l. Of the last layer's rows only the very last of the
// pass is read, so only that one goes through the MLP.
static void layer_span(Session *s, Pass *r, int l, int t0, int t1, int T) {
    const Config *c = s->c;
    size_t C = c->C, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    int acts = layer_acts(s, l), n = t1 - t0;
    const float *cs = r->cs + (size_t)t0 * c->D;
    const Layer *y;
    int hooks = projects(s) || s->watched;
    if (!hooks) kv_reserve(s, l, n);
    for (int t = t0, m; t < t1; t += m) {
        m = same_weights(s, t, t1, &y, l);
        size_t at = t - t0;
        float *q = r->q + at * HD, *k = r->k + at * GD, *v = r->v + at * GD;
        project(s, y, l, NULL, r->x + t * C, q, k, v, cs + at * c->D, t, m, (int)at, hooks);
    }
    if (hooks) {
        watch(s, WATCH_KEYS, l, r->k);
        if (acts)
            EACH_HOOK(s, p, project) p->m->project(s, p->ms, l, r->q, r->k, r->v, t0, n);
        kv_reserve(s, l, n);
        rope_append(s, l, r->q, r->k, r->v, cs, t0, n);
    }
    kv_note(s, l, t0, n);
    watch(s, WATCH_ROWS, l, r->q);
    attend_rows(s, l, r->out, r->q, t0, n, T, r->late);     // clocks count the time to launch, not to run

    for (int t = l < c->L - 1 ? t0 : T - 1, m; t < t1; t += m) {
        m = same_weights(s, t, t1, &y, l);
        mlp_rows(s, y, r->x + t * C, r->out + (t - t0) * HD, r, m);
    }
}

// pass_poll for passes whose layers are only launched here: without waiting, all of a long prefill
// would be launched long before it is computed, and could not be given up. The device is waited
// for where a layer takes longer than the wait costs.
static void pass_cuda_poll(Session *s, int T) {
    const int long_enough = 2048;
    if (s->stop && T >= long_enough) KV_CUDA(cudaStreamSynchronize(kv_stream));
    pass_poll(s);
}

// One pass over the tokens tok[base..base+T) -> the logits (V) of the last one, on the host. A
// decode step that allows it goes "in one go" (section 4); any other pass, and every one that
// an observer watches, is launched here, layer by layer and span by span.
float *pass_cuda(Session *s, int T) {
    if (!s->watched && step_free(s) && step_settled(s)) return step_cuda(s);
    const Config *c = s->c;
    size_t mark = scratch_mark(s);
    Pass r = pass_room(s, T);
    upload_tokens(s, 1);
    embed_cuda(s, r.x, T);
    upload_angles(s, r.cs, T);
    for (int l = 0; l < c->L; l++) {
        if (l && T > 1) progress_tell("prefill", (double)l / c->L);
        kv_reserve(s, l, T);
        for (int t0 = 0, t1; t0 < T; t0 = t1) {
            t1 = span_end(s, t0, T);
            pass_cuda_poll(s, T);
            layer_span(s, &r, l, t0, t1, T);
        }
    }
    lists_tell(s);
    if (s->decoding) s->dev->settled = s->changes;
    commits(s, r.late ? 0 : c->L);
    logits_cuda(s, r.x + (size_t)(T - 1) * c->C);
    logits_wait(s);
    lists_count(s);
    watch(s, WATCH_END, c->L, NULL);
    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// ==================================================================================================== 2 CACHE
// The host keeps the books of the cache (section 2 of kvcomp.c), and calls these where bytes of
// rows are touched.

// ---- what kernels know of a layer's heads

// The ROW_* of a Format.
static int row_kind(const Format *f) {
    if (!strcmp(f->name, "f32")) return ROW_F32;
    if (!strcmp(f->name, "f16")) return ROW_F16;
    if (!strcmp(f->name, "bf16")) return ROW_BF16;
    return !strcmp(f->name, "q8_0") ? ROW_Q8 : ROW_Q4;
}

enum { MAX_D = 256 };           // the widest head the kernels can do

struct HeadRef {                // one KV head; all pointers are device memory
    char *k, *v;                // raw rows [packed,len)
    int *src;                   // (len)
    float *mass;                // (len) or NULL
    const Packed *pack;         // rows [0,packed)
    int packed, len;
};
// The heads of a layer.
struct HeadRefs {
    HeadRef at[MAX_G];
};

struct Packed {                 // the packed rows of a head, in device memory: a header and the table
    const uint32_t *k, *v;      // KVHead.pk and .pv
    int n_reg;                  // regions
    int rows64;                 // 1: the paper's blocks of PATS_BLOCK bytes, 0: dense
    Region reg[1];              // (n_reg) ascending by row0
};

// The region of reg (n) that holds row r: the last one with row0 <= r.
static __device__ const Region *region_of(const Region *reg, int n, int r) {
    int lo = 0, hi = n - 1;
    while (lo < hi) {
        int m = (lo + hi + 1) / 2;
        if (reg[m].row0 <= r) lo = m;
        else hi = m - 1;
    }
    return &reg[lo];
}

// What a decode step in one go is told. The host writes it before the step, and nothing else changes
// from one step to the next.
struct Step {
    Token tok;
    int base;                   // the token's index
    float cs[MAX_D];            // its cosines and sines, as in upload_angles
    int len[];                  // (L,G) rows of every head
};

// The heads of layer l.
static HeadRefs head_refs(const Session *s, int l) {
    HeadRefs r;
    memset(&r, 0, sizeof r);
    for (int g = 0; g < s->c->G; g++) {
        const KVHead *h = kv_head(s, l, g);
        const Rows *x = &s->dev->held[h - s->head];
        r.at[g] = { h->k, h->v, x->src, x->mass, x->pack, h->packed, h->len };
    }
    return r;
}

// The rows of a layer: an argument of kernels, and what the arguments of others begin with. A row's key (v 0) and
// its value (v 1) may be stored in two formats.
struct LayerRows {
    HeadRefs heads;
    int H, G, R, D;             // query heads, KV heads, query heads of a KV head, head_dim
    int kind_k, kind_v;         // ROW_* of raw rows
    size_t bytes_k, bytes_v;    // of a raw row
};

static LayerRows layer_rows(const Session *s, int l) {
    int H = s->c->H, G = s->c->G, D = s->c->D;
    return { head_refs(s, l), H, G, H / G, D, row_kind(s->fk), row_kind(s->fv), s->fk->row_bytes(D),
             s->fv->row_bytes(D) };
}

// Where raw row r of head h lies.
static __device__ char *raw_row(const LayerRows &a, const HeadRef &h, int v, int r) {
    ptrdiff_t i = r - h.packed;
    return v ? h.v + i * (ptrdiff_t)a.bytes_v : h.k + i * (ptrdiff_t)a.bytes_k;
}

// Element d of row r of head h as f32, be the row raw or packed (section 10).
static __device__ float packed_value(const HeadRef &h, int v, int r, int d, int D);
static __device__ float row_value(const LayerRows &a, const HeadRef &h, int v, int r, int d) {
    if (r < h.packed) return packed_value(h, v, r, d, a.D);
    return row_get(raw_row(a, h, v, r), v ? a.kind_v : a.kind_k, d, a.D);
}

// ---- appending

// Element d of x (D) after RoPE, which turns the pairs (i, i + D/2); cs (D) are the position's
// cosines and sines. cs NULL: x as it is.
static __device__ float turned(const float *x, const float *cs, int d, int D) {
    int half = D / 2, i = d < half ? d : d - half;
    if (!cs) return x[d];
    return d < half ? x[d] * cs[d] - x[d + half] * cs[half + d] : x[d] * cs[i] + x[i] * cs[half + i];
}

// What the rows of new tokens become; an argument of kernels. H is 0 for keys and values alone.
struct Heads : LayerRows {
    float *q;                   // (n,H,D) turned in place
    const float *k, *v;         // (n,G,D) become row len + ahead + t of their head
    const float *cs;            // (n,D): see turned
    const void *norm[2];        // (D) weights of the norms of q and k before RoPE; NULL: none
    int norm_type[2];
    float eps;
    const Step *step;           // where a decode step in one go finds its token's index and the lengths ...
    int head0;                  // ... those of this layer from here on. step NULL: the lengths are in heads
    int ahead;                  // rows that launches before this one have appended, and len does not count
    int tok0;                   // index of token 0
    int *ticket;                // (H+2G) of qkv_kernel
    const void *bias[3];        // of heads_kernel: the biases of q, k and v, or NULL
    int bias_type[3];
    float *vectors[3];          // of heads_kernel: where q (n,H,D), k and v (n,G,D) stay as hooks see them, before
                                // RoPE; NULL: they go on
    float *ring;                // (obs,H,D) where the turned q of a token is kept, in slot (index % obs);
    int obs;                    // NULL: nowhere
};

// The argument for tokens t0.. of the pass: see Heads. q and cs NULL: k is turned already, and q is left
// alone.
static Heads heads_args(Session *s, int l, float *q, const float *k, const float *v, const float *cs,
                        int t0) {
    Heads a;
    memset(&a, 0, sizeof a);
    (LayerRows &)a = layer_rows(s, l);
    if (!q) a.H = 0;
    a.q = q;
    a.k = k;
    a.v = v;
    a.cs = cs;
    a.eps = s->c->eps;
    a.tok0 = s->base + t0;
    if (q && s->decoding && s->dev->ring) {
        a.obs = s->dev->obs;
        a.ring = s->dev->ring + (size_t)l * a.obs * a.H * a.D;
    }
    return a;
}

// One vector of a token becomes what it is to be: v 0, query head `head` or, from H on, the key of KV head
// head - H, which is turned; v 1: the value of that head. x (D) is the vector, in memory that only this
// warp writes meanwhile. Rows are rounded to their format; the row's src is its token, its mass 0. A query
// goes into the ring, too, if there is one. A warp: a lane every 32nd element, of a query every 32nd pair
// (d, d + D/2).
static __device__ void head_put(const Heads &a, int t, int head, int v, const float *x) {
    int lane = threadIdx.x & 31, D = a.D, g = head - a.H, token = (a.step ? a.step->base : a.tok0) + t;
    const float *cs = a.cs && !v ? a.cs + (size_t)t * D : NULL;
    if (g < 0) {
        float *to = a.q + ((size_t)t * a.H + head) * D;
        float *kept = a.ring ? a.ring + ((size_t)(token % a.obs) * a.H + head) * D : NULL;
        for (int d = lane; d < D / 2; d += 32) {
            float low = turned(x, cs, d, D), high = turned(x, cs, d + D / 2, D);
            to[d] = low;
            to[d + D / 2] = high;
            if (!kept) continue;
            kept[d] = low;                                       // Algorithm 3, line 4
            kept[d + D / 2] = high;
        }
        return;
    }
    const HeadRef &h = a.heads.at[g];
    int len = (a.step ? a.step->len[a.head0 + g] : h.len) + a.ahead + t, kind = v ? a.kind_v : a.kind_k;
    char *row = raw_row(a, h, v, len);
    int whole = D + 31 - (D + 31) % 32;         // so that all lanes meet in row_put
    for (int d = lane; d < whole; d += 32) row_put(row, kind, d, D, d < D ? turned(x, cs, d, D) : 0);
    if (lane || v) return;
    h.src[len] = token;
    if (h.mass) h.mass[len] = 0;
}

// ---- projections, RoPE and append without a stop between them

// Vector i of token t, of H queries, G keys, G values: times scale, plus bias, normed if the model norms it,
// then head_put or, if it stays, to `stays`. from (D): the vector, which another block may have left there, so it
// is read past L1, four loads of a lane at once. bias: a number for each element, or NULL. x (D): shared memory of the
// warp.
static __device__ void head_finish(const Heads &a, int t, int i, const float *from, float scale,
                                   const void *bias, int bias_type, size_t bias_at, float *stays, float *x) {
    int lane = threadIdx.x & 31, D = a.D, key = i >= a.H, value = i >= a.H + a.G;
    float ss = 0, y[4];
    for (int d0 = lane; d0 < D; d0 += 4 * 32) {
        KV_UNROLL()
        for (int j = 0; j < 4; j++) y[j] = d0 + 32 * j < D ? __ldcg(from + d0 + 32 * j) : 0;
        KV_UNROLL()
        for (int j = 0; j < 4; j++) {
            int d = d0 + 32 * j;
            if (d >= D) break;
            y[j] *= scale;
            if (bias) y[j] += number(bias, bias_type, bias_at + d);
            x[d] = y[j];
            ss += y[j] * y[j];
        }
    }
    const void *w = value ? NULL : a.norm[key];
    if (w) {
        float inv = 1 / sqrtf(lanes_sum<32>(ss) / (float)D + a.eps);
        for (int d = lane; d < D; d += 32) x[d] = x[d] * inv * number(w, a.norm_type[key], d);
    }
    __syncwarp();
    for (int d = lane; d < D && stays; d += 32) stays[d] = x[d];
    if (!stays) head_put(a, t, value ? i - a.G : i, value, x);
}

// What a product left of q, k and v, m (n,(H+2G)D): scales, biases, norms, RoPE, and the new rows of the
// cache. m.y NULL: RoPE and rows alone, of the q, k and v of a.
//   Block   HEADS_WARPS neighbouring vectors of token blockIdx.x
//   Warp    one vector
//   Shared  x (HEADS_WARPS,MAX_D)
//   Bound   memory, a few operations for each number
enum { HEADS_WARPS = 8 };
static __global__ void heads_kernel(KV_PARAMETER(Heads) a, Product m) {
    __shared__ float x[HEADS_WARPS][MAX_D];
    int warp = threadIdx.x / 32, t = blockIdx.x, i = blockIdx.y * HEADS_WARPS + warp;
    if (i >= a.H + 2 * a.G) return;
    int part = (i >= a.H) + (i >= a.H + a.G), at = i;
    if (part) at -= part == 1 ? a.H : a.H + a.G;
    size_t own = ((size_t)t * (part ? a.G : a.H) + at) * a.D;   // where the vector lies among those of its kind
    const float *from = (part == 2 ? a.v : part ? a.k : a.q) + own;
    if (m.y) from = m.y + ((size_t)t * m.cols + (size_t)i * a.D);
    float *stays = a.vectors[part];
    if (stays) stays += own;
    head_finish(a, t, i, from, m.scale ? m.scale[t] : 1, a.bias[part],
                a.bias_type[part], (size_t)at * a.D, stays, x[warp]);
}

// Launches heads_kernel for n tokens.
static void heads_launch(const Heads &a, const Product &m, int n) {
    dim3 grid(n, blocks(a.H + 2 * a.G, HEADS_WARPS));
    KV_LAUNCH(heads_kernel, grid, HEADS_WARPS * 32, 0, a, m);
}

// heads_kernel alone for tokens t0..t0+n-1 of the pass: q (n,H,D), k, v (n,G,D), cs (n,D) on the device. There is
// room for the rows, and no len has grown yet. q and cs NULL: see heads_args.
static void rope_append(Session *s, int l, float *q, const float *k, const float *v, const float *cs, int t0,
                        int n) {
    Heads a = heads_args(s, l, q, k, v, cs, t0);
    Product none = { NULL, NULL, n, 0 };
    heads_launch(a, none, n);
}

// The block's rows [r0,r1) of q, k and v have been stored. Whichever block stores the last one of a vector finishes it.
static __device__ void heads_arrive(const Heads &a, int r0, int r1) {
    __shared__ float x[MAX_D];
    __shared__ int last;
    for (int i = r0 / a.D; i * a.D < r1; i++) {
        int key = i - a.H, value = key - a.G, rows = min_int(r1, (i + 1) * a.D) - max_int(r0, i * a.D);
        const float *from = a.q + (size_t)i * a.D;
        if (key >= 0)   from = a.k + (size_t)key * a.D;
        if (value >= 0) from = a.v + (size_t)value * a.D;
        if (arrives_last(&a.ticket[i], a.D, &last, rows) && threadIdx.x < 32)
            head_finish(a, 0, i, from, 1, NULL, 0, 0, NULL, x);
    }
}

// One token's q, k and v = the projections of normed x, with biases, norms, RoPE, and the new rows of the
// cache.
//   Block, Warp, Lane, Tile, Bound   see gemv_rows; the rows of W_q, W_k and W_v follow each other
//   Shared  as there; in heads_arrive x (MAX_D), a vector
// RoPE wants pairs half a vector apart, a norm and a block of q8_0 all of it: the block that stores the last row of a
// vector finishes it (heads_arrive).
template <int DT>
static __global__ void __launch_bounds__(GEMV_WARPS * 32, GEMV_BLOCKS)
qkv_kernel(KV_PARAMETER(Gemv) a, KV_PARAMETER(Heads) h, const float *x) {
    KV_DYN_SHARED(char, mem);
    GemvSpan span = gemv_span(a);
    gemv_rows<DT, GEMV_HEADS>(a, x, mem);
    heads_arrive(h, span.r0, min_int(span.r1, a.rows));
}

// W_q, W_k and W_v times the normed x (n,C), and in *h the biases that are still to be added -> (n,(H+2G)D).
static Product qkv_product(Session *s, const Layer *y, const float *x, int n, Heads *h) {
    Linear p[] = { { NULL, &y->wq, &y->bq }, { NULL, &y->wk, &y->bk }, { NULL, &y->wv, &y->bv } };
    for (int i = 0; i < 3 && n > 1; i++) {
        h->bias[i] = on_device(s, p[i].b);
        h->bias_type[i] = p[i].b->dtype;
    }
    if (n > 1) return products(s, ROOM_PRODUCT, rows_norm(s, x, &y->attn_norm), n, p, 3);
    int cols = (h->H + 2 * h->G) * h->D;
    float *to = room<float>(s, ROOM_PRODUCT, cols);
    p[0].y = to;
    p[1].y = to + h->H * h->D;
    p[2].y = p[1].y + h->G * h->D;
    gemv_cuda<GEMV_STORE>(s, x, p, 3, &y->attn_norm);
    return { to, NULL, 1, cols };
}

// Launches, for tokens t0..t0+n-1 of the pass in layer l, which share the weights y: x (n,C) -> q (n,H,D),
// turned, and the rows of keys and values; with hooks q, k and v (n,G,D) as they are before RoPE. Otherwise k and
// v are room. cs, step, ahead: see Heads. A token without hooks, whose three matrices have one type, is one launch.
static void project(Session *s, const Layer *y, int l, const Step *step, const float *x, float *q, float *k,
                    float *v, const float *cs, int t0, int n, int ahead, int hooks) {
    Linear p[] = { { q, &y->wq, &y->bq }, { k, &y->wk, &y->bk }, { v, &y->wv, &y->bv } };
    const Tensor *norm[] = { &y->q_norm, &y->k_norm };
    const Copied *c[3];
    int alike = linear_matrices(s, p, 3, c);
    Heads h = heads_args(s, l, q, k, v, cs, t0);
    h.step = step;
    h.head0 = l * h.G;
    h.ahead = ahead;
    for (int i = 0; i < 2; i++) {
        h.norm[i] = on_device(s, norm[i]);
        h.norm_type[i] = norm[i]->dtype;
    }
    if (hooks || n > 1 || !alike) {
        for (int i = 0; i < 3 && hooks; i++) h.vectors[i] = p[i].y;
        heads_launch(h, qkv_product(s, y, x, n, &h), n);
        return;
    }
    h.ticket = arrivals(s, h.H + 2 * h.G);
    Gemv a = gemv_args(s, p, 3, c, &y->attn_norm);
    GemvShared m;
    size_t smem = gemv_carve(&m, NULL);
    as_constant<DT_F32, DT_F16, DT_BF16>(c[0]->dtype, [&](auto DT) {
        KV_LAUNCH_EARLY(qkv_kernel<DT>, gemv_blocks(a), GEMV_WARPS * 32, smem, a, h, x);
    });
}

// kv_append on the device: k, v (n,G,D) are device memory, k is turned; called before len grows.
void rows_append_cuda(Session *s, int l, const float *k, const float *v, int t0, int n) {
    rope_append(s, l, NULL, k, v, NULL, t0, n);
}

// ---- room

// realloc in device memory, `have` bytes to `want` bytes. It happens in the order of the stream, so
// a decode step that needs more rows does not wait for the device. want 0: gives the memory back.
static char *grown(char *old, size_t have, size_t want) {
    char *p = NULL;
    if (want && !device_try(&p, want, 1))
        cuda_fail(cudaErrorMemoryAllocation, "cudaMallocAsync", __FILE__, __LINE__);
    if (want && have) device_copy(p, old, min_size(have, want));
    if (old) KV_CUDA(cudaFreeAsync(old, kv_stream));
    return p;
}

// Makes room for cap raw rows of head h. h->packed counts the packed rows already.
void rows_resize_cuda(Session *s, KVHead *h, int cap) {
    size_t bk = s->fk->row_bytes(s->c->D), bv = s->fv->row_bytes(s->c->D);
    Rows *r = &s->dev->held[h - s->head];
    int all = h->packed + cap;
    if (cap != r->cap) {
        h->k = grown(h->k, r->cap * bk, cap * bk);
        h->v = grown(h->v, r->cap * bv, cap * bv);
    }
    if (all != r->n_src) {
        size_t have = r->n_src * sizeof(int), want = all * sizeof(int);     // a float is as large
        r->src = (int *)grown((char *)r->src, have, want);
        if (s->wants & KV_MASS) r->mass = (float *)grown((char *)r->mass, have, want);
    }
    r->cap = cap;
    r->n_src = all;
}

// Gives back everything of head h.
void rows_free_cuda(Session *s, KVHead *h) {
    Rows *r = &s->dev->held[h - s->head];
    void *all[] = { h->k, h->v, h->pk, h->pv, r->src, r->mass };
    for (void *p : all) grown((char *)p, 0, 0);
    h->k = h->v = h->pk = h->pv = NULL;
    memset(r, 0, sizeof *r);
}

// ---- moving, loading, storing

// Rows of one array that move: row i of `to` = row rows[i] - less of `from`, i < n.
struct Gather {
    char *to;                   // may be from
    const char *from;
    const int *rows;
    int less, n;
    size_t bytes;               // of a row, an even number
};

enum {
    GATHER_SLICE = 64,          // bytes of a row that a block moves
    GATHER_THREADS = 512,
    GATHER_DEEP = 8             // rows that a thread reads before it writes one
};

// A slice of all rows, by one block, T by T.
template <class T> static __device__ void gather_slice(const Gather &a, int slice) {
    enum { WIDE = GATHER_SLICE / sizeof(T), ROWS = GATHER_THREADS / WIDE };
    size_t per = a.bytes / sizeof(T), c = slice * WIDE + threadIdx.x % WIDE;
    for (int i0 = 0; i0 < a.n; i0 += GATHER_DEEP * ROWS) {
        T x[GATHER_DEEP] = {};
        int i = i0 + threadIdx.x / WIDE;
        KV_UNROLL()
        for (int j = 0; j < GATHER_DEEP; j++) {
            int r = i + j * ROWS;
            if (r < a.n && c < per) x[j] = ((const T *)a.from)[(size_t)(a.rows[r] - a.less) * per + c];
        }
        __syncthreads();
        KV_UNROLL()
        for (int j = 0; j < GATHER_DEEP; j++) {
            int r = i + j * ROWS;
            if (r < a.n && c < per) ((T *)a.to)[(size_t)r * per + c] = x[j];
        }
    }
}

// Moves rows, to other memory or in place: no row moves to a place behind its own, so what a block still has to read
// lies behind all that it has written.
//   Block   a slice blockIdx.x of the rows of array blockIdx.y
//   Lane    2, 4 or 16 bytes of every so many-th row
//   Bound   latency: a block has its array's rows in the air at once, or a few times one after the other
static __global__ void gather_kernel(const Gather *all) {
    Gather a = all[blockIdx.y];
    int slice = blockIdx.x;
    if (a.bytes % 16 == 0)     gather_slice<uint4>(a, slice);
    else if (a.bytes % 4 == 0) gather_slice<uint32_t>(a, slice);
    else                       gather_slice<uint16_t>(a, slice);
}

// *g = n rows of p, `bytes` bytes each, move: in place if there is to be room for as many rows as there was, else to
// new memory -> where they are then.
static char *gather_to(Gather *g, char *p, int had, int want, size_t bytes, const int *rows, int n, int less) {
    *g = { had == want ? p : grown(NULL, 0, want * bytes), p, rows, less, n, bytes };
    return g->to;
}

// Row keep[i] of a head becomes its row i: the raw rows, and the src and mass of all rows, of n_moves heads in one
// launch. Heads whose rows stay where they are are left to rows_resize_cuda.
void rows_move_cuda(Session *s, const Move *move, int n_moves) {
    size_t bk = s->fk->row_bytes(s->c->D), bv = s->fv->row_bytes(s->c->D);
    size_t tasks = 4 * n_moves * sizeof(Gather), bytes = tasks, mark = scratch_mark(s);
    for (int i = 0; i < n_moves; i++) bytes += move[i].n * sizeof(int);
    char *host = (char *)scratch(s, bytes), *dev = room<char>(s, ROOM_LIST, bytes);
    Gather *g = (Gather *)host;
    int *list = (int *)(host + tasks), n = 0;
    const int *rows = (const int *)(dev + tasks);
    for (const Move *m = move; m < move + n_moves; m++) {
        if (!m->n || (m->keep[m->n - 1] == m->n - 1 && m->n_packed <= m->old_packed)) continue;
        KVHead *h = m->h;
        Rows *r = &s->dev->held[h - s->head];
        int raw = m->n - m->n_packed, all = m->n_packed + m->cap, had = r->n_src;
        memcpy(list, m->keep, m->n * sizeof(int));
        h->k = gather_to(&g[n++], h->k, r->cap, m->cap, bk, rows + m->n_packed, raw, m->old_packed);
        h->v = gather_to(&g[n++], h->v, r->cap, m->cap, bv, rows + m->n_packed, raw, m->old_packed);
        r->src = (int *)gather_to(&g[n++], (char *)r->src, had, all, sizeof(int), rows, m->n, 0);
        if (r->mass) r->mass = (float *)gather_to(&g[n++], (char *)r->mass, had, all, sizeof(float), rows, m->n, 0);
        r->cap = m->cap;
        r->n_src = all;
        list += m->n;
        rows += m->n;
    }
    if (n) {
        upload(dev, host, bytes);
        dim3 grid(blocks(bk > bv ? bk : bv, GATHER_SLICE), n);
        KV_LAUNCH(gather_kernel, grid, GATHER_THREADS, 0, (const Gather *)dev);
    }
    for (int i = 0; i < n; i++)
        if (g[i].to != g[i].from) grown((char *)g[i].from, 0, 0);
    scratch_reset(s, mark);
}

// buf (n,D) f32 on the host = n neighbouring rows of device memory. The raw bytes come through the
// stack, a few rows at a time, because hooks ask from any of their threads.
void rows_load_cuda(const Format *f, const char *from, int n, int D, float *buf) {
    char raw[1 << 14];
    size_t bytes = f->row_bytes(D);
    int step = (int)(sizeof raw / bytes);
    for (int r = 0; r < n; r += step) {
        int m = min_int(n - r, step);
        download(raw, from + r * bytes, m * bytes);
        f->unpack(buf + (size_t)r * D, raw, m, D);
    }
}

// One packed row, `bytes` long, to the device.
void rows_store_cuda(char *to, const char *raw, size_t bytes) {
    upload(to, raw, bytes);
}

// n bytes to the host.
void bytes_load_cuda(void *to, const void *from, size_t n) { download(to, from, n); }

// h->mass to the host, for hooks that read it.
void mass_fetch_cuda(Session *s, KVHead *h) {
    download(h->mass, s->dev->held[h - s->head].mass, (size_t)h->len * sizeof(float));
}

// The most rows that any head has memory for.
static int most_rows(const Session *s) {
    int n = 1;
    for (int i = 0; i < s->c->L * s->c->G; i++) n = max_int(n, s->head[i].packed + s->head[i].cap);
    return n;
}

// ---- rows that prefill_kernel cannot read as they are stored become f16
// Packed rows, rows of q8_0 and q4, and rows of two types are brought to f16 before a pass reads them: each is
// read by as many works as the pass has, and unpacked only once. Packed rows are f16 numbers with
// fewer bits, so they stay what they are; q8_0, q4 and bf16 numbers are rounded to f16's 11 bits, as q is.
// Under PATS a session's first prefill has nothing packed yet, and reads its raw rows.

enum { F16_WARPS = 4 };         // of a block

// Row r of KV head blockIdx.y, of K or, with blockIdx.z 1, of V, as f16: to (G,2,N,D). A warp a row.
static __global__ void rows_as_f16_kernel(LayerRows a, int N, uint16_t *to) {
    const HeadRef &h = a.heads.at[blockIdx.y];
    int r = blockIdx.x * F16_WARPS + (threadIdx.x >> 5), v = blockIdx.z;
    if (r >= h.len) return;
    to += ((size_t)(2 * blockIdx.y + v) * N + r) * a.D;
    for (int d = threadIdx.x & 31; d < a.D; d += 32) to[d] = half_put<DT_F16>(row_value(a, h, v, r, d));
}

// Brings the rows of layer l, unless all of them are 16-bit numbers of one type, to where prefill_kernel can read
// them. The memory for it is that of one layer's rows in f16.
static void rows_as_f16(Session *s, int l, LayerRows &a) {
    int N = max_int(kv_longest(s, l), 1), packed = 0;
    for (int g = 0; g < a.G; g++) packed |= a.heads.at[g].packed;
    if (a.kind_k == a.kind_v && a.kind_k < ROW_Q8 && !packed) return;
    size_t rows = (size_t)N * a.D;
    uint16_t *to = room<uint16_t>(s, ROOM_PLAIN, 2 * a.G * rows);
    dim3 grid(blocks(N, F16_WARPS), a.G, 2);
    KV_LAUNCH(rows_as_f16_kernel, grid, F16_WARPS * 32, 0, a, N, to);
    for (int g = 0; g < a.G; g++) {
        HeadRef *h = &a.heads.at[g];
        h->k = (char *)(to + 2 * g * rows);
        h->v = (char *)(to + (2 * g + 1) * rows);
        h->packed = 0;
    }
    a.kind_k = a.kind_v = ROW_F16;
}

// ---- accounting: what attention reads

// Bytes of a row of K and V, as allocated: raw and packed rows on the average.
static double row_bytes(const Session *s, const KVHead *h) {
    size_t raw = s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
    return (double)(h->cap * raw + 2 * h->pk_bytes) / (h->packed + h->cap);
}

// Counts what attention reads of layer l in a decode step. Rows that query heads share count once, as in attn_decode of
// kvcomp.c. Of lists that the device has chosen the host learns later (lists_count).
static void count_read(Session *s, int l) {
    int H = s->c->H, R = H / s->c->G;
    for (int h = 0; h < H && s->dev->chosen.kept[l] == KEPT_NONE; h++) {
        const KVHead *x = kv_head(s, l, h / R);
        const View *v = kv_view(s, l, h);
        if (h % R && same_as_before(s, l, h)) continue;
        s->clk.bytes_attended += (double)(v->n + x->len - v->tail) * row_bytes(s, x);
    }
}

// ---- views that stay on the device
// A decode step of Quest or LycheeCluster chooses rows in every layer. If the host had to see them,
// it would wait for the device as often. So a list is left where it was made, with the View's n and
// tail in front:
//
//     list of a KV head     | n | tail | row 0 | row 1 | ..           two: LIST_HEAD
//
// Attention reads it there, and only its number of rows comes to the host, together with the
// logits. views_fetch_cuda() brings copies for whoever asks (kv_meta_bytes, view_rows).

// Lists that a select hook chose on the device for layer l: (G,stride).
static int *lists_of(const Session *s, int l) {
    return (int *)s->dev->room[ROOM_VIEWS].p + (size_t)l * s->c->G * s->dev->chosen.stride;
}

// (G,stride) for the lists of layer l, to be filled before its attention.
static int *chosen_room(Session *s, int l, int stride) {
    Chosen *c = &s->dev->chosen;
    int G = s->c->G;
    if (stride != c->stride) {
        views_fetch_cuda(s);
        views_drop_cuda(s);
    }
    c->stride = stride;
    if (!c->kept[l]) s->changes++;
    c->kept[l] = KEPT;
    room_kept<int>(s, ROOM_VIEWS, (size_t)s->c->L * G * stride);
    return lists_of(s, l);
}

// rows (n): rows of each list less its tail. A thread a list.
static __global__ void list_numbers_kernel(const int *views, int stride, int n, int *rows) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int *list = views + (size_t)i * stride;
    if (i < n) rows[i] = list[LIST_ROWS] - list[LIST_TAIL];
}

// After the last layer: how many rows the lists have is on its way to the host when this returns.
static void lists_tell(Session *s) {
    Chosen *c = &s->dev->chosen;
    int n = s->c->L * s->c->G, any = 0;
    for (int l = 0; l < s->c->L; l++) any |= c->kept[l];
    if (!any) return;
    int *dev = room<int>(s, ROOM_LIST, n);
    KV_LAUNCH(list_numbers_kernel, blocks(n, 128), 128, 0, lists_of(s, 0), c->stride, n, dev);
    KV_CUDA(cudaMemcpyAsync(c->rows, dev, n * sizeof(int), cudaMemcpyDeviceToHost, kv_stream));
}

// After logits_wait: counts what was read of the lists. A copy of a list that the host may have is
// of an older step now.
static void lists_count(Session *s) {
    Chosen *c = &s->dev->chosen;
    int G = s->c->G;
    for (int l = 0; l < s->c->L; l++) {
        if (!c->kept[l]) continue;
        for (int i = l * G; i < (l + 1) * G; i++)
            s->clk.bytes_attended += (double)(c->rows[i] + s->head[i].len) * row_bytes(s, &s->head[i]);
        c->kept[l] = KEPT;
    }
}

// The last step's views to the host. Session.changes stays as it is, because the device goes on
// reading its lists.
void views_fetch_cuda(Session *s) {
    Chosen *c = &s->dev->chosen;
    int G = s->c->G;
    unsigned changes = s->changes;
    size_t layer = (size_t)G * c->stride, mark = scratch_mark(s);
    int *host = (int *)scratch(s, layer * sizeof(int));
    for (int l = 0; l < s->c->L; l++) {
        if (c->kept[l] != KEPT) continue;
        download(host, lists_of(s, l), layer * sizeof(int));
        for (int g = 0; g < G; g++) {
            const int *list = host + g * c->stride;
            view_group(s, l, g, list + LIST_HEAD, list[LIST_ROWS], list[LIST_TAIL]);
        }
        c->kept[l] = KEPT_SEEN;
    }
    s->changes = changes;
    scratch_reset(s, mark);
}

// From here on the views are the host's.
void views_drop_cuda(Session *s) {
    memset(s->dev->chosen.kept, KEPT_NONE, s->c->L);
}

// ==================================================================================================== 3 ATTENTION
// What is computed, for a query row q and the rows r of the cache that it may see (kv_visible):
//
//     s_r = q . k_r / sqrt(D)     p_r = exp(s_r - max s) / sum of exp(s - max s)     out = sum of p_r v_r
//
// A Work is a set of query rows of one KV head that read the same list of rows. In decode these are
// the query heads whose views are equal, in prefill neighbouring (token, query head) pairs: of all R query
// heads of the KV head in turn or, where they read lines of their own, of one of them. Query row j of a work
// is pair m = m0 + j: token tok0 + m / per, query head `head` + m % per.
//
// The list of a work is cut into Items (split-K), so that heads of unequal length keep the whole
// device busy. A block takes one item, goes through it in tiles of TILE rows with an online
// softmax, and leaves max, sum and the sum of p v. The block of a work that arrives last puts its
// items together, in order (join_arrived).
//
//     work 0   |--- item 0 ---|--- item 1 ---|--- item 2 ---|- item 3 -|      |---| : chunk_rows positions
//     work 1   |--- item 4 ---|-- item 5 --|
//
// Four kernels compute it; the first is the one to read first. Which one reads which rows, and why, stands at
// "which kernel reads which rows".
//     attend_kernel     any rule, any format, any head_dim: the algorithm as it stands above; or the scores s alone
//     prefill_kernel    a long prefill on tensor cores; its works are not cut into items
//     decode_kernel     decode on tensor cores, over f16, bf16, q8_0, q4 and PATS rows
//     window_kernel     sums of probabilities over queries, and max and sum of softmax rows, on tensor cores

enum {
    TILE = 32,                  // rows of a tile: a key for each lane
    ATTN_WARPS = 4              // warps of a block
};

struct Work {                   // its list has n positions: p < n_idx is row idx[p], the others are rows
                                // tail + p - n_idx
    int g;                      // KV head
    int head, per;              // its query heads are head .. head + per - 1
    int m0, m;                  // first pair; pairs
    int n;
    int tok0;                   // the token of pair 0, as an index into Session.tok
    int idx = 0;                // where its rows begin in Attn.idx
    int n_idx = 0, tail = 0;
    int first = 0, items = 0;   // its items
};
struct Item {                   // positions p0..p1-1 of a work's list
    int work, p0, p1;
};

// Positions of an item, when the lists of all works together have `total`: two tiles at least, and at least
// total / pieces, so that there are no more than `pieces` items and one for each work.
KV_HD static size_t chunk_rows(size_t total, int pieces) {
    size_t chunk = (total + (size_t)pieces * TILE - 1) / ((size_t)pieces * TILE) * TILE;
    return max_size(chunk, 2 * TILE);
}

struct DeviceLines {            // the lines of a query head (section 7), in device memory
    const uint64_t *v, *s;      // (n bits) verticals, offsets
    int n, p0;                  // rows held; the first row of this pass
    int dense;                  // 1: every cell
};
static __device__ int column_needed(const DeviceLines &x, int c, int first, int last);
static __device__ int cell_chosen(const DeviceLines &x, int r, int c);
static const DeviceLines *lines_upload(Session *s, const Lines *lines);

struct Attn : LayerRows {       // argument of the kernels; pointers are device memory
    const float *q;             // (n,H,D)
    const Token *tok;           // the session's tokens
    int tok0;                   // index of the first query's token
    const Work *work;
    const Item *item;
    const int *idx;             // rows of the works' lists
    float *part;                // (items,BQ,D+2): max, sum, sum of p v of each query row
    int rule, window;           // of the mask
    const DeviceLines *lines;   // (H) the lines of every query head (section 7); NULL: every row is read
    float scale;                // 1 / sqrt(D)
    float power;                // scale log2(e): what makes a score a power of 2
    int *ticket;                // of join_arrived: a counter for each work (arrivals)
    float *out;                 // (n,H,D) what attention makes of q, or NULL
    float *stat;                // (n,H,2) max and sum of each row's softmax
    // Or, instead of both:
    float *score;               // (heads,n_q,N) s_r of the heads from head0 on, by positions of their lists, or NULL
    const int *t;               // (n_q) the queries: rows of q, and tokens from the work's tok0 on; NULL: all
    int head0, n_q, N;
};

// The row of (n,H,..) that pair m of work w is.
static __device__ size_t query_row(const Attn &a, const Work &w, int m) {
    return (size_t)(m / w.per) * a.H + w.head + m % w.per;
}

// The token of query row j of work w, as an index into Session.tok; that of the last one behind it.
static __device__ int query_token(const Work &w, int j) {
    return w.tok0 + (w.m0 + min_int(j, w.m - 1)) / w.per;
}

// The row at position p of a work's list.
static __device__ int listed_row(const Work &w, const int *idx, int p) {
    return p < w.n_idx ? idx[w.idx + p] : w.tail + p - w.n_idx;
}

// ---- tiles in shared memory

// The rows at positions p..p+n-1 and their tokens. *any is 0 when the tile lies before every query's sliding
// window (the first query's begins first), or none of its columns is needed, and scores are not wanted. Called by all
// threads; what it writes is complete after the next barrier.
static __device__ void list_rows(const Attn &a, const HeadRef &h, const Work &w, int p, int n,
                                 int *row, int *src, int *any) {
    if (threadIdx.x >= TILE) return;
    int i = threadIdx.x, see = 0;
    if (i < n) {
        row[i] = listed_row(w, a.idx, p + i);
        src[i] = h.src[row[i]];
        see = a.score || !a.window || a.rule != VIS_CAUSAL ||
              a.tok[src[i]].pos > a.tok[query_token(w, 0)].pos - a.window;
        if (a.lines) see = see && column_needed(a.lines[w.head], row[i], w.m0, w.m0 + w.m);
    }
    see = __any_sync(ALL_LANES, see);
    if (!i) *any = see;
}

// to (n,stride) = the keys (v 0) or the values (v 1) of rows row[0..n) as f32. A warp a row, a lane every 32nd
// element.
static __device__ void load_tile(float *to, int stride, const Attn &a, const HeadRef &h, int v,
                                 const int *row, int n) {
    int lane = threadIdx.x & 31, kind = v ? a.kind_v : a.kind_k;
    for (int j = threadIdx.x >> 5; j < n; j += ATTN_WARPS) {
        const char *raw = raw_row(a, h, v, row[j]);
        if (row[j] < h.packed)
            for (int d = lane; d < a.D; d += 32) to[j * stride + d] = packed_value(h, v, row[j], d, a.D);
        else
            for (int d = lane; d < a.D; d += 32) to[j * stride + d] = row_get(raw, kind, d, a.D);
    }
}

// ---- the items of a work become one
// An item leaves max, sum and vector under its own maximum; join_row (lib/cuda_kernels.h) makes them one. Whichever
// block of a work arrives last does this for its rows. The items are added in their order, whoever does it, so the
// result is the same in every run.

// The end of an item's block, whose part, of BQ query rows, is stored: the last block of a work joins its items, a
// warp a row. A call, not inlined: it has registers of its own, and takes none from the kernel's main loop.
static KV_CALL void join_arrived(const Attn &a, int BQ) {
    __shared__ int last;
    Item it = a.item[blockIdx.x];
    Work w = a.work[it.work];
    if (it.p0 == it.p1 || !arrives_last(&a.ticket[it.work], w.items, &last)) return;
    for (int j = threadIdx.x >> 5; j < w.m; j += ATTN_WARPS) {
        size_t stride = BQ * (a.D + 2), row = query_row(a, w, w.m0 + j);
        join_row(a.part + w.first * stride + j * (a.D + 2), stride, w.items, a.D, a.out ? a.out + row * a.D : NULL,
                 a.stat + row * 2);
    }
}

// ---- attend_kernel: any rule, any format, any head_dim
//
//   Block   one item; BQ = 4 QW query rows of its work
//   Warp    QW of them: rows warp*QW .. warp*QW + QW-1
//   Lane    three roles in turn, for one tile of TILE = 32 rows:
//             scoring    a lane owns a key, and scores it against all QW query rows
//             softmax    32/QW lanes share a query row; each holds every (32/QW)-th score of it
//             mixing     a lane owns the dimensions lane, lane + 32, .. of all QW rows
//           score (BQ,TILE+1), the part of one warp with QW = 8; the letter is the lane that owns
//           the number:
//                        key 0    1    2   ..   31                      key 0    1    2    3    4   ..
//             scoring    row a    b    c   ..   F          softmax      row a    b    c    d    a   ..
//                        row a    b    c   ..   F                       row e    f    g    h    e   ..
//   Shared  q (BQ,D); kv (TILE,D+1): the tile's keys, then its values; score (BQ,TILE+1); shrink
//           (BQ); row, src (TILE); any. Rows are one number longer than they need, so that 32 lanes
//           reading a column find it in 32 banks.
//   Tile    K and V are read from memory once for all BQ query rows; they are unpacked to f32 once,
//           whatever the format. With 4 blocks on a multiprocessor (launch bounds) loads of one
//           block hide behind the arithmetic of another.
//   Bound   memory in decode; in prefill the loads of score_rows and mix_tile from shared memory: one for
//           every multiply-add, 2 D of each a cell (a query and a key), so a cell is 4 D / 32 = 16
//           instructions of a warp at D 128
// Without Attn.out there is no mixing: only max and sum are wanted. With Attn.score there is no softmax either: a
// scored tile is stored as it is. With Attn.lines a query row reads what lies on its head's lines (section 7), and
// tiles that need none of it are left out.

struct AttendShared {
    float *q, *kv, *score;
    float *shrink;              // by how much a row's older sums shrink in this tile
    int *row, *src, *any;
};

// Carves the block's shared memory -> bytes.
template <int QW> KV_HD static size_t attend_carve(AttendShared *m, char *mem, int D) {
    const int BQ = ATTN_WARPS * QW;
    Carved b = { mem, 0 };
    m->q = carve<float>(&b, BQ * D);
    m->kv = carve<float>(&b, TILE * (D + 1));
    m->score = carve<float>(&b, BQ * (TILE + 1));
    m->shrink = carve<float>(&b, BQ);
    m->row = carve<int>(&b, TILE);
    m->src = carve<int>(&b, TILE);
    m->any = carve<int>(&b, 4);
    return b.at;
}

// score[i] = q of the warp's row i times the lane's key.
template <int QW>
static __device__ void score_rows(float *score, const float *q, const float *key, int D) {
    for (int i = 0; i < QW; i++) score[i] = 0;
    for (int d = 0; d < D; d++) {
        float x = key[d];
        for (int i = 0; i < QW; i++) score[i] += q[i * D + d] * x;
    }
}

// Folds a scored tile into a running softmax, *top the maximum and *sum the sum of exponentials so
// far. The 32/QW lanes of a row each hold every (32/QW)-th score of it, from `mine` on, and leave
// the exponentials there. -> what was gathered under the old maximum is to be multiplied by this.
template <int QW> static __device__ float fold_scores(float *mine, float *top, float *sum) {
    const int LANES = 32 / QW;
    float high = *top, add = 0;
    for (int j = 0; j < TILE; j += LANES) high = fmaxf(high, mine[j]);
    high = lanes_max<LANES>(high);
    for (int j = 0; j < TILE; j += LANES) {
        float e = high == -INFINITY ? 0 : expf(mine[j] - high);
        mine[j] = e;
        add += e;
    }
    add = lanes_sum<LANES>(add);
    float shrink = high == -INFINITY ? 1 : expf(*top - high);
    *sum = *sum * shrink + add;
    *top = high;
    return shrink;
}

// The query of pair m of work w, as a row of Attn.q and as a token from the work's first on.
static __device__ int query_of(const Attn &a, const Work &w, int m) { return a.t ? a.t[m / w.per] : m / w.per; }

// The block's query rows to shared memory; zeros behind the work's last.
template <int BQ> static __device__ void load_queries(float *q, const Attn &a, const Work &w) {
    int lane = threadIdx.x & 31;
    for (int j = threadIdx.x >> 5; j < BQ; j += ATTN_WARPS) {
        int m = w.m0 + min_int(j, w.m - 1);
        const float *from = a.q + ((size_t)query_of(a, w, m) * a.H + w.head + m % w.per) * a.D;
        for (int d = lane; d < a.D; d += 32) q[j * a.D + d] = j < w.m ? from[d] : 0;
    }
}

// Scores the tile's n keys against the warp's rows: a lane a key. What a query row must not see is
// -infinity.
template <int QW>
static __device__ void score_tile(const AttendShared &m, const Attn &a, const Work &w, int n) {
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, key = lane < n ? lane : 0;
    float score[QW];
    score_rows<QW>(score, m.q + warp * QW * D, m.kv + key * (D + 1), D);
    int src = m.src[key], c = m.row[key], needed = lane < n;
    if (a.lines) needed = needed && column_needed(a.lines[w.head], c, w.m0, w.m0 + w.m);
    for (int i = 0; i < QW; i++) {
        int j = warp * QW + i, t = w.tok0 + query_of(a, w, w.m0 + min_int(j, w.m - 1));
        int see = needed && j < w.m && kv_visible(a.rule, a.window, &a.tok[t], t, &a.tok[src], src);
        if (see && a.lines) see = cell_chosen(a.lines[w.head], w.m0 + j, c);
        m.score[j * (TILE + 1) + lane] = see ? score[i] * a.scale : -INFINITY;
    }
}

// The warp's scores of the tile's n keys to Attn.score: positions p.. of the work's list.
template <int QW>
static __device__ void store_scores(const AttendShared &m, const Attn &a, const Work &w, int p, int n) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int j = warp * QW; j < min_int(warp * QW + QW, w.m); j++) {
        int head = w.head + (w.m0 + j) % w.per, i = (w.m0 + j) / w.per;
        if (lane < n) a.score[((size_t)(head - a.head0) * a.n_q + i) * a.N + p + lane] = m.score[j * (TILE + 1) + lane];
    }
}

// acc (QW,MAX_D/32) = acc * shrink + p v, over the tile's n rows.
template <int QW>
static __device__ void mix_tile(float (&acc)[QW][MAX_D / 32], const AttendShared &m, int D, int n) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = 0; i < QW; i++)
        for (int e = 0; e < MAX_D / 32; e++) acc[i][e] *= m.shrink[warp * QW + i];
    for (int j = 0; j < n; j++)
        for (int e = 0; e < MAX_D / 32 && 32 * e < D; e++) {
            float x = lane + 32 * e < D ? m.kv[j * (D + 1) + lane + 32 * e] : 0;
            for (int i = 0; i < QW; i++) acc[i][e] += m.score[(warp * QW + i) * (TILE + 1) + j] * x;
        }
}

enum { ATTEND_BLOCKS = 4 };     // that fit on a multiprocessor

// QW: query rows of a warp, 1 or 8.
template <int QW>
static __global__ void __launch_bounds__(ATTN_WARPS * 32, ATTEND_BLOCKS) attend_kernel(KV_PARAMETER(Attn) a) {
    KV_DYN_SHARED(char, mem);
    dependents_launch();
    dependency_wait();
    const int BQ = ATTN_WARPS * QW, LANES = 32 / QW;
    AttendShared m;
    attend_carve<QW>(&m, mem, a.D);
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Item it = a.item[blockIdx.x];
    Work w = a.work[it.work];
    HeadRef h = a.heads.at[w.g];
    load_queries<BQ>(m.q, a, w);
    float top = -INFINITY, sum = 0;             // of row warp*QW + lane/LANES
    float acc[QW][MAX_D / 32];
    for (int i = 0; i < QW; i++)
        for (int e = 0; e < MAX_D / 32; e++) acc[i][e] = 0;

    for (int p = it.p0; p < it.p1; p += TILE) {
        int n = min_int(it.p1 - p, TILE);
        __syncthreads();                        // the last tile is done with
        list_rows(a, h, w, p, n, m.row, m.src, m.any);
        __syncthreads();
        if (!*m.any) continue;
        load_tile(m.kv, D + 1, a, h, 0, m.row, n);
        __syncthreads();
        score_tile<QW>(m, a, w, n);
        __syncwarp();
        if (a.score) {
            store_scores<QW>(m, a, w, p, n);
            continue;
        }
        float *mine = m.score + (warp * QW + lane / LANES) * (TILE + 1) + lane % LANES;
        float shrink = fold_scores<QW>(mine, &top, &sum);
        if (lane % LANES == 0) m.shrink[warp * QW + lane / LANES] = shrink;
        if (!a.out) continue;
        __syncthreads();                        // the keys are done with
        load_tile(m.kv, D + 1, a, h, 1, m.row, n);
        __syncthreads();
        mix_tile<QW>(acc, m, D, n);
    }
    if (a.score) return;

    float *part = a.part + ((size_t)blockIdx.x * BQ + warp * QW) * (D + 2);
    if (lane % LANES == 0) {
        float *to = part + (size_t)(lane / LANES) * (D + 2);
        to[0] = top;
        to[1] = sum;
    }
    for (int i = 0; i < QW; i++)
        for (int e = 0; e < MAX_D / 32; e++)
            if (lane + 32 * e < D) part[(size_t)i * (D + 2) + 2 + lane + 32 * e] = acc[i][e];
    join_arrived(a, BQ);
}

// ---- prefill_kernel: prefill on tensor cores, K and V of one 16-bit type, head_dim a multiple of 8
//
// The online softmax of attend_kernel in the shape of FlashAttention-2 (Dao, arXiv 2307.08691): a block
// keeps its query rows, K and V come by in tiles, and scores and probabilities stay in registers.
//
//   Block   a work: BQ = 16 MT WARPS query rows, and all rows they may see, a tile of KT keys at a time. The
//           longest ones start first.
//   Warp    16 MT of the query rows; MT times 16 rows are the height of a fragment
//   Lane    (g,t), as in "what only PTX can say" of lib/cuda.h. Two products for every tile:
//
//             scores (16 MT, KT) = q (16 MT, DIM) K^T (DIM, KT)
//             out (16 MT, DIM)  += P (16 MT, KT)  V (KT, DIM)
//
//           What a lane holds of the scores of 16 queries and 16 keys, as D of two products, is what it
//           has to hold of P as A of the next one, so P never leaves its registers:
//
//                          keys 0..7                    keys 8..15
//             query g      s[2n][0]    s[2n][1]         s[2n+1][0]  s[2n+1][1]       of keys 2t, 2t+1
//             query g+8    s[2n][2]    s[2n][3]         s[2n+1][2]  s[2n+1][3]
//                          `-- a[0], a[1] --'           `-- a[2], a[3] --'           two in a word
//
//           ldmatrix brings the other factors. Eight neighbouring dims of a key are a row of a matrix in
//           shared memory. As it is, it is B of the first product, which wants neighbouring dims of a key
//           in a word; transposed, it is B of the second one, which wants neighbouring keys of a dim.
//   Shared  q (BQ,P), keys (KT,P), vals (KT,P), 16-bit numbers; a row is P = DIM + 8 numbers long, so
//           that 8 rows of a matrix lie in different banks. state, tok (BQ): maximum and sum of a row's
//           softmax, its token. see (BQ,KT/32): a bit for each key that a row sees in a tile with a mask.
//           list, cols: which tiles there are; counts, work, nexus
//   Tile    128 x 64 up to head_dim 128, by four warps. With two fragments of queries a warp uses each fragment
//           of K and V twice; with one, reading them from shared memory would take as long as multiplying them.
//           More rows do not fit: the output of 32 x 128 is 128 registers of a lane, the scores of 32 x 64 are 64.
//           So q is read again for every tile, and state is not kept in registers. Wider heads have tiles of
//           64 x 32. Along lines a block has 64 rows, because lines are chosen for blocks of 64.
//           K and V have a buffer each, and take turns: while one is multiplied, cp.async fills the other. Two
//           blocks are on a multiprocessor, or four of two warps: one multiplies while the other waits. The parts
//           of a copy, and __syncwarp where all lanes have arrived, move nothing that is computed; they keep the
//           compiler from asking for more fragments at once than there are registers.
//   Bound   the tensor cores. At head_dim 128 a tile that needs no mask is 264 products of a warp and 650
//           other instructions, 2.5 a product, and along lines 132 and 455, 3.4 (sm_90, make cuda-check)
//   Gain    a tile is 32 x 64 cells of a warp, so a cell is .45 instructions, where attend_kernel takes 16
//
// Which tiles there are is found out before, TC_LIST at a time: tiles that no query of the work sees are
// left out (those before a sliding window, other messages under SONIC's rule), and tiles that every query
// sees need no mask. With LINES a work is 64 rows of one query head that read chosen lines, and
// section 7 says which tiles those are; then a tile may also be KT single columns, gathered.
//
// What is rounded: q once and P once, to the rows' type. A score is off by 2^-11 |q||k| / sqrt(D) with f16
// rows and 2^-8 |q||k| / sqrt(D) with bf16 rows at most, a probability by 2^-11 and 2^-8 of itself more.
// (With --exact attend_kernel computes in f32 instead.)

enum {
    TC_MIN = 256,               // tokens of a pass; below, split-K keeps more of the device busy
    TC_LIST = 512,              // tiles of a list
    TC_COLS = 2048,             // room for gathered columns
    TC_STEP = 1024              // columns that a block looks at at once to gather them
};

// The shape of a block, by the width of the products: DIM >= D. DIM is 64, 128 or 256.
template <int DIM, int LINES> struct TensorShape {
    enum {
        WARPS = LINES && DIM <= 64 ? 2 : ATTN_WARPS,
        BLOCKS = 2 * ATTN_WARPS / WARPS,        // blocks on a multiprocessor
        MT = DIM <= (LINES ? 64 : 128) ? 2 : 1, // fragments of queries of a warp
        KT = DIM <= 128 ? 64 : 32,              // keys of a tile
        BQ = WARPS * 16 * MT,                   // query rows of a block
        P = tile_row(DIM) / 2,                  // numbers of a row in shared memory
        WORDS = KT / 32,                        // words of a bit a key
        LANES = DIM <= 64 ? 8 : DIM <= 128 ? 16 : 32,   // lanes that copy a row, 16 bytes each
        COPIES = KT * LANES / (WARPS * 32)      // rows of a tile that a lane copies
    };
};

struct TensorShared {
    uint16_t *q, *keys, *vals;
    int *cols;                  // (TC_COLS) gathered columns, LINES only
    RowState *state;            // (BQ)
    unsigned *see;
    int *tok;                   // (BQ) the rows' tokens
    int *list;                  // (TC_LIST) tiles: twice the first row, and 1 more when it needs its mask
    int *counts;                // (2,WARPS) what the warps add to a list
    Work *work;
    int *nexus;                 // 1: a token of SONIC's own is among the work's queries
};

// Carves the block's shared memory -> bytes.
template <int DIM, int LINES> KV_HD static size_t tensor_carve(TensorShared *m, char *mem) {
    typedef TensorShape<DIM, LINES> Shape;
    Carved b = { mem, 0 };
    m->q = carve<uint16_t>(&b, Shape::BQ * Shape::P);
    m->keys = carve<uint16_t>(&b, Shape::KT * Shape::P);
    m->vals = carve<uint16_t>(&b, Shape::KT * Shape::P);
    m->cols = carve<int>(&b, LINES ? TC_COLS : 0);
    m->state = carve<RowState>(&b, Shape::BQ);
    m->see = carve<unsigned>(&b, Shape::BQ * Shape::WORDS);
    m->tok = carve<int>(&b, Shape::BQ);
    m->list = carve<int>(&b, TC_LIST);
    m->counts = carve<int>(&b, 2 * Shape::WARPS);
    m->work = carve<Work>(&b, 1);
    m->nexus = carve<int>(&b, 1);
    return b.at;
}

// A tile: n rows from p on or, of gathered columns, rows cols[p..p+n) of TensorShared.
struct TileRef {
    int p, n;
    int masked;                 // 1: some query of the work may not see all of it, or it is not full
    int gathered;
};

// ---- which tiles there are

// Declared here because prefill_kernel calls them; they stand in section 7.
template <int DIM> static __device__ int lines_list(const TensorShared &m, const Attn &a, const DeviceLines &x,
                                                    const Work &w, int *from, int *n_cols);
template <int DIM> static __device__ void lines_mask(const TensorShared &m, const Attn &a, const HeadRef &h,
                                                     const DeviceLines &x, const Work &w, const TileRef &tile);

// How a work sees the key of token src, under any rule but plain causality: 0 not at all; 1 some query
// may; 2 each of them does. "Some may" is what is left when nothing is known (kv_visible). The messages of a
// pass's tokens ascend, and but for SONIC's, which may take positions twice, the positions do, so the first and the
// last query say it all.
static __device__ int work_sees(const TensorShared &m, const Attn &a, int src) {
    int i = query_token(*m.work, 0), j = query_token(*m.work, m.work->m - 1);
    const Token *key = &a.tok[src], *first = &a.tok[i], *last = &a.tok[j];
    int some = src <= j, all = src <= i, own = key->kind == TOK_EXTRA;
    if (a.rule != VIS_CAUSAL && own && *m.nexus) {                              // Eq. 5
        some = 1;
        all = 0;
    }
    if (a.rule != VIS_CAUSAL && !own && key->seg >= 0) {                        // Eq. 4
        some = some && first->seg <= key->seg && key->seg <= last->seg;
        all = all && first->seg == last->seg;
    }
    if (a.window && a.rule == VIS_CAUSAL) some = some && key->pos > first->pos - a.window;
    if (a.window) all = all && a.rule == VIS_CAUSAL && key->pos > last->pos - a.window;
    return some ? 1 + all : 0;
}

// The tile of KT rows from row p on, as an element of the list, or -1 when no query of the work sees any
// of its n rows. Called by a warp.
template <int KT>
static __device__ int tile_seen(const TensorShared &m, const Attn &a, const HeadRef &h, int p, int n) {
    int some = 0, all = n >= KT;
    for (int i = threadIdx.x & 31; i < KT; i += 32) {
        int sees = i < n ? work_sees(m, a, h.src[p + i]) : 0;
        some |= sees;
        all &= sees == 2;
    }
    some = __any_sync(ALL_LANES, some);
    all = __all_sync(ALL_LANES, all);
    return some ? 2 * p + !all : -1;
}

// list = the next tiles that the work sees, of rows *from and up -> how many; *from is then where the
// list after this one begins. Called by all threads of a block; the list is complete when it returns. A
// warp looks at 32 tiles. Under plain causality a lane looks at one of them: src is ascending, so its
// first and last row say it all.
template <int KT>
static __device__ int tiles_list(const TensorShared &m, const Attn &a, const HeadRef &h, int n, int *from) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, found = 0, first = query_token(*m.work, 0);
    while (found + ATTN_WARPS * 32 <= TC_LIST && *from < n) {
        int p0 = *from + warp * 32 * KT, mine = -1;
        if (a.rule == VIS_CAUSAL && !a.window) {
            int p = p0 + lane * KT, last = p + KT - 1;
            if (p < n) mine = 2 * p + !(last < n && h.src[last] <= first);
        } else {
            KV_UNROLL(4) for (int i = 0; i < 32; i++) {
                int p = p0 + i * KT, tile = p < n ? tile_seen<KT>(m, a, h, p, n - p) : -1;
                if (i == lane) mine = tile;
            }
        }
        unsigned seen = __ballot_sync(ALL_LANES, mine >= 0);
        if (!lane) m.counts[warp] = __popc(seen);
        __syncthreads();
        for (int w = 0; w < ATTN_WARPS; w++) {
            if (w == warp && mine >= 0) m.list[found + __popc(seen & ((1u << lane) - 1))] = mine;
            found += m.counts[w];
        }
        __syncthreads();
        *from += ATTN_WARPS * 32 * KT;
    }
    return found;
}

// see (BQ,KT/32): the warp's words of it. Its lanes look at a key each, for one query row after the other.
template <int KT, int ROWS>
static __device__ void tile_mask(const TensorShared &m, const Attn &a, const HeadRef &h, const TileRef &tile) {
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * ROWS;
    KV_UNROLL(1) for (int w = 0; w < KT / 32; w++) {
        int i = w * 32 + lane, src = h.src[tile.p + min_int(i, tile.n - 1)];
        KV_UNROLL(1) for (int r = row; r < row + ROWS; r++) {
            int t = m.tok[r];
            int sees = i < tile.n && kv_visible(a.rule, a.window, &a.tok[t], t, &a.tok[src], src);
            unsigned bits = __ballot_sync(ALL_LANES, sees);
            if (!lane) m.see[r * (KT / 32) + w] = bits;
        }
    }
}

// Tile i of the n_list tiles of the list and the tiles of n_cols gathered columns behind them.
template <int KT, int LINES>
static __device__ TileRef tile_at(const TensorShared &m, const Attn &a, const Work &w, int n_list, int n_cols,
                                  int i) {
    int at = (i - n_list) * KT;
    if (!LINES || i < n_list) {
        int tile = m.list[i], p = tile >> 1;
        return { p, min_int(w.n - p, KT), tile & 1, 0 };
    }
    int n = min_int(n_cols - at, KT), behind = m.cols[at + n - 1] > w.n - w.m;
    return { at, n, n < KT || behind || a.window, 1 };
}

// ---- a tile: its rows come, are multiplied (lib/cuda_kernels.h: "tiles of attention"), and go

// q (BQ,P) = the work's query rows, rounded; zeros behind the last and behind D.
template <int DT, int DIM, int BQ>
static __device__ void tensor_queries(uint16_t *q, const Attn &a, const Work &w) {
    int lane = threadIdx.x & 31;
    for (int j = threadIdx.x >> 5; j < BQ; j += blockDim.x >> 5) {
        const float *from = a.q + query_row(a, w, w.m0 + min_int(j, w.m - 1)) * a.D;
        for (int d = lane; d < DIM; d += 32)
            q[j * (tile_row(DIM) / 2) + d] = half_put<DT>(j < w.m && d < a.D ? from[d] : 0);
    }
}

// Asks for part PART of the PARTS of a tile: to (KT,P) = its rows as stored; behind them the last one again,
// which no query sees. LANES lanes copy a row, 16 bytes each, or as many as it has, and a lane COPIES
// neighbouring rows. `to` is where the lane's first 16 bytes go; with the last part the copies are a group.
// All rows' numbers come before the copies, or each copy would wait for its own.
template <int DIM, int LINES, int PART, int PARTS>
static __device__ void copy_rows(SharedAt to, const char *rows, const int *cols, const TileRef &tile, int D) {
    typedef TensorShape<DIM, LINES> Shape;
    const int LANES = Shape::LANES, N = Shape::COPIES / PARTS;
    int first = tile.p + (int)threadIdx.x / LANES * Shape::COPIES + PART * N, c = threadIdx.x % LANES * 8;
    if (c < D) {
        unsigned row[N];
        const char *from = as_it_is(rows + 2 * c);
        if (LINES && tile.gathered) {
            KV_UNROLL() for (int j = 0; j < N; j += 4) {
                uint4 four = *(const uint4 *)(cols + first + j);
                row[j] = four.x;
                row[j + 1] = four.y;
                row[j + 2] = four.z;
                row[j + 3] = four.w;
            }
        } else {
            KV_UNROLL() for (int j = 0; j < N; j++) row[j] = min_int(first + j, tile.p + tile.n - 1);
        }
        KV_UNROLL() for (int j = 0; j < N; j++)
            copy16_async(to + (PART * N + j) * tile_row(DIM), from + (size_t)row[j] * (unsigned)(2 * D));
    }
    if (PART == PARTS - 1) copy_commit();
}

// The warp's rows to Attn.out and .stat. state: of the warp's rows.
template <int DIM, int MT>
static __device__ void tensor_store(const Attn &a, const Work &w, const float (*acc)[DIM / 8][4],
                                    const RowState *state) {
    int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3, warp = threadIdx.x >> 5;
    KV_UNROLL() for (int i = 0; i < MT; i++)
        KV_UNROLL() for (int half = 0; half < 2; half++) {
            int j = warp * 16 * MT + 16 * i + 8 * half + g;
            float z = state[16 * i + 8 * half + g].sum, inv = 1 / z;
            if (j >= w.m) continue;
            size_t r = query_row(a, w, w.m0 + j);
            KV_UNROLL() for (int n = 0; n < DIM / 8; n++)
                if (n * 8 < a.D)
                    *(float2 *)(a.out + r * a.D + n * 8 + 2 * t) =
                        make_float2(acc[i][n][2 * half] * inv, acc[i][n][2 * half + 1] * inv);
            if (t) continue;
            a.stat[r * 2] = state[16 * i + 8 * half + g].top * a.scale;
            a.stat[r * 2 + 1] = z * (1.f / (1 << P_SHIFT));
        }
}

// DT: dtype of the rows; LINES: the works' heads read lines. A block is a work, the last one first.
template <int DT, int DIM, int LINES>
static __global__ void
__launch_bounds__(TensorShape<DIM, LINES>::WARPS * 32, TensorShape<DIM, LINES>::BLOCKS)
prefill_kernel(Attn a) {
    KV_DYN_SHARED(char, mem);
    typedef TensorShape<DIM, LINES> Shape;
    const int MT = Shape::MT, KT = Shape::KT, P = Shape::P, ROWS = 16 * MT, LANES = Shape::LANES;
    const int PARTS = DIM <= 64 && LINES ? 1 : 2;       // of a copy of keys
    TensorShared m;
    tensor_carve<DIM, LINES>(&m, mem);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (!threadIdx.x) {
        *m.work = a.work[gridDim.x - 1 - blockIdx.x];
        *m.nexus = 0;
    }
    __syncthreads();
    const Work &w = *m.work;
    const HeadRef &h = a.heads.at[w.g];

    // Dims from D on are zeros in the products; cp.async never writes them.
    tensor_queries<DT, DIM, Shape::BQ>(m.q, a, w);
    for (int i = threadIdx.x; i < 2 * KT * (DIM - a.D); i += blockDim.x)
        m.keys[i / (DIM - a.D) * P + a.D + i % (DIM - a.D)] = 0;
    if ((int)threadIdx.x < Shape::BQ) {
        int t = query_token(w, threadIdx.x);
        m.tok[threadIdx.x] = t;
        m.state[threadIdx.x] = { SCORE_LOW, 0 };
        if (!LINES && a.tok[t].kind == TOK_EXTRA) atomicMax(m.nexus, 1);
    }
    __syncthreads();

    // Where the lane's 16 bytes of a copy go, and where it names its rows for ldmatrix: of A, 16 rows,
    // then the same 8 dims on; of keys, 8 rows, the same 8 dims on, then the next 8 rows; of values as of A.
    SharedAt q = shared_address(m.q + (warp * ROWS + lane % 16) * P + lane / 16 * 8);
    SharedAt keys = shared_address(m.keys + (lane / 16 * 8 + lane % 8) * P + lane / 8 % 2 * 8);
    SharedAt vals = shared_address(m.vals + lane % 16 * P + lane / 16 * 8);
    int first = (int)threadIdx.x / LANES * Shape::COPIES;
    SharedAt own = shared_address(m.keys + first * P + threadIdx.x % LANES * 8);
    float acc[MT][DIM / 8][4], c = a.power;
    KV_UNROLL() for (int i = 0; i < MT; i++)
        KV_UNROLL() for (int e = 0; e < DIM / 2; e++) acc[i][e / 4][e % 4] = 0;

    for (int from = 0; from < w.n;) {
        int n_cols = 0, n_list = LINES ? lines_list<DIM>(m, a, a.lines[w.head], w, &from, &n_cols)
                                       : tiles_list<KT>(m, a, h, w.n, &from);
        int tiles = n_list + (n_cols + KT - 1) / KT;

        TileRef now = { 0, 0, 0, 0 };
        if (tiles) now = tile_at<KT, LINES>(m, a, w, n_list, n_cols, 0);
        if (tiles) copy_rows<DIM, LINES, 0, 1>(own, h.k, m.cols, now, a.D);
        for (int i = 0; i < tiles; i++) {
            if (!LINES) now = tile_at<KT, LINES>(m, a, w, n_list, n_cols, i);   // saves registers
            copy_wait<0>();
            __syncthreads();                    // the keys are there, the last values are done with
            copy_rows<DIM, LINES, 0, 1>(own + 2 * KT * P, h.v, m.cols, now, a.D);
            if (now.masked && LINES) lines_mask<DIM>(m, a, h, a.lines[w.head], w, now);
            if (now.masked && !LINES) tile_mask<KT, ROWS>(m, a, h, now);
            float score[MT][KT / 8][4], shrink[MT][2];
            unsigned prob[KT / 16][MT][4];
            tensor_scores<DT, DIM, MT, KT>(score, q, keys);

            if (now.masked) {
                __syncwarp();
                tensor_hide<MT, KT>(score, m.see + warp * ROWS * Shape::WORDS);
            }
            tensor_softmax<DT, MT, KT>(prob, shrink, score, c, m.state + warp * ROWS);
            copy_wait<0>();
            __syncthreads();                    // the values are there, the keys are done with
            if (i + 1 < tiles) now = tile_at<KT, LINES>(m, a, w, n_list, n_cols, i + 1);
            if (i + 1 < tiles) copy_rows<DIM, LINES, 0, PARTS>(own, h.k, m.cols, now, a.D);
            tensor_sums<DT, MT, KT>(m.state + warp * ROWS, shrink, prob);
            tensor_mix<DT, DIM, MT, KT, 0>(acc, shrink, prob, vals);
            if (PARTS == 2 && i + 1 < tiles) copy_rows<DIM, LINES, 1, 2>(own, h.k, m.cols, now, a.D);
            tensor_mix<DT, DIM, MT, KT, 1>(acc, shrink, prob, vals);
        }
        __syncthreads();                        // the list is done with
    }
    tensor_store<DIM, MT>(a, w, acc, m.state + warp * ROWS);
}

// ---- decode_kernel: decode on tensor cores, over f16, bf16, q8_0, q4 and PATS rows, head_dim 64 and 128
//
// The R query heads of a KV head read the same rows, so rows that have come to shared memory serve all of
// them. attend_kernel multiplies them one query after the other; here a tensor core does, as in
// prefill_kernel, but over lists of rows, and with nothing rounded that could be seen.
//
//   Block   one item; NT = 1 or 2 groups of 8 query rows
//   Warp    16 N positions of the list at a time, a tile; the warps take turns in the item, and do not wait for
//           each other. N = NT for plain rows, so that where queries fill two fragments a fragment of them and a
//           softmax serve 32 keys; 1 for rows of fewer bits
//   Lane    Copying (cp.async): 16 bytes of a row, or twice; 8 or 16 neighbouring lanes have a row. Multiplying:
//           (g,t), as in "what only PTX can say" of lib/cuda.h; two products for 16 keys
//
//             scores (16, 8 keys) = q (16, D) K^T (D, 8 keys)            two of them
//             out (16, 8 dims)   += P (16, 16 keys) V (16 keys, 8 dims)  D / 8 of them
//
//           q and P are two 16-bit numbers each, the rounded value and what the rounding left over. Which
//           query and which of the two a row of their fragments is:
//
//                         NT = 1              NT = 2: first fragment    second fragment
//             row g       query g, value      query g,   value          query g,   rest
//             row g + 8   query g, rest       query g+8, value          query g+8, rest
//
//           With NT = 1 a lane adds rows g and g + 8 of a product, and the rests cost nothing, because they
//           fill rows that would be empty. With NT = 2 a product with the rests follows the one with the
//           values, into the same sums. As in prefill_kernel the scores of a lane, made probabilities, are
//           its fragment of P, and ldmatrix makes fragments of K and, transposing, of V.
//   Shared  slot, for each warp: a tile's rows of K and of V as they are stored, and for rows of fewer bits the
//           same rows as f16 numbers (DecodeShape). sums (ATTN_WARPS,8 NT,D+2), in the same place at the end: what each
//           warp found, laid out like Attn.part. q (D/16,NT,4,8,4) words: the fragments of the queries, read anew
//           for every tile
//   Tile    A format differs from another in how a tile becomes 16-bit numbers that ldmatrix can read:
//
//             f16, bf16    device memory --rows_ask--> slot                              it is what is multiplied
//             q8_0         device memory --rows_ask--> slot --rows_unpack--> f16 integers  scales: see scales_fold
//             q4           device memory --rows_ask--> slot --rows_unpack--> f16 integers  likewise; see q4_turn
//             PATS         device memory --rows_ask--> slot --rows_unpack--> f16 numbers with fewer bits
//
//           The next tile's keys are asked for when this one's slot is free, its values likewise, and the rows'
//           numbers are looked up another tile ahead, so that a list costs no second wait. Over f16 rows 32 N D to
//           64 N D bytes a warp are under way: at D 128 64 to 128 KB on a multiprocessor, where 23 hide the wait
//           for memory (4.3 TB/s x 0.7 us / 132 multiprocessors)
//   Bound   memory, for any number of query rows (make cuda-check); over q4 instructions, of which 16 rows take 809,
//           as many as fit into .4 of the time that f16 rows take
//   Gain    239 instructions for 16 x 8 cells over f16 rows are 1.9 a cell, where attend_kernel takes 16; over PATS's
//           of 8 bits 3.4, q8_0 5.0, q4 6.3
//
// What is rounded: scores differ from exact ones by 2^-20 |q||k| with f16 rows and 2^-16 |q||k| with bf16
// rows, probabilities by 2^-22 and 2^-16 of themselves. Were q and P rounded once, it would be 2^-11 and 2^-8
// of them, and save what memory hides anyway.

enum {
    DECODE_PATS = ROW_Q4 + 1,   // a KIND beside ROW_*: what PATS has packed, and the f16 rows behind it
    RAW_BITS = 17               // Walk.bits of a row that is not packed
};
// The shape of a block, by the rows it reads.
template <int KIND, int D, int NT> struct DecodeShape {
    enum {
        TYPE = KIND == ROW_BF16 ? DT_BF16 : DT_F16,     // of what is multiplied
        SCALED = KIND == ROW_Q8 || KIND == ROW_Q4,      // 1: blocks of 32 integers with a scale each
        UNPACKS = SCALED || KIND == DECODE_PATS,
        N = UNPACKS ? 1 : NT,   // a tile is so many times 16 keys, which is the depth of a product
        KEYS = 16 * N,
        BLOCK = KIND == ROW_Q8 ? (int)Q8_BYTES : (int)Q4_BYTES,         // bytes of such a block
        BYTES = SCALED ? D / 32 * BLOCK : 2 * D,        // of a row that is not packed
        ASKEW = SCALED || (KIND == DECODE_PATS && D % 128),     // 1: rows may begin amid 16 bytes
        LANES = D > 64 && !UNPACKS ? 16 : 8,    // that copy a row together, 16 bytes each at a time
        TIMES = (BYTES + (ASKEW ? 15 : 0) + 16 * LANES - 1) / (16 * LANES),     // that they do
        ROW = tile_row(D),      // bytes from a row to the next for ldmatrix
        STORED = KIND == ROW_Q8 ? D + 16 : KIND == ROW_Q4 ? D / 2 + 16 : ROW,   // and in a slot
        SLOT = KEYS * STORED,
        WARP = 2 * SLOT + (UNPACKS ? KEYS * ROW : 0)    // bytes of a warp's slots: K, V, f16 numbers
    };
};

struct DecodeShared {
    char *slot;
    float *sums;
    unsigned *q;
};

// Carves the block's shared memory -> bytes.
template <int KIND, int D, int NT> KV_HD static size_t decode_carve(DecodeShared *m, char *mem) {
    Carved b = { mem, 0 };
    size_t sums = ATTN_WARPS * 8 * NT * (D + 2), slots = ATTN_WARPS * DecodeShape<KIND, D, NT>::WARP;
    m->sums = carve<float>(&b, max_size(sums, slots / sizeof(float)));
    m->slot = (char *)m->sums;
    m->q = carve<unsigned>(&b, NT * D * 8);
    return b.at;
}

// ---- the rows of a tile, from device memory to a slot

struct Walk {                   // a warp's way through its tiles, of KEYS positions
    int p;                      // the next tile's first position
    int ahead;                  // the row of position lane % KEYS of it
    unsigned piece;             // of row lane % KEYS of the last tile: where it begins, in pieces of 16 bytes
    int off;                    // and bytes
    int bits;                   // of its elements, 6..16; RAW_BITS: it is not packed
    int row0, row1;             // the region of PATS that the lane has looked up last: rows [row0,row1),
    int width;                  // bits of its elements,
    unsigned base;              // its first piece
};

// Finds row `row`, which stands at the lane's position of the last tile.
template <int KIND, int D, int NT>
static __device__ void walk_place(Walk &x, const HeadRef &h, int row) {
    int packed = KIND == DECODE_PATS ? h.packed : 0;
    size_t byte = (size_t)(row - packed) * DecodeShape<KIND, D, NT>::BYTES;
    x.bits = RAW_BITS;
    if (row < packed) {
        if (row < x.row0 || row >= x.row1) {
            const Region *r = region_of(h.pack->reg, h.pack->n_reg, row);
            x.row0 = r->row0;
            x.row1 = r->row0 + r->n;
            x.width = r->w;
            x.base = (unsigned)(r->base / 16);
        }
        x.bits = x.width;
        byte = (size_t)x.base * 16 + (size_t)(row - x.row0) * (D / 8 * x.width);
    }
    x.piece = (unsigned)(byte / 16);
    x.off = (int)(byte % 16);
}

// Which of the KEYS positions from p on the step's query may see, a bit each; those from p1 on it does not. row: that
// of position p + lane % KEYS.
template <int KEYS>
static __device__ unsigned decode_sees(const Attn &a, const HeadRef &h, const Work &w, int p, int p1, int row) {
    unsigned inside = ~0u >> (32 - min_int(p1 - p, KEYS));
    if (!a.window && a.rule == VIS_CAUSAL) return inside;
    int src = h.src[row];
    return inside & __ballot_sync(ALL_LANES, kv_visible(a.rule, a.window, &a.tok[w.tok0], w.tok0, &a.tok[src], src));
}

// The next tile before position p1 of which the query sees something -> which positions, a bit each; 0: there is none.
// A tile of which it sees nothing is not read. Past p1 the last row is read again, and not seen.
template <int KIND, int D, int NT>
static __device__ unsigned walk_next(Walk &x, const Attn &a, const HeadRef &h, const Work &w, int p1) {
    const int KEYS = DecodeShape<KIND, D, NT>::KEYS;
    unsigned see = 0;
    while (!see && x.p < p1) {
        int row = x.ahead;
        see = decode_sees<KEYS>(a, h, w, x.p, p1, row);
        x.p += ATTN_WARPS * KEYS;
        x.ahead = listed_row(w, a.idx, min_int(x.p + threadIdx.x % KEYS, p1 - 1));
        if (see) walk_place<KIND, D, NT>(x, h, row);
    }
    return see;
}

// Asks for the K or V rows of the last tile, if there was one, 32 / LANES rows at a time. raw, packed: the lane's piece
// of the first one of all rows; to: where its piece of the tile's first rows goes. The last piece may end up to 15
// bytes behind a row: memory of raw rows is for a multiple of 8, and packed rows have PATS_GUARD bytes behind them. One
// group of copies, empty if there was no tile.
template <int KIND, int D, int NT>
static __device__ void rows_ask(SharedAt to, const char *raw, const char *packed, const Walk &x, int tile) {
    typedef DecodeShape<KIND, D, NT> Shape;
    const int LANES = Shape::LANES, ROWS = 32 / LANES;
    int lane = threadIdx.x & 31;
    KV_UNROLL() for (int i = 0; i < Shape::KEYS; i += ROWS) {
        int row = i + lane / LANES, bits = KIND == DECODE_PATS ? __shfl_sync(ALL_LANES, x.bits, row) : (int)RAW_BITS;
        int bytes = bits == RAW_BITS ? (int)Shape::BYTES : D / 8 * bits;
        if (Shape::ASKEW) bytes += __shfl_sync(ALL_LANES, x.off, row);
        const char *from = (bits == RAW_BITS ? raw : packed) + (size_t)__shfl_sync(ALL_LANES, x.piece, row) * 16;
        KV_UNROLL() for (int at = 0; at < Shape::TIMES * LANES * 16; at += LANES * 16)
            if (tile && at + 16 * (lane % LANES) < bytes) copy16_async(to + i * (int)Shape::STORED + at, from + at);
    }
    copy_commit();
    __syncwarp();                               // lanes have had more pieces or fewer; products want all of them
}

// ---- a slot becomes f16 numbers

// to (16,ROW) = the tile in the slot as f16 numbers (Sec. 3, fetch), and of blocks their scales. off, bits: of row
// lane % 16, to which lane % 16 + 16 belongs, too.
template <int KIND, int D>
static __device__ void rows_unpack(char *to, unsigned (*scale)[2], const char *slot, int off, int bits) {
    typedef DecodeShape<KIND, D, 1> Shape;
    int row = threadIdx.x % 16, half = threadIdx.x / 16 % 2;
    const char *from = slot + row * Shape::STORED + (Shape::ASKEW ? off : 0);
    to += row * Shape::ROW;
    if (KIND == DECODE_PATS) halves_of_elements<D>(to, from, half, bits);
    if (KIND == ROW_Q8) halves_of_q8<D>(to, from, half);
    if (KIND == ROW_Q4) halves_of_q4<D>(to, from, half);
    if (Shape::SCALED) block_scales<D, Shape::BLOCK, Shape::STORED>(scale, slot, off);
    __syncwarp();
}

// ---- the tiles of a warp (lib/cuda_kernels.h: "tiles of attention")

// The warp's tiles among positions p0..p1-1. queries (w.m,D): they become fragments while the first tile is under way;
// NULL: they have.
template <int KIND, int D, int NT>
static __device__ void decode_tiles(DecodeSums<D, NT> &z, const Attn &a, const HeadRef &h, const Work &w,
                                    const DecodeShared &m, int p0, int p1, const float *queries) {
    typedef DecodeShape<KIND, D, NT> Shape;
    const int UNPACKS = Shape::UNPACKS, ROW = Shape::ROW, SLOT = Shape::SLOT, DT = Shape::TYPE;
    const int N = Shape::N, KEYS = Shape::KEYS, SCALED = Shape::SCALED;
    const unsigned ALL = ~0u >> (32 - KEYS);
    int lane = threadIdx.x & 31, t = lane % 4, warp = threadIdx.x >> 5;

    // Where the lane's first bytes of a copy come from and go to, and where it names its rows for ldmatrix: of
    // keys 8 rows, the same rows 8 dims on, the next 8 rows; of values 16 rows, then the same 8 dims on.
    const int piece = lane % Shape::LANES * 16;
    const char *rk = as_it_is(h.k + piece), *rv = as_it_is(h.v + piece), *pk = rk, *pv = rv;
    if (KIND == DECODE_PATS && h.packed) {
        pk = (const char *)h.pack->k + piece;
        pv = (const char *)h.pack->v + piece;
    }
    char *slot_k = m.slot + warp * Shape::WARP, *slot_v = slot_k + SLOT, *tile = slot_v + SLOT;
    SharedAt to = as_it_is(shared_address(slot_k + lane / Shape::LANES * Shape::STORED + piece));
    SharedAt keys = as_it_is(shared_address((UNPACKS ? tile : slot_k) + (lane / 16 * 8 + lane % 8) * ROW +
                                            lane / 8 % 2 * 16));
    SharedAt vals = as_it_is(shared_address((UNPACKS ? tile : slot_v) + lane % 16 * ROW + lane / 16 * 16));
    SharedAt q = as_it_is(shared_address(m.q + 4 * lane));

    Walk x = { p0 + warp * KEYS, 0, 0, 0, 0, 0, 0, 0, 0 };
    if (x.p < p1) x.ahead = listed_row(w, a.idx, min_int(x.p + lane % KEYS, p1 - 1));
    unsigned see = walk_next<KIND, D, NT>(x, a, h, w, p1), next;
    rows_ask<KIND, D, NT>(to, rk, pk, x, see != 0);
    rows_ask<KIND, D, NT>(to + SLOT, rv, pv, x, see != 0);
    if (queries) decode_queries<DT, D, NT, ATTN_WARPS * 32>(m.q, queries, w.m);
    __syncthreads();                            // the fragments are there
    for (; see; see = next) {
        int off = x.off, bits = x.bits;
        float s[NT][4 * N], shrink[NT];
        unsigned prob[N][NT][4], f[N][NT][4], scale[D / 32][2];
        next = walk_next<KIND, D, NT>(x, a, h, w, p1);

        // Keys. The slot takes the next tile's as soon as these are unpacked or multiplied.
        copy_wait<1>();
        __syncwarp();
        if (UNPACKS) rows_unpack<KIND, D>(tile, scale, slot_k, off, bits);
        if (UNPACKS) rows_ask<KIND, D, NT>(to, rk, pk, x, next != 0);
        decode_scores<DT, D, NT, N, SCALED>(s, keys, q, scale);
        if (!UNPACKS) __syncwarp();
        if (!UNPACKS) rows_ask<KIND, D, NT>(to, rk, pk, x, next != 0);
        if (see != ALL) decode_hide<NT, N>(s, see >> (2 * t));
        for (int i = 0; i < NT; i++) shrink[i] = decode_softmax<N>(s[i], a.power, &z.top[i], &z.sum[i]);
        decode_factors<DT, NT, N>(prob, s);

        // Values.
        copy_wait<1>();
        __syncwarp();
        if (UNPACKS) rows_unpack<KIND, D>(tile, scale, slot_v, off, bits);
        if (SCALED) scales_fold<D, NT>(z, shrink, scale);
        if (UNPACKS) rows_ask<KIND, D, NT>(to + SLOT, rv, pv, x, next != 0);
        KV_UNROLL() for (int j = 0; j < D / 16; j++) {
            unsigned b[N][4];
            for (int n = 0; n < N; n++) ldmatrix_x4_trans(b[n], vals + 16 * n * ROW + 32 * j);
            if (SCALED && j % 2 == 0) scaled_factors<NT>(f[0], prob[0], scale[j / 2]);
            decode_mix<DT, D, NT, N>(z, j, shrink, SCALED ? f : prob, b);
        }
        if (!UNPACKS) __syncwarp();
        if (!UNPACKS) rows_ask<KIND, D, NT>(to + SLOT, rv, pv, x, next != 0);
    }
}

// ---- the kernel

// The warps' sums of an item become one: sums (ATTN_WARPS,NR,D+2) -> part (m,D+2), for its m query rows. A warp every
// fourth row, a lane two neighbouring numbers of 64; the first two are maximum and sum.
static __device__ void decode_join(float *part, const float *sums, int m, int NR, int D) {
    int stride = NR * (D + 2);
    for (int r = threadIdx.x >> 5; r < m; r += ATTN_WARPS) {
        const float *from = sums + r * (D + 2);
        float top = -INFINITY, factor[ATTN_WARPS];
        for (int w = 0; w < ATTN_WARPS; w++) top = fmaxf(top, from[w * stride]);
        for (int w = 0; w < ATTN_WARPS; w++)
            factor[w] = from[w * stride] == -INFINITY ? 0 : expf(from[w * stride] - top);
        for (int e = threadIdx.x % 32 * 2; e < D + 2; e += 64) {
            float2 x = { 0, 0 };
            for (int w = 0; w < ATTN_WARPS; w++) {
                float2 v = *(const float2 *)(from + w * stride + e);
                x.x += factor[w] * v.x;
                x.y += factor[w] * v.y;
            }
            if (!e) x.x = top;
            *(float2 *)(part + r * (D + 2) + e) = x;
        }
    }
}

// Blocks that fit on a multiprocessor, by their registers and shared memory. Unpacking takes registers, too.
constexpr int decode_blocks(int unpacks, int D, int NT) {
    if (D > 64) return NT == 2 ? 2 : unpacks ? 3 : 4;
    return NT == 2 ? 3 : 4;
}

// KIND: ROW_F16, ROW_BF16, ROW_Q8, ROW_Q4 or DECODE_PATS; NT: groups of 8 query rows; BQ: query rows of a part.
template <int KIND, int D, int NT>
static __global__ void __launch_bounds__(ATTN_WARPS * 32, decode_blocks(DecodeShape<KIND, D, NT>::UNPACKS, D, NT))
decode_kernel(KV_PARAMETER(Attn) a, int BQ) {
    KV_DYN_SHARED(char, mem);
    dependents_launch();
    dependency_wait();
    DecodeShared m;
    decode_carve<KIND, D, NT>(&m, mem);
    m.slot = mem;                               // simpler to address than what carve() gives
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
    Item it = a.item[blockIdx.x];
    Work w = a.work[it.work];
    const HeadRef &h = a.heads.at[w.g];
    DecodeSums<D, NT> z;
    const float *q = a.q + query_row(a, w, w.m0) * D;          // of one token, so that its rows are neighbours
    // Rows of q4 are H times what is stored, and a product with one is of the query times H with what is stored.
    if (KIND == ROW_Q4) {
        q4_turn<ATTN_WARPS>(m.sums, D, q, D, w.m, D, 1);
        __syncthreads();
        decode_queries<DT_F16, D, NT, ATTN_WARPS * 32>(m.q, m.sums, w.m);
        __syncthreads();
        q = NULL;
    }
    // load_stream reads up to a word past a row's elements and shifts it out: where no row lies there are zeros.
    const int WARP = DecodeShape<KIND, D, NT>::WARP;
    for (int i = lane; KIND == DECODE_PATS && i < WARP / 16; i += 32)
        ((uint4 *)(mem + warp * WARP))[i] = { 0, 0, 0, 0 };
    __syncwarp();
    for (int i = 0; i < NT; i++) {
        for (int j = 0; j < D / 8; j++) z.acc[i][j][0] = z.acc[i][j][1] = 0;
        z.top[i] = SCORE_LOW;
        z.sum[i] = 0;
    }
    z.unit = DecodeShape<KIND, D, NT>::SCALED ? 1.f / (1 << 15) : 1;    // 1 / unit has to be an f16 number

    decode_tiles<KIND, D, NT>(z, a, h, w, m, it.p0, it.p1, q);

    // The item's sums, over the four warps.
    const float one = 1.f / (1 << P_SHIFT);
    __syncthreads();                            // all warps' slots are done with
    for (int i = 0; i < NT; i++) {
        float *to = m.sums + (warp * 8 * NT + 8 * i + g) * (D + 2);
        float x = lanes_sum<4>(z.sum[i]);
        KV_UNROLL() for (int j = 0; j < D / 8; j++)
            *(float2 *)(to + 2 + 8 * j + 2 * t) = { z.acc[i][j][0] * (one * z.unit), z.acc[i][j][1] * (one * z.unit) };
        if (t) continue;
        to[0] = x > 0 ? z.top[i] * (1 / LOG2_E) : -INFINITY;
        to[1] = x * one;
    }
    __syncthreads();
    float *part = a.part + (size_t)blockIdx.x * BQ * (D + 2);
    decode_join(part, m.sums, w.m, 8 * NT, D);
    __syncthreads();
    if (KIND == ROW_Q4) q4_turn<ATTN_WARPS>(part + 2, D + 2, part + 2, D + 2, w.m, D, 0);
    join_arrived(a, BQ);
}

// ---- window_kernel: softmax rows and sums over queries on tensor cores, f16 or bf16 keys, head_dim 64 and 128
//
// For the queries of a window, or of a whole pass: max and sum of every softmax row (SUMS 0), and with these sums of
// columns (SUMS 1): out[h][r] = factor * sum over the n_q queries of the softmax probability of row r of head h. No row
// of probabilities is ever stored: memory is O(H N). attend_kernel multiplies a key by one query after the other; here
// a tensor core multiplies it by 16 queries, and a key in shared memory serves all query heads of its KV head.
//
//   Block   a stretch of `rows` rows of KV head blockIdx.y, in tiles of WINDOW_KEYS; 16 queries of as many of its query
//           heads as there are warps. More heads and, with SUMS 0, more queries are further blocks (blockIdx.z)
//   Warp    16 queries of one query head, which stay in its registers, and all keys of the stretch, 32 at a time
//   Lane    (g,t), as in "what only PTX can say" of lib/cuda.h. Copying (cp.async): 16 bytes of some rows. Multiplying:
//           scores (16, 8 keys) = q (16, D) K^T (D, 8 keys), four of them:
//
//                          keys 0..7               keys 8..15         keys 24..31
//             query g      s[0][0]   s[0][1]       s[0][2,3]    ..    s[0][6,7]        of keys 2t, 2t+1
//             query g+8    s[1][0]   s[1][1]       s[1][2,3]    ..    s[1][6,7]
//
//           For the sums a lane adds its two queries; then it gives half of its keys to the lane 16, 8 and 4 away and
//           takes that one's share of the others, and has one key in the end (window_sum)
//   Shared  two tiles of keys as they are stored: while one is multiplied, cp.async fills the other
//   Bound   memory: 32 keys of head_dim 128 are 8 KB, for which a warp issues 64 products and 16 ldmatrix, and about
//           100 other instructions
//   Gain    305 instructions for 16 x 32 cells of f16 keys, 337 of bf16, are .6 and .66 a cell; attend_kernel takes 16
//
// What is rounded: a query is PARTS 16-bit numbers, each what the rounding of those before has left over. So scores
// differ from exact ones by 2^-20 |q||k| with f16 keys, and with bf16 keys as sums of f32 do.

struct ColumnPlan {
    const float *stat;          // (n_q,H,2) or NULL
    int n_q, N;
    float factor;
};

enum { WINDOW_KEYS = 64 };      // keys of a tile
template <int DT, int D> struct WindowShape {
    enum {
        PARTS = DT == DT_F16 ? 2 : 3,           // of a query
        WARPS = DT == DT_F16 ? 8 : 6,           // of a block, at most: registers allow two such blocks
        LANES = D / 8,                          // lanes that copy a row
        ROW = tile_row(D),                      // bytes from a row to the next, for ldmatrix
        SLOT = WINDOW_KEYS * ROW
    };
};

// How the queries of tokens t0..t1 see rows p..p+n-1: 0 not at all; 1 some query some row; 2 each query every row.
// Under plain causality tokens and positions ascend, so the first and the last say it all.
static __device__ int window_sees(const Attn &a, const HeadRef &h, int p, int n, int t0, int t1) {
    if (a.rule != VIS_CAUSAL) return 1;
    int first = h.src[p], last = h.src[p + n - 1], some = first <= t1, all = last <= t0;
    if (a.window) {
        some = some && a.tok[last].pos > a.tok[t0].pos - a.window;
        all = all && a.tok[first].pos > a.tok[t1].pos - a.window;
    }
    return some ? 1 + all : 0;
}

// Asks for the tile of rows from p on; behind row p1 - 1 it comes again. to, keys: the lane's 16 bytes of row
// threadIdx.x / LANES of the slot and of row 0. One group of copies.
template <int DT, int D> static __device__ void window_ask(SharedAt to, const char *keys, int p, int p1) {
    typedef WindowShape<DT, D> Shape;
    int step = blockDim.x / Shape::LANES;
    KV_UNROLL(4) for (int r = threadIdx.x / Shape::LANES; r < WINDOW_KEYS; r += step, to += step * (int)Shape::ROW)
        copy16_async(to, keys + (size_t)min_int(p + r, p1 - 1) * (2 * D));
    copy_commit();
}

// Scores of 32 rows from p on become -infinity where the lane's queries, of tokens t0 + g and t0 + g + 8 up to t1, do
// not see the row, or it is not before p1.
static __device__ void window_hide(float (*s)[8], const Attn &a, const HeadRef &h, int p, int p1, int t0, int t1) {
    int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    unsigned see[2] = { 0, 0 };
    KV_UNROLL(1) for (int i = 0; i < 32; i += i % 8 == 1 ? 7 : 1) {
        int row = p + i + 2 * t, src = h.src[min_int(row, p1 - 1)];
        for (int half = 0; half < 2; half++) {
            int query = min_int(t0 + g + 8 * half, t1);
            int sees = row < p1 && kv_visible(a.rule, a.window, &a.tok[query], query, &a.tok[src], src);
            see[half] |= (unsigned)sees << i;
        }
    }
    for (int half = 0; half < 2; half++) decode_hide<1, 2>(s + half, see[half]);
}

// The end of a block of statistics, whose part is stored: the last block of the same queries joins what all n_part
// stretches have found, in their order. part (n_part,16 warps,2): maxima, as powers of 2, and sums. A thread a query
// row. Not inlined, as join_arrived is not.
static KV_CALL void window_join(const Attn &a, const float *part, int n_part, int n_q) {
    __shared__ int last;
    int warps = blockDim.x >> 5, j = threadIdx.x, rounds = (a.R + warps - 1) / warps;
    int r = blockIdx.z % rounds * warps + j / 16, query = blockIdx.z / rounds * 16 + j % 16;
    float top = SCORE_LOW, sum = 0;
    if (!arrives_last(&a.ticket[blockIdx.z * a.G + blockIdx.y], n_part, &last)) return;
    if (j >= 16 * warps || r >= a.R || query >= n_q) return;
    KV_UNROLL(16) for (int i = 0; i < n_part; i++) {
        const float *from = part + ((size_t)i * 16 * warps + j) * 2;
        float t = __ldcg(from), z = __ldcg(from + 1), high = fmaxf(top, t);
        sum = sum * exp2_flush(top - high) + z * exp2_flush(t - high);
        top = high;
    }
    float *to = a.stat + ((size_t)query * a.H + blockIdx.y * a.R + r) * 2;
    to[0] = sum > 0 ? top * (1 / LOG2_E) : -INFINITY;
    to[1] = sum;
}

// i0: the first query. SUMS 0: Attn.stat, with Attn.part (z,G,stretches,16 warps,2) and a ticket for each head and z.
// SUMS 1: adds the sums of 16 queries to out (H,N).
template <int DT, int D, int SUMS>
static __global__ void __launch_bounds__(WindowShape<DT, D>::WARPS * 32, 2)
window_kernel(KV_PARAMETER(Attn) a, ColumnPlan c, int rows, int i0, float *out) {
    KV_DYN_SHARED(char, mem);
    typedef WindowShape<DT, D> Shape;
    const int LANES = Shape::LANES, ROW = Shape::ROW, SLOT = Shape::SLOT;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4, warps = blockDim.x >> 5;
    int rounds = (a.R + warps - 1) / warps;     // z counts the heads first
    int r = blockIdx.z % rounds * warps + warp, head = blockIdx.y * a.R + min_int(r, a.R - 1);
    i0 += blockIdx.z / rounds * 16;
    const HeadRef &h = a.heads.at[blockIdx.y];
    int p0 = blockIdx.x * rows, p1 = min_int(p0 + rows, h.len), n = min_int(c.n_q - i0, 16);
    if (p0 >= p1) return;                       // the same for the whole block
    const char *from = h.k + threadIdx.x % LANES * 16;
    SharedAt to = shared_address(mem + threadIdx.x / LANES * ROW + threadIdx.x % LANES * 16);
    SharedAt keys = as_it_is(shared_address(mem + (lane / 16 * 8 + lane % 8) * ROW + lane / 8 % 2 * 16));
    window_ask<DT, D>(to, from, p0, p1);

    unsigned f[D / 16][Shape::PARTS][4];
    float top[2], sum[2], low[2], by[2];
    size_t query = (size_t)i0 * a.H + head;
    for (int i = 0; i < 2; i++) {
        const float *stat = c.stat + (query + (size_t)min_int(g + 8 * i, n - 1) * a.H) * 2;
        top[i] = SUMS ? stat[0] : SCORE_LOW;
        sum[i] = SUMS && g + 8 * i < n ? stat[1] : 0;
    }
    window_queries<DT, D, Shape::PARTS>(f, a.q + query * D, (size_t)a.H * D, n);
    for (int i = 0; i < 2; i++) {
        low[i] = sum[i] > 0 ? -top[i] * LOG2_E : 0;
        by[i] = sum[i] > 0 ? c.factor / sum[i] : 0;
    }

    int t0 = a.tok0 + i0, t1 = t0 + n - 1, seen = window_sees(a, h, p0, p1 - p0, t0, t1);
    for (int p = p0, slot = 0; p < p1 && seen; p += WINDOW_KEYS, slot = SLOT - slot) {
        int tile = min_int(p1 - p, WINDOW_KEYS);
        copy_wait<0>();
        __syncthreads();                        // the tile is there, the one before is done with
        if (p + WINDOW_KEYS < p1) window_ask<DT, D>(to + (SLOT - slot), from, p + WINDOW_KEYS, p1);
        int all = tile == WINDOW_KEYS && (seen == 2 || window_sees(a, h, p, tile, t0, t1) == 2);
        KV_UNROLL(1) for (int i = 0; i < WINDOW_KEYS && r < a.R; i += 32) {
            int row = p + i + g / 2 * 8 + 2 * t + g % 2;        // of window_sum
            float *to_row = out + (size_t)head * c.N + row, s[2][8];
            float before = SUMS && i0 && row < p1 ? *to_row : 0;
            window_products<DT, D, Shape::PARTS>(s, f, keys + slot + i * ROW);
            if (!all) window_hide(s, a, h, p + i, p1, t0, t1);
            for (int half = 0; half < 2 && !SUMS; half++) decode_softmax<2>(s[half], a.power, &top[half], &sum[half]);
            float more = SUMS ? window_sum(s, a.power, low, by) : 0;
            if (SUMS && row < p1) *to_row = before + more;
        }
    }
    copy_wait<0>();
    if (SUMS) return;

    float *parts = a.part + (size_t)(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x * warps * 32;
    for (int half = 0; half < 2; half++) {
        float *part = parts + ((size_t)blockIdx.x * warps + warp) * 32 + (g + 8 * half) * 2;
        float all = lanes_sum<4>(sum[half]) * (1.f / (1 << P_SHIFT));
        if (t) continue;
        part[0] = top[half];
        part[1] = all;
    }
    window_join(a, parts, (h.len + rows - 1) / rows, c.n_q);
}

// ---- which kernel reads which rows, and why
// The rows and the pass decide, never a method nor -b (D2): so methods with a budget of everything and full
// attention are the same arithmetic.
//
//                              decode            prefill                     sums of columns (by the keys alone)
//     f16, bf16                decode_kernel     prefill_kernel              window_kernel
//     q8_0, q4, PATS's         decode_kernel     prefill_kernel, as f16      attend_kernel
//     PATS's under rows64,
//     K and V in two formats   attend_kernel     prefill_kernel, as f16      as their keys
//     f32                      attend_kernel     attend_kernel               attend_kernel
//
// decode_kernel and window_kernel are for head_dims of 64 and 128, which the families of models that are loaded have,
// prefill_kernel for multiples of 8 and passes of TC_MIN tokens. Whatever is left, and a prefill with --exact, goes
// through attend_kernel. What a window's sums need of its softmax rows comes from the kernel that sums. Sums over lists
// of rows, in decode, and sampled queries go through attend_kernel too, which stores their scores.
//
// What the papers ask of them. Rows are read in a prefill by prefill_kernel, in decode by decode_kernel, or by
// attend_kernel where the table above says so:
//     LoopServe       prefill: the lines that select_lines_kernel has chosen for every query head, as works of one head
//                     (Attn.lines; prefill_kernel<.., LINES 1>); the sampled rows it chooses by: attend_kernel.
//                     Decode: a list for each KV head, which ring_lists_kernel has left in ROOM_VIEWS; the sums it
//                     chooses by: window_kernel
//     PATS            prefill: its packed rows as f16 (rows_as_f16). Decode: packed rows (rows_unpack)
//     LycheeCluster   prefill: every row. Decode: a list for each KV head, which cluster_select_kernel has left in
//                     ROOM_VIEWS
//     SONIC           prefill: another rule of visibility (Attn.rule); other messages' tiles are left out (tile_seen).
//                     Decode: every row that it has kept
//     DiliLazyKV      prefill: every row; the sums it chooses by: window_kernel. Decode: a list for every query head,
//                     and a work for those that read the same (plan_decode)

static int tensor_min = TC_MIN;

// attend_kernel for so many query rows. Up to 8 are two blocks, or most of the warps of one would have none.
static Reader general_reader(int rows) { return { BY_ATTEND, 0, rows <= 8 ? 4 : 32, ATTEND_BLOCKS }; }

// Which kernel computes n tokens of this pass, a decode step or a prefill, whose query heads read the rows that their
// KV head reads or, with lines, rows of their own.
static Reader reader_of(const Session *s, int n, int decode, int lines) {
    int D = s->c->D, rows = lines ? n : n * (s->c->H / s->c->G), kind = row_kind(s->fk);
    int f32 = kind == ROW_F32 || row_kind(s->fv) == ROW_F32;
    if (decode) {
        if (s->fk != s->fv || f32 || (D != 64 && D != 128)) return general_reader(rows);
        if (s->packing && !s->packing->dense) return general_reader(rows);
        int unpacks = s->packing || kind == ROW_Q8 || kind == ROW_Q4;
        return { BY_DECODE, s->packing ? (int)DECODE_PATS : kind, rows <= 4 ? 4 : rows <= 8 ? 8 : 16,
                 decode_blocks(unpacks, D, rows <= 8 ? 1 : 2) };
    }
    if (s->n_tok - s->base < tensor_min || D % 8 || f32 || s->dev->base->exact)
        return general_reader(rows);
    return { BY_PREFILL, kind, lines || D > 128 ? 64 : 128, 1 };        // as in TensorShape
}

// Whether window_kernel reads the keys of the argument's heads.
static int window_reads(const Attn &a) {
    int packed = 0;
    for (int g = 0; g < a.G; g++) packed |= a.heads.at[g].packed;
    return (a.kind_k == ROW_F16 || a.kind_k == ROW_BF16) && (a.D == 64 || a.D == 128) && !packed;
}

// ---- plans: which rows, which queries, which kernel
// A plan is made on the host and uploaded at once. Every call of attention has one, for a layer or some of its heads.

struct Plan {
    Reader by;
    Work *work;                 // scratch memory of the host
    int n_work = 0;
    int *idx = NULL;            // rows of the works' lists, scratch memory too
    int n_idx = 0;
    const int *lists = NULL;    // NULL, or device memory the works' lists lie in, instead of idx
};

// How many rows of a head are of tokens up to tok; src is ascending.
static int rows_until(const KVHead *h, int tok) {
    int lo = 0, hi = h->len;
    while (lo < hi) {
        int m = (lo + hi) / 2;
        if (h->src[m] <= tok) lo = m + 1;
        else hi = m;
    }
    return lo;
}

// The works of n tokens from tok0 on: block by block, so that prefill_kernel, which begins with the last one, begins
// with the longest lists. All query heads of a KV head share works or, with lines (H), each has its own; then only
// heads whose `dense` is this have any. A work lists the rows up to its last query's. When the rule is not causal it
// lists all rows, and the mask hides those that are not seen.
static Plan plan_pass(Session *s, int l, Reader by, const Lines *lines, int dense, int tok0, int n) {
    int H = s->c->H, R = H / s->c->G, per = lines ? 1 : R, all = blocks((size_t)n * per, by.BQ);
    Plan p = { by, (Work *)scratch(s, (size_t)(H / per) * all * sizeof(Work)) };
    for (int b = 0; b < all; b++)
        for (int head = 0; head < H; head += per) {
            if (lines && lines[head].dense != dense) continue;
            const KVHead *h = kv_head(s, l, head / R);
            int m0 = b * by.BQ, m = min_int(n * per - m0, by.BQ);
            int sees = s->rule == VIS_CAUSAL ? rows_until(h, tok0 + (m0 + m - 1) / per) : h->len;
            p.work[p.n_work++] = { head / R, head, per, m0, m, sees, tok0 };
        }
    return p;
}

// The works of the scores of n queries, for the query heads of KV heads g0 .. g0+ng-1: every row that is held.
static Plan plan_scores(Session *s, int l, int g0, int ng, int tok0, int n) {
    int R = s->c->H / s->c->G;
    Reader by = general_reader(n * R);
    int all = blocks((size_t)n * R, by.BQ);
    Plan p = { by, (Work *)scratch(s, (size_t)ng * all * sizeof(Work)) };
    for (int m0 = 0; m0 < n * R; m0 += by.BQ)
        for (int g = g0; g < g0 + ng; g++)
            p.work[p.n_work++] = { g, g * R, R, m0, min_int(n * R - m0, by.BQ), kv_head(s, l, g)->len, tok0 };
    return p;
}

// The works of a decode step: query heads of a KV head whose views are equal share one, up to BQ of them. With KV_MASS
// each has its own, because sums of columns are a query head's. Where the device has chosen the layer's lists, they
// are their KV head's, and a work has all rows until layer_works says which.
static Plan plan_decode(Session *s, int l) {
    const Chosen *c = &s->dev->chosen;
    int H = s->c->H, R = H / s->c->G, total = 0, kept = c->kept[l] != KEPT_NONE;
    Plan p = { reader_of(s, 1, 1, 0), (Work *)scratch(s, H * sizeof(Work)) };
    int most = s->wants & KV_MASS ? 1 : p.by.BQ;
    if (kept) p.lists = lists_of(s, l);
    for (int h = 0; h < H && !kept; h++) total += kv_view(s, l, h)->n;
    p.idx = (int *)scratch(s, (size_t)(total + 1) * sizeof(int));
    for (int h = 0, m; h < H; h += m) {
        View v = {};
        if (!kept) v = *kv_view(s, l, h);
        m = 1;
        while ((h + m) % R && m < most && (kept || same_as_before(s, l, h + m))) m++;
        Work *w = &p.work[p.n_work++];
        *w = { h / R, h - h % R, R, h % R, m, v.n + kv_head(s, l, h / R)->len - v.tail, s->base };
        w->idx = kept ? h / R * c->stride + LIST_HEAD : p.n_idx;
        w->n_idx = v.n;
        w->tail = v.tail;
        if (v.n) memcpy(p.idx + p.n_idx, v.idx, (size_t)v.n * sizeof(int));
        p.n_idx += v.n;
    }
    return p;
}

// ---- works and items, finished on the device

struct LayerWorks {             // the works of a layer, and where their items go
    Work *work;                 // (n_work)
    Item *item;                 // (grid)
    const int *idx;             // rows of the works' lists
    const Step *step;           // what a decode step in one go is told; NULL: the host has told the works
    int n_work, grid;
    int pieces;                 // see chunk_rows
    int chosen;                 // 1: the device has chosen the lists, and idx are those of the layer, (G,stride)
    int head0;                  // the layer's first head among those of the step
    int unused;                 // 0; a kernel's argument has no gaps
};

// Cuts works, whose n are known, into items of chunk_rows positions; what is left of the `grid` items is
// empty. One warp, and lane i % 32 has work i: a prefix sum over the lanes says where the items of each work
// begin.
static __device__ void cut_items(const LayerWorks &a) {
    int lane = threadIdx.x, before = 0;
    unsigned long long total = 0;
    for (int i = lane; i < a.n_work; i += 32) total += (unsigned)a.work[i].n;
    total = lanes_sum<32>(total);
    int chunk = (int)chunk_rows(total, a.pieces);

    for (int i0 = 0; i0 < a.n_work; i0 += 32) {
        int i = i0 + lane, rows = i < a.n_work ? a.work[i].n : 0, n = (rows + chunk - 1) / chunk;
        int end = scan_warp(n);                 // items of this lane's work and of the lanes before
        int first = before + end - n;
        if (i < a.n_work) {
            a.work[i].first = first;
            a.work[i].items = n;
        }
        for (int c = 0; c < n; c++) a.item[first + c] = { i, c * chunk, min_int(rows, c * chunk + chunk) };
        before += __shfl_sync(ALL_LANES, end, 31);
    }
    for (int i = before + lane; i < a.grid; i += 32) a.item[i] = { 0, 0, 0 };
}

// What only the device knows of works: the rows of its own lists, and the lengths of heads in a step in one go. Then
// their items. One warp, a lane every 32nd work.
static __device__ void layer_works(const LayerWorks &a) {
    for (int i = threadIdx.x; i < a.n_work; i += 32) {
        Work *w = &a.work[i];
        int held = w->n;                        // as plan_decode says it of a work with a list
        if (a.step) held = a.step->len[a.head0 + w->g] + 1;
        if (a.step) w->tok0 = a.step->base;
        if (a.chosen) {
            const int *list = a.idx + w->idx - LIST_HEAD;
            w->n_idx = list[LIST_ROWS];
            w->tail = list[LIST_TAIL];
        }
        if (a.step || a.chosen) w->n = w->n_idx + held - w->tail;
    }
    cut_items(a);
}

static __global__ void items_kernel(LayerWorks a) { layer_works(a); }

// ---- launching attention

// The kernels' argument for layer l, without works. out (n,H,D) or NULL, stat (n,H,2): see Attn.
static Attn attn_args(Session *s, int l, const float *q, int tok0, float *out, float *stat) {
    Attn a;
    memset(&a, 0, sizeof a);
    (LayerRows &)a = layer_rows(s, l);
    a.q = q;
    a.tok = (const Token *)s->dev->room[ROOM_TOK].p;
    a.tok0 = tok0;
    a.rule = s->rule;
    a.window = layer_window(s, l);
    a.scale = 1 / sqrtf((float)a.D);
    a.power = a.scale * LOG2_E;
    a.out = out;
    a.stat = stat;
    return a;
}

// Launches n items, or n works of prefill_kernel. What they are together lies in a.out and a.stat.
static void attn_launch(const Attn &a, const Reader &by, int n) {
    if (n && by.kernel == BY_ATTEND)
        as_constant<1, 8>(by.BQ / ATTN_WARPS, [&](auto QW) {
            AttendShared m;
            size_t smem = attend_carve<QW>(&m, NULL, a.D);
            KV_LAUNCH_WIDE_EARLY((attend_kernel<QW>), n, ATTN_WARPS * 32, smem, a);
        });
    if (n && by.kernel == BY_DECODE)
        as_constant<ROW_F16, ROW_BF16, ROW_Q8, ROW_Q4, DECODE_PATS>(by.kind, [&](auto KIND) {
            as_constant<64, 128>(a.D, [&](auto D) {
                as_constant<1, 2>(blocks(by.BQ, 8), [&](auto NT) {
                    DecodeShared m;
                    size_t smem = decode_carve<KIND, D, NT>(&m, NULL);
                    KV_LAUNCH_WIDE_EARLY((decode_kernel<KIND, D, NT>), n, ATTN_WARPS * 32, smem, a, by.BQ);
                });
            });
        });
    if (n && by.kernel == BY_PREFILL)
        as_constant<DT_F16, DT_BF16>(a.kind_k, [&](auto DT) {
            as_constant<64, 128, 256>(a.D <= 64 ? 64 : a.D <= 128 ? 128 : 256, [&](auto DIM) {
                as_constant<0, 1>(a.lines != NULL, [&](auto LINES) {
                    TensorShared m;
                    size_t smem = tensor_carve<DIM, LINES>(&m, NULL);
                    const int threads = TensorShape<DIM, LINES>::WARPS * 32;
                    KV_LAUNCH_WIDE((prefill_kernel<DT, DIM, LINES>), n, threads, smem, a);
                });
            });
        });
}

// How many pieces the lists of all works are cut into: with one more for each KV head there are as many blocks as the
// device can take at once. A further one would begin when another ends, and the device would wait for it.
static int most_pieces(const Session *s, const Reader &by) {
    return max_int(kv_processors * by.blocks - s->c->G, 1);
}

// The most items of n_work works whose lists fill so many pairs of tiles: see chunk_rows.
static int most_items(int pairs, int pieces, int n_work) {
    return min_int(pairs, pieces + n_work);
}

// The most items a plan can have.
static int plan_items(const Plan *p, int pieces) {
    int pairs = 0;
    for (int i = 0; i < p->n_work; i++) pairs += blocks(p->work[i].n, 2 * TILE);
    return most_items(pairs, pieces, p->n_work);
}

// Runs a plan: a.out and a.stat, on the device -> the kernels' argument, for column sums over the same rows. Works and
// lists go to the device, which cuts works into items, but for prefill_kernel: of lists that it chose itself the host
// knows only the greatest possible length.
static Attn plan_run(Session *s, Attn a, const Plan *p) {
    if (!p->n_work) return a;
    int pieces = most_pieces(s, p->by);
    int prefill = p->by.kernel == BY_PREFILL, n_items = prefill ? 0 : plan_items(p, pieces);
    size_t works = (size_t)p->n_work * sizeof(Work), lists = (size_t)p->n_idx * sizeof(int);
    char *dev = room<char>(s, ROOM_PLAN, works + lists + (size_t)n_items * sizeof(Item));
    const int *idx = p->lists ? p->lists : (int *)(dev + works);
    LayerWorks w = { (Work *)dev, (Item *)(dev + works + lists), idx, NULL, p->n_work, n_items, pieces,
                     p->lists != NULL, 0, 0 };
    upload(dev, p->work, works);
    upload(dev + works, p->idx, lists);
    a.work = w.work;
    a.item = w.item;
    a.idx = w.idx;
    if (prefill) {
        attn_launch(a, p->by, p->n_work);
        return a;
    }
    KV_LAUNCH(items_kernel, 1, 32, 0, w);
    a.part = room<float>(s, ROOM_PART, (size_t)(n_items + 1) * p->by.BQ * (a.D + 2));
    a.ticket = arrivals(s, p->n_work);
    attn_launch(a, p->by, n_items);
    return a;
}

// ---- sums over queries, and KV_MASS

// The work that query head `head` reads: its own of a list, or every row of its KV head.
static __device__ Work column_work(const Attn &a, const Work *list, int head) {
    int g = head / a.R;
    if (list) return list[head];
    return { g, head, 1, 0, 1, a.heads.at[g].len, a.tok0 };
}

// col (H,N) = the softmax probabilities of the queries whose scores attend_kernel has left in a.score, times factor,
// and with `add` what there is; stat (n_q,H,2) has the max and the sum of their rows. A thread a position of query head
// blockIdx.y. Bound by reading the scores once.
static __global__ void
columns_kernel(Attn a, const Work *list, const float *stat, float factor, int add, float *col) {
    int h = blockIdx.y, p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= a.N) return;
    int n_q = p < column_work(a, list, h).n ? a.n_q : 0;
    float sum = 0;
    for (int i = 0; i < n_q; i++) {
        const float *st = stat + ((size_t)i * a.H + h) * 2;
        float score = a.score[((size_t)h * a.n_q + i) * a.N + p];
        if (score > -INFINITY) sum += expf(score - st[0]) / st[1];
    }
    float *to = &col[(size_t)h * a.N + p];
    *to = (add ? *to : 0) + sum * factor;
}

// Launches window_kernel over all rows of a layer, which window_reads has allowed, in stretches as long as items are.
template <int DT, int D, int SUMS> static void window_launch(Session *s, Attn a, const ColumnPlan &c, float *out) {
    size_t smem = 2 * WindowShape<DT, D>::SLOT, total = 0;
    int longest = 0, rounds = blocks(a.R, WindowShape<DT, D>::WARPS), warps = max_int(blocks(a.R, rounds), 4);
    for (int g = 0; g < a.G; g++) {
        total += a.heads.at[g].len;
        longest = max_int(longest, a.heads.at[g].len);
    }
    int rows = blocks(chunk_rows(total, 4 * kv_processors), WINDOW_KEYS) * WINDOW_KEYS, queries = blocks(c.n_q, 16);
    dim3 grid(blocks(longest, rows), a.G, SUMS ? rounds : rounds * queries);
    if (!SUMS) a.part = room<float>(s, ROOM_PART, (size_t)grid.x * grid.y * grid.z * warps * 32);
    if (!SUMS) a.ticket = arrivals(s, a.G * grid.z);
    for (int i = 0; i < (SUMS ? queries : 1); i++)
        KV_LAUNCH_WIDE((window_kernel<DT, D, SUMS>), grid, warps * 32, smem, a, c, rows, 16 * i, out);
}

// The same, for the rows of the argument.
template <int SUMS> static void window_run(Session *s, const Attn &a, const ColumnPlan &c, float *out) {
    int f16 = a.kind_k == ROW_F16;
    if (a.D == 64 && f16) window_launch<DT_F16, 64, SUMS>(s, a, c, out);
    else if (a.D == 64)   window_launch<DT_BF16, 64, SUMS>(s, a, c, out);
    else if (f16)         window_launch<DT_F16, 128, SUMS>(s, a, c, out);
    else                  window_launch<DT_BF16, 128, SUMS>(s, a, c, out);
}

// Column sums (H,N) on the device, in ROOM_COL, of n_q queries from those of the argument on, whose softmax rows have
// this max and sum. n_items: of the argument's works, of which each query head has one; 0: every row is summed.
static float *column_sums(Session *s, int l, Attn a, int n_items, const float *stat, int n_q, int N, float factor) {
    size_t row = (size_t)a.H * N;
    float *col = room<float>(s, ROOM_COL, row);
    if (!n_items && window_reads(a)) {
        KV_CUDA(cudaMemsetAsync(col, 0, row * sizeof(float), kv_stream));
        window_run<1>(s, a, { stat, n_q, N, factor }, col);
        return col;
    }
    int most = (int)min_size(max_size(SCORES_BYTES / (row * sizeof(float)), 1), n_q);
    const Work *list = n_items ? a.work : NULL;
    dim3 grid(blocks(N, 256), a.H);
    a.score = room<float>(s, ROOM_PROBS, most * row);
    a.N = N;
    for (int i = 0; i < n_q; i += most, a.tok0 += most) {
        a.n_q = min_int(n_q - i, most);
        if (n_items) attn_launch(a, general_reader(1), n_items);
        else {
            Plan p = plan_scores(s, l, 0, a.G, a.tok0, a.n_q);
            plan_run(s, a, &p);
        }
        KV_LAUNCH(columns_kernel, grid, 256, 0, a, list, stat, factor, i > 0, col);
        a.q += (size_t)most * a.H * a.D;
        stat += (size_t)most * a.H * 2;
    }
    return col;
}

// KV_MASS: adds the column sums (H,N) of query head r of every group to the mass of the rows it
// reads. A thread a position of the list, blockIdx.y the KV head. One launch a query head of the
// group, so that no two threads add to one row.
static __global__ void mass_kernel(Attn a, const Work *list, const float *col, int N, int r) {
    int g = blockIdx.y, h = g * a.R + r, i = blockIdx.x * blockDim.x + threadIdx.x;
    Work w = column_work(a, list, h);
    if (i < w.n) a.heads.at[g].mass[listed_row(w, a.idx, i)] += col[(size_t)h * N + i];
}

// Adds the probabilities of n_q queries to the mass of the rows: column sums, and a launch for each query head of a
// group.
static void add_mass(Session *s, int l, const Attn &a, int n_items, const float *stat, int n_q, int N) {
    float *col = column_sums(s, l, a, n_items, stat, n_q, N, 1);
    const Work *list = n_items ? a.work : NULL;
    dim3 grid(blocks(N, 256), a.G);
    for (int r = 0; r < a.R; r++) KV_LAUNCH(mass_kernel, grid, 256, 0, a, list, col, N, r);
}

// ---- attention of a pass

// Attention of n tokens from tok0 on: out, q (n,H,D) on the device. lines (H): what query heads read, with bits on the
// host; first the dense heads, as in any other layer, then the others. NULL: all rows. -> stat (n,H,2)
static float *attend_pass(Session *s, int l, const Lines *lines, float *out, const float *q, int tok0, int n) {
    size_t mark = scratch_mark(s);
    float *stat = room<float>(s, ROOM_STAT, (size_t)n * s->c->H * 2);
    const DeviceLines *cells = lines ? lines_upload(s, lines) : NULL;
    Attn a = attn_args(s, l, q, tok0, out, stat);
    if (reader_of(s, n, 0, 0).kernel == BY_PREFILL) rows_as_f16(s, l, a);
    for (int dense = 1; dense >= !lines; dense--) {
        a.lines = dense ? NULL : cells;
        Plan p = plan_pass(s, l, reader_of(s, n, 0, !dense), lines, dense, tok0, n);
        plan_run(s, a, &p);
    }
    scratch_reset(s, mark);
    return stat;
}

// Attention of tokens t0..t0+n-1 of a prefill: out, q (n,H,D) on the device.
void attn_prefill_cuda(Session *s, int l, float *out, const float *q, int t0, int n) {
    size_t mark = scratch_mark(s);
    int tok0 = s->base + t0;
    float *stat = attend_pass(s, l, NULL, out, q, tok0, n);
    if (s->wants & KV_MASS) {
        Attn a = attn_args(s, l, q, tok0, NULL, NULL);          // of the rows as they are stored
        add_mass(s, l, a, 0, stat, n, kv_longest(s, l));
    }
    scratch_reset(s, mark);
}

// lines_attend of kvcomp.c: lines (H) with bits on the host; out, q (T,H,D) on the device.
void lines_attend_cuda(Session *s, int l, const Lines *lines, float *out, const float *q, int T) {
    attend_pass(s, l, lines, out, q, s->base, T);
}

// Attention of a decode step: out, q (H,D) on the device. In a step in one go the layer's works are as
// step_works_kernel made them, or as the selection has just made them. Rows of lists that were chosen on the device are
// counted at the end of the pass (lists_count).
void attn_decode_cuda(Session *s, int l, float *out, const float *q) {
    Device *d = s->dev;
    size_t mark = scratch_mark(s);
    float *stat = d->told ? (float *)d->room[ROOM_STAT].p : room<float>(s, ROOM_STAT, (size_t)s->c->H * 2);
    Attn a = attn_args(s, l, q, 0, out, stat);  // works say which token it is
    int n_items = d->grid;
    if (d->told) {
        const LayerWorks &w = d->works[l];
        a.work = w.work;
        a.item = w.item;
        a.idx = w.idx;
        a.part = (float *)d->room[ROOM_PART].p;
        a.ticket = (int *)d->room[ROOM_ARRIVED].p;
        attn_launch(a, d->by, d->grid);
    } else {
        Plan p = plan_decode(s, l);
        a = plan_run(s, a, &p);
        n_items = plan_items(&p, most_pieces(s, p.by));
        count_read(s, l);
    }
    // The plan has a work for each query head then. N is what there is memory for, not what is held, so that the
    // launches stay the same from step to step.
    if (s->wants & KV_MASS) add_mass(s, l, a, n_items, a.stat, 1, most_rows(s));
    scratch_reset(s, mark);
}

// ---- window scores

// (H,N) on the device: the softmax rows of w tokens from tok0 on, summed, times factor. q (w,H,D).
// The keys are gone through twice, first for max and sum, then for the columns: memory is O(H N),
// whatever w.
static float *columns_device(Session *s, int l, const float *q, int tok0, int w, float factor) {
    int H = s->c->H, N = kv_longest(s, l);
    size_t mark = scratch_mark(s);
    float *stat = room<float>(s, ROOM_STAT, (size_t)w * H * 2);
    Attn a = attn_args(s, l, q, tok0, NULL, stat);
    if (window_reads(a)) window_run<0>(s, a, { NULL, w, N, 1 }, NULL);
    else {
        Plan p = plan_pass(s, l, general_reader(w * a.R), NULL, 1, tok0, w);
        plan_run(s, a, &p);
    }
    float *score = column_sums(s, l, a, 0, stat, w, N, factor);
    scratch_reset(s, mark);
    return score;
}

// window_scores, (H,N) on the device. q (T,H,D) ends with the pass.
static float *window_device(Session *s, int l, const float *q, int T, int W) {
    int w = min_int(T, W);
    return columns_device(s, l, q + (size_t)(T - w) * s->c->H * s->c->D, s->n_tok - w, w, 1 / (float)w);
}

// window_scores, (H,N) on the host.
void window_scores_cuda(Session *s, int l, const float *q, int T, int W, float *score) {
    size_t n = (size_t)s->c->H * kv_longest(s, l);
    if (n) download(score, window_device(s, l, q, T, W), n * sizeof(float));
}

// ==================================================================================================== 4 THE DECODE LOOP
// ---- a decode step in one go
// When no hook has to see or change anything in the middle of a step, the host tells the device the
// token and the lengths (Step) and waits for the logits; everything between depends on nothing but
// device memory. As long as no memory moves and no view changes, the launches are the same from
// step to step. They are then one CUDA graph, which is launched again. Heads grow by an
// eighth, and then the graph is captured anew.
//
//     ordinary step             launch by launch; select hooks are called       after every change
//     first step in one go      launch by launch, and captured into a graph     the step after that
//     later steps in one go     the graph is launched                           until the next change
//
// The capture comes while the device works on what was launched, so that it costs no time. A graph that
// there was before is updated, which is cheaper than to make another.
//
// A layer is five launches, each of which reads what the one before has written:
//
//     qkv_kernel     norm, W_q W_k W_v, norms of heads, RoPE, append      x -> q, rows of K and V
//     attention      decode_kernel or attend_kernel (reader_of)          q, rows -> out
//     gemv_kernel    W_o, residual                                        out -> x
//     gemv_kernel    norm, W_gate W_up, SwiGLU                            x -> gate
//     gemv_kernel    W_down, residual                                     gate -> x
//
// Four more stand around the layers: step_works_kernel, embed_kernel, the logits' product and, where the host
// wants only the best of the logits, pick_kernel (THE BEST OF THE LOGITS).
//
// From sm_90 on products and attention begin while the kernel ahead ends (KV_LAUNCH_EARLY): products ask for
// their first weights, and then wait; attention waits at once, but its blocks have found their places, and
// the product behind it asks for weights while attention is at work.
//
// Select hooks may take part while they are steady: one that chooses lists on the device (end of
// section 2), or one that launches nothing, as LoopServe's between two choices. They are called where
// their launches are captured, and not when these are replayed. What memory they need, and whether they
// choose at all, shows in an ordinary step. So one ordinary step comes after every change, and the step
// after that one is captured.

// 1: this pass is a decode step that all hooks let go in one go.
static int step_free(const Session *s) {
    if (!commits_late(s)) return 0;
    for (int i = 0; i < s->n_part + s->n_observer; i++) {
        const Part *p = &s->part[i];
        if (!(p->m->steady ? p->m->steady(s, p->ms) : !p->m->select)) return 0;
    }
    return 1;
}

// 1: nothing has changed since select hooks were last called. Room for the step's new rows is made
// first, because that may be a change.
static int step_settled(Session *s) {
    int selects = 0;
    for (int l = 0; l < s->c->L; l++) kv_reserve(s, l, 1);
    EACH_PART(s, p) selects |= p->m->select != NULL;
    return !selects || s->changes == s->dev->settled;
}

// ---- what a step needs on the device

// Bytes of a Step with all its lengths.
static size_t step_bytes(const Session *s) {
    return sizeof(Step) + (size_t)s->c->L * s->c->G * sizeof(int);
}

// ROOM_WORK, and the host's copy of it before it is uploaded.
struct StepPlan {
    LayerWorks *layer;          // (L)
    Work *work;                 // (L,H) room for as many works as there can be
    int *idx;                   // rows of the lists that the host chose
};

// Carves a StepPlan out of mem, for lists of n_idx rows together -> bytes.
static size_t step_carve(StepPlan *p, const Session *s, char *mem, size_t n_idx) {
    Carved b = { mem, 0 };
    p->layer = carve<LayerWorks>(&b, s->c->L);
    p->work = carve<Work>(&b, (size_t)s->c->L * s->c->H);
    p->idx = carve<int>(&b, n_idx);
    return b.at;
}

// Puts the works of layer l into p, and their lists after the n_idx rows of those of the layers
// before. Also notes how many items there can be: those of the longest lists the heads' memory allows.
static void step_plan_layer(Session *s, int l, StepPlan *to, int *n_idx) {
    Device *d = s->dev;
    Plan p = plan_decode(s, l);
    int pairs = 0;
    for (int i = 0; i < p.n_work; i++) {
        Work *w = &p.work[i];
        const KVHead *h = kv_head(s, l, w->g);
        pairs += blocks(w->n_idx + h->packed + h->cap - w->tail, 2 * TILE);
        if (!p.lists) w->idx += *n_idx;
    }
    int pieces = most_pieces(s, p.by);
    d->grid = max_int(d->grid, most_items(pairs, pieces, p.n_work));
    d->by = p.by;
    to->layer[l].n_work = p.n_work;
    to->layer[l].pieces = pieces;
    memcpy(to->work + (size_t)l * s->c->H, p.work, (size_t)p.n_work * sizeof(Work));
    if (p.n_idx) memcpy(to->idx + *n_idx, p.idx, (size_t)p.n_idx * sizeof(int));
    *n_idx += p.n_idx;
}

// The works of every layer, and their lists, to the device, and room for their items and what these leave.
static void step_plan(Session *s) {
    Device *d = s->dev;
    int L = s->c->L, H = s->c->H, n_idx = 0;
    size_t total = 1, mark = scratch_mark(s);
    for (int i = 0; i < L * H; i++) total += s->view[i].n;
    StepPlan p, there;
    size_t bytes = step_carve(&p, s, NULL, total);
    char *host = (char *)scratch(s, bytes), *dev = room<char>(s, ROOM_WORK, bytes);
    step_carve(&p, s, host, total);
    step_carve(&there, s, dev, total);

    d->grid = 1;
    for (int l = 0; l < L; l++) step_plan_layer(s, l, &p, &n_idx);
    const Step *step = (const Step *)d->room[ROOM_STEP].p;
    Item *item = room<Item>(s, ROOM_ITEM, (size_t)L * d->grid);
    room<float>(s, ROOM_PART, (size_t)d->grid * d->by.BQ * (s->c->D + 2));
    for (int l = 0; l < L; l++) {
        int chosen = d->chosen.kept[l] != KEPT_NONE;
        p.layer[l] = { there.work + (size_t)l * H, item + (size_t)l * d->grid, chosen ? lists_of(s, l) : there.idx,
                       step, p.layer[l].n_work, d->grid, p.layer[l].pieces, chosen, l * s->c->G, 0 };
    }
    memcpy(d->works, p.layer, L * sizeof(LayerWorks));
    upload(dev, host, bytes);
    scratch_reset(s, mark);
}

// Makes everything a step needs, tells it to dev->step, and notes if the graph was made for something
// else.
static Pass step_prepare(Session *s) {
    Device *d = s->dev;
    upload_tokens(s, 0);
    Pass r = pass_room(s, 1);
    room<float>(s, ROOM_LOGITS, s->c->V);
    room<char>(s, ROOM_BEST, pick_carve(NULL, s->c->V, n_picks(s), NULL));
    room<float>(s, ROOM_STAT, (size_t)s->c->H * 2);
    arrivals(s, s->c->H + 2 * s->c->G);
    room<char>(s, ROOM_STEP, step_bytes(s));
    if (s->wants & KV_MASS) {
        room<float>(s, ROOM_COL, (size_t)s->c->H * most_rows(s));
        room<float>(s, ROOM_PROBS, (size_t)s->c->H * most_rows(s));
    }
    if (s->changes != d->seen || n_picks(s) != d->n_picks) {
        step_plan(s);
        d->replays = 0;
        d->seen = d->settled = s->changes;      // no hook had a part in these rooms
        d->n_picks = n_picks(s);
    }

    d->step->tok = s->tok[s->base];
    d->step->base = s->base;
    pass_angles(s, d->step->cs, 1);
    for (int i = 0; i < s->c->L * s->c->G; i++) d->step->len[i] = s->head[i].len;
    return r;
}

// ---- the step

// The works of all layers, at the start of a step. Where a layer's lists are chosen anew later in the step, the
// selection makes its works anew. The block of layer 0 also stores the step's token.
//   Block   one warp, for layer blockIdx.x
static __global__ void step_works_kernel(const LayerWorks *of, Token *tok) {
    LayerWorks a = of[blockIdx.x];
    if (!blockIdx.x && !threadIdx.x) tok[a.step->base] = a.step->tok;
    layer_works(a);
}

// The works of layer l, for a selection that is launched now; none outside of a step in one go.
static LayerWorks step_works(const Session *s, int l) {
    LayerWorks none = {};
    return s->dev->told ? s->dev->works[l] : none;
}

// All launches of a step: the same as in pass_cuda, but token and lengths come from Step, and the books are written
// when all is launched.
static void step_launches(Session *s, const Pass *r) {
    Device *d = s->dev;
    const Config *c = s->c;
    Step *step = (Step *)d->room[ROOM_STEP].p;
    Token *tok = (Token *)d->room[ROOM_TOK].p;
    const Tensor *embed = &s->w->embed;
    StepPlan p;
    step_carve(&p, s, d->room[ROOM_WORK].p, 0);
    d->told = step;
    KV_CUDA(cudaMemcpyAsync(step, d->step, step_bytes(s), cudaMemcpyHostToDevice, kv_stream));
    KV_LAUNCH(step_works_kernel, c->L, 32, 0, p.layer, tok);
    KV_LAUNCH(embed_kernel, blocks(c->C, 256), 256, 0, r->x, on_device(s, embed), embed->dtype,
              &step->tok.id, c->C, (size_t)c->C);

    for (int l = 0; l < c->L; l++) {
        const Layer *y = &s->w->layer[l];
        project(s, y, l, step, r->x, r->q, r->k, r->v, step->cs, 0, 1, 0, 0);
        if (layer_acts(s, l))
            EACH_HOOK(s, p, select) p->m->select(s, p->ms, l, r->q);
        attn_decode_cuda(s, l, r->out, r->q);
        mlp_rows(s, y, r->x, r->out, r, 1);
    }
    logits_cuda(s, r->x);
    lists_tell(s);                              // here, because a launch that starts early wants a kernel ahead
    d->told = NULL;
}

// From now on steps are launched one by one (single 1), or captured again.
static void graph_drop(Device *d, int single) {
    if (d->graph) KV_CUDA(cudaGraphExecDestroy(d->graph));
    d->graph = NULL;
    d->replays = 0;
    d->no_graph = single;
}

// Makes dev->graph run what g holds: by an update, if it ran the same kernels in the same order, else
// anew. -> 1, or 0 when the device refuses.
static int graph_becomes(Device *d, cudaGraph_t g) {
    cudaGraphExecUpdateResultInfo info;
    if (d->graph && cudaGraphExecUpdate(d->graph, g, &info) == cudaSuccess) return 1;
    (void)cudaGetLastError();
    graph_drop(d, 0);
    if (cudaGraphInstantiateWithFlags(&d->graph, g, 0) == cudaSuccess) return 1;
    d->graph = NULL;
    return 0;
}

// Captures the launches of a step into dev->graph. A device that refuses, the graph or a launch in it (a
// driver may know no early ones there), gets the launches one by one from then on. The capture is
// "relaxed", because a kernel's first launch may still load its code.
static void step_capture(Session *s, const Pass *r) {
    Device *d = s->dev;
    cudaGraph_t g = NULL;
    if (cudaStreamBeginCapture(kv_stream, cudaStreamCaptureModeRelaxed) == cudaSuccess) {
        kv_capture = CAPTURING;
        step_launches(s, r);
        int whole = kv_capture == CAPTURING;
        kv_capture = NO_CAPTURE;
        d->replays = cudaStreamEndCapture(kv_stream, &g) == cudaSuccess && whole && graph_becomes(d, g);
        if (g) KV_CUDA(cudaGraphDestroy(g));
    }
    if (d->replays) return;
    graph_drop(d, 1);
    (void)cudaGetLastError();
}

// A decode step in one go -> logits (V) on the host, or the best of them. The host does its books while
// the device works; every list has one row more than in the step before.
static float *step_cuda(Session *s) {
    Device *d = s->dev;
    size_t mark = scratch_mark(s);
    Pass r = step_prepare(s);
    if (d->replays) {
        KV_CUDA(cudaGraphLaunch(d->graph, kv_stream));
    } else {
        step_launches(s, &r);
        if (!d->no_graph) step_capture(s, &r);
    }
    for (int l = 0; l < s->c->L; l++) {
        kv_note(s, l, 0, 1);
        count_read(s, l);
    }
    logits_wait(s);
    lists_count(s);
    commits(s, 0);
    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// ---- opening and closing

// The upload of the session's model, or NULL.
static Shared *shared_find(const Session *s) {
    int exact = opt_int(s->opt, "exact");
    Shared *h = all_shared;
    while (h && (h->w != s->w || h->exact != exact)) h = h->next;
    return h;
}

// The same, made if there is none: the first session of a model uploads every tensor.
static Shared *shared_open(const Session *s) {
    Shared *h = shared_find(s);
    if (h) {
        h->users++;
        return h;
    }
    h = (Shared *)xcalloc(1, sizeof *h);
    h->w = s->w;
    h->exact = opt_int(s->opt, "exact");
    h->users = 1;
    h->next = all_shared;
    all_shared = h;

    Sent g = { 0, s->w->bytes };
    progress_tell("uploading", 0);
    const Tensor *top[] = { &s->w->embed, &s->w->norm, &s->w->head };
    tensors_put(&h->map, top, 3, &g);
    for (int l = 0; l < s->c->L; l++) {
        const Layer *y = &s->w->layer[l];
        const Tensor *qkv[] = { &y->wq, &y->wk, &y->wv }, *o = &y->wo, *in[] = { &y->gate, &y->up };
        const Tensor *down = &y->down;
        const Tensor *vectors[] = { &y->attn_norm, &y->mlp_norm, &y->bq, &y->bk, &y->bv, &y->bo,
                                    &y->q_norm, &y->k_norm, &y->bgate, &y->bup, &y->bdown };
        matrices_put(&h->map, qkv, 3, &g, h->exact);
        matrices_put(&h->map, &o, 1, &g, h->exact);
        matrices_put(&h->map, in, 2, &g, h->exact);
        matrices_put(&h->map, &down, 1, &g, h->exact);
        tensors_put(&h->map, vectors, 11, &g);
    }
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    progress_tell("uploading", 1);
    return h;
}

// Ends a session's use of its model's upload; the last user frees it.
static void shared_close(Shared *h) {
    if (--h->users) return;
    Shared **p = &all_shared;
    while (*p != h) p = &(*p)->next;
    *p = h->next;
    map_clear(&h->map);
    free(h);
}

// Beside the plan, a real device holds cuBLAS' workspace, the graph of a step and the gaps that
// growing heads leave in the pool.
#ifdef __CUDACC__
static const size_t DEVICE_SPARE = DEVICE_OWN;
#else
static const size_t DEVICE_SPARE = 0;
#endif

// What would help when `unused` bytes are too few for the plan.
static const char *memory_help(const MemoryPlan *p, size_t unused) {
    if (p->weights >= unused) return "the weights alone are too much for this GPU; -d cpu works";
    if (p->weights + p->pass >= unused) return "a smaller -b or -c needs less";
    return "a smaller -c, --budget with a method that drops rows, or -ctk/-ctv q8_0 needs less";
}

// Whether everything will fit, asked before anything is allocated: 0, or the exit code with the
// reason in why. Weights that another session has brought count nothing.
static int check_memory(const Session *s, char why[512]) {
    size_t unused, total;
    MemoryPlan p = memory_plan(s);
    if (shared_find(s)) p.weights = 0;
    pool_trim();
    cudaError_t e = cudaMemGetInfo(&unused, &total);
    if (e != cudaSuccess) {
        snprintf(why, 512, "the GPU does not answer (%s); -d cpu works", cudaGetErrorString(e));
        return EXIT_RUN;
    }
    size_t need = p.weights + p.kv + p.parts + p.pass + DEVICE_SPARE;
    if (need <= unused) return 0;
    snprintf(why, 512, "%.2f GB needed (weights %.2f, KV rows for -c %d %.2f, method %.2f, "
             "passes %.2f, CUDA %.2f), %.2f of %.2f GB are free: %s",
             (double)need * 1e-9, (double)p.weights * 1e-9, p.ctx, (double)p.kv * 1e-9,
             (double)p.parts * 1e-9, (double)p.pass * 1e-9, (double)DEVICE_SPARE * 1e-9,
             (double)unused * 1e-9, (double)total * 1e-9,
             memory_help(&p, unused));
    return EXIT_MEMORY;
}

// Makes the one stream. Heads grow while they decode, so the pool keeps all rows that were given
// back. Its threshold counts the bytes in use, too: a smaller one than all of them would make every
// synchronisation give back everything that is free. device_try takes it from the pool where it is
// needed elsewhere.
static void stream_open(void) {
    if (kv_stream) return;
    int device;
    uint64_t keep = UINT64_MAX;
    cudaStream_t stream;
    KV_CUDA(cudaGetDevice(&device));
    KV_CUDA(cudaDeviceGetDefaultMemPool(&kv_pool, device));
    KV_CUDA(cudaMemPoolSetAttribute(kv_pool, cudaMemPoolAttrReleaseThreshold, &keep));
    KV_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    kv_stream = stream;
}

// Does a GPU answer? If none does, why receives the runtime's reason, such as a driver that is too
// old.
static int device_answers(char why[512]) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess && n > 0) return 1;
    snprintf(why, 512, "no CUDA device can be used (%s); -d cpu works",
             e == cudaSuccess ? "none is there" : cudaGetErrorString(e));
    (void)cudaGetLastError();
    return 0;
}

int device_there(void) {
    char why[512];
    return device_answers(why);
}

// The oldest GPUs that the kernels are compiled for: Ampere. bf16 on tensor cores begins there.
enum { LEAST_CAPABILITY = 8 };

// Can the GPU run the kernels? Asked before anything is brought there; else the reason in why.
static int device_able(char why[512]) {
    int device, major = 0, minor = 0;
    KV_CUDA(cudaGetDevice(&device));
    KV_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    KV_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    KV_CUDA(cudaDeviceGetAttribute(&kv_processors, cudaDevAttrMultiProcessorCount, device));
#ifdef __CUDACC__
    kv_early = major >= 9;
    KV_CUDA(cudaDeviceGetAttribute(&kv_host_pages, cudaDevAttrPageableMemoryAccessUsesHostPageTables, device));
#endif
    snprintf(why, 512, "the GPU has compute capability %d.%d, the kernels need %d.0 or more; -d cpu works",
             major, minor, LEAST_CAPABILITY);
    return major >= LEAST_CAPABILITY;
}

// 0: a GPU answers, the kernels can do the model, and all of memory_plan fits. Else the exit code,
// with the reason in why.
int device_bars(const Session *s, char why[512]) {
    int G = s->c->G, D = s->c->D;
    snprintf(why, 512, "at most %d KV heads of an even head_dim up to %d, found %d of %d; -d cpu works",
             MAX_G, MAX_D, G, D);
    if (D > MAX_D || D % 2 || G > MAX_G) return EXIT_USAGE;
    if (!device_answers(why) || !device_able(why) || blas_open(why)) return EXIT_USAGE;
    return check_memory(s, why);
}

// Sets s->dev and brings the model to the device -> 0, or -1 with the reason in s->err. Exit 4 when
// memory is too small.
int device_open(Session *s) {
    char why[512];
    size_t heads = (size_t)s->c->L * s->c->G;
    int code = device_bars(s, why);
    if (code == EXIT_MEMORY) die(EXIT_MEMORY, "-d cuda: %s", why);
    if (code) {
        snprintf(s->err, sizeof s->err, "-d cuda: %.480s", why);
        return -1;
    }

    stream_open();
    Device *d = s->dev = (Device *)xcalloc(1, sizeof *d);
    KV_BLAS(blas_create(&d->blas));
    KV_BLAS(blas_set_stream(d->blas, kv_stream));

    d->works = (LayerWorks *)xcalloc(s->c->L, sizeof(LayerWorks));
    d->seen = d->settled = s->changes - 1;      // nothing is prepared yet
    KV_CUDA(cudaMallocHost((void **)&d->step, step_bytes(s)));
    KV_CUDA(cudaMallocHost((void **)&d->picks, sizeof *d->picks));
    free(s->logits);
    KV_CUDA(cudaMallocHost((void **)&s->logits, (size_t)s->c->V * sizeof(float)));
    memset(s->logits, 0, (size_t)s->c->V * sizeof(float));          // a cache that is only filled has no others
    d->held = (Rows *)xcalloc(heads, sizeof(Rows));
    d->chosen.kept = (char *)xcalloc(s->c->L, 1);
    KV_CUDA(cudaMallocHost((void **)&d->chosen.rows, heads * sizeof(int)));
    d->base = shared_open(s);
    return 0;
}

// The dialogue is forgotten and the parts are opened again: the tensors of Session.alt may be
// others then, and LoopServe has given its ring back, which a graph must not write to.
void device_reset(Session *s) {
    map_clear(&s->dev->alt);
    s->dev->ring = NULL;
    s->changes++;
}

// Gives everything back. The rows have been given back before.
void device_close(Session *s) {
    Device *d = s->dev;
    for (int i = 0; i < N_ROOMS; i++) device_free(d->room[i].p);
    map_clear(&d->alt);
    shared_close(d->base);
    KV_BLAS(blas_destroy(d->blas));
    if (d->graph) KV_CUDA(cudaGraphExecDestroy(d->graph));
    KV_CUDA(cudaFreeHost(d->step));
    KV_CUDA(cudaFreeHost(d->picks));
    s->picked = NULL;
    KV_CUDA(cudaFreeHost(s->logits));
    s->logits = NULL;
    KV_CUDA(cudaFreeHost(d->chosen.rows));

    free(d->held);
    free(d->chosen.kept);
    free(d->works);
    free(d);
    s->dev = NULL;
}

// ==================================================================================================== 5 STREAMINGLLM
// The device needs nothing of its own: streaming_commit of kvcomp.c says which rows stay, and
// kv_keep moves them (rows_move_cuda).

// ==================================================================================================== 6 BASELINES
// On the device run: the selection of rows at the end of a prefill (SnapKV, AdaKV, PyramidKV and,
// in another order, DiliLazyKV), and ExpectedAttention's sums over queries and rows. The selection
// is a chain of launches over device memory:
//
//   window_device (section 3) -> join_heads_kernel, pool_kernel -> top_k_kernel -> lists of rows
//
// Only those lists come to the host, which keeps the books and hands them to kv_keep. Caps, shares
// of a budget and all decisions are made on the host. H2O needs the mass that attention adds up
// (mass_kernel, section 3), q8 a Format.
//
// Bits: window scores agree with the CPU's to rounding (another order of sums, another exp), so two
// scores closer than that may change places. Everything after them is exact: maxima, a mean that
// adds heads in the CPU's order, and a top-k over integer keys. Where a comment below says "to the
// bit", dot products go by 16 lanes with fused multiply-adds, as dot_f32 of lib/kernels does, and
// the rest of a sum is added in the same order; a CPU with FMA then has the same bits.

// ---- device memory of a method: its index, its ring, its sums
// realloc: `have` bytes of old stay.
char *near_grow_cuda(char *old, size_t have, size_t want) { return grown(old, have, want); }

// n bytes, all 0.
char *near_zero_cuda(size_t n) {
    char *p = grown(NULL, 0, n);
    KV_CUDA(cudaMemsetAsync(p, 0, n, kv_stream));
    return p;
}

void near_free_cuda(char *p) { grown(p, 0, 0); }

// ---- one score a KV head, and the largest or the mean of its neighbours: join_heads and pool of kvcomp.c
// out (G,N) = the sum of the R rows of x (H,N) that belong to a KV head, divided by `over`: R for their
// mean. n (G): candidates of each KV head.
// Block: 256 candidates of KV head blockIdx.y. Thread: one candidate, whose R scores it adds in the
// order of the heads, as the CPU does. No shared memory: a score is read once. Bound by reading x
// (4 H N bytes).
static __global__ void join_heads_kernel(float *out, const float *x, const int *n, int N, int R,
                                         int over) {
    int g = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= n[g]) return;
    float sum = x[(size_t)g * R * N + j];
    for (int r = 1; r < R; r++) sum += x[((size_t)g * R + r) * N + j];
    out[(size_t)g * N + j] = sum / (float)over;
}

// Largest of x[t] over |t-j| <= width/2, t in [0,n), or with `mean` their sum in ascending order / width: neighbours
// outside [0,n) count as zeros there. Neighbours are neighbours in the list of rows (D11).
static __device__ float window_score(const float *x, int j, int n, int width, int mean) {
    int a = j > width / 2 ? j - width / 2 : 0;
    int b = width / 2 < n - 1 - j ? j + width / 2 : n - 1;
    float top = x[a], sum = 0;
    for (int t = a; t <= b; t++) {
        top = fmaxf(top, x[t]);
        sum += x[t];
    }
    return mean ? sum / (float)width : top;
}

// out (rows,N) = window_score of every candidate of x (rows,N). `per` rows belong to one KV
// head; n (rows/per): its candidates.
// Block: 256 candidates of row blockIdx.y. Thread: one candidate. No shared memory: neighbours'
// reads overlap and come from the cache. Bound by reading x once (4 bytes a candidate).
static __global__ void pool_kernel(float *out, const float *x, const int *n, int N, int per, int width,
                                   int mean) {
    int row = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    const float *from = x + (size_t)row * N;
    int m = n[row / per];
    if (j >= m) return;
    out[(size_t)row * N + j] = window_score(from, j, m, width, mean);
}

// ---- selections in one launch: section 8 and section 11
// Units, which are pages or clusters, are scored by many blocks for each list. The last of a list's
// blocks selects: from shared memory, if the scores of all units of the list fit into seek_shared
// bytes of it, otherwise from the room the blocks wrote them to. In a step in one go the last of
// all lists then makes the works of the layer.
enum { SEEK_UNITS = TOP_THREADS / 2, SEEK_SHARED = 64 << 10 };
static int seek_shared = SEEK_SHARED;

struct Seek {                   // what both kernels are told
    const float *q;             // (H,D)
    float *score;               // (G,cap)
    int *lists;                 // (G,stride): LIST_HEAD numbers, then rows
    int *arrived;               // (1+G) blocks that have come by: lists, and blocks of each list
    LayerWorks works;
    int cap, stride;            // units there are room for; ints of a list
    int G, R, D;
    int shared;                 // 1: the scores of a list fit into shared memory
};

// Fills it for layer l, lists of `most` rows, and `beside` numbers in shared memory beside the scores.
static void seek_fill(Session *s, Seek *a, int l, const float *q, int cap, int most, size_t beside) {
    a->G = s->c->G;
    a->R = s->c->H / a->G;
    a->D = s->c->D;
    a->q = q;
    a->cap = cap;
    a->score = room<float>(s, ROOM_SEEK, (size_t)a->G * cap);
    a->stride = LIST_HEAD + most;
    a->lists = chosen_room(s, l, a->stride);
    a->arrived = arrivals(s, 1 + s->c->H);
    a->works = step_works(s, l);
    a->shared = (beside + cap) * sizeof(float) <= (size_t)seek_shared;
}

// x (n) in shared memory = the scores, or `score` itself where there is no such memory (NULL).
static __device__ const float *seek_scores(float *x, const float *score, int n) {
    if (!x) return score;
    for (int i = threadIdx.x; i < n; i += TOP_THREADS) x[i] = score[i];
    __syncthreads();
    return x;
}

// The end of a list: the last of `all` lists of a layer makes its works. All threads of a block.
static __device__ void seek_end(const LayerWorks &w, int *arrived, int all, int *last) {
    if (!w.step || !arrives_last(arrived, all, last) || threadIdx.x >= 32) return;
    layer_works(w);
}

// top_k_rows of kvcomp.c: of each row i of x (S,stride) on the device the k[i] largest of its first
// n[i] scores. n, k, idx (S,per) and count (S) lie on the host. Indices and counts come back in one
// download, so rows of the room are as long as the longest list.
void top_k_rows_cuda(Session *s, const float *x, int S, size_t stride, const int *n, const int *k,
                     int *idx, int per, int *count) {
    size_t mark = scratch_mark(s);
    int most = 0;                                                // rows of the longest list
    TopRow *rows = (TopRow *)scratch(s, S * sizeof(TopRow));
    for (int i = 0; i < S; i++) {
        rows[i] = { n[i], k[i] };
        if (n[i]) most = max_int(most, min_int(k[i], n[i]));
    }

    size_t all = (size_t)S * most;
    int *dev = room<int>(s, ROOM_TOP_IDX, all + S);
    int *host = (int *)scratch(s, (all + S) * sizeof(int));
    TopRow *told = room<TopRow>(s, ROOM_LIST, S);
    upload(told, rows, S * sizeof(TopRow));
    KV_LAUNCH(top_k_kernel, S, TOP_THREADS, 0, x, stride, told, dev, most, dev + all);
    download(host, dev, (all + S) * sizeof(int));
    memcpy(count, host + all, S * sizeof(int));
    for (int i = 0; i < S; i++)
        memcpy(idx + (size_t)i * per, host + (size_t)i * most, count[i] * sizeof(int));
    scratch_reset(s, mark);
}

// ---- the chain for one layer
// pooled_scores of kvcomp.c: window scores of the last min(W,T) queries of q (T,H,D), joined and
// pooled, for the candidates n (G, on the host) of each KV head -> (G,N) or, under POOL_ONLY, (H,N)
// on the device; N = kv_longest.
float *pooled_scores_cuda(Session *s, int l, const float *q, int T, int W, const int *n, int width,
                          int mean, int order) {
    int H = s->c->H, G = s->c->G, N = kv_longest(s, l);
    float *x = window_device(s, l, q, T, W);                     // (H,N)
    float *pool = room<float>(s, ROOM_POOL, (size_t)(H + G) * N), *one = pool + (size_t)H * N;
    int *dev = room<int>(s, ROOM_TOP, G);
    dim3 grid(blocks(N, 256), G), heads(blocks(N, 256), H);
    upload(dev, n, G * sizeof(int));

    if (order == POOL_ONLY) {                                    // DiliLazyKV's, Sec. 3.3
        KV_LAUNCH(pool_kernel, heads, 256, 0, pool, x, dev, N, H / G, width, mean);
        return pool;
    }
    KV_LAUNCH(join_heads_kernel, grid, 256, 0, one, x, dev, N, H / G, H / G);
    KV_LAUNCH(pool_kernel, grid, 256, 0, pool, one, dev, N, 1, width, mean);
    return pool;
}

// join_heads_kernel alone: score (H,N) -> (G,N), both on the device; n (G) on the host: candidates of
// each KV head.
float *join_rows_cuda(Session *s, const float *score, const int *n, int N, int over) {
    int G = s->c->G, *dev = room<int>(s, ROOM_TOP, G);
    float *one = room<float>(s, ROOM_POOL, (size_t)G * N);
    dim3 grid(blocks(N, 256), G);
    upload(dev, n, G * sizeof(int));
    KV_LAUNCH(join_heads_kernel, grid, 256, 0, one, score, dev, N, s->c->H / G, over);
    return one;
}

// ---- AdaKV: what the heads of a layer compete by for its budget
// score (G,N) on the device, n (G) on the host -> the scores of all candidates, head after head (sum of n), on
// the device.
float *adakv_pooled_cuda(Session *s, const float *score, int N, const int *n) {
    float *all = room<float>(s, ROOM_TOP, (size_t)s->c->G * N), *to = all;
    for (int g = 0; g < s->c->G; to += n[g++]) device_copy(to, score + (size_t)g * N, n[g] * sizeof(float));
    return all;
}

// ---- ExpectedAttention: sums over queries, exponents of scores, lengths of values; to the CPU's bit
// The host turns the sums into mu and Sg (expected_queries), takes the softmax of the
// exponents, and selects.
enum { MOMENT_TILE = 16 };

// sum (H,D) += q and outer (H,D,D) += q q^T over those of the T queries q (T,H,D) whose token
// stands at position >= sink. Products of two floats are exact in double, and the tokens come in
// order.
// Block: 16 x 16 numbers of outer of query head blockIdx.z. Thread: one of them; those of the first
// column also have one number of sum. Shared: dimensions i0.. and j0.. of 16 tokens, rows padded to
// 17 against bank conflicts; every number brought is used 16 times. Bound by double-precision
// multiply-adds (T H D^2).
static __global__ void moments_kernel(double *sum, double *outer, const float *q, const Token *tok,
                                      int sink, int T, int H, int D) {
    __shared__ float row[MOMENT_TILE][MOMENT_TILE + 1], col[MOMENT_TILE][MOMENT_TILE + 1];
    int x = threadIdx.x, y = threadIdx.y, h = blockIdx.z;
    int i0 = blockIdx.y * MOMENT_TILE, j0 = blockIdx.x * MOMENT_TILE, i = i0 + y, j = j0 + x;
    int mine = i < D && j < D, sums = mine && !j;
    double *to = outer + ((size_t)h * D + i) * D + j;
    double a = mine ? *to : 0, b = sums ? sum[(size_t)h * D + i] : 0;

    for (int t0 = 0; t0 < T; t0 += MOMENT_TILE) {
        // Thread (x,y) brings numbers i0 + x and j0 + x of token t0 + y.
        const float *p = q + ((size_t)(t0 + y) * H + h) * D;
        // A 0 adds nothing, like a query that does not count.
        int counts = t0 + y < T && tok[t0 + y].pos >= sink;
        row[y][x] = counts && i0 + x < D ? p[i0 + x] : 0;
        col[y][x] = counts && j0 + x < D ? p[j0 + x] : 0;
        __syncthreads();
        for (int t = 0; t < MOMENT_TILE; t++) {
            a += (double)row[t][y] * col[t][x];
            b += row[t][y];
        }
        __syncthreads();
    }
    if (mine) *to = a;
    if (sums) sum[(size_t)h * D + i] = b;
}

// The queries q (n,H,D) of tokens t0 .. of this pass into the sums of their layer. Everything lies on the
// device.
void moments_add_cuda(Session *s, double *sum, double *outer, const float *q, int t0, int n, int sink) {
    int H = s->c->H, D = s->c->D;
    dim3 grid(blocks(D, MOMENT_TILE), blocks(D, MOMENT_TILE), H), block(MOMENT_TILE, MOMENT_TILE);
    const Token *tok = (const Token *)s->dev->room[ROOM_TOK].p + s->base + t0;
    KV_LAUNCH(moments_kernel, grid, block, 0, sum, outer, q, tok, sink, n, H, D);
}

// Of every row held, z (H,N) = mu.k / sqrt(D) + k^T Sg k / 2D for each query head, and squares (G,N) = |v|^2; mu (H,D),
// cov = Sg (H,D,D), f_mu = 1/sqrt(D), f_cov = 1/2D.
// Block: 8 rows of the KV head of query head blockIdx.y; of its first query head the values, too. Half
// warp: one row; a lane owns every 16th dimension of a dot product, and all 16 lanes carry the same
// running sum. Shared: the 8 keys as f32, for a key is read D times, then the values. Bound by reading cov,
// D^2 numbers a row, which 8 rows of a block share through the cache.
static __global__ void expected_kernel(LayerRows a, const float *mu, const float *cov, float f_mu,
                                       float f_cov, int N, float *z, float *squares) {
    KV_DYN_SHARED(float, rows);                                  // (8,D)
    int h = blockIdx.y, g = h / a.R, D = a.D, half = threadIdx.x >> 4, lane = threadIdx.x & 15;
    int r = blockIdx.x * (blockDim.x / 16) + half, held = r < a.heads.at[g].len;
    float *x = rows + half * D;
    for (int d = lane; d < D; d += 16) x[d] = held ? row_value(a, a.heads.at[g], 0, r, d) : 0;
    __syncwarp();
    double sum = __fmul_rn(dot_lanes(mu + (size_t)h * D, x, D), f_mu);
    for (int d = 0; d < D; d++)
        sum += (double)x[d] * __fmul_rn(dot_lanes(cov + ((size_t)h * D + d) * D, x, D), f_cov);
    if (!lane && held) z[(size_t)h * N + r] = (float)sum;
    if (h % a.R) return;                        // the same for the whole block

    __syncwarp();                               // the key has been read
    for (int d = lane; d < D; d += 16) x[d] = held ? row_value(a, a.heads.at[g], 1, r, d) : 0;
    __syncwarp();
    float square = dot_lanes(x, x, D);
    if (!lane && held) squares[(size_t)g * N + r] = square;
}

// mu (H,D), cov (H,D,D) -> z (H,N), squares (G,N), all four on the host; only the rows lie on the
// device.
void expected_scores_cuda(Session *s, int l, const float *mu, const float *cov, float *z,
                          float *squares, int N) {
    int H = s->c->H, G = s->c->G, D = s->c->D;
    size_t n_mu = (size_t)H * D, n_cov = n_mu * D, n_z = (size_t)H * N, n_sq = (size_t)G * N;
    size_t smem = 8 * D * sizeof(float);
    float *dev = room<float>(s, ROOM_POOL, n_mu + n_cov + n_z + n_sq), *dev_z = dev + n_mu + n_cov;
    float f_mu = 1 / sqrtf((float)D), f_cov = 1 / (2 * (float)D);
    upload(dev, mu, n_mu * sizeof(float));
    upload(dev + n_mu, cov, n_cov * sizeof(float));

    dim3 grid(blocks(N, 8), H);
    KV_LAUNCH(expected_kernel, grid, 128, smem, layer_rows(s, l), dev, dev + n_mu, f_mu, f_cov, N, dev_z, dev_z + n_z);
    download(z, dev_z, n_z * sizeof(float));
    download(squares, dev_z + n_z, n_sq * sizeof(float));
}

// ==================================================================================================== 7 SPARSE PREFILL BASELINES
// On the device run: attention over chosen lines (lines_attend), which A-shape, Tri-shape,
// MInference and LoopServe share; softmax rows of sampled queries (line_probs); and the sums by
// which MInference ranks its lines. The host fixes the lines of A-shape and Tri-shape, and turns
// MInference's ranking into bits.
//
// Columns and cells are those of the CPU; attention's sums are added in another order, so they
// agree to rounding.

// ---- attention over lines
// prefill_kernel (section 3) computes it where it computes dense prefills, attend_kernel the rest (reader_of). A work
// is rows of one query head then. A head of which every cell is chosen goes the way of dense attention.
//
// The columns that rows [s0,E) need (block_columns of kvcomp.c): column c is needed if it is a vertical left of
// them, or if one of the offsets [s0-c, E-1-c] is chosen, which is one look at 64 bits.
// Bit i of b.
static __device__ int bit_of(const uint64_t *b, int i) { return (int)(b[i >> 6] >> (i & 63) & 1); }

// Bits lo .. lo+63 of b (n bits); bits outside of [0,n) are 0.
static __device__ uint64_t bits_from(const uint64_t *b, int n, int lo) {
    if (lo <= -64 || lo >= n) return 0;
    if (lo < 0) return b[0] << -lo;
    int w = lo >> 6, d = lo & 63;
    return b[w] >> d | (d && (w + 1) * 64 < n ? b[w + 1] << (64 - d) : 0);
}

// Does a chosen slash meet column c in the rows [s0,E), up to 64 of them?
static __device__ int slash_meets(const DeviceLines &x, int c, int s0, int E) {
    return c < E && (bits_from(x.s, x.n, s0 - c) & ~0ull >> (64 - (E - s0))) != 0;
}

// Does one of the pass's queries first..last-1, of one 64-row block of the matrix, need column c?
static __device__ int column_needed(const DeviceLines &x, int c, int first, int last) {
    int s0 = x.p0 + first, E = x.p0 + last;
    return x.dense || (c < s0 && bit_of(x.v, c)) || slash_meets(x, c, s0, E);
}

// Does query r of the pass read column c, which is needed and not behind it?
static __device__ int cell_chosen(const DeviceLines &x, int r, int c) {
    return x.dense || bit_of(x.v, c) || bit_of(x.s, x.p0 + r - c);
}

// Does row `row` of head h lie in the sliding window of token tok?
static __device__ int in_window(const Attn &a, const HeadRef &h, int row, int tok) {
    return a.tok[h.src[row]].pos > a.tok[tok].pos - a.window;
}

// ---- attention over lines on tensor cores: what prefill_kernel<.., LINES 1> asks for
// A work is one 64-row block of the matrix and one query head. Two kinds of tiles bring its columns:
//   - slashes: KT columns side by side, from a multiple of KT on, if any slash crosses them. A row's
//     cells in it are KT neighbouring bits of the verticals and KT of the offsets, in reverse order. A tile
//     in which every cell is chosen needs no mask (the middle of A-shape's band)
//   - single columns, gathered KT at a time: the verticals outside of the tiles above

// Are all cells of the columns p .. p+KT-1 in the rows [s0,E) on chosen slashes?
template <int KT> static __device__ int slashes_fill(const DeviceLines &x, int p, int s0, int E) {
    int lo = s0 - p - (KT - 1), hi = E - 1 - p, all = lo >= 0;
    for (int o = lo; o <= hi && all; o += 64)
        all = (~bits_from(x.s, x.n, o) & ~0ull >> (63 - min_int(hi - o, 63))) == 0;
    return all;
}

// list and cols = the next tiles and columns that the work needs, of columns *from and up -> tiles in the
// list; *n_cols: columns, behind which the last one fills up their last tile. *from is then where the lists
// after these begin. Called by all threads of a block; the lists are complete when it returns. A warp looks
// at its share of TC_STEP columns at once, and keeps a bit for each: word i lies in lane i.
template <int DIM>
static __device__ int lines_list(const TensorShared &m, const Attn &a, const DeviceLines &x, const Work &w,
                                 int *from, int *n_cols) {
    const int KT = TensorShape<DIM, 1>::KT, WARPS = TensorShape<DIM, 1>::WARPS, WORDS = TC_STEP / WARPS / 32;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, s0 = w.n - w.m, E = w.n, found = 0, gathered = 0;
    unsigned before = (1u << lane) - 1;
    while (found + TC_STEP / KT <= TC_LIST && gathered + TC_STEP <= TC_COLS && *from < E) {
        int c0 = *from + warp * 32 * WORDS, tile = -1;
        unsigned need = 0, crossed = 0;
        for (int i = 0; i < WORDS; i++) {
            int c = c0 + 32 * i + lane;
            unsigned columns = __ballot_sync(ALL_LANES, c < E && bit_of(x.v, c));
            unsigned slashes = __ballot_sync(ALL_LANES, slash_meets(x, c, s0, E));
            if (lane != i) continue;
            need = columns;
            crossed = slashes;
        }

        // Tiles side by side, and single columns outside of them.
        if (KT == 64) crossed |= __shfl_xor_sync(ALL_LANES, crossed, 1);
        if (crossed) need = 0;
        int p = c0 + 32 * lane;
        if (crossed && p % KT == 0) tile = 2 * p + !(slashes_fill<KT>(x, p, s0, E) && !a.window);
        unsigned tiles = __ballot_sync(ALL_LANES, tile >= 0);
        int columns = lanes_sum<32>(__popc(need));
        if (!lane) {
            m.counts[warp] = __popc(tiles);
            m.counts[WARPS + warp] = columns;
        }
        __syncthreads();
        int at = found, to = gathered;
        for (int i = 0; i < WARPS; i++) {
            at += i < warp ? m.counts[i] : 0;
            to += i < warp ? m.counts[WARPS + i] : 0;
            found += m.counts[i];
            gathered += m.counts[WARPS + i];
        }
        if (tile >= 0) m.list[at + __popc(tiles & before)] = tile;
        for (int i = 0; i < WORDS; i++) {
            unsigned word = __shfl_sync(ALL_LANES, need, i);
            if (word >> lane & 1) m.cols[to + __popc(word & before)] = c0 + 32 * i + lane;
            to += __popc(word);
        }
        __syncthreads();
        *from += TC_STEP;
    }
    int behind = (KT - gathered % KT) % KT;
    if ((int)threadIdx.x < behind) m.cols[gathered + threadIdx.x] = m.cols[gathered - 1];
    __syncthreads();
    *n_cols = gathered;
    return found;
}

// see (64,KT/32): the warp's words of it, for a tile of lines. In a tile side by side lane i makes the words
// of row i; what else has to be asked for each cell is asked as in tile_mask.
template <int DIM>
static __device__ void lines_mask(const TensorShared &m, const Attn &a, const HeadRef &h, const DeviceLines &x,
                                  const Work &w, const TileRef &tile) {
    typedef TensorShape<DIM, 1> Shape;
    const int WORDS = Shape::WORDS, ROWS = 16 * Shape::MT;
    int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * ROWS, s0 = w.n - w.m;
    if (!tile.gathered) {
        int d = s0 + row + lane % ROWS - tile.p;        // the offset at which the row meets column p
        uint64_t causal = d < 0 ? 0 : ~0ull >> (63 - min_int(d, 63));
        uint64_t bits = __brevll(bits_from(x.s, x.n, d - 63)) | (bits_from(x.v, x.n, tile.p) & causal);
        for (int i = 0; i < WORDS && lane < ROWS; i++)
            m.see[(row + lane) * WORDS + i] = (unsigned)(bits >> 32 * i);
        __syncwarp();
        if (!a.window) return;
    }
    KV_UNROLL(1) for (int word = 0; word < WORDS; word++) {
        int i = word * 32 + lane, k = min_int(i, tile.n - 1), c = tile.gathered ? m.cols[tile.p + k] : tile.p + k;
        KV_UNROLL(1) for (int r = row; r < row + ROWS; r++) {
            int q = min_int(s0 + r, w.n - 1), sees = i < tile.n && c <= q;
            if (!tile.gathered) sees = sees && (m.see[r * WORDS + word] >> lane & 1);
            if (a.window) sees = sees && in_window(a, h, c, a.tok0 + q - x.p0);
            unsigned bits = __ballot_sync(ALL_LANES, sees);
            __syncwarp();                       // every lane has read the word
            if (!lane) m.see[r * WORDS + word] = bits;
        }
    }
}

// ---- launching attention over lines

// lines (H) on the device, with the bits of those that are not dense, verticals before offsets, in one block.
static const DeviceLines *lines_upload(Session *s, const Lines *lines) {
    int H = s->c->H;
    size_t at = (size_t)H * sizeof(DeviceLines), bytes = at;
    for (int h = 0; h < H; h++) bytes += 2 * bit_bytes(lines[h].n);
    char *host = (char *)scratch(s, bytes), *dev = room<char>(s, ROOM_LIST, bytes);
    for (int h = 0; h < H; h++) {
        const Lines *x = &lines[h];
        size_t b = bit_bytes(x->n);
        const uint64_t *v = (const uint64_t *)(dev + at), *o = (const uint64_t *)(dev + at + b);
        ((DeviceLines *)host)[h] = { v, o, x->n, x->p0, x->dense };
        if (x->dense) continue;
        memcpy(host + at, x->v, b);
        memcpy(host + at + b, x->s, b);
        at += 2 * b;
    }
    upload(dev, host, at);
    return (const DeviceLines *)dev;
}

// ---- softmax rows of sampled queries: line_probs of kvcomp.c, for several KV heads at once
enum { SOFT_THREADS = 256 };

// P (ng R,m,N): every row of scores becomes its softmax, in place.
// Block: one row; thread: every 256th number. Shared: a maximum and a sum a warp. Bound by memory:
// P is read three times and written twice, which is why long rows are done by a whole block and
// stay in the L2 cache in between.
static __global__ void softmax_rows_kernel(HeadRefs heads, int g0, int R, int m, int N, float *P) {
    __shared__ float part[2][SOFT_THREADS / 32];
    float *x = P + (size_t)blockIdx.x * N, top = -INFINITY, sum = 0;
    int n = heads.at[g0 + blockIdx.x / m / R].len;
    for (int i = threadIdx.x; i < n; i += SOFT_THREADS) top = fmaxf(top, x[i]);
    top = block_fold<1>(top, part[0]);
    for (int i = threadIdx.x; i < n; i += SOFT_THREADS) {
        float e = expf(x[i] - top);
        x[i] = e;
        sum += e;
    }
    float inv = 1 / block_fold<0>(sum, part[1]);
    for (int i = threadIdx.x; i < n; i += SOFT_THREADS) x[i] *= inv;  // Algorithm 2, line 4
}

// KV heads whose m sampled rows are made at once: all of them if that takes no more than PROBS_BYTES,
// else one.
int line_batch_cuda(const Session *s, int l, int m) {
    return (size_t)s->c->H * m * kv_longest(s, l) * sizeof(float) <= PROBS_BYTES ? s->c->G : 1;
}

// -> P (ng R,m,N) on the device: softmax rows of the pass's tokens t (m, on the host, ascending)
// for the query heads of the ng KV heads from g0 on. q (T,H,D). Rows agree with the CPU's to
// rounding.
float *line_probs_cuda(Session *s, int l, int g0, int ng, const float *q, const int *t, int m) {
    size_t mark = scratch_mark(s);
    int N = kv_longest(s, l), R = s->c->H / s->c->G, *tokens = room<int>(s, ROOM_TOP, m);
    float *P = room<float>(s, ROOM_PROBS, (size_t)ng * R * m * N);
    Attn a = attn_args(s, l, q, s->base, NULL, NULL);
    upload(tokens, t, m * sizeof(int));

    a.score = P;
    a.t = tokens;
    a.head0 = g0 * R;
    a.n_q = m;
    a.N = N;
    Plan p = plan_scores(s, l, g0, ng, s->base, m);
    plan_run(s, a, &p);                         // Algorithm 2, line 4
    KV_LAUNCH(softmax_rows_kernel, ng * R * m, SOFT_THREADS, 0, a.heads, g0, R, m, N, P);
    scratch_reset(s, mark);
    return P;
}

// ---- MInference: what every line gathers (minference_choose of kvcomp.c)
// sum (ng R,N) = the mass of column x, or with `slash` of offset x, over the m sampled rows P (ng
// R,m,N) of tokens t (m), in their order; INFINITY for the first `least` lines, which always win.
// Block: 256 lines of query head blockIdx.y. Thread: one line; its neighbour reads the neighbouring
// address, for a column and for an offset alike. No shared memory. Bound by reading P once.
static __global__ void line_sums_kernel(const float *P, HeadRefs heads, int g0, int R,
                                        const int *t, int m, int N, int T, int slash, int least,
                                        float *sum) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, n = heads.at[g0 + blockIdx.y / R].len;
    if (x >= n) return;
    const float *p = P + (size_t)blockIdx.y * m * N;
    float a = 0;
    for (int i = 0; i < m; i++) {
        int r = n - T + t[i], c = slash ? r - x : x;
        if (c >= 0 && c <= r) a += p[(size_t)i * N + c];
    }
    sum[(size_t)blockIdx.y * N + x] = x < least ? INFINITY : a;
}

// -> the sums (ng R,N) on the device. To be called after line_probs_cuda, which has left the tokens
// in ROOM_TOP.
float *line_sums_cuda(Session *s, int l, int g0, int ng, const float *P, int T, int m, int slash,
                      int least) {
    int R = s->c->H / s->c->G, N = kv_longest(s, l);
    float *sum = room<float>(s, ROOM_POOL, (size_t)ng * R * N);
    const int *t = (const int *)s->dev->room[ROOM_TOP].p;
    dim3 grid(blocks(N, 256), ng * R);
    KV_LAUNCH(line_sums_kernel, grid, 256, 0, P, head_refs(s, l), g0, R, t, m, N, T, slash, least,
              sum);
    return sum;
}

// ==================================================================================================== 8 QUEST
// Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference. arXiv 2406.10774.
// On the device run: the bounds of full pages, the scores of the pages in every decode step, the
// choice of the best, and the lists of their rows, which stay here as the layer's views
// (chosen_room, section 2). The host asks for memory, and decides whether a step chooses at all
// (quest_select).
//   max_d, min_d of a page     the largest and smallest key value of its 16 rows in channel d
//   u(page) = sum_d max(q_d max_d, q_d min_d)
// Map:
//   max_d, min_d -> page_bounds, page_bounds_kernel
//   u(page) -> page_scores, page_select_kernel
//
// Bounds are of the stored values, so they are exact, and scores have the CPU's order of sums
// (lanes of 16, fused): from equal rows and queries both halves choose the same pages.

// bound (pages,2,D) of dtype, page `from` + blockIdx.x: the largest, then the smallest value of
// each channel of KV head g.
// Block: one warp, one page. Lane: every 32nd channel. No shared memory: a row's channels are read
// once, 32 side by side. Bound by reading the page (PAGE rows); in decode there is one new page
// every 16 steps, so latency is all.
static __global__ void page_bounds_kernel(LayerRows a, int g, char *bound, int from, int dtype) {
    int page = from + blockIdx.x;
    for (int d = threadIdx.x; d < a.D; d += 32) {
        float hi = row_value(a, a.heads.at[g], 0, page * PAGE, d), lo = hi;
        for (int r = 1; r < PAGE; r++) {                         // max_d, min_d
            float k = row_value(a, a.heads.at[g], 0, page * PAGE + r, d);
            hi = k > hi ? k : hi;
            lo = k < lo ? k : lo;
        }
        number_put(bound, dtype, (size_t)page * 2 * a.D + d, hi);
        number_put(bound, dtype, (size_t)page * 2 * a.D + a.D + d, lo);
    }
}

// Pages from..to-1 of KV head g of layer l.
void page_bounds_cuda(Session *s, int l, int g, char *bound, int from, int to, int dtype) {
    KV_LAUNCH(page_bounds_kernel, to - from, 32, 0, layer_rows(s, l), g, bound, from, dtype);
}

struct QuestSeek : Seek {       // argument of page_select_kernel
    const char *bound[MAX_G];   // (G) the bounds of each KV head, (pages,2,D)
    int *best_of;               // (G,best) the pages chosen
    int n, best;                // pages there are, if no step says it; pages wanted
};

struct QuestShared {
    float *q;                   // (DOT_QUERIES,2D) some of the queries, split
    float *score;               // (cap) or NULL
};

// Carves the block's shared memory -> bytes.
KV_HD static size_t quest_carve(QuestShared *m, char *mem, const QuestSeek &a) {
    Carved b = { mem, 0 };
    m->q = carve<float>(&b, (size_t)DOT_QUERIES * 2 * a.D);
    m->score = a.shared ? carve<float>(&b, a.cap) : NULL;
    return b.at;
}

// q (DOT_QUERIES,2D) = query heads h0.. of the KV head, split: max(q max, q min) is q max where q is
// positive, q min elsewhere. So u is one dot product with a page's bounds. A head that is not there
// is the last one once more.
static __device__ void split_queries(float *to, const QuestSeek &a, int g, int h0) {
    int D = a.D;
    for (int i = threadIdx.x; i < DOT_QUERIES * 2 * D; i += TOP_THREADS) {
        int h = min_int(h0 + i / (2 * D), a.R - 1), k = i % (2 * D);
        float x = a.q[((size_t)g * a.R + h) * D + (k < D ? k : k - D)];
        to[i] = (x > 0) == (k < D) ? x : 0;
    }
}

// A decode step of one layer in one launch: the scores of all pages, the `best` pages of every KV
// head, the lists of their rows, and in a step in one go the works that read them.
//   Block   SEEK_UNITS = 256 pages (blockIdx.x) of a KV head (blockIdx.y). The last block of a KV
//           head chooses among all its pages
//   Lane    every second 16 bytes of one page's bounds; a pair of lanes has a page (pair_dots). DOT_QUERIES
//           query heads share what is read; a group of more reads the bounds once more, from the
//           cache
//   Shared  q: those DOT_QUERIES queries; score: all scores of the head, if they fit, for the five times
//           that the last block goes through them; the bins of a digit
//   Bound   reading the bounds once, 1/8 of the keys' bytes; DOT_AHEAD loads of a lane are 32 KB or
//           more under way in a block. What the last block does is bound by latency
// A list is the rows of its pages (ascending), and a tail from the first page that is not full,
// which is read too.
template <int DT>
static __global__ void __launch_bounds__(TOP_THREADS, 1)
page_select_kernel(KV_PARAMETER(QuestSeek) a) {
    KV_DYN_SHARED(char, mem);
    __shared__ TopShared top;
    __shared__ int last;
    QuestShared m;
    quest_carve(&m, mem, a);
    dependents_launch();
    dependency_wait();
    int g = blockIdx.y, D = a.D, p0 = blockIdx.x * SEEK_UNITS, p = p0 + (threadIdx.x >> 1);
    int n = a.works.step ? a.works.step->len[a.works.head0 + g] / PAGE : a.n;
    float *score = a.score + (size_t)g * a.cap, u = 0;

    for (int h0 = 0; p0 < n && h0 < a.R; h0 += DOT_QUERIES) {
        __syncthreads();                        // the queries before these have been read
        split_queries(m.q, a, g, h0);
        __syncthreads();
        const char *bound = a.bound[g] + (size_t)min_int(p, n - 1) * 2 * D * Stored<DT>::BYTES;
        float dot[DOT_QUERIES];
        pair_dots<DT>(dot, bound, 2 * D, m.q);                        // u(page)
        KV_UNROLL()
        for (int j = 0; j < DOT_QUERIES; j++) u = (h0 || j) && !(dot[j] > u) ? u : dot[j];
    }
    if (p < n && !(threadIdx.x & 1)) score[p] = u;
    if (!arrives_last(a.arrived + 1 + g, gridDim.x, &last)) return;

    const float *x = seek_scores(m.score, score, n);
    int k = min_int(a.best, n), left = k, *best_of = a.best_of + (size_t)g * a.best;
    uint32_t key = top_key(x, n, [](int) { return 1; }, &left, &top);
    top_write(x, n, key, left, best_of, &top);
    __syncthreads();
    int *list = a.lists + (size_t)g * a.stride;
    if (!threadIdx.x) {
        list[LIST_ROWS] = k * PAGE;
        list[LIST_TAIL] = n * PAGE;
    }
    for (int i = threadIdx.x; i < k * PAGE; i += TOP_THREADS)
        list[LIST_HEAD + i] = best_of[i / PAGE] * PAGE + i % PAGE;
    seek_end(a.works, a.arrived, a.G, &last);
}

// quest_select of kvcomp.c: the `best` pages of every KV head by score become the layer's views.
// bound (G), q (H,D) on the device. Of the first `pages` pages; a step in one go says itself how
// many there are, up to cap. u (G,pages) on the host gets the scores, if it is not NULL.
void quest_select_cuda(Session *s, int l, const char *const *bound, int pages, int cap, int best,
                       const float *q, int dtype, float *u) {
    int G = s->c->G;
    QuestSeek a;
    memset(&a, 0, sizeof a);
    seek_fill(s, &a, l, q, cap, best * PAGE, 0);
    for (int g = 0; g < G; g++) a.bound[g] = bound[g];
    a.best_of = room<int>(s, ROOM_TOP_IDX, (size_t)G * best);
    a.n = pages;
    a.best = best;
    QuestShared m;
    dim3 grid(blocks(cap, SEEK_UNITS), G);
    size_t smem = quest_carve(&m, NULL, a);
    as_constant<DT_F32, DT_F16, DT_BF16>(dtype, [&](auto DT) {
        KV_LAUNCH_WIDE_EARLY(page_select_kernel<DT>, grid, TOP_THREADS, smem, a);
    });
    for (int g = 0; g < G && u; g++)
        download(u + (size_t)g * pages, a.score + (size_t)g * cap, pages * sizeof(float));
}

// ==================================================================================================== 9 LOOPSERVE
// LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues.
// arXiv 2507.13681.
// In a prefill all of Algorithm 2 runs here but the drawing of the samples: softmax rows of the
// sampled queries (section 7), then one block a query head chooses that head's lines from them.
// Only the chosen lines, as bits, and what they recover come to the host; prefill_kernel reads what lies on
// them (section 7). In decode the device keeps the ring of the last queries, scores all rows by it and
// picks the best (Algorithm 3), which decode_kernel reads.
//   Eq. 1        fewest cells whose lines recover alpha of the sampled attention
// Map:
//   Eq. 1 -> select_lines_kernel
//   Algorithm 1, line 5 -> choose_lines_cuda
//   Algorithm 2, line 4 -> line_probs_cuda, attend_kernel, softmax_rows_kernel
//   Algorithm 2, line 5 -> line_residuals
//   Algorithm 2, line 12 -> segment_best, best_line
//   Algorithm 2, line 13 -> take_one
//   Algorithm 3, line 4 -> head_put, ring_put_cuda, ring_scores_cuda
//   Algorithm 3, line 5 -> ring_scores_cuda, join_rows_cuda, ring_lists_kernel
// On the host stay RandomSelect (line 1; sample_rows), variant a (select_faithful), when a selection is due, views,
// and the answers that are prefilled again (Definition 1).
//
// Bits: scores of the ring agree with the CPU's to rounding, as window scores do; what is made of
// them is exact. Lines are those of kvcomp.c for the same probabilities: gains are the CPU's
// doubles, and their sums have the CPU's order.

// ---- decode: the ring of queries
// ring (L,obs,H,D): the query of token i in layer l goes into slot (l,i % obs). A decode step's queries are put
// there by the launch that turns them (head_put), those of a prefill are copied.
void ring_keep_cuda(Session *s, float *ring, int obs) {
    s->dev->ring = ring;
    s->dev->obs = obs;
    s->changes++;                                                // a graph's kernels know no ring yet
}

// q (n) into a slot.
void ring_put_cuda(float *slot, const float *q, size_t n) {
    device_copy(slot, q, n * sizeof(float));                     // Algorithm 3, line 4
}

// -> (H,N) on the device: the softmax rows of tokens first .. first+w-1, summed, for every row
// held. Their queries lie in the ring (obs,H,D), wrapped around, and are laid out in order first.
float *ring_scores_cuda(Session *s, int l, const float *ring, int obs, int first, int w) {
    size_t row = (size_t)s->c->H * s->c->D;
    int slot = first % obs, n = min_int(w, obs - slot);
    float *q = room<float>(s, ROOM_RING, w * row);
    device_copy(q, ring + slot * row, n * row * sizeof(float));                 // Algorithm 3, line 4
    device_copy(q + n * row, ring, (w - n) * row * sizeof(float));
    return columns_device(s, l, q, first, w, 1);                 // Algorithm 3, line 5
}

// ---- decode: the best rows, chosen and kept here
struct RingLists : Seek {       // argument of ring_lists_kernel
    const float *of;            // (G,N) scores
    int N;
    int n[MAX_G], k[MAX_G];     // (G) candidates; how many of them are read, 0: every row is
};

// The list of KV head blockIdx.x: its k best candidates, ascending, and every row behind the
// candidates. In a step in one go the last block makes the works of the layer. Block: TOP_THREADS
// threads; what they do is top_k_kernel's. Bound by latency, once in 16 steps.
static __global__ void __launch_bounds__(TOP_THREADS, 1)
ring_lists_kernel(KV_PARAMETER(RingLists) a) {
    __shared__ TopShared m;
    __shared__ int last;
    int g = blockIdx.x, n = a.n[g], left = a.k[g];
    const float *x = a.of + (size_t)g * a.N;
    int *list = a.lists + (size_t)g * a.stride;
    if (!threadIdx.x) {
        list[LIST_ROWS] = left;
        list[LIST_TAIL] = left ? n : 0;
    }
    if (left) {                                                  // the same for the whole block
        uint32_t key = top_key(x, n, [](int) { return 1; }, &left, &m);
        top_write(x, n, key, left, list + LIST_HEAD, &m);        // Algorithm 3, line 5: arg max
    }
    seek_end(a.works, a.arrived, gridDim.x, &last);
}

// Of every KV head the `budget` candidates with the largest score (G,N), which lies here, become
// the layer's views, with every row behind the candidates. n (G): candidates; a head with no more
// than the budget reads every row. The lists stay on the device until the next selection, so a
// graph of a step stays right, and nobody waits.
void ring_select_cuda(Session *s, int l, const float *score, const int *n, int budget) {
    RingLists a;
    memset(&a, 0, sizeof a);
    seek_fill(s, &a, l, NULL, 1, budget, 0);
    a.of = score;
    a.N = kv_longest(s, l);
    for (int g = 0; g < s->c->G; g++) {
        a.n[g] = n[g];
        a.k[g] = n[g] > budget ? budget : 0;
    }
    KV_LAUNCH(ring_lists_kernel, s->c->G, TOP_THREADS, 0, a);
}

// ---- the choice of lines: a block a query head
// A query head has one block of PICK_THREADS threads, since a greedy choice depends on the one before
// it: a head cannot be spread over blocks that would have to meet after every line. Heads of a batch
// run side by side.
enum { PICK_THREADS = 256, PICK_WARPS = PICK_THREADS / 32 };

struct BestLine {
    double key;                 // gain a cell
    int id;                     // of a line, or of a segment
};

struct Picks {                  // argument of the kernel; arrays hold the parts of all heads in turn, or the block's
    HeadRefs heads;
    LoopRule rule;
    const float *P;             // (m,N) softmax rows of the samples
    const int *t;               // (m) their tokens, from the pass's first on; one list for all heads
    double *gain;               // (2N) residual gain of every line
    double *bound;              // (segments) the best key of every segment is no larger
    double *row;                // (2,m) a number or two of every sample
    uint64_t *v, *s;            // (words) chosen verticals and offsets
    double *found;              // (3) failed; share of the mass; share of the cells
    int g0, R;                  // first KV head of the batch; query heads of a KV head
    int m, N, T;                // samples; columns of P; tokens of the pass
    int segments, words;        // segments of 2N lines, PICK_THREADS each; 64-bit words of N bits
    int n, p0;                  // of the block's head: rows held; the first row of the pass
};

// Word w of a bit set that holds 0..n-1.
static __device__ uint64_t first_bits(int n, int w) {
    if (n <= w * 64) return 0;
    return n - w * 64 < 64 ? ~0ull >> (64 - (n - w * 64)) : ~0ull;
}

// a becomes the block's own part, whose bits are set to the lines that are always kept (D33): the first columns, the
// last offsets. No segment has been looked at. All threads.
static __device__ void pick_head(Picks &a) {
    size_t h = blockIdx.x;
    a.n = a.heads.at[a.g0 + blockIdx.x / a.R].len;
    a.p0 = a.n - a.T;
    a.P += h * a.m * a.N;
    a.gain += h * 2 * a.N;
    a.bound += h * a.segments;
    a.row += 2 * h * a.m;
    a.found += h * 3;
    a.v += h * a.words;
    a.s += h * a.words;
    a.segments = (2 * a.n + PICK_THREADS - 1) / PICK_THREADS;
    for (int i = threadIdx.x; i < a.segments; i += PICK_THREADS) a.bound[i] = INFINITY;
    for (int w = threadIdx.x; w < (a.n + 63) / 64; w += PICK_THREADS) {
        a.v[w] = first_bits(min_int(a.rule.sink, a.n), w);
        a.s[w] = first_bits(min_int(a.rule.local, a.n), w);
    }
    __syncthreads();
}

// Cells of vertical y, and as many of slash y.
static __device__ int line_len(const Picks &a, int y) { return a.n - max_int(y, a.p0); }

// ---- single lines (select_exact of kvcomp.c): one after the other
// Line `id` is slash id, or vertical id - n. Of equal ones that with the lower id comes first.
static __device__ BestLine better(BestLine a, BestLine b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id) ? a : b;
}

// The best of the block's, in every thread. part (PICK_WARPS) shared.
static KV_CALL BestLine best_block(BestLine x, BestLine *part) {
    for (int d = 16; d; d >>= 1) {
        BestLine y;
        y.key = __shfl_xor_sync(ALL_LANES, x.key, d);
        y.id = __shfl_xor_sync(ALL_LANES, x.id, d);
        x = better(x, y);
    }
    __syncthreads();                                             // the last one has been read
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = x;
    __syncthreads();
    for (int w = 0; w < PICK_WARPS; w++) x = better(x, part[w]);
    return x;
}

// The best line of a segment that is not taken and gains something; key 0: none. A thread has one
// line.
static KV_CALL BestLine segment_best(const Picks &a, int seg, BestLine *part) {
    int id = seg * PICK_THREADS + threadIdx.x, y = id < a.n ? id : id - a.n;
    double g = id < 2 * a.n && !bit_of(id < a.n ? a.s : a.v, y) ? a.gain[id] : 0;
    BestLine own = { g > 1e-12 ? g / (double)line_len(a, y) : 0, id };  // Algorithm 2, line 12
    return best_block(own, part);
}

// best_line of kvcomp.c: the line with the largest gain a cell; key 0: none gains anything. Gains only ever fall, so
// the best key of a segment as it was at some earlier moment is never too small: if the segment with the largest one
// still has it, the best line is there.
static __device__ BestLine best_line(const Picks &a, BestLine *part) {
    for (;;) {
        BestLine top = { 0, 2 * a.n };
        for (int i = threadIdx.x; i < a.segments; i += PICK_THREADS) top = better(top, BestLine{ a.bound[i], i });
        top = best_block(top, part);
        if (top.key <= 0) return top;
        BestLine now = segment_best(a, top.id, part);
        if (now.key == top.key) return now;
        if (!threadIdx.x) a.bound[top.id] = now.key;
        __syncthreads();
    }
}

// residuals of kvcomp.c: the gains of all lines with the kept ones taken out, a thread a line, over
// the samples in their order; and rec, tot (2, shared) of its Tally, a warp a sample, whose
// lanes are folded as sum_lanes32 of kvcomp.c folds them.
static __device__ void line_residuals(const Picks &a, double *rec, double *tot) {
    int lane = threadIdx.x & 31;
    double *g = a.gain;
    for (int id = threadIdx.x; id < 2 * a.n; id += PICK_THREADS) {
        double sum = 0;
        for (int i = 0; i < a.m; i++) {
            int r = a.p0 + a.t[i], c = id < a.n ? r - id : id - a.n;
            int counts = c >= a.rule.sink && r - c >= a.rule.local && !(a.rule.holdout & i);
            if (counts) sum += a.P[(size_t)i * a.N + c];         // Algorithm 2, line 5
        }
        g[id] = sum;
    }

    for (int i = threadIdx.x >> 5; i < a.m; i += PICK_WARPS) {
        int r = a.p0 + a.t[i];
        double got = 0, all = 0;
        for (int c = lane; c <= r; c += 32) {
            double p = a.P[(size_t)i * a.N + c];
            all += p;
            if (c < a.rule.sink || r - c < a.rule.local) got += p;
        }
        got = lanes_sum<32>(got);
        all = lanes_sum<32>(all);
        if (!lane) {
            a.row[i] = got;
            a.row[a.m + i] = all;
        }
    }
    __syncthreads();
    if (!threadIdx.x) {
        rec[0] = rec[1] = tot[0] = tot[1] = 0;
        for (int i = 0; i < a.m; i++) {
            rec[a.rule.holdout & i & 1] += a.row[i];
            tot[a.rule.holdout & i & 1] += a.row[a.m + i];
        }
    }
    __syncthreads();
}

// take_line of kvcomp.c: chooses line id; what it covers leaves the gains of the lines that cross
// it. A thread has a sample, and in every sample another line crosses, so no two threads write to
// one gain. All threads of a block; rec (2) shared.
static __device__ void take_one(const Picks &a, int id, double *rec) {
    int slash = id < a.n, y = slash ? id : id - a.n;
    double *g = a.gain;
    for (int i = threadIdx.x; i < a.m; i += PICK_THREADS) {
        int other = a.p0 + a.t[i] - y, on = other >= 0 && !bit_of(slash ? a.v : a.s, other);
        double cell = on ? a.P[(size_t)i * a.N + (slash ? other : y)] : 0;
        a.row[i] = cell;
        if (on && !(a.rule.holdout & i)) g[slash ? a.n + other : other] -= cell;
    }
    __syncthreads();
    if (!threadIdx.x) {
        rec[0] += g[id];
        for (int i = 1; i < a.m && a.rule.holdout; i += 2) rec[1] += a.row[i];
        uint64_t *bits = slash ? a.s : a.v;
        bits[y >> 6] |= (uint64_t)1 << (y & 63);                 // Algorithm 2, line 13
    }
    __syncthreads();
}

// Cells of the lines that are always kept, crossings counted twice; in every thread. part (32) shared.
static __device__ double cells_kept(const Picks &a, double *part) {
    double sum = 0;                             // of whole numbers: exact in any order
    for (int y = threadIdx.x; y < a.n; y += PICK_THREADS) sum += (bit_of(a.v, y) + bit_of(a.s, y)) * line_len(a, y);
    return block_fold<0>(sum, part);
}

// Single lines of one query head: greedy on residual gain a cell until alpha of both halves is
// recovered (Eq. 1). Fails where the lines have too many cells, or none is left before the
// validating half is recovered.
// Block: one query head, PICK_THREADS threads. Thread: a line of a segment, a sample when a line is
// taken. Shared: the warps' candidates and the masses; gains and bounds lie in global memory. A segment has
// PICK_THREADS lines: looking at it again is one line a thread, and the bounds of all segments are
// few enough to be read in every turn. Bound by latency: for every line the block meets several
// times and reads little; only line_residuals reads P as a whole.
static __global__ void __launch_bounds__(PICK_THREADS, 1) select_lines_kernel(Picks a) {
    __shared__ BestLine part[PICK_WARPS];
    __shared__ double sums[PICK_WARPS], rec[2], tot[2];
    pick_head(a);
    int n = a.n, failed = 0;
    double all = .5 * ((double)n * (n + 1) - (double)a.p0 * (a.p0 + 1)), alpha = a.rule.alpha;
    double cells = cells_kept(a, sums);
    line_residuals(a, rec, tot);
    while (!failed && !(rec[0] >= alpha * tot[0] && rec[1] >= alpha * tot[1])) {       // Eq. 1
        BestLine top = best_line(a, part);
        if (top.key <= 0) break;                                 // nothing is left
        take_one(a, top.id, rec);
        cells += (double)line_len(a, top.id % n);
        failed = cells > a.rule.max_cells * all;
    }
    if (threadIdx.x) return;
    a.found[0] = failed || (a.rule.holdout && rec[1] < alpha * tot[1]);
    a.found[1] = tot[0] + tot[1] > 0 ? (rec[0] + rec[1]) / (tot[0] + tot[1]) : 1;
    a.found[2] = cells / all;
}

// The lines of the query heads of ng KV heads from g0 on, from P (ng R,m,N), which line_probs_cuda
// has just made for the same heads and tokens. lines (ng R), on the host, get their bits and dense;
// found (ng R) what they recover and cost. What the kernel works in is one block of device memory.
void choose_lines_cuda(Session *s, int l, int g0, int ng, const LoopRule *rule, const float *P, int T,
                       int m, Lines *lines, LoopFound *found) {
    int R = s->c->H / s->c->G, heads = ng * R, N = kv_longest(s, l);
    int segments = (int)blocks(2 * N, PICK_THREADS), words = (N + 63) / 64;
    size_t lines_of = (size_t)heads * 2 * N, bounds = (size_t)heads * segments, bits = (size_t)heads * words;
    size_t mark = scratch_mark(s);
    double *gain = room<double>(s, ROOM_PICKS, lines_of + bounds + 2 * bits + (size_t)heads * (3 + 2 * m));
    double *bound = gain + lines_of;
    uint64_t *v = (uint64_t *)(bound + bounds), *slash = v + bits;
    double *told = (double *)(slash + bits), *row = told + (size_t)heads * 3;
    const int *t = (const int *)s->dev->room[ROOM_TOP].p;  // line_probs_cuda has left them there
    Picks a = {
        head_refs(s, l), *rule, P, t,
        gain, bound, row, v, slash, told,
        g0, R, m, N, T, segments, words, 0, 0,
    };
    KV_LAUNCH(select_lines_kernel, heads, PICK_THREADS, 0, a);   // Algorithm 1, line 5

    uint64_t *host = (uint64_t *)scratch(s, 2 * bits * 8);  // verticals of all heads, then offsets
    double *all = (double *)scratch(s, heads * 3 * sizeof(double));
    download(host, a.v, 2 * bits * 8);
    download(all, a.found, heads * 3 * sizeof(double));

    for (int h = 0; h < heads; h++) {
        memcpy(lines[h].v, host + (size_t)h * words, bit_bytes(lines[h].n));
        memcpy(lines[h].s, host + bits + (size_t)h * words, bit_bytes(lines[h].n));
        lines[h].dense = all[3 * h] != 0;
        found[h] = { all[3 * h + 1], all[3 * h + 2] };
    }
    scratch_reset(s, mark);
}

// ==================================================================================================== 10 PATS
// Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs.
// On the device run: reading packed rows inside attention (decode_kernel's rows_unpack in decode, else
// packed_value), packing and packing again (repack_kernel). The bytes are those of
// kvcomp.c, guard and gaps included.
// Map:
//   Sec. 3, w -> repack_kernel
//   Sec. 3, B -> packed_half, repack_kernel
//   Sec. 3, fetch -> packed_half, rows_unpack
// On the host stay b(t,T), the budget of bits of Sec. 3 (pats_bits), the region table of every
// head, the policy, and the decision what is packed when (pats_commit).
//
// Packed rows are read where they lie: element e of a region starts at bit e*w, so a lane fetches
// the one or two 32-bit words that hold it, shifts and masks. Packing goes the other way around: a
// thread makes one word of the new bytes. It reads the elements that the word touches from where
// they are stored now, packed or raw, and writes their upper w bits. So no two threads write to one
// word.

// ---- reading
// Element d of row r of region g as the f16 it is stored as, cut bits 0. words: those of the keys
// or of the values.
static __device__ uint16_t packed_half(const uint32_t *words, const Region *g, int rows64, int r,
                                       int d, int D) {
    size_t bit = (size_t)(r - g->row0) * D * g->w + (size_t)d * g->w;
    if (rows64) {
        int B = 8 * PATS_BLOCK / g->w;                           // Sec. 3, B: elements of a block
        bit = ((size_t)(r - g->row0) * ((D + B - 1) / B) + d / B) * (8 * PATS_BLOCK) + d % B * g->w;
    }
    const uint32_t *p = words + g->base / 4 + bit / 32;          // Sec. 3, fetch
    uint64_t two = p[0] | (bit % 32 + g->w > 32 ? (uint64_t)p[1] << 32 : 0);
    return (uint16_t)(two >> bit % 32 << (16 - g->w));           // Sec. 3, fetch
}

// The same element of head h as attention reads it: pats_load_region of kvcomp.c. v: 0 for K, 1 for V.
static __device__ float packed_value(const HeadRef &h, int v, int r, int d, int D) {
    const Packed *p = h.pack;
    return half_get<DT_F16>(packed_half(v ? p->v : p->k, region_of(p->reg, p->n_reg, r), p->rows64, r, d, D));
}

// ---- packing
struct Repack {                 // argument of repack_kernel
    HeadRef now;                // what is stored now
    const Packed *next;         // the new table, whose k and v are written
    const int *rows;            // new row i is row rows[i] of what is stored now
    unsigned words;             // words of K, and of V
    int D;
};

// Element d of new row r as it is stored now.
static __device__ uint16_t stored_half(const Repack &a, int v, int r, int d) {
    const Packed *p = a.now.pack;
    int from = a.rows[r];
    if (from >= a.now.packed)
        return ((const uint16_t *)(v ? a.now.v : a.now.k))[(size_t)(from - a.now.packed) * a.D + d];
    return packed_half(v ? p->v : p->k, region_of(p->reg, p->n_reg, from), p->rows64, from, d, a.D);
}

// The new packed bytes of one head: pats_repacked of kvcomp.c.
// Block: 128 words of the keys (blockIdx.y 0) or the values (1). Thread: one 32-bit word, made of
// the two to six elements that touch it (w is 6 to 16; an element that lies in two words is read
// for both). No shared memory: neighbouring threads read neighbouring elements, through the cache.
// Bound by the integer work of finding, cutting and shifting an element.
static __global__ void repack_kernel(Repack a) {
    size_t word = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (word >= a.words) return;
    const Packed *p = a.next;
    int i = p->n_reg - 1, v = blockIdx.y;
    while (i && p->reg[i].base > word * 4) i--;
    Region g = p->reg[i];
    // B: elements of a block. A dense row is one block.
    int w = g.w, B = p->rows64 ? 8 * PATS_BLOCK / w : a.D;
    int per = (a.D + B - 1) / B;                                 // blocks of a row
    // The word's first bit in the region; under rows64, in its block.
    size_t at = (word * 4 - g.base) * 8;
    size_t block = p->rows64 ? at / (8 * PATS_BLOCK) : 0, all = p->rows64 ? B : (size_t)g.n * a.D;

    uint32_t out = 0;
    if (p->rows64) at %= 8 * PATS_BLOCK;
    for (size_t e = at / w; e * w < at + 32 && e < all; e++) {
        size_t r = p->rows64 ? block / per : e / a.D;
        int d = p->rows64 ? (int)(block % per * B + e) : (int)(e % a.D);
        if (r >= (size_t)g.n || d >= a.D) break;
        uint32_t x = stored_half(a, v, g.row0 + (int)r, d) >> (16 - w);       // Sec. 3, w
        out |= e * w >= at ? x << (e * w - at) : x >> (at - e * w);
    }
    uint32_t *words = (uint32_t *)(v ? p->v : p->k);
    words[word] = out;
}

// Memory for packed bytes is asked for in steps of this many.
enum { PACK_STEP = 4096 };

// The packed rows of h become those of the table reg (n_reg), `bytes` bytes for K and for V: row i
// is row keep[i] of what is stored now. The table stands behind the values. Sets pk and pv of h; the
// caller then sets reg, packed and pk_bytes.
void rows_repack_cuda(Session *s, KVHead *h, const Region *reg, int n_reg, size_t bytes,
                      const int *keep, int rows64) {
    Rows *r = &s->dev->held[h - s->head];
    size_t want = (bytes + PACK_STEP - 1) / PACK_STEP * PACK_STEP, mark = scratch_mark(s);
    size_t head = offsetof(Packed, reg), table = n_reg ? head + (size_t)n_reg * sizeof(Region) : 0;
    int n = n_reg ? reg[n_reg - 1].row0 + reg[n_reg - 1].n : 0;
    char *pk = grown(NULL, 0, want);
    char *pv = grown(NULL, 0, want + table);
    Packed *next = n ? (Packed *)(pv + want) : NULL;

    if (n) {
        Packed *host = (Packed *)scratch(s, table);
        host->k = (const uint32_t *)pk;
        host->v = (const uint32_t *)pv;
        host->n_reg = n_reg;
        host->rows64 = rows64;
        memcpy((char *)host + head, reg, table - head);
        upload(next, host, table);
        int *rows = room<int>(s, ROOM_LIST, n);
        upload(rows, keep, (size_t)n * sizeof(int));
        HeadRef now = { h->k, h->v, NULL, NULL, r->pack, h->packed, h->len };
        Repack a = { now, next, rows, (unsigned)((bytes + 3) / 4), s->c->D };
        dim3 grid(blocks(a.words, 128), 2);
        KV_LAUNCH(repack_kernel, grid, 128, 0, a);
    }
    grown(h->pk, 0, 0);
    grown(h->pv, 0, 0);
    h->pk = pk;
    h->pv = pv;
    r->pack = next;
    r->pk_bytes = want;
    s->changes++;
    scratch_reset(s, mark);
}

// ==================================================================================================== 11 LYCHEECLUSTER
// LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and Hierarchical KV
// Indexing.
// The index is device memory (Tree and Nodes of kvcomp.h point into it): it is built, grafted on
// and searched here. The host cuts the text into chunks, knows how many there are, asks for memory,
// and decides when to build anew.
//   Eq. 2        q.v <= q.mu_u + |q| r_u for every chunk key v below node u
// Map:
//   Eq. 2 -> node_score, cluster_select_kernel
//   Algorithm 1, line 3 -> lychee_build_cuda, chunk_keys_kernel, assign_kernel, centres_kernel, cover_kernel
//   Algorithm 1, line 9 -> open_units
//   Algorithm 1, line 10 -> open_units
//   Algorithm 1, line 13 -> cluster_scores
//   Algorithm 1, line 14 -> take_clusters
//   Algorithm 1, line 16 -> take_rows
//   Algorithm 1, line 22 -> graft_kernel, node_absorb
// On the host stay the chunker (line 2) and the decision whether a step chooses at all. Attention over
// the chosen rows (line 17) is decode attention through views: by the format of the rows decode_kernel
// or attend_kernel (reader_of, section 3).
//
// Bits: every sum has the CPU's order. Dot products go by lanes of 16 with fused multiply-adds, as
// dot_f32 of lib/kernels does (so a CPU with FMA has the same bits; plain C agrees to rounding),
// centroids add their chunks in ascending order, and distances are serial sums in double that are
// never fused. No float is added atomically. From equal rows both halves make equal trees and equal
// lists.

// ---- sums and distances
// a.mu of a (D) and a centre mu (D) in bf16, by a half warp, as dot_lanes.
static __device__ float dot_centre(const float *a, const uint16_t *mu, int D) {
    float sum = 0;
    for (int d = threadIdx.x & 15; d < D; d += 16) sum = fmaf(a[d], bf16_to_f32(mu[d]), sum);
    return lanes_fold(sum);
}

// x (D), shared, to length 1. One warp.
static __device__ void normalise(float *x, int D) {
    __syncwarp();
    float f = 1 / sqrtf(dot_lanes(x, x, D) + 1e-12f);
    __syncwarp();
    for (int d = threadIdx.x & 31; d < D; d += 32) x[d] *= f;
    __syncwarp();
}

// |v - mu|, one thread: a serial sum in double.
static __device__ double distance(const float *v, const uint16_t *mu, int D) {
    double ss = 0;
    for (int d = 0; d < D; d++) {
        double e = (double)v[d] - bf16_to_f32(mu[d]);
        ss = __dadd_rn(ss, __dmul_rn(e, e));
    }
    return sqrt(ss);
}

// An f32 that is never below r: a radius must not lose a member to rounding.
static __device__ float above(double r) { return nextafterf((float)r, INFINITY); }

// The level of a tree that a kernel works on.
static __device__ Nodes *level_of(Tree *t, int coarse) { return coarse ? &t->coarse : &t->fine; }

// ---- keys and k-means
// blockIdx.y is the KV head; all heads of a layer have as many chunks, clusters and units.

// key (D), shared = the normalised mean of the keys of rows r0 .. r0+n-1 of head h. One warp.
static __device__ void chunk_key(const LayerRows &a, const HeadRef &h, int r0, int n, float *key) {
    for (int d = threadIdx.x & 31; d < a.D; d += 32) {
        float x = row_value(a, h, 0, r0, d);
        for (int i = 1; i < n; i++) x += row_value(a, h, 0, r0 + i, d);
        key[d] = x / (float)n;
    }
    normalise(key, a.D);                                         // Sec. 4.1: kbar_j
}

// keys (G,M,D): the key of every chunk; chunk j is rows start[j] .. start[j+1]-1.
// Block: one warp, chunk blockIdx.x. Lane: every 32nd dimension. Shared: the key, for its length is
// a sum over all lanes. Bound by reading the rows once.
static __global__ void chunk_keys_kernel(LayerRows a, const int *start, float *keys) {
    __shared__ float key[MAX_D];
    int j = blockIdx.x;
    chunk_key(a, a.heads.at[blockIdx.y], start[j], start[j + 1] - start[j], key);
    float *to = keys + ((size_t)blockIdx.y * gridDim.x + j) * a.D;
    for (int d = threadIdx.x; d < a.D; d += 32) to[d] = key[d];
}

enum { POINTS = 32 };           // points of a block of assign_kernel, and centres it has at hand

// of[] of a level: for every point of x (G,n,D) the centre of mu (G,K,D) with the largest dot product;
// ties go to the lower centre, as in kmeans of kvcomp.c.
//   Block   POINTS points against all centres, as many at a time
//   Lane    every second 8 numbers of a point; a pair of lanes has a point (pair_dots), and DOT_QUERIES centres
//           share what is read of it
//   Shared  near (POINTS,D): the centres at hand
//   Bound   f32 multiply-adds (n K D); a load of 16 bytes serves 4 or, of a point, 16 of them
static __global__ void assign_kernel(Tree *t, int coarse, const float *x, int n, const float *mu, int K, int D) {
    KV_DYN_SHARED(float, near);
    int i = blockIdx.x * POINTS + (threadIdx.x >> 1), at = 0;
    const float *point = x + ((size_t)blockIdx.y * n + min_int(i, n - 1)) * D;
    float best = -INFINITY, dot[DOT_QUERIES];
    mu += (size_t)blockIdx.y * K * D;
    for (int c0 = 0; c0 < K; c0 += POINTS) {
        __syncthreads();                        // the centres before these are done with
        for (int e = threadIdx.x; e < POINTS * D; e += 2 * POINTS) near[e] = mu[min_int(c0 * D + e, K * D - 1)];
        __syncthreads();
        for (int c = c0; c < min_int(c0 + POINTS, K); c += DOT_QUERIES) {
            pair_dots<DT_F32>(dot, (const char *)point, D, near + (c - c0) * D);
            for (int j = 0; j < DOT_QUERIES && c + j < K; j++) {
                if (!(dot[j] > best)) continue;
                best = dot[j];
                at = c + j;
            }
        }
    }
    if (!(threadIdx.x & 1) && i < n) level_of(&t[blockIdx.y], coarse)->of[i] = at;      // Sec. 4.3
}

// mu (G,K,D): every centre becomes the direction of its points; an empty one stays. kmeans of kvcomp.c. In round 0 it
// becomes one of the points, every so many-th. After the last round the centres are rounded to bf16 and go into the
// trees' level, too.
// Block: one warp, centre blockIdx.x, which walks through the points' nodes 32 at a time and adds its
// points in ascending order, so no float is added atomically. Lane: every 32nd dimension, in
// registers. Shared: the sum while it is normalised. Bound by reading the nodes of the points: K
// centres read n of them each, from the cache.
static __global__ void centres_kernel(Tree *t, int coarse, int round, float *mu, const float *x, int n, int D) {
    __shared__ float sum[MAX_D];
    int j = blockIdx.x, K = gridDim.x, lane = threadIdx.x, last = round == KMEANS_ITERATIONS, count = 0;
    int first = (int)(((int64_t)2 * j + 1) * n / ((int64_t)2 * K));
    Nodes *u = level_of(&t[blockIdx.y], coarse);
    const int *of = u->of;
    float acc[MAX_D / 32] = {0}, *to = mu + ((size_t)blockIdx.y * K + j) * D;
    x += (size_t)blockIdx.y * n * D;
    for (int i = 0; i < n; i += 32) {
        int own = i + lane;
        unsigned m = __ballot_sync(ALL_LANES, own < n && (round ? of[own] == j : own == first));
        count += __popc(m);
        for (; m; m &= m - 1) {
            const float *p = x + (size_t)(i + lowest_bit(m)) * D;
            for (int c = 0; c < MAX_D / 32; c++)
                if (lane + 32 * c < D) acc[c] += p[lane + 32 * c];
        }
    }

    for (int c = 0; c < MAX_D / 32; c++)
        if (lane + 32 * c < D) sum[lane + 32 * c] = count ? acc[c] : to[lane + 32 * c];
    if (count && round) normalise(sum, D);                       // Sec. 4.3
    for (int d = lane; d < D; d += 32) {
        uint16_t rounded = f32_to_bf16(sum[d]);
        if (last) u->mu[(size_t)j * D + d] = rounded;
        to[d] = last ? bf16_to_f32(rounded) : sum[d];
    }
}

// r and tokens of every node: node_cover of kvcomp.c over all chunks below it, on either level. keys
// (G,M,D).
// Block: one warp, node blockIdx.x. Lane: every 32nd chunk, its distance included, which is a serial
// sum of D terms; a maximum joins the lanes. Bound by latency and by those sums in double.
static __global__ void cover_kernel(Tree *trees, int coarse, const float *keys, const int *start, int M, int D) {
    int j = blockIdx.x, lane = threadIdx.x, tokens = 0;
    Tree *t = &trees[blockIdx.y];
    Nodes *u = level_of(t, coarse);
    float r = 0;
    keys += (size_t)blockIdx.y * M * D;
    for (int i = lane; i < M; i += 32) {
        int c = t->fine.of[i];
        if ((coarse ? t->coarse.of[c] : c) != j) continue;
        tokens += start[i + 1] - start[i];
        r = fmaxf(r, above(distance(keys + (size_t)i * D, u->mu + (size_t)j * D, D)));
    }
    r = lanes_max<32>(r);                                        // Sec. 4.1: r_u
    tokens = lanes_sum<32>(tokens);
    if (!lane) {
        u->r[j] = r;
        u->tokens[j] = tokens;
    }
}

// ---- the host's side of building
// M and the M+1 starts of the chunks to ROOM_START, where retrieval finds them too -> the starts.
static const int *starts_upload(Session *s, const Lychee *x) {
    int *dev = room<int>(s, ROOM_START, x->M + 2);
    upload(dev, &x->M, sizeof(int));
    upload(dev + 1, x->start, (x->M + 1) * sizeof(int));
    return dev + 1;
}

// The trees of layer l (G), as the last build left them: their pointers point into device memory.
static Tree *trees_of(const Session *s, int l) {
    return (Tree *)s->dev->room[ROOM_TREES].p + (size_t)l * s->c->G;
}

// kmeans of kvcomp.c: points (G,n,D) -> mu (G,K,D) as rounded, and mu and of[] of the trees' level.
static void kmeans_device(Session *s, Tree *t, int coarse, const float *points, int n, int K, float *mu) {
    int D = s->c->D, G = s->c->G;
    size_t smem = (size_t)POINTS * D * sizeof(float);
    dim3 nodes(K, G), points_of(blocks(n, POINTS), G);
    for (int i = 0; i <= KMEANS_ITERATIONS; i++) {  // the last assignment is against the rounded centres
        KV_LAUNCH(centres_kernel, nodes, 32, 0, t, coarse, i, mu, points, n, D);
        KV_LAUNCH(assign_kernel, points_of, 2 * POINTS, smem, t, coarse, points, n, mu, K, D);
    }
}

// tree_build of kvcomp.c for all KV heads of layer l. trees (G), on the host: their arrays, for
// which there is room, lie on the device.
void lychee_build_cuda(Session *s, const Lychee *x, int l, const Tree *trees) {
    int D = s->c->D, G = s->c->G, M = x->M, K = trees->fine.n, P = trees->coarse.n;
    const int *start = starts_upload(s, x);
    room_kept<Tree>(s, ROOM_TREES, (size_t)s->c->L * G);
    Tree *t = trees_of(s, l);
    upload(t, trees, G * sizeof(Tree));
    float *keys = room<float>(s, ROOM_KEYS, (size_t)G * M * D);
    float *mu = room<float>(s, ROOM_CENTRES, (size_t)G * (K + P) * D), *units = mu + (size_t)G * K * D;

    dim3 chunks(M, G), fine(K, G), coarse(P, G);
    KV_LAUNCH(chunk_keys_kernel, chunks, 32, 0, layer_rows(s, l), start, keys);
    kmeans_device(s, t, 0, keys, M, K, mu);            // Algorithm 1, line 3
    if (P) kmeans_device(s, t, 1, mu, K, P, units);
    KV_LAUNCH(cover_kernel, fine, 32, 0, t, 0, keys, start, M, D);
    if (P) KV_LAUNCH(cover_kernel, coarse, 32, 0, t, 1, keys, start, M, D);
}

// ---- grafting: tree_graft of kvcomp.c
enum { GRAFT_THREADS = 256 };

// The node takes in one more chunk of key v: the smallest ball that holds the old one and v, and what
// rounding shifts. One warp; v, to (D) shared.
static __device__ void node_absorb(Nodes *u, int node, const float *v, int tokens, int D, float *to) {
    uint16_t *mu = u->mu + (size_t)node * D;
    int lane = threadIdx.x & 31;
    double d = distance(v, mu, D), r = u->r[node], shift = 0;
    __syncwarp();
    if (!lane) u->tokens[node] += tokens;
    if (d <= r) return;
    double step = (d - r) / (2 * d);
    for (int i = lane; i < D; i += 32) {
        float old = bf16_to_f32(mu[i]);
        to[i] = bf16_to_f32(f32_to_bf16((float)__dadd_rn(old, __dmul_rn(step, (double)v[i] - old))));
    }
    __syncwarp();
    for (int i = 0; i < D; i++) {                                // every lane the same sum
        double e = (double)to[i] - bf16_to_f32(mu[i]);
        shift = __dadd_rn(shift, __dmul_rn(e, e));
    }
    __syncwarp();                                                // the old centre has been read
    for (int i = lane; i < D; i += 32) mu[i] = f32_to_bf16(to[i]);
    __syncwarp();
    if (!lane) u->r[node] = above(fmax(r + sqrt(shift), distance(v, mu, D)));    // Algorithm 1, line 22: Sec. 4.4
    __syncwarp();
}

// The cluster whose centre has the largest dot product with v (D), shared; ties go to the lower
// one. All threads of a block; a half warp takes every 16th cluster. best_of, at_of (GRAFT_THREADS
// / 16) shared.
static __device__ int nearest_cluster(const Nodes *u, const float *v, int D, float *best_of, int *at_of) {
    int half = threadIdx.x >> 4, halves = GRAFT_THREADS / 16, at = 0;
    float best = -INFINITY;
    for (int c0 = 0; c0 < u->n; c0 += halves) {  // all lanes take part in every shuffle
        int c = c0 + half < u->n ? c0 + half : u->n - 1;
        float S = dot_centre(v, u->mu + (size_t)c * D, D);
        if (u->tokens[c] && (S > best || (S == best && c < at))) {
            best = S;
            at = c;
        }
    }

    if (!(threadIdx.x & 15)) {
        best_of[half] = best;
        at_of[half] = at;
    }
    __syncthreads();
    for (int i = 0; i < halves; i++)
        if (best_of[i] > best || (best_of[i] == best && at_of[i] < at)) {
            best = best_of[i];
            at = at_of[i];
        }
    return at;
}

// Chunks from .. M-1 join the tree blockIdx.x, one after the other, for each sees what the one
// before changed.
// Block: one tree. Half warp: every 16th cluster in the search for the nearest; the first warp then
// takes the chunk in. Shared: the chunk's key, a centre that moves, and the half warps' best. Bound by
// latency: there is a chunk every 8 to 16 tokens and G blocks only, while the search reads the K
// centres once.
static __global__ void __launch_bounds__(GRAFT_THREADS, 1)
graft_kernel(Tree *trees, LayerRows a, const int *start, int from, int M) {
    __shared__ float v[MAX_D], to[MAX_D], best_of[GRAFT_THREADS / 16];
    __shared__ int at_of[GRAFT_THREADS / 16];
    Tree *t = &trees[blockIdx.x];
    for (int j = from; j < M; j++) {
        int n = start[j + 1] - start[j];
        if (threadIdx.x < 32) chunk_key(a, a.heads.at[blockIdx.x], start[j], n, v);
        __syncthreads();
        int c = nearest_cluster(&t->fine, v, a.D, best_of, at_of);
        if (threadIdx.x < 32) {
            node_absorb(&t->fine, c, v, n, a.D, to);             // Sec. 4.4
            if (t->coarse.n) node_absorb(&t->coarse, t->coarse.of[c], v, n, a.D, to);
            if (!threadIdx.x) t->fine.of[j] = c;
        }
        __syncthreads();  // the next chunk sees what this one changed
    }
}

// Chunks from .. M-1 join the trees of layer l.
void lychee_graft_cuda(Session *s, const Lychee *x, int l, int from) {
    const int *start = starts_upload(s, x);
    KV_LAUNCH(graft_kernel, s->c->G, GRAFT_THREADS, 0, trees_of(s, l), layer_rows(s, l), start, from, x->M);
}

// ---- retrieval: scores of units and of the clusters below opened ones
struct LycheeSeek : Seek {      // argument of cluster_select_kernel
    const Tree *trees;          // (G), of `cap` clusters each
    const int *chunks;          // M, then the M+1 starts
    int bound;                  // 1: a score is the bound of Eq. 2, 0: q.mu
    int units, least;           // units opened at least, and the tokens they hold; units 0: a flat scan
    int room, sink;             // tokens of all chunks at most; rows before the index
};

struct LycheeShared {
    float *q;                   // (R or up to three more,D) the group's queries
    float *w;                   // (R) 1 / their lengths
    float *score;               // (K) or NULL
};

// Carves the block's shared memory -> bytes. Queries come by fours: those that are not there are the
// last one once more.
KV_HD static size_t lychee_carve(LycheeShared *m, char *mem, const LycheeSeek &a) {
    Carved b = { mem, 0 };
    m->q = carve<float>(&b, (size_t)(a.R + 3) / 4 * 4 * a.D);
    m->w = carve<float>(&b, a.R);
    m->score = a.shared ? carve<float>(&b, a.cap) : NULL;
    return b.at;
}

// Fills q and w for KV head g. All threads of a block.
static __device__ void queries_load(const LycheeSeek &a, int g, const LycheeShared &m) {
    const float *q = a.q + (size_t)g * a.R * a.D;
    for (int i = threadIdx.x; i < (a.R + 3) / 4 * 4 * a.D; i += blockDim.x)
        m.q[i] = q[min_int(i / a.D, a.R - 1) * a.D + i % a.D];
    __syncthreads();
    for (int i = threadIdx.x >> 5; i < a.R; i += TOP_WARPS) {    // both half warps the same
        float length = sqrtf(dot_lanes(m.q + i * a.D, m.q + i * a.D, a.D));
        if (!(threadIdx.x & 31)) m.w[i] = 1 / fmaxf(length, 1e-20f);
    }
    __syncthreads();
}

// The score of node `at` of a level, by a pair of lanes. Queries count with length 1.
static __device__ float node_score(const LycheeSeek &a, const LycheeShared &m, const Nodes *u, int at) {
    const char *mu = (const char *)(u->mu + (size_t)at * a.D);
    float top = -INFINITY;
    for (int i0 = 0; i0 < a.R; i0 += DOT_QUERIES) {
        float dot[DOT_QUERIES];
        pair_dots<DT_BF16>(dot, mu, a.D, m.q + (size_t)i0 * a.D);
        KV_UNROLL()
        for (int j = 0; j < DOT_QUERIES; j++) {          // what is there twice does not change the largest
            float v = dot[j] * m.w[min_int(i0 + j, a.R - 1)];
            top = v > top ? v : top;
        }
    }
    return a.bound ? __fadd_rn(top, u->r[at]) : top;             // Eq. 2: q.mu_u + |q| r_u
}

// open_units of kvcomp.c: open (P) = 1 for the `units` units that score best, and for more while they
// hold fewer than `least` tokens. All threads of a block, and every block of a list does it again:
// whoever waited for one block to tell the others would wait longer. A pair of lanes scores a unit, a
// thread opens one, if those before it are too few.
static __device__ void open_units(const LycheeSeek &a, const LycheeShared &m, const Nodes *u, char *open) {
    __shared__ float unit[MOST_UNITS];
    int pair = threadIdx.x >> 1, g = threadIdx.x, before = 0, tokens = 0;
    float S = node_score(a, m, u, min_int(pair, u->n - 1));            // Algorithm 1, line 9
    if (!(threadIdx.x & 1) && pair < u->n) unit[pair] = S;
    __syncthreads();
    for (int i = 0; i < u->n && g < u->n; i++) {
        int first = unit[i] > unit[g] || (unit[i] == unit[g] && i < g);
        if (!u->tokens[i] || !first) continue;
        before++;
        tokens += u->tokens[i];
    }
    if (g < u->n) open[g] = u->tokens[g] && (before < a.units || tokens < a.least);      // Algorithm 1, line 10
    __syncthreads();
}

// The scores of the block's SEEK_UNITS clusters, those from c0 on; -INFINITY for one that is empty
// or lies below a unit that is not opened. score (K). A warp whose 16 clusters are not wanted reads
// none.
static __device__ void cluster_scores(const LycheeSeek &a, const LycheeShared &m, const Tree *t, int c0,
                                      const char *open, float *score) {
    const Nodes *u = &t->fine;
    int c = c0 + (threadIdx.x >> 1), at = min_int(c, u->n - 1);
    int dead = a.units && !open[t->coarse.of[at]], held = u->tokens[at];
    float S = -INFINITY;
    if (!__all_sync(ALL_LANES, dead)) S = node_score(a, m, u, at);     // Algorithm 1, line 13
    if (!(threadIdx.x & 1) && c < u->n) score[c] = dead || !held ? -INFINITY : S;
}

// ---- retrieval: chunks under the budget, and their rows

struct Taken {                  // the clusters whose chunks are read, by the order_key of their scores
    uint32_t key;               // whole: those with a greater key ..
    int part;                   // .. and those with this key that come before cluster `part`
    int stop;                   // of `part`, the chunks before this one
};

// The first half of take_rows of kvcomp.c: the best first, of equal ones the lower number, as long as they fit into
// the room; of the first that does not fit, the chunks up to the first that does not.
// Nothing is sorted: the cluster at which the sum of tokens passes the room is found by its digits,
// as top_key finds a rank, and among clusters of one score by a prefix sum over their numbers. So
// is the chunk at which that cluster stops. x (K): scores. All threads of a block.
static __device__ Taken take_clusters(const LycheeSeek &a, const Nodes *u, const float *x, TopShared *top) {
    const int *start = a.chunks + 1, *of = u->of, *held = u->tokens;
    int M = a.chunks[0], left = a.room + 1, before = 0;          // tokens wanted, until they do not fit
    Taken t = { 0, u->n, M };
    auto tokens = [&](int c) {
        int n = held[c];
        return x[c] > -INFINITY ? n : 0;
    };
    t.key = top_key(x, u->n, tokens, &left, top);                // Algorithm 1, line 14
    if (!t.key) return t;                       // everything fits
    auto equal = [&](int c) {
        int n = tokens(c);
        return order_key(x[c]) == t.key ? n : 0;
    };
    t.part = crossing(u->n, equal, left, &before, top);
    left -= before;
    auto of_part = [&](int j) {
        int n = start[j + 1] - start[j];
        return of[j] == t.part ? n : 0;
    };
    t.stop = crossing(M, of_part, left, &before, top);
    return t;
}

// The list of a KV head: the sinks, the rows of the chunks taken, ascending, and a tail from the first
// token behind the index. All threads of a block.
static __device__ void take_rows(const LycheeSeek &a, const Nodes *u, const float *x, int *list, TopShared *top) {
    const int *start = a.chunks + 1;
    int M = a.chunks[0], *rows = list + LIST_HEAD;
    const int *of = u->of;
    Taken t = take_clusters(a, u, x, top);
    auto chunk = [&](int j) {
        int c = of[j], n = start[j + 1] - start[j];
        uint32_t key = order_key(x[c]);
        int whole = x[c] > -INFINITY && (key > t.key || (key == t.key && c < t.part));
        return whole || (c == t.part && j < t.stop) ? n : 0;
    };
    auto put_chunk = [&](int j, int n, int at) {
        for (int i = 0, r = start[j]; i < n; i++) rows[a.sink + at + i] = r + i;        // Algorithm 1, line 16
    };
    for (int r = threadIdx.x; r < a.sink; r += TOP_THREADS) rows[r] = r;
    int n = spread(M, chunk, put_chunk, top);
    if (threadIdx.x) return;
    list[LIST_ROWS] = a.sink + n;
    list[LIST_TAIL] = start[M];
}

// A decode step of one layer in one launch: the scores of all clusters, those that fit into the
// room, the lists of their rows, and in a step in one go the works that read them.
//   Block   SEEK_UNITS = 256 clusters (blockIdx.x) of a KV head (blockIdx.y). The last block of a list
//           chooses among all its clusters
//   Lane    every second 16 bytes of a centre; a pair of lanes has a centre (pair_dots), and DOT_QUERIES
//           query heads share what is read. A cluster, and then a chunk, while the last block
//           chooses: neighbours side by side, in stretches of the warps, and prefix sums say what
//           comes before
//   Shared  the queries, which all clusters need; which units are open; all scores of the list, if
//           they fit, for the times that the last block goes through them; the bins of a digit
//   Bound   reading the centres (2 K D bytes a KV head); DOT_AHEAD loads of a lane are 32 KB under
//           way in a block. What the last block does is bound by latency: it reads M chunks twice
static __global__ void __launch_bounds__(TOP_THREADS, 1)
cluster_select_kernel(KV_PARAMETER(LycheeSeek) a) {
    KV_DYN_SHARED(char, mem);
    __shared__ TopShared top;
    __shared__ char open[MOST_UNITS];
    __shared__ int last;
    LycheeShared m;
    lychee_carve(&m, mem, a);
    int g = blockIdx.y;
    const Tree *t = &a.trees[g];
    float *score = a.score + (size_t)g * a.cap;
    dependents_launch();
    dependency_wait();
    queries_load(a, g, m);
    if (a.units) open_units(a, m, &t->coarse, open);
    cluster_scores(a, m, t, blockIdx.x * SEEK_UNITS, open, score);
    if (!arrives_last(a.arrived + 1 + g, gridDim.x, &last)) return;

    take_rows(a, &t->fine, seek_scores(m.score, score, a.cap), a.lists + (size_t)g * a.stride, &top);
    seek_end(a.works, a.arrived, a.G, &last);
}

// What the queries q (H,D) of a decode step read of layer l, by the trees of its KV heads: the lists,
// one a KV head, become the layer's views (chosen_room). S (G,K) on the host gets the scores of all
// clusters, if it is not NULL.
void lychee_seek_cuda(Session *s, const Lychee *x, int l, const Tree *trees, const float *q, float *S) {
    int G = s->c->G, K = trees->fine.n;
    LycheeShared m;
    LycheeSeek a;
    memset(&a, 0, sizeof a);
    seek_fill(s, &a, l, q, K, x->sink + chunk_room(x), (size_t)(s->c->H / G + 4) * (s->c->D + 1));
    a.trees = trees_of(s, l);
    a.chunks = (const int *)s->dev->room[ROOM_START].p;          // as the last build or graft left it
    a.bound = x->bound;
    a.units = x->kg;
    a.least = 4 * chunk_room(x);
    a.room = chunk_room(x);
    a.sink = x->sink;
    dim3 grid(blocks(K, SEEK_UNITS), G);
    size_t smem = lychee_carve(&m, NULL, a);
    KV_LAUNCH_WIDE_EARLY(cluster_select_kernel, grid, TOP_THREADS, smem, a);
    if (S) download(S, a.score, (size_t)G * K * sizeof(float));
}

// ==================================================================================================== 12 SONIC INFERENCE
// SONIC: Segmented Optimized Nexus for Information Compression in Key-Value Caching. arXiv
// 2601.21927.
// SONIC has no kernel of its own. A Nexus pass is an ordinary pass whose tokens see less, whose
// rows are multiplied by other matrices, and after which rows are dropped:
//   - the mask is kv_visible of kvcomp.h, one definition for both devices. While Session.rule is
//     not VIS_CAUSAL, every attention kernel asks it for each pair of a query's and a key's token.
//     plan_pass then lists all rows held for a block of queries, later ones too (the exact mask
//     lets a Nexus token see later Nexus tokens), and pass_room makes the pass one span, so that
//     all its rows are there before the first query looks;
//   - a Nexus row has weights of its own (Session.alt). pass_cuda cuts a span into stretches of
//     equal weights (same_weights) and multiplies each by its matrices. on_device uploads a tensor
//     of the adapter when it is first used, into the map Device.alt: the model's own tensors lie in
//     another map, which sessions share. device_reset forgets Device.alt;
//   - the embedding of a Nexus token is a sum that the host makes; embed_cuda uploads it into the
//     token's place;
//   - dropped rows: kv_keep moves up the rows that stay (rows_move_cuda).
// Map:
//   Eq. 2 -> sonic_embed, embed_cuda
//   Eq. 3 -> attend_kernel, decode_kernel, prefill_kernel, window_kernel
//   Eq. 4 -> work_sees, attend_kernel, decode_kernel, prefill_kernel, window_kernel, rows_move_cuda
//   Eq. 5 -> work_sees, attend_kernel, decode_kernel, prefill_kernel, window_kernel
//   Sec. 3.1 -> same_weights, project, mlp_rows
// On the host stay the augmented sequence of Eq. 1 (sonic_enter), the number of Nexus tokens of a
// message, all positions, and the choice of the rows to drop (sonic_drop).

// ==================================================================================================== 13 DILILAZYKV
// DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression (anonymous ACL submission).
// On the device run, at the end of a prefill: the window scores of every query head, the largest
// score among each row's neighbours, and the choice of each query head's own rows (Sec. 3.3). It is the
// chain of section 6 whose heads are not joined:
//   window_device -> pool_kernel -> top_k_kernel, one row and one cap a query head -> views
// kv_compact then drops the rows that no query head of a group reads (rows_move_cuda). In decode the
// views differ from query head to query head: plan_decode makes one work of neighbouring heads that
// read the same rows and a work of its own for every other, so that a block of attend_kernel or
// decode_kernel reads one list.
// Map:
//   Sec. 3.3 -> pooled_scores_cuda, pool_kernel, top_k_rows_cuda, rows_move_cuda
// On the host stay the caps of Algorithm 1 (dililazy_caps), the views, and the scores of Eq. 1: the
// calibration fetches the last prompt row of attention, a window of one query (window_scores_cuda),
// and weighs it there (head_scores). HeadKV (headkv_caps) is the same chain with other caps.

// ==================================================================================================== THE BEST OF THE LOGITS
// What sampling draws from, 40 of the V logits unless --top-k says otherwise and 1 with --temp 0, is
// found here, so that a step brings some hundred bytes to the host instead of half a megabyte, and the
// host need not look through them. The rest of sampling (top-p, min-p, the random number) is sample of
// kvcomp.c, on these few.

// Where the k best of V logits come together: those of every block, and of all.
struct PickPlan {
    BestLogits *all;
    float *x;                   // (blocks,k) of each block, by ascending id
    int *id;                    // (blocks,k)
    int *worst;                 // (blocks)
};

// Carves a PickPlan out of mem -> bytes.
static size_t pick_carve(PickPlan *p, int V, int k, char *mem) {
    Carved b = { mem, 0 };
    PickPlan none;
    int n = blocks(V, BEST_CHUNK);
    if (!p) p = &none;
    p->all = carve<BestLogits>(&b, 1);
    p->x = carve<float>(&b, (size_t)n * k);
    p->id = carve<int>(&b, (size_t)n * k);
    p->worst = carve<int>(&b, n);
    return b.at;
}

// idx = the places of the k largest of x (n), ascending; ties: the lower -> how many there are. All
// threads of a block.
static __device__ int pick_best(const float *x, int n, int k, int *idx, TopShared *m) {
    int most = min_int(k, n), left = most;
    uint32_t key = top_key(x, n, [](int) { return 1; }, &left, m);
    top_write(x, n, key, left, idx, m);
    __syncthreads();
    return most;
}

// *p.all = the k largest of x (V), and the largest bits without a sign of them all.
// Block: BEST_CHUNK logits, which it brings to shared memory; it finds the k best of them and writes
// them down. The last block to arrive finds the k best of what all have written. As ids ascend within
// a block and from block to block, the lower place is the lower id. Bound by latency: two selections
// one behind the other, from shared memory.
static __global__ void __launch_bounds__(TOP_THREADS, 1)
pick_kernel(const float *x, int V, int k, KV_PARAMETER(PickPlan) p, int *arrived) {
    __shared__ TopShared m;
    __shared__ float near[BEST_CHUNK];
    __shared__ int idx[MAX_BEST], last, worst;
    int from = blockIdx.x * BEST_CHUNK, n = min_int(V - from, BEST_CHUNK), own = 0;
    if (!threadIdx.x) worst = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += TOP_THREADS) {
        near[i] = x[from + i];
        own = max_int(own, __float_as_int(near[i]) & 0x7fffffff);
    }
    atomicMax(&worst, own);
    __syncthreads();
    if (!threadIdx.x) p.worst[blockIdx.x] = worst;
    int found = pick_best(near, n, k, idx, &m);
    for (int i = threadIdx.x; i < found; i += TOP_THREADS) {
        int at = min_int(idx[i], n - 1);        // a NaN may have no place
        p.x[blockIdx.x * k + i] = near[at];
        p.id[blockIdx.x * k + i] = from + at;
    }
    if (!arrives_last(arrived, gridDim.x, &last)) return;

    // Every block but the last has k, because MAX_BEST <= BEST_CHUNK.
    int all = (gridDim.x - 1) * k + min_int(k, V - (gridDim.x - 1) * BEST_CHUNK);
    const float *best = seek_scores(all <= BEST_CHUNK ? near : NULL, p.x, all);
    for (int i = threadIdx.x; i < (int)gridDim.x; i += TOP_THREADS) atomicMax(&worst, p.worst[i]);
    found = pick_best(best, all, k, idx, &m);
    for (int i = threadIdx.x; i < found; i += TOP_THREADS) {
        int at = min_int(idx[i], all - 1);
        p.all->best[i] = { best[at], p.id[at] };
    }
    if (!threadIdx.x) {
        p.all->worst = worst;
        p.all->n = found;
    }
}

// The k largest of the logits (V), which lie on the device: one launch, and a copy to Device.picks that
// is only on its way when the function returns.
static void best_logits_cuda(Session *s, const float *logits, int V, int k) {
    PickPlan p;
    pick_carve(&p, V, k, room<char>(s, ROOM_BEST, pick_carve(NULL, V, k, NULL)));
    KV_LAUNCH(pick_kernel, blocks(V, BEST_CHUNK), TOP_THREADS, 0, logits, V, k, p, arrivals(s, 1));
    KV_CUDA(cudaMemcpyAsync(s->dev->picks, p.all, offsetof(BestLogits, best) + k * sizeof(Cand),
                            cudaMemcpyDeviceToHost, kv_stream));
}

// ==================================================================================================== BENCHMARK
// What --bench measures on the device beside whole passes, by the device's own clock: the rate of copies.
enum { RATE_RUNS = 5 };
#ifdef KVCOMP_TEST
enum { COPY_BYTES = 1 << 16 };
#else
static const size_t COPY_BYTES = (size_t)1 << 31;       // of what device_copy_rate copies: 4 GB read and written
#endif

// x (n) in device memory; to be given back with device_drop.
float *device_floats(const float *x, size_t n) {
    char *p = device_new(n * sizeof *x);
    upload(p, x, n * sizeof *x);
    return (float *)p;
}

void device_drop(float *x) {
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    device_free(x);
}

// Bytes a second that a copy inside device memory reads and writes: the best of some runs over
// COPY_BYTES, or over as much as is free.
double device_copy_rate(void) {
    size_t n = COPY_BYTES;
    char *from = NULL, *to = NULL;
    double best = 0;
    while (!device_try(&from, 2 * n, 0)) {
        n /= 2;
        if (n < COPY_BYTES / 64) cuda_fail(cudaErrorMemoryAllocation, "cudaMalloc", __FILE__, __LINE__);
    }
    to = from + n;
    KV_CUDA(cudaMemsetAsync(from, 1, n, kv_stream));
    // Marks in the stream: the time between them is the device's, without the way of a call from the host.
    cudaEvent_t begin = NULL, end = NULL;
    KV_CUDA(cudaEventCreateWithFlags(&begin, cudaEventDefault));
    KV_CUDA(cudaEventCreateWithFlags(&end, cudaEventDefault));
    for (int i = 0; i < RATE_RUNS; i++) {
        float ms;
        KV_CUDA(cudaEventRecord(begin, kv_stream));
        device_copy(to, from, n);
        KV_CUDA(cudaEventRecord(end, kv_stream));
        KV_CUDA(cudaEventSynchronize(end));
        KV_CUDA(cudaEventElapsedTime(&ms, begin, end));
        best = fmax(best, 2.0 * (double)n / (1e-3 * ms));
    }
    KV_CUDA(cudaEventDestroy(begin));
    KV_CUDA(cudaEventDestroy(end));
    device_free(from);
    return best;
}

#ifdef KVCOMP_TEST
#include "test/cuda_doors.h"
#endif
