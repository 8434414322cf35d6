"""SONIC: a finished message becomes a few Nexus tokens, and its own rows are dropped. From q, k and v alone.

Nexus tokens (negative ids) are fed behind a message: K of them, never more than it has tokens. A text token sees every
earlier text token (Eq. 3) but those of finished messages (Eq. 4); Nexus tokens see those of their own and of earlier
messages (Eq. 5, causal across messages), and the message they stand for.
The first tokens are the system message, which is never compressed. Of a finished message only the Nexus rows are kept.
"""
from trace import Rows, arguments, attention
import numpy as np


def sees(a, b):
    """May token a see token b? Of both: (index, segment, is it a Nexus token)."""
    (i, seg, nexus), (j, seg_b, nexus_b) = a, b
    if nexus and nexus_b:
        return seg_b <= seg                             # Eq. 5
    if not nexus_b and seg_b >= 0:
        return j <= i and seg_b == seg                  # Eq. 4
    return j <= i                                       # Eq. 3


def main():
    t, check = arguments("sonic")
    K, system = int(t.option("sonic-k")), int(t.option("sonic-sink"))
    for l in t.layers:
        rows, tokens, held, finished = Rows(t, l), [], [], 0
        for p, base, step, T in t.passes():
            rows.add(p, base)
            tokens, held = tokens[:base], [i for i in held if i < base]
            ids = t.get(p, "tokens")
            nexus = bool(ids[0] < 0)
            if nexus:
                body = sum(seg == finished and not is_nexus for _, seg, is_nexus in tokens)
                check.same("pass %d: Nexus tokens of a message of %d" % (p, body), T, max(1, min(K, body)))
            new = [(i, finished if nexus or i >= system else -1, nexus) for i in range(base, base + T)]
            tokens, held = tokens + new, held + [i for i, _, _ in new]
            check.same("pass %d: segments" % p, [x[1] for x in tokens], t.get(p, "sonic.segments"))
            check.same("pass %d: Nexus tokens" % p, [x[2] for x in tokens], t.get(p, "sonic.nexus"))

            # Attention over the rows held, under the mask
            see = np.array([[sees(a, tokens[j]) for j in held] for a in new])
            q = t.of(p, l, "q").astype(float)
            for h in range(t.H):
                out = attention(q[:, h], rows.k[held, h // t.R], see) @ rows.v[held, h // t.R]
                check.near("pass %d, query head %d: out" % (p, h), out, t.of(p, l, "out")[:, h])
                if step >= 0:
                    check.same("pass %d: rows read" % p, [j for j, yes in zip(held, see[0]) if yes],
                               t.of(p, l, "qhead%02d.read" % h))

            finished += nexus                           # the message is finished: its text rows go
            held = [j for j in held if tokens[j][2] or not 0 <= tokens[j][1] < finished]
            for g in range(t.G):
                check.same("pass %d, head %d: kept" % (p, g), held, t.of(p, l, "head%02d.kept" % g))
    check.done()


main()
