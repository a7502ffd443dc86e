"""GPT-Neo and TinyStories: learned embeddings of positions, scores that are not scaled, and windows in every other
layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt2 import GPT2, GPT_NAMES, LAYER, common_keys
from tokenmill.arch.families.gpt_neox import linear_names
from tokenmill.arch.family import Windows, refuse_others, renamed_keys
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa

_KEYS = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the kind of each layer: `attention_types` has lists of kinds, and how often they repeat."""
    found = dict(common_keys(renamed_keys(config, _KEYS)))
    types = found.get("attention_types") or [[["global", "local"], 12]]
    if not found.get("attention_layers"):
        try:
            found["attention_layers"] = [kind for kinds, count in types for _ in range(count) for kind in kinds]
        except (TypeError, ValueError):
            ConfigFields(found, "gpt_neo").refuse(f"attention_types is {types!r}, expected lists of kinds and counts")
    return found


def _windows(fields: ConfigFields, num_layers: int) -> Windows:
    kinds = fields.strings("attention_layers", num_layers) or ()
    refuse_others(fields, kinds, "global", "local")
    window = fields.integer("window_size")
    return tuple(window if kind == "local" else None for kind in kinds)


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, rope=None, scale=1.0)


GPT_NEO = replace(
    GPT2,
    name="gpt_neo",
    model_types=("gpt_neo",),
    defaults={**GPT2.defaults, "max_position_embeddings": 2048, "window_size": 256},
    hf_rules={
        **GPT_NAMES,
        **linear_names(
            {
                **{part: f"{LAYER}.attn.attention.{part}_proj" for part in ("q", "k", "v")},
                "o": f"{LAYER}.attn.attention.out_proj",
                "up": f"{LAYER}.mlp.c_fc",
                "down": f"{LAYER}.mlp.c_proj",
            }
        ),
    },
    gguf=None,
    qkv_bias=False,
    windows=_windows,
    common_keys=_common_keys,
    adjust_attention=_adjust_attention,
    ignored_suffixes=(".attn.attention.bias", ".attn.attention.masked_bias"),
)
