"""Variants: model names that are served by another model's engine.

A variant is a name, a description, and a function that changes every request. A created model (`tokenmill create`,
/api/create) adds its system prompt, first messages and chat template to its requests; an adapter's variant adds the
adapter's name. The requests then go to the engine of the parent model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.engine.customized import customized, own_adapter
from tokenmill.engine.input_processor import ClientRequest, PreparedRequest
from tokenmill.engine.status import EngineStats, Health, ModelInfo
from tokenmill.server.adapters import ensure_loaded
from tokenmill.server.gate import EngineGate, ServedEngine
from tokenmill.server.ollama.options import sampling_settings
from tokenmill.store import Manifest
from tokenmill.types import ChatRequest, Event

Change = Callable[[ClientRequest], ClientRequest]


async def nothing() -> None:
    """Do nothing before a request."""


class Variant:
    """A model name that is served by the engine of `parent`. It has the attributes of a gate that requests need."""

    def __init__(
        self, parent: EngineGate, info: ModelInfo, change: Change, before: Callable[[], Awaitable[None]] = nothing
    ) -> None:
        """`before`: awaited before each request is prepared."""
        self.parent = parent
        self.info = info
        self.engine: ServedEngine = VariantEngine(parent.engine, info, change, before)

    @property
    def name(self) -> str:
        return self.info.name

    def keep(self, keep_alive_s: float | None) -> None:
        self.parent.keep(keep_alive_s)


FoundModel = EngineGate | Variant


def gate_of(model: FoundModel) -> EngineGate:
    """Return the gate that a model's requests go through."""
    return model.parent if isinstance(model, Variant) else model


def created_variant(parent: EngineGate, manifest: Manifest) -> Variant:
    """Return the variant of a created model. `parent`: the gate of the model that it was created from."""
    custom, base = manifest.custom, parent.info
    assert custom is not None
    adapter = own_adapter(custom)

    def change(request: ClientRequest) -> ClientRequest:
        sampling_settings(custom.parameters, max_context=base.max_context)  # refuses a larger context than the base's
        if isinstance(request, ChatRequest):
            return customized(request, custom)
        return msgspec.structs.replace(request, adapter=request.adapter or adapter)

    async def load_own_adapter() -> None:
        if adapter is not None:
            await ensure_loaded(parent, adapter, Path(custom.adapter))

    info = replace(
        base,
        name=manifest.name,
        created=int(manifest.pulled_at_s),
        chat_template=custom.template or base.chat_template,
        defaults={**base.defaults, **sampling_settings(custom.parameters, max_context=None)},
        manifest=manifest,
    )
    return Variant(parent, info, change, load_own_adapter)


def adapter_variant(parent: EngineGate, base: ModelInfo, adapter: str) -> Variant:
    """Return the variant BASE:ADAPTER of a served model and one of its adapters."""

    def change(request: ClientRequest) -> ClientRequest:
        return msgspec.structs.replace(request, adapter=adapter)

    return Variant(parent, replace(base, name=f"{parent.name}:{adapter}", adapters=()), change)


def weights_of(path: Path) -> tuple[Path, ...]:
    """Return the resolved weight files of a model, which are equal for models that share weights."""
    return tuple(sorted(file.resolve() for file in ([path] if path.is_file() else path.glob("*.safetensors"))))


class VariantEngine:
    """Passes changed requests to the engine of another model."""

    def __init__(
        self, engine: ServedEngine, info: ModelInfo, change: Change, before: Callable[[], Awaitable[None]]
    ) -> None:
        self.info = info
        self._engine = engine
        self._change = change
        self._before = before

    def _changed_chat(self, request: ChatRequest) -> ChatRequest:
        changed = self._change(request)
        assert isinstance(changed, ChatRequest)
        return changed

    async def prepare(self, request: ClientRequest) -> PreparedRequest:
        await self._before()
        return await self._engine.prepare(self._change(request))

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        return self._engine.tokenize_chat(self._changed_chat(request))

    def chat_text(self, request: ChatRequest) -> str:
        return self._engine.chat_text(self._changed_chat(request))

    def submit(self, request: PreparedRequest) -> AsyncIterator[Event]:
        return self._engine.submit(request)

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return self._engine.tokenize(text, add_special_tokens, parse_special)

    def detokenize(self, ids: list[int]) -> str:
        return self._engine.detokenize(ids)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        return self._engine.token_bytes(ids)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    def num_generated(self, request_id: str) -> int:
        return self._engine.num_generated(request_id)

    async def drain(self, timeout_s: float) -> bool:
        return await self._engine.drain(timeout_s)

    def is_idle(self) -> bool:
        return self._engine.is_idle()

    def health(self) -> Health:
        return self._engine.health()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def replicas(self) -> list[dict[str, Any]]:
        return self._engine.replicas()

    async def close(self) -> None:
        """Do nothing: the engine belongs to the parent model."""
