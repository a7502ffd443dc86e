"""A.X K1: DeepSeek V3 with a norm after the experts, whose result is added to the stream."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.deepseek import DEEPSEEK_V3
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import LayerSpec, MoeSpec
from tokenmill.arch.tensors import Rule


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    return replace(layer, norms_feed_after=isinstance(layer.mlp, MoeSpec))


AXK1 = replace(
    DEEPSEEK_V3,
    name="axk1",
    model_types=("axk1",),
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 32768,
        "first_k_dense_replace": 1,
        "n_routed_experts": 192,
        "bos_token_id": 163691,
        "eos_token_id": 163691,
    },
    hf_rules={
        **DEEPSEEK_V3.hf_rules,
        "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_mlp_layernorm.weight"),
    },
    gguf=None,
    adjust_layer=_adjust_layer,
    mtp=None,
)
