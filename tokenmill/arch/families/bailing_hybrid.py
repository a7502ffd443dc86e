"""Ling and Ring 3: the delta rule with a decay per key channel in most layers, latent attention with a gate per head in
the others, routed experts with sigmoid scores.

A token's decay has a lower limit (`kda_safe_gate`), and so have the activations of the experts in the last layers
(`expert_swiglu_limit_list`). The last layer of each group of `layer_group_size` is attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.deepseek import DEEPSEEK_V3, HF_LATENT
from tokenmill.arch.families.kimi_linear import OTHER_NAMES
from tokenmill.arch.families.step3p5 import LIMITED
from tokenmill.arch.family import refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import Activation, AttentionGate, FeedSpec, LayerSpec, Mla, MoeSpec
from tokenmill.arch.tensors import Rule, Rules

PLACE = "model.layers.{i}.attention"
ARCHITECTURES = {"BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"}
EXPECTED = {  # values of keys that transformers does not read, and that other models of this type may have
    "gated_attention_proj_granularity_type": "head_wise",
    "linear_attention": "kda",
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "score_function": "sigmoid",
    "use_qk_norm": True,
}
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with DeepSeek's keys, without the partial rotary factor: all of `qk_rope_head_dim` rotates."""
    found = {OTHER_NAMES.get(key, key): value for key, value in config.items() if key != "partial_rotary_factor"}
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        found["rope_parameters"] = {key: one for key, one in parameters.items() if key != "partial_rotary_factor"}
    return found


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    _refuse_other_models(fields)
    count, group = fields.integer("num_hidden_layers"), fields.integer("layer_group_size")
    kinds = fields.strings("layer_types", count)
    if kinds is None:
        kinds = tuple("linear_attention" if (index + 1) % group else "full_attention" for index in range(count))
    refuse_others(fields, kinds, "linear_attention", "full_attention")
    layer = replace(layer, mlp=_limited(fields, layer_index, layer.mlp))
    if kinds[layer_index] == "full_attention":
        assert isinstance(layer.mixer, Mla), "see `is_latent`"
        return replace(layer, mixer=replace(layer.mixer, gate=AttentionGate(is_per_head=True)))
    heads = fields.integer("num_attention_heads")
    size = fields.integer_or_none("linear_head_dim") or fields.integer("head_dim")  # transformers saves the former
    lowest = fields.number("kda_lower_bound") if fields.flag("kda_safe_gate") else None
    if lowest is not None and lowest >= 0:
        fields.refuse(f"kda_lower_bound is {lowest:g}, expected a number below zero")
    mixer = Recurrent(
        "delta",
        heads,
        heads,
        size,
        size,
        fields.integer("short_conv_kernel_size", minimum=2),
        OutputNorm(heads, is_shared=True, gates_first=False, gate="sigmoid"),
        has_channel_decays=True,
        lowest_decay=lowest,
    )
    return replace(layer, mixer=mixer)


def _refuse_other_models(fields: ConfigFields) -> None:
    """Refuse Ling 2.5, which has the same model type, and what transformers does not compute."""
    names = fields.get("architectures") or []
    if names and not ARCHITECTURES & set(names):
        fields.refuse(f"{names[0]} (lightning attention) is not implemented")
    for key, expected in EXPECTED.items():
        if fields.get(key) not in (None, expected):
            fields.refuse(f"{key} {fields.get(key)!r} is not implemented")
    width = fields.integer_or_none("moe_shared_expert_intermediate_size")
    if width not in (None, fields.integer("moe_intermediate_size")):
        fields.refuse(f"moe_shared_expert_intermediate_size {width} is not the width of an expert")


def _limited(fields: ConfigFields, layer_index: int, feed: FeedSpec | None) -> FeedSpec | None:
    """Return a layer's experts with the activations that the lists of limits give them (transformers ignores those)."""
    expert, shared = (_limit(fields, key, layer_index) for key in LIMITS)
    if not isinstance(feed, MoeSpec):
        if {expert, shared} != {"silu"}:
            fields.refuse(f"limits of activations in layer {layer_index}, which has no experts")
        return feed
    shared_mlp = feed.shared and replace(feed.shared, activation=shared)
    return replace(feed, expert=replace(feed.expert, activation=expert), shared=shared_mlp)


def _limit(fields: ConfigFields, key: str, layer_index: int) -> Activation:
    limits = fields.get(key)
    if limits is None:
        return "silu"
    if not isinstance(limits, list) or len(limits) < fields.integer("num_hidden_layers"):
        fields.refuse(f"{key} must have an entry for each layer")
    limit = limits[layer_index]
    if limit in (None, 0):
        return "silu"
    if limit not in LIMITED:
        fields.refuse(f"{key} has the limit {limit!r}; implemented are {', '.join(f'{one:g}' for one in LIMITED)}")
    return LIMITED[limit]


def _moved(rule: Rule) -> Rule:
    return replace(rule, pattern=rule.pattern.replace(".self_attn.", ".attention."))


HF_BAILING: Rules = {
    **{ours: _moved(rule) for ours, rule in HF_LATENT.items()},
    "embed.weight": Rule("model.word_embeddings.weight"),
    "layers.{i}.o.weight": Rule(f"{PLACE}.dense.weight"),
    "layers.{i}.attn_gate.weight": Rule(f"{PLACE}.g_proj.weight"),
    "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.gate.expert_bias"),
    **{f"layers.{{i}}.ssm_{ours}.weight": Rule(f"{PLACE}.{theirs}.weight")
       for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("b", "b_proj"), ("a", "f_proj"),
                            ("z", "g_proj"), ("norm", "o_norm"), ("out", "dense"))},
    **{f"layers.{{i}}.ssm_conv_{part}.weight": Rule(f"{PLACE}.{part}_conv1d.weight", unit_axis=1) for part in "qkv"},
    "layers.{i}.ssm_a_log": Rule(f"{PLACE}.A_log"),
    "layers.{i}.ssm_dt_bias": Rule(f"{PLACE}.dt_bias"),
}  # fmt: skip

BAILING_HYBRID = replace(
    DEEPSEEK_V3,
    name="bailing_hybrid",
    model_types=("bailing_hybrid",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "vocab_size": 157184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "bos_token_id": None,
        "eos_token_id": 156895,
        "rope_theta": 6000000.0,
        "q_lora_rank": None,
        "head_dim": 128,
        "n_routed_experts": 512,
        "moe_intermediate_size": 768,
        "first_k_dense_replace": 2,
        "short_conv_kernel_size": 4,
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
    },
    hf_rules=HF_BAILING,
    gguf=None,
    common_keys=_common_keys,
    adjust_layer=_layer,
    refused_flags=(
        "attention_bias", "use_bias", "use_qkv_bias", "use_mla_nope", "use_nGPT", "value_norm", "up_proj_norm",
        "scale_router_input", "pregate_inference",
    ),
    mtp=None,
)  # fmt: skip
