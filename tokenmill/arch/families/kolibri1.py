"""Kolibri 1: EXAONE 4's windows, rotation and norms of heads; norms before and after attention and experts;
experts with sigmoid scores, chosen by their logits and a bias, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.exaone4 import EXAONE4
from tokenmill.arch.families.qwen3_moe import HF_ROUTED, routed_experts
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import HF_LLAMA, HF_QK_NORM, HF_SHARED_EXPERTS, Rule


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    routed = routed_experts(fields, layer)
    shared = MlpSpec(fields.integer("shared_expert_intermediate_size"))
    routing = RoutingSpec(
        "sigmoid", renormalize=fields.flag("norm_topk_prob"), has_choice_bias=True, is_bias_on_logits=True
    )
    return routed and replace(routed, routing=routing, shared=shared)


KOLIBRI1 = replace(
    EXAONE4,
    name="kolibri1",
    model_types=("kolibri1",),
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 512,  # of no layer
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": 513,
        "sliding_window_pattern": 5,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_local_experts": 384,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        **HF_ROUTED,
        **HF_SHARED_EXPERTS,
        "layers.{i}.attn_post_norm.weight": Rule("model.layers.{i}.post_attn_norm.weight"),
        "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_ffn_norm.weight"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.moe.router.expert_bias"),
    },
    gguf=None,
    norms="both",
    experts=_experts,
)
