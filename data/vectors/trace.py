"""Reads a trace that kvcomp --trace has written, for the checkers in this folder, and counts what they check.

A checker gets q, v and k before RoPE as given, and computes every other tensor anew from them, from the ids of the
dialogue and from the options; what it cannot compute it lists as not checked. One value changed in a tensor that is
given shows in what is computed from it: faults.py tries that, tensor by tensor.
"""
import json
import pathlib
import sys

try:
    import numpy as np
except ImportError:
    sys.exit("the checkers in data/vectors need numpy")

TYPES = {"F32": "<f4", "I32": "<i4", "U8": "u1"}
GIVEN = ["q", "v", "k_before_rope"]
NOT_CHECKED = {"logits": "they need the model's weights"}


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

    def beside(self, option):
        """The path of a file that the trace was made with; it is relative to kvcomp's folder."""
        path = pathlib.Path(self.meta[option])
        return path if path.exists() else pathlib.Path(__file__).resolve().parent.parent.parent / path

    def turns(self):
        """The dialogue that was fed: a list of (ids of the prompt, ids of the answer)."""
        text = self.beside("option.ids").read_text()
        lines = [line.partition("|")[::2] for line in text.splitlines() if line.strip()]
        return [tuple([int(word) for word in part.split()] for part in line) for line in lines]


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


def causal(base, n):
    """(n-base,n): what the tokens from base on see of n tokens."""
    return np.arange(n)[None] <= np.arange(base, n)[:, None]


def frequencies(half, theta, factor=32, low=1, high=4, longest=8192):
    """theta^(-i/half) for i of half pairs, as Llama 3.2 scales them: waves longer than longest / low are stretched by
    the factor, those shorter than longest / high stay, and between is between. A synthetic model has these."""
    f = theta ** (-np.arange(half) / half)
    stay = np.clip((longest * f / (2 * np.pi) - low) / (high - low), 0, 1)
    return stay * f + (1 - stay) * f / factor


def rotate(x, position, frequency):
    """RoPE of x (T,G,D): elements i and i + D/2 are turned by position times frequency i."""
    half = x.shape[2] // 2
    angle = position[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


class Checks:
    """Compares what a checker computes with the trace's tensors, by their names, and knows which were compared."""

    def __init__(self, title, trace):
        self.title, self.t, self.n, self.seen = title, trace, 0, set()

    def fail(self, what):
        sys.exit("%s: %s" % (self.title, what))

    def theirs(self, name):
        self.n += 1
        self.seen.add(name)
        if name not in self.t.tensors:
            self.fail("%s is missing" % name)
        return self.t.tensors[name]

    def same(self, name, ours, any_order=False):
        """The same numbers, exactly."""
        ours, theirs = ([int(x) for x in np.ravel(numbers)] for numbers in (ours, self.theirs(name)))
        if ours != theirs and not (any_order and sorted(ours) == sorted(theirs)):
            self.fail("%s: computed %s, the trace has %s" % (name, ours, theirs))

    def near(self, name, ours, tol=1e-4):
        theirs, ours = self.theirs(name).astype(float), np.asarray(ours, float)
        if ours.shape != theirs.shape:
            self.fail("%s: computed shape %s, the trace has %s" % (name, ours.shape, theirs.shape))
        far = ~(abs(ours - theirs) <= tol * (1 + abs(theirs)))
        if far.any():
            at = tuple(int(i) for i in np.argwhere(far)[0])
            self.fail("%s at %s: computed %.8g, the trace has %.8g" % (name, list(at), ours[at], theirs[at]))

    def passes(self, plan, tol=1e-5):
        """The passes are those of the plan, a list of (base, step, ids, first position); k is k before RoPE, turned."""
        if not self.t.meta["model"].startswith("synthetic:"):
            self.fail("the model is %s; the checkers know the RoPE of synthetic ones" % self.t.meta["model"])
        turn = frequencies(self.t.D // 2, float(self.t.meta["rope_theta"]))
        if len(plan) != len(list(self.t.passes())):
            self.fail("%d passes are due, the trace has %d" % (len(plan), len(list(self.t.passes()))))
        for p, (base, step, ids, position) in enumerate(plan):
            at, position = "pass%04d." % p, position + np.arange(len(ids))
            for name, ours in ("base", [base]), ("step", [step]), ("tokens", ids), ("positions", position):
                self.same(at + name, ours)
            for l in self.t.layers:
                k = rotate(self.t.of(p, l, "k_before_rope").astype(float), position, turn)
                self.near(at + "layer%02d.k" % l, k, tol)

    def turns(self, again=False, tol=1e-5):
        """The passes of most methods: a prompt in one pass, then its answer token by token. again: an answer is
        prefilled once more, in front of the next prompt. tol: of k."""
        plan, base, answer = [], 0, []
        for prompt, said in self.t.turns():
            ids = answer * again + prompt
            base -= len(answer) * again
            plan.append((base, -1, ids, base))
            base += len(ids)
            plan += [(base + i, i, [token], base + i) for i, token in enumerate(said)]
            base, answer = base + len(said), said
        self.passes(plan, tol)

    def rows(self, p, l, read, kept):
        """The rows that query heads read in a decode step, lists of one a head (None: a prefill), and those that KV
        heads hold, one a head."""
        at = "pass%04d.layer%02d." % (p, l)
        for h in range(self.t.H if read else 0):
            self.same(at + "qhead%02d.read" % h, read[h])
        for g in range(self.t.G):
            self.same(at + "head%02d.kept" % g, kept[g])

    def done(self):
        """Every tensor was computed anew, is given, or is listed."""
        count = {"given": 0, "not checked": 0}
        for name in self.t.tensors:
            kind = name.split(".")[-1]
            if name in self.seen:
                continue
            if kind not in GIVEN and kind not in NOT_CHECKED:
                self.fail("%s is neither computed nor listed as not checked" % name)
            count["given" if kind in GIVEN else "not checked"] += 1
        print("%s: %d tensors computed anew, all agree; %d are given (%s); %d are not checked (%s)" % (
            self.title, len(self.seen), count["given"], ", ".join(GIVEN), count["not checked"],
            ", ".join("%s: %s" % item for item in NOT_CHECKED.items())))


def arguments(name):
    """The trace to check: the one on the command line, else the vector beside this file."""
    path = sys.argv[1] if len(sys.argv) > 1 else __file__.replace("trace.py", name + ".safetensors")
    trace = Trace(path)
    return trace, Checks(name, trace)
