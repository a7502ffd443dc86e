"""GGUF metadata of a spec: the keys of its architecture, and the tensors of rope factors.

The inverse of `arch/gguf_config.py`. What GGUF cannot express is refused, never left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tokenmill.arch.family import Family
from tokenmill.arch.hf_config import yarn_mscale
from tokenmill.arch.spec import (
    RMS_NORM,
    FrequencyFactors,
    Gqa,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    MoeSpec,
    RopeScaling,
    YarnScaling,
)
from tokenmill.errors import UnsupportedModel

Metadata = dict[str, Any]
Factors = dict[str, tuple[float, ...]]


def architecture_metadata(spec: ModelSpec, family: Family) -> tuple[Metadata, Factors]:
    """Return (keys without the architecture's prefix, tensors of rope factors)."""
    if family.gguf_traits.config_keys is not None:
        raise UnsupportedModel(
            f"{spec.family}: models of this family are read from GGUF, but cannot be written as GGUF"
        )
    _require_plain(spec)
    full = _full_attention(spec)
    scaling, factors = _rope_scaling(full)
    mlp = _mlp(spec.layers[0])
    return {**_sizes(spec, full), **mlp, **_windows(spec, family), **_softcaps(spec, full), **scaling}, factors


def _require_plain(spec: ModelSpec) -> None:
    """Refuse features that these keys cannot express."""
    for layer in spec.layers:
        has_post_norms = layer.has_post_norms and layer.has_pre_norms
        is_known = layer == LayerSpec(layer.mixer, layer.mlp, "both" if has_post_norms else "before")
        if not is_known or (isinstance(layer.mixer, Gqa) and not layer.mixer.is_plain):
            raise UnsupportedModel(f"{spec.family}: such layers cannot be written as GGUF")
    if spec.norm != RMS_NORM or spec.logit_scale != 1.0 or spec.has_head_bias:
        raise UnsupportedModel(f"{spec.family}: its norms or logits cannot be written as GGUF")


def _full_attention(spec: ModelSpec) -> Gqa:
    """Return the attention that represents all layers: preferably one without a window, because only its rope is
    scaled."""
    mixers = spec.attentions
    sizes = {(mixer.num_heads, mixer.num_kv_heads) for mixer in mixers}
    if len(mixers) != spec.num_layers or len(sizes) != 1 or len({layer.mlp for layer in spec.layers}) != 1:
        raise UnsupportedModel(f"{spec.family}: layers that differ in kind or size cannot be written as GGUF")
    return next((mixer for mixer in mixers if mixer.window is None), mixers[0])


def _sizes(spec: ModelSpec, attention: Gqa) -> Metadata:
    rope = attention.rope
    if rope is None:
        raise UnsupportedModel(f"{spec.family}: a model without rotation cannot be written as GGUF")
    return {
        "block_count": spec.num_layers,
        "context_length": spec.max_context,
        "embedding_length": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.rotary_dim,
    }


def _mlp(layer: LayerSpec) -> Metadata:
    if layer.mlp is None:
        raise UnsupportedModel("layers without an MLP cannot be written as GGUF")
    if not isinstance(layer.mlp, MoeSpec):
        return {"feed_forward_length": layer.mlp.intermediate_size}
    if layer.mlp != MoeSpec(layer.mlp.num_experts, layer.mlp.num_active, layer.mlp.expert):
        raise UnsupportedModel("experts without renormalised weights, or shared ones, cannot be written as GGUF")
    size = layer.mlp.expert.intermediate_size
    return {
        "feed_forward_length": size,
        "expert_feed_forward_length": size,
        "expert_count": layer.mlp.num_experts,
        "expert_used_count": layer.mlp.num_active,
    }


def _windows(spec: ModelSpec, family: Family) -> Metadata:
    windows = [mixer.window for mixer in spec.attentions]
    if not any(windows):
        return {}
    pattern = family.gguf_traits.window_pattern
    expected = [bool(pattern) and (pattern == 1 or (index + 1) % pattern != 0) for index in range(len(windows))]
    if [window is not None for window in windows] != expected:
        raise UnsupportedModel(f"{spec.family}: this arrangement of windows cannot be written as GGUF")
    return {"attention.sliding_window": next(window for window in windows if window)}


def _softcaps(spec: ModelSpec, attention: Gqa) -> Metadata:
    caps = {"attn_logit_softcapping": attention.softcap, "final_logit_softcapping": spec.logit_softcap}
    return {key: float(cap) for key, cap in caps.items() if cap is not None}


# ── rope scaling ───────────────────────────────────────────────────────────────────────────────────────


def _rope_scaling(attention: Gqa) -> tuple[Metadata, Factors]:
    rope = attention.rope
    if rope is None or rope.scaling is None:
        return {}, {}
    frequencies = [rope.theta ** (-2 * index / rope.rotary_dim) for index in range(rope.rotary_dim // 2)]
    return _SCALINGS[type(rope.scaling)](rope.scaling, frequencies)


def _linear(scaling: LinearScaling, frequencies: list[float]) -> tuple[Metadata, Factors]:
    return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}, {}


def _yarn(scaling: YarnScaling, frequencies: list[float]) -> tuple[Metadata, Factors]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling.factor),
        "rope.scaling.original_context_length": scaling.original_context,
        "rope.scaling.attn_factor": scaling.mscale / yarn_mscale(scaling.factor),
        "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
        "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
    }, {}


def _longrope(scaling: LongRopeScaling, frequencies: list[float]) -> tuple[Metadata, Factors]:
    return {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": scaling.original_context,
        "rope.scaling.attn_factor": float(scaling.mscale),
    }, {"rope_factors_long.weight": scaling.long_factors, "rope_factors_short.weight": scaling.short_factors}


def _frequency_factors(scaling: FrequencyFactors, frequencies: list[float]) -> tuple[Metadata, Factors]:
    return {}, {"rope_freqs.weight": scaling.factors}


def _llama3(scaling: Llama3Scaling, frequencies: list[float]) -> tuple[Metadata, Factors]:
    return {}, {"rope_freqs.weight": tuple(llama3_factor(scaling, frequency) for frequency in frequencies)}


def llama3_factor(scaling: Llama3Scaling, frequency: float) -> float:
    """Return Llama 3's divisor of a frequency: 1 for short waves, `factor` for long ones, a ramp between."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if turns >= high:
        return 1.0
    if turns <= low:
        return scaling.factor
    smooth = (turns - low) / (high - low)
    return 1.0 / ((1 - smooth) / scaling.factor + smooth)


_SCALINGS: dict[type[RopeScaling], Callable[[Any, list[float]], tuple[Metadata, Factors]]] = {
    LinearScaling: _linear,
    YarnScaling: _yarn,
    LongRopeScaling: _longrope,
    FrequencyFactors: _frequency_factors,
    Llama3Scaling: _llama3,
}
