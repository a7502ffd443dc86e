"""The interface for progress reports of a pull, which the command line and the server implement."""

from __future__ import annotations

from typing import Protocol


class PullProgress(Protocol):
    def note(self, line: str) -> None:
        """Report one line of text: a source that could not be used, or a download by another process."""

    def begin(self, file: str, total_bytes: int | None, done_bytes: int, sha256: str | None = None) -> None:
        """Report the start of a file, or its resumption from `done_bytes`; `sha256` is given if known in advance."""

    def advance(self, num_bytes: int) -> None: ...

    def end(self) -> None:
        """Report that the file is complete or was abandoned."""


class Silent:
    """An implementation that discards all progress reports."""

    def note(self, line: str) -> None: ...

    def begin(self, file: str, total_bytes: int | None, done_bytes: int, sha256: str | None = None) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def end(self) -> None: ...
