"""The gate in front of one model's engine, and its states.

    unloaded ──request──► loading ──► loaded ──► unloading ──► unloaded
                             └── failed: all waiting requests get the reason; a request after `RETRY_S` tries again

    draining (in any of these states): the server stops, and new requests are refused

Code that holds a gate need not know its state. `info` is available once the model's files were read, whether the model
is in memory or not; `engine` is a handle that stays the same over any number of loads. Its `prepare` waits for the
model: all waiting requests share one load, which continues when the client of one of them disconnects.

`ServedEngine` lists exactly what the server calls, so tests can replace the engine by a script of a few lines.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, Protocol

from tokenmill.engine.input_processor import ClientRequest, PreparedRequest
from tokenmill.engine.status import EngineStats, Health, ModelInfo, require_ready
from tokenmill.errors import Overloaded, TokenmillError
from tokenmill.server.errors import Loading
from tokenmill.types import ChatRequest, Event

MAX_WAITING = 4096  # requests that may wait for one load; the queue of a loaded engine has its own limit
GateState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class ServedEngine(Protocol):
    """The engine of one model, as the server sees it."""

    @property
    def info(self) -> ModelInfo: ...
    async def prepare(self, request: ClientRequest) -> PreparedRequest: ...
    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]: ...
    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...
    def tokenize_chat(self, request: ChatRequest) -> list[int]: ...
    def chat_text(self, request: ChatRequest) -> str: ...
    def detokenize(self, ids: list[int]) -> str: ...
    def token_bytes(self, ids: list[int]) -> list[bytes]: ...
    async def abort(self, request_id: str) -> None: ...
    def num_generated(self, request_id: str) -> int: ...
    async def drain(self, timeout_s: float) -> bool: ...
    def is_idle(self) -> bool: ...
    def health(self) -> Health: ...
    def stats(self) -> EngineStats: ...
    def replicas(self) -> list[dict[str, Any]]: ...
    async def close(self) -> None: ...


class ModelReader(Protocol):
    """A model without its weights: its description, tokenizer and chat template, available while it is unloaded."""

    @property
    def info(self) -> ModelInfo: ...
    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...
    def tokenize_chat(self, request: ChatRequest) -> list[int]: ...
    def chat_text(self, request: ChatRequest) -> str: ...
    def detokenize(self, ids: list[int]) -> str: ...
    def token_bytes(self, ids: list[int]) -> list[bytes]: ...


class NotRead(Loading):
    """The model's files were not read yet. Await `read`, then repeat the call that raised this."""

    def __init__(self, name: str, read: Callable[[], Awaitable[None]]) -> None:
        super().__init__(f"the files of the model {name} were not read yet")
        self.read = read


class EngineGate:
    """The handle of one model: its engine while it is in memory, and otherwise its state or why loading failed."""

    def __init__(
        self,
        engine: ServedEngine | None = None,
        *,
        name: str | None = None,
        aliases: tuple[str, ...] = (),
        is_pinned: bool = False,
        keep_alive_s: float | None = None,
        is_added: bool = False,
    ) -> None:
        """`is_pinned`: never unloaded, neither to make room nor for being idle. `keep_alive_s`: unload the model after
        being idle for so long; None: only when its memory is needed. `is_added`: a client added it to the running
        server."""
        self.aliases = aliases
        self.is_pinned = is_pinned
        self.is_added = is_added
        self.keep_alive_s = keep_alive_s
        self.state: GateState = "unloaded" if engine is None else "loaded"
        self.failure: TokenmillError | None = None
        self.num_waiting = 0
        self.last_used_s = self.loaded_at_s = time.monotonic()
        self.engine: ServedEngine = GatedEngine(self)
        # Set by the loader of this gate; a gate without a loader is opened by whoever created it.
        self.load: Callable[[], Awaitable[None]] | None = None
        self.read: Callable[[], Awaitable[None]] | None = None
        self._name = name
        self._engine = engine
        self._reader: ModelReader | None = engine
        self._is_draining = False
        self._has_opened = engine is not None

    # ── the model ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def name(self) -> str:
        """Return the name that the model is served under. Without a configured name it is known once the engine is."""
        if self._name is not None:
            return self._name
        return self.reader.info.name

    @property
    def label(self) -> str:
        """The name for logs and metrics, in any state; empty while it is unknown."""
        return self._name or (self._reader.info.name if self._reader is not None else "")

    @property
    def info(self) -> ModelInfo:
        """The model's name and limits; NotRead or Loading while its files were not read."""
        return self.reader.info

    @property
    def reader(self) -> ModelReader:
        """The engine, or the reader of an unloaded model."""
        self.require_open()
        if self._reader is None:
            if self.read is not None:
                raise NotRead(self.name, self.read)
            raise Loading("the model is still loading", retry_after_s=2.0)
        return self._reader

    def require_open(self) -> None:
        """Refuse a new request while the server stops."""
        if self._is_draining:
            require_ready(self.health())

    @property
    def known(self) -> ModelInfo | None:
        """Return the model's description in any state; None until its files were read."""
        return None if self._reader is None else self._reader.info

    @property
    def loaded(self) -> ServedEngine | None:
        """The engine itself, if the model is in memory. It may be unloaded at the next await: do not keep it."""
        return self._engine

    # ── states ─────────────────────────────────────────────────────────────────────────────────────────

    def describe(self, reader: ModelReader) -> None:
        """Set the reader, once the model's files were read."""
        self._reader = self._engine or reader

    def open(self, engine: ServedEngine) -> None:
        """Admit requests: the model is loaded."""
        self._engine = self._reader = engine
        self._has_opened = True
        self.state, self.failure = "loaded", None
        self.last_used_s = self.loaded_at_s = time.monotonic()

    def shut(self, state: GateState = "unloaded", failure: TokenmillError | None = None) -> None:
        """Make requests wait: the model is no longer in memory. Its reader stays."""
        self._engine = None
        self.state, self.failure = state, failure

    def close(self) -> None:
        """Refuse every new request from now on; running ones continue."""
        self._is_draining = True

    def keep(self, keep_alive_s: float | None) -> None:
        """Set how long the model stays loaded while idle; the newest request decides."""
        if not self.is_pinned:
            self.keep_alive_s = keep_alive_s

    async def enter(self) -> ServedEngine:
        """Load the model if necessary; return its engine for a new request."""
        while self._engine is None or self.state != "loaded":
            if self._is_draining:
                break
            if self.load is None:
                raise Loading("the model is still loading", retry_after_s=2.0)
            if self.num_waiting >= MAX_WAITING:
                raise Overloaded("too many requests are waiting for the model", retry_after_s=2.0)
            self.num_waiting += 1
            try:
                await self.load()
            finally:
                self.num_waiting -= 1
        self.require_open()
        assert self._engine is not None
        self.last_used_s = time.monotonic()
        return self._engine

    @property
    def is_idle(self) -> bool:
        """Return whether no request is running and none waits for the model."""
        return self.num_waiting == 0 and (self._engine is None or self._engine.is_idle())

    def health(self) -> Health:
        if self._is_draining:
            return Health("draining", "the server is stopping; running requests are being finished")
        if self._engine is not None:
            return self._engine.health()
        if self.has_started:
            return Health("ready", "the model is loaded on the first request")
        return Health("loading", "the model is still loading")

    @property
    def has_started(self) -> bool:
        """Return whether the model was loaded once, or can be loaded on request."""
        return self._has_opened or (self.load is not None and self.state != "loading")

    def stats(self) -> EngineStats | None:
        return self._engine.stats() if self._engine is not None else None


class GatedEngine:
    """A stable handle of the engine behind a gate, over any number of loads. Requests wait until the model is loaded;
    calls that need no weights do not."""

    def __init__(self, gate: EngineGate) -> None:
        self._gate = gate

    @property
    def info(self) -> ModelInfo:
        return self._gate.info

    async def prepare(self, request: ClientRequest) -> PreparedRequest:
        engine = await self._gate.enter()
        return await engine.prepare(request)  # from here to `submit` the engine is not idle, so it is not unloaded

    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        engine = self._gate.loaded
        if engine is None:
            raise Loading("the model was unloaded meanwhile", retry_after_s=1.0)
        return engine.submit(request)

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return self._gate.reader.tokenize(text, add_special_tokens, parse_special)

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        return self._gate.reader.tokenize_chat(request)

    def chat_text(self, request: ChatRequest) -> str:
        return self._gate.reader.chat_text(request)

    def detokenize(self, ids: list[int]) -> str:
        return self._gate.reader.detokenize(ids)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        return self._gate.reader.token_bytes(ids)

    async def abort(self, request_id: str) -> None:
        if (engine := self._gate.loaded) is not None:
            await engine.abort(request_id)

    def num_generated(self, request_id: str) -> int:
        return 0 if (engine := self._gate.loaded) is None else engine.num_generated(request_id)

    async def drain(self, timeout_s: float) -> bool:
        engine = self._gate.loaded
        return engine is None or await engine.drain(timeout_s)

    def is_idle(self) -> bool:
        return self._gate.is_idle

    def health(self) -> Health:
        return self._gate.health()

    def stats(self) -> EngineStats:
        return self._gate.stats() or EngineStats()

    def replicas(self) -> list[dict[str, Any]]:
        return [] if (engine := self._gate.loaded) is None else engine.replicas()

    async def close(self) -> None:
        if (engine := self._gate.loaded) is not None:
            await engine.close()
