"""LoopServe for Hugging Face transformers: a Cache, and the attention function that reads it.

Li, Xu, Li, Chen, Li, Tian, Xiao, Deng, Wang, Li, Chen, Yuan: LoopServe: An Adaptive Dual-phase LLM Inference
Acceleration System for Multi-Turn Dialogues. arXiv 2507.13681. The definition is section 9 of kvcomp.c with its
defaults, "D33" is a decision of NOTES.md, and check.py holds this file against the program, line by line.

    import loopserve
    model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="loopserve")
    model.register_forward_pre_hook(loopserve.hand_over, with_kwargs=True)
    cache = loopserve.LoopServeCache(model.config, budget=1024)
    model.generate(ids, past_key_values=cache)
    cache.new_turn()                                            # then generate() with the ids of the whole dialogue

A prompt attends along lines of the attention matrix: verticals, which are columns, and slashes, which are offsets
row - column. Each head chooses them anew from a sample of the prompt's own queries (Algorithm 2). In decode each KV
head chooses the rows it reads, every `interval` tokens, by the last `obs` queries (Algorithm 3). Every row stays.

    min  sum of the lengths l_x = n - max(x, p0) of the lines  s.t.  they hold alpha of the attention        (Eq. 1)
    X^ = [y_(j-1), X_j]         a turn prefills the answer before it again: new_turn()      (Definition 1)

SHAPES: H query heads, G KV heads, R = H/G; D head_dim; T tokens of the pass; N rows, of which those from p0 = N - T on
are the pass's own; m samples. Under tensor parallelism H and G count this process's heads, which need nothing from
others. The lines become a mask: what is saved is what a kernel that skips masked tiles saves.

LEFT OUT: variant a (--paper), sliding windows, and what common.py leaves out.
"""
from dataclasses import make_dataclass

import common
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer

DEFAULTS = dict(budget=1024, alpha=.98, samples=64, min_context=1024, max_cells=.33, sink=4, local=64, seed=1, first=16,
                interval=16, obs=16)
Rule = make_dataclass("Rule", [(name, type(value), value) for name, value in DEFAULTS.items()])     # the options

LEAST_GAIN, MASK = 1e-12, (1 << 64) - 1         # a line that adds no more counts as nothing; of 64-bit numbers


def mix64(state):
    """SplitMix64: the number behind a state."""
    z = state + 0x9e3779b97f4a7c15 & MASK
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
    return z ^ z >> 31


def sample_rows(T, m, seed, turn, layer):
    """RandomSelect (Algorithm 2, line 1): one of the T rows from each of m strata; the last is the last row (D31)."""
    state, rows = mix64(mix64(mix64(seed) ^ turn) ^ layer), []
    for i in range(m):
        low, high = i * T // m, (i + 1) * T // m
        rows.append(low + mix64(state) % (high - low))
        state = state + 0x9e3779b97f4a7c15 & MASK
    return rows[:-1] + [T - 1]


def choose_lines(P, row, p0, alpha, sink, local, max_cells):
    """Greedy for Eq. 1: the line that adds most attention per cell, until the lines hold alpha of the samples'
    attention. P (m,N) are the softmax rows of the sampled rows `row` (m). From 32 samples on the odd ones only
    validate. -> verticals (N) and slashes (N), true where chosen; None: too many cells, compute in full."""
    m, N = P.shape
    x = torch.arange(N)
    length = (N - x.clamp(min=p0)).double()                             # Eq. 1: l_x, of either kind
    offset = row[:, None] - x                                           # (m,N) of a cell; below 0: not seen
    seen = offset >= 0
    P = P.double() * seen
    V, S = x < sink, x < local                                          # these are always taken (D33)
    kept = (V | S[offset.clamp(min=0)]) & seen
    validate = (torch.arange(m) % 2 == 1) & (m >= 32)
    total, held = (torch.stack([x[~validate].sum(), x[validate].sum()]) for x in (P, P * kept))

    # What each line would add: slashes first, because of equal lines they are taken first
    left = P * ~kept * ~validate[:, None]
    slash = torch.zeros(N, dtype=torch.double).index_add(0, offset[seen], left[seen])
    gain, length2 = torch.cat([slash, left.sum(0)]), torch.cat([length, length])
    cells, most = length[V].sum() + length[S].sum(), max_cells * (N * (N + 1) - p0 * (p0 + 1)) / 2

    while (held < alpha * total).any():
        per_cell = torch.where(gain > LEAST_GAIN, gain / length2, -torch.inf)
        best = per_cell.argmax().item()
        if per_cell[best] == -torch.inf:
            break
        line, is_slash = best % N, best < N
        held[0] += gain[best]
        gain[best] = 0
        (S if is_slash else V)[line] = True
        other = row - line                      # in every sampled row, the line of the other kind that crosses it here
        crosses = other >= 0
        crosses &= ~(V if is_slash else S)[other.clamp(min=0)]
        cell = P[torch.arange(m), other.clamp(min=0) if is_slash else torch.full_like(other, line)] * crosses
        held[1] += cell[validate].sum()
        mine = crosses & ~validate
        gain[other[mine] + (N if is_slash else 0)] -= cell[mine]
        cells += length[line]
        if cells > most:
            return None
    return None if held[1] < alpha * total[1] else (V, S)


class LoopServeLayer(DynamicLayer):
    """All rows of a layer, the lines of the last prompt and the rows that decode reads."""
    is_croppable = False

    def __init__(self, number, rule):
        super().__init__()
        self.number, self.rule = number, rule
        self.turn = 0               # prompts so far
        self.prompt_end = 0         # rows there were when the last prompt ended
        self.step = 0               # tokens of this answer
        self.sampled = []           # rows that were sampled of the last prompt, counted from its first one
        self.lines = []             # (H) what choose_lines gave
        self.queries = None         # (H,up to obs,D) the last queries
        self.scores = None          # (G,prompt_end) what the last choice of rows was made by
        self.chosen = None          # (G,budget) the rows it chose; None: every row is read

    def prefill(self, q, k, v, scaling):
        """q (H,T,D), k and v (G,N,D) -> (H,T,D)."""
        rule, (H, T, _), N = self.rule, q.shape, k.shape[1]
        p0, R = N - T, H // len(k)
        m = rule.samples if T // 4 >= rule.samples and rule.alpha < 1 else 0
        self.sampled = sample_rows(T, m, rule.seed, self.turn, self.number) if m else []
        sampled, row = torch.tensor(self.sampled, dtype=torch.long), torch.tensor(self.sampled) + p0
        offset = torch.arange(p0, N)[:, None] - torch.arange(N)
        self.lines, out = [None] * H, []
        for h in range(H):
            see = offset >= 0
            if m and N > rule.min_context:
                s = (q[h, sampled] @ k[h // R].mT * scaling).float().cpu()
                P = s.masked_fill(offset[sampled] < 0, -torch.inf).softmax(-1)      # Algorithm 2, line 4: A[X~]
                self.lines[h] = choose_lines(P, row, p0, rule.alpha, rule.sink, rule.local, rule.max_cells)
            if self.lines[h]:
                V, S = self.lines[h]
                see = see & (V | S[offset.clamp(min=0)])
            out.append(scaled_dot_product_attention(q[h:h + 1], k[h // R:h // R + 1], v[h // R:h // R + 1],
                                                    attn_mask=see[None].to(q.device), scale=scaling))
        self.end_prompt(q, N)
        return torch.cat(out)

    def end_prompt(self, q, N):
        """An answer begins: its rows will be chosen among the N rows there are. q (H,T,D) are the prompt's queries."""
        self.queries, self.chosen = q[:, -self.rule.obs:], None
        self.turn, self.prompt_end, self.step = self.turn + 1, N, 0

    def choose_rows(self, k, scaling):
        """Algorithm 3, line 5: the B rows of the prompt with the largest sums of attention over the last queries and
        the heads of a group, equal ones by row."""
        G, N, w = len(k), k.shape[1], self.queries.shape[1]
        q = self.queries.unflatten(0, (G, -1))                          # (G,R,w,D)
        see = torch.ones(w, N, dtype=torch.bool, device=k.device).tril(N - w)
        A = (q @ k[:, None].mT * scaling).float().masked_fill(~see, -torch.inf).softmax(-1)
        self.scores = A.sum((1, 2))[:, :self.prompt_end] / w
        best_first = self.scores.argsort(dim=-1, descending=True, stable=True)
        self.chosen = best_first[:, :self.rule.budget].sort(-1).values

    def observe(self, q, k, scaling):
        """Remembers the query q (H,1,D) of a decode step, and chooses rows when that is due. k (G,N,D)."""
        self.queries = torch.cat([self.queries, q], 1)[:, -self.rule.obs:]      # Algorithm 3, line 4: X^obs
        self.step += 1
        since = self.step - self.rule.first
        if since >= 0 and since % self.rule.interval == 0 and self.prompt_end > self.rule.budget:   # line 3 (D37)
            self.choose_rows(k, scaling)

    def decode(self, q, k, v, scaling):
        """q (H,1,D), k and v (G,N,D) -> (H,1,D)."""
        self.observe(q, k, scaling)
        out = []
        for g, q_g in enumerate(q[:, 0].unflatten(0, (len(k), -1))):
            rows = self.rows_read(g, k.shape[1])
            p = (q_g @ k[g, rows].mT * scaling).float().softmax(-1)
            out.append(p.to(v.dtype) @ v[g, rows])
        return torch.cat(out)[:, None]

    def rows_read(self, g, N):
        """What a decode step of KV head g reads: the rows chosen and this answer's (Algorithm 3, line 7)."""
        if self.chosen is None:
            return torch.arange(N)
        return torch.cat([self.chosen[g], torch.arange(self.prompt_end, N, device=self.chosen.device)])


class LoopServeCache(common.TurnCache):
    """The cache of one dialogue; the options are DEFAULTS, as --help loopserve says them."""
    name = "loopserve"

    def __init__(self, config, **options):
        if getattr(config, "sliding_window", None):
            raise ValueError(f"loopserve leaves sliding windows out, found one of {config.sliding_window} rows")
        rule = Rule(**options)
        super().__init__(layers=[LoopServeLayer(l, rule) for l in range(config.num_hidden_layers)])

    def new_turn(self):
        """The answer's rows go, because decode steps that read chosen rows only made them: the next prompt begins
        with the answer (Definition 1), as generate() does when it gets the whole dialogue's ids."""
        super().new_turn()
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[:, :, :layer.prompt_end], layer.values[:, :, :layer.prompt_end]


def hand_over(model, args, kwargs):
    """Forward pre-hook of the model: the attention function gets the cache."""
    return common.hand_over(LoopServeCache, model, args, kwargs)[:2]


def loopserve_attention(module, query, key, value, attention_mask, scaling, loopserve=None, **kwargs):
    """query (1,H,T,D), key and value (1,G,N,D) -> (1,T,H,D)."""
    layer = common.layer_of(loopserve, module, "loopserve")
    attend = layer.decode if query.shape[2] == 1 else layer.prefill
    return attend(query[0], key[0], value[0], scaling).transpose(0, 1)[None], None


AttentionInterface.register("loopserve", loopserve_attention)           # no mask is registered, so none is made
