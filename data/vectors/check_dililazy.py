"""DiliLazyKV: heads that find facts keep more rows. From q, k, v and the scores of the heads alone.

Algorithm 1. Of b_c = B - w rows a head, b_c (1 - 1/beta) go to every head, and the rest is a pool: a layer's share
grows with the sum of its heads' scores, a head's share of it with its own score. (The weights sum to 1 + eps L, which
is divided out.)
At a prefill's end query head j of layer i chooses the C_ij rows that its last w queries attend to most, in their
neighbourhoods, and the last w rows. A KV head keeps the union of what its query heads choose.
"""
from trace import Rows, arguments, attention, causal
import json
import numpy as np


def capacities(score, b_c, beta, eps):
    """score (L,H) -> C (L,H)"""
    L, H = score.shape
    of_layer = score.sum(1, keepdims=True)
    S = np.where(of_layer > 0, score / np.where(of_layer > 0, of_layer, 1), 1 / H)      # line 14
    share = of_layer / of_layer.sum() if of_layer.sum() > 0 else np.full((L, 1), 1 / L) # line 16
    fixed, pool = b_c * (1 - 1 / beta), b_c / beta * L * H / (1 + eps * L)              # lines 3, 4
    return np.floor(np.maximum(0, fixed + pool * (eps + share) * S) + .5).astype(int)   # lines 17 to 19


def pool_max(x, width):
    return np.array([x[max(0, j - width // 2):j + width // 2 + 1].max() for j in range(len(x))])


def mean_scores(t):
    """The scores (L,H) of the file that the trace was made with: a head has a number a run."""
    file = json.loads((t.beside("option.head-scores")).read_text())
    mean = {head: np.float32(np.mean(runs)) for head, runs in file.items()}
    return np.array([[mean["%d-%d" % (i, j)] for j in range(t.H)] for i in range(t.L)], float)


def main(t, check):
    B, w, kernel = int(t.meta["budget"]), int(t.option("obs-window")), int(t.option("kernel"))
    check.turns()
    scores = mean_scores(t)
    C = capacities(scores, B - w, t.option("head-beta"), .01)
    for l in t.layers:
        rows, held = Rows(t, l), [[] for _ in range(t.G)]       # tokens whose rows a KV head holds
        chosen = [[] for _ in range(t.H)]                       # of these, what a query head reads
        for p, base, step, T in t.passes():
            rows.add(p, base)
            new, q, n = list(range(base, base + T)), t.of(p, l, "q").astype(float), base + T
            at, out = "pass%04d.layer%02d." % (p, l), np.zeros(q.shape)
            held = [x + new for x in held]
            for h in range(t.H):
                g = h // t.R
                chosen[h] = chosen[h] + new if step >= 0 else held[g]
                k, v = rows.k[chosen[h], g], rows.v[chosen[h], g]
                A = attention(q[:, h], k, causal(base, n)[:, chosen[h]])
                out[:, h] = A @ v
                if step >= 0 or n <= B:
                    continue
                m = len(held[g]) - w                            # candidates
                score = pool_max(A[-w:].mean(0)[:m], kernel)
                check.near(at + "qhead%02d.dililazy.scores" % h, score)
                best = sorted(np.argsort(-score, kind="stable")[:C[l, h]])
                chosen[h] = [held[g][i] for i in best] + held[g][m:]
            check.near(at + "out", out)
            if step < 0:
                for h in range(t.H):
                    check.same(at + "qhead%02d.dililazy.chosen" % h, chosen[h])
                held = [sorted(set().union(*chosen[g * t.R:(g + 1) * t.R])) for g in range(t.G)]
                if n > B:
                    check.near(at + "dililazy.head_scores", scores[l], 1e-6)
                    check.same(at + "dililazy.budgets", C[l])
            check.rows(p, l, chosen if step >= 0 else None, held)
    check.done()


if __name__ == "__main__":
    main(*arguments("dililazy"))
