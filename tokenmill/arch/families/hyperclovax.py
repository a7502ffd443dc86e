"""HyperCLOVA X SEED: Granite's multipliers (the logits' one multiplies), and norms after attention and MLP too."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.granite import GRANITE, adjust_attention
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa, LayerSpec, ModelSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return adjust_attention(fields, layer, attention) if fields.has("attention_multiplier") else attention


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    layer = replace(layer, residual_scale=fields.positive("residual_multiplier"))
    return replace(layer, norms="both") if fields.flag("use_post_norm") else layer


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    embedding, logits = fields.positive("embedding_multiplier"), fields.positive("logits_scaling")
    return replace(model, embedding_scale=embedding, logit_scale=logits)


HYPERCLOVAX = replace(
    GRANITE,
    name="hyperclovax",
    model_types=("hyperclovax",),
    defaults={**GRANITE.defaults, "attention_multiplier": None, "use_post_norm": True},
    hf_rules={
        **HF_LLAMA,
        "layers.{i}.attn_post_norm.weight": Rule("model.layers.{i}.post_norm1.weight"),
        "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_norm2.weight"),
    },
    gguf=None,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    adjust_model=_adjust_model,
)
