"""Checks of what a Python program hands to `LLM`, before anything runs: prompts, conversations, params.

A server's parser refuses a client's mistakes by name; these are the same mistakes made in Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from itertools import repeat
from typing import Any, TypeVar, get_args

import msgspec

from tokenmill.engine.input_processor import ClientRequest
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.types import (
    ChatRequest,
    Effort,
    EmbedRequest,
    Message,
    PromptRequest,
    Reasoning,
    Tool,
    ToolCall,
    ToolChoice,
)

Prompt = str | list[int]
Conversation = Sequence[Message | dict[str, Any]]
ParamsGiven = SamplingParams | Iterable[SamplingParams] | None  # one for all rows, or one each
TOOL_HINT = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'
CALL_HINT = '{"id": "call_1", "type": "function", "function": {"name": "…", "arguments": "{}"}}'


def prompts_in(given: Prompt | Iterable[Prompt]) -> Iterable[Any]:
    """The prompts of a call, not checked yet: one, or those of an iterable; a list of token ids is one."""
    is_ids = _is_list(given) and given and all(isinstance(part, int) for part in given)
    if is_ids or isinstance(given, str | Mapping):
        return [given]
    if not _is_iterable(given):
        raise _no_prompt(given)
    return given


def prompt_from(given: Any) -> Prompt:
    if isinstance(given, Mapping):
        given = _prompt_in(given)
    if isinstance(given, str):
        return given
    if not _is_list(given) or not all(isinstance(part, int) for part in given):
        raise _no_prompt(given)
    return list(given)


def _prompt_in(given: Mapping[str, Any]) -> Any:
    """The text or the token ids in one of vLLM's prompts, which are dicts."""
    said = {name: value for name, value in given.items() if value is not None}
    ids, text = said.pop("prompt_token_ids", None), said.pop("prompt", None)
    if said:
        name = next(iter(said))
        raise InvalidRequest(f"a prompt is text or token ids, and nothing is made of its {name!r}", param=name)
    return text if ids is None else ids


def conversations_in(given: Conversation | Iterable[Conversation]) -> Iterable[Any]:
    """The conversations of a call, not checked yet: one, or those of an iterable."""
    if not _is_iterable(given):
        raise _no_conversation(given)
    return [given] if isinstance(given, Sequence) and given and isinstance(given[0], dict | Message) else given


def messages_from(conversation: Any) -> list[Message]:
    if not _is_list(conversation):
        raise _no_conversation(conversation)
    return [m if isinstance(m, Message) else _message(m) for m in conversation]


def params_from(given: object) -> SamplingParams:
    return SamplingParams() if given is None else _params(given)


def _params(given: object) -> SamplingParams:
    if not isinstance(given, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {_kind(given)}", param="params")
    return given


def one_of_two(params: ParamsGiven, sampling_params: ParamsGiven) -> ParamsGiven:
    """The params of a call, which vLLM calls sampling_params."""
    if params is not None and sampling_params is not None:
        problem = "sampling_params says the same as params; give one of them"
        raise InvalidRequest(problem, param="sampling_params")
    return params if sampling_params is None else sampling_params


VLLM_METHODS = {  # which `LLM` does not have
    "beam_search": "generate(prompts, SamplingParams(beam=BeamParams(width)))",
    "encode": "embed(prompts, pooling=Pooling(…))",
    "classify": "no classifier runs here yet; SamplingParams(guided=Guided.choice([…])) lets a model choose",
    "score": "no reranker runs here yet; embed(texts) gives vectors to compare",
    "reward": "no reward model runs here yet",
    "sleep": "close() and a new LLM; a server unloads models by itself",
    "wake_up": "a new LLM",
    "get_metrics": "tokenmill bench offline measures; a server has /metrics",
    "start_profile": "tokenmill bench offline measures",
    "collective_rpc": "nothing runs in workers but the model",
    "apply_model": "nothing runs in workers but the model",
}


def no_attribute(name: str) -> AttributeError:
    """Return the error for an attribute that `LLM` does not have; for vLLM's methods it says what to use instead."""
    instead = f"; instead: {VLLM_METHODS[name]}" if name in VLLM_METHODS else ""
    return AttributeError(f"LLM has no {name!r}{instead}", name=name)


MISSING = object()
Asked = TypeVar("Asked", ChatRequest, PromptRequest, EmbedRequest)


class AskedRows:
    """The rows of a call, read lazily: for each a request, or the error that refuses it."""

    def __init__(
        self,
        rows: Iterable[Any],
        params: ParamsGiven,
        ask: Callable[[Any, SamplingParams], ClientRequest],
    ) -> None:
        """`params`: for all rows, or an iterable with one each (it may have more). `ask` checks a row and makes its
        request."""
        self.total = len(rows) if isinstance(rows, Sized) else None  # None: not known before the end
        self._rows = rows
        self._ask = ask
        self._params: Iterable[SamplingParams]
        if isinstance(params, Iterable) and _is_iterable(params):
            self._params = list(map(_params, params)) if isinstance(params, Sequence) else map(_params, params)
        else:
            self._params = repeat(params_from(params))
        if isinstance(self._params, list) and self.total not in (None, len(self._params)):
            raise uneven(len(self._params), self.total)

    def __iter__(self) -> Iterator[ClientRequest | TokenmillError]:
        params = iter(self._params)
        for number, row in enumerate(self._rows):
            one = next(params, None)
            if one is None:
                raise uneven(number, "more")
            try:
                yield self._ask(row, one)
            except InvalidRequest as error:
                yield error


def with_adapter(
    ask: Callable[[Any, SamplingParams], Asked], adapter: str | Sequence[str | None] | None
) -> Callable[[Any, SamplingParams], Asked]:
    """`ask` with an adapter for all rows, or one (or none) for each."""
    given: Any = adapter
    if given is None:
        return ask
    is_list = not isinstance(given, str)
    if is_list and not (_is_list(given) and all(one is None or isinstance(one, str) for one in given)):
        raise InvalidRequest(f"adapter must be a name or a list of names, got {given!r}", param="adapter")
    names = iter(given) if is_list else repeat(given)

    def ask_adapted(row: Any, params: SamplingParams) -> Asked:
        name = next(names, MISSING)
        if name is MISSING:
            raise InvalidRequest(f"{len(given)} adapters for more prompts", param="adapter")
        return msgspec.structs.replace(ask(row, params), adapter=name)

    return ask_adapted


def uneven(num_params: int, num_rows: object) -> InvalidRequest:
    return InvalidRequest(f"{num_params} sampling params for {num_rows} prompts", param="params")


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


def _is_iterable(given: Any) -> bool:
    """Tell whether these are rows in some order: a set has none, and the rows of a dict would be its keys."""
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | Mapping | Set)


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
