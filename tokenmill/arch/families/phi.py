"""Phi-1, 1.5 and 2: attention and MLP read the same LayerNorm, biases everywhere (the head has one too), rotation of a
part of each head."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.gpt_neox import fused_qkv
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import ModelSpec, NormSpec
from tokenmill.arch.tensors import GGUF, HF_LLAMA, Rule, with_norm_biases


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, has_head_bias=True)


PHI = Family(
    name="phi",
    model_types=("phi",),
    defaults={
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_rules={
        **with_norm_biases({**HF_LLAMA, "final_norm.weight": Rule("model.final_layernorm.weight")}),
        **{f"layers.{{i}}.o.{kind}": Rule(f"model.layers.{{i}}.self_attn.dense.{kind}") for kind in ("weight", "bias")},
        **{
            f"layers.{{i}}.{ours}.{kind}": Rule(f"model.layers.{{i}}.mlp.{theirs}.{kind}")
            for ours, theirs in (("up", "fc1"), ("down", "fc2"))
            for kind in ("weight", "bias")
        },
        "head.bias": Rule("lm_head.bias"),
    },
    gguf=GGUFTraits(
        "phi2",
        {**with_norm_biases(GGUF), "head.bias": Rule("output.bias")},
        config_keys=ConfigKeys({"layer_norm_eps": "attention.layer_norm_epsilon"}),
        variant=fused_qkv("blk.{i}.attn_qkv"),  # of checkpoints that came with their own code
    ),
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    is_gated_mlp=False,
    norm=NormSpec("layer", has_bias=True),
    norm_eps_key="layer_norm_eps",
    is_parallel=True,
    has_partial_rotary=True,
    adjust_model=_adjust_model,
    refused_flags=("qk_layernorm",),
)
