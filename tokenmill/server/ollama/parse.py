"""Parses the bodies of /api/chat, /api/generate and /api/embed into engine requests.

Replies are streamed unless `stream` is false. A request without a prompt only loads the model, or unloads it if
`keep_alive` is 0.

A tool's result names the tool (`tool_name`), the call (`tool_call_id`), or neither. It is assigned to the call with
that id, else to the first call of that tool without a result, else to the first call without a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import msgspec
import orjson

from tokenmill.config.durations import keep_alive_of, seconds_of
from tokenmill.engine.input_processor import prompt_limit, require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.params import Guided, SamplingParams
from tokenmill.server.body import BodyFields, kind_of, refuse, require_token_ids, shown
from tokenmill.server.gate import ServedEngine
from tokenmill.server.ollama.options import parse_options
from tokenmill.server.openai.parse import num_characters
from tokenmill.store.modelfile import require_jinja
from tokenmill.types import (
    ChatRequest,
    EmbedRequest,
    Message,
    Pooling,
    PromptRequest,
    Reasoning,
    Tool,
    ToolCall,
)

MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 128
MAX_TOP_LOGPROBS = 20
ROLES = ("system", "user", "assistant", "tool")
Level = Literal["low", "medium", "high", "max"]


@dataclass(frozen=True)
class OllamaChatCall:
    request: ChatRequest
    is_stream: bool


@dataclass(frozen=True)
class GenerateCall:
    request: ChatRequest | PromptRequest
    is_stream: bool
    has_context: bool  # the reply includes the token ids of the conversation


@dataclass(frozen=True)
class EmbedCall:
    requests: list[EmbedRequest]
    dimensions: int | None


def model_name_in(body: dict[str, Any]) -> str:
    """Return the name of the model in a body; older clients send it as `name`."""
    fields = BodyFields(body)
    name = fields.text("model") or fields.text("name")
    if not name:
        raise InvalidRequest("model is required", param="model")
    return name


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────


def parse_chat(body: dict[str, Any], name: str, engine: ServedEngine) -> OllamaChatCall | None:
    """Parse a body of /api/chat; None if it has no messages and only loads or unloads the model."""
    fields, info = BodyFields(body), engine.info
    is_empty = not fields.items("messages", MAX_MESSAGES)
    if is_empty:
        return None
    tools = parse_tools(fields)
    if tools and not info.can_call_tools:
        raise InvalidRequest(f'"{name}" does not support tools', param="tools")
    request = ChatRequest(
        messages=parse_messages(fields),
        params=parse_params(fields, info),
        tools=tools,
        reasoning=parse_think(fields, name, info),
    )
    _require_plausible(request, info)
    if fields.boolean("truncate"):
        request = truncated(request, engine)
    return OllamaChatCall(request, fields.boolean("stream", True))


def parse_messages(fields: BodyFields) -> list[Message]:
    messages: list[Message] = []
    for number, value in enumerate(fields.items("messages", MAX_MESSAGES) or []):
        if not isinstance(value, dict):
            refuse(f"messages[{number}]", f"must be an object with role and content, got {kind_of(value)}")
        messages.append(_message(BodyFields(value, f"messages[{number}]."), messages))
    return messages


def _message(fields: BodyFields, before: list[Message]) -> Message:
    role = fields.required_text("role")
    if role not in ROLES:
        refuse(fields.name("role"), f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    refuse_images(fields)
    calls = _tool_calls(fields, before) if role == "assistant" else []
    content = fields.text("content")
    tool_name = fields.text("tool_name", 256)
    return Message(
        role=role,
        content=content if content is not None or calls else "",
        name=tool_name if role == "tool" else None,
        reasoning=fields.text("thinking"),
        tool_calls=calls,
        tool_call_id=_answered_call(fields.text("tool_call_id"), tool_name, before) if role == "tool" else None,
    )


def _tool_calls(fields: BodyFields, before: list[Message]) -> list[ToolCall]:
    """Parse the calls of an earlier turn. Ollama's calls need no ids; calls without one are numbered."""
    num_before = sum(len(message.tool_calls) for message in before)
    calls = []
    for number, value in enumerate(fields.items("tool_calls", MAX_TOOL_CALLS) or []):
        path = f"{fields.name('tool_calls')}[{number}]"
        if not isinstance(value, dict):
            refuse(path, f"must be an object, got {kind_of(value)}")
        call = BodyFields(value, f"{path}.")
        function = call.object("function")
        if function is None:
            refuse(call.name("function"), "is required")
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else orjson.dumps(_object(function, "arguments")).decode()
        call_id = call.text("id") or f"call_{num_before + number}"
        calls.append(ToolCall(id=call_id, name=function.required_text("name"), arguments=text or "{}"))
    return calls


def _object(fields: BodyFields, key: str) -> dict[str, Any]:
    value = fields.object(key)
    return {} if value is None else value.values


def _answered_call(call_id: str | None, name: str | None, before: list[Message]) -> str:
    """Return the id of the call that a tool's result belongs to."""
    if call_id:
        return call_id
    answered = {message.tool_call_id for message in before if message.role == "tool"}
    calls = [call for message in before for call in message.tool_calls if call.id not in answered]
    named = [call for call in calls if call.name == name]
    return (named or calls)[0].id if calls else "call_0"


def parse_tools(fields: BodyFields) -> list[Tool]:
    tools = []
    for number, value in enumerate(fields.items("tools", MAX_TOOLS) or []):
        path = f"tools[{number}]"
        if not isinstance(value, dict):
            refuse(path, f"must be an object, got {kind_of(value)}")
        tool = BodyFields(value, f"{path}.")
        tool.one_of("type", ("function",))
        function = tool.object("function")
        if function is None:
            refuse(tool.name("function"), "is required")
        parameters = function.object("parameters")
        tools.append(
            Tool(
                name=function.required_text("name"),
                description=function.text("description"),
                parameters=None if parameters is None else parameters.values,
            )
        )
    return tools


def parse_think(fields: BodyFields, name: str, info: ModelInfo) -> Reasoning:
    think = fields.get("think")
    if think is None:
        return Reasoning()
    if isinstance(think, str):
        if think not in get_args(Level):
            _refuse_think(think)
    elif not isinstance(think, bool):
        _refuse_think(think)
    if think and not info.can_think:
        raise InvalidRequest(f'"{name}" does not support thinking', param="think")
    if isinstance(think, str):
        return Reasoning(is_on=True, effort=think)  # type: ignore[arg-type]  # one of the levels
    return Reasoning(is_on=think)


def _refuse_think(think: object) -> NoReturn:
    raise InvalidRequest(
        f'invalid think value: {shown(think)} (must be "high", "medium", "low", "max", true, or false)', param="think"
    )


# ── generate ───────────────────────────────────────────────────────────────────────────────────────────


def parse_generate(body: dict[str, Any], name: str, engine: ServedEngine) -> GenerateCall | None:
    """Parse a body of /api/generate; None if it has no prompt and only loads or unloads the model."""
    fields, info = BodyFields(body), engine.info
    prompt, is_raw = fields.text("prompt") or "", fields.boolean("raw")
    template, system = fields.text("template") or "", fields.text("system") or ""
    context_ids = fields.items("context", info.max_context) or []
    require_token_ids(context_ids, "context", info.vocab_size)
    refuse_images(fields)
    fields.refuse_any(("width", "height", "steps"), hint="this model generates text only")
    if is_raw and (template or system or context_ids):
        raise InvalidRequest("raw mode does not support template, system, or context")
    suffix = fields.text("suffix") or None
    if suffix is not None and not info.can_fill_in:
        raise InvalidRequest(f'"{name}" does not support insert', param="suffix")
    if suffix is not None and (template or system or context_ids):
        refuse("suffix", "does not combine with template, system, or context")
    if not prompt:
        return None
    params, think = parse_params(fields, info), parse_think(fields, name, info)
    if think.is_on and (is_raw or suffix is not None or context_ids):
        refuse("think", "does not combine with raw, suffix, or context")
    is_stream = fields.boolean("stream", True)
    require_plausible_length(len(prompt), _longest_prompt(params, info), "prompt")
    if is_raw or suffix is not None:
        require_plausible_length(len(suffix or ""), _longest_prompt(params, info), "suffix")
        return GenerateCall(PromptRequest(prompt=prompt, suffix=suffix, params=params), is_stream, has_context=False)
    require_jinja(template)
    system_messages = [Message(role="system", content=system)] if system else []
    messages = [*system_messages, Message(role="user", content=prompt)]
    request = ChatRequest(messages=messages, params=params, reasoning=think, chat_template=template or None)
    if context_ids:
        return GenerateCall(_continued(context_ids, request, engine), is_stream, has_context=True)
    return GenerateCall(request, is_stream, has_context=True)


def _continued(context_ids: list[int], request: ChatRequest, engine: ServedEngine) -> PromptRequest:
    """Return a request for the tokens of the conversation so far, followed by those of the new turn."""
    ids = engine.tokenize_chat(request)
    bos = engine.info.spec.bos_token_id
    new_ids = ids[1:] if ids[:1] == [bos] else ids
    return PromptRequest(prompt=[*context_ids, *new_ids], params=request.params)


# ── shared by chat and generate ────────────────────────────────────────────────────────────────────────


def parse_params(fields: BodyFields, info: ModelInfo) -> SamplingParams:
    options = fields.object("options")
    settings = parse_options({} if options is None else options.values, info)
    shift = None if fields.get("shift") is None else fields.boolean("shift")
    if not (info.shifts_context if shift is None else shift):
        settings.pop("context_keep", None)  # without a context shift nothing is dropped
    wants_logprobs = fields.boolean("logprobs")
    num_top = fields.get("top_logprobs")
    if num_top is not None and (type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS):
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if num_top and not wants_logprobs:
        refuse("top_logprobs", "needs logprobs to be true")
    return SamplingParams(
        **settings,
        context_shift=shift,
        logprobs=(num_top or 0) if wants_logprobs else None,
        guided=parse_format(fields),
    )


def parse_format(fields: BodyFields) -> Guided | None:
    """Parse `format`: "json", or the JSON schema of the answer."""
    value = fields.get("format")
    if value is None or value == "":
        return None
    if value == "json":
        return Guided("json_object")
    if not isinstance(value, dict):
        raise InvalidRequest(f'invalid format: {shown(value)}; expected "json" or a valid JSON Schema object')
    return Guided.schema(value)


@dataclass(frozen=True)
class KeepAlive:
    """A request's `keep_alive`: how long its model stays in memory while it is idle."""

    seconds: float | None  # None: forever


def parse_keep_alive(fields: BodyFields) -> KeepAlive | None:
    """Parse `keep_alive`: a duration such as "5m", or seconds; negative values mean forever."""
    value = fields.get("keep_alive")
    if value is None:
        return None
    seconds = seconds_of(value)
    if seconds is None:
        refuse("keep_alive", f"must be a duration such as 5m, or seconds, got {shown(value)}")
    return KeepAlive(keep_alive_of(seconds))


def refuse_images(fields: BodyFields) -> None:
    if fields.items("images", 1024):
        refuse(fields.name("images"), "is not supported by this model; it reads text only")


def truncated(request: ChatRequest, engine: ServedEngine) -> ChatRequest:
    """Drop the oldest messages until the rest fits the context, but no system message and not the last message."""
    droppable = [n for n, message in enumerate(request.messages[:-1]) if message.role != "system"]

    def without(num_dropped: int) -> ChatRequest:
        dropped = set(droppable[:num_dropped])
        kept = [message for number, message in enumerate(request.messages) if number not in dropped]
        return msgspec.structs.replace(request, messages=kept)

    def fits(num_dropped: int) -> bool:
        try:
            return len(engine.tokenize_chat(without(num_dropped))) < engine.info.max_context
        except ContextLengthExceeded:
            return False

    low, high = 0, len(droppable)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return without(low)


def _longest_prompt(params: SamplingParams, info: ModelInfo) -> int:
    return prompt_limit(params, info.max_context, shifts_context=info.shifts_context)


def _require_plausible(request: ChatRequest, info: ModelInfo) -> None:
    require_plausible_length(num_characters(request.messages), _longest_prompt(request.params, info), "messages")


# ── embeddings ─────────────────────────────────────────────────────────────────────────────────────────


def parse_embed(body: dict[str, Any], engine: ServedEngine, max_inputs: int) -> EmbedCall:
    fields, info = BodyFields(body), engine.info
    parse_params(fields, info)  # options are checked, although none of them changes an embedding
    value = fields.get("input")
    inputs = [value] if isinstance(value, str) and value else value or []
    if not isinstance(inputs, list) or not all(isinstance(text, str) for text in inputs):
        raise InvalidRequest("invalid input type", param="input")
    if len(inputs) > max_inputs:
        refuse("input", f"takes at most {max_inputs} inputs, got {len(inputs)}")
    if "" in inputs:
        refuse("input", "must not hold an empty string")
    truncates = fields.boolean("truncate", True)
    dimensions = fields.integer("dimensions", 1, info.spec.hidden_size)
    return EmbedCall([EmbedRequest(prompt=_fitted(text, engine, truncates)) for text in inputs], dimensions)


def parse_legacy_embedding(body: dict[str, Any], engine: ServedEngine) -> EmbedCall:
    fields = BodyFields(body)
    parse_params(fields, engine.info)
    prompt = fields.text("prompt")
    pooling = Pooling(normalize=False)
    return EmbedCall([EmbedRequest(prompt=_fitted(prompt, engine, True), pooling=pooling)] if prompt else [], None)


def _fitted(text: str, engine: ServedEngine, truncates: bool) -> str | list[int]:
    """Return a text that fits the context. A longer text is cut if `truncates`, and else refused."""
    max_tokens = engine.info.max_context
    if len(text.encode()) < max_tokens:  # a token is at least one byte, and a special token may come first
        return text
    require_plausible_length(len(text), max_tokens, "input")
    ids = engine.tokenize(text)
    if len(ids) <= max_tokens:
        return ids
    if not truncates:
        raise ContextLengthExceeded("the input length exceeds the context length", param="input")
    return ids[:max_tokens]
