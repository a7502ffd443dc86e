"""Flint: Qwen3-MoE with sigmoid scores and a shared expert, learned sinks, and windows in most layers, which rotate;
the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.qwen3_moe import QWEN3_MOE, routed_experts
from tokenmill.arch.family import named_layers, rotated_windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import HF_SHARED_EXPERT, Rule


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the types of the layers if they are missing: windows in all but the first two, every fourth and the last."""
    count = config.get("num_hidden_layers")
    if config.get("layer_types") or not isinstance(count, int):
        return config
    is_global = [index < 2 or index % 4 == 1 or index == count - 1 for index in range(count)]
    return {**config, "layer_types": ["full_attention" if one else "sliding_attention" for one in is_global]}


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(rotated_windows(named_layers)(fields, layer, attention), has_sinks=True)


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    routed = routed_experts(fields, layer)
    shared = MlpSpec(fields.integer("shared_expert_intermediate_size"))
    routing = RoutingSpec("sigmoid", renormalize=fields.flag("norm_topk_prob"))
    return routed and replace(routed, routing=routing, shared=shared)


FLINT = replace(
    QWEN3_MOE,
    name="flint",
    model_types=("flint",),
    defaults={
        **QWEN3_MOE.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "num_local_experts": 256,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 1],
    },
    hf_rules={
        **QWEN3_MOE.hf_rules,
        **HF_SHARED_EXPERT,
        "layers.{i}.sinks": Rule("model.layers.{i}.self_attn.softmax_offset"),
    },
    gguf=None,
    windows=named_layers,
    experts=_experts,
    adjust_attention=_adjust_attention,
    common_keys=_common_keys,
)
