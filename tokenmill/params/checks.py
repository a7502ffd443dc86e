"""Checks of single values: each raises `InvalidRequest` with the parameter's name. `true` is not accepted as a
number."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from tokenmill.errors import InvalidRequest

MAX_SHOWN_CHARACTERS = 200  # of a value in an error message


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


def require_list(name: str, value: Any, max_entries: int | None = None) -> None:
    """Require a list or tuple; a string, which is a sequence too, is refused."""
    if not isinstance(value, list | tuple):
        refuse(name, f"must be a list, got {shown(value)}")
    if max_entries is not None and len(value) > max_entries:
        refuse(name, f"takes at most {max_entries} entries, got {len(value)}")


def require_texts(name: str, value: Any, max_entries: int, max_length: int) -> None:
    require_list(name, value, max_entries)
    for text in value:
        if not isinstance(text, str) or not text:
            refuse(name, "must contain only non-empty strings")
        if len(text) > max_length:
            refuse(name, f"strings must be at most {max_length} characters long")
        require_unicode(name, text)


def require_unicode(name: str, text: str) -> None:
    """Require a string that can be encoded: Python strings may contain lone surrogates, which can't be sent."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        refuse(name, f"contains the lone surrogate {text[error.start]!r}")


def shown(value: object) -> str:
    """Return a short repr of any value; Python refuses to format integers with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"
