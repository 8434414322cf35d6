# Prints the CPU seconds (user and system) of a whole build, and of the build that follows an edit of one file:
# sh data/build_times.sh. One job at a time, so that nothing else counts.
set -eu
cd "$(dirname "$0")/.."
export MAKEFLAGS=

# The CPU seconds of a command.
seconds() {
    { TIMEFORMAT='%U %S'; bash -c "TIMEFORMAT='%U %S'; time { $1; } >/dev/null 2>&1"; } 2>&1 | awk '{ printf "%.1f", $1 + $2 }'
}

# $1: what is said of it; $2: the file that is edited.
edit() {
    touch "$2"
    printf '%-42s %6s\n' "$1" "$(seconds 'make -j1 NVCC= kvcomp')"
}

printf '%-42s %6s\n' 'CPU seconds of' ''
make NVCC= clean >/dev/null
printf '%-42s %6s\n' 'a whole build' "$(seconds 'make -j1 NVCC= kvcomp')"
edit 'an edit of a method (kvcomp.c)' kvcomp.c
edit 'an edit of kvcomp.h' kvcomp.h
for f in lib/base.c lib/kernels.c lib/checkpoint.c lib/tokenizer.c lib/template.c \
         app/options.c app/terminal.c app/chat.c app/measure.c app/page.c app/main.c; do
    edit "an edit of $f" $f
done
