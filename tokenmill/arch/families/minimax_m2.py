"""MiniMax-M2: norms over all heads of q and of k, rotation of half of each head, experts with sigmoid scores and a
choice bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.arch.families.mixtral import MIXTRAL
from tokenmill.arch.family import Family, GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF, GGUF_ROUTED, HF_QK_NORM, Rule


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the number of rotated dimensions in published files to `partial_rotary_factor`."""
    rotary, dim = config.get("rotary_dim"), config.get("head_dim", 128)
    if config.get("rope_parameters") or not isinstance(rotary, int) or not isinstance(dim, int) or dim < 1:
        return config
    return {**config, "partial_rotary_factor": rotary / dim}


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size")),
        routing=RoutingSpec(score="sigmoid", has_choice_bias=True),
    )


MINIMAX_M2 = Family(
    name="minimax_m2",
    model_types=("minimax_m2",),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "tie_word_embeddings": False,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
    hf_rules={
        **MIXTRAL.hf_rules,
        **HF_QK_NORM,
        "layers.{i}.choice_bias": Rule("model.layers.{i}.block_sparse_moe.e_score_correction_bias"),
    },
    gguf=GGUFTraits(
        "minimax-m2",
        {**GGUF, **GGUF_ROUTED},
        config_keys=ConfigKeys(
            {**EXPERT_KEYS, "num_local_experts": "expert_count", "intermediate_size": "expert_feed_forward_length"}
        ),
    ),
    qk_norm="all",
    has_partial_rotary=True,
    experts=_experts,
    common_keys=_common_keys,
    ignored_prefixes=("mtp.", "model.mtp."),
)
