// How long the parts of a decode step take, without a model around them, for what --bench is too coarse.
//
//     make NVCC= kvcomp && gcc -std=c11 -O3 -fopenmp -Ibuild -o build/steps data/steps.c build/cpu/lib/kernels*.o -lm
//
// build/steps [METHOD [HEAD_DIM [ROWS [LAYERS [BUDGET]]]]]
//     Attention over ROWS rows (32768) of LAYERS layers (16, or 8 of wide heads), best of 8 (of 400
//     where all fits in the caches), in ns an element of K and V. For loopserve also a selection and
//     the steps over the rows it chooses, as a share of full attention; for lychee the selection of
//     all indexed layers, best and mean of 40 steps; for pats what unpacking rows in L1 costs one
//     thread.
// build/steps prefill METHOD [HEAD_DIM [ROWS]]
//     Prefill attention of the last 512 tokens of ROWS (4096), of one layer: median and best of 15.
// build/steps turns METHOD,.. [HEAD_DIM [ROWS [LAYERS [TURNS [HEADS]]]]]
//     Attention of several methods in turns, layer by layer, in one process, because speeds that are
//     measured one after the other on shared cores cannot be compared: medians of TURNS turns (31),
//     and the median and the quartiles of each turn's ratio to the first method.
//
// There are 8 KV heads, and 32 query heads unless HEADS says otherwise.
#define KVCOMP_NO_MAIN
#include "../lib/base.c"
#include "../lib/checkpoint.c"
#include "../lib/tokenizer.c"
#include "../lib/template.c"
#include "../kvcomp.c"
#include "../app/options.c"
#include "../app/terminal.c"
#include "../app/chat.c"
#include "../app/measure.c"
#include "../app/page.c"
#include "../app/main.c"

// ---- sessions and clocks

// A session of a method with `rows` rows of made-up keys and values in every head. budget: NULL is the
// method's own.
static Session *filled(const char *method, int D, int rows, int layers, int heads, const char *budget) {
    char err[512], shape[64];
    Options *o = options_of_program();
    options_set(o, "ctx-size", "0", err);
    if (budget) options_set(o, "budget", budget, err);
    snprintf(shape, sizeof shape, "L%d,H%d,G8,D%d,C64,F64,V64", layers, heads, D);
    Config *c = config_synthetic(shape);
    Session *s = session_try(c, weights_synthetic(c, 1), o, method, err);
    if (!s) die(EXIT_USAGE, "steps: %s", err);
    s->forward = fill_pass;
    prefill(s, random_ids(rows, c->V), rows);
    s->base = rows - 1;         // a decode step's query stands at the last row
    return s;
}

// x (n): made-up queries, in -1 to 1.
static float *queries(size_t n) {
    float *x = xmalloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = (float)((int)(mix64(i) % 2001) - 1000) * 0.001f;
    return x;
}

// The time of one thread is its own: others that share its core do not count.
static double clock_of_work(void) {
    struct timespec t;
    if (n_threads() > 1) return now();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// x (n) is sorted -> the value below which `share` of them lie.
static double quantile(double *x, int n, double share) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[(int)(share * (n - 1))];
}

// ---- one method

static void time_attention(Session *s, int rows, const float *q, float *out) {
    const Config *c = s->c;
    double best = 1e9, elements = (double)rows * c->G * c->D * 2 * c->L;
    int rounds = rows * c->L > 1 << 14 ? 8 : 400;
    for (int i = 0; i < rounds; i++) {
        double t = now();
        for (int l = 0; l < c->L; l++) attn_decode(s, l, out, q);
        best = fmin(best, now() - t);
    }
    printf("attention: %.4f ns an element of K and V, %d rows of %d layers\n", best * 1e9 / elements,
           rows, c->L);
}

// The selection of all layers but the first two, which lychee reads whole. q (40,H,D).
static void time_select(Session *s, const float *q) {
    const Config *c = s->c;
    Part *p = &s->part[0];
    double best = 1e9, sum = 0;
    for (int i = 0; i < 40; i++) {
        double t = now();
        for (int l = 2; l < c->L; l++) p->m->select(s, p->ms, l, q + (size_t)i * c->H * c->D);
        t = now() - t;
        best = fmin(best, t);
        sum += t;
    }
    printf("selection: best %.3f ms, mean %.3f ms, %d layers\n", best * 1e3, sum / 40 * 1e3, c->L - 2);
}

// Whole cycles of LoopServe: a selection, and the steps that read what it chose. q (obs,H,D) at least.
static void time_loopserve(Session *s, int rows, const float *q, float *out) {
    enum { ROUNDS = 15 };
    const Config *c = s->c;
    LoopServe *x = s->part[0].ms;
    double full[ROUNDS], selection[ROUNDS], steps[ROUNDS], share[ROUNDS];   // ms; of as many full steps
    x->ring_from = rows - x->obs;
    x->prompt_end = x->ring_from;
    for (int l = 0; l < c->L; l++) {
        for (int i = 0; i < x->obs; i++)
            ring_put(s, x, l, x->ring_from + i, q + (size_t)i * c->H * c->D);
    }
    for (int r = 0; r < ROUNDS; r++) {
        view_all(s);
        double t0 = now();
        for (int l = 0; l < c->L; l++) attn_decode(s, l, out, q);
        double t1 = now();
        for (int l = 0; l < c->L; l++) loop_select(s, x, l);
        double t2 = now();
        for (int i = 0; i < x->interval; i++) {
            for (int l = 0; l < c->L; l++) attn_decode(s, l, out, q);
        }
        double t3 = now();
        full[r] = (t1 - t0) * 1e3;
        selection[r] = (t2 - t1) * 1e3;
        steps[r] = (t3 - t2) * 1e3;
        share[r] = (t3 - t1) / (x->interval * (t1 - t0));
    }
    printf("loopserve: full attention %.1f ms, a selection %.1f, %d steps of chosen rows %.1f; ",
           quantile(full, ROUNDS, .5), quantile(selection, ROUNDS, .5), x->interval,
           quantile(steps, ROUNDS, .5));
    printf("together %.2f of as many steps of full (%.2f to %.2f); medians of %d rounds\n",
           quantile(share, ROUNDS, .5), share[0], share[ROUNDS - 1], ROUNDS);
}

// Unpacking of 4,096 elements of PATS, which lie in L1 before and after.
static void time_unpack(void) {
    enum { ELEMENTS = 4096, CALLS = 20 };
    static unsigned char packed[1 << 14];
    static _Alignas(64) uint16_t h[ELEMENTS];       // aligned as tiles are
    for (int width = 8; width <= 14; width += 2) {
        double best = 1e9;
        for (int i = 0; i < 2000; i++) {
            double t = now();
            for (int k = 0; k < CALLS; k++) unpack_f16(h, packed + k % 3 * 8, ELEMENTS, width, 0);
            best = fmin(best, now() - t);
        }
        printf("unpacking: %.3f ns for 32 elements of %d bits\n", best * 1e9 / CALLS / (ELEMENTS / 32),
               width);
    }
}

static void time_method(const char *method, int D, int rows, int layers, const char *budget) {
    Session *s = filled(method, D, rows, layers, 32, budget);
    size_t row = (size_t)s->c->H * D;
    float *q = queries(40 * row), *out = xmalloc(row * sizeof *out);
    time_attention(s, rows, q, out);
    if (!strcmp(method, "lychee")) time_select(s, q);
    if (!strncmp(method, "loopserve", 9)) time_loopserve(s, rows, q, out);
    if (!strcmp(method, "pats")) time_unpack();
}

// ---- a prefill, and several methods in turns

static void time_prefill(const char *method, int D, int rows) {
    enum { T = 512, ROUNDS = 15 };
    Session *s = filled(method, D, rows, 1, 32, NULL);
    size_t n = (size_t)T * 32 * D;
    float *q = queries(n), *out = xmalloc(n * sizeof *out);
    double ms[ROUNDS];
    s->base = rows - T;
    for (int i = 0; i < ROUNDS; i++) {
        double t = clock_of_work();
        attn_prefill(s, 0, out, q, 0, T);
        ms[i] = (clock_of_work() - t) * 1e3;
    }
    double middle = quantile(ms, ROUNDS, .5);
    printf("%-8s head_dim %d, %d tokens of %d rows: %.3f ms (best %.3f)\n", method, D, T, rows, middle,
           ms[0]);
}

static void time_turns(char *list, int D, int rows, int layers, int turns, int heads) {
    enum { MANY = 8 };
    Session *s[MANY];
    const char *name[MANY];
    int n = 0;
    for (char *m = strtok(list, ","); m && n < MANY; m = strtok(NULL, ","), n++) {
        name[n] = m;
        s[n] = filled(m, D, rows, layers, heads, NULL);
    }
    size_t row = (size_t)heads * D;
    float *q = queries(row), *out = xmalloc(row * sizeof *out);
    double *ms = xmalloc((size_t)(n * turns) * sizeof *ms);             // (n,turns)
    double *ratio = xmalloc((size_t)(n * turns) * sizeof *ratio);       // (n,turns)
    for (int t = -1; t < turns; t++) {                                  // turn -1 warms up
        double sum[MANY] = {0};
        for (int l = 0; l < layers; l++) {
            for (int i = 0; i < n; i++) {
                double from = clock_of_work();
                attn_decode(s[i], l, out, q);
                sum[i] += (clock_of_work() - from) * 1e3;
            }
        }
        for (int i = 0; i < n && t >= 0; i++) {
            ms[i * turns + t] = sum[i];
            ratio[i * turns + t] = sum[i] / sum[0];
        }
    }
    for (int i = 0; i < n; i++) {
        double *m = ms + i * turns, *r = ratio + i * turns, middle = quantile(m, turns, .5);
        printf("%-8s head_dim %d, %d rows, %d layers: %8.3f ms (best %.3f), ", name[i], D, rows, layers,
               middle, m[0]);
        printf("%.3f (%.3f to %.3f) of %s's; %.1f GB/s\n", quantile(r, turns, .5), quantile(r, turns, .25),
               quantile(r, turns, .75), name[0], (double)kv_bytes(s[i]) / middle * 1e-6);
    }
}

// Argument i as a number; `otherwise` where there is none.
static int number_at(int argc, char **argv, int i, int otherwise) {
    return argc > i ? atoi(argv[i]) : otherwise;
}

int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "prefill")) {
        time_prefill(argv[2], number_at(argc, argv, 3, 64), number_at(argc, argv, 4, 4096));
        return 0;
    }
    if (argc > 2 && !strcmp(argv[1], "turns")) {
        int D = number_at(argc, argv, 3, 64), rows = number_at(argc, argv, 4, 32768);
        time_turns(argv[2], D, rows, number_at(argc, argv, 5, D > 64 ? 4 : 8),
                   number_at(argc, argv, 6, 31), number_at(argc, argv, 7, 32));
        return 0;
    }
    int D = number_at(argc, argv, 2, 64), rows = number_at(argc, argv, 3, 32768);
    time_method(argc > 1 ? argv[1] : "full", D, rows, number_at(argc, argv, 4, D > 64 ? 8 : 16),
                argc > 5 ? argv[5] : NULL);
    return 0;
}
