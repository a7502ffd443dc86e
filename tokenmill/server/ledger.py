"""The ledger: one row for every generation, however it ended, in the server's state file.

A row says who asked (key, and the user that the client named), what for (model), how it ended, and what it took: tokens
of the prompt, cached ones among them, tokens of the answer, thinking among them, times, and seconds of the device: the
request's part of each step it was in (none where the answer was known). Tokens of requests that were aborted or failed
count; no text is kept. The rows come from the same records as the metrics, so both add up to the same sums. They are
written twice a second, all that came meanwhile in one transaction, and kept for 400 days.
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
MAX_UNWRITTEN = 100_000  # rows, while the disk is full
GROUPS = {  # how rows can be grouped, as SQL
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
    """Writes rows, and adds them up."""

    def __init__(self, database: Database, *, is_on: bool) -> None:
        self._database = database
        self._is_on = is_on
        self._rows: list[tuple[Any, ...]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_closing = False

    def add(self, record: RequestRecord) -> None:
        """Keep what a generation took. Called once for each, when it has ended."""
        if not self._is_on or not record.is_generation:
            return
        if len(self._rows) < MAX_UNWRITTEN:
            self._rows.append(row_of(record))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_later())

    async def _write_later(self) -> None:
        await asyncio.sleep(0.0 if self._is_closing else WRITE_S)
        await self.write()

    async def write(self) -> None:
        """Write all rows that have come; what can't be written is tried again with the next ones."""
        rows, self._rows = self._rows, []

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany(f"INSERT INTO usage VALUES ({','.join('?' * len(rows[0]))})", rows)
            connection.execute("DELETE FROM usage WHERE time_s < ?", (time.time() - KEEP_S,))

        if not rows:
            return
        try:
            await self._database.write(insert)
        except TokenmillError as problem:
            log.error("%d rows of the ledger could not be written yet: %s", len(rows), problem)
            self._rows = rows + self._rows

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Write what has come; of requests that end later the rows are written at once."""
        self._is_closing = True
        if self._writing is not None:
            self._writing.cancel()
        await self.write()

    async def usage(self, groups: Sequence[str], since_s: float, key: str | None) -> list[dict[str, Any]]:
        """Sums by groups since a moment; of one key, or of all."""
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
    """Requests and tokens by groups; names of groups are checked (`groups_of`), values are never part of the SQL."""
    names = [f'{GROUPS[group]} AS "{group}"' for group in groups]
    sums = ["count(*) AS requests", *(f"coalesce(sum({name}), 0) AS {name}" for name in SUMS), DEVICE_SUM]
    grouped = f"GROUP BY {', '.join(GROUPS[group] for group in groups)}" if groups else ""
    order = f"ORDER BY {', '.join(str(number + 1) for number in range(len(groups)))}" if groups else ""
    where, values = "time_s >= ?", [since_s, *([] if key is None else [key])]
    where += "" if key is None else " AND key = ?"
    rows = connection.execute(f"SELECT {', '.join([*names, *sums])} FROM usage WHERE {where} {grouped} {order}", values)
    return [dict(row) for row in rows]


def groups_of(text: str) -> list[str]:
    """The groups in a list with commas; InvalidRequest for one that there is not."""
    groups = [group.strip() for group in text.split(",") if group.strip()]
    for group in groups:
        if group not in GROUPS:
            raise InvalidRequest(f"group_by takes {', '.join(GROUPS)}, got {group[:40]!r}", param="group_by")
    return list(dict.fromkeys(groups))


def moment_of(since: str, now_s: float) -> float:
    """Seconds since the epoch of `7d`, `12h` ago, or of a date."""
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
