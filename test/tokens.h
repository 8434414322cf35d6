// test/tokens.h - what the tests of tokenizers and of templates share. lib/tokenizer.c is included before it.
#ifndef TEST_TOKENS_H
#define TEST_TOKENS_H
#include "check.h"
#include <stb/stb_ds.h>

// ---- what a test takes goes where its block ends
#define OWN_TOKENIZER __attribute__((cleanup(own_tokenizer_free))) Tokenizer
#define OWN_ARRAY     __attribute__((cleanup(own_array_free)))
static void own_tokenizer_free(Tokenizer **t) { tokenizer_free(*t); }
static void own_array_free(void *p) {
    char *a;
    memcpy(&a, p, sizeof a);
    arrfree(a);
}

// Loads the tokenizer of a folder of data/tokenizers.
static Tokenizer *fixture_tokenizer(const char *name) {
    char path[300], err[512] = "";
    snprintf(path, sizeof path, "data/tokenizers/%s", name);
    Tokenizer *t = tokenizer_load(path, err);
    CHECK(t, "%s: %s", name, err);
    return t;
}

// Is the stb array of bytes these n bytes?
static int same_bytes(const char *a, const char *s, size_t n) { return arrlenu(a) == n && (!n || !memcmp(a, s, n)); }

// The text of all ids, to be freed.
static char *decode_all(const Tokenizer *t, const int *ids) {
    Decoder d = { .t = t };
    char *out = NULL;
    for (int i = 0; i < (int)arrlen(ids); i++) out = decode_token(&d, ids[i], out);
    return decode_flush(&d, out);
}

#endif
