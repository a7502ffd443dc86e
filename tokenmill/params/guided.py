"""A constraint that an answer must satisfy."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from tokenmill.params.checks import refuse, require_unicode

MAX_GUIDED_CHOICES = 10_000  # texts in a `choice` constraint
MAX_GUIDED_BYTES = 2 << 20

GuidedKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


class Guided(msgspec.Struct, frozen=True):
    """A constraint on the answer: a JSON schema, any JSON object, a regex, one of several texts, or a grammar.

    `text` is the schema, regex or grammar itself; for `choice` a JSON list of strings. `owner` is set by the engine to
    the tenant of the request: tenants share no compiled grammars, because the time of a compilation would tell which
    ones others use.
    """

    kind: GuidedKind
    text: str = ""
    owner: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GuidedKind):
            refuse("guided.kind", f"must be one of {', '.join(get_args(GuidedKind))}, got {self.kind!r}")
        is_empty = self.kind == "json_object"
        if not isinstance(self.text, str) or (self.text == "") is not is_empty:
            refuse("guided.text", f"must {'' if is_empty else 'not '}be empty for {self.kind}")
        require_unicode("guided.text", self.text)
        if len(self.text.encode()) > MAX_GUIDED_BYTES:
            refuse("guided.text", f"must be at most {MAX_GUIDED_BYTES >> 10} KiB long")

    @classmethod
    def schema(cls, schema: dict[str, Any] | bool) -> Guided:
        return cls("json_schema", _as_json(schema))

    @classmethod
    def json(cls, schema: dict[str, Any] | str | None = None) -> Guided:
        """Return a constraint to JSON: by a schema, given as a dict or as text, or to any object."""
        if schema is None:
            return cls("json_object")
        return cls("json_schema", schema) if isinstance(schema, str) else cls.schema(schema)

    @classmethod
    def regex(cls, pattern: str) -> Guided:
        """Return a constraint to answers that match a regular expression completely."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Guided:
        """Return a constraint by a grammar: llama.cpp's GBNF (`root ::= ...`) or Lark (`start: ...`)."""
        return cls("gbnf" if is_gbnf(text) else "lark", text)

    @classmethod
    def choice(cls, texts: list[str]) -> Guided:
        """Return a constraint to one of these texts."""
        return cls("choice", _as_json(texts))


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is GBNF (llama.cpp: `root ::= ...`) and not Lark (`start: ...`)."""
    return re.search(r"^\s*[A-Za-z][\w-]*\s*::=", text, re.MULTILINE) is not None


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        refuse("guided.text", f"can't be written as JSON: {error}")
