"""Reads a trace that kvcomp --trace has written, for the checkers in this folder."""
import json
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("the checkers in data/vectors need numpy")

TYPES = {"F32": "<f4", "I32": "<i4", "U8": "u1"}


class Trace:
    def __init__(self, path):
        with open(path, "rb") as f:
            raw = f.read()
        n = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8:8 + n])
        self.meta = head.pop("__metadata__")
        self.tensors = {}
        for name, t in head.items():
            a, b = t["data_offsets"]
            self.tensors[name] = np.frombuffer(raw[8 + n + a:8 + n + b], TYPES[t["dtype"]]).reshape(t["shape"])
        self.L, self.H, self.G, self.D = (int(self.meta[x]) for x in "LHGD")
        self.R = self.H // self.G
        self.layers = sorted({int(name[14:16]) for name in self.tensors if name[8:14] == ".layer"})

    def option(self, name):
        return float(self.meta["option." + name])

    def passes(self):
        """Every pass: its number, the first token of it, its decode step (-1: a prefill), its number of tokens."""
        for name in sorted(self.tensors):
            if name.endswith(".base"):
                p = int(name[4:8])
                yield p, int(self.tensors[name][0]), int(self.get(p, "step")[0]), len(self.get(p, "tokens"))

    def get(self, p, name):
        """What the pass p has under this name; None: nothing."""
        return self.tensors.get("pass%04d.%s" % (p, name))

    def of(self, p, layer, name):
        return self.get(p, "layer%02d.%s" % (layer, name))


class Rows:
    """Keys and values of every token of one layer as the passes go by: k, v (tokens,G,D) of the dialogue so far."""

    def __init__(self, trace, layer):
        self.t, self.l = trace, layer
        self.k = self.v = np.zeros((0, trace.G, trace.D))

    def add(self, p, base):
        """The rows of pass p; tokens from base on, of which there may be some, were truncated before."""
        self.k = np.concatenate([self.k[:base], self.t.of(p, self.l, "k").astype(float)])
        self.v = np.concatenate([self.v[:base], self.t.of(p, self.l, "v").astype(float)])


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q, k, see):
    """Softmax rows of the queries q (m,D) over the keys k (n,D); see (m,n): may a query see a key?"""
    return softmax(np.where(see, q.astype(float) @ k.T / np.sqrt(q.shape[1]), -np.inf))


class Checks:
    def __init__(self, title):
        self.title, self.n = title, 0

    def same(self, what, ours, theirs):
        """The same numbers, exactly."""
        self.n += 1
        if list(map(int, np.ravel(ours))) != list(map(int, np.ravel(theirs))):
            sys.exit("%s: %s: computed %s, the trace has %s" % (self.title, what, list(np.ravel(ours)), list(np.ravel(theirs))))

    def near(self, what, ours, theirs, tol=1e-4):
        self.n += 1
        ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
        if ours.shape != theirs.shape or not (abs(ours - theirs) <= tol * (1 + abs(theirs))).all():
            sys.exit("%s: %s: computed\n%s\nthe trace has\n%s" % (self.title, what, ours, theirs))

    def done(self):
        print("%s: %d decisions agree" % (self.title, self.n))


def arguments(name):
    """The trace to check: the one on the command line, else the vector beside this file."""
    path = sys.argv[1] if len(sys.argv) > 1 else __file__.replace("trace.py", name + ".safetensors")
    return Trace(path), Checks(name)
