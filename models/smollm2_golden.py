#!/usr/bin/env python3
"""Makes data/golden/smollm2/top50.jsonl: what transformers computes from models/smollm2-135m (`make smollm2`).

    python3 models/smollm2_golden.py               needs torch, transformers
    python3 models/smollm2_golden.py check FILE    compares FILE with what is computed now

A line is one dialogue: {"messages": [..], "ids": [..], "rows": [{"at": i, "ids": [50], "logits": [50]}, ..]}. ids
are those of apply_chat_template, with the head of the reply that is to come. A row has the 50 largest logits behind
token i, largest first. They are computed in float64 from the stored F16 weights, in one pass with eager attention.
"""
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE / "smollm2-135m"
OUT = HERE.parent / "data" / "golden" / "smollm2" / "top50.jsonl"
BEST = 50


def dialogues():
    """A short question; four messages with digits, code and other scripts; a page of a book."""
    book = (HERE.parent / "data" / "alice.txt").read_text().split("\n")
    return [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Answer in one line."},
         {"role": "user", "content": "My phone number is 0171 4025-33. Пожалуйста, remember it. Größe: 5'11\", 日本 🙂"},
         {"role": "assistant", "content": "I will remember 0171 4025-33."},
         {"role": "user", "content": "def add(a, b):\n    return a + b\n\nWhat does this do, and what is my number?"}],
        [{"role": "user", "content": "\n\n".join(book[:8]) + "\n\nWho ran past Alice?"}],
    ]


@torch.no_grad()
def line_of(model, tokenizer, messages):
    ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    logits = model(torch.tensor([ids])).logits[0]
    rows = []
    for at in [len(ids) // 4, len(ids) // 2, len(ids) - 2, len(ids) - 1]:
        best = logits[at].topk(BEST)
        rows.append({"at": at, "ids": best.indices.tolist(), "logits": [round(x, 5) for x in best.values.tolist()]})
    return {"messages": messages, "ids": ids, "rows": rows}


def compute():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64, attn_implementation="eager").eval()
    return [line_of(model, tokenizer, messages) for messages in dialogues()]


def check(path):
    """Prints the largest difference of a logit, and fails if an id differs or a logit by more than 1e-4."""
    worst = 0.0
    for old, new in zip(map(json.loads, open(path)), compute(), strict=True):
        assert old["messages"] == new["messages"] and old["ids"] == new["ids"], f"{path}: other dialogues or ids"
        for a, b in zip(old["rows"], new["rows"], strict=True):
            assert a["at"] == b["at"] and a["ids"] == b["ids"], f"{path}: other rows or ids"
            worst = max([worst] + [abs(x - y) for x, y in zip(a["logits"], b["logits"], strict=True)])
    print(f"largest difference of a logit: {worst:.1e}")
    assert worst < 1e-4, worst


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(sys.argv[2] if len(sys.argv) > 2 else OUT)
    else:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        with open(OUT, "w", encoding="utf-8") as f:
            for line in compute():
                f.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"{OUT}: {OUT.stat().st_size} bytes")
