"""Jamba: Mamba-1 in most layers, attention without rotation in some, routed experts instead of the MLP in every second
layer.

Steps, keys and queries of the recurrence are normed. The weights of a token's experts are not divided by their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import Family, GGUFTraits, refuse_others
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.recurrent import InnerProjection, Recurrent
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, GGUF_MAMBA1, HF_LLAMA, Rule, Rules

LAYER = "model.layers.{i}"
PARTS = ("ssm_v", "ssm_z")
OWN_NAMES = {
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}


def hf_mamba1(place: str) -> Rules:
    """Return the rules of Mamba-1's tensors, whose names begin with `place`."""
    return {
        **{f"layers.{{i}}.{part}.{kind}": Rule(f"{place}.in_proj.{kind}", PARTS)
           for part in PARTS for kind in ("weight", "bias")},
        "layers.{i}.ssm_conv_v.weight": Rule(f"{place}.conv1d.weight", unit_axis=1),
        "layers.{i}.ssm_conv_v.bias": Rule(f"{place}.conv1d.bias"),
        "layers.{i}.ssm_inner.weight": Rule(f"{place}.x_proj.weight"),
        "layers.{i}.ssm_step.weight": Rule(f"{place}.dt_proj.weight"),
        "layers.{i}.ssm_dt_bias": Rule(f"{place}.dt_proj.bias"),
        "layers.{i}.ssm_a_log": Rule(f"{place}.A_log"),
        "layers.{i}.ssm_d": Rule(f"{place}.D"),
        **{f"layers.{{i}}.ssm_{ours}_norm.weight": Rule(f"{place}.{theirs}_layernorm.weight")
           for ours, theirs in (("step", "dt"), ("k", "b"), ("q", "c"))},
        **{f"layers.{{i}}.ssm_out.{kind}": Rule(f"{place}.out_proj.{kind}") for kind in ("weight", "bias")},
    }  # fmt: skip


def mamba1(
    fields: ConfigFields, width: int, inner: InnerProjection, names: Mapping[str, str] = MappingProxyType({})
) -> Recurrent:
    """Return the recurrent mixer that the `mamba_*` keys describe; `names`: what they are called in this config."""

    def named(key: str) -> str:
        return names.get(key, key)

    return Recurrent(
        "scan",
        key_heads=1,
        value_heads=1,
        key_dim=fields.integer(named("mamba_d_state")),
        value_dim=width,
        kernel=fields.integer(named("mamba_d_conv"), minimum=2),
        norm=None,
        conv_bias=fields.flag(named("mamba_conv_bias")),
        bias=fields.flag(named("mamba_proj_bias")),
        inner=inner,
    )


def step_rank(fields: ConfigFields, key: str) -> int:
    """Return the rank of the steps; "auto" is a sixteenth of the hidden size, rounded up."""
    return -(-fields.integer("hidden_size") // 16) if fields.get(key) == "auto" else fields.integer(key)


def _recurs(fields: ConfigFields, layer_index: int) -> bool:
    kinds = fields.strings("layer_types", fields.integer("num_hidden_layers"))
    if kinds is not None:
        refuse_others(fields, kinds, "linear_attention", "full_attention")
        return kinds[layer_index] == "linear_attention"
    return layer_index % fields.integer("attn_layer_period") != fields.integer("attn_layer_offset", minimum=0)


def _experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    count, listed = fields.integer("num_experts"), fields.get("_expert_layers")
    if listed is not None:
        is_routed = layer_index in listed
    else:
        offset = fields.integer("expert_layer_offset", minimum=0)
        is_routed = layer_index % fields.integer("expert_layer_period") == offset
    if count == 1 or not is_routed:
        return None
    expert = MlpSpec(fields.integer("intermediate_size"))
    return MoeSpec(count, fields.integer("num_experts_per_tok"), expert, RoutingSpec(renormalize=False))


def _attention(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    return replace(attention, rope=None)


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    if not _recurs(fields, layer_index):
        return layer
    width = fields.integer("mamba_expand") * fields.integer("hidden_size")
    inner = InnerProjection(step_rank(fields, "mamba_dt_rank"), "weighted")
    return replace(layer, mixer=mamba1(fields, width, inner))


def _layers_of_file(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return which layers have experts, by their tensors, and the expansion of the recurrence."""
    names = (name.split(".") for name in gguf.tensors if name.endswith(".ffn_gate_inp.weight"))
    inner, hidden = fields.integer("ssm.inner_size"), fields.integer("embedding_length")
    if inner % hidden:
        fields.refuse(f"{inner} channels are not a multiple of the hidden size {hidden}")
    return {"_expert_layers": [int(parts[1]) for parts in names], "mamba_expand": inner // hidden}


JAMBA = Family(
    name="jamba",
    model_types=("jamba",),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 65536,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    hf_rules={
        **HF_LLAMA,
        **hf_mamba1(f"{LAYER}.mamba"),
        "layers.{i}.mlp_norm.weight": Rule(f"{LAYER}.pre_ff_layernorm.weight"),
        **{f"layers.{{i}}.{part}.weight": Rule(f"{LAYER}.feed_forward.{part}_proj.weight")
           for part in ("gate", "up", "down")},
        **{f"layers.{{i}}.experts.{part}.weight": Rule(f"{LAYER}.feed_forward.experts.{{e}}.{part}_proj.weight")
           for part in ("gate", "up", "down")},
        "layers.{i}.router.weight": Rule(f"{LAYER}.feed_forward.router.weight"),
        "final_norm.weight": Rule("model.final_layernorm.weight"),
    },
    gguf=GGUFTraits(
        "jamba",
        {**GGUF, **GGUF_MAMBA1},
        config_keys=ConfigKeys(
            {
                **EXPERT_KEYS,
                "num_experts": "expert_count",
                "mamba_d_conv": "ssm.conv_kernel",
                "mamba_d_state": "ssm.state_size",
                "mamba_dt_rank": "ssm.time_step_rank",
            },
            {"mamba_conv_bias": "blk.0.ssm_conv1d.bias"},
            more=_layers_of_file,
            other_kind="linear_attention",
        ),
    ),
    experts=_experts,
    adjust_attention=_attention,
    adjust_layer=_layer,
    refused_flags=("attention_bias", "mlp_bias", "sliding_window"),
)  # fmt: skip
