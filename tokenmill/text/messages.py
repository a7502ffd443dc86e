"""Conversations in the shape chat templates read: plain dicts with Hugging Face's names.

Two things differ from what clients send. Arguments of a tool call travel as JSON text; templates want the object,
to write it in the model's own way. Reasoning has two names among templates, and both are given.

Templates disagree about a turn that only calls tools: some know it by a content that is null, others add that to text.
Some write a call's arguments as the text they were. So a conversation has several renditions, to be tried in turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenmill.types import Message


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    # `content` stays even where it is None: templates tell a turn that only calls tools by that.
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        plain |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        plain["tool_calls"] = [_parsed_call(call) for call in message.tool_calls]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {key: value for key, value in optional.items() if value is not None}


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": _parsed(function.get("arguments"))}}


def _parsed(arguments: Any) -> Any:
    """The object that JSON text stands for; anything else as it is (a model may have written no JSON)."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def renditions(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """As given; with arguments as text; with "" for null contents; with both. What changes nothing is left out."""
    given = list(messages)
    with_text = [_with_written_calls(message) for message in given]
    seen: list[list[Mapping[str, Any]]] = []
    for one in (given, with_text, without_null(given), without_null(with_text)):
        if one not in seen:
            seen.append(one)
            yield one


def has_null(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("content", "") is None for message in messages)


def without_null(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message if message.get("content", "") is not None else {**message, "content": ""} for message in messages]


def _with_written_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_written_call(call) for call in calls]} if calls else message


def _written_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
