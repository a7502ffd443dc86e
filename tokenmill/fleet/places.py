"""The machines that cores can run on, this one and others that have joined, and the capacity of each.

    slot 0 ─┐                        ┌─ this machine   capacity 2
    slot 1 ─┼─ Places: a free one ───┼─ gpu-a          capacity 4
    slot 2 ─┘                        └─ gpu-b          capacity 4

A fleet has slots, to which requests are routed, and places, on which cores are started. A slot's core is started on a
place with free capacity, which it frees when it has ended; the slot's next core may be started on another place. If a
machine leaves, its cores are lost, and their requests continue on other cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from tokenmill.config import EngineConfig
from tokenmill.engine.core_client import CoreClient, ProcessCoreClient, Receive, start_core_process
from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.frontend import ModelFrontend
from tokenmill.engine.messages import ToCore
from tokenmill.engine.replicas import Replicas
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.observe.log import get_log

log = get_log("fleet")


class NoCapacity(OSError):
    """No place has free capacity for another core."""

    def __init__(self) -> None:
        super().__init__("no machine has free capacity for another engine process")


class Place(Protocol):
    """A machine that cores run on."""

    name: str

    def num_free(self) -> int:
        """Return how many more cores can be started here."""
        ...

    def take(self, config: EngineConfig) -> CoreClient:
        """Return the client of a core that will be started here; closing it frees the capacity."""
        ...


class CountedClient:
    """A core's client that frees its place's capacity when it is closed."""

    def __init__(self, client: CoreClient, free: Callable[[], None]) -> None:
        self._client = client
        self._free: Callable[[], None] | None = free

    async def start(self, receive: Receive) -> None:
        await self._client.start(receive)

    def send(self, message: ToCore) -> None:
        self._client.send(message)

    def silent_s(self) -> float:
        return self._client.silent_s()

    def kill(self) -> None:
        self._client.kill()

    async def close(self) -> None:
        try:
            await self._client.close()
        finally:
            free, self._free = self._free, None
            if free is not None:
                free()


class LocalPlace:
    """This machine. On GPUs a core gets one device per rank; on CPUs only the number of cores is limited."""

    name = "here"

    def __init__(
        self, frontend: ModelFrontend, capacity: int, *, gpus: Sequence[int] = (), spare: SpareCore | None = None
    ) -> None:
        """`gpus`: the devices to assign; empty: cores run on CPUs. `spare`: holds a pre-started process."""
        self._frontend = frontend
        self._capacity = capacity
        self._gpus = list(gpus)
        self._has_gpus = bool(gpus)
        self._spare = spare

    def num_free(self) -> int:
        return self._capacity

    def take(self, config: EngineConfig) -> CoreClient:
        gpus = self._gpus[: config.parallel.num_ranks] if self._has_gpus else []
        if not self._capacity or (self._has_gpus and len(gpus) < config.parallel.num_ranks):
            raise NoCapacity
        self._capacity -= 1
        self._gpus = self._gpus[len(gpus) :]

        def free() -> None:
            self._capacity += 1
            self._gpus += gpus

        environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
        return CountedClient(self._client(config, environment), free)

    def _client(self, config: EngineConfig, environment: Mapping[str, str] = MappingProxyType({})) -> CoreClient:
        fast_start = config.ops.fast_start is not False
        process = None if environment or self._spare is None else self._spare.take(fast_start=fast_start)
        return ProcessCoreClient(config, self._frontend.model_path, process or start_core_process(config, environment))


class CountedPlace:
    """A place whose core clients are made by a function; for virtual cores."""

    def __init__(self, name: str, capacity: int, make_client: Callable[[EngineConfig], CoreClient]) -> None:
        self.name = name
        self._capacity = capacity
        self._make_client = make_client

    def num_free(self) -> int:
        return self._capacity

    def take(self, config: EngineConfig) -> CoreClient:
        if not self._capacity:
            raise NoCapacity
        self._capacity -= 1
        return CountedClient(self._make_client(config), self._free)

    def _free(self) -> None:
        self._capacity += 1


class Places:
    """All places of a fleet; a keeper of its engine."""

    def __init__(self, *places: Place) -> None:
        self.on_change: Callable[[], None] = lambda: None  # called when a place was added
        self._places = list(places)
        self._replicas: Replicas | None = None
        self._was_added = asyncio.Event()

    def add(self, place: Place) -> None:
        self._places.append(place)
        self._was_added.set()
        self.on_change()

    def remove(self, place: Place) -> None:
        """Remove a lost machine; the clients of its cores report the cores' deaths themselves."""
        if place in self._places:
            self._places.remove(place)

    def num_free(self) -> int:
        return sum(place.num_free() for place in self._places)

    def maker(self, index: int, config: EngineConfig) -> MakeClient:
        """Return the client factory of one slot."""

        def make_client() -> CoreClient:
            able = [place for place in self._places if place.num_free()]
            if not able:
                raise NoCapacity
            place = max(able, key=lambda one: (isinstance(one, LocalPlace), one.num_free()))
            client = place.take(config)
            if self._replicas is not None:
                self._replicas.all[index].place = place.name
            return client

        return make_client

    # ── as the keeper of an engine ─────────────────────────────────────────────────────────────────────

    async def start(self, replicas: Replicas) -> None:
        self._replicas = replicas
        if not self.num_free():
            log.info("waiting for a machine to join")
        while not self.num_free():
            self._was_added.clear()
            await self._was_added.wait()

    def note_open(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def set_limits(self, min_replicas: int, max_replicas: int) -> bool:
        return False
