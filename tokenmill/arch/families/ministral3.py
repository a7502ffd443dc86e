"""Ministral 3 and Devstral 2: Mistral with YaRN, and queries scaled by position (`llama_4_scaling_beta`, per length of
the original context)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.arch.families.mistral import MISTRAL
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys, yarn_keys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.spec import Gqa, QueryGrowth
from tokenmill.arch.tensors import GGUF_LLAMA


def query_growth(fields: ConfigFields) -> QueryGrowth | None:
    parameters = fields.section("rope_parameters") or fields.section("rope_scaling") or {}
    rope = ConfigFields(parameters, f"{fields.source} rope")
    beta = rope.positive_or_none("llama_4_scaling_beta")
    return None if beta is None else QueryGrowth(beta, rope.integer("original_max_position_embeddings"))


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, query_growth=query_growth(fields))


def _growing(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return YaRN with the scaling of queries, which GGUF files call a temperature."""
    if fields.get("rope.scaling.type") != "yarn":
        return {}
    weight = fields.positive_or_none("rope.scaling.yarn_log_multiplier") or 1.0
    beta = fields.positive_or_none("attention.temperature_scale")
    grown = {} if beta is None else {"llama_4_scaling_beta": beta}
    return {"rope_scaling": {**yarn_keys(fields), "mscale": weight, "mscale_all_dim": weight, **grown}}


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    model_types=("ministral3",),
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    gguf=GGUFTraits("mistral3", GGUF_LLAMA, config_keys=ConfigKeys(more=_growing)),
    adjust_attention=_adjust_attention,
)
