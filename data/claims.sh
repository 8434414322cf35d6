#!/bin/sh
# What the papers claim, looked at on the shipped model: prints the numbers behind the claims table of NOTES.md.
#   sh data/claims.sh [loopserve|pats|lychee|sonic|dililazy]...
# Needs ./kvcomp. One thread, greedy, seeded: the scores are the same on every machine.
set -e
cd "$(dirname "$0")/.."
K="./kvcomp -q -t 1 --temp 0"
run() { echo; echo "\$ $*"; "$@"; }
TEXT=data/calibrate_hay.txt

loopserve() {   # Table 1: who holds when the query comes first; Fig. 5 c: alpha; Fig. 5 b: ablation
    run $K --eval needle,multiturn,summary --eval-items 10 --eval-length 512 --budgets 128 --loopserve-min-context 0 \
        --compare full,snapkv,adakv,streaming,a-shape,tri-shape,minference,loopserve,loopserve-p,loopserve-d
    for a in 0.9 0.955 0.98 0.99 1; do
        run $K --eval kld --eval-file $TEXT --eval-window 1024 --eval-windows 3 --loopserve-min-context 0 --loopserve-alpha $a --method loopserve-p
    done
}
pats() {        # Table 2: memory and perplexity by schedule; Tables 3 and 4: accuracy
    run $K --eval ppl --eval-file $TEXT --eval-window 1024 --eval-windows 4 --method full
    for s in old new middle; do for b in 8 10; do
        run $K --eval ppl --eval-file $TEXT --eval-window 1024 --eval-windows 4 --method pats --pats-window 0 --pats-sink 0 --pats-schedule $s --pats-bmax $b
    done; done
    run $K --eval needle,facts,json --eval-items 10 --compare full,pats
    run $K --eval needle,facts,json --eval-items 10 --compare pats --pats-bmax 10
}
lychee() {      # Fig. 6: chunks that follow the text against 16 tokens; Fig. 7: budget; Tables 1, 6: needles; Figs. 9, 10, Table 3: retrieval
    set -- --eval needle,json --eval-items 10 --eval-length 1024 --lychee-full-layers 1 --lychee-buffer 32
    run $K "$@" --budgets 64,128,256,512 --compare full,quest,lychee
    run $K "$@" --budgets 64,128,256,512 --compare lychee --lychee-chunk-min 16 --lychee-chunk-max 16
    head -c 14000 $TEXT >/tmp/kvcomp-claims.txt
    for n in "chunks-per-cluster 1" "chunks-per-cluster 2" "chunks-per-cluster 4" "chunks-per-cluster 8" "beta 0.25" "beta 1" "gqa sum" "gqa head" "chunk-min 16" "pool max"; do
        run $K --raw -f /tmp/kvcomp-claims.txt -n 48 --ignore-eos --method lychee --budget 256 --lychee-full-layers 1 --lychee-buffer 64 \
            --lychee-$n --lychee-stats --stats 2>&1 | grep "^lychee"
    done
}
sonic() {       # Table 1: 80 % of the history gone; Fig. 4: K it was not trained for
    run $K --eval facts,coref --eval-items 16 --eval-length 300 --compare full,streaming,h2o,snapkv,expected-attention --ratio 0.8
    for r in 0.8 0.5; do run $K --eval facts,coref --eval-items 16 --eval-length 300 --compare sonic --sonic-ratio $r; done
    for k in 1 4 8 10 16 20 30 40 50 64; do run $K --eval facts,coref --eval-items 16 --eval-length 300 --compare sonic --sonic-k $k; done
}
dililazy() {    # Table 1: small budgets; Table 2: either score alone
    run $K --eval needle,facts,json,summary --eval-items 10 --budgets 64,128 --compare full,snapkv,pyramidkv,adakv,dililazy
    for s in dili lazy; do run $K --eval needle,facts,json,summary --eval-items 10 --budgets 64,128 --compare dililazy --dililazy-score $s; done
}
[ $# -gt 0 ] || set -- loopserve pats lychee sonic dililazy
for part in "$@"; do echo; echo "== $part"; $part; done
