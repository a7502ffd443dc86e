"""GPT-J and CodeGen: attention and MLP read the same LayerNorm, rotation of neighbouring pairs in a part of each head,
biases on MLP and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.gpt2 import GPT2, GPT_NAMES, LAYER, common_keys
from tokenmill.arch.families.gpt_neox import linear_names
from tokenmill.arch.family import same_attention
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import Rule, interleaved_pairs

_CODEGEN_BLOCKS = 4  # rows of q, v and k alternate in so many blocks, one for each device of its training


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = dict(common_keys(config))
    fields = ConfigFields(found, "gptj", {"rotary_dim": 64})
    rotary = fields.integer_or_none("rotary_dim")
    if rotary is not None:
        found["partial_rotary_factor"] = rotary * fields.integer("num_attention_heads") / fields.integer("hidden_size")
    return found


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    return replace(model, has_head_bias=True)


_NAMES = {
    **GPT_NAMES,
    **linear_names(
        {
            **{part: f"{LAYER}.attn.{part}_proj" for part in ("q", "k", "v")},
            "o": f"{LAYER}.attn.out_proj",
            "up": f"{LAYER}.mlp.fc_in",
            "down": f"{LAYER}.mlp.fc_out",
        }
    ),
    "head.bias": Rule("lm_head.bias"),
}

GPTJ = replace(
    GPT2,
    name="gptj",
    model_types=("gptj",),
    defaults={**GPT2.defaults, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    hf_rules=interleaved_pairs(_NAMES),
    gguf=None,
    qkv_bias=False,
    out_bias=False,
    is_parallel=True,
    has_partial_rotary=True,
    common_keys=_common_keys,
    adjust_attention=same_attention,
    adjust_model=_adjust_model,
)

CODEGEN = replace(
    GPTJ,
    name="codegen",
    model_types=("codegen",),
    hf_rules=interleaved_pairs(
        {
            **_NAMES,
            **{
                f"layers.{{i}}.{part}.weight": Rule(
                    f"{LAYER}.attn.qkv_proj.weight", ("q", "v", "k"), num_blocks=_CODEGEN_BLOCKS
                )
                for part in ("q", "v", "k")
            },
        }
    ),
    ignored_suffixes=(".attn.causal_mask", ".attn.bias", ".attn.masked_bias"),
)
