"""Qwen3.5, 3.6 and 3.8, dense: Qwen3-Next's layers with an MLP each; the vision part is ignored.

With text positions, all sections of the rotation rotate alike.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen3_next import DELTA_KEYS, GGUF_DELTA, HF_GATED, QWEN3_NEXT, TILED
from tokenmill.arch.family import GGUFTraits, no_experts
from tokenmill.arch.tensors import Rule, Rules

HF_SPLIT: Rules = {
    **{
        f"layers.{{i}}.{part}.weight": Rule(
            "model.layers.{i}.linear_attn.in_proj_qkv.weight", ("ssm_q", "ssm_k", "ssm_v")
        )
        for part in ("ssm_q", "ssm_k", "ssm_v")
    },
    **{
        f"layers.{{i}}.ssm_{part}.weight": Rule(f"model.layers.{{i}}.linear_attn.in_proj_{part}.weight")
        for part in ("z", "b", "a")
    },
}

GGUF_SPLIT: Rules = {
    **GGUF_DELTA,
    "layers.{i}.ssm_b.weight": Rule("blk.{i}.ssm_beta.weight"),
    "layers.{i}.ssm_a.weight": Rule("blk.{i}.ssm_alpha.weight"),
}
SPLIT_KEYS = replace(DELTA_KEYS, defaults={TILED: True})

QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    defaults={
        **QWEN3_NEXT.defaults,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    hf_rules={**HF_GATED, **HF_SPLIT},
    gguf=GGUFTraits("qwen35", GGUF_SPLIT, config_keys=SPLIT_KEYS),
    has_rope_sections=True,
    experts=no_experts,
    hf_prefixes=("model.", "model.language_model."),
    ignored_prefixes=("mtp.", "model.visual."),
)
