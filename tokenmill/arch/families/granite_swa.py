"""Granite with windows: Granite's multipliers, a learned sink in every head's softmax, windows in three of four layers,
and a rotation base for each layer (zero: no rotation); dense, or with Granite's experts."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.granite import GRANITE, adjust_attention
from tokenmill.arch.families.granitemoe import GATE_UP, GRANITE_MOE, PLACE
from tokenmill.arch.family import all_but_first
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa
from tokenmill.arch.tensors import HF_LLAMA, Rule, Rules


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    attention = replace(adjust_attention(fields, layer, attention), has_sinks=True)
    if not fields.has("layer_rope_theta") or attention.rope is None:
        return attention
    base = fields.numbers("layer_rope_theta", fields.integer("num_hidden_layers"))[layer]
    if base and base <= 1.0:
        fields.refuse(f"layer_rope_theta is {base:g} for layer {layer}, expected a number above 1, or 0")
    return replace(attention, rope=replace(attention.rope, theta=base) if base else None)


_SINKS: Rules = {"layers.{i}.sinks": Rule("model.layers.{i}.self_attn.sinks")}

GRANITE_SWA = replace(
    GRANITE,
    name="granite_swa",
    model_types=("granite_swa",),
    defaults={
        **GRANITE.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "sliding_window_pattern": 4,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
    },
    hf_rules={**HF_LLAMA, **_SINKS},
    gguf=None,
    windows=all_but_first,
    adjust_attention=_adjust_attention,
)

GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    name="granitemoe_swa",
    model_types=("granitemoe_swa",),
    defaults={**GRANITE_MOE.defaults, "sliding_window": 128, "sliding_window_pattern": 4},
    hf_rules={
        **GRANITE_MOE.hf_rules,
        **_SINKS,
        "layers.{i}.router.weight": Rule(f"{PLACE}.block_sparse_moe.router.weight"),
        **{
            f"layers.{{i}}.experts.{part}.weight": Rule(f"{PLACE}.block_sparse_moe.experts.gate_up_proj", GATE_UP)
            for part in GATE_UP
        },
        "layers.{i}.experts.down.weight": Rule(f"{PLACE}.block_sparse_moe.experts.down_proj"),
    },
    gguf=None,
    windows=all_but_first,
    adjust_attention=_adjust_attention,
)
