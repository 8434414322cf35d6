#!/usr/bin/env python3
"""Makes the tasks of data/tasks that the shipped model is asked: dialogues with facts in filler, and questions about them.

    python3 models/tiny_tasks.py                    writes the files (FILES below)
    python3 models/tiny_tasks.py check              fails if they are not what it would write
    python3 models/tiny_tasks.py TASK[,TASK] [--items N] [--length L[,L]] [--seed S]
                                                    prints others: N texts of each task and length, of L tokens each

Needs python3 alone. A line is an item, which `kvcomp --eval FILE` reads:
    task, length, text    the task's name, tokens asked for, the number of the text, which all its versions share
    score                 how a reply is scored: f1 of the words, choice among labels, rouge
    messages              [{"role": "user" or "assistant", "content": ..}, ..]. A right reply that is scored has "answers",
                          for a choice "choices", and where it applies the "position" of its question in the message
                          (begin, middle, end) and the "depth" of the evidence in the text, 0 to 100

Sentences and words are those of data_gen.py, which the shipped model was taught; the values are its held-out words and
numbers (a held-out number has a digit sum that is a multiple of 8). A text is a list of lines: the facts, near misses
(the same sentence about something else) and filler. An item is made from the seed, its task, its length and its number
alone, so more items never change the first ones.

LoopServe's benchmark ends every message with the same cue, wherever the query stands. Here the opening of the reply,
which the chat template writes, is that cue.
"""
import argparse
import functools
import json
import pathlib
import re
import sys

import data_gen as words

ROOT = pathlib.Path(__file__).resolve().parent.parent
MASK = (1 << 64) - 1
TASKS = ["needle", "multiturn", "coref", "facts", "json", "fewshot", "summary"]
SCORES = {"fewshot": "choice", "summary": "rouge"}          # of the others: f1

# a file, its task, texts of each length, lengths; those of test/tasks are as short as a test likes them
FILES = [("data/tasks/%s.jsonl" % task, task, 12, [512]) for task in TASKS] + [
    ("data/tasks/needle-short.jsonl", "needle", 4, [192, 384]),
    ("test/tasks/needle.jsonl", "needle", 2, [128]),
    ("test/tasks/coref.jsonl", "coref", 2, [96]),
    ("test/tasks/facts.jsonl", "facts", 5, [96]),
    ("test/tasks/summary.jsonl", "summary", 1, [96]),
]

NAMES = words.NAMES[5::8]
BEASTS, FOODS, JOBS = words.ANIMALS[:24], words.FOODS[:10], words.JOBS[:10]
LABELS = "zip zap foo bar left right one two".split()

# n, m stand for nouns, a, b for adjectives, x for an animal, d for a day
FILLER = [
    "The $n was $a and $b.",
    "There is a $n near the $m.",
    "A $a $n stood behind the $m.",
    "On $d the $n looked $a.",
    "The $x walked along the $a $n.",
    "We saw a $a $x by the $n.",
    "The $n is $a in the morning.",
    "People say that the $n was once $a.",
    "It rained on the $n all day.",
    "The wind moved the $n and the $m.",
    "Nobody knew why the $n was so $a.",
    "A $x slept under the $m.",
    "The $a $n leads to the $b $m.",
    "Every $d the $m is $b.",
    "The sun shone on the $n.",
    "It was a $a day in the $m.",
    "They painted the $n and cleaned the $m.",
    "The $m was full of people.",
    "From the $n you can see the $m.",
    "Some like the $n, others like the $m.",
]
FILLER_WORDS = {"n": words.NOUNS, "m": words.NOUNS, "x": BEASTS, "d": words.DAYS, "a": words.ADJS, "b": words.ADJS}


# ---- tokens
@functools.cache
def tokenizer():
    """The shipped model's: the pattern of its pieces, for ASCII, and the rank of every merge."""
    t = json.loads((ROOT / "models" / "kvcomp-tiny" / "tokenizer.json").read_text(encoding="utf-8"))
    pattern = t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    pattern = pattern.replace("\\p{L}", "A-Za-z").replace("[A-Za-z]", "A-Za-z").replace("\\p{N}", "0-9")
    pattern = re.sub(r"(?<!\[)(?<!\w)(A-Za-z|0-9)(?=[+{])", r"[\1]", pattern)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in t["model"]["merges"]]
    return re.compile(pattern), {m: i for i, m in enumerate(merges)}


@functools.cache
def piece_tokens(piece):
    _, rank = tokenizer()
    parts = list(piece.replace(" ", "\u0120").replace("\n", "\u010a"))
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), MASK))
        if (parts[best], parts[best + 1]) not in rank:
            break
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return len(parts)


def tokens(text):
    """The tokens of a text."""
    return sum(piece_tokens(piece) for piece in tokenizer()[0].findall(text))


# ---- drawing
def mix64(x):
    """The first number that splitmix64 draws from the state x."""
    z = x + 0x9e3779b97f4a7c15 & MASK
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & MASK
    z = (z ^ z >> 27) * 0x94d049bb133111eb & MASK
    return z ^ z >> 31


class Gen:
    """What an item is made with: its number, which chooses the kind and the depth, its length, and what was drawn."""

    def __init__(self, state, number, length):
        self.state, self.number, self.length = state, number, length
        self.used = set()                   # words drawn in this item
        self.depth = 30 * number % 110      # 0, 30, 60, 90, 10, 40, ..

    def int(self, n):
        """A whole number in [0,n)."""
        x = mix64(self.state)
        self.state = self.state + 0x9e3779b97f4a7c15 & MASK
        return x % n

    def word(self, values):
        return values[self.int(len(values))]

    def syllables(self, n):
        return "".join(self.word(words.SYLLABLES) for _ in range(n))

    def code(self):
        """A number whose digit sum is a multiple of 8; half of the draws are brought to four digits."""
        while True:
            n = 100 + self.int(99900)
            if self.int(2):
                n = n % 9000 + 1000
            if sum(map(int, str(n))) % 8 == 0:
                return str(n)

    def name(self):
        """A person: seven times of ten one of the list, otherwise two or three syllables."""
        if self.int(10) < 7:
            return self.word(NAMES)
        return self.syllables(2 + self.int(2)).capitalize()

    def thing(self):
        colour = self.word(words.COLOURS)
        return colour + " " + self.word(words.THINGS)

    def city(self):
        return self.word(words.CITIES[5::8])

    def animal(self):
        return self.word(words.ANIMALS[5::8])

    def room(self):
        return self.word(words.ROOMS)

    def age(self):
        return str(8 + self.int(87))

    def key(self):
        return self.syllables(3)

    def fresh(self, draw):
        """What draw() gives that this item does not have yet. After 200 more draws the last one is taken all the same: a
        short list may be used up."""
        for _ in range(201):
            v = draw()
            if v not in self.used:
                break
        self.used.add(v)
        return v

    def unused(self, draw):
        """The same, however long it takes."""
        while True:
            v = draw()
            if v not in self.used:
                self.used.add(v)
                return v

    def near_miss(self, thing):
        """For "red box": another thing of that colour, or the same thing in another colour."""
        colour, what = thing.split(" ")

        def draw():
            if self.int(2):
                return colour + " " + self.word(words.THINGS)
            return self.word(words.COLOURS) + " " + what
        return self.unused(draw)

    def shuffle(self, values):
        for i in range(len(values) - 1, 0, -1):
            k = self.int(i + 1)
            values[i], values[k] = values[k], values[i]


# ---- texts
def filler_line(g):
    """A sentence that says nothing of interest."""
    return re.sub(r"\$(.)", lambda m: g.word(FILLER_WORDS[m.group(1)]), g.word(FILLER))


def document(g, room, keys, depth=-1):
    """About `room` tokens of lines: filler with the keys in it, in their order, at places that are drawn. With a depth
    >= 0, keys[0] stands at that share of the lines (in per cent) instead."""
    lines, first = [], int(depth >= 0)
    room -= sum(tokens(" " + key) for key in keys)
    while room > 4:
        lines.append(filler_line(g))
        room -= tokens(" " + lines[-1])

    # from the last place to the first, so that the places before stay right
    at = sorted(g.int(len(lines) + 1) for _ in keys[first:])
    for k, key in reversed(list(zip(at, keys[first:]))):
        lines.insert(k, key)
    if depth >= 0:
        lines.insert(len(lines) * depth // 100, keys[0])
    return lines


# ---- turns
class Turn:
    """A message of the user and its right reply, which has its answer in braces where it is scored: "The code is {4821}."
    Several pairs of braces make one answer, with blanks between its parts. A turn with lines is a text to read, and its
    message is the question about it."""

    def __init__(self, user, reply, lines=None, sep=" ", choices=None, depth=-1):
        self.user, self.lines, self.sep, self.choices, self.depth = user, lines, sep, choices, depth
        self.reply = reply.replace("{", "").replace("}", "")
        self.answer = " ".join(re.findall(r"\{([^}]*)\}", reply))

    def about(self, lines, sep=" ", depth=-1):
        self.lines, self.sep, self.depth = lines, sep, depth
        return self

    def messages(self, user, position=None):
        reply = {"role": "assistant", "content": self.reply}
        if self.answer:
            reply["answers"] = [self.answer]
        if self.choices:
            reply["choices"] = self.choices
        if position:
            reply["position"] = position
        if self.depth >= 0:
            reply["depth"] = self.depth
        return [{"role": "user", "content": user}, reply]


POSITIONS = ["begin", "middle", "end"]      # versions of a dialogue: where the query stands in the message of its text
ALONE = ["alone"]                           # and one where it is a turn of its own, behind the text


def version(turns, where):
    """The messages of a dialogue in one of these versions."""
    messages = []
    for t in turns:
        if t.lines is None:
            messages += t.messages(t.user)
        elif where == "alone":
            messages += Turn(None, "I have read it.").messages(t.sep.join(t.lines)) + t.messages(t.user)
        else:
            at = {"begin": 0, "middle": len(t.lines) // 2, "end": len(t.lines)}[where]
            messages += t.messages(t.sep.join(t.lines[:at] + [t.user] + t.lines[at:]), where)
    return messages


# ---- facts: the sentence that tells one, the question, the reply, and what the value is
THING_FACTS = [
    ("The secret code of the %s is %s.", "What is the secret code of the %s?",
     "The secret code of the %s is {%s}.", Gen.code),
    ("The number of the %s is %s.", "What is the number of the %s?", "The number of the %s is {%s}.", Gen.code),
    ("The %s costs %s coins.", "How much does the %s cost?", "The %s costs {%s} coins.", Gen.code),
    ("The %s is in the %s.", "Where is the %s?", "The %s is in the {%s}.", Gen.room),
]
PEOPLE_FACTS = [
    ("%s lives in %s.", "Where does %s live?", "You said that %s lives in {%s}.", Gen.city),
    ("%s is %s years old.", "How old is %s?", "You said that %s is {%s} years old.", Gen.age),
    ("%s saw a %s.", "What did %s see?", "You said that %s saw a {%s}.", Gen.animal),
    ("%s's number is %s.", "What is %s's number?", "You said that %s's number is {%s}.", Gen.code),
]


def tell_fact(g, fact, who, lines):
    """Appends the sentence of a fact with a new value to lines and returns the question about it."""
    say, ask, reply, draw = fact
    what = g.fresh(lambda: draw(g))
    lines.append(say % (who, what))
    return Turn(ask % who, reply % (who, what))


def tell_values(g, lists):
    """Tells three numbers of one thing, one in each of three lists, which may be the same, and one number of a near miss in
    one of them. Returns the question about the three."""
    thing = g.fresh(g.thing)
    values = [g.fresh(g.code) for _ in range(3)]
    for lines, value in zip(lists, values):
        lines.append("A number of the %s is %s." % (thing, value))
    other = lists[g.int(3)]
    near = g.near_miss(thing)
    other.append("A number of the %s is %s." % (near, g.fresh(g.code)))
    return Turn("What are the numbers of the %s?" % thing, "The numbers of the %s are {%s}, {%s}, {%s}." % (thing, *values))


# ---- needle: facts about things stand somewhere in filler. The item's number chooses one of four kinds:
#   0  one needle
#   1  six needles, asked for one and, in the next turn, for another
#   2  three numbers of one thing
#   3  four needles, two of them asked for in one question
# The first fact that is asked for stands at the item's depth (not for kind 2).
def needle(g):
    kind, keys, second = g.number % 4, [], None
    depth = -1 if kind == 2 else g.depth
    fact = g.word(THING_FACTS)
    if kind == 2:
        q = tell_values(g, [keys] * 3)
    else:
        thing = g.fresh(g.thing)
        q = tell_fact(g, fact, thing, keys)
        if kind:
            second = tell_fact(g, fact, g.near_miss(thing), keys)
        for _ in range([0, 4, 0, 2][kind]):
            tell_fact(g, fact, g.fresh(g.thing), keys)
    if kind == 3:
        q.user, q.reply, q.answer = (a + " " + b for a, b in ((q.user, second.user), (q.reply, second.reply),
                                                              (q.answer, second.answer)))
    q.about(document(g, g.length - tokens(q.user), keys, depth), depth=depth)
    return [q] + ([second] if kind == 1 else []), POSITIONS + ALONE


# ---- multiturn: three messages to read, each with a question for which 1 to j of the first j messages are needed. Between
# them, a list of twelve names comes in two parts. At the end, in turns of their own, two questions follow: where the thing
# is that moved in every message, and what the whole list is.
def tell_chain(g, works, lives):
    """Tells a chain of two steps, who is with whom and where that person lives, and then another chain like it. Returns the
    question about the first."""
    verb, ask = g.word([
        ("works with", "Where does the person live who %s works with?"),
        ("is married to", "Where does the person live who %s is married to?"),
        ("is a friend of", "Where does the friend of %s live?"),
    ])
    turns = []
    for _ in range(2):
        a, b, city = g.fresh(g.name), g.fresh(g.name), g.fresh(g.city)
        works.append("%s %s %s." % (a, verb, b))
        lives.append("%s lives in %s." % (b, city))
        turns.append(Turn(ask % a, "You said that %s %s %s, and %s lives in {%s}." % (a, verb, b, b, city)))
    return turns[0]


def tell_hops(g, keys, j, hops):
    """A question of `hops` steps (at most j+1) whose facts are told in as many different messages of keys[0..j], each with a
    near miss beside it, as in LoopServe's benchmark."""
    at = [0, 1, 2]                          # the messages: the first steps of a shuffle
    for i in range(min(hops, j + 1)):
        k = i + g.int(j + 1 - i)
        at[i], at[k] = at[k], at[i]
    if hops == 3:
        return tell_values(g, [keys[k] for k in at])
    if hops == 2:
        return tell_chain(g, keys[at[0]], keys[at[1]])
    fact = g.word(THING_FACTS[:3])
    thing = g.fresh(g.thing)
    q = tell_fact(g, fact, thing, keys[at[0]])
    tell_fact(g, fact, g.near_miss(thing), keys[at[0]])
    return q


def tell_moves(g, keys):
    """Tells where a thing is: keys[0] says it, keys[1] and keys[2] change it, and the last one is right. Another thing moves
    as well."""
    thing = g.fresh(g.thing)
    other = g.near_miss(thing)
    for i in range(3):
        form = "I moved the %s to the %s." if i else "The %s is in the %s."
        mine = g.int(2)
        for k in range(2):
            where = g.fresh(g.room)
            keys[i].append(form % (thing if k == mine else other, where))
            if k == mine:
                room = where
    return Turn("Where is the %s now?" % thing, "The %s is in the {%s}." % (thing, room))


def multiturn(g):
    keys = [[], [], []]
    questions = [tell_hops(g, keys, j, 1 + g.int(j + 1)) for j in range(3)]
    moved = tell_moves(g, keys)
    names = [g.fresh(g.name) for _ in range(12)]
    halves = ["My guest list: %s." % words.join(names[:6]), "Add %s." % words.join(names[6:])]

    # the three messages, with the halves of the list between them
    room = g.length - tokens(halves[0]) - tokens(halves[1]) - 2 * tokens(moved.user)
    turns = []
    for j in range(3):
        turns.append(questions[j].about(document(g, room // 3 - tokens(questions[j].user), keys[j])))
        if j < 2:
            turns.append(Turn(halves[j], "Okay."))
    whole = Turn("What is on my guest list?", "Your guest list: %s." % ", ".join("{%s}" % name for name in names))
    return turns + [moved, whole], POSITIONS


# ---- coref: somebody is named once. Two facts follow with a pronoun alone, with messages about nothing between them. Facts
# of the same kinds about somebody else came before. Both facts are asked for.
def filler_turns(g, room):
    """At most eight messages of about 100 tokens that no question is about, `room` tokens in all."""
    n = 1 if room < 150 else min(room // 100, 8)
    return [Turn(" ".join(document(g, room // n, [])), "I see.") for _ in range(n)]


def two_kinds(g):
    """Two different kinds of facts about people."""
    first = g.int(4)
    second = (first + 1 + g.int(3)) % 4
    return PEOPLE_FACTS[first], PEOPLE_FACTS[second]


def coref(g):
    name, other = g.fresh(g.name), g.fresh(g.name)
    female, lines = g.int(2), []
    kinds = two_kinds(g)
    for kind in kinds:
        tell_fact(g, kind, other, lines)
    room = g.length - 7 * tokens(lines[0])  # four facts, the name and two questions are about as long as seven facts
    turns = [Turn(line, "Okay.") for line in lines] + [Turn("I have a friend called %s." % name, "Okay.")]
    questions = []
    for kind in kinds:
        turns += filler_turns(g, room // 3)
        q = tell_fact(g, kind, name, lines)
        if kind is PEOPLE_FACTS[3]:
            told = ("Her" if female else "His") + " number is %s." % q.answer
        else:
            told = kind[0] % ("She" if female else "He", q.answer)
        turns.append(Turn(told, "Okay."))
        questions.append(q)
    return turns + filler_turns(g, room // 3) + questions, ALONE


# ---- facts: two facts about each of five people are scattered over four messages with filler. Then two facts are asked for,
# about two people; the second question comes when the first one has already gone through the cache.
def facts(g):
    kinds = two_kinds(g)
    a = g.int(5)
    asked = a, (a + 1 + g.int(4)) % 5       # who is asked for with each kind
    keys, questions = [[], [], [], []], [None, None]
    for i in range(5):
        name = g.fresh(g.name)
        for k in range(2):
            q = tell_fact(g, kinds[k], name, keys[g.int(4)])
            if i == asked[k]:
                questions[k] = q
    room = g.length // 4 - 5                # 5: room for the questions
    return [Turn(" ".join(document(g, room, lines)), "Okay.") for lines in keys] + questions, ALONE


# ---- json: look-up of one key among many that fill the text: by the item's number in two JSON objects, in code or in prose.
# One other key differs from the one asked for in its last syllable; it is asked for in the next turn.
def json_task(g):
    form, sep = [("\"%s\": %s", ", "), ("%s = %s", "\n"), ("%s is %s.", " ")][g.number % 3]
    fact = form, "What is the value of %s?", "The value of %s is {%s}.", Gen.code
    key = g.fresh(g.key)
    near = g.unused(lambda: key[:-2] + g.word(words.SYLLABLES))
    own, other, lines = [], [], []
    q, second = tell_fact(g, fact, key, own), tell_fact(g, fact, near, other)

    # all other facts come first, in steps that become ever smaller, with room for four sentences more; then the second one
    # anywhere, and the first one at its depth
    while True:
        left = g.length - 4 * tokens(own[0]) - tokens(sep.join(lines))
        if left <= 8:
            break
        for _ in range(left // 20 + 1):
            tell_fact(g, fact, g.fresh(g.key), lines)
    lines[g.int(len(lines) + 1):0] = other
    lines[len(lines) * g.depth // 100:0] = own
    if g.number % 3 == 0:
        half = len(lines) // 2
        lines = ["{%s}" % ", ".join(part) for part in (lines[:half], lines[half:])]
    return [q.about(lines, " " if g.number % 3 == 2 else "\n", g.depth), second], POSITIONS + ALONE


# ---- fewshot: three labels that examples alone define, three examples each. The first four examples come in one message
# behind filler, the rest in the next message, with the word to label. By a draw the labels are the names of the kinds
# ("animal") or words without a meaning ("zip").
def fewshot(g):
    pools = [("animal", BEASTS), ("food", FOODS), ("job", JOBS), ("city", words.CITIES[5::8]), ("colour", words.COLOURS),
             ("thing", words.THINGS)]
    lines = document(g, g.length - 50, [])  # 50: room for the examples
    first, step = g.int(6), 1 + g.int(2)
    named, right = g.int(2), g.int(3)       # the labels are names; the right label
    chosen = [pools[(first + k * step) % 6] for k in range(3)]
    labels, shots = [], []
    for label, values in chosen:
        labels.append(label if named else g.fresh(lambda: g.word(LABELS)))
        for _ in range(3):
            shots.append("%s: %s" % (g.fresh(lambda: g.word(values)), labels[-1]))
    ask = "%s:" % g.fresh(lambda: g.word(chosen[right][1]))
    g.shuffle(shots)
    return [Turn("\n".join([" ".join(lines)] + shots[:4]), "I have read it."),
            Turn("\n".join(shots[4:] + [ask]), "The label is {%s}." % labels[right], choices=labels)], ALONE


# ---- summary: one sentence of the text says that it is the one that matters; the right reply repeats it.
def summary(g):
    kind, hour = g.int(4), 1 + g.int(12)
    name, city, day = g.name(), g.city(), g.word(words.DAYS)
    noun, thing = g.word(words.NOUNS), g.word(words.THINGS)
    if kind == 0:
        point = "the %s is closed on %s" % (noun, day)
    elif kind == 1:
        point = "%s will come to %s on %s" % (name, city, day)
    elif kind == 2:
        point = "the meeting is in the %s at %d" % (g.room(), hour)
    else:
        point = "the %s needs a new %s" % (noun, thing)
    told = g.word(["The main point is that %s.", "Important: %s.", "The most important thing is that %s."]) % point
    ask = "What is the main point?" if g.int(2) else "Give me a summary."
    q = Turn(ask, "The main point is that {%s.}" % point)
    return [q.about(document(g, g.length - tokens(q.user), [told], g.depth), depth=g.depth)], POSITIONS + ALONE


MAKE = dict(zip(TASKS, [needle, multiturn, coref, facts, json_task, fewshot, summary]))


# ---- files
def items(tasks, n, lengths, seed):
    """The lines of a file: the texts 0..n-1 of each task at every length, in all their versions."""
    text = 0
    for task in tasks:
        for length in lengths:
            state = mix64(mix64(mix64(seed) + TASKS.index(task) & MASK) + length & MASK)
            for i in range(n):
                turns, versions = MAKE[task](Gen(mix64(state + i & MASK), i, length))
                for where in versions:
                    item = {"task": task, "text": text, "length": length, "score": SCORES.get(task, "f1"),
                            "messages": version(turns, where)}
                    yield json.dumps(item, separators=(",", ":")) + "\n"
                text += 1


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("what", nargs="?", default="write")
    p.add_argument("--items", type=int, default=12)
    p.add_argument("--length", default="512")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    if a.what not in ("write", "check"):
        tasks = a.what.split(",")
        if not set(tasks) <= set(TASKS):
            p.error("tasks are %s" % ", ".join(TASKS))
        sys.stdout.writelines(items(tasks, a.items, [int(length) for length in a.length.split(",")], a.seed))
        return
    for path, task, n, lengths in FILES:
        text = "".join(items([task], n, lengths, 1))
        if a.what == "write":
            (ROOT / path).write_text(text, encoding="utf-8")
        elif (ROOT / path).read_text(encoding="utf-8") != text:
            sys.exit("%s is not what models/tiny_tasks.py writes" % path)


if __name__ == "__main__":
    main()
