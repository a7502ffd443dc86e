"""Hunyuan: version 1 norms heads of q and k after the rotation, whose base is increased by a factor `alpha`, and has
routed and shared experts. Version 3 (Hy3) norms before the rotation, with sigmoid scores and a choice bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.arcee import BIASES
from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa, MlpSpec, MoeSpec, RopeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_QK_NORM, Rule, Rules


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move `alpha` out of the rope parameters; `_adjust_attention` applies it to the base."""
    found = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, dict) and rope.get("alpha"):
            theta = rope.get("rope_theta") or config.get("rope_theta")
            found[key] = {"rope_type": "default", **({"rope_theta": theta} if theta else {})}
            found["rope_alpha"] = rope["alpha"]
    return found


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    alpha, rope, dim = fields.positive_or_none("rope_alpha"), attention.rope, attention.head_dim
    if alpha is None or rope is None:
        return attention
    return replace(attention, rope=RopeSpec(rope.theta * alpha ** (dim / (dim - 2)), rope.rotary_dim))


def _names(norm: str) -> Rules:
    return {
        "layers.{i}.q_norm.weight": Rule(f"model.layers.{{i}}.self_attn.query_{norm}.weight"),
        "layers.{i}.k_norm.weight": Rule(f"model.layers.{{i}}.self_attn.key_{norm}.weight"),
    }


HUNYUAN_DENSE = Family(
    name="hunyuan_v1_dense",
    model_types=("hunyuan_v1_dense",),
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    hf_rules={**HF_LLAMA, **_names("layernorm")},
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head_after_rope",
    gguf=GGUFTraits("hunyuan-dense", GGUF, config_keys=ConfigKeys(tensors=BIASES)),  # `alpha` is in the rope base
    common_keys=_common_keys,
    adjust_attention=_adjust_attention,
)


HF_SHARED_MLP: Rules = {
    f"layers.{{i}}.shared.{part}.weight": Rule(f"model.layers.{{i}}.mlp.shared_mlp.{part}_proj.weight")
    for part in ("gate", "up", "down")
}


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    inner = MlpSpec(fields.integer("intermediate_size"))
    return MoeSpec(_of_layer(fields, "num_experts", layer), _of_layer(fields, "moe_topk", layer), inner, shared=inner)


def _of_layer(fields: ConfigFields, key: str, layer: int) -> int:
    """Return an integer that may be given once or per layer."""
    numbers = fields.integers(key)
    if not numbers or min(numbers) < 1 or (len(numbers) > 1 and layer >= len(numbers)):
        fields.refuse(f"{key} is {list(numbers)}, expected an integer, or one for each layer")
    return numbers[0] if len(numbers) == 1 else numbers[layer]


HUNYUAN_MOE = replace(
    HUNYUAN_DENSE,
    name="hunyuan_v1_moe",
    model_types=("hunyuan_v1_moe",),
    gguf=None,
    defaults={**HUNYUAN_DENSE.defaults, "num_experts": 1, "moe_topk": 1},
    hf_rules={
        **HUNYUAN_DENSE.hf_rules,
        **HF_ROUTED,
        **HF_SHARED_MLP,
        "layers.{i}.router.weight": Rule("model.layers.{i}.mlp.gate.wg.weight"),
    },
    experts=_experts,
)


def _sigmoid_experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    kinds = fields.strings("mlp_layer_types", fields.integer("num_hidden_layers"))
    if (layer == 0) if kinds is None else (kinds[layer] == "dense"):
        return None
    inner = fields.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=fields.integer("num_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(inner),
        routing=RoutingSpec(
            score="sigmoid", epsilon=1e-20, has_choice_bias=True, scale=fields.positive("router_scaling_factor")
        ),
        shared=MlpSpec(inner * fields.integer("num_shared_experts")),
    )


HY3 = Family(
    name="hy_v3",
    model_types=("hy_v3",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        **HF_ROUTED,
        **HF_SHARED_MLP,
        "layers.{i}.router.weight": Rule("model.layers.{i}.mlp.router.gate.weight"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.expert_bias"),
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    experts=_sigmoid_experts,
    refused_flags=("mlp_bias",),
)
