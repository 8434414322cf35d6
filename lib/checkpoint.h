// lib/checkpoint.h - from a folder of Hugging Face files, or a shape and a seed, to a Config and Weights; and
// safetensors files, read and written.
//
// Letters of the shapes:
//   L  layers       H  query heads        G  KV heads        D  head_dim
//   C  model width  F  hidden width of the MLP               V  vocabulary rows
#ifndef LIB_CHECKPOINT_H
#define LIB_CHECKPOINT_H
#include "kernels.h"

#define KVCOMP_VERSION "0.1"

enum { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

enum { HAS = 1, MAY_HAVE };     // a model has such tensors; the files say whether it has them. 0: it has none
enum { MAX_R = 64 };            // query heads a KV head may have: a tile of attention holds them all

typedef struct SafeFile SafeFile;       // a mapped safetensors file, see below

typedef struct {                // what the tensors of a checkpoint lie in
    SafeFile **file;            // mapped (stb_ds array)
    int indexed;                // 1: an index says which of their tensors count (SafeTensor.listed)
    char *block;                // tensors made from a seed, and matrices as DT_Q8 (--weights q8_0)
    size_t block_bytes, block_used;
} WeightFiles;

typedef struct {                // sizes and constants of one checkpoint, all read from its config.json
    char   model_type[32];      // "llama", "mistral", "qwen2", "qwen3"
    int    L, H, G, D, C, F, V; // see the legend
    int    max_pos;             // max_position_embeddings
    float  eps;                 // of every RMSNorm
    int    tied;                // 1: the output matrix is the embedding
    int    qk_norm;             // HAS: RMSNorm per head on q and k, before RoPE (Qwen3)
    int    qkv_bias, o_bias;    // HAS, MAY_HAVE or 0: biases of attention, by config.json and the family
    int    mlp_bias;            // of gate, up and down, likewise
    int    window;              // sliding window W: a query at position p sees keys p-W+1..p; 0: none
    unsigned char *windowed;    // (L) 1: this layer uses the window; NULL: no layer does
    int    rope_type;           // ROPE_*
    double theta, factor;       // RoPE's base and its scaling factor
    double low_freq, high_freq; // llama3
    double beta_fast, beta_slow;// yarn
    double attn_factor;         // yarn: factor on cos and sin; 0: from mscale and mscale_all_dim
    double mscale, mscale_all_dim;  // yarn: see yarn_scale; 0: not given
    int    yarn_exact;          // 1: the ends of yarn's ramp are not rounded ("truncate": false)
    int    orig_pos;            // original_max_position_embeddings
    int    bos;                 // -1: none
    int    eos[8], n_eos;       // end tokens of config and generation_config together
    int    dtype;               // DT_* that most weights have
    char   dir[1024];           // the folder it came from; "synthetic:NAME" when made from a seed
    int    as_q8;               // 1: matrices become DT_Q8 while they are loaded (--weights)
} Config;

typedef struct {                // one decoder layer. SONIC's Nexus branch is another one, with matrices of its own
    Tensor attn_norm, mlp_norm; // (C)
    Tensor wq, wk, wv, wo;      // (H*D,C) (G*D,C) (G*D,C) (C,H*D)
    Tensor bq, bk, bv, bo;      // biases, or none
    Tensor q_norm, k_norm;      // (D), or none
    Tensor gate, up, down;      // (F,C) (F,C) (C,F)
    Tensor bgate, bup, bdown;   // biases of the MLP, or none
} Layer;

typedef struct {
    Tensor embed, norm, head;   // (V,C) (C) (V,C); head.data == embed.data when tied
    Layer *layer;               // (L)
    const double *inv_freq64;   // (D/2) RoPE frequencies after scaling: angles are pos * freq in double (D5)
    float  rope_scale;          // factor on cos and sin (yarn); 1 otherwise
    size_t bytes;               // of all tensors in use
    Tensor known[2];            // the embedding and layer 0's q_proj, by which an adapter knows its base: as the file
                                // has them, with --weights q8_0 too
    WeightFiles files;
} Weights;

#ifdef __cplusplus
extern "C" {
#endif

// ---- config.json
Config *config_load(const char *dir);           // and the end tokens of generation_config.json; exit 3 with the key
Config *config_synthetic(const char *shape);    // "llama-3.2-1b", or "L16,H32,G8,D64,C2048,F8192,V128256"; exit 2
int ids_with_rows(const Config *c, const int *ids, int n);     // how many of them, from the first, have a row

// ---- weights
Weights *weights_load(Config *c);                       // exit 3 with the tensor's name; sets c->dtype
Weights *weights_synthetic(Config *c, uint64_t seed);   // random bf16 weights; sets c->dtype
Weights *weights_planned(const Config *c);              // their bytes and nothing else: no tensor has data
void     weights_close(Weights *w, Config *c);          // either may be NULL
size_t   tensor_bytes(const Tensor *t);
size_t   weights_bytes(const Config *c);                // of all tensors, which need not be there
void     inspect(const Config *c, const Weights *w, FILE *f);   // what --inspect prints
const char *dtype_name(int dt);

// ---- safetensors, read: what safetensors_open returns needs no further checks
enum {
    SAFE_DIMS = 8,              // most dimensions of a tensor
    DT_OTHER = -1,              // a dtype that weights are not read from
};

typedef struct {
    const char *name;
    const char *type;           // dtype as written: "BF16"
    int dtype;                  // DT_* or DT_OTHER
    int n_dim;
    int used;                   // how often safetensors_find has returned it
    int listed;                 // 1: an index says that it is in this file
    int64_t dim[SAFE_DIMS];
    const void *data;           // at any address
    size_t bytes;
} SafeTensor;

struct SafeFile {
    char *path;
    char *map;                  // the whole file
    size_t size;                // bytes of the file
    Json *header;               // owns the names
    SafeTensor *tensor;         // (n) sorted by name
    int n;
};

SafeFile   *safetensors_open (const char *path, char err[512]);        // NULL, and the reason without the path
void        safetensors_close(SafeFile *f);                            // NULL is allowed
SafeTensor *safetensors_find (SafeFile *f, const char *name);          // NULL: there is none
const char *safetensors_meta (const SafeFile *f, const char *key);     // a string of __metadata__, or NULL
int  safe_has_shape(const SafeTensor *t, int rows, int cols, char why[256]);   // rows 0: a vector (cols). 1 or 0

// ---- safetensors, written: tensors as they come, the header when all are there. Exit 1 when something cannot
// be written
typedef struct {
    Saving file;
    const char *option;         // for messages: "--trace"
    FILE *header;               // the JSON in the making
    char *text;                 // what it has become once it is closed, and its bytes
    size_t size;
    uint64_t data;              // bytes of tensors so far
} SafeWriter;

void safe_write_begin   (SafeWriter *w, const char *path, const char *option);
void safe_write_meta    (SafeWriter *w, const char *key, const char *text);    // before the first tensor
void safe_write_meta_end(SafeWriter *w);
void safe_write(SafeWriter *w, const char *name, const char *type, size_t size, const void *x, const int *dim, int dims);
void safe_write_end (SafeWriter *w);                                           // the file takes its place
void safe_write_drop(SafeWriter *w);                                           // it is given up

#ifdef __cplusplus
}
#endif
#endif
