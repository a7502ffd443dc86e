"""Responses that no client waits for: `background: true`.

    queued ─► in_progress ─► completed | incomplete | failed
       └─────────┴─► cancelled

A row is written at each step, so a response outlives its client's connection and, while it waits, the server: one that
was queued runs again after a restart or on another server with the same state, one that ran has failed. Its events are
kept, so that clients can follow it, leave and come back (`?stream=true&starting_after=N`), also once it is over, and by
way of another server: that one sees them when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from tokenmill.engine.request_ids import call_id
from tokenmill.errors import EngineDead, InvalidRequest, Overloaded, TokenmillError, UnknownModel
from tokenmill.observe.log import get_log
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.dialect import SSE_PING, named_sse_frame
from tokenmill.server.errors import RETRY_AFTER_S, InternalError
from tokenmill.server.generation import GenerationRun
from tokenmill.server.openai.responses.generate import ResponseGenerator, ResponseJob
from tokenmill.server.routing import RouteContext
from tokenmill.server.state.responses import AT_WORK, ResponseRow

log = get_log("server")
MAX_AT_ONCE = 64  # handed to engines; the others wait here
MAX_WAITING = 4096
FINISH_S = 2.0  # to keep answers that are complete
LOOK_S = 1.0  # how often is looked whether a response was cancelled or deleted by way of another server
RETRY_S = 5.0  # until a response that could not be kept is tried again
SWEEP_S = 60.0  # how often responses of dead servers are taken over


@dataclass
class BackgroundResponse:
    """A response that runs in this server, and its events so far."""

    made: ResponseJob
    run: GenerationRun
    frames: list[bytes] = field(default_factory=list)
    is_over: bool = False
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.made.writer.response["id"])

    @property
    def has_begun(self) -> bool:
        return bool(self.made.writer.response["status"] != "queued")

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
                news = self.frames[number:]
                number += len(news)
                yield b"".join(news)
            elif self.is_over:
                return
            else:
                try:
                    await asyncio.wait_for(changed.wait(), keep_alive_s)
                except TimeoutError:
                    yield SSE_PING


class BackgroundResponses:
    """The responses that run in this server without a client. A service: started and ended with it."""

    def __init__(self, context: RouteContext, generator: ResponseGenerator) -> None:
        self._context = context
        self._generator = generator
        self._running: dict[str, BackgroundResponse] = {}
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._foreign: set[str] = set()  # responses of dead servers whose models are not served here
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what servers before this one left behind."""
        await self._take_over()
        if self._context.state.folder is not None:  # else there are no others
            self._watch = asyncio.create_task(self._watch_others())

    async def _watch_others(self) -> None:
        """Notice what other servers with the same state did to responses of this one, and what those that died left."""
        next_sweep = time.monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(LOOK_S)
            if self._running:
                await self._end_unwanted()
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + SWEEP_S
                await self._take_over()

    async def _end_unwanted(self) -> None:
        at_work = [one for one in self._running.values() if one.made.writer.response["status"] in AT_WORK]
        find = partial(self._generator.store.at_work, response_ids=[one.id for one in at_work])
        try:
            wanted = await self._context.state.database.read(find)
        except TokenmillError as problem:  # the state file can't be used at the moment
            log.warning("whether responses were cancelled is not known: %s", problem)
            return
        for running in at_work:
            if running.id not in wanted and running.made.writer.response["status"] in AT_WORK:
                await self.cancel(running)

    async def _take_over(self) -> None:
        database = self._context.state.database
        if database.is_new:
            return
        try:
            abandoned = await database.write(self._generator.store.abandoned)
        except TokenmillError as problem:
            log.warning("responses of earlier servers are not looked after: %s", problem)
            return
        for response_id, owner, body, response in abandoned:
            try:
                if owner and self._context.keys and self._context.keys.get(owner) is None:
                    raise InvalidRequest("the API key that asked for it is no longer valid")
                made = await self._generator.make(body, owner, response_id, response["created_at"])
                running = self._started(made)
            except UnknownModel:
                if response_id not in self._foreign:
                    log.warning("response %s waits for the model %s", response_id, response["model"])
                self._foreign.add(response_id)
                await database.write(partial(self._generator.store.give_back, response_id=response_id))
                continue
            except TokenmillError as problem:
                await database.write(partial(self._generator.store.fail, response=response, why=str(problem)))
                continue
            self._launch(running)

    async def close(self) -> None:
        """Stop. What has not begun stays queued, for the server that is started next; what the engine has just finished
        is kept."""
        if self._watch is not None:
            self._watch.cancel()
        tasks = {running.task: running.has_begun for running in self._running.values() if running.task is not None}
        if begun := [task for task, has_begun in tasks.items() if has_begun]:
            await asyncio.wait(begun, timeout=FINISH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def begin(self, made: ResponseJob) -> BackgroundResponse:
        """Keep a new response as queued, and run it."""
        if len(self._running) >= MAX_WAITING:
            raise Overloaded("too many responses wait in the background", retry_after_s=30.0)
        running = self._started(made)
        running.add(made.writer.queued())
        row = made.row()
        row.request = made.body
        await self._generator.save(made, row)
        self._launch(running)
        return running

    def find(self, response_id: str, owner: str) -> BackgroundResponse | None:
        running = self._running.get(response_id)
        return running if running is not None and running.made.owner == owner else None

    async def cancel(self, running: BackgroundResponse) -> None:
        """End a response; it is over when this returns."""
        assert running.task is not None
        running.is_cancelled = True
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)

    def _started(self, made: ResponseJob) -> BackgroundResponse:
        """Start a response; raise where the limits of its key do not allow it."""
        return BackgroundResponse(made, self._run_of(made))

    def _run_of(self, made: ResponseJob) -> GenerationRun:
        record = RequestRecord(call_id(""), "POST", "/v1/responses", is_generation=True, key_id=made.owner)
        record.model = made.model
        return self._context.start_run(replace(self._generator.job(made), finish=None), record)

    # ── running ────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self, running: BackgroundResponse) -> None:
        if not running.frames:  # taken over from another server
            running.add(running.made.writer.queued())
        running.task = asyncio.create_task(self._run(running))
        self._running[running.id] = running
        running.task.add_done_callback(lambda _: self._running.pop(running.id, None))

    async def _run(self, running: BackgroundResponse) -> None:
        writer = running.made.writer
        try:
            frames = await self._answer(running)
        except TokenmillError as error:
            running.run.record.note_failure(error)
            frames = writer.fail(error)
        except asyncio.CancelledError:
            running.run.record.note_disconnect()
            if not running.is_cancelled:  # the server ends
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

    async def _answer(self, running: BackgroundResponse) -> list[bytes]:
        """Generate once the engine takes it; return the last events, which are shown once the response is kept."""
        while True:
            async with self._places:
                wait_s = await self._accept(running.run)
                if wait_s is None:
                    return await self._generate(running)
            await asyncio.sleep(wait_s)  # others go ahead: it may be a key that has used up its share
            running.run = self._run_of(running.made)

    async def _accept(self, run: GenerationRun) -> float | None:
        """Hand a response to the engine; while that is full or starts again, return when to try anew."""
        try:
            await run.accept()
        except Overloaded as full:
            return full.retry_after_s
        except EngineDead:
            return RETRY_AFTER_S
        return None

    async def _generate(self, running: BackgroundResponse) -> list[bytes]:
        rendering, run = running.made.rendering, running.run
        running.add(rendering.first_frames())
        await self._save(running)
        async for _, event in run:
            running.add(rendering.frames(event))
        return rendering.last_frames(run.facts())

    async def _save(self, running: BackgroundResponse) -> None:
        row = running.made.row()
        row.request, row.is_known = running.made.body, True
        await self._generator.save(running.made, row)

    async def _end(self, running: BackgroundResponse, frames: list[bytes]) -> None:
        row = running.made.row(await running.made.prefix(running.run.facts()))
        row.is_known, row.events = True, [*running.frames, *frames]
        try:
            await self._generator.save(running.made, row)
        except TokenmillError as problem:
            log.warning("response %s is not kept yet: %s", running.id, problem)
            running.add(frames, is_over=True)
            await self._keep_later(running, row)
        else:
            running.add(frames, is_over=True)

    async def _keep_later(self, running: BackgroundResponse, row: ResponseRow) -> None:
        """Try again until the state file can be used, perhaps because its disk has room again. Until then the response
        is here."""
        while True:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TokenmillError):
                return await self._generator.save(running.made, row)


def lifecycle_frames(response: dict[str, Any]) -> list[bytes]:
    """Yield the stream of a response whose events were lost with the server that ran it: its creation and its present
    state."""
    status = response["status"]
    name = status if status in ("completed", "incomplete", "queued", "in_progress") else "failed"
    kinds = ("response.created", f"response.{name}")
    return [
        named_sse_frame(kind, orjson.dumps({"type": kind, "sequence_number": number, "response": response}))
        for number, kind in enumerate(kinds)
    ]
