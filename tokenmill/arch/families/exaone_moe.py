"""K-EXAONE: EXAONE 4's windows and norms of heads, norms before attention and MLP, and DeepSeek V3's routed and shared
experts after the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.exaone4 import EXAONE4, pattern_of_letters
from tokenmill.arch.families.glm4_moe import HF_SIGMOID_EXPERTS, SIGMOID_EXPERT_KEYS, sigmoid_experts
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.tensors import GGUF, GGUF_ROUTED, HF_LLAMA, HF_QK_NORM, Rule


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the numbers of experts to DeepSeek V3's keys."""
    numbers = {
        "n_routed_experts": config.get("num_experts", 64),
        "n_shared_experts": config.get("num_shared_experts", 1),
    }
    return {**pattern_of_letters(config), **numbers}


EXAONE_MOE = replace(
    EXAONE4,
    name="exaone_moe",
    model_types=("exaone_moe",),
    defaults={
        **EXAONE4.defaults,
        "intermediate_size": 16384,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "bos_token_id": 1,
        "eos_token_id": 53,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        **HF_SIGMOID_EXPERTS,
        "layers.{i}.choice_bias": Rule("model.layers.{i}.mlp.e_score_correction_bias"),
    },
    gguf=GGUFTraits(
        "exaone-moe",
        {**GGUF, **GGUF_ROUTED},
        config_keys=ConfigKeys(
            {
                **{key: name for key, name in SIGMOID_EXPERT_KEYS.items() if not key.endswith("_experts")},
                "num_experts": "expert_count",
                "num_shared_experts": "expert_shared_count",
            },
            defaults={"sliding_window": None},
        ),
    ),
    norms="before",
    experts=sigmoid_experts,
    common_keys=_common_keys,
    ignored_prefixes=("mtp.",),
)
