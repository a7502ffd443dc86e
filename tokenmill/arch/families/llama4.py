"""Llama 4, text part: three of four layers attend within a chunk of the context, with rotation of neighbouring pairs
and then an L2 norm; the others attend to everything without rotation, with queries scaled by position. One routed
expert per token, whose input is weighted, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.arch.families.smollm3 import has_rope
from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES, Family, GGUFTraits, Windows
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SIGMOID, ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, QkNorm, QueryGrowth, RoutingSpec
from tokenmill.arch.tensors import GGUF_LLAMA, GGUF_ROUTED, HF_LLAMA, Rule, interleaved_pairs

UNNORMED_EXPERTS = 128  # number of experts of Maverick, which has no QK norm; GGUF files don't say so


def _chunks(fields: ConfigFields, num_layers: int) -> Windows:
    chunk = fields.integer_or_none("attention_chunk_size")
    return tuple(chunk if has_rope(fields, layer) else None for layer in range(num_layers))


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    if has_rope(fields, layer):
        norm: QkNorm | None = "l2_after_rope" if fields.flag("use_qk_norm") else None
        return replace(attention, qk_norm=norm, is_chunked=attention.window is not None)
    growth = None
    if fields.flag("attn_temperature_tuning"):
        growth = QueryGrowth(fields.positive("attn_scale"), fields.integer("floor_scale"), first=1)
    return replace(attention, rope=None, query_growth=growth)


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    listed, step = fields.integers("moe_layers"), fields.integer("interleave_moe_layer_step")
    if layer not in listed if fields.has("moe_layers") else (layer + 1) % step:
        return None
    inner = MlpSpec(fields.integer("intermediate_size"))
    routing = RoutingSpec(score="sigmoid", renormalize=False, weights_input=True)
    active = fields.integer("num_experts_per_tok")
    return MoeSpec(fields.integer("num_local_experts"), active, inner, routing, shared=inner)


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.mlp, MlpSpec):
        return layer
    return replace(layer, mlp=replace(layer.mlp, intermediate_size=fields.integer("intermediate_size_mlp")))


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return Llama 3's scaling as a factor per frequency. Chunks, query scaling and layers without rotation keep the
    defaults of the published models, because files do not contain them."""
    if fields.get("attention.sliding_window") == 0:
        fields.refuse("attention without chunks is not implemented for this architecture")
    found: dict[str, Any] = {"use_qk_norm": fields.integer("expert_count") != UNNORMED_EXPERTS}
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.type != "F32" or len(factors.shape) != 1:
            fields.refuse(f"tensor 'rope_freqs.weight' is {factors.type} {list(factors.shape)}, expected F32")
        found["rope_scaling"] = {"rope_type": "factors", "factors": read_floats(factors)}
    return found


LLAMA4_KEYS = ConfigKeys(
    {
        "intermediate_size": "expert_feed_forward_length",
        "intermediate_size_mlp": "feed_forward_length",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    gating=SIGMOID,
    more=_further_config,
    without=("sliding_window",),
    reads_factors=True,
)

LLAMA4 = Family(
    name="llama4",
    model_types=("llama4_text", "llama4"),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules={
        **interleaved_pairs(HF_LLAMA),
        "layers.{i}.router.weight": Rule("model.layers.{i}.feed_forward.router.weight"),
        **{
            f"layers.{{i}}.experts.{part}.weight": Rule(
                "model.layers.{i}.feed_forward.experts.gate_up_proj", fused=("gate", "up"), transposed=True
            )
            for part in ("gate", "up")
        },
        "layers.{i}.experts.down.weight": Rule("model.layers.{i}.feed_forward.experts.down_proj", transposed=True),
        **{
            f"layers.{{i}}.{ours}{part}.weight": Rule(f"model.layers.{{i}}.feed_forward.{theirs}{part}_proj.weight")
            for ours, theirs in (("", ""), ("shared.", "shared_expert."))
            for part in ("gate", "up", "down")
        },
    },
    gguf=GGUFTraits("llama4", {**GGUF_LLAMA, **GGUF_ROUTED}, config_keys=LLAMA4_KEYS),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    windows=_chunks,
    experts=_experts,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)
