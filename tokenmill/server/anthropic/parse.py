"""Parses Messages bodies into engine requests.

Everything that needs no engine is checked here, before anything runs. The rest (does the prompt fit?) is checked when
the engine prepares the request, still before the first byte of the reply.

Both API versions are handled alike: 2026-10-21 adds `system` turns inside `messages` and removes the sampling
parameters from the SDKs' types, and no field has a different meaning in the two. `cache_control` is accepted anywhere
and has no effect: every prefix is cached anyway. A field that can't be honoured is refused with its name.

    thinking   absent: the default of the model's template          adaptive: on, for a model that can think
               enabled: on, for at most `budget_tokens`             disabled, between_tools: off
    effort     of `output_config`: how long to think; ignored for a model that does not think

An answer may reach the end of the context before `max_tokens` (stop reason `model_context_window_exceeded`). If the
prompt leaves very little room for it, the request is refused with the message by which Claude Code knows to reduce
`max_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tokenmill.engine.input_processor import prompt_limit, require_plausible_length
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded
from tokenmill.params import MAX_STOP_STRINGS, Guided, SamplingParams
from tokenmill.server.anthropic.conversation import keep_recent_reasoning, parse_conversation
from tokenmill.server.anthropic.tools import parse_tool_choice, parse_tools
from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.openai.parse import num_characters
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import ChatRequest, Message, Reasoning, Request

MAX_COUNT = 2**31 - 1
MAX_EDITS = 16
MIN_ROOM_DIVISOR = 16  # the prompt must leave at least 1/16 of the context for the answer
UNSUPPORTED = ("container", "mcp_servers", "inference_geo", "diagnostics", "fallbacks")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING_TYPES = ("enabled", "adaptive", "disabled", "between_tools")


@dataclass(frozen=True)
class Thinking:
    """The client's thinking settings, for the model (`reasoning`) and for the rendering of the reply."""

    reasoning: Reasoning
    is_shown: bool = True
    is_between_tools: bool = False  # text before a tool call is returned as a thinking block


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
    """Parse a request to count the tokens of a prompt; `max_tokens` is not required."""
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
    settings: dict[str, Any] = {
        "temperature": fields.number("temperature", 0.0, 1.0),
        "top_p": fields.number("top_p", 0.0, 1.0),
        "top_k": fields.integer("top_k", 0, MAX_COUNT),
        "stop": _stop_sequences(fields),
        "guided": _output_format(fields),
        "max_tokens": max_tokens,
    }
    present = {name: value for name, value in settings.items() if value is not None}
    return SamplingParams(**{**info.defaults, **present})


def _stop_sequences(fields: BodyFields) -> list[str] | None:
    texts = fields.items("stop_sequences", MAX_STOP_STRINGS)
    for text in texts or []:
        if not isinstance(text, str) or not text:
            refuse("stop_sequences", f"must hold strings, none of them empty, got {shown(text)}")
    return texts


def _output_format(fields: BodyFields) -> Guided | None:
    """Parse the schema of the answer in `output_config.format`, or in `output_format`, its name in the beta API."""
    config = fields.object("output_config")
    current = config.object("format") if config is not None else None
    beta = fields.object("output_format")
    if current is not None and beta is not None:
        refuse("output_format", "does not combine with output_config.format, which has the same meaning")
    output_format = beta if current is None else current
    if output_format is None:
        return None
    if output_format.required_text("type") != "json_schema":
        refuse(output_format.name("type"), f"must be json_schema, got {shown(output_format.get('type'))}")
    schema = output_format.object("schema")
    if schema is None:
        refuse(output_format.name("schema"), "is required")
    return Guided.schema(schema.values)


# ── thinking ───────────────────────────────────────────────────────────────────────────────────────────


def _thinking(fields: BodyFields, info: ModelInfo, max_tokens: int | None) -> Thinking:
    config = fields.object("output_config")
    effort: Any = config.one_of("effort", EFFORTS) if config is not None else None
    if not info.can_think:
        effort = None
    settings = fields.object("thinking")
    if settings is None:
        return Thinking(Reasoning(effort=effort))
    kind = settings.required_text("type")
    is_shown = settings.one_of("display", ("summarized", "omitted")) != "omitted"
    if kind not in THINKING_TYPES:
        refuse(settings.name("type"), f"must be one of {', '.join(THINKING_TYPES)}, got {shown(kind)}")
    if kind in ("disabled", "between_tools"):
        off = Reasoning(is_on=False if info.can_think else None)
        return Thinking(off, is_shown, is_between_tools=kind == "between_tools")
    if kind == "adaptive":
        return Thinking(Reasoning(effort=effort, is_on=True if info.can_think else None), is_shown)
    if not info.can_think:
        refuse("thinking", f"enabled needs a model that thinks, which {info.name} does not")
    return Thinking(Reasoning(effort=effort, is_on=True, budget=_budget(settings, max_tokens)), is_shown)


def _budget(settings: BodyFields, max_tokens: int | None) -> int:
    budget = settings.integer("budget_tokens", 1, MAX_COUNT)
    if budget is None:
        refuse(settings.name("budget_tokens"), "is required")
    if max_tokens and budget >= max_tokens:
        refuse(settings.name("budget_tokens"), f"must be less than max_tokens ({max_tokens}), got {budget}")
    return budget


def _edited(fields: BodyFields, messages: list[Message], thinking: Thinking) -> tuple[list[Message], Thinking]:
    """Apply `context_management` to messages and thinking; of its edits, `clear_thinking` is supported."""
    management = fields.object("context_management")
    edits = management.items("edits", MAX_EDITS) if management is not None else None
    for number, value in enumerate(edits or []):
        path = f"context_management.edits[{number}]"
        if not isinstance(value, dict) or value.get("type") != "clear_thinking_20251015":
            refuse(f"{path}.type", f"must be clear_thinking_20251015, got {shown(value)}")
        keep = _kept_turns(BodyFields(value, f"{path}."))
        reasoning = msgspec.structs.replace(thinking.reasoning, keep_history=True)
        thinking = replace(thinking, reasoning=reasoning)
        messages = messages if keep is None else keep_recent_reasoning(messages, keep)
    return messages, thinking


def _kept_turns(edit: BodyFields) -> int | None:
    """Return how many turns keep their thinking; None for all."""
    if edit.get("keep") == "all":
        return None
    keep = edit.object("keep")
    if keep is None:
        return 1
    keep.one_of("type", ("thinking_turns",))
    return keep.integer("value", 1, MAX_COUNT) or 1


# ── room for the answer ────────────────────────────────────────────────────────────────────────────────


def require_room(request: Request, max_context: int) -> None:
    """Refuse a request whose answer the end of the context would cut very short. Claude Code parses the message and
    reduces `max_tokens` or shortens the conversation."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens or 0
    room = max_context - num_prompt
    if request.shift is None and max_tokens > room and room * MIN_ROOM_DIVISOR < max_context:
        raise ContextLengthExceeded(
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {max_tokens} > {max_context}",
            param="max_tokens",
        )
