"""Seed-OSS: Llama with biases on q, k and v, and heads whose size stands on its own."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA

SEED_OSS = replace(
    LLAMA,
    name="seed_oss",
    model_types=("seed_oss",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "bos_token_id": 0,
    },
    gguf=None,
    out_bias="attention_out_bias",
)
