"""Grammar of a call's arguments in every notation: each parameter at most once, in any order, the required ones always.

    JSON      {"city": "Paris", "days": 3}
    tagged    <parameter=city>\\nParis\\n</parameter>\\n<parameter=days>\\n3\\n</parameter>\\n
    fields    city='Paris', days=3

A JSON object with further keywords (`anyOf`, `patternProperties` …) is left to llguidance, which keeps the schema's
order of keys. Parameters that a tool does not declare are excluded unless its schema allows additional properties.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tokenmill.text.speech.call_format import CDATA, CallFormat, Slot, to_json, write_value
from tokenmill.text.speech.lark_rules import LAYOUT, LarkRules, json_value, quoted, refuse, regex_of
from tokenmill.text.speech.markers import opening_marker
from tokenmill.text.speech.schema_kinds import allowed_types, resolve
from tokenmill.text.speech.value_rules import NotationRules, is_plain_object, require_handled, string_body
from tokenmill.types import Tool

_STRING = frozenset(("string",))
_LABELS = {"integer": "number", "number": "number", "boolean": "boolean", "null": "null", "array": "array"}
_FLEXIBLE = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
_LITERALS = {"boolean": '("true" | "false" | "True" | "False")', "null": '("null" | "None")'}  # templates write both
_MAX_DEPTH = 12
_NO_TOOL = Tool(name="")  # for values inside an argument
_NARROWING = frozenset(("enum", "const", "not", "anyOf", "oneOf", "allOf", "$ref"))
_FREE_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}"


class ArgumentRules:
    """Rules for the arguments of one format's calls."""

    def __init__(self, rules: LarkRules, row: CallFormat) -> None:
        self._rules = rules
        self._row = row
        self._depth = 0

    def of(self, tool: Tool) -> str:
        """Return the right-hand side for the arguments of a call of this tool."""
        schema = _resolved(tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}})
        if self._row.arg is None:
            return self._json(tool, schema)
        if not is_plain_object(schema):
            refuse(f"the schema of the tool {tool.name!r} can't be enforced in this model's tool calls")
        properties, required = _properties(schema)
        members = [partial(self._argument, tool, name, value, schema) for name, value in properties.items()]
        extra = None
        beyond = schema.get("additionalProperties", not schema.get("properties") and "properties" not in schema)
        if beyond is not False and self._row.values != "nested":  # there the name occurs twice and must be fixed
            extra = partial(self._free_argument, list(properties), beyond, schema)
        return self._rules.members(members, len(required), self._row.arg_join, extra)

    # ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────

    def _json(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        properties, required = _properties(schema)
        is_free = "properties" not in schema or schema.get("additionalProperties", False) is not False
        if self._row.args_indent is not None:
            return json_value({**schema, "x-guidance": {**LAYOUT, **_FLEXIBLE}})
        if is_free or not is_plain_object(schema):
            return json_value(schema)
        members = [partial(self._json_argument, tool, name, value, schema) for name, value in properties.items()]
        inner = self._rules.members(members, len(required), ", ", None)
        return f'"{{" {inner} "}}"'

    def _json_argument(self, tool: Tool, name: str, value: Any, root: Mapping[str, Any], before: str) -> str:
        grammar = _input_grammar(tool, name)
        written = f'"\\"" {grammar} "\\""' if grammar else json_value(_input_schema(tool, name, value), root)
        return f"{quoted(before + to_json(name) + ': ')} {written}"

    # ── one argument of a tagged call, or one field ──────────────────────────────────────────────────────

    def _argument(self, tool: Tool, name: str, value: Any, root: Mapping[str, Any], before: str) -> str:
        self._require_writable(name)
        grammar = _input_grammar(tool, name)
        value = _input_schema(tool, name, value)
        if self._row.values in ("python", "gemma"):
            return self._filled(before, name, "", self._field_value(value, root, grammar))
        if grammar:
            return self._filled(before, name, "string", f"{grammar} {self._rules.fixed(self._after_value(name))}")
        options = self._options(value, root, self._after_value(name))
        return " | ".join(self._filled(before, name, label, written) for label, written in options)

    def _field_value(self, value: Any, root: Mapping[str, Any], grammar: str) -> str:
        if not grammar:
            return NotationRules(self._rules, self._row.values, root).value(value)
        quote = self._rules.fixed('<|"|>') if self._row.values == "gemma" else '"\\""'
        return f"{quote} {grammar} {quote}"

    def _free_argument(self, names: list[str], value: Any, root: Mapping[str, Any], before: str) -> str:
        """Return the right-hand side for an argument whose name is none of the given ones."""
        taken = "|".join(map(regex_of, names))
        key = self._rules.add("KEY", f"/{_FREE_KEY}/ & ~/({taken})/" if taken else f"/{_FREE_KEY}/")
        if self._row.values in ("python", "gemma"):
            written = NotationRules(self._rules, self._row.values, root).value(value)
            return self._filled(before, None, "", written, key)
        options = self._options(value, root, self._after_value(""))
        return " | ".join(self._filled(before, None, label, written, key) for label, written in options)

    def _filled(self, before: str, name: str | None, label: str, value: str, key: str = "") -> str:
        """Return an argument with its slots filled; `value` includes the text after the value."""
        parts, text = [], before
        for piece in self._row.arg_pieces:
            if isinstance(piece, str):
                text += piece
            elif piece.name == "key" and name is None:
                parts += [self._rules.fixed(text), key]
                text = ""
            elif piece.name == "value":
                break
            else:
                text += {"key": name or "", "type": label, "is_string": to_json(label == "string")}[piece.name]
        return " ".join(part for part in (*parts, self._rules.fixed(text), value) if part)

    def _after_value(self, name: str) -> str:
        pieces = self._row.arg_pieces
        after = pieces[pieces.index(Slot("value")) + 1 :]
        return "".join(piece if isinstance(piece, str) else name for piece in after)

    def _options(self, schema: Any, root: Mapping[str, Any], closer: str) -> Iterator[tuple[str, str]]:
        """Yield the ways to write a value: the format's name of its JSON type, and the value with the text after it."""
        for option in _branches(schema, root):
            types = allowed_types(option, root)
            if types == _STRING:
                yield "string", self._raw_string(option, closer)
                continue
            labels = sorted({_LABELS.get(name, "object") for name in types})
            if not self._names_types() or len(labels) == 1:
                yield labels[0] if len(labels) == 1 else "object", self._other(option, root, closer)
                continue
            for label in labels:
                narrowed = {"allOf": [option, {"type": label}]}
                yield label, self._other(narrowed, root, closer)

    def _names_types(self) -> bool:
        return any(isinstance(piece, Slot) and piece.name == "type" for piece in self._row.arg_pieces)

    def _other(self, schema: Any, root: Mapping[str, Any], closer: str) -> str:
        if self._row.values == "raw_python" and allowed_types(schema, root) & {"array", "object"}:
            value = NotationRules(self._rules, "python", root).value(schema)
        elif self._row.values == "nested" and allowed_types(schema, root) & {"array", "object"}:
            value = self._nested(schema, root)
        else:
            kind = schema.get("type") if isinstance(schema, Mapping) and not _NARROWING & schema.keys() else None
            value = _LITERALS.get(str(kind)) or json_value(schema, root)
        return f"{value} {self._rules.fixed(closer)}"

    def _nested(self, schema: Any, root: Mapping[str, Any]) -> str:
        """Return a list or an object whose items are written as arguments."""
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            schema = resolve(schema["$ref"], root)
        types = allowed_types(schema, root)
        self._depth += 1
        if self._depth > _MAX_DEPTH or not isinstance(schema, Mapping) or len(types) != 1 or _NARROWING & schema.keys():
            refuse("a list or object with a mixed or recursive schema can't be enforced in this model's tool calls")
        if types == {"array"}:
            require_handled(schema, "array")
            item = self._rules.add("item", self._argument(_NO_TOOL, "item", schema.get("items", True), root, ""))
            rule = f"{item}{{{int(schema.get('minItems', 0))},{schema.get('maxItems', '')}}}"
        else:
            require_handled(schema, "object")
            properties, required = _properties(schema)
            members = [partial(self._argument, _NO_TOOL, name, value, root) for name, value in properties.items()]
            rule = self._rules.members(members, len(required), "", None)
        self._depth -= 1
        return self._rules.add("nested", rule)

    def _raw_string(self, schema: Mapping[str, Any], closer: str) -> str:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return "(" + " | ".join(self._rules.fixed(write_value("raw", one) + closer) for one in values) + ")"
        body = string_body(schema)
        if any(self._rules.is_control(part) for part in self._rules.split(closer)):
            return self._rules.until(body, closer)
        if self._row.values == "nested":  # the mark before every tag can't be part of a string
            return self._rules.until(f"{body} & ~/(?s:.*){regex_of(closer.partition('<')[0])}(?s:.*)/", closer)
        if self._row.has_cdata:
            wrapped = f"{quoted(CDATA[0])} {self._rules.until(body, CDATA[1] + closer)}"
            plain = self._rules.until(rf"{body} & /[^<&\n]*/", closer)
            return f"({wrapped} | {plain})"
        # For the reader, a closing tag ends the value if another argument or the end of the call follows it.
        return self._rules.until(f"{body} & ~/(?s:.*){self._value_end}(?s:.*)/", closer)

    @property
    def _value_end(self) -> str:
        row = self._row
        following = (str(row.arg_pieces[0]).strip(), opening_marker(row.call.rpartition("§args")[2]))
        options = "|".join(regex_of(text) for text in following if text)
        return rf"{regex_of(self._after_value('').strip())}\s*({options})"

    def _require_writable(self, name: str) -> None:
        pieces = self._row.arg_pieces
        key_index = next(n for n, piece in enumerate(pieces) if isinstance(piece, Slot) and piece.name == "key")
        following = str(pieces[key_index + 1]).strip()[:1]
        is_bare = self._row.values in ("python", "gemma")
        if not re.fullmatch(r"[^\s:=,{}\[\]()\"'<>]+" if is_bare else r"[^\n]+", name) or following in name:
            refuse(f"the property {name!r} can't be written in this model's tool calls")


def _input_grammar(tool: Tool, name: str) -> str:
    """Return the right-hand side for the input of a custom tool that has a Lark grammar; "" for other arguments."""
    grammar = tool.input_grammar
    if tool.kind != "custom" or grammar is None or name != "input" or grammar.kind != "lark":
        return ""
    return f"%lark {{\n{grammar.text}\n}}"


def _input_schema(tool: Tool, name: str, value: Any) -> Any:
    """Return the schema of a parameter; for the input of a custom tool with a regex, a string that matches it."""
    grammar = tool.input_grammar
    if tool.kind != "custom" or grammar is None or name != "input" or grammar.kind != "regex":
        return value
    return {"type": "string", "pattern": f"^({grammar.text})$"}


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition that parameters refer to, if they are a `$ref`; otherwise the parameters."""
    if isinstance(schema.get("$ref"), str):
        found = resolve(schema["$ref"], schema)
        if isinstance(found, Mapping):
            kept = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
            return {**found, **kept}
    return schema


def _properties(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return all properties, the required ones first, and the names of the required ones."""
    declared = schema.get("properties") or {}
    required = list(dict.fromkeys(name for name in schema.get("required") or [] if isinstance(name, str)))
    names = [*required, *(name for name in declared if name not in required)]
    return {name: declared.get(name, True) for name in names}, required


def _branches(schema: Any, root: Mapping[str, Any]) -> Iterator[Any]:
    """Split a schema into alternatives that allow either only strings or no strings."""
    types = allowed_types(schema, root)
    if not types & _STRING:
        yield schema
    elif not isinstance(schema, Mapping):
        yield from ({"type": "string"}, {"type": sorted(types - _STRING)})
    elif isinstance(schema.get("$ref"), str):
        yield from _branches(resolve(schema["$ref"], root), root)
    elif options := next(
        (schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)), None
    ):
        if isinstance(schema.get("allOf"), list) and len(options) != 1:
            refuse("'allOf' of strings can't be enforced in this model's tool calls")
        for option in options:
            yield from _branches(option, root)
    elif isinstance(schema.get("enum"), list):
        texts = [value for value in schema["enum"] if isinstance(value, str)]
        others = [value for value in schema["enum"] if not isinstance(value, str)]
        yield {"enum": texts}
        if others:
            yield {"enum": others}
    elif types == _STRING:
        yield schema
    else:
        yield {**schema, "type": "string"}
        yield {**schema, "type": sorted(types - _STRING)}
