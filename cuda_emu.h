// cuda_emu.h - runs the kernels of kvcomp.cu on the CPU, so that they are tested on machines without a GPU. Tests only.
//
// kvcomp.cu compiles two ways:   nvcc kvcomp.cu    |    g++ -x c++ -std=c++17 -include cuda_emu.h kvcomp.cu
// Every CUDA thread of a block is a fiber. Fibers change only where CUDA threads meet (__syncthreads, __syncwarp, shuffles,
// votes); blocks run one after the other. Between two meetings the order comes from EMU_SEED or emu_set_seed(): 0 ascending,
// 1 descending, other values random, so a kernel that counts on lockstep gives another answer. Caught, with kernel and line:
//   - a barrier that some threads never reach, or reach on another line; a shuffle naming a lane that is gone or elsewhere
//   - reading shared or fresh device memory nobody wrote (it starts as NaN, 0xff bytes)
//   - kernels running past an allocation (guard pages) or into a freed one; host code touching device memory
//   - a pinned buffer that is changed, or read, before its copy has been waited for: such copies run as late as they may
//   - what a stream being captured into a graph must not do; a graph is a list of launches and copies, run again when launched
//   - a host pointer as kernel argument, as device side of a copy, or as a cuBLAS matrix; a matrix that runs past its memory
//   - tensor-core operations that some lanes miss or do with other arguments, unaligned, or on a fragment nobody filled
//   - cp.async that is read before its group was waited for, that overwrites what is still read, or that outlives its thread
// Device calls from several host threads are fine, one at a time. Built with -fsanitize=thread every CUDA thread is a TSan
// fiber, and races on shared and global memory inside a block are reported with both stacks.
#pragma once
#include <math.h>
#include <float.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <setjmp.h>
#include <signal.h>
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include "kvcomp.h"               // f16 and bf16
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define EMU_TSAN(x) x
#else
#define EMU_TSAN(x)
#endif
#define EMU_QUIET __attribute__((no_sanitize("thread"), noinline))

// ------------------------------------------------------------------------------------------------ the language

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("emu_shared")))   // poisoned before every block
#define warpSize 32

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define __align__(n) __attribute__((aligned(n)))
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 { unsigned x, y, z; dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };

enum { EMU_READY, EMU_BARRIER, EMU_WARP, EMU_DONE };
struct EmuThread {
    ucontext_t ctx; jmp_buf at; int made, begun;     // a fiber lives as long as the program; ctx: its start, at: where it waits
    dim3 tid;
    int state, line;                  // why it waits, and on which line
    unsigned mask, lane;              // of the warp operation it waits in
    uint64_t in, got[32];             // what it brings; what the lanes of its mask brought
    void *tsan;
};
struct Emu {
    EmuThread *t; int n;              // the block's threads
    ucontext_t sched; jmp_buf back; void *tsan;
    EmuThread *cur;
    dim3 grid, block, bid;
    char *dyn; size_t dyn_bytes;      // dynamic shared memory
    const char *kernel; void (*body)(void *); void *arg;
    uint64_t rng; int seed;
    char *arena; size_t used;         // device memory
    struct EmuMem { char *p; size_t bytes, span; int live; } *mem;  // ascending addresses, never reused
    int n_mem, cap_mem, open;         // open: all live ones are readable
    size_t live, peak;                // bytes of the live ones, and the most there ever were
    long switches;
};
static Emu emu;
static pthread_mutex_t emu_mutex = PTHREAD_MUTEX_INITIALIZER;
struct EmuLock { EmuLock() { pthread_mutex_lock(&emu_mutex); } ~EmuLock() { pthread_mutex_unlock(&emu_mutex); } };
#if defined(__SANITIZE_THREAD__)      // the emulator's own state must not count as a race
EMU_QUIET static dim3 emu_tid(void) { return emu.cur->tid; }
EMU_QUIET static dim3 emu_bid(void) { return emu.bid; }
EMU_QUIET static dim3 emu_bdim(void) { return emu.block; }
EMU_QUIET static dim3 emu_gdim(void) { return emu.grid; }
EMU_QUIET static char *emu_dyn(void) { return emu.dyn; }
#define threadIdx emu_tid()
#define blockIdx  emu_bid()
#define blockDim  emu_bdim()
#define gridDim   emu_gdim()
#else
#define threadIdx (emu.cur->tid)
#define blockIdx  (emu.bid)
#define blockDim  (emu.block)
#define gridDim   (emu.grid)
#define emu_dyn() (emu.dyn)
#endif

#define emu_die(...) do { fprintf(stderr, "cuda_emu: %s: ", emu.kernel ? emu.kernel : "host"); \
    fprintf(stderr, __VA_ARGS__); fprintf(stderr, "\n"); abort(); } while (0)

// ------------------------------------------------------------------------------------------------ threads meet here

// From a fiber to the scheduler and back. swapcontext makes a system call, so it is left to TSan, which cannot follow longjmp.
EMU_QUIET static void emu_leave(EmuThread *t) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(emu.tsan, 1);                    // 1: no happens-before edge
    swapcontext(&t->ctx, &emu.sched);
#else
    if (!_setjmp(t->at)) _longjmp(emu.back, 1);
#endif
}
EMU_QUIET static void emu_enter(EmuThread *t) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(t->tsan, 1);
    swapcontext(&emu.sched, &t->ctx);
#else
    if (_setjmp(emu.back)) return;
    if (t->begun) _longjmp(t->at, 1);
    t->begun = 1;
    setcontext(&t->ctx);
#endif
}
EMU_QUIET static void emu_wait(int state, int line, unsigned mask) {
    EmuThread *t = emu.cur;
    t->state = state; t->line = line; t->mask = mask;
    emu.switches++;
    emu_leave(t);
}
EMU_QUIET static void emu_syncthreads(int line) {
    EMU_TSAN(__tsan_release(&emu.block));
    emu_wait(EMU_BARRIER, line, 0);
    EMU_TSAN(__tsan_acquire(&emu.block));
}
EMU_QUIET static void emu_syncwarp(unsigned mask, int line) {
    EMU_TSAN(__tsan_release(&emu.t[(emu.cur - emu.t) & ~31]));
    emu_wait(EMU_WARP, line, mask);
    EMU_TSAN(__tsan_acquire(&emu.t[(emu.cur - emu.t) & ~31]));
}
template <class T> EMU_QUIET static T emu_shfl(unsigned mask, T v, int src, int line) {
    static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
    EmuThread *t = emu.cur;
    memcpy(&t->in, &v, sizeof v);
    emu_wait(EMU_WARP, line, mask);
    if (src < 0 || src > 31) return v;                       // out of range: the lane's own value
    if (!(mask >> src & 1)) emu_die("line %d: shuffle reads lane %d, outside its mask %08x", line, src, mask);
    memcpy(&v, &t->got[src], sizeof v);
    return v;
}
EMU_QUIET static unsigned emu_ballot(unsigned mask, int pred, int line) {
    EmuThread *t = emu.cur;
    t->in = !!pred;
    emu_wait(EMU_WARP, line, mask);
    unsigned r = 0;
    for (int i = 0; i < 32; i++) if (mask >> i & 1 && t->got[i]) r |= 1u << i;
    return r;
}
static inline unsigned emu_mask(unsigned m = 0xffffffffu) { return m; }
EMU_QUIET static int emu_lane(void) { return (int)emu.cur->lane; }
#define __syncthreads()                emu_syncthreads(__LINE__)
#define __syncwarp(...)                emu_syncwarp(emu_mask(__VA_ARGS__), __LINE__)
#define __shfl_sync(m, v, s)           emu_shfl(m, v, s, __LINE__)
#define __shfl_xor_sync(m, v, x)       emu_shfl(m, v, emu_lane() ^ (x), __LINE__)
#define __shfl_down_sync(m, v, d)      emu_shfl(m, v, emu_lane() + (int)(d), __LINE__)
#define __shfl_up_sync(m, v, d)        emu_shfl(m, v, emu_lane() - (int)(d), __LINE__)
#define __ballot_sync(m, p)            emu_ballot(m, p, __LINE__)
#define __any_sync(m, p)               (emu_ballot(m, p, __LINE__) != 0)
#define __all_sync(m, p)               (emu_ballot(m, p, __LINE__) == (m))

// ------------------------------------------------------------------------------------------------ tensor cores
// The part of nvcuda::wmma that kvcomp.cu uses: 16x16x16, f16 or bf16 factors, f32 sums. Every operation is done by a whole
// warp: all 32 lanes come to the same line with the same pointer and stride. Where in a fragment an element lies is nobody's
// business, so it changes with the seed. The operations order no memory: TSan sees a missing __syncwarp.

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
static inline float emu_float(__half h)        { return f16_to_f32(h.bits); }
static inline float emu_float(__nv_bfloat16 h) { return bf16_to_f32(h.bits); }
static inline float emu_float(float x)         { return x; }

namespace nvcuda { namespace wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };
template <class A, class B> struct same { enum { yes = 0 }; };
template <class A> struct same<A, A> { enum { yes = 1 }; };
template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "only 16x16x16 is emulated");
    enum { num_elements = 8 };
    float x[8]; int filled;
    fragment() : filled(0) { memset(x, 0xff, sizeof x); }
};
EMU_QUIET static int emu_cell(int i) { return ((int)(emu.cur->lane * 8 + i) * 37 + emu.seed * 11) & 255; }      // row * 16 + column
EMU_QUIET static void emu_together(int line, const void *p, unsigned ld, size_t size) {
    EmuThread *t = emu.cur;
    if ((uintptr_t)p % 32 || ld * size % 16) emu_die("line %d: a matrix at %p with stride %u: tensor cores want 32 and 16 bytes", line, p, ld);
    t->in = (uint64_t)(uintptr_t)p ^ (uint64_t)ld << 48;
    emu_wait(EMU_WARP, line, 0xffffffffu);
    for (int i = 0; i < 32; i++) if (t->got[i] != t->got[0]) emu_die("line %d: lanes 0 and %d name different matrices", line, i);
}
template <class Use, class T, class Layout> static void emu_load(int line, fragment<Use, 16, 16, 16, T, Layout> &f, const T *p, unsigned ld) {
    emu_together(line, p, ld, sizeof(T));
    for (int i = 0; i < 8; i++) {
        int c = emu_cell(i), r = c / 16, col = c % 16;
        f.x[i] = emu_float(same<Layout, col_major>::yes ? p[(size_t)col * ld + r] : p[(size_t)r * ld + col]);
    }
    f.filled = 1;
}
static void emu_load(int line, fragment<accumulator, 16, 16, 16, float> &f, const float *p, unsigned ld, layout_t layout) {
    emu_together(line, p, ld, sizeof *p);
    for (int i = 0; i < 8; i++) { int c = emu_cell(i), r = c / 16, col = c % 16; f.x[i] = layout == mem_row_major ? p[(size_t)r * ld + col] : p[(size_t)col * ld + r]; }
    f.filled = 1;
}
static void emu_store(int line, float *p, const fragment<accumulator, 16, 16, 16, float> &f, unsigned ld, layout_t layout) {
    if (!f.filled) emu_die("line %d: a fragment is stored that was never filled", line);
    emu_together(line, p, ld, sizeof *p);
    for (int i = 0; i < 8; i++) { int c = emu_cell(i), r = c / 16, col = c % 16; (layout == mem_row_major ? p[(size_t)r * ld + col] : p[(size_t)col * ld + r]) = f.x[i]; }
}
template <class Use, class T, class Layout> static void emu_fill(int line, fragment<Use, 16, 16, 16, T, Layout> &f, float x) {
    emu_together(line, NULL, 0, 16);
    for (int i = 0; i < 8; i++) f.x[i] = x;
    f.filled = 1;
}
template <class T, class LA, class LB> EMU_QUIET static void emu_mma(int line, fragment<accumulator, 16, 16, 16, float> &d, const fragment<matrix_a, 16, 16, 16, T, LA> &a,
                                                                     const fragment<matrix_b, 16, 16, 16, T, LB> &b, const fragment<accumulator, 16, 16, 16, float> &c) {
    static float product[32][256];                           // of each warp
    EmuThread *t = emu.cur;
    float A[256], B[256], *sum = product[(t - emu.t) / 32];  // B: its columns one after the other
    const float *mine[2] = { a.x, b.x };
    if (!a.filled || !b.filled || !c.filled) emu_die("line %d: mma_sync of a fragment that was never filled", line);
    t->in = (uint64_t)(uintptr_t)mine;
    emu_wait(EMU_WARP, line, 0xffffffffu);
    for (int i = 0; t->lane == 0 && i < 256; i++) {          // lane 0 computes for all
        int cell = (i * 37 + emu.seed * 11) & 255;
        const float *const *from = (const float *const *)(uintptr_t)t->got[i / 8];
        A[cell] = from[0][i % 8]; B[cell % 16 * 16 + cell / 16] = from[1][i % 8];
    }
    for (int i = 0; t->lane == 0 && i < 256; i++) {
        const float *x = A + i / 16 * 16, *y = B + i % 16 * 16;
        sum[i] = 0;
        for (int k = 0; k < 16; k++) sum[i] += x[k] * y[k];
    }
    emu_wait(EMU_WARP, line, 0xffffffffu);                   // nobody changes a fragment that is still read
    for (int i = 0; i < 8; i++) d.x[i] = c.x[i] + sum[emu_cell(i)];
    d.filled = 1;
}
#define load_matrix_sync(...)  emu_load(__LINE__, __VA_ARGS__)
#define store_matrix_sync(...) emu_store(__LINE__, __VA_ARGS__)
#define fill_fragment(...)     emu_fill(__LINE__, __VA_ARGS__)
#define mma_sync(...)          emu_mma(__LINE__, __VA_ARGS__)
} }

// ------------------------------------------------------------------------------------------------ PTX
// The functions of kvcomp.cu's "what only PTX can say", written from the tables of the PTX ISA, chapter "Warp Level Matrix
// Multiply-Accumulate Instructions". Warp operations are done by all 32 lanes on one line. As in the ISA, groupID is lane / 4
// and threadID_in_group lane % 4.

static void emu_shared_check(int line, const void *p, const char *what);            // 16 bytes of shared memory, aligned to 16

template <int DT> static float emu_half(unsigned word, int upper) {
    uint16_t h = (uint16_t)(upper ? word >> 16 : word);
    return DT == DT_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

// mma.m16n8k16. The lanes of a warp lay their elements into a table, meet, and compute their own sums. Two tables take turns:
// who has come to the meeting of the second has read the first, so one meeting an operation is enough.
struct EmuProduct { float a[16][16], b[16][8]; };
static EmuProduct emu_product[32][2];                                               // of each warp
static unsigned char emu_product_turn[1024];                                        // of each thread: which table is next
template <int DT>
EMU_QUIET static void mma_16x8x16(float d[4], const unsigned a[4], const unsigned b[2], int line = __builtin_LINE()) {
    int thread = (int)(emu.cur - emu.t), group = (int)emu.cur->lane / 4, in_group = (int)emu.cur->lane % 4;
    EmuProduct *x = &emu_product[thread / 32][emu_product_turn[thread]];
    emu_product_turn[thread] ^= 1;
    for (int i = 0; i < 8; i++) {                                                   // a0..a7
        int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
        int col = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
        x->a[row][col] = emu_half<DT>(a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; i++) {                                                   // b0..b3
        int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
        x->b[row][group] = emu_half<DT>(b[i / 2], i % 2);
    }
    emu_wait(EMU_WARP, line, 0xffffffffu);
    for (int i = 0; i < 4; i++) {                                                   // c0..c3
        int row = i < 2 ? group : group + 8, col = in_group * 2 + (i & 1);
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += x->a[row][k] * x->b[k][col];
        d[i] += sum;
    }
}

// ldmatrix.m8n8.x4: threads 0-7 hold the addresses of the rows of matrix 0, 8-15 those of matrix 1, and so forth. Thread 4 r + c
// receives the elements 2 c and 2 c + 1 of row r; transposed, of column r.
static void emu_ldmatrix(int line, unsigned r[4], const void *row, int trans) {
    EmuThread *t = emu.cur;
    emu_shared_check(line, row, "ldmatrix");
    t->in = (uint64_t)(uintptr_t)row;
    emu_wait(EMU_WARP, line, 0xffffffffu);
    for (int m = 0; m < 4; m++) {
        unsigned e[2];
        for (int i = 0; i < 2; i++) {
            int major = (int)t->lane / 4, minor = (int)t->lane % 4 * 2 + i;
            const uint16_t *from = (const uint16_t *)(uintptr_t)t->got[m * 8 + (trans ? minor : major)];
            e[i] = from[trans ? major : minor];
        }
        r[m] = e[0] | e[1] << 16;
    }
}
static inline void ldmatrix_x4(unsigned r[4], const void *row, int line = __builtin_LINE()) { emu_ldmatrix(line, r, row, 0); }
static inline void ldmatrix_x4_trans(unsigned r[4], const void *row, int line = __builtin_LINE()) { emu_ldmatrix(line, r, row, 1); }

// movmatrix.m8n8.trans: thread 4 r + c brings the elements 2 c, 2 c + 1 of row r, and receives those of column r.
EMU_QUIET static inline unsigned movmatrix(unsigned x, int line = __builtin_LINE()) {
    EmuThread *t = emu.cur;
    unsigned e[2];
    t->in = x;
    emu_wait(EMU_WARP, line, 0xffffffffu);
    for (int i = 0; i < 2; i++) {
        int row = (int)t->lane % 4 * 2 + i, col = (int)t->lane / 4;                 // of the matrix that was brought
        unsigned word = (unsigned)t->got[row * 4 + col / 2];
        e[i] = col % 2 ? word >> 16 : word & 0xffff;
    }
    return e[0] | e[1] << 16;
}

// cp.async. A copy happens when its group is waited for, as late as it may. Until then its place is 0xff, because the hardware
// might have begun: who still reads what lay there reads NaN, too.
struct EmuCopy { char *to; const char *from; int take, group; };
struct EmuCopies { EmuCopy *at; int n, cap, group; };                               // n: under way; group: groups committed
static EmuCopies emu_copies[1024];                                                  // of each thread
static inline void copy16_async_if(void *to, const void *from, int take, int line = __builtin_LINE()) {
    EmuCopies *c = &emu_copies[emu.cur - emu.t];
    emu_shared_check(line, to, "cp.async");
    if (take && (uintptr_t)from % 16) emu_die("line %d: cp.async from %p, which is not aligned to 16", line, from);
    if (c->n == c->cap) c->at = (EmuCopy *)realloc((void *)c->at, (size_t)(c->cap = 2 * c->cap + 16) * sizeof *c->at);
    c->at[c->n++] = { (char *)to, (const char *)from, take, c->group };
    memset(to, 0xff, 16);
}
static inline void copy16_async(void *to, const void *from, int line = __builtin_LINE()) { copy16_async_if(to, from, 1, line); }
static inline void copy_commit(void) { emu_copies[emu.cur - emu.t].group++; }
template <int N> static void copy_wait(void) {
    EmuCopies *c = &emu_copies[emu.cur - emu.t];
    int left = 0;
    for (int i = 0; i < c->n; i++) {
        EmuCopy x = c->at[i];
        if (x.group >= c->group - N) c->at[left++] = x;
        else if (x.take) memcpy(x.to, x.from, 16);
        else memset(x.to, 0, 16);
    }
    c->n = left;
}

template <int N> static void load_once(unsigned *to, const void *p, int line = __builtin_LINE()) {
    if ((uintptr_t)p % (4 * N)) emu_die("line %d: a load of %d bytes at %p", line, 4 * N, p);
    memcpy(to, p, 4 * N);
}
static inline float exp2_flush(float x) { return x < -126 ? 0 : exp2f(x); }
static inline void dependency_wait(void) {}                                         // kernels run one after the other
static inline void dependents_launch(void) {}

// ------------------------------------------------------------------------------------------------ the scheduler: one block at a time

EMU_QUIET static void emu_entry(void) {
    for (;;) {                                              // block after block
        EMU_TSAN(__tsan_acquire(&emu.bid));
        emu.body(emu.arg);
        if (emu_copies[emu.cur - emu.t].n) emu_die("a thread returns while %d of its copies are under way", emu_copies[emu.cur - emu.t].n);
        EMU_TSAN(__tsan_release(&emu.sched));
        emu.cur->state = EMU_DONE;
        emu_leave(emu.cur);
    }
}
EMU_QUIET static void emu_make(EmuThread *t) {
    stack_t room = t->ctx.uc_stack;
    getcontext(&t->ctx);
    t->ctx.uc_stack = room; t->ctx.uc_link = NULL;
    makecontext(&t->ctx, emu_entry, 0);
    EMU_TSAN(t->tsan = __tsan_create_fiber(0));
    t->made = 1;
}
EMU_QUIET static void emu_release_warps(int *moved) {
    for (int i = 0; i < emu.n; i++) {
        EmuThread *t = &emu.t[i], *w = &emu.t[i & ~31];
        if (t->state != EMU_WARP) continue;
        if (!(t->mask >> t->lane & 1)) emu_die("line %d: lane %u is not in its own mask %08x", t->line, t->lane, t->mask);
        int ready = 1;
        for (int j = 0; j < 32; j++) {
            if (!(t->mask >> j & 1)) continue;
            if ((i & ~31) + j >= emu.n) emu_die("line %d: mask %08x names lane %d of a partial warp", t->line, t->mask, j);
            if (w[j].state == EMU_DONE) emu_die("line %d: mask %08x names lane %d, which has returned", t->line, t->mask, j);
            if (w[j].state != EMU_WARP) ready = 0;
            else if (w[j].mask != t->mask || w[j].line != t->line)
                emu_die("lanes %u (line %d) and %d (line %d) meet in different warp operations", t->lane, t->line, j, w[j].line);
        }
        if (!ready) continue;
        uint64_t in[32];
        for (int j = 0; j < 32; j++) in[j] = t->mask >> j & 1 ? w[j].in : 0;
        unsigned m = t->mask;
        for (int j = 0; j < 32; j++)
            if (m >> j & 1) { memcpy(w[j].got, in, sizeof in); w[j].state = EMU_READY; }
        *moved = 1;
    }
}
extern char __start_emu_shared[] __attribute__((weak)), __stop_emu_shared[] __attribute__((weak));
static void emu_shared_check(int line, const void *p, const char *what) {
    const char *a = (const char *)p, *low = __start_emu_shared, *high = __stop_emu_shared;
    int inside = (low && a >= low && a + 16 <= high) || (a >= emu.dyn && a + 16 <= emu.dyn + emu.dyn_bytes);
    if (!inside || (uintptr_t)p % 16) emu_die("line %d: %s at %p: not 16 aligned bytes of shared memory", line, what, p);
}
EMU_QUIET static void emu_block(void) {
    if (__start_emu_shared) memset(__start_emu_shared, 0xff, __stop_emu_shared - __start_emu_shared);
    if (emu.dyn_bytes) memset(emu.dyn, 0xff, emu.dyn_bytes);
    for (int i = 0; i < emu.n; i++) {
        EmuThread *t = &emu.t[i];
        unsigned x = emu.block.x, y = emu.block.y;
        t->tid = dim3(i % x, i / x % y, i / (x * y));
        t->state = EMU_READY; t->lane = i & 31;
        emu_copies[i].group = 0;
        if (!t->made) emu_make(t);
        EMU_TSAN(char nm[64]; snprintf(nm, sizeof nm, "block %u,%u thread %d", emu.bid.x, emu.bid.y, i); __tsan_set_fiber_name(t->tsan, nm));
    }
    EMU_TSAN(__tsan_release(&emu.bid));          // orders block after block: see EMU_SEED for those
    for (;;) {
        int moved = 0, done = 0, barrier = 0, line = 0;
        unsigned start = 0, back = emu.seed == 1;
        if (emu.seed > 1) { emu.rng = emu.rng * 6364136223846793005ull + 1442695040888963407ull; start = emu.rng >> 33; back = emu.rng >> 32 & 1; }
        for (int k = 0; k < emu.n; k++) {
            int i = (k + start) % emu.n;
            if (back) i = emu.n - 1 - i;
            EmuThread *t = &emu.t[i];
            if (t->state != EMU_READY) continue;
            emu.cur = t; moved = 1;
            emu_enter(t);
        }
        emu_release_warps(&moved);
        for (int i = 0; i < emu.n; i++) {
            done += emu.t[i].state == EMU_DONE;
            if (emu.t[i].state == EMU_BARRIER) { barrier++; if (!line) line = emu.t[i].line; }
        }
        if (done == emu.n) { EMU_TSAN(__tsan_acquire(&emu.sched)); return; }
        if (barrier && barrier + done == emu.n) {
            if (done) emu_die("line %d: %d of %d threads returned before __syncthreads", line, done, emu.n);
            for (int i = 0; i < emu.n; i++) {
                if (emu.t[i].line != line) emu_die("divergent barrier: thread 0 waits on line %d, thread %d on line %d", line, i, emu.t[i].line);
                emu.t[i].state = EMU_READY;
            }
        } else if (!moved) emu_die("deadlock: %d threads wait at __syncthreads (line %d), %d returned, the rest wait in a warp operation", barrier, line, done);
    }
}

// ------------------------------------------------------------------------------------------------ device memory

#define EMU_ARENA ((size_t)1 << 38)                  // addresses, not memory
#define EMU_PAGE  ((size_t)4096)
#define EMU_DYN   ((size_t)99 << 10)                 // most shared memory a block may ask for: what sm_86 has
typedef int cudaError_t; typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaDeviceProp { char name[256]; int major, minor, multiProcessorCount; size_t totalGlobalMem; };

static void emu_fault(int, siginfo_t *, void *);
static void emu_init(void) {
    emu.arena = (char *)mmap(NULL, EMU_ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    emu.dyn = (char *)mmap(NULL, EMU_DYN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    emu.t = (EmuThread *)calloc(1024, sizeof(EmuThread));
    for (int i = 0; i < 1024; i++) {
        char *s = (char *)mmap(NULL, 64 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(s, EMU_PAGE, PROT_NONE);
        emu.t[i].ctx.uc_stack.ss_sp = s; emu.t[i].ctx.uc_stack.ss_size = 64 << 10;
    }
    static char alt[16384];
    stack_t st = {}; st.ss_sp = alt; st.ss_size = sizeof alt; sigaltstack(&st, NULL);
    struct sigaction sa = {}; sa.sa_sigaction = emu_fault; sa.sa_flags = SA_SIGINFO | SA_ONSTACK; sigaction(SIGSEGV, &sa, NULL);
    EMU_TSAN(emu.tsan = __tsan_get_current_fiber());
    const char *e = getenv("EMU_SEED"); if (e) { emu.seed = atoi(e); emu.rng = emu.seed; }
}
static int emu_find(const void *p) {                            // the live allocation p lies in (or ends), -1: none
    int lo = 0, hi = emu.n_mem;
    while (lo < hi) { int m = (lo + hi) / 2; if (emu.mem[m].p <= (char *)p) lo = m + 1; else hi = m; }
    return lo && emu.mem[lo - 1].live && (char *)p <= emu.mem[lo - 1].p + emu.mem[lo - 1].bytes ? lo - 1 : -1;
}
// Device memory is readable only while a kernel or a copy runs. Opening and closing it costs half of the time of a small
// test, so other seeds than 0 leave it open: the host's mistakes do not depend on the order of threads.
static void emu_protect(int i, int prot) { mprotect((char *)((uintptr_t)emu.mem[i].p & ~(EMU_PAGE - 1)), emu.mem[i].span, prot); }
static void emu_open1(int i, int prot) { if (i >= 0 && !emu.open) emu_protect(i, prot); }
static void emu_open(int prot) {
    if (prot == PROT_NONE && emu.seed) return;
    if (emu.open == (prot != PROT_NONE)) return;
    for (int i = 0; i < emu.n_mem; i++) if (emu.mem[i].live) emu_protect(i, prot);
    emu.open = prot != PROT_NONE;
}
extern "C" void emu_set_seed(int seed) {                        // tests: another order of threads and blocks
    emu.seed = seed; emu.rng = (uint64_t)seed;
    if (emu.arena) emu_open(PROT_NONE);
}
static size_t emu_memory = EMU_ARENA;                           // what the device says it has
static cudaError_t emu_malloc(void **out, size_t bytes) {
    if (!emu.arena) emu_init();
    size_t span = (bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE + (bytes ? 0 : EMU_PAGE);
    if (emu.used + span + EMU_PAGE > EMU_ARENA) return cudaErrorMemoryAllocation;
    char *base = emu.arena + emu.used;
    if (emu.n_mem == emu.cap_mem) emu.mem = (Emu::EmuMem *)realloc(emu.mem, (size_t)(emu.cap_mem = 2 * emu.cap_mem + 64) * sizeof *emu.mem);
    emu.used += span + EMU_PAGE;
    if (emu.live + bytes > emu_memory) { emu.used -= span + EMU_PAGE; return cudaErrorMemoryAllocation; }
    emu.live += bytes;
    if (emu.live > emu.peak) emu.peak = emu.live;
    mprotect(base, span, PROT_READ | PROT_WRITE); memset(base, 0xff, span);
    if (!emu.open) mprotect(base, span, PROT_NONE);
    emu.mem[emu.n_mem] = { base + ((span - bytes) & ~(size_t)15), bytes, span, 1 };          // ends at the guard page
    *out = emu.mem[emu.n_mem++].p;
    return cudaSuccess;
}
// ---- the stream: what may wait does. An operation is a function with its arguments; kernels and copies of ordinary host memory run
// at once, after whatever waits; copies of pinned memory wait until somebody synchronises. A capture writes operations down instead.
struct EmuOp { void (*run)(void *); void *arg; };
struct EmuOps { EmuOp *at; int n, cap; };
static EmuOps emu_waiting;
static long emu_done, emu_queued;                             // waiting operations run, and ever put there
static EmuOps *emu_capture;                                   // not NULL: operations go here
extern "C" { int emu_no_graphs; }                             // tests: captures are refused
typedef EmuOps *cudaGraph_t, *cudaGraphExec_t;
typedef long *cudaEvent_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };

template <class F> static void emu_push(EmuOps *list, F f) {
    if (list->n == list->cap) list->at = (EmuOp *)realloc(list->at, (size_t)(list->cap = 2 * list->cap + 64) * sizeof *list->at);
    F *copy = (F *)malloc(sizeof f);
    memcpy((void *)copy, (void *)&f, sizeof f);
    list->at[list->n++] = { [](void *p) { (*(F *)p)(); }, copy };
}
static void emu_flush(long until) {                           // runs waiting operations, up to the until-th ever queued
    int n = 0;
    while (n < emu_waiting.n && emu_done < until) { emu_waiting.at[n].run(emu_waiting.at[n].arg); free(emu_waiting.at[n++].arg); emu_done++; }
    memmove(emu_waiting.at, emu_waiting.at + n, (size_t)(emu_waiting.n -= n) * sizeof(EmuOp));
}
static void emu_settle(const char *what) {                    // before a call that waits for the device, or works beside the stream
    if (emu_capture) emu_die("%s while a graph is captured", what);
    emu_flush(emu_queued);
}
template <class F> static void emu_do(int may_wait, F f) {
    if (emu_capture) emu_push(emu_capture, f);
    else if (may_wait) { emu_push(&emu_waiting, f); emu_queued++; }
    else { emu_flush(emu_queued); f(); }
}
static struct { char *p; size_t n; } emu_pinned[64];
static int emu_pin(const void *p, const void *is, size_t n) { // replaces the entry of `is` (NULL: a free one) -> found
    for (int i = 0; i < 64; i++) if (emu_pinned[i].p == is) { emu_pinned[i].p = (char *)p; emu_pinned[i].n = n; return 1; }
    return 0;
}
static int emu_is_pinned(const void *p) {
    for (int i = 0; i < 64; i++) if (emu_pinned[i].p && (char *)p >= emu_pinned[i].p && (char *)p < emu_pinned[i].p + emu_pinned[i].n) return 1;
    return 0;
}

template <class T> static cudaError_t cudaMalloc(T **out, size_t bytes) {
    EmuLock lock;
    emu_settle("cudaMalloc");
    return emu_malloc((void **)out, bytes);
}
static cudaError_t cudaFree(void *p) {
    EmuLock lock;
    emu_settle("cudaFree");
    if (!p) return cudaSuccess;
    int i = emu_find(p);
    if (i < 0 || emu.mem[i].p != (char *)p) emu_die("cudaFree of a pointer cudaMalloc never returned");
    emu.mem[i].live = 0;                                      // stays unreadable: use after free faults
    emu.live -= emu.mem[i].bytes;
    emu_protect(i, PROT_NONE);
    madvise((char *)((uintptr_t)p & ~(EMU_PAGE - 1)), emu.mem[i].span, MADV_DONTNEED);
    return cudaSuccess;
}
template <class T> static cudaError_t cudaMallocAsync(T **out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
static inline cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFree(p); }
static int emu_range(const void *p, size_t bytes, const char *what) {
    int i = emu_find(p);
    if (i < 0) emu_die("%s is not device memory", what);
    if ((char *)p + bytes > emu.mem[i].p + emu.mem[i].bytes) emu_die("%s runs %td bytes past its allocation", what, (char *)p + bytes - emu.mem[i].p - emu.mem[i].bytes);
    return i;
}
static void emu_host(const void *p, const char *what) {
    if (emu.arena && (char *)p >= emu.arena && (char *)p < emu.arena + EMU_ARENA) emu_die("%s is device memory", what);
}
static void emu_copy(void *d, const void *s, size_t n, cudaMemcpyKind k) {
    int id = -1, is = -1;
    int to_dev = k == cudaMemcpyHostToDevice || k == cudaMemcpyDeviceToDevice, from_dev = k == cudaMemcpyDeviceToHost || k == cudaMemcpyDeviceToDevice;
    if (to_dev) id = emu_range(d, n, "cudaMemcpy destination"); else emu_host(d, "cudaMemcpy destination");
    if (from_dev) is = emu_range(s, n, "cudaMemcpy source"); else emu_host(s, "cudaMemcpy source");
    if (to_dev && from_dev && (char *)d < (char *)s + n && (char *)s < (char *)d + n) emu_die("cudaMemcpy: the ranges overlap");
    emu_open1(id, PROT_READ | PROT_WRITE); emu_open1(is, PROT_READ | PROT_WRITE);
    memcpy(d, s, n);
    emu_open1(id, PROT_NONE); emu_open1(is, PROT_NONE);
}
static cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind k) {
    EmuLock lock;
    emu_settle("cudaMemcpy");
    emu_copy(d, s, n, k);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t = 0) {
    EmuLock lock;
    int pinned = (k == cudaMemcpyHostToDevice && emu_is_pinned(s)) || (k == cudaMemcpyDeviceToHost && emu_is_pinned(d));
    if (emu_capture && !pinned && k != cudaMemcpyDeviceToDevice) emu_die("a copy of ordinary host memory while a graph is captured");
    emu_do(pinned, [=] { emu_copy(d, s, n, k); });
    return cudaSuccess;
}
static inline cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t = 0) {
    EmuLock lock;
    emu_do(0, [=] { int i = emu_range(d, n, "cudaMemset"); emu_open1(i, PROT_READ | PROT_WRITE); memset(d, v, n); emu_open1(i, PROT_NONE); });
    return cudaSuccess;
}
static inline cudaError_t cudaHostRegister(void *p, size_t n, unsigned) { EmuLock lock; return emu_pin(p, NULL, n) ? cudaSuccess : cudaErrorMemoryAllocation; }
static inline cudaError_t cudaHostUnregister(void *p) {
    EmuLock lock;
    emu_settle("cudaHostUnregister");
    if (!emu_pin(NULL, p, 0)) emu_die("cudaHostUnregister of memory that was not registered");
    return cudaSuccess;
}
template <class T> static inline cudaError_t cudaMallocHost(T **p, size_t n) { *p = (T *)malloc(n ? n : 1); return *p ? cudaHostRegister(*p, n, 0) : cudaErrorMemoryAllocation; }
static inline cudaError_t cudaFreeHost(void *p) { cudaHostUnregister(p); free(p); return cudaSuccess; }
static inline cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return cudaSuccess; }
static inline cudaError_t cudaGetDevice(int *d) { *d = 0; return cudaSuccess; }
typedef int cudaMemPool_t;
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
static inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *m, int) { *m = 0; return cudaSuccess; }
static inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    *p = {};
    snprintf(p->name, sizeof p->name, "emulator");
    p->major = 8; p->multiProcessorCount = 2; p->totalGlobalMem = EMU_ARENA;
    return cudaSuccess;
}
extern "C" size_t emu_most_memory(void) { size_t n = emu.peak; emu.peak = emu.live; return n; } // tests: the most bytes held since the last call
extern "C" void emu_set_memory(size_t bytes) { emu_memory = bytes ? bytes : EMU_ARENA; }         // tests: a small device; 0: a big one again
static inline cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *total = emu_memory; *unused = emu_memory > emu.live ? emu_memory - emu.live : 0; return cudaSuccess; }
enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2 };
static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { *s = (void *)1; return cudaSuccess; }
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) { EmuLock lock; emu_settle("cudaStreamSynchronize"); return cudaSuccess; }
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { *e = (long *)calloc(1, sizeof **e); return cudaSuccess; }
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) { EmuLock lock; *e = emu_queued; return cudaSuccess; }
static inline cudaError_t cudaEventSynchronize(cudaEvent_t e) { EmuLock lock; emu_flush(*e); return cudaSuccess; }
static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return cudaSuccess; }
static inline cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
static inline cudaError_t cudaGetLastError(void) { return cudaSuccess; }
static inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }

static void emu_count_one(const char *name);
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    EmuLock lock;
    if (!s) emu_die("the default stream cannot be captured");
    if (emu_no_graphs) return 1;
    emu_count_one("cudaStreamBeginCapture");
    emu_flush(emu_queued);
    emu_capture = (EmuOps *)calloc(1, sizeof *emu_capture);
    return cudaSuccess;
}
static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) { EmuLock lock; *g = emu_capture; emu_capture = NULL; return cudaSuccess; }
static inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long) {
    *x = (EmuOps *)calloc(1, sizeof **x);
    **x = *g; *g = {};                                        // the launches move into what can be run
    return cudaSuccess;
}
static inline cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g->at); free(g); return cudaSuccess; }
static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) {
    EmuLock lock;
    emu_settle("cudaGraphExecDestroy");
    for (int i = 0; i < x->n; i++) free(x->at[i].arg);
    free(x->at); free(x);
    return cudaSuccess;
}
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t) {
    EmuLock lock;
    if (emu_capture) emu_die("cudaGraphLaunch while a graph is captured");
    emu_count_one("cudaGraphLaunch");
    emu_do(1, [=] { for (int i = 0; i < x->n; i++) x->at[i].run(x->at[i].arg); });
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------ launches

static void emu_fault(int, siginfo_t *si, void *) {
    char *a = (char *)si->si_addr;
    int i = emu.n_mem - 1;
    while (i > 0 && emu.mem[i].p > a) i--;
    if (!emu.arena || a < emu.arena || a >= emu.arena + EMU_ARENA) fprintf(stderr, "cuda_emu: %s: fault at %p\n", emu.kernel ? emu.kernel : "host", (void *)a);
    else if (!emu.kernel) fprintf(stderr, "cuda_emu: host code touched device memory\n");
    else fprintf(stderr, "cuda_emu: %s: block %u,%u,%u thread %u,%u,%u: offset %td of a %s allocation of %zu bytes\n", emu.kernel, emu.bid.x, emu.bid.y, emu.bid.z,
                 emu.cur->tid.x, emu.cur->tid.y, emu.cur->tid.z, a - emu.mem[i].p, emu.mem[i].live ? "live" : "freed", emu.mem[i].bytes);
    _exit(139);
}
static size_t emu_allowed(void *kernel, size_t set) {             // dynamic shared memory a kernel was allowed; set > 0: allows more
    static struct { void *kernel; size_t bytes; } at[64];
    int i = 0;
    while (i < 63 && at[i].kernel && at[i].kernel != kernel) i++;
    if (set) { at[i].kernel = kernel; at[i].bytes = set; }
    return at[i].kernel == kernel ? at[i].bytes : 0;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class... P> static cudaError_t cudaFuncSetAttribute(void (*k)(P...), cudaFuncAttribute, int bytes) {
    EmuLock lock;
    if (bytes < 0 || (size_t)bytes > EMU_DYN) return 1;
    emu_allowed((void *)k, (size_t)bytes);
    return cudaSuccess;
}
template <class T> static void emu_arg(T) {}
template <class T> static void emu_arg(T *p) { if (p && emu_find(p) < 0) emu_die("a kernel argument is a host pointer"); }
static struct { const char *name; long n; } emu_counts[256];       // launches of each place in the source; captures and graphs launched
static void emu_count_one(const char *name) {
    int i = 0;
    while (i < 255 && emu_counts[i].name && emu_counts[i].name != name) i++;
    emu_counts[i].name = name; emu_counts[i].n++;
}
extern "C" long emu_count(const char *part) {                     // tests: launches of kernels, or calls, whose name has this part; NULL: forget all
    long n = 0;
    for (int i = 0; i < 256 && emu_counts[i].name; i++) {
        if (!part) emu_counts[i].n = 0;
        else if (strstr(emu_counts[i].name, part)) n += emu_counts[i].n;
    }
    return n;
}
template <class... P, class... A>
static void emu_run(const char *name, dim3 grid, dim3 block, size_t dyn, void (*k)(P...), A... a) {
    emu_count_one(name);
    emu.kernel = name; emu.grid = grid; emu.block = block; emu.n = block.x * block.y * block.z; emu.dyn_bytes = dyn;
    (emu_arg<>(a), ...);
    auto call = [=] { k((P)a...); };
    emu.arg = &call;
    emu.body = [](void *p) { (*(decltype(call) *)p)(); };
    emu_open(PROT_READ | PROT_WRITE);
    size_t n = (size_t)grid.x * grid.y * grid.z;
    for (size_t b = 0; b < n; b++) {
        size_t i = emu.seed == 0 ? b : emu.seed == 1 ? n - 1 - b : (b + emu.seed * 7919ull) % n;
        emu.bid = dim3(i % grid.x, i / grid.x % grid.y, i / ((size_t)grid.x * grid.y));
        emu_block();
    }
    emu_open(PROT_NONE);
    emu.kernel = NULL;
}
template <class... P, class... A>
static void emu_launch(const char *name, dim3 grid, dim3 block, size_t dyn, void (*k)(P...), A... a) {
    EmuLock lock;
    int threads = block.x * block.y * block.z;
    if (threads < 1 || threads > 1024) emu_die("%s: a block of %d threads", name, threads);
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) emu_die("%s: grid %u,%u,%u", name, grid.x, grid.y, grid.z);
    if (dyn > 48 * 1024 && dyn > emu_allowed((void *)k, 0)) emu_die("%s: %zu bytes of dynamic shared memory, not asked for by cudaFuncSetAttribute", name, dyn);
    if (!emu.arena) emu_init();
    emu_do(0, [=] { emu_run(name, grid, block, dyn, k, a...); });
}
#define KV_LAUNCH(k, grid, block, smem, ...) emu_launch(#k, grid, block, smem, k, __VA_ARGS__)
#define KV_UNROLL(n)
#define KV_DYN_SHARED(T, name) T *name = (T *)emu_dyn()

// ------------------------------------------------------------------------------------------------ device functions

static inline float __ldg(const float *p) { return *p; }
static inline int   __ldg(const int *p) { return *p; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf(x) expf(x)                       // glibc owns the name
static inline float  __fmul_rn(float a, float b)   { return a * b; }    // never fused with an addition
static inline float  __fadd_rn(float a, float b)   { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline int   __popc(unsigned x) { return __builtin_popcount(x); }
static inline int   __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
static inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }
static inline int atomicAdd(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicAdd(unsigned *p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static inline int atomicCAS(int *p, int c, int v) { __atomic_compare_exchange_n(p, &c, v, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED); return c; }
static inline int atomicMax(int *p, int v) { int o = *p; while (o < v && !__atomic_compare_exchange_n(p, &o, v, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} return o; }
static inline float atomicAdd(float *p, float v) {
    int o = __atomic_load_n((int *)p, __ATOMIC_RELAXED), n;
    do n = __float_as_int(__int_as_float(o) + v); while (!__atomic_compare_exchange_n((int *)p, &o, n, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return __int_as_float(o);
}

// ------------------------------------------------------------------------------------------------ cuBLAS
// Column-major like the real one, so transposes and leading dimensions are tested too.

typedef void *cublasHandle_t; typedef int cublasStatus_t;
enum { CUBLAS_STATUS_SUCCESS = 0 };
enum cudaDataType { CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
static inline cublasStatus_t cublasCreate(cublasHandle_t *h) { *h = (void *)1; return 0; }
static inline cublasStatus_t cublasDestroy(cublasHandle_t) { return 0; }
static inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return 0; }
static size_t emu_size(cudaDataType t) { return t == CUDA_R_32F ? 4 : 2; }
static float emu_get(const void *p, size_t i, cudaDataType t) {
    return t == CUDA_R_32F ? ((const float *)p)[i] : t == CUDA_R_16F ? f16_to_f32(((const uint16_t *)p)[i]) : bf16_to_f32(((const uint16_t *)p)[i]);
}
// C (m,n) = alpha op(A) op(B) + beta C, column-major; sums in f32 like CUBLAS_COMPUTE_32F; C must be f32
static cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,
                                   const void *A, cudaDataType tA, int lda, const void *B, cudaDataType tB, int ldb,
                                   const void *beta, void *C, cudaDataType tC, int ldc, cublasComputeType_t, cublasGemmAlgo_t) {
    EmuLock lock;
    emu_settle("cublasGemmEx");
    emu_count_one("cublasGemmEx");
    if (m < 1 || n < 1 || k < 1 || lda < (ta ? k : m) || ldb < (tb ? n : k) || ldc < m)
        emu_die("cublasGemmEx: m %d n %d k %d lda %d ldb %d ldc %d", m, n, k, lda, ldb, ldc);
    if (tA != tB || tC != CUDA_R_32F) emu_die("cublasGemmEx: types %d %d -> %d are not supported", tA, tB, tC);
    int a = emu_range(A, emu_size(tA) * ((size_t)lda * ((ta ? m : k) - 1) + (ta ? k : m)), "cublasGemmEx A");
    int b = emu_range(B, emu_size(tB) * ((size_t)ldb * ((tb ? k : n) - 1) + (tb ? n : k)), "cublasGemmEx B");
    int c = emu_range(C, sizeof(float) * ((size_t)ldc * (n - 1) + m), "cublasGemmEx C");
    if (((uintptr_t)A | (uintptr_t)B | (uintptr_t)C) & 3) emu_die("cublasGemmEx: a matrix is not aligned");
    emu_open1(a, PROT_READ | PROT_WRITE); emu_open1(b, PROT_READ | PROT_WRITE); emu_open1(c, PROT_READ | PROT_WRITE);
    for (int j = 0; j < n; j++) for (int i = 0; i < m; i++) {
        float sum = 0, *to = (float *)C + (size_t)j * ldc + i, be = *(const float *)beta;
        for (int p = 0; p < k; p++)
            sum += emu_get(A, ta ? (size_t)i * lda + p : (size_t)p * lda + i, tA) * emu_get(B, tb ? (size_t)p * ldb + j : (size_t)j * ldb + p, tB);
        *to = *(const float *)alpha * sum + (be != 0 ? be * *to : 0);
    }
    emu_open1(a, PROT_NONE); emu_open1(b, PROT_NONE); emu_open1(c, PROT_NONE);
    return CUBLAS_STATUS_SUCCESS;
}
