"""GPT-2, and GPT-BigCode (StarCoder, SantaCoder): learned embeddings of positions, LayerNorm and biases everywhere; the
latter with one key head for all query heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt_neox import GGUF_FUSED, fused_qkv, linear_names, norm_names
from tokenmill.arch.family import Family, GGUFTraits, renamed_keys
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa, ModelSpec, NormSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule, Rules

GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
LAYER = "model.h.{i}"
PREFIXES = ("transformer.", "")  # published files of GPT-2 have none
GPT_NAMES: Rules = {
    **HF_LLAMA,
    "embed.weight": Rule("model.wte.weight"),
    "positions.weight": Rule("model.wpe.weight"),
    **norm_names(
        {"layers.{i}.attn_norm": f"{LAYER}.ln_1", "layers.{i}.mlp_norm": f"{LAYER}.ln_2", "final_norm": "model.ln_f"}
    ),
}


def common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = renamed_keys(config, GPT_KEYS)
    if found.get("intermediate_size") is None:
        found["intermediate_size"] = 4 * ConfigFields(found, "gpt2").integer("hidden_size")
    return found


def _of_bigcode(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found, num_heads = common_keys(config), config.get("num_key_value_heads") or 1
    return {**found, "num_key_value_heads": num_heads} if found.get("multi_query", True) else found


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    scale = attention.scale if fields.flag("scale_attn_weights") else 1.0
    by_layer = bool(fields.get("scale_attn_by_inverse_layer_idx"))
    return replace(attention, rope=None, scale=scale / (layer + 1) if by_layer else scale)


def learned_positions(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, num_positions=model.max_context)


def _names(*, transposed: bool) -> Rules:
    projections = {"o": f"{LAYER}.attn.c_proj", "up": f"{LAYER}.mlp.c_fc", "down": f"{LAYER}.mlp.c_proj"}
    fused = fused_qkv(f"{LAYER}.attn.c_attn", is_per_key_head=not transposed, transposed=transposed)
    return {**GPT_NAMES, **fused, **linear_names(projections, transposed=transposed)}


GGUF_POSITIONS: Rules = {**GGUF_FUSED, "positions.weight": Rule("position_embd.weight")}
KEYS = ConfigKeys({"layer_norm_epsilon": "attention.layer_norm_epsilon"})

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    defaults={
        "activation_function": "gelu_new",
        "max_position_embeddings": 1024,
        "layer_norm_epsilon": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    hf_rules=_names(transposed=True),
    gguf=GGUFTraits("gpt2", GGUF_POSITIONS, config_keys=KEYS),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    activation_key="activation_function",
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_epsilon",
    common_keys=common_keys,
    adjust_attention=_adjust_attention,
    adjust_model=learned_positions,
    refused_flags=("add_cross_attention",),
    hf_prefixes=PREFIXES,
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
)

GPT_BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    model_types=("gpt_bigcode",),
    defaults={**GPT2.defaults, "activation_function": "gelu_pytorch_tanh"},
    hf_rules=_names(transposed=False),
    gguf=GGUFTraits("starcoder", GGUF_POSITIONS, config_keys=KEYS),
    common_keys=_of_bigcode,
)
