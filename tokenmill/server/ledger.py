"""The usage ledger: one row for every generation, whatever its outcome, in the server's state file.

A row has the key, the end user that the client named, the model, the outcome, the tokens of the prompt (and how many
were cached) and of the answer (and how many were reasoning), times, and device seconds: the request's share of each
step it was part of (0 for an answer from the response cache). Tokens of aborted and failed requests count. No text is
stored. The rows come from the same records as the metrics, so their sums agree. They are written twice a second, all
new rows in one transaction, and kept for 400 days.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tokenmill.errors import InvalidRequest, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.state.database import Database

log = get_log("server")

WRITE_S = 0.5
KEEP_S = 400 * 86_400.0
MAX_UNWRITTEN = 100_000  # rows kept in memory while writing fails
GROUPS = {  # name in `group_by` ─► SQL expression
    "key": "key",
    "user": "user",
    "model": "model",
    "outcome": "outcome",
    "day": "date(time_s, 'unixepoch')",
    "month": "strftime('%Y-%m', time_s, 'unixepoch')",
}
SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
DEVICE_SUM = "round(coalesce(sum(device_s), 0), 3) AS device_s"
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_SPAN = re.compile(r"(\d{1,6})([mhdw])")


class Ledger:
    """Writes rows and sums them up."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows: list[tuple[Any, ...]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_failing = False
        self._clock_offset_s = time.time() - time.monotonic()  # so that a later jump of the clock expires no rows

    def add(self, record: RequestRecord) -> None:
        """Add the row of a generation that has ended. Called once for each."""
        if not record.is_generation:
            return
        if len(self._rows) < MAX_UNWRITTEN:
            self._rows.append(row_of(record))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        """Write until no rows are left, since new rows arrive meanwhile and a full disk may have room later."""
        while self._rows:
            await asyncio.sleep(0.0 if self._is_closing else WRITE_S)
            await self.write()
            if self._is_closing:
                break

    async def write(self) -> None:
        """Write all new rows; if that fails, they are tried again."""
        rows, self._rows = self._rows, []

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany(f"INSERT INTO usage VALUES ({','.join('?' * len(rows[0]))})", rows)
            connection.execute("DELETE FROM usage WHERE time_s < ?", (oldest_s,))

        if not rows:
            return
        oldest_s = min(time.time(), time.monotonic() + self._clock_offset_s) - KEEP_S
        try:
            await self._database.write(insert)  # continues if `close` cancels this task
        except TokenmillError as problem:
            if not self._is_failing:
                log.error("%d rows of the ledger could not be written and will be tried again: %s", len(rows), problem)
            self._rows = rows + self._rows
            self._is_failing = True
        else:
            if self._is_failing:
                log.info("%d rows of the ledger were written after an earlier failure", len(rows))
            self._is_failing = False

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Write all new rows. Rows of requests that end later are written without delay."""
        self._is_closing = True
        if self._writing is not None:
            self._writing.cancel()
        await self.write()

    async def usage(self, groups: Sequence[str], since_s: float, key: str | None) -> list[dict[str, Any]]:
        """Return the sums by groups since a moment, of one key or (None) of all."""
        await self.write()
        return await self._database.read(lambda connection: summed(connection, groups, since_s, key))


def row_of(record: RequestRecord) -> tuple[Any, ...]:
    usage = record.usage
    return (
        time.time(),
        record.request_id,
        record.key_id,
        record.user,
        record.model or "",
        record.path,
        record.status,
        record.outcome,
        usage.prompt_tokens if usage else 0,
        usage.cached_tokens if usage else 0,
        usage.completion_tokens if usage else 0,
        usage.reasoning_tokens if usage else 0,
        record.queue_s,
        record.first_token_s,
        record.elapsed_s(),
        usage.device_s if usage and record.cache != "hit" else 0.0,
    )


def summed(
    connection: sqlite3.Connection, groups: Sequence[str], since_s: float, key: str | None = None
) -> list[dict[str, Any]]:
    """Sum requests and tokens by groups. Group names were checked (`groups_of`); values are passed as parameters, not
    as part of the SQL."""
    names = [f'{GROUPS[group]} AS "{group}"' for group in groups]
    sums = ["count(*) AS requests", *(f"coalesce(sum({name}), 0) AS {name}" for name in SUMS), DEVICE_SUM]
    grouped = f"GROUP BY {', '.join(GROUPS[group] for group in groups)}" if groups else ""
    order = f"ORDER BY {', '.join(str(number + 1) for number in range(len(groups)))}" if groups else ""
    where, values = "time_s >= ?", [since_s, *([] if key is None else [key])]
    where += "" if key is None else " AND key = ?"
    rows = connection.execute(f"SELECT {', '.join([*names, *sums])} FROM usage WHERE {where} {grouped} {order}", values)
    return [dict(row) for row in rows]


def groups_of(text: str) -> list[str]:
    """Parse a comma-separated list of groups; InvalidRequest for an unknown one."""
    groups = [group.strip() for group in text.split(",") if group.strip()]
    for group in groups:
        if group not in GROUPS:
            raise InvalidRequest(f"group_by takes {', '.join(GROUPS)}, got {group[:40]!r}", param="group_by")
    return list(dict.fromkeys(groups))


def moment_of(since: str, now_s: float) -> float:
    """Convert `7d` or `12h` (before now) or a date to seconds since the epoch."""
    span = _SPAN.fullmatch(since)
    if span is not None:
        return now_s - int(span[1]) * UNITS_S[span[2]]
    try:
        moment = datetime.fromisoformat(since)
    except ValueError:
        raise InvalidRequest(
            f"since takes a date or a span such as 7d, 12h, 8w; got {since[:40]!r}", param="since"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
