# Reads `cuobjdump -sass FILE | c++filt` and prints for every kernel with tensor-core products its main loop: of the loops with
# the most products the shortest, how many instructions it has and how many bytes a warp's loads ask for in it. Counted are
# cp.async and load_once (kvcomp.cu, "what only PTX can say"); what a loop reads in passing, such as a list of rows, is not.
#   LDG.E.NA.128    16 bytes a lane, not kept in L1;    LDGSTS.E.BYPASS.128    cp.async

function bytes(word) {
    if (word !~ /^LDGSTS/ && word !~ /^LDG.*\.NA/) return 0
    if (word ~ /\.128/) return 32 * 16
    return word ~ /\.64/ ? 32 * 8 : 32 * 4
}

# One kernel is complete: looks through its branches back.
function finish(    i, n, p, best_n, best_p, best_bytes, first) {
    for (i = 1; i <= n_branch; i++) {
        first = at[target[i]]
        if (!first || first > from[i]) continue
        n = from[i] - first + 1
        p = products[from[i]] - products[first - 1]
        if (!p || p < best_p || (p == best_p && n >= best_n)) continue
        best_n = n
        best_p = p
        best_bytes = loaded[from[i]] - loaded[first - 1]
    }
    if (best_p)
        printf "%-6s %-32s %4d instructions, %5d bytes, %3d products\n", arch, kernel, best_n, best_bytes, best_p
    n_word = n_branch = 0
    split("", at)
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
    if (word !~ /^BRA/ || !match($0, /0x[0-9a-f]+ ;/)) next
    from[++n_branch] = n_word
    target[n_branch] = substr($0, RSTART + 2, RLENGTH - 4)
}
END { finish() }
