#!/usr/bin/env bash
# Does a build still compute what another commit computes, bit for bit?
#
#   test/reference.sh record [COMMIT]            builds a commit (HEAD) and records what it does on the CPU
#   test/reference.sh record device [COMMIT]     the same on the emulated device (slow)
#   test/reference.sh compare [PROGRAM [DEVICE_PROGRAM]]
#                                                plays the same cases with PROGRAM (default ./kvcomp), and
#                                                with DEVICE_PROGRAM, if it is given, those of the device
#
# Cases are played with the options of today, so COMMIT is one that has them; records that were made of an older one
# can be compared with as well.
#
# A case is a method in a setting (a model, its rows and weights, the turns that are played). Of a case
# these things are kept and compared:
#   exit      the exit code
#   logits    --dump-logits: a row of float32 for every id that was decoded, and one a prefill
#   trace     --trace: what every pass computes and what the method decides, tensor by tensor. The
#             metadata is left out: it holds options and paths.
#   totals    the fields of --json and --batch, replies among them, without times, paths and options.
#             A field that only the newer program has is no difference.
#
# `compare` prints a line a difference, and at its end "N compared, N differ". Exit code 0: none differs;
# 1: some differ; 2: it could not be done. What a case that differs made stays beside the records, under
# now/, until the next comparison.
#
# Everything lies in the folder $KVCOMP_REFERENCE (default build/reference, which git ignores): source/ is
# a worktree of the commit, input/ the ids, texts and head scores that both programs read, records/ what was
# recorded. Records hold for one kind of processor: another one has other vector sets, which sum in
# another order. A file `expected` there names differences that are meant: lines of a pattern of the shell
# over CASE/THING, and why, as "cpu/*/h2o/* h2o evicts in every decode step". THING is one of those above,
# and of totals one field: totals.1.kv_bytes_peak. DEVICE_PROGRAM is made by `make kvcomp_emulated`.

set -u
export LC_ALL=C
unset KVCOMP_SIMD OMP_NUM_THREADS

TOP=$(cd "$(dirname "$0")/.." && pwd)
PLACE=${KVCOMP_REFERENCE:-$TOP/build/reference}
case $PLACE in /*) ;; *) PLACE=$PWD/$PLACE ;; esac
SOURCE=$PLACE/source
INPUT=$PLACE/input
RECORDS=$PLACE/records
NOW=$PLACE/now

fail() {
    echo "reference.sh: $*" >&2
    exit 2
}

# ---- the cases

# What is played, beside every method of --list-methods.
COMBINATIONS='
lychee+pats
lychee+q8
loopserve+pats
loopserve-p+lychee
loopserve-p+snapkv+pats
loopserve-d+q8
minference+loopserve-d
a-shape+lychee+pats
sonic+pats
dililazy+pats
headkv+q8
snapkv+q8
quest+q8
streaming+pats
'

# The settings. Models: tiny is the shipped one; L..,H..,G..,D.. are random weights of that shape, with H/G
# query heads a KV head; window is a checkpoint whose heads see the last 24 tokens. Turns are files of
# input/: text (1,400 tokens of English and of a table), long (as many random ids), short (130 ids). Turns
# "chat" are replies of the shipped model to a long prompt and in dialogues. "best" is the vector set that
# the program chooses. Methods whose name the expression "without" finds are refused there: PATS cuts f16
# alone, and q8 and q4 bring rows of their own.
SETTINGS='
place   name        model                           turns  vectors  without  options
cpu     chat        tiny                            chat   best     none
cpu     text        tiny                            text   best     none
cpu     text-f32    tiny                            text   best     pats|q[48] -ctk f32 -ctv f32
cpu     grouped     L3,H8,G2,D64,C128,F192,V512     long   best     none
cpu     blocks      L3,H8,G2,D64,C128,F192,V512     long   best     none     -b 100 -t 2
cpu     bf16        L3,H8,G2,D64,C128,F192,V512     long   best     pats|q[48] -ctk bf16 -ctv bf16
cpu     q8_0        L3,H8,G2,D64,C128,F192,V512     long   best     pats|q[48] -ctk q8_0 -ctv q8_0
cpu     weights     L3,H8,G2,D64,C128,F192,V512     long   best     none     --weights q8_0
cpu     uneven      L3,H10,G2,D80,C80,F112,V300     long   best     none
cpu     short       L3,H4,G4,D24,C48,F80,V256       short  best     none
cpu     window      window                          short  best     none
cpu     avx2        L3,H8,G2,D64,C128,F192,V512     long   avx2     none
cpu     plain       L3,H8,G2,D64,C128,F192,V512     short  plain    none
device  small       L3,H6,G3,D16,C32,F48,V256       short  best     none
device  grouped     L2,H8,G2,D64,C64,F64,V256       short  best     none
device  q8_0        L2,H4,G2,D32,C32,F48,V256       short  best     pats|q[48] -ctk q8_0 -ctv q8_0
device  bf16        L2,H3,G1,D40,C64,F64,V256       short  best     pats|q[48] -ctk bf16 -ctv bf16
'

# The options of a method, of whatever combination it is a part. They are added to those of the setting.
# A part of "short" lines gets these, too, where turns are short: its own numbers are made for thousands
# of tokens.
PARTS='
part                turns  options
streaming           all    --budget 48
window              all    --budget 48
tova                all    --budget 48
snapkv              all    --budget 48
adakv               all    --budget 48
pyramidkv           all    --budget 60
h2o                 all    --budget 48
expected-attention  all    --budget 48
a-shape             all    --shape-init 8 --shape-local 40
tri-shape           all    --shape-init 8 --shape-local 40 --shape-last 12
minference          all    --minference-verticals 30 --minference-slashes 60
quest               all    --budget 48
loopserve           all    --budget 48
loopserve-d         all    --budget 48
lychee              all    --budget 64
dililazy            all    --budget 48
headkv              all    --budget 48
snapkv              short  --obs-window 8
adakv               short  --obs-window 8
pyramidkv           short  --obs-window 8
dililazy            short  --obs-window 8
quest               short  --full-layers 1
loopserve           short  --loopserve-min-context 0 --loopserve-samples 8 --loopserve-local 4
loopserve           short  --loopserve-alpha .7 --loopserve-first 2 --loopserve-interval 2
loopserve-p         short  --loopserve-min-context 0 --loopserve-samples 8 --loopserve-local 4
loopserve-p         short  --loopserve-alpha .7
loopserve-d         short  --loopserve-first 2 --loopserve-interval 2
pats                short  --pats-window 8 --sink 4
lychee              short  --lychee-buffer 8 --sink 4 --full-layers 1
lychee              short  --lychee-chunk-min 4 --lychee-chunk-max 6
sonic               short  --sonic-k 4
'

# rows TABLE: its lines without the head line and empty ones.
rows() { printf '%s\n' "$1" | sed '/^$/d' | tail -n +2; }

# methods: every method of the reference, and the combinations, one a line.
methods() {
    "$SOURCE/kvcomp" --list-methods | cut -d ' ' -f 1
    printf '%s\n' "$COMBINATIONS" | sed '/^$/d'
}

# options_of METHOD MODEL TURNS: the options that the parts of METHOD want. Random models have no head
# scores and no adapter of their own.
options_of() {
    local part kind options parts
    IFS=+ read -ra parts <<<"$1"
    for part in "${parts[@]}"; do
        rows "$PARTS" | while read -r name kind options; do
            [ "$name" = "$part" ] || continue
            [ "$kind" = all ] || [ "$kind" = "$3" ] || continue
            printf '%s ' "$options"
        done
        [ "$2" = tiny ] && continue
        case $part in
        sonic) printf -- '--sonic-weights=none ' ;;
        dililazy | headkv) printf -- '--head-scores %s ' "$INPUT/scores-$2.json" ;;
        esac
    done
}

# cases PLACE: a line a case: its name, vectors, turns, and all its options.
cases() {
    local place name model turns vectors without options method where
    rows "$SETTINGS" | while read -r place name model turns vectors without options; do
        [ "$place" = "$1" ] || continue
        case $model in
        tiny) where="-m $SOURCE/models/kvcomp-tiny" ;;
        window) where="-m $SOURCE/data/golden/mistral-window" ;;
        *) where="--synthetic $model" ;;
        esac
        [ "$place" = device ] && where="-d cuda $where" || where="-d cpu $where"
        case $options in *"-t "*) ;; *) where="$where -t 1" ;; esac
        methods | while read -r method; do
            [[ $method =~ $without ]] && continue
            echo "$place/$name/$method $vectors $turns $where $options --method $method" \
                "$(options_of "$method" "$model" "$turns")"
        done
    done
}

# ---- what both programs read

# random_ids SEED VOCABULARY TURN..: ids of a linear congruential generator. A TURN is PREFILL:DECODE.
random_ids() {
    local seed=$1 vocabulary=$2
    shift 2
    printf '%s\n' "$@" | awk -F : -v x="$seed" -v v="$vocabulary" '
        function id() {
            x = (x * 69069 + 12345) % 4294967296
            return int(x / 65536) % v
        }
        {
            for (i = 0; i < $1; i++) printf "%d ", id()
            printf "|"
            for (i = 0; i < $2; i++) printf " %d", id()
            print ""
        }'
}

# text_ids FILE FROM COUNT: the ids of COUNT bytes of FILE from the byte FROM on, on one line.
text_ids() {
    tail -c "+$2" "$1" | head -c "$3" >"$INPUT/part.txt"
    "$SOURCE/kvcomp" -q -m "$SOURCE/models/kvcomp-tiny" --dump-tokens -f "$INPUT/part.txt"
}

# scores LAYERS HEADS: head scores as --calibrate writes them, two numbers a head.
scores() {
    awk -v layers="$1" -v heads="$2" 'BEGIN {
        printf "{"
        for (l = 0; l < layers; l++)
            for (h = 0; h < heads; h++)
                printf "%s\"%d-%d\": [%.2f, %.2f]", l + h ? ", " : "", l, h, (l * 7 + h * 5) % 11 / 10,
                       (l * 3 + h * 4) % 7 / 10
        print "}"
    }'
}

write_input() {
    local hay=$SOURCE/data/calibrate_hay.txt readme=$SOURCE/README.md model
    rm -rf "$INPUT"
    mkdir -p "$INPUT"
    random_ids 1 250 1100:40 290:20 5:4 >"$INPUT/long.ids"
    random_ids 2 150 73:8 51:6 1:3 >"$INPUT/short.ids"
    {
        echo "$(text_ids "$hay" 1 4800) | $(text_ids "$hay" 6000 150)"
        echo "$(text_ids "$readme" 1 900) | $(text_ids "$readme" 1200 60)"
        echo "$(text_ids "$hay" 9000 60) | $(text_ids "$hay" 9100 30)"
    } >"$INPUT/text.ids"

    # The head scores of every model that has none. The window's has two layers of four heads.
    rows "$SETTINGS" | while read -r _ _ model _; do
        case $model in
        L*) scores $(printf '%s' "$model" | sed 's/^L\([0-9]*\),H\([0-9]*\),.*/\1 \2/') ;;
        window) scores 2 4 ;;
        *) continue ;;
        esac >"$INPUT/scores-$model.json"
    done

    {
        echo 'My dog is named Rex and my cat is called Mia.'
        head -c 4800 "$hay"
        echo ' What is my dog called?'
    } >"$INPUT/prompt.txt"
    cat >"$INPUT/requests.jsonl" <<'END'
{"max_tokens": 40, "prompt": "Tell me a story about a fox who lives by the sea and looks for an old map."}
{"max_tokens": 24, "messages": [{"role": "system", "content": "You are a friendly helper. You answer in one sentence."}, {"role": "user", "content": "My dog is named Rex. He is brown, he likes the garden, and he sleeps under the old table near the window."}, {"role": "assistant", "content": "Rex is a good name for a dog."}, {"role": "user", "content": "I live in Cologne, and my job is mechanic. The street is green and small, the market is near the river."}, {"role": "assistant", "content": "I will keep that in mind."}, {"role": "user", "content": "The sun shone on the path. People say that the bridge was once tall. Nobody knew why the park was so warm."}, {"role": "assistant", "content": "That sounds nice."}, {"role": "user", "content": "What is my dog called, and where do I live?"}]}
{"max_tokens": 24, "messages": [{"role": "user", "content": "call me lyl."}, {"role": "assistant", "content": "Hello lyl!"}, {"role": "user", "content": "{\"city\": \"Köln\", \"rows\": [1, 22, 333], \"open\": true}"}, {"role": "assistant", "content": "Understood."}, {"role": "user", "content": "do you remember my name?"}]}
END
    rm -f "$INPUT/part.txt"
}

# ---- playing a case

# fields: of the lines of JSON on stdin, every field as "LINE.NAME VALUE", without times, paths, options.
fields() {
    awk '
        BEGIN {
            n = split("pp_tok_s tg_tok_s ttft_ms seconds attend_s select_s commit_s index_s simd build model seed", a, " ")
            for (i = 1; i <= n; i++) drop[a[i]] = 1
        }
        {
            sub(/^\{/, ",")
            sub(/\}$/, "")
            n = split($0, field, /,"/)
            for (i = 2; i <= n; i++) {
                name = field[i]
                sub(/":.*/, "", name)
                if (name == "options") break
                if (!(name in drop)) print NR "." name, substr(field[i], length(name) + 3)
            }
        }'
}

# sum_trace FOLDER: leaves in FOLDER/trace a checksum of the safetensors file FOLDER/raw: of the tensors' names, shapes and
# places, and of their bytes. The head says its own length in its first 8 bytes.
sum_trace() {
    local head
    head=$(od -An -tu8 -N8 "$1/raw" | tr -d ' ')
    {
        tail -c +9 "$1/raw" | head -c "$head" | grep -ao '"[A-Za-z0-9._+-]*":{"dtype[^}]*}'
        tail -c "+$((head + 9))" "$1/raw"
    } | cksum >"$1/trace"
}

# play PROGRAM FOLDER VECTORS TURNS OPTION..: runs a case and leaves what it made in FOLDER.
play() {
    local program=$1 folder=$2 vectors=$3 turns=$4 code=0
    shift 4
    mkdir -p "$folder"
    [ "$vectors" = best ] || export KVCOMP_SIMD=$vectors
    if [ "$turns" = chat ]; then
        set -- "$@" --temp 0 -q
        "$program" "$@" -n 24 --json -p "$(cat "$INPUT/prompt.txt")" >"$folder/json" 2>"$folder/stderr" &&
            "$program" "$@" --batch "$INPUT/requests.jsonl" >>"$folder/json" 2>>"$folder/stderr" || code=$?
    else
        # One layer is enough of the long ones: what goes wrong in another reaches the logits. In the
        # third every method chooses (the first two of quest and lychee read everything).
        [ "$turns" = short ] || set -- "$@" --trace-layers 2
        "$program" "$@" -q --json --ids "$INPUT/$turns.ids" --dump-logits "$folder/logits" \
            --trace "$folder/raw" >"$folder/json" 2>"$folder/stderr" || code=$?
    fi
    unset KVCOMP_SIMD
    echo "$code" >"$folder/exit"
    [ -f "$folder/raw" ] && sum_trace "$folder"
    fields <"$folder/json" >"$folder/totals"
    rm -f "$folder/json"
}

# ---- recording

# build_reference COMMIT GOAL
build_reference() {
    if [ ! -d "$SOURCE" ]; then
        git -C "$TOP" worktree prune
        git -C "$TOP" worktree add --quiet --detach "$SOURCE" "$1" || fail "git has no commit $1 here"
    fi
    git -C "$SOURCE" checkout --quiet --detach "$(git -C "$TOP" rev-parse "$1")" &&
        make -C "$SOURCE" NVCC= kvcomp "$2" >&2 || fail "$1 does not build"
}

# vector_set: the name of the vectors that this processor has, as the program calls them.
vector_set() {
    "$SOURCE/kvcomp" -q --json --synthetic L1,H1,G1,D8,C32,F32,V256 --ids "$INPUT/short.ids" |
        sed 's/.*"simd":"\([^"]*\)".*/\1/'
}

# record PLACE PROGRAM
record() {
    local name rest count=0
    rm -rf "${RECORDS:?}/$1"
    cases "$1" >"$PLACE/cases"
    while read -r name rest; do
        # The options of a case are words without spaces.
        # shellcheck disable=SC2086
        play "$2" "$RECORDS/$name" $rest
        [ "$(cat "$RECORDS/$name/exit")" = 0 ] || fail "$name ends badly: $(cat "$RECORDS/$name/stderr")"
        rm -f "$RECORDS/$name/raw" "$RECORDS/$name/stderr"
        count=$((count + 1))
    done <"$PLACE/cases"
    vector_set >"$RECORDS/$1/vectors"
    echo "$count cases of the $1 recorded, $(du -sm "$RECORDS/$1" | cut -f 1) MB"
}

# ---- comparing

compared=0
differing=0
as_expected=0

# Patterns may have @(one|another).
shopt -s extglob

# differences OLD NEW OPTION..: of the case in these folders, a line "THING<tab>WORDS" for everything that is compared;
# the words say how it differs. The options say how the case is played: of a trace only the checksum is recorded, so
# where it differs the reference plays the case once more, and the first value that differs can be named.
differences() {
    local words
    if ! cmp -s "$1/exit" "$2/exit"; then
        printf 'exit\tcode %s: %s\n' "$(cat "$2/exit")" "$(head -n 1 "$2/stderr")"
        return
    fi
    printf 'exit\t\n'
    awk '
        { name = $1; value = substr($0, length(name) + 2) }
        FILENAME == ARGV[1] { new[name] = value; next }
        !(name in new) { print "totals." name "\tno such field, was " value; next }
        { print "totals." name "\t" (new[name] == value ? "" : new[name] ", was " value) }' "$2/totals" "$1/totals"
    [ -f "$1/logits" ] || return 0
    words=$(cmp -l "$1/logits" "$2/logits" 2>&1 |
        awk '{ print ($1 + 0 ? "first in number " int(($1 - 1) / 4) : $0); exit }')
    printf 'logits\t%s\n' "$words"
    words=
    if ! cmp -s "$1/trace" "$2/trace"; then
        play "$reference" "$2/reference" "${@:3}"
        words=$(python3 -B "$TOP/data/trace_diff.py" "$2/reference/raw" "$2/raw" 2>&1 | head -n 1)
        words=${words:-python3 could say where}
    fi
    printf 'trace\t%s\n' "$words"
}

# expected THING: why this one is meant to differ, if it is.
expected() {
    local pattern why
    while read -r pattern why; do
        # shellcheck disable=SC2254
        case $1 in $pattern) echo "$why"; return ;; esac
    done < <(grep -s . "$PLACE/expected")
}

# compare PLACE PROGRAM: with what the reference recorded.
compare() {
    local name rest thing words why differs reference=$SOURCE/kvcomp
    [ "$1" = cpu ] || reference=$SOURCE/kvcomp_emulated
    [ -f "$RECORDS/$1/vectors" ] || fail "nothing is recorded for the $1 in $RECORDS: say 'record' first"
    [ "$(cat "$RECORDS/$1/vectors")" = "$(vector_set)" ] ||
        fail "the records are of a processor with $(cat "$RECORDS/$1/vectors"), this one has $(vector_set): record again"
    cases "$1" >"$PLACE/cases"
    while read -r name rest; do
        [ -f "$RECORDS/$name/exit" ] || fail "$name is not recorded: say 'record' again"
        differs=
        # shellcheck disable=SC2086
        play "$2" "$NOW/$name" $rest
        # shellcheck disable=SC2086
        while IFS='	' read -r thing words; do
            compared=$((compared + 1))
            [ -n "$words" ] || continue
            differs=1
            why=$(expected "$name/$thing")
            if [ -n "$why" ]; then
                as_expected=$((as_expected + 1))
                echo "$name/$thing differs as expected: $why"
            else
                differing=$((differing + 1))
                echo "$name/$thing differs: $words"
            fi
        done < <(differences "$RECORDS/$name" "$NOW/$name" $rest)
        [ -n "$differs" ] || rm -rf "${NOW:?}/$name"
    done <"$PLACE/cases"
}

# ---- the commands

case ${1-} in
record)
    mkdir -p "$PLACE"
    where=cpu program=kvcomp
    if [ "${2-}" = device ]; then
        where=device program=kvcomp_emulated
        shift
    fi
    build_reference "${2-HEAD}" $program
    write_input
    record $where "$SOURCE/$program"
    ;;
compare)
    [ -x "$SOURCE/kvcomp" ] || fail "nothing is recorded in $PLACE: say 'record' first"
    for program in "${2-./kvcomp}" "${@:3}"; do
        case $program in */*) [ -x "$program" ] ;; *) false ;; esac || fail "$program is no path of a program"
    done
    rm -rf "$NOW"
    compare cpu "${2-./kvcomp}"
    [ $# -lt 3 ] || compare device "$3"
    [ $as_expected -eq 0 ] || echo "$as_expected differ as expected"
    echo "$compared compared, $differing differ"
    [ $differing -eq 0 ]
    ;;
*) fail "expected 'record [device] [COMMIT]' or 'compare [PROGRAM [DEVICE_PROGRAM]]'" ;;
esac
