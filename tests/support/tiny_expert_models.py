"""What distinguishes tiny random models with routed experts from the common sizes (`tests/support/tiny_models.py`)."""

from __future__ import annotations

from typing import Any

MOE = {"num_experts_per_tok": 2}
SIGMOID = {**MOE, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
           "routed_scaling_factor": 1.4, "n_shared_experts": 2, "norm_topk_prob": True}  # fmt: skip
ALTERNATING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MULTIPLIERS = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.25,
               "attention_multiplier": 0.125}  # fmt: skip
GRANITE = {**MOE, **MULTIPLIERS, "num_local_experts": 5}
TWO_ROPES = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "partial_rotary_factor": 0.5,
                       "original_max_position_embeddings": 64},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}  # fmt: skip
EXPERT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("OlmoeConfig", {**MOE, "num_experts": 5}),
    "flex_olmo": ("FlexOlmoConfig", {**MOE, "num_experts": 5, "norm_topk_prob": True}),
    "granitemoe": ("GraniteMoeConfig", GRANITE),
    "granitemoeshared": ("GraniteMoeSharedConfig", {**GRANITE, "shared_intermediate_size": 40}),
    "dots1": (
        "Dots1Config", {**SIGMOID, "first_k_dense_replace": 1, "sliding_window": 9, "max_window_layers": 2}
    ),
    "solar_open": ("SolarOpenConfig", {**SIGMOID, "head_dim": 12}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {**SIGMOID, "num_experts": 8, "num_shared_experts": 2, "sliding_window": 9, "num_hidden_layers": 4,
         "sliding_window_pattern": 2},
    ),
    "afmoe": (
        "AfmoeConfig",
        {**MOE, **ALTERNATING, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24, "route_scale": 1.7,
         "mup_enabled": True},
    ),
    "laguna": (
        "LagunaConfig",
        {**MOE, **ALTERNATING, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "num_attention_heads_per_layer": [4, 6, 2],
         "moe_routed_scaling_factor": 1.7, "rope_parameters": TWO_ROPES},
    ),
    "laguna_per_element": (
        "LagunaConfig",
        {**MOE, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24, "gating": "per-element",
         "shared_expert_intermediate_size": 24, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "mellum": (
        "MellumConfig",
        {**MOE, **ALTERNATING, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24,
         "mlp_layer_types": ["sparse", "sparse", "dense"],
         "rope_parameters": {"full_attention": {**TWO_ROPES["full_attention"], "partial_rotary_factor": 1.0},
                             "sliding_attention": TWO_ROPES["sliding_attention"]}},
    ),
    "flint": (
        "FlintConfig",
        {**MOE, "num_hidden_layers": 4, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "sliding_window": 9, "mlp_only_layers": [1]},
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {**MOE, "num_hidden_layers": 5, "head_dim": 12, "num_experts": 5, "num_shared_experts": 2, "logit_scale": 3.0,
         "sliding_window": 9, "sliding_window_pattern": 2, "first_k_dense_replace": 1,
         "prefix_dense_intermediate_size": 56},
    ),
    "cohere2_moe_sigmoid": (
        "Cohere2MoeConfig",
        {**MOE, "head_dim": 12, "num_experts": 5, "num_shared_experts": 1, "expert_selection_fn": "sigmoid",
         "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5, "logit_scale": 0.5, "sliding_window": 9,
         "sliding_window_pattern": 2},
    ),
    "aria": ("AriaTextConfig", {"moe_num_experts": 5, "moe_topk": 2}),
}  # fmt: skip
