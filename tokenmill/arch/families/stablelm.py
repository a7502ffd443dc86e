"""StableLM: Llama with LayerNorm and rotation of a quarter of each head; in some models attention and MLP read the same
norm."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import LayerSpec, NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, with_norm_biases


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
    gguf=GGUFTraits(
        "stablelm",
        with_norm_biases(GGUF),
        config_keys=ConfigKeys(
            {"layer_norm_eps": "attention.layer_norm_epsilon"},
            {"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
            more=lambda fields, gguf: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in gguf.tensors},
        ),
    ),
    qkv_bias="use_qkv_bias",
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_eps",
    has_partial_rotary=True,
    adjust_layer=_adjust_layer,
    refused_flags=("qk_layernorm",),
)
