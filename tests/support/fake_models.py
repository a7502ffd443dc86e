"""Several fake models, each behind a gate, with one loader; in the test's own event loop or behind a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.support.fake_engine import INFO, FakeEngine
from tokenmill.errors import TokenmillError
from tokenmill.server.gate import EngineGate, ModelReader, ServedEngine
from tokenmill.server.loader import ModelLoader, ModelMemory

GB = 10**9
DEVICE_BYTES = 2 * GB


class FakeSource:
    """A model that loads in a moment; counts the engines that were started and closed."""

    def __init__(self, name: str, size: int = GB, load_s: float = 0.01) -> None:
        self.info = replace(INFO, name=name)
        self.size = size
        self.load_s = load_s
        self.failure: TokenmillError | None = None
        self.engines: list[FakeEngine] = []
        self.num_closed = 0
        self.delay_s = 0.0
        self.offers: list[int | None] = []
        self.device = "cpu"

    async def read(self) -> ModelReader:
        return FakeEngine(info=self.info)

    def plan(self, available_bytes: int | None, num_models: int) -> ModelMemory:
        self.offers.append(available_bytes)
        fits = available_bytes is None or self.size <= available_bytes
        there = DEVICE_BYTES if available_bytes is None else available_bytes
        problem = None if fits else "it is too large"
        return ModelMemory(self.device, there, self.size, self.size, problem=problem)

    def held(self) -> ModelMemory:
        return self.plan(None, 1)

    async def start(self, memory: ModelMemory | None) -> ServedEngine:
        await asyncio.sleep(self.load_s)
        if self.failure is not None:
            raise self.failure
        engine = CountedEngine(self)
        self.engines.append(engine)
        return engine

    @property
    def num_alive(self) -> int:
        return len(self.engines) - self.num_closed


class CountedEngine(FakeEngine):
    """An engine that checks that no request is running when it is closed."""

    def __init__(self, source: FakeSource) -> None:
        super().__init__(info=source.info, delay_s=source.delay_s)
        self.source = source

    async def close(self) -> None:
        assert not self.running, "closed while it ran"
        self.source.num_closed += 1
        await super().close()


def fake_models(
    *names: str, memory_bytes: int | None = None, max_loaded: int | None = None
) -> tuple[ModelLoader, dict[str, EngineGate], dict[str, FakeSource]]:
    loader = ModelLoader(memory_bytes=memory_bytes, max_loaded=max_loaded)
    gates = {name: EngineGate(name=name) for name in names}
    sources = {name: FakeSource(name) for name in names}
    for name in names:
        loader.add(gates[name], sources[name])
    return loader, gates, sources
