"""Falcon-H1: attention and Mamba-2 in parallel in every layer, with a multiplier on nearly every branch.

The multipliers of the recurrence are fields of its mixer. Those of attention and the MLP are multiplied into the
matrices when they are read: the multiplier of an input into the input projections, that of the output into the output
projection.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.bamba import BAMBA, MAMBA_DEFAULTS, MAMBA_KEYS, hf_mamba, mamba2, mamba_sizes
from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.recurrent import OutputNorm, Recurrent
from tokenmill.arch.spec import LayerSpec, ModelSpec
from tokenmill.arch.tensors import GGUF, GGUF_MAMBA, Rule

MULTIPLIERS = {
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
    "ssm_out_multiplier": 1.0,
}


def _mamba(fields: ConfigFields) -> Recurrent:
    """Return the mixer with its multipliers, which are listed in the order z, v, k, q, a of the input projection."""
    mixer = mamba2(fields)
    scale = fields.number("ssm_in_multiplier")
    z, v, k, q, a = (scale * one for one in fields.numbers("ssm_multipliers", 5))
    norm = None
    if fields.flag("mamba_rms_norm"):
        norm = OutputNorm(mixer.key_heads, is_shared=False, gates_first=not fields.flag("mamba_norm_before_gate"))
    out = fields.number("ssm_out_multiplier")
    return replace(mixer, norm=norm, gate_scale=z, part_scales=(q, k, v), step_scale=a, out_scale=out)


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    inputs, out = fields.number("attention_in_multiplier"), fields.number("attention_out_multiplier")
    gate, down = fields.numbers("mlp_multipliers", 2)
    factors = {
        "q": inputs,
        "k": inputs * fields.number("key_multiplier"),
        "v": inputs,
        "o": out,
        "gate": gate,
        "down": down,
    }
    return replace(layer, side_mixer=_mamba(fields), factors=tuple(factors.items()))


def _model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    embedding, logits = fields.number("embedding_multiplier"), fields.number("lm_head_multiplier")
    return replace(model, embedding_scale=embedding, logit_scale=logits)


FALCON_H1 = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    defaults={
        **LLAMA.defaults,
        **MAMBA_DEFAULTS,
        **MULTIPLIERS,
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
    },
    hf_rules={**BAMBA.hf_rules, **hf_mamba("model.layers.{i}.mamba")},
    # In GGUF files all multipliers are already part of the matrices.
    gguf=GGUFTraits(
        "falcon-h1",
        {**GGUF, **GGUF_MAMBA, "layers.{i}.mlp_norm.weight": Rule("blk.{i}.ffn_norm")},  # the converter's name
        config_keys=ConfigKeys(
            MAMBA_KEYS,
            {"mamba_rms_norm": "blk.0.ssm_norm.weight", "mamba_conv_bias": "blk.0.ssm_conv1d.bias"},
            {"mamba_norm_before_gate": False},
            more=mamba_sizes,
        ),
        variant={"layers.{i}.mlp_norm.weight": Rule("blk.{i}.ffn_norm.weight")},
    ),
    adjust_layer=_layer,
    adjust_model=_model,
    refused_flags=("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"),
)
