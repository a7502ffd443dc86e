"""Grammar of values in notations other than JSON: unquoted strings, Python literals, Gemma's notation.

Every constraint of a schema is either in the grammar or refused by name. Numbers are written alike in all notations, so
llguidance enforces their bounds from the JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenmill.text.speech.call_format import Values, write_value
from tokenmill.text.speech.lark_rules import (
    ANNOTATIONS,
    ANY_TEXT,
    LarkRules,
    json_value,
    quoted,
    refuse,
    regex_of,
    slashed,
)
from tokenmill.text.speech.schema_kinds import allowed_types, resolve

_TWO, _FOUR = "[0-9]{2}", "[0-9]{4}"
_DATE = f"{_FOUR}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9\-]+(\.[A-Za-z0-9\-]+)+",
}
_NEUTRAL = ANNOTATIONS | {"$schema", "$id", "$defs", "definitions", "x-guidance", "type", "nullable"}
_HANDLED = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_CONSTRAINTS = frozenset().union(*_HANDLED.values()) | {
    *("patternProperties", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "minProperties", "maxProperties"),
    *("unevaluatedProperties", "unevaluatedItems", "prefixItems", "additionalItems"),
}
_ANY = ""  # key of the rule for any value, which is recursive
PLAIN_STRING = "[^'\\\\\\n\\r]"  # inside single quotes, without escapes


def string_body(schema: Mapping[str, Any], characters: str = "(?s:.)") -> str:
    """Return a terminal for the content of a string with this schema."""
    require_handled(schema, "string")
    parts = []
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    if minimum or maximum is not None:
        parts.append(f"/{characters}{{{int(minimum)},{'' if maximum is None else int(maximum)}}}/")
    if "pattern" in schema:
        parts.append(f"/{_unanchored(str(schema['pattern']))}/")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            refuse(f"the format {schema['format']!r} of a string can't be enforced in this model's tool calls")
        parts.append(f"/{_FORMATS[schema['format']].replace('/', chr(92) + '/')}/")
    if characters != "(?s:.)" or not parts:
        parts.append(f"/{characters}*/" if characters != "(?s:.)" else ANY_TEXT)
    return " & ".join(parts)


def _unanchored(pattern: str) -> str:
    """Return a JSON schema's pattern, which may match anywhere, as a regex for the whole text."""
    anchored = pattern.startswith("^") or (pattern.endswith("$") and not pattern.endswith("\\$"))
    if anchored and "|" in re.sub(r"\([^()]*\)|\[[^\]]*\]", "", pattern):
        refuse(f"the pattern {pattern!r} mixes anchors and alternatives: put the alternatives in parentheses")
    before, after = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        before, pattern = "", pattern[1:]
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        after, pattern = "", pattern[:-1]
    return f"{before}({slashed(pattern)}){after}"


def require_handled(schema: Mapping[str, Any], kind: str) -> None:
    """Refuse a keyword that the grammar would otherwise ignore."""
    for key in schema:
        if key in _CONSTRAINTS and key not in _HANDLED[kind] and _concerns(key, kind):
            refuse(f"the keyword {key!r} of a tool's parameters can't be enforced in this model's tool calls")


def _concerns(key: str, kind: str) -> bool:
    """Return whether a keyword constrains values of this type."""
    others = {name for name, keys in _HANDLED.items() if key in keys}
    return not others or kind in others


class NotationRules:
    """Rules for values in Python's or Gemma's notation. `root`: the tool's parameters, with their definitions."""

    def __init__(self, rules: LarkRules, values: Values, root: Any) -> None:
        self._rules = rules
        self._values: Values = "gemma" if values == "gemma" else "python"
        self._root = root
        self._is_python = self._values == "python"
        self._separator = ", " if self._is_python else ","
        self._of_ref: dict[str, str] = {}

    def value(self, schema: Any) -> str:
        """Return the name of a rule for a value of this schema."""
        return self._any() if schema is True or schema == {} else self._rules.add("value", self._expression(schema))

    def _any(self) -> str:
        if _ANY not in self._of_ref:
            self._of_ref[_ANY] = name = self._rules.reserve("any")
            self._rules.define(name, self._expression({}))
        return self._of_ref[_ANY]

    def _expression(self, schema: Any) -> str:
        if schema is False:
            refuse("a parameter's schema is false: no value satisfies it")
        if not isinstance(schema, Mapping):
            schema = {}
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema["$ref"])
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return " | ".join(self._rules.fixed(write_value(self._values, value)) for value in values)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                return self._combined(key, schema)
        types = allowed_types(schema, self._root)
        kinds = ["number" if name == "integer" and "number" not in types else name for name in sorted(types)]
        return " | ".join(dict.fromkeys(self._typed(kind, schema, types) for kind in kinds if kind != "integer"))

    def _referred(self, ref: str) -> str:
        if ref not in self._of_ref:
            found = resolve(ref, self._root)
            if found is None:
                refuse(f"the reference {ref!r} in a tool's parameters does not exist")
            self._of_ref[ref] = name = self._rules.reserve("ref")
            self._rules.define(name, self._expression(found))
        return self._of_ref[ref]

    def _combined(self, key: str, schema: Mapping[str, Any]) -> str:
        options = schema[key]
        others = set(schema) - _NEUTRAL - {key}
        if others or (key == "allOf" and len(options) != 1):
            refuse(f"{key!r} of a tool's parameters beside other keywords can't be enforced in this model's tool calls")
        if key == "oneOf":
            kinds = [allowed_types(option, self._root) for option in options]
            if any(one & other for index, one in enumerate(kinds) for other in kinds[:index]):
                refuse("the branches of 'oneOf' are not known to exclude each other; 'anyOf' can be enforced")
        return " | ".join(self.value(option) for option in options)

    def _typed(self, kind: str, schema: Mapping[str, Any], types: frozenset[str]) -> str:
        require_handled(schema, kind)
        match kind:
            case "string":
                return self._string(schema)
            case "number":
                kept = {key: schema[key] for key in _HANDLED["number"] & schema.keys() if key != "format"}
                return json_value({"type": "number" if "number" in types else "integer", **kept})
            case "boolean":
                return '"True" | "False"' if self._is_python else '"true" | "false"'
            case "null":
                return '"None"' if self._is_python else '"null"'
            case "array":
                return self._array(schema)
        return self._object(schema)

    def _string(self, schema: Mapping[str, Any]) -> str:
        if not self._is_python:
            quote = '<|"|>'
            return f"{self._rules.fixed(quote)} {self._rules.until(string_body(schema), quote)}"
        if {"minLength", "maxLength", "pattern", "format"} & schema.keys():
            body = self._rules.add("BODY", string_body(schema, PLAIN_STRING))
            return self._rules.add("QUOTED", f'"\'" {body} "\'"')
        # Escapes that can be invalid (\\x, \\u, octal numbers) are excluded.
        escape = r"\\[^\nuUxN0-7]"
        return self._rules.add("QUOTED", rf"/'([^'\\\n]|{escape})*'/ | /\"([^\"\\\n]|{escape})*\"/")

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items", True))
        minimum, maximum = int(schema.get("minItems", 0)), schema.get("maxItems")
        opening, closing, comma = quoted("["), quoted("]"), quoted(self._separator)
        if maximum is not None and int(maximum) < max(1, minimum):
            return f"{opening} {closing}"
        rest = f"({comma} {item}){{{max(0, minimum - 1)},{'' if maximum is None else int(maximum) - 1}}}"
        inner = f"{item} {rest}"
        return f"{opening} {inner} {closing}" if minimum else f"{opening} ({inner})? {closing}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties") or {}
        required = [name for name in schema.get("required") or [] if isinstance(name, str)]
        names = [*required, *(name for name in properties if name not in required)]
        members = [partial(self._member, name, properties.get(name, True)) for name in names]
        beyond = schema.get("additionalProperties", not properties)
        extra = partial(self._free_member, names, beyond) if beyond is not False else None
        inner = self._rules.members(members, len(required), self._separator, extra)
        return f'"{{" {inner} "}}"'

    def _member(self, name: str, schema: Any, before: str) -> str:
        return f"{quoted(before + self._written_key(name))} {self.value(schema)}"

    def _free_member(self, names: list[str], schema: Any, before: str) -> str:
        return f"{self._free_key(names, before)} {self.value(schema)}"

    def _written_key(self, name: str) -> str:
        if self._is_python:
            return f"{name!r}: "
        if not re.fullmatch(r"[^\s:=,{}\[\]()\"'<>]+", name):
            refuse(f"the property {name!r} can't be written in this model's tool calls")
        return f"{name}:"

    def _free_key(self, names: list[str], before: str) -> str:
        quote, mark = ("'", ": ") if self._is_python else ("", ":")
        taken = "|".join(regex_of(before + quote + name + quote + mark) for name in names)
        key = f"/{before}{quote}[A-Za-z_][A-Za-z0-9_]{{0,63}}{quote}{mark}/"
        return self._rules.add("KEY", f"{key} & ~/({taken})/" if taken else key)


def is_plain_object(schema: Mapping[str, Any]) -> bool:
    """Return whether an object's schema has no constraints but `properties`, `required` and `additionalProperties`."""
    return not set(schema) - _NEUTRAL - _HANDLED["object"]
