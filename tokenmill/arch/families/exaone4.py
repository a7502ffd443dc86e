"""EXAONE 4: norms only after attention and MLP, and on each head of q and k; windows in three of four layers, and in
models with windows no rotation in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits, alternating, rotated_windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_POST_NORMS, HF_QK_NORM


def pattern_of_letters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a pattern of letters such as "LLLG" (three local layers, one global) to `layer_types`; the last layer is
    always global."""
    pattern = config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return config
    count = config.get("num_hidden_layers")
    if not pattern or set(pattern) - set("LG") or not isinstance(count, int):
        return config  # the reader of `sliding_window_pattern` refuses it
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    named = [kinds[pattern[index % len(pattern)]] for index in range(count - 1)]
    return {**config, "layer_types": config.get("layer_types") or [*named, "full_attention"]}


def rotated_windows_if_any(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    has_windows = fields.integer_or_none("sliding_window") is not None
    return rotated_windows(alternating)(fields, layer, attention) if has_windows else attention


EXAONE4 = Family(
    name="exaone4",
    model_types=("exaone4",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    hf_rules={**HF_LLAMA, **HF_QK_NORM, **HF_POST_NORMS},
    gguf=GGUFTraits("exaone4", GGUF, config_keys=ConfigKeys(defaults={"sliding_window": None})),
    qk_norm="head",
    norms="after",
    windows=alternating,
    common_keys=pattern_of_letters,
    adjust_attention=rotated_windows_if_any,
)
