"""OLMo 2 and 3: norms only after attention and MLP, and over all heads of q and of k together. OLMo 3 has windows in
three of four layers; rope scaling applies to the others only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits, alternating
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_POST_NORMS, HF_QK_NORM

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eos_token_id": 50279,
    },
    hf_rules={**HF_LLAMA, **HF_QK_NORM, **HF_POST_NORMS},
    gguf=GGUFTraits("olmo2", GGUF, config_keys=ConfigKeys(), other_with=("attention.sliding_window", "olmo3")),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="all",
    norms="after",
)


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the rope base of windowed layers for older files: the same base, without scaling."""
    theta = config.get("rope_theta", OLMO3.defaults["rope_theta"])
    return {"rope_local_base_freq": theta, **config}


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    model_types=("olmo3",),
    defaults={**OLMO2.defaults, "rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    has_local_rope=True,
    windows=alternating,
    common_keys=_common_keys,
)
