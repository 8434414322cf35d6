// app/main.h - the program.
#ifndef APP_MAIN_H
#define APP_MAIN_H
#include "page.h"

// The program without its main: what is asked for is done, and the exit code comes back.
int kvcomp_main(int argc, char **argv);

#endif
