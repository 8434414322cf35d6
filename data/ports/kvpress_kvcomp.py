"""kvcomp's methods as presses of kvpress, which its pipeline and its evaluation run.

    import kvpress_kvcomp                                       # patches kvpress's attention function "sdpa"
    pipe = pipeline("kv-press-text-generation", model=DIR, model_kwargs={"attn_implementation": "sdpa"})
    press = kvpress_kvcomp.DiliLazyPress(scores=DIR + "/head_scores.json", budget=128)
    pipe(context, question=question, press=press)["answer"]
    PRESS_REGISTRY.update(kvpress_kvcomp.PRESSES)               # evaluation/evaluate_registry.py

Each press plays the layers of a port beside this file, which check.py holds against kvcomp, and hides from attention
what the port does not read: the same numbers, none of the saving. WHAT KVPRESS CANNOT FREE: its cache has one length
for all heads of a layer, so DiliLazyKV's and HeadKV's dropped rows stay, masked; it holds f16 numbers as they are, so
PATS cuts bits and packs nothing; LycheeCluster and LoopServe keep every row anyway. Memory is what full attention
takes, and a copy of K and V in the ports. SONIC is no press: it needs weights and passes of its own.

Turns: the context is a turn without an answer; what LycheeCluster and LoopServe read is chosen while the answer is
written, and the question is their second turn. DiliLazyKV and HeadKV compress the context, as every press does that
does not see the question; the question's tokens are read like an answer's. kvcomp has these as --ids of two turns, and
as --ids with the question behind the bar.

kvpress 0.5.5 wants a transformers before 5.3, and the ports' layers run there; their caches are not used.
"""
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from kvpress import PrefillDecodingPress
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parent))
import chunker                                                          # noqa: E402
import dililazy                                                         # noqa: E402
import loopserve                                                        # noqa: E402
import lychee                                                           # noqa: E402
import pats                                                             # noqa: E402


def reads(attention):
    """The attention function, which lets a press say what K, V and mask are."""
    def wrapped(module, query, key, value, attention_mask, *args, **kwargs):
        press = getattr(module, "kvcomp_press", None)
        if press is not None:
            key, value, see = press.read(module, query, key, value)
            if see is not None:
                attention_mask = see[None]
        return attention(module, query, key, value, attention_mask, *args, **kwargs)
    return wrapped


ALL_ATTENTION_FUNCTIONS["sdpa"] = reads(ALL_ATTENTION_FUNCTIONS["sdpa"])


@dataclass
class KvcompPress(PrefillDecodingPress):
    """What all presses of this file share. A PrefillDecodingPress stays while the pipeline writes the answer.

    budget: rows kept or read. compression_ratio, which kvpress's evaluation sets: a share of the context to remove
    instead, where it is not 0."""
    budget: int = 128
    compression_ratio: float = 0.0

    def __post_init__(self):
        self.layers = {}            # the port's layer of every module's number

    def new_layer(self, number, config, N):
        """The port's layer `number` for a context of N tokens."""
        raise NotImplementedError

    def rows(self, N):
        """The budget, for a context of N tokens."""
        return max(1, int(N * (1 - self.compression_ratio))) if self.compression_ratio else self.budget

    def begin_pass(self, model, ids, cache):
        """Before a pass over the ids; an empty cache is another context."""
        if cache.get_seq_length() == 0:
            N, config = ids.shape[1], model.config
            self.layers = {l: self.new_layer(l, config, N) for l in range(config.num_hidden_layers)}

    def forward_hook(self, module, input, kwargs, output):
        return output               # nothing to take out of the cache

    @contextmanager
    def __call__(self, model):
        if model.config._attn_implementation != "sdpa":
            raise ValueError(f"the attention function must be sdpa, found {model.config._attn_implementation}")
        modules = [layer.self_attn for layer in model.model.layers]

        def before(_, args, kwargs):
            self.begin_pass(model, args[0] if args else kwargs["input_ids"], kwargs["past_key_values"])

        hook = model.model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            for module in modules:
                module.kvcomp_press = self
            yield
        finally:
            hook.remove()
            for module in modules:
                del module.kvcomp_press

    def read(self, module, query, key, value):
        """query (1,H,T,D), key and value (1,G,N,D), of which the last T rows are the pass's own -> K and V as they are
        read, and a mask (H,T,N) or None. Called once a pass and layer."""
        raise NotImplementedError


def some_rows(lists, H, T, N, device):
    """A mask (H,T,N): of the rows before the pass those in `lists`, one a query head, and its own ones, causally."""
    see = torch.ones(T, N, dtype=torch.bool, device=device).tril(N - T).repeat(H, 1, 1)
    for h, rows in enumerate(lists):
        old = torch.zeros(N - T, dtype=torch.bool, device=device)
        old[rows[rows < N - T]] = True
        see[h, :, :N - T] = old
    return see


class RaggedLayer(dililazy.DiliLazyLayer):
    """DiliLazyKV's rows, head by head."""

    def get_max_cache_shape(self):                                      # its name before get_max_length
        return -1


@dataclass
class DiliLazyPress(KvcompPress):
    """scores: a file of kvcomp --calibrate."""
    scores: str = ""
    window: int = 16
    kernel: int = 7
    which: str = "inf"

    def capacities(self, base):
        return dililazy.capacities(dililazy.read_scores(self.scores, self.which), base)

    def new_layer(self, number, config, N):
        B = self.rows(N)
        if B <= self.window:
            raise ValueError(f"a budget of {B} leaves no row beside the last {self.window}")
        return RaggedLayer(self.capacities(B - self.window)[number], B, self.window, self.kernel)

    def read(self, module, query, key, value):
        (_, H, T, _), (_, G, N, _) = query.shape, key.shape
        layer, first, see = self.layers[module.layer_idx], N == T, None
        if not first:
            lists = [layer.token[h // (H // G)][rows] for h, rows in enumerate(layer.view)]
            see = some_rows(lists, H, T, N, key.device)
        layer.update(key[:, :, -T:], value[:, :, -T:])
        if first and N > layer.budget:
            q = query[0].unflatten(0, (G, -1))
            for g in range(G):
                layer.compress(g, layer.window_scores(g, q[g, :, -layer.window:], module.scaling))
        return key, value, see


@dataclass
class HeadKVPress(DiliLazyPress):
    """HeadKV: the same selection, with other scores and another pool (Fu et al., arXiv 2410.19258)."""
    window: int = 8
    which: str = "r2"
    beta: float = 1.2

    def capacities(self, base):
        """b_h = b_c - floor(b_c / beta) + S_h / sum S floor(b_c / beta) L H, as whole numbers of the same sum: what
        rounding down leaves over goes to the largest remainders."""
        S = torch.tensor(dililazy.read_scores(self.scores, self.which), dtype=torch.double)
        pool = int(base / self.beta)
        share = S / S.sum() * pool * S.numel() if S.sum() > 0 else torch.full_like(S, pool)
        whole = share.floor()
        most = (share - whole).flatten().argsort(descending=True, stable=True)
        whole.view(-1)[most[:int(pool * S.numel() - whole.sum())]] += 1
        return (whole + base - pool).long().tolist()


class PackedLayer(pats.PatsLayer):
    """PATS's rows."""

    def get_max_cache_shape(self):
        return -1


@dataclass
class PatsPress(KvcompPress):
    """Fake quantisation: attention reads numbers whose low bits are cut. The budget plays no part."""
    b_min: int = 2
    b_max: int = 8
    sink: int = 16
    window: int = 128

    def new_layer(self, number, config, N):
        return PackedLayer(self.b_min, self.b_max, self.sink, self.window)

    def read(self, module, query, key, value):
        T = query.shape[2]
        return *self.layers[module.layer_idx].update(key[:, :, -T:], value[:, :, -T:]), None


@dataclass
class LycheePress(KvcompPress):
    """LycheeCluster: which chunks a token of the answer reads. tokenizer: the model's."""
    budget: int = 1024
    tokenizer: object = None
    sink: int = 16
    buffer: int = 128
    full_layers: int = 2
    beta: float = 0.0

    def new_layer(self, number, config, N):
        if number == 0:
            texts = chunker.token_texts(self.tokenizer) if self.tokenizer else []
            self.chunks = chunker.Chunks(texts, self.sink, self.buffer)
        return lychee.LycheeLayer(self.chunks, self.rows(N), self.sink, self.beta)

    def begin_pass(self, model, ids, cache):
        super().begin_pass(model, ids, cache)
        self.chunks.cut()
        self.chunks.ids += ids[0].tolist()

    def read(self, module, query, key, value):
        (_, H, T, _), (_, G, N, _) = query.shape, key.shape
        layer = self.layers[module.layer_idx]
        if module.layer_idx < self.full_layers:
            return key, value, None
        layer.update(key[:, :, -T:], value[:, :, -T:])
        if T > 1 or not layer.index.M_built:
            return key, value, None
        rows = layer.rows_to_read(query[0, :, 0].unflatten(0, (G, -1)), N)
        return key, value, some_rows([rows[h * G // H] for h in range(H)], H, T, N, key.device)


@dataclass
class LoopServePress(KvcompPress):
    """LoopServe's decode half: which rows the answer reads is chosen every `interval` tokens."""
    budget: int = 1024
    first: int = 16
    interval: int = 16
    obs: int = 16

    def new_layer(self, number, config, N):
        rule = loopserve.Rule(budget=self.rows(N), first=self.first, interval=self.interval, obs=self.obs)
        return loopserve.LoopServeLayer(number, rule)

    def read(self, module, query, key, value):
        (_, H, T, _), (_, G, N, _) = query.shape, key.shape
        layer = self.layers[module.layer_idx]
        if T > 1:
            layer.end_prompt(query[0], N)
            return key, value, None
        layer.observe(query[0], key[0], module.scaling)
        lists = [layer.rows_read(h * G // H, N) for h in range(H)]
        return key, value, some_rows(lists, H, T, N, key.device)


PRESSES = {"dililazy": DiliLazyPress(), "headkv": HeadKVPress(), "pats": PatsPress(), "lychee": LycheePress(),
           "loopserve": LoopServePress()}
