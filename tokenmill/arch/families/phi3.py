"""Phi-3, Phi-3.5, Phi-4-mini, and the text parts of Phi-3.5-vision and Phi-4-multimodal: q, k, v in one tensor, gate
and up in another; rope over part of a head, scaled by a factor per frequency (longrope)."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.family import Family, GGUFTraits, every_layer
from tokenmill.arch.tensors import GGUF, HF_LLAMA, Rule, Rules

ADAPTED = "model.layers.{i}."


def _fused(qkv: str, gate_up: str) -> Rules:
    return {
        **{f"layers.{{i}}.{part}.weight": Rule(qkv, fused=("q", "k", "v")) for part in ("q", "k", "v")},
        **{f"layers.{{i}}.{part}.weight": Rule(gate_up, fused=("gate", "up")) for part in ("gate", "up")},
    }


PHI3 = Family(
    name="phi3",
    model_types=("phi3", "phi3_v"),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    hf_rules={
        **HF_LLAMA,
        **_fused("model.layers.{i}.self_attn.qkv_proj.weight", "model.layers.{i}.mlp.gate_up_proj.weight"),
    },
    gguf=GGUFTraits("phi3", {**GGUF, **_fused("blk.{i}.attn_qkv.weight", "blk.{i}.ffn_up.weight")}, window_pattern=1),
    has_partial_rotary=True,
    windows=every_layer,
    refused_flags=("attention_bias", "mlp_bias", "lm_head_bias"),
    ignored_prefixes=("model.vision_embed_tokens.",),
)

PHI4_MULTIMODAL = replace(
    PHI3,
    name="phi4_multimodal",
    model_types=("phi4_multimodal", "phi4mm"),
    defaults={
        **PHI3.defaults,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "bos_token_id": 199999,
        "eos_token_id": [199999, 200020],
    },
    gguf=None,
    # The files as first published contain the adapters of images and audio, which text does not use.
    hf_variant={
        **_fused(ADAPTED + "self_attn.qkv_proj.base_layer.weight", ADAPTED + "mlp.gate_up_proj.base_layer.weight"),
        "layers.{i}.o.weight": Rule(ADAPTED + "self_attn.o_proj.base_layer.weight"),
        "layers.{i}.down.weight": Rule(ADAPTED + "mlp.down_proj.base_layer.weight"),
    },
    ignored_prefixes=("model.embed_tokens_extend.",),
    ignored_suffixes=tuple(f".lora_{part}.{kind}.weight" for part in ("A", "B") for kind in ("vision", "speech")),
)
