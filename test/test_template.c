// test/test_template.c - chat templates against what transformers writes, and against whoever means harm.
#define _GNU_SOURCE
#include "check.h"
#include "../lib/template.h"
#include <time.h>
#include <stb/stb_ds.h>

// ---- Fixtures of data/tokenizers
// programs.json: {"dialogues": [..], "programs": [..], "refused": [..]}, see data/make_tokenizers.py.
static Json *fixture_json(const char *name) {
    char path[300], err[256];
    size_t n;
    snprintf(path, sizeof path, "data/tokenizers/%s", name);
    char *text = read_file(path, &n, err);
    Json *j = text ? json_parse(text, n, err) : NULL;
    CHECK(j, "%s: %s", path, err);
    free(text);
    return j;
}

static Tokenizer *fixture_tokenizer(const char *name) {
    char path[300], err[512] = "";
    snprintf(path, sizeof path, "data/tokenizers/%s", name);
    Tokenizer *t = tokenizer_load(path, err);
    CHECK(t, "%s: %s", name, err);
    return t;
}

// The template of a program. NULL, and err.
static Template *template_of(const char *program, size_t n, const Tokenizer *t, char err[512]) {
    char path[] = "/tmp/kvcomp-test-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, program, n) == (ssize_t)n, "%s", path);
    close(fd);
    Template *tp = template_load("nowhere", path, t, err);
    unlink(path);
    return tp;
}

// The messages of a dialogue, at most 16, in m. Returns how many they are.
static int messages_of(const Json *list, Message *m) {
    for (int i = 0; i < list->n; i++)
        m[i] = (Message){ .role = json_text(&list->item[i], "role"), .content = json_text(&list->item[i], "content") };
    return list->n;
}

// The id of the token that a template's variable names, -1 if it names none.
static int token_or_none(const Tokenizer *t, const Json *name) {
    return name->type == JSON_STRING ? text_id(t, name->str, name->len) : -1;
}

// The tokenizer of a program, with its BOS and EOS.
static Tokenizer *program_tokenizer(const Json *p) {
    Tokenizer *t = fixture_tokenizer(json_text(p, "tokenizer"));
    if (!t) return NULL;
    t->bos = token_or_none(t, json_get(p, "bos"));
    t->eos = token_or_none(t, json_get(p, "eos"));
    return t;
}

// Are these the ids that the fixture has?
static int same_ids(const int *ids, const Json *want) {
    if ((int)arrlen(ids) != want->n) return 0;
    for (int i = 0; i < want->n; i++)
        if (ids[i] != want->item[i].i) return 0;
    return 1;
}

TEST(template_programs, "programs as models are published with them give the ids of apply_chat_template, with and "
                        "without a system message, in four turns, and where they rewrite history") {
    setenv("KVCOMP_DATE", "2024-07-26", 1);
    Json *all = fixture_json("programs.json");
    const Json *dialogues = json_get(all, "dialogues"), *programs = json_get(all, "programs");
    int asked = 0, refused = 0;
    CHECK(programs && programs->n >= 45 && dialogues->n == 6, "the fixture");
    for (int i = 0; programs && i < programs->n; i++) {
        const Json *p = &programs->item[i], *ids = json_get(p, "ids"), *program = json_get(p, "program");
        const char *what = json_text(p, "what");
        int how = json_get(p, "think")->i ? RENDER_PROMPT : RENDER_PROMPT | RENDER_NO_THINK;
        char err[512] = "";
        Tokenizer *t = program_tokenizer(p);
        Template *tp = t ? template_of(program->str, program->len, t, err) : NULL;
        CHECK(tp, "%s: %s", what, err);
        for (int d = 0; tp && d < ids->n; d++) {
            Message m[16];
            int n = messages_of(&dialogues->item[d], m), none = ids->item[d].type == JSON_NULL;
            int *got = template_ids(tp, m, n, how, err);
            CHECK((got == NULL) == none, "%s, dialogue %d: %s", what, d, got ? "is not refused" : err);
            CHECK(!got || none || same_ids(got, &ids->item[d]), "%s, dialogue %d: %d ids, expected %d", what, d,
                  (int)arrlen(got), ids->item[d].n);
            asked += !none;
            refused += none;
            arrfree(got);
        }
        template_free(tp);
        tokenizer_free(t);
    }
    CHECK(asked >= 250 && refused >= 4, "%d dialogues, %d refused", asked, refused);
    if (getenv("KVCOMP_TIMES")) printf("%d programs, %d dialogues equal, %d refused by both\n", programs->n, asked, refused);
    json_free(all);
}

int main(int argc, char **argv) { return check_main(argc, argv); }
