"""Qwen3, and the text part of Qwen3-VL: RMS norms on q and k instead of Qwen2's biases, and its own `head_dim`."""

from __future__ import annotations

from tokenmill.arch.families.qwen2 import QWEN2
from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, GGUFTraits, upper_layers
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_QK_NORM

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3", "qwen3_vl", "qwen3_vl_text"),
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    hf_rules={**HF_LLAMA, **HF_QK_NORM},
    gguf=GGUFTraits("qwen3", GGUF, other_archs=("qwen3vl",)),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    has_rope_sections=True,
    windows=upper_layers,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)
