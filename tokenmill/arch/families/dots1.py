"""dots.llm1 and Solar Open: DeepSeek V3's routed and shared experts with grouped-query attention; dots.llm1 norms each
head of q and k and may have windows in its upper layers."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.glm4_moe import (
    GLM4_MOE,
    HF_SIGMOID_EXPERTS,
    SIGMOID_EXPERT_KEYS,
    sigmoid_experts,
)
from tokenmill.arch.family import Family, GGUFTraits, Windows, named_layers
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.tensors import GGUF, GGUF_ROUTED, HF_LLAMA, HF_QK_NORM


def _windows(fields: ConfigFields, num_layers: int) -> Windows:
    if fields.has("layer_types"):
        return named_layers(fields, num_layers)
    window, first = fields.integer_or_none("sliding_window"), fields.integer("max_window_layers", minimum=0)
    return tuple(window if index >= first else None for index in range(num_layers))


DOTS1 = Family(
    name="dots1",
    model_types=("dots1",),
    defaults={
        "hidden_act": "silu",
        "intermediate_size": 10944,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    hf_rules={**HF_LLAMA, **HF_QK_NORM, **HF_SIGMOID_EXPERTS},
    gguf=GGUFTraits(
        "dots1",
        {**GGUF, **GGUF_ROUTED},
        config_keys=ConfigKeys(SIGMOID_EXPERT_KEYS, {"attention_bias": "blk.0.attn_q.bias"}, {"sliding_window": None}),
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    windows=_windows,
    experts=sigmoid_experts,
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    name="solar_open",
    model_types=("solar_open",),
    defaults={
        **{key: value for key, value in GLM4_MOE.defaults.items() if key != "partial_rotary_factor"},
        "intermediate_size": 10240,  # of no layer
        "head_dim": 128,
        "rope_theta": 1e6,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    },
    hf_rules={**HF_LLAMA, **HF_SIGMOID_EXPERTS},
    gguf=None,
    has_partial_rotary=False,
    mtp=None,
)
