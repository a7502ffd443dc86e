"""Nothing is ignored: a keyword is enforced as `jsonschema` understands it, or refused by name and path."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.guided.compile import compile_grammar
from tokenmill.guided.schema import expanded_size
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided

REFUSED: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"items": {"not": {}}}}}, "not", "#/properties/a/items/not"),
    ({"anyOf": [{}, {"type": "array", "uniqueItems": True}]}, "uniqueItems", "#/anyOf/1/uniqueItems"),
    ({"properties": {"a/b": {"contains": {"type": "null"}}}}, "contains", "#/properties/a~1b/contains"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if", "#/if"),
    ({"dependentSchemas": {"a": {}}}, "dependentSchemas", "#/dependentSchemas"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "#/dependentRequired"),
    ({"dependencies": {"a": ["b"]}}, "dependencies", "#/dependencies"),
    ({"propertyNames": {"maxLength": 3}}, "propertyNames", "#/propertyNames"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties", "#/unevaluatedProperties"),
    ({"unevaluatedItems": False}, "unevaluatedItems", "#/unevaluatedItems"),
    ({"$dynamicRef": "#x"}, "$dynamicRef", "#/$dynamicRef"),
    ({"properties": {"a": {"type": "string", "format": "iri"}}}, "iri", "#/properties/a/format"),
    ({"type": "string", "format": "unknown"}, "unknown", "#/format"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#/oneOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around", "#/pattern"),
    ({"extends": {"type": "string"}}, "extends", "#/extends"),
    ({"disallow": "string"}, "disallow", "#/disallow"),
    ({"properties": {"a": {"type": "integer", "divisibleBy": 2}}}, "divisibleBy", "#/properties/a/divisibleBy"),
    ({"properties": {"a": {"required": True}}}, "required", "#/properties/a/required"),
    ({"type": "object", "minProperties": 2}, "minProperties", "#/minProperties"),
    ({"$ref": "#/$defs/absent"}, "absent", "#/$ref"),
    ({"$ref": "http://example.com/x"}, "example.com", "#"),
    ({"type": "hiccup"}, "hiccup", "#"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance", "#"),
    ({"const": 5, "minimum": 7}, "minimum", "#"),
    ({"$ref": "#"}, "no text satisfies it", "#"),
]
INSTANCES: list[Any] = [None, True, 0, 1, 3, -2, 7.5, "", "a", "abc", "2020-01-31", "é", [], [1], [1, "a"], [1, 2, 3]]
INSTANCES += [{}, {"a": 1}, {"a": "x"}, {"a": 1, "b": 2}, {"b": "x"}, {"ab": 1}]
KEPT: list[Any] = [
    {"type": "integer", "minimum": 1, "exclusiveMaximum": 3},
    {"type": ["string", "null"]},
    {"enum": ["a", 1, None]},
    {"type": "number", "multipleOf": 2.5},
    {"minLength": 2},
    {"type": "string", "pattern": "^a+$", "maxLength": 2},
    {"type": "string", "format": "date"},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 1},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "minProperties": 1},
    {"type": "object", "maxProperties": 1},
    {"allOf": [{"type": "integer"}, {"minimum": 2}]},
    {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"const": {"a": 1}}}},
]


def accepts(guided: Guided, vocabulary: Vocabulary, value: Any) -> bool:
    matcher = compile_grammar(guided, vocabulary).matcher.fork()
    return matcher.advance(json.dumps(value, ensure_ascii=False).encode()) and matcher.is_complete


@pytest.mark.parametrize(("schema", "word", "path"), REFUSED)
def test_what_can_t_be_enforced_is_refused_by_name_and_path(
    schema: Any, word: str, path: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_grammar(Guided.schema(schema), vocabulary)
    assert word in refused.value.message
    assert refused.value.message.endswith(f", at {path}")


@pytest.mark.parametrize("schema", KEPT)
def test_what_is_enforced_is_what_jsonschema_says(schema: Any, vocabulary: Vocabulary) -> None:
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for value in INSTANCES:
        assert accepts(Guided.schema(schema), vocabulary, value) == checker.is_valid(value), value


@pytest.mark.parametrize(
    ("pattern", "size"),
    [("abc", 3), ("a{10}", 10), ("(ab){5}c", 11), ("((a{10}){10}){10}", 1000), (r"\{3}", 3), ("[^]x]{4,7}", 7)],
)
def test_size_of_a_regex(pattern: str, size: int) -> None:
    assert expanded_size(pattern) == size
