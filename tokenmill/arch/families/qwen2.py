"""Qwen2, Qwen2.5, the text parts of Qwen2-VL and Qwen2.5-VL, and MiMo-7B: biases on q, k and v; windows (rarely used)
from layer `max_window_layers` on. MiMo's MTP layers are ignored."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, GGUFTraits, upper_layers
from tokenmill.arch.tensors import GGUF, HF_LLAMA

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
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
    gguf=GGUFTraits("qwen2", GGUF, other_archs=("qwen2vl",)),
    qkv_bias=True,
    has_rope_sections=True,
    windows=upper_layers,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)

MIMO = replace(
    QWEN2,
    name="mimo",
    model_types=("mimo",),
    gguf=None,
    has_rope_sections=False,
    hf_prefixes=("model.",),
    refused_flags=("use_mrope",),
    ignored_prefixes=("model.mtp_layers.",),
)
