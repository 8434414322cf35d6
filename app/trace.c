// app/trace.c - the observer that writes down what every pass computes.
#include "trace.h"

// x (T,heads,D), on the host (here 1) or where the rows lie, by the name that fmt makes.
KV_PRINTF(5, 6)
static void trace_cube(Session *s, const float *x, int heads, int here, const char *fmt, ...) {
    int dim[] = { s->n_tok - s->base, heads, s->c->D };
    size_t mark = scratch_mark(s), bytes = (size_t)dim[0] * dim[1] * dim[2] * sizeof *x;
    va_list ap;
    va_start(ap, fmt);
    trace_put(s, "F32", 4, here ? x : near_here(s, x, bytes), dim, 3, fmt, ap);
    va_end(ap);
    scratch_reset(s, mark);
}

// The tokens of the pass: base, step, tokens, positions.
static void trace_tokens(Session *s) {
    Trace *x = s->trace;
    int T = s->n_tok - s->base, step = s->decoding ? s->step : -1;
    x->pass++;
    size_t mark = scratch_mark(s);
    int *n = scratch(s, (size_t)T * sizeof(int));
    trace_i32(s, &s->base, 1, 0, "base");
    trace_i32(s, &step, 1, 0, "step");
    for (int t = 0; t < T; t++) n[t] = s->tok[s->base + t].id;
    trace_i32(s, n, T, 0, "tokens");
    for (int t = 0; t < T; t++) n[t] = s->tok[s->base + t].pos;
    trace_i32(s, n, T, 0, "positions");
    scratch_reset(s, mark);
}

// The queries, and the new rows as attention reads them: keys are rotated, both are rounded.
static void trace_rows(Session *s, int l, const float *q) {
    int G = s->c->G, D = s->c->D, T = s->n_tok - s->base;
    size_t mark = scratch_mark(s), each = (size_t)T * D;
    float *head = scratch(s, each * sizeof *head), *x = scratch(s, G * each * sizeof *x);
    trace_cube(s, q, s->c->H, 0, "layer%02d.q", l);
    for (int v = 0; v < 2; v++) {
        for (int g = 0; g < G; g++) {
            const KVHead *h = kv_head(s, l, g);
            (v == OF_V ? kv_load_v : kv_load_k)(s, h, NULL, h->len - T, T, head);
            for (int t = 0; t < T; t++)
                memcpy(x + ((size_t)t * G + g) * D, head + (size_t)t * D, (size_t)D * sizeof *x);
        }
        trace_cube(s, x, G, 1, "layer%02d.%s", l, v ? "v" : "k");
    }
    scratch_reset(s, mark);
}

// The rows that query head h reads in this decode step, as tokens: those of its view that lie in the
// layer's window.
static void trace_read(Session *s, int l, int h, int *rows) {
    const KVHead *hd = kv_head(s, l, h / (s->c->H / s->c->G));
    int n = view_rows(s, l, h, rows), m = 0;
    for (int i = 0; i < n; i++) {
        int j = hd->src[rows[i]];
        if (kv_visible(s->rule, layer_window(s, l), &s->tok[s->base], s->base, &s->tok[j], j)) rows[m++] = j;
    }
    trace_i32(s, rows, m, 0, "layer%02d.qhead%02d.read", l, h);
}

// What attention read, in a decode step, and what it made.
static void trace_out(Session *s, int l, const float *out) {
    size_t mark = scratch_mark(s);
    int *rows = scratch(s, (size_t)kv_longest(s, l) * sizeof *rows);
    for (int h = 0; h < s->c->H && s->decoding; h++) trace_read(s, l, h, rows);
    trace_cube(s, out, s->c->H, 0, "layer%02d.out", l);
    scratch_reset(s, mark);
}

// The end of a pass: the tokens whose rows are held, the methods' values, the logits.
static void trace_end(Session *s) {
    int L = s->c->L;
    for (int l = 0; l < L; l++) {
        if (!traced(s, l)) continue;
        for (int g = 0; g < s->c->G; g++) {
            const KVHead *h = kv_head(s, l, g);
            trace_i32(s, h->src, h->len, 0, "layer%02d.head%02d.kept", l, g);
        }
        if (layer_acts(s, l))
            EACH_HOOK(s, p, trace) p->m->trace(s, p->ms, l);
    }
    if (!traced(s, L)) return;
    EACH_HOOK(s, p, trace) p->m->trace(s, p->ms, L);
    trace_f32(s, s->logits, s->c->V, 0, "logits");
}

// Hook watch of the observer that writes traces.
static void trace_watch(Session *s, void *ms, int moment, int l, const float *x) {
    (void)ms;
    if (moment == WATCH_TOKENS) trace_tokens(s);
    if (moment == WATCH_END) trace_end(s);
    if (!traced(s, l)) return;
    if (moment == WATCH_KEYS) trace_cube(s, x, s->c->G, 0, "layer%02d.k_before_rope", l);    // behind bias and norm
    if (moment == WATCH_ROWS) trace_rows(s, l, x);
    if (moment == WATCH_OUT) trace_out(s, l, x);
}

static const Method trace_observer = { .name = "trace", .watch = trace_watch };

// From now on the passes of this session are written down in x; NULL: not any more.
void trace_session(Session *s, Trace *x) {
    if (s->trace) unobserve(s, &trace_observer);
    s->trace = x;
    if (x) observe(s, &trace_observer);
}

void trace_file_put(Trace *x, const char *name, const char *type, size_t size, const void *data, const int *dim,
                    int dims) {
    TraceFile *file = (TraceFile *)x;           // whose first member it is
    char full[200];
    snprintf(full, sizeof full, "pass%04d.%s", x->pass - 1, name);
    safe_write(&file->out, full, type, size, data, dim, dims);
}
