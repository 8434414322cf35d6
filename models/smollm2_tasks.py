#!/usr/bin/env python3
"""Makes data/tasks/book-*.jsonl: dialogues for chat models, with facts hidden in the text of a book.

    python3 models/smollm2_tasks.py                         writes every task at 1k, 2k and 4k tokens
    python3 models/smollm2_tasks.py check                   fails if the files are not what it would write
    --items N --seed S --lengths 1000,8000 --out DIR        make others

Needs python3 alone. A line of a file is an item, which `kvcomp --eval FILE` reads:
    task, length, text    the task's name, tokens (about) of the dialogue; items of one text share its number
    position              where the question stands in the last message: begin, middle, end
    depth                 where the evidence stands in the text of its message, 0 to 100
    messages              [{"role": "user" or "assistant", "content": ..}, ..]; the reply to the last one is asked for
    reply                 a right reply, as a whole sentence
    answer, score         the right answers, and how a reply is scored: `found`, 1 if it holds one as whole words

The tasks, of texts of `length` tokens:
    book-needle   one sentence (a magic number, a password) in a passage, the question behind the passage
    book-facts    four facts about four people in a passage; the question is a message of its own, so that whoever
                  drops rows at the end of a prefill does so before he knows it
    book-turns    three messages with passages, the last one of 100 tokens. The first two ask about a fact of their own,
                  the third about another fact of the first. The question stands before, amid or behind the passage
                  (three versions of one text), as in LoopServe's Table 1. The first two replies are given.

The text is data/alice.txt: Lewis Carroll, Alice's Adventures in Wonderland (1865, public domain), from the file
alice29.txt of Debian's source package snappy, with every paragraph on one line. What is asked about does not occur in
it. The sentences were worded until SmolLM2-135M-Instruct found enough of them with full attention: it copies "The job
of Emma is pilot" more surely than "Emma works as a pilot". models/README.md has its scores.
"""
import argparse
import json
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BOOK = (ROOT / "data" / "alice.txt").read_text(encoding="utf-8").strip().split("\n")
BYTES_PER_TOKEN = 3.94                      # of this text, with SmolLM2's tokenizer
LAST = 100                                  # tokens of the passage in the last message of book-turns
POSITIONS = ["begin", "middle", "end"]

CITIES = "Prague Warsaw Lima Madrid Cairo Tokyo Oslo Lisbon Vienna Berlin Dublin Athens".split()
PLACES = "library museum castle bridge theater station harbor bakery school market".split()
WORDS = "marigold lantern copper walnut amber harbor saffron anchor saddle violin cactus turnip".split()
NAMES = "Oliver Emma Liam Sophia Noah Grace Henry Clara".split()
FACTS = {
    "birth year": [str(n) for n in range(1925, 2010)],
    "home town": CITIES,
    "job": "baker tailor pilot plumber teacher painter carpenter dentist".split(),
    "room number": [str(n) for n in range(101, 999)],
}


for answer in CITIES + WORDS + [value for values in FACTS.values() for value in values]:
    assert not any(answer in line for line in BOOK), f"{answer} occurs in the book"


# ---- texts
def passage(r, tokens):
    """Paragraphs of the book that follow each other, two at least and about so many tokens; behind the last comes the
    first."""
    at, lines, size = r.randrange(len(BOOK)), [], 0
    while size < tokens * BYTES_PER_TOKEN or len(lines) < 2:
        lines.append(BOOK[at % len(BOOK)])
        size += len(lines[-1]) + 2
        at += 1
    return lines


def put(lines, depth, sentence):
    """The lines with a sentence as a paragraph of its own, at the first gap behind depth (0 to 1) of the text."""
    at, before, size = 0, 0, sum(map(len, lines))
    while at < len(lines) and before < depth * size:
        before += len(lines[at])
        at += 1
    return lines[:at] + [sentence] + lines[at:]


def user(*lines):
    return {"role": "user", "content": "\n\n".join(lines)}


def assistant(text):
    return {"role": "assistant", "content": text}


def facts(r, n):
    """n facts of different kinds about different people: (question, sentence, answer)."""
    who, kinds = r.sample(NAMES, n), r.sample(sorted(FACTS), n)
    values = [r.choice(FACTS[kind]) for kind in kinds]
    return [(f"What is the {kind} of {name}?", f"The {kind} of {name} is {value}.", value)
            for name, kind, value in zip(who, kinds, values)]


# ---- tasks: the items that are made of one text; depth is 0 to 1
def needle(r, tokens, depth):
    if r.random() < .5:
        city, answer = r.choice(CITIES), str(r.randrange(1000, 10000))
        thing = f"special magic number for {city}"
    else:
        place, answer = r.choice(PLACES), r.choice(WORDS)
        thing = f"secret password of the {place}"
    sentence = f"The {thing} is {answer}."
    lines = put(passage(r, tokens), depth, sentence)
    text = user("Read the text and answer the question below it.", *lines, f"Question: What is the {thing}?")
    return [{"position": "end", "depth": 100 * depth, "messages": [text], "reply": sentence, "answer": [answer]}]


def told(r, tokens, depth):
    lines, all_facts = passage(r, tokens), facts(r, 4)
    for k, (_, sentence, _) in enumerate(all_facts):
        lines = put(lines, (k + .5) / 4, sentence)
    k = int(4 * depth)
    question, sentence, answer = all_facts[k]
    messages = [user(*lines), assistant("I have read the text."), user(question)]
    return [{"position": "end", "depth": 100 * (k + .5) / 4, "messages": messages,
             "reply": sentence, "answer": [answer]}]


def turns(r, tokens, depth):
    early, first, second = facts(r, 3)
    texts = [passage(r, n) for n in ((tokens - LAST) / 2, (tokens - LAST) / 2, LAST)]
    texts[0] = put(put(texts[0], depth, early[1]), .9 - .8 * depth, first[1])
    texts[1] = put(texts[1], r.random(), second[1])

    items = []
    for position in POSITIONS:
        messages = []
        for lines, (question, sentence, _) in zip(texts, (first, second, early)):
            at = {"begin": 0, "middle": len(lines) // 2, "end": len(lines)}[position]
            name = question.rstrip("?").split()[-1]
            lines = lines[:at] + ["Question: " + question] + lines[at:]
            messages.append(user(*lines, f"Answer the question about {name}."))
            messages.append(assistant(sentence))
        items.append({"position": position, "depth": 100 * depth, "messages": messages[:-1],
                      "reply": early[1], "answer": [early[2]]})
    return items


TASKS = {"book-needle": (needle, 12), "book-facts": (told, 12), "book-turns": (turns, 8)}


# ---- files
def made(task, tokens, n, seed):
    """The lines of a file: n texts, their depths evenly apart."""
    make, usual = TASKS[task]
    n = n or usual
    lines = []
    for text in range(n):
        r = random.Random(f"{task} {tokens} {seed} {text}")
        for item in make(r, tokens, (text + .5) / n):
            item["depth"] = round(item["depth"])
            head = {"task": task, "length": tokens, "text": text}
            lines.append(json.dumps({**head, **item, "score": "found"}) + "\n")
    return "".join(lines)


def main():
    options = argparse.ArgumentParser(description="Makes data/tasks/book-*.jsonl.")
    options.add_argument("what", nargs="?", choices=["make", "check"], default="make")
    options.add_argument("--items", type=int, default=0, help="texts of a task [12, 12, 8]")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--lengths", default="1000,2000,4000", help="tokens of a dialogue")
    options.add_argument("--out", type=pathlib.Path, default=ROOT / "data" / "tasks")
    o = options.parse_args()

    o.out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for tokens in map(int, o.lengths.split(",")):
            path = o.out / f"{task}-{tokens // 1000}k.jsonl"
            text = made(task, tokens, o.items, o.seed)
            if o.what == "make":
                path.write_text(text, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                sys.exit(f"{path} is not what this script makes")


if __name__ == "__main__":
    main()
