"""What is made to hurt is refused in time, in bounded memory, and hurts nobody else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hostile_schemas import HOSTILE
from tests.support.timing import SOON_S
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.config.engine import OpsConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.errors import InvalidRequest
from tokenmill.guided.compile import compile_grammar
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided, SamplingParams
from tokenmill.types import PromptRequest

MAX_SECONDS = 2.0
MAX_GROWTH_BYTES = 400 << 20
GOLDEN = PromptRequest(prompt="Once upon a time", params=SamplingParams(temperature=0.0, max_tokens=40))


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_in_time(name: str, vocabulary: Vocabulary) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest):
        compile_grammar(HOSTILE[name], vocabulary)
    assert time.process_time() - began < MAX_SECONDS


async def text_of(engine: AsyncEngine, asked: PromptRequest) -> str:
    return "".join([event.text async for event in engine.submit(asked)])


def constrained(guided: Guided) -> PromptRequest:
    return PromptRequest(prompt="Answer:", params=SamplingParams(guided=guided, max_tokens=30))


async def besiege(engine: AsyncEngine) -> dict[str, Any]:
    expected = await text_of(engine, GOLDEN)
    await text_of(engine, constrained(Guided("json_object")))  # loads the vocabulary
    core = psutil.Process(engine.core.pid)
    before, seen = core.memory_info().rss, {"slowest": 0.0, "goldens": 0}
    for guided in HOSTILE.values():
        golden = asyncio.create_task(text_of(engine, GOLDEN))
        began = time.monotonic()
        with pytest.raises(InvalidRequest):
            await text_of(engine, constrained(guided))
        seen["slowest"] = max(seen["slowest"], time.monotonic() - began)
        assert await golden == expected
        seen["goldens"] += 1
    seen["growth"] = core.memory_info().rss - before
    seen["same process"] = psutil.pid_exists(engine.core.pid) and engine.health().state == "ready"
    return seen


@pytest.mark.slow
def test_a_siege_leaves_the_engine_as_it_was(stories_dir: Path) -> None:
    async def siege() -> dict[str, Any]:
        config = EngineConfig(ModelConfig(model=str(stories_dir)), ops=OpsConfig(backend="reference", threads=1))
        engine = await AsyncEngine.start(config)
        pid = engine.core.pid
        try:
            seen = await besiege(engine)
            assert engine.core.pid == pid
            return seen
        finally:
            await engine.close()

    seen = asyncio.run(siege())
    assert seen["goldens"] >= 20 and seen["same process"]
    assert seen["slowest"] < SOON_S
    assert seen["growth"] < MAX_GROWTH_BYTES
