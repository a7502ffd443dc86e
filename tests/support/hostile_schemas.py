"""Hostile schemas, regexes and grammars: deep, huge, ambiguous, self-referential, or exponentially large."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from tokenmill.params import Guided


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _crossed_alternatives() -> dict[str, Any]:
    """Build ten times ten alternatives that must all hold at once: 10 ** 10 combinations."""
    branch = [
        {"anyOf": [{"properties": {f"p{i}": {"const": j}}, "required": [f"p{i}"]} for j in range(10)]}
        for i in range(10)
    ]
    return {"allOf": branch}


def _doubling_rules(count: int) -> str:
    rules = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(count))
    return f'start: a0\n{rules}\na{count}: "x"'


def _doubling_terminals(count: int) -> str:
    names = [f"T{chr(65 + i)}" for i in range(count)]
    rules = "\n".join(f"{a}: {b} {b}" for a, b in pairwise(names))
    return f'start: {names[0]}\n{rules}\n{names[-1]}: "aaaaaaaa"'


def _many(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


HOSTILE: dict[str, Guided] = {
    "schema nested 120 deep": Guided.schema(_nested(120)),
    "schema nested 5000 deep": Guided("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "crossed alternatives": Guided.schema(_crossed_alternatives()),
    "1001 properties": Guided.schema(_many(1001)),
    "900 optional properties": Guided.schema(_many(900)),
    "a schema that is itself": Guided.schema({"$ref": "#"}),
    "a circle of schemas": Guided.schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "pattern of a million": Guided.schema({"type": "string", "pattern": "(a{1000}){1000}"}),
    "overlapping pattern properties": Guided.schema(
        {"patternProperties": {f"^{'.' * i}x{i}$": {"type": "integer"} for i in range(60)}}
    ),
    "multiple of a large prime": Guided.schema({"type": "integer", "multipleOf": 982451653}),
    "a multiple too fine": Guided.schema({"type": "number", "multipleOf": 1e-300}),
    "numbers beyond all bounds": Guided("json_schema", '{"type":"integer","maximum":1' + "0" * 400 + "}"),
    "regex of a million": Guided("regex", "((a{100}){100}){100}"),
    "regex of a million, perhaps": Guided("regex", "((a{100})?{100})?{100}"),
    "regex nested 3000 deep": Guided("regex", "(" * 3000 + "a" + ")" * 3000),
    "regex of counted alternatives": Guided("regex", "(?:a|aa|aaa|aaaa|aaaaa){1000,20000}"),
    "look-ahead": Guided("regex", "(?=(a+))a*b"),
    "rules nested 20000 deep": Guided("lark", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "rules that double a hundred times": Guided("lark", _doubling_rules(100)),
    "terminals that double twenty times": Guided("lark", _doubling_terminals(22)),
    "a schema nested in a grammar": Guided("lark", "start: %json " + '{"items":' * 3000 + "{}" + "}" * 3000),
    "a regex of a million in a grammar": Guided("lark", "start: /(a{1000}){1000}/"),
    "groups nested 5000 deep": Guided("gbnf", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "rules that never end": Guided("lark", "start: start start"),
    "choices beyond count": Guided("choice", json.dumps([str(i) for i in range(10_001)])),
}
