# What `make cuda-check` prints: the main loop of every kernel, and what its blocks take. Three texts come one behind
# the other: kvcomp.cu, what `ptxas -v` says, and `cuobjdump -sass`; the last two through c++filt. Without the third the
# loop's columns are empty.
#
#   instr     instructions that a warp issues in a turn of the loop
#   bytes     what the warp's loads ask for in that turn, when every lane reads bytes of its own
#   mma       its tensor-core products
#   issue     which part of a multiprocessor's issue slots the loop takes while all multiprocessors together move 4.3 TB/s.
#             From 100 % on instructions are the bound, not memory. (A loop that uses a byte again and again, as
#             prefill_kernel does, is not there to move bytes: the products bound it)
#   KB ahead  what a multiprocessor has asked for and not yet used: the least and the most within a turn. 23 KB hide the
#             wait for memory (4.3 TB/s x 0.7 us / 132)
#   blocks    blocks on a multiprocessor, by their threads, registers and shared memory. 1+: the context decides on the
#             shared memory, and one block is counted. -: it decides on the threads
#   regs      registers of a thread
#   shared    shared memory of a block in KB, static and dynamic
#   spilled   bytes of registers that its instructions write to memory, and read back
#
# The main loop is, of those with the most tensor-core products, the shortest. The turn that is counted makes all
# products, asks for the next tile, and needs nothing else, such as a mask. Without products the main loop is the
# innermost one that asks for the most, and all its arithmetic counts. What a loop asks for are its load_once and
# cp.async (lib/cuda.h, "what only PTX can say"), else its loads of 16 bytes a lane, else all its loads. What it reads in
# passing beside such loads, such as a list of rows, or a vector that lies in a cache, is not counted. Where all loads
# count the deepest loop is taken, which is a guess, marked ?.
#   LDG.E.NA.128    16 bytes a lane, not kept in L1: load_once        LDGSTS.E.BYPASS.128    cp.async
# Ends with 1 if a kernel of sm_80 or sm_90 spills, or a loop of sm_90 takes more instructions than limit() allows, more
# issue slots than share_most(), or asks for less ahead than ahead_least().

# ---- the machine

# An H200 at its highest clock. At a lower one the shares of issue slots grow as it falls.
BEGIN {
    copy_rate = 4.3e12          # bytes a second of a copy, those read and those written
    clock = 1.98e9
    multiprocessors = 132
    schedulers = 4              # of a multiprocessor, an instruction of a warp a clock each
}

# Which part of the issue slots, in per cent, a turn of so many instructions takes that asks for so many bytes.
function issue_share(instructions, bytes) {
    return 100 * instructions * (copy_rate / multiprocessors / bytes) / (schedulers * clock)
}

# What a multiprocessor has: sm_80 is the A100, sm_90 the H100 and H200, sm_100 and sm_120 are Blackwell.
function room_threads(arch) { return arch == "sm_120" ? 1536 : 2048 }
function room_blocks(arch) { return arch == "sm_120" ? 24 : 32 }
function room_shared(arch) {
    if (arch == "sm_80") return 164 * 1024
    return arch == "sm_120" ? 100 * 1024 : 228 * 1024
}

function least(a, b) { return a < b ? a : b }

# ---- what a block takes

# Bytes of dynamic shared memory of a block, where the template arguments decide on them: the carve functions of
# kvcomp.cu. -1: the launch decides.
function dynamic_shared(kernel,    part, D, NT, slots, sums, KT, BQ, P) {
    split(kernel, part, /[<>, ]+/)              # name and template arguments
    if (!with_room[part[1]]) return 0
    if (part[1] == "gemv_kernel") return 4 * (4 * 4 * 33 + 2 * 4 * 5)
    if (part[1] == "qkv_kernel") return 4 * (4 * 4 * 33 + 2 * 4 * 5)
    if (part[1] == "decode_kernel") {              # <rows, head_dim, groups of 8 query rows>
        D = part[3]
        NT = part[4]
        row = 2 * D + 16
        slots = 2 * row * NT                       # K and V, of which a tile has 16 NT rows
        if (part[2] == 3) slots = 2 * (D + 16) + row            # 16 rows, and the same as f16 numbers
        if (part[2] == 4) slots = 2 * (D / 2 + 16) + row
        if (part[2] == 5) slots = 3 * row
        slots *= 4 * 16
        sums = 4 * 8 * NT * (D + 2) * 4
        return (slots > sums ? slots : sums) + NT * D * 32
    }
    if (part[1] == "window_kernel") return 2 * 64 * (2 * part[3] + 16)         # <dtype, head_dim, sums>
    if (part[1] == "prefill_kernel") {           # <dtype, head_dim, along lines>
        D = part[3]
        KT = D <= 128 ? 64 : 32
        BQ = D <= 128 && !part[4] ? 128 : 64
        P = 2 * (D + 8)
        return (BQ + 2 * KT) * P + BQ * (8 + KT / 8 + 4) + 512 * 4 + 2 * block_threads(kernel) / 32 * 4 + 20 * 4 + \
               (part[4] ? 2048 * 4 : 0)
    }
    return -1
}

# Threads of a block, 0 where the context decides on them. A block of prefill_kernel has two warps along lines of narrow
# heads and four elsewhere.
function block_threads(kernel,    part) {
    split(kernel, part, /[<>, ]+/)
    if (part[1] == "prefill_kernel") return part[4] && part[3] <= 64 ? 64 : 128
    return threads[part[1]]
}

# A launch of kvcomp.cu, from behind "KV_LAUNCH(": kernel, grid, threads, dynamic shared memory, ..
function read_launch(text,    i, c, depth, n, arg) {
    n = 1
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        depth += (c == "(") - (c == ")")
        if (c == "," && !depth) n++
        else arg[n] = arg[n] c
    }
    gsub(/[( )]|<.*/, "", arg[1])
    threads[arg[1]] = in_numbers(arg[3])
    with_room[arg[1]] = arg[4] !~ /^ *0$/
}

# "128", "TOP_THREADS" or "ATTN_WARPS * 32" as a number, anything else as 0. number[]: of the enums.
function in_numbers(text,    part) {
    gsub(/ /, "", text)
    split(text, part, "*")
    if (part[1] in number) part[1] = number[part[1]]
    return part[1] * (part[2] ? part[2] : 1)
}

# Blocks on a multiprocessor, or "-". Warps get registers by the 256, and the system takes 1 KB of every block's shared
# memory.
function blocks_of(arch, kernel,    warps, dynamic, n) {
    warps = block_threads(kernel) / 32
    if (!warps || !registers[arch, kernel]) return "-"
    dynamic = dynamic_shared(kernel)
    if (dynamic < 0) return 1
    n = least(room_blocks(arch), int(room_threads(arch) / (32 * warps)))
    n = least(n, int(65536 / (warps * 256 * int((registers[arch, kernel] + 7) / 8))))
    return least(n, int(room_shared(arch) / (shared[arch, kernel] + dynamic + 1024)))
}

# ---- what is asked for

# The most instructions of a turn, and in `why` what they are. b: bytes, p: products. A little more than nvcc 13.0
# takes, and less than what is asked for: 4 others a product, 300 for 8 KB of plain rows, 845 for 16 rows of q8_0 (6.6
# of a lane for an element of K
# or V). Narrow heads have fewer products for the same softmax.
function limit(kernel, b, p,    part) {
    split(kernel, part, /[<>, ]+/)              # name and template arguments
    why = ""
    if (part[1] == "prefill_kernel") {           # <dtype, head_dim, along lines>
        why = others[part[3], part[4]] " other instructions a product" (part[4] ? " along lines" : "")
        return p * (1 + why)
    }
    if (part[1] == "decode_kernel" && part[2] <= 2) {               # <rows, head_dim, groups of 8 query rows>
        why = "300 instructions for 8 KB of K and V"
        if (part[3] == 64) why = "350 instructions for 8 KB of K and V at head_dim 64"
        return b / 8192 * why
    }
    if (part[1] == "decode_kernel" && part[2] == 3 && part[3] == 128) {
        why = part[4] == 1 ? "700 instructions for 16 rows of q8_0" : "815 instructions for 16 rows of q8_0"
        return why + 0
    }
    if (part[1] == "decode_kernel" && part[2] == 4 && part[3] == 128) {
        why = part[4] == 1 ? "820 instructions for 16 rows of q4" : "960 instructions for 16 rows of q4"
        return why + 0
    }
    return 0
}
BEGIN {
    others[64, 0] = 3.9
    others[128, 0] = 2.6
    others[256, 0] = 3.6
    others[64, 1] = 4
    others[128, 1] = 3.5
    others[256, 1] = 3.8
}

# The least that must be under way on a multiprocessor, in KB: plain rows are read at the rate of the memory.
function ahead_least(kernel,    part) {
    split(kernel, part, /[<>, ]+/)
    return part[1] == "decode_kernel" && part[2] <= 2 ? 24 : 0
}

# The most issue slots, in per cent, at that rate: rows of PATS and q8_0 leave a fifth of them free. Those of q4 are
# bound by instructions, of which 1,990 take as long as 16 rows of f16. 0: no such figure.
function share_most(kernel,    part) {
    split(kernel, part, /[<>, ]+/)
    return part[1] == "decode_kernel" && part[2] > 2 && part[2] != 4 && part[3] == 128 ? 80 : 0
}

# Bytes that the loads of a warp ask for. once: only those of load_once and cp.async count.
function bytes(word, once) {
    if (word !~ /^(LDG|LD\.E|LD$)/) return 0
    if (once && word !~ /^LDGSTS/ && word !~ /^LDG.*\.NA/) return 0
    if (word ~ /\.128/) return 32 * 16
    if (word ~ /\.64/) return 32 * 8
    if (word ~ /\.[US]16/) return 32 * 2
    return word ~ /\.[US]8/ ? 32 : 32 * 4
}

# ---- a kernel's loops

# Turns through instructions first..last with the most products and the most of what is worth[] it: the least
# instructions of one. A turn enters at the top; a branch forward may be taken or not, and one back is not. A switch
# goes to any of its cases; with `reads` only to one that reads so many bytes a lane from shared memory. 0: no way is
# found.
function shortest(first, last, reads,    i, j, n, p) {
    split("", most)
    split("", fewest)
    most[first] = fewest[first] = 0
    for (i = first; i <= last; i++) {
        if (!(i in most)) continue
        p = most[i] + products[i] - products[i - 1] + worth[i]
        n = fewest[i] + 1
        if (i == last) break
        if (!always[i] && !switches[i]) arrive(i + 1, p, n, reads)
        j = at[jump[i]]
        if (j > i && j <= last) arrive(j, p, n, reads)
        for (j = i + 1; switches[i] && j <= last && !switches[j]; j++)
            if (j == i + 1 || always[j - 1]) arrive(j, p, n, reads)
    }
    return last in fewest ? fewest[last] + 1 : 0
}

function arrive(i, p, n, reads) {
    if (reads && case_reads[i] && case_reads[i] != reads) return
    if (i in most && (most[i] > p || (most[i] == p && fewest[i] <= n))) return
    most[i] = p
    fewest[i] = n
}

# case_reads[i] = what the case of a switch that begins at i reads. The cases of a switch end with jumps to one place
# behind it.
function find_cases(first, last,    i, j, begins, behind) {
    split("", case_reads)
    for (i = first; i <= last; i++) {
        if (!switches[i]) continue
        for (j = i; j <= last && !always[j];) j++
        behind = at[jump[j]]
        begins = i + 1
        for (j = begins; j < behind && j <= last && !switches[j]; j++) {
            case_reads[begins] += read[j]
            if (always[j] && at[jump[j]] == behind) begins = j + 1
        }
    }
}

# Sets low and high: the least and the most bytes that a warp has asked for and not yet used, in a turn that goes
# through first..last in their order. A load is used when a register that it fills is named; a group of copies when a
# wait (DEPBAR) leaves fewer than there are. The first of two turns is for what one leaves to the next.
function under_way(first, last,    round, i, j, n, r, text, owner, size, group, oldest, youngest, sum) {
    low = -1
    high = sum = n = oldest = youngest = group[0] = 0
    for (round = 1; round <= 2; round++) {
        for (i = first; i <= last; i++) {
            text = operands[i]
            while (sum && match(text, /R[0-9]+/)) {
                r = substr(text, RSTART + 1, RLENGTH - 1)
                text = substr(text, RSTART + RLENGTH)
                if (!(r in owner)) continue
                sum -= size[owner[r]]
                size[owner[r]] = 0
                delete owner[r]
            }
            if (words[i] ~ /^LDGSTS/) {
                group[youngest] += load[i]
                sum += load[i]
            } else if (load[i]) {
                match(operands[i], /R[0-9]+/)
                r = substr(operands[i], RSTART + 1, RLENGTH - 1)
                size[++n] = load[i]
                sum += load[i]
                for (j = 0; j < load[i] / 128; j++) owner[r + j] = n
            }
            if (words[i] ~ /^LDGDEPBAR/) group[++youngest] = 0
            if (words[i] ~ /^DEPBAR/ && match(operands[i], /0x[0-9]+/)) {
                r = substr(operands[i], RSTART + 2, RLENGTH - 2)
                while (youngest - oldest > r) sum -= group[oldest++]
            }
            if (round == 1) continue
            if (sum > high) high = sum
            if (low < 0 || sum < low) low = sum
        }
    }
}

# The main loop: top and end, and which of asked[] its loads are. -> 0: there is none.
function main_loop(    i, k, n, p, b, better, best, best_n, best_p, best_b, best_depth) {
    find_loops()
    best = 0
    for (i = 1; i <= n_loop; i++) {
        n = loop_end[i] - loop_top[i] + 1
        p = products[loop_end[i]] - products[loop_top[i] - 1]
        for (k = 1; k < 3 && asked[k, loop_end[i]] == asked[k, loop_top[i] - 1];) k++
        b = asked[k, loop_end[i]] - asked[k, loop_top[i] - 1]
        if (!p && (loops_inside(i) || !b)) continue
        if (!best) better = 1
        else if (p != best_p) better = p > best_p
        else if (p) better = n < best_n
        else if (k != kind) better = k < kind
        else if (k == 3 && loops_around(i) != best_depth) better = loops_around(i) > best_depth
        else better = b > best_b || (b == best_b && n < best_n)
        if (!better) continue
        best = i
        best_n = n
        best_p = p
        best_b = b
        best_depth = loops_around(i)
        kind = k
        top = loop_top[i]
        end = loop_end[i]
    }
    return best
}

# The loops are the branches back, those aside from code behind the kernel's end.
function find_loops(    i, first) {
    n_loop = 0
    for (i = 1; i <= n_branch; i++) {
        first = at[target[i]]
        if (!first || first > from[i] || exits[from[i]] > exits[first - 1]) continue
        loop_top[++n_loop] = first
        loop_end[n_loop] = from[i]
    }
}

# Loops inside the i-th one, and around it.
function loops_inside(i,    j, n) {
    n = 0
    for (j = 1; j <= n_loop; j++) n += j != i && loop_top[j] >= loop_top[i] && loop_end[j] <= loop_end[i]
    return n
}
function loops_around(i,    j, n) {
    n = 0
    for (j = 1; j <= n_loop; j++) n += j != i && loop_top[j] <= loop_top[i] && loop_end[j] >= loop_end[i]
    return n
}

# ---- rows of the table

# One kernel is complete: prints its row. PATS has one for elements of 8, 12 and 15 bits, of which a lane reads 8 at a
# time, and the words that hold a part of them: as many of no other width are as quick, or are as many.
function finish(    part, i, w, plain, few) {
    if (n_word && main_loop()) {
        split(kernel, part, /[<>, ]+/)
        plain = products[end] == products[top - 1]
        for (i = top; i <= end; i++) {
            load[i] = asked[kind, i] - asked[kind, i - 1]
            worth[i] = load[i] > 0 || words[i] ~ /^SHFL/
            if (plain && (asked[3, i] > asked[3, i - 1] || words[i] ~ /^[FHD](FMA|ADD|MUL|MNMX)/)) worth[i] = 1
        }
        find_cases(top, end)
        under_way(top, end)
        few = part[1] == "decode_kernel" && part[2] > 2 ? part[2] : 0
        if (!few) add_row(kind == 3 ? " ?" : "", 0, 0)
        if (few == 3 || few == 4) add_row("", part[3] / 32 * (few == 3 ? 34 : 18), 0)
        for (w = 8; few == 5 && w <= 15; w += w == 8 ? 4 : 3)
            add_row(" w = " w, part[3] / 8 * w, part[3] / 16 * (w < 15 ? w : 20))
    }
    n_word = n_branch = 0
    split("", at)
    split("", jump)
    split("", always)
    split("", switches)
}

# A row of the table, and whether the loop is allowed. row: bytes of a row of K or V, 32 of them a turn, where not all
# bytes that lanes can ask for are there; or 0. reads: as in shortest().
function add_row(label, row, reads,    turn, b, p, times, allowed, share, blocks, ahead) {
    turn = shortest(top, end, reads)
    b = asked[kind, end] - asked[kind, top - 1]
    p = products[end] - products[top - 1]
    allowed = limit(kernel, b, p)
    if (allowed && (turn > allowed || !turn)) fails("a turn takes more than " why)
    times = row ? 32 * row / b : 1
    share = issue_share(turn, b * times)
    allowed = share_most(kernel)
    if (allowed && (share > allowed || !turn)) fails(sprintf("%.0f %% of the issue slots, more than %d", share, allowed))
    blocks = blocks_of(arch, kernel)
    ahead = "-"
    if (blocks != "-") {
        times *= blocks * block_threads(kernel) / 32 / 1024
        ahead = sprintf("%.0f-%.0f", low * times, high * times)
        if (low * times < ahead_least(kernel)) fails("less than " ahead_least(kernel) " KB are under way")
    }
    share = turn ? sprintf("%.0f %%", share) : "-"
    print_row(label, sprintf("%5s %6d %4d %7s %9s", turn ? turn : "-", row ? 32 * row : b, p, share, ahead))
}

# A complaint that counts: on sm_90, which the figures are for.
function fails(what) {
    if (arch == "sm_90") failed = failed kernel ": " what "\n"
}

# A line of the table. loop: the columns of the loop.
function print_row(label, loop,    of, dynamic, more, blocks, taken) {
    if (!titled++)
        printf "%-6s %-32s %5s %6s %4s %7s %9s %6s %4s %6s %7s\n", "arch", "kernel", "instr", "bytes", "mma",
               "issue", "KB ahead", "blocks", "regs", "shared", "spilled"
    of = arch SUBSEP kernel
    dynamic = dynamic_shared(kernel)
    more = dynamic < 0 ? "+" : ""
    blocks = blocks_of(arch, kernel)
    if (blocks != "-") blocks = blocks more
    taken = shared[of] + (dynamic > 0 ? dynamic : 0)
    printf "%-6s %-32s %s %6s %4d ", arch, kernel label, loop, blocks, registers[of]
    printf "%5.1f%-1s %7d\n", taken / 1024, more, spilled[of]
    printed[of] = 1
}

# ---- the texts

# kvcomp.cu
!n_entry && /KV_LAUNCH/ && !/define/ {
    sub(/.*KV_LAUNCH[A-Z_]*\(/, "")
    read_launch($0)
}
!n_entry {
    text = $0
    while (match(text, /[A-Z][A-Z_0-9]* = [0-9]+/)) {
        split(substr(text, RSTART, RLENGTH), pair, " = ")
        if (!(pair[1] in number)) number[pair[1]] = pair[2]
        text = substr(text, RSTART + RLENGTH)
    }
}

# ptxas info    : Compiling entry function 'void decode_kernel<1, 128, 1>(Attn, int)' for 'sm_90'
/Compiling entry function/ {
    split($0, part, "'")
    entry = part[4] SUBSEP bare(part[2])
    entries[++n_entry] = entry
}
/bytes spill stores/ && entry { spilled[entry] += $5 + $9 }
/: Used [0-9]+ registers/ {
    registers[entry] = $5
    shared[entry] = match($0, /[0-9]+ bytes smem/) ? substr($0, RSTART, RLENGTH) + 0 : 0
}

# void decode_kernel<1, 128, 1>(Attn, int) -> decode_kernel<1, 128, 1>
function bare(name) {
    sub(/^void /, "", name)
    sub(/\(.*/, "", name)
    return name
}

# SASS
$1 == "arch" { finish(); arch = $3 }
$1 == "Function" {
    finish()
    counted = 1
    kernel = $0
    sub(/.*Function : /, "", kernel)
    kernel = bare(kernel)
}

# An instruction:  /*01d0*/   @!P0 HMMA.16816.F32 R8, R12, R2, R8 ;   /* 0x.. */
$1 ~ /^\/\*[0-9a-f]+\*\/$/ {
    address = substr($1, 3, length($1) - 4)
    sub(/^0+/, "", address)
    word = $2 ~ /^@/ ? $3 : $2
    at[address] = ++n_word
    words[n_word] = word
    operands[n_word] = $0
    sub(/ ;.*/, "", operands[n_word])
    gsub(/^.*\*\/|UR[0-9]+/, "", operands[n_word])
    products[n_word] = products[n_word - 1] + (word ~ /^HMMA/)
    exits[n_word] = exits[n_word - 1] + ($2 == "EXIT")
    asked[1, n_word] = asked[1, n_word - 1] + bytes(word, 1)
    asked[2, n_word] = asked[2, n_word - 1] + (word ~ /\.128/) * bytes(word)
    asked[3, n_word] = asked[3, n_word - 1] + bytes(word)
    read[n_word] = word !~ /^LDS($|\.[^M])/ ? 0 : word ~ /\.128/ ? 16 : word ~ /\.64/ ? 8 : 4
    switches[n_word] = word ~ /^BRX/
    if (word !~ /^BRA/ || !match($0, /0x[0-9a-f]+ ;/)) next
    from[++n_branch] = n_word
    target[n_branch] = jump[n_word] = substr($0, RSTART + 2, RLENGTH - 4)
    always[n_word] = $2 == "BRA" && $3 ~ /^0x/
}

# sass: the program that SASS was asked from, or nothing.
END {
    finish()
    for (i = 1; i <= n_entry; i++) {
        split(entries[i], part, SUBSEP)
        arch = part[1]
        kernel = part[2]
        if (!(entries[i] in printed)) print_row("", sprintf("%5s %6s %4s %7s %9s", "-", "-", "-", "-", "-"))
        if (spilled[entries[i]] && arch ~ /^sm_(80|90)$/)
            failed = failed arch " " kernel ": registers are spilled to memory\n"
    }
    if (!counted && sass) failed = failed "no SASS has come from " sass "\n"
    if (!counted && !sass) print "cuobjdump is not found (CUOBJDUMP=): main loops are not looked at"
    printf "%s", failed
    exit failed != ""
}
