"""LycheeCluster for Hugging Face transformers: a Cache, and the attention function that reads it.

Li, Liu, Lin, Hu, Zhang: LycheeCluster: Efficient Long-Context Inference with Structure-Aware Chunking and
Hierarchical KV Indexing. The definition is section 11 of kvcomp.c with its defaults, "D43" is a decision of
NOTES.md, and check.py holds this file against the program, decision by decision.

    import lychee, chunker
    model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="lychee")
    model.register_forward_pre_hook(lychee.hand_over, with_kwargs=True)
    cache = lychee.LycheeCache(model.config, chunker.token_texts(tokenizer), budget=1024)
    model.generate(ids, past_key_values=cache)

The text is cut into chunks that end where sentences or lines end, and the mean key of a chunk stands for its
tokens. Chunk keys are clustered by k-means; a decode step reads the chunks of the clusters that score best for
its query, beside the first rows and the recent ones. Every row stays stored.

    kbar_j = normalise(mean of the keys of chunk j)               (Sec. 4.1, the key of a chunk)
    r_u = max over the chunks j of cluster u of |kbar_j - mu_u|   (Sec. 4.1, covering radius)
    q.kbar_j <= q.mu_u + |q| r_u                                  (Eq. 2, the upper bound)

SHAPES: L layers; H query heads, G KV heads, R = H/G; D head_dim; T tokens of the pass; N rows; M chunks; K clusters.
Under tensor parallelism H and G count this process's heads: no group of heads looks at another one, so nothing is
exchanged. A layer's tensors lie where its keys lie, so layers may lie on several devices.

LEFT OUT: the coarse level (a flat scan reads what exact pruning reads), other ways to move a centre or to share a
list, sliding windows, and what common.py leaves out. A pass of one token is a decode step, any other is a prefill.
"""
import common
import torch
from chunker import Chunks
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def normalise(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()


def distance(v, mu):
    """|v - mu| in double: v and mu (..,D)."""
    return (v.double() - mu.double()).square().sum(-1).sqrt()


def above(r):
    """An f32 that is not below r, so that a radius goes on covering."""
    return torch.nextafter(r.float(), torch.full_like(r, torch.inf, dtype=torch.float32))


def round_bf16(x):
    return x.bfloat16().float()


class Index:
    """The clusters of chunks of one layer, for all its KV heads at once."""

    def __init__(self):
        self.M = 0                  # chunks taken in
        self.M_built = 0            # chunks there were at the last build; 0: there is no index yet
        self.size = None            # (M) tokens of a chunk
        self.mu = None              # (G,K,D) centres, rounded to bf16
        self.r = None               # (G,K) radii
        self.label = None           # (G,M) the cluster of a chunk
        self.filled = None          # (G,K) has the cluster a chunk?

    def follow(self, keys, start):
        """Takes in the chunks that were cut since the last pass; keys (G,N,D), chunk j is rows start[j] to
        start[j+1]-1. The index is built when the chunks have doubled, and grafted on in between (D41)."""
        M = len(start) - 1
        rebuild = M >= 2 * self.M_built
        first = 0 if rebuild else self.M
        spans = [(start[j], start[j + 1]) for j in range(first, M)]
        kbar = normalise(torch.stack([keys[:, a:b].float().mean(1) for a, b in spans], 1))     # Sec. 4.1: kbar_j
        if rebuild:
            self.build(kbar)                                            # Algorithm 1, line 3
            self.M_built = M
        else:
            for v in kbar.unbind(1):
                self.graft(v)                                           # Algorithm 1, line 22
        self.M = M
        self.size = torch.tensor(start, device=keys.device).diff()

    def build(self, kbar, iterations=10, chunks_per_cluster=2):
        """Spherical k-means of the chunk keys kbar (G,M,D), which starts from evenly spaced ones (Sec. 4.3).
        Centres are rounded once, before the last assignment."""
        G, M, D = kbar.shape
        K = -(-M // chunks_per_cluster)
        mu = kbar[:, [(2 * j + 1) * M // (2 * K) for j in range(K)]]
        for _ in range(iterations):
            label = (kbar @ mu.mT).argmax(-1)
            members = torch.nn.functional.one_hot(label, K).mT.float()  # (G,K,M)
            empty = members.sum(-1, keepdim=True) == 0
            mu = torch.where(empty, mu, normalise(members @ kbar))      # an empty cluster keeps its centre
        self.mu = round_bf16(mu)
        self.label = (kbar @ self.mu.mT).argmax(-1)
        self.filled = torch.nn.functional.one_hot(self.label, K).any(1)
        away = above(distance(kbar, self.mu.take_along_dim(self.label[..., None], 1)))
        self.r = mu.new_zeros(G, K).scatter_reduce(1, self.label, away, "amax")     # Sec. 4.1: r_u

    def graft(self, v):
        """One more chunk, of key v (G,D), joins the nearest cluster of each head. A centre moves if v lies outside
        its ball: the new ball is the smallest that holds the old ball and v.
            r' = max(r + |mu' - mu|, |v - mu'|)"""
        g = torch.arange(len(v), device=v.device)
        nearness = (self.mu @ v[..., None])[..., 0].masked_fill(~self.filled, -torch.inf)
        c = nearness.argmax(-1)                                         # (G) the nearest cluster
        mu, r = self.mu[g, c], self.r[g, c].double()
        d = distance(v, mu)
        step = ((d - r) / (2 * d))[:, None]                             # how far the centre goes towards v
        moved = round_bf16((mu + step * (v.double() - mu)).float())
        grown = above(torch.maximum(r + distance(moved, mu), distance(v, moved)))   # Sec. 4.4: r'
        outside = d > r
        self.mu[g, c] = torch.where(outside[:, None], moved, mu)
        self.r[g, c] = torch.where(outside, grown, self.r[g, c])
        self.label = torch.cat([self.label, c[:, None]], 1)

    def scores(self, q, beta):
        """S (G,K) for the queries q (G,R,D) of a step: of a group the best query head counts, and each has length 1,
        so that none wins by its scale. With beta 1 it is the upper bound."""
        length = q.norm(dim=-1, keepdim=True).clamp(min=1e-20)
        S = (q / length @ self.mu.mT).amax(1) + beta * self.r           # Eq. 2: q.mu_u + |q| r_u
        return S.masked_fill(~self.filled, -torch.inf)

    def retrieve(self, q, room, beta):
        """Which chunks are read (G,M): those of the best cluster, then those of the next one, equal ones by number,
        until the first chunk that does not fit into `room` tokens."""
        best_first = self.scores(q.float(), beta).argsort(dim=-1, descending=True, stable=True)
        place = best_first.argsort(dim=-1)                              # (G,K) of a cluster in that order
        order = place.take_along_dim(self.label, 1).argsort(dim=-1, stable=True)    # (G,M) chunks, as they are taken
        fits = self.size[order].cumsum(-1) <= room                      # no later chunk fits again: sizes are positive
        return torch.zeros_like(fits).scatter(1, order, fits)           # Algorithm 1, line 14: C_top


class LycheeLayer(DynamicLayer):
    """All rows of a layer, and its index. budget: rows read in a step, the first `sink` included; the recent rows
    come on top."""
    is_croppable = False

    def __init__(self, chunks, budget, sink, beta):
        super().__init__()
        self.chunks, self.budget, self.sink, self.beta = chunks, budget, sink, beta
        self.index = Index()

    def update(self, key_states, value_states, *args, **kwargs):
        """Before the rows of this pass are appended, the index takes in the chunks of the passes before: a step reads
        the index that the previous pass left (D43). There is none while every row is read anyway (D41)."""
        dense = self.get_seq_length() <= self.budget + self.chunks.buffer
        if len(self.chunks.start) - 1 > self.index.M and not dense:
            self.index.follow(self.keys[0], self.chunks.start)
        return super().update(key_states, value_states)

    def rows_to_read(self, q, N):
        """The rows of each KV head that the queries q (G,R,D) of a decode step read, ascending: the first ones, those
        of the chunks retrieved, and all behind the last chunk."""
        room = max(self.budget - self.sink, 0)
        indexed = self.index.retrieve(q, room, self.beta).repeat_interleave(self.index.size, 1)
        first = indexed.new_ones(len(q), self.sink)
        recent = indexed.new_ones(len(q), N - self.sink - indexed.shape[1])
        active = torch.cat([first, indexed, recent], 1)                 # (G,N) Algorithm 1, line 16: KV_active
        return [row.nonzero()[:, 0] for row in active]


class LycheeCache(common.TurnCache):
    """The cache of one dialogue. texts: chunker.token_texts(). The last `buffer` to buffer + 16 rows are recent ones;
    the first `full_layers` layers read every row."""
    name = "lychee"

    def __init__(self, config, texts, budget=1024, sink=16, buffer=128, full_layers=2, beta=0.0):
        if budget < sink:
            raise ValueError(f"a budget of {budget} rows has no room for the first {sink}")
        if getattr(config, "sliding_window", None):
            raise ValueError(f"lychee leaves sliding windows out, found one of {config.sliding_window} rows")
        self.chunks = Chunks(texts, sink, buffer)
        super().__init__(layers=[DynamicLayer() if l < full_layers else LycheeLayer(self.chunks, budget, sink, beta)
                                 for l in range(config.num_hidden_layers)])

    def read(self, ids):
        """A pass over the tokens ids (1,T) begins, and the text up to it is cut."""
        self.chunks.cut()
        self.chunks.ids += ids[0].tolist()


def hand_over(model, args, kwargs):
    """Forward pre-hook of the model: the cache gets the ids of the pass, and the attention function the cache."""
    args, kwargs, ids = common.hand_over(LycheeCache, model, args, kwargs)
    kwargs["lychee"].read(ids)
    return args, kwargs


def lychee_attention(module, query, key, value, attention_mask, scaling, lychee=None, **kwargs):
    """query (1,H,T,D), key and value (1,G,N,D) -> (1,T,H,D). A prefill, and a layer without an index, reads every
    row; a decode step reads what each KV head's index retrieves."""
    layer = common.layer_of(lychee, module, "lychee")
    if query.shape[2] > 1 or not isinstance(layer, LycheeLayer) or not layer.index.M_built:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    q = query[0, :, 0].unflatten(0, (key.shape[1], -1))                 # (G,R,D)
    out = []
    for g, rows in enumerate(layer.rows_to_read(q, key.shape[2])):
        p = (q[g] @ key[0, g, rows].mT * scaling).float().softmax(-1)   # (R, rows read)
        out.append(p.to(value.dtype) @ value[0, g, rows])               # Eq. 1
    return torch.cat(out)[None, None], None


AttentionInterface.register("lychee", lychee_attention)
AttentionMaskInterface.register("lychee", sdpa_mask)
