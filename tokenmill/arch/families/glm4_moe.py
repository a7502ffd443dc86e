"""GLM-4.5, 4.6 and 4.7, and the text part of GLM-4.5V: dense layers first, then routed experts with sigmoid scores and
a choice bias, and a shared expert; rotation of half of each head. The layer after the last one is an MTP head
(`arch/mtp.py`)."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import HF_NEXTN, TEXT_PREFIXES, VISION_PREFIXES, Family, GGUFTraits, is_dense
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import (
    GGUF,
    GGUF_OTHER_NORM,
    GGUF_ROUTED,
    HF_LLAMA,
    HF_QK_NORM,
    HF_SHARED_EXPERTS,
    Rule,
    Rules,
)


def sigmoid_experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    """Read experts from DeepSeek V3's keys: after the dense layers, in groups, with shared experts."""
    if is_dense(fields, layer):
        return None
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer_or_none("n_shared_experts", minimum=0) or 0
    return MoeSpec(
        num_experts=fields.integer("n_routed_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(inner),
        routing=RoutingSpec(
            score="sigmoid",
            renormalize=fields.flag("norm_topk_prob"),
            epsilon=1e-20,
            has_choice_bias=True,
            num_groups=fields.integer("n_group"),
            kept_groups=fields.integer("topk_group"),
            scale=fields.positive("routed_scaling_factor"),
        ),
        shared=MlpSpec(inner * shared) if shared else None,
    )


HF_SIGMOID_EXPERTS: Rules = {
    **HF_ROUTED,
    **HF_SHARED_EXPERTS,
    "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.gate.e_score_correction_bias"),
}
SIGMOID_EXPERT_KEYS = {
    **EXPERT_KEYS,
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
}


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, qk_norm="head") if fields.flag("use_qk_norm") else attention


GLM4_MOE = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    hf_rules={**HF_LLAMA, **HF_QK_NORM, **HF_SIGMOID_EXPERTS},
    gguf=GGUFTraits(
        "glm4moe",
        {**GGUF, **GGUF_OTHER_NORM, **GGUF_ROUTED},
        config_keys=ConfigKeys(
            SIGMOID_EXPERT_KEYS,
            {"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        ),
    ),
    qkv_bias="attention_bias",
    has_partial_rotary=True,
    experts=sigmoid_experts,
    adjust_attention=_adjust_attention,
    mtp=HF_NEXTN,
)

GLM4V_MOE = replace(
    GLM4_MOE,
    name="glm4v_moe",
    model_types=("glm4v_moe", "glm4v_moe_text"),
    defaults={**GLM4_MOE.defaults, "max_position_embeddings": 65536, "attention_bias": True},
    gguf=None,
    has_rope_sections=True,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
    mtp=None,
)
