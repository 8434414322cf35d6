// lib/base.c - see base.h.
#define _GNU_SOURCE
#include "base.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#else                                   // one thread
static int  omp_get_max_threads(void)      { return 1; }
static int  omp_get_thread_num(void)       { return 0; }
static void omp_set_num_threads(int n)     { (void)n; }
#endif

int (*allocation_fails)(void);

#define STB_DS_IMPLEMENTATION           // here, once for all
#include <stb/stb_ds.h>
#undef STB_DS_IMPLEMENTATION

// ==================================================================================================== HELPERS
// ---- texts from outside

// What stands for the character that the n > 0 bytes at s begin with, NUL-terminated in out. Returns
// how many of the bytes that is. Control characters become \x1b, or \u009b where two bytes of UTF-8
// hold one; newline, tab and everything else stay.
static int shown_char(const char *s, size_t n, char out[8]) {
    uint32_t c = (unsigned char)*s;
    int k = max_int(utf8_read(s, n, &c), 1);
    if (c != '\n' && c != '\t' && (c < ' ' || (c >= 127 && c < 0xa0))) {
        snprintf(out, 8, k == 2 ? "\\u%04x" : "\\x%02x", (unsigned)c);
    } else {
        memcpy(out, s, (size_t)k);
        out[k] = 0;
    }
    return k;
}

// Writes n bytes of text with its control characters shown.
void show(FILE *f, const char *s, size_t n) {
    char one[8];
    for (size_t i = 0; i < n; ) {
        i += (size_t)shown_char(s + i, n - i, one);
        fputs(one, f);
    }
}

// ---- colours
int color_mode;                  // COLOR_*

// The sequence if this stream gets colours, else "". auto: a terminal that has a name other than
// dumb does, unless NO_COLOR says that the user wants none.
const char *in_color(FILE *f, const char *sequence) {
    const char *none = getenv("NO_COLOR"), *term = getenv("TERM");
    int knows = term && *term && strcmp(term, "dumb") && !(none && *none);
    int on = color_mode == COLOR_ALWAYS || (color_mode == COLOR_AUTO && knows && isatty(fileno(f)));
    return on ? sequence : "";
}

// Writes who and a text as one line on stderr, in a colour: control characters of the text, which may quote a
// file, are shown, and its line breaks become blanks.
void say(const char *color, const char *who, const char *fmt, ...) {
    char line[LINE_ROOM], shown[4 * LINE_ROOM], *to = shown;
    size_t n = (size_t)snprintf(line, sizeof line, "%s", who);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + n, sizeof line - n, fmt, ap);
    va_end(ap);
    n = strlen(line);
    for (size_t i = 0; i < n; to += strlen(to)) {
        if (line[i] == '\n' || line[i] == '\r') line[i] = ' ';
        i += (size_t)shown_char(line + i, n - i, to);
    }
    *to = 0;
    fprintf(stderr, "%s%s%s\n", in_color(stderr, color), shown, in_color(stderr, *color ? COLOR_OFF : ""));
}

// Writes one line into err. Returns -1.
int fault(char err[512], const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err, 512, fmt, ap);
    va_end(ap);
    return -1;
}

// Who watches something long; NULL: nobody.
void (*progress_hook)(const char *what, double share);

// Tells whoever watches that a share (0..1) of something long is done.
void progress_tell(const char *what, double share) {
    if (progress_hook) progress_hook(what, share);
}

// ---- the end of the program
void (*before_leaving)(int say);        // puts right what a program that ends must; NULL: nothing
jmp_buf *die_jump;              // tests and fuzzers: die() jumps here with its exit code and does not exit
char die_text[1024];            // the message of the last die()

// Ends the program with this exit code and one line on stderr.
void die(int code, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(die_text, sizeof die_text, fmt, ap);
    va_end(ap);
    if (die_jump) longjmp(*die_jump, code);
    fflush(stdout);
    say(COLOR_ERROR, "kvcomp: ", "%s", die_text);
    exit(code);
}

// ---- memory. All of it comes from here: exit 4 when there is none.

#define NO_ALLOCATION (allocation_fails && allocation_fails())
#define NO_MEMORY "out of memory: %zu bytes could not be had (a smaller -c, -b or --budget needs less)"

// realloc. Zero bytes are taken as one, because realloc of none may return NULL.
void *xrealloc(void *p, size_t n) {
    void *r = NO_ALLOCATION ? NULL : realloc(p, max_size(n, 1));
    if (!r) die(EXIT_MEMORY, NO_MEMORY, n);
    return r;
}

// malloc.
void *xmalloc(size_t n) { return xrealloc(NULL, n); }

// calloc: n elements of `size` bytes, all zero.
void *xcalloc(size_t n, size_t size) {
    if (size && n > SIZE_MAX / size) die(EXIT_MEMORY, "out of memory: %zu x %zu bytes overflow", n, size);
    void *p = NO_ALLOCATION ? NULL : calloc(max_size(n, 1), max_size(size, 1));
    if (!p) die(EXIT_MEMORY, NO_MEMORY, n * size);
    return p;
}

// A copy of the first n bytes of a text, NUL-terminated; the caller frees it.
char *copy_bytes(const char *s, size_t n) {
    char *copy = xmalloc(n + 1);
    if (n) memcpy(copy, s, n);
    copy[n] = 0;
    return copy;
}

// A copy of a text; the caller frees it.
char *copy_text(const char *s) { return copy_bytes(s, strlen(s)); }

// A stream that writes into memory: *text (malloc'd) and *n hold what was written once
// memory_stream_close has closed it.
FILE *memory_stream(char **text, size_t *n) {
    FILE *f = NO_ALLOCATION ? NULL : open_memstream(text, n);
    if (!f) die(EXIT_MEMORY, "out of memory: a text could not be written into memory");
    return f;
}

void memory_stream_close(FILE *f) {
    int bad = ferror(f);
    if (fclose(f) || bad) die(EXIT_MEMORY, "out of memory: a text could not be written into memory");
}

// A stream for writing to an open file, and for reading it again. NULL, and errno is ENOMEM when there is no memory
// for it.
FILE *descriptor_stream(int fd) {
    errno = ENOMEM;
    return NO_ALLOCATION ? NULL : fdopen(fd, "w+b");
}

// The exit code of a file that could not be opened: no memory for its stream is no memory.
int open_failure(void) { return errno == ENOMEM ? EXIT_MEMORY : EXIT_RUN; }

// ---- the clock

// Seconds of a clock that only goes forward.
double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- the arena
// The arena hands out memory that lives until the end of a pass. Its blocks stay from pass to pass,
// so that a decode step allocates nothing once the first has run. Memory is given back in the
// reverse order: a mark is the number of bytes handed out so far, and falling back to it frees
// everything handed out since.

typedef struct {
    char *p;
    size_t end;                 // bytes of all blocks up to this one, its own included
} ArenaBlock;

struct Arena {
    ArenaBlock *block;          // stb_ds array
    size_t used;                // bytes handed out, and the unused ends of blocks before them
};

struct Arena *arena_new(void) { return xcalloc(1, sizeof(struct Arena)); }

// The bytes it holds: what passes have needed at most, and a half of it more.
size_t arena_bytes(const struct Arena *a) { return arrlen(a->block) ? arrlast(a->block).end : 0; }

void arena_free(struct Arena *a) {
    if (!a) return;
    for (int i = 0; i < (int)arrlen(a->block); i++) free(a->block[i].p);
    arrfree(a->block);
    free(a);
}

// `bytes` bytes of the arena, 64-byte aligned, in the first block with room behind what is handed out. A new block is
// half as large again as what it is for: much of what is asked for grows by a row a step, and would find a block of
// the exact size too small by one row, every time.
void *arena_take(struct Arena *a, size_t bytes) {
    size_t n = max_size((bytes + 63) & ~(size_t)63, 64), start = 0;
    for (int i = 0; ; start = a->block[i++].end) {
        if (i == (int)arrlen(a->block)) {
            size_t size = max_size(n + n / 128 * 64, ARENA_BLOCK);
            ArenaBlock b = { NO_ALLOCATION ? NULL : aligned_alloc(64, size), start + size };
            if (!b.p) die(EXIT_MEMORY, "out of memory: %zu bytes of scratch (a pass: a smaller -b needs less)", size);
            arrput(a->block, b);
        }
        size_t at = max_size(a->used, start);
        if (at + n > a->block[i].end) continue;
        a->used = at + n;
        return a->block[i].p + (at - start);
    }
}

// How much is handed out now, for arena_reset.
size_t arena_mark(const struct Arena *a) { return a->used; }

// Takes back everything handed out since the mark.
void arena_reset(struct Arena *a, size_t mark) { a->used = mark; }

// ---- files
enum { READ_BLOCK = 65536 };

// The number of the open descriptor that a path names: /dev/stdin, /dev/fd/N. -1: it names none.
static int path_descriptor(const char *path) {
    int fd = -1, end = 0;
    if (!strcmp(path, "/dev/stdin")) return 0;
    if (sscanf(path, "/dev/fd/%9d%n", &fd, &end) != 1 || path[end]) return -1;
    return fd;
}

// What a file that is no regular one is.
static const char *file_kind(mode_t mode) {
    return S_ISDIR(mode) ? "a folder" : S_ISFIFO(mode) ? "a FIFO" : S_ISSOCK(mode) ? "a socket" : "a device";
}

// Opens a regular file for reading, and describes it in *st. A FIFO, a device, a socket or a folder
// is refused without waiting. Returns the descriptor; -1, and the reason without the path in err.
int open_input(const char *path, struct stat *st, char err[256]) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY), why = errno;
    // A socket cannot be opened, so it is looked at by its name.
    int bad = fd >= 0 ? fstat(fd, st) : why != ENXIO || stat(path, st);
    if (!bad && fd >= 0 && S_ISREG(st->st_mode)) return fd;
    if (bad) snprintf(err, 256, "%s", strerror(fd < 0 ? why : errno));
    else snprintf(err, 256, "%s, expected a regular file", file_kind(st->st_mode));
    if (fd >= 0) close(fd);
    return -1;
}

// Reads a descriptor to its end into *buf (malloc'd), with a 0 byte behind it. Returns the number of
// bytes; -1 when reading fails; most + 1 or more when there are more than `most`.
static ssize_t read_all(int fd, size_t most, char **buf) {
    size_t n = 0, cap = 0;
    ssize_t got;
    do {
        if (n + READ_BLOCK + 1 > cap) {
            cap = 2 * cap + READ_BLOCK + 1;
            *buf = xrealloc(*buf, cap);
        }
        got = read(fd, *buf + n, READ_BLOCK);
        if (got < 0 && errno != EINTR) return -1;
        if (got > 0) n += (size_t)got;
    } while (got && n <= most);
    (*buf)[n] = 0;
    return (ssize_t)n;
}

// The whole file at `path`, NUL-terminated, *size bytes without the NUL; the caller frees it. NULL,
// with the reason in err, when it cannot be read or has more than `most` bytes.
char *read_bounded(const char *path, size_t most, size_t *size, char err[256]) {
    struct stat st = { 0 };
    char why[256], *buf = NULL;
    int handed = path_descriptor(path);
    int fd = handed < 0 ? open_input(path, &st, why) : fcntl(handed, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
        snprintf(err, 256, "%.190s: %.60s", path, handed < 0 ? why : strerror(errno));
        return NULL;
    }
    // The program may have read a file that was handed over before it started itself again (spin_shortly).
    if (handed >= 0) lseek(fd, 0, SEEK_SET);
    ssize_t n = st.st_size > (off_t)most ? st.st_size : read_all(fd, most, &buf);
    int failed = errno;
    close(fd);
    if (n >= 0 && (size_t)n <= most) {
        *size = (size_t)n;
        return buf;
    }
    if (n < 0) snprintf(err, 256, "%.190s: cannot be read: %.40s", path, strerror(failed));
    else snprintf(err, 256, "%.190s: more than %zu MiB, the most that is read", path, most >> 20);
    free(buf);
    return NULL;
}

// The same of a text of at most MOST_TEXT bytes that is used as a C string: what stands behind a 0 byte would be lost,
// so a text that holds one is refused.
char *read_plain_text(const char *path, size_t *size, char err[256]) {
    char *text = read_bounded(path, MOST_TEXT, size, err);
    size_t n = text ? strlen(text) : 0;
    if (!text || n == *size) return text;
    snprintf(err, 256, "%.190s: byte %zu is 0: expected a text", path, n + 1);
    free(text);
    return NULL;
}

// 1: there is something at `path`, a file or a folder.
int file_exists(const char *path) { return !access(path, F_OK); }

// ---- a hash
enum { HASH_SUMS = 8, HASH_STEP = 64 };     // words that are taken together, and their bytes

// Goes on with the 64-bit hash h over n bytes, in steps of which the last one is filled up with zeros. It finds
// damage and tells models apart; it does not stop anybody who wants two texts with the same hash. The sums do
// not wait for each other, so that memory sets the pace.
uint64_t hash_bytes(uint64_t h, const void *data, size_t n) {
    uint64_t sum[HASH_SUMS];
    for (int i = 0; i < HASH_SUMS; i++) sum[i] = mix64(h + (uint64_t)i);
    for (size_t at = 0; at <= n; at += HASH_STEP) {
        uint64_t word[HASH_SUMS] = { 0 };
        const char *p = (const char *)data + at;
        if (n - at >= HASH_STEP) memcpy(word, p, HASH_STEP);
        else memcpy(word, p, n - at);
        for (int i = 0; i < HASH_SUMS; i++) {
            sum[i] = (sum[i] ^ word[i]) * 0x9e3779b97f4a7c15ull;
            sum[i] = sum[i] << 31 | sum[i] >> 33;
        }
    }
    h = mix64(n);
    for (int i = 0; i < HASH_SUMS; i++) h = mix64(h ^ sum[i]);
    return h;
}

// ---- saving a file
// What the program keeps for its user is written beside its place, under a name that nobody can
// foresee, brought to the disk, and only then renamed. Until then the old file is as it was,
// whatever happens: a full disk, a signal, an error. What is written beside goes when the program
// ends before it is done, except by SIGKILL.

const char *volatile temp_files[TEMP_FILES];    // files in the making, for a signal handler; NULL: none

// Removes the files in the making -> how many there were. Called at exit and by signal handlers, so
// it calls only what a handler may call.
int temp_files_remove(void) {
    int n = 0;
    for (int i = 0; i < TEMP_FILES; i++) {
        const char *temp = temp_files[i];
        temp_files[i] = NULL;
        if (temp) n += !unlink(temp);
    }
    return n;
}

// The reason in errno as words; a device, FIFO or socket has none of its own, but ENXIO where open() found
// a socket. Nor has a stream that failed earlier.
const char *save_reason(void) {
    if (!errno) return "not everything could be written (is the disk full?)";
    return errno == EINVAL || errno == ENXIO ? "is no regular file" : strerror(errno);
}

// Frees what x holds but its stream.
static void save_free(Saving *x) {
    if (x->temp) temp_files[x->slot] = NULL;
    free(x->temp);
    free(x->path);
    memset(x, 0, sizeof *x);
}

// Brings the list of names of a file's folder to the disk, where that can be done: a new name lies
// there. The file itself is safe already.
static void folder_sync(const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder = slash ? copy_bytes(path, (size_t)(slash + 1 - path)) : copy_text(".");
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) (void)!fsync(fd);
    if (fd >= 0) close(fd);
    free(folder);
}

// Begins to save a file: x->f is to be written to, and save_keep or save_drop ends it. Symbolic links
// are followed. A file that is there lends the new one its permissions, and its owner if we may; a new
// one is for its owner alone. 0, or -1 with err when nothing can be saved there. Exit 4 when there is
// no memory.
int save_begin(Saving *x, const char *path, char err[512]) {
    struct stat st = { 0 };
    memset(x, 0, sizeof *x);
    x->path = realpath(path, NULL);
    x->old = x->path != NULL;
    if (!x->path && errno == ENOENT && *path) x->path = copy_text(path);
    int bad = !x->path || (x->old && stat(x->path, &st));
    if (!bad && x->old && !S_ISREG(st.st_mode)) {
        errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
        bad = 1;
    }
    if (!bad && x->old) bad = access(x->path, W_OK);
    int fd = -1;
    if (!bad) {
        const char *slash = strrchr(x->path, '/');
        int folder = slash ? (int)(slash + 1 - x->path) : 0;
        size_t room = (size_t)folder + 32;
        x->temp = xmalloc(room);
        snprintf(x->temp, room, "%.*s.kvcomp-XXXXXX", folder, x->path);
        while (x->slot < TEMP_FILES - 1 && temp_files[x->slot]) x->slot++;
        temp_files[x->slot] = x->temp;              // one of those that go with the program
        fd = mkostemp(x->temp, O_CLOEXEC);          // O_EXCL: never a file or a link that is there
    }
    if (fd >= 0 && x->old) (void)!fchown(fd, st.st_uid, st.st_gid);
    if (fd >= 0 && (!x->old || !fchmod(fd, st.st_mode & 0777))) x->f = descriptor_stream(fd);
    if (x->f) return 0;

    int code = open_failure();
    snprintf(err, 512, "%.400s: %s", path, save_reason());
    if (fd >= 0) close(fd);
    if (fd >= 0) unlink(x->temp);
    save_free(x);
    if (code == EXIT_MEMORY) die(code, "out of memory: %s", err);
    return -1;
}

// The same for a file in which nothing is secret: a new one has the permissions that the umask gives.
int save_begin_open(Saving *x, const char *path, char err[512]) {
    if (save_begin(x, path, err)) return -1;
    mode_t mask = umask(0);
    umask(mask);                            // it can only be read by setting it
    if (!x->old) (void)!fchmod(fileno(x->f), 0666 & ~mask);
    return 0;
}

// Gives up a file in the making. One that was never begun is left alone.
void save_drop(Saving *x) {
    if (!x->f) return;
    fclose(x->f);
    unlink(x->temp);
    save_free(x);
}

// Ends the saving of a file: brought to the disk, it takes its place. 0, or -1 with err, and then the old one
// stays. Some file systems cannot bring a file to the disk on demand (EINVAL), which is no failure.
int save_keep(Saving *x, char err[512]) {
    errno = 0;
    int bad = ferror(x->f) || fflush(x->f) || (fsync(fileno(x->f)) && errno != EINVAL);
    if (bad || rename(x->temp, x->path)) {
        snprintf(err, 512, "%.380s: %s%s", x->path, save_reason(), x->old ? "; the old file stays" : "");
        save_drop(x);
        return -1;
    }
    fclose(x->f);
    folder_sync(x->path);
    save_free(x);
    return 0;
}

// ---- threads: OpenMP's numbers, or those of one thread where the compiler has no OpenMP
int n_threads(void) { return omp_get_max_threads(); }
int thread_id(void) { return omp_get_thread_num(); }

// Starting a team of threads costs microseconds, and on a loaded machine much more: only for work
// that is worth it. Results do not depend on it.
int worth_threads(size_t multiply_adds) { return multiply_adds > (size_t)1 << 18; }

// The physical cores among the processors this process may run on: two hardware threads of a core
// share the units that arithmetic waits for. A core is known by the first of its siblings. Where the
// system is not Linux, every processor counts.
static int physical_cores(void) {
    int n = 0;
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return 1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char path[96];
        int first = cpu;
        if (!CPU_ISSET(cpu, &allowed)) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        FILE *f = fopen(path, "r");
        if (f && fscanf(f, "%d", &first) != 1) first = cpu;
        if (f) fclose(f);
        n += first == cpu || first >= CPU_SETSIZE || !CPU_ISSET(first, &allowed);
    }
#else
    n = (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return max_int(n, 1);
}

// Threads for a model of so many parameters, when the user names no number. A product of a small
// model is over before a second thread has begun: one thread is the fastest, whatever else runs.
static int threads_for(size_t parameters) {
    const size_t small = (size_t)16 << 20;
    return parameters < small ? 1 : physical_cores();
}

// GNU OpenMP lets a thread that waits for others spin for milliseconds. Where the cores are shared,
// the thread that is waited for does not run meanwhile, and a token takes a second. Its environment
// variable is read before main begins, so the program sets it and starts itself again, once. What the
// user has set stands. Returns if nothing has to be done, or it cannot be done.
void spin_shortly(char **argv) {
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv("/proc/self/exe", argv);
#endif
    (void)argv;
}

// Sets the number of threads: n, or what suits a model of so many parameters when n is 0.
void threads_use(int n, size_t parameters) {
    omp_set_num_threads(n ? n : threads_for(parameters));
}

// n ids below V, the same at every call (stb_ds array).
int *random_ids(int n, int V) {
    int *ids = NULL;
    for (int i = 0; i < n; i++) arrput(ids, (int)(mix64((uint64_t)i) % (uint64_t)V));
    return ids;
}

// ==================================================================================================== OPTIONS
// Tables drive parsing, --help, defaults and suggestions: that of a method stands in its section. A value is
// kept as text under its option's name and checked when it is set, so a getter cannot fail.

// ---- finding an option

// The option called `name` in a table ended by name NULL; NULL: there is none, or no table.
const Opt *opt_find_in(const Opt *o, const char *name) {
    for (; o && o->name; o++) {
        if (!strcmp(o->name, name)) return o;
    }
    return NULL;
}

// The option called `name` in the tables of o; NULL: there is none.
const Opt *opt_find(const Options *o, const char *name) {
    const Opt *found = NULL;
    for (int i = 0; i < (int)arrlen(o->table) && !found; i++) found = opt_find_in(o->table[i], name);
    return found;
}

// The place of the n bytes at v in "a|b|c", from 0; -1: they are none of the words.
int bytes_place(const char *words, const char *v, size_t len) {
    for (int i = 0; ; i++) {
        size_t n = strcspn(words, "|");
        if (n == len && !memcmp(words, v, n)) return i;
        if (!words[n]) return -1;
        words += n + 1;
    }
}

int word_place(const char *words, const char *v) { return bytes_place(words, v, strlen(v)); }

// ---- suggestions for misspelt names
// How many characters must be inserted, deleted or replaced to make b of a (Levenshtein's distance),
// 99 for very long names. row[j] is the distance of the first i characters of a and the first j of b;
// diagonal is row[j-1] for one character of a less.
static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(a), m = (int)strlen(b), row[64];
    if (m >= 63 || n >= 63) return 99;
    for (int j = 0; j <= m; j++) row[j] = j;
    for (int i = 1; i <= n; i++) {
        int diagonal = row[0]++;
        for (int j = 1; j <= m; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_int(replaced, min_int(row[j], row[j - 1]) + 1);
        }
    }
    return row[m];
}

// Takes name into *best if it is nearer to what was typed than *distance.
void nearer_name(const char *typed, const char *name, const char **best, int *distance) {
    int d = edit_distance(typed, name);
    if (d >= *distance) return;
    *best = name;
    *distance = d;
}

// A name this far away from what was typed, or with more than half of its letters different, is not
// what was meant.
int farthest_misspelling(const char *typed) {
    int n = (int)strlen(typed);
    return min_int(3 + n / 4, n / 2 + 1);
}

// ---- making a set of options

// Adds the options of a table (NULL: there is none) at their defaults: the whole text, or a choice's
// first word. Two tables may share an option.
void options_add(Options *o, const Opt *t) {
    if (t) arrput(o->table, t);
    for (; t && t->name; t++) {
        if (shgeti(o->map, t->name) >= 0) continue;
        size_t n = t->kind == 'c' ? strcspn(t->def, "|") : strlen(t->def);
        shput(o->map, t->name, copy_bytes(t->def, n));
    }
}

// A set without any options.
Options *options_new(void) {
    Options *o = xcalloc(1, sizeof *o);
    sh_new_arena(o->map);
    sh_new_arena(o->given);
    return o;
}

// Another set with the options that o has, all at their defaults.
Options *options_like(const Options *o) {
    Options *n = options_new();
    for (int i = 0; i < (int)arrlen(o->table); i++) options_add(n, o->table[i]);
    return n;
}

void options_free(Options *o) {
    if (!o) return;
    for (int i = 0; i < (int)shlen(o->map); i++) free(o->map[i].value);
    shfree(o->map);
    shfree(o->given);
    arrfree(o->table);
    free(o);
}

// ---- setting a value

// May option t have the value v? 0, or -1 with the reason in err.
static int opt_check(const Opt *t, const char *v, char err[256]) {
    const char *wants = NULL, *words = "";
    int whole = t->kind == 'i', number = whole || t->kind == 'f';
    char *end;
    double x = number ? strtod(v, &end) : 0;
    if (number && (!*v || *end || !isfinite(x))) wants = "wants a number";
    if (whole && (wants || v[strspn(v, "+-0123456789")] || fabs(x) > INT_MAX)) wants = "wants a whole number";
    if (t->kind == 'b' && strcmp(v, "0") && strcmp(v, "1")) wants = "is a flag and takes no value";
    if (t->kind == 'c' && word_place(t->def, v) < 0) {
        wants = "wants one of ";
        words = t->def;
    }
    if (wants) snprintf(err, 256, "--%s %s%s, found '%.60s'", t->name, wants, words, v);
    int outside = !wants && t->lo < t->hi && (x < t->lo || x > t->hi);
    if (outside) snprintf(err, 256, "--%s %.10g is outside %.10g..%.10g", t->name, x, t->lo, t->hi);
    return wants || outside ? -1 : 0;                   // a text may be anything
}

// Sets an option, whose name has no dashes. 0, or -1 with the reason in err.
int options_set(Options *o, const char *name, const char *value, char err[256]) {
    const Opt *t = opt_find(o, name);
    if (!t) {
        snprintf(err, 256, "unknown option --%s", name);
        return -1;
    }
    if (opt_check(t, value, err)) return -1;
    char *copy = copy_text(value);      // `value` may be the text that is freed now
    free(shget(o->map, name));
    shput(o->map, name, copy);
    shput(o->given, name, 1);
    return 0;
}

// ---- reading a value

// The value as text. A name that no table has is a mistake of the program: exit 1.
const char *opt_str(const Options *o, const char *name) {
    Options *w = (Options *)o;                  // a search of stb_ds notes its place inside the map
    if (shgeti(w->map, name) < 0) die(EXIT_RUN, "no option is called --%s", name);
    return shget(w->map, name);
}

// 1: the user has set it.
int opt_given(const Options *o, const char *name) {
    Options *w = (Options *)o;                  // as in opt_str
    return shgeti(w->given, name) >= 0;
}

// A whole number, or a flag as 0 or 1.
int opt_int(const Options *o, const char *name) { return atoi(opt_str(o, name)); }

double opt_real(const Options *o, const char *name) { return strtod(opt_str(o, name), NULL); }

// The place of a choice in words, "a|b|c": 0 for a. Words are listed by the caller in the order of
// its enum.
int opt_choice(const Options *o, const char *name, const char *words) {
    return max_int(word_place(words, opt_str(o, name)), 0);
}

// ---- lists of numbers
// The numbers of a text such as "2048", "512,1024", "2:98:3" or a mix of them, each once, in its order
// (stb_ds). Exit 2 when it is anything else; `name` is the option to blame.
int *number_list(const char *name, const char *text, long lo, long hi) {
    char *listed = xcalloc((size_t)(hi - lo + 1), 1);   // 1: this one is in the list
    const char *p = text;
    int *list = NULL, bad;
    do {
        long from = lo - 1, to, step = 1;               // of 2:98:3
        int n = 0;
        sscanf(p, "%ld%n", &from, &n);
        p += n;
        to = from;
        if (sscanf(p, ":%ld:%ld%n", &to, &step, &n) == 2) p += n;
        bad = from < lo || to > hi || to < from || step < 1 || (*p && *p != ',');
        for (long x = from; !bad && x <= to; x += step <= hi ? step : hi - lo + 1) {
            if (!listed[x - lo]) arrput(list, (int)x);
            listed[x - lo] = 1;
        }
    } while (!bad && *p++);
    free(listed);
    if (bad) {
        arrfree(list);
        die(EXIT_USAGE, "--%s wants numbers from %ld to %ld like 5,10 or 2:98:3, found '%.60s'", name, lo, hi, text);
    }
    return list;
}

// *list is NULL behind the last word, so that "a," has an empty one behind its separator.
int next_word(const char **list, const char *separators, char *word, size_t size) {
    if (!*list) return 0;
    size_t n = strcspn(*list, separators);
    snprintf(word, size, "%.*s", (int)n, *list);
    *list = (*list)[n] ? *list + n + 1 : NULL;
    return 1;
}

// A copy of the options that the user set. A session reads its options again at every reset, so
// each row has its own.
Options *options_copy(const Options *o) {
    Options *c = options_like(o);
    char err[256];
    for (int i = 0; i < (int)shlen(o->given); i++) {
        const char *key = o->given[i].key;
        if (options_set(c, key, opt_str(o, key), err)) die(EXIT_RUN, "%s", err);
    }
    return c;
}

// ==================================================================================================== JSON
// A strict reader of JSON (RFC 8259) for config.json, tokenizer.json, safetensors headers and score
// files, and a writer of JSON strings. A text is copied once; strings are unescaped in place inside
// that copy. The root owns everything: json_free(root) gives all of it back.

enum { JSON_DEPTH = 64 };       // most arrays and objects inside one another

// A parsed text, and how far the reader has come. The root is the first field, because json_free casts its address
// back to the document.
typedef struct {
    Json root;
    char *text, *end;           // the copy that all strings point into, and its end, where a NUL stands
    char *p;                    // reading position
    char *err;                  // (256) receives the complaint
    int depth;                  // containers open
} JsonDoc;

// Writes "byte N: expected .., found .." about the place `at` into r->err. Returns -1.
static int json_fail(JsonDoc *r, const char *at, const char *what) {
    size_t byte = (size_t)(at - r->text);
    int c = at < r->end ? (unsigned char)*at : 0;

    if (at >= r->end) snprintf(r->err, 256, "byte %zu: %s, found the end of the text", byte, what);
    else if (c > 32 && c < 127) snprintf(r->err, 256, "byte %zu: %s, found '%c'", byte, what, c);
    else snprintf(r->err, 256, "byte %zu: %s, found byte %d", byte, what, c);
    return -1;
}

// Skips white space.
static void json_space(JsonDoc *r) {
    while (*r->p == ' ' || *r->p == '\n' || *r->p == '\r' || *r->p == '\t') r->p++;
}

// ---- strings
// The value of the 4 hexadecimal digits at p, 0 to 65535, or -1 when one of them is none. Never
// reads beyond a NUL.
static int json_hex4(const char *p) {
    char digits[5] = "";
    if (strspn(p, "0123456789abcdefABCDEF") < 4) return -1;
    memcpy(digits, p, 4);
    return (int)strtol(digits, NULL, 16);
}

// Writes code point c in UTF-8 to o and returns the byte behind it.
char *utf8_put(char *o, unsigned c) {
    static const unsigned char lead[] = { 0, 0xc0, 0xe0, 0xf0 };
    int more = (c >= 0x80) + (c >= 0x800) + (c >= 0x10000);         // continuation bytes; each holds 6 bits
    *o++ = (char)(lead[more] | c >> 6 * more);
    while (more-- > 0) *o++ = (char)(0x80 | (c >> 6 * more & 63));
    return o;
}

// Reads one escape: *p stands on the backslash and moves behind the escape; what it stands for is
// written to *o, which moves too. A high and a low surrogate, each in an escape of its own, make one code point;
// half a pair becomes U+FFFD. Returns 0, or -1 with r->err set.
static int json_unescape(JsonDoc *r, char **p, char **o) {
    static const char letter[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    char *s = *p + 1;
    const char *at = *s ? strchr(letter, *s) : NULL;
    if (!at && *s != 'u') return json_fail(r, s, "expected one of \"\\/bfnrtu after a backslash");
    int code = at ? means[at - letter] : json_hex4(++s), low = -1;
    if (code < 0) return json_fail(r, s, "expected 4 hexadecimal digits after \\u");
    s += at ? 1 : 4;
    if (code >= 0xd800 && code < 0xdc00 && s[0] == '\\' && s[1] == 'u') low = json_hex4(s + 2);
    if (low >= 0xdc00 && low < 0xe000) {
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        s += 6;
    }
    *o = utf8_put(*o, code >= 0xd800 && code < 0xe000 ? 0xfffd : (unsigned)code);
    *p = s;
    return 0;
}

// Reads the string whose opening quote r->p stands on. An escape is never shorter than what it
// stands for, so the string shrinks in place, and its NUL overwrites the closing quote or a byte
// before it. Returns 0, or -1 with r->err set.
static int json_string(JsonDoc *r, char **str, size_t *len) {
    char *p = r->p + 1;         // read here
    char *o = p;                // written here
    *str = o;
    for (;;) {
        char *run = p;
        while ((unsigned char)*p >= ' ' && *p != '"' && *p != '\\') p++;
        if (o != run) memmove(o, run, (size_t)(p - run));
        o += p - run;
        if (*p == '"') break;

        // What stands here is a backslash, or a control character or the text's end, which no
        // string may hold.
        if (*p != '\\') return json_fail(r, p, "expected '\"' at the end of a string");
        if (json_unescape(r, &p, &o)) return -1;
    }
    *o = 0;
    *len = (size_t)(o - *str);
    r->p = p + 1;
    return 0;
}

// ---- numbers
// Reads the number that r->p stands on. Returns 0, or -1 with r->err set, also when r->p stands on
// no value at all. The grammar is narrower than strtod's and strtoll's, so they stop at p too.
static int json_number(JsonDoc *r, Json *v) {
    static const char ten[] = "0123456789";
    char *digits = r->p + (*r->p == '-'), *p = digits + strspn(digits, ten);
    if (p == digits) return json_fail(r, p, p > r->p ? "expected a digit after '-'" : "expected a value");
    if (*digits == '0' && p - digits > 1) return json_fail(r, digits, "expected no leading zero");
    char *behind = p;           // the whole part
    if (*p == '.') {
        size_t n = strspn(++p, ten);
        if (!n) return json_fail(r, p, "expected a digit after '.'");
        p += n;
    }
    if (*p == 'e' || *p == 'E') {
        p += 1 + (p[1] == '+' || p[1] == '-');
        size_t n = strspn(p, ten);
        if (!n) return json_fail(r, p, "expected a digit in the exponent");
        p += n;
    }
    v->type = JSON_NUMBER;
    v->num = strtod(r->p, NULL);
    if (!isfinite(v->num)) return json_fail(r, r->p, "expected a number a double can hold");
    errno = 0;
    int64_t i = strtoll(r->p, NULL, 10);
    v->is_int = p == behind && !errno;
    v->i = v->is_int ? i : 0;
    r->p = p;
    return 0;
}

// ---- values
static int json_value(JsonDoc *r, Json *v);

// Reads the array or object whose '[' or '{' r->p stands on. Returns 0, or -1 with r->err set.
static int json_container(JsonDoc *r, Json *v) {
    int object = *r->p == '{';
    char close = object ? '}' : ']';
    v->type = object ? JSON_OBJECT : JSON_ARRAY;
    if (++r->depth > JSON_DEPTH) return json_fail(r, r->p, "expected at most 64 nested arrays and objects");
    r->p++;
    json_space(r);
    while (*r->p != close) {
        if (object) {           // "key" :
            char *key;
            size_t len;
            if (*r->p != '"') return json_fail(r, r->p, "expected a key");
            if (json_string(r, &key, &len)) return -1;
            arrput(v->key, key);
            json_space(r);
            if (*r->p != ':') return json_fail(r, r->p, "expected ':' after a key");
            r->p++;
            json_space(r);
        }
        arrput(v->item, (Json){ .type = JSON_NULL });
        if (json_value(r, &v->item[v->n++])) return -1;
        json_space(r);
        if (*r->p == close) break;
        if (*r->p != ',') return json_fail(r, r->p, object ? "expected ',' or '}'" : "expected ',' or ']'");
        r->p++;
        json_space(r);
        if (*r->p == close) return json_fail(r, r->p, "expected a value after ','");
    }
    r->p++;
    r->depth--;
    return 0;
}

// Reads the value that r->p stands on into *v, which is null. Returns 0, or -1 with r->err set.
static int json_value(JsonDoc *r, Json *v) {
    static const struct { const char *word; int type, value; } words[] = {
        { "null", JSON_NULL, 0 }, { "true", JSON_BOOL, 1 }, { "false", JSON_BOOL, 0 },
    };
    if (*r->p == '{' || *r->p == '[') return json_container(r, v);
    if (*r->p == '"') {
        v->type = JSON_STRING;
        return json_string(r, &v->str, &v->len);
    }
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i].word);
        if (strncmp(r->p, words[i].word, n)) continue;
        *v = (Json){ .type = words[i].type, .i = words[i].value, .num = words[i].value };
        r->p += n;
        return 0;
    }
    if (*r->p && strchr("ntf", *r->p)) return json_fail(r, r->p, "expected null, true or false");
    return json_number(r, v);
}

// Gives back what v and all below it own.
static void json_free_items(Json *v) {
    for (int i = 0; i < v->n; i++) json_free_items(&v->item[i]);
    arrfree(v->item);
    arrfree(v->key);
}

// Gives back the document whose root is j; NULL is allowed.
void json_free(Json *j) {
    JsonDoc *d = (JsonDoc *)j;
    if (!d) return;
    json_free_items(j);
    free(d->text);
    free(d);
}

// Parses a text of n bytes. Returns its root, or NULL with the place and the reason in err when the
// text is malformed.
Json *json_parse(const char *text, size_t n, char err[256]) {
    JsonDoc *d = xcalloc(1, sizeof *d);
    d->text = d->p = copy_bytes(text, n);
    d->end = d->text + n;
    d->err = err;
    json_space(d);
    int bad = json_value(d, &d->root);
    if (!bad) json_space(d);
    if (!bad && d->p < d->end) bad = json_fail(d, d->p, "expected nothing more");
    if (!bad) return &d->root;
    json_free(&d->root);
    return NULL;
}

// The JSON of a file of at most `most` bytes. NULL, with the path and the reason in err.
Json *json_read(const char *path, size_t most, char err[512]) {
    char why[256];
    size_t n;
    char *text = read_bounded(path, most, &n, why);
    Json *j = text ? json_parse(text, n, why) : NULL;
    if (!text) fault(err, "%s", why);
    else if (!j) fault(err, "%.250s: %s", path, why);
    free(text);
    return j;
}

// The value of a key, the last one when the key is written twice. NULL when it is absent, or when
// obj is NULL or no object. The search is linear: a caller that needs many keys of a large object
// walks it instead.
const Json *json_get(const Json *obj, const char *key) {
    if (!obj || obj->type != JSON_OBJECT) return NULL;
    for (int i = obj->n - 1; i >= 0; i--) {
        if (!strcmp(obj->key[i], key)) return &obj->item[i];
    }
    return NULL;
}

// ---- UTF-8 and the writer
// The length of the well-formed character that the n bytes at s begin with, and its code point in *c; 0 when they
// begin with none, and *c stays.
int utf8_read(const char *s, size_t n, uint32_t *c) {
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };    // less is written too long
    const unsigned char *p = (const unsigned char *)s;
    int k = 1;
    if (!n || (p[0] >= 0x80 && p[0] < 0xc0) || p[0] >= 0xf8) return 0;
    if (p[0] >= 0xc0) k = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if ((size_t)k > n) return 0;
    uint32_t code = k > 1 ? p[0] & (0x7f >> k) : p[0];
    for (int i = 1; i < k; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (p[i] & 63);
    }
    if (code < least[k] || (code >= 0xd800 && code < 0xe000) || code > 0x10ffff) return 0;
    *c = code;
    return k;
}

// The length alone.
int utf8_length(const char *s, size_t n) {
    uint32_t c;
    return utf8_read(s, n, &c);
}

// Does any text in v hold a 0 byte ("\\u0000")? Where texts are used as C strings, what stands behind
// it would be lost.
int json_holds_nul(const Json *v) {
    if (v->type == JSON_STRING) return memchr(v->str, 0, v->len) != NULL;
    int found = 0;
    for (int i = 0; i < v->n && !found; i++) found = json_holds_nul(&v->item[i]);
    return found;
}

// Writes the n bytes at s as a JSON string, quotes included. A byte of broken UTF-8 becomes U+FFFD.
// The control characters beyond ASCII, U+0080 to U+009F (two bytes, c2 80 to c2 9f), are written as
// escapes, as those of ASCII are: a terminal may obey them.
void json_escape(FILE *f, const char *s, size_t n) {
    putc('"', f);
    for (size_t i = 0; i < n; ) {
        uint32_t c = 0xfffd;
        int k = utf8_read(s + i, n - i, &c);
        if (c == '"' || c == '\\') fprintf(f, "\\%c", (int)c);
        else if (c == '\n') fputs("\\n", f);
        else if (!k || c < ' ' || (c >= 127 && c < 0xa0)) fprintf(f, "\\u%04x", (unsigned)c);
        else fwrite(s + i, 1, (size_t)k, f);
        i += k ? (size_t)k : 1;
    }
    putc('"', f);
}

// Writes fmt, in which ' stands for ", with its arguments: a text as a JSON string, a number that is none as null.
void json_print(FILE *f, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    for (const char *p = fmt; *p; p++) {
        char one[16];                               // a conversion, such as %.3f
        int n = (int)strcspn(p, "sdufg") + 1;
        if (*p != '%') {
            fputc(*p == '\'' ? '"' : *p, f);
            continue;
        }
        snprintf(one, sizeof one, "%.*s", n, p);
        p += n - 1;
        if (*p == 's') {
            const char *text = va_arg(ap, const char *);
            if (text) json_escape(f, text, strlen(text));
            else fputs("null", f);
        } else if (*p == 'd') {
            if (p[-1] == 'l') fprintf(f, one, va_arg(ap, long));
            else fprintf(f, one, va_arg(ap, int));
        } else if (*p == 'u') {
            fprintf(f, one, va_arg(ap, size_t));
        } else {
            double x = va_arg(ap, double);
            fprintf(f, isfinite(x) ? one : "null", x);
        }
    }
    va_end(ap);
}

int json_is(const Json *j, int type) { return j && j->type == type; }

int json_none(const Json *j) { return !j || j->type == JSON_NULL; }

// The text of a key; "" when it is absent, no text, or a text with a NUL inside.
const char *json_text(const Json *obj, const char *key) {
    const Json *j = json_get(obj, key);
    return json_is(j, JSON_STRING) && strlen(j->str) == j->len ? j->str : "";
}

double json_num(const Json *obj, const char *key) {
    const Json *j = json_get(obj, key);
    return json_is(j, JSON_NUMBER) ? j->num : NAN;
}

// Appends n bytes to the stb array *out.
void bytes_put(char **out, const char *s, size_t n) {
    if (n) memcpy(arraddnptr(*out, n), s, n);
}
