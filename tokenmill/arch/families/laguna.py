"""Laguna: a softplus gate on attention's output, a number of query heads for each layer, a rotation of its own in
layers with windows, and routed experts with sigmoid scores, a choice bias and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, is_dense, named_layers
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import AttentionGate, Gqa, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import HF_LLAMA, HF_QK_NORM, HF_SHARED_EXPERT, Rule


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    listed, gating = fields.integers("num_attention_heads_per_layer"), fields.get("gating")
    if gating not in (True, "per-head", "per-element"):
        fields.refuse(f"gating {gating!r} is not implemented")
    if listed and len(listed) != fields.integer("num_hidden_layers"):
        fields.refuse("num_attention_heads_per_layer does not have a number for each layer")
    heads = listed[layer] if listed else attention.num_heads
    if heads < 1 or heads % attention.num_kv_heads:
        fields.refuse(f"{heads} heads over {attention.num_kv_heads} key/value heads are not possible")
    return replace(attention, num_heads=heads, gate=AttentionGate("softplus", is_per_head=gating != "per-element"))


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    if fields.number("moe_router_logit_softcapping"):
        fields.refuse("moe_router_logit_softcapping is not implemented")
    if is_dense(fields, layer):
        return None
    return MoeSpec(
        num_experts=fields.integer("num_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("moe_intermediate_size")),
        routing=RoutingSpec("sigmoid", has_choice_bias=True, scale=fields.positive("moe_routed_scaling_factor")),
        shared=MlpSpec(fields.integer("shared_expert_intermediate_size")),
    )


LAGUNA = Family(
    name="laguna",
    model_types=("laguna",),
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 8192,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "sliding_window": 512,
        "gating": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "moe_routed_scaling_factor": 1.0,
        "moe_router_logit_softcapping": 0.0,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        **HF_ROUTED,
        **HF_SHARED_EXPERT,
        "layers.{i}.attn_gate.weight": Rule("model.layers.{i}.self_attn.g_proj.weight"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.experts.e_score_correction_bias"),
    },
    qk_norm="head",
    has_partial_rotary=True,
    windows=named_layers,
    experts=_experts,
    adjust_attention=_adjust_attention,
    refused_flags=("attention_bias", "moe_apply_router_weight_on_input"),
)
