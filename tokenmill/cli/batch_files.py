"""The two files of `tokenmill batch`: the rows, and the file to which answers are appended.

Each answer has the number of its row, so the file of answers records the progress, and a killed run can be resumed.
An answer is a single write at the end of the file, synced to disk within a second; an incomplete last line after a
kill is removed. Fingerprints of the answered rows, four bytes each, detect that the file of rows was changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from tokenmill.errors import InvalidConfig, InvalidRequest

SYNC_S = 1.0
UNCHECKED = 1  # the fingerprint of a line that could not be read
BLOCK_BYTES = 1 << 20


def num_lines(path: Path) -> int:
    """Count the lines of a file, including blank ones at its end."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def fingerprint(row: dict[str, Any]) -> int:
    """Return a short hash of a row: of its custom_id for a request, of its whole content for other rows."""
    custom_id = row.get("custom_id") if is_request(row) else None
    text = custom_id.encode() if isinstance(custom_id, str) else orjson.dumps(row)
    return zlib.crc32(text) << 1 & 0xFFFFFFFF | UNCHECKED


def is_request(row: dict[str, Any]) -> bool:
    """Return whether a row is a request of OpenAI's Batch API."""
    return "custom_id" in row and ("url" in row or "body" in row)


class AnswerFile:
    """The file of answers, locked while it is open, so that no second run answers the same rows."""

    def __init__(self, path: Path, *, retry_failed: bool = False) -> None:
        """`retry_failed`: remove answers that are errors, so that their rows are retried."""
        self.path = path
        self.num_done = 0
        self.num_failed = 0
        self._prints = array("I")  # by line number, from 1; 0: not answered yet
        self._descriptor = opened(path)
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: os.close(self._descriptor))
            kept = self._read_all(retry_failed)
            if kept is not None:
                self._replace(kept)
            undo.pop_all()
        self._synced = time.monotonic()

    def print_of(self, line: int) -> int:
        """Return the fingerprint of an answered line; 0 if it is not answered yet."""
        return self._prints[line] if line < len(self._prints) else 0

    def append(self, answer: bytes) -> None:
        """Append an answer and its line end."""
        data = memoryview(answer + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]
        now = time.monotonic()
        if now - self._synced > SYNC_S:
            os.fsync(self._descriptor)
            self._synced = now

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    # ── answers of earlier runs ───────────────────────────────────────────────────────────────────

    def _read_all(self, retry_failed: bool) -> Path | None:
        """Read which lines are answered; return a copy without failed answers if those are to be retried."""
        whole, has_failed = 0, False
        for data in self._lines():
            if not data.endswith(b"\n"):
                break  # cut off by a kill
            whole += len(data)
            line, is_failed = self._note(data, forget_failed=retry_failed)
            has_failed = has_failed or is_failed
            assert line
        os.ftruncate(self._descriptor, whole)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        return self._without_failed() if retry_failed and has_failed else None

    def _lines(self) -> Iterator[bytes]:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with open(self._descriptor, "rb", closefd=False) as file:
            yield from file

    def _note(self, data: bytes, *, forget_failed: bool) -> tuple[int, bool]:
        answer = self._parsed(data)
        is_failed = failed(answer)
        if not (is_failed and forget_failed):
            self._mark(answer["line"], print_of_answer(answer))
            self.num_done += 1
            self.num_failed += is_failed
        return answer["line"], is_failed

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            answer = orjson.loads(data)
            if isinstance(answer, dict) and type(answer.get("line")) is int and answer["line"] > 0:
                return answer
        except orjson.JSONDecodeError:
            pass
        raise InvalidConfig(f"{self.path} has lines that `tokenmill batch` did not write", hint="use another file")

    def _mark(self, line: int, value: int) -> None:
        if line >= len(self._prints):
            self._prints.extend([0] * (line + 1024 - len(self._prints)))
        if self._prints[line]:
            raise InvalidConfig(f"{self.path} answers line {line} twice", hint="use another file")
        self._prints[line] = value

    def _without_failed(self) -> Path:
        kept = self.path.with_name(f"{self.path.name}.retry")
        with kept.open("wb") as file:
            for data in self._lines():
                if not failed(self._parsed(data)):
                    file.write(data)
        return kept

    def _replace(self, kept: Path) -> None:
        descriptor = opened(kept)
        kept.replace(self.path)
        os.close(self._descriptor)
        self._descriptor = descriptor


def opened(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InvalidConfig(f"another run is writing {path}", hint="wait until it ends, or use another file") from None
    return descriptor


def failed(answer: dict[str, Any]) -> bool:
    response = answer.get("response") or {}
    return answer.get("error") is not None or response.get("status_code", 200) >= 400


def print_of_answer(answer: dict[str, Any]) -> int:
    if "input" in answer:
        return UNCHECKED if answer["input"] is None else fingerprint(answer["input"])
    return UNCHECKED if answer.get("custom_id") is None else fingerprint({**answer, "url": ""})


def require_same_row(line: int, row: dict[str, Any] | None, seen: int, path: Path) -> None:
    """Refuse a file of answers that belong to other rows."""
    if seen != UNCHECKED and (row is None or fingerprint(row) != seen):
        raise InvalidRequest(f"line {line} of {path} answers a different row than line {line} of the input")
