"""Sizes of families with routed experts: against transformers' own modules, and against published figures."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from tests.support.tiny_expert_models import EXPERT_MODELS
from tests.support.tiny_models import SIZES
from tokenmill.arch.cost import num_active_parameters, num_parameters
from tokenmill.arch.hf_config import spec_from_hf

# What the published configs have in place of transformers' defaults, which for some are those of the model; total and
# active parameters in billions by model names and cards, and whether the active ones have the embedding in them.
#   OLMoE: arXiv 2409.02060; Granite 3.0 and Solar Open: model cards; FlexOlmo: arXiv 2507.07024, "33 billion total"
#   dots.llm1: arXiv 2506.05767; K-EXAONE, Trinity Mini, Mellum 2, Laguna XS and Phi-3.5-MoE: model names and cards
PUBLISHED: dict[str, tuple[str, dict[str, Any], float, float | None, bool]] = {
    "OLMoE-1B-7B": ("OlmoeConfig", {"intermediate_size": 1024}, 6.92, 1.3, True),
    "FlexOlmo-7x7B": ("FlexOlmoConfig", {}, 33.3, None, True),
    "granite-3.0-1b-a400m": (
        "GraniteMoeConfig",
        {"vocab_size": 49155, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8,
         "tie_word_embeddings": True},
        1.33, 0.4, True,
    ),
    "dots.llm1": (
        "Dots1Config",
        {"hidden_size": 4096, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "first_k_dense_replace": 1},
        142.8, 14.0, True,
    ),
    "Solar-Open-100B": ("SolarOpenConfig", {}, 102.6, 12.0, True),
    "K-EXAONE-236B-A23B": (
        "ExaoneMoeConfig",
        {"vocab_size": 153600, "hidden_size": 6144, "intermediate_size": 18432, "num_hidden_layers": 48,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 2048,
         "num_experts": 128, "sliding_window": 128},
        236.6, 23, False,
    ),
    "Trinity-Mini": (
        "AfmoeConfig",
        {"num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 1024, "num_experts": 128,
         "num_experts_per_tok": 8, "num_shared_experts": 1, "num_dense_layers": 2, "sliding_window": 2048},
        26.1, 3, False,
    ),
    "Laguna-XS": ("LagunaConfig", {}, 33, None, True),
    "Mellum2-12B-A2.5B": ("MellumConfig", {}, 12.1, 2.5, True),
    "DBRX": (
        "DbrxConfig",
        {"d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "max_seq_len": 32768,
         "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
         "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        132, 36, True,
    ),
    "Phi-3.5-MoE": ("PhimoeConfig", {"attention_bias": True, "lm_head_bias": True}, 41.9, 6.6, True),
    "A.X-K1": ("AXK1Config", {}, 519, 33, True),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_counts_are_those_of_transformers(name: str) -> None:
    kind, changes = EXPERT_MODELS[name]
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    biases = sum(value.numel() for key, value in module.named_buffers() if "correction_bias" in key)
    spec = spec_from_hf(json.loads(config.to_json_string(use_diff=False)))
    assert num_parameters(spec) == module.num_parameters() + biases


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    kind, changes, total_b, active_b, has_embedding = PUBLISHED[name]
    spec = spec_from_hf(json.loads(getattr(transformers, kind)(**changes).to_json_string(use_diff=False)))
    assert num_parameters(spec) / 1e9 == pytest.approx(total_b, rel=0.01)
    if active_b is not None:
        active = num_active_parameters(spec) - (0 if has_embedding else spec.vocab_size * spec.hidden_size)
        digit = 10 ** -len(str(active_b).partition(".")[2])  # cards round to it, some of them down
        assert 0.98 * active_b - digit / 2 <= active / 1e9 < 1.02 * active_b + digit
