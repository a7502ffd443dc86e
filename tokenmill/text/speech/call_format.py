"""A tool-call format as one row of data: how a model family writes calls.

    CallFormat("qwen3-coder", call="<tool_call>\\n<function=§name>\\n§args</function>\\n</tool_call>", join="\\n",
               arg="<parameter=§key>\\n§value\\n</parameter>\\n", values="raw")

A row contains texts with slots (§name, §args …). Three things derive from it: the writer (`write`, here), which
reproduces byte for byte what the family's chat template writes; the reader (`reader.py`); and the grammar
(`grammar.py`). The writer identifies a row: a template's format is the row that reproduces what the template itself
writes (`detect.py`).

Slots of `call`: §name, §args, §id, §index. Slots of `arg`, one argument: §key, §value, §type (its JSON type),
§is_string (true or false). Without `arg` the arguments are one JSON object.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tokenmill.types import ToolCall

Values = Literal["json", "raw", "raw_python", "nested", "python", "gemma"]
Ids = Literal["call", "nine", "functions"]

CDATA = ("<![CDATA[", "]]>")
_SLOT = re.compile("§(name|args|id|index|key|value|type|is_string)")
_ALPHANUMERIC = string.ascii_letters + string.digits
JSON_TYPE_NAMES = frozenset(("string", "number", "boolean", "null", "array", "object"))
_JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Slot:
    """A part of a row's text that differs between calls."""

    name: str


Pieces = tuple[str | Slot, ...]


def pieces(text: str) -> Pieces:
    """Return the fixed texts and slots of a row's text in order; no fixed text is empty."""
    parts = _SLOT.split(text)
    found: list[str | Slot] = [Slot(part) if index % 2 else part for index, part in enumerate(parts)]
    return tuple(piece for piece in found if piece)


@dataclass(frozen=True)
class CallFormat:
    """One row. Its reader and its grammar derive from the same texts as its writer."""

    name: str
    call: str
    join: str = ""  # between two calls
    section: tuple[str, str] = ("", "")  # around all calls
    arg: str | None = None  # one argument; None: the arguments are a JSON object
    arg_join: str = ""
    # raw: strings without quotes, others in JSON; raw_python: lists and objects in Python; nested: lists and objects as
    # arguments inside the argument, the items of a list with the key `item`
    values: Values = "json"
    has_cdata: bool = False  # strings with `<`, `&` or a line break are put into a CDATA block
    first_index: int = 0
    ids: Ids = "call"
    header: str = ""  # before each call, in formats made of messages: read as a header, not as part of the call
    prompt: str = ""  # the beginning of a call that prompts end with
    args_indent: tuple[int, int] | None = None  # JSON arguments over several lines: indent per level, of all lines
    also_opens: tuple[str, ...] = ()  # other texts with which models of this format begin a call
    mentions: tuple[str, ...] = ()  # texts in templates of this format that write no calls; (): its markers
    ignored: tuple[str, ...] = ()  # markers around an answer that are not part of its text

    @cached_property
    def call_pieces(self) -> Pieces:
        return pieces(self.call)

    @cached_property
    def arg_pieces(self) -> Pieces:
        return pieces(self.arg or "")

    @cached_property
    def object_keys(self) -> ObjectKeys | None:
        """The keys of a call that is one JSON object; None for all other shapes."""
        return _object_keys(self.call) if self.arg is None else None

    @property
    def strings_are_raw(self) -> bool:
        """Return whether a string argument is written without quotes and escapes."""
        return self.values in ("raw", "raw_python", "nested", "gemma")

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the calls as a model of this family writes them."""
        written = [self._written(call, index) for index, call in enumerate(calls, start=self.first_index)]
        return self.section[0] + self.join.join(written) + self.section[1]

    def _written(self, call: ToolCall, index: int) -> str:
        filled = {"name": call.name, "id": call.id, "index": str(index), "args": self._arguments(call)}
        return _filled(pieces(self.header) + self.call_pieces, filled)

    def _arguments(self, call: ToolCall) -> str:
        arguments = json.loads(call.arguments or "{}")
        if self.args_indent is not None:
            level, margin = self.args_indent
            return json.dumps(arguments, ensure_ascii=False, indent=level).replace("\n", "\n" + " " * margin)
        if self.arg is None:
            return to_json(arguments)
        return self.arg_join.join(self._argument(key, value) for key, value in self._written_items(arguments))

    def _argument(self, key: str, value: Any) -> str:
        filled = {
            "key": key,
            "value": self._value(value),
            "type": _JSON_TYPES.get(type(value), "null"),
            "is_string": "true" if isinstance(value, str) else "false",
        }
        return _filled(self.arg_pieces, filled)

    def _written_items(self, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in arguments.items() if self.values != "nested" or value is not None]

    def _value(self, value: Any) -> str:
        if self.values == "nested" and isinstance(value, dict):
            return "".join(self._argument(key, inner) for key, inner in self._written_items(value))
        if self.values == "nested" and isinstance(value, list):
            return "".join(self._argument("item", inner) for inner in value)
        written = write_value(self.values, value)
        if self.has_cdata and isinstance(value, str) and any(char in value for char in "<&\n"):
            return CDATA[0] + written + CDATA[1]
        return written

    # ── ids ──────────────────────────────────────────────────────────────────────────────────────────────

    def new_id(self, name: str, index: int) -> str:
        """Return an id for a call without one, in the form that the family's template accepts in the history."""
        match self.ids:
            case "functions":
                return f"functions.{name}:{index}"
            case "nine":
                return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
            case "call":
                return "call_" + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(24))

    def history_id(self, call_id: str) -> str:
        """Return a client's call id in the form that the template accepts; the mapping is deterministic."""
        if self.ids != "nine" or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return call_id
        number = int.from_bytes(call_id.encode("utf-8", "replace"), "big") % (62**9 - 57)
        digits = ""
        for _ in range(9):
            number, digit = divmod(number, 62)
            digits += _ALPHANUMERIC[digit]
        return digits


def _filled(template: Pieces, values: dict[str, str]) -> str:
    return "".join(piece if isinstance(piece, str) else values[piece.name] for piece in template)


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_value(values: Values, value: Any) -> str:
    """Return one argument's value in a notation."""
    if values == "gemma":
        return _gemma(value)
    if values == "python":
        return repr(value)
    if values == "json" or not isinstance(value, str):
        is_python = values == "raw_python" and isinstance(value, list | dict)
        return repr(value) if is_python else to_json(value)
    return value


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    return to_json(value)


@dataclass(frozen=True)
class ObjectKeys:
    """A call that is one JSON object: the text around it, and the keys of its parts.

    `name` is None where the name itself is the key of the arguments.
    """

    head: str
    tail: str
    name: str | None
    id: str | None
    template: str  # the object with its slots


def _object_keys(call: str) -> ObjectKeys | None:
    start = call.find("{")
    if start < 0 or "§args" not in call[start:] or "§name" not in call[start:]:
        return None
    end = call.rindex("}") + 1
    template = call[start:end]
    try:
        example = json.loads(template.replace("§args", '"§args"'))
    except ValueError:
        return None
    keys = {value: key for key, value in example.items()}
    return ObjectKeys(
        head=call[:start],
        tail=call[end:],
        name=keys.get("§name"),
        id=keys.get("§id"),
        template=template,
    )
