// lib/template.c - see template.h.
#define _GNU_SOURCE
#include "template.h"
#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>
#include <stb/stb_ds.h>

// ==================================================================================================== THE LANGUAGE
// What follows runs the part of Jinja that chat templates use: {{ }}, if, for, set, macro, break, continue,
// the operators, and the functions, methods, filters and tests named below. A program is read once, into a
// tree. What it may not hold is refused then; what it may not do is refused when it does it, with the line.
// Line breaks and indentation around tags go as transformers asks for (trim_blocks, lstrip_blocks).
//
// Every byte of a text knows where it comes from: from the program, or from which message. Cutting, joining
// and replacing keep that, so that it is known of every byte of the output.
enum { J_UNDEFINED, J_NONE, J_BOOL, J_INT, J_TEXT, J_LIST, J_DICT, J_FUNCTION, J_MACRO };
static const char *const jinja_kinds[] = {
    "something undefined", "none", "a bool", "a number", "a text", "a list", "a dict", "a function", "a macro"
};

enum {                          // bounds, far above what a real program takes
    JINJA_SOURCE = 1 << 20,     // bytes of a program
    JINJA_PARTS  = 200000,      // parts of its tree
    JINJA_NAMES  = 1000,        // different names in it
    JINJA_NESTED = 60,          // brackets and blocks inside one another
    JINJA_DEPTH  = 250,         // parts inside one another, those of called macros included
    JINJA_STEPS  = 1000000,     // parts computed, and variables passed over in search of one; and for each
    JINJA_STEPS_MESSAGE = 20000,        // message so many more
    JINJA_BYTES  = 32 << 20,    // of values made and texts looked through; for each message, and for each
    JINJA_BYTES_MESSAGE = 100000,       // byte of one, so many more
    JINJA_BYTES_BYTE = 200,
    JINJA_NUMBER = 1000000000   // the largest number
};

enum {                          // parts of an expression: what a, b, c and d are
    P_VALUE,                    // a constant
    P_NAME,                     // a variable
    P_LIST, P_DICT,             // a: the members, in `next`; of a dict in turn key and value
    P_MEMBER,                   // a.name
    P_INDEX,                    // a[b]
    P_SLICE,                    // a[b:c:d], each of these may be NULL
    P_CALL,                     // name(args): a NULL; a.name(args)
    P_FILTER,                   // a | name(args); the arguments are b, in `next`
    P_TEST,                     // a is name args
    P_NOT, P_MINUS,             // of a
    P_AND, P_OR,                // of a and b
    P_BINARY,                   // a OP b
    P_IF,                       // b if a else c
    P_NAMED,                    // name=a, an argument
    // Parts that are run
    P_TEXT,                     // writes a constant text
    P_PRINT,                    // writes a
    P_BRANCH,                   // if a is true, or NULL: runs b; else the branch c
    P_FOR,                      // for a (one or two names) in b if c: runs d
    P_SET,                      // the variable a, or the member a, becomes b; b NULL: what c writes
    P_DEFINE,                   // the macro `name`: arguments a, defaults in their b; runs d
    P_BREAK, P_CONTINUE
};

enum { OP_EQUAL, OP_UNEQUAL, OP_LESS, OP_LESS_EQUAL, OP_MORE, OP_MORE_EQUAL, OP_IN, OP_NOT_IN,
       OP_JOIN, OP_PLUS, OP_MINUS, OP_TIMES, OP_WHOLE, OP_REST };
static const char *const jinja_ops[] = { "==", "!=", "<", "<=", ">", ">=", "in", "not in",
                                         "~", "+", "-", "*", "//", "%" };

typedef struct JinjaNode {
    int kind;                   // P_*
    int op;                     // OP_*; of a constant its J_*; of a test 1: `is not`
    const char *name;           // of a variable, member, function, filter, test, argument; see jinja_intern
    const char *at;             // its place in the source
    const char *s;              // a constant text,
    size_t n;                   // its bytes
    long i;                     // a constant number or bool
    struct JinjaNode *a, *b, *c, *d;
    struct JinjaNode *next;     // the next one of a list
} JinjaNode;

// ---- Reading a program
typedef struct {
    const char *src, *p, *end;  // the program, the place that is read, the program's end
    Template *tp;               // takes tree and names
    int parts, nested;
    const char *tag;            // the name of the tag that ended the last block
    int failed;                 // 1: err is set, and nothing is left to read
    char *err;                  // (512) the first reason, with its line
} JinjaReader;

// Writes the line of a place and the reason.
static void jinja_reason(char *err, const char *src, const char *at, const char *why) {
    int line = 1;
    for (const char *s = src; s < at; s++) line += *s == '\n';
    snprintf(err, 512, "line %d: %s", line, why);
}

// Stops the reader.
KV_PRINTF(2, 3) static void jinja_refuse(JinjaReader *r, const char *fmt, ...) {
    char why[256];
    va_list ap;
    if (r->failed) return;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    jinja_reason(r->err, r->src, r->p, why);
    r->failed = 1;
    r->p = r->end;
}

static JinjaNode *jinja_part(JinjaReader *r, int kind, JinjaNode *a, JinjaNode *b) {
    JinjaNode *x = arena_take(r->tp->arena, sizeof *x);
    if (++r->parts > JINJA_PARTS) jinja_refuse(r, "the program has more than %d parts", JINJA_PARTS);
    *x = (JinjaNode){ .kind = kind, .at = r->p, .a = a, .b = b };
    return x;
}

static int jinja_name_byte(int c) { return isalnum(c) || c == '_'; }

static void jinja_blanks(JinjaReader *r) {
    while (isspace((unsigned char)*r->p)) r->p++;
}

// Does this operator or bracket stand here? Then it is read. A sign that belongs to the end of a tag, as in
// -%}, is no operator.
static int jinja_op(JinjaReader *r, const char *op) {
    size_t n = strlen(op);
    jinja_blanks(r);
    if (strncmp(r->p, op, n)) return 0;
    if (strchr("+-", *op) && (r->p[1] == '%' || r->p[1] == '}') && r->p[2] == '}') return 0;
    if (*op == '%' && r->p[1] == '}') return 0;
    if (!strcmp(op, "=") && r->p[1] == '=') return 0;
    r->p += n;
    return 1;
}

// The same for a word.
static int jinja_word(JinjaReader *r, const char *word) {
    size_t n = strlen(word);
    jinja_blanks(r);
    if (strncmp(r->p, word, n) || jinja_name_byte((unsigned char)r->p[n])) return 0;
    r->p += n;
    return 1;
}

static void jinja_want(JinjaReader *r, const char *op) {
    if (!jinja_op(r, op)) jinja_refuse(r, "expected '%s', found '%.12s'", op, r->p);
}

// The one copy of a name, so that names are equal when their addresses are.
static const char *jinja_intern(Template *tp, const char *s, size_t n) {
    for (int i = 0; i < (int)arrlen(tp->names); i++)
        if (!strncmp(tp->names[i], s, n) && !tp->names[i][n]) return tp->names[i];
    arrput(tp->names, copy_bytes(s, n));
    return arrlast(tp->names);
}

// Reads a name; "" when none stands here.
static const char *jinja_name(JinjaReader *r) {
    jinja_blanks(r);
    const char *from = r->p;
    if (isdigit((unsigned char)*from)) return "";
    while (jinja_name_byte((unsigned char)*r->p)) r->p++;
    if (r->p == from) return "";
    if (arrlen(r->tp->names) >= JINJA_NAMES) {
        jinja_refuse(r, "the program has more than %d names", JINJA_NAMES);
        return "";
    }
    return jinja_intern(r->tp, from, (size_t)(r->p - from));
}

// Reads the end of a tag, %} or }} or #}, and the white space behind it that goes: all of it behind a '-',
// otherwise one line break, but not behind }}.
static void jinja_close(JinjaReader *r, const char *end) {
    jinja_blanks(r);
    int all = *r->p == '-', none = *r->p == '+';
    r->p += all || none;
    if (strncmp(r->p, end, 2)) {
        jinja_refuse(r, "expected '%s', found '%.12s'", end, r->p);
        return;
    }
    r->p += 2;
    if (all) jinja_blanks(r);
    else if (*end != '}' && !none && *r->p == '\n') r->p++;
}

// Reads the texts in quotes that stand here; neighbours are one text.
static JinjaNode *jinja_quoted(JinjaReader *r) {
    static const char code[] = "ntr\\'\"", means[] = "\n\t\r\\'\"";
    JinjaNode *x = jinja_part(r, P_VALUE, NULL, NULL);
    char *text = NULL;
    while (!r->failed && (*r->p == '\'' || *r->p == '"')) {
        char quote = *r->p++;
        for (; *r->p && *r->p != quote; r->p++) {
            char c = *r->p;
            if (c == '\\' && r->p[1]) {
                const char *at = strchr(code, *++r->p);
                if (!at) jinja_refuse(r, "the escape \\%.1s", r->p);
                if (!at) break;
                c = means[at - code];
            }
            arrput(text, c);
        }
        if (!*r->p) jinja_refuse(r, "a text without its closing quote");
        else r->p++;
        jinja_blanks(r);
    }
    x->op = J_TEXT;
    x->n = arrlenu(text);
    x->s = memcpy(arena_take(r->tp->arena, x->n + 1), text ? text : "", x->n);
    arrfree(text);
    return x;
}

// ---- Reading expressions
static JinjaNode *jinja_expression(JinjaReader *r);
static JinjaNode *jinja_unary(JinjaReader *r, int with_filters);

// Reads what stands between brackets up to `end`: values, for a call also name=value, for a dict key:value.
static JinjaNode *jinja_members(JinjaReader *r, const char *end, int dict) {
    JinjaNode *first = NULL, **last = &first;
    while (!r->failed && !jinja_op(r, end)) {
        const char *from = r->p, *key = *end == ')' ? jinja_name(r) : "";
        int named = *key && jinja_op(r, "=");
        if (!named && !r->failed) r->p = from;
        *last = jinja_expression(r);
        if (r->failed) break;
        if (named) {
            *last = jinja_part(r, P_NAMED, *last, NULL);
            (*last)->name = key;
        }
        last = &(*last)->next;
        if (dict) {
            jinja_want(r, ":");
            *last = jinja_expression(r);
            last = &(*last)->next;
        }
        if (!jinja_op(r, ",") && *r->p != *end) jinja_want(r, end);
    }
    return first;
}

// A literal, a variable, a call of a function, a list, a dict or brackets
static JinjaNode *jinja_primary(JinjaReader *r) {
    jinja_blanks(r);
    JinjaNode *x = NULL;
    if (*r->p == '\'' || *r->p == '"') return jinja_quoted(r);
    if (isdigit((unsigned char)*r->p)) {
        x = jinja_part(r, P_VALUE, NULL, NULL);
        x->op = J_INT;
        for (; isdigit((unsigned char)*r->p); r->p++) {
            x->i = 10 * x->i + *r->p - '0';
            if (x->i > JINJA_NUMBER) jinja_refuse(r, "a number above %d", JINJA_NUMBER);
            if (r->failed) break;
        }
        return x;
    }
    if (jinja_op(r, "(")) {
        x = jinja_expression(r);
        if (jinja_op(r, ",")) {
            x->next = jinja_members(r, ")", 0);
            return jinja_part(r, P_LIST, x, NULL);
        }
        jinja_want(r, ")");
        return x;
    }
    if (jinja_op(r, "[")) return jinja_part(r, P_LIST, jinja_members(r, "]", 0), NULL);
    if (jinja_op(r, "{")) return jinja_part(r, P_DICT, jinja_members(r, "}", 1), NULL);

    static const struct { const char *name; int kind, value; } constants[] = {
        { "true", J_BOOL, 1 }, { "false", J_BOOL, 0 }, { "none", J_NONE, 0 },
        { "True", J_BOOL, 1 }, { "False", J_BOOL, 0 }, { "None", J_NONE, 0 },
    };
    x = jinja_part(r, P_NAME, NULL, NULL);
    x->name = jinja_name(r);
    if (!*x->name) jinja_refuse(r, "expected a value, found '%.12s'", r->p);
    for (size_t k = 0; k < sizeof constants / sizeof *constants; k++) {
        if (strcmp(x->name, constants[k].name)) continue;
        x->kind = P_VALUE;
        x->op = constants[k].kind;
        x->i = constants[k].value;
    }
    if (x->kind == P_NAME && jinja_op(r, "(")) {
        x->kind = P_CALL;
        x->b = jinja_members(r, ")", 0);
    }
    return x;
}

// Reads what stands behind '[': an index, or a slice.
static JinjaNode *jinja_index(JinjaReader *r, JinjaNode *of) {
    JinjaNode *x = jinja_part(r, P_INDEX, of, NULL);
    if (!jinja_op(r, ":")) {
        x->b = jinja_expression(r);
        if (jinja_op(r, "]")) return x;
        jinja_want(r, ":");
    }
    x->kind = P_SLICE;
    if (jinja_op(r, "]")) return x;
    if (!jinja_op(r, ":")) {
        x->c = jinja_expression(r);
        if (jinja_op(r, "]")) return x;
        jinja_want(r, ":");
    }
    if (jinja_op(r, "]")) return x;
    x->d = jinja_expression(r);
    jinja_want(r, "]");
    return x;
}

// A value and the members, methods and calls that hang on it.
static JinjaNode *jinja_postfix(JinjaReader *r, JinjaNode *x) {
    while (!r->failed) {
        if (jinja_op(r, ".")) {
            x = jinja_part(r, P_MEMBER, x, NULL);
            x->name = jinja_name(r);
            if (!*x->name) jinja_refuse(r, "expected a name, found '%.12s'", r->p);
            if (!jinja_op(r, "(")) continue;
            x->kind = P_CALL;
            x->b = jinja_members(r, ")", 0);
        } else if (jinja_op(r, "[")) {
            x = jinja_index(r, x);
        } else {
            break;
        }
    }
    return x;
}

// The filters and tests behind a value. A test may have one argument without brackets.
static JinjaNode *jinja_filters(JinjaReader *r, JinjaNode *x) {
    while (!r->failed) {
        int filter = jinja_op(r, "|"), no = 0;
        if (!filter && !jinja_word(r, "is")) break;
        if (!filter) no = jinja_word(r, "not");
        x = jinja_part(r, filter ? P_FILTER : P_TEST, x, NULL);
        x->op = no;
        x->name = filter || !jinja_word(r, "in") ? jinja_name(r) : jinja_intern(r->tp, "in", 2);
        if (!*x->name) jinja_refuse(r, "expected a name, found '%.12s'", r->p);
        jinja_blanks(r);
        static const char *const follows[] = { "and", "or", "else", "if", "is", "not", "in" };
        int value = jinja_name_byte((unsigned char)*r->p) || (*r->p && strchr("'\"[", *r->p));
        for (size_t k = 0; k < sizeof follows / sizeof *follows; k++) {
            const char *from = r->p;
            if (jinja_word(r, follows[k])) value = 0;
            r->p = from;
        }
        if (jinja_op(r, "(")) x->b = jinja_members(r, ")", 0);
        else if (!filter && value) x->b = jinja_postfix(r, jinja_primary(r));
    }
    return x;
}

static JinjaNode *jinja_unary(JinjaReader *r, int with_filters) {
    JinjaNode *x;
    if (++r->nested > JINJA_NESTED) jinja_refuse(r, "more than %d brackets and blocks", JINJA_NESTED);
    if (!r->failed && jinja_op(r, "-")) x = jinja_part(r, P_MINUS, jinja_unary(r, 0), NULL);
    else x = jinja_primary(r);
    r->nested--;
    x = jinja_postfix(r, x);
    return with_filters ? jinja_filters(r, x) : x;
}

// The operators between two values by how tightly they bind, loosest first; `not` stands between `and` and
// the comparisons.
enum { LEVEL_OR, LEVEL_AND, LEVEL_NOT, LEVEL_COMPARISON, LEVEL_SUM, LEVEL_JOIN, LEVEL_PRODUCT, LEVELS };
static const struct { const char *name; int level, op; } jinja_operators[] = {
    { "==", LEVEL_COMPARISON, OP_EQUAL }, { "!=", LEVEL_COMPARISON, OP_UNEQUAL },
    { "<=", LEVEL_COMPARISON, OP_LESS_EQUAL }, { ">=", LEVEL_COMPARISON, OP_MORE_EQUAL },
    { "<", LEVEL_COMPARISON, OP_LESS }, { ">", LEVEL_COMPARISON, OP_MORE },
    { "+", LEVEL_SUM, OP_PLUS }, { "-", LEVEL_SUM, OP_MINUS }, { "~", LEVEL_JOIN, OP_JOIN },
    { "*", LEVEL_PRODUCT, OP_TIMES }, { "//", LEVEL_PRODUCT, OP_WHOLE }, { "%", LEVEL_PRODUCT, OP_REST },
};

// The operator of this level that stands here, or -1.
static int jinja_operator(JinjaReader *r, int level) {
    const char *from = r->p;
    if (level == LEVEL_OR && jinja_word(r, "or")) return 0;
    if (level == LEVEL_AND && jinja_word(r, "and")) return 0;
    if (level == LEVEL_COMPARISON && jinja_word(r, "in")) return OP_IN;
    if (level == LEVEL_COMPARISON && jinja_word(r, "not")) {
        if (jinja_word(r, "in")) return OP_NOT_IN;
        r->p = from;
    }
    for (size_t k = 0; k < sizeof jinja_operators / sizeof *jinja_operators; k++)
        if (jinja_operators[k].level == level && jinja_op(r, jinja_operators[k].name)) return jinja_operators[k].op;
    return -1;
}

// An expression of the operators that bind at `level` or tighter. a < b < c is a < b and b < c.
static JinjaNode *jinja_binary(JinjaReader *r, int level) {
    JinjaNode *x, *left = NULL;
    int op;
    if (level == LEVELS) return jinja_unary(r, 1);
    if (level == LEVEL_NOT && jinja_word(r, "not")) {
        if (++r->nested > JINJA_NESTED) jinja_refuse(r, "more than %d brackets and blocks", JINJA_NESTED);
        x = r->failed ? NULL : jinja_binary(r, LEVEL_NOT);
        r->nested--;
        return jinja_part(r, P_NOT, x, NULL);
    }
    x = jinja_binary(r, level + 1);
    while (!r->failed && (op = jinja_operator(r, level)) >= 0) {
        JinjaNode *right = jinja_binary(r, level + 1), *whole = jinja_part(r, P_BINARY, left ? left : x, right);
        whole->op = op;
        if (level <= LEVEL_AND) whole->kind = level == LEVEL_OR ? P_OR : P_AND;
        x = left ? jinja_part(r, P_AND, x, whole) : whole;
        if (level == LEVEL_COMPARISON) left = right;
    }
    return x;
}

// a, or `a if c else b`
static JinjaNode *jinja_expression(JinjaReader *r) {
    if (++r->nested > JINJA_NESTED) jinja_refuse(r, "more than %d brackets and blocks", JINJA_NESTED);
    JinjaNode *x = jinja_binary(r, LEVEL_OR);
    while (!r->failed && jinja_word(r, "if")) {
        x = jinja_part(r, P_IF, jinja_binary(r, LEVEL_OR), x);
        if (jinja_word(r, "else")) x->c = jinja_expression(r);
    }
    r->nested--;
    return x;
}

// ---- Reading tags
static JinjaNode *jinja_block(JinjaReader *r, const char *const *stops);

// {% if %} .. {% elif %} .. {% else %} .. {% endif %}
static JinjaNode *jinja_if(JinjaReader *r) {
    static const char *const endif[] = { "endif", "elif", "else", NULL };
    JinjaNode *first = NULL, **last = &first;
    do {
        JinjaNode *x = *last = jinja_part(r, P_BRANCH, NULL, NULL);
        if (!first->b || strcmp(r->tag, "else")) x->a = jinja_expression(r);
        jinja_close(r, "%}");
        x->b = jinja_part(r, P_TEXT, NULL, NULL);       // so that an empty block is a block
        x->b->next = jinja_block(r, endif);
        last = &x->c;
    } while (!r->failed && strcmp(r->tag, "endif"));
    jinja_close(r, "%}");
    return first;
}

// {% for a in list if c %} .. {% else %} .. {% endfor %}
static JinjaNode *jinja_for(JinjaReader *r) {
    static const char *const endfor[] = { "endfor", "else", NULL };
    JinjaNode *x = jinja_part(r, P_FOR, jinja_part(r, P_NAME, NULL, NULL), NULL);
    x->a->name = jinja_name(r);
    if (jinja_op(r, ",")) {
        x->a->next = jinja_part(r, P_NAME, NULL, NULL);
        x->a->next->name = jinja_name(r);
    }
    if (!jinja_word(r, "in")) jinja_refuse(r, "expected 'in', found '%.12s'", r->p);
    x->b = jinja_binary(r, LEVEL_OR);
    if (jinja_word(r, "if")) x->c = jinja_binary(r, LEVEL_OR);
    jinja_close(r, "%}");
    x->d = jinja_block(r, endfor);
    if (!r->failed && !strcmp(r->tag, "else")) {
        jinja_close(r, "%}");
        x->a->a = jinja_block(r, endfor);
    }
    jinja_close(r, "%}");
    return x;
}

// {% set a = value %}, {% set space.a = value %}, {% set a %} text {% endset %}
static JinjaNode *jinja_set(JinjaReader *r) {
    static const char *const endset[] = { "endset", NULL };
    JinjaNode *x = jinja_part(r, P_SET, jinja_part(r, P_NAME, NULL, NULL), NULL);
    x->a->name = jinja_name(r);
    if (jinja_op(r, ".")) {
        x->a = jinja_part(r, P_MEMBER, x->a, NULL);
        x->a->name = jinja_name(r);
    }
    if (jinja_op(r, "=")) x->b = jinja_expression(r);
    jinja_close(r, "%}");
    if (x->b || r->failed) return x;
    x->c = jinja_block(r, endset);
    jinja_close(r, "%}");
    return x;
}

// {% macro name(a, b=value) %} .. {% endmacro %}
static JinjaNode *jinja_macro(JinjaReader *r) {
    static const char *const endmacro[] = { "endmacro", NULL };
    JinjaNode *x = jinja_part(r, P_DEFINE, NULL, NULL), **last = &x->a;
    x->name = jinja_name(r);
    jinja_want(r, "(");
    while (!r->failed && !jinja_op(r, ")")) {
        *last = jinja_part(r, P_NAME, NULL, NULL);
        (*last)->name = jinja_name(r);
        if (!*(*last)->name) jinja_refuse(r, "expected a name, found '%.12s'", r->p);
        if (jinja_op(r, "=")) (*last)->b = jinja_expression(r);
        last = &(*last)->next;
        if (!jinja_op(r, ",") && *r->p != ')') jinja_want(r, ")");
    }
    jinja_close(r, "%}");
    x->d = jinja_block(r, endmacro);
    jinja_close(r, "%}");
    return x;
}

// Reads the text up to the next tag. White space before the tag goes: all of it before a '-', and the
// indentation of a line that begins with {% or {#.
static JinjaNode *jinja_plain(JinjaReader *r) {
    const char *from = r->p, *tag = from;
    while (*tag && (tag[0] != '{' || !tag[1] || !strchr("{%#", tag[1]))) tag++;
    const char *to = tag;
    if (*tag && tag[2] == '-') {
        while (to > from && isspace((unsigned char)to[-1])) to--;
    } else if (*tag && tag[1] != '{' && tag[2] != '+') {
        while (to > from && (to[-1] == ' ' || to[-1] == '\t')) to--;
        if (to > r->src && to[-1] != '\n') to = tag;
    }
    JinjaNode *x = jinja_part(r, P_TEXT, NULL, NULL);
    x->s = from;
    x->n = (size_t)(to - from);
    if (!r->failed) r->p = tag;
    return x;
}

// Reads a tag whose name is read; NULL when it leaves nothing to run.
static JinjaNode *jinja_tag(JinjaReader *r, const char *name) {
    if (!strcmp(name, "if")) return jinja_if(r);
    if (!strcmp(name, "for")) return jinja_for(r);
    if (!strcmp(name, "set")) return jinja_set(r);
    if (!strcmp(name, "macro")) return jinja_macro(r);
    int ends = !strcmp(name, "break"), on = !strcmp(name, "continue");
    int marks = !strcmp(name, "generation") || !strcmp(name, "endgeneration");
    if (!ends && !on && !marks) jinja_refuse(r, "the tag %.40s", name);
    jinja_close(r, "%}");
    return marks ? NULL : jinja_part(r, ends ? P_BREAK : P_CONTINUE, NULL, NULL);
}

// Reads up to a tag that is one of `stops`, and leaves its name in r->tag. What stands behind the name is
// not read. The parts are in `next` of the first one.
static JinjaNode *jinja_block(JinjaReader *r, const char *const *stops) {
    JinjaNode *first = NULL, **last = &first;
    if (++r->nested > JINJA_NESTED) jinja_refuse(r, "more than %d brackets and blocks", JINJA_NESTED);
    r->tag = "";
    while (!r->failed) {
        *last = jinja_plain(r);
        last = &(*last)->next;
        if (!*r->p) {
            if (*stops) jinja_refuse(r, "the program ends before %s", *stops);
            break;
        }
        char kind = r->p[1];
        r->p += 2 + (r->p[2] == '-' || r->p[2] == '+');
        if (kind == '#') {
            const char *end = strstr(r->p, "#}");
            if (!end) jinja_refuse(r, "a comment without its end");
            else r->p = end - (end > r->p && strchr("+-", end[-1]));
            jinja_close(r, "#}");
            continue;
        }
        if (kind == '{') {
            *last = jinja_part(r, P_PRINT, NULL, NULL);
            (*last)->a = jinja_expression(r);
            jinja_close(r, "}}");
        } else {
            const char *name = jinja_name(r), *const *stop = stops;
            while (*stop && strcmp(*stop, name)) stop++;
            r->tag = *stop;
            if (*stop) break;
            *last = jinja_tag(r, name);
        }
        if (*last) last = &(*last)->next;
    }
    r->nested--;
    return first;
}

// ---- Values
typedef struct JinjaValue JinjaValue;
typedef struct {
    size_t n, room;             // members; how many there is room for
    JinjaValue *item;           // (n)
    JinjaValue *key;            // (n) of a dict, texts; of arguments, undefined where they have no name
    int space;                  // 1: a namespace, the only table that {% set %} changes
} JinjaTable;
struct JinjaValue {
    int kind;                   // J_*
    long i;                     // a bool or a number
    const char *s;              // a text, without a NUL; the name of a function
    const uint16_t *from;       // (n) where its bytes come from, as in template_render; NULL: the program
    size_t n;                   // its bytes
    JinjaTable *t;              // a list or a dict; several values may share it
    const JinjaNode *macro;
};

typedef struct {
    const char *name;
    JinjaValue v;
} JinjaVariable;

typedef struct {                // a program that runs
    const Template *tp;
    Arena *arena;               // its values
    JinjaVariable *var;         // stb array; the variables of an inner scope stand behind, and hide
    int scope;                  // where the innermost scope begins in var
    int hidden, globals;        // var[globals..hidden) are of a macro's caller, which it does not see
    char *out;                  // stb array: the output
    uint16_t *from;             // stb array: where its bytes come from
    size_t bytes, most_bytes;   // taken so far, and at most
    size_t steps, most_steps;
    int depth;
    const char *at;             // the place of what is computed
    int failed;                 // 1: err is set, and everything returns
    char *err;                  // (512) the first reason, with its line
} Jinja;

enum { RUN_ON, RUN_BREAK, RUN_CONTINUE };

// Stops the program: the line and the reason go to err. Returns an undefined value.
KV_PRINTF(2, 3) static JinjaValue jinja_fail(Jinja *j, const char *fmt, ...) {
    char why[256];
    va_list ap;
    if (j->failed) return (JinjaValue){ 0 };
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    jinja_reason(j->err, j->tp->source, j->at, why);
    j->failed = 1;
    return (JinjaValue){ 0 };
}

// Counts a step over n bytes. Too many of either stop the program. Returns 1 when it goes on.
static int jinja_spend(Jinja *j, size_t n) {
    j->bytes += n;
    if (++j->steps > j->most_steps || j->bytes > j->most_bytes) jinja_fail(j, "the program takes too long");
    return !j->failed;
}

// n bytes that last as long as the program runs, or NULL.
static void *jinja_memory(Jinja *j, size_t n) {
    if (n > j->most_bytes || !jinja_spend(j, n + 64)) {
        jinja_fail(j, "the program takes too long");
        return NULL;
    }
    return arena_take(j->arena, n);
}

static JinjaValue jinja_bool(int x) { return (JinjaValue){ .kind = J_BOOL, .i = x != 0 }; }
static JinjaValue jinja_int(long x) { return (JinjaValue){ .kind = J_INT, .i = x }; }

// A text of the program's own, which stays where it is.
static JinjaValue jinja_own(const char *s, size_t n) { return (JinjaValue){ .kind = J_TEXT, .s = s, .n = n }; }
static JinjaValue jinja_string(const char *s) { return jinja_own(s, strlen(s)); }

// The bytes [a,b) of a text.
static JinjaValue jinja_cut(JinjaValue v, size_t a, size_t b) {
    v.s += a;
    if (v.from) v.from += a;
    v.n = b - a;
    return v;
}

static int jinja_is(JinjaValue v, const char *text) {
    return v.kind == J_TEXT && v.n == strlen(text) && !memcmp(v.s, text, v.n);
}

// Appends a text to the output.
static void jinja_put(Jinja *j, JinjaValue v) {
    if (!v.n || !jinja_spend(j, 3 * v.n)) return;
    memcpy(arraddnptr(j->out, v.n), v.s, v.n);
    uint16_t *from = arraddnptr(j->from, v.n);
    if (v.from) memcpy(from, v.from, v.n * sizeof *from);
    else memset(from, 0, v.n * sizeof *from);
}

// Collecting a text: what is put between a begin and its end is a value, and no output.
typedef struct { char *out; uint16_t *from; } JinjaOutput;

static JinjaOutput jinja_begin(Jinja *j) {
    JinjaOutput old = { j->out, j->from };
    j->out = NULL;
    j->from = NULL;
    return old;
}

static JinjaValue jinja_end(Jinja *j, JinjaOutput old) {
    JinjaValue v = jinja_own("", arrlenu(j->out));
    char *s = jinja_memory(j, v.n);
    uint16_t *from = jinja_memory(j, v.n * sizeof *from);
    if (s && from && v.n) {
        v.s = memcpy(s, j->out, v.n);
        v.from = memcpy(from, j->from, v.n * sizeof *from);
    } else {
        v.n = 0;
    }
    arrfree(j->out);
    arrfree(j->from);
    j->out = old.out;
    j->from = old.from;
    return v;
}

// An empty list, dict or list of arguments.
static JinjaValue jinja_table(Jinja *j, int kind) {
    JinjaTable *t = jinja_memory(j, sizeof *t);
    if (t) *t = (JinjaTable){ 0 };
    return (JinjaValue){ .kind = t ? kind : J_UNDEFINED, .t = t };
}

// Appends a member.
static void jinja_add(Jinja *j, JinjaValue table, JinjaValue key, JinjaValue v) {
    JinjaTable *t = table.t;
    if (!t || !jinja_spend(j, 0)) return;
    if (t->n == t->room) {
        size_t room = max_size(2 * t->room, 4);
        JinjaValue *item = jinja_memory(j, room * sizeof *item), *names = jinja_memory(j, room * sizeof *names);
        if (!item || !names) return;
        if (t->n) memcpy(item, t->item, t->n * sizeof *item);
        if (t->n) memcpy(names, t->key, t->n * sizeof *names);
        t->item = item;
        t->key = names;
        t->room = room;
    }
    t->key[t->n] = key;
    t->item[t->n++] = v;
}

static void jinja_add_named(Jinja *j, JinjaValue table, const char *key, JinjaValue v) {
    jinja_add(j, table, jinja_string(key), v);
}

static int jinja_truth(JinjaValue v) {
    if (v.kind == J_TEXT) return v.n > 0;
    if (v.kind == J_LIST || v.kind == J_DICT) return v.t->n > 0;
    return v.kind >= J_FUNCTION || v.i != 0;
}

// Two tables are equal when they are the same one: messages are only compared with themselves.
static int jinja_equal(Jinja *j, JinjaValue a, JinjaValue b) {
    int numbers = (a.kind == J_BOOL || a.kind == J_INT) && (b.kind == J_BOOL || b.kind == J_INT);
    if (numbers) return a.i == b.i;
    if (a.kind != b.kind || !jinja_spend(j, 0)) return 0;
    if (a.kind == J_TEXT) return a.n == b.n && jinja_spend(j, a.n) && (!a.n || !memcmp(a.s, b.s, a.n));
    return a.t == b.t && a.macro == b.macro;
}

// The member of a dict; undefined when there is none.
static JinjaValue jinja_member(Jinja *j, JinjaValue v, JinjaValue key) {
    if (v.kind == J_UNDEFINED) return jinja_fail(j, "a member of %s", jinja_kinds[v.kind]);
    for (size_t i = v.kind == J_DICT ? v.t->n : 0; i-- > 0;)
        if (jinja_equal(j, v.t->key[i], key)) return v.t->item[i];
    return (JinjaValue){ 0 };
}

// Is a in b?
static int jinja_in(Jinja *j, JinjaValue a, JinjaValue b) {
    if (b.kind == J_TEXT && a.kind == J_TEXT)
        return jinja_spend(j, b.n) && (!a.n || memmem(b.s, b.n, a.s, a.n));
    if (b.kind != J_LIST && b.kind != J_DICT && b.kind != J_UNDEFINED)
        jinja_fail(j, "%s in %s", jinja_kinds[a.kind], jinja_kinds[b.kind]);
    for (size_t i = 0; b.t && i < b.t->n; i++)
        if (jinja_equal(j, a, b.kind == J_DICT ? b.t->key[i] : b.t->item[i])) return 1;
    return 0;
}

// Bytes of the character at s[i], as a text is cut by characters; a stray byte is one.
static size_t jinja_char(JinjaValue v, size_t i) { return (size_t)max_int(utf8_length(v.s + i, v.n - i), 1); }

// What a loop goes over: the members of a list, the names of a dict, the characters of a text.
static JinjaValue jinja_list(Jinja *j, JinjaValue v) {
    if (v.kind == J_LIST) return v;
    JinjaValue list = jinja_table(j, J_LIST);
    if (v.kind > J_DICT || (v.kind && v.kind < J_TEXT)) jinja_fail(j, "a loop over %s", jinja_kinds[v.kind]);
    for (size_t i = 0; v.kind == J_DICT && i < v.t->n; i++) jinja_add(j, list, (JinjaValue){ 0 }, v.t->key[i]);
    for (size_t i = 0, n; v.kind == J_TEXT && i < v.n && !j->failed; i += n) {
        n = jinja_char(v, i);
        jinja_add(j, list, (JinjaValue){ 0 }, jinja_cut(v, i, i + n));
    }
    return j->failed ? (JinjaValue){ 0 } : list;
}

// The text that {{ v }} writes and that ~ joins.
static JinjaValue jinja_written(Jinja *j, JinjaValue v) {
    if (v.kind == J_TEXT) return v;
    if (v.kind == J_UNDEFINED) return jinja_string("");
    if (v.kind == J_NONE) return jinja_string("None");
    if (v.kind == J_BOOL) return jinja_string(v.i ? "True" : "False");
    if (v.kind != J_INT) return jinja_fail(j, "writes %s", jinja_kinds[v.kind]);
    char *number = jinja_memory(j, 32);
    if (number) snprintf(number, 32, "%ld", v.i);
    return number ? jinja_string(number) : v;
}

// ---- Functions, methods, filters and tests
// The white space that Python strips, and that ends at s[n] (back 1) or begins at s: its bytes, or 0.
static size_t jinja_space(const char *s, size_t n, int back) {
    static const char *const spaces[] = {
        " ", "\n", "\t", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x1f", "\xc2\x85", "\xc2\xa0", "\xe1\x9a\x80",
        "\xe2\x80\x80", "\xe2\x80\x81", "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85",
        "\xe2\x80\x86", "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
        "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"
    };
    for (size_t k = 0; k < sizeof spaces / sizeof *spaces; k++) {
        size_t m = strlen(spaces[k]);
        if (m <= n && !memcmp(back ? s + n - m : s, spaces[k], m)) return m;
    }
    return 0;
}

// A text without the characters of `chars` (undefined: white space) at its left end, its right end.
static JinjaValue jinja_strip(JinjaValue v, JinjaValue chars, int left, int right) {
    int given = chars.kind == J_TEXT;
    for (int back = 0; back < 2; back++) {
        while ((back ? right : left) && v.n) {
            size_t m = given ? memchr(chars.s, back ? v.s[v.n - 1] : *v.s, chars.n) != NULL : jinja_space(v.s, v.n, back);
            if (!m) break;
            v = back ? jinja_cut(v, 0, v.n - m) : jinja_cut(v, m, v.n);
        }
    }
    return v;
}

// The parts of a text between the texts `by`, at most `most` cuts; or, when `with` is a text, the text with
// `with` in the place of each `by`.
static JinjaValue jinja_split(Jinja *j, JinjaValue v, JinjaValue by, long most, JinjaValue with) {
    JinjaValue list = jinja_table(j, J_LIST);
    JinjaOutput old = jinja_begin(j);
    const char *at;
    if (!by.n) jinja_fail(j, "an empty text between the parts");
    while (!j->failed && most-- && (at = memmem(v.s, v.n, by.s, by.n)) != NULL) {
        size_t n = (size_t)(at - v.s);
        if (with.kind == J_TEXT) jinja_put(j, jinja_cut(v, 0, n));
        if (with.kind == J_TEXT) jinja_put(j, with);
        else jinja_add(j, list, (JinjaValue){ 0 }, jinja_cut(v, 0, n));
        v = jinja_cut(v, n + by.n, v.n);
        jinja_spend(j, n);
    }
    if (with.kind == J_TEXT) jinja_put(j, v);
    else jinja_add(j, list, (JinjaValue){ 0 }, v);
    JinjaValue text = jinja_end(j, old);
    return with.kind == J_TEXT ? text : list;
}

// upper, lower, capitalize, title
static JinjaValue jinja_case(Jinja *j, JinjaValue v, const char *name) {
    char *s = jinja_memory(j, v.n + 1);
    int start = 1;                                          // does a word begin here?
    for (size_t i = 0; s && i < v.n; i++) {
        int c = (unsigned char)v.s[i], up = *name == 'u' || (*name != 'l' && start);
        if (c > 127) return jinja_fail(j, "%s of letters beyond ASCII", name);
        s[i] = (char)(up ? toupper(c) : tolower(c));
        start = *name == 't' && !isalpha(c);
    }
    if (s) v.s = s;
    return v;
}

// Argument k of a call, or the one of this name; NULL when it is not given.
static const JinjaValue *jinja_given(JinjaValue args, size_t k, const char *name) {
    for (size_t i = 0; args.t && i < args.t->n; i++)
        if (jinja_is(args.t->key[i], name)) return &args.t->item[i];
    return args.t && k < args.t->n && !args.t->key[k].kind ? &args.t->item[k] : NULL;
}

// The same; undefined when it is not given.
static JinjaValue jinja_arg(JinjaValue args, size_t k, const char *name) {
    const JinjaValue *v = jinja_given(args, k, name);
    return v ? *v : (JinjaValue){ 0 };
}

// v is name args; k: the argument that stands behind the name
static int jinja_test(Jinja *j, JinjaValue v, const char *name, JinjaValue args, size_t k) {
    enum { TEXT = 1 << J_TEXT, LIST = 1 << J_LIST, DICT = 1 << J_DICT, UNDEFINED = 1 << J_UNDEFINED };
    static const struct { const char *name; int kinds; } tests[] = {
        { "defined", ~UNDEFINED }, { "undefined", UNDEFINED }, { "none", 1 << J_NONE },
        { "string", TEXT }, { "mapping", DICT }, { "iterable", TEXT | LIST | DICT | UNDEFINED },
        { "sequence", TEXT | LIST | DICT | UNDEFINED }, { "boolean", 1 << J_BOOL }, { "integer", 1 << J_INT },
        { "number", 1 << J_INT | 1 << J_BOOL }, { "callable", 1 << J_FUNCTION | 1 << J_MACRO },
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(name, tests[i].name)) return tests[i].kinds >> v.kind & 1;
    JinjaValue x = jinja_arg(args, k, "other");
    if (!strcmp(name, "true")) return v.kind == J_BOOL && v.i;
    if (!strcmp(name, "false")) return v.kind == J_BOOL && !v.i;
    if (!strcmp(name, "equalto") || !strcmp(name, "eq") || !strcmp(name, "==")) return jinja_equal(j, v, x);
    if (!strcmp(name, "!=") || !strcmp(name, "ne")) return !jinja_equal(j, v, x);
    if (!strcmp(name, "in")) return jinja_in(j, v, x);
    if (v.kind == J_INT && !strcmp(name, "odd")) return v.i & 1;
    if (v.kind == J_INT && !strcmp(name, "even")) return !(v.i & 1);
    if (v.kind == J_INT && x.kind == J_INT && x.i && !strcmp(name, "divisibleby")) return v.i % x.i == 0;
    jinja_fail(j, "the test %.40s of %s", name, jinja_kinds[v.kind]);
    return 0;
}

// select, reject (by: 0) and selectattr, rejectattr (by: 1, the first argument is a member): the members of a
// list that pass a test, or do not.
static JinjaValue jinja_select(Jinja *j, JinjaValue v, JinjaValue args, int by, int want) {
    JinjaValue list = jinja_table(j, J_LIST), test = jinja_arg(args, (size_t)by, "");
    char name[48] = "";
    if (test.kind == J_TEXT) snprintf(name, sizeof name, "%.*s", (int)min_size(test.n, 40), test.s);
    v = jinja_list(j, v);
    for (size_t i = 0; !j->failed && i < v.t->n; i++) {
        JinjaValue x = by ? jinja_member(j, v.t->item[i], jinja_arg(args, 0, "")) : v.t->item[i];
        int yes = test.kind ? jinja_test(j, x, name, args, (size_t)by + 1) : jinja_truth(x);
        if (yes == want) jinja_add(j, list, (JinjaValue){ 0 }, v.t->item[i]);
    }
    return list;
}

// v[a:b:c] as Python has it, of a list or of the characters of a text.
static JinjaValue jinja_slice(Jinja *j, JinjaValue v, JinjaValue from, JinjaValue to, JinjaValue by) {
    int text = v.kind == J_TEXT;
    JinjaValue given[] = { from, to, by };
    for (int k = 0; k < 3; k++)
        if (given[k].kind > J_NONE && given[k].kind != J_INT) jinja_fail(j, "a part from %s", jinja_kinds[given[k].kind]);
    if (!text && v.kind != J_LIST) jinja_fail(j, "a part of %s", jinja_kinds[v.kind]);
    v = jinja_list(j, v);
    if (j->failed) return v;
    long n = (long)v.t->n, step = by.kind == J_INT ? by.i : 1;
    if (!step) return jinja_fail(j, "a part in steps of 0");
    long low = step > 0 ? 0 : -1, high = step > 0 ? n : n - 1, edge[2] = { step > 0 ? low : high, step > 0 ? high : low };
    for (int k = 0; k < 2; k++) {
        if (given[k].kind != J_INT) continue;
        long x = given[k].i + (given[k].i < 0 ? n : 0);
        edge[k] = x < low ? low : x > high ? high : x;
    }
    JinjaValue list = jinja_table(j, J_LIST);
    JinjaOutput old = jinja_begin(j);
    for (long i = edge[0]; !j->failed && (step > 0 ? i < edge[1] : i > edge[1]); i += step) {
        if (text) jinja_put(j, v.t->item[i]);
        else jinja_add(j, list, (JinjaValue){ 0 }, v.t->item[i]);
    }
    JinjaValue part = jinja_end(j, old);
    return text ? part : list;
}

// Filters of texts: trim, replace, split ..
static JinjaValue jinja_apply_text(Jinja *j, JinjaValue v, const char *name, JinjaValue args) {
    JinjaValue x = jinja_arg(args, 0, "chars"), y = jinja_arg(args, 1, "maxsplit"), none = { 0 };
    jinja_spend(j, v.n);
    if (!strcmp(name, "trim") || !strcmp(name, "strip")) return jinja_strip(v, x, 1, 1);
    if (!strcmp(name, "lstrip")) return jinja_strip(v, x, 1, 0);
    if (!strcmp(name, "rstrip")) return jinja_strip(v, x, 0, 1);
    if (!strcmp(name, "string") || !strcmp(name, "safe")) return v;
    if (!strcmp(name, "upper") || !strcmp(name, "lower") || !strcmp(name, "title") || !strcmp(name, "capitalize"))
        return jinja_case(j, v, name);
    if (x.kind == J_TEXT && !strcmp(name, "startswith"))
        return jinja_bool(v.n >= x.n && (!x.n || !memcmp(v.s, x.s, x.n)));
    if (x.kind == J_TEXT && !strcmp(name, "endswith"))
        return jinja_bool(v.n >= x.n && (!x.n || !memcmp(v.s + v.n - x.n, x.s, x.n)));
    if (x.kind == J_TEXT && !strcmp(name, "split"))
        return jinja_split(j, v, x, y.kind == J_INT ? y.i : -1, none);
    if (x.kind == J_TEXT && y.kind == J_TEXT && !strcmp(name, "replace")) return jinja_split(j, v, x, -1, y);
    if (!strcmp(name, "int")) {
        char number[24];
        snprintf(number, sizeof number, "%.*s", (int)min_size(v.n, 9), v.s);
        return jinja_int(strtol(number, NULL, 10));
    }
    if (!strcmp(name, "length") || !strcmp(name, "count")) {
        long chars = 0;
        for (size_t i = 0; i < v.n; i++) chars += (v.s[i] & 0xc0) != 0x80;
        return jinja_int(chars);
    }
    return jinja_fail(j, "%.40s of %s", name, jinja_kinds[v.kind]);
}

// Filters of lists and dicts, and what goes over the characters of a text.
static JinjaValue jinja_apply_table(Jinja *j, JinjaValue v, const char *name, JinjaValue args) {
    JinjaValue x = jinja_arg(args, 0, "d"), none = { 0 }, list = jinja_list(j, v);
    if (j->failed) return none;
    JinjaTable *t = list.t;
    if (!strcmp(name, "length") || !strcmp(name, "count")) return jinja_int((long)t->n);
    if (!strcmp(name, "list") || !strcmp(name, "keys")) return list;
    if (!strcmp(name, "first")) return t->n ? t->item[0] : none;
    if (!strcmp(name, "last")) return t->n ? t->item[t->n - 1] : none;
    if (!strcmp(name, "reverse")) return jinja_slice(j, v, none, none, jinja_int(-1));
    if (!strcmp(name, "select") || !strcmp(name, "reject")) return jinja_select(j, list, args, 0, *name == 's');
    if (!strcmp(name, "selectattr") || !strcmp(name, "rejectattr")) return jinja_select(j, list, args, 1, *name == 's');
    if (!strcmp(name, "join")) {
        JinjaOutput old = jinja_begin(j);
        for (size_t i = 0; i < t->n && !j->failed; i++) {
            if (i && x.kind == J_TEXT) jinja_put(j, x);
            jinja_put(j, jinja_written(j, t->item[i]));
        }
        return jinja_end(j, old);
    }
    if (v.kind == J_DICT && !strcmp(name, "items")) {
        JinjaValue pairs = jinja_table(j, J_LIST);
        for (size_t i = 0; i < t->n && !j->failed; i++) {
            JinjaValue pair = jinja_table(j, J_LIST);
            jinja_add(j, pair, none, v.t->key[i]);
            jinja_add(j, pair, none, v.t->item[i]);
            jinja_add(j, pairs, none, pair);
        }
        return pairs;
    }
    if (v.kind == J_DICT && !strcmp(name, "get")) {
        JinjaValue found = jinja_member(j, v, x);
        const JinjaValue *other = jinja_given(args, 1, "default");
        if (found.kind) return found;
        return other ? *other : (JinjaValue){ .kind = J_NONE };
    }
    return jinja_fail(j, "%.40s of %s", name, jinja_kinds[v.kind]);
}

// The methods v.name(args) and the filters v | name(args)
static JinjaValue jinja_apply(Jinja *j, JinjaValue v, const char *name, JinjaValue args) {
    static const char *const over[] = { "list", "first", "last", "reverse", "select", "reject", "join" };
    int table = v.kind != J_TEXT;
    if (!jinja_spend(j, 0)) return v;
    if (!strcmp(name, "default") || !strcmp(name, "d"))
        return v.kind && (jinja_truth(v) || !jinja_truth(jinja_arg(args, 1, "boolean"))) ? v : jinja_arg(args, 0, "default_value");
    if (v.kind == J_INT && !strcmp(name, "int")) return v;
    if (!strcmp(name, "string")) return jinja_written(j, v);
    if (v.kind && v.kind < J_TEXT) return jinja_fail(j, "%.40s of %s", name, jinja_kinds[v.kind]);
    if (!v.kind && !strcmp(name, "trim")) return jinja_string("");
    for (size_t k = 0; k < sizeof over / sizeof *over; k++) table |= !strcmp(name, over[k]);
    return table ? jinja_apply_table(j, v, name, args) : jinja_apply_text(j, v, name, args);
}

// The functions.
static JinjaValue jinja_function(Jinja *j, const char *name, JinjaValue args) {
    JinjaValue x = jinja_arg(args, 0, "");
    if (x.kind == J_TEXT && !strcmp(name, "raise_exception"))
        return jinja_fail(j, "the program refuses: %.*s", (int)min_size(x.n, 200), x.s);
    if (x.kind == J_TEXT && !strcmp(name, "strftime_now")) {
        char format[64], *date = jinja_memory(j, 256);
        struct tm day = { 0 };
        sscanf(j->tp->today, "%d-%d-%d", &day.tm_year, &day.tm_mon, &day.tm_mday);
        day.tm_year -= 1900;
        day.tm_mon--;
        day.tm_hour = 12;
        day.tm_isdst = -1;
        mktime(&day);                                       // fills in the day of the week
        day.tm_hour = 0;
        snprintf(format, sizeof format, "%.*s", (int)min_size(x.n, 63), x.s);
        if (!date || x.n > 63 || !strftime(date, 256, format, &day)) return jinja_fail(j, "the date as this text");
        return jinja_string(date);
    }
    JinjaValue v = jinja_table(j, J_LIST), y = jinja_arg(args, 1, "");
    if (x.kind == J_INT && !strcmp(name, "range")) {
        long from = y.kind == J_INT ? x.i : 0, to = y.kind == J_INT ? y.i : x.i;
        for (long i = from; i < to && !j->failed; i++) jinja_add(j, v, (JinjaValue){ 0 }, jinja_int(i));
        return v;
    }
    if (strcmp(name, "namespace") && strcmp(name, "dict")) return jinja_fail(j, "the function %.40s", name);
    v = jinja_table(j, J_DICT);
    if (v.t) v.t->space = *name == 'n';
    for (size_t i = 0; args.t && i < args.t->n; i++) jinja_add(j, v, args.t->key[i], args.t->item[i]);
    return v;
}

// ---- Running
static JinjaValue jinja_eval(Jinja *j, const JinjaNode *x);
static int jinja_run(Jinja *j, const JinjaNode *x);

// The newest variable of this name that can be seen; NULL: there is none.
static JinjaValue *jinja_variable(Jinja *j, const char *name) {
    for (int i = (int)arrlen(j->var) - 1; i >= 0; i--) {
        if (i == j->hidden - 1) i = j->globals - 1;
        if (i < 0) break;
        if (j->var[i].name == name) return &j->var[i].v;
        if (i % 8 == 0) j->steps++;
    }
    return NULL;
}

// Gives a variable of the innermost scope a value.
static void jinja_set_variable(Jinja *j, const char *name, JinjaValue v) {
    for (int i = j->scope; i < (int)arrlen(j->var); i++) {
        if (j->var[i].name != name) continue;
        j->var[i].v = v;
        return;
    }
    j->steps += arrlenu(j->var) / 8;
    arrput(j->var, ((JinjaVariable){ name, v }));
}

// The arguments of a call.
static JinjaValue jinja_args(Jinja *j, const JinjaNode *list) {
    JinjaValue args = { 0 };
    if (list) args = jinja_table(j, J_LIST);
    for (const JinjaNode *x = list; x && !j->failed; x = x->next) {
        int named = x->kind == P_NAMED;
        jinja_add(j, args, named ? jinja_string(x->name) : (JinjaValue){ 0 }, jinja_eval(j, named ? x->a : x));
    }
    return args;
}

// What a macro writes. It sees its arguments and the program's variables, not those of who calls it.
static JinjaValue jinja_call_macro(Jinja *j, const JinjaNode *m, JinjaValue args) {
    int top = (int)arrlen(j->var), scope = j->scope, hidden = j->hidden, globals = j->globals;
    size_t k = 0;
    if (!hidden) j->globals = scope ? globals : top;
    j->hidden = j->scope = top;
    for (const JinjaNode *x = m->a; x && !j->failed; x = x->next, k++) {
        const JinjaValue *given = jinja_given(args, k, x->name);
        jinja_set_variable(j, x->name, given ? *given : x->b ? jinja_eval(j, x->b) : (JinjaValue){ 0 });
    }
    JinjaOutput old = jinja_begin(j);
    jinja_run(j, m->d);
    JinjaValue text = jinja_end(j, old);
    arrsetlen(j->var, top);
    j->scope = scope;
    j->hidden = hidden;
    j->globals = globals;
    return text;
}

static JinjaValue jinja_call(Jinja *j, const JinjaNode *x) {
    if (x->a) {
        JinjaValue of = jinja_eval(j, x->a), args = jinja_args(j, x->b);
        if (of.kind == J_UNDEFINED) return jinja_fail(j, "%.40s of %s", x->name, jinja_kinds[of.kind]);
        return j->failed ? of : jinja_apply(j, of, x->name, args);
    }
    JinjaValue *f = jinja_variable(j, x->name), args = jinja_args(j, x->b);
    j->at = x->at;
    if (j->failed) return args;
    if (f && f->kind == J_MACRO) return jinja_call_macro(j, f->macro, args);
    return jinja_function(j, x->name, args);
}

// a OP b
static JinjaValue jinja_compute(Jinja *j, JinjaValue a, int op, JinjaValue b) {
    if (op == OP_EQUAL || op == OP_UNEQUAL) return jinja_bool(jinja_equal(j, a, b) == (op == OP_EQUAL));
    if (op == OP_IN || op == OP_NOT_IN) return jinja_bool(jinja_in(j, a, b) == (op == OP_IN));
    if (op == OP_JOIN) {
        a = jinja_written(j, a);
        b = jinja_written(j, b);
    }
    if ((op == OP_PLUS || op == OP_JOIN) && a.kind == J_TEXT && b.kind == J_TEXT) {
        if (!a.n || !b.n) return a.n ? a : b;
        JinjaOutput old = jinja_begin(j);
        jinja_put(j, a);
        jinja_put(j, b);
        return jinja_end(j, old);
    }
    if (op == OP_PLUS && a.kind == J_LIST && b.kind == J_LIST) {
        JinjaValue list = jinja_table(j, J_LIST);
        for (size_t i = 0; i < a.t->n && !j->failed; i++) jinja_add(j, list, (JinjaValue){ 0 }, a.t->item[i]);
        for (size_t i = 0; i < b.t->n && !j->failed; i++) jinja_add(j, list, (JinjaValue){ 0 }, b.t->item[i]);
        return list;
    }
    if (a.kind == J_BOOL) a.kind = J_INT;
    if (b.kind == J_BOOL) b.kind = J_INT;
    if (a.kind != J_INT || b.kind != J_INT)
        return jinja_fail(j, "%s %s %s", jinja_kinds[a.kind], jinja_ops[op], jinja_kinds[b.kind]);
    if (op == OP_LESS) return jinja_bool(a.i < b.i);
    if (op == OP_LESS_EQUAL) return jinja_bool(a.i <= b.i);
    if (op == OP_MORE) return jinja_bool(a.i > b.i);
    if (op == OP_MORE_EQUAL) return jinja_bool(a.i >= b.i);
    int divides = op == OP_WHOLE || op == OP_REST;
    if (divides && b.i <= 0) return jinja_fail(j, "%ld %s %ld", a.i, jinja_ops[op], b.i);
    long rest = divides ? (a.i % b.i + b.i) % b.i : 0;      // as Python has it, never negative
    long n = op == OP_PLUS ? a.i + b.i : op == OP_MINUS ? a.i - b.i : op == OP_TIMES ? a.i * b.i
           : op == OP_WHOLE ? (a.i - rest) / b.i : rest;
    if (labs(n) > JINJA_NUMBER) return jinja_fail(j, "a number above %d", JINJA_NUMBER);
    return jinja_int(n);
}

// a[b]
static JinjaValue jinja_item(Jinja *j, JinjaValue a, JinjaValue b) {
    if (b.kind != J_INT || (a.kind != J_LIST && a.kind != J_TEXT)) return jinja_member(j, a, b);
    JinjaValue list = jinja_list(j, a);
    if (j->failed) return list;
    long i = b.i + (b.i < 0 ? (long)list.t->n : 0);
    return i >= 0 && i < (long)list.t->n ? list.t->item[i] : (JinjaValue){ 0 };
}

// Computes a part of an expression.
static JinjaValue jinja_eval_part(Jinja *j, const JinjaNode *x) {
    JinjaValue a = { 0 }, b = { 0 }, *found;
    switch (x->kind) {
    case P_VALUE:
        return (JinjaValue){ .kind = x->op, .i = x->i, .s = x->s, .n = x->n };
    case P_NAME:
        found = jinja_variable(j, x->name);
        return found ? *found : a;
    case P_LIST:
        a = jinja_table(j, J_LIST);
        for (x = x->a; x && !j->failed; x = x->next) jinja_add(j, a, b, jinja_eval(j, x));
        return a;
    case P_DICT:
        a = jinja_table(j, J_DICT);
        for (x = x->a; x && x->next && !j->failed; x = x->next->next) {
            b = jinja_eval(j, x);
            jinja_add(j, a, b, jinja_eval(j, x->next));
        }
        return a;
    case P_CALL:
        return jinja_call(j, x);
    case P_AND:
    case P_OR:
        a = jinja_eval(j, x->a);
        return jinja_truth(a) == (x->kind == P_AND) ? jinja_eval(j, x->b) : a;
    case P_IF:
        a = jinja_eval(j, x->a);
        if (jinja_truth(a)) return jinja_eval(j, x->b);
        return x->c ? jinja_eval(j, x->c) : b;
    }
    a = jinja_eval(j, x->a);
    if (x->b && x->kind != P_FILTER && x->kind != P_TEST) b = jinja_eval(j, x->b);
    j->at = x->at;
    if (j->failed) return a;
    switch (x->kind) {
    case P_MEMBER: return jinja_member(j, a, jinja_string(x->name));
    case P_INDEX:  return jinja_item(j, a, b);
    case P_NOT:    return jinja_bool(!jinja_truth(a));
    case P_MINUS:  return jinja_compute(j, jinja_int(0), OP_MINUS, a);
    case P_BINARY: return jinja_compute(j, a, x->op, b);
    case P_TEST:   return jinja_bool(jinja_test(j, a, x->name, jinja_args(j, x->b), 0) != x->op);
    case P_FILTER: return jinja_apply(j, a, x->name, jinja_args(j, x->b));
    }
    JinjaValue to = { 0 }, by = { 0 };
    if (x->c) to = jinja_eval(j, x->c);
    if (x->d) by = jinja_eval(j, x->d);
    return j->failed ? a : jinja_slice(j, a, b, to, by);
}

static JinjaValue jinja_eval(Jinja *j, const JinjaNode *x) {
    if (!jinja_spend(j, 0)) return (JinjaValue){ 0 };
    j->at = x->at;
    if (++j->depth > JINJA_DEPTH) jinja_fail(j, "more than %d parts inside one another", JINJA_DEPTH);
    JinjaValue v = j->failed ? (JinjaValue){ 0 } : jinja_eval_part(j, x);
    j->depth--;
    return j->failed ? (JinjaValue){ 0 } : v;
}

// The variables of one turn of a loop.
static void jinja_loop_variables(Jinja *j, const JinjaNode *names, const JinjaTable *t, size_t i) {
    JinjaValue loop = jinja_table(j, J_DICT), x = t->item[i];
    jinja_add_named(j, loop, "index", jinja_int((long)i + 1));
    jinja_add_named(j, loop, "index0", jinja_int((long)i));
    jinja_add_named(j, loop, "revindex", jinja_int((long)(t->n - i)));
    jinja_add_named(j, loop, "revindex0", jinja_int((long)(t->n - i) - 1));
    jinja_add_named(j, loop, "first", jinja_bool(!i));
    jinja_add_named(j, loop, "last", jinja_bool(i == t->n - 1));
    jinja_add_named(j, loop, "length", jinja_int((long)t->n));
    jinja_add_named(j, loop, "previtem", i ? t->item[i - 1] : (JinjaValue){ 0 });
    jinja_add_named(j, loop, "nextitem", i < t->n - 1 ? t->item[i + 1] : (JinjaValue){ 0 });
    jinja_set_variable(j, j->tp->names[0], loop);
    if (!names->next) {
        jinja_set_variable(j, names->name, x);
        return;
    }
    if (x.kind != J_LIST || x.t->n != 2) {
        jinja_fail(j, "a loop with two names over %s", jinja_kinds[x.kind]);
        return;
    }
    jinja_set_variable(j, names->name, x.t->item[0]);
    jinja_set_variable(j, names->next->name, x.t->item[1]);
}

static int jinja_run_for(Jinja *j, const JinjaNode *x) {
    JinjaValue list = jinja_list(j, jinja_eval(j, x->b)), all = list;
    int scope = j->scope, top = (int)arrlen(j->var);
    if (x->c) list = jinja_table(j, J_LIST);
    if (!scope && !j->hidden) j->globals = top;
    j->scope = top;
    for (size_t i = 0; x->c && !j->failed && i < all.t->n; i++) {       // those that the condition lets in
        jinja_loop_variables(j, x->a, all.t, i);
        if (jinja_truth(jinja_eval(j, x->c))) jinja_add(j, list, (JinjaValue){ 0 }, all.t->item[i]);
        arrsetlen(j->var, top);
    }
    int how = RUN_ON;
    for (size_t i = 0; how != RUN_BREAK && !j->failed && i < list.t->n; i++) {
        jinja_loop_variables(j, x->a, list.t, i);
        how = jinja_run(j, x->d);
        arrsetlen(j->var, top);
    }
    if (!j->failed && !list.t->n) jinja_run(j, x->a->a);
    arrsetlen(j->var, top);
    j->scope = scope;
    return RUN_ON;
}

static void jinja_run_set(Jinja *j, const JinjaNode *x) {
    JinjaValue v;
    if (x->b) {
        v = jinja_eval(j, x->b);
    } else {
        JinjaOutput old = jinja_begin(j);
        jinja_run(j, x->c);
        v = jinja_end(j, old);
    }
    if (j->failed) return;
    if (x->a->kind == P_NAME) {
        jinja_set_variable(j, x->a->name, v);
        return;
    }
    JinjaValue space = jinja_eval(j, x->a->a);
    if (space.kind != J_DICT || !space.t->space) {
        jinja_fail(j, "%.40s is no namespace", x->a->a->name);
        return;
    }
    for (size_t i = 0; i < space.t->n; i++) {
        if (!jinja_is(space.t->key[i], x->a->name)) continue;
        space.t->item[i] = v;
        return;
    }
    jinja_add_named(j, space, x->a->name, v);
}

// Runs the parts of a block. RUN_BREAK and RUN_CONTINUE: the loop around it ends, or goes on.
static int jinja_run(Jinja *j, const JinjaNode *x) {
    int how = RUN_ON;
    if (++j->depth > JINJA_DEPTH) jinja_fail(j, "more than %d parts inside one another", JINJA_DEPTH);
    for (; x && how == RUN_ON && jinja_spend(j, 0); x = x->next) {
        const JinjaNode *branch = x;
        j->at = x->at;
        switch (x->kind) {
        case P_TEXT:     jinja_put(j, jinja_own(x->s, x->n)); break;
        case P_PRINT:    jinja_put(j, jinja_written(j, jinja_eval(j, x->a))); break;
        case P_FOR:      how = jinja_run_for(j, x); break;
        case P_SET:      jinja_run_set(j, x); break;
        case P_BREAK:    how = RUN_BREAK; break;
        case P_CONTINUE: how = RUN_CONTINUE; break;
        case P_DEFINE:
            jinja_set_variable(j, x->name, (JinjaValue){ .kind = J_MACRO, .macro = x });
            break;
        case P_BRANCH:
            while (branch && branch->a && !jinja_truth(jinja_eval(j, branch->a)) && !j->failed) branch = branch->c;
            if (branch && !j->failed) how = jinja_run(j, branch->b);
            break;
        }
    }
    j->depth--;
    return how;
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

// A message's text, whose bytes are marked with its number.
static JinjaValue message_value(Jinja *j, const char *text, int number) {
    JinjaValue v = jinja_string(text);
    uint16_t *from = jinja_memory(j, v.n * sizeof *from);
    for (size_t i = 0; from && i < v.n; i++) from[i] = (uint16_t)(1 + number % UINT16_MAX);
    v.from = from;
    return v;
}

// The variables that a program finds, in the order in which template_parse enters their names.
static const char *const known_names[] = {
    "loop", "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "enable_thinking",
    "raise_exception", "strftime_now", "namespace", "range", "dict",
};
enum { KNOWN_NAMES = sizeof known_names / sizeof *known_names };

static void set_variables(Jinja *j, const Message *m, int n, int how) {
    const JinjaValue none = { .kind = J_NONE }, undefined = { 0 };
    JinjaValue messages = jinja_table(j, J_LIST);
    for (int i = 0; i < n && !j->failed; i++) {
        JinjaValue message = jinja_table(j, J_DICT);
        jinja_add_named(j, message, "role", jinja_string(m[i].role));
        jinja_add_named(j, message, "content", message_value(j, m[i].content, i));
        jinja_add(j, messages, undefined, message);
    }
    const JinjaValue known[KNOWN_NAMES] = {
        undefined, messages, none, none, jinja_bool(how & RENDER_PROMPT),
        j->tp->bos ? jinja_string(j->tp->bos) : undefined, j->tp->eos ? jinja_string(j->tp->eos) : undefined,
        how & RENDER_NO_THINK ? jinja_bool(0) : undefined,
    };
    for (int k = 1; k < KNOWN_NAMES; k++)
        jinja_set_variable(j, j->tp->names[k], k < 8 ? known[k] : (JinjaValue){ .kind = J_FUNCTION });
}

char *template_render(const Template *tp, const Message *m, int n, int how, size_t *size, uint16_t **from,
                      char err[512]) {
    size_t all = 0;
    for (int i = 0; i < n; i++) all += strlen(m[i].content);
    Jinja j = { .tp = tp, .arena = arena_new(), .at = tp->source, .err = err,
                .most_bytes = JINJA_BYTES + JINJA_BYTES_MESSAGE * (size_t)n + JINJA_BYTES_BYTE * all,
                .most_steps = JINJA_STEPS + JINJA_STEPS_MESSAGE * (size_t)n };
    set_variables(&j, m, n, how);
    jinja_run(&j, tp->program);
    int all_of_it = RENDER_NO_THINK | RENDER_PROMPT;
    if ((how & all_of_it) == all_of_it) close_thought(&j);

    char *text = NULL;
    *size = arrlenu(j.out);
    if (!j.failed) {
        text = copy_bytes(j.out ? j.out : "", *size);
        if (from) *from = xcalloc(*size + 1, sizeof **from);
        if (from && *size) memcpy(*from, j.from, *size * sizeof **from);
    }
    arrfree(j.out);
    arrfree(j.from);
    arrfree(j.var);
    arena_free(j.arena);
    return text;
}

// ==================================================================================================== IDS
typedef struct Guarded {        // a token that a message must not name
    const char *name;
    int n, id;
} Guarded;

// The longest guarded token whose name stands at s (n bytes); NULL: none does.
static const Guarded *guarded_at(const Template *tp, const char *s, size_t n) {
    const Guarded *best = NULL;
    if (!n || !tp->starts[(unsigned char)*s]) return NULL;
    for (int i = 0; i < (int)arrlen(tp->guarded); i++) {
        const Guarded *g = &tp->guarded[i];
        if ((size_t)g->n <= n && !memcmp(s, g->name, (size_t)g->n) && (!best || g->n > best->n)) best = g;
    }
    return best;
}

// Appends the ids of text[0..n), which begins the dialogue if at_start is 1. Guarded tokens are found where the
// template alone wrote their names.
//
// If the whole text, encoded as if it might name them anywhere, has exactly these, then no message named one,
// and that is what transformers gives. Otherwise what lies between them is encoded as plain text.
static int *ids_of_text(const Template *tp, const char *text, const uint16_t *from, size_t n, int at_start, int how,
                        int *ids) {
    typedef struct { size_t at; const Guarded *g; } Place;
    Place *own = NULL;
    for (size_t i = 0; i < n && !(how & RENDER_TRUST);) {
        size_t most = i;
        while (most < n && most < i + MAX_PIECE && !from[most]) most++;
        const Guarded *g = guarded_at(tp, text + i, most - i);
        if (g) arrput(own, ((Place){ i, g }));
        i += g ? (size_t)g->n : 1;
    }
    int before = (int)arrlen(ids), k = 0, same = 1, len;
    ids = encode_at(tp->t, text, n, 1, at_start, ids);
    for (int i = before; i < (int)arrlen(ids) && !(how & RENDER_TRUST); i++) {
        if (!tokenizer_guarded(tp->t, ids[i], &len)) continue;
        same = same && k < (int)arrlen(own) && own[k].g->id == ids[i];
        k++;
    }
    if (!(how & RENDER_TRUST) && (!same || k != (int)arrlen(own))) {
        size_t p = 0;
        arrsetlen(ids, before);
        for (int i = 0; i <= (int)arrlen(own); i++) {
            size_t end = i < (int)arrlen(own) ? own[i].at : n;
            if (end > p) ids = encode_at(tp->t, text + p, end - p, 0, at_start && !p, ids);
            if (i == (int)arrlen(own)) break;
            arrput(ids, own[i].g->id);
            p = end + (size_t)own[i].g->n;
        }
    }
    arrfree(own);
    return ids;
}

// Where message i, whose reply has ids, stands whole in a text: its bytes are [*from_at, *to). A blank that the
// ids begin with, and the content does not, belongs to the reply. Returns 1 when it stands there, behind `least`.
static int reply_place(const Template *tp, const Message *m, int i, const char *text, const uint16_t *from, size_t n,
                       size_t least, size_t *from_at, size_t *to) {
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

int *template_ids(const Template *tp, const Message *m, int n, int how, char err[512]) {
    size_t size, p = 0, a, b;
    uint16_t *from;
    int *ids = NULL, bos = tokenizer_bos(tp->t);
    char *text = template_render(tp, m, n, how, &size, &from, err);
    if (!text) return NULL;
    for (int i = 0; i < n; i++) {
        if (!m[i].n_ids || !reply_place(tp, &m[i], i, text, from, size, p, &a, &b)) continue;
        if (a > p) ids = ids_of_text(tp, text + p, from + p, a - p, !p, how, ids);
        memcpy(arraddnptr(ids, m[i].n_ids), m[i].ids, (size_t)m[i].n_ids * sizeof *ids);
        p = b;
    }
    if (size > p) ids = ids_of_text(tp, text + p, from + p, size - p, !p, how, ids);
    if (tokenizer_adds_bos(tp->t) && (!arrlen(ids) || ids[0] != bos)) arrins(ids, 0, bos);
    free(text);
    free(from);
    if (!arrlen(ids)) fault(err, "the chat template writes nothing");
    return ids;
}

// ==================================================================================================== LOADING
// The templates that have a name. `needs`: the tokens without which one makes no sense.
static const struct { const char *name, *needs, *source; } named_templates[] = {
    { "chatml", "<|im_start|> <|im_end|>",
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}" },
    { "qwen3", "<|im_start|> <|im_end|>",
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\\n')\n"
      "if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n"
      "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}" },
    { "llama3", "<|start_header_id|> <|end_header_id|> <|eot_id|>",
      "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
      "{{ m.content | trim }}<|eot_id|>{% endfor %}"
      "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}" },
    { "llama2", "<s> </s>",
      "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if m.role == 'user' %}"
      "{% set system = loop.previtem.content if loop.index == 2 and loop.previtem.role == 'system' else '' %}"
      "{% set words = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m.content if system else m.content %}"
      "{{ bos_token }}[INST] {{ words.strip() }} [/INST]{% else %} {{ m.content.strip() }} {{ eos_token }}"
      "{% endif %}{% endfor %}" },
    { "mistral", "[INST] [/INST]",
      "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
      "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
      "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}" },
    { "phi3", "<|user|> <|assistant|> <|end|>",
      "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|assistant|>\n{% endif %}" },
    { "zephyr", "</s>",
      "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
      "{% if add_generation_prompt %}<|assistant|>\n{% endif %}" },
    { "deepseek-r1", "<｜User｜> <｜Assistant｜>",
      "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
      "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
      "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}" },
    { "none", "", "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %}{{ '\\n' }}{% endif %}{% endfor %}" },
};
enum { NAMED_TEMPLATES = sizeof named_templates / sizeof *named_templates };

const char *template_names(void) { return "chatml qwen3 llama3 llama2 mistral phi3 zephyr deepseek-r1 none"; }

void template_free(Template *tp) {
    if (!tp) return;
    for (int i = 0; i < (int)arrlen(tp->names); i++) free(tp->names[i]);
    arrfree(tp->names);
    arrfree(tp->guarded);
    arrfree(tp->stop);
    arena_free(tp->arena);
    free(tp->no_system);
    free(tp->name);
    free(tp->source);
    free(tp->bos);
    free(tp->eos);
    free(tp);
}

// The program in a parsed tokenizer_config.json: its chat_template is a text, or a list of {name,
// template} of which "default" counts. Returns a copy, "" when there is none, NULL and err when the
// member is neither.
static char *config_program(const Json *config, const char *file, char err[512]) {
    const Json *c = json_get(config, "chat_template"), *list = c;
    if (json_none(c)) return copy_text("");
    for (int i = 0; json_is(list, JSON_ARRAY) && i < list->n; i++)
        if (!strcmp(json_text(&list->item[i], "name"), "default")) c = json_get(&list->item[i], "template");
    if (json_is(c, JSON_ARRAY)) fault(err, "%s: chat_template is a list without a \"default\"", file);
    else if (!json_is(c, JSON_STRING)) fault(err, "%s: chat_template is neither a text nor a list", file);
    else if (strlen(c->str) != c->len) fault(err, "%s: chat_template has a NUL byte", file);
    else return copy_bytes(c->str, c->len);
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

// The program of a folder. Returns a copy, "" when there is none, NULL and err when a file is broken.
static char *folder_program(const char *dir, char err[512]) {
    char file[1200], why[256];
    size_t n;
    snprintf(file, sizeof file, "%.1100s/chat_template.jinja", dir);
    if (file_exists(file)) return program_file(file, err);
    snprintf(file, sizeof file, "%.1100s/tokenizer_config.json", dir);
    if (!file_exists(file)) return copy_text("");
    char *text = read_file(file, &n, why);
    Json *j = text ? json_parse(text, n, why) : NULL;
    char *program = j ? config_program(j, file, err) : NULL;
    if (!j) fault(err, "%s: %s", file, why);
    free(text);
    json_free(j);
    return program;
}

// Reads the program into the tree. 0, or -1 and err.
static int template_parse(Template *tp, const char *program, char err[512]) {
    size_t n = strlen(program), bytes = 0;
    if (n > JINJA_SOURCE) return fault(err, "%zu bytes, at most %d are read", n, JINJA_SOURCE);
    tp->arena = arena_new();
    tp->source = xcalloc(n + 1, 1);
    for (const char *s = program; *s; s++) {                // Jinja knows one kind of line break ...
        if (*s == '\r' && s[1] == '\n') s++;
        tp->source[bytes++] = *s == '\r' ? '\n' : *s;
    }
    bytes -= bytes && tp->source[bytes - 1] == '\n';        // ... and drops the last one
    tp->source[bytes] = 0;
    for (int k = 0; k < KNOWN_NAMES; k++) jinja_intern(tp, known_names[k], strlen(known_names[k]));
    JinjaReader r = { .src = tp->source, .p = tp->source, .end = tp->source + bytes, .tp = tp, .err = err };
    static const char *const end[] = { NULL };
    tp->program = jinja_block(&r, end);
    return -r.failed;
}

// What is to be known of the tokenizer.
static void template_tokens(Template *tp) {
    int len;
    for (int id = 0; id < tokenizer_size(tp->t); id++) {
        const char *name = tokenizer_guarded(tp->t, id, &len);
        if (!name || !len) continue;
        arrput(tp->guarded, ((Guarded){ name, len, id }));
        tp->starts[(unsigned char)*name] = 1;
    }
    int role[] = { tokenizer_bos(tp->t), tokenizer_eos(tp->t) };
    for (int k = 0; k < 2; k++) {
        const char *name = role[k] >= 0 ? tokenizer_guarded(tp->t, role[k], &len) : NULL;
        if (!name && role[k] >= 0) name = tokenizer_bytes(tp->t, role[k], &len);
        if (name) *(k ? &tp->eos : &tp->bos) = copy_bytes(name, (size_t)len);
    }
}

// Adds an id to those that end a reply, once.
static void stop_add(Template *tp, int id) {
    for (int i = 0; i < (int)arrlen(tp->stop); i++)
        if (tp->stop[i] == id) return;
    if (id >= 0) arrput(tp->stop, id);
}

// What the program writes for messages, and where the first byte of message `mark` - 1 is in *at, and the byte behind
// its last one in *end; -1: nowhere. NULL and err.
static char *template_probe(const Template *tp, const Message *m, int n, int mark, int *at, int *end, char err[512]) {
    uint16_t *from = NULL;
    size_t size;
    char *text = template_render(tp, m, n, RENDER_PROMPT, &size, &from, err);
    *at = *end = -1;
    for (size_t i = 0; text && i < size; i++) {
        if (from[i] != mark) continue;
        if (*at < 0) *at = (int)i;
        *end = (int)i + 1;
    }
    free(from);
    return text;
}

// Has the program write short dialogues, to see that it can, how it ends a reply, whether it writes a system message,
// and whether it has one of its own. 0, or -1 and err.
static int template_try(Template *tp, char err[512]) {
    static const char *const stops[] = { "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<｜end▁of▁sentence｜>" };
    static const Message m[] = { { .role = "system", .content = "s" }, { .role = "user", .content = "u" },
                                 { .role = "assistant", .content = "a" }, { .role = "user", .content = "v" } };
    int words, system, at, end, same = 0, tail = 0;
    char *text = template_probe(tp, m + 1, 3, 2, &at, &end, err);
    if (!text) return -1;
    if (end >= 0) {
        while (isspace((unsigned char)text[end])) end++;
        const Guarded *g = guarded_at(tp, text + end, strlen(text + end));
        if (g) stop_add(tp, g->id);
    }
    for (size_t k = 0; k < sizeof stops / sizeof *stops; k++) stop_add(tp, text_id(tp->t, stops[k], strlen(stops[k])));
    free(text);

    text = template_probe(tp, m + 1, 1, 1, &words, &end, err);
    if (!text) return -1;
    char why[512] = "it writes the words of a system message nowhere";
    char *with = template_probe(tp, m, 2, 1, &system, &end, why), *other = NULL;
    if (with) other = template_probe(tp, m, 2, 2, &at, &end, why);
    if (!with || system < 0 || at < 0) {
        tp->no_system = copy_text(why);
    } else {
        // Before the words stands more than what stands there with a system message as well?
        while (same < words && same < system && text[same] == with[same]) same++;
        while (tail < words - same && tail < at - system && text[words - 1 - tail] == with[at - 1 - tail]) tail++;
        tp->own_system = same + tail < words;
    }
    free(text);
    free(with);
    free(other);
    return words < 0 ? fault(err, "it writes the words of a message nowhere") : 0;
}

Template *template_load(const char *dir, const char *name, const Tokenizer *t, char err[512]) {
    char why[512] = "";
    int named = 0, bad = 0;
    while (named < NAMED_TEMPLATES && (!name || strcmp(named_templates[named].name, name))) named++;
    char *program = NULL;
    if (named < NAMED_TEMPLATES) program = copy_text(named_templates[named].source);
    else program = name ? program_file(name, why) : folder_program(dir, why);
    if (program && !*program) {
        named = NAMED_TEMPLATES - 1;
        free(program);
        program = copy_text(named_templates[named].source);
    }
    Template *tp = xcalloc(1, sizeof *tp);
    tp->t = t;
    tp->name = copy_text(named < NAMED_TEMPLATES ? named_templates[named].name : name ? name : "the model's own");
    const char *date = getenv("KVCOMP_DATE");
    time_t now_time = time(NULL);
    struct tm day;
    strftime(tp->today, sizeof tp->today, "%Y-%m-%d", localtime_r(&now_time, &day));
    int year, month, mday, more;
    if (date && (sscanf(date, "%4d-%2d-%2d%n", &year, &month, &mday, &more) != 3 || strlen(date) != 10 || more != 10))
        bad = fault(why, "KVCOMP_DATE: expected YYYY-MM-DD, found %.40s", date);
    else if (date) memcpy(tp->today, date, sizeof "YYYY-MM-DD");

    // The tokens that a named template needs.
    for (const char *s = named < NAMED_TEMPLATES ? named_templates[named].needs : ""; *s && !bad;) {
        size_t n = strcspn(s, " ");
        if (text_id(t, s, n) < 0)
            bad = fault(why, "chat template %s needs the token %.*s, which this tokenizer does not have", tp->name, (int)n, s);
        s += n + strspn(s + n, " ");
    }
    if (program && !bad) {
        template_tokens(tp);
        char reason[512];
        bad = template_parse(tp, program, reason);
        if (!bad) bad = template_try(tp, reason);
        if (bad) fault(why, "this chat template is not supported: %.300s", reason);
    }
    free(program);
    if (program && !bad) return tp;
    template_free(tp);
    fault(err, "%.320s (--chat-template takes a file or %s; or use --raw)", why, template_names());
    return NULL;
}

int template_like(const Template *tp, const char *name) {
    static const Message m[] = { { .role = "user", .content = "u" }, { .role = "assistant", .content = "a" },
                                 { .role = "user", .content = "v" } };
    char err[512], *text[2] = { NULL };
    size_t n[2], at[2] = { 0 };
    uint16_t *from[2];
    int known = 0;
    while (known < NAMED_TEMPLATES && strcmp(named_templates[known].name, name)) known++;
    if (known == NAMED_TEMPLATES) return -1;
    Template *other = template_load(NULL, name, tp->t, err);
    int same = other != NULL;
    for (int k = 0; k < 2 && same; k++) {
        text[k] = template_render(k ? other : tp, m, 3, RENDER_PROMPT, &n[k], &from[k], err);
        same = text[k] != NULL;
        while (same && at[k] < n[k] && !from[k][at[k]]) at[k]++;        // what stands before may be a default text
        if (same) free(from[k]);
    }
    same = same && !strcmp(text[0] + at[0], text[1] + at[1]);
    free(text[0]);
    free(text[1]);
    template_free(other);
    return same;
}

// ---- Does the tokenizer belong to the model?
// The first id without a row in the embedding that the template writes, or -1 when all have rows.
static int template_stray_id(const Template *tp, const Config *c) {
    static const Message m[] = { { .role = "system", .content = "a" }, { .role = "user", .content = "a" },
                                 { .role = "assistant", .content = "a" }, { .role = "user", .content = "a" } };
    int stray = -1, skip = tp->no_system != NULL;
    char err[512];
    for (int how = RENDER_PROMPT; how <= (RENDER_PROMPT | RENDER_NO_THINK) && stray < 0; how += RENDER_NO_THINK) {
        int *ids = template_ids(tp, m + skip, 4 - skip, how, err);
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
