"""LycheeCluster: the text in chunks, chunks in clusters, a decode step reads the best clusters. From q and k alone.

Build. A chunk's key is the mean of its tokens' keys, of length 1. Spherical k-means of the chunk keys gives clusters:
centres in bf16, radius = the farthest chunk key. Built again when the chunks have doubled.
Graft. A new chunk joins the cluster with the largest dot product; the ball becomes the smallest one that holds the old
ball and the new key.
Read. A cluster's score is the largest cosine of the group's query heads with its centre, which has length 1. Chunks of
the best clusters are read until one does not fit into the budget; besides, the first rows and the recent ones.
"""
from trace import Rows, arguments, attention, causal
import numpy as np


def bf16(x):
    """To the nearest bf16, ties to even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000).astype(np.uint32).view(np.float32).astype(float)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-12)


def chunk_keys(k, ends, sink):
    starts = np.concatenate([[sink], ends[:-1]])
    return np.array([unit(k[a:b].mean(0)) for a, b in zip(starts, ends)])


def kmeans(x, K, iters):
    n = len(x)
    mu = x[[(2 * j + 1) * n // (2 * K) for j in range(K)]]
    for _ in range(iters):
        label = (x @ mu.T).argmax(1)
        mu = np.array([unit(x[label == j].sum(0)) if (label == j).any() else mu[j] for j in range(K)])
    mu = bf16(mu)
    return mu, (x @ mu.T).argmax(1)


def build(x, per_cluster, iters):
    K = -(-len(x) // per_cluster)
    mu, parent = kmeans(x, K, iters)
    radius = np.array([max([np.linalg.norm(v - mu[j]) for v in x[parent == j]], default=0) for j in range(K)])
    return [mu, radius, list(parent)]


def graft(tree, v):
    mu, radius, parent = tree
    c = int((mu @ v).argmax())
    d = np.linalg.norm(v - mu[c])
    if d > radius[c]:                                   # the smallest ball around the old one and v
        moved = bf16(mu[c] + (d - radius[c]) / (2 * d) * (v - mu[c]))
        radius[c] = max(radius[c] + np.linalg.norm(moved - mu[c]), np.linalg.norm(v - moved))
        mu[c] = moved
    parent.append(c)


def read_chunks(score, parent, ends, sink, room):
    """The chunks of the best clusters, as long as they fit, and the clusters they are of."""
    size = np.diff(np.concatenate([[sink], ends]))
    taken, clusters, tokens = [], [], 0
    for c in np.argsort(-score, kind="stable"):
        for j in [j for j, p in enumerate(parent) if p == c]:
            if tokens + size[j] > room:
                return taken, clusters
            taken.append(j)
            clusters += [c] if c not in clusters else []
            tokens += size[j]
    return taken, clusters


def main(t, check):
    sink, buffer, most = (int(t.option(x)) for x in ("sink", "lychee-buffer", "lychee-chunk-max"))
    per, iters = 2, 10              # chunks a cluster, iterations of k-means
    B = int(t.meta["budget"])
    check.turns()
    for l in t.layers:
        rows, ends, trees, built = Rows(t, l), [], [None] * t.G, 0
        for p, base, step, T in t.passes():
            rows.add(p, base)
            n, q = base + T, t.of(p, l, "q").astype(float)
            at, out, read = "pass%04d.layer%02d." % (p, l), np.zeros(q.shape), [list(range(n))] * t.G
            for g in range(t.G if step >= 0 and built and n > B + buffer else 0):
                mu, radius, parent = trees[g]
                group = q[0, g * t.R:(g + 1) * t.R]
                score = (group / np.linalg.norm(group, axis=1)[:, None] @ mu.T).max(0)
                check.near(at + "head%02d.lychee.scores" % g, score, 1e-5)
                start, read[g] = [sink] + ends, list(range(sink))
                chunks, clusters = read_chunks(score, parent, ends, sink, B - sink)
                check.same(at + "head%02d.lychee.clusters" % g, clusters, any_order=True)
                for j in sorted(chunks):
                    read[g] = read[g] + list(range(start[j], start[j + 1]))
                read[g] = read[g] + list(range(ends[-1], n))
            for h in range(t.H):
                g = h // t.R
                see = causal(base, n)[:, read[g]]
                out[:, h] = attention(q[:, h], rows.k[read[g], g], see) @ rows.v[read[g], g]
            check.near(at + "out", out)
            check.rows(p, l, [read[h // t.R] for h in range(t.H)] if step >= 0 else None, [range(n)] * t.G)

            # The end of the pass: these ids have no text, so every chunk is as long as it may be
            old = len(ends)
            while (built or n > B + buffer) and n - (ends[-1] if ends else sink) >= max(buffer, 1) + most:
                ends.append((ends[-1] if ends else sink) + most)
            if len(ends) == old:
                continue
            check.same("pass%04d.lychee.chunk_ends" % p, ends)
            rebuild = len(ends) >= 2 * built
            built = len(ends) if rebuild else built
            for g in range(t.G):
                x = chunk_keys(rows.k[:, g], np.array(ends), sink)
                if rebuild:
                    trees[g] = build(x, per, iters)
                for v in x[old:] if not rebuild else []:
                    graft(trees[g], v)
                names = [at + "head%02d.lychee.%s" % (g, x) for x in ("centres", "radii", "parents")]
                check.near(names[0], trees[g][0], 2 ** -8)
                check.near(names[1], trees[g][1], 2 ** -8)
                check.same(names[2], trees[g][2])
                trees[g][:2] = [t.tensors[x].astype(float) for x in names[:2]]      # their last bit of bf16
    check.done()


if __name__ == "__main__":
    main(*arguments("lychee"))
