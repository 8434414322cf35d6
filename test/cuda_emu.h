// cuda_emu.h - runs the kernels of kvcomp.cu on the CPU, so that they are tested on machines without a GPU.
// Tests only.
//
//     nvcc kvcomp.cu                                          for a GPU
//     g++ -x c++ -std=c++17 -include cuda_emu.h kvcomp.cu     for this emulator
//
// What it is. Every CUDA thread of a block is a fiber. Fibers change only where CUDA threads meet
// (__syncthreads, __syncwarp, shuffles, votes); blocks run one after the other. Between two meetings the
// order comes from emu_set_seed(): 0 ascending, 1 descending, other values random, so a kernel
// that counts on lockstep gives another answer. Device memory is a range of addresses with guard pages. The
// runtime and cuBLAS are the few calls that kvcomp.cu makes. A mistake ends the program, with the kernel's
// name and where threads meet the line, or it gives another answer, most often NaN.
//
// What it is not. It says nothing about speed: the device has two multiprocessors on paper, and an event
// lasts a millisecond. All streams are one queue. Blocks never run side by side and memory is never seen out
// of order, so mistakes between blocks show as another answer under another seed, or in the harder modes.
//
// How to read it. The parts stand as a compiler needs them: the language, the state, where threads meet, what
// they touch, what PTX does, a block, device memory, the calls of the runtime, a launch, cuBLAS. emu_run (a
// launch) calls emu_block, which calls emu_warp for each warp: begin with these three.
//
// Device calls from several host threads are fine, one at a time. Tests may let a call of the runtime fail:
// emu_fail_at().
//
// WHAT IS CAUGHT
// Threads that meet:
//   - a barrier that some threads never reach, or reach on another line
//   - a warp operation (shuffle, vote, tensor cores) that some lanes miss, or reach on another line
//   - matrices in shared memory that are not aligned
// Memory on the device:
//   - reading shared or fresh device memory nobody wrote (it starts as NaN, 0xff bytes)
//   - kernels running past an allocation (guard pages) or into a freed one
//   - a block that writes dynamic shared memory behind its end
//   - cp.async that is read before its group was waited for, that overwrites what is still read, or that
//     outlives its thread
// Host and device:
//   - host code touching device memory
//   - a host pointer as kernel argument, inside a struct that is one, as device side of a copy, or as a
//     cuBLAS matrix
//   - a matrix that runs past its memory
//   - a pinned buffer that is changed, or read, before its copy has been waited for: such copies run as late
//     as they may
//   - what a stream being captured into a graph must not do; a graph is a list of launches and copies, run
//     again when launched
//
// HARDER MODES (`make test` runs the tests of kernels a second time with all of them, built with -DEMU_HARD)
//   - arithmetic rounds as the hardware does. Tensor cores align products
//     to the largest and cut, expf is off by a unit in the last place either way. The build adds fused
//     multiply-add, as nvcc does
//   - between threads of a block that have not met since, and between blocks of one launch: two touch the same
//     four bytes, one of them writing, without atomics
//   - between launches: a kernel that starts early (KV_LAUNCH_EARLY) and, before dependency_wait, writes
//     device memory or reads what a kernel wrote that may still run
//   - poisoned rooms: memory that is used again starts as NaN (room() of kvcomp.cu)
//   - a read of shared memory that nobody has written in this block, used or not
//   - an access that is not aligned to its type (the compiler's -fsanitize=alignment)
//   - ordinary host memory is read as late as the next launch, as a GPU that shares the host's page tables
//     may do
#pragma once
#ifndef EMU_HARD
#define EMU_HARD 0
#endif
#include <math.h>
#include <float.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <pthread.h>
#include <sys/mman.h>
#include "../kvcomp.h"             // f16 and bf16

// Functions of the emulator itself, whose accesses are nobody's; and those that others of it inline.
#define EMU_QUIET __attribute__((no_sanitize("thread"), noinline))
#define EMU_INLINE __attribute__((no_sanitize("thread"), always_inline)) inline

// ------------------------------------------------------------------------ the language
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("emu_shared")))   // poisoned before every block
#define __align__(n) __attribute__((aligned(n)))

// Vectors that are loaded and stored at once, aligned to their size.
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

// ------------------------------------------------------------------------ names and sizes of the device
#define EMU_ARENA ((size_t)1 << 38)                  // addresses, not memory
#define EMU_PAGE  ((size_t)4096)
#define EMU_STACK (17 * EMU_PAGE)                    // of a thread; of 16 pages all would have the same places in a TLB
#define EMU_DYN   ((size_t)99 << 10)                 // most shared memory a block may ask for: what sm_86 has

typedef int cudaError_t;
typedef void *cudaStream_t;
enum {
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorUnknown = 999
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };

// ------------------------------------------------------------------------ the state
// A list that grows.
template <class T> struct EmuList {
    T *at;
    int n;
    int cap;
    void add(T x) {
        if (n == cap) at = (T *)realloc((void *)at, (size_t)(cap = 2 * cap + 64) * sizeof x);
        at[n++] = x;
    }
};

// What a thread waits for: its turn, __syncthreads, a warp operation; or it has returned.
enum { EMU_READY, EMU_BARRIER, EMU_WARP, EMU_DONE };

// A thread of a block. Its fiber lives as long as the program and runs block after block.
struct alignas(128) EmuThread {         // a power of two: which one it is takes no division
    void *at[5];                      // where it waits
    char *stack;                      // the end of its stack
    int made;                         // 1: the fiber is there
    dim3 tid;                         // threadIdx
    int line;                         // on which it waits
    unsigned lane;                    // its own lane
    int waited;                       // 1: all earlier kernels have ended, for it
};

static EmuThread emu_threads[1024];
static unsigned char emu_state[1024]; // of each thread: EMU_READY and so forth, why it waits
static uint64_t emu_in[1024];         // and what it brings to a warp operation

// What the lanes of each warp brought to their last operation. All that have met run before others of their
// warp are let go on (emu_warp), so each has read it by then.
static uint64_t emu_brought[32][32];

struct Emu {
    int n;                            // those of the block
    void *back[5];                    // where the scheduler waits
    EmuThread *cur;                   // the thread that runs
    int first;                        // of its warp
    int lanes;                        // threads of its warp
    int turn;                         // whose turn it is next among them
    int step;                         // 1 or -1, from each to the next
    int left;                         // how many have not had their turn in this round
    int line;                         // of the first warp operation of this round
    int alike;                        // lanes that have come to it, and wait for all lanes there
    dim3 grid;
    dim3 block;
    dim3 bid;                         // blockIdx
    char *dyn;                        // dynamic shared memory
    size_t dyn_bytes;
    char *dyn_end;                    // its room ends here, where a page begins that nobody may touch
    const char *kernel;               // the running one's name; NULL: the host's code runs
    void (*body)(void *);             // calls it, with arg
    void *arg;
    uint64_t rng;                     // of the order of threads
    int seed;                         // 0 ascending, 1 descending, else random
    char *arena;                      // device memory: EMU_ARENA addresses
    size_t used;                      // bytes of them that were ever given out
    struct EmuMem {
        char *p;                      // what cudaMalloc returned
        size_t bytes;                 // as asked for
        size_t span;                  // whole pages
        int live;                     // 0: freed
        int pool;                     // 1: of the pool
    };
    EmuList<EmuMem> mem;              // allocations, with ascending addresses, never reused
    int open;                         // 1: all live ones are readable
    size_t live;                      // bytes of the live ones
    size_t peak;                      // and the most there ever were
    size_t pooled;                    // bytes of freed rows that the pool keeps
    uint32_t launch;                  // kernels run so far
    uint32_t n_block;                 // the running block, counted from 1 as all of a launch are
    int early;                        // 1: the running kernel was launched to start early
    uint32_t ended;                   // this kernel and all before it have ended when the running one starts
};
static Emu emu;

#define threadIdx (emu.cur->tid)
#define blockIdx  (emu.bid)
#define blockDim  (emu.block)
#define gridDim   (emu.grid)
#define emu_dyn() (emu.dyn)

// Ends the program with a message, as printf takes it.
#define emu_die(...) do { \
    fprintf(stderr, "cuda_emu: %s: ", emu.kernel ? emu.kernel : "host"); \
    fprintf(stderr, __VA_ARGS__); \
    fprintf(stderr, "\n"); \
    abort(); \
} while (0)

// ------------------------------------------------------------------------ threads meet here
// From a fiber to the scheduler and back, as the compiler's own setjmp would go: a place is a frame pointer, an address
// of code and a stack pointer.

// Keeps in `from` where the caller is, and goes on at `to`. Returns when somebody goes on at `from`. A kernel's
// threads do little else than this, and a processor foresees where a function returns to only while calls and returns
// come in pairs, which a call of longjmp never does: thrice the time.
extern "C" void emu_switch(void **from, void **to);
#if defined(__x86_64__)
enum { EMU_CALLED = sizeof(void *) }; // on the stack of a function that was called: where it returns to
asm(".text\n"
    "emu_switch:\n"
    "    push %rbx\n"
    "    push %r12\n"
    "    push %r13\n"
    "    push %r14\n"
    "    push %r15\n"
    "    lea 1f(%rip), %rax\n"
    "    mov %rbp, (%rdi)\n"
    "    mov %rax, 8(%rdi)\n"
    "    mov %rsp, 16(%rdi)\n"
    "    mov (%rsi), %rbp\n"
    "    mov 16(%rsi), %rsp\n"
    "    jmp *8(%rsi)\n"
    "1:  pop %r15\n"
    "    pop %r14\n"
    "    pop %r13\n"
    "    pop %r12\n"
    "    pop %rbx\n"
    "    ret\n");
#else
enum { EMU_CALLED = 0 };
EMU_QUIET __attribute__((noipa)) static void emu_jump(void **at) { __builtin_longjmp(at, 1); }
EMU_QUIET __attribute__((noipa)) void emu_switch(void **from, void **to) {
    if (!__builtin_setjmp(from)) emu_jump(to);
}
#endif

// The next ready lane of this round, which becomes the running thread; NULL: each has had its turn.
EMU_INLINE static EmuThread *emu_next(void) {
    while (emu.left-- > 0) {
        int i = emu.first + emu.turn;
        emu.turn += emu.step;
        if (emu.turn == emu.lanes) emu.turn = 0;
        if (emu.turn < 0) emu.turn = emu.lanes - 1;
        if (emu_state[i] == EMU_READY) return emu.cur = &emu_threads[i];
    }
    return NULL;
}

// Fiber t, which runs, hands over to the next lane of its warp, or to the scheduler. Returns when it is entered again.
EMU_INLINE static void emu_leave(EmuThread *t) {
    EmuThread *next = emu_next();
    emu_switch(t->at, next ? next->at : emu.back);
}

// The scheduler lets fiber t run. Returns when it and those behind it in this round have left.
EMU_QUIET static void emu_enter(EmuThread *t) {
    emu_switch(emu.back, t->at);
}

// The running thread waits in `state`, on this line, for its block or for all lanes of its warp.
EMU_QUIET static void emu_wait(int state, int line) {
    EmuThread *t = emu.cur;
    emu_state[t - emu_threads] = (unsigned char)state;
    t->line = line;
    if (!emu.alike) emu.line = line;
    emu.alike += state == EMU_WARP && line == emu.line;
    emu_leave(t);
}

// Begins a warp operation, which has to name all lanes: kernels have no others.
EMU_QUIET static void emu_meet(unsigned mask, int line) {
    if (mask != 0xffffffffu) emu_die("line %d: a warp operation of the lanes %08x alone", line, mask);
    emu_wait(EMU_WARP, line);
}

// What the lanes of the running thread's warp brought to the operation that it has come from.
EMU_INLINE static const uint64_t *emu_got(void) { return emu_brought[(emu.cur - emu_threads) / 32]; }

// A shuffle: the v of lane src.
template <class T> EMU_QUIET static T emu_shfl(unsigned mask, T v, int src, int line) {
    static_assert(sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
    EmuThread *t = emu.cur;
    memcpy(&emu_in[t - emu_threads], &v, sizeof v);
    emu_meet(mask, line);
    if (src < 0 || src > 31) return v;                       // out of range: the lane's own value
    memcpy(&v, &emu_got()[src], sizeof v);
    return v;
}

// A vote: bit i is 1 where lane i has a pred that is not 0.
EMU_QUIET static unsigned emu_ballot(unsigned mask, int pred, int line) {
    EmuThread *t = emu.cur;
    emu_in[t - emu_threads] = !!pred;
    emu_meet(mask, line);
    unsigned r = 0;
    const uint64_t *got = emu_got();
    for (int i = 0; i < 32; i++) r |= (unsigned)got[i] << i;
    return r;
}

// __syncwarp() names no lanes and means all.
static inline unsigned emu_mask(unsigned m = 0xffffffffu) { return m; }

EMU_QUIET static int emu_lane(void) { return (int)emu.cur->lane; }

#define __syncthreads()                emu_wait(EMU_BARRIER, __LINE__)
#define __syncwarp(...)                emu_meet(emu_mask(__VA_ARGS__), __LINE__)
#define __shfl_sync(m, v, s)           emu_shfl(m, v, s, __LINE__)
#define __shfl_xor_sync(m, v, x)       emu_shfl(m, v, emu_lane() ^ (x), __LINE__)
#define __shfl_up_sync(m, v, d)        emu_shfl(m, v, emu_lane() - (int)(d), __LINE__)
#define __ballot_sync(m, p)            emu_ballot(m, p, __LINE__)
#define __any_sync(m, p)               (emu_ballot(m, p, __LINE__) != 0)
#define __all_sync(m, p)               (emu_ballot(m, p, __LINE__) == (m))

// ------------------------------------------------------------------------ what blocks of one launch touch
// Blocks run in any order, so a word of device memory that one block writes is nobody else's in that launch.
// The log knows of every four bytes who wrote and who read them last; a block that meets another one there,
// one of them writing, ends the program. Allowed are atomics among themselves, other bytes of the same word,
// and what the last block to arrive does: it reads what another one wrote, fenced (__threadfence) and then
// told by an atomic, after an atomic and then a fence of its own.
//
// The compiler calls __tsan_read4() and its like before every access, as it does for ThreadSanitizer; here
// they fill the log.
//
// Threads of one block are watched in the same way, from one meeting of all of them to the next, or of their warp: a
// meeting of some lanes of a warp counts as one of all.
enum { OF_BLOCKS, OF_THREADS };
struct EmuTouch {
    uint32_t era;                     // Emu.launch then, or emu_barriers; 0: nobody yet
    uint32_t who;                     // Emu.n_block, or the thread
    uint32_t when;                    // emu_clock then, or emu_meetings of its warp
    unsigned char bytes;              // which of the four
    unsigned char atomic;             // 1: all of it by atomics
    unsigned char many;               // 1: several threads of one warp, 2: of several, or several blocks
};
struct EmuTouches {
    EmuTouch write, read;             // the last ones
};
struct EmuWord {
    EmuTouches by[2];                 // OF_BLOCKS, OF_THREADS
};

// What a block has told the others, and seen of them. Times are those of emu_clock.
struct EmuArrival {
    uint32_t launch;                  // the rest is of this launch
    uint32_t fence;                   // its last fence
    uint32_t told;                    // its last atomic
    uint32_t gave;                    // the last fence before `told`
    uint32_t saw;                     // the last atomic before `fence`
};

static EmuWord *emu_words;                              // one for each four bytes of the arena
enum { EMU_BLOCKS = 1 << 16 };
static EmuArrival emu_arrivals[EMU_BLOCKS];             // by block modulo EMU_BLOCKS
static uint32_t emu_clock;                              // goes on with each atomic and fence of any block
static uint32_t emu_barriers;                           // meetings of whole blocks, and blocks begun
static uint32_t emu_meetings[32];                       // operations that lanes of a warp have met in

EMU_QUIET static void emu_log_open(void) {
    if (!EMU_HARD) return;
    emu_words = (EmuWord *)mmap(NULL, EMU_ARENA / 4 * sizeof(EmuWord), PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// The n bytes at p were freed: their part of the log is given back, as far as it fills pages.
EMU_QUIET static void emu_log_forget(const char *p, size_t n) {
    if (!EMU_HARD) return;
    char *from = (char *)&emu_words[(p - emu.arena) / 4], *to = from + n / 4 * sizeof(EmuWord);
    from = (char *)(((uintptr_t)from + EMU_PAGE - 1) & ~(EMU_PAGE - 1));
    if (to > from) madvise(from, (size_t)(to - from) & ~(EMU_PAGE - 1), MADV_DONTNEED);
}

// The arrivals of a block of the running launch.
EMU_INLINE static EmuArrival *emu_arrival(uint32_t block) {
    EmuArrival *a = &emu_arrivals[block % EMU_BLOCKS];
    if (a->launch != emu.launch) *a = { emu.launch, 0, 0, 0, 0 };
    return a;
}

// Does this touch come before what the running block or thread does, whoever made it?
EMU_INLINE static int emu_before(const EmuTouch *t, int of) {
    if (of == OF_THREADS) {
        unsigned warp = (unsigned)(emu.cur - emu_threads) / 32;
        return t->many < 2 && t->who / 32 == warp && t->when != emu_meetings[warp];
    }
    const EmuArrival *a = emu_arrival(t->who), *mine = emu_arrival(emu.n_block);
    return !t->many && a->gave > t->when && mine->saw > a->told;
}

// Was it made in this launch, or since all threads have met?
EMU_INLINE static int emu_recent(const EmuTouch *t, int of) {
    return t->era == (of == OF_BLOCKS ? emu.launch : emu_barriers);
}

// The running block or thread touches these bytes of a word. Returns the touch by another one with which it is in no
// order, one of them writing; NULL: there is none.
EMU_INLINE static const EmuTouch *emu_touches(EmuTouches *x, int of, unsigned bytes, int write, int atomic) {
    int thread = (int)(emu.cur - emu_threads);
    uint32_t who = of == OF_BLOCKS ? emu.n_block : (uint32_t)thread;
    for (EmuTouch *t = &x->write; t; t = write && t == &x->write ? &x->read : NULL)
        if (emu_recent(t, of) && (t->who != who || t->many) && t->bytes & bytes && !(t->atomic && atomic)
            && !emu_before(t, of))
            return t;

    // Only one is remembered: of two at the same bytes that neither met the other, those bytes; else the last one.
    EmuTouch *t = write ? &x->write : &x->read;
    int now = emu_recent(t, of) && !emu_before(t, of);
    int same = now && !t->many && t->who == who, meet = now && !same && t->bytes & bytes;
    int one_warp = of == OF_THREADS && t->many < 2 && t->who / 32 == who / 32;
    t->bytes = (unsigned char)(same ? t->bytes | bytes : meet ? t->bytes & bytes : bytes);
    t->atomic = (unsigned char)(same || meet ? t->atomic & atomic : atomic);
    t->many = (unsigned char)(meet ? 2 - one_warp : 0);
    t->who = who;
    t->era = of == OF_BLOCKS ? emu.launch : emu_barriers;
    t->when = of == OF_BLOCKS ? emu_clock : emu_meetings[thread / 32];
    return NULL;
}

// The running thread touches these bytes of a word. Ends the program if that is a race within the block.
EMU_INLINE static void emu_steps(EmuTouches *x, unsigned bytes, int write, int atomic) {
    const EmuTouch *by = emu_touches(x, OF_THREADS, bytes, write, atomic);
    if (by)
        emu_die("thread %d of block %u,%u,%u %s what another thread has %s, and they have not met since",
                (int)(emu.cur - emu_threads), emu.bid.x, emu.bid.y, emu.bid.z, write ? "writes" : "reads",
                by == &x->write ? "written" : "read");
}

// Which bytes of word w are among those from `at` to `end`.
EMU_INLINE static unsigned emu_bytes(size_t w, size_t at, size_t end) {
    unsigned bytes = 15;
    if (w * 4 < at) bytes &= 15u << (at - w * 4);
    if (w * 4 + 4 > end) bytes &= 15u >> (w * 4 + 4 - end);
    return bytes;
}

// ---- shared memory
// The __shared__ variables of all kernels, as the linker lays them. Weak: there may be none.
extern char __start_emu_shared[] __attribute__((weak)), __stop_emu_shared[] __attribute__((weak));

// Which bytes of shared memory the running block has written: the static ones, then the dynamic ones. A struct
// may have gaps that nobody writes, so a read of more than 8 bytes is a mistake only if all of them are new, and
// one of up to 8 if all bytes of one of its words are.
enum { EMU_STATIC = 1 << 18, EMU_SHARED = EMU_STATIC + (128 << 10) };
static unsigned char emu_written[EMU_SHARED];
static EmuTouches emu_shared_steps[EMU_SHARED / 4];

// The place of n bytes at p in emu_written; NULL: they are not shared memory.
EMU_INLINE static unsigned char *emu_shared_at(const char *p, size_t n) {
    if (__start_emu_shared && p >= __start_emu_shared && p + n <= __stop_emu_shared)
        return emu_written + (p - __start_emu_shared);
    return p >= emu.dyn && p + n <= emu.dyn + emu.dyn_bytes ? emu_written + EMU_STATIC + (p - emu.dyn) : NULL;
}

EMU_QUIET static void emu_forget_shared(void) {
    if (!EMU_HARD) return;
    if (__stop_emu_shared - __start_emu_shared > EMU_STATIC) emu_die("more static shared memory than expected");
    memset(emu_written, 0, __start_emu_shared ? (size_t)(__stop_emu_shared - __start_emu_shared) : 0);
    memset(emu_written + EMU_STATIC, 0, emu.dyn_bytes);
}

// The running thread reads or writes n bytes of shared memory, whose place in emu_written is given.
EMU_QUIET static void emu_touch_shared(unsigned char *written, size_t n, int write, int atomic) {
    size_t at = (size_t)(written - emu_written), end = at + n;
    for (size_t w = at / 4; w * 4 < end; w++) emu_steps(&emu_shared_steps[w], emu_bytes(w, at, end), write, atomic);
    if (write) {
        memset(written, 1, n);
        return;
    }
    uint64_t word = 0;
    if (n <= 8) memcpy(&word, written, n);
    int none = n > 8 ? !memchr(written, 1, n) : !(uint32_t)word || (n > 4 && !(word >> 32));
    if (none) emu_die("reads shared memory that nobody has written");
}

// The allocation that begins at p or below it, the nearest one; -1: none.
EMU_QUIET static int emu_below(const void *p) {
    int lo = 0, hi = emu.mem.n;
    while (lo < hi) {
        int m = (lo + hi) / 2;
        if (emu.mem.at[m].p <= (const char *)p) lo = m + 1;
        else hi = m;
    }
    return lo - 1;
}

// The running block reads or writes n bytes of the device's memory at p. Ends the program if another block of
// this launch touches them, or if it is too early to touch them.
EMU_QUIET static void emu_touch_device(const void *p, size_t n, int write, int atomic) {
    size_t at = (size_t)((const char *)p - emu.arena), end = at + n;
    for (size_t w = at / 4; w * 4 < end; w++) {
        unsigned bytes = emu_bytes(w, at, end);
        EmuWord *x = &emu_words[w];
        emu_steps(&x->by[OF_THREADS], bytes, write, atomic);
        EmuTouches *blocks = &x->by[OF_BLOCKS];
        if (!emu.cur->waited && (write || blocks->write.era > emu.ended))
            emu_die("%s before dependency_wait",
                    write ? "writes device memory" : "reads what a kernel wrote that may still run");
        const EmuTouch *by = emu_touches(blocks, OF_BLOCKS, bytes, write, atomic);
        const Emu::EmuMem *m = by ? &emu.mem.at[emu_below(p)] : NULL;
        if (by)
            emu_die("block %u,%u,%u %s offset %td of an allocation of %zu bytes, "
                    "which %s of this launch %s: they come in any order",
                    emu.bid.x, emu.bid.y, emu.bid.z, write ? "writes" : "reads", (const char *)p - m->p, m->bytes,
                    by->many ? "other blocks" : "another block", by == &blocks->write ? "writes" : "reads");
    }
}

// The same of any memory.
EMU_INLINE static void emu_touch(const void *p, size_t n, int write, int atomic) {
    if (!EMU_HARD || !emu.kernel) return;
    unsigned char *shared = emu_shared_at((const char *)p, n);
    if (shared) emu_touch_shared(shared, n, write, atomic);
    else if ((size_t)((const char *)p - emu.arena) < EMU_ARENA) emu_touch_device(p, n, write, atomic);
}

// An atomic of the running block, of n bytes at p.
EMU_QUIET static void emu_atomic(const void *p, size_t n) {
    EmuArrival *a = emu_arrival(emu.n_block);
    a->gave = a->fence;
    a->told = ++emu_clock;
    emu_touch(p, n, 1, 1);
}

// __threadfence of the running block.
EMU_QUIET static void emu_fence(void) {
    EmuArrival *a = emu_arrival(emu.n_block);
    a->saw = a->told;
    a->fence = ++emu_clock;
}

// ---- what the compiler calls
#if EMU_HARD
extern "C" {
#define EMU_HOOKS(n) \
    EMU_QUIET void __tsan_read##n(void *p)  { emu_touch(p, n, 0, 0); } \
    EMU_QUIET void __tsan_write##n(void *p) { emu_touch(p, n, 1, 0); } \
    EMU_QUIET void __tsan_unaligned_read##n(void *p)  { emu_touch(p, n, 0, 0); } \
    EMU_QUIET void __tsan_unaligned_write##n(void *p) { emu_touch(p, n, 1, 0); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)

EMU_QUIET void __tsan_read_range(void *p, unsigned long n)  { emu_touch(p, n, 0, 0); }
EMU_QUIET void __tsan_write_range(void *p, unsigned long n) { emu_touch(p, n, 1, 0); }

EMU_QUIET void __tsan_init(void) {}
EMU_QUIET void __tsan_func_entry(void *) {}
EMU_QUIET void __tsan_func_exit(void) {}

EMU_QUIET int __tsan_atomic32_load(const volatile int *p, int) {
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}

EMU_QUIET int __tsan_atomic32_fetch_add(volatile int *p, int v, int) {
    emu_atomic((const void *)p, 4);
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}

EMU_QUIET int __tsan_atomic32_compare_exchange_strong(volatile int *p, int *c, int v, int, int) {
    emu_atomic((const void *)p, 4);
    return __atomic_compare_exchange_n(p, c, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
}
#endif
#define __threadfence() emu_fence()

// ------------------------------------------------------------------------ rounding like the hardware's
// Exponential functions are off by a unit in the last place on a GPU: y = f(x), moved by -1, 0 or 1 of them,
// as the bits of x say.
EMU_QUIET static float emu_off(float y, float x) {
    if (!EMU_HARD || y == 0 || y == 1 || !(y < INFINITY)) return y;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits *= 2654435761u;
    int up = (int)((bits ^ bits >> 15) % 3) - 1;
    return up ? nextafterf(y, (float)up * INFINITY) : y;
}

// x as the nearest float towards zero.
EMU_QUIET static float emu_cut(double x) {
    float f = (float)x;
    return fabs((double)f) > fabs(x) ? nextafterf(f, 0) : f;
}

// The power of two that is x at most, and more than half of it; x > 0.
EMU_INLINE static double emu_power(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    bits &= (uint64_t)0x7ff << 52;
    memcpy(&x, &bits, 8);
    return x;
}

// What a tensor core makes of c plus n exact products: all are shifted to the exponent of the largest, cut
// behind 24 bits, added, and the sum is cut to a float. An A100 keeps one bit more than a float has,
// and adds 8 products at once.
enum { EMU_AT_ONCE = 8 };
EMU_QUIET static float emu_tensor_sum(float c, const double *product, int n) {
    double top = fabs((double)c), plain = c;
    for (int i = 0; i < n; i++) {
        double size = fabs(product[i]);
        top = size > top ? size : top;
        plain += product[i];
    }
    if (!(top > 0) || !(fabs(plain) < INFINITY)) return (float)plain;
    double unit = emu_power(top) * 0x1p-24, units = 1 / unit;
    int32_t sum = (int32_t)(c * units);                     // each is below 2^25
    for (int i = 0; i < n; i++) sum += (int32_t)(product[i] * units);
    return emu_cut(sum * unit);
}

// ------------------------------------------------------------------------ PTX
// The functions of lib/cuda.h's "what only PTX can say", written from the tables of the PTX ISA, chapter
// "Warp Level Matrix Multiply-Accumulate Instructions". Warp operations are done by all 32 lanes on one line.
// As in the ISA, groupID is lane / 4 and threadID_in_group lane % 4.

// ---- tensor cores

// One product of a warp: the factors and d, as the lanes bring them.
struct EmuProduct {
    alignas(32) float a[16][16], b[16][8], d[16][8];
    int done;                         // 1: d is a b + d
};
static EmuProduct emu_product[32][2];                   // of each warp
static unsigned char emu_product_turn[1024];            // of each thread: which table is next

// Element i of a pair of 16-bit numbers.
template <int DT> EMU_INLINE static float emu_half(unsigned pair, int i) {
    uint16_t h = (uint16_t)(pair >> i * 16);
    return DT == DT_BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}

EMU_QUIET static void emu_multiply(EmuProduct *x) {
    for (int i = 0; i < 16; i++) {
        float sum[8] = { 0 };
        double exact[16];
        for (int k = 0; k < 16 && !EMU_HARD; k++)
            for (int j = 0; j < 8; j++) sum[j] += x->a[i][k] * x->b[k][j];
        for (int j = 0; j < 8; j++) {
            for (int k = 0; k < 16 && EMU_HARD; k++) exact[k] = (double)x->a[i][k] * x->b[k][j];
            for (int k = 0; k < 16 && EMU_HARD; k += EMU_AT_ONCE)
                x->d[i][j] = emu_tensor_sum(x->d[i][j], exact + k, EMU_AT_ONCE);
            if (!EMU_HARD) x->d[i][j] += sum[j];
        }
    }
    x->done = 1;
}

// mma.m16n8k16: d += a b, of which each lane holds the elements that the ISA gives it. The lanes of a warp
// lay their elements into a table and meet; the first to go on multiplies, and each takes its own sums. Two
// tables take turns: who has come to the meeting of the second has read the first, so one meeting an operation
// is enough.
template <int DT>
EMU_QUIET static void mma_16x8x16(float d[4], const unsigned a[4], const unsigned b[2],
                                  int line = __builtin_LINE()) {
    int thread = (int)(emu.cur - emu_threads);
    int group = (int)emu.cur->lane / 4;
    int in_group = (int)emu.cur->lane % 4;
    EmuProduct *x = &emu_product[thread / 32][emu_product_turn[thread]];
    emu_product_turn[thread] ^= 1;
    for (int i = 0; i < 8; i++)                             // a0..a7
        x->a[group + i / 2 % 2 * 8][in_group * 2 + i % 2 + i / 4 * 8] = emu_half<DT>(a[i / 2], i % 2);
    for (int i = 0; i < 4; i++)                             // b0..b3
        x->b[in_group * 2 + i % 2 + i / 2 * 8][group] = emu_half<DT>(b[i / 2], i % 2);
    float *own[4];                                          // c0..c3
    for (int i = 0; i < 4; i++) {
        own[i] = &x->d[group + i / 2 * 8][in_group * 2 + i % 2];
        *own[i] = d[i];
    }
    x->done = 0;
    emu_wait(EMU_WARP, line);
    if (!x->done) emu_multiply(x);
    for (int i = 0; i < 4; i++) d[i] = *own[i];
}

// ---- shared memory

typedef char *SharedAt;                                 // an address in shared memory
static inline SharedAt shared_address(const void *p) { return (SharedAt)(uintptr_t)p; }

// Ends the program unless 16 bytes of shared memory lie at p, aligned to 16.
static void emu_shared_check(int line, const void *p, const char *what) {
    if (!emu_shared_at((const char *)p, 16) || (uintptr_t)p % 16)
        emu_die("line %d: %s at %p: not 16 aligned bytes of shared memory", line, what, p);
}

// ldmatrix.m8n8.x4: threads 0-7 hold the addresses of the rows of matrix 0, 8-15 those of matrix 1, and so
// forth. Thread 4 r + c receives the elements 2 c and 2 c + 1 of row r; transposed, of column r.
static void emu_ldmatrix(int line, unsigned r[4], const void *row, int trans) {
    EmuThread *t = emu.cur;
    emu_shared_check(line, row, "ldmatrix");
    emu_touch(row, 16, 0, 0);
    emu_in[t - emu_threads] = (uint64_t)(uintptr_t)row;
    emu_wait(EMU_WARP, line);
    const uint64_t *got = emu_got();
    for (int m = 0; m < 4; m++) {
        unsigned e[2];
        for (int i = 0; i < 2; i++) {
            int major = (int)t->lane / 4;
            int minor = (int)t->lane % 4 * 2 + i;
            const uint16_t *from = (const uint16_t *)(uintptr_t)got[m * 8 + (trans ? minor : major)];
            e[i] = from[trans ? major : minor];
        }
        r[m] = e[0] | e[1] << 16;
    }
}

static inline void ldmatrix_x4(unsigned r[4], const void *row, int line = __builtin_LINE()) {
    emu_ldmatrix(line, r, row, 0);
}

static inline void ldmatrix_x4_trans(unsigned r[4], const void *row, int line = __builtin_LINE()) {
    emu_ldmatrix(line, r, row, 1);
}

// ---- copies to shared memory that run beside the thread
// A copy happens when its group is waited for, as late as it may. Until then its place is 0xff, because the
// hardware might have begun: who still reads what lay there reads NaN, too.

struct EmuCopy {
    char *to;
    const char *from;
    int group;                        // the number of its group
};
struct EmuCopies {
    EmuList<EmuCopy> way;             // those under way
    int group;                        // groups committed
};
static EmuCopies emu_copies[1024];                      // of each thread

// cp.async of 16 bytes. Ends the program if an address is not aligned, or `to` is not in shared memory.
static inline void copy16_async(void *to, const void *from, int line = __builtin_LINE()) {
    EmuCopies *c = &emu_copies[emu.cur - emu_threads];
    emu_shared_check(line, to, "cp.async");
    if ((uintptr_t)from % 16)
        emu_die("line %d: cp.async from %p, which is not aligned to 16", line, from);
    c->way.add({ (char *)to, (const char *)from, c->group });
    memset(to, 0xff, 16);
    emu_touch(to, 16, 1, 0);
}

// The copies since the last commit are a group.
static inline void copy_commit(void) { emu_copies[emu.cur - emu_threads].group++; }

// Waits until at most N of the committed groups are under way.
template <int N> static void copy_wait(void) {
    EmuCopies *c = &emu_copies[emu.cur - emu_threads];
    int left = 0;
    for (int i = 0; i < c->way.n; i++) {
        EmuCopy x = c->way.at[i];
        if (x.group >= c->group - N) c->way.at[left++] = x;
        else memcpy(x.to, x.from, 16);
    }
    c->way.n = left;
}

// ---- other instructions

// to (4) = the 16 bytes at p. Ends the program if p is not aligned to 16.
static void load_once(unsigned *to, const void *p, int line = __builtin_LINE()) {
    if ((uintptr_t)p % 16) emu_die("line %d: a load of 16 bytes at %p", line, p);
    memcpy(to, p, 16);
}

// 2^x; what is smaller than 2^-126 is 0.
static inline float exp2_flush(float x) { return x < -126 ? 0 : emu_off(exp2f(x), x); }

// x; kvcomp.cu keeps a compiler from working it out anew.
template <class T> static inline T as_it_is(T x) { return x; }

// Kernels run one after the other. What these two are for is looked after: a kernel that may start early
// calls dependency_wait in every thread, or the one behind it would not know that all before have ended; see
// emu_touch, too.
static inline void dependency_wait(void) { emu.cur->waited = 1; }
static inline void dependents_launch(void) {}

// ------------------------------------------------------------------------ a block
// The scheduler runs one block at a time.

// What a fiber runs: the kernel, once for each block. Ends the program if the thread returns without
// dependency_wait where it is due, or with copies under way.
EMU_QUIET static void emu_entry(void) {
    for (;;) {                                              // block after block
        emu.body(emu.arg);
        if (!emu.cur->waited)
            emu_die("a thread of a kernel that may start early returns without dependency_wait");
        int n = emu_copies[emu.cur - emu_threads].way.n;
        if (n) emu_die("a thread returns while %d of its copies are under way", n);
        emu_state[emu.cur - emu_threads] = EMU_DONE;
        emu_leave(emu.cur);
    }
}

// Makes t's fiber, on the stack that emu_init gave it: it waits at the beginning of emu_entry, which finds its stack
// pointer as if it had been called.
EMU_QUIET static void emu_make(EmuThread *t) {
    t->at[0] = NULL;
    t->at[1] = (void *)emu_entry;
    t->at[2] = t->stack - EMU_CALLED;
    t->made = 1;
}

// Where a walk over n things begins, in the order of the seed; *step: 1, or -1 where it goes down.
EMU_QUIET static int emu_order(int n, int *step) {
    *step = emu.seed == 1 ? -1 : 1;
    if (emu.seed < 2) return emu.seed ? n - 1 : 0;
    emu.rng = emu.rng * 6364136223846793005ull + 1442695040888963407ull;
    *step = emu.rng >> 32 & 1 ? 1 : -1;
    return (int)((emu.rng >> 33) % n);
}

// The warp of threads first to end runs until each of them waits at __syncthreads or has returned, in rounds: every
// ready lane until it meets others; once all are at one operation they go on. Ends the program where they are not.
EMU_QUIET static void emu_warp(int first, int end) {
    emu.first = first;
    emu.lanes = end - first;
    for (;;) {
        emu.alike = 0;
        emu.left = emu.lanes;
        emu.turn = emu_order(emu.lanes, &emu.step);
        EmuThread *t = emu_next();
        if (t) emu_enter(t);
        for (int i = first; i < end && emu.alike < 32; i++)
            if (emu_state[i] == EMU_WARP)
                emu_die("line %d: lane %d waits for its warp, of which others are elsewhere, or gone", emu_threads[i].line,
                        i - first);
        if (!emu.alike) return;
        memcpy(emu_brought[first / 32], &emu_in[first], sizeof emu_brought[0]);
        memset(&emu_state[first], EMU_READY, 32);
        emu_meetings[first / 32]++;
    }
}

enum { EMU_CANARY = 0x5a };           // lies behind dynamic shared memory

// Runs block emu.bid to its end: warp by warp, in the order of the seed, from one __syncthreads to the next. Ends the
// program if threads miss a barrier, meet on different lines, or write behind dynamic shared memory.
EMU_QUIET static void emu_block(void) {
    if (__start_emu_shared) memset(__start_emu_shared, 0xff, __stop_emu_shared - __start_emu_shared);
    // A block's dynamic memory begins where 128 divides the address, so up to 127 bytes lie between its end
    // and the guard page.
    size_t room = (emu.dyn_bytes + 127) & ~(size_t)127;
    emu.dyn = emu.dyn_end - room;
    memset(emu.dyn, 0xff, emu.dyn_bytes);
    memset(emu.dyn + emu.dyn_bytes, EMU_CANARY, room - emu.dyn_bytes);
    emu_forget_shared();
    for (int i = 0; i < emu.n; i++) {
        EmuThread *t = &emu_threads[i];
        unsigned x = emu.block.x, y = emu.block.y;
        t->tid = dim3(i % x, i / x % y, i / (x * y));
        emu_state[i] = EMU_READY;
        t->lane = i & 31;
        t->waited = !emu.early;
        emu_copies[i].group = 0;
        if (!t->made) emu_make(t);
    }
    for (;;) {
        int warps = (emu.n + 31) / 32, step, w = emu_order(warps, &step), done = 0, line = 0;
        emu_barriers++;
        for (int k = 0; k < warps; k++, w = (w + step + warps) % warps)
            emu_warp(32 * w, 32 * w + 32 < emu.n ? 32 * w + 32 : emu.n);
        for (int i = 0; i < emu.n; i++) {
            if (emu_state[i] == EMU_DONE) {
                done++;
                continue;
            }
            if (line && emu_threads[i].line != line)
                emu_die("divergent barrier: a thread waits on line %d, thread %d on line %d", line, i, emu_threads[i].line);
            line = emu_threads[i].line;
            emu_state[i] = EMU_READY;
        }
        if (done == emu.n) break;
        if (done) emu_die("line %d: %d of %d threads returned before __syncthreads", line, done, emu.n);
    }
    for (size_t i = emu.dyn_bytes; i < room; i++)
        if (emu.dyn[i] != EMU_CANARY)
            emu_die("shared memory written at byte %zu of %zu", i, emu.dyn_bytes);
}

// ------------------------------------------------------------------------ device memory
// The live allocation that p lies in, or just behind; -1: none.
static int emu_find(const void *p) {
    int i = emu_below(p);
    return i >= 0 && emu.mem.at[i].live && (char *)p <= emu.mem.at[i].p + emu.mem.at[i].bytes ? i : -1;
}

// An access to memory that may not be touched: says which, and ends the program.
static void emu_fault(int, siginfo_t *si, void *) {
    char *a = (char *)si->si_addr;
    if (!emu.arena || a < emu.arena || a >= emu.arena + EMU_ARENA)
        fprintf(stderr, "cuda_emu: %s: fault at %p\n", emu.kernel ? emu.kernel : "host", (void *)a);
    else if (!emu.kernel)
        fprintf(stderr, "cuda_emu: host code touched device memory\n");
    else {
        const Emu::EmuMem *m = &emu.mem.at[max_int(emu_below(a), 0)];
        fprintf(stderr, "cuda_emu: %s: block %u,%u,%u thread %u,%u,%u: offset %td of a %s allocation of %zu bytes\n",
                emu.kernel, emu.bid.x, emu.bid.y, emu.bid.z, emu.cur->tid.x, emu.cur->tid.y, emu.cur->tid.z, a - m->p,
                m->live ? "live" : "freed", m->bytes);
    }
    _exit(139);
}

// ---- who may read it
// Device memory is readable only while a kernel or a copy runs. A key of the processor (pkeys(7)) opens and closes all
// of it at once. Where there is none every allocation is opened and closed, which is half of the time of a small test;
// so other seeds than 0 leave them open there: the host's mistakes do not depend on the order of threads.
static int emu_key = -1;              // -1: there is none

#ifdef PKEY_DISABLE_ACCESS
static void emu_key_make(void) { emu_key = pkey_alloc(0, 0); }
static int emu_key_give(char *p, size_t n, int prot) { return pkey_mprotect(p, n, prot, prot == PROT_NONE ? 0 : emu_key); }
static void emu_key_turn(int open) { pkey_set(emu_key, open ? 0 : PKEY_DISABLE_ACCESS); }
#else
static void emu_key_make(void) {}
static int emu_key_give(char *, size_t, int) { return 0; }
static void emu_key_turn(int) {}
#endif

// Allocation i, whether it is live or not. With a key: it has it while it is live, and the kernel's list of ranges stays
// short because what was freed is like what was never given out.
static void emu_protect(int i, int prot) {
    char *p = (char *)((uintptr_t)emu.mem.at[i].p & ~(EMU_PAGE - 1));
    size_t n = emu.mem.at[i].span;
    if (emu_key >= 0 ? emu_key_give(p, n, prot) : mprotect(p, n, prot)) emu_die("mprotect: out of ranges of memory");
}

// While this lives, a copy may touch allocation i (-1: none).
struct EmuOpen {
    int i;
    EmuOpen(int i) : i(i) { turn(PROT_READ | PROT_WRITE); }
    ~EmuOpen() { turn(PROT_NONE); }
    void turn(int prot) {
        if (i < 0 || emu.open) return;
        if (emu_key >= 0) emu_key_turn(prot != PROT_NONE);
        else emu_protect(i, prot);
    }
};

// All live allocations, for a kernel.
static void emu_open(int prot) {
    if (prot == PROT_NONE && emu.seed && emu_key < 0) return;
    if (emu.open == (prot != PROT_NONE)) return;
    emu.open = prot != PROT_NONE;
    if (emu_key >= 0) emu_key_turn(emu.open);
    for (int i = 0; i < emu.mem.n && emu_key < 0; i++)
        if (emu.mem.at[i].live) emu_protect(i, prot);
}

// Tests: another order of threads and blocks.
extern "C" void emu_set_seed(int seed) {
    emu.seed = seed;
    emu.rng = (uint64_t)seed;
    if (emu.arena) emu_open(PROT_NONE);
}

// The device: its addresses, the room of dynamic shared memory and 1024 stacks, with a page that
// nobody may touch where each of them runs over; faults go to emu_fault.
static void emu_init(void) {
    emu.arena = (char *)mmap(NULL, EMU_ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t dyn = (EMU_DYN + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE;
    emu.dyn_end = (char *)mmap(NULL, dyn + EMU_PAGE, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + dyn;
    mprotect(emu.dyn_end, EMU_PAGE, PROT_NONE);
    emu_key_make();
    emu_log_open();
    char *stacks = (char *)mmap(NULL, 1024 * EMU_STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < 1024; i++) {
        char *s = stacks + i * EMU_STACK;
        mprotect(s, EMU_PAGE, PROT_NONE);
        emu_threads[i].stack = s + EMU_STACK - i % 32 * 512;      // so that caches hold the ends of all
    }
    static char alt[16384];           // a stack for emu_fault: the thread's own may have run over
    stack_t st = {};
    st.ss_sp = alt;
    st.ss_size = sizeof alt;
    sigaltstack(&st, NULL);
    struct sigaction sa = {};
    sa.sa_sigaction = emu_fault;
    sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &sa, NULL);
}

// ---- errors
// Every call of the runtime comes by here. The last error stays until somebody asks for it, as on a real
// device, so one that was looked over is found by the next launch. Tests choose a call that fails.

static struct {
    long calls;                       // since emu_fail_at
    long at;                          // the one that fails; 0: none
    int all;                          // 1: so do those behind it
    cudaError_t last;
} emu_fails;

// Tests: the n-th call from now on fails (0: none), and those behind it when `all`.
extern "C" void emu_fail_at(long n, int all) { emu_fails = { 0, n, all, cudaSuccess }; }

// Tests: calls since emu_fail_at.
extern "C" long emu_calls(void) { return emu_fails.calls; }

// e, which becomes the last error.
static cudaError_t emu_error(cudaError_t e) { return emu_fails.last = e; }

// Counts a call. Returns e if it was chosen to fail, else cudaSuccess.
static cudaError_t emu_call(cudaError_t e) {
    long n = ++emu_fails.calls;
    int fails = n == emu_fails.at || (emu_fails.all && emu_fails.at && n > emu_fails.at);
    return fails ? emu_error(e) : cudaSuccess;
}

// One host thread at a time makes calls of the runtime.
static pthread_mutex_t emu_mutex = PTHREAD_MUTEX_INITIALIZER;
struct EmuLock {
    EmuLock() { pthread_mutex_lock(&emu_mutex); }
    ~EmuLock() { pthread_mutex_unlock(&emu_mutex); }
};

// Begins a call of the runtime, which returns e if it was chosen to fail.
#define EMU_CALL(e) \
    EmuLock lock_; \
    cudaError_t call_ = emu_call(e); \
    if (call_ != cudaSuccess) return call_

// A call that does no more than f, which never fails by itself.
template <class F> static cudaError_t emu_does(F f) {
    EMU_CALL(cudaErrorUnknown);
    f();
    return cudaSuccess;
}

// ---- allocations
static size_t emu_memory = EMU_ARENA;                   // what the device says it has

// An allocation, filled with 0xff, whose end is the guard page behind it (to 16 bytes). pool: the bytes come
// out of what the pool keeps, as far as that goes. Fails with cudaErrorMemoryAllocation.
static cudaError_t emu_malloc(void **out, size_t bytes, int pool) {
    size_t kept = pool ? min_size(bytes, emu.pooled) : 0;
    if (!emu.arena) emu_init();
    size_t span = (bytes + EMU_PAGE - 1) / EMU_PAGE * EMU_PAGE + (bytes ? 0 : EMU_PAGE);
    if (emu.used + span + EMU_PAGE > EMU_ARENA) return cudaErrorMemoryAllocation;
    char *base = emu.arena + emu.used;
    if (emu.live + emu.pooled - kept + bytes > emu_memory) return emu_error(cudaErrorMemoryAllocation);
    emu.used += span + EMU_PAGE;
    emu.live += bytes;
    emu.pooled -= kept;
    if (emu.live > emu.peak) emu.peak = emu.live;
    *out = base + ((span - bytes) & ~(size_t)15);
    emu.mem.add({ (char *)*out, bytes, span, 1, pool });
    emu_protect(emu.mem.n - 1, PROT_READ | PROT_WRITE);
    EmuOpen open(emu.mem.n - 1);
    memset(base, 0xff, span);
    return cudaSuccess;
}

// ---- counts
static struct {
    const char *name;
    long n;
} emu_counts[256];                    // launches of each place in the source; captures and graphs launched

static void emu_count_one(const char *name) {
    int i = 0;
    while (i < 255 && emu_counts[i].name && emu_counts[i].name != name) i++;
    emu_counts[i].name = name;
    emu_counts[i].n++;
}

// Tests: launches of kernels, or calls, whose name has this part; NULL: forget all.
extern "C" long emu_count(const char *part) {
    long n = 0;
    for (int i = 0; i < 256 && emu_counts[i].name; i++) {
        if (!part) emu_counts[i].n = 0;
        else if (strstr(emu_counts[i].name, part)) n += emu_counts[i].n;
    }
    return n;
}

// ------------------------------------------------------------------------ the stream
// What may wait does. An operation is a function with its arguments; kernels and copies of ordinary host
// memory run at once, after whatever waits; copies of pinned memory wait until somebody synchronises. A
// capture writes operations down instead.

struct EmuOp {
    void (*run)(void *);              // with arg, which is malloc's
    void *arg;
};
typedef EmuList<EmuOp> EmuOps;
static EmuOps emu_waiting;
static long emu_done, emu_queued;                       // waiting operations run, and ever put there
static EmuOps *emu_capture;                             // not NULL: operations go here

// Tests: 1: captures are refused, 2: early launches in them.
extern "C" { int emu_no_graphs; }

static int emu_copy_ahead;                              // 1: what was captured last is a copy

typedef EmuOps *cudaGraph_t, *cudaGraphExec_t;
typedef long *cudaEvent_t;                              // emu_queued when it was recorded
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeRelaxed
};

// Puts f at the end of the list.
template <class F> static void emu_push(EmuOps *list, F f) {
    F *copy = (F *)malloc(sizeof f);
    memcpy((void *)copy, (void *)&f, sizeof f);
    list->add({ [](void *p) { (*(F *)p)(); }, copy });
}

// Forgets the operations of a list.
static void emu_drop(EmuOps *list) {
    for (int i = 0; i < list->n; i++) free(list->at[i].arg);
    free(list->at);
    *list = {};
}

// Runs waiting operations, up to the until-th ever queued.
static void emu_flush(long until) {
    int n = 0;
    while (n < emu_waiting.n && emu_done < until) {
        emu_waiting.at[n].run(emu_waiting.at[n].arg);
        free(emu_waiting.at[n++].arg);
        emu_done++;
    }
    memmove(emu_waiting.at, emu_waiting.at + n, (size_t)(emu_waiting.n -= n) * sizeof(EmuOp));
}

// Before a call that waits for the device, or works beside the stream: all that waits runs. Ends the program
// while a graph is captured.
static void emu_settle(const char *what) {
    if (emu_capture) emu_die("%s while a graph is captured", what);
    emu_flush(emu_queued);
}

// f is captured, waits, or runs.
template <class F> static void emu_do(int may_wait, F f) {
    if (emu_capture) emu_push(emu_capture, f);
    else if (may_wait) {
        emu_push(&emu_waiting, f);
        emu_queued++;
    } else {
        emu_flush(emu_queued);
        f();
    }
}

// ---- pinned memory
static struct {
    char *p;                          // NULL: a free entry
    size_t n;
} emu_pinned[64];

// The entry of `is` (NULL: a free one) becomes p (n) -> found.
static int emu_pin(const void *p, const void *is, size_t n) {
    for (int i = 0; i < 64; i++)
        if (emu_pinned[i].p == is) {
            emu_pinned[i].p = (char *)p;
            emu_pinned[i].n = n;
            return 1;
        }
    return 0;
}

static int emu_is_pinned(const void *p) {
    for (int i = 0; i < 64; i++)
        if (emu_pinned[i].p && (char *)p >= emu_pinned[i].p && (char *)p < emu_pinned[i].p + emu_pinned[i].n)
            return 1;
    return 0;
}

// ------------------------------------------------------------------------ the runtime: memory and copies
// The calls of this part and the next do what NVIDIA's manual says of them, as far as kvcomp.cu needs it.
// They fail when a test wants them to, and where their comment says so.

// Fails with cudaErrorMemoryAllocation.
template <class T> static cudaError_t cudaMalloc(T **out, size_t bytes) {
    EMU_CALL(cudaErrorMemoryAllocation);
    emu_settle("cudaMalloc");
    return emu_malloc((void **)out, bytes, 0);
}

// Frees p, NULL or what emu_malloc returned with the same `pool`; else ends the program.
static cudaError_t emu_free(void *p, int pool) {
    EMU_CALL(cudaErrorUnknown);
    emu_settle("cudaFree");
    if (!p) return cudaSuccess;
    int i = emu_find(p);
    if (i < 0 || emu.mem.at[i].p != (char *)p) emu_die("cudaFree of a pointer cudaMalloc never returned");
    if (pool != emu.mem.at[i].pool)
        emu_die("memory of %s the pool is freed as if it were not", pool ? "outside" : "inside");
    if (pool) emu.pooled += emu.mem.at[i].bytes;
    emu.mem.at[i].live = 0;              // stays unreadable: use after free faults
    emu.live -= emu.mem.at[i].bytes;
    emu_protect(i, PROT_NONE);
    madvise((char *)((uintptr_t)p & ~(EMU_PAGE - 1)), emu.mem.at[i].span, MADV_DONTNEED);
    emu_log_forget((char *)p, emu.mem.at[i].bytes);
    return cudaSuccess;
}

static cudaError_t cudaFree(void *p) { return emu_free(p, 0); }

// The pool keeps what was freed until somebody trims it, or a synchronisation finds more than its threshold.
// Fails with cudaErrorMemoryAllocation.
template <class T> static cudaError_t cudaMallocAsync(T **out, size_t bytes, cudaStream_t) {
    EMU_CALL(cudaErrorMemoryAllocation);
    emu_settle("cudaMallocAsync");
    return emu_malloc((void **)out, bytes, 1);
}

static inline cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return emu_free(p, 1); }

// The allocation in which all of p (bytes) lies. Ends the program if none does.
static int emu_range(const void *p, size_t bytes, const char *what) {
    int i = emu_find(p);
    if (i < 0) emu_die("%s is not device memory", what);
    if ((char *)p + bytes > emu.mem.at[i].p + emu.mem.at[i].bytes)
        emu_die("%s runs %td bytes past its allocation", what,
                (char *)p + bytes - emu.mem.at[i].p - emu.mem.at[i].bytes);
    return i;
}

// Ends the program if p is device memory.
static void emu_host(const void *p, const char *what) {
    if (emu.arena && (char *)p >= emu.arena && (char *)p < emu.arena + EMU_ARENA)
        emu_die("%s is device memory", what);
}

// Copies n bytes. Ends the program if a side is not what k says, runs past its memory, or meets the other.
static void emu_copy(void *d, const void *s, size_t n, cudaMemcpyKind k) {
    int id = -1, is = -1;             // the allocations of both sides
    int to_dev = k == cudaMemcpyHostToDevice || k == cudaMemcpyDeviceToDevice,
        from_dev = k == cudaMemcpyDeviceToHost || k == cudaMemcpyDeviceToDevice;
    if (to_dev) id = emu_range(d, n, "cudaMemcpy destination");
    else emu_host(d, "cudaMemcpy destination");
    if (from_dev) is = emu_range(s, n, "cudaMemcpy source");
    else emu_host(s, "cudaMemcpy source");
    if (to_dev && from_dev && (char *)d < (char *)s + n && (char *)s < (char *)d + n)
        emu_die("cudaMemcpy: the ranges overlap");
    EmuOpen to(id), from(is);
    memcpy(d, s, n);
}

// Ends the program if ordinary host memory is copied while a graph is captured.
static inline cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k,
                                          cudaStream_t = 0) {
    EMU_CALL(cudaErrorUnknown);
    int pinned = (k == cudaMemcpyHostToDevice && emu_is_pinned(s))
              || (k == cudaMemcpyDeviceToHost && emu_is_pinned(d));
    if (emu_capture && !pinned && k != cudaMemcpyDeviceToDevice)
        emu_die("a copy of ordinary host memory while a graph is captured");
    emu_copy_ahead = 1;
    emu_do(pinned || (EMU_HARD && k == cudaMemcpyHostToDevice), [=] { emu_copy(d, s, n, k); });
    return cudaSuccess;
}

static inline cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t = 0) {
    EMU_CALL(cudaErrorUnknown);
    emu_do(0, [=] {
        EmuOpen to(emu_range(d, n, "cudaMemset"));
        memset(d, v, n);
    });
    return cudaSuccess;
}

// Fails with cudaErrorMemoryAllocation, also when 64 ranges are pinned.
template <class T> static inline cudaError_t cudaMallocHost(T **p, size_t n) {
    EMU_CALL(cudaErrorMemoryAllocation);
    *p = (T *)malloc(n ? n : 1);
    if (*p && emu_pin(*p, NULL, n)) return cudaSuccess;
    free(*p);
    return emu_error(cudaErrorMemoryAllocation);
}

// Ends the program if p is no such memory.
static inline cudaError_t cudaFreeHost(void *p) {
    EMU_CALL(cudaErrorUnknown);
    emu_settle("cudaFreeHost");
    if (!emu_pin(NULL, p, 0)) emu_die("cudaFreeHost of memory that is not pinned");
    free(p);
    return cudaSuccess;
}

// ------------------------------------------------------------------------ the runtime: the device
static int emu_driver_old, emu_major = 8;

// Tests: a GPU of another compute capability; 1: a driver that is too old.
extern "C" void emu_set_device(int major, int old) {
    emu_major = major;
    emu_driver_old = old;
}

// Fails with cudaErrorInsufficientDriver if a test wants the driver to be too old.
static inline cudaError_t cudaGetDeviceCount(int *n) {
    EMU_CALL(cudaErrorUnknown);
    *n = 1;
    return emu_driver_old ? emu_error(cudaErrorInsufficientDriver) : cudaSuccess;
}

static inline cudaError_t cudaGetDevice(int *d) { return emu_does([=] { *d = 0; }); }

// ---- the pool
typedef int cudaMemPool_t;
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };
static uint64_t emu_threshold;                          // in bytes

static inline cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *m, int) { return emu_does([=] { *m = 1; }); }

static inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *v) {
    return emu_does([=] { emu_threshold = *(uint64_t *)v; });
}

// The pool keeps at most `least` bytes.
static inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t m, size_t least) {
    EMU_CALL(cudaErrorUnknown);
    if (!m) emu_die("cudaMemPoolTrimTo of a pool that nobody asked for");
    emu.pooled = min_size(emu.pooled, least);
    return cudaSuccess;
}

// What a synchronisation does to the pool: its threshold counts what is in use too.
static void emu_pool_release(void) {
    size_t used = 0;
    for (int i = 0; emu.pooled && i < emu.mem.n; i++)
        used += emu.mem.at[i].live && emu.mem.at[i].pool ? emu.mem.at[i].bytes : 0;
    if (used + emu.pooled > emu_threshold) emu.pooled = 0;
}

// Tests: the bytes it keeps.
extern "C" size_t emu_pooled(void) { return emu.pooled; }

// ---- what the device is and has
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};

static inline cudaError_t cudaDeviceGetAttribute(int *x, cudaDeviceAttr a, int) {
    EMU_CALL(cudaErrorUnknown);
    *x = a == cudaDevAttrMultiProcessorCount ? (EMU_HARD ? 16 : 128) : a == cudaDevAttrComputeCapabilityMajor ? emu_major : 0;
    return cudaSuccess;
}

// Tests: the most bytes held since the last call.
extern "C" size_t emu_most_memory(void) {
    size_t n = emu.peak;
    emu.peak = emu.live;
    return n;
}

// Tests: a small device; 0: a big one again.
extern "C" void emu_set_memory(size_t bytes) { emu_memory = bytes ? bytes : EMU_ARENA; }

// What the pool keeps is not free.
static inline cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    EMU_CALL(cudaErrorUnknown);
    size_t held = emu.live + emu.pooled;
    *total = emu_memory;
    *unused = emu_memory > held ? emu_memory - held : 0;
    return cudaSuccess;
}

// ------------------------------------------------------------------------ the runtime: streams and graphs
enum { cudaStreamNonBlocking = 1, cudaEventDefault = 0 };

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    return emu_does([=] { *s = (void *)1; });
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    EMU_CALL(cudaErrorUnknown);
    emu_settle("cudaStreamSynchronize");
    emu.ended = emu.launch;
    emu_pool_release();
    return cudaSuccess;
}

// ---- events
static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    return emu_does([=] { *e = (long *)calloc(1, sizeof **e); });
}

// Ends the program while a graph is captured.
static inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
    EMU_CALL(cudaErrorUnknown);
    if (emu_capture) emu_die("cudaEventRecord while a graph is captured");
    *e = emu_queued;
    return cudaSuccess;
}

// What was queued before e was recorded has run.
static inline cudaError_t cudaEventSynchronize(cudaEvent_t e) { return emu_does([=] { emu_flush(*e); }); }

static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) {
    return emu_does([=] { *ms = 1; });
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t e) { return emu_does([=] { free(e); }); }

// ---- errors, as the program asks for them

// The last error, which is forgotten.
static inline cudaError_t cudaGetLastError(void) {
    cudaError_t e = emu_fails.last;
    emu_fails.last = cudaSuccess;
    return e;
}

static inline const char *cudaGetErrorString(cudaError_t e) {
    if (e == cudaErrorInsufficientDriver)
        return "CUDA driver version is insufficient for CUDA runtime version";
    return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaSuccess ? "no error" : "unknown error";
}

// ---- graphs
// From here on operations are written down. Fails with cudaErrorStreamCaptureUnsupported if a test wants it.
static inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    EMU_CALL(cudaErrorUnknown);
    if (!s) emu_die("the default stream cannot be captured");
    if (emu_no_graphs == 1) return emu_error(cudaErrorStreamCaptureUnsupported);
    emu_count_one("cudaStreamBeginCapture");
    emu_flush(emu_queued);
    emu_capture = (EmuOps *)calloc(1, sizeof *emu_capture);
    return cudaSuccess;
}

static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *g) {
    EmuLock lock;
    *g = emu_capture;
    emu_capture = NULL;
    cudaError_t e = emu_call(cudaErrorUnknown);
    if (e != cudaSuccess) *g = NULL;                    // a capture that failed leaves no graph
    return e;
}

static inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g,
                                                        unsigned long long) {
    EMU_CALL(cudaErrorUnknown);
    emu_count_one("cudaGraphInstantiate");
    *x = (EmuOps *)calloc(1, sizeof **x);
    **x = *g;                                           // the launches move into what can be run
    *g = {};
    return cudaSuccess;
}

struct cudaGraphExecUpdateResultInfo {
    int result;                       // 0: done
};

// A graph that can be run takes over another's launches only if they are the same kernels and copies in the
// same order; else cudaErrorUnknown.
static inline cudaError_t cudaGraphExecUpdate(cudaGraphExec_t x, cudaGraph_t g,
                                              cudaGraphExecUpdateResultInfo *info) {
    EMU_CALL(cudaErrorUnknown);
    info->result = x->n != g->n;
    for (int i = 0; i < x->n && !info->result; i++) info->result = x->at[i].run != g->at[i].run;
    if (info->result) return emu_error(cudaErrorUnknown);
    emu_count_one("cudaGraphExecUpdate");
    emu_drop(x);
    *x = *g;
    *g = {};
    return cudaSuccess;
}

static inline cudaError_t cudaGraphDestroy(cudaGraph_t g) {
    EMU_CALL(cudaErrorUnknown);
    free(g->at);
    free(g);
    return cudaSuccess;
}

static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) {
    EMU_CALL(cudaErrorUnknown);
    emu_settle("cudaGraphExecDestroy");
    emu_drop(x);
    free(x);
    return cudaSuccess;
}

// Ends the program while a graph is captured.
static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t) {
    EMU_CALL(cudaErrorUnknown);
    if (emu_capture) emu_die("cudaGraphLaunch while a graph is captured");
    emu_count_one("cudaGraphLaunch");
    emu_do(1, [=] {
        for (int i = 0; i < x->n; i++) x->at[i].run(x->at[i].arg);
    });
    return cudaSuccess;
}

// ------------------------------------------------------------------------ launches

// The bytes of dynamic shared memory that a kernel was allowed (0: no more than any); set > 0 allows more.
static size_t emu_allowed(void *kernel, size_t set) {
    static struct {
        void *kernel;
        size_t bytes;
    } at[64];
    int i = 0;
    while (i < 63 && at[i].kernel && at[i].kernel != kernel) i++;
    if (set) {
        at[i].kernel = kernel;
        at[i].bytes = set;
    }
    return at[i].kernel == kernel ? at[i].bytes : 0;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

// Fails with cudaErrorInvalidValue, 1, if a block cannot have that much.
template <class... P> static cudaError_t cudaFuncSetAttribute(void (*k)(P...), cudaFuncAttribute, int bytes) {
    EMU_CALL(cudaErrorUnknown);
    if (bytes < 0 || (size_t)bytes > EMU_DYN) return emu_error(1);
    emu_allowed((void *)k, (size_t)bytes);
    return cudaSuccess;
}

// ---- arguments
// A struct must hold no address of the host, and a pointer must not be one.

// Does this process have memory at address a?
static int emu_mapped(uintptr_t a) {
    return msync((void *)(a & ~(uintptr_t)(EMU_PAGE - 1)), 1, MS_ASYNC) == 0;
}

// Ends the program if eight bytes of the argument are an address of the host: of less than 2^47, not a small
// number, and mapped. Padding holds what the stack held, half an address perhaps, and is no part of it.
template <class T> static void emu_arg(T a) {
#if __GNUC__ >= 11 && !defined(__clang__)
    __builtin_clear_padding(&a);
#endif
    for (size_t i = 0; i + 8 <= sizeof a; i += 8) {
        uintptr_t w;
        memcpy(&w, (char *)&a + i, 8);
        int device = (char *)w >= emu.arena && (char *)w < emu.arena + EMU_ARENA;
        if (w >> 47 == 0 && w >> 20 && !device && emu_mapped(w))
            emu_die("a kernel argument, a struct of %zu bytes, holds a host pointer at byte %zu",
                    sizeof a, i);
    }
}

template <class T> static void emu_arg(T *p) {
    if (p && emu_find(p) < 0) emu_die("a kernel argument is a host pointer");
}

// ---- a launch

// Runs all blocks of a kernel, in the order of the seed. early: it starts when all blocks of the one before
// have, and so knows of no more kernels that have ended.
template <class... P, class... A>
static void emu_run(int early, const char *name, dim3 grid, dim3 block, size_t dyn, void (*k)(P...), A... a) {
    emu_count_one(name);
    emu.early = early;
    if (!early) emu.ended = emu.launch;
    emu.kernel = name;
    emu.grid = grid;
    emu.block = block;
    emu.n = block.x * block.y * block.z;
    emu.dyn_bytes = dyn;
    (emu_arg<>(a), ...);
    auto call = [=] { k((P)a...); };
    emu.arg = &call;
    emu.body = [](void *p) { (*(decltype(call) *)p)(); };
    emu_open(PROT_READ | PROT_WRITE);
    emu.launch++;
    size_t n = (size_t)grid.x * grid.y * grid.z;
    for (size_t b = 0; b < n; b++) {
        size_t i = emu.seed == 0 ? b : emu.seed == 1 ? n - 1 - b : (b + emu.seed * 7919ull) % n;
        emu.bid = dim3(i % grid.x, i / grid.x % grid.y, i / ((size_t)grid.x * grid.y));
        emu.n_block = (uint32_t)i + 1;
        emu_block();
    }
    emu_open(PROT_NONE);
    emu.kernel = NULL;
}

// Launches kernel k. Ends the program if a device could not, or if it is to start early behind a copy in a
// graph. The errors of the runtime are left for cudaGetLastError.
template <class... P, class... A>
static void emu_launch(int early, const char *name, dim3 grid, dim3 block, size_t dyn, void (*k)(P...),
                          A... a) {
    EmuLock lock;
    if (emu_call(cudaErrorUnknown) != cudaSuccess) return;        // KV_LAUNCH asks for the error
    int threads = block.x * block.y * block.z;
    if (threads < 1 || threads > 1024) emu_die("%s: a block of %d threads", name, threads);
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535)
        emu_die("%s: grid %u,%u,%u", name, grid.x, grid.y, grid.z);
    if (dyn > 48 * 1024 && dyn > emu_allowed((void *)k, 0))
        emu_die("%s: %zu bytes of dynamic shared memory, not asked for by cudaFuncSetAttribute", name, dyn);
    if (!emu.arena) emu_init();
    if (early && emu_capture && emu_no_graphs == 2) {
        emu_error(cudaErrorStreamCaptureUnsupported);
        return;
    }
    if (early && emu_capture && emu_copy_ahead)
        emu_die("%s starts early, but is captured behind a copy", name);
    emu_copy_ahead = 0;
    emu_do(0, [=] { emu_run(early, name, grid, block, dyn, k, a...); });
}

// What kvcomp.cu says instead of kernel<<<...>>>, and its other words for which nvcc has its own.
#define EMU_LAUNCH(early, k, grid, block, smem, ...) do { \
    emu_launch(early, #k, grid, block, smem, k, __VA_ARGS__); \
    KV_CUDA(cudaGetLastError()); \
} while (0)
#define KV_LAUNCH(...) EMU_LAUNCH(0, __VA_ARGS__)
#define KV_LAUNCH_EARLY(...) EMU_LAUNCH(1, __VA_ARGS__)
#define KV_UNROLL(n)
#define KV_CALL
#define KV_PARAMETER(T) const T &     // as a copy it would be made for each thread
#define KV_DYN_SHARED(T, name) T *name = (T *)emu_dyn()

// ------------------------------------------------------------------------ device functions
// They are named and defined as in NVIDIA's manual.

static inline float emu_expf(float x) { return emu_off((expf)(x), x); }
#define expf(x) emu_expf(x)

static inline float __ldcg(const float *p) { return *p; }
static inline float2 __ldcg(const float2 *p) { return *p; }

// ---- sums and products that are never fused
#if EMU_HARD                          // the compiler must not see that a product goes into a sum
#define EMU_APART(x) asm volatile("" : "+m"(x))
#else
#define EMU_APART(x)
#endif

static inline float __fmul_rn(float a, float b) {
    float x = a * b;
    EMU_APART(x);
    return x;
}

static inline float __fadd_rn(float a, float b) {
    EMU_APART(a);
    EMU_APART(b);
    return a + b;
}

static inline double __dmul_rn(double a, double b) {
    double x = a * b;
    EMU_APART(x);
    return x;
}

static inline double __dadd_rn(double a, double b) {
    EMU_APART(a);
    EMU_APART(b);
    return a + b;
}

// ---- bits
static inline int   __popc(unsigned x) { return __builtin_popcount(x); }

// Byte i of the result is byte which[4i..4i+2] of y:x.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
    uint64_t from = (uint64_t)y << 32 | x;
    unsigned z = 0;
    for (int i = 0; i < 4; i++) z |= (unsigned)(from >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return z;
}

// Bits by..by+31 of high:low.
static inline unsigned __funnelshift_r(unsigned low, unsigned high, int by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}

// The bits in reverse order.
static inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long y = 0;
    for (int i = 0; i < 64; i++) y |= (x >> i & 1) << (63 - i);
    return y;
}

static inline int   __float_as_int(float x) {
    int i;
    memcpy(&i, &x, 4);
    return i;
}

static inline float __int_as_float(int x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}

template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }

// ---- atomics: they return what was there before
static inline int atomicAdd(int *p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

static inline int atomicMax(int *p, int v) {
    int o = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (o < v && !__atomic_compare_exchange_n(p, &o, v, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return o;
}

// ------------------------------------------------------------------------ cuBLAS
// Column-major like the real one, so that leading dimensions are tested, too.

typedef void *cublasHandle_t;
typedef int cublasStatus_t;
enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_EXECUTION_FAILED = 13 };
enum cudaDataType { CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };

// Counts a call. Fails if it was chosen to.
static cublasStatus_t emu_blas(void) {
    return emu_call(cudaErrorUnknown) != cudaSuccess ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

static inline cublasStatus_t cublasCreate(cublasHandle_t *h) {
    *h = (void *)1;
    return emu_blas();
}

static inline cublasStatus_t cublasDestroy(cublasHandle_t) { return emu_blas(); }
static inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return emu_blas(); }

// n vectors of k numbers as floats, to be freed: vector i begins at element i * apart of p.
static float *emu_vectors(const void *p, cudaDataType t, int apart, int n, int k) {
    float *x = (float *)malloc((size_t)n * k * sizeof *x);
    for (size_t i = 0; i < (size_t)n * k; i++) {
        size_t at = i / k * apart + i % k;
        const uint16_t *h = (const uint16_t *)p + at;
        x[i] = t == CUDA_R_32F ? ((const float *)p)[at] : t == CUDA_R_16F ? f16_to_f32(*h) : bf16_to_f32(*h);
    }
    return x;
}

// x y, of k numbers. In the harder modes f32 is summed in four parts, and 16-bit numbers as a tensor core does.
static float emu_dot(const float *x, const float *y, int k, int f32) {
    float sum = 0, four[4] = { 0 };
    double exact[EMU_AT_ONCE];
    for (int p = 0; p < k; p++) {
        int last = p == k - 1 || p % EMU_AT_ONCE == EMU_AT_ONCE - 1;
        if (!EMU_HARD) sum += x[p] * y[p];
        else if (f32) four[p % 4] = fmaf(x[p], y[p], four[p % 4]);
        else exact[p % EMU_AT_ONCE] = (double)x[p] * y[p];
        if (EMU_HARD && !f32 && last) sum = emu_tensor_sum(sum, exact, p % EMU_AT_ONCE + 1);
    }
    return EMU_HARD && f32 ? four[0] + four[1] + four[2] + four[3] : sum;
}

// C (m,n) = alpha A^T B + beta C, column-major, A (k,m), B (k,n): no other is called. Sums in f32 like
// CUBLAS_COMPUTE_32F; C must be f32, and A and B of one type. Ends the program if they are not, or if a matrix does not
// lie in device memory.
static cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t ta, cublasOperation_t tb,
                                   int m, int n, int k, const void *alpha,
                                   const void *A, cudaDataType tA, int lda,
                                   const void *B, cudaDataType tB, int ldb,
                                   const void *beta, void *C, cudaDataType tC, int ldc,
                                   cublasComputeType_t, cublasGemmAlgo_t) {
    EmuLock lock;
    if (emu_blas()) return CUBLAS_STATUS_EXECUTION_FAILED;
    emu_settle("cublasGemmEx");
    emu.ended = emu.launch;
    emu_count_one("cublasGemmEx");
    if (ta != CUBLAS_OP_T || tb != CUBLAS_OP_N || m < 1 || n < 1 || k < 1 || lda < k || ldb < k || ldc < m)
        emu_die("cublasGemmEx: op %d %d m %d n %d k %d lda %d ldb %d ldc %d", ta, tb, m, n, k, lda, ldb, ldc);
    if (tA != tB || tC != CUDA_R_32F)
        emu_die("cublasGemmEx: types %d %d -> %d are not supported", tA, tB, tC);
    size_t bytes = tA == CUDA_R_32F ? 4 : 2;
    EmuOpen a(emu_range(A, bytes * ((size_t)lda * (m - 1) + k), "cublasGemmEx A"));
    EmuOpen b(emu_range(B, bytes * ((size_t)ldb * (n - 1) + k), "cublasGemmEx B"));
    EmuOpen c(emu_range(C, sizeof(float) * ((size_t)ldc * (n - 1) + m), "cublasGemmEx C"));
    if (((uintptr_t)A | (uintptr_t)B | (uintptr_t)C) & 3) emu_die("cublasGemmEx: a matrix is not aligned");
    float *x = emu_vectors(A, tA, lda, m, k), *y = emu_vectors(B, tB, ldb, n, k), be = *(const float *)beta;
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++) {
            float *to = (float *)C + (size_t)j * ldc + i;
            float sum = emu_dot(x + (size_t)i * k, y + (size_t)j * k, k, tA == CUDA_R_32F);
            *to = *(const float *)alpha * sum + (be != 0 ? be * *to : 0);
        }
    free(x);
    free(y);
    return CUBLAS_STATUS_SUCCESS;
}

// ------------------------------------------------------------------------ tests of the emulator itself
struct EmuHolder {
    int n;
    const void *p;                    // a host's, which is a mistake
};

// Tests: runs kernels with a mistake each, so that a test can see it caught; 0, 5 and 6 are right.
extern "C" void emu_provoke(int kind) {
    static int host;
    int *x = NULL, zero[65] = { 0 };
    auto first = [](int *x) { x[1] = x[0]; };
    // Bytes of their own in one word, atomics, and the last block that arrives: fenced, it reads what the others left.
    // Not fenced, it is a mistake.
    auto blocks = [](int *x, int fenced) {
        if (threadIdx.x) return;
        ((char *)(x + 8))[blockIdx.x] = (char)blockIdx.x;
        x[blockIdx.x] = 7;
        __threadfence();
        int last = atomicAdd(x + 32, 1) == (int)gridDim.x - 1;
        if (fenced) __threadfence();
        if (last) x[33] = x[0] + x[gridDim.x - 1];
    };
    // What no kernel writes may be read early.
    auto waits = [](int *x) {
        int old = x[64];
        dependency_wait();
        x[2] = x[1] + old;
    };
    // Reads (way 0), writes (1) or ends (2) too early.
    auto early = [](int *x, int way) {
        int last = way == 0 ? x[1] : 0;
        if (way == 1) x[2] = 1;
        if (way != 2) dependency_wait();
        if (last) x[3] = 1;
    };
    cudaMalloc(&x, sizeof zero);
    cudaMemcpyAsync(x, zero, sizeof zero, cudaMemcpyHostToDevice);
    cudaStreamSynchronize(0);
    if (kind == 0) emu_launch(0, "good", 3, 32, 0, +blocks, x, 1);
    if (kind == 1) emu_launch(0, "neighbours", 2, 32, 0, +[](int *x) { x[threadIdx.x] = (int)blockIdx.x; }, x);
    if (kind == 2) emu_launch(0, "reader", 2, 1, 0, +[](int *x) { x[blockIdx.x && x[0] > 5 ? 64 : 0] = 1; }, x);
    if (kind == 3) emu_launch(0, "shared", 1, 31, 30 * sizeof(int), +[] { ((int *)emu_dyn())[threadIdx.x + 1] = 1; });
    if (kind == 4) emu_launch(0, "holder", 1, 32, 0, +[](EmuHolder) {}, EmuHolder{ 1, &host });
    if (kind == 5) {                  // host memory that changes while its copy is under way
        zero[0] = 1;
        cudaMemcpyAsync(x, zero, sizeof(int), cudaMemcpyHostToDevice, 0);
        zero[0] = 2;
        emu_launch(0, "first", 1, 1, 0, +first, x);
        cudaMemcpyAsync(zero, x, sizeof zero, cudaMemcpyDeviceToHost);
        cudaStreamSynchronize(0);
        fprintf(stderr, "%d read", zero[1]);
    }
    if (kind >= 6 && kind < 10) {
        emu_launch(0, "first", 1, 1, 0, +first, x);
        emu_launch(1, "waits", 1, 1, 0, +waits, x);
        if (kind > 6) emu_launch(1, "early", 1, 1, 0, +early, x, kind - 7);
    }
    if (kind == 10) emu_launch(0, "last", 3, 32, 0, +blocks, x, 0);
    if (kind == 11) {                 // a word of shared memory that nobody has written, and whose value does not count
        emu_launch(0, "unwritten", 1, 1, 8, +[](int *x) { x[0] = 0 * ((volatile int *)emu_dyn())[1]; }, x);
    }
    if (kind == 12) emu_launch(0, "race", 1, 64, 0, +[](int *x) { x[threadIdx.x / 2] = (int)threadIdx.x; }, x);
    cudaFree(x);
}

// Tests: is this the emulator, and was it built with the harder modes?
extern "C" int emulated(void) { return 1; }
extern "C" int emu_is_hard(void) { return EMU_HARD; }
