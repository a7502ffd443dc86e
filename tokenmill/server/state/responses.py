"""Stored responses and conversations: functions over a connection, to be run by the database's thread.

A response keeps its own input and output items and the id of the one that it continues, so a chain of responses is kept
once however long it grows. Continuing a chain uses all of it: none of its responses expires before the newest.
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
AT_WORK = ("queued", "in_progress")
MAX_RESPONSES = 200_000
MAX_CONVERSATIONS = 50_000
MAX_CHAIN = 4096  # responses that continue each other
LIFE_S = 30 * 86_400.0
BYTES_A_ROW = 512  # what SQLite adds, about


class ParentNotFound(InvalidRequest):
    code = "previous_response_not_found"


@dataclass
class ResponseRow:
    """A response to be kept."""

    owner: str
    response: Object
    input: Sequence[Object]
    parent: str | None = None
    conversation: str | None = None
    request: Object = field(default_factory=dict)  # the body, while it waits in the background
    prefix: TokenPrefix | None = None
    events: Sequence[bytes] = ()  # of one in the background: its stream
    is_known: bool = False  # it was saved before

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
        at_work = ", ".join(repr(status) for status in AT_WORK)
        self._responses = Bound("responses", MAX_RESPONSES, half, f"status NOT IN ({at_work})")
        self._conversations = Bound("conversations", MAX_CONVERSATIONS, half)

    # ── responses ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, connection: sqlite3.Connection, row: ResponseRow) -> None:
        """Insert a response, or replace what is kept of it. With its end its items become part of its conversation."""
        status = row.response["status"]
        is_at_work = status in AT_WORK
        if is_at_work:
            self._instance.enter()
        packed = {
            "request": zlib.compress(orjson.dumps(row.request)) if is_at_work else b"",
            "body": orjson.dumps({**row.response, "output": []}),
            "prefix": None if row.prefix is None else zlib.compress(msgspec.msgpack.encode(row.prefix)),
            "events": zlib.compress(b"".join(row.events)) if row.events else None,
        }
        items = [("input", item) for item in row.input] + [("output", item) for item in row.response["output"]]
        bodies = [(side, item["id"], orjson.dumps(item)) for side, item in items]
        num_bytes = sum(len(one) for one in packed.values() if one) + BYTES_A_ROW
        num_bytes += sum(len(body) + BYTES_A_ROW for _, _, body in bodies)
        known = connection.execute("SELECT status, created_s FROM responses WHERE id = ?", (row.id,)).fetchone()
        if row.is_known and (known is None or known["status"] not in AT_WORK):
            return  # deleted or cancelled meanwhile
        self._responses.make_room(connection, num_bytes)
        connection.execute("DELETE FROM responses WHERE id = ?", (row.id,))
        now = time.time()
        values = {
            "id": row.id,
            "owner": row.owner,
            "created_s": now if known is None else known["created_s"],
            "used_s": now,
            "expires_s": now + LIFE_S,
            "status": status,
            "server": self._instance.id if is_at_work else None,
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
            (response_id, now, now + LIFE_S),
        )

    def response(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Object:
        """A stored response as clients see it."""
        return _response(connection, rows.get(connection, "responses", response_id, owner))

    def events(self, connection: sqlite3.Connection, response_id: str, owner: str) -> tuple[Object, list[bytes]]:
        """A response, and the frames of its stream where they were kept."""
        row = rows.get(connection, "responses", response_id, owner)
        data = zlib.decompress(row["events"]) if row["events"] else b""
        return _response(connection, row), [frame + b"\n\n" for frame in data.split(b"\n\n")[:-1]]

    def delete(self, connection: sqlite3.Connection, response_id: str, owner: str) -> None:
        rows.get(connection, "responses", response_id, owner)
        connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def cancel(self, connection: sqlite3.Connection, response_id: str, owner: str) -> Object:
        """Mark a response in the background as cancelled; one that is over stays as it is."""
        row = rows.get(connection, "responses", response_id, owner)
        response = _response(connection, row)
        if not response["background"]:
            raise InvalidRequest("only responses with background: true can be cancelled", param="id")
        if row["status"] in AT_WORK:
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
        if newest["status"] in AT_WORK:
            refuse("previous_response_id", f"names a response that is {newest['status']}: wait until it has ended")
        chain = [newest]
        while (parent := chain[-1]["parent"]) is not None:
            row = rows.find(connection, "responses", parent, owner)
            if row is None or len(chain) >= MAX_CHAIN:
                raise ParentNotFound(
                    f"the response {shown(parent)}, which {shown(chain[-1]['id'])} continues, is not kept any more",
                    param="previous_response_id",
                )
            chain.append(row)
        items = [item for row in reversed(chain) for item in _items(connection, row["id"])]
        prefix = newest["prefix"]
        known = None if prefix is None else msgspec.msgpack.decode(zlib.decompress(prefix), type=TokenPrefix)
        return Chain(items, known)

    def referenced(self, connection: sqlite3.Connection, item_ids: Sequence[str], owner: str) -> dict[str, Object]:
        """Items by their ids, whatever of this owner's they belong to."""
        found: dict[str, Object] = {}
        for item_id in item_ids:
            query = "SELECT body FROM items WHERE id = ? AND owner = ? LIMIT 1"
            row = connection.execute(query, (item_id, owner)).fetchone()
            if row is None:
                raise UnknownRow(f"there is no item {shown(item_id)}", param="input")
            found[item_id] = orjson.loads(row["body"])
        return found

    # ── work that was left behind ──────────────────────────────────────────────────────────────────────

    def abandoned(self, connection: sqlite3.Connection) -> list[tuple[str, str, Object, Object]]:
        """Take over what dead servers left: those that wait become this server's, as (id, owner, request, response);
        those that ran have failed. What has expired meanwhile goes."""
        self._responses.expire(connection)
        taken = []
        query = "SELECT * FROM responses WHERE server IS NOT NULL ORDER BY created_s"
        for row in connection.execute(query).fetchall():
            if row["status"] not in AT_WORK or self._instance.is_alive(row["server"]):
                continue
            if row["status"] == "queued":
                self._instance.enter()
                connection.execute("UPDATE responses SET server = ? WHERE id = ?", (self._instance.id, row["id"]))
                request = orjson.loads(zlib.decompress(row["request"]))
                taken.append((row["id"], row["owner"], request, _response(connection, row)))
            else:
                self.fail(connection, _response(connection, row), "the server ended while it worked on this response")
        return taken

    def give_back(self, connection: sqlite3.Connection, response_id: str) -> None:
        """Leave a response to another server: this one can't answer it."""
        connection.execute("UPDATE responses SET server = '' WHERE id = ?", (response_id,))

    def at_work(self, connection: sqlite3.Connection, response_ids: Sequence[str]) -> set[str]:
        """Those of some responses that are still wanted: not cancelled, not deleted."""
        marks, at_work = (", ".join("?" * len(names)) for names in (response_ids, AT_WORK))
        query = f"SELECT id FROM responses WHERE id IN ({marks}) AND status IN ({at_work})"
        return {row["id"] for row in connection.execute(query, (*response_ids, *AT_WORK))}

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
        self._conversations.make_room(connection, BYTES_A_ROW)
        now = time.time()
        values = {"id": row_id, "owner": owner, "created_s": now, "used_s": now, "metadata": orjson.dumps(metadata)}
        _insert(connection, "conversations", {**values, "num_bytes": BYTES_A_ROW})
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
        """Add items at the end of a conversation; one that is gone meanwhile is left alone."""
        if rows.find(connection, "conversations", row_id, owner) is None:
            return
        bodies: list[tuple[Side, str, bytes]] = [("input", item["id"], orjson.dumps(item)) for item in items]
        num_bytes = sum(len(body) + BYTES_A_ROW for _, _, body in bodies)
        connection.execute("UPDATE conversations SET used_s = ? WHERE id = ?", (time.time(), row_id))  # it stays
        self._conversations.make_room(connection, num_bytes)
        connection.execute("UPDATE conversations SET num_bytes = num_bytes + ? WHERE id = ?", (num_bytes, row_id))
        _insert_items(connection, row_id, owner, bodies)

    def delete_item(self, connection: sqlite3.Connection, row_id: str, item_id: str, owner: str) -> Object:
        rows.get(connection, "conversations", row_id, owner)
        gone = connection.execute("DELETE FROM items WHERE holder = ? AND id = ?", (row_id, item_id)).rowcount
        if not gone:
            raise UnknownRow(f"there is no item {shown(item_id)}", param="item_id")
        return self.conversation(connection, row_id, owner)


def _response(connection: sqlite3.Connection, row: sqlite3.Row) -> Object:
    return {**orjson.loads(row["body"]), "output": _items(connection, row["id"], "output")}


def _items(connection: sqlite3.Connection, holder: str, side: Side | None = None) -> list[Object]:
    query = "SELECT body FROM items WHERE holder = ?1 AND (?2 IS NULL OR side = ?2) ORDER BY seq"
    return [orjson.loads(row["body"]) for row in connection.execute(query, (holder, side))]


def _insert(connection: sqlite3.Connection, table: rows.Table, values: Object) -> None:
    names, places = ", ".join(values), ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", tuple(values.values()))


def _insert_items(
    connection: sqlite3.Connection, holder: str, owner: str, bodies: Sequence[tuple[str, str, bytes]]
) -> None:
    (last,) = connection.execute("SELECT max(seq) FROM items WHERE holder = ?", (holder,)).fetchone()
    first = 0 if last is None else last + 1
    connection.executemany(
        "INSERT INTO items (holder, seq, id, owner, side, body) VALUES (?, ?, ?, ?, ?, ?)",
        ((holder, first + number, item_id, owner, side, body) for number, (side, item_id, body) in enumerate(bodies)),
    )
