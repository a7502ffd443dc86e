"""A collector of OpenTelemetry spans: accepts OTLP over HTTP, parses the protobuf, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SeenSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    url: str
    spans: list[SeenSpan]
    resources: list[dict[str, Any]]

    def of(self, trace_id: str) -> dict[str, SeenSpan]:
        """Return the spans of a trace, by name."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            keep(collector, ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}", [], [])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def keep(collector: Collector, request: Any) -> None:
    for group in request.resource_spans:
        collector.resources.append(plain(group.resource.attributes))
        collector.spans += [seen(span) for scope in group.scope_spans for span in scope.spans]


def seen(span: Any) -> SeenSpan:
    return SeenSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        plain(span.attributes),
    )


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)
