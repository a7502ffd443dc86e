"""Trinity (Nano, Mini, Large): norms before and after attention and MLP, and on each head of q and k; a sigmoid gate on
attention's output; windows with rotation in three of four layers, neither in the others; routed and shared experts with
sigmoid scores after the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.glm4_moe import sigmoid_experts
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, GGUFTraits, alternating, rotated_windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import AttentionGate, Gqa, ModelSpec
from tokenmill.arch.tensors import GGUF, GGUF_ROUTED, HF_LLAMA, HF_POST_NORMS, HF_QK_NORM, HF_SHARED_EXPERTS, Rule

_DEEPSEEK_KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "routed_scaling_factor": "route_scale",
    "norm_topk_prob": "route_norm",
    "sliding_window_pattern": "global_attn_every_n_layers",
}


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = ConfigFields(config, "afmoe", AFMOE.defaults)
    if fields.get("score_func") != "sigmoid":
        fields.refuse(f"score_func {fields.get('score_func')!r} is not implemented")
    return {**config, **{ours: fields.get(theirs) for ours, theirs in _DEEPSEEK_KEYS.items()}}


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(rotated_windows(alternating)(fields, layer, attention), gate=AttentionGate())


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, embedding_scale=model.hidden_size**0.5) if fields.flag("mup_enabled") else model


AFMOE = Family(
    name="afmoe",
    model_types=("afmoe",),
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 6144,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 1408,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "route_norm": True,
        "score_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "mup_enabled": False,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        **HF_ROUTED,
        **HF_SHARED_EXPERTS,
        "layers.{i}.attn_gate.weight": Rule("model.layers.{i}.self_attn.gate_proj.weight"),
        "layers.{i}.attn_post_norm.weight": HF_POST_NORMS["layers.{i}.attn_post_norm.weight"],
        "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.pre_mlp_layernorm.weight"),
        "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_mlp_layernorm.weight"),
        "layers.{i}.router.weight": Rule("model.layers.{i}.mlp.router.gate.weight"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.expert_bias"),
    },
    gguf=GGUFTraits(
        "afmoe",
        {**GGUF, **GGUF_ROUTED, "layers.{i}.attn_gate.weight": Rule("blk.{i}.attn_gate.weight")},
        config_keys=ConfigKeys(
            {
                "num_experts_per_tok": EXPERT_KEYS["num_experts_per_tok"],
                "route_scale": EXPERT_KEYS["routed_scaling_factor"],
                "route_norm": EXPERT_KEYS["norm_topk_prob"],
                "num_experts": "expert_count",
                "num_shared_experts": "expert_shared_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "num_dense_layers": "leading_dense_block_count",
            },
            defaults={"mup_enabled": True},
        ),
    ),
    qk_norm="head",
    norms="both",
    windows=alternating,
    experts=sigmoid_experts,
    adjust_attention=_adjust_attention,
    adjust_model=_adjust_model,
    common_keys=_common_keys,
    refused_flags=("attention_bias",),
)
