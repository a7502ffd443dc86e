"""The models of a server by name, and the gate in front of each: closed while its model loads, open, draining.

`ServedEngine` lists exactly what the server calls, so a scripted engine of a few lines can stand in for the real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tokenmill.engine.input_processor import ClientRequest, PreparedRequest
from tokenmill.engine.status import EngineStats, Health, ModelInfo, require_ready
from tokenmill.errors import InvalidRequest, UnknownModel
from tokenmill.server.body import shown
from tokenmill.server.errors import Loading
from tokenmill.types import ChatRequest, Event


class ServedEngine(Protocol):
    """The engine of one model, as the server sees it."""

    @property
    def info(self) -> ModelInfo: ...
    async def prepare(self, request: ClientRequest) -> PreparedRequest: ...
    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]: ...
    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def tokenize_chat(self, request: ChatRequest) -> list[int]: ...
    def detokenize(self, ids: list[int]) -> str: ...
    def token_texts(self, ids: list[int]) -> list[str]: ...
    async def abort(self, request_id: str) -> None: ...
    async def drain(self, timeout_s: float) -> bool: ...
    def health(self) -> Health: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


class EngineGate:
    """The way to one model's engine, or the reason why it takes no requests now."""

    def __init__(self, engine: ServedEngine | None = None) -> None:
        self._engine = engine
        self._is_draining = False

    def open(self, engine: ServedEngine) -> None:
        """The model is loaded: requests may enter."""
        self._engine = engine

    def close(self) -> None:
        """Refuse every new request from now on; running ones go on."""
        self._is_draining = True

    @property
    def engine(self) -> ServedEngine:
        """The engine, for a new request. It refuses by itself while its core is dead."""
        if self._is_draining:
            require_ready(self.health())
        if self._engine is None:
            raise Loading("the model is still loading", retry_after_s=2.0)
        return self._engine

    @property
    def info(self) -> ModelInfo:
        """Name and limits of the model."""
        return self.engine.info

    def health(self) -> Health:
        if self._is_draining:
            return Health("draining", "running requests are being finished")
        if self._engine is None:
            return Health("loading", "the model is still loading")
        return self._engine.health()

    def stats(self) -> EngineStats | None:
        return self._engine.stats() if self._engine is not None else None


class ModelRegistry:
    """All models behind one server; the first is the default for requests that need not name one."""

    def __init__(self, *gates: EngineGate, any_name: bool = False) -> None:
        """`any_name`: the default model answers to every name that no other has."""
        self._gates = gates
        self._any_name = any_name

    @property
    def default(self) -> EngineGate:
        return self._gates[0]

    def models(self) -> list[ModelInfo]:
        """All models, in the order in which they were given; a model that still loads is an error."""
        return [gate.info for gate in self._gates]

    def find(self, name: str | None, *, is_required: bool = True) -> EngineGate:
        """The gate of the model that a request names, once every model takes requests."""
        by_name = {info.name: gate for info, gate in zip(self.models(), self._gates, strict=True)}
        if name in by_name:
            return by_name[name]
        if self._any_name or (name is None and not is_required):
            return self.default
        hint = f"this server has {', '.join(by_name)}"
        if name is None:
            raise InvalidRequest("model is required", param="model", hint=hint)
        raise UnknownModel(f"the model {shown(name)} does not exist", param="model", hint=hint)
