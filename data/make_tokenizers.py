#!/usr/bin/env python3
"""Makes the tokenizer fixtures in data/tokenizers/.

These are one small tokenizer of every supported kind, 580 nasty strings, the ids that the package `tokenizers`
gives for them, and dialogues as `transformers` renders them.

    python3 make_tokenizers.py                 needs tokenizers, transformers, jinja2
    python3 make_tokenizers.py patterns        patterns.json only
    python3 make_tokenizers.py programs        programs.json only, with the tokenizers that are there
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
# Minimal programs that write what the published templates of each family write (system, user and assistant
# messages, no tools).
EACH = "{%- for m in messages %}"

LLAMA_TURN = (
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim "
    "+ '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}"
)

LLAMA_LINES = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{%- set s = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}"
    "{%- else %}{%- set s = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday "
    "Date: ' + date_string + '\\n\\n' + s + '<|eot_id|>' }}"
)

CHATML = (
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}THINK{%- endif %}"
)

IN_USER = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{%- set s = messages[0]['content'] + '\\n\\n' %}"
    "{%- set messages = messages[1:] %}"
    "{%- else %}{%- set s = '' %}{%- endif %}" + EACH
    + "{%- if m['role'] == 'user' %}{{- BEFORE + (s if loop.first else '') + m['content'] + AFTER }}"
      "{%- else %}{{- GAP + m['content'] + eos_token }}{%- endif %}{%- endfor %}"
)


def default_system(words):
    """A program's beginning: these words, unless the dialogue begins with a system message."""
    return ("{%- if messages[0]['role'] != 'system' %}"
            "{{- '<|im_start|>system\\n" + words + "<|im_end|>\\n' }}{%- endif %}")


def in_user(before, after, gap):
    """IN_USER with these texts around a question and before a reply."""
    return IN_USER.replace("BEFORE", before).replace("AFTER", after).replace("GAP", gap)


VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)

# name, tokenizer, program, head of a reply, what opens the first question (system in a message of its own) or
# the words after the system text (@: the question itself)
CHATS = [
    ("llama3", "llama3", "{{- bos_token }}" + EACH + LLAMA_TURN,
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>user"),
    ("llama3.1", "llama3",
     "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
     + LLAMA_LINES + EACH + LLAMA_TURN,
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>user"),
    ("llama3.1", "llama3",
     "{%- if not date_string is defined %}"
     "{%- if strftime_now is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
     + LLAMA_LINES + EACH + LLAMA_TURN,
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>user"),
    ("chatml", "smollm2", EACH + CHATML.replace("THINK", ""), "<|im_start|>assistant\n",
     "<|im_start|>user"),
    ("chatml", "smollm2",
     default_system("You are a helpful AI assistant named SmolLM, trained by Hugging Face") + EACH
     + CHATML.replace("THINK", ""),
     "<|im_start|>assistant\n", "<|im_start|>user"),
    ("chatml", "qwen2",
     default_system("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.") + EACH
     + CHATML.replace("THINK", ""),
     "<|im_start|>assistant\n", "<|im_start|>user"),
    ("qwen3", "qwen2",
     EACH
     + CHATML.replace(
           "THINK",
           "{%- if enable_thinking is defined and enable_thinking is false %}"
           "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"),
     "<|im_start|>assistant\n", "<|im_start|>user"),
    ("mistral-v1", "spm-legacy", in_user("'[INST] '", "' [/INST]'", "''"), " [/INST]", "@"),
    ("mistral-v1-spaced", "spm-legacy", in_user("' [INST] '", "' [/INST]'", "' '"), " [/INST]", "@"),
    ("mistral-v3", "spm-first", in_user("'[INST] '", "'[/INST]'", "' '"), "[/INST]", "@"),
    ("mistral-tekken", "tekken", in_user("'[INST]'", "'[/INST]'", "''"), "[/INST]", "@"),
    ("llama2", "spm-legacy",
     "{%- if messages[0]['role'] == 'system' %}"
     "{%- set s = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
     "{%- set messages = messages[1:] %}"
     "{%- else %}{%- set s = '' %}{%- endif %}" + EACH
     + "{%- if m['role'] == 'user' %}"
       "{{- bos_token + '[INST] ' + ((s if loop.first else '') + m['content']) | trim + ' [/INST]' }}"
       "{%- else %}{{- ' ' + m['content'] | trim + ' ' + eos_token }}{%- endif %}{%- endfor %}",
     " [/INST]", "@"),
    ("tinyllama", "spm-legacy",
     EACH
     + "{{- '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{#- <|user|> #}"
       "{%- endfor %}"
       "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}",
     "<|assistant|>\n", "<|user|>"),
    ("vicuna", "spm-legacy",
     "{{- bos_token }}"
     "{%- if messages[0]['role'] == 'system' %}{%- set s = messages[0]['content'] %}"
     "{%- set messages = messages[1:] %}"
     "{%- else %}{%- set s = \"" + VICUNA + "\" %}{%- endif %}{{- s + ' ' }}" + EACH
     + "{%- if m['role'] == 'user' %}{{- 'USER: ' + m['content'] }}"
       "{%- else %}{{- ' ASSISTANT: ' + m['content'] + eos_token }}{%- endif %}{%- endfor %}"
       "{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}",
     "ASSISTANT:", "USER:"),
    ("deepseek-r1", "qwen2",
     "{{- bos_token }}" + EACH
     + "{%- if m['role'] == 'system' %}{{- m['content'] }}"
       "{%- elif m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}"
       "{%- else %}"
       "{{- '<｜Assistant｜>' + m['content'].split('</think>') | last + eos_token }}{%- endif %}"
       "{%- endfor %}"
       "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}",
     "<｜Assistant｜>", "<｜User｜>"),
]

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


def chat_turns(tok, fast, auto, entry, system, think, dialogue):
    """A dialogue turn by turn: the question, the ids to append for it, where its parts end, the reply's ids.

    entry is one of CHATS; dialogue is pairs of a question and a reply.
    """
    name, family, program, head, question = entry

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
    """Every entry of CHATS under every system text, with thoughts and without where it knows them."""
    out = []
    for entry in CHATS:
        name, family, program, _, _ = entry
        tok = tokenizers[family]
        bos, eos = ENDS.get(family, ("<s>", "</s>"))
        fast, auto = template_tokenizer(tok, program, bos, eos)
        for nth, system in enumerate(SYSTEMS):
            # with the last system text the first question begins with blanks
            dialogue = list(zip(QUESTIONS[nth // 2:] + QUESTIONS[:nth // 2], REPLIES))
            for think in (1, 0) if name == "qwen3" else (1,):
                out.append({
                    "name": name,
                    "tokenizer": family,
                    "program": program,
                    "system": system,
                    "think": think,
                    "turns": chat_turns(tok, fast, auto, entry, system, think, dialogue),
                })
    return out


# ------------------------------------------------------------------------------ programs as people run them
# Chat templates of the kinds that models are published with, tools and all, written after their public
# descriptions. `think`: the program knows enable_thinking. Dialogues that a program refuses (no system
# message) are left out by transformers' own error.
#
# Where a line of a program is too long for a line of this file, its literal ends and goes on in the next one.
TOOL_LINES = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
    {%- else %}DEFAULT
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are """ \
        r"""provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object:\n<tool_call>\n{\"name\": """ \
        r"""<function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
"""

CALLS = r"""        {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {%- endif %}
"""

TOOL_ROLE = r"""    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""

QWEN25_WORDS = "\n        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}"

QWEN25 = TOOL_LINES.replace("DEFAULT", QWEN25_WORDS) + r"""{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. """ \
            r"""You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) """ \
            r"""or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
""" + CALLS + r"""        {{- '<|im_end|>\n' }}
""" + TOOL_ROLE + r"""{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWQ = QWEN25.replace(
    "created by Alibaba Cloud. You are a helpful assistant.",
    "developed by Alibaba.",
).replace(
    'or (message.role == "assistant" and not message.tool_calls) %}',
    '%}',
).replace(
    '''    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}''',
    '''    {%- elif message.role == "assistant" and not message.tool_calls %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role }}''',
).replace(
    "{{- '<|im_start|>assistant\\n' }}",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}",
)

QWEN3_HEAD = TOOL_LINES.replace("DEFAULT", "") + r"""{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string """ \
        r"""and not(message.content.startswith('<tool_response>') """ \
        r"""and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = """ \
                    r"""content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') """ \
                    r"""+ '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
""" + CALLS + r"""        {{- '<|im_end|>\n' }}
""" + TOOL_ROLE

QWEN3 = QWEN3_HEAD + r"""{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

QWEN3_THINKING = QWEN3_HEAD + r"""{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %}"""

LLAMA31 = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
DATE
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message + builtin tools #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\n\n"}}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions. To call a function, please respond with JSON for """ \
        r"""a function call." }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{#- Custom tools are passed in a user message with some extra guidance #}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user """ \
            r"""message!") }}
{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | """ \
            r"""trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL_V3 = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" """ \
        r"""or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate """ \
                r"""user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS]BLANK[" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
            {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]BLANK" + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]BLANK" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS]BLANK[" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- "BLANK" + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]BLANK{"content": ' + message.content|string + ", " }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an """ \
            r"""initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""

SMALL3 = r"""{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "You are Mistral Small 3, a Large Language Model (LLM) created by """ \
    r"""Mistral AI, a French startup headquartered in Paris.\nYour knowledge base was last updated on """ \
    r"""2023-10-01. The current date is " + today + ".\n\nWhen you're not sure about some information, """ \
    r"""you say that you don't have the information and don't make up anything." %}

{{- bos_token }}

{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set system_message = messages[0]['content'] %}
    {%- else %}
        {%- set system_message = messages[0]['content'][0]['text'] %}
    {%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = default_system_message %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}

{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- else %}
                    {{- raise_exception('Only text and image blocks are supported in message content!') }}
                {%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is string %}
            {{- message['content'] + eos_token }}
        {%- else %}
            {{- message['content'][0]['text'] + eos_token }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

R1 = (
    r"{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    r"{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}"
    r"{%- for message in messages %}"
    r"{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}"
    r"{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    r"{%- for message in messages %}"
    r"{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    r"{{'<｜User｜>' + message['content']}}{%- endif %}"
    r"{%- if message['role'] == 'assistant' and message['content'] is none %}"
    r"{%- set ns.is_tool = false -%}"
    r"{%- for tool in message['tool_calls']%}"
    r"{%- if not ns.is_first %}"
    r"{{'<｜Assistant｜><｜tool▁calls▁begin｜>' + tool['type'] + '\n' + '```json' + '\n' "
    r"+ tool['function']['arguments'] + '\n' + '```'}}"
    r"{%- set ns.is_first = true -%}{%- endif %}{%- endfor %}{%- endif %}"
    r"{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    r"{%- if ns.is_tool %}{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}"
    r"{%- set ns.is_tool = false -%}"
    r"{%- else %}{% set content = message['content'] %}"
    r"{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    r"{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}{%- endfor -%}"
    r"{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}"
    r"{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜>THINK'}}{% endif %}"
)

HF_EACH = "{% for message in messages %}"

PLAIN_CHATML = (
    HF_EACH
    + "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
      "{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ZEPHYR = HF_EACH + r"""
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

TULU3 = (
    HF_EACH
    + r"{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}"
      r"{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
      r"{% elif message['role'] == 'assistant' %}"
      r"{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}"
      r"{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
      r"{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)

PHI3 = (
    HF_EACH
    + r"{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
      r"{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
      r"{% elif message['role'] == 'assistant' %}"
      r"{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
      r"{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
      r"{% else %}{{ eos_token }}{% endif %}"
)

PHI4 = (
    HF_EACH
    + r"{% if (message['role'] == 'system') %}"
      r"{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}"
      r"{% elif (message['role'] == 'user') %}"
      r"{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}"
      r"{% elif (message['role'] == 'assistant') %}"
      r"{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
      r"{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

YI = (
    r"{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    r"{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    r"{% set system_message = messages[0]['content'] %}"
    r"{% else %}{% set loop_messages = messages %}{% endif %}"
    r"{% if system_message is defined %}{{ system_message }}{% endif %}"
    r"{% for message in loop_messages %}"
    r"{% if message['role'] == 'user' %}"
    r"{{ '<|im_start|>user\n' + message['content'] + '<|im_end|>\n<|im_start|>assistant\n' }}"
    r"{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    r"{% endfor %}"
)

ALTERNATING = (
    r"{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    r"{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    r"{% endif %}"
)

MISTRAL_01 = (
    "{{ bos_token }}" + HF_EACH + ALTERNATING
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
      "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
      "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
      "{% endfor %}"
)

MISTRAL_02 = r"""{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate """ \
            r"""user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token}}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, with the exception of an """ \
            r"""initial optional system message!') }}
    {%- endif %}
{%- endfor %}
"""

LLAMA2_FULL = (
    r"{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    r"{% set system_message = messages[0]['content'] %}"
    r"{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    r"{% for message in loop_messages %}" + ALTERNATING
    + r"{% if loop.index0 == 0 and system_message != false %}"
      r"{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
      r"{% else %}{% set content = message['content'] %}{% endif %}"
      r"{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
      r"{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}"
      r"{% endif %}{% endfor %}"
)

LLAMA2_DEFAULT = LLAMA2_FULL.replace(
    "{% set system_message = false %}",
    "{% set system_message = 'You are a helpful, respectful and honest assistant. "
    "Always answer as helpfully as possible.' %}")

GEMMA = (
    r"{{ bos_token }}"
    r"{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    r"{% endif %}"
    r"{% for message in messages %}"
    r"{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    r"{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    r"{% endif %}"
    r"{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    r"{% else %}{% set role = message['role'] %}{% endif %}"
    r"{{ '<|start|>' + role + '\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{'<|start|>model\n'}}{% endif %}"
)

GRANITE = r"""{%- if messages[0]['role'] == 'system' %}
     {%- set system_message = messages[0]['content'] %}
     {%- set loop_messages = messages[1:] %}
 {%- else %}
     {%- set system_message = "Knowledge Cutoff Date: April 2024.
Today's Date: " + strftime_now('%B %d, %Y') + ".
You are Granite, developed by IBM." %}
     {%- if tools and documents %}
         {%- set system_message = system_message + " You are a helpful AI assistant with access to the """ \
             r"""following tools." %}
     {%- elif documents %}
         {%- set system_message = system_message + " Write the response to the user's input by """ \
             r"""strictly aligning with the facts in the provided documents." %}
     {%- else %}
         {%- set system_message = system_message + " You are a helpful AI assistant." %}
     {%- endif %}
     {%- if controls and 'citations' in controls %}
         {%- set system_message = system_message + '\n\nIn your response, use citations.' %}
     {%- endif %}
     {%- set loop_messages = messages %}
 {%- endif %}
 {{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
 {%- if documents %}
     {%- for document in documents %}
         {{- 'Document ' + loop.index | string + '\n' }}
     {%- endfor %}
 {%- endif %}
 {%- for message in loop_messages %}
     {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] """ \
         r"""+ '<|end_of_text|>\n' }}
     {%- if loop.last and add_generation_prompt %}
         {{- '<|start_of_role|>assistant' }}
             {%- if controls %}
                 {{- ' ' + controls | tojson()}}
             {%- endif %}
         {{- '<|end_of_role|>' }}
     {%- endif %}
 {%- endfor %}"""

OLMO2 = "{{ bos_token }}" + TULU3

CODER = r"""{%- set ns = namespace(found=false) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}
        {%- set ns.found = true -%}
    {%- endif -%}
{%- endfor -%}
{{bos_token}}{%- if not ns.found -%}
{{'You are an AI programming assistant, utilizing the DeepSeek Coder model, """ \
    r"""and you only answer questions related to computer science.\n'}}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
{{ message['content'] }}
    {%- else %}
        {%- if message['role'] == 'user' %}
{{'### Instruction:\n' + message['content'] + '\n'}}
        {%- else %}
{{'### Response:\n' + message['content'] + '\n<|EOT|>\n'}}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
{{- '### Response:\n' -}}
{% endif %}"""

OPENCHAT = (
    r"{{ bos_token }}{% for message in messages %}"
    r"{{ 'GPT4 Correct ' + message['role'].TITLE + ': ' + message['content'] + '<|end_of_turn|>'}}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"
).replace(
    "message['role'].TITLE",
    "('User' if message['role'] == 'user' else 'Assistant' if message['role'] == 'assistant' else 'System')")

MACRO = r"""{%- macro show(value, limit=3) -%}
    {%- if value is mapping -%}{{ value | tojson }}{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
""" + PLAIN_CHATML

VARIABLE = (
    r"{% set default_system = 'You are a careful assistant who answers in plain words.' %}"
    r"{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    r"{% set rest = messages[1:] %}"
    r"{% else %}{% set system = default_system %}"
    r"{% set rest = messages %}{% endif %}{{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}"
    r"{% for m in rest %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    r"{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)

SMOLLM3 = r"""{%- set system_message = messages[0].content if messages[0].role == "system" else "" -%}
{%- set rest = messages[1:] if messages[0].role == "system" else messages -%}
{{- "<|im_start|>system\n## Metadata\n\nToday Date: " ~ strftime_now("%d %B %Y") """ \
    r"""~ "\n\n## Custom Instructions\n\n" -}}
{%- if system_message -%}{{- system_message.rstrip() -}}{%- else -%}""" \
    r"""{{- "You are a helpful AI assistant named SmolLM." -}}{%- endif -%}
{{- "\n\n<|im_end|>\n" -}}
{%- for message in rest -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}{{ "<|im_start|>assistant\n" + message.content.lstrip("\n") """ \
            r"""+ "<|im_end|>\n" }}{% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}"""

SMOLLM3_FULL = r"""{# ---- defaults ---- #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}

{# ---- reasoning mode ---- #}
{%- if enable_thinking -%}
  {%- set reasoning_mode = "/think" -%}
{%- else -%}
  {%- set reasoning_mode = "/no_think" -%}
{%- endif -%}

{# ---- header (system message) ---- #}
{{- "<|im_start|>system\n" -}}

{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}
    {%- set reasoning_mode = "/no_think" -%}
  {%- elif "/think" in system_message -%}
    {%- set reasoning_mode = "/think" -%}
  {%- endif -%}
  {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}

{%- if "/system_override" in system_message -%}
  {{- custom_instructions.replace("/system_override", "").rstrip() -}}
  {{- "<|im_end|>\n" -}}
{%- else -%}
  {{- "## Metadata\n\n" -}}
  {{- "Knowledge Cutoff Date: June 2025\n" -}}
  {%- set today = strftime_now("%d %B %Y") -%}
  {{- "Today Date: " ~ today ~ "\n" -}}
  {{- "Reasoning Mode: " + reasoning_mode + "\n\n" -}}

  {{- "## Custom Instructions\n\n" -}}
  {%- if custom_instructions -%}
    {{- custom_instructions + "\n\n" -}}
  {%- elif reasoning_mode == "/think" -%}
    {{- "You are a helpful AI assistant who thinks first.\n\n" -}}
  {%- else -%}
    {{- "You are a helpful AI assistant.\n\n" -}}
  {%- endif -%}

  {%- if xml_tools or python_tools or tools -%}
    {{- "### Tools\n\n" -}}
    {%- if xml_tools or tools -%}
      {%- if tools -%}
        {%- set xml_tools = tools -%}
      {%- endif -%}
      {%- set ns = namespace(xml_tool_string="You may call one or more functions.\n\n<tools>\n") -%}
      {%- for tool in xml_tools[:] -%} {# The slicing makes sure that xml_tools is a list #}
        {%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "\n" -%}
      {%- endfor -%}
      {%- set xml_tool_string = ns.xml_tool_string + "</tools>" -%}
      {{- xml_tool_string -}}
    {%- endif -%}
    {{- "\n\n" -}}
  {%- endif -%}
  {{- "<|im_end|>\n" -}}
{%- endif -%}
{# ---- main loop ---- #}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\n"  + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
    {{ "<|im_start|>" + "user\n"  + content + "<|im_end|>\n" }}
    {%- endif -%}
{%- endfor -%}
{# ---- generation prompt ---- #}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}
        {{ "<|im_start|>assistant\n" }}
    {%- else -%}
        {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n"  }}
    {%- endif -%}
{%- endif -%}"""

SMALL32 = r"""{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "You are Mistral-Small-3.2.\nThe current date is " + today + ".\n\nWhen asked """ \
    r"""you answer (\"What are some good restaurants around me?\" => \"Where are you?\")." %}

{{- bos_token }}

{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}
        {%- set system_message = messages[0]['content'] %}
    {%- else %}
        {%- set system_message = messages[0]['content'][0]['text'] %}
    {%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = default_system_message %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- elif tools is not none %}
    {%- set parallel_tool_prompt = "You may call several tools." %}
    {%- set system_message = system_message + parallel_tool_prompt %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}

{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set filtered_messages = loop_messages | rejectattr("role", "equalto", "tool") | """ \
    r"""selectattr("tool_calls", "undefined") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in filtered_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate.") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}

{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS]" + tools|tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- set sorted_blocks = message['content'] | sort(attribute='type') %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- if message['content'] is defined and message['content'] is string %}
            {{- message['content'] }}
        {%- endif %}
        {%- if message.tool_calls is defined and message.tool_calls is not none %}
            {%- for tool in message.tool_calls %}
                {{- "[TOOL_CALLS]" + tool.function.name + "[ARGS]" + tool.function.arguments|tojson }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported.") }}
    {%- endif %}
{%- endfor %}"""

GRANITE33 = r"""{# Alias tools -> available_tools #}
{%- if tools and not available_tools -%}
    {%- set available_tools = tools -%}
{%- endif -%}
{%- if messages[0]['role'] == 'system' %}
     {%- set system_message = messages[0]['content'] %}
     {%- set loop_messages = messages[1:] %}
 {%- else %}
     {%- set system_message = "Knowledge Cutoff Date: April 2024.\nToday's Date: " """ \
         r"""+ strftime_now('%B %d, %Y') + ".\nYou are Granite, developed by IBM." %}
     {%- if available_tools and documents %}
         {%- set system_message = system_message + " You have tools." %}
     {%- elif thinking %}
         {%- set system_message = system_message + " Respond to every user query by thinking first." %}
     {%- else %}
         {%- set system_message = system_message + " You are a helpful AI assistant." %}
     {%- endif %}
     {%- if 'citations' in controls and documents %}
         {%- set system_message = system_message + '\nUse citations.' %}
     {%- endif %}
     {%- set loop_messages = messages %}
 {%- endif %}
 {{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
 {%- if available_tools %}
     {{- '<|start_of_role|>available_tools<|end_of_role|>' }}
     {{- available_tools | tojson(indent=4) }}
     {{- '<|end_of_text|>\n' }}
 {%- endif %}
 {%- if documents %}
 {%- for document in documents %}
     {{- '<|start_of_role|>document {"document_id": "' + document['doc_id'] | string + '"}<|end_of_role|>\n' }}
 {%- endfor %}
 {%- endif %}
 {%- for message in loop_messages %}
     {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
     {%- if loop.last and add_generation_prompt %}
         {{- '<|start_of_role|>assistant' }}
             {%- if controls %}
                 {{- ' ' + controls | tojson()}}
             {%- endif %}
         {{- '<|end_of_role|>' }}
     {%- endif %}
 {%- endfor %}"""

THOUGHT_MACRO = r"""{%- macro shown(content, last=false) -%}
    {%- if '</think>' in content and not last -%}
        {{- content.split('</think>', 1)[1] | trim -}}
    {%- else -%}
        {{- content -}}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(n=0, names=['a']) -%}
{%- for role, group in {'user': 'Q', 'assistant': 'A', 'system': 'S'}.items() -%}
    {%- set ns.n = ns.n + messages | selectattr('role', '==', role) | list | length -%}
{%- endfor -%}
{%- if ns.n != messages | length or ns.n // 2 * 2 > ns.n -%}{{ raise_exception('count') }}{%- endif -%}
{%- set header -%}
<|im_start|>
{%- endset -%}
{%- for m in messages if m.content -%}
    {%- if m.role == 'tool' -%}{%- continue -%}{%- endif -%}
    {{- header ~ m['role'] ~ '\n' ~ shown(m.content, last=loop.last) ~ '<|im_end|>' ~ "\n" -}}
    {%- if loop.revindex0 < -1 -%}{%- break -%}{%- endif -%}
{%- else -%}
    nothing
{%- endfor -%}
{{- ('<|im_start|>', 'assistant\n') | join if add_generation_prompt -}}"""

COMMAND = (
    r"{{ bos_token }}{%- set names = {'user': '<|user|>', 'assistant': '<|assistant|>', 'system': '<|system|>'} -%}"
    r"{% for m in messages %}{{ names[m.role] ~ m.content[:40].strip() }}"
    r"{%- if m.content | length > 40 %}{{ m.content[40:] }}{% endif -%}"
    r"{{ '<|end_of_turn|>' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ names.get('assistant') + (names.nobody or '') }}{% endif %}"
)

# what, kind, program, BOS, EOS
PROGRAMS = [
    ("Llama 3 Instruct", "llama3",
     "{% set loop_messages = messages %}"
     "{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] "
     "+ '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
     "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
     "{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
     "{% endif %}",
     "<|begin_of_text|>", "<|eot_id|>"),
    ("Llama 3.1 Instruct", "llama3.1",
     LLAMA31.replace(
         "DATE",
         '{%- if not date_string is defined %}\n'
         '    {%- set date_string = "26 Jul 2024" %}\n'
         '{%- endif %}'),
     "<|begin_of_text|>", "<|eot_id|>"),
    ("Llama 3.2 Instruct", "llama3.1",
     LLAMA31.replace(
         "DATE",
         '{%- if not date_string is defined %}\n'
         '    {%- if strftime_now is defined %}\n'
         '        {%- set date_string = strftime_now("%d %b %Y") %}\n'
         '    {%- else %}\n'
         '        {%- set date_string = "26 Jul 2024" %}\n'
         '    {%- endif %}\n'
         '{%- endif %}'),
     "<|begin_of_text|>", "<|eot_id|>"),
    ("Qwen 2 Instruct", "chatml",
     HF_EACH
     + "{% if loop.first and messages[0]['role'] != 'system' %}"
       "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
       "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
       "{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
     None, "<|im_end|>"),
    ("Qwen 2.5 Instruct", "chatml", QWEN25, None, "<|im_end|>"),
    ("Qwen 3", "qwen3", QWEN3, None, "<|im_end|>"),
    ("Qwen 3 2507 Instruct", "chatml",
     QWEN3_HEAD
     + "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}",
     None, "<|im_end|>"),
    ("Qwen 3 2507 Thinking", "qwen3-thinking", QWEN3_THINKING, None, "<|im_end|>"),
    ("QwQ", "qwen3-thinking", QWQ, None, "<|im_end|>"),
    ("Hermes", "chatml", PLAIN_CHATML, None, "<|im_end|>"),
    ("SmolLM2", "chatml",
     HF_EACH
     + "{% if loop.first and messages[0]['role'] != 'system' %}"
       "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
       "Face<|im_end|>\n' }}{% endif %}"
       "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
       "{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
     "<|im_start|>", "<|im_end|>"),
    ("SmolLM3 in short", "custom", SMOLLM3, None, "<|im_end|>"),
    ("ChatML, default text in a variable", "chatml", VARIABLE, None, "<|im_end|>"),
    ("ChatML with a macro for tools", "chatml", MACRO, None, "<|im_end|>"),
    ("InternLM 2", "custom", "{{ bos_token }}" + PLAIN_CHATML, "<s>", "</s>"),
    ("Yi 1.5", "yi", YI, None, "<|im_end|>"),
    ("Phi 3", "phi3", PHI3, "<s>", "<|endoftext|>"),
    ("Phi 3 medium", "phi3",
     "{% for message in messages %}"
     "{% if (message['role'] == 'user') %}"
     "{{'<|user|>' + '\n' + message['content'] + '<|end|>' + '\n' + '<|assistant|>' + '\n'}}"
     "{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '\n'}}{% endif %}"
     "{% endfor %}",
     "<s>", "<|endoftext|>"),
    ("Phi 4", "phi4", PHI4, "<|endoftext|>", "<|im_end|>"),
    ("Phi 4 mini", "custom",
     HF_EACH
     + "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
       "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] "
       "+ '<|/tool|>' + '<|end|>' }}"
       "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}"
       "{% endfor %}"
       "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
       "{% else %}{{ eos_token }}{% endif %}",
     "<|endoftext|>", "<|endoftext|>"),
    ("Mistral v0.1", "mistral-v0.1", MISTRAL_01, "<s>", "</s>"),
    ("Mixtral and Mistral v0.2", "mistral-v1-spaced", MISTRAL_02, "<s>", "</s>"),
    ("Mistral v0.3", "mistral-v3", MISTRAL_V3.replace("BLANK", " "), "<s>", "</s>"),
    ("Mistral Nemo", "mistral-tekken",
     MISTRAL_V3.replace("BLANK", "").replace(
         '{{- "" + message["content"]|trim + eos_token }}',
         '{{- message["content"] + eos_token}}'),
     "<s>", "</s>"),
    ("Mistral Small 3", "mistral-v7-tekken", SMALL3, "<s>", "</s>"),
    ("Mistral Large 2411", "mistral-v7",
     "{{ bos_token }}" + HF_EACH
     + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
       "{% elif message['role'] == 'system' %}"
       "{{ '[SYSTEM_PROMPT] ' + message['content'] + '[/SYSTEM_PROMPT]' }}"
       "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
       "{% else %}{{ raise_exception('Only user, system and assistant roles are supported!') }}"
       "{% endif %}{% endfor %}",
     "<s>", "</s>"),
    ("Llama 2", "llama2", LLAMA2_FULL, "<s>", "</s>"),
    ("Llama 2 with its default text", "llama2", LLAMA2_DEFAULT, "<s>", "</s>"),
    ("TinyLlama", "tinyllama", ZEPHYR, "<s>", "</s>"),
    ("Tulu 2", "tulu",
     HF_EACH
     + "\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] }}\n"
       "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] }}\n"
       "{% elif message['role'] == 'assistant' %}\n"
       "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
       "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
     "<s>", "</s>"),
    ("Tulu 3", "tulu", TULU3, "<|begin_of_text|>", "<|end_of_text|>"),
    ("OLMo 2", "custom", OLMO2, "<|endoftext|>", "<|endoftext|>"),
    ("Falcon 3", "tulu",
     HF_EACH
     + "{% if not loop.first %}{{ '\n' }}{% endif %}"
       "{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] }}"
       "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] }}"
       "{% elif message['role'] == 'assistant' %}"
       "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}"
       "{% if loop.last and add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}{% endfor %}",
     None, "<|endoftext|>"),
    ("Vicuna 1.5", "vicuna",
     "{{ bos_token }}"
     "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
     "{% set system_message = messages[0]['content'] %}"
     "{% else %}{% set loop_messages = messages %}{% set system_message = '" + VICUNA.replace("'", "\\'")
     + "' %}{% endif %}{{ system_message + ' ' }}"
       "{% for message in loop_messages %}"
       "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'].strip() + ' ' }}"
       "{% elif message['role'] == 'assistant' %}"
       "{{ 'ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}"
       "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
     "<s>", "</s>"),
    ("DeepSeek R1, distilled", "deepseek-r1", R1.replace("THINK", r"<think>\n"), "<｜begin▁of▁sentence｜>",
     "<｜end▁of▁sentence｜>"),
    ("DeepSeek R1, first", "deepseek-r1", R1.replace("THINK", ""), "<｜begin▁of▁sentence｜>",
     "<｜end▁of▁sentence｜>"),
    ("DeepSeek Coder", "custom", CODER, "<s>", "<|EOT|>"),
    ("Gemma's way in other words", "custom", GEMMA, "<s>", "<|end|>"),
    ("Granite 3", "custom", GRANITE, "<|end_of_text|>", "<|end_of_text|>"),
    ("OpenChat", "custom", OPENCHAT, "<s>", "<|end_of_turn|>"),
    ("SmolLM3", "custom", SMOLLM3_FULL, None, "<|im_end|>"),
    ("Mistral Small 3.2", "custom", SMALL32, "<s>", "</s>"),
    ("Granite 3.3", "custom", GRANITE33, "<|end_of_text|>", "<|end_of_text|>"),
    ("Hunyuan's way, thoughts by a macro", "custom", THOUGHT_MACRO, None, "<|im_end|>"),
    ("Command R's way", "custom", COMMAND, "<s>", "<|end_of_turn|>"),
]

# programs that are refused: why, program
REFUSED = [
    ("line 1: tojson of a text", "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"),
    ("line 2: frobnicate of a text", "{% for m in messages %}\n{{ m.content | frobnicate }}{% endfor %}"),
    ("line 1: upper of letters beyond ASCII", "{{ 'é' | upper }}"),
    ("line 1: the tag include", "{% for m in messages %}{{ m.content }}{% include 'x' %}{% endfor %}"),
    ("line 2: the tag filter", "\n{% filter upper %}x{% endfilter %}"),
    ("line 1: the function show", "{% for m in messages %}{{ show(m.content) }}{% endfor %}"),
    ("line 1: the program refuses: no", "{{ raise_exception('no') }}"),
    ("line 1: a member of something undefined", "{{ messages[7].content }}"),
    ("line 1: a text + a number", "{{ 'a' + 1 }}"),
    ("line 1: the test fresh of a text", "{{ 'a' is fresh }}"),
    ("line 1: a loop over a number", "{% for c in 5 %}{{ c }}{% endfor %}"),
    ("line 1: x is no namespace", "{% set x = {} %}{% set x.a = 1 %}"),
    ("writes the words of a message nowhere", "x<|im_start|>y"),
    ("line 3: the program ends before endif", "{% if 1 %}\na\nb"),
    ("line 1: expected '}}', found 'messages }}'", "{{ 5 messages }}"),
    ("line 1: a text without its closing quote", "{{ 'abc }}"),
    ("line 1: a comment without its end", "{# abc"),
    ("line 1: the escape \\q", "{{ 'a\\q' }}"),
    ("line 1: more than 90 brackets", "{{ " + "(" * 100 + "1" + ")" * 100 + " }}"),
    ("line 1: more than 90 brackets", "{{ " + "not " * 100 + "1 }}"),
    ("line 1: more than 90 brackets", "{% if 1 %}" * 100),
    ("writes the words of a message nowhere", "{{ 1" + "+1" * 1000 + " }}"),
    ("line 1: more than 90 brackets", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
]

# what: the tokenizer that its program is run with; the others have "marks"
SPOKEN = {
    "Mistral v0.1": "spm-legacy",
    "Mixtral and Mistral v0.2": "spm-legacy",
    "Llama 2": "spm-legacy",
    "Llama 2 with its default text": "spm-legacy",
    "TinyLlama": "spm-legacy",
    "Tulu 2": "spm-legacy",
    "Vicuna 1.5": "spm-legacy",
    "Mistral v0.3": "spm-first",
    "Mistral Nemo": "tekken",
    "Llama 3 Instruct": "llama3",
    "Llama 3.1 Instruct": "llama3",
    "Llama 3.2 Instruct": "llama3",
    "Tulu 3": "llama3",
    "OLMo 2": "gpt2",
    "Falcon 3": "gpt2",
}

MARKS = [
    "<|endoftext|>", "<s>", "</s>",
    "<|im_start|>", "<|im_end|>", "<|im_sep|>",
    "<|system|>", "<|user|>", "<|assistant|>",
    "<|start|>", "<|end|>", "<|EOT|>", "<|end_of_turn|>",
    "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
]


def dialogues():
    """The dialogues that every program renders."""
    say = lambda role, words: {"role": role, "content": words}
    u = [say("user", x) for x in ("Hello!", " Why\n\nis 世界 so? \n", "x = [1]")]
    a = [say("assistant", x) for x in ("Hi. How are you?", "Because.")]
    system = say("system", " Be kind.\nBe short. ")
    thought = [say("assistant", "<think>\nHm, %s.\n</think>\n\n%s" % x)
               for x in (("a greeting", "Hi."), ("why 世界", "So."), ("no", " Yes.\n"))]
    four = [u[0], thought[0], u[1], thought[1], u[2], thought[2], u[0]]
    return [[u[1]], [system, u[0]], [u[0], a[0], u[1]], [system, u[1], a[0], u[0], a[1], u[2]], four, [system] + four]


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
    """Every program over every dialogue."""
    out = []
    chat_template_utils.datetime = Day
    for what, name, program, bos, eos in PROGRAMS:
        family = SPOKEN.get(what, "marks")
        tok = tokenizers[family]
        fast, auto = template_tokenizer(tok, program, bos, eos)
        for think in (1, 0) if "enable_thinking" in program else (1,):
            options = {} if think else {"enable_thinking": False}
            out.append({
                "what": what,
                "name": name,
                "tokenizer": family,
                "bos": bos,
                "eos": eos,
                "think": think,
                "program": program,
                "ids": [program_ids(tok, fast, auto, d, options) for d in dialogues()],
            })
    refused = [{"why": w, "program": p} for w, p in REFUSED]
    return {"dialogues": dialogues(), "programs": out, "refused": refused}


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
    with open(os.path.join(HERE, "programs.json"), encoding="utf-8") as f:
        made = json.load(f)
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


# Patterns of known parts that no model has: pattern, behavior, invert.
PATTERNS = [
    (r"\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Nd}{1,2}|\s+$|\s", "Isolated", False),
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
     r"\s+(?!\S)|\s", "Isolated", False),
    (r"\d{1,3}(?=(?:\d{3})*(?:\D|$))", "Isolated", False),
    (r"[\p{L}\p{M}]+(?:['’](?i:s|t|re))?|[+-]?\d+(?:[.,]\d+)*|[^\p{L}\d\s]|\s+", "Isolated", False),
    (r"\p{L}+|[^\p{L}\s]+", "Isolated", True),
    (r"[\d\p{L}½-]+", "Isolated", False),
    (r"\s", "Removed", False),
    (r"\S+", "Removed", True),
    (r"[aeiou]", "MergedWithPrevious", False),
    (r"[A-Z\p{P}]", "MergedWithNext", False),
    (r"\p{N}", "Contiguous", False),
    (r"(?:ab|a)(?:c|bcd)?|x*y|[^\n]", "Isolated", False),
    (r"\s*$", "Isolated", False),
    (r"a*", "Isolated", False),
    (r"\p{Zs}?\P{Z}(?:\p{Mn}|\u200d\P{Z})*".replace(r"\u200d", "\u200d"), "Isolated", False),
    (r"(?!\d)[\d\p{L}]{2,}|(?=[\d_])[^\s.]{2}", "Isolated", False),
    (r"[一-龥぀-ヿ]+|[\p{Lt}\p{Lm}\p{Lo}]|\P{L}+", "Isolated", False),
    (r"(?i:k|the|[x-z'])+", "Isolated", False),
    (r"\p{S}+|\p{Pd}|\p{Ps}[^\p{Pe}\n]*\p{Pe}|\p{C}", "Isolated", False),
    (r"(\r?\n)+|\t{1,2}|[ ]{2,}", "Isolated", False),
]
PATTERN_TEXTS = [
    "The ABCs: HTMLParser2 reads 1234567 bytes (or 3.14, -2,5)  in camelCase_words_2!  ",
    "I'm, you'RE, she'S, we’re, 'ſ Kk \u212a\u017f xyz'XYZ the THE",
    "a\n\n  b\r\n\tc \n d\t\t\te\n",
    "naïve cafe\u0301 Ångström ǅ ʰA ½ ² Ⅷ ٣٤٥٦ ①② Ⓐ 🅰 1_000_000",
    "世界と日本語テキスト 한국어 שלום नमस्ते, 👨\u200d👩\u200d👧 👍🏽 «x» [y {z}] — 5–6 €7 <a|b>",
    "abcd abc ab a bcd xxy xx yx y aabaaac \u00a0\u3000\u2028x",
    "12 123 1234 12345 123456 1234567. 0",
]


def patterns():
    """The words that the patterns cut the texts into."""
    out = []
    for pattern, behavior, invert in PATTERNS:
        name = {"MergedWithPrevious": "merged_with_previous", "MergedWithNext": "merged_with_next"}
        step = pre_tokenizers.Split(Regex(pattern), name.get(behavior, behavior.lower()), invert)
        words = [[len(w.encode()) for w, _ in step.pre_tokenize_str(t)] for t in PATTERN_TEXTS]
        out.append({"pattern": pattern, "behavior": behavior, "invert": invert, "words": words})
    return {"texts": PATTERN_TEXTS, "patterns": out}


def main():
    """Makes all files, or does what the command line asks for; the exit code."""
    if sys.argv[1:2] == ["check"]:
        return check(sys.argv[2])
    if sys.argv[1:] == ["patterns"]:
        write("patterns.json", patterns())
        return 0
    if sys.argv[1:] == ["programs"]:
        # training gives other merges every time: the tokenizers stay as they are
        names = sorted(set(SPOKEN.values()) | {"marks"})
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
