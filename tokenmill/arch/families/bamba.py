"""Bamba: Mamba-2 in most layers, attention in some, each followed by an MLP.

`attn_layer_indices` or `layers_block_type` list the attention layers. Mamba-2's gate, x, B, C and dt come from one
matrix; here they are called z, v, k, q and a, as in other recurrent layers.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import LayerSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule, Rules

KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}  # True: recurrent
INPUTS = ("ssm_z", "ssm_v", "ssm_k", "ssm_q", "ssm_a")
CONVOLVED = ("ssm_conv_v", "ssm_conv_k", "ssm_conv_q")


def hf_mamba(place: str) -> Rules:
    """Return the rules of Mamba-2's tensors, whose names begin with `place`."""
    return {
        **{f"layers.{{i}}.{part}.{kind}": Rule(f"{place}.in_proj.{kind}", INPUTS)
           for part in INPUTS for kind in ("weight", "bias")},
        **{f"layers.{{i}}.{part}.weight": Rule(f"{place}.conv1d.weight", CONVOLVED, unit_axis=1) for part in CONVOLVED},
        **{f"layers.{{i}}.{part}.bias": Rule(f"{place}.conv1d.bias", CONVOLVED) for part in CONVOLVED},
        "layers.{i}.ssm_a_log": Rule(f"{place}.A_log"),
        "layers.{i}.ssm_dt_bias": Rule(f"{place}.dt_bias"),
        "layers.{i}.ssm_d": Rule(f"{place}.D"),
        "layers.{i}.ssm_norm.weight": Rule(f"{place}.norm.weight"),
        **{f"layers.{{i}}.ssm_out.{kind}": Rule(f"{place}.out_proj.{kind}") for kind in ("weight", "bias")},
    }  # fmt: skip


def mamba2(fields: ConfigFields) -> Recurrent:
    """Return the recurrent mixer that the `mamba_*` keys describe."""
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    width = fields.get("mamba_d_ssm") or fields.integer("mamba_expand") * fields.integer("hidden_size")
    head_dim = width // heads if fields.get("mamba_d_head") == "auto" else fields.integer("mamba_d_head")
    if heads * head_dim != width or heads % groups:
        fields.refuse(f"{heads} heads of {head_dim} in {groups} groups do not make {width} channels of Mamba-2")
    return Recurrent(
        "ssd",
        groups,
        heads,
        fields.integer("mamba_d_state"),
        head_dim,
        fields.integer("mamba_d_conv", minimum=2),
        OutputNorm(1, is_shared=False, gates_first=True),
        conv_bias=fields.flag("mamba_conv_bias"),
        bias=fields.flag("mamba_proj_bias"),
        step_limits=step_limits(fields),
    )


def step_limits(fields: ConfigFields) -> tuple[float, float] | None:
    """Return `time_step_limit`, in which infinity may be written as an object; None: no limits."""
    value = fields.get("time_step_limit")
    limits = [inf if one == {"__float__": "Infinity"} else one for one in value or (0.0, inf)]
    if len(limits) != 2 or not all(isinstance(one, int | float) for one in limits):
        fields.refuse(f"time_step_limit is {value!r}, expected two numbers")
    low, high = (float(one) for one in limits)
    return None if low == 0.0 and high > 1e38 else (low, high)  # softplus is never negative, float32 never larger


def is_recurrent(fields: ConfigFields, layer_index: int, key: str) -> bool:
    """Return whether the list of layer types under `key` declares a layer as recurrent."""
    kinds = fields.strings(key, fields.integer("num_hidden_layers"))
    if kinds is None:
        return False
    for kind in sorted(set(kinds) - set(KINDS)):
        fields.refuse(f"layer type {kind!r} is not implemented")
    return KINDS[kinds[layer_index]]


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    if fields.has("layers_block_type"):
        recurs = is_recurrent(fields, layer_index, "layers_block_type")
    else:
        recurs = layer_index not in fields.integers("attn_layer_indices")
    return replace(layer, mixer=mamba2(fields)) if recurs else layer


MAMBA_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_ssm": "ssm.inner_size",
}


def mamba_sizes(fields: ConfigFields, gguf: GGUFFile) -> dict[str, int]:
    """Return the head size of Mamba-2, which GGUF metadata gives only indirectly."""
    return {"mamba_d_head": fields.integer("ssm.inner_size") // fields.integer("ssm.time_step_rank")}


MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}

BAMBA = Family(
    name="bamba",
    model_types=("bamba",),
    defaults={
        **LLAMA.defaults,
        **MAMBA_DEFAULTS,
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
    },
    hf_rules={
        **HF_LLAMA,
        **hf_mamba("model.layers.{i}.mamba"),
        "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.pre_ff_layernorm.weight"),
        **{
            f"layers.{{i}}.{part}.{kind}": Rule(f"model.layers.{{i}}.feed_forward.{part}_proj.{kind}")
            for part in ("gate", "up", "down")
            for kind in ("weight", "bias")
        },
        "final_norm.weight": Rule("model.final_layernorm.weight"),
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    has_partial_rotary=True,
    adjust_layer=_layer,
)
