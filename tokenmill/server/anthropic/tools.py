"""Parses the tools of a Messages body: tools with a schema that the client runs itself.

Tools that Anthropic's servers run (web search, code execution) and tools whose schema only its models know (bash, text
editor) are refused with their type. A tool with `defer_loading` is shown to the model once a result of the client's
tool search has referred to it (`tool_reference`).
"""

from __future__ import annotations

import base64
import re
from typing import Any

from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.types import Tool, ToolChoice

MAX_TOOLS = 1024
MAX_EXAMPLES = 64
CHOICES = ("auto", "any", "tool", "none")


def parse_tools(fields: BodyFields, loaded: frozenset[str]) -> list[Tool]:
    """Return the tools that the model sees. `loaded`: the names of the deferred tools that were loaded."""
    values = fields.items("tools", MAX_TOOLS) or []
    parsed = [_tool(value, f"tools[{number}]") for number, value in enumerate(values)]
    return [tool for tool, is_deferred in parsed if not is_deferred or tool.name in loaded]


def _tool(value: object, path: str) -> tuple[Tool, bool]:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with name and input_schema, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    kind = fields.text("type")
    if kind not in (None, "custom"):
        refuse(
            fields.name("type"),
            f"{shown(kind)} is not supported by this server",
            hint="only tools of the type custom with an input_schema, which the client runs, are supported",
        )
    callers = fields.items("allowed_callers", 16)
    if callers is not None and "direct" not in callers:
        refuse(fields.name("allowed_callers"), "must contain direct: this server runs no code that could call tools")
    fields.boolean("eager_input_streaming")  # input is always streamed as it is generated
    tool = Tool(
        name=fields.required_text("name"),
        description=fields.text("description"),
        parameters=_schema(fields),
        strict=None if fields.get("strict") is None else fields.boolean("strict"),
    )
    return tool, fields.boolean("defer_loading")


def _schema(fields: BodyFields) -> dict[str, Any]:
    schema = fields.object("input_schema")
    if schema is None:
        refuse(fields.name("input_schema"), "is required: a JSON schema of type object")
    if schema.get("type") not in (None, "object"):
        refuse(schema.name("type"), f"must be object, got {shown(schema.get('type'))}")
    examples = fields.items("input_examples", MAX_EXAMPLES)
    return {**schema.values, "type": "object", **({"examples": examples} if examples else {})}


def parse_tool_choice(fields: BodyFields, tools: list[Tool]) -> ToolChoice:
    choice = fields.object("tool_choice")
    if choice is None:
        return ToolChoice()
    kind = choice.required_text("type")
    if kind not in CHOICES:
        refuse(choice.name("type"), f"must be one of {', '.join(CHOICES)}, got {shown(kind)}")
    if kind in ("any", "tool") and not tools:
        refuse("tool_choice", f"{kind} needs tools")
    parallel = not choice.boolean("disable_parallel_tool_use")
    if kind == "tool":
        return ToolChoice(mode="required", names=[choice.required_text("name")], parallel=parallel)
    return ToolChoice(mode="required" if kind == "any" else "none" if kind == "none" else "auto", parallel=parallel)


# ── ids ────────────────────────────────────────────────────────────────────────────────────────────────

WIRE_ID = re.compile(r"[A-Za-z0-9_-]+")
ENCODED_PREFIX = "toolu_x_"


def wire_id(call_id: str) -> str:
    """Return the id of a call for clients, which expect letters, digits, _ and -. Ids with other characters, which some
    models generate, are encoded so that `native_id` can restore them."""
    if WIRE_ID.fullmatch(call_id) and not call_id.startswith(ENCODED_PREFIX):
        return call_id
    return ENCODED_PREFIX + base64.urlsafe_b64encode(call_id.encode()).decode().rstrip("=")


def native_id(wire: str) -> str:
    """Return the model's id of a call: the inverse of `wire_id`."""
    if not wire.startswith(ENCODED_PREFIX):
        return wire
    encoded = wire.removeprefix(ENCODED_PREFIX)
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except ValueError:
        return wire
