#!/usr/bin/env python3
"""Changes one value of every tensor of every vector, one at a time: the checker of the vector must fail each time.

    python3 data/vectors/faults.py [--each-kind] [NAME..]

Tensors that the checkers list as not checked are left out. --each-kind changes one tensor of every kind (of a name
without its numbers) instead of all of them. The change is a step of 1 of a whole number; of an f32 number half of the
largest number of its tensor, at least a thousandth. Exit code 0: all were noticed; 1: the first one that was not.
"""
import importlib
import re
import sys

from trace import NOT_CHECKED, Checks, Trace, np


def changed(x, place):
    """A copy of x with another number at this place."""
    x = x.copy()
    flat = x.reshape(-1)
    flat[place] += max(abs(x).max() / 2, 1e-3) if x.dtype.kind == "f" else 1
    return x


def noticed(name, trace, tensor):
    """Does the checker fail when a number in the middle of this tensor is another one?"""
    true = trace.tensors[tensor]
    trace.tensors[tensor] = changed(true, true.size // 2)
    try:
        importlib.import_module("check_" + name).main(trace, Checks(name, trace))
    except (SystemExit, IndexError, KeyError, ValueError):      # a wrong shape of the dialogue may end it anywhere
        return True
    finally:
        trace.tensors[tensor] = true
    return False


def main(words):
    each_kind = "--each-kind" in words
    names = [word for word in words if word != "--each-kind"] or ["loopserve", "pats", "lychee", "sonic", "dililazy"]
    for name in names:
        trace, kinds, n = Trace(__file__.replace("faults.py", name + ".safetensors")), set(), 0
        importlib.import_module("check_" + name).main(trace, Checks(name, trace))   # as it is, nothing is wrong
        for tensor in sorted(trace.tensors, reverse=True):      # an early pass, which all others depend on, comes last
            kind = re.sub(r"\d+", "", tensor)
            if tensor.split(".")[-1] in NOT_CHECKED or not trace.tensors[tensor].size or each_kind and kind in kinds:
                continue
            if not noticed(name, trace, tensor):
                sys.exit("%s: %s was changed, and its checker did not notice" % (name, tensor))
            kinds.add(kind)
            n += 1
        print("%s: %d tensors of %d kinds changed, one at a time: all noticed" % (name, n, len(kinds)))


if __name__ == "__main__":
    main(sys.argv[1:])
