// test/test_app.c - the tests of app/: evaluation, benchmark, pages, and the program from outside, as a user or
// a script sees it. It includes the parts of app/, so that every static function can be tried.
#ifndef KVCOMP_NO_MAIN
#define KVCOMP_NO_MAIN
#endif
#include "../lib/base.c"
#include "../lib/checkpoint.c"
#include "../kvcomp.c"
#include "../app/options.c"
#include "../app/terminal.c"
#include "../app/trace.c"
#include "../app/chat.c"
#include "../app/measure.c"
#include "../app/page.c"
#include "../app/main.c"
#include "check.h"
#include "twin.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/select.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <sys/wait.h>

// ==================================================================================================== 12 EVALUATION

// Metrics on cases worked by hand, and the tasks that are shipped. Files, the two passes, means and intervals:
// test/cli/evaluation.txt.

// Whether two numbers agree to a millionth.
static int near_to(double a, double b) { return fabs(a - b) < 1e-6; }

TABLE(eval_scores, 4, "scores worked by hand: F1 of bags of words, which a word enters as often as both texts "
                      "have it, and case, punctuation and articles do not; labels that the first line names "
                      "share the point, those inside the right one do not count; whole words in their order are "
                      "found, and are exact alone") {
    char err[256];
    Json *classes = json_parse("[\"a\",\"ab\",\"abc\",\"x\"]", 20, err);
    double x = score_by(word_place(eval_metrics, part[0]), part[1], part[2], classes);
    CHECK(near_to(x, atof(part[3])), "%s: '%s' against '%s': %g, expected %s", part[0], part[1], part[2], x, part[3]);
    json_free(classes);
}

// A turn whose right reply has the answer "12 7" in a sentence.
static EvalTurn framed_turn(void) {
    static Json answer = { .type = JSON_STRING, .str = "12 7" };
    static Json answers = { .type = JSON_ARRAY, .n = 1, .item = &answer };
    EvalTurn t = { .reply = "The numbers of the red box are 12 and 7.", .answers = &answers };
    mark_answer(&t);
    return t;
}

TABLE(eval_frame, 2, "the sentence around an answer is not scored, what stands in it wrongly is; replies without "
                     "a known frame stay as they are") {
    EvalTurn t = framed_turn();
    OWN char *rest = without_frame(&t, part[0]);
    CHECK(!strcmp(rest, part[1]), "'%s' leaves '%s', expected '%s'", part[0], rest, part[1]);
    arrsetlen(t.span, 0);
    OWN char *whole = without_frame(&t, part[0]);
    CHECK(!strcmp(whole, part[0]), "no frame: '%s'", whole);
    arrfree(t.span);
}

TEST(eval_span, "the tokens of an answer are those that touch it; without a known answer all are") {
    EvalTurn t = framed_turn();
    int from = (int)(strstr(t.reply, "12") - t.reply);
    CHECK(arrlen(t.span) == 4, "the pieces of the answer: %d", (int)arrlen(t.span) / 2);
    CHECK(in_answer(&t, from, from + 2) && in_answer(&t, from - 1, from + 1) &&
              !in_answer(&t, from - 4, from) && !in_answer(&t, from + 2, from + 6),
          "tokens of the answer");
    arrsetlen(t.span, 0);
    CHECK(in_answer(&t, 0, 1), "no answer");
    arrfree(t.span);
}

// ---- tasks

// A right reply scores 1, and a denial next to nothing.
static void check_gold(const char *path, const EvalItem *it, const EvalTurn *t) {
    OWN char *rest = without_frame(t, t->reply), *wrong = without_frame(t, "You have not told me.");
    double right = best_score(it->metric, rest, t), denied = best_score(it->metric, wrong, t);
    CHECK(arrlen(t->span) >= 2 && near_to(right, 1) && denied < .2, "%s %d: '%s' scores %g, a denial %g", path,
          it->number, t->reply, right, denied);
}

TABLE(eval_tasks, 3, "every task of the shipped model: the answer is found in the right reply, which scores 1 "
                     "where a denial scores nothing; texts have the length they say, and versions the same "
                     "answers") {
    static Tokenizer *tok;
    char err[512];
    const char *path = formatted("data/tasks/%s.jsonl", part[0]);
    int versions = atoi(part[1]);
    EvalRun e = { 0 };
    if (!tok) tok = tokenizer_load("models/kvcomp-tiny", err);
    read_items(&e, tok, path, 100);
    CHECK((int)arrlen(e.item) == versions * atoi(part[2]), "%s: %d items", path, (int)arrlen(e.item));
    for (int i = 0; i < (int)arrlen(e.item); i++) {
        const EvalItem *it = &e.item[i], *first = &e.item[i - i % versions];
        const Json *asked = arrlast(it->turn).answers, *same = arrlast(first->turn).answers;
        int tokens = 0;
        CHECK(it->number == i / versions && asked && !strcmp(asked->item[0].str, same->item[0].str),
              "%s %d: other answers", path, i);
        for (int j = 0; j < (int)arrlen(it->turn); j++) {
            const EvalTurn *t = &it->turn[j];
            int *ids = tokenizer_encode(tok, t->user, strlen(t->user), 0, NULL);
            tokens += (int)arrlen(ids);
            arrfree(ids);
            CHECK(t->reply && *t->reply && !t->given, "%s %d: a turn without a reply", path, i);
            if (t->answers) check_gold(path, it, t);
        }
        CHECK(tokens >= .9 * it->length && tokens <= 1.1 * it->length, "%s %d: %d tokens for %d", path, i, tokens,
              it->length);
    }
    eval_close(&e);
}

// ==================================================================================================== 13 BENCHMARK

// A filled cache is what a prefill would have left (bytes and rows of a line: test/cli/basics.txt).

TEST(bench_scratch,
     "scratch that grows a little every step takes few blocks, and never two places at once") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 64, 64, 1);
    OWN_SESSION Session *s = session_of(m, "full", "");
    size_t mark = scratch_mark(s);
    for (size_t n = 900000; n < 4000000; n += 1000) {
        char *a = scratch(s, n), *b = scratch(s, n / 2);
        CHECK((size_t)a % 64 == 0 && (size_t)b % 64 == 0 && (b >= a + n || b + n / 2 <= a),
              "%zu bytes: %p and %p", n, (void *)a, (void *)b);
        a[0] = a[n - 1] = b[0] = b[n / 2 - 1] = 1;  // AddressSanitizer looks
        scratch_reset(s, mark);
    }
    size_t all = arena_bytes(s->scratch);
    int blocks = (int)arrlen(s->scratch->block);
    CHECK(blocks <= 8 && all < 4 * 6000000, "%d blocks, %zu bytes", blocks, all);
}

TEST(bench_fill, "filling a cache leaves the rows, positions and evictions of a prefill, and decode goes on from "
                 "there") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 64, 64, 1);
    for (int evicts = 0; evicts < 2; evicts++) {
        OWN_SESSION Session *filled = session_of(m, evicts ? "streaming" : "full", "budget=40");
        OWN_SESSION Session *s = session_of(m, evicts ? "streaming" : "full", "budget=40");
        int *ids = random_ids(150, s->c->V);
        filled->forward = fill_pass;
        prefill(filled, ids, 150);
        filled->forward = forward;
        prefill(s, ids, 150);
        decode(filled, 3);
        decode(s, 3);
        CHECK(filled->n_tok == 151 && filled->pos_next == 151 && filled->turn == 1 && filled->step == 1,
              "tokens %d, next position %d, turn %d, step %d", filled->n_tok, filled->pos_next, filled->turn, filled->step);
        CHECK(!heads_differ(filled, s), "%d heads hold other rows than a prefill leaves", heads_differ(filled, s));
        for (int i = 0; i < s->c->L * s->c->G; i++)
            CHECK(!memcmp(filled->head[i].pos, s->head[i].pos, (size_t)s->head[i].len * sizeof(int)), "head %d", i);
        for (int i = 0; i < s->c->V; i++) CHECK(isfinite(filled->logits[i]), "logit %d is %g", i, filled->logits[i]);
        arrfree(ids);
    }
    double odd[] = { 3, 1, 2 }, even[] = { 4, 1, 3, 2 };
    CHECK(median(odd, 3) == 2 && median(even, 4) == 2.5, "medians");
}

// ==================================================================================================== 14 REPORT

// The functions that a page in a browser calls (the page's JSON: test/cli/reports.txt). data/web_test.js looks at
// the pictures.

// What one of them returned, which has to be JSON.
static Json *web_json(const char *text) {
    char err[256] = "";
    Json *j = json_parse(text, strlen(text), err);
    CHECK(j, "%.80s: %s", text, err);
    return j;
}

// The reply of side i to a message, made a step at a time (malloc'd).
static char *web_reply(int i, const char *message) {
    char *reply = copy_text("");
    CHECK(web_say(i, message) == 0, "\"%s\" does not fit", message);
    for (int more = 1; more;) {
        Json *j = web_json(web_step(i, 48));
        const char *piece = json_get(j, "text")->str;
        reply = xrealloc(reply, strlen(reply) + strlen(piece) + 1);
        strcat(reply, piece);
        more = (int)json_get(j, "more")->i;
        json_free(j);
    }
    return reply;
}

// Do the masks of side i say what its rows and views say, bit by bit?
static int web_masks_hold(int i) {
    static int rows[8192];
    const Session *s = web_side[i].side.app.s;
    int L = s->c->L, H = s->c->H, G = s->c->G, wide = (L * G + L * H + 7) / 8, wrong = 0;
    unsigned char *mask = masks_of(s);
    for (int q = 0; q < L * H; q++) {
        const int kept = q / (H / G), read = L * G + q, n = view_rows(s, q / H, q % H, rows);
        const KVHead *head = &s->head[kept];
        for (int t = 0; t < s->n_tok; t++) {
            int holds = 0, reads = 0;
            for (int r = 0; r < head->len; r++) holds |= head->src[r] == t;
            for (int r = 0; r < n; r++) reads |= head->src[rows[r]] == t;
            wrong += holds != (mask[t * wide + kept / 8] >> kept % 8 & 1);
            wrong += reads != (mask[t * wide + read / 8] >> read % 8 & 1);
        }
    }
    arrfree(mask);
    return !wrong;
}

static const char *const web_lines_said[] = { "My password is 4821.", "Tell me a joke.", "What is my password?" };

// A page that is open, and gives everything back.
static void web_begin_test(void) { json_free(web_json(web_open("models/kvcomp-tiny"))); }
static void web_end_test(void) {
    for (int i = 0; i < SIDES; i++) web_close(i);
    app_close(&web);
    web = (App){ 0 };
}

TEST(web_sides, "what a page in a browser calls: replies, rows and views are those of a session; what is refused "
                "leaves its side alone") {
    static const char *const names[] = { "full", "streaming", "sonic", "lychee", "h2o", "pats" };
    web_begin_test();
    for (int m = 0; m < 6; m++) {
        char err[256];
        Side own;
        OWN_OPTIONS Options *o = options_copy(web.o);
        options_set(o, "budget", "24", err);
        side_open(&own, &web, o, names[m]);
        CHECK(!*web_method(0, names[m], "budget=24"), "%s is refused", names[m]);
        web_clear(0);
        for (int i = 0; i < 3; i++) {
            OWN char *reply = web_reply(0, web_lines_said[i]);
            side_turn(&own, web_lines_said[i], 48);
            CHECK(!strcmp(reply, own.reply), "%s: \"%s\", not \"%s\"", names[m], reply, own.reply);
        }
        OWN char *rows = WRITTEN(f, json_rows(own.app.s, f));
        CHECK(strstr(web_rows(0), rows), "%s: other rows or views", names[m]);
        json_free(web_json(web_rows(0)));
        json_free(web_json(web_state(0, 0)));
        CHECK(web_masks_hold(0), "%s: masks", names[m]);
        side_close(&own);
    }
    static const char *const refused[][3] = {
        { "fulll", "", "did you mean full" }, { "full", "budgett=3", "budgett" }, { "full", "budget=-4", "budget" },
        { "streaming", "budget=2", "recent row" },
    };
    const Session *before = web_side[0].side.app.s;
    for (int i = 0; i < 4; i++)
        CHECK(strstr(web_method(0, refused[i][0], refused[i][1]), refused[i][2]), "%s %s", refused[i][0], refused[i][1]);
    OWN char *longer = xmalloc(40001);
    memset(longer, 'a', 40000);
    longer[40000] = 0;
    int n_tok = before->n_tok, err2 = dup(2), null = open("/dev/null", O_WRONLY);
    dup2(null, 2);  // it says that the message does not fit
    int fits = web_say(0, longer);
    dup2(err2, 2);
    close(err2);
    close(null);
    CHECK(fits == -1 && web_side[0].side.app.s == before && before->n_tok == n_tok, "a long message: %d", fits);
    web_end_test();
}

TEST(web_follower, "a follower holds what it follows, goes on when the dialogue does, and has a picture of every "
                   "paper's; it begins anew when the dialogue does") {
    static const char *const paper[][2] = { { "lychee", "layer04.head00.lychee.scores" }, { "pats", "pats.bits" },
                                            { "dililazy", "layer01.dililazy.budgets" }, { "loopserve", "layer00.k" } };
    web_begin_test();
    CHECK(!*web_method(0, "full", ""), "no session");
    free(web_reply(0, demo_lines[4].user));
    for (int m = 0; m < 4; m++) {
        const char *options = "budget=32\nlychee-buffer=16\nlychee-kg=2\npats-window=8";
        const char *refusal = web_method(FOLLOWER, paper[m][0], options);
        CHECK(!*refusal, "%s: %s", paper[m][0], refusal);
        for (int turn = 0; turn < 2; turn++) {
            CHECK(!*web_follow(FOLLOWER, 0), "it follows");
            int held = web_side[FOLLOWER].side.app.s->n_tok, want = web_side[0].side.app.s->n_tok;
            CHECK(held == want, "%s: %d tokens, not %d", paper[m][0], held, want);
            if (!turn) free(web_reply(0, web_lines_said[1]));
        }
        Json *j = web_json(m == 3 ? web_lines() : web_trace());
        const Json *x = json_get(json_get(m == 3 ? json_get(j, "trace") : j, paper[m][1]), "x");
        CHECK(x && *x->str, "%s: nothing to draw", paper[m][0]);
        json_free(j);
    }
    web_clear(0);
    CHECK(!*web_follow(FOLLOWER, 0) && !web_side[FOLLOWER].side.app.s->n_tok, "a dialogue that was forgotten");
    web_end_test();
}

// ==================================================================================================== 15 THE PROGRAM FROM OUTSIDE

// Runs ./kvcomp as a user or a script would: exit codes, what goes to stdout and what to stderr,
// the outside contract, the chat on a pipe and on a terminal, sessions on disk, and every command
// that README.md prints.
#ifdef __APPLE__                // where openpty and login_tty are declared
#include <util.h>
#else
#include <pty.h>
#include <utmp.h>
#endif

static char sh_out[1 << 20], sh_err[1 << 16];

// Leaves the running test out where ./kvcomp is not built.
static void needs_program(void) {
    if (access("./kvcomp", X_OK)) leave_out("./kvcomp (make kvcomp)");
}

// Reads a file into buf as a text, and removes it.
static void take_file(const char *path, char *buf, size_t size) {
    FILE *f = fopen(path, "rb");
    buf[f ? fread(buf, 1, size - 1, f) : 0] = 0;
    if (f) fclose(f);
    unlink(path);
}

// Runs a command. Returns its exit code; stdout is in sh_out, stderr in sh_err.
static int sh(const char *fmt, ...) {
    static char cmd[16384], full[16700];
    const char *o = tmp_path("sh_out"), *e = tmp_path("sh_err");
    va_list ap;
    needs_program();
    va_start(ap, fmt);
    vsnprintf(cmd, sizeof cmd, fmt, ap);
    va_end(ap);
    // -d auto is the CPU, whatever the machine has.
    snprintf(full, sizeof full, "{ export CUDA_VISIBLE_DEVICES= ; %s ; } >%s 2>%s </dev/null", cmd, o, e);
    int rc = system(full);
    take_file(o, sh_out, sizeof sh_out);
    take_file(e, sh_err, sizeof sh_err);
    return WIFEXITED(rc) ? WEXITSTATUS(rc) : 128 + WTERMSIG(rc);
}

#define SYN "./kvcomp --synthetic L2,H4,G2,D16,C64,F96,V2048 "
#define CHAT "./kvcomp -m models/kvcomp-tiny --temp 0 -n 24 "

// ---- what the program says: test/cli/*.txt

// Does the text match the pattern, in which a * stands for any characters?
static int matches(const char *text, const char *pattern) {
    size_t n = strcspn(pattern, "*");
    if (strncmp(text, pattern, n)) return 0;
    while (text && pattern[n]) {            // what is behind a star, as near as possible, or at the end of the text
        text += n;
        pattern += n + 1;
        n = strcspn(pattern, "*");
        text = pattern[n] ? memmem(text, strlen(text), pattern, n) : text + max_size(strlen(text), n) - n;
        if (text && !pattern[n]) return !strcmp(text, pattern);
    }
    return text && !text[n];
}

// Cuts the next line off a text; NULL: there is none.
static char *next_line(char **text) { return *text && **text ? strsep(text, "\n") : NULL; }

// A step of a transcript: a command, what its lines on stdout and stderr match, and its exit code.
typedef struct {
    char kind, cmd[8192], out[16384], err[16384];
    int code, ends;             // ends: 1: the exit code is written
    struct Pty *pty;
} Step;

// The lines of `got` against the patterns of `want`, in order; a pattern "*" is any number of lines. Says where they
// part.
static void lines_match(const char *about, const char *which, char *got, char *want) {
    int any = 0;
    for (char *pattern, *line = NULL; (pattern = next_line(&want)); ) {
        any |= !strcmp(pattern, "*");
        if (!strcmp(pattern, "*")) continue;
        do line = next_line(&got);
        while (any && line && !matches(line, pattern));
        any = line && matches(line, pattern) ? 0 : -1;
        CHECK(!any, "%s\n  %s: %s\n  expected: %s", about, which, line ? line : "nothing more", pattern);
        if (any) return;
    }
    CHECK(any || !got || !*got, "%s\n  %s goes on: %.400s", about, which, got);
}

// A command ends with this code, and with one line on stderr, which holds the words (* is any text), beside that of a
// reply; no words: it says nothing. What is refused has nothing on stdout.
static void command_says(const char *about, const char *cmd, int want, const char *words) {
    int code = sh("{ %s\n}", cmd), lines = lines_in(sh_err) - (strstr(sh_err, "[turn 1 | ") != NULL);
    CHECK(code == want && matches(sh_err, formatted("*%s*", words)) && lines == (*words != 0), "%s: exit code %d: %s",
          about, code, sh_err);
    CHECK(!want || !*sh_out, "%s: on stdout: %s", about, sh_out);
}

// ---- a program on a terminal that is waited for, not slept for

typedef struct Pty {
    int fd, tty;                // the two ends
    pid_t pid;
    char seen[1 << 18];
    size_t n, from;             // bytes seen; where the next pty_wait begins
} Pty;

// Starts a command of a transcript on a pseudo-terminal.
static Pty *pty_start(const char *cmd) {
    static const int ends[] = { SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGTSTP };
    struct rlimit none = { 0, 0 };
    Pty *p = xcalloc(1, sizeof *p);
    char text[8200];
    snprintf(text, sizeof text, "exec %s", cmd);
    needs_program();
    if (openpty(&p->fd, &p->tty, NULL, NULL, NULL)) leave_out(NO_TERMINAL);
    p->pid = fork();
    if (p->pid) return p;
    for (int i = 0; i < 5; i++) signal(ends[i], SIG_DFL);
    setrlimit(RLIMIT_CORE, &none);
    setenv("TERM", "xterm", 1);
    close(p->fd);
    login_tty(p->tty);
    execl("/bin/sh", "sh", "-c", text, (char *)NULL);
    _exit(99);
}

// Reads what has come, for a hundredth of a second at most.
static void pty_read(Pty *p) {
    fd_set f;
    struct timeval t = { 0, 10000 };
    FD_ZERO(&f);
    FD_SET(p->fd, &f);
    if (select(p->fd + 1, &f, NULL, NULL, &t) <= 0) return;
    if (p->n + 4096 >= sizeof p->seen) p->n = p->from = 0;
    ssize_t r = read(p->fd, p->seen + p->n, 4096);
    if (r > 0) p->n += (size_t)r;
    p->seen[p->n] = 0;
}

// Reads until the text has come, for a minute at most. 1: it has.
static int pty_wait(Pty *p, const char *text) {
    for (double end = now() + 60; now() < end; pty_read(p)) {
        char *at = memmem(p->seen + p->from, p->n - p->from, text, strlen(text));
        if (!at) continue;
        p->from = (size_t)(at - p->seen) + strlen(text);
        return 1;
    }
    return 0;
}

// Types keys.
static void pty_type(Pty *p, const char *keys) {
    CHECK(write(p->fd, keys, strlen(keys)) == (ssize_t)strlen(keys), "%s", strerror(errno));
}

// Whether the terminal is in its usual mode: line by line, echo, signals.
static int pty_sane(const Pty *p) {
    struct termios t;
    return !tcgetattr(p->tty, &t) && t.c_lflag & ICANON && t.c_lflag & ECHO && t.c_lflag & ISIG;
}

// Waits for the end, for a minute at most, and closes the terminal. Its exit code, or what signal ended it, below 0;
// -99: it had to be killed. Nobody can give the terminal back after KILL.
static int pty_end(Pty *p) {
    int status = 0, over = 0, code = -99;
    for (double end = now() + 60; !over && now() < end; pty_read(p)) over = waitpid(p->pid, &status, WNOHANG) == p->pid;
    if (!over) kill(p->pid, SIGKILL);
    if (!over) waitpid(p->pid, &status, 0);
    else code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    CHECK(code == -SIGKILL || pty_sane(p), "the terminal is not as it was");
    close(p->fd);
    close(p->tty);
    return code;
}

// The longest line of a text of one column a byte.
static int widest_line(const char *s) {
    int most = 0;
    for (size_t n; *s; s += n + (s[n] != 0)) {
        n = strcspn(s, "\n");
        most = max_int(most, (int)n);
    }
    return most;
}

// What stands in a transcript as it is meant: \r, \n, \t, \e and \\, ^X for Ctrl-X, ^? for the key that deletes; $T:
// the folder.
static char *keys_of(const char *line) {
    static char keys[2048];
    int n = 0;
    for (; *line; line++) {
        const char *at = strchr("r\rn\nt\te\x1b", *line == '\\' ? line[1] : '!');
        int folder = !strncmp(line, "$T", 2), pair = folder || *line == '\\' || *line == '^';
        if (folder) n += sprintf(keys + n, "%s", getenv("T"));
        else if (*line == '^') keys[n++] = line[1] == '?' ? 127 : (char)(line[1] & 31);
        else keys[n++] = *line != '\\' ? *line : at ? at[1] : line[1];
        line += pair && line[1];
    }
    keys[n] = 0;
    return keys;
}

// A prompt has come; with a line: it is drawn anew by Ctrl-L, and reads so: what follows only moves the cursor.
static int prompt_reads(Pty *p, const char *line) {
    static const char prompt[] = "\x1b[32m> \x1b[0m";
    if (!line) return pty_wait(p, prompt);
    pty_type(p, "\f");
    if (!pty_wait(p, formatted("\x1b[2J%s%s", prompt, line))) return 0;
    const char *rest = p->seen + p->from;
    return strspn(rest, "\b\r") == strlen(rest);
}

// A line of a transcript behind "@ ": what is typed, waited for, or must not have come.
static void terminal_line(const char *file, Pty *p, const char *line) {
    char *rest = (char *)line + 1, *keys, *words;
    int times = isdigit((unsigned char)*rest) ? (int)strtol(rest, &rest, 10) : -1, right = 1;
    keys = keys_of(rest + (*rest == ' '));
    words = strchr("<:;", *line) ? strstr(keys, " | ") : NULL;
    if (words) *words = 0;
    if (words) words += 3;
    for (int i = 0; strchr("<:;", *line) && i < abs(times); i++) pty_type(p, keys);
    if (*line == ':') pty_type(p, "\r");
    if (*line == '~') right = pty_wait(p, keys);
    if (*line == ';') right = prompt_reads(p, words);
    else if (words) right = pty_wait(p, words);
    if (*line == '|') right = prompt_reads(p, *keys ? keys : NULL);
    if (*line == ':') right &= prompt_reads(p, NULL);
    if (*line == '-') {
        int come = 0;
        for (char *at = p->seen; (at = memmem(at, p->n - (size_t)(at - p->seen), keys, strlen(keys))); at++) come++;
        right = come == max_int(times, 0);
    }
    if (*line == '&') right = !sh("%s", line + 1);
    if (!strcmp(line, "sane")) right = pty_sane(p);
    if (!strcmp(line, "raw")) right = !pty_sane(p);
    if (*line == 'w') right = widest_line(p->seen) <= times + 1;
    if (!strncmp(line, "kill ", 5)) kill(p->pid, atoi(line + 5));
    CHECK(right, "%s: %s: what came is %.2000s", file, line, p->seen);
}

// "COMMAND | WHAT": does this machine lack WHAT? The command fails then.
static int transcript_lacks(char *line) {
    char *what = strstr(line, " | ");
    *what = 0;
    if (!sh("%s", line)) return 0;
    lack(copy_text(what + 3), 1);
    return 1;
}

// Ends a step: what it was to do is done, and compared.
static void step_end(const char *file, Step *s) {
    const char *about = formatted("%s: %c %.400s", file, s->kind, s->cmd);
    if (s->pty && s->kind == '@' && !s->ends) pty_type(s->pty, "\x01\x0b\x04");
    int code = s->pty ? pty_end(s->pty) : s->kind == '$' ? sh("{ %s}", s->cmd) : s->code;
    CHECK(code == s->code, "%s\n  exit code %d, expected %d: %.2000s", about, code, s->code,
          s->pty ? s->pty->seen : sh_err);
    if (s->kind == '$') lines_match(about, "stdout", sh_out, s->out);
    if (s->kind == '$') lines_match(about, "stderr", sh_err, s->err);
    free(s->pty);
    memset(s, 0, sizeof *s);
}

// A line of a transcript that belongs to a step.
static void step_line(const char *file, Step *s, char *line) {
    char *part[3] = { "", "", "" };
    if (!strncmp(line, "= ", 2)) {
        s->ends = 1;
        s->code = atoi(line + 2);
    } else if (s->kind == '+') {
        const char *about = formatted("%s: %s", file, line);
        int n = case_parts(line, part, 3);
        setenv("L", part[1], 1);
        CHECK(n == 3, "%s: %d parts", about, n);
        if (n == 3) command_says(about, s->cmd, atoi(part[0]), part[2]);
    } else if (s->pty) {
        terminal_line(file, s->pty, line);
    } else if (!strncmp(line, "! ", 2)) {
        strcat(strcat(s->err, line + 2), "\n");
    } else if (!strncmp(line, "~ ", 2)) {
        strcat(strcat(strcat(s->err, "*\n*"), line + 2), "*\n*\n");
    } else {
        strcat(strcat(s->out, line), "\n");
    }
}

// A transcript. "$ " begins a command and "> " goes on with it; then "= N" is its exit code, if it is not 0, "! " a
// line of stderr, and every other line one of stdout, in which * is any text; a * alone is any number of lines. "~ "
// is a line of stderr that holds the words, with any lines before and behind it. "# " says something. $T is a folder
// of the transcript's own; $SYN, $TINY and $CHAT begin commands.
//
// "=2 COMMAND | WORDS" is a command that ends with 2 and says this (see command_says). "+ " begins a command that is
// run so for every line "2 | $L | WORDS" of the table below it. "@ " begins a chat on a terminal, "@@ " another
// program there; test/cli/terminal.txt says what follows. "? COMMAND | WHAT" leaves out what follows, up to the next
// ?, where the command fails, because this machine lacks WHAT.
static void transcript(const char *path) {
    static char line[4096];
    static Step s;
    char folder[64] = "/tmp/kvcomp-cli-XXXXXX";
    FILE *f = fopen(path, "r");
    int left_out = 0;
    memset(&s, 0, sizeof s);
    CHECK(f && mkdtemp(folder), "%s: %s", path, strerror(errno));
    setenv("T", folder, 1);
    setenv("SYN", SYN, 1);
    setenv("TINY", "./kvcomp --synthetic L1,H4,G2,D16,C64,F96,V4096 --tokenizer models/kvcomp-tiny", 1);
    setenv("CHAT", CHAT, 1);
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        int at = !strncmp(line, "@@", 2), says = *line == '=' && isdigit((unsigned char)line[1]);
        int begins = says || (strchr("$@+?", *line) && line[1 + at] == ' ');
        char *words = line + strlen(line);
        if (begins) step_end(path, &s);
        if (begins && *line == '?') left_out = transcript_lacks(line + 2);
        if (left_out || !*line || *line == '#' || (begins && *line == '?')) continue;
        if (says) {
            const char *about = formatted("%s: %.400s", path, line);
            while (words > line && strncmp(words, " |", 2)) words--;
            *words = 0;
            words += 2 + (words[2] == ' ');
            command_says(about, strchr(line, ' '), atoi(line + 1), words);
        } else if (begins || *line == '>') {
            s.kind = at ? '^' : begins ? *line : s.kind;
            strcat(strcat(s.cmd, line + 1 + at + (line[1 + at] == ' ')), "\n");
            if (*line == '@') s.pty = pty_start(s.cmd);
            if (s.kind == '@') CHECK(prompt_reads(s.pty, NULL), "%s: %s: no prompt: %.2000s", path, line, s.pty->seen);
        } else {
            step_line(path, &s, line);
        }
    }
    step_end(path, &s);
    if (f) fclose(f);
    CHECK(!sh("rm -r %s", folder), "%s", sh_err);
}

// The transcripts: a test each. The first lines of a file say what it is about.
#define TRANSCRIPT(name) \
    TEST(cli_##name, "test/cli/" #name ".txt: what is typed, and what the program answers and ends with") { \
        transcript("test/cli/" #name ".txt"); \
    }
TRANSCRIPT(basics) TRANSCRIPT(batch) TRANSCRIPT(chat) TRANSCRIPT(compare) TRANSCRIPT(evaluation)
TRANSCRIPT(files) TRANSCRIPT(hub) TRANSCRIPT(readme) TRANSCRIPT(refusals) TRANSCRIPT(reports)
TRANSCRIPT(saving) TRANSCRIPT(scripts) TRANSCRIPT(sessions) TRANSCRIPT(signals) TRANSCRIPT(strays)
TRANSCRIPT(templates) TRANSCRIPT(text) TRANSCRIPT(terminal) TRANSCRIPT(traces)

#ifdef KVCOMP_READLINE
// Readline has a line, and Ctrl-C comes before it is anybody's: the first time.
static void release_and_interrupt(void) {
    line_release();
    if (!interrupt_at) raise(SIGINT);
    interrupt_at = 1;
}

TEST(terminal_interrupt, "Ctrl-C takes back the keys before it and no key behind it; right behind Enter it takes "
                         "the line back; a terminal that goes is the end of the input") {
    int fd, tty, status = 0;
    if (openpty(&fd, &tty, NULL, NULL, NULL)) leave_out(NO_TERMINAL);
    pid_t pid = fork();
    if (!pid) {
        unsigned char c;
        char *out = NULL;
        login_tty(tty);
        lines_prepare();
        terminal_take();
        watch_keyboard();
        alarm(30);
        terminal_given.c_cc[VINTR] = _POSIX_VDISABLE;       // as at the prompt, which these keys are typed at
        tcsetattr(0, TCSANOW, &terminal_given);
        if (write(fd, "a\x03" "b\r", 4) != 4 || read_edited(&out) != READ_DONE || arrlen(out) != 1 || *out != 'b') _exit(1);
        arrsetlen(out, 0);
        rl_deprep_term_function = release_and_interrupt;
        interrupt_at = 0;
        if (write(fd, "b\r\x04", 3) != 3 || read_edited(&out) != READ_END || arrlen(out)) _exit(2);
        signal(SIGHUP, SIG_IGN);
        close(fd);
        _exit(byte_take(&c) < 0 ? 0 : 3);
    }
    close(fd);
    close(tty);
    waitpid(pid, &status, 0);
    CHECK(status == 0, "status %x: 1, other keys; 2, a line; 3, no end; a signal: it waits", status);
}
#endif

TEST(cli_methods, "--list-methods starts each line with a name; --help NAME tells paper, what is kept, every "
                  "option, and the budget that the method opens with") {
    OWN_MODEL Tiny tiny = tiny_model(2, 4, 2, 16, 32, 48, 61, 6);
    OWN_OPTIONS Options *none = options_of("");
    CHECK(sh("./kvcomp --list-methods") == 0 && !*sh_err, "%s", sh_err);
    OWN char *list = copy_text(sh_out);
    int n = 0;
    EACH_METHOD (at) {
        const Method *m = *at;
        CHECK(strstr(list, formatted("%s%s ", n++ ? "\n" : "", m->name)), "%s is not listed", m->name);
        const char *told[] = { m->keeps, m->paper, m->uses ? m->uses : "", m->budget ? "or --ratio" : "",
                               m->budget ? formatted("Uses --budget %d", m->budget) : "" };
        CHECK(sh("./kvcomp --help %s", m->name) == 0, "%s", sh_err);
        for (int i = 0; i < 5; i++) CHECK(strstr(sh_out, told[i]), "--help %s does not tell %s", m->name, told[i]);
        for (const Opt *o = m->opts; o && o->name; o++)
            CHECK(strstr(sh_out, formatted("--%s", o->name)), "--help %s does not tell --%s", m->name, o->name);

        // Two need a file of scores.
        char err[512];
        int has = m->budget && strcmp(m->name, "dililazy") && strcmp(m->name, "headkv");
        Session *s = has ? session_try(tiny.c, tiny.w, none, m->name, err) : NULL;
        CHECK(!has || (s && s->budget == m->budget), "%s opens with %d", m->name, s ? s->budget : -1);
        session_close(s);
    }
    CHECK(lines_in(list) == n, "%d lines, %d methods", lines_in(list), n);
}

TEST(cli_options_help, "--help is one screen of at most 25 options and 100 columns, --help all has every option, "
                       "at most 100 columns wide; there are at most MOST_OPTIONS, one of a method has an effect "
                       "under it, and one of another program is not ours") {
    enum { MOST_OPTIONS = 100 };
    OWN_OPTIONS Options *all = options_of_program();
    int n = (int)shlen(all->map), options = 0;
    CHECK(n <= MOST_OPTIONS, "%d options", n);
    CHECK(sh("./kvcomp --help") == 0 && widest_line(sh_out) <= 100 && lines_in(sh_out) <= 40, "%d columns, %d lines",
          widest_line(sh_out), lines_in(sh_out));
    for (const char *p = sh_out; (p = strstr(p, "\n  -")); p++) options++;
    CHECK(options <= 25, "%d options on the first screen", options);
    CHECK(sh("./kvcomp --help all") == 0 && widest_line(sh_out) <= 100, "%d columns", widest_line(sh_out));
    for (int i = 0; i < n; i++) CHECK(strstr(sh_out, formatted("--%s", all->map[i].key)), "no --%s", all->map[i].key);
    EACH_METHOD (at)
        for (const Opt *o = (*at)->opts; o && o->name; o++)
            CHECK(methods_look_at((*at)->name, o->name), "%s --%s", (*at)->name, o->name);
    for (size_t i = 0; i < sizeof no_options / sizeof *no_options; i++)
        CHECK(!opt_find(all, no_options[i].name), "%s is ours, too", no_options[i].name);
}

TEST(cli_threads, "a small model gets one thread, others at least one a core") {
    CHECK(threads_for(3000000) == 1, "%d threads for the shipped model", threads_for(3000000));
    CHECK(threads_for((size_t)1 << 30) == physical_cores() && physical_cores() >= 1, "%d cores",
          physical_cores());
}

TEST(weights_q8, "weights become 8 bits one by one while they are loaded or made: what is planned "
                 "is what they take, "
                 "vectors stay as they are") {
    Config *c = config_synthetic("L2,H4,G2,D16,C64,F96,V131"),
           *d = config_synthetic("L2,H4,G2,D16,C64,F96,V131");
    d->as_q8 = 1;
    Weights *plan = weights_planned(d), *w = weights_synthetic(c, 7), *q = weights_synthetic(d, 7);
    WeightFiles *wf = &q->files;
    CHECK(q->bytes == plan->bytes && wf->block_used == wf->block_bytes && d->dtype == DT_Q8,
          "%zu bytes, %zu planned", q->bytes, plan->bytes);
    CHECK(wf->block_bytes < plan->bytes + 64 * (size_t)(c->L * N_OF_LAYER + 3), "%zu bytes are held, of %zu",
          wf->block_bytes, plan->bytes);
    for (Place x = {0}, y = {0}; tensor_next(c, w, &x) && tensor_next(d, q, &y); ) {
        const Tensor *a = x.t, *b = y.t;
        if (!a->data) continue;
        if (a->rows == 1) {
            CHECK(a->dtype == b->dtype && !memcmp(a->data, b->data, tensor_bytes(a)), "%s", x.name);
            continue;
        }
        OWN char *want = xmalloc(tensor_bytes(b));
        q8_store(want, a);
        CHECK(b->dtype == DT_Q8 && !memcmp(want, b->data, tensor_bytes(b)), "%s", x.name);
    }
    weights_close(plan, NULL);
    weights_close(w, c);
    weights_close(q, d);
}

// ---- files that are none, texts with a 0 byte, control characters, options without effect

TABLE(shown_controls, 2, "control characters from outside are shown on stderr and in a chat on a terminal") {
    OWN char *out = WRITTEN(f, show(f, part[0], case_size[0]));
    CHECK(!strcmp(out, part[1]), "%s, expected %s", out, part[1]);
}

TEST(shown_replies, "a reply is shown on a terminal, and raw in a pipe") {
    for (int pipes = 0; pipes < 2; pipes++) {
        int end[2];
        char got[64] = "", *text = NULL;
        if (pipes ? pipe(end) : openpty(&end[0], &end[1], NULL, NULL, NULL)) leave_out(NO_TERMINAL);
        FILE *f = fdopen(end[1], "w");
        bytes_put(&text, "\x1b]0;x\a", 6);
        write_text(&text, f);
        CHECK(read(end[0], got, sizeof got - 1) > 0 && !strcmp(got, pipes ? "\x1b]0;x\a" : "\\x1b]0;x\\x07"), "%s", got);
        arrfree(text);
        fclose(f);
        close(end[0]);
    }
}

TABLE(page_base64, 2, "bytes as base64, in quotes") {
    OWN char *out = WRITTEN(f, json_base64(f, part[0], case_size[0]));
    CHECK(!strcmp(out, part[1]), "%s, expected %s", out, part[1]);
}

TABLE(shown_cells, 2, "how wide a character is in a table of replies") {
    CHECK(char_width(part[0], (int)case_size[0]) == atoi(part[1]), "%s", part[0]);
}

// ---- memory

// Runs the program in this executable (see main) with args behind its name; the n-th allocation
// fails. The exit code.
static int run_short(long n, const char *args) {
    return sh("ASAN_OPTIONS=detect_leaks=0 timeout 60 /proc/%d/exe --main %ld %s", (int)getpid(), n,
              args);
}

TABLE(no_memory, 2, "whichever allocation fails, in loading, a chat, an evaluation, a report, a benchmark or "
                    "saving: one line and exit 4, or full success; no file in the making is left") {
    static char want[1 << 16];
    const char *args = part[1], *told;
    OWN char *folder = copy_text(tmp_path("memory"));
    int samples = atoi(part[0]), piped = strchr(args, '|') != NULL;         // the exit code is then cut's
    mkdir(folder, 0755);
    setenv("M", formatted("%s/m", folder), 1);
    put_text(getenv("M"), "hello\n/method streaming\n/budget 64\nhow are you?\n/regen\n/stats\n/system be kind\nhi\n");
    put_text(formatted("%s.ids", getenv("M")), "1 2 3\n");
    CHECK(run_short(0, args) == 0, "%s: %s", args, sh_err);
    told = strstr(sh_err, "allocations ");
    long total = told ? atol(told + 12) : 0;
    CHECK(total > 100, "%s: %ld allocations", args, total);
    snprintf(want, sizeof want, "%.60000s", sh_out);
    rnd_seed(19);
    for (int k = 0; k <= min_int(samples, (int)total); k++) {
        // all, or the first few, then anywhere, more often early; the last is one that no longer happens
        long n = k < 4 || total <= samples ? k + 1 : 1 + (long)((double)(total - 1) * pow(rnd_unit(), k % 2 ? 1 : 4));
        if (k == samples) n = total + 1;
        int rc = run_short(n, args);
        const char *line = strstr(sh_err, "kvcomp: out of memory");
        int refused = (rc == EXIT_MEMORY || piped) && line && !strstr(line + 1, "kvcomp: ");
        CHECK(n <= total ? refused : !rc && !line && !strcmp(want, sh_out), "%s: allocation %ld of %ld: exit %d: %s",
              args, n, total, rc, sh_err);
    }
    CHECK(sh("ls -A %s | grep kvcomp-", folder) == 1, "%s: left are %s", args, sh_out);
    tmp_clear(folder);
}

// ---- the floors

// The parts in the order of their floors: the lines that each should have, header and source together, and those that
// it may have. A part that has become shorter brings the second number down with it.
static const struct { const char *part; int aim, most; } floors[] = {
    { "lib/base", 850, 1352 },
    { "lib/kernels", 1000, 1584 },
    { "lib/checkpoint", 1000, 1371 },
    { "lib/tokenizer", 1200, 1553 },
    { "lib/template", 900, 1372 },
    { "kvcomp", 6200, 6773 },
    { "app/options", 300, 390 },
    { "app/terminal", 400, 625 },
    { "app/trace", 140, 137 },
    { "app/chat", 1000, 2110 },
    { "app/measure", 1300, 1809 },
    { "app/page", 450, 706 },
    { "app/main", 650, 690 },
};
enum { N_FLOORS = sizeof floors / sizeof *floors };

TEST(text_floors, "no part has more lines than it may have (who calls whom: test/cli/text.txt)") {
    for (int k = 0; k < N_FLOORS; k++) {
        int lines = sh("cat %s.[ch] | wc -l", floors[k].part) ? INT_MAX : atoi(sh_out);
        CHECK(lines <= floors[k].most, "%s has %d lines and may have %d", floors[k].part, lines, floors[k].most);
        if (lines > floors[k].aim)
            printf("       %s has %d lines, %d more than its budget\n", floors[k].part, lines, lines - floors[k].aim);
    }
}

// ---- what others did to the files

TEST(decode_stray_ids, "prefill and decode end with 3 and both numbers at an id without a row, before anything "
                       "is read or kept") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 16, 32, 48, 61, 6);
    OWN_SESSION Session *s = session_of(m, "full", "");
    int good[] = { 3, 60, 0 };
    prefill(s, good, 3);
    static const int bad[] = { 61, -1, INT_MAX, INT_MIN };
    for (int i = 0; i < 8; i++) {
        char want[80];
        int ids[] = { 3, 60, bad[i / 2] }, rc = i % 2 ? try_prefill(s, ids, 3) : try_decode(s, ids[2]);
        snprintf(want, sizeof want, "*token id %d has no row*which has 61 rows*", ids[2]);
        CHECK(rc == EXIT_MODEL && matches(die_text, want) && s->n_tok == 3, "%d: %d %s", i, rc, die_text);
    }
    decode(s, 60);
    CHECK(s->n_tok == 4, "the session goes on");
}

// ---- saving, signals, and a prefill that is given up

// An empty folder -> its path. In memory where that can be had: bringing files to a busy disk takes
// seconds.
static const char *save_folder(char d[64]) {
    snprintf(d, 64, "%s/kvcomp-save-XXXXXX", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    return mkdtemp(d);
}

// Does another bit in this byte make another model?
static int tells_apart(Tiny m, const void *byte) {
    unsigned char *at = (unsigned char *)(uintptr_t)byte;
    uint64_t was = model_fingerprint(m.c, m.w);
    *at ^= 128;
    int other = model_fingerprint(m.c, m.w) != was;
    *at ^= 128;
    return other && model_fingerprint(m.c, m.w) == was;
}

TEST(session_fingerprint, "every tensor of the model and every number of its config changes the "
                          "fingerprint; threads do not") {
    OWN_MODEL Tiny m = tiny_model(2, 4, 2, 8, 16, 24, 31, 5);
    for (int l = 0; l < 2; l++) {
        Layer *y = &m.w->layer[l];
        const Tensor *all[] = { &y->attn_norm, &y->mlp_norm, &y->wq,     &y->wk,
                                &y->wv,        &y->wo,       &y->gate,   &y->up,
                                &y->down,      &m.w->embed,  &m.w->norm, &m.w->head };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            CHECK(tells_apart(m, (const char *)all[i]->data + tensor_bytes(all[i]) - 1), "layer %d, tensor %zu", l, i);
    }
    CHECK(tells_apart(m, &m.c->eps) && tells_apart(m, &m.w->inv_freq64[1]), "eps and the frequencies");
    char text[200];
    for (int i = 0; i < 200; i++) text[i] = (char)i;
    for (int bit = 0; bit < 8 * 199; bit++)
        for (int n = bit / 8 + 1; n < 200; n++) {
            uint64_t h = hash_bytes(1, text, (size_t)n);
            text[bit / 8] ^= 1 << bit % 8;
            CHECK(hash_bytes(1, text, (size_t)n) != h, "bit %d of %d bytes", bit, n);
            text[bit / 8] ^= 1 << bit % 8;
        }
}

// ---- a prefill that is given up

// The program's state for a chat with the shipped model, without a terminal.
static App *tiny_app(const char *method, const char *session) {
    char err[256];
    App *a = xcalloc(1, sizeof *a);
    a->o = options_of_program();
    const char *set[][2] = { { "model", "models/kvcomp-tiny" },
                             { "temp", "0" },
                             { "n-predict", "6" },
                             { "method", method },
                             { "session", session },
                             { "obs-window", "8" } };
    for (size_t i = 0; i < sizeof set / sizeof *set; i++)
        options_set(a->o, set[i][0], set[i][1], err);
    options_set(a->o, "budget", "24", err);
    open_model(a);
    open_tokenizer(a, 1);
    open_session(a);
    return a;
}

// Frees it.
static void tiny_app_close(App *a) {
    app_close(a);
    free(a);
}

// fsync as the program calls it, counted. sync_before: how often a file was at sync_path when it was called.
static int syncs, sync_before;
static const char *sync_path;

#ifdef __linux__
int fsync(int fd) {
    syncs++;
    sync_before += sync_path && !access(sync_path, F_OK);
    return (int)syscall(SYS_fsync, fd);
}

static int syncs_at_reply;                      // how many there were when the message began to be read; -1: it has not

// progress_hook
static void note_syncs(const char *what, double share) {
    (void)what;
    (void)share;
    if (syncs_at_reply < 0) syncs_at_reply = syncs;
}

TEST(save_synced, "a file is on the disk before it takes its name, and a message of a session before the reply "
                  "begins") {
    char err[512];
    Saving x;
    sync_path = tmp_path("synced");
    syncs = sync_before = 0;
    CHECK(!save_begin(&x, sync_path, err), "%s", err);
    fputs("text", x.f);
    CHECK(!save_keep(&x, err), "%s", err);
    CHECK(syncs == 2 && sync_before == 1, "%d times, %d of them behind the renaming", syncs, sync_before);
    sync_path = NULL;

    int was_quiet = quiet;
    FILE *out = fopen("/dev/null", "w");
    quiet = 1;
    const char *path = tmp_path("dialogue");
    struct stat begun, told;
    App *a = tiny_app("full", path);
    session_begin(a);
    CHECK(!stat(path, &begun), "%s", strerror(errno));
    syncs = 0;
    syncs_at_reply = -1;
    progress_hook = note_syncs;
    chat_turn(a, "hi", out);
    progress_hook = NULL;
    CHECK(syncs_at_reply == 1 && syncs == 2, "%d times before the reply, %d in all", syncs_at_reply, syncs);
    CHECK(!stat(path, &told) && told.st_ino == begun.st_ino && told.st_size > begun.st_size, "lines are not appended");
    tiny_app_close(a);
    fclose(out);
    quiet = was_quiet;
}
#endif

TEST(sample_least, "--top-p and --min-p: the fewest candidates that have the sum, and those not too far below "
                   "the best") {
    Cand c[4];                                          // .5 .25 .125 .125
    for (int i = 0; i < 4; i++) c[i] = (Cand){ (float)-log(i < 3 ? 2 << i : 8), i };
    CHECK(probable_candidates(c, 4, 1, 0) == 4 && probable_candidates(c, 4, .74, 0) == 2, "--top-p");
    CHECK(probable_candidates(c, 4, .76, 0) == 3 && probable_candidates(c, 4, 0, 0) == 1, "--top-p, the ends");
    CHECK(probable_candidates(c, 4, 1, .3) == 2 && probable_candidates(c, 4, 1, .2) == 4, "--min-p");
    CHECK(probable_candidates(c, 4, 1, 1.1) == 1, "the best stays");
}

static const char *long_message = "Here is a long story about a fox and a raven, a cheese, a tree, "
                                  "and a word that was said too early. What is it about?";

TEST(session_resume, "a dialogue that is saved and gone on with has the replies, logits, rows and bytes, to the "
                     "bit, of one that was never interrupted, under every method; a message that Ctrl-C takes "
                     "back in its prefill leaves nothing, in the dialogue and in the file") {
    FILE *out = fopen("/dev/null", "w");
    int was_quiet = quiet, exact = 0, n = 0;
    char d[64], path[100];
    CHECK(save_folder(d), "no folder");
    snprintf(path, sizeof path, "%s/s", d);
    quiet = 1;
    EACH_METHOD (m) {
        static const char *const said[] = { "hello, my name is Tom", "I have a dog named Bello.", "what is my name?",
                                           "how are you?" };
        App *whole = tiny_app((*m)->name, ""), *part = NULL;
        int same = 1;
        for (int i = 0; i < 4; i++) {       // the fourth message follows in the same chat
            struct stat held;
            if (i < 3) part = tiny_app((*m)->name, path);
            if (i < 3) session_begin(part);
            CHECK(arrlen(part->turn) == i && !stat(path, &held) && strlen(part->logged) == (size_t)held.st_size,
                  "%s: %d turns, %zu bytes", (*m)->name, (int)arrlen(part->turn), strlen(part->logged));
            if (i % 2) {
                int tokens = part->s->n_tok;
                progress_hook = ctrl_c_in_layers;
                chat_turn(part, long_message, out);
                progress_hook = NULL;
                CHECK(arrlen(part->turn) == i && (part->stale || part->s->n_tok == tokens) && !part->s->coming,
                      "%s: %d turns", (*m)->name, (int)arrlen(part->turn));
                exact += i == 3 && !part->stale;
            }
            chat_turn(whole, said[i], out);
            chat_turn(part, said[i], out);
            same &= !memcmp(whole->s->logits, part->s->logits, (size_t)part->c->V * sizeof(float));
            if (i < 2) session_end(part);
            if (i < 2) tiny_app_close(part);
        }
        same &= whole->s->n_tok == part->s->n_tok && kv_bytes(whole->s) == kv_bytes(part->s);
        same &= !heads_differ(whole->s, part->s);
        for (int i = 0; i < 4; i++) {
            const int *a = whole->turn[i].dec, *b = part->turn[i].dec;
            same &= arrlen(a) == arrlen(b) && !memcmp(a, b, arrlenu(a) * sizeof *a);
        }
        CHECK(same, "%s: %d and %d tokens", (*m)->name, whole->s->n_tok, part->s->n_tok);
        tiny_app_close(whole);
        tiny_app_close(part);
        unlink(path);
        n++;
    }
    CHECK(exact >= 2 && exact < n, "%d of %d methods are undone without a replay", exact, n);
    interrupts = 0;
    quiet = was_quiet;
    fclose(out);
    CHECK(!rmdir(d), "something is left");
}

static int attended, committed;         // calls of the method "stops", in which somebody presses Ctrl-C

static void stop_attend(Session *s, void *ms, int l, float *out, const float *q, int T) {
    (void)ms;
    attended++;
    interrupts = 1;
    attn_prefill(s, l, out, q, 0, T);
}

static void stop_commit(Session *s, void *ms, int l, const float *q, int T) {
    (void)s, (void)ms, (void)l, (void)q, (void)T;
    committed++;
}

TEST(stop_layer, "a prefill is given up within its first layer, commits nothing and leaves no room behind; a "
                 "pass whose caller did not ask for it runs to its end") {
    static const Method stops = { .name = "stops", .attend = stop_attend, .commit = stop_commit };
    const int *ids = seven_ids(500, 31);
    OWN_MODEL Tiny m = tiny_model(3, 4, 2, 8, 16, 24, 31, 5);
    App a = { .s = session_of(m, "full", "batch-size=16") };
    Session *s = a.s;
    jmp_buf stop;
    prefill(s, ids, 20);
    const size_t held = kv_bytes(s);
    const Method *full = s->part[0].m;
    s->part[0].m = &stops;
    s->unwanted = stop_asked;
    s->stop = &stop;
    attended = committed = interrupts = 0;
    if (!setjmp(stop)) {
        prefill(s, ids, 500);
        CHECK(0, "the prefill ran to its end");
    }
    CHECK(attended == 1 && !committed, "attend %d times, commit %d", attended, committed);
    s->stop = NULL;
    s->part[0].m = full;
    scratch_reset(s, 0);
    free(s->coming);
    s->coming = NULL;
    session_cut(&a, 20);
    CHECK(a.s->n_tok == 20 && kv_bytes(a.s) == held, "%d tokens in %zu bytes, %zu before", a.s->n_tok, kv_bytes(a.s),
          held);
    a.s->part[0].m = &stops;
    prefill(a.s, ids, 200);
    CHECK(committed == 4 && a.s->n_tok == 220, "three layers and the end commit: %d", committed);
    a.s->part[0].m = full;
    session_done(a.s);
    interrupts = 0;
}

TABLE(json_numbers, 3, "the numbers of --json have no exponent; what is none is null") {
    OWN char *out = WRITTEN(f, json_real(f, atof(part[0]), atoi(part[1])));
    CHECK(!strcmp(out, part[2]), "%s: %s, expected %s", part[0], out, part[2]);
}

TABLE(cpu_memory, 2, "what is planned for the CPU is at least what its passes and rows take, and at most four "
                     "times it") {
    char err[512];
    OWN_MODEL Tiny m = tiny_model(4, 4, 2, 32, 256, 512, 61, 31);
    OWN_OPTIONS Options *o = options_of(part[1]);
    Session *s = session_try(m.c, m.w, o, part[0], err);
    MemoryPlan p = memory_plan(s);
    prefill(s, seven_ids(599, 53), 599);
    decode(s, 1);
    size_t held = arena_bytes(s->scratch) + s->clk.peak, plan = p.kv + p.parts + p.pass_cpu;
    CHECK(held <= plan && plan <= 4 * held, "%s %s: %zu bytes held at most, %zu planned", part[0], part[1], held, plan);
    session_close(s);
}

// Wraps a text that comes in pieces of so many characters; malloc'd.
static char *wrapped(const char *s, int characters, int cols) {
    Wrap w = { .cols = cols };
    char *all = NULL;
    for (int last = 0; !last;) {
        char *piece = NULL;
        for (int i = 0; i < characters && *s; i++) {
            int n = utf8_length(s, strlen(s));
            bytes_put(&piece, s, (size_t)n);
            s += n;
        }
        last = !piece;
        wrap_text(&w, &piece, last);
        bytes_put(&all, piece, arrlenu(piece));
        arrfree(piece);
    }
    char *out = copy_bytes(all, arrlenu(all));
    arrfree(all);
    arrfree(w.word);
    return out;
}

TABLE(cli_wrap, 3, "on a terminal a reply breaks between words, whatever pieces it comes in, by the columns of "
                   "wide characters") {
    for (int characters = 1; characters < 100; characters += 98) {
        OWN char *out = wrapped(part[0], characters, atoi(part[1]));
        CHECK(!strcmp(out, part[2]), "%s, %d characters at a time:\n%s", part[0], characters, out);
    }
}

int main(int argc, char **argv) {
    // The program itself, whose n-th allocation fails; 0: says how many there are.
    if (argc > 2 && !strcmp(argv[1], "--main")) {
        allocation_fails = this_one_fails;
        allocation_to_fail = atol(argv[2]);
        int rc = kvcomp_main(argc - 2, argv + 2);
        if (!allocation_to_fail) fprintf(stderr, "allocations %ld\n", allocations);
        return rc;
    }
    return check_main(argc, argv);
}
