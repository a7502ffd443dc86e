"""Many requests of one program: rows are read while there is room for them, and answered as they end.

    iterable of rows ─► at most `window` requests under way ─► steps ─► answered rows, each with its number

Memory holds the window, however many rows there are. A row that can't be asked, or that fails, is an answered row with
an error: the others do not notice. Ctrl-C is heard between two steps, so that no step is left half done. How far the
work is, a bar shows on a terminal, and a line every few seconds in a log elsewhere.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.results import CompletionOutput, EmbeddingOutput, EventFold, RequestOutput, request_output
from tokenmill.errors import TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.types import EmbedRequest, Event, PromptRequest, Request, SequenceOutput

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

log = get_log("engine")

ADDED_PER_STEP = 128  # requests: 20 ms of work, so that the first step begins soon
READING_S = 0.02  # a slow iterable does not keep the rows under way waiting for longer
MIN_WINDOW = 64
INTERRUPTED = "interrupted before it was finished"
LINE_EVERY_S = 5.0  # in a log

Arrived = Event | TokenmillError


@dataclass
class OfflineRow:
    """One row of a call: its request and its result so far."""

    number: int
    asked: ClientRequest | None  # None: the row could not be understood
    request: Request | None = None  # None: it was refused before it ran
    folds: list[EventFold] = field(default_factory=list)
    error: TokenmillError | None = None

    def add(self, arrived: Arrived) -> None:
        if isinstance(arrived, TokenmillError):
            self.error = arrived
        else:
            self.folds[arrived.index].add(arrived)

    def output(self, error: str | None = None) -> RequestOutput:
        """The row as `LLM.generate` returns it; one that failed keeps the text it had."""
        error = self.error.message if self.error is not None else error
        if self.request is None:
            return RequestOutput(
                "", prompt_text(self.asked), [], [CompletionOutput(0)], error=error, number=self.number
            )
        output = request_output(self.request, prompt_text(self.asked), self.folds, error)
        output.number = self.number
        return output

    def embedding(self) -> EmbeddingOutput:
        """The row as `LLM.embed` returns it."""
        if self.error is not None:
            self.error.message = f"prompt {self.number}: {self.error.message}"
            raise self.error
        assert self.request is not None
        return EmbeddingOutput(
            self.request.request_id, self.request.prompt_token_ids, self.folds[0].event.embedding or []
        )


def prompt_text(asked: ClientRequest | None) -> str | None:
    return asked.prompt if isinstance(asked, PromptRequest) and isinstance(asked.prompt, str) else None


class OfflineRun:
    """The rows of one call: those under way, and those that ended and were not handed out yet."""

    def __init__(
        self, rows: Iterable[ClientRequest | TokenmillError], max_running: int, report: Report | None = None
    ) -> None:
        """`rows`: what to ask, or why a row can't be asked. `max_running`: sequences that are computed together."""
        self.under_way: dict[str, OfflineRow] = {}
        self._rows = enumerate(rows)
        self._has_more = True
        self._window = max(2 * max_running, MIN_WINDOW)
        self._ended: list[OfflineRow] = []
        self._num_ended = 0
        self._num_failed = 0
        self._report = report

    @property
    def is_over(self) -> bool:
        return not (self._has_more or self.under_way or self._ended)

    def read(self) -> list[OfflineRow]:
        """Read the next rows, as many as there is room for."""
        room = min(self._window - len(self.under_way), ADDED_PER_STEP)
        until = time.monotonic() + READING_S
        found: list[OfflineRow] = []
        while self._has_more and len(found) < room and (time.monotonic() < until or not (found or self.under_way)):
            number, asked = next(self._rows, (-1, None))
            if asked is None:
                self._has_more = False
            elif isinstance(asked, TokenmillError):
                self.end(OfflineRow(number, None, error=asked))
            else:
                found.append(OfflineRow(number, asked))
        return found

    def begin(self, row: OfflineRow, request: Request) -> None:
        num_choices = 1 if row.asked is None or isinstance(row.asked, EmbedRequest) else row.asked.params.n
        row.request = request
        row.folds = [EventFold() for _ in range(num_choices)]
        self.under_way[request.request_id] = row

    def receive(self, output: SequenceOutput, arrived: Sequence[Arrived], is_over: bool) -> None:
        row = self.under_way[output.request_id]
        for one in arrived:
            row.add(one)
        if is_over:
            self.end(self.under_way.pop(output.request_id))
        if self._report is not None:
            self._report(done=self._num_ended, failed=self._num_failed, new_tokens=len(output.token_ids))

    def end(self, row: OfflineRow) -> None:
        self._ended.append(row)
        self._num_ended += 1
        self._num_failed += row.error is not None

    def pop_ended(self) -> list[OfflineRow]:
        ended, self._ended = self._ended, []
        return ended


# ── Ctrl-C ─────────────────────────────────────────────────────────────────────────────────────────────


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a call. `outputs` has what was read up to then, in order: rows that were finished, and others, whose
    `error` says that they were not."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        finished = sum(output.error != INTERRUPTED for output in outputs)
        super().__init__(f"{finished} of {len(outputs)} rows were finished; they are in this exception's outputs")
        self.outputs = outputs


class NotedInterrupt:
    """A press of Ctrl-C, remembered; a second one no longer waits for the end of a step."""

    def __init__(self) -> None:
        self.was_pressed = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.was_pressed:
            raise KeyboardInterrupt
        self.was_pressed = True

    def raise_if_pressed(self) -> None:
        if self.was_pressed:
            raise KeyboardInterrupt


@contextmanager
def interrupt_noted() -> Iterator[NotedInterrupt]:
    """Inside, Ctrl-C is only noted. A program's own way to handle it is left alone, and so is a thread that gets no
    signals."""
    interrupt = NotedInterrupt()
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ── progress ───────────────────────────────────────────────────────────────────────────────────────────


class Report(Protocol):
    def __call__(self, *, done: int, failed: int, new_tokens: int) -> None: ...


def log_line(line: str) -> None:
    log.info("%s", line)


@contextmanager
def progress_over(
    total: int | None,
    *,
    enabled: bool,
    patience_s: float = 1.0,
    done_before: int = 0,
    write: Callable[[str], None] = log_line,
) -> Iterator[Report | None]:
    """Show progress over `total` answers (None: not known), unless the work takes under a second. `done_before`: those
    of an earlier run. `write`: where lines go if there is no terminal."""
    if not enabled:
        yield None
        return
    bar = LateBar(total, patience_s, done_before) if sys.stderr.isatty() else ProgressLines(total, write, done_before)
    try:
        yield bar.report
    finally:
        bar.close()


class LateBar:
    """A progress bar that appears only once the work has taken `patience_s`."""

    def __init__(self, total: int | None, patience_s: float, done_before: int = 0) -> None:
        self._total = total
        self._done_before = done_before
        self._started = time.monotonic()
        self._patience_s = patience_s
        self._num_tokens = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def report(self, *, done: int, failed: int, new_tokens: int) -> None:
        self._num_tokens += new_tokens
        elapsed = time.monotonic() - self._started
        if elapsed < self._patience_s:
            return
        if self._bar is None:
            self._bar, self._task = shown_bar(self._total)
        assert self._task is not None
        speed = f"{self._num_tokens / elapsed:,.0f} tokens/s" + (f", {failed} failed" if failed else "")
        self._bar.update(self._task, completed=self._done_before + done, speed=speed)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def shown_bar(total: int | None) -> tuple[Progress, TaskID]:
    # most runs end before a bar is worth the import
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task("answers", total=total, speed="")
    bar.start()
    return bar, task


class ProgressLines:
    """A line every few seconds."""

    def __init__(self, total: int | None, write: Callable[[str], None], done_before: int = 0) -> None:
        self._of = "" if total is None else f" of {total:,}"
        self._write = write
        self._done_before = done_before
        self._started = self._last_line = time.monotonic()
        self._num_tokens = 0

    def report(self, *, done: int, failed: int, new_tokens: int) -> None:
        self._num_tokens += new_tokens
        now = time.monotonic()
        if now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        speed = self._num_tokens / (now - self._started)
        failures = f", {failed:,} failed" if failed else ""
        self._write(f"answered {self._done_before + done:,}{self._of}{failures}, {speed:,.0f} tokens/s")

    def close(self) -> None:
        """Nothing is left to write: who asked says what came of it."""
