"""StableLM: Llama with LayerNorm and rotation of a quarter of each head; in some models attention and MLP read the same
norm."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import LayerSpec, NormSpec
from tokenmill.arch.tensors import HF_LLAMA, with_norm_biases


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    return replace(layer, is_parallel=fields.flag("use_parallel_residual"))


STABLELM = Family(
    name="stablelm",
    model_types=("stablelm",),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    hf_rules=with_norm_biases(HF_LLAMA),
    qkv_bias="use_qkv_bias",
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_eps",
    has_partial_rotary=True,
    adjust_layer=_adjust_layer,
    refused_flags=("qk_layernorm",),
)
