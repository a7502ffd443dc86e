"""Ministral 3 and Devstral 2: Mistral with YaRN, and queries that grow with their position
(`llama_4_scaling_beta`, counted in lengths of the original context)."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.mistral import MISTRAL
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa, QueryGrowth


def query_growth(fields: ConfigFields) -> QueryGrowth | None:
    parameters = fields.section("rope_parameters") or fields.section("rope_scaling") or {}
    rope = ConfigFields(parameters, f"{fields.source} rope")
    beta = rope.positive_or_none("llama_4_scaling_beta")
    return None if beta is None else QueryGrowth(beta, rope.integer("original_max_position_embeddings"))


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, query_growth=query_growth(fields))


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
    gguf=None,
    adjust_attention=_adjust_attention,
)
