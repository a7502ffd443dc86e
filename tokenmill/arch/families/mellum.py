"""Mellum 2: Qwen3-MoE with windows in the layers that the config names, which have their own base of the rotation."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.qwen3_moe import QWEN3_MOE, routed_experts
from tokenmill.arch.family import is_dense, named_layers
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import MoeSpec


def _experts(fields: ConfigFields, layer: int) -> MoeSpec | None:
    return None if is_dense(fields, layer) else routed_experts(fields, layer)


MELLUM = replace(
    QWEN3_MOE,
    name="mellum",
    model_types=("mellum",),
    defaults={
        **QWEN3_MOE.defaults,
        "head_dim": 128,
        "intermediate_size": 7168,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 1024,
        "moe_intermediate_size": 896,
        "num_local_experts": 64,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
    },
    gguf=None,
    windows=named_layers,
    experts=_experts,
    ignored_prefixes=("mtp.",),
)
