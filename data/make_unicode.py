#!/usr/bin/env python3
"""python3 data/make_unicode.py > data/unicode.h          needs the package `tokenizers`

Writes data/unicode.h: the Unicode tables of lib/tokenizer.c, which are the class of every
code point for the pre-tokenizers, and combining classes and canonical decompositions for the normalizer NFC.

Letter, mark and number classes are what the regex engine inside `tokenizers` says (Unicode 16), because ids
must equal the ids that package gives. Normalization data come from Python's unicodedata, less the marks and
compositions that the package does not know yet (its NFC is that of Unicode 9), and are checked against it.
"""
import unicodedata
from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
OTHER, UPPER, LOWER, LETTER, MARK, NUMBER, SPACE, UPPER_EVEN, UPPER_ODD = range(9)
PATTERNS = {
    UPPER: r"[\p{Lu}\p{Lt}]",
    LOWER: r"\p{Ll}",
    LETTER: r"[\p{Lm}\p{Lo}]",
    MARK: r"\p{M}",
    NUMBER: r"\p{N}",
    SPACE: r"\s",
}
NFC = normalizers.NFC().normalize_str


def combining_class(c, marks={}):
    """The canonical combining class of a code point.

    It is 0 for marks that the package's NFC leaves where they are.
    """
    if not marks:
        for m in map(chr, range(0x300, 0x1000)):
            if unicodedata.combining(m) and unicodedata.normalize("NFC", "x" + m) == "x" + m:
                marks.setdefault(unicodedata.combining(m), m)
    k = unicodedata.combining(chr(c))
    if not k:
        return 0
    texts = [s for m in marks.values() for s in ("x" + chr(c) + m, "x" + m + chr(c))]
    known = all(NFC(s) == unicodedata.normalize("NFC", s) for s in texts)
    return k if known else 0


def classes():
    """The class of every code point."""
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
    """(first code point, code) until the next entry; runs of Aa Aa Aa pairs become one entry."""
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
        cased = cls[c] in (UPPER, LOWER) and e + 1 < 0x110000
        if e - c > 1 and cased and {cls[e], cls[c]} == {UPPER, LOWER} and cls[e + 1] == cls[c]:
            e -= 1                      # leave the last one to the alternating run that follows
        if not out or out[-1][1] != cls[c]:
            out.append((c, cls[c]))
        c = e
    return out


def sign_ranges():
    """(first code point, bits) until the next entry.

    The bits are 1 for \\p{P}, 2 for \\p{S}, 4 for what the step Punctuation cuts at.
    """
    steps = {
        1: pre_tokenizers.Split(Regex(r"\p{P}"), "removed"),
        2: pre_tokenizers.Split(Regex(r"\p{S}"), "removed"),
        4: pre_tokenizers.Punctuation("removed"),
    }
    bits = bytearray(0x110000)
    for bit, step in steps.items():
        for i in range(0, len(POINTS), 4096):
            block = POINTS[i:i + 4096]
            left = {ord(c) for piece, _ in step.pre_tokenize_str("".join(map(chr, block))) for c in piece}
            for c in block:
                bits[c] |= 0 if c in left else bit
    return [(c, bits[c]) for c in range(0x110000) if c == 0 or bits[c] != bits[c - 1]]


def combining_ranges():
    """(first code point, canonical combining class) until the next entry."""
    out = [(0, 0)]
    for c in range(0x110000):
        ccc = combining_class(c) if not 0xD800 <= c < 0xE000 else 0
        if ccc != out[-1][1]:
            out.append((c, ccc))
    return out


def decompositions():
    """Runs of code points: first << 8 | count, then two numbers for each.

    These are the first part (bit 31: never composed again) and the second part, or 0.
    """
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


HEAD = """\
// unicode.h - what lib/tokenizer.c knows of Unicode: four tables.
// data/make_unicode.py writes this file; unicode_load() there unpacks the tables.
//
// unicode_range           The class of every code point: letters by case, marks, numbers, white space
//                         (Unicode 16). The pre-tokenizers' patterns need it.
// unicode_sign            Which code points are punctuation or symbols, for the pre-tokenizers that tell them apart.
// unicode_combining       The canonical combining class of every code point, for NFC.
// unicode_decomposition   The canonical decompositions, for NFC, which composes by them too.
//
// Each entry of the first three holds up to the code point of the next entry.
"""
RANGE = """\
// Each entry is first code point << 4 | class, where class is
//   0 other, 1 capital (Lu Lt), 2 small letter (Ll), 3 letter without case (Lm Lo), 4 mark (M),
//   5 number (N), 6 white space,
//   7 capitals at even and small letters at odd code points, 8 the other way about.
"""
SIGN = """\
// Each entry is first code point << 3 | bits, where the bits are
//   1 punctuation (P), 2 symbol (S), 4 what the pre-tokenizer step Punctuation cuts at, which has a table of its own.
"""
COMBINING = """\
// Each entry is first code point << 8 | canonical combining class.
"""
DECOMPOSITION = """\
// Runs of code points that decompose. A run is first code point << 8 | count, and then for each of its
// code points two numbers: the first part, with bit 31 set when the parts are never composed again,
// and the second part, 0 when there is none.
"""


def c_array(name, comment, values):
    """An array of C, under its comment."""
    lines, line = [], "   "
    for v in values:
        item = " " + ("%#x" % v if v > 9 else str(v)) + ","
        if len(line) + len(item) > 196:
            lines.append(line)
            line = "   "
        line += item
    numbers = "\n".join(lines + [line])
    return comment + "static const uint32_t %s[%d] = {\n%s\n};" % (name, len(values), numbers)


def check_nfc():
    """The package's NFC is unicodedata's for every code point alone and behind a starter or a mark."""
    for c in POINTS:
        for before in ("", "a", "e\u0323"):
            text = before + chr(c)
            assert NFC(text) == unicodedata.normalize("NFC", text), hex(c)


def check_ranges(ranges, cls):
    """The ranges say what the classes are."""
    back = bytearray(0x110000)
    for (a, code), (b, _) in zip(ranges, ranges[1:] + [(0x110000, 0)]):
        for c in range(a, b):
            if code < UPPER_EVEN:
                back[c] = code
            else:
                back[c] = UPPER if (c % 2 == 0) == (code == UPPER_EVEN) else LOWER
    assert back == cls, "the ranges do not say what the classes are"


def write_tables(ranges, signs, combining, decomposition):
    """Prints unicode.h."""
    print(HEAD)
    print(c_array("unicode_range", RANGE, ranges) + "\n")
    print(c_array("unicode_sign", SIGN, signs) + "\n")
    print(c_array("unicode_combining", COMBINING, combining) + "\n")
    print(c_array("unicode_decomposition", DECOMPOSITION, decomposition))


def main():
    """Makes the tables, checks them, and writes them."""
    check_nfc()
    cls = classes()
    ranges = class_ranges(cls)
    check_ranges(ranges, cls)
    write_tables(
        [a << 4 | code for a, code in ranges],
        [a << 3 | bits for a, bits in sign_ranges()],
        [a << 8 | k for a, k in combining_ranges()],
        decompositions(),
    )


if __name__ == "__main__":
    main()
