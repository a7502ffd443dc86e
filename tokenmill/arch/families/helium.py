"""Helium: Llama with rotation of neighbouring pairs."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.tensors import HF_LLAMA, interleaved_pairs

HELIUM = replace(
    LLAMA,
    name="helium",
    model_types=("helium",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    },
    hf_rules=interleaved_pairs(HF_LLAMA),
    gguf=None,
    out_bias=False,
)
