"""Replies and errors in Ollama's form.

    {"model": …, "created_at": …, "message": {"role": "assistant", "content": "Hel"}, "done": false}
    {"model": …, "created_at": …, "message": {…, "content": ""}, "done": true, "done_reason": "stop", "eval_count": …}

A stream has one JSON object per line, without empty lines or pings: Ollama's clients parse every line. Reasoning is in
the field `thinking`. A tool call is sent whole, with its arguments as an object. Durations are nanoseconds:

    total = load (waiting for the model and in the queue) + prompt_eval (until the first token) + eval (until the last)

An error is `{"error": text}`, also as the last line of a failed stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.engine.results import merge_parts, reasoning_of
from tokenmill.errors import Overloaded, RequestFailed, TokenmillError
from tokenmill.server.dialect import NDJSON_HEADERS, Dialect, json_bytes, ndjson_line
from tokenmill.server.errors import MissingBody
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.openai.render import shortened
from tokenmill.server.routing import TEXT, object_of
from tokenmill.types import CallArguments, CallEnd, CallStart, Event, Part, TextPart, ThoughtPart, TokenInfo

NANOSECONDS = 1_000_000_000
MISSING_BODY = "missing request body"
BUSY = "server busy, please try again.  maximum pending requests exceeded"


def error_content(error: TokenmillError, request_id: str) -> dict[str, Any]:
    return {"error": error_text(error)}


def error_text(error: TokenmillError) -> str:
    if isinstance(error, MissingBody):
        return MISSING_BODY
    return BUSY if type(error) is Overloaded else str(error)


OLLAMA = Dialect(
    name="ollama",
    prefixes=("/api/",),
    error_content=error_content,
    error_schema=object_of(error=TEXT),
    key_hint="send `Authorization: Bearer KEY`; Ollama's own clients take it from OLLAMA_API_KEY",
    statuses={429: 503},
    takes_any_content_type=True,
)


def timestamp(time_ns: int | None = None) -> str:
    """Format a time, by default the current time, as RFC 3339 with nanoseconds."""
    seconds, rest = divmod(time.time_ns() if time_ns is None else time_ns, NANOSECONDS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest:09d}Z"


class OllamaRendering:
    """The common parts of the renderings of /api/chat and /api/generate."""

    stream_headers: Sequence[tuple[bytes, bytes]] = NDJSON_HEADERS
    ping = b""

    def __init__(self, model: str) -> None:
        self._model = model  # as the client wrote it
        self._head = b'{"model":' + orjson.dumps(model) + b',"created_at":"'
        self._finish_reason = "stop"
        self._calls = CallCollector()
        self._logprobs: list[TokenInfo] = []  # of text that was not sent yet

    def begin(self, facts: GenerationFacts) -> bytes:
        return b""

    def event(self, choice: int, event: Event) -> bytes:
        if event.finish_reason is not None:
            self._finish_reason = event.finish_reason
        self._note(event)
        if event.parts is None and event.logprobs is None:
            return self._text_line(event.text) if event.text else b""
        self._logprobs += event.logprobs or []
        parts = merge_parts([TextPart(event.text)] if event.parts is None else event.parts)
        return b"".join(self._line(content, False, self._pop_logprobs()) for content in self._contents(parts))

    def _pop_logprobs(self) -> dict[str, Any]:
        """Return the logprobs that were not sent yet, for the next line."""
        infos, self._logprobs = self._logprobs, []
        return {"logprobs": logprobs(infos)} if infos else {}

    def _note(self, event: Event) -> None:
        """Store what the last line needs from an event."""

    def _text_line(self, text: str) -> bytes:
        raise NotImplementedError

    def _content(self, text: str, thought: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        raise NotImplementedError

    def _contents(self, parts: list[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            match part:
                case TextPart(text):
                    if text:
                        yield self._content(text, "")
                case ThoughtPart(text):
                    if text:
                        yield self._content("", text)
                case _:
                    if (call := self._calls.add(part)) is not None:
                        yield self._content("", "", [call])

    def _line(self, content: dict[str, Any], is_done: bool, extra: dict[str, Any] | None = None) -> bytes:
        return ndjson_line(orjson.dumps(self._object(content, is_done, extra)))

    def _object(self, content: dict[str, Any], is_done: bool, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp(), **content, "done": is_done, **(extra or {})}

    def end(self, facts: GenerationFacts) -> bytes:
        return self._line(self._content("", ""), True, {**self._last(facts), **self._pop_logprobs()})

    def _last(self, facts: GenerationFacts) -> dict[str, Any]:
        return {"done_reason": done_reason(self._finish_reason), **durations(facts)}

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        return ndjson_line(OLLAMA.error_body(error, request_id))

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        answer = choices[0]
        self._finish_reason = answer.finish_reason or "stop"
        self._note(answer)
        calls = [call for part in answer.parts or () if (call := self._calls.add(part)) is not None]
        content = self._content(answer.text, reasoning_of(answer) or "", calls or None)
        extra = {} if answer.logprobs is None else {"logprobs": logprobs(answer.logprobs)}
        return json_bytes(orjson.dumps(self._object(content, True, {**self._last(facts), **extra})))


class CallCollector:
    """Assembles complete tool calls, since Ollama sends arguments as an object. A call that was cut off is omitted;
    `done_reason` is then `length`."""

    def __init__(self) -> None:
        self._open: CallStart | None = None
        self._fragments: list[str] = []

    def add(self, part: Part) -> dict[str, Any] | None:
        """Add a part; return the call that it completes, if any."""
        match part:
            case CallStart():
                self._open, self._fragments = part, []
            case CallArguments():
                self._fragments.append(part.fragment)
            case CallEnd() if self._open is not None:
                start, self._open = self._open, None
                arguments = orjson.loads("".join(self._fragments) or "{}")
                function = {"index": start.index, "name": start.name, "arguments": arguments}
                return {"id": start.id, "function": function}
        return None


class ChatReply(OllamaRendering):
    """Replies of /api/chat."""

    def _text_line(self, text: str) -> bytes:
        middle = b'","message":{"role":"assistant","content":'
        return self._head + timestamp().encode() + middle + orjson.dumps(text) + b'},"done":false}\n'

    def _content(self, text: str, thought: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateReply(OllamaRendering):
    """Replies of /api/generate. `has_context`: the last line has the token ids of the conversation so far."""

    def __init__(self, model: str, *, has_context: bool) -> None:
        super().__init__(model)
        self._has_context = has_context
        self._token_ids: list[int] = []

    def _note(self, event: Event) -> None:
        if self._has_context:
            self._token_ids += event.token_ids

    def _text_line(self, text: str) -> bytes:
        return self._head + timestamp().encode() + b'","response":' + orjson.dumps(text) + b',"done":false}\n'

    def _content(self, text: str, thought: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {"response": text, "thinking": thought} if thought else {"response": text}

    def _last(self, facts: GenerationFacts) -> dict[str, Any]:
        last = super()._last(facts)
        return {**last, "context": [*facts.prompt_token_ids, *self._token_ids]} if self._has_context else last


def loaded_reply(model: str, content: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return the reply to a request without a prompt, which only loads or unloads the model."""
    return {"model": model, "created_at": timestamp(), **content, "done": True, "done_reason": reason}


def done_reason(finish_reason: str) -> str:
    return "length" if finish_reason == "length" else "stop"


def durations(facts: GenerationFacts) -> dict[str, int]:
    return {
        "total_duration": nanoseconds(facts.elapsed_s),
        "load_duration": nanoseconds(facts.waited_s),
        "prompt_eval_count": facts.usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(facts.begun_s - facts.waited_s),
        "eval_count": facts.usage.completion_tokens,
        "eval_duration": nanoseconds(facts.elapsed_s - facts.begun_s),
    }


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))


def logprobs(infos: list[TokenInfo]) -> list[dict[str, Any]]:
    return [
        {**_token(info.text, info.raw, info.logprob), "top_logprobs": [_token(*top[1:]) for top in info.top]}
        for info in infos
    ]


def _token(text: str, raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


# ── embeddings ──────────────────────────────────────────────────────────────────────────────────────


class EmbedReply:
    """Replies of /api/embed, and of the older /api/embeddings, whose reply has only one vector."""

    stream_headers: Sequence[tuple[bytes, bytes]] = NDJSON_HEADERS
    ping = b""

    def __init__(self, model: str, *, dimensions: int | None, is_legacy: bool) -> None:
        self._model, self._dimensions, self._is_legacy = model, dimensions, is_legacy

    def begin(self, facts: GenerationFacts) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def event(self, choice: int, event: Event) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def end(self, facts: GenerationFacts) -> bytes:
        raise NotImplementedError("embeddings are never streamed")

    def failure(self, error: TokenmillError, request_id: str) -> bytes:
        return ndjson_line(OLLAMA.error_body(error, request_id))

    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
        vectors = [self._vector(choice) for choice in choices]
        if self._is_legacy:
            return json_bytes(orjson.dumps({"embedding": vectors[0]}))
        return json_bytes(orjson.dumps(embed_reply(self._model, vectors, durations(facts))))

    def _vector(self, choice: Event) -> list[float]:
        if choice.embedding is None:
            raise RequestFailed("the engine returned no embedding")
        return shortened(choice.embedding, self._dimensions)


def embed_reply(model: str, vectors: list[list[float]], counts: dict[str, int]) -> dict[str, Any]:
    names = ("total_duration", "load_duration", "prompt_eval_count")
    return {"model": model, "embeddings": vectors, **{name: counts.get(name, 0) for name in names}}
