"""Granite 4 hybrids (h-tiny, h-small, h-micro): Mamba-2 in most layers, attention mostly without rotation in the
others, Granite's multipliers, and routed experts beside an MLP for every token, or that alone."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.bamba import MAMBA_DEFAULTS, hf_mamba, is_recurrent, mamba2
from tokenmill.arch.families.granite import GRANITE, adjust_attention, adjust_layer
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec
from tokenmill.arch.tensors import HF_LLAMA, Rule, Rules

PLACE = "model.layers.{i}"
GATE_UP = ("gate", "up")


def _attention(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    kind = fields.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        fields.refuse(f"position_embedding_type {kind!r} is not implemented")
    scaled = adjust_attention(fields, layer_index, attention)
    return scaled if kind == "rope" else replace(scaled, rope=None)


def _experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    if fields.integer("num_local_experts", minimum=0) == 0:
        return None
    return MoeSpec(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        expert=MlpSpec(fields.integer("intermediate_size")),
        shared=MlpSpec(fields.integer("shared_intermediate_size")),
    )


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    layer = adjust_layer(fields, layer_index, layer)
    if isinstance(layer.mlp, MlpSpec):  # without experts, the MLP that others have beside them
        layer = replace(layer, mlp=replace(layer.mlp, intermediate_size=fields.integer("shared_intermediate_size")))
    return replace(layer, mixer=mamba2(fields)) if is_recurrent(fields, layer_index, "layer_types") else layer


HF_GRANITE_HYBRID: Rules = {
    **HF_LLAMA,
    **hf_mamba(f"{PLACE}.mamba"),
    **{f"layers.{{i}}.{part}.weight": Rule(f"{PLACE}.shared_mlp.input_linear.weight", GATE_UP) for part in GATE_UP},
    "layers.{i}.down.weight": Rule(f"{PLACE}.shared_mlp.output_linear.weight"),
    **{f"layers.{{i}}.shared.{part}.weight": Rule(f"{PLACE}.shared_mlp.input_linear.weight", GATE_UP)
       for part in GATE_UP},
    "layers.{i}.shared.down.weight": Rule(f"{PLACE}.shared_mlp.output_linear.weight"),
    "layers.{i}.router.weight": Rule(f"{PLACE}.block_sparse_moe.router.layer.weight"),
    **{f"layers.{{i}}.experts.{part}.weight": Rule(f"{PLACE}.block_sparse_moe.input_linear.weight", GATE_UP)
       for part in GATE_UP},
    "layers.{i}.experts.down.weight": Rule(f"{PLACE}.block_sparse_moe.output_linear.weight"),
}  # fmt: skip

GRANITE_HYBRID = replace(
    GRANITE,
    name="granitemoehybrid",
    model_types=("granitemoehybrid",),
    defaults={
        **GRANITE.defaults,
        **MAMBA_DEFAULTS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    hf_rules=HF_GRANITE_HYBRID,
    gguf=None,
    experts=_experts,
    adjust_attention=_attention,
    adjust_layer=_layer,
)
