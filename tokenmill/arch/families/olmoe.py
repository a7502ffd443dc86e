"""OLMoE and FlexOlmo: OLMo 2's norms over all heads of q and k, and routed experts on every layer; OLMoE has its other
norms before attention and experts, FlexOlmo after them."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.olmo import OLMO2
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_QK_NORM


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    return MoeSpec(
        num_experts=fields.integer("num_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size")),
        routing=RoutingSpec(renormalize=fields.flag("norm_topk_prob")),
    )


OLMOE = Family(
    name="olmoe",
    model_types=("olmoe",),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
    },
    hf_rules={**HF_LLAMA, **HF_QK_NORM, **HF_ROUTED},
    gguf=GGUFTraits(
        "olmoe", GGUF, config_keys=ConfigKeys({**EXPERT_KEYS, "num_experts": "expert_count"}, gating=SOFTMAX)
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="all",
    experts=_experts,
    refused_flags=("clip_qkv",),
)

FLEX_OLMO = replace(
    OLMO2,
    name="flex_olmo",
    model_types=("flex_olmo",),
    defaults={
        **OLMO2.defaults,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
        "eos_token_id": 100257,
    },
    hf_rules={**OLMO2.hf_rules, **HF_ROUTED},
    gguf=None,
    experts=_experts,
)
