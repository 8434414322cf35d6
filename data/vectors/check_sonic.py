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


def plan(turns, K, system):
    """The passes: when a turn begins, the one before is truncated behind its prompt; Nexus tokens stand for the
    prompt; the answer is fed again, and Nexus tokens stand for it, too. Of these the token j of turn t has the id
    -1 - (64 t + j). Positions count every token (augmented)."""
    passes, n, nexus = [], 0, lambda t, body: [-1 - (64 * t + j) for j in range(max(1, min(K, body)))]
    for t, (prompt, said) in enumerate(turns):
        if t:
            first, answer = n - len(turns[t - 1][1]), turns[t - 1][1]
            body = len(turns[t - 1][0]) - (system if t == 1 else 0)
            ids = nexus(t - 1, body)
            again = first + len(ids)
            ids2 = nexus(t - 1, len(answer))
            passes += [(first, -1, ids, first), (again, -1, answer, again),
                       (again + len(answer), -1, ids2, again + len(answer))]
            n = again + len(answer) + len(ids2)
        passes.append((n, -1, prompt, n))
        n += len(prompt)
        passes += [(n + i, i, [token], n + i) for i, token in enumerate(said)]
        n += len(said)
    return passes


def main(t, check):
    K, system = int(t.option("sonic-k")), int(t.option("sink"))
    check.passes(plan(t.turns(), K, system))
    for l in t.layers:
        rows, tokens, held, finished = Rows(t, l), [], [], 0
        for p, base, step, T in t.passes():
            rows.add(p, base)
            at = "pass%04d." % p
            tokens, held = tokens[:base], [i for i in held if i < base]
            nexus = bool(t.get(p, "tokens")[0] < 0)
            new = [(i, finished if nexus or i >= system else -1, nexus) for i in range(base, base + T)]
            tokens, held = tokens + new, held + [i for i, _, _ in new]
            check.same(at + "sonic.segments", [x[1] for x in tokens])
            check.same(at + "sonic.nexus", [x[2] for x in tokens])

            # Attention over the rows held, under the mask
            see = np.array([[sees(a, tokens[j]) for j in held] for a in new])
            q = t.of(p, l, "q").astype(float)
            out = [attention(q[:, h], rows.k[held, h // t.R], see) @ rows.v[held, h // t.R] for h in range(t.H)]
            check.near(at + "layer%02d.out" % l, np.stack(out, 1))
            read = [[j for j, yes in zip(held, see[0]) if yes]] * t.H
            finished += nexus                           # the message is finished: its text rows go
            held = [j for j in held if tokens[j][2] or not 0 <= tokens[j][1] < finished]
            check.rows(p, l, read if step >= 0 else None, [held] * t.G)
    check.done()


if __name__ == "__main__":
    main(*arguments("sonic"))
