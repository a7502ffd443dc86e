"""A progress bar for offline work that takes over a second; none when it does not, or without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Report(Protocol):
    def __call__(self, *, done: int, new_tokens: int) -> None: ...


def no_report(*, done: int, new_tokens: int) -> None:
    pass


@contextmanager
def progress_over(total: int, *, enabled: bool, patience_s: float = 1.0) -> Iterator[Report]:
    if not enabled or not sys.stderr.isatty():
        yield no_report
        return
    bar = LateBar(total, patience_s)
    try:
        yield bar.report
    finally:
        bar.close()


class LateBar:
    """A bar that appears only once the work has taken `patience_s`."""

    def __init__(self, total: int, patience_s: float) -> None:
        self._total = total
        self._started = time.monotonic()
        self._patience_s = patience_s
        self._num_tokens = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def report(self, *, done: int, new_tokens: int) -> None:
        self._num_tokens += new_tokens
        elapsed = time.monotonic() - self._started
        if elapsed < self._patience_s:
            return
        if self._bar is None:
            self._bar, self._task = shown_bar(self._total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, speed=f"{self._num_tokens / elapsed:,.0f} tokens/s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def shown_bar(total: int) -> tuple[Progress, TaskID]:
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
