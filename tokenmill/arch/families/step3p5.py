"""Step-3.5 and 3.7, text part: a gate per head on the output of attention, more heads in windowed layers, rotation of
half of each head in the others, experts with sigmoid scores and a choice bias, and limited activations in the last
layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits, named_layers
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.spec import Activation, AttentionGate, Gqa, LayerSpec, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, GGUF_ROUTED, HF_LLAMA, HF_QK_NORM, Rule

WINDOWED, FULL = "sliding_attention", "full_attention"
LIMITED: Mapping[float, Activation] = {
    4.0: "clamped_silu_4",
    5.0: "clamped_silu_5",
    7.0: "clamped_silu_7",
    16.0: "clamped_silu_16",
}
OTHER_NAMES = {
    "num_key_value_heads": ("num_attention_groups",),
    "n_routed_experts": ("num_local_experts", "num_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_top_k",),
    "share_expert_dim": ("share_expert_dims",),
}
PER_LAYER = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta")


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the keys of published files: other names, and lists with an entry per layer, MTP layers included."""
    found = dict(config)
    for ours, others in OTHER_NAMES.items():
        given = next((found[name] for name in (ours, *others) if found.get(name) is not None), None)
        if given is not None:
            found[ours] = given
    count = found.get("num_hidden_layers")
    if not isinstance(count, int):
        return found
    for name in (*PER_LAYER, "partial_rotary_factors"):
        if isinstance(found.get(name), list):
            found[name] = found[name][:count]
    found.setdefault("layer_types", [FULL] * count)
    found.setdefault("query_pre_attn_scalar", found.get("head_dim", 128))
    return {**found, "rope_parameters": _rope_parameters(found, count)}


def _rope_parameters(config: Mapping[str, Any], count: int) -> Any:
    """Return the rotation of each kind of layer; a scaling is only that of layers without a window."""
    given, kinds = config.get("rope_parameters"), config["layer_types"]
    if isinstance(given, dict) and {FULL, WINDOWED} & given.keys():
        return given
    theta, shares = config.get("rope_theta") or 10000.0, config.get("partial_rotary_factors")
    thetas = theta if isinstance(theta, list) else [theta] * count
    factors = shares if isinstance(shares, list) else [1.0] * count
    found: dict[str, dict[str, Any]] = {}
    for kind, base, share in zip(kinds, thetas, factors, strict=False):
        found.setdefault(kind, {"rope_theta": base, "partial_rotary_factor": share})
    if FULL in found and isinstance(config.get("rope_scaling"), dict):
        found[FULL] |= config["rope_scaling"]
    return found


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    if fields.get("use_head_wise_attn_gate") is False:
        fields.refuse("attention without gates is not implemented")
    kinds = fields.strings("layer_types", fields.integer("num_hidden_layers")) or ()
    heads = _windowed_heads(fields, layer) if kinds[layer] == WINDOWED else attention.num_heads
    if heads % attention.num_kv_heads:
        fields.refuse(f"{heads} heads over {attention.num_kv_heads} key/value heads are not possible")
    return replace(attention, num_heads=heads, gate=AttentionGate("sigmoid", is_per_head=True))


def _windowed_heads(fields: ConfigFields, layer: int) -> int:
    """Return the number of heads of a windowed layer, from any of the keys that can define it."""
    usual = fields.integer("num_attention_heads")
    own = (fields.section("per_layer_config") or {}).get(str(layer))
    if isinstance(own, dict):
        fields = ConfigFields(own, f"{fields.source} per_layer_config {layer}")
        return fields.integer_or_none("num_attention_heads") or usual
    other = fields.section("attention_other_setting")
    if other is None:
        return fields.integer_or_none("num_sliding_attention_heads") or usual
    for theirs, ours in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
        if other.get(theirs) not in (None, fields.get(ours)):
            fields.refuse(f"attention_other_setting: {theirs} other than that of all layers is not implemented")
    return ConfigFields(other, f"{fields.source} attention_other_setting").integer("num_attention_heads")


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    if not _is_sparse(fields, layer):
        return None
    for key, expected in (("scoring_func", "sigmoid"), ("moe_router_activation", "sigmoid")):
        if fields.get(key) not in (None, expected):
            fields.refuse(f"{key} {fields.get(key)!r} is not implemented")
    for key in ("use_moe_router_bias", "norm_expert_weight"):
        if fields.get(key) is False:
            fields.refuse(f"{key} false is not implemented")
    return MoeSpec(
        num_experts=fields.integer("n_routed_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("moe_intermediate_size")),
        routing=RoutingSpec("sigmoid", has_choice_bias=True, scale=fields.positive("moe_router_scaling_factor")),
        shared=MlpSpec(fields.integer("share_expert_dim")),
    )


def _is_sparse(fields: ConfigFields, layer: int) -> bool:
    kinds = fields.strings("mlp_layer_types", fields.integer("num_hidden_layers"))
    if kinds is not None:
        return kinds[layer] == "sparse"
    listed = fields.get("moe_layers_enum")
    if listed is None:
        return layer >= fields.integer("first_k_dense_replace", minimum=0)
    items = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(items, list) or not all(str(item).strip().isdecimal() for item in items):
        fields.refuse(f"moe_layers_enum is {str(listed)[:80]!r}, expected numbers of layers")
    return layer in {int(item) for item in items}


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    """Return the layer with the limits of its activations: one of routed experts, one of other MLPs."""
    routed, other = (_limited(fields, key, index) for key in ("swiglu_limits", "swiglu_limits_shared"))
    if isinstance(layer.mlp, MlpSpec):
        return replace(layer, mlp=replace(layer.mlp, activation=other))
    assert layer.mlp is not None and layer.mlp.shared is not None
    expert, shared = replace(layer.mlp.expert, activation=routed), replace(layer.mlp.shared, activation=other)
    return replace(layer, mlp=replace(layer.mlp, expert=expert, shared=shared))


def _limited(fields: ConfigFields, key: str, layer: int) -> Activation:
    limits = fields.get(key)
    if limits is None:
        return "silu"
    if not isinstance(limits, list) or len(limits) != fields.integer("num_hidden_layers"):
        fields.refuse(f"{key} is {str(limits)[:80]}, expected a number for each layer")
    limit = limits[layer] or 0.0
    if limit and limit not in LIMITED:
        known = " and ".join(f"{number:g}" for number in LIMITED)
        fields.refuse(f"{key}: limits other than {known} are not implemented")
    return LIMITED[limit] if limit else "silu"


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the heads of full and windowed layers, and their rotations: llama.cpp's converter requires that half of a
    head rotates in full layers, scaled by a factor per frequency, and a whole head in windowed ones."""
    extra = fields.integer_or_none("nextn_predict_layers", minimum=0) or 0
    count, pattern = fields.integer("block_count") - extra, fields.get("attention.sliding_window_pattern")
    heads, kv_heads = fields.integers("attention.head_count"), fields.integers("attention.head_count_kv")
    if not isinstance(pattern, list) or min(len(pattern), len(heads), len(kv_heads)) < count:
        fields.refuse("attention.sliding_window_pattern, head_count and head_count_kv need a number for each layer")
    full, windowed = (
        sorted({heads[layer] for layer in range(count) if bool(pattern[layer]) is kind}) for kind in (False, True)
    )
    if len(full) > 1 or len(windowed) > 1 or len(set(kv_heads[:count])) > 1:
        fields.refuse("heads that differ between layers of one kind are not implemented")
    rope: dict[str, Any] = {"rope_theta": fields.positive("rope.freq_base"), "partial_rotary_factor": 0.5}
    factors, num_rotated = gguf.tensors.get("rope_freqs.weight"), fields.integer("attention.key_length") // 4
    if factors is not None:
        if factors.type != "F32" or factors.shape != (2 * num_rotated,):
            fields.refuse(
                f"tensor 'rope_freqs.weight' is {factors.type} {list(factors.shape)}, expected F32 of half a head"
            )
        rope |= {"rope_type": "factors", "factors": read_floats(factors)[:num_rotated]}
    return {
        "num_attention_heads": (full or windowed)[0],
        "num_sliding_attention_heads": (windowed or full)[0],
        "num_key_value_heads": kv_heads[0],
        "rope_parameters": {
            FULL: rope,
            WINDOWED: {"rope_theta": fields.positive_or_none("rope.freq_base_swa") or 10000.0},
        },
    }


STEP3P5_KEYS = ConfigKeys(
    {
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "share_expert_dim": "expert_shared_feed_forward_length",
        "moe_router_scaling_factor": "expert_weights_scale",
        "norm_expert_weight": "expert_weights_norm",
        "first_k_dense_replace": "leading_dense_block_count",
        "swiglu_limits": "swiglu_clamp_exp",
        "swiglu_limits_shared": "swiglu_clamp_shexp",
    },
    more=_further_config,
    reads_factors=True,
    has_heads_by_kind=True,
)

STEP3P5 = Family(
    name="step3p5",
    model_types=("step3p5", "step3p7"),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
        "first_k_dense_replace": 3,
    },
    hf_rules={
        **{
            name: replace(rule, add=1.0) if "norm" in name else rule
            for name, rule in {**HF_LLAMA, **HF_QK_NORM}.items()
        },
        "layers.{i}.attn_gate.weight": Rule("model.layers.{i}.self_attn.g_proj.weight"),
        "layers.{i}.router.weight": Rule("model.layers.{i}.moe.gate.weight"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.moe.router_bias"),
        **{
            f"layers.{{i}}.{ours}.{part}.weight": Rule(f"model.layers.{{i}}.{theirs}.{part}_proj.weight")
            for ours, theirs in (("experts", "moe"), ("shared", "share_expert"))
            for part in ("gate", "up", "down")
        },
    },
    gguf=GGUFTraits(
        "step35",
        {**GGUF, **GGUF_ROUTED, "layers.{i}.attn_gate.weight": Rule("blk.{i}.attn_gate.weight")},
        config_keys=STEP3P5_KEYS,
    ),
    qk_norm="head",
    query_scale_key="query_pre_attn_scalar",
    has_partial_rotary=True,
    windows=named_layers,
    experts=_experts,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    common_keys=_common_keys,
    refused_flags=("attention_bias", "mlp_bias", "use_mfa"),
    ignored_prefixes=("vision_model.", "vit_large_projector."),
)
