#!/usr/bin/env python3
"""Compares two traces that kvcomp --trace has written, or one of a port, which has the same names.

    trace_diff.py A B [--tol T] [--all]

Names the first value that differs, in the order in which A was computed: tensor, shape, index and both values. Of a
tensor of floats a value differs when |a - b| > T (1 + |b|); T is 0 unless given, and then the bits count (0 and -0 are
the same, and so are two NaN). Tensors that one side lacks are counted at the end; they make a difference only where
nothing can be compared. --all goes on and names the first value of every tensor that differs.

Exit code 0: no difference; 1: there is one; 2: a file cannot be read.
Needs Python alone; with numpy it is faster.
"""
import array
import json
import sys

try:
    import numpy
except ImportError:
    numpy = None

CODES = {"F32": ("f", 4), "I32": ("i", 4), "U8": ("B", 1), "F64": ("d", 8), "I64": ("q", 8)}


def fail(text):
    print("trace_diff: " + text, file=sys.stderr)
    sys.exit(2)


def read_trace(path):
    """The tensors of a file in the order of their places: a list of (name, dtype, shape, bytes)."""
    try:
        with open(path, "rb") as f:
            raw = f.read()
        size = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8:8 + size])
        meta = head.pop("__metadata__", {})
        data, tensors = raw[8 + size:], []
        for name, t in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = t["data_offsets"]
            code, width = CODES[t["dtype"]]
            count = 1
            for n in t["shape"]:
                count *= n
            if not 0 <= begin <= end <= len(data) or end - begin != count * width:
                fail("%s: %s does not fit its place (is the file cut off?)" % (path, name))
            tensors.append((name, t["dtype"], tuple(t["shape"]), data[begin:end]))
    except OSError as e:
        fail("%s: %s" % (path, e.strerror))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        fail("%s: not a trace (%s: %s)" % (path, type(e).__name__, e))
    if not meta.get("format", "").startswith("kvcomp trace 1"):
        fail("%s: expected the format 'kvcomp trace 1', found '%s'" % (path, meta.get("format", "none")))
    return tensors


def values(dtype, raw):
    code, width = CODES[dtype]
    if numpy:
        return numpy.frombuffer(raw, "<" + code if width > 1 else code)
    numbers = array.array(code)
    numbers.frombytes(raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def first_difference(dtype, a, b, tol):
    """The place of the first value that differs, or -1. a and b have the same length."""
    exact = dtype[0] != "F"
    if numpy:
        with numpy.errstate(all="ignore"):
            wide = (a.astype("f8"), b.astype("f8"))
            near = (a == b) if exact else (a == b) | (abs(wide[0] - wide[1]) <= tol * (1 + abs(wide[1])))
            bad = numpy.flatnonzero(~(near | ((a != a) & (b != b))))
        return int(bad[0]) if len(bad) else -1
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y and not (x != x and y != y) and (exact or not abs(x - y) <= tol * (1 + abs(y))):
            return i
    return -1


def index_of(place, shape):
    index = []
    for n in reversed(shape):
        index.insert(0, place % n)
        place //= n
    return "[%s]" % ", ".join(map(str, index))


def difference(name, one, other, tol):
    """What differs between two tensors of that name, or None."""
    (_, dtype, shape, raw), (_, dtype_b, shape_b, raw_b) = one, other
    if dtype != dtype_b:
        return "%s: %s, and %s in B" % (name, dtype, dtype_b)
    if shape == shape_b and raw == raw_b:
        return None
    a, b = values(dtype, raw), values(dtype, raw_b)
    n = min(len(a), len(b))
    if shape != shape_b and shape[1:] != shape_b[1:]:
        return "%s: shape %s, and %s in B" % (name, list(shape), list(shape_b))
    at = first_difference(dtype, a[:n], b[:n], tol)
    if at >= 0:
        sizes = "shape %s" % list(shape) if shape == shape_b else "shape %s, %s in B" % (list(shape), list(shape_b))
        return "%s (%s) at %s: %s, and %s in B" % (name, sizes, index_of(at, shape), a[at], b[at])
    if shape != shape_b:
        return "%s: shape %s, and %s in B; equal as far as both go" % (name, list(shape), list(shape_b))
    return None


def main(argv):
    paths, tol, every = [], 0.0, False
    while argv:
        word = argv.pop(0)
        if word == "--all":
            every = True
        elif word == "--tol" and argv:
            try:
                tol = float(argv.pop(0))
            except ValueError:
                fail("--tol wants a number")
        elif word.startswith("-"):
            fail(__doc__.strip())
        else:
            paths.append(word)
    if len(paths) != 2:
        fail(__doc__.strip())
    a, b = (read_trace(path) for path in paths)
    other = {t[0]: t for t in b}
    found, both = 0, 0
    for t in a:
        if t[0] not in other:
            continue
        both += 1
        text = difference(t[0], t, other[t[0]], tol)
        if text:
            print(text)
            found += 1
            if not every:
                break
    alone = len(a) - sum(t[0] in other for t in a), len(b) - sum(t[0] in {x[0] for x in a} for t in b)
    if any(alone):
        print("%d tensors are in A alone, %d in B alone" % alone)
    if not both:
        print("no tensor is in both")
    elif not found:
        print("%d tensors agree" % both)
    return 1 if found or not both else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
