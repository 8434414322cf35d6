"""PATS: old tokens lose low bits, and their rows are packed. From k and v alone.

b(t,T) = max(b_min, min(b_max, round(b_min + b_max u))), u = 1 - |2x - 1|, x = (t-1)/(T-1): tokens in the middle lose
most. The first `sink` tokens lose b_min bits, the last `window` tokens none. Bits that are cut are gone: B[t] only
grows, whenever T has grown by an eighth since the last time.
A token that has lost b bits takes w = 16 - b bits an element. Rows of one w are a region: one stream of bits, low ones
first, that begins at a multiple of 64 bytes.
"""
from trace import Rows, arguments, attention, causal
import numpy as np


def schedule(T, b_min, b_max, sink, window):
    """The bits that tokens 0.. lose when T have been seen."""
    bits = np.zeros(T, int)
    for i in range(max(T - window, 0)):
        f = b_min
        if i >= sink and T > 1:
            f = (2 * b_min * (T - 1) + 4 * b_max * min(i, T - 1 - i) + (T - 1)) // (2 * (T - 1))
        bits[i] = max(b_min, min(b_max, f))
    return bits


def cut(row, b):
    """f16 numbers without their b lowest bits, as whole numbers."""
    return row.astype(np.float16).view(np.uint16) >> np.uint16(b) << np.uint16(b)


def pack(rows, bits):
    """rows (n,D): the regions (row0, n, w, base), and the bytes."""
    out, regions, i = bytearray(), [], 0
    while i < len(rows):
        n = 1
        while i + n < len(rows) and bits[i + n] == bits[i]:
            n += 1
        w = 16 - int(bits[i])
        out += bytes(-len(out) % 64)
        regions.append((i, n, w, len(out)))
        elements = cut(rows[i:i + n], bits[i]).reshape(-1).astype(int) >> bits[i]
        stream = (elements[:, None] >> np.arange(w)) & 1
        out += np.packbits(stream.astype(np.uint8).reshape(-1), bitorder="little").tobytes()
        i += n
    return regions, out + bytes(-len(out) % 8)


def main(t, check):
    b_min, b_max, sink, window = (int(t.option(x)) for x in ("pats-bmin", "pats-bmax", "sink", "pats-window"))
    check.turns(tol=2e-3)                               # k is f16
    for l in t.layers:
        rows, lost, T_last, packed = Rows(t, l), np.zeros(0, int), 0, 0
        for p, base, step, T in t.passes():
            rows.add(p, base)
            n, q = base + T, t.of(p, l, "q").astype(float)
            at, out = "pass%04d.layer%02d." % (p, l), np.zeros(q.shape)
            lost = np.concatenate([lost, np.zeros(T, int)])
            check.rows(p, l, [range(n)] * t.H if step >= 0 else None, [range(n)] * t.G)

            # Attention reads what the passes before have left of the rows
            for h in range(t.H):
                k, v = (np.array([cut(x[i, h // t.R], lost[i]).view(np.float16) for i in range(n)]).astype(float)
                        for x in (rows.k, rows.v))
                out[:, h] = attention(q[:, h], k, causal(base, n)) @ v
            check.near(at + "out", out)

            if 8 * n < 9 * T_last:
                continue                                # nothing is packed, and the trace must have no tensor of it
            T_last, packed = n, max(packed, n - window)
            lost = np.maximum(lost, schedule(n, b_min, b_max, sink, window))
            check.same("pass%04d.pats.bits" % p, lost)
            for g in range(t.G):
                for x, name in (rows.k, "k"), (rows.v, "v"):
                    regions, data = pack(x[:packed, g], lost)
                    check.same(at + "head%02d.pats.regions" % g, regions)
                    check.same(at + "head%02d.pats.packed_%s" % (g, name), list(data))
    check.done()


if __name__ == "__main__":
    main(*arguments("pats"))
