#!/usr/bin/env python3
"""Writes the unicode section of kvcomp.c (tables and the function that hands them out) to stdout.

    python3 make_unicode.py > unicode.c          needs the package `tokenizers`

Letter, mark and number classes are what the regex engine inside `tokenizers` says (Unicode 16), because ids must equal
the ids that package gives. Normalization data come from Python's unicodedata, less the marks and compositions that the
package does not know yet (its NFC is that of Unicode 9), and are checked against it.
"""
import unicodedata
from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
OTHER, UPPER, LOWER, LETTER, MARK, NUMBER, SPACE, UPPER_EVEN, UPPER_ODD = range(9)
PATTERNS = {UPPER: r"[\p{Lu}\p{Lt}]", LOWER: r"\p{Ll}", LETTER: r"[\p{Lm}\p{Lo}]", MARK: r"\p{M}", NUMBER: r"\p{N}", SPACE: r"\s"}


NFC = normalizers.NFC().normalize_str


def combining_class(c, marks={}):
    """0 for marks that the package's NFC leaves where they are"""
    if not marks:
        for m in map(chr, range(0x300, 0x1000)):
            if unicodedata.combining(m) and unicodedata.normalize("NFC", "x" + m) == "x" + m:
                marks.setdefault(unicodedata.combining(m), m)
    k = unicodedata.combining(chr(c))
    known = all(NFC(s) == unicodedata.normalize("NFC", s) for m in marks.values() for s in ("x" + chr(c) + m, "x" + m + chr(c))) if k else True
    return k if known else 0


def classes():
    cls = bytearray(0x110000)
    for code, pattern in PATTERNS.items():
        split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
        for i in range(0, len(POINTS), 4096):
            for piece, _ in split.pre_tokenize_str("".join(map(chr, POINTS[i:i + 4096]))):
                for c in piece:
                    assert cls[ord(c)] in (OTHER, code), "a character of two classes"
                    cls[ord(c)] = code
    return cls


def class_ranges(cls):
    """(first code point, code) until the next entry; runs of Aa Aa Aa pairs become one entry"""
    out, c = [], 0
    while c < 0x110000:
        pair = (cls[c], cls[c + 1]) if c + 1 < 0x110000 else None
        if pair in ((UPPER, LOWER), (LOWER, UPPER)):
            e = c
            while e < 0x110000 and cls[e] == pair[(e - c) & 1]:
                e += 1
            if e - c > 2:
                even_first = (pair[0] == UPPER) == (c % 2 == 0)
                out.append((c, UPPER_EVEN if even_first else UPPER_ODD))
                c = e
                continue
        e = c
        while e < 0x110000 and cls[e] == cls[c]:
            e += 1
        if e - c > 1 and cls[c] in (UPPER, LOWER) and e + 1 < 0x110000 and {cls[e], cls[c]} == {UPPER, LOWER} and cls[e + 1] == cls[c]:
            e -= 1                      # leave the last one to the alternating run that follows
        if not out or out[-1][1] != cls[c]:
            out.append((c, cls[c]))
        c = e
    return out


def combining_ranges():
    out = [(0, 0)]
    for c in range(0x110000):
        ccc = combining_class(c) if not 0xD800 <= c < 0xE000 else 0
        if ccc != out[-1][1]:
            out.append((c, ccc))
    return out


def decompositions():
    """runs of code points: first << 8 | count, then two numbers each: first part (bit 31: never composed again), second part or 0"""
    table = {}
    for c in POINTS:
        d = unicodedata.decomposition(chr(c))
        if d and not d.startswith("<"):
            parts = [int(x, 16) for x in d.split()]
            composes = len(parts) == 2 and NFC("".join(map(chr, parts))) == chr(c)
            if not composes and NFC(chr(c)) == chr(c):
                continue                # newer than the package
            table[c] = (parts[0] | (0 if composes else 1 << 31), parts[1] if len(parts) == 2 else 0)
    out, c = [], sorted(table)
    while c:
        n = 1
        while n < len(c) and n < 255 and c[n] == c[0] + n:
            n += 1
        out.append(c[0] << 8 | n)
        for x in c[:n]:
            out += table[x]
        c = c[n:]
    return out


def c_array(name, what, values, fmt="%#x"):
    lines, line = [], "   "
    for v in values:
        item = " " + (fmt % v if v > 9 else str(v)) + ","
        if len(line) + len(item) > 196:
            lines.append(line)
            line = "   "
        line += item
    return "static const uint32_t %s[%d] = {    // %s\n%s\n};\n" % (name, len(values), what, "\n".join(lines + [line]))


for c in POINTS:
    for before in ("", "a", "e\u0323"):
        assert NFC(before + chr(c)) == unicodedata.normalize("NFC", before + chr(c)), hex(c)
cls = classes()
ranges = class_ranges(cls)
back = bytearray(0x110000)
for (a, code), (b, _) in zip(ranges, ranges[1:] + [(0x110000, 0)]):
    for c in range(a, b):
        back[c] = code if code < UPPER_EVEN else UPPER if (c % 2 == 0) == (code == UPPER_EVEN) else LOWER
assert back == cls, "the ranges do not say what the classes are"
print("// " + "=" * 100 + " 3c UNICODE TABLES")
print("// Made by data/make_unicode.py; read by unicode_load() in section 3. Nothing to read here.")
print(c_array("unicode_range", "first code point << 4 | class: 0 other 1 Lu Lt 2 Ll 3 Lm Lo 4 M 5 N 6 white space 7 even Lu, odd Ll 8 odd Lu, even Ll",
              [a << 4 | code for a, code in ranges]))
print(c_array("unicode_combining", "first code point << 8 | canonical combining class", [a << 8 | k for a, k in combining_ranges()]))
print(c_array("unicode_decomposition", "runs: first code point << 8 | count, then count pairs: first part (bit 31: never composed), second part or 0", decompositions()))
print("""static const uint32_t *unicode_table(int which, size_t *n) {     // 0 classes, 1 combining classes, 2 decompositions
    *n = which == 0 ? sizeof unicode_range / 4 : which == 1 ? sizeof unicode_combining / 4 : sizeof unicode_decomposition / 4;
    return which == 0 ? unicode_range : which == 1 ? unicode_combining : unicode_decomposition;
}
""")
