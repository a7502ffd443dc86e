"""Runs cores in threads that exchange blocks over sockets, and returns their answers while a test disturbs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from tests.support.every_kind_of_request import answer
from tokenmill import AsyncEngine
from tokenmill.config import EngineConfig
from tokenmill.engine.build import build_core
from tokenmill.engine.core import EngineCore
from tokenmill.engine.core_client import ThreadCoreClient
from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.fleet.router import PrefixRouter
from tokenmill.kv.traffic import BlockTraffic
from tokenmill.types import PromptRequest, SequenceOutput

Scene = Callable[[AsyncEngine], Awaitable[None]]
LIMIT_S = 120.0
PAUSE_S = 0.004
NUMBERS = count()  # makes each core's address unique


@pytest.fixture(autouse=True)
def always_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cores always fetch blocks. Computing these small models may be faster than fetching, which is not what is
    tested."""
    monkeypatch.setattr(BlockTraffic, "seconds", lambda self, found: 0.0)
    monkeypatch.setattr("tokenmill.scheduler.fetches.LATE_S", 60.0)
    monkeypatch.setattr("tokenmill.scheduler.fetches.DEFAULT_LIMIT_S", 60.0)
    monkeypatch.setattr("tokenmill.engine.moves.EMPTY_TIMEOUT_S", 60.0)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cores pause before each step: streams of these small models would end before they can be moved."""
    step = EngineCore.step

    def unhurried_step(core: EngineCore) -> list[SequenceOutput]:
        time.sleep(PAUSE_S)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", unhurried_step)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, since paths of Unix sockets are limited."""
    with TemporaryDirectory(prefix="tm-") as name:
        yield Path(name)


def maker(frontend: ModelFrontend, folder: Path, index: int) -> MakeClient:
    """Make clients of cores in threads; each core has its own socket."""

    def make() -> ThreadCoreClient:
        address = str(folder / f"{index}.{next(NUMBERS)}")
        return ThreadCoreClient(lambda: build_core(frontend.config, frontend.model_path, block_address=address))

    return make


def run(config: EngineConfig, folder: Path, requests: list[ClientRequest], num: int, scene: Scene) -> tuple[Any, Any]:
    """Return the answers and the statistics of `num` cores; `scene` runs at the same time as the requests."""
    frontend = load_frontend(config)

    async def scenario() -> tuple[Any, Any]:
        makers = [maker(frontend, folder, index) for index in range(num)]
        engine = AsyncEngine(frontend, makers, router=PrefixRouter(num))
        await engine.open()
        try:
            answers = [asyncio.create_task(answer(engine, one)) for one in requests]
            happening = asyncio.ensure_future(scene(engine))
            found = await asyncio.gather(*answers, return_exceptions=True)
            await happening
            return found, engine.stats()
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


async def nothing(engine: AsyncEngine) -> None:
    pass


def with_seeds(requests: list[ClientRequest]) -> list[ClientRequest]:
    return [
        msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, seed=number))
        if isinstance(one, PromptRequest) and one.params.seed is None
        else one
        for number, one in enumerate(requests)
    ]
