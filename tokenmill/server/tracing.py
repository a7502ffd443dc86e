"""Makes the trace spans of a request from its record, following OpenTelemetry's conventions for generative AI.

Spans contain no text: prompts and answers are not attributes. The request's parameters are those of its first engine
request, which are the same for all engine requests of a job.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers

from tokenmill.config.server import ServerConfig
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.observe.traces import Attribute, SpanDraft, Tracer
from tokenmill.server.accounting import RequestRecord
from tokenmill.types import ChatRequest, EmbedRequest

PROVIDER = "tokenmill"


def tracing_of(config: ServerConfig) -> RequestTracing | None:
    """Return the tracing of a server; None without an endpoint to export spans to."""
    if config.otlp_endpoint is None:
        return None
    return RequestTracing(Tracer(config.otlp_endpoint, config.trace_share))


class RequestTracing:
    """Starts a trace for each request and exports its spans at the end."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, record: RequestRecord, headers: Headers) -> None:
        record.trace = self._tracer.begin(headers)

    def finish(self, record: RequestRecord) -> None:
        if record.trace is not None and record.is_generation:
            self._tracer.finish(record.trace, server_span(record))

    async def start(self) -> None: ...

    async def close(self) -> None:
        await asyncio.to_thread(self._tracer.close)


def server_span(record: RequestRecord) -> SpanDraft:
    """Return the span of an HTTP request, with its generation as a child."""
    end_s = record.elapsed_s()
    attributes: dict[str, Attribute] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "http.route": record.path,
        "url.path": record.path,
        "url.scheme": "http",
    }
    error = error_of(record)
    if error is not None:
        attributes["error.type"] = error
    children = () if record.first_request is None else (generation_span(record, record.first_request, end_s, error),)
    name = f"{record.method} {record.path}"
    return SpanDraft(name, 0.0, end_s, attributes, is_server=True, error=server_error(record), children=children)


def error_of(record: RequestRecord) -> str | None:
    """Return the error code or status of a failed request; None if it succeeded."""
    return (record.error_code or str(record.status)) if record.status >= 400 else None


def server_error(record: RequestRecord) -> str | None:
    """Return the error of a SERVER span. By the conventions a client's error (4xx) is not one."""
    return error_of(record) if record.status >= 500 else None


def generation_span(record: RequestRecord, request: ClientRequest, end_s: float, error: str | None) -> SpanDraft:
    """Return the span of a generation, with its phases as children."""
    operation = operation_of(request)
    attributes = {**request_attributes(record, request), **reply_attributes(record)}
    if error is not None:
        attributes["error.type"] = error
    name = f"{operation} {record.model}"
    return SpanDraft(name, 0.0, end_s, attributes, error=error, children=stages(record, end_s))


def operation_of(request: ClientRequest) -> str:
    if isinstance(request, ChatRequest):
        return "chat"
    return "embeddings" if isinstance(request, EmbedRequest) else "text_completion"


def request_attributes(record: RequestRecord, request: ClientRequest) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model or "",
    }
    if isinstance(request, EmbedRequest):
        return attributes
    params = request.params
    attributes |= {
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    optional: dict[str, Attribute | None] = {
        "gen_ai.request.max_tokens": record.max_tokens or None,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


def reply_attributes(record: RequestRecord) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.model or "",
    }
    if record.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = record.finish_reasons
    if record.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    if (usage := record.usage) is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        }
    return attributes


def stages(record: RequestRecord, end_s: float) -> tuple[SpanDraft, ...]:
    """Return the spans of queue, prefill and decode; phases that a request did not reach are left out."""
    if record.first_token_s is None:
        return ()
    accepted_s, first_s = record.accepted_s, record.first_token_s
    scheduled_s = min(accepted_s + (record.queue_s or 0.0), first_s)
    return (
        SpanDraft("queue", min(accepted_s, scheduled_s), scheduled_s, {}),
        SpanDraft("prefill", scheduled_s, first_s, {}),
        SpanDraft("decode", first_s, end_s, {}),
    )
