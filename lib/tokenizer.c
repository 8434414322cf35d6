// lib/tokenizer.c - see tokenizer.h.
#define _GNU_SOURCE
#include "tokenizer.h"
#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <stb/stb_ds.h>

// ==================================================================================================== TOKENIZER
// A tokenizer turns text into ids and ids into text. It is read from a folder's tokenizer.json
// (byte-level BPE, or SentencePiece-style BPE with byte fallback) or from a bare SentencePiece
// tokenizer.model of type BPE. A text takes this road:
//
//     text -> added tokens of the raw text are cut out          cut_added, encode_segment
//          -> the normalizer rewrites what lies between them    normalize
//          -> added tokens of the normalized text are cut out   cut_added, encode_piece
//          -> the pre-tokenizer cuts the rest into words        split_piece, match
//          -> BPE merges the characters of each word into ids   word_bpe
//
// What a file asks for and this section does not do exactly is refused by name, because wrong ids
// make a model that quietly talks nonsense. No step is quadratic in the length of a text: BPE keeps
// its candidate merges in a heap, so a megabyte without a blank is fine.
//
// Broken UTF-8 is legal input. A byte that starts no well-formed character counts as one character
// that is neither letter, digit, mark nor space, as U+FFFD would. Every byte-level model and every
// model with byte fallback gives it back as the byte it was.

// ---- Maps from 64-bit keys to non-negative values
// The index of the slot that holds key, or of the empty slot where it would stand. cap is not 0.
static size_t map_slot(const Map *m, uint64_t key) {
    size_t i = mix64(key) & (m->cap - 1);
    while (m->slot[i].key != UINT64_MAX && m->slot[i].key != key) i = (i + 1) & (m->cap - 1);
    return i;
}

// The value of key, or -1 when the key is absent.
static int64_t map_get(const Map *m, uint64_t key) {
    if (!m->cap) return -1;
    const MapSlot *slot = &m->slot[map_slot(m, key)];
    return slot->key == UINT64_MAX ? -1 : slot->val;
}

static void map_put(Map *m, uint64_t key, int64_t val);

// Doubles the slots and puts every key in anew.
static void map_grow(Map *m) {
    Map old = *m;
    m->cap = old.cap ? 2 * old.cap : 64;
    m->n = 0;
    m->slot = xmalloc(m->cap * sizeof(MapSlot));
    for (size_t i = 0; i < m->cap; i++) m->slot[i].key = UINT64_MAX;
    for (size_t i = 0; i < old.cap; i++) {
        if (old.slot[i].key != UINT64_MAX) map_put(m, old.slot[i].key, old.slot[i].val);
    }
    free(old.slot);
}

// Gives key the value val, in place of a value it has already.
static void map_put(Map *m, uint64_t key, int64_t val) {
    if (2 * (m->n + 1) > m->cap) map_grow(m);
    size_t i = map_slot(m, key);
    if (m->slot[i].key == UINT64_MAX) m->n++;
    m->slot[i] = (MapSlot){ key, val };
}

// ---- What a tokenizer is made of
// The slot of by_text that holds the text s of n bytes, or the empty slot where it would stand.
static size_t text_slot(const Tokenizer *t, const char *s, size_t n) {
    uint64_t h = n;
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)s[i]) * 0x100000001b3ull;
    size_t i = mix64(h) & (t->n_by_text - 1);
    for (; t->by_text[i] >= 0; i = (i + 1) & (t->n_by_text - 1)) {
        const Piece *p = &t->piece[t->by_text[i]];
        if ((size_t)p->n_text == n && !memcmp(t->chars + p->text, s, n)) break;
    }
    return i;
}

// The id of the token whose text is s, or -1.
int text_id(const Tokenizer *t, const char *s, size_t n) {
    return t->by_text[text_slot(t, s, n)];
}

// The id of the text s in the BPE vocabulary, or -1. Added tokens outside of it do not count.
static int model_id(const Tokenizer *t, const char *s, size_t n) {
    int id = text_id(t, s, n);
    return id >= 0 && t->piece[id].flags & PIECE_MODEL ? id : -1;
}

// The number of ids, holes in the numbering included.
int tokenizer_size(const Tokenizer *t) { return (int)arrlen(t->piece); }

// Is id a special token? An id outside the tokenizer is none.
int tokenizer_is_special(const Tokenizer *t, int id) {
    return id >= 0 && id < tokenizer_size(t) && (t->piece[id].flags & PIECE_SPECIAL) != 0;
}

// The bytes that id adds to a text, and their number in *len. An id outside the tokenizer adds
// none.
const char *tokenizer_bytes(const Tokenizer *t, int id, int *len) {
    *len = 0;
    if (id < 0 || id >= tokenizer_size(t)) return "";
    *len = t->piece[id].n_bytes;
    return *len ? t->chars + t->piece[id].bytes : "";
}

// ---- Characters and their classes
// A character's code is its code point, or BROKEN + byte for a byte that starts no well-formed
// character.
enum { BROKEN = 0x110000 };
enum {                          // classes of code points; Unicode's general categories in brackets
    U_UPPER = 1,                // capitals [Lu Lt]
    U_LOWER = 2,                // small letters [Ll]
    U_OTHER_LETTER = 4,         // letters without case [Lm Lo]
    U_MARK = 8,                 // marks [M]
    U_NUMBER = 16,              // digits and other numbers [N]
    U_SPACE = 32,               // white space
    U_REST = 64,                // everything else
    U_INSIDE = 128,             // set beside the class: a byte of a character that is not its first
    U_LETTER = U_UPPER | U_LOWER | U_OTHER_LETTER,      // \p{L}
    U_SIGN = U_MARK | U_REST,                           // [^\s\p{L}\p{N}]
    U_NO_NUMBER = 127 & ~U_NUMBER                       // \P{N}
};

enum {                          // bits of unicode_sign
    SIGN_PUNCTUATION = 1,       // \p{P}
    SIGN_SYMBOL = 2,            // \p{S}
    SIGN_STEP = 4               // what the pre-tokenizer Punctuation cuts at
};

#include "../data/unicode.h"       // unicode_range, unicode_sign, unicode_combining, unicode_decomposition

// The tables of data/unicode.h, unpacked by unicode_load.
static unsigned char *unicode_class;    // (BROKEN) U_* of a code point
static unsigned char *unicode_ccc;      // (BROKEN) its canonical combining class
static Map nfc_parts;                   // code point -> index into unicode_decomposition
static Map nfc_pairs;                   // first part << 32 | second part -> the composed code point

// Gives the code points [from, to) the class that `code` stands for in unicode_range. Codes 7 and 8
// stand for alternating capitals and small letters.
static void unicode_fill(uint32_t from, uint32_t to, uint32_t code) {
    static const unsigned char name[] = {
        U_REST, U_UPPER, U_LOWER, U_OTHER_LETTER, U_MARK, U_NUMBER, U_SPACE
    };
    for (uint32_t c = from; c < to; c++) {
        if (code < 7) unicode_class[c] = name[code];
        else unicode_class[c] = (c & 1) == (code & 1) ? U_LOWER : U_UPPER;
    }
}

// Fills the two maps of NFC from unicode_decomposition.
static void unicode_load_nfc(void) {
    const uint32_t *d = unicode_decomposition;
    size_t n = sizeof unicode_decomposition / sizeof *d, i = 0;
    while (i < n) {
        uint32_t c = d[i] >> 8, end = c + (d[i] & 255);
        i++;
        for (; c < end; c++, i += 2) {
            int composes = d[i + 1] && !(d[i] >> 31);
            map_put(&nfc_parts, c, (int64_t)i);
            if (composes) map_put(&nfc_pairs, (uint64_t)d[i] << 32 | d[i + 1], c);
        }
    }
}

// Unpacks the tables at the first call.
static void unicode_load(void) {
    if (unicode_class) return;
    unicode_class = xmalloc(BROKEN);
    unicode_ccc = xcalloc(BROKEN, 1);

    const uint32_t *r = unicode_range;
    size_t n = sizeof unicode_range / sizeof *r;
    for (size_t i = 0; i < n; i++) {
        uint32_t end = i + 1 < n ? r[i + 1] >> 4 : BROKEN;
        unicode_fill(r[i] >> 4, end, r[i] & 15);
    }

    const uint32_t *k = unicode_combining;
    n = sizeof unicode_combining / sizeof *k;
    for (size_t i = 0; i + 1 < n; i++) {
        memset(unicode_ccc + (k[i] >> 8), (int)(k[i] & 255), (k[i + 1] >> 8) - (k[i] >> 8));
    }
    unicode_load_nfc();
}

// The code of the character that the n >= 1 bytes at s begin with, and its length in *len.
static uint32_t char_code(const char *s, size_t n, int *len) {
    const unsigned char *p = (const unsigned char *)s;
    *len = utf8_length(s, n);
    if (*len == 0) {
        *len = 1;
        return BROKEN + p[0];
    }
    if (*len == 1) return p[0];

    // The first of k bytes holds 7 - k bits of the code, each other byte 6.
    uint32_t code = p[0] & (0x7fu >> *len);
    for (int i = 1; i < *len; i++) code = code << 6 | (p[i] & 63);
    return code;
}

// The bits SIGN_* of a character. A byte that starts no well-formed character is U+FFFD, a symbol.
static int sign_bits(uint32_t code) {
    size_t low = 0, high = sizeof unicode_sign / sizeof *unicode_sign;
    if (code >= BROKEN) code = 0xfffd;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (unicode_sign[middle] >> 3 <= code) low = middle;
        else high = middle;
    }
    return (int)(unicode_sign[low] & 7);
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

// Do the n >= 1 bytes at s begin with white space? *len is the length of their first character.
int is_space(const char *s, size_t n, int *len) {
    uint32_t c = char_code(s, n, len);
    return c < BROKEN && unicode_class[c] == U_SPACE;
}

// The length of the white-space character that ends at s[end] and begins at s[from] or behind it; 0
// when no such character stands there.
size_t space_before(const char *s, size_t from, size_t end) {
    if (end == from) return 0;
    size_t i = end - 1;
    while (i > from && end - i < 4 && (s[i] & 0xc0) == 0x80) i--;
    int len, space = is_space(s + i, end - i, &len);
    return space && i + (size_t)len == end ? end - i : 0;
}

// ---- Two alphabets: byte-level and SentencePiece
// SentencePiece writes a blank as U+2581, and a byte that belongs to no known character as the
// piece <0xNN>.
#define BLANK_MARK "\xe2\x96\x81"

// GPT-2's byte alphabet writes every byte as a printable character: 188 printable bytes of Latin-1
// stand for themselves, the 68 others become U+0100, U+0101 and so on, in their order.
static int byte_printable(int b) {
    return (b > 32 && b < 127) || (b > 160 && b != 173 && b < 256);
}

// The character of byte b in the byte alphabet.
static uint32_t byte_char(int b) {
    static uint32_t map[256];   // built at the first call; byte 0 is U+0100, so map[0] tells
    if (!map[0]) {
        uint32_t extra = 256;
        for (uint32_t i = 0; i < 256; i++) map[i] = byte_printable((int)i) ? i : extra++;
    }
    return map[b];
}

// The byte that character c of the byte alphabet stands for, or -1 when c is not of the alphabet.
static int char_byte(uint32_t c) {
    if (c < 256) return byte_printable((int)c) ? (int)c : -1;
    int nth = (int)c - 256;                     // of the bytes that are not printable:
    if (c < 256 + 33) return nth;               // 0 to 32,
    if (c < 256 + 67) return nth - 33 + 127;    // 127 to 160,
    return c == 256 + 67 ? 173 : -1;            // and 173
}

// ---- Normalisation
// NFC (Unicode annex 15) decomposes every character, puts marks into canonical order and composes
// again. Hangul syllables are decomposed and composed by arithmetic.
enum {
    HANGUL_S = 0xac00,          // the first syllable
    HANGUL_L = 0x1100,          // the first leading consonant
    HANGUL_V = 0x1161,          // the first vowel
    HANGUL_T = 0x11a7,          // the code before the first trailing consonant
    N_HANGUL_L = 19,
    N_HANGUL_V = 21,
    N_HANGUL_T = 28,            // "no trailing consonant" included
    N_HANGUL_S = N_HANGUL_L * N_HANGUL_V * N_HANGUL_T
};

// The canonical combining class of a character: 0 for a starter, more for a mark.
static int code_ccc(uint32_t c) { return c < BROKEN ? unicode_ccc[c] : 0; }

// Appends the full decomposition of c to the stb array *out.
static void nfc_decompose(uint32_t **out, uint32_t c) {
    uint32_t s = c - HANGUL_S;
    if (s < N_HANGUL_S) {
        arrput(*out, HANGUL_L + s / (N_HANGUL_V * N_HANGUL_T));
        arrput(*out, HANGUL_V + s / N_HANGUL_T % N_HANGUL_V);
        if (s % N_HANGUL_T) arrput(*out, HANGUL_T + s % N_HANGUL_T);
        return;
    }
    int64_t at = c < 0xc0 ? -1 : map_get(&nfc_parts, c);    // U+00C0 is the first that decomposes
    if (at < 0) {
        arrput(*out, c);
        return;
    }
    const uint32_t *part = &unicode_decomposition[at];
    nfc_decompose(out, part[0] & 0x7fffffff);
    if (part[1]) nfc_decompose(out, part[1]);
}

// The character that a and b compose, or -1 when they do not.
static int64_t nfc_compose(uint32_t a, uint32_t b) {
    uint32_t l = a - HANGUL_L, s = a - HANGUL_S, v = b - HANGUL_V, t = b - HANGUL_T;
    if (l < N_HANGUL_L && v < N_HANGUL_V) return HANGUL_S + (l * N_HANGUL_V + v) * N_HANGUL_T;
    if (s < N_HANGUL_S && s % N_HANGUL_T == 0 && t - 1 < N_HANGUL_T - 1) return a + t;
    return map_get(&nfc_pairs, (uint64_t)a << 32 | b);
}

// Sorts n marks by their combining class: a counting sort, which is stable and linear.
static void nfc_sort(uint32_t *code, size_t n) {
    size_t start[257] = { 0 };
    uint32_t *old = xmalloc(n * sizeof *old);
    memcpy(old, code, n * sizeof *old);
    for (size_t i = 0; i < n; i++) start[code_ccc(old[i]) + 1]++;
    for (int k = 0; k < 256; k++) start[k + 1] += start[k];
    for (size_t i = 0; i < n; i++) code[start[code_ccc(old[i])]++] = old[i];
    free(old);
}

// Puts every run of marks among the n codes into canonical order.
static void nfc_order(uint32_t *code, size_t n) {
    size_t from = 0, to;
    for (; from < n; from = to) {
        int sorted = 1;
        for (to = from + 1; to < n && code_ccc(code[from]) && code_ccc(code[to]); to++) {
            sorted &= code_ccc(code[to - 1]) <= code_ccc(code[to]);
        }
        if (!sorted) nfc_sort(code + from, to - from);
    }
}

// Composes n codes in place and returns how many are left. A code joins the last starter unless a
// code kept between them blocks it, which is one of the same or a higher class.
static size_t nfc_compose_all(uint32_t *code, size_t n) {
    size_t kept = 0;
    int64_t starter = -1;       // index of the last starter kept; -1: none yet
    int last = -1;              // class of the last code kept behind the starter; -1: none was
    for (size_t i = 0; i < n; i++) {
        int ccc = code_ccc(code[i]);
        if (starter >= 0 && last < ccc) {
            int64_t both = nfc_compose(code[starter], code[i]);
            if (both >= 0) {
                code[starter] = (uint32_t)both;
                continue;
            }
        }
        if (ccc) {
            last = ccc;
        } else {
            starter = (int64_t)kept;
            last = -1;
        }
        code[kept++] = code[i];
    }
    return kept;
}

// Rewrites the stb array *text in NFC.
static void nfc(char **text) {
    size_t n = arrlenu(*text), i = 0;
    while (i < n && (unsigned char)(*text)[i] < 0xcc) i++;
    if (i == n) return;         // every code point is below U+0300: there is nothing to do

    uint32_t *code = NULL;
    int len;
    for (i = 0; i < n; i += (size_t)len) nfc_decompose(&code, char_code(*text + i, n - i, &len));
    nfc_order(code, arrlenu(code));
    n = nfc_compose_all(code, arrlenu(code));

    arrsetlen(*text, 0);
    for (i = 0; i < n; i++) char_put(text, code[i]);
    arrfree(code);
}

// Replaces every `from` in the stb array *text by `to`. The result is built in *spare, and the two
// arrays change places.
static void replace_all(char **text, char **spare, const char *from, const char *to) {
    size_t n = arrlenu(*text), n_from = strlen(from), n_to = strlen(to), i = 0;
    arrsetlen(*spare, 0);
    while (i < n) {
        if (n - i >= n_from && !memcmp(*text + i, from, n_from)) {
            bytes_put(spare, to, n_to);
            i += n_from;
        } else {
            arrput(*spare, (*text)[i]);
            i++;
        }
    }
    char *built = *spare;
    *spare = *text;
    *text = built;
}

// Puts s before the stb array *text.
static void prepend(char **text, const char *s) {
    size_t n = arrlenu(*text), k = strlen(s);
    arrsetlen(*text, n + k);
    memmove(*text + k, *text, n);
    memcpy(*text, s, k);
}

// Runs the normalizer over *text, an stb array that is not empty. at_start: everything begins here.
static void normalize(const Tokenizer *t, char **text, char **spare, int at_start) {
    for (int i = 0; i < (int)arrlen(t->norm); i++) {
        const NormStep *step = &t->norm[i];
        switch (step->kind) {
        case NORM_NFC:
            nfc(text);
            break;
        case NORM_PREPEND:
            prepend(text, step->to);
            break;
        case NORM_PREPEND_START:
            if (at_start) prepend(text, step->to);
            break;
        case NORM_REPLACE:
            replace_all(text, spare, step->from, step->to);
            break;
        }
    }
}

// ---- Pre-tokenizers
// Each known pattern has a matcher written by hand; the exact text of the pattern in the file
// chooses it (split_patterns, below). A pattern that is only a run of characters of one set is read
// from its text (set_run, below). Every byte of a text carries the class of its character, and
// all bytes of a character but the first carry U_INSIDE too, so a run of a class is a plain loop
// over bytes. A matcher gets a position i < n and returns the end of the match, always behind i.
typedef struct {
    const char *s;
    const unsigned char *cls;   // U_* of every byte
    size_t n;                   // where the text ends, for the matcher
} Text;

// Fills the stb array *cls with the class of every byte of s.
static void classify(const char *s, size_t n, unsigned char **cls) {
    arrsetlen(*cls, n);
    for (size_t i = 0; i < n; ) {
        int len;
        uint32_t c = char_code(s + i, n - i, &len);
        unsigned char u = c < BROKEN ? unicode_class[c] : U_REST;
        (*cls)[i++] = u;
        while (--len) (*cls)[i++] = u | U_INSIDE;
    }
}

// The end of the run of characters from i on whose class is in `set`.
static size_t run_end(const Text *t, size_t i, int set) {
    while (i < t->n && t->cls[i] & set) i++;
    return i;
}

// Where the character behind the one at i begins.
static size_t next_char(const Text *t, size_t i) {
    i++;
    while (i < t->n && t->cls[i] & U_INSIDE) i++;
    return i;
}

static int is_newline(char c) { return c == '\n' || c == '\r'; }

// [\r\n]*, or with `slash` [\r\n/]*
static size_t match_newlines(const Text *t, size_t i, int slash) {
    while (i < t->n && (is_newline(t->s[i]) || (slash && t->s[i] == '/'))) i++;
    return i;
}

// \s+(?!\S)|\s+ takes all blanks but the last one before a word, and a single blank too.
static size_t match_blanks(const Text *t, size_t i) {
    size_t end = run_end(t, i, U_SPACE);
    if (end == t->n) return end;
    size_t last = end - 1;
    while (t->cls[last] & U_INSIDE) last--;
    return last > i ? last : end;
}

// Byte c; with any_case an ASCII capital becomes its small letter.
static int fold_case(char c, int any_case) {
    return any_case && isupper((unsigned char)c) ? c | 32 : c;
}

// 's|'t|'re|'ve|'m|'ll|'d, with any_case in capitals too. 0: there is no contraction at i.
static size_t match_contraction(const Text *t, size_t i, int any_case) {
    if (t->s[i] != '\'' || i + 1 >= t->n) return 0;
    int a = fold_case(t->s[i + 1], any_case);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
    if (i + 2 >= t->n) return 0;
    int b = fold_case(t->s[i + 2], any_case);
    if ((a == 'r' || a == 'v') && b == 'e') return i + 3;
    if (a == 'l' && b == 'l') return i + 3;

    // U+017F, the long s, is an s to a pattern that ignores case.
    return any_case && !memcmp(t->s + i + 1, "\xc5\xbf", 2) ? i + 3 : 0;
}

// [^\r\n\p{L}\p{N}]? takes one character or none.
static size_t match_lead(const Text *t, size_t i) {
    if (t->cls[i] & (U_LETTER | U_NUMBER) || is_newline(t->s[i])) return i;
    return next_char(t, i);
}

//  ?[^\s\p{L}\p{N}]+[\r\n]*, or with `slash` [\r\n/]* at its end. 0: no match at i.
static size_t match_signs(const Text *t, size_t i, int slash) {
    size_t start = i + (t->s[i] == ' '), end = run_end(t, start, U_SIGN);
    return end > start ? match_newlines(t, end, slash) : 0;
}

// \s*[\r\n]+ reaches to the last newline of the blanks. 0: no match at i.
static size_t match_lines(const Text *t, size_t i) {
    size_t end = run_end(t, i, U_SPACE);
    while (end > i && !is_newline(t->s[end - 1])) end--;
    return end > i ? end : 0;
}

// What the patterns of Llama 3, Qwen 2 and Tekken end with: signs, else lines, else blanks.
static size_t match_rest(const Text *t, size_t i, int slash) {
    size_t end = match_signs(t, i, slash);
    if (!end) end = match_lines(t, i);
    return end ? end : match_blanks(t, i);
}

// GPT-2: a contraction; letters, digits or signs after at most one blank; or blanks.
static size_t match_gpt2(const Text *t, size_t i) {
    static const int set[] = { U_LETTER, U_NUMBER, U_SIGN };
    size_t end = match_contraction(t, i, 0);
    if (end) return end;
    size_t start = i + (t->s[i] == ' ');
    for (int k = 0; k < 3; k++) {
        end = run_end(t, start, set[k]);
        if (end > start) return end;
    }
    return match_blanks(t, i);
}

// Llama 3 and Qwen 2. digits: the most digits of a number in one word, 3 for Llama 3, 1 for Qwen 2.
static size_t match_llama3(const Text *t, size_t i, int digits) {
    size_t end = match_contraction(t, i, 1);
    if (end) return end;

    // [^\r\n\p{L}\p{N}]?\p{L}+
    size_t start = match_lead(t, i);
    end = run_end(t, start, U_LETTER);
    if (end > start) return end;

    // \p{N}{1,digits}
    end = i;
    for (int k = 0; k < digits && end < t->n && t->cls[end] & U_NUMBER; k++) {
        end = next_char(t, end);
    }
    return end > i ? end : match_rest(t, i, 0);
}

// [upper]*[lower]+ at i, or with `capital` [upper]+[lower]*. 0: no match. Letters without case and
// marks are in both sets, so in the first form [upper]* may have to give characters back: then
// [lower]+ gets only the last such character of the run.
static size_t match_cased(const Text *t, size_t i, int capital) {
    enum { BOTH = U_OTHER_LETTER | U_MARK, UPPER = U_UPPER | BOTH, LOWER = U_LOWER | BOTH };
    size_t up = run_end(t, i, UPPER), end = run_end(t, up, LOWER);
    if (capital) return up > i ? end : 0;
    if (end > up) return end;
    for (; up > i; up--) {
        if (t->cls[up - 1] & BOTH) return up;
    }
    return 0;
}

// Tekken and o200k: a word in one of the two forms of match_cased, each first behind the optional
// lead character and then without it, because a mark may be the lead or the first character of the
// word. digits: the most digits of a number in one word. contractions 1: one may end the word.
static size_t match_tekken(const Text *t, size_t i, int digits, int contractions) {
    size_t start = match_lead(t, i);
    for (int capital = 0; capital < 2; capital++) {
        size_t end = match_cased(t, start, capital);
        if (!end && start > i) end = match_cased(t, i, capital);
        if (!end) continue;
        size_t more = contractions && end < t->n ? match_contraction(t, end, 1) : 0;
        return more ? more : end;
    }
    size_t end = i;
    for (int k = 0; k < digits && end < t->n && t->cls[end] & U_NUMBER; k++) end = next_char(t, end);
    return end > i ? end : match_rest(t, i, 1);
}

// The bits SIGN_* of the character at i.
static int sign_at(const Text *t, size_t i) {
    int len;
    return sign_bits(char_code(t->s + i, t->n - i, &len));
}

// The end of the run of punctuation and symbols from i on.
static size_t signs_end(const Text *t, size_t i) {
    while (i < t->n && sign_at(t, i) & (SIGN_PUNCTUATION | SIGN_SYMBOL)) i = next_char(t, i);
    return i;
}

// One alternative of DeepSeek V3's pattern, the first that matches at i; 0: none does.
static size_t deepseek3_end(const Text *t, size_t i) {
    int letters = U_LETTER | U_MARK;

    // An ASCII sign and [A-Za-z]+
    size_t end = i + 1;
    if (ispunct((unsigned char)t->s[i])) {
        while (end < t->n && isalpha((unsigned char)t->s[end])) end++;
        if (end > i + 1) return end;
    }

    // [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
    int lead = !(t->cls[i] & U_LETTER) && !is_newline(t->s[i])
               && !(sign_at(t, i) & (SIGN_PUNCTUATION | SIGN_SYMBOL));
    if (lead) {
        size_t start = next_char(t, i);
        end = run_end(t, start, letters);
        if (end > start) return end;
    }
    end = run_end(t, i, letters);
    if (end > i) return end;

    //  ?[\p{P}\p{S}]+[\r\n]*, lines, blanks
    size_t start = i + (t->s[i] == ' ');
    end = signs_end(t, start);
    if (end > start) return match_newlines(t, end, 0);
    end = match_lines(t, i);
    if (end || !(t->cls[i] & U_SPACE)) return end;
    return match_blanks(t, i);
}

// Is the character at i in the set of r?
static int in_set(const SetRun *r, const Text *t, size_t i) {
    if (t->cls[i] & r->classes) return 1;
    int len;
    uint32_t code = char_code(t->s + i, t->n - i, &len);
    if (r->signs && sign_bits(code) & r->signs) return 1;
    for (int k = 0; k < (int)arrlen(r->range); k += 2) {
        if (code >= r->range[k] && code <= r->range[k + 1]) return 1;
    }
    return 0;
}

// The end of the characters of r's set from i on; 0 when there are fewer than r->least.
static size_t set_end(const SetRun *r, const Text *t, size_t i) {
    int n = 0;
    for (; n < r->most && i < t->n && in_set(r, t, i); n++) i = next_char(t, i);
    return n >= r->least ? i : 0;
}

// The end of r's match at i, first with its white space and then without; 0: it does not match.
static size_t run_match(const SetRun *r, const Text *t, size_t i) {
    size_t end = r->blank && t->cls[i] & U_SPACE ? set_end(r, t, next_char(t, i)) : 0;
    return end ? end : set_end(r, t, i);
}

// What an Isolated split makes of a pattern that does not match everywhere: a match is a word, and
// so is what lies between two matches. r NULL: DeepSeek V3's pattern.
static size_t match_isolated(const SetRun *r, const Text *t, size_t i) {
    size_t j = i, end = r ? run_match(r, t, i) : deepseek3_end(t, i);
    if (end) return end;
    while (!end && j < t->n) {
        j = next_char(t, j);
        if (j < t->n) end = r ? run_match(r, t, j) : deepseek3_end(t, j);
    }
    return j;
}

// \s+$: the white space at the end is a word, and so is all that stands before it.
static size_t match_trailing(const Text *t, size_t i) {
    size_t start = t->n;
    while (start > i && t->cls[start - 1] & U_SPACE) start--;
    return start > i ? start : t->n;
}

// Punctuation: a sign, or with `runs` a run of them, or everything up to the next sign.
static size_t match_punctuation(const Text *t, size_t i, int runs) {
    int sign = sign_at(t, i) & SIGN_STEP;
    size_t end = next_char(t, i);
    if (sign && !runs) return end;
    while (end < t->n && (sign_at(t, end) & SIGN_STEP) == sign) end = next_char(t, end);
    return end;
}

// Is byte c, as a character of the byte alphabet, a digit or another number? Beside the ten digits
// these are the superscripts and fractions of Latin-1.
static int byte_is_number(char c) {
    unsigned char b = (unsigned char)c;
    return isdigit(b) || b == 0xb2 || b == 0xb3 || b == 0xb9 || (b >= 0xbc && b <= 0xbe);
}

// Digits behind ByteLevel, which sees every byte as a character of its own.
static size_t match_byte_digits(const Text *t, size_t i, int single) {
    int number = byte_is_number(t->s[i]);
    if (number && single) return i + 1;
    while (i < t->n && byte_is_number(t->s[i]) == number) i++;
    return i;
}

// Metaspace: up to the next U+2581 behind i.
static size_t match_metaspace(const Text *t, size_t i) {
    for (i++; i < t->n; i++) {
        if (t->n - i >= 3 && !memcmp(t->s + i, BLANK_MARK, 3)) break;
    }
    return i;
}

// Digits: a number, single digit by single digit or as a run, or everything up to the next number.
static size_t match_digits(const Text *t, size_t i, int single) {
    if (!(t->cls[i] & U_NUMBER)) return run_end(t, i, U_NO_NUMBER);
    return single ? next_char(t, i) : run_end(t, i, U_NUMBER);
}

// The end of the word that a split of kind SPLIT_* finds at i. run: Tokenizer.run.
static size_t match(const SetRun *run, int kind, const Text *t, size_t i) {
    if (kind >= SPLIT_RUN) return match_isolated(&run[kind - SPLIT_RUN], t, i);
    switch (kind) {
    case SPLIT_LLAMA3:    return match_llama3(t, i, 3);
    case SPLIT_QWEN2:     return match_llama3(t, i, 1);
    case SPLIT_GPT2:      return match_gpt2(t, i);
    case SPLIT_TEKKEN:    return match_tekken(t, i, 1, 0);
    case SPLIT_O200K:     return match_tekken(t, i, 3, 1);
    case SPLIT_DEEPSEEK3: return match_isolated(NULL, t, i);
    case SPLIT_TRAILING:  return match_trailing(t, i);
    case SPLIT_METASPACE: return match_metaspace(t, i);
    case SPLIT_DIGITS:    return match_digits(t, i, 1);
    case SPLIT_NUMBERS:   return match_digits(t, i, 0);
    case SPLIT_PUNCTUATION:  return match_punctuation(t, i, 0);
    case SPLIT_PUNCTUATIONS: return match_punctuation(t, i, 1);
    case SPLIT_BYTE_DIGITS:  return match_byte_digits(t, i, 1);
    default:                 return match_byte_digits(t, i, 0);
    }
}

// ---- BPE merges
// A word is a linked list of symbols, one a character at first. Every neighbouring pair that merges
// waits in a heap, lowest rank first, leftmost first among equals. An entry is stale, and is
// skipped when it comes up, when the pair of its left symbol has changed since. (SentencePiece
// models of type unigram have no merges and are refused.)
typedef struct {
    int id;
    int prev, next;             // indices of the neighbours; -1: none
    int rank;                   // of the pair (this, next); NO_RANK: the pair does not merge
    int into;                   // the id the pair merges into
} Symbol;
enum { NO_RANK = INT_MAX };

typedef struct {                // everything one call of encode_at works with; stb arrays
    const Tokenizer *t;
    int special;                // 1: the text may name special tokens
    int *ids;                   // what comes out
    char *text;                 // the segment after the normalizer
    char *spare;                // what replace_all writes into
    char *mapped;               // the segment after Metaspace, or, in a byte-level model, the word
    unsigned char *cls;         // classes of the segment's bytes
    Symbol *sym;                // the word's symbols
    uint64_t *heap;             // rank << 32 | index of the left symbol
} Encoder;

// Puts x into a binary heap whose smallest entry stands first.
static void heap_push(uint64_t **heap, uint64_t x) {
    arrput(*heap, x);
    uint64_t *h = *heap;
    size_t i = arrlenu(h) - 1;
    while (i && h[(i - 1) / 2] > x) {
        h[i] = h[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h[i] = x;
}

// Takes the smallest entry out of the heap.
static uint64_t heap_pop(uint64_t *h) {
    uint64_t top = h[0], x = arrpop(h);
    size_t n = arrlenu(h), i = 0;
    while (2 * i + 1 < n) {
        size_t child = 2 * i + 1;
        if (child + 1 < n && h[child + 1] < h[child]) child++;
        if (h[child] >= x) break;
        h[i] = h[child];
        i = child;
    }
    if (n) h[i] = x;
    return top;
}

// May BPE make this id? It must be in the BPE vocabulary, and it may be a special token only in a
// text that may name special tokens: the words of a user never become one.
static int bpe_may_make(const Encoder *e, int id) {
    if (id < 0) return 0;
    int flags = e->t->piece[id].flags;
    return flags & PIECE_MODEL && (e->special || !(flags & PIECE_SPECIAL));
}

// Looks up the pair that symbol i makes with its right neighbour, and puts it into the heap when it
// merges.
static void pair_offer(Encoder *e, int i) {
    Symbol *s = &e->sym[i];
    s->rank = NO_RANK;
    if (s->next < 0) return;
    int64_t merge = map_get(&e->t->merges, (uint64_t)s->id << 32 | (uint64_t)e->sym[s->next].id);
    if (merge < 0) return;
    int into = (int)(merge & INT_MAX);
    if (!bpe_may_make(e, into)) return;
    s->rank = (int)(merge >> 32);
    s->into = into;
    heap_push(&e->heap, (uint64_t)s->rank << 32 | (uint64_t)i);
}

// Appends a symbol to the word.
static void symbol_put(Encoder *e, int id) {
    int i = (int)arrlen(e->sym);
    Symbol s = { id, i - 1, i + 1, NO_RANK, -1 };
    arrput(e->sym, s);
}

// Byte fallback: appends a symbol <0xNN> for each of a character's n bytes. Returns 0, with nothing
// appended, when the model has no byte fallback or a byte has no piece.
static int symbols_of_bytes(Encoder *e, const char *s, int n) {
    const int *byte_id = e->t->byte_id;
    if (!e->t->byte_fallback) return 0;
    for (int i = 0; i < n; i++) {
        if (byte_id[(unsigned char)s[i]] < 0) return 0;
    }
    for (int i = 0; i < n; i++) symbol_put(e, byte_id[(unsigned char)s[i]]);
    return 1;
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
        } else if (!symbols_of_bytes(e, s + i, len) && t->unk >= 0) {
            if (waits && !t->fuse_unk) symbol_put(e, t->unk);
            waits = 1;
        }
    }
    if (waits) symbol_put(e, t->unk);
    if (arrlen(e->sym)) arrlast(e->sym).next = -1;
}

// Merges the symbols of the word, best pair first, until no pair merges.
static void word_merge(Encoder *e) {
    arrsetlen(e->heap, 0);
    for (int i = 0; i < (int)arrlen(e->sym); i++) pair_offer(e, i);
    while (arrlen(e->heap)) {
        uint64_t top = heap_pop(e->heap);
        int i = (int)(top & INT_MAX);
        Symbol *left = &e->sym[i];
        if (left->rank != (int)(top >> 32)) continue;       // stale

        // The left symbol becomes the merged one, the right one leaves the list.
        Symbol *right = &e->sym[left->next];
        left->id = left->into;
        left->next = right->next;
        right->rank = NO_RANK;
        if (left->next >= 0) e->sym[left->next].prev = i;
        pair_offer(e, i);
        if (left->prev >= 0) pair_offer(e, left->prev);
    }
}

// Appends the ids of one word.
static void word_bpe(Encoder *e, const char *s, size_t n) {
    if (e->t->byte_level) {
        arrsetlen(e->mapped, 0);
        for (size_t i = 0; i < n; i++) char_put(&e->mapped, byte_char((unsigned char)s[i]));
        s = e->mapped;
        n = arrlenu(e->mapped);
    }
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

// ---- Encoding
// Cuts the bytes [i, t.n) of t by the pre-tokenizer's splits from `step` on, each split inside the
// words of the one before it, and hands the words to BPE.
static void split_piece(Encoder *e, Text t, size_t i, size_t step) {
    if (step == arrlenu(e->t->split)) {
        word_bpe(e, t.s + i, t.n - i);
        return;
    }
    size_t end = t.n;
    while (i < end) {
        t.n = end;
        size_t word_end = match(e->t->run, e->t->split[step], &t, i);
        t.n = word_end;
        split_piece(e, t, i, step + 1);
        i = word_end;
    }
}

// Encodes a normalized text without added tokens.
static void encode_piece(Encoder *e, const char *s, size_t n, int at_start) {
    const Tokenizer *t = e->t;
    if (t->meta != META_NONE) {
        arrsetlen(e->mapped, 0);
        bytes_put(&e->mapped, s, n);
        replace_all(&e->mapped, &e->spare, " ", BLANK_MARK);
        int marked = arrlen(e->mapped) >= 3 && !memcmp(e->mapped, BLANK_MARK, 3);
        int wanted = t->meta == META_ALWAYS || (t->meta == META_FIRST && at_start);
        if (wanted && !marked) prepend(&e->mapped, BLANK_MARK);
        s = e->mapped;
        n = arrlenu(e->mapped);
    }
    if (arrlen(t->split)) classify(s, n, &e->cls);
    split_piece(e, (Text){ s, e->cls, n }, 0, 0);
}

// The longest added token that begins at s[i]: its index in `added` with its end in *end, or -1
// with *end untouched.
static int added_here(const Tokenizer *t, int which, const char *s, size_t n, size_t i,
                      size_t *end) {
    const Map *trie = &t->trie[which];
    int64_t node = 0, hit = -1;
    if (!t->starts[which][(unsigned char)s[i]]) return -1;
    for (; i < n; i++) {
        node = map_get(trie, (uint64_t)node << 9 | (unsigned char)s[i]);
        if (node < 0) break;
        int64_t leaf = map_get(trie, (uint64_t)node << 9 | 256);
        if (leaf < 0) continue;
        hit = leaf;
        *end = i + 1;
    }
    return (int)hit;
}

// The next added token of s[0,n) at or after `from`: the leftmost one, and the longest of those
// that begin there. Returns its index in `added`, or -1. [*start, *end) includes the white space it
// swallows (lstrip, rstrip).
static int added_next(const Encoder *e, int which, const char *s, size_t n, size_t from,
                      size_t *start, size_t *end) {
    const Tokenizer *t = e->t;
    for (size_t i = from, stop; i < n; i = stop) {
        stop = i + 1;
        int hit = added_here(t, which, s, n, i, &stop);
        if (hit < 0) continue;
        const AddedToken *a = &t->added[hit];
        if (a->guarded && !e->special) continue;    // here its characters are plain text

        *start = i;
        *end = stop;
        while (a->lstrip) {
            size_t blank = space_before(s, from, *start);
            if (!blank) break;
            *start -= blank;
        }
        int len;
        while (a->rstrip && *end < n && is_space(s + *end, n - *end, &len)) *end += (size_t)len;
        return hit;
    }
    return -1;
}

// Cuts the added tokens out of s[0,n), those of the raw text (which 0) or of the normalized text
// (which 1). Appends their ids, and calls encode_rest for every text between them.
static void cut_added(Encoder *e, int which, const char *s, size_t n, int at_start,
                      void (*encode_rest)(Encoder *e, const char *s, size_t n, int at_start)) {
    size_t from = 0, start, end;
    for (;;) {
        int a = added_next(e, which, s, n, from, &start, &end);
        if (a < 0) break;
        if (start > from) encode_rest(e, s + from, start - from, at_start && !from);
        arrput(e->ids, e->t->added[a].id);
        from = end;
    }
    if (n > from) encode_rest(e, s + from, n - from, at_start && !from);
}

// Normalizes and encodes a text between the added tokens of the raw text.
static void encode_segment(Encoder *e, const char *s, size_t n, int at_start) {
    if (arrlen(e->t->norm)) {
        arrsetlen(e->text, 0);
        bytes_put(&e->text, s, n);
        normalize(e->t, &e->text, &e->spare, at_start);
        s = e->text;
        n = arrlenu(e->text);
    }
    cut_added(e, 1, s, n, at_start, encode_piece);
}

// Appends the ids of a text to the stb array ids and returns it.
// parse_special: 1 where the text may name special tokens. at_start: 1 where everything begins, the
// only place where some SentencePiece models put a blank before the text.
int *encode_at(const Tokenizer *t, const char *text, size_t n, int parse_special,
                      int at_start, int *ids) {
    if (n > INT_MAX / 8) {
        die(EXIT_USAGE, "a text of %zu bytes is too long, at most %d", n, INT_MAX / 8);
    }
    Encoder e = { .t = t, .special = parse_special, .ids = ids };
    cut_added(&e, 0, text, n, at_start, encode_segment);
    arrfree(e.text);
    arrfree(e.spare);
    arrfree(e.mapped);
    arrfree(e.cls);
    arrfree(e.sym);
    arrfree(e.heap);
    return e.ids;
}

// encode_at for a text with which everything begins.
int *tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int parse_special,
                             int *ids) {
    return encode_at(t, text, n, parse_special, 1, ids);
}

// Does every byte become a token of its own when nothing stands beside it? Without that, any number of
// characters may become one token, or none.
static int bytes_have_tokens(const Tokenizer *t) {
    for (int b = 1; b < 256; b++) {
        const char byte = (char)b;
        int *ids = tokenizer_encode(t, &byte, 1, 0, NULL), known = arrlen(ids) > 0;
        for (int i = 0; i < (int)arrlen(ids); i++) known &= ids[i] != t->unk;
        arrfree(ids);
        if (!known) return 0;
    }
    return 1;
}

// A number of tokens that a text of n bytes has at least, without encoding it: its characters that are
// no white space, in pieces as long as the longest. A normalizer may shorten a text before, never to
// less than an eighth. 0: nothing can be said.
size_t fewest_tokens(const Tokenizer *t, const char *text, size_t n) {
    size_t solid = 0, longest = 1;
    int len;
    for (size_t i = 0; i < n; i += (size_t)len)
        if (!is_space(text + i, n - i, &len)) solid += (size_t)len;
    for (int i = 0; i < tokenizer_size(t); i++)
        longest = max_size(longest, (size_t)max_int(t->piece[i].n_text, t->piece[i].n_bytes));
    if (arrlen(t->norm)) longest *= 8;
    return solid > longest && bytes_have_tokens(t) ? solid / longest : 0;
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

// Feeds one byte. Appends what it completes to the stb array out, which is returned.
static char *decode_byte(Decoder *d, char c, char *out) {
    d->held[d->n++] = c;
    while (d->n) {
        int len = utf8_length(d->held, (size_t)d->n), done = len;
        if (!len && utf8_begins(d->held, d->n)) return out;
        if (len) {
            bytes_put(&out, d->held, (size_t)len);
        } else {
            bytes_put(&out, "\xef\xbf\xbd", 3);
            done = max_int(d->n - 1, 1);        // without the newest byte it was a beginning
        }
        d->n -= done;
        memmove(d->held, d->held + done, (size_t)d->n);
    }
    return out;
}

// Feeds one id. Appends what it completes to the stb array out, which is returned.
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

// Ends the stream: what is held back cannot become a character any more.
char *decode_flush(Decoder *d, char *out) {
    if (d->n) bytes_put(&out, "\xef\xbf\xbd", 3);
    d->n = 0;
    return out;
}

// ---- Loading: what every format shares
// The functions below that return int return 0, or -1 with the reason in err.
void tokenizer_free(Tokenizer *t) {
    if (!t) return;
    arrfree(t->piece);
    arrfree(t->chars);
    arrfree(t->added);
    arrfree(t->norm);
    arrfree(t->split);
    for (int i = 0; i < (int)arrlen(t->run); i++) arrfree(t->run[i].range);
    arrfree(t->run);
    free(t->by_text);
    free(t->merges.slot);
    free(t->trie[0].slot);
    free(t->trie[1].slot);
    free(t);
}

// An empty tokenizer with room for about n pieces: ids may reach n_by_text + 1023 (piece_add).
static Tokenizer *tokenizer_new(size_t n) {
    Tokenizer *t = xcalloc(1, sizeof *t);
    unicode_load();
    t->unk = -1;
    t->bos = -1;
    t->eos = -1;
    t->n_by_text = 64;
    while (t->n_by_text < 2 * n + 2) t->n_by_text *= 2;
    t->by_text = xmalloc(t->n_by_text * sizeof(int));
    for (size_t i = 0; i < t->n_by_text; i++) t->by_text[i] = -1;
    for (int b = 0; b < 256; b++) t->byte_id[b] = -1;
    return t;
}

// How many of a piece's n bytes a message shows.
static int shown(size_t n) { return (int)min_size(n, 100); }

// Is the whole of s well-formed UTF-8?
static int utf8_whole(const char *s, size_t n) {
    size_t i = 0;
    while (i < n) {
        int len = utf8_length(s + i, n - i);
        if (!len) return 0;
        i += (size_t)len;
    }
    return 1;
}

// Gives the text s the id and the flags (PIECE_*). A text that has the id already gets the flags as
// well: an added token may stand in the BPE vocabulary too.
static int piece_add(Tokenizer *t, int64_t id, const char *s, size_t n, int flags, char err[512]) {
    size_t limit = t->n_by_text + 1024, size = arrlenu(t->piece), slot = text_slot(t, s, n);
    int has = t->by_text[slot];         // the id that the text has, or -1
    if (!utf8_whole(s, n) || (flags & PIECE_ADDED && memchr(s, 0, n)))
        return fault(err, "token %lld is not UTF-8, or holds a NUL", (long long)id);
    if (n > MAX_PIECE)
        return fault(err, "token '%.*s..' has %zu bytes: expected at most %d", shown(n), s, n, MAX_PIECE);
    if (id < 0 || (uint64_t)id >= limit)
        return fault(err, "token '%.*s' has id %lld: expected 0..%zu", shown(n), s, (long long)id,
                     limit - 1);
    if (has >= 0 && has != id)
        return fault(err, "token '%.*s' has two ids, %d and %lld", shown(n), s, has, (long long)id);
    if ((size_t)id < size && t->piece[id].flags && has != id)
        return fault(err, "id %lld belongs to two tokens, '%.100s' and '%.*s'", (long long)id,
                     t->chars + t->piece[id].text, shown(n), s);
    if (has == id) {
        if (t->piece[id].flags & flags)
            return fault(err, "token '%.*s' is listed twice", shown(n), s);
        t->piece[id].flags |= flags;
        return 0;
    }

    if ((size_t)id >= size) {
        arrsetlen(t->piece, (size_t)id + 1);
        memset(t->piece + size, 0, ((size_t)id + 1 - size) * sizeof(Piece));
    }
    t->piece[id] = (Piece){ .text = arrlenu(t->chars), .n_text = (int)n };
    t->piece[id].flags = PIECE_USED | flags;
    bytes_put(&t->chars, s, n);
    arrput(t->chars, 0);
    t->by_text[slot] = (int)id;
    return 0;
}

// Finds the pieces <0x00> to <0xFF>.
static void byte_ids(Tokenizer *t) {
    for (int b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        t->byte_id[b] = model_id(t, name, 6);
    }
}

// Notes that left and right merge into the id `into`; lower ranks merge first.
static void merge_put(Tokenizer *t, int left, int right, int rank, int into) {
    map_put(&t->merges, (uint64_t)left << 32 | (uint64_t)right, (int64_t)rank << 32 | into);
}

// Puts added token number `index` into the trie of its kind. A normalized one goes in as the
// normalizer writes it.
static void trie_add(Tokenizer *t, int index, int normalized) {
    const Piece *p = &t->piece[t->added[index].id];
    Map *trie = &t->trie[normalized];
    char *text = NULL, *spare = NULL;
    bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
    if (normalized) normalize(t, &text, &spare, 1);

    int64_t node = 0;
    for (size_t i = 0; i < arrlenu(text); i++) {
        uint64_t key = (uint64_t)node << 9 | (unsigned char)text[i];
        node = map_get(trie, key);
        if (node >= 0) continue;
        node = ++t->nodes[normalized];
        map_put(trie, key, node);
    }
    map_put(trie, (uint64_t)node << 9 | 256, index);
    t->starts[normalized][(unsigned char)text[0]] = 1;
    arrfree(text);
    arrfree(spare);
}

// The byte whose piece <0xNN> has this id, or -1.
static int byte_of_id(const Tokenizer *t, int id) {
    for (int b = 255; b >= 0; b--) {
        if (t->byte_id[b] == id) return b;
    }
    return -1;
}

// Appends the bytes that n bytes of text stand for in the byte alphabet. Returns 0, with *out
// empty, when a character is not of the alphabet.
static int bytes_of_alphabet(const char *text, int n, char **out) {
    int len;
    for (int i = 0; i < n; i += len) {
        int b = char_byte(char_code(text + i, (size_t)(n - i), &len));
        if (b < 0) {
            arrsetlen(*out, 0);
            return 0;
        }
        arrput(*out, (char)b);
    }
    return 1;
}

// Writes the decoded form of a piece whose text is *text to *out, which is empty. Both are stb
// arrays, and *text may be used up. A piece with a character outside the byte alphabet stands for
// itself.
static void decode_piece(const Tokenizer *t, int id, char **text, char **out) {
    int added = t->piece[id].flags & PIECE_ADDED, n = (int)arrlen(*text);
    int byte = t->dec_bytes ? byte_of_id(t, id) : -1;
    if (byte >= 0) {
        arrput(*out, (char)byte);
        return;
    }
    if (t->dec_byte_level && !added && bytes_of_alphabet(*text, n, out)) return;
    bytes_put(out, *text, (size_t)n);
    if (t->dec_space) replace_all(out, text, BLANK_MARK, " ");
}

// Makes the decoded form of every piece, from the flags dec_*.
static void decode_table(Tokenizer *t) {
    char *text = NULL, *out = NULL;
    for (int id = 0; id < tokenizer_size(t); id++) {
        Piece *p = &t->piece[id];
        arrsetlen(text, 0);
        bytes_put(&text, t->chars + p->text, (size_t)p->n_text);
        arrsetlen(out, 0);
        if (p->flags & PIECE_NORMALIZED) normalize(t, &text, &out, 1);
        arrsetlen(out, 0);
        decode_piece(t, id, &text, &out);
        p->bytes = arrlenu(t->chars);
        p->n_bytes = (int)arrlen(out);
        bytes_put(&t->chars, out, arrlenu(out));
    }
    arrfree(text);
    arrfree(out);
}

// ---- Loading tokenizer.json
// Refuses an object for its type. what: "a normalizer" and the like.
static int refuse_type(char err[512], const char *what, const Json *obj) {
    const char *type = json_text(obj, "type");
    if (!*type) return fault(err, "%s without a type is not supported", what);
    return fault(err, "%s of type '%.100s' is not supported", what, type);
}

// The list of a "Sequence" object under `key`; NULL when obj is none, or lies too deep.
static const Json *sequence_list(const Json *obj, const char *key, int depth) {
    const Json *list = json_get(obj, key);
    if (strcmp(json_text(obj, "type"), "Sequence") || depth >= 4) return NULL;
    return json_is(list, JSON_ARRAY) ? list : NULL;
}

// model.vocab: an object from texts to ids.
static int load_vocab(Tokenizer *t, const Json *vocab, char err[512]) {
    for (int i = 0; i < vocab->n; i++) {
        const Json *id = &vocab->item[i];
        const char *text = vocab->key[i];
        if (id->type != JSON_NUMBER || !id->is_int)
            return fault(err, "model.vocab: the id of '%.100s' is no integer", text);
        if (piece_add(t, id->i, text, strlen(text), PIECE_MODEL, err)) return -1;
    }
    return 0;
}

// Adds the merge of the texts a and b. *both is an stb array to work in.
static int merge_add(Tokenizer *t, int rank, const char *a, size_t na, const char *b, size_t nb,
                     char **both, char err[512]) {
    arrsetlen(*both, 0);
    bytes_put(both, a, na);
    bytes_put(both, b, nb);
    if (!na || !nb) return fault(err, "model.merges[%d] has an empty side", rank);

    const char *const text[3] = { a, b, *both };
    size_t n[3] = { na, nb, na + nb };
    int id[3];
    for (int i = 0; i < 3; i++) {
        id[i] = model_id(t, text[i], n[i]);
        if (id[i] < 0)
            return fault(err, "model.merges[%d] needs '%.*s', which is not in the vocabulary", rank,
                         shown(n[i]), text[i]);
    }
    merge_put(t, id[0], id[1], rank, id[2]);
    return 0;
}

// One member of model.merges: "left right", or ["left", "right"].
static int load_merge(Tokenizer *t, const Json *m, int rank, char **both, char err[512]) {
    if (m->type == JSON_STRING && m->len) {
        const char *left = m->str, *gap = memchr(left, ' ', m->len);
        const char *right = gap ? gap + 1 : left;
        size_t n_left = gap ? (size_t)(gap - left) : 0, n_right = m->len - (size_t)(right - left);
        if (gap && !memchr(right, ' ', n_right))
            return merge_add(t, rank, left, n_left, right, n_right, both, err);
    }
    if (m->type == JSON_ARRAY && m->n == 2) {
        const Json *a = &m->item[0], *b = &m->item[1];
        if (a->type == JSON_STRING && b->type == JSON_STRING)
            return merge_add(t, rank, a->str, a->len, b->str, b->len, both, err);
    }
    return fault(err, "model.merges[%d]: expected \"left right\" or [\"left\", \"right\"]", rank);
}

// model.merges. A merge's rank is its index.
static int load_merges(Tokenizer *t, const Json *merges, char err[512]) {
    char *both = NULL;
    int bad = 0;
    for (int i = 0; i < merges->n && !bad; i++) {
        bad = load_merge(t, &merges->item[i], i, &both, err);
    }
    arrfree(both);
    return bad;
}

// Refuses what a BPE model may ask for and BPE here does not do.
static int check_model(const Json *m, char err[512]) {
    static const char *const affix[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    const Json *vocab = json_get(m, "vocab"), *merges = json_get(m, "merges");
    const Json *dropout = json_get(m, "dropout");
    if (!json_none(json_get(m, "type")) && strcmp(json_text(m, "type"), "BPE"))
        return refuse_type(err, "a model", m);
    if (!json_is(vocab, JSON_OBJECT) || !vocab->n)
        return fault(err, "model.vocab: expected an object with tokens");
    if (!json_is(merges, JSON_ARRAY) || !merges->n)
        return fault(err, "model.merges: expected a list with merges");
    for (int i = 0; i < 2; i++) {
        const Json *j = json_get(m, affix[i]);
        if (json_none(j)) continue;
        if (j->type != JSON_STRING || j->len)
            return fault(err, "model.%s is not supported", affix[i]);
    }
    if (!json_none(dropout) && (dropout->type != JSON_NUMBER || dropout->num != 0))
        return fault(err, "model.dropout is not supported");
    return 0;
}

// "model": vocabulary, merges, and what becomes of unknown characters.
static int load_model(Tokenizer *t, const Json *m, char err[512]) {
    if (check_model(m, err)) return -1;
    t->ignore_merges = json_flag(m, "ignore_merges", 0);
    t->byte_fallback = json_flag(m, "byte_fallback", 0);
    t->fuse_unk = json_flag(m, "fuse_unk", 0);
    if (t->ignore_merges > 1 || t->byte_fallback > 1 || t->fuse_unk > 1)
        return fault(err, "model: ignore_merges, byte_fallback and fuse_unk are true or false");
    if (load_vocab(t, json_get(m, "vocab"), err)) return -1;
    if (load_merges(t, json_get(m, "merges"), err)) return -1;
    byte_ids(t);

    const Json *unk = json_get(m, "unk_token");
    if (json_none(unk)) return 0;
    t->unk = unk->type == JSON_STRING ? model_id(t, unk->str, unk->len) : -1;
    return t->unk >= 0 ? 0 : fault(err, "model.unk_token is not in the vocabulary");
}

// Does an added token look like a turn mark? DeepSeek's <｜User｜> and its like are not "special" in
// their files, but a user must not be able to write them either.
static int looks_special(const char *s, size_t n) {
    int opens = !strncmp(s, "<|", 2) || !strncmp(s, "<｜", 4);
    return n > 4 && opens && s[n - 1] == '>';
}

// Member i of added_tokens.
static int load_added_token(Tokenizer *t, const Json *j, int i, char err[512]) {
    const Json *id = json_get(j, "id"), *content = json_get(j, "content");
    int special = json_flag(j, "special", 0), normalized = json_flag(j, "normalized", !special);
    AddedToken a = { .lstrip = json_flag(j, "lstrip", 0), .rstrip = json_flag(j, "rstrip", 0) };
    if (!json_is(id, JSON_NUMBER) || !id->is_int)
        return fault(err, "added_tokens[%d].id is not an integer", i);
    if (!json_is(content, JSON_STRING) || !content->len)
        return fault(err, "added_tokens[%d].content is no text, or empty", i);
    if (special > 1 || normalized > 1 || a.lstrip > 1 || a.rstrip > 1)
        return fault(err, "added_tokens[%d]: a flag is neither true nor false", i);
    if (json_flag(j, "single_word", 0))
        return fault(err, "added token '%.100s': single_word is not supported", content->str);

    int flags = PIECE_ADDED;
    if (special) flags |= PIECE_SPECIAL;
    if (normalized) flags |= PIECE_NORMALIZED;
    if (piece_add(t, id->i, content->str, content->len, flags, err)) return -1;
    a.id = (int)id->i;
    a.guarded = special || looks_special(content->str, content->len);
    arrput(t->added, a);
    trie_add(t, i, normalized);
    return 0;
}

// "added_tokens". Needs the normalizer, which rewrites those that are normalized.
static int load_added(Tokenizer *t, const Json *list, char err[512]) {
    if (json_none(list)) return 0;
    if (list->type != JSON_ARRAY) return fault(err, "added_tokens: expected a list");
    for (int i = 0; i < list->n; i++) {
        if (load_added_token(t, &list->item[i], i, err)) return -1;
    }
    return 0;
}

// "normalizer": NFC, Prepend, Replace of a text, or a Sequence of them.
static int load_normalizer(Tokenizer *t, const Json *n, int depth, char err[512]) {
    if (json_none(n)) return 0;
    const Json *list = sequence_list(n, "normalizers", depth);
    if (list) {
        for (int i = 0; i < list->n; i++) {
            if (load_normalizer(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }

    const char *type = json_text(n, "type");
    const char *from = json_text(json_get(n, "pattern"), "String"), *to = json_text(n, "content");
    NormStep step = { .kind = NORM_NFC };
    if (!strcmp(type, "Prepend")) {
        step.kind = NORM_PREPEND;
        to = json_text(n, "prepend");
    } else if (!strcmp(type, "Replace")) {
        step.kind = NORM_REPLACE;
    } else if (strcmp(type, "NFC")) {
        return refuse_type(err, "a normalizer", n);
    }
    if (step.kind == NORM_REPLACE && (!*from || strlen(from) >= sizeof step.from))
        return fault(err, "normalizer Replace: only a short pattern {\"String\": ...} is supported");
    if (step.kind != NORM_NFC && (!*to || strlen(to) >= sizeof step.to))
        return fault(err, "normalizer %s: only a short text is supported", type);
    if (arrlen(t->norm) == MAX_STEPS)
        return fault(err, "normalizer: more than %d steps are not supported", MAX_STEPS);
    if (step.kind == NORM_REPLACE) strcpy(step.from, from);
    if (step.kind != NORM_NFC) strcpy(step.to, to);
    arrput(t->norm, step);
    return 0;
}

// The patterns as tokenizer.json files write them. A file's pattern equals one of them, or is a run
// of characters of one set (set_run), or is refused.
#define CONTRACTIONS_AND_WORDS "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define SIGNS_AND_BLANKS "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TEKKEN_UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define TEKKEN_LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
static const struct {
    const char *regex;
    int split;                  // SPLIT_*
} split_patterns[] = {
    { CONTRACTIONS_AND_WORDS "\\p{N}{1,3}" SIGNS_AND_BLANKS, SPLIT_LLAMA3 },
    { CONTRACTIONS_AND_WORDS "\\p{N}" SIGNS_AND_BLANKS, SPLIT_QWEN2 },
    { "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_GPT2 },
    { "[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "*" TEKKEN_LOWER "+"
      "|[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "+" TEKKEN_LOWER "*"
      "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", SPLIT_TEKKEN },
    { "[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "*" TEKKEN_LOWER "+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
      "|[^\\r\\n\\p{L}\\p{N}]?" TEKKEN_UPPER "+" TEKKEN_LOWER "*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
      "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", SPLIT_O200K },
    { "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
      "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
      "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", SPLIT_DEEPSEEK3 },
    { "\\s+$", SPLIT_TRAILING },
};

// Reads one unit of a regular expression at *p: a character, or an escape of two. \r and \n are the
// characters they stand for; any other escape gets the bit ESCAPED. Returns 0 at the end.
enum { ESCAPED = 1 << 24 };
static uint32_t regex_unit(const char **p) {
    int len;
    if (!**p) return 0;
    uint32_t c = char_code(*p, strlen(*p), &len);
    *p += len;
    if (c != '\\' || !**p) return c;
    c = char_code(*p, strlen(*p), &len);
    *p += len;
    if (c == 'r') return '\r';
    return c == 'n' ? '\n' : ESCAPED | c;
}

// Are two regular expressions the same? Some files hold the characters CR and LF, others \r and \n.
static int regex_same(const char *a, const char *b) {
    uint32_t x, y;
    do {
        x = regex_unit(&a);
        y = regex_unit(&b);
    } while (x == y && x);
    return x == y;
}

// Reads {L} and the like behind \p into r. Returns 0, or -1 when the property is not known.
static int set_property(const char **p, SetRun *r) {
    if ((*p)[0] != '{' || !(*p)[1] || (*p)[2] != '}') return -1;
    switch ((*p)[1]) {
    case 'L': r->classes |= U_LETTER; break;
    case 'M': r->classes |= U_MARK; break;
    case 'N': r->classes |= U_NUMBER; break;
    case 'P': r->signs |= SIGN_PUNCTUATION; break;
    case 'S': r->signs |= SIGN_SYMBOL; break;
    default:  return -1;
    }
    *p += 3;
    return 0;
}

// Reads a character of a set. Returns 0 when it is none, because only signs stand for themselves
// behind a backslash.
static uint32_t set_char(const char **p) {
    uint32_t c = regex_unit(p);
    if (!(c & ESCAPED)) return c;
    c &= ~(uint32_t)ESCAPED;
    return c < 128 && ispunct((int)c) ? c : 0;
}

// Reads the members of a set [..], behind its bracket, into r: characters, ranges and \p{..}.
// Returns 0, or -1 when there is something else.
static int set_members(const char **p, SetRun *r) {
    while (**p != ']') {
        if (strchr("^[&-", **p)) return -1;             // the text's end is such a character, too
        if (!strncmp(*p, "\\p", 2)) {
            *p += 2;
            if (set_property(p, r)) return -1;
            continue;
        }
        uint32_t first = set_char(p), last = first;
        if ((*p)[0] == '-') {
            (*p)++;
            last = set_char(p);
        }
        if (!first || last < first) return -1;
        arrput(r->range, first);
        arrput(r->range, last);
    }
    (*p)++;
    return r->classes || r->signs || arrlen(r->range) ? 0 : -1;
}

// Reads a whole pattern into r: \s? or nothing, a set or \p{..}, and + or {1,3} or nothing or the
// same set again and again. Returns 0, or -1 when the pattern is another.
static int set_run(const char *regex, SetRun *r) {
    const char *p = regex;
    if (!strncmp(p, "\\s?", 3)) {
        r->blank = 1;
        p += 3;
    }
    const char *set = p;
    if (*p == '[') {
        p++;
        if (set_members(&p, r)) return -1;
    } else if (!strncmp(p, "\\p", 2)) {
        p += 2;
        if (set_property(&p, r)) return -1;
    } else {
        return -1;
    }

    size_t n = (size_t)(p - set);
    r->least = 1;
    r->most = 1;
    if (!strcmp(p, "+")) r->most = INT_MAX;
    else if (!strcmp(p, "{1,3}")) r->most = 3;
    else {
        for (; !strncmp(p, set, n); p += n) r->least = ++r->most;
        if (*p) return -1;
    }
    return 0;
}

// Pre-tokenizer "Split": a regular expression.
static int load_split(Tokenizer *t, const Json *p, char err[512]) {
    const char *regex = json_text(json_get(p, "pattern"), "Regex");
    if (strcmp(json_text(p, "behavior"), "Isolated") || json_flag(p, "invert", 0))
        return fault(err, "pre_tokenizer Split: only behavior Isolated without invert is supported");
    for (size_t i = 0; i < sizeof split_patterns / sizeof *split_patterns && !t->byte_level; i++) {
        if (!regex_same(regex, split_patterns[i].regex)) continue;
        arrput(t->split, split_patterns[i].split);
        return 0;
    }

    // Behind ByteLevel the characters are those of the byte alphabet: [0-9] are the same there.
    SetRun run = { 0 };
    int known = !set_run(regex, &run) && (!t->byte_level || !strncmp(regex, "[0-9]", 5));
    if (!known) {
        arrfree(run.range);
        return fault(err, "pre_tokenizer Split: this pattern is not supported: %.400s", regex);
    }
    arrput(t->split, SPLIT_RUN + (int)arrlen(t->run));
    arrput(t->run, run);
    return 0;
}

// Pre-tokenizer "Punctuation".
static int load_punctuation(Tokenizer *t, const Json *p, char err[512]) {
    const char *behavior = json_text(p, "behavior");
    int runs = !strcmp(behavior, "Contiguous");
    if (!runs && *behavior && strcmp(behavior, "Isolated"))
        return fault(err, "pre_tokenizer Punctuation: behavior '%.50s' is not supported", behavior);
    arrput(t->split, runs ? SPLIT_PUNCTUATIONS : SPLIT_PUNCTUATION);
    return 0;
}

// Pre-tokenizer "Metaspace": blanks become U+2581. Older files say add_prefix_space where newer
// ones say prepend_scheme.
static int load_metaspace(Tokenizer *t, const Json *p, char err[512]) {
    const char *scheme = json_text(p, "prepend_scheme");
    int split = json_flag(p, "split", 1), prefix = json_flag(p, "add_prefix_space", 1);
    if (strcmp(json_text(p, "replacement"), BLANK_MARK))
        return fault(err, "pre_tokenizer Metaspace: only U+2581 as replacement is supported");
    if (t->meta || arrlen(t->split) || split > 1)
        return fault(err, "pre_tokenizer Metaspace: supported only as the first step");

    if (!strcmp(scheme, "first")) t->meta = META_FIRST;
    else if (!strcmp(scheme, "never") || !prefix) t->meta = META_NEVER;
    else t->meta = META_ALWAYS;
    if (*scheme && t->meta == META_ALWAYS && strcmp(scheme, "always"))
        return fault(err, "pre_tokenizer Metaspace: prepend_scheme '%.50s' is not supported", scheme);
    if (split) arrput(t->split, SPLIT_METASPACE);
    return 0;
}

// Pre-tokenizer "Digits".
static int load_digits(Tokenizer *t, const Json *p, char err[512]) {
    int single = json_flag(p, "individual_digits", 0);
    if (single > 1)
        return fault(err, "pre_tokenizer Digits: individual_digits is neither true nor false");
    if (t->byte_level) arrput(t->split, single ? SPLIT_BYTE_DIGITS : SPLIT_BYTE_NUMBERS);
    else arrput(t->split, single ? SPLIT_DIGITS : SPLIT_NUMBERS);
    return 0;
}

// Pre-tokenizer "ByteLevel": words are written in the byte alphabet; with use_regex GPT-2's pattern
// splits them first.
static int load_byte_level(Tokenizer *t, const Json *p, char err[512]) {
    int regex = json_flag(p, "use_regex", 1);
    if (json_flag(p, "add_prefix_space", 1))
        return fault(err, "pre_tokenizer ByteLevel: add_prefix_space is not supported");
    if (regex > 1)
        return fault(err, "pre_tokenizer ByteLevel: use_regex is neither true nor false");
    if (t->meta) return fault(err, "pre_tokenizer ByteLevel is not supported after Metaspace");
    if (regex) arrput(t->split, SPLIT_GPT2);
    t->byte_level = 1;
    return 0;
}

// "pre_tokenizer": one of the five above, or a Sequence of them. Behind ByteLevel only steps that
// look for digits are read.
static int load_pre_tokenizer(Tokenizer *t, const Json *p, int depth, char err[512]) {
    if (json_none(p)) return 0;
    const char *type = json_text(p, "type");
    if (t->byte_level && strcmp(type, "Digits") && strcmp(type, "Split"))
        return fault(err, "pre_tokenizer: a step after ByteLevel is not supported");
    if (arrlen(t->split) == MAX_SPLITS)
        return fault(err, "pre_tokenizer: more than %d steps are not supported", MAX_SPLITS);
    const Json *list = sequence_list(p, "pretokenizers", depth);
    if (list) {
        for (int i = 0; i < list->n; i++) {
            if (load_pre_tokenizer(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }

    if (!strcmp(type, "Split")) return load_split(t, p, err);
    if (!strcmp(type, "Punctuation")) return load_punctuation(t, p, err);
    if (!strcmp(type, "Metaspace")) return load_metaspace(t, p, err);
    if (!strcmp(type, "Digits")) return load_digits(t, p, err);
    if (!strcmp(type, "ByteLevel")) return load_byte_level(t, p, err);
    return refuse_type(err, "a pre_tokenizer", p);
}

// Decoder "Strip": blanks at the start of the text go, at most one.
static int load_strip(Tokenizer *t, const Json *d, char err[512]) {
    const Json *start = json_get(d, "start"), *stop = json_get(d, "stop");
    int start_known = json_is(start, JSON_NUMBER) && (start->num == 0 || start->num == 1);
    int stop_known = !json_is(stop, JSON_NUMBER) || stop->num == 0;
    if (strcmp(json_text(d, "content"), " ") || !start_known || !stop_known)
        return fault(err, "decoder Strip: only one blank at the start is supported");
    t->dec_strip = start->num == 1;
    return 0;
}

// "decoder": ByteLevel, ByteFallback, Metaspace, Replace, Strip, Fuse, or a Sequence of them. Fuse
// joins the pieces, which is what happens anyway.
static int load_decoder(Tokenizer *t, const Json *d, int depth, char err[512]) {
    if (json_none(d)) return 0;
    const Json *list = sequence_list(d, "decoders", depth);
    if (list) {
        for (int i = 0; i < list->n; i++) {
            if (load_decoder(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }

    const char *type = json_text(d, "type");
    if (!strcmp(type, "ByteLevel")) {
        t->dec_byte_level = 1;
    } else if (!strcmp(type, "ByteFallback")) {
        t->dec_bytes = 1;
    } else if (!strcmp(type, "Metaspace")) {
        const char *scheme = json_text(d, "prepend_scheme");
        t->dec_space = 1;
        t->dec_strip = strcmp(scheme, "never") && json_flag(d, "add_prefix_space", 1);
    } else if (!strcmp(type, "Replace")) {
        const char *from = json_text(json_get(d, "pattern"), "String");
        if (strcmp(from, BLANK_MARK) || strcmp(json_text(d, "content"), " "))
            return fault(err, "decoder Replace: only U+2581 to a blank is supported");
        t->dec_space = 1;
    } else if (!strcmp(type, "Strip")) {
        return load_strip(t, d, err);
    } else if (strcmp(type, "Fuse")) {
        return refuse_type(err, "a decoder", d);
    }
    return 0;
}

// Post-processor "TemplateProcessing": its list "single" is [BOS, text], or the text alone.
static int load_bos(Tokenizer *t, const Json *p, const Json *list, char err[512]) {
    int seen = 0;               // 1: the text came
    for (int i = 0; i < list->n; i++) {
        const Json *special = json_get(&list->item[i], "SpecialToken");
        if (!special) {
            seen = 1;
            continue;
        }
        const char *name = json_text(special, "id");
        const Json *ids = json_get(json_get(json_get(p, "special_tokens"), name), "ids");
        if (seen || t->add_bos)
            return fault(err, "post_processor: only one token before the text is supported, "
                         "not '%.100s' as well", name);
        const Json *id = json_is(ids, JSON_ARRAY) && ids->n == 1 ? &ids->item[0] : NULL;
        if (!id || !id->is_int || id->i < 0 || id->i >= tokenizer_size(t))
            return fault(err, "post_processor: '%.100s' has no id of the vocabulary", name);
        t->bos = (int)id->i;
        t->add_bos = 1;
    }
    return 0;
}

// "post_processor": what stands before a text. ByteLevel changes only offsets, which kvcomp does
// not use.
static int load_post_processor(Tokenizer *t, const Json *p, int depth, char err[512]) {
    const char *type = json_text(p, "type");
    int sequence = !strcmp(type, "Sequence");
    const Json *list = json_get(p, sequence ? "processors" : "single");
    if (json_none(p) || !strcmp(type, "ByteLevel")) return 0;
    if (!json_is(list, JSON_ARRAY) || depth > 3) return refuse_type(err, "a post_processor", p);
    if (sequence) {
        for (int i = 0; i < list->n; i++) {
            if (load_post_processor(t, &list->item[i], depth + 1, err)) return -1;
        }
        return 0;
    }
    if (strcmp(type, "TemplateProcessing")) return refuse_type(err, "a post_processor", p);
    return load_bos(t, p, list, err);
}

// Reads the members of the file j into t, each after those it needs.
static int load_members(Tokenizer *t, const Json *j, char err[512]) {
    if (load_normalizer(t, json_get(j, "normalizer"), 0, err)) return -1;
    if (load_pre_tokenizer(t, json_get(j, "pre_tokenizer"), 0, err)) return -1;
    if (load_model(t, json_get(j, "model"), err)) return -1;
    if (load_added(t, json_get(j, "added_tokens"), err)) return -1;
    if (load_decoder(t, json_get(j, "decoder"), 0, err)) return -1;
    if (load_post_processor(t, json_get(j, "post_processor"), 0, err)) return -1;
    decode_table(t);
    return 0;
}

// The tokenizer that a parsed tokenizer.json describes; NULL and err when it is refused.
static Tokenizer *load_json(const Json *j, char err[512]) {
    const Json *model = json_get(j, "model"), *vocab = json_get(model, "vocab");
    const Json *added = json_get(j, "added_tokens");
    if (!json_is(model, JSON_OBJECT)) {
        fault(err, "no 'model' inside: expected a tokenizer.json");
        return NULL;
    }
    size_t n_vocab = vocab ? (size_t)vocab->n : 0, n_added = added ? (size_t)added->n : 0;
    Tokenizer *t = tokenizer_new(n_vocab + n_added);
    if (load_members(t, j, err)) {
        tokenizer_free(t);
        return NULL;
    }
    return t;
}

// ---- Loading a SentencePiece tokenizer.model
// The file is a protobuf message: pieces (text, score, type) and two messages with settings. In a
// protobuf every field is a tag, which is field number << 3 | wire type, and a value.
enum {                          // wire types
    WIRE_VARINT = 0,            // 7 bits a byte, low ones first; the top bit says that more follow
    WIRE_64 = 1,
    WIRE_BYTES = 2,             // a length, and so many bytes: a text, or a message
    WIRE_32 = 5
};
enum {                          // field numbers in SentencePiece's ModelProto
    SP_FILE_PIECE = 1,
    SP_FILE_TRAINER = 2,
    SP_FILE_NORMALIZER = 3,

    SP_PIECE_TEXT = 1,          // in a piece
    SP_PIECE_SCORE = 2,
    SP_PIECE_TYPE = 3,

    SP_TRAINER_TYPE = 3,        // in the trainer's settings: 1 unigram, 2 BPE, 3 word, 4 char
    SP_TRAINER_SUFFIX = 24,     // treat_whitespace_as_suffix
    SP_TRAINER_BYTES = 35,      // byte_fallback

    SP_NORM_CHARSMAP = 2,       // in the normalizer's settings: a precompiled table
    SP_NORM_PREFIX = 3,         // add_dummy_prefix
    SP_NORM_STRIP = 4,          // remove_extra_whitespaces
    SP_NORM_ESCAPE = 5          // escape_whitespaces
};
enum { SP_NORMAL = 1, SP_UNKNOWN, SP_CONTROL, SP_USER, SP_UNUSED, SP_BYTE };    // types of pieces

typedef struct {                // a message, or the rest of one
    const unsigned char *p, *end;
    int bad;                    // 1: it is malformed
} Proto;
typedef struct {
    int field, wire;            // its number; WIRE_*
    uint64_t num;               // the value of a WIRE_VARINT or WIRE_32, the length of a WIRE_BYTES
    Proto sub;                  // the value's bytes
} ProtoField;

// Reads a varint. At a malformed one it returns 0 and sets bad.
static uint64_t proto_varint(Proto *b) {
    uint64_t x = 0;
    for (int shift = 0; shift < 64 && b->p < b->end; shift += 7) {
        unsigned char byte = *b->p++;
        x |= (uint64_t)(byte & 127) << shift;
        if (!(byte & 128)) return x;
    }
    b->bad = 1;
    return 0;
}

// Reads the next field. Returns 0 at the end, and at a malformed field, which sets bad.
static int proto_next(Proto *b, ProtoField *f) {
    if (b->p == b->end || b->bad) return 0;
    uint64_t tag = proto_varint(b), size = 0;
    *f = (ProtoField){ .field = (int)(tag >> 3 & 0x1fffffff), .wire = (int)(tag & 7) };
    switch (f->wire) {
    case WIRE_VARINT:
        f->num = proto_varint(b);
        break;
    case WIRE_64:
        size = 8;
        break;
    case WIRE_BYTES:
        f->num = proto_varint(b);
        size = f->num;
        break;
    case WIRE_32:
        size = 4;
        break;
    default:
        b->bad = 1;
    }
    if (b->bad || size > (uint64_t)(b->end - b->p)) {
        b->bad = 1;
        return 0;
    }
    f->sub = (Proto){ b->p, b->p + size, 0 };
    if (f->wire == WIRE_32) {
        uint32_t x;
        memcpy(&x, b->p, 4);
        f->num = x;
    }
    b->p += size;
    return 1;
}

// Is it the field of this number and wire type?
static int proto_is(const ProtoField *f, int field, int wire) {
    return f->field == field && f->wire == wire;
}

typedef struct {
    float score;
    int id;
} Scored;

// For qsort: the best score first; ids keep the order of equals stable.
static int scored_order(const void *a, const void *b) {
    const Scored *x = a, *y = b;
    if (x->score == y->score) return x->id - y->id;
    return x->score < y->score ? 1 : -1;
}

// Reads piece number id from its message b. Normal pieces are appended to the stb array *scored.
static int load_sp_piece(Tokenizer *t, int id, Proto b, Scored **scored, char err[512]) {
    Proto text = { 0 };
    ProtoField f;
    int type = SP_NORMAL;
    float score = 0;
    while (proto_next(&b, &f)) {
        if (proto_is(&f, SP_PIECE_TEXT, WIRE_BYTES)) text = f.sub;
        if (proto_is(&f, SP_PIECE_SCORE, WIRE_32)) memcpy(&score, f.sub.p, 4);
        if (proto_is(&f, SP_PIECE_TYPE, WIRE_VARINT)) type = f.num > SP_BYTE ? 0 : (int)f.num;
    }
    size_t n = (size_t)(text.end - text.p);
    if (b.bad || !n || n > INT_MAX || !isfinite(score))
        return fault(err, "piece %d is malformed (text, score or type)", id);
    if (type < SP_NORMAL || type == SP_UNUSED)
        return fault(err, "piece %d has type %d, which is not supported", id, type);

    int special = type == SP_UNKNOWN || type == SP_CONTROL, added = special || type == SP_USER;
    int flags = added ? PIECE_ADDED : PIECE_MODEL;
    if (special) flags |= PIECE_SPECIAL;
    if (piece_add(t, id, (const char *)text.p, n, flags, err)) return -1;
    if (type == SP_UNKNOWN) t->unk = id;
    if (type == SP_NORMAL) {
        Scored s = { score, id };
        arrput(*scored, s);
    }
    if (added) {
        AddedToken a = { .id = id, .guarded = special };
        arrput(t->added, a);
    }
    return 0;
}

// Reads the two settings messages. *prefix: 1 when a text gets a blank before it.
static int load_sp_settings(Tokenizer *t, Proto trainer, Proto norm, int *prefix, char err[512]) {
    static const char *const kind[] = { "?", "unigram", "BPE", "word", "char" };
    ProtoField f;
    uint64_t type = 1, strip = 1;           // these are the format's defaults
    *prefix = 1;
    while (proto_next(&trainer, &f)) {
        if (proto_is(&f, SP_TRAINER_TYPE, WIRE_VARINT)) type = f.num;
        if (proto_is(&f, SP_TRAINER_BYTES, WIRE_VARINT)) t->byte_fallback = f.num != 0;
        if (proto_is(&f, SP_TRAINER_SUFFIX, WIRE_VARINT) && f.num)
            return fault(err, "treat_whitespace_as_suffix is not supported");
    }
    while (proto_next(&norm, &f)) {
        if (proto_is(&f, SP_NORM_CHARSMAP, WIRE_BYTES) && f.num)
            return fault(err, "a precompiled normalizer is not supported, only 'identity'");
        if (proto_is(&f, SP_NORM_PREFIX, WIRE_VARINT)) *prefix = f.num != 0;
        if (proto_is(&f, SP_NORM_STRIP, WIRE_VARINT)) strip = f.num;
        if (proto_is(&f, SP_NORM_ESCAPE, WIRE_VARINT) && !f.num)
            return fault(err, "escape_whitespaces = false is not supported");
    }
    if (trainer.bad || norm.bad) return fault(err, "the settings are malformed");
    if (type != 2)
        return fault(err, "a SentencePiece model of type '%s' is not supported, only BPE",
                     kind[type < 5 ? type : 0]);
    return strip ? fault(err, "remove_extra_whitespaces is not supported") : 0;
}

// Makes the merges. SentencePiece joins the neighbours whose joined text has the best score, so
// every way to cut a piece into two pieces of the vocabulary is a merge. Its rank is the place of
// the piece's score among all scores: equal scores have equal rank, and the leftmost merges first.
static void sp_merges(Tokenizer *t, Scored *scored) {
    size_t n = arrlenu(scored);
    int rank = -1;
    if (n) qsort(scored, n, sizeof *scored, scored_order);
    for (size_t i = 0; i < n; i++) {
        const Piece *p = &t->piece[scored[i].id];
        const char *s = t->chars + p->text;
        if (!i || scored[i].score != scored[i - 1].score) rank++;
        for (int cut = 0, len; cut < p->n_text; cut += len) {
            size_t n_left = (size_t)cut, n_right = (size_t)(p->n_text - cut);
            char_code(s + cut, n_right, &len);
            int left = model_id(t, s, n_left), right = model_id(t, s + cut, n_right);
            if (left >= 0 && right >= 0) merge_put(t, left, right, rank, scored[i].id);
        }
    }
}

// Appends a step to the normalizer.
static void norm_put(Tokenizer *t, NormStep step) { arrput(t->norm, step); }

// Completes a tokenizer whose pieces are loaded.
static void sp_finish(Tokenizer *t, Scored *scored, int prefix) {
    byte_ids(t);
    sp_merges(t, scored);

    // The user's symbols are normalized already: they enter the trie before t->norm has steps.
    for (int i = 0; i < (int)arrlen(t->added); i++) trie_add(t, i, !t->added[i].guarded);
    if (prefix) norm_put(t, (NormStep){ NORM_PREPEND, "", BLANK_MARK });
    norm_put(t, (NormStep){ NORM_REPLACE, " ", BLANK_MARK });
    t->fuse_unk = 1;
    t->dec_space = 1;
    t->dec_bytes = 1;
    t->dec_strip = prefix;
    t->bos = text_id(t, "<s>", 3);
    t->add_bos = t->bos >= 0;
    decode_table(t);
}

// The tokenizer of a tokenizer.model of n bytes; NULL and err when it is refused.
static Tokenizer *load_sentencepiece(const char *data, size_t n, char err[512]) {
    const unsigned char *p = (const unsigned char *)data;
    Proto file = { p, p + n, 0 }, trainer = { 0 }, norm = { 0 };
    ProtoField f;

    // Pass 1: count the pieces and find the settings.
    Proto b = file;
    size_t n_pieces = 0;
    while (proto_next(&b, &f)) {
        if (proto_is(&f, SP_FILE_PIECE, WIRE_BYTES)) n_pieces++;
        if (proto_is(&f, SP_FILE_TRAINER, WIRE_BYTES)) trainer = f.sub;
        if (proto_is(&f, SP_FILE_NORMALIZER, WIRE_BYTES)) norm = f.sub;
    }
    if (b.bad || !n_pieces) {
        fault(err, b.bad ? "not a SentencePiece model, or cut short" : "no pieces inside");
        return NULL;
    }

    // Pass 2: load them. A piece's id is its place in the file.
    Tokenizer *t = tokenizer_new(n_pieces);
    Scored *scored = NULL;
    int id = 0, prefix, bad = load_sp_settings(t, trainer, norm, &prefix, err);
    b = file;
    while (!bad && proto_next(&b, &f)) {
        if (!proto_is(&f, SP_FILE_PIECE, WIRE_BYTES)) continue;
        bad = load_sp_piece(t, id, f.sub, &scored, err);
        id++;
    }
    if (!bad) sp_finish(t, scored, prefix);
    arrfree(scored);
    if (!bad) return t;
    tokenizer_free(t);
    return NULL;
}

// ---- Loading a folder
// The id of the token that a key of tokenizer_config.json names, as "text" or {"content": "text"};
// `otherwise` when it names none.
static int token_named(const Tokenizer *t, const Json *config, const char *key, int otherwise) {
    const Json *j = json_get(config, key);
    if (json_is(j, JSON_OBJECT)) j = json_get(j, "content");
    int id = json_is(j, JSON_STRING) ? text_id(t, j->str, j->len) : -1;
    return id >= 0 ? id : otherwise;
}

// Reads tokenizer_config.json, if there is one: BOS, EOS, and whether BOS stands before every text.
static int load_tokenizer_config(Tokenizer *t, const char *path, int sentencepiece, char err[512]) {
    char why[256];
    size_t n;
    char *text = file_exists(path) ? read_bounded(path, MOST_CONFIG, &n, why) : NULL;
    Json *j = text ? json_parse(text, n, why) : NULL;
    free(text);
    if (file_exists(path) && !j) return fault(err, "%s: %s", path, why);

    int add = json_flag(j, "add_bos_token", t->add_bos), legacy = json_flag(j, "legacy", 1);
    t->bos = token_named(t, j, "bos_token", t->bos);
    t->eos = token_named(t, j, "eos_token", text_id(t, "</s>", 4));
    t->add_bos = add == 1 && t->bos >= 0;

    // Older Llama tokenizers ("legacy") treat the text after every special token as a new text,
    // with a blank before it.
    int prepends = sentencepiece && t->norm[0].kind == NORM_PREPEND;
    if (prepends && !legacy) t->norm[0].kind = NORM_PREPEND_START;
    json_free(j);
    if (add > 1 || legacy > 1)
        return fault(err, "%s: add_bos_token and legacy are true or false", path);
    return 0;
}

// Writes the path of the file to load to file: path itself, or in a folder tokenizer.json, else
// tokenizer.model.
static int tokenizer_file(const char *path, char file[1200], char err[512]) {
    struct stat st;
    int folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    if (strlen(path) > 1100) return fault(err, "the path of the tokenizer is too long");
    snprintf(file, 1200, folder ? "%s/tokenizer.json" : "%s", path);
    if (!folder || file_exists(file)) return 0;
    snprintf(file, 1200, "%s/tokenizer.model", path);
    if (file_exists(file)) return 0;
    return fault(err, "%s: no tokenizer.json and no tokenizer.model here", path);
}

// Is a file of n bytes a tokenizer.model? One begins with the tag of its first piece, which is a
// newline. So may a JSON text, but its first visible character is '{'.
static int is_sentencepiece(const char *text, size_t n) {
    return n > 0 && text[0] == '\n' && text[strspn(text, " \t\r\n")] != '{';
}

// The tokenizer of the text of a tokenizer.json; NULL and err when it is malformed or refused.
static Tokenizer *load_json_text(const char *text, size_t n, char err[512]) {
    char why[256];
    Json *j = json_parse(text, n, why);
    if (!j) {
        fault(err, "%s", why);
        return NULL;
    }
    Tokenizer *t = load_json(j, err);
    json_free(j);
    return t;
}

// Loads a tokenizer. path: a folder (tokenizer.json, else tokenizer.model) or one of the two files.
// tokenizer_config.json beside it is read too. Returns NULL with the reason in err when there is
// none or it is refused.
Tokenizer *tokenizer_load(const char *path, char err[512]) {
    char file[1200], config[1300], why[256], reason[512] = "";
    size_t n;
    if (tokenizer_file(path, file, err)) return NULL;
    char *text = read_bounded(file, MOST_TOKENIZER, &n, why);
    if (!text) {
        fault(err, "%s", why);
        return NULL;
    }

    int sentencepiece = is_sentencepiece(text, n);
    Tokenizer *t;
    if (sentencepiece) t = load_sentencepiece(text, n, reason);
    else t = load_json_text(text, n, reason);
    free(text);
    if (!t) {
        fault(err, "%.200s: %.300s", file, reason);
        return NULL;
    }

    const char *slash = strrchr(file, '/');
    int folder_length = slash ? (int)(slash + 1 - file) : 0;
    snprintf(config, sizeof config, "%.*stokenizer_config.json", folder_length, file);
    if (load_tokenizer_config(t, config, sentencepiece, err)) {
        tokenizer_free(t);
        return NULL;
    }
    return t;
}
