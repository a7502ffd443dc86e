"""Seed-OSS: Llama with biases on q, k and v, and a head size independent of the hidden size."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.tensors import GGUF, GGUF_OTHER_NORM

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
    gguf=GGUFTraits(
        "seed_oss",
        {**GGUF, **GGUF_OTHER_NORM},
        config_keys=ConfigKeys(
            tensors={"attention_bias": "blk.0.attn_q.bias", "attention_out_bias": "blk.0.attn_output.bias"}
        ),
    ),
    out_bias="attention_out_bias",
)
