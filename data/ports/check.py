#!/usr/bin/env python3
"""Holds the ports beside this file against kvcomp.

    python3 data/ports/check.py [--program ./kvcomp] [--smollm2 models/smollm2-135m] [--processes 2] [METHOD]..

It needs torch, transformers (5.23 or later), safetensors and numpy, and accelerate for several processes; --can-run
says in one line what is missing, with exit code 3. For each method and each model:

  trace       kvcomp writes q, k, v and its decisions of two turns, pass by pass. The port's cache and attention
              function get the same q, k and v. They must hold and read the same rows and decide the same, and the
              outputs of attention must agree within 1e-4 of the largest.
  logits      transformers with the port, teacher forced over two turns: kvcomp's logits within 1e-4 of the largest.
  replies     transformers with the port answers dialogues as kvcomp does, letter by letter. Full attention, too,
              must answer one of them otherwise: the check would notice a port that does nothing.
  refusals    what the port cannot play ends with an error, not with an answer.
  processes   the same replies from torchrun with several processes, which share the heads by the tp_plan that
              transformers has for the model. Where the KV heads cannot be shared evenly, the model gets more of them,
              all zeros: they change no output. kvcomp runs that model, too.

The models are random ones of four families, made here; seven tiny ones of data/golden for the logits of odd sizes,
RoPE scalings and biases; models/kvcomp-tiny; and SmolLM2-135M, if its folder is there. The table at the end counts
comparisons, and says by number what was left out; the first difference ends the check with exit code 5.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from replay import TOLERANCE, Replay, SonicReplay, Table, apart, begin, expect, leave_out, near, port

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
METHODS = ["loopserve", "pats", "lychee", "sonic", "dililazy"]
DIALOGUES = [0, 4, 20]              # lines of data/dialogues.jsonl whose replies differ between the methods
GOLDEN = ["llama2-mha", "llama3-tied", "llama-biases", "mistral-nemo", "qwen2-biases", "qwen2-yarn", "qwen3-norms"]
REPLY = 48                          # most tokens of a reply
LOGITS = {"pats": 1e-2}             # of its logits: where an f16 number rounds the other way, cutting b bits makes a
                                    # step of 2^b of it. kvcomp's own instruction sets differ by 3.3e-3

# What the ports are given. For short dialogues, so that every method has something to decide in them
SHORT = {
    "loopserve": dict(budget=48, alpha=.7, samples=32, min_context=0, max_cells=.9, sink=2, local=8, first=4,
                      interval=4, obs=6),
    "pats": dict(sink=24, window=16),
    "lychee": dict(budget=64, buffer=16, full_layers=0, beta=1),
    "sonic": dict(k=6),
    "dililazy": dict(budget=40),
}
# For real text
TEXT_SETTINGS = {
    "loopserve": dict(budget=24, alpha=.3, samples=32, min_context=0, max_cells=.9, sink=1, local=8, first=2,
                      interval=4, obs=4),
    "pats": dict(b_max=10, window=64),
    "lychee": dict(budget=64),
    "sonic": dict(k=2),
    "dililazy": dict(budget=40),
}
# The options of settings; others have the method's name in front
OPTION = {"budget": "budget", "sink": "sink", "full_layers": "full-layers", "b_min": "pats-bmin", "b_max": "pats-bmax",
          "beta": "paper"}

TEXT = """Read this, please:
```c
static int last(const int *x, int n) { return n ? x[n - 1] : -1; }      // a.b, x->y, 3.14, std::sort
if (a->b && c=>d || e <> f) print("10:30"); list<int> v; map<a, b> w; y = v[0]; z := 5; q ?= w[1]
```

---
* "Is it far?" she asked. (No, it is not.) 'Go!', he said; "see http://a.b/c?d=e, or f.g."
  \t
天气很好，我们走吧！「好」、他说。苹果、梨、桃·李；“真的？”她问：（是的）。
Grüße aus Köln; žluťoučký kůň, ваш друг! Ωμέγα … 😀😀 naïve—dash
{"name": "Ada", "tags": ["a", "b"], "at": "10:30", "n": [1,2,3], "s": {"k": null}}
***
onewordwithoutanyblankthatgoesonandonforalongtimeuntilthechunkmustendsomewhereanyway12345678901234567890
天气很好我们走吧今天下午去看海边的灯塔然后回家吃饭明天再说吧天气真好
lighthouse\tapprenticeship\tmechanically\tunforgettable\tturquoises\tneighbourhoods\tkaleidoscope\tpseudonyms
The fox sat. \t
  \t
It was so. It was so. It was so. It was so. It was so. The little fox sat by the sea, and slept.
\t
It was so. It was so. It was so. It was so. It was so.
"""


def missing():
    """What the check lacks, or None."""
    for package in ("torch", "transformers", "safetensors", "numpy"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    version = importlib.metadata.version("transformers")
    recent = [int(n) for n in version.split(".")[:2]] >= [5, 23]
    return None if recent else f"transformers is {version}, 5.23 or later is needed"


# ---- kvcomp

def options(method, settings):
    """The program's options for the settings of a port."""
    return [f"--{OPTION.get(name, method + '-' + name.replace('_', '-'))}={value}" for name, value in settings.items()]


class Refused(Exception):
    """kvcomp says why it does not run this."""


def kvcomp(program, model, method, *args, stdin=None):
    """Runs kvcomp with rows as the port has them; its JSON object."""
    rows = "f16" if method == "pats" else "f32"
    command = [program, "-m", model, "-d", "cpu", "-q", "-t", 1, "-ctk", rows, "-ctv", rows, "--temp", 0, "--json",
               "--method", method, *args]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, input=stdin)
    if done.returncode in (2, 3) and "unknown option" not in done.stderr:
        raise Refused(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        sys.exit(f"check.py: {' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def conversation(number):
    """The messages of a dialogue as turns: what the user says and what is replied."""
    said = json.loads((ROOT / "data" / "dialogues.jsonl").read_text().splitlines()[number])["messages"]
    return [{"user": a["content"], "reply": b["content"]} for a, b in zip(said[::2], said[1::2])]


def rendered(turns):
    """A dialogue as the shipped model reads it, up to where the last reply begins."""
    text = ""
    for turn in turns:
        text += f"<|im_start|>user\n{turn['user']}<|im_end|>\n<|im_start|>assistant\n{turn['reply']}<|im_end|>\n"
    return text[:text.rindex(turns[-1]["reply"])]


def dialogues():
    return [rendered(conversation(number)) for number in DIALOGUES]


# ---- the ports

class Model:
    """A folder that kvcomp and transformers read."""

    def __init__(self, name, folder, settings, layers=None):
        self.name, self.folder, self.settings = name, pathlib.Path(folder), settings
        self.layers = layers        # of these there are traces; None: of all
        self.room = None            # a folder for files of ours

    def tokenizer(self):
        from transformers import AutoTokenizer
        return AutoTokenizer.from_pretrained(self.folder) if (self.folder / "tokenizer.json").exists() else None

    def scores(self, config):
        """A file of head scores: the model's own, or random ones."""
        import torch
        file = self.folder / "head_scores.json"
        if file.exists():
            return file
        file = self.room / f"{self.name}-scores.json"
        L, H = config.num_hidden_layers, config.num_attention_heads
        drawn = torch.rand(L, H, generator=torch.Generator().manual_seed(1)).tolist()
        heads = {f"{i}-{j}": [drawn[i][j]] for i in range(L) for j in range(H)}
        file.write_text(json.dumps({"layers": L, "heads": H, "inf": heads}))
        plain = self.room / f"{self.name}-plain-scores.json"    # the program reads a plain list of heads, too
        plain.write_text(json.dumps({head: runs[0] for head, runs in heads.items()}))
        return file

    def adapter(self, config):
        """A file of Nexus weights: the model's own, or random ones near the model's matrices."""
        file = self.folder / "nexus.safetensors"
        if not file.exists():
            file = self.room / f"{self.name}-nexus.safetensors"
            if not file.exists():
                write_adapter(self, config, file)
        return file


def fingerprint(folder):
    """What an adapter knows its base by: FNV-1a 64 over the bytes of the embedding and of layer 0's q_proj."""
    import torch
    from safetensors import safe_open
    h = 0xcbf29ce484222325
    for name in "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight":
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(file, "pt") as tensors:
                if name in tensors.keys():
                    for byte in tensors.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes():
                        h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return "%016x" % h


def write_adapter(model, config, file, k_max=8, t_max=4):
    """Nexus matrices near the model's, and random embeddings. Models with an odd number of letters get augmented
    positions and an MLP of their own."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    own = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).model
    draw = torch.Generator().manual_seed(7)
    odd = len(model.name) % 2 == 1
    parts = ("q_proj", "k_proj", "v_proj", "o_proj") + (("gate_proj", "up_proj", "down_proj") if odd else ())
    tensors = {}
    for name, p in own.named_parameters():
        part = name.split(".")[-2]
        if part in parts and not (part == "o_proj" and name.endswith("bias")):
            tensors["nexus." + name] = p.data + p.data.std() * .3 * torch.randn(p.shape, generator=draw)
    std, C = own.embed_tokens.weight.std().item(), config.hidden_size
    for name, shape in ("base", (C,)), ("pos", (k_max, C)), ("turn", (t_max, C)):
        tensors["nexus.embed." + name] = std * torch.randn(shape, generator=draw)
    meta = dict(format="sonic-nexus", version="1", model_type=config.model_type, body="full_message",
                attention_bias=str("nexus.layers.0.self_attn.q_proj.bias" in tensors).lower(),
                position_mode="augmented" if odd else "original", mlp="dedicated" if odd else "shared",
                hidden_size=C, num_hidden_layers=config.num_hidden_layers,
                head_dim=getattr(config, "head_dim", C // config.num_attention_heads),
                num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
                intermediate_size=config.intermediate_size, k_max=k_max, k_default=4, t_max=t_max,
                base_fingerprint=fingerprint(model.folder))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={key: str(value) for key, value in meta.items()})


def more_options(method, model, config):
    """What the program needs besides the settings."""
    if method == "dililazy" and not (model.folder / "head_scores.json").exists():
        model.scores(config)
        return ["--head-scores", model.room / f"{model.name}-plain-scores.json"]
    if method == "sonic" and not (model.folder / "nexus.safetensors").exists():
        return ["--sonic-weights", model.adapter(config)]
    return []


def new_cache(method, model, net, rank=0, size=1):
    """The port's cache for a model of transformers."""
    settings, config, module = model.settings[method], net.config, port(method)
    if method == "lychee":
        import chunker
        tokenizer = model.tokenizer()
        return module.LycheeCache(config, chunker.token_texts(tokenizer) if tokenizer else [], **settings)
    if method == "dililazy":
        scores = module.read_scores(model.scores(config))
        return module.DiliLazyCache(config, scores, **settings, tp_rank=rank, tp_size=size)
    if method == "sonic":
        return module.SonicCache(net, model.adapter(config), **settings)
    return (module.PatsCache if method == "pats" else module.LoopServeCache)(config, **settings)


def with_port(method, model, **how):
    """The model in f32, with the port in it."""
    import torch
    from transformers import AutoModelForCausalLM
    attention = method if hasattr(port(method), method + "_attention") else "sdpa"
    net = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation=attention, **how)
    if hasattr(port(method), "hand_over"):
        net.register_forward_pre_hook(port(method).hand_over, with_kwargs=True)
    return net.eval()


def handed(net, cache):
    """The cache under the name that this transformers has for it."""
    import common
    return {common.cache_keyword(net): cache}


def answer(net, ids, cache):
    """The tokens that generate() puts behind ids."""
    import torch
    out = net.generate(ids, attention_mask=torch.ones_like(ids), **handed(net, cache), max_new_tokens=REPLY,
                       do_sample=False)
    return out[0, ids.shape[1]:].tolist()


def sonic_reply(net, tokenizer, cache, turns):
    """What SONIC's port answers to the last of several turns; the replies before are given."""
    import torch
    given, closing, head = [], tokenizer("<|im_end|>\n").input_ids, tokenizer("<|im_start|>assistant\n").input_ids
    begin = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    system = tokenizer(begin[:begin.index("<|im_start|>user")]).input_ids       # some templates bring one
    for turn in turns:
        ids = tokenizer(f"<|im_start|>user\n{turn['user']}<|im_end|>\n").input_ids + head
        first = system if turn is turns[0] else []
        ids = cache.begin_turn(first + ids, head=len(head), reply=given, system=len(first))
        if turn is turns[-1]:
            return answer(net, ids, cache)
        fed = ids[0, cache.get_seq_length():].tolist()
        reply = tokenizer(turn["reply"]).input_ids
        with torch.no_grad():
            net(torch.tensor([fed]), **handed(net, cache))
        given = reply + closing


def replies(method, model, rank=0, size=1):
    """What transformers with the port answers to the dialogues; in `size` processes, of which this is one."""
    how = {}
    if size > 1:
        from transformers import DistributedConfig
        how["distributed_config"] = DistributedConfig(tp_size=size)
    tokenizer, out = model.tokenizer(), []
    net = with_port(method, model, **how)
    for number, text in zip(DIALOGUES, dialogues()):
        cache = new_cache(method, model, net, rank, size)
        if method == "sonic":
            ids = sonic_reply(net, tokenizer, cache, conversation(number))
        else:
            ids = answer(net, tokenizer(text, return_tensors="pt").input_ids, cache)
        out.append(tokenizer.decode(ids, skip_special_tokens=True))
    return out


def replies_of_kvcomp(program, model, method, config, *words, by_messages=False):
    """The same of the program. SONIC sees turns: its dialogues are messages."""
    out, prompt = [], model.room / "prompt.txt"
    for number, text in zip(DIALOGUES, dialogues()):
        prompt.write_text(text)
        how, request = ["--raw", "--parse-special", "-f", prompt, "-n", REPLY], None
        if by_messages:
            messages = [{"role": role, "content": turn[key]} for turn in conversation(number)
                        for role, key in (("user", "user"), ("assistant", "reply"))][:-1]
            how, request = ["--batch", "-"], json.dumps({"messages": messages, "max_tokens": REPLY}) + "\n"
        out.append(kvcomp(program, model.folder, method, *how, *words, stdin=request)["text"])
    return out


def expect_replies(program, method, model, config, found):
    """Those of the port are kvcomp's, and not those of full attention: but for PATS, which changes none of them. Its
    logits must differ, as every method's must."""
    by_messages = method == "sonic"
    words = [*options(method, model.settings[method]), *more_options(method, model, config)]
    wanted = replies_of_kvcomp(program, model, method, config, *words, by_messages=by_messages)
    for one, reply in zip(wanted, found):
        expect(reply == one, f"kvcomp answers {one!r}, the port {reply!r}")
    full = replies_of_kvcomp(program, model, "full", config, by_messages=by_messages)
    if method != "pats":
        expect(full != found, f"full attention answers the same: this shows nothing: {full}")


def write_ids(file, turns):
    """turns: a list of (ids of the prompt, ids of the answer)."""
    file.write_text("".join(f"{' '.join(map(str, fed))} | {' '.join(map(str, said))}\n" for fed, said in turns))


def trace_turns(model, config):
    """Two turns. With a tokenizer the second one has code, lists and other scripts."""
    import torch
    tokenizer = model.tokenizer()
    if not tokenizer:
        draw = torch.Generator().manual_seed(1)
        lengths = (220, 40, 150, 30)
        ids = [torch.randint(3, config.vocab_size, (n,), generator=draw).tolist() for n in lengths]
        return [(ids[0], ids[1]), (ids[2], ids[3])]
    first = tokenizer(dialogues()[0]).input_ids
    second = tokenizer((3 if model.layers is None else 1) * TEXT + dialogues()[1]).input_ids
    if model.layers is not None:
        return [(first[:300], first[300:330]), (second[:200], second[200:220])]
    return [(first[:150], first[150:250]), (first[250:] + second, second[:40])]


def check_trace(program, method, model, net):
    from safetensors.torch import load_file
    ids, trace = model.room / "ids.txt", model.room / "trace.safetensors"
    write_ids(ids, trace_turns(model, net.config))
    layers = ["--trace-layers", ",".join(map(str, model.layers))] if model.layers else []
    kvcomp(program, model.folder, method, "--ids", ids, "--dump-logits", model.room / "logits.bin", "--trace", trace,
           *layers, *options(method, model.settings[method]), *more_options(method, model, net.config))
    player = SonicReplay if method == "sonic" else Replay
    player(method, load_file(trace), new_cache(method, model, net), net.config).run()
    trace.unlink()


# ---- logits and replies

def forced_logits(method, model, net, turns):
    """The logits behind every pass of the turns (passes,V)."""
    import torch
    cache, found, reply = new_cache(method, model, net), [], []
    with torch.no_grad():
        for number, (fed, said) in enumerate(turns):
            if method == "sonic":
                cache.begin_turn(fed, reply=reply)
                fed, reply = fed, said
            elif number and method == "loopserve":
                cache.new_turn()
                fed = turns[number - 1][1] + fed
            found.append(net(torch.tensor([fed]), **handed(net, cache)).logits[0, -1])
            for token in said:
                found.append(net(torch.tensor([[token]]), **handed(net, cache)).logits[0, -1])
            if method == "sonic":
                cache.ids += said
    return torch.stack(found)


def check_logits(program, method, model, net, turns):
    import numpy as np
    import torch
    ids, logits = model.room / "ids.txt", model.room / "logits.bin"
    write_ids(ids, turns)

    def of_kvcomp(method, *words):
        kvcomp(program, model.folder, method, "--ids", ids, "--dump-logits", logits, *words)
        return torch.from_numpy(np.fromfile(logits, dtype="<f4").reshape(-1, net.config.vocab_size))

    wanted = of_kvcomp(method, *options(method, model.settings[method]), *more_options(method, model, net.config))
    tolerance = LOGITS.get(method, TOLERANCE)
    near("logits", forced_logits(method, model, net, turns), wanted, tolerance)
    if model.name not in GOLDEN:
        differs = apart(of_kvcomp("full"), wanted) > 4 * tolerance
        expect(differs, "full attention has the same logits: this shows nothing")


# ---- what a port must refuse

def check_refusals(method, model, net):
    """Each of these would be answered by another method than kvcomp's."""
    import torch
    ids, ones = torch.arange(3, 83)[None], torch.ones(1, 80, dtype=torch.long)
    masked = torch.cat([0 * ones[:, :50], ones[:, :30]], 1)

    def refused(what, word, **given):
        try:
            with torch.no_grad():
                given.pop("by", net)(**given)
        except ValueError as error:
            expect(word in str(error), f"{what}: the error is {error}")
        else:
            expect(False, f"{what} is taken")

    def cache():
        made = new_cache(method, model, net)
        if method == "sonic":
            made.begin_turn(ids[0].tolist())
        return made

    two = ids.repeat(2, 1)
    refused("a batch", "a batch of 2", input_ids=two, **handed(net, cache()))
    refused("prefill_chunk_size", "prefill_chunk_size", by=net.generate, input_ids=ids, attention_mask=ones,
            **handed(net, cache()), max_new_tokens=2, do_sample=False, prefill_chunk_size=32)
    if method == "pats":                                # a cache alone: transformers itself honours these
        with torch.no_grad():
            by_ids = net(ids, **handed(net, cache())).logits
            by_embeds = net(inputs_embeds=net.get_input_embeddings()(ids), **handed(net, cache())).logits
            alone = net(ids[:, 50:], **handed(net, cache())).logits
            beside = net(ids, attention_mask=masked, **handed(net, cache())).logits[:, 50:]
        near("inputs_embeds", by_embeds, by_ids)
        near("attention_mask", beside, alone, LOGITS[method])   # but for rounding, only differences of positions matter
        return
    refused("attention_mask", "50 masked tokens", input_ids=ids, attention_mask=masked, **handed(net, cache()))
    refused("no cache", "found no cache", input_ids=ids, use_cache=False)
    refused("inputs_embeds", "give input_ids", inputs_embeds=net.get_input_embeddings()(ids), **handed(net, cache()))


# ---- several processes

def with_even_heads(model, processes, folder):
    """A copy of the model whose KV heads so many processes share evenly. The heads added have zero matrices, so that
    they add nothing to what their layer puts out, and a score of 0."""
    import torch
    from safetensors.torch import load_file, save_file
    config = json.loads((model / "config.json").read_text())
    G, H, D = config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]
    more = -G % processes
    if not more:
        return model
    copy = folder / "even-heads"
    copy.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, copy / name)
    added = {"q_proj": more * H // G * D, "k_proj": more * D, "v_proj": more * D, "o_proj": more * H // G * D}
    weights = load_file(model / "model.safetensors")
    for name, w in weights.items():
        rows = added.get(name.split(".")[-2], 0)
        if rows and "o_proj" in name:
            weights[name] = torch.cat([w, w.new_zeros(w.shape[0], rows)], 1)
        elif rows:
            weights[name] = torch.cat([w, w.new_zeros(rows, w.shape[1])])
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_key_value_heads": G + more, "num_attention_heads": (G + more) * H // G}
    (copy / "config.json").write_text(json.dumps(config))

    scores = json.loads((model / "head_scores.json").read_text())
    scores["heads"] = config["num_attention_heads"]
    for which in ("inf", "dili", "lazy"):
        scores[which] |= {f"{i}-{j}": [0] for i in range(scores["layers"]) for j in range(H, scores["heads"])}
    scores = {key: scores[key] for key in ("format", "layers", "heads", "score", "inf", "dili", "lazy")}
    (copy / "head_scores.json").write_text(json.dumps(scores))
    return copy


def worker(folder, methods, out):
    """One process of torchrun: answers with its share of the heads; the first one writes the replies."""
    import torch.distributed
    model = Model("kvcomp-tiny", folder, TEXT_SETTINGS)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {method: replies(method, model, rank, size) for method in methods}
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def check_processes(program, methods, processes, room):
    """The replies of several processes are those of kvcomp, which is one."""
    from transformers import AutoConfig
    shipped = ROOT / "models" / "kvcomp-tiny"
    even, out = with_even_heads(shipped, processes, room), room / "replies.json"
    model = Model("kvcomp-tiny", even, TEXT_SETTINGS)
    model.room = room
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               __file__, "--worker", str(out), "--folder", str(even), *methods]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\ncheck.py: {' '.join(command)}: exit code {done.returncode}")
    for method, found in json.loads(out.read_text()).items():
        begin(method, f"{processes} processes")
        expect_replies(program, method, model, AutoConfig.from_pretrained(even), found)


# ---- the models

def random_models(room):
    """Three layers of each family, with uneven attention: what a trained model has."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
    sizes = dict(vocab_size=160, hidden_size=96, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
                 num_key_value_heads=3, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
                 bos_token_id=1, eos_token_id=2)
    kinds = {"llama": LlamaConfig(**sizes), "mistral": MistralConfig(**sizes, sliding_window=None),
             "qwen2": Qwen2Config(**sizes), "qwen3": Qwen3Config(**sizes)}
    models = []
    for number, (name, config) in enumerate(kinds.items()):
        draw = torch.Generator().manual_seed(number)
        net = AutoModelForCausalLM.from_config(config)
        for part, p in net.named_parameters():
            if p.dim() == 1:
                p.data.uniform_(.4, 1.6, generator=draw)
            else:
                gain = 1.5 if "q_proj" in part or "k_proj" in part else 1
                p.data.normal_(0, .7 if "embed" in part else gain / p.shape[1] ** .5, generator=draw)
        net.to(torch.bfloat16).save_pretrained(room / name)
        models.append(Model(name, room / name, SHORT))
    return models


def check_model(program, method, model):
    """Everything that can be compared on one model."""
    begin(method, model.name)
    net = with_port(method, model)
    golden = model.name in GOLDEN
    turns = trace_turns(model, net.config)
    if golden:                                          # they have 256 positions
        turns = [(turns[0][0][:120], turns[0][1] + turns[0][1][:20]), (turns[1][0][:20], turns[1][1])]
    elif model.tokenizer() and model.layers is None:
        turns = [(turns[0][0], turns[0][1][:60]), (turns[1][0][:600], turns[1][1])]
    try:
        if not golden:
            check_trace(program, method, model, net)
        check_logits(program, method, model, net, turns)
    except Refused as why:
        leave_out(f"{method} on {model.name}: {why}")
        return
    if model.tokenizer():
        expect_replies(program, method, model, net.config, replies(method, model))
    elif not golden:
        check_refusals(method, model, net)


def print_table(methods):
    """Port by model: how many comparisons were equal."""
    columns = list(dict.fromkeys(column for _, column in Table.count))
    shown = {column: "golden" if column in GOLDEN else column for column in columns}
    names = list(dict.fromkeys(shown.values()))
    print("\n| port | " + " | ".join(names) + " | differ |\n|---|" + "---:|" * (len(names) + 1))
    for method in methods:
        counts = [sum(n for (m, c), n in Table.count.items() if m == method and shown[c] == name) for name in names]
        print(f"| {method} | " + " | ".join(f"{n:,}" for n in counts) + " | 0 |")
    worst = {kind: max([value for (method, _), value in Table.worst.items() if (method in LOGITS) == kind], default=0)
             for kind in (False, True)}
    print(f"\n{sum(Table.count.values()):,} comparisons, all equal; outputs and logits within {worst[False]:.1e} of "
          f"the largest (pats {worst[True]:.1e}); {len(Table.left_out)} left out")


def main():
    parser = argparse.ArgumentParser(description="Holds the ports beside this file against kvcomp.")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"{', '.join(METHODS)}; all unless given")
    parser.add_argument("--program", default=str(ROOT / "kvcomp"))
    parser.add_argument("--model", action="append", help="only this: llama, golden, kvcomp-tiny, processes, ..")
    parser.add_argument("--smollm2", type=pathlib.Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--processes", type=int, default=2, help="of torchrun; 0: leave it out")
    parser.add_argument("--can-run", action="store_true", help="only say whether the packages are there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    a = parser.parse_args()
    methods = a.methods or METHODS
    for method in methods:
        if method not in METHODS:
            parser.error(f"there is no port of {method}, only of {', '.join(METHODS)}")
    if missing():
        print(f"check.py: {missing()}", file=sys.stderr)
        sys.exit(3)
    if a.can_run:
        return

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.dont_write_bytecode = True
    import torch
    from transformers import logging
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if a.worker:
        worker(a.folder, methods, a.worker)
        return
    with tempfile.TemporaryDirectory() as room:
        room = pathlib.Path(room)
        models = random_models(room)
        models += [Model(name, ROOT / "data" / "golden" / name, SHORT) for name in GOLDEN]
        models.append(Model("kvcomp-tiny", ROOT / "models" / "kvcomp-tiny", TEXT_SETTINGS))
        if (a.smollm2 / "config.json").exists():
            models.append(Model("smollm2-135m", a.smollm2, TEXT_SETTINGS, layers=[0, 2, 15, 29]))
        else:
            leave_out(f"SmolLM2-135M, for all methods: {a.smollm2} is not there")
        for model in models:
            model.room = room
            kind = "golden" if model.name in GOLDEN else model.name
            for method in methods if not a.model or kind in a.model or model.name in a.model else []:
                check_model(a.program, method, model)
                print(f"{method} on {model.name}: {Table.count[method, model.name]:,} equal", flush=True)
        shared = [method for method in methods if method != "sonic"]        # which refuses to share heads
        if a.processes and importlib.util.find_spec("accelerate") is None:
            leave_out(f"{a.processes} processes, for all methods: accelerate is not installed")
        elif a.processes and shared and (not a.model or "processes" in a.model):
            check_processes(a.program, shared, a.processes, room)
        print_table(methods)


if __name__ == "__main__":
    main()
