// test/test_lib.c - the tests of lib/base and lib/checkpoint: files, good and damaged, golden logits; and of rows
// that kvcomp.c packs for the kernels. It includes them, so that every static function can be tried.
#include "../lib/base.c"
#include "../lib/checkpoint.c"
#include "../kvcomp.c"
#include "../app/chat.h"
#include "check.h"
#include "twin.h"

// ==================================================================================================== JSON, SAFETENSORS, CONFIG, WEIGHTS

// text with the first `old` replaced by `with`; old "": unchanged. Aborts when old is not there: a
// mutation must mutate.
static char *replaced(const char *text, const char *old, const char *with) {
    const char *at = strstr(text, old);
    if (!at) {
        fprintf(stderr, "tests: \"%s\" is not in \"%.200s\"\n", old, text);
        exit(1);
    }
    char *out = xmalloc(strlen(text) + strlen(with) + 1);
    sprintf(out, "%.*s%s%s", (int)(at - text), text, with, at + strlen(old));
    return out;
}

// ---- JSON

// Parses a text; err has the complaint.
static Json *parsed(const char *text, char err[256]) { return json_parse(text, strlen(text), strcpy(err, "")); }

TEST(json_values, "values of every type, numbers to the bit, order and duplicates") {
    static const char text[] =
        " {\"a\" : [1, -2.5e3, 0, -0, 9223372036854775807, 9223372036854775808, 1e-2],\r\n\t"
        "\"b\":{\"c\":true,\"d\":false,\"e\":null},"
        "\"s\":\"x\\\"\\\\\\/\\b\\f\\n\\r\\ty\",\"\":\"\",\"s\":\"last\"} ";
    char err[256];
    Json *j = parsed(text, err);
    CHECK(j, "%s", err);
    if (!j) return;
    static const struct { double num; int is_int; int64_t i; } numbers[] = {
        { 1, 1, 1 },            { -2500, 0, 0 },                   { 0, 1, 0 }, { 0, 1, 0 },
        { 0x1p63, 1, INT64_MAX }, { 0x1p63, 0, 0 /* no wrap */ }, { 0.01, 0, 0 },
    };
    const Json *a = json_get(j, "a"), *b = json_get(j, "b");
    CHECK(j->n == 5 && !strcmp(j->key[0], "a") && !strcmp(j->key[4], "s"), "%d keys", j->n);
    CHECK(a && a->type == JSON_ARRAY && a->n == 7, "a");
    for (int i = 0; i < 7; i++) {
        const Json *v = &a->item[i];
        CHECK(v->num == numbers[i].num && v->is_int == numbers[i].is_int && (!v->is_int || v->i == numbers[i].i),
              "number %d is %g, %lld", i, v->num, (long long)v->i);
    }
    CHECK(json_get(b, "c")->type == JSON_BOOL && json_get(b, "c")->i == 1 && json_get(b, "d")->i == 0 &&
          json_get(b, "e")->type == JSON_NULL, "b");
    CHECK(!json_get(b, "z") && !json_get(a, "c") && !json_get(NULL, "c"), "absent keys are NULL");
    CHECK(j->item[2].len == 10 && !memcmp(j->item[2].str, "x\"\\/\b\f\n\r\ty", 10), "escapes: %s", j->item[2].str);
    CHECK(!strcmp(json_get(j, "s")->str, "last"), "the last duplicate wins, found %s", json_get(j, "s")->str);
    json_free(j);
    // Found by fuzzing: nothing was allocated for no children.
    static const char *const empty[] = { "[]", "{}", "[[],{}]" };
    for (int i = 0; i < 3; i++) {
        j = parsed(empty[i], err);
        CHECK(j && j->n == (i == 2 ? 2 : 0) && !json_get(j, "a"), "%s: %s", empty[i], err);
        json_free(j);
    }
}

TEST(json_unicode, "\\u escapes, surrogate pairs and halves, NUL inside a string, raw UTF-8") {
    static const struct { const char *text, *want; size_t len; } cases[] = {
        { "\"\\u0041\\u00e9\\u20ac\"", "A\xc3\xa9\xe2\x82\xac", 6 }, { "\"\xc3\xa9\"", "\xc3\xa9", 2 },
        { "\"\\ud83e\\udd99\"", "\xf0\x9f\xa6\x99", 4 },          { "\"\\uD83E\\uDD99x\"", "\xf0\x9f\xa6\x99x", 5 },
        { "\"\\ud83ex\"", "\xef\xbf\xbdx", 4 },                   { "\"\\udd99\"", "\xef\xbf\xbd", 3 },
        { "\"\\ud83e\\u0041\"", "\xef\xbf\xbd" "A", 4 },         { "\"\\ud83e\\n\"", "\xef\xbf\xbd\n", 4 },
        { "\"\\ud83e\\ud83e\\udd99\"", "\xef\xbf\xbd\xf0\x9f\xa6\x99", 7 }, { "\"a\\u0000b\"", "a\0b", 3 },
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char err[256];
        Json *j = parsed(cases[i].text, err);
        CHECK(j && j->type == JSON_STRING && j->len == cases[i].len && !memcmp(j->str, cases[i].want, j->len) &&
              !j->str[j->len], "%s: %s", cases[i].text, err);
        json_free(j);
    }
}

TEST(json_malformed, "broken texts are refused with the byte where they break") {
    static const struct { const char *text, *want; } cases[] = {
        { "", "byte 0" },                  { "   ", "byte 3" },               { "{", "byte 1" },
        { "[1,]", "byte 3" },              { "{\"a\":1,}", "byte 7" },        { "[1 2]", "byte 3" },
        { "{\"a\" 1}", "byte 5" },         { "{a:1}", "byte 1: expected a key" }, { "\"abc", "byte 4" },
        { "\"a\nb\"", "byte 2" },          { "\"\\x\"", "backslash" },        { "\"\\u12g4\"", "hexadecimal" },
        { "\"\\u12", "hexadecimal" },      { "\"\\", "backslash" },           { "01", "leading zero" },
        { "-", "digit" },                  { "1.", "digit" },                 { ".5", "byte 0" },
        { "1e", "exponent" },              { "1e+", "exponent" },             { "+1", "byte 0" },
        { "0x10", "nothing more" },        { "1e999", "double" },             { "-1e999", "double" },
        { "nul", "null" },                 { "tru", "true" },                 { "NaN", "byte 0" },
        { "Infinity", "byte 0" },          { "[] []", "byte 3" },             { "{\"a\":1}}", "byte 7" },
        { "[\"a\":1]", "byte 4" },         { "'a'", "byte 0" },               { "\xef\xbb\xbf{}", "byte 0" },
        { "[1]//", "byte 3" },             { "{\"a\":}", "byte 5" },          { "{1:2}", "a key" },
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char err[256];
        Json *j = parsed(cases[i].text, err);
        CHECK(!j && strstr(err, cases[i].want), "\"%s\": wanted \"%s\", err \"%s\"", cases[i].text, cases[i].want,
              err);
        json_free(j);
    }
    char err[256] = "", deep[200];
    Json *j = json_parse("[0,\0]", 5, err);
    CHECK(!j && strstr(err, "byte 3"), "a NUL in the text: %s", err);
    for (int n = 64; n <= 65; n++) {
        memset(deep, '[', n);
        memset(deep + n, ']', n);
        j = json_parse(deep, 2 * n, err);
        CHECK(n == 64 ? j != NULL : !j && strstr(err, "64 nested"), "%d deep: %s", n, err);
        json_free(j);
    }
}

TEST(json_large, "a vocabulary of 200,000 is parsed in well under a second and walked in order") {
    size_t n;
    char *text, err[256] = "";
    FILE *f = memory_stream(&text, &n);
    fprintf(f, "{\"vocab\":{");
    for (int i = 0; i < 200000; i++) fprintf(f, "%s\"tok\\u0120%d\":%d", i ? "," : "", i, i);
    fprintf(f, "}}");
    memory_stream_close(f);
    double t = now();
    Json *j = json_parse(text, n, err);
    t = now() - t;
    const Json *v = json_get(j, "vocab");
    CHECK(v && v->n == 200000 && v->item[199999].i == 199999 && !strcmp(v->key[12345], "tok\xc4\xa0" "12345"), "%s",
          err);
    CHECK(t < 2, "%.2f s for %zu bytes", t, n);
    json_free(j);
    free(text);
}

TEST(json_escaping, "json_escape writes what json_parse reads; broken UTF-8 becomes U+FFFD") {
    static const char raw[] = "a\"b\\c\n\t\x01\x7f\xc2\x80\xc2\x9b[2J\xc2\x9f\xc2\xa0\xc3\xa9 \xf0\x9f\xa6\x99";
    static const char broken[] = "\xc3(\xed\xa0\x80\xf0\x9f\xc0\xaf";
    for (int k = 0; k < 2; k++) {
        char *out, err[256] = "";
        size_t n, i = 0;
        FILE *f = memory_stream(&out, &n);
        json_escape(f, k ? broken : raw, k ? sizeof broken - 1 : sizeof raw);       // the NUL too
        memory_stream_close(f);
        Json *j = json_parse(out, n, err);
        if (k) CHECK(j && strstr(j->str, "\xef\xbf\xbd("), "%s: %s", out, err);
        else CHECK(j && j->len == sizeof raw && !memcmp(j->str, raw, sizeof raw) &&
                   strstr(out, "\\u0001\\u007f\\u0080\\u009b[2J\\u009f\xc2\xa0\xc3\xa9 "), "%s: %s", out, err);
        for (size_t w; j && i < j->len && (w = (size_t)utf8_length(j->str + i, j->len - i)); i += w) {}
        CHECK(j && i == j->len, "byte %zu is not UTF-8", i);
        json_free(j);
        free(out);
    }
}

// ---- SAFETENSORS

// len < 0: the header's own length
static void put_safetensors(const char *path, const char *header, long long len, size_t data) {
    size_t n = strlen(header);
    OWN char *buf = xcalloc(8 + n + data, 1);
    uint64_t h = len < 0 ? n : (uint64_t)len;
    for (int i = 0; i < 8; i++) buf[i] = (char)(h >> 8 * i);
    memcpy(buf + 8, header, n);
    for (size_t i = 0; i < data; i++) buf[8 + n + i] = (char)i;
    put_file(path, buf, 8 + n + data);
}

#define ST(dtype, shape, offsets) \
    "{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"

TEST(safetensors_cases, "every line of test/lib/safetensors.txt: good and broken headers, offsets, shapes and "
                        "dtypes") {
    char line[512], *part[4], err[512];
    FILE *f = fopen("test/lib/safetensors.txt", "r");
    int n = 0;
    for (; next_case(f, line, sizeof line, part, 4) == 4; n++) {
        int good = !strcmp(part[3], "good");
        put_safetensors(tmp_path("case.safetensors"), part[0], atoll(part[1]), (size_t)atol(part[2]));
        SafeFile *x = safetensors_open(tmp_path("case.safetensors"), err);
        CHECK(good ? x != NULL : !x && strstr(err, part[3]), "%s, length %s: wanted \"%s\", found \"%s\"", part[0],
              part[1], part[3], x ? "no complaint" : err);
        safetensors_close(x);
    }
    CHECK(n > 40, "%d lines", n);
    fclose(f);
}

TEST(safetensors_files, "files that are no safetensors file at all; find, metadata, data at odd addresses") {
    static const struct { const char *text, *want; } cases[] = {
        { "", "at least 8" }, { "1234567", "at least 8" },
        { "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs" },
    };
    char err[512] = "";
    CHECK(!safetensors_open(tmp_path("none.safetensors"), err) && strstr(err, "No such file"), "%s", err);
    CHECK(!safetensors_open(tmp_dir, err) && strstr(err, "regular file"), "%s", err);
    for (int i = 0; i < 3; i++) {
        put_text(tmp_path("x"), cases[i].text);
        CHECK(!safetensors_open(tmp_path("x"), err) && strstr(err, cases[i].want), "%s", err);
    }
    for (int pad = 0; pad < 4; pad++) {  // the data start at every address mod 4
        char header[300];
        snprintf(header, sizeof header, "{\"b\":%s,\"a\":%s,\"__metadata__\":{\"format\":\"pt\"}}%.*s",
                 ST("\"F32\"", "[2,1]", "[0,8]"), ST("\"U8\"", "[3]", "[8,11]"), pad, "   ");
        put_safetensors(tmp_path("x"), header, -1, 11);
        SafeFile *f = safetensors_open(tmp_path("x"), err);
        CHECK(f && f->n == 2, "%s", err);
        if (!f) continue;
        SafeTensor *t = safetensors_find(f, "b");
        static const unsigned char want[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
        CHECK(t && t->dtype == DT_F32 && t->n_dim == 2 && t->dim[0] == 2 && t->dim[1] == 1 && t->bytes == 8 &&
              !memcmp(t->data, want, 8), "pad %d", pad);
        CHECK(safetensors_find(f, "b") == t, "a second find changes nothing");
        CHECK(safetensors_find(f, "a")->dtype == DT_OTHER && !safetensors_find(f, "c") &&
              !safetensors_find(f, "__metadata__"), "a, c");
        CHECK(!strcmp(safetensors_meta(f, "format"), "pt") && !safetensors_meta(f, "x"), "metadata");
        safetensors_close(f);
    }
}

// ---- CONFIG

// Each try has its own frame, so that longjmp out of die() cannot clobber a caller's variables. ->
// exit code, 0: it returned.
static int try_config(const char *dir, Config **c) {
    int code;
    *c = NULL;
    EXPECT_DIE(code, *c = config_load(dir));
    return code;
}

static int try_weights(Config *c, Weights **w) {
    int code;
    *w = NULL;
    EXPECT_DIE(code, *w = weights_load(c));
    return code;
}

static int try_synthetic(const char *shape) {
    int code;
    EXPECT_DIE(code, config_synthetic(shape));
    return code;
}

// What came out of a try: the wanted complaint, with exit code 3, or none, if none is wanted (NULL).
static void check_said(int code, const char *want, const char *about) {
    int good = want ? code == EXIT_MODEL && strstr(die_text, want) != NULL : !code;
    CHECK(good, "%s: code %d, \"%s\", not \"%s\"", about, code, code ? die_text : "", want ? want : "");
}

static const char good_config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":8,\"intermediate_size\":6,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":10,"
    "\"rms_norm_eps\":1e-05,\"rope_theta\":10000.0,\"rope_scaling\":null,\"max_position_embeddings\":64,"
    "\"tie_word_embeddings\":false,\"hidden_act\":\"silu\",\"bos_token_id\":1,\"eos_token_id\":2,"
    "\"torch_dtype\":\"bfloat16\"}";

// The tensors for good_config, all of BF16: a header, and the bytes of their data, which are counted bytes: small
// finite numbers. shard 1: embedding and layer 0; 2: the rest; 3: everything.
static char header[8192];
static size_t data;

static void header_put(FILE *f, const char *name, int rows, int cols) {         // rows 0: a vector
    size_t end = data + 2 * (size_t)max_int(rows, 1) * (size_t)cols;
    fprintf(f, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[", data ? "," : "{", name);
    if (rows) fprintf(f, "%d,", rows);
    fprintf(f, "%d],\"data_offsets\":[%zu,%zu]}", cols, data, end);
    data = end;
}

static void good_header(int shard) {
    static const struct { const char *name; int rows, cols; } of_layer[] = {
        { "input_layernorm.weight", 0, 8 },  { "self_attn.q_proj.weight", 8, 8 }, { "self_attn.k_proj.weight", 4, 8 },
        { "self_attn.v_proj.weight", 4, 8 }, { "self_attn.o_proj.weight", 8, 8 },
        { "post_attention_layernorm.weight", 0, 8 },
        { "mlp.gate_proj.weight", 6, 8 },    { "mlp.up_proj.weight", 6, 8 },      { "mlp.down_proj.weight", 8, 6 },
    };
    FILE *f = fmemopen(header, sizeof header, "w");
    data = 0;
    if (shard & 1) header_put(f, "model.embed_tokens.weight", 10, 8);
    for (int i = 0; i < 2 * 9; i++) {
        char name[100];
        snprintf(name, sizeof name, "model.layers.%d.%s", i / 9, of_layer[i % 9].name);
        if (shard & (1 + i / 9)) header_put(f, name, of_layer[i % 9].rows, of_layer[i % 9].cols);
    }
    if (shard & 2) header_put(f, "model.norm.weight", 0, 8);
    if (shard & 2) header_put(f, "lm_head.weight", 10, 8);
    fprintf(f, "}");
    fclose(f);
}

// A fresh folder with a good config.json; header and data are those of all its tensors.
static const char *model_dir(void) {
    static char dir[400];
    snprintf(dir, sizeof dir, "%s", tmp_path("model"));
    tmp_clear(dir);
    mkdir(dir, 0755);
    put_text(tmp_path("model/config.json"), good_config);
    good_header(3);
    return dir;
}

// Has the config these values? They are written "NAME NUMBER NAME NUMBER ..".
static int config_says(const Config *c, const char *want) {
    const struct { const char *name; double value; } all[] = {
        { "L", c->L }, { "H", c->H }, { "G", c->G }, { "D", c->D }, { "C", c->C }, { "F", c->F }, { "V", c->V },
        { "max_pos", c->max_pos }, { "eps", c->eps == 1e-5f ? 1e-5 : c->eps }, { "tied", c->tied },
        { "qk_norm", c->qk_norm }, { "window", c->window },
        { "layers", c->windowed ? c->windowed[0] + 2 * c->windowed[1] : 0 },
        { "bos", c->bos }, { "n_eos", c->n_eos }, { "eos", c->eos[0] }, { "eos1", c->eos[1] }, { "dtype", c->dtype },
        { "rope", c->rope_type }, { "theta", c->theta }, { "factor", c->factor }, { "low", c->low_freq },
        { "high", c->high_freq }, { "orig", c->orig_pos }, { "fast", c->beta_fast }, { "slow", c->beta_slow },
    };
    const size_t most = sizeof all / sizeof *all;
    char name[16];
    double x;
    for (int n = 0; sscanf(want, "%15s %lf%n", name, &x, &n) == 2; want += n) {
        size_t i = 0;
        while (i < most && strcmp(all[i].name, name)) i++;
        if (i == most || all[i].value != x) return 0;
    }
    return !want[strspn(want, " ")];
}

TEST(config_cases, "every line of test/lib/config.txt: an unusable value of config.json, or a key by which another "
                   "family computes something else, ends with exit code 3 and the key's name; others are read as "
                   "they say, in old and new keys, for each family") {
    const char *dir = model_dir();
    char line[1024], *part[3];
    FILE *f = fopen("test/lib/config.txt", "r");
    int n = 0;
    for (; next_case(f, line, sizeof line, part, 3) == 3; n++) {
        OWN char *text = replaced(good_config, part[0], part[1]);
        put_text(tmp_path("model/config.json"), text);
        Config *c;
        int code = try_config(dir, &c), good = *part[2] == '=';
        if (good) CHECK(!code && config_says(c, part[2] + 1), "%s -> %s: %d, not %s", part[0], part[1], code,
                        part[2]);
        else check_said(code, strstr(die_text, "config.json") ? part[2] : "config.json", part[1]);
        weights_close(NULL, c);
    }
    CHECK(n > 110, "%d lines", n);
    fclose(f);
}

TEST(config_folders, "missing folders and files, a file instead of a folder, weights in foreign formats") {
    static const struct { const char *file, *want; } foreign[] = {
        { "pytorch_model.bin", "only pytorch_model.bin: pickled weights" },
        { "pytorch_model-00001-of-00002.bin", "pickled" },
        { "consolidated.00.pth", "consolidated.00.pth: weights in the vendor's own layout" },
        { "consolidated.safetensors", "interleaved" },
        { "model-Q4_K_M.gguf", "model-Q4_K_M.gguf: a GGUF file" },
    };
    Config *c;
    Weights *w;
    const char *dir = model_dir();
    char path[2000];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = 0;
    check_said(try_config(tmp_path("nowhere"), &c), "no such folder", "nowhere");
    check_said(try_config(tmp_path("model/config.json"), &c), "found a file", "a file");
    check_said(try_config(path, &c), "longer than", "a long path");
    put_text(tmp_path("model/generation_config.json"), "{\"eos_token_id\":[2,3],");
    check_said(try_config(dir, &c), "generation_config.json: byte", "broken");
    put_text(tmp_path("model/generation_config.json"), "{\"eos_token_id\":[2,3]}");
    c = config_load(dir);
    check_said(try_weights(c, &w), "model.safetensors: No such file", "no weights");
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, foreign[i].file);
        put_text(path, "x");
        check_said(try_weights(c, &w), foreign[i].want, foreign[i].file);
        unlink(path);
    }
    weights_close(NULL, c);
    put_text(tmp_path("model/x.gguf"), "GGUF");
    unlink(tmp_path("model/config.json"));
    check_said(try_config(dir, &c), "x.gguf: a GGUF file", "GGUF alone");
    unlink(tmp_path("model/x.gguf"));
    check_said(try_config(dir, &c), "config.json: No such file", "an empty folder");
}

// good_config with one replacement, loaded.
static Config *config_of(const char *old, const char *with) {
    OWN char *text = replaced(good_config, old, with);
    put_text(tmp_path("model/config.json"), text);
    return config_load(tmp_path("model"));
}

TEST(config_eos, "eos ids are those of config.json and generation_config.json together") {
    model_dir();
    put_text(tmp_path("model/generation_config.json"), "{\"eos_token_id\":[3,2,7]}");
    Config *c = config_of("", "");
    CHECK(c->n_eos == 3 && c->eos[0] == 2 && c->eos[1] == 3 && c->eos[2] == 7, "the union of both files: %d",
          c->n_eos);
    weights_close(NULL, c);
}

TEST(config_synthetic_shapes, "named shapes, sizes over the defaults, bad shapes with exit code 2") {
    static const struct { const char *shape, *want; } good[] = {
        { "llama-3.2-1b", "L 16 H 32 G 8 D 64 C 2048 F 8192 V 128256 tied 1" },
        { "qwen3-4b", "L 36 D 128 C 2560 qk_norm 1" },
        { "L3,V500,G4,C64,F80,H8,D16", "L 3 V 500 G 4 C 64 F 80 H 8 D 16" },
        { "L2", "L 2 C 2048" },
    };
    static const char *const bad[] = {
        "", "llama", "L", "L0", "L-1", "L2;", "L2,", "L2,X3", "L99999999999999999999", "H8,G3", "H65,G1", "D7", "L 2",
        "l2",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        Config *c = config_synthetic(good[i].shape);
        CHECK(config_says(c, good[i].want) && !strcmp(c->dir + strlen("synthetic:"), good[i].shape), "%s", c->dir);
        weights_close(NULL, c);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int code = try_synthetic(bad[i]);
        CHECK(code == EXIT_USAGE && strstr(die_text, "shape"), "\"%s\": %d %s", bad[i], code, die_text);
    }
}

// ---- WEIGHTS

// Writes the model's file, with its header changed in one place and so many bytes more of data.
static void put_model(const char *old, const char *with, size_t more) {
    OWN char *text = replaced(header, old, with);
    put_safetensors(tmp_path("model/model.safetensors"), text, -1, data + more);
}

// Replaces n bytes of that file: at `at`, or so many before its end.
static void patch_model(long at, const void *bytes, size_t n) {
    FILE *f = fopen(tmp_path("model/model.safetensors"), "r+b");
    CHECK(f && !fseek(f, at, at < 0 ? SEEK_END : SEEK_SET) && fwrite(bytes, 1, n, f) == n && !fclose(f), "%ld", at);
}

TEST(weights_broken, "every line of test/lib/weights.txt: a tensor that is missing, misshapen or of a wrong dtype "
                     "ends with exit code 3 and its name") {
    const char *dir = model_dir();
    Config *c = config_load(dir);
    char line[512], *part[3];
    FILE *f = fopen("test/lib/weights.txt", "r");
    int n = 0;
    for (; next_case(f, line, sizeof line, part, 3) == 3; n++) {
        Weights *w;
        put_model(part[0], part[1], 0);
        int code = try_weights(c, &w);
        if (strcmp(part[2], "good")) check_said(code, part[2], part[1]);
        else CHECK(!code && w && w->bytes == data && c->dtype == DT_BF16 && w->head.data != w->embed.data &&
                   !w->layer[1].bq.data, "%d %s", code, die_text);
        weights_close(w, NULL);
    }
    CHECK(n > 15, "%d lines", n);
    fclose(f);
    weights_close(NULL, c);
    put_model("", "", 0);
    static const struct { const char *type, *want; } others[] = {
        { "\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\"", "q_proj.bias is missing" },
        { "\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\",\"head_dim\":2", "q_norm.weight is missing" },
    };
    for (int i = 0; i < 2; i++) {
        Weights *w;
        c = config_of("\"LlamaForCausalLM\"],\"model_type\":\"llama\"", others[i].type);
        check_said(try_weights(c, &w), others[i].want, others[i].type);
        weights_close(NULL, c);
    }
}

TEST(weights_q8_range, "--weights q8_0 refuses a tensor with a weight that its scales cannot reach, by name; the "
                       "largest that they reach, an infinity and a NaN are taken") {
    static const struct {
        int first;              // 1: of the embedding's first weight, 0: of lm_head's last one
        uint16_t weight;        // BF16
        const char *want;
    } cases[] = {
        { 1, 0x4afd, NULL },    // 8290304
        { 1, 0x4b00, "tensor 'model.embed_tokens.weight' has a weight of 8.389e+06" },
        { 0, 0xcb00, "tensor 'lm_head.weight' has a weight of 8.389e+06" },
        { 0, 0x7f7f, "tensor 'lm_head.weight' has a weight of 3.39e+38" },
        { 1, 0x7f80, NULL },
        { 0, 0x7fc0, NULL },
    };
    static const char zeros[8192];
    const char *dir = model_dir();
    Config *c = config_load(dir);
    c->as_q8 = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Weights *w;
        put_model("", "", 0);
        patch_model(-(long)data, zeros, data);
        patch_model(cases[i].first ? -(long)data : -2, &cases[i].weight, 2);
        check_said(try_weights(c, &w), cases[i].want, "q8_0");
        weights_close(w, NULL);
    }
    weights_close(NULL, c);
}

// What fn prints to stderr, in a static buffer.
static const char *stderr_of(void (*fn)(void *), void *arg) {
    static char buf[2000];
    FILE *f = tmpfile();
    fflush(stderr);
    int old = dup(2);
    dup2(fileno(f), 2);
    fn(arg);
    fflush(stderr);
    dup2(old, 2);
    close(old);
    rewind(f);
    buf[fread(buf, 1, sizeof buf - 1, f)] = 0;
    fclose(f);
    return buf;
}

// Loads config and weights of a folder and frees them.
static void load_and_close(void *dir) {
    Config *c = config_load(dir);
    weights_close(weights_load(c), c);
}

TEST(weights_leftovers, "tensors nobody asked for give one warning line; inv_freq none; a tied model's lm_head that "
                        "differs is refused, the embedding once more is not") {
    char *dir = (char *)(uintptr_t)model_dir();
    put_model("", "", 0);
    const char *said = stderr_of(load_and_close, dir);
    CHECK(!*said, "a clean folder: %s", said);
    put_model("{", "{\"extra.one\":" ST("\"F32\"", "[0]", "[0,0]") ",\"extra.two\":" ST("\"I64\"", "[0]", "[0,0]")
                   ",\"model.layers.0.self_attn.rotary_emb.inv_freq\":" ST("\"F32\"", "[0]", "[0,0]") ",", 0);
    said = stderr_of(load_and_close, dir);
    CHECK(strstr(said, "2 tensors are not used, the first: extra.one") && lines_in(said) == 1, "%s", said);
    put_model("", "", 0);
    Config *c = config_of("\"tie_word_embeddings\":false", "\"tie_word_embeddings\":true");
    Weights *w;
    check_said(try_weights(c, &w), "ties the output to the embedding, but lm_head.weight is there and differs",
               "tied");
    unsigned char embed[160];
    for (int i = 0; i < 160; i++) embed[i] = (unsigned char)i;          // as put_safetensors writes them
    patch_model(-160, embed, 160);
    said = stderr_of(load_and_close, dir);
    CHECK(!*said, "the embedding once more: %s", said);
    put_model("\"lm_head.weight\"", "\"model.layers.0.rotary_emb.inv_freq\"", 0);
    w = weights_load(c);
    CHECK(w->head.data == w->embed.data && w->head.rows == 10, "tied without lm_head");
    weights_close(w, c);
}

// A and B: the two shards; both hold what good_header splits
static const struct {
    const char *text, *want;
} index_cases[] = {
    { "{\"weight_map\":{A,B}}", NULL },
    { "{\"metadata\":{\"total_size\":1},\"weight_map\":{B,A}}", NULL },
    { "{\"weight_map\":{A}}", "is missing" },
    { "{\"weight_map\":{A,\"x\":\"s2.safetensors\"}}", "tensor model.layers.1.input_layernorm.weight is missing" },
    { "{}", "no weight_map" },
    { "{\"weight_map\":{}}", "no weight_map" },
    { "{\"weight_map\":[]}", "no weight_map" },
    { "[]", "expected a JSON object" },
    { "{", "byte" },
    { "{\"weight_map\":{A,B,\"x\":3}}", "x is no file name" },
    { "{\"weight_map\":{A,B,\"x\":\"s3.safetensors\"}}", "s3.safetensors: No such file" },
    { "{\"weight_map\":{A,B,\"x\":\"../model/s1.safetensors\"}}", "in the same folder" },
    { "{\"weight_map\":{A,B,\"x\":\"..\"}}", "in the same folder" },
    { "{\"weight_map\":{A,B,\"x\":\"\"}}", "in the same folder" },
    { "{\"weight_map\":{A,B,\"x\":\"config.json\"}}", "config.json: " },
};

TEST(weights_shards, "index.json: good, lying, missing shards, names outside the folder; "
                     "model.safetensors beside it is not read") {
    const char *dir = model_dir();
    static char map[2][8192];
    for (int s = 1; s <= 2; s++) {
        char file[60], err[256];
        size_t n = 0;
        good_header(s);
        snprintf(file, sizeof file, "model/s%d.safetensors", s);
        put_safetensors(tmp_path(file), header, -1, data);
        Json *j = json_parse(header, strlen(header), err);
        for (int i = 0; i < j->n; i++)
            n += (size_t)snprintf(map[s - 1] + n, sizeof map[0] - n, "%s\"%s\":\"s%d.safetensors\"",
                                  i ? "," : "", j->key[i], s);
        json_free(j);
    }
    put_text(tmp_path("model/model.safetensors"), "broken on purpose");
    Config *c = config_load(dir);
    for (size_t i = 0; i < sizeof index_cases / sizeof *index_cases; i++) {
        const char *text = index_cases[i].text;
        OWN char *a = strchr(text, 'A') ? replaced(text, "A", map[0]) : copy_text(text);
        OWN char *b = strchr(text, 'B') ? replaced(a, "B", map[1]) : copy_text(a);
        put_text(tmp_path("model/model.safetensors.index.json"), b);
        Weights *w;
        check_said(try_weights(c, &w), index_cases[i].want, index_cases[i].text);
        CHECK(index_cases[i].want || (w && w->layer[1].down.data), "%s", index_cases[i].text);
        weights_close(w, NULL);
    }
    weights_close(NULL, c);
}

TEST(weights_synthetic_made, "the same bits whatever the number of threads, the wanted spread, every tensor there; "
                             "inspect prints it") {
    static const struct { int threads, seed; } ways[] = { { 2, 7 }, { 3, 7 }, { 1, 7 }, { 1, 8 } };
    Config *c = config_synthetic("L2,H6,G3,D20,C60,F91,V333");
    Weights *w[4];
    int threads = set_threads(2);
    for (int i = 0; i < 4; i++) {
        set_threads(ways[i].threads);
        w[i] = weights_synthetic(c, (uint64_t)ways[i].seed);
        const WeightFiles *first = w[0]->files, *files = w[i]->files;
        CHECK(files->block_bytes == first->block_bytes, "%d: %zu bytes", i, files->block_bytes);
        CHECK((memcmp(files->block, first->block, first->block_bytes) != 0) == (i == 3), "%d threads, seed %d: other "
              "weights, or the same", ways[i].threads, ways[i].seed);
    }
    set_threads(threads);
    double sum = 0, sq = 0, n = 333 * 60;
    for (int i = 0; i < 333 * 60; i++) {
        double x = bf16_to_f32(((const uint16_t *)w[0]->embed.data)[i]);
        sum += x;
        sq += x * x;
    }
    CHECK(fabs(sqrt(sq / n) - 2.5 / sqrt(60)) < 0.01 && fabs(sum / n) < 0.01, "std %g mean %g", sqrt(sq / n),
          sum / n);
    const Layer *y = &w[0]->layer[1];
    CHECK(bf16_to_f32(*(const uint16_t *)y->attn_norm.data) == 1 && y->down.rows == 60 && y->down.cols == 91 &&
          w[0]->head.data == w[0]->embed.data, "layer 1");
    char *out;
    size_t len;
    FILE *f = memory_stream(&out, &len);
    inspect(c, w[0], f);
    memory_stream_close(f);
    CHECK(strstr(out, "333 x 60") && strstr(out, "in 2 layers") &&
          strstr(out, "KV cache   960 bytes a token in f32, 480 in f16"), "%s", out);
    free(out);
    for (int i = 0; i < 4; i++) weights_close(w[i], i ? NULL : c);
}

TEST(rope_exact, "yarn with truncate false: the ramp begins between two pairs (all else: the folders of "
                 "data/golden)") {
    Config *c = config_synthetic("L1,H1,G1,D128,C64");
    double f[64], high = 128 * log(32768 / (2 * M_PI)) / (2 * log(1e6));
    double low = 128 * log(32768 / (32 * 2 * M_PI)) / (2 * log(1e6));
    float scale;
    c->rope_type = ROPE_YARN;
    c->theta = 1e6;
    c->factor = 4;
    c->orig_pos = 32768;
    c->beta_fast = 32;
    c->beta_slow = c->yarn_exact = 1;
    rope_frequencies(c, f, &scale);
    CHECK(fabs(f[24] / (pow(1e6, -48.0 / 128) * (1 - .75 * (24 - low) / (high - low))) - 1) < 1e-12, "%g", f[24]);
    weights_close(NULL, c);
}

// ---- GOLDEN LOGITS: data/golden, made by data/make_golden.py from transformers

typedef struct {
    int n_ids, n_rows, V;
    const int32_t *ids, *rows;
    const float *logits;
    char *file;
    Config *c;
    Weights *w;
} Golden;

enum { GOLDEN_PREFILL = 70 };

static Config *golden_loaded;

static const char *const golden_names[] = {
    "llama2-mha", "llama3-tied", "llama-linear", "llama-biases", "llama-sharded", "llama-mixed", "qwen2-yarn",
    "qwen2-biases", "qwen2-window", "qwen3-norms", "qwen3-layers", "qwen3-yarn", "mistral-window", "mistral-nemo",
    "qwen3-bare", "llama-yarn",
};

enum { N_GOLDEN = sizeof golden_names / sizeof *golden_names };

// Loads a golden folder's config, as a function that may die.
static void golden_config(void *path) { golden_loaded = config_load(path); }

// Reads golden.bin and the checkpoint beside it. Returns 0, with a failed CHECK, if one cannot be
// read.
static int golden_open(Golden *g, const char *name) {
    char path[200], err[256] = "";
    size_t n = 0;
    snprintf(path, sizeof path, "data/golden/%s/golden.bin", name);
    *g = (Golden){ .file = read_file(path, &n, err) };
    CHECK(g->file, "%s", err);
    if (!g->file) return 0;
    const int32_t *p = (const int32_t *)g->file;
    g->n_ids = p[0];
    g->n_rows = p[1];
    g->V = p[2];
    g->ids = p + 3;
    g->rows = g->ids + g->n_ids;
    g->logits = (const float *)(g->rows + g->n_rows);
    CHECK(n == 12 + 4 * (size_t)(g->n_ids + g->n_rows * (1 + g->V)), "%s: %zu bytes", path, n);
    snprintf(path, sizeof path, "data/golden/%s", name);
    // The one checkpoint without a rope_theta says what is used.
    const char *said = stderr_of(golden_config, path);
    CHECK((strstr(said, "no rope_theta, 10000 is used") != NULL) == !strcmp(name, "llama2-mha"), "%s: \"%s\"", name,
          said);
    g->c = golden_loaded;
    g->w = weights_load(g->c);
    CHECK(g->c->V == g->V, "%s: V %d", name, g->c->V);
    return 1;
}

// Frees what golden_open read.
static void golden_close(Golden *g) {
    weights_close(g->w, g->c);
    free(g->file);
}

// Options with the prefill batch and the row format of a golden run.
static Options *golden_options(const char *batch, const char *format) {
    Options *o = options_of_program();
    char err[256] = "";
    CHECK(!options_set(o, "ctk", format, err) && !options_set(o, "ctv", format, err) &&
              !options_set(o, "batch-size", batch, err),
          "%s", err);
    return o;
}

// The logits (n_ids - first + 1, V) of a prefill of `first` ids and a decode step for each other
// id.
static float *golden_run(const Golden *g, const Options *o, int first) {
    Session *s = session_open(g->c, g->w, o, "full");
    float *out = xmalloc((size_t)(g->n_ids - first + 1) * (size_t)g->V * sizeof *out), *row = out;
    for (int i = first; i <= g->n_ids; i++, row += g->V)
        memcpy(row, i == first ? prefill(s, g->ids, first) : decode(s, g->ids[i - 1]),
               (size_t)g->V * sizeof *row);
    session_close(s);
    return out;
}

// Are the logits got (V) the n-th ones of the golden rows, the one of token `row`?
static void golden_row(const Golden *g, const char *name, const char *how, const float *got, int n, int row) {
    const float *want = g->logits + (size_t)n * (size_t)g->V;
    size_t at = 0;
    double e = worst(got, want, (size_t)g->V, 2e-4, 2e-4, &at);
    CHECK(g->rows[n] == row && e <= 1, "%s, %s, row %d: logit %zu is %g, transformers has %g (%.1f times the bound)",
          name, how, row, at, got[at], want[at], e);
}

TEST(golden_logits, "every family against transformers: prefill, decode, two turns, token by token") {
    int threads = set_threads(1);
    OWN_OPTIONS Options *o = golden_options("512", "f32");
    for (int i = 0; i < N_GOLDEN; i++) {
        const char *name = golden_names[i];
        Golden g;
        if (!golden_open(&g, name)) continue;
        size_t V = (size_t)g.V, left = (size_t)(g.n_ids - GOLDEN_PREFILL + 1), at = 0;
        OWN float *run = golden_run(&g, o, GOLDEN_PREFILL), *steps = golden_run(&g, o, 1);
        for (int n = 0; n < g.n_rows; n++) {
            int row = g.rows[n], place = row - (GOLDEN_PREFILL - 1);
            if (place >= 0) golden_row(&g, name, "prefill and decode", run + (size_t)place * V, n, row);
            golden_row(&g, name, "token by token", steps + (size_t)row * V, n, row);
        }
        double e = worst(run, steps + (GOLDEN_PREFILL - 1) * V, left * V, 5e-5, 5e-5, &at);
        CHECK(e <= 1, "%s: prefill and token by token differ, %.1f times the bound", name, e);
        // A second turn reads the first one's rows: row 35. And after a reset the first turn again: row 10.
        Session *s = session_open(g.c, g.w, o, "full");
        prefill(s, g.ids, 11);
        golden_row(&g, name, "second turn", prefill(s, g.ids + 11, 25), 1, 35);
        session_reset(s);
        golden_row(&g, name, "after a reset", prefill(s, g.ids, 11), 0, 10);
        session_close(s);
        golden_close(&g);
    }
    set_threads(threads);
}

TEST(golden_bits, "-b 7, 64, 512 and 1 or 2 threads: the same logits to the bit") {
    static const struct { const char *batch; int threads; } ways[] = {
        { "512", 1 }, { "7", 1 }, { "64", 1 }, { "64", 2 },
    };
    int threads = set_threads(1);
    for (int i = 0; i < N_GOLDEN; i++) {
        Golden g;
        float *first = NULL;
        if (!golden_open(&g, golden_names[i])) continue;
        size_t n = (size_t)(g.n_ids - GOLDEN_PREFILL + 1) * (size_t)g.V;
        for (int k = 0; k < 4; k++) {
            OWN_OPTIONS Options *o = golden_options(ways[k].batch, i & 1 ? "f16" : "f32");
            set_threads(ways[k].threads);
            float *run = golden_run(&g, o, GOLDEN_PREFILL);
            CHECK(!k || !memcmp(first, run, n * sizeof *run), "%s: -b %s with %d threads differs", golden_names[i],
                  ways[k].batch, ways[k].threads);
            if (k) free(run);
            else first = run;
        }
        free(first);
        golden_close(&g);
    }
    set_threads(threads);
}

TEST(golden_tiles, "both with products in tiles, as plain C has them, where weights are BF16") {
    Golden g;
    OWN_OPTIONS Options *o = NULL;
    if (simd_set("amx-plain")) leave_out("AVX-512 with VNNI");
    o = golden_options("512", "f32");
    if (golden_open(&g, "qwen3-norms")) {
        size_t n = (size_t)(g.n_ids - GOLDEN_PREFILL + 1) * (size_t)g.V;
        OWN float *tiles = golden_run(&g, o, GOLDEN_PREFILL);
        CHECK(!simd_set("avx512vnni"), "the set that amx-plain adds to is missing");
        OWN float *vectors = golden_run(&g, o, GOLDEN_PREFILL);
        CHECK(memcmp(vectors, tiles, n * sizeof *tiles), "no product is made in tiles");
        CHECK(!simd_set("amx-plain"), "amx-plain is gone");
        golden_close(&g);
    }
    test_golden_logits();
    test_golden_bits();
    simd_set(NULL);
}

TEST(golden_formats, "f16, bf16, q8_0 and q4 rows stay close to the f32 ones and are not the same") {
    static const struct { const char *format; double tol; } tried[] = {
        { "f16", 0.02 }, { "bf16", 0.2 }, { "q8_0", 0.3 }, { "q4", 2 },
    };
    Golden g;
    if (!golden_open(&g, "qwen3-norms")) return;
    for (int k = 0; k < 4; k++) {
        OWN_OPTIONS Options *o = golden_options("512", tried[k].format);
        OWN float *run = golden_run(&g, o, GOLDEN_PREFILL);
        // Rows 69..79 stand together.
        const float *want = g.logits + 2 * (size_t)g.V;
        size_t n = (size_t)(g.n_ids - GOLDEN_PREFILL + 1) * (size_t)g.V, at = 0;
        double e = worst(run, want, n, tried[k].tol, tried[k].tol, &at);
        CHECK(e <= 1, "%s: logit %g, wanted %g", tried[k].format, run[at], want[at]);
        CHECK(worst(run, want, n, 2e-4, 2e-4, &at) > 1, "%s changes nothing: is the option read?", tried[k].format);
    }
    golden_close(&g);
}

// ---- checkpoints that config.json does not tell the truth about

TEST(weights_denied, "biases that config.json denies: refused, unless they are zero") {
    static const struct { const char *family, *tensor, *keys, *want; } cases[] = {
        { "Llama", "self_attn.q_proj.bias", "", "model.layers.1.self_attn.q_proj.bias is not zero, but by its "
          "family, attention_bias and mlp_bias in config.json the model has no such bias" },
        { "Llama", "self_attn.q_proj.bias", "\"mlp_bias\":true,\"attention_bias\":false,",
          "self_attn.q_proj.bias is not zero, but by its family" },
        { "Llama", "self_attn.q_proj.bias", "\"attention_bias\":true,", NULL },
        { "Llama", "mlp.down_proj.bias", "\"attention_bias\":true,",
          "mlp.down_proj.bias is not zero, but by its family" },
        { "Llama", "mlp.down_proj.bias", "\"mlp_bias\":true,", NULL },
        { "Mistral", "self_attn.o_proj.bias", "\"attention_bias\":true,",
          "o_proj.bias is not zero, but by its family" },
    };
    static const char none[16];
    model_dir();
    for (int i = 0; i < 2 * 6; i++) {
        const char *family = cases[i / 2].family, *tensor = cases[i / 2].tensor, *want = cases[i / 2].want;
        char with[300];
        int zero = i % 2;
        snprintf(with, sizeof with, "\"%sForCausalLM\"],\"model_type\":\"%c%s\",%s\"x\":0", family, tolower(*family),
                 family + 1, cases[i / 2].keys);
        Config *c = config_of("\"LlamaForCausalLM\"],\"model_type\":\"llama\"", with);
        snprintf(with, sizeof with, "{\"model.layers.1.%s\":" ST("\"BF16\"", "[8]", "[%zu,%zu]") ",", tensor, data,
                 data + 16);
        put_model("{", with, 16);
        if (zero) patch_model(-16, none, 16);
        Weights *w;
        int code = try_weights(c, &w);
        check_said(code, zero ? NULL : want, with);
        if (!code) {
            const Layer *y = &w->layer[1];
            const Tensor *b = *tensor == 'm' ? &y->bdown : *family == 'L' ? &y->bq : &y->bo;
            CHECK(!b->data == (want != NULL), "%s %s: taken or not", tensor, cases[i / 2].keys);
        }
        weights_close(w, c);
    }
}

TEST(weights_bare, "names without \"model.\" at the front, all of them, in one file and with an index") {
    static char bare[8192];
    const char *dir = model_dir();
    size_t n = 0;
    Config *c = config_load(dir);
    for (const char *p = header; *p; p++) {
        bare[n++] = *p;
        if (!strncmp(p, "\"model.", 7)) p += 6;
    }
    put_safetensors(tmp_path("model/model.safetensors"), bare, -1, data);
    Weights *w;
    int code = try_weights(c, &w);
    CHECK(!code && w && w->bytes == data && w->layer[1].down.data && w->norm.data, "%d %s", code, die_text);
    weights_close(w, NULL);
    put_text(tmp_path("model/model.safetensors.index.json"),
             "{\"weight_map\":{\"embed_tokens.weight\":\"model.safetensors\"}}");
    check_said(try_weights(c, &w), "tensor model.layers.0.input_layernorm.weight is missing", "an index of one");
    weights_close(NULL, c);
}

// ==================================================================================================== PACKED ROWS

// element c of a row at bit positions of the format, read bit by bit
static int slow_element(const unsigned char *row, int c, int w, int rows64) {
    int B = rows64 ? 512 / w : 1 << 30;
    size_t bit = (size_t)(c / B) * 512 + (size_t)(c % B) * w;
    int v = 0;
    for (int i = 0; i < w; i++) v |= (row[(bit + i) / 8] >> (bit + i) % 8 & 1) << i;
    return v;
}

TEST(pats_pack, "packing is bit-exact for every w, head size, both formats, 1..70 rows, and every instruction set "
                "this machine has") {
    static const int dims[] = { 8, 40, 64, 128, 256 };
    uint16_t back[256], buf[70 * 256];
    rnd_seed(8);
    for (int w = 6; w <= 16; w++)
        for (int i = 0; i < 10; i++) {
            int D = dims[i / 2], rows64 = i % 2, n = 1 + rnd_int(70);
            size_t bytes = pats_row_bytes(rows64, D, w);
            Region reg = { .n = n, .w = w };
            OWN char *packed = xcalloc(n * bytes + PATS_GUARD, 1);
            OWN uint16_t *all = xmalloc((size_t)n * D * 2);
            for (int j = 0; j < n * D; j++) {
                all[j] = (uint16_t)(splitmix64(&rnd_state) >> (16 - w) << (16 - w));
                if ((all[j] & 0x7c00) == 0x7c00) all[j] &= 0xbfff;          // finite
            }
            for (int r = 0; r < n; r++) pats_write_row(pats_row(rows64, packed, &reg, r, D), all + r * D, D, w, rows64);
            for (int k = 0; simd_names[k]; k++) {
                if (simd_set(simd_names[k])) continue;
                int bad = 0, r0 = rnd_int(n), m = 1 + rnd_int(n - r0);
                for (int r = 0; r < n; r++) {
                    const unsigned char *row = pats_row(rows64, packed, &reg, r, D);
                    pats_load_region(rows64, &reg, row, 1, D, back);
                    for (int d = 0; d < D; d++) {
                        int want = all[r * D + d];
                        bad += back[d] != want || slow_element(row, d, w, rows64) != want >> (16 - w);
                    }
                }
                pats_load_region(rows64, &reg, pats_row(rows64, packed, &reg, r0, D), m, D, buf);
                bad += memcmp(buf, all + r0 * D, (size_t)m * D * sizeof *buf) != 0;
                CHECK(!bad, "%s w %d D %d rows64 %d: %d elements", simd_names[k], w, D, rows64, bad);
            }
        }
    simd_set(NULL);
}

int main(int argc, char **argv) { return check_main(argc, argv); }
