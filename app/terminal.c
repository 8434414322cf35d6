// app/terminal.c - signals, messages from a terminal or a pipe, the history, columns.
#define _GNU_SOURCE
#include "terminal.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>
#include <wchar.h>
#include <stb/stb_ds.h>
#ifdef KVCOMP_READLINE
#include <readline/history.h>
#include <readline/readline.h>
#endif

volatile sig_atomic_t interrupts, leaving, turn_runs, saving_turn, chat_busy;
int quiet;

// ---- progress
static double progress_start;
static volatile sig_atomic_t progress_shown;

void progress(const char *what, double share) {
    if (quiet || !isatty(2)) return;
    if (share <= 0) {
        progress_start = now();
        progress_shown = 0;
    } else if (share >= 1) {
        if (progress_shown) fprintf(stderr, "\r\x1b[K");
        progress_shown = 0;
    } else if (now() - progress_start >= 1) {
        fprintf(stderr, "\r%s %3.0f %%", what, 100 * share);
        progress_shown = 1;
    }
}

// ---- the terminal
// From the beginning of a chat to its end the terminal shows no keys: while a line is edited readline
// draws them, and while a reply is made they wait for the next line. Ctrl-Z is a signal all the time, Ctrl-C while
// no line is edited. The terminal's own settings come back when the program stops or ends.

// Bracketed paste: the terminal puts ESC [ 200 ~ before a paste and ESC [ 201 ~ behind it, so that
// a pasted newline does not send the line. Readline asks for it while it edits; it stays on while a
// reply is made, for what is pasted ahead.
#define PASTE_MARKS_ON  "\x1b[?2004h"
#define PASTE_MARKS_OFF "\x1b[?2004l"

static struct termios terminal_before;      // the terminal's own settings, while terminal_held
static struct termios terminal_given;       // those that the chat has given it
static volatile sig_atomic_t terminal_held;

// Gives the terminal these settings, and switches the paste marks. There is nothing to be done about a terminal that is
// gone. A process that was sent to the background leaves the settings alone: they are the shell's then, and whoever
// changes them is stopped (SIGTTOU).
static void terminal_set(const struct termios *settings, const char *marks) {
    pid_t group = tcgetpgrp(0);
    if (group >= 0 && group != getpgrp()) return;
    tcsetattr(0, TCSANOW, settings);
    (void)!write(1, marks, strlen(marks));
}

// Gives the terminal its settings back. Called in signal handlers and at exit as well; a second
// call does nothing.
static void terminal_restore(void) {
    if (terminal_held) terminal_set(&terminal_before, PASTE_MARKS_OFF);
    terminal_held = 0;
}

int screen_columns(void) {
    struct winsize w;
    if (ioctl(1, TIOCGWINSZ, &w) || !w.ws_col) return 80;
    return w.ws_col;
}

// ---- signals
// A signal that ends programs (TERM, HUP, QUIT, PIPE, and INT where no chat uses it) ends this one
// with the status that shells expect, after the terminal has its settings back and files in the
// making are gone. While a turn is made and saved it waits: the turn ends at the next token or layer,
// is saved, and then the signal has its way. A second one does not wait. SIGTSTP and SIGCONT, which
// stop the program and let it go on, hand the terminal over and take it back. A signal that the
// program was started without (nohup) stays ignored. Handlers call only what a handler may call.

static volatile sig_atomic_t editing;       // 1: readline has the terminal
static volatile sig_atomic_t interrupted;   // 1: Ctrl-C came meanwhile
static volatile sig_atomic_t redraw;        // 1: after a stop, or on a screen of another size, the line is drawn anew

// What is to be put right before the program ends: the terminal, a progress line, files in the
// making, of which a word is said if `say` is set.
static void leave_tidy(int say) {
    static const char lost[] = "kvcomp: not written, the old file stays\n";
    terminal_restore();
    if (progress_shown) (void)!write(2, "\r\x1b[K", 4);
    progress_shown = 0;
    if (temp_files_remove() && say) (void)!write(2, lost, sizeof lost - 1);
}

// At exit.
static void leave_quietly(void) { leave_tidy(0); }

// Does with this process what the signal does when nobody catches it.
static void signal_default(int sig) {
    sigset_t only;
    signal(sig, SIG_DFL);
    sigemptyset(&only);
    sigaddset(&only, sig);
    sigprocmask(SIG_UNBLOCK, &only, NULL);
    raise(sig);
}

void leave(int sig) {
    leave_tidy(1);
    signal_default(sig);
    _exit(128 + sig);                       // not reached: each of these signals ends a process
}

// TERM, HUP, QUIT, PIPE, and INT outside a chat.
static void on_leave(int sig) {
    if (turn_runs && !leaving && sig != SIGPIPE) leaving = sig;
    else leave(sig);
}

static void signal_watch(int sig, void (*handler)(int), int even_if_ignored) {
    struct sigaction old, sa = { .sa_handler = handler, .sa_flags = SA_RESTART };
    if (sigaction(sig, NULL, &old)) return;
    if (old.sa_handler == SIG_IGN && !even_if_ignored) return;
    sigaction(sig, &sa, NULL);
}

// SIGTSTP: the program stops, with the terminal's own settings, and goes on here, at once if nobody could let it go
// on. SIGCONT, which may come behind a SIGSTOP that cannot be caught. SIGWINCH: the screen has another size.
static void on_screen(int sig) {
    int before = errno;
    if (sig == SIGTSTP) {
        if (terminal_held) terminal_set(&terminal_before, PASTE_MARKS_OFF);
        signal_default(sig);
        signal_watch(sig, on_screen, 1);
    }
    if (terminal_held) terminal_set(&terminal_given, PASTE_MARKS_ON);
    redraw = 1;
    errno = before;
}

// From the start of the program on. SIGXFSZ is what a limit on the size of files sends; without it
// the write fails and is told.
void watch_signals(void) {
    static const int ends[] = { SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGPIPE }, screen[] = { SIGTSTP, SIGCONT, SIGWINCH };
    for (int i = 0; i < 5; i++) signal_watch(ends[i], on_leave, 0);
    for (int i = 0; i < 3; i++) signal_watch(screen[i], on_screen, 0);
    signal(SIGXFSZ, SIG_IGN);
    before_leaving = leave_tidy;
    atexit(leave_quietly);
}

// ---- Ctrl-C
static double interrupt_at;                 // when it was last pressed, in seconds of now()

// Notes that Ctrl-C is pressed. 1: it was pressed less than a second ago, too.
static int interrupt_again(void) {
    double before = interrupt_at;
    interrupt_at = now();
    return interrupt_at - before < 1;
}

// SIGINT in a chat. The editor looks at it itself. While a plain line is waited for there is nothing
// to stop, and the chat ends. While a reply is made, the reply sees interrupts and stops, and a second
// one leaves, but not before a turn that is being saved is safe.
static void on_interrupt(int sig) {
    if (editing) {
        interrupted = 1;
        return;
    }
    if (!chat_busy) leave(sig);
    if (interrupt_again() && interrupts) {
        if (saving_turn) {
            leaving = sig;
            return;
        }
        leave_tidy(1);
        _exit(EXIT_INTERRUPT);
    }
    interrupts++;
}

void interrupt_at_prompt(void) {
    if (interrupt_again()) {
        terminal_restore();
        exit(EXIT_INTERRUPT);
    }
    fprintf(stderr, "(Ctrl-C again leaves, so does Ctrl-D)\n");
}

void watch_keyboard(void) { signal_watch(SIGINT, on_interrupt, 1); }

// ---- the history, kept over chats
#ifdef KVCOMP_READLINE
// Readline's own file: behind a line with the time stands a message, which so may have several lines. Each is appended
// when it is sent: chats side by side leave each other's messages alone, and a program that is killed has lost nothing.
enum {
    HISTORY_LINES = 1000,           // messages: so many of the newest are there
    HISTORY_MESSAGE = 1 << 16,      // bytes of the longest message that is kept
};

static char history_file[PATH_MAX]; // where it is kept; "": it is not

// From here on the history is not kept, and a line on stderr says why.
static void history_give_up(const char *why) {
    if (!quiet) warn("the history is not kept: %s: %s", history_file, why);
    *history_file = 0;
}

// Reads the history from its file, $XDG_STATE_HOME/kvcomp/history, by default in ~/.local/state. It is made if there is
// none, for its owner alone as the folders on the way. What stands in its place and is no file is left alone.
static void history_read(void) {
    char err[256];
    struct stat st;
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    int own = state && *state == '/', size = sizeof history_file;
    if (!own && !(home && *home == '/')) return;
    if (snprintf(history_file, size, "%s%s/kvcomp/history", own ? state : home, own ? "" : "/.local/state") >= size) {
        history_give_up(strerror(ENAMETOOLONG));
        return;
    }
    for (char *p = strchr(history_file + 1, '/'); p; p = strchr(p + 1, '/')) {
        *p = 0;
        (void)mkdir(history_file, 0700);
        *p = '/';
    }
    int made = open(history_file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int fd = open_input(history_file, &st, err);
    if (made >= 0) close(made);
    if (fd < 0) {
        history_give_up(err);
        return;
    }
    close(fd);
    history_comment_char = '#';
    history_write_timestamps = history_multiline_entries = 1;
    stifle_history(HISTORY_LINES);
    history_truncate_file(history_file, HISTORY_LINES);
    read_history(history_file);
}

// Adds a message to the history, and to its file, unless it is the one before once more.
static void history_keep(const char *text) {
    const HIST_ENTRY *last = history_get(history_base + history_length - 1);
    if (last && !strcmp(last->line, text)) return;
    add_history(text);
    if (!*history_file || strlen(text) > HISTORY_MESSAGE) return;
    int bad = append_history(1, history_file);
    if (bad) history_give_up(strerror(bad));
}

// ---- lines edited by readline
// Readline asks for one byte after the other, and the program waits for them itself: signals are let through
// only there, and readline catches none.
static struct termios terminal_quiet;       // the settings while a reply is made
static NameAt *name_at;             // what Tab completes
static int name_from;               // where in the line the word to be completed begins
static sigset_t signals_before;     // those let through while it waits
static int line_given_up;           // 1: the line that Ctrl-C ended had some text; readline empties it when a key is cut

// Waits for a byte and takes it: 1, or -1 at the end of the input. 0: a signal came first.
static int byte_take(unsigned char *c) {
    fd_set f;
    FD_ZERO(&f);
    FD_SET(0, &f);
    if (pselect(1, &f, NULL, NULL, NULL, &signals_before) < 0 && errno == EINTR) return 0;
    return read(0, c, 1) == 1 ? 1 : -1;
}

// Readline's next byte. Behind a stop, or when the screen gets another size, the line is drawn anew. Ctrl-C, or what
// the user's terminal has in its place, comes as a key, because a signal would overtake the keys before it. It ends the
// line, and first the key or the paste whose end it waits for.
static int byte_read(FILE *f) {
    unsigned char c;
    int n = 0;
    (void)f;
    while (!interrupted && !(n = byte_take(&c))) {
        if (redraw) {
            rl_resize_terminal();
            rl_forced_update_display();
        }
        redraw = 0;
    }
    if (n > 0 && c == terminal_before.c_cc[VINTR] && c != _POSIX_VDISABLE) interrupted = 1;
    if (n > 0 && !interrupted) return c;
    line_given_up |= rl_end > 0;
    return interrupted && RL_ISSTATE(RL_STATE_READCMD) ? READERR : EOF;
}

// Readline takes the terminal. It shows keys only on one that shows them. A signal of before comes before the keys.
static void line_prepare(int meta) {
    struct termios shows = terminal_quiet;
    sigset_t held;
    shows.c_lflag |= ECHO;
    tcsetattr(0, TCSANOW, &shows);
    rl_prep_terminal(meta);
    tcgetattr(0, &terminal_given);
    terminal_given.c_cc[VINTR] = _POSIX_VDISABLE;
    tcsetattr(0, TCSANOW, &terminal_given);
    sigprocmask(SIG_SETMASK, &signals_before, &held);
    sigprocmask(SIG_SETMASK, &held, NULL);
}

// It gives the terminal back: keys wait unseen.
static void line_release(void) {
    rl_deprep_terminal();
    terminal_given = terminal_quiet;
    terminal_set(&terminal_given, PASTE_MARKS_ON);
}

// The next name that begins with the word; the first call for a word has again 0.
static char *name_next(const char *word, int again) {
    static int i;
    int paths;
    const char *name;
    if (!again) i = 0;
    while ((name = name_at(rl_line_buffer, name_from, i++, &paths)))
        if (!strncmp(name, word, strlen(word))) return copy_text(name);
    return NULL;
}

// Readline's question what may stand in place of a word; NULL: nothing, or names of files.
static char **names_for(const char *word, int from, int to) {
    int paths = 0;
    (void)to;
    name_from = from;
    const char *first = name_at(rl_line_buffer, from, 0, &paths);
    rl_attempted_completion_over = !paths;
    rl_completion_append_character = from ? 0 : ' ';
    return first ? rl_completion_matches(word, name_next) : NULL;
}

// Alt-Enter: a line break in the message.
static int line_break(int count, int key) {
    (void)count;
    (void)key;
    return rl_insert_text("\n");
}

// The first call sets readline up. It reads UTF-8, as the program writes it, whatever the locale says.
static void lines_prepare(void) {
    setenv("LC_ALL", "C.UTF-8", 1);
    setlocale(LC_CTYPE, "");
    rl_readline_name = "kvcomp";
    rl_catch_signals = rl_catch_sigwinch = rl_change_environment = 0;
    rl_instream = stdin;
    rl_outstream = stdout;
    rl_getc_function = byte_read;
    rl_prep_term_function = line_prepare;
    rl_deprep_term_function = line_release;
    rl_attempted_completion_function = names_for;
    rl_completer_word_break_characters = " +";          // methods are joined by +
    rl_bind_keyseq("\\e\\C-m", line_break);
    rl_bind_keyseq("\\e\\C-j", line_break);
}

// Takes the terminal for a chat. 0, or -1 when it does not answer.
static int terminal_take(void) {
    if (tcgetattr(0, &terminal_before)) return -1;
    terminal_quiet = terminal_before;
    // ICANON: bytes wait as they are typed, not line by line. ECHO: they are not shown. ICRNL: Return
    // is \r (13), as readline expects it. NOFLSH: Ctrl-C leaves what is typed ahead alone.
    terminal_quiet.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    terminal_quiet.c_lflag |= NOFLSH;
    terminal_quiet.c_iflag &= ~(tcflag_t)ICRNL;
    terminal_quiet.c_cc[VMIN] = 1;
    terminal_quiet.c_cc[VTIME] = 0;
    terminal_given = terminal_quiet;
    terminal_held = 1;                      // first: a signal may come behind each of these lines
    terminal_set(&terminal_given, "");
    return 0;
}

// Appends an edited line to the stb_ds array. Returns READ_*.
static int read_edited(char **out) {
    static const int answered[] = { SIGINT, SIGTSTP, SIGCONT, SIGWINCH };
    char prompt[64], *line;
    sigset_t held;
    const char *color = in_color(stdout, COLOR_USER);
    sigemptyset(&held);
    for (int i = 0; i < 4; i++) sigaddset(&held, answered[i]);
    editing = 1;
    // What stands between \001 and \002 takes no column.
    snprintf(prompt, sizeof prompt, *color ? "\001%s\002> \001%s\002" : "> ", color, COLOR_OFF);
    do {
        sigprocmask(SIG_BLOCK, &held, &signals_before);
        interrupted = redraw = line_given_up = 0;
        rl_reset_screen_size();
        line = readline(prompt);
        sigprocmask(SIG_SETMASK, &signals_before, NULL);
        if (!interrupted) break;
        free(line);                 // Ctrl-C right behind Enter takes the line back, before anything is made of it
        line = NULL;
        fputs("\r\n", stdout);
        fflush(stdout);
    } while (rl_end || line_given_up);      // Ctrl-C: an empty line is given up, behind another one an empty one begins
    editing = 0;
    if (!line) return interrupted ? READ_INTERRUPTED : READ_END;
    bytes_put(out, line, strlen(line));
    free(line);
    return READ_DONE;
}

static int edited;                  // 1: lines are edited

// That takes a terminal at both ends, and one that obeys readline.
void messages_begin(int keep_history, NameAt *names) {
    const char *term = getenv("TERM");
    int dumb = term && !strcmp(term, "dumb");
    name_at = names;
    edited = isatty(0) && isatty(1) && !dumb && !terminal_take();
    if (!edited) return;
    lines_prepare();
    if (keep_history) history_read();
}

void messages_end(void) {
    terminal_restore();
    clear_history();
    *history_file = 0;
    edited = 0;
}
#else
// Without readline every line comes as the terminal edits it.
enum { edited };

static int read_edited(char **out) {
    (void)out;
    return READ_END;
}

static void history_keep(const char *text) { (void)text; }

void messages_begin(int keep_history, NameAt *names) {
    (void)keep_history;
    (void)names;
}

void messages_end(void) { terminal_restore(); }
#endif

// ---- one message: a line, or several
int read_line(FILE *f, char **line) {
    int c = getc(f), any = c != EOF;
    for (; c != EOF && c != '\n'; c = getc(f)) arrput(*line, (char)c);
    return any;
}

// Appends a line that nobody edits to the stb_ds array. Returns READ_*.
static int read_plain(char **out) {
    if (isatty(0)) fputs("> ", stderr);                 // a terminal that cannot edit
    chat_busy = 0;
    int any = read_line(stdin, out);
    chat_busy = 1;
    return any ? READ_DONE : READ_END;
}

int read_message(char **out) {
    int r, more = 1;
    arrsetlen(*out, 0);
    while (more) {
        r = edited ? read_edited(out) : read_plain(out);
        if (r == READ_INTERRUPTED || (r == READ_END && !arrlen(*out))) return r;
        more = r == READ_DONE && arrlen(*out) && arrlast(*out) == '\\';
        if (more) arrlast(*out) = '\n';
    }
    if (arrlen(*out) && memchr(*out, 0, arrlenu(*out))) {
        warn("the message holds a 0 byte: expected a text; it is not sent");
        arrsetlen(*out, 0);
    }
    arrput(*out, 0);
    if (edited && (*out)[0]) history_keep(*out);
    return READ_DONE;
}

// ---- columns
// The columns that one character of n bytes takes, as the C library has it: 2 for East Asian wide ranges and
// emoji, 0 for combining marks. A control character, and a byte that is no UTF-8, count as 1.
static int char_width(const char *s, int n) {
    static const char *locale;
    mbstate_t state = { 0 };
    wchar_t c;
    if (n == 1) return 1;
    if (!locale) locale = setlocale(LC_CTYPE, "C.UTF-8");
    if (mbrtowc(&c, s, (size_t)n, &state) != (size_t)n) return 1;
    int width = wcwidth(c);
    return width < 0 ? 1 : width;
}

// ---- replies break between words
// Far from the end of its line a word does not wait. One of more columns than this may be cut there.
enum { LONG_WORD = 20 };

// Appends what waits to *out: to this line if it fits, else to the next one, without its blanks.
static void wrap_word(Wrap *w, char **out) {
    int from = 0;
    if (w->x && w->x + w->blanks + w->width > w->cols) {
        if (w->width) arrput(*out, '\n');
        if (w->width) w->x = 0;
        from = w->blanks;
    }
    bytes_put(out, w->word + from, arrlenu(w->word) - (size_t)from);
    w->x += w->width + w->blanks - from;
    w->blanks = w->width = 0;
    arrsetlen(w->word, 0);
}

// A word ends before a blank and before a wide character, since Chinese and Japanese have no blanks; one that is wider
// than a line is cut.
void wrap_text(Wrap *w, char **text, int last) {
    char *out = NULL;
    size_t n = arrlenu(*text);
    if (!w->cols) return;
    for (size_t i = 0, k; i < n; i += k) {
        const char *s = *text + i;
        k = (size_t)max_int(utf8_length(s, n - i), 1);          // what is no UTF-8 stands alone
        int width = char_width(s, (int)k), blank = *s == ' ';
        if (*s == '\t') width = 8 - (w->x + w->blanks + w->width) % 8;
        int ends = (w->width && (blank || width == 2)) || *s == '\n' || w->width + width > w->cols;
        if (ends) wrap_word(w, &out);
        if (*s == '\n') {
            arrput(out, '\n');
            w->x = 0;
            continue;
        }
        bytes_put(&w->word, s, k);
        if (blank) w->blanks++;
        else w->width += width;
    }
    if (last || w->x + w->blanks + w->width + LONG_WORD <= w->cols) wrap_word(w, &out);
    arrfree(*text);
    *text = out;
}

// Writes a text in lines of at most `cols` columns, all but the first begun with `indent` blanks;
// the first is begun already.
void print_wrapped(FILE *f, const char *text, int indent, int cols) {
    Wrap w = { .cols = max_int(cols - indent, 1) };
    char *out = NULL;
    bytes_put(&out, text, strlen(text));
    wrap_text(&w, &out, 1);
    arrput(out, '\n');
    for (char *line = out, *end; line < out + arrlen(out); line = end + 1) {
        end = memchr(line, '\n', (size_t)(out + arrlen(out) - line));
        if (line > out) fprintf(f, "%*s", indent, "");
        show(f, line, (size_t)(end - line + 1));
    }
    arrfree(out);
    arrfree(w.word);
}
