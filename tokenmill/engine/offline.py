"""Many requests of one program: rows are read while there is room for them, and answered as they end.

    iterable of rows ─► at most `window` requests under way ─► steps ─► answered rows, each with its number

Memory holds the window, however many rows there are. A row that can't be asked, or that fails, is an answered row with
an error: the others do not notice. Ctrl-C is heard between two steps, so that no step is left half done.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.progress import Report
from tokenmill.engine.results import CompletionOutput, EmbeddingOutput, EventFold, RequestOutput, request_output
from tokenmill.errors import TokenmillError
from tokenmill.types import EmbedRequest, Event, PromptRequest, Request, SequenceOutput

ADDED_PER_STEP = 128  # requests: 20 ms of work, so that the first step begins soon
READING_S = 0.02  # a slow iterable does not keep the rows under way waiting for longer
MIN_WINDOW = 64
INTERRUPTED = "interrupted before it was finished"

Arrived = Event | TokenmillError


@dataclass
class OfflineRow:
    """One row of a call: what it asks, and what has come of it."""

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
        """The next rows that there is room for."""
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
