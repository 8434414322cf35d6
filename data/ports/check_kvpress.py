#!/usr/bin/env python3
"""Holds kvcomp and kvpress against each other, on one model.

    python3 data/ports/check_kvpress.py [--program ./kvcomp] [--model models/smollm2-135m] [--scores FILE] [PART]..

It needs kvpress (0.5.5 was tried) and what that needs; --can-run says in one line what is missing, with exit code 3.
The parts, all unless some are named:

  baselines   kvpress's own presses on three texts: which rows every head keeps, beside kvcomp's method of that name.
              A method or an option that the program does not know is left out, by number.
  presses     kvpress_kvcomp.py in kvpress's pipeline: its replies to three questions, and the rows that each query
              head reads for every token of them, beside a trace of kvcomp over the same tokens.
  evaluation  needles in a text, answered through kvpress's pipeline with DiliLazyPress and LoopServePress, and by
              kvcomp with the same ids and settings: both scores, and their paired difference with its 95 % interval.

--scores: a file of kvcomp --calibrate; by default head_scores.json in the model's folder. Exit code 5: a difference.
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TEXTS, TOKENS = 3, 420              # of the texts: how many, and how long
BUDGET = 100
REPLY = 24                          # most tokens of an answer
HAY = 230                           # words around a needle
EVALUATED = {"loopserve-d": 48, "dililazy": 280}        # methods, and the rows that they keep or read
COUNT = {"equal": 0, "differ": 0}

# kvpress's press, its settings, kvcomp's method with its options, and why their rows differ, where they must
SNAP = {"window_size": 64, "kernel_size": 5}
AVERAGE = "--obs-window 64 --kernel 5 --pool avg".split()
BASELINES = [
    ("TOVAPress", {}, "tova", [], ""),
    ("StreamingLLMPress", {"n_sink": 4}, "streaming", ["--sink", 4], ""),
    ("ExpectedAttentionPress", {"n_sink": 4}, "expected-attention", ["--sink", 4], ""),
    ("SnapKVPress", SNAP, "snapkv", AVERAGE, ""),
    ("PyramidKVPress", SNAP, "pyramidkv", AVERAGE, "kvpress's budgets of layers hold the window, and are all the same "
     "where the last layer's would be below it; kvcomp's come on top of the window, as in the authors' code"),
    ("KnormPress", {}, "knorm", [], ""),
    ("KeyDiffPress", {}, "keydiff", [], ""),
]


def missing():
    """What the check lacks, or None."""
    for package in ("torch", "transformers", "kvpress", "safetensors"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


class Refused(Exception):
    """kvcomp says why it does not run this."""


def kvcomp(a, method, ids, *words):
    """Runs kvcomp over a file of ids with f32 rows, f16 ones for PATS."""
    rows = "f16" if method == "pats" else "f32"
    file = a.room / "ids.txt"
    file.write_text("".join(" | ".join(" ".join(map(str, part)) for part in turn) + "\n" for turn in ids))
    command = [a.program, "-m", a.model, "-d", "cpu", "-q", "-t", 1, "-ctk", rows, "-ctv", rows, "--ids", file,
               "--dump-logits", a.room / "logits.bin", "--method", method, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode == 2:
        raise Refused(done.stderr.strip().splitlines()[0])
    if done.returncode:
        sys.exit(f"check_kvpress.py: {' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr}")


def logits_of_kvcomp(a, V):
    """What --dump-logits has written (rows,V)."""
    import torch
    raw = (a.room / "logits.bin").read_bytes()
    return torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw)).view(-1, V)


def expect(equal, what):
    COUNT["equal" if equal else "differ"] += 1
    if not equal:
        print(f"differs: {what}", file=sys.stderr)


def hay():
    return (ROOT / "data" / "calibrate_hay.txt").read_text()


# ---- baselines

def rows_kept(net, ids, press):
    """The rows that every head keeps (L,G lists): found again by their keys, among those of an uncompressed pass."""
    import torch
    from transformers import DynamicCache
    full, cut = DynamicCache(), DynamicCache()
    with torch.no_grad():
        net.model(input_ids=ids, past_key_values=full)
        with press(net):
            net.model(input_ids=ids, past_key_values=cut)
    kept = []
    for all_rows, some in zip(full.layers, cut.layers):
        place = [{row.numpy().tobytes(): i for i, row in enumerate(head)} for head in all_rows.keys[0]]
        kept.append([sorted(place[g][row.numpy().tobytes()] for row in head) for g, head in enumerate(some.keys[0])])
    return kept


def check_baselines(a, net, tokenizer):
    """A table. kvpress's TOVA always keeps the newest row, which may lose in kvcomp as in the authors' code: heads that
    differ in that alone are a column of their own. So are heads of layer 0 whose rows differ in equal tokens alone:
    their keys have the same length, and knorm may take either."""
    import kvpress
    import torch
    from safetensors import safe_open
    ids = tokenizer(hay()).input_ids
    texts = [ids[i * TOKENS:(i + 1) * TOKENS] for i in range(TEXTS)]
    kvcomp(a, "full", [(texts[0],)])
    with torch.no_grad():
        own = net(torch.tensor([texts[0]])).logits[0, -1]
    theirs = logits_of_kvcomp(a, len(own))[-1]
    apart = (own - theirs).abs().max()
    print(f"logits behind {TOKENS} tokens: kvcomp's and transformers' differ by {apart:.1e} at most; their standard "
          f"deviation is {own.std():.2f}")

    print("\n| kvpress | kvcomp | heads | the same rows | but for the newest | but for ties | others |"
          "\n|---|---|---:|---:|---:|---:|---:|")
    for name, settings, method, words, why_not in BASELINES:
        heads = same = newest = ties = 0
        title = f"| {name} | {' '.join(['--method', method, *map(str, words)])} |"
        for text in texts:
            ratio = 1 - (BUDGET + .5) / len(text)               # kvpress keeps int(n (1 - ratio)) rows
            press = getattr(kvpress, name)(compression_ratio=ratio, **settings)
            try:
                kvcomp(a, method, [(text,)], "--budget", BUDGET, "--trace", a.room / "trace", *words)
            except Refused as why:
                print(f"{title} left out: {why} |")
                break
            kept = rows_kept(net, torch.tensor([text]), press)
            with safe_open(a.room / "trace", "pt") as trace:
                for l, layer in enumerate(kept):
                    for g, own in enumerate(layer):
                        theirs = trace.get_tensor(f"pass0000.layer{l:02}.head{g:02}.kept").tolist()
                        last = {TOKENS - 1}
                        pinned = method == "tova" and set(own) - set(theirs) == last and len(own) == len(theirs)
                        pinned = pinned and len(set(theirs) - set(own)) == 1
                        words_of = lambda rows: sorted(text[r] for r in rows)
                        tied = l == 0 and own != theirs and words_of(own) == words_of(theirs)
                        heads, same = heads + 1, same + (own == theirs)
                        newest, ties = newest + (pinned and not tied), ties + tied
        else:
            other = heads - same - newest - ties
            print(f"{title} {heads} | {same} | {newest} | {ties} | {other} |", flush=True)
            if why_not:
                print(f"{method}: {why_not}")
            else:
                expect(other == 0, f"{name} and {method}: {other} of {heads} heads keep other rows")


# ---- the presses of kvpress_kvcomp.py

def presses(a, tokenizer, budget=BUDGET):
    """Of each method: the press, the program's options, and whether the question is a turn of its own."""
    import kvpress_kvcomp as ours
    B = ["--budget", budget]
    made = {
        "pats": (ours.PatsPress(window=32, b_max=10), ["--pats-window", 32, "--pats-bmax", 10], True),
        "lychee": (ours.LycheePress(budget=budget, buffer=32, tokenizer=tokenizer), [*B, "--lychee-buffer", 32], True),
        "loopserve-d": (ours.LoopServePress(budget=budget, first=2, interval=4, obs=4),
                        [*B, "--loopserve-first", 2, "--loopserve-interval", 4, "--loopserve-obs", 4], True),
    }
    if a.scores:
        made["dililazy"] = (ours.DiliLazyPress(scores=a.scores, budget=budget),
                            [*B, "--head-scores", a.scores], False)
        if "r2" in json.loads(pathlib.Path(a.scores).read_text()):
            made["headkv"] = (ours.HeadKVPress(scores=a.scores, budget=budget),
                              [*B, "--head-scores", a.scores], False)
    return made


def tokens_of(pipe, context, question):
    """The ids of context and question, as kvpress's pipeline makes them."""
    parts = pipe.preprocess(context, [question], "", 1 << 20)
    return parts["context_ids"][0].tolist(), parts["questions_ids"][0][0].tolist()


def answer(pipe, context, question, press):
    """What the pipeline writes, and the ids of it: its last ones are read off the passes it makes."""
    fed = []
    hook = pipe.model.register_forward_pre_hook(lambda _, args, kw: fed.append(kw["input_ids"][0].tolist()),
                                                with_kwargs=True)
    text = pipe(context, question=question, press=press, max_new_tokens=REPLY)["answer"]
    hook.remove()
    return text, [token for one in fed if len(one) == 1 for token in one]


def needles(count):
    """Texts with a needle at different depths: (context, question, answer)."""
    words, given = hay().split(), json.loads((ROOT / "data" / "calibrate_needles.json").read_text())
    for i in range(count):
        needle = given[i % len(given)]
        begin = i * 97 % (len(words) - HAY)
        text, depth = words[begin:begin + HAY], i * 37 % HAY
        context = " ".join(text[:depth] + [needle["needle"]] + text[depth:]) + "\n\n"
        yield context, needle["question"] + " Answer in one line.", needle["answer"]


def check_presses(a, pipe, tokenizer):
    """Replies and the rows read for them. q and k come from transformers here, so they differ from kvcomp's in their
    last bits, and where two clusters or rows score within that, another one is read: a list in a hundred may differ."""
    import torch
    from safetensors import safe_open
    V = pipe.model.config.vocab_size
    if not a.scores:
        print("left out: DiliLazyPress and HeadKVPress, for want of --scores")
    print("\n| press | answers | tokens, all kvcomp's | lists of rows | that differ |\n|---|---:|---:|---:|---:|")
    for method, (press, words, own_turn) in presses(a, tokenizer).items():
        tokens = lists = other = answers = 0
        for context, question, _ in needles(TEXTS):
            seen, read = {}, press.read

            def spy(module, query, key, value):
                key, value, see = read(module, query, key, value)
                if query.shape[2] == 1:
                    seen.setdefault(module.layer_idx, []).append(see)
                return key, value, see

            press.read = spy
            _, reply = answer(pipe, context, question, press)
            del press.read
            first, second = tokens_of(pipe, context, question)
            turns = [(first,), (second, reply)] if own_turn else [(first, second + reply)]
            kvcomp(a, method, turns, "--trace", a.room / "trace", *words)
            # Every token of the answer is the largest logit behind the one before it
            behind = logits_of_kvcomp(a, V)[-len(reply) - 1:-1].argmax(-1).tolist()
            for t, (own, theirs) in enumerate(zip(reply, behind)):
                expect(own == theirs, f"{method}, token {t} of an answer: kvpress has {own}, kvcomp {theirs}")
            with safe_open(a.room / "trace", "pt") as trace:
                passes = sorted({key[:8] for key in trace.keys()})[-len(reply):]
                for t, at in enumerate(passes):
                    for l, masks in seen.items():
                        for h in range(pipe.model.config.num_attention_heads):
                            theirs = trace.get_tensor(f"{at}.layer{l:02}.qhead{h:02}.read").tolist()
                            mask = masks[t]
                            own = list(range(theirs[-1] + 1)) if mask is None else mask[h, 0].nonzero()[:, 0].tolist()
                            lists, other = lists + 1, other + (own != theirs)
            tokens, answers = tokens + len(reply), answers + 1
        print(f"| {type(press).__name__} | {answers} | {tokens} | {lists:,} | {other} |", flush=True)
        expect(other <= lists / 100, f"{method}: {other} of {lists} lists of rows differ")


# ---- evaluation

def greedy(a, method, words, turns_of, draft, stop, V):
    """kvcomp's own answer: the draft is corrected, and goes on, until every token of it is the largest logit. turns_of
    makes the turns of an answer."""
    reply = list(draft)
    while True:
        kvcomp(a, method, turns_of(reply), *words)
        best = logits_of_kvcomp(a, V)[-len(reply) - 1:].argmax(-1).tolist()
        wrong = next((t for t, token in enumerate(reply) if best[t] != token), None)
        at = len(reply) if wrong is None else wrong             # the first token that is not sure yet
        if at == REPLY or best[at] in stop:
            return reply[:at]
        reply = reply[:at] + [best[at]]


def check_evaluation(a, pipe, tokenizer, method, budget):
    """The share of needles found, by both."""
    press, words, own_turn = presses(a, tokenizer, budget)[method]
    stop = pipe.model.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    found, differences, equal = {"full": 0, "kvpress": 0, "kvcomp": 0}, [], 0
    for context, question, wanted in needles(a.items):
        full = pipe(context, question=question, press=None, max_new_tokens=REPLY)["answer"]
        text, draft = answer(pipe, context, question, press)
        first, second = tokens_of(pipe, context, question)

        def turns_of(reply):
            return [(first,), (second, reply)] if own_turn else [(first, second + reply)]

        own = greedy(a, method, words, turns_of, draft, stop, pipe.model.config.vocab_size)
        theirs = tokenizer.decode(own, skip_special_tokens=True)
        scores = [wanted in one for one in (full, text, theirs)]
        for key, score in zip(found, scores):
            found[key] += score
        differences.append(scores[1] - scores[2])
        equal += text == theirs
    n, mean = a.items, sum(differences) / a.items
    spread = 1.96 * (sum((d - mean) ** 2 for d in differences) / n / max(n - 1, 1)) ** .5
    share = {key: score / n for key, score in found.items()}
    own = 1.96 * (share["kvcomp"] * (1 - share["kvcomp"]) / n) ** .5
    print(f"| {type(press).__name__} | {method} | {budget} | {share['full']:.3f} | {share['kvpress']:.3f} | "
          f"{share['kvcomp']:.3f} +- {own:.3f} | {mean:+.3f} +- {spread:.3f} | {equal} of {n} |", flush=True)
    expect(abs(mean) <= spread, f"{method}: the scores differ by {mean} +- {spread}")


def main():
    parser = argparse.ArgumentParser(description="Holds kvcomp and kvpress against each other.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="baselines, presses, evaluation; all unless given")
    parser.add_argument("--program", default=str(ROOT / "kvcomp"))
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m"))
    parser.add_argument("--scores", help="head scores, of kvcomp --calibrate")
    parser.add_argument("--items", type=int, default=24, help="of the evaluation")
    parser.add_argument("--can-run", action="store_true", help="only say whether the packages are there")
    a = parser.parse_args()
    if missing():
        print(f"check_kvpress.py: {missing()}", file=sys.stderr)
        sys.exit(3)
    if a.can_run:
        return
    own = pathlib.Path(a.model) / "head_scores.json"
    a.scores = a.scores or (str(own) if own.exists() else None)

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(HERE))
    import torch
    import transformers
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import kvpress                                              # noqa: F401  registers the pipeline
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
    net = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa")
    print(f"kvpress {importlib.metadata.version('kvpress')}, transformers {transformers.__version__}, {a.model}")
    parts = a.parts or ["baselines", "presses", "evaluation"]
    with tempfile.TemporaryDirectory() as room:
        a.room = pathlib.Path(room)
        if "baselines" in parts:
            check_baselines(a, net, tokenizer)
        import kvpress_kvcomp                                   # noqa: F401
        pipe = transformers.pipeline("kv-press-text-generation", model=net, tokenizer=tokenizer)
        if "presses" in parts:
            check_presses(a, pipe, tokenizer)
        if "evaluation" in parts:
            print("\n| press | kvcomp | rows | no press | in kvpress | in kvcomp | difference | same answers |")
            print("|---|---|---:|---:|---:|---:|---:|---:|")
            for method, budget in EVALUATED.items():
                if method == "dililazy" and not a.scores:
                    print(f"left out: {method}, because {own} is not there, and no --scores were given")
                else:
                    check_evaluation(a, pipe, tokenizer, method, budget)
    print(f"\n{COUNT['equal']:,} comparisons equal, {COUNT['differ']:,} differ")
    sys.exit(5 if COUNT["differ"] else 0)


if __name__ == "__main__":
    main()
