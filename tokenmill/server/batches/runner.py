"""The service that answers batches, a few lines at a time, beside interactive requests.

    check the file ─► answer its lines ─► write the files with the results ─► done
          each step is in the state file before the next begins; after a restart it goes on there

What came of a line is committed before the line counts as answered, several lines in one transaction if they come
together. A line whose server died before that is answered again by the next one. A server that is told to stop leaves
its lines at once: others can finish them.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from tokenmill.errors import TokenmillError, UnknownModel
from tokenmill.observe.log import get_log
from tokenmill.server.batches import table
from tokenmill.server.batches.answers import LineAnswer, answer_line
from tokenmill.server.batches.lines import BatchLine, LineFault, check_file, parse_line, raw_lines
from tokenmill.server.batches.table import EndedLine, NewBatch, Outcome
from tokenmill.server.batches.width import TICK_S, BatchWidth
from tokenmill.server.body import shown
from tokenmill.server.routing import MakeJob, RouteContext
from tokenmill.server.state.database import Database
from tokenmill.server.state.files import StoredFiles
from tokenmill.server.variants import gate_of

log = get_log("server")
LOOK_S = 1.0  # how often is looked whether a batch was cancelled by way of another server
SWEEP_S = 60.0  # how often files expire, and batches of dead servers are taken over
LINES_AT_ONCE = 256  # read, or kept, without giving others their turn


@dataclass(frozen=True)
class BatchDialect:
    """A dialect's form of a line's result, and what it does when all lines have ended."""

    answered: Callable[[BatchLine, LineAnswer], bytes]
    left: Callable[[BatchLine, Outcome], bytes]  # of a line that was not answered: canceled or expired
    finish: Callable[[sqlite3.Row, str], Awaitable[None]]  # bring a batch to its last status: all its lines have ended


@dataclass(frozen=True)
class RunningBatch:
    """A batch that this server works on."""

    task: asyncio.Task[None]
    is_cancelled: asyncio.Event


class LineWriter:
    """Commits what came of lines; lines that come while a transaction runs share the next one."""

    def __init__(self, database: Database, batch_id: str) -> None:
        self.database = database
        self._batch_id = batch_id
        self._pending: list[EndedLine] = []
        self._turn = asyncio.Lock()

    async def add(self, line: EndedLine) -> None:
        """Return once the line is committed."""
        self._pending.append(line)
        async with self._turn:
            lines, self._pending = self._pending, []
            if lines:  # else the one before took this line along
                await self.database.write(lambda connection: table.add_lines(connection, self._batch_id, lines))


class BatchRunner:
    """Runs the batches that this server works on."""

    def __init__(self, context: RouteContext, files: StoredFiles, jobs: Mapping[str, MakeJob], max_bytes: int) -> None:
        """`jobs`: by path, how the body of a line becomes a job."""
        self.files = files
        self.jobs = jobs
        self.dialects: dict[str, BatchDialect] = {}
        self._context = context
        self.database = context.state.database
        self._bound = table.batches_bound(max_bytes)
        self._running: dict[str, RunningBatch] = {}
        self._widths: dict[str, BatchWidth] = {}  # by model
        self._watch: asyncio.Task[None] | None = None

    # ── life of the service ────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Go on with batches whose server is gone."""
        try:
            await self._sweep()
        except TokenmillError as error:  # a server without its old batches is better than none
            log.error("batches: %s", error)
        self._watch = self._watch or asyncio.create_task(self._watch_all())

    async def close(self) -> None:
        """Leave all batches to the next server."""
        if self._watch is not None:
            self._watch.cancel()
        await self._leave_all()
        self.files.close()

    async def _leave_all(self) -> None:
        left = list(self._running)
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if left:
            await self.database.write(lambda connection: table.give_up(connection, left))

    async def _watch_all(self) -> None:
        """Adapt the widths all the time; now and then look for cancelled batches, old files and batches of the dead."""
        next_look, next_sweep = time.monotonic(), time.monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(TICK_S if self._running else LOOK_S)
            now = time.monotonic()
            try:
                self._adapt_widths()
                if self._running and self._is_stopping():
                    await self._leave_all()
                if self._running and now >= next_look:
                    next_look = now + LOOK_S
                    await self._look_for_cancelled()
                if now >= next_sweep:
                    next_sweep = now + SWEEP_S
                    await self._sweep()
            except TokenmillError as error:  # the state file can't be used at the moment
                log.error("batches: %s", error)

    def _adapt_widths(self) -> None:
        num_others, num_waiting = self._context.live.interactive()
        for width in self._widths.values():
            width.adapt(num_others, num_waiting)

    def _is_stopping(self) -> bool:
        return self._context.registry.default.health().state == "draining"

    async def _sweep(self) -> None:
        if self.database.is_new or self._is_stopping():
            return
        await self.files.sweep()
        await self.database.write(self._bound.expire)
        for row in await self.database.read(table.abandoned):
            is_late = row["due_s"] < time.time()
            if not self._is_worked_on(row) and (is_late or await self._can_serve(row["model"])):
                await self._take_over(row)

    def _is_worked_on(self, row: sqlite3.Row) -> bool:
        server, instance = row["server"], self._context.state.instance
        if server == instance.id:
            return row["id"] in self._running
        return server is not None and instance.is_alive(server)

    async def _can_serve(self, model: str | None) -> bool:
        """False for a model of another server with the same state: that server's batches are not ours to fail."""
        try:
            await self._context.when_read(lambda: self._context.registry.find(model, is_required=False))
        except UnknownModel:
            return False
        return True

    async def _take_over(self, row: sqlite3.Row) -> None:
        instance = self._context.state.instance

        def work(connection: sqlite3.Connection) -> bool:
            instance.enter()
            return table.claim(connection, row, instance.id)

        if await self.database.write(work):
            log.info("batch %s continues on this server: %s", row["id"], row["status"])
            self._begin(row["id"])

    # ── batches ────────────────────────────────────────────────────────────────────────────────────────

    async def add(self, batch: NewBatch) -> sqlite3.Row:
        """Keep a batch, and begin with it."""
        instance = self._context.state.instance

        def work(connection: sqlite3.Connection) -> sqlite3.Row:
            instance.enter()
            return table.add_batch(connection, batch, self._bound, instance.id)

        row = await self.database.write(work)
        self._begin(row["id"])
        return row

    async def cancel(self, owner: str, dialect: str, batch_id: str) -> sqlite3.Row:
        """Have a batch end soon. One that is ending, or has ended, stays as it is."""

        def work(connection: sqlite3.Connection) -> sqlite3.Row:
            row = table.find_batch(connection, owner, dialect, batch_id)
            if row["status"] in ("validating", "in_progress"):
                table.move(connection, batch_id, "cancelling")
            return table.find_batch(connection, owner, dialect, batch_id)

        row = await self.database.write(work)
        self._note_cancelled(row)
        return row

    def _note_cancelled(self, row: sqlite3.Row) -> None:
        running = self._running.get(row["id"])
        if running is not None and row["status"] == "cancelling":
            running.is_cancelled.set()

    async def _look_for_cancelled(self) -> None:
        for row in await self.database.read(table.abandoned):
            self._note_cancelled(row)

    def _begin(self, batch_id: str) -> None:
        self._watch = self._watch or asyncio.create_task(self._watch_all())
        is_cancelled = asyncio.Event()
        task = asyncio.create_task(self._run(batch_id, is_cancelled))
        self._running[batch_id] = RunningBatch(task, is_cancelled)
        task.add_done_callback(lambda done: self._end(batch_id, done))

    def _end(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(batch_id, None)
        if not self._running:
            self._widths.clear()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch %s stopped and will be tried again: %s", batch_id, error, exc_info=error)

    async def _run(self, batch_id: str, is_cancelled: asyncio.Event) -> None:
        """Bring a batch to its end, from wherever it is."""
        row = await self._reload(batch_id)
        if row["status"] == "validating":
            row = await self._check(row)
        if row["status"] == "in_progress":
            ended = await self._answer_lines(row, is_cancelled)
        elif row["status"] == "finalizing":
            ended = table.facts_of(row)["ends_as"]
        else:
            ended = "cancelled" if row["status"] == "cancelling" else ""
        if ended:
            await self._leave_lines(row, "canceled" if ended == "cancelled" else "expired")
            await self.database.write(lambda connection: table.move(connection, batch_id, "finalizing", ends_as=ended))
            await self.dialects[row["dialect"]].finish(await self._reload(batch_id), ended)
            log.info("batch %s: %s", batch_id, ended)

    async def _reload(self, batch_id: str) -> sqlite3.Row:
        row = await self.database.read(lambda connection: table.reload(connection, batch_id))
        assert row is not None, "a batch that runs is not deleted"
        return row

    async def _check(self, row: sqlite3.Row) -> sqlite3.Row:
        """Check the whole file; it has errors, or its lines are answered next."""
        check = await asyncio.to_thread(check_file, self.files.path(row["input"]), row["endpoint"])
        if not check.faults and not await self._can_serve(check.model):
            problem = f"the model {shown(check.model)} does not exist"
            check.add(LineFault("model_not_found", problem, param="body.model"), None)

        def work(connection: sqlite3.Connection) -> None:
            current = table.reload(connection, row["id"])
            if current is None or current["status"] != "validating":
                return  # cancelled meanwhile
            if check.faults:
                table.move(connection, row["id"], "failed", errors=check.faults, num_lines=check.num_lines, server=None)
            else:
                table.move(connection, row["id"], "in_progress", num_lines=check.num_lines, model=check.model)

        await self.database.write(work)
        return await self._reload(row["id"])

    # ── lines ──────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_lines(self, row: sqlite3.Row, is_cancelled: asyncio.Event) -> str:
        """Answer all lines, and return the batch's final status."""
        if row["due_s"] < time.time():
            return "expired"
        answering = asyncio.create_task(self._answer_all(row))
        cancelling = asyncio.create_task(is_cancelled.wait())
        try:
            timeout_s = max(0.0, row["due_s"] - time.time())
            await asyncio.wait({answering, cancelling}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
                return "completed"
            return "cancelled" if cancelling.done() else "expired"
        finally:
            cancelling.cancel()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer_all(self, row: sqlite3.Row) -> None:
        writer = LineWriter(self.database, row["id"])
        async with asyncio.TaskGroup() as group:
            async for line in self._open_lines(row):
                width = self._width_of(line.model)
                await width.enter()
                group.create_task(self._answer_one(row, line, width, writer))

    async def _answer_one(self, row: sqlite3.Row, line: BatchLine, width: BatchWidth, writer: LineWriter) -> None:
        try:
            answer = await answer_line(line, row["owner"], self.jobs[line.url], self._context)
        finally:
            width.leave()
        outcome: Outcome = "errored" if answer.is_error else "succeeded"
        result = self.dialects[row["dialect"]].answered(line, answer)
        await writer.add(EndedLine(line.number, line.custom_id, outcome, result, answer.usage))

    async def _open_lines(self, row: sqlite3.Row) -> AsyncIterator[BatchLine]:
        """Yield the lines that have no answer yet."""
        ended = await self.database.read(lambda connection: table.ended_lines(connection, row["id"]))
        for number, data in raw_lines(self.files.path(row["input"])):
            if number not in ended:
                yield parse_line(number, data, (row["endpoint"],))
            if number % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _leave_lines(self, row: sqlite3.Row, outcome: Outcome) -> None:
        """End the lines that were not answered."""
        write_line = self.dialects[row["dialect"]].left
        left: list[EndedLine] = []

        async def keep() -> None:
            lines, left[:] = list(left), []
            await self.database.write(lambda connection: table.add_lines(connection, row["id"], lines))

        async for line in self._open_lines(row):
            left.append(EndedLine(line.number, line.custom_id, outcome, write_line(line, outcome)))
            if len(left) == LINES_AT_ONCE:
                await keep()
        await keep()

    def _width_of(self, model: str | None) -> BatchWidth:
        """The places in the engine of a model; a line whose model is not there is refused soon, wherever it waits."""
        try:
            gate = gate_of(self._context.registry.find(model))
        except TokenmillError:
            gate = self._context.registry.default
        if gate.label not in self._widths:
            known = gate.known
            self._widths[gate.label] = BatchWidth(0 if known is None else known.max_running)
        return self._widths[gate.label]
