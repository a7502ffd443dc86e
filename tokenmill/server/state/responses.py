"""Stored responses and conversations. All methods take a connection and run in the database's thread.

A response is stored with its own input and output items and the id of the response that it continues, so the items of
a chain are stored once. Continuing a chain counts as a use of all its responses: none expires before the newest.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import orjson

from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidRequest
from tokenmill.server.body import refuse, shown
from tokenmill.server.state import rows
from tokenmill.server.state.instance import ServerInstance
from tokenmill.server.state.rows import Bound, UnknownRow
from tokenmill.types import TokenPrefix

Object = dict[str, Any]
Side = Literal["input", "output"]
UNFINISHED = ("queued", "in_progress")
MAX_RESPONSES = 200_000
MAX_CONVERSATIONS = 50_000
MAX_CHAIN = 4096  # responses in a chain
LIFETIME_S = 30 * 86_400.0
ROW_OVERHEAD_BYTES = 512  # approximate overhead of SQLite


class ParentNotFound(InvalidRequest):
    code = "previous_response_not_found"


@dataclass
class ResponseRow:
    """A response to be stored."""

    owner: str
    response: Object
    input: Sequence[Object]
    parent: str | None = None
    conversation: str | None = None
    request: Object = field(default_factory=dict)  # the body, while it is queued in the background
    prefix: TokenPrefix | None = None
    events: Sequence[bytes] = ()  # the stream of a background response
    is_known: bool = False  # it was stored before

    @property
    def id(self) -> str:
        return str(self.response["id"])


@dataclass(frozen=True)
class Chain:
    """The conversation up to a stored response."""

    items: list[Object]
    prefix: TokenPrefix | None


class ResponseStore:
    """The tables of responses and conversations."""

    def __init__(self, config: ServerConfig, instance: ServerInstance) -> None:
        self._instance = instance
        half = config.max_state_bytes // 2
        unfinished = ", ".join(repr(status) for status in UNFINISHED)
        self._responses = Bound("responses", MAX_RESPONSES, half, f"status NOT IN ({unfinished})")
        self._conversations = Bound("conversations", MAX_CONVERSATIONS, half)

    # ── responses ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, connection: sqlite3.Connection, row: ResponseRow) -> None:
        """Insert or replace a response. When it is completed, its items are appended to its conversation."""
        status = row.response["status"]
        is_unfinished = status in UNFINISHED
        if is_unfinished:
            self._instance.enter()
        packed = {
            "request": zlib.compress(orjson.dumps(row.request)) if is_unfinished else b"",
            "body": orjson.dumps({**row.response, "output": []}),
            "prefix": None if row.prefix is None else zlib.compress(msgspec.msgpack.encode(row.prefix)),
            "events": zlib.compress(b"".join(row.events)) if row.events else None,
        }
        items = [("input", item) for item in row.input] + [("output", item) for item in row.response["output"]]
        bodies = [(side, item["id"], orjson.dumps(item)) for side, item in items]
        num_bytes = sum(len(one) for one in packed.values() if one) + ROW_OVERHEAD_BYTES
        num_bytes += sum(len(body) + ROW_OVERHEAD_BYTES for _, _, body in bodies)
        known = connection.execute("SELECT status, created_s FROM responses WHERE id = ?", (row.id,)).fetchone()
        if row.is_known and (known is None or known["status"] not in UNFINISHED):
            return  # deleted or cancelled meanwhile
        self._responses.make_room(connection, num_bytes)
        connection.execute("DELETE FROM responses WHERE id = ?", (row.id,))
        now = time.time()
        values = {
            "id": row.id,
            "owner": row.owner,
            "created_s": now if known is None else known["created_s"],
            "used_s": now,
            "expires_s": now + LIFETIME_S,
            "status": status,
            "server": self._instance.id if is_unfinished else None,
            "parent": row.parent,
            "conversation": row.conversation,
            **packed,
            "num_bytes": num_bytes,
        }
        _insert(connection, "responses", values)
        _insert_items(connection, row.id, row.owner, bodies)
        if row.parent is not None:
            self._touch(connection, row.parent, now)
        if row.conversation is not None and status == "completed":
            self.append(connection, row.conversation, row.owner, [item for _, item in items])

    def _touch(self, connection: sqlite3.Connection, response_id: str, now: float) -> None:
        connection.execute(
            "WITH RECURSIVE chain(id, parent, depth) AS ("
            "  SELECT id, parent, 0 FROM responses WHERE id = ?"
            "  UNION ALL SELECT r.id, r.parent, depth + 1 FROM responses r JOIN chain ON r.id = chain.parent"
            f"   WHERE depth < {MAX_CHAIN}"
            ") UPDATE responses SET used_s = ?, expires_s = ? WHERE id IN (SELECT id FROM chain)",
            (response_id, now, now + LIFETIME_S),
        )

    def response(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Object:
        """Return a stored response as clients see it."""
        return _response(connection, rows.get(connection, "responses", response_id, owner))

    def events(self, connection: sqlite3.Connection, response_id: str, owner: str) -> tuple[Object, list[bytes]]:
        """Return a response, and the frames of its stream if they were stored."""
        row = rows.get(connection, "responses", response_id, owner)
        data = zlib.decompress(row["events"]) if row["events"] else b""
        return _response(connection, row), [frame + b"\n\n" for frame in data.split(b"\n\n")[:-1]]

    def delete(self, connection: sqlite3.Connection, response_id: str, owner: str) -> None:
        rows.get(connection, "responses", response_id, owner)
        connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def cancel(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Object:
        """Mark a background response as cancelled; one that has ended is not changed."""
        row = rows.get(connection, "responses", response_id, owner)
        response = _response(connection, row)
        if not response["background"]:
            raise InvalidRequest("only responses with background: true can be cancelled", param="id")
        if row["status"] in UNFINISHED:
            response["status"] = "cancelled"
            self._end(connection, response)
        return response

    def input_items(self, connection: sqlite3.Connection, response_id: str, owner: str) -> list[Object]:
        rows.get(connection, "responses", response_id, owner)
        return _items(connection, response_id, "input")

    def chain(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Chain:
        """Return all items up to and including a response, oldest first."""
        newest = rows.find(connection, "responses", response_id, owner)
        if newest is None:
            raise ParentNotFound(f"there is no response {shown(response_id)}", param="previous_response_id")
        if newest["status"] in UNFINISHED:
            refuse("previous_response_id", f"names a response that is {newest['status']}: wait until it has ended")
        chain = [newest]
        while (parent := chain[-1]["parent"]) is not None:
            row = rows.find(connection, "responses", parent, owner)
            if row is None or len(chain) >= MAX_CHAIN:
                raise ParentNotFound(
                    f"the response {shown(parent)}, which {shown(chain[-1]['id'])} continues, is no longer stored",
                    param="previous_response_id",
                )
            chain.append(row)
        items = [item for row in reversed(chain) for item in _items(connection, row["id"])]
        packed = newest["prefix"]
        prefix = None if packed is None else msgspec.msgpack.decode(zlib.decompress(packed), type=TokenPrefix)
        return Chain(items, prefix)

    def referenced(self, connection: sqlite3.Connection, item_ids: Sequence[str], owner: str) -> dict[str, Object]:
        """Return items by their ids, from any response or conversation of the owner."""
        items: dict[str, Object] = {}
        for item_id in item_ids:
            query = "SELECT body FROM items WHERE id = ? AND owner = ? LIMIT 1"
            row = connection.execute(query, (item_id, owner)).fetchone()
            if row is None:
                raise UnknownRow(f"there is no item {shown(item_id)}", param="input")
            items[item_id] = orjson.loads(row["body"])
        return items

    # ── responses of servers that ended ────────────────────────────────────────────────────────────────

    def take_over_abandoned(self, connection: sqlite3.Connection) -> list[tuple[str, str, Object, Object]]:
        """Take over the queued responses of dead servers, and return them as (id, owner, request, response). Mark those
        that were in progress as failed. Delete expired responses."""
        self._responses.expire(connection)
        taken = []
        query = "SELECT * FROM responses WHERE server IS NOT NULL ORDER BY created_s"
        for row in connection.execute(query).fetchall():
            if row["status"] not in UNFINISHED or self._instance.is_alive(row["server"]):
                continue
            if row["status"] == "queued":
                self._instance.enter()
                connection.execute("UPDATE responses SET server = ? WHERE id = ?", (self._instance.id, row["id"]))
                request = orjson.loads(zlib.decompress(row["request"]))
                taken.append((row["id"], row["owner"], request, _response(connection, row)))
            else:
                self.fail(connection, _response(connection, row), "the server ended while it generated this response")
        return taken

    def release(self, connection: sqlite3.Connection, response_id: str) -> None:
        """Release a queued response whose model this server does not have, for another server."""
        connection.execute("UPDATE responses SET server = '' WHERE id = ?", (response_id,))

    def still_unfinished(self, connection: sqlite3.Connection, response_ids: Sequence[str]) -> set[str]:
        """Return which of these responses were neither cancelled nor deleted."""
        ids, statuses = (", ".join("?" * len(names)) for names in (response_ids, UNFINISHED))
        query = f"SELECT id FROM responses WHERE id IN ({ids}) AND status IN ({statuses})"
        return {row["id"] for row in connection.execute(query, (*response_ids, *UNFINISHED))}

    def fail(self, connection: sqlite3.Connection, response: Object, why: str) -> None:
        error = {"code": "server_error", "message": why}
        self._end(connection, {**response, "status": "failed", "error": error})

    def _end(self, connection: sqlite3.Connection, response: Object) -> None:
        connection.execute(
            "UPDATE responses SET status = ?, server = NULL, request = x'', body = ? WHERE id = ?",
            (response["status"], orjson.dumps({**response, "output": []}), response["id"]),
        )

    # ── conversations ──────────────────────────────────────────────────────────────────────────────────

    def create_conversation(
        self, connection: sqlite3.Connection, row_id: str, owner: str, metadata: Object, items: Sequence[Object]
    ) -> Object:
        self._conversations.make_room(connection, ROW_OVERHEAD_BYTES)
        now = time.time()
        values = {"id": row_id, "owner": owner, "created_s": now, "used_s": now, "metadata": orjson.dumps(metadata)}
        _insert(connection, "conversations", {**values, "num_bytes": ROW_OVERHEAD_BYTES})
        self.append(connection, row_id, owner, items)
        return self.conversation(connection, row_id, owner)

    def conversation(self, connection: sqlite3.Connection, row_id: str, owner: str) -> Object:
        row = rows.get(connection, "conversations", row_id, owner)
        metadata = orjson.loads(row["metadata"])
        return {"id": row_id, "object": "conversation", "created_at": int(row["created_s"]), "metadata": metadata}

    def update_conversation(self, connection: sqlite3.Connection, row_id: str, owner: str, metadata: Object) -> Object:
        rows.get(connection, "conversations", row_id, owner)
        connection.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (orjson.dumps(metadata), row_id))
        return self.conversation(connection, row_id, owner)

    def delete_conversation(self, connection: sqlite3.Connection, row_id: str, owner: str) -> None:
        rows.get(connection, "conversations", row_id, owner)
        connection.execute("DELETE FROM conversations WHERE id = ?", (row_id,))

    def conversation_items(self, connection: sqlite3.Connection, row_id: str, owner: str) -> list[Object]:
        rows.get(connection, "conversations", row_id, owner)
        return _items(connection, row_id)

    def append(self, connection: sqlite3.Connection, row_id: str, owner: str, items: Sequence[Object]) -> None:
        """Append items to a conversation; do nothing if it was deleted meanwhile."""
        if rows.find(connection, "conversations", row_id, owner) is None:
            return
        bodies: list[tuple[Side, str, bytes]] = [("input", item["id"], orjson.dumps(item)) for item in items]
        num_bytes = sum(len(body) + ROW_OVERHEAD_BYTES for _, _, body in bodies)
        # First, so that `make_room` does not delete this conversation.
        connection.execute("UPDATE conversations SET used_s = ? WHERE id = ?", (time.time(), row_id))
        self._conversations.make_room(connection, num_bytes)
        connection.execute("UPDATE conversations SET num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, row_id))
        _insert_items(connection, row_id, owner, bodies)

    def delete_item(self, connection: sqlite3.Connection, row_id: str, item_id: str, owner: str) -> Object:
        rows.get(connection, "conversations", row_id, owner)
        if not connection.execute("DELETE FROM items WHERE holder = ? AND id = ?", (row_id, item_id)).rowcount:
            raise UnknownRow(f"there is no item {shown(item_id)}", param="item_id")
        return self.conversation(connection, row_id, owner)


def _response(connection: sqlite3.Connection, row: sqlite3.Row) -> Object:
    return {**orjson.loads(row["body"]), "output": _items(connection, row["id"], "output")}


def _items(connection: sqlite3.Connection, holder: str, side: Side | None = None) -> list[Object]:
    query = "SELECT body FROM items WHERE holder = ?1 AND (?2 IS NULL OR side = ?2) ORDER BY seq"
    return [orjson.loads(row["body"]) for row in connection.execute(query, (holder, side))]


def _insert(connection: sqlite3.Connection, table: rows.Table, values: Object) -> None:
    names, placeholders = ", ".join(values), ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({placeholders})", tuple(values.values()))


def _insert_items(
    connection: sqlite3.Connection, holder: str, owner: str, bodies: Sequence[tuple[str, str, bytes]]
) -> None:
    (last,) = connection.execute("SELECT max(seq) FROM items WHERE holder = ?", (holder,)).fetchone()
    first = 0 if last is None else last + 1
    connection.executemany(
        "INSERT INTO items (holder, seq, id, owner, side, body) VALUES (?, ?, ?, ?, ?, ?)",
        ((holder, first + number, item_id, owner, side, body) for number, (side, item_id, body) in enumerate(bodies)),
    )
