"""Qwen2, Qwen2.5 and MiMo-7B: biases on q, k and v; windows (rarely used) from layer `max_window_layers` on. MiMo's MTP
layers are ignored."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family, GGUFTraits, upper_layers
from tokenmill.arch.tensors import GGUF, HF_LLAMA

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    hf_rules=HF_LLAMA,
    gguf=GGUFTraits("qwen2", GGUF),
    qkv_bias=True,
    windows=upper_layers,
)

MIMO = replace(
    QWEN2,
    name="mimo",
    model_types=("mimo",),
    gguf=None,
    refused_flags=("use_mrope",),
    ignored_prefixes=("model.mtp_layers.",),
)
