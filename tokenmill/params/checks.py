"""How a knob's value is looked at: what is wrong with it is said with the knob's name. `true` is no number."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tokenmill.errors import InvalidRequest


def refuse(name: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"{name} {problem}", param=name)


def require_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(name, f"must be a finite number, got {value!r}")
    if not low <= value <= high:
        refuse(name, f"must be between {low:g} and {high:g}, got {value!r}")


def require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        refuse(name, f"must be between {low} and {high}, got {value!r}")


def require_list(name: str, value: Any, most: int | None = None) -> None:
    """A text would pass for a list of its characters."""
    if not isinstance(value, list | tuple):
        refuse(name, f"must be a list, got {value!r}")
    if most is not None and len(value) > most:
        refuse(name, f"takes at most {most} entries, got {len(value)}")


def require_texts(name: str, value: Any, most: int, longest: int) -> None:
    require_list(name, value, most)
    for text in value:
        if not isinstance(text, str) or not text:
            refuse(name, "must hold non-empty strings")
        if len(text) > longest:
            refuse(name, f"strings must be at most {longest} characters long")
