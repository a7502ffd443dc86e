"""The JSON types that a schema allows, for formats that write strings without quotes.

In `<parameter=zip>\\n01234\\n</parameter>` only the tool's schema shows whether 01234 is a string or a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null"}
_MAX_DEPTH = 16


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return _NAMES.get(type(value), "object")


def allowed_types(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows. A schema that allows numbers allows integers."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ALL_TYPES
    types = ALL_TYPES
    if isinstance(schema.get("$ref"), str):
        types &= allowed_types(resolve(schema["$ref"], root), root, depth + 1)
    declared = schema.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        types &= {name for name in names if isinstance(name, str)} | ({"integer"} if "number" in names else set())
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {type_of(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= frozenset().union(*(allowed_types(one, root, depth + 1) for one in schema[key]))
    if isinstance(schema.get("allOf"), list):
        for one in schema["allOf"]:
            types &= allowed_types(one, root, depth + 1)
    return types


def resolve(ref: str, root: Any) -> Any:
    """Return the schema that a local reference (`#/$defs/x`) names; None if it does not exist."""
    found = root
    if not ref.startswith("#"):
        return None
    for step in ref[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or step not in found:
            return None
        found = found[step]
    return found
