"""Parsing of durations: `5m`, `1h30m`, `90` (seconds), `-1` (forever)."""

from __future__ import annotations

import re

UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
FOREVER_S = 100 * 365 * 86_400  # longer than any server runs
_PART = r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([+-]?)(?:((?:{_PART})+)|(\d+(?:\.\d+)?))")


def seconds_of(given: object) -> float | None:
    """Return the seconds of a duration, given as text or as a number of seconds; None if it is not a duration."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    found = _DURATION.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return None
    sign, parts, plain = found[1], found[2], found[5]
    size = float(plain) if plain else sum(float(number) * UNITS_S[unit] for number, unit in re.findall(_PART, parts))
    return -size if sign == "-" else size


def keep_alive_of(seconds: float) -> float | None:
    """Return how many seconds an idle model stays in memory; None (forever) for negative values and for more than a
    hundred years."""
    return seconds if 0 <= seconds < FOREVER_S else None
