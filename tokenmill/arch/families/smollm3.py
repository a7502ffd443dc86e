"""SmolLM3: Llama without rotation in every fourth layer (`no_rope_layers`: 0 for a layer without)."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import Family, GGUFTraits, named_layers
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa
from tokenmill.arch.tensors import GGUF_LLAMA, HF_LLAMA


def has_rope(fields: ConfigFields, layer: int) -> bool:
    """Return whether a layer rotates: from `no_rope_layers`, else all but every n-th layer do."""
    listed = fields.integers("no_rope_layers")
    if listed:
        if layer >= len(listed):
            fields.refuse(f"no_rope_layers has {len(listed)} entries, too few for layer {layer}")
        return listed[layer] != 0
    return (layer + 1) % fields.integer("no_rope_layer_interval") != 0


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return attention if has_rope(fields, layer) else replace(attention, rope=None)


SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    hf_rules=HF_LLAMA,
    gguf=GGUFTraits("smollm3", GGUF_LLAMA, config_keys=ConfigKeys(tensors={"attention_bias": "blk.0.attn_q.bias"})),
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    windows=named_layers,
    adjust_attention=_adjust_attention,
    refused_flags=("use_sliding_window",),
)
