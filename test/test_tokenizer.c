// test/test_tokenizer.c - lib/tokenizer: ids and words as the package `tokenizers` gives them (data/tokenizers,
// made by data/make_tokenizers.py), properties, and wrong files.
#define _GNU_SOURCE
#include "../lib/tokenizer.c"
#include "tokens.h"

// ---- fixtures
typedef struct {
    const unsigned char *p, *end;
} Fixture;

// Reads a number written in groups of 7 bits, lowest first.
static size_t fixture_varint(Fixture *f) {
    size_t x = 0;
    for (int shift = 0; f->p < f->end; shift += 7) {
        x |= (size_t)(*f->p & 127) << shift;
        if (!(*f->p++ & 128)) break;
    }
    return x;
}

// A list of numbers, as an stb_ds array.
static int *fixture_ids(Fixture *f) {
    int *ids = NULL;
    for (size_t n = fixture_varint(f); n--;) arrput(ids, (int)fixture_varint(f));
    return ids;
}

// Reads a file of data/tokenizers, to be freed; f is set to its bytes.
static char *fixture_open(const char *name, Fixture *f) {
    char path[300], why[256];
    size_t n = 0;
    snprintf(path, sizeof path, "data/tokenizers/%s", name);
    char *data = read_bounded(path, MOST_TEXT, &n, why);
    CHECK(data, "%s", why);
    *f = (Fixture){ (unsigned char *)data, (unsigned char *)data + n };
    return data;
}

static int tokenizer_id(const Tokenizer *t, const char *text) { return text_id(t, text, strlen(text)); }

// Compares two lists of numbers, which were made of string number nth.
static void check_ids(const char *what, int nth, const char *s, size_t n, const int *got, const int *want) {
    int at = 0, a = (int)arrlen(got), b = (int)arrlen(want);
    while (at < a && at < b && got[at] == want[at]) at++;
    CHECK(at == a && at == b, "%s, string %d \"%.*s\": %d numbers, expected %d, number %d is %d, expected %d", what, nth,
          n > 60 ? 60 : (int)n, s, a, b, at, at < a ? got[at] : -1, at < b ? want[at] : -1);
}

static const char *const families[] = {
    "llama3",     "qwen2",       "gpt2",         "smollm2",        "tekken",
    "numbers",    "o200k",       "deepseek-llm", "deepseek-coder", "deepseek-v3",
    "falcon",     "punctuation", "spm-legacy",   "spm-normalized", "spm-first",
    "spm-always", "spm-never",   "spm-unk",      "spm-unks",       NULL
};
enum { N_PIECES = 10 };         // the first of them, with NAME.pieces: in others a piece may end inside a character

static int *word_lengths;       // stb array

// Takes the length in bytes that a word has before it is written in the byte alphabet.
static void take_length(Encoder *e, const char *s, size_t n) {
    int bytes = 0;
    for (size_t i = 0; i < n; i++) bytes += !e->t->byte_level || (s[i] & 0xc0) != 0x80;
    arrput(word_lengths, bytes);
}

// The lengths of the words that BPE is given for a text (stb array).
static int *words_of(const Tokenizer *t, const char *s, size_t n) {
    word_lengths = NULL;
    OWN_ARRAY int *ids = encode(t, s, NULL, n, 0, 1, NULL, take_length);
    return word_lengths;
}

// ---- what the package gives
// String number nth through one family: ids with special tokens named, ids without, and back.
static void check_string(const char *name, const Tokenizer *t, int nth, const char *s, size_t n, Fixture *ids) {
    OWN_ARRAY int *want = fixture_ids(ids), *got = tokenizer_encode(t, s, n, 1, NULL);
    int same = *ids->p++;
    OWN_ARRAY int *want_plain = same ? NULL : fixture_ids(ids), *plain = tokenizer_encode(t, s, n, 0, NULL);
    check_ids(name, nth, s, n, got, want);

    // Turn marks are guarded here, not there.
    if (!memmem(s, n, "｜", 3)) check_ids(name, nth, s, n, plain, same ? want : want_plain);
    OWN_ARRAY char *text = decode_all(t, got);
    size_t n_back = n;
    const char *back = s;
    if (!*ids->p++) {
        n_back = fixture_varint(ids);
        back = (const char *)ids->p;
        ids->p += n_back;
    }
    CHECK(same_bytes(text, back, n_back), "%s, string %d \"%.*s\" decodes to \"%.*s\"", name, nth, (int)n, s,
          (int)arrlen(text), text ? text : "");
}

// The words of string number nth.
static void check_words(const char *name, const Tokenizer *t, int nth, const char *s, size_t n, Fixture *pieces) {
    OWN_ARRAY int *want = fixture_ids(pieces), *got = words_of(t, s, n);
    int sum = 0, named = 0, len;
    for (int k = 0; k < (int)arrlen(want); k++) sum += want[k];
    for (int k = 0; k < (int)arrlen(got); k++) sum -= got[k];

    // The pieces are those of the whole string; added tokens that are no special ones are cut out before.
    for (int id = 0; id < tokenizer_size(t); id++) {
        const char *x = tokenizer_text(t, id, &len);
        int plain = (tokenizer_flags(t, id) & (TOKEN_ADDED | TOKEN_GUARDED)) == TOKEN_ADDED;
        named |= plain && memmem(s, n, x, (size_t)len);
    }
    if (named) CHECK(sum > 0, "%s, string %d: an added token is a word", name, nth);
    else check_ids(name, nth, s, n, got, want);
}

// Every string of strings.bin through the first n families, which have a file NAME.KIND.
static void check_strings(int n, const char *kind,
                          void (*check)(const char *, const Tokenizer *, int, const char *, size_t, Fixture *)) {
    for (int i = 0; i < n && families[i]; i++) {
        char file[64];
        Fixture strings, x;
        snprintf(file, sizeof file, "%s.%s", families[i], kind);
        OWN char *a = fixture_open("strings.bin", &strings), *b = fixture_open(file, &x);
        OWN_TOKENIZER *t = fixture_tokenizer(families[i]);
        for (int nth = 0; a && b && t && strings.p < strings.end; nth++) {
            size_t size = fixture_varint(&strings);
            check(families[i], t, nth, (const char *)strings.p, size, &x);
            strings.p += size;
        }
        CHECK(x.p == x.end, "%s was not read to its end", file);
    }
}

TEST(tokenizer_ids, "every pre-tokenizer family gives the ids and the text of the tokenizers package") {
    check_strings(INT_MAX, "ids", check_string);
}

TEST(tokenizer_words, "every pattern cuts every string where the package does") {
    check_strings(N_PIECES, "pieces", check_words);
}

// ---- small tokenizers
enum { MAX_BOOK = 4097 };      // bytes of a token's text, one more than are allowed

// The tokenizer of a JSON with ' for "; what is no object is a member beside a token <s> and a model. NULL and err.
static Tokenizer *small_tokenizer(const char *text, char err[512]) {
    static char json[MAX_BOOK + 300];
    snprintf(json, sizeof json, *text != '\'' ? "%s" :
             "{'added_tokens':[{'id':4,'content':'<s>','special':true}],%s,"
             "'model':{'type':'BPE','vocab':{'a':0,'b':1,'ab':2,'aba':3},'merges':['a b',['ab','a']]}}", text);
    for (char *c = json; *c; c++)
        if (*c == '\'') *c = '"';
    return tokenizer_parse(json, strlen(json), err);
}

// The tokenizer with one Split step; NULL and err.
static Tokenizer *split_tokenizer(const char *pattern, const char *behavior, int invert, char err[512]) {
    OWN char *regex = WRITTEN(f, json_escape(f, pattern, strlen(pattern)));
    OWN char *text = WRITTEN(f, fprintf(f, "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":%s},"
                                "\"behavior\":\"%s\",\"invert\":%s},\"model\":{\"vocab\":{\"a\":0,\"aa\":1},"
                                "\"merges\":[\"a a\"]}}", regex, behavior, invert ? "true" : "false"));
    return tokenizer_parse(text, strlen(text), err);
}

TEST(tokenizer_unseen_patterns, "patterns of known parts that no model has cut as the package does, in every "
                                "behavior") {
    Fixture f;
    char err[512] = "";
    OWN char *data = fixture_open("patterns.json", &f);
    Json *j = data ? json_parse(data, (size_t)(f.end - f.p), err) : NULL;
    const Json *texts = json_get(j, "texts"), *patterns = json_get(j, "patterns");
    CHECK(patterns && patterns->n >= 20 && texts->n >= 7, "%s", err);
    for (int i = 0; patterns && i < patterns->n; i++) {
        const Json *p = &patterns->item[i], *words = json_get(p, "words");
        const char *pattern = json_text(p, "pattern");
        OWN_TOKENIZER *t = split_tokenizer(pattern, json_text(p, "behavior"), (int)json_get(p, "invert")->i, err);
        CHECK(t, "%s", err);
        for (int k = 0; t && k < texts->n; k++) {
            const Json *text = &texts->item[k], *list = &words->item[k];
            OWN_ARRAY int *want = NULL, *got = words_of(t, text->str, text->len);
            for (int w = 0; w < list->n; w++) arrput(want, (int)list->item[w].i);
            check_ids(pattern, k, text->str, text->len, got, want);
        }
    }
    json_free(j);
}

TABLE(tokenizer_refuses_patterns, 2, "a construct that the matcher does not know is refused with its text and "
                                     "its place") {
    char err[512] = "";
    OWN_TOKENIZER *t = split_tokenizer(part[0], "Isolated", 0, err);
    CHECK(!t && strstr(err, part[1]), "%s: %s", part[0], t ? "accepted" : err);
}

TEST(tokenizer_refuses_splits, "so are an unknown behavior, and a pattern with more sets than there is room for") {
    char err[512];
    OWN_TOKENIZER *sideways = split_tokenizer("a", "Sideways", 0, err);
    CHECK(!sideways && strstr(err, "Sideways"), "%s", err);

    // 1500 different characters would need as many sets.
    OWN_ARRAY char *many = NULL;
    for (unsigned c = 0x4e00; c < 0x4e00 + 1500; c++) {
        char utf8[4];
        bytes_put(&many, utf8, (size_t)(utf8_put(utf8, c) - utf8));
    }
    arrput(many, 0);
    OWN_TOKENIZER *t = split_tokenizer(many, "Isolated", 0, err);
    CHECK(!t && strstr(err, "so large a pattern"), "%s", t ? "accepted" : err);
}

// ---- time
// Cuts n copies of a character with a b behind them, within 4 seconds.
static void check_time(const char *what, const Tokenizer *t, const char *character, int n, int words) {
    OWN_ARRAY char *text = NULL;
    for (int i = 0; i < n; i++) bytes_put(&text, character, strlen(character));
    arrput(text, 'b');
    double t0 = now();
    OWN_ARRAY int *ids = words ? words_of(t, text, arrlenu(text)) : tokenizer_encode(t, text, arrlenu(text), 0, NULL);
    CHECK(now() - t0 < 4, "%s: %d of \"%s\" take %.1f s", what, n, character, now() - t0);
}

TEST(tokenizer_linear, "a megabyte without a blank, of blanks, or against a hostile pattern takes linear time") {
    static const char *const characters[] = { "a", "A", " ", "\n", "1", "!", "\xe4\xb8\x96", "\xcc\x81", "\xff" };
    static const char *const patterns[] = {     // with backtracking alone quadratic, cubic or exponential
        "\\s+$", "a*b", "(?:a|aa)*b", "(?:a+)+b", "a*a*a*a*b", "(?:a?a?a?)a*b|c", "a(?=a*b)", "a(?=a*c)|[^\\n]", "(?:[ab]|a)*(?!a*b)c",
        "a++c|a", "[ab]*(?=a*b)c", "(?:a|b)*c", "a{1,3}(?=(?:aaa)*(?:[^a]|$))", "(?:a(?=(?:a|b)*$))+b"
    };
    for (int f = 0; families[f]; f++) {
        OWN_TOKENIZER *t = fixture_tokenizer(families[f]);
        for (size_t i = 0; t && i < sizeof characters / sizeof *characters; i++)
            check_time(families[f], t, characters[i], 100000, 0);
    }
    OWN_TOKENIZER *llama3 = fixture_tokenizer("llama3");
    check_time("a megabyte without a blank", llama3, "ab", 500000, 0);

    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        char err[512] = "";
        OWN_TOKENIZER *t = split_tokenizer(patterns[i], "Isolated", 0, err);
        CHECK(t, "%s", err);
        for (int blank = 0; t && blank < 2; blank++) check_time(patterns[i], t, blank ? " " : "a", 300000, 1);
    }
}

// ---- properties
// The ids of a text of a user hold no special token, but for the one that stands for unknown characters.
static void check_plain(const char *family, const Tokenizer *t, const char *s, size_t n) {
    OWN_ARRAY int *ids = tokenizer_encode(t, s, n, 0, NULL);
    for (int i = 0; i < (int)arrlen(ids); i++)
        CHECK(!tokenizer_is_special(t, ids[i]) || ids[i] == tokenizer_unk(t), "%s: '%.*s' makes %d", family, (int)n, s,
              ids[i]);
}

TEST(tokenizer_no_forging, "user text never makes a special id, whatever special token's text it contains") {
    for (int i = 0; families[i]; i++) {
        OWN_TOKENIZER *t = fixture_tokenizer(families[i]);
        OWN_ARRAY char *text = NULL;
        for (int id = 0; t && id < tokenizer_size(t); id++) {
            int n;
            const char *s = tokenizer_text(t, id, &n);
            if (!(tokenizer_flags(t, id) & TOKEN_ADDED)) continue;
            bytes_put(&text, "x ", 2);
            bytes_put(&text, s, (size_t)n);
            bytes_put(&text, s, (size_t)n / 2);
            bytes_put(&text, s, (size_t)n);

            check_plain(families[i], t, s, (size_t)n);          // ignore_merges must not find it as a piece
            OWN_ARRAY int *ids = tokenizer_encode(t, s, (size_t)n, 1, NULL);
            CHECK(arrlen(ids) == 1 && ids[0] == id, "%s: '%s' is not itself", families[i], s);
        }
        check_plain(families[i], t, text, arrlenu(text));
    }

    // A special token that whole pieces and merges could make: neither may, unless the text may name it.
    static const char file[] = "{'added_tokens':[{'id':3,'content':'aba','special':true}],'model':{'vocab':{'a':0,'b':1,"
                               "'ab':2,'aba':3},'merges':['a b','ab a'],'ignore_merges':true}}";
    char err[512] = "";
    OWN_TOKENIZER *t = small_tokenizer(file, err);
    CHECK(t, "%s", err);
    OWN_ARRAY int *safe = tokenizer_encode(t, "aba", 3, 0, NULL), *named = tokenizer_encode(t, "aba", 3, 1, NULL);
    CHECK(arrlen(safe) == 2 && safe[0] == 2 && safe[1] == 0 && arrlen(named) == 1 && named[0] == 3, "%d ids, first %d",
          (int)arrlen(safe), safe[0]);
}

// The text of a Decoder that is fed a token for each byte.
static char *decode_bytes(const char *s, size_t n) {
    static Tokenizer *t;
    static int of_byte[256];
    int first = !t;
    if (first) t = fixture_tokenizer("gpt2");
    for (int id = first ? tokenizer_size(t) : 0, len; id--;) {
        const char *b = tokenizer_bytes(t, id, &len);
        if (len == 1) of_byte[(unsigned char)*b] = id;
    }
    Decoder d = { .t = t, .started = 1 };
    char *out = NULL;
    for (size_t i = 0; i < n; i++) out = decode_token(&d, of_byte[(unsigned char)s[i]], out);
    return decode_flush(&d, out);
}

TABLE(tokenizer_broken_bytes, 2, "one U+FFFD stands for each longest beginning of a character") {
    OWN_ARRAY char *out = decode_bytes(part[0], case_size[0]);
    CHECK(same_bytes(out, part[1], case_size[1]), "%s gives \"%.*s\"", part[0], (int)arrlen(out), out);
}

// Random bytes, or random pieces of characters (stb array).
static char *random_text(int pieces) {
    static const char *const bits[] = {
        "a", " ", "\n", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x99\x82", "\x80", "\xff", "\xc3", "\xe2\x82", "\xf0\x9f\x99",
        "\xf0\x9f", "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80", "\xe0\x9f\xbf", "7", "'s"
    };
    char *text = NULL;
    for (int n = rnd_int(40); n--;) {
        const char *b = bits[rnd_int(sizeof bits / sizeof *bits)];
        if (!pieces) arrput(text, (char)rnd_int(256));
        else bytes_put(&text, b, strlen(b));
    }
    return text;
}

TEST(tokenizer_any_bytes, "random and broken bytes come back as they were; the stream decoder gives what "
                          "decoding at once gives") {
    static const char *const exact[] = { "llama3",    "gpt2",         "smollm2",     "tekken", "numbers", "spm-legacy",
                                         "spm-never", "deepseek-llm", "deepseek-v3", "falcon" };
    rnd_seed(3);
    for (size_t f = 0; f < sizeof exact / sizeof *exact; f++) {
        OWN_TOKENIZER *t = fixture_tokenizer(exact[f]);
        int strips = !strcmp(exact[f], "spm-legacy"), len;      // the blank that is put before a text
        for (int trial = 0; t && trial < 300; trial++) {
            OWN_ARRAY char *text = random_text(trial % 2 == 0), *raw = NULL, *stream = NULL;
            OWN_ARRAY int *ids = tokenizer_encode(t, text, arrlenu(text), 0, NULL);
            Decoder d = { .t = t };
            for (int i = 0; i < (int)arrlen(ids); i++) {
                const char *b = tokenizer_bytes(t, ids[i], &len);
                bytes_put(&raw, b, (size_t)len);
                stream = decode_token(&d, ids[i], stream);
                size_t at = 0, k = 1;
                for (; at < arrlenu(stream) && k; at += k) k = (size_t)utf8_length(stream + at, arrlenu(stream) - at);
                CHECK(k, "%s: half a character left the decoder", exact[f]);
            }
            stream = decode_flush(&d, stream);
            if (strips && arrlen(raw) && raw[0] == ' ') arrdel(raw, 0);
            CHECK(same_bytes(raw, text, arrlenu(text)), "%s trial %d: other bytes", exact[f], trial);
            OWN_ARRAY char *whole = decode_bytes(text, arrlenu(text));
            CHECK(same_bytes(whole, stream, arrlenu(stream)), "%s trial %d: another text", exact[f], trial);
        }
    }
}

TEST(tokenizer_lookups, "ids, sizes, BOS and flags; an id outside the tokenizer is empty") {
    OWN_TOKENIZER *t = fixture_tokenizer("llama3"), *spm = fixture_tokenizer("spm-legacy"), *qwen = fixture_tokenizer("qwen2");
    int len = 9, eot = tokenizer_id(t, "<|eot_id|>");
    CHECK(eot > 0 && tokenizer_is_special(t, eot) && tokenizer_eos(t) == eot && tokenizer_id(t, "<|no|>") == -1, "%d", eot);
    CHECK(tokenizer_flags(t, eot) == (TOKEN_ADDED | TOKEN_SPECIAL | TOKEN_GUARDED), "flags %d", tokenizer_flags(t, eot));
    CHECK(tokenizer_adds_bos(t) && tokenizer_bos(t) == tokenizer_id(t, "<|begin_of_text|>"), "bos %d", tokenizer_bos(t));
    CHECK(!strncmp(tokenizer_bytes(t, eot, &len), "<|eot_id|>", 10) && len == 10, "%d", len);
    CHECK(!strcmp(tokenizer_text(t, eot, &len), "<|eot_id|>") && len == 10, "%d", len);
    CHECK(!*tokenizer_bytes(t, tokenizer_size(t), &len) && !len && !*tokenizer_bytes(t, -1, &len) && !len, "%d", len);
    CHECK(!*tokenizer_text(t, -1, &len) && !len && !tokenizer_flags(t, 1 << 30), "%d", len);
    CHECK(!tokenizer_is_special(t, -7) && !tokenizer_is_special(t, 1 << 30), "an id outside is special");
    CHECK(tokenizer_unk(spm) == 0 && tokenizer_unk(t) == -1, "%d %d", tokenizer_unk(spm), tokenizer_unk(t));
    CHECK(tokenizer_bytes(spm, tokenizer_id(spm, "<0x41>"), &len)[0] == 'A' && len == 1, "%d", len);
    CHECK(tokenizer_adds_bos(spm) && tokenizer_bos(spm) == 1
              && tokenizer_bytes(spm, tokenizer_id(spm, "▁the"), &len)[0] == ' ' && len == 4,
          "%d", len);
    CHECK(!tokenizer_adds_bos(qwen) && tokenizer_bos(qwen) == tokenizer_id(qwen, "<｜begin▁of▁sentence｜>"), "bos %d",
          tokenizer_bos(qwen));
    CHECK(!tokenizer_is_special(qwen, tokenizer_id(qwen, "<think>")), "<think> is special");
    CHECK(tokenizer_flags(qwen, tokenizer_id(qwen, "<｜User｜>")) & TOKEN_GUARDED, "a turn mark is not guarded");
}

TEST(tokenizer_spaces, "white space is found from both sides, also beside broken bytes") {
    static const char s[] = "a \xe3\x80\x80\x80\n";
    int len;
    CHECK(!is_space(s, 6, &len) && len == 1 && is_space(s + 1, 5, &len) && len == 1, "%d", len);
    CHECK(is_space(s + 2, 4, &len) && len == 3 && !is_space(s + 5, 1, &len) && len == 1, "%d", len);
    CHECK(space_before(s, 0, 0) == 0 && space_before(s, 0, 2) == 1 && space_before(s, 0, 5) == 3, "from behind");
    CHECK(space_before(s, 0, 6) == 0 && space_before(s, 0, 7) == 1 && space_before(s, 3, 5) == 0, "from behind");
}

TEST(tokenizer_odd_characters, "a broken byte is a symbol to patterns, as U+FFFD; an added token of the byte "
                               "alphabet is itself") {
    char err[512] = "";
    OWN_TOKENIZER *t = split_tokenizer("\\p{S}", "Isolated", 0, err);
    CHECK(t, "%s", err);
    OWN_ARRAY int *got = t ? words_of(t, "a\xff\xe2\x82 b", 6) : NULL;
    static const int want[] = { 1, 1, 1, 1, 2 };
    CHECK(arrlen(got) == 5 && !memcmp(got, want, sizeof want), "%d words", (int)arrlen(got));

    // NFC composes no control character with a mark: qwen2's text comes back as it was.
    OWN_TOKENIZER *qwen = fixture_tokenizer("qwen2");
    static const char marks[] = "\x01\xcc\x80\x02\xcc\x80";
    OWN_ARRAY int *ids = tokenizer_encode(qwen, marks, sizeof marks - 1, 0, NULL);
    OWN_ARRAY char *back = decode_all(qwen, ids);
    CHECK(same_bytes(back, marks, sizeof marks - 1), "%.*s", (int)arrlen(back), back);

    int len = 0;
    static const char file[] = "{'decoder':{'type':'ByteLevel'},'added_tokens':[{'id':4,'content':'Ġb'}],'model':{'vocab':"
                               "{'a':0,'Ġ':1,'Ġa':2},'merges':['Ġ a']}}";
    OWN_TOKENIZER *alphabet = small_tokenizer(file, err);
    CHECK(alphabet, "%s", err);
    CHECK(!strncmp(tokenizer_bytes(alphabet, 2, &len), " a", 2) && len == 2, "a piece of %d bytes", len);
    CHECK(!strncmp(tokenizer_bytes(alphabet, 4, &len), "Ġb", 3) && len == 3, "an added token of %d bytes", len);
}

// ---- files that are wrong
TABLE(tokenizer_refuses, 2, "what is not supported or malformed is refused with a line that names it") {
    char err[512] = "";
    OWN_TOKENIZER *t = small_tokenizer(part[0], err);
    CHECK(!t && *err && strstr(err, part[1]), "%s: %s", part[0], t ? "accepted" : err);
}

TEST(tokenizer_small, "the file of which these are changes is taken; a token as long as a book is not") {
    char err[512] = "", book[MAX_BOOK + 100];
    OWN_TOKENIZER *good = small_tokenizer("'version':'1.0'", err);
    OWN_ARRAY int *ids = good ? tokenizer_encode(good, "abab<s>ba?", 10, 1, NULL) : NULL;
    static const int want[] = { 2, 2, 4, 1, 0 };
    CHECK(arrlen(ids) == 5 && !memcmp(ids, want, sizeof want), "%s", err);
    int head = snprintf(book, sizeof book, "{'model':{'vocab':{'");
    memset(book + head, 'x', MAX_BOOK);
    strcpy(book + head + MAX_BOOK, "':0},'merges':['a b']}}");
    CHECK(!small_tokenizer(book, err) && strstr(err, "4097 bytes: expected at most 4096"), "%s", err);
}

TABLE(tokenizer_folders, 4, "a folder without tokenizer.json, a SentencePiece model and a wrong "
                            "tokenizer_config.json are refused in one line") {
    char err[512] = "";
    const char *dir = tmp_path("tokenizer");
    mkdir(dir, 0755);
    if (*part[0]) put_text(formatted("%s/%s", dir, part[0]), part[1]);
    OWN_TOKENIZER *t = tokenizer_load(formatted("%s%s", dir, part[2]), err);
    const char *is = t ? formatted("= bos %d eos %d%s", t->bos, t->eos, t->add_bos ? ", added" : "") : err;
    CHECK((t ? !strcmp(is, part[3]) : strstr(is, part[3]) != NULL) && !strchr(is, '\n'), "%s: %s", part[0], is);
}

TEST(tokenizer_mutants, "thousands of damaged files load or are refused, and what loads still encodes") {
    static const char *const file[] = { "numbers/tokenizer.json", "spm-unk/tokenizer.json", "deepseek-v3/tokenizer.json" };
    static const char *const swap[] = { "null", "[]", "{}", "-1", "\"\"", "1e9", "true" };
    rnd_seed(11);
    for (int f = 0; f < 3; f++) {
        Fixture x;
        char err[512];
        OWN char *data = fixture_open(file[f], &x);
        size_t n = (size_t)(x.end - x.p);
        const char *pattern = data ? strstr(data, "\"Regex\"") : NULL;
        size_t around = pattern ? (size_t)(pattern - data) : 0;
        for (int trial = 0; data && trial < 400; trial++) {
            OWN_ARRAY char *copy = NULL;
            size_t keep = trial % 8 == 0 ? (size_t)rnd_int((int)n) : n;
            bytes_put(&copy, data, keep);
            for (int k = rnd_int(4); k-- && keep;)
                copy[rnd_int((int)keep)] = (char)(trial & 1 ? rnd_int(256) : "\"{}[]:,0a9"[rnd_int(10)]);
            for (int k = rnd_int(4); k-- && around && keep > around + 400;)     // the patterns
                copy[around + (size_t)rnd_int(400)] = "()[]{}|?*+.^-aLp\\\\,1"[rnd_int(20)];
            if (trial % 5 == 0 && keep > 8) {                                   // a value of another type in place of one
                size_t at = (size_t)rnd_int((int)keep - 8);
                const char *colon = memchr(copy + at, ':', keep - at), *s = swap[rnd_int(7)];
                if (colon && (size_t)(colon - copy) + 1 + strlen(s) < keep)
                    memcpy(copy + (colon - copy) + 1, s, strlen(s));
            }
            OWN_TOKENIZER *t = tokenizer_parse(copy ? copy : "", arrlenu(copy), err);
            CHECK(t || *err, "refused without a reason");
            OWN_ARRAY int *ids = t ? tokenizer_encode(t, "The words 123 caf\xc3\xa9 \xff <s>\n", 24, trial & 1, NULL) : NULL;
            for (int i = 0; i < (int)arrlen(ids); i++) CHECK(ids[i] >= 0 && ids[i] < tokenizer_size(t), "%d", ids[i]);
            OWN_ARRAY char *text = t ? decode_all(t, ids) : NULL;
        }
    }
}

int main(int argc, char **argv) { return check_main(argc, argv); }
