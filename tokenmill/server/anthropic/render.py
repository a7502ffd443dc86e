"""Replies and errors in Anthropic's form.

    message_start ─► a block: content_block_start ─► content_block_delta … ─► content_block_stop ─► the next block …
                  ─► message_delta (stop reason, usage) ─► message_stop

Blocks are numbered from 0 and never overlap. Every event has a name, since the SDKs ignore unnamed events; `ping`
events keep an idle stream open. The text deltas of a block differ only in their text, so the other bytes are made once
per block.

The input of a tool call is streamed while it is generated: the fragments so far are always a prefix of valid JSON. A
thinking block ends with its signature (`signatures.py`); with `display: omitted` it has nothing else.

`input_tokens` counts the prompt tokens that were computed, `cache_read_input_tokens` those from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.engine.results import merge_parts, text_parts
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import ContextLengthExceeded, TokenmillError
from tokenmill.server.anthropic.parse import MessagesCall
from tokenmill.server.anthropic.tools import wire_id
from tokenmill.server.dialect import SSE_HEADERS, Dialect, RequestHead, json_bytes, named_sse_frame
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.quotas import anthropic_limit_headers
from tokenmill.server.request_ids import new_id
from tokenmill.server.routing import TEXT, object_of
from tokenmill.server.signatures import ThoughtSigner
from tokenmill.types import CallArguments, CallEnd, CallStart, Event, Part, TextPart, ThoughtPart, Usage

ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(error: TokenmillError, request_id: str) -> dict[str, Any]:
    default = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = ERROR_TYPES.get(error.http_status, default)
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}


def _message(error: TokenmillError) -> str:
    """Return the message of an error. For a prompt that is too long it has the wording that Claude Code recognises in
    order to shorten the conversation."""
    if isinstance(error, ContextLengthExceeded) and error.num_tokens is not None:
        return f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
    return str(error)


def names_a_version(head: RequestHead) -> bool:
    """Return whether a request comes from a client of Anthropic's API: they all send its version."""
    return "anthropic-version" in head.headers


ANTHROPIC = Dialect(
    name="anthropic",
    prefixes=("/v1/messages",),
    error_content=error_content,
    error_schema=object_of(type={"const": "error"}, error=object_of(type=TEXT, message=TEXT), request_id=TEXT),
    key_hint="send `x-api-key: KEY` or `Authorization: Bearer KEY`",
    statuses={503: 529},
    shared={"/v1/models": names_a_version},
    limit_headers=anthropic_limit_headers,
)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _frame(payload: dict[str, Any]) -> bytes:
    return named_sse_frame(payload["type"], orjson.dumps(payload))


# ── blocks ─────────────────────────────────────────────────────────────────────────────────────────────


class PartFilter:
    """Prepares the parts of an answer for blocks: text that is only white space is dropped.

    With `holds_text` (thinking `between_tools`) text before a tool call becomes thinking: it says what the model is
    about to do. Such text is held back until the next part is known.
    """

    def __init__(self, *, holds_text: bool) -> None:
        self._holds_text = holds_text
        self._held = ""
        self.is_in_text = False  # further text continues the open text block

    def push(self, parts: Iterable[Part]) -> list[Part]:
        filtered: list[Part] = []
        for part in parts:
            if isinstance(part, TextPart):
                filtered += self._text(part)
            else:
                filtered += self._release_held()
                filtered.append(part)
        return filtered

    def finish(self) -> list[Part]:
        return text_parts(self._held) if self._held.strip() else []

    def _text(self, part: TextPart) -> list[Part]:
        if self.is_in_text:
            return [part]
        self._held += part.text
        if self._holds_text or not self._held.strip():
            return []
        held, self._held, self.is_in_text = self._held, "", True
        return [TextPart(held)]

    def _release_held(self) -> list[Part]:
        """Return the held text as thinking, before a part that is not text."""
        held, self._held, self.is_in_text = self._held, "", False
        return [ThoughtPart(held)] if self._holds_text and held.strip() else []


def _blocks(parts: Iterable[Part], signer: ThoughtSigner, *, is_shown: bool) -> list[dict[str, Any]]:
    """Return the content blocks of a reply that is not streamed."""
    blocks: list[dict[str, Any]] = []
    for part in merge_parts(parts):
        match part:
            case TextPart(text):
                blocks.append({"type": "text", "text": text})
            case ThoughtPart(text):
                signature = signer.sign(text, is_shown=is_shown)
                blocks.append({"type": "thinking", "thinking": text if is_shown else "", "signature": signature})
            case CallStart():
                blocks.append(_call_block(part))
            case CallArguments():
                blocks[-1]["input"] = _input(part.fragment)
            case CallEnd():
                pass
    return blocks


def _call_block(call: CallStart) -> dict[str, Any]:
    return {"type": "tool_use", "id": wire_id(call.id), "name": call.name, "input": {}}


def _input(arguments: str) -> dict[str, Any]:
    value = orjson.loads(arguments)
    assert isinstance(value, dict), "arguments of a call are an object"
    return value


class BlockStream:
    """Renders the events of consecutive blocks."""

    PLACEHOLDER = "\0"

    def __init__(self, signer: ThoughtSigner, *, is_shown: bool) -> None:
        self._signer = signer
        self._is_shown = is_shown
        self._index = -1
        self._kind = ""  # of the open block; "" if none is open
        self._around = b"", b""  # the bytes around the text of a delta of the open block
        self._thought: list[str] = []  # the text of the open thinking block

    def render(self, parts: Iterable[Part]) -> bytes:
        return b"".join(map(self._part, parts))

    def _part(self, part: Part) -> bytes:
        match part:
            case TextPart(text):
                return self.text(text)
            case ThoughtPart(text):
                return self._think(text)
            case CallStart():
                return self._open("tool_use", _call_block(part))
            case CallArguments():
                return self._delta({"type": "input_json_delta", "partial_json": part.fragment})
            case CallEnd():
                return self.close()

    def text(self, text: str) -> bytes:
        opened = b""
        if self._kind != "text":
            opened = self._open("text", {"type": "text", "text": ""})
            self._around = self._delta_around({"type": "text_delta", "text": self.PLACEHOLDER})
        return opened + self._around[0] + orjson.dumps(text) + self._around[1]

    def _think(self, text: str) -> bytes:
        opened = b""
        if self._kind != "thinking":
            opened = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._around = self._delta_around({"type": "thinking_delta", "thinking": self.PLACEHOLDER})
        self._thought.append(text)
        return opened + self._around[0] + orjson.dumps(text) + self._around[1] if self._is_shown else opened

    def _delta_around(self, delta: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a delta, which all deltas of a block share."""
        before, _, after = self._delta(delta).rpartition(orjson.dumps(self.PLACEHOLDER))
        return before, after

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self.close()
        self._index += 1
        self._kind = kind
        return closed + _frame({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _frame({"type": "content_block_delta", "index": self._index, "delta": delta})

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signature = self._signer.sign("".join(self._thought), is_shown=self._is_shown)
            signed = self._delta({"type": "signature_delta", "signature": signature})
            self._thought.clear()
        self._kind = ""
        return signed + _frame({"type": "content_block_stop", "index": self._index})


# ── a reply ────────────────────────────────────────────────────────────────────────────────────────────


class MessageRendering:
    """Replies of /v1/messages."""

    stream_headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = _frame({"type": "ping"})

    def __init__(self, info: ModelInfo, call: MessagesCall, signer: ThoughtSigner) -> None:
        self._info = info
        self._call = call
        self._signer = signer
        self._id = new_id("msg_")
        self._filter = self._new_filter()
        self._stream = BlockStream(signer, is_shown=call.thinking.is_shown)
        self._last: Event | None = None  # the event with the finish reason

    def _new_filter(self) -> PartFilter:
        return PartFilter(holds_text=self._call.thinking.is_between_tools and bool(self._call.request.tools))

    def begin(self, facts: GenerationFacts) -> bytes:
        return _frame({"type": "message_start", "message": self._message([], None, None, facts.usage)})

    def event(self, choice: int, event: Event) -> bytes:
        if event.finish_reason is None and self._filter.is_in_text and _is_text_only(event):  # most events by far
            return self._stream.text(event.text) if event.text else b""
        data = self._stream.render(self._filter.push(_parts(event)))
        if event.finish_reason is not None:
            self._last = event
            data += self._stream.render(self._filter.finish()) + self._stream.close()
        return data

    def end(self, facts: GenerationFacts) -> bytes:
        reason, sequence = self._stop(self._last, facts.usage)
        delta = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        end = {"type": "message_delta", "delta": delta, "usage": usage_object(facts.usage)}
        return _frame(end) + _frame({"type": "message_stop"})

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        """Return the last event of a failed stream; Anthropic's SDKs raise it as an exception."""
        return named_sse_frame("error", ANTHROPIC.error_body(error, request_id))

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        parts = self._new_filter()
        filtered = [*parts.push(_parts(choices[0])), *parts.finish()]
        content = _blocks(filtered, self._signer, is_shown=self._call.thinking.is_shown)
        reason, sequence = self._stop(choices[0], facts.usage)
        return json_bytes(orjson.dumps(self._message(content, reason, sequence, facts.usage)))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._info.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": None,
            "usage": {**usage_object(usage), "service_tier": "standard"},
        }

    def _stop(self, last: Event | None, usage: Usage) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence if one ended the answer."""
        assert last is not None, "the last event of an answer has a finish reason"
        if last.finish_reason == "tool_calls":
            return "tool_use", None
        if last.finish_reason == "stop":
            sequence = last.stop_reason if isinstance(last.stop_reason, str) else None
            return ("end_turn", None) if sequence is None else ("stop_sequence", sequence)
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        max_tokens = self._call.request.params.max_tokens or 0
        is_context_full = num_tokens >= self._info.max_context and usage.completion_tokens < max_tokens
        return ("model_context_window_exceeded" if is_context_full else "max_tokens"), None


def _parts(event: Event) -> list[Part]:
    return text_parts(event.text) if event.parts is None else event.parts


def _is_text_only(event: Event) -> bool:
    parts = event.parts
    return parts is None or (len(parts) == 1 and type(parts[0]) is TextPart)
