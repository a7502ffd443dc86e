"""Requests that move between cores with their blocks: drains, rolling restarts, other cores' caches. The same tokens as
if nothing had been, and hardly anything is computed twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cores_with_sockets import (
    LIMIT_S,
    Scene,
    always_fetch,
    folder,
    maker,
    nothing,
    run,
    unhurried,
    with_seeds,
)
from tests.support.every_kind_of_request import answer, assert_same, config_of, mixed_requests, special_requests
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.fleet.router import PrefixRouter
from tokenmill.types import PromptRequest

__all__ = ["always_fetch", "folder", "unhurried"]  # fixtures


def streams(number: int, num_tokens: int) -> list[ClientRequest]:
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True)
    return [
        PromptRequest(prompt=[1, *range(20 + place, 90 + place)], params=params, request_id=f"stream {place}")
        for place in range(number)
    ]


async def until_more(engine: AsyncEngine, num_tokens: int) -> None:
    """Wait until so many more tokens are computed, or all requests are over."""
    while not engine.stats().step_tokens:
        await asyncio.sleep(0.001)
    wanted = engine.stats().step_tokens + num_tokens
    while engine.stats().step_tokens < wanted and not engine.is_idle:
        await asyncio.sleep(0.001)


def to_and_fro(times: int) -> Scene:
    async def scene(engine: AsyncEngine) -> None:
        for turn in range(times):
            await until_more(engine, 90)
            engine.drain_replica(turn % 2, False)
            engine.drain_replica(1 - turn % 2)
            while engine.replicas()[1 - turn % 2]["requests"]:
                await asyncio.sleep(0.001)

    return scene


@pytest.mark.usefixtures("unhurried")
def test_streams_move_with_their_blocks(stories_dir: Path, folder: Path) -> None:
    config = config_of(stories_dir, speculate="off")
    asked = with_seeds(streams(8, 320))
    expected, alone = run(config, folder, asked, 2, nothing)
    found, moved = run(config, folder, asked, 2, to_and_fro(10))
    assert_same(asked, found, expected)
    assert moved.resumed >= 4 and moved.fetched_tokens > 0
    # Each move computes what is behind the last full block, and the last token, again.
    assert moved.step_tokens <= alone.step_tokens + moved.resumed * 17 + 8 * 71


def test_a_rolling_restart_changes_no_answer(stories_dir: Path, folder: Path) -> None:
    """Every kind of request, while all cores are started anew, one after another."""
    config = config_of(stories_dir)
    asked = with_seeds([*special_requests(), *mixed_requests(12), *streams(2, 200)])
    expected, _ = run(config, folder, asked, 2, nothing)

    async def roll(engine: AsyncEngine) -> None:
        await until_more(engine, 300)
        assert await engine.restart_replicas() == [0, 1]

    found, stats = run(config, folder, asked, 2, roll)
    assert_same(asked, found, expected)
    assert stats.resumed > 0 and stats.fetched_tokens > 0


def test_another_cores_cache_is_used(stories_dir: Path, folder: Path) -> None:
    """A prompt whose beginning is cached by a core that is kept free: the other one takes its blocks."""
    config = config_of(stories_dir, speculate="off")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    again = PromptRequest(prompt=[1, *range(30, 330)], params=params, request_id="again")
    frontend = load_frontend(config)

    async def scenario() -> None:
        makers = [maker(frontend, folder, index) for index in range(2)]
        engine = AsyncEngine(frontend, makers, router=PrefixRouter(2))
        await engine.open()
        try:
            engine.drain_replica(1)
            first = await answer(engine, again)
            engine.drain_replica(1, False)
            engine.drain_replica(0)
            assert await answer(engine, again) == first
            assert engine.stats().fetched_tokens == 288, "all of its full blocks"
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
