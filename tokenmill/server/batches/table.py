"""Batches in the state file: their life, and what came of their lines.

    validating ─► in_progress ─► finalizing ─► completed
         │             ├─► (too late) ────────► expired
         │             └─► cancelling ────────► cancelled
         └─► failed

A line that has ended is a row of `batch_lines`, which has each line once; a line without a row is still to be answered.
So a batch goes on where it was, whatever ended the server. The functions here run in the database's thread.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from tokenmill.engine.request_ids import new_id
from tokenmill.server.state.rows import Bound, get
from tokenmill.types import Usage

Outcome = Literal["succeeded", "errored", "canceled", "expired"]
OPEN = "('validating', 'in_progress', 'cancelling', 'finalizing')"
MAX_BATCHES = 10_000
RESULTS_AT_ONCE = 500  # lines, read from the state file
KEPT_S = 30 * 86_400.0  # a batch can be asked for so long


@dataclass(frozen=True)
class EndedLine:
    """A line and its result."""

    number: int
    custom_id: str
    outcome: Outcome
    result: bytes  # JSON as the batch's dialect writes it
    usage: Usage | None = None


@dataclass(frozen=True)
class NewBatch:
    """A batch as a client asks for it."""

    owner: str
    dialect: str
    endpoint: str
    input: str
    life_s: float  # what is not answered by then expires
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
            batch_id, batch.owner, now, now, now + batch.life_s + KEPT_S, batch.dialect, batch.endpoint, batch.input,
            batch.status, server, now + batch.life_s, batch.model, batch.num_lines,
            orjson.dumps(facts), batch.num_bytes,
        ),
    )  # fmt: skip
    return get(connection, "batches", batch_id, batch.owner)


def find_batch(connection: sqlite3.Connection, owner: str, dialect: str, batch_id: str) -> sqlite3.Row:
    """A batch of an owner, made in this dialect; an error (404) if there is none."""
    row = get(connection, "batches", batch_id, owner)
    return row if row["dialect"] == dialect else get(connection, "batches", "", owner)


def list_batches(connection: sqlite3.Connection, owner: str, dialect: str) -> list[sqlite3.Row]:
    """The batches of an owner, the newest first."""
    query = (
        "SELECT * FROM batches WHERE owner = ? AND dialect = ? AND expires_s > ? ORDER BY created_s DESC, rowid DESC"
    )
    return connection.execute(query, (owner, dialect, time.time())).fetchall()


def reload(connection: sqlite3.Connection, batch_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return row


def facts_of(row: sqlite3.Row) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(row["facts"])
    return found


def move(connection: sqlite3.Connection, batch_id: str, status: str, **facts: Any) -> None:
    """Bring a batch to a status, and remember when. Other columns may be given by name."""
    row = reload(connection, batch_id)
    if row is None:
        return
    columns = {name: facts.pop(name) for name in list(facts) if name in row.keys()}  # noqa: SIM118  # a Row
    changed = {**facts_of(row), **facts, f"{status}_s": time.time()}
    columns |= {"status": status, "facts": orjson.dumps(changed)}
    assignments = ", ".join(f"{name} = ?" for name in columns)
    connection.execute(f"UPDATE batches SET {assignments} WHERE id = ?", (*columns.values(), batch_id))


def ended_lines(connection: sqlite3.Connection, batch_id: str) -> set[int]:
    """The numbers of the lines that need no answer any more."""
    rows = connection.execute("SELECT line FROM batch_lines WHERE batch = ?", (batch_id,))
    return {row["line"] for row in rows}


def add_lines(connection: sqlite3.Connection, batch_id: str, lines: Sequence[EndedLine]) -> None:
    """Keep what came of some lines; one that is there already stays as it is."""
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
    """A question for some ended lines of a batch, in order, behind a line."""

    batch_id: str
    after: int
    outcomes: Sequence[str]

    def __call__(self, connection: sqlite3.Connection) -> list[sqlite3.Row]:
        marks = ", ".join("?" for _ in self.outcomes)
        query = f"SELECT * FROM batch_lines WHERE batch = ? AND line > ? AND state IN ({marks}) ORDER BY line LIMIT ?"
        return connection.execute(query, (self.batch_id, self.after, *self.outcomes, RESULTS_AT_ONCE)).fetchall()


def abandoned(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """Return the batches that have not ended, of all servers."""
    return connection.execute(f"SELECT * FROM batches WHERE status IN {OPEN} ORDER BY created_s").fetchall()


def claim(connection: sqlite3.Connection, row: sqlite3.Row, server: str) -> bool:
    """Take over a batch that no server works on; False if another server was faster."""
    query = "UPDATE batches SET server = ? WHERE id = ? AND server IS ?"
    return connection.execute(query, (server, row["id"], row["server"])).rowcount == 1


def give_up(connection: sqlite3.Connection, batch_ids: Sequence[str]) -> None:
    """Give up batches, so that another server can take them over."""
    connection.executemany("UPDATE batches SET server = NULL WHERE id = ?", ((one,) for one in batch_ids))
