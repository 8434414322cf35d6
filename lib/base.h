// lib/base.h - what every other part stands on: how the program ends, memory, threads, files, texts, options
// and JSON.
//
// It knows nothing of models. A function returns normally or ends the program by die() with an exit code,
// unless its comment says otherwise; where a function returns a status, 0 is success.
#ifndef LIB_BASE_H
#define LIB_BASE_H
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#if defined(__CUDACC__)
#define KV_HD __host__ __device__               // compiled for both devices by nvcc
#else
#define KV_HD
#endif
#if defined(__GNUC__)
#define KV_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define KV_PRINTF(a, b)
#endif

// Growing arrays and hash maps (Debian package libstb-dev), with memory from here.
#define STBDS_REALLOC(c, p, n) xrealloc(p, n)
#define STBDS_FREE(c, p) free(p)

enum {                          // exit codes of the program
    EXIT_OK        = 0,
    EXIT_RUN       = 1,         // something failed while running: a file that cannot be written, positions that end
    EXIT_USAGE     = 2,         // options that are wrong or do not go together
    EXIT_MODEL     = 3,         // a model, tokenizer or adapter that cannot be used
    EXIT_MEMORY    = 4,
    EXIT_CHECK     = 5,         // a check that was asked for found a difference
    EXIT_INTERRUPT = 130,       // left by Ctrl-C
};

#ifdef __cplusplus
extern "C" {
#endif

// ---- numbers
KV_HD static inline int    min_int (int a, int b)       { return a < b ? a : b; }
KV_HD static inline int    max_int (int a, int b)       { return a > b ? a : b; }
KV_HD static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
KV_HD static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

// The generator of every random choice: adds a constant to the state and returns a mix of its bits
// (D31).
KV_HD static inline uint64_t splitmix64(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// The first number that splitmix64 draws from the state x.
KV_HD static inline uint64_t mix64(uint64_t x) { return splitmix64(&x); }

// Goes on with the 64-bit hash h over n bytes. It finds damage and tells models apart; it does not stop
// anybody who wants two texts with the same hash.
uint64_t hash_bytes(uint64_t h, const void *data, size_t n);

// n ids below V, the same at every call (stb_ds array).
int *random_ids(int n, int V);

double now(void);                       // seconds of a clock that only goes forward

// ---- the end of the program, and what is said on stderr
void die (int code, const char *fmt, ...) KV_PRINTF(2, 3);     // one line, then exit(code). Never returns
void say (const char *color, const char *who, const char *fmt, ...) KV_PRINTF(3, 4);
#define warn(...) say(COLOR_WARNING, "kvcomp: ", __VA_ARGS__)   // one line that begins with the program's name
#define tell(...) say("", "", __VA_ARGS__)                      // one line as it is
int  fault(char err[512], const char *fmt, ...) KV_PRINTF(2, 3);       // one line into err -> -1

extern void (*before_leaving)(int say); // puts right what a program that ends must; NULL: nothing
extern jmp_buf *die_jump;               // tests and fuzzers: die() jumps here with its exit code and does not exit
extern char die_text[1024];             // the message of the last die()

// Tells whoever watches that a share (0..1) of something long is done. 0: it begins, 1: it is over.
void progress_tell(const char *what, double share);
extern void (*progress_hook)(const char *what, double share);  // who watches; NULL: nobody

// ---- colours
enum { COLOR_AUTO, COLOR_ALWAYS, COLOR_NEVER };
#define COLOR_USER    "\x1b[32m"        // green
#define COLOR_WARNING "\x1b[33m"        // yellow
#define COLOR_ERROR   "\x1b[31m"        // red
#define COLOR_NUMBERS "\x1b[2m"         // faint
#define COLOR_OFF     "\x1b[0m"
extern int color_mode;                  // COLOR_*

// The sequence if this stream gets colours, else "". auto: a terminal that has a name other than dumb does,
// unless NO_COLOR says that the user wants none.
const char *in_color(FILE *f, const char *sequence);

// ---- texts from outside, UTF-8
// Writes n bytes. Control characters become \x1b, or \u009b; newline, tab and everything else stay.
void show(FILE *f, const char *s, size_t n);

int   utf8_read(const char *s, size_t n, uint32_t *c);  // bytes of the well-formed character at s, and its code point;
int   utf8_length(const char *s, size_t n);             // 0: there is none
char *utf8_put(char *o, unsigned c);           // writes code point c -> the byte behind it
void  bytes_put(char **out, const char *s, size_t n);          // appends n bytes to an stb_ds array

// ---- memory. Without any the program ends with exit 4
extern int (*allocation_fails)(void);   // tests: asked before every allocation, 1 makes it fail; NULL: none does
enum { LINE_ROOM = 2048 };              // bytes of the longest line on stderr; what is longer is cut
void *xmalloc(size_t n);
void *xcalloc(size_t n, size_t size);   // all zero
void *xrealloc(void *p, size_t n);
char *copy_bytes(const char *s, size_t n);     // NUL-terminated; the caller frees it
char *copy_text(const char *s);

// A stream that writes into memory: *text (malloc'd) and *n hold what was written once it is closed.
FILE *memory_stream(char **text, size_t *n);
void  memory_stream_close(FILE *f);

// An arena hands out memory that lives until its mark is reset. Its blocks stay, so that a pass allocates
// nothing once one like it has run.
typedef struct Arena Arena;
enum { ARENA_BLOCK = 1 << 20 };         // bytes of the smallest block
Arena *arena_new(void);
void   arena_free(Arena *a);
size_t arena_bytes(const Arena *a);             // what it holds
void  *arena_take(Arena *a, size_t bytes);      // 64-byte aligned, valid until arena_reset
size_t arena_mark(const Arena *a);              // remember the fill level ...
void   arena_reset(Arena *a, size_t mark);      // ... and fall back to it

// ---- threads: OpenMP's numbers, or those of one thread without it
int  n_threads(void);                   // how many a parallel region gets
int  thread_id(void);                   // this one's number in its region
int  worth_threads(size_t multiply_adds);       // is that worth the microseconds that starting a team costs?
void threads_use(int n, size_t parameters);     // n, or with 0 what suits a model of so many parameters

// Has waiting threads spin shortly: sets GNU OpenMP's variable and starts the program again, once. Returns if
// nothing has to be done, or it cannot be done.
void spin_shortly(char **argv);

// ---- files. A FIFO, a device or a socket is never waited for, and nothing is read without a bound
enum {
    MOST_CONFIG    = 64 << 20,          // bytes of config.json and its like: an index, scores, needles
    MOST_TOKENIZER = 256 << 20,
    MOST_TEXT      = 256 << 20,         // of a prompt, ids, dialogues, a chat template, a session
    MOST_ANSWERS   = 1 << 30,           // of --eval-out, which a long run itself makes long
};
int file_exists(const char *path);

// Opens a regular file for reading, and describes it in *st -> the descriptor; -1, and the reason without
// the path in err.
int open_input(const char *path, struct stat *st, char err[256]);
FILE *descriptor_stream(int fd);        // for writing, and reading again; NULL, and errno
int open_failure(void);                 // the exit code of a file that could not be opened

// The whole file, NUL-terminated, *size bytes without the NUL; the caller frees it. NULL, with the reason in
// err, when it cannot be read or has more than `most` bytes. read_plain_text refuses a 0 byte.
char *read_bounded   (const char *path, size_t most, size_t *size, char err[256]);
char *read_plain_text(const char *path, size_t *size, char err[256]);

// Saving: a file is written beside its place, brought to the disk and renamed. Until then the old one is as
// it was, whatever happens.
typedef struct {
    FILE *f;                    // to be written to
    char *path;                 // the file it will be, behind all symbolic links
    char *temp;                 // the file in the making, in the same folder
    int old;                    // 1: there is a file at path, which stays if this one fails
    int slot;                   // its place in temp_files
} Saving;
int  save_begin(Saving *x, const char *path, char err[512]);   // 0, or -1 when nothing can be saved there
int  save_begin_open(Saving *x, const char *path, char err[512]);      // a new one gets the umask's permissions
int  save_keep (Saving *x, char err[512]);                     // the file takes its place: 0, or -1
void save_drop (Saving *x);                                    // gives it up; one never begun is left alone
const char *save_reason(void);                                 // errno as words; 0: a disk that may be full
int  temp_files_remove(void);                                  // what a signal handler may call -> how many
enum { TEMP_FILES = 8 };
extern const char *volatile temp_files[TEMP_FILES];            // files in the making; NULL: none

// ---- options. Names are written without dashes; a value is checked when it is set, so a getter cannot fail
typedef struct {                // one option
    const char *name;
    // 'i' int, 'f' real, 's' text, 'b' flag, 'c' choice; 'p' the name of a file, which only the command
    // line gives
    char kind;
    const char *def;            // default; of a choice "a|b|c", and the first one is the default
    const char *help;
    double lo, hi;              // the least and the largest value, both allowed; equal: any
    int runs;                   // in which runs of the program it has an effect, a bit each; 0: in all
    const char *flag;           // its other name on the command line, with its dash: "-m"; NULL: none
    const char *part;           // the title of the paragraph of --help that it begins; NULL: it begins none
} Opt;

typedef struct Options {
    const Opt **table;                          // the tables its options come from (stb_ds array)
    struct { char *key; char *value; } *map;    // the value as text, malloc'd (stb_ds string map)
    struct { char *key; int value; } *given;    // the options the user has set; their value is 1 (likewise)
} Options;

Options *options_new(void);                             // without any option
void     options_add(Options *o, const Opt *table);     // those of a table ended by name NULL, at their defaults
Options *options_like(const Options *o);                // the same options, at their defaults
Options *options_copy(const Options *o);                // and with what the user has set
void     options_free(Options *o);
int      options_set(Options *o, const char *name, const char *value, char err[256]);  // 0, or -1

int         opt_given (const Options *o, const char *name);     // 1: set by the user
int         opt_int   (const Options *o, const char *name);     // flags too: 0 or 1
double      opt_real  (const Options *o, const char *name);
const char *opt_str   (const Options *o, const char *name);     // "" when empty
int         opt_choice(const Options *o, const char *name, const char *words);  // place of the value in "a|b|c"

const Opt *opt_find   (const Options *o, const char *name);     // NULL: there is none
const Opt *opt_find_in(const Opt *table, const char *name);
int        word_place (const char *words, const char *v);       // place of v in "a|b|c"; -1
int        bytes_place(const char *words, const char *v, size_t n);     // the same of n bytes

// The words of a list that any of the separators parts, one after the other: copies the next one, and moves *list
// behind it. An empty word counts. 0: there is no other one.
int next_word(const char **list, const char *separators, char *word, size_t size);

// Suggestions: takes name into *best if it is nearer to what was typed than *distance; and how far is too far.
void nearer_name(const char *typed, const char *name, const char **best, int *distance);
int  farthest_misspelling(const char *typed);

// "2048", "512,1024", "2:98:3" (from, to, step) or a mix as an stb_ds array, every number once; exit 2 names
// the option.
int *number_list(const char *name, const char *text, long lo, long hi);

// ---- JSON: a strict reader (RFC 8259), and a writer
enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };
typedef struct Json Json;
struct Json {
    int type;                   // JSON_*
    int is_int;                 // 1: a number without fraction or exponent that fits int64
    int n;                      // children of an array or object
    double num;                 // value of a number; a bool is 0 or 1
    int64_t i;                  // the same value where is_int is set; a bool is 0 or 1
    char *str;                  // a string's bytes, UTF-8 as written, and a NUL. NULs may stand inside
    size_t len;                 // bytes of str without the last NUL
    Json *item;                 // (n) children of an array or object, in the order of the text
    char **key;                 // (n) keys of an object, as often as they are written
};

Json *json_parse(const char *text, size_t n, char err[256]);    // the root; NULL with place and reason
Json *json_read(const char *path, size_t most, char err[512]);  // that of a file
void  json_free(Json *root);                                    // NULL is allowed
const Json *json_get(const Json *obj, const char *key);         // the last one of that key; NULL. Linear
int   json_is  (const Json *j, int type);
int   json_none(const Json *j);                                 // absent or null
const char *json_text(const Json *obj, const char *key);        // "" when it is no text, or holds a NUL
double json_num(const Json *obj, const char *key);              // NAN when it is no number
int   json_holds_nul(const Json *v);                            // does any text in v hold a 0 byte?
void  json_escape(FILE *f, const char *s, size_t n);            // a JSON string, quotes included

// A printf for JSON: ' in fmt becomes ", and %s is a JSON string with its quotes (NULL: null). Numbers are %d, %ld,
// %zu, and %f or %g, of which those that are none become null.
void  json_print(FILE *f, const char *fmt, ...) KV_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif
#endif
