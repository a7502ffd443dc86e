"""OLMo Hybrid: gated DeltaNet with norms before, in three of four layers; OLMo 3's attention with norms after in the
others, mostly without rotation.

The factor of an update, β, may be up to 2 (`linear_allow_neg_eigval`), and the norm after the recurrence has its own
epsilon. A `rope_theta` of null means that no layer rotates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.olmo import OLMO2
from tokenmill.arch.family import Family, refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import Gqa, LayerSpec
from tokenmill.arch.tensors import HF_LLAMA, HF_QK_NORM, Rule, Rules

THETA = 10000.0
OUTPUT_NORM_EPS = 1e-5  # fixed in the model's code
ROTATES = "_rotates"  # whether attention rotates queries and keys
LAYER, PLACE = "model.layers.{i}", "model.layers.{i}.linear_attn"


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters") or {}
    if parameters.get("rope_theta", config.get("rope_theta", THETA)) is not None:
        return {ROTATES: True, **config}
    return {**config, "rope_parameters": {"rope_theta": THETA}, ROTATES: False}


def _attention(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    return attention if fields.flag(ROTATES) else replace(attention, rope=None)


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    count = fields.integer("num_hidden_layers")
    kinds = fields.strings("layer_types", count)
    if kinds is None:
        kinds = tuple("full_attention" if index % 4 == 3 else "linear_attention" for index in range(count))
        kinds = kinds if "full_attention" in kinds else (*kinds[:-1], "full_attention")
    refuse_others(fields, kinds, "linear_attention", "full_attention")
    if kinds[layer_index] == "full_attention":
        return layer
    return replace(layer, mixer=_delta(fields), norms="before")


def _delta(fields: ConfigFields) -> Recurrent:
    heads = fields.integer("num_attention_heads")
    key_heads = fields.integer_or_none("linear_num_key_heads") or heads
    value_heads = fields.integer_or_none("linear_num_value_heads") or heads
    if value_heads % key_heads:
        fields.refuse(f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    key_dim = fields.integer_or_none("linear_key_head_dim") or int(0.75 * fields.integer("hidden_size") / key_heads)
    return Recurrent(
        "delta",
        key_heads,
        value_heads,
        key_dim,
        fields.integer_or_none("linear_value_head_dim") or 2 * key_dim,
        fields.integer("linear_conv_kernel_dim", minimum=2),
        OutputNorm(value_heads, is_shared=True, gates_first=False, eps=OUTPUT_NORM_EPS),
        strength_scale=2.0 if fields.flag("linear_allow_neg_eigval") else 1.0,
    )


PROJECTIONS = {"q": "q", "k": "k", "v": "v", "z": "g", "b": "b", "a": "a", "out": "o"}  # ours: theirs
HF_OLMO_HYBRID: Rules = {
    **HF_LLAMA,
    **HF_QK_NORM,
    "layers.{i}.attn_norm.weight": Rule(f"{LAYER}.attention_layer_norm.weight"),
    "layers.{i}.mlp_norm.weight": Rule(f"{LAYER}.feedforward_layer_norm.weight"),
    "layers.{i}.attn_post_norm.weight": Rule(f"{LAYER}.feedforward_layer_norm.weight"),  # as transformers saves it
    "layers.{i}.mlp_post_norm.weight": Rule(f"{LAYER}.post_feedforward_layernorm.weight"),
    **{f"layers.{{i}}.ssm_{ours}.weight": Rule(f"{PLACE}.{theirs}_proj.weight")
       for ours, theirs in PROJECTIONS.items()},
    **{f"layers.{{i}}.ssm_conv_{part}.weight": Rule(f"{PLACE}.{part}_conv1d.weight", unit_axis=1) for part in "qkv"},
    "layers.{i}.ssm_a_log": Rule(f"{PLACE}.A_log"),
    "layers.{i}.ssm_dt_bias": Rule(f"{PLACE}.dt_bias"),
    "layers.{i}.ssm_norm.weight": Rule(f"{PLACE}.o_norm.weight"),
}  # fmt: skip

OLMO_HYBRID = Family(
    name="olmo_hybrid",
    model_types=("olmo_hybrid",),
    defaults={
        **OLMO2.defaults,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "eos_token_id": 100257,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    hf_rules=HF_OLMO_HYBRID,
    hf_variant={"layers.{i}.attn_post_norm.weight": Rule(f"{LAYER}.post_attention_layernorm.weight")},  # as published
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="all",
    norms="after",
    common_keys=_common_keys,
    adjust_attention=_attention,
    adjust_layer=_layer,
)
