"""Quantities as people read them: 840 ms, 32 s, 5 min, 1 request, 1,200 tokens."""

from __future__ import annotations

import math


def duration(seconds: float | None) -> str:
    """A time in the unit that keeps it short, with two or three digits."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 or seconds == 0 else f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def counted(number: int, thing: str) -> str:
    """Return a count with its noun, in the singular for one."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
