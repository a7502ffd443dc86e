"""How far a long piece of work is: a bar on a terminal, a line every few seconds in a log elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tokenmill.observe.log import get_log

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

log = get_log("engine")
LINE_EVERY_S = 5.0


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
    """Show progress over `total` answers (None: nobody knows how many), unless the work takes under a second.
    `done_before`: those of an earlier run. `write`: where lines go if there is no terminal."""
    if not enabled:
        yield None
        return
    bar = LateBar(total, patience_s, done_before) if sys.stderr.isatty() else ProgressLines(total, write, done_before)
    try:
        yield bar.report
    finally:
        bar.close()


class LateBar:
    """A bar that appears only once the work has taken `patience_s`."""

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
