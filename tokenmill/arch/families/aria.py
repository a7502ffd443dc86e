"""Aria, text part: Llama's attention, routed experts whose matrices are stored transposed, and shared experts."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.llama import LLAMA
from tokenmill.arch.family import TEXT_PREFIXES, VISION_PREFIXES
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.arch.tensors import HF_LLAMA, HF_SHARED_EXPERTS, Rule


def _experts(fields: ConfigFields, layer: int) -> MoeSpec:
    inner, shared = fields.integer("intermediate_size"), fields.integer("moe_num_shared_experts")
    return MoeSpec(
        num_experts=fields.integer("moe_num_experts"),
        num_active=fields.integer("moe_topk"),
        expert=MlpSpec(inner),
        shared=MlpSpec(inner * shared),
    )


ARIA = replace(
    LLAMA,
    name="aria",
    model_types=("aria_text", "aria"),
    defaults={
        **LLAMA.defaults,
        "intermediate_size": 4096,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    },
    hf_rules={
        **HF_LLAMA,
        **HF_SHARED_EXPERTS,
        "layers.{i}.router.weight": Rule("model.layers.{i}.mlp.router.weight"),
        **{
            f"layers.{{i}}.experts.{part}.weight": Rule(
                "model.layers.{i}.mlp.experts.fc1.weight", fused=("gate", "up"), transposed=True
            )
            for part in ("gate", "up")
        },
        "layers.{i}.experts.down.weight": Rule("model.layers.{i}.mlp.experts.fc2.weight", transposed=True),
    },
    gguf=None,
    experts=_experts,
    refused_flags=("mlp_bias",),
    hf_prefixes=TEXT_PREFIXES,
    ignored_prefixes=VISION_PREFIXES,
)
