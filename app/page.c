// app/page.c - what was measured and traced, as the JSON that data/page.html draws, and what a browser calls.
#define _GNU_SOURCE
#include "page.h"
#include <stdlib.h>
#include "page_html.h"                  // page_html: the text of data/page.html, from the Makefile

// ==================================================================================================== PAGE
// data/page.html draws everything, in JavaScript, and there are two ways to get it. `--report OUT.html`
// writes it with measured JSON inside: the rows of an evaluation, and a dialogue that was played through
// several methods. `make web` writes it with this program and the shipped model inside; a Web Worker of
// the page then calls the functions marked WEB. Both are handed the same JSON, made here:
//
//     shape      the model's numbers, the methods, the scripted dialogue, the scores of heads
//     state      of a side: facts (bytes, speed), tokens, and masks that say which heads hold and read each
//     trace      the newest tensor of every name that --trace writes, for the pictures of the papers
//     lines      what LoopServe's prefill of a dialogue's first tokens traced, queries and keys with it
//
// A page reads nothing but itself. What comes from a prompt or a model is text: in the JSON "<" is written
// \u003c, so that no script element can end in it, and the page makes text nodes of it.

enum {
    SIDES     = 5,              // of a page in a browser ..
    FOLLOWER  = SIDES - 1,      // .. of which the last one follows another, for the pictures
    BUDGET    = 64,             // rows a KV head when the user gives no budget: the dialogue is short
    MAP_TOKENS    = 512,        // tokens of an attention map in a browser, at most ..
    REPORT_TOKENS = 192,        // .. and in a report, which holds the queries and keys of all its layers
    REPORT_LAYERS = 6,          // about
};

// The newest tensor of every name, as JSON (malloc'd); trace comes first, so that a Trace is a Latest.
typedef struct {
    struct Trace trace;
    struct { char *key, *value; } *tensor;      // stb_ds string map
    int prefills;               // 1: the queries and keys of prefills, too
} Latest;

// A session with its own record of the dialogue, which a page shows.
typedef struct {
    Side side;                  // side.app.s NULL: it is not open
    Decoder reply;              // the text of the reply that is made
    Decoder all;                // the text of all tokens
    double read;                // bytes of rows that the last step read
    Latest *latest;             // what was traced; NULL: nothing
} Shown;

// Option values that show a method at work on a dialogue this short. Options that the user gives win.
static const char *short_values[][2] = {
    { "lychee-buffer", "32" },
    { "lychee-kg", "2" },
    { "loopserve-min-context", "0" },
    { "loopserve-local", "8" },
    { "loopserve-alpha", "0.9" },
    { "loopserve-first", "4" },
    { "loopserve-interval", "4" },
    { "loopserve-obs", "16" },
    { "pats-window", "32" },
    { "sink", "4" },
    { "full-layers", "1" },
};
enum { SHORT_VALUES = sizeof short_values / sizeof *short_values };

static const char *page_methods = "streaming,snapkv,h2o,dililazy,sonic,loopserve,lychee,pats";

// ---- numbers as JSON

// n bytes in base64, in quotes: three bytes as four digits, '=' where bytes are missing at the end.
static void json_base64(FILE *f, const void *bytes, size_t n) {
    static const char *digit = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *p = bytes;
    putc('"', f);
    for (size_t i = 0; i < n; i += 3) {
        unsigned second = i + 1 < n ? p[i + 1] : 0, third = i + 2 < n ? p[i + 2] : 0;
        unsigned u = (unsigned)p[i] << 16 | second << 8 | third;
        putc(digit[u >> 18], f);
        putc(digit[u >> 12 & 63], f);
        putc(i + 1 < n ? digit[u >> 6 & 63] : '=', f);
        putc(i + 2 < n ? digit[u & 63] : '=', f);
    }
    putc('"', f);
}

// ---- shape: the model, its methods, the scripted dialogue, the scores of heads

// The file of head scores as it is, or null.
static void write_scores(const App *a, FILE *f) {
    char path[1100], err[512];
    size_t n;
    method_file(method_find("dililazy", 8), a->c, a->o, path);
    char *text = read_bounded(path, (size_t)16 << 20, &n, err);
    Json *j = text ? json_parse(text, n, err) : NULL;
    if (j) fwrite(text, 1, n, f);
    else fputs("null", f);
    json_free(j);
    free(text);
}

// The JSON of the model's numbers and of what can be chosen.
static void write_shape(const App *a, FILE *f) {
    const Config *c = a->c;
    json_print(f, "{'L':%d,'H':%d,'G':%d,'D':%d,", c->L, c->H, c->G, c->D);
    json_print(f, "'model':%s,'version':%s,'methods':[", c->dir, KVCOMP_VERSION);
    EACH_METHOD(m) {
        if (m > methods) fputc(',', f);
        json_print(f, "{'name':%s,'keeps':%s}", (*m)->name, (*m)->keeps);
    }
    fputs("],\"script\":[", f);
    for (int i = 0; i < N_DEMO_LINES; i++) json_print(f, i ? ",%s" : "%s", demo_lines[i].user);
    fputs("],\"values\":[", f);
    for (int i = 0; i < SHORT_VALUES; i++)
        fprintf(f, "%s\"%s=%s\"", i ? "," : "", short_values[i][0], short_values[i][1]);
    fputs("],\"scores\":", f);
    write_scores(a, f);
    fputs("}", f);
}

// ---- the state of a side

// The bytes of the rows that a session holds, without the room that is taken ahead (kv_bytes counts
// it), and those that full attention would hold, f16 where this session's format compresses.
static size_t rows_bytes(const Session *s) {
    size_t n = 0, row = s->fk->row_bytes(s->c->D) + s->fv->row_bytes(s->c->D);
    for (int i = 0; i < s->c->L * s->c->G; i++) {
        const KVHead *h = &s->head[i];
        n += 2 * h->pk_bytes + (size_t)(h->len - h->packed) * row;
    }
    return n;
}

// The same of full attention.
static size_t rows_bytes_full(const Session *s) {
    size_t row = full_format(s, 0)->row_bytes(s->c->D) + full_format(s, 1)->row_bytes(s->c->D);
    return (size_t)s->c->L * s->c->G * (size_t)tokens_said(s) * row;
}

// Bytes, rows and speed, and the values of the method's options.
static void write_facts(const Shown *x, FILE *f) {
    static const char *const shared[] = { "sink", "full-layers", "paper" };     // options of several methods
    const App *a = &x->side.app;
    const Session *s = a->s;
    char words[160];
    rows_in_words(s, words);
    json_print(f, "{'method':%s,'label':%s,'rows_in_words':%s,", a->method, x->side.label, words);
    json_numbers(a, f);
    fputs("\"options\":{", f);
    for (int i = 0; i < s->n_part; i++)
        for (const Opt *o = s->part[i].m->opts; o && o->name; o++)
            json_print(f, "%s:%s,", o->name, opt_str(a->o, o->name));
    for (int i = 0; i < 3; i++) json_print(f, "%s:%s,", shared[i], opt_str(a->o, shared[i]));
    json_print(f, "'budget':'%d'},'rows_bytes':%zu,'rows_full':%zu,", s->budget, rows_bytes(s), rows_bytes_full(s));
    int made = arrlen(a->turn) ? (int)arrlen(arrlast(a->turn).dec) : 0;
    json_print(f, "'read':%.0f,'tokens':%d,'turns':%d,'made':%d,", x->read, s->n_tok, s->turn, made);
    json_print(f, "'budgeted':%d}", uses_budget(s));
}

// The tokens from number `from` on, which is 0 or the end of what the last call gave: [text, TOK_*,
// segment].
static void write_tokens(Shown *x, int from, FILE *f) {
    const Session *s = x->side.app.s;
    char *text = NULL;
    if (!from) x->all = (Decoder){ .t = x->side.app.tok };
    fputc('[', f);
    for (int t = from; t < s->n_tok; t++) {
        if (s->tok[t].id >= 0) text = decode_token(&x->all, s->tok[t].id, text);
        if (t > from) fputc(',', f);
        fputc('[', f);
        json_escape(f, text ? text : "", arrlenu(text));
        fprintf(f, ",%d,%d]", s->tok[t].kind, s->tok[t].seg);
        arrsetlen(text, 0);
    }
    fputc(']', f);
    arrfree(text);
}

// For each of the n_tok tokens, in (L*G + L*H + 7) / 8 bytes: bit l*G + g says that this KV head holds
// a row of it, bit L*G + l*H + h that this query head read one in the last step. (stb_ds)
static unsigned char *masks_of(const Session *s) {
    int L = s->c->L, H = s->c->H, G = s->c->G, wide = (L * G + L * H + 7) / 8;
    unsigned char *mask = NULL;
    int *rows = xmalloc(((size_t)s->n_tok + 1) * sizeof *rows);
    arrsetlen(mask, (size_t)s->n_tok * wide + 1);
    memset(mask, 0, arrlenu(mask));
    for (int l = 0; l < L; l++)
        for (int h = 0; h < H; h++) {
            const KVHead *head = kv_head(s, l, h * G / H);
            int kept = l * G + h * G / H, read = L * G + l * H + h, n = view_rows(s, l, h, rows);
            for (int r = 0; r < head->len; r++)
                mask[(size_t)head->src[r] * wide + kept / 8] |= (unsigned char)(1 << kept % 8);
            for (int r = 0; r < n; r++)
                mask[(size_t)head->src[rows[r]] * wide + read / 8] |= (unsigned char)(1 << read % 8);
        }
    free(rows);
    return mask;
}

// The state of a side: its facts, its tokens from number `from` on, and the masks of all of them.
static void write_state(Shown *x, int from, FILE *f) {
    json_print(f, "{'from':%d,'facts':", from);
    write_facts(x, f);
    fputs(",\"tokens\":", f);
    write_tokens(x, from, f);
    unsigned char *mask = masks_of(x->side.app.s);
    fputs(",\"mask\":", f);
    json_base64(f, mask, arrlenu(mask) - 1);
    fputc('}', f);
    arrfree(mask);
}

// ---- traces

// Does a picture look at the tensor of this name?
static int looked_at(const Latest *a, const char *name) {
    static const char *parts[] = { "lychee.", "loopserve.", "dililazy.budgets", "pats.bits", "head00.pats.regions",
                                   "head00.pats.packed_k" };
    size_t n = strlen(name);
    if (n > 2 && (!strcmp(name + n - 2, ".q") || (a->prefills && !strcmp(name + n - 2, ".k")))) return 1;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(name, parts[i])) return 1;
    return 0;
}

// Trace.put: keeps the tensor's type, shape and bytes in place of those that had this name.
static void latest_put(struct Trace *trace, const char *name, const char *type, size_t size, const void *x,
                       const int *dim, int dims) {
    Latest *a = (Latest *)trace;
    char *text = NULL;
    size_t n;
    if (!looked_at(a, name)) return;
    FILE *f = memory_stream(&text, &n);
    json_print(f, "{'type':%s,'shape':[", type);
    for (int d = 0; d < dims; d++) {
        fprintf(f, d ? ",%d" : "%d", dim[d]);
        size *= (size_t)dim[d];
    }
    fputs("],\"x\":", f);
    json_base64(f, x, dims == 3 && dim[0] > 1 && !a->prefills ? 0 : size);
    fputc('}', f);
    memory_stream_close(f);
    free(shget(a->tensor, name));
    shput(a->tensor, name, text);
}

// From now on the passes of s are traced, in every step-th layer.
static Latest *latest_open(Session *s, int step) {
    Latest *a = xcalloc(1, sizeof *a);
    sh_new_strdup(a->tensor);
    a->trace.put = latest_put;
    a->trace.layer = xcalloc((size_t)s->c->L, 1);
    for (int l = 0; l < s->c->L; l++) a->trace.layer[l] = (s->c->L - 1 - l) % step == 0;
    trace_session(s, &a->trace);
    return a;
}

// Frees what was kept of the tensors.
static void latest_close(Latest *a) {
    if (!a) return;
    for (int i = 0; i < (int)shlen(a->tensor); i++) free(a->tensor[i].value);
    shfree(a->tensor);
    free(a->trace.layer);
    free(a);
}

// The newest tensors as an object.
static void write_trace(const Latest *a, FILE *f) {
    fputc('{', f);
    for (int i = 0; a && i < (int)shlen(a->tensor); i++)
        fprintf(f, "%s\"%s\":%s", i ? "," : "", a->tensor[i].key, a->tensor[i].value);
    fputc('}', f);
}

// ---- lines: LoopServe's prefill

// Every how many layers a report has a trace of one: all of a small model.
static int report_step(const Config *c) { return (c->L + REPORT_LAYERS - 1) / REPORT_LAYERS; }

// The first tokens of a record, at most `most`, in one prefill of LoopServe: what it traced in every step-th layer,
// from which a page makes the attention of whole heads, too.
static void write_lines(const App *a, const Turn *turns, const Options *o, int most, int step, FILE *f) {
    char err[512];
    int *ids = record_ids(turns), n = min_int((int)arrlen(ids), most);
    Session *s = n ? session_try(a->c, a->w, o, "loopserve", err) : NULL;
    Latest *latest = s ? latest_open(s, step) : NULL;
    if (s) {
        latest->prefills = 1;
        prefill(s, ids, n);
    }
    json_print(f, "{'tokens':%d,'trace':", s ? n : 0);
    write_trace(latest, f);
    fputs("}", f);
    session_close(s);
    latest_close(latest);
    arrfree(ids);
}

// ---- a dialogue through a side

// Closes a session that may not be open; the struct is then as new.
static void shown_close(Shown *x) {
    if (x->side.app.o) side_close(&x->side);
    latest_close(x->latest);
    *x = (Shown){ 0 };
}

// A new reply begins.
static void reply_begin(Shown *x) {
    x->read = 0;
    x->reply = (Decoder){ .t = x->side.app.tok, .skip_special = 1 };
}

// Feeds a message. 0, or -1: it does not fit, and a line on stderr says why.
static int shown_say(Shown *x, const char *text) {
    char err[512] = "";
    if (message_feed(&x->side.app, text, err)) {
        if (*err) warn("%s", err);
        return -1;
    }
    reply_begin(x);
    return 0;
}

// Decodes the next id of the reply.
static void shown_decode(Shown *x, int id) {
    App *a = &x->side.app;
    double before = a->s->clk.bytes_attended;
    arrput(arrlast(a->turn).dec, id);
    decode(a->s, id);
    x->read = a->s->clk.bytes_attended - before;
}

// One step of a reply of at most n tokens, as generate does it: appends what came to *text (stb_ds) and
// says whether the reply goes on.
static int shown_step(Shown *x, int n, char **text) {
    App *a = &x->side.app;
    int id = arrlen(arrlast(a->turn).dec) < n ? reply_next(a) : -1;
    *text = id < 0 ? decode_flush(&x->reply, *text) : decode_token(&x->reply, id, *text);
    if (id < 0) return 0;
    shown_decode(x, id);
    return 1;
}

// Do the turns `now` go on where `had` ends? Then they begin with the same ids, in which a template's marks say where
// a turn begins.
static int goes_on(const Turn *had, const Turn *now) {
    int *before = record_ids(had), *after = record_ids(now), same = arrlen(before) <= arrlen(after);
    for (int i = 0; i < (int)arrlen(before) && same; i++) same = before[i] == after[i];
    arrfree(before);
    arrfree(after);
    return same && arrlen(had) <= arrlen(now);
}

// The side is fed the turns `now`, as far as it does not know them: "" in err, or why it cannot be.
static void shown_follow(Shown *x, const Turn *now, char err[512]) {
    App *a = &x->side.app;
    *err = 0;
    if (!goes_on(a->turn, now) && chat_clear(a)) snprintf(err, 512, "the dialogue cannot be begun anew");
    for (int k = max_int((int)arrlen(a->turn) - 1, 0); k < (int)arrlen(now) && !*err; k++) {
        if (k == (int)arrlen(a->turn)) {
            if (make_room(a, (int)arrlen(now[k].pre), a->s->pos_extra, err)) return;
            arrput(a->turn, turn_copy(&now[k], 0));
            feed_prefill(a, &a->turn[k]);
            reply_begin(x);
        }
        for (int j = (int)arrlen(a->turn[k].dec); j < (int)arrlen(now[k].dec); j++) {
            if (make_room(a, 1, 0, err)) return;
            shown_decode(x, now[k].dec[j]);
        }
    }
}

// ==================================================================================================== REPORT
// A report's dialogue is that of --demo. Full attention speaks first. Every other method is fed its words
// up to the answer to the last question, where its state is written down, and goes on by itself.

// The right answer to the last question.
#define LAST_ANSWER (demo_lines[N_DEMO_LINES - 1].answer)

// ---- what was measured
// The rows as --eval --json prints them, each with its answers to needles: [tokens of the text, depth in per cent,
// score].
static void write_rows(FILE *f, const EvalRun *run) {
    fputs("[", f);
    for (int i = 0; i < (int)arrlen(run->rows); i++) {
        Field *c = row_fields(&run->rows[i], run);
        const Json **x = run->rows[i].answer;
        fputs(i ? ",{\"row\":" : "{\"row\":", f);
        print_json_row(c, run->a, f);
        fputs(",\"needles\":[", f);
        for (int k = 0, n = 0; k < (int)arrlen(x); k++)
            if (json_num(x[k], "depth") >= 0)
                fprintf(f, "%s[%.0f,%.0f,%.6g]", n++ ? "," : "", json_num(x[k], "length"), json_num(x[k], "depth"),
                        json_num(x[k], "score"));
        fputs("]}", f);
        arrfree(c);
    }
    fputs("],", f);
}

// ---- the demonstration

// The options of the demonstration: the user's, with short_values and a budget where nothing is given, greedy.
static Options *report_options(const App *a) {
    Options *o = options_copy(a->o);
    char err[256], budget[160] = "";
    const char *budgets = opt_str(a->o, *opt_str(a->o, "budgets") ? "budgets" : "budget");
    for (int i = 0; i < SHORT_VALUES; i++)
        if (!opt_given(o, short_values[i][0])) options_set(o, short_values[i][0], short_values[i][1], err);
    next_word(&budgets, ",", budget, sizeof budget);
    if (atoi(budget) <= 0) snprintf(budget, sizeof budget, "%d", BUDGET);
    if (!opt_given(o, "ratio")) options_set(o, "budget", budget, err);
    options_set(o, "temp", "0", err);
    options_set(o, "device", "cpu", err);       // pictures look into the memory of a session
    return o;
}

// Goes on with a reply for at most 32 tokens.
static void speak(Shown *x) {
    char *text = NULL;
    int most = 32 + (int)arrlen(arrlast(x->side.app.turn).dec);
    while (shown_step(x, most, &text));
    arrfree(text);
}

// Full attention's dialogue as far as the answer to the last question, which is the script (stb_ds); NULL: a message
// does not fit.
static Turn *script_of(Shown *x) {
    for (int i = 0; i < N_DEMO_LINES; i++) {
        if (shown_say(x, demo_lines[i].user)) return NULL;
        speak(x);
    }
    Turn *script = turns_copy(x->side.app.turn), *last = &arrlast(script);
    for (int i = 0, n; i < (int)arrlen(last->dec); i++) {       // it ends before the token that begins the answer
        const char *text = tokenizer_bytes(x->side.app.tok, last->dec[i], &n);
        if (memchr(text, *LAST_ANSWER, (size_t)n)) arrsetlen(last->dec, i);
    }
    return script;
}

// Plays the dialogue through one method; the first one, full attention, makes the script. A method that does not fit
// has only its reason.
static void play_run(const App *a, const Options *o, const char *method, Turn **script, FILE *f) {
    Shown x = { 0 };
    side_open(&x.side, a, o, method);
    Session *s = x.side.app.s;
    char *err = x.side.refused;
    if (s) x.latest = latest_open(s, report_step(a->c));
    if (s && !*script && !(*script = script_of(&x))) snprintf(err, 512, "the dialogue does not fit");
    else if (s) shown_follow(&x, *script, err);
    json_print(f, "{'method':%s,", method);
    if (*err) {
        json_print(f, "'why':%s}", err);
        if (!quiet) warn("%s is left out of the demonstration: %s", method, err);
    } else {
        fputs("\"state\":", f);
        write_state(&x, 0, f);
        fputs(",\"trace\":", f);
        write_trace(x.latest, f);
        speak(&x);
        char *said = reply_text(&x.side.app, &arrlast(x.side.app.turn));
        json_print(f, ",'said':%s,'right':%d}", said, strstr(said, LAST_ANSWER) != NULL);
        free(said);
    }
    shown_close(&x);
}

// ---- the whole page

// Writes data/page.html with the JSON at its place, and nothing where a program would be.
static void page_write(FILE *f, const char *json) {
    for (const char *p = page_html, *end; *p; p = end) {
        end = strchr(p, '\n') + 1;
        if (strncmp(p, "@@", 2)) fwrite(p, 1, (size_t)(end - p), f);
        else if (!strncmp(p, "@@REPORT", 8))
            for (const char *c = json; *c; c++) {
                if (*c == '<') fputs("\\u003c", f);
                else fputc(*c, f);
            }
    }
}

// Writes the page of an evaluation, which may have no rows. Ends the program when writing fails.
void report_write(App *a, const EvalRun *run) {
    const char *path = opt_str(a->o, "report"), *list = page_methods;
    char err[512], name[160], *json = NULL;
    size_t n;
    Saving out;
    if (save_begin_open(&out, path, err)) die(EXIT_RUN, "--report %s", err);
    if (*opt_str(a->o, "compare")) list = opt_str(a->o, "compare");
    else if (opt_given(a->o, "method")) list = opt_str(a->o, "method");
    Options *o = report_options(a);
    Turn *script = NULL;
    FILE *f = memory_stream(&json, &n);
    json_print(f, "{'command':[");
    for (int i = 0; i < arg_count; i++) json_print(f, i ? ",%s" : "%s", args[i]);
    fputs("],\"rows\":", f);
    write_rows(f, run);

    // Full attention and the methods asked for, or some of each kind
    fputs("\"runs\":[", f);
    play_run(a, o, "full", &script, f);
    while (script && next_word(&list, ",", name, sizeof name)) {
        if (!strcmp(name, "full")) continue;
        fputc(',', f);
        play_run(a, o, name, &script, f);
    }
    json_print(f, "],'answer':%s,'shape':", LAST_ANSWER);
    write_shape(a, f);
    fputs(",\"lines\":", f);
    write_lines(a, script, o, REPORT_TOKENS, report_step(a->c), f);
    fputs("}", f);
    memory_stream_close(f);
    page_write(out.f, json);
    if (save_keep(&out, err)) die(EXIT_RUN, "--report %s", err);
    if (!quiet) tell("report: %s", path);
    turns_free(script);
    options_free(o);
    free(json);
}

// ---- the default evaluation
enum {
    QUICK_MODEL = 20 * 1000 * 1000,     // most parameters of a model that is evaluated unasked
    QUICK_TOKENS = 640,                 // what the longest item may need
};

// --report without --eval: evaluates a little where that takes seconds, then writes the page. It takes one core some
// six seconds with the shipped model's 3 million parameters. Returns 0.
int report(App *a) {
    EvalRun none = { .a = a };
    char err[256], text[256];
    const char *names = opt_given(a->o, "method") ? opt_str(a->o, "method") : page_methods;
    if (parameters_of(a->c) > QUICK_MODEL || min_int(ctx_limit(a), a->c->max_pos) < QUICK_TOKENS) {
        if (!quiet)
            warn("no scores in the report: give --eval; unasked, only models of up to 20 million parameters with "
                 "a context of %d tokens are evaluated", QUICK_TOKENS);
        report_write(a, &none);
        return 0;
    }
    options_set(a->o, "eval", "needle-short", err);
    snprintf(text, sizeof text, "%d", BUDGET);
    if (!opt_given(a->o, "budgets") && !opt_given(a->o, "budget") && !opt_given(a->o, "ratio"))
        options_set(a->o, "budgets", text, err);
    snprintf(text, sizeof text, strcmp(names, "full") ? "full,%s" : "%s", names);
    options_set(a->o, "compare", text, err);
    return evaluate(a, report_write);
}

// ==================================================================================================== BROWSER
// What the Web Worker of the page calls, one at a time. Up to four sides answer side by side, and the last one
// follows one of them, token by token, with the method of the picture that is looked at. Replies are
// greedy. The tests call the same functions without a browser.
//
// What a function returns as text is JSON unless it says otherwise, and lasts until the next call. What
// the program says on stderr the worker shows too.
#if defined(__EMSCRIPTEN__) || defined(KVCOMP_NO_MAIN)
#define WEB __attribute__((used))       // a function that the worker calls

static App web;                         // model, tokenizer, template and options of all sides
static Shown web_side[SIDES];
static char *web_text;                  // what the last call returned
static size_t web_size;

// A text to be returned begins; the last one goes.
static FILE *web_begin(void) {
    free(web_text);
    web_text = NULL;
    return memory_stream(&web_text, &web_size);
}

// It ends.
static const char *web_end(FILE *f) {
    memory_stream_close(f);
    return web_text;
}

// Opens the model of this folder -> its shape.
WEB const char *web_open(const char *dir) {
    char err[512];
    web = (App){ .o = options_of_program() };
    if (options_set(web.o, "model", dir, err) || options_set(web.o, "temp", "0", err)) die(EXIT_USAGE, "%s", err);
    web.c = config_load(dir);
    web.w = weights_load(web.c);
    open_tokenizer(&web, 1);
    FILE *f = web_begin();
    write_shape(&web, f);
    return web_end(f);
}

// Options of a side: the model's, and lines of "name=value". NULL, and the reason in err, when a
// line cannot be taken.
static Options *web_options(const char *lines, char err[256]) {
    Options *o = options_copy(web.o);
    char line[4096];
    int bad = 0;
    while (!bad && next_word(&lines, "\n", line, sizeof line)) {
        char *value = strchr(line, '=');
        if (value) *value++ = 0;
        if (*line) bad = options_set(o, line, value ? value : "1", err);
    }
    if (!bad) return o;
    options_free(o);
    return NULL;
}

// Opens side i with a method and options, and plays its record into it; in the middle of a reply,
// the reply goes on by the new method. "" (no JSON), or the reason why the side stays as it is.
WEB const char *web_method(int i, const char *method, const char *options) {
    Shown *x = &web_side[i], now = { 0 };
    static char err[512];
    *err = 0;
    Options *o = web_options(options, err);
    if (o) {
        side_open(&now.side, &web, o, method);
        options_free(o);
        snprintf(err, sizeof err, "%s", now.side.refused);
    }
    if (!*err) {
        if (i == FOLLOWER) now.latest = latest_open(now.side.app.s, 1);
        now.side.app.turn = x->side.app.turn;
        (void)replay(&now.side.app, err);
    }
    if (*err) {
        now.side.app.turn = NULL;
        shown_close(&now);
    } else {
        reply_begin(&now);
        x->side.app.turn = NULL;
        shown_close(x);
        *x = now;
    }
    return err;
}

// Forgets the dialogue of side i.
WEB void web_clear(int i) {
    if (web_side[i].side.app.s) (void)chat_clear(&web_side[i].side.app);
}

WEB void web_close(int i) { shown_close(&web_side[i]); }

// Feeds a message to side i. 0, or -1: it does not fit.
WEB int web_say(int i, const char *text) { return shown_say(&web_side[i], text); }

// One step of the reply of side i, of at most n tokens: the text that came, and whether the reply goes on.
WEB const char *web_step(int i, int n) {
    char *text = NULL;
    FILE *f = web_begin();
    json_print(f, "{'more':%d,'text':", shown_step(&web_side[i], n, &text));
    json_escape(f, text ? text : "", arrlenu(text));
    fputc('}', f);
    arrfree(text);
    return web_end(f);
}

// Side i is fed what side `of` has said and heard, as far as it does not know it. "" (no JSON), or the
// reason why it cannot follow.
WEB const char *web_follow(int i, int of) {
    static char err[512];
    shown_follow(&web_side[i], web_side[of].side.app.turn, err);
    return err;
}

// The state of side i, with its tokens from number `from` on.
WEB const char *web_state(int i, int from) {
    FILE *f = web_begin();
    write_state(&web_side[i], from, f);
    return web_end(f);
}

// Every row that it holds and every view, as --json-rows has them, for comparisons with the program.
WEB const char *web_rows(int i) {
    FILE *f = web_begin();
    fprintf(f, "{\"side\":%d", i);
    json_rows(web_side[i].side.app.s, f);
    fputc('}', f);
    return web_end(f);
}

// What the follower's passes traced.
WEB const char *web_trace(void) {
    FILE *f = web_begin();
    write_trace(web_side[FOLLOWER].latest, f);
    return web_end(f);
}

// LoopServe's prefill of the follower's dialogue.
WEB const char *web_lines(void) {
    const App *a = &web_side[FOLLOWER].side.app;
    FILE *f = web_begin();
    write_lines(a, a->turn, a->o, MAP_TOKENS, 1, f);
    return web_end(f);
}
#endif  // __EMSCRIPTEN__ or KVCOMP_NO_MAIN
