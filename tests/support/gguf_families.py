"""Small configurations of every family that has GGUF files."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-20,  # exact in float32, which is what GGUF stores
    "eos_token_id": 2,
    "bos_token_id": 1,
    "head_dim": 32,
}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "attention_factor": 1.25}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75},
}


VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
