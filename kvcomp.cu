// kvcomp.cu - the GPU half of kvcomp. The same sections as kvcomp.c, under the same banners: read kvcomp.c first.
//
// Session.dev != NULL means: KVHead.k and .v are device memory, and everything else of a head (src, pos, mass, lengths)
// stays on the host, where the methods decide. The arithmetic of a pass runs here; hooks get f32 copies of q, k, v when
// some part has a hook that wants them. Layouts are kvcomp.h's: x (T,C), q (T,H,D), k v (T,G,D), rows as their Format says.
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

// ==================================================================================================== 1 HELPERS
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
       ROOM_PART, ROOM_STAT, ROOM_COL, ROOM_MOVE, ROOM_STEP, ROOM_WORK, ROOM_ITEM, ROOM_LIST, ROOM_LOGITS, ROOM_HOOK_Q, ROOM_HOOK_OUT, N_ROOMS };

// Host tensors that lie on the device too, found by their host address.
enum { MAP_SIZE = 1 << 13 };
struct Copied { const void *host; char *dev; };
struct Map { Copied at[MAP_SIZE]; int n; };

struct Shared { const Weights *w; int users; Map map; Shared *next; };      // one upload of a model, whatever the number of sessions
static Shared *all_shared;

struct Device {
    cublasHandle_t blas;
    Room room[N_ROOMS];
    Shared *base;               // the model's tensors
    Map alt;                    // tensors of Session.alt
    int **src;                  // (L*G) device copies of KVHead.src, as long as the head's cap
    int n_tok;                  // tokens ROOM_TOK holds
    struct Step *step;          // pinned: what the next decode step is told ...
    float *logits;              // (V) ... and says; see "a decode step in one go"
    unsigned seen;              // Session.changes when what follows was made
    int *first;                 // (L+1) works of the layers before
    int grid, BQ;               // items of a layer, at most; query rows of a work
    double rows, lists;         // rows all lists of the last step had together; lists
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

// ==================================================================================================== 4 MATH
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
enum { GEMV_ROWS = 4, GEMV_WARPS = 4 };
enum { GEMV_STORE, GEMV_ADD, GEMV_SWIGLU };                      // y = Wx + b | y += Wx + b | y = silu(W0 x + b0) (W1 x + b1), rows of both in turn
struct GemvPart { const char *w; const void *bias; float *y; int rows, bias_type; };     // bias NULL: none
struct Gemv { GemvPart part[3]; int rows, cols; };               // rows: of all parts

template <int DT> static __device__ float dot16(const char *w, int i, const float *x) {         // 16 bytes of W from element i
    if (DT == DT_F32) {
        float4 a = *(const float4 *)(w + (size_t)i * 4), b = *(const float4 *)x;
        return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
    }
    uint4 u = *(const uint4 *)(w + (size_t)i * 2);
    float4 a = *(const float4 *)x, b = *(const float4 *)(x + 4);
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
    if (wide) KV_UNROLL(2) for (int c = lane * step; c < a.cols; c += 32 * step) for (int j = 0; j < GEMV_ROWS; j++) sum[j] += dot16<DT>(w[j], c, x + c);
    else      for (int c = lane; c < a.cols; c += 32)               for (int j = 0; j < GEMV_ROWS; j++) sum[j] += number(w[j], DT, c) * x[c];
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

// ==================================================================================================== 5 KV CACHE
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
enum { MAX_G = 64, MAX_D = 128 };                // KV heads a kernel's argument has room for; head_dim the kernels can do
struct HeadRef { char *k, *v; int *src; int row; };              // row: where the new rows begin
struct HeadRefs { HeadRef at[MAX_G]; };

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
    size_t r = (size_t)(step ? step->len[head0 + g] : h.row) + t;
    for (int d = lane; d < whole; d += 32) {                     // whole blocks of 32, so that all lanes meet in row_put
        row_put(h.k + r * bytes_k, kind_k, d, D, d < D ? turned(from_k, cs, d, D) : 0);
        row_put(h.v + r * bytes_v, kind_v, d, D, d < D ? from_v[d] : 0);
    }
    if (!lane) h.src[r] = (step ? step->base : tok0) + t;
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
void rows_resize_cuda(Session *s, KVHead *h, int cap) {          // h->cap is still the old one
    size_t bk = s->fk->row_bytes(s->c->D), bv = s->fv->row_bytes(s->c->D);
    int **src = &s->dev->src[h - s->head];
    h->k = grown(h->k, h->cap * bk, cap * bk);
    h->v = grown(h->v, h->cap * bv, cap * bv);
    *src = (int *)grown((char *)*src, h->cap * sizeof(int), cap * sizeof(int));
}
static HeadRefs head_refs(const Session *s, int l) {
    HeadRefs r;
    memset(&r, 0, sizeof r);
    for (int g = 0; g < s->c->G; g++) {
        const KVHead *h = kv_head(s, l, g);
        r.at[g] = { h->k, h->v, s->dev->src[h - s->head], h->len };
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
void rows_move_cuda(Session *s, KVHead *h, const int *keep, int n) {            // row i becomes row keep[i]; what follows is free
    int first = 0;
    while (first < n && keep[first] == first) first++;           // those stay where they are
    if (first == n) return;
    size_t m = n - first;
    int *rows = room<int>(s, ROOM_LIST, m);
    upload(rows, keep + first, m * sizeof(int));
    struct { char *p; size_t bytes; } part[] = { { h->k, s->fk->row_bytes(s->c->D) }, { h->v, s->fv->row_bytes(s->c->D) },
                                                 { (char *)s->dev->src[h - s->head], sizeof(int) } };
    for (auto &x : part) {                                       // threads run in any order, so the rows go through a second buffer
        char *to = room<char>(s, ROOM_MOVE, m * x.bytes);
        KV_LAUNCH(gather_kernel, blocks(m * (x.bytes / 2), 256), 256, 0, to, x.p, rows, x.bytes, m);
        device_copy(x.p + first * x.bytes, to, m * x.bytes);
    }
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

// ==================================================================================================== 6 ATTENTION
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
static __device__ void load_tile(float *to, int stride, const char *rows, size_t bytes, int kind, const int *row, int n, int D) {
    int lane = threadIdx.x & 31;
    for (int j = threadIdx.x >> 5; j < n; j += ATTN_WARPS)
        for (int d = lane; d < D; d += 32) to[j * stride + d] = row_get(rows + row[j] * bytes, kind, d);
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
        load_tile(kv, D + 1, h.k, a.bytes_k, a.kind_k, row, n, D);
        __syncthreads();
        score_rows<QW>(score, q + warp * QW * D, kv + (lane < n ? lane : 0) * (D + 1), D);
        int first = w.tok0 + w.m0 / a.R, masked = a.rule != VIS_CAUSAL || a.window || src[n - 1] > first;
        for (int i = 0; i < QW; i++) {
            int j = warp * QW + i, t = w.tok0 + (w.m0 + j) / a.R, see = lane < n && j < w.m;
            if (see && masked) see = kv_visible(a.rule, a.window, &a.tok[t], t, &a.tok[src[lane]], src[lane]);
            sc[j * (TILE + 1) + lane] = see ? score[i] * a.scale : -INFINITY;
        }
        __syncwarp();
        float *mine = sc + (warp * QW + lane / LANES) * (TILE + 1) + lane % LANES, high = top, add = 0;
        for (int j = 0; j < TILE; j += LANES) high = fmaxf(high, mine[j]);
        for (int d = LANES / 2; d; d >>= 1) high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, d));
        for (int j = 0; j < TILE; j += LANES) { float e = high == -INFINITY ? 0 : expf(mine[j] - high); mine[j] = e; add += e; }
        for (int d = LANES / 2; d; d >>= 1) add += __shfl_xor_sync(0xffffffffu, add, d);
        float c = high == -INFINITY ? 1 : expf(top - high);      // what was gathered under the old maximum
        sum = sum * c + add; top = high;
        if (lane % LANES == 0) fix[warp * QW + lane / LANES] = c;
        if (ND) {
            __syncthreads();                                     // the keys are done with
            load_tile(kv, D + 1, h.v, a.bytes_v, a.kind_v, row, n, D);
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
    int d = threadIdx.x;                                         // MAX_D threads
    if (out && d < D) out[row * D + d] = (sh[0][d] + sh[1][d] + sh[2][d] + sh[3][d]) / sum;
    if (!d) { stat[row * 2] = top; stat[row * 2 + 1] = sum; }
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
static size_t decode_smem(int NR, int D) { return ((size_t)ATTN_WARPS * NR * (D + 2) + NR * 128) * sizeof(float); }
// Four blocks an SM: the 512 items of a long context are one wave on a device of 132
template <int DT, int LW, int NR, int U> static __global__ void __launch_bounds__(ATTN_WARPS * 32, NR == 4 ? 4 : 3) decode_kernel(Attn a) {
    KV_DYN_SHARED(float, q);                                     // (NR,128), scaled, zeros behind D and m; then (ATTN_WARPS,NR,D+2)
    const int ROWS = 32 / LW;
    int D = a.D, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, d = lane % LW * 8, on = d < D, at8 = on ? d * (DT == DT_F32 ? 4 : 2) : 0, see[U];
    float *sh = q + NR * 128, acc[NR][8], s[NR][U], x[8], top[NR], sum[NR];
    Item it = a.item[blockIdx.x];
    Work w = a.work[it.work];
    HeadRef h = a.heads.at[w.g];
    for (int i = threadIdx.x; i < NR * 128; i += blockDim.x)
        q[i] = i / 128 < w.m && i % 128 < D ? a.q[(size_t)(w.g * a.R + w.m0 + i / 128) * D + i % 128] * a.scale : 0;
    __syncthreads();
    for (int i = 0; i < NR; i++) {
        for (int j = 0; j < 8; j++) acc[i][j] = 0;
        top[i] = -INFINITY; sum[i] = 0;
    }
    for (int p = it.p0 + warp * ROWS * U; p < it.p1; p += ATTN_WARPS * ROWS * U) {
        Eight<DT> k[U], v[U];
        for (int u = 0; u < U; u++) {
            int at = p + u * ROWS + lane / LW;
            see[u] = at < it.p1;
            if (!see[u]) at = it.p1 - 1;                         // a row that is there, and that nobody sees twice
            int row = at < w.n_idx ? a.idx[w.idx + at] : w.tail + at - w.n_idx;
            k[u] = load8<DT>(h.k + row * a.bytes_k + at8);
            v[u] = load8<DT>(h.v + row * a.bytes_v + at8);
            if (a.window || a.rule != VIS_CAUSAL) see[u] = see[u] && kv_visible(a.rule, a.window, &a.tok[w.tok0], w.tok0, &a.tok[h.src[row]], h.src[row]);
        }
        for (int u = 0; u < U; u++) {
            unpack8<DT>(x, k[u]);
            for (int i = 0; i < NR; i++) {
                const float4 *qi = (const float4 *)(q + i * 128 + d);
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

enum { TC_ROWS = 16 * ATTN_WARPS, TC_MIN = 256 };               // TC_MIN: tokens of a pass; below, split-K keeps more of the device busy
namespace wmma = nvcuda::wmma;
template <int DT> struct Half { typedef __half type; };
template <> struct Half<DT_BF16> { typedef __nv_bfloat16 type; };
typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sums;

template <int DT> static __device__ uint16_t half_put(float x) { return DT == DT_F16 ? f32_to_f16(x) : f32_to_bf16(x); }
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
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> x;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> k;
    Sums s[TILE / 16];
    for (int c = 0; c < TILE / 16; c++) wmma::fill_fragment(s[c], 0.f);
    for (int d = 0; d < D; d += 16)
        for (int rest = 0; rest < 2; rest++) {
            wmma::load_matrix_sync(x, (const T *)(q + rest * TC_ROWS * P + d), P);
            for (int c = 0; c < TILE / 16; c++) {
                wmma::load_matrix_sync(k, (const T *)(keys + c * 16 * P + d), P);
                wmma::mma_sync(s[c], x, k, s[c]);
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
template <int DT, int ND> static __device__ void tensor_mix(Sums *acc, const float *sc, const uint16_t *vals, int P, int D) {       // acc += p v
    typedef typename Half<DT>::type T;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> p[2];
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> v;
    for (int c = 0; c < TILE; c += 16) {
        for (int rest = 0; rest < 2; rest++) wmma::load_matrix_sync(p[rest], (const T *)sc + rest * TILE + c, 2 * (TILE + 4));
        for (int e = 0; e < ND; e++) {
            if (e * 16 >= D) continue;
            wmma::load_matrix_sync(v, (const T *)vals + c * P + e * 16, P);
            for (int rest = 0; rest < 2; rest++) wmma::mma_sync(acc[e], p[rest], v, acc[e]);
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
    load_tile(kv, D + 1, h.k, a.bytes_k, a.kind_k, row, n, D);
    for (int t0 = 0; t0 < n_q; t0 += 32) {
        __syncthreads();
        for (int j = warp; j < 32; j += ATTN_WARPS)
            for (int d = lane; d < D; d += 32) q[j * D + d] = t0 + j < n_q ? a.q[((size_t)(t0 + j) * a.H + head) * D + d] : 0;
        __syncthreads();
        score_rows<QW>(score, q + warp * QW * D, kv + (lane < n ? lane : 0) * (D + 1), D);
        for (int i = 0; i < QW; i++) {
            int j = t0 + warp * QW + i, t = a.tok0 + j;
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
struct Plan { Work *work; int n_work, *idx, n_idx, BQ, plain; };        // plain: for decode_kernel

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
    Plan p = { (Work *)scratch(s, (size_t)G * per * sizeof(Work)), 0, NULL, 0, BQ, 0 };
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
static int view_equal(const View *a, const View *b) {
    return a->n == b->n && a->tail == b->tail && (!a->n || !memcmp(a->idx, b->idx, (size_t)a->n * sizeof(int)));
}
// 0: query heads with equal views did not fit into one work, and the one before has counted their rows; as on the CPU, once
static int reads_first(const Session *s, int l, const Work *w) {
    int h = w->g * (s->c->H / s->c->G) + w->m0;
    return w->m0 && view_equal(kv_view(s, l, h), kv_view(s, l, h - 1)) ? 0 : 1;
}
static Plan plan_decode(Session *s, int l) {
    int H = s->c->H, G = s->c->G, R = H / G, total = 0;
    for (int h = 0; h < H; h++) total += kv_view(s, l, h)->n;
    Plan p = { (Work *)scratch(s, (size_t)H * sizeof(Work)), 0, (int *)scratch(s, (size_t)(total + 1) * sizeof(int)), 0, plain_rows(s) && R > 4 ? 8 : block_rows(R), plain_rows(s) };
    for (int h = 0, m; h < H; h += m) {
        const View *v = kv_view(s, l, h);
        for (m = 1; (h + m) % R && m < p.BQ && view_equal(v, kv_view(s, l, h + m)); m++) {}
        int rows = v->n + kv_head(s, l, h / R)->len - v->tail;
        p.work[p.n_work++] = { h / R, h % R, m, rows, p.n_idx, v->n, v->tail, s->tok[s->base].pos, s->base, 0, 0 };
        if (v->n) memcpy(p.idx + p.n_idx, v->idx, (size_t)v->n * sizeof(int));
        p.n_idx += v->n;
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
    if (!mix)           KV_LAUNCH((attend_kernel<QW, 0>), n, ATTN_WARPS * 32, smem, a);
    else if (a.D <= 64) KV_LAUNCH((attend_kernel<QW, 2>), n, ATTN_WARPS * 32, smem, a);
    else                KV_LAUNCH((attend_kernel<QW, 4>), n, ATTN_WARPS * 32, smem, a);
}
template <int DT> static void decode_launch(const Attn &a, int n, int BQ) {
    size_t smem = decode_smem(BQ, a.D);
    const int U = DT == DT_F32 ? 2 : 4;
    if (BQ == 4 && a.D > 64) KV_LAUNCH((decode_kernel<DT, 16, 4, U>), n, ATTN_WARPS * 32, smem, a);
    else if (BQ == 4)        KV_LAUNCH((decode_kernel<DT, 8, 4, U>),  n, ATTN_WARPS * 32, smem, a);
    else if (a.D > 64)       KV_LAUNCH((decode_kernel<DT, 16, 8, 2>), n, ATTN_WARPS * 32, smem, a);
    else                     KV_LAUNCH((decode_kernel<DT, 8, 8, 2>),  n, ATTN_WARPS * 32, smem, a);
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
// Runs a plan: out (n,H,D) on the device or NULL, stat (n,H,2) -> the argument, for column sums over the same rows.
static Attn attend(Session *s, int l, const float *q, int tok0, Plan *p, float *out, float *stat) {
    Attn a = attn_args(s, l, q, tok0);
    size_t total = 0, n_items = 0;
    for (int i = 0; i < p->n_work; i++) total += p->work[i].n;
    size_t chunk = chunk_rows(total);
    for (int i = 0; i < p->n_work; i++) {
        p->work[i].first = (int)n_items;
        n_items += p->work[i].items = blocks(p->work[i].n, (int)chunk);
    }
    size_t at_item = (size_t)p->n_work * sizeof(Work), at_idx = at_item + n_items * sizeof(Item);
    size_t bytes = at_idx + (size_t)p->n_idx * sizeof(int);
    char *host = (char *)scratch(s, bytes + 1), *dev = room<char>(s, ROOM_PLAN, bytes);
    memcpy(host, p->work, at_item);
    Item *item = (Item *)(host + at_item);
    for (int i = 0; i < p->n_work; i++)
        for (int c = 0; c < p->work[i].items; c++) {
            int p0 = c * (int)chunk, p1 = p->work[i].n - p0 < (int)chunk ? p->work[i].n : p0 + (int)chunk;
            *item++ = { i, p0, p1 };
        }
    if (p->n_idx) memcpy(host + at_idx, p->idx, (size_t)p->n_idx * sizeof(int));
    upload(dev, host, bytes);
    a.work = (const Work *)dev; a.item = (const Item *)(dev + at_item); a.idx = (const int *)(dev + at_idx);
    a.part = room<float>(s, ROOM_PART, (n_items + 1) * p->BQ * (a.D + 2));
    run_items(a, (int)n_items, p->n_work, p->BQ, p->plain, out, stat);
    return a;
}
// Whether a pass goes through tensor_kernel. The answer must not depend on the method nor on -b: methods with a budget of
// everything and full attention are then the same arithmetic.
static int tensor_cores(const Session *s) {
    int k = row_kind(s->fk), v = row_kind(s->fv);
    return s->n_tok - s->base >= TC_MIN && s->c->D % 16 == 0 && !s->packing && (k == ROW_F16 || k == ROW_BF16) && (v == ROW_F16 || v == ROW_BF16);
}
template <int DK, int DV, int ND> static void tensor_launch(const Attn &a, int n, float *out, float *stat) {
    size_t smem = tensor_smem(a.D);
    KV_CUDA(cudaFuncSetAttribute(tensor_kernel<DK, DV, ND>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem));
    KV_LAUNCH((tensor_kernel<DK, DV, ND>), n, ATTN_WARPS * 32, smem, a, out, stat);
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
// Column sums (H,N) to the host: head h reads list[h]. list (H) uses the idx of a.
static void column_sums(Session *s, const Attn &a, const Work *list, const float *stat, int n_q, int N, float factor, float *host) {
    size_t bytes = (size_t)a.H * sizeof(Work);
    Work *dev = (Work *)room<char>(s, ROOM_LIST, bytes);
    float *col = room<float>(s, ROOM_COL, (size_t)a.H * N);
    upload(dev, list, bytes);
    KV_CUDA(cudaMemsetAsync(col, 0, (size_t)a.H * N * sizeof(float), kv_stream));
    dim3 grid(blocks(N, TILE), a.H);
    KV_LAUNCH(column_kernel, grid, ATTN_WARPS * 32, column_smem(a.D), a, dev, stat, n_q, N, factor, col);
    download(host, col, (size_t)a.H * N * sizeof(float));
}
// KV_MASS: probabilities of n_q queries into the heads' mass, which the host keeps.
static void add_mass(Session *s, int l, const Attn &a, const Plan *p, const float *stat, int n_q) {
    int H = s->c->H, N = 1;
    Work *list = (Work *)scratch(s, (size_t)H * sizeof(Work));
    for (int h = 0; h < H; h++) list[h] = { h / a.R, 0, 1, kv_head(s, l, h / a.R)->len, 0, 0, 0, 0, 0, 0, 0 };
    for (int i = 0; s->decoding && i < p->n_work; i++)
        for (int j = 0; j < p->work[i].m; j++) list[p->work[i].g * a.R + p->work[i].m0 + j] = p->work[i];
    for (int h = 0; h < H; h++) if (list[h].n > N) N = list[h].n;
    float *sum = (float *)scratch(s, (size_t)H * N * sizeof(float));
    column_sums(s, a, list, stat, n_q, N, 1, sum);
    for (int h = 0; h < H; h++) {
        const Work *w = &list[h];
        float *mass = kv_head(s, l, w->g)->mass;
        for (int i = 0; i < w->n; i++) mass[i < w->n_idx ? p->idx[w->idx + i] : w->tail + i - w->n_idx] += sum[(size_t)h * N + i];
    }
}
static void prefill_device(Session *s, int l, float *out, const float *q, int t0, int n) {      // out, q (n,H,D) on the device
    size_t mark = scratch_mark(s);
    int tensor = tensor_cores(s);
    Plan p = plan_prefill(s, l, s->base + t0, n, tensor ? TC_ROWS : block_rows(n * (s->c->H / s->c->G)), 0);
    float *stat = room<float>(s, ROOM_STAT, (size_t)n * s->c->H * 2);
    Attn a = tensor ? attend_tensor(s, l, q, s->base + t0, &p, out, stat) : attend(s, l, q, s->base + t0, &p, out, stat);
    if (s->wants & KV_MASS) add_mass(s, l, a, &p, stat, n);
    scratch_reset(s, mark);
}
static void decode_device(Session *s, int l, float *out, const float *q) {      // out, q (H,D) on the device
    size_t mark = scratch_mark(s);
    Plan p = plan_decode(s, l);
    float *stat = room<float>(s, ROOM_STAT, (size_t)s->c->H * 2);
    Attn a = attend(s, l, q, s->base, &p, out, stat);
    for (int i = 0; i < p.n_work; i++) s->clk.bytes_attended += (double)(reads_first(s, l, &p.work[i]) * p.work[i].n) * (double)(a.bytes_k + a.bytes_v);
    if (s->wants & KV_MASS) add_mass(s, l, a, &p, stat, 1);
    scratch_reset(s, mark);
}
// What hooks call: q and out on the host.
void attn_prefill_cuda(Session *s, int l, float *out, const float *q, int t0, int n) {
    size_t m = (size_t)n * s->c->H * s->c->D;
    float *dq = room<float>(s, ROOM_HOOK_Q, m), *dout = room<float>(s, ROOM_HOOK_OUT, m);
    upload(dq, q, m * sizeof(float));
    prefill_device(s, l, dout, dq, t0, n);
    download(out, dout, m * sizeof(float));
}
void attn_decode_cuda(Session *s, int l, float *out, const float *q) {
    size_t m = (size_t)s->c->H * s->c->D;
    float *dq = room<float>(s, ROOM_HOOK_Q, m), *dout = room<float>(s, ROOM_HOOK_OUT, m);
    upload(dq, q, m * sizeof(float));
    decode_device(s, l, dout, dq);
    download(out, dout, m * sizeof(float));
}
// Two passes over the keys, max and sum first, then columns: memory O(H N), whatever W.
void window_scores_cuda(Session *s, int l, const float *q, int T, int W, float *score) {
    int H = s->c->H, w = T < W ? T : W, N = kv_longest(s, l), tok0 = s->base + T - w;
    size_t mark = scratch_mark(s), row = (size_t)H * s->c->D;
    float *dq = room<float>(s, ROOM_HOOK_Q, w * row), *stat = room<float>(s, ROOM_STAT, (size_t)w * H * 2);
    if (!N) return;
    upload(dq, q + (T - w) * row, w * row * sizeof(float));
    Plan p = plan_prefill(s, l, tok0, w, block_rows(w * (H / s->c->G)), 1);
    Attn a = attend(s, l, dq, tok0, &p, NULL, stat);
    Work *list = (Work *)scratch(s, (size_t)H * sizeof(Work));
    for (int h = 0; h < H; h++) list[h] = { h / a.R, 0, 1, kv_head(s, l, h / a.R)->len, 0, 0, 0, 0, 0, 0, 0 };
    column_sums(s, a, list, stat, w, N, 1 / (float)w, score);
    scratch_reset(s, mark);
}

// ==================================================================================================== 7 MODEL
// pass_cuda is pass() of kvcomp.c line by line, with the hooks called at the same places.

#define EACH_PART(s, p) for (Part *p = (s)->part; p < (s)->part + (s)->n_part; p++)

struct Pass { float *x, *q, *k, *v, *out, *h, *gate, *up, *cs, *host_q, *host_k, *host_v, *host_out; int span, want_project, want_q; };

static Pass pass_room(Session *s, int T) {
    const Config *c = s->c;
    int whole = s->rule != VIS_CAUSAL, b = s->batch < T ? s->batch : T, sparse = 0;
    Pass r;
    memset(&r, 0, sizeof r);
    EACH_PART(s, p) {
        whole |= p->m->project || p->m->attend || p->m->commit;
        r.want_project |= p->m->project != NULL;
        r.want_q |= p->m->commit || (s->decoding ? p->m->select != NULL : p->m->attend != NULL);
        sparse |= p->m->attend != NULL;
    }
    r.span = whole ? T : b;
    size_t n = r.span, HD = (size_t)c->H * c->D, GD = (size_t)c->G * c->D;
    r.x = room<float>(s, ROOM_X, (size_t)T * c->C);        r.cs = room<float>(s, ROOM_COS, (size_t)T * c->D);
    r.q = room<float>(s, ROOM_Q, n * HD);                  r.out = room<float>(s, ROOM_OUT, n * HD);
    r.k = room<float>(s, ROOM_K, n * GD);                  r.v = room<float>(s, ROOM_V, n * GD);
    r.h = room<float>(s, ROOM_H, (size_t)b * c->C);        r.gate = room<float>(s, ROOM_GATE, (size_t)b * c->F);
    r.up = room<float>(s, ROOM_UP, (size_t)b * c->F);
    if (r.want_q || r.want_project) r.host_q = (float *)scratch(s, n * HD * sizeof(float));
    if (r.want_project) r.host_k = (float *)scratch(s, n * GD * sizeof(float));
    if (r.want_project) r.host_v = (float *)scratch(s, n * GD * sizeof(float));
    if (sparse) r.host_out = (float *)scratch(s, n * HD * sizeof(float));
    return r;
}
// Brings the tokens to the device. A prefill sends all of them again: methods may have truncated some. A decode step sends its own,
// or none when step_kernel writes it (last 0).
static void upload_tokens(Session *s, int last) {
    Device *d = s->dev;
    const char *old = d->room[ROOM_TOK].p;
    Token *tok = room<Token>(s, ROOM_TOK, s->n_tok);
    int from = s->decoding && (char *)tok == old && d->n_tok == s->base ? s->base : 0;
    if (last || !from) upload(tok + from, s->tok + from, (size_t)(s->n_tok - from) * sizeof(Token));
    d->n_tok = s->n_tok;
}
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
    size_t bytes = (size_t)n * s->c->H * s->c->D * sizeof(float);
    Part *sparse = NULL;
    EACH_PART(s, p) if (acts && p->m->attend && !sparse) sparse = p;
    if (acts && r->want_q) download(r->host_q, r->q, bytes);
    if (s->decoding) {
        if (acts) EACH_PART(s, p) if (p->m->select) p->m->select(s, p->ms, l, r->host_q);
        t = timed(&s->clk.select, t);
        decode_device(s, l, r->out, r->q);
    } else if (sparse) {
        sparse->m->attend(s, sparse->ms, l, r->host_out, r->host_q, n);
        upload(r->out, r->host_out, bytes);
    } else prefill_device(s, l, r->out, r->q, t0, n);
    t = timed(&s->clk.attend, t);                                // without a hook that waits for the device: time to launch, not to run
    if (!s->decoding) note_peak(s);
    if (acts) EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, l, r->host_q, n);
    timed(&s->clk.commit, t);
}
// ---- a decode step in one go
// When no hook has to see or change anything in the middle of a step, the host tells the device the token and the lengths (Step) and
// waits for the logits; everything between depends on nothing but device memory. As long as no memory moves and no view changes
// the launches are the same from step to step, and are one CUDA graph, launched again. Heads grow every KV_STEP tokens: then the
// graph is captured anew.

static int step_free(const Session *s) {
    if (!s->decoding || (s->wants & KV_MASS) || s->packing) return 0;
    for (int i = 0; i < s->n_part; i++) {
        const Method *m = s->part[i].m;
        if (m->project || m->select || (m->commit && !(m->wants & KV_BLIND))) return 0;
    }
    return 1;
}
// What the host's plan_decode and attend do from lengths it knows, for all layers: a block is a layer. work and item hold its works and
// `grid` items; first (L+1): works of the layers before.
static __global__ void step_kernel(Token *tok, const Step *step, const int *first, Work *work, Item *item, int G, int grid) {
    int l = blockIdx.x, lane = threadIdx.x, n_work = first[l + 1] - first[l], total = 0, before = 0;
    work += first[l]; item += (size_t)l * grid;
    if (!l && !lane) tok[step->base] = step->tok;
    for (int i = lane; i < n_work; i += 32) total += work[i].n = work[i].n_idx + step->len[l * G + work[i].g] + 1 - work[i].tail;
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(0xffffffffu, total, d);
    int chunk = (int)chunk_rows(total);
    for (int i0 = 0; i0 < n_work; i0 += 32) {
        int i = i0 + lane, rows = i < n_work ? work[i].n : 0, n = (rows + chunk - 1) / chunk, end = n;
        for (int d = 1; d < 32; d <<= 1) { int low = __shfl_up_sync(0xffffffffu, end, d); if (lane >= d) end += low; }
        if (i < n_work) { work[i].first = before + end - n; work[i].items = n; work[i].low = step->tok.pos; work[i].tok0 = step->base; }
        for (int c = 0; c < n; c++) item[before + end - n + c] = { i, c * chunk, rows - c * chunk < chunk ? rows : c * chunk + chunk };
        before += __shfl_sync(0xffffffffu, end, 31);
    }
    for (int i = before + lane; i < grid; i += 32) item[i] = { 0, 0, 0 };
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
    d->grid = 1; d->rows = d->lists = 0;
    for (int l = 0; l < L; l++) {
        Plan p = plan_decode(s, l);
        int pieces = 0;
        for (int i = 0; i < p.n_work; i++) {
            Work *w = &p.work[i];
            pieces += blocks(w->n_idx + kv_head(s, l, w->g)->cap - w->tail, 2 * TILE);
            d->lists += reads_first(s, l, w);
            d->rows += reads_first(s, l, w) * w->n;
            w->idx += n_idx;
        }
        if (pieces > PIECES + p.n_work) pieces = PIECES + p.n_work;
        if (pieces > d->grid) d->grid = pieces;
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
    for (int l = 0; l < s->c->L; l++) kv_reserve(s, l, 1);
    upload_tokens(s, 0);
    Pass r = pass_room(s, 1);
    room<float>(s, ROOM_LOGITS, s->c->V);
    room<float>(s, ROOM_STAT, (size_t)s->c->H * 2);
    room<char>(s, ROOM_STEP, step_bytes(s));
    if (s->changes != d->seen) {
        step_plan(s);
        room<Item>(s, ROOM_ITEM, (size_t)s->c->L * d->grid);
        room<float>(s, ROOM_PART, (size_t)d->grid * d->BQ * (s->c->D + 2));
        if (d->graph) KV_CUDA(cudaGraphExecDestroy(d->graph));
        d->graph = NULL;
        d->seen = s->changes;
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
    const int *first = (const int *)(work + c->L * c->H), *idx = first + c->L + 1;
    float *stat = (float *)d->room[ROOM_STAT].p;
    KV_CUDA(cudaMemcpyAsync(step, d->step, step_bytes(s), cudaMemcpyHostToDevice, kv_stream));
    KV_LAUNCH(step_kernel, c->L, 32, 0, (Token *)d->room[ROOM_TOK].p, step, first, work, item, c->G, d->grid);
    KV_LAUNCH(embed_kernel, blocks(c->C, 256), 256, 0, r->x, on_device(s, &s->w->embed), s->w->embed.dtype, &step->tok.id, c->C, (size_t)c->C);
    for (int l = 0; l < c->L; l++) {
        const Layer *y = &s->w->layer[l];
        project_rows(s, y, r->x, r->h, r->q, r->k, r->v, 1);
        rope_append(s, l, step, r->q, r->k, r->v, step->cs, 0, 1);
        Attn a = attn_args(s, l, r->q, 0);
        a.work = work + d->first[l]; a.item = item + (size_t)l * d->grid; a.idx = idx; a.part = (float *)d->room[ROOM_PART].p;
        run_items(a, d->grid, d->first[l + 1] - d->first[l], d->BQ, plain_rows(s), r->out, stat);
        mlp_rows(s, y, r->x, r->out, r, 1);
    }
    logits_cuda(s, r->x, r->h);
}
static void step_capture(Session *s, const Pass *r) {            // a device that refuses gets the launches one by one from then on
    Device *d = s->dev;
    cudaGraph_t g = NULL;
    d->no_graph = cudaStreamBeginCapture(kv_stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess;
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
    d->rows += d->lists;                                         // every list has one row more
    s->clk.bytes_attended += d->rows * (double)(s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D));
    logits_wait(s);
    double t = now();
    for (int l = 0; l <= s->c->L; l++)
        EACH_PART(s, p) if (p->m->commit && (l == s->c->L || layer_acts(s, l))) p->m->commit(s, p->ms, l, NULL, 1);
    timed(&s->clk.commit, t);
    note_peak(s);
    scratch_reset(s, mark);
    return s->logits;
}

// ---- any other pass
float *pass_cuda(Session *s, int T) {
    if (step_free(s)) return step_cuda(s);
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
            if (acts && r.want_project) {
                download(r.host_q, r.q, n * HD * sizeof(float));
                download(r.host_k, r.k, n * GD * sizeof(float)); download(r.host_v, r.v, n * GD * sizeof(float));
                EACH_PART(s, p) if (p->m->project) p->m->project(s, p->ms, l, r.host_q, r.host_k, r.host_v, n);
            }
            kv_reserve(s, l, n);
            rope_append(s, l, NULL, r.q, r.k, r.v, r.cs + (size_t)t0 * c->D, t0, n);
            kv_note(s, l, t0, n);
            attend_rows(s, l, &r, t0, n, acts);
            for (int t = t0, m; t < t1; t += m) {
                m = same_weights(s, t, t1, &y, l);
                mlp_rows(s, y, r.x + t * C, r.out + (t - t0) * HD, &r, m);
            }
        }
    }
    double t = now();
    EACH_PART(s, p) if (p->m->commit) p->m->commit(s, p->ms, c->L, NULL, T);
    timed(&s->clk.commit, t);
    logits_cuda(s, r.x + (T - 1) * C, r.h);
    logits_wait(s);
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
// Whether everything will fit is asked before anything is allocated.
static void check_memory(const Session *s) {
    size_t unused, total;
    MemoryPlan p = memory_plan(s);
    if (shared_find(s->w)) p.weights = 0;                        // another session has brought them
    KV_CUDA(cudaMemGetInfo(&unused, &total));
    size_t need = p.weights + p.kv + p.pass;
    if (need <= unused) return;
    const char *help = p.weights >= unused ? "the weights alone are too much for this GPU; -d cpu works"
                     : p.weights + p.pass >= unused ? "a smaller -b or -c needs less" : "a smaller -c, --budget with a method that drops rows, or -ctk/-ctv q8_0 needs less";
    die(EXIT_MEMORY, "-d cuda: %.2f GB needed (weights %.2f, KV rows for -c %d %.2f, passes %.2f), %.2f of %.2f GB are free: %s", (double)need * 1e-9,
        (double)p.weights * 1e-9, p.ctx, (double)p.kv * 1e-9, (double)p.pass * 1e-9, (double)unused * 1e-9, (double)total * 1e-9, help);
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
static int refuse(Session *s, const char *why) { snprintf(s->err, sizeof s->err, "-d cuda: %s; -d cpu works", why); return -1; }
int device_open(Session *s) {
    int n = 0, G = s->c->G, D = s->c->D;
    char why[128];
    snprintf(why, sizeof why, "at most %d KV heads of an even head_dim up to %d, found %d of %d", MAX_G, MAX_D, G, D);
    if (D > MAX_D || D % 2 || G > MAX_G) return refuse(s, why);
    if (s->packing) return refuse(s, "pats keeps bit-packed rows, which cannot be read on the GPU yet");
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 1) return refuse(s, "no CUDA device can be used");
    stream_open();
    check_memory(s);
    s->dev = (Device *)xcalloc(1, sizeof *s->dev);
    KV_BLAS(cublasCreate(&s->dev->blas));
    KV_BLAS(cublasSetStream(s->dev->blas, kv_stream));
    s->dev->src = (int **)xcalloc((size_t)s->c->L * G, sizeof(int *));
    s->dev->first = (int *)xcalloc((size_t)s->c->L + 1, sizeof(int));
    s->dev->seen = s->changes - 1;                               // nothing is prepared yet
    KV_CUDA(cudaMallocHost((void **)&s->dev->step, step_bytes(s)));
    KV_CUDA(cudaMallocHost((void **)&s->dev->logits, (size_t)s->c->V * sizeof(float)));
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
    free(d->src); free(d->first); free(d);
    s->dev = NULL;
}

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
void cuda_tokens(Session *s) { upload_tokens(s, 1); }
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
