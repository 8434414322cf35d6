// app/chat.h - opening a model, the record of a dialogue, replies, results, the chat and its session file.
#ifndef APP_CHAT_H
#define APP_CHAT_H
#include "options.h"
#include "terminal.h"
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
    float *logits;          // (V) after the last prefill or decode, a copy; old while the session has picked
    uint64_t rng;           // the sampler's state
    int closed;             // 1: the reply's end-of-turn id is already in the cache
    int rewrote;            // 1: the chat has said that its template rewrites history
    int stale;              // 1: the session is empty and waits to be made from the record (session_ready)
    int picked;             // the budget that the chat picked for the dialogue; 0: it is the user's, or the method's
    char *pending;          // the message whose reply is being made, malloc'd; NULL: none
    int log;                // the descriptor of --session's file, locked; 0: there is none
    uint64_t logged;        // a hash of what the file holds; 0: not known
    uint64_t fingerprint;   // of the model, once it was asked for; 0: not yet
    double ttft;            // seconds from the start of the last prefill to its logits
    const char *reply;      // the text of -p's reply, for --json; NULL: none, or it was printed
    struct Trace *trace;    // --trace; NULL: it is not given
    const char **stop;      // texts that end a reply (stb_ds array); NULL: none
    const char *finish;     // why the last reply ended: "stop", "length", "context" or "interrupt"
} App;

typedef struct {
    App app;                // the session of the method, and its own record of the dialogue
    const char *why;        // its sentence of side_methods; NULL: the method in use, not of the list
    char label[32];         // the method's name, and the budget where it has one
    char refused[512];      // why there is no session; "" when there is one
    char *reply;            // the last reply, malloc'd
    int made;               // its tokens
    double read;            // bytes of rows that a decode step of it read, the mean
    int asked, right;       // questions so far, and those answered right
    double read_sum;        // of `read` over the questions
    double kept[2];         // sums over wrong [0] and right [1] answers: share of heads that still
                            // hold the rows of the words asked for
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
// The index of the largest of x (n); the first of equal ones.
int argmax(const float *x, int n);

// The next id, drawn from the last logits as the sampling options say. --temp 0 takes the largest
// logit and leaves the random numbers alone.
int sample(App *a);

// ---- the record
// Frees ids and texts of one turn.
void turn_free(Turn t);

// Forgets all turns; the session keeps its rows until it is reset.
void record_clear(App *a);

// The turn that the next message of the record prefills: text as the chat template renders it
// behind the turns so far, or, without a template, the plain text, with BOS in front of the first
// turn where the tokenizer adds one. Where the template refuses it the turn has no ids, and err says why.
Turn render_turn(const App *a, const char *text, char err[512]);

// The template writes the last `back` ids of the record otherwise, now that t follows: they leave the
// record, whose texts stay. What stands there now is in t.
void record_take_back(App *a, Turn *t);

// The same for the session, which is then made from the record unless its rows can simply be cut.
int session_take_back(App *a, Turn *t);

// A copy of a turn, of its reply as far as it is ids the first n_dec of them.
Turn turn_copy(const Turn *from, int n_dec);

// All ids of a record, as they are fed (stb_ds array).
int *record_ids(const Turn *turns);

// A copy of the record (stb_ds array), for turns_free.
Turn *turns_copy(const Turn *turns);
void turns_free(Turn *turns);

// One prefill of a turn's ids; the logits of the last one and the time it took stay in the App.
void feed_prefill(App *a, const Turn *t);

// One decode step; its logits stay in the App, or the best of them in the session.
void feed_decode(App *a, int id);

// Makes the session from the record if it was emptied (undo_prefill). 0, or -1: the method does not
// open again, and a line on stderr says why.
int session_ready(App *a);

// Do these turns, fed from an empty cache, fit into the positions that the method of s has? 0, or
// -1 with err.
int record_fits(const Session *s, const Turn *turns, char err[512]);

// ---- generating a reply
// The most rows a head may hold: -c, or with -c 0 the model's own limit.
int ctx_limit(const App *a);

// The same, when a method that drops rows may do so now.
int make_room(const App *a, int n);

// The next id of a reply; -1: it is over, and a->finish says why. What is shown is also fed, counted and
// recorded, so there must be room for it.
int reply_next(App *a);

// Where the first of the stop texts begins in a text of n bytes; -1: none is in it.
int stop_place(const char **stop, const char *text, size_t n);

// Makes a reply: decodes until a stop id, a stop text, n tokens (n < 0: no limit), a full context or
// Ctrl-C, and writes the text to out as whole UTF-8 characters. Its ids go into the record's last turn;
// the stop id is neither fed nor recorded, a stop text is both. Returns the number of tokens made.
int generate(App *a, int n, FILE *out);

// ---- results
// n per second; 0 before any time has passed.
double rate(long n, double seconds);

// Bytes of K and V rows that attention reads in a decode step, the mean over all steps; 0 before
// the first.
double bytes_a_step(const Session *s);

// n bytes in the unit that leaves a number below 1000: "840 B", "1.2 MB", "120 MB".
void human_bytes(double n, char out[32]);

// ---- results as JSON (--json)
// x with `digits` significant digits and without an exponent, as a JSON number; null when x is none.
void json_real(FILE *f, double x, int digits);

// "key":"text", with the comma behind it.
void json_pair(FILE *f, const char *key, const char *text);

// The options that the user set, as one object.
void json_options(const App *a, FILE *f);

// "ids":[..]
void write_ids(FILE *f, const int *ids);

// ,"rows": [layer][KV head] = the source tokens of the rows held.
void json_rows(const Session *s, FILE *f);

// ,"views": [layer][query head] = the row numbers that the last decode step read: idx, and every
// row from tail on. An empty idx with tail 0 is every row.
void json_views(const Session *s, FILE *f);

// Tokens of the session, tokens a second, and milliseconds to the last prefill's logits.
void json_speed(const App *a, FILE *f);

// Bytes of the cache: held, what full attention would hold, read in a decode step, of indexes and
// views, held at most; and of the rooms of passes in the host's memory.
void json_bytes(const Session *s, FILE *f);

// The whole run as one object on one line.
void print_json(const App *a, FILE *f);

// ---- results for people
// Does any part of the method choose rows by --budget?
int uses_budget(const Session *s);

// The tokens of the dialogue that a session has seen, without a method's own.
int tokens_said(const Session *s);

// The rows that are held as words: "73 of 336 rows a head", "12..90 of 336 rows a head", "all 336 rows
// a head", and why none of those is gone that a method drops.
void rows_in_words(const Session *s, char out[96]);

// ---- --ids FILE
// Is there nothing but white space in [p,end)?
int is_blank(const char *p, const char *end);

// Feeds the file's turns to the session, and writes the logits of every prefill and decode to
// --dump-logits.
int run_ids(App *a);

// ---- --trace FILE
// Opens --trace, if it is given, for the App's session. Exit 1 when the file cannot be written,
// exit 2 when the layers are wrong.
void trace_open(App *a);

// Ends it, if there is one. keep 0: the run has failed, and its trace goes.
void trace_close(App *a, int keep);

// ---- sessions on disk
// The fingerprint of the App's model, worked out when it is first asked for.
uint64_t app_fingerprint(App *a);

// Writes " --NAME VALUE", the value in quotes, if it is given and not the default.
void write_option(const App *a, const Options *plain, const char *name, FILE *f);

// Writes the method, and the options besides the model that decide which bits a session computes,
// as they stand on a command line: those of its parts, the shared ones, those of the template.
void write_making(const App *a, FILE *f);

// What `write` writes of the App, malloc'd.
char *written(const App *a, void (*write)(const App *a, FILE *f));

// ---- reading them
// Does a dialogue of these turns need more rows than -c allows, whatever happens on the way? Only a
// method that drops no row and adds none can be asked beforehand.
int record_overflows(const App *a, const Turn *turns);

// Feeds the record once more, from an empty cache. 0; -1 when the method does not open again, with the reason in
// a->s->err, and then the session is as it was. within 1: also 1, in the middle of it, when -c does not allow so many
// rows.
int replay(App *a, int within);

// Appends a list of ids below V to *ids (stb_ds). 0, or -1 with why.
int ids_of_json(const Json *list, int V, int **ids, char why[128]);

// Appends n ids to an stb_ds array, and returns it.
int *ids_append(int *to, const int *ids, int n);

// The text of a reply, malloc'd.
char *reply_text(const App *a, const Turn *t);

// ---- a turn of the chat
// Has the model a row for each of these ids (stb_ds array)? 0, or -1 with err.
int ids_known(const Config *c, const int *ids, char err[512]);

// Feeds the next message, and records it. 0; or -1, with err, which is empty where there is nothing to feed: the template
// or the method refuses it, it names a token without a row, or it does not fit.
int message_feed(App *a, const char *text, char err[512]);

// Sends one message and writes the reply to out. 0, or -1 when it does not fit, or names a token
// that the model does not have, and nothing was fed.
int chat_turn(App *a, const char *text, FILE *out);

// Forgets the dialogue. 0, or -1: the method does not open again, a line on stderr says why, and the
// dialogue stays.
int chat_clear(App *a);

// ---- several methods side by side
// Opens a side. Model, tokenizer, template and options are a's; method is what plays.
void side_open(Side *x, const App *a, const Options *o, const char *method, const char *why);

// Closes it. The model and what else it borrowed stay.
void side_close(Side *x);

// ---- the demonstration
// --demo and /demo. Returns the exit code.
int demo(App *a);

// ---- the chat
// --session FILE: locks it, and goes on with the dialogue in it, if there is one. A file that cannot be
// saved is found now, not when there is something to save.
void session_begin(App *a);

// --session FILE: keeps the dialogue in it, for the last time.
void session_end(App *a);

// Says that a message got no reply before its chat ended. offer 1: arrow up brings it back.
void pending_tell(const App *a, int offer);

// The mode without a prompt: the whole chat, on a terminal or through pipes. Returns the exit code.
int chat(App *a);

// ---- metrics
// The words of a text: an stb_ds array of malloc'd strings, for words_free.
char **words_of(const char *text, int how);

// Frees a list that words_of made.
void words_free(char **w);

// Does the reply hold the answer as whole words in their order? With `whole`: and nothing else?
int holds_answer(const char *said, const char *gold, int whole);

// ---- opening the model
// A file or folder that comes with the program: beside it, else in the working directory. Returns path.
enum { PROGRAM_PATH = 1200 };
const char *beside_program(const char *name, char path[PROGRAM_PATH]);

// The shipped model.
void default_model(Options *o);

// ---- where a model lies
// -m and --tokenizer by the folders they stand for. A path that is too long stays as it is, for
// config_load to refuse.
void find_models(Options *o);

// ---- the memory of this machine
// Bytes that may still be used: what the system has available, or what is left of the limit of a
// container, whichever is less. -1: not known.
double memory_free(void);

// The numbers in a model's matrices.
size_t parameters_of(const Config *c);

// Reads the config: of --model, of the shipped model, or of the shape of --synthetic.
void open_config(App *a);

// Opens the weights of that config, or makes random ones.
void open_weights(App *a);

// Both.
void open_model(App *a);

// ---- choosing the device of -d auto
// Makes cuda or cpu of -d auto, and says with -v why. The plan is that of --method; other methods
// of a comparison ask again. Then says whether the device leaves --exact without effect.
void choose_device(App *a);

// -d cuda in a program that has no GPU half: exit 1.
void check_device(const Options *o);

// ---- opening the rest, and closing
// Opens tokenizer and template. needed: text will be read or written, so a missing tokenizer, or one
// that names ids the model does not have, ends the program; without it a line on stderr says that
// there is none. (--dump-tokens has no model.)
void open_tokenizer(App *a, int needed);

// Opens the session of --method and seeds the sampler.
void open_session(App *a);

// Closes whatever was opened.
void app_close(App *a);

extern int arg_count;                           // the command line, for a report's source
extern char **args;

extern const DemoLine demo_lines[N_DEMO_LINES];

#endif
