// Doors for tests.c, which cannot see the static functions of another file: kvcomp.cu includes this at its end,
// when it is compiled with KVCOMP_TEST.
extern "C" {
// `bytes` bytes in device memory; to be given back with cuda_drop.
void *cuda_put(const void *host, size_t bytes) {
    char *p = device_new(bytes);
    upload(p, host, bytes);
    return p;
}

void cuda_get(void *host, const void *dev, size_t bytes) { download(host, dev, bytes); }

void cuda_drop(void *dev) { device_free(dev); }

// Bytes of K and V rows that the session has really asked for.
size_t cuda_held(const Session *s) {
    size_t n = 0, row = s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
    for (int i = 0; i < s->c->L * s->c->G; i++)
        n += s->dev->held[i].cap * row + 2 * s->dev->held[i].pk_bytes;
    return n;
}

// One operation on y (ny), x (nx) of T rows, all on the host: 'm' y = W x, 'p' y += W x, 'h' norm,
// 's' y = silu(gate) up of x (T,2n).
void cuda_math(Session *s, char op, float *y, size_t ny, const float *x, size_t nx,
               const Tensor *w, int T) {
    float *dy = (float *)cuda_put(y, ny * sizeof(float));
    float *dx = (float *)cuda_put(x, nx * sizeof(float));
    Linear p = { dy, w, NULL };
    if (op == 'm' && T == 1) gemv_cuda<GEMV_STORE>(s, dx, &p, 1, NULL);
    if (op == 'p' && T == 1) gemv_cuda<GEMV_ADD>(s, dx, &p, 1, NULL);
    if (strchr("mp", op) && T > 1) {
        Product m = products(s, ROOM_PRODUCT, rows_plain(dx, w->cols), T, &p, 1);
        if (op == 'm') KV_CUDA(cudaMemsetAsync(dy, 0, ny * sizeof(float), kv_stream));
        product_add(s, m, p);
    }
    if (op == 'h') rows_launch(s, dy, NULL, rows_norm(s, dx, w), T, DT_F32);
    if (op == 's') {
        Linear in[2] = { p, p };
        rows_launch(s, dy, NULL, rows_swiglu(s, { dx, NULL, T, (int)(nx / T) }, in), T, DT_F32);
    }
    download(y, dy, ny * sizeof(float));
    cuda_drop(dy);
    cuda_drop(dx);
}

// A matrix as products read it: its numbers to `to`, what they are to be multiplied by in *scale -> their
// dtype.
int cuda_matrix(Session *s, const Tensor *t, void *to, float *scale) {
    const Copied *c;
    matrices_of(s, &t, 1, &c);
    download(to, c->dev, tensor_bytes(t));
    *scale = c->scale;
    return c->dtype;
}

size_t cuda_chunk(size_t total) { return chunk_rows(total, 512); }

// Tokens of a pass from which on it goes through prefill_kernel; 0: what they are outside of tests.
void cuda_tensor_min(int n) { tensor_min = n ? n : (int)TC_MIN; }

// 1: the session's prefills have q and P in f32 from now on, as with --exact.
void cuda_exact(Session *s, int on) { s->dev->base->exact = on; }

// seek_shared from now on; -1: what it is outside of tests.
void cuda_seek_shared(int bytes) { seek_shared = bytes < 0 ? (int)SEEK_SHARED : bytes; }

int cuda_graphs(const Session *s) { return s->dev->replays; }

// One warp, one operation of "what only PTX can say" (lib/cuda.h), with registers as the test gives
// them. in and out: words of the lanes, as many a lane as the operation has.
//   'm', 'b'   in (32,6): a, b; d (32,4): becomes d + a b, in f16 or bf16
//   'l', 't'   in (128): four (8,8) matrices; out (32,4): ldmatrix_x4, ldmatrix_x4_trans
//   'o'        in (32,4): out (32,4) = load_once
static __global__ void fragment_kernel(char op, const unsigned *in, float *d, unsigned *out) {
    __shared__ __align__(16) unsigned tile[128];
    int lane = threadIdx.x;
    if (op == 'm') mma_16x8x16<DT_F16>(d + lane * 4, in + lane * 6, in + lane * 6 + 4);
    if (op == 'b') mma_16x8x16<DT_BF16>(d + lane * 4, in + lane * 6, in + lane * 6 + 4);
    if (op == 'l' || op == 't') {
        for (int i = lane; i < 128; i += 32) tile[i] = in[i];
        __syncwarp();
        if (op == 'l') ldmatrix_x4(out + lane * 4, tile + lane * 4);
        else           ldmatrix_x4_trans(out + lane * 4, tile + lane * 4);
    }
    if (op == 'o') load_once(out + lane * 4, in + lane * 4);
}

// Runs fragment_kernel: n_in and n_out words.
void cuda_fragment(char op, const unsigned *in, int n_in, float d[128], unsigned *out, int n_out) {
    unsigned *di = (unsigned *)cuda_put(in, n_in * sizeof *in);
    float *dd = (float *)cuda_put(d, 128 * sizeof *d);
    unsigned *dout = (unsigned *)cuda_put(out, n_out * sizeof *out);
    KV_LAUNCH(fragment_kernel, 1, 32, 0, op, di, dd, dout);
    download(d, dd, 128 * sizeof *d);
    download(out, dout, n_out * sizeof *out);
    cuda_drop(di);
    cuda_drop(dd);
    cuda_drop(dout);
}

// Each of 64 threads copies its 16 bytes of `in` (3,64,4) to shared memory three times, as two groups of
// one copy and of two. out (4,64,4): the first copy before any wait, the first after the older group has
// been waited for, the others after both. What a thread reads is its neighbour's.
static __global__ void copy_kernel(const uint4 *in, uint4 *out) {
    __shared__ uint4 tile[3][64];
    int i = threadIdx.x, next = (i + 1) % 64;
    for (int c = 0; c < 3; c++) tile[c][i] = { 7, 7, 7, 7 };
    __syncthreads();
    copy16_async(&tile[0][i], in + i);
    copy_commit();
    copy16_async(&tile[1][i], in + 64 + i);
    copy16_async(&tile[2][i], in + 128 + i);
    copy_commit();
    __syncthreads();
    out[i] = tile[0][next];
    __syncthreads();
    copy_wait<1>();
    __syncthreads();
    out[64 + i] = tile[0][next];
    copy_wait<0>();
    __syncthreads();
    out[128 + i] = tile[1][next];
    out[192 + i] = tile[2][next];
}

// Runs copy_kernel: in (3,64,4), out (4,64,4) words.
void cuda_copies(const unsigned *in, unsigned *out) {
    uint4 *di = (uint4 *)cuda_put(in, 768 * sizeof *in), *dout = (uint4 *)cuda_put(out, 1024 * sizeof *out);
    KV_LAUNCH(copy_kernel, 1, 64, 0, di, dout);
    download(out, dout, 1024 * sizeof *out);
    cuda_drop(di);
    cuda_drop(dout);
}

// Dynamic shared memory of a block in bytes, and the kernel, for kernels of every carve function that template
// arguments decide on. 0: there is no i-th one.
size_t cuda_block_bytes(int i, const char **kernel) {
    GemvShared gemv;
    DecodeShared decode;
    TensorShared tensor;
    const struct {
        const char *kernel;
        size_t bytes;
    } known[] = {
        { "gemv_kernel<2, 0>", gemv_carve(&gemv, NULL) },
        { "qkv_kernel<2>", gemv_carve(&gemv, NULL) },
        { "decode_kernel<1, 128, 1>", decode_carve<ROW_F16, 128, 1>(&decode, NULL) },
        { "decode_kernel<2, 64, 2>", decode_carve<ROW_BF16, 64, 2>(&decode, NULL) },
        { "decode_kernel<3, 128, 1>", decode_carve<ROW_Q8, 128, 1>(&decode, NULL) },
        { "decode_kernel<3, 64, 2>", decode_carve<ROW_Q8, 64, 2>(&decode, NULL) },
        { "decode_kernel<5, 128, 1>", decode_carve<DECODE_PATS, 128, 1>(&decode, NULL) },
        { "decode_kernel<5, 64, 2>", decode_carve<DECODE_PATS, 64, 2>(&decode, NULL) },
        { "prefill_kernel<1, 128, 0>", tensor_carve<128, 0>(&tensor, NULL) },
        { "prefill_kernel<1, 64, 1>", tensor_carve<64, 1>(&tensor, NULL) },
        { "prefill_kernel<1, 256, 0>", tensor_carve<256, 0>(&tensor, NULL) },
        { "window_kernel<1, 128, 0>", 2 * WindowShape<DT_F16, 128>::SLOT },
        { "window_kernel<2, 64, 1>", 2 * WindowShape<DT_BF16, 64>::SLOT },
    };

    if (i >= (int)(sizeof known / sizeof *known)) return 0;
    *kernel = known[i].kernel;
    return known[i].bytes;
}

// The k best of row (V), which lies on the host.
void cuda_best(Session *s, const float *row, int V, int k, BestLogits *out) {
    float *x = (float *)cuda_put(row, V * sizeof *row);
    best_logits_cuda(s, x, V, k);
    KV_CUDA(cudaStreamSynchronize(kv_stream));
    *out = *s->dev->picks;
    cuda_drop(x);
}

// 1: what room() hands out again is NaN, with cuda_poison.
int cuda_stale(Session *s) {
    unsigned x = 7;
    upload(room<unsigned>(s, ROOM_LIST, 1), &x, sizeof x);
    download(&x, room<unsigned>(s, ROOM_LIST, 1), sizeof x);
    return x == 0xffffffffu;
}

// 1: from now on the launches of a step go one by one; 0: as a graph again.
void cuda_single_launches(Session *s, int single) { graph_drop(s->dev, single); }
}
