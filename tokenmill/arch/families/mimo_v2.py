"""MiMo-V2-Flash: keys wider than values, which are scaled; most layers have a window, twice the key and value heads, a
rotation of their own and a learned sink in every head's softmax; after a dense layer, experts with sigmoid scores and a
choice bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.deepseek import experts_by_sigmoid
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, GGUFTraits, Windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.spec import Gqa
from tokenmill.arch.tensors import GGUF, GGUF_ROUTED, HF_LLAMA, Rule

WINDOWED, FULL = "sliding_attention", "full_attention"
SAME_IN_WINDOWS = ("num_attention_heads", "head_dim", "v_head_dim")


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the keys of published files: a flag per layer, and separate keys for the windowed layers."""
    found = dict(config)
    for ours, theirs, kinds in (
        ("layer_types", "hybrid_layer_pattern", (FULL, WINDOWED)),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        flags = found.pop(theirs, None)
        if isinstance(flags, list):
            found.setdefault(ours, [kinds[bool(flag)] for flag in flags])
    for ours, theirs in (("rms_norm_eps", "layernorm_epsilon"), ("rope_local_base_freq", "swa_rope_theta")):
        if found.get(theirs) is not None:
            found.setdefault(ours, found[theirs])
    size = found.get("sliding_window_size")
    if isinstance(size, int):
        found["sliding_window"] = size + 1  # this many earlier tokens, and the token itself
    if found.get("routed_scaling_factor") is None:
        found["routed_scaling_factor"] = 1.0
    return found


def _kinds(fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    found = fields.strings("layer_types", num_layers)
    if found is None:
        return tuple(WINDOWED if layer and (layer + 1) % 6 else FULL for layer in range(num_layers))
    for kind in sorted(set(found) - {WINDOWED, FULL}):
        fields.refuse(f"layer type {kind!r} is not implemented")
    return found


def _windows(fields: ConfigFields, num_layers: int) -> Windows:
    window = fields.integer("sliding_window")
    return tuple(window if kind == WINDOWED else None for kind in _kinds(fields, num_layers))


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    for key in SAME_IN_WINDOWS:
        if fields.has(f"swa_{key}") and fields.get(f"swa_{key}") != fields.get(key):
            fields.refuse(f"swa_{key} other than {key} is not implemented")
    is_windowed = _kinds(fields, fields.integer("num_hidden_layers"))[layer] == WINDOWED
    kv_heads = attention.num_kv_heads
    if is_windowed:
        kv_heads = fields.integer_or_none("swa_num_key_value_heads") or 2 * kv_heads
    if attention.num_heads % kv_heads:
        fields.refuse(f"{attention.num_heads} heads over {kv_heads} key/value heads are not possible")
    return replace(
        attention,
        num_kv_heads=kv_heads,
        value_dim=fields.integer("v_head_dim"),
        value_scale=fields.positive_or_none("attention_value_scale") or 1.0,
        has_sinks=fields.flag("add_swa_attention_sink_bias" if is_windowed else "add_full_attention_sink_bias"),
    )


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the key and value heads of full and windowed layers, and which layers have experts."""
    heads, pattern = fields.integers("attention.head_count_kv"), fields.get("attention.sliding_window_pattern")
    extra = fields.integer_or_none("nextn_predict_layers", minimum=0) or 0
    count = fields.integer("block_count") - extra
    if not isinstance(pattern, list) or len(pattern) < count or len(heads) < count:
        fields.refuse("attention.sliding_window_pattern and head_count_kv need a number for each layer")
    full, windowed = (
        sorted({heads[layer] for layer in range(count) if bool(pattern[layer]) is kind}) for kind in (False, True)
    )
    if len(full) > 1 or len(windowed) > 1:
        fields.refuse("attention.head_count_kv differs between layers of one kind, which is not implemented")
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in gguf.tensors for layer in range(count)]
    return {
        "num_key_value_heads": (full or windowed)[0],
        "swa_num_key_value_heads": (windowed or full)[0],
        "mlp_layer_types": ["sparse" if one else "dense" for one in routed],
    }


MIMO_V2_KEYS = ConfigKeys(
    {
        **EXPERT_KEYS,
        "n_routed_experts": "expert_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "v_head_dim": "attention.value_length",
        "attention_value_scale": "attention.value_scale",
        "rope_local_base_freq": "rope.freq_base_swa",
    },
    more=_further_config,
    has_heads_by_kind=True,
)

MIMO_V2 = Family(
    name="mimo_v2",
    model_types=("mimo_v2_flash",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e6,
        "rope_local_base_freq": 10000.0,
        "partial_rotary_factor": 0.334,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "bos_token_id": 1,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_ROUTED,
        "layers.{i}.sinks": Rule("model.layers.{i}.self_attn.attention_sink_bias"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.gate.e_score_correction_bias"),
    },
    gguf=GGUFTraits(
        "mimo2",
        {**GGUF, **GGUF_ROUTED, "layers.{i}.sinks": Rule("blk.{i}.attn_sinks.weight")},
        config_keys=MIMO_V2_KEYS,
    ),
    qkv_bias="attention_bias",
    has_local_rope=True,
    has_partial_rotary=True,
    windows=_windows,
    experts=experts_by_sigmoid,
    adjust_attention=_adjust_attention,
    common_keys=_common_keys,
    ignored_prefixes=("model.mtp.",),
)
