"""DiliLazyKV for Hugging Face transformers: a Cache whose heads hold rows of their own, and its attention function.

DiliLazyKV: Diligent-Lazy Head Effect on Robust KV Cache Compression. Anonymous ACL submission. The definition is
section 13 of kvcomp.c with its defaults, "D11" is a decision of NOTES.md, and check.py holds this file against the
program, row by row.

    import dililazy
    model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="dililazy")
    model.register_forward_pre_hook(dililazy.hand_over, with_kwargs=True)
    scores = dililazy.read_scores("head_scores.json")           # kvcomp --calibrate measures them
    cache = dililazy.DiliLazyCache(model.config, scores, budget=128)
    model.generate(ids, past_key_values=cache)

Some heads find the facts that an answer needs, others look over the whole text. Each head has a score, measured once
per model. At the end of every turn's prefill the budget is shared out by these scores, and each query head keeps the
rows its last queries attend to most. A KV head stores the union of what its query heads read; the rest is dropped.

    b_fixed = b_c (1 - 1/beta)        B_total = b_c / beta L H              (Algorithm 1, lines 3 and 4)
    S_{j,h} = H_{j,inf} / L_{i,alpha}          L_{i,h} = L_{i,alpha} / L_s  (lines 14 and 16)
    b_dyn = B_total (eps + L_{i,h}) S_{j,h} / (1 + eps L)                   (line 17, its overspending divided out)
    C_{i,j} = floor(max(0, b_fixed + b_dyn) + 0.5)                          (lines 18 and 19)

SHAPES: L layers; H query heads, G KV heads, R = H/G; D head_dim; T tokens of the pass; n rows of one KV head, which
differ from head to head. Under tensor parallelism H and G count this process's heads; the shares are those of the
whole model, and each process takes its part of them. A layer's tensors lie where its keys lie, so layers may lie on
several devices.

LEFT OUT: one capacity for a whole KV head, the authors' arithmetic, sliding windows, and what common.py leaves out. A
pass of one token is a decode step, any other is a turn's prefill and ends with rows dropped.
"""
import json
import math

import common
import torch
from torch.nn.functional import max_pool1d, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin


def read_scores(path, which="inf"):
    """The scores (L,H) of a file made by kvcomp --calibrate; a head's key is "layer-head"."""
    with open(path) as f:
        file = json.load(f)
    mean = {head: sum(runs) / len(runs) for head, runs in file[which].items()}
    return [[mean[f"{i}-{j}"] for j in range(file["heads"])] for i in range(file["layers"])]


def capacities(scores, b_c, beta=1.351, eps=0.01):
    """C (L,H) of Algorithm 1: how many candidates each query head may read. scores (L,H) >= 0; b_c: those it may read
    on average. A layer without any score shares evenly, and so does a model without any."""
    L, H = len(scores), len(scores[0])
    b_fixed = b_c * (1 - 1 / beta)                                      # Algorithm 1, line 3
    B_total = b_c / beta * L * H / (1 + eps * L)                        # line 4
    L_s = sum(map(sum, scores))                                         # line 13
    C = []
    for layer in scores:
        L_alpha = sum(layer)                                            # line 8
        L_h = L_alpha / L_s if L_s > 0 else 1 / L                       # line 16
        S = [H_inf / L_alpha if L_alpha > 0 else 1 / H for H_inf in layer]      # line 14
        b = [b_fixed + B_total * ((eps + L_h) * S_j) for S_j in S]      # lines 17 and 18
        C.append([math.floor(max(0, b_j) + .5) for b_j in b])           # line 19
    return C


class DiliLazyLayer(CacheLayerMixin):
    """The rows of one layer, head by head."""
    is_croppable = False
    supports_early_init = False

    def __init__(self, capacity, budget, window, kernel):
        super().__init__()
        self.capacity = capacity    # (H) candidates that a query head may read
        self.budget = budget        # rows that a query head reads on average, its last ones included
        self.window = window        # w: so many last queries score the rows, and so many last rows stay
        self.kernel = kernel        # width of the neighbourhood that shares a score, odd
        self.seen = 0               # tokens of the dialogue
        self.keys = self.values = None  # (G) each (n,D)
        self.token = None           # (G) each (n): the token of a row
        self.view = None            # (H) each (n): does the query head read the row of its KV head?

    def lazy_initialization(self, key_states, value_states):
        G, D = key_states.shape[1], key_states.shape[3]
        self.keys = [key_states.new_empty(0, D) for _ in range(G)]
        self.values = [value_states.new_empty(0, D) for _ in range(G)]
        self.token = [torch.empty(0, dtype=torch.long, device=key_states.device) for _ in range(G)]
        self.view = [torch.empty(0, dtype=torch.bool, device=key_states.device) for _ in self.capacity]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Appends the rows (1,G,T,D) of a pass to every head. What it returns nobody reads: the rows of heads that
        differ in length are no tensor, so the attention function takes them from the layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        T = key_states.shape[2]
        tokens = torch.arange(self.seen, self.seen + T, device=key_states.device)
        for g in range(len(self.keys)):
            self.keys[g] = torch.cat([self.keys[g], key_states[0, g]])
            self.values[g] = torch.cat([self.values[g], value_states[0, g]])
            self.token[g] = torch.cat([self.token[g], tokens])
        self.view = [torch.cat([rows, rows.new_ones(T)]) for rows in self.view]
        self.seen += T
        return key_states, value_states

    def get_seq_length(self):
        """The tokens of the dialogue, not the rows held: from this the model counts positions."""
        return self.seen

    def get_max_length(self):
        return -1

    def get_mask_sizes(self, query_length):
        return self.seen + query_length, 0

    def visible(self, g, T):
        """(T,n): which rows of KV head g the queries of its last T tokens see: none of a later token."""
        n = len(self.keys[g])
        return torch.ones(T, n, dtype=torch.bool, device=self.keys[g].device).tril(n - T)

    def window_scores(self, g, q, scaling):
        """The mean softmax row (R,n) of the last queries q (R,w,D) over all rows of KV head g (D11)."""
        s = (q @ self.keys[g].mT * scaling).float()
        return s.masked_fill(~self.visible(g, q.shape[1]), -torch.inf).softmax(-1).mean(1)

    def prefill(self, q, scaling):
        """q (G,R,T,D) -> (H,T,D): every query head attends to all rows that its KV head holds. Then the layer
        drops rows, if it has seen more tokens than the budget (D9, D10)."""
        R, T = q.shape[1:3]
        out = [scaled_dot_product_attention(q[g], self.keys[g].expand(R, -1, -1), self.values[g].expand(R, -1, -1),
                                            attn_mask=self.visible(g, T), scale=scaling) for g in range(len(q))]
        for g in range(len(q) if self.seen > self.budget else 0):
            self.compress(g, self.window_scores(g, q[g, :, -self.window:], scaling))
        return torch.cat(out)

    def compress(self, g, score):
        """Each query head of KV head g reads its best candidates by score (R,n) and the last w rows; rows that none
        of them reads are dropped (Sec. 3.3)."""
        R, n = score.shape
        w = min(self.window, n)
        pooled = score[:, :n - w]                                       # of the candidates
        if n > w:
            pooled = max_pool1d(pooled[None], self.kernel, 1, self.kernel // 2)[0]
        best_first = pooled.argsort(dim=-1, descending=True, stable=True)       # equal ones by row
        reads = torch.zeros(R, n, dtype=torch.bool, device=score.device)
        reads[:, n - w:] = True
        for r in range(R):
            reads[r, best_first[r, :self.capacity[g * R + r]]] = True

        held = reads.any(0)                                             # the union of what the group reads
        self.keys[g], self.values[g] = self.keys[g][held], self.values[g][held]
        self.token[g] = self.token[g][held]
        self.view[g * R:(g + 1) * R] = reads[:, held].unbind()

    def decode(self, q, scaling):
        """q (G,R,1,D) -> (H,1,D): every query head attends to the rows of its view."""
        out, R = [], q.shape[1]
        for h, rows in enumerate(self.view):
            g, r = h // R, h % R
            p = (q[g, r] @ self.keys[g][rows].mT * scaling).float().softmax(-1)
            out.append(p.to(self.values[g].dtype) @ self.values[g][rows])
        return torch.stack(out)


class DiliLazyCache(common.TurnCache):
    """The cache of one dialogue. scores (L,H) are those of the whole model; under tensor parallelism this process
    holds the heads of rank tp_rank of tp_size."""
    name = "dililazy"

    def __init__(self, config, scores, budget=128, window=16, kernel=7, tp_rank=0, tp_size=1):
        if budget <= window:
            raise ValueError(f"a budget of {budget} leaves no row beside the last {window}")
        if getattr(config, "sliding_window", None):
            raise ValueError(f"dililazy leaves sliding windows out, found one of {config.sliding_window} rows")
        H = config.num_attention_heads // tp_size
        mine = slice(tp_rank * H, (tp_rank + 1) * H)
        C = capacities(scores, budget - window)
        super().__init__(layers=[DiliLazyLayer(C_i[mine], budget, window, kernel) for C_i in C])


def hand_over(model, args, kwargs):
    """Forward pre-hook of the model: the attention function gets the cache."""
    return common.hand_over(DiliLazyCache, model, args, kwargs)[:2]


def dililazy_attention(module, query, key, value, attention_mask, scaling, dililazy=None, **kwargs):
    """query (1,H,T,D) -> (1,T,H,D). key and value hold the rows of this pass only: the layer holds all others."""
    layer = common.layer_of(dililazy, module, "dililazy")
    q = query[0].unflatten(0, (key.shape[1], -1))                       # (G,R,T,D)
    out = layer.decode(q, scaling) if query.shape[2] == 1 else layer.prefill(q, scaling)
    return out.transpose(0, 1)[None], None


AttentionInterface.register("dililazy", dililazy_attention)             # no mask is registered, so none is made
