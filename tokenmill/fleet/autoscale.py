"""Autoscaling: how many cores a fleet needs for its load, and the task that starts and stops them.

    demand   core-seconds of work that arrive each second, predicted from arrivals, the lengths of recent requests and
             the measured step times; or the current sequences divided by those that a core computes within the TPOT
             objective; whichever is larger
    up       immediately, when the cores would be busy for more than 85 % of their time, or when waiting prompts take
    longer
             than the TTFT objective: to as many cores as would be busy for 70 %
    down     when for a minute fewer cores would have been busy for less than 60 %; the requests of a stopped core
             continue on other cores. The gaps between the three shares keep noise from repeatedly starting and stopping
             the same core.
    zero     if allowed, after a minute without a request; the next request starts a core and waits for it

`ScaleRule` decides from numbers and times only; `Autoscaler` observes and acts.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.config.promises import ServiceLevel
from tokenmill.engine.replica import Replica, RequestRun, Route
from tokenmill.engine.replicas import Replicas
from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.step_rate import StepSeconds
from tokenmill.types import Request

log = logging.getLogger(__name__)

BUSY_SHARE, TARGET_SHARE, IDLE_SHARE = 0.85, 0.7, 0.6
CALM_S = 60.0  # how long fewer cores must have sufficed before one is stopped
CHECK_INTERVAL_S = 0.5
RATE_WINDOW_S = 3.0  # over which arrivals are counted
LENGTH_DECAY = 0.95  # weight that the mean lengths keep with each new request
DEFAULT_TTFT_S = 2.0  # without a TTFT objective
DEFAULT_ROW_SHARE = 0.75  # share of a core's rows to use without a TPOT objective
RETRY_S = 5.0  # after a core could not be started


class ScaleRange(NamedTuple):
    """The smallest and the largest number of cores."""

    least: int
    most: int


@dataclass(frozen=True)
class Demand:
    """The current load."""

    work: float = 0.0  # core-seconds that arrive each second
    rows: float = 0.0  # current sequences, divided by those that a core computes within its objective
    backlog_s: float = 0.0  # core-seconds of waiting prompts
    num_requests: int = 0

    @property
    def cores(self) -> float:
        """Return the number of cores that this load would keep busy all the time."""
        return max(self.work, self.rows)


class ScaleRule:
    """Decides how many cores a fleet needs, from numbers and times only."""

    def __init__(self, allowed: ScaleRange, ttft_s: float | None = None, idle_s: float = CALM_S) -> None:
        """`idle_s`: how long a fleet that may have no cores keeps its last one without a request."""
        self.allowed = allowed
        self._ttft_s = ttft_s or DEFAULT_TTFT_S
        self._idle_s = idle_s
        self._past: deque[tuple[float, int]] = deque()  # (time, number of cores that would have sufficed)
        self._used_s = -math.inf  # when there last was a request

    def num_needed(self, now_s: float, num_cores: int, demand: Demand) -> int:
        if demand.num_requests or self._used_s == -math.inf:
            self._used_s = now_s
        self._past.append((now_s, math.ceil(demand.cores / IDLE_SHARE)))
        while self._past[0][0] < now_s - CALM_S:
            self._past.popleft()
        needed = 1 if demand.num_requests else 0
        if demand.cores > BUSY_SHARE * num_cores:
            needed = math.ceil(demand.cores / TARGET_SHARE)
        needed = max(needed, math.ceil(demand.backlog_s / self._ttft_s))
        if needed > num_cores:
            return self._within(needed)
        if num_cores and self.allowed.least == 0 and now_s - self._used_s >= self._idle_s:
            return 0
        was_enough = max(1, *(cores for _, cores in self._past))
        if was_enough < num_cores and now_s - self._past[0][0] >= CALM_S - CHECK_INTERVAL_S:
            recent = [cores for at_s, cores in self._past if at_s >= now_s - CALM_S / 2]
            return self._within(max(1, needed, *recent))
        return self._within(num_cores)

    def note_change(self) -> None:
        """Restart the waiting time after a core was stopped: the next one is stopped no earlier than after the same
        time."""
        self._past.clear()

    def _within(self, number: int) -> int:
        return min(max(number, self.allowed.least), self.allowed.most)


class LoadMeter(PrefixRouter):
    """A router that also measures the arriving load, for a fleet that scales."""

    def __init__(self, num_replicas: int, slo: ServiceLevel) -> None:
        super().__init__(num_replicas)
        self._slo = slo
        self._arrivals: deque[float] = deque()
        self._prompt_tokens = 0.0  # mean number of uncached prompt tokens of a request
        self._answer_tokens = 0.0
        self._num_ended = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Route:
        route = super().choose(request, replicas)
        self._prompt_tokens = self._mean(self._prompt_tokens, route.num_uncached)
        return route

    def note_arrival(self) -> None:
        self._arrivals.append(asyncio.get_running_loop().time())

    def note_end(self, run: RequestRun) -> None:
        super().note_end(run)
        self._answer_tokens = self._mean(self._answer_tokens, run.buffer.output_processor.num_completion_tokens)
        self._num_ended += 1

    def _mean(self, before: float, new: float) -> float:
        return new if not before else LENGTH_DECAY * before + (1 - LENGTH_DECAY) * new

    def demand(self, replicas: Replicas) -> Demand:
        now_s = asyncio.get_running_loop().time()
        while self._arrivals and self._arrivals[0] < now_s - RATE_WINDOW_S:
            self._arrivals.popleft()
        known = [replica for replica in replicas.all if replica.supervisor.info is not None]
        rate = self.usual_rate()
        rows = self._rows_of_a_core(known[0], rate) if known else 1.0
        request_s = self._prompt_tokens * rate.token_s + self._answer_tokens * (rate.step_s / rows + rate.token_s)
        num_sequences = sum(replica.num_sequences for replica in replicas.all) + replicas.num_parked
        waiting = sum(replica.num_prefilling for replica in replicas.all) + replicas.num_parked * self._prompt_tokens
        return Demand(
            work=len(self._arrivals) / RATE_WINDOW_S * request_s,
            rows=num_sequences / rows,
            backlog_s=waiting * rate.token_s,
            num_requests=sum(len(replica.runs) for replica in replicas.all) + replicas.num_parked,
        )

    def _rows_of_a_core(self, replica: Replica, rate: StepSeconds) -> float:
        """Return how many sequences a core can decode together within the TPOT objective. Steps compute prompts too,
        which take some of that time."""
        max_rows = max(1, replica.info.max_running)
        if self._slo.tpot_s is None:
            return max(1.0, DEFAULT_ROW_SHARE * max_rows)
        return min(float(max_rows), max(1.0, (self._slo.tpot_s - rate.step_s) / rate.token_s / 2))


NumFree = Callable[[], int]  # how many more cores could be started now


class Autoscaler:
    """Keeps a fleet at the number of cores that its load needs."""

    def __init__(
        self, rule: ScaleRule, meter: LoadMeter, num_free: NumFree | None = None, *, num_kept: int = 0
    ) -> None:
        """`num_free`: how many more cores could be started on the fleet's machines; None: all. `num_kept`: the first
        cores that are never stopped, because no other core has their role."""
        self.changes: list[tuple[float, int]] = []  # (time, number of cores from then on)
        self._rule = rule
        self._meter = meter
        self._num_free = num_free
        self._num_kept = num_kept
        self._replicas: Replicas | None = None
        self._wake = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._starting: dict[Replica, asyncio.Task[None]] = {}
        self._stopping: set[Replica] = set()
        self._retry_s = -math.inf

    # ── as the keeper of an engine ─────────────────────────────────────────────────────────────────────

    async def start(self, replicas: Replicas) -> None:
        self._replicas = replicas
        replicas.on_waiting = self._wake.set
        replicas.on_arrival = self._meter.note_arrival

    def note_open(self) -> None:
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        pass

    async def stop(self) -> None:
        tasks = [task for task in (self._keeping, *self._starting.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def allowed(self) -> ScaleRange:
        return self._rule.allowed

    def wake(self) -> None:
        """Check now, because a machine has joined or a request waits."""
        self._wake.set()

    def set_limits(self, min_replicas: int, max_replicas: int) -> bool:
        """Change the allowed numbers of cores; the fleet is scaled accordingly."""
        assert self._replicas is not None
        num_all = len(self._replicas.all)
        if not 0 <= min_replicas <= max_replicas or not 1 <= max_replicas <= num_all:
            problem = f"the number of replicas must be between 0 and {num_all}, got {min_replicas} to {max_replicas}"
            raise InvalidRequest(problem, param="replicas")
        if min_replicas < self._num_kept:
            raise InvalidRequest(f"at least {self._num_kept} replicas are needed for their roles", param="replicas")
        self._rule.allowed = ScaleRange(min_replicas, max_replicas)
        self._wake.set()
        return True

    # ── keeping ────────────────────────────────────────────────────────────────────────────────────────

    async def _keep(self) -> None:
        while True:
            self.look()
            with_limit = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._wake.set)
            await self._wake.wait()
            with_limit.cancel()
            self._wake.clear()

    def look(self) -> None:
        """Compare the number of cores with the number needed, and start or stop some."""
        assert self._replicas is not None
        now_s, replicas = asyncio.get_running_loop().time(), self._replicas
        for replica in self._running():
            if replica.supervisor.is_given_up and replica not in self._starting:  # it may work on another machine
                self._end(replica, replica.health.detail)
        running = self._running()
        demand = self._meter.demand(replicas)
        num_needed = self._rule.num_needed(now_s, len(running), demand)
        if num_needed > len(running) and now_s >= self._retry_s:
            self._grow(num_needed - len(running), demand)
        elif num_needed < len(running):
            self._shrink([replica for replica in running if replica.is_ready], len(running) - num_needed, demand)

    def _running(self) -> list[Replica]:
        """Return the cores that run or are being started, including those whose start task has not run yet."""
        assert self._replicas is not None
        running = (one for one in self._replicas.all if not one.is_stopped or one in self._starting)
        return [one for one in running if one not in self._stopping]

    def _grow(self, number: int, demand: Demand) -> None:
        assert self._replicas is not None
        num_free = math.inf if self._num_free is None else self._num_free()
        stopped = [one for one in self._replicas.all if one.is_stopped and one not in self._starting]
        added = stopped[: int(min(number, num_free, len(stopped)))]
        for replica in added:
            self._starting[replica] = asyncio.create_task(self._start(replica))
        if added:
            self._note_change(len(added), demand)

    def _shrink(self, ready: list[Replica], number: int, demand: Demand) -> None:
        """Stop the cores with the fewest sequences, except those that are still starting."""
        free = [one for one in ready if one.index >= self._num_kept]
        leaving = sorted(free, key=lambda one: (one.num_sequences, -one.index))[:number]
        for replica in leaving:
            self._end(replica, "the load does not need it")
        if leaving:
            self._rule.note_change()
            self._note_change(-len(leaving), demand)

    def _note_change(self, number: int, demand: Demand) -> None:
        assert self._replicas is not None
        num_cores = len(self._running())
        self.changes.append((asyncio.get_running_loop().time(), num_cores))
        log.info(
            "scaling from %d to %d engine processes: the load keeps %.2f of them busy, with %d requests",
            *(num_cores - number, num_cores, demand.cores, demand.num_requests),
        )

    async def _start(self, replica: Replica) -> None:
        assert self._replicas is not None
        try:
            await self._replicas.start(replica)
        except (TokenmillError, OSError) as problem:
            self._retry_s = asyncio.get_running_loop().time() + RETRY_S
            log.error("an engine process could not be started: %s", problem)
        finally:
            self._starting.pop(replica, None)

    def _end(self, replica: Replica, why: str) -> None:
        assert self._replicas is not None
        self._stopping.add(replica)
        ending = asyncio.create_task(self._replicas.stop(replica, why))
        ending.add_done_callback(lambda _: self._stopping.discard(replica))
        self._starting[replica] = ending  # closing waits for it
        ending.add_done_callback(lambda _: self._starting.pop(replica, None))
