"""The interface of an engine with adapters, as the server uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenmill.engine.status import LoadedAdapter
from tokenmill.errors import InvalidConfig, InvalidRequest, ModelError, UnknownModel
from tokenmill.server.gate import EngineGate


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that can have adapters."""

    @property
    def adapters(self) -> list[LoadedAdapter]: ...
    async def load_adapter(self, name: str, path: Path) -> LoadedAdapter: ...
    async def unload_adapter(self, name: str) -> None: ...


async def adapter_engine(gate: EngineGate) -> AdapterEngine:
    """The engine behind a gate, brought into memory if need be."""
    engine = await gate.enter()
    if not isinstance(engine, AdapterEngine):
        raise UnknownModel(f"the model {gate.name} can't have adapters", param="model")
    return engine


async def load_checked(engine: AdapterEngine, name: str, path: Path) -> None:
    """Load an adapter; what is wrong with it is the client's to know."""
    try:
        await engine.load_adapter(name, path.expanduser())
    except (ModelError, InvalidConfig) as problem:
        raise InvalidRequest(problem.message, param="lora_path", hint=problem.hint) from problem


async def ensure_loaded(gate: EngineGate, name: str, path: Path) -> None:
    """Load an adapter that a created model has, unless it is there."""
    engine = await adapter_engine(gate)
    if all(one.name != name for one in engine.adapters):
        await load_checked(engine, name, path)  # of several first requests one loads, and the others wait for it
