"""Mamba-1, Falcon Mamba and Mamba-2: recurrent layers without attention or MLPs.

Nothing limits the length of their contexts. Falcon Mamba norms steps, keys and queries, without weights. Mamba-2 norms
each group of its output (transformers 5.22 norms all groups together, unlike the original code and llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.bamba import MAMBA_KEYS, hf_mamba, step_limits
from tokenmill.arch.families.jamba import OWN_NAMES, hf_mamba1, mamba1, step_rank
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.recurrent import InnerProjection, OutputNorm, Recurrent
from tokenmill.arch.spec import LayerSpec
from tokenmill.arch.tensors import GGUF, GGUF_MAMBA, GGUF_MAMBA1, Rule, Rules

PLACE = "backbone.layers.{i}"
UNUSED = {"num_attention_heads": 1, "intermediate_size": 1, "rope_theta": 10000.0}  # which other families must have
MAX_CONTEXT = 2**20  # as in GGUF files
FALCON_EPS = 1e-6  # of the inner norms


def _only(mixer: Callable[[ConfigFields], Recurrent]) -> Callable[[ConfigFields, int, LayerSpec], LayerSpec]:
    def layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixer=mixer(fields), mlp=None)

    return layer


def _width(fields: ConfigFields) -> int:
    """Return the number of channels; the defaults have no intermediate size of their own."""
    if fields.has("intermediate_size"):
        return fields.integer("intermediate_size")
    return fields.integer("expand") * fields.integer("hidden_size")


def _mamba1(fields: ConfigFields) -> Recurrent:
    return mamba1(fields, _width(fields), InnerProjection(step_rank(fields, "time_step_rank")), OWN_NAMES)


def _falcon(fields: ConfigFields) -> Recurrent:
    inner = InnerProjection(step_rank(fields, "time_step_rank"), "plain", fields.positive("mixer_rms_eps"))
    return mamba1(fields, _width(fields), inner, OWN_NAMES)


def _mamba2(fields: ConfigFields) -> Recurrent:
    heads, groups, head_dim = (fields.integer(key) for key in ("num_heads", "n_groups", "head_dim"))
    if heads * head_dim != fields.integer("expand") * fields.integer("hidden_size") or heads % groups:
        fields.refuse(f"{heads} heads of {head_dim} in {groups} groups do not fit the hidden size")
    return Recurrent(
        "ssd",
        groups,
        heads,
        fields.integer("state_size"),
        head_dim,
        fields.integer("conv_kernel", minimum=2),
        OutputNorm(groups, is_shared=False, gates_first=True),
        conv_bias=fields.flag("use_conv_bias"),
        bias=fields.flag("use_bias"),
        step_limits=step_limits(fields),
    )


def _sizes(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the sizes that GGUF metadata gives only indirectly; attention's, which are zeros there, are left out."""
    inner, heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    hidden = fields.integer("embedding_length")
    if inner % hidden:
        fields.refuse(f"{inner} channels are not a multiple of the hidden size {hidden}")
    return {"head_dim": inner // heads, "intermediate_size": inner, "expand": inner // hidden}


def _hf_rules(mixer: Rules) -> Rules:
    return {
        "embed.weight": Rule("backbone.embeddings.weight"),
        "layers.{i}.attn_norm.weight": Rule(f"{PLACE}.norm.weight"),
        **mixer,
        "final_norm.weight": Rule("backbone.norm_f.weight"),
        "head.weight": Rule("lm_head.weight"),
    }


SIZES = {"state_size": "ssm.state_size", "conv_kernel": "ssm.conv_kernel"}
NOT_USED = ("num_attention_heads", "num_key_value_heads")
BIASES = {"use_conv_bias": "blk.0.ssm_conv1d.bias"}
_DEFAULTS: dict[str, Any] = {
    **UNUSED,
    "hidden_act": "silu",
    "vocab_size": 50280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "max_position_embeddings": MAX_CONTEXT,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
}

MAMBA = Family(
    name="mamba",
    model_types=("mamba",),
    defaults=_DEFAULTS,
    hf_rules=_hf_rules(hf_mamba1(f"{PLACE}.mixer")),
    gguf=GGUFTraits(
        "mamba",
        {**GGUF, **GGUF_MAMBA1},
        config_keys=ConfigKeys(
            {**SIZES, "time_step_rank": "ssm.time_step_rank", "layer_norm_epsilon": "attention.layer_norm_rms_epsilon"},
            BIASES,
            more=_sizes,
            without=(*NOT_USED, "head_dim"),
        ),
        other_with=("ssm.dt_b_c_rms", "falcon_mamba"),
    ),
    norm_eps_key="layer_norm_epsilon",
    adjust_layer=_only(_mamba1),
)

FALCON_MAMBA = replace(
    MAMBA,
    name="falcon_mamba",
    model_types=("falcon_mamba",),
    defaults={**_DEFAULTS, "mixer_rms_eps": FALCON_EPS},
    adjust_layer=_only(_falcon),
)

MAMBA2 = replace(
    MAMBA,
    name="mamba2",
    model_types=("mamba2",),
    defaults={
        **_DEFAULTS,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "state_size": 128,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
    },
    hf_rules=_hf_rules(hf_mamba(f"{PLACE}.mixer")),
    gguf=GGUFTraits(
        "mamba2",
        {**GGUF, **GGUF_MAMBA},
        config_keys=ConfigKeys(
            {**SIZES, "n_groups": MAMBA_KEYS["mamba_n_groups"], "num_heads": MAMBA_KEYS["mamba_n_heads"],
             "layer_norm_epsilon": "attention.layer_norm_rms_epsilon"},
            BIASES,
            more=_sizes,
            without=(*NOT_USED, "intermediate_size"),
        ),
    ),
    adjust_layer=_only(_mamba2),
)  # fmt: skip
