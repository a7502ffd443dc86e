"""Parses the bodies of OpenAI's endpoints into engine requests.

Everything that needs no engine is checked here, before anything runs. The rest (does the prompt fit?) is checked when
the engine prepares the request, still before the first byte of the reply. A known field that can't be honoured is
refused with its name.

Messages become `Message`s, which are independent of the dialect. The role `developer` is the newer name of `system`,
and the legacy role `function` is that of a tool's result; templates know `system` and `tool`. Content parts are joined.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import orjson

from tokenmill.config.server import ServerConfig
from tokenmill.engine.input_processor import prompt_limit, require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded, InvalidRequest
from tokenmill.params import SamplingParams
from tokenmill.server.body import BodyFields, kind_of, refuse, require_token_ids, shown
from tokenmill.server.openai.params import MAX_COUNT, MAX_SALT_LENGTH, parse_chat_params, parse_completion_params
from tokenmill.server.openai.tools import parse_reasoning, parse_tool_choice, parse_tools
from tokenmill.text.template import RESERVED_VARIABLES
from tokenmill.types import ChatRequest, EmbedRequest, Message, Pooling, PromptRequest, ToolCall

MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_DETOKENIZED = 1_000_000
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # clients use all three
CHAT_UNSUPPORTED = (
    "audio",
    "chat_template",
    "echo",
    "prediction",
    "store",
    "suffix",
    "web_search_options",
)
MAX_LISTED_IDS = 2_000_000
SERVICE_TIERS = {"auto": 0, "default": 0, "scale": 0, "flex": 1, "priority": -1, "fast": -1, "ultrafast": -1}
"""What a tier adds to the priority of a request; the smallest priority runs first."""


@dataclass(frozen=True)
class StreamOptions:
    is_stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatCall:
    request: ChatRequest
    stream: StreamOptions
    tier: str | None  # the service tier that it gets; None if the client named none


@dataclass(frozen=True)
class CompletionCall:
    requests: list[PromptRequest]
    stream: StreamOptions
    echo: bool


@dataclass(frozen=True)
class EmbeddingCall:
    requests: list[EmbedRequest]
    dimensions: int | None
    is_base64: bool


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────


def parse_chat(body: dict[str, Any], info: ModelInfo, config: ServerConfig) -> ChatCall:
    fields = BodyFields(body)
    fields.refuse_any(CHAT_UNSUPPORTED)
    _refuse_unsupported_output(fields)
    _refuse_legacy(fields)
    stream = _stream_options(fields)
    tools = parse_tools(fields)
    messages = parse_messages(fields)
    params = parse_chat_params(fields, info, config)
    require_plausible_length(num_characters(messages), longest_prompt_of(params, info), "messages")
    request = ChatRequest(
        messages=messages,
        params=params,
        tools=tools,
        tool_choice=parse_tool_choice(fields, tools),
        reasoning=parse_reasoning(fields),
        template_args=template_args(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        continues_last=_continues_last(fields, messages),
        priority=tiered_priority(fields, config),
        cache_salt=cache_salt(fields),
    )
    fields.text("user")
    return ChatCall(request, stream, tier_of(fields, config))


def _continues_last(fields: BodyFields, messages: list[Message]) -> bool:
    """Parse vLLM's field that makes the model continue the assistant's last message."""
    continues = fields.boolean("continue_final_message")
    if continues and [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
        refuse("messages", "must not end with two assistant messages: it is ambiguous which one to continue")
    if continues and fields.get("add_generation_prompt"):
        refuse("continue_final_message", "does not combine with add_generation_prompt")
    return continues


def template_args(fields: BodyFields) -> dict[str, Any]:
    arguments = fields.object("chat_template_kwargs")
    for name in arguments.values if arguments else ():
        if name in RESERVED_VARIABLES:
            refuse("chat_template_kwargs", f"must not hold {name}, which other fields of the request set")
    return arguments.values if arguments else {}


def _refuse_unsupported_output(fields: BodyFields) -> None:
    modalities = fields.items("modalities", 16)
    if modalities is not None and modalities != ["text"]:
        refuse("modalities", 'must be ["text"]: this server answers in text only')


def _refuse_legacy(fields: BodyFields) -> None:
    if fields.get("function_call") not in (None, "none"):
        refuse("function_call", "is not supported", hint="use tools and tool_choice")
    fields.refuse_any(("functions",), hint="use tools")
    if fields.get("verbosity") not in (None, "medium"):
        refuse("verbosity", "is not supported")


# ── messages ───────────────────────────────────────────────────────────────────────────────────────────


def parse_messages(fields: BodyFields) -> list[Message]:
    messages = fields.items("messages", MAX_MESSAGES)
    if not messages:
        refuse("messages", "is required and must not be empty")
    return [_message(value, f"messages[{number}]") for number, value in enumerate(messages)]


def num_characters(messages: list[Message]) -> int:
    """Return the length of all contents. Tools and tool calls are not counted: their length is known only once the
    template is rendered."""
    return sum(len(message.content or "") for message in messages)


def _message(value: object, path: str) -> Message:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with role and content, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    role = fields.required_text("role")
    if role not in ROLES:
        refuse(fields.name("role"), f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    calls = _tool_calls(fields) if role == "assistant" else []
    reasoning = next((text for field in REASONING_FIELDS if (text := fields.text(field))), None)
    return Message(
        role=ROLES[role],
        content=_content(fields, may_be_null=bool(calls or reasoning)),
        name=fields.text("name", 256),
        reasoning=reasoning,
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
    return "".join(_part(part, f"{fields.name('content')}[{number}]") for number, part in enumerate(parts))


def _part(value: object, path: str) -> str:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with a type, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    kind = fields.required_text("type")
    if kind not in ("text", "refusal"):
        refuse(fields.name("type"), f"{shown(kind)} is not supported by this model; it reads text only")
    return fields.required_text(kind)


def _tool_calls(fields: BodyFields) -> list[ToolCall]:
    calls = fields.items("tool_calls", MAX_TOOL_CALLS) or []
    parsed = [_tool_call(call, f"{fields.name('tool_calls')}[{number}]") for number, call in enumerate(calls)]
    legacy = fields.object("function_call")
    return [*parsed, _function_call("", legacy)] if legacy else parsed


def _tool_call(value: object, path: str) -> ToolCall:
    if not isinstance(value, dict):
        refuse(path, f"must be an object, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    call_id = fields.required_text("id")
    if fields.one_of("type", ("function", "custom")) == "custom":
        custom = _required_object(fields, "custom")
        name, text = custom.required_text("name"), custom.required_text("input")
        return ToolCall(id=call_id, name=name, arguments=text, kind="custom")
    return _function_call(call_id, _required_object(fields, "function"))


def _function_call(call_id: str, fields: BodyFields) -> ToolCall:
    return ToolCall(id=call_id, name=fields.required_text("name"), arguments=arguments_text(fields))


def arguments_text(fields: BodyFields) -> str:
    """Return the arguments of a call as JSON text, which is OpenAI's form; some clients send the object itself."""
    arguments = fields.get("arguments")
    if isinstance(arguments, dict):
        return orjson.dumps(arguments).decode()
    return fields.text("arguments") or "{}"


def _required_object(fields: BodyFields, key: str) -> BodyFields:
    value = fields.object(key)
    if value is None:
        refuse(fields.name(key), "is required")
    return value


# ── completions ────────────────────────────────────────────────────────────────────────────────────────


def parse_completion(body: dict[str, Any], info: ModelInfo, config: ServerConfig) -> CompletionCall:
    fields = BodyFields(body)
    fields.refuse_any(("continue_final_message",))
    _refuse_unsupported_output(fields)
    stream = _stream_options(fields)
    params = parse_completion_params(fields, info, config)
    echo = fields.boolean("echo")
    if echo and stream.is_stream and params.logprobs is not None:
        refuse("echo", "with logprobs does not combine with stream")
    prompts = parse_prompts(fields, "prompt", info, longest_prompt_of(params, info), config.max_prompts)
    _require_bounded_choices(len(prompts), params, config)
    suffix = fields.text("suffix") or ""
    require_plausible_length(len(suffix), longest_prompt_of(params, info), "suffix")
    if suffix and not info.can_fill_in:
        refuse("suffix", "needs a model with fill-in-the-middle tokens, which this one does not have")
    num_listed = len(params.allowed_token_ids or ()) + len(params.banned_token_ids or ())
    if num_listed * len(prompts) > MAX_LISTED_IDS:  # each prompt's request has its own copy
        refuse("prompt", f"times the allowed and banned token ids must be at most {MAX_LISTED_IDS}")
    fields.text("user")
    return CompletionCall([_prompt_request(fields, prompt, params, config) for prompt in prompts], stream, echo)


def _prompt_request(
    fields: BodyFields, prompt: str | list[int], params: SamplingParams, config: ServerConfig
) -> PromptRequest:
    return PromptRequest(
        prompt=prompt,
        suffix=fields.text("suffix") or None,
        params=params,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        priority=_priority(fields, config),
        cache_salt=cache_salt(fields),
    )


def _require_bounded_choices(num_prompts: int, params: SamplingParams, config: ServerConfig) -> None:
    limit = max(config.max_prompts, config.max_choices)
    if num_prompts * params.num_sequences > limit:
        refuse("n", f"times the number of prompts must be at most {limit}, got {num_prompts * params.num_sequences}")


def parse_prompts(
    fields: BodyFields, key: str, info: ModelInfo, max_tokens: int, max_prompts: int
) -> list[str | list[int]]:
    """Parse a string, a list of strings, one list of token ids, or a list of such lists; mixtures are refused."""
    prompts = fields.get(key)
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, list):
        refuse(key, "is required: a string, a list of strings, or token ids")
    if not prompts:
        refuse(key, "must not be empty")
    if type(prompts[0]) is int:
        prompts = [prompts]
    if len(prompts) > max_prompts:
        refuse(key, f"takes at most {max_prompts} prompts, got {len(prompts)}")
    kind = type(prompts[0])
    for prompt in prompts:
        _require_prompt(prompt, kind, key, info.vocab_size, max_tokens)
    return prompts


def _require_prompt(prompt: object, kind: type, key: str, vocab_size: int, max_tokens: int) -> None:
    if type(prompt) is not kind or not isinstance(prompt, str | list):
        refuse(key, f"must hold either strings or lists of token ids, got {shown(prompt)}")
    if isinstance(prompt, str):
        require_plausible_length(len(prompt), max_tokens, key)
    elif not prompt:
        refuse(key, "must not hold an empty list of token ids")
    elif len(prompt) > max_tokens:
        raise ContextLengthExceeded(
            f"{key} has {len(prompt)} tokens; at most {max_tokens} fit", param=key, hint="shorten the prompt"
        )
    else:
        require_token_ids(prompt, key, vocab_size)


# ── embeddings ─────────────────────────────────────────────────────────────────────────────────────────


def parse_embedding(body: dict[str, Any], info: ModelInfo, config: ServerConfig) -> EmbeddingCall:
    fields = BodyFields(body)
    if not info.can_embed:
        raise InvalidRequest(f"the model {info.name} has no embeddings", param="model")
    inputs = parse_prompts(fields, "input", info, info.max_context, config.max_embedding_inputs)
    if "" in inputs:
        refuse("input", "must not hold an empty string")
    dimensions = fields.integer("dimensions", 1, info.spec.hidden_size)
    is_base64 = fields.one_of("encoding_format", ("float", "base64")) == "base64"
    kind = fields.one_of("pooling", ("mean", "last", "cls"))
    pooling = None if kind is None else Pooling(kind)  # type: ignore[arg-type]  # one of the three
    fields.text("user")
    priority, salt = _priority(fields, config), cache_salt(fields)
    requests = [EmbedRequest(prompt=text, pooling=pooling, priority=priority, cache_salt=salt) for text in inputs]
    return EmbeddingCall(requests, dimensions, is_base64)


# ── vLLM's /tokenize and /detokenize ───────────────────────────────────────────────────────────────────


def parse_tokenize(fields: BodyFields, info: ModelInfo) -> ChatRequest | str:
    """Parse the conversation or the text to tokenise."""
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        refuse("prompt", "or messages is required, and not both")
    if fields.get("messages") is None:
        text = fields.required_text("prompt")
        require_plausible_length(len(text), info.max_context, "prompt")
        return text
    messages = parse_messages(fields)
    require_plausible_length(num_characters(messages), info.max_context, "messages")
    fields.refuse_any(("chat_template",))
    return ChatRequest(
        messages=messages,
        tools=parse_tools(fields),
        reasoning=parse_reasoning(fields),
        template_args=template_args(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        continues_last=_continues_last(fields, messages),
    )


def parse_detokenize(fields: BodyFields, info: ModelInfo) -> list[int]:
    ids = fields.token_ids("tokens", MAX_DETOKENIZED, info.vocab_size)
    if ids is None:
        refuse("tokens", "is required: a list of token ids")
    return ids


# ── fields of several endpoints ────────────────────────────────────────────────────────────────────────


def longest_prompt_of(params: SamplingParams, info: ModelInfo) -> int:
    return prompt_limit(params, info.max_context, shifts_context=info.shifts_context)


def _stream_options(fields: BodyFields) -> StreamOptions:
    is_stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions(is_stream, include_usage=False)
    if not is_stream:
        refuse("stream_options", "is only allowed when stream is true")
    options.refuse_any(("continuous_usage_stats", "include_obfuscation"))
    return StreamOptions(is_stream, options.boolean("include_usage"))


def _priority(fields: BodyFields, config: ServerConfig) -> int:
    lowest = -MAX_COUNT if config.min_priority is None else config.min_priority
    return fields.integer("priority", lowest, MAX_COUNT) or 0


def tiered_priority(fields: BodyFields, config: ServerConfig) -> int:
    """Return the priority of a request, changed by its service tier."""
    return _priority(fields, config) + SERVICE_TIERS[tier_of(fields, config) or "default"]


def tier_of(fields: BodyFields, config: ServerConfig) -> str | None:
    """Return the service tier that a request gets, as OpenAI names it in replies: the default one if the key may not
    use a faster one."""
    tier = fields.one_of("service_tier", tuple(SERVICE_TIERS))
    if tier is None:
        return None
    offset, min_priority = SERVICE_TIERS[tier], config.min_priority
    if offset < 0:
        return "priority" if min_priority is None or min_priority < 0 else "default"
    return "flex" if offset else "default"


def cache_salt(fields: BodyFields) -> str:
    salt = fields.text("cache_salt", MAX_SALT_LENGTH)
    if salt == "":
        refuse("cache_salt", "must not be empty")
    if salt is not None and any(unicodedata.category(char) in ("Cc", "Cs") for char in salt):
        refuse("cache_salt", "must not hold control characters")
    return salt or ""
