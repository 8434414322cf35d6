// lib/cuda_kernels.h - what lib/kernels offers the CPU, for kernels: products of one token, the rows that products of
// more read, rows of K and V as they are stored, elements of fewer bits, tiles of attention on tensor cores, dot
// products to the CPU's bit, the largest k of a row, prefix sums.
//
// Like lib/cuda.h, on which it stands, it knows nothing of models or sessions, its functions are static, and it is
// included by one file of CUDA C++. Pointers are device memory unless a comment says otherwise.
#ifndef LIB_CUDA_KERNELS_H
#define LIB_CUDA_KERNELS_H
#include "cuda.h"

// ---- bf16 matrices as f16
// f16 has three more bits than bf16 and a smaller range. A matrix times 2^k, with k such that its
// largest element lies in [2^15,2^16), fits: bf16 has 8 significant bits, so the largest one there
// is 255 2^8 = 65280, f16's is 65504. Below, f16 is exact down to 2^-17: an element in [2^e,2^(e+1))
// is a multiple of 2^(e-7), and f16 holds every multiple of 2^-24. So f16 holds every element that is
// no smaller than 2^-32 of the largest, and moves smaller ones by 2^-40 of the largest at most, where
// an f32 sum loses 2^-24 of itself. Of Gaussian weights with a deviation of 1/50 of the largest one
// among a hundred million is so small. Because of such an element, which no sum can see, "all exact"
// would refuse about every other gate and up of a model of 8 billion. So a matrix stays bf16 only when
// more than one in HALVE_LOSES elements would change, or when one is no number.

enum { HALVE_LOSES = 1024 };

// *top = the bits of the largest magnitude of w (n), atomically, once a block: atomics on one address wait for
// each other. A lane four neighbours of a warp's 128.
static __global__ void largest_kernel(const uint16_t *w, size_t n, int *top) {
    __shared__ float part[32];
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int m = 0;
    for (int j = 0; j < 4; j++)
        if (i + j < n) m = max_int(m, w[i + j] & 0x7fff);
    m = (int)block_fold<1>((float)m, part);                     // 15 bits: f32 holds them
    if (!threadIdx.x) atomicMax(top, m);
}

// *lost += how many of w (n) f16 does not hold exactly when multiplied by factor, a power of two. A
// lane four neighbours of a warp's 128.
static __global__ void lost_kernel(const uint16_t *w, size_t n, float factor, int *lost) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int m = 0, lane = threadIdx.x & 31;
    for (int j = 0; j < 4; j++) {
        float x = i + j < n ? bf16_to_f32(w[i + j]) * factor : 0;
        m += f16_to_f32(f32_to_f16(x)) != x;
    }
    m = lanes_sum<32>(m);
    if (!lane && m) atomicAdd(lost, m);
}

// w (n) from bf16 to f16, times factor, in place. A thread an element.
static __global__ void halve_kernel(uint16_t *w, size_t n, float factor) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) w[i] = f32_to_f16(bf16_to_f32(w[i]) * factor);
}

// w (n) on the device, bf16, becomes f16 in place if that is as good (see above) -> what its numbers
// are to be multiplied by then, or 0: it stays bf16. A product asks for weights before it waits for the
// kernel ahead of it, so they are there when this returns.
static float matrix_halve(uint16_t *w, size_t n) {
    int found[2] = { 0, 0 }, *dev = (int *)device_new(sizeof found);
    upload(dev, found, sizeof found);
    KV_LAUNCH(largest_kernel, blocks(n, 1024), 256, 0, w, n, dev);
    download(found, dev, sizeof found);
    int e = (found[0] >> 7) - 127, k = min_int(15 - e, 100);        // 2^100 and its inverse are f32
    float factor = ldexpf(1, k);
    if (e < 128) KV_LAUNCH(lost_kernel, blocks(n, 1024), 256, 0, w, n, factor, dev + 1);
    download(found, dev, sizeof found);
    device_free(dev);
    if (e == 128 || (size_t)found[1] > n / HALVE_LOSES) return 0;
    KV_LAUNCH(halve_kernel, blocks(n, 256), 256, 0, w, n, factor);
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    return ldexpf(1, -k);
}

// ---- products of one token
// Up to three matrices of one dtype and width that read the same x share a launch. Their rows are
// counted on from one matrix to the next; with GEMV_SWIGLU the rows of gate and up take turns, so
// that both halves of an output meet in one warp.

enum {
    GEMV_ROWS = 4,              // rows of a warp
    GEMV_WARPS = 4,             // warps of a block
    GEMV_AHEAD = 2              // loads of 16 bytes a lane asks for at once for each row
};
enum {
    GEMV_STORE,                 // y = Wx + b
    GEMV_ADD,                   // y += Wx + b
    GEMV_SWIGLU,                // y = silu(W0 x + b0) (W1 x + b1)
    GEMV_HEADS                  // y = Wx + b, for qkv_kernel (section 2)
};

struct GemvPart {               // one matrix of a launch
    const char *w;              // (rows,cols)
    const void *bias;           // (rows); NULL: none
    float *y;                   // (rows)
    float scale;                // W is what is stored times this
    int rows, bias_type;
};
struct Gemv {
    GemvPart part[3];
    const void *norm;           // (cols): x goes in as its RMSNorm with these weights; NULL: as it is
    float eps;
    int norm_type;
    int rows, cols;             // rows: of all parts together
    int split;                  // warps that share the rows of one: 1, 2 or 4
};

// Columns that a warp goes through at once.
KV_HD constexpr int gemv_chunk(int dtype) {
    return GEMV_AHEAD * 32 * (dtype == DT_F32 ? 4 : 8);
}

// Gemv.split. A warp for every GEMV_ROWS of few rows would leave most of the device without loads under
// way: then several warps take turns in the columns.
static int gemv_split(int rows, int cols, int dtype) {
    const int few = 16384;                      // 4096 warps: 32 a multiprocessor where there are 128
    int n = 1;
    while (n < GEMV_WARPS && rows * n < few && cols > n * gemv_chunk(dtype)) n *= 2;
    return n;
}

struct GemvRow {
    int part, row;              // a matrix, and a row of it
};

// Which matrix row r of a launch lies in, and where.
template <int MODE> static __device__ GemvRow gemv_row(const Gemv &a, int r) {
    if (MODE == GEMV_SWIGLU) return { r % 2, r / 2 };
    int i = 0;
    while (r >= a.part[i].rows) r -= a.part[i++].rows;
    return { i, r };
}

// x (N), in registers, = numbers i..i+N-1 of an array of dtype, N 4 or 8. i is a multiple of N.
template <int N> static __device__ void load_numbers(float *x, const void *p, int dtype, size_t i) {
    if (dtype == DT_F32) {
        for (int j = 0; j < N / 4; j++) {
            float4 v = ((const float4 *)p)[i / 4 + j];
            x[4 * j] = v.x;
            x[4 * j + 1] = v.y;
            x[4 * j + 2] = v.z;
            x[4 * j + 3] = v.w;
        }
        return;
    }
    for (int j = 0; j < N / 4; j++) {
        float2 v = ((const float2 *)p)[i / 4 + j];              // four numbers of 16 bits
        unsigned w[2] = { (unsigned)__float_as_int(v.x), (unsigned)__float_as_int(v.y) };
        for (int e = 0; e < 4; e++) {
            uint16_t h = (uint16_t)(w[e / 2] >> e % 2 * 16);
            x[4 * j + e] = dtype == DT_F16 ? half_get<DT_F16>(h) : half_get<DT_BF16>(h);
        }
    }
}

// sum + the product of the 16 bytes u of W, which are 4 or 8 numbers, with the numbers x beside them.
template <int DT> static __device__ float dot16(float sum, const unsigned u[4], const float *x) {
    for (int i = 0; i < 4; i++) {
        if (DT == DT_F32) {
            sum += __int_as_float((int)u[i]) * x[i];
            continue;
        }
        sum += half_get<DT>((uint16_t)u[i]) * x[2 * i];
        sum += half_get<DT>((uint16_t)(u[i] >> 16)) * x[2 * i + 1];
    }
    return sum;
}

// Asks for the lane's bytes of GEMV_ROWS rows: 16 from column c on, and as many 32 lanes further on.
template <int DT>
static __device__ void gemv_load(unsigned (*u)[GEMV_ROWS][4], const char *const *w, int c, int cols) {
    for (int k = 0; k < GEMV_AHEAD; k++, c += 32 * Stored<DT>::WIDE)
        for (int j = 0; j < GEMV_ROWS; j++)
            if (c < cols) load_once(u[k][j], w[j] + (size_t)c * Stored<DT>::BYTES);
}

// sum (GEMV_ROWS) += what gemv_load has brought times x. With a norm x is multiplied by its weights
// first, and the squares of x are added to *ss.
template <int DT, int MODE>
static __device__ void gemv_dot(float *sum, float *ss, const unsigned (*u)[GEMV_ROWS][4], const Gemv &a,
                                const float *x, int c) {
    const int WIDE = Stored<DT>::WIDE;
    for (int k = 0; k < GEMV_AHEAD; k++, c += 32 * WIDE) {
        if (c >= a.cols) continue;
        float f[WIDE], w[WIDE];
        load_numbers<WIDE>(f, x, DT_F32, c);
        if (MODE != GEMV_ADD && a.norm) {
            load_numbers<WIDE>(w, a.norm, a.norm_type, c);
            for (int i = 0; i < WIDE; i++) {
                *ss += f[i] * f[i];
                f[i] *= w[i];
            }
        }
        for (int j = 0; j < GEMV_ROWS; j++) sum[j] = dot16<DT>(sum[j], u[k][j], f);
    }
}

// gemv_dot for rows that are no multiple of 16 bytes long, number by number: the columns c, c + step, ..
template <int DT, int MODE>
static __device__ void gemv_narrow(float *sum, float *ss, const char *const *w, const Gemv &a,
                                   const float *x, int c, int step) {
    for (; c < a.cols; c += step) {
        float f = x[c];
        if (MODE != GEMV_ADD && a.norm) {
            *ss += f * f;
            f *= number(a.norm, a.norm_type, c);
        }
        for (int j = 0; j < GEMV_ROWS; j++) sum[j] += number(w[j], DT, c) * f;
    }
}

struct GemvShared {
    float *part;                // (GEMV_WARPS,GEMV_ROWS,33) the sums of all lanes
    float *share;               // (2,GEMV_WARPS,GEMV_ROWS+1) those of each warp, then its sum of squares
};

// Carves the block's shared memory -> bytes.
KV_HD static size_t gemv_carve(GemvShared *m, char *mem) {
    Carved b = { mem, 0 };
    m->part = carve<float>(&b, GEMV_WARPS * GEMV_ROWS * 33);
    m->share = carve<float>(&b, 2 * GEMV_WARPS * (GEMV_ROWS + 1));
    return b.at;
}

// Rows that a block goes through at once.
KV_HD static int gemv_group(const Gemv &a) { return GEMV_WARPS * GEMV_ROWS / a.split; }

struct GemvSpan {               // rows [r0,r1), whole groups of them
    int r0, r1;
};

// The rows of the block: neighbouring groups, and every block as many, or one less.
static __device__ GemvSpan gemv_span(const Gemv &a) {
    int group = gemv_group(a), groups = (a.rows + group - 1) / group;
    return { (int)((long long)groups * blockIdx.x / gridDim.x) * group,
             (int)((long long)groups * (blockIdx.x + 1) / gridDim.x) * group };
}

// w = where the rows r, r + 1, .. of a warp begin; behind the last it is the last one.
template <int DT, int MODE> static __device__ void gemv_find(const char **w, const Gemv &a, int r) {
    for (int j = 0; j < GEMV_ROWS; j++) {
        GemvRow at = gemv_row<MODE>(a, min_int(r + j, a.rows - 1));
        w[j] = a.part[at.part].w + (size_t)at.row * a.cols * Stored<DT>::BYTES;
    }
}

// The end of rows r, r + 1, ..: the lanes' sums (GEMV_ROWS) and squares become results. turn: 0 and 1 by turns, so that
// a warp may write its share for the next rows while another reads those of these.
template <int MODE>
static __device__ void gemv_finish(const Gemv &a, const GemvShared &m, const float *sum, float ss, int r, int turn) {
    const int S = a.split, WIDTH = GEMV_ROWS + 1;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = lane / 8, e = lane % 8;

    // Lanes 8j..8j+7 add up row r + j.
    float *part = m.part + warp * GEMV_ROWS * 33;
    for (int i = 0; i < GEMV_ROWS; i++) part[i * 33 + lane] = sum[i];
    __syncwarp();
    float y = part[j * 33 + e] + part[j * 33 + e + 8] + part[j * 33 + e + 16] + part[j * 33 + e + 24];
    __syncwarp();               // all have read it before one writes the sums of the next rows there
    y = lanes_sum<8>(y);
    ss = lanes_sum<32>(ss);
    if (S > 1) {
        float *share = m.share + turn * GEMV_WARPS * WIDTH;
        if (!e) share[warp * WIDTH + j] = y;
        if (!lane) share[warp * WIDTH + GEMV_ROWS] = ss;
        __syncthreads();
        const float *of = share + warp / S * S * WIDTH;
        y = ss = 0;
        for (int i = 0; i < S; i++) {
            y += of[i * WIDTH + j];
            ss += of[i * WIDTH + GEMV_ROWS];
        }
    }
    if (MODE != GEMV_ADD && a.norm) y *= 1 / sqrtf(ss / (float)a.cols + a.eps);

    // Bias and result. With GEMV_SWIGLU row r + j is of gate where j is even, and its partner of
    // up is eight lanes on.
    GemvRow at = gemv_row<MODE>(a, min_int(r + j, a.rows - 1));
    const GemvPart &p = a.part[at.part];
    y *= p.scale;
    if (p.bias) y += number(p.bias, p.bias_type, at.row);
    float up = __shfl_xor_sync(ALL_LANES, y, 8);
    if (e || warp % S || r + j >= a.rows) return;
    if (MODE == GEMV_STORE || MODE == GEMV_HEADS) p.y[at.row] = y;
    if (MODE == GEMV_ADD) p.y[at.row] += y;
    if (MODE == GEMV_SWIGLU && !at.part) a.part[0].y[at.row] = y / (1 + expf(-y)) * up;
}

// y = W x for one token, with RMSNorm before and bias, residual or SwiGLU behind in the same launch
// (MODE); W (rows,cols) as stored, x (cols) f32. The norm needs no pass of its own: its factor is the
// same for all columns, so it is applied after the sum,
//
//     sum over i of W[r][i] (x[i] w[i] / rms) = (sum over i of W[r][i] (x[i] w[i])) / rms
//
// and rms is a sum over the x that go by.
//   Block   its share of the rows (gemv_span), 16 / S neighbouring ones at a time, S = Gemv.split. There are as many
//           blocks as fit on the device, and loads do not stop between a row and the next, as they would with a block
//           for every 16 / S rows
//   Warp    GEMV_ROWS rows, of which S warps take turns in the columns, GEMV_AHEAD * 32 loads at a time
//   Lane    16 bytes of each of its warp's rows, then the 16 bytes 32 lanes further on, and so forth:
//
//             row r0    | lane 0 | lane 1 | .. | lane 31 | lane 0 | ..        every | | is 16 bytes of W
//             row r0+1  | lane 0 | lane 1 | .. | lane 31 | lane 0 | ..
//
//   Shared  GemvShared; 33, so that a column falls into different banks. A warp then works the other way
//           round: eight lanes add up the 32 sums of one row. Then the S warps' sums are added, in
//           their order.
//   Tile    W is read once, by one lane each, and x, which all warps read, comes from the cache.
//           GEMV_ROWS * GEMV_AHEAD = 8 loads of a lane are under way while it works on the 8 before. The
//           first 8 are asked for before the kernel ahead has ended (dependency_wait): weights do not
//           depend on it. No more than these: the last blocks of the kernel ahead would wait for what is asked early
//   Bound   memory: the bytes of W
// Rows that are no multiple of 16 bytes long are read number by number. A row past the end is the
// last row once more, and nobody stores it.
template <int DT, int MODE> static __device__ void gemv_rows(const Gemv &a, const float *x, char *mem) {
    const int S = a.split, WIDE = Stored<DT>::WIDE, CHUNK = gemv_chunk(DT), GROUP = gemv_group(a);
    GemvShared m;
    gemv_carve(&m, mem);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wide = a.cols % WIDE == 0, turn = 0;
    GemvSpan span = gemv_span(a);
    int own = warp / S * GEMV_ROWS, r = span.r0 + own, first = warp % S * CHUNK, c = first;
    const char *w[GEMV_ROWS];
    float sum[GEMV_ROWS] = {}, ss = 0;
    unsigned u[GEMV_AHEAD][GEMV_ROWS][4], next[GEMV_AHEAD][GEMV_ROWS][4];
    gemv_find<DT, MODE>(w, a, r);
    if (wide) gemv_load<DT>(u, w, c + lane * WIDE, a.cols);
    dependents_launch();
    dependency_wait();
    while (r < span.r1) {
        int last = !wide || c + S * CHUNK >= a.cols;
        int r_next = last ? r + GROUP : r, c_next = last ? first : c + S * CHUNK;
        if (!wide) gemv_narrow<DT, MODE>(sum, &ss, w, a, x, warp % S * 32 + lane, S * 32);
        if (last) gemv_find<DT, MODE>(w, a, r_next);
        if (wide && r_next < span.r1) gemv_load<DT>(next, w, c_next + lane * WIDE, a.cols);
        if (wide) gemv_dot<DT, MODE>(sum, &ss, u, a, x, c + lane * WIDE);
        if (last) {
            gemv_finish<MODE>(a, m, sum, ss, r, turn ^= 1);
            for (int j = 0; j < GEMV_ROWS; j++) sum[j] = 0;
            ss = 0;
        }
        r = r_next;
        c = c_next;
        memcpy(u, next, sizeof u);
    }
}

enum { GEMV_BLOCKS = 4 };       // that fit on a multiprocessor

// See gemv_rows.
template <int DT, int MODE>
static __global__ void __launch_bounds__(GEMV_WARPS * 32, GEMV_BLOCKS)
gemv_kernel(KV_PARAMETER(Gemv) a, const float *x) {
    KV_DYN_SHARED(char, mem);
    gemv_rows<DT, MODE>(a, x, mem);
}

// Blocks of a launch.
static int gemv_blocks(const Gemv &a) {
    return min_int(GEMV_BLOCKS * kv_processors, blocks(a.rows, gemv_group(a)));
}

// Launches gemv_kernel for weights of dtype; x is on the device.
template <int MODE> static void gemv_launch(const Gemv &a, int dtype, const float *x) {
    GemvShared m;
    size_t smem = gemv_carve(&m, NULL);
    as_constant<DT_F32, DT_F16, DT_BF16>(dtype, [&](auto DT) {
        KV_LAUNCH_EARLY((gemv_kernel<DT, MODE>), gemv_blocks(a), GEMV_WARPS * 32, smem, a, x);
    });
}

// ---- products of more tokens: the rows they read, and what they leave

enum {
    ROWS_PLAIN,                 // x
    ROWS_NORM,                  // RMSNorm of x
    ROWS_SWIGLU                 // silu(gate) up
};
struct Source {                 // the rows (T,n) that a product reads, and what they are made of
    const float *x;             // (T,n); ROWS_SWIGLU: (T,2n), gate and up of a row
    const float *scale;         // ROWS_SWIGLU: (T) what x is to be multiplied by; NULL: 1
    const void *w[2];           // ROWS_NORM: the norm's weights; ROWS_SWIGLU: biases of gate and up, or NULL
    int type[2];                // their dtypes
    int kind, n;
};

// Element i of a row. x: what the source has there, of gate and up x and up; by: what the row is multiplied by.
template <int KIND> static __device__ float source_value(const Source &a, float x, float up, float by, int i) {
    if (KIND == ROWS_PLAIN) return x;
    if (KIND == ROWS_NORM) return x * by * number(a.w[0], a.type[0], i);
    float gate = x * by;
    up *= by;
    if (a.w[0]) gate += number(a.w[0], a.type[0], i);
    if (a.w[1]) up += number(a.w[1], a.type[1], i);
    return gate / (1 + expf(-gate)) * up;
}

// Four neighbours of a row at once, or n, the last ones of a row whose length is no multiple of 4. wide: it is one,
// and so all of its fours are aligned to 16 bytes.
static __device__ void four_get(float v[4], const float *p, int n, int wide) {
    if (wide) {
        float4 all = *(const float4 *)p;
        v[0] = all.x;
        v[1] = all.y;
        v[2] = all.z;
        v[3] = all.w;
    } else {
        for (int j = 0; j < 4; j++) v[j] = j < n ? p[j] : 0;
    }
}

// The way back.
static __device__ void four_put(float *p, const float v[4], int n, int wide) {
    if (wide) *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
    for (int j = 0; j < 4 && !wide; j++)
        if (j < n) p[j] = v[j];
}

// The same as 16-bit numbers, times factor.
template <int OUT> static __device__ void four_put_half(uint16_t *p, const float v[4], float factor, int n, int wide) {
    uint16_t h[4];
    for (int j = 0; j < 4; j++) h[j] = half_put<OUT>(v[j] * factor);
    if (wide) *(uint2 *)p = { h[0] | (unsigned)h[1] << 16, h[2] | (unsigned)h[3] << 16 };
    for (int j = 0; j < 4 && !wide; j++)
        if (j < n) p[j] = h[j];
}

// The power of two that brings x >= 0 into [2^14,2^15), where f16 ends just below 2^16. At most 2^100, and 1
// for what is no number.
static __device__ float power_below(float x) {
    int e = __float_as_int(x) >> 23;                            // the exponent + 127
    return e == 255 ? 1 : __int_as_float((min_int(127 + 14 - (e - 127), 227)) << 23);
}

// Bytes of shared memory that any GPU has for a block (sm_120 has 99 KB).
enum { ROWS_KEPT = 96 * 1024 };

// v (4) = elements i .. i+3 of the row x of a.
template <int KIND> static __device__ void source_four(float v[4], const Source &a, const float *x, float by, int i) {
    int n = a.n - i, wide = a.n % 4 == 0;
    float up[4] = {};
    four_get(v, x + i, n, wide);
    if (KIND == ROWS_SWIGLU) four_get(up, x + a.n + i, n, wide);
    for (int j = 0; j < 4; j++)
        if (j < n) v[j] = source_value<KIND>(a, v[j], up[j], by, i + j);
}

// The rows that a product reads, as f32 (OUT DT_F32), or as 16-bit numbers with a power of two for each
// row.
//   Block   one row t; 1, 8 or 16 warps
//   Lane    every blockDim-th four elements; in the sum of squares every blockDim-th element
//   Shared  part (2,32): what block_fold wants, twice; with keep kept (n): the row, so that it is read once
//   Bound   memory; without keep a second and third time, from the cache or not
template <int KIND, int OUT> static __global__ void rows_kernel(void *y, float *scale, Source a, float eps, int keep) {
    __shared__ float part[2][32];
    KV_DYN_SHARED(float, kept);
    size_t t = blockIdx.x;
    int n = a.n, step = blockDim.x, wide = n % 4 == 0;
    const float *x = a.x + t * n * (KIND == ROWS_SWIGLU ? 2 : 1);
    [[maybe_unused]] float by = 1, top = 0;
    float v[4];
    if (KIND == ROWS_NORM) {
        float ss = 0;
        KV_UNROLL(4) for (int i = threadIdx.x; i < n; i += step) {
            float e = x[i];
            if (keep) kept[i] = e;
            ss += e * e;
        }
        if (keep) x = kept;
        by = 1 / sqrtf(block_fold<0>(ss, part[0]) / (float)n + eps);
    }
    if (KIND == ROWS_SWIGLU && a.scale) by = a.scale[t];
    for (int i = threadIdx.x * 4; i < n; i += step * 4) {
        source_four<KIND>(v, a, x, by, i);
        if (OUT == DT_F32) four_put((float *)y + t * n + i, v, n - i, wide);
        else if (keep) four_put(kept + i, v, n - i, wide);
        for (int j = 0; j < 4; j++)
            if (i + j < n) top = fmaxf(top, fabsf(v[j]));
    }
    if constexpr (OUT != DT_F32) {
        float factor = power_below(block_fold<1>(top, part[1]));
        for (int i = threadIdx.x * 4; i < n; i += step * 4) {
            if (keep) four_get(v, kept + i, n - i, wide);
            else source_four<KIND>(v, a, x, by, i);
            four_put_half<OUT>((uint16_t *)y + t * n + i, v, factor, n - i, wide);
        }
        if (!threadIdx.x) scale[t] = 1 / factor;
    }
}

// y = x rounded to f16 or bf16 or, with rest 1, what that rounding leaves over, rounded. A thread
// an element.
static __global__ void round_kernel(uint16_t *y, const float *x, int dtype, int rest, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i];
    if (rest) a -= dtype == DT_F16 ? f16_to_f32(f32_to_f16(a)) : bf16_to_f32(f32_to_bf16(a));
    y[i] = dtype == DT_F16 ? f32_to_f16(a) : f32_to_bf16(a);
}

struct Product {                // what a product leaves: y (T,cols), to be multiplied by scale (T)
    float *y;
    const float *scale;         // NULL: 1
    int T, cols;
};

// y (T,cols) *= scale[t], the columns of one matrix in rows `stride` apart. Grid: rows, columns / 256.
static __global__ void scale_kernel(float *y, const float *scale, int stride, int cols) {
    int t = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < cols) y[(size_t)t * stride + i] *= scale[t];
}

// y (T,cols) += m scale + bias. Grid: rows, columns / 1024; a thread four elements.
static __global__ void finish_kernel(float *y, Product m, const void *bias, int type) {
    size_t t = blockIdx.x;
    int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4, n = m.cols - i, wide = m.cols % 4 == 0;
    if (n <= 0) return;
    float x[4], sum[4], scale = m.scale ? m.scale[t] : 1;
    four_get(x, m.y + t * m.cols + i, n, wide);
    four_get(sum, y + t * m.cols + i, n, wide);
    for (int j = 0; j < 4; j++) {
        x[j] *= scale;
        if (bias && j < n) x[j] += number(bias, type, i + j);
        sum[j] += x[j];
    }
    four_put(y + t * m.cols + i, sum, n, wide);
}

// ---- rows of K and V as they are stored (D1 of NOTES.md)
// A q8_0 row is D/32 blocks, rounded up, of 34 bytes: an f16 scale, then 32 signed bytes. A q4 row is as many
// blocks of 18 bytes, which lib/kernels.h describes: an f16 scale, then four planes of bits.

enum {
    ROW_F32 = DT_F32,
    ROW_F16 = DT_F16,
    ROW_BF16 = DT_BF16,
    ROW_Q8,
    ROW_Q4,
    Q8_VALUES = 32,             // values of a block
    Q8_BYTES = Q8_VALUES + 2    // its bytes
};

// Bit j: has i & j an odd number of bits? Row i of the Hadamard matrix is -1 there.
static __device__ uint32_t odd_places(int i) {
    const uint32_t bit[] = { 0xaaaaaaaa, 0xcccccccc, 0xf0f0f0f0, 0xff00ff00, 0xffff0000 };
    uint32_t odd = 0;
    KV_UNROLL()
    for (int b = 0; b < 5; b++) odd ^= i >> b & 1 ? bit[b] : 0;
    return odd;
}

// Element d of a row of q4 (D), d sum_j H[i][j] (2 u_j - 15). A sum over the bits of a plane is a count of those
// with a plus less a count of those with a minus, so no other lane is asked.
static __device__ float row_get_q4(const char *row, int d, int D) {
    int first = d / Q4_BLOCK * Q4_BLOCK, n = min_int(D - first, Q4_BLOCK), m = q4_part(n), words = q4_words(n);
    int i = d - first, sum = i % m ? 0 : -15 * m;
    uint32_t part = 0xffffffff >> (32 - m) << (i - i % m), minus = part & odd_places(i % m) << (i - i % m);
    const uint16_t *block = (const uint16_t *)(row + d / Q4_BLOCK * Q4_BYTES);
    KV_UNROLL()
    for (int b = 0; b < 4; b++) {
        uint32_t plane = block[1 + b * words];
        if (words > 1) plane |= (uint32_t)block[2 + b * words] << 16;
        sum += (__popc(plane & part) - 2 * __popc(plane & minus)) * (2 << b);
    }
    return half_get<DT_F16>(block[0]) * (float)sum;
}

// Element d of a stored row (D).
static __device__ float row_get(const char *row, int kind, int d, int D) {
    if (kind == ROW_Q4) return row_get_q4(row, d, D);
    if (kind != ROW_Q8) return number(row, kind, d);
    const char *b = row + d / Q8_VALUES * Q8_BYTES;
    return half_get<DT_F16>(*(const uint16_t *)b) * (float)((const signed char *)b)[2 + d % Q8_VALUES];
}

// row_put for q8_0: the scale of a block is its largest magnitude / 127, rounded to f16; lane 0 of
// the block stores it. It is a NaN where a number of the block is none, or infinite.
static __device__ void row_put_q8(char *row, int d, int D, float x) {
    float top = lanes_max<32>(d < D ? fabsf(x) : 0);
    int bad = __any_sync(ALL_LANES, d < D && !isfinite(x));
    uint16_t half = f32_to_f16(bad ? NAN : top / 127);
    float scale = f16_to_f32(half), q = scale > 0 ? rintf(x / scale) : 0;
    if (q > 127) q = 127;
    if (q < -127) q = -127;
    char *b = row + d / Q8_VALUES * Q8_BYTES;
    if (d % Q8_VALUES == 0) *(uint16_t *)b = half;
    if (d < D) ((signed char *)b)[2 + d % Q8_VALUES] = (signed char)q;
}

// H x of the numbers x of each m neighbouring lanes, m a power of two.
static __device__ float hadamard_lanes(float x, int m) {
    for (int step = 1; step < m; step *= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = threadIdx.x & step ? other - x : x + other;
    }
    return x;
}

// row_put for q4, as q4_pack_block: a lane has one number of the block, and a ballot is a plane.
static __device__ void row_put_q4(char *row, int d, int D, float x) {
    int lane = d % Q4_BLOCK, n = min_int(D - d + lane, Q4_BLOCK), m = q4_part(n), words = q4_words(n);
    float y = hadamard_lanes(d < D ? x : 0, m), top = lanes_max<32>(fabsf(y));
    int bad = __any_sync(ALL_LANES, !isfinite(y));
    uint16_t half = f32_to_f16(bad ? NAN : top / (float)(15 * m));
    float unit = f16_to_f32(half) * (float)m, u = unit > 0 ? y / unit * .5f + 8 : 8;
    if (u > 15) u = 15;
    if (u < 0) u = 0;
    uint32_t mine = 0;                          // the plane of which this lane stores a word
    KV_UNROLL()
    for (int b = 0; b < 4; b++) {
        uint32_t plane = __ballot_sync(ALL_LANES, d < D && (int)u >> b & 1);
        if (lane / words == b) mine = plane;
    }
    uint16_t *block = (uint16_t *)(row + d / Q4_BLOCK * Q4_BYTES);
    if (!lane) block[0] = half;
    if (lane < 4 * words) block[1 + lane] = (uint16_t)(mine >> lane % words * 16);
}

// Stores x as element d of a row, rounded exactly as its Format rounds on the CPU. All 32 lanes of
// a warp call this together, for 32 neighbouring d, because they are one block of q8_0 or q4. Elements
// from D on are not stored.
static __device__ void row_put(char *row, int kind, int d, int D, float x) {
    if (kind == ROW_Q4) {
        row_put_q4(row, d, D, x);
        return;
    }
    if (kind == ROW_Q8) {
        row_put_q8(row, d, D, x);
        return;
    }
    if (d < D) number_put(row, kind, d, x);
}

// ---- rows of fewer bits become f16 numbers (PATS)
// Element e of a row of elements of W bits is bits e W .. e W + W - 1, low bits first. It becomes an f16 number by
// standing at the upper end of a half:
//
//     w = 10     31      29         19         9        0
//     stream      | e 3.. |   e 2    |   e 1    |   e 0    |
//     to f16      |   e 1    | 000000 |   e 0    | 000000 |
//
// A lane takes 8 elements, W bytes, at a time. Every width has code of its own, in which all shifts and masks but the
// first are constants.

// a = 8 elements of W bits that begin at bit `at` behind `from`, which is shared memory, aligned to 4. `at` is a
// multiple of the largest power of two that divides 8 W.
template <int W> static __device__ void load_stream(unsigned *a, const char *from, int at) {
    const int ALL = 8 * W, EVEN = ALL & -ALL, WORDS = (ALL + 31) / 32;
    const int READ = (ALL + 32 - (EVEN < 32 ? EVEN : 32) + 31) / 32;        // words that may hold a part of it
    unsigned x[WORDS + 1];
    KV_UNROLL() for (int i = 0; i <= WORDS; i++) x[i] = i < READ ? ((const unsigned *)from)[at / 32 + i] : 0;
    KV_UNROLL() for (int i = 0; i < WORDS; i++) a[i] = EVEN >= 32 ? x[i] : __funnelshift_r(x[i], x[i + 1], at % 32);
}

// The stream a, shifted so that element i ends below bit `end` of the result. Other bits are whatever
// stands there. All but a is known to the compiler.
template <int W> static __device__ unsigned element_up_to(const unsigned *a, int i, int end) {
    int first = i * W, last = first + W - 1, low = first + W - end;         // low: comes to bit 0
    if (low < 0) return a[0] << -low;
    int k = low / 32, s = low % 32;
    if (s == 0) return a[k];
    if (last / 32 == k) return a[k] >> s;
    if (first / 32 > k) return a[k + 1] << (32 - s);
    return __funnelshift_r(a[k], a[k + 1], s);
}

// Elements i and i + 1 of a as f16 whose cut bits are 0.
template <int W> static __device__ unsigned two_elements(const unsigned *a, int i) {
    const unsigned KEPT_BITS = 0xffffu << (16 - W) & 0xffffu;
    if (W == 8) return __byte_perm(a[i / 4], 0, i % 4 ? 0x3424 : 0x1404);
    return (element_up_to<W>(a, i, 16) & KEPT_BITS) | (element_up_to<W>(a, i + 1, 32) & KEPT_BITS << 16);
}

// to (D) = the row of elements of W bits at `from`, of which two lanes, half 0 and 1, take every second 8 elements.
template <int W, int D> static __device__ void unpack_width(char *to, const char *from, int half) {
    KV_UNROLL() for (int i = 0; i < D / 16; i++) {
        int c = 2 * i + half;
        unsigned a[(8 * W + 31) / 32];
        load_stream<W>(a, from, c * 8 * W);
        *(uint4 *)(to + 16 * c) = { two_elements<W>(a, 0), two_elements<W>(a, 2), two_elements<W>(a, 4),
                                    two_elements<W>(a, 6) };
    }
}

// The same for a width that is known when the kernel runs.
template <int D> static __device__ void halves_of_elements(char *to, const char *from, int half, int bits) {
    switch (bits) {
    case 6:  unpack_width<6, D>(to, from, half);  break;
    case 7:  unpack_width<7, D>(to, from, half);  break;
    case 8:  unpack_width<8, D>(to, from, half);  break;
    case 9:  unpack_width<9, D>(to, from, half);  break;
    case 10: unpack_width<10, D>(to, from, half); break;
    case 11: unpack_width<11, D>(to, from, half); break;
    case 12: unpack_width<12, D>(to, from, half); break;
    case 13: unpack_width<13, D>(to, from, half); break;
    case 14: unpack_width<14, D>(to, from, half); break;
    case 15: unpack_width<15, D>(to, from, half); break;
    default: unpack_width<16, D>(to, from, half); break;
    }
}

// ---- rows of blocks become f16 integers, whose scales stay apart
// Rows lie in shared memory and begin on 4 bytes; `to` is for D f16 numbers, on 16 bytes. Two lanes, half 0 and 1,
// have a row.

// q8_0: the signed bytes. 128 is added to a byte, which makes it unsigned; 0x6400 is 1024 in f16, whose last bit counts
// 1, so a byte there makes 1152 more than it should be. A lane takes half of each block. The bytes of every second
// block begin on 4.
template <int D> static __device__ void halves_of_q8(char *to, const char *row, int half) {
    const unsigned *from = (const unsigned *)(row + half * 16);
    KV_UNROLL() for (int b = 0; b < D / Q8_VALUES; b++) {
        const int at = b * Q8_BYTES + 2, shift = at % 4 * 8;
        unsigned x[8];
        KV_UNROLL() for (int i = 0; i < 4; i++) {
            unsigned low = from[at / 4 + i], word = shift ? __funnelshift_r(low, from[at / 4 + i + 1], shift) : low;
            word ^= 0x80808080;
            x[2 * i] = halves_less(__byte_perm(word, 0x64646464, 0x4140), 0x64806480);
            x[2 * i + 1] = halves_less(__byte_perm(word, 0x64646464, 0x4342), 0x64806480);
        }
        *(uint4 *)(to + b * 64 + half * 32) = { x[0], x[1], x[2], x[3] };
        *(uint4 *)(to + b * 64 + half * 32 + 16) = { x[4], x[5], x[6], x[7] };
    }
}

// q4: 8 (2 u - 15) of every u (lib/kernels.h); beside u_i of a block stands u_i+16. A lane takes every second block.
// Its four planes, of a bit of every u, become four words of eight u:
//
//     plane b         bit 31 .. 0:  bit b of u_31, u_30, .., u_0
//     even, odd       2 bits each:  of two planes, of every second u
//     u[k]            4 bits each:  u_28+k, u_24+k, .., u_k
//
// In a word u_i and u_i+16 are 16 bits apart, and become neighbours. An f16 number with u from bit 1 on is 16 u more
// than 0x7000, which is 8192 and whose last bit counts 8.
template <int D> static __device__ void halves_of_q4(char *to, const char *row, int half) {
    const unsigned *from = (const unsigned *)(row + half * 20);
    KV_UNROLL() for (int i = 0; i < D / 64; i++) {
        unsigned plane[5], even[2], odd[2], u[4];
        KV_UNROLL() for (int b = 0; b < 5; b++) plane[b] = b < 4 || !half ? from[9 * i + b] : 0;
        KV_UNROLL() for (int b = 0; b < 4; b++) plane[b] = __funnelshift_r(plane[b], plane[b + 1], half ? 0 : 16);
        KV_UNROLL() for (int h = 0; h < 2; h++) {
            even[h] = (plane[2 * h] & 0x55555555) | (plane[2 * h + 1] & 0x55555555) << 1;
            odd[h] = (plane[2 * h] >> 1 & 0x55555555) | (plane[2 * h + 1] & 0xaaaaaaaa);
        }
        u[0] = (even[0] & 0x33333333) | (even[1] & 0x33333333) << 2;
        u[1] = (odd[0] & 0x33333333) | (odd[1] & 0x33333333) << 2;
        u[2] = (even[0] >> 2 & 0x33333333) | (even[1] & 0xcccccccc);
        u[3] = (odd[0] >> 2 & 0x33333333) | (odd[1] & 0xcccccccc);
        KV_UNROLL() for (int c = 0; c < 4; c++) {
            unsigned x[4];
            KV_UNROLL() for (int k = 0; k < 4; k++) {
                unsigned bits = c ? u[k] >> (4 * c - 1) : u[k] << 1;
                x[k] = halves_less((bits & 0x001e001e) | 0x70007000, 0x700f700f);
            }
            *(uint4 *)(to + i * 128 + half * 64 + c * 16) = { x[0], x[1], x[2], x[3] };
        }
    }
}

// scale (D/32,2) = the scales of rows (2t,2t+1) and (2t+8,2t+9) of a tile of 16, f16, block by block. Rows, of blocks
// of BLOCK bytes, begin STORED bytes apart; row lane % 16 begins `off` bytes later.
template <int D, int BLOCK, int STORED>
static __device__ void block_scales(unsigned (*scale)[2], const char *rows, int off) {
    KV_UNROLL() for (int i = 0; i < 4; i++) {
        int r = (threadIdx.x & 3) * 2 + i % 2 + i / 2 * 8;
        const char *from = rows + r * STORED + __shfl_sync(ALL_LANES, off, r);
        KV_UNROLL() for (int b = 0; b < D / 32; b++) {
            unsigned x = *(const uint16_t *)(from + b * BLOCK);
            scale[b][i / 2] = i % 2 ? scale[b][i / 2] | x << 16 : x;
        }
    }
}

// to (m,D), rows to_stride apart, = from, rows `stride` apart: every 32 numbers times H / 8, of q4. By a block of
// WARPS, a warp 32 numbers. In a tile of q4 dim i of 32 stands beside dim i + 16 (halves_of_q4): in `to` if into is 1,
// else in `from`.
template <int WARPS>
static __device__ void q4_turn(float *to, int to_stride, const float *from, size_t stride, int m, int D, int into) {
    int lane = threadIdx.x & 31, blocks = D / Q4_BLOCK, place = lane % 16 * 2 + lane / 16;
    for (int i = threadIdx.x >> 5; i < m * blocks; i += WARPS) {
        int row = i / blocks, d = i % blocks * Q4_BLOCK;
        float x = hadamard_lanes(from[row * stride + d + (into ? lane : place)], Q4_BLOCK) / 8;
        __syncwarp();                           // every lane has read: to may be from
        to[row * to_stride + d + (into ? place : lane)] = x;
    }
}

// ---- tiles of attention on tensor cores
// What attention's kernels do with a tile that lies in shared memory: scores, what is not to be seen, softmax, and the
// sum of the values. They know rows, fragments and registers, not which rows these are. Which query, key and dim a
// number of lane (g,t) belongs to is drawn at the kernels; "where the lane names its rows" is what ldmatrix asks of it
// (lib/cuda.h). A row is D 16-bit numbers, tile_row(D) bytes long, so that 8 rows lie in different banks.
//
// Probabilities are powers of 2, of a score times c, and are multiplied by 2^P_SHIFT, or f16 would round small ones
// more. Tensor cores round a sum towards zero each time they add to it, so they sum the keys of a tile from nothing,
// and f32 adders, which round to nearest, add that to the output; this is the multiply-add that shrinks the older sums.

enum { P_SHIFT = 15 };                          // 2^15 is the largest power of two in f16
static const float SCORE_LOW = -1e30f;          // less than any score, and less than infinitely less

KV_HD static constexpr int tile_row(int D) { return 2 * D + 16; }

// A prefill: a warp has MT times 16 query rows, and a tile KT keys.

struct RowState {               // the softmax of a query row so far
    float top, sum;             // its greatest score, not scaled; the sum of its probabilities
};

// s (MT,KT/8,4) = the lane's scores of a tile. q, keys: where the lane names its rows.
template <int DT, int DIM, int MT, int KT>
static __device__ void tensor_scores(float (*s)[KT / 8][4], SharedAt q, SharedAt keys) {
    KV_UNROLL() for (int i = 0; i < MT; i++)
        KV_UNROLL() for (int n = 0; n < KT / 8; n++)
            KV_UNROLL() for (int e = 0; e < 4; e++) s[i][n][e] = 0;
    KV_UNROLL() for (int k = 0; k < DIM / 16; k++) {
        if (k % 2 == 0) __syncwarp();
        unsigned f[MT][4];
        KV_UNROLL() for (int i = 0; i < MT; i++) ldmatrix_x4(f[i], q + i * 16 * tile_row(DIM) + 32 * k);
        KV_UNROLL() for (int n = 0; n < KT / 16; n++) {
            unsigned b[4];
            ldmatrix_x4(b, keys + n * 16 * tile_row(DIM) + 32 * k);
            KV_UNROLL() for (int i = 0; i < MT; i++) {
                mma_16x8x16<DT>(s[i][2 * n], f[i], b);
                mma_16x8x16<DT>(s[i][2 * n + 1], f[i], b + 2);
            }
        }
    }
}

// What a row does not see becomes -infinity. see: the row's words, those of row g + 8 are 8 rows on.
template <int MT, int KT>
static __device__ void tensor_hide(float (*s)[KT / 8][4], const unsigned *see) {
    const int WORDS = KT / 32;
    int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    KV_UNROLL() for (int i = 0; i < MT; i++)
        KV_UNROLL() for (int half = 0; half < 2; half++)
            KV_UNROLL() for (int w = 0; w < WORDS; w++) {
                unsigned bits = see[(16 * i + 8 * half + g) * WORDS + w] >> (2 * t);
                KV_UNROLL() for (int n = 0; n < 4; n++)
                    KV_UNROLL() for (int e = 0; e < 2; e++)
                        if (!(bits >> (8 * n + e) & 1)) s[i][4 * w + n][2 * half + e] = -INFINITY;
            }
}

// The softmax of one tile. p (KT/16,MT,4): the A fragments of its probabilities; shrink (MT,2): by how much
// older sums of rows g and g + 8 shrink. state: of the warp's rows; its maxima become
// those up to here. c: what makes a score a power of 2.
template <int DT, int MT, int KT>
static __device__ void tensor_softmax(unsigned (*p)[MT][4], float (*shrink)[2], const float (*s)[KT / 8][4],
                                      float c, RowState *state) {
    int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    KV_UNROLL() for (int i = 0; i < MT; i++) {
        float low[2], tops[2];
        KV_UNROLL() for (int half = 0; half < 2; half++) {
            RowState *row = state + 16 * i + 8 * half + g;
            float top = row->top, high = top;
            KV_UNROLL() for (int n = 0; n < KT / 8; n++)
                high = fmaxf(high, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
            high = lanes_max<4>(high);
            shrink[i][half] = exp2_flush((top - high) * c);
            low[half] = P_SHIFT - high * c;
            tops[half] = high;
        }
        __syncwarp();                           // the four lanes of a row have read its maximum
        KV_UNROLL() for (int half = 0; half < 2; half++)
            if (!t) state[16 * i + 8 * half + g].top = tops[half];
        KV_UNROLL() for (int n = 0; n < KT / 8; n++)
            KV_UNROLL() for (int half = 0; half < 2; half++) {
                const float *x = s[i][n] + 2 * half;
                p[n / 2][i][n % 2 * 2 + half] =
                    half_pack<DT>(exp2_flush(x[0] * c + low[half]), exp2_flush(x[1] * c + low[half]));
            }
    }
}

// Adds up P: a product with ones, of which lane t = 0 keeps one column for rows g and g + 8.
template <int DT, int MT, int KT>
static __device__ void tensor_sums(RowState *state, const float (*shrink)[2], const unsigned (*p)[MT][4]) {
    int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    unsigned one = half_pack<DT>(1, 1), ones[2] = { one, one };
    KV_UNROLL() for (int i = 0; i < MT; i++) {
        float x[4] = { 0, 0, 0, 0 };
        __syncwarp();
        KV_UNROLL() for (int k = 0; k < KT / 16; k++) mma_16x8x16<DT>(x, p[k][i], ones);
        if (t) continue;
        RowState *row = state + 16 * i + g;
        row[0].sum = row[0].sum * shrink[i][0] + x[0];
        row[8].sum = row[8].sum * shrink[i][1] + x[2];
    }
}

// acc (MT,DIM/8,4) = acc shrink + P V, for half of the dims. vals: where the lane names its row.
template <int DT, int DIM, int MT, int KT, int HALF>
static __device__ void tensor_mix(float (*acc)[DIM / 8][4], const float (*shrink)[2],
                                  const unsigned (*p)[MT][4], SharedAt vals) {
    const int J0 = HALF * (DIM / 32), J1 = HALF ? DIM / 16 : DIM / 32;
    KV_UNROLL() for (int j = J0; j < J1; j++) {
        if (j == J0 || j % 2 == 0) __syncwarp();
        float x[MT][2][4];
        KV_UNROLL() for (int i = 0; i < MT; i++)
            KV_UNROLL() for (int e = 0; e < 8; e++) x[i][e / 4][e % 4] = 0;
        KV_UNROLL() for (int k = 0; k < KT / 16; k++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, vals + k * 16 * tile_row(DIM) + 32 * j);
            KV_UNROLL() for (int i = 0; i < MT; i++) {
                mma_16x8x16<DT>(x[i][0], p[k][i], b);
                mma_16x8x16<DT>(x[i][1], p[k][i], b + 2);
            }
        }
        KV_UNROLL() for (int i = 0; i < MT; i++)
            KV_UNROLL() for (int e = 0; e < 8; e++) {
                float *to = &acc[i][2 * j + e / 4][e % 4];
                *to = *to * shrink[i][e % 4 / 2] + x[i][e / 4][e % 4];
            }
    }
}

// Decode: a warp has NT times 8 query rows, in 16 rows of fragments as values and rests, and a tile 16 N keys.

// q (D/16,NT,4,8,4) in shared memory: the A fragments of m queries, rows (m,D), four (8,8) matrices each, as ldmatrix
// reads them; zeros behind the last. By a block of THREADS, complete after the next barrier. All of a thread's numbers
// are asked for before the first is split, or it would wait for each.
template <int DT, int D, int NT, int THREADS>
static __device__ void decode_queries(unsigned *q, const float *rows, int m) {
    const int WORDS = NT * D * 8 / THREADS;
    float2 x[WORDS];
    KV_UNROLL() for (int k = 0; k < WORDS; k++) {
        int i = threadIdx.x + k * THREADS, t = i % 4, g = i / 4 % 8, word = i / 32 % 4, step = i / (128 * NT);
        int r = g + (NT == 2 ? word % 2 * 8 : 0), d = 16 * step + word / 2 * 8 + 2 * t;
        x[k] = { 0, 0 };
        if (r < m) x[k] = *(const float2 *)(rows + r * D + d);
    }
    KV_UNROLL() for (int k = 0; k < WORDS; k++) {
        int i = threadIdx.x + k * THREADS, second = NT == 2 ? i / 128 % NT : i / 32 % 2;
        uint16_t value[2], rest[2];
        half_split<DT>(&value[0], &rest[0], x[k].x);
        half_split<DT>(&value[1], &rest[1], x[k].y);
        q[i] = second ? rest[0] | (unsigned)rest[1] << 16 : value[0] | (unsigned)value[1] << 16;
    }
}

// What a warp has found so far for its 8 NT query rows; lane (g,t) holds rows g + 8 i, i < NT.
template <int D, int NT> struct DecodeSums {
    float acc[NT][D / 8][2];    // [2j+e][c]: dim 16 j + 8 e + 2t + c of the sum of p v, divided by unit
    float top[NT];              // a whole number of powers of 2 that no score exceeds
    float sum[NT];              // the lane's share of the sum of exponentials, times 2^P_SHIFT
    float unit;                 // a power of two: 1, but for blocks with scales
};

// x (2) = what the lane holds of query row g + 8 i: columns 2t and 2t+1 of the product d.
template <int NT> static __device__ void decode_row(float x[2], const float d[4], int i) {
    for (int e = 0; e < 2; e++) x[e] = NT == 1 ? d[e] + d[2 + e] : d[2 * i + e];
}

// s (NT,4 N) = the lane's scores: s[i] are those of row g + 8 i with the keys 2t, 2t+1, 2t+8, 2t+9 of every 16.
// keys, q: where the lane names its rows. SCALED: the products of a block are summed before its scale, of scale
// (D/32,2), is applied.
template <int DT, int D, int NT, int N, int SCALED>
static __device__ void decode_scores(float (*s)[4 * N], SharedAt keys, SharedAt q, const unsigned (*scale)[2]) {
    const int STEPS = SCALED ? 2 : D / 16;      // of a block
    for (int i = 0; i < 4 * N * NT; i++) s[i / (4 * N)][i % (4 * N)] = 0;
    KV_UNROLL() for (int block = 0; block < D / 16 / STEPS; block++) {
        float d[2 * N][4] = {}, x[2];
        KV_UNROLL() for (int i = block * STEPS; i < (block + 1) * STEPS; i++) {
            unsigned b[N][4], f[4];
            for (int n = 0; n < N; n++) ldmatrix_x4(b[n], keys + 16 * n * tile_row(D) + 32 * i);
            for (int j = 0; j < NT; j++) {
                ldmatrix_x4(f, q + 512 * (i * NT + j));
                for (int n = 0; n < 2 * N; n++) mma_16x8x16<DT>(d[n], f, b[n / 2] + n % 2 * 2);
            }
        }
        for (int j = 0; j < NT; j++)
            for (int n = 0; n < 2 * N; n++) {
                decode_row<NT>(x, d[n], j);
                for (int e = 0; e < 2; e++) {
                    float by = SCALED ? half_get<DT_F16>((uint16_t)(scale[block][n % 2] >> 16 * e)) : 1;
                    s[j][2 * n + e] = SCALED ? s[j][2 * n + e] + x[e] * by : x[e];
                }
            }
    }
}

// Scores with keys that are not to be seen become -infinity. see: bits 0, 1, 8 and 9, of every 16, are of the lane's
// scores.
template <int NT, int N> static __device__ void decode_hide(float (*s)[4 * N], unsigned see) {
    KV_UNROLL() for (int i = 0; i < 4 * N; i++)
        KV_UNROLL() for (int j = 0; j < NT; j++)
            if (!(see >> (i / 2 * 8 + i % 2) & 1)) s[j][i] = -INFINITY;
}

// One query row meets a tile. s (4 N): the lane's scores, become its probabilities under the new maximum,
// times 2^P_SHIFT. c: what makes a score a power of 2. -> by how much the older sums shrink. Maxima are
// whole numbers, so that what shrinks does so exactly, and a score less the maximum is rounded once.
template <int N> static __device__ float decode_softmax(float *s, float c, float *top, float *sum) {
    float high = s[0];
    for (int i = 1; i < 4 * N; i++) high = fmaxf(high, s[i]);
    high = fmaxf(*top, ceilf(lanes_max<4>(high) * c));
    float shrink = exp2_flush(*top - high), low = P_SHIFT - high;
    for (int i = 0; i < 4 * N; i++) s[i] = exp2_flush(s[i] * c + low);
    float add = s[0];
    for (int i = 1; i < 4 * N; i++) add += s[i];
    *sum = *sum * shrink + add;
    *top = high;
    return shrink;
}

// f (N,NT,4): the A fragments of P, of 16 keys each. p (NT,4 N): the lane's probabilities.
template <int DT, int NT, int N>
static __device__ void decode_factors(unsigned (*f)[NT][4], const float (*p)[4 * N]) {
    for (int i = 0; i < NT; i++)
        for (int n = 0; n < 2 * N; n++) {
            float x = p[i][2 * n], y = p[i][2 * n + 1];
            unsigned value = half_pack<DT>(x, y);
            unsigned rest = half_pack<DT>(x - half_get<DT>((uint16_t)value),
                                          y - half_get<DT>((uint16_t)(value >> 16)));
            f[n / 2][0][n % 2 * 2 + i] = value;
            f[n / 2][NT - 1][n % 2 * 2 + (NT == 2 ? i : 1)] = rest;
        }
}

// The scales of the values of a tile are folded into the probabilities, and divided by z.unit, which no scale yet has
// exceeded, so that the products are in the range of f16 as the probabilities are. scale (D/32,2), as in block_scales,
// is divided here; older sums shrink by as much as the unit grows.
template <int D, int NT>
static __device__ void scales_fold(DecodeSums<D, NT> &z, float *shrink, unsigned (*scale)[2]) {
    unsigned most = 0;
    for (int i = 0; i < D / 16; i++) most = halves_max(most, scale[i / 2][i % 2]);

    // The least power of two above the scales.
    float top = lanes_max<4>(fmaxf(half_get<DT_F16>((uint16_t)most), half_get<DT_F16>((uint16_t)(most >> 16))));
    float unit = fmaxf(z.unit, __int_as_float((__float_as_int(top) & 0x7f800000) + 0x00800000));
    float inv = __int_as_float(0x7f000000 - __float_as_int(unit)), less = z.unit * inv;     // 1 / unit
    unsigned inv2 = half_pack<DT_F16>(inv, inv);
    for (int i = 0; i < D / 16; i++) scale[i / 2][i % 2] = halves_times(scale[i / 2][i % 2], inv2);
    for (int i = 0; i < NT; i++) shrink[i] *= less;
    z.unit = unit;
}

// f (NT,4) = the fragments of P, prob (NT,4), times the scales (2) of a block's rows. A product of two f16 numbers is
// a value and a rest, too.
template <int NT>
static __device__ void scaled_factors(unsigned (*f)[4], const unsigned (*prob)[4], const unsigned scale[2]) {
    for (int i = 0; i < 2 * NT; i++) {
        int at = i % 2 * 2 + i / 2, other = i % 2 * 2 + (NT == 2 ? i / 2 : 1);
        unsigned p = prob[0][at], by = scale[i % 2], value = halves_times(p, by);
        f[0][at] = value;
        f[NT - 1][other] = halves_fma(prob[NT - 1][other], by, halves_fma(p, by, halves_minus(value)));
    }
}

// acc = acc shrink + P V for the j-th 16 dims. f (N,NT,4): of P; b (N,4): of V, two words for each of the two
// products.
template <int DT, int D, int NT, int N>
static __device__ void decode_mix(DecodeSums<D, NT> &z, int j, const float *shrink, const unsigned (*f)[NT][4],
                                  const unsigned (*b)[4]) {
    for (int e = 0; e < 2; e++) {
        float d[4] = { 0, 0, 0, 0 }, x[2];
        for (int n = 0; n < N; n++)
            for (int i = 0; i < NT; i++) mma_16x8x16<DT>(d, f[n][i], b[n] + 2 * e);
        for (int i = 0; i < NT; i++) {
            decode_row<NT>(x, d, i);
            for (int c = 0; c < 2; c++) z.acc[i][2 * j + e][c] = z.acc[i][2 * j + e][c] * shrink[i] + x[c];
        }
    }
}

// A window: a warp has 16 queries, and 32 keys at a time.

// f (D/16,PARTS,4) = the A fragments of n queries, `stride` floats apart; zeros behind the last. A query is PARTS
// 16-bit numbers, each what the rounding of those before has left over.
template <int DT, int D, int PARTS>
static __device__ void window_queries(unsigned (*f)[PARTS][4], const float *q, size_t stride, int n) {
    int g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    KV_UNROLL() for (int i = 0; i < D / 4; i++) {
        int word = i % 4, r = g + word % 2 * 8;
        const float *from = q + min_int(r, n - 1) * stride + i / 4 * 16 + word / 2 * 8 + 2 * t;
        float2 x = r < n ? *(const float2 *)from : make_float2(0, 0);
        KV_UNROLL() for (int part = 0; part < PARTS; part++) {
            unsigned two = f[i / 4][part][word] = half_pack<DT>(x.x, x.y);
            x = make_float2(x.x - half_get<DT>((uint16_t)two), x.y - half_get<DT>((uint16_t)(two >> 16)));
        }
    }
}

// s (2,8) = the lane's scores of 32 keys; keys: where the lane names its rows.
template <int DT, int D, int PARTS>
static __device__ void window_products(float (*s)[8], const unsigned (*f)[PARTS][4], SharedAt keys) {
    float d[4][4] = {};
    KV_UNROLL() for (int k = 0; k < D / 16; k++) {
        unsigned b[2][4];
        KV_UNROLL() for (int n = 0; n < 2; n++) ldmatrix_x4(b[n], keys + n * 16 * tile_row(D) + 32 * k);
        KV_UNROLL() for (int part = PARTS - 1; part >= 0; part--)
            KV_UNROLL() for (int n = 0; n < 4; n++) mma_16x8x16<DT>(d[n], f[k][part], b[n / 2] + n % 2 * 2);
    }
    KV_UNROLL() for (int i = 0; i < 16; i++) s[i % 4 / 2][i / 4 * 2 + i % 2] = d[i / 4][i % 4];
}

// -> the sum over the 16 queries of column 8 (g / 2) + 2t + g % 2 of 32. A score x of query g + 8 half has the
// probability 2^(c x + low[half]) times by[half].
static __device__ float window_sum(const float (*s)[8], float c, const float *low, const float *by) {
    int lane = threadIdx.x & 31;
    float x[8];
    KV_UNROLL() for (int i = 0; i < 8; i++)
        x[i] = exp2_flush(s[0][i] * c + low[0]) * by[0] + exp2_flush(s[1][i] * c + low[1]) * by[1];
    KV_UNROLL() for (int n = 4; n; n /= 2)
        KV_UNROLL() for (int i = 0; i < n; i++) {
            int upper = lane & 4 * n;
            float keep = upper ? x[i + n] : x[i], give = upper ? x[i] : x[i + n];
            x[i] = keep + __shfl_xor_sync(ALL_LANES, give, 4 * n);
        }
    return x[0];
}

// ---- parts of a softmax become one
// Part c of a row left max t_c, sum z_c and vector x_c under its own maximum. With t = max t_c:
//     out = (sum of exp(t_c - t) x_c) / (sum of exp(t_c - t) z_c)

// One query row, by a warp. part: the first of n items, stride floats apart. out (D) or NULL, stat (2):
// max and sum of the whole row.
// Items that other blocks have left are read past L1. Each read is a wait, so JOIN_AHEAD items are asked for before
// the first of them is added.
//   Lane    factor exp(t_c - t) and sum of one item of JOIN_AHEAD; of each 128 dimensions four
enum { JOIN_AHEAD = 8 };

static __device__ void join_row(const float *part, size_t stride, int n, int D, float *out, float *stat) {
    int lane = threadIdx.x & 31;
    float top = -INFINITY, sum = 0;
    for (int c = lane; c < n; c += 32) top = fmaxf(top, __ldcg(part + c * stride));
    top = lanes_max<32>(top);
    for (int d0 = 0; d0 < D; d0 += 128) {
        int d[2] = { d0 + 2 * lane, d0 + 64 + 2 * lane };
        float2 x[2] = {};
        sum = 0;
        for (int c = 0; c < n; c += JOIN_AHEAD) {
            float2 own = { -INFINITY, 0 }, v[JOIN_AHEAD][2];
            if (lane < min_int(n - c, JOIN_AHEAD)) own = __ldcg((const float2 *)(part + (c + lane) * stride));
            KV_UNROLL() for (int k = 0; k < JOIN_AHEAD; k++)
                KV_UNROLL() for (int i = 0; i < 2; i++) {
                    v[k][i] = { 0, 0 };
                    const float *from = part + (c + k) * stride + 2 + d[i];
                    if (out && c + k < n && d[i] < D) v[k][i] = __ldcg((const float2 *)from);
                }
            float factor = own.x == -INFINITY ? 0 : expf(own.x - top);
            KV_UNROLL() for (int k = 0; k < JOIN_AHEAD; k++) {
                float e = __shfl_sync(ALL_LANES, factor, k);
                sum += e * __shfl_sync(ALL_LANES, own.y, k);
                KV_UNROLL() for (int i = 0; i < 2; i++) {
                    x[i].x += e * v[k][i].x;
                    x[i].y += e * v[k][i].y;
                }
            }
        }
        for (int i = 0; i < 2; i++)
            if (out && d[i] < D) *(float2 *)(out + d[i]) = { x[i].x / sum, x[i].y / sum };
    }
    if (lane) return;
    stat[0] = top;
    stat[1] = sum;
}

// ---- dot products to the CPU's bit
// Sum over the 16 lanes of a half warp, in every lane of it: 8+8, 4+4, 2+2, 1+1, as dot_f32 folds
// its lanes.
static __device__ float lanes_fold(float sum) {
    for (int d = 8; d; d >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    return sum;
}

// dot_f32 of kvcomp.c by a half warp: a.b of a, b (D), to the bit. Lane i takes every 16th dimension
// from i on.
static __device__ float dot_lanes(const float *a, const float *b, int D) {
    float sum = 0;
    for (int d = threadIdx.x & 15; d < D; d += 16) sum = fmaf(a[d], b[d], sum);
    return lanes_fold(sum);
}

// 8 numbers as they are stored.
template <int DT> struct Eight {
    uint4 u[DT == DT_F32 ? 2 : 1];
};

// The 8 numbers at p, which is aligned to 16 bytes.
template <int DT> static __device__ Eight<DT> load8(const char *p) {
    Eight<DT> e;
    for (int i = 0; i < (DT == DT_F32 ? 2 : 1); i++) e.u[i] = ((const uint4 *)p)[i];
    return e;
}

// x (8) = the 8 numbers as f32.
template <int DT> static __device__ void unpack8(float *x, const Eight<DT> &e) {
    for (int i = 0; i < (DT == DT_F32 ? 2 : 1); i++) {
        unsigned w[4] = { e.u[i].x, e.u[i].y, e.u[i].z, e.u[i].w };
        for (int j = 0; j < 4; j++)
            if (DT == DT_F32) {
                x[4 * i + j] = __int_as_float((int)w[j]);
            } else {
                x[2 * j] = half_get<DT>((uint16_t)w[j]);
                x[2 * j + 1] = half_get<DT>((uint16_t)(w[j] >> 16));
            }
    }
}

enum {
    DOT_AHEAD = 4,              // loads of pair_dots that a lane has under way
    DOT_QUERIES = 4                      // queries that share what it reads
};

// dot (DOT_QUERIES) = the dot products of a row (n) of type DT with DOT_QUERIES queries, to the bit those of dot_f32,
// in both lanes of a pair of neighbours; all lanes of a warp take part, each pair with a row of its
// own. q (DOT_QUERIES,n), in shared memory.
//
//     row     | 8 numbers | 8 numbers | 8 numbers | 8 numbers | ..         16 or 32 bytes each
//     lane      even        odd         even        odd
//
// dot_f32 has 16 partial sums, of every 16th product. The even lane owns the first eight, the odd
// lane the others; so each load of a lane is 16 bytes, a pair reads whole sectors of 32, and DOT_QUERIES
// queries share what was read and turned into f32.
// Rows lie on 16 bytes where n is a multiple of 8. Others are read number by number.
template <int DT> static __device__ void pair_dots(float *dot, const char *row, int n, const float *q) {
    const int STRIDE = 16;
    int k0 = 8 * (threadIdx.x & 1), wide = n % 8 == 0;
    float sum[DOT_QUERIES][8];
    KV_UNROLL()
    for (int j = 0; j < DOT_QUERIES; j++)
        KV_UNROLL()
        for (int i = 0; i < 8; i++) sum[j][i] = 0;

    for (; wide && k0 < n; k0 += DOT_AHEAD * STRIDE) {
        Eight<DT> e[DOT_AHEAD];
        KV_UNROLL()
        for (int a = 0; a < DOT_AHEAD; a++) {
            int k = k0 + a * STRIDE;
            if (k < n) e[a] = load8<DT>(row + (size_t)k * Stored<DT>::BYTES);
        }
        KV_UNROLL()
        for (int a = 0; a < DOT_AHEAD; a++) {
            int k = k0 + a * STRIDE;
            if (k >= n) break;
            float x[8];
            unpack8<DT>(x, e[a]);
            KV_UNROLL()
            for (int j = 0; j < DOT_QUERIES; j++) {
                const float4 *from = (const float4 *)(q + j * n + k);
                float4 low = from[0], high = from[1];
                const float own[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
                KV_UNROLL()
                for (int i = 0; i < 8; i++) sum[j][i] = fmaf(own[i], x[i], sum[j][i]);
            }
        }
    }
    for (; !wide && k0 < n; k0 += STRIDE) {
        KV_UNROLL()
        for (int i = 0; i < 8; i++) {
            if (k0 + i >= n) break;
            float x = number(row, DT, k0 + i);
            KV_UNROLL()
            for (int j = 0; j < DOT_QUERIES; j++)
                sum[j][i] = fmaf(q[j * n + k0 + i], x, sum[j][i]);
        }
    }

    // 8+8 across the pair; then 4+4, 2+2, 1+1 in the lane.
    KV_UNROLL()
    for (int j = 0; j < DOT_QUERIES; j++) {
        KV_UNROLL()
        for (int i = 0; i < 8; i++) sum[j][i] += __shfl_xor_sync(ALL_LANES, sum[j][i], 1);
        KV_UNROLL()
        for (int h = 4; h; h >>= 1)
            KV_UNROLL()
            for (int i = 0; i < h; i++) sum[j][i] += sum[j][i + h];
        dot[j] = sum[j][0];
    }
}

// ---- top_k of lib/kernels.h for many rows at once
enum { TOP_THREADS = 512, TOP_WARPS = TOP_THREADS / 32 };
enum { TOP_BITS = 11, TOP_BINS = 1 << TOP_BITS };   // of a key in a round: three rounds

struct TopRow {                 // one row of a launch
    int n;                      // scores it has
    int k;                      // how many of them are wanted
};

// How many neighbours in its row, or of its stretch, a thread asks for before it looks at the first: each would be
// a wait of its own.
enum { TOP_AHEAD = 4 };

struct TopShared {              // shared memory of a block that selects
    int bin[TOP_BINS];
    int sum[TOP_WARPS], equal[TOP_WARPS];       // of each warp
    int found[2];
};

// m->found[0] = the largest b for which bins b and above together hold at least `left`, m->found[1]
// = how much is wanted of bin b; m->found[0] = -1: all bins hold less. All threads of a block.
// Thread 0 adds the highest bins, thread 1 the next ones, and so on; a prefix sum over the threads
// shows the one in whose bins `left` is reached.
static __device__ void top_bin(TopShared *m, int left) {
    const int EACH = TOP_BINS / TOP_THREADS;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, own = 0;
    int b = TOP_BINS - 1 - EACH * (int)threadIdx.x;              // the thread's highest bin
    for (int i = 0; i < EACH; i++) own += m->bin[b - i];
    int upto = scan_warp(own);
    if (lane == 31) m->sum[warp] = upto;
    if (!threadIdx.x) m->found[0] = -1;
    __syncthreads();
    for (int w = 0; w < warp; w++) upto += m->sum[w];
    if (upto - own < left && upto >= left) {    // true in at most one thread
        int rest = left - (upto - own);
        while (m->bin[b] < rest) {
            rest -= m->bin[b];
            b--;
        }
        m->found[0] = b;
        m->found[1] = rest;
    }
    __syncthreads();
}

// Of x (n), the best first, the key of the score at which the weights reach *left: with weights of
// 1 that is the *left-th largest. *left becomes how much weight is wanted of the scores with
// exactly this key. 0: all weights together are less. Found by TOP_BITS bits a round, from the
// highest; the last round counts one bit again that is known already. weight(i) >= 0 is asked of every i.
// All threads of a block.
template <class Weight>
static __device__ uint32_t top_key(const float *x, int n, Weight weight, int *left, TopShared *m) {
    uint32_t key = 0;
    for (int known = 0; known < 32; known += TOP_BITS) {
        int shift = max_int(32 - TOP_BITS - known, 0);
        __syncthreads();                        // the last round's bins have been read
        for (int i = threadIdx.x; i < TOP_BINS; i += TOP_THREADS) m->bin[i] = 0;
        __syncthreads();
        for (int i0 = threadIdx.x; i0 < n; i0 += TOP_AHEAD * TOP_THREADS) {
            float near[TOP_AHEAD];
            int w[TOP_AHEAD];
            KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) {
                int i = min_int(i0 + k * TOP_THREADS, n - 1);
                near[k] = x[i];
                w[k] = weight(i);
            }
            KV_UNROLL() for (int k = 0; k < TOP_AHEAD && i0 + k * TOP_THREADS < n; k++) {
                uint32_t u = order_key(near[k]);
                int alike = ((uint64_t)(u ^ key) >> (32 - known)) == 0;
                if (alike && w[k]) atomicAdd(&m->bin[u >> shift & (TOP_BINS - 1)], w[k]);
            }
        }
        __syncthreads();
        top_bin(m, *left);
        if (m->found[0] < 0) return 0;
        key |= (uint32_t)m->found[0] << shift;
        *left = m->found[1];
    }
    return key;
}

// The warp's stretch of 0..n-1: every warp of the block has an equal one, a multiple of 32 long.
static __device__ int stretch_length(int n) { return (n + TOP_THREADS - 1) / TOP_THREADS * 32; }

// u = the keys of x[i], x[i + 32], ..; 0, which is no number's key but that of a NaN, for those from `end` on.
static __device__ void top_keys(uint32_t (&u)[TOP_AHEAD], const float *x, int i, int end) {
    float near[TOP_AHEAD];
    KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) near[k] = x[min_int(i + 32 * k, end - 1)];
    KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) u[k] = i + 32 * k < end ? order_key(near[k]) : 0;
}

// idx = the indices of all x (n) above `key` and of the first `left` equal to it, ascending. All
// threads of a block. Every warp counts the two kinds in its stretch of the row, and once the
// counts of the warps before it are known, it goes through the stretch again and writes.
static __device__ void top_write(const float *x, int n, uint32_t key, int left, int *idx, TopShared *m) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_above = 0, n_equal = 0;
    int each = stretch_length(n), from = warp * each, to = from + each;
    for (int i = from; i < to; i += 32 * TOP_AHEAD) {
        uint32_t u[TOP_AHEAD];
        top_keys(u, x, i + lane, min_int(to, n));
        KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) {
            n_above += u[k] > key;
            n_equal += u[k] == key;
        }
    }
    n_above = lanes_sum<32>(n_above);
    n_equal = lanes_sum<32>(n_equal);
    __syncthreads();
    if (!lane) {
        m->sum[warp] = n_above;
        m->equal[warp] = n_equal;
    }
    __syncthreads();

    n_above = n_equal = 0;  // from here on: of everything before index i
    for (int w = 0; w < warp; w++) {
        n_above += m->sum[w];
        n_equal += m->equal[w];
    }
    for (int i = from; i < to; i += 32 * TOP_AHEAD) {
        uint32_t u[TOP_AHEAD];
        top_keys(u, x, i + lane, min_int(to, n));
        KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) {
            unsigned more = __ballot_sync(ALL_LANES, u[k] > key);
            unsigned same = __ballot_sync(ALL_LANES, u[k] == key);
            unsigned below = (1u << lane) - 1;
            int a = n_above + __popc(more & below), e = n_equal + __popc(same & below);
            if (u[k] > key || (u[k] == key && e < left)) idx[a + min_int(e, left)] = i + 32 * k + lane;
            n_above += __popc(more);
            n_equal += __popc(same);
        }
    }
}

// idx (S,per) = the rows[i].k largest of each row of x (S,stride), indices ascending, ties to the
// lower one; count (S): how many there are. Keys are integers and no float is added, so the result
// is the CPU's.
// Block: one row, TOP_THREADS threads; few rows come at once (G, H or one), so a row gets a large
// block. Thread: every 512th score while digits are counted. Warp: an equal stretch of the row
// while indices are written; lane: every 32nd score of it. Shared: the bins of a digit and two
// counts a warp. Bound by latency for the usual row of some 10^4 scores (five passes over the row,
// four of
// them from the cache), by its one read from memory beyond.
static __global__ void __launch_bounds__(TOP_THREADS, 1)
top_k_kernel(const float *x, size_t stride, const TopRow *rows, int *idx, int per, int *count) {
    __shared__ TopShared m;
    TopRow row = rows[blockIdx.x];
    int left = min_int(row.k, row.n);
    x += blockIdx.x * stride;
    idx += (size_t)blockIdx.x * per;
    if (!threadIdx.x) count[blockIdx.x] = max_int(left, 0);
    if (left <= 0) return;                                       // the same for the whole block

    uint32_t key = top_key(x, row.n, [](int) { return 1; }, &left, &m);
    top_write(x, row.n, key, left, idx, &m);
}

// ---- prefix sums over a block
// weight(i) >= 0 is a small function of i = 0..n-1. All threads of a block of TOP_THREADS call
// these.

// w = the weights of i, i + 32, ..; 0 for those from `end` on.
template <class Weight> static __device__ void weights_of(int (&w)[TOP_AHEAD], int i, int end, Weight weight) {
    KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) w[k] = weight(min_int(i + 32 * k, end - 1));
    KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) w[k] = i + 32 * k < end ? w[k] : 0;
}

// The weights before the warp's own stretch; m->sum has those of every stretch.
template <class Weight>
static __device__ int weight_before(int n, Weight weight, TopShared *m) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, each = stretch_length(n), before = 0, own = 0;
    for (int i = warp * each + lane, end = min_int((warp + 1) * each, n); i < end; i += 32 * TOP_AHEAD) {
        int w[TOP_AHEAD];
        weights_of(w, i, end, weight);
        KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) own += w[k];
    }
    own = lanes_sum<32>(own);
    __syncthreads();                            // the last sums have been read
    if (!lane) m->sum[warp] = own;
    __syncthreads();
    for (int w = 0; w < warp; w++) before += m->sum[w];
    return before;
}

// The first i at which the weights of 0..i together reach `left`, n: there is none; *before: the
// weights of those before i.
template <class Weight>
static __device__ int crossing(int n, Weight weight, int left, int *before, TopShared *m) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, each = stretch_length(n);
    __syncthreads();
    if (!threadIdx.x) m->found[0] = n;
    int at = weight_before(n, weight, m), here = at < left && at + m->sum[warp] >= left;
    for (int i = warp * each, end = min_int(i + each, n); here && i < end; i += 32 * TOP_AHEAD) {
        int w[TOP_AHEAD];
        weights_of(w, i + lane, end, weight);
        KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) {
            int upto = at + scan_warp(w[k]);
            if (upto >= left && upto - w[k] < left) {           // true in one lane of the block
                m->found[0] = i + 32 * k + lane;
                m->found[1] = upto - w[k];
            }
            at = __shfl_sync(ALL_LANES, upto, 31);
        }
    }
    __syncthreads();
    *before = m->found[1];
    return m->found[0];
}

// Calls put(i, w, at) for every i with a weight w, at: the weights before it -> all weights.
template <class Weight, class Put>
static __device__ int spread(int n, Weight weight, Put put, TopShared *m) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, each = stretch_length(n), all = 0;
    int at = weight_before(n, weight, m);
    for (int i = warp * each, end = min_int(i + each, n); i < end; i += 32 * TOP_AHEAD) {
        int w[TOP_AHEAD];
        weights_of(w, i + lane, end, weight);
        KV_UNROLL() for (int k = 0; k < TOP_AHEAD; k++) {
            int upto = at + scan_warp(w[k]);
            if (w[k]) put(i + 32 * k + lane, w[k], upto - w[k]);
            at = __shfl_sync(ALL_LANES, upto, 31);
        }
    }
    for (int w = 0; w < TOP_WARPS; w++) all += m->sum[w];
    return all;
}

#endif
