"""The optional log of requests with their texts: prompts, answers, token counts and times.

    {"timestamp": 1800000000000, "id": …, "path": …, "messages": […], "answers": […], "input_length": 12,
     "output_length": 64, "status": 200, …}

The files hold one JSON object per line, for a random share of the requests, with personal data redacted unless that is
turned off; only their owner can read them. The lines have the fields of a Mooncake trace and the messages, so
`tokenmill bench serve --trace requests.jsonl` can replay the same requests at the same times. A file is rotated at
`ROTATE_BYTES`, and the oldest files are deleted beyond `--request-log-bytes`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import orjson

from tokenmill.config.server import ServerConfig
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.logged_texts import LoggedTexts
from tokenmill.server.write_behind import WriteBehind
from tokenmill.text.redaction import Redactor

FILE_NAME = "requests.jsonl"
ROTATE_BYTES = 64 << 20
REDACTED_FIELDS = ("messages", "tools", "prompts", "params", "answers", "user")  # written by clients or the model
MAX_UNWRITTEN = 1000  # lines kept in memory while writing fails; each may be as large as a request


class RequestLog:
    """Writes a share of the server's requests to files; does nothing without a configured folder."""

    def __init__(self, config: ServerConfig) -> None:
        self._folder = config.request_log
        self._share = config.request_log_share
        self._redacts = config.request_log_redact
        self._max_bytes = config.request_log_bytes
        self._rows: WriteBehind[dict[str, Any]] = WriteBehind("lines of the request log", self._write, MAX_UNWRITTEN)
        self._writing: asyncio.Task[None] | None = None

    def begin(self, requests: Sequence[ClientRequest]) -> LoggedTexts | None:
        """Return the object that collects the texts of a new request; None if it is not logged."""
        if self._folder is None or not requests or random.random() >= self._share:
            return None
        return LoggedTexts(requests)

    def finish(self, record: RequestRecord) -> None:
        """Log a request that has ended, if it was chosen at its start."""
        if record.texts is not None:
            self._rows.add(line_of(record, record.texts))

    async def start(self) -> None:
        if self._folder is not None:
            self._writing = asyncio.create_task(self._rows.run())

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        await self._rows.flush()

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Redact and append lines. Runs in a thread."""
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / FILE_NAME
        lines = b"".join(orjson.dumps(redacted(row) if self._redacts else row) + b"\n" for row in rows)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
            file.write(lines)
        if path.stat().st_size > ROTATE_BYTES:
            path.rename(path.with_name(f"requests.{time.time_ns()}.jsonl"))
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        assert self._folder is not None
        rotated = sorted(self._folder.glob("requests.*.jsonl"))
        sizes = {path: path.stat().st_size for path in rotated}
        while rotated and sum(sizes[path] for path in rotated) + ROTATE_BYTES > self._max_bytes:
            rotated.pop(0).unlink()


def line_of(record: RequestRecord, texts: LoggedTexts) -> dict[str, Any]:
    usage = record.usage
    return {
        "timestamp": round((time.time() - record.elapsed_s()) * 1000),
        "id": record.request_id,
        "key": record.key_id,
        "user": record.user,
        "path": record.path,
        "model": record.model,
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error_code,
        "input_length": usage.prompt_tokens if usage else 0,
        "output_length": usage.completion_tokens if usage else 0,
        "cached_tokens": usage.cached_tokens if usage else 0,
        "first_token_s": record.first_token_s,
        "total_s": record.elapsed_s(),
        **texts.as_fields(),
    }


def redacted(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the personal data in REDACTED_FIELDS redacted."""
    redactor = Redactor()
    return {name: redactor.redact_all(value) if name in REDACTED_FIELDS else value for name, value in line.items()}
