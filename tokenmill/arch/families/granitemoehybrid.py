"""Granite 4 hybrids (h-tiny, h-small, h-micro): Mamba-2 in most layers, attention mostly without rotation in the
others, Granite's multipliers, and routed experts with a shared one, or only a dense MLP."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.arch.families.bamba import (
    MAMBA_DEFAULTS,
    MAMBA_KEYS,
    hf_mamba,
    is_recurrent,
    mamba2,
    mamba_sizes,
)
from tokenmill.arch.families.granite import GRANITE, GRANITE_KEYS, adjust_attention, adjust_layer
from tokenmill.arch.families.granitemoe import (
    GATE_UP,
    GRANITE_EXPERT_KEYS,
    HF_GRANITE_EXPERTS,
    PLACE,
    granite_experts,
)
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import SOFTMAX, ConfigKeys
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, MoeSpec
from tokenmill.arch.tensors import GGUF_LLAMA, GGUF_MAMBA, GGUF_ROUTED, HF_LLAMA, Rule, Rules


def _attention(fields: ConfigFields, layer_index: int, attention: Gqa) -> Gqa:
    kind = fields.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        fields.refuse(f"position_embedding_type {kind!r} is not implemented")
    scaled = adjust_attention(fields, layer_index, attention)
    return scaled if kind == "rope" else replace(scaled, rope=None)


def _experts(fields: ConfigFields, layer_index: int) -> MoeSpec | None:
    return granite_experts(fields, layer_index) if fields.integer("num_local_experts", minimum=0) else None


def _layer(fields: ConfigFields, layer_index: int, layer: LayerSpec) -> LayerSpec:
    layer = adjust_layer(fields, layer_index, layer)
    if isinstance(layer.mlp, MlpSpec):  # without routed experts: the shared MLP alone
        layer = replace(layer, mlp=replace(layer.mlp, intermediate_size=fields.integer("shared_intermediate_size")))
    return replace(layer, mixer=mamba2(fields)) if is_recurrent(fields, layer_index, "layer_types") else layer


def _rotation(fields: ConfigFields) -> dict[str, str]:
    """Return whether attention rotates, which these files store in a flag meant for something else."""
    return {"position_embedding_type": "rope" if fields.get("rope.scaling.finetuned") else "nope"}


HF_GRANITE_HYBRID: Rules = {
    **HF_LLAMA,
    **hf_mamba(f"{PLACE}.mamba"),
    **{f"layers.{{i}}.{part}.weight": Rule(f"{PLACE}.shared_mlp.input_linear.weight", GATE_UP) for part in GATE_UP},
    "layers.{i}.down.weight": Rule(f"{PLACE}.shared_mlp.output_linear.weight"),
    **HF_GRANITE_EXPERTS,
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
    gguf=GGUFTraits(
        "granitehybrid",
        {**GGUF_LLAMA, **GGUF_MAMBA, **GGUF_ROUTED},
        config_keys=ConfigKeys(
            {
                **GRANITE_KEYS,
                **MAMBA_KEYS,
                **GRANITE_EXPERT_KEYS,
            },
            {"attention_bias": "blk.0.attn_q.bias", "mamba_conv_bias": "blk.0.ssm_conv1d.bias"},
            {"num_local_experts": 0},
            gating=SOFTMAX,
            more=lambda fields, gguf: {**mamba_sizes(fields, gguf), **_rotation(fields)},
            other_kind="linear_attention",
        ),
    ),
    experts=_experts,
    adjust_attention=_attention,
    adjust_layer=_layer,
)
