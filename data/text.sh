#!/bin/sh
# How the source reads, in numbers: sh data/text.sh FILE.. prints a line a file. Lines of data tables and banners count.
for f in "$@"; do
    awk '{ print length($0) }' "$f" | sort -n >/tmp/kvcomp-text.$$
    n=$(wc -l <"$f")
    p90=$(sed -n "$((n * 90 / 100))p" /tmp/kvcomp-text.$$)
    p99=$(sed -n "$((n * 99 / 100))p" /tmp/kvcomp-text.$$)
    # a function: from a line at the margin that ends in ") {" to the next "}" at the margin
    awk '/^[A-Za-z_].*\) \{$/ || /^ +.*\) \{$/ && open_head { start = NR; in_f = 1 } /^[A-Za-z_].*[,(]$/ { open_head = 1 } \
         !/^[A-Za-z_ ].*[,({]$/ { open_head = 0 } /^\}/ { if (in_f) print NR - start + 1; in_f = 0 }' "$f" | sort -n >/tmp/kvcomp-text.$$
    m=$(wc -l </tmp/kvcomp-text.$$)
    median=$(sed -n "$((m / 2 + 1))p" /tmp/kvcomp-text.$$)
    longest=$(tail -1 /tmp/kvcomp-text.$$)
    rm -f /tmp/kvcomp-text.$$
    awk -v f="$f" -v p90="$p90" -v p99="$p99" -v m="$m" -v median="$median" -v longest="$longest" '
        /^ *\/\// { comments++ }
        /^ *$/ { blanks++ }
        length($0) > 120 { wide++ }
        { code = $0; gsub(/"([^"\\]|\\.)*"/, "", code); sub(/\/\/.*/, "", code) }
        code !~ /for *\(/ && code !~ /^ *\{.*\},?$/ && code ~ /;[^;]*;/ { two++ }
        END { printf "%s: %d lines, %.0f %% only a comment, %.0f %% blank, width p90 %s, p99 %s, %.1f %% over 120 columns, %.1f %% with two statements, %d functions of %s lines in the median, %s at most\n",
              f, NR, 100 * comments / NR, 100 * blanks / NR, p90, p99, 100 * wide / NR, 100 * two / NR, m, median, longest }' "$f"
done
