#!/bin/sh
# Every method on a real model: SmolLM2-135M-Instruct reads passages of a book of 1,000, 2,000 and 4,000
# tokens, and every method keeps (or reads) 12.5, 25 and 50 % of so many rows; the sparse prefills read 25 %. A
# table a length: found, KL and top-1 agreement with full attention, nll (perplexity is its exponential), bytes
# held, read and at the peak, seconds; and a second one: the fastest item's times, in shares of the first row's.
#
# Usage: sh data/compare_real.sh [LENGTH[:BUDGET,..]]...     (default: 1k, 2k and 4k, three budgets each)
#
# Answers go to build/real as they come, so that the same command goes on where it stopped; what is
# there already becomes a table by ./kvcomp --eval-merge build/real/1k-128-256-512-?of2.jsonl
# JOBS=1 takes one core instead of two (the files' names hold the number, so finish with what you began).
# METHODS names others, ITEMS another number of items of each task than 6 (2k: 3, 4k: 2). An item costs a row of
# the table about 4, 9 and 22 seconds of a core of an Intel Xeon with AMX at 1k, 2k and 4k: 53 rows of the three
# lengths are four and a half core hours. Threads change no number but the seconds.
set -e
cd "$(dirname "$0")/.."
M=models/smollm2-135m
JOBS=${JOBS:-2}
METHODS=${METHODS:-full,streaming,window,tova,h2o,snapkv,adakv,pyramidkv,expected-attention,knorm,keydiff,dililazy,\
headkv,quest,lychee,loopserve,minference,tri-shape,a-shape,pats,q8,q4,sonic}
OUT=build/real

[ -f $M/model.safetensors ] || { echo "compare_real.sh: $M/model.safetensors is missing; make smollm2 fetches it" >&2; exit 1; }
mkdir -p $OUT

# fastest FILE..: of every row the least time a token of a prefill, and the largest rate of decode, among its items.
# Sums of seconds scatter by a quarter where a machine is shared; these do by a tenth.
fastest() {
    awk 'function field(name) {
        match($0, "\"" name "\":[^,}]*")
        return substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3)
    }
    {
        row = field("row") + 0
        name[row] = "| " field("method") " | " field("budget")
        gsub("\"", "", name[row])
        a_token = field("prefill_s") / field("n_prefill")
        rate = field("n_decode") / field("decode_s")
        if (!(row in least) || a_token < least[row]) least[row] = a_token
        if (rate > most[row]) most[row] = rate
        if (row > rows) rows = row
    }
    END {
        print "| method | budget | prefill, seconds a token | decode, tokens a second |\n|---|---:|---:|---:|"
        for (row = 1; row <= rows; row++)
            printf "%s | %.2f | %.2f |\n", name[row], least[row] / least[1], most[row] / most[1]
    }' "$@"
}

# Some items of needle, facts and turns, in turn, so that a part of a run has all three. Of the 12 needles and
# facts every second one is taken, from the earliest depth on (1k: all depths); of turns one of each text, whose
# question stands before, amid, behind it, before it, and so on. A digit of the task's own goes before a text's
# number: texts of two tasks are two.
items() {
    own=0
    case $1 in 1k) many=6 ;; 2k) many=3 ;; *) many=2 ;; esac
    for task in needle facts turns; do
        own=$((own + 1))
        awk -v turns=$((own == 3)) -v own=$own -v n="${ITEMS:-$many}" '{
            taken = turns ? (NR - 1) % 3 == int((NR - 1) / 3) % 3 : NR % 2
        }
        taken && k < n {
            k++
            sub(/"text": /, "&" own)
            printf "%03d\t%s\n", k, $0
        }' data/tasks/book-$task-"$1".jsonl
    done | sort -s -k 1,1 | cut -f 2-
}

# play LENGTH BUDGETS: the answers of one table, by $JOBS processes, then the table.
play() {
    items "$1" >$OUT/items-"$1".jsonl
    case $1 in 1k) quarter=256 ;; 2k) quarter=512 ;; *) quarter=1024 ;; esac
    files=
    pids=
    for job in $(seq "$JOBS"); do
        f=$OUT/$1-$(echo "$2" | tr , -)-${job}of$JOBS.jsonl
        ./kvcomp -q -m $M -c 8192 -n 32 -t 1 --eval $OUT/items-"$1".jsonl --compare "$METHODS" --budgets "$2" \
            --obs-window 32 --lychee-buffer 32 --sonic-weights none --shape-init 16 --shape-local $((quarter - 16)) \
            --shape-last 32 --minference-verticals $((quarter / 4)) --minference-slashes $((quarter * 3 / 4)) \
            --eval-shard "$job/$JOBS" --eval-out "$f" >/dev/null &
        pids="$pids $!"
        files="$files $f"
    done
    for pid in $pids; do wait "$pid" || exit 1; done
    echo "$1 tokens, $2 rows"
    ./kvcomp --eval-merge $files
    fastest $files
}

[ $# -gt 0 ] || set -- 1k 2k 4k
for what; do
    case $what in
        *:*) play "${what%:*}" "${what#*:}" ;;
        1k)  play 1k 128,256,512 ;;
        2k)  play 2k 256,512,1024 ;;
        4k)  play 4k 512,1024,2048 ;;
        *)   echo "compare_real.sh: wants 1k, 2k, 4k or one with :BUDGET, found '$what'" >&2; exit 2 ;;
    esac
done
