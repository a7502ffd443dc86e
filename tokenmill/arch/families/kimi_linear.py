"""Kimi-Linear: the delta rule with a decay per key channel in most layers, latent attention without rotation in the
others, routed experts with sigmoid scores.

Decays and gates are each the product of two matrices, which are multiplied when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.deepseek import (
    DEEPSEEK_V3,
    GGUF_DEEPSEEK,
    HF_LATENT,
    LATENT_KEYS,
    NOT_OF_HEADS,
    latent_config,
)
from tokenmill.arch.family import GGUFTraits, refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import LayerSpec, Mla, ModelSpec
from tokenmill.arch.tensors import GGUF_LATENT_HEADS, Rule, Rules

PLACE = "model.layers.{i}.self_attn"
FEED = "model.layers.{i}.block_sparse_moe"
OTHER_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "moe_router_activation_func": "scoring_func",
    "model_max_length": "max_position_embeddings",
}
OTHER_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {OTHER_NAMES.get(key, key): value for key, value in config.items()}
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict):  # as published: layers are counted from 1
        found |= {ours: linear[theirs] for theirs, ours in OTHER_SIZES.items() if theirs in linear}
        kinds = dict.fromkeys(linear.get("full_attn_layers") or (), "full_attention")
        numbers = range(1, 1 + int(config.get("num_hidden_layers") or 0))
        found["layer_types"] = [kinds.get(number, "linear_attention") for number in numbers]
    return found


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    kinds = fields.strings("layer_types", fields.integer("num_hidden_layers"))
    if kinds is None:
        fields.refuse("layer_types is missing")
    refuse_others(fields, kinds, "linear_attention", "full_attention")
    if kinds[layer_index] == "full_attention":
        assert isinstance(layer.mixer, Mla), "see `is_latent`"
        return replace(layer, mixer=replace(layer.mixer, rope=None))
    heads, size = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
    norm = OutputNorm(heads, is_shared=True, gates_first=False, gate="sigmoid")
    kernel = fields.integer("linear_conv_kernel_dim", minimum=2)
    return replace(layer, mixer=Recurrent("delta", heads, heads, size, size, kernel, norm, has_channel_decays=True))


def _model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    """Return the model with an untied head, which it has regardless of `tie_word_embeddings`."""
    return replace(model, tied_head=False)


HF_KIMI: Rules = {
    **{ours: replace(rule, interleaved=False, pattern=rule.pattern.replace(".mlp.", ".block_sparse_moe."))
       for ours, rule in HF_LATENT.items()},
    **{f"layers.{{i}}.experts.{ours}.weight": Rule(f"{FEED}.experts.{{e}}.{theirs}.weight")
       for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    **{f"layers.{{i}}.ssm_{part}.weight": Rule(f"{PLACE}.{part}_proj.weight") for part in ("q", "k", "v", "b")},
    **{f"layers.{{i}}.ssm_conv_{part}.weight": Rule(f"{PLACE}.{part}_conv1d.weight", unit_axis=1) for part in "qkv"},
    "layers.{i}.ssm_a.weight": Rule(f"{PLACE}.f_b_proj.weight", times=f"{PLACE}.f_a_proj.weight"),
    "layers.{i}.ssm_z.weight": Rule(f"{PLACE}.g_b_proj.weight", times=f"{PLACE}.g_a_proj.weight"),
    "layers.{i}.ssm_a_log": Rule(f"{PLACE}.A_log", unit_axis=(0, 1, 3)),
    "layers.{i}.ssm_dt_bias": Rule(f"{PLACE}.dt_bias"),
    "layers.{i}.ssm_norm.weight": Rule(f"{PLACE}.o_norm.weight"),
    "layers.{i}.ssm_out.weight": Rule(f"{PLACE}.o_proj.weight"),
}  # fmt: skip

GGUF_KIMI: Rules = {
    **{ours: replace(rule, interleaved=False) for ours, rule in GGUF_DEEPSEEK.items()},
    **{f"layers.{{i}}.ssm_{part}.weight": Rule(f"blk.{{i}}.attn_{part}.weight") for part in "qkv"},
    **{f"layers.{{i}}.ssm_conv_{part}.weight": Rule(f"blk.{{i}}.ssm_conv1d_{part}.weight", unit_axis=(0, 2))
       for part in "qkv"},
    "layers.{i}.ssm_b.weight": Rule("blk.{i}.ssm_beta.weight"),
    "layers.{i}.ssm_a.weight": Rule("blk.{i}.ssm_f_b.weight", times="blk.{i}.ssm_f_a.weight"),
    "layers.{i}.ssm_z.weight": Rule("blk.{i}.ssm_g_b.weight", times="blk.{i}.ssm_g_a.weight"),
    "layers.{i}.ssm_a_log": Rule("blk.{i}.ssm_a", minus_exp=True, unit_axis=(0, 1, 3)),
    "layers.{i}.ssm_dt_bias": Rule("blk.{i}.ssm_dt.bias"),
    "layers.{i}.ssm_norm.weight": Rule("blk.{i}.ssm_norm.weight"),
    "layers.{i}.ssm_out.weight": Rule("blk.{i}.attn_output.weight"),
}  # fmt: skip


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return also the number of recurrent heads, which the metadata lacks: the length of the decays `ssm_a`."""
    found = latent_config(fields, gguf)
    decays = next((tensor for name, tensor in gguf.tensors.items() if name.endswith(".ssm_a")), None)
    if decays is None:
        fields.refuse("no block has ssm_a")
    return {**found, "linear_num_heads": max(decays.shape)}


KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    name="kimi_linear",
    model_types=("kimi_linear",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "linear_conv_kernel_dim": 4,
    },
    hf_rules=HF_KIMI,
    gguf=GGUFTraits(
        "kimi-linear",
        GGUF_KIMI,
        config_keys=ConfigKeys(
            {**LATENT_KEYS, "linear_head_dim": "kda.head_dim", "linear_conv_kernel_dim": "ssm.conv_kernel"},
            more=_further_config,
            without=NOT_OF_HEADS,
            other_kind="linear_attention",
        ),
        variant={"layers.{i}.kv_up.weight": GGUF_LATENT_HEADS["layers.{i}.kv_up.weight"]},
    ),
    adjust_layer=_layer,
    adjust_model=_model,
    common_keys=_common_keys,
)
