"""The front's view of one engine core of a model and of the requests on it.

RequestRun    a running request: its event buffer, the core it is assigned to, its history of moves and deaths
Route         the core chosen for a request, and the reason
Preparation   KV blocks of a request that a core fetches before it gets the request itself (`moves.py`)
Replica       one core: its supervisor, its requests, its statistics
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

SUSPECT_DEATHS = 2  # deaths of its cores, without a token in between, that make a request a suspect

# Fields of EngineStats:
GAUGES = ("running", "waiting", "waiting_for_grammar", "kv_blocks_used", "kv_blocks_total")
NOT_SUMMED = (*GAUGES, "wait_s", "step_counts", "engine_pid", "restarts", "resumed")
COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name not in NOT_SUMMED)


@dataclass(slots=True, eq=False)
class RequestRun:
    """A running request."""

    buffer: EventBuffer
    request: Request
    replica: Replica | None = None  # None: it waits for a core
    why: str = ""  # the reason for this core
    num_uncached: int = 0  # tokens that its core has to compute before it samples the next one
    is_starting: bool = False  # its core has not produced output for it yet
    num_deaths: int = 0  # deaths of its cores without a token in between
    num_tokens_at_death: int = 0  # tokens generated before the last of these deaths
    is_prefilling: bool = False  # its core computes the prompt only (`roles.py`)
    was_prefilled: bool = False
    moved_from: Replica | None = None  # the core that it was moved away from, until its next token arrives
    preparation: Preparation | None = None  # of its move to another core (`moves.py`)
    source: Replica | None = None  # the core that computed its tokens so far and may still have their blocks
    num_placed: int = 0  # how often it was assigned to a core
    placed_s: float = 0.0  # when it was last assigned to one

    @property
    def is_suspect(self) -> bool:
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def core_id(self) -> str:
        """The request's id on its core. It differs for each assignment, because outputs of an earlier one may still
        arrive."""
        request_id = self.request.request_id
        return request_id if self.num_placed < 2 else f"{request_id}#{self.num_placed}"

    def for_core(self, fetch_from: str) -> Request:
        """Return the request with the tokens generated so far. `fetch_from`: the address of a core that may have its
        blocks."""
        request = self.buffer.output_processor.resumed_request()
        if self.is_prefilling:
            request = prefill_request(request, self.core_id)
        if self.num_placed < 2 and not fetch_from:
            return request
        return msgspec.structs.replace(request, request_id=self.core_id, fetch_from=fetch_from)

    def note_death(self) -> None:
        num_tokens = self.buffer.output_processor.num_completion_tokens
        self.num_deaths = self.num_deaths + 1 if num_tokens == self.num_tokens_at_death else 1
        self.num_tokens_at_death = num_tokens
        self.replica, self.source, self.is_starting, self.is_prefilling = None, None, False, False


class Route(NamedTuple):
    """The core chosen for a request, the reason, the tokens that it has to compute, and a core that has more of the
    request's blocks."""

    replica: Replica
    why: str
    num_uncached: int = 0
    source: Replica | None = None


@dataclass(slots=True, eq=False)
class Preparation:
    """Blocks of a request that a core fetches before it gets the request itself."""

    run: RequestRun
    route: Route
    core_id: str = ""  # of the request that fetches the blocks
    num_tokens: int = 0  # tokens of the request whose blocks are fetched
    is_done: bool = False
    num_repeated: int = 0  # how often the preparation was repeated


class CoreListener(Protocol):
    """Receives the events of a core."""

    def note_ready(self, replica: Replica, info: CoreInfo) -> None: ...

    def note_message(self, replica: Replica, message: Outputs | AdapterRead) -> None: ...

    def note_death(self, replica: Replica, error: TokenmillError) -> None: ...

    def note_stall(self, replica: Replica) -> None: ...


class Replica:
    """One core of a model."""

    def __init__(self, index: int, make_client: MakeClient, listener: CoreListener, label: str = "") -> None:
        self.index = index
        self.runs: dict[str, RequestRun] = {}
        self.adapters: dict[str, str] = {}  # digests of the loaded adapters, by name
        self.coming_adapters: set[str] = set()  # names of the adapters that are being loaded
        self.num_placed: Counter[str] = Counter()  # requests assigned to this core, by the reason
        self.num_sequences = 0  # of its requests
        self.num_prefilling = 0  # tokens that it has to compute before its starting requests sample their next one
        self.probation: RequestRun | None = None  # a suspect, the only request here
        self.is_reserved = False  # for a suspect: no other request is assigned to it
        self.is_drained = False  # on request: no requests are assigned to it
        self.departing: set[RequestRun] = set()  # moved away, but without output from their new core yet
        self.preparations: dict[str, Preparation] = {}  # of requests that are about to be moved here
        self.role: Role = "any"
        self.place = ""  # the machine that its core runs on, if there are several
        self.stats = EngineStats()
        self.supervisor = CoreSupervisor(
            make_client,
            lambda info: listener.note_ready(self, info),
            lambda message: listener.note_message(self, message),
            lambda error: listener.note_death(self, error),
            lambda: listener.note_stall(self),
            label,
        )
        self._earlier = EngineStats()  # counters of the cores before this one

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
        """Return the statistics of the core; counters include those of its predecessors that died."""
        sums = sum_stats((self._earlier, self.stats), COUNTERS)
        return msgspec.structs.replace(self.stats, restarts=self.supervisor.num_restarts, **sums)

    def forget_core(self) -> list[RequestRun]:
        """Reset the state of a dead core and return the requests that were on it."""
        self._earlier = self.totals()
        self.stats = EngineStats(kv_blocks_total=self.stats.kv_blocks_total)
        runs, self.runs = list(self.runs.values()), {}
        self.adapters, self.coming_adapters, self.departing = {}, set(), set()
        self.preparations = {}
        self.num_sequences = self.num_prefilling = 0
        self.probation, self.is_reserved = None, False
        return runs


def sum_stats(each: Sequence[EngineStats], names: Sequence[str]) -> dict[str, Any]:
    """Return the sums of the named fields over several statistics, and the sums of their step counts."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in each) for name in names}
    sums["step_counts"] = [sum(counts) for counts in zip_longest(*(one.step_counts for one in each), fillvalue=0)]
    return sums
