// lib/template.h - what a model expects around the messages of a dialogue: its chat template.
//
// A chat template is a program in the Jinja language that writes a list of messages as one text. It is run
// as it is, over the whole list, each time: what a new message adds is what the text has more than before.
// The text becomes ids. Names of special tokens count in what the template itself writes, and nowhere else:
// a message that contains "<|im_end|>" says these ten characters and ends nothing.
//
// Where a function fails it returns NULL, with the reason as one line in err.
#ifndef LIB_TEMPLATE_H
#define LIB_TEMPLATE_H
#include "tokenizer.h"
#include "checkpoint.h"
#include <time.h>

typedef struct {
    const char *role;           // "system", "user" or "assistant"
    const char *content;        // UTF-8
    const int *ids;             // (n_ids) of a reply: the ids that the model made, whose text content is.
    int n_ids;                  // They stand for it wherever the template leaves it whole. NULL: none
} Message;

enum {                          // how a dialogue is rendered
    RENDER_PROMPT   = 1,        // with what opens the next reply (add_generation_prompt)
    RENDER_NO_THINK = 2,        // the reply shall have no thoughts (enable_thinking is false)
    RENDER_TRUST    = 4         // the messages may name special tokens (--parse-special)
};

typedef struct {
    char *name;                 // as --chat-template has it; "the model's own" without a name
    int *stop;                  // stb array: ids that end a reply, first the one that the template writes there
    char *no_system;            // why it writes no system message; NULL: it does

    int own_system;             // 1: without a system message it writes one of its own

    // Not for others.
    const Tokenizer *t;
    char *source;               // the program, line breaks as \n
    struct tm today;            // midnight of the day, for strftime_now
} Template;

// The template of a model whose folder is dir: chat_template.jinja, else that of tokenizer_config.json, else
// "none". name: chatml, llama3, llama2, mistral, zephyr, none or a file instead; NULL: the folder's. t has to
// outlive the template. A program that is broken, has more than 1 MB, or cannot write a dialogue is refused.
Template *template_load(const char *dir, const char *name, const Tokenizer *t, char err[512]);
void template_free(Template *tp);

// What the template writes for n messages, malloc'd, *size bytes and a NUL. from, unless it is NULL, becomes
// a malloc'd array of *size numbers: 0 where a byte is the template's own, 1 + i where it is of message i.
char *template_render(const Template *tp, const Message *m, int n, int how, size_t *size, uint16_t **from,
                      char err[512]);

// The same as ids (stb array): what a model is fed for the dialogue, with BOS in front where the tokenizer
// wants one and the template writes none.
int *template_ids(const Template *tp, const Message *m, int n, int how, char err[512]);

// Has the embedding a row for every id that any dialogue needs: those of the BPE vocabulary, the
// tokens with a role, and what the template (NULL: none) writes? Returns 0, or -1 with the reason in
// err.
//
// Other added tokens may lie behind the last row. Published checkpoints have a <pad> there, or
// tokens kept for later, and their model never sees them. Such a token is refused only in a text
// that names it.
int tokenizer_fits(const Tokenizer *t, const Template *tp, const Config *c, char err[512]);

#endif
