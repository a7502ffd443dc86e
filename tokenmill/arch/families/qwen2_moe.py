"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with routed experts and a shared expert weighted by its own
gate."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen3_moe import HF_ROUTED, routed_experts
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.arch.tensors import (
    GGUF,
    GGUF_FUSED_EXPERTS,
    GGUF_ROUTED,
    GGUF_SHARED_GATE,
    HF_LLAMA,
    HF_SHARED_EXPERT,
    Rule,
    Rules,
)


def shared_experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    routed = routed_experts(fields, layer_index)
    shared = MlpSpec(fields.integer("shared_expert_intermediate_size"))
    return routed and replace(routed, shared=shared, has_shared_gate=True)


GGUF_SHARED: Rules = {**GGUF, **GGUF_ROUTED, **GGUF_SHARED_GATE}
SHARED_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}

QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 5632,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
    },
    hf_rules={
        **HF_LLAMA,
        **HF_ROUTED,
        **HF_SHARED_EXPERT,
        "layers.{i}.shared_gate.weight": Rule("model.layers.{i}.mlp.shared_expert_gate.weight"),
    },
    gguf=GGUFTraits(
        "qwen2moe",
        GGUF_SHARED,
        config_keys=ConfigKeys(SHARED_KEYS, {"qkv_bias": "blk.0.attn_q.bias"}, gating=SOFTMAX),
        variant=GGUF_FUSED_EXPERTS,
    ),
    qkv_bias="qkv_bias",
    experts=shared_experts,
    refused_flags=("use_sliding_window",),
)
