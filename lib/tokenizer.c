// lib/tokenizer.c - see tokenizer.h. A text takes this road:
//
//     text -> added tokens of the raw text are cut out          encode_part, added_next
//          -> the normalizer rewrites what lies between them    rewrite
//          -> added tokens of the normalized text are cut out   encode_part, added_next
//          -> the pre-tokenizer cuts the rest into words        split, by patterns: match_all
//          -> BPE merges the characters of each word into ids   word_bpe
//
// No step is quadratic in the length of a text: a pattern looks at each character once, and BPE keeps its
// candidate merges in a tournament, so a megabyte without a blank is fine.
#define _GNU_SOURCE
#include "tokenizer.h"
#include "../data/unicode.h"    // the tables unicode_*
#include <ctype.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <stb/stb_ds.h>
#define typeof __typeof__        // the maps of stb_ds.h ask for it, and C11 has none

typedef struct {                // an entry of a hash map (stb_ds)
    uint64_t key;
    int64_t value;
} Entry;

// The value of key, or -1 when the key is absent. It changes nothing in the map: any number of threads may ask.
static int64_t map_get(Entry *map, uint64_t key) {
    ptrdiff_t i = -1;
    return map && hmgeti_ts(map, key, i) >= 0 ? map[i].value : -1;
}

// ---- What a tokenizer is made of
enum {                          // Piece.flags, beside TOKEN_*
    PIECE_NORMALIZED = 16,      // an added token that stands for its normalized text
    PIECE_LSTRIP = 32,          // an added token that swallows the white space before it ..
    PIECE_RSTRIP = 64           // .. and behind it
};

enum {
    MAX_STEPS = 8,              // steps of a normalizer, and of a pre-tokenizer, at most
    MAX_CODE = 1000,            // instructions of a pattern at most
    MAX_SETS = 200              // characters and sets of all patterns at most
};

typedef struct {                // one token of the vocabulary
    size_t text;                // the text as the file writes it: offset into Tokenizer.chars
    size_t bytes;               // the decoded form: offset into Tokenizer.chars
    int n_text, n_bytes;        // their lengths in bytes
    int flags;                  // TOKEN_*, PIECE_*; 0: a hole in the numbering
} Piece;

typedef struct {                // a step of the normalizer, or what Metaspace does before it cuts
    int nfc;                    // 1: Unicode normalization form C, else:
    char from[8], to[8];        // replaces every `from` by `to`; with `from` "" it puts `to` before the text,
    int once;                   // 1: .. unless the text begins with it,
    int at_start;               // 1: .. and only where everything begins
} Rewrite;

// A character's code is its code point, or BROKEN + byte for a byte that starts no well-formed character.
enum { BROKEN = 0x110000, NO_CHAR = BROKEN + 256 };

typedef struct {                // a set of characters
    uint32_t bit[BROKEN / 32 + 1];      // one bit a code point; the last one is that of NO_CHAR, and 0
} CharSet;

typedef struct {                // an instruction of a pattern; see "Patterns" below
    int op;                     // OP_*
    int set;                    // of OP_SET and OP_STRICT: the number of its set
    int x;                      // how far another instruction lies behind this one; 0: there is none
    int first, second;          // once it is linked: the instructions that it asks, by their numbers
    int number;                 // 1 + its number once it is linked; 0 before, -1 meanwhile
} Inst;

typedef struct {                // a step of the pre-tokenizer
    int bytes;                  // 1: words are written in the byte alphabet from here on, else:
    Inst *code;                 // the pattern that words are cut by, linked (stb array): its n_sets OP_SET, the others
    int n_sets;
    int start;                  // the instruction that it begins with
    int behavior;               // CUT_*
    int invert;                 // 1: what the pattern matches and what lies between change places
} Step;

enum {                          // what becomes of a match
    CUT_ISOLATED,               // it is a word
    CUT_REMOVED,                // it vanishes
    CUT_PREVIOUS,               // it ends the word before it
    CUT_NEXT,                   // it begins the word behind it
    CUT_CONTIGUOUS              // it makes one word with matches beside it
};

enum {                          // where an added token is looked for, in this order
    ADDED_GUARDED,              // in what a template writes: guarded tokens alone
    ADDED_RAW,                  // in the text as it is given
    ADDED_NORMALIZED,           // in the normalized text, as the normalizer writes the token
    ADDED_KINDS
};

typedef struct {
    int id, kind;               // ADDED_*
    char *text;                 // what is looked for (stb array)
} Added;

struct Tokenizer {
    // The vocabulary
    Piece *piece;               // (tokenizer_size) by id
    char *chars;                // every text, NUL-terminated, and every decoded form
    int most;                   // the greatest id that a file of its size may name
    Entry *by_text;             // hash of a text, or, where that is taken, a number behind it -> id
    Entry *merges;              // left << 32 | right -> rank << 32 | result

    Added *added;               // added tokens, as they are looked for
    unsigned char starts[ADDED_KINDS][256];     // 1: one of the kind begins with the byte

    // Encoding
    Rewrite *norm;              // at most MAX_STEPS
    Rewrite *meta;              // what the pre-tokenizer Metaspace does first; NULL: there is none
    Step *step;                 // at most MAX_STEPS
    CharSet **set;              // the sets of all patterns
    int byte_level;             // 1: one of the steps writes words in the byte alphabet
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

// The hash of a text (Fowler, Noll and Vo). Some bits are 0: stb_ds.h shifts bytes of a key as ints, which may
// overflow where bit 31 or 63 is set, and the numbers behind a hash need room.
static uint64_t text_hash(const char *s, size_t n) {
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3ull;
    return h & 0x7fffffff7fffff00ull;
}

int text_id(const Tokenizer *t, const char *s, size_t n) {
    for (uint64_t h = text_hash(s, n); ; h++) {
        int id = (int)map_get(t->by_text, h);
        const Piece *p = id < 0 ? NULL : &t->piece[id];
        if (!p || ((size_t)p->n_text == n && !memcmp(t->chars + p->text, s, n))) return id;
    }
}

int tokenizer_size(const Tokenizer *t) { return (int)arrlen(t->piece); }
int tokenizer_bos(const Tokenizer *t) { return t->bos; }
int tokenizer_eos(const Tokenizer *t) { return t->eos; }
int tokenizer_unk(const Tokenizer *t) { return t->unk; }
int tokenizer_adds_bos(const Tokenizer *t) { return t->add_bos; }

int tokenizer_flags(const Tokenizer *t, int id) {
    return id >= 0 && id < tokenizer_size(t) ? t->piece[id].flags & 15 : 0;
}

int tokenizer_is_special(const Tokenizer *t, int id) { return (tokenizer_flags(t, id) & TOKEN_SPECIAL) != 0; }

const char *tokenizer_text(const Tokenizer *t, int id, int *len) {
    *len = tokenizer_flags(t, id) ? t->piece[id].n_text : 0;
    return *len ? t->chars + t->piece[id].text : "";
}

const char *tokenizer_bytes(const Tokenizer *t, int id, int *len) {
    *len = tokenizer_flags(t, id) ? t->piece[id].n_bytes : 0;
    return *len ? t->chars + t->piece[id].bytes : "";
}

// The id of the text s in the BPE vocabulary, or -1. Added tokens outside of it do not count.
static int model_id(const Tokenizer *t, const char *s, size_t n) {
    int id = text_id(t, s, n);
    return id >= 0 && t->piece[id].flags & TOKEN_MODEL ? id : -1;
}

// ---- Characters
// The code of the character that the n >= 1 bytes at s begin with, and its length in *len.
static uint32_t char_code(const char *s, size_t n, int *len) {
    uint32_t c = BROKEN + (unsigned char)*s;
    *len = max_int(utf8_read(s, n, &c), 1);
    return c;
}

// Where the character begins that ends at s[end], behind s[from].
static size_t last_char(const char *s, size_t from, size_t end) {
    size_t i = end - 1;
    while (i > from && end - i < 4 && (s[i] & 0xc0) == 0x80) i--;
    return (size_t)utf8_length(s + i, end - i) == end - i ? i : end - 1;
}

// Is the whole of s well-formed UTF-8?
static int utf8_whole(const char *s, size_t n) {
    int len = 1;
    for (size_t i = 0; i < n && len; i += (size_t)len) len = utf8_length(s + i, n - i);
    return len > 0;
}

// Appends the character of code c to the stb array *out.
static void char_put(char **out, uint32_t c) {
    if (c < 0x80 || c >= BROKEN) {      // one byte: BROKEN is a multiple of 256, so its low bits are the byte
        arrput(*out, (char)(c & 255));
        return;
    }
    char utf8[4];
    const char *end = utf8_put(utf8, c);
    bytes_put(out, utf8, (size_t)(end - utf8));
}

int is_space(const char *s, size_t n, int *len) {
    uint32_t c = char_code(s, n, len);
    return c == ' ' || (c >= '\t' && c <= '\r') || c == 0x85 || c == 0xa0 || c == 0x1680
           || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

size_t space_before(const char *s, size_t from, size_t end) {
    if (end == from) return 0;
    size_t i = last_char(s, from, end);
    int len;
    return is_space(s + i, end - i, &len) ? end - i : 0;
}

// SentencePiece writes a blank as U+2581, and a byte that belongs to no known character as the piece <0xNN>.
#define BLANK_MARK "\xe2\x96\x81"

// GPT-2's byte alphabet writes every byte as a printable character: 188 printable bytes of Latin-1 stand for
// themselves, the 68 others become U+0100, U+0101 and so on, in their order.
static int byte_printable(int b) { return (b > 32 && b < 127) || (b > 160 && b != 173 && b < 256); }

// The character of byte b in the byte alphabet.
static uint32_t byte_char(int b) {
    if (byte_printable(b)) return (uint32_t)b;
    if (b <= 32) return 256 + (uint32_t)b;
    return b == 173 ? 256 + 67 : 256 + 33 + (uint32_t)b - 127;
}

// The byte that character c of the byte alphabet stands for, or -1 when c is not of the alphabet.
static int char_byte(uint32_t c) {
    if (c < 256) return byte_printable((int)c) ? (int)c : -1;
    int b = 0;
    while (b < 256 && byte_char(b) != c) b++;
    return b < 256 ? b : -1;
}

// ---- A tokenizer.json that is loaded
typedef struct {
    Tokenizer *t;               // what it becomes
    char *err;                  // (512) why it is refused,
    jmp_buf refused;            // .. and where that leads
    char *text;                 // stb array: the pattern of a Split that has a text, or a merge

    // The pattern that is read
    Inst *code;                 // what has been read (stb array)
    const char *start, *p;      // the pattern, NUL-terminated; where the reader stands
    CharSet *set;               // the set in the making, the last one of the tokenizer
    int fold;                   // 1: inside (?i:..)
    int depth;                  // groups open
} Loader;

// Refuses the file: the reason goes to err. It does not return.
KV_PRINTF(2, 3) static _Noreturn void load_fail(Loader *l, const char *fmt, ...) {
    char why[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    fault(l->err, "%s", why);
    longjmp(l->refused, 1);
}

// ---- Patterns: sets of characters
// The general categories, in the order of unicode_category. The last one is that part of Cc which is white space.
static const char categories[] = "CnLuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCoCc";
enum { SPACE_OF_CC = 30, N_CATEGORIES };

// The categories that a name of one letter (L, N ..) or two (Lu, Nd ..) stands for, one bit each; 0: it is none.
static uint32_t category_bits(const char *name, size_t n) {
    uint32_t bits = 0;
    for (int k = 0; k < N_CATEGORIES; k++) {
        if (n >= 1 && n <= 2 && !memcmp(categories + 2 * k, name, n)) bits |= 1u << k;
    }
    return bits;
}

static int set_has(const CharSet *set, uint32_t c) {
    if (c >= BROKEN) c = c == NO_CHAR ? BROKEN : 0xfffd;
    return set->bit[c >> 5] >> (c & 31) & 1;
}

// Adds the code points from first to last.
static void set_range(CharSet *set, uint32_t first, uint32_t last) {
    for (uint32_t c = first; c <= last; c++) set->bit[c >> 5] |= 1u << (c & 31);
}

// Adds the characters of some categories.
static void set_categories(CharSet *set, uint32_t bits) {
    size_t n = sizeof unicode_category / sizeof *unicode_category;
    for (size_t i = 0; i < n; i++) {
        uint32_t end = i + 1 < n ? unicode_category[i + 1] >> 5 : BROKEN;
        if (bits >> (unicode_category[i] & 31) & 1) set_range(set, unicode_category[i] >> 5, end - 1);
    }
}

// Makes \p{P} the characters at which the pre-tokenizer step Punctuation cuts.
static void set_punctuation(CharSet *set) {
    for (size_t i = 0; i < sizeof unicode_punctuation / sizeof *unicode_punctuation; i += 2)
        for (uint32_t c = unicode_punctuation[i]; c <= unicode_punctuation[i + 1]; c++)
            set->bit[c >> 5] ^= 1u << (c & 31);
}

// ---- Patterns: reading
// A pattern is a regular expression as Oniguruma reads it, which is what `tokenizers` asks: characters, sets
// [a-z\p{L}] and [^..], the shorthands \s \S \d \D and \p{..} \P{..} with general categories, the anchor $ of a
// line's end, alternatives a|b, groups (..) (?:..) and (?i:..), lookaheads (?=..) and (?!..), and the quantifiers
// ? * + {m} {m,} {m,n}, greedy and, of one character, possessive (*+). It becomes a list of instructions.
// Blocks of them may be moved and copied, because a jump says how far it goes.
enum {
    OP_SET,                     // one character of a set
    OP_SPLIT,                   // goes on behind it, or if that leads to no match x further
    OP_STRICT,                  // the same, but x further only where no character of the set stands
    OP_JUMP,                    // goes on x further
    OP_LINE_END,                // $
    OP_AHEAD, OP_NOT_AHEAD,     // what follows up to its OP_MATCH must match here, or must not; goes on x further
    OP_MATCH                    // the end
};
enum { ANY_NUMBER = INT_MAX, MAX_COUNT = 255, MAX_DEPTH = 20 };
enum { A_SET = BROKEN };        // what regex_one returns for more than one character

// Refuses what stands between `at` and the reader's place. It does not return.
static _Noreturn void regex_fail(Loader *r, const char *at, const char *what) {
    load_fail(r, "pre_tokenizer Split: %s is not supported: '%.*s' at byte %d of the pattern '%.300s'", what,
              (int)(r->p - at), at, (int)(at - r->start), r->start);
}

// Goes behind the next character -> its code; 0 at the end, where it stays.
static int regex_next(Loader *r) {
    int len = 0, c = *r->p ? (int)char_code(r->p, strlen(r->p), &len) : 0;
    r->p += len;
    return c;
}

static Inst *regex_emit(Loader *r, int op, int x) {
    Inst in = { .op = op, .x = x };
    arrput(r->code, in);
    if (arrlen(r->code) > MAX_CODE) regex_fail(r, r->p, "so large a pattern");
    return &arrlast(r->code);
}

// Adds the characters from first to last to r->set, and inside (?i:..) the other forms of the letters of ASCII.
static void regex_add(Loader *r, uint32_t first, uint32_t last) {
    set_range(r->set, first, last);
    for (uint32_t c = first; r->fold && c <= last && c < 128; c++) {
        if (!isalpha((int)c)) continue;
        set_range(r->set, c ^ 32, c ^ 32);
        if ((c | 32) == 's') set_range(r->set, 0x17f, 0x17f);           // the long s
        if ((c | 32) == 'k') set_range(r->set, 0x212a, 0x212a);         // the sign of kelvin
    }
}

// Reads a character, or an escape -> the character that it is, or A_SET when it has been added to r->set.
static int regex_one(Loader *r) {
    const char *at = r->p, *end;
    uint32_t bits;
    int c = regex_next(r);
    if (c != '\\') return c;
    switch (c = regex_next(r)) {
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    case 's': case 'S':
        bits = category_bits("Z", 1) | 1u << SPACE_OF_CC;
        break;
    case 'd': case 'D':
        bits = category_bits("Nd", 2);
        break;
    case 'p': case 'P':         // \p{Lu} and the like
        end = *r->p == '{' ? strchr(r->p, '}') : NULL;
        if (!end) regex_fail(r, at, "a property without {..}");
        bits = category_bits(r->p + 1, (size_t)(end - r->p) - 1);
        r->p = end + 1;
        if (!bits) regex_fail(r, at, "this property");
        break;
    default:
        if (c != ' ' && (c > 127 || !ispunct(c))) regex_fail(r, at, "this escape");
        return c;
    }
    set_categories(r->set, c < 'a' ? ~bits : bits);
    return A_SET;
}

// Reads one member of a set [..] -> as regex_one.
static int regex_member(Loader *r) {
    const char *at = r->p;
    int c = regex_one(r);
    if (!*at) regex_fail(r, at, "a set without an end");
    if (*at == '[' || (*at == '&' && *r->p == '&')) regex_fail(r, at, "a set inside a set");
    if (*at == '-' && at[-1] != '[' && at[-1] != '^' && *r->p != ']') regex_fail(r, at, "this range");
    return c;
}

// Reads a set, whose bracket at `open` is read.
static void regex_set(Loader *r, const char *open) {
    int others = *r->p == '^';
    r->p += others;
    if (*r->p == ']') regex_fail(r, open, "a set without members");
    while (*r->p != ']') {
        const char *at = r->p;
        int low = regex_member(r), high = low;
        if (r->p[0] == '-' && r->p[1] && r->p[1] != ']') {
            r->p++;
            high = regex_member(r);
            if (low == A_SET || high == A_SET || high < low || *at == '-') regex_fail(r, at, "this range");
        }
        if (low != A_SET) regex_add(r, (uint32_t)low, (uint32_t)high);
    }
    r->p++;
    for (size_t i = 0; others && i < BROKEN / 32; i++) r->set->bit[i] = ~r->set->bit[i];
}

// Reads what takes one character or is an anchor, and adds its instruction.
static void regex_char(Loader *r) {
    const char *at = r->p;
    int sets = (int)arrlen(r->t->set);
    if (*at == '$') {
        r->p++;
        regex_emit(r, OP_LINE_END, 0);
        return;
    }
    r->set = sets < MAX_SETS ? xcalloc(1, sizeof *r->set) : NULL;
    if (!r->set) regex_fail(r, at, "so large a pattern");
    arrput(r->t->set, r->set);
    regex_emit(r, OP_SET, 0)->set = sets;
    int c = *at == '[' ? regex_next(r) : regex_one(r);
    if (strchr("*+?{", *at)) regex_fail(r, at, "a quantifier of nothing, or of another one,");
    if (strchr("^.", *at)) regex_fail(r, at, "this character, which stands for others,");
    if (*at == '[') regex_set(r, at);
    else if (c != A_SET) regex_add(r, (uint32_t)c, (uint32_t)c);
}

// Reads {m}, {m,n} or {m,}.
static void regex_counts(Loader *r, int *least, int *most) {
    const char *at = r->p;
    int size = 2 + (int)strspn(at + 1, "0123456789,"), n = 0;
    *least = 0;
    *most = ANY_NUMBER;
    if (sscanf(at, "{%3d}%n", least, &n) == 1 && n) *most = *least;
    else if (sscanf(at, "{%3d,%3d}%n", least, most, &n) < 2) sscanf(at, "{%3d,}%n", least, &n);
    r->p += strnlen(at, (size_t)size);
    if (n != size || *most < *least || *least > MAX_COUNT || (*most > MAX_COUNT && *most != ANY_NUMBER))
        regex_fail(r, at, "this count");
}

// Repeats the block of instructions from `from` on. at: where the quantifier stands; strict: 1: it is possessive.
static void regex_repeat(Loader *r, int from, const char *at, int least, int most, int strict) {
    int n = (int)arrlen(r->code) - from, one = n == 1 && r->code[from].op == OP_SET;
    int copies = most == ANY_NUMBER ? least + 1 : most;
    if (strict && !one) regex_fail(r, at, "a possessive quantifier of more than one character");
    if (from + copies * (n + 2) > MAX_CODE) regex_fail(r, at, "so large a pattern");

    Inst *block = xmalloc((size_t)n * sizeof *block);
    memcpy(block, r->code + from, (size_t)n * sizeof *block);
    arrsetlen(r->code, from);
    for (int k = 0; k < copies; k++) {
        if (k >= least) {       // without one copy all later ones are left out, too
            int behind = most == ANY_NUMBER ? n + 2 : (most - k) * (n + 1);
            Inst *split = regex_emit(r, strict ? OP_STRICT : OP_SPLIT, behind);
            split->set = one ? block->set : 0;
        }
        if (n) memcpy(arraddnptr(r->code, n), block, (size_t)n * sizeof *block);
        if (most == ANY_NUMBER && k == least) regex_emit(r, OP_JUMP, -(n + 1));
    }
    free(block);
}

// Reads the quantifier, if there is one, of the block of instructions from `from` on.
static void regex_quantifier(Loader *r, int from) {
    const char *at = r->p;
    int least = *at == '+', most = *at == '?' ? 1 : ANY_NUMBER, counted = *at == '{', strict;
    if (!*at || !strchr("?*+{", *at)) return;
    if (counted) regex_counts(r, &least, &most);
    else r->p++;

    strict = !counted && *r->p == '+';          // behind {m,n} a + repeats once more
    r->p += strict;
    regex_repeat(r, from, at, least, most, strict);
    if (counted && *r->p == '+') regex_quantifier(r, from);
}

// Refuses what (?i:..) from `open` to the reader's place holds beside ASCII without escapes, of which it is known what
// forms it has; and pairs of letters that one letter may stand for, a sharp s or a ligature.
static void regex_folds(Loader *r, const char *open) {
    static const char *const pairs[] = { "ss", "ff", "fi", "fl", "st" };
    for (const char *s = open; s < r->p; s++) {
        if (*s == '\\' || (unsigned char)*s > 127) regex_fail(r, s, "this inside (?i:..)");
        for (int i = 0; i < 5; i++)
            if (!strncasecmp(s, pairs[i], 2)) regex_fail(r, s, "a pair of letters inside (?i:..)");
    }
}

static void regex_alternatives(Loader *r);

// Reads the group whose bracket r->p stands on.
static void regex_group(Loader *r) {
    const char *open = r->p++;
    int fold = r->fold, look = -1;
    if (++r->depth > MAX_DEPTH) regex_fail(r, open, "so deep a group");
    if (!strncmp(r->p, "?i:", 3)) {
        r->fold = 1;
        r->p += 3;
    } else if (!strncmp(r->p, "?=", 2) || !strncmp(r->p, "?!", 2)) {
        look = (int)arrlen(r->code);
        regex_emit(r, r->p[1] == '=' ? OP_AHEAD : OP_NOT_AHEAD, 0);
        r->p += 2;
    } else if (!strncmp(r->p, "?:", 2)) {
        r->p += 2;
    } else if (*r->p == '?') {
        r->p += strcspn(r->p, ":=!)>");
        regex_fail(r, open, "this kind of group");
    }
    regex_alternatives(r);
    if (*r->p != ')') regex_fail(r, open, "a group without an end");
    if (r->fold) regex_folds(r, open);
    r->p++;
    r->depth--;
    r->fold = fold;
    if (look < 0) return;
    regex_emit(r, OP_MATCH, 0);
    r->code[look].x = (int)arrlen(r->code) - look;
}

// Reads alternatives, the first one first: a split, the first, a jump over the others, and the others.
static void regex_alternatives(Loader *r) {
    int start = (int)arrlen(r->code);
    while (*r->p && *r->p != '|' && *r->p != ')') {
        int from = (int)arrlen(r->code);
        if (*r->p == '(') regex_group(r);
        else regex_char(r);
        regex_quantifier(r, from);
    }
    if (*r->p != '|') return;
    Inst split = { .op = OP_SPLIT, .x = (int)arrlen(r->code) - start + 2 };
    arrins(r->code, start, split);
    regex_emit(r, OP_JUMP, 0);
    int jump = (int)arrlen(r->code) - 1;
    r->p++;
    regex_alternatives(r);
    r->code[jump].x = (int)arrlen(r->code) - jump;
}

// Puts instruction pc of what has been read into step->code, behind those that it asks at the same place in a text.
// Returns its number there. One that asks itself repeats what may take no character.
static int regex_link(Loader *r, Step *step, int pc) {
    Inst *in = &r->code[pc];
    if (in->op == OP_JUMP) return regex_link(r, step, pc + in->x);
    if (in->number < 0) regex_fail(r, r->start, "repeating a group that may be empty");
    if (in->number) return in->number - 1;
    in->number = -1;
    if (in->op != OP_MATCH) in->first = regex_link(r, step, pc + 1);
    if (in->x) in->second = regex_link(r, step, pc + in->x);
    arrput(step->code, *in);
    in->number = (int)arrlen(step->code);
    return in->number - 1;
}

// Reads a whole pattern into step.
static void regex_compile(Loader *r, Step *step, const char *pattern) {
    r->start = r->p = pattern;
    r->fold = r->depth = 0;
    arrsetlen(r->code, 0);
    if (!utf8_whole(pattern, strlen(pattern))) load_fail(r, "pre_tokenizer Split: the pattern is not UTF-8");
    regex_alternatives(r);
    if (*r->p) {
        const char *at = r->p++;
        regex_fail(r, at, "a bracket that closes nothing");
    }
    regex_emit(r, OP_MATCH, 0);
    for (int pc = 0; pc < (int)arrlen(r->code); pc++) {
        if (r->code[pc].op != OP_SET) continue;
        r->code[pc].first = pc + 1;         // this asks one character further, and so is no part of a circle
        arrput(step->code, r->code[pc]);
        r->code[pc].number = ++step->n_sets;
    }
    step->start = regex_link(r, step, 0);
    for (int k = 0; k < step->n_sets; k++) {
        int next = regex_link(r, step, step->code[k].first);
        step->code[k].first = next;
    }
}

// ---- Patterns: matching
// The first alternative that leads to a match wins. Whether one does, and where the match ends, depends on the
// instruction and the place alone. So the text is read once, from its end to its beginning: at every place it is
// computed for every instruction where a match of this and the following ones ends, from what is known one
// character further. The time is that of the length of the text, times the length of the pattern.
enum { NOWHERE = -1 };

// Computes here[k], where the match from instruction k on at the place `at` of n bytes ends, for every k from
// next[], which is the same one character further.
static void match_at(int *here, const int *next, CharSet **set, const Step *step, const char *s, size_t n, size_t at) {
    int size = (int)arrlen(step->code), len, end = NOWHERE;
    const Inst *in = step->code;
    uint32_t c = at < n ? char_code(s + at, n - at, &len) : NO_CHAR;
    for (int k = 0; k < step->n_sets; k++, in++) here[k] = set_has(set[in->set], c) ? next[in->first] : NOWHERE;
    for (int k = step->n_sets; k < size; k++, in++) {
        switch (in->op) {
        case OP_SPLIT:
            end = here[in->first] != NOWHERE ? here[in->first] : here[in->second];
            break;
        case OP_STRICT:
            end = set_has(set[in->set], c) ? here[in->first] : here[in->second];
            break;
        case OP_LINE_END:
            end = at == n || c == '\n' ? here[in->first] : NOWHERE;
            break;
        case OP_AHEAD:
        case OP_NOT_AHEAD:
            end = (here[in->first] != NOWHERE) == (in->op == OP_AHEAD) ? here[in->second] : NOWHERE;
            break;
        case OP_MATCH:
            end = (int)at;
        }
        here[k] = end;
    }
}

// Finds all matches of a step's pattern in n bytes -> (n + 1) where the one that begins at a place ends; NOWHERE.
static const int *match_all(Arena *arena, CharSet **set, const Step *step, const char *s, size_t n) {
    size_t size = arrlenu(step->code) * sizeof(int);
    int *here = arena_take(arena, size), *next = arena_take(arena, size);
    int *end = memset(arena_take(arena, (n + 1) * sizeof *end), NOWHERE, (n + 1) * sizeof *end);
    for (size_t at = n;; at = last_char(s, 0, at)) {
        match_at(here, next, set, step, s, n, at);
        end[at] = here[step->start];
        if (!at) return end;
        int *row = here;
        here = next;
        next = row;
    }
}

// ---- Normalisation
// NFC (Unicode annex 15) decomposes every character, puts marks into canonical order and composes again. What it needs
// to know: first part << 32 | second part -> the code point that they compose, and NFC_CLASS | code point -> its
// canonical combining class, NFC_PARTS | code point -> index into unicode_decomposition. A syllable of Hangul needs no
// decomposition: what it composes with is what its parts do.
static Entry *nfc_map;          // NULL: not loaded yet
#define NFC_CLASS ((uint64_t)NO_CHAR << 32)             // no character, so no pair has these keys
#define NFC_PARTS ((uint64_t)(NO_CHAR + 1) << 32)

// Fills the map at the first call, when a tokenizer that needs it is loaded.
static void nfc_load(void) {
    const uint32_t *k = unicode_combining, *d = unicode_decomposition;
    if (nfc_map) return;
    for (size_t i = 0; i + 1 < sizeof unicode_combining / sizeof *k; i++)
        for (uint32_t c = k[i] >> 8; k[i] & 255 && c < k[i + 1] >> 8; c++) hmput(nfc_map, NFC_CLASS | c, k[i] & 255);
    for (size_t i = 0; i < sizeof unicode_decomposition / sizeof *d; i += 3) {
        uint32_t c = d[i] & INT32_MAX;
        hmput(nfc_map, NFC_PARTS | c, (int64_t)i + 1);
        if (d[i + 2] && c == d[i]) hmput(nfc_map, (uint64_t)d[i + 1] << 32 | d[i + 2], c);
    }
    for (uint32_t c = 0; c < 19 * 21 * 28; c++) {       // Hangul: leading consonant, vowel, trailing consonant or none
        uint32_t tail = c % 28, first = tail ? 0xac00 + c - tail : 0x1100 + c / 28 / 21;
        hmput(nfc_map, (uint64_t)first << 32 | (tail ? 0x11a7 + tail : 0x1161 + c / 28 % 21), 0xac00 + c);
    }
}

// The canonical combining class of a character: 0 for a starter, more for a mark, of which U+0300 is the first.
static int code_ccc(uint32_t c) { return c < 0x300 ? 0 : max_int((int)map_get(nfc_map, NFC_CLASS | c), 0); }

// Appends the full decomposition of c to the stb array *out.
static void nfc_decompose(uint32_t **out, uint32_t c) {
    int64_t at = c < 0xc0 ? -1 : map_get(nfc_map, NFC_PARTS | c);   // U+00C0 is the first that decomposes
    if (at < 0) {
        arrput(*out, c);
        return;
    }
    const uint32_t *part = &unicode_decomposition[at];
    nfc_decompose(out, part[0]);
    if (part[1]) nfc_decompose(out, part[1]);
}

// Puts every run of marks among the n codes into canonical order: by class, and within one as they stand.
static void nfc_order(uint32_t *code, size_t n) {
    uint32_t *mark = NULL;
    for (size_t from = 0, to; from < n; from = to + 1) {
        for (to = from; to < n && code_ccc(code[to]); ) to++;       // a starter stands at `to`, or the end
        if (to < from + 2) continue;
        arrsetlen(mark, 0);
        for (int class = 1; class < 256; class++)
            for (size_t i = from; i < to; i++)
                if (code_ccc(code[i]) == class) arrput(mark, code[i]);
        memcpy(code + from, mark, (to - from) * sizeof *mark);
    }
    arrfree(mark);
}

// Rewrites the stb array *text in NFC. A code joins the last starter unless a code kept between them blocks it, which
// is one of the same or a higher class.
static void nfc(char **text) {
    size_t n = arrlenu(*text), i = 0;
    while (i < n && (unsigned char)(*text)[i] < 0xcc) i++;
    if (i == n) return;         // every code point is below U+0300: there is nothing to do

    uint32_t *code = NULL, *starter = NULL;     // starter: the last one kept; NULL: none yet
    int len, last = -1;                         // class of the last code kept behind it; -1: none was
    for (i = 0; i < n; i += (size_t)len) nfc_decompose(&code, char_code(*text + i, n - i, &len));
    nfc_order(code, arrlenu(code));
    size_t kept = 0;
    for (i = 0; i < arrlenu(code); i++) {
        int ccc = code_ccc(code[i]);
        int64_t both = starter && last < ccc ? map_get(nfc_map, (uint64_t)*starter << 32 | code[i]) : -1;
        if (both >= 0) {
            *starter = (uint32_t)both;
            continue;
        }
        last = ccc ? ccc : -1;
        code[kept] = code[i];
        if (!ccc) starter = &code[kept];
        kept++;
    }
    arrsetlen(*text, 0);
    for (i = 0; i < kept; i++) char_put(text, code[i]);
    arrfree(code);
}

// Replaces every `from` in the stb array *text by `to`.
static void replace_all(char **text, const char *from, const char *to) {
    size_t n = arrlenu(*text), n_from = strlen(from);
    char *built = NULL;
    for (size_t i = 0; i < n;) {
        int here = n - i >= n_from && !memcmp(*text + i, from, n_from);
        bytes_put(&built, here ? to : *text + i, here ? strlen(to) : 1);
        i += here ? n_from : 1;
    }
    arrfree(*text);
    *text = built;
}

// Runs the steps of a normalizer, or those with which the pre-tokenizer Metaspace begins, over *text, an stb array.
static void rewrite(const Rewrite *steps, char **text, int at_start) {
    for (int i = 0; i < (int)arrlen(steps); i++) {
        const Rewrite *x = &steps[i];
        size_t n = strlen(x->to);
        int has = x->once && arrlenu(*text) >= n && !memcmp(*text, x->to, n);
        if (x->nfc) nfc(text);
        else if (*x->from) replace_all(text, x->from, x->to);
        if (x->nfc || *x->from || has || (x->at_start && !at_start)) continue;
        arrinsn(*text, 0, n);
        memcpy(*text, x->to, n);
    }
}

// ---- BPE merges
// A word is a linked list of symbols, one a character at first. Which neighbouring pair merges next, that of the lowest
// rank and leftmost among equals, is what a tournament of all pairs says. (SentencePiece models of type unigram have no
// merges and are refused.)
typedef struct {
    int id;
    int prev, next;             // indices of the neighbours; -1: none
    int into;                   // the id that the pair (this, next) merges into
} Symbol;

typedef struct Encoder {        // everything one call of encode_at works with
    const Tokenizer *t;
    int special;                // 1: the text may name guarded tokens
    const uint16_t *own;        // of what a template writes: (n) 0 where it is the template that writes the byte
    void (*word)(struct Encoder *e, const char *s, size_t n);  // takes a word: word_bpe
    int *ids;                   // what comes out (this and the next two are stb arrays)
    Symbol *sym;                // (n) the word's symbols
    uint64_t *best;             // (2 n) rank << 32 | index of the pair that symbol i begins at n + i, or NO_PAIR, and
                                // before them at k the better one of 2 k and 2 k + 1: the best of all at 1
    Arena *arena;               // has what the steps of the pre-tokenizer work with
} Encoder;
#define NO_PAIR UINT64_MAX

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

// May BPE make this id? It must be in the BPE vocabulary, and it may be a special token only in a
// text that may name special tokens: the words of a user never become one.
static int bpe_may_make(const Encoder *e, int id) {
    if (id < 0) return 0;
    int flags = e->t->piece[id].flags;
    return flags & TOKEN_MODEL && (e->special || !(flags & TOKEN_SPECIAL));
}

// Looks up the pair that symbol i makes with its right neighbour.
static void pair_look(Encoder *e, int i) {
    Symbol *s = &e->sym[i];
    int64_t merge = s->next < 0 ? -1 : map_get(e->t->merges, (uint64_t)s->id << 32 | (uint64_t)e->sym[s->next].id);
    uint64_t *at = &e->best[arrlen(e->sym) + i];
    s->into = (int)(merge & INT_MAX);
    *at = merge >= 0 && bpe_may_make(e, s->into) ? (uint64_t)merge >> 32 << 32 | (uint64_t)i : NO_PAIR;
}

// Plays the tournament again, where the pair of symbol i may have changed.
static void pair_play(Encoder *e, int i) {
    pair_look(e, i);
    for (size_t k = (arrlenu(e->sym) + (size_t)i) / 2; k; k /= 2) {
        uint64_t better = min_u64(e->best[2 * k], e->best[2 * k + 1]);
        if (e->best[k] == better) return;
        e->best[k] = better;
    }
}

// Appends a symbol to the word.
static void symbol_put(Encoder *e, int id) {
    int i = (int)arrlen(e->sym);
    Symbol s = { id, i - 1, i + 1, -1 };
    arrput(e->sym, s);
}

// Makes the symbols of a word: one a character. A character that is not in the vocabulary becomes
// its bytes, else unk, else nothing. Bytes do not end the wait of an unk, and so stand before it.
static void word_symbols(Encoder *e, const char *s, size_t n) {
    const Tokenizer *t = e->t;
    int waits = 0;              // 1: an unk waits for the characters it may swallow
    int len;
    arrsetlen(e->sym, 0);
    for (size_t i = 0; i < n; i += (size_t)len) {
        char_code(s + i, n - i, &len);
        int id = text_id(t, s + i, (size_t)len);
        if (bpe_may_make(e, id)) {
            if (waits) symbol_put(e, t->unk);
            waits = 0;
            symbol_put(e, id);
            continue;
        }
        int known = t->byte_fallback;       // 1: every byte has a piece <0xNN>
        for (int k = 0; k < len; k++) known = known && t->byte_id[(unsigned char)s[i + (size_t)k]] >= 0;
        for (int k = 0; k < len && known; k++) symbol_put(e, t->byte_id[(unsigned char)s[i + (size_t)k]]);
        if (known || t->unk < 0) continue;
        if (waits && !t->fuse_unk) symbol_put(e, t->unk);
        waits = 1;
    }
    if (waits) symbol_put(e, t->unk);
    if (arrlen(e->sym)) arrlast(e->sym).next = -1;
}

// Merges the symbols of the word, best pair first, until no pair merges. The left symbol becomes the merged one, the
// right one leaves the list.
static void word_merge(Encoder *e) {
    int n = (int)arrlen(e->sym);
    arrsetlen(e->best, 2 * n);
    for (int i = 0; i < n; i++) pair_look(e, i);
    for (int k = n - 1; k; k--) e->best[k] = min_u64(e->best[2 * k], e->best[2 * k + 1]);
    while (e->best[1] != NO_PAIR) {
        int i = (int)(e->best[1] & INT_MAX), gone = e->sym[i].next, next = e->sym[gone].next;
        e->sym[i].id = e->sym[i].into;
        e->sym[i].next = next;
        e->sym[gone].next = -1;
        if (next >= 0) e->sym[next].prev = i;
        pair_play(e, gone);
        pair_play(e, i);
        if (e->sym[i].prev >= 0) pair_play(e, e->sym[i].prev);
    }
}

// Appends the ids of one word.
static void word_bpe(Encoder *e, const char *s, size_t n) {
    int whole = e->t->ignore_merges ? text_id(e->t, s, n) : -1;
    if (bpe_may_make(e, whole)) {
        arrput(e->ids, whole);
        return;
    }
    word_symbols(e, s, n);
    if (!arrlen(e->sym)) return;
    word_merge(e);
    for (int i = 0; i >= 0; i = e->sym[i].next) arrput(e->ids, e->sym[i].id);
}

// ---- Pre-tokenizers
// Cuts n bytes by the steps of the pre-tokenizer from `step` on, each of which cuts every word of the one before it,
// and hands the words on. Parts are matches of a step's pattern and what lies between them; neighbouring parts may
// belong to one word.
static void split(Encoder *e, const char *s, size_t n, int step) {
    if (step == (int)arrlen(e->t->step)) {
        e->word(e, s, n);
        return;
    }
    const Step *x = &e->t->step[step];
    size_t mark = arena_mark(e->arena);
    if (x->bytes) {
        char *mapped = arena_take(e->arena, 2 * n), *end = mapped;      // U+0143 is the last one of the alphabet
        for (size_t i = 0; i < n; i++) end = utf8_put(end, byte_char((unsigned char)s[i]));
        split(e, mapped, (size_t)(end - mapped), step + 1);
        arena_reset(e->arena, mark);
        return;
    }

    // [from, end): the word in the making. hit: is its last part a match? next: is the part behind it? -1: there is
    // none
    const int *match = match_all(e->arena, e->t->set, x, s, n), matched = !x->invert;
    size_t from = 0, end = 0;
    for (int hit = -1, next = 0; next >= 0; hit = next) {
        int again = hit == matched && match[end] == (int)end;           // an empty match right behind a match
        size_t at = end + again;
        while (at <= n && match[at] == NOWHERE) at++;
        size_t to = at == end ? (size_t)match[at] : min_size(at, n);
        next = at == end ? matched : to > end ? !matched : -1;
        int joins = (x->behavior == CUT_PREVIOUS && hit == 0 && next == 1)
                    || (x->behavior == CUT_NEXT && hit == 1 && next == 0)
                    || (x->behavior == CUT_CONTIGUOUS && hit == next);
        int removed = x->behavior == CUT_REMOVED && hit == 1;
        if (!joins && !removed && end > from) split(e, s + from, end - from, step + 1);
        if (!joins) from = end;
        end = to;
    }
    arena_reset(e->arena, mark);
}

// ---- Encoding
// The next added token of s[0,n) at or after `from`: the leftmost one, and the longest of those that begin there.
// Returns it, or -1. [*start, *end) includes the white space it swallows (lstrip, rstrip).
static int added_next(const Encoder *e, int kind, const char *s, size_t n, size_t from, size_t *start, size_t *end) {
    for (size_t i = from, size; i < n; i += max_size(size, 1)) {
        size_t most = n - i;                            // bytes that it may have
        int id = -1;
        size = 0;
        if (!e->t->starts[kind][(unsigned char)s[i]]) continue;
        for (size_t k = 0; kind == ADDED_GUARDED && k < min_size(most, MAX_PIECE); k++)
            if (e->own[i + k]) most = k;                // .. from the template alone
        for (const Added *a = e->t->added; a < e->t->added + arrlen(e->t->added); a++) {
            if (a->kind != kind || arrlenu(a->text) <= size || arrlenu(a->text) > most) continue;
            if (memcmp(s + i, a->text, arrlenu(a->text))) continue;
            id = a->id;
            size = arrlenu(a->text);
        }
        int flags = id < 0 ? 0 : e->t->piece[id].flags, plain = kind != ADDED_GUARDED && !e->special;
        if (id < 0 || (flags & TOKEN_GUARDED && plain)) continue;       // here a guarded one is plain text

        *start = i;
        *end = i + size;
        while (flags & PIECE_LSTRIP) {
            size_t blank = space_before(s, from, *start);
            if (!blank) break;
            *start -= blank;
        }
        int len;
        while (flags & PIECE_RSTRIP && *end < n && is_space(s + *end, n - *end, &len)) *end += (size_t)len;
        return id;
    }
    return -1;
}

// Encodes s[0,n) from its added tokens of a kind on: appends their ids, and what lies between them goes to the next
// kind, and behind the last one to the pre-tokenizer.
static void encode_part(Encoder *e, int kind, const char *s, size_t n, int at_start) {
    const Tokenizer *t = e->t;
    size_t from = 0, start, end;
    char *text = NULL;
    const Rewrite *steps = kind == ADDED_NORMALIZED ? t->norm : kind == ADDED_KINDS ? t->meta : NULL;
    if (steps) {
        bytes_put(&text, s, n);
        rewrite(steps, &text, at_start);
        s = text;
        n = arrlenu(text);
    }
    while (kind < ADDED_KINDS) {
        int id = added_next(e, kind, s, n, from, &start, &end);
        if (id < 0) break;
        if (start > from) encode_part(e, kind + 1, s + from, start - from, at_start && !from);
        arrput(e->ids, id);
        from = end;
    }
    if (kind == ADDED_KINDS) split(e, s, n, 0);
    else if (n > from) encode_part(e, kind + 1, s + from, n - from, at_start && !from);
    arrfree(text);
}

// encode_at and encode_rendered (own is not NULL), with what is to become of each word.
static int *encode(const Tokenizer *t, const char *text, const uint16_t *own, size_t n, int special, int at_start,
                   int *ids, void (*word)(Encoder *e, const char *s, size_t n)) {
    if (n > INT_MAX / 8) die(EXIT_USAGE, "a text of %zu bytes is too long, at most %d", n, INT_MAX / 8);
    Encoder e = { .t = t, .special = special, .own = own, .word = word, .ids = ids, .arena = arena_new() };
    encode_part(&e, own ? ADDED_GUARDED : ADDED_RAW, text, n, at_start);
    arrfree(e.sym);
    arrfree(e.best);
    arena_free(e.arena);
    return e.ids;
}

int *encode_rendered(const Tokenizer *t, const char *text, const uint16_t *own, size_t n, int at_start, int *ids) {
    return encode(t, text, own, n, !own, at_start, ids, word_bpe);
}

int *encode_at(const Tokenizer *t, const char *text, size_t n, int parse_special, int at_start, int *ids) {
    return encode(t, text, NULL, n, parse_special, at_start, ids, word_bpe);
}

int *tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int parse_special, int *ids) {
    return encode_at(t, text, n, parse_special, 1, ids);
}

// ---- Decoding
// Can the n bytes at s, which hold no whole character, still become one? Some continuations of a
// beginning may be illegal, but the lowest one or the highest one is legal.
static int utf8_begins(const char *s, int n) {
    char low[4], high[4];
    memset(low, 0x80, 4);
    memset(high, 0xbf, 4);
    memcpy(low, s, (size_t)n);
    memcpy(high, s, (size_t)n);
    return utf8_length(low, 4) > n || utf8_length(high, 4) > n;
}

// Feeds one byte. Appends what it completes to the stb array out, which is returned. What was held back before it could
// still become a character; where it cannot any more, the byte begins anew.
static char *decode_byte(Decoder *d, char c, char *out) {
    d->held[d->n++] = c;
    int len = utf8_length(d->held, (size_t)d->n), anew = !len && d->n > 1;
    if (!len && utf8_begins(d->held, d->n)) return out;
    bytes_put(&out, len ? d->held : "\xef\xbf\xbd", len ? (size_t)len : 3);
    d->n = 0;
    return anew ? decode_byte(d, c, out) : out;
}

char *decode_token(Decoder *d, int id, char *out) {
    int n;
    const char *s = tokenizer_bytes(d->t, id, &n);
    if (d->skip_special && tokenizer_is_special(d->t, id)) return out;
    for (int i = 0; i < n; i++) {
        // The blank that SentencePiece puts before a text is no part of it.
        int drop = !d->started && d->t->dec_strip && s[i] == ' ';
        d->started = 1;
        if (!drop) out = decode_byte(d, s[i], out);
    }
    return out;
}

char *decode_flush(Decoder *d, char *out) {
    if (d->n) bytes_put(&out, "\xef\xbf\xbd", 3);
    d->n = 0;
    return out;
}

// ---- Loading: the vocabulary
void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    for (int i = 0; i < (int)arrlen(t->step); i++) arrfree(t->step[i].code);
    for (int i = 0; i < (int)arrlen(t->set); i++) free(t->set[i]);
    arrfree(t->step);
    arrfree(t->set);
    arrfree(t->norm);
    arrfree(t->meta);
    for (int i = 0; i < (int)arrlen(t->added); i++) arrfree(t->added[i].text);
    arrfree(t->added);
    arrfree(t->piece);
    arrfree(t->chars);
    hmfree(t->by_text);
    hmfree(t->merges);
    free(t);
}

// Gives the text s the id and the flags (TOKEN_*, PIECE_*), and returns the id. A text that has the id already gets the
// flags as well: an added token may stand in the BPE vocabulary too.
static int piece_add(Loader *l, const Json *number, const char *s, size_t n, int flags) {
    Tokenizer *t = l->t;
    int64_t id = json_is(number, JSON_NUMBER) ? number->i : -1;
    int has = text_id(t, s, n);         // the id that the text has, or -1
    size_t size = arrlenu(t->piece);
    if (!json_is(number, JSON_NUMBER) || !number->is_int) load_fail(l, "the id of token '%.100s' is no integer", s);
    if (!utf8_whole(s, n) || (flags & TOKEN_ADDED && memchr(s, 0, n)))
        load_fail(l, "token %lld is not UTF-8, or holds a NUL", (long long)id);
    if (n > MAX_PIECE) load_fail(l, "token '%.100s..' has %zu bytes: expected at most %d", s, n, MAX_PIECE);
    if (id < 0 || id > t->most)
        load_fail(l, "token '%.100s' has id %lld: expected 0..%d", s, (long long)id, t->most);
    if (has >= 0 && has != id) load_fail(l, "token '%.100s' has two ids, %d and %lld", s, has, (long long)id);
    if ((size_t)id >= size) {
        arrsetlen(t->piece, (size_t)id + 1);
        memset(t->piece + size, 0, ((size_t)id + 1 - size) * sizeof(Piece));
    }
    Piece *p = &t->piece[id];
    if (p->flags && has != id)
        load_fail(l, "id %lld belongs to two tokens, '%.100s' and '%.100s'", (long long)id, t->chars + p->text, s);
    if (p->flags & flags) load_fail(l, "token '%.100s' is listed twice", s);
    p->flags |= flags;
    if (has == id) return has;

    p->text = arrlenu(t->chars);
    p->n_text = (int)n;
    bytes_put(&t->chars, s, n);
    arrput(t->chars, 0);
    uint64_t slot = text_hash(s, n);
    while (map_get(t->by_text, slot) >= 0) slot++;
    hmput(t->by_text, slot, id);
    return (int)id;
}

// Has an added token looked for.
static void added_put(Tokenizer *t, int id, int kind) {
    const Piece *p = &t->piece[id];
    Added a = { .id = id, .kind = kind };
    bytes_put(&a.text, t->chars + p->text, (size_t)p->n_text);
    if (kind == ADDED_NORMALIZED) rewrite(t->norm, &a.text, 0);
    arrput(t->added, a);
    t->starts[kind][(unsigned char)*a.text] = 1;
}

// Writes a text of the byte alphabet as bytes; one with another character stays as it is. Returns 1 where it could.
static int alphabet_read(char **text) {
    size_t n = arrlenu(*text), bytes = 0;
    int len;
    for (int write = 0; write < 2; write++) {
        for (size_t i = 0; i < n; i += (size_t)len) {
            int b = char_byte(char_code(*text + i, n - i, &len));
            if (b < 0) return 0;
            if (write) (*text)[bytes++] = (char)b;
        }
    }
    arrsetlen(*text, bytes);
    return 1;
}

// Makes the decoded form of every piece, from the flags dec_*.
static void decode_table(Tokenizer *t) {
    char *text = NULL;
    for (int id = 0; id < tokenizer_size(t); id++) {
        Piece *p = &t->piece[id];
        arrsetlen(text, 0);
        bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
        if (p->flags & PIECE_NORMALIZED) rewrite(t->norm, &text, 0);
        int alphabet = t->dec_byte_level && !(p->flags & TOKEN_ADDED) && alphabet_read(&text);
        if (!alphabet && t->dec_space) replace_all(&text, BLANK_MARK, " ");
        p->bytes = arrlenu(t->chars);
        p->n_bytes = (int)arrlen(text);
        bytes_put(&t->chars, text, arrlenu(text));
    }
    for (int b = 0; b < 256 && t->dec_bytes; b++) {
        if (t->byte_id[b] < 0) continue;
        Piece *p = &t->piece[t->byte_id[b]];
        p->bytes = arrlenu(t->chars);
        p->n_bytes = 1;
        arrput(t->chars, (char)b);
    }
    arrfree(text);
}

// ---- Loading: the members of tokenizer.json
// A flag of obj: 0 or 1. One that is neither true nor false is refused.
static int flag(Loader *l, const Json *obj, const char *key, int absent) {
    const Json *j = json_get(obj, key);
    if (!json_none(j) && j->type != JSON_BOOL) load_fail(l, "%s is neither true nor false", key);
    return json_none(j) ? absent : (int)j->i;
}

// Refuses an object for its type. what: "a normalizer" and the like.
static _Noreturn void refuse_type(Loader *l, const char *what, const Json *obj) {
    const char *type = json_text(obj, "type");
    if (!*type) load_fail(l, "%s without a type is not supported", what);
    load_fail(l, "%s of type '%.100s' is not supported", what, type);
}

// Calls read for obj, or when it is a "Sequence" for each member of its list `key`. No obj is legal.
static void each(Loader *l, const Json *obj, const char *key, void (*read)(Loader *l, const Json *obj)) {
    const Json *list = json_get(obj, key);
    int many = !strcmp(json_text(obj, "type"), "Sequence") && json_is(list, JSON_ARRAY);
    if (!many && !json_none(obj)) read(l, obj);
    for (int i = 0; many && i < list->n; i++) each(l, &list->item[i], key, read);
}

// A step of "normalizer": NFC, Prepend, or Replace of a text.
static void read_normalizer(Loader *l, const Json *n) {
    int kind = word_place("NFC|Prepend|Replace", json_text(n, "type"));
    const char *from = kind == 2 ? json_text(json_get(n, "pattern"), "String") : "";
    const char *to = kind == 2 ? json_text(n, "content") : kind == 1 ? json_text(n, "prepend") : "";
    Rewrite step = { .nfc = kind == 0 };
    if (kind < 0) refuse_type(l, "a normalizer", n);
    if ((kind > 0 && !*to) || (kind == 2 && !*from) || strlen(from) >= sizeof step.from || strlen(to) >= sizeof step.to)
        load_fail(l, "normalizer %s: only short texts are supported", json_text(n, "type"));
    if (arrlen(l->t->norm) == MAX_STEPS) load_fail(l, "normalizer: more than %d steps are not supported", MAX_STEPS);
    if (kind == 0) nfc_load();
    strcpy(step.from, from);
    strcpy(step.to, to);
    arrput(l->t->norm, step);
}

// GPT-2's pattern, which ByteLevel with use_regex stands for
#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// Appends a step that cuts by a pattern. behavior: as the file calls it.
static void step_add(Loader *l, const char *pattern, const char *behavior, int invert) {
    int place = word_place("Isolated|Removed|MergedWithPrevious|MergedWithNext|Contiguous", behavior);
    Step step = { .behavior = place, .invert = invert };
    if (place < 0) load_fail(l, "pre_tokenizer: behavior '%.50s' is not supported", behavior);
    arrput(l->t->step, step);
    regex_compile(l, &arrlast(l->t->step), pattern);
}

// Pre-tokenizer "Split": a regular expression, or a text, whose characters are escaped.
static void read_split(Loader *l, const Json *p) {
    const Json *pattern = json_get(p, "pattern");
    const char *regex = json_text(pattern, "Regex"), *text = json_text(pattern, "String");
    if (!*regex && !*text) load_fail(l, "pre_tokenizer Split: no pattern that is a text");
    arrsetlen(l->text, 0);
    for (; *text; text++) {
        if (ispunct((unsigned char)*text)) arrput(l->text, '\\');
        arrput(l->text, *text);
    }
    arrput(l->text, 0);
    step_add(l, *regex ? regex : l->text, json_text(p, "behavior"), flag(l, p, "invert", 0));
}

// Pre-tokenizer "Metaspace": blanks become U+2581. Older files say add_prefix_space where newer ones say
// prepend_scheme.
static void read_metaspace(Loader *l, const Json *p) {
    const char *scheme = json_text(p, "prepend_scheme");
    if (strcmp(json_text(p, "replacement"), BLANK_MARK))
        load_fail(l, "pre_tokenizer Metaspace: only U+2581 as replacement is supported");
    if (l->t->meta || arrlen(l->t->step)) load_fail(l, "pre_tokenizer Metaspace: supported only as the first step");
    if (*scheme && word_place("first|never|always", scheme) < 0)
        load_fail(l, "pre_tokenizer Metaspace: prepend_scheme '%.50s' is not supported", scheme);

    Rewrite blanks = { .from = " ", .to = BLANK_MARK };
    Rewrite first = { .to = BLANK_MARK, .once = 1, .at_start = !strcmp(scheme, "first") };
    arrput(l->t->meta, blanks);
    if (first.at_start || (strcmp(scheme, "never") && flag(l, p, "add_prefix_space", 1))) arrput(l->t->meta, first);
    if (flag(l, p, "split", 1)) step_add(l, BLANK_MARK, "MergedWithNext", 0);
}

// Pre-tokenizer "ByteLevel": words are written in the byte alphabet; with use_regex a pattern splits them first.
static void read_byte_level(Loader *l, const Json *p) {
    if (flag(l, p, "add_prefix_space", 1)) load_fail(l, "pre_tokenizer ByteLevel: add_prefix_space is not supported");
    if (l->t->meta || l->t->byte_level) load_fail(l, "pre_tokenizer ByteLevel: supported once, and without Metaspace");
    if (flag(l, p, "use_regex", 1)) step_add(l, GPT2_PATTERN, "Isolated", 0);
    Step step = { .bytes = 1 };
    arrput(l->t->step, step);
    l->t->byte_level = 1;
}

// A step of "pre_tokenizer". Behind ByteLevel a pattern sees the characters of the byte alphabet.
static void read_pre_tokenizer(Loader *l, const Json *p) {
    const char *behavior = json_text(p, "behavior");
    if (arrlen(l->t->step) + 2 > MAX_STEPS)
        load_fail(l, "pre_tokenizer: more than %d steps are not supported", MAX_STEPS);
    switch (word_place("Split|Metaspace|ByteLevel|Digits|Punctuation", json_text(p, "type"))) {
    case 0: read_split(l, p); break;
    case 1: read_metaspace(l, p); break;
    case 2: read_byte_level(l, p); break;
    case 3: step_add(l, flag(l, p, "individual_digits", 0) ? "\\p{N}" : "\\p{N}+", "Isolated", 0); break;
    case 4:
        step_add(l, "\\p{P}", *behavior ? behavior : "Isolated", 0);
        set_punctuation(arrlast(l->t->set));
        break;
    default: refuse_type(l, "a pre_tokenizer", p);
    }
}

// One member of model.merges: "left right", or ["left", "right"].
static void load_merge(Loader *l, const Json *m, int rank) {
    const Json *pair = m->type == JSON_ARRAY && m->n == 2 ? m->item : NULL;
    const char *gap = m->type == JSON_STRING ? memchr(m->str, ' ', m->len) : NULL;
    size_t left = gap ? (size_t)(gap - m->str) : 0;
    arrsetlen(l->text, 0);      // both sides, one behind the other; `left` bytes of the first
    if (pair && pair[0].type == JSON_STRING && pair[1].type == JSON_STRING) {
        left = pair[0].len;
        bytes_put(&l->text, pair[0].str, left);
        bytes_put(&l->text, pair[1].str, pair[1].len);
    } else if (gap && !strchr(gap + 1, ' ')) {
        bytes_put(&l->text, m->str, left);
        bytes_put(&l->text, gap + 1, m->len - left - 1);
    } else {
        load_fail(l, "model.merges[%d]: expected \"left right\" or [\"left\", \"right\"]", rank);
    }
    size_t n = arrlenu(l->text), from[] = { 0, left, 0 }, to[] = { left, n, n };
    int id[3];
    if (!left || left == n) load_fail(l, "model.merges[%d] has an empty side", rank);
    for (int i = 0; i < 3; i++) {
        id[i] = model_id(l->t, l->text + from[i], to[i] - from[i]);
        if (id[i] < 0)
            load_fail(l, "model.merges[%d] needs '%.*s', which is not in the vocabulary", rank,
                      (int)min_size(to[i] - from[i], 100), l->text + from[i]);
    }
    hmput(l->t->merges, (uint64_t)id[0] << 32 | (uint64_t)id[1], (int64_t)rank << 32 | id[2]);
}

// "model": vocabulary, merges (a merge's rank is its index), and what becomes of unknown characters.
static void load_model(Loader *l, const Json *m) {
    static const char *const unknown[] = { "dropout", "continuing_subword_prefix", "end_of_word_suffix" };
    const Json *vocab = json_get(m, "vocab"), *merges = json_get(m, "merges"), *unk = json_get(m, "unk_token");
    Tokenizer *t = l->t;
    if (!json_none(json_get(m, "type")) && strcmp(json_text(m, "type"), "BPE")) refuse_type(l, "a model", m);
    for (int i = 0; i < 3; i++) {
        const Json *j = json_get(m, unknown[i]);
        int harmless = json_none(j) || (j->type == JSON_NUMBER && j->num == 0) || (j->type == JSON_STRING && !j->len);
        if (!harmless) load_fail(l, "model.%s is not supported", unknown[i]);
    }
    t->ignore_merges = flag(l, m, "ignore_merges", 0);
    t->byte_fallback = flag(l, m, "byte_fallback", 0);
    t->fuse_unk = flag(l, m, "fuse_unk", 0);

    if (!json_is(vocab, JSON_OBJECT) || !vocab->n) load_fail(l, "model.vocab: expected an object with tokens");
    for (int i = 0; i < vocab->n; i++)
        piece_add(l, &vocab->item[i], vocab->key[i], strlen(vocab->key[i]), TOKEN_MODEL);
    for (int b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", b);
        t->byte_id[b] = text_id(t, name, 6);
    }
    if (!json_is(merges, JSON_ARRAY) || !merges->n) load_fail(l, "model.merges: expected a list with merges");
    for (int i = 0; i < merges->n; i++) load_merge(l, &merges->item[i], i);
    t->unk = json_is(unk, JSON_STRING) ? model_id(t, unk->str, unk->len) : -1;
    if (!json_none(unk) && t->unk < 0) load_fail(l, "model.unk_token is not in the vocabulary");
}

// "added_tokens". Needs the normalizer, which rewrites those that are normalized. A token that looks like a turn mark
// is guarded: DeepSeek's <｜User｜> and its like are not "special" in their files, but a user must not be able to write
// them either.
static void load_added(Loader *l, const Json *list) {
    if (!json_none(list) && list->type != JSON_ARRAY) load_fail(l, "added_tokens: expected a list");
    for (int i = 0; !json_none(list) && i < list->n; i++) {
        const Json *j = &list->item[i], *content = json_get(j, "content");
        if (!json_is(content, JSON_STRING) || !content->len)
            load_fail(l, "added_tokens[%d].content is no text, or empty", i);
        if (flag(l, j, "single_word", 0))
            load_fail(l, "added token '%.100s': single_word is not supported", content->str);

        int special = flag(l, j, "special", 0), normalized = flag(l, j, "normalized", !special);
        int flags = TOKEN_ADDED, opens = !strncmp(content->str, "<|", 2) || !strncmp(content->str, "<｜", 4);
        int mark = opens && content->len > 4 && content->str[content->len - 1] == '>';
        if (special) flags |= TOKEN_SPECIAL;
        if (special || mark) flags |= TOKEN_GUARDED;
        if (normalized) flags |= PIECE_NORMALIZED;
        if (flag(l, j, "lstrip", 0)) flags |= PIECE_LSTRIP;
        if (flag(l, j, "rstrip", 0)) flags |= PIECE_RSTRIP;
        int id = piece_add(l, json_get(j, "id"), content->str, content->len, flags);
        added_put(l->t, id, normalized ? ADDED_NORMALIZED : ADDED_RAW);
        if (flags & TOKEN_GUARDED) added_put(l->t, id, ADDED_GUARDED);
    }
}

// A step of "decoder". Fuse joins the pieces, which is what happens anyway; of Strip only a blank at the start of the
// text is known.
static void read_decoder(Loader *l, const Json *d) {
    const char *content = json_text(d, "content");
    const Json *start = json_get(d, "start"), *stop = json_get(d, "stop");
    int at = json_is(start, JSON_NUMBER) && start->is_int ? (int)start->i : -1;
    Tokenizer *t = l->t;
    switch (word_place("ByteLevel|ByteFallback|Fuse|Metaspace|Replace|Strip", json_text(d, "type"))) {
    case 0: t->dec_byte_level = 1; break;
    case 1: t->dec_bytes = 1; break;
    case 2: break;
    case 3:
        t->dec_space = 1;
        t->dec_strip = strcmp(json_text(d, "prepend_scheme"), "never") && flag(l, d, "add_prefix_space", 1);
        break;
    case 4:
        t->dec_space = 1;
        if (strcmp(json_text(json_get(d, "pattern"), "String"), BLANK_MARK) || strcmp(content, " "))
            load_fail(l, "decoder Replace: only U+2581 to a blank is supported");
        break;
    case 5:
        t->dec_strip = at;
        if (at < 0 || at > 1 || strcmp(content, " ") || (json_is(stop, JSON_NUMBER) && stop->num != 0))
            load_fail(l, "decoder Strip: only one blank at the start is supported");
        break;
    default: refuse_type(l, "a decoder", d);
    }
}

// A step of "post_processor". ByteLevel changes only offsets, which nobody uses here. TemplateProcessing has a list
// "single", which is [BOS, text], or the text alone.
static void read_post_processor(Loader *l, const Json *p) {
    const Json *list = json_get(p, "single");
    int kind = word_place("ByteLevel|TemplateProcessing", json_text(p, "type"));
    if (kind < 0 || (kind == 1 && !json_is(list, JSON_ARRAY))) refuse_type(l, "a post_processor", p);
    for (int i = 0; kind == 1 && i < list->n; i++) {
        const Json *special = json_get(&list->item[i], "SpecialToken");
        const char *name = json_text(special, "id");
        if (!special) continue;
        if (i || l->t->add_bos)
            load_fail(l, "post_processor: only one token before the text is supported, not '%.100s' as well", name);
        l->t->bos = text_id(l->t, name, strlen(name));
        l->t->add_bos = 1;
        if (l->t->bos < 0) load_fail(l, "post_processor: '%.100s' has no id of the vocabulary", name);
    }
}

// ---- Loading: a file and its folder
// Reads the members of a tokenizer.json, each after those it needs. Returns 0, or -1 where it was refused.
static int load_members(Loader *l, const Json *j) {
    const Json *model = json_get(j, "model"), *vocab = json_get(model, "vocab"), *added = json_get(j, "added_tokens");
    if (setjmp(l->refused)) return -1;
    if (!json_is(model, JSON_OBJECT)) load_fail(l, "no 'model' inside: expected a tokenizer.json");
    l->t->most = 2 * ((vocab ? vocab->n : 0) + (added ? added->n : 0)) + 1024;
    each(l, json_get(j, "normalizer"), "normalizers", read_normalizer);
    each(l, json_get(j, "pre_tokenizer"), "pretokenizers", read_pre_tokenizer);
    load_model(l, model);
    load_added(l, added);
    each(l, json_get(j, "decoder"), "decoders", read_decoder);
    each(l, json_get(j, "post_processor"), "processors", read_post_processor);
    decode_table(l->t);
    return 0;
}

Tokenizer *tokenizer_parse(const char *json, size_t n, char err[512]) {
    Json *j = json_parse(json, n, err);
    if (!j) return NULL;
    Loader l = { .t = xcalloc(1, sizeof *l.t), .err = err };
    l.t->unk = l.t->bos = l.t->eos = -1;
    int bad = load_members(&l, j);
    json_free(j);
    arrfree(l.text);
    arrfree(l.code);
    if (!bad) return l.t;
    tokenizer_free(l.t);
    return NULL;
}

// The id of the token that a key of tokenizer_config.json names, as "text" or {"content": "text"}; `otherwise` when it
// names none.
static int token_named(const Tokenizer *t, const Json *config, const char *key, int otherwise) {
    const Json *j = json_get(config, key);
    if (json_is(j, JSON_OBJECT)) j = json_get(j, "content");
    int id = json_is(j, JSON_STRING) ? text_id(t, j->str, j->len) : -1;
    return id >= 0 ? id : otherwise;
}

// Reads tokenizer_config.json, if there is one: BOS, EOS, and whether BOS stands before every text. 0, or -1 and err.
static int load_config(Tokenizer *t, const char *path, char err[512]) {
    *err = 0;
    Json *j = file_exists(path) ? json_read(path, MOST_CONFIG, err) : NULL;
    const Json *adds = json_get(j, "add_bos_token");
    if (!json_none(adds) && adds->type != JSON_BOOL) fault(err, "%s: add_bos_token is neither true nor false", path);
    t->bos = token_named(t, j, "bos_token", t->bos);
    t->eos = token_named(t, j, "eos_token", text_id(t, "</s>", 4));
    t->add_bos = (json_none(adds) ? t->add_bos : (int)adds->i) && t->bos >= 0;
    json_free(j);
    return *err ? -1 : 0;
}

Tokenizer *tokenizer_load(const char *path, char err[512]) {
    char file[PATH_MAX], config[PATH_MAX + 32], why[512];
    struct stat st;
    size_t n;
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    int folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    snprintf(file, sizeof file, folder ? "%s/tokenizer.json" : "%s", path);
    if (folder ? !file_exists(file) : !strcmp(name, "tokenizer.model")) {
        fault(err, "%.300s: no tokenizer.json here (a SentencePiece model, tokenizer.model, is not read)", path);
        return NULL;
    }
    char *text = read_bounded(file, MOST_TOKENIZER, &n, err);
    Tokenizer *t = text ? tokenizer_parse(text, n, why) : NULL;
    if (text && !t) fault(err, "%.200s: %.300s", file, why);
    free(text);
    if (!t) return NULL;

    const char *slash = strrchr(file, '/');
    snprintf(config, sizeof config, "%.*stokenizer_config.json", slash ? (int)(slash + 1 - file) : 0, file);
    if (!load_config(t, config, err)) return t;
    tokenizer_free(t);
    return NULL;
}
