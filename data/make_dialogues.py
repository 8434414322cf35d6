"""Writes data/dialogues.jsonl: held-out chats of the shipped model's own grammar, for `kvcomp --eval FILE`.

    python data/make_dialogues.py

One json object a line: {"task", "messages": [{"role", "content", "answers"?}, ..]}. A reply with answers is scored. Sentences and values are
made by models/data_gen.py from its held-out entries, which training never uses as values of their own kind.
"""
import json, os, random, re, sys
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "models"))
import data_gen

TASKS = ["profile", "needle", "multi_needle", "key_values", "status", "people"]
EACH, TOKENS = 8, 480

def dialogue(r, task):
    """A chat whose last turn asks for one value of `task`; None if it asks for several."""
    _, turns = data_gen.make_chat(r, TOKENS, task, held=True)
    last = re.findall("«(.*?)»", turns[-1][1])
    if len(last) != 1 or len(turns) < 2: return None
    out = []
    for u, a in turns:
        out.append({"role": "user", "content": u})
        out.append({"role": "assistant", "content": re.sub("[«»]", "", a)})
    out[-1]["answers"] = last
    return {"task": task, "messages": out}

def main():
    r = random.Random(5)
    with open(os.path.join(HERE, "dialogues.jsonl"), "w") as f:
        for task in TASKS:
            made = 0
            while made < EACH:
                d = dialogue(r, task)
                if d: f.write(json.dumps(d, ensure_ascii=False) + "\n"); made += 1

main()
