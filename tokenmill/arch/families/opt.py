"""OPT and BioGPT: learned embeddings of positions, of which the table has two unused rows first, LayerNorm and biases
everywhere; an MLP of ReLUs in OPT, scaled embeddings in BioGPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt2 import GPT2, learned_positions
from tokenmill.arch.families.gpt_neox import linear_names, norm_names
from tokenmill.arch.family import renamed_keys
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa, ModelSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule

_LAYER = "model.layers.{i}"


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return renamed_keys(config, {"intermediate_size": "ffn_dim"})


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, rope=None)


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    if fields.get("word_embed_proj_dim") not in (None, model.hidden_size):
        fields.refuse("a word_embed_proj_dim other than hidden_size is not implemented")
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not fields.flag(key):
            fields.refuse(f"{key} false is not implemented")
    return learned_positions(fields, model)


OPT = replace(
    GPT2,
    name="opt",
    model_types=("opt",),
    defaults={
        **GPT2.defaults,
        "activation_function": "relu",
        "max_position_embeddings": 2048,
        "intermediate_size": 3072,
        "enable_bias": True,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
    hf_rules={
        **HF_LLAMA,
        "positions.weight": Rule("model.embed_positions.weight", skipped_rows=2),
        **linear_names({"o": f"{_LAYER}.self_attn.out_proj", "up": f"{_LAYER}.fc1", "down": f"{_LAYER}.fc2"}),
        **norm_names(
            {
                "layers.{i}.attn_norm": f"{_LAYER}.self_attn_layer_norm",
                "layers.{i}.mlp_norm": f"{_LAYER}.final_layer_norm",
                "final_norm": "model.final_layer_norm",
            }
        ),
    },
    gguf=None,
    qkv_bias="enable_bias",
    out_bias="enable_bias",
    mlp_bias="enable_bias",
    common_keys=_common_keys,
    adjust_attention=_adjust_attention,
    adjust_model=_adjust_model,
    refused_flags=("_remove_final_layer_norm",),
    hf_prefixes=("model.decoder.", "decoder."),
    ignored_suffixes=(),
)


def _biogpt_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    scale = model.hidden_size**0.5 if fields.flag("scale_embedding") else 1.0
    return replace(learned_positions(fields, model), embedding_scale=scale)


_BIOGPT = {
    **OPT.hf_rules,
    "head.weight": Rule("output_projection.weight"),
    **norm_names({"final_norm": "model.layer_norm"}),
}

BIOGPT = replace(
    OPT,
    name="biogpt",
    model_types=("biogpt",),
    defaults={
        **GPT2.defaults,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "scale_embedding": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    hf_rules=_BIOGPT,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    activation_key="hidden_act",
    norm_eps_key="layer_norm_eps",
    adjust_model=_biogpt_model,
    refused_flags=(),
    hf_prefixes=("biogpt.",),
)
