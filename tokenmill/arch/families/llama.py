"""Llama 1 to 3, and models with the same architecture: SmolLM2, TinyLlama, Vicuna, ..."""

from __future__ import annotations

from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.tensors import GGUF_LLAMA, HF_LLAMA

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules=HF_LLAMA,
    gguf=GGUFTraits("llama", GGUF_LLAMA, window_pattern=1, other_with=("expert_count", "mixtral")),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
)
