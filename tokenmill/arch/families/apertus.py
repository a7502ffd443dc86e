"""Apertus: Llama with norms on each head of q and k, and an MLP without a gate whose activation, xIELU, has learned
numbers in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile, read_floats
from tokenmill.arch.tensors import GGUF, HF_LLAMA, HF_QK_NORM, Rule

_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    has_rope = config.get("rope_parameters") or config.get("rope_scaling")
    return config if has_rope else {**config, "rope_scaling": _ROPE}


def _more(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the rope factors, which are a tensor; without it, positions are not scaled."""
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is None:
        return {"rope_scaling": {"type": "default"}}
    return {"rope_scaling": {"type": "factors", "factors": list(read_floats(factors))}}


APERTUS = replace(
    LLAMA,
    name="apertus",
    model_types=("apertus",),
    defaults={
        **LLAMA.defaults,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12_000_000.0,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_QK_NORM,
        "layers.{i}.attn_norm.weight": Rule("model.layers.{i}.attention_layernorm.weight"),
        "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.feedforward_layernorm.weight"),
        **{
            f"layers.{{i}}.act_{number}": Rule(
                f"model.layers.{{i}}.mlp.act_fn.{number}", unit_axis=0 if number.startswith("alpha") else None
            )
            for number in _NUMBERS
        },
    },
    gguf=GGUFTraits(
        "apertus",
        {**GGUF, **{f"layers.{{i}}.act_{number}": Rule(f"xielu.{number}[{{i}}]") for number in _NUMBERS}},
        config_keys=ConfigKeys(tensors={"attention_bias": "blk.0.attn_q.bias"}, more=_more, reads_factors=True),
    ),
    mlp_bias=False,
    is_gated_mlp=False,
    qk_norm="head",
    common_keys=_common_keys,
)
