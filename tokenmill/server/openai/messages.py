"""Conversations as OpenAI writes them, into `Message`s that know no dialect.

`developer` is today's name for `system`, and the legacy `function` role is a `tool` answer; templates know the
plain names. Content parts are joined. A tool call's arguments arrive as a string and leave as the object they spell,
because that is what chat templates print.
"""

from __future__ import annotations

from typing import Any

import orjson

from tokenmill.server.fields import BodyFields, kind_of, refuse, shown
from tokenmill.types import Message

MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def parse_messages(fields: BodyFields) -> list[Message]:
    given = fields.items("messages", MAX_MESSAGES)
    if not given:
        refuse("messages", "is required and must not be empty")
    return [_message(value, f"messages[{place}]") for place, value in enumerate(given)]


def num_characters(messages: list[Message]) -> int:
    """Of what was said; what a template makes of all the rest is measured once it is rendered."""
    return sum(len(message.content or "") for message in messages)


def _message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        refuse(place, f"must be an object with role and content, got {kind_of(value)}")
    fields = BodyFields(value, f"{place}.")
    role = fields.required_text("role")
    if role not in ROLES:
        refuse(fields.name("role"), f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    calls = _tool_calls(fields) if role == "assistant" else []
    return Message(
        role=ROLES[role],
        content=_content(fields, may_be_null=bool(calls)),
        name=fields.text("name", 256),
        reasoning=fields.text("reasoning_content") or fields.text("reasoning"),
        tool_calls=calls,
        tool_call_id=_tool_call_id(fields, role),
    )


def _tool_call_id(fields: BodyFields, role: str) -> str | None:
    return fields.required_text("tool_call_id") if role == "tool" else None


def _content(fields: BodyFields, *, may_be_null: bool) -> str | None:
    content = fields.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if not may_be_null:
            refuse(fields.name("content"), "is required: a string or a list of parts")
        return None
    parts = fields.items("content", MAX_PARTS)
    if not parts:
        refuse(fields.name("content"), "must not be an empty list")
    return "".join(_part(part, f"{fields.name('content')}[{place}]") for place, part in enumerate(parts))


def _part(value: object, place: str) -> str:
    if not isinstance(value, dict):
        refuse(place, f"must be an object with a type, got {kind_of(value)}")
    fields = BodyFields(value, f"{place}.")
    kind = fields.required_text("type")
    if kind not in ("text", "refusal"):
        refuse(fields.name("type"), f"{shown(kind)} is not supported by this model; it reads text only")
    return fields.required_text(kind)


def _tool_calls(fields: BodyFields) -> list[dict[str, Any]]:
    calls = fields.items("tool_calls", MAX_TOOL_CALLS) or []
    parsed = [_tool_call(call, f"{fields.name('tool_calls')}[{place}]") for place, call in enumerate(calls)]
    legacy = fields.object("function_call")
    return [*parsed, {"type": "function", "function": _function(legacy)}] if legacy else parsed


def _tool_call(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(place, f"must be an object, got {kind_of(value)}")
    fields = BodyFields(value, f"{place}.")
    fields.one_of("type", ("function",))
    function = fields.object("function")
    if function is None:
        refuse(fields.name("function"), "is required")
    return {"id": fields.required_text("id"), "type": "function", "function": _function(function)}


def _function(fields: BodyFields) -> dict[str, Any]:
    return {"name": fields.required_text("name"), "arguments": _arguments(fields.text("arguments") or "{}")}


def _arguments(text: str) -> Any:
    """What the model wrote may not be valid JSON; then the template gets the text as it was."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
