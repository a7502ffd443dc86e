"""Message Batches: many requests at once, answered when there is time, collected later.

    create ─► in_progress: every request is `processing` ─► ended: each has succeeded, errored, expired or was canceled
                   └─► canceling ─┘                              └─► results, one JSON line a request, in any order

A request of a batch takes the same way as any other: the same parser, the same engine, behind all interactive ones
(`priority`), and a few of all batches at a time. One that finds the engine full or restarting waits.

Batches are kept in memory: they are gone once the server ends. `BatchStore` is all that would have to change for them
to last; a batch belongs to the API key that made it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import orjson

from tokenmill.engine.request_ids import new_id
from tokenmill.errors import EngineDead, InvalidRequest, Overloaded, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.anthropic.render import error_content
from tokenmill.server.body import BodyFields, kind_of, refuse, shown
from tokenmill.server.errors import RETRY_AFTER_S, InternalError

log = get_log("server")
Outcome = Literal["succeeded", "errored", "canceled", "expired"]
MAX_REQUESTS = 100_000
MAX_BATCHES = 1000
MAX_KEPT_BYTES = 256 << 20  # of all requests and results; ended batches go first
IN_FLIGHT = 4  # requests of all batches together
PRIORITY = 1000  # interactive requests have 0, and smaller runs first
LIFE = timedelta(hours=24)  # then what has not begun expires
CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass
class BatchItem:
    """One request: the JSON of its body, which gives way to that of its result."""

    custom_id: str
    body: bytes
    outcome: Outcome | None = None
    result: bytes = b""

    def end(self, outcome: Outcome, result: bytes) -> None:
        self.outcome, self.result, self.body = outcome, result, b""

    def line(self) -> bytes:
        return b'{"custom_id":' + orjson.dumps(self.custom_id) + b',"result":' + self.result + b"}\n"

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.result)


@dataclass
class MessageBatch:
    owner: str
    items: list[BatchItem]
    id: str = field(default_factory=lambda: new_id("msgbatch_"))
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    cancel_initiated: datetime | None = None
    ended: datetime | None = None

    @property
    def expires(self) -> datetime:
        return self.created + LIFE

    @property
    def open_items(self) -> Iterator[BatchItem]:
        return (item for item in self.items if item.outcome is None)

    def as_object(self, origin: str) -> dict[str, Any]:
        """The batch as clients see it. Requests count as processing until all have ended."""
        status = "ended" if self.ended else "canceling" if self.cancel_initiated else "in_progress"
        outcomes = [item.outcome if self.ended else "processing" for item in self.items]
        kinds = ("processing", "succeeded", "errored", "canceled", "expired")
        return {
            "id": self.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {kind: outcomes.count(kind) for kind in kinds},
            "created_at": _written(self.created),
            "expires_at": _written(self.expires),
            "cancel_initiated_at": _written(self.cancel_initiated),
            "ended_at": _written(self.ended),
            "archived_at": None,
            "results_url": f"{origin}/v1/messages/batches/{self.id}/results" if self.ended else None,
        }


def _written(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_batch(body: dict[str, Any]) -> list[BatchItem]:
    """The requests of a batch. Their bodies are checked when it is their turn: a wrong one is an error of its own."""
    given = BodyFields(body).items("requests", MAX_REQUESTS)
    if not given:
        refuse("requests", "is required and must not be empty")
    items = [_item(value, f"requests[{number}]") for number, value in enumerate(given)]
    seen: set[str] = set()
    for number, item in enumerate(items):
        if item.custom_id in seen:
            refuse(f"requests[{number}].custom_id", f"{shown(item.custom_id)} is there twice")
        seen.add(item.custom_id)
    return items


def _item(value: object, path: str) -> BatchItem:
    if not isinstance(value, dict):
        refuse(path, f"must be an object with custom_id and params, got {kind_of(value)}")
    fields = BodyFields(value, f"{path}.")
    custom_id = fields.required_text("custom_id")
    if not CUSTOM_ID.fullmatch(custom_id):
        refuse(fields.name("custom_id"), "must be 1 to 64 letters, digits, _ or -")
    params = fields.object("params")
    if params is None:
        refuse(fields.name("params"), "is required: the body of a message")
    if params.boolean("stream"):
        refuse(params.name("stream"), "is not possible in a batch")
    return BatchItem(custom_id, orjson.dumps(params.values))


class UnknownBatch(TokenmillError):
    code = "batch_not_found"
    http_status = 404


class BatchStore:
    """The batches of a server, in memory, the newest first."""

    def __init__(self) -> None:
        self._batches: dict[str, MessageBatch] = {}

    def add(self, batch: MessageBatch) -> None:
        """Keep a batch; the oldest ended ones make room for it."""
        for old in [one for one in self._batches.values() if one.ended]:
            if self._has_room(batch):
                break
            del self._batches[old.id]
        if not self._has_room(batch):
            raise Overloaded("too many message batches are in progress", retry_after_s=60.0)
        self._batches[batch.id] = batch

    def _has_room(self, batch: MessageBatch) -> bool:
        everything = [batch, *self._batches.values()]
        num_bytes = sum(item.num_bytes for one in everything for item in one.items)
        return len(everything) <= MAX_BATCHES and num_bytes <= MAX_KEPT_BYTES

    def find(self, owner: str, batch_id: str) -> MessageBatch:
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise UnknownBatch(f"there is no message batch {shown(batch_id)}")
        return batch

    def of(self, owner: str) -> list[MessageBatch]:
        return [batch for batch in reversed(self._batches.values()) if batch.owner == owner]

    def delete(self, batch: MessageBatch) -> None:
        if not batch.ended:
            raise InvalidRequest("a message batch that is in progress can't be deleted", hint="cancel it first")
        del self._batches[batch.id]


Answer = Callable[[bytes], Awaitable[bytes]]  # the JSON of a request's body ─► that of its message


class BatchRunner:
    """Answers the requests of batches, a few at a time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._places = asyncio.Semaphore(IN_FLIGHT)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, batch: MessageBatch) -> None:
        task = asyncio.create_task(self._run(batch))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    def cancel(self, batch: MessageBatch) -> None:
        """End a batch: what has its result keeps it."""
        if batch.ended is None and batch.cancel_initiated is None:
            batch.cancel_initiated = datetime.now(UTC)
            self._tasks[batch.id].cancel()

    async def _run(self, batch: MessageBatch) -> None:
        waiting = iter(batch.items)

        async def work() -> None:
            for item in waiting:  # shared: each worker takes the next one
                await self._end(item)

        left: Outcome = "expired"
        try:
            async with (
                asyncio.timeout((batch.expires - datetime.now(UTC)).total_seconds()),
                asyncio.TaskGroup() as all_,
            ):
                for _ in range(min(IN_FLIGHT, len(batch.items))):
                    all_.create_task(work())
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            left = "canceled"
            if batch.cancel_initiated is None:  # the server ends
                raise
        finally:
            for item in batch.open_items:
                item.end(left, orjson.dumps({"type": left}))
            batch.ended = datetime.now(UTC)

    async def _end(self, item: BatchItem) -> None:
        try:
            message = await self._patiently(item.body)
        except TokenmillError as error:
            item.end("errored", orjson.dumps({"type": "errored", "error": error_content(error, "")}))
        except Exception:
            log.exception("request %s of a message batch failed", item.custom_id)
            item.end("errored", orjson.dumps({"type": "errored", "error": error_content(InternalError(), "")}))
        else:
            item.end("succeeded", b'{"type":"succeeded","message":' + message + b"}")

    async def _patiently(self, body: bytes) -> bytes:
        while True:
            try:
                async with self._places:
                    return await self._answer(body)
            except Overloaded as full:
                await asyncio.sleep(full.retry_after_s)
            except EngineDead:
                await asyncio.sleep(RETRY_AFTER_S)
