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
static const char table_small[] =
    "budget=40 obs-window=8 sink=4 sonic-k=3 shape-init=9 shape-local=31 shape-last=11 "
    "minference-verticals=30 minference-slashes=50 full-layers=1 "
    "loopserve-min-context=0 loopserve-samples=16 loopserve-local=8 loopserve-max-cells=.9 "
    "loopserve-alpha=.8 loopserve-first=2 loopserve-interval=3 pats-window=8 pats-tend=240 "
    "lychee-buffer=8 lychee-chunk-min=4 lychee-chunk-max=8";

static const Script table_script = { 3, { 120, 1, 50 }, { 24, 3, 20 }, 41 };
enum { TABLE_TOKENS = 120 + 1 + 50 + 24 + 3 + 20 };

// Of several parts at once, which are many: as long as each of them needs to act.
static const Script joined_script = { 3, { 90, 1, 30 }, { 10, 2, 8 }, 41 };

// The shapes of the heads, (H,G,D): query heads a KV head 2, 4, 1, 2.
static const int table_shapes[][3] = { { 6, 3, 16 }, { 4, 1, 40 }, { 4, 4, 24 }, { 4, 2, 16 } };

// A flat file of the heads' scores x in an order that is not theirs, until the next call.
static const char *scores_text(int L, int H, const double *x) {
    static char text[8192];
    char *p = text;
    for (int i = 0; i < L * H; i++) {
        int k = (i * 7 + 3) % (L * H);      // L*H is no multiple of 7 in these tests
        p += sprintf(p, "%s\"%d-%d\": [%.17g, %.17g]", i ? ", " : "{", k / H, k % H, x[k] * .5, x[k] * 1.5);
    }
    sprintf(p, "}");
    return text;
}

// A model of L layers whose folder has head scores. windows: 0, or a bit for every layer with a sliding window.
static Tiny table_model_of(int L, int H, int G, int D, unsigned windows) {
    Tiny m = tiny_model(L, H, G, D, 32, 40, 61, 41 + L * 100 + H * 10 + G);
    const char *dir = tmp_path("model");
    double score[512];
    mkdir(dir, 0700);
    snprintf(m.c->dir, sizeof m.c->dir, "%s", dir);
    for (int i = 0; i < L * H; i++) score[i] = rnd_int(6) ? pow(rnd_unit(), 3) : 0;
    put_text(formatted("%s/head_scores.json", dir), scores_text(L, H, score));
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
    Options *o = options_of_program();
    options_words(o, "quiet=1 sonic-weights=none", table_err);
    if (small) options_words(o, table_small, table_err);
    if (!stores(spec)) options_words(o, "ctk=f32 ctv=f32", table_err);
    table_err[0] = 0;
    Session *s = options_words(o, more, table_err) ? NULL : session_try(m.c, m.w, o, spec, table_err);
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

// Plays a script. Returns a number of its logits.
static uint64_t table_run(Tiny m, const char *spec, int small, const char *more, const Script *p) {
    OWN_SESSION Session *s = table_open(m, spec, small, more);
    CHECK(s, "%s %s: %s", spec, more, table_err);
    OWN float *x = s ? run_session(s, p) : NULL;
    return s ? hash_bytes(0, x, (size_t)script_rows(p) * m.c->V * sizeof *x) : 0;
}

// ---- limits
// May this method be full attention? One that stores rows is not, and SONIC's turns do not see each other.
static int may_be_full(const Method *x) { return !(x->role & ROLE_STORE) && !x->rule; }

// With a budget of this many tokens every method that may be is full attention, bit for bit. Returns a number of its logits.
static uint64_t full_at_its_limit(Tiny m, const char *more, int tokens, const Script *script) {
    uint64_t full = table_run(m, "full", 0, more, script);
    CHECK(full, "full: %s", table_err);
    EACH_METHOD(p) {
        const char *enough = formatted((*p)->budget ? "%s budget=%d" : "%s", more, tokens);
        CHECK(!may_be_full(*p) || table_run(m, (*p)->name, 0, enough, script) == full, "%s %s is not full attention",
              (*p)->name, enough);
    }
    return full;
}

TEST(table_limits, "a budget of all tokens, at equality too, or sizes that leave nothing out are full attention bit "
                   "for bit; small ones are not") {
    OWN_MODEL Tiny m = table_model(3, 6, 3, 0);
    uint64_t full = full_at_its_limit(m, "", TABLE_TOKENS, &table_script);
    EACH_METHOD(p)
        CHECK(!(*p)->role || table_run(m, (*p)->name, 1, "", &table_script) != full, "%s under small options is full attention",
              (*p)->name);
}

// ---- bits
// What stays of a run, as one number: n logits, every head's rows, and bytes.
static uint64_t fingerprint(const Session *s, const float *logits, size_t n) {
    uint64_t x = hash_bytes(kv_bytes(s), logits, n * sizeof *logits);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        x = hash_bytes(x, h->src, h->len * sizeof *h->src);
        x = hash_bytes(x, h->pos, h->len * sizeof *h->pos);
    }
    return x;
}

// That of a script.
static uint64_t played(Session *s, const Script *p) {
    OWN float *x = run_session(s, p);
    return fingerprint(s, x, (size_t)script_rows(p) * s->c->V);
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
            uint64_t is = played(s, &table_script);
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
        static const int b[] = { 1024, 16, 25 };
        uint64_t first = 0;
        size_t all = 0;
        for (int k = 0; k < 3; k++) {
            OWN_SESSION Session *s = table_open(m, (*x)->name, 1, formatted("batch-size=%d obs-window=20", b[k]));
            uint64_t is = played(s, &p);
            size_t bytes = arena_bytes(s->scratch);
            if (!k) first = is;
            if (!k) all = bytes;
            CHECK(is == first, "%s -b %d: other bits", (*x)->name, b[k]);
            CHECK(!k || sees_whole_turn(s) || bytes + 450 * token < all, "%s -b %d takes %zu bytes, the whole turn %zu",
                  (*x)->name, b[k], bytes, all);
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

// May token p of tok see token q? By the text of the mask, not by kv_visible: Nexus rows of the past, the own segment, the
// system text.
static int twin_visible(int rule, const Token *tok, int p, int q) {
    int nexus = tok[q].kind == TOK_EXTRA;
    if (rule != VIS_CAUSAL && nexus && tok[p].kind == TOK_EXTRA) return rule == VIS_SEGMENT_EXACT || tok[q].seg <= tok[p].seg;
    if (q > p) return 0;
    return rule == VIS_CAUSAL || nexus || tok[q].seg < 0 || tok[q].seg == tok[p].seg;
}

static int follow_sees(void *u, Twin *t, int l, int h, int i, int row) {
    Follow *f = u;
    TwinRow *r = &twin_rows(t, l, h)[row];
    int w = t->c->windowed && t->c->windowed[l] ? t->c->window : 0, p = t->base + i;
    return (!w || t->pos[p] - t->pos[r->src] < w) && twin_visible(f->s->rule, f->s->tok, p, r->src);
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
    int L = s->c->L, G = s->c->G, held = 0, after = 0, new_rows = 0;
    for (int i = 0; i < L * G; i++) {
        const KVHead *h = &s->head[i];
        arrsetlen(t->row[i], 0);
        held += h->len;
        for (int r = 0; r < h->len; r++) {
            TwinRow row = { h->src[r], h->pos[r] };
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
    follow.t->alt = s->alt;
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
    const Method *x = method_find(spec, strlen(spec));
    Session *s = table_open(m, spec, 1, more);
    int few = x->evicts && x->budget, held = 0;
    EACH_PASS(pass, &table_script, m.c->V) {
        double before = s->clk.bytes_attended;
        int len = s->head[0].len, step = pass.step >= 0;
        run_pass(s, &pass);
        check_rows(s, spec, more);
        held = step ? held + 1 : kv_longest(s, m.c->L - 1);
        CHECK(kv_longest(s, m.c->L - 1) <= held, "%s %s: rows appear in decode", spec, more);
        if (few && !step && pass.turn != 1) check_budget(s, spec, more, budget_now(s));     // turn 1 may hold less
        double read = s->clk.bytes_attended - before, want = bytes_read(s);
        if (step && s->head[0].len > len && !s->packing)
            CHECK(fabs(read - want) < 1, "%s %s: %g bytes read, by the views %g", spec, more, read, want);
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
    prefill(s, seven_ids(120, m.c->V), 120);
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
            uint64_t a = table_run(m, spec, 1, uncut, &table_script), b = table_run(m, (*p)->name, 1, plain, &table_script);
            CHECK(a && a == b, "%s %s is not %s %s", spec, uncut, (*p)->name, plain);
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
        const int *ids = seven_ids(170, m.c->V);
        int V = m.c->V;
        if (x->evicts || x->role & ROLE_STORE) continue;
        OWN_SESSION Session *s = table_open(m, x->name, 1, ""), *never = table_open(m, x->name, 1, "");
        prefill(never, ids, 100);
        prefill(s, ids, 100);
        for (int i = 0; i < 20; i++) decode(s, ids[i]);
        prefill(s, ids + 40, 70);
        decode(s, 7);
        kv_truncate(s, 100);
        CHECK(s->n_tok == 100 && s->pos_next == 100, "%s: %d tokens, next position %d", x->name, s->n_tok, s->pos_next);
        // LycheeCluster's index of the first turn is gone in one of them, and built again a turn later.
        for (int i = -1; i < (x->plan ? 0 : 20); i++) {
            const float *a = i < 0 ? prefill(s, ids, 60) : decode(s, ids[i]);
            const float *b = i < 0 ? prefill(never, ids, 60) : decode(never, ids[i]);
            CHECK(!memcmp(a, b, V * sizeof *a), "%s: step %d behind a rollback", x->name, i);
        }
        check_rows(s, x->name, "");
        check_rows(never, x->name, "");
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
        // The last one's queries are those of prefills: only its numbers of rows are alike.
        int alike = i < 3, held = 0;
        const char *text = "budget=24 obs-window=8";
        OWN_SESSION Session *s = session_of(m, method[i], text), *at_once = session_of(m, method[i], text);
        prefill(s, ids, 20);                        // no more than the budget: nothing is dropped
        for (int j = 20; j < 70; j++) decode(s, ids[j]);
        CHECK(kv_longest(s, 0) == 70, "%s: %d rows before", method[i], kv_longest(s, 0));
        CHECK(session_compress(s) > 0 && kv_longest(s, 1) <= 48, "%s: %d rows", method[i], kv_longest(s, 1));
        prefill(at_once, ids, alike ? 70 : 20);
        CHECK(alike ? !heads_differ(s, at_once) : kv_longest(s, 1) == 24, "%s: other rows", method[i]);
        const float *x = decode(s, 5), *y = decode(at_once, 5);
        CHECK(!alike || !memcmp(x, y, (size_t)m.c->V * sizeof *x), "%s: other logits", method[i]);
        session_compress(s);                        // heads may share their rows anew, but hold no more of them
        for (int h = 0; h < 4; h++) held += s->head[h].len;
        CHECK(held <= 4 * 24, "%s: %d rows in all after a second time", method[i], held);
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
        const char *text = formatted("budget=24 obs-window=8 %s", i < 7 ? "" : "ctk=f16 ctv=f16"), *name = method[i];
        OWN_SESSION Session *by_hand = session_of(m, name, text), *s = session_of(m, name, formatted("%s chunk=20", text));
        const float *x = NULL, *y = prefill(s, ids, 75);
        for (int t = 0; t < 75; t += 20) x = prefill(by_hand, ids + t, min_int(20, 75 - t));
        CHECK(!memcmp(x, y, (size_t)m.c->V * sizeof *x), "%s: other logits", name);
        CHECK(!heads_differ(by_hand, s), "%s: other rows", name);
        CHECK(s->turn == 1 && s->n_tok == 75, "%s: turn %d", name, s->turn);
        CHECK(by_hand->clk.peak == s->clk.peak, "%s: %zu bytes at most, %zu by hand", name, s->clk.peak, by_hand->clk.peak);
    }
}

TEST(streaming_rerotate, "--streaming-rerotate: rows stand at positions 0..n-1, their keys are the ones RoPE gives there, the "
                         "next token follows; it is refused where sliding windows count original positions") {
    Script p = { 2, { 50, 20 }, { 3, 0 }, 12 };
    // One layer: a token's unrotated key does not depend on what was dropped.
    OWN_MODEL Tiny m = tiny_model(1, 4, 2, 16, 32, 48, 61, 8);
    Twin *t = twin_new(m.c, m.w, DT_F32);
    float kept[2][24 * 16];
    for (int turn = 0; turn < 2; turn++) {
        OWN_SESSION Session *s = session_of(m, "streaming", turn ? "budget=24 streaming-rerotate" : "budget=24");
        free(run_session(s, &p));
        KVHead *h = kv_head(s, 0, 1);
        CHECK(h->len == 24 && s->pos_next == (turn ? 24 : 73), "%d rows, next position %d", h->len, s->pos_next);
        kv_load_k(s, h, NULL, 0, 24, kept[turn]);
        for (int r = 0; r < 24; r++) {
            double k[16];
            CHECK(h->pos[r] == (turn ? r : s->tok[h->src[r]].pos), "row %d stands at %d", r, h->pos[r]);
            for (int d = 0; d < 16; d++) k[d] = kept[turn][r * 16 + d];
            twin_rope(t, k, -h->pos[r]);            // back to position 0 by the inverse rotation
            for (int d = 0; d < 16; d++) kept[turn][r * 16 + d] = (float)k[d];
        }
    }
    twin_free(t);
    CHECK(worst(kept[0], kept[1], 24 * 16, 1e-5, 1e-5, NULL) <= 1,
          "keys differ by more than their rotation");

    OWN_MODEL Tiny windows = table_model(2, 4, 2, 1);
    CHECK(!table_open(windows, "streaming", 0, "streaming-rerotate=1") && strstr(table_err, "original positions"), "'%s'",
          table_err);
}

// ==================================================================================================== 3 BASELINES

// Slow twins of the baselines, in double and with their own loops: full rows of probabilities, selection by repeated
// maximum, moments from every query. They share nothing with the program but the rules.

// From H2O on they drop rows in decode, too.
enum { BT_SNAP, BT_ADA, BT_PYRAMID, BT_EXPECTED, BT_KEYDIFF, BT_DILI, BT_HEADKV, BT_H2O, BT_STREAMING, BT_TOVA };

enum { BT_ROWS = 512 };         // the most rows of a head

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

// The place of the largest of n numbers, the first of equals; those that are NaN are taken already. -1: all are.
static int twin_best(const double *x, int n) {
    int best = -1;
    for (int j = 0; j < n; j++)
        if (!isnan(x[j]) && (best < 0 || x[j] > x[best])) best = j;
    return best;
}

// The k largest, one after the other, the first of equals; ascending.
static int twin_pick(const double *x, int n, int k, int *idx) {
    OWN double *left = xmalloc((n + 1) * sizeof *left);
    int m = 0;
    memcpy(left, x, n * sizeof *left);
    for (int i = 0; i < k && i < n; i++) left[twin_best(left, n)] = NAN;
    for (int j = 0; j < n; j++)
        if (isnan(left[j])) idx[m++] = j;
    return m;
}

// The mean row of probabilities of query head h over the last min(w,n) queries, times `share`, is added to out (rows).
static void twin_observe(Twin *t, int l, int h, const double *q, int n, int w, double share, double *out) {
    int rows = (int)arrlen(twin_rows(t, l, h)), m = n < w ? n : w;
    OWN double *p = xcalloc(rows + 1, sizeof *p);
    for (int i = n - m; i < n; i++) {
        twin_probs(t, l, h, i, q, p);
        for (int j = 0; j < rows; j++) out[j] += p[j] * share / m;
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
    memcpy(x, y, n * sizeof *x);
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

// ExpectedAttention: softmax over the rows from `first` on of the mean of q.k / sqrt(D) plus half the variance of it, for
// the queries that head h has seen, at the mean of the next 512 positions; its R-th part is added to x (rows).
static void twin_future(const BaseTwin *b, Twin *t, int l, int h, int first, double *x) {
    int D = t->c->D, N = (int)arrlen(t->id), n = (int)arrlen(b->seen[l * t->c->H + h]) / D;
    const double *seen = b->seen[l * t->c->H + h];
    TwinRow *row = twin_rows(t, l, h);
    double cosine[TWIN_D] = { 0 }, sine[TWIN_D] = { 0 }, z[BT_ROWS], total = 0;
    for (int i = 0; i < D / 2; i++)
        for (int p = N; p < N + 512; p++) {
            cosine[i] += cos(p * t->w->inv_freq64[i]) * t->w->rope_scale / 512;
            sine[i] += sin(p * t->w->inv_freq64[i]) * t->w->rope_scale / 512;
        }
    for (int r = first; r < (int)arrlen(row); r++) {
        // To turn a query forth is to turn the key back.
        double key[TWIN_D], mean = 0, square = 0;
        for (int i = 0, j = D / 2; j < D; i++, j++) {
            key[i] = cosine[i] * row[r].k[i] + sine[i] * row[r].k[j];
            key[j] = cosine[i] * row[r].k[j] - sine[i] * row[r].k[i];
        }
        for (int i = 0; i < n; i++) {
            double dot = twin_dot(seen + i * D, key, D) / sqrt(D);
            mean += dot / n;
            square += dot * dot / n;
        }
        z[r] = mean + (square - mean * mean) / 2;
        total += exp(z[r]);
    }
    for (int r = first; r < (int)arrlen(row); r++) x[r] += exp(z[r]) / total * t->c->G / t->c->H;
}

// By what KV head g of layer l, which may keep B rows, ranks its rows: x (rows), 0 at first. INFINITY: the row stays.
static void base_scores(const BaseTwin *b, Twin *t, int l, int g, const double *q, int n, int B, double *x) {
    TwinRow *row = t->row[l * t->c->G + g];
    int rows = (int)arrlen(row), H = t->c->H, R = H / t->c->G, D = t->c->D, first = 0;
    int last = rows - (b->kind == BT_H2O ? B / 2 : b->w < B ? b->w : B);       // the latest, which stay
    double mu[TWIN_D] = { 0 };
    while (first < rows && row[first].src < b->sink) first++;
    if (b->kind <= BT_PYRAMID) {
        for (int h = g * R; h < g * R + R; h++) twin_observe(t, l, h, q, n, b->w, 1.0 / R, x);
        twin_pool(x, last, b->width, b->mean);
    }
    for (int h = g * R; h < g * R + R && b->kind == BT_EXPECTED; h++) twin_future(b, t, l, h, first, x);
    for (int h = 0; h < H && b->kind == BT_TOVA; h++) twin_observe(t, l, h, q, n, 1, 1, x);
    for (int i = 0; i < rows * D && b->kind == BT_KEYDIFF; i++)
        mu[i % D] += row[i / D].k[i % D] / twin_length(row[i / D].k, D);
    for (int r = 0; r < rows; r++) {
        if (b->kind == BT_EXPECTED) x[r] = (x[r] + b->epsilon) * twin_length(row[r].v, D);
        if (b->kind == BT_KEYDIFF) x[r] = -twin_dot(row[r].k, mu, D) / twin_length(row[r].k, D);
        if (b->kind == BT_H2O) x[r] = row[r].mass;
        if (b->kind == BT_STREAMING) x[r] = r;
        if (r < first || (r >= last && (b->kind <= BT_PYRAMID || b->kind == BT_H2O))) x[r] = INFINITY;
    }
}

// Every head keeps the best rows of its part: B, by PyramidKV so many a layer. AdaKV's heads share what is beside their
// windows: those that hold the best of all heads get more, a fifth is dealt out evenly.
static void base_keep(const BaseTwin *b, Twin *t, int l, const double *q, int n, int B) {
    int G = t->c->G, N = (int)arrlen(t->id), w = b->w < B ? b->w : B, cap[16], total = 0;
    OWN double *x = xcalloc((size_t)G * BT_ROWS, sizeof *x), *all = xcalloc((size_t)G * BT_ROWS, sizeof *all);
    OWN int *idx = xcalloc((size_t)G * BT_ROWS, sizeof *idx);
    for (int i = 0; i < G * BT_ROWS; i++) all[i] = -INFINITY;
    for (int g = 0; g < G; g++) {
        int rows = (int)arrlen(t->row[l * G + g]), candidates = rows > w ? rows - w : 0;
        base_scores(b, t, l, g, q, n, B, x + g * BT_ROWS);
        memcpy(all + g * BT_ROWS, x + g * BT_ROWS, candidates * sizeof *x);
        total += candidates;
        cap[g] = b->kind == BT_PYRAMID ? w + twin_level(l, t->c->L, N, B - w, w) : B;
    }
    if (b->kind == BT_ADA) {
        int cnt[16] = { 0 };
        if (total <= G * (B - w)) return;
        for (int k = twin_pick(all, G * BT_ROWS, G * (B - w), idx); k > 0; k--) cnt[idx[k - 1] / BT_ROWS]++;
        for (int g = 0; g < G; g++) cap[g] = w + (int)nearbyint(cnt[g] * .8 + floor((B - w) * .2 + 1e-9));
    }
    for (int g = 0; g < G; g++)
        twin_keep(t, l, g, idx, twin_pick(x + g * BT_ROWS, (int)arrlen(t->row[l * G + g]), cap[g], idx));
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
    int pool = (int)floor(base / beta), given = 0, idx[512];
    double sum = 0, part[512] = { 0 };
    for (int i = 0; i < n; i++) sum += score[i];
    for (int i = 0; i < n; i++) {
        part[i] = sum > 0 ? score[i] * pool * n / sum : pool;
        cap[i] = (int)(part[i] + 1e-9);
        given += cap[i];
    }
    for (int i = 0; i < n; i++) part[i] = rint((part[i] - cap[i]) * 1e9);      // what is left over; equal ones are equal
    for (int k = twin_pick(part, n, pool * n - given, idx); k > 0; k--) cap[idx[k - 1]]++;
    for (int i = 0; i < n; i++) cap[i] += base - pool;
}

// DiliLazyKV and HeadKV: every query head reads the best rows of its own budget, and the window.
static void twin_head_budgets(BaseTwin *b, Twin *t, int l, const double *q, int n, int B) {
    int H = t->c->H, R = H / t->c->G, L = t->c->L, w = b->w < B ? b->w : B, cap[512], idx[BT_ROWS];
    b->end = (int)arrlen(t->id);
    if (b->kind == BT_HEADKV) twin_headkv_caps(b->score, L * H, B - w, b->beta, cap);
    else twin_caps(b->score, L, H, B - w, b->beta, .01, cap);
    for (int g = 0; g < t->c->G; g++) {
        TwinRow *row = t->row[l * t->c->G + g];
        int rows = (int)arrlen(row);
        double wanted[BT_ROWS] = { 0 };
        for (int h = g * R; h < g * R + R; h++) {
            double x[BT_ROWS] = { 0 };
            twin_observe(t, l, h, q, n, b->w, 1, x);
            twin_pool(x, rows - w, b->width, 0);
            for (int r = rows - w; r < rows; r++) x[r] = INFINITY;
            arrsetlen(b->read[l * H + h], 0);
            for (int i = 0, k = twin_pick(x, rows, cap[l * H + h] + w, idx); i < k; i++) {
                wanted[idx[i]] = 1;
                arrput(b->read[l * H + h], row[idx[i]].src);
            }
        }
        int k = 0;
        for (int r = 0; r < rows; r++)
            if (wanted[r] > 0) idx[k++] = r;
        twin_keep(t, l, g, idx, k);
    }
}

// What they read in decode, as a hook before a layer's attention.
static void base_twin_before(void *u, Twin *t, int l, const double *q, int n) {
    BaseTwin *b = u;
    (void)q;
    for (int h = 0; h < t->c->H && b->end && t->decoding; h++) {
        TwinRow *row = twin_rows(t, l, h);
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
    for (int i = 0; b->seen && !t->decoding && i < n * H; i++)
        for (int d = 0; d < D && t->pos[t->base + i / H] >= b->sink; d++)
            arrput(b->seen[l * H + i % H], q_pre[(size_t)i * D + d]);
    int B = t->decoding ? b->B : twin_budget(b, N);
    if (N <= B || (t->decoding && b->kind < BT_H2O)) return;
    if (b->read) twin_head_budgets(b, t, l, q, n, B);
    else base_keep(b, t, l, q, n, B);
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
        if (b.beta) scores = temp_text(scores_text(L, H, b.score));
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
    OWN_SESSION Session *full = session_of(m, "full", "budget=24"), *s = session_of(m, "knorm", "budget=24");
    int ids[70];
    draw_ids(ids, 70, 61);
    prefill(full, ids, 70);
    prefill(s, ids, 70);
    for (int i = 0; i < 3 * 3; i++) {
        const KVHead *h = &s->head[i];
        float k[70 * 16], longest = 0, shortest = INFINITY;
        kv_load_k(full, &full->head[i], NULL, 0, 70, k);
        for (int r = 0, j = 0; r < 70; r++) {
            float length = sqrtf(dot_f32(k + r * 16, k + r * 16, 16));
            int kept = j < h->len && h->src[j] == r;
            j += kept;
            if (kept) longest = fmaxf(longest, length);
            else shortest = fminf(shortest, length);
        }
        CHECK(h->len == 24 && longest <= shortest, "layer %d, head %d: %d rows up to %g; dropped from %g", i / 3, i % 3,
              h->len, longest, shortest);
    }
}

// ==================================================================================================== 4 LOOPSERVE AND THE SPARSE PREFILLS

// The selections against brute force that recomputes everything from the definition, and whole dialogues, in which
// the program attends over lines, against a slow twin in double that knows masks only.

// ---- brute force

// Lines of one head in n rows of which p0 are old; samples R (m) with their rows P (m,n) in double. Line x below n is the
// slash of offset x, line n + x the vertical of column x.
typedef struct {
    int n, p0, m, hold, sink, local, *R;
    double alpha, max_cells, *P;
    char *on;                   // (2n) chosen
    double rec[2], tot[2], cells;
} Brute;

// Room for the lines of one head: n rows of which p0 are old, m sampled rows.
static Brute brute_new(int n, int p0, int m) {
    return (Brute){ .n = n,
                    .p0 = p0,
                    .m = m,
                    .R = xcalloc(m, sizeof(int)),
                    .P = xcalloc((size_t)m * n, sizeof(double)),
                    .on = xcalloc(2 * n, 1),
                    .local = 1,
                    .max_cells = 2 };
}

// Frees what brute_new made.
static void brute_free(Brute *b) {
    free(b->R);
    free(b->P);
    free(b->on);
}

// How many cells of the new rows a line has.
static int brute_len(const Brute *b, int line) { return b->n - max_int(line % b->n, b->p0); }

// Is the cell of row r and column c in a line that was chosen?
static int brute_reads(const Brute *b, int r, int c) { return b->on[r - c] || b->on[b->n + c]; }

// What is recovered, and the cells, from nothing but the lines.
static void brute_count(Brute *b) {
    double all = 0;
    memset(b->rec, 0, sizeof b->rec);
    memset(b->tot, 0, sizeof b->tot);
    for (int i = 0; i < b->m; i++)
        for (int c = 0; c <= b->R[i]; c++) {
            b->tot[b->hold && i % 2] += b->P[i * b->n + c];
            b->rec[b->hold && i % 2] += brute_reads(b, b->R[i], c) ? b->P[i * b->n + c] : 0;
        }
    b->cells = 0;
    for (int x = 0; x < 2 * b->n; x++) b->cells += b->on[x] * (double)brute_len(b, x);
    for (int r = b->p0; r < b->n; r++) all += r + 1;
    b->cells /= all;
}

// Variant b: the best line of all, again and again, slashes first, until each half has recovered alpha -> dense?
static int brute_exact(Brute *b) {
    OWN double *g = xmalloc(2 * b->n * sizeof *g);
    for (int x = 0; x < b->n; x++) {
        b->on[x] = x < b->local;
        b->on[b->n + x] = x < b->sink;
    }
    for (brute_count(b); b->rec[0] < b->alpha * b->tot[0] || b->rec[1] < b->alpha * b->tot[1]; brute_count(b)) {
        memset(g, 0, 2 * b->n * sizeof *g);
        for (int i = 0; i < b->m; i += 1 + b->hold)
            for (int c = 0; c <= b->R[i]; c++) {
                double gain = brute_reads(b, b->R[i], c) ? 0 : b->P[i * b->n + c];
                g[b->R[i] - c] += gain;
                g[b->n + c] += gain;
            }
        for (int x = 0; x < 2 * b->n; x++) g[x] = g[x] > 1e-12 ? g[x] / brute_len(b, x) : NAN;
        int best = twin_best(g, 2 * b->n);
        if (best < 0) return b->hold && b->rec[1] < b->alpha * b->tot[1];
        b->on[best] = 1;
        brute_count(b);
        if (b->cells > b->max_cells) return 1;
    }
    return 0;
}

// Variant a: of the heaviest slash and the heaviest vertical the one with more weight a cell, less the largest cells of
// all lines that it may cross -> dense?
static int brute_faithful(Brute *b, double *sum) {
    int n = b->n, count[2] = { 0 };
    OWN double *w = xcalloc(2 * n, sizeof *w), *top = xcalloc(2 * n, sizeof *top);
    double tot = 0, crossed[2] = { 0 };                 // by slashes, by verticals
    for (int i = 0; i < b->m; i++)
        for (int c = 0; c <= b->R[i]; c++)
            for (int k = 0; k < 2; k++) {
                int line = k ? n + c : b->R[i] - c;
                double x = b->P[i * n + c];
                w[line] += x;
                tot += k ? 0 : x;
                top[line] = fmax(top[line], x);
            }
    memset(b->on, 0, 2 * n);
    for (*sum = 0; *sum < b->alpha * tot;) {
        int best[2];
        double gain[2], rate[2];
        for (int k = 0; k < 2; k++) {
            best[k] = twin_best(w + k * n, n) + k * n;
            if (best[k] < k * n) best[k] = -1;
            gain[k] = best[k] < 0 ? -1 : fmax(0, w[best[k]] - crossed[!k]);
            rate[k] = gain[k] / (best[k] < 0 ? 1 : fmax(1, brute_len(b, best[k]) - count[!k]));
        }
        if (gain[0] <= 0 && gain[1] <= 0) break;
        int k = !(best[1] < 0 || (best[0] >= 0 && rate[0] >= rate[1]));
        b->on[best[k]] = 1;
        w[best[k]] = NAN;
        crossed[k] += top[best[k]];
        count[k]++;
        *sum += gain[k];
    }
    b->on[0] = 1;
    brute_count(b);
    return *sum < b->alpha * tot;
}

// ---- the program's selections on the same input

// By variant b (kind 0) or a: how many lines are marked on one side only. What was found goes to *f, dense to *dense.
static int lines_differ(const Brute *b, int kind, LoopFound *f, int *dense) {
    int n = b->n, bad = 0;
    OWN uint64_t *v = xcalloc(1, bit_bytes(n)), *s = xcalloc(1, bit_bytes(n));
    OWN double *room = xmalloc((size_t)5 * n * sizeof *room);
    OWN float *P = xmalloc((size_t)b->m * n * sizeof *P);
    for (int i = 0; i < b->m * n; i++) P[i] = (float)b->P[i];
    Lines a = { .n = n, .p0 = b->p0, .v = v, .s = s };
    LineSample p = { b->m, n, b->p0, b->R, P };
    LoopRule u = { b->alpha, b->sink, b->local, b->hold, b->max_cells };
    *dense = (kind ? select_faithful : select_exact)(&p, &u, &a, room, f);
    for (int x = 0; x < n; x++) bad += bit_get(s, x) != b->on[x] || bit_get(v, x) != b->on[n + x];
    return bad;
}

// Random sampled rows. Grid: multiples of 1/64, so that sums are exact and ties abound; else
// softmax rows with columns and diagonals that stand out, rounded to float so that both sides see
// the same numbers.
static Brute brute_random(int most_n, int grid) {
    int n = 2 + rnd_int(most_n - 1), p0 = rnd_int(n), m = 1 + rnd_int(n - p0 < 12 ? n - p0 : 12);
    Brute b = brute_new(n, p0, m);
    OWN double *hot = xcalloc(2 * n, sizeof *hot);
    double peak = rnd_unit() * 6;
    for (int x = 0; x < 2 * n; x++) hot[x] = rnd_int(8) ? 0 : peak * rnd_unit();
    for (int i = 0; i < m; i++) {
        int r = b.R[i] = p0 + (int)((long)(i + 1) * (n - p0) / m) - 1;
        double sum = 0, *p = b.P + (size_t)i * n;
        for (int c = 0; c <= r; c++) {
            p[c] = grid ? rnd_int(5) / 64. : exp(hot[c] + hot[n + r - c] + rnd_normal());
            sum += p[c];
        }
        for (int c = 0; c <= r && !grid; c++) p[c] = (float)(p[c] / sum);
    }
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
        int kind = i % 5 > 2, is_dense;
        Brute b = brute_random(40, i % 2);
        LoopFound f;
        double sum = 0, all, slack = 1e-6 * b.m;
        if (kind) b.hold = 0;
        int d = kind ? brute_faithful(&b, &sum) : brute_exact(&b), bad = lines_differ(&b, kind, &f, &is_dense);
        CHECK(d == is_dense && !bad, "case %d: n %d m %d alpha %g: %d lines differ, dense %d %d", i, b.n, b.m, b.alpha, bad, d,
              is_dense);
        brute_count(&b);
        all = b.tot[0] + b.tot[1];
        if (!kind) sum = b.rec[0] + b.rec[1];
        CHECK(fabs(f.mass * all - sum) < 1e-6 || all == 0, "case %d: claims %g", i, f.mass);
        CHECK(sum <= b.rec[0] + b.rec[1] + 1e-9, "case %d: claims %g, recovers %g", i, sum, b.rec[0]);
        CHECK(kind || fabs(f.cells - b.cells) < 1e-9, "case %d: cells %g, are %g", i, f.cells, b.cells);
        CHECK(d || kind || (b.rec[0] >= b.alpha * b.tot[0] - slack && b.rec[1] >= b.alpha * b.tot[1] - slack),
              "case %d: recovers %g of %g", i, b.rec[0], b.tot[0]);
        CHECK(d || !kind || f.mass >= b.alpha - 1e-12, "case %d: %g < %g", i, f.mass, b.alpha);
        dense[kind] += d;
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
    double **q;                 // (L) stb_ds: q (H*D) of every token seen
    int *end;                   // (L*G): candidates when it last chose, 0: never
    int **chosen;               // (L*G) stb_ds arrays: those that were chosen, ascending
    // Another method beside it.
    void (*after)(void *u, Twin *t, int l, const double *q, const double *qp, int n);
    void *after_u;
    int dense, passes;
} LoopTwin;

// The lines of one head as a mask.
static void loop_twin_mask(LoopTwin *u, Twin *t, int l, int h, const double *q, int n) {
    int N = (int)arrlen(twin_rows(t, l, h)), R[256];
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
        twin_probs(t, l, h, R[i], q, b.P + (size_t)i * N);
    }
    double sum;
    if (!(u->kind ? brute_faithful(&b, &sum) : brute_exact(&b))) {
        u->dense--;
        char *mask = twin_mask(t, l, h, n);
        for (int r = N - n; r < N; r++)
            for (int c = 0; c <= r; c++) mask[(size_t)(r - N + n) * N + c] = brute_reads(&b, r, c);
    }
    brute_free(&b);
}

// LoopServe's selection amid decoding: scores of the last `obs` queries, the best B rows of a head.
static void loop_twin_choose(LoopTwin *u, Twin *t, int l) {
    int G = t->c->G, R = t->c->H / G, from = max_int(t->base - u->obs + 1, u->ring_from);
    for (int g = 0; g < G; g++) {
        TwinRow *rows = t->row[l * G + g];
        int N = (int)arrlen(rows), at = l * G + g, *end = &u->end[at];
        OWN double *p = xmalloc(N * sizeof *p), *score = xcalloc(N, sizeof *score);
        for (int h = g * R; h < g * R + R; h++)
            for (int i = from; i <= t->base; i++) {
                twin_probs(t, l, h, i - t->base, u->q[l] + (size_t)t->base * t->c->H * t->c->D, p);
                for (int j = 0; j < N; j++) score[j] += p[j];
            }
        for (*end = 0; *end < N && rows[*end].src < u->prompt_end;) ++*end;
        arrsetlen(u->chosen[at], *end);
        arrsetlen(u->chosen[at], twin_pick(score, *end, u->B, u->chosen[at]));
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
    if (!t->decoding) u->ring_from = t->base + n - min_int(n, u->obs);
    if (t->decoding && u->decode && t->step + 1 >= u->first && (t->step + 1 - u->first) % u->interval == 0)
        loop_twin_choose(u, t, l);
    for (int h = 0; h < t->c->H && t->decoding; h++) {
        int at = l * t->c->G + h / (t->c->H / t->c->G), N = (int)arrlen(t->row[at]);
        if (!u->end[at]) continue;
        char *mask = twin_mask(t, l, h, n);
        for (int r = u->end[at]; r < N; r++) mask[r] = 1;
        for (int k = 0; k < (int)arrlen(u->chosen[at]); k++) mask[u->chosen[at][k]] = 1;
    }
}

// After a prefill every head begins anew with all rows.
static void loop_twin_after(void *p, Twin *t, int l, const double *q, const double *qp, int n) {
    LoopTwin *u = p;
    if (l == t->c->L && !t->decoding) {
        u->prompt_end = (int)arrlen(t->id);
        memset(u->end, 0, (size_t)l * t->c->G * sizeof(int));
    }
    if (u->after) u->after(u->after_u, t, l, q, qp, n);
}

// The twin's settings out of the program's options.
static LoopTwin loop_twin(const Options *o, const Config *c, const char *method) {
    int paper = opt_int(o, "paper"), interval = opt_int(o, "loopserve-interval"), m = opt_int(o, "loopserve-samples");
    return (LoopTwin){ .prefill = !strstr(method, "loopserve-d"),
                       .decode = !strstr(method, "loopserve-p"),
                       .kind = paper,
                       .m = m,
                       .hold = m >= 32,
                       .min_context = opt_int(o, "loopserve-min-context"),
                       .sink = opt_int(o, "sink") < 0 ? 4 : opt_int(o, "sink"),
                       .local = opt_int(o, "loopserve-local"),
                       .alpha = paper && !opt_given(o, "loopserve-alpha") ? .955 : opt_real(o, "loopserve-alpha"),
                       .max_cells = opt_real(o, "loopserve-max-cells"),
                       .first = opt_int(o, "loopserve-first"),
                       .interval = interval,
                       .obs = opt_int(o, "loopserve-obs") ? opt_int(o, "loopserve-obs") : interval,
                       .B = opt_int(o, "budget"),
                       .q = xcalloc(c->L, sizeof(double *)),
                       .end = xcalloc((size_t)c->L * c->G, sizeof(int)),
                       .chosen = xcalloc((size_t)c->L * c->G, sizeof(int *)) };
}

// Frees a LoopTwin.
static void loop_twin_free(LoopTwin *u, const Config *c) {
    for (int l = 0; l < c->L; l++) arrfree(u->q[l]);
    for (int i = 0; i < c->L * c->G; i++) arrfree(u->chosen[i]);
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

// Session and twin side by side. window: 0, or the width of all layers' sliding windows; beside: NULL, or the settings of
// a baseline that drops rows when a layer has attended. Some heads of the prefills must not read everything. Returns the
// share of those that do not.
static double loop_agrees(const char *method, const char *options, const Script *p, int H, int G, int window,
                          BaseTwin *beside) {
    OWN_MODEL Tiny m = tiny_model(2, H, G, 16, 32, 48, 61, 40 + H + G);
    if (window) tiny_window(m, ~0u, window);
    OWN_OPTIONS Options *o = options_of(options);
    LoopTwin u = loop_twin(o, m.c, method);
    u.after = beside ? base_twin : NULL;
    u.after_u = beside;
    TwinHooks hooks = { &u, .before = loop_twin_before, .after = loop_twin_after, .prefill = loop_twin_prefill };
    OWN_BESIDE Beside x = run_beside(m, method, options, hooks, p);
    (void)x;
    int sparse = u.prefill && opt_given(o, "loopserve-alpha");
    CHECK(!sparse || u.dense < .9 * u.passes, "%s %s: %d of %d heads are dense: tests nothing", method, options, u.dense,
          u.passes);
    loop_twin_free(&u, m.c);
    return 1 - (double)u.dense / u.passes;
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
    for (int i = 0; i < 8; i++)
        sparse += loop_agrees(run[i][0], run[i][1], &p, shape[i % 4][0], shape[i % 4][1], i == 7 ? 45 : 0, NULL);
    CHECK(sparse > 2, "sparse heads");
}

TEST(loopserve_beside, "loopserve-p beside methods that drop rows, heads of unequal lengths among "
                       "them: lines live in rows") {
    Script p = { 3, { 110, 70, 70 }, { 12, 5, 3 }, 8 };
    BaseTwin streaming = { BT_STREAMING, 90, 0, 0, 4, -1 };
    BaseTwin ada = { BT_ADA, 90, 8, 7, 0, -1 }, pyramid = { BT_PYRAMID, 60, 8, 7, 0, -1 };
    loop_agrees("loopserve-p+streaming", LOOP_SMALL "loopserve-alpha=.8 budget=90", &p, 4, 2, 0, &streaming);
    loop_agrees("adakv+loopserve-p", LOOP_SMALL "loopserve-alpha=.8 budget=90 obs-window=8", &p, 4, 2, 0, &ada);
    loop_agrees("loopserve-p+pyramidkv", LOOP_SMALL "loopserve-alpha=.8 budget=60 obs-window=8", &p, 4, 2, 0, &pyramid);
}

// ---- A-shape, Tri-shape, MInference

typedef struct {
    int kind, init, local, last;
} ShapeTwin;

// A-shape (kind 0), tri-shape (1) and MInference (2) as masks.
static void shape_twin_before(void *p, Twin *t, int l, const double *q, int n) {
    ShapeTwin *u = p;
    int N = (int)arrlen(t->row[l * t->c->G]), m = min_int(n, 64);
    for (int h = 0; h < t->c->H && !t->decoding; h++) {
        char *mask = twin_mask(t, l, h, n);
        OWN double *sum = xcalloc(2 * N, sizeof *sum), *P = xcalloc(N, sizeof *P);      // of verticals, then of slashes
        OWN int *v = xcalloc(N, sizeof *v), *s = xcalloc(N, sizeof *s);
        OWN char *on = xcalloc(2 * N, 1);
        for (int i = n - m; i < n && u->kind == 2; i++) {
            twin_probs(t, l, h, i, q, P);
            for (int c = 0; c <= N - n + i; c++) {
                sum[c] += P[c];
                sum[N + N - n + i - c] += P[c];
            }
        }
        for (int x = 0; x < 2 * N; x++)
            if (x % N < (x < N ? 30 : 100)) sum[x] = 1e9;
        for (int x = 0; x < N && u->kind < 2; x++) sum[x] = sum[N + x] = -x;
        for (int k = twin_pick(sum, N, u->init, v); k > 0; k--) on[v[k - 1]] = 1;
        for (int k = twin_pick(sum + N, N, u->local, s); k > 0; k--) on[N + s[k - 1]] = 1;
        for (int r = N - n; r < N; r++)
            for (int c = 0; c <= r; c++)
                mask[(size_t)(r - N + n) * N + c] = on[c] || on[N + r - c] || (u->kind == 1 && r >= N - u->last);
    }
}

TEST(sparse_prefill_twin, "A-shape, Tri-shape and MInference agree with their slow twins, alone "
                          "and beside StreamingLLM") {
    Script p = { 2, { 130, 90 }, { 3, 2 }, 8 };
    static const struct {
        const char *method, *text;
        ShapeTwin is;
    } run[] = { { "a-shape", "shape-init=9 shape-local=31", { 0, 9, 31, 11 } },
                { "tri-shape", "shape-init=3 shape-local=20 shape-last=11", { 1, 3, 20, 11 } },
                { "minference", "minference-verticals=40 minference-slashes=110", { 2, 40, 110, 11 } },
                { "minference", "minference-verticals=30 minference-slashes=60", { 2, 30, 60, 11 } } };
    for (int i = 0; i < 4; i++) {
        OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 48, 61, 50 + i);
        ShapeTwin u = run[i].is;
        OWN_BESIDE Beside x = run_beside(m, run[i].method, run[i].text, (TwinHooks){ &u, .before = shape_twin_before }, &p);
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
        const struct {
            int schedule, T;
            double want;
        } is[] = { { PATS_NEW, 1024, ideal[0][i] }, { PATS_OLD, 1024, ideal[0][i] }, { PATS_MIDDLE, 1024, ideal[1][i] },
                   { PATS_MIDDLE, 128, mid128[i] } };
        for (int k = 0; k < 4; k++) {
            double found = mem_ideal(is[k].schedule, b, is[k].T);
            CHECK(fabs(found - is[k].want) < 6e-4, "schedule %d, %d at %d: %.4f", is[k].schedule, b, is[k].T, found);
        }
        for (int k = 0; k < 6; k++) {
            int D = real[k / 2].D, rows64 = k % 2;
            unsigned char lost[1024];
            int same[1024];
            size_t bytes;
            for (int t = 0; t < 1024; t++) {
                lost[t] = (unsigned char)pats_schedule(PATS_MIDDLE, 2, b, t + 1, 1024);
                same[t] = t;
            }
            Region *reg = regions_of(lost, same, same, 1024, rows64, D, &bytes);
            CHECK((int)arrlen(reg) <= 2 * (b - 2) + 1, "%d regions", (int)arrlen(reg));
            double save = 100 * (1 - (double)(bytes - PATS_GUARD) / (1024.0 * D * 2));
            CHECK(fabs(save - real[k / 2].save[rows64][i]) < .11, "D %d rows64 %d b_max %d: saves %.2f", D, rows64, b, save);
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

    OWN_MODEL Tiny m = tiny_model(1, 1, 1, 64, 16, 16, 11, 1);
    for (int i = 0; i < 5; i++) {
        OWN_SESSION Session *s = session_of(m, "pats", formatted("ctk=f16 ctv=f16 %s", want[i].opt));
        Pats *x = s->part[0].ms;
        int repacks = 0;
        for (int T = want[i].from; T <= want[i].to; T++) {
            int due = pats_decide(x, T);
            CHECK(due == (x->T_last == T), "T_last");
            repacks += due;
            if (!due) continue;
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
            if (more) pats_decide(x, want[i].to);
            for (int t = 0; t < x->cut; t++) sum += x->bits[t];
            sum *= 100.0 / 16 / want[i].to;
            CHECK(want[i].cut[more] < 0 || fabs(sum - want[i].cut[more]) < .006, "%s: %.3f %%", want[i].opt, sum);
        }
        for (int t = 0; t < x->sink; t++)
            CHECK(x->bits[t] == 2, "sink %d has lost %d bits", t, x->bits[t]);
    }
}

// ---- whole dialogues against in-place cutting

// A session on plain f16 rows, which after every pass are cut by the rules of `of` where they stand. Logits must be the
// same bits.
static struct {
    const Pats *of;
    int T_last;
    unsigned char bits[512];
} slow_pats;

// Session.forward of it: what a pass does to the bits and rows. Each row is cut in place to its bits by age, never to more.
static float *slow_pats_forward(Session *s, const Token *in, int n) {
    const Pats *x = slow_pats.of;
    float *logits = forward(s, in, n);
    int T = s->n_tok, D = s->c->D, len = x->T_end ? x->T_end : T;
    if (8 * T < 9 * slow_pats.T_last) return logits;
    slow_pats.T_last = T;
    for (int t = 0; t < T - x->window; t++) {
        int b = t < x->sink ? x->b_min
                : t >= len ? x->schedule == PATS_NEW ? x->b_max : x->b_min
                           : (int)slow_bits(x->schedule, x->b_min, x->b_max, t + 1, len);
        slow_pats.bits[t] = (unsigned char)max_int(b, slow_pats.bits[t]);
    }
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        KVHead *h = &s->head[i];
        for (int e = 0; e < 2 * h->len * D; e++) {
            uint16_t *to = (uint16_t *)(e % 2 ? h->k : h->v) + e / 2;
            *to = f32_to_f16((float)slow_cut(f16_to_f32(*to), slow_pats.bits[h->src[e / 2 / D]]));
        }
    }
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
    memset(&slow_pats, 0, sizeof slow_pats);
    slow_pats.of = x;
    ref->forward = slow_pats_forward;
    OWN float *a = run_session(s, p), *b = run_session(ref, p);
    CHECK(!memcmp(a, b, (size_t)script_rows(p) * m.c->V * sizeof *a), "%s: logits differ", opt);
    CHECK(!memcmp(x->bits, slow_pats.bits, min_int(s->n_tok, x->cap)), "%s: B[t] differs", opt);
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
            int ids[80], n = 1 + rnd_int(70), keep[512], kept = 0, g = rnd_int(2), share = 1 + rnd_int(9), src[512];
            draw_ids(ids, n, 31);
            prefill(s, ids, n);
            KVHead *h = kv_head(s, 0, g);
            int N = h->len, had = s->n_tok, to = round == 2 ? rnd_int(had) : had;
            float was[2][512 * 8], is[8];
            kv_load_k(s, h, NULL, 0, N, was[0]);
            kv_load_v(s, h, NULL, 0, N, was[1]);
            memcpy(src, h->src, N * sizeof(int));
            for (int r = 0; r < N; r++)
                if (round == 2 ? src[r] < to : rnd_int(10) < share) keep[kept++] = r;
            if (round == 2) kv_truncate(s, to);
            else keep_head(s, 0, g, keep, kept);
            const Pats *x = s->part[0].ms;
            CHECK(x->cut <= to, "cut %d after truncating to %d", x->cut, to);
            for (int t = to; t < had; t++) CHECK(!x->bits[t], "token %d begins with %d bits lost", t, x->bits[t]);
            CHECK(h->len == kept, "len %d, kept %d", h->len, kept);
            for (int r = 0; r < 2 * kept; r++) {
                (r % 2 ? kv_load_v : kv_load_k)(s, h, NULL, r / 2, 1, is);
                CHECK(h->src[r / 2] == src[keep[r / 2]] && !memcmp(is, was[r % 2] + keep[r / 2] * 8, 32), "row %d", r / 2);
            }
            check_packed(s, "keep");
        }
    }
}

TEST(pats_layers, "PATS packs a layer of a prefill before the next layer has rows: the peak is less than all raw "
                  "rows; spans of -b change no bit, nor does packing at the end because of another part") {
    OWN_MODEL Tiny m = tiny_model(12, 2, 1, 16, 16, 16, 53, 31);
    float first[53];
    const char *text[] = { "batch-size=512", "batch-size=7", "batch-size=7" };
    for (int i = 0; i < 3; i++) {
        const char *all = formatted("%s pats-window=8 ctk=f16 ctv=f16 budget=1000", text[i]);
        OWN_SESSION Session *s = session_of(m, i == 2 ? "snapkv+pats" : "pats", all);
        prefill(s, seven_ids(300, 53), 300);
        const float *logits = decode(s, 1);
        double share = (double)s->clk.peak / (double)kv_bytes_full(s);
        CHECK(i == 2 ? share > .95 : share < .9, "%s: at most %g of the raw rows were held", all, share);
        CHECK(!i || !memcmp(logits, first, sizeof first), "%s: other logits", all);
        memcpy(first, logits, sizeof first);
    }
}

// ==================================================================================================== 6 LYCHEECLUSTER AND QUEST

// The twin works in double on whole texts and whole lists: it re-reads the text for every boundary,
// keeps each chunk key and each cluster as a plain array, sorts everything, and shares no function
// with the section.

// ---- a toy tokenizer: the bytes of each id; NULL: a special token, which has none. Behind the last all are empty

typedef struct {
    const char *const *piece;
    int n;
} Toy;

static const char *toy_bytes(const void *ctx, int id, int *len) {
    const Toy *t = ctx;
    const char *text = id < t->n && t->piece[id] ? t->piece[id] : "";
    *len = (int)strlen(text);
    return text;
}

static int toy_special(const void *ctx, int id) {
    const Toy *t = ctx;
    return id < t->n && !t->piece[id];
}

// Makes the chunker read ids as toy tokens.
static void toy_use(const Toy *t) { token_text = (TokenText){ t, toy_bytes, toy_special }; }

// 101 pieces: prose, code, JSON, marks, Chinese whole and cut inside a character, invalid bytes, an
// empty piece, two specials
static const char *const toy_pieces[101] = {
    " the", " quick", "The", " brown", " fox", " a", " code", "foo", "bar", "3", "14", " x",
    "ing", "er", " int", " return", " \"", "\"", "key", "val", ".", "?", "!", ",", ";", ":",
    "\n", "\n\n", " \n", "}", "]", ">", "{", "[", "<", "(", ")", " =", "=", "->", "=>", "::",
    "_", "-", "--", "---", "*", "**", "***", "`", "``", "```", " ", "  ", "\t", "\r\n", ".\n",
    ".\"", ".)", "),", "};", "\",", "\":", "...", "?!", " -", "/", "\\", "\n    ", "\n\t",
    "。", "，", "、", "：", "；", "！", "？", "·", "你好", "世界", "\xe4", "\xbd\xa0", "\xe4\xbd",
    "\xa0", "\xe3\x80", "\x82", "\xef\xbc", "\x8c", "」", "”", "’", "）", "\xe3\x80\x80",
    "\xff", "\xc3", "\xa9", "\xf0\x9f\x98", "\x80", "", NULL, NULL,
};
static const Toy toy_text = { toy_pieces, 101 };

// Chunks of the whole stream, by the levels of lychee_levels: end[] of each; a chunk needs keep tokens behind its longest
// form. Returns their number.
static int twin_chunks(const int *id, int n, int sink, int min, int max, int keep, int *end) {
    OWN int *level = xcalloc(n + 1, sizeof *level);
    OWN Token *tok = xcalloc(n + 1, sizeof *tok);
    int m = 0;
    for (int i = 0; i < n; i++) tok[i].id = id[i];
    for (int i = 0; i + 1 < n; i++) level[i] = level_after(tok, i);
    for (int s = sink; n - s >= keep + max; s = end[m++] + 1) {
        int best = CUT_INSIDE, last = s + max - 1;
        for (int e = s + min - 1; e <= last; e++) best = min_int(best, level[e]);
        end[m] = last;
        while (best < CUT_INSIDE && level[end[m]] != best) end[m]--;
    }
    return m;
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
        const char *const piece[] = { v[i].a, v[i].b, v[i].c };
        Toy t = { piece, 3 };
        toy_use(&t);
        int level = level_after((Token[]){ { 0 }, { 1 }, { 2 } }, 1);
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
    toy_use(&toy_text);
    long forced = 0, cut = 0;
    for (int trial = 0; trial < 400; trial++) {
        rnd_seed(trial + 1);
        int min = trial % 5 ? 8 : 1 + rnd_int(8), max = trial % 5 ? 16 : min + rnd_int(12);
        int sink = rnd_int(20), buffer = rnd_int(30), keep = max_int(buffer, 1), n = rnd_int(500), end[512];
        const int *from = kind[trial % 6];
        Token tok[512];
        int id[512];
        for (int i = 0; i < n; i++) {
            id[i] = from[0] + rnd_int(from[1] - from[0]);
            if (id[i] >= 99 && rnd_int(8)) id[i] = 0;
            if (!rnd_int(40)) id[i] = 120;              // outside the tokenizer: empty
            tok[i].id = id[i];
        }
        // In random portions, as turns and decode steps would.
        Session s = { .tok = tok };
        Lychee x = { .sink = sink, .min = min, .max = max, .buffer = buffer };
        arrput(x.start, sink);
        while (s.n_tok < n) {
            s.n_tok = min_int(n, s.n_tok + (rnd_int(3) ? 1 : 1 + rnd_int(60)));
            cut_chunks(&s, &x);
        }
        int m = twin_chunks(id, n, sink, min, max, keep, end);
        CHECK(x.M == m, "trial %d: %d chunks, twin %d", trial, x.M, m);
        for (int j = 0; j < m && j < x.M; j++) {
            int size = x.start[j + 1] - x.start[j];
            CHECK(x.start[j + 1] == end[j] + 1 && size >= min && size <= max, "trial %d chunk %d of %d ends at %d, twin %d",
                  trial, j, size, x.start[j + 1] - 1, end[j]);
            forced += x.level[x.start[j + 1] - 1] >= CUT_NONE;
        }
        CHECK(n - t_idx(&x) < keep + max || n < sink, "buffer of %d", n - t_idx(&x));
        cut += x.M;
        arrfree(x.start);
        arrfree(x.level);
    }
    CHECK(cut > 5000 && forced > 50 && forced < cut / 2, "%ld chunks, %ld forced", cut, forced);
    token_text = (TokenText){ 0 };
}

// ---- the twin's index

enum { TW = 640, TWD = TWIN_D };

typedef struct {
    double mu[TWD], r;
} TwinNode;

// Chunk j is of cluster of[j], cluster c of unit up[c].
typedef struct {
    TwinNode cluster[TW / 2], unit[64];
    int K, P, of[TW], up[TW];
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

// The Euclidean distance of two vectors (D).
static double twin_dist(const double *a, const double *b, int D) {
    double c[TWD];
    for (int d = 0; d < D; d++) c[d] = a[d] - b[d];
    return twin_length(c, D);
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

// Divides the centres of x (n) among K nodes in so many rounds; their centres are rounded before the last division: of (n).
static void twin_kmeans(const TwinNode *x, int n, TwinNode *node, int K, int D, int rounds, int *of) {
    double score[TW];
    for (int j = 0; j < K; j++) node[j] = x[(2 * j + 1) * n / (2 * K)];
    for (int it = 0; it <= rounds; it++) {
        for (int j = 0; j < K; j++) {
            double sum[TWD] = { 0 };
            int size = 0;
            for (int i = 0; i < n && it; i++) {
                if (of[i] != j) continue;
                size++;
                for (int d = 0; d < D; d++) sum[d] += x[i].mu[d];
            }
            if (size) twin_unit(sum, D);
            for (int d = 0; d < D && size; d++) node[j].mu[d] = sum[d];
            for (int d = 0; d < D && it == rounds; d++) node[j].mu[d] = twin_bf16(node[j].mu[d]);
        }
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < K; j++) score[j] = twin_dot(x[i].mu, node[j].mu, D);
            of[i] = twin_best(score, K);
        }
    }
}

// Builds the index of one head: chunks, their clusters, and units of clusters.
static void twin_index_build(TwinLychee *y, Twin *t, int l, int g) {
    TwinTree *w = &y->tree[l * t->c->G + g];
    int D = t->c->D;
    OWN TwinNode *key = xcalloc(y->M, sizeof *key);
    w->K = (y->M + 1) / 2;
    w->P = min_int((w->K + 1) / 2, 64);
    for (int j = 0; j < y->M; j++) twin_key(y, t, l, g, j, key[j].mu);
    twin_kmeans(key, y->M, w->cluster, w->K, D, 10, w->of);
    twin_kmeans(w->cluster, w->K, w->unit, w->P, D, 10, w->up);
    for (int j = 0; j < y->M; j++) {
        TwinNode *c = &w->cluster[w->of[j]], *u = &w->unit[w->up[w->of[j]]];
        c->r = fmax(c->r, twin_dist(key[j].mu, c->mu, D));
        u->r = fmax(u->r, twin_dist(key[j].mu, u->mu, D));
    }
}

// Moves a node's centre towards a new point v, so that its ball becomes the smallest that holds the old one and v.
static void twin_absorb(TwinNode *u, const double *v, int D) {
    TwinNode old = *u;
    double d = twin_dist(u->mu, v, D);
    if (d <= u->r) return;
    for (int i = 0; i < D; i++) u->mu[i] = twin_bf16(old.mu[i] + (v[i] - old.mu[i]) * (d - old.r) / (2 * d));
    u->r = fmax(old.r + twin_dist(u->mu, old.mu, D), twin_dist(u->mu, v, D));
}

// Puts the new chunk j into the nearest cluster that has a chunk, and that cluster's unit.
static void twin_graft(TwinLychee *y, Twin *t, int l, int g, int j) {
    TwinTree *w = &y->tree[l * t->c->G + g];
    int D = t->c->D;
    double v[TWD] = { 0 }, near[TW];
    twin_key(y, t, l, g, j, v);
    for (int c = 0; c < w->K; c++) near[c] = NAN;
    for (int i = 0; i < j; i++) near[w->of[i]] = twin_dot(v, w->cluster[w->of[i]].mu, D);
    int c = w->of[j] = twin_best(near, w->K);
    twin_absorb(&w->cluster[c], v, D);
    twin_absorb(&w->unit[w->up[c]], v, D);
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
    for (int i = y->full * t->c->G; i < t->c->L * t->c->G; i++) {
        if (build) twin_index_build(y, t, i / t->c->G, i % t->c->G);
        for (int j = old; j < y->M && !build; j++) twin_graft(y, t, i / t->c->G, i % t->c->G, j);
    }
    y->builds += build;
    y->grafts += build ? 0 : y->M - old;
    if (build) y->built = y->M;
}

// How well a node suits the queries q (m,D).
static double twin_suits(const TwinLychee *y, const double *q, int m, const TwinNode *u, int D) {
    double best = -INFINITY;
    for (int i = 0; i < m; i++)
        best = fmax(best, twin_dot(q + i * D, u->mu, D) / twin_length(q + i * D, D));
    return best + (y->bound ? u->r : 0);
}

// The chunks of the best clusters, of open units only: 1 in take (M).
static void twin_retrieve(const TwinLychee *y, const TwinTree *w, const double *q, int m, int D, char *take) {
    int room = y->B > y->sink ? y->B - y->sink : 0, left = 0, tokens = 0, c;
    int kg = y->kg > 0 && y->kg < w->P ? y->kg : w->P;
    double unit[64], cluster[TW];
    char open[64] = { 0 };
    for (int i = 0; i < TW; i++) unit[i % 64] = cluster[i] = NAN;
    for (int j = 0; j < y->M; j++) {                // nodes without a chunk are out
        int of = w->of[j], up = w->up[of];
        unit[up] = twin_suits(y, q, m, &w->unit[up], D);
        cluster[of] = twin_suits(y, q, m, &w->cluster[of], D);
    }
    for (int i = 0; i < kg || tokens < 4 * room; i++) {
        int p = twin_best(unit, w->P);
        if (p < 0) break;
        unit[p] = NAN;
        open[p] = 1;
        for (int j = 0; j < y->M; j++)
            if (w->up[w->of[j]] == p) tokens += y->start[j + 1] - y->start[j];
    }
    for (; (c = twin_best(cluster, w->K)) >= 0; cluster[c] = NAN)
        for (int j = 0; j < y->M; j++) {
            int len = y->start[j + 1] - y->start[j];
            if (w->of[j] != c || (y->kg && !open[w->up[c]])) continue;
            if (left + len > room) return;
            take[j] = 1;
            left += len;
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
        for (int h = g * R; h < g * R + R; h++) {
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
    if (with_text) toy_use(&toy_text);
    OWN_MODEL Tiny m = tiny_model(k->L, k->H, k->G, k->D, 48, 64, 101, seed);
    OWN_OPTIONS Options *o = options_of(k->opt);
    TwinLychee y = twin_settings(o);
    OWN TwinTree *tree = xcalloc((size_t)k->L * k->G, sizeof *tree);
    y.tree = tree;
    TwinHooks hooks = { &y, .before = lychee_twin_before, .after = lychee_twin_after };
    OWN_BESIDE Beside b = run_beside(m, "lychee", k->opt, hooks, &k->p);
    Session *s = b.s;
    Lychee *x = lychee_of(s);
    CHECK(y.sparse >= k->sparse, "only %d sparse views", y.sparse);
    CHECK(x->M == y.M && x->M_built == y.built, "chunks %d (%d), twin %d (%d)", x->M, x->M_built, y.M, y.built);
    CHECK(y.grafts > 0 && y.builds > 0, "%s: %d grafts, %d builds", k->opt, y.grafts, y.builds);
    for (int h = 0; h < k->L * k->H; h++) CHECK(kv_view(s, h / k->H, h % k->H)->n <= y.B, "head %d lists more rows", h);
    for (int i = x->full_layers * k->G; i < k->L * k->G && x->M_built; i++) check_tree(s, x, i / k->G, i % k->G);
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

// K-means of the points x (n,2) into K centres, after so many rounds: the same centres and places as the twin's.
static void kmeans_agrees(const float *x, int n, int K, int rounds, int last) {
    float mu[260], sum[260], r[130];
    uint16_t centre[260];
    int tokens[130], of[130], want[130], bad = 0;
    Nodes u = { .n = K, .mu = centre, .r = r, .tokens = tokens, .of = of };
    OWN TwinNode *point = xcalloc(n, sizeof *point), *node = xcalloc(K, sizeof *node);
    for (int i = 0; i < 2 * n; i++) point[i / 2].mu[i % 2] = x[i];
    kmeans(x, n, &u, 2, rounds, mu, sum);
    twin_kmeans(point, n, node, K, 2, rounds, want);
    for (int i = 0; i < n; i++) bad += of[i] != want[i];
    for (int i = 0; i < 2 * K; i++) bad += bf16_to_f32(centre[i]) != node[i / 2].mu[i % 2];
    CHECK(!bad, "%d points, %d centres: %d places or numbers are others", n, K, bad);
    CHECK(of[n - 1] == last, "%d points, %d centres: the last point is in %d", n, K, of[n - 1]);
}

TEST(lychee_kmeans, "k-means where points are equal to many centres: ties go to the lowest, also across blocks of scores and "
                    "where centres are equal when they are rounded; empty clusters keep their centre") {
    // Four points on a circle at 0, 10, 90, 100 degrees, whose two centres end at 5 and 95 degrees.
    static const float near[8] = { 1, 0, 1.002f, 0, 1, 0, 1.003f, 0 };      // both centres round to 1
    float circle[8], equal[260];
    for (int i = 0; i < 8; i++) {
        double a = (i / 4 * 90 + i / 2 % 2 * 10) * M_PI / 180;
        circle[i] = (float)(i % 2 ? sin(a) : cos(a));
    }
    for (int i = 0; i < 260; i++) equal[i] = i % 2 ? 0 : 1;
    kmeans_agrees(circle, 4, 2, 10, 1);
    kmeans_agrees(equal, 4, 3, 10, 0);
    kmeans_agrees(near, 4, 2, 0, 0);
    kmeans_agrees(equal, 130, 130, 2, 0);
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
    int ids[30] = { 1, 2, 3 }, one[] = { 1, 4, 7 }, two[] = { 0, 9, 20 }, stale[] = { 25, 26, 27, 28 };
    static const int group[] = { 1, 4, 7, 27, 28, 29 }, alone[] = { 0, 9, 20, 29 }, all[] = { 0, 1, 2, 3, 4, 5 };
    prefill(s, ids, 30);
    // A list of its own, soon out of use and out of range.
    view_set(s, 0, 1, stale, 4, 29);
    view_set(s, 0, 2, stale, 4, 29);
    // Which heads of the group then read a list of their own: none, the first, the second as well, the one amid the group.
    for (int own = 0; own < 4; own++) {
        if (own % 3 == 0) view_group(s, 0, 0, one, 3, 27);
        if (own) view_set(s, 0, own == 1 ? 0 : 1, two, 3, 29);
        for (int h = 0; h < 3; h++) {
            int is_own = h == 0 ? own == 1 || own == 2 : h == 1 && own >= 2;
            CHECK(is_own ? reads(s, h, 4, alone) : reads(s, h, 6, group), "way %d: head %d", own, h);
        }
        int first = own == 1 || own == 3, second = own >= 2;       // is this head's list another than the one before?
        CHECK(same_as_before(s, 0, 1) == !first && same_as_before(s, 0, 2) == !second, "way %d: equal lists", own);
        CHECK(!kv_view(s, 0, 3)->n, "the other group is untouched");
    }
    view_group(s, 0, 0, one, 3, 27);
    kv_compact(s, 0);
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
    int cur = (N - 1) / 16, want = (int)fmax(3, floor(y->B / 16.0)) - 1, idx[64];
    if (!t->decoding || l < y->full || N <= y->B) return;
    for (int g = 0; g < G; g++) {
        TwinRow *row = t->row[l * G + g];
        double x[64];
        for (int p = 0; p < cur; p++) {
            x[p] = -INFINITY;
            for (int h = g * R; h < g * R + R; h++) {
                double sum = 0;
                for (int d = 0; d < D; d++) {
                    double best = -INFINITY;
                    for (int r = p * 16; r < p * 16 + 16; r++) best = fmax(best, q[(size_t)h * D + d] * row[r].k[d]);
                    sum += best;
                }
                x[p] = fmax(x[p], sum);
            }
        }
        int k = twin_pick(x, cur, want, idx);
        for (int h = g * R; h < g * R + R; h++) {
            char *mask = twin_mask(t, l, h, n);
            for (int i = 0; i < k; i++) memset(mask + idx[i] * 16, 1, 16);
            memset(mask + cur * 16, 1, N - cur * 16);
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
// the lines of twin_visible and runs the twin in double over everything. The program drops rows
// and must agree all the same.

// ---- an adapter made in memory, and written as a file

typedef struct {
    char name[96];
    Tensor x;                   // one row: a vector
    const char *type;           // its name in a file
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

// A tensor of random numbers, on top of those of `from`, if it is not NULL.
static void nexus_add(Nexus *a, const char *name, int rows, int cols, const Tensor *from, double noise, int dtype) {
    static const char *const types[] = { [DT_F32] = "F32", [DT_F16] = "F16", [DT_BF16] = "BF16" };
    Tensor x = tiny_tensor(rows, cols, noise);
    for (int i = 0; i < rows * cols && from; i++) ((float *)x.data)[i] += ((const float *)from->data)[i];
    NexusTensor t = { .x = tiny_as(x, dtype), .type = types[dtype] };
    snprintf(t.name, sizeof t.name, "%s", name);
    arrput(a->t, t);
}

// Adds, or changes.
static void nexus_meta(Nexus *a, const char *key, const char *value) {
    int i = 0;
    while (i < (int)arrlen(a->meta) && strcmp(a->meta[i].key, key)) i++;
    if (i == (int)arrlen(a->meta)) arrput(a->meta, (NexusMeta){ .key = "" });
    snprintf(a->meta[i].key, sizeof a->meta[i].key, "%s", key);
    snprintf(a->meta[i].value, sizeof a->meta[i].value, "%s", value);
}

// The names of what takes the place of a layer's tensors, in their order; the MLP's come last.
enum { NEXUS_MLP = 12 };
static const char *const nexus_part[LAYER_TENSORS] = {
    [2] = "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
    "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
    [NEXUS_MLP] = "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
};

// A random adapter that fits m: the base's weights and `noise` on top.
static Nexus nexus_new(Tiny m, double noise, int dtype, const char *pos, int shared) {
    Nexus a = { .K_max = 8, .T_max = 4 };
    const Config *c = m.c;
    nexus_add(&a, "nexus.embed.base", 1, c->C, NULL, 1, dtype);
    nexus_add(&a, "nexus.embed.pos", a.K_max, c->C, NULL, 1, dtype);
    nexus_add(&a, "nexus.embed.turn", a.T_max, c->C, NULL, .5, dtype);
    for (int l = 0; l < c->L; l++)
        for (int k = 0; k < LAYER_TENSORS; k++) {
            const Tensor *b = layer_tensor(&m.w->layer[l], k);
            if (!b->data || !nexus_part[k] || (shared && k >= NEXUS_MLP)) continue;
            nexus_add(&a, formatted("nexus.layers.%d.%s", l, nexus_part[k]), b->rows, b->cols, b, noise, dtype);
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
    for (int i = 0; i < (int)arrlen(a.t); i++) free((void *)a.t[i].x.data);
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
        int vector = t->x.rows == 1, I64 = !strcmp(t->type, "I64"), dim[] = { t->x.rows, t->x.cols };
        safe_write(&w, t->name, t->type, I64 ? 8 : dtype_size(t->x.dtype), t->x.data, dim + vector, 2 - vector);
    }
    safe_write_end(&w);
    return path;
}

// The tensor of that name; NULL: there is none.
static NexusTensor *nexus_find(const Nexus *a, const char *name) {
    for (int i = 0; i < (int)arrlen(a->t); i++)
        if (!strcmp(a->t[i].name, name)) return &a->t[i];
    return NULL;
}

// The branch as layers for the twin; norms and o bias are the base's.
static Layer *nexus_layers(Nexus a, Tiny m) {
    Layer *y = xmalloc(m.c->L * sizeof *y);
    memcpy(y, m.w->layer, m.c->L * sizeof *y);
    for (int k = 0; k < m.c->L * LAYER_TENSORS; k++) {
        const char *part = nexus_part[k % LAYER_TENSORS];
        NexusTensor *t = part ? nexus_find(&a, formatted("nexus.layers.%d.%s", k / LAYER_TENSORS, part)) : NULL;
        if (t) *layer_tensor(y, k) = t->x;
    }
    return y;
}

// ---- dialogues

// A turn is [sys][foot] user [head] | reply; with --ids all but user and reply are empty.
typedef struct {
    Script s;
    int sys, foot[8], head[8];
} Talk;

// ---- the slow twin

// The sequence as laid out has n tokens: what each is; of a Nexus token its place within its segment, and the turn; and
// whether its message is finished, so that its rows are dropped.
typedef struct {
    Nexus a;
    Tiny m;
    Layer *alt;
    int rule, original, sink, K;
    double ratio;
    Token tok[1024];
    int j[1024], turn[1024], gone[1024], n, n_nexus;
} SlowSonic;

// The mask as a hook of the twin.
static int slow_sees(void *v, Twin *t, int l, int h, int i, int row) {
    SlowSonic *u = v;
    (void)l;
    (void)h;
    return twin_visible(u->rule, u->tok, t->base + i, row);
}

// The input of the Nexus token i: base, place within its segment, and turn.
static void slow_embed(void *v, Twin *t, int i, double *x) {
    SlowSonic *u = v;
    int C = u->m.c->C, turn = min_int(u->turn[i], u->a.T_max - 1);
    (void)t;
    for (int c = 0; c < C; c++)
        x[c] = twin_weight(&u->a.t[0].x, c) + twin_weight(&u->a.t[1].x, u->j[i] * C + c)
             + twin_weight(&u->a.t[2].x, turn * C + c);
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
    int n = 0, text = 0, seg = 0, sys = max_int(p->sys, u->sink), ids[512], next[512];
    t->alt = u->alt;
    t->hook = (TwinHooks){ .u = u, .sees = slow_sees, .embed = slow_embed };
    u->n_nexus = 0;
    for (int turn = 0; turn <= last; turn++) {
        int pre = p->s.pre[turn], dec = turn < last ? p->s.dec[turn] : step + 1;
        int foot_next = turn < last ? p->foot[turn + 1] : 0;
        script_ids(&p->s, turn, u->m.c->V, ids);
        if (turn < last) script_ids(&p->s, turn + 1, u->m.c->V, next);
        for (int part = 0; part < 2; part++) {  // the user's message, then the reply
            int from = part ? pre - p->head[turn] : turn ? p->foot[turn] : 0;
            int to = part ? pre + dec : pre - p->head[turn], body = 0;
            for (int i = from; i < to + (part ? foot_next : 0); i++, text++, n++) {
                u->tok[n] = (Token){ i < to ? ids[i] : next[i - to], u->original ? text : n, text < sys ? -1 : seg, TOK_USER };
                body += u->gone[n] = text >= sys && turn < last;
            }
            int K = body ? slow_K(u, body) : 0;
            for (int j = 0; j < K; j++, n++) {
                u->tok[n] = (Token){ -1, u->original ? text + j : n, seg, TOK_EXTRA };
                u->j[n] = j;
                u->turn[n] = turn;
                u->gone[n] = 0;
            }
            seg += body > 0;
            u->n_nexus += K;
        }
    }
    u->n = n;
    for (int i = 0; i < n; i++) twin_token(t, u->tok[i].id, u->tok[i].pos);
    twin_run(t, n, logits);
    twin_free(t);
}

// Every head holds the sequence as laid out, but for bodies; Nexus rows are those of e_pos in their order (T9).
static void sonic_rows_agree(const SlowSonic *u, const Session *s, const char *what) {
    for (int h = 0; h < s->c->L * s->c->G; h++) {
        const KVHead *kh = &s->head[h];
        int held = 0, bad = 0;
        for (int p = 0; p < u->n; p++) {
            if (u->gone[p]) continue;
            const Token *tok = &s->tok[held < kh->len ? kh->src[held] : 0];
            int nexus = u->tok[p].kind == TOK_EXTRA;
            bad += (tok->kind == TOK_EXTRA) != nexus || (nexus && (-1 - tok->id) % u->a.K_max != u->j[p]);
            held++;
        }
        CHECK(held == kh->len && !bad, "%s: head %d holds %d rows, expected %d; %d are others", what, h, kh->len, held,
              bad);
    }
}

// Plays a dialogue on a session; every row of logits, and the rows that are held, from nothing.
static void sonic_agrees(SlowSonic *u, Session *s, const Talk *p, const char *what) {
    int V = s->c->V;
    OWN double *lo = xmalloc(V * sizeof *lo);
    OWN float *want = xmalloc(V * sizeof *want);
    EACH_PASS(x, &p->s, V) {
        s->n_sys = x.turn ? 0 : p->sys;
        s->n_foot = p->foot[x.turn];
        s->n_head = p->head[x.turn];
        const float *y = run_pass(s, &x);
        slow_sonic(u, p, x.turn, x.step, lo);
        for (int v = 0; v < V; v++) want[v] = (float)lo[v];
        double e = worst(y, want, (size_t)V, 2e-5, 2e-5, NULL);
        CHECK(e <= 1, "%s: turn %d, step %d: %g times the bound", what, x.turn, x.step, e);
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
    // --ids.
    Talk talk[] = { { { 3, { 17, 7, 3 }, { 5, 2, 3 }, 1 } },
                    // A chat.
                    { { 4, { 14, 10, 9, 8 }, { 4, 0, 3, 1 }, 2 }, 6, { 0, 2, 2, 1 }, { 3, 3, 3, 3 } },
                    // Shorter than the sink; more turns than the adapter knows.
                    { { 7, { 1, 1, 5, 2, 1, 1, 2 }, { 1, 2, 0, 2, 1, 1, 1 }, 3 } } };
    for (int i = 0; i < 28; i++) {
        int any = i > 11, rule = i / 2 % 2 ? VIS_SEGMENT_EXACT : VIS_SEGMENT, original = i % 2;
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
        Nexus a = nexus_new(m, .1, DT_F32 + i % 3, original ? "original" : "augmented", i == 7);
        OWN SlowSonic *u = xcalloc(1, sizeof *u);
        *u = (SlowSonic){ .a = a,
                          .m = m,
                          .alt = nexus_layers(a, m),
                          .rule = rule,
                          .original = original,
                          .sink = sink,
                          .K = K,
                          .ratio = any ? -1 : i > 9 ? .6 : i > 8 ? .1 : -1 };
        const char *nexus = any || i == 4 ? formatted("sonic-k=%d", K) : i > 9 ? "ratio=0.6" : i > 8 ? "ratio=0.1" : "";
        const char *opt = formatted("quiet sink=%d %s %s", sink, rule == VIS_SEGMENT ? "" : "paper", nexus);
        OWN_SESSION Session *s = sonic_session(m, a, opt);
        sonic_agrees(u, s, &p, formatted("case %d: %s, %s", i, opt, original ? "original" : "augmented"));
        CHECK(any || ((Sonic *)s->part[0].ms)->warned == (i % 3 == 2), "case %d: a turn past T_max", i);
        free(u->alt);
        nexus_free(a);
    }
}

// What becomes of an adapter before it is refused: a key gets this value ("": it goes), or a tensor becomes one of this type
// and shape (0 rows: it goes), whether it was there or not. kind: SHARED, made with the base's MLP; BIASED, for a base that
// has biases.
enum { SHARED = 1, BIASED };
typedef struct {
    const char *name, *value, *type;
    int rows, cols, kind;
    const char *says;
} Spoilt;

static void nexus_spoil(Nexus *a, const Spoilt *x) {
    if (x->value) nexus_meta(a, x->name, x->value);
    for (int k = 0; x->value && !*x->value && k < (int)arrlen(a->meta); k++)
        if (!strcmp(a->meta[k].key, x->name)) arrdel(a->meta, k);
    if (!x->type) return;
    NexusTensor *t = nexus_find(a, x->name);
    if (t) {
        free((void *)t->x.data);
        arrdel(a->t, t - a->t);
    }
    if (!x->rows) return;
    int wide = !strcmp(x->type, "I64");                     // two f32 each
    nexus_add(a, x->name, x->rows, x->cols << wide, NULL, 1, strcmp(x->type, "F16") ? DT_F32 : DT_F16);
    arrlast(a->t).x.cols = x->cols;
    arrlast(a->t).type = x->type;
}

TEST(sonic_refusals,
     "every check of an adapter has its message, with name, expected and found value") {
    static const Spoilt cases[] = {
        { .says = NULL },
        { "format", "gguf", .says = "metadata format is gguf, expected sonic-nexus" },
        { "version", "2", .says = "metadata version is 2" },
        { "nexus.layers.1.mlp.up_proj.weight", NULL, "F32", 41, 32, 0,
          "nexus.layers.1.mlp.up_proj.weight: found shape (41,32), expected (40,32) (adapter made for another model?)" },
        { "nexus.layers.0.self_attn.k_proj.weight", NULL, "", .says = "nexus.layers.0.self_attn.k_proj.weight is missing" },
        { "nexus.layers.0.q_norm", NULL, "F32", 1, 16, 0, "unexpected tensor nexus.layers.0.q_norm" },
        { "nexus.embed.base", NULL, "I64", 1, 32, 0, "nexus.embed.base is I64, expected F32, F16 or BF16" },
        { "nexus.embed.turn", NULL, "F16", 4, 32, 0, "nexus.embed.turn is F16, but nexus.embed.base is F32" },
        { "k_max", "9", .says = "nexus.embed.pos: found shape (8,32), expected (9,32)" },
        { "t_max", "5", .says = "nexus.embed.turn: found shape (4,32), expected (5,32)" },
        { "position_mode", "compact", .says = "position_mode is compact, expected augmented or original" },
        { "base_fingerprint", "0123456789abcdef", .says = "base_fingerprint is 0123456789abcdef, base has" },
        { "body", "content", .says = "metadata body is content" },
        { "mlp", "none", .says = "metadata mlp is none" },
        { "k_max", "x8", .says = "k_max is x8, expected a number" },
        { "k_default", "9", .says = "k_default is 9, but k_max is 8" },
        { "nexus.embed.base", NULL, "F32", 4, 8, 0, "nexus.embed.base: found shape (4,8), expected (32)" },
        { "mlp", "dedicated", .kind = SHARED, .says = "nexus.layers.0.mlp.gate_proj.weight is missing" },
        { "mlp", "shared", .says = "unexpected tensor nexus.layers.0.mlp.down_proj.weight" },
        { "t_max", "", .says = "metadata t_max is missing" },
        { .kind = BIASED, .says = "nexus.layers.0.self_attn.q_proj.bias is missing" },
    };
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 40, 61, 8);
    OWN_MODEL Tiny biased = tiny_model(2, 4, 2, 16, 32, 40, 61, 8);
    tiny_give(biased, BIASES);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Nexus a = nexus_new(m, .1, DT_F32, "augmented", cases[i].kind == SHARED);
        Tiny base = cases[i].kind == BIASED ? biased : m;
        char err[512] = "";
        nexus_spoil(&a, &cases[i]);
        OWN_OPTIONS Options *o = options_of(formatted("sonic-weights=%s", nexus_write(a)));
        Session *s = session_try(base.c, base.w, o, "sonic", err);
        CHECK(cases[i].says ? !s && strstr(err, cases[i].says) : s != NULL, "case %zu: '%s', expected '%s'", i, err, cases[i].says);
        session_close(s);
        nexus_free(a);
    }

    // Too long a dialogue.
    Nexus a = nexus_new(m, .1, DT_F32, "original", 0);
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
    const char *text = "sonic-weights=none quiet";
    OWN_SESSION Session *s = session_of(m, "sonic", text), *other = session_of(m, "sonic", text);
    const Sonic *x = s->part[0].ms, *y = other->part[0].ms;
    size_t n = (size_t)(1 + 64 + 32) * 32;
    CHECK(x->K == 16 && x->K_max == 64 && x->T_max == 32 && !memcmp(x->embed, y->embed, n * 4),
          "another draw");
    CHECK(!memcmp(s->alt, m.w->layer, 2 * sizeof(Layer)), "the base's matrices");
    double square = 0, mean = 0, table = 0;
    for (int i = 0; i < 64 * 32; i++) square += x->embed[32 + i] * x->embed[32 + i];
    for (int i = 0; i < 61 * 32; i++) table += pow(((const float *)m.w->embed.data)[i], 2);
    for (int r = 0; r < 61; r++) mean += ((const float *)m.w->embed.data)[r * 32 + 7] / 61;
    CHECK(fabs(sqrt(square / 2048) / sqrt(table / (61 * 32)) - 1) < .05, "size of e_pos");
    CHECK(fabs(mean - x->embed[7]) < 1e-6, "e_base is the mean");
    Script p = { 3, { 30, 9, 8 }, { 6, 5, 4 }, 4 };
    free(run_session(s, &p));
    CHECK(kv_head(s, 0, 0)->len == 4 + 16 + 6 + 9 + 5 + 12, "rows %d", kv_head(s, 0, 0)->len);
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
    static const struct {
        const char *text, *key, *refusal;       // words of it; NULL: the scores are 1, 2, 3, 4
    } file[] = {
        { "{\"1-1\": 4, \"0-1\": 2, \"0-0\": [0.5, 1.5], \"1-0\": [3]}", "inf" },
        { "{\"average_precisions_weighted\": {\"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 4}}",
          "dili" },
        { "{\"inf\": {}, \"dili\": {\"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 4}, \"lazy\": {}}",
          "dili" },
        { "{\"filter_condition\": \"x\", \"average_infscores_weighted\": {}, "
          "\"average_precisions_weighted\": {}, \"average_recalls_weighted\": {\"0-0\": 1, "
          "\"0-1\": 2, \"1-0\": 3, \"1-1\": 4}}",
          "lazy" },
        { "{\"0-0\": 1, \"0-1\": 2, \"1-0\": 3}", "inf", "1-1" },
        { "{\"0-0\": 1, \"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 3}", "inf", "twice" },
        { "{\"0-0\": 1, \"0-1\": 2, \"1-0\": 3, \"1-1\": 3, \"2-0\": 1}", "inf", "2-0" },
        { "{\"0-2\": 1}", "inf", "0-2" }, { "{\"0-0\": -1}", "inf", "0-0" }, { "{\"0-0\": []}", "inf", "0-0" },
        { "{\"0-0\": [1, \"2\"]}", "inf", "0-0" }, { "{\"0-0\": {\"1-1\": 1}, \"0-1\": {}}", "inf", "0-0" },
        { "{\"a\": {}, \"b\": {}}", "inf", "layer-head" }, { "{\"0--1\": 1}", "inf", "0--1" },
        { "{\"-1-0\": 1}", "inf", "-1-0" }, { "{\"0-0x\": 1}", "inf", "0-0x" },
        { "{\"00000000000000000-0\": 1}", "inf", "000" }, { "[1]", "inf", "layer-head" },
        { "{", "inf", "end of the text" }, { "", "inf", "byte 0" },
    };
    for (size_t i = 0; i < sizeof file / sizeof *file; i++) {
        char err[512] = "";
        OWN char *path = temp_text(file[i].text);
        OWN double *x = scores_read(path, file[i].key, 2, 2, err);
        int good = x && x[0] == 1 && x[1] == 2 && x[2] == 3 && x[3] == 4;
        CHECK(file[i].refusal ? !x && strstr(err, file[i].refusal) : good, "%s: %s", file[i].text, err);
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
    static const struct {
        const char *text;
        int most, n, at, is, last;
    } lists[] = { { "2:98:3", 100, 33, 0, 2, 98 }, { "5,0,5,10:12:1", 100, 5, 1, 0, 12 },       // a mix, each once
                  { "0:200000:2,0:200000:1", 200000, 200001, 100001, 1, 199999 }, { "0:3:3", 3, 2, 1, 3, 3 } };
    double t = now();
    for (int i = 0; i < 4; i++) {
        int *x = number_list("n", lists[i].text, 0, lists[i].most);
        CHECK(arrlen(x) == lists[i].n && x[lists[i].at] == lists[i].is && arrlast(x) == lists[i].last, "%s: %d numbers",
              lists[i].text, (int)arrlen(x));
        arrfree(x);
    }
    CHECK(now() - t < 2, "a list of 200,001 numbers takes %g s", now() - t);
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
        twin_probs(t, l, h - l * H, n - 1, q, p);
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

typedef struct {
    Tiny m;
    const Tokenizer *t;
    const Options *o;
} Calibrated;

static void calibrate_apart(long what) {
    const Calibrated *x = (const Calibrated *)what;
    _exit(calibrate(x->m.c, x->m.w, x->t, NULL, x->o));
}

// --calibrate with these options, in a process of its own (what it holds when it dies is no leak then), ends with this
// exit code and these words.
static void calibrate_says(Tiny m, const Tokenizer *t, const char *text, int code, const char *words) {
    OWN_OPTIONS Options *o = options_of(text);
    Calibrated x = { m, t, o };
    char said[1024];
    int got = in_a_process(calibrate_apart, (long)&x, said, sizeof said);
    CHECK(got == code && strstr(said, words), "%s: exit %d: %s", text, got, said);
}

// ---- HeadKV: the pool rule, options, and scores

TEST(headkv_scores, "R and R2 of one answer by hand; a step past |N| counts for R alone") {
    int idx[64];
    HeadScores x = { .top = 0 };
    // N: keys 2 to 5, c2: 4 and 5.
    Calibration r = { .at = 2, .n = 4, .right = 4 };
    // The four largest: 0, 4, 2, 6.
    float a[8] = { .3f, .02f, .2f, .01f, .25f, .02f, .1f, .1f };
    head_look(&r, &x, a, 8, idx);
    CHECK(x.top == 0 && fabs(x.mass - .25) < 1e-6, "top %d, mass %g", x.top, x.mass);
    head_said(&r, &x, 0, 1);
    CHECK(x.score[SCORE_R] == 0 && fabs(x.score[SCORE_R2] - .25) < 1e-6,
          "the largest lies outside the needle: R %g, R2 %g", x.score[SCORE_R], x.score[SCORE_R2]);
    a[4] = .4f;
    head_look(&r, &x, a, 8, idx);
    CHECK(x.top == 4, "top %d", x.top);
    head_said(&r, &x, 1, 0);
    CHECK(x.score[SCORE_R] == 0, "another token was said: R %g", x.score[SCORE_R]);
    head_said(&r, &x, 2, 1);
    CHECK(fabs(x.score[SCORE_R] - .25) < 1e-9 && fabs(x.score[SCORE_R2] - 1.05) < 1e-6, "R %g, R2 %g",
          x.score[SCORE_R], x.score[SCORE_R2]);
    head_said(&r, &x, 4, 1);
    CHECK(fabs(x.score[SCORE_R] - .5) < 1e-9 && fabs(x.score[SCORE_R2] - 1.05) < 1e-6,
          "step 4 of 4: R %g, R2 %g", x.score[SCORE_R], x.score[SCORE_R2]);
}

// The prompt of a run: the needle stands at its depth, behind the end of a sentence; with reasoning the wrong answer and
// the reasoning stand before it.
static void check_prompt(const Calibration *r, const Json *needle, int depth, int reasoning, const int *ids) {
    int n = (int)arrlen(ids), place = (r->length - 200 - r->n) * depth / 100;
    char want[2048];
    OWN char *text = xcalloc(n + 1, 1);
    for (int i = 0; i < n; i++) text[i] = (char)ids[i];
    while (place > 0 && r->hay[place - 1] != '.') place--;
    snprintf(want, sizeof want, reasoning ? " %s %s %s" : "%.0s%.0s %s", json_text(needle, "reasoning"),
             json_text(needle, "distractor"), json_text(needle, "needle"));
    CHECK(r->n == (int)strlen(want) && r->at == place && !strncmp(text + r->at, want, (size_t)r->n),
          "depth %d: at %d, expected %d: \"%.300s\"", depth, r->at, place, text + r->at);
    CHECK(!strncmp(text + r->right + 1, json_text(needle, "needle"), strlen(json_text(needle, "needle"))),
          "the right answer");
    CHECK(strstr(text, json_text(needle, "question")) && !strcmp(text + n - 7, "Answer:"), "the question");
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
    OWN_SESSION Session *s = session_of(m, "full", "quiet");
    OWN char *out = temp_text("");
    char err[512];
    int *hay = hay_ids(t, "", 700), *few = hay_ids(t, "", 300);
    double sum[5][8] = { { 0 } }, some = 0;
    HeadScores heads[8] = { 0 };
    CHECK(arrlen(few) >= 300 && !memcmp(few, hay, arrlen(few) * sizeof(int)), "hay depends on its length");
    // Our own needles, in the frame of a model without a template.
    Calibration r = { .t = t, .s = s, .length = LENGTH, .frame = frame_make(NULL), .needles = needles_load(""),
                      .hay = hay_ids(t, "", LENGTH), .head = heads };
    *(Calibration **)observe(s, &head_probe) = &r;

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
            for (int h = 0; h < 8 && (k == SCORE_R2) == second; h++) r.head[h].sum[k] += r.head[h].score[k];
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
    json_free(r.needles);
    arrfree(r.hay);
    free(r.frame);
    OWN double *file = scores_read(out, "r", 2, 4, err), *none = scores_read(out, "r2", 2, 4, err);
    CHECK(file && !none && strstr(err, "r2"), "%s", err);
    OWN char *half = temp_text("[{\"question\": \"What?\", \"needle\": \"That is so.\", \"answer\": 3}]");
    unlink(out);
    calibrate_says(m, t, formatted("calibrate=%s calibrate-needles=%s quiet", out, half), EXIT_USAGE, "--calibrate-needles");
    m.c->max_pos = LENGTH;                          // what all runs are long then; a random model does not answer
    calibrate_says(m, t, formatted("calibrate=%s quiet", out), EXIT_RUN, "--calibrate-needles");
    CHECK(!file_exists(out), "a file is left");
    calibrate_says(m, NULL, "calibrate=no/such/folder/x.json", EXIT_USAGE, "tokenizer");
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
    OWN char *text = read_bounded("test/device.h", MOST_TEXT, &n, why);
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
