"""PATS for Hugging Face transformers: a Cache that packs old rows into fewer bits.

PATS: Position-Adaptive Temporal Sparsity for KV Caches in Long-Context LLMs. The definition is section 10 of kvcomp.c
with its defaults, "D24" is a decision of NOTES.md, and check.py holds this file against the program, byte for byte.

    import pats
    cache = pats.PatsCache(model.config)
    model.generate(ids, past_key_values=cache)                  # any attn_implementation: this is a cache, no more

No token is dropped. The rows of old tokens lose low bits of their f16 numbers, and how many depends on where the token
stands among the T tokens seen, so that one list of bits serves all layers and heads. A token that has lost b bits
takes w = 16 - b bits a number.

    b(t,T) = max(b_min, min(b_max, round(b_min + b_max u))),   u = 1 - |2x - 1|,   x = (t-1)/(T-1)      (Sec. 3, b(t))

The first `sink` tokens lose b_min bits, the last `window` ones none. Bits that are cut are gone, so a token's b only
grows: all rows are packed anew whenever T has grown by an eighth (D24). A pass reads what the passes before it left
(D26). A Cache has no hook at a pass's end, so rows are packed when the next pass brings its own; until then a prompt's
rows are raw in all layers, where kvcomp has one raw layer at most.

SHAPES: G KV heads; D head_dim, a multiple of 8; n rows; w bits of a number. A region is a run of rows with the same b.

LEFT OUT: the schedules old and new, the policy static, rounding and the paper's 64-byte blocks (--pats-schedule,
-policy, -round, -format), taking tokens back. An attention_mask is honoured, and inputs_embeds are, because neither
changes what is stored.
"""
import common
import torch
from transformers.cache_utils import CacheLayerMixin


def schedule(T, b_min, b_max, sink, window):
    """b(t,T) of tokens 0 to T-1 as whole numbers (T), rounded half up."""
    i = torch.arange(T)
    n = max(T - 1, 1)
    f = (2 * b_min * n + 4 * b_max * torch.minimum(i, T - 1 - i) + n).div(2 * n, rounding_mode="floor")
    bits = f.clamp(b_min, b_max)                                        # Sec. 3, b(t)
    bits[:sink] = b_min
    bits[max(T - window, 0):] = 0
    return bits


def pack(rows, b):
    """rows (G,n,D) f16 -> (G, nDw/8) bytes: the upper w = 16 - b bits of each number, low bits first, as one stream
    a head (Sec. 3, w)."""
    w = 16 - b
    number = (rows.contiguous().view(torch.int16).int() & 0xffff) >> b
    bit = (number[..., None] >> torch.arange(w, device=rows.device)) & 1        # (G,n,D,w)
    eight = bit.reshape(len(rows), -1, 8) << torch.arange(8, device=rows.device)
    return eight.sum(-1).to(torch.uint8)


def unpack(data, b, D):
    """The rows (G,n,D) f16 again, the bits that were cut as zeros."""
    w = 16 - b
    bit = (data[..., None].int() >> torch.arange(8, device=data.device)) & 1
    number = (bit.reshape(len(data), -1, D, w) << torch.arange(w, device=data.device)).sum(-1) << b
    return number.to(torch.int16).view(torch.float16)


def runs(bits):
    """bits (n) as runs of equal ones: a list of (first row, rows, bits)."""
    value, count = torch.unique_consecutive(bits, return_counts=True)
    first = (count.cumsum(0) - count).tolist()
    return list(zip(first, count.tolist(), value.tolist()))


class PatsLayer(CacheLayerMixin):
    """The rows of one layer: regions of packed ones, and behind them raw ones."""
    supports_early_init = False

    def __init__(self, b_min, b_max, sink, window):
        super().__init__()
        self.b_min, self.b_max, self.sink, self.window = min(b_min, b_max), b_max, sink, window
        self.bits = torch.empty(0, dtype=torch.long)    # (tokens) B[t]: the bits that a token has lost
        self.T_last = 0             # tokens there were when B[t] was raised last
        self.regions = []           # (first row, rows, bits) each
        self.packed = []            # of every region the bytes of K and of V, (G,bytes) each

    def lazy_initialization(self, key_states, value_states):
        if key_states.shape[-1] % 8:
            raise ValueError(f"pats: head_dim is {key_states.shape[-1]}, needs a multiple of 8: rows end on a byte")
        self.dtype, self.D = key_states.dtype, key_states.shape[-1]
        self.keys = key_states[0, :, :0].half()         # (G,n,D) raw rows
        self.values = value_states[0, :, :0].half()
        self.is_initialized = True

    def rows(self):
        """All rows as attention reads them: K and V (G,N,D) f16."""
        K = [unpack(k, b, self.D) for (k, _), (_, _, b) in zip(self.packed, self.regions)]
        V = [unpack(v, b, self.D) for (_, v), (_, _, b) in zip(self.packed, self.regions)]
        return torch.cat([*K, self.keys], 1), torch.cat([*V, self.values], 1)

    def repack(self):
        """The end of a pass: if T has grown by an eighth since the last time, B[t] is raised, and the rows outside
        the window are packed with the bits it says. Does nothing the second time."""
        T = len(self.bits)
        if not T or not self.b_max or 8 * T < 9 * self.T_last:
            return
        self.T_last = T
        self.bits = torch.maximum(self.bits, schedule(T, self.b_min, self.b_max, self.sink, self.window))
        cut = T - self.window
        if cut <= 0:
            return
        K, V = self.rows()
        self.regions = runs(self.bits[:cut])
        self.packed = [(pack(K[:, a:a + n], b), pack(V[:, a:a + n], b)) for a, n, b in self.regions]
        self.keys, self.values = K[:, cut:].clone(), V[:, cut:].clone()

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.repack()
        self.keys = torch.cat([self.keys, key_states[0].half()], 1)
        self.values = torch.cat([self.values, value_states[0].half()], 1)
        self.bits = torch.cat([self.bits, torch.zeros(key_states.shape[2], dtype=torch.long)])
        K, V = self.rows()
        return K[None].to(self.dtype), V[None].to(self.dtype)

    def bytes(self):
        """What the layer holds."""
        raw = self.keys.numel() + self.values.numel() if self.is_initialized else 0
        return 2 * raw + sum(k.numel() + v.numel() for k, v in self.packed)

    def get_seq_length(self):
        return len(self.bits)

    def get_max_length(self):
        return -1

    def get_mask_sizes(self, query_length):
        return len(self.bits) + query_length, 0


class PatsCache(common.TurnCache):
    """The cache of one dialogue."""
    name = "pats"

    def __init__(self, config, b_min=2, b_max=8, sink=16, window=128):
        if not 0 <= b_min or not 0 <= b_max <= 10:
            raise ValueError(f"pats cuts 0 to 10 bits, the mantissa of f16, found b_min {b_min} and b_max {b_max}")
        if getattr(config, "sliding_window", None):
            raise ValueError(f"pats leaves sliding windows out, found one of {config.sliding_window} rows")
        super().__init__(layers=[PatsLayer(b_min, b_max, sink, window) for _ in range(config.num_hidden_layers)])

    def bytes(self):
        """Of K and V in all layers; the list of bits is B[t], a number a token."""
        return sum(layer.bytes() for layer in self.layers)
