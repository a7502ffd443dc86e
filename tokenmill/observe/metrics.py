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
| model_loaded                      | gauge     | 1 while the model is in memory                                |
| model_unloads_total               | counter   | how often the model left the memory                           |

Every series has the label `model`, the name that the model is served by.

Engine counters arrive as totals since the engine's start; `set_engine` turns them into increments, across a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SeriesValue = float | dict[str, float]
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

Series = Any  # prometheus_client's families and their children, which share no type with all of their methods
Kind = type[Counter] | type[Gauge] | tuple[float, ...]  # a histogram is given by its buckets
FAMILIES: dict[str, tuple[str, Kind] | tuple[str, Kind, tuple[str, ...]]] = {
    "requests": ("Finished requests by outcome", Counter, ("outcome",)),
    "prompt_tokens": ("Prompt tokens of finished requests", Counter),
    "generation_tokens": ("Tokens generated", Counter),
    "time_to_first_token_seconds": ("Arrival to first token", _LATENCY_S),
    "time_per_output_token_seconds": ("Mean gap between output tokens", _PER_TOKEN_S),
    "queue_time_seconds": ("Arrival to first being scheduled", _LATENCY_S),
    "request_seconds": ("Arrival to end", _LATENCY_S),
    "requests_running": ("Requests being computed", Gauge),
    "requests_waiting": ("Requests in the queue", Gauge),
    "kv_usage_ratio": ("Share of KV blocks in use", Gauge),
    "prefix_hits": ("Prompt tokens found in the prefix cache", Counter),
    "prefix_queries": ("Prompt tokens looked up in the prefix cache", Counter),
    "preemptions": ("Sequences sent back to the queue", Counter),
    "draft_tokens": ("Draft tokens of speculative decoding that were computed", Counter),
    "accepted_draft_tokens": ("Draft tokens that were accepted", Counter),
    "engine_steps": ("Steps computed", Counter),
    "engine_busy_seconds": ("Time spent in steps", Counter),
    "engine_restarts": ("Engine processes started again after a death", Counter),
    "model_info": ("The models that are served", Gauge),
    "model_loaded": ("Whether the model is in memory", Gauge),
    "model_unloads": ("How often the model left the memory", Counter),
}


class Metrics:
    """All metrics of a server: the series, and for each model its values."""

    def __init__(self, registry: CollectorRegistry | None = None, *, model: str | None = None) -> None:
        """`model`: whose series are exported from the start; others come with their first value."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self._families = {name: self._declare(name, *about) for name, about in FAMILIES.items()}
        self._models: dict[str, ModelMetrics] = {}
        if model is not None:
            self.of(model)

    def of(self, model: str) -> ModelMetrics:
        """The series of one model, by the name that it is served by."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self._families, model)
        return found

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def values(self, names: Sequence[str]) -> dict[str, SeriesValue]:
        """Return what `render` shows of some families as numbers, added up over all models; of a ratio the highest. A
        series with another label (the bound of a histogram's bucket, an outcome) is a dictionary by that label."""
        found: dict[str, SeriesValue] = {}
        for model in self._models.values():
            for name, label, value in model.values(names):
                before = found.setdefault(name, 0.0 if label is None else {})
                if isinstance(before, dict):
                    before[label or ""] = before.get(label or "", 0.0) + value
                else:
                    found[name] = max(before, value) if name.endswith("_ratio") else before + value
        return found

    def _declare(self, name: str, about: str, kind: Kind, labels: tuple[str, ...] = ()) -> Series:
        full, every = f"tokenmill_{name}", ["model", *labels]
        if isinstance(kind, tuple):
            return Histogram(full, about, every, buckets=kind, registry=self.registry)
        return kind(full, about, every, registry=self.registry)


class ModelMetrics:
    """The metrics of one model, updated by typed methods only."""

    def __init__(self, families: Mapping[str, Series], model: str) -> None:
        self._series = {name: one.labels(model) for name, one in families.items() if name != "requests"}
        requests = families["requests"]
        self._requests = {one: requests.labels(model, one) for one in get_args(Outcome)}  # all exported from 0 on
        self._series["model_info"].set(1)
        self._last = NO_ENGINE

    def values(self, names: Sequence[str]) -> Iterator[tuple[str, str | None, float]]:
        """Yield the values of some families: the name that `render` shows, a label beside the model's, the value.

        Read from this model's own series, which takes a quarter of the time that a whole registry takes."""
        for name in names:
            children: dict[str | None, Series] = (
                {**self._requests} if name == "requests" else {None: self._series[name]}
            )
            for outcome, series in children.items():
                for sample in series.collect()[0].samples:
                    if not sample.name.endswith("_created"):
                        yield sample.name, outcome or sample.labels.get("le"), sample.value

    def finish_request(
        self, outcome: Outcome, *, prompt_tokens: int, output_tokens: int, times: RequestTimes, num_answers: int = 1
    ) -> None:
        """Count a finished request. `num_answers` ran in parallel and have `output_tokens` together."""
        series = self._series
        self._requests[outcome].inc()
        series["prompt_tokens"].inc(prompt_tokens)
        series["generation_tokens"].inc(output_tokens)
        series["request_seconds"].observe(times.total_s)
        if times.queue_s is not None:
            series["queue_time_seconds"].observe(times.queue_s)
        if times.first_token_s is not None:
            series["time_to_first_token_seconds"].observe(times.first_token_s)
            if output_tokens > num_answers:
                per_token_s = (times.total_s - times.first_token_s) / (output_tokens / num_answers - 1)
                series["time_per_output_token_seconds"].observe(per_token_s)

    def reject_request(self) -> None:
        """Count a request that was refused before it reached the engine: invalid, too long, or the queue is full."""
        self._requests["rejected"].inc()

    def set_engine(self, now: EngineState) -> None:
        self._series["requests_running"].set(now.running)
        self._series["requests_waiting"].set(now.waiting)
        self._series["kv_usage_ratio"].set(now.kv_usage)
        for name, before, total in (
            ("prefix_hits", self._last.prefix_hits, now.prefix_hits),
            ("prefix_queries", self._last.prefix_queries, now.prefix_queries),
            ("preemptions", self._last.preemptions, now.preemptions),
            ("draft_tokens", self._last.drafted, now.drafted),
            ("accepted_draft_tokens", self._last.accepted, now.accepted),
            ("engine_steps", self._last.steps, now.steps),
            ("engine_busy_seconds", self._last.busy_s, now.busy_s),
        ):
            self._series[name].inc(total - before if total >= before else total)  # smaller: the engine was restarted
        self._last = now

    def set_loaded(self, is_loaded: bool) -> None:
        """Note whether the model is in memory."""
        self._series["model_loaded"].set(is_loaded)

    def engine_restarted(self, times: int = 1) -> None:
        """Count restarts of the engine; its totals begin at zero again."""
        self._series["engine_restarts"].inc(times)
        self._last = NO_ENGINE

    def engine_unloaded(self, last: EngineState) -> None:
        """Note that the model left the memory, after its engine's last totals."""
        self.set_engine(last)
        self._last = NO_ENGINE
        self._series["model_unloads"].inc()
        for name in ("requests_running", "requests_waiting", "kv_usage_ratio"):
            self._series[name].set(0)
