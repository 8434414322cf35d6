// test/check.h - what every test program shares: TEST and CHECK, tests that die or are left out, random
// numbers, and the runner.
//
//     ./tests            every test, one line each that fails, and "N passed, N failed" at the end
//     ./tests NAME...    only tests whose names contain one of the words;  -l  lists them;  --help  says so
//
// A test is TEST(name, "what it proves") { ... CHECK(condition, "what was found", ...) ... }. It registers
// itself. What this machine cannot run is left out and counted by what it needs.
#ifndef TEST_CHECK_H
#define TEST_CHECK_H
#include "../lib/base.h"
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct {
    const char *name, *what;
    void (*run)(void);
} Test;

static Test test_table[1024];
static int n_tests, checks_failed;      // failed CHECKs of the running test

// Enters a test into the table. It is called before main, by the constructor that TEST writes.
static void test_add(const char *name, const char *what, void (*run)(void)) {
    test_table[n_tests++] = (Test){ name, what, run };
}

#define TEST(fn, what) \
    static void test_##fn(void); \
    __attribute__((constructor)) static void register_##fn(void) { \
        test_add(#fn, what, test_##fn); \
    } \
    static void test_##fn(void)

// Reports a CHECK that failed: file, line, the condition's text and what was found.
static void check_failed(const char *file, int line, const char *cond, const char *fmt, ...) {
    va_list ap;
    if (checks_failed++ >= 8) return;   // the first few say enough
    fprintf(stderr, "  %s:%d: %s: ", file, line, cond);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
}

#define CHECK(cond, ...) \
    do { \
        if (!(cond)) check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__); \
    } while (0)

// Runs code that is expected to die: `code` = its exit code (0 when it returned), die_text = its line.
#define EXPECT_DIE(code, statement) \
    do { \
        jmp_buf jb_; \
        jmp_buf *old_ = die_jump; \
        int rc_; \
        die_text[0] = 0; \
        if (!(rc_ = setjmp(jb_))) { \
            die_jump = &jb_; \
            statement; \
        } \
        die_jump = old_; \
        code = rc_; \
    } while (0)

// What this machine lacks, and how many tests were left out for it. `what` is a text that lasts.
static struct {
    const char *what;
    int n;
} lacks[16];

static int n_lacks;
static jmp_buf test_leave;

// Notes that `tests` tests were left out because this machine lacks `what`.
static void lack(const char *what, int tests) {
    int k = 0;
    while (k < n_lacks && strcmp(lacks[k].what, what)) k++;
    if (k == n_lacks) lacks[n_lacks++].what = what;
    lacks[k].n += tests;
}

// Leaves the running test, which needs something that this machine lacks.
__attribute__((noreturn)) static void leave_out(const char *what) {
    lack(what, 1);
    longjmp(test_leave, 1);
}

// The n-th allocation of the program fails, n = allocation_to_fail; 0: none does.
static long allocations, allocation_to_fail;

// Whether the allocation that is about to happen is the one that shall fail.
static int this_one_fails(void) {
    return __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED) == allocation_to_fail;
}

// ---- a few generators every family uses
static uint64_t rnd_state = 1;

// Starts the generator anew, so that a test draws the same numbers whichever tests ran before.
static void rnd_seed(uint64_t s) { rnd_state = s; }

// A uniform draw from [0,1).
static double rnd_unit(void) { return (double)(splitmix64(&rnd_state) >> 11) / 9007199254740992.0; }

// A uniform draw from 0 to n - 1.
static int rnd_int(int n) { return (int)(splitmix64(&rnd_state) % (uint64_t)n); }

// A draw from the standard normal distribution (Box and Muller).
static float rnd_normal(void) {
    return (float)(sqrt(-2 * log(1 - rnd_unit())) * cos(2 * M_PI * rnd_unit()));
}

// Largest violation of |a-b| <= atol + rtol |b| over n values: > 1 means failed. NaN counts as infinite.
static double worst(const float *a, const float *b, size_t n, double atol, double rtol, size_t *at) {
    double w = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)a[i] - b[i]) / (atol + rtol * fabs((double)b[i]));
        if (!(e <= w)) {
            w = isnan(e) ? INFINITY : e;
            if (at) *at = i;
        }
    }
    return w;
}

// A pointer that is declared OWN is freed where its block ends.
#define OWN __attribute__((cleanup(own_free)))
static void own_free(void *p) { free(*(void **)p); }

// What a statement writes to the stream f, as a text, to be freed.
#define WRITTEN(f, statement) \
    ({ \
        char *text_; \
        size_t n_; \
        FILE *f = memory_stream(&text_, &n_); \
        statement; \
        memory_stream_close(f); \
        text_; \
    })

#define NO_TERMINAL "a pseudo-terminal (/dev/ptmx, /dev/pts)"

// ---- folders and files of the tests
static char tmp_dir[300];
static pid_t tmp_owner;  // the process that made it: a child that exits leaves it alone

// Removes dir's files and folders one level deep, and dir.
static void tmp_clear(const char *dir) {
    char path[700];
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (remove(path)) tmp_clear(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

// At exit.
static void tmp_remove(void) {
    if (*tmp_dir && getpid() == tmp_owner) tmp_clear(tmp_dir);
}

// In a folder that is removed at exit; the result lives until the 4th call after.
static const char *tmp_path(const char *name) {
    static char buf[4][400];
    static int k;
    if (!*tmp_dir) {
        const char *t = getenv("TMPDIR");
        snprintf(tmp_dir, sizeof tmp_dir, "%.200s/kvcomp-test-XXXXXX", t && *t ? t : P_tmpdir);
        if (!mkdtemp(tmp_dir)) {
            perror(tmp_dir);
            exit(1);
        }
        tmp_owner = getpid();
        atexit(tmp_remove);
    }
    k = (k + 1) & 3;
    snprintf(buf[k], sizeof buf[k], "%s/%s", tmp_dir, name);
    return buf[k];
}

// Writes n bytes to a file; the tests end where that fails.
static void put_file(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) {
        perror(path);
        exit(1);
    }
}

// Writes a text to a file.
static void put_text(const char *path, const char *text) { put_file(path, text, strlen(text)); }

// n normal draws of the given standard deviation, to be freed.
static float *normals(size_t n, double std) {
    float *x = xmalloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = rnd_normal() * (float)std;
    return x;
}

// n draws of the standard normal distribution, to be freed.
static float *random_floats(size_t n) { return normals(n, 1); }

// Sets the number of OpenMP's threads, where there is OpenMP. Returns the number there was.
static int set_threads(int n) {
    int old = 1;
#ifdef _OPENMP
    old = omp_get_max_threads();
    omp_set_num_threads(n);
#endif
    (void)n;
    return old;
}

// A text as printf makes it, until the eighth call after.
static const char *formatted(const char *fmt, ...) {
    static char text[8][512];
    static int k;
    va_list ap;
    va_start(ap, fmt);
    k = (k + 1) % 8;
    vsnprintf(text[k], sizeof text[k], fmt, ap);
    va_end(ap);
    return text[k];
}

// ---- tables of cases
// The parts of a line "a | b | c" of a table of cases, without the blanks around them; the last may hold what looks
// like one more. # begins a comment. Returns how many parts there are, 0: none.
static int case_parts(char *line, char **part, int most) {
    int n = 0;
    line[strcspn(line, "\n")] = 0;
    if (*line == '#' || !*line) return 0;
    for (char *p = line, *next; p && n < most; p = next) {
        next = n + 1 < most ? strstr(p, " |") : NULL;
        while (next && next[2] && next[2] != ' ') next = strstr(next + 1, " |");
        if (next) *next = 0;
        if (next) next += 2;
        p += strspn(p, " ");
        for (size_t k = strlen(p); k && p[k - 1] == ' ';) p[--k] = 0;
        part[n++] = p;
    }
    return n;
}

// The next line of a table of cases, and its parts. Returns how many parts there are, 0: there is no more line.
static int next_case(FILE *f, char *line, int size, char **part, int most) {
    int n = 0;
    while (!n && f && fgets(line, size, f)) n = case_parts(line, part, most);
    return n;
}

// Puts the byte in the place of each %0A of a text. Returns how many bytes there are then.
static size_t case_bytes(char *s) {
    char *out = s, *begin = s;
    for (; *s; s++) {
        int byte = *s == '%' && strspn(s + 1, "0123456789ABCDEF") >= 2;
        *out++ = byte ? (char)strtol((char[]){ s[1], s[2], 0 }, NULL, 16) : *s;
        s += byte ? 2 : 0;
    }
    *out = 0;
    return (size_t)(out - begin);
}

// The tables of test/cases.txt: "== NAME: what the parts are" begins one, and each line behind it is a case. %0A
// stands for the byte of that number. The test NAME does what stands behind TABLE(NAME, ..) for each case: part[0],
// part[1] ..
#define TABLE(name, parts, what) \
    static void case_##name(char **part); \
    TEST(name, what) { each_case(#name, parts, case_##name); } \
    static void case_##name(char **part)

static size_t case_size[8];     // bytes of the parts of the running case

static void each_case(const char *table, int parts, void (*check)(char **part)) {
    char line[2048], *part[8];
    FILE *f = fopen("test/cases.txt", "r");
    int inside = 0, cases = 0;
    for (int n; (n = next_case(f, line, sizeof line, part, parts));) {
        int begins = !strncmp(line, "== ", 3);
        if (begins) inside = !strncmp(line + 3, table, strlen(table)) && line[3 + strlen(table)] == ':';
        if (begins || !inside) continue;
        CHECK(n == parts, "%s: %d parts, not %d: %s", table, n, parts, line);
        for (int i = 0; i < n; i++) case_size[i] = case_bytes(part[i]);
        if (n == parts) check(part);
        cases++;
    }
    CHECK(cases, "test/cases.txt has no table %s", table);
    if (f) fclose(f);
}

// How many lines a text has.
static int lines_in(const char *s) {
    int n = 0;
    for (; *s; s++) n += *s == '\n';
    return n;
}

// ---- the runner
// Where chats on a terminal keep their history while the tests run.
static char state_folder[] = "/tmp/kvcomp-state-XXXXXX";

// The tests are the same wherever they are started from, whatever the user's environment says, and on a
// machine with a GPU: they run in the folder of the program, on the CPU, and threads that wait do not take the
// cores from those that work.
static void settle(char **argv) {
    char folder[1024];
    const char *slash = strrchr(argv[0], '/');
    spin_shortly(argv);
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - argv[0]) : 1, slash ? argv[0] : ".");
    if (*folder && chdir(folder)) fprintf(stderr, "%s: %s\n", folder, strerror(errno));
    unsetenv("NO_COLOR");
    if (mkdtemp(state_folder)) setenv("XDG_STATE_HOME", state_folder, 1);
}

// The seconds of a processor that this process has taken, and the programs that it has run.
static double cpu_seconds(void) {
    double sum = 0;
    for (int children = 0; children < 2; children++) {
        struct rusage u;
        getrusage(children ? RUSAGE_CHILDREN : RUSAGE_SELF, &u);
        sum += (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec);
        sum += (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
    }
    return sum;
}

// The first argument asks for help, which is given.
static int help_asked(char **argv) {
    const char *first = argv[1] ? argv[1] : "";
    if (strcmp(first, "-h") && strcmp(first, "--help")) return 0;
    printf("%s              every test: a line for each that fails\n", argv[0]);
    printf("%s NAME ...     those whose names contain one of the words, and what they take\n", argv[0]);
    printf("%s -l           lists the tests, and what they prove\n", argv[0]);
    return 1;
}

// Lists the tests, or runs those whose names are given, or all, each in turn. Returns the exit code: 5 if one
// failed, or none was run.
static int check_main(int argc, char **argv) {
    // Static, because a test that is left out jumps back here.
    static int passed, failed, i;
    const char *stop = getenv("KVCOMP_TEST_STOP");      // the first test that fails is the last
    static double before;                               // of whoever became this program
    static double t0, cpu;
    if (help_asked(argv)) return 0;
    settle(argv);
    before = cpu_seconds();
    allocation_fails = this_one_fails;
    if (argc == 2 && !strcmp(argv[1], "-l")) {
        for (i = 0; i < n_tests; i++) printf("%-40s %s\n", test_table[i].name, test_table[i].what);
        return 0;
    }
    for (i = 0; i < n_tests; i++) {
        int wanted = argc < 2;
        for (int j = 1; j < argc; j++) wanted |= strstr(test_table[i].name, argv[j]) != NULL;
        if (!wanted) continue;
        t0 = now();
        cpu = cpu_seconds();
        checks_failed = 0;
        if (!setjmp(test_leave)) {
            test_table[i].run();
        } else {
            printf("left out %s\n", test_table[i].name);
            if (!checks_failed) continue;
        }
        double dt = now() - t0;
        passed += !checks_failed;
        failed += checks_failed > 0;
        if (checks_failed)
            printf("FAILED %s (%d checks): %s\n", test_table[i].name, checks_failed, test_table[i].what);
        if (argc > 1 || dt > 2)
            printf("       %s %.2f s, %.2f of a processor\n", test_table[i].name, dt, cpu_seconds() - cpu);
        fflush(stdout);
        if (failed && stop) break;
    }
    tmp_clear(state_folder);
    for (int k = 0; k < n_lacks; k++)
        printf("left out: %d need%s %s\n", lacks[k].n, lacks[k].n == 1 ? "s" : "", lacks[k].what);
    printf("%d passed, %d failed, %.0f s of a processor\n", passed, failed, cpu_seconds() - before);
    return failed || (!passed && !n_lacks) ? EXIT_CHECK : 0;
}
#endif
