// app/page.h - what was measured and traced as one page.
#ifndef APP_PAGE_H
#define APP_PAGE_H
#include "measure.h"

// ---- the whole page
// Writes the page of --report: the rows of an evaluation, which may be none, and a dialogue through several
// methods. Ends the program when writing fails.
void report_write(App *a, const EvalRun *run);

// ---- the default evaluation
// --report without --eval: evaluates a little where that takes seconds, then writes the page. Returns 0.
int report(App *a);

#endif
