// lib/checkpoint.c - see checkpoint.h.
#define _GNU_SOURCE
#include "checkpoint.h"
#include <ctype.h>
#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <stb/stb_ds.h>

// ==================================================================================================== CHECKPOINTS
// From a folder of Hugging Face files to a Config and Weights. All of it reads files that others
// wrote, so every number is checked before it is used, and a file that cannot be used is refused
// with one line that names the key or the tensor. Tensors are read where their file is mapped.
//   config_load       config.json and generation_config.json -> Config
//   weights_load      model.safetensors, or the shards of model.safetensors.index.json -> Weights
//   config_synthetic, weights_synthetic: both from a shape and a seed, without a checkpoint
//   inspect           what --inspect prints of them

// ---- safetensors
enum { SAFE_HEADER = 100 << 20 };   // most bytes of a header
#define SAFE_TYPES "F32|F16|BF16"   // by DT_*; others are DT_OTHER

// Gives everything back; NULL is allowed.
void safetensors_close(SafeFile *f) {
    if (!f) return;
    if (f->map) munmap(f->map, f->size);
    json_free(f->header);
    free(f->tensor);
    free(f->path);
    free(f);
}

// Orders tensors by name, for qsort and bsearch.
static int safe_by_name(const void *a, const void *b) {
    return strcmp(((const SafeTensor *)a)->name, ((const SafeTensor *)b)->name);
}

// Orders tensors by the place of their data. An empty tensor stands before the one that starts where it lies.
static int safe_by_place(const void *a, const void *b) {
    const SafeTensor *x = a, *y = b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q) return p > q ? 1 : -1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

// Reads one header entry v into t. `data` is where the file's data begin, and they have `size`
// bytes. Returns 0, or -1 with err set.
static int safe_entry(SafeTensor *t, const char *name, const Json *v, const char *data, size_t size,
                      char err[512]) {
    const Json *type = json_get(v, "dtype");
    const Json *shape = json_get(v, "shape");
    const Json *place = json_get(v, "data_offsets");
    if (!json_is(type, JSON_STRING) || !json_is(shape, JSON_ARRAY) || !json_is(place, JSON_ARRAY)
        || place->n != 2 || !place->item[0].is_int || !place->item[1].is_int)
        return fault(err, "tensor %.200s: expected a dtype, a shape and two data_offsets", name);

    *t = (SafeTensor){ .name = name, .type = type->str, .dtype = word_place(SAFE_TYPES, type->str) };

    // The dimensions
    uint64_t bits = t->dtype == DT_OTHER ? 0 : 8 * dtype_size(t->dtype);
    if (shape->n > SAFE_DIMS)
        return fault(err, "tensor %.200s: expected at most %d dimensions, found %d", name, SAFE_DIMS, shape->n);
    t->n_dim = shape->n;
    for (int i = 0; i < shape->n; i++) {
        const Json *d = &shape->item[i];
        if (d->type != JSON_NUMBER || !d->is_int || d->i < 0)
            return fault(err, "tensor %.200s: dimension %d is no whole number >= 0", name, i);
        t->dim[i] = d->i;
        if (__builtin_mul_overflow(bits, (uint64_t)d->i, &bits))
            return fault(err, "tensor %.200s: the product of its dimensions overflows", name);
    }

    // The place of the data must lie in the file and have the size that the shape needs, where a dtype is read.
    int64_t begin = place->item[0].i, end = place->item[1].i;
    if (begin < 0 || end < begin || (uint64_t)end > size)
        return fault(err, "tensor %.200s: data_offsets [%lld,%lld) lie outside the %zu bytes of data "
                     "(is the file truncated?)", name, (long long)begin, (long long)end, size);
    if (t->dtype != DT_OTHER && (uint64_t)(end - begin) != bits / 8)
        return fault(err, "tensor %.200s: its shape needs %llu bytes, its data_offsets span %lld", name,
                     (unsigned long long)bits / 8, (long long)(end - begin));
    t->data = data + begin;
    t->bytes = (size_t)(end - begin);
    return 0;
}

// Reads the header, `len` bytes behind the u64, into f->tensor. The tensors must lie side by side to the end of the
// file, each beginning where the one before it ends. Returns 0, or -1 with err set.
static int safe_header(SafeFile *f, size_t len, char err[512]) {
    const char *data = f->map + 8 + len, *end = data;
    size_t size = f->size - 8 - len;
    char why[256];
    f->header = json_parse(f->map + 8, len, why);
    if (!f->header) return fault(err, "the header is not JSON: %s", why);
    if (f->header->type != JSON_OBJECT) return fault(err, "the header is no JSON object");

    // Every entry is a tensor, except for the metadata.
    f->tensor = xcalloc((size_t)f->header->n + 1, sizeof *f->tensor);
    for (int i = 0; i < f->header->n; i++) {
        const char *name = f->header->key[i];
        const Json *v = &f->header->item[i];
        if (strcmp(name, "__metadata__") && safe_entry(&f->tensor[f->n++], name, v, data, size, err)) return -1;
    }
    f->tensor[f->n].data = f->map + f->size;

    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_place);
    int bad = 0;
    for (SafeTensor *t = f->tensor; t <= f->tensor + f->n && !bad; end = (const char *)t->data + t->bytes, t++) {
        ptrdiff_t gap = (const char *)t->data - end;
        if (gap < 0) bad = fault(err, "tensors %.200s and %.200s overlap", t[-1].name, t->name);
        if (gap > 0)
            bad = fault(err, "%lld bytes of data belong to no tensor: the header's length or its data_offsets are "
                        "wrong", (long long)gap);
    }
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name);
    for (int i = 1; i < f->n; i++)
        if (!strcmp(f->tensor[i].name, f->tensor[i - 1].name))
            return fault(err, "tensor %.200s stands in the header twice", f->tensor[i].name);
    return bad;
}

// Maps the file f->path and reads its header. Returns 0, or -1 with err set.
static int safe_read(SafeFile *f, char err[512]) {
    struct stat st;
    char reason[256];
    int fd = open_input(f->path, &st, reason);
    if (fd < 0) return fault(err, "%s", reason);
    if (st.st_size < 8) {
        close(fd);
        return fault(err, "not a safetensors file: expected a regular file of at least 8 bytes");
    }

    // The mapping stays when its file descriptor is closed.
    f->size = (size_t)st.st_size;
    void *p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    int why = errno;
    close(fd);
    if (p == MAP_FAILED && why == ENOMEM)
        die(EXIT_MEMORY, "out of memory: %s, %zu bytes, could not be mapped", f->path, f->size);
    if (p == MAP_FAILED) return fault(err, "cannot be mapped: %s", strerror(why));
    f->map = p;

    uint64_t len = 0;           // little endian in the file
    for (int i = 7; i >= 0; i--) len = len << 8 | (unsigned char)f->map[i];
    if (!memcmp(f->map, "version ", 8))
        return fault(err, "only a git-lfs pointer, not the weights themselves (git lfs pull fetches them)");
    if (len > SAFE_HEADER)
        return fault(err, "not a safetensors file: a header of %llu bytes, the limit is %d",
                     (unsigned long long)len, SAFE_HEADER);
    if (len > f->size - 8)
        return fault(err, "truncated: a header of %llu bytes in a file of %zu", (unsigned long long)len,
                     f->size);
    return safe_header(f, (size_t)len, err);
}

// Opens a file. Returns NULL, and the reason without the path in err, when it is missing or broken.
SafeFile *safetensors_open(const char *path, char err[512]) {
    SafeFile *f = xcalloc(1, sizeof *f);
    f->path = copy_text(path);
    if (!safe_read(f, err)) return f;
    safetensors_close(f);
    return NULL;
}

// The tensor of that name, or NULL when there is none. The format allows data at any address.
SafeTensor *safetensors_find(SafeFile *f, const char *name) {
    SafeTensor key = { .name = name }, *t = NULL;
    if (f->n) t = bsearch(&key, f->tensor, (size_t)f->n, sizeof *f->tensor, safe_by_name);
    if (t) t->used++;
    return t;
}

// A string of __metadata__, or NULL when there is none under that key.
const char *safetensors_meta(const SafeFile *f, const char *key) {
    const Json *v = json_get(json_get(f->header, "__metadata__"), key);
    return json_is(v, JSON_STRING) ? v->str : NULL;
}

// Has t the shape (rows,cols)? rows 0 asks for a vector (cols). Where it has not, `why` is a complaint that has both.
int safe_has_shape(const SafeTensor *t, int rows, int cols, char why[256]) {
    int n = snprintf(why, 256, "found shape (");
    for (int i = 0; i < t->n_dim; i++)
        n += snprintf(why + n, 256 - (size_t)n, "%s%lld", i ? "," : "", (long long)t->dim[i]);
    n += snprintf(why + n, 256 - (size_t)n, "), expected (");
    if (rows) n += snprintf(why + n, 256 - (size_t)n, "%d,", rows);
    snprintf(why + n, 256 - (size_t)n, "%d)", cols);
    if (!rows) return t->n_dim == 1 && t->dim[0] == cols;
    return t->n_dim == 2 && t->dim[0] == rows && t->dim[1] == cols;
}

// ---- writing a safetensors file
// Begins a file.
void safe_write_begin(SafeWriter *w, const char *path, const char *option) {
    char err[512];
    memset(w, 0, sizeof *w);
    w->option = option;
    if (save_begin_open(&w->file, path, err)) die(EXIT_RUN, "%s %s", option, err);
    w->header = memory_stream(&w->text, &w->size);
    fprintf(w->header, "{\"__metadata__\":{\"written_by\":\"kvcomp %s\"", KVCOMP_VERSION);
}

// A text of the metadata, which come before the first tensor.
void safe_write_meta(SafeWriter *w, const char *key, const char *text) {
    fputc(',', w->header);
    json_escape(w->header, key, strlen(key));
    fputc(':', w->header);
    json_escape(w->header, text, strlen(text));
}

// The metadata are complete.
void safe_write_meta_end(SafeWriter *w) { fputc('}', w->header); }

// Ends the program: what was to be written has not been.
static void safe_write_failed(const SafeWriter *w) {
    die(EXIT_RUN, "%s %.380s: %s", w->option, w->file.path, save_reason());
}

// One tensor x: elements of `size` bytes, and the shape dim (dims). The name needs no escapes.
void safe_write(SafeWriter *w, const char *name, const char *type, size_t size, const void *x,
                       const int *dim, int dims) {
    size_t bytes = size;
    fprintf(w->header, ",\n\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, type);
    for (int i = 0; i < dims; i++) {
        bytes *= (size_t)dim[i];
        fprintf(w->header, "%s%d", i ? "," : "", dim[i]);
    }
    fprintf(w->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)w->data,
            (unsigned long long)(w->data + bytes));
    w->data += bytes;
    if (ftello(w->header) > SAFE_HEADER - (1 << 20))
        die(EXIT_RUN, "%s %.300s: more names than the header of a safetensors file may hold (%d MiB)",
            w->option, w->file.path, SAFE_HEADER >> 20);
    errno = 0;
    if (bytes && fwrite(x, 1, bytes, w->file.f) != bytes) safe_write_failed(w);
}

// Moves the first n bytes of a file up by `by` bytes, the last block first, and goes to its beginning. 0, or -1
// with errno.
static int file_shift(FILE *f, uint64_t n, size_t by) {
    const size_t most = (size_t)1 << 20;
    char *buf = xmalloc(most);
    int bad = 0;
    while (n && !bad) {
        size_t k = n < most ? (size_t)n : most;
        n -= k;
        bad = fseeko(f, (off_t)n, SEEK_SET) || fread(buf, 1, k, f) != k
           || fseeko(f, (off_t)(n + by), SEEK_SET) || fwrite(buf, 1, k, f) != k;
    }
    free(buf);
    return bad || fseeko(f, 0, SEEK_SET) ? -1 : 0;
}

// Ends the file: it takes its place. The header is filled up with blanks, so that the data lie at a
// multiple of 8 bytes.
void safe_write_end(SafeWriter *w) {
    char err[512];
    FILE *f = w->file.f;
    fprintf(w->header, "}%7s", "");
    memory_stream_close(w->header);
    size_t n = w->size / 8 * 8;
    errno = 0;
    if (file_shift(f, w->data, 8 + n)) safe_write_failed(w);
    for (int i = 0; i < 8; i++) fputc((int)(n >> 8 * i & 255), f);
    fwrite(w->text, 1, n, f);
    free(w->text);
    if (save_keep(&w->file, err)) die(EXIT_RUN, "%s %s", w->option, err);
}

// Gives the file up.
void safe_write_drop(SafeWriter *w) {
    memory_stream_close(w->header);
    free(w->text);
    save_drop(&w->file);
}

// ---- config.json
// The reader keeps the first complaint and goes on with defaults, so that everything can be freed
// before die() is called. No value that is read after a complaint is ever used.
typedef struct {
    const char *file;           // its path, for the complaint
    char err[512];              // the first complaint; "": none
} ConfigReader;
enum { ABSENT_IS_ERROR = -1000000 };    // as a default: the key must be there

// The families of models, by their model_type.
static const char *const families[] = { "llama", "mistral", "qwen2", "qwen3" };
enum { FAMILIES = sizeof families / sizeof *families };
#define SUPPORTED "supported: llama (LlamaForCausalLM), mistral (MistralForCausalLM), " \
                  "qwen2 (Qwen2ForCausalLM), qwen3 (Qwen3ForCausalLM)"

// Writes the complaint "file: ..." unless there is one already.
KV_PRINTF(2, 3)
static void config_fail(ConfigReader *r, const char *fmt, ...) {
    if (r->err[0]) return;
    va_list ap;
    int n = snprintf(r->err, sizeof r->err, "%s: ", r->file);
    if (n < 0 || n >= (int)sizeof r->err) return;
    va_start(ap, fmt);
    vsnprintf(r->err + n, sizeof r->err - (size_t)n, fmt, ap);
    va_end(ap);
}

// Writes what was found into buf, for a complaint. Returns buf.
static const char *json_show(const Json *v, char buf[64]) {
    // by JSON_*
    static const char *const what[] = { "null", "a bool", "", "", "an array", "an object" };
    if (v->type == JSON_NUMBER && v->is_int) snprintf(buf, 64, "%lld", (long long)v->i);
    else if (v->type == JSON_NUMBER) snprintf(buf, 64, "%g", v->num);
    else if (v->type == JSON_STRING) snprintf(buf, 64, "\"%.50s\"", v->str);
    else snprintf(buf, 64, "%s", what[v->type]);
    return buf;
}

// The value of a key of o, or NULL when it is absent; null counts as absent.
static const Json *config_key(const Json *o, const char *key) {
    const Json *v = json_get(o, key);
    return v && v->type != JSON_NULL ? v : NULL;
}

// The number under a key, from lo to hi; def when the key is absent. def need not lie in the range.
static double config_number(ConfigReader *r, const Json *o, const char *key, double def, double lo, double hi,
                            int whole) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v && def == ABSENT_IS_ERROR) config_fail(r, "%s is missing", key);
    if (!v) return def;
    if (v->type == JSON_NUMBER && v->num >= lo && v->num <= hi && (v->is_int || !whole)) return v->num;
    config_fail(r, "%s: expected a %snumber from %.10g to %.10g, found %s", key, whole ? "whole " : "", lo, hi,
                json_show(v, buf));
    return def;
}

static int config_int(ConfigReader *r, const Json *o, const char *key, int def, int lo, int hi) {
    return (int)config_number(r, o, key, def, lo, hi, 1);
}

static double config_real(ConfigReader *r, const Json *o, const char *key, double def, double lo, double hi) {
    return config_number(r, o, key, def, lo, hi, 0);
}

// The value under a key, which is to be of a type, JSON_*; NULL when it is absent, or not, with a complaint.
static const Json *config_typed(ConfigReader *r, const Json *o, const char *key, int type, const char *what) {
    const Json *v = config_key(o, key);
    char buf[64];
    if (!v || v->type == type) return v;
    config_fail(r, "%s: expected %s, found %s", key, what, json_show(v, buf));
    return NULL;
}

// The bool under a key, as 0 or 1; def when the key is absent.
static int config_flag(ConfigReader *r, const Json *o, const char *key, int def) {
    const Json *v = config_typed(r, o, key, JSON_BOOL, "true or false");
    return v ? (int)v->i : def;
}

// The string under a key; def when the key is absent.
static const char *config_str(ConfigReader *r, const Json *o, const char *key, const char *def) {
    const Json *v = config_typed(r, o, key, JSON_STRING, "a string");
    return v ? v->str : def;
}

// Is `arch` the class of a family, "LlamaForCausalLM", or the same without its output matrix,
// "LlamaModel"? Checkpoints of the latter kind are used with a tied output.
static int family_class(const char *arch, const char *family) {
    size_t n = strlen(family);
    return !strncasecmp(arch, family, n) && word_place("ForCausalLM|Model", arch + n) >= 0;
}

// Reads the family of the model into c->model_type. Refuses unknown families, quantized checkpoints
// and MLPs without SiLU.
static void config_family(ConfigReader *r, Config *c, const Json *o) {
    const Json *list = config_key(o, "architectures");
    int named = json_is(list, JSON_ARRAY) && list->n && list->item[0].type == JSON_STRING;
    const char *type = config_str(r, o, "model_type", ""), *arch = named ? list->item[0].str : "";
    if (list && !named) config_fail(r, "architectures: expected a list of names");
    if (!*type && !*arch)
        config_fail(r, "model_type and architectures are missing: not a model's config; " SUPPORTED);

    // One of the two may be missing
    int k = 0;
    while (k < FAMILIES && ((*type && strcmp(type, families[k])) || (*arch && !family_class(arch, families[k])))) k++;
    if (k < FAMILIES) snprintf(c->model_type, sizeof c->model_type, "%s", families[k]);
    else config_fail(r, "model_type \"%.60s\", architecture \"%.60s\" is not supported; " SUPPORTED, type, arch);

    if (config_key(o, "quantization_config") || config_key(o, "compression_config")) {
        const char *how = config_str(r, config_key(o, "quantization_config"), "quant_method", "?");
        config_fail(r, "quantized checkpoint (quantization_config, %.40s): kvcomp reads F32, F16 and BF16 "
                    "weights; take the unquantized model", how);
    }
    const char *act = config_str(r, o, "hidden_activation", "silu");
    act = config_str(r, o, "hidden_act", act);
    if (strcmp(act, "silu") && strcmp(act, "swish"))
        config_fail(r, "hidden_act: expected \"silu\", found \"%.40s\"", act);
}

// Keys by which code of other families changes what is computed, and the value with which each changes nothing.
// Under one of our model_types transformers passes over them, and so would kvcomp, to numbers that the model was
// not trained for.
static const struct { const char *key; int neutral; } foreign_keys[] = {
    { "scale_emb", 1 },               { "embedding_multiplier", 1 },    { "residual_multiplier", 1 },
    { "scale_depth", 0 },             { "attention_multiplier", 0 },    { "query_pre_attn_scalar", 0 },
    { "attn_logit_softcapping", 0 },  { "attn_temperature_tuning", 0 }, { "attention_chunk_size", 0 },
    { "final_logit_softcapping", 0 }, { "dim_model_base", 0 },          { "logits_scaling", 1 },
    { "logit_scale", 1 },             { "lm_head_multiplier", 1 },      { "clip_qkv", 0 },
    { "no_rope_layers", 1 },          { "no_rope_layer_interval", 0 },  { "rope_interleaved", 0 },
    { "alibi", 0 },                   { "use_qk_norm", 0 },             { "qk_layernorm", 0 },
    { "use_parallel_residual", 0 },   { "partial_rotary_factor", 1 },   { "llama_4_scaling_beta", 0 },
};
enum { FOREIGN_KEYS = sizeof foreign_keys / sizeof *foreign_keys };

// Does the value v of a foreign key change nothing? A list does so when all its items do.
static int foreign_harmless(const Json *v, int neutral) {
    for (int i = 0; i < v->n; i++)
        if (!foreign_harmless(&v->item[i], neutral)) return 0;
    return v->type == JSON_ARRAY || ((v->type == JSON_BOOL || v->type == JSON_NUMBER) && v->num == neutral);
}

// Refuses keys of o that make another model of one of our families.
static void config_foreign(ConfigReader *r, const Config *c, const Json *o) {
    for (int i = 0; i < FOREIGN_KEYS; i++) {
        const Json *v = config_key(o, foreign_keys[i].key);
        char buf[64];
        if (v && !foreign_harmless(v, foreign_keys[i].neutral))
            config_fail(r, "%s, %s: other families compute with it, which model_type %s does not do, so the numbers "
                        "would be wrong", foreign_keys[i].key, json_show(v, buf), c->model_type);
    }
}

// Can heads of these numbers and sizes be computed? 0, or -1 with err set.
static int config_heads(const Config *c, char err[512]) {
    if (c->H % c->G)
        return fault(err, "num_attention_heads %d is no multiple of num_key_value_heads %d", c->H, c->G);
    if (c->H / c->G > MAX_R)
        return fault(err, "num_attention_heads %d, num_key_value_heads %d: expected at most %d query heads a KV head",
                     c->H, c->G, MAX_R);
    if (c->D % 2 || c->D > 1024)
        return fault(err, "head_dim %d: expected an even number from 2 to 1024 (RoPE turns pairs)", c->D);
    return 0;
}

// Reads the sizes of the model. c->dtype is what the file says; weights_load replaces it by what
// most tensors have.
static void config_sizes(ConfigReader *r, Config *c, const Json *o) {
    int llama = !strcmp(c->model_type, "llama");
    c->C = config_int(r, o, "hidden_size", ABSENT_IS_ERROR, 1, 1 << 18);
    c->F = config_int(r, o, "intermediate_size", ABSENT_IS_ERROR, 1, 1 << 20);
    c->L = config_int(r, o, "num_hidden_layers", ABSENT_IS_ERROR, 1, 1024);
    c->H = config_int(r, o, "num_attention_heads", ABSENT_IS_ERROR, 1, 1024);
    c->G = config_int(r, o, "num_key_value_heads", c->H, 1, 1024);
    c->V = config_int(r, o, "vocab_size", ABSENT_IS_ERROR, 1, 1 << 22);
    int D = !strcmp(c->model_type, "qwen3") && !json_get(o, "head_dim") ? 128 : 0;
    c->D = config_int(r, o, "head_dim", D, 2, 1024);
    c->max_pos = config_int(r, o, "max_position_embeddings", ABSENT_IS_ERROR, 1, 1 << 30);
    c->eps = (float)config_real(r, o, "rms_norm_eps", 1e-6, 1e-12, 1);
    c->tied = config_flag(r, o, "tie_word_embeddings", 0);
    c->qk_norm = !strcmp(c->model_type, "qwen3");
    int bias = config_flag(r, o, "attention_bias", 0) && (llama || c->qk_norm);
    c->o_bias = bias ? MAY_HAVE : 0;
    c->qkv_bias = strcmp(c->model_type, "qwen2") ? c->o_bias : HAS;
    c->mlp_bias = config_flag(r, o, "mlp_bias", 0) && llama ? MAY_HAVE : 0;
    if (r->err[0]) return;

    // What is absent is derived, and the sizes must fit each other.
    if (!c->D) {
        if (c->C % c->H)
            config_fail(r, "hidden_size %d is no multiple of num_attention_heads %d, and there is no "
                        "head_dim", c->C, c->H);
        c->D = c->C / c->H;
    }
    char why[512];
    if (config_heads(c, why)) config_fail(r, "%s", why);

    const char *key = config_key(o, "dtype") ? "dtype" : "torch_dtype";
    int dtype = word_place("float32|float16|bfloat16", config_str(r, o, key, ""));
    c->dtype = dtype < 0 ? DT_BF16 : dtype;
}

// Reads which layers have a sliding window (D6, D7). Mistral: all of them. Qwen: those that
// layer_types names or, without layer_types, those from max_window_layers on if use_sliding_window
// is set. An absent sliding_window means 4096, the default of the models' classes; null means none.
static void config_window(ConfigReader *r, Config *c, const Json *o) {
    int qwen = !strncmp(c->model_type, "qwen", 4), mistral = !strcmp(c->model_type, "mistral");
    if (r->err[0] || !(mistral || qwen)) return;
    const Json *types = qwen ? config_key(o, "layer_types") : NULL;
    int use = mistral || config_flag(r, o, "use_sliding_window", 0);
    int from = qwen ? config_int(r, o, "max_window_layers", 28, 0, 1 << 30) : 0;
    int absent = use && !json_get(o, "sliding_window") ? 4096 : 0;
    int window = config_int(r, o, "sliding_window", absent, 1, 1 << 30);
    if (types && (types->type != JSON_ARRAY || types->n != c->L)) {
        config_fail(r, "layer_types: expected a list of %d names, one a layer", c->L);
        return;
    }

    // One flag a layer; when no layer has a window, c->windowed is NULL.
    int any = 0;
    c->windowed = xcalloc((size_t)c->L, 1);
    for (int l = 0; l < c->L; l++) {
        const Json *t = types ? &types->item[l] : NULL;
        int kind = json_is(t, JSON_STRING) ? word_place("full_attention|sliding_attention", t->str) : -1;
        char buf[64];
        if (t && kind < 0)
            config_fail(r, "layer_types[%d]: expected full_attention or sliding_attention, found %s", l,
                        json_show(t, buf));
        c->windowed[l] = t ? kind > 0 : use && window && l >= from;
        any |= c->windowed[l];
    }
    if (any && !window)
        config_fail(r, "layer_types names sliding_attention layers, but sliding_window is missing");
    if (any) c->window = window;
    if (any) return;
    free(c->windowed);
    c->windowed = NULL;
}

// The object with the parameters of RoPE, or NULL: rope_scaling in old files, rope_parameters in
// new ones. The new one may hold one object per layer type, which is supported where there is one type.
static const Json *config_rope_object(ConfigReader *r, const Json *o) {
    const Json *p = config_typed(r, o, "rope_scaling", JSON_OBJECT, "an object");
    if (!p || !p->n) p = config_typed(r, o, "rope_parameters", JSON_OBJECT, "an object");
    const Json *full = config_key(p, "full_attention");
    if (config_key(p, "sliding_attention"))
        config_fail(r, "rope_parameters: full_attention and sliding_attention that may differ are not supported");
    return full ? full : p;
}

static const char *const rope_types[] = { "default", "linear", "llama3", "yarn" };       // by ROPE_*
enum { ROPE_TYPES = sizeof rope_types / sizeof *rope_types };

// Reads the kind of RoPE (D5). Old files have rope_theta and rope_scaling{type|rope_type, ..}, new
// ones rope_parameters{rope_theta, rope_type, ..}. A rope_type that is not understood is refused:
// ignoring it gives fluent nonsense after a few thousand tokens.
static void config_rope(ConfigReader *r, Config *c, const Json *o) {
    const Json *p = config_rope_object(r, o);
    const char *type = config_str(r, p, "type", "default");
    type = config_str(r, p, "rope_type", type);
    c->theta = config_real(r, o, "rope_theta", 0, 1.5, 1e12);
    c->theta = config_real(r, p, "rope_theta", c->theta, 1.5, 1e12);
    if (c->theta == 0) {
        c->theta = 10000;
        if (!r->err[0]) warn("%s: no rope_theta, 10000 is used", r->file);
    }
    config_foreign(r, c, p);

    // The positions of training may stand in either object; the outer one wins.
    c->factor = 1;
    c->orig_pos = config_int(r, p, "original_max_position_embeddings", c->max_pos, 1, 1 << 30);
    c->orig_pos = config_int(r, o, "original_max_position_embeddings", c->orig_pos, 1, 1 << 30);

    while (c->rope_type < ROPE_TYPES && strcmp(type, rope_types[c->rope_type])) c->rope_type++;
    if (c->rope_type == ROPE_TYPES)
        config_fail(r, "rope_type \"%.40s\" is not supported; supported: default, linear, llama3, yarn", type);
    if (c->rope_type != ROPE_DEFAULT) c->factor = config_real(r, p, "factor", ABSENT_IS_ERROR, 1, 1e6);
    if (c->rope_type == ROPE_LLAMA3) {
        c->low_freq = config_real(r, p, "low_freq_factor", ABSENT_IS_ERROR, 1e-6, 1e6);
        c->high_freq = config_real(r, p, "high_freq_factor", ABSENT_IS_ERROR, 1e-6, 1e6);
        if (c->low_freq >= c->high_freq)
            config_fail(r, "low_freq_factor %g: expected less than high_freq_factor %g", c->low_freq,
                        c->high_freq);
    }
    if (c->rope_type == ROPE_YARN) {
        c->beta_fast = config_real(r, p, "beta_fast", 32, 1e-6, 1e6);
        c->beta_slow = config_real(r, p, "beta_slow", 1, 1e-6, 1e6);
        c->attn_factor = config_real(r, p, "attention_factor", 0, 1e-6, 1e6);
        if (c->beta_fast < c->beta_slow)
            config_fail(r, "beta_fast %g: expected at least beta_slow %g", c->beta_fast, c->beta_slow);
        c->mscale = config_real(r, p, "mscale", 0, 0, 1e6);
        c->mscale_all_dim = config_real(r, p, "mscale_all_dim", 0, 0, 1e6);
        c->yarn_exact = !config_flag(r, p, "truncate", 1);
    }
}

// Adds the eos ids of o, one number or a list, to those of c. An id without an embedding is never
// generated, so it is left out.
static void config_eos(ConfigReader *r, Config *c, const Json *o) {
    const int most = sizeof c->eos / sizeof *c->eos;
    const Json *v = config_key(o, "eos_token_id");
    int list = json_is(v, JSON_ARRAY), n = list ? v->n : v != NULL;
    for (int i = 0; i < n; i++) {
        const Json *e = list ? &v->item[i] : v;
        char buf[64];
        int k = 0;
        if (e->type != JSON_NUMBER || !e->is_int) {
            config_fail(r, "eos_token_id: expected whole numbers, found %s", json_show(e, buf));
            return;
        }
        while (k < c->n_eos && c->eos[k] != e->i) k++;
        if (k < c->n_eos || e->i < 0 || e->i >= c->V) continue;
        if (k == most) config_fail(r, "eos_token_id: more than 8 different ids");
        else c->eos[c->n_eos++] = (int)e->i;
    }
}

// Weights of other formats by the names of their files, and what to do about them.
static const struct { const char *pattern, *why; } foreign_weights[] = {
    { "pytorch_model*", "pickled weights, which are not read: in Python, "
                        "AutoModelForCausalLM.from_pretrained(IN).save_pretrained(OUT) writes safetensors" },
    { "consolidated.*", "weights in the vendor's own layout (interleaved RoPE), which is not read: fetch the "
                        "Hugging Face files, config.json and model*.safetensors" },
    { "?*.gguf",        "a GGUF file, which is not read: fetch the Hugging Face folder it was made from" },
};

// Looks in a folder for such weights: 1 and a complaint in err when it finds some, else 0.
static int foreign_files(const char *dir, char err[512]) {
    int found = 0;
    for (int k = 0; k < 3 && !found; k++) {
        char pattern[1400];
        glob_t files;
        snprintf(pattern, sizeof pattern, "%s/%s", dir, foreign_weights[k].pattern);
        found = !glob(pattern, 0, NULL, &files);
        const char *name = found ? strrchr(*files.gl_pathv, '/') + 1 : "";
        if (found) fault(err, "%.200s: only %.100s: %s", dir, name, foreign_weights[k].why);
        globfree(&files);
    }
    return found;
}

// Parses the object in dir/name. Returns NULL with the reason in err, or with err "" when the file is absent.
static Json *config_file(const char *dir, const char *name, char err[512]) {
    char path[1400];
    err[0] = 0;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    Json *j = file_exists(path) ? json_read(path, MOST_CONFIG, err) : NULL;
    if (!j || j->type == JSON_OBJECT) return j;
    fault(err, "%.400s: expected a JSON object", path);
    json_free(j);
    return NULL;
}

// Why there is no config.json in dir, into err: the folder itself is absent, or has weights of another format. A name
// with a blank or without a slash may be a question that lacks its -p.
static void config_absent(const char *dir, char err[512]) {
    static const char *const folder = "a Hugging Face folder (config.json, model.safetensors, tokenizer.json)";
    char path[1400];
    struct stat st;
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (stat(dir, &st)) {
        int question = strchr(dir, ' ') || !strchr(dir, '/');
        fault(err, "%.300s: no such folder%s", dir, question ? " (-p TEXT asks one question)" : "");
    } else if (!S_ISDIR(st.st_mode)) {
        fault(err, "%.300s: expected %s, found a file", dir, folder);
    } else if (!foreign_files(dir, err) && stat(path, &st)) {
        fault(err, "%.190s: %s; expected %s", path, strerror(errno), folder);
    }
}

// Reads config.json's object o into c. r->err tells whether c can be used.
static void config_read(ConfigReader *r, Config *c, const Json *o) {
    config_family(r, c, o);
    config_sizes(r, c, o);
    config_foreign(r, c, o);
    config_window(r, c, o);
    config_rope(r, c, o);
    c->bos = config_int(r, o, "bos_token_id", -1, -1, INT_MAX);
    if (c->bos >= c->V) c->bos = -1;
    config_eos(r, c, o);
}

// Gives a config back; NULL is allowed.
static void config_free(Config *c) {
    if (c) free(c->windowed);
    free(c);
}

// Reads config.json of a folder, and the eos ids of generation_config.json if it is there. Exit 3
// with the key's name.
Config *config_load(const char *dir) {
    static const char *const names[] = { "config.json", "generation_config.json" };
    Config *c;
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;             // c->dir is the path without slashes at its end
    if (n >= sizeof c->dir) die(EXIT_MODEL, "%.60s...: the path is longer than %zu bytes", dir, sizeof c->dir - 1);
    c = xcalloc(1, sizeof *c);
    memcpy(c->dir, dir, n);

    char file[400];             // the one that is read: complaints name it
    ConfigReader r = { .file = file };
    for (int i = 0; i < 2 && !r.err[0]; i++) {
        Json *o = config_file(c->dir, names[i], r.err);
        snprintf(file, sizeof file, "%.300s/%s", c->dir, names[i]);
        if (o && !i) config_read(&r, c, o);
        if (o && i) config_eos(&r, c, o);
        if (!o && !i && !r.err[0]) config_absent(c->dir, r.err);
        json_free(o);
    }
    if (r.err[0]) {
        config_free(c);
        die(EXIT_MODEL, "%s", r.err);
    }
    return c;
}

// ---- a config without a checkpoint
// Shapes of known models, for --synthetic.
static const struct { const char *name; Config c; } synthetic_shapes[] = {
    { "llama-3.2-1b", { .model_type = "llama", .L = 16, .H = 32, .G = 8, .D = 64, .C = 2048, .F = 8192,
                        .V = 128256, .tied = 1, .eps = 1e-5f, .theta = 5e5, .rope_type = ROPE_LLAMA3,
                        .factor = 32, .low_freq = 1, .high_freq = 4 } },
    { "llama-3.1-8b", { .model_type = "llama", .L = 32, .H = 32, .G = 8, .D = 128, .C = 4096, .F = 14336,
                        .V = 128256, .eps = 1e-5f, .theta = 5e5, .rope_type = ROPE_LLAMA3,
                        .factor = 8, .low_freq = 1, .high_freq = 4 } },
    { "qwen3-4b",     { .model_type = "qwen3", .L = 36, .H = 32, .G = 8, .D = 128, .C = 2560, .F = 9728,
                        .V = 151936, .tied = 1, .qk_norm = 1, .eps = 1e-6f, .theta = 1e6,
                        .factor = 1 } },
    { "tiny",         { .model_type = "llama", .L = 8, .H = 8, .G = 4, .D = 64, .C = 512, .F = 1408,
                        .V = 8192, .tied = 1, .eps = 1e-5f, .theta = 1e4, .factor = 1 } },
};
enum { N_SHAPES = sizeof synthetic_shapes / sizeof *synthetic_shapes };

// Reads sizes such as "L16,H32" into c; a size that is not named stays. Returns 0, or -1 when the
// text is malformed or a size is out of range.
static int synthetic_sizes(Config *c, const char *text) {
    static const char letters[] = "LHGDCFV";
    static const int most[] = { 1024, 1024, 1024, 1024, 1 << 18, 1 << 20, 1 << 22 };
    int *size[] = { &c->L, &c->H, &c->G, &c->D, &c->C, &c->F, &c->V };
    const char *p = text, *at;
    int n;
    do {
        at = *p ? strchr(letters, *p++) : NULL;
        if (!at || !isdigit((unsigned char)*p)) return -1;
        int *to = size[at - letters];
        if (sscanf(p, "%9d%n", to, &n) != 1 || *to < 1 || *to > most[at - letters]) return -1;
        p += n;
    } while (*p++ == ',');
    return p[-1] ? -1 : 0;
}

// A config for runs that measure speed: a known name, or sizes that replace those of llama-3.2-1b.
// Exit 2 for a shape that cannot be.
Config *config_synthetic(const char *shape) {
    int k = 0;
    while (k < N_SHAPES && strcmp(shape, synthetic_shapes[k].name)) k++;
    Config c = synthetic_shapes[k < N_SHAPES ? k : 0].c;
    c.max_pos = 131072;
    c.orig_pos = 8192;
    c.bos = -1;
    c.dtype = DT_BF16;
    snprintf(c.dir, sizeof c.dir, "synthetic:%s", shape);

    // A shape that is no known name is a list of sizes.
    if (k == N_SHAPES && synthetic_sizes(&c, shape))
        die(EXIT_USAGE, "shape \"%.60s\": expected llama-3.2-1b, llama-3.1-8b, qwen3-4b, tiny or sizes such "
            "as L16,H32,G8,D64,C2048,F8192,V128256", shape);
    char why[512];
    if (config_heads(&c, why)) die(EXIT_USAGE, "shape \"%.60s\": %s", shape, why);
    Config *out = xmalloc(sizeof *out);
    *out = c;
    return out;
}

// ---- weights
// One table names every tensor, its sizes and which models have it. Loading, making, counting and printing walk it.
// rows and cols are letters of the legend; Q is H*D, K is G*D, and 1 row makes a vector. What stands between
// the embedding and the last norm is a layer's. The output matrix is there if it is not tied. has: where Config
// says HAS or MAY_HAVE; 0: every model has it.
static const struct { const char *name; size_t at; char rows, cols; size_t has; } tensors[] = {
    { "model.embed_tokens.weight",       offsetof(Weights, embed),   'V', 'C', 0 },
    { "input_layernorm.weight",          offsetof(Layer, attn_norm), '1', 'C', 0 },
    { "self_attn.q_proj.weight",         offsetof(Layer, wq),        'Q', 'C', 0 },
    { "self_attn.k_proj.weight",         offsetof(Layer, wk),        'K', 'C', 0 },
    { "self_attn.v_proj.weight",         offsetof(Layer, wv),        'K', 'C', 0 },
    { "self_attn.q_proj.bias",           offsetof(Layer, bq),        '1', 'Q', offsetof(Config, qkv_bias) },
    { "self_attn.k_proj.bias",           offsetof(Layer, bk),        '1', 'K', offsetof(Config, qkv_bias) },
    { "self_attn.v_proj.bias",           offsetof(Layer, bv),        '1', 'K', offsetof(Config, qkv_bias) },
    { "self_attn.q_norm.weight",         offsetof(Layer, q_norm),    '1', 'D', offsetof(Config, qk_norm) },
    { "self_attn.k_norm.weight",         offsetof(Layer, k_norm),    '1', 'D', offsetof(Config, qk_norm) },
    { "self_attn.o_proj.weight",         offsetof(Layer, wo),        'C', 'Q', 0 },
    { "self_attn.o_proj.bias",           offsetof(Layer, bo),        '1', 'C', offsetof(Config, o_bias) },
    { "post_attention_layernorm.weight", offsetof(Layer, mlp_norm),  '1', 'C', 0 },
    { "mlp.gate_proj.weight",            offsetof(Layer, gate),      'F', 'C', 0 },
    { "mlp.gate_proj.bias",              offsetof(Layer, bgate),     '1', 'F', offsetof(Config, mlp_bias) },
    { "mlp.up_proj.weight",              offsetof(Layer, up),        'F', 'C', 0 },
    { "mlp.up_proj.bias",                offsetof(Layer, bup),       '1', 'F', offsetof(Config, mlp_bias) },
    { "mlp.down_proj.weight",            offsetof(Layer, down),      'C', 'F', 0 },
    { "mlp.down_proj.bias",              offsetof(Layer, bdown),     '1', 'C', offsetof(Config, mlp_bias) },
    { "model.norm.weight",               offsetof(Weights, norm),    '1', 'C', 0 },
    { "lm_head.weight",                  offsetof(Weights, head),    'V', 'C', 0 },
};
enum { N_LINES = sizeof tensors / sizeof *tensors, N_OF_LAYER = N_LINES - 3 };

// The size that a letter of the table stands for.
static int config_size(const Config *c, char letter) {
    switch (letter) {
    case 'C': return c->C;
    case 'D': return c->D;
    case 'F': return c->F;
    case 'V': return c->V;
    case 'Q': return c->H * c->D;
    case 'K': return c->G * c->D;
    default:  return 1;
    }
}

typedef struct {                // one tensor of a model, and how far a walk has come
    int next;                   // tensors before the next one
    int line, layer;            // its line of the table, and its layer; -1: none
    char name[80];              // as files have it
    Tensor *t;                  // where it belongs; nowhere, when the walk has no weights
    int matrix, rows, cols;     // matrix 0: a vector, of one row
    int needed;                 // 1: this model must have it, 0: it may
} Place;

// Goes on to the next tensor that the model may have: for (Place p = {0}; tensor_next(c, w, &p); ). Returns 0 when
// there is none.
static int tensor_next(const Config *c, const Weights *w, Place *p) {
    int n, inner, has, of_layers = c->L * N_OF_LAYER;
    do {
        n = p->next++;
        if (n > of_layers + (c->tied ? 1 : 2)) return 0;
        inner = n > 0 && n <= of_layers;
        p->layer = inner ? (n - 1) / N_OF_LAYER : -1;
        p->line = inner ? 1 + (n - 1) % N_OF_LAYER : n ? n - of_layers + N_OF_LAYER : 0;
        has = tensors[p->line].has ? *(const int *)((const char *)c + tensors[p->line].has) : HAS;
    } while (!has);
    p->needed = has == HAS;
    p->matrix = tensors[p->line].rows != '1';
    p->rows = config_size(c, tensors[p->line].rows);
    p->cols = config_size(c, tensors[p->line].cols);
    if (inner) snprintf(p->name, sizeof p->name, "model.layers.%d.%s", p->layer, tensors[p->line].name);
    else snprintf(p->name, sizeof p->name, "%s", tensors[p->line].name);
    if (w) p->t = (Tensor *)((inner ? (char *)&w->layer[p->layer] : (char *)w) + tensors[p->line].at);
    return 1;
}

// Bytes of a tensor's data.
size_t tensor_bytes(const Tensor *t) {
    if (t->dtype == DT_Q8) return q8_tensor_bytes(t->rows, t->cols);
    return (size_t)t->rows * (size_t)t->cols * dtype_size(t->dtype);
}

// ---- RoPE frequencies
// yarn: the pair i, a real number, whose angle makes `beta` full turns in the positions of training
//   orig_pos * theta^(-2i/D) = 2 pi beta   =>   i = D log(orig_pos / (2 pi beta)) / (2 log theta)
static double yarn_pair(const Config *c, double beta) {
    double log_ratio = log(c->orig_pos / (beta * 2 * M_PI));
    return c->D * log_ratio / (2 * log(c->theta));
}

// yarn: the factor on cos and sin. It is attention_factor; without it s(mscale) / s(mscale_all_dim);
// without those two s(1), where s(m) = 0.1 m ln(factor) + 1.
static double yarn_scale(const Config *c) {
    if (c->attn_factor > 0) return c->attn_factor;
    if (c->factor <= 1) return 1;
    double step = 0.1 * log(c->factor);
    if (c->mscale == 0 || c->mscale_all_dim == 0) return step + 1;
    return (step * c->mscale + 1) / (step * c->mscale_all_dim + 1);
}

// llama3: the frequency x after scaling. With wavelen = 2 pi / x:
//   wavelen < orig_pos / high_freq:  x            a short wave stays
//   wavelen > orig_pos / low_freq:   x / factor   a long one is stretched
//   between:                         (1 - s) x / factor + s x, where
//                                    s = (orig_pos / wavelen - low_freq) / (high_freq - low_freq)
static double llama3_frequency(const Config *c, double x) {
    double wavelen = 2 * M_PI / x;
    if (wavelen < c->orig_pos / c->high_freq) return x;
    if (wavelen > c->orig_pos / c->low_freq) return x / c->factor;
    double s = (c->orig_pos / wavelen - c->low_freq) / (c->high_freq - c->low_freq);
    return (1 - s) * x / c->factor + s * x;
}

// Sets f (D/2), one frequency per pair (i, i+D/2): theta^(-2i/D), then the scaling of config.json
// (D5). *scale is the factor on cos and sin. All in double.
static void rope_frequencies(const Config *c, double *f, float *scale) {
    double low = 0, high = 0;
    *scale = 1;
    if (c->rope_type == ROPE_YARN) {
        low = yarn_pair(c, c->beta_fast);
        high = yarn_pair(c, c->beta_slow);
        low = fmax(c->yarn_exact ? low : floor(low), 0);
        high = fmin(c->yarn_exact ? high : ceil(high), c->D - 1);
        if (low == high) high += 0.001;
        *scale = (float)yarn_scale(c);
    }
    for (int i = 0; i < c->D / 2; i++) {
        double x = pow(c->theta, -2.0 * i / c->D);
        if (c->rope_type == ROPE_LINEAR) x /= c->factor;
        if (c->rope_type == ROPE_LLAMA3) x = llama3_frequency(c, x);
        if (c->rope_type == ROPE_YARN) {
            // Pairs below low turn fast enough to stay as they are, pairs above high are stretched,
            // a ramp lies between.
            double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
            x = x / c->factor * ramp + x * (1 - ramp);
        }
        f[i] = x;
    }
}

// ---- loading
static size_t round_up_64(size_t n) { return (n + 63) / 64 * 64; }

// Weights with their RoPE frequencies and no tensors yet.
static Weights *weights_new(const Config *c) {
    Weights *w = xcalloc(1, sizeof *w);
    double *f = xmalloc((size_t)(c->D / 2) * sizeof *f);
    w->layer = xcalloc((size_t)c->L, sizeof *w->layer);
    rope_frequencies(c, f, &w->rope_scale);
    w->inv_freq64 = f;
    return w;
}

// Gives both back; either may be NULL.
void weights_close(Weights *w, Config *c) {
    if (w) {
        for (size_t i = 0; i < arrlenu(w->files.file); i++) safetensors_close(w->files.file[i]);
        arrfree(w->files.file);
        if (w->files.block) munmap(w->files.block, w->files.block_bytes);
        free((void *)w->inv_freq64);
        free(w->layer);
        free(w);
    }
    config_free(c);
}

// The open file dir/name, which is opened if it is not. The name of a shard comes from a file, so only a plain
// name in that folder is opened. Returns NULL with err set when that cannot be.
static SafeFile *weights_file(WeightFiles *wf, const char *dir, const char *name, char err[512]) {
    char path[1400], why[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    for (size_t i = 0; i < arrlenu(wf->file); i++)
        if (!strcmp(wf->file[i]->path, path)) return wf->file[i];
    SafeFile *f = NULL;
    if (!*name || *name == '.' || strchr(name, '/') || strlen(name) > 255)
        fault(err, "%.200s/model.safetensors.index.json: weight_map names the file \"%.80s\", expected a name in "
              "the same folder", dir, name);
    else if (!(f = safetensors_open(path, why)))
        fault(err, "%.200s/%.100s: %.200s", dir, name, why);
    else
        arrput(wf->file, f);
    return f;
}

// Opens the files of a folder: those that model.safetensors.index.json names or, without it,
// model.safetensors. Other weights may lie beside them, so the folder is never searched. Returns 0,
// or -1 with err set.
static int weights_open(WeightFiles *wf, const char *dir, char err[512]) {
    Json *index = config_file(dir, "model.safetensors.index.json", err);
    if (err[0]) return -1;
    if (!index) {
        char path[1400];
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        if (!file_exists(path) && foreign_files(dir, err)) return -1;
        return weights_file(wf, dir, "model.safetensors", err) ? 0 : -1;
    }

    // weight_map: name of a tensor -> name of its file
    const Json *map = json_get(index, "weight_map");
    if (!json_is(map, JSON_OBJECT) || !map->n)
        fault(err, "%.300s/model.safetensors.index.json: no weight_map", dir);
    for (int i = 0; !err[0] && i < map->n; i++) {
        const Json *v = &map->item[i];
        SafeFile *f = v->type == JSON_STRING ? weights_file(wf, dir, v->str, err) : NULL;
        SafeTensor *t = f ? safetensors_find(f, map->key[i]) : NULL;
        if (t) t->listed = 1;
        if (v->type != JSON_STRING)
            fault(err, "%.200s/model.safetensors.index.json: weight_map: %.100s is no file name", dir, map->key[i]);
    }
    wf->indexed = 1;
    json_free(index);
    return err[0] ? -1 : 0;
}

// The tensor of that name, in the file that the index says; NULL: there is none.
static SafeTensor *weights_find(WeightFiles *wf, const char *name) {
    for (size_t i = 0; i < arrlenu(wf->file); i++) {
        SafeTensor *t = safetensors_find(wf->file[i], name);
        if (t && (t->listed || !wf->indexed)) return t;
    }
    return NULL;
}

// Finds the tensor p, checks its dtype and its shape and sets *p->t. Returns 0, or -1 with err set. A tensor that
// is absent and not needed leaves p->t->data NULL and is no error. Checkpoints that were saved without their
// output matrix have names without "model." at the front.
static int weights_take(WeightFiles *wf, const Config *c, const Place *p, char err[512]) {
    SafeTensor *t = weights_find(wf, p->name);
    char why[256];
    if (!t && !strncmp(p->name, "model.", 6)) t = weights_find(wf, p->name + 6);
    if (!t) return p->needed ? fault(err, "%.200s: tensor %s is missing", c->dir, p->name) : 0;
    if (t->dtype == DT_OTHER)
        return fault(err, "%.200s: tensor %s is %.40s, expected F32, F16 or BF16; take a model that is not quantized",
                     c->dir, p->name, t->type);
    if (!safe_has_shape(t, p->matrix ? p->rows : 0, p->cols, why))
        return fault(err, "%.110s: tensor %.100s: %.250s from config.json", c->dir, p->name, why);
    *p->t = (Tensor){ t->data, t->dtype, p->rows, p->cols };
    return 0;
}

// Bytes that the tensor p takes when it is made: as DT_Q8, if that is what matrices become, or in numbers of dtype.
static size_t made_bytes(const Config *c, const Place *p, int dtype) {
    return tensor_bytes(&(Tensor){ NULL, c->as_q8 && p->matrix ? DT_Q8 : dtype, p->rows, p->cols });
}

// Bytes of all weights of c, which need not be there.
size_t weights_bytes(const Config *c) {
    size_t n = 0;
    for (Place p = {0}; tensor_next(c, NULL, &p); )
        if (p.needed) n += made_bytes(c, &p, c->dtype);
    return n;
}

// Maps one block for all tensors that are made: matrices as DT_Q8, or all of them in bf16. Exit 4 when there is
// no memory.
static void weights_block(Weights *w, const Config *c, int vectors, const char *what) {
    size_t n = 0;
    for (Place p = {0}; tensor_next(c, NULL, &p); )
        if (p.needed && (p.matrix || vectors)) n += round_up_64(made_bytes(c, &p, DT_BF16));
    void *block = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
        weights_close(w, NULL);
        die(EXIT_MEMORY, "out of memory: %zu bytes of %s could not be had", n, what);
    }
    w->files.block = block;
    w->files.block_bytes = n;
#ifdef MADV_HUGEPAGE
    madvise(block, n, MADV_HUGEPAGE);   // fewer page walks when it is read; nothing depends on the answer
#endif
}

// The next bytes of that block.
static char *block_take(Weights *w, size_t bytes) {
    char *p = w->files.block + w->files.block_used;
    w->files.block_used += round_up_64(bytes);
    return p;
}

// The matrix p becomes DT_Q8 in that block. The pages it was read from may leave memory. Exit 3 with the tensor's
// name when a weight is too large for that.
static void q8_take(Weights *w, const Config *c, const Place *p) {
    Tensor *t = p->t;
    char *to = block_take(w, made_bytes(c, p, t->dtype));
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t from = ((size_t)t->data + page - 1) / page * page, end = ((size_t)t->data + tensor_bytes(t)) / page * page;
    float top = q8_store(to, t);
    if (top > Q8_MOST) {
        weights_close(w, NULL);
        die(EXIT_MODEL, "%.300s: tensor '%s' has a weight of %.4g, --weights q8_0 holds up to %.4g", c->dir, p->name,
            top, Q8_MOST);
    }
    if (end > from) madvise((void *)from, end - from, MADV_DONTNEED);
    *t = (Tensor){ to, DT_Q8, t->rows, t->cols };
}

// All matrices of a checkpoint, one after the other: what is held beside them is one matrix.
static void q8_weights(Weights *w, const Config *c) {
    weights_block(w, c, 0, "weights in 8 bits");
    for (Place p = {0}; tensor_next(c, w, &p); ) {
        if (p.line == 0 || p.line == 1) progress_tell("loading", (p.layer + 1.0) / (c->L + 2));
        if (p.matrix) q8_take(w, c, &p);
    }
    progress_tell("loading", 1);
}

// Opens the files of c->dir and finds every tensor. Returns 0, or -1 with err set. Next to a tied output an lm_head may
// stand if it is the embedding once more (D7).
static int weights_read(Weights *w, Config *c, char err[512]) {
    if (weights_open(&w->files, c->dir, err)) return -1;
    for (Place p = {0}; tensor_next(c, w, &p); )
        if (weights_take(&w->files, c, &p, err)) return -1;
    if (!c->tied) return 0;
    Place head = { .name = "lm_head.weight", .t = &w->head, .matrix = 1, .rows = c->V, .cols = c->C };
    if (weights_take(&w->files, c, &head, err)) return -1;
    if (!w->head.data || (w->head.dtype == w->embed.dtype
                          && !memcmp(w->head.data, w->embed.data, tensor_bytes(&w->embed)))) return 0;
    return fault(err, "%.200s: config.json ties the output to the embedding, but lm_head.weight is there and differs "
                 "(with tie_word_embeddings false it is used)", c->dir);
}

// All tensors are there: sets w->bytes to the sum over them, c->dtype to the dtype that most bytes have, and the head
// of a tied output.
static void weights_count(Weights *w, Config *c) {
    size_t by[4] = { 0 };       // bytes by DT_*
    w->bytes = 0;
    for (Place p = {0}; tensor_next(c, w, &p); )
        if (p.t->data) by[p.t->dtype] += tensor_bytes(p.t);
    c->dtype = DT_BF16;
    for (int k = DT_Q8; k >= DT_F32; k--) {
        w->bytes += by[k];
        if (by[k] > by[c->dtype]) c->dtype = k;
    }
    if (by[DT_Q8]) c->dtype = DT_Q8;
    if (c->tied) w->head = w->embed;
}

// Warns of tensors that nobody asked for. Stored RoPE frequencies are none of them: older checkpoints have them. Nor
// are biases that config.json denies: transformers leaves them out, the code that the model was trained with did not.
// If one is not zero, that is -1 with err set; 0 otherwise.
static int weights_leftovers(const WeightFiles *wf, const Config *c, char err[512]) {
    const char *first = NULL;
    int left = 0;
    for (size_t i = 0; i < arrlenu(wf->file); i++) {
        for (const SafeTensor *t = wf->file[i]->tensor; t < wf->file[i]->tensor + wf->file[i]->n; t++) {
            size_t n = strlen(t->name);
            int bias = n > 5 && !strcmp(t->name + n - 5, ".bias");
            const char *p = t->data;
            if (t->used > t->listed || strstr(t->name, "rotary_emb.inv_freq")) continue;    // the index asked once
            if (bias && t->bytes && (*p || memcmp(p, p + 1, t->bytes - 1)))
                return fault(err, "%.200s: tensor %.150s is not zero, but by its family, attention_bias and mlp_bias "
                             "in config.json the model has no such bias", c->dir, t->name);
            if (!left && !bias) first = t->name;
            left += !bias;
        }
    }
    if (left)
        warn("warning: %s: %d tensor%s not used, the first: %s", c->dir, left, left > 1 ? "s are" : " is", first);
    return 0;
}

// The weights of the checkpoint that c was read from. Exit 3 with the tensor's name. Sets c->dtype.
Weights *weights_load(Config *c) {
    Weights *w = weights_new(c);
    char err[512] = "";
    if (weights_read(w, c, err) || weights_leftovers(&w->files, c, err)) {
        weights_close(w, NULL);
        die(EXIT_MODEL, "%s", err);
    }
    w->known[0] = w->embed;
    w->known[1] = w->layer[0].wq;
    if (c->as_q8) q8_weights(w, c);
    weights_count(w, c);
    return w;
}

// ---- weights from a seed
// Makes t at `to`: uniform bf16 numbers of the given standard deviation, four of each draw of 64 bits; std 0 asks for
// all ones. Each row has a seed of its own, so the number of threads does not change the bits.
static void make_tensor(Tensor *t, void *to, int rows, int cols, double std, uint64_t seed) {
    const uint16_t one = 0x3f80;
    float unit = (float)(std * 1.7320508075688772 / 32768);     // uniform: sqrt(3) std to both sides
    *t = (Tensor){ to, DT_BF16, rows, cols };
    #pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
        uint16_t *row = (uint16_t *)to + (size_t)r * (size_t)cols;
        uint64_t state = mix64(seed ^ mix64((uint64_t)r + 1)), z = 0;
        for (int i = 0; i < cols; i++, z >>= 16) {
            if (i % 4 == 0 && std > 0) z = splitmix64(&state);
            row[i] = std > 0 ? f32_to_bf16((float)(int16_t)(z & 0xffff) * unit) : one;
        }
    }
}

// The bytes of c's weights and nothing else: no tensor has data. For a plan.
Weights *weights_planned(const Config *c) {
    Weights *w = weights_new(c);
    w->bytes = weights_bytes(c);
    return w;
}

// Random bf16 weights of the right sizes, for measurements of speed and for tests. Logits get a
// standard deviation of about 2.5, and every branch writes into the residual stream at the scale of
// the embedding, so that depth changes nothing. Sets c->dtype.
Weights *weights_synthetic(Config *c, uint64_t seed) {
    Weights *w = weights_new(c);
    weights_block(w, c, 1, "synthetic weights (a smaller shape needs less)");

    // The last norm gives x (C) the length sqrt(C), so its products with rows of deviation std have
    // the deviation 2.5. A layer's matrix keeps the size of its input. The two that write into the residual
    // stream, those with C rows, bring it down to the embedding's. Norms are all ones.
    double std = 2.5 / sqrt(c->C);
    for (Place p = {0}; tensor_next(c, w, &p); ) {
        if (!p.needed) continue;
        double spread = p.layer < 0 ? std : (tensors[p.line].rows == 'C' ? std : 1) / sqrt(p.cols);
        uint64_t number = p.layer < 0 ? 1 + (p.line > 0) : mix64((uint64_t)p.layer * 64 + (uint64_t)p.line + 15);
        if (strstr(p.name, "norm")) spread = 0;
        size_t bytes = tensor_bytes(&(Tensor){ NULL, DT_BF16, p.rows, p.cols });
        int becomes_q8 = c->as_q8 && p.matrix;
        void *to = becomes_q8 ? xmalloc(bytes) : block_take(w, bytes);
        make_tensor(p.t, to, p.rows, p.cols, spread, mix64(seed ^ number));
        if (!becomes_q8) continue;
        q8_take(w, c, &p);
        free(to);
    }
    w->known[0] = w->embed;
    w->known[1] = w->layer[0].wq;
    weights_count(w, c);
    return w;
}

// ---- --inspect
// What --inspect prints: the config, the tensors, their bytes, and what one token costs in the
// cache.
void inspect(const Config *c, const Weights *w, FILE *f) {
    int windowed = 0;
    for (int l = 0; l < c->L; l++) windowed += c->windowed && c->windowed[l];
    fprintf(f, "model      %s, %s\n", c->model_type, c->dir);
    fprintf(f, "sizes      L %d layers, H %d query heads, G %d KV heads, D %d head_dim, C %d width, "
            "F %d MLP, V %d vocabulary\n", c->L, c->H, c->G, c->D, c->C, c->F, c->V);
    fprintf(f, "rope       %s, theta %g, factor %g, trained for %d positions, max_position_embeddings %d\n",
            rope_types[c->rope_type], c->theta, c->factor, c->orig_pos, c->max_pos);
    fprintf(f, "norm       eps %g, QK-norm %s\n", c->eps, c->qk_norm ? "yes" : "no");
    if (c->window)
        fprintf(f, "window     %d positions in %d of %d layers\n", c->window, windowed, c->L);
    fprintf(f, "tokens     bos %d, eos", c->bos);
    for (int i = 0; i < c->n_eos; i++) fprintf(f, " %d", c->eos[i]);
    fprintf(f, "%s\n", c->n_eos ? "" : " none");
    fprintf(f, "output     %s\n", c->tied ? "tied to the embedding" : "own matrix");

    fprintf(f, "tensors\n");
    for (Place p = {0}; tensor_next(c, w, &p); ) {          // of the layers the first
        char layers[40] = "";
        if (p.layer > 0 || !p.t->data) continue;
        if (!p.layer) snprintf(layers, sizeof layers, " in %d layers", c->L);
        fprintf(f, "  %-46s %-4s %d x %d%s\n", p.name, dtype_name(p.t->dtype), p.rows, p.cols, layers);
    }

    size_t token = (size_t)c->L * (size_t)c->G * (size_t)c->D * 2;
    fprintf(f, "weights    %zu bytes, mostly %s\n", w->bytes, dtype_name(c->dtype));
    fprintf(f, "KV cache   %zu bytes a token in f32, %zu in f16 (uncompressed)\n", token * 4, token * 2);
}

// How many of the ids (n), from the first on, have a row in the embedding: n when all of them do.
int ids_with_rows(const Config *c, const int *ids, int n) {
    int i = 0;
    while (i < n && ids[i] >= 0 && ids[i] < c->V) i++;
    return i;
}

// The name of a DT_* constant.
const char *dtype_name(int dt) {
    static const char *const names[] = { "f32", "f16", "bf16", "q8_0" };
    return names[dt];
}
