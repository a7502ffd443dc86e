"""The loader decides which models are in memory: it loads models on request and unloads idle ones to make room.

    room for two, C is requested      A idle, B busy    A is unloaded, C is loaded
                                      both busy         C waits for one to become idle; after a while the one that was
                                                        loaded first admits no more requests, finishes its running
                                                        ones and is unloaded, while its new requests wait in turn

A model with running requests is never unloaded. All requests that wait for a model share one load, and loads that need
room are served in order of arrival. The planner computes the memory of each model, including the size of the KV pool,
which is then passed to the engine, so that it allocates what was planned. With a single model nothing is planned; its
engine sizes itself.

A model that was idle for longer than its keep-alive time is unloaded too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tokenmill.engine.status import EngineStats
from tokenmill.errors import EngineDead, InvalidConfig, InvalidRequest, TokenmillError
from tokenmill.hardware.memory import probe_memory
from tokenmill.observe.log import get_log
from tokenmill.server.errors import LoadFailed
from tokenmill.server.gate import EngineGate, ModelReader, ServedEngine

log = get_log("server")
POLL_S = 0.02  # interval of checking whether a model has become idle, while a load waits for it
SWEEP_S = 0.25  # interval of checking for models whose keep-alive time is over
IDLE_WAIT_S = 1.0  # how long a load waits for a model to become idle before a busy one is drained
RETRY_S = 5.0  # after a failed load: requests within this time get the same error without another attempt


@dataclass(frozen=True)
class ModelMemory:
    """The planned memory of a model on its device."""

    device: str
    device_bytes: int  # the memory available to the model; all of the device's unless limited
    fixed_bytes: int  # everything except the KV pool
    total_bytes: int
    num_blocks: int | None = None  # of the KV pool; None: the engine decides
    num_states: int | None = None
    problem: str | None = None  # why the model does not fit into the available memory


class ModelSource(Protocol):
    """Reads, plans and starts one model."""

    async def read(self) -> ModelReader:
        """Read the model's files, without its weights."""

    def plan(self, available_bytes: int | None, num_models: int) -> ModelMemory:
        """Plan the model as one of several on its device. `available_bytes`: None for all of the device's memory."""

    def held(self) -> ModelMemory:
        """Return the memory of an engine that was started without a plan."""

    async def start(self, memory: ModelMemory | None) -> ServedEngine: ...


MakeModel = Callable[[str], tuple[EngineGate, ModelSource]]


@dataclass
class ModelSlot:
    """One model of a loader: its source, its memory, and the tasks that read, load or unload it."""

    source: ModelSource
    footprint: ModelMemory | None = None  # alone on its device
    memory: ModelMemory | None = None  # reserved or in use
    reading: asyncio.Task[None] | None = None
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    load_s: float = 0.0
    failed_at_s: float = field(default=float("-inf"))

    @property
    def is_taken(self) -> bool:
        """Return whether the model occupies memory: it is loading, loaded or unloading."""
        return self.memory is not None


class ModelLoader:
    """All models of a server and their memory. All state changes happen on the event loop's thread."""

    def __init__(
        self,
        *,
        max_loaded: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """`max_loaded`: limit of models in memory, including those being unloaded. `memory_bytes`: total memory of the
        models on a device; by default what is free now."""
        # Callbacks for metrics and audit log: a load, a failed load, an unload with the engine's final statistics.
        self.on_load: Callable[[EngineGate, float], None] = lambda gate, seconds: None
        self.on_failure: Callable[[EngineGate, TokenmillError], None] = lambda gate, problem: None
        self.on_unload: Callable[[str, EngineStats], None] = lambda name, stats: None
        self.make_model: MakeModel | None = None  # for models that clients add to the running server
        self._max_loaded = max_loaded
        self._memory_bytes = memory_bytes
        self._cpu_bytes = probe_memory().available_bytes
        self._slots: dict[EngineGate, ModelSlot] = {}
        self._room = asyncio.Lock()  # held while waiting for room; granted in order of arrival
        self._sweeping: asyncio.Task[None] | None = None

    def add(self, gate: EngineGate, source: ModelSource, *, waits: bool = True) -> None:
        """Add a model. `waits`: requests wait for the first load too, instead of getting a 503."""
        self._slots[gate] = ModelSlot(source)
        if waits:
            self._attach(gate)

    def _attach(self, gate: EngineGate) -> None:
        gate.load = partial(self.load, gate)
        gate.read = partial(self.read, gate)

    async def remove(self, gate: EngineGate) -> None:
        """Unload a model and forget it."""
        await self.unload(gate)
        del self._slots[gate]

    def memory_of(self, gate: EngineGate) -> ModelMemory | None:
        """Return the planned memory of a model; None if it is not loaded or was not planned."""
        slot = self._slots.get(gate)
        return None if slot is None else slot.memory

    def memory(self) -> dict[str, tuple[int, int]]:
        """Return (total, used) bytes of each device that models were planned for."""
        devices = {slot.memory.device for slot in self._slots.values() if slot.memory is not None}
        return {device: (self._total(device), self._used(device)) for device in sorted(devices)}

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────

    async def read(self, gate: EngineGate) -> None:
        """Read the model's files. Concurrent callers share one read."""
        slot = self._slots[gate]
        if gate.known is None:
            self._refuse_for_now(gate, slot)
            slot.reading = slot.reading or asyncio.create_task(self._read(gate, slot))
            await self._finished(slot.reading)
            _raise_failure(gate)

    async def _read(self, gate: EngineGate, slot: ModelSlot) -> None:
        try:
            gate.describe(await slot.source.read())
        except (TokenmillError, OSError) as problem:
            if gate.loaded is None:
                self._fail(gate, slot, problem)
        finally:
            slot.reading = None

    # ── loading ────────────────────────────────────────────────────────────────────────────────────────

    async def load(self, gate: EngineGate) -> None:
        """Load the model if necessary; LoadFailed has the reason of a failure. Cancelling the caller does not cancel
        the load."""
        loading = self.begin(gate)
        if loading is not None:
            await self._finished(loading)
            _raise_failure(gate)

    def begin(self, gate: EngineGate) -> asyncio.Task[None] | None:
        """Start loading a model and return the task; None if it is loaded already. The gate's state has the result."""
        slot = self._slots.get(gate)
        if slot is None or gate.state == "loaded":
            return None
        if slot.loading is None:
            self._refuse_for_now(gate, slot)
            gate.state = "unloading" if slot.unloading is not None else "loading"
            slot.loading = asyncio.create_task(self._load(gate, slot, slot.unloading))
        return slot.loading

    async def _finished(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait({task})
        if not task.cancelled():  # cancelled: the server is stopping, and the gate refuses requests
            task.result()

    def _refuse_for_now(self, gate: EngineGate, slot: ModelSlot) -> None:
        if time.monotonic() - slot.failed_at_s < RETRY_S:
            _raise_failure(gate)

    def _fail(self, gate: EngineGate, slot: ModelSlot, problem: TokenmillError | OSError) -> None:
        if isinstance(problem, OSError):
            problem = EngineDead(f"the engine could not be started: {problem.strerror or problem}")
        if gate.load is not None:  # otherwise it was the first load, and the process prints the reason and exits
            log.error("%s could not be loaded: %s", gate.label, problem)
        slot.failed_at_s = time.monotonic()
        gate.shut("failed", problem)
        self.on_failure(gate, problem)

    async def _load(self, gate: EngineGate, slot: ModelSlot, leaving: asyncio.Task[None] | None) -> None:
        if leaving is not None:
            await asyncio.wait({leaving})
        gate.shut("loading")
        try:
            async with self._room:
                slot.memory = await self._room_for(gate, slot)
            began_s = time.monotonic()
            engine = await slot.source.start(slot.memory)
            slot.load_s = time.monotonic() - began_s
            gate.open(engine)
            self.on_load(gate, slot.load_s)
            self._attach(gate)
            self._start_sweeping()
        except (TokenmillError, OSError) as problem:
            self._fail(gate, slot, problem)
        finally:
            slot.loading = None
            if gate.loaded is None:
                slot.memory = None
                if gate.state == "loading":  # cancelled
                    gate.shut()

    # ── room ───────────────────────────────────────────────────────────────────────────────────────────

    async def _room_for(self, gate: EngineGate, slot: ModelSlot) -> ModelMemory | None:
        """Wait until there is room for a model, unloading others; return its plan."""
        if len(self._slots) == 1:
            return None
        memory = await asyncio.to_thread(self._planned, gate, slot)
        if memory.problem is not None:
            raise InvalidConfig(memory.problem, hint="use a smaller model, more quantised weights or fewer KV blocks")
        num_pinned = sum(other.is_pinned for other in self._slots if other is not gate)
        if self._max_loaded is not None and num_pinned >= self._max_loaded:
            raise InvalidConfig(f"{num_pinned} models are pinned, and {self._max_loaded} may be in memory")
        since_s = time.monotonic()
        while not self._has_room(memory):
            victim = self._idle_victim() or self._busy_victim(time.monotonic() - since_s)
            if victim is None:
                await asyncio.sleep(POLL_S)
            else:
                await self.unload(victim)
                since_s = time.monotonic()
        return memory

    def _planned(self, gate: EngineGate, slot: ModelSlot) -> ModelMemory:
        """Plan a model so that all models fit into memory together; if that is impossible, leave room only for the
        pinned ones."""
        own = slot.footprint = slot.footprint or slot.source.plan(None, 1)
        total = self._total(own.device)
        others = [(one, other) for one, other in self._slots.items() if other is not slot and _is_on(one, other, own)]
        fixed = sum(other.footprint.fixed_bytes for _, other in others if other.footprint is not None)
        memory = slot.source.plan(total - fixed, 1 + len(others))
        if memory.problem is None:
            return memory
        pinned = sum(_largest_bytes(other) for one, other in others if one.is_pinned)
        return slot.source.plan(total - pinned, 1 + len(others))

    def _total(self, device: str) -> int:
        """Return the memory for models: the configured total, else what was free at the start (CPU) or all of it
        (GPU)."""
        if self._memory_bytes is not None:
            return self._memory_bytes
        if device == "cpu":
            return self._cpu_bytes
        alone = (slot.footprint for slot in self._slots.values() if slot.footprint is not None)
        return max((one.device_bytes for one in alone if one.device == device), default=0)

    def _used(self, device: str) -> int:
        taken = (slot.memory for slot in self._slots.values() if slot.memory is not None)
        return sum(memory.total_bytes for memory in taken if memory.device == device)

    def _has_room(self, memory: ModelMemory) -> bool:
        num_taken = sum(slot.is_taken for slot in self._slots.values())
        if self._max_loaded is not None and num_taken >= self._max_loaded:
            return False
        return self._used(memory.device) + memory.total_bytes <= self._total(memory.device)

    def _loaded(self) -> Iterator[EngineGate]:
        """Return the models that may be unloaded."""
        return (gate for gate in self._slots if gate.state == "loaded" and not gate.is_pinned)

    def _idle_victim(self) -> EngineGate | None:
        idle = [gate for gate in self._loaded() if gate.is_idle]
        return min(idle, key=lambda gate: gate.last_used_s, default=None)

    def _busy_victim(self, waited_s: float) -> EngineGate | None:
        """Return the model that was loaded first, although it is busy; None if it is too early. A model stays at least
        as long as its load took, so that loading never takes more than half of the time."""
        oldest = min(self._loaded(), key=lambda gate: gate.loaded_at_s, default=None)
        if oldest is None or waited_s < IDLE_WAIT_S:
            return None
        return oldest if time.monotonic() - oldest.loaded_at_s >= self._slots[oldest].load_s else None

    # ── unloading ──────────────────────────────────────────────────────────────────────────────────────

    async def unload(self, gate: EngineGate) -> None:
        """Unload a model once its running requests are finished. New requests wait and load it again."""
        slot = self._slots.get(gate)
        if slot is None:
            raise InvalidRequest(f"{gate.name} can't be unloaded: this server could not load it again", param="model")
        if slot.unloading is None:
            slot.unloading = asyncio.create_task(self._unload(gate, slot, slot.loading))
        await self._finished(slot.unloading)

    async def _unload(self, gate: EngineGate, slot: ModelSlot, coming: asyncio.Task[None] | None) -> None:
        try:
            if coming is not None:
                await asyncio.wait({coming})
            engine = gate.loaded
            if engine is None:
                return
            gate.state = "unloading"
            while not engine.is_idle():
                await asyncio.sleep(POLL_S)
            self.on_unload(gate.label, engine.stats())
            await engine.close()
            gate.shut()
            slot.memory = None
            log.info("%s was unloaded", gate.label)
        finally:
            slot.unloading = None

    def _start_sweeping(self) -> None:
        if self._sweeping is None and not all(gate.is_pinned for gate in self._slots):
            self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for gate in list(self._loaded()):
                now_s = time.monotonic()
                if not gate.is_idle:
                    gate.last_used_s = now_s
                elif gate.keep_alive_s is not None and now_s - gate.last_used_s >= gate.keep_alive_s:
                    await self.unload(gate)

    # ── shutdown ───────────────────────────────────────────────────────────────────────────────────────

    def refuse_all(self) -> None:
        """Refuse every new request from now on, and cancel the loads in progress."""
        for gate, slot in self._slots.items():
            gate.close()
            if slot.loading is not None:
                slot.loading.cancel()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the running requests of all models; return False if some were still running after `timeout_s`."""
        engines = [gate.loaded for gate in self._slots if gate.loaded is not None]
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in engines)))

    async def close(self) -> None:
        """Close all engines; requests that still run fail."""
        slots = list(self._slots.values())
        tasks = [task for slot in slots for task in (slot.reading, slot.loading, slot.unloading) if task is not None]
        tasks += [self._sweeping] if self._sweeping is not None else []
        for task in tasks:
            if not task.cancelling():  # a load that was cancelled before is closing its core now
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines = [gate.loaded for gate in self._slots if gate.loaded is not None]
        await asyncio.gather(*(engine.close() for engine in engines))


def _is_on(gate: EngineGate, slot: ModelSlot, memory: ModelMemory) -> bool:
    """Return whether a model runs on the device of `memory`. A model that can't be planned does not; its own load
    reports the reason."""
    try:
        slot.footprint = slot.footprint or slot.source.plan(None, 1)
    except TokenmillError:
        return False
    if gate.loaded is not None and slot.memory is None:  # loaded while it was the only one
        slot.memory = slot.source.held()
    return slot.footprint.device == memory.device


def _largest_bytes(slot: ModelSlot) -> int:
    return max(slot.memory.total_bytes if slot.memory else 0, slot.footprint.fixed_bytes if slot.footprint else 0)


def _raise_failure(gate: EngineGate) -> None:
    if gate.failure is not None:
        raise LoadFailed(gate.label, gate.failure)
