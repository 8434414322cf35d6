// lib/template.h - what a model expects around the messages of a dialogue.
#ifndef LIB_TEMPLATE_H
#define LIB_TEMPLATE_H
#include "tokenizer.h"
#include "checkpoint.h"

enum {                          // which white space goes
    TRIM_SYSTEM = 1,            // at the ends of the system text
    TRIM_USER = 2,              // at the ends of the user's words
    TRIM_BOTH = 3,
    TRIM_WHOLE = 4,             // at the ends of the two taken as one text
    TRIM_REPLY = 8,             // at the ends of a reply in a dialogue that is given as a whole
    TRIM_SYSTEM_END = 16        // at the right end of the system text only
};

typedef struct {                // the texts in the order in which they stand; NULL: nothing
    const char *name;
    const char *needs;          // a token without which the template makes no sense
    const char *open;           // before everything
    const char *sys, *sys_end;  // around the system text
    const char *user, *user_end;        // around the user's words
    const char *head;           // opens the reply
    const char *think;          // behind head when the model may think
    const char *no_think;       // behind head when it must not
    const char *end;            // the token that ends a reply; the model makes it
    const char *foot;           // behind end
    const char *before, *after; // around a reply, in a dialogue that is given as a whole
    const char *stops;          // further tokens that end a reply, blank-separated
    const char *system;         // the default system text; NULL: no system message unless given
    const char *alone;          // stands for `open` when no system text is given; NULL: nothing does
    int in_user;                // 1: the system message stands behind `user` of the first turn
    int always;                 // 1: there is a system message even when its text is empty
    int trim;                   // TRIM_*
} TemplateText;

typedef struct {                // the texts of a family or of a program, fitted to a model
    TemplateText x;
    char **own;                 // stb array: the texts that were read off a program
    char *no_system;            // why the program writes no system message; NULL: it does
    int *stop;                  // stb array: ids that end a reply, first the template's `end`
    int parse_user;             // 1: the user's text may name special tokens (--parse-special)
} Template;

typedef struct { const char *role, *words; } Message;

// ---- The families
void template_free(Template *tp);

// ---- Fitting a family to a model
// The template of a model whose folder is dir. name: a family, or the path of a Jinja program;
// NULL: what the folder says, and "none" when it says nothing. NULL when it is refused: err has the
// reason, and the names that --chat-template takes.
Template *template_load(const char *dir, const char *name, const Tokenizer *t, char err[512]);

// ---- Rendering a turn
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
                   const char *user, int think, int reply_closed, int *ids, int *n_sys,
                   int *n_foot, int *n_head);

// Appends the ids of a dialogue that is given as a whole, for --dialogue, and returns them: what the
// program writes for it, as far as that does not rewrite history. The messages are user and
// assistant in turn, behind a system message or none, and a user has the last word.
int *template_dialogue(const Template *tp, const Tokenizer *t, const Message *m, int n, int think,
                       int *ids);

// ---- Does the tokenizer belong to the model?
// Has the embedding a row for every id that any dialogue needs: those of the BPE vocabulary, the
// tokens with a role, and what the template (NULL: none) writes? Returns 0, or -1 with the reason in
// err.
//
// Other added tokens may lie behind the last row. Published checkpoints have a <pad> there, or
// tokens kept for later, and their model never sees them. Such a token is refused only in a text
// that names it.
int tokenizer_fits(const Tokenizer *t, const Template *tp, const Config *c, char err[512]);

#endif
