# Reads `cuobjdump -sass FILE | c++filt` and prints for every kernel with tensor-core products its main loop: of the loops with
# the most products the shortest. For it: how many instructions it has; how many a turn takes that makes all products, asks for
# the next tile and needs nothing else, such as a mask (of a switch over widths: the shortest case); how many bytes a warp's loads
# ask for.
# Counted are cp.async and load_once (kvcomp.cu, "what only PTX can say"); what a loop reads in passing, such as a list of rows,
# is not.
#   LDG.E.NA.128    16 bytes a lane, not kept in L1;    LDGSTS.E.BYPASS.128    cp.async
# Ends with 1 if a loop of sm_90 takes more than limit() allows.

function bytes(word) {
    if (word !~ /^LDGSTS/ && word !~ /^LDG.*\.NA/) return 0
    if (word ~ /\.128/) return 32 * 16
    return word ~ /\.64/ ? 32 * 8 : 32 * 4
}

# The most instructions of a turn, and in `why` what they are. b: bytes, p: products. A little more than nvcc 13.0 takes, and less
# than what is asked for: 4 others a product, 300 for 8 KB of plain rows, 845 for 16 rows of q8_0 (6.6 of a lane for an element of K
# or V). Narrow heads have fewer products for the same softmax.
function limit(kernel, b, p,    part) {
    split(kernel, part, /[<>, ]+/)              # name and template arguments
    why = ""
    if (part[1] == "tensor_kernel") {           # <dtype, head_dim, along lines>
        why = others[part[3], part[4]] " other instructions a product" (part[4] ? " along lines" : "")
        return p * (1 + why)
    }
    if (part[1] == "gqa_kernel" && part[2] <= 2) {               # <rows, head_dim, groups of 8 query rows>
        why = "300 instructions for 8 KB of K and V"
        if (part[3] == 64) why = "350 instructions for 8 KB of K and V at head_dim 64"
        return b / 8192 * why
    }
    if (part[1] == "gqa_kernel" && part[2] == 3 && part[3] == 128) {
        why = part[4] == 1 ? "700 instructions for 16 rows of q8_0" : "815 instructions for 16 rows of q8_0"
        return why + 0
    }
    return 0
}
BEGIN {
    others[64, 0] = 3.9
    others[96, 0] = 3.1
    others[128, 0] = 2.6
    others[160, 0] = 3.3
    others[256, 0] = 3.6
    others[64, 1] = 4
    others[96, 1] = 3.4
    others[128, 1] = 3.5
    others[160, 1] = 3.4
    others[256, 1] = 3.8
}

# Turns through instructions first..last that make most products, loads and shuffles: the least instructions of one. A turn enters at the
# top; a branch forward may be taken or not, and one back is not. A switch goes to whatever stands behind a jump. All of them,
# where the compiler has put a part of the turn elsewhere.
function shortest(first, last,    i, j, n, p) {
    split("", most)
    split("", least)
    most[first] = least[first] = 0
    for (i = first; i <= last; i++) {
        if (!(i in most)) continue
        p = most[i] + products[i] - products[i - 1] + worth[i]
        n = least[i] + 1
        if (!always[i]) arrive(i + 1, p, n)
        j = at[jump[i]]
        if (j > i && j <= last) arrive(j, p, n)
        for (j = i + 2; switches[i] && j <= last; j++)
            if (always[j - 1]) arrive(j, p, n)
    }
    return last + 1 in least ? least[last + 1] : last - first + 1
}

function arrive(i, p, n) {
    if (i in most && (most[i] > p || (most[i] == p && least[i] <= n))) return
    most[i] = p
    least[i] = n
}

# One kernel is complete: looks through its branches back.
function finish(    i, n, p, best_n, best_p, best_bytes, best, first, turn, allowed) {
    for (i = 1; i <= n_branch; i++) {
        first = at[target[i]]
        if (!first || first > from[i]) continue
        n = from[i] - first + 1
        p = products[from[i]] - products[first - 1]
        if (!p || p < best_p || (p == best_p && n >= best_n)) continue
        best_n = n
        best_p = p
        best_bytes = loaded[from[i]] - loaded[first - 1]
        best = i
    }
    if (best_p) {
        turn = shortest(at[target[best]], from[best])
        printf "%-6s %-32s %4d instructions, %4d of a turn, %5d bytes, %3d products\n", arch, kernel, best_n, turn, best_bytes, best_p
        allowed = limit(kernel, best_bytes, best_p)
        if (allowed && turn > allowed && arch == "sm_90") {
            printf "%s: a turn takes more than %s\n", kernel, why
            failed = 1
        }
    }
    n_word = n_branch = 0
    split("", at)
    split("", jump)
    split("", always)
    split("", switches)
    split("", worth)
}

$1 == "arch" { finish(); arch = $3 }
$1 == "Function" {
    finish()
    kernel = $0
    sub(/.*Function : (void )?/, "", kernel)
    sub(/\(.*/, "", kernel)
}

# An instruction:  /*01d0*/   @!P0 HMMA.16816.F32 R8, R12, R2, R8 ;   /* 0x.. */
$1 ~ /^\/\*[0-9a-f]+\*\/$/ {
    address = substr($1, 3, length($1) - 4)
    sub(/^0+/, "", address)
    word = $2 ~ /^@/ ? $3 : $2
    at[address] = ++n_word
    products[n_word] = products[n_word - 1] + (word ~ /^HMMA/)
    loaded[n_word] = loaded[n_word - 1] + bytes(word)
    worth[n_word] = bytes(word) > 0 || word ~ /^SHFL/
    switches[n_word] = word ~ /^BRX/
    if (word !~ /^BRA/ || !match($0, /0x[0-9a-f]+ ;/)) next
    from[++n_branch] = n_word
    target[n_branch] = jump[n_word] = substr($0, RSTART + 2, RLENGTH - 4)
    always[n_word] = $2 == "BRA" && $3 ~ /^0x/
}
END {
    finish()
    exit failed
}
