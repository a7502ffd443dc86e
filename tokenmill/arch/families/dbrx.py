"""DBRX: LayerNorm without biases; queries, keys and values from one matrix, limited to ± `clip_qkv`; routed experts,
whose matrices are stored one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.spec import Gqa, MlpSpec, MoeSpec, NormSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, Rule, Rules

_OWN_KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
_ATTENTION_KEYS = {"num_key_value_heads": "kv_n_heads", "clip_qkv": "clip_qkv", "rope_theta": "rope_theta"}
_EXPERT_KEYS = {
    "intermediate_size": "ffn_hidden_size",
    "num_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "norm_topk_prob": "moe_normalize_expert_weights",
}


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the keys, those of the sections for attention and experts too."""
    fields = ConfigFields(config, "dbrx")
    found: dict[str, Any] = {}
    for section, names in (
        (config, _OWN_KEYS),
        (fields.section("attn_config") or {}, _ATTENTION_KEYS),
        (fields.section("ffn_config") or {}, _EXPERT_KEYS),
    ):
        found |= {ours: section[theirs] for ours, theirs in names.items() if theirs in section}
    activation = (fields.section("ffn_config") or {}).get("ffn_act_fn")
    if isinstance(activation, dict) and "name" in activation:
        found["hidden_act"] = activation["name"]
    return {**config, **found}


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, qkv_clip=fields.positive_or_none("clip_qkv"))


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    order = fields.get("norm_topk_prob")  # of the norm that weights are divided by
    if order not in (None, 1):
        fields.refuse(f"moe_normalize_expert_weights {order!r} is not implemented")
    return MoeSpec(
        num_experts=fields.integer("num_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size")),
        routing=RoutingSpec(renormalize=order is not None),
    )


_BLOCK = "transformer.blocks.{i}."
_QKV = ("q", "k", "v")
HF_DBRX: Rules = {
    "embed.weight": Rule("transformer.wte.weight"),
    "layers.{i}.attn_norm.weight": Rule(f"{_BLOCK}norm_attn_norm.norm_1.weight"),
    **{f"layers.{{i}}.{part}.weight": Rule(f"{_BLOCK}norm_attn_norm.attn.Wqkv.weight", _QKV) for part in _QKV},
    "layers.{i}.o.weight": Rule(f"{_BLOCK}norm_attn_norm.attn.out_proj.weight"),
    "layers.{i}.mlp_norm.weight": Rule(f"{_BLOCK}norm_attn_norm.norm_2.weight"),
    "layers.{i}.router.weight": Rule(f"{_BLOCK}ffn.router.layer.weight"),
    "layers.{i}.experts.gate.weight": Rule(f"{_BLOCK}ffn.experts.mlp.w1", is_joined=True),
    "layers.{i}.experts.up.weight": Rule(f"{_BLOCK}ffn.experts.mlp.v1", is_joined=True),
    "layers.{i}.experts.down.weight": Rule(f"{_BLOCK}ffn.experts.mlp.w2", transposed=True, is_joined=True),
    "final_norm.weight": Rule("transformer.norm_f.weight"),
    "head.weight": Rule("lm_head.weight"),
}

DBRX = Family(
    name="dbrx",
    model_types=("dbrx",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "intermediate_size": 3584,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "norm_topk_prob": 1,
    },
    hf_rules=HF_DBRX,
    gguf=GGUFTraits(
        "dbrx",
        {
            **GGUF,
            **{f"layers.{{i}}.{part}.weight": Rule("blk.{i}.attn_qkv.weight", _QKV) for part in _QKV},
            "layers.{i}.mlp_norm.weight": Rule("blk.{i}.attn_output_norm.weight"),
        },
        config_keys=ConfigKeys(
            {
                "layer_norm_eps": "attention.layer_norm_epsilon",
                "clip_qkv": "attention.clamp_kqv",
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
            },
            gating=SOFTMAX,
        ),
    ),
    norm=NormSpec("layer"),
    norm_eps_key="layer_norm_eps",
    experts=_experts,
    adjust_attention=_adjust_attention,
    common_keys=_common_keys,
)
