"""Gemma 1 and VaultGemma: Llama with scaled embeddings, a GELU gate and norms stored minus one; VaultGemma has the soft
caps and windows of Gemma 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gemma2 import GEMMA2
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.tensors import GGUF, HF_GEMMA, Rule


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the activation that "gelu" stands for in the first checkpoints: the tanh approximation."""
    return {**config, "hidden_act": "gelu_pytorch_tanh"} if config.get("hidden_act") == "gelu" else config


GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    hf_rules={
        **HF_GEMMA,
        "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight", add=1.0),
    },
    gguf=GGUFTraits("gemma", GGUF),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    scaled_embeddings=True,
    common_keys=_common_keys,
    refused_flags=("use_bidirectional_attention",),
)

VAULTGEMMA = replace(GEMMA2, name="vaultgemma", model_types=("vaultgemma",), gguf=None, norms="before")
