"""Qwen3-MoE, and the text part of Qwen3-VL-MoE: Qwen3 with routed experts on most layers (selected by
`decoder_sparse_step` and `mlp_only_layers`)."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, GGUFTraits, when_used
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_QK_NORM, Rule, Rules


def routed_experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    num_experts = fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts", minimum=0)
    is_sparse = (layer_index + 1) % fields.integer("decoder_sparse_step") == 0
    if not is_sparse or num_experts == 0 or layer_index in fields.integers("mlp_only_layers"):
        return None
    return MoeSpec(
        num_experts=num_experts,
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("moe_intermediate_size")),
        routing=RoutingSpec(renormalize=fields.flag("norm_topk_prob")),
    )


HF_ROUTED: Rules = {
    "layers.{i}.router.weight": Rule("model.layers.{i}.mlp.gate.weight"),
    "layers.{i}.experts.gate.weight": Rule("model.layers.{i}.mlp.experts.{e}.gate_proj.weight"),
    "layers.{i}.experts.up.weight": Rule("model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
    "layers.{i}.experts.down.weight": Rule("model.layers.{i}.mlp.experts.{e}.down_proj.weight"),
}

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        **HF_ROUTED,
    },
    gguf=GGUFTraits("qwen3moe", GGUF, other_archs=("qwen3vlmoe",)),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    windows=when_used,
    experts=routed_experts,
)

QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        "layers.{i}.router.weight": HF_ROUTED["layers.{i}.router.weight"],
        **{
            f"layers.{{i}}.experts.{part}.weight": Rule(
                "model.layers.{i}.mlp.experts.gate_up_proj", fused=("gate", "up"), transposed=True
            )
            for part in ("gate", "up")
        },
        "layers.{i}.experts.down.weight": Rule("model.layers.{i}.mlp.experts.down_proj", transposed=True),
    },
    gguf=None,
    has_rope_sections=True,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)
