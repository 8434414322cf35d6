#!/usr/bin/env python3
"""Turns LoopServe's own benchmark into items that `kvcomp --eval FILE` plays.

    hf download --repo-type dataset TreeAILab/Multi-turn_Long-context_Benchmark_for_LLMs --local-dir DIR
    python3 data/loopserve_items.py FILES >items.jsonl && ./kvcomp -m MODEL --eval items.jsonl --compare full,loopserve

FILES are json, json lines or (with pyarrow) parquet. A row has `multi_turn`, a list of turns; a turn has its message as
`prompt_back`, with the question behind the text, and may have others, prompt_NAME, with the question elsewhere: each
NAME makes an item of the row, so that begin, middle and end are versions of one text. No copy of the data set was at
hand: the two names above are those that SGLang's benchmark of it reads, and the field of the answer is --answer, by
default the first of answer, answers, output that a turn has. A file with other names ends with the names it has.

    --answer FIELD    of a turn, a text or a list of texts      --score found|f1|exact|choice|rouge    (f1)
    --rows N          the first N rows                          --task NAME    (loopserve)
"""
import argparse
import itertools
import json
import pathlib
import re
import sys

PLACES = {"front": "begin", "begin": "begin", "middle": "middle", "mid": "middle", "back": "end", "end": "end"}


def rows_of(path):
    if path.suffix == ".parquet":
        import pyarrow.parquet
        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = json.loads(text)
    return rows if isinstance(rows, list) else [rows]


def answers_of(turn, field, where):
    names = [field] if field else ["answer", "answers", "output"]
    value = next((turn[n] for n in names if turn.get(n)), None)
    if value is None:
        sys.exit(f"{where}: no {' or '.join(names)}; a turn has {', '.join(sorted(turn))}: which is the answer? --answer")
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def versions(turns, where):
    """The NAMEs of prompt_NAME that every turn has."""
    names = [re.sub("^prompt_", "", key) for key in turns[0] if key.startswith("prompt_")]
    names = [n for n in names if n in PLACES and all(f"prompt_{n}" in t for t in turns)]
    if not names:
        sys.exit(f"{where}: no prompt_back; a turn has {', '.join(sorted(turns[0]))}")
    return sorted(names, key=lambda n: ["begin", "middle", "end"].index(PLACES[n]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--answer")
    parser.add_argument("--score", default="f1")
    parser.add_argument("--task", default="loopserve")
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()

    text = 0
    for path in args.files:
        for number, row in enumerate(itertools.islice(rows_of(path), args.rows), 1):
            where = f"{path}, row {number}"
            turns = row.get("multi_turn") or sys.exit(f"{where}: no multi_turn; it has {', '.join(sorted(row))}")
            for name in versions(turns, where):
                messages = []
                for turn in turns:
                    answers = answers_of(turn, args.answer, where)
                    messages.append({"role": "user", "content": turn[f"prompt_{name}"]})
                    messages.append({"role": "assistant", "content": answers[0], "answers": answers,
                                     "position": PLACES[name]})
                print(json.dumps({"task": args.task, "score": args.score, "text": text, "messages": messages},
                                 ensure_ascii=False))
            text += 1


main()
