"""One-line structured logs: `time level event key=value …`, to stderr. Never the text of a prompt or an answer.

    2026-01-31T12:00:00.123Z info request id=chatcmpl-1 prompt_tokens=12 finish=stop total_ms=840

All lines are written with `event(log, "request", id=…, …)`: the values are numbers, ids and words; anything with
spaces, quotes or control characters is quoted, so that client input can't break a line.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

MAX_VALUE_LENGTH = 400
LIBRARIES = ("uvicorn", "asyncio", "opentelemetry")
Value = str | int | float | bool | None


def get_log(package: str) -> logging.Logger:
    """Return the logger of one of tokenmill's packages."""
    return logging.getLogger(f"tokenmill.{package}")


def event(log: logging.Logger, name: str, *, level: int = logging.INFO, **fields: Value) -> None:
    """Log one event as one line."""
    if log.isEnabledFor(level):
        log.log(level, "%s", " ".join([name, *(f"{key}={shown(value)}" for key, value in fields.items())]))


def shown(value: Value) -> str:
    """Format a value on one line: numbers short, strings with special characters quoted, long ones truncated."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    text = str(value)[:MAX_VALUE_LENGTH]
    plain = text.isprintable() and text.isascii() and not set(text) & set(' "=\\')
    return text if plain and text else json.dumps(text)


def detail_level() -> int:
    """Return the log level of details of a start: debug on a terminal, where a few lines say what runs where, and info
    in the logs of a service."""
    return logging.DEBUG if sys.stderr.isatty() else logging.INFO


class LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = f"{moment} {record.levelname.lower()} {_one_line(record.getMessage())}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


def configure_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr by default), including warnings of the server libraries in the same format.

    Called once at the start of a program, never by an import.
    """
    writer = logging.StreamHandler(stream or sys.stderr)
    writer.setFormatter(LineFormatter())
    for name in ("tokenmill", *LIBRARIES):
        root = logging.getLogger(name)
        root.setLevel(max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING if name in LIBRARIES else 0))
        root.propagate = False
        for old in list(root.handlers):
            root.removeHandler(old)
        root.addHandler(writer)


def _one_line(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
