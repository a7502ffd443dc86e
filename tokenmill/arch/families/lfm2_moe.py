"""LFM2-MoE: LFM2 with routed experts after the first dense layers, with sigmoid scores and a choice bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families.lfm2 import GGUF_LFM2, LFM2
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import EXPERTS as EXPERT_KEYS
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.spec import MlpSpec, MoeSpec, RoutingSpec
from tokenmill.arch.tensors import GGUF_ROUTED, Rule


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    fields = ConfigFields(config, "lfm2_moe", LFM2_MOE.defaults)
    return {**config, "rms_norm_eps": fields.get("norm_eps")}


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    if layer < fields.integer("num_dense_layers", minimum=0):
        return None
    return MoeSpec(
        num_experts=fields.integer("num_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("moe_intermediate_size")),
        routing=RoutingSpec(
            score="sigmoid",
            renormalize=fields.flag("norm_topk_prob"),
            epsilon=1e-6,
            has_choice_bias=fields.flag("use_expert_bias"),
            scale=fields.positive("routed_scaling_factor"),
        ),
    )


LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    model_types=("lfm2_moe",),
    defaults={
        **LFM2.defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    hf_rules={
        **LFM2.hf_rules,
        "layers.{i}.router.weight": Rule("model.layers.{i}.feed_forward.gate.weight"),
        "layers.{i}.choice_bias": Rule("model.layers.{i}.feed_forward.expert_bias"),
        "layers.{i}.experts.gate.weight": Rule("model.layers.{i}.feed_forward.experts.{e}.w1.weight"),
        "layers.{i}.experts.up.weight": Rule("model.layers.{i}.feed_forward.experts.{e}.w3.weight"),
        "layers.{i}.experts.down.weight": Rule("model.layers.{i}.feed_forward.experts.{e}.w2.weight"),
    },
    gguf=GGUFTraits(
        "lfm2moe",
        {**GGUF_LFM2, **GGUF_ROUTED},
        config_keys=ConfigKeys(
            {
                **EXPERT_KEYS,
                "norm_eps": "attention.layer_norm_rms_epsilon",
                "conv_L_cache": "shortconv.l_cache",
                "num_experts": "expert_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "num_dense_layers": "leading_dense_block_count",
            },
            {"conv_bias": "blk.0.shortconv.conv.bias"},
            {"block_auto_adjust_ff_dim": False},
        ),
    ),
    common_keys=_common_keys,
    experts=_experts,
)
