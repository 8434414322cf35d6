# Writes the whole CPU program as one file to standard output: the headers and sources of lib/, kvcomp and app/
# in the order of their floors, with the includes of one another dropped.
#
#     sh data/single.sh >kvcomp_single.c && gcc -O1 -std=c11 kvcomp_single.c -lm
set -eu
cd "$(dirname "$0")/.."

cat <<'HEAD'
// kvcomp_single.c - the whole CPU program as one file, written by `make single`:
//
//     gcc -O1 -std=c11 -fopenmp -o kvcomp kvcomp_single.c -lm
//
// Read kvcomp.h and kvcomp.c instead: this file is for who wants to carry one file along. Its parts stand in
// the order of their floors, and each calls only those before it: base, kernels, checkpoint, tokenizer,
// template, kvcomp (the subject), and then what people use it through. It needs stb_ds.h (Debian: libstb-dev).
//
// The kernels are those of the instruction set that the flags name: -march=native makes them fast, on the
// machine that compiles.
#define _GNU_SOURCE
HEAD

# A file without its includes of other files of the program, but with the tables that the tokenizer reads.
part() {
    awk -v name="$1" '
        BEGIN { printf "\n// #################### %s\n", name }
        /^#include "..\/data\/unicode.h"/ { while ((getline line <"data/unicode.h") > 0) print line; next }
        /^#include "page_html.h"/ { while ((getline line <"build/page_html.h") > 0) print line; next }
        /^#include "/ { next }
        /^#define _GNU_SOURCE/ { next }
        { print }' "$1"
}

app='app/options app/terminal app/trace app/chat app/measure app/page app/main'
for f in lib/base lib/kernels lib/checkpoint lib/tokenizer lib/template; do
    part $f.h
    part $f.c
done
part kvcomp.h
for f in ${app% *}; do part $f.h; done             # app/main has none
part kvcomp.c
for f in $app; do part $f.c; done
