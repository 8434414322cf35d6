// lib/tokenizer.h - from text to ids and back, as a model's tokenizer.json says.
//
//     char err[512];
//     Tokenizer *t = tokenizer_load("models/some", err);          // NULL: the reason is in err
//     int *ids = tokenizer_encode(t, text, strlen(text), 0, NULL);
//     Decoder d = { .t = t };
//     char *back = NULL;
//     for (int i = 0; i < (int)arrlen(ids); i++) back = decode_token(&d, ids[i], back);
//     back = decode_flush(&d, back);
//
// Models are byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek ..) and SentencePiece-style BPE with byte fallback
// (Llama 2, Mistral ..). Ids are those that the Python package `tokenizers` gives. What a file asks for and
// this part does not do exactly is refused by name when it is loaded, because wrong ids make a model that
// quietly talks nonsense.
//
// Texts are bytes with a length. Broken UTF-8 is legal: a byte that starts no well-formed character counts as
// one character, as U+FFFD would. ids, and the text that a Decoder writes, are stb_ds arrays, which the caller
// frees by arrfree. A loaded tokenizer does not change: any number of threads may use it.
#ifndef LIB_TOKENIZER_H
#define LIB_TOKENIZER_H
#include "base.h"

typedef struct Tokenizer Tokenizer;

// ---- Loading
// Loads a tokenizer. path: tokenizer.json, or a folder that holds one; tokenizer_config.json beside it is read
// too (BOS, EOS). NULL, with the reason in err, when there is none or it is refused.
Tokenizer *tokenizer_load(const char *path, char err[512]);

// The tokenizer of the text of a tokenizer.json alone; NULL, with the reason in err.
Tokenizer *tokenizer_parse(const char *json, size_t n, char err[512]);

void tokenizer_free(Tokenizer *t);              // NULL is allowed

// ---- What a tokenizer is made of
enum { MAX_PIECE = 4096 };      // bytes of a token's text at most: what is made of it grows with the square

enum {                          // what a token is: tokenizer_flags
    TOKEN_MODEL   = 1,          // it is in the BPE vocabulary
    TOKEN_ADDED   = 2,          // it is in added_tokens
    TOKEN_SPECIAL = 4,          // it is a special token: decoding may skip it
    TOKEN_GUARDED = 8           // only a text encoded with parse_special may name it: special tokens and turn marks
};

int tokenizer_size      (const Tokenizer *t);           // how many ids there are, holes in the numbering included
int tokenizer_flags     (const Tokenizer *t, int id);   // TOKEN_*; 0: a hole, or an id outside
int tokenizer_is_special(const Tokenizer *t, int id);   // 1: TOKEN_SPECIAL
int tokenizer_bos       (const Tokenizer *t);           // the token that begins a text; -1: none
int tokenizer_eos       (const Tokenizer *t);           // the token that ends one; -1: none
int tokenizer_unk       (const Tokenizer *t);           // stands for characters outside the vocabulary; -1: none
int tokenizer_adds_bos  (const Tokenizer *t);           // 1: the model was trained with BOS before every text

// The id of the token whose text, as the file writes it, is s; -1: there is none.
int text_id(const Tokenizer *t, const char *s, size_t n);

// The text of id as the file writes it, NUL-terminated, and the bytes that id adds to a text; their number is in *len.
// Those of an id outside are "".
const char *tokenizer_text (const Tokenizer *t, int id, int *len);
const char *tokenizer_bytes(const Tokenizer *t, int id, int *len);

// ---- White space
// Do the n >= 1 bytes at s begin with white space? *len is the length of their first character.
int is_space(const char *s, size_t n, int *len);

// The length of the white-space character that ends at s[end] and begins at s[from] or behind it; 0 when no such
// character stands there.
size_t space_before(const char *s, size_t from, size_t end);

// ---- Encoding
// Appends the ids of a text of at most INT_MAX / 8 bytes to ids and returns it. parse_special: 1 where the text
// may name guarded tokens. at_start: 1 where everything begins, the only place where some models put a blank
// before the text. BOS is not added. The time is linear in n, up to a logarithm.
int *encode_at(const Tokenizer *t, const char *text, size_t n, int parse_special, int at_start, int *ids);

// encode_at for what a template writes: guarded tokens count where own (n) is 0, and nowhere else. NULL: everywhere.
int *encode_rendered(const Tokenizer *t, const char *text, const uint16_t *own, size_t n, int at_start, int *ids);

// encode_at for a text with which everything begins.
int *tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int parse_special, int *ids);

// ---- Decoding
// A Decoder is a stream: ids go in, whole characters come out. Bytes that may still become a character are held
// back. Bytes that cannot become one come out as U+FFFD, one for each longest beginning of a character. A new
// Decoder has t, and skip_special if wanted; the rest is 0.
typedef struct {
    const Tokenizer *t;
    int skip_special;           // 1: special tokens add nothing
    int started;                // 1: a byte of the text has come
    int n;                      // bytes held back
    char held[4];
} Decoder;

char *decode_token(Decoder *d, int id, char *out);      // appends what id completes to out, and returns it
char *decode_flush(Decoder *d, char *out);              // ends the stream: what is held back becomes U+FFFD

#endif
