"""Loading adapters into an engine, as the server does it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from tokenmill.engine.status import LoadedAdapter
from tokenmill.errors import InvalidConfig, InvalidRequest, ModelError, UnknownModel
from tokenmill.server.gate import EngineGate


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that supports adapters."""

    @property
    def adapters(self) -> list[LoadedAdapter]: ...
    async def load_adapter(self, name: str, path: Path) -> LoadedAdapter: ...
    async def unload_adapter(self, name: str) -> None: ...


async def adapter_engine(gate: EngineGate) -> AdapterEngine:
    """Return the engine behind a gate, loading the model if necessary."""
    engine = await gate.enter()
    if not isinstance(engine, AdapterEngine):
        raise UnknownModel(f"the model {gate.name} does not support adapters", param="model")
    return engine


async def load_checked(engine: AdapterEngine, name: str, path: Path) -> None:
    """Load an adapter that a client named; report a faulty one as an InvalidRequest."""
    try:
        await engine.load_adapter(name, path.expanduser())
    except (ModelError, InvalidConfig) as problem:
        raise InvalidRequest(problem.message, param="lora_path", hint=problem.hint) from problem


async def ensure_loaded(gate: EngineGate, name: str, path: Path) -> None:
    """Load the adapter of a created model, unless it is loaded."""
    engine = await adapter_engine(gate)
    if all(one.name != name for one in engine.adapters):
        await load_checked(engine, name, path)  # concurrent first requests share one load
