"""LFM2 and LFM2.5: gated short convolutions in most layers, attention with norms on q and k in the others.

Its configs have their own keys: `layer_types` or `full_attn_idxs` list the attention layers, and the width of the MLP
is computed from `intermediate_size` (formerly `block_ff_dim`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import ShortConv
from tokenmill.arch.tensors import GGUF, HF_LLAMA, Rule, Rules

OLDER_KEYS = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings", "block_norm_eps": "norm_eps"}


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config to the keys of other families."""
    renamed = {**config, **{new: config[old] for old, new in OLDER_KEYS.items() if old in config}}
    fields = ConfigFields(renamed, "lfm2", LFM2.defaults)
    return {**renamed, "rms_norm_eps": fields.get("norm_eps"), "intermediate_size": _mlp_width(fields)}


def _mlp_width(fields: ConfigFields) -> int:
    """Return the MLP's width: two thirds of the configured size, times a factor, rounded up to a multiple."""
    width = fields.integer("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width, multiple = int(2 * width / 3), fields.integer("block_multiple_of")
    factor = fields.positive_or_none("block_ffn_dim_multiplier")
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _convolution(fields: ConfigFields, layer: int) -> ShortConv | None:
    if _attends(fields, layer):
        return None
    return ShortConv(fields.integer("hidden_size"), fields.integer("conv_L_cache"), fields.flag("conv_bias"))


def _attends(fields: ConfigFields, layer: int) -> bool:
    kinds = fields.strings("layer_types", fields.integer("num_hidden_layers"))
    if kinds is None:
        return fields.get("full_attn_idxs") is None or layer in fields.integers("full_attn_idxs")
    for kind in sorted(set(kinds) - {"conv", "full_attention"}):
        fields.refuse(f"layer type {kind!r} is not implemented")
    return kinds[layer] == "full_attention"


HF_LFM2: Rules = {
    **HF_LLAMA,
    "layers.{i}.attn_norm.weight": Rule("model.layers.{i}.operator_norm.weight"),
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.ffn_norm.weight"),
    "layers.{i}.o.weight": Rule("model.layers.{i}.self_attn.out_proj.weight"),
    "layers.{i}.q_norm.weight": Rule("model.layers.{i}.self_attn.q_layernorm.weight"),
    "layers.{i}.k_norm.weight": Rule("model.layers.{i}.self_attn.k_layernorm.weight"),
    "layers.{i}.gate.weight": Rule("model.layers.{i}.feed_forward.w1.weight"),
    "layers.{i}.up.weight": Rule("model.layers.{i}.feed_forward.w3.weight"),
    "layers.{i}.down.weight": Rule("model.layers.{i}.feed_forward.w2.weight"),
    "layers.{i}.conv.weight": Rule("model.layers.{i}.conv.conv.weight", unit_axis=1),
    "layers.{i}.conv.bias": Rule("model.layers.{i}.conv.conv.bias"),
    **{
        f"layers.{{i}}.conv_{part}.{kind}": Rule(f"model.layers.{{i}}.conv.{part}_proj.{kind}")
        for part in ("in", "out")
        for kind in ("weight", "bias")
    },
    "final_norm.weight": Rule("model.embedding_norm.weight"),
}

GGUF_LFM2: Rules = {
    **GGUF,
    **{
        f"layers.{{i}}.{ours}.{kind}": Rule(f"blk.{{i}}.shortconv.{theirs}.{kind}")
        for ours, theirs in (("conv", "conv"), ("conv_in", "in_proj"), ("conv_out", "out_proj"))
        for kind in ("weight", "bias")
    },
    "final_norm.weight": Rule("token_embd_norm.weight"),
}

LFM2 = Family(
    name="lfm2",
    model_types=("lfm2",),
    defaults={
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    hf_rules=HF_LFM2,
    gguf=GGUFTraits("lfm2", GGUF_LFM2, conv_key="shortconv.l_cache"),
    qk_norm="head",
    common_keys=_common_keys,
    convolution=_convolution,
)
