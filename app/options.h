// app/options.h - the options of the program: the table, and what each run looks at.
#ifndef APP_OPTIONS_H
#define APP_OPTIONS_H
#include "../kvcomp.h"

extern const Opt program_options[];     // the table, ended by name NULL

Options *options_of_program(void);      // every option of the program and of every method, at its default
int evaluates(const Options *o);        // is the run an evaluation?
int is_of_methods(const char *name);    // is the option one that only some methods look at?

// Ends the program for an option that is none: exit 2. Behind the reason stands what to type instead,
// when the name without dashes is near to that of an option here, or one of other programs or of before.
void unknown_option(const char *reason, const char *name);

// Says in one line which of the given options this run never looks at, and in another one which the
// methods do not.
void say_without_effect(const Options *o);

#endif
