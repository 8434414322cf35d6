// app/page.h - measurements and pictures as one page.
#ifndef APP_PAGE_H
#define APP_PAGE_H
#include "measure.h"

// ---- the whole page
// Ends the program if the page or its table cannot be written. Called before any work is done.
void report_check(const char *path);

// Writes the page and its numbers, which take their places together. rows: what was evaluated (stb
// array), or NULL. chosen: "" when the user asked for the evaluation, else the options of the default
// one, or why there are no rows. Ends the program when writing fails.
int report_write(App *a, const char *path, const Score *rows /* stb_ds */, const char *chosen);

// ---- the default evaluation
// --report without --eval: evaluates a little, then writes the page. Returns 0.
int report(App *a, const char *path);

#endif
