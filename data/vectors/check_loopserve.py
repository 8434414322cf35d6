"""LoopServe: lines chosen for this input in a prefill, rows chosen anew in decode. From q, k and v alone.

Prefill. Of a sample of the pass's queries, A are the softmax rows. A line is a column of the attention matrix
(vertical) or an offset row - column (slash). Greedy: the line that adds most attention per cell, until the
lines hold alpha of the sampled attention.
Decode. Every `interval` tokens a KV head chooses the B rows, of those held when the prefill ended, with the
largest sum of attention over the last `obs` queries and over its query heads. It reads these and every row of
the answer.
"""
from trace import Rows, arguments, attention
import numpy as np

MASK = (1 << 64) - 1


# SplitMix64: the output of a state, the state behind it, and a hash, which is the first output behind it.
def mix(z):
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
    return z ^ z >> 31


def next_state(state):
    return state + 0x9e3779b97f4a7c15 & MASK


def mix64(z):
    return mix(next_state(z))


def sample_rows(T, want, seed, turn, layer):
    """One row of each of `want` strata; the last sample is the last row."""
    state, rows = mix64(mix64(mix64(seed) ^ turn) ^ layer), []
    for i in range(want):
        lo, hi = i * T // want, (i + 1) * T // want
        state = next_state(state)
        rows.append(lo + mix(state) % (hi - lo))
    return rows[:-1] + [T - 1]


def choose_lines(A, rows, n, p0, alpha, sink, local):
    """A (m,n): rows `rows` of the attention matrix of n rows, of which those from p0 on are queries."""
    length = n - np.maximum(np.arange(n), p0)           # cells of a line, of either kind
    V, S = set(range(min(sink, n))), set(range(min(local, n)))
    while True:
        gain, held, total = np.zeros(2 * n), 0.0, 0.0
        for i, r in enumerate(rows):
            for c in range(r + 1):
                total += A[i, c]
                if c in V or r - c in S:
                    held += A[i, c]
                else:
                    gain[c] += A[i, c]                  # what the vertical c would add
                    gain[n + r - c] += A[i, c]          # what the slash r - c would add
        if held >= alpha * total:
            return sorted(V), sorted(S), held / total
        best = int(np.argmax(gain / np.concatenate([length, length])))
        (V if best < n else S).add(best % n)


def lines_output(q, k, v, p0, V, S):
    """Attention of the queries, rows p0.. of the matrix, along the lines."""
    row, col = np.arange(len(q))[:, None] + p0, np.arange(len(k))[None]
    see = (col <= row) & (np.isin(col, V) | np.isin(row - col, S))
    return attention(q, k, see) @ v


def main():
    """Plays every layer of the trace, pass by pass."""
    t, check = arguments("loopserve")
    names = ("alpha", "sink", "local", "samples", "seed", "first", "interval", "obs")
    opt = {name: t.option("loopserve-" + name) for name in names}
    B, obs, turn = int(t.meta["budget"]), int(opt["obs"]), 0
    sink, local = int(opt["sink"]), int(opt["local"])
    for l in t.layers:
        rows, queries, chosen, turn = Rows(t, l), {}, None, 0
        for p, base, step, T in t.passes():
            rows.add(p, base)
            n, q = base + T, t.of(p, l, "q").astype(float)
            queries.update({base + i: q[i] for i in range(T)})
            if step < 0:                                # a prefill
                sampled = None
                if T // 4 >= opt["samples"]:
                    sampled = sample_rows(T, int(opt["samples"]), int(opt["seed"]), turn, l)
                    at = [base + r for r in sampled]
                    check.same("pass %d: sampled tokens" % p, at, t.of(p, l, "loopserve.sampled"))
                turn, prompt_end, first, chosen = turn + 1, n, n - min(T, obs), None
                for h in range(t.H):
                    k, v = rows.k[:, h // t.R], rows.v[:, h // t.R]
                    V, S = [], list(range(n))           # a short pass is computed in full
                    where = "pass %d, head %d: " % (p, h)
                    theirs = "qhead%02d.loopserve." % h
                    if sampled is not None and not t.of(p, l, "loopserve.dense")[h]:
                        A = attention(q[sampled, h], k, np.arange(n)[None] <= np.array(at)[:, None])
                        V, S, held = choose_lines(A, at, n, base, opt["alpha"], sink, local)
                        check.same(where + "verticals", V, t.of(p, l, theirs + "verticals"))
                        check.same(where + "slashes", S, t.of(p, l, theirs + "slashes"))
                        check.near(where + "recovered", held, t.of(p, l, "loopserve.recovered")[h])
                    out = lines_output(q[:, h], k, v, base, V, S)
                    check.near(where + "out", out, t.of(p, l, "out")[:, h])
                continue
            since = step + 1 - opt["first"]             # a decode step
            if since >= 0 and since % opt["interval"] == 0 and prompt_end > B:
                window = range(max(base - obs + 1, first), base + 1)
                chosen = []
                for g in range(t.G):
                    score = np.zeros(n)
                    for i in window:
                        see = np.arange(n)[None] <= i
                        for h in range(g * t.R, (g + 1) * t.R):
                            score += attention(queries[i][h:h + 1], rows.k[:, g], see)[0]
                    score = score[:prompt_end] / len(window)
                    theirs = t.of(p, l, "head%02d.loopserve.scores" % g)
                    check.near("pass %d, head %d: scores" % (p, g), score, theirs)
                    chosen.append(sorted(np.argsort(-score, kind="stable")[:B]))
            for h in range(t.H):
                read = list(range(n)) if chosen is None else [*chosen[h // t.R], *range(prompt_end, n)]
                check.same("pass %d, head %d: rows read" % (p, h), read, t.of(p, l, "qhead%02d.read" % h))
    check.done()


main()
