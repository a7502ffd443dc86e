"""Messages bodies into native requests. All that the server can check is checked here, before anything runs; what only
the engine knows (does the prompt fit?) is checked when it prepares a request, still before the first byte.

Both API versions are one: 2026-10-21 adds `system` turns inside `messages` and drops the sampling parameters from the
SDKs' types, and nothing that one of them says means something else in the other. `cache_control` is accepted anywhere
and changes nothing: every prefix is kept in the cache as it is. A field that can't be honoured is refused by name.

    thinking   absent: as the model's template does by default      adaptive: on, for a model that can think
               enabled: on, for at most `budget_tokens`             disabled, between_tools: off
    effort     of `output_config`: how long to think; for a model that does not think it says nothing

An answer may end with the context before it has `max_tokens` (stop reason `model_context_window_exceeded`). Where a
prompt leaves very little room for it, the request is refused in the words that Claude Code reads to ask for less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tokenmill.engine.input_processor import prompt_limit, require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded
from tokenmill.params import MAX_STOP_STRINGS, Guided, SamplingParams
from tokenmill.server.anthropic.conversation import num_characters, parse_conversation, with_thinking_of
from tokenmill.server.anthropic.tools import parse_tool_choice, parse_tools
from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import ChatRequest, Message, Reasoning, Request

MAX_COUNT = 2**31 - 1
MAX_EDITS = 16
SMALLEST_ROOM = 16  # a request is refused if the prompt leaves less than this fraction of the context (1/16)
UNSUPPORTED = ("container", "mcp_servers", "inference_geo", "diagnostics", "fallbacks")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING_TYPES = ("enabled", "adaptive", "disabled", "between_tools")


@dataclass(frozen=True)
class Thinking:
    """The client's thinking settings: for the model (`reasoning`) and for the reply."""

    reasoning: Reasoning
    is_shown: bool = True
    is_between_tools: bool = False  # text before a call comes back as a thinking block


@dataclass(frozen=True)
class MessagesCall:
    request: ChatRequest
    thinking: Thinking
    is_stream: bool


def parse_messages(body: dict[str, Any], info: ModelInfo, signer: ThoughtSigner) -> MessagesCall:
    fields = BodyFields(body)
    max_tokens = fields.integer("max_tokens", 0, MAX_COUNT)
    if max_tokens is None:
        refuse("max_tokens", "is required")
    is_stream = fields.boolean("stream")
    return MessagesCall(*_parse(fields, info, signer, max_tokens), is_stream)


def parse_count(body: dict[str, Any], info: ModelInfo, signer: ThoughtSigner) -> ChatRequest:
    """Parse a request whose prompt is to be counted; `max_tokens` is not required."""
    request, _ = _parse(BodyFields(body), info, signer, None)
    return request


def _parse(
    fields: BodyFields, info: ModelInfo, signer: ThoughtSigner, max_tokens: int | None
) -> tuple[ChatRequest, Thinking]:
    fields.refuse_any(UNSUPPORTED)
    fields.one_of("service_tier", ("auto", "standard_only"))
    if fields.one_of("speed", ("standard", "fast")) == "fast":
        refuse("speed", "fast is not supported by this server")
    metadata = fields.object("metadata")
    if metadata is not None:
        metadata.text("user_id")
    params = _params(fields, max_tokens, info)
    conversation = parse_conversation(fields, signer)
    thinking = _thinking(fields, info, max_tokens)
    messages, thinking = _edited(fields, conversation.messages, thinking)
    limit = prompt_limit(params, info.max_context, shifts_context=info.shifts_context)
    require_plausible_length(num_characters(messages), limit, "messages")
    tools = parse_tools(fields, conversation.loaded_tools)
    request = ChatRequest(
        messages=messages,
        params=params,
        tools=tools,
        tool_choice=parse_tool_choice(fields, tools),
        reasoning=thinking.reasoning,
        continues_last=messages[-1].role == "assistant",
    )
    return request, thinking


def _params(fields: BodyFields, max_tokens: int | None, info: ModelInfo) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0.0, 1.0),
        "top_p": fields.number("top_p", 0.0, 1.0),
        "top_k": fields.integer("top_k", 0, MAX_COUNT),
        "stop": _stop_sequences(fields),
        "guided": _output_format(fields),
        "max_tokens": max_tokens,
    }
    return SamplingParams(**{**info.defaults, **{name: value for name, value in given.items() if value is not None}})


def _stop_sequences(fields: BodyFields) -> list[str] | None:
    texts = fields.items("stop_sequences", MAX_STOP_STRINGS)
    for text in texts or []:
        if not isinstance(text, str) or not text:
            refuse("stop_sequences", f"must hold strings, none of them empty, got {shown(text)}")
    return texts


def _output_format(fields: BodyFields) -> Guided | None:
    """A schema that the answer follows, in `output_config.format`, or where the beta of it had it."""
    config = fields.object("output_config")
    places = [config.object("format") if config is not None else None, fields.object("output_format")]
    wanted = [place for place in places if place is not None]
    if len(wanted) > 1:
        refuse("output_format", "does not combine with output_config.format, which says the same")
    if not wanted:
        return None
    if wanted[0].required_text("type") != "json_schema":
        refuse(wanted[0].name("type"), f"must be json_schema, got {shown(wanted[0].get('type'))}")
    schema = wanted[0].object("schema")
    if schema is None:
        refuse(wanted[0].name("schema"), "is required")
    return Guided.schema(schema.values)


# ── thinking ───────────────────────────────────────────────────────────────────────────────────────────


def _thinking(fields: BodyFields, info: ModelInfo, max_tokens: int | None) -> Thinking:
    config = fields.object("output_config")
    effort: Any = config.one_of("effort", EFFORTS) if config is not None else None
    if not info.can_think:
        effort = None
    given = fields.object("thinking")
    if given is None:
        return Thinking(Reasoning(effort=effort))
    kind = given.required_text("type")
    is_shown = given.one_of("display", ("summarized", "omitted")) != "omitted"
    if kind not in THINKING_TYPES:
        refuse(given.name("type"), f"must be one of {', '.join(THINKING_TYPES)}, got {shown(kind)}")
    if kind in ("disabled", "between_tools"):
        off = Reasoning(is_on=False if info.can_think else None)
        return Thinking(off, is_shown, is_between_tools=kind == "between_tools")
    if kind == "adaptive":
        return Thinking(Reasoning(effort=effort, is_on=True if info.can_think else None), is_shown)
    if not info.can_think:
        refuse("thinking", f"enabled needs a model that thinks, which {info.name} does not")
    return Thinking(Reasoning(effort=effort, is_on=True, budget=_budget(given, max_tokens)), is_shown)


def _budget(given: BodyFields, max_tokens: int | None) -> int:
    budget = given.integer("budget_tokens", 1, MAX_COUNT)
    if budget is None:
        refuse(given.name("budget_tokens"), "is required")
    if max_tokens and budget >= max_tokens:
        refuse(given.name("budget_tokens"), f"must be less than max_tokens ({max_tokens}), got {budget}")
    return budget


def _edited(fields: BodyFields, messages: list[Message], thinking: Thinking) -> tuple[list[Message], Thinking]:
    """Messages and thinking after `context_management`, of which thoughts of earlier turns can be kept or dropped."""
    management = fields.object("context_management")
    edits = management.items("edits", MAX_EDITS) if management is not None else None
    for number, value in enumerate(edits or []):
        path = f"context_management.edits[{number}]"
        if not isinstance(value, dict) or value.get("type") != "clear_thinking_20251015":
            refuse(f"{path}.type", f"must be clear_thinking_20251015, got {shown(value)}")
        keep = _kept_turns(BodyFields(value, f"{path}."))
        kept = msgspec.structs.replace(thinking.reasoning, keep_history=True)
        thinking = replace(thinking, reasoning=kept)
        messages = messages if keep is None else with_thinking_of(messages, keep)
    return messages, thinking


def _kept_turns(edit: BodyFields) -> int | None:
    """Return how many turns keep their thoughts; None: all."""
    if edit.get("keep") == "all":
        return None
    keep = edit.object("keep")
    if keep is None:
        return 1
    keep.one_of("type", ("thinking_turns",))
    return keep.integer("value", 1, MAX_COUNT) or 1


# ── room for the answer ────────────────────────────────────────────────────────────────────────────────


def require_room(request: Request, max_context: int) -> None:
    """Refuse a request whose answer would be cut far short by the end of the context, in the words that Claude Code
    reads: it asks for less, or shortens the conversation."""
    num_prompt, asked = len(request.prompt_token_ids), request.params.max_tokens or 0
    room = max_context - num_prompt
    if request.shift is None and asked > room and room * SMALLEST_ROOM < max_context:
        raise ContextLengthExceeded(
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {asked} > {max_context}",
            param="max_tokens",
        )
