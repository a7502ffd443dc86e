"""Load generation: send requests to a server and record their times.

    closed loop   `concurrency` clients, each sends its next request when the last is answered
    open loop     requests are sent at their scheduled times, however many are running

A few warm-up requests run first and are not counted. The garbage collector is off meanwhile, because its
pauses would count as the server's.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import uvloop

from tokenmill.bench.client import Client
from tokenmill.bench.dialects import find_dialect
from tokenmill.bench.lag import Interval, Lag, LagMeter
from tokenmill.bench.request_records import BenchRecord
from tokenmill.bench.workloads import Session

Progress = Callable[["LoadRun"], None]
PROGRESS_EVERY_S = 0.5


@dataclass(frozen=True)
class Target:
    url: str
    model: str
    dialect: str = "openai-chat"
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0


@dataclass(frozen=True)
class ClosedLoop:
    concurrency: int
    sessions: Iterable[Session]
    num_requests: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True)
class OpenLoop:
    timed: Iterable[tuple[float, Session]]
    duration_s: float | None = None
    max_in_flight: int = 20_000


@dataclass
class LoadRun:
    """One run in progress, and its result."""

    began: float = field(default_factory=time.perf_counter)
    records: list[BenchRecord] = field(default_factory=list)  # counted requests, in the order of sending
    in_flight: int = 0
    done: int = 0
    lag: Lag | None = None
    stolen: list[Interval] = field(default_factory=list)  # when another process had the processor
    elapsed_s: float = 0.0

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began


def run_load(
    target: Target,
    load: ClosedLoop | OpenLoop,
    *,
    warmup: Iterable[Session] = (),
    warmup_concurrency: int = 4,
    progress: Progress | None = None,
    keep_texts: bool = False,
) -> LoadRun:
    """Run a load to its end. `keep_texts`: keep the answers in the records, not only their times."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, no_collector():
        return runner.run(_run(target, load, list(warmup), warmup_concurrency, progress, keep_texts))


@contextmanager
def no_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _run(
    target: Target,
    load: ClosedLoop | OpenLoop,
    warmup: list[Session],
    warmup_concurrency: int,
    progress: Progress | None,
    keep_texts: bool,
) -> LoadRun:
    dialect = find_dialect(target.dialect)
    if warmup:
        warm = LoadRun()
        client = Client(target.url, dialect, target.model, target.api_key, warm.began)
        await _closed(Sender(client, warm, target.timeout_s), ClosedLoop(warmup_concurrency, warmup, len(warmup)))
        client.close()
    run, meter = LoadRun(), LagMeter()
    client = Client(target.url, dialect, target.model, target.api_key, run.began)
    sender = Sender(client, run, target.timeout_s, keep_texts=keep_texts)
    watching = asyncio.create_task(_watch(run, progress)) if progress else None
    meter.start()
    try:
        await (_closed(sender, load) if isinstance(load, ClosedLoop) else _open(sender, load))
    finally:
        meter.stop()
        client.close()
        if watching is not None:
            watching.cancel()
    run.elapsed_s = run.now_s
    run.stolen = [(start - run.began, end - run.began) for start, end in meter.stolen]
    is_open = isinstance(load, OpenLoop)
    run.lag = meter.lag([r.sent_s - r.scheduled_s for r in run.records if r.error != "connect"] if is_open else [])
    if progress:
        progress(run)
    return run


async def _watch(run: LoadRun, progress: Progress) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        progress(run)


class Sender:
    """Sends sessions, one turn after the other, and keeps their records."""

    def __init__(self, client: Client, run: LoadRun, timeout_s: float, *, keep_texts: bool = False) -> None:
        self._client, self._run, self._timeout_s, self._keep_texts = client, run, timeout_s, keep_texts

    async def send(self, session: Session, scheduled_s: float | None = None) -> None:
        said: list[tuple[str, str]] = []
        for number in range(len(session.turns)):
            ask = session.next_ask(number, said)
            request = self._client.encode(ask)
            now = self._run.now_s
            record = BenchRecord(
                number=len(self._run.records),
                scheduled_s=now if scheduled_s is None or number else scheduled_s,
                asked_input=ask.input_len,
                asked_output=ask.output_len,
                texts=[] if len(session.turns) > 1 or self._keep_texts else None,
            )
            await self._exchange(request, record)
            if record.error is not None:
                return
            said.append((session.turns[number].messages[-1]["content"], "".join(record.texts or ())))

    async def _exchange(self, request: bytes, record: BenchRecord) -> None:
        run = self._run
        run.records.append(record)
        run.in_flight += 1
        try:
            await self._client.fetch(request, record, self._timeout_s)
        finally:
            run.in_flight -= 1
            run.done += 1

    @property
    def now_s(self) -> float:
        return self._run.now_s

    @property
    def in_flight(self) -> int:
        return self._run.in_flight


async def _closed(sender: Sender, load: ClosedLoop) -> None:
    waiting = iter(load.sessions if load.num_requests is None else islice(load.sessions, load.num_requests))
    end_s = load.duration_s if load.duration_s is not None else float("inf")

    async def work() -> None:
        for session in waiting:  # shared: each client takes the next one
            await sender.send(session)
            if sender.now_s >= end_s:
                return

    await asyncio.gather(*(work() for _ in range(load.concurrency)))


async def _open(sender: Sender, load: OpenLoop) -> None:
    running: set[asyncio.Task[None]] = set()
    end_s = load.duration_s if load.duration_s is not None else float("inf")
    for at_s, session in load.timed:
        if at_s > end_s:
            break
        wait_s = at_s - sender.now_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        while sender.in_flight >= load.max_in_flight:
            await asyncio.sleep(0.01)
        task = asyncio.create_task(sender.send(session, at_s))
        running.add(task)
        task.add_done_callback(running.discard)
    if running:
        await asyncio.gather(*running)
