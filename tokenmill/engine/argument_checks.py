"""Checks of the arguments of `LLM`'s methods: prompts, conversations, params, tools; and the requests made of them.

They refuse the same mistakes that the server's parsers refuse in HTTP requests.
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


def prompts_in(value: Prompt | Iterable[Prompt]) -> Iterable[Any]:
    """Return the unchecked prompts of a call: one, or those of an iterable; a list of token ids is one prompt."""
    is_ids = _is_list(value) and value and all(isinstance(part, int) for part in value)
    if is_ids or isinstance(value, str | Mapping):
        return [value]
    if not _is_iterable(value):
        raise _no_prompt(value)
    return value


def prompt_from(value: Any) -> Prompt:
    if isinstance(value, Mapping):
        value = _prompt_in(value)
    if isinstance(value, str):
        return value
    if not _is_list(value) or not all(isinstance(part, int) for part in value):
        raise _no_prompt(value)
    return list(value)


def _prompt_in(value: Mapping[str, Any]) -> Any:
    """Return the text or the token ids of a prompt in vLLM's form, a dict."""
    entries = {name: entry for name, entry in value.items() if entry is not None}
    ids, text = entries.pop("prompt_token_ids", None), entries.pop("prompt", None)
    if entries:
        name = next(iter(entries))
        raise InvalidRequest(f"a prompt is text or token ids; its entry {name!r} is not supported", param=name)
    return text if ids is None else ids


def conversations_in(value: Conversation | Iterable[Conversation]) -> Iterable[Any]:
    """Return the unchecked conversations of a call: one, or those of an iterable."""
    if not _is_iterable(value):
        raise _no_conversation(value)
    return [value] if isinstance(value, Sequence) and value and isinstance(value[0], dict | Message) else value


def messages_from(conversation: Any) -> list[Message]:
    if not _is_list(conversation):
        raise _no_conversation(conversation)
    return [m if isinstance(m, Message) else _message(m) for m in conversation]


def params_from(value: object) -> SamplingParams:
    return SamplingParams() if value is None else _params(value)


def _params(value: object) -> SamplingParams:
    if not isinstance(value, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {_kind(value)}", param="params")
    return value


def one_of_two(params: ParamsGiven, sampling_params: ParamsGiven) -> ParamsGiven:
    """Return the params of a call, which vLLM names sampling_params."""
    if params is not None and sampling_params is not None:
        problem = "params and sampling_params are the same argument: give one of them"
        raise InvalidRequest(problem, param="sampling_params")
    return params if sampling_params is None else sampling_params


VLLM_METHODS = {  # methods of vLLM's class that `LLM` does not have, with their replacements
    "beam_search": "generate(prompts, SamplingParams(beam=BeamParams(width)))",
    "encode": "embed(prompts, pooling=Pooling(…))",
    "classify": "classifiers are not supported yet; SamplingParams(guided=Guided.choice([…])) lets a model choose",
    "score": "rerankers are not supported yet; embed(texts) returns vectors to compare",
    "reward": "reward models are not supported yet",
    "sleep": "close() and a new LLM; a server unloads idle models itself",
    "wake_up": "a new LLM",
    "get_metrics": "tokenmill bench offline; a server has /metrics",
    "start_profile": "tokenmill bench offline",
    "collective_rpc": "there are no workers that run other functions than the model",
    "apply_model": "there are no workers that run other functions than the model",
}


def no_attribute(name: str) -> AttributeError:
    """Return the error for an attribute that `LLM` does not have; for methods of vLLM it names the replacement."""
    instead = f"; instead: {VLLM_METHODS[name]}" if name in VLLM_METHODS else ""
    return AttributeError(f"LLM has no {name!r}{instead}", name=name)


def prompt_request(prompt: Any, params: SamplingParams) -> PromptRequest:
    return PromptRequest(prompt=prompt_from(prompt), params=params)


def chat_request_maker(
    tools: Sequence[Tool | dict[str, Any]] | None,
    tool_choice: ToolChoice | str | dict[str, Any],
    parallel_tool_calls: bool,
    reasoning_effort: str | None,
    template_args: dict[str, Any],
) -> Callable[[Any, SamplingParams], ChatRequest]:
    """Return a function that makes a request from a conversation, with all other settings the same."""
    first = ChatRequest(
        messages=[],
        tools=tools_from(tools),
        tool_choice=tool_choice_from(tool_choice, parallel=parallel_tool_calls),
        reasoning=reasoning_from(reasoning_effort),
        template_args=template_args,
    )
    return lambda messages, params: msgspec.structs.replace(first, messages=messages_from(messages), params=params)


MISSING = object()
ClientRequestT = TypeVar("ClientRequestT", ChatRequest, PromptRequest, EmbedRequest)


class RequestRows:
    """The rows of a call, read lazily: each is a request, or the error of an invalid row."""

    def __init__(
        self,
        rows: Iterable[Any],
        params: ParamsGiven,
        make_request: Callable[[Any, SamplingParams], ClientRequest],
    ) -> None:
        """`params`: for all rows, or an iterable with one for each row (it may have more). `make_request` checks a row
        and returns its request."""
        self.total = len(rows) if isinstance(rows, Sized) else None  # None: not known in advance
        self._rows = rows
        self._make_request = make_request
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
                yield self._make_request(row, one)
            except InvalidRequest as error:
                yield error


def with_adapter(
    make_request: Callable[[Any, SamplingParams], ClientRequestT], adapter: str | Sequence[str | None] | None
) -> Callable[[Any, SamplingParams], ClientRequestT]:
    """Wrap `make_request` so that its requests use an adapter: one for all rows, or one (or None) for each."""
    value: Any = adapter
    if value is None:
        return make_request
    is_list = not isinstance(value, str)
    if is_list and not (_is_list(value) and all(one is None or isinstance(one, str) for one in value)):
        raise InvalidRequest(f"adapter must be a name or a list of names, got {value!r}", param="adapter")
    names = iter(value) if is_list else repeat(value)

    def make_with_adapter(row: Any, params: SamplingParams) -> ClientRequestT:
        name = next(names, MISSING)
        if name is MISSING:
            raise InvalidRequest(f"{len(value)} adapters for more prompts", param="adapter")
        return msgspec.structs.replace(make_request(row, params), adapter=name)

    return make_with_adapter


def uneven(num_params: int, num_rows: object) -> InvalidRequest:
    return InvalidRequest(f"{num_params} sampling params for {num_rows} prompts", param="params")


def tools_from(value: Sequence[Tool | dict[str, Any]] | None) -> list[Tool]:
    """Return the tools of a call; a dict is a tool in OpenAI's format."""
    if value is not None and not _is_list(value):
        raise InvalidRequest(f"tools must be a list, got {_kind(value)}", param="tools")
    return [tool if isinstance(tool, Tool) else _tool(tool) for tool in value or ()]


def tool_choice_from(value: ToolChoice | str | dict[str, Any], *, parallel: bool) -> ToolChoice:
    """Return the tool choice of a call: a mode, or a dict in OpenAI's format that names the one tool to call."""
    if isinstance(value, ToolChoice):
        return value
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(mode=value, parallel=parallel)  # type: ignore[arg-type]  # one of the three
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        hint = '{"type": "function", "function": {"name": "…"}}'
        raise InvalidRequest("tool_choice must be none, auto, required or one tool", param="tool_choice", hint=hint)
    return ToolChoice(mode="required", names=[function["name"]], parallel=parallel)


def reasoning_from(effort: str | None) -> Reasoning:
    if effort is not None and effort not in get_args(Effort):
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(get_args(Effort))}, got {effort!r}", param="reasoning_effort"
        )
    return Reasoning(effort=effort)  # type: ignore[arg-type]  # one of the seven


def _tool(value: Any) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or set(function) - {"name", "description", "parameters", "strict"}:
        raise InvalidRequest("a tool must be a Tool or a dict with a function", param="tools", hint=TOOL_HINT)
    try:
        return msgspec.convert(function, Tool)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"invalid tool: {error}", param="tools", hint=TOOL_HINT) from None


def template_args_from(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse sampling parameters among the keywords of `chat`, which are variables of the chat template."""
    for name in value:
        if name in SamplingParams.__struct_fields__:
            raise InvalidRequest(
                f"{name} is a field of SamplingParams", param=name, hint=f"chat(messages, SamplingParams({name}=…))"
            )
    return value


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise _no_conversation(value)
    known = set(Message.__struct_fields__)
    unknown = set(value) - known
    if unknown or not isinstance(value.get("role"), str):
        problem = f"unknown keys {sorted(map(str, unknown))}" if unknown else "no role"
        raise InvalidRequest(f"a message has {problem}; it takes {sorted(known)}", param="messages")
    calls = [_tool_call(call) for call in value.get("tool_calls") or ()]
    return Message(**value | {"content": _content(value), "tool_calls": calls})


def _tool_call(value: Any) -> ToolCall:
    """Return a tool call from a `ToolCall`, as in `CompletionOutput.tool_calls`, or a dict in OpenAI's format."""
    if isinstance(value, ToolCall):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            "a tool call must be a ToolCall or a dict with id and function", param="messages", hint=CALL_HINT
        )
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(value.get("id") or ""), name=function["name"], arguments=text)


def _content(message: dict[str, Any]) -> str | None:
    """Return a message's text: text parts in OpenAI's format are joined; only a turn with tool calls may have none."""
    content = message.get("content")
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    raise InvalidRequest("a message's content must be a string or a list of text parts", param="messages")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_iterable(value: Any) -> bool:
    """Tell whether this is an ordered iterable of rows: a set has no order, and iterating a dict gives its keys."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping | Set)


def _kind(value: object) -> str:
    return value.__name__ + " itself" if isinstance(value, type) else type(value).__name__


def _no_prompt(value: object) -> InvalidRequest:
    return InvalidRequest(f"a prompt must be a string or a list of token ids, got {_kind(value)}", param="prompts")


def _no_conversation(value: object) -> InvalidRequest:
    return InvalidRequest(
        f"a conversation must be a list of messages, got {_kind(value)}",
        param="messages",
        hint='[{"role": "user", "content": "…"}]',
    )
