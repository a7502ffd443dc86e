"""The rows of an offline call: a window of running requests over an iterable of any length.

    iterable of rows ─► at most `window` running requests ─► steps ─► finished rows, each with its number

Memory use depends on the window, not on the number of rows. A row that is invalid or fails becomes a finished row with
an error and does not affect the others. Ctrl-C takes effect between two steps, so that no step is interrupted. Progress
is shown as a bar on a terminal, otherwise as a log line every few seconds.
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

MAX_ADDED_PER_STEP = 128  # requests: 20 ms of work, so that the first step starts soon
MAX_READ_S = 0.02  # how long reading a slow iterable may delay the running requests
MIN_WINDOW = 64
INTERRUPTED = "interrupted before it was finished"
LOG_INTERVAL_S = 5.0

Arrived = Event | TokenmillError


@dataclass
class OfflineRow:
    """One row of a call: its request and its result so far."""

    number: int
    client_request: ClientRequest | None  # None: the row is invalid
    request: Request | None = None  # None: the request was refused before it ran
    folds: list[EventFold] = field(default_factory=list)
    error: TokenmillError | None = None

    def add(self, arrived: Arrived) -> None:
        if isinstance(arrived, TokenmillError):
            self.error = arrived
        else:
            self.folds[arrived.index].add(arrived)

    def output(self, error: str | None = None) -> RequestOutput:
        """Return the row's result for `LLM.generate`; a failed row keeps its text so far."""
        error = self.error.message if self.error is not None else error
        if self.request is None:
            return RequestOutput(
                "", prompt_text(self.client_request), [], [CompletionOutput(0)], error=error, number=self.number
            )
        output = request_output(self.request, prompt_text(self.client_request), self.folds, error)
        output.number = self.number
        return output

    def embedding(self) -> EmbeddingOutput:
        """Return the row's result for `LLM.embed`."""
        if self.error is not None:
            self.error.message = f"prompt {self.number}: {self.error.message}"
            raise self.error
        assert self.request is not None
        return EmbeddingOutput(
            self.request.request_id, self.request.prompt_token_ids, self.folds[0].event.embedding or []
        )


def prompt_text(client_request: ClientRequest | None) -> str | None:
    return (
        client_request.prompt
        if isinstance(client_request, PromptRequest) and isinstance(client_request.prompt, str)
        else None
    )


class OfflineRun:
    """The rows of one call: those running, and those that ended and were not returned yet."""

    def __init__(
        self, rows: Iterable[ClientRequest | TokenmillError], max_running: int, report: Report | None = None
    ) -> None:
        """`rows`: the requests, or the errors of invalid rows. `max_running`: the most sequences in one step."""
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
        """Read the next rows, as many as fit into the window."""
        num_free = min(self._window - len(self.under_way), MAX_ADDED_PER_STEP)
        until_s = time.monotonic() + MAX_READ_S
        found: list[OfflineRow] = []
        while (
            self._has_more and len(found) < num_free and (time.monotonic() < until_s or not (found or self.under_way))
        ):
            number, client_request = next(self._rows, (-1, None))
            if client_request is None:
                self._has_more = False
            elif isinstance(client_request, TokenmillError):
                self.end(OfflineRow(number, None, error=client_request))
            else:
                found.append(OfflineRow(number, client_request))
        return found

    def begin(self, row: OfflineRow, request: Request) -> None:
        num_choices = (
            1
            if row.client_request is None or isinstance(row.client_request, EmbedRequest)
            else row.client_request.params.n
        )
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
    """Ctrl-C ended a call. `outputs` has the rows read up to then, in order; the `error` of an unfinished row says that
    it was interrupted."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        finished = sum(output.error != INTERRUPTED for output in outputs)
        super().__init__(f"{finished} of {len(outputs)} rows were finished: see this exception's outputs")
        self.outputs = outputs


class NotedInterrupt:
    """Remembers that Ctrl-C was pressed; a second press interrupts the step."""

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
    """Inside, Ctrl-C is only noted. Nothing is changed if the program has its own handler, or in another thread than
    the main one, which gets no signals."""
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
    delay_s: float = 1.0,
    done_before: int = 0,
    write: Callable[[str], None] = log_line,
) -> Iterator[Report | None]:
    """Show progress over `total` answers (None: not known), unless the work takes less than `delay_s`. `done_before`:
    answers of an earlier run. `write`: gets the progress lines if there is no terminal."""
    if not enabled:
        yield None
        return
    bar = DelayedBar(total, delay_s, done_before) if sys.stderr.isatty() else ProgressLines(total, write, done_before)
    try:
        yield bar.report
    finally:
        bar.close()


class DelayedBar:
    """A progress bar that appears only once the work has taken `delay_s`."""

    def __init__(self, total: int | None, delay_s: float, done_before: int = 0) -> None:
        self._total = total
        self._done_before = done_before
        self._started = time.monotonic()
        self._delay_s = delay_s
        self._num_tokens = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def report(self, *, done: int, failed: int, new_tokens: int) -> None:
        self._num_tokens += new_tokens
        elapsed = time.monotonic() - self._started
        if elapsed < self._delay_s:
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
    # Imported here because most runs end before a bar is shown.
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
    """A progress line every `LOG_INTERVAL_S`."""

    def __init__(self, total: int | None, write: Callable[[str], None], done_before: int = 0) -> None:
        self._of = "" if total is None else f" of {total:,}"
        self._write = write
        self._done_before = done_before
        self._started = self._last_line = time.monotonic()
        self._num_tokens = 0

    def report(self, *, done: int, failed: int, new_tokens: int) -> None:
        self._num_tokens += new_tokens
        now = time.monotonic()
        if now - self._last_line < LOG_INTERVAL_S:
            return
        self._last_line = now
        speed = self._num_tokens / (now - self._started)
        failures = f", {failed:,} failed" if failed else ""
        self._write(f"answered {self._done_before + done:,}{self._of}{failures}, {speed:,.0f} tokens/s")

    def close(self) -> None:
        """Do nothing: the caller reports the result."""
