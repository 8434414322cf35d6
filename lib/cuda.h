// lib/cuda.h - what the kernels of kvcomp.cu stand on: launches, errors, device memory, the lanes of a warp, what
// only PTX can say, and 16-bit numbers.
//
// It knows nothing of models. Its functions are static: it is included by one file of CUDA C++, which nvcc compiles
// for a GPU, or g++ with test/cuda_emu.h in front for the CPU. A failure of the runtime ends the program by die().
#ifndef LIB_CUDA_H
#define LIB_CUDA_H
#include "base.h"
#include "kernels.h"
#include <math.h>
#include <stdlib.h>
#ifdef __CUDACC__                               // otherwise cuda_emu.h has defined all of this
#include <cublas_v2.h>
#include <dlfcn.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Every launch goes through KV_LAUNCH: kernel, grid, block, bytes of dynamic shared memory,
// arguments.
#define KV_LAUNCH(k, grid, block, smem, ...) do { \
    k<<<grid, block, smem, kv_stream>>>(__VA_ARGS__); \
    KV_CUDA(cudaGetLastError()); \
} while (0)

static int kv_early;                            // 1: the device can start a kernel early, sm_90 and later

// A launch of a kernel that calls dependency_wait: it may start before the one ahead of it has ended, so
// that its first blocks find their places, and a product's ask for their weights, while that one's last are
// at work.
template <class... P, class... A>
static cudaError_t launch_early(void (*k)(P...), dim3 grid, int block, size_t smem, cudaStream_t stream,
                                A... a) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(block);
    c.dynamicSmemBytes = smem;
    c.stream = stream;
    c.attrs = &early;
    c.numAttrs = kv_early;
    return cudaLaunchKernelEx(&c, k, (P)a...);
}
#define KV_LAUNCH_EARLY(k, grid, block, smem, ...) do { \
    KV_CUDA(launch_early(k, grid, block, smem, kv_stream, __VA_ARGS__)); \
} while (0)

// KV_UNROLL(n) stands before a loop whose loads are to be under way n at once, KV_UNROLL() before one
// whose arrays are to be registers.
#define KV_PRAGMA(x) _Pragma(#x)
#define KV_UNROLL(n) KV_PRAGMA(unroll n)

// A struct that a kernel takes and no thread changes: all of them read the one that was launched.
#define KV_PARAMETER(T) const __grid_constant__ T

// A device function that is called, not inlined.
#define KV_CALL __device__ __noinline__

// Declares `name`, the kernel's dynamic shared memory, as T *.
#define KV_DYN_SHARED(T, name) extern __shared__ __align__(128) float4 kv_dyn_[]; T *name = (T *)kv_dyn_
#endif

// Lets a kernel have more shared memory than the 48 KB every kernel has without asking, static arrays of
// up to 16 KB among them. smem is a variable.
#define KV_WIDE(k, smem) do { \
    if (smem > 32 * 1024) \
        KV_CUDA(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem)); \
} while (0)

// Launches of such kernels.
#define KV_LAUNCH_WIDE(k, grid, block, smem, ...) do { \
    KV_WIDE(k, smem); \
    KV_LAUNCH(k, grid, block, smem, __VA_ARGS__); \
} while (0)
#define KV_LAUNCH_WIDE_EARLY(k, grid, block, smem, ...) do { \
    KV_WIDE(k, smem); \
    KV_LAUNCH_EARLY(k, grid, block, smem, __VA_ARGS__); \
} while (0)

// ---- the stream
// Errors end the program with one line. Everything happens in one stream, in the order in which it
// is asked for. Device memory is asked for through device_new().

static cudaStream_t kv_stream;                  // made by the first device_open, kept until the program ends
static cudaMemPool_t kv_pool;                   // where rows come from and go back to (stream_open)
static int kv_host_pages;                       // 1: the device reads ordinary host memory by itself
static int kv_processors;                       // multiprocessors of the device

// ---- errors

// Ends the program: exit 4 when memory was too small, else 1.
static void cuda_fail(cudaError_t e, const char *call, const char *file, int line) {
    if (e == cudaErrorMemoryAllocation)
        die(EXIT_MEMORY, "the GPU is out of memory (%s:%d): a smaller -c, -b or --budget needs less, "
            "and so does -ctk/-ctv q8_0", file, line);
    die(EXIT_RUN, "CUDA: %s (%s:%d: %s)", cudaGetErrorString(e), file, line, call);
}

enum { NO_CAPTURE, CAPTURING, CAPTURE_LOST };
static int kv_capture;                          // launches are being written into a graph, or could not be

// A call has failed. While launches are written into a graph (step_capture) the graph is lost, and nothing
// else; at any other time the program ends.
static void call_failed(cudaError_t e, const char *call, const char *file, int line) {
    if (kv_capture) kv_capture = CAPTURE_LOST;
    else cuda_fail(e, call, file, line);
}

// Every call of the CUDA runtime stands in KV_CUDA, every call of cuBLAS in KV_BLAS: a failure ends
// the program, or a capture.
#define KV_CUDA(call) do { \
    cudaError_t e_ = (call); \
    if (e_ != cudaSuccess) call_failed(e_, #call, __FILE__, __LINE__); \
} while (0)
#define KV_BLAS(call) do { \
    int e_ = (int)(call); \
    if (e_) die(EXIT_RUN, "cuBLAS: status %d (%s:%d: %s)", e_, __FILE__, __LINE__, #call); \
} while (0)

// cuBLAS is opened when a session comes to the device, and not when the program starts: the library is 200 MB
// large and takes .3 s to load, which a run that asks nothing of a GPU need not wait for. (Under the emulator
// its functions stand in test/cuda_emu.h.)
#ifdef __CUDACC__
static struct {
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t);
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void *alpha,
                           const void *A, cudaDataType, int lda, const void *B, cudaDataType, int ldb, const void *beta,
                           void *C, cudaDataType, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
} blas_calls;

#define KV_TEXT_(x) #x
#define KV_TEXT(x) KV_TEXT_(x)

// Fills blas_calls, once. 0, or -1 with the reason in err.
static int blas_open(char err[512]) {
    if (blas_calls.gemm) return 0;
    void *lib = dlopen("libcublas.so." KV_TEXT(CUBLAS_VER_MAJOR), RTLD_NOW);
    if (!lib) {
        snprintf(err, 512, "%s", dlerror());
        return -1;
    }
    *(void **)&blas_calls.create     = dlsym(lib, "cublasCreate_v2");
    *(void **)&blas_calls.destroy    = dlsym(lib, "cublasDestroy_v2");
    *(void **)&blas_calls.set_stream = dlsym(lib, "cublasSetStream_v2");
    *(void **)&blas_calls.gemm       = dlsym(lib, "cublasGemmEx");
    if (blas_calls.create && blas_calls.destroy && blas_calls.set_stream && blas_calls.gemm) return 0;
    snprintf(err, 512, "libcublas.so." KV_TEXT(CUBLAS_VER_MAJOR) " lacks cublasGemmEx or its like");
    blas_calls.gemm = NULL;
    return -1;
}
#define blas_create     blas_calls.create
#define blas_destroy    blas_calls.destroy
#define blas_set_stream blas_calls.set_stream
#define blas_gemm       blas_calls.gemm
#else
static int blas_open(char *) { return 0; }
#define blas_create     cublasCreate
#define blas_destroy    cublasDestroy
#define blas_set_stream cublasSetStream
#define blas_gemm       cublasGemmEx
#endif

// ---- device memory

// Gives back what the pool keeps of freed rows (stream_open), once everything that was asked for is
// done with it.
static void pool_trim(void) {
    if (!kv_stream) return;
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    KV_CUDA(cudaMemPoolTrimTo(kv_pool, 0));
}

// New device memory in *p: from the pool, in the order of the stream, or from the device. -> 1, or 0
// when there is too little.
static int device_ask(char **p, size_t bytes, int pool) {
    cudaError_t e = pool ? cudaMallocAsync(p, bytes, kv_stream) : cudaMalloc(p, bytes);
    if (e == cudaSuccess) return 1;
    if (e != cudaErrorMemoryAllocation) cuda_fail(e, pool ? "cudaMallocAsync" : "cudaMalloc", __FILE__, __LINE__);
    (void)cudaGetLastError();                   // or the next launch would report it
    return 0;
}

// The same, asked a second time when the pool has given back what it keeps: that may be just what
// is missing.
static int device_try(char **p, size_t bytes, int pool) {
    if (device_ask(p, bytes, pool)) return 1;
    pool_trim();
    return device_ask(p, bytes, pool);
}

// New device memory, NULL for 0 bytes.
static char *device_new(size_t bytes) {
    char *p = NULL;
    if (bytes && !device_try(&p, bytes, 0)) cuda_fail(cudaErrorMemoryAllocation, "cudaMalloc", __FILE__, __LINE__);
    return p;
}

// Gives device memory back. p may be NULL.
static void device_free(void *p) {
    if (p) KV_CUDA(cudaFree(p));
}

// Copies n bytes to the device. host is ordinary memory, which the runtime has read when the call
// returns: it goes through memory of the runtime's own. A GPU that reads the host's pages itself
// (Grace Hopper) may do without, so there the copy is waited for.
static void upload(void *dev, const void *host, size_t n) {
    if (!n) return;
    KV_CUDA(cudaMemcpyAsync(dev, host, n, cudaMemcpyHostToDevice, kv_stream));
    if (kv_host_pages) KV_CUDA(cudaStreamSynchronize(kv_stream));
}

// Copies n bytes to the host, and waits for them.
static void download(void *host, const void *dev, size_t n) {
    if (!n) return;
    KV_CUDA(cudaMemcpyAsync(host, dev, n, cudaMemcpyDeviceToHost, kv_stream));
    KV_CUDA(cudaStreamSynchronize(kv_stream));
}

// Copies n bytes inside device memory.
static void device_copy(void *to, const void *from, size_t n) {
    if (n) KV_CUDA(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, kv_stream));
}

// Calls f with that one of the numbers N that x is, as a constant: templates can be chosen by what is known only when
// the program runs.
template <int N> struct Constant {
    constexpr operator int() const { return N; }
};
template <int... N, class F> static void as_constant(int x, F f) {
    ((x == N ? f(Constant<N>()) : (void)0), ...);
}

// How many blocks of `per` things hold n of them.
static int blocks(size_t n, int per) {
    return (int)((n + per - 1) / per);
}

// ---- one block of memory, cut into arrays
// Some uploads, and the shared memory of some kernels, are several arrays one behind the other in
// one block. A function X_carve() says once which arrays these are. Called with the block it sets
// the pointers, called with NULL it only adds up the bytes, so a size and a layout cannot differ.
// No gap is left between two arrays: an array whose type is wider must not stand behind one with an
// odd number of narrower elements.

struct Carved {
    char *mem;                  // the block, or NULL: only its size is wanted
    size_t at;                  // bytes carved
};

// The next n elements of the block. A kernel always has one; there the question would be asked anew at every
// access, and hide from the compiler that it is shared memory.
template <class T> KV_HD static T *carve(Carved *b, size_t n) {
#ifdef __CUDA_ARCH__
    T *p = (T *)(b->mem + b->at);
#else
    T *p = b->mem ? (T *)(b->mem + b->at) : NULL;
#endif
    b->at += n * sizeof(T);
    return p;
}

// ---- sums and maxima over the lanes of a warp

enum : unsigned { ALL_LANES = 0xffffffffu };

// The sum of x over each group of LANES neighbouring lanes; every lane of the group gets it. LANES
// is a power of two. Lanes LANES/2 apart are added first, neighbours last.
template <int LANES, class T> static __device__ T lanes_sum(T x) {
    for (int d = LANES / 2; d; d >>= 1) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}

// The largest x of each group of LANES neighbouring lanes.
template <int LANES> static __device__ float lanes_max(float x) {
    for (int d = LANES / 2; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

// Sum of x over lanes 0 up to the own one.
static __device__ int scan_warp(int x) {
    int lane = threadIdx.x & 31;
    for (int d = 1; d < 32; d *= 2) {
        int below = __shfl_up_sync(ALL_LANES, x, d);
        if (lane >= d) x += below;
    }
    return x;
}

// The sum (MAX 0) or the maximum (MAX 1) of x over the block. part (32) is shared memory that nobody
// reads any more.
template <int MAX, class T> static __device__ T block_fold(T x, T *part) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = MAX ? lanes_max<32>(x) : lanes_sum<32>(x);
    if (!lane) part[warp] = x;
    __syncthreads();
    x = part[0];
    for (int i = 1; i < warps; i++) x = MAX ? fmaxf(x, part[i]) : x + part[i];
    return x;
}

// The place of the lowest bit of m that is set.
static __device__ int lowest_bit(unsigned m) {
    return __popc((m & (0u - m)) - 1);
}

// ---- what comes after all blocks, in the same launch
// Blocks that share a work count themselves in, and the last one to arrive does what needs the
// results of all of them. It saves a launch, and it waits for nobody.

// Counts the block in, or the `parts` of `all` that it has done -> 1, in every thread, for the last one, which from
// here on sees what the others have written. *last: shared. All threads of a block.
static __device__ int arrives_last(int *counter, int all, int *last, int parts = 1) {
    __syncthreads();
    if (!threadIdx.x) {
        __threadfence();
        *last = atomicAdd(counter, parts) == all - parts;
        if (*last) {
            atomicAdd(counter, -all);
            __threadfence();
        }
    }
    __syncthreads();
    return *last;
}

// ---- what only PTX can say
// Instructions that CUDA C++ has no words for. cuda_emu.h has functions of the same names, written
// from the same tables of the PTX ISA.
//
// A warp's lane is 4 g + t, with g = 0..7 and t = 0..3. A word is two 16-bit numbers, the one with the
// lower index in the lower half. What lane (g,t) holds of a matrix:
//
//     A (16,16)   a[0] = A[g][2t,2t+1]     a[2] = A[g][2t+8,2t+9]       words
//                 a[1] = A[g+8][2t,2t+1]   a[3] = A[g+8][2t+8,2t+9]
//     B (16,8)    b[0] = B[2t,2t+1][g]     b[1] = B[2t+8,2t+9][g]       words
//     D (16,8)    d[0,1] = D[g][2t,2t+1]   d[2,3] = D[g+8][2t,2t+1]     f32
//     (8,8)       x = X[g][2t,2t+1]                                     a word
// KV_PTX marks such a function; a kernel need not use every one of them.
#ifdef __CUDACC__
#define KV_PTX [[maybe_unused]] static __device__ __forceinline__

// d += a b: A (16,16) and B (16,8) of 16-bit numbers of type DT, D (16,8) in f32.
template <int DT>
KV_PTX void mma_16x8x16(float d[4], const unsigned a[4], const unsigned b[2]) {
    if (DT == DT_F16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// An address in shared memory as PTX wants it, in bytes. ldmatrix and copy16_async take one, or a pointer;
// a kernel that reads a place again and again keeps one, where each pointer would be turned into one.
typedef unsigned SharedAt;

// The address of p, which points into shared memory.
KV_PTX SharedAt shared_address(const void *p) {
    return (SharedAt)__cvta_generic_to_shared(p);
}

// r[i] = the lane's word of the i-th of four (8,8) matrices in shared memory. Lane 8 i + j names row j
// of matrix i, 16 bytes aligned to 16. Words of a row-major (16,16) come out as an A fragment when the
// lanes name rows 0..7, rows 8..15, and then the same rows 8 columns on.
KV_PTX void ldmatrix_x4(unsigned r[4], SharedAt row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
KV_PTX void ldmatrix_x4(unsigned r[4], const void *row) { ldmatrix_x4(r, shared_address(row)); }

// The same, and each of the four matrices is transposed on the way.
KV_PTX void ldmatrix_x4_trans(unsigned r[4], SharedAt row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
KV_PTX void ldmatrix_x4_trans(unsigned r[4], const void *row) { ldmatrix_x4_trans(r, shared_address(row)); }

// Asks for 16 bytes from device memory to shared memory; both are aligned to 16. What lies at `to` is
// undefined until the copy has been waited for, and other threads see it after the barrier that
// follows the wait.
KV_PTX void copy16_async(SharedAt to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
KV_PTX void copy16_async(void *to, const void *from) { copy16_async(shared_address(to), from); }

// The thread's copies since its last call of this are a group, which may be empty.
KV_PTX void copy_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the N youngest groups of the thread are under way.
template <int N> KV_PTX void copy_wait(void) {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// to (4) = the 4 words at p, aligned to 16 bytes: device memory that no kernel writes while this one runs,
// read once, so that it takes no room in L1.
KV_PTX void load_once(unsigned *to, const void *p) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(__cvta_generic_to_global(p)));
}

// x. The compiler cannot know how it came about, and so keeps it in a register, where it would otherwise
// work it out anew in every turn of a loop.
KV_PTX SharedAt as_it_is(SharedAt x) {
    asm volatile("" : "+r"(x));
    return x;
}
KV_PTX const char *as_it_is(const char *x) {
    asm volatile("" : "+l"(x));
    return x;
}

// 2^x, right to 2^-22; what is smaller than 2^-126 is 0.
KV_PTX float exp2_flush(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A kernel launched with programmatic stream serialization starts before the one ahead of it has
// ended. It calls dependency_wait, in every thread, before it writes and before it reads what a kernel
// wrote that may still run: then the one ahead has ended, and so have all before that one, because it has
// waited, too. dependents_launch says that the next kernel may start. Both do nothing in an ordinary launch,
// and before sm_90. cuda_emu.h looks after the waits.
KV_PTX void dependency_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// See dependency_wait.
KV_PTX void dependents_launch(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif

// ---- stored numbers

// A stored type DT_*: bytes of one number, numbers in the 16 bytes that a lane loads at once.
template <int DT> struct Stored {
    enum { BYTES = DT == DT_F32 ? 4 : 2, WIDE = 16 / BYTES };
};

// The 16-bit number h of type DT as f32. The hardware's conversion of f16 is exact too.
template <int DT> static __device__ float half_get(uint16_t h) {
#ifdef __CUDACC__
    return DT == DT_F16 ? __half2float(__ushort_as_half(h)) : bf16_to_f32(h);
#else
    return DT == DT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
#endif
}

// Number i of an array of dtype.
static __device__ float number(const void *p, int dtype, size_t i) {
    if (dtype == DT_F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return dtype == DT_F16 ? half_get<DT_F16>(h) : half_get<DT_BF16>(h);
}

// p[i] = x, rounded to a number of dtype.
static __device__ void number_put(void *p, int dtype, size_t i, float x) {
    if (dtype == DT_F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = dtype == DT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
}

// x rounded to a 16-bit number of type DT. The hardware gives the bits of f32_to_f16 and
// f32_to_bf16, if infinity then becomes the largest number.
template <int DT> static __device__ uint16_t half_put(float x) {
#ifdef __CUDACC__
    uint16_t h = DT == DT_F16 ? __half_as_ushort(__float2half_rn(x))
                              : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return (h & 0x7fff) == (DT == DT_F16 ? 0x7c00 : 0x7f80) ? h - 1 : h;
#else
    return DT == DT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
#endif
}

// x as two 16-bit numbers, the rounded value and what the rounding left over.
template <int DT> static __device__ void half_split(uint16_t *value, uint16_t *rest, float x) {
    *value = half_put<DT>(x);
    *rest = half_put<DT>(x - half_get<DT>(*value));
}

// Two numbers as a word of type DT, the first in the lower half. They are far from infinity.
template <int DT> static __device__ unsigned half_pack(float low, float high) {
#ifdef __CUDACC__
    if (DT == DT_F16) {
        __half2 h = __floats2half2_rn(low, high);
        return *(unsigned *)&h;
    }
    __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
    return *(unsigned *)&h;
#else
    return half_put<DT>(low) | (unsigned)half_put<DT>(high) << 16;
#endif
}

// ---- two f16 numbers in a word

// Two f16 numbers in a word, each half for itself, rounded once: x y + z; with z = -0 it is x y.
static __device__ unsigned halves_fma(unsigned x, unsigned y, unsigned z) {
#ifdef __CUDACC__
    __half2 r = __hfma2(*(__half2 *)&x, *(__half2 *)&y, *(__half2 *)&z);
    return *(unsigned *)&r;
#else
    uint16_t half[2];
    for (int i = 0; i < 2; i++) {
        double xy = (double)f16_to_f32((uint16_t)(x >> 16 * i)) * f16_to_f32((uint16_t)(y >> 16 * i));
        half[i] = f32_to_f16((float)(xy + f16_to_f32((uint16_t)(z >> 16 * i))));
    }
    return half[0] | (unsigned)half[1] << 16;
#endif
}
static __device__ unsigned halves_times(unsigned x, unsigned y) { return halves_fma(x, y, 0x80008000); }

// -x, halves of f16. The hardware has it for nothing in a sum.
static __device__ unsigned halves_minus(unsigned x) {
#ifdef __CUDACC__
    __half2 r = __hneg2(*(__half2 *)&x);
    return *(unsigned *)&r;
#else
    return x ^ 0x80008000;
#endif
}

// The greater ones.
static __device__ unsigned halves_max(unsigned x, unsigned y) {
#ifdef __CUDACC__
    __half2 r = __hmax2(*(__half2 *)&x, *(__half2 *)&y);
    return *(unsigned *)&r;
#else
    uint16_t half[2];
    for (int i = 0; i < 2; i++)
        half[i] = f32_to_f16(fmaxf(f16_to_f32((uint16_t)(x >> 16 * i)), f16_to_f32((uint16_t)(y >> 16 * i))));
    return half[0] | (unsigned)half[1] << 16;
#endif
}

// x - y, halves of f16.
static __device__ unsigned halves_less(unsigned x, unsigned y) {
#ifdef __CUDACC__
    __half2 z = __hsub2(*(__half2 *)&x, *(__half2 *)&y);
    return *(unsigned *)&z;
#else
    uint16_t half[2];
    for (int i = 0; i < 2; i++)
        half[i] = f32_to_f16(f16_to_f32((uint16_t)(x >> 16 * i)) - f16_to_f32((uint16_t)(y >> 16 * i)));
    return half[0] | (unsigned)half[1] << 16;
#endif
}

#endif
