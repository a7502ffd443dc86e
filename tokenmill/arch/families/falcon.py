"""Falcon 7B, 40B and Falcon 2: attention and MLP in parallel, from one LayerNorm or one each, and one key head, or one
for several query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt_neox import fused_qkv, linear_names, norm_names
from tokenmill.arch.family import Family, GGUFTraits, renamed_keys
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.spec import LayerSpec, NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, Rule, with_norm_biases

_LAYER = "transformer.h.{i}"


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = renamed_keys(config, {"intermediate_size": "ffn_hidden_size", "num_attention_heads": "n_head"})
    found = renamed_keys(found, {"num_hidden_layers": "n_layer"})
    fields = ConfigFields(found, "falcon", {"multi_query": True})
    if found.get("intermediate_size") is None:
        found["intermediate_size"] = 4 * fields.integer("hidden_size")
    if fields.get("new_decoder_architecture") or not fields.get("multi_query"):
        return renamed_keys(found, {"num_key_value_heads": "num_kv_heads"})
    return {**found, "num_key_value_heads": found.get("num_key_value_heads") or 1}


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    is_new = bool(fields.get("new_decoder_architecture"))
    num_norms = fields.integer_or_none("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if num_norms == 2 and not is_new:
        fields.refuse("num_ln_in_parallel_attn 2 without new_decoder_architecture is not implemented")
    is_parallel = is_new or fields.flag("parallel_attn")
    return replace(layer, is_parallel=is_parallel, has_parallel_norm=is_parallel and num_norms == 2)


def _more(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return how many norms a layer has; with two, attention reads the second."""
    has_two = "blk.0.attn_norm_2.weight" in gguf.tensors
    return {"new_decoder_architecture": has_two, "num_ln_in_parallel_attn": 2 if has_two else 1}


FALCON = Family(
    name="falcon",
    model_types=("falcon",),
    defaults={
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "parallel_attn": True,
        "bias": False,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    hf_rules={
        **HF_LLAMA,
        "embed.weight": Rule("transformer.word_embeddings.weight"),
        **fused_qkv(f"{_LAYER}.self_attention.query_key_value", is_per_key_head=True),
        **linear_names(
            {
                "o": f"{_LAYER}.self_attention.dense",
                "up": f"{_LAYER}.mlp.dense_h_to_4h",
                "down": f"{_LAYER}.mlp.dense_4h_to_h",
            }
        ),
        **norm_names(
            {
                "layers.{i}.attn_norm": f"{_LAYER}.input_layernorm",
                "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
                "final_norm": "transformer.ln_f",
            }
        ),
    },
    hf_variant=norm_names({"layers.{i}.attn_norm": f"{_LAYER}.ln_attn", "layers.{i}.mlp_norm": f"{_LAYER}.ln_mlp"}),
    gguf=GGUFTraits(
        "falcon",
        {**with_norm_biases(GGUF), **fused_qkv("blk.{i}.attn_qkv")},
        config_keys=ConfigKeys(
            {"layer_norm_epsilon": "attention.layer_norm_epsilon"}, {"bias": "blk.0.attn_qkv.bias"}, more=_more
        ),
        variant=norm_names({"layers.{i}.attn_norm": "blk.{i}.attn_norm_2", "layers.{i}.mlp_norm": "blk.{i}.attn_norm"}),
    ),
    qkv_bias="bias",
    out_bias="bias",
    mlp_bias="bias",
    activation_key="activation",
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_epsilon",
    common_keys=_common_keys,
    adjust_layer=_adjust_layer,
    refused_flags=("alibi",),
)
