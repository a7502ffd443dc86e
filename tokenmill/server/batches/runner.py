"""The service that runs batches, a few lines at a time, behind interactive requests.

    check the file ─► process its lines ─► write the result files ─► done
          each step is committed to the state file before the next; after a restart the batch continues there

The result of a line is committed before the line counts as processed; results that arrive together share a
transaction. If the server dies before that, the next server processes the line again. A server that is stopping
releases its batches immediately, so that other servers can finish them.
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
from tokenmill.server.batches.lines import BatchLine, LineError, check_file, parse_line, raw_lines
from tokenmill.server.batches.table import EndedLine, NewBatch, Outcome
from tokenmill.server.batches.width import TICK_S, BatchWidth
from tokenmill.server.body import shown
from tokenmill.server.routing import MakeJob, RouteContext
from tokenmill.server.state.database import Database
from tokenmill.server.state.files import StoredFiles
from tokenmill.server.variants import gate_of

log = get_log("server")
POLL_S = 1.0  # interval of checking whether a batch was cancelled through another server
SWEEP_S = 60.0  # interval of expiring files and taking over the batches of dead servers
LINE_CHUNK = 256  # lines read or committed without yielding to other tasks


@dataclass(frozen=True)
class BatchDialect:
    """A dialect's form of the results of lines, and its final step of a batch."""

    answered: Callable[[BatchLine, LineAnswer], bytes]
    unanswered: Callable[[BatchLine, Outcome], bytes]  # the result of a line that was canceled or expired
    finish: Callable[[sqlite3.Row, str], Awaitable[None]]  # all lines have ended: write results, set the final status


@dataclass(frozen=True)
class RunningBatch:
    """A batch that runs on this server."""

    task: asyncio.Task[None]
    is_cancelled: asyncio.Event


class LineWriter:
    """Commits the results of lines. Results that arrive while a transaction runs share the next one."""

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
            if lines:  # otherwise the previous transaction included this line
                await self.database.write(lambda connection: table.add_lines(connection, self._batch_id, lines))


class BatchRunner:
    """Runs batches on this server."""

    def __init__(self, context: RouteContext, files: StoredFiles, jobs: Mapping[str, MakeJob], max_bytes: int) -> None:
        """`jobs`: URL path ─► the function that makes a job from the body of a line."""
        self.files = files
        self.jobs = jobs
        self.dialects: dict[str, BatchDialect] = {}
        self._context = context
        self.database = context.state.database
        self._bound = table.batches_bound(max_bytes)
        self._running: dict[str, RunningBatch] = {}
        self._widths: dict[str, BatchWidth] = {}  # by model
        self._watch: asyncio.Task[None] | None = None

    # ── the service ────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Continue the batches of servers that ended."""
        try:
            await self._sweep()
        except TokenmillError as error:  # the server should start even if its old batches can't continue
            log.error("batches: %s", error)
        self._watch = self._watch or asyncio.create_task(self._watch_all())

    async def close(self) -> None:
        """Release all batches, for the next server."""
        if self._watch is not None:
            self._watch.cancel()
        await self._release_all()
        self.files.close()

    async def _release_all(self) -> None:
        batch_ids = list(self._running)
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if batch_ids:
            await self.database.write(lambda connection: table.release(connection, batch_ids))

    async def _watch_all(self) -> None:
        """Adapt the widths continuously; less often, look for cancelled batches, expired files and the batches of dead
        servers."""
        next_poll, next_sweep = time.monotonic(), time.monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(TICK_S if self._running else POLL_S)
            now = time.monotonic()
            try:
                self._adapt_widths()
                if self._running and self._is_stopping():
                    await self._release_all()
                if self._running and now >= next_poll:
                    next_poll = now + POLL_S
                    await self._poll_cancelled()
                if now >= next_sweep:
                    next_sweep = now + SWEEP_S
                    await self._sweep()
            except TokenmillError as error:  # the state file is temporarily unavailable
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
        for row in await self.database.read(table.unfinished):
            is_late = row["due_s"] < time.time()
            if not self._is_worked_on(row) and (is_late or await self._can_serve(row["model"])):
                await self._take_over(row)

    def _is_worked_on(self, row: sqlite3.Row) -> bool:
        server, instance = row["server"], self._context.state.instance
        if server == instance.id:
            return row["id"] in self._running
        return server is not None and instance.is_alive(server)

    async def _can_serve(self, model: str | None) -> bool:
        """Return whether this server has the model. A batch for a model of another server with the same state must not
        fail here."""
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
        """Store a new batch and start it."""
        instance = self._context.state.instance

        def work(connection: sqlite3.Connection) -> sqlite3.Row:
            instance.enter()
            return table.add_batch(connection, batch, self._bound, instance.id)

        row = await self.database.write(work)
        self._begin(row["id"])
        return row

    async def cancel(self, owner: str, dialect: str, batch_id: str) -> sqlite3.Row:
        """Start to cancel a batch. One that is finalizing or has ended is not changed."""

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

    async def _poll_cancelled(self) -> None:
        for row in await self.database.read(table.unfinished):
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
        """Run a batch from its current status to its end."""
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
            await self._end_unanswered(row, "canceled" if ended == "cancelled" else "expired")
            await self.database.write(lambda connection: table.move(connection, batch_id, "finalizing", ends_as=ended))
            await self.dialects[row["dialect"]].finish(await self._reload(batch_id), ended)
            log.info("batch %s: %s", batch_id, ended)

    async def _reload(self, batch_id: str) -> sqlite3.Row:
        row = await self.database.read(lambda connection: table.reload(connection, batch_id))
        assert row is not None, "a running batch can't be deleted"
        return row

    async def _check(self, row: sqlite3.Row) -> sqlite3.Row:
        """Check the whole file, and set the status to `failed` or `in_progress`."""
        check = await asyncio.to_thread(check_file, self.files.path(row["input"]), row["endpoint"])
        if not check.errors and not await self._can_serve(check.model):
            problem = f"the model {shown(check.model)} does not exist"
            check.add(LineError("model_not_found", problem, param="body.model"), None)

        def work(connection: sqlite3.Connection) -> None:
            current = table.reload(connection, row["id"])
            if current is None or current["status"] != "validating":
                return  # cancelled meanwhile
            if check.errors:
                table.move(connection, row["id"], "failed", errors=check.errors, num_lines=check.num_lines, server=None)
            else:
                table.move(connection, row["id"], "in_progress", num_lines=check.num_lines, model=check.model)

        await self.database.write(work)
        return await self._reload(row["id"])

    # ── lines ──────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_lines(self, row: sqlite3.Row, is_cancelled: asyncio.Event) -> str:
        """Process all lines; return the batch's final status."""
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
        """Yield the lines that have no result yet."""
        ended = await self.database.read(lambda connection: table.ended_lines(connection, row["id"]))
        for number, data in raw_lines(self.files.path(row["input"])):
            if number not in ended:
                yield parse_line(number, data, (row["endpoint"],))
            if number % LINE_CHUNK == 0:
                await asyncio.sleep(0)

    async def _end_unanswered(self, row: sqlite3.Row, outcome: Outcome) -> None:
        """Commit results for the lines that were not processed."""
        result_of = self.dialects[row["dialect"]].unanswered
        pending: list[EndedLine] = []

        async def commit() -> None:
            lines, pending[:] = list(pending), []
            await self.database.write(lambda connection: table.add_lines(connection, row["id"], lines))

        async for line in self._open_lines(row):
            pending.append(EndedLine(line.number, line.custom_id, outcome, result_of(line, outcome)))
            if len(pending) == LINE_CHUNK:
                await commit()
        await commit()

    def _width_of(self, model: str | None) -> BatchWidth:
        """Return the width for a model's engine. A line with an unknown model uses the default model's: it fails as
        soon as it is parsed."""
        try:
            gate = gate_of(self._context.registry.find(model))
        except TokenmillError:
            gate = self._context.registry.default
        if gate.label not in self._widths:
            known = gate.known
            self._widths[gate.label] = BatchWidth(0 if known is None else known.max_running)
        return self._widths[gate.label]
