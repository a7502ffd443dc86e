"""Read a Hugging Face config.json as a `ModelSpec`, or refuse it by the name of the feature that is not implemented.

The reader is strict and generic: what distinguishes families is data in `families/`. Rotary embeddings have two styles:

    older:  "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}
    newer:  "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0}
            "rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tokenmill.arch.families import BY_MODEL_TYPE
from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.quantization import read_quantization
from tokenmill.arch.spec import (
    Activation,
    FrequencyFactors,
    Gqa,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Mla,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from tokenmill.arch.text_parts import MULTIMODAL, text_type, with_text
from tokenmill.errors import UnsupportedModel

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
DTYPES = ("float32", "float16", "bfloat16")
_TASKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
MAX_LAYERS = 10_000
MAX_EXPERTS = 4096  # per layer; each expert's weights have their own names


def spec_from_hf(config: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read a config. `generation` is generation_config.json; its stop tokens are added."""
    family = _family(config)
    whole = ConfigFields(config, str(config["model_type"]))
    _check_quantization(whole)
    _check_task(whole)
    whole.section("text_config")  # an object, if there is one
    merged = family.common_keys(with_text(config))
    fields = ConfigFields(merged, str(config["model_type"]), family.defaults)
    for key in family.refused_flags:
        if fields.get(key) not in (None, False):
            fields.refuse(f"{key} is set, which is not implemented")
    spec = _spec(fields, family, ConfigFields(generation or {}, "generation_config.json"))
    return spec if text_type(config) is None else replace(spec, text_part_of=whole.source)


def _family(config: Mapping[str, Any]) -> Family:
    model_type, text = config.get("model_type"), text_type(config)
    if not isinstance(model_type, str):
        raise UnsupportedModel("config.json has no model_type", hint="is this a model's config.json?")
    if text is not None and text not in BY_MODEL_TYPE:
        raise UnsupportedModel(f"{model_type}: a text part of model_type {text!r} is not implemented")
    if text is None and model_type not in BY_MODEL_TYPE:
        known = ", ".join(sorted([*BY_MODEL_TYPE, *MULTIMODAL]))
        raise UnsupportedModel(f"model_type {model_type!r} is not implemented", hint=f"these are: {known}")
    return BY_MODEL_TYPE[model_type if text is None else text]


def _check_quantization(fields: ConfigFields) -> None:
    quantization = fields.section("quantization_config")
    if quantization:
        read_quantization(quantization, fields.source)


def _check_task(fields: ConfigFields) -> None:
    names = fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fields.refuse(f"architectures is {names!r}, expected a list of strings")
    if names and not any(name.endswith(_TASKS) for name in names):
        fields.refuse(f"architecture {names[0]!r} does not generate text")


def _spec(fields: ConfigFields, family: Family, generation: ConfigFields) -> ModelSpec:
    hidden = fields.integer("hidden_size")
    eos = dict.fromkeys((*fields.integers("eos_token_id"), *generation.integers("eos_token_id")))
    bos = fields.integers("bos_token_id")
    spec = ModelSpec(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=_layers(fields, family),
        norm_eps=fields.positive(family.norm_eps_key),
        norm=family.norm,
        max_context=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings"),
        embedding_scale=hidden**0.5 if family.scaled_embeddings else 1.0,
        logit_softcap=fields.positive_or_none("final_logit_softcapping") if family.has_softcaps else None,
        num_extra_layers=_num_extra_layers(fields),
        dtype=_dtype(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(eos),
        name=_name(fields),
    )
    return family.adjust_model(fields, spec)


def _num_extra_layers(fields: ConfigFields) -> int:
    """Return the number of MTP layers, under DeepSeek's, GLM's and Nemotron's key or under Qwen's."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return next(filter(None, (fields.integer_or_none(key, minimum=0) for key in keys)), 0)


def _name(fields: ConfigFields) -> str:
    name = fields.get("_name_or_path")
    return name if isinstance(name, str) else ""


def _dtype(fields: ConfigFields) -> str:
    is_quantized = fields.has("quantization_config")  # then the dtype of unquantised tensors defaults to bfloat16
    value = fields.get("dtype") or fields.get("torch_dtype") or ("bfloat16" if is_quantized else "float32")
    if value not in DTYPES:
        fields.refuse(f"dtype {value!r} is not implemented")
    return str(value)


def _layers(fields: ConfigFields, family: Family) -> tuple[LayerSpec, ...]:
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        fields.refuse(f"num_hidden_layers is {num_layers}, more than {MAX_LAYERS}")
    windows = family.windows(fields, num_layers)
    # Layers that are alike share one object: specs stay small and compare fast.
    attention = {window: _mixer(fields, family, window) for window in dict.fromkeys(windows)}
    mlp = _mlp(fields, family)
    layers = (_layer(fields, family, index, attention[window], mlp) for index, window in enumerate(windows))
    known: dict[LayerSpec, LayerSpec] = {}
    return tuple(known.setdefault(layer, layer) for layer in layers)


def _layer(fields: ConfigFields, family: Family, index: int, attention: Gqa | Mla, mlp: MlpSpec) -> LayerSpec:
    if isinstance(attention, Gqa):
        attention = family.adjust_attention(fields, index, attention)
    layer = LayerSpec(
        family.convolution(fields, index) or attention,
        _with_activation(family.experts(fields, index), mlp) or mlp,
        family.norms,
        family.is_parallel,
    )
    return family.adjust_layer(fields, index, layer)


def _with_activation(experts: MoeSpec | None, mlp: MlpSpec) -> MoeSpec | None:
    if experts is None:
        return None
    check_experts(experts)
    expert, shared = (
        part if part is None or part.activation == "swiglu_oai" else replace(part, activation=mlp.activation)
        for part in (experts.expert, experts.shared)
    )
    assert expert is not None
    return replace(experts, expert=expert, shared=shared)


def check_experts(experts: MoeSpec) -> None:
    """Refuse impossible numbers of experts."""
    count, active, routing = experts.num_experts, experts.num_active, experts.routing
    if count > MAX_EXPERTS:
        raise UnsupportedModel(f"{count} experts in a layer, more than {MAX_EXPERTS}")
    if active > count:
        raise UnsupportedModel(f"{active} experts per token are not possible with {count}")
    if routing.weights_input and active != 1:
        raise UnsupportedModel(f"weighted expert inputs are not implemented with {active} experts per token")
    if count % routing.num_groups or not 1 <= routing.kept_groups <= routing.num_groups:
        raise UnsupportedModel(
            f"{count} experts in {routing.num_groups} groups, {routing.kept_groups} kept, are not possible"
        )
    if routing.num_groups > 1 and count // routing.num_groups * routing.kept_groups < active:
        raise UnsupportedModel(f"{active} experts per token are not possible with {routing.kept_groups} kept groups")


def _mixer(fields: ConfigFields, family: Family, window: int | None) -> Gqa | Mla:
    return _latent_attention(fields, family) if family.is_latent else _attention(fields, family, window)


def _latent_attention(fields: ConfigFields, family: Family) -> Mla:
    if fields.get("rope_interleave") is False:
        fields.refuse("rope_interleave false is not implemented")
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    parameters = ConfigFields(_parameters(fields, family, False), f"{fields.source} rope")
    stretch = parameters.number("mscale_all_dim") if parameters.has("mscale_all_dim") else 0.0
    mscale = yarn_mscale(parameters.positive("factor"), stretch) if stretch else 1.0
    return Mla(
        num_heads=fields.integer("num_attention_heads"),
        q_rank=fields.integer_or_none("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        scale=(nope + rope_dim) ** -0.5 * mscale**2,
        rope=rope_for(fields, family, rope_dim, False),
    )


def _attention(fields: ConfigFields, family: Family, window: int | None) -> Gqa:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer_or_none("num_key_value_heads") or heads
    head_dim = fields.integer_or_none("head_dim") or _even_share(fields, heads)
    if heads % kv_heads:
        fields.refuse(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    query_scale = fields.positive(family.query_scale_key) if family.query_scale_key else float(head_dim)
    return Gqa(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=query_scale**-0.5,
        rope=rope_for(fields, family, head_dim, window is not None),
        qkv_bias=_flag(fields, family.qkv_bias),
        out_bias=_flag(fields, family.out_bias),
        qk_norm=family.qk_norm,
        window=window if window and window < fields.integer("max_position_embeddings") else None,
        softcap=fields.positive_or_none("attn_logit_softcapping") if family.has_softcaps else None,
    )


def _even_share(fields: ConfigFields, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        fields.refuse(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _flag(fields: ConfigFields, source: bool | str) -> bool:
    return fields.flag(source) if isinstance(source, str) else source


def _mlp(fields: ConfigFields, family: Family) -> MlpSpec:
    name = fields.text(family.activation_key)
    if name not in ACTIVATIONS:
        fields.refuse(f"activation {name!r} is not implemented")
    bias, width = _flag(fields, family.mlp_bias), fields.integer("intermediate_size")
    return MlpSpec(width, ACTIVATIONS[name], bias, family.is_gated_mlp)


# ── rotary embeddings ──────────────────────────────────────────────────────────────────────────────

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def rope_for(fields: ConfigFields, family: Family, head_dim: int, is_windowed: bool) -> RopeSpec:
    parameters = _parameters(fields, family, is_windowed)
    rope = ConfigFields(parameters, f"{fields.source} rope")
    partial = rope.positive("partial_rotary_factor") if rope.has("partial_rotary_factor") else 1.0
    if partial > 1.0 or (partial != 1.0 and not family.has_partial_rotary):
        fields.refuse(f"partial_rotary_factor {partial:g} is not implemented for this family")
    is_proportional = rope.get("rope_type") == "proportional"
    rotary_dim = head_dim if is_proportional else int(head_dim * partial)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        fields.refuse(f"a rotation of {rotary_dim} of {head_dim} dimensions is not possible")
    theta = rope.positive("rope_theta")
    if theta <= 1.0:
        fields.refuse(f"a rope_theta of {theta:g} is not possible: it must be above 1")
    angles = int(partial * head_dim // 2) if is_proportional and partial != 1.0 else None
    return RopeSpec(theta, rotary_dim, _scaling(rope, family, fields, rotary_dim), angles)


def _parameters(fields: ConfigFields, family: Family, is_windowed: bool) -> dict[str, Any]:
    """Return the rope parameters of full or windowed layers in the newer style, from a file of either style."""
    parameters = fields.section("rope_parameters")
    if parameters is None:
        return _older_style(fields, family, is_windowed)
    if _LAYER_TYPES & parameters.keys():
        kind = "sliding_attention" if is_windowed else "full_attention"
        if not isinstance(parameters.get(kind), dict):
            fields.refuse(f"rope_parameters lacks {kind}, which the model has")
        parameters = parameters[kind]
    top = {"rope_theta": fields.get("rope_theta"), "partial_rotary_factor": fields.get("partial_rotary_factor")}
    return {**top, **parameters}


def _older_style(fields: ConfigFields, family: Family, is_windowed: bool) -> dict[str, Any]:
    top = {"partial_rotary_factor": fields.get("partial_rotary_factor")}
    if is_windowed and family.has_local_rope:
        return {**top, "rope_theta": fields.get("rope_local_base_freq")}
    return {**top, "rope_theta": fields.get("rope_theta"), **(fields.section("rope_scaling") or {})}


def _scaling(rope: ConfigFields, family: Family, fields: ConfigFields, rotary_dim: int) -> RopeScaling | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if (kind == "mrope" or rope.has("mrope_section")) and not family.has_rope_sections:
        fields.refuse("rope type 'mrope' is not implemented")
    if kind not in _SCALINGS:
        fields.refuse(f"rope type {kind!r} is not implemented")
    return _SCALINGS[kind](rope, fields, rotary_dim)


def _none(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> None:
    return None


def _proportional(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> LinearScaling | None:
    """Return a scaling with frequencies as if the whole head rotated; `RopeSpec.num_angles` is how many pairs do."""
    factor = rope.positive_or_none("factor") or 1.0
    return None if factor == 1.0 else LinearScaling(factor)


def _linear(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> LinearScaling:
    return LinearScaling(rope.positive("factor"))


def _factors(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> FrequencyFactors:
    """Return per-frequency factors, which come from GGUF files (`arch/gguf_config_keys.py`)."""
    numbers = rope.numbers("factors", rotary_dim // 2)
    if not all(number > 0 for number in numbers):
        fields.refuse("factors of frequencies must be above zero")
    return FrequencyFactors(tuple(map(float, numbers)))


def _llama3(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> Llama3Scaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high < low:
        fields.refuse(f"a high_freq_factor of {high:g} must not be below the low_freq_factor, {low:g}")
    return Llama3Scaling(
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=rope.integer("original_max_position_embeddings"),
    )


def _original_context(rope: ConfigFields, fields: ConfigFields) -> int:
    for source in (rope, fields):
        if source.get("original_max_position_embeddings") is not None:
            return source.integer("original_max_position_embeddings", minimum=2)
    return fields.integer("max_position_embeddings", minimum=2)


def _stretch(rope: ConfigFields, fields: ConfigFields, original: int) -> float:
    if rope.has("factor"):
        return rope.positive("factor")
    return fields.integer("max_position_embeddings") / original


def _longrope(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> LongRopeScaling:
    original = _original_context(rope, fields)
    return LongRopeScaling(
        short_factors=rope.numbers("short_factor", rotary_dim // 2),
        long_factors=rope.numbers("long_factor", rotary_dim // 2),
        original_context=original,
        mscale=rope.positive_or_none("attention_factor") or longrope_mscale(_stretch(rope, fields, original), original),
    )


def longrope_mscale(stretch: float, original_context: int) -> float:
    return 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(original_context))


def _yarn(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> YarnScaling:
    original = _original_context(rope, fields)
    is_implied = any(source.get("original_max_position_embeddings") is not None for source in (rope, fields))
    factor = _stretch(rope, fields, original) if is_implied else rope.positive("factor")
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=rope.positive_or_none("beta_fast") or 32.0,
        beta_slow=rope.positive_or_none("beta_slow") or 1.0,
        mscale=rope.positive_or_none("attention_factor") or _yarn_mscale(rope, factor),
        is_truncated=rope.get("truncate") is not False,
    )


def _yarn_mscale(rope: ConfigFields, factor: float) -> float:
    both = rope.has("mscale") and rope.has("mscale_all_dim")
    if both and rope.number("mscale") and rope.number("mscale_all_dim"):
        return yarn_mscale(factor, rope.number("mscale")) / yarn_mscale(factor, rope.number("mscale_all_dim"))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


_SCALINGS: dict[str, Callable[[ConfigFields, ConfigFields, int], RopeScaling | None]] = {
    "default": _none,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": _none,
    "su": _longrope,
    "yarn": _yarn,
    "proportional": _proportional,
    "factors": _factors,
}
