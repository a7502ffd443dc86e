"""Batches in the state file: their status, and the results of their lines.

    validating ─► in_progress ─► finalizing ─► completed
         │             ├─► (too late) ────────► expired
         │             └─► cancelling ────────► cancelled
         └─► failed

A line that has ended is a row of `batch_lines`, which has each line at most once; a line without a row must still be
processed. So a batch continues where it was, however the server ended. These functions run in the database's thread.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from tokenmill.server.request_ids import new_id
from tokenmill.server.state.rows import Bound, get, unknown
from tokenmill.types import Usage

Outcome = Literal["succeeded", "errored", "canceled", "expired"]
OPEN = "('validating', 'in_progress', 'cancelling', 'finalizing')"
MAX_BATCHES = 10_000
RESULT_CHUNK = 500  # lines read from the state file at a time
RETENTION_S = 30 * 86_400.0  # how long a batch is kept after its completion window


@dataclass(frozen=True)
class EndedLine:
    """A line that has ended, with its result."""

    number: int
    custom_id: str
    outcome: Outcome
    result: bytes  # JSON as the batch's dialect writes it
    usage: Usage | None = None


@dataclass(frozen=True)
class NewBatch:
    """A batch that a client creates."""

    owner: str
    dialect: str
    endpoint: str
    input: str
    lifetime_s: float  # lines that were not processed by then expire
    status: Literal["validating", "in_progress"] = "validating"
    model: str | None = None
    num_lines: int = 0
    num_bytes: int = 0
    prefix: str = "batch_"
    facts: dict[str, Any] = field(default_factory=dict)


def batches_bound(max_bytes: int) -> Bound:
    return Bound("batches", MAX_BATCHES, max_bytes, f"status NOT IN {OPEN}")


def add_batch(connection: sqlite3.Connection, batch: NewBatch, bound: Bound, server: str) -> sqlite3.Row:
    bound.make_room(connection, batch.num_bytes)
    batch_id, now = new_id(batch.prefix), time.time()
    facts = {**batch.facts, f"{batch.status}_s": now}
    connection.execute(
        "INSERT INTO batches (id, owner, created_s, used_s, expires_s, dialect, endpoint, input, status, server, due_s,"
        " model, num_lines, facts, num_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            batch_id, batch.owner, now, now, now + batch.lifetime_s + RETENTION_S, batch.dialect, batch.endpoint,
            batch.input, batch.status, server, now + batch.lifetime_s, batch.model, batch.num_lines,
            orjson.dumps(facts), batch.num_bytes,
        ),
    )  # fmt: skip
    return get(connection, "batches", batch_id, batch.owner)


def find_batch(connection: sqlite3.Connection, owner: str, dialect: str, batch_id: str) -> sqlite3.Row:
    """Return an owner's batch that was created in this dialect; UnknownRow (404) if there is none."""
    row = get(connection, "batches", batch_id, owner)
    if row["dialect"] != dialect:
        raise unknown("batches", batch_id)
    return row


def list_batches(connection: sqlite3.Connection, owner: str, dialect: str) -> list[sqlite3.Row]:
    """Return the batches of an owner, the newest first."""
    query = (
        "SELECT * FROM batches WHERE owner = ? AND dialect = ? AND expires_s > ? ORDER BY created_s DESC, rowid DESC"
    )
    return connection.execute(query, (owner, dialect, time.time())).fetchall()


def reload(connection: sqlite3.Connection, batch_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return row


def facts_of(row: sqlite3.Row) -> dict[str, Any]:
    facts: dict[str, Any] = orjson.loads(row["facts"])
    return facts


def move(connection: sqlite3.Connection, batch_id: str, status: str, **facts: Any) -> None:
    """Set the status of a batch and the time of the change. Further arguments are columns or facts to set."""
    row = reload(connection, batch_id)
    if row is None:
        return
    columns = {name: facts.pop(name) for name in list(facts) if name in row.keys()}  # noqa: SIM118  # a Row
    changed = {**facts_of(row), **facts, f"{status}_s": time.time()}
    columns |= {"status": status, "facts": orjson.dumps(changed)}
    assignments = ", ".join(f"{name} = ?" for name in columns)
    connection.execute(f"UPDATE batches SET {assignments} WHERE id = ?", (*columns.values(), batch_id))


def ended_lines(connection: sqlite3.Connection, batch_id: str) -> set[int]:
    """Return the numbers of the lines that have ended."""
    rows = connection.execute("SELECT line FROM batch_lines WHERE batch = ?", (batch_id,))
    return {row["line"] for row in rows}


def add_lines(connection: sqlite3.Connection, batch_id: str, lines: Sequence[EndedLine]) -> None:
    """Insert the results of lines; a line that has a result already keeps it."""
    for line in lines:
        added = connection.execute(
            "INSERT OR IGNORE INTO batch_lines (batch, line, custom_id, state, result) VALUES (?, ?, ?, ?, ?)",
            (batch_id, line.number, line.custom_id, line.outcome, line.result),
        )
        if not added.rowcount:
            continue
        usage = line.usage or Usage(prompt_tokens=0, completion_tokens=0)
        connection.execute(
            f"UPDATE batches SET {line.outcome} = {line.outcome} + 1, input_tokens = input_tokens + ?,"
            " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
            " reasoning_tokens = reasoning_tokens + ?, num_bytes = num_bytes + ? WHERE id = ?",
            (
                usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens,
                len(line.result), batch_id,
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class Results:
    """A query for the next ended lines of a batch, in order, after line `after`."""

    batch_id: str
    after: int
    outcomes: Sequence[str]

    def __call__(self, connection: sqlite3.Connection) -> list[sqlite3.Row]:
        marks = ", ".join("?" for _ in self.outcomes)
        query = f"SELECT * FROM batch_lines WHERE batch = ? AND line > ? AND state IN ({marks}) ORDER BY line LIMIT ?"
        return connection.execute(query, (self.batch_id, self.after, *self.outcomes, RESULT_CHUNK)).fetchall()


def unfinished(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """Return the batches that have not ended, of all servers."""
    return connection.execute(f"SELECT * FROM batches WHERE status IN {OPEN} ORDER BY created_s").fetchall()


def claim(connection: sqlite3.Connection, row: sqlite3.Row, server: str) -> bool:
    """Take over a batch that runs on no server; return False if another server was faster."""
    query = "UPDATE batches SET server = ? WHERE id = ? AND server IS ?"
    return connection.execute(query, (server, row["id"], row["server"])).rowcount == 1


def release(connection: sqlite3.Connection, batch_ids: Sequence[str]) -> None:
    """Release batches, so that another server can take them over."""
    connection.executemany("UPDATE batches SET server = NULL WHERE id = ?", ((one,) for one in batch_ids))
