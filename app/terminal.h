// app/terminal.h - what people see and type: signals, messages read from a terminal or a pipe, the history,
// and text laid out in columns.
#ifndef APP_TERMINAL_H
#define APP_TERMINAL_H
#include "../lib/base.h"
#include <signal.h>

extern volatile sig_atomic_t interrupts;        // Ctrl-C since the reply began
extern volatile sig_atomic_t leaving;           // a signal that ends the program as soon as the turn is saved; 0: none
extern volatile sig_atomic_t turn_runs;         // 1: a turn is being made and saved, and signals wait for its end
extern volatile sig_atomic_t saving_turn;       // 1: its record is being saved
extern volatile sig_atomic_t chat_busy;         // 1: a chat runs, and waits for no plain line
extern int quiet;                               // --quiet: errors only on stderr

// ---- progress
// Shows how far a long piece of work is, as one line on stderr that is rewritten. share 0 begins,
// share 1 ends and clears the line. The line appears only on a terminal, and only when the work has
// taken a second.
void progress(const char *what, double share);

// ---- signals
void watch_signals(void);                       // from the start of the program on
void watch_keyboard(void);                      // from here on Ctrl-C stops a reply
void interrupt_at_prompt(void);                 // Ctrl-C on an empty prompt: twice within a second leaves
void leave(int sig);                            // ends the program by the signal

// ---- messages
enum {                      // how reading a message ends
    READ_INTERRUPTED = -1,  // Ctrl-C on an empty line
    READ_END = 0,           // the end of the input, or Ctrl-D on an empty line
    READ_DONE = 1,
};

// What Tab may put behind the first `from` bytes of a line: the i-th name, NULL behind the last. Instead
// of names, *paths 1 asks for those of files.
typedef const char *NameAt(const char *line, int from, int i, int *paths);

// Begins to read messages: on a terminal, where readline is there, with editing, completion and, with
// keep_history, the messages of earlier chats.
void messages_begin(int keep_history, NameAt *names);

// The next message into *out, an stb_ds array that ends in NUL; a line that ends in \ goes on. Returns READ_*;
// Ctrl-C on an empty line gives up the lines before it, too.
int read_message(char **out);

void messages_end(void);                        // gives the terminal back

// Appends a line without its newline to the stb_ds array *line. 0: the file is at its end.
int read_line(FILE *f, char **line);

// ---- columns
int screen_columns(void);                       // the width of the screen; 80 when the terminal does not say
void print_wrapped(FILE *f, const char *text, int indent, int cols);    // in lines; the first is begun already

// A reply comes in pieces that end anywhere, so near the end of a line its last word waits until it is
// known to be whole.
typedef struct {
    int cols;               // of a line; 0: lines are left as they come
    int x;                  // columns of the line so far
    char *word;             // the blanks and the word behind them that wait (stb_ds array of bytes)
    int blanks;             // how many blanks those are
    int width;              // columns of the word
} Wrap;

// Breaks the lines of the stb_ds array *text, the next piece of a reply, between words. last 1: nothing
// comes behind.
void wrap_text(Wrap *w, char **text, int last);

#endif
