"""Mistral 7B and its successors, and Ministral 8B: Llama with a sliding window on every layer (null from v0.2 on).

The vision part of Mistral Small 3 is ignored. GGUF files use the architecture `llama`, so the GGUF traits are Llama's.
"""

from __future__ import annotations

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, every_layer
from tokenmill.arch.tensors import HF_LLAMA

MISTRAL = Family(
    name="mistral",
    model_types=("mistral", "ministral"),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules=HF_LLAMA,
    gguf=LLAMA.gguf,
    windows=every_layer,
    refused_flags=("attention_bias", "mlp_bias"),
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)
