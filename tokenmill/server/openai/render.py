"""Replies and errors in OpenAI's form.

    role chunk per choice ─► deltas ─► `delta: {}` with finish_reason per choice ─► (usage) ─► [DONE]

    deltas   {content}, {reasoning_content}, and for a call {index, id, type, function: {name, arguments: ""}} once,
             then {index, function: {arguments: fragment}}

The chunks of a stream differ only in index, delta and finish reason, so the other bytes are made once per request; per
token there is one small `orjson.dumps`.

Errors always have message, type, param and code; `code` is a string. OpenAI's SDKs retry 408, 409, 429 and 5xx, so an
invalid request must never get one of these.
"""

from __future__ import annotations

import base64
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from sys import byteorder
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.engine.results import reasoning_of, text_parts, tool_calls_of
from tokenmill.engine.status import ModelInfo
from tokenmill.errors import RequestFailed, TokenmillError
from tokenmill.server.dialect import SSE_HEADERS, SSE_PING, Dialect, sse_frame
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.openai.parse import EmbeddingCall
from tokenmill.server.request_ids import new_id
from tokenmill.server.routing import TEXT, json_response, object_of
from tokenmill.types import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Part,
    TextPart,
    ThoughtPart,
    TokenInfo,
    ToolCall,
    ToolKind,
    Usage,
)

ARGUMENTS: dict[ToolKind, str] = {"function": "arguments", "custom": "input"}  # field with the text of a call
DONE = sse_frame(b"[DONE]")
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
MAYBE_TEXT = {"type": ["string", "null"]}


def error_content(error: TokenmillError, request_id: str) -> dict[str, Any]:
    default = "invalid_request_error" if error.http_status < 500 else "server_error"
    kind = ERROR_TYPES.get(error.http_status, default)
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


OPENAI = Dialect(
    name="openai",
    prefixes=("",),
    error_content=error_content,
    error_schema=object_of(error=object_of(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT)),
    key_hint="send `Authorization: Bearer KEY`",
)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
        },
        "speculation": {"proposed": usage.drafted_tokens, "accepted": usage.accepted_tokens},
    }


class Envelope:
    """The fields that all chunks of one answer share: id, object, created, model, fingerprint."""

    def __init__(self, info: ModelInfo, prefix: str, kind: str, include_usage: bool, tier: str | None = None) -> None:
        self.fields = {
            "id": new_id(f"{prefix}-"),
            "object": kind,
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": info.fingerprint,
            **({} if tier is None else {"service_tier": tier}),
        }
        self._include_usage = include_usage
        self._head = b"data: " + orjson.dumps(self.fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._tail

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return sse_frame(orjson.dumps({**self.fields, "choices": [], "usage": usage_object(usage)})) + DONE

    def whole(self, choices: list[dict[str, Any]], usage: Usage, extra: dict[str, Any]) -> Response:
        return json_response({**self.fields, "choices": choices, "usage": usage_object(usage), **extra})


class TextChunks:
    """Renders chunks that have only text, as nearly all do. The bytes around the text are made once per choice."""

    PLACEHOLDER = "\0"

    def __init__(self, chunk: Callable[[int, str], bytes]) -> None:
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def render(self, choice: int, text: str) -> bytes:
        around = self._around.get(choice)
        if around is None:
            before, _, after = self._chunk(choice, self.PLACEHOLDER).rpartition(orjson.dumps(self.PLACEHOLDER))
            around = self._around[choice] = before, after
        return around[0] + orjson.dumps(text) + around[1]


class OpenAIRendering:
    """The common parts of OpenAI's renderings: server-sent events, and errors in them."""

    stream_headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = SSE_PING

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        """Return the last event of a failed stream; OpenAI's SDKs raise it as an exception."""
        return sse_frame(OPENAI.error_body(error, request_id))


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────


class ChatRendering(OpenAIRendering):
    """Replies of /v1/chat/completions. `reasoning_fields`: the names of the fields with the model's reasoning."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        num_choices: int,
        is_stream: bool,
        include_usage: bool,
        reasoning_fields: Sequence[str] = ("reasoning_content",),
        tier: str | None = None,
    ) -> None:
        """`tier`: the service tier that the reply names; None if the client did not set one."""
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        self._envelope = Envelope(info, "chatcmpl", kind, include_usage, tier)
        self._num_choices = num_choices
        self._reasoning_fields = reasoning_fields
        self._texts = TextChunks(lambda choice, text: self._chunk(choice, {"content": text}))
        self._held: dict[int, list[TokenInfo]] = {}  # by choice: logprobs whose text was not sent yet
        self._kinds: dict[tuple[int, int], ToolKind] = {}  # by choice and call

    def begin(self, facts: GenerationFacts) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, delta) for choice in range(self._num_choices))

    def event(self, choice: int, event: Event) -> bytes:
        if event.parts is None and event.logprobs is None and event.finish_reason is None:
            return self._texts.render(choice, event.text) if event.text else b""
        logprobs = self._logprobs(choice, event)
        chunks = []
        for part in text_parts(event.text) if event.parts is None else event.parts:
            delta = self._delta(choice, part)
            if "content" in delta:
                chunks.append(self._chunk(choice, delta, logprobs))
                logprobs = None  # sent once, with the first text of the event
            elif delta:
                chunks.append(self._chunk(choice, delta))
        if event.finish_reason is not None:
            chunks.append(self._chunk(choice, {}, logprobs, event.finish_reason))
        return b"".join(chunks)

    def _delta(self, choice: int, part: Part) -> dict[str, Any]:
        """Render a part as a delta. SDKs concatenate the strings of a call's deltas, so id and name are sent once."""
        match part:
            case TextPart(text):
                return {"content": text}
            case ThoughtPart(text):
                return dict.fromkeys(self._reasoning_fields, text)
            case CallStart(index):
                self._kinds[choice, index] = part.kind
                call = ToolCall(id=part.id, name=part.name, arguments="", kind=part.kind)
                return {"tool_calls": [{"index": index, **call_object(call)}]}
            case CallArguments(index, fragment):
                kind = self._kinds[choice, index]
                return {"tool_calls": [{"index": index, kind: {ARGUMENTS[kind]: fragment}}]}
            case CallEnd():
                return {}

    def _logprobs(self, choice: int, event: Event) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        infos = [*self._held.pop(choice, []), *event.logprobs]
        if not event.text and event.finish_reason is None:
            self._held[choice] = infos
            return None
        return chat_logprobs(infos) if infos else None

    def _chunk(
        self, choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        return self._envelope.chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def end(self, facts: GenerationFacts) -> bytes:
        return self._envelope.end(facts.usage)

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        prompt = choices[0].prompt_logprobs
        extra = {} if prompt is None else {"prompt_logprobs": prompt_logprobs(prompt)}
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._envelope.whole(rendered, facts.usage, extra)

    def _choice(self, index: int, choice: Event) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _message(self, choice: Event) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.parts is None:
            return message
        calls, reasoning = tool_calls_of(choice), reasoning_of(choice)
        if not choice.text and (calls or reasoning):
            message["content"] = None
        if reasoning is not None:
            message |= dict.fromkeys(self._reasoning_fields, reasoning)
        if calls:
            message["tool_calls"] = [call_object(call) for call in calls]
        return message


def call_object(call: ToolCall) -> dict[str, Any]:
    inner = {"name": call.name, ARGUMENTS[call.kind]: call.arguments}
    return {"id": call.id, "type": call.kind, call.kind: inner}


# ── completions ────────────────────────────────────────────────────────────────────────────────────────


class CompletionRendering(OpenAIRendering):
    """Replies of /v1/completions. `echoes`: the prompt of each choice, to be sent before its answer."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        num_choices: int,
        include_usage: bool,
        echoes: list[str] | None,
        wants_logprobs: bool,
        wants_prompt_logprobs: bool,
    ) -> None:
        self._envelope = Envelope(info, "cmpl", "text_completion", include_usage)
        self._echoes = echoes
        self._wants_logprobs = wants_logprobs
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self._texts = TextChunks(self._chunk)
        self._legacy = [LegacyLogprobs(len(echoes[choice]) if echoes else 0) for choice in range(num_choices)]
        self._held: dict[int, list[TokenInfo]] = {}

    def begin(self, facts: GenerationFacts) -> bytes:
        chunks = [self._chunk(choice, text) for choice, text in enumerate(self._echoes or []) if text]
        return b"".join(chunks)

    def event(self, choice: int, event: Event) -> bytes:
        if event.logprobs is None and event.finish_reason is None:
            return self._texts.render(choice, event.text) if event.text else b""
        if event.finish_reason is None and not event.text:
            self._held.setdefault(choice, []).extend(event.logprobs or [])
            return b""
        return self._chunk(choice, event.text, self._logprobs(choice, event), event.finish_reason)

    def _logprobs(self, choice: int, event: Event) -> dict[str, Any] | None:
        infos = [*self._held.pop(choice, []), *(event.logprobs or [])]
        return self._legacy[choice].render(infos) if infos else None

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        return self._envelope.chunk({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish})

    def end(self, facts: GenerationFacts) -> bytes:
        return self._envelope.end(facts.usage)

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._envelope.whole(rendered, facts.usage, {})

    def _choice(self, index: int, choice: Event) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else ""
        rendered = {
            "index": index,
            "text": echo + choice.text,
            "logprobs": self._choice_logprobs(index, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._wants_prompt_logprobs:
            rendered["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or [])
        return rendered

    def _choice_logprobs(self, index: int, choice: Event) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        infos = choice.logprobs or []
        if self._echoes is None:
            return self._legacy[index].render(infos)
        return echoed_logprobs(self._echoes[index], choice.prompt_logprobs or [None], infos)


# ── embeddings ──────────────────────────────────────────────────────────────────────────────────────


class EmbeddingRendering(OpenAIRendering):
    """Replies of /v1/embeddings: numbers, or base64 of little-endian 32-bit floats. They are never streamed."""

    def __init__(self, info: ModelInfo, call: EmbeddingCall) -> None:
        self._info = info
        self._call = call

    def begin(self, facts: GenerationFacts) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def event(self, choice: int, event: Event) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def end(self, facts: GenerationFacts) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(choice)}
            for index, choice in enumerate(choices)
        ]
        num_tokens = facts.usage.prompt_tokens
        counts = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return json_response({"object": "list", "data": data, "model": self._info.name, "usage": counts})

    def _vector(self, choice: Event) -> Any:
        if choice.embedding is None:
            raise RequestFailed("the engine returned no embedding")
        vector = shortened(choice.embedding, self._call.dimensions)
        return to_base64(vector) if self._call.is_base64 else vector


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """Return the first `dimensions` numbers of a vector, normalised to length 1."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    head = vector[:dimensions]
    norm = math.sqrt(sum(value * value for value in head))
    return [value / norm for value in head] if norm > 0 else head


def to_base64(vector: list[float]) -> str:
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")


# ── logprobs: the form of chats, the legacy form of completions, and vLLM's form for prompts ────────


def chat_logprobs(infos: list[TokenInfo]) -> dict[str, Any]:
    return {"content": [_chat_token(info) for info in infos], "refusal": None}


def _chat_token(info: TokenInfo) -> dict[str, Any]:
    tops = [_token(text, raw, logprob) for _, text, raw, logprob in info.top]
    return {**_token(info.text, info.raw, info.logprob), "top_logprobs": tops}


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


class LegacyLogprobs:
    """Renders logprobs as /v1/completions does: lists of tokens, token_logprobs, top_logprobs and text_offset. Offsets
    continue across chunks."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def render(self, infos: list[TokenInfo]) -> dict[str, Any]:
        offsets = []
        for info in infos:
            offsets.append(self._offset - (info.raw[:1] > b"\x7f" and is_continued(info.raw[0])))
            self._offset += num_characters_begun(info)
        return {
            "tokens": [info.text for info in infos],
            "token_logprobs": [info.logprob for info in infos],
            "top_logprobs": [_legacy_top(info) for info in infos],
            "text_offset": offsets,
        }


def is_continued(byte: int) -> bool:
    """Return whether a byte is a continuation byte of UTF-8, not the first of a character."""
    return byte & 0xC0 == 0x80


def num_characters_begun(info: TokenInfo) -> int:
    """Return the number of characters that begin in a token. Several tokens may share a character; each of them is
    shown as U+FFFD."""
    return len(info.text) if info.raw.isascii() else sum(not is_continued(byte) for byte in info.raw)


def _legacy_top(info: TokenInfo) -> dict[str, float]:
    """Return the alternatives and the sampled token. Of two tokens with the same text the more likely one is kept."""
    tops: dict[str, float] = {}
    for _, text, _, logprob in info.top:
        tops.setdefault(text, logprob)
    tops.setdefault(info.text, info.logprob)
    return tops


def echoed_logprobs(prompt: str, prompt_infos: Sequence[TokenInfo | None], infos: list[TokenInfo]) -> dict[str, Any]:
    """Return the logprobs of prompt and answer in one list. The first token has no logprob: nothing predicts it. Its
    text is the prompt without the other tokens' text; its computed length is negative if the tokenizer adds a space
    before the text."""
    known = [info for info in prompt_infos if info is not None]
    first_length = len(prompt) - sum(map(num_characters_begun, known))
    rest = LegacyLogprobs(first_length).render([*known, *infos])
    rest["text_offset"] = [max(0, offset) for offset in rest["text_offset"]]
    first = {"tokens": prompt[: max(0, first_length)], "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [first[name], *values] for name, values in rest.items()}


def prompt_logprobs(infos: Sequence[TokenInfo | None]) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt in vLLM's form: per position a map from token id to logprob, rank and text."""
    return [None if info is None else _prompt_token(info) for info in infos]


def _prompt_token(info: TokenInfo) -> dict[str, Any]:
    tokens: dict[str, Any] = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}
        for rank, (token_id, text, _, logprob) in enumerate(info.top, 1)
    }
    tokens[str(info.token_id)] = {"logprob": info.logprob, "rank": info.rank, "decoded_token": info.text}
    return tokens
