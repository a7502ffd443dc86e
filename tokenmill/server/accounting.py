"""The record of one HTTP request, and the metrics that are computed from finished records. Neither holds any text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST

from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.status import EngineStats
from tokenmill.errors import TokenmillError
from tokenmill.hardware.power import PowerMeter
from tokenmill.observe.live_histogram import LiveHistogram
from tokenmill.observe.log import Value
from tokenmill.observe.metrics import (
    EngineState,
    Metrics,
    ModelMetrics,
    Outcome,
    ReplicaState,
    RequestSize,
    RequestTimes,
    SeriesValue,
)
from tokenmill.observe.traces import RequestTrace
from tokenmill.server.gate import EngineGate
from tokenmill.server.keys import KeyRecord
from tokenmill.server.logged_texts import LoggedTexts
from tokenmill.server.quotas import KeyLimits
from tokenmill.server.registry import ModelRegistry
from tokenmill.types import Event, Usage

CLIENT_DISCONNECTED = 499  # nginx' status for a client that disconnected; it is never sent


@dataclass
class RequestRecord:
    """What is known about a request so far."""

    request_id: str
    method: str
    path: str
    key_id: str = ""  # id of its API key, never the key itself; "" if the server has no keys
    key: KeyRecord | None = None  # the permissions of that key; None: no restrictions
    limits: KeyLimits | None = None  # the remaining quota of that key
    user: str = ""  # the end user named by the client
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    is_generation: bool = False  # counted in the request metrics
    is_batch_line: bool = False  # part of a batch: no client is waiting
    model: str | None = None  # set once the request is handed to an engine
    usage: Usage | None = None
    route: str | None = None  # the replica it was assigned to, and why
    accepted_s: float = 0.0  # when the engine accepted it, since `started_s`
    queue_s: float | None = None
    first_token_s: float | None = None  # since `started_s`
    max_tokens: int = 0  # longest answer; 0: unknown
    gaps: LiveHistogram | None = None  # its model's histogram of times between outputs
    last_event_s: dict[int, float] = field(default_factory=dict)  # by choice
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str | None = None
    is_finished: bool = False
    is_stream: bool = False
    first_request: ClientRequest | None = None  # the first engine request of the generation
    cache: str | None = None  # result of the response cache lookup: hit or miss; None: there was none
    texts: LoggedTexts | None = None  # None: not part of the request log
    trace: RequestTrace | None = None  # None: not traced

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    def note_event(self, event: Event, choice: int = 0) -> None:
        now_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = now_s - self.started_s
            self.queue_s = event.queue_s
        before_s = self.last_event_s.get(choice)
        self.last_event_s[choice] = now_s
        if before_s is not None and self.gaps is not None:
            self.gaps.add(now_s - before_s)
        if event.finish_reason is not None:
            self.finish_reasons.append(event.finish_reason)

    def note_disconnect(self) -> None:
        self.status = CLIENT_DISCONNECTED

    def note_failure(self, error: TokenmillError) -> None:
        """Record that a stream failed after its HTTP status was sent."""
        self.status = error.http_status
        self.error_code = error.code

    @property
    def outcome(self) -> Outcome:
        if self.status == CLIENT_DISCONNECTED:
            return "abort"
        if self.status >= 400:
            return "error"
        return "length" if "length" in self.finish_reasons else "stop"

    def log_fields(self) -> dict[str, Value]:
        """Return the fields of the request's log line: ids, counts and times. Fields that do not apply are omitted."""
        usage = self.usage
        fields: dict[str, Value] = {
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "model": self.model,
            "error": self.error_code,
            "finish": ",".join(dict.fromkeys(self.finish_reasons)) or None,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "completion_tokens": usage.completion_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "drafted_tokens": usage.drafted_tokens or None if usage else None,
            "accepted_tokens": usage.accepted_tokens or None if usage else None,
            "queue_ms": _milliseconds(self.queue_s),
            "ttft_ms": _milliseconds(self.first_token_s),
            "total_ms": _milliseconds(self.elapsed_s()),
        }
        return {name: value for name, value in fields.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


class Accounting:
    """Updates the metrics from finished requests and from the engines' state."""

    def __init__(self, metrics: Metrics, registry: ModelRegistry) -> None:
        self._metrics = metrics
        self._registry = registry
        self._num_restarts: dict[str, int] = {}
        self._power = PowerMeter()

    def gaps_of(self, model: str) -> LiveHistogram:
        """Return the histogram of times between outputs of a model."""
        return self._metrics.of(model).gaps

    def finish(self, record: RequestRecord) -> None:
        if not record.is_batch_line:
            self._metrics.process.note_response(record.status)
        if not record.is_generation:
            return
        if record.model is None:
            self._of_default().reject_request()
            return
        usage = record.usage
        self._metrics.of(record.model).finish_request(
            record.outcome,
            RequestSize(
                prompt_tokens=usage.prompt_tokens if usage else 0,
                output_tokens=usage.completion_tokens if usage else 0,
                cached_tokens=usage.cached_tokens if usage else 0,
                max_tokens=record.max_tokens,
                num_answers=max(1, len(record.finish_reasons)),
            ),
            RequestTimes(record.elapsed_s(), record.queue_s, record.first_token_s, record.accepted_s),
        )

    def render(self) -> tuple[bytes, str]:
        """Return the current metrics in Prometheus' text format, and their content type."""
        self._note_engines()
        self._metrics.process.set_watts(self._power.watts())
        return self._metrics.render(), CONTENT_TYPE_LATEST

    def values(self, names: Sequence[str]) -> dict[str, SeriesValue]:
        """Return the values of the named metrics, summed over all models."""
        self._note_engines()
        return self._metrics.values(names)

    def unloaded(self, name: str, last: EngineStats) -> None:
        """Add the final counts of a model's engine before it is unloaded."""
        self._num_restarts.pop(name, None)
        self._metrics.of(name).engine_unloaded(_state(last))

    def _of_default(self) -> ModelMetrics:
        """Return the series of the default model, for requests that reached no model."""
        return self._metrics.of(self._registry.default.label)

    def _note_engines(self) -> None:
        for gate in self._registry.gates:
            self._note_engine(gate)

    def _note_engine(self, gate: EngineGate) -> None:
        stats, name = gate.stats(), gate.label
        if not name:
            return
        series = self._metrics.of(name)
        series.set_loaded(stats is not None, gate.num_waiting)
        if stats is None:
            return
        if stats.kv_blocks_total and gate.known is not None:
            series.set_cache_config(gate.known.kv_block_size, stats.kv_blocks_total)
        known = self._num_restarts.get(name, 0)
        if stats.restarts > known:
            series.engine_restarted(stats.restarts - known)
        self._num_restarts[name] = stats.restarts
        series.set_engine(_state(stats))
        if gate.loaded is not None and len(replicas := gate.loaded.replicas()) > 1:
            series.set_replicas(
                {
                    str(one["replica"]): ReplicaState(one["state"] == "ready", one["requests"], one["num_placed"])
                    for one in replicas
                }
            )


def _state(stats: EngineStats) -> EngineState:
    usage = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    return EngineState(
        running=stats.running,
        waiting=stats.waiting,
        kv_usage=usage,
        prefix_hits=stats.prefix_hit_tokens,
        prefix_queries=stats.prefix_query_tokens,
        preemptions=stats.preemptions,
        steps=stats.steps,
        failed_steps=stats.failed_steps,
        busy_s=stats.busy_s,
        drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens,
        waiting_for_grammar=stats.waiting_for_grammar,
        step_counts=tuple(stats.step_counts),
        step_tokens=stats.step_tokens,
        resumed=stats.resumed,
        fetched_tokens=stats.fetched_tokens,
        fetched_bytes=stats.fetched_bytes,
        fetch_s=stats.fetch_s,
        saved_bytes=stats.saved_bytes,
    )
