"""Gemma 2: soft-capped scores and logits, norms before and after attention and MLP, windows on every other layer."""

from __future__ import annotations

from tokenmill.arch.family import Family, GGUFTraits, alternating
from tokenmill.arch.tensors import GGUF, HF_GEMMA

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    hf_rules=HF_GEMMA,
    gguf=GGUFTraits("gemma2", GGUF, window_pattern=2, default_window=4096, query_scale_from_width_at=46),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    activation_key="hidden_activation",
    norms="both",
    exceeds_float16=True,
    scaled_embeddings=True,
    query_scale_key="query_pre_attn_scalar",
    has_softcaps=True,
    windows=alternating,
    refused_flags=("use_bidirectional_attention",),
)
