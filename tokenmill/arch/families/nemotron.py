"""Nemotron-4, Nemotron-Mini and Minitron: LayerNorm whose weights are stored minus one, an MLP of squared ReLUs without
a gate, rotation of half of each head."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.arcee import BIASES
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, with_norm_biases

HF_NEMOTRON = {
    ours: replace(rule, add=1.0) if ours.endswith("norm.weight") else rule
    for ours, rule in with_norm_biases(HF_LLAMA).items()
}

NEMOTRON = Family(
    name="nemotron",
    model_types=("nemotron",),
    defaults={
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    hf_rules=HF_NEMOTRON,
    gguf=GGUFTraits(
        "nemotron",
        with_norm_biases(GGUF),
        config_keys=ConfigKeys({"norm_eps": "attention.layer_norm_epsilon"}, BIASES),
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="norm_eps",
    has_partial_rotary=True,
)
