"""Rows that belong to a key: finding them, and letting the oldest go.

Another key's row is not there (404), exactly as one that never existed. Rows expire, and each table is bounded in rows
and in bytes: what was not used for longest goes first, but never what a server works on.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.errors import Overloaded, TokenmillError
from tokenmill.server.body import shown

Table = Literal["responses", "conversations", "files", "batches"]
SLACK = 32  # a full table gives up one part in so many at once


class UnknownRow(TokenmillError):
    """There is no such response, conversation, file or batch, or it belongs to another key."""

    code = "not_found"
    http_status = 404


def find(connection: sqlite3.Connection, table: Table, row_id: str, owner: str) -> sqlite3.Row | None:
    """Return a row of an owner that has not expired, or None."""
    query = f"SELECT * FROM {table} WHERE id = ? AND owner = ? AND (expires_s IS NULL OR expires_s > ?)"
    row: sqlite3.Row | None = connection.execute(query, (row_id, owner, time.time())).fetchone()
    return row


def get(connection: sqlite3.Connection, table: Table, row_id: str, owner: str, param: str = "id") -> sqlite3.Row:
    """A row of an owner; an error (404) that blames `param` if there is none."""
    row = find(connection, table, row_id, owner)
    if row is None:
        raise unknown(table, row_id, param)
    return row


def unknown(table: Table, row_id: str, param: str = "id") -> UnknownRow:
    kind = {"responses": "response", "conversations": "conversation", "files": "file", "batches": "batch"}[table]
    return UnknownRow(f"there is no {kind} {shown(row_id)}", param=param)


@dataclass
class Bound:
    """The limits on a table's size."""

    table: Table
    max_rows: int
    max_bytes: int  # the sum of `num_bytes`
    may_go: str = "1"  # SQL: true for rows that may be given up
    _rows_since: int = field(default=1 << 62, init=False)  # since the table was last looked at; at first: never
    _bytes_since: int = field(default=0, init=False)

    def make_room(self, connection: sqlite3.Connection, num_bytes: int) -> list[str]:
        """Delete what has expired, and as much as it takes for one more row to fit; return the ids that are gone. To be
        called before a row is inserted, in the same transaction."""
        self._rows_since += 1
        self._bytes_since += num_bytes
        if self._rows_since * SLACK <= self.max_rows and self._bytes_since * SLACK <= self.max_bytes:
            return []
        gone = self.expire(connection)
        rows, used = connection.execute(f"SELECT count(*), total(num_bytes) FROM {self.table}").fetchone()
        spare_rows = max(1, self.max_rows // SLACK)
        spare_bytes = max(num_bytes, self.max_bytes // SLACK)
        if rows + spare_rows > self.max_rows or used + spare_bytes > self.max_bytes:
            gone += self._give_up(connection, rows - self.max_rows + spare_rows, used - self.max_bytes + spare_bytes)
        self._rows_since, self._bytes_since = 1, num_bytes
        return gone

    def expire(self, connection: sqlite3.Connection) -> list[str]:
        """Delete the rows whose time is over."""
        where = f"expires_s <= ? AND {self.may_go}"
        gone = connection.execute(f"DELETE FROM {self.table} WHERE {where} RETURNING id", (time.time(),)).fetchall()
        if gone:
            shrink(connection)
        return [row["id"] for row in gone]

    def _give_up(self, connection: sqlite3.Connection, num_rows: int, num_bytes: float) -> list[str]:
        gone: list[str] = []
        oldest = f"SELECT id, num_bytes FROM {self.table} WHERE {self.may_go} ORDER BY used_s, id"
        for row in connection.execute(oldest):
            if len(gone) >= num_rows and num_bytes <= 0:
                break
            gone.append(row["id"])
            num_bytes -= row["num_bytes"]
        if len(gone) < num_rows or num_bytes > 0:
            raise Overloaded(f"there is no room for more {self.table}: all of them are at work", retry_after_s=60.0)
        connection.executemany(f"DELETE FROM {self.table} WHERE id = ?", ((row_id,) for row_id in gone))
        shrink(connection)
        return gone


def shrink(connection: sqlite3.Connection) -> None:
    """Give the pages of deleted rows back to the disk."""
    connection.execute("PRAGMA incremental_vacuum").fetchall()  # each step frees one page
