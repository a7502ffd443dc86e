"""Prometheus metrics, created on a registry of the caller (so that each test can have its own).

| series (prefix tokenmill_)        | kind      | what                                                          |
|-----------------------------------|-----------|---------------------------------------------------------------|
| requests_total{outcome}           | counter   | finished requests: stop, length, abort, error, rejected       |
| prompt_tokens_total               | counter   | prompt tokens of finished requests                            |
| cached_prompt_tokens_total        | counter   | ... that were found in the prefix cache                       |
| generation_tokens_total           | counter   | tokens generated                                              |
| time_to_first_token_seconds       | histogram | arrival → first token                                         |
| time_per_output_token_seconds     | histogram | (last token − first token) / (tokens of an answer − 1)        |
| inter_token_latency_seconds       | histogram | between two outputs of a choice, as they are sent             |
| queue_time_seconds                | histogram | arrival → first scheduled                                     |
| prefill_time_seconds              | histogram | first scheduled → first token                                 |
| decode_time_seconds               | histogram | first token → end                                             |
| inference_time_seconds            | histogram | first scheduled → end                                         |
| request_seconds                   | histogram | arrival → end                                                 |
| request_prompt_tokens             | histogram | prompt tokens of a request                                    |
| request_generation_tokens         | histogram | tokens generated for a request                                |
| request_max_tokens                | histogram | longest answer that a request allows                          |
| request_num_choices               | histogram | answers that a request has                                    |
| step_tokens                       | histogram | tokens that a step computes, of prompts and of answers        |
| requests_running, _waiting        | gauge     | now                                                           |
| waiting_by_reason{reason}         | gauge     | waiting for capacity, a grammar, or a model to be loaded      |
| kv_usage_ratio                    | gauge     | share of KV blocks in use                                     |
| prefix_hits_total, _queries_total | counter   | prompt tokens found in, and looked up in, the prefix cache    |
| kv_fetch_tokens_total             | counter   | prompt tokens whose KV blocks were brought from elsewhere     |
| kv_fetch_bytes_total, _seconds_.. | counter   | bytes of such blocks, and how long bringing them took         |
| kv_saved_bytes_total              | counter   | bytes of KV blocks that were kept elsewhere                   |
| preemptions_total                 | counter   | sequences sent back to the queue for lack of KV blocks        |
| draft_tokens_total                | counter   | draft tokens of speculative decoding that were computed       |
| accepted_draft_tokens_total       | counter   | draft tokens that were accepted                               |
| engine_steps_total                | counter   | steps computed                                                |
| engine_failed_steps_total         | counter   | steps that raised; their requests are tried again in parts    |
| engine_busy_seconds_total         | counter   | time spent in steps                                           |
| engine_restarts_total             | counter   | engine processes started again after a death                  |
| resumed_requests_total            | counter   | requests that went on in another engine process, or a new one |
| replica_ready{replica}            | gauge     | 1 while an engine process takes requests (with --replicas)    |
| replica_requests{replica}         | gauge     | requests that it works on                                     |
| routes_total{replica,reason}      | counter   | requests that it was given, by why: cached, busy, level ...   |
| model_loaded                      | gauge     | 1 while the model is in memory                                |
| model_unloads_total               | counter   | how often the model was unloaded                               |
| cache_config_info                 | gauge     | 1; labels say the size of a KV block and how many there are   |
| http_responses_total{status}      | counter   | replies of the server, whatever was asked                     |
| event_loop_lag_seconds            | histogram | how much later than due the server's event loop gets to work  |
| power_watts{device}               | gauge     | electric power now, where the machine tells (GPUs, RAPL)      |
| build_info{version}               | gauge     | 1                                                             |

Series of requests and engines have the label `model`, the name that the model is served by; the last four are the
server's own. `--metrics-names vllm` shows what vLLM has too under its names and labels (`vllm_names.py`).

Engine counters arrive as totals, which include those of processes that died; `set_engine` turns them into increments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenmill.observe.buckets import CHOICES, LAG_S, LATENCY_S, PER_TOKEN_S, STEP_TOKENS, TOKENS
from tokenmill.observe.live_histogram import LiveFamily, LiveHistogram
from tokenmill.observe.vllm_names import PREFIX, NamedSeries
from tokenmill.version import VERSION

SeriesValue = float | dict[str, float]
Outcome = Literal["stop", "length", "abort", "error", "rejected"]


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request; None for stages that it did not reach."""

    total_s: float
    queue_s: float | None = None
    first_token_s: float | None = None  # after arrival
    accepted_s: float = 0.0  # after arrival: the engine had it

    @property
    def prefill_s(self) -> float | None:
        """Return the seconds from being scheduled to the first token."""
        if self.first_token_s is None or self.queue_s is None:
            return None
        return max(0.0, self.first_token_s - self.accepted_s - self.queue_s)


@dataclass(frozen=True)
class RequestSize:
    """Token counts of a finished request, and its limit."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    max_tokens: int = 0  # 0: not known
    num_answers: int = 1  # which ran in parallel and have `output_tokens` together


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
    failed_steps: int = 0
    busy_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    waiting_for_grammar: int = 0  # among those that wait
    step_counts: tuple[int, ...] = ()  # steps by how many tokens they computed, in buckets of STEP_TOKENS
    step_tokens: int = 0  # all together
    resumed: int = 0  # requests
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True)
class ReplicaState:
    """One of several engine processes of a model."""

    is_ready: bool
    num_requests: int
    routes: Mapping[str, int]  # requests that it was given so far, by the reason


NO_ENGINE = EngineState(0, 0, 0.0, 0, 0, 0)

Series = Any  # prometheus_client's families and their children, which share no type with all of their methods
Kind = type[Counter] | type[Gauge] | tuple[float, ...]  # a histogram is given by its buckets
FAMILIES: dict[str, tuple[str, Kind] | tuple[str, Kind, tuple[str, ...]]] = {
    "requests": ("Finished requests by outcome", Counter, ("outcome",)),
    "prompt_tokens": ("Prompt tokens of finished requests", Counter),
    "cached_prompt_tokens": ("Prompt tokens of finished requests that were cached", Counter),
    "generation_tokens": ("Tokens generated", Counter),
    "time_to_first_token_seconds": ("Arrival to first token", LATENCY_S),
    "time_per_output_token_seconds": ("Mean gap between output tokens", PER_TOKEN_S),
    "queue_time_seconds": ("Arrival to first being scheduled", LATENCY_S),
    "prefill_time_seconds": ("First being scheduled to first token", LATENCY_S),
    "decode_time_seconds": ("First token to end", LATENCY_S),
    "inference_time_seconds": ("First being scheduled to end", LATENCY_S),
    "request_seconds": ("Arrival to end", LATENCY_S),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request", TOKENS),
    "request_max_tokens": ("Longest answer that a request allows", TOKENS),
    "request_num_choices": ("Answers that a request has", CHOICES),
    "requests_running": ("Requests being computed", Gauge),
    "requests_waiting": ("Requests in the queue", Gauge),
    "kv_usage_ratio": ("Share of KV blocks in use", Gauge),
    "prefix_hits": ("Prompt tokens found in the prefix cache", Counter),
    "prefix_queries": ("Prompt tokens looked up in the prefix cache", Counter),
    "kv_fetch_tokens": ("Prompt tokens whose KV blocks were brought from elsewhere", Counter),
    "kv_fetch_bytes": ("Bytes of KV blocks that were brought from elsewhere", Counter),
    "kv_fetch_seconds": ("Time that bringing KV blocks took, beside steps", Counter),
    "kv_saved_bytes": ("Bytes of KV blocks that were kept elsewhere", Counter),
    "preemptions": ("Sequences sent back to the queue", Counter),
    "draft_tokens": ("Draft tokens of speculative decoding that were computed", Counter),
    "accepted_draft_tokens": ("Draft tokens that were accepted", Counter),
    "engine_steps": ("Steps computed", Counter),
    "engine_failed_steps": ("Steps that raised", Counter),
    "engine_busy_seconds": ("Time spent in steps", Counter),
    "engine_restarts": ("Engine processes started again after a death", Counter),
    "resumed_requests": ("Requests that went on in another engine process", Counter),
    "replica_ready": ("Whether an engine process takes requests", Gauge, ("replica",)),
    "replica_requests": ("Requests that an engine process works on", Gauge, ("replica",)),
    "routes": ("Requests that an engine process was given, by the reason", Counter, ("replica", "reason")),
    "model_info": ("The models that are served", Gauge),
    "model_loaded": ("Whether the model is in memory", Gauge),
    "model_unloads": ("How often the model was unloaded", Counter),
    "waiting_by_reason": ("Waiting requests by what they wait for", Gauge, ("reason",)),
    "cache_config_info": ("The KV cache", Gauge, ("block_size", "num_gpu_blocks")),
}
REPLICA_FAMILIES = ("replica_ready", "replica_requests", "routes")
LABELLED = ("requests", "waiting_by_reason", "cache_config_info", *REPLICA_FAMILIES)  # by other labels too
LIVE_FAMILIES: dict[str, tuple[str, tuple[float, ...]]] = {
    "inter_token_latency_seconds": ("Between two outputs of a choice", PER_TOKEN_S),
    "step_tokens": ("Tokens that a step computes", STEP_TOKENS),
}
WaitingReason = Literal["capacity", "grammar", "loading"]


class Metrics:
    """All metrics of a server: the series, and for each model its values."""

    def __init__(
        self, registry: CollectorRegistry | None = None, *, model: str | None = None, names: str = "tokenmill"
    ) -> None:
        """`model`: whose series are exported from the start; others come with their first value. `names`: tokenmill,
        vllm or both."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self._named = NamedSeries(self.registry, names)
        self._families = {name: self._declare(name, *about) for name, about in FAMILIES.items()}
        self._live = {name: LiveFamily(PREFIX + name, *about) for name, about in LIVE_FAMILIES.items()}
        for family in self._live.values():
            self.registry.register(family)
        self.process = ProcessMetrics(self.registry)
        self._models: dict[str, ModelMetrics] = {}
        if model is not None:
            self.of(model)

    def of(self, model: str) -> ModelMetrics:
        """The series of one model, by the name that it is served by."""
        found = self._models.get(model)
        if found is None:
            live = {name: family.of(model) for name, family in self._live.items()}
            found = self._models[model] = ModelMetrics(self._families, live, model)
        return found

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._named)

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
        full, every = PREFIX + name, ["model", *labels]
        if isinstance(kind, tuple):
            return Histogram(full, about, every, buckets=kind, registry=self.registry)
        return kind(full, about, every, registry=self.registry)


class ProcessMetrics:
    """The metrics of the server's own process, which belong to no model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            PREFIX + "event_loop_lag_seconds",
            "How much later than due the event loop works",
            buckets=LAG_S,
            registry=registry,
        )
        self._responses = Counter(PREFIX + "http_responses", "Replies by status", ["status"], registry=registry)
        self._watts = Gauge(PREFIX + "power_watts", "Electric power by device", ["device"], registry=registry)
        Gauge(PREFIX + "build_info", "The version", ["version"], registry=registry).labels(VERSION).set(1)

    def note_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def note_response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def set_watts(self, watts: Mapping[str, float]) -> None:
        for device, now in watts.items():
            self._watts.labels(device).set(now)


class ModelMetrics:
    """The metrics of one model, updated by typed methods only."""

    def __init__(self, families: Mapping[str, Series], live: Mapping[str, LiveHistogram], model: str) -> None:
        self._series = {name: one.labels(model) for name, one in families.items() if name not in LABELLED}
        requests, reasons = families["requests"], families["waiting_by_reason"]
        self._requests = {one: requests.labels(model, one) for one in get_args(Outcome)}  # all exported from 0 on
        self._reasons = {one: reasons.labels(model, one) for one in get_args(WaitingReason)}
        self._cache_config, self._model = families["cache_config_info"], model
        self._replicas = {name: families[name] for name in REPLICA_FAMILIES}
        self._routes: dict[tuple[str, str], int] = {}  # as they were counted last
        self.gaps = live["inter_token_latency_seconds"]  # written while outputs are sent
        self._steps = live["step_tokens"]
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

    def finish_request(self, outcome: Outcome, size: RequestSize, times: RequestTimes) -> None:
        """Count a finished request."""
        series = self._series
        self._requests[outcome].inc()
        series["prompt_tokens"].inc(size.prompt_tokens)
        series["cached_prompt_tokens"].inc(size.cached_tokens)
        series["generation_tokens"].inc(size.output_tokens)
        series["request_seconds"].observe(times.total_s)
        series["request_prompt_tokens"].observe(size.prompt_tokens)
        series["request_generation_tokens"].observe(size.output_tokens)
        series["request_num_choices"].observe(size.num_answers)
        if size.max_tokens:
            series["request_max_tokens"].observe(size.max_tokens)
        if times.queue_s is not None:
            series["queue_time_seconds"].observe(times.queue_s)
        if times.first_token_s is not None:
            decode_s = times.total_s - times.first_token_s
            series["time_to_first_token_seconds"].observe(times.first_token_s)
            series["decode_time_seconds"].observe(decode_s)
            if (prefill_s := times.prefill_s) is not None:
                series["prefill_time_seconds"].observe(prefill_s)
                series["inference_time_seconds"].observe(prefill_s + decode_s)
            if size.output_tokens > size.num_answers:
                per_token_s = decode_s / (size.output_tokens / size.num_answers - 1)
                series["time_per_output_token_seconds"].observe(per_token_s)

    def reject_request(self) -> None:
        """Count a request that was refused before it reached the engine: invalid, too long, or the queue is full."""
        self._requests["rejected"].inc()

    def set_engine(self, now: EngineState) -> None:
        self._series["requests_running"].set(now.running)
        self._series["requests_waiting"].set(now.waiting)
        self._series["kv_usage_ratio"].set(now.kv_usage)
        self._reasons["capacity"].set(max(0, now.waiting - now.waiting_for_grammar))
        self._reasons["grammar"].set(now.waiting_for_grammar)
        self._count_steps(now)
        for name, before, total in (
            ("prefix_hits", self._last.prefix_hits, now.prefix_hits),
            ("prefix_queries", self._last.prefix_queries, now.prefix_queries),
            ("kv_fetch_tokens", self._last.fetched_tokens, now.fetched_tokens),
            ("kv_fetch_bytes", self._last.fetched_bytes, now.fetched_bytes),
            ("kv_fetch_seconds", self._last.fetch_s, now.fetch_s),
            ("kv_saved_bytes", self._last.saved_bytes, now.saved_bytes),
            ("preemptions", self._last.preemptions, now.preemptions),
            ("draft_tokens", self._last.drafted, now.drafted),
            ("accepted_draft_tokens", self._last.accepted, now.accepted),
            ("engine_steps", self._last.steps, now.steps),
            ("engine_failed_steps", self._last.failed_steps, now.failed_steps),
            ("engine_busy_seconds", self._last.busy_s, now.busy_s),
            ("resumed_requests", self._last.resumed, now.resumed),
        ):
            self._series[name].inc(total - before if total >= before else total)  # smaller: the engine was restarted
        self._last = now

    def set_replicas(self, replicas: Mapping[str, ReplicaState]) -> None:
        """Note what the engine processes of a model do, where it has several."""
        for replica, state in replicas.items():
            self._replicas["replica_ready"].labels(self._model, replica).set(state.is_ready)
            self._replicas["replica_requests"].labels(self._model, replica).set(state.num_requests)
            for reason, total in state.routes.items():
                before = self._routes.get((replica, reason), 0)
                more = total - before if total >= before else total
                self._replicas["routes"].labels(self._model, replica, reason).inc(more)
                self._routes[replica, reason] = total

    def _count_steps(self, now: EngineState) -> None:
        before = self._last.step_counts or (0,) * len(now.step_counts)
        more = [count - known for count, known in zip(now.step_counts, before, strict=False)]
        if now.step_counts:
            is_new = any(count < 0 for count in more)  # the engine was restarted
            num_tokens = now.step_tokens if is_new else now.step_tokens - self._last.step_tokens
            self._steps.add_counts(now.step_counts if is_new else more, num_tokens)

    def set_loaded(self, is_loaded: bool, num_waiting: int = 0) -> None:
        """Note whether the model is in memory, and how many requests wait for it to be."""
        self._series["model_loaded"].set(is_loaded)
        self._reasons["loading"].set(num_waiting)

    def set_cache_config(self, block_size: int, num_blocks: int) -> None:
        self._cache_config.labels(self._model, str(block_size), str(num_blocks)).set(1)

    def engine_restarted(self, times: int = 1) -> None:
        """Count restarts of engine processes."""
        self._series["engine_restarts"].inc(times)

    def engine_unloaded(self, last: EngineState) -> None:
        """Note that the model was unloaded, after its engine's last totals."""
        self.set_engine(last)
        self._last = NO_ENGINE
        self._series["model_unloads"].inc()
        for name in ("requests_running", "requests_waiting", "kv_usage_ratio"):
            self._series[name].set(0)
        for reason in self._reasons.values():
            reason.set(0)
