// app/measure.h - what a method costs and saves: evaluation, calibration, benchmark.
#ifndef APP_MEASURE_H
#define APP_MEASURE_H
#include "chat.h"
#include <stb/stb_ds.h>

typedef struct {
    const char *user;           // what the visitor says
    const char *reply;          // a right reply, as a whole sentence; NULL: only the answer is known
    int *span;                  // stb_ds: where in the reply its answer stands, as pairs of byte offsets
                                //   [from,to); none: the whole reply is the answer
    const Json *answers;        // the list of right answers; NULL: the turn is not scored
    const Json *classes;        // the list of labels to choose from (METRIC_CLASS)
    int given;                  // 1: the reply is fed as it is, and nobody is asked for it
    int position, depth;        // as in Answer
} EvalTurn;

typedef struct {
    const char *task;           // "needle", ..; "file" when it names none
    int number;                 // of the text in the run; all versions of one text share it
    int length;                 // tokens, as the item says or as counted
    int metric;                 // METRIC_*
    EvalTurn *turn;             // stb_ds
} EvalItem;

typedef struct {
    EvalItem *item;             // stb_ds
    uint64_t hash;              // of their lines: answers on disk belong to these items
    Json **line;                // stb_ds: the lines of the items, which hold all their texts
} EvalSet;

// One scored answer, or one window of a text. Tables, intervals and the report are made from lists of these. Whole
// numbers are doubles, too, so that all of them are written, read and averaged alike.
typedef struct {
    const char *task;           // "needle", "multiturn", ..; owned by the item set, or by the EvalRun that read it
    char *said;                 // what was said, malloc'd; NULL: it was read, or nothing was asked
    double item, turn, turns;   // text number in the run, turn of the item, turns the item has
    double position;            // where the query stands: 0 begin, 1 middle, 2 end, -1 does not apply
    double length;              // tokens of the context
    double depth;               // of the evidence in the text, in per cent; -1 does not apply
    double score;               // 0..1 by the item's own score
    double found;               // 1: it holds the answer
    double nll;                 // NLL of the right answer per token, in nats (forced pass)
    double predicted;           // tokens of the right reply, with the frame around the answer (forced pass) ..
    double kld;                 // .. their KL divergence from full attention, a sum over them
    double top1;                // .. and those of them where the best token is that of full attention
} Answer;

// One row of the result: a method at a budget. Or what such a row made of one item.
typedef struct Score Score;
struct Score {
    char name[160];
    char *made;                                 // the method, and the options that decide its bits, malloc'd
    Session *s;                                 // while the run goes on
    int budget, items;
    double stored, full, attended;              // bytes, sums over the items: the rows held, the rows
                                                //   full attention would hold, those read a step
    double prefill_s, decode_s;                 // seconds, sums over the items
    double n_prefill, n_decode;                 // tokens of those seconds
    double peak;                                // bytes of rows, the most that any item held
    Answer *answers;                            // stb_ds
    Score *part;                                // of a row: what it made of each item; `items` 0: it is not there
};

// One number or word of a row.
typedef struct {
    char name[48];
    int shown;                  // 1: a table has it, too; CSV and JSON have all
    double x;                   // as CSV and JSON print it
    const char *word;           // in place of x and text; NULL: it is a number
    char text[48];              // as a table prints it
} Field;

// A run, or parts of one that are merged: its rows, and their answers in memory and on disk.
typedef struct {
    const App *a;
    Score *rows;                // stb_ds: they are added up at the end
    char model[1024];           // the folder
    int ppl, kld;               // 1: --eval ppl and kld; --eval kld
    int items;                  // of the whole run
    const char *path;           // of the file that is read or written
    FILE *f;                    // where the next answers go; NULL: nowhere
    char *run;                  // what all rows of the run share, malloc'd; NULL: the first line will say it
    int merges;                 // 1: the rows are those that the lines name; 0: other lines are passed over
    int twice;                  // items that were there already when they were read
    stbds_string_arena mem;     // the texts that were read
} EvalRun;

void put_part(char **text, const char *sep, const char *part);         // appends a part, behind sep unless it is the first
const char *list_word(const char *list, int k, char out[160]);         // the k-th word of "a,b,c"; NULL behind the last
void   json_exact(FILE *f, double x);                                  // with all its digits; null when it is none
double log_sum_exp(const float *x, int n);                             // of n logits: log p_i = x_i - log_sum_exp(x)

// All fields of a row (stb_ds); the row as a JSON object on one line, with the options that the user set.
Field *row_fields(const Score *s, const EvalRun *run);
void print_json_row(const Field *c, const App *a, FILE *f);

// I/N of --eval-shard: the first item, from 0, and the step to the next one. 0, or -1.
int shard_parse(const char *text, int *first, int *step);

// The modes --eval, which with --report has the page written; --eval-merge, without the model; --calibrate, in the
// frame of the model's chat template (tp; NULL: it has none); --bench. Each returns the exit code.
int evaluate(App *a, void (*report)(App *a, const EvalRun *run));
int eval_merge(App *a);
int calibrate(const Config *c, const Weights *w, const Tokenizer *t, const Template *tp, const Options *o);
int bench(Options *o);

#endif
