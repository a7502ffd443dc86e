"""Cohere 2 with routed experts: their weights are a softmax or sigmoids, the shared experts' result is added or
averaged, and the first dense layers rotate with or without a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.cohere2 import COHERE2, scaled_logits
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.family import is_dense, named_layers, rotated_windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import RMS_NORM, Gqa, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import HF_SHARED_EXPERTS


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the types of the layers if they are missing: one pattern for the first dense layers, one for the others."""
    fields = ConfigFields(config, "cohere2_moe", COHERE2_MOE.defaults)
    if config.get("layer_types"):
        return config
    count, first = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", minimum=0)
    dense, others = fields.integer("prefix_dense_sliding_window_pattern"), fields.integer("sliding_window_pattern")
    places = [(index + 1) % dense for index in range(min(first, count))]
    places += [(index + 1) % others for index in range(count - len(places))]
    kinds = ["sliding_attention" if place else "full_attention" for place in places]
    return {**config, "layer_types": kinds}


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    if is_dense(fields, layer) and fields.integer("prefix_dense_sliding_window_pattern") == 1:
        return attention
    return rotated_windows(named_layers)(fields, layer, attention)


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    if is_dense(fields, layer):
        return None
    score, inner = fields.text("expert_selection_fn"), fields.integer("intermediate_size")
    if score not in ("softmax", "sigmoid"):
        fields.refuse(f"expert_selection_fn {score!r} is not implemented")
    shared = fields.integer("num_shared_experts", minimum=0)
    return MoeSpec(
        num_experts=fields.integer("num_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(inner),
        routing=RoutingSpec(
            "softmax" if score == "softmax" else "sigmoid",
            renormalize=score == "softmax" or fields.flag("norm_topk_prob"),
            scale=_share(fields),
        ),
        shared=MlpSpec(inner * shared) if shared else None,
    )


def _share(fields: ConfigFields) -> float:
    """Return the factor of the routed and of the shared experts' results."""
    strategy = fields.text("shared_expert_combination_strategy")
    if strategy not in ("average", "sum"):
        fields.refuse(f"shared_expert_combination_strategy {strategy!r} is not implemented")
    return 0.5 if strategy == "average" and fields.integer("num_shared_experts", minimum=0) else 1.0


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    if isinstance(layer.mlp, MlpSpec):
        width = fields.integer_or_none("prefix_dense_intermediate_size") or layer.mlp.intermediate_size
        return replace(layer, mlp=replace(layer.mlp, intermediate_size=width))
    share = _share(fields)
    return layer if share == 1.0 else replace(layer, factors=(("shared.down", share),))


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    model = scaled_logits(fields, model)
    eps = fields.positive_or_none("rms_norm_eps")
    return model if eps is None else replace(model, norm=RMS_NORM, norm_eps=eps)


COHERE2_MOE = replace(
    COHERE2,
    name="cohere2_moe",
    model_types=("cohere2_moe",),
    defaults={
        **COHERE2.defaults,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "prefix_dense_sliding_window_pattern": 1,
    },
    hf_rules={**COHERE2.hf_rules, **HF_ROUTED, **HF_SHARED_EXPERTS},
    gguf=None,
    windows=named_layers,
    experts=_experts,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    adjust_model=_adjust_model,
    common_keys=_common_keys,
)
