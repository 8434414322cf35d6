// fuzz.c - libFuzzer targets for everything that reads what somebody else wrote.
//
// `make fuzz` runs them all, one after the other; one alone is
//     make fuzz_targets && FUZZ_TARGET=ids ./fuzz_targets -max_total_time=60 CORPUS_FOLDER
// A folder that is given gets the target's seeds first: whole, valid inputs, so that mutations reach beyond
// the first check.
#define KVCOMP_NO_MAIN
#include "../lib/base.c"
#include "../lib/kernels.c"
#include "../lib/checkpoint.c"
#include "../lib/tokenizer.c"
#include "../lib/template.c"
#include "../kvcomp.c"
#include "../app/options.c"
#include "../app/terminal.c"
#include "../app/trace.c"
#include "../app/chat.c"
#include "../app/measure.c"
#include "../app/page.c"
#include "../app/main.c"
#include "check.h"

enum { FUZZ_V = 512 };          // rows of the embedding

// A finding: what should hold does not.
static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

// The bytes as a file that can be opened and mapped: returns its path.
static const char *as_file(const char *data, size_t n) {
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    must(!ftruncate(fd, 0) && pwrite(fd, data, n, 0) == (ssize_t)n, "memfd");
    return path;
}

// These ids have rows in the embedding.
static void must_have_rows(const int *ids) {
    for (int i = 0; i < (int)arrlen(ids); i++) must(ids[i] >= 0 && ids[i] < FUZZ_V, "ids have rows");
}

// Cuts what stands before the first such byte off the data, and the byte; there may be none. Returns it (malloc'd),
// and how many bytes it has in *size.
static char *cut_off(const char **data, size_t *n, char byte, size_t *size) {
    const char *end = memchr(*data, byte, *n), *begin = *data;
    *size = end ? (size_t)(end - begin) : *n;
    *data += *size + (end != NULL);
    *n -= *size + (end != NULL);
    return copy_bytes(begin, *size);
}

// ---- what the targets that need a model use: random weights, and a tokenizer with the tokens of chat templates

// The tokenizer, loaded once.
static Tokenizer *the_tokenizer(void) {
    static Tokenizer *t;
    char err[512] = "";
    if (!t) t = tokenizer_load("data/tokenizers/marks", err);
    must(t != NULL, err);
    must(tokenizer_size(t) <= FUZZ_V, "its ids have rows in the embedding");
    return t;
}

// An App with random weights and a session of full attention; with_text: with the tokenizer. app_end gives
// it back.
static App app_begin(int with_text) {
    static Config *c;
    static Weights *w;
    static const char *const set[][2] = { { "seed", "1" }, { "n-predict", "2" }, { "ctx-size", "256" },
                                          { "device", "cpu" } };
    char err[512], shape[64];
    snprintf(shape, sizeof shape, "L2,H2,G1,D8,C16,F16,V%d", FUZZ_V);
    if (!c) c = config_synthetic(shape);
    if (!w) w = weights_synthetic(c, 1);
    App a = { .o = options_of_program(), .c = c, .w = w, .tok = with_text ? the_tokenizer() : NULL };
    for (int i = 0; i < 4; i++) must(!options_set(a.o, set[i][0], set[i][1], err), err);
    open_session(&a);
    return a;
}

// Gives back what app_begin allocated and what the target put into the App.
static void app_end(App *a) {
    template_free(a->tp);
    app_beside_close(a);
}

// ---- the targets

// Counts the nodes of a tree, and holds what every node promises.
static void count(const Json *j, size_t *nodes) {
    ++*nodes;
    must(j->type >= JSON_NULL && j->type <= JSON_OBJECT, "a node has a type");
    if (j->type == JSON_STRING) must(!j->str[j->len], "strings end in NUL");
    for (int i = 0; i < j->n; i++) {
        if (j->type == JSON_OBJECT)
            must(json_get(j, j->key[i]) != NULL, "a key that is there is found");
        count(&j->item[i], nodes);
    }
}

// What json_escape writes of any bytes must be a string again, and the same one if the bytes were UTF-8.
static void round_trip(const char *s, size_t n) {
    char err[256];
    size_t i = 0;
    OWN char *out = WRITTEN(f, json_escape(f, s, n));
    Json *j = json_parse(out, strlen(out), err);
    must(j && j->type == JSON_STRING, "json_escape writes a string");
    for (int k; i < n && (k = utf8_length(s + i, n - i)); i += (size_t)k) {}
    if (i == n) must(j->len == n && !memcmp(j->str, s, n), "well-formed text survives");
    json_free(j);
}

// What show writes of any bytes holds no control character but newline and tab, and plain text survives.
static void shown_bytes(const char *s, size_t n) {
    char *out;
    size_t len, k;
    FILE *f = memory_stream(&out, &len);
    show(f, s, n);
    memory_stream_close(f);
    for (size_t i = 0; i < len; i += k) {
        unsigned char c = (unsigned char)out[i], d = (unsigned char)out[i + 1];
        k = (size_t)max_int(utf8_length(out + i, len - i), 1);
        must(c == '\n' || c == '\t' || (c >= ' ' && c != 127), "no C0 and no DEL is left");
        must(k > 1 || c < 0x80 || c >= 0xa0, "no raw C1 is left");
        must(k != 2 || c != 0xc2 || d >= 0xa0, "no C1 in UTF-8 is left");
    }
    free(out);
}

// Any bytes: parsed as JSON, escaped as a string, and shown.
static void target_json(const char *data, size_t n) {
    char err[256];
    size_t nodes = 0;
    Json *j = json_parse(data, n, err);
    if (j) count(j, &nodes);
    must(nodes <= n + 1, "no more nodes than bytes");
    json_free(j);
    round_trip(data, n);
    shown_bytes(data, n);
}

// A file of tensors: every byte that its header promises must be readable.
static void target_safetensors(const char *data, size_t n) {
    char err[512];
    SafeFile *f = safetensors_open(as_file(data, n), err);
    unsigned sum = 0;
    for (int i = 0; f && i < f->n; i++) {
        SafeTensor *t = safetensors_find(f, f->tensor[i].name);
        must(t == &f->tensor[i], "a tensor that is there is found");
        for (size_t k = 0; k < t->bytes; k++) sum += ((const unsigned char *)t->data)[k];
        if (safetensors_meta(f, t->name)) sum++;
    }
    if (sum == 12345) fprintf(stderr, " ");     // keeps the reads
    safetensors_close(f);
}

// What passes must be sane.
static void target_config(const char *data, size_t n) {
    char err[256];
    Json *j = json_parse(data, n, err);
    if (!j) return;
    Config *c = xcalloc(1, sizeof *c);
    ConfigReader r = { .file = "config.json" };
    if (j->type == JSON_OBJECT) config_read(&r, c, j);
    else config_fail(&r, "no object");
    if (!r.err[0]) {
        OWN double *f = xmalloc((size_t)(c->D / 2) * sizeof *f);
        float scale;
        must(c->L > 0 && c->G > 0 && c->H % c->G == 0 && c->D % 2 == 0 && c->V > 0,
             "sizes that passed are sane");
        must(c->n_eos <= 8 && (c->window > 0) == (c->windowed != NULL),
             "so are eos ids and the window");
        rope_frequencies(c, f, &scale);
        for (int i = 0; i < c->D / 2; i++) must(isfinite(f[i]), "finite frequencies");
    }
    config_free(c);
    json_free(j);
}

// A tokenizer.json, then after a 0 byte the text to encode, without and with special tokens.
static void target_tokenizer(const char *data, size_t n) {
    size_t size;
    char err[512];
    OWN char *json = cut_off(&data, &n, 0, &size);
    Tokenizer *t = tokenizer_parse(json, size, err);
    for (int special = 0; t && special < 2; special++) {
        int *ids = tokenizer_encode(t, n ? data : "Hello  world's 12", n ? n : 17, special, NULL), len;
        for (int i = 0; i < (int)arrlen(ids); i++) {
            must(ids[i] >= 0 && ids[i] < tokenizer_size(t), "ids lie in the vocabulary");
            tokenizer_bytes(t, ids[i], &len);
        }
        arrfree(ids);
    }
    tokenizer_free(t);
}

// A file that is read must leave a record that fits the session.
static void target_session(const char *data, size_t n) {
    char err[512];
    App a = app_begin(1);
    int tokens = 0, bad = session_read(&a, as_file(data, n), err);
    for (int i = 0; !bad && i < (int)arrlen(a.turn); i++) {
        must_have_rows(a.turn[i].pre);
        must_have_rows(a.turn[i].dec);
        tokens += (int)arrlen(a.turn[i].pre) + (int)arrlen(a.turn[i].dec);
    }
    must(bad || a.s->n_tok == tokens, "the replay saw every token");
    app_end(&a);
}

// The file is opened, and if it fits the model, a message goes through it.
static void target_adapter(const char *data, size_t n) {
    char err[512];
    int ids[] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    App a = app_begin(0);
    must(!options_set(a.o, "sonic-weights", as_file(data, n), err), "the option");
    Session *s = session_try(a.c, a.w, a.o, "sonic", err);
    if (s) {
        prefill(s, ids, 8);
        decode(s, 9);
        prefill(s, ids, 3);
        session_close(s);
    }
    app_end(&a);
}

// A file of scores: what passes are numbers.
static void target_scores(const char *data, size_t n) {
    char err[512];
    static const char *const which[] = { "inf", "dili", "lazy" };
    for (int i = 0; i < 3; i++) {
        double *x = scores_read(as_file(data, n), which[i], 2, 4, err);
        for (int k = 0; x && k < 8; k++) must(x[k] >= 0, "scores that passed are numbers of at least 0");
        free(x);
    }
}

// A file of turns of ids.
static void target_ids(const char *data, size_t n) {
    Turn *turns = ids_read(as_file(data, n), FUZZ_V);
    must(arrlen(turns) > 0, "a file that passed has a turn");
    for (int i = 0; i < (int)arrlen(turns); i++) {
        must(arrlen(turns[i].pre) > 0, "a turn prefills something");
        must_have_rows(turns[i].pre);
    }
    turns_free(turns);
}

// Dialogues; every answer is scored by every metric, too.
static void target_dialogues(const char *data, size_t n) {
    static EvalRun e;                           // given back here when the last one was refused
    char err[512];
    eval_close(&e);
    e = (EvalRun){ 0 };
    read_items(&e, the_tokenizer(), as_file(data, n), 1000);
    for (int i = 0; i < (int)arrlen(e.item); i++) {
        const EvalItem *it = &e.item[i];
        for (int j = 0; j < (int)arrlen(it->turn); j++) {
            const EvalTurn *t = &it->turn[j];
            must(t->user != NULL, "a turn has a message");
            if (!t->answers) continue;
            for (int m = 0; m < METRICS; m++) {
                double score = m == METRIC_CLASS && !t->classes ? 0 : best_score(m, t->user, t);
                must(score >= 0 && score <= 1 + 1e-9, "a score lies in 0..1");
            }
            OWN char *said = copy_text(t->reply ? t->reply : t->user);
            OWN char *out = WRITTEN(f, write_answer(it, j, &(Played){ .said = said }, f));
            Json *answer = json_parse(out, strlen(out), err);
            must(answer != NULL, "an answer is an object");
            json_free(answer);
        }
    }
}

// A file of answers.
static void target_answers(const char *data, size_t n) {
    static EvalRun x;                           // given back here when the last one was refused
    char missing[160];
    eval_close(&x);
    x = (EvalRun){ .path = "answers" };
    must(read_answers(&x, copy_bytes(data, n), n) <= n, "what is kept lies in the file");
    if (!x.items || x.items > 1000) return;
    int left_out = rows_end(&x, missing);
    for (int r = 0; r < (int)arrlen(x.rows); r++) {
        int items = 0;
        for (int i = 0; i < x.items; i++) items += x.rows[r].line[i] != NULL;
        must(left_out + items == x.items, "rows have the same items");
    }
}

// A line is answered by one line, an object, and does not end the program.
static void target_batch(const char *data, size_t n) {
    char err[512];
    jmp_buf here;
    App a = app_begin(1);
    a.tp = template_load("/nonexistent", "chatml", a.tok, err);
    must(a.tp != NULL, err);
    die_jump = &here;
    if (setjmp(here)) must(0, "a line has ended the program");
    for (int lines = 1; n && lines <= 8; lines++) {
        size_t length;
        OWN char *line = cut_off(&data, &n, '\n', &length);
        OWN char *out = WRITTEN(f, batch_line(&a, line, length, lines, f));
        size_t size = strlen(out);
        Json *j = size && out[size - 1] == '\n' ? json_parse(out, size, err) : NULL;
        must(j && (json_get(j, "error") || json_get(j, "ids")) && json_get(j, "line"), "an answer is an object");
        json_free(j);
    }
    app_end(&a);
}

// A program, then after a 0 byte the message that is rendered by what was recognised.
static void target_template(const char *data, size_t n) {
    size_t size;
    char err[512];
    OWN char *program = cut_off(&data, &n, 0, &size), *text = n ? copy_bytes(data, n) : copy_text("hello");
    App a = app_begin(1);
    a.tp = template_load("/nonexistent", as_file(program, size), a.tok, err);
    for (int turn = 0; a.tp && turn < 2; turn++) {
        Turn t = render_turn(&a, text, err);
        must_have_rows(t.pre);
        must(t.n_sys + t.n_head <= (int)arrlen(t.pre), "system message and head lie inside the turn");
        arrput(a.turn, t);
    }
    app_end(&a);
}

// Lines of a chat: each is a command or a turn; none may save a file.
static void target_chat(const char *data, size_t n) {
    App a = app_begin(1);
    for (int lines = 0; n && lines < 8; lines++) {
        size_t size;
        OWN char *text = cut_off(&data, &n, '\n', &size);
        if (text[0] == '/' && strncmp(text, "/save", 5)) chat_command(&a, text);
        else if (text[0] && text[0] != '/') chat_turn(&a, text, stdout);
    }
    app_end(&a);
}

// ---- seeds: whole inputs of each target

// Writes an adapter that fits the model of app_begin; its weights are 0.
static void adapter_seed(const char *path) {
    App a = app_begin(0);
    const Config *c = a.c;
    const int HD = c->H * c->D, GD = c->G * c->D;
    const struct { const char *name; int dim[2]; } part[] = {               // the first two once, the others of every layer
        { "nexus.embed.pos", { 4, c->C } }, { "nexus.embed.turn", { 2, c->C } },
        { "self_attn.q_proj.weight", { HD, c->C } }, { "self_attn.k_proj.weight", { GD, c->C } },
        { "self_attn.v_proj.weight", { GD, c->C } }, { "self_attn.o_proj.weight", { c->C, HD } },
        { "mlp.gate_proj.weight", { c->F, c->C } }, { "mlp.up_proj.weight", { c->F, c->C } },
        { "mlp.down_proj.weight", { c->C, c->F } },
    };
    static const char zeros[4096], *const meta[][2] = {
        { "format", "sonic-nexus" }, { "version", "1" }, { "body", "full_message" }, { "position_mode", "augmented" },
        { "mlp", "dedicated" }, { "k_max", "4" }, { "k_default", "2" }, { "t_max", "2" },
    };
    char text[80];
    SafeWriter w;
    safe_write_begin(&w, path, "fuzz");
    for (size_t i = 0; i < sizeof meta / sizeof *meta; i++) safe_write_meta(&w, meta[i][0], meta[i][1]);
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sonic_fingerprint(a.w));
    safe_write_meta(&w, "base_fingerprint", text);
    safe_write_meta_end(&w);
    safe_write(&w, "nexus.embed.base", "F16", 2, zeros, &c->C, 1);
    for (int i = 0; i < 2 + 7 * c->L; i++) {
        int k = i < 2 ? i : 2 + (i - 2) % 7;
        if (i < 2) snprintf(text, sizeof text, "%s", part[k].name);
        else snprintf(text, sizeof text, "nexus.layers.%d.%s", (i - 2) / 7, part[k].name);
        safe_write(&w, text, "F16", 2, zeros, part[k].dim, 2);
    }
    safe_write_end(&w);
    app_end(&a);
}

// Saves a session of two turns.
static void session_seed(const char *path) {
    char err[512] = "";
    App a = app_begin(1);
    if (chat_turn(&a, "hello", stdout) || chat_turn(&a, "he is there", stdout)) must(0, "two turns");
    if (session_save(&a, path, err)) must(0, err);
    app_end(&a);
}

// ---- the table
// dies: a refusal is die(), which leaves its memory behind, so leaks are not looked for. files: those that match are
// seeds. seed: a function that writes one.
static const struct Target {
    const char *name;
    void (*run)(const char *data, size_t n);
    int dies;
    const char *files;
    void (*seed)(const char *path);
} targets[] = {
    { "json",        target_json,        0, "models/kvcomp-tiny/*config.json", NULL },
    { "safetensors", target_safetensors, 0, NULL,                              adapter_seed },
    { "config",      target_config,      0, "data/golden/*/config.json",       NULL },
    { "tokenizer",   target_tokenizer,   0, "data/tokenizers/*/tokenizer.json", NULL },
    { "session",     target_session,     1, NULL,                              session_seed },
    { "adapter",     target_adapter,     1, NULL,                              adapter_seed },
    { "scores",      target_scores,      0, "data/vectors/head_scores.json",   NULL },
    { "ids",         target_ids,         1, "data/ids/*.txt",                  NULL },
    { "dialogues",   target_dialogues,   1, "test/tasks/*.jsonl",              NULL },
    { "answers",     target_answers,     1, "test/seeds/answers.jsonl",        NULL },
    { "batch",       target_batch,       0, "data/requests.jsonl",             NULL },
    { "template",    target_template,    0, "test/seeds/*.jinja",              NULL },
    { "chat",        target_chat,        1, "test/seeds/*.chat",               NULL },
};
static const struct Target *chosen;

// Puts all seeds of the chosen target into the corpus, each as a file of its own.
static void write_seeds(const char *folder) {
    const char *copy = "n=0; for f in %s; do n=$((n + 1)); cp $f '%s'/seed-$n || exit; done";
    if (chosen->files) must(!system(formatted(copy, chosen->files, folder)), "there are files of seeds");
    if (chosen->seed) chosen->seed(formatted("%s/made", folder));
}

void __lsan_disable(void);                      // of the sanitizer's runtime

// libFuzzer calls this once, before it reads its command line. What the program says is no finding, and standard
// input is empty.
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *name = getenv("FUZZ_TARGET");
    struct stat st;
    for (size_t i = 0; name && i < sizeof targets / sizeof *targets; i++) {
        if (!strcmp(name, targets[i].name)) chosen = &targets[i];
    }
    must(chosen != NULL, "FUZZ_TARGET names no target; see the table at the end of fuzz.c");
    must(freopen("/dev/null", "w", stdout) && freopen("/dev/null", "r", stdin), "/dev/null");
    quiet = 1;
    int first = 1;
    while (first < *argc && (*argv)[first][0] == '-') first++;
    if (first < *argc && !stat((*argv)[first], &st) && S_ISDIR(st.st_mode)) write_seeds((*argv)[first]);
    if (chosen->dies) __lsan_disable();
    return 0;
}

// libFuzzer calls this for every input.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    jmp_buf here;
    die_jump = &here;                           // a clean refusal is no finding
    if (!setjmp(here)) chosen->run((const char *)data, n);
    return 0;
}
