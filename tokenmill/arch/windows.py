"""Sliding-window layers, in the several ways that configurations describe them.

`layer_types` (recent files) names each layer; older files give a rule, and each function here is one such rule.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.arch.family import Windows
from tokenmill.arch.fields import ConfigFields


def _windows(fields: ConfigFields, num_layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    window = fields.integer_or_none("sliding_window")
    kinds = fields.words("layer_types", num_layers)
    if kinds is None:
        return tuple(window if is_sliding(index) else None for index in range(num_layers))
    for kind in sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        fields.refuse(f"layer type {kind!r} is not implemented")
    if window is None and "sliding_attention" in kinds:
        fields.refuse("layer_types asks for windows, but sliding_window is missing")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def every_layer(fields: ConfigFields, num_layers: int) -> Windows:
    return _windows(fields, num_layers, lambda index: True)


def when_used(fields: ConfigFields, num_layers: int) -> Windows:
    """Every layer, where `use_sliding_window` is set."""
    is_used = fields.flag("use_sliding_window")
    return _windows(fields, num_layers, lambda index: is_used)


def upper_layers(fields: ConfigFields, num_layers: int) -> Windows:
    """From layer `max_window_layers` on, where `use_sliding_window` is set."""
    is_used = fields.flag("use_sliding_window")
    first = fields.integer("max_window_layers", minimum=0)
    return _windows(fields, num_layers, lambda index: is_used and index >= first)


def alternating(fields: ConfigFields, num_layers: int) -> Windows:
    """All but every n-th layer, n being `sliding_window_pattern`."""
    key = "_sliding_window_pattern" if fields.has("_sliding_window_pattern") else "sliding_window_pattern"
    pattern = fields.integer(key)
    return _windows(fields, num_layers, lambda index: (index + 1) % pattern != 0)
