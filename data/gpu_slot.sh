#!/bin/sh
# The first ten minutes on a GPU, in one command:   sh data/gpu_slot.sh [report.txt]
#
# It builds, runs the CUDA tests on the device, measures what NOTES.md predicts, looks at single kernels with ncu where it is
# installed, and writes one text file: every prediction beside what was measured, and which ones missed. It needs make, a C
# compiler, nvcc with cuBLAS, stb_ds.h (CPATH=DIR where it lies in DIR/stb/), and nothing else: no model, no network.
# SHAPE, PROMPTS, DEPTHS and STEPS ("build tests bench ncu") choose less of it. A step that fails is written down, and the next
# one begins. Exit code 0: every test passed and every prediction held; 1: not.
cd "$(dirname "$0")/.." || exit 1
REPORT=${1:-gpu-slot.txt}
SHAPE=${SHAPE:-llama-3.1-8b}
PROMPTS=${PROMPTS:-2048,8192}
DEPTHS=${DEPTHS:-0,65536}
STEPS=${STEPS:-build tests bench ncu}
KVCOMP=${KVCOMP:-./kvcomp}
WORK=$(mktemp -d) || exit 1
trap 'rm -rf "$WORK"' EXIT
BAD=0

# ---- predictions
# key | least | most | what it is, and why. Shares are per cent of the copy rate that the same line measured, so they hold for
# any card. A key is METHOD:TEST:N:FIELD of a line of --bench --json; FIELDs are its keys, and ms: milliseconds a token.
predictions() {
    cat <<'P'
full:tg:0:share         | 78 | 92  | a step without rows: 163 launches, whose products begin while the one ahead ends
full:tg:65536:share     | 66 | 71  | a step behind 64k rows: decode_kernel is bound by instructions, at 60 to 70 % of the rate
full:tg:0:ms            | 3.8 | 4.5 | the same in time, on an H200; 3.5 at its copy rate of 4.3 TB/s
full:tg:65536:ms        | 7.7 | 8.4 | an H200; 5.5 at its copy rate
lychee:tg:65536:ms      | 6.3 | 7.4 | as at depth 0, and 65 us a layer of selection
quest:tg:65536:ms       | 5.6 | 6.6 | as at depth 0, and 42 us a layer of selection
loopserve-d:tg:65536:ms | 9   | 10  | a selection of 70 ms every 16 steps
pats:tg:8192:ms         | 4.9 | 5.5 | as at depth 0, and 0.7 to 1 GB of packed rows at more than half the rate
full:pp:8192:tera       | 220 | 500 | one 16-bit product a matrix; a fifth of the time rounds, scales and adds; attention is the rest
P
}

say() { printf '%s\n' "$*" | tee -a "$REPORT"; }
title() { say ""; say "==== $1 (after $(($(date +%s) - T0)) s)"; }
wants() { case " $STEPS " in *" $1 "*) return 0 ;; esac; return 1; }
T0=$(date +%s)
: >"$REPORT" || exit 1

title "machine"
say "$(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader 2>&1 | head -2)"
say "$(git log -1 --format=%h 2>/dev/null) $(uname -m)"

if wants build; then
    title "build"
    make kvcomp >"$WORK/build" 2>&1 || { BAD=1; say "make kvcomp failed"; tail -5 "$WORK/build" | tee -a "$REPORT"; }
    grep -i "cpu alone" "$WORK/build" | tee -a "$REPORT"
fi

if wants tests; then
    title "CUDA tests on the device"
    make gpu-test SANITIZE=memcheck >"$WORK/tests" 2>&1 || { BAD=1; say "gpu-test FAILED"; }
    grep -E "FAILED|passed|tests.c:|ERROR SUMMARY|not installed" "$WORK/tests" | head -40 | tee -a "$REPORT"
fi

# One run of --bench: METHOD PROMPTS DEPTHS OPTIONS. Its JSON lines go to $WORK/lines.
bench() {
    timeout 200 "$KVCOMP" --bench --json -d "${DEVICE:-cuda}" --synthetic "$SHAPE" --method "$1" --bench-prompts "$2" --bench-depths "$3" -b 2048 -r 3 $4 >"$WORK/out" 2>"$WORK/err"
    code=$?
    [ $code = 0 ] || { BAD=1; say "$1: exit code $code: $(head -1 "$WORK/err")"; }
    tee -a "$WORK/lines" <"$WORK/out" >>"$REPORT"
}

if wants bench; then
    title "bench"
    last=${DEPTHS##*,}
    first=${PROMPTS%%,*}
    bench full "$PROMPTS" "$DEPTHS"
    bench pats "$first" "${SHORT:-8192}" "--pats-bmax 8"
    for method in lychee quest loopserve-d; do bench $method "$first" "$last"; done
fi

# ---- predicted beside measured
# A JSON line becomes lines "METHOD:TEST:N:KEY value"; ms, and tera: TFLOP/s of a prefill's products, which take GFLOP_A_TOKEN.
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
            print key "growth_ms", field("growth_ms")
            print key "read_gb_s", field("read_gb_s")
        }' "$WORK/lines"
}
if [ -s "$WORK/lines" ]; then
    title "predicted and measured"
    measured >"$WORK/measured"
    predictions | while IFS='|' read -r key least most why; do
        key=$(echo $key) least=$(echo $least) most=$(echo $most)
        value=$(awk -v k="$key" '$1 == k { print $2; exit }' "$WORK/measured")
        verdict=$(awk -v v="$value" -v a="$least" -v b="$most" 'BEGIN { print (v == "" ? "not measured" : v + 0 < a + 0 ? "MISSED, less" : v + 0 > b + 0 ? "MISSED, more" : "held") }')
        printf '%-24s predicted %6s .. %-6s measured %10s  %-12s  %s\n' "$key" "$least" "$most" "${value:--}" "$verdict" "$why"
    done | tee "$WORK/verdicts" >>"$REPORT"
    cat "$WORK/verdicts"
    grep -q MISSED "$WORK/verdicts" && BAD=1
fi

if wants ncu; then
    title "single kernels"
    NCU=$(command -v ncu || ls /usr/local/cuda/bin/ncu 2>/dev/null)
    if [ -z "$NCU" ]; then
        say "ncu is not installed: left out"
    else
        for method in full pats lychee quest; do
            timeout 120 "$NCU" --launch-skip 400 --launch-count 24 --graph-profiling node --print-summary per-kernel \
                --metrics gpu__time_duration.avg,dram__bytes.sum,sm__inst_issued.avg.pct_of_peak_sustained_active \
                "$KVCOMP" --bench -d cuda --synthetic "$SHAPE" --method $method --bench-prompts 64 --bench-depths 8192 -r 1 >"$WORK/ncu" 2>&1 || say "ncu: $method: exit code $?"
            say "-- $method behind 8,192 rows"
            grep -E "^ +[a-z_]+kernel|gpu__time|dram__bytes|inst_issued|rror" "$WORK/ncu" | tee -a "$REPORT"
        done
    fi
fi

title "end"
[ $BAD = 0 ] && say "every test passed and every prediction held" || say "something failed or a prediction missed: see above"
exit $BAD
