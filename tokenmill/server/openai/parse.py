"""OpenAI request bodies into native requests. All that the server can check is checked here, before anything runs;
what only the engine knows (does the prompt fit?) `Engine.submit` checks, still before the first byte.

A field that is known but cannot be honoured is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.config.server import ServerConfig
from tokenmill.engine.lengths import require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from tokenmill.params import SamplingParams
from tokenmill.server.bodies import prompt_limit
from tokenmill.server.fields import BodyFields, refuse, require_token_ids, shown
from tokenmill.server.openai.messages import num_characters, parse_messages
from tokenmill.server.openai.sampling import MAX_COUNT, MAX_SALT_LENGTH, parse_chat_params, parse_completion_params
from tokenmill.text.template import OUR_VARIABLES
from tokenmill.types import ChatRequest, EmbedRequest, Pooling, PromptRequest

CHAT_UNSUPPORTED = (
    "audio",
    "chat_template",
    "echo",
    "functions",
    "prediction",
    "store",
    "suffix",
    "web_search_options",
)
COMPLETION_UNSUPPORTED = ("suffix",)


@dataclass(frozen=True)
class StreamOptions:
    is_stream: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatCall:
    request: ChatRequest
    stream: StreamOptions


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
    require_model(fields, info, config)
    fields.refuse_any(CHAT_UNSUPPORTED)
    _refuse_unsupported_output(fields)
    _refuse_tools(fields)
    _refuse_reasoning(fields)
    stream = _stream_options(fields)
    messages = parse_messages(fields)
    params = parse_chat_params(fields, info, config)
    require_plausible_length(num_characters(messages), prompt_limit(params, info), "messages")
    request = ChatRequest(
        messages=messages,
        params=params,
        template_args=template_args(fields),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        priority=_priority(fields),
        cache_salt=_cache_salt(fields),
    )
    fields.text("user")
    return ChatCall(request, stream)


def template_args(fields: BodyFields) -> dict[str, Any]:
    given = fields.object("chat_template_kwargs")
    for name in given.values if given else ():
        if name in OUR_VARIABLES:
            refuse("chat_template_kwargs", f"must not hold {name}, which the request itself says")
    return given.values if given else {}


def _refuse_unsupported_output(fields: BodyFields) -> None:
    modalities = fields.items("modalities", 16)
    if modalities is not None and modalities != ["text"]:
        refuse("modalities", 'must be ["text"]: this server answers in text only')


def _refuse_tools(fields: BodyFields) -> None:
    """Tools that must not be called (`tool_choice` none) are accepted; the model does not get to see them."""
    choice = fields.get("tool_choice")
    tools = fields.items("tools", 1024)
    if tools == []:
        refuse("tools", "must not be empty; leave it out instead")
    if choice not in (None, "none"):
        refuse("tool_choice", "other than none is not supported yet")
    if tools is not None and choice is None:
        refuse("tools", "is not supported yet", hint='with tool_choice "none" the request is accepted')
    if fields.get("function_call") not in (None, "none"):
        refuse("function_call", "is not supported yet")
    fields.boolean("parallel_tool_calls", True)


def _refuse_reasoning(fields: BodyFields) -> None:
    if fields.get("reasoning_effort") not in (None, "none"):
        refuse("reasoning_effort", "is not supported", hint="pass template variables in chat_template_kwargs")
    if fields.get("verbosity") not in (None, "medium"):
        refuse("verbosity", "is not supported")
    fields.one_of("service_tier", ("auto", "default"))


# ── completions ────────────────────────────────────────────────────────────────────────────────────────


def parse_completion(body: dict[str, Any], info: ModelInfo, config: ServerConfig) -> CompletionCall:
    fields = BodyFields(body)
    require_model(fields, info, config)
    fields.refuse_any(COMPLETION_UNSUPPORTED)
    _refuse_unsupported_output(fields)
    stream = _stream_options(fields)
    params = parse_completion_params(fields, info, config)
    echo = fields.boolean("echo")
    if echo and stream.is_stream and params.logprobs is not None:
        refuse("echo", "with logprobs does not combine with stream")
    prompts = parse_prompts(fields, "prompt", info, prompt_limit(params, info), config.max_prompts)
    _require_bounded_choices(len(prompts), params, config)
    fields.text("user")
    return CompletionCall([_prompt_request(fields, prompt, params) for prompt in prompts], stream, echo)


def _prompt_request(fields: BodyFields, prompt: str | list[int], params: SamplingParams) -> PromptRequest:
    return PromptRequest(
        prompt=prompt,
        params=params,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        priority=_priority(fields),
        cache_salt=_cache_salt(fields),
    )


def _require_bounded_choices(num_prompts: int, params: SamplingParams, config: ServerConfig) -> None:
    limit = max(config.max_prompts, config.max_choices)
    if num_prompts * params.num_sequences > limit:
        refuse("n", f"times the number of prompts must be at most {limit}, got {num_prompts * params.num_sequences}")


def parse_prompts(
    fields: BodyFields, key: str, info: ModelInfo, max_tokens: int, max_prompts: int
) -> list[str | list[int]]:
    """A string, a list of strings, one list of token ids, or a list of such lists; never a mixture."""
    given = fields.get(key)
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list):
        refuse(key, "is required: a string, a list of strings, or token ids")
    if not given:
        refuse(key, "must not be empty")
    if type(given[0]) is int:
        given = [given]
    if len(given) > max_prompts:
        refuse(key, f"takes at most {max_prompts} prompts, got {len(given)}")
    kind = type(given[0])
    for prompt in given:
        _require_prompt(prompt, kind, key, info.vocab_size, max_tokens)
    return given


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
    require_model(fields, info, config)
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
    priority = _priority(fields)
    requests = [EmbedRequest(prompt=text, pooling=pooling, priority=priority) for text in inputs]
    return EmbeddingCall(requests, dimensions, is_base64)


# ── fields of every call ───────────────────────────────────────────────────────────────────────────────


def require_model(fields: BodyFields, info: ModelInfo, config: ServerConfig, *, is_required: bool = True) -> None:
    name = fields.text("model")
    if config.any_model_name or name == info.name:
        return
    if name is not None:
        raise UnknownModel(
            f"the model {shown(name)} does not exist", param="model", hint=f"this server has {info.name}"
        )
    if is_required:
        refuse("model", "is required", hint=f"this server has {info.name}")


def _stream_options(fields: BodyFields) -> StreamOptions:
    is_stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions(is_stream, include_usage=False)
    if not is_stream:
        refuse("stream_options", "is only allowed when stream is true")
    options.refuse_any(("continuous_usage_stats", "include_obfuscation"))
    return StreamOptions(is_stream, options.boolean("include_usage"))


def _priority(fields: BodyFields) -> int:
    return fields.integer("priority", -MAX_COUNT, MAX_COUNT) or 0


def _cache_salt(fields: BodyFields) -> str:
    salt = fields.text("cache_salt", MAX_SALT_LENGTH)
    if salt == "":
        refuse("cache_salt", "must not be empty")
    return salt or ""
