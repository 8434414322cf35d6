// test/table.h - every method of the table of methods x every property that holds for all. A method says of itself
// what can be asked of it (its role, whether it evicts, its budget, its options): a new one is tested here without a
// line. tests.c includes this file; what is a method's own is tested there.
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
#ifndef TEST_TABLE_H
#define TEST_TABLE_H
#include "twin.h"

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
        CHECK(h->cap % KV_STEP == 0 && h->cap < h->len - h->packed + KV_STEP, "%s %s: room for %d rows, %d held", spec,
              more, h->cap, h->len - h->packed);
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
#endif
