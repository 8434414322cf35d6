// lib/template.c - see template.h.
#define _GNU_SOURCE
#include "template.h"
#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <stb/stb_ds.h>

// ==================================================================================================== THE LANGUAGE
// What follows runs the part of Jinja that chat templates use: {{ }}, if, for, set, macro, break, continue,
// the operators, and the functions, methods, filters and tests named below. A program is run as it is read: there is
// no tree. What shall not be done now - a branch not taken, what follows a break - is read all the same, and nothing
// comes of it (Jinja.skip). The body of a loop is read once for each turn, that of a macro once for each call. So a
// program that has run once has been read whole, and what is no Jinja in it has been found. What it may not do is
// refused when it does it, with the line. Line breaks and indentation around tags go as transformers asks for
// (trim_blocks, lstrip_blocks).
//
// Every byte of a text knows where it comes from: from the program, or from which message. Cutting, joining
// and replacing keep that, so that it is known of every byte of the output.
enum {                          // bounds, far above what a real program takes
    JINJA_SOURCE = 1 << 20,     // bytes of a program
    JINJA_NESTED = 90,          // brackets, blocks and calls of macros inside one another
    JINJA_BYTE   = 2,           // work of a byte of the program read, of a value made or of a text looked through; and of
    JINJA_STEP   = 64,          // an operand read, a member made, and eight variables passed over in search of one
    JINJA_WORK   = 64 << 20,    // all of it, so at most half as many bytes of memory;
    JINJA_WORK_MESSAGE = 1480000,       // for each message, and for each byte of one, so much more
    JINJA_WORK_BYTE = 400,
    JINJA_NUMBER = 1000000000   // the largest number
};

// ---- Values
enum { J_UNDEFINED, J_NONE, J_BOOL, J_INT, J_TEXT, J_LIST, J_DICT, J_FUNCTION, J_MACRO };
static const char *const jinja_kinds[] = {
    "something undefined", "none", "a bool", "a number", "a text", "a list", "a dict", "a function", "a macro"
};

typedef struct {
    int kind;                   // J_*
    long i;                     // a bool or a number
    const char *s;              // a text, without a NUL; of a macro where its arguments stand in the program
    const uint16_t *from;       // (n) where its bytes come from, as in template_render; NULL: the program
    size_t n;                   // its bytes
    struct JinjaTable *t;       // a list or a dict; several values may share it
} JinjaValue;

typedef struct JinjaTable {     // the members of a list or a dict, the arguments of a call, the variables of a scope
    size_t n, room;             // members; how many there is room for
    JinjaValue *item;           // (n)
    JinjaValue *key;            // (n) of a dict, texts; of a list, and of arguments without a name, undefined
    int space;                  // 1: a namespace, the only table of a program that {% set %} changes
    struct JinjaTable *outer;   // of a scope: the one around it; NULL: there is none
} JinjaTable;

static const JinjaValue undefined;

// The values of a bool and of a number.
static JinjaValue jinja_bool(int x) { return (JinjaValue){ .kind = J_BOOL, .i = x != 0 }; }
static JinjaValue jinja_int(long x) { return (JinjaValue){ .kind = J_INT, .i = x }; }

// A text that the program itself writes, and that stays where it is.
static JinjaValue jinja_own(const char *s, size_t n) { return (JinjaValue){ .kind = J_TEXT, .s = s, .n = n }; }
static JinjaValue jinja_string(const char *s) { return jinja_own(s, strlen(s)); }

// The bytes [a,b) of a text.
static JinjaValue jinja_cut(JinjaValue v, size_t a, size_t b) {
    v.s += a;
    if (v.from) v.from += a;
    v.n = b - a;
    return v;
}

// The place of a text in "a|b"; -1.
static int jinja_place(JinjaValue v, const char *words) { return v.kind == J_TEXT ? bytes_place(words, v.s, v.n) : -1; }

// Is the value this text, or one of "a|b"?
static int jinja_is(JinjaValue v, const char *words) { return jinja_place(v, words) >= 0; }

// What `if` takes for true: as in Python, what is not empty, 0, none or undefined.
static int jinja_truth(JinjaValue v) {
    if (v.kind == J_TEXT) return v.n > 0;
    if (v.kind == J_LIST || v.kind == J_DICT) return v.t->n > 0;
    return v.kind >= J_FUNCTION || v.i != 0;
}

// ---- A program that runs
typedef struct {
    const Template *tp;
    const char *p;              // the place that is read
    Arena *arena;               // takes the values
    int skip;                   // above 0: what is read is not done
    int ended;                  // RUN_*
    int depth;                  // how many brackets, blocks and calls the present place lies in
    char *err;                  // (512) why the program was stopped, with the line,
    jmp_buf stopped;            // .. and where that leads
    JinjaTable *globals, *scope;        // the variables of the program, and of the innermost scope
    char *out;                  // stb array: the output
    uint16_t *from;             // stb array: where its bytes come from
    size_t work, most_work;     // done so far, and at most
} Jinja;

enum { RUN_ON, RUN_BREAK, RUN_CONTINUE };       // how a turn of a loop has ended; but for RUN_ON the rest is skipped

// Stops the program: the line and the reason go to err. It does not return.
KV_PRINTF(2, 3) static _Noreturn void jinja_fail(Jinja *j, const char *fmt, ...) {
    char why[256];
    int line = 1;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    for (const char *s = j->tp->source; s < j->p; s++) line += *s == '\n';
    fault(j->err, "line %d: %s", line, why);
    longjmp(j->stopped, 1);
}

// A name, as %.*s shows it.
#define NAMED(v) (int)min_size((v).n, 40), (v).s

// Counts a step over n bytes. Too much work stops the program.
static void jinja_spend(Jinja *j, size_t n) {
    j->work += JINJA_STEP + JINJA_BYTE * n;
    if (j->work > j->most_work) jinja_fail(j, "the program takes too long");
}

// Goes a bracket, a block or a call further inside.
static void jinja_nest(Jinja *j) {
    if (++j->depth > JINJA_NESTED)
        jinja_fail(j, "more than %d brackets, blocks and calls inside one another", JINJA_NESTED);
}

// n bytes that last as long as the program runs.
static void *jinja_memory(Jinja *j, size_t n) {
    jinja_spend(j, min_size(n, j->most_work) + 64);
    return arena_take(j->arena, n);
}

// ---- The output
// Appends a text to the output.
static void jinja_put(Jinja *j, JinjaValue v) {
    if (j->skip) return;
    jinja_spend(j, 3 * v.n);
    uint16_t *from = arraddnptr(j->from, v.n);
    bytes_put(&j->out, v.s, v.n);
    for (size_t i = 0; i < v.n; i++) from[i] = v.from ? v.from[i] : 0;
}

// Takes what the output has from `at` on out of it again -> this text, which is a value.
static JinjaValue jinja_collect(Jinja *j, size_t at) {
    size_t n = arrlenu(j->out) - at;
    char *s = jinja_memory(j, n);
    uint16_t *from = jinja_memory(j, n * sizeof *from);
    if (!n) return jinja_string("");
    memcpy(s, j->out + at, n);
    memcpy(from, j->from + at, n * sizeof *from);
    arrsetlen(j->out, at);
    arrsetlen(j->from, at);
    return (JinjaValue){ .kind = J_TEXT, .s = s, .from = from, .n = n };
}

// The text that {{ v }} writes and that ~ joins.
static JinjaValue jinja_written(Jinja *j, JinjaValue v) {
    if (v.kind == J_TEXT) return v;
    if (v.kind == J_UNDEFINED) return jinja_string("");
    if (v.kind == J_NONE) return jinja_string("None");
    if (v.kind == J_BOOL) return jinja_string(v.i ? "True" : "False");
    if (v.kind != J_INT) jinja_fail(j, "writes %s", jinja_kinds[v.kind]);
    char *number = jinja_memory(j, 32);
    snprintf(number, 32, "%ld", v.i);
    return jinja_string(number);
}

// ---- Lists and dicts
// An empty list or dict.
static JinjaValue jinja_table(Jinja *j, int kind) {
    JinjaTable *t = jinja_memory(j, sizeof *t);
    *t = (JinjaTable){ 0 };
    return (JinjaValue){ .kind = kind, .t = t };
}

// Appends a member with its key.
static void jinja_add(Jinja *j, JinjaTable *t, JinjaValue key, JinjaValue v) {
    jinja_spend(j, 0);
    if (t->n == t->room) {
        JinjaTable old = *t;
        t->room = max_size(2 * t->room, 4);
        t->item = jinja_memory(j, t->room * sizeof *t->item);
        t->key = jinja_memory(j, t->room * sizeof *t->key);
        for (size_t i = 0; i < t->n; i++) {
            t->item[i] = old.item[i];
            t->key[i] = old.key[i];
        }
    }
    t->key[t->n] = key;
    t->item[t->n++] = v;
}

// The same to a list, and to a dict by a name.
static void jinja_push(Jinja *j, JinjaValue list, JinjaValue v) { jinja_add(j, list.t, undefined, v); }
static void jinja_enter(Jinja *j, JinjaTable *t, const char *key, JinjaValue v) {
    jinja_add(j, t, jinja_string(key), v);
}

// Is it a number? A bool is 0 or 1, as in Python.
static int jinja_number(JinjaValue v) { return v.kind == J_BOOL || v.kind == J_INT; }

// a == b. Two tables are equal when they are the same one: messages are only compared with themselves.
static int jinja_equal(Jinja *j, JinjaValue a, JinjaValue b) {
    if (jinja_number(a) && jinja_number(b)) return a.i == b.i;
    if (a.kind != b.kind) return 0;
    if (a.kind != J_TEXT) return a.t == b.t && a.s == b.s;
    if (a.n != b.n) return 0;
    jinja_spend(j, a.n);
    return !a.n || !memcmp(a.s, b.s, a.n);
}

// The member of a table that has this key; NULL: none.
static JinjaValue *jinja_find(Jinja *j, JinjaTable *t, JinjaValue key) {
    j->work += t->n * JINJA_STEP / 8;
    for (size_t i = t->n; i-- > 0;)
        if (jinja_equal(j, t->key[i], key)) return &t->item[i];
    return NULL;
}

// Gives it a value.
static void jinja_store(Jinja *j, JinjaTable *t, JinjaValue key, JinjaValue v) {
    JinjaValue *old = jinja_find(j, t, key);
    if (old) *old = v;
    else jinja_add(j, t, key, v);
}

// The variable of this name in the innermost scope that has one, else a function; undefined when there is neither.
static JinjaValue jinja_variable(Jinja *j, JinjaValue name) {
    for (JinjaTable *t = j->scope; t && !j->skip; t = t->outer) {
        JinjaValue *v = jinja_find(j, t, name);
        if (v) return *v;
    }
    int function = !j->skip && jinja_is(name, "raise_exception|strftime_now|namespace|range|dict");
    return (JinjaValue){ .kind = function ? J_FUNCTION : J_UNDEFINED };
}

// What a loop goes over: the members of a list, the names of a dict, the characters of a text. A stray byte is a
// character.
static JinjaValue jinja_list(Jinja *j, JinjaValue v) {
    if (v.kind == J_LIST) return v;
    JinjaValue list = jinja_table(j, J_LIST);
    if (v.kind > J_DICT || (v.kind && v.kind < J_TEXT)) jinja_fail(j, "a loop over %s", jinja_kinds[v.kind]);
    for (size_t i = 0; v.kind == J_DICT && i < v.t->n; i++) jinja_push(j, list, v.t->key[i]);
    for (size_t i = 0, n; v.kind == J_TEXT && i < v.n; i += n) {
        n = (size_t)max_int(utf8_length(v.s + i, v.n - i), 1);
        jinja_push(j, list, jinja_cut(v, i, i + n));
    }
    return list;
}

// a[b] and a.name
static JinjaValue jinja_item(Jinja *j, JinjaValue a, JinjaValue b) {
    if (j->skip) return undefined;
    if (a.kind == J_UNDEFINED) jinja_fail(j, "a member of %s", jinja_kinds[a.kind]);
    if (a.kind == J_DICT) {
        JinjaValue *found = jinja_find(j, a.t, b);
        return found ? *found : undefined;
    }
    if (b.kind != J_INT || (a.kind != J_LIST && a.kind != J_TEXT)) return undefined;
    JinjaValue list = jinja_list(j, a);
    long i = b.i + (b.i < 0 ? (long)list.t->n : 0);
    return i >= 0 && i < (long)list.t->n ? list.t->item[i] : undefined;
}

// Is a in b?
static int jinja_in(Jinja *j, JinjaValue a, JinjaValue b) {
    if (b.kind == J_TEXT && a.kind == J_TEXT) {
        jinja_spend(j, b.n);
        return !a.n || memmem(b.s, b.n, a.s, a.n);
    }
    if (b.kind == J_DICT) return jinja_find(j, b.t, a) != NULL;
    if (b.kind != J_LIST && b.kind != J_UNDEFINED)
        jinja_fail(j, "%s in %s", jinja_kinds[a.kind], jinja_kinds[b.kind]);
    for (size_t i = 0; b.kind == J_LIST && i < b.t->n; i++) {
        jinja_spend(j, 0);
        if (jinja_equal(j, a, b.t->item[i])) return 1;
    }
    return 0;
}

// The members of a list as one text, with `between` between two of them.
static JinjaValue jinja_join(Jinja *j, JinjaValue list, JinjaValue between) {
    size_t at = arrlenu(j->out);
    for (size_t i = 0; i < list.t->n; i++) {
        if (i) jinja_put(j, between);
        jinja_put(j, jinja_written(j, list.t->item[i]));
    }
    return jinja_collect(j, at);
}

// The parts of a text between the texts `by`, at most `most` cuts; any number if that is negative.
static JinjaValue jinja_split(Jinja *j, JinjaValue v, JinjaValue by, long most) {
    JinjaValue list = jinja_table(j, J_LIST);
    const char *at;
    if (!by.n) jinja_fail(j, "an empty text between the parts");
    while (most-- && (at = memmem(v.s, v.n, by.s, by.n)) != NULL) {
        size_t n = (size_t)(at - v.s);
        jinja_push(j, list, jinja_cut(v, 0, n));
        v = jinja_cut(v, n + by.n, v.n);
        jinja_spend(j, n);
    }
    jinja_push(j, list, v);
    return list;
}

// v[from:to:by] as Python has it, of a list or of the characters of a text. given: from, to, by.
static JinjaValue jinja_slice(Jinja *j, JinjaValue v, const JinjaValue given[3]) {
    if (j->skip) return undefined;
    for (int k = 0; k < 3; k++)
        if (given[k].kind > J_NONE && given[k].kind != J_INT)
            jinja_fail(j, "a part from %s", jinja_kinds[given[k].kind]);
    if (v.kind != J_TEXT && v.kind != J_LIST) jinja_fail(j, "a part of %s", jinja_kinds[v.kind]);
    JinjaValue all = jinja_list(j, v), list = jinja_table(j, J_LIST);

    // Where it begins, and before which member it ends, moved into the list.
    long n = (long)all.t->n, step = given[2].kind == J_INT ? given[2].i : 1, edge[2];
    if (!step) jinja_fail(j, "a part in steps of 0");
    long low = step > 0 ? 0 : -1, high = low + n;
    for (int k = 0; k < 2; k++) {
        long x = given[k].i + (given[k].i < 0 ? n : 0);
        if (given[k].kind != J_INT) x = (step > 0) == (k == 0) ? low : high;
        edge[k] = x < low ? low : x > high ? high : x;
    }
    for (long i = edge[0]; step > 0 ? i < edge[1] : i > edge[1]; i += step) jinja_push(j, list, all.t->item[i]);
    return v.kind == J_TEXT ? jinja_join(j, list, undefined) : list;
}

// ---- Filters, tests, functions
// A text without the characters of `chars` (no text: white space, with what Python takes for it) at its left end, its
// right end.
static JinjaValue jinja_strip(JinjaValue v, JinjaValue chars, int left, int right) {
    for (int back = 0; back < 2; back++) {
        while ((back ? right : left) && v.n) {
            char c = v.s[back ? v.n - 1 : 0];
            int m = 0;                                      // the bytes that go
            if (chars.kind == J_TEXT) m = memchr(chars.s, c, chars.n) != NULL;
            else if (c >= 0x1c && c <= 0x1f) m = 1;
            else if (back) m = (int)space_before(v.s, 0, v.n);
            else m = is_space(v.s, v.n, &m) ? m : 0;
            if (!m) break;
            v = back ? jinja_cut(v, 0, v.n - (size_t)m) : jinja_cut(v, (size_t)m, v.n);
        }
    }
    return v;
}

// upper, lower, capitalize, title
static JinjaValue jinja_case(Jinja *j, JinjaValue v, JinjaValue name) {
    char *s = jinja_memory(j, v.n + 1);
    int start = 1;                                          // does a word begin here?
    for (size_t i = 0; i < v.n; i++) {
        int c = (unsigned char)v.s[i], up = *name.s == 'u' || (*name.s != 'l' && start);
        if (c > 127) jinja_fail(j, "%.*s of letters beyond ASCII", NAMED(name));
        s[i] = (char)(up ? toupper(c) : tolower(c));
        start = *name.s == 't' && !isalpha(c);
    }
    v.s = s;
    return v;
}

// Argument k of a call, or the one of this name; NULL when it is not given.
static const JinjaValue *jinja_given(Jinja *j, JinjaTable *args, size_t k, JinjaValue name) {
    const JinjaValue *named = jinja_find(j, args, name);
    return named ? named : k < args->n && !args->key[k].kind ? &args->item[k] : NULL;
}

// The same; undefined when it is not given.
static JinjaValue jinja_arg(Jinja *j, JinjaTable *args, size_t k, const char *name) {
    const JinjaValue *v = jinja_given(j, args, k, jinja_string(name));
    return v ? *v : undefined;
}

// v is name args; k: the argument that stands behind the name
static int jinja_test(Jinja *j, JinjaValue v, JinjaValue name, JinjaTable *args, size_t k) {
    enum { TEXT = 1 << J_TEXT, LIST = 1 << J_LIST, DICT = 1 << J_DICT, UNDEFINED = 1 << J_UNDEFINED };
    static const struct { const char *name; int kinds; } tests[] = {
        { "defined", ~UNDEFINED }, { "undefined", UNDEFINED }, { "none", 1 << J_NONE },
        { "string", TEXT }, { "mapping", DICT }, { "iterable|sequence", TEXT | LIST | DICT | UNDEFINED },
        { "boolean", 1 << J_BOOL }, { "integer", 1 << J_INT }, { "number", 1 << J_INT | 1 << J_BOOL },
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (jinja_is(name, tests[i].name)) return tests[i].kinds >> v.kind & 1;

    JinjaValue x = jinja_arg(j, args, k, "other");
    if (jinja_is(name, "true|false")) return v.kind == J_BOOL && v.i == (*name.s == 't');
    if (jinja_is(name, "equalto|eq|==")) return jinja_equal(j, v, x);
    if (jinja_is(name, "ne|!=")) return !jinja_equal(j, v, x);
    if (jinja_is(name, "in")) return jinja_in(j, v, x);
    jinja_fail(j, "the test %.*s of %s", NAMED(name), jinja_kinds[v.kind]);
}

// select, reject (by: 0) and selectattr, rejectattr (by: 1, the first argument is a member): the members of a
// list that pass a test, or do not.
static JinjaValue jinja_select(Jinja *j, JinjaValue list, JinjaTable *args, size_t by, int want) {
    JinjaValue chosen = jinja_table(j, J_LIST), test = jinja_arg(j, args, by, "");
    for (size_t i = 0; i < list.t->n; i++) {
        JinjaValue x = by ? jinja_item(j, list.t->item[i], jinja_arg(j, args, 0, "")) : list.t->item[i];
        int yes = test.kind ? jinja_test(j, x, test, args, by + 1) : jinja_truth(x);
        if (yes == want) jinja_push(j, chosen, list.t->item[i]);
    }
    return chosen;
}

// The pairs of key and value of a dict.
static JinjaValue jinja_items(Jinja *j, JinjaValue dict) {
    JinjaValue pairs = jinja_table(j, J_LIST);
    for (size_t i = 0; i < dict.t->n; i++) {
        JinjaValue pair = jinja_table(j, J_LIST);
        jinja_push(j, pair, dict.t->key[i]);
        jinja_push(j, pair, dict.t->item[i]);
        jinja_push(j, pairs, pair);
    }
    return pairs;
}

// The methods v.name(args) and the filters v | name(args)
static JinjaValue jinja_apply(Jinja *j, JinjaValue v, JinjaValue name, JinjaTable *args) {
    JinjaValue x = jinja_arg(j, args, 0, "chars"), y = jinja_arg(j, args, 1, "maxsplit");
    jinja_spend(j, v.kind == J_TEXT ? v.n : 0);
    if (jinja_is(name, "default|d")) {
        int stays = v.kind && (jinja_truth(v) || !jinja_truth(jinja_arg(j, args, 1, "boolean")));
        return stays ? v : jinja_arg(j, args, 0, "default_value");
    }
    if (jinja_is(name, "string")) return jinja_written(j, v);
    if (v.kind == J_UNDEFINED && jinja_is(name, "trim")) return jinja_string("");

    if (v.kind == J_TEXT) {
        if (jinja_is(name, "trim|strip|lstrip|rstrip")) return jinja_strip(v, x, *name.s != 'r', *name.s != 'l');
        if (jinja_is(name, "upper|lower|title|capitalize")) return jinja_case(j, v, name);
        if (jinja_is(name, "length|count")) {
            long chars = 0;
            for (size_t i = 0; i < v.n; i++) chars += (v.s[i] & 0xc0) != 0x80;
            return jinja_int(chars);
        }
        if (x.kind == J_TEXT && jinja_is(name, "startswith|endswith")) {
            const char *at = v.s + (*name.s == 'e' && v.n > x.n ? v.n - x.n : 0);
            return jinja_bool(v.n >= x.n && (!x.n || !memcmp(at, x.s, x.n)));
        }
        if (x.kind == J_TEXT && jinja_is(name, "split")) return jinja_split(j, v, x, y.kind == J_INT ? y.i : -1);
        if (x.kind == J_TEXT && y.kind == J_TEXT && jinja_is(name, "replace"))
            return jinja_join(j, jinja_split(j, v, x, -1), y);
    }

    // Of a list, of the keys of a dict, or of the characters of a text
    int many = v.kind == J_LIST || v.kind == J_DICT || !v.kind;
    if (many || (v.kind == J_TEXT && jinja_is(name, "list|first|last|select|reject|join"))) {
        JinjaValue list = jinja_list(j, v);
        size_t n = list.t->n;
        if (jinja_is(name, "length|count")) return jinja_int((long)n);
        if (jinja_is(name, "list|keys")) return list;
        if (jinja_is(name, "first|last")) return n ? list.t->item[*name.s == 'f' ? 0 : n - 1] : undefined;
        if (jinja_is(name, "join")) return jinja_join(j, list, jinja_arg(j, args, 0, "d"));
        if (jinja_is(name, "select|reject")) return jinja_select(j, list, args, 0, *name.s == 's');
        if (jinja_is(name, "selectattr|rejectattr")) return jinja_select(j, list, args, 1, *name.s == 's');
    }
    if (v.kind == J_DICT && jinja_is(name, "items")) return jinja_items(j, v);
    if (v.kind == J_DICT && jinja_is(name, "get")) {
        JinjaValue *found = jinja_find(j, v.t, x);
        const JinjaValue *other = jinja_given(j, args, 1, jinja_string("default"));
        return found ? *found : other ? *other : (JinjaValue){ .kind = J_NONE };
    }
    jinja_fail(j, "%.*s of %s", NAMED(name), jinja_kinds[v.kind]);
}

// The functions.
static JinjaValue jinja_function(Jinja *j, JinjaValue name, JinjaTable *args) {
    JinjaValue x = jinja_arg(j, args, 0, ""), y = jinja_arg(j, args, 1, "");
    if (x.kind == J_TEXT && jinja_is(name, "raise_exception"))
        jinja_fail(j, "the program refuses: %.*s", (int)min_size(x.n, 200), x.s);
    if (x.kind == J_TEXT && jinja_is(name, "strftime_now")) {
        char format[64] = "", *date = jinja_memory(j, 256);
        if (x.n < sizeof format) memcpy(format, x.s, x.n);
        if (!strftime(date, 256, format, &j->tp->today)) jinja_fail(j, "the date as this text");
        return jinja_string(date);
    }
    if (x.kind == J_INT && jinja_is(name, "range")) {
        JinjaValue list = jinja_table(j, J_LIST);
        long from = y.kind == J_INT ? x.i : 0, to = y.kind == J_INT ? y.i : x.i;
        for (long i = from; i < to; i++) jinja_push(j, list, jinja_int(i));
        return list;
    }
    if (!jinja_is(name, "namespace|dict")) jinja_fail(j, "the function %.*s", NAMED(name));
    args->space = *name.s == 'n';
    return (JinjaValue){ .kind = J_DICT, .t = args };
}

// ---- Operators
// What may stand behind a value, with how tightly it binds; a sign stands between filters and members. One that begins
// like another stands before it.
enum { OP_OR, OP_AND, OP_EQUAL, OP_UNEQUAL, OP_LESS_EQUAL, OP_MORE_EQUAL, OP_LESS, OP_MORE, OP_IN, OP_NOT_IN,
       OP_PLUS, OP_MINUS, OP_JOIN, OP_TIMES, OP_WHOLE, OP_REST, OP_FILTER, OP_IS, OP_INDEX, OP_MEMBER, OPERATORS };
enum { LEVEL_OR, LEVEL_AND, LEVEL_NOT, LEVEL_COMPARISON, LEVEL_SUM, LEVEL_JOIN, LEVEL_PRODUCT, LEVEL_FILTER,
       LEVEL_SIGN };
static const struct { const char *name; int level; } jinja_operators[OPERATORS] = {
    { "or", LEVEL_OR }, { "and", LEVEL_AND },
    { "==", LEVEL_COMPARISON }, { "!=", LEVEL_COMPARISON }, { "<=", LEVEL_COMPARISON }, { ">=", LEVEL_COMPARISON },
    { "<", LEVEL_COMPARISON }, { ">", LEVEL_COMPARISON }, { "in", LEVEL_COMPARISON }, { "not", LEVEL_COMPARISON },
    { "+", LEVEL_SUM }, { "-", LEVEL_SUM }, { "~", LEVEL_JOIN },
    { "*", LEVEL_PRODUCT }, { "//", LEVEL_PRODUCT }, { "%", LEVEL_PRODUCT },
    { "|", LEVEL_FILTER }, { "is", LEVEL_FILTER }, { "[", LEVEL_SIGN }, { ".", LEVEL_SIGN },
};

// a OP b, but for `or` and `and`
static JinjaValue jinja_compute(Jinja *j, JinjaValue a, int op, JinjaValue b) {
    if (j->skip) return undefined;
    if (op == OP_EQUAL || op == OP_UNEQUAL) return jinja_bool(jinja_equal(j, a, b) == (op == OP_EQUAL));
    if (op == OP_IN || op == OP_NOT_IN) return jinja_bool(jinja_in(j, a, b) == (op == OP_IN));
    if (op == OP_JOIN || (op == OP_PLUS && a.kind == J_TEXT && b.kind == J_TEXT)) {
        size_t at = arrlenu(j->out);
        jinja_put(j, jinja_written(j, a));
        jinja_put(j, jinja_written(j, b));
        return jinja_collect(j, at);
    }
    if (op == OP_PLUS && a.kind == J_LIST && b.kind == J_LIST) {
        JinjaValue list = jinja_table(j, J_LIST);
        for (size_t i = 0; i < a.t->n; i++) jinja_push(j, list, a.t->item[i]);
        for (size_t i = 0; i < b.t->n; i++) jinja_push(j, list, b.t->item[i]);
        return list;
    }
    if (!jinja_number(a) || !jinja_number(b))
        jinja_fail(j, "%s %s %s", jinja_kinds[a.kind], jinja_operators[op].name, jinja_kinds[b.kind]);

    int divides = op == OP_WHOLE || op == OP_REST;
    if (divides && b.i <= 0) jinja_fail(j, "%ld %s %ld", a.i, jinja_operators[op].name, b.i);
    long n = divides ? (a.i % b.i + b.i) % b.i : 0;         // the rest, as Python has it never negative
    switch (op) {
    case OP_LESS:       return jinja_bool(a.i < b.i);
    case OP_LESS_EQUAL: return jinja_bool(a.i <= b.i);
    case OP_MORE:       return jinja_bool(a.i > b.i);
    case OP_MORE_EQUAL: return jinja_bool(a.i >= b.i);
    case OP_PLUS:       n = a.i + b.i; break;
    case OP_MINUS:      n = a.i - b.i; break;
    case OP_TIMES:      n = a.i * b.i; break;
    case OP_WHOLE:      n = (a.i - n) / b.i; break;
    }
    if (labs(n) > JINJA_NUMBER) jinja_fail(j, "a number above %d", JINJA_NUMBER);
    return jinja_int(n);
}

// ---- Reading: words
// A recursive descent: a function for every rule of the grammar, which reads what its rule describes, from j->p on,
// and returns its value. It moves j->p behind what it has read. There is no list of tokens: a function looks at the
// text itself (jinja_take).
//
//     expression    a, or a if c else b                       jinja_expression
//     binary        a or b, .., a * b, not a, -a              jinja_binary
//     behind        a.name, a[b], a[b:c], a | name, a is b    jinja_behind
//     primary       'text', 12, name, f(a), [a, b], {a: b}    jinja_primary
//     block         text, {{ a }}, {% tag %} ..               jinja_block

// Goes behind the white space that stands here.
static void jinja_blanks(Jinja *j) { j->p += strspn(j->p, " \t\n\v\f\r"); }

// May the byte stand in a name?
static int jinja_name_byte(int c) { return isalnum(c) || c == '_'; }

// Does this word, operator or bracket stand here? Then it is read. A sign that belongs to the end of a tag, as
// in -%}, is no operator, and the beginning of a longer word is no word.
static int jinja_take(Jinja *j, const char *what) {
    size_t n = strlen(what);
    jinja_blanks(j);
    const char *p = j->p;
    if (strncmp(p, what, n)) return 0;
    if (isalpha((unsigned char)*what) && jinja_name_byte((unsigned char)p[n])) return 0;
    if (strchr("+-", *what) && (p[1] == '%' || p[1] == '}') && p[2] == '}') return 0;
    if (*what == '%' && p[1] == '}') return 0;
    if (!strcmp(what, "=") && p[1] == '=') return 0;
    j->p += n;
    return 1;
}

// Reads it, or refuses what stands here instead.
static void jinja_want(Jinja *j, const char *what) {
    if (!jinja_take(j, what)) jinja_fail(j, "expected '%s', found '%.12s'", what, j->p);
}

// Reads a name; "" when none stands here.
static JinjaValue jinja_maybe_name(Jinja *j) {
    jinja_blanks(j);
    const char *from = j->p;
    while (!isdigit((unsigned char)*from) && jinja_name_byte((unsigned char)*j->p)) j->p++;
    return jinja_own(from, (size_t)(j->p - from));
}

// Reads a name, or refuses what stands here instead. what: "a name", "a value".
static JinjaValue jinja_name(Jinja *j, const char *what) {
    JinjaValue name = jinja_maybe_name(j);
    if (!name.n) jinja_fail(j, "expected %s, found '%.12s'", what, j->p);
    return name;
}

// Reads the end of a tag, %} or }} or #}, and the white space behind it that goes: all of it behind a '-',
// otherwise one line break, but not behind }}.
static void jinja_close(Jinja *j, const char *end) {
    jinja_blanks(j);
    char sign = *j->p;
    j->p += sign == '-' || sign == '+';
    if (strncmp(j->p, end, 2)) jinja_fail(j, "expected '%s', found '%.12s'", end, j->p);
    j->p += 2;
    if (sign == '-') jinja_blanks(j);
    else if (*end != '}' && sign != '+' && *j->p == '\n') j->p++;
}

// ---- Reading: expressions
static JinjaValue jinja_expression(Jinja *j);
static JinjaValue jinja_binary(Jinja *j, int level);
static void jinja_body(Jinja *j, const char *end);

// Reads the texts in quotes that stand here; neighbours are one text.
static JinjaValue jinja_quoted(Jinja *j) {
    static const char code[] = "ntr\\'\"", means[] = "\n\t\r\\'\"";
    size_t at = arrlenu(j->out);
    for (; *j->p == '\'' || *j->p == '"'; jinja_blanks(j)) {
        char quote = *j->p++;
        for (const char *c; *j->p != quote; j->p++) {
            if (*(c = j->p) == '\\' && j->p[1]) {
                const char *escape = strchr(code, *++j->p);
                if (!escape) jinja_fail(j, "the escape \\%.1s", j->p);
                c = means + (escape - code);
            }
            if (!*c) jinja_fail(j, "a text without its closing quote");
            if (j->skip) continue;
            arrput(j->out, *c);
            arrput(j->from, 0);
        }
        j->p++;
    }
    return jinja_collect(j, at);
}

// Reads what stands between brackets up to `end` as a list or, up to }, a dict: values, for a call also name=value,
// for a dict key:value.
static JinjaValue jinja_members(Jinja *j, const char *end) {
    JinjaValue table = jinja_table(j, *end == '}' ? J_DICT : J_LIST);
    while (!jinja_take(j, end)) {
        const char *from = j->p;
        JinjaValue key = jinja_maybe_name(j);
        if (*end != ')' || !key.n || !jinja_take(j, "=")) {
            j->p = from;
            key = undefined;
        }
        if (*end == '}') {
            key = jinja_expression(j);
            jinja_want(j, ":");
        }
        jinja_add(j, table.t, key, jinja_expression(j));
        if (!jinja_take(j, ",") && *j->p != *end) jinja_want(j, end);
    }
    return table;
}

// Reads the arguments (a, b=value) of a macro and gives each its value in the innermost scope.
static void jinja_parameters(Jinja *j, JinjaTable *args) {
    jinja_want(j, "(");
    for (size_t k = 0; !jinja_take(j, ")"); k++) {
        JinjaValue name = jinja_name(j, "a name"), v = undefined;
        const JinjaValue *given = jinja_given(j, args, k, name);
        j->skip += given != NULL;
        if (jinja_take(j, "=")) v = jinja_expression(j);
        j->skip -= given != NULL;
        if (!j->skip) jinja_store(j, j->scope, name, given ? *given : v);
        if (!jinja_take(j, ",") && *j->p != ')') jinja_want(j, ")");
    }
}

// From here on variables are set in a new scope inside `outer`.
static void jinja_scope(Jinja *j, JinjaTable *outer) {
    j->scope = jinja_table(j, J_DICT).t;
    j->scope->outer = outer;
}

// What a macro writes, which is read once more for that. It sees its arguments and the program's variables, not those
// of who calls it.
static JinjaValue jinja_call_macro(Jinja *j, JinjaValue macro, JinjaTable *args) {
    const char *behind = j->p;
    JinjaTable *caller = j->scope;
    size_t at = arrlenu(j->out);
    jinja_nest(j);
    jinja_scope(j, j->globals);
    j->p = macro.s;
    jinja_parameters(j, args);
    jinja_body(j, "endmacro");
    j->p = behind;
    j->scope = caller;
    j->depth--;
    return jinja_collect(j, at);
}

// A literal, a variable, a call of a function or a macro, a list, a dict or brackets.
static JinjaValue jinja_primary(Jinja *j) {
    jinja_blanks(j);
    if (*j->p == '\'' || *j->p == '"') return jinja_quoted(j);
    if (isdigit((unsigned char)*j->p)) {
        char *end;
        long n = strtol(j->p, &end, 10);
        j->p = end;
        if (n > JINJA_NUMBER) jinja_fail(j, "a number above %d", JINJA_NUMBER);
        return jinja_int(n);
    }
    if (jinja_take(j, "[")) return jinja_members(j, "]");
    if (jinja_take(j, "{")) return jinja_members(j, "}");
    if (jinja_take(j, "(")) {                               // around one value, or a list
        JinjaValue list = jinja_members(j, ")");
        return list.t->n == 1 ? *list.t->item : list;
    }

    JinjaValue name = jinja_name(j, "a value");
    if (jinja_is(name, "true|True|false|False")) return jinja_bool(name.s[0] == 't' || name.s[0] == 'T');
    if (jinja_is(name, "none|None")) return (JinjaValue){ .kind = J_NONE };
    if (!jinja_take(j, "(")) return jinja_variable(j, name);
    JinjaTable *args = jinja_members(j, ")").t;
    JinjaValue v = jinja_variable(j, name);
    if (j->skip) return undefined;
    return v.kind == J_MACRO ? jinja_call_macro(j, v, args) : jinja_function(j, name, args);
}

// Reads what stands behind `of[`: an index b, or a slice b:c:d, of which any may be left out.
static JinjaValue jinja_index(Jinja *j, JinjaValue of) {
    JinjaValue part[3] = { 0 };
    for (int k = 0;; k++) {
        jinja_blanks(j);
        int left_out = (k < 2 && *j->p == ':') || (k > 0 && *j->p == ']');
        if (!left_out) part[k] = jinja_expression(j);
        if (jinja_take(j, "]")) return k ? jinja_slice(j, of, part) : jinja_item(j, of, part[0]);
        jinja_want(j, k < 2 ? ":" : "]");
    }
}

// Reads what stands behind a value and its op, and is no right side: an index, the name of a member, of a method, of a
// filter or of a test, with arguments. A test may have one literal as its argument without brackets.
static JinjaValue jinja_behind(Jinja *j, JinjaValue v, int op) {
    if (op == OP_INDEX) return jinja_index(j, v);
    int want = op != OP_IS || !jinja_take(j, "not"), brackets;
    JinjaValue name = jinja_name(j, "a name"), args = undefined;
    brackets = jinja_take(j, "(");
    if (op == OP_MEMBER && !brackets) return jinja_item(j, v, name);
    args = brackets ? jinja_members(j, ")") : jinja_table(j, J_LIST);
    if (op == OP_IS && !brackets && *j->p && strchr("'\"[0123456789", *j->p)) jinja_push(j, args, jinja_primary(j));
    if (j->skip) return undefined;
    if (op == OP_IS) return jinja_bool(jinja_test(j, v, name, args.t, 0) == want);
    if (op == OP_MEMBER && !v.kind) jinja_fail(j, "%.*s of %s", NAMED(name), jinja_kinds[0]);
    return jinja_apply(j, v, name, args.t);
}

// Reads the operator that stands here, if it binds at `level` or tighter; -1: none does.
static int jinja_operator(Jinja *j, int level) {
    for (int op = 0; op < OPERATORS; op++)
        if (jinja_operators[op].level >= level && jinja_take(j, jinja_operators[op].name)) return op;
    return -1;
}

// An expression of what binds at `level` or tighter. a < b < c is a < b and b < c.
static JinjaValue jinja_binary(Jinja *j, int level) {
    const char *from = j->p;
    JinjaValue v, left;
    int op, chain = 0;          // 1: a comparison has been read, whose right side is `left`
    int not = level <= LEVEL_NOT && jinja_take(j, "not");
    if (not || jinja_take(j, "-")) {
        jinja_nest(j);
        v = jinja_binary(j, not ? LEVEL_NOT : LEVEL_SIGN);
        v = not ? jinja_bool(!jinja_truth(v)) : jinja_compute(j, jinja_int(0), OP_MINUS, v);
        j->depth--;
    } else {
        v = jinja_primary(j);
    }
    for (left = v; (op = jinja_operator(j, level)) >= 0; left = chain ? left : v) {
        int binds = jinja_operators[op].level, compares = binds == LEVEL_COMPARISON;
        int known = jinja_truth(v) ? op == OP_OR : op == OP_AND || (chain && compares);
        chain = compares;
        if (binds >= LEVEL_FILTER) {
            v = jinja_behind(j, v, op);
            continue;
        }
        if (op == OP_NOT_IN) jinja_want(j, "in");
        j->skip += known;
        JinjaValue right = jinja_binary(j, binds + 1);
        j->skip -= known;
        if (!known) v = op <= OP_AND ? right : jinja_compute(j, left, op, right);
        left = right;
    }
    jinja_spend(j, (size_t)(j->p - from));
    return v;
}

// a, or `a if c else b`. Whether a counts is known behind it: it is passed over first, and then read again.
static JinjaValue jinja_expression(Jinja *j) {
    const char *from = j->p, *behind;
    JinjaValue v = undefined;
    int yes = 1;
    jinja_nest(j);
    j->skip++;
    jinja_binary(j, LEVEL_OR);
    j->skip--;
    if (jinja_take(j, "if")) {
        yes = jinja_truth(jinja_binary(j, LEVEL_OR));
        j->skip += yes;
        if (jinja_take(j, "else")) v = jinja_expression(j);
        j->skip -= yes;
    }
    if (yes && !j->skip) {
        behind = j->p;
        j->p = from;
        v = jinja_binary(j, LEVEL_OR);
        j->p = behind;
    }
    j->depth--;
    return v;
}

// ---- Reading: tags
// These read a tag whose name is read, and what belongs to it up to its end.
static JinjaValue jinja_block(Jinja *j, const char *stops);

// Reads a block that ends with the tag `end` alone, and this tag, from the end of the tag before it on.
static void jinja_body(Jinja *j, const char *end) {
    jinja_close(j, "%}");
    jinja_block(j, end);
    jinja_close(j, "%}");
}

// {% if %} .. {% elif %} .. {% else %} .. {% endif %}
static void jinja_if(Jinja *j) {
    int done = 0;               // 1: a branch has been run
    JinjaValue tag = jinja_string("if");
    while (!jinja_is(tag, "endif")) {
        int yes = 1;
        j->skip += done;
        if (!jinja_is(tag, "else")) yes = jinja_truth(jinja_expression(j));
        jinja_close(j, "%}");
        j->skip += !yes;
        tag = jinja_block(j, "endif|elif|else");
        j->skip -= !yes + done;
        done |= yes;
    }
    jinja_close(j, "%}");
}

// Begins turn i of a loop over a list, which is read from p on: a new scope with its variables. Behind the last turn
// the loop is read once more, to be passed over.
static void jinja_turn(Jinja *j, const JinjaValue name[2], JinjaTable *outer, JinjaValue list, long i, const char *p) {
    long n = (long)list.t->n;
    j->p = p;
    j->skip += i == n;
    if (i == n) return;
    JinjaValue loop = jinja_table(j, J_DICT), x = list.t->item[i];
    jinja_scope(j, outer);
    jinja_enter(j, loop.t, "index", jinja_int(i + 1));
    jinja_enter(j, loop.t, "index0", jinja_int(i));
    jinja_enter(j, loop.t, "revindex", jinja_int(n - i));
    jinja_enter(j, loop.t, "revindex0", jinja_int(n - i - 1));
    jinja_enter(j, loop.t, "first", jinja_bool(!i));
    jinja_enter(j, loop.t, "last", jinja_bool(i == n - 1));
    jinja_enter(j, loop.t, "length", jinja_int(n));
    jinja_enter(j, loop.t, "previtem", i ? list.t->item[i - 1] : undefined);
    jinja_enter(j, loop.t, "nextitem", i < n - 1 ? list.t->item[i + 1] : undefined);
    jinja_enter(j, j->scope, "loop", loop);
    int pair = name[1].n > 0;
    if (pair && (x.kind != J_LIST || x.t->n != 2)) jinja_fail(j, "a loop with two names over %s", jinja_kinds[x.kind]);
    for (int k = 0; k <= pair; k++) jinja_store(j, j->scope, name[k], pair ? x.t->item[k] : x);
}

// {% for a in list if c %} .. {% else %} .. {% endfor %}
static void jinja_for(Jinja *j) {
    JinjaTable *outer = j->scope;
    int ended = j->ended;       // how a turn of the loop around this one has ended, whose rest is passed over
    JinjaValue name[2] = { jinja_name(j, "a name") }, tag = undefined;
    if (jinja_take(j, ",")) name[1] = jinja_name(j, "a name");
    jinja_want(j, "in");
    JinjaValue all = jinja_binary(j, LEVEL_OR), list;
    list = all = jinja_list(j, j->skip ? undefined : all);      // what is passed over has no turns
    long n = (long)all.t->n;
    if (jinja_take(j, "if")) {
        const char *condition = j->p;
        list = jinja_table(j, J_LIST);
        for (long i = 0; i <= n; i++) {
            jinja_turn(j, name, outer, all, i, condition);
            int yes = jinja_truth(jinja_binary(j, LEVEL_OR));
            if (yes && i < n) jinja_push(j, list, all.t->item[i]);
        }
        j->skip--;
        n = (long)list.t->n;
    }
    jinja_close(j, "%}");

    const char *body = j->p;
    j->ended = RUN_ON;
    for (long i = 0; i <= n; i++) {
        jinja_turn(j, name, outer, list, i, body);
        tag = jinja_block(j, "endfor|else");
        j->skip -= j->ended != RUN_ON;
        if (j->ended == RUN_BREAK) i = n - 1;
        j->ended = RUN_ON;
    }
    j->skip--;
    j->ended = ended;
    j->scope = outer;
    j->skip += n > 0;
    if (jinja_is(tag, "else")) jinja_body(j, "endfor");
    else jinja_close(j, "%}");
    j->skip -= n > 0;
}

// {% set a = value %}, {% set space.a = value %}, {% set a %} text {% endset %}
static void jinja_set(Jinja *j) {
    JinjaValue name = jinja_name(j, "a name"), member = undefined, v;
    if (jinja_take(j, ".")) member = jinja_name(j, "a name");
    if (jinja_take(j, "=")) {
        v = jinja_expression(j);
        jinja_close(j, "%}");
    } else {
        size_t at = arrlenu(j->out);
        jinja_body(j, "endset");
        v = jinja_collect(j, at);
    }
    if (j->skip) return;
    JinjaValue space = member.n ? jinja_variable(j, name) : undefined;
    if (!member.n) jinja_store(j, j->scope, name, v);
    else if (space.kind == J_DICT && space.t->space) jinja_store(j, space.t, member, v);
    else jinja_fail(j, "%.*s is no namespace", NAMED(name));
}

// {% macro name(a, b=value) %} .. {% endmacro %}
static void jinja_macro(Jinja *j) {
    JinjaValue name = jinja_name(j, "a name");
    if (!j->skip) jinja_store(j, j->scope, name, (JinjaValue){ .kind = J_MACRO, .s = j->p });
    j->skip++;
    jinja_parameters(j, jinja_table(j, J_LIST).t);
    jinja_body(j, "endmacro");
    j->skip--;
}

// Reads a tag whose name is read.
static void jinja_tag(Jinja *j, JinjaValue name) {
    int tag = jinja_place(name, "if|for|set|macro|break|continue|generation|endgeneration");
    if (tag == 0) jinja_if(j);
    if (tag == 1) jinja_for(j);
    if (tag == 2) jinja_set(j);
    if (tag == 3) jinja_macro(j);
    if (tag < 0) jinja_fail(j, "the tag %.*s", NAMED(name));
    if (tag < 4) return;
    jinja_close(j, "%}");
    if (tag > 5 || j->skip) return;
    j->ended = tag == 4 ? RUN_BREAK : RUN_CONTINUE;
    j->skip++;
}

// Writes the text up to the next tag. White space before the tag goes: all of it before a '-', and the
// indentation of a line that begins with {% or {#.
static void jinja_plain(Jinja *j) {
    const char *from = j->p, *tag = from;
    while (*tag && (tag[0] != '{' || !tag[1] || !strchr("{%#", tag[1]))) tag++;
    const char *to = j->p = tag;
    if (*tag && tag[2] == '-') {
        while (to > from && isspace((unsigned char)to[-1])) to--;
    } else if (*tag && tag[1] != '{' && tag[2] != '+') {
        while (to > from && (to[-1] == ' ' || to[-1] == '\t')) to--;
        if (to > j->tp->source && to[-1] != '\n') to = tag;
    }
    jinja_spend(j, (size_t)(tag - from));
    jinja_put(j, jinja_own(from, (size_t)(to - from)));
}

// Runs up to a tag that is one of `stops`, "a|b", and returns its name; what stands behind the name is not read.
// stops "": up to the end of the program.
static JinjaValue jinja_block(Jinja *j, const char *stops) {
    JinjaValue tag = undefined;
    jinja_nest(j);
    for (jinja_plain(j); *j->p; jinja_plain(j)) {
        char kind = j->p[1];
        j->p += 2 + (j->p[2] == '-' || j->p[2] == '+');
        if (kind == '#') {                                  // a comment
            const char *end = strstr(j->p, "#}");
            if (!end) jinja_fail(j, "a comment without its end");
            jinja_spend(j, (size_t)(end - j->p));
            j->p = end - (end > j->p && strchr("+-", end[-1]));
            jinja_close(j, "#}");
        } else if (kind == '{') {
            jinja_put(j, jinja_written(j, jinja_expression(j)));
            jinja_close(j, "}}");
        } else {
            tag = jinja_maybe_name(j);
            if (*stops && jinja_is(tag, stops)) break;
            jinja_tag(j, tag);
        }
    }
    if (*stops && !*j->p) jinja_fail(j, "the program ends before %.*s", (int)strcspn(stops, "|"), stops);
    j->depth--;
    return tag;
}

// ==================================================================================================== RENDERING
// Appends "\n</think>\n\n" and what has to stand before it, where a reply without thoughts is asked of a program
// that writes thoughts and does not know enable_thinking.
static void close_thought(Jinja *j) {
    size_t n = arrlenu(j->out);
    const char *open = "<think>\n";
    if (!strstr(j->tp->source, "</think>") || strstr(j->tp->source, "enable_thinking")) return;
    if (n < 8 || memcmp(j->out + n - 8, open, 8)) jinja_put(j, jinja_string(open));
    jinja_put(j, jinja_string("\n</think>\n\n"));
}

// Gives the program its variables.
static void set_variables(Jinja *j, const Message *m, int n, int how) {
    JinjaValue messages = jinja_table(j, J_LIST);
    for (int i = 0; i < n; i++) {
        JinjaValue message = jinja_table(j, J_DICT), content = jinja_string(m[i].content);
        uint16_t *from = jinja_memory(j, content.n * sizeof *from);
        for (size_t k = 0; k < content.n; k++) from[k] = (uint16_t)(1 + i % UINT16_MAX);
        content.from = from;
        jinja_enter(j, message.t, "role", jinja_string(m[i].role));
        jinja_enter(j, message.t, "content", content);
        jinja_push(j, messages, message);
    }
    jinja_scope(j, NULL);
    j->globals = j->scope;
    jinja_enter(j, j->globals, "messages", messages);
    jinja_enter(j, j->globals, "tools", (JinjaValue){ .kind = J_NONE });
    jinja_enter(j, j->globals, "documents", (JinjaValue){ .kind = J_NONE });
    jinja_enter(j, j->globals, "add_generation_prompt", jinja_bool(how & RENDER_PROMPT));
    const Tokenizer *t = j->tp->t;
    const int role[] = { tokenizer_bos(t), tokenizer_eos(t) };
    for (int k = 0, len; k < 2; k++)
        if (role[k] >= 0)
            jinja_enter(j, j->globals, k ? "eos_token" : "bos_token", jinja_string(tokenizer_text(t, role[k], &len)));
    if (how & RENDER_NO_THINK) jinja_enter(j, j->globals, "enable_thinking", jinja_bool(0));
}

// Runs the program. Returns 0, or -1 where it was stopped.
static int jinja_run(Jinja *j, const Message *m, int n, int how) {
    if (setjmp(j->stopped)) return -1;
    set_variables(j, m, n, how);
    jinja_block(j, "");
    int all_of_it = RENDER_NO_THINK | RENDER_PROMPT;
    if ((how & all_of_it) == all_of_it) close_thought(j);
    return 0;
}

// See template.h. What may be spent grows with the dialogue.
char *template_render(const Template *tp, const Message *m, int n, int how, size_t *size, uint16_t **from,
                      char err[512]) {
    size_t all = 0;
    for (int i = 0; i < n; i++) all += strlen(m[i].content);
    Jinja j = { .tp = tp, .p = tp->source, .arena = arena_new(), .err = err,
                .most_work = JINJA_WORK + JINJA_WORK_MESSAGE * (size_t)n + JINJA_WORK_BYTE * all };
    char *text = NULL;
    if (!jinja_run(&j, m, n, how)) {
        *size = arrlenu(j.out);
        text = copy_bytes(j.out ? j.out : "", *size);
        if (from) *from = xcalloc(*size + 1, sizeof **from);
        if (from && *size) memcpy(*from, j.from, *size * sizeof **from);
    }
    arrfree(j.out);
    arrfree(j.from);
    arena_free(j.arena);
    return text;
}

// ==================================================================================================== IDS
// Where message i, whose reply has ids, stands whole in a text: its bytes are [*from_at, *to). A blank that the
// ids begin with, and the content does not, belongs to the reply. Returns 1 when it stands there, behind `least`.
static int reply_place(const Template *tp, const Message *m, int i, const char *text, const uint16_t *from,
                       size_t n, size_t least, size_t *from_at, size_t *to) {
    uint16_t mark = (uint16_t)(1 + i % UINT16_MAX);
    size_t a = least, size = strlen(m->content);
    int len;
    while (a < n && from[a] != mark) a++;
    if (!size || a + size > n || memcmp(text + a, m->content, size)) return 0;
    for (size_t k = a; k < a + size; k++)
        if (from[k] != mark) return 0;
    *to = a + size;
    const char *first = tokenizer_bytes(tp->t, m->ids[0], &len);
    int blank = len > 0 && *first == ' ' && *m->content != ' ';
    *from_at = a - (blank && a > least && text[a - 1] == ' ' && !from[a - 1]);
    return 1;
}

// See template.h. Replies that stand whole in the text get the ids that the model made; what lies between them is
// encoded.
int *template_ids(const Template *tp, const Message *m, int n, int how, char err[512]) {
    size_t size, p = 0, a, b;
    uint16_t *from;
    int *ids = NULL, bos = tokenizer_bos(tp->t);
    char *text = template_render(tp, m, n, how, &size, &from, err);
    if (!text) return NULL;
    for (int i = 0; i <= n; i++) {
        a = b = size;
        if (i < n && (!m[i].n_ids || !reply_place(tp, &m[i], i, text, from, size, p, &a, &b))) continue;
        if (a > p) ids = encode_rendered(tp->t, text + p, how & RENDER_TRUST ? NULL : from + p, a - p, !p, ids);
        if (i < n) memcpy(arraddnptr(ids, m[i].n_ids), m[i].ids, (size_t)m[i].n_ids * sizeof *ids);
        p = b;
    }
    if (tokenizer_adds_bos(tp->t) && (!arrlen(ids) || ids[0] != bos)) arrins(ids, 0, bos);
    free(text);
    free(from);
    if (!arrlen(ids)) fault(err, "the chat template writes nothing");
    return ids;
}

// ==================================================================================================== LOADING
// The templates that have a name, and the token without which one makes no sense. "none" stands for a folder
// without one.
typedef struct { const char *name, *needs, *source; } NamedTemplate;
static const NamedTemplate named_templates[] = {
    { "none", "",
      "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %}{{ '\\n' }}{% endif %}{% endfor %}" },
    { "chatml", "<|im_end|>",
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}" },
    { "llama3", "<|eot_id|>",
      "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
      "{{ m.content | trim }}<|eot_id|>{% endfor %}"
      "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}" },
    { "llama2", "</s>",
      "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if m.role == 'user' %}"
      "{% set system = loop.previtem.content if loop.index == 2 and loop.previtem.role == 'system' else '' %}"
      "{% set words = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m.content if system else m.content %}"
      "{{ bos_token }}[INST] {{ words.strip() }} [/INST]{% else %} {{ m.content.strip() }} {{ eos_token }}"
      "{% endif %}{% endfor %}" },
    { "mistral", "[/INST]",
      "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
      "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
      "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}" },
    { "zephyr", "</s>",
      "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
      "{% if add_generation_prompt %}<|assistant|>\n{% endif %}" },
};
enum { NAMED_TEMPLATES = sizeof named_templates / sizeof *named_templates };

void template_free(Template *tp) {
    if (!tp) return;
    arrfree(tp->stop);
    free(tp->no_system);
    free(tp->name);
    free(tp->source);
    free(tp);
}

// The program of a folder: chat_template.jinja, else that of tokenizer_config.json, a text, or a list of {name,
// template} of which "default" counts. Returns a copy, "" when there is none, NULL and err when a file is broken.
static char *folder_program(const char *dir, char err[512]) {
    char file[1200], *program = NULL;
    size_t n;
    snprintf(file, sizeof file, "%.1100s/chat_template.jinja", dir);
    if (file_exists(file)) return read_plain_text(file, &n, err);
    snprintf(file, sizeof file, "%.1100s/tokenizer_config.json", dir);
    if (!file_exists(file)) return copy_text("");
    Json *config = json_read(file, MOST_TEXT, err);
    if (!config) return NULL;
    const Json *c = json_get(config, "chat_template"), *list = c;
    for (int i = 0; json_is(list, JSON_ARRAY) && i < list->n; i++)
        if (!strcmp(json_text(&list->item[i], "name"), "default")) c = json_get(&list->item[i], "template");
    if (json_none(list)) program = copy_text("");
    else if (json_is(c, JSON_ARRAY)) fault(err, "%s: chat_template is a list without a \"default\"", file);
    else if (!json_is(c, JSON_STRING)) fault(err, "%s: chat_template is neither a text nor a list", file);
    else if (strlen(c->str) != c->len) fault(err, "%s: chat_template has a NUL byte", file);
    else program = copy_bytes(c->str, c->len);
    json_free(config);
    return program;
}

// Takes a copy of the program. 0, or -1 and err.
static int template_take(Template *tp, const char *program, char err[512]) {
    char *to = tp->source = copy_text(program);
    if (strlen(program) > JINJA_SOURCE)
        return fault(err, "%zu bytes, at most %d are read", strlen(program), JINJA_SOURCE);
    for (const char *s = program; *s; s++) {                // Jinja knows one kind of line break ...
        if (*s == '\r' && s[1] == '\n') s++;
        *to++ = *s == '\r' ? '\n' : *s;
    }
    to -= to > tp->source && to[-1] == '\n';                // ... and drops the last one
    *to = 0;
    return 0;
}

// A dialogue by which a template is tried. Without its first message it has no system message.
static const Message short_dialogue[] = {
    { .role = "system", .content = "s" },
    { .role = "user", .content = "u" },
    { .role = "assistant", .content = "a" },
    { .role = "user", .content = "v" },
};

// What the program writes for n messages from m on, and a prompt. *end is the place behind the last byte in it of
// message `mark` - 1 of them; 0: it has none. NULL and err.
static char *template_probe(const Template *tp, const Message *m, int n, int mark, size_t *end, char err[512]) {
    uint16_t *from = NULL;
    char *text = template_render(tp, m, n, RENDER_PROMPT, end, &from, err);
    while (text && *end && from[*end - 1] != mark) --*end;
    free(from);
    return text;
}

// Tries the program. stop: it ends a reply with the token behind the words of one, and other tokens that end one go
// with it; no_system: does it write a system message? own_system: has it one, which an empty one keeps away? 0, or -1
// and err when it cannot write a dialogue.
static int template_try(Template *tp, char err[512]) {
    static const char *const stops[] = {
        "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<｜end▁of▁sentence｜>",
    };
    const Message *m = short_dialogue, empty[] = { { .role = "system", .content = "" }, m[1] };
    char why[512] = "it writes the words of a system message nowhere";
    size_t end, words, system;
    char *text = template_probe(tp, m + 1, 3, 2, &end, err);
    if (!text) return -1;
    while (end && isspace((unsigned char)text[end])) end++;
    int *ids = end ? encode_at(tp->t, text + end, strlen(text + end), 1, 0, NULL) : NULL;
    if (arrlen(ids) && tokenizer_flags(tp->t, *ids) & TOKEN_GUARDED) arrput(tp->stop, *ids);
    for (size_t k = 0; k < sizeof stops / sizeof *stops; k++) {
        int id = text_id(tp->t, stops[k], strlen(stops[k]));
        if (id >= 0) arrput(tp->stop, id);
    }
    arrfree(ids);
    free(text);

    text = template_probe(tp, m + 1, 1, 1, &words, err);
    if (!text) return -1;
    char *with = template_probe(tp, m, 2, 1, &system, why);
    if (!with || !system) tp->no_system = copy_text(why);
    char *less = tp->no_system ? NULL : template_probe(tp, empty, 2, 2, &system, why);
    tp->own_system = less && strlen(less) < strlen(text);
    free(text);
    free(with);
    free(less);
    return words ? 0 : fault(err, "it writes the words of a message nowhere");
}

// Today, or the day of KVCOMP_DATE. 0, or -1 and err.
static int template_date(struct tm *day, char err[512]) {
    const char *date = getenv("KVCOMP_DATE");
    time_t seconds = time(NULL);
    localtime_r(&seconds, day);
    const char *end = date ? strptime(date, "%Y-%m-%d", day) : "";
    if (!end || *end || (date && strlen(date) != 10))
        return fault(err, "KVCOMP_DATE: expected YYYY-MM-DD, found %.40s", date);
    day->tm_hour = 12;
    day->tm_min = day->tm_sec = 0;
    day->tm_isdst = -1;
    mktime(day);                                            // fills in the day of the week
    day->tm_hour = 0;
    return 0;
}

// See template.h. A program is tried on a short dialogue: what it cannot write is found now.
Template *template_load(const char *dir, const char *name, const Tokenizer *t, char err[512]) {
    char why[512] = "", reason[512];
    const NamedTemplate *named = NULL;
    char *program = NULL;
    size_t n;
    for (int k = 0; k < NAMED_TEMPLATES && name; k++)
        if (!strcmp(named_templates[k].name, name)) named = &named_templates[k];
    if (!named) program = name ? read_plain_text(name, &n, why) : folder_program(dir, why);
    if (program && !*program) named = named_templates;

    Template *tp = xcalloc(1, sizeof *tp);
    tp->t = t;
    tp->name = copy_text(named ? named->name : name ? name : "the model's own");
    int bad = (!named && !program) || template_date(&tp->today, why);
    if (!bad && named && *named->needs && text_id(t, named->needs, strlen(named->needs)) < 0)
        bad = fault(why, "chat template %s needs the token %s, which this tokenizer does not have", named->name,
                    named->needs);
    if (!bad) {
        bad = template_take(tp, named ? named->source : program, reason) || template_try(tp, reason);
        if (bad) fault(why, "this chat template is not supported: %.300s", reason);
    }
    free(program);
    if (!bad) return tp;
    template_free(tp);
    fault(err, "%.320s (--chat-template takes a file or chatml llama3 llama2 mistral zephyr none; or use --raw)", why);
    return NULL;
}

// ---- Does the tokenizer belong to the model?
// The first id without a row in the embedding that the template writes, or -1 when all have rows.
static int template_stray_id(const Template *tp, const Config *c) {
    int stray = -1, skip = tp->no_system != NULL;
    char err[512];
    for (int quiet = 0; quiet < 2 && stray < 0; quiet++) {
        int how = RENDER_PROMPT | (quiet ? RENDER_NO_THINK : 0);
        int *ids = template_ids(tp, short_dialogue + skip, 4 - skip, how, err);
        int n = (int)arrlen(ids), known = ids_with_rows(c, ids, n);
        if (known < n) stray = ids[known];
        arrfree(ids);
    }
    return stray;
}

int tokenizer_fits(const Tokenizer *t, const Template *tp, const Config *c, char err[512]) {
    int vocab = tokenizer_size(t) - 1;
    while (vocab >= c->V && (tokenizer_flags(t, vocab) & (TOKEN_MODEL | TOKEN_ADDED)) != TOKEN_MODEL) vocab--;
    const struct { const char *what; int id; } needed[] = {
        { "the tokenizer's vocabulary goes up to", vocab },
        { "the tokenizer's BOS is", tokenizer_adds_bos(t) ? tokenizer_bos(t) : -1 },
        { "the tokenizer's EOS is", tokenizer_eos(t) },
        { "the tokenizer's unknown token is", tokenizer_unk(t) },
        { "the chat template writes", tp ? template_stray_id(tp, c) : -1 },
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (needed[i].id >= c->V)
            return fault(err, "%.300s: %s token id %d, the embedding has %d rows: tokenizer and model do not "
                         "belong together", c->dir, needed[i].what, needed[i].id, c->V);
    }
    return 0;
}
