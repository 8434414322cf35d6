"""LycheeCluster's chunker: where may a chunk of text end? The definition is "the chunker" in section 11 of kvcomp.c
(Table 4 of the paper), with its defaults; "D43" is a decision of NOTES.md. No tensors here, only text.

A chunk has 8 to 16 tokens and ends at the best boundary among those it may end at: behind an empty line or a
closing bracket, else behind a sentence, else behind a comma, else between two words.
"""

STRUCTURE = 1               # the level of the boundary behind a token; the lower, the better an end
SENTENCE = 2
PHRASE = 3
BLANK = 4                   # between two words
NONE = 5                    # inside a word
INSIDE = 9                  # inside a UTF-8 character: only where there is no other end
WALK_ON = 0                 # no level: behind a closing quote or bracket the character before it decides

LEVEL = {c: level for chars, level in [
    ("}]", STRUCTURE), (".?!。？！", SENTENCE), (",;:，；：、·", PHRASE), (" \t\r\u3000", BLANK),
    (")\"'”’」』】）", WALK_ON)] for c in chars}

TAIL_BYTES = 64             # bytes of the text that are remembered
WALK_CHARS = 8              # characters of it that are looked at, from the last one backwards


def token_texts(tokenizer):
    """What every id adds to the text, as bytes; None for a control token, which ends the text before it."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]     # byte-level BPE writes these as they are
    hidden = [b for b in range(256) if b not in visible]                # and these as U+0100, U+0101, ..
    byte_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    byte_level = type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
    added = tokenizer.added_tokens_decoder

    def text(i):
        if i in added:
            return None if added[i].special else added[i].content.encode()
        piece = tokenizer.convert_ids_to_tokens(i) or ""
        if byte_level:
            return bytes(byte_of[c] for c in piece)
        if len(piece) == 6 and piece.startswith("<0x"):                 # a byte of SentencePiece
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()                    # U+2581 is its blank

    return [text(i) for i in range(len(tokenizer))]


def ends_inside_character(tail):
    """Do the bytes end before the last character is complete? Its first byte says how long it is."""
    first = len(tail) - 1
    while first > 0 and len(tail) - first < 4 and tail[first] & 0xc0 == 0x80:
        first -= 1
    lead = tail[first] if tail else 0
    length = 1 if lead < 0xc0 else 2 if lead < 0xe0 else 3 if lead < 0xf0 else 4 if lead < 0xf8 else 0
    return len(tail) - first < length


def delimiter_level(text, at, after):
    """The level of character `at` of the text, or WALK_ON; None where it is no delimiter. after: the character
    behind it, "" where there is none."""
    c = text[at]
    if c == "\n":           # the end of an empty line is the end of a paragraph
        return STRUCTURE if text[:at].rstrip(" \t\r").endswith("\n") else SENTENCE
    if c == ">":            # -> => <> are one sign
        return None if text[max(at - 1, 0):at] in ("-", "=", "<") else STRUCTURE
    if c in "-*`":          # --- *** ``` are a rule or a fence
        return STRUCTURE if text[max(at - 2, 0):at + 1] == 3 * c else None
    joins = after.isascii() and (after.isalnum() or after in "_=:") and after != ""
    return None if joins and c in ".?!,;:" else LEVEL.get(c)            # 3.14, a.b, a::b, 10:30


def boundary_level(tail, token, after):
    """The level of the boundary behind a token. tail: the text up to it, its own bytes included; after: the bytes
    of the next token, None where the text ends."""
    if ends_inside_character(tail):
        return INSIDE
    if token and not token.strip(b" \t"):
        return BLANK

    # Backwards over delimiters and closing quotes, as in ." or ), and the best of them counts.
    text, next_char = tail.decode(errors="replace"), (after or b"")[:1].decode(errors="replace")
    best = NONE
    for at in reversed(range(max(len(text) - WALK_CHARS, 0), len(text))):
        level = delimiter_level(text, at, text[at + 1:at + 2] or next_char)
        if level is None:
            break
        if level != WALK_ON:
            best = min(best, level)
    word_ends = after is None or next_char in (" ", "\t", "\r", "\n")
    return BLANK if best == NONE and word_ends else best


class Chunks:
    """The tokens of a dialogue, cut into chunks: chunk j is tokens start[j] to start[j+1]-1. The first `sink` tokens
    and the last `buffer` ones belong to none."""

    def __init__(self, texts, sink, buffer, shortest=8, longest=16):
        self.texts, self.buffer, self.shortest, self.longest = texts, buffer, shortest, longest
        self.start = [sink]
        self.ids = []               # every token of the dialogue
        self.level = []             # of the boundary behind every token but the last, which depends on the next one
        self.tail = b""             # the text up to there

    def cut(self):
        """Cuts every chunk whose end is certain: as many tokens as it may have are there, and the buffer behind
        them (D43)."""
        texts = [self.texts[i] if i < len(self.texts) else b"" for i in self.ids[len(self.level):]]
        for token, after in zip(texts, texts[1:]):
            self.tail = b"" if token is None else (self.tail + token)[-TAIL_BYTES:]
            self.level.append(STRUCTURE if token is None else boundary_level(self.tail, token, after))
        while len(self.ids) - self.start[-1] >= max(self.buffer, 1) + self.longest:
            self.start.append(self.chunk_end(self.start[-1]) + 1)

    def chunk_end(self, s):
        """The last token of the chunk that starts at token s: the possible end with the best level, the last of
        equals (Sec. 4.3)."""
        ends = [e for e in range(s + self.shortest - 1, s + self.longest) if self.level[e] != INSIDE]
        return min(ends, key=lambda e: (self.level[e], -e), default=s + self.longest - 1)
