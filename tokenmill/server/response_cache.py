"""Answers that are known already: a request whose answer can't be any other gets the one that was computed before.

An answer depends on its tokens, parameters and seed alone where the engine computes the same bits whatever the batch
(on CPUs, and on GPUs with `--deterministic`). Where a request is greedy or brings its seed, the same request has the
same answer, so a hit is not like the answer that would be computed: it is that answer. The key is the request itself,
as the engine would get it, the tenant's salt included: a hit tells a tenant nothing about what another one asked.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from tokenmill.engine.input_processor import PreparedRequest
from tokenmill.engine.results import EventFold
from tokenmill.engine.status import ModelInfo
from tokenmill.types import EmbedRequest, Event

EVENT_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 600, 40, 300  # what Python objects take, roughly
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class KnownAnswer:
    events: list[Event]  # one of each choice, whole
    num_bytes: int
    since_s: float


class ResponseCache:
    """Bounded in bytes and in age; what was not used for longest goes first."""

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._answers: OrderedDict[bytes, KnownAnswer] = OrderedDict()
        self._num_bytes = 0

    def key_of(self, prepared: PreparedRequest, info: ModelInfo) -> bytes | None:
        """Return a digest of everything the answer depends on; None where the same request may get a different answer
        the next time."""
        asked, request = prepared.asked, prepared.request
        if not self._max_bytes or not info.is_deterministic or isinstance(asked, EmbedRequest) or request.given:
            return None
        is_greedy = request.params.temperature == 0
        if not is_greedy and asked.params.seed is None:
            return None
        alike = {"request_id": "", "priority": 0}
        engine_part = msgspec.structs.replace(
            request, **alike, arrival_s=0.0, seed=0 if is_greedy else request.seed, tenant=type(request.tenant)()
        )
        text_part = msgspec.structs.replace(asked, **alike)
        digest = hashlib.sha256(info.fingerprint.encode())
        digest.update(_encode((str(info.path), engine_part, text_part)))
        return digest.digest()

    def find(self, key: bytes, request_id: str) -> list[Event] | None:
        """The answer to the same request, under its new id."""
        known = self._answers.get(key)
        if known is None:
            return None
        if self._clock() - known.since_s > self._max_age_s:
            self._forget(key)
            return None
        self._answers.move_to_end(key)
        return [msgspec.structs.replace(event, request_id=request_id, queue_s=0.0) for event in known.events]

    async def keep(self, key: bytes, events: AsyncIterator[Event], num_choices: int) -> AsyncIterator[Event]:
        """Forward events, and store the answer if it completes."""
        folds: dict[int, EventFold] = {}
        async for event in events:
            folds.setdefault(event.index, EventFold()).add(event)
            yield event
        whole = [folds[index].event for index in sorted(folds)]
        if len(whole) == num_choices and all(event.finish_reason in ("stop", "length") for event in whole):
            self._add(key, KnownAnswer(whole, sum(map(size_of, whole)), self._clock()))

    def _add(self, key: bytes, answer: KnownAnswer) -> None:
        if key in self._answers:
            self._forget(key)
        if answer.num_bytes > self._max_bytes // 4:  # one answer does not push out all others
            return
        self._answers[key] = answer
        self._num_bytes += answer.num_bytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._answers)))

    def _forget(self, key: bytes) -> None:
        self._num_bytes -= self._answers.pop(key).num_bytes


async def replay(events: list[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


def size_of(event: Event) -> int:
    num_logprobs = sum(1 + len(info.top) for info in event.logprobs or ())
    num_logprobs += sum(1 + len(info.top) for info in event.prompt_logprobs or () if info is not None)
    num_parts = len(event.parts or ())
    text_bytes = 4 * len(event.text) * (2 if num_parts else 1)
    return (
        EVENT_BYTES * (1 + num_parts) + text_bytes + TOKEN_BYTES * len(event.token_ids) + LOGPROB_BYTES * num_logprobs
    )
