"""Checks of what a Python program hands to `LLM`, before anything runs: prompts, conversations, params.

A server's parser refuses a client's mistakes by name; these are the same mistakes made in Python.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from tokenmill.errors import InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.types import Effort, Message, Reasoning, Tool, ToolCall, ToolChoice

Prompt = str | list[int]
Conversation = Sequence[Message | dict[str, Any]]
TOOL_HINT = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
CALL_HINT = '{"id": "call_1", "type": "function", "function": {"name": "…", "arguments": "{}"}}'


def prompts_from(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call: one or several; a list of token ids is one."""
    if isinstance(given, str) or (_is_list(given) and given and all(isinstance(part, int) for part in given)):
        return [prompt_from(given)]
    if not _is_list(given):
        raise _no_prompt(given)
    return [prompt_from(one) for one in given]


def prompt_from(given: Any) -> Prompt:
    if isinstance(given, str):
        return given
    if not _is_list(given) or not all(isinstance(part, int) for part in given):
        raise _no_prompt(given)
    return list(given)


def conversations_from(given: Conversation | Sequence[Conversation]) -> list[list[Message]]:
    """The conversations of a call: one or several."""
    if not _is_list(given):
        raise _no_conversation(given)
    is_one = bool(given) and isinstance(given[0], dict | Message)
    return [messages_from(one) for one in cast(Sequence[Conversation], [given] if is_one else given)]


def messages_from(conversation: Any) -> list[Message]:
    if not _is_list(conversation):
        raise _no_conversation(conversation)
    return [m if isinstance(m, Message) else _message(m) for m in conversation]


def params_from(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """The sampling params of each prompt."""
    one_for_all: Any = SamplingParams() if given is None else given
    many: list[Any] = list(one_for_all) if _is_list(given) else [one_for_all] * count
    for one in many:
        if not isinstance(one, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, got {_kind(one)}", param="params")
    if len(many) != count:
        raise InvalidRequest(f"{len(many)} sampling params for {count} prompts", param="params")
    return many


def tools_from(given: Sequence[Tool | dict[str, Any]] | None) -> list[Tool]:
    """The tools of a call; a dict is a tool as OpenAI's clients write it."""
    if given is not None and not _is_list(given):
        raise InvalidRequest(f"tools must be a list, got {_kind(given)}", param="tools")
    return [tool if isinstance(tool, Tool) else _tool(tool) for tool in given or ()]


def tool_choice_from(given: ToolChoice | str | dict[str, Any], *, parallel: bool) -> ToolChoice:
    """A mode, or the one tool that must be called, as a dict in OpenAI's form."""
    if isinstance(given, ToolChoice):
        return given
    if isinstance(given, str) and given in ("none", "auto", "required"):
        return ToolChoice(mode=given, parallel=parallel)  # type: ignore[arg-type]  # one of the three
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        hint = '{"type": "function", "function": {"name": "…"}}'
        raise InvalidRequest("tool_choice is none, auto, required or one tool", param="tool_choice", hint=hint)
    return ToolChoice(mode="required", names=[function["name"]], parallel=parallel)


def reasoning_from(effort: str | None) -> Reasoning:
    if effort is not None and effort not in get_args(Effort):
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(get_args(Effort))}, got {effort!r}", param="reasoning_effort"
        )
    return Reasoning(effort=effort)  # type: ignore[arg-type]  # one of the seven


def _tool(given: Any) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or set(function) - {"name", "description", "parameters", "strict"}:
        raise InvalidRequest("a tool is a Tool or a dict with a function", param="tools", hint=TOOL_HINT)
    try:
        return msgspec.convert(function, Tool)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a tool is not valid: {error}", param="tools", hint=TOOL_HINT) from None


def template_args_from(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `chat` are variables of the chat template, where a parameter of sampling would do nothing."""
    for name in given:
        if name in SamplingParams.__struct_fields__:
            raise InvalidRequest(
                f"{name} is a field of SamplingParams", param=name, hint=f"chat(messages, SamplingParams({name}=…))"
            )
    return given


def _message(given: Any) -> Message:
    if not isinstance(given, dict):
        raise _no_conversation(given)
    known = set(Message.__struct_fields__)
    unknown = set(given) - known
    if unknown or not isinstance(given.get("role"), str):
        problem = f"unknown keys {sorted(map(str, unknown))}" if unknown else "no role"
        raise InvalidRequest(f"a message has {problem}; it takes {sorted(known)}", param="messages")
    calls = [_tool_call(call) for call in given.get("tool_calls") or ()]
    return Message(**given | {"content": _content(given), "tool_calls": calls})


def _tool_call(given: Any) -> ToolCall:
    """A call as `CompletionOutput.tool_calls` has it, or as OpenAI's clients write it."""
    if isinstance(given, ToolCall):
        return given
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            "a tool call is a ToolCall or a dict with id and function", param="messages", hint=CALL_HINT
        )
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(given.get("id") or ""), name=function["name"], arguments=text)


def _content(message: dict[str, Any]) -> str | None:
    """Parts, as OpenAI's clients write them, are joined; only a turn that calls tools may have no content."""
    content = message.get("content")
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    raise InvalidRequest("a message's content must be a string or a list of text parts", param="messages")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def _kind(given: object) -> str:
    return given.__name__ + " itself" if isinstance(given, type) else type(given).__name__


def _no_prompt(given: object) -> InvalidRequest:
    return InvalidRequest(f"a prompt is a string or a list of token ids, got {_kind(given)}", param="prompts")


def _no_conversation(given: object) -> InvalidRequest:
    return InvalidRequest(
        f"a conversation is a list of messages, got {_kind(given)}",
        param="messages",
        hint='[{"role": "user", "content": "…"}]',
    )
