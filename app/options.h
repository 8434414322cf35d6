// app/options.h - the options of the program: the table, and what each run looks at.
#ifndef APP_OPTIONS_H
#define APP_OPTIONS_H
#include "../kvcomp.h"

// ---- making a set of options
// Every option of the program and of every method, at its default.
Options *options_of_program(void);

// ---- suggestions for misspelt options
// Ends the program for an option that is none: exit 2. Behind the reason stands what to type instead,
// when the name without dashes is near to that of an option here or in other programs.
void unknown_option(const char *reason, const char *name);

// ---- parsing
// Is the run an evaluation?
int evaluates(const Options *o);

// ---- options without effect
// Is the option one that only some methods look at?
int is_of_methods(const char *name);

// Says in one line which of the given options this run never looks at, and in another one which the
// methods do not; and which ones --temp 0 and --raw leave without effect. Greedy sampling is what an
// evaluation does anyway, so --temp 0 there is no mistake. The report, the demonstration and the lines
// of a batch name their own methods.
void say_without_effect(const Options *o);

extern const Opt program_options[];     // the table, ended by name NULL

#endif
