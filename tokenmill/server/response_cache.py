"""The response cache: a request with a determined answer gets the stored answer of an earlier identical request.

Where the engine computes the same bits in any batch (on CPUs, and on GPUs with `--deterministic`), an answer depends
only on its tokens, parameters and seed. So if a request is greedy or has a seed, a cached answer is exactly the answer
that would be computed. The cache key is the request as the engine would get it, including the tenant's salt: a hit
tells a tenant nothing about another tenant's requests.
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

EVENT_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 600, 40, 300  # approximate sizes of the Python objects
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class CachedAnswer:
    events: list[Event]  # one per choice, with its complete text
    num_bytes: int
    stored_at_s: float


class ResponseCache:
    """A least-recently-used cache of answers, limited in bytes and in age."""

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: 0 turns the cache off."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._answers: OrderedDict[bytes, CachedAnswer] = OrderedDict()
        self._num_bytes = 0

    def key_of(self, prepared: PreparedRequest, info: ModelInfo) -> bytes | None:
        """Return a digest of everything the answer depends on; None if the same request may get a different answer
        next time."""
        client_request, request = prepared.client_request, prepared.request
        if (
            not self._max_bytes
            or not info.is_deterministic
            or request.progress
            or isinstance(client_request, EmbedRequest)
        ):
            return None
        is_greedy = request.params.temperature == 0
        if not is_greedy and client_request.params.seed is None:
            return None
        neutral = {"request_id": "", "priority": 0}  # fields without influence on the answer
        engine_part = msgspec.structs.replace(
            request, **neutral, arrival_s=0.0, seed=0 if is_greedy else request.seed, tenant=type(request.tenant)()
        )
        text_part = msgspec.structs.replace(client_request, **neutral)
        digest = hashlib.sha256(info.fingerprint.encode())
        digest.update(_encode((str(info.path), engine_part, text_part)))
        return digest.digest()

    def find(self, key: bytes, request_id: str) -> list[Event] | None:
        """Return the cached answer, with the id of the new request; None if there is none."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        if self._clock() - answer.stored_at_s > self._max_age_s:
            self._forget(key)
            return None
        self._answers.move_to_end(key)
        return [msgspec.structs.replace(event, request_id=request_id, queue_s=0.0) for event in answer.events]

    async def keep(self, key: bytes, events: AsyncIterator[Event], num_choices: int) -> AsyncIterator[Event]:
        """Forward events, and store the answer if it completes."""
        folds: dict[int, EventFold] = {}
        async for event in events:
            folds.setdefault(event.index, EventFold()).add(event)
            yield event
        whole = [folds[index].event for index in sorted(folds)]
        if len(whole) == num_choices and all(event.finish_reason in ("stop", "length") for event in whole):
            self._add(key, CachedAnswer(whole, sum(map(size_of, whole)), self._clock()))

    def _add(self, key: bytes, answer: CachedAnswer) -> None:
        if key in self._answers:
            self._forget(key)
        if answer.num_bytes > self._max_bytes // 4:  # one answer must not evict most of the others
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
