// How long the parts of a decode step take, without a model around them: the numbers of NOTES.md that --bench is too coarse for.
//   gcc -std=c11 -O3 -fopenmp -o /tmp/steps data/steps.c -lm && /tmp/steps [METHOD [HEAD_DIM [ROWS [LAYERS [BUDGET]]]]]
// Prints attention over ROWS rows (32768) of LAYERS layers (16, or 8 of wide heads), best of 8 (of 400 where all fits in the caches), in
// ns an element of K and V; for loopserve a selection and the rows it chooses, as a share of full attention; for lychee the selection of all indexed layers, best and mean of 40 steps; and what unpacking PATS rows that
// lie in L1 costs (one thread).
//   /tmp/steps prefill METHOD [HEAD_DIM [ROWS]]
// Prefill attention of the last 512 tokens of ROWS (4096), of one layer; median and best of 15.
//   /tmp/steps turns METHOD,.. [HEAD_DIM [ROWS [LAYERS [TURNS [HEADS]]]]]
// Attention of several methods in turns in one process, because speeds measured one after the other on shared cores cannot be compared:
// layer by layer: medians of TURNS turns (31), and the median and the quartiles of each turn's ratio to the first method.
#define KVCOMP_NO_MAIN
#include "../kvcomp.c"

static void time_attention(Session *s, int N, float *q, float *out) {
    const Config *c = s->c;
    double best = 1e9;
    for (int i = 0; i < (N * c->L > 1 << 14 ? 8 : 400); i++) {
        double t = now();
        for (int l = 0; l < c->L; l++) attn_decode(s, l, out, q);
        best = fmin(best, now() - t);
    }
    printf("attention: %.4f ns an element of K and V, %d rows of %d layers\n", best * 1e9 / ((double)N * c->G * c->D * 2 * c->L), N, c->L);
}
static void time_select(Session *s, const float *q) {
    double best = 1e9, sum = 0;
    for (int i = 0; i < 40; i++) {
        double t = now();
        for (int l = 2; l < s->c->L; l++) s->part[0].m->select(s, s->part[0].ms, l, q + (size_t)i * s->c->H * s->c->D);
        t = now() - t;
        best = fmin(best, t); sum += t;
    }
    printf("selection: best %.3f ms, mean %.3f ms, %d layers\n", best * 1e3, sum / 40 * 1e3, s->c->L - 2);
}
static int by_value(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }
static void time_loopserve(Session *s, int N, const float *q, float *out) {
    enum { ROUNDS = 15 };
    LoopServe *x = s->part[0].ms;
    const Config *c = s->c;
    double ms[4][ROUNDS];                     // a step of full attention, a selection, the steps after it; (selection + steps) / as many of full attention
    x->ring_from = x->prompt_end = N - x->obs;
    for (int l = 0; l < c->L; l++) for (int i = 0; i < x->obs; i++) ring_put(s, x, l, N - x->obs + i, q + (size_t)i * c->H * c->D);
    for (int r = 0; r < ROUNDS; r++) {
        view_all(s);
        for (int k = 0; k < 3; k++) {
            double t = now();
            for (int i = 0; i < (k == 2 ? x->interval : 1); i++)
                for (int l = 0; l < c->L; l++) if (k == 1) loop_select(s, x, l); else attn_decode(s, l, out, q);
            ms[k][r] = (now() - t) * 1e3;
        }
        ms[3][r] = (ms[1][r] + ms[2][r]) / (x->interval * ms[0][r]);
    }
    for (int k = 0; k < 4; k++) qsort(ms[k], ROUNDS, sizeof **ms, by_value);
    printf("loopserve: full attention %.1f ms, a selection %.1f, %d steps of chosen rows %.1f; together %.2f of as many steps of full (%.2f to %.2f); medians of %d rounds\n",
           ms[0][ROUNDS / 2], ms[1][ROUNDS / 2], x->interval, ms[2][ROUNDS / 2], ms[3][ROUNDS / 2], ms[3][0], ms[3][ROUNDS - 1], ROUNDS);
}
static void time_unpack(void) {
    static unsigned char p[1 << 14];
    static _Alignas(64) uint16_t h[4096];     // as tiles are
    for (int w = 8; w <= 14; w += 2) {
        double best = 1e9;
        for (int i = 0; i < 2000; i++) {
            double t = now();
            for (int k = 0; k < 20; k++) unpack_f16(h, p + k % 3 * 8, 4096, w, 0);
            best = fmin(best, now() - t);
        }
        printf("unpacking: %.3f ns for 32 elements of %d bits\n", best * 1e9 / 20 / 128, w);
    }
}
// A session of a method with N rows in every head. heads: query heads of its 8 KV heads.
static Session *rows_of(const char *method, int D, int N, int L, int heads) {
    char err[512], shape[64];
    Options *o = options_new();
    options_set(o, "ctx-size", "0", err);
    snprintf(shape, sizeof shape, "L%d,H%d,G8,D%d,C64,F64,V64", L, heads, D);
    Config *c = config_synthetic(shape);
    Session *s = session_try(c, weights_synthetic(c, 1), o, method, err);
    if (!s) { fprintf(stderr, "%s\n", err); exit(2); }
    s->forward = fill_pass;
    prefill(s, random_ids(N, c->V), N);
    s->base = N - 1;
    return s;
}
static double sorted_at(double *x, int n, double share) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[(int)(share * (n - 1))];
}
// The time of one thread is its own: others that share its core do not count.
static double cpu_time(void) {
    struct timespec t;
    if (n_threads() > 1) return now();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
static void time_turns(char *list, int D, int N, int L, int turns, int heads) {
    Session *s[8];
    const char *name[8];
    int n = 0;
    for (char *m = strtok(list, ","); m && n < 8; m = strtok(NULL, ",")) { name[n] = m; s[n++] = rows_of(m, D, N, L, heads); }
    size_t row = (size_t)heads * D;
    float *q = xmalloc(row * sizeof *q), *out = xmalloc(row * sizeof *out);
    double *ms = xmalloc((size_t)(2 * n * turns) * sizeof *ms), *ratio = ms + n * turns;
    for (size_t i = 0; i < row; i++) q[i] = (float)((int)(mix64(i) % 2001) - 1000) * 0.001f;
    for (int t = -1; t < turns; t++) {                          // turn -1 warms up
        double sum[8] = {0};
        for (int l = 0; l < L; l++)
            for (int i = 0; i < n; i++) {
                double a = cpu_time();
                attn_decode(s[i], l, out, q);
                sum[i] += (cpu_time() - a) * 1e3;
            }
        for (int i = 0; i < n && t >= 0; i++) {
            ms[i * turns + t] = sum[i];
            ratio[i * turns + t] = sum[i] / sum[0];
        }
    }
    for (int i = 0; i < n; i++) {
        double *m = ms + i * turns, *r = ratio + i * turns, mid = sorted_at(m, turns, .5);
        printf("%-8s head_dim %d, %d rows, %d layers: %8.3f ms (best %.3f), %.3f (%.3f to %.3f) of %s's; %.1f GB/s\n", name[i], D, N, L, mid, m[0], sorted_at(r, turns, .5),
               sorted_at(r, turns, .25), sorted_at(r, turns, .75), name[0], (double)kv_bytes(s[i]) / mid * 1e-6);
    }
}
static void time_prefill(const char *method, int D, int N) {
    enum { T = 512, TURNS = 15 };
    Session *s = rows_of(method, D, N, 1, 32);
    size_t n = (size_t)T * 32 * D;
    float *q = xmalloc(n * sizeof *q), *out = xmalloc(n * sizeof *out);
    double ms[TURNS];
    for (size_t i = 0; i < n; i++) q[i] = (float)((int)(mix64(i) % 2001) - 1000) * 0.001f;
    s->base = N - T;
    for (int i = 0; i < TURNS; i++) {
        double a = cpu_time();
        attn_prefill(s, 0, out, q, 0, T);
        ms[i] = (cpu_time() - a) * 1e3;
    }
    double mid = sorted_at(ms, TURNS, .5);
    printf("%-8s head_dim %d, %d tokens of %d rows: %.3f ms (best %.3f)\n", method, D, T, N, mid, ms[0]);
}
int main(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "prefill")) {
        time_prefill(argv[2], argc > 3 ? atoi(argv[3]) : 64, argc > 4 ? atoi(argv[4]) : 4096);
        return 0;
    }
    if (argc > 2 && !strcmp(argv[1], "turns")) {
        int D = argc > 3 ? atoi(argv[3]) : 64, N = argc > 4 ? atoi(argv[4]) : 32768, L = argc > 5 ? atoi(argv[5]) : D > 64 ? 4 : 8;
        time_turns(argv[2], D, N, L, argc > 6 ? atoi(argv[6]) : 31, argc > 7 ? atoi(argv[7]) : 32);
        return 0;
    }
    const char *method = argc > 1 ? argv[1] : "full";
    int D = argc > 2 ? atoi(argv[2]) : 64, N = argc > 3 ? atoi(argv[3]) : 32768, L = argc > 4 ? atoi(argv[4]) : D > 64 ? 8 : 16;
    char err[512], shape[64];
    Options *o = options_new();
    options_set(o, "ctx-size", "0", err);
    if (argc > 5) options_set(o, "budget", argv[5], err);
    snprintf(shape, sizeof shape, "L%d,H32,G8,D%d,C64,F64,V64", L, D);
    Config *c = config_synthetic(shape);
    Weights *w = weights_synthetic(c, 1);
    Session *s = session_try(c, w, o, method, err);
    if (!s) { fprintf(stderr, "%s\n", err); return 2; }
    s->forward = fill_pass;
    prefill(s, random_ids(N, c->V), N);
    s->base = N - 1;
    size_t row = (size_t)c->H * c->D;
    float *q = xmalloc(40 * row * sizeof *q), *out = xmalloc(row * sizeof *out);
    for (size_t i = 0; i < 40 * row; i++) q[i] = (float)((int)(mix64(i) % 2001) - 1000) * 0.001f;
    time_attention(s, N, q, out);
    if (!strcmp(method, "lychee")) time_select(s, q);
    if (!strncmp(method, "loopserve", 9)) time_loopserve(s, N, q, out);
    if (!strcmp(method, "pats")) { unpack_choose(); time_unpack(); }
    return 0;
}
