// What LoopServe's motivation claims about attention, measured on the shipped model: Observations 1 to 4
// (Fig. 1 c, 1 d, 2 b, 2 c) and Fig. 4. The rows of every softmax matrix are kept, so texts are short.
// --eval FILE has the texts (30 needles of models/tiny_tasks.py), of which Observations 1 to 3 take the first 12;
// -m DIR measures another model, --eval-items N takes fewer texts for Observation 4.
//   make single && gcc -std=c11 -O2 -march=native -fopenmp -o build/lines data/lines.c -lm && build/lines
#define KVCOMP_NO_MAIN
#include "../kvcomp_single.c"           // the whole program: make single

enum {
    MAX_TOKENS = 800,
    TEXTS = 12,                 // of Observations 1 to 3
    LENGTH = 400,               // tokens of these texts that are looked at
    WINDOW = 32,                // last queries of a prompt, as SnapKV's
    BLOCK = 16,                 // tokens of a block of Fig. 4
    PROMPT = 512, OUTPUT = 256, // tokens of Fig. 4's input and output
    BLOCKS = OUTPUT / BLOCK,
};

// The softmax rows of the dialogue: (L H, MAX_TOKENS, MAX_TOKENS), row and column. They stand here,
// because a reset session forgets what a method's state held.
static float *attention;

static float *matrix(int head) {
    return attention + (size_t)head * MAX_TOKENS * MAX_TOKENS;
}

// Hook commit of a method that keeps everything: writes down the softmax rows of this pass's queries
// q (T,H,D) in layer l.
static void watcher_commit(Session *s, void *ms, int l, const float *q, int T) {
    (void)ms;
    int H = s->c->H, D = s->c->D, R = H / s->c->G, N = s->n_tok;
    if (l == s->c->L) return;
    if (N > MAX_TOKENS) die(EXIT_RUN, "lines: %d tokens, at most %d", N, MAX_TOKENS);
    size_t mark = scratch_mark(s);
    float *k = scratch(s, (size_t)N * D * sizeof *k);
    for (int h = 0; h < H; h++) {
        kv_load_k(s, kv_head(s, l, h / R), NULL, 0, N, k);
        for (int t = 0; t < T; t++) {
            float *row = matrix(l * H + h) + (size_t)(s->base + t) * MAX_TOKENS, sum = 0, top = -INFINITY;
            int seen = s->base + t + 1;
            for (int c = 0; c < seen; c++) {
                row[c] = dot_f32(q + ((size_t)t * H + h) * D, k + (size_t)c * D, D) / sqrtf((float)D);
                top = fmaxf(top, row[c]);
            }
            for (int c = 0; c < seen; c++) sum += row[c] = expf(row[c] - top);
            for (int c = 0; c < seen; c++) row[c] /= sum;
        }
    }
    scratch_reset(s, mark);
}

// Hook open: commit is given every query of a pass.
static int watcher_open(Session *s, void *ms) {
    (void)ms;
    s->queries = INT_MAX;
    return 0;
}

static const Method watcher = {
    .name = "watcher", .wants = KV_QUERY, .state = 1, .open = watcher_open, .commit = watcher_commit,
};

// ---- lines

// Reads a message into an empty dialogue.
static void read_message_alone(App *a, const char *text) {
    record_clear(a);
    session_reset(a->s);
    play_prefill(a, text);
}

// Marks the eta 2n heaviest lines of the block a[first..first+n) x [first..first+n): line (2n) has the
// columns, then the diagonals by their offset.
static void heavy_lines(const float *a, int first, int n, double eta, char *line) {
    float weight[2 * MAX_TOKENS] = { 0 };
    int idx[2 * MAX_TOKENS];
    for (int r = 0; r < n; r++) {
        for (int c = 0; c <= r; c++) {
            float x = a[(size_t)(first + r) * MAX_TOKENS + first + c];
            weight[c] += x;
            weight[n + r - c] += x;
        }
    }
    int k = top_k(weight, 2 * n, (int)(eta * 2 * n), idx);
    memset(line, 0, 2 * n);
    for (int i = 0; i < k; i++) line[idx[i]] = 1;
}

// The share of the attention of the first n rows that lies on the lines.
static double on_lines(const float *a, int n, const char *line) {
    double sum = 0;
    for (int r = 0; r < n; r++) {
        for (int c = 0; c <= r; c++) {
            if (line[c] || line[n + r - c]) sum += a[(size_t)r * MAX_TOKENS + c];
        }
    }
    return sum / n;
}

// Observations 1 to 3 on the texts' matrices lines: marked (TEXTS, heads, 2 LENGTH) is room.
static void observe_lines(App *a, const EvalRun *e) {
    static const double eta[] = { .05, .1, .2, .3 };
    int heads = a->c->L * a->c->H;
    char *mark[4], half[2][MAX_TOKENS];
    double share[4] = { 0 }, next[4] = { 0 };
    for (int i = 0; i < 4; i++) mark[i] = xcalloc((size_t)TEXTS * heads, 2 * LENGTH);
    for (int text = 0; text < TEXTS; text++) {
        read_message_alone(a, e->item[text].turn[0].user);
        if (a->s->n_tok < LENGTH) die(EXIT_RUN, "lines: a text of %d tokens", a->s->n_tok);
        for (int h = 0; h < heads; h++) {
            for (int i = 0; i < 4; i++) {
                char *line = mark[i] + ((size_t)text * heads + h) * 2 * LENGTH;
                int both = 0, second = 0, m = LENGTH / 2;
                heavy_lines(matrix(h), 0, LENGTH, eta[i], line);
                share[i] += on_lines(matrix(h), LENGTH, line) / TEXTS / heads;
                heavy_lines(matrix(h), 0, m, eta[i], half[0]);
                heavy_lines(matrix(h), m, m, eta[i], half[1]);
                for (int j = 0; j < 2 * m; j++) {
                    both += half[0][j] && half[1][j];
                    second += half[1][j];
                }
                next[i] += (double)both / second / TEXTS / heads;
            }
        }
    }

    for (int i = 0; i < 4; i++) {
        double overlap = 0;
        int below = 0;
        for (int h = 0; h < heads; h++) {
            double sum = 0;
            for (int x = 0; x < TEXTS; x++) {
                for (int y = 0; y < x; y++) {
                    const char *p = mark[i] + ((size_t)x * heads + h) * 2 * LENGTH;
                    const char *q = mark[i] + ((size_t)y * heads + h) * 2 * LENGTH;
                    int both = 0, any = 0;
                    for (int j = 0; j < 2 * LENGTH; j++) {
                        both += p[j] && q[j];
                        any += p[j] || q[j];
                    }
                    sum += (double)both / any;
                }
            }
            sum /= TEXTS * (TEXTS - 1) / 2;
            overlap += sum / heads;
            below += sum < .5;
        }
        printf("lines %.2f: attention_on_them %.3f, overlap_of_inputs %.3f, heads_below_half %d of %d, overlap_of_halves %.3f\n",
               eta[i], share[i], overlap, below, heads, next[i]);
    }
    for (int i = 0; i < 4; i++) free(mark[i]);
}

// ---- important tokens

// Marks the B of the first n columns that rows [from,to) of all heads attend to most.
static void important(int heads, int n, int from, int to, int B, char *mark) {
    float weight[MAX_TOKENS] = { 0 };
    int idx[MAX_TOKENS];
    for (int h = 0; h < heads; h++) {
        for (int r = from; r < to; r++) {
            const float *row = matrix(h) + (size_t)r * MAX_TOKENS;
            for (int c = 0; c < n && c <= r; c++) weight[c] += row[c];
        }
    }
    int k = top_k(weight, n, B, idx);
    memset(mark, 0, n);
    for (int i = 0; i < k; i++) mark[idx[i]] = 1;
}

static double common(const char *x, const char *y, int n, int B) {
    int both = 0;
    for (int i = 0; i < n; i++) both += x[i] && y[i];
    return (double)both / B;
}

// Observation 4: tokens chosen by the last window of the prompt against those the answer attends to.
static void observe_window(App *a, const EvalRun *e) {
    static const char *place[] = { "begin", "middle", "end" };
    double sum[3] = { 0 };
    int count[3] = { 0 }, heads = a->c->L * a->c->H;
    char guess[MAX_TOKENS], truth[MAX_TOKENS];
    for (int i = 0; i < (int)arrlen(e->item); i++) {
        const EvalTurn *t = &e->item[i].turn[0];
        if (t->position < 0 || !t->answers) continue;
        read_message_alone(a, t->user);
        int n = a->s->n_tok, B = n / 10, *reply = gold_ids(a, t), m = (int)arrlen(reply);
        for (int k = 0; k < m; k++) decode(a->s, reply[k]);
        important(heads, n, n - WINDOW, n, B, guess);
        important(heads, n, n, n + m, B, truth);
        sum[t->position] += common(guess, truth, n, B);
        count[t->position]++;
        arrfree(reply);
    }
    for (int p = 0; p < 3; p++)
        printf("question at the %s: overlap_with_answer %.3f (%d texts)\n", place[p], sum[p] / count[p], count[p]);
}

// Fig. 4, on one stretch of a text, ids (PROMPT + OUTPUT), of which the first PROMPT are the input: how much of what the
// whole output attends to is found by the input's last block (*last), by a block of the input and of the output (means);
// and what blocks of the output 1, 2, 4 and 8 apart share (means).
static void observe_stretch(App *a, const int *ids, double *last, double *input, double *output, double apart[4]) {
    char truth[MAX_TOKENS], guess[MAX_TOKENS], out[BLOCKS][MAX_TOKENS];
    int heads = a->c->L * a->c->H, B = PROMPT / 10;
    session_reset(a->s);
    prefill(a->s, ids, PROMPT);
    for (int i = 0; i < OUTPUT; i++) decode(a->s, ids[PROMPT + i]);

    important(heads, PROMPT, PROMPT, PROMPT + OUTPUT, B, truth);
    for (int b = 1; b <= BLOCKS; b++) {
        important(heads, PROMPT, PROMPT - b * BLOCK, PROMPT - (b - 1) * BLOCK, B, guess);
        *input += common(guess, truth, PROMPT, B) / BLOCKS;
        if (b == 1) *last = common(guess, truth, PROMPT, B);
    }
    for (int b = 0; b < BLOCKS; b++) {
        important(heads, PROMPT, PROMPT + b * BLOCK, PROMPT + (b + 1) * BLOCK, B, out[b]);
        *output += common(out[b], truth, PROMPT, B) / BLOCKS;
    }
    for (int i = 0; i < 4; i++)
        for (int b = 0, d = 1 << i; b + d < BLOCKS; b++)
            apart[i] += common(out[b], out[b + d], PROMPT, B) / (BLOCKS - d);
}

// Fig. 4 on every stretch of the text -f, and the means over them.
static void observe_blocks(App *a, const char *path) {
    char why[256];
    size_t size;
    double last = 0, input = 0, output = 0, apart[4] = { 0 };
    int above_last = 0, nearest_first = 0;
    char *text = read_bounded(path, MOST_TEXT, &size, why);
    if (!text) die(EXIT_USAGE, "lines: %s", why);
    int *ids = encode_at(a->tok, text, size, 0, 1, NULL), n = (int)arrlen(ids) / (PROMPT + OUTPUT);
    if (!n) die(EXIT_USAGE, "lines: %s is too short", path);
    for (int i = 0; i < n; i++) {
        double l = 0, in = 0, out = 0, d[4] = { 0 };
        observe_stretch(a, ids + i * (PROMPT + OUTPUT), &l, &in, &out, d);
        last += l / n;
        input += in / n;
        output += out / n;
        for (int k = 0; k < 4; k++) apart[k] += d[k] / n;
        above_last += out > l;
        nearest_first += d[0] > d[1] && d[0] > d[2] && d[0] > d[3];
    }
    printf("last block of the input: overlap_with_output %.3f\n", last);
    printf("%d blocks of the input: overlap_with_output %.3f; of the output: %.3f\n", BLOCKS, input, output);
    for (int k = 0; k < 4; k++) printf("blocks of the output %d apart: overlap %.3f\n", 1 << k, apart[k]);
    printf("of %d stretches: output above the last block of the input in %d, neighbours share most in %d\n", n,
           above_last, nearest_first);
    arrfree(ids);
    free(text);
}

int main(int argc, char **argv) {
    App a = { .o = options_of_program() };
    EvalRun few = { 0 }, many = { 0 };
    for (int i = 1; i < argc; ) i += parse_arg(a.o, argc, argv, i);
    open_model(&a);
    open_tokenizer(&a, 1);
    open_session(&a);
    attention = xcalloc((size_t)a.c->L * a.c->H * MAX_TOKENS * MAX_TOKENS, sizeof *attention);
    observe(a.s, &watcher);
    a.s->queries = INT_MAX;             // every query of a pass

    read_items(&few, a.tok, opt_str(a.o, "eval"), TEXTS);
    read_items(&many, a.tok, opt_str(a.o, "eval"), opt_int(a.o, "eval-items") ? opt_int(a.o, "eval-items") : INT_MAX);
    observe_lines(&a, &few);
    observe_window(&a, &many);
    if (*opt_str(a.o, "file")) observe_blocks(&a, opt_str(a.o, "file"));
    free(attention);
    return 0;
}
