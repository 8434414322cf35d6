#!/bin/sh
# test/mutants.sh [WHICH..] - plants the faults of test/mutations.txt one by one in a copy of the program and says
# which of them the tests see. WHICH is a number, a range 10-20, or a word of a fault's file or description; nothing:
# all. `make mutants WHICH=..` calls it.
#
# A fault is killed when a test fails, crashes or does not end within MUTANT_SECONDS. It survives when the tests that
# its line names pass; with MUTANT_ALL=1 they are then all run. A fault with a line "! why" is known to survive.
# The exit code is 1 when another one survives, or when a fault's text is not found exactly once.
# The copy is build/mutants; it stays, so that only what a fault changes is compiled again. -O1 without a GPU half,
# but for faults of kvcomp.cu and lib/cuda*.h, which take a minute of compiling each.
cd "$(dirname "$0")/.." || exit 1
list=test/mutations.txt
copy=build/mutants
seconds=${MUTANT_SECONDS:-120}
mkdir -p "$copy"
git ls-files -coz --exclude-standard | xargs -0 cp -p -u --parents -t "$copy" 2>/dev/null
log=$copy/mutant.log

# A run that was broken off has left its fault behind.
for f in $(sed -n 's/^@ \([^ ]*\).*/\1/p' $list | sort -u); do
	cmp -s "$f" "$copy/$f" || cp "$f" "$copy/$f"
done

# field N KIND: of fault N its line "@", "-", "+" or "!", without the sign
field() {
	awk -v n="$1" -v kind="$2" '/^@/ { at++ } at == n && substr($0, 1, 1) == kind { print substr($0, 3); exit }' $list
}

# wanted N: is fault N among those asked for?
wanted() {
	[ -z "$asked" ] && return 0
	for w in $asked; do
		case $w in
		*[!0-9-]*) case "$(field "$1" @)" in *"$w"*) return 0 ;; esac ;;
		*-*) [ "$1" -ge "${w%-*}" ] && [ "$1" -le "${w#*-}" ] && return 0 ;;
		*) [ "$1" = "$w" ] && return 0 ;;
		esac
	done
	return 1
}

# plant FILE OLD NEW: replaces OLD, which must stand exactly once, in the copy's FILE
plant() {
	OLD=$2 NEW=$3 awk 'BEGIN { old = ENVIRON["OLD"]; new = ENVIRON["NEW"] }
		{
			at = index($0, old)
			if (at) {
				found++
				rest = substr($0, at + length(old))
				if (index(rest, old)) found++
				$0 = substr($0, 1, at - 1) new rest
			}
			print
		}
		END { exit found != 1 }' "$1" >"$copy/$1"
}

# built PROGRAM FILE: makes the program of the copy
built() {
	case $2 in
	*.cu | lib/cuda*.h) without= ;;
	*) without='CXX_OK=' ;;
	esac
	with=$1
	[ "$1" = tests_app ] && with="$1 kvcomp"
	make -s -C "$copy" NVCC= $without WARN='-std=c11 -w' CFLAGS=-O1 \
	  TEST_FLAGS='-O1 -DKVCOMP_NO_MAIN' $with >"$log" 2>&1
}

# sees PROGRAM WORDS: do the tests fail? Says how in $how.
sees() {
	(cd "$copy" && KVCOMP_TEST_STOP=1 OMP_NUM_THREADS=1 timeout "$seconds" "./$1" $2) >"$log" 2>&1
	code=$?
	how=$(sed -n 's/^FAILED \([^ ]*\).*/\1/p' "$log" | head -1)
	case $code in
	0) return 1 ;;
	124) how="no end after $seconds s" ;;
	5) grep -q '^0 passed, 0 failed' "$log" && { how="no test of that name"; return 1; } ;;
	*) how="exit code $code" ;;
	esac
	return 0
}

asked=$*
all=$(grep -c '^@' $list)
killed=0 survived=0 known=0 lost=0 names=
n=0
while [ $n -lt "$all" ]; do
	n=$((n + 1))
	wanted $n || continue
	line=$(field $n @)
	set -f
	set -- $line
	set +f
	file=$1 program=$2 words=$(echo "$3" | tr , ' ')
	what=$(echo "$line" | sed 's/^[^ ]* *[^ ]* *[^ ]* *//')
	[ "$words" = - ] && words=
	how=
	if ! plant "$file" "$(field $n -)" "$(field $n +)"; then
		lost=$((lost + 1))
		printf '%2d  LOST      %-16s %s (its text does not stand there exactly once)\n' $n "$file" "$what"
	elif ! built "$program" "$file"; then
		lost=$((lost + 1))
		printf '%2d  BROKEN    %-16s %s\n' $n "$file" "$what"
		sed -n 's/^/    /;/error/p' "$log" | head -3
	elif sees "$program" "$words" || { [ -n "$MUTANT_ALL" ] && sees "$program" ""; }; then
		killed=$((killed + 1))
		printf '%2d  killed    %-16s %s (%s)\n' $n "$file" "$what" "$how"
	elif [ -n "$(field $n !)" ]; then
		known=$((known + 1))
		printf '%2d  known     %-16s %s: %s\n' $n "$file" "$what" "$(field $n !)"
	else
		survived=$((survived + 1))
		names="$names $n"
		printf '%2d  SURVIVED  %-16s %s%s\n' $n "$file" "$what" "${how:+ ($how)}"
	fi
	cp "$file" "$copy/$file"
done
echo "$killed killed, $survived survived${names:+:$names}, $known known to survive, $lost lost"
[ $survived = 0 ] && [ $lost = 0 ]
