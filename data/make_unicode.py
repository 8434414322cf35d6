#!/usr/bin/env python3
"""python3 data/make_unicode.py > data/unicode.h          needs the package `tokenizers`

Writes data/unicode.h: the Unicode tables of lib/tokenizer.c, which are the general category of every code point
for the pre-tokenizers, and combining classes and canonical decompositions for the normalizer NFC.

Categories are what the regex engine inside `tokenizers` says (Unicode 16), because ids must equal the ids that
package gives. Normalization data come from Python's unicodedata, less the marks and compositions that the package
does not know yet (its NFC is that of Unicode 9), and are checked against it.
"""
import unicodedata
from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CATEGORIES = "Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co".split()
BLANK = len(CATEGORIES)         # stands for what of Cc is white space
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


def found(step):
    """The code points that a pre-tokenizer which removes them finds."""
    out = set()
    for i in range(0, len(POINTS), 4096):
        block = POINTS[i:i + 4096]
        left = {ord(c) for piece, _ in step.pre_tokenize_str("".join(map(chr, block))) for c in piece}
        out.update(set(block) - left)
    return out


def classes():
    """The general category of every code point, as its place in CATEGORIES, or BLANK."""
    cls = bytearray(0x110000)
    for code, name in enumerate(CATEGORIES):
        for c in found(pre_tokenizers.Split(Regex(r"\p{%s}" % name), "removed")):
            assert cls[c] == 0, "a character of two categories"
            cls[c] = code
    cls[0xD800:0xE000] = [CATEGORIES.index("Cs")] * 0x800
    for c in (*range(9, 14), 0x85):
        cls[c] = BLANK
    return cls


def check_shorthands(cls):
    """White space and digits are what lib/tokenizer.c makes of the categories."""
    for regex, names, more in ((r"\s", "Zs Zl Zp", [BLANK]), (r"\d", "Nd", [])):
        codes = [CATEGORIES.index(name) for name in names.split()] + more
        assert found(pre_tokenizers.Split(Regex(regex), "removed")) == {c for c in POINTS if cls[c] in codes}, regex


def class_ranges(cls):
    """(first code point, code) until the next entry."""
    return [(c, cls[c]) for c in range(0x110000) if not c or cls[c] != cls[c - 1]]


def punctuation_ranges():
    """First and last code points of the runs where the step Punctuation and \\p{P} differ, one after the other."""
    step = found(pre_tokenizers.Punctuation("removed"))
    differ = sorted(step ^ found(pre_tokenizers.Split(Regex(r"\p{P}"), "removed")))
    out = []
    for c in differ:
        if out and out[-1] == c - 1:
            out[-1] = c
        else:
            out += [c, c]
    return out


def combining_ranges():
    """(first code point, canonical combining class) until the next entry."""
    out = [(0, 0)]
    for c in range(0x110000):
        ccc = combining_class(c) if not 0xD800 <= c < 0xE000 else 0
        if ccc != out[-1][1]:
            out.append((c, ccc))
    return out


def decompositions():
    """For each code point that decomposes: itself (bit 31: the parts are never composed again) and its parts.

    The second part is 0 where there is none.
    """
    out = []
    for c in POINTS:
        d = unicodedata.decomposition(chr(c))
        if d and not d.startswith("<"):
            parts = [int(x, 16) for x in d.split()]
            composes = len(parts) == 2 and NFC("".join(map(chr, parts))) == chr(c)
            if not composes and NFC(chr(c)) == chr(c):
                continue                # newer than the package
            out += [c | (0 if composes else 1 << 31), parts[0], parts[1] if len(parts) == 2 else 0]
    return out


HEAD = """\
// unicode.h - what lib/tokenizer.c knows of Unicode: four tables. data/make_unicode.py writes this file.
//
// unicode_category        The general category of every code point (Unicode 16), for the patterns of pre-tokenizers.
// unicode_punctuation     Where the pre-tokenizer step Punctuation, which has a table of its own, differs from \\p{P}.
// unicode_combining       The canonical combining class of every code point, for NFC.
// unicode_decomposition   The canonical decompositions, for NFC, which composes by them too.
"""
NUMBERED = ["%d %s" % x for x in enumerate(CATEGORIES + ["the white space of Cc"])]
CATEGORY = """\
// Each entry is first code point << 5 | category and holds up to the code point of the next entry. Categories are
//   %s
//   %s
""" % (" ".join(NUMBERED[:15]), " ".join(NUMBERED[15:]))
PUNCTUATION = """\
// First and last code points of runs: in each either all are cut at and none is \\p{P}, or none and all.
"""
COMBINING = """\
// Each entry is first code point << 8 | canonical combining class and holds up to the next entry's code point.
"""
DECOMPOSITION = """\
// Three numbers for each code point that decomposes: itself, with bit 31 set when the parts are never composed
// again, the first part, and the second part, 0 when there is none.
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


def main():
    """Makes the tables, checks them, and writes them."""
    check_nfc()
    cls = classes()
    check_shorthands(cls)
    print(HEAD)
    print(c_array("unicode_category", CATEGORY, [a << 5 | code for a, code in class_ranges(cls)]) + "\n")
    print(c_array("unicode_punctuation", PUNCTUATION, punctuation_ranges()) + "\n")
    print(c_array("unicode_combining", COMBINING, [a << 8 | k for a, k in combining_ranges()]) + "\n")
    print(c_array("unicode_decomposition", DECOMPOSITION, decompositions()))


if __name__ == "__main__":
    main()
