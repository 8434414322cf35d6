// fuzz.c - libFuzzer targets for everything that reads a file somebody else wrote. Pick one with -D:
//   clang -g -O1 -fsanitize=fuzzer,address,undefined -DFUZZ_JSON fuzz.c -o fuzz_json -lm && ./fuzz_json CORPUS
// FUZZ_JSON, FUZZ_SAFETENSORS, FUZZ_CONFIG, FUZZ_TOKENIZER (tokenizer.json, then after a NUL the text to encode),
// FUZZ_SPM (a length byte, that many bytes of text, then tokenizer.model).
#define KVCOMP_NO_MAIN
#include "kvcomp.c"

static void must(int holds, const char *what) { if (!holds) { fprintf(stderr, "fuzz: %s\n", what); abort(); } }

#if defined(FUZZ_JSON)
static void count(const Json *j, size_t *nodes) {
    ++*nodes;
    must(j->type >= JSON_NULL && j->type <= JSON_OBJECT, "a node has a type");
    if (j->type == JSON_STRING) must(!j->str[j->len], "strings end in NUL");
    for (int i = 0; i < j->n; i++) {
        if (j->type == JSON_OBJECT) must(json_get(j, j->key[i]) != NULL, "a key that is there is found");
        count(&j->item[i], nodes);
    }
}
// What json_escape writes of any bytes must be a string again, and the same one if the bytes were UTF-8.
static void round_trip(const char *s, size_t n) {
    char *out = NULL, err[256];
    size_t len = 0, i = 0;
    FILE *f = open_memstream(&out, &len);
    json_escape(f, s, n);
    fclose(f);
    Json *j = json_parse(out, len, err);
    must(j && j->type == JSON_STRING, "json_escape writes a string");
    for (int k; i < n && (k = utf8_length(s + i, n - i)); i += (size_t)k) {}
    if (i == n) must(j->len == n && !memcmp(j->str, s, n), "well-formed text survives");
    json_free(j);
    free(out);
}
static void target(const char *data, size_t n) {
    char err[256];
    size_t nodes = 0;
    Json *j = json_parse(data, n, err);
    if (j) count(j, &nodes);
    must(nodes <= n + 1, "no more nodes than bytes");
    json_free(j);
    round_trip(data, n);
}

#elif defined(FUZZ_SAFETENSORS)
static void target(const char *data, size_t n) {
    static int fd = -1;
    static char path[64];
    char err[512];
    if (fd < 0) { fd = memfd_create("fuzz", 0); snprintf(path, sizeof path, "/proc/self/fd/%d", fd); }
    must(!ftruncate(fd, 0) && pwrite(fd, data, n, 0) == (ssize_t)n, "memfd");
    SafeFile *f = safetensors_open(path, err);
    unsigned sum = 0;
    for (int i = 0; f && i < f->n; i++) {       // every byte the header promises must be readable
        SafeTensor *t = safetensors_find(f, f->tensor[i].name);
        must(t == &f->tensor[i], "a tensor that is there is found");
        for (size_t k = 0; k < t->bytes; k++) sum += ((const unsigned char *)t->data)[k];
        if (safetensors_meta(f, t->name)) sum++;
    }
    if (sum == 12345) fprintf(stderr, " ");     // keeps the reads
    safetensors_close(f);
}

#elif defined(FUZZ_CONFIG)
static void target(const char *data, size_t n) {
    char err[256];
    Json *j = json_parse(data, n, err);
    if (!j) return;
    Config *c = xcalloc(1, sizeof *c);
    ConfigReader r = { .file = "config.json" };
    if (j->type == JSON_OBJECT) config_read(&r, c, j);
    else config_fail(&r, "no object");
    if (!r.err[0]) {
        double *f = xmalloc((size_t)(c->D / 2) * sizeof *f);
        float scale;
        must(c->L > 0 && c->G > 0 && c->H % c->G == 0 && c->D % 2 == 0 && c->V > 0, "sizes that passed are sane");
        must(c->n_eos <= 8 && (c->window > 0) == (c->windowed != NULL), "so are eos ids and the window");
        rope_frequencies(c, f, &scale);
        for (int i = 0; i < c->D / 2; i++) must(isfinite(f[i]), "finite frequencies");
        free(f);
    }
    config_free(c);
    json_free(j);
}

#elif defined(FUZZ_TOKENIZER) || defined(FUZZ_SPM)
static void use(Tokenizer *t, const char *text, size_t n) {
    for (int special = 0; special < 2; special++) {
        int *ids = tokenizer_encode(t, text, n, special, NULL), len;
        for (size_t i = 0; i < arrlenu(ids); i++) {
            must(ids[i] >= 0 && ids[i] < tokenizer_size(t), "ids lie in the vocabulary");
            tokenizer_bytes(t, ids[i], &len);
        }
        arrfree(ids);
    }
    tokenizer_free(t);
}
static void target(const char *data, size_t n) {
    char err[512];
    Tokenizer *t = NULL;
    unicode_load();
#if defined(FUZZ_SPM)
    size_t text = n ? (unsigned char)data[0] : 0;
    if (n && text < n && (t = load_sentencepiece(data + 1 + text, n - 1 - text, err))) use(t, data + 1, text);
#else
    const char *end = memchr(data, 0, n);
    size_t len = end ? (size_t)(end - data) : n;
    Json *j = json_parse(data, len, err);
    if (j && (t = load_json(j, err))) use(t, end ? end + 1 : "Hello  world's 12", end ? n - len - 1 : 17);
    json_free(j);
#endif
}
#else
#error "choose a target: see the top of fuzz.c"
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    jmp_buf here;
    die_jump = &here;                           // a clean refusal is no finding
    if (!setjmp(here)) target((const char *)data, n);
    return 0;
}
