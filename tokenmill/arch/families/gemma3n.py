"""Gemma 3n, text part: several residual streams of which layers read the first, a low-rank branch parallel to
attention, token embeddings per layer, sparse MLP gates in the lower layers, and upper layers that read the keys and
values of lower ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from tokenmill.arch.families.gemma4 import GEMMA4, GGUF_GEMMA4, THEIRS, shared_layer
from tokenmill.arch.family import GGUFTraits
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.gguf_config_keys import ConfigKeys
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.arch.streams import AltUp
from tokenmill.arch.tensors import Rule

WIDTHS = "intermediate_sizes"  # of each layer's MLP


def _common_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a list of MLP widths per layer to a key of its own."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list) or not widths:
        return config
    return {**config, "intermediate_size": widths[0], WIDTHS: widths}


def _adjust_attention(fields: ConfigFields, layer: int, attention: Gqa) -> Gqa:
    return replace(attention, scale=1.0, has_value_norm=True, shares_kv_of=shared_layer(fields, layer))


def _adjust_layer(fields: ConfigFields, index: int, layer: LayerSpec) -> LayerSpec:
    mlp, count = layer.mlp, fields.integer("num_hidden_layers")
    assert isinstance(mlp, MlpSpec)
    if fields.has(WIDTHS):
        mlp = replace(mlp, intermediate_size=int(fields.numbers(WIDTHS, count)[index]))
    sparsity = fields.get("activation_sparsity_pattern")
    if isinstance(sparsity, list):
        sparsity = fields.numbers("activation_sparsity_pattern", count)[index]
    if sparsity is not None and (not isinstance(sparsity, int | float) or not 0.0 <= sparsity < 1.0):
        fields.refuse(f"activation_sparsity_pattern has {sparsity!r}, expected shares below 1")
    if fields.integer("altup_active_idx", minimum=0) != 0:
        fields.refuse("altup_active_idx other than 0 is not implemented")
    streams = AltUp(
        fields.integer("altup_num_inputs", minimum=2),
        fields.integer("laurel_rank"),
        fields.flag("altup_correct_scale"),
    )
    width = fields.integer("hidden_size_per_layer_input")
    return replace(layer, mlp=replace(mlp, sparsity=float(sparsity or 0.0)), input_width=width, streams=streams)


def _adjust_model(fields: ConfigFields, model: ModelSpec) -> ModelSpec:
    rows = fields.integer("vocab_size_per_layer_input")
    if rows > model.vocab_size:
        fields.refuse(f"vocab_size_per_layer_input {rows} is more than vocab_size {model.vocab_size}")
    return replace(model, input_vocab_size=rows if rows < model.vocab_size else None)


def _further_config(fields: ConfigFields, gguf: GGUFFile) -> dict[str, Any]:
    """Return the shares of gates that are cut off, which files give as deviations, and sizes that only tensors have."""
    found: dict[str, Any] = {
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in gguf.tensors,
        "rope_local_base_freq": fields.positive_or_none("rope.freq_base_swa") or 10000.0,
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", minimum=0),
    }
    for ours, theirs in (("laurel_rank", "blk.0.laurel_l.weight"), ("vocab_size_per_layer_input", INPUTS)):
        tensor = gguf.tensors.get(theirs)
        if tensor is None or len(tensor.shape) != 2:
            fields.refuse(f"tensor {theirs!r} is missing")
        found[ours] = tensor.shape[0]
    deviations = fields.get("activation_sparsity_scale")
    if isinstance(deviations, list):
        found["activation_sparsity_pattern"] = [round(NormalDist().cdf(float(one)), 6) for one in deviations]
    return found


INPUTS = "per_layer_token_embd.weight"
GGUF_GEMMA3N = {
    **{ours: rule for ours, rule in GGUF_GEMMA4.items() if ".side." not in ours and ours != "layers.{i}.scale"},
    "layers.{i}.altup_router_norm.weight": Rule("blk.{i}.altup_router_norm.weight"),
    "layers.{i}.altup_router.weight": Rule("blk.{i}.altup_router.weight"),
    "layers.{i}.altup_predict.weight": Rule("blk.{i}.altup_predict_coef.weight"),
    "layers.{i}.altup_correct.weight": Rule("blk.{i}.altup_correct_coef.weight"),
    "layers.{i}.altup_scale": Rule("blk.{i}.altup_correct_scale.weight"),
    "layers.{i}.branch_left.weight": Rule("blk.{i}.laurel_l.weight"),
    "layers.{i}.branch_right.weight": Rule("blk.{i}.laurel_r.weight"),
    "layers.{i}.branch_norm.weight": Rule("blk.{i}.laurel_post_norm.weight"),
    "streams.in.{s}.weight": Rule("altup_proj.weight"),
    "streams.out.{s}.weight": Rule("altup_unembd_proj.weight"),
}
GEMMA3N_KEYS = ConfigKeys(
    {
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "altup_num_inputs": "altup.num_inputs",
        "altup_active_idx": "altup.active_idx",
    },
    more=_further_config,
)

GEMMA3N = replace(
    GEMMA4,
    name="gemma3n",
    model_types=("gemma3n_text", "gemma3n"),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    gguf=GGUFTraits("gemma3n", GGUF_GEMMA3N, config_keys=GEMMA3N_KEYS),
    hf_rules={
        **{ours: rule for ours, rule in GEMMA4.hf_rules.items() if ".side." not in ours and ours != "layers.{i}.scale"},
        "layers.{i}.altup_router_norm.weight": Rule(THEIRS + "altup.router_norm.weight"),
        "layers.{i}.altup_router.weight": Rule(THEIRS + "altup.modality_router.weight"),
        "layers.{i}.altup_predict.weight": Rule(THEIRS + "altup.prediction_coefs.weight"),
        "layers.{i}.altup_correct.weight": Rule(THEIRS + "altup.correction_coefs.weight"),
        "layers.{i}.altup_scale": Rule(THEIRS + "altup.correct_output_scale"),
        "layers.{i}.branch_left.weight": Rule(THEIRS + "laurel.linear_left.weight"),
        "layers.{i}.branch_right.weight": Rule(THEIRS + "laurel.linear_right.weight"),
        "layers.{i}.branch_norm.weight": Rule(THEIRS + "laurel.post_laurel_norm.weight"),
        "streams.in.{s}.weight": Rule("model.altup_projections.{s}.weight"),
        "streams.out.{s}.weight": Rule("model.altup_unembed_projections.{s}.weight"),
    },
    has_local_rope=True,
    has_partial_rotary=False,
    common_keys=_common_keys,
    adjust_attention=_adjust_attention,
    adjust_layer=_adjust_layer,
    adjust_model=_adjust_model,
)
