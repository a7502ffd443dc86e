"""Prometheus metrics, created on a registry of the caller (so that each test can have its own).

| series (prefix tokenmill_)        | kind      | what                                                          |
|-----------------------------------|-----------|---------------------------------------------------------------|
| requests_total{outcome}           | counter   | finished requests: stop, length, abort, error, rejected       |
| prompt_tokens_total               | counter   | prompt tokens of finished requests                            |
| generation_tokens_total           | counter   | tokens generated                                              |
| time_to_first_token_seconds       | histogram | arrival → first token                                         |
| time_per_output_token_seconds     | histogram | (last token − first token) / (tokens of an answer − 1)        |
| queue_time_seconds                | histogram | arrival → first scheduled                                     |
| request_seconds                   | histogram | arrival → end                                                 |
| requests_running, _waiting        | gauge     | now                                                           |
| kv_usage_ratio                    | gauge     | share of KV blocks in use                                     |
| prefix_hits_total, _queries_total | counter   | prompt tokens found in, and looked up in, the prefix cache    |
| preemptions_total                 | counter   | sequences sent back to the queue for lack of KV blocks        |
| draft_tokens_total                | counter   | draft tokens of speculative decoding that were computed       |
| accepted_draft_tokens_total       | counter   | draft tokens that were accepted                               |
| engine_steps_total                | counter   | steps computed                                                |
| engine_busy_seconds_total         | counter   | time spent in steps                                           |
| engine_restarts_total             | counter   | engine processes started again after a death                  |

Every series has the label `model`, the name that the model is served by.

Engine counters arrive as totals since the engine's start; `set_engine` turns them into increments, across a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Outcome = Literal["stop", "length", "abort", "error", "rejected"]

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request; None for stages that it did not reach."""

    total_s: float
    queue_s: float | None = None
    first_token_s: float | None = None  # after arrival


@dataclass(frozen=True)
class EngineState:
    """The engine now (gauges) and since its start (totals)."""

    running: int
    waiting: int
    kv_usage: float
    prefix_hits: int
    prefix_queries: int
    preemptions: int
    steps: int = 0
    busy_s: float = 0.0
    drafted: int = 0
    accepted: int = 0


NO_ENGINE = EngineState(0, 0, 0.0, 0, 0, 0)


class Metrics:
    """All metrics of a server, updated by typed methods only."""

    def __init__(self, registry: CollectorRegistry | None = None, *, model: str = "") -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._model = model
        self._declare_requests()
        self._declare_engine()
        info = Gauge("tokenmill_model_info", "The model that is served", ["model"], registry=self.registry)
        info.labels(model=model).set(1)
        self._last = NO_ENGINE

    def _declare_requests(self) -> None:
        requests = Counter(
            "tokenmill_requests", "Finished requests by outcome", ["model", "outcome"], registry=self.registry
        )
        self._requests = {one: requests.labels(self._model, one) for one in get_args(Outcome)}  # all exported from 0 on
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _LATENCY_S)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean gap between output tokens", _PER_TOKEN_S)
        self._queue = self._histogram("queue_time_seconds", "Arrival to first being scheduled", _LATENCY_S)
        self._total = self._histogram("request_seconds", "Arrival to end", _LATENCY_S)

    def _declare_engine(self) -> None:
        self._running = self._gauge("requests_running", "Requests being computed")
        self._waiting = self._gauge("requests_waiting", "Requests in the queue")
        self._kv_usage = self._gauge("kv_usage_ratio", "Share of KV blocks in use")
        self._prefix_hits = self._counter("prefix_hits", "Prompt tokens found in the prefix cache")
        self._prefix_queries = self._counter("prefix_queries", "Prompt tokens looked up in the prefix cache")
        self._preemptions = self._counter("preemptions", "Sequences sent back to the queue")
        self._drafted = self._counter("draft_tokens", "Draft tokens of speculative decoding that were computed")
        self._accepted = self._counter("accepted_draft_tokens", "Draft tokens that were accepted")
        self._steps = self._counter("engine_steps", "Steps computed")
        self._busy = self._counter("engine_busy_seconds", "Time spent in steps")
        self._restarts = self._counter("engine_restarts", "Engine processes started again after a death")

    # ── updating ────────────────────────────────────────────────────────────────────────────────

    def finish_request(
        self, outcome: Outcome, *, prompt_tokens: int, output_tokens: int, times: RequestTimes, num_answers: int = 1
    ) -> None:
        """Count a finished request. `num_answers` ran in parallel and have `output_tokens` together."""
        self._requests[outcome].inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(output_tokens)
        self._total.observe(times.total_s)
        if times.queue_s is not None:
            self._queue.observe(times.queue_s)
        if times.first_token_s is not None:
            self._ttft.observe(times.first_token_s)
            if output_tokens > num_answers:
                self._tpot.observe((times.total_s - times.first_token_s) / (output_tokens / num_answers - 1))

    def reject_request(self) -> None:
        """Count a request that was refused before it reached the engine: invalid, too long, or the queue is full."""
        self._requests["rejected"].inc()

    def set_engine(self, now: EngineState) -> None:
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._kv_usage.set(now.kv_usage)
        for series, before, total in (
            (self._prefix_hits, self._last.prefix_hits, now.prefix_hits),
            (self._prefix_queries, self._last.prefix_queries, now.prefix_queries),
            (self._preemptions, self._last.preemptions, now.preemptions),
            (self._drafted, self._last.drafted, now.drafted),
            (self._accepted, self._last.accepted, now.accepted),
            (self._steps, self._last.steps, now.steps),
            (self._busy, self._last.busy_s, now.busy_s),
        ):
            series.inc(total - before if total >= before else total)  # smaller: the engine was restarted
        self._last = now

    def engine_restarted(self) -> None:
        """Count a restart of the engine; its totals begin at zero again."""
        self._restarts.inc()
        self._last = NO_ENGINE

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    # ── declaring ──────────────────────────────────────────────────────────────────────────────────────

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"tokenmill_{name}", about, ["model"], registry=self.registry).labels(self._model)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"tokenmill_{name}", about, ["model"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        series = Histogram(f"tokenmill_{name}", about, ["model"], buckets=buckets, registry=self.registry)
        return series.labels(self._model)
