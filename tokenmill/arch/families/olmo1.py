"""OLMo 1: Llama with LayerNorm without weights, and queries, keys and values limited to ± `clip_qkv`."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import Gqa, NormSpec
from tokenmill.arch.tensors import GGUF_LLAMA


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, qkv_clip=fields.positive_or_none("clip_qkv"))


OLMO = replace(
    LLAMA,
    name="olmo",
    model_types=("olmo",),
    defaults={**LLAMA.defaults, "layer_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": 50279},
    gguf=GGUFTraits(
        "olmo",
        GGUF_LLAMA,
        config_keys=ConfigKeys({"layer_norm_eps": "attention.layer_norm_epsilon", "clip_qkv": "attention.clamp_kqv"}),
    ),
    norm=NormSpec("layer", has_weight=False),
    norm_eps_key="layer_norm_eps",
    adjust_attention=_adjust_attention,
)
