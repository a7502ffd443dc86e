"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B): the dense models with routed experts and a gated shared
expert."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen2_moe import GGUF_SHARED, SHARED_KEYS, shared_experts
from tokenmill.arch.families.qwen3_5 import GGUF_SPLIT, HF_SPLIT, QWEN3_5, SPLIT_KEYS
from tokenmill.arch.families.qwen3_moe import HF_ROUTED
from tokenmill.arch.families.qwen3_next import HF_GATED, HF_SHARED
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.tensors import GGUF_FUSED_EXPERTS, Rule

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    defaults={
        **QWEN3_5.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    hf_rules={**HF_GATED, **HF_SPLIT, **HF_ROUTED, **HF_SHARED},
    gguf=GGUFTraits(
        "qwen35moe",
        {**GGUF_SHARED, **GGUF_SPLIT},
        config_keys=replace(SPLIT_KEYS, keys={**SPLIT_KEYS.keys, **SHARED_KEYS}),
        variant=GGUF_FUSED_EXPERTS,
    ),
    # Published files have one tensor for all experts of a layer.
    hf_variant={
        "layers.{i}.experts.gate.weight": Rule("model.layers.{i}.mlp.experts.gate_up_proj", ("gate", "up")),
        "layers.{i}.experts.up.weight": Rule("model.layers.{i}.mlp.experts.gate_up_proj", ("gate", "up")),
        "layers.{i}.experts.down.weight": Rule("model.layers.{i}.mlp.experts.down_proj"),
    },
    experts=shared_experts,
)
