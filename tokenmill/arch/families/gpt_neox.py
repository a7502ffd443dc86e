"""GPT-NeoX, Pythia, Dolly and others: LayerNorm and biases, attention and MLP in parallel, each with its own norm, and
rotation of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits, renamed_keys
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import LayerSpec, NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, Rule, Rules, with_norm_biases

_QKV = ("q", "k", "v")
_KINDS = ("weight", "bias")


def fused_qkv(theirs: str, *, is_per_key_head: bool = False, transposed: bool = False) -> Rules:
    """Return the rules for q, k and v in one tensor."""
    return {
        f"layers.{{i}}.{part}.{kind}": Rule(
            f"{theirs}.{kind}", _QKV, is_per_key_head=is_per_key_head, transposed=transposed and kind == "weight"
        )
        for part in _QKV
        for kind in _KINDS
    }


def linear_names(names: Mapping[str, str], *, transposed: bool = False) -> Rules:
    """Return the rules for weights and biases of these parts of a layer."""
    return {
        f"layers.{{i}}.{ours}.{kind}": Rule(f"{theirs}.{kind}", transposed=transposed and kind == "weight")
        for ours, theirs in names.items()
        for kind in _KINDS
    }


def norm_names(names: Mapping[str, str]) -> Rules:
    """Return the rules for weights and biases of these norms."""
    return {f"{ours}.{kind}": Rule(f"{theirs}.{kind}") for ours, theirs in names.items() for kind in _KINDS}


GGUF_FUSED: Rules = {**with_norm_biases(GGUF), **fused_qkv("blk.{i}.attn_qkv")}
_LAYER = "gpt_neox.layers.{i}"


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return renamed_keys(config, {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"})


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    is_parallel = fields.flag("use_parallel_residual")
    return replace(layer, is_parallel=is_parallel, has_parallel_norm=is_parallel)


GPT_NEOX = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    hf_rules={
        **HF_LLAMA,
        "embed.weight": Rule("gpt_neox.embed_in.weight"),
        **fused_qkv(f"{_LAYER}.attention.query_key_value", is_per_key_head=True),
        **linear_names(
            {
                "o": f"{_LAYER}.attention.dense",
                "up": f"{_LAYER}.mlp.dense_h_to_4h",
                "down": f"{_LAYER}.mlp.dense_4h_to_h",
            }
        ),
        **norm_names(
            {
                "layers.{i}.attn_norm": f"{_LAYER}.input_layernorm",
                "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
                "final_norm": "gpt_neox.final_layer_norm",
            }
        ),
    },
    hf_variant={"head.weight": Rule("embed_out.weight")},
    gguf=GGUFTraits(
        "gptneox",
        GGUF_FUSED,
        config_keys=ConfigKeys(
            {"layer_norm_eps": "attention.layer_norm_epsilon", "use_parallel_residual": "use_parallel_residual"},
            {"attention_bias": "blk.0.attn_qkv.bias"},
        ),
    ),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias=True,
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_eps",
    has_partial_rotary=True,
    common_keys=_common_keys,
    adjust_layer=_adjust_layer,
    ignored_suffixes=(".attention.bias", ".attention.masked_bias"),
)
