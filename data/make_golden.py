#!/usr/bin/env python3
"""Makes data/golden: tiny random checkpoints of every supported family, and the logits transformers computes from them.

    python3 data/make_golden.py [OUT [NAME..]]  needs torch, transformers, safetensors, numpy; OUT defaults to data/golden

A folder holds config.json, generation_config.json, the weights, and golden.bin, all little-endian:
    int32   n_ids, n_rows, V
    int32   ids[n_ids]          the first 70 are one prefill, the rest are decoded one by one
    int32   rows[n_rows]        which tokens' logits follow
    float32 logits[n_rows][V]   computed in float32 from the stored weights, eager attention
Every model has something the others lack, and the script fails unless that something moves the logits.
"""
import json
import pathlib
import shutil
import struct
import sys

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

PREFILL, DECODE, EARLY_ROWS, LOGIT_STD = 70, 10, [10, 35], 2.5
torch.set_num_threads(1)


def base(**changes):
    sizes = dict(vocab_size=160, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
                 bos_token_id=1, eos_token_id=2, pad_token_id=None, rope_parameters=rope("default"))
    return {**sizes, **changes}


def rope(kind, theta=10000.0, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


# name: (config class, its values, dtype of the file, what is done to the folder afterwards, what must matter)
MODELS = {
    "llama2-mha": (LlamaConfig, base(num_key_value_heads=4, vocab_size=130, hidden_size=40, intermediate_size=72),
                   "F32", {"old", "no_theta", "no_kv_heads"}, {}),
    "llama3-tied": (LlamaConfig, base(tie_word_embeddings=True, eos_token_id=[2, 5, 7], head_dim=16, rope_parameters=rope(
                        "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
                    "BF16", {"old"}, {"rope_type": "default"}),
    "llama-linear": (LlamaConfig, base(vocab_size=137, rope_parameters=rope("linear", factor=2.5)),
                     "F16", {"old", "type"}, {"rope_type": "default"}),
    "llama-biases": (LlamaConfig, base(hidden_size=54, intermediate_size=91, num_attention_heads=9, num_key_value_heads=3,
                                       head_dim=16, vocab_size=149, attention_bias=True, mlp_bias=True),
                     "BF16", set(), {"bias": 0}),
    "llama-sharded": (LlamaConfig, base(num_attention_heads=3, num_key_value_heads=1, head_dim=40, hidden_size=60,
                                        intermediate_size=72),
                      "F16", {"shards"}, {}),
    "llama-mixed": (LlamaConfig, base(num_attention_heads=2, num_key_value_heads=1, head_dim=48, hidden_size=56),
                    "BF16", {"f32_norms"}, {}),
    "qwen2-yarn": (Qwen2Config, base(bos_token_id=None,
                                     rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)),
                   "BF16", {"old", "type"}, {"rope_type": "default"}),
    "qwen2-biases": (Qwen2Config, base(num_attention_heads=6, num_key_value_heads=3, hidden_size=72, vocab_size=131),
                     "BF16", {"old", "shards"}, {"bias": 0}),
    "qwen2-window": (Qwen2Config, base(num_hidden_layers=3, hidden_size=48, use_sliding_window=True, sliding_window=20,
                                       max_window_layers=1),
                     "F16", {"old", "no_layer_types"}, {"sliding_window": 128}),
    "qwen3-norms": (Qwen3Config, base(num_attention_heads=9, num_key_value_heads=3, head_dim=16, hidden_size=60,
                                      tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=rope("default", 1000000.0)),
                    "BF16", {"old"}, {"q_norm": 1}),
    "qwen3-layers": (Qwen3Config, base(num_hidden_layers=3, hidden_size=40, head_dim=24, use_sliding_window=True,
                                       sliding_window=17, max_window_layers=3,
                                       layer_types=["full_attention", "sliding_attention", "full_attention"]),
                     "F16", set(), {"sliding_window": 128}),
    "qwen3-yarn": (Qwen3Config, base(head_dim=32, num_attention_heads=2, rope_parameters=rope(
                       "yarn", 100.0, factor=3.0, original_max_position_embeddings=80, beta_fast=4.0, beta_slow=0.5,
                       attention_factor=1.25)),
                   "F16", set(), {"rope_type": "default"}),
    "mistral-window": (MistralConfig, base(sliding_window=24), "BF16", {"old"}, {"sliding_window": 128}),
    "mistral-nemo": (MistralConfig, base(sliding_window=None, hidden_size=50, num_attention_heads=6, num_key_value_heads=2,
                                         head_dim=20, vocab_size=143, rope_parameters=rope("default", 1000000.0)),
                     "F16", set(), {}),
    "qwen3-bare": (Qwen3Config, base(hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1,
                                     vocab_size=139, tie_word_embeddings=True),
                   "BF16", {"no_head_dim", "no_prefix"}, {"q_norm": 1}),
    "llama-yarn": (LlamaConfig, base(rope_parameters=rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=64,
                                                          mscale=2.0, mscale_all_dim=0.5, truncate=False)),
                   "F16", set(), {"truncate": True}),
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def randomise(model, generator):
    """Weights that make attention uneven, norms and biases non-trivial, and logits of standard deviation LOGIT_STD."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_(0, 0.4, generator=generator)
        elif p.dim() == 1:
            p.data.uniform_(0.4, 1.8, generator=generator)
        elif "embed_tokens" in name:
            p.data.normal_(0, 0.7, generator=generator)
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            p.data.normal_(0, gain / p.shape[1] ** 0.5, generator=generator)


@torch.no_grad()
def logits_of(folder, ids, change=None):
    """Rows for every id, by one pass and again by prefill + decode with a cache. change: a part to switch off."""
    config = AutoConfig.from_pretrained(folder)
    change = dict(change or {})
    if "rope_type" in change:
        config.rope_parameters = {"rope_type": change.pop("rope_type"), "rope_theta": config.rope_parameters["rope_theta"]}
    if "truncate" in change:
        config.rope_parameters["truncate"] = change.pop("truncate")
    if "sliding_window" in change:
        config.sliding_window = change.pop("sliding_window")
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    for part, value in change.items():
        for name, p in model.named_parameters():
            if part in name:
                p.data.fill_(value)
    x = torch.tensor([ids])
    whole = model(x).logits[0]
    out = model(x[:, :PREFILL], use_cache=True)
    rows = [out.logits[0]]
    for i in range(PREFILL, len(ids)):
        out = model(x[:, i:i + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0])
    worst = (torch.cat(rows) - whole).abs().max().item()
    assert worst < 1e-4, f"{folder}: one pass and cached decoding differ by {worst}"
    return whole.numpy()


def rewrite_config(folder, todo):
    """transformers writes the new keys; most checkpoints in the world have the old ones."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "old" in todo:
        config["torch_dtype"] = config.pop("dtype")
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if rope["rope_type"] == "default":
            rope = None
        elif "type" in todo:
            rope["type"] = rope.pop("rope_type")
        config["rope_scaling"] = rope
    for key, when in [("rope_theta", "no_theta"), ("num_key_value_heads", "no_kv_heads"), ("layer_types", "no_layer_types"),
                      ("head_dim", "no_head_dim")]:
        if when in todo:
            del config[key]
    if "no_kv_heads" in todo:
        config["head_dim"] = None
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def make(out, number, name):
    cls, values, dtype, todo, matters = MODELS[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(1000 + number)
    model = AutoModelForCausalLM.from_config(cls(**values))
    randomise(model, generator)
    ids = torch.randint(3, values["vocab_size"], (PREFILL + DECODE,), generator=generator).tolist()
    with torch.no_grad():
        std = model.float()(torch.tensor([ids])).logits.std().item()
        (model.model.norm if values["tie_word_embeddings"] else model.lm_head).weight *= LOGIT_STD / std
    model.to(DTYPES[dtype]).save_pretrained(folder, max_shard_size="60KB" if "shards" in todo else "1GB")
    if "f32_norms" in todo:
        tensors = load_file(folder / "model.safetensors")
        tensors = {k: v.float() if v.dim() == 1 else v for k, v in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if "no_prefix" in todo:
        tensors = load_file(folder / "model.safetensors")
        tensors = {k.removeprefix("model."): v for k, v in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, todo)
    logits = logits_of(folder, ids)
    std = logits.std()
    moved = np.abs(logits_of(folder, ids, matters) - logits)[PREFILL - 1:].max() if matters else None
    assert 2 < std < 3 and (moved is None or moved > 0.3), f"{name}: std {std}, moved {moved}"
    rows = EARLY_ROWS + list(range(PREFILL - 1, PREFILL + DECODE))
    with open(folder / "golden.bin", "wb") as f:
        f.write(struct.pack(f"<3i{len(ids)}i{len(rows)}i", len(ids), len(rows), logits.shape[1], *ids, *rows))
        f.write(logits[rows].astype("<f4").tobytes())
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{name:16s} {size:7d} bytes  std {std:.2f}" + (f"  {'/'.join(matters)} moves {moved:.2f}" if matters else ""))
    return size


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "golden")
    names = sys.argv[2:] or list(MODELS)
    total = sum(make(target, i, name) for i, name in enumerate(MODELS) if name in names)
    print(f"{total} bytes in all")
