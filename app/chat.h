// app/chat.h - opening a model, the record of a dialogue, replies, results, the chat and its session file.
#ifndef APP_CHAT_H
#define APP_CHAT_H
#include "options.h"
#include "terminal.h"
#include "trace.h"
#include "../lib/template.h"
#include "../kvcomp.h"
#include <stb/stb_ds.h>

typedef struct {            // one turn of the record
    int *pre;               // ids fed by one prefill (stb_ds array)
    int *dec;               // ids fed by decode, one after the other (stb_ds array)
    int n_sys;              // leading ids of pre that are the system message
    int n_foot;             // leading ids of pre that end the previous reply
    int n_head;             // trailing ids of pre that open the next reply
    int back;               // of a new turn: so many ids at the record's end the template writes otherwise now
    char *user, *reply;     // the message and the reply as texts, malloc'd; reply NULL: what dec decodes to
} Turn;

typedef struct {
    Options *o;
    Config *c;
    Weights *w;
    Tokenizer *tok;         // NULL with --ids on a folder without a tokenizer
    Template *tp;           // NULL: raw text
    Session *s;
    char *method;           // the spec the session was opened with
    Turn *turn;             // the record (stb_ds array)
    uint64_t rng;           // the sampler's state
    int rewrote;            // so many ids the template has written otherwise as the dialogue went on
    int stale;              // 1: the session is empty and waits to be made from the record (replay)
    int picked;             // the budget that the chat picked for the dialogue; 0: it is the user's, or the method's
    const Turn *asked;      // the turn whose reply is to be made; NULL: none
    char *logged;           // what --session's file holds of this chat, malloc'd; NULL: there is no such file
    uint64_t fingerprint;   // of the model, once it was asked for; 0: not yet
    double ttft;            // seconds from the start of the last prefill to its logits
    TraceFile *trace;       // --trace; NULL: it is not given
    const char **stop;      // texts that end a reply (stb_ds array); NULL: none
    const char *finish;     // why the last reply ended: "stop", "length", "context" or "interrupt"
    char err[512];          // why the last command of a chat has failed
} App;

typedef struct {
    App app;                // the session of the method, and its own record of the dialogue
    char label[32];         // the method's name, and the budget where it has one
    char refused[512];      // why it cannot play; "" when it can
    char *reply;            // the last reply, malloc'd
    int asked, right;       // questions so far, and those answered right
} Side;

// --demo and /demo: a scripted dialogue, in words that the shipped model was taught. Facts, a little
// talk, and the questions about the facts, the latest told first.
typedef struct {
    const char *user;
    const char *answer;     // the words a right reply holds; NULL: nothing is asked
} DemoLine;

enum { N_DEMO_LINES = 18 };

// How a text is cut into words.
enum {
    WORDS_RAW,      // at white space
    WORDS_PLAIN,    // also in lower case and without ASCII punctuation
    WORDS_BARE      // also without the articles a, an, the
};

// ---- sampling
int argmax(const float *x, int n);                      // the index of the largest of x (n); the first of equal ones
int sample(App *a);                                     // the next id, drawn from the last logits as the options say

// ---- the record
void  turn_free(Turn t);                                // its ids and texts
Turn  turn_copy(const Turn *from, int n_dec);           // with the first n_dec ids of its reply
Turn *turns_copy(const Turn *turns);                    // of a record, for turns_free
void  turns_free(Turn *turns);
void  record_clear(App *a);                             // forgets all turns; the session keeps its rows
int  *record_ids(const Turn *turns);                    // all ids, as they are fed (stb_ds array)
int  *ids_append(int *to, const int *ids, int n);       // appends to an stb_ds array, and returns it
char *reply_text(const App *a, const Turn *t);          // of its reply, malloc'd
Message *messages_of_json(const Json *list, char err[512]);            // stb_ds array; NULL, and err: they are none

// The turn that the next message of the record prefills: text as the chat template renders it
// behind the turns so far, or, without a template, the plain text, with BOS in front of the first
// turn where the tokenizer adds one. Where the template refuses it the turn has no ids, and err says why.
Turn render_turn(const App *a, const char *text, char err[512]);

int render_how(const App *a);                           // RENDER_*: how the options have a dialogue rendered

// The template writes the last `back` ids of the record otherwise, now that t follows: they leave the record, whose
// texts stay, and the session, which is made from the record unless its rows can simply be cut (0, or -1 with err).
void record_take_back(App *a, Turn *t);
int  session_take_back(App *a, Turn *t, char err[512]);

void feed_prefill(App *a, const Turn *t);               // its ids; the time it took stays in the App
int  replay(App *a, char err[512]);                     // feeds the record once more: 0, or -1 with err

// ---- generating a reply
int ctx_limit(const App *a);                            // the most rows a head may hold: -c, or the model's own limit
int make_room(const App *a, int n, int extra, char err[512]); // room for n tokens more, if need be by dropping rows: 0, or -1
int reply_next(App *a);                                 // its next id; -1: it is over, and a->finish says why
int stop_place(const char **stop, const char *text, size_t n);         // where the first of the texts begins; -1

// Makes a reply: decodes until a stop id, a stop text, n tokens (n < 0: no limit), a full context or
// Ctrl-C, and writes the text to out (NULL: nowhere) as whole UTF-8 characters. Returns the number of tokens made.
int generate(App *a, int n, FILE *out);

// ---- results
typedef struct { char text[32]; } Words;
double rate(long n, double seconds);                    // n per second; 0 before any time has passed
double bytes_a_step(const Session *s);                  // of rows that attention reads in a decode step, the mean
Words human_bytes(double n);                            // "840 B", "1.2 MB", "120 MB"
int  uses_budget(const Session *s);                     // does any part of the method choose rows by --budget?
int  tokens_said(const Session *s);                     // tokens of the dialogue, without a method's own
void rows_in_words(const Session *s, char out[160]);    // "73 of 336 rows a head", and the like

void json_real(FILE *f, double x, int digits);          // a number without an exponent; null when x is none
void json_options(const App *a, FILE *f);               // "options":{..}, those that the user set
void json_rows(const Session *s, FILE *f);              // the rows that heads hold, the views of the last step
void json_numbers(const App *a, FILE *f);               // tokens, speed, what the cache and the rooms of passes hold
void write_ids(FILE *f, const int *ids);                // "ids":[..]
void print_json(const App *a, const char *text);        // the run as one object on a line of stdout; text: its reply

// ---- --ids FILE, --trace FILE
int  is_blank(const char *p, const char *end);          // is there nothing but white space in [p,end)?
int  run_ids(App *a);                                   // feeds the file's turns; writes logits to --dump-logits
void trace_open(App *a);                                // if it is given; exit 1 or 2 when it cannot be
void trace_close(App *a, int keep);                     // keep 0: the run has failed, and its trace goes

// ---- sessions on disk
uint64_t app_fingerprint(App *a);                       // of the model
void  write_option(const App *a, const Options *plain, const char *name, FILE *f);     // " --NAME "VALUE"", if changed
void  write_making(const App *a, FILE *f);              // the method, and the options that decide a session's bits
char *written(const App *a, void (*write)(const App *a, FILE *f));     // what `write` writes, malloc'd
int   ids_of_json(const Json *list, int V, int **ids, char why[512]);  // appends ids below V: 0, or -1 with why
int   read_whole(const Json *obj, const char *key, int lo, int hi, int *x, char err[512]);     // 0, or -1 with err
void  session_begin(App *a);                            // --session FILE: goes on with what is in it
void  session_end(App *a);                              // keeps the dialogue in it, for the last time

// ---- a turn of the chat
int  ids_known(const Config *c, const int *ids, char err[512]);        // has the model a row for each? 0, or -1
int  chat_turn(App *a, const char *text, FILE *out);    // sends a message; the reply goes to out, or nowhere: 0, or -1
int  chat_clear(App *a);                                // forgets the dialogue: 0, or -1 with a line, and it stays
int  chat(App *a);                                      // the mode without a prompt. Returns the exit code

// Feeds the next message, and records it. 0; or -1, and nothing has changed: the template or the method refuses it, it
// names a token without a row, or it does not fit, as err says; or err is empty, because there is nothing to feed, or
// Ctrl-C or a signal has ended it.
int message_feed(App *a, const char *text, char err[512]);

// ---- several methods side by side
// A side borrows model, tokenizer and template of a; method is what plays, with the options o.
void side_open(Side *x, const App *a, const Options *o, const char *method);
void side_close(Side *x);
void demo(App *a, const char *arg);                     // --demo and /demo. arg: for the table of commands

// ---- metrics
char **words_of(const char *text, int how);             // stb_ds array of malloc'd words, for words_free
void   words_free(char **w);
int    holds_answer(const char *said, const char *gold, int whole);    // as whole words; whole 1: and nothing else?

// ---- opening
enum { PROGRAM_PATH = 1200 };
const char *beside_program(const char *name, char path[PROGRAM_PATH]); // a file that comes with the program
void   default_model(Options *o);                       // --model becomes the shipped one
void   find_model(Options *o);                          // -m org/name becomes its folder in the hub's cache
double memory_free(void);                               // bytes that may still be used; -1: not known
size_t parameters_of(const Config *c);                  // the numbers in a model's matrices
void   open_config(App *a);                             // of --model, of the shipped model, or of --synthetic
void   open_weights(App *a);                            // of that config
void   open_model(App *a);                              // both
void   choose_device(App *a);                           // makes cuda or cpu of -d auto
void   open_tokenizer(App *a, int needed);              // and the template; needed 0: a line says there is none
void   open_session(App *a);                            // of --method, and seeds the sampler
void   app_close(App *a);                               // whatever was opened
App    app_beside(const App *a, Options *o);            // borrows model and texts; o, record and session are its own
void   app_beside_close(App *a);

extern int arg_count;                           // the command line, for a report's source
extern char **args;

extern const DemoLine demo_lines[N_DEMO_LINES];

#endif
