"""Checks of single values: each raises `InvalidRequest` that names the parameter; `true` is no number."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tokenmill.errors import InvalidRequest

SHOWN_CHARACTERS = 200  # of a value in an error


def refuse(name: str, problem: str) -> NoReturn:
    """Raise InvalidRequest for a parameter."""
    raise InvalidRequest(f"{name} {problem}", param=name)


def require_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        refuse(name, f"must be a finite number, got {shown(value)}")
    if not low <= value <= high:
        refuse(name, f"must be between {low:g} and {high:g}, got {shown(value)}")


def require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, f"must be an integer, got {shown(value)}")
    if not low <= value <= high:
        refuse(name, f"must be between {low} and {high}, got {shown(value)}")


def require_list(name: str, value: Any, most: int | None = None) -> None:
    """Require a list or tuple; a string, which is a sequence too, is refused."""
    if not isinstance(value, list | tuple):
        refuse(name, f"must be a list, got {shown(value)}")
    if most is not None and len(value) > most:
        refuse(name, f"takes at most {most} entries, got {len(value)}")


def require_texts(name: str, value: Any, most: int, longest: int) -> None:
    require_list(name, value, most)
    for text in value:
        if not isinstance(text, str) or not text:
            refuse(name, "must hold non-empty strings")
        if len(text) > longest:
            refuse(name, f"strings must be at most {longest} characters long")
        require_unicode(name, text)


def require_unicode(name: str, text: str) -> None:
    """Require a string that can be encoded: Python's strings may hold lone surrogates, which can't be sent anywhere."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        refuse(name, f"holds the lone surrogate {text[error.start]!r}")


def shown(value: object) -> str:
    """Return a short repr of any value; Python refuses to format integers with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
