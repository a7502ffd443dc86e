"""Spans for OpenTelemetry, made when a request has ended, from the times that were noted on its way.

    traceparent ─► SERVER  POST /v1/chat/completions
                     └─ INTERNAL  chat smollm2:135m        gen_ai.* attributes, tokens, how it ended
                          ├─ queue    accepted ─► scheduled
                          ├─ prefill  scheduled ─► first token
                          └─ decode   first token ─► end

While a request runs, nothing but two ids is kept, so tracing costs nothing per token. A context that comes with a
request (W3C Trace Context) is continued, and its decision whether to sample is kept; others are sampled by their share.
Reply headers carry `traceparent` with the id of the SERVER span.

The libraries (`pip install tokenmill[traces]`) are imported when a server is told where to send spans, not before.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import InvalidConfig
from tokenmill.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

SCOPE = "tokenmill"
TRACES_PATH = "/v1/traces"
HALF = 1 << 64  # trace ids below `share * HALF` in their lower half are sampled, as other SDKs do

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]


@dataclass(frozen=True)
class SpanDraft:
    """One span: seconds are since the request's start. `children` lie within it."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes
    is_server: bool = False
    error: str | None = None
    children: tuple[SpanDraft, ...] = ()


@dataclass(frozen=True)
class RequestTrace:
    """The trace that a request belongs to."""

    context: SpanContext  # of its outermost span
    parent: SpanContext | None  # of the client's span, if it was sent
    started_ns: int  # since 1970

    @property
    def header(self) -> bytes:
        """The context of the request's own span, as W3C writes it."""
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


class Tracer:
    """Makes traces and sends their spans to a collector, from a thread of the library."""

    def __init__(self, endpoint: str, share: float) -> None:
        """`endpoint`: of a collector that takes OTLP over HTTP. `share`: of the traces that begin here."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
            from opentelemetry.trace import SpanKind, Status, StatusCode
        except ImportError:
            raise InvalidConfig(
                "traces need the OpenTelemetry libraries", param="otlp_endpoint", hint="pip install 'tokenmill[traces]'"
            ) from None
        if not endpoint.startswith(("http://", "https://")):
            raise InvalidConfig(
                f"otlp_endpoint takes an address such as http://collector:4318, got {endpoint[:200]!r}",
                param="otlp_endpoint",
            )
        url = endpoint if endpoint.rstrip("/").endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH
        self._share = share
        name = os.environ.get("OTEL_SERVICE_NAME", "tokenmill")
        self._resource = Resource.create({"service.name": name, "service.version": VERSION})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
        # What spans share is made once: five spans are a visible part of what a request costs.
        self._make_span, self._make_status = ReadableSpan, Status
        self._scope = InstrumentationScope(SCOPE, VERSION)
        self._kinds = {True: SpanKind.SERVER, False: SpanKind.INTERNAL}
        self._error, self._fine = StatusCode.ERROR, Status(StatusCode.UNSET)

    def begin(self, headers: Mapping[str, str]) -> RequestTrace | None:
        """Begin the trace of a request that has just arrived; None: it is not sampled."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        started_ns = time.time_ns()
        parent = None
        if "traceparent" in headers:
            context = TraceContextTextMapPropagator().extract(dict(headers))
            parent = trace.get_current_span(context).get_span_context()
        if parent is not None and parent.is_valid:
            return RequestTrace(_span_context(parent), parent, started_ns) if parent.trace_flags.sampled else None
        fresh = _span_context(None)
        return RequestTrace(fresh, None, started_ns) if fresh.trace_id % HALF < self._share * HALF else None

    def finish(self, trace: RequestTrace, draft: SpanDraft) -> None:
        """Hand the spans of a request that has ended to the sender."""
        self._emit(draft, trace.context, trace.parent, trace.started_ns)

    def _emit(self, draft: SpanDraft, context: SpanContext, parent: SpanContext | None, started_ns: int) -> None:
        self._processor.on_end(
            self._make_span(
                draft.name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=draft.attributes,
                kind=self._kinds[draft.is_server],
                status=self._make_status(self._error, draft.error) if draft.error else self._fine,
                start_time=started_ns + int(draft.start_s * 1e9),
                end_time=started_ns + int(draft.end_s * 1e9),
                instrumentation_scope=self._scope,
            )
        )
        for child in draft.children:
            self._emit(child, _span_context(context), context, started_ns)

    def close(self) -> None:
        """Send what is left; waits for the collector, so it is called in a thread."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _span_context(parent: SpanContext | None) -> SpanContext:
    """The context of a new span: in its parent's trace, or in one of its own."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        trace_id=parent.trace_id if parent is not None else random.getrandbits(128) or 1,
        span_id=random.getrandbits(64) or 1,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=parent.trace_state if parent is not None else None,
    )
