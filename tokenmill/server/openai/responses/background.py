"""Responses that run in the background, without a client that waits: `background: true`.

    queued ─► in_progress ─► completed | incomplete | failed
       └─────────┴─► cancelled

The stored row is updated at each transition, so a response survives the disconnect of its client and, while it is
queued, the server: after a restart, or on another server with the same state, a queued response runs, and one that was
in progress has failed. Its events are stored, so that clients can follow it, disconnect and resume
(`?stream=true&starting_after=N`), also when it has ended, and from another server, which sees the events once it has
ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from tokenmill.errors import EngineDead, Overloaded, TokenmillError, UnknownModel
from tokenmill.observe.log import get_log
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.dialect import SSE_PING, named_sse_frame
from tokenmill.server.errors import RETRY_AFTER_S, InternalError
from tokenmill.server.generation import GenerationRun
from tokenmill.server.openai.responses.generate import ResponseGenerator, ResponseJob
from tokenmill.server.request_ids import call_id
from tokenmill.server.routing import RouteContext
from tokenmill.server.state.responses import UNFINISHED, ResponseRow

log = get_log("server")
MAX_RUNNING = 64  # submitted to engines; the others wait here
MAX_WAITING = 4096
CLOSE_TIMEOUT_S = 2.0  # time at shutdown to store responses that are complete
POLL_S = 1.0  # interval of checking whether responses were cancelled or deleted through another server
RETRY_S = 5.0  # until saving a response is tried again
SWEEP_S = 60.0  # interval of taking over the responses of dead servers


@dataclass
class BackgroundResponse:
    """A response that runs in this server, and its events so far."""

    job: ResponseJob
    run: GenerationRun
    frames: list[bytes] = field(default_factory=list)
    is_over: bool = False
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.job.writer.response["id"])

    @property
    def has_begun(self) -> bool:
        return bool(self.job.writer.response["status"] != "queued")

    def add(self, frames: list[bytes], *, is_over: bool = False) -> None:
        self.frames += frames
        self.is_over = is_over
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int, keep_alive_s: float) -> AsyncIterator[bytes]:
        """Yield all events after number `after`, as they arrive."""
        number = after + 1
        while True:
            changed = self._changed
            if number < len(self.frames):
                new_frames = self.frames[number:]
                number += len(new_frames)
                yield b"".join(new_frames)
            elif self.is_over:
                return
            else:
                try:
                    await asyncio.wait_for(changed.wait(), keep_alive_s)
                except TimeoutError:
                    yield SSE_PING


class FairSemaphore:
    """A semaphore that keys share fairly: the next permit goes to the waiting key that holds the fewest. Responses of
    the same key get permits in order of arrival."""

    def __init__(self, num_permits: int) -> None:
        self._num_free = num_permits
        self._num_held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def permit(self, owner: str) -> AsyncIterator[None]:
        """Acquire a permit for the duration of the context."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():  # also if it was granted just before the wait was cancelled
                self._num_free += 1
                self._num_held[owner] -= 1
                self._grant()

    def _grant(self) -> None:
        while self._num_free and self._waiting:
            owner = min(self._waiting, key=self._num_held.__getitem__)
            granted = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not granted.cancelled():
                granted.set_result(None)
                self._num_free -= 1
                self._num_held[owner] += 1


class BackgroundResponses:
    """All background responses of this server, as a service that is started and closed with it."""

    def __init__(self, context: RouteContext, generator: ResponseGenerator) -> None:
        self._context = context
        self._generator = generator
        self._running: dict[str, BackgroundResponse] = {}
        self._permits = FairSemaphore(MAX_RUNNING)
        self._unservable: set[str] = set()  # responses of dead servers whose models this server does not have
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over the responses of servers that ended."""
        await self._take_over()
        if self._context.state.folder is not None:  # otherwise no other server has the same state
            self._watch = asyncio.create_task(self._watch_others())

    async def _watch_others(self) -> None:
        """Poll the state file for responses that were cancelled through other servers, and those of dead servers."""
        next_sweep = time.monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(POLL_S)
            if self._running:
                await self._end_cancelled()
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + SWEEP_S
                await self._take_over()

    async def _end_cancelled(self) -> None:
        unfinished = [one for one in self._running.values() if one.job.writer.response["status"] in UNFINISHED]
        find = partial(self._generator.store.still_unfinished, response_ids=[one.id for one in unfinished])
        try:
            remaining = await self._context.state.database.read(find)
        except TokenmillError as problem:  # the state file is temporarily unavailable
            log.warning("could not check for cancelled responses: %s", problem)
            return
        for running in unfinished:
            if running.id not in remaining and running.job.writer.response["status"] in UNFINISHED:
                await self.cancel(running)

    async def _take_over(self) -> None:
        database = self._context.state.database
        if database.is_new:
            return
        try:
            abandoned = await database.write(self._generator.store.take_over_abandoned)
        except TokenmillError as problem:
            log.warning("could not take over the responses of earlier servers: %s", problem)
            return
        for response_id, owner, body, response in abandoned:
            try:
                job = await self._generator.make(body, owner, response_id, response["created_at"])
                running = self._started(job)
            except UnknownModel:
                if response_id not in self._unservable:
                    log.warning("response %s waits for the model %s", response_id, response["model"])
                self._unservable.add(response_id)
                await database.write(partial(self._generator.store.release, response_id=response_id))
                continue
            except TokenmillError as problem:
                await database.write(partial(self._generator.store.fail, response=response, why=str(problem)))
                continue
            self._launch(running)

    async def close(self) -> None:
        """Stop all responses. Queued ones stay queued for the next server; complete ones get a moment to be stored."""
        if self._watch is not None:
            self._watch.cancel()
        tasks = {running.task: running.has_begun for running in self._running.values() if running.task is not None}
        if begun := [task for task, has_begun in tasks.items() if has_begun]:
            await asyncio.wait(begun, timeout=CLOSE_TIMEOUT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, job: ResponseJob) -> BackgroundResponse:
        """Store a new response as queued, and run it."""
        num_by_owner = Counter(one.job.owner for one in self._running.values())
        num_owners = len(num_by_owner) + (job.owner not in num_by_owner)
        if len(self._running) >= MAX_WAITING and num_by_owner[job.owner] >= MAX_WAITING // num_owners:
            raise Overloaded("too many background responses are waiting", retry_after_s=30.0)
        running = self._started(job)
        running.add(job.writer.queued())
        row = job.row()
        row.request = job.body
        await self._generator.save(job, row)
        self._launch(running)
        return running

    def find(self, response_id: str, owner: str) -> BackgroundResponse | None:
        running = self._running.get(response_id)
        return running if running is not None and running.job.owner == owner else None

    async def cancel(self, running: BackgroundResponse) -> None:
        """Cancel a response; it has ended when this returns."""
        assert running.task is not None
        running.is_cancelled = True
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)

    def _started(self, job: ResponseJob) -> BackgroundResponse:
        """Create the run of a response; raise if its key may not use the model."""
        return BackgroundResponse(job, self._run_of(job))

    def _run_of(self, job: ResponseJob) -> GenerationRun:
        record = RequestRecord(call_id(""), "POST", "/v1/responses", is_generation=True, key_id=job.owner)
        record.model = job.model
        return self._context.start_run(replace(self._generator.generation_job(job), finish=None), record)

    # ── running ────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, running: BackgroundResponse) -> None:
        if not running.frames:  # taken over from another server
            running.add(running.job.writer.queued())
        running.task = asyncio.create_task(self._run(running))
        self._running[running.id] = running
        running.task.add_done_callback(lambda _: self._running.pop(running.id, None))

    async def _run(self, running: BackgroundResponse) -> None:
        writer = running.job.writer
        try:
            frames = await self._generate_when_accepted(running)
        except TokenmillError as error:
            running.run.record.note_failure(error)
            frames = writer.fail(error)
        except asyncio.CancelledError:
            running.run.record.note_disconnect()
            if not running.is_cancelled:  # the server is stopping
                raise
            frames = writer.cancel()
        except Exception:
            log.exception("response %s failed", running.id)
            running.run.record.note_failure(InternalError())
            frames = writer.fail(InternalError())
        finally:
            await running.run.close()
            self._context.count(running.run.record)
        await self._end(running, frames)

    async def _generate_when_accepted(self, running: BackgroundResponse) -> list[bytes]:
        """Wait until the engine accepts the response, then generate it. Return the final events, which are sent once
        the response is stored."""
        while True:
            async with self._permits.permit(running.job.owner):
                wait_s = await self._try_accept(running.run)
                if wait_s is None:
                    return await self._generate(running)
            await asyncio.sleep(wait_s)  # without a permit: perhaps only this key's quota is used up
            running.run = self._run_of(running.job)

    async def _try_accept(self, run: GenerationRun) -> float | None:
        """Submit a response to the engine. If the engine is full or restarting, return the seconds until the next
        attempt."""
        try:
            await run.accept()
        except Overloaded as error:
            return error.retry_after_s
        except EngineDead:
            return RETRY_AFTER_S
        return None

    async def _generate(self, running: BackgroundResponse) -> list[bytes]:
        rendering, run = running.job.rendering, running.run
        running.add(rendering.first_frames())
        await self._save(running)
        async for _, event in run:
            running.add(rendering.frames(event))
        return rendering.last_frames(run.facts())

    async def _save(self, running: BackgroundResponse) -> None:
        row = running.job.row()
        row.request, row.is_known = running.job.body, True
        await self._generator.save(running.job, row)

    async def _end(self, running: BackgroundResponse, frames: list[bytes]) -> None:
        row = running.job.row(await running.job.prefix(running.run.facts()))
        row.is_known, row.events = True, [*running.frames, *frames]
        try:
            await self._generator.save(running.job, row)
        except TokenmillError as problem:
            log.warning("response %s could not be stored and will be tried again: %s", running.id, problem)
            running.add(frames, is_over=True)
            await self._save_later(running, row)
        else:
            running.add(frames, is_over=True)

    async def _save_later(self, running: BackgroundResponse, row: ResponseRow) -> None:
        """Retry until the response is stored, for example once the disk has room again. Until then it is available from
        memory."""
        while True:
            await asyncio.sleep(RETRY_S)
            with suppress(TokenmillError):
                return await self._generator.save(running.job, row)


def lifecycle_frames(response: dict[str, Any]) -> list[bytes]:
    """Return a stream for a response whose events were lost with its server: its creation and its current state."""
    status = response["status"]
    name = status if status in ("completed", "incomplete", "queued", "in_progress") else "failed"
    kinds = ("response.created", f"response.{name}")
    return [
        named_sse_frame(kind, orjson.dumps({"type": kind, "sequence_number": number, "response": response}))
        for number, kind in enumerate(kinds)
    ]
