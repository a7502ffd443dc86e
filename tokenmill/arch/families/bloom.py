"""BLOOM and MPT: no rotation, but scores that fall with the distance of a key, at another rate for each head (ALiBi);
LayerNorm, in BLOOM of the embeddings too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt2 import GPT2, PREFIXES
from tokenmill.arch.families.gpt_neox import GGUF_FUSED, fused_qkv, linear_names, norm_names
from tokenmill.arch.family import GGUFTraits, renamed_keys
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa, ModelSpec, NormSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule

_LAYER, _BLOCK = "model.h.{i}", "transformer.blocks.{i}"
_EPS = {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
_MPT_KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return ALiBi's slope of each head: a geometric sequence that ends at 2^-largest if the heads are a power of two;
    otherwise that of the next lower power, then every other one of the next higher power's."""
    higher = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-largest * number / higher) for number in range(1, higher + 1)]
    return tuple(slopes if higher == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def _of_bloom(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = renamed_keys(config, {"hidden_size": "n_embed", "num_hidden_layers": "n_layer"})
    found = renamed_keys(found, {"num_attention_heads": "n_head", "max_position_embeddings": "seq_length"})
    found["intermediate_size"] = 4 * ConfigFields(found, "bloom").integer("hidden_size")
    return found


def _bloom_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, rope=None, slopes=alibi_slopes(attention.num_heads))


def _with_embed_norm(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, has_embed_norm=True)


BLOOM = replace(
    GPT2,
    name="bloom",
    model_types=("bloom",),
    defaults={
        **GPT2.defaults,
        "activation_function": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules={
        **HF_LLAMA,
        "embed.weight": Rule("model.word_embeddings.weight"),
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
                "embed_norm": "model.word_embeddings_layernorm",
                "layers.{i}.attn_norm": f"{_LAYER}.input_layernorm",
                "layers.{i}.mlp_norm": f"{_LAYER}.post_attention_layernorm",
                "final_norm": "model.ln_f",
            }
        ),
    },
    gguf=GGUFTraits(
        "bloom", {**GGUF_FUSED, **norm_names({"embed_norm": "token_embd_norm"})}, config_keys=ConfigKeys(_EPS)
    ),
    common_keys=_of_bloom,
    adjust_attention=_bloom_attention,
    adjust_model=_with_embed_norm,
    refused_flags=("apply_residual_connection_post_layernorm",),
    hf_prefixes=PREFIXES,
    ignored_suffixes=(),
)


def _of_mpt(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = renamed_keys(config, _MPT_KEYS)
    found["intermediate_size"] = 4 * ConfigFields(found, "mpt").integer("hidden_size")
    return {**found, "activation_function": "gelu"}


def _mpt_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    own = ConfigFields(fields.section("attn_config") or {}, f"{fields.source} attn_config", {"alibi_bias_max": 8})
    for key in ("qk_ln", "prefix_lm", "rope"):
        if own.get(key):
            own.refuse(f"{key} is set, which is not implemented")
    if own.get("alibi") is False:
        own.refuse("alibi false is not implemented")
    if own.get("attn_type") not in (None, "multihead_attention"):
        own.refuse(f"attn_type {own.get('attn_type')!r} is not implemented")
    return replace(
        attention,
        rope=None,
        scale=own.positive_or_none("softmax_scale") or attention.scale,
        qkv_clip=own.positive_or_none("clip_qkv"),
        slopes=alibi_slopes(attention.num_heads, own.positive("alibi_bias_max")),
    )


def _mpt_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    if not fields.flag("no_bias"):
        fields.refuse("no_bias false is not implemented")
    if fields.get("logit_scale") is not None:
        fields.refuse("logit_scale is set, which is not implemented")
    if fields.text("norm_type") not in ("low_precision_layernorm", "layernorm"):
        fields.refuse(f"norm_type {fields.text('norm_type')!r} is not implemented")
    return model


MPT = replace(
    GPT2,
    name="mpt",
    model_types=("mpt",),
    defaults={
        **GPT2.defaults,
        "max_position_embeddings": 2048,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    hf_rules={
        **HF_LLAMA,
        "embed.weight": Rule("transformer.wte.weight"),
        **fused_qkv(f"{_BLOCK}.attn.Wqkv"),
        **linear_names(
            {"o": f"{_BLOCK}.attn.out_proj", "up": f"{_BLOCK}.ffn.up_proj", "down": f"{_BLOCK}.ffn.down_proj"}
        ),
        **norm_names(
            {
                "layers.{i}.attn_norm": f"{_BLOCK}.norm_1",
                "layers.{i}.mlp_norm": f"{_BLOCK}.norm_2",
                "final_norm": "transformer.norm_f",
            }
        ),
    },
    gguf=GGUFTraits(
        "mpt",
        GGUF_FUSED,
        config_keys=ConfigKeys(
            _EPS,
            more=lambda fields, gguf: {
                "attn_config": {
                    "clip_qkv": fields.positive_or_none("attention.clamp_kqv"),
                    "alibi_bias_max": fields.positive("attention.max_alibi_bias"),
                }
            },
        ),
    ),
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    norm=NormSpec("layer"),
    common_keys=_of_mpt,
    adjust_attention=_mpt_attention,
    adjust_model=_mpt_model,
    hf_prefixes=("transformer.",),
    ignored_suffixes=(),
)
