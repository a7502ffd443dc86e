"""Configs of families with routed experts: variants that the spec cannot express are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.arch.hf_config import spec_from_hf
from tokenmill.errors import UnsupportedModel

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
REFUSED = [
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is set"),
    ({"model_type": "afmoe", "score_func": "softmax"}, "score_func 'softmax'"),
    ({"model_type": "afmoe", "attention_bias": True}, "attention_bias is set"),
    ({"model_type": "laguna", "gating": False}, "gating False"),
    ({"model_type": "laguna", "moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping"),
    ({"model_type": "laguna", "num_attention_heads_per_layer": [4]}, "a number for each layer"),
    ({"model_type": "laguna", "num_attention_heads_per_layer": [4, 3]}, "3 heads over 2"),
    ({"model_type": "laguna", "moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is set"),
    ({"model_type": "mellum", "mlp_layer_types": ["sparse", "hash"]}, "layer type 'hash'"),
    ({"model_type": "cohere2_moe", "expert_selection_fn": "tanh"}, "expert_selection_fn 'tanh'"),
    ({"model_type": "cohere2_moe", "shared_expert_combination_strategy": "max"}, "combination_strategy 'max'"),
    ({"model_type": "phimoe", "num_experts_per_tok": 3}, "SparseMixer"),
    (
        {"model_type": "phimoe", "rope_scaling": {"type": "longrope", "short_mscale": 1.1, "long_mscale": 1.2}},
        "short_mscale and long_mscale",
    ),
    ({"model_type": "dbrx", "ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights 2.0"),
    ({"model_type": "granitemoe_swa", "layer_rope_theta": [1e4, 0.5]}, "layer_rope_theta is 0.5"),
    ({"model_type": "axk1", "rope_interleave": False, "num_experts_per_tok": 8}, "rope_interleave false"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_other_variants_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModel, match=problem):
        spec_from_hf({**SIZES, **changes})


def test_a_dense_layer_rotates_without_a_window_where_only_windows_do() -> None:
    """Cohere 2's first dense layers, if their pattern of windows is 1."""
    config = {**SIZES, "model_type": "cohere2_moe", "num_hidden_layers": 5, "first_k_dense_replace": 1}
    kinds = [(mixer.window, mixer.rope is None) for mixer in spec_from_hf(config).attentions]
    assert kinds == [(None, False), (4096, False), (4096, False), (4096, False), (None, True)]
    spec = spec_from_hf({**config, "prefix_dense_sliding_window_pattern": 3})
    assert [mixer.rope is None for mixer in spec.attentions] == [False, False, False, False, True]
