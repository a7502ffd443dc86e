"""Tools of a Messages body: those that the client runs itself, with a schema.

Tools that Anthropic's servers run (web search, code execution) and those whose schema only its models know (bash,
text editor) are refused by their type. A tool with `defer_loading` is shown to the model once a result of the client's
own tool search has named it (`tool_reference`).
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
    """The tools that the model sees; `loaded`: the names of deferred ones that have been loaded."""
    given = fields.items("tools", MAX_TOOLS) or []
    parsed = [_tool(value, f"tools[{number}]") for number, value in enumerate(given)]
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
            hint="tools that the client runs are served, as type custom with an input_schema",
        )
    callers = fields.items("allowed_callers", 16)
    if callers is not None and "direct" not in callers:
        refuse(fields.name("allowed_callers"), "must hold direct: this server runs no code that could call tools")
    fields.boolean("eager_input_streaming")  # always: input is streamed as it is generated
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
    given = fields.object("tool_choice")
    if given is None:
        return ToolChoice()
    kind = given.required_text("type")
    if kind not in CHOICES:
        refuse(given.name("type"), f"must be one of {', '.join(CHOICES)}, got {shown(kind)}")
    if kind in ("any", "tool") and not tools:
        refuse("tool_choice", f"{kind} needs tools")
    parallel = not given.boolean("disable_parallel_tool_use")
    if kind == "tool":
        return ToolChoice(mode="required", names=[given.required_text("name")], parallel=parallel)
    return ToolChoice(mode="required" if kind == "any" else "none" if kind == "none" else "auto", parallel=parallel)


# ── ids ────────────────────────────────────────────────────────────────────────────────────────────────

WIRE_ID = re.compile(r"[A-Za-z0-9_-]+")
PACKED = "toolu_x_"


def wire_id(call_id: str) -> str:
    """The id of a call as clients get it: letters, digits, _ and -. Some models have ids with other characters, which
    must come back to them as they were."""
    if WIRE_ID.fullmatch(call_id) and not call_id.startswith(PACKED):
        return call_id
    return PACKED + base64.urlsafe_b64encode(call_id.encode()).decode().rstrip("=")


def native_id(wire: str) -> str:
    """Return the id that `wire_id` was given."""
    if not wire.startswith(PACKED):
        return wire
    packed = wire.removeprefix(PACKED)
    try:
        return base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)).decode()
    except ValueError:
        return wire
