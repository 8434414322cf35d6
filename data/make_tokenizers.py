#!/usr/bin/env python3
"""Makes the tokenizer fixtures in data/tokenizers/.

These are one small tokenizer of every supported kind, 580 nasty strings, the ids that the package `tokenizers`
gives for them, and dialogues as `transformers` renders them.

    python3 make_tokenizers.py                 needs tokenizers, transformers, jinja2
    python3 make_tokenizers.py patterns        patterns.json only
    python3 make_tokenizers.py programs        programs.json only, with the tokenizers that are there
    python3 make_tokenizers.py show WHAT       the text of a program of programs.json
    python3 make_tokenizers.py check KVCOMP    holds `KVCOMP --dump-tokens --batch` against programs.json

strings.bin       every string: varint length, bytes
NAME/*            tokenizer.json and tokenizer_config.json
NAME.pieces       byte-level families: per string, the lengths in bytes of the pre-tokenizer's pieces of the
                  normalized text
NAME.ids          per string: ids with special tokens parsed; ids without (one byte 1 when they are the same,
                  else 0 and the ids); the decoded text (one byte 1 when it is the string, else 0, varint
                  length, bytes). A list: varint count, varints
patterns.json     patterns that no model has, texts, and the lengths in bytes of the words they are cut into
chats.json        dialogues: template program, tokenizer, and per turn the ids to append and the ids of the
                  reply
programs.json     template programs as models are published with them, and the ids of whole dialogues;
                  programs that are refused
                  (These three are the only place of their patterns and programs: what is made anew is what
                  stands in "words", "turns" and "ids".)

Varints are base 128, low bits first. All texts are made here: word lists of this file, shuffled by a seeded
generator.
"""
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

import jinja2.exceptions
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizers")
RNG = random.Random(20261120)

WORDS = """
the of and to in is that it was for on are with as his they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them then she
many some so these would other into has more her two like him see time could no make than first been its
who now people my made over did down only way find use may water long little very after words called
just where most know get through back much before go good new write our used me man too any day same
right look think also around another came come work three word must because does part even place well
such here take why things help put years different away again off went old number great tell men say
small every found still between name should home big give air line set own under read last never us left
end along while might next sound below saw something thought both few those always looked show large
often together asked house world going want school important until form food keep children feet land
side without boy once animals life enough took sometimes four head above kind began almost live page got
earth need far hand high year mother light parts country father let night following picture being study
second eyes soon times story boys since white days ever paper hard near sentence better best across
during today others however sure means knew try told young miles sun ways thing whole hear example heard
several change answer room sea against top turned learn point city play toward five using himself
usually cache token model attention layer head value key query memory
""".split()

FOREIGN = """
der die das und nicht schön größer Straße für über naïve café déjà être garçon où señor mañana niño
corazón açúcar não привет мир слово дело жизнь человек время Москва γειά κόσμος λόγος ἄνθρωπος שלום עולם
مرحبا بالعالم कुत्ता नमस्ते दुनिया สวัสดี ชาวโลก 你好 世界 東京 大学 こんにちは カタカナ 한국어 안녕하세요 xin chào việt nam
đường İstanbul ığdır Ångström ﬁne ﬀ
""".split()

CODE = [
    "int main(void) {\n    return 0;\n}\n",
    "for (i = 0; i < n; i++)\n\tx[i] += 1;\n",
    "def f(a, b):\n        return a+b\n\n",
    "<a href=\"x\">y</a>",
    "https://example.org/a/b?c=1&d=2",
    "{\"key\": [1, 2, 3]}",
    "x = 3.14159e-10;",
    "// ---- ====\n",
    "C:\\dir\\file.txt",
]

BREAKS = ["'s ", "'t ", "n't ", "'re ", "'LL ", "  ", "   ", "\t", "\r\n"]


def corpus(n=4000):
    """n texts of a few words, as the tokenizers are trained on."""
    out = []
    for _ in range(n):
        words = [RNG.choice(WORDS if RNG.random() < .85 else FOREIGN) for _ in range(RNG.randint(3, 14))]
        if RNG.random() < .3:
            words[RNG.randrange(len(words))] = str(RNG.randrange(10 ** RNG.randint(1, 8)))
        s = " ".join(words)
        if RNG.random() < .5:
            s = s.capitalize() + RNG.choice([".", "!", "?", "...", ";\n", ".\n\n"])
        if RNG.random() < .15:
            s = s.replace(" ", RNG.choice(BREAKS), 2)
        if RNG.random() < .1:
            s = RNG.choice(CODE) + s
        if RNG.random() < .05:
            s = s.upper()
        out.append(s)
    return out


SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<think>", "</think>", "<tool_call>",
    "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<|left|>", "<|right|>", "<|both|>", "<both>", "@@", "ABC", "ABCD", "<0x0A>", "<0xE2>", "▁▁",
]


def strings():
    """Strings that show where one tokenizer cuts otherwise than another."""
    s = [
        "", " ", "  ", "   ", "a", " a", "  a", "a ", "a  ", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n",
        " \n", "\n ", " \n ", "\t", "\t\t", "\t\n", "a\n", "a\n\nb", "a\r\nb",
        "a \n b", "a\n  b", "a  \n\n  b", "a\t\tb", "\ta", "a\u00a0b", "\u00a0 a", "a\u3000\u3000b",
        "a\u2028b\u2029c", "a\u0085b", "\u1680 x", "a\u200bb", "\ufeffa", "\u180ea", "a\x0bb\x0cc",
        "\x1c\x1d\x1e\x1f",
        "Hello world", " Hello world", "Hello, world!", "HELLO WORLD", "hello  world", "hello   world",
        "(hello)", "\thello", "\t\thello", "!!hello", "#hello##", "hello_world", "hello-world", "_", "__",
        "a_b",
        "I'm you're he's we've I'll he'd don't", "I'M YOU'RE HE'S WE'VE I'LL HE'D DON'T", "'s", "'S",
        "'ſ", "x'ſx", "'ll", "'lL", "'l", "'L", "'re", "'rE", "'r", "'ve", "'v", "''s", "' s", "'", "''",
        "'sabc", "'S1", "’s", "x's'", "'tis", "'Twas", "'\u0301s", "'d'm't's", "'İ", "'K",
        "1", "12", "123", "1234", "12345", "123456", "1234567", "33333333", " 1", " 12", "  123",
        "a1b22c333", "3.14", "1,000,000", "1e10", "0x1F", "½", "¼½¾", "ied 4 ½ months", "²³", "٣٤٥٦",
        "१२३४", "Ⅷ", "①②③④", "𝟘𝟙𝟚𝟛", "一二三", "1½2", "1٣2", "a１２３４b", "〇", "𐄇𐄈", "๑๒๓", "1\u0301", "1 2",
        "1\n2", "1\t2", "\u0664 4",
        "naïve café", "nai\u0308ve cafe\u0301", "e\u0301", "e\u0301\u0301", "\u0301", "\u0301e",
        "a\u0323\u0307", "a\u0307\u0323", "q\u0307\u0323", "q\u0323\u0307", "\u1e0d\u0307",
        "\u1e0b\u0323", "\u0344", "\u2126", "\u212b", "\u212a", "\uf900", "\u2f800", "\ufb1d", "\u0958",
        "\u1100\u1161\u11a8", "\u1100\u1161", "\uac00\u11a8", "\uac01\u11a8", "\u1161\u11a8",
        "\u1100\u1100\u1161",
        "\u0f71\u0f72\u0f74", "\u0cca\u0cd5", "\u09c7\u09be", "\u0b47\u0b56\u0b3e", "\u30ab\u3099",
        "\u30ab\u30fc\u3099", "\u1fbf\u0301", "\u03b1\u0345\u0301", "\u0391\u0301\u0345", "\u0390",
        "\u0308\u0301", "\U0001d15e", "\U0001d1bf", "\U0001d157\U0001d165\U0001d16e",
        "\u0340\u0341\u0343", "\u2000\u2001", "\u0374\u037e\u0387", "\u2adc", "o\u0302\u0323",
        "s\u0323\u0307\u0301", "\u0061\u05b0\u0301\u0327\u0328\u0316",
        "x\u1ac8\u0323", "x\u0323\u1ac8", "\U00011935\U00011930", "a\u0300\u0316" * 5,
        "x" + "\u0301\u0323" * 9, "\u11a8", "\ud7a3", "\ud7a4", "Việt Nam", "Vie\u0302\u0323t Nam", "İi",
        "ß", "ẞ", "ŉ", "ǅ ǈ ǋ ǲ", "ʰʱʲ", "ªº", "ꟊ", "ﬁ", "ﬀ", "ᾈᾉ", "ǅabc", "ABCdef", "abcDEF", "AbCdEf",
        "camelCaseWord", "HTMLParser", "XMLHttpRequest2", "iPhone", "McDonald's", "ÉCOLE École",
        "你好Hello世界", "Hello世界Hello", "日本語テキスト", "あA", "Aあ", "あAあA", "AあaAa", "ʰA", "Aʰ", "Aʰa", "AAAʰAAA",
        "ʰʰAAA", "\u0301A", "A\u0301A", "A\u0301a", " \u0301A", "!\u0301A", "!\u0301a", "\u0301\u0301AA",
        "aA\u0301", "Ǆǅǆ",
        "Привет, мир!", "ПРИВЕТ", "γειά σου κόσμε", "ΓΕΙΆ", "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم",
        "مُحَمَّد", "नमस्ते दुनिया", "क्षत्रिय", "สวัสดีชาวโลก", "ကမ္ဘာ", "ខ្មែរ", "ᏣᎳᎩ", "አማርኛ",
        "ქართული", "Ქართული", "հայերեն", "ⴰⵎⴰⵣⵉⵖ", "བོད་སྐད", "한국어 텍스트", "안녕하세요", "𐐀𐐨", "𞤀𞤢", "ꙮ", "𓀀𓁐",
        "中文，標點。", "「引用」", "…—–", "¿Qué? ¡Sí!", "€100 £50 ¥1000", "™®©", "←↑→↓", "∑∏∫√", "ﷺ",
        "\U000e0001\U000e0041", "\ufffd", "\ufffe", "\uffff", "\U0010ffff", "\ue000", "\u0378",
        "🙂", "🙂🙃", "👨‍👩‍👧‍👦", "👍🏽", "🇩🇪🇫🇷", "❤️", "1️⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "this is 🦙.cpp", " this is 🦙.cpp",
        "a🙂b 🙂 c", "🙂 1", "👩🏿‍🚀!", "\u200d", "\u200d\u200d", "a\u200da", "\ufe0f",
        "hello/world", "a/b\n/c", "//\n//", "!!\n/\n", "...\n...\n", "!?\r\n\r\nx", "; }\n}\n",
        "a;\n\n\tb", "---\n", "```c\nint x;\n```", "~/.bashrc", "a=b+c*d/e", "<html>&amp;</html>",
        "\"quoted\" 'single'", "\\n\\t", "x" * 40, "ab" * 40, "A" * 33, "a A " * 12, "=" * 50, "." * 70,
        "!" * 17 + "a", "-" * 9 + "\n" * 7,
        " " * 2, " " * 4, " " * 8, " " * 16, " " * 33, " " * 70, "a" + " " * 20 + "b",
        "a" + "\n" * 20 + "b", "a" + " \n" * 12 + " b", "\t" * 19 + "x", " \t" * 9 + "1",
        " " * 9 + "\n" + " " * 9 + "x", "\u3000" * 5 + "x", "\n" + " " * 9, "\r" * 5 + "x",
        "x" + "\u00a0" * 6 + "y",
        "thequickbrownfox" * 20, "привет" * 30, "世界" * 50, "🙂" * 25, "1234567890" * 12, "a1" * 40,
        "e\u0301" * 30, "\u1100\u1161\u11a8" * 12, "dont'tsrelld" * 6,
    ]
    for a in SPECIAL:
        s += [a, "x" + a + "y", " " + a + "  y", a + a]
    s += [
        "Hello <s>.", "<s>Hello</s>", "<s> Hello", "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|><|im_start|", "<|im_start", "<<s>>", "[INST] hi [/INST] ho</s>", "ABCDE", "ABABC",
        "xABCx", "a <|left|> b", "a\n\t <|left|>b", "a <|right|> \n b", "a  <|both|>  b",
        "<|left|> <|left|>", "<|right|>  <|left|>", "<both> <both>", " ▁▁ ▁ ▁▁▁", "@@@", "@@@@",
        "<think>\nno\n</think>\n\nyes", "a▁b", "▁", "▁a", " ▁a", "<0x41>", "\x00", "a\x00b",
        "\x01\x02\x7f", "\u0100\u0101Ġhello Ċ ĉ",
    ]
    bits = [
        " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "1", "42", "½", "a", "The", "hello", "WORLD", "é",
        "e\u0301", "\u0323", "ñ", "世", "界", "한", "\u1100", "\u1161", "я", "ש", "\u05b8", "क", "्", "🙂",
        "\u200d", "👩", ".", ",", "!", "/", "(", "\"", "_", "<", "|>", "\u00a0", "\u3000", "ʰ", "ǅ", "٣",
        "<s>", "<|im_end|>", "ABC", "@@", "▁", "𝟘", "\U0001e900",
    ]
    while len(s) < 560:
        s.append("".join(RNG.choice(bits) for _ in range(RNG.randint(2, 24))))
    blocks = (
        (0x80, 0x250), (0x250, 0x600), (0x600, 0xe00), (0xe00, 0x2000), (0x2000, 0x3100),
        (0xa000, 0xac00), (0xf900, 0x10000), (0x10000, 0x10800), (0x11000, 0x11800), (0x1d000, 0x1d800),
        (0x1e000, 0x1f000),
    )
    for lo, hi in blocks:
        for _ in range(2):
            s.append("".join(chr(RNG.randrange(lo, hi)) for _ in range(24)))
    return list(dict.fromkeys(s))


# ------------------------------------------------------------------------------------------------- tokenizers
# The patterns of the pre-tokenizers.
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS)
QWEN2 = LLAMA3.replace("{1,3}", "")

TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + BLANKS)

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + BLANKS)

# Several splits in sequence. CR and LF stand in these as characters; the letters of DEEPSEEK_LLM are some
# ranges of the many.
DEEPSEEK_LLM = [
    "[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-Ⴥ" "\U00010400-\U0001044f" r"]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
]

DEEPSEEK_CODER = [
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[一-龥ࠀ-一가-퟿]+",
]

DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|""" "[^\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+" "[\r\n]*" r"|\s*" "[\r\n]+" r"|\s+(?!\S)|\s+",
]


def token(content, special=True, **flags):
    """An added token; a special one is looked for in the text as it stands, another in the normalized one."""
    return AddedToken(content, special=special, normalized=flags.pop("normalized", not special), **flags)


def add_tokens(t, added):
    """Adds tokens to a tokenizer, in this order."""
    for a in added:
        (t.add_special_tokens if a.special else t.add_tokens)([a])


def begins_with(bos, id):
    """A post-processor that puts the token bos, which has this id, before a text."""
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }


def byte_level(text, size, pre, added, first=(), normalizer=None, ignore_merges=False, pairs=True, bos=None):
    """A tokenizer.json of the byte-level family; first: special tokens with the lowest ids."""
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre_tokenizers.Sequence(pre) if len(pre) > 1 else pre[0]
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(first),
        show_progress=False,
    ))
    add_tokens(t, added)
    j = json.loads(t.to_str())
    if ignore_merges:
        # some words lose the merge that makes them: only ignore_merges finds them now
        merges = j["model"]["merges"]
        used = {half for m in merges for half in m}
        gone = {"".join(m) for m in merges[100::7] if "".join(m) not in used}
        j["model"]["merges"] = [m for m in merges if "".join(m) not in gone]
    if bos:
        ids = {x["content"]: x["id"] for x in j["added_tokens"]}
        level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
        j["post_processor"] = {"type": "Sequence", "processors": [level, begins_with(bos, ids[bos])]}
    if not pairs:
        j["model"]["merges"] = [" ".join(m) for m in j["model"]["merges"]]
    return j


def spm_vocabulary(text, size, byte_fallback):
    """The names and the merges of a model of the SentencePiece family: trained ones, and runs of blanks."""
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    t.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=size,
        limit_alphabet=90,
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    ))
    trained = json.loads(t.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + (["<0x%02X>" % b for b in range(256)] if byte_fallback else [])
    merges = [m if isinstance(m, list) else m.split(" ") for m in trained["merges"]]
    chars = [x for x in trained["vocab"] if len(x) == 1]
    names += ["".join(m) for m in merges] + chars + ["▁▁", "▁▁▁▁"]
    merges += [["▁", "▁"], ["▁▁", "▁▁"]]
    return list(dict.fromkeys(names)), merges


def spm_like(text, size, form, added=(), byte_fallback=True, fuse_unk=True, split=False,
             special_normalized=False):
    """A tokenizer.json of the SentencePiece family; form: legacy, first, always, never."""
    names, merges = spm_vocabulary(text, size, byte_fallback)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": False,
        "vocab": {x: i for i, x in enumerate(names)},
        "merges": merges,
    }
    specials = [token(x, normalized=special_normalized) for x in ("<unk>", "<s>", "</s>")] + list(added)
    legacy = form == "legacy"
    norm = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": form, "split": split}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if form != "never" else []
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ] + strip}
    t = Tokenizer.from_str(json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": norm if legacy else None,
        "pre_tokenizer": None if legacy else metaspace,
        "post_processor": begins_with("<s>", 1),
        "decoder": decoder,
        "model": model,
    }))
    add_tokens(t, specials)
    return json.loads(t.to_str())


# --------------------------------------------------------------------------------------------------- chats
# chats.json keeps minimal programs that write what the published templates of each family write (system, user and
# assistant messages, no tools). `head` is the head of a reply; `question` is what opens the first question (system in
# a message of its own) or the words after the system text (@: the question itself).
QUESTIONS = [
    "What is the key, and where does the value live?",
    "  Tell me a story about the sea\n\nand 42 boats. ",
    "Привет! naïve 世界 🙂?",
    "\nWhy?",
    "x = [1, 2]\n\tprint(x[0])",
]

REPLIES = [
    "The key is in the house.",
    "Once upon a time there was a boat, number 42.",
    "Hello 世界!",
    "I do not know.",
    "It prints 1",
]

SYSTEMS = [None, "You answer in one sentence.", " Be kind.\nBe short. "]

# tokenizer: BOS and EOS, where they are not <s> and </s>
ENDS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "smollm2": (None, "<|im_end|>"),
    "qwen2": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}

NO_THOUGHT = "<think>\n\n</think>\n\n"


def template_tokenizer(tok, program, bos, eos):
    """What renders dialogues by a program, and the ids that go before them.

    These are the BOS that the post-processor adds when the program does not.
    """
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=bos, eos_token=eos, chat_template=program)
    auto = tok.encode("").ids if bos and "bos_token" not in program else []
    return fast, auto


def chat_turns(tok, fast, auto, chat, dialogue):
    """A dialogue turn by turn: the question, the ids to append for it, where its parts end, the reply's ids.

    chat is one of chats.json; dialogue is pairs of a question and a reply.
    """
    keys = ("name", "tokenizer", "program", "head", "question", "system", "think")
    name, family, program, head, question, system, think = (chat[k] for k in keys)

    def render(messages, prompt):
        return fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt,
                                        enable_thinking=bool(think))

    if name == "deepseek-r1" or family.startswith(("spm", "tekken")):
        end = fast.eos_token
    else:
        end = "<|im_end|>" if "<|im_start|>" in program else "<|eot_id|>"
    messages = [{"role": "system", "content": system}] if system is not None else []
    turns, have = [], []
    for q, r in dialogue:
        messages = messages + [{"role": "user", "content": q}]
        text = render(messages, True)
        if think == 0:          # history has no empty thoughts: here it keeps what the reply began with
            text = text.replace(head, head + NO_THOUGHT).replace(NO_THOUGHT * 2, NO_THOUGHT)
        full = tok.encode(text, add_special_tokens=False)
        ids = auto + full.ids
        assert ids[:len(have)] == have, (name, "is not append-safe here")
        turn = {"user": q, "ids": ids[len(have):]}
        if not turns:
            asked = question
            if question == "@":                         # the words themselves, which Llama 2's program trims
                asked = q
                if name == "llama2":
                    asked = q.strip() if system is None else q.rstrip()
            place = text.index(asked)
            turn["n_sys"] = len(auto) + sum(b <= place for a, b in full.offsets)
        place = text.rindex(head)                       # a token over the edge counts
        turn["n_head"] = sum(b > place for a, b in full.offsets)

        messages = messages + [{"role": "assistant", "content": r}]
        text = render(messages, False)
        if think == 0:
            text = text.replace(head, head + NO_THOUGHT)
        after = auto + tok.encode(text, add_special_tokens=False).ids
        assert after[:len(ids)] == ids, (name, "the reply is not appended")
        have = after[:len(after) - after[::-1].index(tok.token_to_id(end))]
        turn["reply"] = have[len(ids):]
        turns.append(turn)
    return turns


def chats(tokenizers):
    """chats.json with the turns of every chat anew."""
    all_chats = kept("chats.json")
    for chat in all_chats:
        tok = tokenizers[chat["tokenizer"]]
        fast, auto = template_tokenizer(tok, chat["program"], *ENDS.get(chat["tokenizer"], ("<s>", "</s>")))
        # with the last system text the first question begins with blanks
        nth = SYSTEMS.index(chat["system"]) // 2
        chat["turns"] = chat_turns(tok, fast, auto, chat, list(zip(QUESTIONS[nth:] + QUESTIONS[:nth], REPLIES)))
    return all_chats


# ------------------------------------------------------------------------------ programs as people run them
# programs.json keeps chat templates of the kinds that models are published with, tools and all, written after their
# public descriptions, and the dialogues that each renders. One more is an entry without "ids" in it. Where think is 0,
# enable_thinking is false. Dialogues that a program refuses (no system message) are left out by transformers' own error.
MARKS = [
    "<|endoftext|>", "<s>", "</s>",
    "<|im_start|>", "<|im_end|>", "<|im_sep|>",
    "<|system|>", "<|user|>", "<|assistant|>",
    "<|start|>", "<|end|>", "<|EOT|>", "<|end_of_turn|>",
    "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
]


class Day(datetime.datetime):
    """The day that strftime_now knows in kvcomp: that of Llama 3.1's programs."""
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def program_ids(tok, fast, auto, d, options):
    """The ids of a dialogue as apply_chat_template gives them; None where the program refuses it."""
    try:
        whole = fast.apply_chat_template(d, tokenize=False, add_generation_prompt=True, **options)
        same = fast.apply_chat_template(d, add_generation_prompt=True, return_dict=False, **options)
    except jinja2.exceptions.TemplateError:
        return None
    ids = auto + tok.encode(whole, add_special_tokens=False).ids
    assert auto + list(same) == ids
    return ids


def programs(tokenizers):
    """programs.json with the ids of every program over every dialogue anew."""
    made = kept("programs.json")
    chat_template_utils.datetime = Day
    for p in made["programs"]:
        tok = tokenizers[p["tokenizer"]]
        fast, auto = template_tokenizer(tok, p["program"], p["bos"], p["eos"])
        options = {} if p["think"] else {"enable_thinking": False}
        p["ids"] = [program_ids(tok, fast, auto, d, options) for d in made["dialogues"]]
    return made


def prepare(folder, p, dialogues):
    """Fills a folder for a program: its tokenizer, a configuration that brings the program, d.jsonl."""
    family = os.path.join(HERE, p["tokenizer"])
    for name in os.listdir(family):
        shutil.copy(os.path.join(family, name), folder)
    config = os.path.join(folder, "tokenizer_config.json")
    old = {}
    if os.path.exists(os.path.join(family, "tokenizer_config.json")):
        old = json.load(open(config, encoding="utf-8"))
    new = {"bos_token": p["bos"], "eos_token": p["eos"], "chat_template": p["program"]}
    json.dump({**old, **new}, open(config, "w", encoding="utf-8"))
    with open(os.path.join(folder, "d.jsonl"), "w", encoding="utf-8") as f:
        f.write("".join(json.dumps({"messages": d}) + "\n" for d in dialogues))


def check(kvcomp):
    """Holds kvcomp --dump-tokens --batch against programs.json, which apply_chat_template made."""
    made = kept("programs.json")
    bad = n = 0
    with tempfile.TemporaryDirectory() as dir:
        for p in made["programs"]:
            wanted = [(d, ids) for d, ids in zip(made["dialogues"], p["ids"]) if ids]
            command = [kvcomp, "--dump-tokens", "--tokenizer", dir]
            command += ["--batch", os.path.join(dir, "d.jsonl")]
            command += [] if p["think"] else ["--no-think"]
            for _ in range(2):
                prepare(dir, p, [d for d, _ in wanted])
                run = subprocess.run(command, capture_output=True, text=True,
                                     env={**os.environ, "KVCOMP_DATE": "2024-07-26"})
                if "has no system message" not in run.stderr:
                    break
                # the program drops it in silence, and kvcomp refuses it: the others
                wanted = [(d, ids) for d, ids in wanted if d[0]["role"] != "system"]
            got = [[int(x) for x in line.split()] for line in run.stdout.splitlines()]
            for k, (d, ids) in enumerate(wanted):
                n += 1
                if k >= len(got) or got[k] != ids:
                    bad += 1
                    print(p["what"], "think", p["think"], "dialogue of", len(d), "messages:",
                          run.stderr.strip() or (got[k], ids))
    print(len(made["programs"]), "programs,", n, "dialogues,", bad, "differ")
    return bad != 0


# ----------------------------------------------------------------------------------------------------- output
def varint(x):
    """A number in base 128, low bits first."""
    out = b""
    while x > 127:
        out += bytes([x & 127 | 128])
        x >>= 7
    return out + bytes([x])


def id_list(ids):
    """A count, and the ids."""
    return varint(len(ids)) + b"".join(varint(i) for i in ids)


def record(text, ids, plain, back):
    """What NAME.ids holds of a string."""
    out = id_list(ids) + (b"\1" if plain == ids else b"\0" + id_list(plain))
    raw = back.encode("utf-8")
    return out + (b"\1" if back == text else b"\0" + varint(len(raw)) + raw)


def write(name, data):
    """Writes a file of data/tokenizers: bytes as they are, anything else as JSON."""
    path = os.path.join(HERE, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not isinstance(data, bytes):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    with open(path, "wb") as f:
        f.write(data)


def kept(name):
    """A file of data/tokenizers that keeps what it was made of."""
    with open(os.path.join(HERE, name), encoding="utf-8") as f:
        return json.load(f)


CONFIGS = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "smollm2": {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}},
    "qwen2": {
        "add_bos_token": False,
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
    },
    "spm-legacy": {"add_bos_token": True, "bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}},
}


def families(text):
    """Every tokenizer.json, trained on the text."""
    plain = lambda x, **f: token(x, special=False, **f)
    isolated = lambda patterns: [pre_tokenizers.Split(Regex(x), "isolated") for x in patterns]
    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digit = pre_tokenizers.Digits(individual_digits=True)
    digits = pre_tokenizers.Digits(individual_digits=False)
    split = lambda pattern: isolated([pattern]) + [plain_bytes]
    return {
        "llama3": byte_level(
            text, 1400, split(LLAMA3),
            [token(x) for x in ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                                "<|end_header_id|>", "<|eot_id|>")],
            ignore_merges=True, bos="<|begin_of_text|>"),
        "qwen2": byte_level(
            text, 900, split(QWEN2),
            [token(x) for x in ("<|endoftext|>", "<|im_start|>", "<|im_end|>",
                                "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")]
            + [plain(x, normalized=False) for x in ("<think>", "</think>", "<tool_call>",
                                                    "<｜User｜>", "<｜Assistant｜>")]
            + [plain("e\u0301@", normalized=True)],
            normalizer=normalizers.NFC()),
        "gpt2": byte_level(
            text, 700, [words],
            [token("<|endoftext|>"), plain("ABC"), plain("ABCD"), plain("@@", normalized=False)],
            pairs=False),
        "smollm2": byte_level(
            text, 800, [digit, words],
            [token("<|left|>", lstrip=True), token("<|right|>", rstrip=True),
             token("<|both|>", lstrip=True, rstrip=True), plain("<both>", lstrip=True, rstrip=True)],
            first=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pairs=False),
        "tekken": byte_level(
            text, 900, split(TEKKEN), [],
            first=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], ignore_merges=True, bos="<s>"),
        "numbers": byte_level(text, 400, [digits, words], [token("<|endoftext|>")]),
        "o200k": byte_level(text, 400, split(O200K), []),
        "deepseek-llm": byte_level(text, 400, isolated(DEEPSEEK_LLM) + [digit, plain_bytes], []),
        "deepseek-coder": byte_level(text, 400, isolated(DEEPSEEK_CODER) + [digit, plain_bytes], []),
        "deepseek-v3": byte_level(text, 400, isolated(DEEPSEEK_V3) + [plain_bytes], []),
        "falcon": byte_level(
            text, 400,
            [pre_tokenizers.Punctuation("contiguous"), words, digits] + isolated(["[0-9][0-9][0-9]"]), []),
        "punctuation": byte_level(
            text, 300, [pre_tokenizers.Punctuation("isolated"), plain_bytes, digit], []),
        "spm-legacy": spm_like(text, 900, "legacy", [plain("ABC"), plain("▁▁▁", normalized=False)]),
        "spm-normalized": spm_like(text, 300, "legacy", special_normalized=True),
        "spm-first": spm_like(text, 600, "first", [token("[INST]"), token("[/INST]")]),
        "spm-always": spm_like(text, 300, "always", split=True),
        "spm-never": spm_like(text, 300, "never"),
        "spm-unk": spm_like(text, 300, "first", byte_fallback=False, fuse_unk=True),
        "spm-unks": spm_like(text, 300, "legacy", byte_fallback=False, fuse_unk=False),
        "marks": byte_level(text, 400, split(LLAMA3), [], first=MARKS),
    }


def write_ids(name, t, cases):
    """Writes NAME.ids of a tokenizer.json."""
    out = b""
    for s in cases:
        t.encode_special_tokens = False
        ids = t.encode(s, add_special_tokens=False).ids
        t.encode_special_tokens = True
        plain = t.encode(s, add_special_tokens=False).ids
        out += record(s, ids, plain, t.decode(ids, skip_special_tokens=False))
    t.encode_special_tokens = False
    write(name + ".ids", out)


def write_pieces(name, t, cases):
    """Writes NAME.pieces of a tokenizer.json."""
    out = b""
    for s in cases:
        s = t.normalizer.normalize_str(s) if t.normalizer else s
        pieces = t.pre_tokenizer.pre_tokenize_str(s)
        out += id_list([len(s[a:b].encode()) for _, (a, b) in pieces])
    write(name + ".pieces", out)


def patterns():
    """patterns.json with the words anew that its patterns, which no model has, cut the texts into."""
    made = kept("patterns.json")
    for p in made["patterns"]:
        behavior = {"MergedWithPrevious": "merged_with_previous", "MergedWithNext": "merged_with_next"}
        behavior = behavior.get(p["behavior"], p["behavior"].lower())
        step = pre_tokenizers.Split(Regex(p["pattern"]), behavior, p["invert"])
        p["words"] = [[len(w.encode()) for w, _ in step.pre_tokenize_str(t)] for t in made["texts"]]
    return made


def main():
    """Makes all files, or does what the command line asks for; the exit code."""
    if sys.argv[1:2] == ["check"]:
        return check(sys.argv[2])
    if sys.argv[1:2] == ["show"]:
        print(next(p["program"] for p in kept("programs.json")["programs"] if p["what"] == sys.argv[2]))
        return 0
    if sys.argv[1:] == ["patterns"]:
        write("patterns.json", patterns())
        return 0
    if sys.argv[1:] == ["programs"]:
        # training gives other merges every time: the tokenizers stay as they are
        names = {p["tokenizer"] for p in kept("programs.json")["programs"]}
        paths = {name: os.path.join(HERE, name, "tokenizer.json") for name in names}
        write("programs.json", programs({name: Tokenizer.from_file(paths[name]) for name in names}))
        return 0

    text, cases = corpus(), strings()
    write("strings.bin", b"".join(varint(len(s.encode())) + s.encode() for s in cases))
    trained = families(text)
    for name, config in CONFIGS.items():
        write(name + "/tokenizer_config.json", config)
    loaded = {}
    for name, j in trained.items():
        write(name + "/tokenizer.json", j)
        t = loaded[name] = Tokenizer.from_str(json.dumps(j))
        if name == "marks":                                 # for programs.json only
            continue
        write_ids(name, t, cases)
        if name in ("falcon", "punctuation"):               # whose pieces may end inside a character
            continue
        if j["decoder"]["type"] == "ByteLevel":
            write_pieces(name, t, cases)
    write("patterns.json", patterns())
    write("chats.json", chats(loaded))
    write("programs.json", programs(loaded))
    print(len(cases), "strings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
