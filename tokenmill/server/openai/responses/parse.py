"""Parses a Responses body into an engine request, and into the fields that the response object repeats.

Parameters go through the parser of chat bodies under chat's names, so all of its extensions (`seed`, `top_k`, `stop` …)
work here too. Errors of parameters that the two APIs name differently have the name that the client used.

A known field that can't be honoured is refused with its name. Fields that concern only OpenAI's own service have no
effect: `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`, `max_tool_calls` (which counts calls of
OpenAI's tools) and the `include` values of such tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from tokenmill.config.server import ServerConfig
from tokenmill.engine.input_processor import require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.params import SamplingParams
from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.openai.params import (
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
    parse_chat_params,
    parse_metadata,
    schema_of,
)
from tokenmill.server.openai.parse import (
    cache_salt,
    longest_prompt_of,
    num_characters,
    template_args,
    tier_of,
    tiered_priority,
)
from tokenmill.server.openai.responses.items import Item, ItemReader, input_items, kind_of_item, stored_item
from tokenmill.server.openai.responses.tools import CalledTool, parse_choice, parse_offered
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import ChatRequest, Effort, Message, Reasoning, TokenPrefix

UNSUPPORTED = ("context_management", "moderation", "prompt", "best_of", "use_beam_search", "prompt_logprobs")
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    SEALED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITY = {"low": "Keep your answers short.", "medium": "", "high": "Answer at length and in detail."}
"""Text added to the instructions, since models have no such parameter."""
MAX_INCLUDES = 64
MAX_LABEL = 1024  # characters of strings that are only repeated in the response


@dataclass(frozen=True)
class ResponseReferences:
    """The stored objects that a body refers to, and how the response is delivered: parsed before the lookups."""

    parent: str | None
    conversation: str | None
    item_ids: Sequence[str]
    is_stored: bool
    is_background: bool
    is_stream: bool

    @property
    def needs_lookup(self) -> bool:
        return self.parent is not None or self.conversation is not None or bool(self.item_ids)


@dataclass(frozen=True)
class StoredHistory:
    """The stored items that `ResponseReferences` refer to."""

    items: Sequence[Item] = ()  # of the conversation before this request
    referenced: dict[str, Item] | None = None
    prefix: TokenPrefix | None = None  # token ids of the parent's prompt and answer


@dataclass(frozen=True)
class ResponseCall:
    """A parsed request for one response."""

    request: ChatRequest
    repeated: dict[str, Any]  # fields of the response object that repeat the request
    called: dict[str, CalledTool]  # tools by the name that the model sees
    input: list[Item]  # the items of this body, in the form in which they are stored
    references: ResponseReferences
    has_summary: bool  # reasoning is shown as a summary
    is_sealed: bool  # reasoning items have `encrypted_content`
    truncates: bool


def parse_references(fields: BodyFields) -> ResponseReferences:
    parent = fields.text("previous_response_id")
    conversation = _conversation(fields)
    if parent is not None and conversation is not None:
        refuse("previous_response_id", "does not combine with conversation")
    is_stored, is_background = fields.boolean("store", True), fields.boolean("background")
    if is_background and not is_stored:
        refuse("background", "needs store to be true")
    items = [BodyFields(item) for item in input_items(fields, "input")]
    references = [item.required_text("id") for item in items if kind_of_item(item) == "item_reference"]
    is_stream = fields.boolean("stream")
    return ResponseReferences(parent, conversation, references, is_stored, is_background, is_stream)


def _conversation(fields: BodyFields) -> str | None:
    if isinstance(fields.get("conversation"), dict):
        conversation = fields.object("conversation")
        return None if conversation is None else conversation.required_text("id")
    return fields.text("conversation")


def parse_response(
    body: dict[str, Any],
    info: ModelInfo,
    config: ServerConfig,
    signer: ThoughtSigner,
    references: ResponseReferences,
    history: StoredHistory,
) -> ResponseCall:
    fields = BodyFields(body)
    fields.refuse_any(UNSUPPORTED)
    _refuse_stream_options(fields, references.is_stream)
    include = _include(fields)
    own = [_resolved(item, history) for item in input_items(fields, "input")]
    request, called, shown_tools = _conversation_of(fields, info, config, signer, history, own)
    params = request.params
    reasoning = fields.object("reasoning")
    summary = None if reasoning is None else (reasoning.text("summary") or reasoning.text("generate_summary"))
    truncation = fields.one_of("truncation", ("auto", "disabled")) or "disabled"
    return ResponseCall(
        request=request,
        repeated={
            "background": references.is_background,
            "conversation": {"id": references.conversation} if references.conversation else None,
            "instructions": fields.text("instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "max_tool_calls": fields.integer("max_tool_calls", 1, MAX_COUNT),
            "metadata": parse_metadata(fields),
            "model": info.name,
            "parallel_tool_calls": request.tool_choice.parallel,
            "previous_response_id": references.parent,
            "prompt_cache_key": fields.text("prompt_cache_key", MAX_LABEL),
            "prompt_cache_retention": fields.text("prompt_cache_retention", MAX_LABEL),
            "reasoning": {"effort": request.reasoning.effort, "summary": summary},
            "safety_identifier": fields.text("safety_identifier", MAX_LABEL),
            "service_tier": tier_of(fields, config) or "default",
            "store": references.is_stored,
            "temperature": params.temperature,
            "text": {"format": _text_format(fields) or {"type": "text"}, "verbosity": _verbosity(fields)},
            "tool_choice": "auto" if fields.get("tool_choice") is None else fields.get("tool_choice"),
            "tools": shown_tools,
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": truncation,
            "user": fields.text("user"),
        },
        called=called,
        input=[stored_item(item) for item in own],
        references=references,
        has_summary=summary is not None,
        is_sealed=SEALED in include,
        truncates=truncation == "auto",
    )


def parse_conversation(
    body: dict[str, Any], info: ModelInfo, config: ServerConfig, signer: ThoughtSigner, history: StoredHistory
) -> ChatRequest:
    """Parse a body to count its prompt tokens."""
    fields = BodyFields(body)
    own = [_resolved(item, history) for item in input_items(fields, "input")]
    return _conversation_of(fields, info, config, signer, history, own)[0]


def _conversation_of(
    fields: BodyFields,
    info: ModelInfo,
    config: ServerConfig,
    signer: ThoughtSigner,
    history: StoredHistory,
    own: list[Item],
) -> tuple[ChatRequest, dict[str, CalledTool], list[dict[str, Any]]]:
    offered = parse_offered(fields)
    reader = ItemReader(signer, offered)
    instructions = "\n\n".join(filter(None, (fields.text("instructions"), VERBOSITY[_verbosity(fields)])))
    if instructions:
        reader.messages.append(Message(role="system", content=instructions))
    num_system = len(reader.messages)
    for item in history.items:
        reader.read(item, "previous_response_id")
    for number, item in enumerate(own):
        reader.read(item, f"input[{number}]")
    if len(reader.messages) == num_system and not fields.text("instructions"):
        refuse("input", "is required: a string or a list of items")
    offered.require_usable()
    params = _params(fields, info, config)
    require_plausible_length(num_characters(reader.messages), longest_prompt_of(params, info), "input")
    request = ChatRequest(
        messages=reader.messages,
        params=params,
        tools=offered.tools,
        tool_choice=parse_choice(fields, offered),
        reasoning=_reasoning(fields),
        template_args=template_args(fields),
        priority=tiered_priority(fields, config),
        cache_salt=cache_salt(fields),
        extends=history.prefix,
    )
    return request, offered.called, offered.repeated


def _resolved(item: Item, history: StoredHistory) -> Item:
    fields = BodyFields(item)
    if kind_of_item(fields) != "item_reference":
        return item
    return (history.referenced or {})[fields.required_text("id")]  # all references were looked up


# ── parameters ─────────────────────────────────────────────────────────────────────────────────────────


def _params(fields: BodyFields, info: ModelInfo, config: ServerConfig) -> SamplingParams:
    if fields.get("n") not in (None, 1):
        refuse("n", "is not supported: a response is one answer")
    max_tokens = fields.integer("max_output_tokens", 1, MAX_COUNT)
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    wants_logprobs = bool(num_top) or LOGPROBS in _include(fields)
    chat_fields = {
        "max_completion_tokens": max_tokens,
        "logprobs": wants_logprobs,
        "top_logprobs": num_top if wants_logprobs else None,
        "response_format": _chat_format(fields),
    }
    return parse_chat_params(BodyFields({**fields.values, **chat_fields}), info, config)


def _include(fields: BodyFields) -> list[str]:
    return require_includable(fields.items("include", MAX_INCLUDES) or [])


def require_includable(values: list[Any]) -> list[Any]:
    for value in values:
        if value not in INCLUDABLE:
            refuse("include", f"must hold only values of {', '.join(INCLUDABLE)}, got {shown(value)}")
    return values


def _text_format(fields: BodyFields) -> dict[str, Any] | None:
    text = fields.object("text")
    text_format = None if text is None else text.object("format")
    return None if text_format is None else text_format.values


def _verbosity(fields: BodyFields) -> str:
    text = fields.object("text")
    return (None if text is None else text.one_of("verbosity", tuple(VERBOSITY))) or "medium"


def _chat_format(fields: BodyFields) -> dict[str, Any] | None:
    """Return `text.format` in the form of chat bodies, where the schema is one level deeper."""
    text_format = _text_format(fields)
    if text_format is None:
        return None
    named = BodyFields(text_format, "text.format.")
    kind = named.required_text("type")
    if kind not in ("text", "json_object", "json_schema"):
        refuse("text.format.type", f"must be text, json_object or json_schema, got {shown(kind)}")
    if kind != "json_schema":
        return {"type": kind}
    schema_of(named)  # so that errors have the field names of this API
    return {"type": kind, "json_schema": text_format}


def _reasoning(fields: BodyFields) -> Reasoning:
    reasoning = fields.object("reasoning")
    if reasoning is None:
        return Reasoning()
    for key in ("summary", "generate_summary"):
        reasoning.one_of(key, SUMMARIES)
    if reasoning.text("mode") not in (None, "standard"):
        refuse("reasoning.mode", "is not supported")
    effort = reasoning.one_of("effort", get_args(Effort))
    context = reasoning.one_of("context", ("auto", "current_turn", "all_turns"))
    return Reasoning(effort=effort, keep_history=context == "all_turns")  # type: ignore[arg-type]  # one of the seven


def _refuse_stream_options(fields: BodyFields, is_stream: bool) -> None:
    options = fields.object("stream_options")
    if options is None:
        return
    if not is_stream:
        refuse("stream_options", "is only allowed when stream is true")
    options.refuse_any(("include_obfuscation",))
