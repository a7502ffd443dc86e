"""The server's side of the engine: what it calls, and where the engine stands while it loads, drains or dies.

`Engine` lists exactly what the server uses, so a scripted engine of a few lines can stand in for the real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from tokenmill.engine.status import EngineStats, Health, ModelInfo
from tokenmill.errors import Draining
from tokenmill.server.errors import Loading
from tokenmill.types import ChatRequest, EmbedRequest, Event, PromptRequest

NativeRequest = ChatRequest | PromptRequest | EmbedRequest


class ServedEngine(Protocol):
    @property
    def info(self) -> ModelInfo: ...
    def submit(self, request: NativeRequest) -> AsyncIterator[Event]: ...
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
    """Where requests enter: closed while the model loads, open, and closed for good once draining."""

    def __init__(self, engine: ServedEngine | None = None) -> None:
        self._engine = engine
        self._is_draining = False
        self._info: ModelInfo | None = None

    @property
    def info(self) -> ModelInfo:
        """Facts of the model, asked for once: every request needs them."""
        if self._info is None:
            self._info = self.engine.info
        return self._info

    @property
    def engine(self) -> ServedEngine:
        """The engine, or the reason why it cannot be asked now."""
        if self._is_draining:
            raise Draining("the server is shutting down", retry_after_s=5.0)
        if self._engine is None:
            raise Loading("the model is still loading", retry_after_s=2.0)
        return self._engine

    def open(self, engine: ServedEngine) -> None:
        self._engine = engine

    def close(self) -> None:
        """From now on every new request is refused; running ones go on."""
        self._is_draining = True

    def health(self) -> Health:
        if self._is_draining:
            return Health("draining", "running requests are being finished")
        if self._engine is None:
            return Health("loading", "the model is still loading")
        return self._engine.health()

    def stats(self) -> EngineStats | None:
        return self._engine.stats() if self._engine is not None else None
