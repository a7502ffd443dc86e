"""One of the cores of a model, as the front sees it, and the requests that it works on.

RequestRun    a request that is under way: its stream, its core, what it has lived through
Route         a core for a request, and why that one
Preparation   blocks of a request that a core gets before the request itself (`moves.py`)
Replica       one core: its supervisor, its requests, what it says of itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import msgspec

from tokenmill.engine.core_supervisor import CoreSupervisor, MakeClient
from tokenmill.engine.messages import AdapterRead, Outputs, ToCore
from tokenmill.engine.roles import Role, prefill_request
from tokenmill.engine.status import CoreInfo, EngineStats, Health
from tokenmill.engine.stream import EventBuffer
from tokenmill.errors import TokenmillError
from tokenmill.types import Request

SUSPECT_DEATHS = 2  # without a token in between

NOW = ("running", "waiting", "waiting_for_grammar", "kv_blocks_used", "kv_blocks_total")
APART = (*NOW, "wait_s", "step_counts", "engine_pid", "restarts", "resumed")
TOTALS = tuple(name for name in EngineStats.__struct_fields__ if name not in APART)


@dataclass(slots=True, eq=False)
class RequestRun:
    """A request in progress."""

    buffer: EventBuffer
    request: Request
    replica: Replica | None = None  # None: it waits for one
    why: str = ""  # it is there
    num_uncached: int = 0  # tokens that its core has to compute before the next one is drawn
    is_starting: bool = False  # nothing has come since it was placed
    num_deaths: int = 0  # of its cores, without a token in between
    num_given: int = 0  # tokens at the last of them
    is_prefilling: bool = False  # its core computes the prompt alone (`roles.py`)
    was_prefilled: bool = False
    left: Replica | None = None  # the core that it was moved away from, until its next token has come
    preparation: Preparation | None = None  # of its move to another core (`moves.py`)
    source: Replica | None = None  # the core that has computed what there is of it, and may still have its blocks
    num_placed: int = 0  # how often it was given to a core
    placed_s: float = 0.0  # when it was, the last time

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def core_id(self) -> str:
        """The id that its core knows it by: another one each time, since a core may still speak of the last time."""
        request_id = self.request.request_id
        return request_id if self.num_placed < 2 else f"{request_id}#{self.num_placed}"

    def for_core(self, fetch_from: str) -> Request:
        """Return the request with the tokens that were output so far. `fetch_from`: the address of a core that may have
        its blocks."""
        request = self.buffer.output_processor.resumed_request()
        if self.is_prefilling:
            request = prefill_request(request, self.core_id)
        if self.num_placed < 2 and not fetch_from:
            return request
        return msgspec.structs.replace(request, request_id=self.core_id, fetch_from=fetch_from)

    def note_death(self) -> None:
        num_given = self.buffer.output_processor.num_completion_tokens
        self.num_deaths = self.num_deaths + 1 if num_given == self.num_given else 1
        self.num_given = num_given
        self.replica, self.source, self.is_starting, self.is_prefilling = None, None, False, False


class Route(NamedTuple):
    """A core for a request, why that one, how much of the request it has to compute, and a core that has more of it."""

    replica: Replica
    why: str
    num_uncached: int = 0
    source: Replica | None = None


@dataclass(slots=True, eq=False)
class Preparation:
    """Blocks of a request that a core gets before the request itself."""

    run: RequestRun
    route: Route
    core_id: str = ""  # of the request for its blocks
    num_tokens: int = 0  # of the request that will be there
    is_done: bool = False
    num_repeated: int = 0  # times that it was prepared again


class CoreListener(Protocol):
    """What is told of all that comes of a core."""

    def note_ready(self, replica: Replica, info: CoreInfo) -> None: ...

    def note_message(self, replica: Replica, message: Outputs | AdapterRead) -> None: ...

    def note_death(self, replica: Replica, error: TokenmillError) -> None: ...

    def note_stall(self, replica: Replica) -> None: ...


class Replica:
    """One core of a model."""

    def __init__(self, index: int, make_client: MakeClient, listener: CoreListener, label: str = "") -> None:
        self.index = index
        self.runs: dict[str, RequestRun] = {}
        self.adapters: dict[str, str] = {}  # digests of those that are loaded, by name
        self.coming_adapters: set[str] = set()  # names of those that are being loaded
        self.num_placed: Counter[str] = Counter()  # requests that it was given, by the reason
        self.num_sequences = 0  # of its requests
        self.num_prefilling = 0  # tokens of its requests that have to be computed before their next one is drawn
        self.probation: RequestRun | None = None  # a suspect, which is alone here
        self.is_reserved = False  # for a suspect: it gets no other request
        self.is_kept_free = False  # as it was told: it gets no requests
        self.leaving: set[RequestRun] = set()  # moved away, and not going on elsewhere yet
        self.preparations: dict[str, Preparation] = {}  # of requests that are about to be moved here
        self.role: Role = "any"
        self.place = ""  # the machine that its core runs on, where there are several
        self.stats = EngineStats()
        self.supervisor = CoreSupervisor(
            make_client,
            lambda info: listener.note_ready(self, info),
            lambda message: listener.note_message(self, message),
            lambda error: listener.note_death(self, error),
            lambda: listener.note_stall(self),
            label,
        )
        self._earlier = EngineStats()  # totals of the cores before this one

    @property
    def health(self) -> Health:
        return self.supervisor.health

    @property
    def is_ready(self) -> bool:
        return self.supervisor.health.state == "ready"

    @property
    def is_stopped(self) -> bool:
        return self.supervisor.is_stopped

    @property
    def info(self) -> CoreInfo:
        assert self.supervisor.info is not None, "the core is not loaded"
        return self.supervisor.info

    def send(self, message: ToCore) -> None:
        self.supervisor.send(message)

    def totals(self) -> EngineStats:
        """Return the statistics of the core; totals include those of cores before it that died."""
        sums = added((self._earlier, self.stats), TOTALS)
        return msgspec.structs.replace(self.stats, restarts=self.supervisor.num_restarts, **sums)

    def forget_core(self) -> list[RequestRun]:
        """Let go of all that a dead core had; the requests that it leaves."""
        self._earlier = self.totals()
        self.stats = EngineStats(kv_blocks_total=self.stats.kv_blocks_total)
        runs, self.runs = list(self.runs.values()), {}
        self.adapters, self.coming_adapters, self.leaving = {}, set(), set()
        self.preparations = {}
        self.num_sequences = self.num_prefilling = 0
        self.probation, self.is_reserved = None, False
        return runs


def added(each: Sequence[EngineStats], names: Sequence[str]) -> dict[str, Any]:
    """Return the sums of some fields of several statistics, and of their step counts."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in names}
    sums["step_counts"] = [sum(counts) for counts in zip_longest(*(one.step_counts for one in each), fillvalue=0)]
    return sums
