// tests.c - every method against its twin, on the CPU and on the emulated device. `make test` runs it, and
// beside it the tests of what the subject stands on (test/test_lib.c) and of what people use it through
// (test/test_app.c). It includes kvcomp.c, so that every static function can be tried.
//
// Contents:
//    THE TABLE: every method x every property that holds for all
//    STREAMINGLLM, AND WHEN ROWS ARE DROPPED
//    BASELINES: deciders of all that drop rows, those with budgets a head among them
//    LOOPSERVE AND THE SPARSE PREFILLS: lines by brute force, masks on the twin, what it gains
//    PATS: schedules, packing, rows cut in place beside packed ones
//    LYCHEECLUSTER AND QUEST: chunks, index, retrieval and pages, each with its decider
//    SONIC INFERENCE: every row of logits from nothing, beside the program that drops rows
//    DILILAZYKV AND HEADKV: Algorithm 1 by hand, score files, calibration
//    CUDA (test/device.h): the table and the kernels under the emulator (or on a GPU) beside the CPU half
#include "lib/checkpoint.c"
#include "kvcomp.c"
#include "app/options.c"
#include "app/chat.c"
#include "app/measure.c"
#include "test/check.h"
#include "test/twin.h"
#include <fcntl.h>
#include <sys/wait.h>

// ==================================================================================================== 1 THE TABLE

// Every method of the table of methods x every property that holds for all. A method says of itself what can be asked of
// it (its role, whether it evicts, its budget, its options): a new one is tested here without a line. What is a method's
// own is tested below.
//
//    limits     options that leave nothing out are full attention, bit for bit; small ones are not
//    bits       -t, -b and a second run change no bit
//    follow     a twin in double computes every pass from the rows that the session held and read: the same logits
//    promises   rows held and read, bytes and positions are what budget, role and allocator say, pass by pass
//    windows    methods leave layers with a sliding window alone beside others, and act where all layers have one
//    compose    all pairs and triples of parts run, or are refused with a reason; nothing cut is f16
//    turns      fifty turns, some taken back, stay bounded; a rollback leaves no trace; a reset begins anew
//    damaged    a number that is none ends the program before it is hidden
//    refused    every line of test/refusals.txt is refused with these words

// ---- a model with all that a method looks for in its folder, and options under which every method acts on 200 tokens
// An option that no method has is passed over; `limits` shows that those which are left are small enough.
static const char *const table_small[] = {
    "quiet=1", "budget=40", "obs-window=8", "sink=4", "sonic-weights=none", "sonic-k=3",
    "shape-init=9", "shape-local=31", "shape-last=11",
    "minference-verticals=30", "minference-slashes=50", "full-layers=1",
    "loopserve-min-context=0", "loopserve-samples=16", "loopserve-local=8", "loopserve-max-cells=.9",
    "loopserve-alpha=.8", "loopserve-first=2", "loopserve-interval=3", "pats-window=8", "pats-tend=240",
    "lychee-buffer=8", "lychee-chunk-min=4", "lychee-chunk-max=8", NULL,
};

static const Script table_script = { 3, { 120, 1, 50 }, { 24, 3, 20 }, 41 };
enum { TABLE_TOKENS = 120 + 1 + 50 + 24 + 3 + 20 };

// Of several parts at once, which are many: as long as each of them needs to act.
static const Script joined_script = { 3, { 90, 1, 30 }, { 10, 2, 8 }, 41 };

// The shapes of the heads, (H,G,D): query heads a KV head 2, 4, 1, 2.
static const int table_shapes[][3] = { { 6, 3, 16 }, { 4, 1, 40 }, { 4, 4, 24 }, { 4, 2, 16 } };

// A model of L layers whose folder has head scores. windows: 0, or a bit for every layer with a sliding window.
static Tiny table_model_of(int L, int H, int G, int D, unsigned windows) {
    Tiny m = tiny_model(L, H, G, D, 32, 40, 61, 41 + L * 100 + H * 10 + G);
    const char *dir = tmp_path("model");
    char path[600], text[4096], *p = text;
    mkdir(dir, 0700);
    snprintf(m.c->dir, sizeof m.c->dir, "%s", dir);
    for (int i = 0; i < L * H; i++)
        p += sprintf(p, "%c\"%d-%d\": [%.6f]", i ? ',' : '{', i / H, i % H, rnd_int(6) ? pow(rnd_unit(), 3) : 0);
    p += sprintf(p, "}");
    snprintf(path, sizeof path, "%s/head_scores.json", dir);
    put_file(path, text, p - text);
    if (windows) tiny_window(m, windows, 24);
    return m;
}

static Tiny table_model(int L, int H, int G, unsigned windows) { return table_model_of(L, H, G, 16, windows); }

// KV head g of layer l keeps the rows keep (n); the others keep what they have.
static void keep_head(Session *s, int l, int g, const int *keep, int n) {
    int G = s->c->G, N = kv_longest(s, l) + 1;
    int *all = xmalloc((size_t)G * N * sizeof *all), *count = xmalloc(G * sizeof *count);
    for (int i = 0; i < G; i++) {
        count[i] = i == g ? n : kv_head(s, l, i)->len;
        for (int r = 0; r < count[i]; r++) all[i * N + r] = i == g ? keep[r] : r;
    }
    kv_keep(s, l, all, N, count);
    free(all);
    free(count);
}

// Why the last session of the table was refused.
static char table_err[512];

// Sets "name=value" where there is such an option that can have it. 0, or -1 with the reason in table_err.
static int table_set(Options *o, const char *word) {
    char name[80];
    const char *value = strchr(word, '=');
    snprintf(name, sizeof name, "%.*s", (int)(value - word), word);
    return options_set(o, name, value + 1, table_err);
}

// Does some part of "a+b" decide how rows are stored?
static int stores(const char *spec) {
    EACH_METHOD(m) {
        const char *at = strstr(spec, (*m)->name);
        size_t n = strlen((*m)->name);
        int whole = at && (at == spec || at[-1] == '+') && (!at[n] || at[n] == '+');
        if (whole && (*m)->role & ROLE_STORE) return 1;
    }
    return 0;
}

// A session of these parts with small options (small 1) or the program's own, and `more`, words of "name=value".
// Rows are f32 unless a part stores them. NULL, and the reason in table_err, where it is refused. For session_done.
static Session *table_open(Tiny m, const char *spec, int small, const char *more) {
    char words[512];
    Options *o = options_of_program();
    for (int i = 0; table_small[i] && (small || i == 0 || strstr(table_small[i], "sonic-weights")); i++)
        table_set(o, table_small[i]);
    if (!small) table_set(o, "sonic-weights=none");
    if (!stores(spec)) {
        table_set(o, "ctk=f32");
        table_set(o, "ctv=f32");
    }
    snprintf(words, sizeof words, "%s", more);
    table_err[0] = 0;
    int bad = 0;
    for (char *w = strtok(words, " "); w && !bad; w = strtok(NULL, " ")) bad = table_set(o, w);
    Session *s = bad ? NULL : session_try(m.c, m.w, o, spec, table_err);
    if (!s) options_free(o);
    return s;
}

// Calls f with method m under its small options, and then under every flag and every choice of its own, one at a time.
// Of these some need more than one option; they are passed over.
static void each_variant(const Method *m, Tiny model, void (*f)(Tiny model, const char *spec, const char *more)) {
    f(model, m->name, "");
    for (const Opt *o = m->opts; o && o->name; o++) {
        const char *choice = o->kind == 'c' ? strchr(o->def, '|') : o->kind == 'b' ? "|1" : NULL;
        if (!strcmp(o->name, "sonic-weights") || !strncmp(o->name, "calibrate", 9)) continue;
        for (; choice && *choice == '|'; choice += 1 + strcspn(choice + 1, "|")) {
            char more[256];
            snprintf(more, sizeof more, "%s=%.*s", o->name, (int)strcspn(choice + 1, "|"), choice + 1);
            Session *s = table_open(model, m->name, 1, more);
            session_done(s);
            if (s) f(model, m->name, more);
        }
    }
}

// Runs the table's script. Returns the logits, to be freed.
static float *table_run(Tiny m, const char *spec, int small, const char *more) {
    OWN_SESSION Session *s = table_open(m, spec, small, more);
    CHECK(s, "%s %s: %s", spec, more, table_err);
    float *x = s ? run_session(s, &table_script) : NULL;
    return x;
}

static int table_same(Tiny m, const float *a, const float *b) {
    return a && b && !memcmp(a, b, (size_t)script_rows(&table_script) * m.c->V * sizeof *a);
}

// ---- limits
TEST(table_limits, "a budget of all tokens, at equality too, or sizes that leave nothing out are full attention bit "
                   "for bit; small ones are not") {
    OWN_MODEL Tiny m = table_model(3, 6, 3, 0);
    OWN float *full = table_run(m, "full", 0, "");
    EACH_METHOD(p) {
        const Method *x = *p;
        const char *enough = formatted("budget=%d", TABLE_TOKENS);
        OWN float *wide = table_run(m, x->name, 0, x->budget ? enough : "");
        OWN float *small = table_run(m, x->name, 1, "");
        int whole = !(x->role & ROLE_STORE) && !x->rule;    // SONIC's turns do not see each other
        CHECK(!whole || table_same(m, wide, full), "%s %s is not full attention", x->name, x->budget ? enough : "");
        CHECK(!x->role || !table_same(m, small, full), "%s under small options is full attention", x->name);
    }
}

// ---- bits
// What stays of a run, as one number: the logits, and every head's rows. Sets the rest of *s up to be closed.
static uint64_t fingerprint(Session *s, const float *logits, size_t n) {
    uint64_t x = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &logits[i], 4);
        x = mix64(x ^ u);
    }
    for (int i = 0; i < s->c->L * s->c->G; i++)
        for (int r = 0; r < s->head[i].len; r++)
            x = mix64(x ^ (uint64_t)s->head[i].src[r] << 32 ^ (unsigned)s->head[i].pos[r]);
    return mix64(x ^ kv_bytes(s));
}

static void bits_agree(Tiny m, const char *spec, const char *more) {
    static const char *const run[] = { "batch-size=512", "batch-size=7", "batch-size=64", "batch-size=512",
                                       "batch-size=25" };
    uint64_t first = 0;
    int threads = n_threads();
    for (int i = 0; i < 5; i++) {
        const char *all = formatted("%s %s", run[i], more);
        set_threads(i == 1 || i == 3 ? 3 : 1);
        OWN_SESSION Session *s = table_open(m, spec, 1, all);
        for (int again = 0; s && again < (i ? 1 : 2); again++) {
            OWN float *x = run_session(s, &table_script);
            uint64_t is = fingerprint(s, x, (size_t)script_rows(&table_script) * m.c->V);
            if (!i && !again) first = is;
            CHECK(is == first, "%s %s: other bits%s", spec, all, again ? " after a reset" : "");
            session_reset(s);
        }
    }
    set_threads(threads);
}

TEST(table_bits, "-t 1 and 3, -b 7, 25, 64 and 512 and a session that was reset: the same logits, rows and bytes, for "
                 "every flag and choice of a method's own") {
    OWN_MODEL Tiny m = table_model(3, 6, 3, 0);
    EACH_METHOD(p) each_variant(*p, m, bits_agree);
}

TEST(table_spans, "a turn of 601 tokens is taken in spans of about -b, so that no more queries are held, unless a part "
                  "sees whole turns; the last span has the queries that commit reads, and no bit depends on it") {
    OWN_MODEL Tiny m = table_model_of(2, 6, 2, 32, 0);
    Script p = { 2, { 601, 30 }, { 4, 3 }, 31 };
    size_t token = 2 * (6 + 2) * 32 * sizeof(float);    // a token's q, k, v and output
    EACH_METHOD(x) {
        static const char *const b[] = { "batch-size=1024", "batch-size=16", "batch-size=25" };
        uint64_t is[3];
        size_t bytes[3], whole = 0;
        for (int k = 0; k < 3; k++) {
            OWN_SESSION Session *s = table_open(m, (*x)->name, 1, formatted("%s obs-window=20", b[k]));
            OWN float *logits = run_session(s, &p);
            is[k] = fingerprint(s, logits, (size_t)script_rows(&p) * m.c->V);
            bytes[k] = arena_bytes(s->scratch);
            whole = sees_whole_turn(s);
            CHECK(is[k] == is[0], "%s %s: other bits", (*x)->name, b[k]);
            CHECK(!k || whole || bytes[k] + 450 * token < bytes[0], "%s %s takes %zu bytes, the whole turn %zu",
                  (*x)->name, b[k], bytes[k], bytes[0]);
        }
    }
}

// ---- follow
// A twin in double that is handed, before every pass, the rows that the session holds, computes the pass from them,
// and compares its logits: so what a method has decided is taken as it is, and all that follows from it is checked.
// New rows are its own, rounded as they are stored; of formats coarser than f16 they are the session's, and a pass
// that drops some of its own is passed over. A prefill whose attention a part computes
// itself is passed over; LoopServe's and the others' masks have deciders of their own (tests.c).
typedef struct {
    Session *s;
    Twin *t;
    int whole;                  // 1: every row was read
    int coarse;                 // 1: rows are stored in blocks with a scale
    double worst;               // in units of the bound, over all passes
    int passes;
} Follow;

static Follow follow;

// May the query see the row? By the text of the mask, not by kv_visible.
static int follow_sees(void *u, Twin *t, int l, int h, int i, int row) {
    Follow *f = u;
    TwinRow *r = &t->row[l * t->c->G + h / (t->c->H / t->c->G)][row];
    const Token *a = &f->s->tok[t->base + i], *b = &f->s->tok[r->src];
    int w = t->c->windowed && t->c->windowed[l] ? t->c->window : 0;
    if (w && a->pos - b->pos >= w) return 0;
    if (f->s->rule != VIS_CAUSAL && a->kind == TOK_EXTRA && b->kind == TOK_EXTRA) {
        if (f->s->rule == VIS_SEGMENT_EXACT || b->seg < a->seg) return 1;
        return b->seg == a->seg;
    }
    if (r->src > t->base + i) return 0;
    if (f->s->rule != VIS_CAUSAL && b->kind != TOK_EXTRA && b->seg >= 0 && b->seg != a->seg) return 0;
    return 1;
}

static void follow_embed(void *u, Twin *t, int i, double *x) {
    Follow *f = u;
    OWN float *row = xmalloc(t->c->C * sizeof *row);
    EACH_HOOK(f->s, p, embed) p->m->embed(f->s, p->ms, &f->s->tok[t->base + i], row);
    for (int c = 0; c < t->c->C; c++) x[c] = row[c];
}

// A row's key and value as the session holds them.
static void follow_load(const Session *s, const KVHead *h, int r, TwinRow *to) {
    float x[256];
    for (int v = 0; v < 2; v++) {
        if (v) kv_load_v(s, h, NULL, r, 1, x);
        else kv_load_k(s, h, NULL, r, 1, x);
        for (int d = 0; d < s->c->D; d++) (v ? to->v : to->k)[d] = x[d];
    }
}

// What a step reads, and new rows of coarse formats: those that the session still holds are taken as they are.
static void follow_before(void *u, Twin *t, int l, const double *q, int n) {
    Follow *f = u;
    const Session *s = f->s;
    (void)q;
    for (int h = 0; h < t->c->H && s->decoding && !f->whole; h++) {
        static int rows[8192];
        char *mask = twin_mask(t, l, h, n);
        for (int k = view_rows(s, l, h, rows); k > 0; k--) mask[rows[k - 1]] = 1;
    }
    for (int g = 0; g < t->c->G && f->coarse; g++) {
        TwinRow *row = t->row[l * t->c->G + g];
        const KVHead *h = kv_head(s, l, g);
        for (int r = 0, at = 0; r < (int)arrlen(row); r++) {
            while (at < h->len && h->src[at] < row[r].src) at++;
            if (at < h->len && h->src[at] == row[r].src && row[r].src >= t->base) follow_load(s, h, at, &row[r]);
        }
    }
}

// Session.forward: the pass, and the twin's.
static float *follow_forward(Session *s, const Token *in, int n) {
    Follow *f = &follow;
    Twin *t = f->t;
    int L = s->c->L, G = s->c->G, D = s->c->D, held = 0, after = 0, new_rows = 0;
    for (int i = 0; i < L * G; i++) {
        const KVHead *h = &s->head[i];
        twin_keep(t, i / G, i % G, NULL, 0);
        held += h->len;
        for (int r = 0; r < h->len; r++) {
            TwinRow row = { h->src[r], h->pos[r], 0, xcalloc(D, 8), xcalloc(D, 8) };
            follow_load(s, h, r, &row);
            arrput(t->row[i], row);
        }
    }
    float *logits = forward(s, in, n);
    for (int i = 0; i < L * G; i++) {
        after += s->head[i].len;
        for (int r = 0; r < s->head[i].len; r++) new_rows += s->head[i].src[r] >= s->base;
    }

    arrsetlen(t->id, 0);
    arrsetlen(t->pos, 0);
    for (int i = 0; i < s->n_tok; i++) {
        arrput(t->id, s->tok[i].id);
        arrput(t->pos, s->tok[i].pos);
    }
    t->base = s->base;

    // Views that rows were dropped under read every row.
    f->whole = after != held + L * G * n;
    int spans = s->decoding || !sees_whole_turn(s) || s->rule != VIS_CAUSAL;
    if (!spans || (f->coarse && new_rows < L * G * n)) return logits;
    double *want = xmalloc(s->c->V * sizeof *want), e = 0;
    twin_run(t, n, want);
    for (int v = 0; v < s->c->V; v++) {
        double off = fabs(logits[v] - want[v]) / (1e-5 + 1e-5 * fabs(want[v]));
        if (!(off <= e)) e = off;
    }
    f->worst = fmax(f->worst, isnan(e) ? INFINITY : e);
    f->passes++;
    free(want);
    return logits;
}

// Runs a script on a session of these parts beside the follower. Returns 0 where the session is refused. The bound is
// 1e-5, absolute and relative; rows of 16 bits may round the other way, and queries are rounded, too, for coarse ones.
static int followed(Tiny m, const char *spec, const char *more, const Script *script) {
    OWN_SESSION Session *s = table_open(m, spec, 1, more);
    if (!s) return 0;
    int F32 = !strcmp(s->fk->name, "f32"), coarse = !F32 && strcmp(s->fk->name, "f16");
    double bound = F32 ? 2 : coarse ? 3000 : 300;
    follow = (Follow){ .s = s, .t = twin_new(m.c, m.w, F32 ? DT_F32 : DT_F16), .coarse = coarse };
    if (s->alt) follow.t->alt = twin_layers(s->alt, m.c->L);
    follow.t->hook = (TwinHooks){ .u = &follow, .sees = follow_sees, .before = follow_before, .embed = follow_embed };
    s->forward = follow_forward;
    free(run_session(s, script));
    CHECK(follow.worst <= bound, "%s %s, H %d G %d: logits %g times the bound", spec, more, m.c->H, m.c->G,
          follow.worst);
    CHECK(follow.passes >= script_rows(script) - script->turns || (coarse && follow.passes), "%s %s: %d passes were followed", spec, more, follow.passes);
    twin_free(follow.t);
    return 1;
}

static void variant_followed(Tiny m, const char *spec, const char *more) { followed(m, spec, more, &table_script); }

TEST(table_follow, "a twin in double that is told which rows were held and read computes the logits of every pass: GQA "
                   "1:1 to 4:1, sliding windows, every flag and choice of a method's own") {
    for (int i = 0; i < 4; i++) {
        const int *shape = table_shapes[i];             // the last two have a window in one layer, and in both
        OWN_MODEL Tiny m = table_model_of(i ? 2 : 3, shape[0], shape[1], shape[2], i == 2 ? 2 : i == 3 ? 3 : 0);
        EACH_METHOD(p) {
            if (i) variant_followed(m, (*p)->name, "");
            else each_variant(*p, m, variant_followed);
        }
    }
    // More rows than one running softmax has (KV_CHUNK).
    static const Script one = { 2, { KV_CHUNK - 20, 70 }, { 0, 3 }, 5 };
    OWN_MODEL Tiny m = table_model(1, 2, 1, 0);
    followed(m, "full", "", &one);
}

// ---- promises
// What holds of any session after any pass.
static void check_rows(const Session *s, const char *spec, const char *more) {
    size_t bytes = 0;
    static int rows[4096];
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        int bad = 0;
        for (int r = 0; r < h->len; r++) {
            bad += h->src[r] < 0 || h->src[r] >= s->n_tok || (r && h->src[r] <= h->src[r - 1]);
            bad += h->pos[r] != s->tok[h->src[r]].pos && !strstr(more, "rerotate");
        }
        CHECK(!bad, "%s %s: %d rows of head %d have another token or position", spec, more, bad, i);
        int raw = h->len - h->packed;
        CHECK(h->cap % KV_STEP == 0 && h->cap >= raw && h->cap < raw + KV_STEP, "%s %s: room for %d rows, %d held", spec,
              more, h->cap, raw);
        bytes += (size_t)h->cap * (s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D)) + 2 * h->pk_bytes;
    }
    CHECK(kv_bytes(s) == bytes, "%s %s: %zu bytes are told, %zu held", spec, more, kv_bytes(s), bytes);
    CHECK(s->clk.peak >= bytes, "%s %s: a peak of %zu bytes, %zu held", spec, more, s->clk.peak, bytes);
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        int n = view_rows(s, i / s->c->H, i % s->c->H, rows), len = s->head[i * s->c->G / s->c->H].len, bad = 0;
        for (int r = 0; r < n; r++) bad += rows[r] < 0 || rows[r] >= len || (r && rows[r] <= rows[r - 1]);
        CHECK(!bad && (n > 0 || !len), "%s %s: query head %d reads %d of %d rows, %d out of order", spec, more, i, n, len, bad);
    }
}

// Bytes that a decode step has read: neighbours with the same rows read them once.
static double bytes_read(const Session *s) {
    static int rows[2][4096];
    double sum = 0;
    int H = s->c->H, R = H / s->c->G;
    for (int i = 0; i < s->c->L * H; i++) {
        const KVHead *h = &s->head[i / R];
        int n = view_rows(s, i / H, i % H, rows[i % 2]);
        int m = i % R ? view_rows(s, i / H, i % H - 1, rows[1 - i % 2]) : -1;
        if (n == m && !memcmp(rows[0], rows[1], n * sizeof(int))) continue;
        double row = (double)h->cap * (s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D)) + 2.0 * h->pk_bytes;
        sum += n * row / (h->packed + h->cap);
    }
    return sum;
}

// The mean number of rows that a query head reads, and the fewest and the most, in layers where hooks act.
static double rows_read(const Session *s, int *least, int *most) {
    static int rows[4096];
    double sum = 0;
    int heads = 0;
    *least = INT_MAX;
    *most = 0;
    for (int i = 0; i < s->c->L * s->c->H; i++) {
        if (!layer_acts(s, i / s->c->H)) continue;
        int n = view_rows(s, i / s->c->H, i % s->c->H, rows);
        *least = min_int(*least, n);
        *most = max_int(*most, n);
        sum += n;
        heads++;
    }
    return sum / heads;
}

// The end of a prefill of a method that keeps B rows a head: exactly these, or these on average. An integer step a
// layer and a rounding a head are allowed for.
static void check_budget(const Session *s, const char *spec, const char *more, int B) {
    int least, most;
    double mean = rows_read(s, &least, &most), slack = least == most ? 0 : 1 + s->c->L / 2.0;
    CHECK(mean >= B - slack && mean <= B + slack, "%s %s: %d to %d rows a head are read, %g on average, %d promised",
          spec, more, least, most, mean, B);
}

static void promises_kept(Tiny m, const char *spec, const char *more) {
    int ids[512], V = m.c->V;
    const Method *x = method_find(spec, strlen(spec));
    Session *s = table_open(m, spec, 1, more);
    int few = x->evicts && x->budget;
    for (int t = 0; t < table_script.turns; t++) {
        script_ids(&table_script, t, V, ids);
        prefill(s, ids, table_script.pre[t]);
        check_rows(s, spec, more);
        if (few && t != 1) check_budget(s, spec, more, budget_now(s));      // turn 1 may hold less
        int held = kv_longest(s, m.c->L - 1);
        for (int i = 0; i < table_script.dec[t]; i++) {
            double before = s->clk.bytes_attended;
            int len = s->head[0].len;
            decode(s, ids[table_script.pre[t] + i]);
            check_rows(s, spec, more);
            held++;
            CHECK(kv_longest(s, m.c->L - 1) <= held, "%s %s: rows appear in decode", spec, more);
            double read = s->clk.bytes_attended - before, want = bytes_read(s);
            if (s->head[0].len > len && !s->packing)
                CHECK(fabs(read - want) < 1, "%s %s: %g bytes read, by the views %g", spec, more, read, want);
        }
    }
    for (int i = 0; i < m.c->L * m.c->G && !x->evicts; i++)
        CHECK(s->head[i].len == s->n_tok, "%s %s evicts nothing, but head %d holds %d rows of %d", spec, more, i,
              s->head[i].len, s->n_tok);
    CHECK(!x->evicts || kv_bytes(s) < kv_bytes_full(s), "%s %s evicts, but holds %zu bytes, full attention %zu", spec,
          more, kv_bytes(s), kv_bytes_full(s));
    int least, most, selects = x->select && x->budget;
    CHECK(!selects || rows_read(s, &least, &most) < s->n_tok * .8, "%s %s reads %d to %d of %d rows", spec, more, least,
          most, s->n_tok);
    size_t meta = kv_meta_bytes(s), own = x->bytes ? x->bytes(s, s->part[0].ms) : 0;
    CHECK(meta >= own, "%s %s: %zu bytes beside the rows, its own are %zu", spec, more, meta, own);
    session_done(s);

    // --ratio of 120 tokens: 120 - floor(120 * .705 + 1e-6) = 36 rows.
    const char *all = formatted("ratio=.705 %s", more);
    s = few ? table_open(m, spec, 1, all) : NULL;
    if (!s) return;
    script_ids(&table_script, 0, V, ids);
    prefill(s, ids, 120);
    check_budget(s, spec, all, 36);
    session_done(s);
}

TEST(table_promises, "after every pass rows ascend and stand where their tokens do, bytes are what is allocated and "
                     "what the views read, a budget or a ratio is kept, and who evicts nothing holds every row") {
    OWN_MODEL Tiny m = table_model(3, 6, 3, 0);
    EACH_METHOD(p) each_variant(*p, m, promises_kept);
}

// ---- windows
TEST(table_windows, "beside other layers those with a sliding window keep every row and are read whole; where all "
                    "layers have one methods act on all") {
    for (int all = 0; all < 2; all++) {
        OWN_MODEL Tiny m = table_model(3, 4, 2, all ? 7 : 2);
        EACH_METHOD(p) {
            int ids[512], rows[512];
            const Method *x = *p;
            OWN_SESSION Session *s = table_open(m, x->name, 1, "");
            CHECK(s, "%s: %s", x->name, table_err);
            if (!s) continue;
            script_ids(&table_script, 0, m.c->V, ids);
            prefill(s, ids, 120);
            for (int i = 0; i < 12; i++) decode(s, ids[120 + i]);
            for (int h = 0; h < 4; h++) {
                int n = view_rows(s, 1, h, rows), acts = x->budget && (x->evicts || (all && x->select));
                if (!all) CHECK(n == 132, "%s: a layer with a window reads %d of 132 rows", x->name, n);
                else if (acts) CHECK(n < 132, "%s: all layers have a window, and none acts", x->name);
            }
            check_rows(s, x->name, "");
        }
    }
}

// ---- compose
// The names of the methods that are all that could stand in a "+" with others of their kind.
static int may_join(const Method *a, const Method *b) { return a->role && b->role && !(a->role & b->role); }

// Runs these parts beside the follower; they may refuse each other with a reason that names them.
static int composed(Tiny m, const char *spec) {
    Session *s = table_open(m, spec, 1, "");
    session_done(s);
    CHECK(s || strlen(table_err) > 20, "%s is refused without a reason: '%s'", spec, table_err);
    return s ? followed(m, spec, "", &joined_script) : 0;
}

TEST(table_compose, "every pair and triple of parts with roles of their own runs as a twin computes it, or is refused "
                    "with a reason; two with one role are refused") {
    OWN_MODEL Tiny m = table_model(2, 4, 2, 0);
    int ran = 0;
    EACH_METHOD(a)
        EACH_METHOD(b) {
            char spec[160];
            snprintf(spec, sizeof spec, "%s+%s", (*a)->name, (*b)->name);
            if ((*a)->role & (*b)->role) {
                OWN_SESSION Session *s = table_open(m, spec, 1, "");
                CHECK(!s && strstr(table_err, "cannot be combined"), "%s: '%s'", spec, table_err);
            }
            if (a >= b || !may_join(*a, *b)) continue;
            ran += composed(m, spec);
            EACH_METHOD(c) {
                if (b >= c || !may_join(*a, *c) || !may_join(*b, *c)) continue;
                snprintf(spec, sizeof spec, "%s+%s+%s", (*c)->name, (*a)->name, (*b)->name);
                ran += composed(m, spec);
            }
        }
    CHECK(ran > 60, "only %d combinations ran", ran);
}

TEST(table_storage, "beside any other method PATS that cuts nothing is f16, and a method that chooses a format is that "
                    "format, bit for bit") {
    OWN_MODEL Tiny m = table_model(3, 6, 3, 0);
    EACH_METHOD(store) {
        char plain[64];
        Session *s = (*store)->role & ROLE_STORE ? table_open(m, (*store)->name, 1, "") : NULL;
        if (!s) continue;
        const char *uncut = s->packing ? "pats-bmax=0" : "";
        snprintf(plain, sizeof plain, "ctk=%s ctv=%s", s->fk->name, s->fv->name);
        session_done(s);
        EACH_METHOD(p) {
            char spec[96];
            if ((*p)->role & ROLE_STORE) continue;
            snprintf(spec, sizeof spec, "%s+%s", (*p)->name, (*store)->name);
            s = table_open(m, spec, 1, uncut);
            session_done(s);
            if (!s) continue;
            OWN float *a = table_run(m, spec, 1, uncut), *b = table_run(m, (*p)->name, 1, plain);
            CHECK(table_same(m, a, b), "%s %s is not %s %s", spec, uncut, (*p)->name, plain);
        }
    }
}

// ---- turns
// 50 turns of the same ids, some taken back. Returns a number of all that was seen.
static uint64_t fifty_turns(Session *s, const char *spec, size_t *at_25, size_t *at_50) {
    uint64_t seen = 0;
    int ids[40], V = s->c->V;
    rnd_seed(6);
    for (int turn = 0; turn < 50; turn++) {
        int n = 1 + rnd_int(40);
        draw_ids(ids, n, V);
        const float *lo = prefill(s, ids, n);
        for (int i = rnd_int(6); i > 0; i--) lo = decode(s, rnd_int(V));
        CHECK(isfinite(lo[0]), "%s: turn %d", spec, turn);
        seen = mix64(seen ^ fingerprint(s, lo, V));
        // Messages that SONIC has finished are not taken back.
        if (turn % 7 == 6 && s->rule == VIS_CAUSAL) kv_truncate(s, s->n_tok - rnd_int(30));
        check_rows(s, spec, "");
        if (turn == 24) *at_25 = kv_bytes(s) + arena_bytes(s->scratch);
    }
    *at_50 = kv_bytes(s) + arena_bytes(s->scratch);
    return seen;
}

TEST(table_turns, "fifty turns, some taken back: rows stay in order, who evicts by a budget needs no more memory at the "
                  "end than half way, and a session that was reset repeats itself bit for bit") {
    OWN_MODEL Tiny m = table_model(2, 4, 2, 0);
    EACH_METHOD(p) {
        size_t half = 0, end = 0;
        OWN_SESSION Session *s = table_open(m, (*p)->name, 1, "");
        uint64_t a = fifty_turns(s, (*p)->name, &half, &end);
        session_reset(s);
        uint64_t b = fifty_turns(s, (*p)->name, &half, &end);
        CHECK(a == b, "%s: a session that was reset goes another way", (*p)->name);
        int flat = (*p)->evicts && (*p)->budget;
        CHECK(!flat || end < half + half / 4 + 65536, "%s: %zu bytes after 25 turns, %zu after 50", (*p)->name, half,
              end);
    }
}

TEST(table_rollback, "a dialogue that was taken back goes on, bit for bit, as one that was never longer, where no row "
                     "was dropped or cut") {
    OWN_MODEL Tiny m = table_model(2, 4, 2, 0);
    EACH_METHOD(p) {
        const Method *x = *p;
        Session *s[2];
        int ids[512], V = m.c->V;
        if (x->evicts || x->role & ROLE_STORE) continue;
        script_ids(&table_script, 0, V, ids);
        for (int k = 0; k < 2; k++) {
            s[k] = table_open(m, x->name, 1, "");
            prefill(s[k], ids, 100);
            if (!k) {
                for (int i = 0; i < 20; i++) decode(s[k], ids[i]);
                prefill(s[k], ids + 40, 70);
                decode(s[k], 7);
                kv_truncate(s[k], 100);
            }
            CHECK(s[k]->n_tok == 100 && s[k]->pos_next == 100, "%s: %d tokens, next position %d", x->name, s[k]->n_tok,
                  s[k]->pos_next);
        }
        // LycheeCluster's index of the first turn is gone in one of them, and built again a turn later.
        const float *a = prefill(s[0], ids, 60), *b = prefill(s[1], ids, 60);
        CHECK(!memcmp(a, b, V * sizeof *a), "%s: the prefill behind a rollback", x->name);
        for (int i = 0; i < 20 && !x->plan; i++) {
            a = decode(s[0], ids[i]);
            b = decode(s[1], ids[i]);
            CHECK(!memcmp(a, b, V * sizeof *a), "%s: step %d behind a rollback", x->name, i);
        }
        for (int k = 0; k < 2; k++) {
            check_rows(s[k], x->name, "");
            session_done(s[k]);
        }
    }
}

// ---- damaged
TEST(table_damaged, "a NaN in one embedding, met in a prefill and in a decode step: exit 3 for every method, and nothing "
                    "undefined on the way") {
    OWN_MODEL Tiny m = table_model(2, 4, 2, 0);
    ((float *)(uintptr_t)m.w->embed.data)[60 * m.c->C] = NAN;
    EACH_METHOD(p)
        for (int in_decode = 0; in_decode < 2; in_decode++) {
            int ids[90];
            OWN_SESSION Session *s = table_open(m, (*p)->name, 1, "");
            for (int i = 0; i < 90; i++) ids[i] = i == 40 && !in_decode ? 60 : i % 59;
            int rc = try_prefill(s, ids, 90);
            CHECK(rc == (in_decode ? 0 : EXIT_MODEL), "%s: prefill %d %s", (*p)->name, rc, die_text);
            rc = in_decode ? try_decode(s, 60) : EXIT_MODEL;
            CHECK(rc == EXIT_MODEL && strstr(die_text, "not a number"), "%s: decode %d %s", (*p)->name, rc, die_text);
        }
}

// ---- refused
TEST(table_refused, "every line of test/refusals.txt - parts, options, what the refusal says - is refused so") {
    OWN_MODEL Tiny m = table_model(3, 4, 2, 0);
    char line[512], *part[3];
    FILE *f = fopen("test/refusals.txt", "r");
    int n = 0;
    for (; next_case(f, line, sizeof line, part, 3) == 3; n++) {
        Session *s = table_open(m, part[0], 0, part[1]);
        CHECK(!s && strstr(table_err, part[2]), "%s %s: '%s', expected '%s'", part[0], part[1], table_err, part[2]);
        session_done(s);
    }
    CHECK(n > 40, "%d lines", n);
    if (f) fclose(f);
}

// ==================================================================================================== 2 STREAMINGLLM, AND WHEN ROWS ARE DROPPED

TEST(compress_at_once, "a session whose context is full compresses as a prefill of the same tokens does: the same rows, and "
                       "the same logits behind them") {
    const char *method[] = { "snapkv", "adakv", "pyramidkv", "expected-attention" };
    const int *ids = seven_ids(70, 61);
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 48, 61, 6);
    for (int i = 0; i < 4; i++) {
        Session *s[2];
        int alike = i < 3, held = 0;                // the last one's queries are those of prefills: only its numbers of
        for (int j = 0; j < 2; j++) s[j] = session_of(m, method[i], "budget=24 obs-window=8");      // rows are alike
        prefill(s[0], ids, 20);                     // no more than the budget: nothing is dropped
        for (int j = 20; j < 70; j++) decode(s[0], ids[j]);
        CHECK(kv_longest(s[0], 0) == 70, "%s: %d rows before", method[i], kv_longest(s[0], 0));
        CHECK(session_compress(s[0]) > 0 && kv_longest(s[0], 1) <= 48, "%s: %d rows", method[i], kv_longest(s[0], 1));
        prefill(s[1], ids, alike ? 70 : 20);
        CHECK(alike ? !heads_differ(s[0], s[1]) : kv_longest(s[0], 1) == 24, "%s: other rows", method[i]);
        const float *x = decode(s[0], 5), *y = decode(s[1], 5);
        CHECK(!alike || !memcmp(x, y, (size_t)m.c->V * sizeof *x), "%s: other logits", method[i]);
        session_compress(s[0]);                     // heads may share their rows anew, but hold no more of them
        for (int h = 0; h < 4; h++) held += s[0]->head[h].len;
        CHECK(held <= 4 * 24, "%s: %d rows in all after a second time", method[i], held);
        for (int j = 0; j < 2; j++) session_done(s[j]);
    }
    OWN_SESSION Session *full = session_of(m, "full", "");
    prefill(full, ids, 3);
    CHECK(!session_compress(full) && full->n_tok == 3, "full attention drops nothing");
}

TEST(chunked, "--chunk N is prefills of N tokens, bit for bit: a head holds at most its budget and N rows") {
    const char *method[] = { "streaming", "snapkv", "adakv", "h2o", "expected-attention", "tova", "full", "keydiff+pats" };
    const int *ids = seven_ids(75, 61);
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 48, 61, 6);
    for (int i = 0; i < 8; i++) {
        Session *s[2];
        for (int k = 0; k < 2; k++) {
            const char *rows = i < 7 ? "" : "ctk=f16 ctv=f16";
            s[k] = session_of(m, method[i], formatted("budget=24 obs-window=8 %s %s", rows, k ? "chunk=20" : ""));
        }
        const float *x = NULL, *y = prefill(s[1], ids, 75);
        for (int t = 0; t < 75; t += 20) x = prefill(s[0], ids + t, min_int(20, 75 - t));
        CHECK(!memcmp(x, y, (size_t)m.c->V * sizeof *x), "%s: other logits", method[i]);
        CHECK(!heads_differ(s[0], s[1]), "%s: other rows", method[i]);
        CHECK(s[1]->turn == 1 && s[1]->n_tok == 75, "%s: turn %d", method[i], s[1]->turn);
        CHECK(s[0]->clk.peak == s[1]->clk.peak, "%s: %zu bytes at most, %zu by hand", method[i], s[1]->clk.peak,
              s[0]->clk.peak);
        for (int k = 0; k < 2; k++) session_done(s[k]);
    }
}

TEST(streaming_rerotate, "--streaming-rerotate: rows stand at positions 0..n-1, their keys are the ones RoPE gives there, the "
                         "next token follows; it is refused where sliding windows count original positions") {
    Script p = { 2, { 50, 20 }, { 3, 0 }, 12 };
    // One layer: a token's unrotated key does not depend on what was dropped.
    OWN_MODEL Tiny m = tiny_model(1, 4, 2, 16, 32, 48, 61, 8);
    float *kept[2] = { NULL, NULL };
    for (int turn = 0; turn < 2; turn++) {
        OWN_SESSION Session *s = session_of(m, "streaming", turn ? "budget=24 streaming-rerotate" : "budget=24");
        free(run_session(s, &p));
        KVHead *h = kv_head(s, 0, 1);
        CHECK(h->len == 24, "%d rows", h->len);
        kept[turn] = xmalloc((size_t)h->len * 16 * sizeof(float));
        kv_load_k(s, h, NULL, 0, h->len, kept[turn]);
        Twin *t = twin_new(m.c, m.w, DT_F32);
        for (int r = 0; r < h->len; r++) {
            CHECK(h->pos[r] == (turn ? r : s->tok[h->src[r]].pos), "row %d stands at %d", r,
                  h->pos[r]);
            // Back to position 0 by the inverse rotation.
            double k[16];
            for (int d = 0; d < 16; d++) k[d] = kept[turn][r * 16 + d];
            twin_rope(t, k, -h->pos[r]);
            for (int d = 0; d < 16; d++) kept[turn][r * 16 + d] = (float)k[d];
        }
        CHECK(s->pos_next == (turn ? 24 : 73), "next position %d", s->pos_next);
        twin_free(t);
    }
    CHECK(worst(kept[0], kept[1], 24 * 16, 1e-5, 1e-5, NULL) <= 1,
          "keys differ by more than their rotation");
    free(kept[0]);
    free(kept[1]);

    OWN_MODEL Tiny windows = table_model(2, 4, 2, 1);
    CHECK(!table_open(windows, "streaming", 0, "streaming-rerotate=1") && strstr(table_err, "original positions"), "'%s'",
          table_err);
}

// ==================================================================================================== 3 BASELINES

// Slow twins of the baselines, in double and with their own loops: full rows of probabilities,
// selection by repeated maximum, moments as whole matrices. They share nothing with the program but
// the rules.

// From H2O on they drop rows in decode, too.
enum { BT_SNAP, BT_ADA, BT_PYRAMID, BT_EXPECTED, BT_KEYDIFF, BT_DILI, BT_HEADKV, BT_H2O, BT_STREAMING, BT_TOVA };

// seen (L*H): stb_ds arrays of queries before RoPE, D each. Of DiliLazyKV and HeadKV: score (L*H), and read (L*H), stb_ds
// arrays of the tokens that a query head reads of the `end` ones of the last prefill.
typedef struct {
    int kind, B, w, width, sink;
    double ratio;
    double **seen;
    int mean;                   // --pool avg
    double epsilon;             // --ea-epsilon
    double beta, score[32];
    int **read, end;
} BaseTwin;

// The rows a head may keep of N, by budget or by ratio.
static int twin_budget(const BaseTwin *b, int N) {
    return b->ratio < 0 ? b->B : N - (int)(N * b->ratio + 1e-6);
}

// The k largest, one after the other, the first of equals; ascending.
static int twin_pick(const double *x, int n, int k, int *idx) {
    OWN char *taken = xcalloc(n + 1, 1);
    int m = 0;
    for (int i = 0; i < k && i < n; i++) {
        int best = -1;
        for (int j = 0; j < n; j++)
            if (!taken[j] && (best < 0 || x[j] > x[best])) best = j;
        taken[best] = 1;
    }
    for (int j = 0; j < n; j++)
        if (taken[j]) idx[m++] = j;
    return m;
}

// mean probability row of query head h over the last min(w,n) queries: out (rows)
static void twin_observe(Twin *t, int l, int h, const double *q, int n, int w, double *out) {
    int rows = (int)arrlen(t->row[l * t->c->G + h / (t->c->H / t->c->G)]), m = n < w ? n : w;
    OWN double *p = xcalloc(rows + 1, sizeof *p);
    for (int j = 0; j < rows; j++) out[j] = 0;
    for (int i = n - m; i < n; i++) {
        twin_probs(t, l, h, i, q + ((size_t)i * t->c->H + h) * t->c->D, p);
        for (int j = 0; j < rows; j++) out[j] += p[j] / m;
    }
}

// The maximum, or the mean with zeros beyond the ends, over a window of `width` around each of n values, in place.
static void twin_pool(double *x, int n, int width, int mean) {
    OWN double *y = xcalloc(n + 1, sizeof *y);
    for (int j = 0; j < n; j++) {
        y[j] = mean ? 0 : -1;
        for (int t = 0; t < n; t++)
            if (abs(t - j) <= width / 2) y[j] = mean ? y[j] + x[t] / width : fmax(y[j], x[t]);
    }
    for (int j = 0; j < n; j++) x[j] = y[j];
}

// PyramidKV's rows of layer l beside the window.
static int twin_level(int l, int L, int N, int base, int w) {
    if (L == 1 || N < 2 * base) return base;
    int low = (int)floor(base / 20.0), high = 2 * base - low;
    if (high >= N - w) {
        high = N - w;
        low = 2 * base - high;
    }
    return high - l * (int)floor((double)(high - low) / (L - 1));
}

// SnapKV, AdaKV and PyramidKV: observed scores, pooled; the best of a head (or of all heads) and
// the window stay.
static void twin_snap(BaseTwin *b, Twin *t, int l, const double *q, int n, int B) {
    int G = t->c->G, R = t->c->H / G, N = (int)arrlen(t->id), w = b->w < B ? b->w : B;
    int cap[16], total = 0, len[16], keep[4096];
    double *x[16], one[4096];
    for (int g = 0; g < G; g++) {
        int rows = (int)arrlen(t->row[l * G + g]);
        len[g] = rows > w ? rows - w : 0;
        total += len[g];
        x[g] = xcalloc(rows + 1, sizeof(double));
        for (int r = 0; r < R; r++) {
            twin_observe(t, l, g * R + r, q, n, b->w, one);
            for (int j = 0; j < rows; j++) x[g][j] += one[j] / R;
        }
        twin_pool(x[g], len[g], b->width, b->mean);
        cap[g] = b->kind == BT_PYRAMID ? twin_level(l, t->c->L, N, B - w, w) : B - w;
    }
    if (b->kind == BT_ADA) {
        OWN double *all = xcalloc(total + 1, sizeof *all);
        OWN int *owner = xcalloc(total + 1, sizeof *owner);
        int *idx = xcalloc(total + 1, sizeof *idx), at = 0, cnt[16] = { 0 };
        for (int g = 0; g < G; g++) {
            for (int j = 0; j < len[g]; j++) {
                all[at] = x[g][j];
                owner[at++] = g;
            }
        }
        int k = twin_pick(all, total, G * (B - w), idx);
        for (int i = 0; i < k; i++) cnt[owner[idx[i]]]++;
        for (int g = 0; g < G; g++)
            cap[g] = (int)nearbyint(cnt[g] * 0.8 + floor((B - w) * 0.2 + 1e-9));
        free(idx);
    }
    for (int g = 0; g < G; g++) {
        int k = twin_pick(x[g], len[g], cap[g], keep);
        for (int r = len[g]; r < (int)arrlen(t->row[l * G + g]); r++) keep[k++] = r;
        if (b->kind != BT_ADA || total > G * (B - w)) twin_keep(t, l, g, keep, k);
        free(x[g]);
    }
}

// H2O: half of the budget for the latest rows, half for those of most attention so far.
static void twin_h2o(Twin *t, int l, int B) {
    for (int g = 0; g < t->c->G; g++) {
        TwinRow *r = t->row[l * t->c->G + g];
        int rows = (int)arrlen(r), n = rows > B / 2 ? rows - B / 2 : 0, keep[4096];
        double m[4096];
        for (int j = 0; j < n; j++) m[j] = r[j].mass;
        int k = twin_pick(m, n, B - B / 2, keep);
        for (int j = n; j < rows; j++) keep[k++] = j;
        twin_keep(t, l, g, keep, k);
    }
}

// StreamingLLM: the first rows and the latest.
static void twin_streaming(Twin *t, int l, int B, int sink) {
    for (int g = 0; g < t->c->G; g++) {
        int rows = (int)arrlen(t->row[l * t->c->G + g]), k = 0, keep[4096];
        for (int r = 0; r < rows; r++)
            if (r < sink || r >= rows - (B - sink)) keep[k++] = r;
        twin_keep(t, l, g, keep, k);
    }
}

// TOVA: the rows with the largest sums of the last query's probabilities over all heads.
static void twin_tova(Twin *t, int l, const double *q, int n, int B) {
    int rows = (int)arrlen(t->row[l * t->c->G]), keep[4096];
    double one[4096], sum[4096] = { 0 };
    for (int h = 0; h < t->c->H; h++) {
        twin_observe(t, l, h, q, n, 1, one);
        for (int r = 0; r < rows; r++) sum[r] += one[r];
    }
    int k = twin_pick(sum, rows, B, keep);
    for (int g = 0; g < t->c->G; g++) twin_keep(t, l, g, keep, k);
}

// softmax over rows [first,rows) of mu.k/sqrt(D) + k^T Sg k/2D for query head h, added to sum
// (rows)
static void twin_future(BaseTwin *b, Twin *t, int l, int h, int first, double *sum) {
    int D = t->c->D, N = (int)arrlen(t->id), n = (int)arrlen(b->seen[l * t->c->H + h]) / D;
    const double *q = b->seen[l * t->c->H + h];
    TwinRow *row = t->row[l * t->c->G + h / (t->c->H / t->c->G)];
    OWN double *Rm = xcalloc((size_t)D * D, 8), *S = xcalloc((size_t)D * D, 8);
    OWN double *A = xcalloc((size_t)D * D, 8), *mu = xcalloc(D, 8), *mean = xcalloc(D, 8);
    double z[4096], total = 0;
    for (int i = 0; i < D / 2; i++)
        for (int p = N; p < N + 512; p++) {
            double a = p * t->w->inv_freq64[i], f = t->w->rope_scale / 512;
            Rm[i * D + i] += cos(a) * f;
            Rm[i * D + i + D / 2] -= sin(a) * f;
            Rm[(i + D / 2) * D + i] += sin(a) * f;
            Rm[(i + D / 2) * D + i + D / 2] += cos(a) * f;
        }
    for (int i = 0; i < n; i++)
        for (int d = 0; d < D; d++) mean[d] += q[i * D + d] / n;
    for (int i = 0; i < n; i++)
        for (int d = 0; d < D; d++)
            for (int e = 0; e < D; e++)
                S[d * D + e] += (q[i * D + d] - mean[d]) * (q[i * D + e] - mean[e]) / n;
    for (int d = 0; d < D; d++)
        for (int e = 0; e < D; e++) {
            mu[d] += Rm[d * D + e] * mean[e];
            for (int f = 0; f < D; f++) A[d * D + e] += Rm[d * D + f] * S[f * D + e];
        }
    memset(S, 0, (size_t)D * D * 8);
    for (int d = 0; d < D; d++)
        for (int e = 0; e < D; e++)
            for (int f = 0; f < D; f++) S[d * D + e] += A[d * D + f] * Rm[e * D + f];
    for (int r = first; r < (int)arrlen(row); r++) {
        z[r] = 0;
        for (int d = 0; d < D; d++) {
            z[r] += mu[d] * row[r].k[d] / sqrt(D);
            for (int e = 0; e < D; e++) z[r] += row[r].k[d] * S[d * D + e] * row[r].k[e] / (2 * D);
        }
        total += exp(z[r]);
    }
    for (int r = first; r < (int)arrlen(row); r++) sum[r] += exp(z[r]) / total;
}

// ExpectedAttention: rows by their expected attention times their value's length; the sink always
// stays.
static void twin_expected(BaseTwin *b, Twin *t, int l, int B) {
    int G = t->c->G, R = t->c->H / G, keep[4096];
    for (int g = 0; g < G; g++) {
        TwinRow *row = t->row[l * G + g];
        int rows = (int)arrlen(row), first = 0;
        double x[4096] = { 0 };
        while (first < rows && row[first].src < b->sink) first++;
        for (int r = 0; r < R; r++) twin_future(b, t, l, g * R + r, first, x);
        for (int r = first; r < rows; r++) {
            double vv = 0;
            for (int d = 0; d < t->c->D; d++) vv += row[r].v[d] * row[r].v[d];
            x[r] = (x[r] / R + b->epsilon) * sqrt(vv);
        }
        for (int r = 0; r < first; r++) x[r] = INFINITY;  // always kept
        twin_keep(t, l, g, keep, twin_pick(x, rows, B, keep));
    }
}

// KeyDiff: rows by their keys alone.
static void twin_keydiff(Twin *t, int l, int B) {
    int D = t->c->D, keep[4096];
    for (int g = 0; g < t->c->G; g++) {
        TwinRow *row = t->row[l * t->c->G + g];
        int rows = (int)arrlen(row);
        double x[4096], norm[4096], *mu = xcalloc((size_t)D, sizeof *mu);
        for (int r = 0; r < rows; r++) {
            norm[r] = 0;
            for (int d = 0; d < D; d++) norm[r] += row[r].k[d] * row[r].k[d];
            norm[r] = sqrt(norm[r]);
            for (int d = 0; d < D; d++) mu[d] += row[r].k[d] / norm[r];
        }
        for (int r = 0; r < rows; r++) {
            double dot = 0;
            for (int d = 0; d < D; d++) dot += row[r].k[d] * mu[d];
            x[r] = -dot / norm[r];
        }
        twin_keep(t, l, g, keep, twin_pick(x, rows, B, keep));
        free(mu);
    }
}

// Algorithm 1 once more
static void twin_caps(const double *inf, int L, int H, int bc, double beta, double eps, int *cap) {
    double lam[64], all = 0;
    for (int i = 0; i < L; i++) {
        lam[i] = 0;
        for (int j = 0; j < H; j++) lam[i] += inf[i * H + j];
        all += lam[i];
    }
    for (int i = 0; i < L; i++)
        for (int j = 0; j < H; j++) {
            double S = lam[i] == 0 ? 1.0 / H : inf[i * H + j] / lam[i];
            double share = all == 0 ? 1.0 / L : lam[i] / all;
            double b = bc * (1 - 1 / beta) + bc / beta * L * H * (eps + share) * S / (1 + eps * L);
            cap[i * H + j] = (int)floor(fmax(0, b) + .5);
        }
}

// HeadKV's rows: every head's part of the pool rounded down, then one row more for the largest
// remainders
static void twin_headkv_caps(const double *score, int n, int base, double beta, int *cap) {
    int pool = (int)floor(base / beta), given = 0;
    double sum = 0, part[512];
    for (int i = 0; i < n; i++) sum += score[i];
    for (int i = 0; i < n; i++) {
        part[i] = sum > 0 ? score[i] * pool * n / sum : pool;
        cap[i] = (int)(part[i] + 1e-9);
        given += cap[i];
    }
    for (int more = pool * n - given; more > 0; more--) {
        int best = -1;
        for (int i = 0; i < n; i++) {
            if (part[i] - cap[i] < -1e-9) continue;  // has its row
            if (best < 0 || part[i] - cap[i] > part[best] - cap[best] + 1e-9) best = i;
        }
        cap[best]++;
    }
    for (int i = 0; i < n; i++) cap[i] += base - pool;
}

// DiliLazyKV and HeadKV: every query head reads the best rows of its own budget, and the window.
static void twin_head_budgets(BaseTwin *b, Twin *t, int l, const double *q, int n, int B) {
    int H = t->c->H, R = H / t->c->G, L = t->c->L, w = b->w < B ? b->w : B, cap[512], idx[4096], keep[4096];
    double one[4096];
    b->end = (int)arrlen(t->id);
    if (b->kind == BT_HEADKV) twin_headkv_caps(b->score, L * H, B - w, b->beta, cap);
    else twin_caps(b->score, L, H, B - w, b->beta, .01, cap);
    for (int g = 0; g < t->c->G; g++) {
        TwinRow *row = t->row[l * t->c->G + g];
        int rows = (int)arrlen(row), m = rows - w, k = 0;
        OWN char *wanted = xcalloc(rows + 1, 1);
        for (int h = l * H + g * R; h < l * H + g * R + R; h++) {
            twin_observe(t, l, h - l * H, q, n, b->w, one);
            twin_pool(one, m, b->width, 0);
            int got = twin_pick(one, m, cap[h], idx);
            for (int j = m; j < rows; j++) idx[got++] = j;
            arrsetlen(b->read[h], 0);
            for (int j = 0; j < got; j++) {
                wanted[idx[j]] = 1;
                arrput(b->read[h], row[idx[j]].src);
            }
        }
        for (int j = 0; j < rows; j++)
            if (wanted[j]) keep[k++] = j;
        twin_keep(t, l, g, keep, k);
    }
}

// What they read in decode, as a hook before a layer's attention.
static void base_twin_before(void *u, Twin *t, int l, const double *q, int n) {
    BaseTwin *b = u;
    (void)q;
    for (int h = 0; h < t->c->H && b->end && t->decoding; h++) {
        TwinRow *row = t->row[l * t->c->G + h / (t->c->H / t->c->G)];
        int *read = b->read[l * t->c->H + h], k = 0;
        char *mask = twin_mask(t, l, h, n);
        for (int r = 0; r < (int)arrlen(row); r++) {
            int listed = k < (int)arrlen(read) && read[k] == row[r].src;
            k += listed;
            mask[r] = listed || row[r].src >= b->end;
        }
    }
}

// The baselines as a hook after a layer's attention: they drop rows after a prefill, some also while decoding.
static void base_twin(void *u, Twin *t, int l, const double *q, const double *q_pre, int n) {
    BaseTwin *b = u;
    int N = (int)arrlen(t->id), H = t->c->H, D = t->c->D;
    if (l == t->c->L) return;
    // Decode steps go by it.
    if (!t->decoding && b->kind == BT_H2O) b->B = twin_budget(b, N);
    if (!t->decoding)
        for (int i = 0; b->seen && i < n; i++)
            if (t->pos[t->base + i] >= b->sink)
                for (int h = 0; h < H; h++)
                    for (int d = 0; d < D; d++)
                        arrput(b->seen[l * H + h], q_pre[((size_t)i * H + h) * D + d]);
    if (t->decoding ? b->kind < BT_H2O || N <= b->B : N <= twin_budget(b, N)) return;
    if (b->kind == BT_H2O) twin_h2o(t, l, b->B);
    else if (b->kind == BT_STREAMING) twin_streaming(t, l, b->B, b->sink);
    else if (b->kind == BT_TOVA) twin_tova(t, l, q, n, b->B);
    else if (b->kind == BT_EXPECTED) twin_expected(b, t, l, twin_budget(b, N));
    else if (b->kind == BT_KEYDIFF) twin_keydiff(t, l, twin_budget(b, N));
    else if (b->read) twin_head_budgets(b, t, l, q, n, twin_budget(b, N));
    else twin_snap(b, t, l, q, n, twin_budget(b, N));
}

static const struct {
    const char *method, *opt;
    BaseTwin b;
} base_case[] = {
    { "streaming", "budget=20", { BT_STREAMING, 20, 0, 0, 4, -1, NULL } },
    { "window", "budget=2 sink=8", { BT_STREAMING, 2, 0, 0, 0, -1, NULL } },
    { "tova", "budget=20", { BT_TOVA, 20, 0, 0, 0, -1, NULL } },
    { "snapkv", "budget=24 obs-window=8", { BT_SNAP, 24, 8, 7, 0, -1, NULL } },
    { "snapkv", "budget=33 obs-window=12 kernel=3", { BT_SNAP, 33, 12, 3, 0, -1, NULL } },
    { "snapkv", "budget=20 obs-window=1 kernel=1", { BT_SNAP, 20, 1, 1, 0, -1, NULL } },
    { "snapkv", "budget=24 obs-window=8 kernel=1023", { BT_SNAP, 24, 8, 1023, 0, -1, NULL } },
    { "snapkv", "budget=24 obs-window=8 kernel=5 pool=avg",
      { BT_SNAP, 24, 8, 5, 0, -1, NULL, .mean = 1 } },
    { "pyramidkv", "budget=24 obs-window=8 pool=avg", { BT_PYRAMID, 24, 8, 7, 0, -1, NULL, .mean = 1 } },
    { "expected-attention", "budget=24 ea-epsilon=.02", { BT_EXPECTED, 24, 0, 0, 4, -1, NULL, .epsilon = .02 } },
    { "keydiff", "ratio=.6", { BT_KEYDIFF, 0, 0, 0, 0, .6, NULL } },
    { "snapkv", "ratio=.6 obs-window=32", { BT_SNAP, 0, 32, 7, 0, .6, NULL } },
    { "adakv", "budget=24 obs-window=8", { BT_ADA, 24, 8, 7, 0, -1, NULL } },
    { "adakv", "budget=32 obs-window=8", { BT_ADA, 32, 8, 7, 0, -1, NULL } },
    { "adakv", "budget=41 obs-window=5 kernel=1", { BT_ADA, 41, 5, 1, 0, -1, NULL } },
    { "adakv", "ratio=.7 obs-window=8", { BT_ADA, 0, 8, 7, 0, .7, NULL } },
    { "pyramidkv", "budget=24 obs-window=8", { BT_PYRAMID, 24, 8, 7, 0, -1, NULL } },
    { "pyramidkv", "budget=60 obs-window=6", { BT_PYRAMID, 60, 6, 7, 0, -1, NULL } },
    // Just as many tokens as two budgets beside the window.
    { "pyramidkv", "budget=51 obs-window=6", { BT_PYRAMID, 51, 6, 7, 0, -1, NULL } },
    { "h2o", "budget=25", { BT_H2O, 25, 0, 0, 0, -1, NULL } },
    { "h2o", "ratio=.6", { BT_H2O, 0, 0, 0, 0, .6, NULL } },
    { "expected-attention", "budget=24", { BT_EXPECTED, 24, 0, 0, 4, -1, NULL } },
    { "expected-attention", "budget=30 sink=0", { BT_EXPECTED, 30, 0, 0, 0, -1, NULL } },
    { "dililazy", "budget=24 obs-window=8", { BT_DILI, 24, 8, 7, 0, -1, NULL, .beta = 1.351 } },
    { "dililazy", "budget=30 obs-window=4 kernel=3", { BT_DILI, 30, 4, 3, 0, -1, NULL, .beta = 1.351 } },
    { "dililazy", "budget=20 head-beta=1.1", { BT_DILI, 20, 16, 7, 0, -1, NULL, .beta = 1.1 } },
    { "dililazy", "ratio=.7", { BT_DILI, 0, 16, 7, 0, .7, NULL, .beta = 1.351 } },
    { "dililazy", "budget=40 obs-window=1 kernel=1", { BT_DILI, 40, 1, 1, 0, -1, NULL, .beta = 1.351 } },
    { "headkv", "budget=24", { BT_HEADKV, 24, 8, 7, 0, -1, NULL, .beta = 1.2 } },
    { "headkv", "budget=30 obs-window=4 kernel=3 head-beta=2", { BT_HEADKV, 30, 4, 3, 0, -1, NULL, .beta = 2 } },
    { "headkv", "ratio=.7 head-beta=1.01", { BT_HEADKV, 0, 8, 7, 0, .7, NULL, .beta = 1.01 } },
};

enum { BASE_CASES = sizeof base_case / sizeof *base_case };

// A file that holds text -> its name, to be freed; the file goes with the tests' folder.
static char *temp_text(const char *text) {
    static int made;
    char *path = copy_text(tmp_path(formatted("text-%d", made++ % 8)));
    put_file(path, text, strlen(text));
    return path;
}

// A flat file of scores in an order that is not the heads' -> its name, to be freed.
static char *scores_file(int L, int H, const double *x) {
    char t[4096], *p = t;
    p += sprintf(p, "{");
    for (int i = 0; i < L * H; i++) {
        int k = (i * 7 + 3) % (L * H);  // L*H is no multiple of 7 in these tests
        p += sprintf(p, "%s\"%d-%d\": [%.17g, %.17g]", i ? ", " : "", k / H, k % H, x[k] * .5,
                     x[k] * 1.5);
    }
    sprintf(p, "}");
    return temp_text(t);
}

// Every case against its twin over a script on a model of L layers; H2O's masses too. Of some seeds the heads' scores are
// all zero, of others those of one layer.
static void base_agree(int L, int H, int G, uint64_t seed, const Script *p) {
    OWN_MODEL Tiny m = tiny_model(L, H, G, 16, 32, 40, 61, seed);
    for (int k = 0; k < BASE_CASES; k++) {
        BaseTwin b = base_case[k].b;
        if (b.kind == BT_EXPECTED) b.seen = xcalloc((size_t)L * H, sizeof *b.seen);
        char *scores = NULL;
        for (int i = 0; i < L * H; i++)
            b.score[i] = seed % 4 != 2 && (seed % 4 != 3 || i >= 4) && rnd_int(6) ? pow(rnd_unit(), 3) : 0;
        if (b.beta) b.read = xcalloc((size_t)L * H, sizeof *b.read);
        if (b.beta) scores = scores_file(L, H, b.score);
        const char *opt = formatted("%s%s%s", base_case[k].opt, b.beta ? " head-scores=" : "", b.beta ? scores : "");
        TwinHooks hooks = { &b, .before = base_twin_before, .after = base_twin };
        OWN_BESIDE Beside x = run_beside(m, base_case[k].method, opt, hooks, p);
        for (int i = 0; i < L * G && b.kind == BT_H2O; i++)
            for (int r = 0; r < x.s->head[i].len; r++) {
                double mass = x.t->row[i][r].mass, found = x.s->head[i].mass[r];
                CHECK(fabs(found - mass) <= 1e-5 + 1e-5 * mass, "mass of row %d: %g, expected %g", r, found, mass);
            }
        size_t moments = (size_t)L * (sizeof(long) + (size_t)H * (16 + 16 * 16) * sizeof(double));
        CHECK(!b.seen || x.s->part[0].m->bytes(x.s, x.s->part[0].ms) == moments, "%zu bytes of moments", moments);
        for (int i = 0; b.seen && i < L * H; i++) arrfree(b.seen[i]);
        for (int i = 0; b.read && i < L * H; i++) arrfree(b.read[i]);
        free(b.seen);
        free(b.read);
        free(scores);
    }
}

TEST(baselines_twin, "every baseline agrees with its slow twin: logits 1e-5, same rows held and read, DiliLazyKV's and "
                     "HeadKV's by each query head; GQA 1:1, 2:1, 4:1, 3 KV heads; "
                     "a first turn of one token, turns shorter than the window, a prompt that ends the quiet time, "
                     "one layer, a layer that AdaKV leaves alone because its candidates do not exceed the budget") {
    static const int shape[4][2] = { { 4, 4 }, { 4, 2 }, { 4, 1 }, { 6, 3 } };
    Script p = { 3, { 90, 3, 40 }, { 6, 9, 4 }, 21 };
    Script small = { 5, { 1, 2, 30, 1, 5 }, { 0, 3, 2, 7, 1 }, 22 };
    for (int i = 0; i < 4; i++) base_agree(3, shape[i][0], shape[i][1], 41 + i, &p);
    for (int L = 1; L < 3; L++) base_agree(L, 6, 3, 51, &small);
    // AdaKV at a budget of 32 holds 31 rows behind the first turn, and 32 behind the second: its 24 candidates stay.
    Script rests = { 4, { 60, 1, 1, 5 }, { 0 }, 19 };
    base_agree(2, 2, 1, 19, &rests);
}

// Hook commit of a method that has asked for the last query alone, and wants eight.
static void greedy_commit(Session *s, void *ms, int l, const float *q, int T) {
    (void)ms;
    if (l == s->c->L) return;
    size_t mark = scratch_mark(s);
    window_scores(s, l, q, T, 8, scratch(s, (size_t)s->c->H * kv_longest(s, l) * sizeof(float)));
    scratch_reset(s, mark);
}

static const Method greedy_method = { .name = "greedy", .wants = KV_QUERY, .commit = greedy_commit };

TEST(window_unasked, "a method that reads more queries than it has had kept ends with a line; a turn that is as short "
                     "as what is kept is not refused") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 40, 61, 7);
    OWN_SESSION Session *s = session_of(m, "full", "");
    int ids[20];
    draw_ids(ids, 20, 61);
    observe(s, &greedy_method);
    CHECK(try_prefill(s, ids, 1) == 0, "a turn of one token: %s", die_text);
    int code = try_prefill(s, ids, 20);
    CHECK(code == EXIT_RUN && strstr(die_text, "8 queries are asked for, 1 are kept"), "exit %d, \"%s\"", code, die_text);
}

// In layer 0 tokens with the same id have keys of the same length, so a twin would choose among ties.
TEST(baselines_knorm, "knorm keeps B rows, and none that it drops has a shorter key") {
    OWN_MODEL Tiny m = tiny_model(3, 6, 3, 16, 32, 40, 61, 7);
    Session *s[2] = { session_of(m, "full", "budget=24"), session_of(m, "knorm", "budget=24") };
    int ids[70];
    draw_ids(ids, 70, 61);
    for (int i = 0; i < 2; i++) prefill(s[i], ids, 70);
    for (int l = 0; l < 3; l++)
        for (int g = 0; g < 3; g++) {
            const KVHead *all = kv_head(s[0], l, g), *h = kv_head(s[1], l, g);
            float k[70 * 16], longest = 0, shortest = INFINITY;
            kv_load_k(s[0], all, NULL, 0, 70, k);
            for (int r = 0, j = 0; r < 70; r++) {
                float length = sqrtf(dot_f32(k + r * 16, k + r * 16, 16));
                if (j < h->len && h->src[j] == r) {
                    longest = fmaxf(longest, length);
                    j++;
                } else {
                    shortest = fminf(shortest, length);
                }
            }
            CHECK(h->len == 24 && longest <= shortest, "layer %d, head %d: %d rows up to %g; dropped from %g", l, g,
                  h->len, longest, shortest);
        }
    for (int i = 0; i < 2; i++) session_done(s[i]);
}

// ==================================================================================================== 4 LOOPSERVE AND THE SPARSE PREFILLS

// The selections against brute force that recomputes everything from the definition, and whole dialogues, in which
// the program attends over lines, against a slow twin in double that knows masks only.

// ---- brute force

// Lines of one head in n rows of which p0 are old; samples R (m) with their rows P (m,n) in double.
typedef struct {
    int n, p0, m, hold, sink, local, *R;
    double alpha, max_cells, *P;
    char *v, *s;  // (n) chosen
    double rec[2], tot[2], cells;
} Brute;

// Room for the lines of one head: n rows of which p0 are old, m sampled rows.
static Brute brute_new(int n, int p0, int m) {
    return (Brute){ .n = n,
                    .p0 = p0,
                    .m = m,
                    .R = xcalloc(m, sizeof(int)),
                    .P = xcalloc((size_t)m * n, sizeof(double)),
                    .v = xcalloc(n, 1),
                    .s = xcalloc(n, 1),
                    .local = 1,
                    .max_cells = 2 };
}

// Frees what brute_new made.
static void brute_free(Brute *b) {
    free(b->R);
    free(b->P);
    free(b->v);
    free(b->s);
}

// How many cells of the new rows the line at x has.
static int brute_len(const Brute *b, int x) { return b->n - (x > b->p0 ? x : b->p0); }

// What is recovered, and the cells, from nothing but v and s.
static void brute_count(Brute *b) {
    double all = 0;
    memset(b->rec, 0, sizeof b->rec);
    memset(b->tot, 0, sizeof b->tot);
    for (int i = 0; i < b->m; i++)
        for (int c = 0; c <= b->R[i]; c++) {
            b->tot[b->hold && i % 2] += b->P[i * b->n + c];
            if (b->v[c] || b->s[b->R[i] - c]) b->rec[b->hold && i % 2] += b->P[i * b->n + c];
        }
    b->cells = 0;
    for (int x = 0; x < b->n; x++) b->cells += (b->v[x] + b->s[x]) * (double)brute_len(b, x);
    for (int r = b->p0; r < b->n; r++) all += r + 1;
    b->cells /= all;
}

// Whether one of the two kinds of lines recovers less than its share alpha.
static int brute_short(const Brute *b) {
    return b->rec[0] < b->alpha * b->tot[0] || b->rec[1] < b->alpha * b->tot[1];
}

// Marks only the lines that are always kept: the sink's columns and the local slashes.
static void brute_kept(Brute *b) {
    memset(b->v, 0, b->n);
    memset(b->s, 0, b->n);
    for (int x = 0; x < b->n; x++) {
        b->v[x] = x < b->sink;
        b->s[x] = x < b->local;
    }
}

// Variant b: the best line of all, again and again -> dense?
static int brute_exact(Brute *b) {
    OWN double *g = xcalloc(2 * b->n, sizeof *g);
    int dense = 0;
    brute_kept(b);
    for (brute_count(b); brute_short(b); brute_count(b)) {
        int best = -1;
        double key = 0;
        for (int x = 0; x < 2 * b->n; x++) g[x] = 0;
        for (int i = 0; i < b->m; i += 1 + b->hold)
            for (int c = 0; c <= b->R[i]; c++)
                if (!b->v[c] && !b->s[b->R[i] - c]) {
                    g[b->R[i] - c] += b->P[i * b->n + c];
                    g[b->n + c] += b->P[i * b->n + c];
                }
        // Slashes first, then verticals, ascending: a later one must be better.
        for (int x = 0; x < 2 * b->n; x++)
            if (g[x] > 1e-12 && g[x] / brute_len(b, x % b->n) > key) {
                key = g[x] / brute_len(b, x % b->n);
                best = x;
            }
        if (best < 0) {
            dense = b->hold && b->rec[1] < b->alpha * b->tot[1];
            break;
        }
        if (best < b->n)
            b->s[best] = 1;
        else
            b->v[best - b->n] = 1;
        brute_count(b);
        if (b->cells > b->max_cells) {
            dense = 1;
            break;
        }
    }
    return dense;
}

// Variant a -> dense?
static int brute_faithful(Brute *b, double *sum) {
    int n = b->n, nv = 0, ns = 0;
    // Weights and largest cells: slashes, verticals.
    double *w = xcalloc(4 * n, sizeof *w), tot = 0, olv = 0, ols = 0;
    for (int i = 0; i < b->m; i++)
        for (int c = 0; c <= b->R[i]; c++) {
            double x = b->P[i * n + c];
            int o = b->R[i] - c;
            w[o] += x;
            w[n + c] += x;
            tot += x;
            w[2 * n + o] = fmax(w[2 * n + o], x);
            w[3 * n + c] = fmax(w[3 * n + c], x);
        }
    memset(b->v, 0, n);
    memset(b->s, 0, n);
    for (*sum = 0; *sum < b->alpha * tot;) {
        int is = -1, iv = -1;
        for (int x = n - 1; x >= 0; x--) {
            if (!b->s[x] && (is < 0 || w[x] >= w[is])) is = x;
            if (!b->v[x] && (iv < 0 || w[n + x] >= w[n + iv])) iv = x;
        }
        double gs = is < 0 ? -1 : fmax(0, w[is] - olv);
        double gv = iv < 0 ? -1 : fmax(0, w[n + iv] - ols);
        if (gs <= 0 && gv <= 0) break;
        double ks = is < 0 ? 1 : fmax(1, brute_len(b, is) - nv);
        double kv = iv < 0 ? 1 : fmax(1, brute_len(b, iv) - ns);
        if (iv < 0 || (is >= 0 && gs / ks >= gv / kv)) {
            b->s[is] = 1;
            ns++;
            ols += w[2 * n + is];
            *sum += gs;
        } else {
            b->v[iv] = 1;
            nv++;
            olv += w[3 * n + iv];
            *sum += gv;
        }
    }
    b->s[0] = 1;
    free(w);
    brute_count(b);
    return *sum < b->alpha * tot;
}

// ---- the program's selections on the same input

typedef struct {
    Lines a;
    LoopFound f;
    float *P;
} Chosen;

// Kind 0: b, 1: a.
static Chosen choose(const Brute *b, int kind) {
    int n = b->n;
    Chosen x = {
        .a = { .n = n, .p0 = b->p0, .v = xcalloc(1, bit_bytes(n)), .s = xcalloc(1, bit_bytes(n)) },
        .P = xmalloc((size_t)b->m * n * sizeof(float))
    };
    OWN double *room = xmalloc((size_t)5 * n * sizeof *room);
    for (int i = 0; i < b->m * n; i++) x.P[i] = (float)b->P[i];
    LineSample p = { b->m, n, b->p0, b->R, x.P };
    LoopRule u = { b->alpha, b->sink, b->local, b->hold, b->max_cells };
    x.a.dense = (kind == 0 ? select_exact : select_faithful)(&p, &u, &x.a, room, &x.f);
    return x;
}

// Frees what a selection of the program returned.
static void chosen_free(Chosen *x) {
    free(x->a.v);
    free(x->a.s);
    free(x->P);
}

// How many lines are marked on one side only.
static int lines_differ(const Lines *a, const Brute *b) {
    int bad = 0;
    for (int x = 0; x < b->n; x++)
        bad += bit_get(a->v, x) != b->v[x] || bit_get(a->s, x) != b->s[x];
    return bad;
}

// Random sampled rows. Grid: multiples of 1/64, so that sums are exact and ties abound; else
// softmax rows with columns and diagonals that stand out, rounded to float so that both sides see
// the same numbers.
static Brute brute_random(int most_n, int grid) {
    int n = 2 + rnd_int(most_n - 1), p0 = rnd_int(n), m = 1 + rnd_int(n - p0 < 12 ? n - p0 : 12);
    Brute b = brute_new(n, p0, m);
    for (int i = 0; i < m; i++) b.R[i] = p0 + (int)((long)(i + 1) * (n - p0) / m) - 1;
    double peak = rnd_unit() * 6, *hot = xcalloc(2 * n, sizeof *hot);
    for (int x = 0; x < 2 * n; x++) hot[x] = rnd_int(8) ? 0 : peak * rnd_unit();
    for (int i = 0; i < m; i++) {
        double sum = 0, *p = b.P + (size_t)i * n;
        for (int c = 0; c <= b.R[i]; c++)
            sum += p[c] =
                grid ? rnd_int(5) / 64. : exp(hot[c] + hot[n + b.R[i] - c] + rnd_normal());
        for (int c = 0; c <= b.R[i] && !grid; c++) p[c] = (float)(p[c] / sum);
    }
    free(hot);
    b.alpha = grid ? rnd_int(17) / 16. : rnd_unit();
    b.sink = rnd_int(4);
    b.local = 1 + rnd_int(4);
    b.hold = rnd_int(2) && m > 1;
    if (rnd_int(2)) b.max_cells = .3 + rnd_unit();
    return b;
}

TEST(loopserve_rows, "RandomSelect gives the rows of D31, ascending, one a stratum, the last row always") {
    int R[64], a[] = { 82, 324, 442, 634, 747, 835, 1056, 1299 }, c[] = { 3, 4, 11, 15, 18, 25, 29, 33 };
    CHECK(sample_rows(1300, 8, 0, 0, R) == 8 && !memcmp(R, a, sizeof a), "8 of 1300: %d %d", R[0], R[1]);
    CHECK(sample_rows(300, 64, 1, 2, R) == 64 && !memcmp(R, c, sizeof c), "64 of 300: %d %d", R[0], R[1]);
    for (int i = 0; i < 300; i++) {
        int nh = 1 + rnd_int(200), m = sample_rows(nh, 1 + rnd_int(64), i, 3, R);
        int bad = R[m - 1] != nh - 1;
        for (int j = 0; j < m; j++) bad += R[j] < (long)j * nh / m || R[j] >= (long)(j + 1) * nh / m;
        CHECK(!bad, "%d rows of %d", m, nh);
    }
}

TEST(loopserve_greedy, "the choice is the exact greedy, ties included, and alpha of both halves is recovered or the head is "
                       "dense; variant a's sum never exceeds the mass really recovered, and reaches alpha unless the head is "
                       "dense") {
    int dense[2] = { 0 };
    rnd_seed(21);
    for (int i = 0; i < 2000; i++) {
        int kind = i % 5 > 2;
        Brute b = brute_random(40, i % 2);
        if (kind) b.hold = 0;
        Chosen x = choose(&b, kind);
        double sum = 0, all, slack = 1e-6 * b.m;
        int d = kind ? brute_faithful(&b, &sum) : brute_exact(&b);
        CHECK(d == x.a.dense && !lines_differ(&x.a, &b), "case %d: n %d m %d alpha %g: %d lines differ, dense %d %d", i, b.n,
              b.m, b.alpha, lines_differ(&x.a, &b), d, x.a.dense);
        brute_count(&b);
        all = b.tot[0] + b.tot[1];
        if (!kind) sum = b.rec[0] + b.rec[1];
        CHECK(fabs(x.f.mass * all - sum) < 1e-6 || all == 0, "case %d: claims %g", i, x.f.mass);
        CHECK(sum <= b.rec[0] + b.rec[1] + 1e-9, "case %d: claims %g, recovers %g", i, sum, b.rec[0]);
        CHECK(kind || fabs(x.f.cells - b.cells) < 1e-9, "case %d: cells %g, are %g", i, x.f.cells, b.cells);
        CHECK(d || kind || (b.rec[0] >= b.alpha * b.tot[0] - slack && b.rec[1] >= b.alpha * b.tot[1] - slack),
              "case %d: recovers %g of %g", i, b.rec[0], b.tot[0]);
        CHECK(d || !kind || x.f.mass >= b.alpha - 1e-12, "case %d: %g < %g", i, x.f.mass, b.alpha);
        dense[kind] += d;
        chosen_free(&x);
        brute_free(&b);
    }
    CHECK(dense[0] > 50 && dense[0] < 900 && dense[1] > 5, "%d and %d of 2000 dense", dense[0], dense[1]);
}

// ---- whole dialogues: LoopServe as masks on the slow twin

typedef struct {
    int prefill, decode, kind, m, min_context, sink, local, hold, first, interval, obs;
    int B;
    double alpha, max_cells;
    int prompt_end, ring_from;
    double **q;  // (L) stb_ds: q (H*D) of every token seen
    int *end;
    char **chosen;  // (L*H): candidates when it last chose, 0: never; (end)
    // Another method beside it.
    void (*after)(void *u, Twin *t, int l, const double *q, const double *qp, int n);
    void *after_u;
    int dense, passes;
} LoopTwin;

// The lines of one head as a mask.
static void loop_twin_mask(LoopTwin *u, Twin *t, int l, int h, const double *q, int n) {
    int H = t->c->H, D = t->c->D, N = (int)arrlen(t->row[l * t->c->G + h / (H / t->c->G)]);
    int R[256];
    u->passes++;
    u->dense++;
    if (!u->prefill || n < 4 * u->m || N <= u->min_context || u->alpha >= 1) return;
    Brute b = brute_new(N, N - n, u->m);
    b.alpha = u->alpha;
    b.sink = u->sink;
    b.local = u->local;
    b.hold = u->hold && u->kind != 1;
    b.max_cells = u->max_cells;
    sample_rows(n, u->m, t->turn, l, R);
    for (int i = 0; i < u->m; i++) {
        b.R[i] = N - n + R[i];
        twin_probs(t, l, h, R[i], q + ((size_t)R[i] * H + h) * D, b.P + (size_t)i * N);
    }
    double sum;
    if (!(u->kind ? brute_faithful(&b, &sum) : brute_exact(&b))) {
        u->dense--;
        char *mask = twin_mask(t, l, h, n);
        for (int r = N - n; r < N; r++)
            for (int c = 0; c <= r; c++) mask[(size_t)(r - N + n) * N + c] = b.v[c] || b.s[r - c];
    }
    brute_free(&b);
}

// LoopServe's selection amid decoding: scores of the last `obs` queries, the best B rows of a head.
static void loop_twin_choose(LoopTwin *u, Twin *t, int l) {
    int H = t->c->H, D = t->c->D, R = H / t->c->G;
    int from = t->base - u->obs + 1 > u->ring_from ? t->base - u->obs + 1 : u->ring_from;
    for (int g = 0; g < t->c->G; g++) {
        TwinRow *rows = t->row[l * t->c->G + g];
        int N = (int)arrlen(rows), cand = 0;
        OWN double *p = xmalloc(N * sizeof *p), *score = xcalloc(N, sizeof *score);
        for (int j = 0; j < N; j++) cand += rows[j].src < u->prompt_end;
        for (int r = 0; r < R; r++)
            for (int i = from; i <= t->base; i++) {
                twin_probs(t, l, g * R + r, i - t->base,
                           u->q[l] + (size_t)i * H * D + (g * R + r) * D, p);
                for (int j = 0; j < N; j++) score[j] += p[j];
            }
        for (int r = 0; r < R; r++) {
            int at = l * H + g * R + r;
            double *x = score;
            free(u->chosen[at]);
            u->chosen[at] = xcalloc(cand + 1, 1);
            u->end[at] = cand;
            // Among the best B: fewer than B are better, ties to the lower index.
            for (int j = 0; j < cand; j++) {
                int better = 0;
                for (int k = 0; k < cand; k++) better += x[k] > x[j] || (x[k] == x[j] && k < j);
                u->chosen[at][j] = better < u->B;
            }
        }
    }
}

// Before a layer's attention: keeps the queries, chooses a prefill's lines, and rows each
// `interval` steps.
static void loop_twin_before(void *p, Twin *t, int l, const double *q, int n) {
    LoopTwin *u = p;
    size_t row = (size_t)t->c->H * t->c->D, all = n * row;
    arrsetlen(u->q[l], t->base * row);
    double *to = arraddnptr(u->q[l], all);
    memcpy(to, q, all * sizeof *q);
    for (int h = 0; h < t->c->H && !t->decoding; h++) loop_twin_mask(u, t, l, h, q, n);
    if (!t->decoding) u->ring_from = t->base + n - (n < u->obs ? n : u->obs);
    if (t->decoding && u->decode && t->step + 1 >= u->first &&
        (t->step + 1 - u->first) % u->interval == 0)
        loop_twin_choose(u, t, l);
    for (int h = 0; h < t->c->H && t->decoding; h++) {
        int at = l * t->c->H + h, N = (int)arrlen(t->row[l * t->c->G + h / (t->c->H / t->c->G)]);
        char *mask = u->end[at] ? twin_mask(t, l, h, n) : NULL;
        for (int r = 0; r < N && mask; r++) mask[r] = r >= u->end[at] || u->chosen[at][r];
    }
}

// After a prefill every head begins anew with all rows.
static void loop_twin_after(void *p, Twin *t, int l, const double *q, const double *qp, int n) {
    LoopTwin *u = p;
    if (l == t->c->L && !t->decoding) {
        u->prompt_end = (int)arrlen(t->id);
        memset(u->end, 0, (size_t)l * t->c->H * sizeof(int));
    }
    if (u->after) u->after(u->after_u, t, l, q, qp, n);
}

// The twin's settings out of the program's options.
static LoopTwin loop_twin(const Options *o, const Config *c, const char *method) {
    int paper = opt_int(o, "paper");
    LoopTwin u = { .prefill = !strstr(method, "loopserve-d"),
                   .decode = !strstr(method, "loopserve-p"),
                   .min_context = opt_int(o, "loopserve-min-context"),
                   .m = opt_int(o, "loopserve-samples"),
                   .sink = opt_int(o, "sink") < 0 ? 4 : opt_int(o, "sink"),
                   .local = opt_int(o, "loopserve-local"),
                   .alpha = paper && !opt_given(o, "loopserve-alpha") ? .955 : opt_real(o, "loopserve-alpha"),
                   .max_cells = opt_real(o, "loopserve-max-cells"),
                   .first = opt_int(o, "loopserve-first"),
                   .interval = opt_int(o, "loopserve-interval"),
                   .B = opt_int(o, "budget") };
    u.kind = paper;
    u.hold = u.m >= 32;
    u.obs = opt_int(o, "loopserve-obs") ? opt_int(o, "loopserve-obs") : u.interval;
    u.q = xcalloc(c->L, sizeof *u.q);
    u.end = xcalloc((size_t)c->L * c->H, sizeof(int));
    u.chosen = xcalloc((size_t)c->L * c->H, sizeof(char *));
    return u;
}

// Frees a LoopTwin.
static void loop_twin_free(LoopTwin *u, const Config *c) {
    for (int l = 0; l < c->L; l++) arrfree(u->q[l]);
    for (int i = 0; i < c->L * c->H; i++) free(u->chosen[i]);
    free(u->q);
    free(u->end);
    free(u->chosen);
}

// Definition 1 on the twin: this turn's prefill, with the previous answer in front of it
static void loop_twin_prefill(void *p, Twin *t, const int *ids, int n, double *logits) {
    LoopTwin *u = p;
    int k = (int)arrlen(t->id) - u->prompt_end;
    OWN int *all = xmalloc((n + k + 1) * sizeof *all);
    if (k) memcpy(all, t->id + u->prompt_end, k * sizeof *all);
    memcpy(all + k, ids, n * sizeof *all);
    if (k) twin_truncate(t, u->prompt_end);
    twin_prefill(t, all, n + k, logits);
}

// Session and twin side by side. window: 0, or the width of all layers' sliding windows; after: what another part, whose
// settings are after_u, does when a layer has attended. Returns the share of prefills' heads that read everything.
static double loop_agrees(const char *method, const char *options, const Script *p, int H, int G, int window,
                          void (*after)(void *, Twin *, int, const double *, const double *, int), void *after_u) {
    Tiny m = tiny_model(2, H, G, 16, 32, 48, 61, 40 + H + G);
    if (window) tiny_window(m, ~0u, window);
    Options *o = options_of(options);
    LoopTwin u = loop_twin(o, m.c, method);
    u.after = after;
    u.after_u = after_u;
    TwinHooks hooks = { &u, .before = loop_twin_before, .after = loop_twin_after, .prefill = loop_twin_prefill };
    Beside x = run_beside(m, method, options, hooks, p);
    beside_done(&x);
    options_free(o);
    loop_twin_free(&u, m.c);
    tiny_free(m);
    return (double)u.dense / u.passes;
}

#define LOOP_SMALL \
    "loopserve-min-context=0 loopserve-samples=16 loopserve-local=8 loopserve-max-cells=.9 "

TEST(loopserve_twin, "the method agrees with its slow twin over three turns, both "
                     "variants, and its halves alone") {
    Script p = { 3, { 140, 100, 70 }, { 34, 20, 17 }, 5 };
    const char *run[][2] = {
        { "loopserve", LOOP_SMALL "loopserve-alpha=.85 budget=32" },
        { "loopserve", "loopserve-min-context=0 loopserve-samples=33 loopserve-local=8 "
                       "loopserve-max-cells=.95 sink=0 loopserve-alpha=.6 budget=20" },
        { "loopserve", LOOP_SMALL "loopserve-alpha=.7 budget=24 sink=0 loopserve-local=1 "
                                  "loopserve-first=5 loopserve-interval=3 loopserve-obs=7" },
        { "loopserve", LOOP_SMALL "paper loopserve-alpha=.6 budget=40" },
        { "loopserve", LOOP_SMALL "paper budget=40 loopserve-first=1 loopserve-interval=1" },
        { "loopserve-p", LOOP_SMALL "loopserve-alpha=.9" },
        { "loopserve-d", "budget=30 loopserve-first=3 loopserve-interval=5 loopserve-obs=20" },
        // In a sliding window.
        { "loopserve", LOOP_SMALL "loopserve-alpha=.9 budget=30" }
    };
    int shape[4][2] = { { 4, 2 }, { 6, 3 }, { 4, 1 }, { 3, 3 } };
    double sparse = 0;
    for (int i = 0; i < 8; i++) {
        double dense = loop_agrees(run[i][0], run[i][1], &p, shape[i % 4][0], shape[i % 4][1], i == 7 ? 45 : 0, NULL,
                                   NULL);
        if (i < 4 || i == 5 || i == 7)
            CHECK(dense < .9, "%s %s: %g of the heads are dense: tests nothing", run[i][0],
                  run[i][1], dense);
        sparse += 1 - dense;
    }
    CHECK(sparse > 2, "sparse heads");
}

TEST(loopserve_beside, "loopserve-p beside methods that drop rows, heads of unequal lengths among "
                       "them: lines live in rows") {
    Script p = { 3, { 110, 70, 70 }, { 12, 5, 3 }, 8 };
    BaseTwin streaming = { BT_STREAMING, 90, 0, 0, 4, -1 };
    BaseTwin ada = { BT_ADA, 90, 8, 7, 0, -1 }, pyramid = { BT_PYRAMID, 60, 8, 7, 0, -1 };
    double dense[3] = {
        loop_agrees("loopserve-p+streaming", LOOP_SMALL "loopserve-alpha=.8 budget=90", &p, 4, 2, 0, base_twin,
                    &streaming),
        loop_agrees("adakv+loopserve-p", LOOP_SMALL "loopserve-alpha=.8 budget=90 obs-window=8", &p, 4, 2, 0, base_twin,
                    &ada),
        loop_agrees("loopserve-p+pyramidkv", LOOP_SMALL "loopserve-alpha=.8 budget=60 obs-window=8", &p, 4, 2, 0,
                    base_twin, &pyramid),
    };
    for (int i = 0; i < 3; i++) CHECK(dense[i] < .9, "run %d: %g of the heads are dense", i, dense[i]);
}

// ---- A-shape, Tri-shape, MInference

typedef struct {
    int kind, init, local, last;
} ShapeTwin;

// A-shape (kind 0), tri-shape (1) and MInference (2) as masks; the latter's ranks are counted one by one.
static void shape_twin_before(void *p, Twin *t, int l, const double *q, int n) {
    ShapeTwin *u = p;
    int H = t->c->H, D = t->c->D, N = (int)arrlen(t->row[l * t->c->G]), m = n < 64 ? n : 64;
    for (int h = 0; h < H && !t->decoding; h++) {
        char *mask = twin_mask(t, l, h, n);
        Brute b = brute_new(N, N - n, m);
        OWN double *sum = xcalloc(2 * N, sizeof *sum);
        for (int i = 0; i < m; i++) {
            twin_probs(t, l, h, n - m + i, q + ((size_t)(n - m + i) * H + h) * D, b.P + (size_t)i * N);
            for (int c = 0; c < N - m + i + 1; c++) {
                sum[c] += b.P[(size_t)i * N + c];
                sum[N + N - m + i - c] += b.P[(size_t)i * N + c];
            }
        }
        for (int x = 0; x < 2 * N; x++)
            if (x % N < (x < N ? 30 : 100)) sum[x] = 1e9;
        for (int x = 0; x < 2 * N; x++) {
            int better = 0;
            for (int y = x / N * N; y < x / N * N + N; y++)
                better += sum[y] > sum[x] || (sum[y] == sum[x] && y < x);
            if (u->kind < 2) better = x % N;
            (x < N ? b.v : b.s)[x % N] = better < (x < N ? u->init : u->local);
        }
        for (int r = N - n; r < N; r++)
            for (int c = 0; c <= r; c++)
                mask[(size_t)(r - N + n) * N + c] = b.v[c] || b.s[r - c] || (u->kind == 1 && r >= N - u->last);
        brute_free(&b);
    }
}

TEST(sparse_prefill_twin, "A-shape, Tri-shape and MInference agree with their slow twins, alone "
                          "and beside StreamingLLM") {
    Script p = { 2, { 130, 90 }, { 3, 2 }, 8 };
    const char *run[][2] = {
        { "a-shape", "shape-init=9 shape-local=31" },
        { "tri-shape", "shape-init=3 shape-local=20 shape-last=11" },
        { "minference", "minference-verticals=40 minference-slashes=110" },
        { "minference", "minference-verticals=30 minference-slashes=60" }
    };
    for (int i = 0; i < 4; i++) {
        OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 48, 61, 50 + i);
        ShapeTwin u = { .kind = i < 2 ? i : 2,
                        .init = (int[]){ 9, 3, 40, 30 }[i],
                        .local = (int[]){ 31, 20, 110, 60 }[i],
                        .last = 11 };
        OWN_BESIDE Beside x = run_beside(m, run[i][0], run[i][1], (TwinHooks){ &u, .before = shape_twin_before }, &p);
        (void)x;
    }
}

// ==================================================================================================== 5 PATS

// The slow side of every comparison is written in double or element by element, and shares no code
// with PATS' section.

// 3.1 with the formula of its Section 3, in double.
static double slow_bits(int schedule, int b_min, int b_max, int t, int T) {
    // All times n: ties stay ties.
    double n = T - 1, x = t - 1;
    double u = schedule == PATS_OLD ? n - x : schedule == PATS_NEW ? x : n - fabs(2 * x - n);
    double b = floor(b_min + b_max * u / n + .5);
    return b < b_min ? b_min < b_max ? b_min : b_max : b > b_max ? b_max : b;
}

// X an f16 value; b of its 10 mantissa bits go.
static double slow_cut(double x, int b) {
    int e;
    if (!b || !x) return x;
    frexp(fabs(x), &e);
    // What one unit of the last place left is worth.
    double q = ldexp(1, (e - 11 > -24 ? e - 11 : -24) + b);
    return copysign(floor(fabs(x) / q) * q, x);
}

// n elements h, packed without their b low bits and read again.
static void cut_row(uint16_t *h, int n, int b) {
    Region reg = { .n = 1, .w = 16 - b };
    OWN unsigned char *p = xcalloc((size_t)n * 2 + PATS_GUARD, 1);
    pats_write_row(p, h, n, reg.w, 0);
    pats_load_region(0, &reg, p, 1, n, h);
}

TEST(pats_schedule_slow, "the integer schedule is the formula rounded half up, for thousands of "
                         "random cases, T = 1 and t beyond T included; old is new from the other end") {
    rnd_seed(4);
    for (int i = 0; i < 20000; i++) {
        int schedule = rnd_int(3), b_max = rnd_int(11), b_min = rnd_int(b_max + 1);
        int T = 1 + rnd_int(i % 2 ? 20 : 40000), t = 1 + rnd_int(T);
        double want = T > 1                  ? slow_bits(schedule, b_min, b_max, t, T)
                      : schedule == PATS_OLD ? b_max
                                             : b_min;
        CHECK(pats_schedule(schedule, b_min, b_max, t, T) == want,
              "schedule %d, %d..%d, t %d of %d", schedule, b_min, b_max, t, T);
        int old = pats_schedule(PATS_OLD, b_min, b_max, t, T), turned = pats_schedule(PATS_NEW, b_min, b_max, T + 1 - t, T);
        CHECK(T == 1 || old == turned, "old and new, t %d of %d", t, T);
        CHECK(T == 1 || pats_schedule(schedule, b_min, b_max, T + 1 + t, T) ==
                            (schedule == PATS_NEW ? b_max : b_min),
              "beyond the end");
    }
}

// The mean of a schedule's bits over T rows, in percent of 16.
static double mem_ideal(int schedule, int b_max, int T) {
    double sum = 0;
    for (int t = 1; t <= T; t++) sum += pats_schedule(schedule, 2, b_max, t, T);
    return 100 * sum / T / 16;
}

TEST(pats_mem_table,
     "ideal MEM of the paper's setting, and what dense rows and 64-byte rows really save") {
    double ideal[2][4] = { { 21.875, 29.163, 35.938, 42.493 }, { 21.875, 29.150, 35.938, 42.468 } };
    double mid128[4] = { 21.875, 29.004, 35.938, 42.285 };

    struct {
        int D;
        double save[2][4];
    } real[] = {
        // [dense, rows64][b_max 4 6 8 10]
        { 64, { { 21.9, 29.0, 35.9, 42.2 }, { 0, 0, 15.6, 22.5 } } },
        { 128, { { 21.9, 29.1, 35.9, 42.4 }, { 0, 14.6, 25.0, 30.0 } } },
        { 256, { { 21.9, 29.1, 35.9, 42.4 }, { 10.9, 18.7, 29.7, 33.7 } } },
    };

    for (int i = 0; i < 4; i++) {
        int b = 4 + 2 * i;
        CHECK(fabs(mem_ideal(PATS_NEW, b, 1024) - ideal[0][i]) < 6e-4 &&
                  fabs(mem_ideal(PATS_OLD, b, 1024) - ideal[0][i]) < 6e-4,
              "new, old %d: %.4f", b, mem_ideal(PATS_NEW, b, 1024));
        CHECK(fabs(mem_ideal(PATS_MIDDLE, b, 1024) - ideal[1][i]) < 6e-4, "middle %d: %.4f", b,
              mem_ideal(PATS_MIDDLE, b, 1024));
        CHECK(fabs(mem_ideal(PATS_MIDDLE, b, 128) - mid128[i]) < 6e-4, "middle %d at 128: %.4f", b,
              mem_ideal(PATS_MIDDLE, b, 128));
        for (int k = 0; k < 6; k++) {
            int D = real[k / 2].D, rows64 = k % 2;
            Region *reg = NULL;
            for (int t = 1; t <= 1024; t++)
                reg = region_add(reg, 16 - pats_schedule(PATS_MIDDLE, 2, b, t, 1024), rows64, D);
            CHECK((int)arrlen(reg) <= 2 * (b - 2) + 1, "%d regions", (int)arrlen(reg));
            double save =
                100 * (1 - (double)(regions_bytes(reg, (int)arrlen(reg), rows64, D) - PATS_GUARD) /
                               (1024.0 * D * 2));
            CHECK(fabs(save - real[k / 2].save[rows64][i]) < .11,
                  "D %d rows64 %d b_max %d: saves %.2f", D, rows64, b, save);
            arrfree(reg);
        }
    }
}

TEST(pats_cut, "one element: every f16 value against the slow cut, read as it is and with half a step; what is "
               "cut twice is cut by the most") {
    enum { N = 0x10000 };

    static uint16_t plain[N], twice[N];
    for (int b = 0; b <= 10; b++) {
        for (int i = 0; i < N; i++) plain[i] = twice[i] = (uint16_t)i;
        cut_row(plain, N, b);
        cut_row(twice, N, b / 2);
        cut_row(twice, N, b);
        for (unsigned u = 0; u < N; u++) {
            if ((u & 0x7c00) == 0x7c00) continue;
            double x = f16_to_f32((uint16_t)u);
            CHECK(f16_to_f32(plain[u]) == slow_cut(x, b), "%04x by %d: %04x", u, b, plain[u]);
            CHECK(twice[u] == plain[u], "%04x by %d and by %d: %04x", u, b / 2, b, twice[u]);
        }
    }
}

// ---- timing, without any rows: one table for all heads

// A session with a table of bits for one head and no rows.
static Session *pats_table_session(Config *c, Options *o) {
    *c = (Config){ .D = 64 };
    Session *s = xcalloc(1, sizeof *s);
    *s = (Session){ .c = c, .opt = o, .n_part = 1, .scratch = arena_new() };
    s->part[0] = (Part){ .m = &pats_method, .ms = xcalloc(1, sizeof(Pats)) };
    if (pats_open(s, s->part[0].ms)) CHECK(0, "%s", s->err);
    return s;
}

// Frees a session that has a table of bits and no rows.
static void pats_table_close(Session *s) {
    pats_close(s, s->part[0].ms);
    free(s->part[0].ms);
    arena_free(s->scratch);
    free(s);
}

TEST(pats_ratchet,
     "re-packs of a long decode: 6, 12, 18 for growth by 2, 4, 8; the savings of NOTES; B[t] never "
     "falls, is never under the definition by more than an eighth allows") {
    struct {
        const char *opt;
        int from, to, repacks;
        double cut[2];          // per cent of the bits at the end, and after one more re-pack; -1: any
    } want[] = {
        { "pats-bmax=10", 1024, 2048, 6, { 41.30, 46.47 } },
        { "pats-bmax=10", 1024, 4096, 12, { -1, -1 } },
        { "pats-bmax=10", 4096, 32768, 18, { 47.33, 51.20 } },
        { "pats-bmax=10 pats-schedule=old", 4096, 32768, 18, { 39.29, 42.43 } },
        { "pats-bmax=10 pats-schedule=old sink=0", 4096, 32768, 18, { -1, 42.45 } },
    };

    for (int i = 0; i < 5; i++) {
        Config c;
        OWN_OPTIONS Options *o = options_of(formatted("ctk=f16 ctv=f16 %s", want[i].opt));
        Session *s = pats_table_session(&c, o);
        Pats *x = s->part[0].ms;
        int repacks = 0;
        for (int T = want[i].from; T <= want[i].to; T++) {
            s->base = T == want[i].from ? 0 : T - 1;
            s->n_tok = T;
            pats_commit(s, x, 0, NULL, 1);
            CHECK(x->due == (x->T_last == T), "T_last");
            repacks += x->due;
            if (!x->due) continue;
            for (int t = 0; t < x->cut; t++)
                CHECK(x->bits[t] >= pats_bits(x, t, T), "T %d t %d: %d bits", T, t, x->bits[t]);
            CHECK(x->cut == T - 128 && !x->bits[x->cut], "the window stays raw");
        }
        CHECK(repacks == want[i].repacks, "%d..%d: %d re-packs", want[i].from, want[i].to, repacks);
        for (int t = 16; t < x->cut; t++)
            CHECK(pats_bits(x, t, want[i].to) - x->bits[t] <= 10 / 9.0 + 1,
                  "t %d is %d bits under the definition", t,
                  pats_bits(x, t, want[i].to) - x->bits[t]);
        for (int more = 0; more < 2; more++) {
            double sum = 0;
            if (more) x->T_last = 0;
            if (more) pats_commit(s, x, 0, NULL, 1);
            for (int t = 0; t < x->cut; t++) sum += x->bits[t];
            sum *= 100.0 / 16 / want[i].to;
            CHECK(want[i].cut[more] < 0 || fabs(sum - want[i].cut[more]) < .006, "%s: %.3f %%", want[i].opt, sum);
        }
        for (int t = 0; t < x->sink; t++)
            CHECK(x->bits[t] == 2, "sink %d has lost %d bits", t, x->bits[t]);
        pats_table_close(s);
    }
}

// ---- whole dialogues against in-place cutting

// `ref` runs the same selection on plain f16 rows and after every pass its rows are cut by the
// rules where they stand. Logits must be the same bits.
typedef struct {
    int schedule, is_static, b_min, b_max, sink, window, T_end, T_last;
    unsigned char bits[20000];
} SlowPats;

// What a pass does to the bits and rows: each row is cut in place to its bits by age, never to
// more.
static void slow_pats_pass(SlowPats *x, Session *s) {
    int T = s->n_tok, D = s->c->D;
    if (8 * T < 9 * x->T_last) return;
    x->T_last = T;
    for (int t = 0; t < T - x->window; t++) {
        int len = x->is_static ? x->T_end : T;
        int b = t < x->sink ? x->b_min
                : t >= len ? x->schedule == PATS_NEW ? x->b_max : x->b_min
                           : (int)slow_bits(x->schedule, x->b_min, x->b_max, t + 1, len);
        if (b > x->bits[t]) x->bits[t] = (unsigned char)b;
    }
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        KVHead *h = &s->head[i];
        for (int r = 0; r < h->len; r++)
            for (int d = 0; d < 2 * D; d++) {
                uint16_t *e = (uint16_t *)(d < D ? h->k : h->v) + (size_t)r * D + d % D;
                *e = f32_to_f16((float)slow_cut(f16_to_f32(*e), x->bits[h->src[r]]));
            }
    }
}

// Session.forward of the session whose rows are cut in place.
static SlowPats *slow_pats;

static float *slow_pats_forward(Session *s, const Token *in, int n) {
    float *logits = forward(s, in, n);
    slow_pats_pass(slow_pats, s);
    return logits;
}

// What the head holds must be what its table says it holds, to the byte.
static void check_packed(const Session *s, const char *who) {
    const Pats *x = pats_of(s);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        int rows = 0;
        size_t end = 0;
        for (int g = 0; g < h->n_reg; g++) {
            CHECK(h->reg[g].row0 == rows && h->reg[g].n > 0 && h->reg[g].base >= end &&
                      h->reg[g].base < end + 64 && h->reg[g].base % 64 == 0,
                  "%s: region %d of head %d", who, g, i);
            CHECK(!g || h->reg[g].w != h->reg[g - 1].w, "%s: two regions of one width", who);
            for (int r = rows; r < rows + h->reg[g].n; r++)
                CHECK(h->reg[g].w == 16 - x->bits[h->src[r]], "%s: row %d is %d bits wide, B %d",
                      who, r, h->reg[g].w, x->bits[h->src[r]]);
            end = h->reg[g].base + h->reg[g].n * pats_row_bytes(x->rows64, s->c->D, h->reg[g].w);
            rows += h->reg[g].n;
        }
        CHECK(rows == h->packed && h->packed <= h->len, "%s: %d rows in regions, packed %d", who,
              rows, h->packed);
        CHECK(h->pk_bytes == (rows ? end + PATS_GUARD : 0), "%s: %zu bytes held, %zu used", who,
              h->pk_bytes, end);
        for (int r = 0; r < h->len; r++)
            CHECK((h->src[r] < x->cut) == (r < h->packed), "%s: row %d", who, r);
    }
    check_rows(s, who, "");
}

// Runs a script with packed rows beside one whose plain f16 rows are cut in place; logits and rows must agree.
static void pats_against_slow(const char *opt, Tiny m, const Script *p) {
    const char *text = formatted("ctk=f16 ctv=f16 %s", opt);
    OWN_SESSION Session *s = session_of(m, "pats", text), *ref = session_of(m, "full", text);
    const Pats *x = pats_of(s);
    OWN SlowPats *slow = xcalloc(1, sizeof *slow);
    *slow = (SlowPats){ .schedule = x->schedule,
                        .is_static = x->T_end > 0,
                        .b_min = x->b_min,
                        .b_max = x->b_max,
                        .sink = x->sink,
                        .window = x->window,
                        .T_end = x->T_end };
    slow_pats = slow;
    ref->forward = slow_pats_forward;
    OWN float *a = run_session(s, p), *b = run_session(ref, p);
    CHECK(!memcmp(a, b, (size_t)script_rows(p) * m.c->V * sizeof *a), "%s: logits differ", opt);
    CHECK(!memcmp(x->bits, slow->bits, s->n_tok < x->cap ? s->n_tok : x->cap), "%s: B[t] differs", opt);
    CHECK(!heads_differ(s, ref), "%s: other rows", opt);
    check_packed(s, opt);
}

TEST(pats_exact, "every schedule, policy and rounding over four turns equals plain rows cut in "
                 "place, bit for bit, in both formats") {
    // The last three are static: the length of the dialogue is known.
    const char *schedule[] = { "middle", "old", "middle", "old", "new" };
    Script p = { 4, { 70, 1, 33, 9 }, { 40, 3, 2, 30 }, 21 };
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 48, 61, 6);
    for (int i = 0; i < 20; i++) {
        pats_against_slow(formatted("pats-window=%d sink=%d pats-bmax=%d pats-schedule=%s pats-tend=%d pats-format=%s",
                                    i % 6 ? 12 : 0, i % 7 ? 3 : 0, 4 + i % 4 * 2, schedule[i % 5],
                                    i % 5 < 2 ? 0 : i % 2 ? 188 : 90, i % 3 ? "dense" : "rows64"), m, &p);
    }
}

TEST(pats_keep, "dropping packed rows, truncating and going on: hundreds of random cases, the rows "
                "left are the same bits") {
    OWN_MODEL Tiny m = tiny_model(1, 2, 2, 8, 16, 16, 31, 6);
    rnd_seed(77);
    for (int i = 0; i < 200; i++) {
        const char *text = formatted("ctk=f16 ctv=f16 pats-window=%d sink=%d pats-format=%s pats-tend=%d", rnd_int(30),
                                     rnd_int(6), i % 2 ? "dense" : "rows64", i % 3 ? 0 : 200);
        OWN_SESSION Session *s = session_of(m, "pats", text);
        for (int round = 0; round < 4; round++) {
            int ids[80], n = 1 + rnd_int(70), keep[512], kept = 0, g = rnd_int(2);
            for (int k = 0; k < n; k++) ids[k] = rnd_int(31);
            prefill(s, ids, n);
            KVHead *h = kv_head(s, 0, g);
            int N = h->len, src[512];
            OWN float *k = xmalloc((size_t)(N + 1) * 16 * sizeof *k);
            float *v = k + (size_t)(N + 1) * 8, now_k[8], now_v[8];
            kv_load_k(s, h, NULL, 0, N, k);
            kv_load_v(s, h, NULL, 0, N, v);
            memcpy(src, h->src, N * sizeof(int));
            if (round == 2) {
                const Pats *x = s->part[0].ms;
                int had = s->n_tok, to = rnd_int(had);
                kv_truncate(s, to);
                for (int r = 0; r < N && src[r] < to; r++) keep[kept++] = r;
                CHECK(x->cut <= to, "cut %d after truncating to %d", x->cut, to);
                for (int t = to; t < had; t++) CHECK(!x->bits[t], "token %d begins with %d bits lost", t, x->bits[t]);
            } else {
                for (int r = 0, share = 1 + rnd_int(9); r < N; r++)
                    if (rnd_int(10) < share) keep[kept++] = r;
                keep_head(s, 0, g, keep, kept);
            }
            CHECK(h->len == kept, "len %d, kept %d", h->len, kept);
            for (int r = 0; r < kept; r++) {
                kv_load_k(s, h, NULL, r, 1, now_k);
                kv_load_v(s, h, NULL, r, 1, now_v);
                CHECK(h->src[r] == src[keep[r]] && !memcmp(now_k, k + keep[r] * 8, 32) &&
                          !memcmp(now_v, v + keep[r] * 8, 32),
                      "row %d", r);
            }
            check_packed(s, "keep");
        }
    }
}

TEST(pats_layers, "PATS packs a layer of a prefill before the next layer has rows: the peak is less than all raw "
                  "rows; spans of -b change no bit, nor does packing at the end because of another part") {
    OWN_MODEL Tiny m = tiny_model(12, 2, 1, 16, 16, 16, 53, 31);
    float *logits[3];
    const char *text[] = { "batch-size=512", "batch-size=7", "batch-size=7" };
    for (int i = 0; i < 3; i++) {
        const char *all = formatted("%s pats-window=8 ctk=f16 ctv=f16 budget=1000", text[i]);
        OWN_SESSION Session *s = session_of(m, i == 2 ? "snapkv+pats" : "pats", all);
        prefill(s, seven_ids(300, 53), 300);
        logits[i] = xmalloc(53 * sizeof(float));
        memcpy(logits[i], decode(s, 1), 53 * sizeof(float));
        double share = (double)s->clk.peak / (double)kv_bytes_full(s);
        CHECK(i == 2 ? share > .95 : share < .9, "%s: at most %g of the raw rows were held", all, share);
        CHECK(!memcmp(logits[i], logits[0], 53 * sizeof(float)), "%s: other logits", all);
    }
    for (int i = 0; i < 3; i++) free(logits[i]);
}

// ==================================================================================================== 6 LYCHEECLUSTER AND QUEST

// The twin works in double on whole texts and whole lists: it re-reads the text for every boundary,
// keeps each chunk key and each cluster as a plain array, sorts everything, and shares no function
// with the section.

// ---- a toy tokenizer: id -> bytes; specials are ids with special 1

typedef struct {
    const char *b;
    int n, special;
} ToyPiece;

typedef struct {
    ToyPiece p[128];
    int n;
} Toy;

// The bytes of a toy token; special ones have none.
static const char *toy_bytes(const void *ctx, int id, int *len) {
    const Toy *t = ctx;
    *len = id < t->n && !t->p[id].special ? t->p[id].n : 0;
    return id < t->n ? t->p[id].b : "";
}

// Whether a toy token is special.
static int toy_special(const void *ctx, int id) {
    const Toy *t = ctx;
    return id < t->n && t->p[id].special;
}

// Adds a piece and returns its id.
static int toy_add(Toy *t, const char *b) {
    t->p[t->n] = (ToyPiece){ b, (int)strlen(b), 0 };
    return t->n++;
}

// Makes the chunker read ids as toy tokens.
static void toy_use(const Toy *t) { token_text = (TokenText){ t, toy_bytes, toy_special }; }

// 101 pieces: prose, code, JSON, marks, Chinese whole and cut inside a character, invalid bytes, an
// empty piece, two specials
static void toy_fill(Toy *t) {
    static const char *piece[] = {
        " the", " quick", "The", " brown", " fox", " a", " code", "foo", "bar", "3", "14", " x",
        "ing", "er", " int", " return", " \"", "\"", "key", "val", ".", "?", "!", ",", ";", ":",
        "\n", "\n\n", " \n", "}", "]", ">", "{", "[", "<", "(", ")", " =", "=", "->", "=>", "::",
        "_", "-", "--", "---", "*", "**", "***", "`", "``", "```", " ", "  ", "\t", "\r\n", ".\n",
        ".\"", ".)", "),", "};", "\",", "\":", "...", "?!", " -", "/", "\\", "\n    ", "\n\t",
        "。", "，", "、", "：", "；", "！", "？", "·", "你好", "世界", "\xe4", "\xbd\xa0", "\xe4\xbd",
        "\xa0", "\xe3\x80", "\x82", "\xef\xbc", "\x8c", "」", "”", "’", "）", "\xe3\x80\x80",
        "\xff", "\xc3", "\xa9", "\xf0\x9f\x98", "\x80", "",
    };
    t->n = 0;
    for (size_t i = 0; i < sizeof piece / sizeof *piece; i++) toy_add(t, piece[i]);
    t->p[t->n++] = (ToyPiece){ "<|eot|>", 7, 1 };
    t->p[t->n++] = (ToyPiece){ "<|bos|>", 7, 1 };
}

// Chunks of the whole stream, by the levels of lychee_levels: end[] of each; a chunk needs keep tokens behind its longest
// form. Returns their number.
static int twin_chunks(const int *id, int n, int sink, int min, int max, int keep, int *end) {
    OWN int *level = xcalloc(n + 1, sizeof *level);
    TextTail tail = { 0 };
    int m = 0;
    for (int i = 0; i + 1 < n; i++) level[i] = level_between(&tail, id[i], id[i + 1]);
    for (int s = sink; n - s >= keep + max; s = end[m++] + 1) {
        int best = CUT_INSIDE, last = s + max - 1;
        for (int e = s + min - 1; e <= last; e++) best = min_int(best, level[e]);
        end[m] = last;
        while (best < CUT_INSIDE && level[end[m]] != best) end[m]--;
    }
    return m;
}

// Feeds ids to the section in random portions, as turns and decode steps would.
static void online_chunks(Lychee *x, const int *id, int n) {
    Session s = { 0 };
    s.tok = xcalloc(n + 1, sizeof(Token));
    for (int i = 0; i < n; i++) s.tok[i].id = id[i];
    while (s.n_tok < n) {
        s.n_tok += rnd_int(3) ? 1 : 1 + rnd_int(60);
        if (s.n_tok > n) s.n_tok = n;
        cut_chunks(&s, x);
    }
    free(s.tok);
}

// A chunker that has seen nothing.
static Lychee chunker(int sink, int min, int max, int buffer) {
    Lychee x = { .sink = sink, .min = min, .max = max, .buffer = buffer };
    arrput(x.start, sink);
    return x;
}

// Gives a chunker's lists back.
static void chunker_free(Lychee *x) {
    arrfree(x->start);
    arrfree(x->level);
}

TEST(lychee_levels, "boundary levels worked by hand") {
    // Text before, the token, the token after; b NULL: special.
    static const struct {
        const char *a, *b, *c;
        int level;
    } v[] = {
        { "pi is 3", ".", "14", 5 }, { "foo", ".", "bar", 5 }, { "it ended", ".", " Then", 2 },
        { "a", "::", "b", 5 }, { "10", ":", "30", 5 }, { "x", ":", "=", 5 }, { "p", "->", "x", 5 },
        { "a ", "=>", " b", 4 }, { "a<", ">", "b", 5 }, { "<b", ">", "x", 1 }, { "f()", "}", "\n", 1 },
        { "a[1", "]", ".", 1 }, { "a", "-", "b", 5 }, { "a", "--", " b", 4 }, { "a --", "-", "b", 1 },
        { "`", "``", "c", 1 }, { "x **", "*", "x", 1 }, { "a\n", "\n", "b", 1 }, { "a\n  \t\r", "\n", "b", 1 },
        { "a", "\n", "b", 2 }, { "a\n", "  ", "b", 4 }, { "a", "\t", "b", 4 }, { "a\n", " b", "c", 5 },
        { "he said.", "\"", "x", 2 }, { "came", ").", " End", 2 }, { "came", ").", "End", 5 },
        { "so", ",", " it", 3 }, { "so", ",\n", "x", 2 }, { "word", "s", " next", 4 }, { "word", "s", "x", 5 },
        { "word", "s", NULL, 4 }, { "end.", ")", NULL, 2 }, { "你好", "。", "世", 2 }, { "你好", "，", "世", 3 },
        { "你好，", "”", "世", 3 }, { "\xe3\x80", "\x82", "x", 2 }, { "a", "\xe3\x80", "\x82", 9 },
        { "a", "\xe3", "\x80", 9 }, { "a", "\xf0\x9f\x98", "\x80", 9 }, { "a", "\xff", "b", 5 },
        { "a", "\x80", "b", 5 }, { "", "", "b", 5 }, { "a.", "", "b", 5 }, { "a.", "", " b", 2 },
        { "x", "\xe3\x80\x80", "b", 4 }, { "a. ) ' \" )", " )", "b", 4 }, { "a.)'\")'", "\"", "b", 2 },
        { "a.)'\")'))", "\"", "b", 5 }, { "\xc0\xae", "", "x", 5 },
        { "世", "、", "世", 3 }, { "世", "·", "世", 3 }, { "世", "！", "世", 2 }, { "世", "？", "世", 2 },
        { "世", "：", "世", 3 }, { "世", "；", "世", 3 }, { "世。", "’", "世", 2 }, { "世。", "」", "世", 2 },
        { "世。", "』", "世", 2 }, { "世。", "】", "世", 2 }, { "世。", "）", "世", 2 }, { "so", "!", " It", 2 },
        { "so", "?", "x", 5 }, { "a", ".", "_b", 5 }, { "so", ";", "\n", 3 }, { "***", "\r", "x", 1 }, { "x.", "'", "b", 2 },
        { "\n                                                                ", "\n", "b", 2 },
        { "\n                                                             ", "\n", "b", 1 },
    };

    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        Toy t = { 0 };
        TextTail tail = { 0 };
        int a = toy_add(&t, v[i].a), b = toy_add(&t, v[i].b);
        if (v[i].c)
            toy_add(&t, v[i].c);
        else
            t.p[t.n++] = (ToyPiece){ "", 0, 1 };
        toy_use(&t);
        level_between(&tail, a, b);
        int level = level_between(&tail, b, 2);
        CHECK(level == v[i].level, "case %zu '%s|%s|%s': level %d, expected %d", i, v[i].a,
              v[i].b, v[i].c ? v[i].c : "<special>", level, v[i].level);
    }
    token_text = (TokenText){ 0 };
}

TEST(lychee_chunks_online,
     "chunks cut while tokens arrive equal those of the whole text, 400 random streams") {
    // Ranges of pieces: all, prose, code, Chinese, JSON and marks, broken bytes.
    static const int kind[6][2] = { { 0, 101 },  { 0, 28 },  { 14, 70 },
                                    { 70, 101 }, { 16, 64 }, { 93, 101 } };
    Toy t;
    toy_fill(&t);
    CHECK(t.n == 101, "the toy vocabulary has %d pieces", t.n);
    toy_use(&t);
    long forced = 0, cut = 0;
    for (int trial = 0; trial < 400; trial++) {
        rnd_seed(trial + 1);
        int min = trial % 5 ? 8 : 1 + rnd_int(8), max = trial % 5 ? 16 : min + rnd_int(12);
        int sink = rnd_int(20), buffer = rnd_int(30), n = rnd_int(500);
        int id[512], end[512], k = trial % 6;
        for (int i = 0; i < n; i++) {
            id[i] = kind[k][0] + rnd_int(kind[k][1] - kind[k][0]);
            if (id[i] >= 99 && rnd_int(8)) id[i] = 0;
            // Outside the tokenizer: empty.
            if (!rnd_int(40)) id[i] = 120;
        }
        Lychee x = chunker(sink, min, max, buffer);
        online_chunks(&x, id, n);
        int m = twin_chunks(id, n, sink, min, max, buffer > 1 ? buffer : 1, end);
        CHECK(x.M == m, "trial %d: %d chunks, twin %d", trial, x.M, m);
        for (int j = 0; j < m && j < x.M; j++) {
            CHECK(x.start[j + 1] == end[j] + 1, "trial %d chunk %d ends at %d, twin %d", trial, j,
                  x.start[j + 1] - 1, end[j]);
            CHECK(x.start[j + 1] - x.start[j] >= min && x.start[j + 1] - x.start[j] <= max,
                  "length");
        }
        CHECK(n - t_idx(&x) < (buffer > 1 ? buffer : 1) + max || n < sink, "buffer of %d",
              n - t_idx(&x));
        cut += x.M;
        for (int j = 0; j < x.M; j++) forced += x.level[x.start[j + 1] - 1] >= CUT_NONE;
        chunker_free(&x);
    }
    CHECK(cut > 5000 && forced > 50 && forced < cut / 2, "%ld chunks, %ld forced", cut, forced);
    token_text = (TokenText){ 0 };
}

// ---- the twin's index

enum { TW = 640, TWD = 64 };

typedef struct {
    double mu[TWD], r;
    int chunk[TW], n, parent;
} TwinCluster;

typedef struct {
    double mu[TWD], R;
} TwinUnit;

typedef struct {
    TwinCluster *c;
    int K;
    TwinUnit *u;
    int P;
} TwinTree;

typedef struct {
    int B, sink, buffer, min, max, full, kg;
    int bound;
    int start[TW], M, built;  // chunk j: start[j]..start[j+1]-1
    TwinTree *tree;           // (L,G)
    int grafts, builds, sparse;     // sparse: views of a step that did not read everything
} TwinLychee;

// x rounded to the 8 significant bits of bf16.
static double twin_bf16(double x) {
    int e;
    double m = frexp(x, &e);
    return x ? ldexp(rint(ldexp(m, 8)), e - 8) : 0;
}

// The scalar product of two vectors (D).
static double twin_dot(const double *a, const double *b, int D) {
    double s = 0;
    for (int d = 0; d < D; d++) s += a[d] * b[d];
    return s;
}

// The Euclidean distance of two vectors (D).
static double twin_dist(const double *a, const double *b, int D) {
    double s = 0;
    for (int d = 0; d < D; d++) s += (a[d] - b[d]) * (a[d] - b[d]);
    return sqrt(s);
}

// Scales x (D) to length 1.
static void twin_unit(double *x, int D) {
    double f = 1 / sqrt(twin_dot(x, x, D) + 1e-12);
    for (int d = 0; d < D; d++) x[d] *= f;
}

// The key of chunk j: the mean of its rows' keys, scaled to length 1.
static void twin_key(const TwinLychee *y, Twin *t, int l, int g, int j, double *key) {
    int D = t->c->D;
    for (int d = 0; d < D; d++) {
        double sum = 0;
        for (int r = y->start[j]; r < y->start[j + 1]; r++) sum += t->row[l * t->c->G + g][r].k[d];
        key[d] = sum / (y->start[j + 1] - y->start[j]);
    }
    twin_unit(key, D);
}

// x (n) points of TWD doubles -> mu (K), label (n)
static void twin_kmeans(double (*x)[TWD], int n, double (*mu)[TWD], int K, int D, int iters, int *label) {
    for (int j = 0; j < K; j++) memcpy(mu[j], x[(2 * j + 1) * n / (2 * K)], sizeof *mu);
    for (int it = 0; it <= iters; it++) {
        if (it == iters)
            for (int j = 0; j < K; j++)
                for (int d = 0; d < D; d++) mu[j][d] = twin_bf16(mu[j][d]);
        for (int i = 0; i < n; i++) {
            double best = -INFINITY;
            for (int j = 0; j < K; j++) {
                double c = twin_dot(x[i], mu[j], D);
                if (c > best) {
                    best = c;
                    label[i] = j;
                }
            }
        }
        for (int j = 0; j < K && it < iters; j++) {
            double sum[TWD] = { 0 };
            int k = 0;
            for (int i = 0; i < n; i++)
                if (label[i] == j) {
                    k++;
                    for (int d = 0; d < D; d++) sum[d] += x[i][d];
                }
            if (!k) continue;
            twin_unit(sum, D);
            memcpy(mu[j], sum, sizeof sum);
        }
    }
}

// Builds the index of one head: chunks, their clusters, and units of clusters.
static void twin_index_build(TwinLychee *y, Twin *t, int l, int g) {
    TwinTree *w = &y->tree[l * t->c->G + g];
    int D = t->c->D, M = y->M, K = (M + 1) / 2;
    int P = (K + 1) / 2 < 64 ? (K + 1) / 2 : 64;
    OWN int *label = xcalloc(M + K, sizeof(int));
    OWN double (*x)[TWD] = xcalloc(M, sizeof *x), (*mu)[TWD] = xcalloc(K, sizeof *mu),
           (*gm)[TWD] = xcalloc(P, sizeof *gm);
    for (int j = 0; j < M; j++) twin_key(y, t, l, g, j, x[j]);
    twin_kmeans(x, M, mu, K, D, 10, label);
    twin_kmeans(mu, K, gm, P, D, 10, label + M);
    free(w->c);
    free(w->u);
    w->c = xcalloc(K, sizeof *w->c);
    w->u = xcalloc(P, sizeof *w->u);
    w->K = K;
    w->P = P;
    for (int p = 0; p < P; p++) memcpy(w->u[p].mu, gm[p], sizeof *gm);
    for (int j = 0; j < K; j++) {
        memcpy(w->c[j].mu, mu[j], sizeof *mu);
        w->c[j].parent = label[M + j];
    }
    for (int i = 0; i < M; i++) {
        TwinCluster *c = &w->c[label[i]];
        c->chunk[c->n++] = i;
        c->r = fmax(c->r, twin_dist(x[i], c->mu, D));
        w->u[c->parent].R = fmax(w->u[c->parent].R, twin_dist(x[i], w->u[c->parent].mu, D));
    }
}

// How many chunks the clusters of unit p hold.
static int twin_chunks_below(const TwinTree *w, int p) {
    int n = 0;
    for (int c = 0; c < w->K; c++)
        if (w->c[c].parent == p) n += w->c[c].n;
    return n;
}

// Moves a centre mu towards a new point v, so that the ball of radius r becomes the smallest that holds
// the old one and v.
static void twin_absorb(double *mu, double *r, const double *v, int D) {
    double d = twin_dist(mu, v, D), to[TWD], shift;
    if (d <= *r) return;
    memcpy(to, mu, sizeof to);
    for (int i = 0; i < D; i++) to[i] = twin_bf16(mu[i] + (v[i] - mu[i]) * (d - *r) / (2 * d));
    shift = twin_dist(to, mu, D);
    memcpy(mu, to, sizeof to);
    *r = fmax(*r + shift, twin_dist(mu, v, D));
}

// Puts the new chunk j into the nearest cluster and that cluster's unit.
static void twin_graft(TwinLychee *y, Twin *t, int l, int g, int j) {
    TwinTree *w = &y->tree[l * t->c->G + g];
    int D = t->c->D, best = -1;
    double v[TWD] = { 0 }, top = 0;
    twin_key(y, t, l, g, j, v);
    for (int c = 0; c < w->K; c++) {
        double x = twin_dot(v, w->c[c].mu, D);
        if (w->c[c].n && (best < 0 || x > top)) {
            best = c;
            top = x;
        }
    }
    TwinCluster *c = &w->c[best];
    twin_absorb(w->u[c->parent].mu, &w->u[c->parent].R, v, D);
    twin_absorb(c->mu, &c->r, v, D);
    c->chunk[c->n++] = j;
}

// After a pass: new chunks are grafted; twice as many as the index was built of build it anew.
static void lychee_twin_after(void *u, Twin *t, int l, const double *q, const double *qp, int n) {
    TwinLychee *y = u;
    int N = (int)arrlen(t->id), end[TW], old = y->M;
    (void)q;
    (void)qp;
    (void)n;
    if (l < t->c->L || (!y->built && N <= y->B + y->buffer)) return;
    y->M = twin_chunks(t->id, N, y->sink, y->min, y->max, y->buffer > 1 ? y->buffer : 1, end);
    y->start[0] = y->sink;
    for (int j = 0; j < y->M; j++) y->start[j + 1] = end[j] + 1;
    if (y->M == old) return;
    int build = y->M >= 2 * y->built;
    for (int i = y->full; i < t->c->L; i++)
        for (int g = 0; g < t->c->G; g++) {
            if (build)
                twin_index_build(y, t, i, g);
            else
                for (int j = old; j < y->M; j++) twin_graft(y, t, i, g, j);
        }
    if (build) {
        y->built = y->M;
        y->builds++;
    } else
        y->grafts += y->M - old;
}

static double twin_cluster_score(const TwinLychee *y, const double *q, int m, const double *mu, double r, int D) {
    double best = -INFINITY;
    for (int i = 0; i < m; i++) {
        double x = twin_dot(q + i * D, mu, D), n = sqrt(twin_dot(q + i * D, q + i * D, D));
        best = fmax(best, x / n + (y->bound ? r : 0));
    }
    return best;
}

// Take (M)
static void twin_retrieve(const TwinLychee *y, const TwinTree *w, const double *q, int m, int D,
                          char *take) {
    int room = y->B > y->sink ? y->B - y->sink : 0, fill = 0, left = 0, tokens = 0;
    int kg = y->kg > 0 && y->kg < w->P ? y->kg : w->P;
    OWN char *open = xcalloc(w->P, 1), *done = xcalloc(w->K, 1);
    for (int i = 0; i < w->P; i++) {  // units, best first
        int p = -1;
        double top = 0;
        for (int g = 0; g < w->P; g++) {
            double x = twin_cluster_score(y, q, m, w->u[g].mu, w->u[g].R, D);
            if (!open[g] && twin_chunks_below(w, g) && (p < 0 || x > top)) {
                p = g;
                top = x;
            }
        }
        if (p < 0 || (i >= kg && tokens >= 4 * room)) break;
        open[p] = 1;
        for (int c = 0; c < w->K; c++)
            if (w->c[c].parent == p)
                for (int j = 0; j < w->c[c].n; j++)
                    tokens += y->start[w->c[c].chunk[j] + 1] - y->start[w->c[c].chunk[j]];
    }
    while (!fill) {
        int b = -1;
        double top = 0;
        for (int c = 0; c < w->K; c++) {
            if (done[c] || !w->c[c].n || (y->kg && !open[w->c[c].parent])) continue;
            double x = twin_cluster_score(y, q, m, w->c[c].mu, w->c[c].r, D);
            if (b < 0 || x > top) {
                b = c;
                top = x;
            }
        }
        if (b < 0) break;
        done[b] = 1;
        for (int j = 0; j < w->c[b].n && !fill; j++) {
            int k = w->c[b].chunk[j], len = y->start[k + 1] - y->start[k];
            if (left + len > room) {
                fill = 1;
                break;
            }
            take[k] = 1;
            left += len;
        }
    }
}

// Before a decode step's attention: the rows of the best clusters, the sink and the buffer are
// seen.
static void lychee_twin_before(void *u, Twin *t, int l, const double *q, int n) {
    TwinLychee *y = u;
    int H = t->c->H, G = t->c->G, R = H / G, D = t->c->D, N = (int)arrlen(t->id);
    if (!t->decoding || l < y->full || !y->built || N <= y->B + y->buffer) return;
    for (int g = 0; g < G; g++) {
        OWN char *take = xcalloc(y->M, 1);
        twin_retrieve(y, &y->tree[l * G + g], q + (size_t)g * R * D, R, D, take);
        for (int h = g * R; h < (g + 1) * R; h++) {
            char *see = twin_mask(t, l, h, n);
            y->sparse++;
            for (int r = 0; r < N; r++) see[r] = r < y->sink || r >= y->start[y->M];
            for (int j = 0; j < y->M; j++)
                if (take[j]) memset(see + y->start[j], 1, y->start[j + 1] - y->start[j]);
        }
    }
}

// ---- invariants of a live index: counts, radii, bounds

// One level of an index: the counts of its nodes, and that chunk j of key (D) and so many tokens lies in
// the ball of its node. q (D): a query for Eq. 2.
static void check_node(const Nodes *u, int node, int j, const float *key, const float *q, int D) {
    float mu[TWD], len = sqrtf(dot_f32(q, q, D));
    to_f32(mu, u->mu + (size_t)node * D, DT_BF16, D);
    double away = distance(key, u->mu + (size_t)node * D, D), ub = dot_f32(q, mu, D) + len * u->r[node];
    CHECK(away <= u->r[node] + 1e-7, "chunk %d outside its node: %g > %g", j, away, u->r[node]);
    CHECK(dot_f32(q, key, D) <= ub + 1e-5 * len * (1 + u->r[node]), "Eq. 2: %g > %g", dot_f32(q, key, D), ub);
}

// Checks one head's index: counts, radii and bounds.
static void check_tree(Session *s, const Lychee *x, int l, int g) {
    Tree *t = &x->tree[l * s->c->G + g];
    int D = s->c->D, P = t->coarse.n;
    int *tokens = xcalloc((size_t)t->fine.n + P, sizeof(int));      // of clusters, then of units
    float rows[64 * TWD], key[TWD], q[TWD];
    for (int d = 0; d < D; d++) q[d] = rnd_normal();
    for (int j = 0; j < x->M; j++) {
        int c = t->fine.of[j], n = x->start[j + 1] - x->start[j];
        CHECK(c >= 0 && c < t->fine.n, "chunk %d is of cluster %d", j, c);
        chunk_key(s, x, kv_head(s, l, g), j, rows, key);
        check_node(&t->fine, c, j, key, q, D);
        tokens[c] += n;
        if (!P) continue;
        CHECK(t->coarse.of[c] >= 0 && t->coarse.of[c] < P, "cluster %d is of unit %d", c, t->coarse.of[c]);
        check_node(&t->coarse, t->coarse.of[c], j, key, q, D);
        tokens[t->fine.n + t->coarse.of[c]] += n;
    }
    CHECK(!memcmp(tokens, t->fine.tokens, t->fine.n * sizeof(int)), "tokens of clusters");
    CHECK(!P || !memcmp(tokens + t->fine.n, t->coarse.tokens, P * sizeof(int)), "tokens of units");
    free(tokens);
}

// The twin's settings out of the program's options.
static TwinLychee twin_settings(const Options *o) {
    return (TwinLychee){ .B = opt_int(o, "budget"),
                         .sink = opt_int(o, "sink") < 0 ? 16 : opt_int(o, "sink"),
                         .buffer = opt_int(o, "lychee-buffer"),
                         .min = opt_int(o, "lychee-chunk-min"),
                         .max = opt_int(o, "lychee-chunk-max"),
                         .full = opt_int(o, "full-layers"),
                         .kg = opt_int(o, "lychee-kg"),
                         .bound = opt_int(o, "paper") };
}

// The program's own state of a session with LycheeCluster.
static Lychee *lychee_of(Session *s) { return s->part[0].ms; }

// sparse: views that must have been so at least.
typedef struct {
    int L, H, G, D, sparse;
    Script p;
    const char *opt;
} LycheeCase;

// Returns how often the index was built.
static int lychee_against_twin(const LycheeCase *k, uint64_t seed, int with_text) {
    Toy toy;
    toy_fill(&toy);
    if (with_text) toy_use(&toy);
    Tiny m = tiny_model(k->L, k->H, k->G, k->D, 48, 64, 101, seed);
    Options *o = options_of(k->opt);
    TwinLychee y = twin_settings(o);
    y.tree = xcalloc((size_t)k->L * k->G, sizeof *y.tree);
    TwinHooks hooks = { &y, .before = lychee_twin_before, .after = lychee_twin_after };
    Beside b = run_beside(m, "lychee", k->opt, hooks, &k->p);
    Session *s = b.s;
    Lychee *x = lychee_of(s);
    CHECK(y.sparse >= k->sparse, "only %d sparse views", y.sparse);
    CHECK(x->M == y.M && x->M_built == y.built, "chunks %d (%d), twin %d (%d)", x->M, x->M_built, y.M, y.built);
    CHECK(y.grafts > 0 && y.builds > 0, "%s: %d grafts, %d builds", k->opt, y.grafts, y.builds);
    for (int h = 0; h < k->L * k->H; h++) CHECK(kv_view(s, h / k->H, h % k->H)->n <= y.B, "head %d lists more rows", h);
    for (int i = 0; i < k->L * k->G; i++) {
        if (x->M_built && i / k->G >= x->full_layers) check_tree(s, x, i / k->G, i % k->G);
        free(y.tree[i].c);
        free(y.tree[i].u);
    }
    free(y.tree);
    options_free(o);
    beside_done(&b);
    tiny_free(m);
    token_text = (TokenText){ 0 };
    return y.builds;
}

#define BASE_OPT "lychee-buffer=24 full-layers=1 "

TEST(lychee_twin, "sets, logits and index agree with the slow twin: GQA shapes, all "
                  "options, turns, grafts, rebuilds") {
    static const LycheeCase k[] = {
        { 2, 4, 4, 24, 400, { 3, { 200, 60, 1 }, { 40, 30, 60 }, 1 }, BASE_OPT "budget=64" },
        { 3, 4, 2, 40, 400, { 3, { 150, 40, 30 }, { 150, 20, 40 }, 2 }, BASE_OPT "budget=48 paper" },
        { 2, 4, 1, 32, 200, { 3, { 120, 33, 70 }, { 90, 20, 60 }, 3 }, BASE_OPT "budget=80 paper" },
        { 3, 6, 3, 40, 400, { 3, { 260, 9, 5 }, { 60, 70, 30 }, 4 },
          BASE_OPT "budget=64 lychee-kg=2" },
        { 2, 6, 3, 24, 400, { 3, { 40, 25, 30 }, { 160, 90, 50 }, 5 },
          BASE_OPT "budget=48 lychee-kg=3 paper" },
        { 2, 4, 2, 24, 300, { 2, { 330, 40 }, { 60, 40 }, 6 },
          BASE_OPT "budget=64 lychee-kg=1" },
        { 2, 4, 2, 24, 300, { 2, { 150, 70 }, { 170, 40 }, 7 }, BASE_OPT "budget=56 paper" },
        { 2, 4, 2, 24, 300, { 2, { 220, 70 }, { 50, 40 }, 8 },
          "lychee-buffer=5 full-layers=1 budget=40 sink=3 lychee-chunk-min=3 lychee-chunk-max=9 "
          "paper" },
        { 2, 4, 2, 24, 200, { 2, { 150, 31 }, { 60, 40 }, 10 }, "lychee-buffer=0 full-layers=0 budget=16" },
    };
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        int builds = lychee_against_twin(&k[i], 40 + i, i % 5 != 1);
        if (i == 4) CHECK(builds > 1, "case 4 must rebuild");
    }
}

// ---- limits, guarantees

// Nodes for n points of 8 dimensions at most, which kmeans divides among K centres.
static Nodes nodes_of(int K) {
    static uint16_t mu[600 * 8];
    static float r[600];
    static int tokens[600], of[600];
    return (Nodes){ .n = K, .mu = mu, .r = r, .tokens = tokens, .of = of };
}

TEST(lychee_kmeans, "k-means worked by hand; ties; empty clusters keep their centre") {
    // four points on a circle at 0, 10, 90, 100 degrees, two centres: start at points 1 and 3, end
    // at 5 and 95 degrees
    static float x[8], mu[600 * 8], sum[600 * 8];
    for (int i = 0; i < 4; i++) {
        double a = (i / 2 * 90 + i % 2 * 10) * M_PI / 180;
        x[2 * i] = (float)cos(a);
        x[2 * i + 1] = (float)sin(a);
    }
    Nodes u = nodes_of(2);
    kmeans(x, 4, &u, 2, 10, mu, sum);
    CHECK(u.of[0] == 0 && u.of[1] == 0 && u.of[2] == 1 && u.of[3] == 1, "labels %d %d %d %d", u.of[0], u.of[1],
          u.of[2], u.of[3]);
    CHECK(u.mu[0] == f32_to_bf16((float)cos(5 * M_PI / 180)) &&
              u.mu[1] == f32_to_bf16((float)sin(5 * M_PI / 180)),
          "centre at 5 degrees: %g %g", bf16_to_f32(u.mu[0]), bf16_to_f32(u.mu[1]));
    // Four equal points, three centres: ties go to the lowest, the others stay empty where they
    // began.
    for (int i = 0; i < 8; i++) x[i] = i % 2 ? 0 : 1;
    u = nodes_of(3);
    kmeans(x, 4, &u, 2, 10, mu, sum);
    for (int i = 0; i < 4; i++) CHECK(u.of[i] == 0, "tie of point %d went to %d", i, u.of[i]);
    CHECK(bf16_to_f32(u.mu[4]) == 1 && bf16_to_f32(u.mu[5]) == 0, "an empty cluster moved");
    // Both centres round to 1: the last assignment is made against those, and ties.
    static const float near[8] = { 1, 0, 1.002f, 0, 1, 0, 1.003f, 0 };
    u = nodes_of(2);
    kmeans(near, 4, &u, 2, 0, mu, sum);
    for (int i = 0; i < 4; i++)
        CHECK(u.of[i] == 0, "point %d was labelled %d against unrounded centres", i, u.of[i]);
    static float key[600 * 8];
    // The same with 130 centres: ties across blocks of scores.
    for (int i = 0; i < 260; i++) key[i] = i % 2 ? 0 : 1;
    u = nodes_of(130);
    kmeans(key, 130, &u, 2, 2, mu, sum);
    for (int i = 0; i < 130; i++) CHECK(u.of[i] == 0, "tie of point %d went to %d", i, u.of[i]);
}

TEST(lychee_absorb, "a node covers every chunk after 1,000 additions; a radius that is only as large as the new "
                    "chunk is far does not") {
    enum { D = 24, N = 1003 };
    static float v[N][D];
    for (int trial = 0; trial < 4; trial++) {
        uint16_t mu[D];
        float r[1] = { 0 }, mean[D] = { 0 }, q[D], literal = 0;
        int tokens[1] = { 0 }, outside = 0;
        rnd_seed(500 + trial);
        for (int i = 0; i < N; i++) {
            float spread = i < 3 ? .2f : .1f + .4f * (float)trial;
            for (int d = 0; d < D; d++) v[i][d] = (d ? 0 : 1) + spread * rnd_normal();
            normalise(v[i], D);
        }
        for (int i = 0; i < 3; i++)
            for (int d = 0; d < D; d++) mean[d] += v[i][d] / 3;
        from_f32(mu, mean, DT_BF16, D);
        Nodes u = { .n = 1, .mu = mu, .r = r, .tokens = tokens };
        for (int i = 0; i < 3; i++) node_cover(&u, 0, v[i], 8, D);
        for (int i = 3; i < N; i++) {
            float before = r[0];
            node_absorb(&u, 0, v[i], 8, D);
            CHECK(r[0] >= before && tokens[0] == 8 * (i + 1), "a radius shrank, or %d tokens", tokens[0]);
            // The paper's text: expand to hold the new chunk, and no more.
            literal = fmaxf(literal, (float)distance(v[i], mu, D));
            if (i % 100 && i + 1 < N) continue;
            for (int d = 0; d < D; d++) q[d] = rnd_normal();
            float len = sqrtf(dot_f32(q, q, D)), top[D];
            to_f32(top, mu, DT_BF16, D);
            for (int j = 0; j <= i; j++) {
                double far = distance(v[j], mu, D);
                CHECK(far <= r[0], "chunk %d of %d is %g away, radius %g", j, i, far, r[0]);
                CHECK(dot_f32(q, v[j], D) <= dot_f32(q, top, D) + len * r[0] + 1e-5 * len, "Eq. 2");
                outside += far > literal;
            }
        }
        CHECK(outside > 0 || !trial, "the paper's literal rule held: this case shows nothing");
    }
}

TEST(lychee_rollback_edge, "an index survives a rollback to its very end and not one token "
                           "further; with few rows left it is kept but not used") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 24, 48, 64, 101, 7);
    const int *ids = seven_ids(300, 101);
    const char *text = "budget=160 lychee-buffer=24 full-layers=0";
    for (int over = 0; over < 2; over++) {
        OWN_SESSION Session *s = session_of(m, "lychee", text), *f = session_of(m, "full", text);
        prefill(s, ids, 200);
        prefill(f, ids, 200);
        int M = lychee_of(s)->M, end = t_idx(lychee_of(s));
        CHECK(M == 10 && end == 176, "%d chunks to %d", M, end);
        kv_truncate(s, end - over);
        kv_truncate(f, end - over);
        CHECK(lychee_of(s)->M == (over ? 0 : M), "over %d: %d chunks", over, lychee_of(s)->M);
        CHECK(!memcmp(decode(s, 5), decode(f, 5), 101 * sizeof(float)) &&
                  kv_view(s, 1, 0)->tail == 0,
              "177 rows are no more than 184: every row is read");
        for (int i = 0; i < 30; i++) decode(s, ids[i]);
        CHECK(kv_view(s, 1, 0)->tail > 0, "past 184 rows the index is used");
        for (int g = 0; g < 2; g++) check_tree(s, lychee_of(s), 1, g);
    }
}

// Does query head h of layer 0 read exactly these rows?
static int reads(const Session *s, int h, int n, const int *want) {
    int rows[64];
    return view_rows(s, 0, h, rows) == n && !memcmp(rows, want, (size_t)n * sizeof(int));
}

TEST(views, "the heads of a group read one list: rows, a head set alone, two in a row, compaction, "
            "rows not read by any head are gone") {
    OWN_MODEL Tiny m = tiny_model(1, 6, 2, 8, 16, 16, 11, 3);
    OWN_SESSION Session *s = session_of(m, "full", "");
    int ids[30] = { 1, 2, 3 }, one[] = { 1, 4, 7 }, two[] = { 0, 9, 20 };
    int stale[] = { 25, 26, 27, 28 };
    static const int group[] = { 1, 4, 7, 27, 28, 29 }, alone[] = { 0, 9, 20, 29 };
    prefill(s, ids, 30);
    // A list of its own, soon out of use and out of range.
    view_set(s, 0, 1, stale, 4, 29);
    view_set(s, 0, 2, stale, 4, 29);
    view_group(s, 0, 0, one, 3, 27);
    for (int h = 0; h < 3; h++)
        CHECK(reads(s, h, 6, group) && (!h || same_as_before(s, 0, h)),
              "head %d", h);
    CHECK(!kv_view(s, 0, 3)->n, "the other group is untouched");
    view_set(s, 0, 0, two, 3, 29);
    CHECK(reads(s, 0, 4, alone) && reads(s, 1, 6, group) && reads(s, 2, 6, group) &&
              !same_as_before(s, 0, 1) && same_as_before(s, 0, 2),
          "the first head alone");
    view_set(s, 0, 1, two, 3, 29);
    CHECK(reads(s, 0, 4, alone) && reads(s, 1, 4, alone) && reads(s, 2, 6, group) &&
              same_as_before(s, 0, 1),
          "the second as well");
    view_group(s, 0, 0, one, 3, 27);
    // A head amid the group: the last one goes on reading the first one's list.
    view_set(s, 0, 1, two, 3, 29);
    CHECK(reads(s, 0, 6, group) && reads(s, 1, 4, alone) && reads(s, 2, 6, group),
          "the head amid the group");
    view_group(s, 0, 0, one, 3, 27);
    kv_compact(s, 0);
    static const int all[] = { 0, 1, 2, 3, 4, 5 };
    const KVHead *h = kv_head(s, 0, 0);
    CHECK(h->len == 6 && !memcmp(h->src, group, sizeof group) && kv_head(s, 0, 1)->len == 30,
          "%d rows stay", h->len);
    for (int i = 0; i < 3; i++)
        CHECK(reads(s, i, 6, all) && kv_view(s, 0, i)->n == 3 && kv_view(s, 0, i)->tail == 3,
              "head %d after compaction", i);
    view_all(s);
    CHECK(reads(s, 2, 6, all), "every row again");
}

// Copies of listed rows: a device makes none.
static size_t near_bytes(const Session *s) {
    size_t n = 0;
    for (int i = 0; i < s->c->L * s->c->H; i++) n += s->view[i].room;
    return n;
}

TEST(views_near, "a list's rows copied side by side give the same bits as where they lie: storage formats, lists that end "
                 "amid a tile, a head alone; a new list and a moved key end it; packed rows are not copied") {
    static const char *const formats[] = { "ctk=f16 ctv=f16", "ctk=bf16 ctv=f32", "ctk=q8_0 ctv=f16", "ctk=f32 ctv=q8_0" };
    int ids[300], list[300];
    for (int c = 0; c < 40; c++) {
        OWN_MODEL Tiny m = tiny_model(1, 4, 2, 24, 32, 32, 61, 90 + c);
        OWN_SESSION Session *s = session_of(m, "full", formats[c % 4]);
        int n = 0, N = 300, tail = 200 + rnd_int(101), every = 1 + rnd_int(4);
        float a[4 * 24], b[4 * 24];
        OWN float *q = random_floats(4 * 24);
        draw_ids(ids, N, 61);
        prefill(s, ids, N);
        s->base = N - 1;
        for (int i = 0; i < tail; i++)
            if (!rnd_int(every)) list[n++] = i;
        view_group(s, 0, 0, list, n, tail);
        view_set(s, 0, 2, list, n, N);          // alone, and no rows behind the list; head 3 reads every row
        attn_decode(s, 0, a, q);
        size_t meta = kv_meta_bytes(s), row = s->fk->row_bytes(24) + s->fv->row_bytes(24);
        for (int h = 0; h < 3; h += 2) view_near(s, 0, h);
        CHECK(kv_view(s, 0, 0)->is_near && kv_view(s, 0, 2)->is_near && !kv_view(s, 0, 3)->is_near, "near");
        CHECK(kv_meta_bytes(s) == meta + 2 * n * row, "bytes");
        attn_decode(s, 0, b, q);
        CHECK(!memcmp(a, b, sizeof a), "%s, %d rows of %d: other bits", formats[c % 4], n, tail);
        memset(kv_view(s, 0, 2)->near, 0, s->fk->row_bytes(24) * n);    // and the copy is what is read
        attn_decode(s, 0, b, q);
        CHECK(n < 64 || memcmp(a + 48, b + 48, 24 * 4), "the copy is not read");
        kv_repos(s, 0, 0, 5, 7);
        CHECK(!kv_view(s, 0, 0)->is_near && kv_view(s, 0, 2)->is_near, "after a key moved");
        view_set(s, 0, 2, list, n, N);
        attn_decode(s, 0, b, q);
        CHECK(!kv_view(s, 0, 2)->is_near && !memcmp(a + 48, b + 48, 48 * 4), "a new list is read where its rows lie");
    }
    OWN_MODEL Tiny m = tiny_model(1, 2, 1, 16, 32, 32, 61, 9);
    OWN_SESSION Session *s = session_of(m, "pats", "ctk=f16 ctv=f16");
    prefill(s, ids, 40);
    view_group(s, 0, 0, list, 3, 30);
    view_near(s, 0, 0);
    CHECK(!kv_view(s, 0, 0)->is_near && !near_bytes(s), "packed rows");
}

// ---- Quest

typedef struct {
    int B, full;
} TwinQuest;

// Before a decode step's attention: the current page and the pages of the largest bounds are seen.
static void quest_twin_before(void *u, Twin *t, int l, const double *q, int n) {
    TwinQuest *y = u;
    int H = t->c->H, G = t->c->G, R = H / G, D = t->c->D, N = (int)arrlen(t->id);
    int cur = (N - 1) / 16, want = (int)fmax(3, floor(y->B / 16.0)) - 1;
    if (!t->decoding || l < y->full || N <= y->B) return;
    for (int g = 0; g < G; g++) {
        OWN char *done = xcalloc(cur + 1, 1);           // pages that are read
        TwinRow *row = t->row[l * G + g];
        done[cur] = 1;
        for (int k = 0; k < want; k++) {
            int best = -1;
            double top = 0;
            for (int p = 0; p < cur; p++) {
                double x = -INFINITY;
                for (int h = 0; h < R; h++) {
                    double sum = 0;
                    for (int d = 0; d < D; d++) {
                        double qd = q[(size_t)(g * R + h) * D + d], lo = INFINITY, hi = -INFINITY;
                        for (int r = p * 16; r < p * 16 + 16; r++) {
                            lo = fmin(lo, row[r].k[d]);
                            hi = fmax(hi, row[r].k[d]);
                        }
                        sum += fmax(qd * lo, qd * hi);
                    }
                    x = fmax(x, sum);
                }
                if (!done[p] && (best < 0 || x > top)) {
                    best = p;
                    top = x;
                }
            }
            if (best < 0) break;
            done[best] = 1;
        }
        for (int h = g * R; h < (g + 1) * R; h++) {
            char *mask = twin_mask(t, l, h, n);
            for (int r = 0; r < N; r++) mask[r] = done[r / 16];
        }
    }
}

TEST(quest_twin, "Quest agrees with its slow twin: GQA shapes, page boundaries, three turns") {
    static const struct {
        int H, G, budget, full;
        Script p;
    } v[] = { { 4, 4, 64, 1, { 3, { 130, 20, 31 }, { 40, 17, 30 }, 31 } },
              { 4, 2, 80, 0, { 3, { 60, 1, 90 }, { 50, 40, 10 }, 32 } },
              { 4, 1, 20, 1, { 3, { 33, 15, 16 }, { 30, 33, 20 }, 33 } },
              { 6, 3, 100, 0, { 3, { 97, 30, 3 }, { 20, 31, 30 }, 34 } } };
    for (int i = 0; i < 4; i++) {
        OWN_MODEL Tiny m = tiny_model(2, v[i].H, v[i].G, 24, 48, 64, 101, 60 + i);
        const char *opt = formatted("budget=%d full-layers=%d", v[i].budget, v[i].full);
        TwinQuest y = { v[i].budget, v[i].full };
        OWN_BESIDE Beside x = run_beside(m, "quest", opt, (TwinHooks){ &y, .before = quest_twin_before }, &v[i].p);
        int rows[8192], n = view_rows(x.s, 1, 0, rows), pages = max_int(v[i].budget / 16, 3);
        CHECK(n == (pages - 1) * 16 + (x.s->n_tok - 1) % 16 + 1, "case %d reads %d rows", i, n);
    }
}

TEST(quest_bound, "u bounds q.k for every key of the page, whatever the storage; bounds are exact; a rollback forgets pages") {
    static const char *const rows[] = { "ctk=f32", "ctk=f16", "ctk=bf16", "ctk=q8_0", "" };
    OWN_MODEL Tiny m = tiny_model(1, 4, 2, 24, 48, 64, 101, 70);
    for (int f = 0; f < 5; f++) {
        const char *more = formatted("full-layers=0 %s", rows[f]);
        OWN_SESSION Session *s = table_open(m, f < 4 ? "quest" : "quest+q8", 0, more);
        Quest *x = s->part[0].ms;
        float key[24], q[48], room[96 + 64], u[64], bound[48];
        for (int round = 0, g; round < 4; round++) {        // the last two: over other tokens behind the 100th
            if ((g = round % 2) == 0) {
                kv_truncate(s, round ? 100 : 0);
                prefill(s, seven_ids(300, 101) + 3 * round, 250 - s->n_tok);
                for (int i = 0; i < 20; i++) decode(s, i);
            }
            for (int d = 0; d < 48; d++) q[d] = rnd_normal();
            page_scores(x, x->bound[g], 270 / 16, q, 2, 24, room, u);
            for (int r = 0; r < 256; r++) {
                int bad = 0;
                kv_load_k(s, kv_head(s, 0, g), NULL, r, 1, key);
                to_f32(bound, x->bound[g] + (size_t)(r / 16) * 48 * dtype_size(x->dtype), x->dtype, 48);
                for (int d = 0; d < 24; d++) bad += bound[d] < key[d] || bound[24 + d] > key[d];
                for (int h = 0; h < 2; h++) bad += dot_f32(q + 24 * h, key, 24) > u[r / 16] + 1e-4f;
                CHECK(!bad, "%s: row %d", more, r);
            }
        }
    }
}

// ==================================================================================================== 7 SONIC INFERENCE

// The slow side keeps no cache at all: for every row of logits it lays out Eq. 1 anew, masks it by
// the four lines of slow_vis and runs the twin in double over everything. The program drops rows
// and must agree all the same.

// ---- an adapter made in memory, and written as a file

// Rows 0: a vector.
typedef struct {
    char name[96];
    int rows, cols;
    float *x;
    const char *type;
} NexusTensor;

typedef struct {
    char key[40], value[64];
} NexusMeta;

// stb_ds arrays.
typedef struct {
    NexusTensor *t;
    NexusMeta *meta;
    int K_max, T_max;
} Nexus;

// x as a tensor of the given type holds it.
static float nexus_round(float x, const char *type) {
    return !strcmp(type, "F16")    ? f16_to_f32(f32_to_f16(x))
           : !strcmp(type, "BF16") ? bf16_to_f32(f32_to_bf16(x))
                                   : x;
}

static void nexus_add(Nexus *a, const char *name, int rows, int cols, const Tensor *from,
                      double noise, const char *type) {
    NexusTensor t = { .rows = rows, .cols = cols, .type = type };
    snprintf(t.name, sizeof t.name, "%s", name);
    size_t n = (size_t)(rows ? rows : 1) * cols;
    t.x = xmalloc(n * sizeof *t.x);
    for (size_t i = 0; i < n; i++)
        t.x[i] = nexus_round(
            (from ? ((const float *)from->data)[i] : 0) + rnd_normal() * (float)noise, type);
    arrput(a->t, t);
}

// Adds, or changes.
static void nexus_meta(Nexus *a, const char *key, const char *value) {
    NexusMeta m = { .key = "" };
    snprintf(m.key, sizeof m.key, "%s", key);
    snprintf(m.value, sizeof m.value, "%s", value);
    for (int i = 0; i < (int)arrlen(a->meta); i++)
        if (!strcmp(a->meta[i].key, key)) {
            a->meta[i] = m;
            return;
        }
    arrput(a->meta, m);
}

static const char *const nexus_part[] = { "self_attn.q_proj.weight", "self_attn.k_proj.weight",
                                          "self_attn.v_proj.weight", "self_attn.o_proj.weight",
                                          "mlp.gate_proj.weight",    "mlp.up_proj.weight",
                                          "mlp.down_proj.weight",    "self_attn.q_proj.bias",
                                          "self_attn.k_proj.bias",   "self_attn.v_proj.bias" };

// The base model's tensor that part k of a layer's adapter takes the place of.
static const Tensor *nexus_base(const Layer *y, int k) {
    const Tensor *t[] = { &y->wq, &y->wk,   &y->wv, &y->wo, &y->gate,
                          &y->up, &y->down, &y->bq, &y->bk, &y->bv };
    return t[k];
}

// A random adapter that fits m: the base's weights and `noise` on top.
static Nexus nexus_new(Tiny m, double noise, const char *type, const char *pos, int shared) {
    Nexus a = { .K_max = 8, .T_max = 4 };
    const Config *c = m.c;
    nexus_add(&a, "nexus.embed.base", 0, c->C, NULL, 1, type);
    nexus_add(&a, "nexus.embed.pos", a.K_max, c->C, NULL, 1, type);
    nexus_add(&a, "nexus.embed.turn", a.T_max, c->C, NULL, .5, type);
    for (int l = 0; l < c->L; l++)
        for (int k = 0; k < 10; k++) {
            const Tensor *b = nexus_base(&m.w->layer[l], k);
            if (!b->data || (shared && k >= 4 && k < 7)) continue;
            nexus_add(&a, formatted("nexus.layers.%d.%s", l, nexus_part[k]), k < 7 ? b->rows : 0, b->cols, b, noise, type);
        }
    nexus_meta(&a, "format", "sonic-nexus");
    nexus_meta(&a, "version", "1");
    nexus_meta(&a, "k_max", formatted("%d", a.K_max));
    nexus_meta(&a, "k_default", "3");
    nexus_meta(&a, "t_max", formatted("%d", a.T_max));
    nexus_meta(&a, "position_mode", pos);
    nexus_meta(&a, "body", "full_message");
    nexus_meta(&a, "mlp", shared ? "shared" : "dedicated");
    nexus_meta(&a, "base_fingerprint", formatted("%016llx", (unsigned long long)sonic_fingerprint(m.w)));
    return a;
}

// Frees an adapter.
static void nexus_free(Nexus a) {
    for (int i = 0; i < (int)arrlen(a.t); i++) free(a.t[i].x);
    arrfree(a.t);
    arrfree(a.meta);
}

// Writes an adapter as a safetensors file of the tests' folder, whose path it returns.
static const char *nexus_write(Nexus a) {
    const char *path = tmp_path("nexus.safetensors");
    SafeWriter w;
    safe_write_begin(&w, path, "the adapter");
    for (int i = 0; i < (int)arrlen(a.meta); i++) safe_write_meta(&w, a.meta[i].key, a.meta[i].value);
    safe_write_meta_end(&w);
    for (int i = 0; i < (int)arrlen(a.t); i++) {
        const NexusTensor *t = &a.t[i];
        size_t n = (size_t)(t->rows ? t->rows : 1) * t->cols;
        int F32 = !strcmp(t->type, "F32"), I64 = !strcmp(t->type, "I64");
        int dtype = F32 ? DT_F32 : !strcmp(t->type, "F16") ? DT_F16 : DT_BF16, dim[] = { t->rows, t->cols };
        OWN void *x = xcalloc(n, 8);
        if (!I64) from_f32(x, t->x, dtype, n);
        safe_write(&w, t->name, t->type, I64 ? 8 : dtype_size(dtype), x, t->rows ? dim : dim + 1, t->rows ? 2 : 1);
    }
    safe_write_end(&w);
    return path;
}

// The tensor of that name.
static NexusTensor *nexus_find(Nexus *a, const char *name) {
    for (int i = 0; i < (int)arrlen(a->t); i++)
        if (!strcmp(a->t[i].name, name)) return &a->t[i];
    CHECK(0, "no %s", name);
    return NULL;
}

// The branch as layers of f32 tensors, for the twin; norms and o bias are the base's.
static Layer *nexus_layers(Nexus a, Tiny m) {
    Layer *y = xmalloc(m.c->L * sizeof *y);
    memcpy(y, m.w->layer, m.c->L * sizeof *y);
    for (int l = 0; l < m.c->L; l++)
        for (int k = 0; k < 10; k++) {
            const char *name = formatted("nexus.layers.%d.%s", l, nexus_part[k]);
            for (int i = 0; i < (int)arrlen(a.t); i++)
                if (!strcmp(a.t[i].name, name))
                    *(const void **)&((Tensor *)nexus_base(&y[l], k))->data = a.t[i].x;
        }
    return y;
}

// ---- dialogues

// A turn is [sys][foot] user [head] | reply; with --ids all but user and reply are empty.
typedef struct {
    Script s;
    int sys, foot[8], head[8];
} Talk;

// Ids get the turn's.
static const float *talk_prefill(Session *s, const Talk *p, int t, int *ids) {
    script_ids(&p->s, t, s->c->V, ids);
    s->n_sys = t ? 0 : p->sys;
    s->n_foot = p->foot[t];
    s->n_head = p->head[t];
    return prefill(s, ids, p->s.pre[t]);
}

// ---- the slow twin

enum { SYS, BODY, NEX, CUR };

typedef struct {
    Nexus a;
    Tiny m;
    Layer *alt;
    int exact, original, sink, K;
    double ratio;
    int kind[1024], seg[1024], j[1024], turn[1024], n;  // of the sequence as laid out, of n tokens
    int n_nexus;
} SlowSonic;

// SONIC's visibility rule, line by line: Nexus rows of the past, the own segment, the system text.
static int slow_vis(const SlowSonic *u, int p, int q) {
    if (u->kind[p] == NEX && u->kind[q] == NEX) return u->exact ? 1 : u->seg[q] <= u->seg[p];
    if (q > p) return 0;
    if (u->kind[q] == BODY) return u->seg[q] == u->seg[p];
    return 1;
}

// The mask as a hook of the twin.
static int slow_sees(void *v, Twin *t, int l, int h, int i, int row) {
    (void)l;
    (void)h;
    return slow_vis(v, t->base + i, row);
}

// The input of the Nexus token i: base, place within its segment, and turn.
static void slow_embed(void *v, Twin *t, int i, double *x) {
    SlowSonic *u = v;
    int C = u->m.c->C, turn = u->turn[i] < u->a.T_max ? u->turn[i] : u->a.T_max - 1;
    (void)t;
    for (int c = 0; c < C; c++)
        x[c] = (double)u->a.t[0].x[c] + u->a.t[1].x[u->j[i] * C + c] + u->a.t[2].x[turn * C + c];
}

// How many Nexus tokens a segment of n tokens gets.
static int slow_K(const SlowSonic *u, int n) {
    int K = u->ratio >= 0 ? (int)floor((1 - u->ratio) * n + .5 + 1e-6) : u->K;
    if (K > n) K = n;
    if (K > u->a.K_max) K = u->a.K_max;
    return K < 1 ? 1 : K;
}

// Eq. 1 for the dialogue up to decode step `step` of turn `last` (-1: its prefill) -> logits
static void slow_sonic(SlowSonic *u, const Talk *p, int last, int step, double *logits) {
    Twin *t = twin_new(u->m.c, u->m.w, DT_F32);
    int n = 0, text = 0, text_pos = 0, seg = 0, sys = p->sys > u->sink ? p->sys : u->sink;
    int ids[512], next[512];
    t->alt = twin_layers(u->alt, u->m.c->L);
    t->hook = (TwinHooks){ .u = u, .sees = slow_sees, .embed = slow_embed };
    u->n_nexus = 0;
    for (int turn = 0; turn <= last; turn++) {
        script_ids(&p->s, turn, u->m.c->V, ids);
        int pre = p->s.pre[turn], dec = turn < last ? p->s.dec[turn] : step + 1, foot_next = 0;
        if (turn < last) {
            script_ids(&p->s, turn + 1, u->m.c->V, next);
            foot_next = p->foot[turn + 1];
        }
        for (int part = 0; part < 2; part++) {  // the user's message, then the reply
            int from = part ? pre - p->head[turn] : turn ? p->foot[turn] : 0;
            int to = part ? pre + dec : pre - p->head[turn], body = 0;
            for (int i = from; i < to + (part ? foot_next : 0); i++, text++, n++) {
                int id = i < to ? ids[i] : next[i - to];
                u->kind[n] = text < sys ? SYS : turn == last ? CUR : BODY;
                u->seg[n] = u->kind[n] == SYS ? -1 : seg;
                body += u->kind[n] == BODY;
                twin_token(t, id, u->original ? text_pos : n, 0, 0);
                text_pos++;
            }
            if (!body) continue;
            int K = slow_K(u, body);
            for (int j = 0; j < K; j++, n++) {
                u->kind[n] = NEX;
                u->seg[n] = seg;
                u->j[n] = j;
                u->turn[n] = turn;
                twin_token(t, -1, u->original ? text_pos + j : n, 0, 0);
            }
            seg++;
            u->n_nexus += K;
        }
    }
    u->n = n;
    t->base = 0;
    twin_run(t, n, logits);
    twin_free(t);
}

// Every head holds the sequence as laid out, but for bodies; Nexus rows are those of e_pos in their order (T9).
static void sonic_rows_agree(const SlowSonic *u, const Session *s, const char *what) {
    for (int h = 0; h < s->c->L * s->c->G; h++) {
        const KVHead *kh = &s->head[h];
        int held = 0, bad = 0;
        for (int p = 0; p < u->n; p++) {
            if (u->kind[p] == BODY) continue;
            const Token *tok = &s->tok[held < kh->len ? kh->src[held] : 0];
            bad += (tok->kind == TOK_EXTRA) != (u->kind[p] == NEX);
            bad += u->kind[p] == NEX && (-1 - tok->id) % u->a.K_max != u->j[p];
            held++;
        }
        CHECK(held == kh->len && !bad, "%s: head %d holds %d rows, expected %d; %d are others", what, h, kh->len, held,
              bad);
    }
}

// Plays a dialogue on a session; every row of logits, and the rows that are held, from nothing.
static void sonic_agrees(SlowSonic *u, Session *s, const Talk *p, const char *what) {
    int V = s->c->V, ids[512];
    OWN double *lo = xmalloc(V * sizeof *lo);
    OWN float *y = xmalloc(V * sizeof *y);
    for (int t = 0; t < p->s.turns; t++)
        for (int i = -1; i < p->s.dec[t]; i++) {
            const float *x = i < 0 ? talk_prefill(s, p, t, ids) : decode(s, ids[p->s.pre[t] + i]);
            slow_sonic(u, p, t, i, lo);
            for (int v = 0; v < V; v++) y[v] = (float)lo[v];
            double e = worst(x, y, (size_t)V, 2e-5, 2e-5, NULL);
            CHECK(e <= 1, "%s: turn %d, step %d: %g times the bound", what, t, i, e);
            sonic_rows_agree(u, s, what);
        }
    size_t rows = (size_t)(u->n - u->n_nexus + KV_STEP - 1) / KV_STEP * KV_STEP;
    CHECK(kv_bytes_full(s) == rows * s->c->L * s->c->G * s->c->D * 4 * 2, "%s: full attention holds %d tokens in %zu "
          "bytes", what, u->n - u->n_nexus, kv_bytes_full(s));
}

// A session with this adapter, through a file that is removed again.
static Session *sonic_session(Tiny m, Nexus a, const char *opt) {
    return session_of(m, "sonic", formatted("sonic-weights=%s %s", nexus_write(a), opt));
}

TEST(sonic_twin, "T2, T5, T9: both modes and both positions agree with the masked whole sequence in double, and hold "
                 "n_sys + sum K_i + the current turn's rows; GQA 1:1, 2:1, 4:1, 3 heads; biases, QK-norm, dtypes, "
                 "shared MLP; K by number and by ratio, capped by the adapter's; turns beyond T_max take its last row, "
                 "with a warning; random dialogues of short messages") {
    int shape[][2] = { { 4, 4 }, { 4, 2 }, { 4, 1 }, { 6, 3 } };
    const char *type[] = { "F32", "F16", "BF16" };
    // --ids.
    Talk talk[] = { { { 3, { 17, 7, 3 }, { 5, 2, 3 }, 1 } },
                    // A chat.
                    { { 4, { 14, 10, 9, 8 }, { 4, 0, 3, 1 }, 2 }, 6, { 0, 2, 2, 1 }, { 3, 3, 3, 3 } },
                    // Shorter than the sink; more turns than the adapter knows.
                    { { 7, { 1, 1, 5, 2, 1, 1, 2 }, { 1, 2, 0, 2, 1, 1, 1 }, 3 } } };
    for (int i = 0; i < 28; i++) {
        int any = i > 11, exact = i / 2 % 2, original = i % 2;
        Talk p = any ? (Talk){ { .turns = 6, .seed = i } } : talk[i % 3];
        rnd_seed(50 + i);
        for (int t = 0; any && t < 6; t++) {
            p.s.pre[t] = 1 + rnd_int(12);
            p.s.dec[t] = rnd_int(8);
        }
        int K = any ? 1 + rnd_int(8) : 3, sink = any ? rnd_int(9) : 4, *heads = shape[i % 4];
        OWN_MODEL Tiny m = any ? tiny_model(2, 2, 1, 8, 16, 16, 31, 3)
                               : tiny_model(4, heads[0], heads[1], 16, 32, 40, 61, 30 + i);
        if (!any && i % 5 == 1) tiny_give(m, NORMS | BIASES);
        Nexus a = nexus_new(m, .1, type[i % 3], original ? "original" : "augmented", i == 7);
        OWN SlowSonic *u = xcalloc(1, sizeof *u);
        *u = (SlowSonic){ .a = a,
                          .m = m,
                          .alt = nexus_layers(a, m),
                          .exact = exact,
                          .original = original,
                          .sink = sink,
                          .K = K,
                          .ratio = any ? -1 : i > 9 ? .6 : i > 8 ? .1 : -1 };
        const char *nexus = any || i == 4 ? formatted("sonic-k=%d", K) : i > 9 ? "ratio=0.6" : i > 8 ? "ratio=0.1" : "";
        const char *opt = formatted("quiet sink=%d %s %s", sink, exact ? "paper" : "", nexus);
        OWN_SESSION Session *s = sonic_session(m, a, opt);
        sonic_agrees(u, s, &p, formatted("case %d: %s, %s", i, opt, original ? "original" : "augmented"));
        CHECK(any || ((Sonic *)s->part[0].ms)->warned == (i % 3 == 2), "case %d: a turn past T_max", i);
        free(u->alt);
        nexus_free(a);
    }
}

// What becomes of an adapter before it is refused.
enum { AS_IT_IS, METADATA, ONE_ROW_MORE, NO_TENSOR, STRANGE_TENSOR, TYPE_OF_BASE, TYPE_OF_TURN, SHAPE_OF_BASE, SHARED,
       NO_KEY, BIASED };

// Changes the adapter, which fits m.
static void nexus_spoil(Nexus *a, int how, const char *key, const char *value) {
    NexusTensor *t = how == ONE_ROW_MORE || how == NO_TENSOR ? nexus_find(a, key) : NULL;
    if (how == METADATA || how == SHARED) nexus_meta(a, key, value);
    if (how == ONE_ROW_MORE) {
        t->x = xrealloc(t->x, (size_t)(t->rows + 1) * t->cols * sizeof(float));
        memset(t->x + (size_t)t->rows++ * t->cols, 0, t->cols * sizeof(float));
    }
    if (how == NO_TENSOR) {
        free(t->x);
        arrdel(a->t, t - a->t);
    }
    if (how == STRANGE_TENSOR) nexus_add(a, key, 0, 16, NULL, 1, "F32");
    if (how == TYPE_OF_BASE) a->t[0].type = value;
    if (how == TYPE_OF_TURN) a->t[2].type = value;
    if (how == SHAPE_OF_BASE) {
        a->t[0].rows = 4;
        a->t[0].cols = 8;
    }
    for (int k = 0; how == NO_KEY && k < (int)arrlen(a->meta); k++)
        if (!strcmp(a->meta[k].key, key)) arrdel(a->meta, k);
}

TEST(sonic_refusals,
     "every check of an adapter has its message, with name, expected and found value") {
    static const struct {
        int how;
        const char *key, *value, *says;
    } cases[] = {
        { AS_IT_IS, "", "", NULL },
        { METADATA, "format", "gguf", "metadata format is gguf, expected sonic-nexus" },
        { METADATA, "version", "2", "metadata version is 2" },
        { ONE_ROW_MORE, "nexus.layers.1.mlp.up_proj.weight", "",
          "nexus.layers.1.mlp.up_proj.weight: found shape (41,32), expected (40,32) (adapter made for another model?)" },
        { NO_TENSOR, "nexus.layers.0.self_attn.k_proj.weight", "", "nexus.layers.0.self_attn.k_proj.weight is missing" },
        { STRANGE_TENSOR, "nexus.layers.0.q_norm", "", "unexpected tensor nexus.layers.0.q_norm" },
        { TYPE_OF_BASE, "", "I64", "nexus.embed.base is I64, expected F32, F16 or BF16" },
        { TYPE_OF_TURN, "", "F16", "nexus.embed.turn is F16, but nexus.embed.base is F32" },
        { METADATA, "k_max", "9", "nexus.embed.pos: found shape (8,32), expected (9,32)" },
        { METADATA, "t_max", "5", "nexus.embed.turn: found shape (4,32), expected (5,32)" },
        { METADATA, "position_mode", "compact", "position_mode is compact, expected augmented or original" },
        { METADATA, "base_fingerprint", "0123456789abcdef", "base_fingerprint is 0123456789abcdef, base has" },
        { METADATA, "body", "content", "metadata body is content" },
        { METADATA, "mlp", "none", "metadata mlp is none" },
        { METADATA, "k_max", "x8", "k_max is x8, expected a number" },
        { METADATA, "k_default", "9", "k_default is 9, but k_max is 8" },
        { SHAPE_OF_BASE, "", "", "nexus.embed.base: found shape (4,8), expected (32)" },
        { SHARED, "mlp", "dedicated", "nexus.layers.0.mlp.gate_proj.weight is missing" },
        { METADATA, "mlp", "shared", "unexpected tensor nexus.layers.0.mlp.down_proj.weight" },
        { NO_KEY, "t_max", "", "metadata t_max is missing" },
        { BIASED, "", "", "nexus.layers.0.self_attn.q_proj.bias is missing" },
    };
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 40, 61, 8);
    OWN_MODEL Tiny biased = tiny_model(2, 4, 2, 16, 32, 40, 61, 8);
    tiny_give(biased, BIASES);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Nexus a = nexus_new(m, .1, "F32", "augmented", cases[i].how == SHARED);
        Tiny base = cases[i].how == BIASED ? biased : m;
        char err[512] = "";
        nexus_spoil(&a, cases[i].how, cases[i].key, cases[i].value);
        OWN_OPTIONS Options *o = options_of(formatted("sonic-weights=%s", nexus_write(a)));
        Session *s = session_try(base.c, base.w, o, "sonic", err);
        CHECK(cases[i].says ? !s && strstr(err, cases[i].says) : s != NULL, "%s %s: '%s', expected '%s'", cases[i].key,
              cases[i].value, err, cases[i].says);
        session_close(s);
        nexus_free(a);
    }

    // Too long a dialogue.
    Nexus a = nexus_new(m, .1, "F32", "original", 0);
    m.c->max_pos = 20;
    OWN_SESSION Session *s = sonic_session(m, a, "");
    Token tokens[21];
    int code = 0;
    for (int i = 0; i < 21; i++) tokens[i] = (Token){ i, -1, 0, TOK_USER };
    EXPECT_DIE(code, sonic_enter(s, s->part[0].ms, tokens, 21, 21));
    CHECK(code == EXIT_RUN && strstr(die_text, "max_position_embeddings 20"), "%d %s", code,
          die_text);
    nexus_free(a);
}

TEST(sonic_mask, "the mask, cell by cell, of two finished messages and a turn: 1 is seen, * by the exact mask alone") {
    static const char *const want[13] = { "1............", "11...........", "111..........", "1111.........",
                                          "111111...**..", "111111...**..", "1...111......", "1...1111.....",
                                          "1...11111....", "1...1111111..", "1...1111111..", "1...11...111.",
                                          "1...11...1111" };
    static const int kind[13] = { 0, 0, 0, 0, TOK_EXTRA, TOK_EXTRA, 1, 1, 1, TOK_EXTRA, TOK_EXTRA, 0, 0 };
    static const int seg[13] = { -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2 };
    for (int p = 0; p < 13; p++)
        for (int q = 0; q < 13; q++) {
            Token a = { 1, p, seg[p], kind[p] }, b = { 1, q, seg[q], kind[q] };
            CHECK(kv_visible(VIS_SEGMENT, 0, &a, p, &b, q) == (want[p][q] == '1'), "row %d column %d", p, q);
            CHECK(kv_visible(VIS_SEGMENT_EXACT, 0, &a, p, &b, q) == (want[p][q] != '.'), "exact, row %d column %d", p, q);
        }
}

TEST(sonic_untrained, "--sonic-weights none: the branch is the base, the embeddings are drawn once "
                      "and for all and have the table's size; the file's default K is 16") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 40, 61, 8);
    Session *s[2];
    for (int i = 0; i < 2; i++) s[i] = session_of(m, "sonic", "sonic-weights=none quiet");
    const Sonic *x = s[0]->part[0].ms, *y = s[1]->part[0].ms;
    size_t n = (size_t)(1 + 64 + 32) * 32;
    CHECK(x->K == 16 && x->K_max == 64 && x->T_max == 32 && !memcmp(x->embed, y->embed, n * 4),
          "another draw");
    CHECK(!memcmp(s[0]->alt, m.w->layer, 2 * sizeof(Layer)), "the base's matrices");
    double square = 0, mean = 0, table = 0;
    for (int i = 0; i < 64 * 32; i++) square += x->embed[32 + i] * x->embed[32 + i];
    for (int i = 0; i < 61 * 32; i++) table += pow(((const float *)m.w->embed.data)[i], 2);
    for (int r = 0; r < 61; r++) mean += ((const float *)m.w->embed.data)[r * 32 + 7] / 61;
    CHECK(fabs(sqrt(square / 2048) / sqrt(table / (61 * 32)) - 1) < .05, "size of e_pos");
    CHECK(fabs(mean - x->embed[7]) < 1e-6, "e_base is the mean");
    Script p = { 3, { 30, 9, 8 }, { 6, 5, 4 }, 4 };
    free(run_session(s[0], &p));
    CHECK(kv_head(s[0], 0, 0)->len == 4 + 16 + 6 + 9 + 5 + 12, "rows %d", kv_head(s[0], 0, 0)->len);
    for (int i = 0; i < 2; i++) session_done(s[i]);
}

// ==================================================================================================== 8 DILILAZYKV AND HEADKV

TEST(dililazy_vector, "Algorithm 1 by hand, and where nothing or half of it is known, all is fixed or less than nothing") {
    static const double inf[3][4] = { { .8, .2, .1, .1 }, { 0 }, { .3, .1, 0, 0 } }, beta[] = { 1.351, 1, 1e12, .5 };
    static const int want[4] = { 106, 36, 25, 25 };
    int cap[4], twin[4];
    dililazy_caps(inf[0], 2, 2, 48, 1.351, cap);
    CHECK(!memcmp(cap, want, sizeof cap), "caps %d %d %d %d", cap[0], cap[1], cap[2], cap[3]);
    for (int i = 0; i < 24; i++) {
        dililazy_caps(inf[i % 3], 2, 2, i < 12 ? 48 : 0, beta[i / 3 % 4], cap);
        twin_caps(inf[i % 3], 2, 2, i < 12 ? 48 : 0, beta[i / 3 % 4], .01, twin);
        CHECK(!memcmp(cap, twin, sizeof cap), "case %d: caps %d %d %d %d", i, cap[0], cap[1], cap[2], cap[3]);
    }
}

TEST(dililazy_files, "score files: keys are read, whatever their order; numbers, lists, "
                     "our names and the authors' names") {
    const char *good[][2] = {
        { "{\"1-1\": 4, \"0-1\": 2, \"0-0\": [0.5, 1.5], \"1-0\": [3]}", "inf" },
        { "{\"average_precisions_weighted\": {\"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 4}}",
          "dili" },
        { "{\"inf\": {}, \"dili\": {\"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 4}, \"lazy\": {}}",
          "dili" },
        { "{\"filter_condition\": \"x\", \"average_infscores_weighted\": {}, "
          "\"average_precisions_weighted\": {}, \"average_recalls_weighted\": {\"0-0\": 1, "
          "\"0-1\": 2, \"1-0\": 3, \"1-1\": 4}}",
          "lazy" },
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char err[512] = "", *path = temp_text(good[i][0]);
        OWN double *x = scores_read(path, good[i][1], 2, 2, err);
        CHECK(x && x[0] == 1 && x[1] == 2 && x[2] == 3 && x[3] == 4, "file %zu: %s", i, err);
        free(path);
    }
    static const char *const bad[][2] = {       // a text, and words of its refusal
        { "{\"0-0\": 1, \"0-1\": 2, \"1-0\": 3}", "1-1" },
        { "{\"0-0\": 1, \"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 3}", "twice" },
        { "{\"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 3, \"2-0\": 1}", "2-0" },
        { "{\"0-2\": 1}", "0-2" }, { "{\"0-0\": -1}", "0-0" }, { "{\"0-0\": []}", "0-0" },
        { "{\"0-0\": [1, \"2\"]}", "0-0" }, { "{\"0-0\": {\"1-1\": 1}, \"0-1\": {}}", "0-0" },
        { "{\"a\": {}, \"b\": {}}", "layer-head" }, { "{\"0--1\": 1}", "0--1" }, { "{\"-1-0\": 1}", "-1-0" },
        { "{\"0-0x\": 1}", "0-0x" }, { "{\"00000000000000000-0\": 1}", "000" }, { "[1]", "layer-head" },
        { "{", "end of the text" }, { "", "byte 0" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char err[512] = "";
        OWN char *path = temp_text(bad[i][0]);
        CHECK(!scores_read(path, "inf", 2, 2, err) && strstr(err, bad[i][1]), "%s: %s", bad[i][0], err);
    }
    char err[512] = "";
    CHECK(!scores_read("no/such/file", "inf", 2, 2, err) && strstr(err, "no/such/file"), "%s", err);
}

// ---- stage 1

// Parses a list of numbers. Returns the exit code, 0 if it was taken.
__attribute__((noinline)) static int list_dies(const char *text) {
    int code;
    EXPECT_DIE(code, number_list("n", text, 0, 100));
    return code;
}

TEST(dililazy_words, "recall of the answer's words: case and punctuation fold, repeated words "
                     "count; number lists") {
    struct {
        const char *answer, *text;
        double want;
    } c[] = {
        { "Row out to the lighthouse.", "you ROW out, to the lighthouse!", 1 },
        { "Long walks and barley soup.", "Barley (soup)", .4 },
        { "the the cat", "the cat", 2 / 3. },
        { "the cat", "the the", .5 },
        { "a b", "", 0 },
        { "...", "x", 1 },
        { "1947", "born in 1947.", 1 },
        { "caf\xc3\xa9", "CAF\xc3\xa9", 1 },
        { "cat", "concat", 0 },
    };

    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        double got = word_recall(c[i].answer, c[i].text);
        CHECK(fabs(got - c[i].want) < 1e-9, "\"%s\" in \"%s\": %g", c[i].answer, c[i].text, got);
    }
    int *x = number_list("n", "2:98:3", 0, 100);
    CHECK(arrlen(x) == 33 && x[0] == 2 && x[32] == 98, "%d depths", (int)arrlen(x));
    arrfree(x);
    x = number_list("n", "5,0,5,10:12:1", 0, 100);
    CHECK(arrlen(x) == 5 && x[0] == 5 && x[1] == 0 && x[4] == 12, "a mix, each once");
    arrfree(x);
    double t = now();
    x = number_list("n", "0:200000:2,0:200000:1", 0, 200000);
    CHECK(arrlen(x) == 200001 && x[100001] == 1 && x[200000] == 199999, "%d", (int)arrlen(x));
    CHECK(now() - t < 2, "a list of 200,001 numbers takes %g s", now() - t);
    arrfree(x);
    const char *bad[] = { "", "x", "5,", "101", "-1", "5:1:1", "1:5:0", "1:5", "5 6", "1,,2" };
    for (int i = 0; i < 10; i++) CHECK(list_dies(bad[i]) == EXIT_USAGE, "\"%s\"", bad[i]);
}

// A tokenizer of bytes: id = byte; 256 is zz, because a tokenizer must merge something
static Tokenizer *byte_tokenizer(void) {
    char text[16384], *p = text, err[512];
    p += sprintf(p, "{\"added_tokens\":[],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_"
                    "space\":false,\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\"},"
                    "\"model\":{\"type\":\"BPE\",\"merges\":[[\"z\",\"z\"]],\"vocab\":{\"zz\":256");
    // The byte alphabet: printable bytes stand for themselves, others for 256, 257, ..
    for (int b = 0, extra = 0; b < 256; b++) {
        int same = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        p += sprintf(p, ",\"\\u%04x\":%d", same ? b : 256 + extra++, b);
    }
    sprintf(p, "}}}");
    Tokenizer *t = tokenizer_parse(text, strlen(text), err);
    if (!t) CHECK(0, "%s", err);
    return t;
}

// What each head looks at: score (3): Inf, Dili, Lazy of a prompt's last token, summed; top, mass: of the row looked at
// last, its largest entry and its mass on the right answer.
typedef struct {
    Calibration *r;
    int reasoning, top[8];
    double score[3][8], mass[8];
} CalTwin;

// The needle's mass and its share of the ten best rows, the best row, and the answer's mass among the |N| best.
static void cal_after(void *u, Twin *t, int l, const double *q, const double *q_pre, int n) {
    CalTwin *x = u;
    int H = t->c->H, N = (int)arrlen(t->id), idx[4096], from = x->r->at, end = x->r->at + x->r->n;
    double p[4096];
    (void)q_pre;
    if (l == t->c->L) return;
    for (int h = l * H; h < (l + 1) * H; h++) {
        double best = 0, hit = 0, needle = 0;
        twin_probs(t, l, h - l * H, n - 1, q + ((size_t)(n - 1) * H + h - l * H) * t->c->D, p);
        for (int k = twin_pick(p, N, 10, idx); k > 0; k--) {
            best += p[idx[k - 1]];
            if (idx[k - 1] >= from && idx[k - 1] < end) hit += p[idx[k - 1]];
        }
        for (int i = from; i < end; i++) needle += p[i];
        for (int k = 0; k < 3 && !t->decoding && !x->reasoning; k++)
            x->score[k][h] += (double[]){ 2 * hit / (best + needle), hit / best, hit / needle }[k];
        twin_pick(p, N, 1, &x->top[h]);
        x->mass[h] = 0;
        for (int k = twin_pick(p, N, x->r->n, idx); k > 0; k--)
            if (idx[k - 1] >= x->r->right && idx[k - 1] < end) x->mass[h] += p[idx[k - 1]];
    }
}

// Runs f(arg) in a process of its own, one thread, without the mark that die() jumps to -> its exit
// code, 128 + a signal's number; what it says on stderr in said.
static int in_a_process(void (*f)(long), long arg, char *said, size_t size) {
    int end[2], rc;
    if (pipe(end)) return -1;
    fflush(NULL);
    pid_t pid = fork();
    if (!pid) {
        dup2(end[1], 2);
        close(end[0]);
        close(end[1]);
        set_threads(1);                         // a forked pool has lost its threads
        die_jump = NULL;
        f(arg);
        _exit(0);
    }
    close(end[1]);
    size_t n = 0;
    for (ssize_t got; n + 1 < size && (got = read(end[0], said + n, size - n - 1)) > 0;)
        n += (size_t)got;
    said[n] = 0;
    close(end[0]);
    if (pid < 0 || waitpid(pid, &rc, 0) != pid) return -1;
    return WIFEXITED(rc) ? WEXITSTATUS(rc) : 128 + WTERMSIG(rc);
}

static struct {
    Tiny m;
    const Tokenizer *t;
    const Options *o;
} calibrated;

static void calibrate_apart(long unused) {
    (void)unused;
    _exit(calibrate(calibrated.m.c, calibrated.m.w, calibrated.t, NULL, calibrated.o));
}

// --calibrate with these options in a process of its own (what it holds when it dies is no leak then). Returns its exit
// code; said: its stderr.
static int calibrate_says(Tiny m, const Tokenizer *t, const char *text, char said[1024]) {
    OWN_OPTIONS Options *o = options_of(text);
    calibrated.m = m;
    calibrated.t = t;
    calibrated.o = o;
    int code = in_a_process(calibrate_apart, 0, said, 1024);
    return code;
}

// What --calibrate goes through, with our own needles, in the frame of a model without a template; prompts of `length`
// ids.
static Calibration calibration_of(Tiny m, const Tokenizer *t, const Options *o, int length) {
    size_t LH = (size_t)m.c->L * m.c->H;
    Calibration r = { .t = t, .length = length, .frame = frame_make(NULL), .needles = needles_load("") };
    r.hay = hay_ids(t, "", length);
    r.score = xcalloc(SCORES * LH, sizeof(double));
    r.sum = xcalloc(SCORES * LH, sizeof(double));
    r.mass = xcalloc(LH, sizeof(double));
    r.top = xcalloc(LH, sizeof(int));
    r.s = session_open(m.c, m.w, o, "full");
    return r;
}

static void calibration_free(Calibration *r) {
    session_close(r->s);
    json_free(r->needles);
    arrfree(r->hay);
    free(r->frame);
    free(r->score);
    free(r->sum);
    free(r->mass);
    free(r->top);
}

// ---- HeadKV: the pool rule, options, and scores

TEST(headkv_scores, "R and R2 of one answer by hand; a step past |N| counts for R alone") {
    int ids[8] = { 50, 51, 52, 53, 54, 55, 56, 57 }, idx[64], top[1];
    double score[SCORES] = { 0 }, mass[1];
    // N: keys 2 to 5, c2: 4 and 5.
    Calibration r = { .at = 2, .n = 4, .right = 4, .score = score, .top = top, .mass = mass };
    // The four largest: 0, 4, 2, 6.
    float a[8] = { .3f, .02f, .2f, .01f, .25f, .02f, .1f, .1f };
    head_look(&r, 0, a, 8, idx);
    CHECK(top[0] == 0 && fabs(mass[0] - .25) < 1e-6, "top %d, mass %g", top[0], mass[0]);
    head_said(&r, 1, ids, 0, 50);
    CHECK(score[SCORE_R] == 0 && fabs(score[SCORE_R2] - .25) < 1e-6,
          "the largest lies outside the needle: R %g, R2 %g", score[SCORE_R], score[SCORE_R2]);
    a[4] = .4f;
    head_look(&r, 0, a, 8, idx);
    head_said(&r, 1, ids, 1, 53);
    CHECK(score[SCORE_R] == 0, "another token was said: R %g", score[SCORE_R]);
    head_said(&r, 1, ids, 2, 54);
    CHECK(fabs(score[SCORE_R] - .25) < 1e-9 && fabs(score[SCORE_R2] - 1.05) < 1e-6, "R %g, R2 %g",
          score[SCORE_R], score[SCORE_R2]);
    head_said(&r, 1, ids, 4, 54);
    CHECK(fabs(score[SCORE_R] - .5) < 1e-9 && fabs(score[SCORE_R2] - 1.05) < 1e-6,
          "step 4 of 4: R %g, R2 %g", score[SCORE_R], score[SCORE_R2]);
}

// The prompt of a run: the needle stands at its depth, behind the end of a sentence; with reasoning the wrong answer and
// the reasoning stand before it.
static void check_prompt(const Calibration *r, const Json *needle, int depth, int reasoning, const int *ids) {
    int n = (int)arrlen(ids), place = (r->length - 200 - r->n) * depth / 100;
    char want[2048], *text = xcalloc(n + 1, 1);
    for (int i = 0; i < n; i++) text[i] = (char)ids[i];
    while (place > 0 && r->hay[place - 1] != '.') place--;
    snprintf(want, sizeof want, reasoning ? " %s %s %s" : "%.0s%.0s %s", json_text(needle, "reasoning"),
             json_text(needle, "distractor"), json_text(needle, "needle"));
    CHECK(r->n == (int)strlen(want) && r->at == place && !strncmp(text + r->at, want, (size_t)r->n),
          "depth %d: at %d, expected %d: \"%.300s\"", depth, r->at, place, text + r->at);
    CHECK(!strncmp(text + r->right + 1, json_text(needle, "needle"), strlen(json_text(needle, "needle"))),
          "the right answer");
    CHECK(strstr(text, json_text(needle, "question")) && !strcmp(text + n - 7, "Answer:"), "the question");
    free(text);
}

// The answers of a run by the twin, greedily: what R and R2 gather.
static void twin_answers(Tiny m, CalTwin *x, const int *ids, int steps, double sum[5][8]) {
    Twin *t = twin_new(m.c, m.w, DT_F32);
    double logits[257];
    t->hook = (TwinHooks){ .u = x, .after = cal_after };
    twin_prefill(t, ids, (int)arrlen(ids), logits);
    for (int step = 0; step < steps; step++) {
        int id = 0;
        for (int v = 1; v < 257; v++)
            if (logits[v] > logits[id]) id = v;
        for (int h = 0; h < 8; h++) {
            int top = x->top[h], hit = top >= x->r->at && top < x->r->at + x->r->n && ids[top] == id;
            if (x->reasoning) sum[4][h] += x->mass[h];
            else sum[3][h] += hit ? 1.0 / x->r->n : 0;
        }
        if (step + 1 < steps) twin_decode(t, id, logits);
    }
    twin_free(t);
}

TEST(calibrate_scores, "--calibrate: Inf, Dili and Lazy, R and R2 equal the slow twin's, means over all runs; the file reads "
                       "back; the needle stands where it should; without second runs there is no R2; no answer is "
                       "exit 1 and leaves no file") {
    enum { LENGTH = 450 };
    Tokenizer *t = byte_tokenizer();
    if (!t) return;
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 40, 257, 83);
    char *out = temp_text(""), err[512], said[1024] = "";
    int *hay = hay_ids(t, "", 700), *few = hay_ids(t, "", 300);
    double sum[5][8] = { { 0 } }, some = 0;
    CHECK(arrlen(few) >= 300 && !memcmp(few, hay, arrlen(few) * sizeof(int)), "hay depends on its length");
    OWN_OPTIONS Options *o = options_of("quiet");
    Calibration r = calibration_of(m, t, o, LENGTH);
    *(Calibration **)observe(r.s, &head_probe) = &r;

    // Twelve runs, accepted or not: what each gathers is summed.
    CalTwin x = { .r = &r };
    for (int i = 0; i < 12; i++) {
        const Json *needle = &r.needles->item[i / 2 % 3];
        int depth = 50 + i / 6 * 50, second = i % 2;
        int *ids = run_prompt(&r, needle, depth, second);
        check_prompt(&r, needle, depth, second, ids);
        x.reasoning = second;
        twin_answers(m, &x, ids, HAY_ANSWER, sum);
        arrfree(ids);
        calibrate_run(&r, needle, depth, second);
        for (int k = 0; k < 5; k++)
            for (int h = 0; h < 8 && (k == SCORE_R2) == second; h++) r.sum[k * 8 + h] += r.score[k * 8 + h];
    }
    r.accepted = r.reasoned = 6;
    FILE *f = fopen(out, "w");
    scores_write(f, &r);
    fclose(f);
    memcpy(sum, x.score, sizeof x.score);
    for (int k = 0; k < 5; k++) {
        OWN double *file = scores_read(out, score_names[k][0], 2, 4, err);
        CHECK(file != NULL, "%s", err);
        for (int h = 0; file && h < 8; h++) {
            CHECK(fabs(file[h] - sum[k][h] / 6) < 1e-5, "%s of head %d: %g, expected %g", score_names[k][0], h, file[h],
                  sum[k][h] / 6);
            some += k == 4 ? file[h] : 0;
        }
    }
    CHECK(some > 1e-3, "no head looks at a right answer: this shows nothing");
    free(r.frame);
    r.frame = copy_text("<user>{hay}({question})");
    r.length = 500;
    for (int depth = 0; depth <= 100; depth += 20) {
        int *ids = run_prompt(&r, &r.needles->item[1], depth, 0);
        CHECK(ids[0] == '<' && ids[1] == 'u' && ids[5] == '>' && arrlast(ids) == ')', "prefix and prompt");
        CHECK((r.at == 6 || ids[r.at - 1] == '.') && ids[r.at + r.n - 1] == '.' && r.at <= 6 + 300 * depth / 100,
              "depth %d: the needle stands inside a sentence", depth);
        arrfree(ids);
    }

    // Without a second run there is no R2.
    r.reasoned = 0;
    f = fopen(out, "w");
    scores_write(f, &r);
    fclose(f);
    calibration_free(&r);
    OWN char *half = temp_text("[{\"question\": \"What?\", \"needle\": \"That is so.\", \"answer\": 3}]");
    double *file = scores_read(out, "r", 2, 4, err), *none = scores_read(out, "r2", 2, 4, err);
    CHECK(file && !none && strstr(err, "r2"), "%s", err);
    free(file);
    unlink(out);
    int code = calibrate_says(m, t, formatted("calibrate=%s calibrate-needles=%s quiet", out, half), said);
    CHECK(code == EXIT_USAGE && strstr(said, "--calibrate-needles"), "exit %d: %s", code, said);
    const char *all = formatted("calibrate=%s quiet", out);
    m.c->max_pos = LENGTH;                          // what all runs are long then
    code = calibrate_says(m, t, all, said);         // a random model does not answer
    CHECK(code == EXIT_RUN && strstr(said, "--calibrate-needles") && !file_exists(out), "exit %d: %s", code, said);
    code = calibrate_says(m, NULL, "calibrate=no/such/folder/x.json", said);
    CHECK(code == EXIT_USAGE && strstr(said, "tokenizer"), "exit %d", code);
    free(out);
    arrfree(hay);
    arrfree(few);
    tokenizer_free(t);
}

// ==================================================================================================== 9 CUDA
#ifdef KVCOMP_CUDA
#include "test/device.h"
#else
// How many tests of the device there are.
static int cuda_tests(void) {
    char why[256];
    size_t n;
    OWN char *text = read_file("test/device.h", &n, why);
    int count = 0;
    for (const char *p = text; p && (p = strstr(p, "\nTEST(cuda_")) != NULL; p++) count++;
    return count;
}
#endif

int main(int argc, char **argv) {
#ifdef KVCOMP_CUDA
    top_k_chosen = note_gap;
#else
    if (argc < 2) lack("g++, which compiles the kernels for the CPU", cuda_tests());
#endif
    return check_main(argc, argv);
}
