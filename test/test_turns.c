// test/test_turns.c - a dialogue turn by turn: what is fed for each message, and what of it is whose.
#define _GNU_SOURCE
#include "check.h"
#include "../lib/tokenizer.c"         // a program's fixture says which tokens begin and end a text
#include "../app/chat.h"
#include <stb/stb_ds.h>

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

// An App with a fixture's tokenizer and the template of a program, and without a model.
static App app_of(const Json *p, const char *bos, const char *eos) {
    App a = { .o = options_of_program() };
    const Json *program = json_get(p, "program");
    char path[300], file[] = "/tmp/kvcomp-test-XXXXXX", err[512] = "";
    int fd = mkstemp(file);
    CHECK(fd >= 0 && write(fd, program->str, program->len) == (ssize_t)program->len, "%s", file);
    close(fd);
    snprintf(path, sizeof path, "data/tokenizers/%s", json_text(p, "tokenizer"));
    a.tok = tokenizer_load(path, err);
    CHECK(a.tok, "%s", err);
    if (a.tok && bos) a.tok->bos = text_id(a.tok, bos, strlen(bos));
    if (a.tok && eos) a.tok->eos = text_id(a.tok, eos, strlen(eos));
    if (a.tok) a.tp = template_load("nowhere", file, a.tok, err);
    CHECK(a.tp, "%s", err);
    unlink(file);
    return a;
}

static void app_forget(App *a) {
    record_clear(a);
    arrfree(a->turn);
    template_free(a->tp);
    tokenizer_free(a->tok);
    options_free(a->o);
}

// What the record has fed (stb array).
static int *fed_ids(const App *a) {
    int *ids = NULL;
    for (int i = 0; i < (int)arrlen(a->turn); i++) {
        for (int j = 0; j < (int)arrlen(a->turn[i].pre); j++) arrput(ids, a->turn[i].pre[j]);
        for (int j = 0; j < (int)arrlen(a->turn[i].dec); j++) arrput(ids, a->turn[i].dec[j]);
    }
    return ids;
}

TEST(turns_appended, "turns appended one by one equal the whole dialogue as transformers renders it; the system message "
                     "and the opening of the reply are where they are") {
    Json *all = fixture_json("chats.json");
    int turns = 0;
    for (int i = 0; all && i < all->n; i++) {
        const Json *chat = &all->item[i], *system = json_get(chat, "system"), *list = json_get(chat, "turns");
        const char *name = json_text(chat, "name");
        char err[512];
        if (!json_get(chat, "think")->i) continue;              // rewrites history: see turns_rewritten
        App a = app_of(chat, NULL, NULL);
        if (system->type == JSON_STRING) options_set(a.o, "system", system->str, err);
        for (int k = 0; a.tp && k < list->n; k++) {
            const Json *want = json_get(&list->item[k], "ids"), *reply = json_get(&list->item[k], "reply");
            Turn t = render_turn(&a, json_text(&list->item[k], "user"), err);
            // A reply ends with the token that the model makes, which is not fed until the next turn.
            int n = (int)arrlen(t.pre), end = k > 0, same = n == want->n + end;
            for (int j = 0; same && j < want->n; j++) same = t.pre[j + end] == want->item[j].i;
            CHECK(same && !t.back && !*err, "%s (%d), turn %d: %d ids, expected %d, %d taken back %s", name, i, k, n,
                  want->n + end, t.back, err);
            const Json *sys = json_get(&list->item[k], "n_sys");
            int more = t.n_head - (int)json_get(&list->item[k], "n_head")->i, less = (sys ? (int)sys->i : 0) - t.n_sys;
            // Where the system text stands inside the first message, and there is none, BOS alone is before it. A
            // token over the edge may belong to either side.
            int inside = t.n_sys == 1 && system->type == JSON_NULL;
            CHECK((abs(less) <= 1 || inside) && abs(more) <= 1, "%s (%d), turn %d: n_sys %d less, n_head %d more", name,
                  i, k, less, more);
            for (int j = 0; j < reply->n - 1; j++) arrput(t.dec, (int)reply->item[j].i);
            record_take_back(&a, &t);
            arrput(a.turn, t);
            turns++;
        }
        app_forget(&a);
    }
    CHECK(turns > 200, "%d turns", turns);
    json_free(all);
}

// The text of ids without its blanks (stb array).
static char *bare_text(const Tokenizer *t, const int *ids) {
    Decoder d = { .t = t };
    char *text = NULL;
    int n = 0;
    for (int i = 0; i < (int)arrlen(ids); i++) text = decode_token(&d, ids[i], text);
    text = decode_flush(&d, text);
    for (int i = 0; i < (int)arrlen(text); i++)
        if (text[i] != ' ') text[n++] = text[i];
    arrsetlen(text, n);
    return text;
}

TEST(turns_rewritten, "a dialogue played turn by turn has fed what apply_chat_template gives for the whole of it, also "
                      "where the program drops thoughts, moves the system message or trims") {
    setenv("KVCOMP_DATE", "2024-07-26", 1);
    Json *all = fixture_json("programs.json");
    const Json *dialogues = json_get(all, "dialogues"), *programs = json_get(all, "programs");
    int equal = 0, blanks = 0, taken = 0;
    for (int i = 0; programs && i < programs->n; i++) {
        const Json *p = &programs->item[i], *ids = json_get(p, "ids");
        for (int d = 0; d < ids->n; d++) {
            const Json *list = &dialogues->item[d];
            int system = !strcmp(json_text(&list->item[0], "role"), "system"), back = 0;
            char err[512] = "";
            if (ids->item[d].type == JSON_NULL) continue;
            App a = app_of(p, json_text(p, "bos"), json_text(p, "eos"));
            if (system) options_set(a.o, "system", json_text(&list->item[0], "content"), err);
            if (!json_get(p, "think")->i) options_set(a.o, "no-think", "1", err);
            for (int k = system; k < list->n && !*err; k += 2) {
                Turn t = render_turn(&a, json_text(&list->item[k], "content"), err);
                if (k + 1 < list->n) {
                    const char *words = json_text(&list->item[k + 1], "content");
                    t.dec = tokenizer_encode(a.tok, words, strlen(words), 0, NULL);
                }
                back += t.back > 0;
                record_take_back(&a, &t);
                arrput(a.turn, t);
            }
            int *got = fed_ids(&a), same = (int)arrlen(got) == ids->item[d].n;
            for (int j = 0; same && j < (int)arrlen(got); j++) same = got[j] == ids->item[d].item[j].i;
            // The replies are encoded by themselves here, and stay so: SentencePiece puts a blank before one, and a
            // line break at its end is no part of what follows.
            if (!same) {
                int *want = NULL;
                for (int j = 0; j < ids->item[d].n; j++) arrput(want, (int)ids->item[d].item[j].i);
                char *x = bare_text(a.tok, got), *y = bare_text(a.tok, want);
                same = arrlen(x) == arrlen(y) && !memcmp(x, y, arrlenu(x));
                equal -= same;
                blanks += same;
                arrfree(want);
                arrfree(x);
                arrfree(y);
            }
            CHECK(same && !*err, "%s, dialogue %d: %d ids, expected %d %s", json_text(p, "what"), d, (int)arrlen(got),
                  ids->item[d].n, err);
            equal += same;
            taken += back > 0;
            arrfree(got);
            app_forget(&a);
        }
    }
    CHECK(equal >= 260 && blanks <= 16 && taken > 20, "%d dialogues are equal, %d but for blanks, %d rewritten", equal,
          blanks, taken);
    json_free(all);
}

int main(int argc, char **argv) { return check_main(argc, argv); }
