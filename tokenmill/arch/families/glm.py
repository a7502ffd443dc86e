"""GLM-4-9B, GLM-Edge, GLM-4-0414 and GLM-Z1: Llama with biases on q, k and v, and rotation of neighbouring pairs in a
part of each head; the last two have norms before and after attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.tensors import GGUF, HF_LLAMA, Rule, Rules, interleaved_pairs


def _fused_mlp(theirs: str) -> Rules:
    return {f"layers.{{i}}.{part}.weight": Rule(theirs, ("gate", "up")) for part in ("gate", "up")}


HF_GLM: Rules = {**interleaved_pairs(HF_LLAMA), **_fused_mlp("model.layers.{i}.mlp.gate_up_proj.weight")}
GGUF_GLM: Rules = {**interleaved_pairs(GGUF), **_fused_mlp("blk.{i}.ffn_up.weight")}
# Files of checkpoints that came with their own code have q, k and v in one tensor.
GGUF_FUSED: Rules = {
    f"layers.{{i}}.{part}.{kind}": Rule(f"blk.{{i}}.attn_qkv.{kind}", ("q", "k", "v"), interleaved=part != "v")
    for part in ("q", "k", "v")
    for kind in ("weight", "bias")
}


def _more(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return what the metadata lacks: whether there are biases, and a head's size."""
    size = fields.integer_or_none("attention.key_length")
    return {
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors or "blk.0.attn_qkv.bias" in gguf.tensors,
        "head_dim": size or fields.integer("embedding_length") // fields.integer("attention.head_count"),
    }


GLM = Family(
    name="glm",
    model_types=("glm",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    hf_rules=HF_GLM,
    gguf=GGUFTraits("chatglm", GGUF_GLM, config_keys=ConfigKeys(more=_more), variant=GGUF_FUSED),
    qkv_bias="attention_bias",
    has_partial_rotary=True,
)

GLM4 = replace(
    GLM,
    name="glm4",
    model_types=("glm4",),
    hf_rules={
        **HF_GLM,
        "layers.{i}.attn_post_norm.weight": Rule("model.layers.{i}.post_self_attn_layernorm.weight"),
        "layers.{i}.mlp_post_norm.weight": Rule("model.layers.{i}.post_mlp_layernorm.weight"),
    },
    gguf=GGUFTraits("glm4", GGUF_GLM, config_keys=ConfigKeys(more=_more), variant=GGUF_FUSED),
    norms="both",
)
