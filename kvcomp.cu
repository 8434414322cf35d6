// kvcomp.cu - the GPU half of kvcomp. The same sections as kvcomp.c, under the same banners: read kvcomp.c first.
//
// Session.dev != NULL means: KVHead.k and .v are device memory, and everything else of a head (src, pos, lengths)
// stays on the host, which keeps the books. The arithmetic of a pass runs here; hooks get q, k, v and out where they lie, on the
// device. Layouts are kvcomp.h's: x (T,C), q (T,H,D), k v (T,G,D), rows as their Format says.
//
// Kernels use 32-lane warps, full masks, blocks of whole warps, no early return before the last meeting point, and shared
// memory as one dynamic array in templates: then cuda_emu.h can run them on a CPU and check all of that.
#include "kvcomp.h"
#include <math.h>
#include <stdlib.h>
#ifdef __CUDACC__                               // otherwise cuda_emu.h has defined all of this
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
#define KV_LAUNCH(k, grid, block, smem, ...) do { k<<<grid, block, smem, kv_stream>>>(__VA_ARGS__); KV_CUDA(cudaGetLastError()); } while (0)
#define KV_PRAGMA(x) _Pragma(#x)
#define KV_UNROLL(n) KV_PRAGMA(unroll n)        // so that more loads are under way at once
#define KV_DYN_SHARED(T, name) extern __shared__ __align__(128) float4 kv_dyn_[]; T *name = (T *)kv_dyn_
#endif

// A launch with more shared memory than every kernel may have unasked: `smem` is a variable
#define KV_LAUNCH_WIDE(k, grid, block, smem, ...) do { \
    if (smem > 48 * 1024) KV_CUDA(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem)); \
    KV_LAUNCH(k, grid, block, smem, __VA_ARGS__); } while (0)

// ==================================================================================================== 15 HELPERS
// Errors end the program with one line. Everything happens in one stream, in the order it is asked for. Device memory is asked
// for through device_new; room() keeps one growing buffer per purpose, so a decode step allocates nothing once the buffers have grown.

static cudaStream_t kv_stream;                  // made by the first device_open, kept until the program ends

static void cuda_fail(cudaError_t e, const char *call, int line) {
    if (e == cudaErrorMemoryAllocation) die(EXIT_MEMORY, "the GPU is out of memory (kvcomp.cu:%d): a smaller -c, -b or --budget needs less, and so does -ctk/-ctv q8_0", line);
    die(EXIT_RUN, "CUDA: %s (kvcomp.cu:%d: %s)", cudaGetErrorString(e), line, call);
}
#define KV_CUDA(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) cuda_fail(e_, #call, __LINE__); } while (0)
#define KV_BLAS(call) do { int e_ = (int)(call); \
    if (e_) die(EXIT_RUN, "cuBLAS: status %d (kvcomp.cu:%d: %s)", e_, __LINE__, #call); } while (0)

static char *device_new(size_t bytes) {
    char *p = NULL;
    if (bytes) KV_CUDA(cudaMalloc(&p, bytes));
    return p;
}
static void device_free(void *p) { if (p) KV_CUDA(cudaFree(p)); }
static void upload(void *dev, const void *host, size_t n) {      // ordinary host memory: it may be used again at once
    if (n) KV_CUDA(cudaMemcpyAsync(dev, host, n, cudaMemcpyHostToDevice, kv_stream));
}
static void download(void *host, const void *dev, size_t n) {
    if (!n) return;
    KV_CUDA(cudaMemcpyAsync(host, dev, n, cudaMemcpyDeviceToHost, kv_stream));
    KV_CUDA(cudaStreamSynchronize(kv_stream));
}
static void device_copy(void *to, const void *from, size_t n) { if (n) KV_CUDA(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, kv_stream)); }
static int blocks(size_t n, int per) { return (int)((n + per - 1) / per); }

struct Room { char *p; size_t bytes; };
enum { ROOM_X, ROOM_H, ROOM_Q, ROOM_K, ROOM_V, ROOM_OUT, ROOM_GATE, ROOM_UP, ROOM_COS, ROOM_HALF, ROOM_IDS, ROOM_TOK, ROOM_PLAN,
       ROOM_PART, ROOM_STAT, ROOM_COL, ROOM_MOVE, ROOM_STEP, ROOM_WORK, ROOM_ITEM, ROOM_LIST, ROOM_LOGITS, ROOM_POOL, ROOM_TOP, ROOM_TOP_IDX,
       ROOM_START, ROOM_TREES, ROOM_KEYS, ROOM_CENTRES, ROOM_LABELS, ROOM_SEEK, ROOM_RING, ROOM_PROBS, ROOM_PICKS, ROOM_VIEWS, N_ROOMS };

// Host tensors that lie on the device too, found by their host address.
enum { MAP_SIZE = 1 << 13 };
struct Copied { const void *host; char *dev; };
struct Map { Copied at[MAP_SIZE]; int n; };

struct Shared { const Weights *w; int users; Map map; Shared *next; };      // one upload of a model, whatever the number of sessions
static Shared *all_shared;

struct Packed;
struct Rows {
    int *src, n_src;            // copy of KVHead.src, with room for n_src
    float *mass;                // KVHead.mass, as large; NULL without KV_MASS. The host's is a copy: mass_fetch_cuda
    int cap;                    // raw rows there is room for; KVHead.cap says so too, except while rows are being packed
    Packed *pack, *spare; int n_pack, n_spare;      // regions of the packed rows, and the table before: room for so many
    size_t pk_bytes;            // bytes allocated for KVHead.pk (and for .pv)
};
enum { KEPT_NONE, KEPT, KEPT_SEEN };
struct Chosen {                 // views that were chosen on the device and stay there: one list a KV head
    int stride;                 // of a list in ROOM_VIEWS (L,G,stride): LIST_HEAD numbers, its rows
    char *kept;                 // (L) KEPT: the layer's views are lists; SEEN: and the host's views are a copy; NONE: they are the host's
    int *rows;                  // (L,G) pinned: rows of a list less its tail; with the head's length, what is read
    double *row_bytes;          // (L,G) bytes of a row when the list was made
};
struct Read { int n; double each; };     // rows of a list, and the bytes of a row
struct Device {
    cublasHandle_t blas;
    Chosen chosen;
    Room room[N_ROOMS];
    Shared *base;               // the model's tensors
    Map alt;                    // tensors of Session.alt
    struct Rows *held;          // (L*G) what the device holds of a head beside KVHead.k and .v
    int n_tok;                  // tokens ROOM_TOK holds
    struct Step *step;          // pinned: what the next decode step is told ...
    float *logits;              // (V) ... and says; see "a decode step in one go"
    const struct Step *told;    // on the device, where kernels of a step in one go find its lengths; NULL in any other pass: the host gives them
    unsigned settled;           // Session.changes when select hooks were last called in an ordinary step: they have all the memory they need
    unsigned seen;              // Session.changes when what follows was made
    int *first;                 // (L+1) works of the layers before
    int grid, BQ;               // items of a layer, at most; query rows of a work
    struct Read *read; int n_read;      // (LH) what was read in the last step
    cudaGraphExec_t graph;      // the step, or NULL
    int no_graph;               // 1: this device would not take one
};
template <class T> static T *room(Session *s, int which, size_t n) {
    Room *r = &s->dev->room[which];
    if (n * sizeof(T) > r->bytes) {
        device_free(r->p);
        r->bytes = n * sizeof(T) + n * sizeof(T) / 4 + 256;
        r->p = device_new(r->bytes);
        s->changes++;
    }
    return (T *)r->p;
}
static Copied *map_slot(Map *m, const void *host) {              // the entry, or the free one it would take
    size_t i = (size_t)mix64((uint64_t)(uintptr_t)host) % MAP_SIZE;
    while (m->at[i].host && m->at[i].host != host) i = (i + 1) % MAP_SIZE;
    return &m->at[i];
}
// Weights go through two pinned halves: while one is on its way to the device, the other is filled (from a mapped file, that is
// where the disk is read). Ordinary memory would be copied twice, and no faster than the driver's own small buffer.
#ifdef KVCOMP_TEST
enum { STAGE_BYTES = 1000, COPY_BYTES = 1 << 16 };               // so that every test's weights take many turns
#else
enum { STAGE_BYTES = 16 << 20, COPY_BYTES = 1 << 29 };           // of one half; of what device_copy_rate copies
#endif
struct Stage { char *half[2]; cudaEvent_t gone[2]; int turn; size_t sent, all; };

static void stage_open(Stage *g, size_t all) {                   // all: bytes that will come, for the progress line
    memset(g, 0, sizeof *g);
    g->all = all;
    for (int i = 0; i < 2; i++) {
        KV_CUDA(cudaMallocHost((void **)&g->half[i], STAGE_BYTES));
        KV_CUDA(cudaEventCreateWithFlags(&g->gone[i], cudaEventDisableTiming));
    }
    progress_tell("uploading", 0);
}
static void stage_send(Stage *g, char *dev, const char *host, size_t n) {
    for (size_t at = 0, m; at < n; at += m, g->turn ^= 1) {
        m = n - at < STAGE_BYTES ? n - at : (size_t)STAGE_BYTES;
        KV_CUDA(cudaEventSynchronize(g->gone[g->turn]));         // of the copy before the last; at first there is none
        memcpy(g->half[g->turn], host + at, m);
        KV_CUDA(cudaMemcpyAsync(dev + at, g->half[g->turn], m, cudaMemcpyHostToDevice, kv_stream));
        KV_CUDA(cudaEventRecord(g->gone[g->turn], kv_stream));
        g->sent += m;
        progress_tell("uploading", g->sent < g->all ? (double)g->sent / (double)g->all : 0.999);
    }
}
static void stage_close(Stage *g) {
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    for (int i = 0; i < 2; i++) {
        KV_CUDA(cudaEventDestroy(g->gone[i]));
        KV_CUDA(cudaFreeHost(g->half[i]));
    }
    progress_tell("uploading", 1);
}
static const char *map_put(Map *m, const Tensor *t, Stage *g) {  // g: the staging buffer of a whole model, or NULL
    Copied *c = map_slot(m, t->data);
    if (c->host) return c->dev;
    size_t bytes = (size_t)t->rows * t->cols * dtype_size(t->dtype);
    if (++m->n > MAP_SIZE / 2) die(EXIT_RUN, "more than %d tensors on the GPU", MAP_SIZE / 2);
    c->dev = device_new(bytes);
    if (g) stage_send(g, c->dev, (const char *)t->data, bytes);
    else upload(c->dev, t->data, bytes);
    c->host = t->data;
    return c->dev;
}
static void map_clear(Map *m) {
    for (int i = 0; i < MAP_SIZE; i++) device_free(m->at[i].dev);
    memset(m, 0, sizeof *m);
}
static const char *on_device(Session *s, const Tensor *t) {      // NULL when there is no such tensor
    if (!t->data) return NULL;
    Copied *c = map_slot(&s->dev->base->map, t->data);
    return c->host ? c->dev : map_put(&s->dev->alt, t, NULL);
}

// ==================================================================================================== 16 NUMBERS AND KERNELS
// Weights are read as stored. A pass of one token multiplies f32 activations (gemv); more tokens go through cuBLAS, which
// wants both factors alike: the activations go in as two numbers of the weights' type, the rounded value and what rounding
// left over (a bf16 alone moved logits by a hundredth of their size), and the sums are f32.

template <int DT> static __device__ float half_get(uint16_t h) {
#ifdef __CUDACC__
    return DT == DT_F16 ? __half2float(__ushort_as_half(h)) : bf16_to_f32(h);        // the hardware's conversion is exact too
#else
    return DT == DT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
#endif
}
static __device__ float number(const void *p, int dtype, size_t i) {
    if (dtype == DT_F32) return ((const float *)p)[i];
    return dtype == DT_F16 ? half_get<DT_F16>(((const uint16_t *)p)[i]) : half_get<DT_BF16>(((const uint16_t *)p)[i]);
}
// y, x (T,n): one block a row. Blocks of one warp when there are many rows; when there are few, as many as finish soonest.
static __global__ void rmsnorm_kernel(float *y, const float *x, const void *w, int dtype, int n, float eps) {
    __shared__ float part[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const float *from = x + (size_t)blockIdx.x * n;
    float *to = y + (size_t)blockIdx.x * n, ss = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) ss += from[i] * from[i];
    for (int d = 16; d; d >>= 1) ss += __shfl_xor_sync(0xffffffffu, ss, d);
    if (warps > 1) {
        if (!lane) part[warp] = ss;
        __syncthreads();
        ss = 0;
        for (int i = 0; i < warps; i++) ss += part[i];
    }
    float inv = 1 / sqrtf(ss / (float)n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i] * inv * number(w, dtype, i);
}
static __global__ void bias_kernel(float *y, const void *b, int dtype, int cols, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += number(b, dtype, i % cols);
}
static __global__ void swiglu_kernel(float *g, const float *u, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) g[i] = g[i] / (1 + expf(-g[i])) * u[i];
}
// rows of x (T,C) whose id is negative are left alone
static __global__ void embed_kernel(float *x, const void *table, int dtype, const int *ids, int C, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && ids[i / C] >= 0) x[i] = number(table, dtype, (size_t)ids[i / C] * C + i % C);
}
// y = x rounded to f16 or bf16; rest: what that rounding leaves over, rounded
static __global__ void round_kernel(uint16_t *y, const float *x, int dtype, int rest, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i];
    if (rest) a -= dtype == DT_F16 ? f16_to_f32(f32_to_f16(a)) : bf16_to_f32(f32_to_bf16(a));
    y[i] = dtype == DT_F16 ? f32_to_f16(a) : f32_to_bf16(a);
}

// Products of one token. Up to three matrices of one dtype and width that read the same x share a launch: their rows count on from
// one to the next. A warp takes GEMV_ROWS of them, so that every 16 bytes of W are read once, by one lane, and x comes from the cache.
enum { GEMV_ROWS = 4, GEMV_WARPS = 4, GEMV_AHEAD = 2 };
enum { GEMV_STORE, GEMV_ADD, GEMV_SWIGLU };                      // y = Wx + b | y += Wx + b | y = silu(W0 x + b0) (W1 x + b1), rows of both in turn
struct GemvPart { const char *w; const void *bias; float *y; int rows, bias_type; };     // bias NULL: none
struct Gemv { GemvPart part[3]; int rows, cols; };               // rows: of all parts

template <int DT> static __device__ float dot16(uint4 u, const float *x) {       // 16 bytes of W
    float4 a = *(const float4 *)x;
    if (DT == DT_F32) return __int_as_float((int)u.x) * a.x + __int_as_float((int)u.y) * a.y + __int_as_float((int)u.z) * a.z + __int_as_float((int)u.w) * a.w;
    float4 b = *(const float4 *)(x + 4);
    return half_get<DT>((uint16_t)u.x) * a.x + half_get<DT>((uint16_t)(u.x >> 16)) * a.y
         + half_get<DT>((uint16_t)u.y) * a.z + half_get<DT>((uint16_t)(u.y >> 16)) * a.w
         + half_get<DT>((uint16_t)u.z) * b.x + half_get<DT>((uint16_t)(u.z >> 16)) * b.y
         + half_get<DT>((uint16_t)u.w) * b.z + half_get<DT>((uint16_t)(u.w >> 16)) * b.w;
}
template <int MODE> static __device__ int gemv_part(const Gemv &a, int *row) {   // which part row *row of the launch lies in, and where
    int v = *row, i = 0;
    if (MODE == GEMV_SWIGLU) { i = v % 2; v /= 2; }
    else while (v >= a.part[i].rows) v -= a.part[i++].rows;
    *row = v;
    return i;
}
template <int DT, int MODE> static __global__ void __launch_bounds__(GEMV_WARPS * 32) gemv_kernel(const __grid_constant__ Gemv a, const float *x) {
    KV_DYN_SHARED(float, part);                                  // (GEMV_WARPS,GEMV_ROWS,33)
    const int step = DT == DT_F32 ? 4 : 8;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, r0 = (blockIdx.x * GEMV_WARPS + warp) * GEMV_ROWS, wide = a.cols % step == 0;
    const char *w[GEMV_ROWS];
    float sum[GEMV_ROWS];
    for (int j = 0; j < GEMV_ROWS; j++) {
        int r = r0 + j < a.rows ? r0 + j : a.rows - 1, i = gemv_part<MODE>(a, &r);              // past the end: the last row again, for nobody
        w[j] = a.part[i].w + (size_t)r * a.cols * (DT == DT_F32 ? 4 : 2);
        sum[j] = 0;
    }
    for (int c = lane * step; wide && c < a.cols; c += GEMV_AHEAD * 32 * step) {
        uint4 u[GEMV_AHEAD][GEMV_ROWS];                             // all on their way before the first is waited for
        for (int k = 0; k < GEMV_AHEAD; k++) for (int j = 0; j < GEMV_ROWS; j++)
            if (c + k * 32 * step < a.cols) u[k][j] = *(const uint4 *)(w[j] + (size_t)(c + k * 32 * step) * (DT == DT_F32 ? 4 : 2));
        for (int k = 0; k < GEMV_AHEAD; k++) for (int j = 0; j < GEMV_ROWS; j++)
            if (c + k * 32 * step < a.cols) sum[j] += dot16<DT>(u[k][j], x + c + k * 32 * step);
    }
    for (int c = lane; !wide && c < a.cols; c += 32) for (int j = 0; j < GEMV_ROWS; j++) sum[j] += number(w[j], DT, c) * x[c];
    part += warp * GEMV_ROWS * 33;
    for (int j = 0; j < GEMV_ROWS; j++) part[j * 33 + lane] = sum[j];
    __syncwarp();
    int j = lane / 8, e = lane % 8, r = r0 + j < a.rows ? r0 + j : a.rows - 1, i = gemv_part<MODE>(a, &r);      // eight lanes add up one row
    float y = part[j * 33 + e] + part[j * 33 + e + 8] + part[j * 33 + e + 16] + part[j * 33 + e + 24];
    for (int d = 4; d; d >>= 1) y += __shfl_xor_sync(0xffffffffu, y, d);
    if (a.part[i].bias) y += number(a.part[i].bias, a.part[i].bias_type, r);
    float up = __shfl_xor_sync(0xffffffffu, y, 8);
    if (e || r0 + j >= a.rows) return;
    if (MODE == GEMV_STORE) a.part[i].y[r] = y;
    if (MODE == GEMV_ADD)   a.part[i].y[r] += y;
    if (MODE == GEMV_SWIGLU && !i) a.part[0].y[r] = y / (1 + expf(-y)) * up;
}

static void rmsnorm_cuda(Session *s, float *y, const float *x, const Tensor *w, int T, int n) {
    const char *d = on_device(s, w);
    if (d) KV_LAUNCH(rmsnorm_kernel, T, T >= 64 || n < 512 ? 32 : n < 2048 ? 256 : 1024, 0, y, x, d, w->dtype, n, s->c->eps);
}
static void bias_cuda(Session *s, float *y, const Tensor *b, int T, int n) {
    const char *d = on_device(s, b);
    if (d) KV_LAUNCH(bias_kernel, blocks((size_t)T * n, 256), 256, 0, y, d, b->dtype, n, (size_t)T * n);
}
struct Linear { float *y; const Tensor *w, *b; };                // y (T,rows) = x W^T + b
template <int MODE> static void gemv_launch(const Gemv &a, int dtype, const float *x) {
    size_t smem = (size_t)GEMV_WARPS * GEMV_ROWS * 33 * sizeof(float);
    int grid = blocks(a.rows, GEMV_WARPS * GEMV_ROWS);
    if (dtype == DT_F32)      KV_LAUNCH((gemv_kernel<DT_F32, MODE>),  grid, GEMV_WARPS * 32, smem, a, x);
    else if (dtype == DT_F16) KV_LAUNCH((gemv_kernel<DT_F16, MODE>),  grid, GEMV_WARPS * 32, smem, a, x);
    else                      KV_LAUNCH((gemv_kernel<DT_BF16, MODE>), grid, GEMV_WARPS * 32, smem, a, x);
}
template <int MODE> static void gemv_cuda(Session *s, const float *x, const Linear *p, int n) {     // one token, matrices of one dtype
    Gemv a;
    memset(&a, 0, sizeof a);
    a.cols = p[0].w->cols;
    for (int i = 0; i < n; i++) {
        const char *b = p[i].b ? on_device(s, p[i].b) : NULL;
        a.part[i] = { on_device(s, p[i].w), b, p[i].y, p[i].w->rows, b ? p[i].b->dtype : 0 };
        a.rows += p[i].w->rows;
    }
    gemv_launch<MODE>(a, p[0].w->dtype, x);
}
// T > 1 tokens through matrices of one dtype: y (T,O) = x (T,I) W^T + b, or y += when add; W (O,I). Row-major (T,O) is column-major
// (O,T), so cuBLAS computes W^T-transposed times x.
static void gemm_cuda(Session *s, const float *x, int T, const Linear *p, int n, int add) {
    int I = p[0].w->cols, dtype = p[0].w->dtype;
    cudaDataType type = dtype == DT_F32 ? CUDA_R_32F : dtype == DT_F16 ? CUDA_R_16F : CUDA_R_16BF;
    const float one = 1, zero = 0;
    size_t nx = (size_t)T * I;
    uint16_t *half = dtype == DT_F32 ? NULL : room<uint16_t>(s, ROOM_HALF, nx);
    for (int rest = 0; rest < (half ? 2 : 1); rest++) {
        if (half) KV_LAUNCH(round_kernel, blocks(nx, 256), 256, 0, half, x, dtype, rest, nx);
        for (int i = 0; i < n; i++)
            KV_BLAS(cublasGemmEx(s->dev->blas, CUBLAS_OP_T, CUBLAS_OP_N, p[i].w->rows, T, I, &one, on_device(s, p[i].w), type, I, half ? (const void *)half : x, type, I,
                                 rest || add ? &one : &zero, p[i].y, CUDA_R_32F, p[i].w->rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
    for (int i = 0; i < n; i++) if (p[i].b) bias_cuda(s, p[i].y, p[i].b, T, p[i].w->rows);
}
// Products of T tokens with up to three matrices that read the same x (T,I). Matrices stored alike go together.
template <int MODE> static void linear(Session *s, const float *x, int T, const Linear *p, int n) {
    int alike = 1;
    for (int i = 1; i < n; i++) alike &= p[i].w->dtype == p[0].w->dtype;
    if (!alike) for (int i = 0; i < n; i++) linear<MODE == GEMV_SWIGLU ? (int)GEMV_STORE : MODE>(s, x, T, p + i, 1);
    else if (T == 1) { gemv_cuda<MODE>(s, x, p, n); return; }
    else gemm_cuda(s, x, T, p, n, MODE == GEMV_ADD);
    size_t m = (size_t)T * p[0].w->rows;
    if (MODE == GEMV_SWIGLU) KV_LAUNCH(swiglu_kernel, blocks(m, 256), 256, 0, p[0].y, p[1].y, m);
}

// ==================================================================================================== 1 MODEL
// ---- what this section calls before it stands
struct Step;
static void rope_append(Session *s, int l, const Step *step, float *q, const float *k, const float *v, const float *cs, int t0, int n);
static void prefill_device(Session *s, int l, float *out, const float *q, int t0, int n);
static void decode_device(Session *s, int l, float *out, const float *q);
static void lists_tell(Session *s);
static void lists_count(Session *s);
static int step_free(const Session *s);
static int step_settled(Session *s);
static float *step_cuda(Session *s);

// pass_cuda is pass() of kvcomp.c line by line, with the hooks called at the same places; but commits of a decode step come when every layer
// is done, if none of them is KV_QUERY.

#define EACH_PART(s, p) for (Part *p = (s)->part; p < (s)->part + (s)->n_part; p++)

struct Pass { float *x, *q, *k, *v, *out, *h, *gate, *up, *cs; int span, late; };

static int commits_late(const Session *s) {                      // a decode step whose commits may run when every layer is done
    for (int i = 0; i < s->n_part; i++) if (s->part[i].m->commit && s->part[i].m->wants & KV_QUERY) return 0;
    return s->decoding;
}
static Pass pass_room(Session *s, int T) {
    const Config *c = s->c;
    int whole = s->rule != VIS_CAUSAL, b = s->batch < T ? s->batch : T;
    Pass r;
    memset(&r, 0, sizeof r);
    EACH_PART(s, p) whole |= p->m->project || p->m->attend || p->m->commit;
    r.span = whole ? T : b;
    r.late = commits_late(s);
    size_t n = r.span, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    r.x = room<float>(s, ROOM_X, (size_t)T * c->C);        r.cs = room<float>(s, ROOM_COS, (size_t)T * c->D);
    r.q = room<float>(s, ROOM_Q, n * HD);                  r.out = room<float>(s, ROOM_OUT, n * HD);
    r.k = room<float>(s, ROOM_K, n * GD);                  r.v = room<float>(s, ROOM_V, n * GD);
    r.h = room<float>(s, ROOM_H, (size_t)b * c->C);        r.gate = room<float>(s, ROOM_GATE, (size_t)b * c->F);
    r.up = room<float>(s, ROOM_UP, (size_t)b * c->F);
    return r;
}
// Brings the tokens to the device. A prefill sends all of them again: methods may have truncated some. A decode step sends its own,
// or none when step_kernel writes it (last 0).
static void upload_tokens(Session *s, int last) {
    Device *d = s->dev;
    unsigned before = s->changes;                                // room counts a move; a new place may have the old address
    Token *tok = room<Token>(s, ROOM_TOK, s->n_tok);
    int from = s->decoding && s->changes == before && d->n_tok == s->base ? s->base : 0;
    if (last || !from) upload(tok + from, s->tok + from, (size_t)(s->n_tok - from) * sizeof(Token));
    d->n_tok = s->n_tok;
}
void tokens_give_cuda(Session *s) { upload_tokens(s, 1); }
static void embed_cuda(Session *s, float *x, int T) {            // x (T,C)
    int C = s->c->C, *ids = (int *)scratch(s, (size_t)T * sizeof(int)), *dev = room<int>(s, ROOM_IDS, T);
    float *own = (float *)scratch(s, (size_t)C * sizeof(float));
    for (int t = 0; t < T; t++) ids[t] = s->tok[s->base + t].id;
    upload(dev, ids, (size_t)T * sizeof(int));
    KV_LAUNCH(embed_kernel, blocks((size_t)T * C, 256), 256, 0, x, on_device(s, &s->w->embed), s->w->embed.dtype, dev, C, (size_t)T * C);
    for (int t = 0; t < T; t++) {
        if (ids[t] >= 0) continue;
        EACH_PART(s, p) if (p->m->embed) { p->m->embed(s, p->ms, &s->tok[s->base + t], own); break; }
        upload(x + (size_t)t * C, own, (size_t)C * sizeof(float));
    }
}
static void angles(const Session *s, float *cs, int pos) {       // cs (D): cos, then sin, of angles in double as on the CPU
    int D = s->c->D;
    for (int i = 0; i < D / 2; i++) {
        double a = pos * s->w->inv_freq64[i];
        cs[i] = (float)(cos(a) * s->w->rope_scale);
        cs[D / 2 + i] = (float)(sin(a) * s->w->rope_scale);
    }
}
static void upload_angles(Session *s, float *cs, int T) {        // cs (T,D)
    int D = s->c->D;
    float *host = (float *)scratch(s, (size_t)T * D * sizeof(float));
    for (int t = 0; t < T; t++) angles(s, host + (size_t)t * D, s->tok[s->base + t].pos);
    upload(cs, host, (size_t)T * D * sizeof(float));
}
static int same_weights(const Session *s, int t, int end, const Layer **y, int l) {      // as in kvcomp.c
    int n = 0, alt = s->alt && s->tok[s->base + t].kind == TOK_EXTRA;
    while (t + n < end && n < s->batch && (s->alt && s->tok[s->base + t + n].kind == TOK_EXTRA) == alt) n++;
    *y = alt ? &s->alt[l] : &s->w->layer[l];
    return n;
}
static void project_rows(Session *s, const Layer *y, const float *x, float *h, float *q, float *k, float *v, int n) {
    const Config *c = s->c;
    Linear p[] = { { q, &y->wq, &y->bq }, { k, &y->wk, &y->bk }, { v, &y->wv, &y->bv } };
    rmsnorm_cuda(s, h, x, &y->attn_norm, n, c->C);
    linear<GEMV_STORE>(s, h, n, p, 3);
    rmsnorm_cuda(s, q, q, &y->q_norm, n * c->H, c->D);           // per head; nothing when the model has none
    rmsnorm_cuda(s, k, k, &y->k_norm, n * c->G, c->D);
}
static void mlp_rows(Session *s, const Layer *y, float *x, const float *out, const Pass *r, int n) {
    Linear o = { x, &y->wo, &y->bo }, in[] = { { r->gate, &y->gate, &y->bgate }, { r->up, &y->up, &y->bup } }, down = { x, &y->down, &y->bdown };
    linear<GEMV_ADD>(s, out, n, &o, 1);
    rmsnorm_cuda(s, r->h, x, &y->mlp_norm, n, s->c->C);
    linear<GEMV_SWIGLU>(s, r->h, n, in, 2);
    linear<GEMV_ADD>(s, r->gate, n, &down, 1);
}
static void logits_cuda(Session *s, const float *x, float *h) {  // x (C): the last token's; the logits are on their way to dev->logits
    Linear head = { room<float>(s, ROOM_LOGITS, s->c->V), &s->w->head, NULL };
    rmsnorm_cuda(s, h, x, &s->w->norm, 1, s->c->C);
    linear<GEMV_STORE>(s, h, 1, &head, 1);
    KV_CUDA(cudaMemcpyAsync(s->dev->logits, head.y, (size_t)s->c->V * sizeof(float), cudaMemcpyDeviceToHost, kv_stream));
}
static void logits_wait(Session *s) {
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    memcpy(s->logits, s->dev->logits, (size_t)s->c->V * sizeof(float));
}
static double timed(double *sum, double t0) { double t = now(); *sum += t - t0; return t; }
static void note_peak(Session *s) { size_t n = kv_bytes(s); if (n > s->clk.peak) s->clk.peak = n; }

static void attend_rows(Session *s, int l, Pass *r, int t0, int n, int acts) {
    double t = now();
    Part *sparse = NULL;
    EACH_PART(s, p) if (acts && p->m->attend && !sparse) sparse = p;
    if (s->decoding) {
        if (acts) EACH_PART(s, p) if (p->m->select) p->m->select(s, p->ms, l, r->q);
        t = timed(&s->clk.select, t);
        decode_device(s, l, r->out, r->q);
    } else if (sparse) sparse->m->attend(s, sparse->ms, l, r->out, r->q, n);
    else prefill_device(s, l, r->out, r->q, t0, n);
    t = timed(&s->clk.attend, t);                                // without a hook that waits for the device: time to launch, not to run
    if (!s->decoding) note_peak(s);
    if (acts && !r->late) EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, l, r->q, n);
    timed(&s->clk.commit, t);
}
static void commits(Session *s, int from, int T) {               // of layers from.., and of the end of the pass
    double t = now();
    for (int l = from; l <= s->c->L; l++)
        EACH_PART(s, p) if (p->m->commit && (l == s->c->L || layer_acts(s, l))) p->m->commit(s, p->ms, l, NULL, T);
    timed(&s->clk.commit, t);
}
// ---- any other pass
float *pass_cuda(Session *s, int T) {
    if (step_free(s) && step_settled(s)) return step_cuda(s);
    const Config *c = s->c;
    size_t mark = scratch_mark(s), C = c->C, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    Pass r = pass_room(s, T);
    upload_tokens(s, 1);
    embed_cuda(s, r.x, T);
    upload_angles(s, r.cs, T);
    for (int l = 0; l < c->L; l++) {
        int acts = layer_acts(s, l), n;
        const Layer *y;
        if (l && T > 1) progress_tell("prefill", (double)l / c->L);
        for (int t0 = 0, t1; t0 < T; t0 = t1) {                  // spans, as in pass()
            t1 = t0 + r.span < T ? t0 + r.span : T;
            n = t1 - t0;
            for (int t = t0, m; t < t1; t += m) {
                m = same_weights(s, t, t1, &y, l);
                project_rows(s, y, r.x + t * C, r.h, r.q + (t - t0) * HD, r.k + (t - t0) * GD, r.v + (t - t0) * GD, m);
            }
            if (acts) EACH_PART(s, p) if (p->m->project) p->m->project(s, p->ms, l, r.q, r.k, r.v, n);
            kv_reserve(s, l, n);
            rope_append(s, l, NULL, r.q, r.k, r.v, r.cs + (size_t)t0 * c->D, t0, n);
            kv_note(s, l, t0, n);
            attend_rows(s, l, &r, t0, n, acts);
            for (int t = l < c->L - 1 ? t0 : T - 1, m; t < t1; t += m) {         // of the last layer's rows only the very last is read
                m = same_weights(s, t, t1, &y, l);
                mlp_rows(s, y, r.x + t * C, r.out + (t - t0) * HD, &r, m);
            }
        }
    }
    lists_tell(s);
    if (s->decoding) s->dev->settled = s->changes;
    commits(s, r.late ? 0 : c->L, T);
    logits_cuda(s, r.x + (T - 1) * C, r.h);
    logits_wait(s);
    lists_count(s);
    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// ==================================================================================================== 2 CACHE
// The host keeps the books (kvcomp.c section 5) and calls these where bytes of rows are touched.

enum { ROW_F32 = DT_F32, ROW_F16 = DT_F16, ROW_BF16 = DT_BF16, ROW_Q8, Q8_VALUES = 32, Q8_BYTES = Q8_VALUES + 2 };

static int row_kind(const Format *f) {
    return !strcmp(f->name, "f32") ? ROW_F32 : !strcmp(f->name, "f16") ? ROW_F16 : !strcmp(f->name, "bf16") ? ROW_BF16 : ROW_Q8;
}
static __device__ float row_get(const char *row, int kind, int d) {             // element d of a stored row
    if (kind != ROW_Q8) return number(row, kind, d);
    const char *b = row + d / Q8_VALUES * Q8_BYTES;
    return half_get<DT_F16>(*(const uint16_t *)b) * (float)((const signed char *)b)[2 + d % Q8_VALUES];
}
// Stores value x of element d; the 32 lanes of a warp hold the 32 values of one block. Rounds exactly as the Format on the CPU.
static __device__ void row_put(char *row, int kind, int d, int D, float x) {
    if (kind == ROW_Q8) {
        float top = d < D ? fabsf(x) : 0;
        for (int i = 16; i; i >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
        uint16_t half = f32_to_f16(top / 127);
        float scale = f16_to_f32(half), q = scale > 0 ? rintf(x / scale) : 0;
        char *b = row + d / Q8_VALUES * Q8_BYTES;
        if (d % Q8_VALUES == 0) *(uint16_t *)b = half;
        if (d < D) ((signed char *)b)[2 + d % Q8_VALUES] = (signed char)(q > 127 ? 127 : q < -127 ? -127 : q);
        return;
    }
    if (d >= D) return;
    if (kind == ROW_F32) ((float *)row)[d] = x;
    else ((uint16_t *)row)[d] = kind == ROW_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}
enum { MAX_D = 256 };                           // head_dim the kernels can do
struct HeadRef { char *k, *v; int *src; float *mass; const Packed *pack; int packed, len; };  // rows [0,packed) are pack's, k and v hold the others
struct HeadRefs { HeadRef at[MAX_G]; };
static __device__ void load_packed(float *to, const HeadRef &h, int v, int r, int D, int lane);  // section 12
static __device__ float packed_value(const HeadRef &h, int v, int r, int d, int D);

// What a decode step tells the device, written by the host before it and the only thing that changes from one to the next.
struct Step { Token tok; int base; float cs[MAX_D]; int len[]; };               // the token, its index, its angles as in upload_angles, rows of every head (L,G)

static __device__ float turned(const float *x, const float *cs, int d, int D) { // element d of x (D) after RoPE; cs NULL: as it is
    int half = D / 2, i = d < half ? d : d - half;
    if (!cs) return x[d];
    return d < half ? x[d] * cs[d] - x[d + half] * cs[half + d] : x[d] * cs[i] + x[i] * cs[half + i];
}
// One warp a (token, head). Heads 0..H-1: q (n,H,D) turned in place. The G others: k, v (n,G,D) -> rows, k turned. cs (n,D): cos of the
// D/2 angles, then sin. src of row t is tok0 + t. step: where a decode step finds its token and where the rows end, or NULL.
static __global__ void rope_append_kernel(HeadRefs heads, const Step *step, int head0, float *q, const float *k, const float *v, const float *cs, int H, int G, int D,
                                          int kind_k, int kind_v, size_t bytes_k, size_t bytes_v, int tok0) {
    int t = blockIdx.x, head = blockIdx.y, lane = threadIdx.x, g = head - H, whole = D + 31 - (D + 31) % 32;
    if (cs) cs += (size_t)t * D;
    if (g < 0) {
        float *x = q + ((size_t)t * H + head) * D;
        for (int d = lane; d < D / 2; d += 32) {
            float a = turned(x, cs, d, D), b = turned(x, cs, d + D / 2, D);
            x[d] = a; x[d + D / 2] = b;
        }
        return;                                                  // whole warps only
    }
    HeadRef h = heads.at[g];
    const float *from_k = k + ((size_t)t * G + g) * D, *from_v = v + ((size_t)t * G + g) * D;
    int len = step ? step->len[head0 + g] : h.len;
    size_t r = (size_t)len - h.packed + t;
    for (int d = lane; d < whole; d += 32) {                     // whole blocks of 32, so that all lanes meet in row_put
        row_put(h.k + r * bytes_k, kind_k, d, D, d < D ? turned(from_k, cs, d, D) : 0);
        row_put(h.v + r * bytes_v, kind_v, d, D, d < D ? from_v[d] : 0);
    }
    if (lane) return;
    h.src[len + t] = (step ? step->base : tok0) + t;
    if (h.mass) h.mass[len + t] = 0;
}
// to[i] = from[rows[i]], n rows of `bytes` bytes (an even number), two bytes a thread
static __global__ void gather_kernel(char *to, const char *from, const int *rows, size_t bytes, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, half = bytes / 2;
    if (i < n * half) ((uint16_t *)to)[i] = ((const uint16_t *)from)[(size_t)rows[i / half] * half + i % half];
}

// realloc in device memory, in the order of the stream: a decode step that needs more rows does not wait for the device
static char *grown(char *old, size_t have, size_t want) {
    char *p = NULL;
    if (want) KV_CUDA(cudaMallocAsync(&p, want, kv_stream));
    if (want && have) device_copy(p, old, have < want ? have : want);
    if (old) KV_CUDA(cudaFreeAsync(old, kv_stream));
    return p;
}
void rows_resize_cuda(Session *s, KVHead *h, int cap) {          // raw rows there is to be room for; h->packed are counted already
    size_t bk = s->fk->row_bytes(s->c->D), bv = s->fv->row_bytes(s->c->D);
    Rows *r = &s->dev->held[h - s->head];
    int all = h->packed + cap;
    if (cap != r->cap) h->k = grown(h->k, r->cap * bk, cap * bk);
    if (cap != r->cap) h->v = grown(h->v, r->cap * bv, cap * bv);
    if (all != r->n_src) r->src = (int *)grown((char *)r->src, r->n_src * sizeof(int), all * sizeof(int));
    if (all != r->n_src && s->wants & KV_MASS) r->mass = (float *)grown((char *)r->mass, r->n_src * sizeof(float), all * sizeof(float));
    r->cap = cap; r->n_src = all;
}
void rows_free_cuda(Session *s, KVHead *h) {
    Rows *r = &s->dev->held[h - s->head];
    void *all[] = { h->k, h->v, h->pk, h->pv, r->src, r->mass, r->pack, r->spare };
    for (void *p : all) grown((char *)p, 0, 0);
    h->k = h->v = h->pk = h->pv = NULL;
    memset(r, 0, sizeof *r);
}
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
// q and cs NULL: k is turned already, and q is nobody's business
static void rope_append(Session *s, int l, const Step *step, float *q, const float *k, const float *v, const float *cs, int t0, int n) {
    int H = q ? s->c->H : 0, G = s->c->G, D = s->c->D;
    dim3 grid(n, H + G);
    KV_LAUNCH(rope_append_kernel, grid, 32, 0, head_refs(s, l), step, l * G, q, k, v, cs, H, G, D, row_kind(s->fk), row_kind(s->fv),
              s->fk->row_bytes(D), s->fv->row_bytes(D), s->base + t0);
}
void rows_append_cuda(Session *s, int l, const float *k, const float *v, int t0, int n) {       // k, v: device memory, turned; before len grows
    rope_append(s, l, NULL, NULL, k, v, NULL, t0, n);
}
// Of n rows of `bytes` bytes, row i becomes row rows[i]; what follows is free
static void rows_gather(Session *s, char *p, size_t bytes, const int *rows, int n) {
    int first = 0;
    while (first < n && rows[first] == first) first++;           // those stay where they are
    if (first == n) return;
    size_t m = n - first;
    int *list = room<int>(s, ROOM_LIST, m);
    char *to = room<char>(s, ROOM_MOVE, m * bytes);              // threads run in any order, so the rows go through a second buffer
    upload(list, rows + first, m * sizeof(int));
    KV_LAUNCH(gather_kernel, blocks(m * (bytes / 2), 256), 256, 0, to, p, list, bytes, m);
    device_copy(p + first * bytes, to, m * bytes);
}
// Row i becomes row keep[i]. Of the old_packed packed rows n_packed stay, and packing->keep has seen to them: raw rows and sources are left.
void rows_move_cuda(Session *s, KVHead *h, const int *keep, int n, int n_packed, int old_packed) {
    size_t mark = scratch_mark(s);
    int *raw = (int *)scratch(s, (size_t)(n + 1) * sizeof(int));
    for (int i = n_packed; i < n; i++) raw[i - n_packed] = keep[i] - old_packed;
    rows_gather(s, h->k, s->fk->row_bytes(s->c->D), raw, n - n_packed);
    rows_gather(s, h->v, s->fv->row_bytes(s->c->D), raw, n - n_packed);
    Rows *r = &s->dev->held[h - s->head];
    rows_gather(s, (char *)r->src, sizeof(int), keep, n);
    if (r->mass) rows_gather(s, (char *)r->mass, sizeof(float), keep, n);
    scratch_reset(s, mark);
}
// buf (n,D) f32 on the host. Hooks ask from any of their threads
void rows_load_cuda(const Format *f, const char *from, int n, int D, float *buf) {
    char raw[1 << 14];
    size_t bytes = f->row_bytes(D);
    int step = (int)(sizeof raw / bytes);
    for (int r = 0; r < n; r += step) {
        int m = n - r < step ? n - r : step;
        download(raw, from + r * bytes, m * bytes);
        f->unpack(buf + (size_t)r * D, raw, m, D);
    }
}
void rows_store_cuda(char *to, const char *raw, size_t bytes) { upload(to, raw, bytes); }

// ==================================================================================================== 3 ATTENTION
struct Work;
struct Item;
static __device__ void cut_items(Work *work, int n_work, Item *item, int grid);
static __device__ void read_list(Work *w, const int *lists);
// Work is a set of query rows of one KV head that read the same list of rows: in decode the query heads whose views are
// equal, in prefill up to 64 consecutive (token, query head) pairs. Its list is cut into items (split-K); a block takes an
// item through tiles of TILE rows with an online softmax, and join_kernel puts the items of a work together in order.
// Query row j of a work is m = m0 + j: token m / R of the pass, query head g*R + m % R.

enum { TILE = 32, ATTN_WARPS = 4 };

struct Work {                   // n positions: p < n_idx is row idx[p], the others are rows tail + p - n_idx
    int g, m0, m, n, idx, n_idx, tail;
    int low, tok0;              // least position of its query tokens; the token of query row 0 (of m = 0)
    int first, items;           // its items
};
struct Item { int work, p0, p1; };
enum { PIECES = 512 };                                           // about as many items as the device can take at once
KV_HD static size_t chunk_rows(size_t total) {                   // rows of an item, of all works together: two tiles at least
    size_t chunk = (total + PIECES * TILE - 1) / (PIECES * TILE) * TILE;        // at least total / PIECES: no more than PIECES items and one a work
    return chunk < 2 * TILE ? 2 * TILE : chunk;
}
struct Attn {                   // argument of the kernels
    HeadRefs heads;
    const float *q;             // (n,H,D)
    const Token *tok; int tok0; // the session's tokens; index of the first query's
    const Work *work; const Item *item; const int *idx;
    float *part;                // (items,4 QW,D+2): max, sum, sum of p v
    int kind_k, kind_v, rule, window, H, R, D;
    size_t bytes_k, bytes_v;
    float scale;
};

// The rows of positions p..p+n-1 and their tokens. Called by all threads; the lists are complete after the next barrier.
static __device__ void list_rows(const Attn &a, const HeadRef &h, const Work &w, int p, int n, int *row, int *src, int *any) {
    if (threadIdx.x >= TILE) return;
    int i = threadIdx.x, at = p + i, see = 0;
    if (i < n) {
        row[i] = at < w.n_idx ? a.idx[w.idx + at] : w.tail + at - w.n_idx;
        src[i] = h.src[row[i]];
        see = !a.window || a.tok[src[i]].pos > w.low - a.window;
    }
    see = __any_sync(0xffffffffu, see);
    if (!i) *any = see;                                          // 0: the tile lies before every query's sliding window
}
// to (n,stride) = rows row[0..n) as f32
static __device__ void load_tile(float *to, int stride, const Attn &a, const HeadRef &h, int v, const int *row, int n) {
    int lane = threadIdx.x & 31, kind = v ? a.kind_v : a.kind_k;
    for (int j = threadIdx.x >> 5; j < n; j += ATTN_WARPS) {
        if (row[j] < h.packed) { load_packed(to + j * stride, h, v, row[j], a.D, lane); continue; }
        const char *from = (v ? h.v : h.k) + (row[j] - h.packed) * (v ? a.bytes_v : a.bytes_k);
        for (int d = lane; d < a.D; d += 32) to[j * stride + d] = row_get(from, kind, d);
    }
}
// score[i] = q of the warp's row i times the lane's key
template <int QW> static __device__ void score_rows(float *score, const float *q, const float *key, int D) {
    for (int i = 0; i < QW; i++) score[i] = 0;
    for (int d = 0; d < D; d++) {
        float x = key[d];
        for (int i = 0; i < QW; i++) score[i] += q[i * D + d] * x;
    }
}
static size_t attend_smem(int QW, int D) {
    return ((size_t)4 * QW * D + TILE * (D + 1) + 4 * QW * (TILE + 1) + 4 * QW + 2 * TILE + 4) * sizeof(float);
}

// A warp owns QW query rows; a lane owns a key while scoring, 32/QW lanes share a row in the softmax, and a lane owns ND
// dimensions of all QW rows while mixing. ND 0: only max and sum are wanted.
// Folds a scored tile into a running softmax: the 32/QW lanes of a row each hold every (32/QW)-th score of it, from `mine` on, and leave the
// exponentials there. -> what was gathered under the old maximum is to be multiplied by this
template <int QW> static __device__ float fold_scores(float *mine, float *top, float *sum) {
    const int LANES = 32 / QW;
    float high = *top, add = 0;
    for (int j = 0; j < TILE; j += LANES) high = fmaxf(high, mine[j]);
    for (int d = LANES / 2; d; d >>= 1) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, d));
    for (int j = 0; j < TILE; j += LANES) { float e = high == -INFINITY ? 0 : expf(mine[j] - high); mine[j] = e; add += e; }
    for (int d = LANES / 2; d; d >>= 1) add += __shfl_xor_sync(0xffffffffu, add, d);
    float c = high == -INFINITY ? 1 : expf(*top - high);
    *sum = *sum * c + add; *top = high;
    return c;
}
template <int QW, int ND> static __global__ void __launch_bounds__(ATTN_WARPS * 32, 4) attend_kernel(Attn a) {
    KV_DYN_SHARED(float, q);                                     // (4 QW,D)
    const int BQ = ATTN_WARPS * QW, LANES = 32 / QW;
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, *row, *src, *any;
    float *kv = q + BQ * D, *sc = kv + TILE * (D + 1), *fix = sc + BQ * (TILE + 1);     // (TILE,D+1) (BQ,TILE+1) (BQ)
    row = (int *)(fix + BQ); src = row + TILE; any = src + TILE;
    Item it = a.item[blockIdx.x];
    Work w = a.work[it.work];
    HeadRef h = a.heads.at[w.g];
    for (int j = warp; j < BQ; j += ATTN_WARPS) {
        int m = w.m0 + j;
        const float *from = a.q + ((size_t)(m / a.R) * a.H + w.g * a.R + m % a.R) * D;
        for (int d = lane; d < D; d += 32) q[j * D + d] = j < w.m ? from[d] : 0;
    }
    float top = -INFINITY, sum = 0, acc[QW][ND ? ND : 1], score[QW];             // top, sum: of row warp*QW + lane/LANES
    for (int i = 0; i < QW; i++) for (int c = 0; c < ND; c++) acc[i][c] = 0;
    for (int p = it.p0; p < it.p1; p += TILE) {
        int n = it.p1 - p < TILE ? it.p1 - p : TILE;
        __syncthreads();                                         // the last tile is done with
        list_rows(a, h, w, p, n, row, src, any);
        __syncthreads();
        if (!*any) continue;
        load_tile(kv, D + 1, a, h, 0, row, n);
        __syncthreads();
        score_rows<QW>(score, q + warp * QW * D, kv + (lane < n ? lane : 0) * (D + 1), D);
        int first = w.tok0 + w.m0 / a.R, masked = a.rule != VIS_CAUSAL || a.window || src[n - 1] > first;
        for (int i = 0; i < QW; i++) {
            int j = warp * QW + i, t = w.tok0 + (w.m0 + j) / a.R, see = lane < n && j < w.m;
            if (see && masked) see = kv_visible(a.rule, a.window, &a.tok[t], t, &a.tok[src[lane]], src[lane]);
            sc[j * (TILE + 1) + lane] = see ? score[i] * a.scale : -INFINITY;
        }
        __syncwarp();
        float c = fold_scores<QW>(sc + (warp * QW + lane / LANES) * (TILE + 1) + lane % LANES, &top, &sum);
        if (lane % LANES == 0) fix[warp * QW + lane / LANES] = c;
        if (ND) {
            __syncthreads();                                     // the keys are done with
            load_tile(kv, D + 1, a, h, 1, row, n);
            __syncthreads();
            for (int i = 0; i < QW; i++) for (int e = 0; e < ND; e++) acc[i][e] *= fix[warp * QW + i];
            for (int j = 0; j < n; j++)
                for (int e = 0; e < ND; e++) {
                    float x = lane + 32 * e < D ? kv[j * (D + 1) + lane + 32 * e] : 0;
                    for (int i = 0; i < QW; i++) acc[i][e] += sc[(warp * QW + i) * (TILE + 1) + j] * x;
                }
        }
    }
    float *part = a.part + ((size_t)blockIdx.x * BQ + warp * QW) * (D + 2);
    if (lane % LANES == 0) { part[(size_t)(lane / LANES) * (D + 2)] = top; part[(size_t)(lane / LANES) * (D + 2) + 1] = sum; }
    for (int i = 0; i < QW; i++)
        for (int e = 0; e < ND; e++) if (lane + 32 * e < D) part[(size_t)i * (D + 2) + 2 + lane + 32 * e] = acc[i][e];
}
// One block a query row: out (n,H,D) or NULL, stat (n,H,2) = max and sum of its softmax. The warps take turns in the row's items.
static __global__ void __launch_bounds__(ATTN_WARPS * 32) join_kernel(Attn a, int BQ, float *out, float *stat) {
    __shared__ float sh[ATTN_WARPS][MAX_D + 1];
    Work w = a.work[blockIdx.x];
    int j = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m = w.m0 + j, D = a.D;
    if (j >= w.m) return;                                        // the whole block
    size_t stride = (size_t)BQ * (D + 2), row = (size_t)(m / a.R) * a.H + w.g * a.R + m % a.R;
    const float *part = a.part + ((size_t)w.first * BQ + j) * (D + 2);
    float top = -INFINITY, sum = 0, x[MAX_D / 32] = {0};
    for (int c = lane; c < w.items; c += 32) top = fmaxf(top, part[c * stride]);
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    KV_UNROLL(4) for (int c = warp; c < w.items; c += ATTN_WARPS) {
        const float *from = part + c * stride;
        float e = from[0] == -INFINITY ? 0 : expf(from[0] - top);
        sum += e * from[1];
        for (int i = 0; i < MAX_D / 32; i++) if (out && lane + 32 * i < D) x[i] += e * from[2 + lane + 32 * i];
    }
    for (int i = 0; i < MAX_D / 32; i++) if (lane + 32 * i < D) sh[warp][lane + 32 * i] = x[i];
    if (!lane) sh[warp][MAX_D] = sum;
    __syncthreads();
    sum = sh[0][MAX_D] + sh[1][MAX_D] + sh[2][MAX_D] + sh[3][MAX_D];
    for (int d = threadIdx.x; out && d < D; d += blockDim.x) out[row * D + d] = (sh[0][d] + sh[1][d] + sh[2][d] + sh[3][d]) / sum;
    if (!threadIdx.x) { stat[row * 2] = top; stat[row * 2 + 1] = sum; }
}
// ---- decode over plain rows: K and V of one dtype, head_dim a multiple of 8
// The rows go from device memory into registers, 16 bytes a load: LW lanes share a row, 8 dimensions each, so a warp reads 32/LW
// rows at once and U of them one after the other, keys and values together, before it needs any. A lane's sums are its 8
// dimensions of all NR query rows; a score is a sum over the LW lanes. Warps take turns in the item and are joined at its end.
template <int DT> struct Eight { uint4 u[DT == DT_F32 ? 2 : 1]; };               // 8 numbers as stored
template <int DT> static __device__ Eight<DT> load8(const char *p) {
    Eight<DT> e;
    for (int i = 0; i < (DT == DT_F32 ? 2 : 1); i++) e.u[i] = ((const uint4 *)p)[i];
    return e;
}
template <int DT> static __device__ void unpack8(float *x, const Eight<DT> &e) {
    for (int i = 0; i < (DT == DT_F32 ? 2 : 1); i++) {
        unsigned w[4] = { e.u[i].x, e.u[i].y, e.u[i].z, e.u[i].w };
        for (int j = 0; j < 4; j++)
            if (DT == DT_F32) x[4 * i + j] = __int_as_float((int)w[j]);
            else { x[2 * j] = half_get<DT>((uint16_t)w[j]); x[2 * j + 1] = half_get<DT>((uint16_t)(w[j] >> 16)); }
    }
}
// One query row meets U keys: s (U) scores -> probabilities under the new maximum; returns what the older sums shrink to.
template <int LW, int U> static __device__ float decode_softmax(float *s, const int *see, float *top, float *sum) {
    float high = *top, add = 0;
    for (int u = 0; u < U; u++) {
        for (int o = LW / 2; o; o >>= 1) s[u] += __shfl_xor_sync(0xffffffffu, s[u], o);
        if (!see[u]) s[u] = -INFINITY;
        high = fmaxf(high, s[u]);
    }
    for (int o = LW; o < 32; o <<= 1) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, o));
    float c = high == -INFINITY ? 1 : expf(*top - high);
    for (int u = 0; u < U; u++) add += s[u] = high == -INFINITY ? 0 : expf(s[u] - high);
    *sum = *sum * c + add; *top = high;
    return c;
}
// The warps' sums of an item become one: sh (ATTN_WARPS,NR,D+2) -> part (NR,D+2)
static __device__ void decode_join(float *part, const float *sh, int NR, int D) {
    for (int i = threadIdx.x; i < NR * (D + 2); i += blockDim.x) {
        int r = i / (D + 2), e = i % (D + 2), stride = NR * (D + 2);
        const float *from = sh + r * (D + 2);
        float top = -INFINITY, x = 0;
        for (int w = 0; w < ATTN_WARPS; w++) top = fmaxf(top, from[w * stride]);
        for (int w = 0; w < ATTN_WARPS; w++) if (from[w * stride] != -INFINITY) x += expf(from[w * stride] - top) * from[w * stride + e];
        part[i] = e ? x : top;
    }
}
static size_t decode_smem(int LW, int NR, int D) { return ((size_t)ATTN_WARPS * NR * (D + 2) + NR * 8 * LW) * sizeof(float); }
// Four blocks an SM: the 512 items of a long context are one wave on a device of 132
template <int DT, int LW, int NR, int U> static __global__ void __launch_bounds__(ATTN_WARPS * 32, NR == 4 ? 4 : 3) decode_kernel(Attn a) {
    KV_DYN_SHARED(float, q);                                     // (NR,DIM), scaled, zeros behind D and m; then (ATTN_WARPS,NR,D+2)
    const int ROWS = 32 / LW, DIM = 8 * LW;
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = lane % LW * 8, on = d < D, at8 = on ? d * (DT == DT_F32 ? 4 : 2) : 0, see[U];
    float *sh = q + NR * DIM, acc[NR][8], s[NR][U], x[8], top[NR], sum[NR];
    Item it = a.item[blockIdx.x];
    Work w = a.work[it.work];
    HeadRef h = a.heads.at[w.g];
    for (int i = threadIdx.x; i < NR * DIM; i += blockDim.x)
        q[i] = i / DIM < w.m && i % DIM < D ? a.q[(size_t)(w.g * a.R + w.m0 + i / DIM) * D + i % DIM] * a.scale : 0;
    __syncthreads();
    for (int i = 0; i < NR; i++) {
        for (int j = 0; j < 8; j++) acc[i][j] = 0;
        top[i] = -INFINITY; sum[i] = 0;
    }
    for (int p = it.p0 + warp * ROWS * U; p < it.p1; p += ATTN_WARPS * ROWS * U) {
        Eight<DT> k[U], v[U];
        int row[U];
        for (int u = 0; u < U; u++) {                            // first all row numbers, then all rows: two waits, not 2 U
            int at = p + u * ROWS + lane / LW;
            see[u] = at < it.p1;
            if (!see[u]) at = it.p1 - 1;                         // a row that is there, and that nobody sees twice
            row[u] = at < w.n_idx ? a.idx[w.idx + at] : w.tail + at - w.n_idx;
        }
        for (int u = 0; u < U; u++) {
            k[u] = load8<DT>(h.k + row[u] * a.bytes_k + at8);
            v[u] = load8<DT>(h.v + row[u] * a.bytes_v + at8);
        }
        for (int u = 0; u < U; u++)
            if (a.window || a.rule != VIS_CAUSAL) see[u] = see[u] && kv_visible(a.rule, a.window, &a.tok[w.tok0], w.tok0, &a.tok[h.src[row[u]]], h.src[row[u]]);
        for (int u = 0; u < U; u++) {
            unpack8<DT>(x, k[u]);
            for (int i = 0; i < NR; i++) {
                const float4 *qi = (const float4 *)(q + i * DIM + d);
                s[i][u] = qi[0].x * x[0] + qi[0].y * x[1] + qi[0].z * x[2] + qi[0].w * x[3] + qi[1].x * x[4] + qi[1].y * x[5] + qi[1].z * x[6] + qi[1].w * x[7];
            }
        }
        for (int i = 0; i < NR; i++) {
            float c = decode_softmax<LW, U>(s[i], see, &top[i], &sum[i]);
            for (int j = 0; j < 8; j++) acc[i][j] *= c;
        }
        for (int u = 0; u < U; u++) {
            unpack8<DT>(x, v[u]);
            for (int i = 0; i < NR; i++) for (int j = 0; j < 8; j++) acc[i][j] += s[i][u] * x[j];
        }
    }
    for (int i = 0; i < NR; i++) {                               // over the rows the warp held side by side
        for (int o = LW; o < 32; o <<= 1) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], o);
            for (int j = 0; j < 8; j++) acc[i][j] += __shfl_xor_sync(0xffffffffu, acc[i][j], o);
        }
        float *to = sh + (warp * NR + i) * (D + 2);
        if (lane < LW && on) for (int j = 0; j < 8; j++) to[2 + d + j] = acc[i][j];
        if (!lane) { to[0] = top[i]; to[1] = sum[i]; }
    }
    __syncthreads();
    decode_join(a.part + (size_t)blockIdx.x * NR * (D + 2), sh, NR, D);
}

// ---- a long prefill on tensor cores: K and V as stored (f16 or bf16), f32 sums, the online softmax of attend_kernel
// A block holds 64 query rows of a KV head, 16 a warp, and walks through the rows they may see, TILE at a time: K and V come
// into shared memory once a block, scores and probabilities never leave it. Tensor cores multiply 16-bit numbers; q and the
// probabilities are therefore two each, the rounded value and what rounding left over, and every product is two products.
// That costs twice the tensor-core work (as much again as an f16-only kernel does) and buys scores that differ from exact
// ones by 2^-21 |q||k| with f16 rows and 2^-16 |q||k| with bf16 rows, and probabilities right to 2^-24 and 2^-16 of the largest.

// TC_MIN: tokens of a pass; below, split-K keeps more of the device busy. TC_MAX_D: wider sums do not fit into the registers
enum { TC_ROWS = 16 * ATTN_WARPS, TC_MIN = 256, TC_MAX_D = 128 };
namespace wmma = nvcuda::wmma;
template <int DT> struct Half { typedef __half type; };
template <> struct Half<DT_BF16> { typedef __nv_bfloat16 type; };
typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sums;

template <int DT> static __device__ uint16_t half_put(float x) {
#ifdef __CUDACC__
    uint16_t h = DT == DT_F16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return (h & 0x7fff) == (DT == DT_F16 ? 0x7c00 : 0x7f80) ? h - 1 : h;         // the same bits by the hardware: infinity becomes the largest number
#else
    return DT == DT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
#endif
}
template <int DT> static __device__ void half_split(uint16_t *value, uint16_t *rest, float x) {
    *value = half_put<DT>(x);
    *rest = half_put<DT>(x - half_get<DT>(*value));
}
static size_t tensor_smem(int D) { return (size_t)(2 * TC_ROWS + 2 * TILE) * (D + 8) * 2 + (TC_ROWS * (TILE + 5) + 2 * TILE + 4) * sizeof(float); }

// to (TILE,P) = rows row[0..n) as stored, 16 bytes a load; zeros behind them
static __device__ void copy_tile(uint16_t *to, int P, const char *rows, size_t bytes, const int *row, int n, int D) {
    uint4 zero = { 0, 0, 0, 0 };
    for (int i = threadIdx.x, per = D / 8; i < TILE * per; i += blockDim.x) {
        int j = i / per, c = i % per;
        *(uint4 *)(to + j * P + c * 8) = j < n ? *(const uint4 *)(rows + row[j] * bytes + c * 16) : zero;
    }
}
// sc (16,TILE+4) = the warp's 16 rows of q (value and rest, TC_ROWS rows apart) times the tile's keys
template <int DT> static __device__ void tensor_scores(float *sc, const uint16_t *q, const uint16_t *keys, int P, int D) {
    typedef typename Half<DT>::type T;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> x[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> k;
    Sums s[TILE / 16];
    for (int c = 0; c < TILE / 16; c++) wmma::fill_fragment(s[c], 0.f);
    for (int d = 0; d < D; d += 16) {
        for (int rest = 0; rest < 2; rest++) wmma::load_matrix_sync(x[rest], (const T *)(q + rest * TC_ROWS * P + d), P);
        for (int c = 0; c < TILE / 16; c++) {
            wmma::load_matrix_sync(k, (const T *)(keys + c * 16 * P + d), P);
            for (int rest = 0; rest < 2; rest++) wmma::mma_sync(s[c], x[rest], k, s[c]);
        }
    }
    for (int c = 0; c < TILE / 16; c++) wmma::store_matrix_sync(sc + c * 16, s[c], TILE + 4, wmma::mem_row_major);
    __syncwarp();
}
// The softmax of one tile, in place: two lanes share a row of scores and leave its probabilities (value, then rest) where it was.
// see: bit k, this row may see key lane % 2 + 2 k. Returns by how much the row's older sums shrink.
template <int DT> static __device__ float tensor_softmax(float *sc, unsigned see, float scale, float *top, float *sum) {
    int odd = threadIdx.x & 1;
    float *row = sc + (threadIdx.x & 31) / 2 * (TILE + 4), e[TILE / 2], high = *top, add = 0;
    for (int k = 0; k < TILE / 2; k++) {
        e[k] = see >> k & 1 ? row[odd + 2 * k] * scale : -INFINITY;
        high = fmaxf(high, e[k]);
    }
    high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
    __syncwarp();                                                // the scores have been read
    for (int k = 0; k < TILE / 2; k++) {
        float x = high == -INFINITY ? 0 : expf(e[k] - high);
        uint16_t *p = (uint16_t *)row + odd + 2 * k;
        half_split<DT>(p, p + TILE, x);
        add += x;
    }
    add += __shfl_xor_sync(0xffffffffu, add, 1);
    float c = high == -INFINITY ? 1 : expf(*top - high);
    *sum = *sum * c + add; *top = high;
    return c;
}
// acc += p v. Tensor cores round a sum towards zero each time they add to it, which over a long list would pull values with a mean of
// their own that way; so they sum 16 rows from nothing, and f32 adders, which round to nearest, do the rest.
template <int DT, int ND> static __device__ void tensor_mix(Sums *acc, const float *sc, const uint16_t *vals, int P, int D) {
    typedef typename Half<DT>::type T;
    Sums t;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> p[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> v;
    for (int c = 0; c < TILE; c += 16) {
        for (int rest = 0; rest < 2; rest++) wmma::load_matrix_sync(p[rest], (const T *)sc + rest * TILE + c, 2 * (TILE + 4));
        for (int e = 0; e < ND; e++) {
            if (e * 16 >= D) continue;
            wmma::load_matrix_sync(v, (const T *)vals + c * P + e * 16, P);
            wmma::fill_fragment(t, 0.f);
            for (int rest = 0; rest < 2; rest++) wmma::mma_sync(t, p[rest], v, t);
            for (int i = 0; i < 8; i++) acc[e].x[i] += t.x[i];
        }
    }
}
// DK, DV: dtypes of the rows; ND: D / 16, rounded up to 4 or 8. The longest lists start first.
template <int DK, int DV, int ND> static __global__ void __launch_bounds__(ATTN_WARPS * 32, 3) tensor_kernel(Attn a, float *out, float *stat) {
    KV_DYN_SHARED(uint16_t, q);                                  // (2,TC_ROWS,P): value and rest of q
    int D = a.D, P = D + 8, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, at[8];
    uint16_t *keys = q + 2 * TC_ROWS * P, *vals = keys + TILE * P;              // (TILE,P)
    float *sc = (float *)(vals + TILE * P) + warp * 16 * (TILE + 4), *fix = (float *)(vals + TILE * P) + TC_ROWS * (TILE + 4), top = -INFINITY, sum = 0;
    int *row = (int *)(fix + TC_ROWS), *src = row + TILE, *any = src + TILE;
    Work w = a.work[gridDim.x - 1 - blockIdx.x];
    HeadRef h = a.heads.at[w.g];
    int mine = warp * 16 + lane / 2, t = w.tok0 + (w.m0 + mine) / a.R, first = w.tok0 + w.m0 / a.R;     // the lane's row in the softmax, its token
    fix += warp * 16;
    for (int j = warp; j < TC_ROWS; j += ATTN_WARPS) {
        int m = w.m0 + j;
        const float *from = a.q + ((size_t)(m / a.R) * a.H + w.g * a.R + m % a.R) * D;
        for (int d = lane; d < D; d += 32) half_split<DK>(q + j * P + d, q + (TC_ROWS + j) * P + d, j < w.m ? from[d] : 0);
    }
    Sums acc[ND];                                                // which element lies where is the hardware's business: read row numbers to know
    for (int i = lane; i < 256; i += 32) sc[i / 16 * (TILE + 4) + i % 16] = (float)(i / 16);
    __syncwarp();
    wmma::load_matrix_sync(acc[0], sc, TILE + 4, wmma::mem_row_major);
    for (int i = 0; i < 8; i++) at[i] = (int)acc[0].x[i];
    for (int e = 0; e < ND; e++) wmma::fill_fragment(acc[e], 0.f);
    for (int p = 0; p < w.n; p += TILE) {
        int n = w.n - p < TILE ? w.n - p : TILE;
        __syncthreads();                                         // the last tile is done with
        list_rows(a, h, w, p, n, row, src, any);
        __syncthreads();
        if (!*any) continue;
        copy_tile(keys, P, h.k, a.bytes_k, row, n, D);
        copy_tile(vals, P, h.v, a.bytes_v, row, n, D);
        unsigned see = 0;
        int masked = a.rule != VIS_CAUSAL || a.window || src[n - 1] > first;
        for (int k = 0, j = lane & 1; k < TILE / 2; k++, j += 2)
            if (j < n && mine < w.m && (!masked || kv_visible(a.rule, a.window, &a.tok[t], t, &a.tok[src[j]], src[j]))) see |= 1u << k;
        __syncthreads();
        tensor_scores<DK>(sc, q + warp * 16 * P, keys, P, D);
        float c = tensor_softmax<DV>(sc, see, a.scale, &top, &sum);
        if (!(lane & 1)) fix[lane / 2] = c;
        __syncwarp();
        for (int i = 0; i < 8; i++) {
            float f = fix[at[i]];
            for (int e = 0; e < ND; e++) acc[e].x[i] *= f;
        }
        tensor_mix<DV, ND>(acc, sc, vals, P, D);
    }
    __syncthreads();                                             // q is done with: its room takes the sums
    float *to = (float *)q + warp * 16 * (D + 4);                // (16,D+4)
    for (int e = 0; e < ND; e++) if (e * 16 < D) wmma::store_matrix_sync(to + e * 16, acc[e], D + 4, wmma::mem_row_major);
    if (!(lane & 1)) fix[lane / 2] = sum;
    __syncwarp();
    for (int i = 0; i < 16 && warp * 16 + i < w.m; i++) {
        int m = w.m0 + warp * 16 + i;
        size_t r = (size_t)(m / a.R) * a.H + w.g * a.R + m % a.R;
        for (int d = lane; d < D; d += 32) out[r * D + d] = to[i * (D + 4) + d] / fix[i];
        if (lane == 2 * i) { stat[r * 2] = top; stat[r * 2 + 1] = sum; }
    }
}

// ---- sums over queries
// out (H,N): for query head h and position p of its list, the sum over the n queries of softmax probability, times factor.
// One block a (tile of positions, query head): the tile's keys stay, the queries come by. list (H): what each head reads.
static size_t column_smem(int D) { return ((size_t)32 * D + TILE * (D + 1) + ATTN_WARPS * 33 + 2 * TILE + 4) * sizeof(float); }
static __global__ void column_kernel(Attn a, const Work *list, const float *stat, int n_q, int N, float factor, float *out) {
    KV_DYN_SHARED(float, q);                                     // (32,D)
    const int QW = 8;
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, p = blockIdx.x * TILE;
    float *kv = q + 32 * D, *red = kv + TILE * (D + 1), score[QW], sum = 0;
    int *row = (int *)(red + ATTN_WARPS * 33), *src = row + TILE, *any = src + TILE;
    Work w = list[head];
    HeadRef h = a.heads.at[w.g];
    int n = w.n - p < TILE ? w.n - p : TILE;
    if (n <= 0) return;                                          // the same for the whole block
    list_rows(a, h, w, p, n, row, src, any);
    __syncthreads();
    load_tile(kv, D + 1, a, h, 0, row, n);
    for (int t0 = 0; t0 < n_q; t0 += 32) {
        __syncthreads();
        for (int j = warp; j < 32; j += ATTN_WARPS)
            for (int d = lane; d < D; d += 32) q[j * D + d] = t0 + j < n_q ? a.q[((size_t)(t0 + j) * a.H + head) * D + d] : 0;
        __syncthreads();
        score_rows<QW>(score, q + warp * QW * D, kv + (lane < n ? lane : 0) * (D + 1), D);
        for (int i = 0; i < QW; i++) {
            int j = t0 + warp * QW + i, t = w.tok0 + j;
            if (j >= n_q || lane >= n || !kv_visible(a.rule, a.window, &a.tok[t], t, &a.tok[src[lane]], src[lane])) continue;
            const float *st = stat + ((size_t)j * a.H + head) * 2;
            sum += expf(score[i] * a.scale - st[0]) / st[1];
        }
    }
    red[warp * 33 + lane] = sum;
    __syncthreads();
    if (warp == 0 && lane < n) out[(size_t)head * N + p + lane] = (red[lane] + red[33 + lane] + red[66 + lane] + red[99 + lane]) * factor;
}

// ---- the host's side: what to do, in one upload
struct Plan {
    Work *work; int n_work, *idx, n_idx, BQ;
    int plain;                  // for decode_kernel
    const int *lists;           // device memory the works' lists lie in, instead of idx
};
static Plan plan_chosen(Session *s, int l);                                     // section 10c
static __global__ void chosen_kernel(Work *work, int n_work, Item *item, int grid, const int *lists);
static int *lists_of(const Session *s, int l) { return (int *)s->dev->room[ROOM_VIEWS].p + (size_t)l * s->c->G * s->dev->chosen.stride; }       // (G,stride)

static int layer_window(const Session *s, int l) { return s->c->windowed && s->c->windowed[l] ? s->c->window : 0; }
static int block_rows(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 8 : 32; }  // query rows of a block: 4 QW
static int rows_until(const KVHead *h, int tok) {                // rows of tokens up to tok
    int lo = 0, hi = h->len;
    while (lo < hi) { int m = (lo + hi) / 2; if (h->src[m] <= tok) lo = m + 1; else hi = m; }
    return lo;
}
// BQ query rows a work. blind: rows later than a block's queries are listed too; the mask hides them
static Plan plan_prefill(Session *s, int l, int tok0, int n, int BQ, int blind) {
    int G = s->c->G, R = s->c->H / G, rows = n * R, per = blocks(rows, BQ);
    Plan p = { (Work *)scratch(s, (size_t)G * per * sizeof(Work)), 0, NULL, 0, BQ, 0, NULL };
    for (int b = 0; b < per; b++)
        for (int g = 0; g < G; g++) {
            const KVHead *h = kv_head(s, l, g);
            int m0 = b * BQ, m = rows - m0 < BQ ? rows - m0 : BQ, last = tok0 + (m0 + m - 1) / R, low = s->tok[tok0 + m0 / R].pos;
            for (int t = tok0 + m0 / R; t <= last; t++) if (s->tok[t].pos < low) low = s->tok[t].pos;
            p.work[p.n_work++] = { g, m0, m, s->rule == VIS_CAUSAL && !blind ? rows_until(h, last) : h->len, 0, 0, 0, low, tok0, 0, 0 };
        }
    return p;
}
// Whether decode goes through decode_kernel. As with tensor_cores, no method decides this.
static int plain_rows(const Session *s) { return s->fk == s->fv && row_kind(s->fk) != ROW_Q8 && s->c->D % 8 == 0 && !s->packing; }
static int decode_rows(const Session *s) { int R = s->c->H / s->c->G; return plain_rows(s) && R > 4 ? 8 : block_rows(R); }       // query rows of a work
// 0: query heads with equal views did not fit into one work, and the one before has counted their rows; as on the CPU, once
static int reads_first(const Session *s, int l, const Work *w) {
    int h = w->g * (s->c->H / s->c->G) + w->m0;
    return w->m0 && same_as_before(s, l, h) ? 0 : 1;
}
static double row_bytes(const Session *s, const KVHead *h) {     // of a row of K and V, as allocated
    return (double)(h->cap * (s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D)) + 2 * h->pk_bytes) / (h->packed + h->cap);
}
static Plan plan_decode(Session *s, int l) {
    if (s->dev->chosen.kept[l]) return plan_chosen(s, l);
    int H = s->c->H, G = s->c->G, R = H / G, total = 0;
    for (int h = 0; h < H; h++) total += kv_view(s, l, h)->n;
    Plan p = { (Work *)scratch(s, (size_t)H * sizeof(Work)), 0, (int *)scratch(s, (size_t)(total + 1) * sizeof(int)), 0, decode_rows(s), plain_rows(s), NULL };
    for (int h = 0, m; h < H; h += m) {
        const View v = view_of(s, l, h);
        for (m = 1; (h + m) % R && m < p.BQ && same_as_before(s, l, h + m); m++) {}
        int rows = v.n + kv_head(s, l, h / R)->len - v.tail;
        p.work[p.n_work++] = { h / R, h % R, m, rows, p.n_idx, v.n, v.tail, s->tok[s->base].pos, s->base, 0, 0 };
        if (v.n) memcpy(p.idx + p.n_idx, v.idx, (size_t)v.n * sizeof(int));
        p.n_idx += v.n;
    }
    return p;
}
static Attn attn_args(Session *s, int l, const float *q, int tok0) {
    Attn a;
    memset(&a, 0, sizeof a);
    a.heads = head_refs(s, l);
    a.q = q; a.tok = (const Token *)s->dev->room[ROOM_TOK].p; a.tok0 = tok0;
    a.kind_k = row_kind(s->fk); a.kind_v = row_kind(s->fv); a.rule = s->rule; a.window = layer_window(s, l);
    a.H = s->c->H; a.R = s->c->H / s->c->G; a.D = s->c->D;
    a.bytes_k = s->fk->row_bytes(a.D); a.bytes_v = s->fv->row_bytes(a.D);
    a.scale = 1 / sqrtf((float)a.D);
    return a;
}
template <int QW> static void attend_launch(const Attn &a, int n, int mix) {
    size_t smem = attend_smem(QW, a.D);
    if (!mix)            KV_LAUNCH_WIDE((attend_kernel<QW, 0>), n, ATTN_WARPS * 32, smem, a);
    else if (a.D <= 64)  KV_LAUNCH_WIDE((attend_kernel<QW, 2>), n, ATTN_WARPS * 32, smem, a);
    else if (a.D <= 128) KV_LAUNCH_WIDE((attend_kernel<QW, 4>), n, ATTN_WARPS * 32, smem, a);
    else                 KV_LAUNCH_WIDE((attend_kernel<QW, 8>), n, ATTN_WARPS * 32, smem, a);
}
template <int DT, int LW> static void decode_width(const Attn &a, int n, int BQ) {
    size_t smem = decode_smem(LW, BQ, a.D);
    const int U = DT == DT_F32 ? 2 : 4;
    if (BQ == 4) KV_LAUNCH((decode_kernel<DT, LW, 4, U>), n, ATTN_WARPS * 32, smem, a);
    else         KV_LAUNCH((decode_kernel<DT, LW, 8, 2>), n, ATTN_WARPS * 32, smem, a);
}
template <int DT> static void decode_launch(const Attn &a, int n, int BQ) {
    if (a.D <= 64)       decode_width<DT, 8>(a, n, BQ);
    else if (a.D <= 128) decode_width<DT, 16>(a, n, BQ);
    else                 decode_width<DT, 32>(a, n, BQ);
}
// The items of a plan, n blocks of 4, 8 or 32 query rows, and their joining: out (n,H,D) on the device or NULL, stat (n,H,2)
static void run_items(const Attn &a, int n, int n_work, int BQ, int plain, float *out, float *stat) {
    if (plain && n) {
        if (a.kind_k == ROW_F32)      decode_launch<DT_F32>(a, n, BQ);
        else if (a.kind_k == ROW_F16) decode_launch<DT_F16>(a, n, BQ);
        else                          decode_launch<DT_BF16>(a, n, BQ);
    } else if (n) {
        if (BQ == 4)      attend_launch<1>(a, n, out != NULL);
        else if (BQ == 8) attend_launch<2>(a, n, out != NULL);
        else              attend_launch<8>(a, n, out != NULL);
    }
    dim3 grid(n_work, BQ);
    KV_LAUNCH(join_kernel, grid, ATTN_WARPS * 32, 0, a, BQ, out, stat);
}
static int most_items(int pairs, int n_work) { return pairs < PIECES + n_work ? pairs : PIECES + n_work; }      // of works that fill so many pairs of tiles: chunk_rows
// Runs a plan: out (n,H,D) on the device or NULL, stat (n,H,2) -> the argument, for column sums over the same rows.
static Attn attend(Session *s, int l, const float *q, int tok0, Plan *p, float *out, float *stat) {
    Attn a = attn_args(s, l, q, tok0);
    size_t total = 0, n_items = 0;
    int pairs = 0;
    for (int i = 0; i < p->n_work; i++) { total += p->work[i].n; pairs += blocks(p->work[i].n, 2 * TILE); }
    size_t chunk = chunk_rows(total);
    for (int i = 0; i < p->n_work; i++) {
        p->work[i].first = (int)n_items;
        n_items += p->work[i].items = blocks(p->work[i].n, (int)chunk);
    }
    if (p->lists) n_items = most_items(pairs, p->n_work);        // chosen_kernel will see how long the lists are
    size_t at_item = (size_t)p->n_work * sizeof(Work), at_idx = at_item + n_items * sizeof(Item);
    size_t bytes = at_idx + (size_t)p->n_idx * sizeof(int);
    char *host = (char *)scratch(s, bytes + 1), *dev = room<char>(s, ROOM_PLAN, bytes);
    memcpy(host, p->work, at_item);
    Item *item = (Item *)(host + at_item);
    for (int i = 0; i < p->n_work && !p->lists; i++)
        for (int c = 0; c < p->work[i].items; c++) {
            int p0 = c * (int)chunk, p1 = p->work[i].n - p0 < (int)chunk ? p->work[i].n : p0 + (int)chunk;
            *item++ = { i, p0, p1 };
        }
    if (p->n_idx) memcpy(host + at_idx, p->idx, (size_t)p->n_idx * sizeof(int));
    upload(dev, host, p->lists ? at_item : bytes);
    a.work = (const Work *)dev; a.item = (const Item *)(dev + at_item); a.idx = p->lists ? p->lists : (const int *)(dev + at_idx);
    if (p->lists) KV_LAUNCH(chosen_kernel, 1, 32, 0, (Work *)dev, p->n_work, (Item *)(dev + at_item), (int)n_items, p->lists);
    a.part = room<float>(s, ROOM_PART, (n_items + 1) * p->BQ * (a.D + 2));
    run_items(a, (int)n_items, p->n_work, p->BQ, p->plain, out, stat);
    return a;
}
// Whether a pass goes through tensor_kernel. The answer must not depend on the method nor on -b: methods with a budget of
// everything and full attention are then the same arithmetic.
static int tensor_cores(const Session *s) {
    int k = row_kind(s->fk), v = row_kind(s->fv);
    return s->n_tok - s->base >= TC_MIN && s->c->D % 16 == 0 && s->c->D <= TC_MAX_D && !s->packing && (k == ROW_F16 || k == ROW_BF16) && (v == ROW_F16 || v == ROW_BF16);
}
template <int DK, int DV, int ND> static void tensor_launch(const Attn &a, int n, float *out, float *stat) {
    size_t smem = tensor_smem(a.D);
    KV_LAUNCH_WIDE((tensor_kernel<DK, DV, ND>), n, ATTN_WARPS * 32, smem, a, out, stat);
}
template <int DK, int DV> static void tensor_width(const Attn &a, int n, float *out, float *stat) {
    if (a.D <= 64) tensor_launch<DK, DV, 4>(a, n, out, stat);
    else           tensor_launch<DK, DV, 8>(a, n, out, stat);
}
static Attn attend_tensor(Session *s, int l, const float *q, int tok0, Plan *p, float *out, float *stat) {     // a plan of works of TC_ROWS rows
    Attn a = attn_args(s, l, q, tok0);
    size_t bytes = (size_t)p->n_work * sizeof(Work);
    char *dev = room<char>(s, ROOM_PLAN, bytes);
    upload(dev, p->work, bytes);
    a.work = (const Work *)dev;
    if (a.kind_k == ROW_F16)
        if (a.kind_v == ROW_F16) tensor_width<DT_F16, DT_F16>(a, p->n_work, out, stat);
        else                     tensor_width<DT_F16, DT_BF16>(a, p->n_work, out, stat);
    else if (a.kind_v == ROW_F16) tensor_width<DT_BF16, DT_F16>(a, p->n_work, out, stat);
    else                          tensor_width<DT_BF16, DT_BF16>(a, p->n_work, out, stat);
    return a;
}
// Column sums (H,N) on the device: head h reads list[h]. list (H), on the device, uses the idx of a; n_q queries from its tok0 on
static float *column_sums(Session *s, const Attn &a, const Work *list, const float *stat, int n_q, int N, float factor) {
    float *col = room<float>(s, ROOM_COL, (size_t)a.H * N);
    KV_CUDA(cudaMemsetAsync(col, 0, (size_t)a.H * N * sizeof(float), kv_stream));
    size_t smem = column_smem(a.D);
    dim3 grid(blocks(N, TILE), a.H);
    KV_LAUNCH_WIDE(column_kernel, grid, ATTN_WARPS * 32, smem, a, list, stat, n_q, N, factor, col);
    return col;
}
static const Work *whole_lists(Session *s, int l, int tok0) {    // (H) on the device: every row
    int H = s->c->H, R = H / s->c->G;
    Work *list = (Work *)scratch(s, (size_t)H * sizeof(Work)), *dev = room<Work>(s, ROOM_LIST, H);
    for (int h = 0; h < H; h++) list[h] = { h / R, 0, 1, kv_head(s, l, h / R)->len, 0, 0, 0, 0, tok0, 0, 0 };
    upload(dev, list, (size_t)H * sizeof(Work));
    return dev;
}
// KV_MASS: column sums of one query head of every group are added to the mass of the rows it reads
static __global__ void mass_kernel(HeadRefs heads, const Work *list, const int *idx, const float *col, int N, int R, int r) {
    int g = blockIdx.y, h = g * R + r, i = blockIdx.x * blockDim.x + threadIdx.x;
    Work w = list[h];
    if (i < w.n) heads.at[g].mass[i < w.n_idx ? idx[w.idx + i] : w.tail + i - w.n_idx] += col[(size_t)h * N + i];
}
static void add_mass(Session *s, const Attn &a, const Work *list, const float *stat, int n_q, int N) {
    float *col = column_sums(s, a, list, stat, n_q, N, 1);
    dim3 grid(blocks(N, 256), a.H / a.R);
    for (int r = 0; r < a.R; r++) KV_LAUNCH(mass_kernel, grid, 256, 0, a.heads, list, a.idx, col, N, a.R, r);
}
static __global__ void head_works_kernel(const Work *work, int n_work, int R, Work *list) {     // list (H): the work each query head belongs to
    for (int i = threadIdx.x; i < n_work; i += 32)
        for (int j = 0; j < work[i].m; j++) list[work[i].g * R + work[i].m0 + j] = work[i];
}
static int most_rows(const Session *s) {                         // that a head has memory for
    int n = 1;
    for (int i = 0; i < s->c->L * s->c->G; i++) if (s->head[i].packed + s->head[i].cap > n) n = s->head[i].packed + s->head[i].cap;
    return n;
}
static void decode_mass(Session *s, const Attn &a, int n_work, const float *stat) {
    Work *list = room<Work>(s, ROOM_LIST, a.H);
    KV_LAUNCH(head_works_kernel, 1, 32, 0, a.work, n_work, a.R, list);
    add_mass(s, a, list, stat, 1, most_rows(s));
}
void mass_fetch_cuda(Session *s, KVHead *h) { download(h->mass, s->dev->held[h - s->head].mass, (size_t)h->len * sizeof(float)); }
static void prefill_device(Session *s, int l, float *out, const float *q, int t0, int n) {      // out, q (n,H,D) on the device
    size_t mark = scratch_mark(s);
    int tensor = tensor_cores(s);
    Plan p = plan_prefill(s, l, s->base + t0, n, tensor ? TC_ROWS : block_rows(n * (s->c->H / s->c->G)), 0);
    float *stat = room<float>(s, ROOM_STAT, (size_t)n * s->c->H * 2);
    Attn a = tensor ? attend_tensor(s, l, q, s->base + t0, &p, out, stat) : attend(s, l, q, s->base + t0, &p, out, stat);
    if (s->wants & KV_MASS) add_mass(s, a, whole_lists(s, l, s->base + t0), stat, n, kv_longest(s, l));
    scratch_reset(s, mark);
}
static void decode_device(Session *s, int l, float *out, const float *q) {      // out, q (H,D) on the device
    size_t mark = scratch_mark(s);
    Plan p = plan_decode(s, l);
    float *stat = room<float>(s, ROOM_STAT, (size_t)s->c->H * 2);
    Attn a = attend(s, l, q, s->base, &p, out, stat);
    for (int i = 0; i < p.n_work && !p.lists; i++)               // chosen ones are counted at the end of the pass
        s->clk.bytes_attended += reads_first(s, l, &p.work[i]) * p.work[i].n * row_bytes(s, kv_head(s, l, p.work[i].g));
    if (s->wants & KV_MASS) decode_mass(s, a, p.n_work, stat);
    scratch_reset(s, mark);
}
// What hooks call: q and out are the pass's own, on the device.
void attn_prefill_cuda(Session *s, int l, float *out, const float *q, int t0, int n) { prefill_device(s, l, out, q, t0, n); }
void attn_decode_cuda(Session *s, int l, float *out, const float *q) { decode_device(s, l, out, q); }
void host_copy_cuda(float *to, const float *from, size_t n) { download(to, from, n * sizeof(float)); }
// (H,N) on the device: softmax rows of w tokens from tok0 on, summed, times factor. q (w,H,D). Two passes over the keys, max and sum first,
// then columns: memory O(H N), whatever w.
static float *columns_device(Session *s, int l, const float *q, int tok0, int w, float factor) {
    int H = s->c->H, N = kv_longest(s, l);
    size_t mark = scratch_mark(s);
    float *stat = room<float>(s, ROOM_STAT, (size_t)w * H * 2);
    Plan p = plan_prefill(s, l, tok0, w, block_rows(w * (H / s->c->G)), 1);
    Attn a = attend(s, l, q, tok0, &p, NULL, stat);
    float *score = column_sums(s, a, whole_lists(s, l, tok0), stat, w, N, factor);
    scratch_reset(s, mark);
    return score;
}
static float *window_device(Session *s, int l, const float *q, int T, int W) {
    int w = T < W ? T : W;
    return columns_device(s, l, q + (size_t)(T - w) * s->c->H * s->c->D, s->base + T - w, w, 1 / (float)w);
}
void window_scores_cuda(Session *s, int l, const float *q, int T, int W, float *score) {         // score (H,N) on the host
    size_t n = (size_t)s->c->H * kv_longest(s, l);
    if (n) download(score, window_device(s, l, q, T, W), n * sizeof(float));
}


// ---- views that stay on the device. A decode step of Quest or LycheeCluster chooses rows in every layer; if the host had to see them, it
// would wait for the device as often. So a list is left where it was made, with the View's n and tail in front; attention reads it there, and
// only a number of rows comes to the host, with the logits. views_fetch_cuda() brings copies, for whoever asks (kv_meta_bytes, view_rows).
static int *chosen_room(Session *s, int l, int stride) {         // (G,stride) for layer l's lists, to be filled before its attention
    Chosen *c = &s->dev->chosen;
    if (stride != c->stride) { views_fetch_cuda(s); views_drop_cuda(s); }
    c->stride = stride;
    if (!c->kept[l]) s->changes++;
    c->kept[l] = KEPT;
    for (int g = 0; g < s->c->G; g++) c->row_bytes[l * s->c->G + g] = row_bytes(s, kv_head(s, l, g));
    room<int>(s, ROOM_VIEWS, (size_t)s->c->L * s->c->G * stride);
    return lists_of(s, l);
}
static Plan plan_chosen(Session *s, int l) {                     // works of all rows until read_list
    int G = s->c->G, R = s->c->H / G, BQ = decode_rows(s), stride = s->dev->chosen.stride;
    Plan p = { (Work *)scratch(s, (size_t)G * blocks(R, BQ) * sizeof(Work)), 0, NULL, 0, BQ, plain_rows(s), lists_of(s, l) };
    for (int g = 0; g < G; g++)
        for (int m0 = 0; m0 < R; m0 += BQ)
            p.work[p.n_work++] = { g, m0, R - m0 < BQ ? R - m0 : BQ, kv_head(s, l, g)->len, g * stride + LIST_HEAD, 0, 0, s->tok[s->base].pos, s->base, 0, 0 };
    return p;
}
static __global__ void chosen_kernel(Work *work, int n_work, Item *item, int grid, const int *lists) {           // as step_kernel, from the n that plan_chosen gave
    for (int i = threadIdx.x; i < n_work; i += 32) {
        read_list(&work[i], lists);
        work[i].n += work[i].n_idx - work[i].tail;
    }
    cut_items(work, n_work, item, grid);
}
static __global__ void list_numbers_kernel(const int *views, int stride, int n, int *rows) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) rows[i] = views[(size_t)i * stride + LIST_ROWS] - views[(size_t)i * stride + LIST_TAIL];
}
static void lists_tell(Session *s) {                             // after the last layer: how many rows the lists have is on its way to the host
    Chosen *c = &s->dev->chosen;
    int n = s->c->L * s->c->G, any = 0;
    for (int l = 0; l < s->c->L; l++) any |= c->kept[l];
    if (!any) return;
    int *dev = room<int>(s, ROOM_LIST, n);
    KV_LAUNCH(list_numbers_kernel, blocks(n, 128), 128, 0, lists_of(s, 0), c->stride, n, dev);
    KV_CUDA(cudaMemcpyAsync(c->rows, dev, n * sizeof(int), cudaMemcpyDeviceToHost, kv_stream));
}
static void lists_count(Session *s) {                            // after logits_wait: what they cost
    Chosen *c = &s->dev->chosen;
    for (int l = 0; l < s->c->L; l++) {
        for (int i = l * s->c->G; c->kept[l] && i < (l + 1) * s->c->G; i++) s->clk.bytes_attended += (double)(c->rows[i] + s->head[i].len) * c->row_bytes[i];
        if (c->kept[l]) c->kept[l] = KEPT;                       // a copy the host may have is of an older step
    }
}
void views_fetch_cuda(Session *s) {                              // the last step's views to the host
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
    s->changes = changes;                                        // the device goes on reading its lists
    scratch_reset(s, mark);
}
void views_drop_cuda(Session *s) { memset(s->dev->chosen.kept, KEPT_NONE, s->c->L); }

// ==================================================================================================== 4 THE DECODE LOOP
// ---- a decode step in one go
// When no hook has to see or change anything in the middle of a step, the host tells the device the token and the lengths (Step) and
// waits for the logits; everything between depends on nothing but device memory. As long as no memory moves and no view changes
// the launches are the same from step to step, and are one CUDA graph, launched again. Heads grow every KV_STEP tokens: then the
// graph is captured anew.
// Select hooks may take part while they are steady: one that chooses lists on the device (section 10c), or only puts its query by. They
// are called where their launches are captured, and not when those are replayed. What they need memory for, and whether they choose at
// all, shows in an ordinary step: one comes after every change, the step after it is captured.

static int step_free(const Session *s) {
    if (!commits_late(s)) return 0;
    for (int i = 0; i < s->n_part; i++) {
        const Part *p = &s->part[i];
        if (p->m->steady ? !p->m->steady(s, p->ms) : p->m->project || p->m->select) return 0;
    }
    return 1;
}
static int step_settled(Session *s) {                            // once there is room for the new rows: has nothing changed since select was last called?
    int selects = 0;
    for (int l = 0; l < s->c->L; l++) kv_reserve(s, l, 1);
    EACH_PART(s, p) selects |= p->m->select != NULL;
    return !selects || s->changes == s->dev->settled;
}
// Cuts works, whose n are known, into items; what is left of the `grid` items is empty. One warp, and lane i % 32 has work i.
static __device__ void cut_items(Work *work, int n_work, Item *item, int grid) {
    int lane = threadIdx.x, total = 0, before = 0;
    for (int i = lane; i < n_work; i += 32) total += work[i].n;
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(0xffffffffu, total, d);
    int chunk = (int)chunk_rows(total);
    for (int i0 = 0; i0 < n_work; i0 += 32) {
        int i = i0 + lane, rows = i < n_work ? work[i].n : 0, n = (rows + chunk - 1) / chunk, end = n;
        for (int d = 1; d < 32; d <<= 1) { int low = __shfl_up_sync(0xffffffffu, end, d); if (lane >= d) end += low; }
        if (i < n_work) { work[i].first = before + end - n; work[i].items = n; }
        for (int c = 0; c < n; c++) item[before + end - n + c] = { i, c * chunk, rows - c * chunk < chunk ? rows : c * chunk + chunk };
        before += __shfl_sync(0xffffffffu, end, 31);
    }
    for (int i = before + lane; i < grid; i += 32) item[i] = { 0, 0, 0 };
}
static __device__ void read_list(Work *w, const int *lists) {    // lists (G,stride) of a layer: what the list says of a work that reads it
    w->n_idx = lists[w->idx - LIST_HEAD + LIST_ROWS];
    w->tail = lists[w->idx - LIST_HEAD + LIST_TAIL];
}
// What the host's plan_decode and attend do from lengths it knows: a block is a layer, from l0 on. work and item hold its works and
// `grid` items; first (L+1): works of the layers before. All layers at the start of a step; one again when its lists have been chosen.
static __global__ void step_kernel(Token *tok, const Step *step, const int *first, Work *work, Item *item, int G, int grid, int l0, const int *lists) {
    int l = l0 + blockIdx.x, n_work = first[l + 1] - first[l];
    work += first[l]; item += (size_t)l * grid;
    if (!l && !threadIdx.x) tok[step->base] = step->tok;
    for (int i = threadIdx.x; i < n_work; i += 32) {
        Work *w = &work[i];
        if (lists) read_list(w, lists);
        w->n = w->n_idx + step->len[l * G + w->g] + 1 - w->tail;
        w->low = step->tok.pos; w->tok0 = step->base;
    }
    cut_items(work, n_work, item, grid);
}
static size_t step_bytes(const Session *s) { return sizeof(Step) + (size_t)s->c->L * s->c->G * sizeof(int); }

// The works of every layer, and their lists, to the device. Room for items: those of the longest lists the heads' memory allows.
static void step_plan(Session *s) {
    Device *d = s->dev;
    int L = s->c->L, H = s->c->H, n = 0, n_idx = 0;
    size_t total = 1, mark = scratch_mark(s);
    for (int i = 0; i < L * H; i++) total += s->view[i].n;
    size_t bytes = (size_t)L * H * sizeof(Work) + (L + 1 + total) * sizeof(int);
    char *host = (char *)scratch(s, bytes), *dev = room<char>(s, ROOM_WORK, bytes);
    Work *work = (Work *)host;
    int *first = (int *)(work + L * H), *idx = first + L + 1;
    d->grid = 1; d->n_read = 0;
    for (int l = 0; l < L; l++) {
        Plan p = plan_decode(s, l);
        int pieces = 0;
        for (int i = 0; i < p.n_work; i++) {
            Work *w = &p.work[i];
            const KVHead *h = kv_head(s, l, w->g);
            pieces += blocks(w->n_idx + h->packed + h->cap - w->tail, 2 * TILE);
            if (p.lists) continue;                               // lists_count will know their rows
            if (reads_first(s, l, w)) d->read[d->n_read++] = { w->n, row_bytes(s, h) };
            w->idx += n_idx;
        }
        if (most_items(pieces, p.n_work) > d->grid) d->grid = most_items(pieces, p.n_work);
        first[l] = n; d->BQ = p.BQ;
        memcpy(work + n, p.work, (size_t)p.n_work * sizeof(Work));
        if (p.n_idx) memcpy(idx + n_idx, p.idx, (size_t)p.n_idx * sizeof(int));
        n += p.n_work; n_idx += p.n_idx;
    }
    first[L] = n;
    memcpy(d->first, first, (L + 1) * sizeof(int));
    upload(dev, host, bytes);
    scratch_reset(s, mark);
}
// Everything a step needs is there, and is what the graph, if there is one, was made for.
static Pass step_prepare(Session *s) {
    Device *d = s->dev;
    upload_tokens(s, 0);
    Pass r = pass_room(s, 1);
    room<float>(s, ROOM_LOGITS, s->c->V);
    room<float>(s, ROOM_STAT, (size_t)s->c->H * 2);
    room<char>(s, ROOM_STEP, step_bytes(s));
    if (s->wants & KV_MASS) { room<Work>(s, ROOM_LIST, s->c->H); room<float>(s, ROOM_COL, (size_t)s->c->H * most_rows(s)); }
    if (s->changes != d->seen) {
        step_plan(s);
        room<Item>(s, ROOM_ITEM, (size_t)s->c->L * d->grid);
        room<float>(s, ROOM_PART, (size_t)d->grid * d->BQ * (s->c->D + 2));
        if (d->graph) KV_CUDA(cudaGraphExecDestroy(d->graph));
        d->graph = NULL;
        d->seen = d->settled = s->changes;                       // no hook had a part in these rooms
    }
    d->step->tok = s->tok[s->base]; d->step->base = s->base;
    angles(s, d->step->cs, s->tok[s->base].pos);
    for (int i = 0; i < s->c->L * s->c->G; i++) d->step->len[i] = s->head[i].len;
    return r;
}
static void step_launches(Session *s, const Pass *r) {
    Device *d = s->dev;
    const Config *c = s->c;
    Step *step = (Step *)d->room[ROOM_STEP].p;
    Work *work = (Work *)d->room[ROOM_WORK].p;
    Item *item = (Item *)d->room[ROOM_ITEM].p;
    Token *tok = (Token *)d->room[ROOM_TOK].p;
    const int *first = (const int *)(work + c->L * c->H), *idx = first + c->L + 1;
    float *stat = (float *)d->room[ROOM_STAT].p;
    d->told = step;
    KV_CUDA(cudaMemcpyAsync(step, d->step, step_bytes(s), cudaMemcpyHostToDevice, kv_stream));
    KV_LAUNCH(step_kernel, c->L, 32, 0, tok, step, first, work, item, c->G, d->grid, 0, (const int *)NULL);
    KV_LAUNCH(embed_kernel, blocks(c->C, 256), 256, 0, r->x, on_device(s, &s->w->embed), s->w->embed.dtype, &step->tok.id, c->C, (size_t)c->C);
    for (int l = 0; l < c->L; l++) {
        const Layer *y = &s->w->layer[l];
        project_rows(s, y, r->x, r->h, r->q, r->k, r->v, 1);
        rope_append(s, l, step, r->q, r->k, r->v, step->cs, 0, 1);
        if (layer_acts(s, l)) EACH_PART(s, p) if (p->m->select) p->m->select(s, p->ms, l, r->q);
        const int *lists = d->chosen.kept[l] ? lists_of(s, l) : NULL;
        if (lists) KV_LAUNCH(step_kernel, 1, 32, 0, tok, step, first, work, item, c->G, d->grid, l, lists);
        Attn a = attn_args(s, l, r->q, 0);
        a.work = work + d->first[l]; a.item = item + (size_t)l * d->grid; a.idx = lists ? lists : idx; a.part = (float *)d->room[ROOM_PART].p;
        run_items(a, d->grid, d->first[l + 1] - d->first[l], d->BQ, plain_rows(s), r->out, stat);
        if (s->wants & KV_MASS) decode_mass(s, a, d->first[l + 1] - d->first[l], stat);
        mlp_rows(s, y, r->x, r->out, r, 1);
    }
    lists_tell(s);
    logits_cuda(s, r->x, r->h);
    d->told = NULL;
}
// A device that refuses gets the launches one by one from then on. Relaxed: a kernel's first launch may still load its code.
static void step_capture(Session *s, const Pass *r) {
    Device *d = s->dev;
    cudaGraph_t g = NULL;
    d->no_graph = cudaStreamBeginCapture(kv_stream, cudaStreamCaptureModeRelaxed) != cudaSuccess;
    if (!d->no_graph) {
        step_launches(s, r);
        d->no_graph = cudaStreamEndCapture(kv_stream, &g) != cudaSuccess || cudaGraphInstantiateWithFlags(&d->graph, g, 0) != cudaSuccess;
        if (g) KV_CUDA(cudaGraphDestroy(g));
    }
    if (d->no_graph) { d->graph = NULL; (void)cudaGetLastError(); }
}
static float *step_cuda(Session *s) {
    Device *d = s->dev;
    size_t mark = scratch_mark(s);
    Pass r = step_prepare(s);
    if (!d->graph && !d->no_graph) step_capture(s, &r);
    if (d->graph) KV_CUDA(cudaGraphLaunch(d->graph, kv_stream));
    else step_launches(s, &r);
    for (int l = 0; l < s->c->L; l++) kv_note(s, l, 0, 1);       // while the device works
    for (int i = 0; i < d->n_read; i++) s->clk.bytes_attended += ++d->read[i].n * d->read[i].each;       // every list has one row more
    logits_wait(s);
    lists_count(s);
    commits(s, 0, 1);
    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// ---- opening
static Shared *shared_find(const Weights *w) {
    Shared *h = all_shared;
    while (h && h->w != w) h = h->next;
    return h;
}
static Shared *shared_open(const Session *s) {                   // every tensor of the model, uploaded once
    Shared *h = shared_find(s->w);
    if (h) { h->users++; return h; }
    h = (Shared *)xcalloc(1, sizeof *h);
    h->w = s->w; h->users = 1; h->next = all_shared; all_shared = h;
    Stage g;
    stage_open(&g, s->w->bytes);
    const Tensor *top[] = { &s->w->embed, &s->w->norm, &s->w->head };
    for (const Tensor *t : top) map_put(&h->map, t, &g);
    for (int l = 0; l < s->c->L; l++) {
        const Layer *y = &s->w->layer[l];
        const Tensor *all[] = { &y->attn_norm, &y->mlp_norm, &y->wq, &y->wk, &y->wv, &y->wo, &y->bq, &y->bk, &y->bv, &y->bo,
                                &y->q_norm, &y->k_norm, &y->gate, &y->up, &y->down, &y->bgate, &y->bup, &y->bdown };
        for (const Tensor *t : all) if (t->data) map_put(&h->map, t, &g);
    }
    stage_close(&g);
    return h;
}
static void shared_close(Shared *h) {
    if (--h->users) return;
    Shared **p = &all_shared;
    while (*p != h) p = &(*p)->next;
    *p = h->next;
    map_clear(&h->map);
    free(h);
}
// Whether everything will fit is asked before anything is allocated. Beside the plan, a real device holds cuBLAS' workspace, the
// graph of a step and the gaps that growing heads leave in the pool.
#ifdef __CUDACC__
static const size_t DEVICE_SPARE = (size_t)256 << 20;
#else
static const size_t DEVICE_SPARE = 0;
#endif
static int check_memory(const Session *s, char why[512]) {
    size_t unused, total;
    MemoryPlan p = memory_plan(s);
    if (shared_find(s->w)) p.weights = 0;                        // another session has brought them
    cudaError_t e = cudaMemGetInfo(&unused, &total);
    if (e != cudaSuccess) { snprintf(why, 512, "the GPU does not answer (%s); -d cpu works", cudaGetErrorString(e)); return EXIT_RUN; }
    size_t need = p.weights + p.kv + p.parts + p.pass + DEVICE_SPARE;
    if (need <= unused) return 0;
    const char *help = p.weights >= unused ? "the weights alone are too much for this GPU; -d cpu works"
                     : p.weights + p.pass >= unused ? "a smaller -b or -c needs less" : "a smaller -c, --budget with a method that drops rows, or -ctk/-ctv q8_0 needs less";
    snprintf(why, 512, "%.2f GB needed (weights %.2f, KV rows for -c %d %.2f, method %.2f, passes %.2f, CUDA %.2f), %.2f of %.2f GB are free: %s", (double)need * 1e-9,
             (double)p.weights * 1e-9, p.ctx, (double)p.kv * 1e-9, (double)p.parts * 1e-9, (double)p.pass * 1e-9, (double)DEVICE_SPARE * 1e-9, (double)unused * 1e-9, (double)total * 1e-9, help);
    return EXIT_MEMORY;
}
static void stream_open(void) {
    if (kv_stream) return;
    int device;
    cudaMemPool_t pool;
    uint64_t keep = (uint64_t)256 << 20;                         // rows given back stay ours up to this: heads grow every KV_STEP tokens
    KV_CUDA(cudaStreamCreateWithFlags(&kv_stream, cudaStreamNonBlocking));
    KV_CUDA(cudaGetDevice(&device));
    KV_CUDA(cudaDeviceGetDefaultMemPool(&pool, device));
    KV_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
}
int device_there(void) {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
}
int device_bars(const Session *s, char why[512]) {
    int G = s->c->G, D = s->c->D;
    snprintf(why, 512, "at most %d KV heads of an even head_dim up to %d, found %d of %d; -d cpu works", MAX_G, MAX_D, G, D);
    if (D > MAX_D || D % 2 || G > MAX_G) return EXIT_USAGE;
    snprintf(why, 512, "no CUDA device can be used; -d cpu works");
    return !device_there() ? EXIT_USAGE : check_memory(s, why);
}
int device_open(Session *s) {
    char why[512];
    int G = s->c->G, code = device_bars(s, why);
    if (code == EXIT_MEMORY) die(EXIT_MEMORY, "-d cuda: %s", why);
    if (code) { snprintf(s->err, sizeof s->err, "-d cuda: %.480s", why); return -1; }
    stream_open();
    s->dev = (Device *)xcalloc(1, sizeof *s->dev);
    KV_BLAS(cublasCreate(&s->dev->blas));
    KV_BLAS(cublasSetStream(s->dev->blas, kv_stream));
    s->dev->first = (int *)xcalloc((size_t)s->c->L + 1, sizeof(int));
    s->dev->read = (Read *)xcalloc((size_t)s->c->L * s->c->H, sizeof(Read));
    s->dev->seen = s->dev->settled = s->changes - 1;             // nothing is prepared yet
    KV_CUDA(cudaMallocHost((void **)&s->dev->step, step_bytes(s)));
    KV_CUDA(cudaMallocHost((void **)&s->dev->logits, (size_t)s->c->V * sizeof(float)));
    s->dev->held = (Rows *)xcalloc((size_t)s->c->L * G, sizeof(Rows));
    s->dev->chosen.kept = (char *)xcalloc(s->c->L, 1);
    s->dev->chosen.row_bytes = (double *)xmalloc((size_t)s->c->L * G * sizeof(double));
    KV_CUDA(cudaMallocHost((void **)&s->dev->chosen.rows, (size_t)s->c->L * G * sizeof(int)));
    s->dev->base = shared_open(s);
    return 0;
}
void device_reset(Session *s) { map_clear(&s->dev->alt); }       // the parts are opened again: their tensors may be others
void device_close(Session *s) {                                  // after the rows have been given back
    Device *d = s->dev;
    for (int i = 0; i < N_ROOMS; i++) device_free(d->room[i].p);
    map_clear(&d->alt);
    shared_close(d->base);
    KV_BLAS(cublasDestroy(d->blas));
    if (d->graph) KV_CUDA(cudaGraphExecDestroy(d->graph));
    KV_CUDA(cudaFreeHost(d->step));
    KV_CUDA(cudaFreeHost(d->logits));
    KV_CUDA(cudaFreeHost(d->chosen.rows));
    free(d->held); free(d->chosen.kept); free(d->chosen.row_bytes); free(d->first); free(d->read); free(d);
    s->dev = NULL;
}

// ==================================================================================================== 5 STREAMINGLLM
// Nothing of its own: streaming_commit of kvcomp.c decides which rows stay, and kv_keep moves them here.

// ==================================================================================================== 6 BASELINES
// Some scores are exactly the CPU's: their dot products go by lanes of 16 with fused multiply-adds, as in section 4 of kvcomp.c (a CPU with
// FMA has the same bits), and what is left of a sum is added in the same order.

// Where the keys (v 0) or the values (v 1) of a layer lie, to be read one number at a time
struct Column { HeadRefs heads; int v, kind, D; size_t bytes; };
static __device__ float row_value(const Column &a, const HeadRef &h, int r, int d) {
    if (r >= h.packed) return row_get((a.v ? h.v : h.k) + (r - h.packed) * a.bytes, a.kind, d);
    return packed_value(h, a.v, r, d, a.D);
}
static Column column_of(const Session *s, int l, int v) {
    const Format *f = v ? s->fv : s->fk;
    Column a = { head_refs(s, l), v, row_kind(f), s->c->D, f->row_bytes(s->c->D) };
    return a;
}
static Column keys_of(const Session *s, int l) { return column_of(s, l, 0); }
static __device__ float lanes_fold(float sum) {                  // 8+8, 4+4, 2+2, 1+1; every lane of a half warp gets it
    for (int i = 8; i; i >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    return sum;
}
static __device__ float dot_lanes(const float *a, const float *b, int D) {      // dot_f32
    float sum = 0;
    for (int d = threadIdx.x & 15; d < D; d += 16) sum = fmaf(a[d], b[d], sum);
    return lanes_fold(sum);
}
// Selection at the end of a prefill, in links that work on the device and are the same for every method: window_scores (section
// 6) -> pooled_scores -> top_k_rows -> kv_keep. Only the kept lists come to the host, whose books need them. Window scores agree
// with the CPU's to rounding (another order of sums, another exp), so scores closer than that may change places; everything after
// them is exact: maxima, a mean that adds heads in the CPU's order, and a top-k of keys that are integers.

// out[row][j] = max over |t-j| <= width/2 of the joined scores, or the join of the R maxima. x (H,N); row: KV head, or query head when
// nothing is joined. n: candidates a KV head. join_heads and pool_max of kvcomp.c
static __device__ float window_max(const float *x, int j, int n, int width) {
    int a = j > width / 2 ? j - width / 2 : 0, b = width / 2 < n - 1 - j ? j + width / 2 : n - 1;
    float top = x[a];
    for (int t = a + 1; t <= b; t++) top = fmaxf(top, x[t]);
    return top;
}
static __global__ void join_heads_kernel(float *out, const float *x, const int *n, int N, int R, int agg) {
    int g = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= n[g]) return;
    float a = x[(size_t)g * R * N + j];
    for (int r = 1; r < R; r++) { float b = x[((size_t)g * R + r) * N + j]; a = agg == AGG_MAX ? fmaxf(a, b) : a + b; }
    out[(size_t)g * N + j] = agg == AGG_MEAN ? a / (float)R : a;
}
static __global__ void pool_max_kernel(float *out, const float *x, const int *n, int N, int per, int width) {     // per: rows a KV head
    int row = blockIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j < n[row / per]) out[(size_t)row * N + j] = window_max(x + (size_t)row * N, j, n[row / per], width);
}

// top_k of kvcomp.c for many rows at once, a block a row: four passes find the k-th largest key byte by byte; then every warp counts, and
// after that writes, what it takes of its stretch of the row. Indices ascending, ties to the lower one, no float is added.
enum { TOP_THREADS = 512, TOP_WARPS = TOP_THREADS / 32 };
struct TopRow { int n, k; };
static __device__ uint32_t order_key(float x) {
    float y = x + 0.0f;                                          // -0 counts as +0
    uint32_t u = (uint32_t)__float_as_int(y);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
// One warp: the largest byte b with at least `left` keys in bins b..255; *left becomes how many are wanted of bin b
static __device__ int top_bin(const int *bin, int *left) {
    int lane = threadIdx.x & 31, sum = 0;
    for (int i = 0; i < 8; i++) sum += bin[255 - lane * 8 - i];  // lane 0 holds the eight largest bytes
    int before = sum;
    for (int d = 1; d < 32; d *= 2) { int x = __shfl_up_sync(0xffffffffu, before, d); if (lane >= d) before += x; }
    before -= sum;
    int mine = before < *left && before + sum >= *left, b = 255 - lane * 8, rest = *left - before;
    if (mine) while (bin[b] < rest) rest -= bin[b--];
    int from = __popc(__ballot_sync(0xffffffffu, before + sum < *left));        // the one lane that has it
    *left = __shfl_sync(0xffffffffu, rest, from);
    return __shfl_sync(0xffffffffu, b, from);
}
static __global__ void __launch_bounds__(TOP_THREADS) top_k_kernel(const float *x, size_t stride, const TopRow *rows, int *idx, int per, int *count) {
    __shared__ int bin[256], above[TOP_WARPS], equal[TOP_WARPS], found[2];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    TopRow row = rows[blockIdx.x];
    int left = row.k < row.n ? row.k : row.n;
    x += blockIdx.x * stride; idx += (size_t)blockIdx.x * per;
    if (!threadIdx.x) count[blockIdx.x] = left > 0 ? left : 0;
    if (left <= 0) return;                                       // the same for the whole block
    uint32_t key = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();                                         // the last pass's bins have been read
        if (threadIdx.x < 256) bin[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < row.n; i += TOP_THREADS) {
            uint32_t u = order_key(x[i]);
            if (((uint64_t)(u ^ key) >> (shift + 8)) == 0) atomicAdd(&bin[u >> shift & 255], 1);
        }
        __syncthreads();
        if (!warp) { int b = top_bin(bin, &left); if (!lane) { found[0] = b; found[1] = left; } }
        __syncthreads();
        key |= (uint32_t)found[0] << shift; left = found[1];
    }
    int each = (row.n + TOP_THREADS - 1) / TOP_THREADS * 32, from = warp * each, to = from + each, n_above = 0, n_equal = 0;
    for (int i = from; i < to; i += 32) {
        uint32_t u = i + lane < row.n ? order_key(x[i + lane]) : 0;             // 0 is no number's key but that of a NaN
        n_above += __popc(__ballot_sync(0xffffffffu, u > key));
        n_equal += __popc(__ballot_sync(0xffffffffu, u == key));
    }
    if (!lane) { above[warp] = n_above; equal[warp] = n_equal; }
    __syncthreads();
    n_above = n_equal = 0;
    for (int w = 0; w < warp; w++) { n_above += above[w]; n_equal += equal[w]; }
    for (int i = from; i < to; i += 32) {
        uint32_t u = i + lane < row.n ? order_key(x[i + lane]) : 0;
        unsigned more = __ballot_sync(0xffffffffu, u > key), same = __ballot_sync(0xffffffffu, u == key), below = (1u << lane) - 1;
        int a = n_above + __popc(more & below), e = n_equal + __popc(same & below);
        if (u > key || (u == key && e < left)) idx[a + (e < left ? e : left)] = i + lane;
        n_above += __popc(more); n_equal += __popc(same);
    }
}
// x (S,stride), idx (S,per), count (S) on the device; rows (S) on the host, or NULL: a kernel has put them into ROOM_LIST
static void top_k_device(Session *s, const float *x, int S, size_t stride, const TopRow *rows, int *idx, int per, int *count) {
    TopRow *dev = room<TopRow>(s, ROOM_LIST, S);
    if (rows) upload(dev, rows, S * sizeof(TopRow));
    KV_LAUNCH(top_k_kernel, S, TOP_THREADS, 0, x, stride, dev, idx, per, count);
}
void top_k_rows_cuda(Session *s, const float *x, int S, size_t stride, const int *n, const int *k, int *idx, int per, int *count) {
    size_t mark = scratch_mark(s);
    int most = 0;                                                // of one row
    TopRow *rows = (TopRow *)scratch(s, S * sizeof(TopRow));
    for (int i = 0; i < S; i++) { rows[i] = { n[i], k[i] }; if (n[i] && k[i] > most) most = k[i] < n[i] ? k[i] : n[i] > most ? n[i] : most; }
    size_t all = (size_t)S * most;
    int *dev = room<int>(s, ROOM_TOP_IDX, all + S), *host = (int *)scratch(s, (all + S) * sizeof(int));
    top_k_device(s, x, S, stride, rows, dev, most, dev + all);
    download(host, dev, (all + S) * sizeof(int));
    memcpy(count, host + all, S * sizeof(int));
    for (int i = 0; i < S; i++) memcpy(idx + (size_t)i * per, host + (size_t)i * most, count[i] * sizeof(int));
    scratch_reset(s, mark);
}
// pooled_scores of kvcomp.c -> (G or H,N) on the device
float *pooled_scores_cuda(Session *s, int l, const float *q, int T, int W, const int *n, int agg, int width, int order) {
    int H = s->c->H, G = s->c->G, R = H / G, N = kv_longest(s, l);
    float *x = window_device(s, l, q, T, W), *pool = room<float>(s, ROOM_POOL, (size_t)(H + G) * N), *one = pool + (size_t)H * N;
    int *dev = room<int>(s, ROOM_TOP, G);
    dim3 heads(blocks(N, 256), H), groups(blocks(N, 256), G);
    upload(dev, n, G * sizeof(int));
    if (order == JOIN_POOL) {
        KV_LAUNCH(join_heads_kernel, groups, 256, 0, one, x, dev, N, R, agg);
        KV_LAUNCH(pool_max_kernel, groups, 256, 0, pool, one, dev, N, 1, width);
        return pool;
    }
    KV_LAUNCH(pool_max_kernel, heads, 256, 0, pool, x, dev, N, R, width);
    if (order == POOL_JOIN) KV_LAUNCH(join_heads_kernel, groups, 256, 0, one, pool, dev, N, R, agg);
    return order == POOL_JOIN ? one : pool;
}
float *join_rows_cuda(Session *s, const float *score, const int *n, int N, int agg) {            // (H,N) -> (G,N)
    int G = s->c->G, *dev = room<int>(s, ROOM_TOP, G);
    float *one = room<float>(s, ROOM_POOL, (size_t)G * N);
    dim3 grid(blocks(N, 256), G);
    upload(dev, n, G * sizeof(int));
    KV_LAUNCH(join_heads_kernel, grid, 256, 0, one, score, dev, N, s->c->H / G, agg);
    return one;
}
char *near_grow_cuda(char *old, size_t have, size_t want) { return grown(old, have, want); }
char *near_zero_cuda(size_t n) {
    char *p = grown(NULL, 0, n);
    KV_CUDA(cudaMemsetAsync(p, 0, n, kv_stream));
    return p;
}
void near_free_cuda(char *p) { grown(p, 0, 0); }

// ---- ExpectedAttention: sums of queries, exponents of the scores and lengths of values, to the CPU's bit
enum { MOMENT_TILE = 16 };
// sum (H,D), outer (H,D,D) += those of q (T,H,D). A block has 16 x 16 numbers of outer, each of its threads one; products of two floats are exact
// in double, and the tokens come in order.
static __global__ void moments_kernel(double *sum, double *outer, const float *q, const Token *tok, int sink, int T, int H, int D) {
    __shared__ float row[MOMENT_TILE][MOMENT_TILE + 1], col[MOMENT_TILE][MOMENT_TILE + 1];
    int x = threadIdx.x, y = threadIdx.y, h = blockIdx.z, i0 = blockIdx.y * MOMENT_TILE, j0 = blockIdx.x * MOMENT_TILE, i = i0 + y, j = j0 + x;
    int mine = i < D && j < D, sums = mine && !j;
    double *to = outer + ((size_t)h * D + i) * D + j, a = mine ? *to : 0, b = sums ? sum[(size_t)h * D + i] : 0;
    for (int t0 = 0; t0 < T; t0 += MOMENT_TILE) {
        const float *p = q + ((size_t)(t0 + y) * H + h) * D;     // thread (x,y) brings numbers i0 + x and j0 + x of token t0 + y
        int counts = t0 + y < T && tok[t0 + y].pos >= sink;      // a 0 adds nothing, like a query that does not count
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
void moments_add_cuda(Session *s, double *sum, double *outer, const float *q, int T, int sink) {
    dim3 grid(blocks(s->c->D, MOMENT_TILE), blocks(s->c->D, MOMENT_TILE), s->c->H), block(MOMENT_TILE, MOMENT_TILE);
    KV_LAUNCH(moments_kernel, grid, block, 0, sum, outer, q, (const Token *)s->dev->room[ROOM_TOK].p + s->base, sink, T, s->c->H, s->c->D);
}
// z (H,N): mu.k / sqrt(D) + k^T Sg k / 2D. mu (H,D), Sg (H,D,D). A half warp a row
static __global__ void expected_kernel(Column a, const float *mu, const float *cov, float f_mu, float f_cov, int R, int N, float *z) {
    KV_DYN_SHARED(float, keys);                                  // (rows of a block,D)
    int h = blockIdx.y, D = a.D, half = threadIdx.x >> 4, r = blockIdx.x * (blockDim.x / 16) + half;
    HeadRef hd = a.heads.at[h / R];
    float *k = keys + half * D;
    for (int d = threadIdx.x & 15; d < D; d += 16) k[d] = r < hd.len ? row_value(a, hd, r, d) : 0;
    __syncwarp();
    double sum = __fmul_rn(dot_lanes(mu + (size_t)h * D, k, D), f_mu);
    for (int d = 0; d < D; d++) sum += (double)k[d] * __fmul_rn(dot_lanes(cov + ((size_t)h * D + d) * D, k, D), f_cov);
    if (!(threadIdx.x & 15) && r < hd.len) z[(size_t)h * N + r] = (float)sum;
}
static __global__ void squares_kernel(Column a, int N, float *out) {             // out (G,N): v.v
    KV_DYN_SHARED(float, rows);
    int g = blockIdx.y, half = threadIdx.x >> 4, r = blockIdx.x * (blockDim.x / 16) + half;
    HeadRef hd = a.heads.at[g];
    float *v = rows + half * a.D;
    for (int d = threadIdx.x & 15; d < a.D; d += 16) v[d] = r < hd.len ? row_value(a, hd, r, d) : 0;
    __syncwarp();
    float sum = dot_lanes(v, v, a.D);
    if (!(threadIdx.x & 15) && r < hd.len) out[(size_t)g * N + r] = sum;
}
// All on the host but the rows: mu (H,D), cov (H,D,D) -> z (H,N), squares (G,N)
void expected_scores_cuda(Session *s, int l, const float *mu, const float *cov, float *z, float *squares, int N) {
    int H = s->c->H, G = s->c->G, D = s->c->D;
    size_t n_mu = (size_t)H * D, n_cov = n_mu * D, n_z = (size_t)H * N, n_sq = (size_t)G * N;
    float *dev = room<float>(s, ROOM_POOL, n_mu + n_cov + n_z + n_sq), *dev_z = dev + n_mu + n_cov;
    upload(dev, mu, n_mu * sizeof(float));
    upload(dev + n_mu, cov, n_cov * sizeof(float));
    dim3 queries(blocks(N, 8), H), heads(blocks(N, 8), G);
    KV_LAUNCH(expected_kernel, queries, 128, 8 * D * sizeof(float), keys_of(s, l), dev, dev + n_mu, 1 / sqrtf((float)D), 1 / (2 * (float)D), H / G, N, dev_z);
    KV_LAUNCH(squares_kernel, heads, 128, 8 * D * sizeof(float), column_of(s, l, 1), N, dev_z + n_z);
    download(z, dev_z, n_z * sizeof(float));
    download(squares, dev_z + n_z, n_sq * sizeof(float));
}
// ---- AdaKV: adakv_shares of kvcomp.c. The sums are of integers, so their order does not matter. One block a head
static __global__ void __launch_bounds__(TOP_THREADS) shares_kernel(float *all, const float *score, int N, const TopRow *rows, const int *idx, int per) {
    __shared__ int64_t part[2][TOP_WARPS];
    int g = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = rows[g].n, k = rows[g].k < n ? rows[g].k : n, from = 0;
    const float *x = score + (size_t)g * N;
    int64_t sum = 0, best = 0;
    for (int i = 0; i < g; i++) from += rows[i].n;
    for (int i = threadIdx.x; i < n; i += TOP_THREADS) sum += fixed_mass(x[i]);
    for (int i = threadIdx.x; i < k; i += TOP_THREADS) best += fixed_mass(x[idx[(size_t)g * per + i]]);
    for (int d = 16; d; d >>= 1) { sum += __shfl_xor_sync(0xffffffffu, sum, d); best += __shfl_xor_sync(0xffffffffu, best, d); }
    if (!lane) { part[0][warp] = sum; part[1][warp] = best; }
    __syncthreads();
    sum = best = 0;
    for (int i = 0; i < TOP_WARPS; i++) { sum += part[0][i]; best += part[1][i]; }
    for (int i = threadIdx.x; i < n; i += TOP_THREADS) all[from + i] = sum > 0 ? (float)(x[i] * ((double)best / (double)sum)) : 0;
}
float *adakv_shares_cuda(Session *s, const float *score, int N, const int *n, int base) {         // score (G,N) -> (sum of n), on the device
    int G = s->c->G, per = base > 0 ? base : 1;
    size_t mark = scratch_mark(s);
    TopRow *rows = (TopRow *)scratch(s, G * sizeof(TopRow));
    int *idx = room<int>(s, ROOM_TOP_IDX, (size_t)G * per + G);
    float *all = room<float>(s, ROOM_TOP, (size_t)G * N);
    for (int g = 0; g < G; g++) rows[g] = { n[g], base };
    top_k_device(s, score, G, N, rows, idx, per, idx + (size_t)G * per);
    KV_LAUNCH(shares_kernel, G, TOP_THREADS, 0, all, score, N, (const TopRow *)s->dev->room[ROOM_LIST].p, idx, per);
    scratch_reset(s, mark);
    return all;
}

// ==================================================================================================== 7 SPARSE PREFILL BASELINES
// Attention over lines. A block takes 32 rows of one query head and walks through the columns its 64-row block needs (block_index): column
// c is needed iff it is a vertical left of the block, or some offset of [s0-c, E-1-c] is chosen, which is one look at 64 bits. Needed
// columns are gathered 32 at a time. Under tile64 all of them are read by every row that may, else exactly the cells of the lines. So the
// same columns and cells as on the CPU; sums are in another order.

struct Cells { const uint64_t *v, *s; int n, p0, dense, tile64; };              // Lines, in device memory
static __device__ int bit_of(const uint64_t *b, int i) { return (int)(b[i >> 6] >> (i & 63) & 1); }
static __device__ uint64_t bits_from(const uint64_t *b, int n, int lo) {         // bits lo .. lo+63 of b (n); those outside are 0
    if (lo <= -64 || lo >= n) return 0;
    if (lo < 0) return b[0] << -lo;
    int w = lo >> 6, d = lo & 63;
    return b[w] >> d | (d && (w + 1) * 64 < n ? b[w + 1] << (64 - d) : 0);
}
static __device__ int column_needed(const Cells &x, int c, int s0, int E) {
    if (c >= E) return 0;
    if (x.dense || (c < s0 && bit_of(x.v, c))) return 1;
    return (bits_from(x.s, x.n, s0 - c) & ~0ull >> (64 - (E - s0))) != 0;
}
enum { LINE_ROWS = 32, LINE_QW = LINE_ROWS / ATTN_WARPS, LINE_LIST = TILE + ATTN_WARPS * 32 };
static size_t lines_smem(int D) { return ((size_t)LINE_ROWS * D + TILE * (D + 1) + LINE_ROWS * (TILE + 1) + LINE_ROWS + LINE_LIST + ATTN_WARPS) * sizeof(float); }
// Appends needed columns from *c on until the list has TILE of them or none is left; -> its length
static __device__ int gather_columns(const Cells &x, int s0, int E, int *c, int n, int *row, int *counts) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    while (n < TILE && *c < E) {
        int need = column_needed(x, *c + (int)threadIdx.x, s0, E), all = 0;
        unsigned m = __ballot_sync(0xffffffffu, need);
        if (!lane) counts[warp] = __popc(m);
        __syncthreads();
        for (int w = 0; w < ATTN_WARPS; w++) { if (w == warp && need) row[n + all + __popc(m & ((1u << lane) - 1))] = *c + (int)threadIdx.x; all += counts[w]; }
        __syncthreads();
        n += all;
        *c += ATTN_WARPS * 32;
    }
    return n;
}
static __device__ int in_window(const Attn &a, const HeadRef &h, int row, int tok) { return a.tok[h.src[row]].pos > a.tok[tok].pos - a.window; }
template <int ND> static __global__ void __launch_bounds__(ATTN_WARPS * 32, ND > 4 ? 3 : 4) lines_kernel(Attn a, const Cells *cells, int T, float *out) {
    KV_DYN_SHARED(float, q);                                     // (LINE_ROWS,D)
    const int QW = LINE_QW, LANES = 32 / QW;
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, t0 = (gridDim.x - 1 - blockIdx.x) * LINE_ROWS;
    float *kv = q + LINE_ROWS * D, *sc = kv + TILE * (D + 1), *fix = sc + LINE_ROWS * (TILE + 1);
    int *row = (int *)(fix + LINE_ROWS), *counts = row + LINE_LIST, at = 0, n = 0;
    Cells x = cells[head];
    HeadRef h = a.heads.at[head / a.R];
    int s0 = x.p0 + t0 / 64 * 64, E = s0 + 64 < x.n ? s0 + 64 : x.n, r0 = x.p0 + t0, stop = r0 + LINE_ROWS < E ? r0 + LINE_ROWS : E;
    for (int j = warp; j < LINE_ROWS; j += ATTN_WARPS)
        for (int d = lane; d < D; d += 32) q[j * D + d] = t0 + j < T ? a.q[((size_t)(t0 + j) * a.H + head) * D + d] : 0;
    float top = -INFINITY, sum = 0, acc[QW][ND], score[QW];
    for (int i = 0; i < QW; i++) for (int e = 0; e < ND; e++) acc[i][e] = 0;
    for (;;) {
        n = gather_columns(x, s0, E, &at, n, row, counts);
        int m = n < TILE ? n : TILE, more = 0;
        if (!m || row[0] >= stop) break;                         // the same for the whole block
        load_tile(kv, D + 1, a, h, 0, row, m);
        __syncthreads();
        score_rows<QW>(score, q + warp * QW * D, kv + (lane < m ? lane : 0) * (D + 1), D);
        for (int i = 0; i < QW; i++) {
            int c = row[lane < m ? lane : 0], r = r0 + warp * QW + i, see = lane < m && c <= r && r < stop;
            if (see && a.window) see = in_window(a, h, c, a.tok0 + r - x.p0);
            if (see && !x.dense && !x.tile64) see = bit_of(x.v, c) || bit_of(x.s, r - c);
            sc[(warp * QW + i) * (TILE + 1) + lane] = see ? score[i] * a.scale : -INFINITY;
        }
        __syncwarp();
        float f = fold_scores<QW>(sc + (warp * QW + lane / LANES) * (TILE + 1) + lane % LANES, &top, &sum);
        if (lane % LANES == 0) fix[warp * QW + lane / LANES] = f;
        __syncthreads();                                         // the keys are done with
        load_tile(kv, D + 1, a, h, 1, row, m);
        if ((int)threadIdx.x < n - m) more = row[m + threadIdx.x];    // at most 128 are left over
        __syncthreads();
        if ((int)threadIdx.x < n - m) row[threadIdx.x] = more;
        n -= m;
        for (int i = 0; i < QW; i++) for (int e = 0; e < ND; e++) acc[i][e] *= fix[warp * QW + i];
        for (int j = 0; j < m; j++)
            for (int e = 0; e < ND; e++) {
                float v = lane + 32 * e < D ? kv[j * (D + 1) + lane + 32 * e] : 0;
                for (int i = 0; i < QW; i++) acc[i][e] += sc[(warp * QW + i) * (TILE + 1) + j] * v;
            }
        __syncthreads();                                         // the values are done with, and the list has moved up
    }
    if (lane % LANES == 0) fix[warp * QW + lane / LANES] = sum;
    __syncwarp();
    for (int i = 0; i < QW && t0 + warp * QW + i < T; i++)
        for (int e = 0; e < ND; e++)
            if (lane + 32 * e < D) out[((size_t)(t0 + warp * QW + i) * a.H + head) * D + lane + 32 * e] = acc[i][e] / fix[warp * QW + i];
}
// lines_attend: heads (H): n, p0, dense, tile64 and host pointers to the bits. out, q (T,H,D)
void lines_attend_cuda(Session *s, int l, const Lines *lines, float *out, const float *q, int T) {
    int H = s->c->H;
    size_t at = (size_t)H * sizeof(Cells), bytes = at, mark = scratch_mark(s);
    for (int h = 0; h < H; h++) bytes += 2 * bit_bytes(lines[h].n);
    char *host = (char *)scratch(s, bytes), *dev = room<char>(s, ROOM_LIST, bytes);
    for (int h = 0; h < H; h++) {
        const Lines *x = &lines[h];
        size_t b = bit_bytes(x->n);
        Cells cell = { (const uint64_t *)(dev + at), (const uint64_t *)(dev + at + b), x->n, x->p0, x->dense, x->tile64 };
        memcpy(host + h * sizeof(Cells), &cell, sizeof cell);
        memcpy(host + at, x->v, b); memcpy(host + at + b, x->s, b);
        at += 2 * b;
    }
    upload(dev, host, bytes);
    Attn a = attn_args(s, l, q, s->base);
    size_t smem = lines_smem(a.D);
    dim3 grid(blocks(T, LINE_ROWS), H);
    if (a.D <= 64)       KV_LAUNCH_WIDE((lines_kernel<2>), grid, ATTN_WARPS * 32, smem, a, (const Cells *)dev, T, out);
    else if (a.D <= 128) KV_LAUNCH_WIDE((lines_kernel<4>), grid, ATTN_WARPS * 32, smem, a, (const Cells *)dev, T, out);
    else                 KV_LAUNCH_WIDE((lines_kernel<8>), grid, ATTN_WARPS * 32, smem, a, (const Cells *)dev, T, out);
    scratch_reset(s, mark);
}

// ---- line_probs: P (ng R,m,N) for the query heads of KV heads g0.. (ng): softmax rows of the pass's tokens t[i] (m), ascending; agrees to rounding
static size_t sample_smem(int D) { return ((size_t)32 * D + TILE * (D + 1) + TILE) * sizeof(float); }
static __global__ void sample_scores_kernel(Attn a, int g0, const int *t, int m, int N, int T, float *P) {       // a block a tile of columns and a head
    KV_DYN_SHARED(float, q);                                     // (32,D)
    const int QW = 8;
    int g = g0 + blockIdx.y / a.R, n = a.heads.at[g].len, p0 = n - T;
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c0 = blockIdx.x * TILE, cols = n - c0 < TILE ? n - c0 : TILE;
    if (cols <= 0) return;                                       // the same for the whole block
    float *kv = q + 32 * D, score[QW];
    int *row = (int *)(kv + TILE * (D + 1));
    P += (size_t)blockIdx.y * m * N;
    if (threadIdx.x < TILE) row[threadIdx.x] = c0 + threadIdx.x;
    __syncthreads();
    load_tile(kv, D + 1, a, a.heads.at[g], 0, row, cols);
    for (int i0 = 0; i0 < m; i0 += 32) {
        __syncthreads();
        for (int j = warp; j < 32; j += ATTN_WARPS)
            for (int d = lane; d < D; d += 32) q[j * D + d] = i0 + j < m ? a.q[((size_t)t[i0 + j] * a.H + g0 * a.R + blockIdx.y) * D + d] : 0;
        __syncthreads();
        score_rows<QW>(score, q + warp * QW * D, kv + (lane < cols ? lane : 0) * (D + 1), D);
        for (int i = 0; i < QW; i++) {
            int j = i0 + warp * QW + i;
            if (j >= m || lane >= cols) continue;
            int see = c0 + lane <= p0 + t[j] && (!a.window || in_window(a, a.heads.at[g], c0 + lane, a.tok0 + t[j]));
            P[(size_t)j * N + c0 + lane] = see ? score[i] * a.scale : -INFINITY;
        }
    }
}
enum { SOFT_THREADS = 256 };
static __global__ void softmax_rows_kernel(HeadRefs heads, int g0, int R, int m, int N, float *P) {  // a block a row
    __shared__ float part[2][SOFT_THREADS / 32];
    float *x = P + (size_t)blockIdx.x * N, top = -INFINITY, sum = 0;
    int n = heads.at[g0 + blockIdx.x / m / R].len;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = threadIdx.x; i < n; i += SOFT_THREADS) top = fmaxf(top, x[i]);
    for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
    if (!lane) part[0][warp] = top;
    __syncthreads();
    for (int w = 0; w < SOFT_THREADS / 32; w++) top = fmaxf(top, part[0][w]);
    for (int i = threadIdx.x; i < n; i += SOFT_THREADS) { float e = expf(x[i] - top); x[i] = e; sum += e; }
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (!lane) part[1][warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < SOFT_THREADS / 32; w++) sum += part[1][w];
    float inv = 1 / sum;
    for (int i = threadIdx.x; i < n; i += SOFT_THREADS) x[i] *= inv;
}
// Room for this many bytes of probabilities at once: all heads of a layer at 128k rows and 64 samples
enum { PROBS_MIB = 1024 };
int line_batch_cuda(const Session *s, int l, int m) { return (size_t)s->c->H * m * kv_longest(s, l) * sizeof(float) >> 20 <= PROBS_MIB ? s->c->G : 1; }    // KV heads at once
float *line_probs_cuda(Session *s, int l, int g0, int ng, const float *q, int T, const int *t, int m) {
    int N = kv_longest(s, l), R = s->c->H / s->c->G, *tokens = room<int>(s, ROOM_TOP, m);
    float *P = room<float>(s, ROOM_PROBS, (size_t)ng * R * m * N);
    Attn a = attn_args(s, l, q, s->base);
    upload(tokens, t, m * sizeof(int));
    size_t smem = sample_smem(a.D);
    dim3 grid(blocks(N, TILE), ng * R);
    KV_LAUNCH_WIDE(sample_scores_kernel, grid, ATTN_WARPS * 32, smem, a, g0, tokens, m, N, T, P);
    KV_LAUNCH(softmax_rows_kernel, ng * R * m, SOFT_THREADS, 0, a.heads, g0, R, m, N, P);
    return P;
}
// What minference_lines sums: column c, or offset c (slash), over the m rows in their order; the first `least` always win. sum (R,n)
static __global__ void line_sums_kernel(const float *P, HeadRefs heads, int g0, int R, const int *t, int m, int N, int T, int slash, int least, float *sum) {
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
float *line_sums_cuda(Session *s, int l, int g0, int ng, const float *P, int T, int m, int slash, int least) {       // after line_probs_cuda -> (ng R,N)
    int R = s->c->H / s->c->G, N = kv_longest(s, l);
    float *sum = room<float>(s, ROOM_POOL, (size_t)ng * R * N);
    dim3 grid(blocks(N, 256), ng * R);
    KV_LAUNCH(line_sums_kernel, grid, 256, 0, P, head_refs(s, l), g0, R, (const int *)s->dev->room[ROOM_TOP].p, m, N, T, slash, least, sum);
    return sum;
}

// ==================================================================================================== 8 QUEST
// Bounds are of the stored values, so exact; a page's score has the CPU's order of sums (lanes of 16, fused), so from equal rows and
// queries both halves choose the same pages.


// page_bounds: one warp a page. bound (pages,2D) of dtype
static __device__ void number_put(void *p, int dtype, size_t i, float x) {
    if (dtype == DT_F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = dtype == DT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}
static __global__ void page_bounds_kernel(Column a, int g, char *bound, int from, int dtype) {
    int page = from + blockIdx.x;
    for (int d = threadIdx.x; d < a.D; d += 32) {
        float hi = row_value(a, a.heads.at[g], page * PAGE, d), lo = hi;
        for (int r = 1; r < PAGE; r++) { float k = row_value(a, a.heads.at[g], page * PAGE + r, d); hi = k > hi ? k : hi; lo = k < lo ? k : lo; }
        number_put(bound, dtype, (size_t)page * 2 * a.D + d, hi);
        number_put(bound, dtype, (size_t)page * 2 * a.D + a.D + d, lo);
    }
}
struct Pages { const char *bound[MAX_G]; };
// page_scores: u (G,cap); a half warp a page, the queries in shared memory, split into positive and negative part as it goes. step: the heads
// from head0 on have as many full pages as it says, NULL: n. rows (G): so many pages, of which `best` are wanted
static __global__ void page_scores_kernel(Pages pages, const Step *step, int head0, int n, int cap, const float *q, int R, int D, int dtype, float *u, TopRow *rows, int best) {
    KV_DYN_SHARED(float, own);                                   // (R,D)
    int g = blockIdx.y, lane = threadIdx.x & 15, p = blockIdx.x * (blockDim.x / 16) + (threadIdx.x >> 4);
    float top = 0;
    if (step) n = step->len[head0 + g] / PAGE;
    if (!blockIdx.x && !threadIdx.x) rows[g] = { n, best };
    for (int i = threadIdx.x; i < R * D; i += blockDim.x) own[i] = q[(size_t)g * R * D + i];
    __syncthreads();
    for (int h = 0; h < R; h++) {
        float sum = 0;
        for (int k = lane; p < n && k < 2 * D; k += 16) {
            float x = own[h * D + (k < D ? k : k - D)], part = (x > 0) == (k < D) ? x : 0;
            sum = fmaf(part, number(pages.bound[g], dtype, (size_t)p * 2 * D + k), sum);
        }
        sum = lanes_fold(sum);
        top = h && !(sum > top) ? top : sum;
    }
    if (!lane && p < n) u[(size_t)g * cap + p] = top;
}
void page_bounds_cuda(Session *s, int l, int g, char *bound, int from, int to, int dtype) {
    KV_LAUNCH(page_bounds_kernel, to - from, 32, 0, keys_of(s, l), g, bound, from, dtype);
}
// pages (G,best) ascending -> lists of their rows; those of pages not full are read too
static __global__ void page_rows_kernel(const int *pages, const int *count, const TopRow *rows, int best, int *lists, int stride) {
    int g = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x, n = count[g] * PAGE;
    int *to = lists + (size_t)g * stride;
    if (!i) { to[LIST_ROWS] = n; to[LIST_TAIL] = rows[g].n * PAGE; }
    if (i < n) to[LIST_HEAD + i] = pages[g * best + i / PAGE] * PAGE + i % PAGE;
}
// quest_select: the `best` pages of every KV head by score, of the first `pages` (in a step, of as many as it says; cap: at most)
void quest_select_cuda(Session *s, int l, const char *const *bound, int pages, int cap, int best, const float *q, int dtype) {
    int G = s->c->G, R = s->c->H / G, D = s->c->D;
    Pages p;
    memset(&p, 0, sizeof p);
    for (int g = 0; g < G; g++) p.bound[g] = bound[g];
    float *u = room<float>(s, ROOM_POOL, (size_t)G * cap);
    TopRow *rows = room<TopRow>(s, ROOM_LIST, G);
    dim3 grid(blocks(cap, 16), G);
    KV_LAUNCH(page_scores_kernel, grid, 256, (size_t)R * D * sizeof(float), p, s->dev->told, l * G, pages, cap, q, R, D, dtype, u, rows, best);
    int *idx = room<int>(s, ROOM_TOP_IDX, (size_t)G * (best + 1)), *count = idx + (size_t)G * best, stride = LIST_HEAD + best * PAGE;
    top_k_device(s, u, G, cap, NULL, idx, best, count);
    dim3 all(blocks(best * PAGE, 256), G);
    KV_LAUNCH(page_rows_kernel, all, 256, 0, idx, count, rows, best, chosen_room(s, l, stride), stride);
}

// ==================================================================================================== 9 LOOPSERVE
// The scores of progressive decode are window scores with the ring's tokens as the window and sums for means: they agree with the CPU's
// to rounding, what is made of them (join_rows_cuda, top_k_rows) exactly.
static __global__ void ring_put_kernel(float *ring, int obs, const Step *step, int token, const float *q, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, slot = (step ? step->base : token) % obs;
    if (i < n) ring[(size_t)slot * n + i] = q[i];
}
void ring_put_cuda(Session *s, float *ring, int obs, int token, const float *q) {                // ring (obs,H,D): token i in slot i % obs; a step says which it is
    int n = s->c->H * s->c->D;
    KV_LAUNCH(ring_put_kernel, blocks(n, 256), 256, 0, ring, obs, s->dev->told, token, q, n);
}
float *ring_scores_cuda(Session *s, int l, const float *ring, int obs, int first, int w) {
    size_t row = (size_t)s->c->H * s->c->D;
    int slot = first % obs, n = w < obs - slot ? w : obs - slot;
    float *q = room<float>(s, ROOM_RING, w * row);
    device_copy(q, ring + slot * row, n * row * sizeof(float));
    device_copy(q + n * row, ring, (w - n) * row * sizeof(float));
    return columns_device(s, l, q, first, w, 1);
}

// ---- what is chosen from sampled probabilities: a block a query head. Column are the CPU's doubles, and sums have its order or none at all, so
// the lines are those of kvcomp.c for the same probabilities.
enum { BAND = 64, PICK_THREADS = 256, PICK_WARPS = PICK_THREADS / 32 };
struct Picks {                  // argument; per head, N columns: P (m,N), v, s and wide (words), run (N/2 + 2,3), found (3);
    HeadRefs heads;             // tile64: gain and one (N + bands); single lines: residuals (2 N) in gain's room, the segments' best in one's; row (2,m)
    LoopRule rule;
    const float *P; const int *t;
    int64_t *gain, *one;
    double *row;
    uint64_t *v, *s, *wide;
    int *run;
    double *found;              // failed, share of the mass, share of the tiles or cells
    int g0, R, m, N, T, ids, words;
};
struct Head { const float *P; int64_t *gain, *one; double *row; uint64_t *v, *s, *wide; int *run; int n, p0, words; };
static __device__ uint64_t first_bits(int n, int w) { return n <= w * 64 ? 0 : n - w * 64 < 64 ? ~0ull >> (64 - (n - w * 64)) : ~0ull; }
static __device__ Head head_of(const Picks &a) {                 // the block's, with the lines that are always kept
    size_t h = blockIdx.x;
    int n = a.heads.at[a.g0 + blockIdx.x / a.R].len;
    Head x = { a.P + h * a.m * a.N, a.gain + h * a.ids, a.one + h * a.ids, a.row + 2 * h * a.m, a.v + h * a.words, a.s + h * a.words, a.wide + h * a.words,
               a.run + h * 3 * (a.N / 2 + 2), n, n - a.T, (n + 63) / 64 };
    for (int w = threadIdx.x; w < x.words; w += PICK_THREADS) {
        x.v[w] = first_bits(a.rule.sink < n ? a.rule.sink : n, w);
        x.s[w] = first_bits(a.rule.local < n ? a.rule.local : n, w);
    }
    __syncthreads();
    return x;
}
static __device__ int line_len(const Head &x, int y) { return x.n - (y > x.p0 ? y : x.p0); }       // cells of vertical or slash y
static __device__ int recovered(const Picks &a, const double *rec, const double *tot) { return rec[0] >= a.rule.alpha * tot[0] && rec[1] >= a.rule.alpha * tot[1]; }
static __device__ void tell_found(const Picks &a, int failed, const double *rec, const double *tot, double share) {
    double all = tot[0] + tot[1], *found = a.found + (size_t)blockIdx.x * 3;
    found[0] = failed; found[1] = all > 0 ? (rec[0] + rec[1]) / all : 1; found[2] = share;
}
static __device__ int64_t sum_block(int64_t x, int64_t *part) {  // part (PICK_WARPS) shared
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    __syncthreads();                                             // the last sum has been read
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < PICK_WARPS; w++) x += part[w];
    return x;
}
// ---- select_tiles: rounds until enough is recovered. Masses are int64, so no order of additions matters; tiles are counted, not estimated
static __device__ int covered(const Head &x, int c, int r) { return bit_of(x.v, c) || bit_of(x.s, r - c); }
// band_residuals; first: the largest parts too. rec, tot (2): the block's sums
static __device__ void band_residuals(const Picks &a, const Head &x, int first, int64_t *rec, int64_t *tot, int64_t *part) {
    int lane = threadIdx.x & 31, hold = a.rule.holdout;
    int64_t sum[4] = { 0, 0, 0, 0 };
    for (int c = threadIdx.x; c < x.n; c += PICK_THREADS) {
        int64_t gain = 0, most = 0;
        for (int i = 0; i < a.m; i++) {
            int r = x.p0 + a.t[i], half = hold & i;
            if (c > r) continue;
            int64_t mass = fixed_mass(x.P[(size_t)i * a.N + c]);
            if (half) sum[3] += mass; else sum[2] += mass;       // no index that only the run knows: the sums stay in registers
            if (covered(x, c, r)) { if (half) sum[1] += mass; else sum[0] += mass; }
            else if (!half) { gain += mass; most = mass > most ? mass : most; }
        }
        x.gain[c] = gain;
        if (first) x.one[c] = most;
    }
    for (int k = threadIdx.x >> 5; k < (x.n + BAND - 1) / BAND; k += PICK_WARPS) {
        int64_t gain = 0, most = 0;
        for (int i = 0; i < a.m; i++) {
            int r = x.p0 + a.t[i];
            int64_t mass = 0;
            for (int o = k * BAND + lane; o < (k + 1) * BAND && o <= r && !(hold & i); o += 32)
                if (!covered(x, r - o, r)) mass += fixed_mass(x.P[(size_t)i * a.N + r - o]);
            for (int d = 16; d; d >>= 1) mass += __shfl_xor_sync(0xffffffffu, mass, d);
            gain += mass; most = mass > most ? mass : most;
        }
        if (!lane) x.gain[x.n + k] = gain;
        if (!lane && first) x.one[x.n + k] = most;
    }
    for (int h = 0; h < 2; h++) { rec[h] = sum_block(sum[h], part); tot[h] = sum_block(sum[2 + h], part); }
}
static __device__ int bits_of(uint64_t x) { return __popc((unsigned)x) + __popc((unsigned)(x >> 32)); }
// Runs of bits of x.wide, ascending: run[3 j] = lo, hi, tiles from it on to the right. One thread; -> how many
static __device__ int wide_runs(const Head &x) {
    int k = 0, open = -1, tiles = 0;
    for (int i = 0; i < x.n; i++) {
        uint64_t w = x.wide[i >> 6];
        if (!(i & 63) && i + 64 <= x.n && w == (open < 0 ? 0 : ~0ull)) { i += 63; continue; }    // a word that changes nothing
        int bit = (int)(w >> (i & 63) & 1);
        if (bit && open < 0) open = i;
        if (!bit && open >= 0) { x.run[3 * k] = open; x.run[3 * k++ + 1] = i; open = -1; }
    }
    if (open >= 0) { x.run[3 * k] = open; x.run[3 * k++ + 1] = x.n; }
    for (int j = k - 1; j >= 0; j--) x.run[3 * j + 2] = tiles += (x.run[3 * j + 1] - x.run[3 * j] + BAND - 1) / BAND;
    return k;
}
// Tiles of the row blocks of `rows` rows each that end at E = first, first + 64, .. <= last. Seen from its last row a block needs the column
// E-1-o iff an offset of [o-rows+1, o] is chosen, so one list of runs serves all blocks of a length: wide holds it, column order, right-aligned.
static __device__ int64_t count_tiles(const Head &x, int rows, int first, int last, int *shared) {
    int64_t tiles = 0;
    for (int w = threadIdx.x; w < x.words; w += PICK_THREADS) {
        uint64_t bits = 0;
        for (int i = 0; i < 64 && w * 64 + i < x.n; i++) {
            int o = x.n - 1 - (w * 64 + i);
            if (bits_from(x.s, x.n, o - rows + 1) & ~0ull >> (64 - rows)) bits |= (uint64_t)1 << i;
        }
        x.wide[w] = bits;
    }
    __syncthreads();
    if (!threadIdx.x) *shared = wide_runs(x);
    __syncthreads();
    for (int E = first + 64 * (int)threadIdx.x; E <= last; E += 64 * PICK_THREADS) {
        int j = 0, left = x.n - E, cols = 0;                     // columns c < E stand at left + c
        while (x.run[3 * j + 1] <= left) j++;
        int lo = x.run[3 * j] > left ? x.run[3 * j] : left, hi = x.run[3 * j + 1];
        tiles += (hi - lo + BAND - 1) / BAND + (j + 1 < *shared ? x.run[3 * j + 5] : 0);
        for (int c = 0; c < E - rows; c += 64) {                 // verticals left of the block that no range holds
            uint64_t single = x.v[c >> 6] & ~bits_from(x.wide, x.n, left + c);
            if (E - rows - c < 64) single &= ~0ull >> (64 - (E - rows - c));
            cols += bits_of(single);
        }
        tiles += (cols + BAND - 1) / BAND;
    }
    __syncthreads();                                             // the runs have been read
    return tiles;
}
static __device__ double tile_share(const Picks &a, const Head &x, int *shared, int64_t *part) {
    int full = x.p0 + a.T / 64 * 64;                             // the last end of a whole block
    int64_t tiles = count_tiles(x, 64, x.p0 + 64, full, shared), dense = 0;
    if (a.T % 64) tiles += count_tiles(x, a.T % 64, x.n, x.n, shared);
    for (int b = threadIdx.x; b < (a.T + 63) / 64; b += PICK_THREADS) {
        int E = x.p0 + b * 64 + 64 < x.n ? x.p0 + b * 64 + 64 : x.n;
        dense += (E + BAND - 1) / BAND;
    }
    tiles = sum_block(tiles, part);
    return (double)tiles / (double)sum_block(dense, part);
}
static __device__ double band_len(int k, int p0, int n) {
    int64_t sum = 0;
    for (int o = k * BAND; o < n && o < (k + 1) * BAND; o++) sum += n - (o > p0 ? o : p0);
    return (double)sum;
}
static __device__ double gain_of(const Head &x, int id) {
    int64_t gain = x.gain[id] - x.one[id];
    if (gain <= 1) return 0;
    return (double)gain / (id < x.n ? (double)line_len(x, id) : band_len(id - x.n, x.p0, x.n));
}
static __device__ double best_gain(const Head &x, double *part) {
    double best = 0;
    for (int id = threadIdx.x; id < x.n + (x.n + BAND - 1) / BAND; id += PICK_THREADS) best = fmax(best, gain_of(x, id));
    for (int d = 16; d; d >>= 1) best = fmax(best, __shfl_xor_sync(0xffffffffu, best, d));
    __syncthreads();
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = best;
    __syncthreads();
    for (int w = 0; w < PICK_WARPS; w++) best = fmax(best, part[w]);
    return best;
}
// Every line within reach at once: a thread a word of columns, and the band that is a word of offsets
static __device__ void take_lines(const Head &x, double lam) {
    for (int w = threadIdx.x; w < x.words; w += PICK_THREADS) {
        uint64_t v = 0;
        for (int i = 0; i < 64 && w * 64 + i < x.n; i++) if (gain_of(x, w * 64 + i) >= lam) v |= (uint64_t)1 << i;
        x.v[w] |= v;
        if (gain_of(x, x.n + w) >= lam) x.s[w] |= x.n - w * 64 < 64 ? ~0ull >> (64 - (x.n - w * 64)) : ~0ull;
    }
    __syncthreads();
}
static __global__ void __launch_bounds__(PICK_THREADS, 1) select_tiles_kernel(Picks a) {
    __shared__ int64_t part[PICK_WARPS];
    __shared__ double high[PICK_WARPS];
    __shared__ int shared;
    int failed = 0;
    Head x = head_of(a);
    int64_t got[2], of[2];
    double rec[2], tot[2], lam = INFINITY, share;
    for (int round = 0; ; round++) {
        band_residuals(a, x, !round, got, of, part);
        for (int i = 0; i < 2; i++) { rec[i] = (double)got[i]; tot[i] = (double)of[i]; }
        share = tile_share(a, x, &shared, part);
        failed = round && share > a.rule.max_tiles;
        if (failed || recovered(a, rec, tot)) break;
        double best = best_gain(x, high);
        failed = best <= 0;
        if (failed) break;
        lam = .9 * fmin(lam, best);
        take_lines(x, lam);
    }
    if (!threadIdx.x) tell_found(a, failed, rec, tot, share);
}

// ---- select_exact: one line after the other, without a heap. Gains only fall, so the best line of every SEG lines, once known, stays an upper
// bound: the segment with the best bound is looked at again, and if its best line is still that one, it is the best of all. Ties as on the CPU.
enum { SEG = PICK_THREADS };
struct Best { double key; int id; };
static __device__ Best better(Best a, Best b, int n) {           // item_before
    if (a.key != b.key) return a.key > b.key ? a : b;
    if ((a.id >= n) != (b.id >= n)) return a.id >= n ? a : b;
    return a.id < b.id ? a : b;
}
static __device__ Best best_block(Best x, int n, Best *part) {   // part (PICK_WARPS) shared
    for (int d = 16; d; d >>= 1) { Best y = { __shfl_xor_sync(0xffffffffu, x.key, d), __shfl_xor_sync(0xffffffffu, x.id, d) }; x = better(x, y, n); }
    __syncthreads();                                             // the last one has been read
    if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = x;
    __syncthreads();
    for (int w = 0; w < PICK_WARPS; w++) x = better(x, part[w], n);
    return x;
}
static __device__ Best segment_best(const Head &x, int seg, Best *part) {        // of lines not taken that gain something
    int id = seg * SEG + threadIdx.x, y = id < x.n ? id : id - x.n;
    double g = id < 2 * x.n && !bit_of(id < x.n ? x.v : x.s, y) ? ((const double *)x.gain)[id] : 0;
    return best_block({ g > 1e-12 ? g / (double)line_len(x, y) : 0, id }, x.n, part);
}
// residuals: a thread a line, over the samples in their order; a warp a sample for its sums
static __device__ void line_residuals(const Picks &a, const Head &x, double *rec, double *tot) {        // rec, tot (2) shared
    int lane = threadIdx.x & 31;
    double *g = (double *)x.gain;
    for (int id = threadIdx.x; id < 2 * x.n; id += PICK_THREADS) {
        double sum = 0;
        for (int i = 0; i < a.m; i++) {
            int r = x.p0 + a.t[i], c = id < x.n ? id : r - (id - x.n);
            if (c >= a.rule.sink && r - c >= a.rule.local && !(a.rule.holdout & i)) sum += x.P[(size_t)i * a.N + c];
        }
        g[id] = sum;
    }
    for (int i = threadIdx.x >> 5; i < a.m; i += PICK_WARPS) {
        int r = x.p0 + a.t[i];
        double got = 0, all = 0;
        for (int c = lane; c <= r; c += 32) {
            double p = x.P[(size_t)i * a.N + c];
            all += p;
            if (c < a.rule.sink || r - c < a.rule.local) got += p;
        }
        for (int d = 16; d; d >>= 1) { got += __shfl_xor_sync(0xffffffffu, got, d); all += __shfl_xor_sync(0xffffffffu, all, d); }
        if (!lane) { x.row[i] = got; x.row[a.m + i] = all; }
    }
    __syncthreads();
    if (!threadIdx.x) {
        rec[0] = rec[1] = tot[0] = tot[1] = 0;
        for (int i = 0; i < a.m; i++) { rec[a.rule.holdout & i & 1] += x.row[i]; tot[a.rule.holdout & i & 1] += x.row[a.m + i]; }
    }
    __syncthreads();
}
static __device__ void take_one(const Picks &a, const Head &x, int id, double *rec) {    // take_line
    int slash = id >= x.n, y = slash ? id - x.n : id;
    double *g = (double *)x.gain;
    for (int i = threadIdx.x; i < a.m; i += PICK_THREADS) {
        int other = x.p0 + a.t[i] - y, on = other >= 0 && !bit_of(slash ? x.v : x.s, other);
        double cell = on ? x.P[(size_t)i * a.N + (slash ? other : y)] : 0;
        x.row[i] = cell;
        if (on && !(a.rule.holdout & i)) g[slash ? other : x.n + other] -= cell;     // another line for every sample
    }
    __syncthreads();
    if (!threadIdx.x) {
        rec[0] += g[id];
        for (int i = 1; i < a.m && a.rule.holdout; i += 2) rec[1] += x.row[i];
        (slash ? x.s : x.v)[y >> 6] |= (uint64_t)1 << (y & 63);
    }
    __syncthreads();
}
static __device__ double cells_of(const Head &x, const uint64_t *bits, int64_t *part) {
    int64_t sum = 0;
    for (int y = threadIdx.x; y < x.n; y += PICK_THREADS) if (bit_of(bits, y)) sum += line_len(x, y);
    return (double)sum_block(sum, part);
}
static __global__ void __launch_bounds__(PICK_THREADS, 1) select_lines_kernel(Picks a) {
    __shared__ Best part[PICK_WARPS];
    __shared__ int64_t sums[PICK_WARPS];
    __shared__ double rec[2], tot[2];
    Head x = head_of(a);
    int n = x.n, segs = (2 * n + SEG - 1) / SEG, failed = 0;
    Best *bound = (Best *)x.one;                                 // (segs)
    double all = .5 * ((double)n * (n + 1) - (double)x.p0 * (x.p0 + 1)), cells = cells_of(x, x.v, sums) + cells_of(x, x.s, sums);
    line_residuals(a, x, rec, tot);
    for (int i = 0; i < segs; i++) { Best b = segment_best(x, i, part); if (!threadIdx.x) bound[i] = b; }
    __syncthreads();
    while (!failed && !recovered(a, rec, tot)) {
        Best top = { 0, 2 * n };
        for (int i = threadIdx.x; i < segs; i += PICK_THREADS) top = better(top, bound[i], n);
        top = best_block(top, n, part);
        if (top.key <= 0) break;                                 // nothing is left
        Best now = segment_best(x, top.id / SEG, part);
        if (now.key == top.key && now.id == top.id) {
            take_one(a, x, top.id, rec);
            cells += (double)line_len(x, top.id % n);
            failed = cells > a.rule.max_cells * all;
        } else if (!threadIdx.x) bound[top.id / SEG] = now;
        __syncthreads();
    }
    if (!threadIdx.x) tell_found(a, failed || (a.rule.holdout && rec[1] < a.rule.alpha * tot[1]), rec, tot, cells / all);
}
// After line_probs_cuda of the same heads and tokens: lines (ng R) get their bits, dense and found
void choose_lines_cuda(Session *s, int l, int g0, int ng, const LoopRule *rule, int tile64, const float *P, int T, int m, Lines *lines, LoopFound *found) {
    int R = s->c->H / s->c->G, N = kv_longest(s, l), heads = ng * R, words = (N + 63) / 64, each = tile64 ? N + words : 2 * N;
    size_t ids = (size_t)heads * each, bits = (size_t)heads * words, runs = (size_t)heads * 3 * (N / 2 + 2), mark = scratch_mark(s);
    char *dev = room<char>(s, ROOM_PICKS, 2 * ids * 8 + 3 * bits * 8 + (size_t)heads * (3 + 2 * m) * 8 + runs * 4);
    Picks a;
    memset(&a, 0, sizeof a);
    a.heads = head_refs(s, l); a.rule = *rule; a.P = P; a.t = (const int *)s->dev->room[ROOM_TOP].p;
    a.gain = (int64_t *)dev; a.one = a.gain + ids;
    a.v = (uint64_t *)(a.one + ids); a.s = a.v + bits; a.wide = a.s + bits;
    a.found = (double *)(a.wide + bits); a.row = a.found + (size_t)heads * 3; a.run = (int *)(a.row + (size_t)heads * 2 * m);
    a.g0 = g0; a.R = R; a.m = m; a.N = N; a.T = T; a.ids = each; a.words = words;
    if (tile64) KV_LAUNCH(select_tiles_kernel, heads, PICK_THREADS, 0, a);
    else        KV_LAUNCH(select_lines_kernel, heads, PICK_THREADS, 0, a);
    uint64_t *host = (uint64_t *)scratch(s, 2 * bits * 8);
    double *told = (double *)scratch(s, heads * 3 * sizeof(double));
    download(host, a.v, 2 * bits * 8);
    download(told, a.found, heads * 3 * sizeof(double));
    for (int h = 0; h < heads; h++) {
        memcpy(lines[h].v, host + (size_t)h * words, bit_bytes(lines[h].n));
        memcpy(lines[h].s, host + bits + (size_t)h * words, bit_bytes(lines[h].n));
        lines[h].tile64 = tile64;
        lines[h].dense = told[3 * h] != 0;
        found[h] = { told[3 * h + 1], told[3 * h + 2] };
    }
    scratch_reset(s, mark);
}

// ==================================================================================================== 10 PATS
// Packed rows are read where they lie: element e of a region starts at bit e*w, so a lane fetches the one or two 32-bit words that
// hold it, shifts and masks. Packing works the other way around, a thread makes one word of the new bytes: the elements it
// touches are read from where they are stored now (packed or raw), cut if the new table says more, and no two threads write alike.
// The bytes are those of kvcomp.c, guard and gaps included. kvcomp.c keeps the books and decides; these are its inner loops.

struct Packed {                 // device memory: a header and the table
    const uint32_t *k, *v;
    int n_reg, rows64, mid;     // mid: half a step is added on reading
    Region reg[1];              // (n_reg) ascending by row0
};
static __device__ const Region *region_of(const Packed *p, int r) {
    int lo = 0, hi = p->n_reg - 1;                               // the last region with row0 <= r
    while (lo < hi) { int m = (lo + hi + 1) / 2; if (p->reg[m].row0 <= r) lo = m; else hi = m - 1; }
    return &p->reg[lo];
}
// The f16 of element d of row r of region g, cut bits 0. words: K's or V's
static __device__ uint16_t packed_half(const uint32_t *words, const Region *g, int rows64, int r, int d, int D) {
    size_t bit = (size_t)(r - g->row0) * D * g->w + (size_t)d * g->w;
    if (rows64) {
        int B = 8 * PATS_BLOCK / g->w;
        bit = ((size_t)(r - g->row0) * ((D + B - 1) / B) + d / B) * (8 * PATS_BLOCK) + d % B * g->w;
    }
    const uint32_t *p = words + g->base / 4 + bit / 32;
    uint64_t two = p[0] | (bit % 32 + g->w > 32 ? (uint64_t)p[1] << 32 : 0);
    return (uint16_t)(two >> bit % 32 << (16 - g->w));
}
// pats_load_region for one element: K's (v 0) or V's
static __device__ float packed_read(const Packed *p, const Region *g, int v, int r, int d, int D) {
    uint16_t x = packed_half(v ? p->v : p->k, g, p->rows64, r, d, D);
    if (p->mid && g->w < 16 && x & 0x7fff) x |= (uint16_t)(1 << (15 - g->w));
    return half_get<DT_F16>(x);
}
static __device__ float packed_value(const HeadRef &h, int v, int r, int d, int D) { return packed_read(h.pack, region_of(h.pack, r), v, r, d, D); }
static __device__ void load_packed(float *to, const HeadRef &h, int v, int r, int D, int lane) {                // a row, by one warp
    const Region *g = region_of(h.pack, r);
    for (int d = lane; d < D; d += 32) to[d] = packed_read(h.pack, g, v, r, d, D);
}

struct Repack {                 // row i of the new table is row rows[i] of what is stored now (rows NULL: row i)
    HeadRef now;
    const Packed *next;         // whose k and v are written
    const int *rows;
    size_t word0, words;        // words [word0,words) are made
    int rounding, D;
};
// pats_cut of element d of the new row r of region g
static __device__ uint16_t repacked_half(const Repack &a, int v, const Region *g, int r, int d) {
    const Packed *p = a.now.pack;
    int from = a.rows ? a.rows[r] : r, b = 16 - g->w;
    if (from >= a.now.packed) return pats_cut(((const uint16_t *)(v ? a.now.v : a.now.k))[(size_t)(from - a.now.packed) * a.D + d], b, a.rounding);
    const Region *old = region_of(p, from);
    uint16_t x = packed_half(v ? p->v : p->k, old, p->rows64, from, d, a.D);
    return b > 16 - old->w ? pats_cut(x, b, a.rounding) : x;
}
static __global__ void repack_kernel(Repack a) {                 // blockIdx.y: K, V. pats_recut and pats_keep
    size_t word = a.word0 + (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (word >= a.words) return;
    const Packed *p = a.next;
    int i = p->n_reg - 1, v = blockIdx.y;
    while (i && p->reg[i].base > word * 4) i--;
    Region g = p->reg[i];
    int w = g.w, B = p->rows64 ? 8 * PATS_BLOCK / w : a.D, per = (a.D + B - 1) / B;    // elements and number of a row's blocks; dense: one
    size_t at = (word * 4 - g.base) * 8, block = p->rows64 ? at / (8 * PATS_BLOCK) : 0, all = p->rows64 ? B : (size_t)g.n * a.D;
    uint32_t out = 0;
    if (p->rows64) at %= 8 * PATS_BLOCK;
    for (size_t e = at / w; e * w < at + 32 && e < all; e++) {
        size_t r = p->rows64 ? block / per : e / a.D;
        int d = p->rows64 ? (int)(block % per * B + e) : (int)(e % a.D);
        if (r >= (size_t)g.n || d >= a.D) break;
        uint32_t x = repacked_half(a, v, &g, g.row0 + (int)r, d) >> (16 - w);
        out |= e * w >= at ? x << (e * w - at) : x >> (at - e * w);
    }
    ((uint32_t *)(v ? p->v : p->k))[word] = out;
}
// raw rows row0 .. of the KV heads lose bits[t] bits (--pats-when=write). grid (T,G)
static __global__ void cut_kernel(HeadRefs heads, const unsigned char *bits, int T, int D, int rounding) {
    HeadRef h = heads.at[blockIdx.y];
    int t = blockIdx.x, b = bits[t], mid = rounding == PATS_MID && b ? 1 << (b - 1) : 0;
    uint16_t *row[2] = { (uint16_t *)h.k, (uint16_t *)h.v };
    for (int v = 0; v < 2; v++)
        for (int d = threadIdx.x; d < D; d += 32) {
            uint16_t *x = row[v] + (size_t)(h.len - h.packed - T + t) * D + d, y = pats_cut(*x, b, rounding);
            *x = (uint16_t)(y & 0x7fff ? y | mid : y);
        }
}

// The packed rows of h become those of table reg (n_reg), `bytes` bytes: row i is row rows[i] (NULL: row i) of what is stored now. The
// first `stay` bytes hold rows that are the same in both. Sets pk and pv; the caller then sets reg, packed and pk_bytes. Memory is asked
// for in steps of PACK_STEP bytes, so that rows that are packed one by one (static, frozen) are mostly added in place.
enum { PACK_STEP = 4096 };
static Packed *pack_table(Session *s, Rows *r, const Packed *head, const Region *reg) {    // in the spare, which becomes r->pack
    size_t bytes = offsetof(Packed, reg) + (size_t)head->n_reg * sizeof(Region), mark = scratch_mark(s);
    if (head->n_reg > r->n_spare) {
        r->n_spare = head->n_reg + 8;
        r->spare = (Packed *)grown((char *)r->spare, 0, offsetof(Packed, reg) + (size_t)r->n_spare * sizeof(Region));
    }
    char *host = (char *)scratch(s, bytes);
    memcpy(host, head, offsetof(Packed, reg));
    memcpy(host + offsetof(Packed, reg), reg, (size_t)head->n_reg * sizeof(Region));
    upload(r->spare, host, bytes);
    scratch_reset(s, mark);
    return r->spare;
}
void rows_repack_cuda(Session *s, KVHead *h, const Region *reg, int n_reg, size_t bytes, size_t stay, const int *rows, int rounding, int rows64) {
    Rows *r = &s->dev->held[h - s->head];
    size_t want = (bytes + PACK_STEP - 1) / PACK_STEP * PACK_STEP;
    int n = n_reg ? reg[n_reg - 1].row0 + reg[n_reg - 1].n : 0, only_added = want == r->pk_bytes && !rows && stay && stay == h->pk_bytes - PATS_GUARD;
    char *pk = only_added ? h->pk : grown(NULL, 0, want), *pv = only_added ? h->pv : grown(NULL, 0, want);
    if (n) {
        int *list = rows ? room<int>(s, ROOM_LIST, n) : NULL;
        if (rows) upload(list, rows, (size_t)n * sizeof(int));
        Packed head = { (const uint32_t *)pk, (const uint32_t *)pv, n_reg, rows64, rounding == PATS_MID, {} };
        HeadRef now = { h->k, h->v, NULL, NULL, r->pack, h->packed, h->len };
        Repack a = { now, pack_table(s, r, &head, reg), list, stay / 4, (bytes + 3) / 4, rounding, s->c->D };
        for (int v = 0; v < 2 && !only_added; v++) device_copy(v ? pv : pk, v ? h->pv : h->pk, stay / 4 * 4);
        dim3 grid(blocks(a.words - a.word0, 128), 2);
        KV_LAUNCH(repack_kernel, grid, 128, 0, a);
        Packed *old = r->pack;                                   // the tables change places
        int n_old = r->n_pack;
        r->pack = r->spare; r->n_pack = r->n_spare;
        r->spare = old; r->n_spare = n_old;
    }
    if (!only_added) { grown(h->pk, 0, 0); grown(h->pv, 0, 0); }
    h->pk = pk; h->pv = pv;
    r->pk_bytes = want;
    s->changes++;
}
// The first `gone` raw rows are packed now: the `left` others move up
void rows_drop_cuda(Session *s, KVHead *h, int gone, int left) {
    struct { char *p; size_t bytes; } part[] = { { h->k, s->fk->row_bytes(s->c->D) }, { h->v, s->fv->row_bytes(s->c->D) } };
    if (!gone || !left) return;
    for (auto &x : part) {                                       // the ranges may overlap
        char *mid = room<char>(s, ROOM_MOVE, left * x.bytes);
        device_copy(mid, x.p + gone * x.bytes, left * x.bytes);
        device_copy(x.p, mid, left * x.bytes);
    }
}
void rows_cut_cuda(Session *s, int l, const unsigned char *bits, int T, int rounding) {    // the last T rows of layer l lose bits (T)
    unsigned char *dev = (unsigned char *)room<char>(s, ROOM_LIST, T);
    dim3 grid(T, s->c->G);
    upload(dev, bits, T);
    KV_LAUNCH(cut_kernel, grid, 32, 0, head_refs(s, l), dev, T, s->c->D, rounding);
}
void bytes_load_cuda(void *to, const void *from, size_t n) { download(to, from, n); }

// ==================================================================================================== 11 LYCHEECLUSTER
// The index is device memory: built, grafted on and searched here; the host cuts the text into chunks and knows how many there are.
// Every sum has the CPU's order: dot products go by lanes of 16 with fused multiply-adds as in section 4 of kvcomp.c (so a CPU with
// FMA has the same bits; plain C agrees to rounding), centroids add their chunks in ascending order, distances are serial sums in
// double that are never fused. No float is added atomically. From equal rows both halves make equal trees and equal lists.

static __device__ float dot_centre(const float *a, const uint16_t *mu, int D) {
    float sum = 0;
    for (int d = threadIdx.x & 15; d < D; d += 16) sum = fmaf(a[d], bf16_to_f32(mu[d]), sum);
    return lanes_fold(sum);
}
static __device__ void normalise(float *x, int D) {              // one warp; x (D) shared
    __syncwarp();
    float f = 1 / sqrtf(dot_lanes(x, x, D) + 1e-12f);
    __syncwarp();
    for (int d = threadIdx.x & 31; d < D; d += 32) x[d] *= f;
    __syncwarp();
}
static __device__ double distance(const float *v, const uint16_t *mu, int D) {
    double ss = 0;
    for (int d = 0; d < D; d++) { double e = (double)v[d] - bf16_to_f32(mu[d]); ss = __dadd_rn(ss, __dmul_rn(e, e)); }
    return sqrt(ss);
}
static __device__ float above(double r) { return nextafterf((float)r, INFINITY); }
static __device__ int lowest_bit(unsigned m) { return __popc((m & (0u - m)) - 1); }
static __device__ float max_warp(float x) {
    for (int i = 16; i; i >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
    return x;
}

// ---- keys and k-means. blockIdx.y is the KV head; all heads of a layer have as many chunks, clusters and units
// chunk_key: key (D) shared = normalised mean, or maximum, of rows r0 .. r0+n-1; one warp
static __device__ void chunk_key(const Column &a, int pool_max, const HeadRef &h, int r0, int n, float *key) {
    for (int d = threadIdx.x & 31; d < a.D; d += 32) {
        float x = row_value(a, h, r0, d);
        for (int i = 1; i < n; i++) { float k = row_value(a, h, r0 + i, d); x = pool_max ? fmaxf(x, k) : x + k; }
        key[d] = pool_max ? x : x / (float)n;
    }
    normalise(key, a.D);
}
static __global__ void chunk_keys_kernel(Column a, int pool_max, const int *start, float *keys) {  // keys (G,M,D). One warp a chunk
    __shared__ float key[MAX_D];
    int j = blockIdx.x;
    chunk_key(a, pool_max, a.heads.at[blockIdx.y], start[j], start[j + 1] - start[j], key);
    float *to = keys + ((size_t)blockIdx.y * gridDim.x + j) * a.D;
    for (int d = threadIdx.x; d < a.D; d += 32) to[d] = key[d];
}
static __global__ void first_centres_kernel(float *mu, const float *x, int n, int D) {           // mu (G,K,D): every so many-th point
    int j = blockIdx.x, K = gridDim.x;
    const float *from = x + ((size_t)blockIdx.y * n + (size_t)(((int64_t)2 * j + 1) * n / ((int64_t)2 * K))) * D;
    for (int d = threadIdx.x; d < D; d += 32) mu[((size_t)blockIdx.y * K + j) * D + d] = from[d];
}
static __global__ void lengths_kernel(float *len, const float *mu, int D) {      // len (G,K) = 1/|mu|
    const float *m = mu + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * D;
    float f = 1 / sqrtf(dot_lanes(m, m, D) + 1e-12f);
    if (!threadIdx.x) len[blockIdx.y * gridDim.x + blockIdx.x] = f;
}
// assign_points: 32 points a block against all centres, 32 at a time. A thread holds 2 points and 2 centres and all 16 lanes of their dot
// products, so that the sums have the CPU's order without a shuffle; x (G,n,D), mu (G,K,D), label (G,n)
enum { POINTS = 32 };
static size_t assign_smem(int D) { return (size_t)2 * POINTS * ((D + 15) / 16 * 16 + 4) * sizeof(float); }
static __device__ void points_load(float *to, int P, const float *x, int n, int D) {             // rows of D padded with zeros to P
    for (int i = threadIdx.x; i < POINTS * P; i += blockDim.x) { int r = i / P, d = i % P; to[i] = r < n && d < D ? x[(size_t)r * D + d] : 0; }
}
static __global__ void __launch_bounds__(256) assign_kernel(const float *x, int n, const float *mu, int K, int D, const float *len, int *label) {
    KV_DYN_SHARED(float, xs);                                    // (POINTS,P) points, (POINTS,P) centres
    int P = (D + 15) / 16 * 16 + 4, i0 = blockIdx.x * POINTS, tj = threadIdx.x & 15, ti = threadIdx.x >> 4, at[2] = { 0, 0 };
    float *ms = xs + POINTS * P, best[2] = { -INFINITY, -INFINITY };
    x += (size_t)blockIdx.y * n * D; mu += (size_t)blockIdx.y * K * D; label += (size_t)blockIdx.y * n;
    points_load(xs, P, x + (size_t)i0 * D, n - i0, D);
    for (int j0 = 0; j0 < K; j0 += POINTS) {
        __syncthreads();
        points_load(ms, P, mu + (size_t)j0 * D, K - j0, D);
        __syncthreads();
        float acc[4][16];
        for (int p = 0; p < 4; p++) for (int u = 0; u < 16; u++) acc[p][u] = 0;
        for (int k = 0; k < P - 4; k += 16)
            for (int u = 0; u < 16; u++) {
                float a0 = xs[ti * P + k + u], a1 = xs[(ti + 16) * P + k + u], b0 = ms[tj * P + k + u], b1 = ms[(tj + 16) * P + k + u];
                acc[0][u] = fmaf(a0, b0, acc[0][u]); acc[1][u] = fmaf(a0, b1, acc[1][u]);
                acc[2][u] = fmaf(a1, b0, acc[2][u]); acc[3][u] = fmaf(a1, b1, acc[3][u]);
            }
        for (int p = 0; p < 4; p++) {
            int j = j0 + tj + p % 2 * 16;
            for (int h = 8; h; h >>= 1) for (int u = 0; u < h; u++) acc[p][u] += acc[p][u + h];
            if (j >= K) continue;
            float v = len ? acc[p][0] * len[(size_t)blockIdx.y * K + j] : acc[p][0];
            if (v > best[p / 2]) { best[p / 2] = v; at[p / 2] = j; }
        }
    }
    for (int p = 0; p < 2; p++) {
        for (int h = 8; h; h >>= 1) {                            // ties: the lower centre
            float v = __shfl_xor_sync(0xffffffffu, best[p], h);
            int j = __shfl_xor_sync(0xffffffffu, at[p], h);
            if (v > best[p] || (v == best[p] && j < at[p])) { best[p] = v; at[p] = j; }
        }
        if (!tj && i0 + ti + 16 * p < n) label[i0 + ti + 16 * p] = at[p];
    }
}
// update_centres: one warp a centre walks through the labels and adds its points in ascending order; an empty one stays
static __global__ void centres_kernel(float *mu, const float *x, const int *label, int n, int D, int unit) {
    __shared__ float sum[MAX_D];
    int j = blockIdx.x, lane = threadIdx.x, count = 0;
    float acc[MAX_D / 32] = {0}, *to = mu + ((size_t)blockIdx.y * gridDim.x + j) * D;
    x += (size_t)blockIdx.y * n * D; label += (size_t)blockIdx.y * n;
    for (int i = 0; i < n; i += 32) {
        unsigned m = __ballot_sync(0xffffffffu, i + lane < n && label[i + lane] == j);
        for (count += __popc(m); m; m &= m - 1) {
            const float *p = x + (size_t)(i + lowest_bit(m)) * D;
            for (int c = 0; c < MAX_D / 32; c++) if (lane + 32 * c < D) acc[c] += p[lane + 32 * c];
        }
    }
    if (!count) return;                                          // the whole warp
    for (int c = 0; c < MAX_D / 32; c++) if (lane + 32 * c < D) sum[lane + 32 * c] = unit ? acc[c] : acc[c] / (float)count;
    if (unit) normalise(sum, D); else __syncwarp();
    for (int d = lane; d < D; d += 32) to[d] = sum[d];
}
static __device__ Nodes *level_of(Tree *t, int coarse) { return coarse ? &t->coarse : &t->fine; }
static __global__ void round_centres_kernel(Tree *t, int coarse, float *mu, int n) {             // mu (G,n) elements, rounded in place too
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float *x = mu + (size_t)blockIdx.y * n + i;
    *x = bf16_to_f32(level_of(&t[blockIdx.y], coarse)->mu[i] = f32_to_bf16(*x));
}

// ---- the nodes: children in ascending order, counts and radii. One warp a node, blockIdx.y the tree
static __global__ void children_kernel(Tree *t, int coarse, const int *label, int n) {           // label (G,n): the node of each child
    int j = blockIdx.x, lane = threadIdx.x, last = -1;
    Nodes *u = level_of(&t[blockIdx.y], coarse);
    label += (size_t)blockIdx.y * n;
    if (!lane) u->first[j] = -1;
    for (int i = 0; i < n; i += 32) {
        unsigned m = __ballot_sync(0xffffffffu, i + lane < n && label[i + lane] == j);
        if (!lane && coarse) for (unsigned k = m; k; k &= k - 1) t[blockIdx.y].parent[i + lowest_bit(k)] = j;
        for (; m; m &= m - 1) {
            int child = i + lowest_bit(m);
            if (!lane) { if (last < 0) u->first[j] = child; else u->next[last] = child; u->next[child] = -1; }
            last = child;
        }
    }
    if (!lane) u->last[j] = last;
}
static __global__ void cover_kernel(Tree *t, int coarse, const float *keys, const int *label, const int *start, int M, int D) {    // node_cover of every chunk
    int j = blockIdx.x, lane = threadIdx.x, chunks = 0, tokens = 0;
    Tree *tree = &t[blockIdx.y];
    Nodes *u = level_of(tree, coarse);
    float r = 0;
    label += (size_t)blockIdx.y * M; keys += (size_t)blockIdx.y * M * D;
    for (int i = lane; i < M; i += 32) {
        if ((coarse ? tree->parent[label[i]] : label[i]) != j) continue;
        chunks++; tokens += start[i + 1] - start[i];
        r = fmaxf(r, above(distance(keys + (size_t)i * D, u->mu + (size_t)j * D, D)));
    }
    r = max_warp(r);
    for (int d = 16; d; d >>= 1) { chunks += __shfl_xor_sync(0xffffffffu, chunks, d); tokens += __shfl_xor_sync(0xffffffffu, tokens, d); }
    if (!lane) { u->r[j] = r; u->chunks[j] = chunks; u->tokens[j] = tokens; }
}
static __global__ void cover_tokens_kernel(Tree *t, Column a, const int *start) {  // cover_tokens: centre and radius of a cluster from its raw keys
    __shared__ float row[MAX_D];
    int j = blockIdx.x, lane = threadIdx.x;
    const HeadRef &h = a.heads.at[blockIdx.y];
    Nodes *u = &t[blockIdx.y].fine;
    float acc[MAX_D / 32] = {0}, r = 0, tokens = (float)u->tokens[j];
    if (!u->chunks[j]) return;                                   // the whole warp
    for (int i = u->first[j]; i >= 0; i = u->next[i])
        for (int k = start[i]; k < start[i + 1]; k++)
            for (int c = 0; c < MAX_D / 32; c++) if (lane + 32 * c < a.D) acc[c] += row_value(a, h, k, lane + 32 * c) / tokens;
    for (int c = 0; c < MAX_D / 32; c++) if (lane + 32 * c < a.D) u->mu[(size_t)j * a.D + lane + 32 * c] = f32_to_bf16(acc[c]);
    __syncwarp();
    for (int i = u->first[j]; i >= 0; i = u->next[i])
        for (int k = start[i]; k < start[i + 1]; k++) {
            for (int d = lane; d < a.D; d += 32) row[d] = row_value(a, h, k, d);
            __syncwarp();
            r = fmaxf(r, above(distance(row, u->mu + (size_t)j * a.D, a.D)));
            __syncwarp();
        }
    if (!lane) u->r[j] = r;
}
static __device__ float unit_rho(const Tree *t, int g, float beta, int D, float *room) {         // one warp; room (D) shared
    float rho = 0;
    for (int c = t->coarse.first[g]; c >= 0; c = t->coarse.next[c]) {
        if (!t->fine.chunks[c]) continue;
        for (int d = threadIdx.x & 31; d < D; d += 32) room[d] = bf16_to_f32(t->fine.mu[(size_t)c * D + d]);
        __syncwarp();
        rho = fmaxf(rho, above(__dadd_rn(distance(room, t->coarse.mu + (size_t)g * D, D), __dmul_rn((double)beta, t->fine.r[c]))));
        __syncwarp();
    }
    return rho;
}
static __global__ void rho_kernel(Tree *t, float beta, int D) {
    __shared__ float room[MAX_D];
    float rho = unit_rho(&t[blockIdx.y], blockIdx.x, beta, D, room);
    if (!threadIdx.x) t[blockIdx.y].rho[blockIdx.x] = rho;
}

// ---- the host's side of building
static const int *starts_upload(Session *s, const LycheeRule *x) {              // M, and the starts
    int *dev = room<int>(s, ROOM_START, x->M + 2);
    upload(dev, &x->M, sizeof(int));
    upload(dev + 1, x->start, (x->M + 1) * sizeof(int));
    return dev + 1;
}
static Tree *trees_of(const Session *s, int l) { return (Tree *)s->dev->room[ROOM_TREES].p + (size_t)l * s->c->G; }      // (G), as the last build left them
// kmeans: x (G,n,D) -> mu (G,K,D) as rounded, level's mu, label (G,n)
static void kmeans_device(Session *s, const LycheeRule *x, Tree *t, int coarse, const float *points, int n, int K, float *mu, float *len, int *label) {
    int D = s->c->D, G = s->c->G;
    size_t smem = assign_smem(D);
    dim3 nodes(K, G), tiles(blocks(n, POINTS), G), all(blocks((size_t)K * D, 256), G);
    KV_LAUNCH(first_centres_kernel, nodes, 32, 0, mu, points, n, D);
    for (int i = 0; i <= x->iters; i++) {
        if (i == x->iters) KV_LAUNCH(round_centres_kernel, all, 256, 0, t, coarse, mu, K * D);
        if (!x->unit) KV_LAUNCH(lengths_kernel, nodes, 32, 0, len, mu, D);
        KV_LAUNCH_WIDE(assign_kernel, tiles, 256, smem, points, n, mu, K, D, x->unit ? (const float *)NULL : len, label);
        if (i < x->iters) KV_LAUNCH(centres_kernel, nodes, 32, 0, mu, points, label, n, D, x->unit);
    }
}
void lychee_build_cuda(Session *s, const LycheeRule *x, int l, const Tree *trees) {              // tree_build of a layer's heads
    int D = s->c->D, G = s->c->G, M = x->M, K = trees->fine.n, P = trees->coarse.n;
    const int *start = starts_upload(s, x);
    room<Tree>(s, ROOM_TREES, (size_t)s->c->L * G);
    Tree *t = trees_of(s, l);                                    // pointers into device memory
    upload(t, trees, G * sizeof(Tree));
    float *keys = room<float>(s, ROOM_KEYS, (size_t)G * M * D), *mu = room<float>(s, ROOM_CENTRES, (size_t)G * (K + P) * (D + 1));
    float *gmu = mu + (size_t)G * K * D, *len = gmu + (size_t)G * P * D;
    int *label = room<int>(s, ROOM_LABELS, (size_t)G * (M + K)), *glabel = label + (size_t)G * M;
    dim3 chunks(M, G), fine(K, G), coarse(P, G);
    KV_LAUNCH(chunk_keys_kernel, chunks, 32, 0, keys_of(s, l), x->pool_max, start, keys);
    kmeans_device(s, x, t, 0, keys, M, K, mu, len, label);
    if (P) kmeans_device(s, x, t, 1, mu, K, P, gmu, len, glabel);
    KV_LAUNCH(children_kernel, fine, 32, 0, t, 0, label, M);
    KV_LAUNCH(cover_kernel, fine, 32, 0, t, 0, keys, label, start, M, D);
    if (P) KV_LAUNCH(children_kernel, coarse, 32, 0, t, 1, glabel, K);
    if (P) KV_LAUNCH(cover_kernel, coarse, 32, 0, t, 1, keys, label, start, M, D);
    if (x->tokens) KV_LAUNCH(cover_tokens_kernel, fine, 32, 0, t, keys_of(s, l), start);
    if (P) KV_LAUNCH(rho_kernel, coarse, 32, 0, t, x->beta, D);
}

// ---- grafting: tree_graft, a block a tree. All warps look for the nearest cluster, the first one takes the chunk in
enum { GRAFT_THREADS = 256 };
static __device__ void node_absorb(const LycheeRule &x, Nodes *u, int node, int n, const float *v, int unit, int D, float *room) {    // one warp; v, room (D) shared
    uint16_t *mu = u->mu + (size_t)node * D;
    int lane = threadIdx.x & 31;
    double d = distance(v, mu, D), r = u->r[node], delta = 0;
    double step = x.lazy == LAZY_MEAN ? 1 / (n + 1.0) : x.lazy == LAZY_BALL && d > r ? (d - r) / (2 * d) : 0;
    if (step > 0) {
        for (int i = lane; i < D; i += 32) {
            float m = bf16_to_f32(mu[i]);
            room[i] = (float)__dadd_rn(m, __dmul_rn(step, (double)v[i] - m));
        }
        if (x.lazy == LAZY_MEAN && unit) normalise(room, D); else __syncwarp();
        for (int i = 0; i < D; i++) {                            // every lane the same sum
            double e = (double)bf16_to_f32(f32_to_bf16(room[i])) - bf16_to_f32(mu[i]);
            delta = __dadd_rn(delta, __dmul_rn(e, e));
        }
        __syncwarp();                                            // the old centre has been read
        for (int i = lane; i < D; i += 32) mu[i] = f32_to_bf16(room[i]);
        __syncwarp();
        delta = sqrt(delta);
        d = distance(v, mu, D);
    }
    __syncwarp();
    if (!lane && (delta > 0 || d > r)) u->r[node] = above(fmax(r + delta, d));
    __syncwarp();
}
// nearest_cluster: the block's best cluster for v (D) shared; ties: the lower one
static __device__ int nearest_cluster(const Nodes *u, const float *v, int tokens, int D, float *best_of, int *at_of) {
    int half = threadIdx.x >> 4, halves = GRAFT_THREADS / 16, at = 0;
    float best = -INFINITY;
    for (int c0 = 0; c0 < u->n; c0 += halves) {                  // all lanes take part in every shuffle
        int c = c0 + half < u->n ? c0 + half : u->n - 1;
        const uint16_t *mu = u->mu + (size_t)c * D;
        float S = dot_centre(v, mu, D), ss = 0;
        if (tokens) {                                            // raw centres differ in length: compare directions
            for (int d = threadIdx.x & 15; d < D; d += 16) ss = fmaf(bf16_to_f32(mu[d]), bf16_to_f32(mu[d]), ss);
            S /= sqrtf(lanes_fold(ss) + 1e-12f);
        }
        if (u->chunks[c] && (S > best || (S == best && c < at))) { best = S; at = c; }
    }
    if (!(threadIdx.x & 15)) { best_of[half] = best; at_of[half] = at; }
    __syncthreads();
    for (int i = 0; i < halves; i++) if (best_of[i] > best || (best_of[i] == best && at_of[i] < at)) { best = best_of[i]; at = at_of[i]; }
    return at;
}
static __device__ void child_append(Nodes *u, int node, int child, int tokens) {                 // one thread
    u->next[child] = -1;
    if (u->first[node] < 0) u->first[node] = child; else u->next[u->last[node]] = child;
    u->last[node] = child;
    u->chunks[node]++; u->tokens[node] += tokens;
}
static __global__ void __launch_bounds__(GRAFT_THREADS, 1) graft_kernel(Tree *trees, Column a, LycheeRule x, const int *start, int from) {
    __shared__ float v[MAX_D], row[MAX_D], tmp[MAX_D], best_of[GRAFT_THREADS / 16];
    __shared__ int at_of[GRAFT_THREADS / 16];
    Tree *t = &trees[blockIdx.x];
    const HeadRef &h = a.heads.at[blockIdx.x];
    int lane = threadIdx.x & 31, D = a.D;
    for (int j = from; j < x.M; j++) {
        int n = start[j + 1] - start[j];
        if (threadIdx.x < 32) chunk_key(a, x.pool_max, h, start[j], n, v);
        __syncthreads();
        int c = nearest_cluster(&t->fine, v, x.tokens, D, best_of, at_of);
        if (threadIdx.x < 32) {
            for (int i = 0; i < (x.tokens ? n : 1); i++) {       // bound=token: the chunk's raw keys one by one
                for (int d = lane; d < D; d += 32) row[d] = x.tokens ? row_value(a, h, start[j] + i, d) : v[d];
                __syncwarp();
                node_absorb(x, &t->fine, c, x.tokens ? t->fine.tokens[c] + i : t->fine.chunks[c], row, x.unit && !x.tokens, D, tmp);
            }
            if (!lane) child_append(&t->fine, c, j, n);
            __syncwarp();
            if (t->coarse.n) {
                int g = t->parent[c];
                node_absorb(x, &t->coarse, g, t->coarse.chunks[g], v, x.unit, D, tmp);
                float rho = unit_rho(t, g, x.beta, D, tmp);
                if (!lane) { t->coarse.chunks[g]++; t->coarse.tokens[g] += n; t->rho[g] = rho; }
            }
        }
        __syncthreads();                                         // the next chunk sees what this one changed
    }
}
void lychee_graft_cuda(Session *s, const LycheeRule *x, int l, int from) {
    const int *start = starts_upload(s, x);
    KV_LAUNCH(graft_kernel, s->c->G, GRAFT_THREADS, 0, trees_of(s, l), keys_of(s, l), *x, start, from);
}

// ---- retrieval: scores (of units, then of the clusters below opened ones), the best clusters, their chunks under the budget, rows.
// A list is what a group of query heads reads, or one head under gqa=head; blockIdx.y is the list. --lychee-prune=exact reads what a flat scan
// reads, so it is one here.
struct Probes { const float *q; int m, R, D, gqa; };             // q (H,D); m: query heads of a list
struct Probe { const float *q; int m; const float *w; float slack; };
static size_t probe_smem(int m, int D) { return ((size_t)m * D + D + m + 1) * sizeof(float); }
// probe_max, probe_sum: all threads of a block; room: probe_smem
static __device__ Probe probe_make(const Probes &a, int list, float *room) {
    const float *q = a.q + (size_t)list * a.m * a.D;
    float *own = room, *sum = own + a.m * a.D, *w = sum + a.D, slack = 0;        // (m,D) (D) (m)
    for (int i = threadIdx.x; i < a.m * a.D; i += blockDim.x) own[i] = q[i];
    __syncthreads();
    for (int d = threadIdx.x; d < a.D; d += blockDim.x) {
        float x = 0;
        for (int i = 0; i < a.m; i++) x += own[i * a.D + d];
        sum[d] = x;
    }
    for (int i = 0; i < a.m; i++) {                              // every half warp the same
        float length = sqrtf(dot_lanes(own + i * a.D, own + i * a.D, a.D));
        if (!threadIdx.x) w[i] = 1 / fmaxf(length, 1e-20f);
        slack += length;
    }
    __syncthreads();
    Probe p = { own, a.m, w, 1 };
    if (a.gqa != GQA_MAX) { p.q = sum; p.m = 1; p.w = NULL; p.slack = slack; }
    return p;
}
static __device__ float probe_score(const Probe &p, const uint16_t *mu, float r, float beta, int D) {    // a half warp
    float top = -INFINITY;
    for (int i = 0; i < p.m; i++) {
        float v = dot_centre(p.q + i * D, mu, D);
        if (p.w) v *= p.w[i];
        top = v > top ? v : top;
    }
    return beta ? __fadd_rn(top, __fmul_rn(__fmul_rn(beta, p.slack), r)) : top;
}
// open_top: units by score, the first `want` of them and more while they hold too few tokens. open (lists,P). One block a list
static __global__ void open_units_kernel(Tree *trees, Probes a, float beta, int want, int least, float *score, unsigned char *open) {
    KV_DYN_SHARED(float, room);
    int list = blockIdx.x, half = threadIdx.x >> 4;
    const Nodes *u = &trees[list / (a.R / a.m)].coarse;
    Probe p = probe_make(a, list, room);
    score += (size_t)list * u->n; open += (size_t)list * u->n;
    for (int g0 = 0; g0 < u->n; g0 += blockDim.x / 16) {
        int g = g0 + half < u->n ? g0 + half : u->n - 1;
        float S = probe_score(p, u->mu + (size_t)g * a.D, u->r[g], beta, a.D);
        if (!(threadIdx.x & 15) && g0 + half < u->n) score[g] = S;
    }
    __syncthreads();
    for (int g = threadIdx.x; g < u->n; g += blockDim.x) {       // a unit is opened iff those before it are too few
        int before = 0, tokens = 0;
        for (int i = 0; i < u->n; i++) {
            if (!u->chunks[i] || !(score[i] > score[g] || (score[i] == score[g] && i < g))) continue;
            before++; tokens += u->tokens[i];
        }
        open[g] = u->chunks[g] && (before < want || tokens < least);
    }
}
// score (lists,K); rows (lists): K clusters, of which `most` are wanted
static __global__ void cluster_scores_kernel(Tree *trees, Probes a, float beta, const unsigned char *open, float *score, TopRow *rows, int most) {
    KV_DYN_SHARED(float, room);
    int list = blockIdx.y, half = threadIdx.x >> 4;
    const Tree *t = &trees[list / (a.R / a.m)];
    const Nodes *u = &t->fine;
    if (!blockIdx.x && !threadIdx.x) rows[list] = { u->n, most };
    Probe p = probe_make(a, list, room);
    int c = blockIdx.x * (blockDim.x / 16) + half, last = c < u->n ? c : u->n - 1;
    int dead = !u->chunks[last] || (open && !open[(size_t)list * t->coarse.n + t->parent[last]]);
    if (__all_sync(0xffffffffu, dead)) { if (!(threadIdx.x & 15) && c < u->n) score[(size_t)list * u->n + c] = -INFINITY; return; }
    float S = probe_score(p, u->mu + (size_t)last * a.D, u->r[last], beta, a.D);
    if (!(threadIdx.x & 15) && c < u->n) score[(size_t)list * u->n + c] = dead ? -INFINITY : S;
}
// retrieve and rows_to_read: out (lists,stride) = LIST_HEAD numbers; the rows (per); the clusters when wanted. chunks: M, their M+1 starts; cand
// (lists,most) ascending; taken (lists,cap)
enum { TAKE_THREADS = 256 };
struct Take { const Tree *trees; const int *chunks, *cand, *count; const float *score; int *order; unsigned char *taken; int *out, stride, most, per, lists, cap, room, sink; };
static __device__ int take_clusters(const Take &a, const int *start, const Nodes *u, const int *order, int n, unsigned char *taken, int *tokens) {    // one thread: clusters that fit, in order
    int used = 0, i = 0, part = 0;
    while (i < n && used + u->tokens[order[i]] <= a.room) used += u->tokens[order[i++]];
    for (int j = i < n ? u->first[order[i]] : -1; j >= 0; j = u->next[j]) {     // the first chunk that does not fit ends it
        int k = start[j + 1] - start[j];
        if (used + k > a.room) break;
        taken[j] = 1; used += k; part = 1;
    }
    *tokens = used;
    return i * 2 + part;
}
static __global__ void __launch_bounds__(TAKE_THREADS) take_kernel(Take a) {
    __shared__ int state[2], sum[TAKE_THREADS / 32];
    int list = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = a.count[list], valid = 0, M = a.chunks[0];
    const int *start = a.chunks + 1;
    const Nodes *u = &a.trees[list / a.lists].fine;
    const float *S = a.score + (size_t)list * u->n;
    const int *cand = a.cand + (size_t)list * a.most;
    int *order = a.order + (size_t)list * a.most, *out = a.out + (size_t)list * a.stride;
    unsigned char *taken = a.taken + (size_t)list * a.cap;
    for (int i = 0; i < n; i++) valid += S[cand[i]] > -INFINITY;
    for (int i = threadIdx.x; i < n; i += TAKE_THREADS) {        // place in the order: larger score, then lower number
        int c = cand[i], place = 0;
        if (!(S[c] > -INFINITY)) continue;
        for (int k = 0; k < n; k++) place += S[cand[k]] > S[c] || (S[cand[k]] == S[c] && cand[k] < c);
        order[place] = c;
    }
    for (int j = threadIdx.x; j < M; j += TAKE_THREADS) taken[j] = 0;
    __syncthreads();
    if (!threadIdx.x) { state[0] = take_clusters(a, start, u, order, valid, taken, &out[LIST_TOKENS]); out[LIST_CLUSTERS] = state[0] / 2 + state[0] % 2; }
    __syncthreads();
    for (int i = threadIdx.x; i < state[0] / 2; i += TAKE_THREADS) for (int j = u->first[order[i]]; j >= 0; j = u->next[j]) taken[j] = 1;
    for (int i = threadIdx.x; a.stride > LIST_HEAD + a.per && i < state[0] / 2 + state[0] % 2; i += TAKE_THREADS) out[LIST_HEAD + a.per + i] = order[i];
    for (int r = threadIdx.x; r < a.sink; r += TAKE_THREADS) out[LIST_HEAD + r] = r;
    int at = a.sink;
    for (int j0 = 0; j0 < M; j0 += TAKE_THREADS) {               // rows of the taken chunks, ascending: a sum of lengths says where
        int j = j0 + threadIdx.x, before, all = 0;
        __syncthreads();
        int len = j < M && taken[j] ? start[j + 1] - start[j] : 0;
        before = len;
        for (int d = 1; d < 32; d *= 2) { int x = __shfl_up_sync(0xffffffffu, before, d); if (lane >= d) before += x; }
        if (lane == 31) sum[warp] = before;
        __syncthreads();
        for (int w = 0; w < TAKE_THREADS / 32; w++) { if (w == warp) before += all; all += sum[w]; }
        for (int r = 0; r < len; r++) out[LIST_HEAD + at + before - len + r] = start[j] + r;
        at += all;
    }
    if (!threadIdx.x) { out[LIST_ROWS] = at; out[LIST_TAIL] = start[M]; }
}
// bring: -> (lists,LIST_HEAD + 2 per) on the host, in scratch. Otherwise the lists, one a KV head, become the layer's views, and NULL is returned.
// per: sink + room at least; M > 0
int *lychee_seek_cuda(Session *s, const LycheeRule *x, int l, const Tree *trees, const float *q, int per, int bring) {
    int H = s->c->H, G = s->c->G, R = H / G, D = s->c->D, m = x->gqa == GQA_HEAD ? 1 : R, lists = H / m, K = trees->fine.n, P = trees->coarse.n;
    int most = x->room / x->min < K ? x->room / x->min : K, stride = LIST_HEAD + (bring ? 2 : 1) * per;
    size_t n_score = (size_t)lists * (K + P), n_out = bring ? (size_t)lists * stride : 0;
    size_t bytes = n_score * 4 + (n_out + lists * (2 * most + 1)) * 4 + (size_t)lists * (x->cap + P);
    float *score = (float *)room<char>(s, ROOM_SEEK, bytes), *unit = score + (size_t)lists * K;
    int *here = (int *)(score + n_score), *cand = here + n_out, *order = cand + lists * most, *count = order + lists * most;
    unsigned char *taken = (unsigned char *)(count + lists), *open = taken + (size_t)lists * x->cap;
    int *out = bring ? here : chosen_room(s, l, stride);
    Probes p = { q, m, R, D, x->gqa };
    Tree *t = trees_of(s, l);
    const int *chunks = (const int *)s->dev->room[ROOM_START].p; // as the last build or graft left it
    TopRow *rows = room<TopRow>(s, ROOM_LIST, lists);
    dim3 all(blocks(K, 16), lists);
    if (x->units) KV_LAUNCH(open_units_kernel, lists, 256, probe_smem(m, D), t, p, x->beta_coarse, x->units, 4 * x->room, unit, open);
    KV_LAUNCH(cluster_scores_kernel, all, 256, probe_smem(m, D), t, p, x->beta, x->units ? open : (unsigned char *)NULL, score, rows, most);
    top_k_device(s, score, lists, K, NULL, cand, most, count);
    Take a = { t, chunks, cand, count, score, order, taken, out, stride, most, per, R / m, x->cap, x->room, x->sink };
    KV_LAUNCH(take_kernel, lists, TAKE_THREADS, 0, a);
    if (!bring) return NULL;
    int *host = (int *)scratch(s, n_out * sizeof(int));
    download(host, out, n_out * sizeof(int));
    return host;
}

// ==================================================================================================== 12 SONIC INFERENCE
// TO BE WRITTEN

// ==================================================================================================== 13 DILILAZYKV
// TO BE WRITTEN

// ==================================================================================================== 28 BENCHMARK
// ---- for --bench
float *device_floats(const float *x, size_t n) {
    char *p = device_new(n * sizeof *x);
    upload(p, x, n * sizeof *x);
    return (float *)p;
}
void device_drop(float *x) { KV_CUDA(cudaStreamSynchronize(kv_stream)); device_free(x); }
double device_copy_rate(void) {                                  // the best of five
    char *from = device_new(COPY_BYTES), *to = device_new(COPY_BYTES);
    double best = 0;
    KV_CUDA(cudaMemsetAsync(from, 1, COPY_BYTES, kv_stream));
    for (int i = 0; i < 5; i++) {
        KV_CUDA(cudaStreamSynchronize(kv_stream));
        double t = now();
        device_copy(to, from, COPY_BYTES);
        KV_CUDA(cudaStreamSynchronize(kv_stream));
        best = fmax(best, 2.0 * COPY_BYTES / (now() - t));
    }
    device_free(from); device_free(to);
    return best;
}
double device_gemm_rate(Session *s, int O, int I, int T) {       // one product, as cuBLAS does it with ordinary bf16 factors
    size_t nw = (size_t)O * I * 2, nx = (size_t)T * I * 2;
    char *w = device_new(nw), *x = device_new(nx), *y = device_new((size_t)T * O * sizeof(float));
    const float one = 1, zero = 0;
    double best = 0;
    KV_CUDA(cudaMemsetAsync(w, 0x3c, nw, kv_stream));
    KV_CUDA(cudaMemsetAsync(x, 0x3c, nx, kv_stream));
    for (int i = 0; i < 5; i++) {
        KV_CUDA(cudaStreamSynchronize(kv_stream));
        double t = now();
        KV_BLAS(cublasGemmEx(s->dev->blas, CUBLAS_OP_T, CUBLAS_OP_N, O, T, I, &one, w, CUDA_R_16BF, I, x, CUDA_R_16BF, I,
                             &zero, y, CUDA_R_32F, O, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        KV_CUDA(cudaStreamSynchronize(kv_stream));
        best = fmax(best, 2.0 * O * I * T / (now() - t));
    }
    device_free(w); device_free(x); device_free(y);
    return best;
}

// ==================================================================================================== TESTS
// Doors for tests.c, which cannot see static functions of another file.
#ifdef KVCOMP_TEST
extern "C" {
void *cuda_put(const void *host, size_t bytes) { char *p = device_new(bytes); upload(p, host, bytes); return p; }
void cuda_get(void *host, const void *dev, size_t bytes) { download(host, dev, bytes); }
void cuda_drop(void *dev) { device_free(dev); }
size_t cuda_held(const Session *s) {                             // bytes of K and V rows really asked for
    size_t n = 0, row = s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
    for (int i = 0; i < s->c->L * s->c->G; i++) n += s->dev->held[i].cap * row + 2 * s->dev->held[i].pk_bytes;
    return n;
}
// y, x (T,..) on the host. 'm' product, 'p' y += product, 'n' norm, 'b' y += bias, 's' y = silu(y) x
void cuda_math(Session *s, char op, float *y, size_t ny, const float *x, size_t nx, const Tensor *w, int T) {
    float *dy = (float *)cuda_put(y, ny * sizeof(float)), *dx = (float *)cuda_put(x, nx * sizeof(float));
    Linear p = { dy, w, NULL };
    if (op == 'm') linear<GEMV_STORE>(s, dx, T, &p, 1);
    if (op == 'p') linear<GEMV_ADD>(s, dx, T, &p, 1);
    if (op == 'n') rmsnorm_cuda(s, dy, dx, w, T, w->cols);
    if (op == 'b') bias_cuda(s, dy, w, T, w->cols);
    if (op == 's') KV_LAUNCH(swiglu_kernel, blocks(ny, 256), 256, 0, dy, dx, ny);
    download(y, dy, ny * sizeof(float));
    cuda_drop(dy); cuda_drop(dx);
}
size_t cuda_chunk(size_t total) { return chunk_rows(total); }
int cuda_graphs(const Session *s) { return s->dev->graph != NULL; }
}
#endif

