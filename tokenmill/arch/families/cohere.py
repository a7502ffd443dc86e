"""Cohere (Command R, Aya 23 and Aya Expanse): attention and MLP read the same LayerNorm, logits are scaled, rotation of
neighbouring pairs in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.cohere2 import COHERE2
from tokenmill.arch.family import GGUFTraits, no_windows, same_attention
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.tensors import GGUF_LLAMA


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the longest context that is served; `max_position_embeddings` is that of the pretraining."""
    longest = config.get("model_max_length")
    return config if longest is None else {**config, "max_position_embeddings": longest}


COHERE = replace(
    COHERE2,
    name="cohere",
    model_types=("cohere",),
    defaults={**COHERE2.defaults, "rope_theta": 500000.0},
    gguf=GGUFTraits(
        "command-r",
        GGUF_LLAMA,
        config_keys=ConfigKeys({"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}),
    ),
    windows=no_windows,
    common_keys=_common_keys,
    adjust_attention=same_attention,
)
