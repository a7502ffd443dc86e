"""Rows that belong to an API key: lookup, expiry, and limits on the size of a table.

For another key a row does not exist (404), as if it had never been created. Rows expire, and each table is limited in
rows and in bytes: the key that has most of a full table loses its least recently used rows, so a key that fills a table
loses its own. Rows that a server works on stay.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Literal

from tokenmill.errors import Overloaded, TokenmillError
from tokenmill.server.body import shown

Table = Literal["responses", "conversations", "files", "batches"]
ROOM_DIVISOR = 32  # a full table deletes 1/32 of its limit at a time


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
    """Return a row of an owner; UnknownRow (404) with the field `param` if there is none."""
    row = find(connection, table, row_id, owner)
    if row is None:
        raise unknown(table, row_id, param)
    return row


def unknown(table: Table, row_id: str, param: str = "id") -> UnknownRow:
    kind = {"responses": "response", "conversations": "conversation", "files": "file", "batches": "batch"}[table]
    return UnknownRow(f"there is no {kind} {shown(row_id)}", param=param)


@dataclass
class Bound:
    """The limits on a table's size, and their enforcement."""

    table: Table
    max_rows: int
    max_bytes: int  # the sum of `num_bytes`
    deletable: str = "1"  # SQL condition: rows that may be deleted
    _rows_since: int = field(default=1 << 62, init=False)  # inserted since the last check; a large number at first
    _bytes_since: int = field(default=0, init=False)

    def make_room(self, connection: sqlite3.Connection, num_bytes: int) -> list[str]:
        """Delete expired rows, and as many others as necessary for one more row; return the deleted ids. Call this
        before inserting a row, in the same transaction."""
        self._rows_since += 1
        self._bytes_since += num_bytes
        if self._rows_since * ROOM_DIVISOR <= self.max_rows and self._bytes_since * ROOM_DIVISOR <= self.max_bytes:
            return []
        gone = self.expire(connection)
        rows, used = connection.execute(f"SELECT count(*), total(num_bytes) FROM {self.table}").fetchone()
        spare_rows = max(1, self.max_rows // ROOM_DIVISOR)
        spare_bytes = max(num_bytes, self.max_bytes // ROOM_DIVISOR)
        if rows + spare_rows > self.max_rows or used + spare_bytes > self.max_bytes:
            gone += self._give_up(connection, rows - self.max_rows + spare_rows, used - self.max_bytes + spare_bytes)
        self._rows_since, self._bytes_since = 1, num_bytes
        return gone

    def expire(self, connection: sqlite3.Connection) -> list[str]:
        """Delete the expired rows; return their ids."""
        where = f"expires_s <= ? AND {self.deletable}"
        gone = connection.execute(f"DELETE FROM {self.table} WHERE {where} RETURNING id", (time.time(),)).fetchall()
        if gone:
            shrink(connection)
        return [row["id"] for row in gone]

    def _give_up(self, connection: sqlite3.Connection, num_rows: int, num_bytes: float) -> list[str]:
        gone: list[str] = []
        shares = f"SELECT owner, count(*) AS num_rows, total(num_bytes) AS num_bytes FROM {self.table} GROUP BY owner"
        largest = [(-self._part(row["num_rows"], row["num_bytes"]), row["owner"]) for row in connection.execute(shares)]
        heapify(largest)
        oldest = f"SELECT id, num_bytes FROM {self.table} WHERE owner = ? AND {self.deletable} ORDER BY used_s, id"
        rows: dict[str, Iterator[sqlite3.Row]] = {}
        while largest and (len(gone) < num_rows or num_bytes > 0):
            part, owner = largest[0]
            if owner not in rows:
                rows[owner] = iter(connection.execute(oldest, (owner,)))
            if (row := next(rows[owner], None)) is None:
                heappop(largest)
                continue
            gone.append(row["id"])
            num_bytes -= row["num_bytes"]
            heapreplace(largest, (part + self._part(1, row["num_bytes"]), owner))
        if len(gone) < num_rows or num_bytes > 0:
            raise Overloaded(f"there is no room for more {self.table}: all of them are running", retry_after_s=60.0)
        connection.executemany(f"DELETE FROM {self.table} WHERE id = ?", ((row_id,) for row_id in gone))
        shrink(connection)
        return gone

    def _part(self, num_rows: int, num_bytes: float) -> float:
        """Return how much of the limits some rows use, as a sum of the shares of rows and of bytes."""
        return num_rows / max(1, self.max_rows) + num_bytes / max(1, self.max_bytes)


def shrink(connection: sqlite3.Connection) -> None:
    """Return the pages of deleted rows to the file system."""
    connection.execute("PRAGMA incremental_vacuum").fetchall()  # each step frees one page
