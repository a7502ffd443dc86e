"""Granite 3 and dense Granite 4: Llama with multipliers of the embedding, of what is added to the residual stream and
of attention scores, and a divisor of the logits."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa, LayerSpec, ModelSpec
from tokenmill.arch.tensors import GGUF_LLAMA


def adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, scale=fields.positive("attention_multiplier"))


def adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    return replace(layer, residual_scale=fields.positive("residual_multiplier"))


def adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    embedding, logits = fields.positive("embedding_multiplier"), fields.positive("logits_scaling")
    return replace(model, embedding_scale=embedding, logit_scale=1.0 / logits)


GRANITE_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}

GRANITE_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}

GRANITE = replace(
    LLAMA,
    name="granite",
    model_types=("granite",),
    defaults={**LLAMA.defaults, **GRANITE_MULTIPLIERS},
    gguf=GGUFTraits(
        "granite",
        GGUF_LLAMA,
        config_keys=ConfigKeys(
            GRANITE_KEYS,
            {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"},
        ),
    ),
    adjust_attention=adjust_attention,
    adjust_layer=adjust_layer,
    adjust_model=adjust_model,
)
