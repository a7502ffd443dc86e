"""Checks of JSON schemas and regexes: constraints that can't be enforced are refused by keyword and path.

llguidance refuses most such keywords itself but does not report their path, and it ignores a few keywords of older
drafts of JSON Schema. Unknown keys are annotations, as in the standard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import llguidance

from tokenmill.errors import InvalidRequest
from tokenmill.guided.matcher import first_line

MAX_SCHEMAS = 10_000
MAX_PROPERTIES = 1_000  # of one object: compile time is quadratic in them
MAX_EXPANDED = 50_000  # characters of a regex with its counted repeats expanded
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")

# Keys that contain schemas: one schema, a list of them, or an object of them. Definitions come last, so that a keyword
# is found where it applies rather than in a definition that may be unused.
SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
LISTED = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "definitions", "$defs")
DRAFT3_KEYWORDS = ("extends", "disallow", "divisibleBy")  # llguidance treats these as annotations


class SchemaLocation(NamedTuple):
    """A schema inside a schema, and its path."""

    path: str  # a JSON pointer
    schema: dict[str, Any]


def schema_locations(schema: Any) -> Iterator[SchemaLocation]:
    """Yield every schema inside a schema, outermost first."""
    waiting, num_seen = [("#", schema)], 0
    while waiting:
        path, found = waiting.pop(0)
        if not isinstance(found, dict):
            continue
        num_seen += 1
        if num_seen > MAX_SCHEMAS:
            refuse(f"more than {MAX_SCHEMAS:,} schemas in one", "#")
        yield SchemaLocation(path, found)
        waiting += list(_inside(path, found))


def _inside(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in SINGLE:
        if isinstance(schema.get(key), dict):
            yield f"{path}/{key}", schema[key]
    for key in LISTED:
        if isinstance(schema.get(key), list):
            yield from ((f"{path}/{key}/{i}", item) for i, item in enumerate(schema[key]))
    for key in NAMED:
        if isinstance(schema.get(key), dict):
            yield from ((f"{path}/{key}/{_escaped(name)}", item) for name, item in schema[key].items())


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def refuse(problem: str, path: str) -> NoReturn:
    raise InvalidRequest(f"the schema can't be enforced: {problem}, at {path}", param="guided")


# ── before compiling ───────────────────────────────────────────────────────────────────────────────────


def check(schema: dict[str, Any]) -> None:
    """Refuse constraints that llguidance would ignore."""
    if "x-guidance" in schema:
        refuse('the key "x-guidance" is not supported', "#")
    for path, found in schema_locations(schema):
        _check_keywords(path, found)
        _check_sizes(path, found)
        _check_num_properties(path, found)


def _check_keywords(path: str, schema: dict[str, Any]) -> None:
    for key in DRAFT3_KEYWORDS:
        if key in schema:
            refuse(f'the keyword "{key}" is not supported', f"{path}/{key}")
    if isinstance(schema.get("required"), bool):
        refuse('"required" must be a list of names', f"{path}/required")
    if schema.get("format") == "unknown":
        refuse('the format "unknown" is not supported', f"{path}/format")


def _check_sizes(path: str, schema: dict[str, Any]) -> None:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        refuse(f"{len(properties)} properties in one object, more than {MAX_PROPERTIES}", f"{path}/properties")
    named = {f"{path}/patternProperties": list(patterns) if isinstance(patterns, dict) else []}
    for where, regexes in {f"{path}/pattern": [schema.get("pattern")], **named}.items():
        for regex in regexes:
            if isinstance(regex, str) and expanded_size(regex) > MAX_EXPANDED:
                refuse("a regex that is too large with its repeats expanded", where)


def _check_num_properties(path: str, schema: dict[str, Any]) -> None:
    """Refuse minProperties larger than the number of required ones plus one: the grammar can't prevent that an unlisted
    name repeats, which JSON counts once."""
    minimum, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(minimum, int) or not isinstance(required, list) or schema.get("additionalProperties") is False:
        return
    if minimum > len(required) + 1:
        refuse('"minProperties" beyond the required ones would count names that may repeat', f"{path}/minProperties")


# ── explaining llguidance's errors ─────────────────────────────────────────────────────────────────────


def explain(schema: dict[str, Any], message: str) -> NoReturn:
    """Refuse a schema with the keyword and the path that llguidance's message refers to."""
    if keys := re.match(r"Unimplemented keys: \[(.*)\]", message):
        key = re.findall(r'"([^"]+)"', keys.group(1))[0]
        refuse(f'the keyword "{key}" is not supported', _path_of(schema, key))
    if unknown := re.match(r"Unknown format: (.*)", message):
        name = unknown.group(1)
        refuse(f'the format "{name}" is not supported', _path_of(schema, "format", name))
    if message.startswith("oneOf"):
        where = _path_of(schema, "oneOf")
        refuse('the branches of "oneOf" are not known to exclude each other; "anyOf" is supported', where)
    if "regex parse error" in message or "invalid regex" in message:
        refuse(f"a regex is invalid or not regular: {_last_line(message)}", _path_of_invalid_regex(schema))
    for key in ("patternProperties", "minProperties", "multipleOf", "$ref"):
        if _mentions(key, message):
            refuse(first_line(message), _path_of(schema, key))
    refuse(first_line(message), "#")


def _mentions(key: str, message: str) -> bool:
    words = {"patternProperties": "patternProperty", "minProperties": "maxProperties", "$ref": "Pointer"}
    return words.get(key, key) in message


def _path_of(schema: dict[str, Any], key: str, value: Any = None) -> str:
    for path, found in schema_locations(schema):
        if key in found and value in (None, found[key]):
            return f"{path}/{key}"
    return "#"


def _path_of_invalid_regex(schema: dict[str, Any]) -> str:
    for path, found in schema_locations(schema):
        if isinstance(found.get("pattern"), str) and _is_invalid(found["pattern"]):
            return f"{path}/pattern"
        named = found.get("patternProperties")
        if isinstance(named, dict) and any(_is_invalid(regex) for regex in named):
            return f"{path}/patternProperties"
    return "#"


def _is_invalid(regex: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema({"type": "string", "pattern": regex})
    return bool(llguidance.LLMatcher.validate_grammar(grammar))


def _last_line(message: str) -> str:
    return message.strip().splitlines()[-1].removeprefix("error: ").strip()


# ── regexes ────────────────────────────────────────────────────────────────────────────────────────────


def expanded_size(pattern: str) -> int:
    """Return an upper bound of a regex's size with its counted repeats expanded; stop once it is too large.

    `((a{100}){100}){100}` is a million characters, and the grammar engine expands it while tokens are sampled.
    """
    sizes, last = [0], 0  # size of each open group; size of the part that a repeat would apply to
    position = 0
    while position < len(pattern):
        char, step = pattern[position], 1
        count = _COUNT.match(pattern, position) if char == "{" else None
        if char == "(":
            sizes.append(0)
            last = 0
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif char in "*+?":  # a count after it repeats the same expression
            sizes[-1] += 1
        elif count is not None:
            times = min(MAX_EXPANDED, int((count.group(3) or count.group(1))[:9]))
            sizes[-1] += last * max(0, times - 1)
            last, step = last * times, count.end() - position
        else:
            step = _atom_length(pattern, position)
            last = 1
            sizes[-1] += 1
        if sizes[-1] > MAX_EXPANDED:
            return sizes[-1]
        position += step
    return sum(sizes)


def _atom_length(pattern: str, position: int) -> int:
    if pattern[position] == "\\":
        return 2
    if pattern[position] != "[":
        return 1
    first = position + (2 if pattern.startswith("[^", position) else 1)  # a bracket in the first position is a literal
    end = first
    while end < len(pattern) and (pattern[end] != "]" or end == first):
        end += 2 if pattern[end] == "\\" else 1
    return end - position + 1
