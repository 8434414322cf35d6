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
