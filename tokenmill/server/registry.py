"""The models of a server by name, and the gate in front of each: closed while its model loads, open, draining.

A model that was created from a served one (`tokenmill create`, /api/create) answers under its own name: its requests
are given its system prompt, first messages and chat template, and go to the engine of the model it was made from.

`ServedEngine` lists exactly what the server calls, so a scripted engine of a few lines can stand in for the real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tokenmill.engine.customized import customized
from tokenmill.engine.input_processor import ClientRequest, PreparedRequest
from tokenmill.engine.status import EngineStats, Health, ModelInfo, require_ready
from tokenmill.errors import InvalidRequest, UnknownModel
from tokenmill.server.body import shown
from tokenmill.server.errors import Loading
from tokenmill.server.ollama.options import sampling_settings
from tokenmill.store import Manifest, Store, find_created
from tokenmill.types import ChatRequest, Event


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

    def listed(self) -> list[ModelInfo]:
        """All models, and those that were created from them, by name."""
        found = (manifest for manifest in Store().manifests() if manifest.custom is not None)
        gates = (self._gate_of_created(manifest) for manifest in found)
        return [*self.models(), *(gate.info for gate in gates if gate is not None)]

    def find(self, name: str | None, *, is_required: bool = True) -> EngineGate:
        """The gate of the model that a request names, once every model takes requests."""
        by_name = {info.name: gate for info, gate in zip(self.models(), self._gates, strict=True)}
        if name in by_name:
            return by_name[name]
        created = None if name is None else find_created(name, Store())
        if created is not None and (gate := self._gate_of_created(created)) is not None:
            return gate
        if self._any_name or (name is None and not is_required):
            return self.default
        hint = f"this server has {', '.join(by_name)}"
        if name is None:
            raise InvalidRequest("model is required", param="model", hint=hint)
        raise UnknownModel(f"the model {shown(name)} does not exist", param="model", hint=hint)

    def _gate_of_created(self, manifest: Manifest) -> EngineGate | None:
        """A gate for a created model, if the weights that it rests on are served here."""
        weights = weights_of(Store().path_of(manifest))
        for gate in self._gates:
            path = gate.info.path
            if path is not None and weights_of(path) == weights:
                return EngineGate(CreatedEngine(gate.engine, manifest))
        return None


# ── created models ─────────────────────────────────────────────────────────────────────────────────────


def weights_of(path: Path) -> tuple[Path, ...]:
    """The files that a model's weights are in; the same for all models that share them."""
    return tuple(sorted(file.resolve() for file in ([path] if path.is_file() else path.glob("*.safetensors"))))


class CreatedEngine:
    """The engine of a created model: that of the model it was made from, asked with the created one's own words."""

    def __init__(self, engine: ServedEngine, manifest: Manifest) -> None:
        assert manifest.custom is not None
        self._engine = engine
        self._custom = manifest.custom
        base = engine.info
        self.info = replace(
            base,
            name=manifest.name,
            created=int(manifest.pulled_at_s),
            chat_template=manifest.custom.template or base.chat_template,
            defaults=sampling_settings(manifest.custom.parameters, max_context=None),
            manifest=manifest,
        )

    async def prepare(self, request: ClientRequest) -> PreparedRequest:
        sampling_settings(self._custom.parameters, max_context=self.info.max_context)  # it may want a larger context
        return await self._engine.prepare(
            customized(request, self._custom) if isinstance(request, ChatRequest) else request
        )

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        return self._engine.tokenize_chat(customized(request, self._custom))

    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        return self._engine.submit(request)

    def chat_text(self, request: ChatRequest) -> str:
        return self._engine.chat_text(customized(request, self._custom))

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return self._engine.tokenize(text, add_special_tokens, parse_special)

    def detokenize(self, ids: list[int]) -> str:
        return self._engine.detokenize(ids)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        return self._engine.token_bytes(ids)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def drain(self, timeout_s: float) -> bool:
        return await self._engine.drain(timeout_s)

    def health(self) -> Health:
        return self._engine.health()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        """Leave the engine to the model it was made from."""
