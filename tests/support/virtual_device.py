"""A scheduler on a virtual clock: a step takes as long as a device's formula says, and clients come and go meanwhile.

Tokens are not checked here (see `simulated_runner.py`): every row that samples gets token 1. A thousand requests take a
second or two of real time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tokenmill.config.engine import SchedulerConfig
from tokenmill.errors import TokenmillError
from tokenmill.kv.cache import KVCache
from tokenmill.params import SamplingParams
from tokenmill.scheduler import Scheduler
from tokenmill.scheduler.scheduler import size_of
from tokenmill.scheduler.step_time import StepSize
from tokenmill.types import Request, RowResult, SequenceOutput, StepPlan, StepResult, Tenant

VOCAB = 30_000


@dataclass(frozen=True)
class SimulatedDevice:
    """The formula for the seconds of a step; the default is a small CPU."""

    base_s: float = 0.008
    token_s: float = 0.0005
    sample_s: float = 0.0003
    context_s: float = 2e-8
    pair_s: float = 2e-9
    prompts_s: float = 0.0  # added for a step with prompts, which launch additional kernels in each layer

    def seconds(self, size: StepSize) -> float:
        seconds = self.base_s + self.token_s * size.tokens + self.sample_s * size.samples
        seconds += self.context_s * size.context + self.pair_s * size.pairs
        return seconds + (self.prompts_s if size.has_prompts else 0.0)


# A model of 8B parameters on an H200: decoding steps of 1 and 32 rows, prompts of 8k and 64k tokens, and attention of
# 16 to 256 tokens behind 4k to 64k as measured; steps of chunks are captured as graphs.
LARGE_GPU = SimulatedDevice(
    base_s=4.2e-3, token_s=2.4e-5, sample_s=0.0, context_s=3e-8, pair_s=1.2e-9, prompts_s=1.5e-3
)


@dataclass
class RequestTimeline:
    """The course of one request."""

    request: Request
    sent_s: float
    token_times: list[float] = field(default_factory=list)
    ended_s: float | None = None
    refused_s: float | None = None  # Retry-After of the refusal
    cost_s: float = 0.0  # device time: its rows' share of every step

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / max(1, len(self.token_times) - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


class VirtualServer:
    def __init__(
        self,
        device: SimulatedDevice | None = None,
        *,
        rows: int = 20,
        tokens: int = 512,
        num_blocks: int = 6000,
        block_size: int = 16,
        step_limit_s: float | None = 0.1,
        depth: int = 1,
        **settings: object,
    ) -> None:
        """Make a server. `depth`: steps in flight; with more than one, rows feed tokens that the host has not seen
        yet."""
        self.device = device or SimulatedDevice()
        self._depth = depth
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()  # plan, launch time, end time
        self._free_s = 0.0  # when the device has finished all steps in flight
        self.now = 0.0
        self.cache = KVCache(windows=[None], num_blocks=num_blocks, block_size=block_size)
        config = SchedulerConfig(max_running=rows, token_budget=tokens)
        self.scheduler = Scheduler(
            config=config,
            cache=self.cache,
            max_rows=rows,
            clock=lambda: self.now,
            step_limit_s=step_limit_s,
            continues=lambda _: depth > 1,
            **settings,  # type: ignore[arg-type]
        )
        self.lives: dict[str, RequestTimeline] = {}
        self.busy_s = 0.0
        self.cold_steps: list[float] = []  # seconds added to the next steps
        self.steps: list[tuple[StepSize, float]] = []
        self.on_end: Callable[[RequestTimeline], None] = lambda life: None
        self.on_output: Callable[[SequenceOutput], None] = lambda output: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    # ── clients ────────────────────────────────────────────────────────────────────────────────────────

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), do))

    def ask(self, tenant: str = "", prompt: int = 100, output: int = 20, **more: object) -> RequestTimeline:
        """Send a request now. `prefix`: so many of its first tokens are shared by all requests of its tenant with
        the same `talk` (a number of a conversation)."""
        number = next(self._numbers)
        weight, prefix = float(more.pop("weight", 1.0)), int(more.pop("prefix", 0))  # type: ignore[call-overload]
        most, n = more.pop("max_sequences", None), int(more.pop("n", 1))  # type: ignore[call-overload]
        start = sum(map(ord, tenant)) % 1000 + 1000 * int(more.pop("talk", 0))  # type: ignore[call-overload]
        own = [start + 5] * prefix + [(number * 7919 + place * 31 + 11) % VOCAB for place in range(prompt - prefix)]
        request = Request(
            request_id=f"{tenant}:{number}",
            prompt_token_ids=own,
            params=SamplingParams(ignore_eos=True, n=n),
            max_tokens=output,
            seed=number,
            arrival_s=self.now,
            cache_salt=tenant,
            tenant=Tenant(id=tenant, weight=weight, max_sequences=most),  # type: ignore[arg-type]
            **more,  # type: ignore[arg-type]
        )
        life = self.lives[request.request_id] = RequestTimeline(request, self.now)
        try:
            self.scheduler.add(request)
        except TokenmillError as error:
            life.refused_s = getattr(error, "retry_after_s", 0.0)
            self.on_end(life)
        return life

    # ── time ───────────────────────────────────────────────────────────────────────────────────────────

    def run(self, until_s: float = float("inf")) -> None:
        """Step until there is nothing left to do, or until `until_s`."""
        while self.now < until_s:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._launch()
            if self._in_flight:
                self._collect()
            elif self._events:
                self.now = max(self.now, self._events[0][0])
            else:
                return

    def _launch(self) -> None:
        """Launch steps until the device's queue is full, as the engine's core does."""
        while len(self._in_flight) < self._depth and self.scheduler.has_work:
            if (plan := self.scheduler.plan()) is None:
                return
            size = size_of(plan)
            seconds = self.device.seconds(size) + (self.cold_steps.pop() if self.cold_steps else 0.0)
            self._share_cost(plan, seconds)
            self.busy_s += seconds
            self.steps.append((size, seconds))
            self._free_s = max(self.now, self._free_s) + seconds
            self._in_flight.append((plan, self.now, self._free_s))

    def _collect(self) -> None:
        plan, launched_s, self.now = self._in_flight.popleft()
        rows = [RowResult(row=row.row, token_ids=[1] if row.sample else []) for row in plan.rows]
        for output in self.scheduler.apply(StepResult(step=plan.step, rows=rows, step_s=self.now - launched_s)):
            self.on_output(output)
            life = self.lives[output.request_id]
            life.token_times += [self.now] * len(output.token_ids)
            if output.finish_reason and life.ended_s is None and not self.scheduler.has(output.request_id):
                life.ended_s = self.now
                self.on_end(life)

    def _share_cost(self, plan: StepPlan, seconds: float) -> None:
        """Charge each row its part of a step: its tokens, and an equal share of the common cost."""
        by_row = {sequence.row: sequence.state.request.request_id for sequence in self.scheduler.running}
        spare = seconds - self.device.token_s * sum(len(row.token_ids) for row in plan.rows)
        for row in plan.rows:
            self.lives[by_row[row.row]].cost_s += self.device.token_s * len(row.token_ids) + spare / len(plan.rows)

    # ── sums ───────────────────────────────────────────────────────────────────────────────────────────

    def of(self, tenant: str) -> list[RequestTimeline]:
        return [life for life in self.lives.values() if life.request.tenant.id == tenant]

    def served_s(self, tenant: str) -> float:
        return sum(life.cost_s for life in self.of(tenant))


def jain(values: list[float]) -> float:
    """Return Jain's index of fairness: 1 if all values are equal."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
