#!/bin/sh
# The first ten minutes on a GPU, in one command:   sh data/gpu_slot.sh [report.txt]
#
# It builds, runs the CUDA tests on the device, measures whole steps, of which it predicts the times, has ncu count
# in single kernels, and writes one text file: every prediction beside what was measured, and which ones missed.
#
# It needs make, a C compiler, nvcc with cuBLAS, stb_ds.h (CPATH=DIR where it lies in DIR/stb/), and nothing
# else: no model, no network. ncu is used where it is installed. SHAPE, PROMPTS, DEPTHS, METHODS and STEPS
# ("build tests bench ncu") choose less of it; PREDICTIONS=FILE are others than those below, DEVICE another
# -d.
#
# A step that fails is written down, and the next one begins. Exit code 0: every test passed and every
# prediction that was measured held; 1: not.
cd "$(dirname "$0")/.." || exit 1
REPORT=${1:-gpu-slot.txt}
SHAPE=${SHAPE:-llama-3.1-8b}
PROMPTS=${PROMPTS:-2048,8192}
DEPTHS=${DEPTHS:-0,8192,32768,65536}
METHODS=${METHODS:-pats q8 q4 lychee quest loopserve-d snapkv}
STEPS=${STEPS:-build tests bench ncu}
KVCOMP=${KVCOMP:-./kvcomp}
WORK=$(mktemp -d) || exit 1
trap 'rm -rf "$WORK"' EXIT
BAD=0

# ---- predictions
# key | least | most | what it is, and why. Shares are per cent of the copy rate that the same line measured,
# so they hold for any card; what is in ms or us is for an H200 (copies 4.3 TB/s; 132 multiprocessors at
# 1.98 GHz issue 1,045 G instructions of a warp a second). METHOD:TEST:N:FIELD is a line of --bench --json,
# and FIELDs are its keys; ms: milliseconds a token. TEST "rows" is what a step behind N rows takes more than one
# behind none. rate: the per cent of the copy rate at which it reads what it reads more; time: per cent of that of full.
#
# The arithmetic, from launches and bytes counted, and `make cuda-check` (instructions). A step at depth
# 0 reads 15.0 GB: 3.49 ms at the copy rate. Products reach 85 to 95 % of it: 3.67 to 4.11 ms. Of the 164
# launches 161 begin early and cost .5 us each; 32 attentions over nothing cost a latency of 3 us beside; the
# best of the logits and the two at the start 15 us: .19 ms. Together 3.9 to 4.3 ms, 81 to 90 %.
#
# A line that begins with blanks goes on with the line before; sed joins them.
predictions() {
    if [ -n "$PREDICTIONS" ]; then
        cat "$PREDICTIONS"
        return
    fi
    sed -e ':join' -e '$!N' -e 's/\n  */ /' -e 'tjoin' -e 'P' -e 'D' <<'P'
full:tg:0:share         | 81 | 90  | 3.49 of 3.9 to 4.3 ms, above
full:tg:0:ms            | 3.9 | 4.3 | the same in time
full:tg:65536:share     | 80 | 92  | 5.49 of 6.0 to 6.8 ms
full:tg:65536:ms        | 6.0 | 6.8 | 8,593 MB of rows more: 2.00 ms at the copy rate, 2.17 to 2.50 at 92 to
                                      80 % of it; 239 instructions for 8 KB are .24 ms of issue
full:rows:32768:rate    | 64 | 95  | a goal: one sequence, level with FlashAttention-3 and FlashInfer
full:rows:65536:rate    | 75 | 95  | a goal
q8:tg:65536:ms          | 5.0 | 5.8 | depth 0, 4,565 MB of rows: 1.06 ms at the copy rate
q8:rows:65536:time      | 45 | 99  | a goal: fewer bytes in less time than f16 rows
q4:tg:65536:ms          | 4.7 | 5.5 | depth 0, 2,417 MB of rows: .56 ms at the copy rate, .80 by instructions
q4:rows:65536:time      | 30 | 99  | a goal, as above
pats:rows:65536:time    | 40 | 99  | a goal, as above
lychee:tg:65536:ms      | 4.6 | 5.5 | depth 0, 824 MB of rows and index (.2 to .3 ms), 30 selections of 15
                                      to 30 us; 199 launches
quest:tg:65536:ms       | 4.6 | 5.4 | depth 0, 662 MB of rows (.2), 30 selections of 15 to 25 us that read
                                      21 MB each; 199 launches
loopserve-d:tg:65536:ms | 4.2 | 5.1 | depth 0, 145 MB, and a 16th of a selection that reads the keys of all
                                      rows twice: 8.6 GB and 0.5 TFLOP, 4 to 10 ms
pats:tg:8192:ms         | 4.1 | 4.8 | depth 0, 695 MB of packed rows (.16 ms at the copy rate, .2 to .4
                                      here; 3.4 instructions of a lane an element are .06), some steps
                                      packed anew
full:pp:8192:tera       | 300 | 510 | 123 TFLOP of products at 600 to 740 a second, 17.6 of attention at 250
                                      to 400, 28 to 60 ms of rounding, scaling, adding
P
}

# ---- the report
# say WORDS..: a line of the report, on the terminal, too. keep: the same for what it reads.
keep() { tee -a "$REPORT"; }
say() { printf '%s\n' "$*" | keep; }

# title WORDS: begins a part of the report.
title() {
    say ""
    say "==== $1 (after $(($(date +%s) - T0)) s)"
}

# wants STEP: is it one of STEPS?
wants() {
    case " $STEPS " in
        *" $1 "*) return 0 ;;
    esac
    return 1
}

T0=$(date +%s)
: >"$REPORT" || exit 1

# ---- the machine, the program, its tests
title "machine"
CARD=name,driver_version,memory.total,clocks.max.sm
say "$(nvidia-smi --query-gpu=$CARD --format=csv,noheader 2>&1 | head -2)"
say "$(git log -1 --format=%h 2>/dev/null) $(uname -m)"

if wants build; then
    title "build"
    make kvcomp >"$WORK/build" 2>&1 || {
        BAD=1
        say "make kvcomp failed"
        tail -5 "$WORK/build" | keep
    }
    grep -i "cpu alone" "$WORK/build" | keep
fi

if wants tests; then
    title "CUDA tests on the device"
    make gpu-test SANITIZE=memcheck >"$WORK/tests" 2>&1 || {
        BAD=1
        say "gpu-test FAILED"
    }
    grep -E "FAILED|passed|tests.c:|test_.*\.c:|device.h:|ERROR SUMMARY|not installed" "$WORK/tests" | head -40 | keep
fi

# ---- speed
# bench METHOD PROMPTS DEPTHS [OPTIONS]: one run of --bench. Its JSON lines go to $WORK/lines.
bench() {
    timeout 200 "$KVCOMP" --bench --json -d "${DEVICE:-cuda}" --synthetic "$SHAPE" --method "$1" \
        --bench-prompts "$2" --bench-depths "$3" -b 2048 -r 3 $4 >"$WORK/out" 2>"$WORK/err"
    code=$?
    [ $code = 0 ] || {
        BAD=1
        say "$1: exit code $code: $(head -1 "$WORK/err")"
    }
    tee -a "$WORK/lines" <"$WORK/out" >>"$REPORT"
}

first=${PROMPTS%%,*}
if wants bench; then
    title "bench"
    bench full "$PROMPTS" "$DEPTHS"
    for method in $METHODS; do
        [ $method = pats ] && options="--pats-bmax 8" || options=
        bench $method "$first" "$DEPTHS" "$options"
    done
fi

# ---- predicted beside measured
# A JSON line of a test becomes lines "METHOD:TEST:N:KEY value"; ms, and tera: TFLOP/s of a prefill's
# products, which take GFLOP_A_TOKEN.
measured() {
    awk -v products="${GFLOP_A_TOKEN:-15.0}" '
        function field(key,   at, rest) {
            at = index($0, "\"" key "\":")
            if (!at) return ""
            rest = substr($0, at + length(key) + 3)
            sub(/[,}].*/, "", rest)
            gsub(/"/, "", rest)
            return rest
        }
        {
            key = field("method") ":" field("test") ":" field("n") ":"
            print key "share", 100 * field("share")
            print key "ms", (field("tok_s") > 0 ? 1000 / field("tok_s") : 0)
            print key "tera", products * field("tok_s") / 1000
            print key "read_gb_s", field("read_gb_s")
            if (field("test") != "tg") next
            m = field("method")
            n = field("n")
            bytes = field("kv_bytes_attended") + field("index_bytes")
            ms = 1000 / field("tok_s")
            if (!(m in ms_0)) {
                ms_0[m] = ms
                bytes_0[m] = bytes
            }
            more = ms - ms_0[m]
            if (m == "full") full[n] = more
            if (more <= 0) next
            print m ":rows:" n ":rate", 100 * (bytes - bytes_0[m]) / (1e6 * more) / field("read_gb_s")
            if (full[n] > 0) print m ":rows:" n ":time", 100 * more / full[n]
        }' "$WORK/lines"
}

# verdict VALUE LEAST MOST: does the prediction hold? The value is empty where nothing was measured.
verdict() {
    awk -v v="$1" -v a="$2" -v b="$3" 'BEGIN {
        if (v == "") print "not measured"
        else if (v + 0 < a + 0) print "MISSED, less"
        else if (v + 0 > b + 0) print "MISSED, more"
        else print "held"
    }'
}

if [ -s "$WORK/lines" ]; then
    title "predicted and measured"
    measured >"$WORK/measured"
    predictions | while IFS='|' read -r key least most why; do
        key=$(echo $key)
        least=$(echo $least)
        most=$(echo $most)
        value=$(awk -v k="$key" '$1 == k { print $2; exit }' "$WORK/measured")
        printf '%-44s predicted %6s .. %-6s measured %10s  %-12s  %s\n' \
            "$key" "$least" "$most" "${value:--}" "$(verdict "$value" "$least" "$most")" "$why"
    done | tee "$WORK/verdicts" >>"$REPORT"
    cat "$WORK/verdicts"
    grep -q MISSED "$WORK/verdicts" && BAD=1
fi

# ---- the profiler
# ncu_run METHOD KERNELS SKIP: prints what ncu counts in some launches of the kernels of a pattern, behind the first
# SKIP ones, in a prefill of 8,192 and a step behind 65,536 rows of a few layers. The clocks stay as they are.
ncu_run() {
    timeout 120 "$NCU" --clock-control none --graph-profiling node --print-summary per-kernel --metrics "$METRICS" \
        -k "regex:$2" --launch-skip $3 --launch-count 30 \
        "$KVCOMP" --bench -d cuda --synthetic "$LAYERS" --method $1 --bench-prompts 8192 --bench-depths 65536 \
        -b 2048 -r 1 --pats-bmax 8
}

LAYERS=L4,H32,G8,D128,C4096,F14336,V32000
METRICS=gpu__time_duration.avg,dram__bytes.sum,sm__inst_issued.avg.pct_of_peak_sustained_active
if wants ncu; then
    title "single kernels, by ncu"
    NCU=$(command -v ncu || ls /usr/local/cuda/bin/ncu 2>/dev/null)
    if [ -z "$NCU" ]; then
        say "ncu is not installed: left out"
    else
        step="^(qkv|decode|gemv|page_select|cluster_select|window|ring_lists|pick)"
        for method in "full ^(prefill|rows|heads|finish|nvjet|sm) 8" "full $step 40" "pats $step 40" "q8 $step 40" \
            "q4 $step 40" "lychee $step 40" "quest $step 40" "loopserve-d ^(window|ring_lists) 0"; do
            set -- $method
            ncu_run "$@" >"$WORK/ncu" 2>&1 || say "ncu: $1: exit code $?"
            say "-- $1, kernels $2"
            grep -E "^ +(void )?[a-z_0-9]+.*, CC |gpu__time|dram__bytes|inst_issued|rror" "$WORK/ncu" | keep
        done
    fi
fi

title "end"
if [ $BAD = 0 ]; then
    say "every test passed, and every prediction that was measured held"
else
    say "something failed or a prediction missed: see above"
fi
exit $BAD
