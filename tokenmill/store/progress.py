"""How a pull tells what it is doing. The store draws nothing: the command line passes something that draws."""

from __future__ import annotations

from typing import Protocol


class PullProgress(Protocol):
    def note(self, line: str) -> None:
        """One line worth reading: a source that could not be used, a download that another process is doing."""

    def begin(self, file: str, total_bytes: int | None, done_bytes: int) -> None:
        """A file starts (or goes on, from `done_bytes`)."""

    def advance(self, num_bytes: int) -> None: ...

    def end(self) -> None:
        """The file is complete, or was given up."""


class Silent:
    """For those who don't want to know."""

    def note(self, line: str) -> None: ...

    def begin(self, file: str, total_bytes: int | None, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def end(self) -> None: ...
