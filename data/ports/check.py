#!/usr/bin/env python3
"""Holds the ports beside this file against kvcomp.

    python3 data/ports/check.py [--program ./kvcomp] [--model models/kvcomp-tiny] [--processes 2] [lychee dililazy]

It needs torch, transformers (5.23 or later), accelerate, safetensors and numpy; --can-run says in one line what is
missing, with exit code 3. For each method:

  trace       kvcomp writes q, k, v and its decisions of two turns, pass by pass. The port's Cache and attention
              function get the same q, k and v. They must hold and read the same rows, cut the same chunks, make the
              same clusters and budgets, and the outputs of attention must agree within 1e-4.
  replies     transformers with the port answers some dialogues as kvcomp does, letter by letter. Full attention, too,
              must answer one of them otherwise: the check would notice a port that does nothing.
  families    logits of tiny Llama, Mistral, Qwen2 and Qwen3 models of data/golden.
  processes   the same replies from torchrun with several processes, which share the heads by the tp_plan that
              transformers has for the model. Where the KV heads cannot be shared evenly, the model gets more of them,
              all zeros: they change no output. kvcomp runs that model, too.

The last line is "N comparisons, all equal"; the first difference ends it with exit code 5.
"""
import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DIALOGUES = [0, 4, 20]              # lines of data/dialogues.jsonl whose replies differ between the methods
BUDGET = {"lychee": 64, "dililazy": 40}
FAMILIES = ["llama2-mha", "llama3-tied", "llama-biases", "mistral-nemo", "qwen2-biases", "qwen2-yarn", "qwen3-norms"]
REPLY = 48                          # most tokens of a reply
TOLERANCE = 1e-4                    # of outputs
STEP = 2 ** -8                      # bf16 numbers below 1 that are neighbours lie so near: sums in another order may
                                    # round to the one or to the other

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
    for package in ("torch", "transformers", "accelerate", "safetensors", "numpy"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    version = importlib.metadata.version("transformers")
    recent = [int(n) for n in version.split(".")[:2]] >= [5, 23]
    return None if recent else f"transformers is {version}, 5.23 or later is needed"


class Count:
    """How much was compared."""
    n = 0


def expect(equal, what):
    Count.n += 1
    if not equal:
        print(f"check.py: {what}", file=sys.stderr)
        sys.exit(5)


# ---- kvcomp

def kvcomp(program, model, method, *args):
    """Runs kvcomp with unrounded rows; its JSON object."""
    budget = ["--budget", str(BUDGET[method])] if method in BUDGET else []
    command = [program, "-m", str(model), "-d", "cpu", "-q", "-ctk", "f32", "-ctv", "f32", "--temp", "0", "--json",
               "--method", method, *budget, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"check.py: {' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def rendered(turns):
    """A dialogue as the shipped model reads it, up to where the last reply begins."""
    text = ""
    for turn in turns:
        text += f"<|im_start|>user\n{turn['user']}<|im_end|>\n<|im_start|>assistant\n{turn['reply']}<|im_end|>\n"
    return text[:text.rindex(turns[-1]["reply"])]


def dialogues():
    lines = (ROOT / "data" / "dialogues.jsonl").read_text().splitlines()
    return [rendered(json.loads(lines[i])["turns"]) for i in DIALOGUES]


def reply_of_kvcomp(program, model, method, text, folder):
    prompt = folder / "prompt.txt"
    prompt.write_text(text)
    return kvcomp(program, model, method, "--raw", "--parse-special", "-f", prompt, "-n", REPLY)["text"]


# ---- the ports

def port(method):
    """The module of the port."""
    return importlib.import_module(method)


def new_cache(method, config, tokenizer, model, rank=0, size=1):
    import chunker
    if method == "lychee":
        return port(method).LycheeCache(config, chunker.token_texts(tokenizer), BUDGET[method])
    scores = port(method).read_scores(model / "head_scores.json")
    return port(method).DiliLazyCache(config, scores, BUDGET[method], tp_rank=rank, tp_size=size)


def with_port(method, model, **how):
    """The model in f32, with the port in it."""
    import torch
    from transformers import AutoModelForCausalLM
    port(method)                    # registers the attention function
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=method, **how)
    net.register_forward_pre_hook(port(method).hand_over, with_kwargs=True)
    return net


def replies(method, model, rank=0, size=1):
    """What transformers with the port answers to the dialogues; in `size` processes, of which this is one."""
    import torch
    from transformers import AutoTokenizer, DistributedConfig
    how = {"distributed_config": DistributedConfig(tp_size=size)} if size > 1 else {}
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = with_port(method, model, **how)
    out = []
    for text in dialogues():
        ids = tokenizer(text, return_tensors="pt").input_ids
        cache = new_cache(method, net.config, tokenizer, model, rank, size)
        answer = net.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=REPLY,
                              do_sample=False)
        out.append(tokenizer.decode(answer[0, ids.shape[1]:], skip_special_tokens=True))
    return out


# ---- traces: the port gets kvcomp's q, k and v

class Replay:
    """Plays a trace into a port, pass by pass and layer by layer."""

    def __init__(self, method, trace, config, tokenizer, model):
        self.method, self.trace, self.config = method, trace, config
        self.cache = new_cache(method, config, tokenizer, model)
        self.attention = getattr(port(method), method + "_attention")
        self.worst = 0              # largest difference of an output

    def same(self, name, found):
        """These whole numbers are those of the trace."""
        wanted = self.trace[name].tolist()
        expect(wanted == found, f"{name}: kvcomp has {wanted}, the port {found}")

    def near(self, name, found, tolerance):
        """These numbers are those of the trace -> the largest difference. Where one is infinite, both are."""
        wanted = self.trace[name]
        difference = (found - wanted).masked_fill(found == wanted, 0).abs().max().item()
        expect(difference <= tolerance, f"{name} differs by {difference}")
        return difference

    def index(self, p, l):
        """LycheeCluster's index as pass p left it, which the port has brought about in the pass behind it."""
        index = self.cache.layers[l].index
        self.same(f"pass{p:04}.lychee.chunk_ends", self.cache.chunks.start[1:])
        for g in range(self.config.num_key_value_heads):
            at = f"pass{p:04}.layer{l:02}.head{g:02}.lychee"
            self.same(f"{at}.parents", index.label[g].tolist())
            self.near(f"{at}.centres", index.mu[g], STEP)
            self.near(f"{at}.radii", index.r[g], STEP / 4)

    def lychee(self, at, layer, q, step):
        """The tokens that each KV head reads; what it chose them by is as in the trace."""
        G, N = self.config.num_key_value_heads, layer.get_seq_length()
        if step < 0 or not getattr(layer, "index", None) or not layer.index.M_built:
            return [list(range(N))] * G
        q = q.unflatten(0, (G, -1))                                     # (G,R,D)
        scores, rows = layer.index.scores(q, layer.beta), layer.rows_to_read(q, N)
        for g in range(G):
            self.near(f"{at}.head{g:02}.lychee.scores", scores[g], STEP / 4)
            read = set(rows[g].tolist())
            chunks = [j for j in range(layer.index.M) if self.cache.chunks.start[j] in read]
            used = {int(layer.index.label[g, j]) for j in chunks}
            wanted = set(self.trace[f"{at}.head{g:02}.lychee.clusters"].tolist())
            expect(used == wanted, f"{at}: kvcomp reads clusters {wanted} of head {g}, the port {used}")
        return [tokens.tolist() for tokens in rows]

    def rows(self, at, l, q, step):
        """The tokens that each query head of layer l reads, and those that each KV head holds."""
        layer, R = self.cache.layers[l], self.config.num_attention_heads // self.config.num_key_value_heads
        if self.method == "lychee":
            lists = self.lychee(at, layer, q, step)
            return [tokens for tokens in lists for _ in range(R)], [list(range(layer.get_seq_length()))] * len(lists)
        if step < 0:
            self.same(f"{at}.dililazy.budgets", layer.capacity)
        read = [layer.token[h // R][rows].tolist() for h, rows in enumerate(layer.view)]
        return read, [tokens.tolist() for tokens in layer.token]

    def layer(self, p, l, step):
        """Layer l of pass p, which is decode step `step`, or a prefill (-1)."""
        import torch
        at = f"pass{p:04}.layer{l:02}"
        q, k, v = (self.trace[f"{at}.{name}"].transpose(0, 1)[None] for name in ("q", "k", "v"))
        module = types.SimpleNamespace(layer_idx=l, num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
        key, value = self.cache.update(k, v, l)
        N, T = self.cache.get_seq_length(l), q.shape[2]
        mask = torch.ones(T, N, dtype=torch.bool).tril(N - T)[None, None]
        found = self.attention(module, q, key, value, mask, q.shape[3] ** -.5, **{self.method: self.cache})[0]
        self.worst = max(self.worst, self.near(f"{at}.out", found[0], TOLERANCE))

        if f"pass{p - 1:04}.layer{l:02}.head00.lychee.parents" in self.trace:
            self.index(p - 1, l)
        read, held = self.rows(at, l, q[0, :, 0], step)
        for h, tokens in enumerate(read):
            name = f"{at}.qhead{h:02}.{'read' if step >= 0 else self.method + '.chosen'}"
            if step >= 0 or self.method == "dililazy":
                self.same(name, tokens)
        for g, tokens in enumerate(held):
            self.same(f"{at}.head{g:02}.kept", tokens)

    def run(self):
        passes = sorted(name for name in self.trace if name.endswith(".tokens"))
        for p, name in enumerate(passes):
            if self.method == "lychee":
                self.cache.read(self.trace[name][None])
            for l in range(self.config.num_hidden_layers):
                self.layer(p, l, self.trace[f"pass{p:04}.step"].item())


def check_trace(program, model, method, folder):
    """Two turns, teacher forced. The first one is short, so that its answer is where the index is built; the second
    has code, lists and other scripts."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(model)
    first = tokenizer(dialogues()[0]).input_ids
    second = tokenizer(3 * TEXT + dialogues()[1]).input_ids
    turns = [(first[:150], first[150:250]), (first[250:] + second, second[:40])]
    ids, trace = folder / "ids.txt", folder / "trace.safetensors"
    ids.write_text("".join(f"{' '.join(map(str, fed))} | {' '.join(map(str, answer))}\n" for fed, answer in turns))
    kvcomp(program, model, method, "--ids", ids, "--dump-logits", folder / "logits.bin", "--trace", trace)
    replay = Replay(method, load_file(trace), AutoConfig.from_pretrained(model), tokenizer, model)
    replay.run()
    tokens = replay.cache.get_seq_length()
    print(f"{method}: trace of {tokens} tokens: decisions equal, outputs within {replay.worst:.1e}")


# ---- replies

def check_replies(program, model, method, folder):
    """The port's replies and kvcomp's are the same -> those."""
    found = replies(method, model)
    for text, reply in zip(dialogues(), found):
        wanted = reply_of_kvcomp(program, model, method, text, folder)
        expect(reply == wanted, f"{method}: kvcomp answers {wanted!r}, the port {reply!r}")
    full = [reply_of_kvcomp(program, model, "full", text, folder) for text in dialogues()]
    expect(full != found, f"{method}: full attention answers the same: this shows nothing")
    print(f"{method}: {len(found)} replies are kvcomp's")


def check_families(program, method, folder):
    """The logits of tiny random models of other families, which have no tokenizer, over two turns of random ids.
    LycheeCluster scores by the paper's upper bound here."""
    import numpy as np
    import torch
    worst = 0
    for name in FAMILIES:
        model = ROOT / "data" / "golden" / name
        net = with_port(method, model)
        L, H, V = net.config.num_hidden_layers, net.config.num_attention_heads, net.config.vocab_size
        draw = torch.Generator().manual_seed(1)
        turns = [torch.randint(3, V, (n,), generator=draw).tolist() for n in (120, 60, 20, 30)]
        scores = torch.rand(L, H, generator=draw).tolist()
        ids, file, logits = folder / "ids.txt", folder / "scores.json", folder / "logits.bin"
        text = [" ".join(map(str, turn)) for turn in turns]
        ids.write_text(f"{text[0]} | {text[1]}\n{text[2]} | {text[3]}\n")
        file.write_text(json.dumps({f"{i}-{j}": scores[i][j] for i in range(L) for j in range(H)}))
        if method == "lychee":
            cache = port(method).LycheeCache(net.config, [], BUDGET[method], buffer=16, full_layers=0, beta=1)
            options = ["--lychee-full-layers", 0, "--lychee-buffer", 16, "--lychee-beta", 1]
        else:
            cache = port(method).DiliLazyCache(net.config, scores, BUDGET[method])
            options = ["--dililazy-scores", file]
        kvcomp(program, model, method, "--ids", ids, "--dump-logits", logits, *options)
        wanted = torch.from_numpy(np.fromfile(logits, dtype="<f4").reshape(-1, V))
        passes = [turns[0], *[[i] for i in turns[1]], turns[2], *[[i] for i in turns[3]]]
        with torch.no_grad():
            found = [net(torch.tensor([fed]), past_key_values=cache).logits[0, -1] for fed in passes]
        difference = ((torch.stack(found) - wanted).abs().max() / wanted.abs().max()).item()
        expect(difference <= TOLERANCE, f"{method}: logits of {name} differ by {difference} of the largest")
        worst = max(worst, difference)
    print(f"{method}: logits of {len(FAMILIES)} models of other families within {worst:.1e} of the largest")


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


def worker(model, methods, out):
    """One process of torchrun: answers with its share of the heads; the first one writes the replies."""
    import torch.distributed
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {method: replies(method, model, rank, size) for method in methods}
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def check_processes(program, model, methods, processes, folder):
    """The replies of several processes are those of kvcomp, which is one."""
    even, out = with_even_heads(model, processes, folder), folder / "replies.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               __file__, "--worker", str(out), "--model", str(even), *methods]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}\ncheck.py: {' '.join(command)}: exit code {done.returncode}")
    for method, found in json.loads(out.read_text()).items():
        for text, reply in zip(dialogues(), found):
            wanted = reply_of_kvcomp(program, even, method, text, folder)
            expect(reply == wanted, f"{method} in {processes} processes: kvcomp answers {wanted!r}, they {reply!r}")
        print(f"{method}: {len(found)} replies of {processes} processes are kvcomp's")


def main():
    parser = argparse.ArgumentParser(description="Holds the ports beside this file against kvcomp.")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="lychee, dililazy; both unless given")
    parser.add_argument("--program", default=str(ROOT / "kvcomp"))
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "kvcomp-tiny")
    parser.add_argument("--processes", type=int, default=2, help="of torchrun; 0: leave it out")
    parser.add_argument("--can-run", action="store_true", help="only say whether the packages are there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    a = parser.parse_args()
    methods = a.methods or list(BUDGET)
    for method in methods:
        if method not in BUDGET:
            parser.error(f"there is no port of {method}, only of {' and '.join(BUDGET)}")
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
        worker(a.model, methods, a.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for method in methods:
            check_trace(a.program, a.model, method, folder)
            check_replies(a.program, a.model, method, folder)
            check_families(a.program, method, folder)
        if a.processes:
            check_processes(a.program, a.model, methods, a.processes, folder)
    print(f"{Count.n} comparisons, all equal")


if __name__ == "__main__":
    main()
