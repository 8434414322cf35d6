"""LoopServe: lines chosen for this input in a prefill, rows chosen anew in decode. From q, k and v alone.

Prefill. Of a sample of the pass's queries, A are the softmax rows. A line is a column of the attention matrix
(vertical) or an offset row - column (slash). Greedy: the line that adds most attention per cell, until the
lines hold alpha of the sampled attention.
Decode. Every `interval` tokens a KV head chooses the B rows, of those held when the prefill ended, with the
largest sum of attention over the last `obs` queries and over its query heads. It reads these and every row of
the answer.
"""
from trace import Rows, arguments, attention, causal
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


def sample_rows(T, want, turn, layer):
    """One row of each of `want` strata; the last sample is the last row."""
    state, rows = mix64(mix64(mix64(1) ^ turn) ^ layer), []
    for i in range(want):
        lo, hi = i * T // want, (i + 1) * T // want
        state = next_state(state)
        rows.append(lo + mix(state) % (hi - lo))
    return rows[:-1] + [T - 1]


def choose_lines(A, rows, n, p0, alpha, sink, local, max_cells):
    """A (m,n): rows `rows` of the attention matrix of n rows, of which those from p0 on are queries. -> verticals,
    slashes, the share of the samples' attention they hold, their share of the cells; or no lines where they would
    cover more than max_cells of these."""
    length = n - np.maximum(np.arange(n), p0)           # cells of a line, of either kind
    V, S = set(range(min(sink, n))), set(range(min(local, n)))
    cells = (n * (n + 1) - p0 * (p0 + 1)) / 2
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
        share = sum(length[x] for lines in (V, S) for x in lines) / cells
        if share > max_cells and len(V) + len(S) > min(sink, n) + min(local, n):
            return None, None, 1, 1
        if held >= alpha * total:
            return sorted(V), sorted(S), held / total, share
        best = int(np.argmax(gain / np.concatenate([length, length])))
        (V if best < n else S).add(best % n)


def lines_output(q, k, v, p0, V, S):
    """Attention of the queries, rows p0.. of the matrix, along the lines."""
    row, col = np.arange(len(q))[:, None] + p0, np.arange(len(k))[None]
    see = (col <= row) & (np.isin(col, V) | np.isin(row - col, S))
    return attention(q, k, see) @ v


def main(t, check):
    """Plays every layer of the trace, pass by pass."""
    names = ("alpha", "local", "samples", "first", "interval", "obs", "max-cells")
    opt = {name: t.option("loopserve-" + name) for name in names}
    rule = opt["alpha"], int(t.option("sink")), int(opt["local"]), opt["max-cells"]
    B, obs, m = int(t.meta["budget"]), int(opt["obs"]), int(opt["samples"])
    check.turns(again=True)
    for l in t.layers:
        rows, queries, chosen, turn = Rows(t, l), {}, None, 0
        for p, base, step, T in t.passes():
            rows.add(p, base)
            n, q, at = base + T, t.of(p, l, "q").astype(float), "pass%04d.layer%02d." % (p, l)
            queries.update({base + i: q[i] for i in range(T)})
            out, dense, held, cells = np.zeros(q.shape), [1] * t.H, [1.] * t.H, [1.] * t.H
            if step < 0:                                # a prefill; a short one is computed in full
                sampled = sample_rows(T, m, turn, l) if T // 4 >= m else None
                turn, prompt_end, first, chosen = turn + 1, n, n - min(T, obs), None
                for h in range(t.H):
                    k, v = rows.k[:, h // t.R], rows.v[:, h // t.R]
                    V, S = [], None
                    if sampled:
                        where = [base + r for r in sampled]
                        A = attention(q[sampled, h], k, causal(0, n)[where])
                        V, S, held[h], cells[h] = choose_lines(A, where, n, base, *rule)
                        dense[h] = int(S is None)
                        check.same(at + "qhead%02d.loopserve.verticals" % h, V or [])
                        check.same(at + "qhead%02d.loopserve.slashes" % h, S or [])
                    out[:, h] = lines_output(q[:, h], k, v, base, V or [], list(range(n)) if S is None else S)
                if sampled:
                    check.same(at + "loopserve.sampled", where)
                    check.same(at + "loopserve.dense", dense)
                    check.near(at + "loopserve.recovered", held)
                    check.near(at + "loopserve.cells", cells, 1e-6)
                check.near(at + "out", out)
                check.rows(p, l, None, [range(n)] * t.G)
                continue
            since = step + 1 - opt["first"]             # a decode step
            if since >= 0 and since % opt["interval"] == 0 and prompt_end > B:
                window, chosen = range(max(base - obs + 1, first), base + 1), []
                for g in range(t.G):
                    score = np.zeros(n)
                    for i in window:
                        for h in range(g * t.R, (g + 1) * t.R):
                            score += attention(queries[i][h:h + 1], rows.k[:, g], np.arange(n)[None] <= i)[0]
                    score = score[:prompt_end] / len(window)
                    check.near(at + "head%02d.loopserve.scores" % g, score)
                    chosen.append(sorted(np.argsort(-score, kind="stable")[:B]))
            read = []
            for h in range(t.H):
                read.append(list(range(n)) if chosen is None else [*chosen[h // t.R], *range(prompt_end, n)])
                k, v = rows.k[read[h], h // t.R], rows.v[read[h], h // t.R]
                out[:, h] = attention(q[:, h], k, np.ones((1, len(k)), bool)) @ v
            check.near(at + "out", out)
            check.rows(p, l, read, [range(n)] * t.G)
    check.done()


if __name__ == "__main__":
    main(*arguments("loopserve"))
