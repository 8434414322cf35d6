// lib/template.c - see template.h.
#define _GNU_SOURCE
#include "template.h"
#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>
#include <stb/stb_ds.h>

// ==================================================================================================== CHAT TEMPLATES
// A chat template says what a model expects around the turns of a dialogue: one text for each role,
// as in the table below. Templates arrive as programs in the Jinja language. kvcomp runs the part
// of the language that they need, on short dialogues of its own, reads the texts off what comes
// out, and checks that the texts give exactly what the program gives for longer dialogues. A
// program that cannot be run, or that no texts give, is refused, with the reason.
//
// A turn is rendered once and appended to the cache, and never rendered again. Some templates
// rewrite history when they render a whole dialogue: Qwen3 and DeepSeek-R1 drop old thoughts, the
// newer Mistral moves the system text to the last question, Llama 2 trims replies. A cache that
// only grows cannot follow, and the model sees what it really said.
//
// In the texts below {bos} and {eos} stand for those tokens, and the name of a special token stands
// for its id. In the words of the user and in the system text no name stands for an id, whatever
// they contain (unless parse_user, the option --parse-special).

// ---- The families
#define LLAMA3(label, lines, must) { \
    .name = label, .needs = "<|start_header_id|>", .open = "{bos}", \
    .sys = "<|start_header_id|>system<|end_header_id|>\n\n" lines, .sys_end = "<|eot_id|>", \
    .user = "<|start_header_id|>user<|end_header_id|>\n\n", .user_end = "<|eot_id|>", \
    .head = "<|start_header_id|>assistant<|end_header_id|>\n\n", \
    .end = "<|eot_id|>", .stops = "<|eom_id|> <|end_of_text|>", .always = must, .trim = TRIM_BOTH }

// The date is fixed, so that a dialogue has the same ids every day.
#define LLAMA31_LINES "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"

#define CHATML(label, on, off) { \
    .name = label, .needs = "<|im_start|>", \
    .sys = "<|im_start|>system\n", .sys_end = "<|im_end|>\n", \
    .user = "<|im_start|>user\n", .user_end = "<|im_end|>\n", \
    .head = "<|im_start|>assistant\n", .think = on, .no_think = off, \
    .end = "<|im_end|>", .foot = "\n", .stops = "<|endoftext|>" }

#define MISTRAL(label, opens, ends, blank) { \
    .name = label, .needs = "{eos}", .open = "{bos}", .sys_end = "\n\n", \
    .user = opens, .user_end = ends, .end = "{eos}", .foot = blank, .in_user = 1 }

#define MISTRAL_V7(label, blank) { \
    .name = label, .needs = "[SYSTEM_PROMPT]", .open = "{bos}", \
    .sys = "[SYSTEM_PROMPT]" blank, .sys_end = "[/SYSTEM_PROMPT]", \
    .user = "[INST]" blank, .user_end = "[/INST]", .end = "{eos}" }

static const TemplateText templates[] = {
    LLAMA3("llama3", "", 0),
    LLAMA3("llama3.1", LLAMA31_LINES, 1),
    LLAMA3("llama3.2", LLAMA31_LINES, 1),
    CHATML("chatml", NULL, NULL),
    CHATML("qwen3", NULL, "<think>\n\n</think>\n\n"),
    CHATML("qwen3-thinking", "<think>\n", "<think>\n\n</think>\n\n"),
    {
        .name = "yi", .needs = "<|im_start|>",
        .user = "<|im_start|>user\n", .user_end = "<|im_end|>\n",
        .head = "<|im_start|>assistant\n", .end = "<|im_end|>", .foot = "\n",
        .stops = "<|endoftext|>"
    },
    {
        .name = "phi3", .needs = "<|end|>",
        .sys = "<|system|>\n", .sys_end = "<|end|>\n",
        .user = "<|user|>\n", .user_end = "<|end|>\n",
        .head = "<|assistant|>\n", .end = "<|end|>", .foot = "\n", .stops = "<|endoftext|>"
    },
    {
        .name = "phi4", .needs = "<|im_sep|>",
        .sys = "<|im_start|>system<|im_sep|>", .sys_end = "<|im_end|>",
        .user = "<|im_start|>user<|im_sep|>", .user_end = "<|im_end|>",
        .head = "<|im_start|>assistant<|im_sep|>", .end = "<|im_end|>", .stops = "<|endoftext|>"
    },
    MISTRAL("mistral-v0.1", "[INST] ", " [/INST]", " "),
    MISTRAL("mistral-v1", "[INST] ", " [/INST]", NULL),
    MISTRAL("mistral-v1-spaced", " [INST] ", " [/INST]", NULL),
    MISTRAL("mistral-v3", "[INST] ", "[/INST]", NULL),
    MISTRAL("mistral-tekken", "[INST]", "[/INST]", NULL),
    MISTRAL_V7("mistral-v7", " "),
    MISTRAL_V7("mistral-v7-tekken", ""),
    {
        .name = "llama2", .needs = "{eos}",
        .sys = "<<SYS>>\n", .sys_end = "\n<</SYS>>\n\n",
        .user = "{bos}[INST] ", .user_end = " [/INST]",
        .end = "{eos}", .in_user = 1, .trim = TRIM_WHOLE
    },
    {
        .name = "tinyllama", .needs = "{eos}",
        .sys = "<|system|>\n", .sys_end = "{eos}\n",
        .user = "<|user|>\n", .user_end = "{eos}\n",
        .head = "<|assistant|>\n", .end = "{eos}", .foot = "\n"
    },
    {
        .name = "tulu", .needs = "{eos}",
        .sys = "<|system|>\n", .sys_end = "\n",
        .user = "<|user|>\n", .user_end = "\n",
        .head = "<|assistant|>\n", .end = "{eos}", .foot = "\n"
    },
    {
        .name = "vicuna", .needs = "{eos}", .open = "{bos}",
        .sys_end = " ",
        .user = "USER: ", .user_end = " ",
        .head = "ASSISTANT:", .end = "{eos}",
        .system = "A chat between a curious user and an artificial intelligence assistant. "
                  "The assistant gives helpful, detailed, and polite answers to the user's questions."
    },
    {
        .name = "deepseek-r1", .needs = "<｜User｜>", .open = "{bos}",
        .user = "<｜User｜>",
        .head = "<｜Assistant｜>", .think = "<think>\n", .no_think = "<think>\n\n</think>\n\n",
        .end = "{eos}", .stops = "<｜end▁of▁sentence｜>"
    },
    { .name = "none", .sys_end = "\n" },        // the last: a folder without a program has it
};
enum { N_TEMPLATES = sizeof templates / sizeof *templates };

void template_free(Template *tp) {
    if (!tp) return;
    for (int i = 0; i < (int)arrlen(tp->own); i++) free(tp->own[i]);
    arrfree(tp->own);
    free(tp->no_system);
    arrfree(tp->stop);
    free(tp);
}

// The id of the {bos}, the {eos} or the longest special token that stands at s, and the length of
// its name in *len. -1: none stands there, or the tokenizer has no such token.
static int token_at(const Tokenizer *t, const char *s, int *len) {
    *len = 5;
    if (!strncmp(s, "{bos}", 5)) return tokenizer_bos(t);
    if (!strncmp(s, "{eos}", 5)) return tokenizer_eos(t);
    return tokenizer_guarded_at(t, s, strlen(s), len);
}

// A copy of n bytes, NUL-terminated; the caller frees it.
static char *text_copy(const char *s, size_t n) {
    char *copy = xmalloc(n + 1);
    memcpy(copy, s, n);
    copy[n] = 0;
    return copy;
}

// Does the text begin with {bos} or the name of that token? NULL does not.
static int opens_with_bos(const Tokenizer *t, const char *text) {
    int len;
    if (!text) return 0;
    if (!strncmp(text, "{bos}", 5)) return 1;
    return tokenizer_bos(t) >= 0 && token_at(t, text, &len) == tokenizer_bos(t);
}

// ---- The language of the templates
// A chat template is a program in the Jinja language. What follows runs the part of the language
// that turns messages into text: {{ }}, if, for, set, the operators, and the functions, methods,
// filters and tests named below. Anything else is refused by name, with its line, when the program
// comes to it; a branch that is not taken is passed over, whatever it holds (mostly tools). Line
// breaks and indentation around tags go as transformers asks for: trim_blocks, lstrip_blocks.
//
// There is no syntax tree. The functions read and compute at once; with `live` 0 they only read. A
// loop goes back to its body.
enum { J_UNDEFINED, J_NONE, J_BOOL, J_INT, J_TEXT, J_LIST, J_DICT };
static const char *const jinja_kinds[] = {
    "something undefined", "none", "a bool", "a number", "a text", "a list", "a dict"
};
enum {                          // bounds, far above what a real program takes
    JINJA_DEPTH = 60,           // brackets and blocks inside one another
    JINJA_PROGRAM = 1 << 20,    // bytes of a program
    JINJA_STEPS = 1000000,      // values, operators and tags that are read
    JINJA_BYTES = 32 << 20      // of values and of output, of texts and blanks that are looked through
};
typedef struct {                // what has been taken so far of JINJA_STEPS and JINJA_BYTES
    long steps;
    size_t bytes;
} JinjaSpent;
enum { JINJA_ARGS = 16 };       // most arguments of a call, members of a list in the program

typedef struct JinjaValue {
    int kind;                   // J_*
    long i;                     // a bool or a number
    const char *s;              // a text, with a NUL behind it unless it is a part of another
    struct JinjaValue *item;    // (n) members of a list or a dict; several values may share them
    const char **key;           // (n) names of a dict's members
    size_t n;                   // bytes of the text, or members
} JinjaValue;
typedef struct {                // what stands between the brackets of a call
    const char *key[JINJA_ARGS];        // NULL: without a name
    JinjaValue v[JINJA_ARGS];
    int n;
} JinjaArgs;
typedef struct {
    const char *name;
    JinjaValue v;
} JinjaVariable;
typedef struct {
    const char *src, *p, *end;  // the program, the place that is read, the program's end
    int live;                   // 1: compute; 0: only read
    JinjaVariable *var;         // stb array; the variables of an inner scope stand behind, and hide
    int scope;                  // where the innermost scope begins in var
    const char *tag;            // the tag that ended the last block
    char *out;                  // stb array: the output
    void **own;                 // stb array: memory of texts and members
    JinjaSpent *spent;          // by this run and those before it that share the bounds
    int depth;
    int failed;                 // 1: err is set, and nothing is left to read
    char *err;                  // (512) the first reason, with its line
} Jinja;
// Stops the program: the line and the reason go to err. Returns an undefined value.
static JinjaValue jinja_fail(Jinja *j, const char *fmt, ...) {
    char why[256];
    int line = 1;
    va_list ap;
    if (j->failed) return (JinjaValue){ 0 };
    for (const char *s = j->src; s < j->p; s++) line += *s == '\n';
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    snprintf(j->err, 512, "line %d: %s", line, why);
    j->failed = 1;
    j->live = 0;
    j->p = j->end;
    return (JinjaValue){ 0 };
}

// Counts a step over n bytes. Too many of either stop the program.
static void jinja_spend(Jinja *j, size_t n) {
    JinjaSpent *x = j->spent;
    x->steps++;
    x->bytes = n < JINJA_BYTES ? x->bytes + n : JINJA_BYTES + 1;
    if (x->steps > JINJA_STEPS || x->bytes > JINJA_BYTES) jinja_fail(j, "the program takes too long");
}

// n bytes that last as long as the program runs.
static void *jinja_memory(Jinja *j, size_t n) {
    void *p = xcalloc(n, 1);
    arrput(j->own, p);
    jinja_spend(j, n);
    return p;
}

// ---- Values
static JinjaValue jinja_bool(int x) { return (JinjaValue){ .kind = J_BOOL, .i = x != 0 }; }
static JinjaValue jinja_int(long x) { return (JinjaValue){ .kind = J_INT, .i = x }; }

// The text a (n bytes) followed by the text b (m bytes).
static JinjaValue jinja_text(Jinja *j, const char *a, size_t n, const char *b, size_t m) {
    char *s = jinja_memory(j, n + m + 1);
    memcpy(s, a, n);
    memcpy(s + n, b, m);
    return (JinjaValue){ .kind = J_TEXT, .s = s, .n = n + m };
}

static JinjaValue jinja_string(Jinja *j, const char *s) { return jinja_text(j, s, strlen(s), "", 0); }

// A list or a dict with room for n members, and none in it yet.
static JinjaValue jinja_table(Jinja *j, int kind, size_t n) {
    return (JinjaValue){ .kind = kind, .item = jinja_memory(j, n * sizeof(JinjaValue)),
                         .key = kind == J_DICT ? jinja_memory(j, n * sizeof(char *)) : NULL };
}

// Appends a member; the table has room for it.
static void jinja_add(JinjaValue *table, const char *key, JinjaValue v) {
    if (table->key) table->key[table->n] = key;
    table->item[table->n++] = v;
}

static int jinja_truth(JinjaValue v) { return v.kind < J_TEXT ? v.i != 0 : v.n > 0; }

static int jinja_is(JinjaValue v, const char *text) {
    return v.kind == J_TEXT && v.n == strlen(text) && !memcmp(v.s, text, v.n);
}

// Two tables are equal when they are the same one: messages are only compared with themselves.
static int jinja_equal(Jinja *j, JinjaValue a, JinjaValue b) {
    int numbers = (a.kind == J_BOOL || a.kind == J_INT) && (b.kind == J_BOOL || b.kind == J_INT);
    if (numbers) return a.i == b.i;
    if (a.kind != b.kind) return 0;
    if (a.kind == J_TEXT && a.n == b.n) jinja_spend(j, a.n);
    if (a.kind == J_TEXT) return a.n == b.n && !memcmp(a.s, b.s, a.n);
    return a.item == b.item;
}

// The member of a dict; undefined when there is none.
static JinjaValue jinja_member(Jinja *j, JinjaValue v, JinjaValue key) {
    if (v.kind <= J_NONE) return jinja_fail(j, "a member of %s", jinja_kinds[v.kind]);
    for (size_t i = 0; v.kind == J_DICT && i < v.n; i++) {
        if (jinja_is(key, v.key[i])) return v.item[i];
    }
    return (JinjaValue){ 0 };
}

// Is a in b?
static int jinja_in(Jinja *j, JinjaValue a, JinjaValue b) {
    if (b.kind == J_TEXT) jinja_spend(j, b.n);
    if (b.kind == J_TEXT && a.kind == J_TEXT) return !a.n || memmem(b.s, b.n, a.s, a.n);
    if (b.kind != J_LIST && b.kind != J_DICT && b.kind != J_UNDEFINED)
        jinja_fail(j, "%s in %s", jinja_kinds[a.kind], jinja_kinds[b.kind]);
    jinja_spend(j, b.n);
    for (size_t i = 0; b.item && i < b.n; i++) {
        if (b.kind == J_DICT ? jinja_is(a, b.key[i]) : jinja_equal(j, a, b.item[i])) return 1;
    }
    return 0;
}

// A text without the characters of `chars` (NULL: white space) at its left end, its right end.
static JinjaValue jinja_strip(Jinja *j, JinjaValue v, const char *chars, int left, int right) {
    if (!chars) chars = " \t\n\r\v\f";
    jinja_spend(j, v.n * min_size(strlen(chars), JINJA_BYTES));     // each character is looked for among them
    if (j->failed) return v;
    while (left && v.n && memchr(chars, *v.s, strlen(chars))) {
        v.s++;
        v.n--;
    }
    while (right && v.n && memchr(chars, v.s[v.n - 1], strlen(chars))) v.n--;
    return v;
}

// The text that {{ v }} writes and that ~ joins.
static JinjaValue jinja_written(Jinja *j, JinjaValue v) {
    char number[32];
    if (v.kind == J_TEXT) return v;
    if (v.kind == J_UNDEFINED) return jinja_string(j, "");
    if (v.kind == J_NONE) return jinja_string(j, "None");
    if (v.kind == J_BOOL) return jinja_string(j, v.i ? "True" : "False");
    if (v.kind != J_INT) return jinja_fail(j, "writes %s", jinja_kinds[v.kind]);
    snprintf(number, sizeof number, "%ld", v.i);
    return jinja_string(j, number);
}

// ---- Reading
static int jinja_name_byte(int c) { return isalnum(c) || c == '_'; }

// Passes over white space. Every byte of it counts: it may be read again and again.
static void jinja_blanks(Jinja *j) {
    const char *from = j->p;
    while (isspace((unsigned char)*j->p)) j->p++;
    j->spent->bytes += (size_t)(j->p - from);
}

// Does this operator or bracket stand here? Then it is read. A sign that belongs to the end of a
// tag, as in -%}, is no operator.
static int jinja_op(Jinja *j, const char *op) {
    size_t n = strlen(op);
    jinja_blanks(j);
    if (strncmp(j->p, op, n)) return 0;
    if (strchr("+-", *op) && (j->p[1] == '%' || j->p[1] == '}') && j->p[2] == '}') return 0;
    if (*op == '%' && j->p[1] == '}') return 0;
    if (!strcmp(op, "=") && j->p[1] == '=') return 0;
    j->p += n;
    return 1;
}

// The same for a word.
static int jinja_word(Jinja *j, const char *word) {
    size_t n = strlen(word);
    jinja_blanks(j);
    if (strncmp(j->p, word, n) || jinja_name_byte((unsigned char)j->p[n])) return 0;
    j->p += n;
    return 1;
}

static void jinja_want(Jinja *j, const char *op) {
    if (!jinja_op(j, op)) jinja_fail(j, "expected '%s', found '%.12s'", op, j->p);
}

// Reads a name; "" when none stands here.
static const char *jinja_name(Jinja *j) {
    jinja_blanks(j);
    const char *from = j->p;
    if (isdigit((unsigned char)*from)) return "";
    while (jinja_name_byte((unsigned char)*j->p)) j->p++;
    return jinja_text(j, from, (size_t)(j->p - from), "", 0).s;
}

// Reads the end of a tag, %} or }} or #}, and the white space behind it that goes: all of it behind
// a '-', otherwise one line break, but not behind }}.
static void jinja_close(Jinja *j, const char *end) {
    jinja_blanks(j);
    int all = *j->p == '-', none = *j->p == '+';
    j->p += all || none;
    if (strncmp(j->p, end, 2)) {
        jinja_fail(j, "expected '%s', found '%.12s'", end, j->p);
        return;
    }
    j->p += 2;
    if (all) jinja_blanks(j);
    else if (*end != '}' && !none && *j->p == '\n') j->p++;
}

// Passes over what is left of a tag. A text in quotes may hold anything.
static void jinja_skip(Jinja *j, const char *end) {
    const char *from = j->p;
    while (*j->p && strncmp(j->p, end, 2) && (*j->p != '-' || strncmp(j->p + 1, end, 2))) {
        char quote = *j->p++;
        if (*end == '#' || (quote != '\'' && quote != '"')) continue;
        while (*j->p && *j->p != quote) j->p += 1 + (*j->p == '\\' && j->p[1]);
        if (*j->p) j->p++;
    }
    jinja_spend(j, (size_t)(j->p - from));
    jinja_close(j, end);
}

// Reads the text in quotes that stands here.
static JinjaValue jinja_quoted(Jinja *j) {
    static const char code[] = "ntr\\'\"", means[] = "\n\t\r\\'\"";
    char quote = *j->p++;
    size_t n = 0, room = 0;
    while (j->p[room] && j->p[room] != quote) room += 1 + (j->p[room] == '\\' && j->p[room + 1]);
    char *s = jinja_memory(j, room + 1);
    for (; *j->p && *j->p != quote; j->p++) {
        s[n] = *j->p;
        if (*j->p == '\\') {
            const char *at = *++j->p ? strchr(code, *j->p) : NULL;
            if (!at) return jinja_fail(j, "the escape \\%.1s", j->p);
            s[n] = means[at - code];
        }
        n++;
    }
    if (!*j->p) return jinja_fail(j, "a text without its closing quote");
    j->p++;
    return (JinjaValue){ .kind = J_TEXT, .s = s, .n = n };
}

// ---- Expressions
static JinjaValue jinja_expression(Jinja *j);

// Reads the arguments of a call up to ')', or the members of a list up to ']'. What opened it is
// read.
static JinjaArgs jinja_args(Jinja *j, const char *end) {
    JinjaArgs a = { 0 };
    while (!j->failed && !jinja_op(j, end)) {
        if (a.n == JINJA_ARGS) jinja_fail(j, "more than %d values in brackets", JINJA_ARGS);
        if (j->failed) break;
        const char *from = j->p, *key = jinja_name(j);
        int named = *key && jinja_op(j, "=");
        if (!named && !j->failed) j->p = from;
        a.key[a.n] = named ? key : NULL;
        a.v[a.n++] = jinja_expression(j);
        if (!jinja_op(j, ",") && *j->p != *end) jinja_want(j, end);
    }
    return a;
}

// The text of argument k, or NULL.
static const char *jinja_arg(Jinja *j, const JinjaArgs *a, int k) {
    return k < a->n && a->v[k].kind == J_TEXT ? jinja_text(j, a->v[k].s, a->v[k].n, "", 0).s : NULL;
}

// The functions. The date is fixed, so that a dialogue has the same ids every day: it is the one
// that the programs of Llama 3.1 hold.
static JinjaValue jinja_call(Jinja *j, const char *name, const JinjaArgs *a) {
    struct tm day = { .tm_year = 124, .tm_mon = 6, .tm_mday = 26, .tm_wday = 5, .tm_yday = 207 };
    const char *x = jinja_arg(j, a, 0);
    char date[128] = "";
    if (x && !strcmp(name, "raise_exception")) return jinja_fail(j, "the program refuses: %.200s", x);
    if (x && !strcmp(name, "strftime_now")) {
        strftime(date, sizeof date, x, &day);
        return jinja_string(j, date);
    }
    if (strcmp(name, "namespace")) return jinja_fail(j, "the function %.40s", name);
    JinjaValue v = jinja_table(j, J_DICT, JINJA_ARGS);
    v.i = 1;                                                // the only dict that {% set %} changes
    for (int i = 0; i < a->n; i++) jinja_add(&v, a->key[i] ? a->key[i] : "", a->v[i]);
    return v;
}

// The parts of a text between the texts `by`, which is not empty.
static JinjaValue jinja_split(Jinja *j, JinjaValue v, const char *by) {
    JinjaValue list = jinja_table(j, J_LIST, v.n / strlen(by) + 1);
    const char *end = v.s + v.n, *at;
    if (j->failed) return list;
    while ((at = memmem(v.s, (size_t)(end - v.s), by, strlen(by))) != NULL) {
        jinja_add(&list, NULL, (JinjaValue){ .kind = J_TEXT, .s = v.s, .n = (size_t)(at - v.s) });
        v.s = at + strlen(by);
    }
    jinja_add(&list, NULL, (JinjaValue){ .kind = J_TEXT, .s = v.s, .n = (size_t)(end - v.s) });
    return list;
}

// selectattr(key, "equalto", value): the members of a list whose member `key` has the value.
static JinjaValue jinja_select(Jinja *j, JinjaValue v, const JinjaArgs *a) {
    JinjaValue list = jinja_table(j, J_LIST, v.n);
    if (a->n != 3 || !jinja_is(a->v[1], "equalto")) return jinja_fail(j, "selectattr without equalto");
    for (size_t i = 0; i < v.n; i++) {
        if (jinja_equal(j, jinja_member(j, v.item[i], a->v[0]), a->v[2])) jinja_add(&list, NULL, v.item[i]);
    }
    return list;
}

// The methods v.name(a) and the filters v | name(a)
static JinjaValue jinja_apply(Jinja *j, JinjaValue v, const char *name, const JinjaArgs *a) {
    const char *x = jinja_arg(j, a, 0);
    size_t n = x ? strlen(x) : 0;
    int text = v.kind == J_TEXT, list = v.kind == J_LIST;
    int length = !strcmp(name, "length") || !strcmp(name, "count");
    if (text) jinja_spend(j, v.n);
    if (!strcmp(name, "default") && a->n == 1) return v.kind ? v : a->v[0];
    if (text && (!strcmp(name, "trim") || !strcmp(name, "strip"))) return jinja_strip(j, v, x, 1, 1);
    if (text && !strcmp(name, "lstrip")) return jinja_strip(j, v, x, 1, 0);
    if (text && !strcmp(name, "rstrip")) return jinja_strip(j, v, x, 0, 1);
    if (text && !strcmp(name, "string")) return v;
    if (text && x && !strcmp(name, "startswith")) return jinja_bool(v.n >= n && !memcmp(v.s, x, n));
    if (text && x && !strcmp(name, "endswith")) return jinja_bool(v.n >= n && !memcmp(v.s + v.n - n, x, n));
    if (text && n && a->n == 1 && !strcmp(name, "split")) return jinja_split(j, v, x);
    if (text && length) {
        long chars = 0;
        for (size_t i = 0; i < v.n; i++) chars += (v.s[i] & 0xc0) != 0x80;
        return jinja_int(chars);
    }
    if (v.kind >= J_LIST && length) return jinja_int((long)v.n);
    if (list && !strcmp(name, "list")) return v;
    if (list && !strcmp(name, "first")) return v.n ? v.item[0] : (JinjaValue){ 0 };
    if (list && !strcmp(name, "last")) return v.n ? v.item[v.n - 1] : (JinjaValue){ 0 };
    if (list && !strcmp(name, "selectattr")) return jinja_select(j, v, a);
    if (v.kind == J_DICT && a->n && !strcmp(name, "get")) {
        JinjaValue found = jinja_member(j, v, a->v[0]), none = { .kind = J_NONE };
        if (found.kind) return found;
        return a->n > 1 ? a->v[1] : none;
    }
    return jinja_fail(j, "%.40s of %s", name, jinja_kinds[v.kind]);
}

// v is name
static int jinja_test(Jinja *j, JinjaValue v, const char *name) {
    enum { TEXT = 1 << J_TEXT, LIST = 1 << J_LIST, DICT = 1 << J_DICT, UNDEFINED = 1 << J_UNDEFINED };
    static const struct { const char *name; int kinds; } tests[] = {
        { "defined", ~UNDEFINED }, { "undefined", UNDEFINED }, { "none", 1 << J_NONE },
        { "string", TEXT }, { "mapping", DICT }, { "iterable", TEXT | LIST | DICT | UNDEFINED },
        { "sequence", TEXT | LIST | DICT | UNDEFINED }, { "boolean", 1 << J_BOOL }
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (!strcmp(name, tests[i].name)) return tests[i].kinds >> v.kind & 1;
    }
    if (!strcmp(name, "true")) return v.kind == J_BOOL && v.i;
    if (!strcmp(name, "false")) return v.kind == J_BOOL && !v.i;
    jinja_fail(j, "the test %.40s", name);
    return 0;
}

// Reads what stands behind '[' and gives v[k], v[from:to] or v[::-1].
static JinjaValue jinja_index(Jinja *j, JinjaValue v) {
    JinjaValue from = { 0 }, to = { 0 };
    int slice = jinja_op(j, ":"), backwards = slice && jinja_op(j, ":-1");
    if (!slice) {
        from = jinja_expression(j);
        slice = jinja_op(j, ":");
    }
    int closed = jinja_op(j, "]");
    if (slice && !closed && !backwards) to = jinja_expression(j);
    if (!closed) jinja_want(j, "]");
    if (!j->live) return v;
    if (!slice && from.kind != J_INT) return jinja_member(j, v, from);
    if (v.kind != J_LIST) return jinja_fail(j, "a part of %s", jinja_kinds[v.kind]);
    if ((from.kind && from.kind != J_INT) || (to.kind && to.kind != J_INT))
        return jinja_fail(j, "a part of a list from %s to %s", jinja_kinds[from.kind], jinja_kinds[to.kind]);

    long n = (long)v.n, a = from.i, b = to.kind ? to.i : n;
    if (a < 0) a += n;
    if (b < 0) b += n;
    if (!slice) return a >= 0 && a < n ? v.item[a] : (JinjaValue){ 0 };
    JinjaValue list = jinja_table(j, J_LIST, v.n);
    for (long i = a < 0 ? 0 : a; i < b && i < n; i++) jinja_add(&list, NULL, v.item[backwards ? n - 1 - i : i]);
    return list;
}

// The number whose first digit stands here
static JinjaValue jinja_number(Jinja *j) {
    const char *from = j->p;
    long x = strtol(j->p, (char **)&j->p, 10);
    jinja_spend(j, (size_t)(j->p - from));
    return jinja_int(x);
}

// A literal, a variable, a call of a function, a list or brackets
static JinjaValue jinja_primary(Jinja *j) {
    jinja_blanks(j);
    jinja_spend(j, 0);
    if (*j->p == '\'' || *j->p == '"') return jinja_quoted(j);
    if (isdigit((unsigned char)*j->p)) return jinja_number(j);
    if (jinja_op(j, "(")) {
        JinjaValue v = jinja_expression(j);
        jinja_want(j, ")");
        return v;
    }
    if (jinja_op(j, "[")) {
        JinjaArgs a = jinja_args(j, "]");
        JinjaValue list = jinja_table(j, J_LIST, JINJA_ARGS);
        for (int i = 0; i < a.n; i++) jinja_add(&list, NULL, a.v[i]);
        return list;
    }

    const char *name = jinja_name(j);
    if (!*name) return jinja_fail(j, "expected a value, found '%.12s'", j->p);
    if (!strcasecmp(name, "true")) return jinja_bool(1);
    if (!strcasecmp(name, "false")) return jinja_bool(0);
    if (!strcasecmp(name, "none")) return (JinjaValue){ .kind = J_NONE };
    if (jinja_op(j, "(")) {
        JinjaArgs a = jinja_args(j, ")");
        return j->live ? jinja_call(j, name, &a) : (JinjaValue){ 0 };
    }
    if (j->live) jinja_spend(j, arrlenu(j->var));
    for (int i = (int)arrlen(j->var) - 1; j->live && i >= 0; i--) {
        if (!strcmp(j->var[i].name, name)) return j->var[i].v;
    }
    return (JinjaValue){ 0 };
}

// A value and what hangs on it: members, methods, filters, tests
static JinjaValue jinja_postfix(Jinja *j) {
    JinjaValue v = jinja_primary(j);
    while (!j->failed) {
        int dot = jinja_op(j, "."), filter = !dot && jinja_op(j, "|");
        if (dot || filter) {
            const char *name = jinja_name(j);
            int call = *j->p == '(' && jinja_op(j, "(");
            JinjaArgs a = { 0 };
            if (call) a = jinja_args(j, ")");
            if (!j->live) continue;
            v = call || filter ? jinja_apply(j, v, name, &a) : jinja_member(j, v, jinja_string(j, name));
        } else if (jinja_op(j, "[")) {
            v = jinja_index(j, v);
            jinja_spend(j, 0);
        } else if (jinja_word(j, "is")) {
            int no = jinja_word(j, "not");
            const char *name = jinja_name(j);
            if (j->live) v = jinja_bool(jinja_test(j, v, name) != no);
        } else break;
    }
    return v;
}

// The operators between two values, by how tightly they bind; `not` before a value binds as JINJA_NOT.
enum { JINJA_OR = 1, JINJA_AND, JINJA_NOT, JINJA_COMPARISON, JINJA_SUM, JINJA_JOIN, JINJA_PRODUCT };
static const struct { const char *name; int level; } jinja_operators[] = {
    { "or", JINJA_OR }, { "and", JINJA_AND },
    { "not in", JINJA_COMPARISON }, { "in", JINJA_COMPARISON }, { "==", JINJA_COMPARISON },
    { "!=", JINJA_COMPARISON }, { "<=", JINJA_COMPARISON }, { ">=", JINJA_COMPARISON }, { "<", JINJA_COMPARISON },
    { ">", JINJA_COMPARISON },
    { "+", JINJA_SUM }, { "-", JINJA_SUM }, { "~", JINJA_JOIN }, { "%", JINJA_PRODUCT },
    { NULL, 0 }
};

// a op b
static JinjaValue jinja_compute(Jinja *j, JinjaValue a, const char *op, JinjaValue b) {
    if (!strcmp(op, "==")) return jinja_bool(jinja_equal(j, a, b));
    if (!strcmp(op, "!=")) return jinja_bool(!jinja_equal(j, a, b));
    if (!strcmp(op, "in")) return jinja_bool(jinja_in(j, a, b));
    if (!strcmp(op, "not in")) return jinja_bool(!jinja_in(j, a, b));
    if (*op == '~') {
        a = jinja_written(j, a);
        b = jinja_written(j, b);
    }
    if (strchr("+~", *op) && a.kind == J_TEXT && b.kind == J_TEXT) return jinja_text(j, a.s, a.n, b.s, b.n);

    int bounded = labs(a.i) <= 1000000 && labs(b.i) <= 1000000;
    if (a.kind != J_INT || b.kind != J_INT || !bounded)
        return jinja_fail(j, "%s %s %s", jinja_kinds[a.kind], op, jinja_kinds[b.kind]);
    if (!strcmp(op, "<=")) return jinja_bool(a.i <= b.i);
    if (!strcmp(op, ">=")) return jinja_bool(a.i >= b.i);
    if (*op == '<') return jinja_bool(a.i < b.i);
    if (*op == '>') return jinja_bool(a.i > b.i);
    if (*op == '+') return jinja_int(a.i + b.i);
    if (*op == '-') return jinja_int(a.i - b.i);
    if (a.i < 0 || b.i <= 0) return jinja_fail(j, "%ld %s %ld", a.i, op, b.i);
    return jinja_int(a.i % b.i);
}

// An expression of the operators that bind at `level` or tighter. The right side of `and` and `or`
// is only read when the left side decides.
static JinjaValue jinja_binary(Jinja *j, int level) {
    JinjaValue v;
    int nots = 0;
    for (; level <= JINJA_NOT && jinja_word(j, "not"); nots++) jinja_spend(j, 0);
    if (nots) v = jinja_bool(jinja_truth(jinja_binary(j, JINJA_COMPARISON)) != nots % 2);
    else if (jinja_op(j, "-")) v = jinja_int(-jinja_postfix(j).i);
    else v = jinja_postfix(j);
    for (int compared = 0; !j->failed;) {
        int k = 0, live = j->live;
        for (; jinja_operators[k].name; k++) {
            const char *name = jinja_operators[k].name;
            if (jinja_operators[k].level < level) continue;
            if (isalpha((unsigned char)*name) ? jinja_word(j, name) : jinja_op(j, name)) break;
        }
        int at = jinja_operators[k].level;
        if (!at) break;
        jinja_spend(j, 0);
        if (at == JINJA_COMPARISON && compared++) jinja_fail(j, "a chain of comparisons");
        if (at == JINJA_OR) j->live = live && !jinja_truth(v);
        if (at == JINJA_AND) j->live = live && jinja_truth(v);
        JinjaValue w = jinja_binary(j, at + 1);
        if (j->live) v = at <= JINJA_AND ? w : jinja_compute(j, v, jinja_operators[k].name, w);
        j->live = live && !j->failed;
    }
    return v;
}

// a, or `a if c else b`. What stands first is only read until it is known whether it counts.
static JinjaValue jinja_expression(Jinja *j) {
    const char *from = j->p;
    int live = j->live;
    if (++j->depth > JINJA_DEPTH) return jinja_fail(j, "more than %d brackets and blocks", JINJA_DEPTH);
    j->live = 0;
    JinjaValue v = jinja_binary(j, JINJA_OR);
    int condition = jinja_word(j, "if"), yes = 1;
    j->live = live && !j->failed;
    if (condition) yes = jinja_truth(jinja_binary(j, JINJA_OR));
    const char *behind = j->p;
    if (!yes) v = (JinjaValue){ 0 };
    if (j->live && yes) {
        j->p = from;
        v = jinja_binary(j, JINJA_OR);
        if (condition && !j->failed) j->p = behind;
    }
    if (condition && jinja_word(j, "else")) {
        j->live = live && !yes && !j->failed;
        JinjaValue w = jinja_expression(j);
        if (j->live) v = w;
        j->live = live && !j->failed;
    }
    j->depth--;
    return v;
}

// ---- Tags
static void jinja_block(Jinja *j, int live, const char *const *stops);
static const char *const endif[] = { "endif", "elif", "else", NULL };
static const char *const endfor[] = { "endfor", "else", NULL };
static const char *const endprogram[] = { NULL };

// Gives a variable of the innermost scope a value.
static void jinja_set_variable(Jinja *j, const char *name, JinjaValue v) {
    jinja_spend(j, arrlenu(j->var) - (size_t)j->scope);
    for (int i = j->scope; i < (int)arrlen(j->var); i++) {
        if (strcmp(j->var[i].name, name)) continue;
        j->var[i].v = v;
        return;
    }
    arrput(j->var, ((JinjaVariable){ name, v }));
}

// {% if %} .. {% elif %} .. {% else %} .. {% endif %}
static void jinja_if(Jinja *j) {
    int done = 0, yes;
    do {
        if (done) {
            jinja_skip(j, "%}");
            yes = 0;
        } else {
            yes = !strcmp(j->tag, "else") || jinja_truth(jinja_expression(j));
            jinja_close(j, "%}");
        }
        jinja_block(j, yes, endif);
        done |= yes;
    } while (!j->failed && strcmp(j->tag, "endif"));
    jinja_close(j, "%}");
}

// {% for a in list %} .. {% else %} .. {% endfor %}
static void jinja_for(Jinja *j) {
    const char *name = jinja_name(j);
    if (!jinja_word(j, "in")) jinja_fail(j, "expected 'in', found '%.12s'", j->p);
    JinjaValue list = jinja_binary(j, JINJA_OR);
    if (list.kind != J_LIST && list.kind != J_UNDEFINED) jinja_fail(j, "a loop over %s", jinja_kinds[list.kind]);
    jinja_close(j, "%}");

    const char *body = j->p;
    int n = (int)list.n, scope = j->scope, top = (int)arrlen(j->var);
    if (!n) jinja_block(j, 0, endfor);
    for (int i = 0; i < n && !j->failed; i++) {
        JinjaValue loop = jinja_table(j, J_DICT, 8);
        jinja_add(&loop, "index", jinja_int(i + 1));
        jinja_add(&loop, "index0", jinja_int(i));
        jinja_add(&loop, "first", jinja_bool(!i));
        jinja_add(&loop, "last", jinja_bool(i == n - 1));
        jinja_add(&loop, "length", jinja_int(n));
        jinja_add(&loop, "previtem", i ? list.item[i - 1] : (JinjaValue){ 0 });
        jinja_add(&loop, "nextitem", i < n - 1 ? list.item[i + 1] : (JinjaValue){ 0 });
        j->p = j->failed ? j->end : body;
        j->scope = top;
        jinja_set_variable(j, name, list.item[i]);
        jinja_set_variable(j, "loop", loop);
        jinja_block(j, 1, endfor);
        arrsetlen(j->var, top);
        j->scope = scope;
    }
    if (!strcmp(j->tag, "else")) {
        jinja_close(j, "%}");
        jinja_block(j, !n, endfor);
    }
    jinja_close(j, "%}");
}

// {% set a = value %}, {% set space.a = value %}
static void jinja_set(Jinja *j) {
    const char *name = jinja_name(j), *member = jinja_op(j, ".") ? jinja_name(j) : NULL;
    JinjaValue *space = NULL;
    size_t at = 0;
    jinja_want(j, "=");
    JinjaValue v = jinja_expression(j);
    jinja_close(j, "%}");
    if (!member) {
        jinja_set_variable(j, name, v);
        return;
    }
    jinja_spend(j, arrlenu(j->var));
    for (int i = 0; i < (int)arrlen(j->var); i++) {
        if (!strcmp(j->var[i].name, name)) space = &j->var[i].v;
    }
    if (!space || space->kind != J_DICT || !space->i) {
        jinja_fail(j, "%.40s is no namespace", name);
        return;
    }
    while (at < space->n && strcmp(space->key[at], member)) at++;
    if (at < space->n) space->item[at] = v;
    else if (at < JINJA_ARGS) jinja_add(space, member, v);
    else jinja_fail(j, "more than %d members of %.40s", JINJA_ARGS, name);
}

// Does the tag whose name is read open a block? Every tag whose name begins with "end" closes one.
static int jinja_opens(const Jinja *j, const char *name) {
    static const char *const opens[] = { "if", "for", "macro", "call", "filter", "generation" };
    for (size_t i = 0; i < sizeof opens / sizeof *opens; i++) {
        if (!strcmp(name, opens[i])) return 1;
    }
    const char *sign = strpbrk(j->p, "=%");
    return !strcmp(name, "set") && sign && *sign == '%';    // {% set a %} text {% endset %}
}

// Writes the text up to the next tag. White space before the tag goes: all of it before a '-', and
// the indentation of a line that begins with {% or {#.
static void jinja_plain(Jinja *j, int live) {
    const char *from = j->p, *tag = from;
    while (*tag && (tag[0] != '{' || !tag[1] || !strchr("{%#", tag[1]))) tag++;
    jinja_spend(j, (size_t)(tag - from));
    const char *to = tag;
    if (*tag && tag[2] == '-') {
        while (to > from && isspace((unsigned char)to[-1])) to--;
    } else if (*tag && tag[1] != '{' && tag[2] != '+') {
        while (to > from && (to[-1] == ' ' || to[-1] == '\t')) to--;
        if (to > j->src && to[-1] != '\n') to = tag;
    }
    if (live) bytes_put(&j->out, from, (size_t)(to - from));
    if (arrlenu(j->out) > JINJA_BYTES) jinja_fail(j, "the program writes too much");
    if (!j->failed) j->p = tag;
}

// Runs the program (live) or passes over it up to a tag that is one of `stops`, and leaves its name
// in j->tag. What stands behind the name is not read.
static void jinja_block(Jinja *j, int live, const char *const *stops) {
    int inside = 0;             // blocks that are open, when this one is passed over
    if (++j->depth > JINJA_DEPTH) jinja_fail(j, "more than %d brackets and blocks", JINJA_DEPTH);
    j->tag = "";
    while (!j->failed) {
        jinja_plain(j, live);
        if (!*j->p) {
            if (*stops) jinja_fail(j, "the program ends before %s", *stops);
            break;
        }
        char kind = j->p[1];
        j->p += 2 + (j->p[2] == '-' || j->p[2] == '+');
        if (kind == '#' || (kind == '{' && !live)) {
            jinja_skip(j, kind == '#' ? "#}" : "}}");
            continue;
        }
        if (kind == '{') {
            JinjaValue v = jinja_written(j, jinja_expression(j));
            jinja_close(j, "}}");
            jinja_spend(j, v.n);
            if (!j->failed) bytes_put(&j->out, v.s, v.n);
            continue;
        }

        const char *name = jinja_name(j), *const *stop = stops;
        while (!inside && *stop && strcmp(*stop, name)) stop++;
        if (!inside && *stop) {
            j->tag = *stop;
            break;
        }
        if (!strcmp(name, "raw")) jinja_fail(j, "the tag raw");
        else if (!live) {
            inside += jinja_opens(j, name) - !strncmp(name, "end", 3);
            jinja_skip(j, "%}");
        } else if (!strcmp(name, "if")) jinja_if(j);
        else if (!strcmp(name, "for")) jinja_for(j);
        else if (!strcmp(name, "set")) jinja_set(j);
        else if (!strcmp(name, "generation") || !strcmp(name, "endgeneration")) jinja_close(j, "%}");
        else if (!strcmp(name, "macro")) {                  // calling it is refused
            static const char *const endmacro[] = { "endmacro", NULL };
            jinja_skip(j, "%}");
            jinja_block(j, 0, endmacro);
            jinja_close(j, "%}");
        } else jinja_fail(j, "the tag %.40s", name);
    }
    j->depth--;
}

// What a program writes for n messages, malloc'd; NULL and the reason in err when it refuses them,
// or needs what is not part of the above. prompt: with what opens a reply. think 0: with
// enable_thinking set to false, as Qwen3 has it. spent: what runs before this one have taken of the
// bounds. The texts {bos} and {eos} stand for those tokens.
static char *jinja_render(const char *program, const Tokenizer *t, const Message *m, int n, int prompt,
                          int think, JinjaSpent *spent, char err[512]) {
    char *src = text_copy(program, strlen(program)), *text = NULL;
    size_t bytes = 0;
    for (const char *s = program; *s; s++) {                // Jinja knows one kind of line break ...
        if (*s == '\r' && s[1] == '\n') s++;
        src[bytes++] = *s == '\r' ? '\n' : *s;
    }
    bytes -= bytes && src[bytes - 1] == '\n';               // ... and drops the last one
    src[bytes] = 0;

    Jinja j = { .src = src, .p = src, .end = src + bytes, .live = 1, .tag = "", .spent = spent, .err = err };
    JinjaValue messages = jinja_table(&j, J_LIST, (size_t)n), none = { .kind = J_NONE };
    for (int i = 0; i < n; i++) {
        JinjaValue message = jinja_table(&j, J_DICT, 2);
        jinja_add(&message, "role", jinja_string(&j, m[i].role));
        jinja_add(&message, "content", jinja_string(&j, m[i].words));
        jinja_add(&messages, NULL, message);
    }
    jinja_set_variable(&j, "messages", messages);
    jinja_set_variable(&j, "tools", none);
    jinja_set_variable(&j, "documents", none);
    jinja_set_variable(&j, "add_generation_prompt", jinja_bool(prompt));
    if (tokenizer_bos(t) >= 0) jinja_set_variable(&j, "bos_token", jinja_string(&j, "{bos}"));
    if (tokenizer_eos(t) >= 0) jinja_set_variable(&j, "eos_token", jinja_string(&j, "{eos}"));
    if (!think) jinja_set_variable(&j, "enable_thinking", jinja_bool(0));
    jinja_set_variable(&j, "strftime_now", jinja_bool(1));  // defined: programs ask before they call
    jinja_block(&j, 1, endprogram);
    if (!j.failed) text = text_copy(j.out ? j.out : "", arrlenu(j.out));

    for (int i = 0; i < (int)arrlen(j.own); i++) free(j.own[i]);
    arrfree(j.own);
    arrfree(j.var);
    arrfree(j.out);
    free(src);
    return text;
}

// ---- From a program to texts
// The texts of a program are read off what it writes for short dialogues, and then held against
// what it writes for longer ones, with and without a system message, with and without blanks around
// the words. A program that no texts give exactly is refused: what it does to a dialogue is then not
// known, and a cache that only grows may not be able to follow it.
enum { WITH_SYSTEM = 1, WORD_BLANKS = 2, REPLY_BLANKS = 4, NO_PROMPT = 8, NO_THOUGHT = 16 };     // see probe
enum { PROBE_BYTES = 32768, BETWEEN_BYTES = 512 };     // most that a probe, and a change of turns, may take
typedef struct {
    int what, n;                // see probe
    const char *text;
} Written;
typedef struct {
    const char *program;
    const Tokenizer *t;
    Written *probe;               // stb array: what the program has written so far
    JinjaSpent spent;           // by all probes together, and by comparing what they wrote
    char **own;                 // stb array: texts to free, those of the template among them
    char err[512];
} Derivation;
#define PROBE_SYSTEM "kvcomp-system"
#define PROBE_USER   "kvcomp-user-1"
#define PROBE_REPLY  "kvcomp-reply-1"

static const char *keep_text(Derivation *d, char *s) {
    arrput(d->own, s);
    return s;
}

// A copy of n bytes of s that lives as long as the derivation.
static const char *part(Derivation *d, const char *s, size_t n) { return keep_text(d, text_copy(s, n)); }

// The messages of a dialogue of n messages, in m[n + 1] when there is a system message as well.
// Returns how many they are.
static int probe_messages(Derivation *d, int what, int n, Message *m) {
    int count = 0;
    char words[64];
    const char *system = what & WORD_BLANKS ? " \n" PROBE_SYSTEM " \n" : PROBE_SYSTEM;
    if (what & WITH_SYSTEM) m[count++] = (Message){ "system", system };
    for (int i = 0; i < n; i++) {
        int blanks = what & (i % 2 ? REPLY_BLANKS : WORD_BLANKS);
        const char *blank = blanks ? " \n" : "";
        snprintf(words, sizeof words, "%skvcomp-%s-%d%s", blank, i % 2 ? "reply" : "user", i / 2 + 1, blank);
        m[count++] = (Message){ i % 2 ? "assistant" : "user", part(d, words, strlen(words)) };
    }
    return count;
}

// What the program writes for a dialogue of n messages, with what opens a reply unless NO_PROMPT. NULL
// and d->err when it refuses.
static const char *probe(Derivation *d, int what, int n) {
    Message m[8];
    for (int i = 0; i < (int)arrlen(d->probe); i++) {
        if (d->probe[i].what == what && d->probe[i].n == n) return d->probe[i].text;
    }
    int count = probe_messages(d, what, n, m);
    char *text = jinja_render(d->program, d->t, m, count, !(what & NO_PROMPT), !(what & NO_THOUGHT), &d->spent, d->err);
    if (!text) return NULL;
    arrput(d->probe, ((Written){ what, n, keep_text(d, text) }));
    if (strlen(text) <= PROBE_BYTES) return text;
    fault(d->err, "it writes %zu bytes for a few words, at most %d are read", strlen(text), PROBE_BYTES);
    d->probe[arrlen(d->probe) - 1].text = NULL;
    return NULL;
}

// What a text has between a (NULL: its start) and b (NULL: its end). NULL and d->err when one of
// them is not there once.
static const char *between(Derivation *d, const char *text, const char *a, const char *b) {
    const char *names[] = { a, b }, *at[] = { text, text + strlen(text) };
    for (int k = 0; k < 2; k++) {
        if (!names[k]) continue;
        at[k] = strstr(text, names[k]);
        int times = at[k] ? 1 + (strstr(at[k] + 1, names[k]) != NULL) : 0;
        if (times != 1) {
            fault(d->err, "it writes the words of a message %s", times ? "twice" : "nowhere");
            return NULL;
        }
        if (!k) at[0] += strlen(a);
    }
    if (at[0] > at[1]) fault(d->err, "it writes the messages in another order");
    return at[0] > at[1] ? NULL : part(d, at[0], (size_t)(at[1] - at[0]));
}

// The bytes with which both texts begin; a token counts as a whole.
static size_t same_start(const Tokenizer *t, const char *a, const char *b) {
    size_t i = 0;
    int n, m;
    while (a[i] && b[i]) {
        int x = token_at(t, a + i, &n), y = token_at(t, b + i, &m);
        if (x != y || (x < 0 && a[i] != b[i]) || (x >= 0 && (n != m || strncmp(a + i, b + i, (size_t)n)))) break;
        i += x < 0 ? 1 : (size_t)n;
    }
    return i;
}

static int has_end(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

static void compose_text(char **out, const char *s) {
    if (s) bytes_put(out, s, strlen(s));
}

// Appends words without the white space that the template drops at their ends.
static void compose_words(char **out, const char *s, int left, int right) {
    size_t n = strlen(s), blank, len = n;
    int at;
    while (left && len && is_space(s, len, &at)) {
        s += at;
        len -= (size_t)at;
    }
    while (right && (blank = space_before(s, 0, len)) > 0) len -= blank;
    bytes_put(out, s, len);
}

// What the texts x give for n messages; the first may be a system message. It stands in the first
// turn, or (late) in the last: the newer Mistral rewrites the dialogue so, which a cache cannot. An
// stb array with a NUL at its end, which the caller frees.
static char *compose(const TemplateText *x, const Message *m, int n, int late) {
    char *out = NULL;
    int has_system = n && !strcmp(m->role, "system");
    const char *system = has_system ? m->words : x->system;
    for (int i = has_system; i < n; i += 2) {
        int first = i == has_system, whole = x->trim & TRIM_WHOLE, both = x->trim & TRIM_USER;
        int here = system && (late ? i == n - 1 : first);
        const char *open = system || !x->alone ? x->open : x->alone;
        compose_text(&out, first ? open : x->end);
        if (!first) compose_text(&out, x->foot);
        if (x->in_user) compose_text(&out, x->user);
        if (here && (*system || x->always)) {
            compose_text(&out, x->sys);
            compose_words(&out, system, x->trim & TRIM_SYSTEM, x->trim & (TRIM_SYSTEM | TRIM_SYSTEM_END));
            compose_text(&out, x->sys_end);
        }
        if (!x->in_user) compose_text(&out, x->user);
        compose_words(&out, m[i].words, both || (whole && !(here && *system)), both || whole);
        compose_text(&out, x->user_end);
        compose_text(&out, x->head);
        if (i + 1 == n) {
            compose_text(&out, x->think);
            break;
        }
        compose_text(&out, x->before);
        compose_words(&out, m[i + 1].words, x->trim & TRIM_REPLY, x->trim & TRIM_REPLY);
        compose_text(&out, x->after);
    }
    arrput(out, 0);
    return out;
}

// Counts what a comparison takes. 0, or -1 and d->err when it is too much, as in jinja_spend.
static int derive_spend(Derivation *d, size_t steps, size_t bytes) {
    d->spent.steps += (long)steps;
    d->spent.bytes += bytes;
    if (d->spent.steps <= JINJA_STEPS && d->spent.bytes <= JINJA_BYTES) return 0;
    return fault(d->err, "the program takes too long");
}

// Do the texts x give what the program writes for a dialogue of n messages? 0: they do not, and
// d->err names what differs.
static int reproduces(Derivation *d, const TemplateText *x, int what, int n) {
    Message m[8];
    const char *want = probe(d, what, n);
    if (!want) return 0;
    if (derive_spend(d, 0, strlen(want))) return 0;
    int count = probe_messages(d, what, n, m);
    char *got = compose(x, m, count, 0), *late = compose(x, m, count, 1);
    int same = !strcmp(want, got) || !strcmp(want, late);
    size_t at = 0;
    while (want[at] && want[at] == got[at]) at++;
    at -= min_size(at, 12);
    if (!same) fault(d->err, "for %s%d messages it writes '..%.60s' where one text for each role gives '..%.60s'",
                     what & WITH_SYSTEM ? "a system text and " : "", n, want + at, got + at);
    arrfree(got);
    arrfree(late);
    return same;
}

// What opens a reply, in x: user_end, head, think, no_think, and the blanks `before` a reply in the
// history. first, off: what follows a question, with thoughts and without. shown: the same in the
// history. asked: the same without what opens a reply. end: what ends a message. 0, or -1 and d->err.
static int derive_reply(Derivation *d, TemplateText *x, const char *first, const char *off,
                        const char *shown, const char *asked, const char *end) {
    size_t n = strlen(shown), g = strlen(first);
    x->think = x->before = "";
    if (!strncmp(first, shown, n)) x->think = part(d, first + n, g - n);
    else if (!strncmp(shown, first, g)) x->before = part(d, shown + g, n - g);
    else return fault(d->err, "it opens a reply with '%.60s', but in the history with '%.60s'", first, shown);
    int blank = strspn(x->before, " \t\n") == strlen(x->before);
    if (!blank && strncmp(x->before, "<think>", 7))
        return fault(d->err, "in the history a reply begins with '%.60s', which nothing asks for", x->before);

    // Where the question ends and the reply opens
    n = strlen(first) - strlen(x->think);
    size_t k = same_start(d->t, asked, first);
    if (k >= n && *end && !strncmp(first, end, strlen(end)) && strlen(end) < n) k = strlen(end);
    if (k > n) k = n;
    x->user_end = part(d, first, k);
    x->head = k < n ? part(d, first + k, n - k) : NULL;

    // A program that opens a thought, and does not know enable_thinking, gets an empty thought.
    x->no_think = x->think;
    if (strlen(off) >= n && strncmp(off, first, n) == 0) x->no_think = part(d, off + n, strlen(off) - n);
    int deaf = !strcmp(x->no_think, x->think);
    if (deaf && !strncmp(x->think, "<think>", 7)) x->no_think = "<think>\n\n</think>\n\n";
    return 0;
}

// The ways in which a system message stands in the first turn
enum {
    PLACE_OWN,                        // a message of its own, or none
    PLACE_INSIDE,                     // behind `user`, or none
    PLACE_OWN_DEFAULT,                // as PLACE_OWN, with a default text
    PLACE_INSIDE_DEFAULT,
    PLACE_OTHER_DEFAULT,              // without a system text something else stands there
    PLACES
};

// Fills in what stands around the system text, when it stands in this way. start: what comes before
// the first question without a system text; before, behind: what surrounds a system text (NULL:
// there is none). x->user is known. Returns 1 when the parts fit together.
static int derive_system(Derivation *d, TemplateText *x, int place, const char *start, const char *before,
                         const char *behind) {
    size_t n_start = strlen(start), n_user = strlen(x->user), n_open = n_start - n_user;
    int inside = place == PLACE_INSIDE || place == PLACE_INSIDE_DEFAULT, len;
    x->system = x->alone = NULL;
    x->in_user = inside;
    x->always = 0;
    if (place != PLACE_INSIDE_DEFAULT && !has_end(start, x->user)) return 0;
    if (!before && place != PLACE_OWN) return 0;
    if (!before) {
        x->open = part(d, start, n_open);
        return 1;
    }

    // What opens the dialogue: all of `start` but `user`; BOS where a system text is always there
    if (place > PLACE_INSIDE) n_open = !strncmp(before, "{bos}", 5) ? 5 : 0;
    if (place == PLACE_INSIDE_DEFAULT && !strncmp(before, x->user, n_user)) n_open = 0;
    if (strncmp(before, start, n_open)) return 0;
    x->open = part(d, start, n_open);
    const char *sys = before + n_open, *sys_end = behind;
    if (inside) {
        if (strncmp(sys, x->user, n_user)) return 0;
        sys += n_user;
    } else {
        if (!has_end(behind, x->user)) return 0;
        sys_end = part(d, behind, strlen(behind) - n_user);
    }
    x->sys = part(d, sys, strlen(sys));
    x->sys_end = sys_end;
    if (place == PLACE_OTHER_DEFAULT) x->alone = part(d, start, n_start - n_user);
    if (place != PLACE_OWN_DEFAULT && place != PLACE_INSIDE_DEFAULT) return 1;

    // The default text is what `start` has between them. It is plain text.
    size_t a = strlen(before), b = strlen(behind);
    if (n_start < a + b || strncmp(start, before, a) || !has_end(start, behind)) return 0;
    if (derive_spend(d, n_start - a - b, 0)) return 0;
    x->system = part(d, start + a, n_start - a - b);
    x->always = !*x->system;
    for (const char *s = x->system; *s; s++) {
        if (token_at(d->t, s, &len) >= 0) return 0;
    }
    return 1;
}

// Which white space goes, as TRIM_* bits; -1 and d->err when no rule that is known gives it.
static int derive_trim(Derivation *d, TemplateText *x, int system) {
    static const int rules[] = { 0, TRIM_BOTH, TRIM_USER, TRIM_SYSTEM, TRIM_SYSTEM_END, TRIM_WHOLE };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        x->trim = rules[i];
        int good = reproduces(d, x, WORD_BLANKS, 1) && reproduces(d, x, WORD_BLANKS, 3);
        if (!good || (system && !reproduces(d, x, WITH_SYSTEM | WORD_BLANKS, 1))) continue;
        x->trim |= TRIM_REPLY;
        if (!reproduces(d, x, REPLY_BLANKS, 3)) x->trim &= ~TRIM_REPLY;
        return 0;
    }
    return -1;
}

// Finds x->foot, x->user and what stands around the system text. E: what the history has between a
// reply and the next question; its bytes from `end` to `rest` end the reply. `user` is the longest
// end of E with which everything is reproduced.
static int derive_turns(Derivation *d, TemplateText *x, const char *E, size_t end, size_t rest,
                        const char *start, const char *before, const char *behind) {
    int len;
    if (strlen(E) > BETWEEN_BYTES)
        return fault(d->err, "it writes %zu bytes between two turns, at most %d are read", strlen(E), BETWEEN_BYTES);
    for (; rest <= strlen(E); rest += token_at(d->t, E + rest, &len) >= 0 ? (size_t)len : 1) {
        if (derive_spend(d, PLACES, 0)) return -1;
        x->foot = part(d, E + end, rest - end);
        x->user = part(d, E + rest, strlen(E) - rest);
        for (int place = 0; place < PLACES; place++) {
            if (!derive_system(d, x, place, start, before, behind)) continue;
            if (!reproduces(d, x, 0, 1) || !reproduces(d, x, 0, 3)) continue;
            if (!before || reproduces(d, x, WITH_SYSTEM, 1)) return 0;
        }
    }
    if (derive_spend(d, 0, 0)) return -1;
    return fault(d->err, "what it writes around the words does not fall into one text for each role");
}

// Reads the texts of d->program into tp->x, and checks them. 0, or -1 and d->err.
static int derive(Derivation *d, Template *tp) {
    TemplateText *x = &tp->x;
    int len;

    // What the program writes: a question; the same without thoughts; the same without the opening
    // of a reply; a finished reply; a reply and the next question
    const char *text[5] = { probe(d, 0, 1) };
    if (text[0]) text[1] = probe(d, NO_THOUGHT, 1);
    if (text[1]) text[2] = probe(d, NO_PROMPT, 1);
    if (text[2]) text[3] = probe(d, NO_PROMPT, 2);
    if (text[3]) text[4] = probe(d, 0, 3);
    if (!text[4]) return -1;
    const char *start = between(d, text[0], NULL, PROBE_USER);
    const char *first = between(d, text[0], PROBE_USER, NULL), *off = between(d, text[1], PROBE_USER, NULL);
    const char *asked = between(d, text[2], PROBE_USER, NULL), *done = between(d, text[3], PROBE_REPLY, NULL);
    const char *shown = between(d, text[4], PROBE_USER, PROBE_REPLY);
    const char *next = between(d, text[4], PROBE_REPLY, "kvcomp-user-2");
    if (!start || !first || !off || !asked || !done || !shown || !next) return -1;

    // The end of a reply: blanks, the token that the model makes, and what follows whatever comes
    size_t rest = same_start(d->t, done, next), blank = strspn(next, " \t\n");
    int ends = token_at(d->t, next + blank, &len) >= 0 && blank + (size_t)len <= rest;
    size_t end = ends ? blank + (size_t)len : 0;
    x->after = part(d, next, ends ? blank : 0);
    x->end = ends ? part(d, next + blank, (size_t)len) : NULL;
    if (derive_reply(d, x, first, off, shown, asked, part(d, next, rest))) return -1;

    // The system message. A program that refuses or drops one is used without.
    const char *with = probe(d, WITH_SYSTEM, 1), *before = NULL, *behind = NULL;
    if (with) before = between(d, with, NULL, PROBE_SYSTEM);
    if (before) behind = between(d, with, PROBE_SYSTEM, PROBE_USER);
    if (!behind) tp->no_system = text_copy(d->err, strlen(d->err));
    if (derive_turns(d, x, next, end, rest, start, behind ? before : NULL, behind)) return -1;
    if (derive_trim(d, x, behind != NULL)) return -1;

    // The check
    for (int what = 0; what < 4; what++) {
        for (int n = 1; n < 6; n += 2) {
            if (what & WITH_SYSTEM && !behind) continue;
            if (!reproduces(d, x, what, n)) return -1;
        }
    }
    return 0;
}

// Are two texts the same, when the name of a token and {bos} or {eos} may stand for one another?
// NULL is an empty text; a, b: the first text is followed by another one.
static int same_text(const Tokenizer *t, const char *a1, const char *a2, const char *b1, const char *b2) {
    char *a = NULL, *b = NULL;
    int n = 1, m = 1, same = 1;
    compose_text(&a, a1);
    compose_text(&a, a2);
    compose_text(&b, b1);
    compose_text(&b, b2);
    arrput(a, 0);
    arrput(b, 0);
    for (const char *p = a, *q = b; same && (*p || *q); p += n, q += m) {
        int x = token_at(t, p, &n), y = token_at(t, q, &m);
        same = x == y && (x >= 0 || *p == *q);
        if (x < 0) n = m = 1;
    }
    arrfree(a);
    arrfree(b);
    return same;
}

// The family whose texts a template has, or NULL. Around a system text only where the program writes
// one. think: the thoughts must be the same as well.
static const TemplateText *template_family(const Template *tp, const Tokenizer *t, int think) {
    const TemplateText *x = &tp->x;
    for (int k = 0; k < N_TEMPLATES; k++) {
        const TemplateText *f = &templates[k];
        int same = same_text(t, f->open, NULL, x->open, NULL) && same_text(t, f->user, NULL, x->user, NULL)
                && same_text(t, f->end, f->foot, x->end, x->foot)
                && same_text(t, f->user_end, f->head, x->user_end, x->head);
        if (same && !tp->no_system)
            same = f->in_user == x->in_user && same_text(t, f->sys, NULL, x->sys, NULL)
                && same_text(t, f->sys_end, NULL, x->sys_end, NULL);
        if (same && think) same = same_text(t, f->think, f->no_think, x->think, x->no_think);
        if (same && f->needs) return f;
    }
    return NULL;
}

// Gives the texts of a program the name of their family, and its further stop tokens. A program of
// no family has those of the first family whose replies end with the same token.
static void template_recognise(Template *tp, const Tokenizer *t) {
    TemplateText *x = &tp->x;
    const TemplateText *f = template_family(tp, t, 1);
    if (!f) {
        f = template_family(tp, t, 0);
        if (f && !*x->no_think) x->no_think = f->no_think;  // R1's first program opens no thought
    }
    x->name = f ? f->name : "custom";
    if (f) {
        x->needs = f->needs;
        x->user_end = f->user_end;
        x->head = f->head;
        x->end = f->end;
        x->foot = f->foot;
    }
    for (int k = 0; !f && x->end && k < N_TEMPLATES; k++) {
        if (same_text(t, templates[k].end, NULL, x->end, NULL)) f = &templates[k];
    }
    x->stops = f ? f->stops : NULL;
}

// ---- The program of a model
// The family of a name, or NULL.
static const TemplateText *template_named(const char *name) {
    for (int k = 0; k < N_TEMPLATES; k++) {
        if (!strcmp(templates[k].name, name)) return &templates[k];
    }
    return NULL;
}

// The program in a parsed tokenizer_config.json: its chat_template is a text, or a list of {name,
// template} of which "default" counts. Returns a copy, "" when there is none, NULL and err when the
// member is neither.
static char *config_program(const Json *config, const char *file, char err[512]) {
    const Json *c = json_get(config, "chat_template");
    if (json_none(c)) return text_copy("", 0);
    if (c->type == JSON_ARRAY) {
        const Json *list = c;
        c = NULL;
        for (int i = 0; i < list->n; i++) {
            const Json *item = &list->item[i];
            if (!strcmp(json_text(item, "name"), "default")) c = json_get(item, "template");
        }
        if (!c) fault(err, "%s: chat_template is a list without a \"default\"", file);
    }
    if (!c) return NULL;
    if (c->type != JSON_STRING) fault(err, "%s: chat_template is neither a text nor a list", file);
    else if (strlen(c->str) != c->len) fault(err, "%s: chat_template has a NUL byte", file);
    else return text_copy(c->str, c->len);
    return NULL;
}

// The program in a file; NULL and err when it cannot be read or is no text.
static char *program_file(const char *file, char err[512]) {
    char why[256];
    size_t n;
    char *program = read_plain_text(file, &n, why);
    if (!program) fault(err, "%s", why);
    return program;
}

// The program of a folder: chat_template.jinja, else that of tokenizer_config.json. Returns a copy,
// "" when there is none, NULL and err when a file is broken.
static char *template_program(const char *dir, char err[512]) {
    char file[1200], why[256];
    size_t n;
    snprintf(file, sizeof file, "%.1100s/chat_template.jinja", dir);
    if (file_exists(file)) {
        return program_file(file, err);
    }

    snprintf(file, sizeof file, "%.1100s/tokenizer_config.json", dir);
    if (!file_exists(file)) return text_copy("", 0);
    char *text = read_file(file, &n, why);
    Json *j = text ? json_parse(text, n, why) : NULL;
    free(text);
    if (!j) {
        fault(err, "%s: %s", file, why);
        return NULL;
    }
    char *program = config_program(j, file, err);
    json_free(j);
    return program;
}

// ---- Fitting a family to a model
// The id of the token that stands at s; -1 and err when the tokenizer does not have it. show: how
// many bytes of s the message shows.
static int template_token(const Template *tp, const Tokenizer *t, const char *s, int show,
                          char err[512]) {
    int len, id = token_at(t, s, &len);
    if (id < 0)
        fault(err, "chat template %s needs the token %.*s, which this tokenizer does not have",
              tp->x.name, show, s);
    return id;
}

// Checks that the tokenizer has the tokens that the template needs, and fills tp->stop. Returns 0,
// or -1 with the reason in err.
static int template_fit(Template *tp, const Tokenizer *t, char err[512]) {
    const TemplateText *x = &tp->x;
    if (opens_with_bos(t, x->open) && template_token(tp, t, x->open, 5, err) < 0) return -1;
    if (opens_with_bos(t, x->user) && template_token(tp, t, x->user, 5, err) < 0) return -1;
    if (x->needs && template_token(tp, t, x->needs, 100, err) < 0) return -1;
    if (x->end) {
        int id = template_token(tp, t, x->end, 100, err);
        if (id < 0) return -1;
        arrput(tp->stop, id);
    }

    // The further stop tokens, as far as the tokenizer has them.
    const char *s = x->stops ? x->stops : "";
    while (*s) {
        size_t n = strcspn(s, " ");
        int id = text_id(t, s, n);
        if (id >= 0 && id != tp->stop[0]) arrput(tp->stop, id);
        s += n;
        s += strspn(s, " ");
    }
    return 0;
}

// The template of a family. NULL and err when the tokenizer lacks a token.
static Template *template_make(const TemplateText *x, const Tokenizer *t, char err[512]) {
    Template *tp = xcalloc(1, sizeof *tp);
    tp->x = *x;
    if (!template_fit(tp, t, err)) return tp;
    template_free(tp);
    return NULL;
}

// The template that a program writes. NULL and err when it is refused.
static Template *template_derive(const char *program, const Tokenizer *t, char err[512]) {
    Template *tp = xcalloc(1, sizeof *tp);
    Derivation d = { .program = program, .t = t };
    size_t n = strlen(program);
    int bad = n > JINJA_PROGRAM ? fault(d.err, "it has %zu bytes, at most %d are read", n, JINJA_PROGRAM) : 0;
    if (!bad) bad = derive(&d, tp);
    if (bad) fault(err, "this chat template is not supported: %.300s", d.err);
    tp->own = d.own;
    arrfree(d.probe);
    if (!bad) template_recognise(tp, t);
    if (!bad && !template_fit(tp, t, err)) return tp;
    template_free(tp);
    return NULL;
}

// The template of a model whose folder is dir. name: a family, or the path of a Jinja program;
// NULL: what the folder says, and "none" when it says nothing. NULL when it is refused: err has the
// reason, and the names that --chat-template takes.
Template *template_load(const char *dir, const char *name, const Tokenizer *t,
                               char err[512]) {
    const TemplateText *x = name ? template_named(name) : NULL;
    char *program = NULL;
    Template *tp = NULL;
    if (!x) program = name ? program_file(name, err) : template_program(dir, err);
    if (program && !*program) x = template_named("none");
    if (x) tp = template_make(x, t, err);
    else if (program) tp = template_derive(program, t, err);
    free(program);
    if (tp) return tp;

    size_t used = strlen(err);
    used = min_size(used, 225);
    used += (size_t)snprintf(err + used, 512 - used, " (--chat-template takes a file or");
    for (int k = 0; k < N_TEMPLATES && used < 512; k++) {
        used += (size_t)snprintf(err + used, 512 - used, " %s", templates[k].name);
    }
    if (used < 512) snprintf(err + used, 512 - used, "; or use --raw)");
    return NULL;
}

// ---- Rendering a turn
// Plain text collects until a token cuts it off. So the user's words and the template's own text,
// where they touch, are encoded together, as they are when a whole dialogue is encoded.
typedef struct {                // a place in the turn
    int at;                     // ids of the turn that stand before it
    int *upto;                  // stb array: ids of `plain` up to the place, while that is inside
} RenderMark;
typedef struct {
    const Template *tp;
    const Tokenizer *t;
    char *plain;                // stb array: text that is not encoded yet
    int *ids;                   // stb array: what comes out
    int from;                   // where this turn begins in ids
    int at_start;               // 1: everything begins with the plain text
    int special;                // 1: the plain text may name special tokens
    RenderMark mark[2];
} Render;

// Encodes the plain text. A mark inside it goes behind the ids with which both encodings begin,
// that of the text up to the mark and that of the whole text.
static void render_flush(Render *r) {
    if (!arrlen(r->plain)) return;
    int before = (int)arrlen(r->ids);
    r->ids = encode_at(r->t, r->plain, arrlenu(r->plain), r->special, r->at_start, r->ids);

    int added = (int)arrlen(r->ids) - before;
    for (int k = 0; k < 2; k++) {
        int *upto = r->mark[k].upto, same = 0;
        int n = min_int((int)arrlen(upto), added);
        while (same < n && upto[same] == r->ids[before + same]) same++;
        r->mark[k].at += same;
        if (upto) arrsetlen(upto, 0);
    }
    arrsetlen(r->plain, 0);
    r->at_start = 0;
    r->special = 0;
}

// Appends a text of the template; NULL is nothing.
static void render_text(Render *r, const char *s) {
    int len;
    for (; s && *s; s += len) {
        int id = token_at(r->t, s, &len);
        if (id >= 0) {
            render_flush(r);
            arrput(r->ids, id);
            r->at_start = 0;
        } else {
            arrput(r->plain, *s);
            len = 1;
        }
    }
}

// Appends a text of a person. trim_left, trim_right: 1 where the white space at that end goes.
static void render_words(Render *r, const char *s, int trim_left, int trim_right) {
    size_t n = strlen(s);
    int len;
    while (trim_left && n && is_space(s, n, &len)) {
        s += len;
        n -= (size_t)len;
    }
    while (trim_right) {
        size_t blank = space_before(s, 0, n);
        if (!blank) break;
        n -= blank;
    }
    if (r->tp->parse_user) r->special = 1;
    bytes_put(&r->plain, s, n);
}

// Sets mark k here.
static void render_mark(Render *r, int k) {
    RenderMark *m = &r->mark[k];
    m->at = (int)arrlen(r->ids) - r->from;
    if (m->upto) arrsetlen(m->upto, 0);
    if (!arrlen(r->plain)) return;
    m->upto = encode_at(r->t, r->plain, arrlenu(r->plain), r->special, r->at_start, m->upto);
}

// Renders the system message, if the first turn has one. Returns 1 when it has.
static int render_system(Render *r, const char *system) {
    const TemplateText *x = &r->tp->x;
    int left = x->trim & TRIM_SYSTEM, right = x->trim & (TRIM_SYSTEM | TRIM_SYSTEM_END);
    if (!*system && !x->always) return 0;
    render_text(r, x->sys);
    render_words(r, system, left, right);
    render_text(r, x->sys_end);
    return 1;
}

enum {                          // the marks of a turn
    MARK_BODY,                       // behind the system message, or behind what closes the reply before
    MARK_HEAD                        // before what opens the reply
};

// What stands before the words of the first turn. system NULL: the template's default. Returns 1
// when there is a system message. What opens the turn itself is written only where the system text
// stands behind it.
static int render_start(Render *r, const char *system) {
    const TemplateText *x = &r->tp->x;
    const char *open = system || !x->alone ? x->open : x->alone;
    if (!system) system = x->system ? x->system : "";
    if (tokenizer_adds_bos(r->t) && !opens_with_bos(r->t, open) && !opens_with_bos(r->t, x->user))
        arrput(r->ids, tokenizer_bos(r->t));
    render_text(r, open);
    if (x->in_user) render_text(r, x->user);
    int has_system = render_system(r, system);
    render_mark(r, MARK_BODY);
    return has_system;
}

// The words of a turn and what opens the reply: head, or without a head what ends the words.
// TRIM_WHOLE trims the words at the left only where no system text stands before them.
static void render_question(Render *r, const char *user, int has_system) {
    const TemplateText *x = &r->tp->x;
    int whole = (x->trim & TRIM_WHOLE) != 0, both = (x->trim & TRIM_USER) != 0;
    render_words(r, user, both || (whole && !has_system), both || whole);
    if (!x->head) render_mark(r, MARK_HEAD);
    render_text(r, x->user_end);
    if (x->head) render_mark(r, MARK_HEAD);
    render_text(r, x->head);
}

// Appends the ids of one turn to the stb array ids and returns it.
//
// first: the dialogue begins, so BOS and the system message come before the words (system NULL: the
// template's default; "": none). In a later turn what closes the reply before comes first;
// reply_closed says that the reply's last token, `end`, is in the cache already. think, for models
// that can: 1 leaves thinking to the template, 0 turns it off.
//
// *n_sys, *n_foot: ids at the start that are BOS and system message, or close the reply before.
// *n_head: ids at the end that open the next reply.
int *template_turn(const Template *tp, const Tokenizer *t, int first, const char *system,
                          const char *user, int think, int reply_closed, int *ids,
                          int *n_sys, int *n_foot, int *n_head) {
    const TemplateText *x = &tp->x;
    Render r = { .tp = tp, .t = t, .ids = ids, .from = (int)arrlen(ids), .at_start = first };
    int has_system = 0;
    if (first) {
        has_system = render_start(&r, system);
    } else {
        if (!reply_closed) render_text(&r, x->end);
        render_text(&r, x->foot);
        render_mark(&r, MARK_BODY);
    }
    if (!first || !x->in_user) render_text(&r, x->user);
    render_question(&r, user, has_system);
    render_text(&r, think ? x->think : x->no_think);
    render_flush(&r);

    *n_sys = first ? r.mark[MARK_BODY].at : 0;
    *n_foot = first ? 0 : r.mark[MARK_BODY].at;
    *n_head = (int)arrlen(r.ids) - r.from - r.mark[MARK_HEAD].at;
    arrfree(r.plain);
    arrfree(r.mark[MARK_BODY].upto);
    arrfree(r.mark[MARK_HEAD].upto);
    return r.ids;
}

// Appends the ids of a dialogue that is given as a whole, for --dialogue, and returns them: what the
// program writes for it, as far as that does not rewrite history. The messages are user and
// assistant in turn, behind a system message or none, and a user has the last word.
int *template_dialogue(const Template *tp, const Tokenizer *t, const Message *m, int n,
                              int think, int *ids) {
    const TemplateText *x = &tp->x;
    Render r = { .tp = tp, .t = t, .ids = ids, .from = (int)arrlen(ids), .at_start = 1 };
    int from = n && !strcmp(m->role, "system"), trim = (x->trim & TRIM_REPLY) != 0;
    int has_system = render_start(&r, from ? m->words : NULL);
    for (int i = from; i < n; i += 2) {
        if (i > from) {
            render_text(&r, x->before);
            render_words(&r, m[i - 1].words, trim, trim);
            render_text(&r, x->after);
            render_text(&r, x->end);
            render_text(&r, x->foot);
        }
        if (i > from || !x->in_user) render_text(&r, x->user);
        render_question(&r, m[i].words, has_system && i == from);
    }
    render_text(&r, think ? x->think : x->no_think);
    render_flush(&r);
    arrfree(r.plain);
    arrfree(r.mark[MARK_BODY].upto);
    arrfree(r.mark[MARK_HEAD].upto);
    return r.ids;
}

// ---- Does the tokenizer belong to the model?
// The first id without a row in the embedding that the template writes around a first turn or a
// later one, or -1 when all have rows.
static int template_stray_id(const Template *tp, const Tokenizer *t, const Config *c) {
    int stray = -1, n_sys, n_foot, n_head;
    for (int way = 0; way < 8 && stray < 0; way++) {
        int first = way & 1, think = way >> 1 & 1, reply_closed = way >> 2;
        int *ids = template_turn(tp, t, first, "a", "a", think, reply_closed, NULL, &n_sys, &n_foot, &n_head);
        int n = (int)arrlen(ids), known = ids_with_rows(c, ids, n);
        if (known < n) stray = ids[known];
        arrfree(ids);
    }
    return stray;
}

// Has the embedding a row for every id that any dialogue needs: those of the BPE vocabulary, the
// tokens with a role, and what the template (NULL: none) writes? Returns 0, or -1 with the reason in
// err.
//
// Other added tokens may lie behind the last row. Published checkpoints have a <pad> there, or
// tokens kept for later, and their model never sees them. Such a token is refused only in a text
// that names it.
int tokenizer_fits(const Tokenizer *t, const Template *tp, const Config *c, char err[512]) {
    int vocab = tokenizer_size(t) - 1;
    while (vocab >= c->V && (tokenizer_flags(t, vocab) & (TOKEN_MODEL | TOKEN_ADDED)) != TOKEN_MODEL) vocab--;
    const struct { const char *what; int id; } needed[] = {
        { "the tokenizer's vocabulary goes up to", vocab },
        { "the tokenizer's BOS is", tokenizer_adds_bos(t) ? tokenizer_bos(t) : -1 },
        { "the tokenizer's EOS is", tokenizer_eos(t) },
        { "the tokenizer's unknown token is", tokenizer_unk(t) },
        { "the chat template writes", tp ? template_stray_id(tp, t, c) : -1 },
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (needed[i].id >= c->V)
            return fault(err, "%.300s: %s token id %d, the embedding has %d rows: tokenizer and model do not "
                         "belong together", c->dir, needed[i].what, needed[i].id, c->V);
    }
    return 0;
}
