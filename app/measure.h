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
    int position;               // of the question: 0 begin, 1 middle, 2 end; -1: does not apply
    int depth;                  // of the evidence in the text, in per cent; -1: does not apply
} EvalTurn;

typedef struct {
    const char *task;           // "needle", ..; "file" when it names none
    int number;                 // of the text in the run; all versions of one text share it
    int length;                 // tokens, as the item says or as counted
    int metric;                 // METRIC_*
    EvalTurn *turn;             // stb_ds
    const int *ids;             // (length) of the window of a text, which has one turn without words; NULL: a dialogue
} EvalItem;

// One row of the result: a method at a budget, and what it made of each item. That is a JSON object, the line of
// --eval-out (item_done writes it): tables, intervals and the page are made from its numbers, whether it was played now
// or read.
typedef struct {
    Side side;                  // the method; of a row that was read it has the name alone
    char *made;                 // the method, and the options that decide its bits, malloc'd
    int budget;                 // 0: it has none
    Json **line;                // (items) NULL: it is not there
    const Json **answer;        // stb_ds: the answers in all lines, once the run is over
} EvalRow;

// One number or word of a row.
typedef struct {
    char name[48];
    int shown;                  // 1: a table has it, too; CSV and JSON have all
    double x;                   // as CSV and JSON print it
    const char *word;           // in place of x and text; NULL: it is a number
    char text[48];              // as a table prints it
} Field;

// A run, or parts of one that are merged: its items, its rows, and their lines in memory and on disk.
typedef struct {
    const App *a;
    EvalItem *item;             // stb_ds; NULL: lines are merged, and the rows are those that they name
    Json **text;                // stb_ds: the lines of their files, which hold all their texts
    uint64_t hash;              // of these lines: answers on disk belong to these items
    int *ids;                   // stb_ds: the text that is cut into windows (--eval ppl, kld); NULL: there is none
    int items;                  // of the whole run
    EvalRow *rows;              // stb_ds
    char model[1024];           // the folder
    int kld;                    // 1: --eval kld
    const char *path;           // of the file that is read or written
    FILE *f;                    // where the next lines go; NULL: nowhere
    char *run;                  // what all rows of the run share, malloc'd; NULL: the first line will say it
    int twice;                  // items that were there already when they were read
} EvalRun;

void put_part(char **text, const char *sep, const char *part);         // appends a part, behind sep unless it is the first
double log_sum_exp(const float *x, int n);                    // of n logits: log p_i = x_i - log_sum_exp(x)

// All fields of a row (stb_ds); the row as a JSON object on one line, with the options that the user set.
Field *row_fields(const EvalRow *s, const EvalRun *run);
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
