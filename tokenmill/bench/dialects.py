"""API dialects for the load generator: the request body, and a reader of one event of the response stream.

A reader gets the payload of one event (the bytes after `data:`, or one line) and adds to the record: a piece of text
with its time, the server's token counts, the finish reason, an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tokenmill.bench.request_records import BenchRecord
from tokenmill.errors import InvalidConfig

Message = dict[str, str]
Reader = Callable[[bytes, BenchRecord, float], None]


@dataclass(frozen=True)
class RequestSpec:
    """One request, independent of the dialect."""

    messages: tuple[Message, ...]  # one user message for a plain prompt
    output_len: int
    input_len: int = 0  # intended length; the server reports the actual one
    prompt_ids: tuple[int, ...] = ()  # token ids instead of text, where a dialect accepts them
    schema: dict[str, Any] | None = None

    @property
    def prompt(self) -> str:
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class ClientDialect:
    name: str
    path: str
    body: Callable[[RequestSpec, str], dict[str, Any]]
    read: Reader
    is_sse: bool = True  # False: one JSON object a line
    key_headers: tuple[str, ...] = ()  # headers for the key besides `authorization`
    headers: tuple[str, ...] = ()  # further headers of the dialect


def _text(record: BenchRecord, now: float, text: str | None) -> None:
    if text:
        record.times_s.append(now)
        if record.texts is not None:
            record.texts.append(text)


def _fail(record: BenchRecord, error: Any) -> None:
    record.error = "stream_error"
    record.detail = str(error.get("message", error) if isinstance(error, dict) else error)


# ── OpenAI ─────────────────────────────────────────────────────────────────────────────────────────────


def _openai_options(ask: RequestSpec, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ask.schema is None:
        options["ignore_eos"] = True  # servers that do not know it ignore it
    else:
        schema = {"name": "answer", "schema": ask.schema, "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": schema}
    return options


def _chat_body(ask: RequestSpec, model: str) -> dict[str, Any]:
    return {**_openai_options(ask, model), "messages": list(ask.messages)}


def _completions_body(ask: RequestSpec, model: str) -> dict[str, Any]:
    return {**_openai_options(ask, model), "prompt": list(ask.prompt_ids) or ask.prompt}


def _read_openai(payload: bytes, record: BenchRecord, now: float) -> None:
    if payload == b"[DONE]":
        return
    event = orjson.loads(payload)
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if delta is None:
            _text(record, now, choice.get("text"))
        else:
            _text(record, now, delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    usage = event.get("usage")
    if usage:
        record.input_tokens, record.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if event.get("error"):
        _fail(record, event["error"])


# ── others ─────────────────────────────────────────────────────────────────────────────────────────────


def _anthropic_body(ask: RequestSpec, model: str) -> dict[str, Any]:
    """Build the body without a temperature: newer models of the API refuse it."""
    body = {"model": model, "max_tokens": ask.output_len, "stream": True, "messages": list(ask.messages)}
    wanted = {"format": {"type": "json_schema", "schema": ask.schema}}
    return body if ask.schema is None else {**body, "output_config": wanted}


def _read_anthropic(payload: bytes, record: BenchRecord, now: float) -> None:
    event = orjson.loads(payload)
    match event.get("type"):
        case "content_block_delta":
            _text(record, now, event["delta"].get("text") or event["delta"].get("thinking"))
        case "message_start":
            _anthropic_input(record, event["message"].get("usage") or {})
        case "message_delta":
            record.output_tokens = (event.get("usage") or {}).get("output_tokens")
            record.finish_reason = event["delta"].get("stop_reason")
        case "error":
            _fail(record, event.get("error"))


def _anthropic_input(record: BenchRecord, usage: dict[str, Any]) -> None:
    """Sum the prompt's tokens: `input_tokens` leaves out those read from and written to the cache."""
    cached = usage.get("cache_read_input_tokens") or 0
    record.cached_tokens = cached
    record.input_tokens = usage.get("input_tokens", 0) + cached + (usage.get("cache_creation_input_tokens") or 0)


def _ollama_body(ask: RequestSpec, model: str) -> dict[str, Any]:
    options = {"num_predict": ask.output_len, "temperature": 0.0}
    body = {"model": model, "messages": list(ask.messages), "stream": True, "options": options}
    return body if ask.schema is None else {**body, "format": ask.schema}


def _read_ollama(payload: bytes, record: BenchRecord, now: float) -> None:
    event = orjson.loads(payload)
    message = event.get("message") or {}
    _text(record, now, message.get("content") or message.get("thinking"))
    if event.get("done"):
        record.input_tokens, record.output_tokens = event.get("prompt_eval_count"), event.get("eval_count")
        record.finish_reason = event.get("done_reason")
    if event.get("error"):
        _fail(record, event["error"])


def _tgi_body(ask: RequestSpec, model: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": ask.output_len, "details": True}
    if ask.schema is not None:
        parameters["grammar"] = {"type": "json", "value": ask.schema}
    return {"inputs": ask.prompt, "parameters": parameters}


def _read_tgi(payload: bytes, record: BenchRecord, now: float) -> None:
    event = orjson.loads(payload)
    _text(record, now, (event.get("token") or {}).get("text"))
    details = event.get("details")
    if details:
        record.output_tokens, record.finish_reason = details.get("generated_tokens"), details.get("finish_reason")
        record.input_tokens = details.get("input_length")
    if event.get("error"):
        _fail(record, event["error"])


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        ClientDialect("openai-chat", "/v1/chat/completions", _chat_body, _read_openai),
        ClientDialect("openai-completions", "/v1/completions", _completions_body, _read_openai),
        ClientDialect("anthropic", "/v1/messages", _anthropic_body, _read_anthropic, key_headers=("x-api-key",),
                headers=("anthropic-version: 2023-06-01",)),
        ClientDialect("ollama", "/api/chat", _ollama_body, _read_ollama, is_sse=False),
        ClientDialect("tgi", "/generate_stream", _tgi_body, _read_tgi),
    )
}  # fmt: skip


def find_dialect(name: str) -> ClientDialect:
    if name not in DIALECTS:
        raise InvalidConfig(f"unknown dialect {name!r}; known are {', '.join(DIALECTS)}", param="dialect")
    return DIALECTS[name]
