"""What the ports beside this file share: the versions they need, what they refuse, and the cache of one dialogue.

A port sees a dialogue as kvcomp does: a turn's prompt is one pass over more than one token, then every token of the
answer is a pass of its own. What would quietly be something else ends with a ValueError: padding, several dialogues
at once, a prompt in chunks, embeddings instead of ids, and a model without its cache.

LEFT OUT: a prompt in chunks whose second chunk is its last and has one token looks like a decode step.
"""
import importlib.metadata
import inspect

from transformers import Cache

LEAST = {"torch": (2, 6), "transformers": (5, 23)}


def need():
    """Ends with what is too old."""
    for package, least in LEAST.items():
        found = importlib.metadata.version(package)
        if tuple(int(part) for part in found.split(".")[:2]) < least:
            raise ImportError(f"{package} is {found}, {least[0]}.{least[1]} or later is needed")


class TurnCache(Cache):
    """A cache that knows turns. `name` is the attention function's, and what errors begin with."""
    name = ""

    def __init__(self, layers):
        need()
        super().__init__(layers=layers)
        self.read_a_prompt = False              # the last pass was one

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Layer by layer; the first layer begins a pass."""
        B, _, T, _ = key_states.shape
        if B != 1:
            raise ValueError(f"{self.name} plays one dialogue at a time, found a batch of {B}")
        if layer_idx == 0:
            if T > 1 and self.read_a_prompt:
                raise ValueError(f"{self.name}: two prompts with no answer between them: a turn's prompt must be one "
                                 "pass, because its end decides (so no prefill_chunk_size). If the turn before had "
                                 "no answer, call new_turn() of the cache")
            self.read_a_prompt = T > 1
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def new_turn(self):
        """The next pass is the prompt of another turn."""
        self.read_a_prompt = False

    def crop(self, *args):
        raise NotImplementedError(f"{self.name} takes no token back: what was decided with it would have to go, too")

    def reset(self):
        raise NotImplementedError("a cache is one dialogue: make a new one")


def cache_keyword(model):
    """The argument of the model's forward that is the cache: renamed after transformers 5.23."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def hand_over(kind, model, args, kwargs):
    """For a forward pre-hook of the model: the attention function gets the cache, of class `kind`, under its name,
    because transformers passes it no further than the layers. -> (args, kwargs, ids (1,T) of the pass)."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    cache, name = given.get("cache", given.get("past_key_values")), kind.name
    if not isinstance(cache, kind):
        found = "no cache" if cache is None else type(cache).__name__
        raise ValueError(f"{name}: the model's attention reads a {kind.__name__}, found {found}: "
                         f"past_key_values={kind.__name__}(..)")
    if given.get("inputs_embeds") is not None:
        raise ValueError(f"{name}: inputs_embeds hide which tokens are read: give input_ids")
    mask = given.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not mask.all()):
        found = f"{int((mask == 0).sum())} masked tokens" if mask.dim() == 2 else f"one of shape {list(mask.shape)}"
        raise ValueError(f"{name}: a dialogue has no padding, so attention_mask must be ones, found {found}")
    return args, kwargs | {name: cache}, given["input_ids"]


def layer_of(cache, module, name):
    """The layer of the cache that the attention module reads."""
    if cache is None:
        raise ValueError(f"{name}: the attention function got no cache: register {name}.hand_over as forward pre-hook "
                         "of the model that is called")
    return cache.layers[module.layer_idx]
