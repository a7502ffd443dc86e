"""Cohere 2 (Command R7B, Command A): attention and MLP read the same LayerNorm, logits are scaled; windows with
rotation of neighbouring pairs in three of four layers, neither in the others."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family, GGUFTraits, alternating, rotated_windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import ModelSpec, NormSpec
from tokenmill.arch.tensors import GGUF_LLAMA, HF_LLAMA, interleaved_pairs


def scaled_logits(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, logit_scale=fields.positive("logit_scale"))


COHERE2 = Family(
    name="cohere2",
    model_types=("cohere2",),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    hf_rules=interleaved_pairs(HF_LLAMA),
    gguf=GGUFTraits(
        "cohere2",
        GGUF_LLAMA,
        config_keys=ConfigKeys({"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}),
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norm=NormSpec("layer"),
    norm_eps_key="layer_norm_eps",
    is_parallel=True,
    windows=alternating,
    adjust_attention=rotated_windows(alternating),
    adjust_model=scaled_logits,
    refused_flags=("use_qk_norm",),
)
