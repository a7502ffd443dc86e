"""Strict reading of a JSON object, field by field; every dialect's parser is built from this.

A value of the wrong type or out of range is refused by name. `true` is not a number and `2.0` is not a whole one.
JSON's null counts as absent. Fields nobody reads are ignored: clients add new ones every month.
"""

from __future__ import annotations

from typing import Any, NoReturn

import orjson

from tokenmill.errors import InvalidRequest

SHOWN_CHARACTERS = 60
JSON_NAMES = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string", list: "a list"}


def parse_object(body: bytes) -> dict[str, Any]:
    """orjson refuses NaN, Infinity, numbers beyond a double, lone surrogates and nesting deeper than 1024."""
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object", hint="see /docs")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    if value is None:
        return "null"
    return JSON_NAMES.get(type(value), "an object")


def shown(value: object) -> str:
    """A value as an error may quote it: short, whatever the client sent."""
    if isinstance(value, list | dict):
        return kind_of(value)
    text = orjson.dumps(value).decode() if not isinstance(value, str) else repr(value[:SHOWN_CHARACTERS])
    return text if len(text) <= SHOWN_CHARACTERS + 2 else text[:SHOWN_CHARACTERS] + "…"


def refuse(name: str, problem: str, hint: str | None = None) -> NoReturn:
    raise InvalidRequest(f"{name} {problem}", param=name, hint=hint)


class BodyFields:
    """One JSON object; `prefix` is its place in the body (`messages[2].`) for error messages."""

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def name(self, key: str) -> str:
        return self.prefix + key

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) is not int:
            refuse(self.name(key), f"must be a whole number, got {shown(value)}")
        if not low <= value <= high:
            refuse(self.name(key), f"must be between {low} and {high}, got {value}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float):
            refuse(self.name(key), f"must be a number, got {shown(value)}")
        if not low <= value <= high:
            refuse(self.name(key), f"must be between {low:g} and {high:g}, got {shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self.name(key), f"must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, max_length: int | None = None) -> str | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            refuse(self.name(key), f"must be a string, got {shown(value)}")
        if max_length is not None and len(value) > max_length:
            refuse(self.name(key), f"must be at most {max_length} characters long, got {len(value)}")
        return value

    def required_text(self, key: str) -> str:
        value = self.text(key)
        if value is None:
            refuse(self.name(key), "is required")
        return value

    def one_of(self, key: str, choices: tuple[str, ...]) -> str | None:
        value = self.text(key)
        if value is not None and value not in choices:
            refuse(self.name(key), f"must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    def items(self, key: str, max_items: int) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            refuse(self.name(key), f"must be a list, got {shown(value)}")
        if len(value) > max_items:
            refuse(self.name(key), f"takes at most {max_items} items, got {len(value)}")
        return value

    def object(self, key: str) -> BodyFields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            refuse(self.name(key), f"must be an object, got {shown(value)}")
        return BodyFields(value, f"{self.name(key)}.")

    def token_ids(self, key: str, max_items: int, vocab_size: int) -> list[int] | None:
        ids = self.items(key, max_items)
        if ids is not None:
            require_token_ids(ids, self.name(key), vocab_size)
        return ids

    def refuse_any(self, keys: tuple[str, ...], hint: str | None = None) -> None:
        """Known fields that cannot be honoured: anything but null and false is refused."""
        for key in keys:
            value = self.get(key)
            if value is not None and value is not False:  # 0 is neither
                refuse(self.name(key), "is not supported by this server", hint)


def require_token_ids(ids: list[Any], name: str, vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            refuse(name, f"must hold token ids between 0 and {vocab_size - 1}, got {shown(token_id)}")
