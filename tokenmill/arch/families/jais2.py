"""Jais 2: LayerNorm and biases everywhere, an MLP of squared ReLUs without a gate."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.arcee import BIASES
from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, with_norm_biases

JAIS2 = replace(
    LLAMA,
    name="jais2",
    model_types=("jais2",),
    defaults={
        **LLAMA.defaults,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 150024,
    },
    hf_rules=with_norm_biases(HF_LLAMA),
    gguf=GGUFTraits(
        "jais2",
        with_norm_biases(GGUF),
        config_keys=ConfigKeys({"layer_norm_eps": "attention.layer_norm_epsilon"}, BIASES),
    ),
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_eps",
)
