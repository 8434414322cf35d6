#!/bin/sh
# How the source reads, in numbers: sh data/text.sh FILE.. prints a line a file. Lines of data tables and
# banners count.

# lengths FILE: the length of every line, in rising order.
lengths() { awk '{ print length($0) }' "$1" | sort -n; }

# functions FILE: the number of lines of every function, in rising order. A function goes from a line at the
# margin that ends in ") {", or from the last of several lines of a head, to the next "}" at the margin.
functions() {
    awk '
        /^[A-Za-z_].*\) \{$/ || /^ +.*\) \{$/ && open_head {
            start = NR
            in_f = 1
        }
        /^[A-Za-z_].*[,(]$/ { open_head = 1 }
        !/^[A-Za-z_ ].*[,({]$/ { open_head = 0 }
        /^\}/ {
            if (in_f) print NR - start + 1
            in_f = 0
        }' "$1" | sort -n
}

SORTED=$(mktemp /tmp/kvcomp-text.XXXXXX)
trap 'rm -f "$SORTED"' EXIT
trap 'exit 1' INT TERM
for f in "$@"; do
    lengths "$f" >$SORTED
    n=$(wc -l <"$f")
    p90=$(sed -n "$((n * 90 / 100))p" $SORTED)
    p99=$(sed -n "$((n * 99 / 100))p" $SORTED)

    functions "$f" >$SORTED
    m=$(wc -l <$SORTED)
    median=$(sed -n "$((m / 2 + 1))p" $SORTED)
    longest=$(tail -1 $SORTED)

    awk -v f="$f" -v p90="$p90" -v p99="$p99" -v m="$m" -v median="$median" -v longest="$longest" '
        /^ *\/\// { comments++ }
        /^ *$/ { blanks++ }
        length($0) > 120 { wide++ }
        {
            code = $0
            gsub(/"([^"\\]|\\.)*"/, "", code)
            sub(/\/\/.*/, "", code)
        }
        code !~ /for *\(/ && code !~ /^ *\{.*\},?$/ && code ~ /;[^;]*;/ { two++ }
        END {
            printf "%s: %d lines, %.0f %% only a comment, %.0f %% blank, ",
                f, NR, 100 * comments / NR, 100 * blanks / NR
            printf "width p90 %s, p99 %s, %.1f %% over 120 columns, ", p90, p99, 100 * wide / NR
            printf "%.1f %% with two statements, %d functions of %s lines in the median, %s at most\n",
                100 * two / NR, m, median, longest
        }' "$f"
done
