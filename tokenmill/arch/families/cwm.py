"""CWM, the Code World Model: Llama with windows in three of four layers; the first of each four sees all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.arch.family import Family, all_but_first
from tokenmill.arch.tensors import HF_LLAMA

_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    has_rope = config.get("rope_parameters") or config.get("rope_scaling")
    return config if has_rope else {**config, "rope_scaling": _ROPE}


CWM = Family(
    name="cwm",
    model_types=("cwm",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "sliding_window": 8192,
        "sliding_window_pattern": 4,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
    hf_rules=HF_LLAMA,
    windows=all_but_first,
    common_keys=_common_keys,
    refused_flags=("attention_bias", "mlp_bias"),
)
