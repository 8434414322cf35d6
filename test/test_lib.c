// test/test_lib.c - the tests of lib/base and lib/checkpoint: JSON, files, good and damaged, golden logits. It
// includes them, so that every static function can be tried.
#include "../lib/base.c"
#include "../lib/checkpoint.c"
#include "../kvcomp.c"
#include "../app/chat.h"
#include "check.h"
#include "twin.h"

// ==================================================================================================== JSON

// Writes a value: a whole number as it is, another one behind ~.
static void json_write(FILE *f, const Json *j) {
    static const char *const words[] = { "false", "true" }, brackets[] = "[]{}";
    int object = j->type == JSON_OBJECT;
    if (j->type == JSON_NULL) fputs("null", f);
    if (j->type == JSON_BOOL) fputs(words[j->i], f);
    if (j->type == JSON_NUMBER && j->is_int) fprintf(f, "%lld", (long long)j->i);
    if (j->type == JSON_NUMBER && !j->is_int) fprintf(f, "~%.17g", j->num);
    if (j->type == JSON_STRING) json_escape(f, j->str, j->len);
    if (j->type < JSON_ARRAY) return;
    fputc(brackets[2 * object], f);
    for (int i = 0; i < j->n; i++) {
        if (i) fputc(',', f);
        if (object) fprintf(f, "%s:", j->key[i]);
        json_write(f, &j->item[i]);
    }
    fputc(brackets[2 * object + 1], f);
}

TABLE(json, 2, "values of every type, numbers to the bit, escapes, NUL inside a string; broken texts are refused "
               "with the byte where they break") {
    char err[256] = "";
    Json *j = json_parse(part[0], case_size[0], err);
    OWN char *out = WRITTEN(f, if (j) json_write(f, j));
    int value = *part[1] == '=';
    CHECK(value ? !strcmp(out, part[1] + 2) : !j && strstr(err, part[1]), "%s: %s%s, not %s", part[0], out, err,
          part[1]);
    json_free(j);
}

TABLE(json_escaping, 2, "json_escape writes what json_parse reads; broken UTF-8 becomes U+FFFD") {
    char err[256];
    OWN char *out = WRITTEN(f, json_escape(f, part[0], case_size[0]));
    CHECK(!strcmp(out, part[1]), "%s, not %s", out, part[1]);
    Json *j = json_parse(out, strlen(out), err);
    int broken = strstr(out, "\\ufffd") != NULL;
    CHECK(j && (broken || (j->len == case_size[0] && !memcmp(j->str, part[0], j->len))), "%s: another text", out);
    json_free(j);
}

TEST(json_lookup, "the last duplicate of a key wins; absent keys, and keys of what is no object, are NULL; 64 "
                  "levels are read") {
    static const char text[] = "{\"s\":\"x\",\"a\":[1],\"s\":\"last\"}";
    char err[256] = "", deep[130];
    Json *j = json_parse(text, sizeof text - 1, err);
    CHECK(j && !strcmp(json_get(j, "s")->str, "last"), "%s", err);
    CHECK(!json_get(j, "z") && !json_get(json_get(j, "a"), "s") && !json_get(NULL, "s"), "absent keys");
    json_free(j);
    for (int n = 64; n <= 65; n++) {
        memset(deep, '[', n);
        memset(deep + n, ']', n);
        j = json_parse(deep, 2 * n, err);
        CHECK(n == 64 ? j != NULL : !j && strstr(err, "64 nested"), "%d deep: %s", n, err);
        json_free(j);
    }
}

TEST(json_large, "a vocabulary of 200,000 is parsed in well under a second and walked in order") {
    char err[256] = "";
    OWN char *text = WRITTEN(f, {
        fprintf(f, "{\"vocab\":{");
        for (int i = 0; i < 200000; i++) fprintf(f, "%s\"tok\\u0120%d\":%d", i ? "," : "", i, i);
        fprintf(f, "}}");
    });
    double t = now();
    Json *j = json_parse(text, strlen(text), err);
    t = now() - t;
    const Json *v = json_get(j, "vocab");
    CHECK(v && v->n == 200000 && v->item[199999].i == 199999 && !strcmp(v->key[12345], "tok\xc4\xa0" "12345"), "%s",
          err);
    CHECK(t < 2, "%.2f s for %zu bytes", t, strlen(text));
    json_free(j);
}

TEST(json_printing, "json_print quotes texts and names, and writes null for what is no text or no number; words of a list") {
    char *out, word[4], all[64] = "", *volatile none = NULL;
    size_t n;
    FILE *f = memory_stream(&out, &n);
    json_print(f, "{'a':%s,'b':[%d,%ld,%zu],'c':%.3f,'d':%.17g,'e':%s}", "\"x", -1, -2l, (size_t)3, .5, NAN, none);
    memory_stream_close(f);
    CHECK(!strcmp(out, "{\"a\":\"\\\"x\",\"b\":[-1,-2,3],\"c\":0.500,\"d\":null,\"e\":null}"), "%s", out);
    free(out);
    for (const char *list = ",one|two,,3,"; next_word(&list, ",|", word, sizeof word);) strcat(strcat(all, word), ";");
    CHECK(!strcmp(all, ";one;two;;3;;"), "%s", all);
}

// ==================================================================================================== SAFETENSORS

// Writes a file of tensors: its length (below 0: the header's own), the header, and bytes of data that count up.
static void put_safetensors(const char *path, const char *header, long long len, size_t data) {
    size_t n = strlen(header);
    OWN char *buf = xcalloc(8 + n + data, 1);
    uint64_t h = len < 0 ? n : (uint64_t)len;
    for (int i = 0; i < 8; i++) buf[i] = (char)(h >> 8 * i);
    memcpy(buf + 8, header, n);
    for (size_t i = 0; i < data; i++) buf[8 + n + i] = (char)i;
    put_file(path, buf, 8 + n + data);
}

// A file is opened, or refused with these words.
static void check_safetensors(const char *path, const char *want) {
    char err[512] = "";
    SafeFile *x = safetensors_open(path, err);
    CHECK(strcmp(want, "good") ? !x && strstr(err, want) : x != NULL, "wanted \"%s\", found \"%s\"", want, err);
    safetensors_close(x);
}

TABLE(safetensors, 4, "good and broken headers, offsets, shapes and dtypes") {
    put_safetensors(tmp_path("case.safetensors"), part[0], atoll(part[1]), (size_t)atol(part[2]));
    check_safetensors(tmp_path("case.safetensors"), part[3]);
}

TABLE(safetensors_none, 2, "files that are no safetensors file at all") {
    put_file(tmp_path("x"), part[0], case_size[0]);
    check_safetensors(*part[0] == '/' ? part[0] : tmp_path("x"), part[1]);
}

TEST(safetensors_find, "tensors and metadata are found by name; data at odd addresses are as they are") {
    for (int pad = 0; pad < 4; pad++) {  // the data start at every address mod 4
        static const unsigned char want[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
        char err[512] = "", header[300];
        snprintf(header, sizeof header, "{\"b\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
                 "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[8,11]},"
                 "\"__metadata__\":{\"format\":\"pt\"}}%.*s", pad, "   ");
        put_safetensors(tmp_path("x"), header, -1, 11);
        SafeFile *f = safetensors_open(tmp_path("x"), err);
        CHECK(f && f->n == 2, "%s", err);
        if (!f) continue;
        SafeTensor *t = safetensors_find(f, "b");
        CHECK(t && t->dtype == DT_F32 && t->n_dim == 2 && t->dim[0] == 2 && t->dim[1] == 1 && t->bytes == 8 &&
              !memcmp(t->data, want, 8), "pad %d", pad);
        CHECK(safetensors_find(f, "b") == t, "a second find changes nothing");
        CHECK(safetensors_find(f, "a")->dtype == DT_OTHER && !safetensors_find(f, "c") &&
              !safetensors_find(f, "__metadata__"), "a, c");
        CHECK(!strcmp(safetensors_meta(f, "format"), "pt") && !safetensors_meta(f, "x"), "metadata");
        safetensors_close(f);
    }
}

// ==================================================================================================== CHECKPOINTS
// A good folder, in which something is changed: it is loaded, or refused in one line.

static const char good_config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":8,\"intermediate_size\":6,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":10,"
    "\"rms_norm_eps\":1e-05,\"rope_theta\":10000.0,\"rope_scaling\":null,\"max_position_embeddings\":64,"
    "\"tie_word_embeddings\":false,\"hidden_act\":\"silu\",\"bos_token_id\":1,\"eos_token_id\":2,"
    "\"torch_dtype\":\"bfloat16\"}";

// The tensors for good_config, all of BF16: a header, and how many bytes their data have. Shard 1: embedding and
// layer 0; 2: the rest; 3: everything.
static char *config, *header;
static size_t data;

// Appends a tensor to the header; rows 0: a vector.
static void header_put(FILE *f, const char *name, int rows, int cols) {
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
    size_t n;
    free(header);
    FILE *f = memory_stream(&header, &n);
    data = 0;
    if (shard & 1) header_put(f, "model.embed_tokens.weight", 10, 8);
    for (int i = 0; i < 2 * 9; i++) {
        const char *name = formatted("model.layers.%d.%s", i / 9, of_layer[i % 9].name);
        if (shard & (1 + i / 9)) header_put(f, name, of_layer[i % 9].rows, of_layer[i % 9].cols);
    }
    if (shard & 2) header_put(f, "model.norm.weight", 0, 8);
    if (shard & 2) header_put(f, "lm_head.weight", 10, 8);
    fprintf(f, "}");
    memory_stream_close(f);
}

// A file of the folder.
static const char *in_folder(const char *name) { return tmp_path(formatted("model/%s", name)); }

// Makes the folder anew, as it should be.
static void folder_begin(void) {
    tmp_clear(in_folder(""));
    mkdir(in_folder(""), 0755);
    free(config);
    config = copy_text(good_config);
    good_header(3);
    put_text(in_folder("config.json"), config);
    put_safetensors(in_folder("model.safetensors"), header, -1, data);
}

// Changes a text, which is malloc'd, where `old` stands first. Aborts when it is not there: a mutation must mutate.
static void change(char **text, const char *old, const char *with) {
    const char *at = strstr(*text, old);
    if (!at) {
        fprintf(stderr, "tests: \"%s\" is not in \"%.200s\"\n", old, *text);
        exit(1);
    }
    char *changed = xmalloc(strlen(*text) + strlen(with) + 1);
    sprintf(changed, "%.*s%s%s", (int)(at - *text), *text, with, at + strlen(old));
    free(*text);
    *text = changed;
}

// Replaces bytes of the file of tensors, so many before its end.
static void patch(long before_end, const void *bytes, size_t n) {
    FILE *f = fopen(in_folder("model.safetensors"), "r+b");
    CHECK(f && !fseek(f, -before_end, SEEK_END) && fwrite(bytes, 1, n, f) == n && !fclose(f), "%ld", before_end);
}

// Writes a shard of the tensors. Returns its lines of an index, to be freed.
static char *shard_map(int shard) {
    char err[256];
    good_header(shard);
    const char *file = formatted("s%d.safetensors", shard);
    put_safetensors(in_folder(file), header, -1, data);
    Json *j = json_parse(header, strlen(header), err);
    char *map = WRITTEN(f, for (int i = 0; i < j->n; i++) fprintf(f, "%s\"%s\":\"%s\"", i ? "," : "", j->key[i], file));
    json_free(j);
    return map;
}

// Writes an index, in which A and B stand for the two shards, beside a file that is not to be read.
static void put_index(const char *text) {
    OWN char *a = shard_map(1), *b = shard_map(2);
    char *index = copy_text(text);
    if (strchr(index, 'A')) change(&index, "A", a);
    if (strchr(text, 'B')) change(&index, "B", b);
    put_text(in_folder("model.safetensors.index.json"), index);
    put_text(in_folder("model.safetensors"), "broken on purpose");
    free(index);
}

static int as_q8;               // the weights become q8_0
static char said[2000];         // what loading said: the refusal, or warnings

// It has a frame of its own, so that longjmp out of die() cannot clobber a caller's variables. Returns the exit
// code, 0: it returned.
static int try_load(const char *dir, int weights, Config **c, Weights **w) {
    int code;
    *c = NULL;
    *w = NULL;
    EXPECT_DIE(code, {
        *c = config_load(dir);
        (*c)->as_q8 = as_q8;
        if (weights) *w = weights_load(*c);
    });
    return code;
}

// Loads a folder, with its weights or without.
static int load(const char *dir, int weights, Config **c, Weights **w) {
    FILE *f = tmpfile();
    fflush(stderr);
    int old = dup(2);
    dup2(fileno(f), 2);
    int code = try_load(dir, weights, c, w);
    dup2(old, 2);
    close(old);
    rewind(f);
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    if (code) snprintf(said, sizeof said, "%s", die_text);
    fclose(f);
    return code;
}

// Have config and weights, if there are any, these values? They are written "NAME NUMBER NAME NUMBER ..".
static int has_values(const Config *c, const Weights *w, const char *want) {
    static const Weights none;
    static const Layer no_layer;
    const Layer *y = w ? &w->layer[1] : &no_layer;
    w = w ? w : &none;
    const struct { const char *name; double value; } all[] = {
        { "L", c->L }, { "H", c->H }, { "G", c->G }, { "D", c->D }, { "C", c->C }, { "F", c->F }, { "V", c->V },
        { "max_pos", c->max_pos }, { "eps", c->eps == 1e-5f ? 1e-5 : c->eps }, { "tied", c->tied },
        { "qk_norm", c->qk_norm }, { "window", c->window },
        { "layers", c->windowed ? c->windowed[0] + 2 * c->windowed[1] : 0 },
        { "bos", c->bos }, { "n_eos", c->n_eos }, { "eos", c->eos[0] }, { "eos1", c->eos[1] }, { "eos2", c->eos[2] },
        { "dtype", c->dtype }, { "rope", c->rope_type }, { "theta", c->theta }, { "factor", c->factor },
        { "low", c->low_freq }, { "high", c->high_freq }, { "orig", c->orig_pos }, { "fast", c->beta_fast },
        { "slow", c->beta_slow },
        { "bytes", (double)w->bytes }, { "head_is_embed", w->head.data == w->embed.data },
        { "norm", w->norm.data != NULL }, { "down", y->down.data != NULL }, { "bq", y->bq.data != NULL },
        { "bo", y->bo.data != NULL }, { "bdown", y->bdown.data != NULL },
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

// Loading says this: "good", nothing; "warns" and words of one line; = and values of what was loaded; or words of a
// refusal.
static void check_load(const char *what, const char *dir, int weights, const char *want) {
    Config *c;
    Weights *w;
    int code = load(dir, weights, &c, &w), right = code == EXIT_MODEL && strstr(said, want) != NULL;
    if (*want == '=') right = !code && has_values(c, w, want + 1);
    if (!strcmp(want, "good")) right = !code && !*said;
    if (!strncmp(want, "warns ", 6)) right = !code && strstr(said, want + 6) && lines_in(said) == 1;
    CHECK(right, "%s: code %d, \"%s\", not \"%s\"", what, code, said, want);
    weights_close(w, c);
}

TABLE(config, 3, "an unusable value of config.json, or a key by which another family computes something else, "
                 "ends with exit code 3 and the key's name; others are read as they say, in old and new keys, "
                 "for each family") {
    folder_begin();
    change(&config, part[0], part[1]);
    put_text(in_folder("config.json"), config);
    check_load(part[1], in_folder(""), 0, part[2]);
    CHECK(*part[2] == '=' || strstr(said, "config.json"), "%s: %s", part[1], said);
}

TABLE(folders, 4, "files that are missing, broken or foreign; tensors that are missing, misshapen or of a wrong "
                  "dtype end with exit code 3 and their name; shards; biases that config.json denies; what "
                  "nobody asked for is a warning") {
    static const char zeros[2000];
    static char at[2000], counting[256];        // the folder; bytes as put_safetensors writes them
    static int goes_on;
    const char *what = part[0], *a = part[1], *b = part[2];
    int bias = strstr(what, "bias") != NULL;
    if (!goes_on) {
        folder_begin();
        as_q8 = 0;
        snprintf(at, sizeof at, "%s", in_folder(""));
        for (int i = 0; i < 256; i++) counting[i] = (char)i;
    }
    if (!strcmp(what, "at")) snprintf(at, sizeof at, "%s", tmp_path(a));
    if (!strcmp(what, "long")) memset(at, 'x', sizeof at - 1);
    if (!strcmp(what, "instead")) unlink(in_folder("model.safetensors"));
    if (!strcmp(what, "file") || !strcmp(what, "instead")) put_text(in_folder(a), b);
    if (!strcmp(what, "gone")) unlink(in_folder(a));
    if (!strcmp(what, "index")) put_index(a);
    if (!strcmp(what, "config")) change(&config, a, b);
    if (bias && *b) change(&config, "\"hidden_act\"", formatted("%s,\"hidden_act\"", b));
    if (bias || !strcmp(what, "config")) put_text(in_folder("config.json"), config);
    if (!strcmp(what, "header")) change(&header, a, b);
    if (!strcmp(what, "bare")) while (strstr(header, "\"model.")) change(&header, "\"model.", "\"");
    if (bias) {
        change(&header, "{", formatted("{\"model.layers.1.%s\":{\"dtype\":\"BF16\",\"shape\":[8],"
                                       "\"data_offsets\":[%zu,%zu]},", a, data, data + 16));
        data += 16;
    }
    if (strchr("hbz", *what)) put_safetensors(in_folder("model.safetensors"), header, -1, data);
    if (!strcmp(what, "zero bias")) patch(16, zeros, 16);
    if (!strcmp(what, "data")) patch(atol(a), counting, (size_t)atol(a));
    if (!strcmp(what, "q8")) as_q8 = 1;
    if (!strcmp(what, "q8")) patch((long)data, zeros, data);
    if (!strcmp(what, "q8")) patch(atol(a), b, case_size[2]);
    goes_on = !strcmp(part[3], "and");
    if (!goes_on) check_load(formatted("%s %s %s", what, a, b), at, 1, part[3]);
}

// ---- from a shape and a seed

static int try_synthetic(const char *shape, Config **c) {
    int code;
    EXPECT_DIE(code, *c = config_synthetic(shape));
    return code;
}

TABLE(config_synthetic, 2, "named shapes, sizes over the defaults; bad shapes with exit code 2") {
    Config *c = NULL;
    int code = try_synthetic(part[0], &c), good = *part[1] == '=';
    const char *dir = formatted("synthetic:%s", part[0]);
    if (good) CHECK(!code && has_values(c, NULL, part[1] + 1) && !strcmp(c->dir, dir), "%s", part[0]);
    else CHECK(code == EXIT_USAGE && strstr(die_text, part[1]), "\"%s\": %d %s", part[0], code, die_text);
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
        const WeightFiles *first = &w[0]->files, *files = &w[i]->files;
        int same = files->block_bytes == first->block_bytes && !memcmp(files->block, first->block, first->block_bytes);
        CHECK(same == (i < 3), "%d threads, seed %d: other weights, or the same", ways[i].threads, ways[i].seed);
    }
    set_threads(threads);
    double sum = 0, sq = 0, n = 333 * 60;
    for (int i = 0; i < 333 * 60; i++) {
        double x = bf16_to_f32(((const uint16_t *)w[0]->embed.data)[i]);
        sum += x;
        sq += x * x;
    }
    CHECK(fabs(sqrt(sq / n) - 2.5 / sqrt(60)) < 0.01 && fabs(sum / n) < 0.01, "std %g mean %g", sqrt(sq / n), sum / n);
    const Layer *y = &w[0]->layer[1];
    CHECK(bf16_to_f32(*(const uint16_t *)y->attn_norm.data) == 1 && y->down.rows == 60 && y->down.cols == 91 &&
          w[0]->head.data == w[0]->embed.data, "layer 1");
    OWN char *out = WRITTEN(f, inspect(c, w[0], f));
    CHECK(strstr(out, "333 x 60") && strstr(out, "in 2 layers") &&
          strstr(out, "KV cache   960 bytes a token in f32, 480 in f16"), "%s", out);
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

// ==================================================================================================== GOLDEN LOGITS
// data/golden, made by data/make_golden.py from transformers.

typedef struct {
    const char *name;
    int n_ids, n_rows, V;
    const int32_t *ids, *rows;  // rows: of which tokens the logits are there
    const float *logits;        // (n_rows,V)
    char *file;
    Config *c;
    Weights *w;
} Golden;

enum { GOLDEN_PREFILL = 70, N_GOLDEN = 16 };

static const char *const golden_names[N_GOLDEN] = {
    "llama2-mha", "llama3-tied", "llama-linear", "llama-biases", "llama-sharded", "llama-mixed", "qwen2-yarn",
    "qwen2-biases", "qwen2-window", "qwen3-norms", "qwen3-layers", "qwen3-yarn", "mistral-window", "mistral-nemo",
    "qwen3-bare", "llama-yarn",
};

// Reads golden.bin and the checkpoint beside it. Returns 0, with a failed CHECK, if one cannot be read.
static int golden_open(Golden *g, const char *name) {
    char err[256] = "";
    const char *dir = formatted("data/golden/%s", name);
    size_t n = 0;
    *g = (Golden){ .name = name, .file = read_bounded(formatted("%s/golden.bin", dir), MOST_TEXT, &n, err) };
    const int32_t *p = (const int32_t *)g->file;
    CHECK(p && !load(dir, 1, &g->c, &g->w), "%s: %s%s", name, err, said);
    if (!p || !g->w) return 0;
    g->n_ids = p[0];
    g->n_rows = p[1];
    g->V = p[2];
    g->ids = p + 3;
    g->rows = g->ids + g->n_ids;
    g->logits = (const float *)(g->rows + g->n_rows);
    CHECK(n == 12 + 4 * (size_t)(g->n_ids + g->n_rows * (1 + g->V)) && g->c->V == g->V, "%s: %zu bytes", name, n);
    // The one checkpoint without a rope_theta says what is used.
    CHECK((strstr(said, "no rope_theta, 10000 is used") != NULL) == !strcmp(name, "llama2-mha"), "%s: %s", name, said);
    return 1;
}

// Frees what golden_open read.
static void golden_close(Golden *g) {
    weights_close(g->w, g->c);
    free(g->file);
}

// The logits (n_ids,V) behind each id, to be freed: prefills of so many, and then a step for each id; 0 inside a
// prefill.
static float *golden_run(const Golden *g, Session *s, const int *prefills) {
    size_t V = (size_t)g->V;
    float *out = xcalloc((size_t)g->n_ids * V, sizeof *out);
    session_reset(s);
    for (int at = 0; at < g->n_ids; ) {
        int n = *prefills ? *prefills++ : 0;
        const float *logits = n ? prefill(s, g->ids + at, n) : decode(s, g->ids[at]);
        at += max_int(n, 1);
        memcpy(out + (size_t)(at - 1) * V, logits, V * sizeof *out);
    }
    return out;
}

static const int at_once[] = { GOLDEN_PREFILL, 0 };

// Those of full attention with these options, as it reads the ids at once.
static float *golden_logits(const Golden *g, const char *options) {
    OWN_SESSION Session *s = session_open(g->c, g->w, options_of(options), "full");
    return golden_run(g, s, at_once);
}

TEST(golden_logits, "every family against transformers: prefill, decode, two turns, token by token, again after "
                    "a reset; -b 7, 64, 512 and 1 or 2 threads: the same logits to the bit") {
    static const int ways[][3] = { { GOLDEN_PREFILL }, { 1 }, { 11, 25 } };
    static const struct { int batch, threads; } same[] = { { 512, 1 }, { 7, 1 }, { 64, 1 }, { 64, 2 } };
    int threads = set_threads(1);
    for (int i = 0; i < N_GOLDEN; i++) {
        Golden g;
        if (!golden_open(&g, golden_names[i])) continue;
        size_t V = (size_t)g.V, left = (size_t)(g.n_ids - GOLDEN_PREFILL + 1), at = 0;
        Session *s = session_open(g.c, g.w, options_of(""), "full");
        float *run[4];
        for (int way = 0; way < 3; way++) {
            run[way] = golden_run(&g, s, ways[way]);
            for (int n = 0; n < g.n_rows; n++) {
                const float *got = run[way] + (size_t)g.rows[n] * V;
                double e = worst(got, g.logits + (size_t)n * V, V, 2e-4, 2e-4, &at);
                int inside = g.rows[n] < ways[way][0] - 1;
                CHECK(inside || e <= 1, "%s, way %d, row %d: logit %zu is %g, %.1f times the bound", g.name, way,
                      g.rows[n], at, got[at], e);
            }
        }
        const size_t from = (GOLDEN_PREFILL - 1) * V;
        double e = worst(run[0] + from, run[1] + from, left * V, 5e-5, 5e-5, &at);
        CHECK(e <= 1, "%s: prefill and token by token differ, %.1f times the bound", g.name, e);
        for (int way = 0; way < 3; way++) free(run[way]);
        session_done(s);
        for (int k = 0; k < 4; k++) {
            set_threads(same[k].threads);
            run[k] = golden_logits(&g, formatted("batch-size=%d%s", same[k].batch, i & 1 ? " ctk=f16 ctv=f16" : ""));
            CHECK(!memcmp(run[0], run[k], (size_t)g.n_ids * V * sizeof *run[k]), "%s: -b %d with %d threads differs",
                  g.name, same[k].batch, same[k].threads);
        }
        for (int k = 0; k < 4; k++) free(run[k]);
        golden_close(&g);
        set_threads(1);
    }
    set_threads(threads);
}

TEST(golden_tiles, "the same with products in tiles, as plain C has them, where weights are BF16") {
    Golden g;
    if (simd_set("amx-plain")) leave_out("AVX-512 with VNNI");
    if (golden_open(&g, "qwen3-norms")) {
        OWN float *tiles = golden_logits(&g, "");
        CHECK(!simd_set("avx512vnni"), "the set that amx-plain adds to is missing");
        OWN float *vectors = golden_logits(&g, "");
        CHECK(memcmp(vectors, tiles, (size_t)(g.n_ids * g.V) * sizeof *tiles), "no product is made in tiles");
        CHECK(!simd_set("amx-plain"), "amx-plain is gone");
        golden_close(&g);
    }
    test_golden_logits();
    simd_set(NULL);
}

TEST(golden_formats, "f16, bf16, q8_0 and q4 rows stay close to the f32 ones and are not the same") {
    static const struct { const char *format; double tol; } tried[] = {
        { "f16", 0.02 }, { "bf16", 0.2 }, { "q8_0", 0.3 }, { "q4", 2 },
    };
    Golden g;
    if (!golden_open(&g, "qwen3-norms")) return;
    const size_t n = (size_t)((g.n_ids - GOLDEN_PREFILL + 1) * g.V);
    const float *want = g.logits + 2 * (size_t)g.V;             // rows 69..79 stand together
    for (int k = 0; k < 4; k++) {
        OWN float *run = golden_logits(&g, formatted("ctk=%s ctv=%s", tried[k].format, tried[k].format));
        const float *got = run + (GOLDEN_PREFILL - 1) * g.V;
        double off = worst(got, want, n, tried[k].tol, tried[k].tol, NULL);
        CHECK(off <= 1, "%s is %g times its bound off", tried[k].format, off);
        CHECK(worst(got, want, n, 2e-4, 2e-4, NULL) > 1, "%s changes nothing: is the option read?", tried[k].format);
    }
    golden_close(&g);
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
