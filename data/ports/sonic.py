"""SONIC for Hugging Face transformers: a Cache that compresses finished messages with a trained adapter.

Chen, Liu, Wang, Fan, Chu, Li, Chu, Hu: SONIC: Segmented Optimized Nexus for Information Compression in Key-Value
Caching. arXiv 2601.21927. The definition is section 12 of kvcomp.c with its defaults, and check.py holds this file
against the program, pass by pass.

    import sonic
    model = AutoModelForCausalLM.from_pretrained(DIR)           # any attn_implementation that takes a mask: sdpa, eager
    model.register_forward_pre_hook(sonic.hand_over, with_kwargs=True)
    cache = sonic.SonicCache(model, DIR + "/nexus.safetensors")
    ids = cache.begin_turn(first, head=3)                       # the last 3 tokens open the reply
    out = model.generate(ids, past_key_values=cache)
    reply = out[0, ids.shape[1]:].tolist() + closing            # and the tokens that close a reply
    ids = cache.begin_turn(second, head=3, reply=reply)

When a message is finished, K learned Nexus tokens are fed behind it. They have weight matrices of their own, read the
message, and afterwards only their rows stay. A turn begins with finishing the two messages of the turn before: the
user's is compressed, the reply is encoded again behind what is left of it, and compressed, too.

    S_aug = { I_sys, m_1, N^(1), m_2, N^(2), .., m_h, N^(h), Q_curr }                               (Eq. 1)
    e(N_j^t) = e_base + e_pos[j] + e_turn[t]                    both messages of a turn share t     (Eq. 2)
    K_i = max(1, min(K, |B_i|))                                 Nexus tokens of a body of |B_i|     (Sec. 4.3)

Which rows a token may see (Eq. 3 to 5) needs no mask of its own: finished bodies are gone, text is causal over the
rows held, and the Nexus tokens of a pass see each other and everything held.

SHAPES: C hidden size; G KV heads; n rows held, which is less than the positions counted.

LEFT OUT: one-shot mode, a ratio instead of K, an untrained adapter, the base's fingerprint (--paper, --ratio,
--sonic-weights none), tensor parallelism, sliding windows, and what common.py leaves out.
"""
import common
import torch
from safetensors import safe_open
from torch.func import functional_call
from transformers.cache_utils import DynamicLayer


class SonicLayer(DynamicLayer):
    """The rows held of one layer. Positions are counted apart, because rows are dropped."""
    is_croppable = False

    def __init__(self):
        super().__init__()
        self.position = 0           # of the next token

    def update(self, key_states, value_states, *args, **kwargs):
        self.position += key_states.shape[2]
        return super().update(key_states, value_states)

    def get_seq_length(self):
        return self.position

    def get_mask_sizes(self, query_length):
        """The rows held count as those right before the queries: a causal mask sees them all."""
        held = self.keys.shape[2] if self.is_initialized else 0
        return held + query_length, self.position - held

    def drop(self, n, behind=0):
        """Drops the n rows before the last `behind` ones."""
        last = self.keys.shape[2] - behind
        self.keys = torch.cat([self.keys[:, :, :last - n], self.keys[:, :, last:]], 2)
        self.values = torch.cat([self.values[:, :, :last - n], self.values[:, :, last:]], 2)


def read_adapter(path, model):
    """A file that models/make_nexus.py makes. -> its metadata, e_base (C), e_pos (K_max,C), e_turn (T_max,C), and the
    Nexus branch as parameters of model.model by name."""
    dtype, device = model.dtype, model.device
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        tensors = {name: file.get_tensor(name).to(device, dtype) for name in file.keys()}
    if meta.get("format") != "sonic-nexus":
        raise ValueError(f"sonic: {path}: expected the format sonic-nexus, found {meta.get('format')}")
    embed = [tensors.pop("nexus.embed." + name) for name in ("base", "pos", "turn")]
    own = dict(model.model.named_parameters())
    branch = {name.removeprefix("nexus."): tensor for name, tensor in tensors.items()}
    for name, tensor in branch.items():
        found = list(own[name].shape) if name in own else "no such matrix"
        if found != list(tensor.shape):
            raise ValueError(f"sonic: {path}: {name} is {list(tensor.shape)}, the model has {found}")
    return meta, *embed, branch


class SonicCache(common.TurnCache):
    """The cache of one dialogue with this model. k: Nexus tokens of a message, by default as the adapter says; system:
    least number of first tokens that count as system message and are never compressed."""
    name = "sonic"

    def __init__(self, model, path, k=None, system=4):
        config = model.config
        if getattr(config, "sliding_window", None):
            raise ValueError(f"sonic leaves sliding windows out, found one of {config.sliding_window} rows")
        if any(hasattr(p, "device_mesh") for p in model.parameters()):
            raise ValueError("sonic leaves tensor parallelism out: the adapter would have to be split as the model is")
        super().__init__(layers=[SonicLayer() for _ in range(config.num_hidden_layers)])
        meta, self.e_base, self.e_pos, self.e_turn, self.branch = read_adapter(path, model)
        self.model = model.model
        self.original = meta["position_mode"] == "original"     # text has positions as if there were no Nexus tokens
        self.k, self.system = k or int(meta["k_default"]), system
        if self.k > len(self.e_pos):
            raise ValueError(f"sonic: k is {self.k}, the adapter knows 1 to {len(self.e_pos)} Nexus tokens a message")
        self.turn = -1              # the current turn
        self.ids = []               # a token a position; of a Nexus token, which is never fed by its id, 0
        self.user = 0               # the position where the user's message of this turn begins
        self.user_end = 0           # and the one behind it
        self.head = []              # the tokens behind it, which open the reply
        self.body = []              # |B_i| of every finished message, and how many Nexus tokens stand for it
        self.stand_in = []

    def begin_turn(self, ids, head=0, reply=(), system=0):
        """ids: the tokens of the turn, of which the last `head` open its reply. reply: what the model answered the
        turn before, with the tokens that close it; those that were not fed yet, too. system: how many of the first
        turn's tokens are the system message. -> ids (1,N) for generate(), which feeds those behind the ones known."""
        self.turn += 1
        self.new_turn()
        if self.turn:
            self.finish([*self.head, *reply])
        else:
            self.system = max(self.system, system)
        own = len(ids) - min(head, len(ids))
        self.user, self.user_end = len(self.ids), len(self.ids) + own
        self.head = list(ids)[own:]
        self.ids += ids
        return torch.tensor([self.ids], device=self.e_base.device)

    @torch.no_grad()
    def finish(self, reply):
        """The two messages of the turn before become Nexus rows."""
        for layer in self.layers:               # step 1: the session ends behind the user's message
            layer.drop(layer.position - self.user_end)
            layer.position = self.user_end
        self.ids = self.ids[:self.user_end]
        self.compress(self.user)                # steps 2 and 3
        first = len(self.ids)
        if reply:
            self.forward(input_ids=torch.tensor([reply], device=self.e_base.device))    # step 4
            self.ids += reply
        self.compress(first)                    # step 5
        self.new_turn()

    def compress(self, first):
        """The tokens from position `first` on are a finished message: Nexus tokens read its body, which is what does
        not belong to the system message, and then the body's rows go (Eq. 4)."""
        n = len(self.ids) - max(first, self.system)
        if n <= 0:
            return
        K = max(1, min(self.k, n))                                      # Sec. 4.3
        held = self.layers[0].keys.shape[2]
        e = self.e_base + self.e_pos[:K] + self.e_turn[min(self.turn - 1, len(self.e_turn) - 1)]     # Eq. 2: e(N_j^t)
        see = torch.ones(1, 1, K, held + K, dtype=torch.bool, device=e.device)          # Eq. 5
        self.new_turn()
        self.forward(self.branch, inputs_embeds=e[None], attention_mask=see)            # Eq. 1: N^(i)
        self.new_turn()
        for layer in self.layers:
            layer.drop(n, behind=K)
            layer.position -= K if self.original else 0
        self.ids += [] if self.original else [0] * K
        self.body.append(n)
        self.stand_in.append(K)

    def forward(self, branch={}, **what):
        """A pass through the model whose logits nobody needs; the Nexus branch takes the place of the matrices that it
        has, the norms stay (Sec. 3.1)."""
        at = self.layers[0].position
        T = next(iter(what.values())).shape[1]
        position = torch.arange(at, at + T, device=self.e_base.device)[None]
        functional_call(self.model, branch, kwargs=what | {common.cache_keyword(self.model): self,
                                                           "position_ids": position, "use_cache": True})


def hand_over(model, args, kwargs):
    """Forward pre-hook of the model: refuses what the cache cannot follow."""
    common.hand_over(SonicCache, model, args, kwargs)
    return args, kwargs
