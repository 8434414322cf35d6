// app/main.h
#ifndef APP_MAIN_H
#define APP_MAIN_H
#include "page.h"

#endif
