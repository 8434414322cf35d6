// lib/tokenizer.h - from text to ids and back, as a folder's tokenizer.json or tokenizer.model says.
#ifndef LIB_TOKENIZER_H
#define LIB_TOKENIZER_H
#include "base.h"
#include <limits.h>

typedef struct Tokenizer Tokenizer;

typedef struct {
    uint64_t key;               // UINT64_MAX: the slot is empty. No caller uses that key
    int64_t val;
} MapSlot;

typedef struct {
    MapSlot *slot;              // (cap) a key stands at its hash, or in a slot behind it
    size_t cap;                 // a power of two, or 0
    size_t n;                   // slots in use, at most half of cap
} Map;

enum {                          // Piece.flags
    PIECE_USED = 1,             // the id exists
    PIECE_MODEL = 2,            // the piece is in the BPE vocabulary
    PIECE_ADDED = 4,            // it is in added_tokens
    PIECE_SPECIAL = 8,          // it is a special token: decoding may skip it
    PIECE_NORMALIZED = 16       // it is an added token that stands for its normalized text
};

typedef struct {                // one token of the vocabulary
    size_t text;                // the text as the file writes it: offset into Tokenizer.chars
    size_t bytes;               // the decoded form: offset into Tokenizer.chars
    int n_text, n_bytes;        // their lengths in bytes
    int flags;                  // PIECE_*
} Piece;

typedef struct {                // a token that is cut out of a text before BPE sees it
    int id;
    int guarded;                // 1: only a text encoded with parse_special may name it
    int lstrip, rstrip;         // 1: it swallows the white space before it, behind it
} AddedToken;

enum {                          // steps of a normalizer
    NORM_NFC,                   // Unicode normalization form C
    NORM_PREPEND,               // puts `to` before every segment
    NORM_PREPEND_START,         // puts `to` before the segment with which everything begins
    NORM_REPLACE                // replaces every `from` by `to`
};

typedef struct {
    int kind;                   // NORM_*
    char from[8], to[8];
} NormStep;

enum {                          // how a pre-tokenizer splits a text
    SPLIT_LLAMA3,               // the regular expression of Llama 3: numbers in groups of 3 digits
    SPLIT_QWEN2,                // Qwen 2: the same with single digits
    SPLIT_GPT2,                 // GPT-2, and ByteLevel with use_regex
    SPLIT_TEKKEN,               // Mistral's Tekken: also splits where a capital begins a word
    SPLIT_O200K,                // o200k: Tekken's, with contractions and numbers in groups of 3 digits
    SPLIT_DEEPSEEK3,            // DeepSeek V3, behind its splits of numbers and of Chinese and Japanese
    SPLIT_TRAILING,             // white space at the end of a text
    SPLIT_PUNCTUATION,          // Punctuation, behavior Isolated: every sign is a word
    SPLIT_PUNCTUATIONS,         // Punctuation, behavior Contiguous: every run of signs is a word
    SPLIT_DIGITS,               // Digits, individual_digits true: every digit is a word
    SPLIT_NUMBERS,              // Digits, individual_digits false: every run of digits is a word
    SPLIT_BYTE_DIGITS,          // Digits behind ByteLevel, individual_digits true
    SPLIT_BYTE_NUMBERS,         // Digits behind ByteLevel, individual_digits false
    SPLIT_METASPACE,            // Metaspace: a word begins at every U+2581
    SPLIT_RUN                   // SPLIT_RUN + k: the run Tokenizer.run[k]
};

typedef struct {                // a pattern such as \s?[a-z\p{N}]{1,3}: characters of one set, so many in a row
    int blank;                  // 1: a white space may stand before them (\s?)
    int least, most;            // how many; most INT_MAX: any number
    int classes;                // the set: U_* ...
    int signs;                  // ... SIGN_* ...
    uint32_t *range;            // ... and code points: an stb array, first, last, first, last ..
} SetRun;

enum {                          // does the pre-tokenizer Metaspace put a U+2581 before a text?
    META_NONE,                  // there is no Metaspace
    META_NEVER,                 // no
    META_FIRST,                 // only where everything begins
    META_ALWAYS                 // before every text between added tokens
};

enum {
    MAX_STEPS = 4,              // steps of a normalizer at most
    MAX_SPLITS = 8,             // splits of a pre-tokenizer at most
    MAX_PIECE = 4096            // bytes of a token's text at most: what is made of it grows with the square
};

struct Tokenizer {
    // The vocabulary
    Piece *piece;               // (tokenizer_size) by id; flags 0: a hole in the numbering
    char *chars;                // every text and every decoded form
    int *by_text;               // (n_by_text) hash table from texts to ids; -1: an empty slot
    size_t n_by_text;           // a power of two
    Map merges;                 // left << 32 | right -> rank << 32 | result

    // Added tokens: matched on the raw text [0], or on the normalized text [1]. In a trie node 0 is
    // the root, node << 9 | byte leads to a node, and node << 9 | 256 to an index into `added`.
    AddedToken *added;
    Map trie[2];
    int nodes[2];               // number of the newest node
    unsigned char starts[2][256];   // 1: some added token begins with the byte

    // Encoding
    NormStep *norm;             // at most MAX_STEPS from a file
    int *split;                 // SPLIT_* in their order
    SetRun *run;                // the patterns of SPLIT_RUN
    int meta;                   // META_*
    int byte_level;             // 1: words are written in the byte alphabet before BPE
    int ignore_merges;          // 1: a word that is in the vocabulary is not merged, but one id
    int byte_fallback;          // 1: a character that is not in the vocabulary becomes its bytes
    int byte_id[256];           // id of the piece <0xNN>, or -1
    int unk;                    // id for characters that are not in the vocabulary; -1: they vanish
    int fuse_unk;               // 1: neighbouring unknown characters make one unk

    // Decoding
    int dec_byte_level;         // 1: pieces are written in the byte alphabet
    int dec_space;              // 1: U+2581 is a blank
    int dec_bytes;              // 1: <0xNN> is a byte
    int dec_strip;              // 1: the text's first blank goes

    // Tokens with a role
    int bos, eos;               // -1: none
    int add_bos;                // 1: the model was trained with BOS before every text
};

// A Decoder is a stream: ids go in, whole characters come out. Bytes that may still become a
// character are held back. Bytes that cannot become one come out as U+FFFD, one for each longest
// beginning of a character. A new Decoder has t, and skip_special if wanted; the rest is 0.
typedef struct {
    const Tokenizer *t;
    int skip_special;           // 1: special tokens add nothing
    int started;                // 1: a byte of the text has come
    int n;                      // bytes held back
    char held[4];
} Decoder;

// ---- What a tokenizer is made of
// The id of the token whose text is s, or -1.
int text_id(const Tokenizer *t, const char *s, size_t n);

// The number of ids, holes in the numbering included.
int tokenizer_size(const Tokenizer *t);

// Is id a special token? An id outside the tokenizer is none.
int tokenizer_is_special(const Tokenizer *t, int id);

// The bytes that id adds to a text, and their number in *len. An id outside the tokenizer adds
// none.
const char *tokenizer_bytes(const Tokenizer *t, int id, int *len);

// ---- Characters and their classes
// Do the n >= 1 bytes at s begin with white space? *len is the length of their first character.
int is_space(const char *s, size_t n, int *len);

// The length of the white-space character that ends at s[end] and begins at s[from] or behind it; 0
// when no such character stands there.
size_t space_before(const char *s, size_t from, size_t end);

// ---- Encoding
// Appends the ids of a text to the stb array ids and returns it.
// parse_special: 1 where the text may name special tokens. at_start: 1 where everything begins, the
// only place where some SentencePiece models put a blank before the text.
int *encode_at(const Tokenizer *t, const char *text, size_t n, int parse_special, int at_start,
               int *ids);

// encode_at for a text with which everything begins.
int *tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int parse_special, int *ids);

// A number of tokens that a text of n bytes has at least, without encoding it: its characters that are
// no white space, in pieces as long as the longest. A normalizer may shorten a text before, never to
// less than an eighth. 0: nothing can be said.
size_t fewest_tokens(const Tokenizer *t, const char *text, size_t n);

// ---- Decoding
// Feeds one id. Appends what it completes to the stb array out, which is returned.
char *decode_token(Decoder *d, int id, char *out);

// Ends the stream: what is held back cannot become a character any more.
char *decode_flush(Decoder *d, char *out);

// ---- Loading
// The functions below that return int return 0, or -1 with the reason in err.
void tokenizer_free(Tokenizer *t);

// ---- Loading a folder
// Loads a tokenizer. path: a folder (tokenizer.json, else tokenizer.model) or one of the two files.
// tokenizer_config.json beside it is read too. Returns NULL with the reason in err when there is
// none or it is refused.
Tokenizer *tokenizer_load(const char *path, char err[512]);

#endif
