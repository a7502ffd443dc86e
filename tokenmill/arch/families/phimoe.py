"""Phi-3.5-MoE: Mixtral with LayerNorm, biases, Phi-3's factors per frequency (longrope), and SparseMixer's weights of
the two chosen experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.mixtral import MIXTRAL
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.spec import MlpSpec, ModelSpec, MoeSpec, NormSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, Rule, with_norm_biases


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the multiplier of cos and sin, which must be the same for short and long contexts."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key)
    if not isinstance(rope, dict) or "short_mscale" not in rope:
        return config
    fields = ConfigFields(rope, "phimoe rope")
    if fields.positive("short_mscale") != fields.positive("long_mscale"):
        fields.refuse("short_mscale and long_mscale that differ are not implemented")
    return {**config, key: {**rope, "attention_factor": rope["short_mscale"]}}


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    if fields.integer("num_experts_per_tok") != 2:
        fields.refuse("SparseMixer with other than two experts per token is not defined")
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=2,
        expert=MlpSpec(fields.integer("intermediate_size")),
        routing=RoutingSpec(renormalize=False, jitter=fields.number("router_jitter_noise")),
    )


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, has_head_bias=fields.flag("lm_head_bias"))


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the window, where 0 means none, and the factors per frequency, which are tensors in GGUF files."""
    window = {"sliding_window": fields.integer_or_none("attention.sliding_window", minimum=0) or None}
    names = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
    found = {key: read_floats(gguf.tensors[name]) for key, name in names.items() if name in gguf.tensors}
    if not found:
        return window
    scaling = {**found, "type": "longrope", "attention_factor": fields.get("rope.scaling.attn_factor")}
    original = fields.integer("rope.scaling.original_context_length")
    return {**window, "rope_scaling": {**scaling, "original_max_position_embeddings": original}}


PHIMOE = replace(
    MIXTRAL,
    name="phimoe",
    model_types=("phimoe",),
    defaults={
        **MIXTRAL.defaults,
        "attention_bias": False,
        "num_local_experts": 16,
        "router_jitter_noise": 0.01,
        "lm_head_bias": False,
    },
    hf_rules={**with_norm_biases(MIXTRAL.hf_rules), "head.bias": Rule("lm_head.bias")},
    gguf=GGUFTraits(
        "phimoe",
        {**with_norm_biases(GGUF), "head.bias": Rule("output.bias")},
        config_keys=ConfigKeys(
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            {"attention_bias": "blk.0.attn_q.bias", "lm_head_bias": "output.bias"},
            gating=SOFTMAX,
            more=_further_config,
        ),
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norm=NormSpec("layer", has_bias=True),
    experts=_experts,
    adjust_model=_adjust_model,
    common_keys=_common_keys,
    refused_flags=(),
)
