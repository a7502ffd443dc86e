"""How the configs of tiny random models with routed experts differ from the common sizes
(`tests/support/tiny_models.py`)."""

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
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {**GRANITE, "shared_intermediate_size": 40, "sliding_window": 9, "num_hidden_layers": 5,
         "layer_rope_theta": [1e4, 500.0, 500.0, 500.0, 0]},
    ),
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
    "phimoe": (
        "PhimoeConfig",
        {**MOE, "num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.2, "long_mscale": 1.2,
                             "original_max_position_embeddings": 256, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                             "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}},
    ),
    "kolibri1": (
        "Kolibri1Config",
        {**MOE, **ALTERNATING, "head_dim": 12, "num_experts": 5, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "axk1": (
        "AXK1Config",
        {**SIGMOID, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 10,
         "qk_rope_head_dim": 8, "v_head_dim": 14},
    ),
    "dbrx": (
        "DbrxConfig",
        {"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 256,
         "attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, "rope_theta": 10000.0},
         "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2}},
    ),
    "aria": ("AriaTextConfig", {"moe_num_experts": 5, "moe_topk": 2}),
}  # fmt: skip
