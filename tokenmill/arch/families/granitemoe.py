"""Granite 3 with experts (1B-A400M, 3B-A800M): Granite with routed experts, and a shared one if configured."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.granite import GRANITE, GRANITE_KEYS
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.spec import MlpSpec, MoeSpec
from tokenmill.arch.tensors import GGUF_LLAMA, GGUF_ROUTED, HF_LLAMA, Rule, Rules

PLACE = "model.layers.{i}"
GATE_UP = ("gate", "up")


def granite_experts(fields: ConfigFields, layer_index: int) -> MoeSpec:
    shared = fields.integer("shared_intermediate_size", minimum=0)
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size")),
        shared=MlpSpec(shared) if shared else None,
    )


HF_GRANITE_EXPERTS: Rules = {
    "layers.{i}.router.weight": Rule(f"{PLACE}.block_sparse_moe.router.layer.weight"),
    **{f"layers.{{i}}.experts.{part}.weight": Rule(f"{PLACE}.block_sparse_moe.input_linear.weight", GATE_UP)
       for part in GATE_UP},
    "layers.{i}.experts.down.weight": Rule(f"{PLACE}.block_sparse_moe.output_linear.weight"),
    **{f"layers.{{i}}.shared.{part}.weight": Rule(f"{PLACE}.shared_mlp.input_linear.weight", GATE_UP)
       for part in GATE_UP},
    "layers.{i}.shared.down.weight": Rule(f"{PLACE}.shared_mlp.output_linear.weight"),
}  # fmt: skip
GRANITE_EXPERT_KEYS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}

GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    model_types=("granitemoe", "granitemoeshared"),
    defaults={
        **GRANITE.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
    },
    hf_rules={**HF_LLAMA, **HF_GRANITE_EXPERTS},
    gguf=GGUFTraits(
        "granitemoe",
        {**GGUF_LLAMA, **GGUF_ROUTED},
        config_keys=ConfigKeys(
            {**GRANITE_KEYS, **GRANITE_EXPERT_KEYS}, {"attention_bias": "blk.0.attn_q.bias"}, gating=SOFTMAX
        ),
    ),
    mlp_bias=False,
    experts=granite_experts,
)
