"""Strict access to a configuration: a value of an unexpected type is refused by name, never guessed.

`ConfigFields` looks a key up in the file, then in the family's defaults (those of `transformers`). A key in neither is
an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from tokenmill.errors import UnsupportedModel

MAX_INT = 2**40  # larger than any real size; protects later arithmetic from absurd values


class ConfigFields:
    def __init__(self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.values = values
        self.source = source  # named in errors: "llama", "model.gguf (qwen2)"
        self.defaults = defaults or {}

    def refuse(self, problem: str, *, hint: str | None = None) -> NoReturn:
        raise UnsupportedModel(f"{self.source}: {problem}", hint=hint)

    def has(self, key: str) -> bool:
        """Return whether the file itself (not the defaults) has a value for the key."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.defaults.get(key)

    def _wrong(self, key: str, value: Any, expected: str) -> NoReturn:
        shown = repr(value)
        self.refuse(f"{key} is {shown[:80]}, expected {expected}" if value is not None else f"{key} is missing")

    def integer(self, key: str, *, minimum: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_INT:
            self._wrong(key, value, f"an integer of at least {minimum}")
        return value

    def integer_or_none(self, key: str, *, minimum: int = 1) -> int | None:
        return None if self.get(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str) -> float:
        value = self.get(key)
        if not _is_number(value):
            self._wrong(key, value, "a number")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            self._wrong(key, value, "a number above zero")
        return value

    def positive_or_none(self, key: str) -> float | None:
        return None if self.get(key) is None else self.positive(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self._wrong(key, value, "a string")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count or not all(_is_number(item) for item in value):
            self._wrong(key, value, f"a list of {count} numbers")
        return tuple(float(item) for item in value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers; the file may also have a single integer or none."""
        value = self.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            self._wrong(key, value, "integers")
        return tuple(cast(list[int], items))

    def strings(self, key: str, count: int) -> tuple[str, ...] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(isinstance(item, str) for item in value):
            self._wrong(key, value, f"a list of {count} strings")
        return tuple(value)

    def section(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            self._wrong(key, value, "an object")
        return value


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # excludes NaN, infinity and integers too large for a float
