"""Rotary embedding out of config.json, in its two styles.

older:  "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}
newer:  "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0}
        "rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tokenmill.arch.family import Family
from tokenmill.arch.fields import ConfigFields
from tokenmill.arch.spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def rope_for(fields: ConfigFields, family: Family, head_dim: int, is_windowed: bool) -> RopeSpec:
    parameters = _parameters(fields, family, is_windowed)
    rope = ConfigFields(parameters, f"{fields.source} rope")
    partial = rope.positive("partial_rotary_factor") if rope.has("partial_rotary_factor") else 1.0
    if partial > 1.0 or (partial != 1.0 and not family.has_partial_rotary):
        fields.refuse(f"partial_rotary_factor {partial:g} is not implemented for this family")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        fields.refuse(f"a rotation of {rotary_dim} of {head_dim} dimensions is not possible")
    theta = rope.positive("rope_theta")
    if theta <= 1.0:
        fields.refuse(f"a rope_theta of {theta:g} is not possible: above 1 it gives each pair a frequency of its own")
    return RopeSpec(theta, rotary_dim, _scaling(rope, fields, rotary_dim))


def _parameters(fields: ConfigFields, family: Family, is_windowed: bool) -> dict[str, Any]:
    """One flat set in the newer style, whichever style the file has."""
    given = fields.section("rope_parameters")
    if given is None:
        return _older_style(fields, family, is_windowed)
    if _LAYER_TYPES & given.keys():
        chosen = given.get("sliding_attention" if is_windowed else "full_attention")
        if not isinstance(chosen, dict):
            fields.refuse("rope_parameters lacks a kind of layer that the model has")
        given = chosen
    top = {"rope_theta": fields.get("rope_theta"), "partial_rotary_factor": fields.get("partial_rotary_factor")}
    return {**top, **given}


def _older_style(fields: ConfigFields, family: Family, is_windowed: bool) -> dict[str, Any]:
    top = {"partial_rotary_factor": fields.get("partial_rotary_factor")}
    if is_windowed and family.has_local_rope:
        return {**top, "rope_theta": fields.get("rope_local_base_freq")}
    return {**top, "rope_theta": fields.get("rope_theta"), **(fields.section("rope_scaling") or {})}


def _scaling(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> RopeScaling | None:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if rope.has("mrope_section"):
        fields.refuse("rope type 'mrope' is not implemented")
    if kind not in _SCALINGS:
        fields.refuse(f"rope type {kind!r} is not implemented")
    return _SCALINGS[kind](rope, fields, rotary_dim)


def _none(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> None:
    return None


def _linear(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> LinearScaling:
    return LinearScaling(rope.positive("factor"))


def _llama3(rope: ConfigFields, fields: ConfigFields, rotary_dim: int) -> Llama3Scaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        fields.refuse(f"a high_freq_factor of {high:g} must be above the low_freq_factor, {low:g}")
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
    if rope.get("truncate") is False:
        fields.refuse("rope type 'yarn' without truncation is not implemented")
    original = _original_context(rope, fields)
    factor = _stretch(rope, fields, original)
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=rope.positive_or_none("beta_fast") or 32.0,
        beta_slow=rope.positive_or_none("beta_slow") or 1.0,
        mscale=rope.positive_or_none("attention_factor") or _yarn_mscale(rope, factor),
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
    "su": _longrope,
    "yarn": _yarn,
}
