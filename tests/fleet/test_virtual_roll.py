"""A rolling restart of three virtual cores under a load of conversations: nothing fails, nothing changes, and clients
hardly notice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from tests.fleet.test_virtual_fleet import prompt
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.bench.measures import percentile
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import VirtualDevice, run_virtually, virtual_engine
from tokenmill.types import PromptRequest

DEVICE = VirtualDevice(
    step_s=0.004, token_s=0.4e-3, num_blocks=20_000, max_running=32, token_budget=512, start_s=2.0, block_s=0.5e-3
)
NUM_CONVERSATIONS, BEFORE_S, AFTER_S = 8, 16.0, 10.0


@dataclass(frozen=True)
class VirtualTurn:
    began_s: float
    first_s: float
    num_prompt: int
    num_cached: int


@dataclass(frozen=True)
class ClientView:
    """What clients saw of some turns."""

    ttft_p99_s: float
    cached: float

    @classmethod
    def within(cls, turns: list[VirtualTurn], begin_s: float, end_s: float) -> ClientView:
        some = [turn for turn in turns if begin_s <= turn.began_s < end_s]
        cached = sum(turn.num_cached for turn in some) / sum(turn.num_prompt for turn in some)
        return cls(percentile([turn.first_s for turn in some], 99), cached)


async def converse(engine: AsyncEngine, number: int, turns: list[VirtualTurn], answers: dict[str, list[int]]) -> None:
    """Hold one conversation of six turns after another until cancelled."""
    loop, rng = asyncio.get_running_loop(), random.Random(number)
    for round_ in range(1 << 30):
        ids = prompt(rng, 300)
        for turn in range(6):
            name, began_s, first_s, cached = f"{number} {round_} {turn}", loop.time(), 0.0, 0
            params = SamplingParams(max_tokens=30, seed=turn)
            answers[name] = []
            async for event in engine.submit(PromptRequest(prompt=ids, params=params, request_id=name)):
                first_s = first_s or loop.time() - began_s
                answers[name] += event.token_ids
                cached = event.usage.cached_tokens if event.usage is not None else cached
            turns.append(VirtualTurn(began_s, first_s, len(ids), cached))
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            ids = [*ids, *answers[name], *prompt(rng, 40)]


def conversations(*, rolls: bool) -> tuple[dict[str, list[int]], list[ClientView]]:
    """What was answered, and what clients saw before, during and after a rolling restart."""

    async def scenario() -> tuple[dict[str, list[int]], list[ClientView]]:
        loop, engine = asyncio.get_running_loop(), virtual_engine(DEVICE, 3, PrefixRouter(3), gives_blocks=True)
        await engine.open()
        turns: list[VirtualTurn] = []
        answers: dict[str, list[int]] = {}
        tasks = [asyncio.create_task(converse(engine, number, turns, answers)) for number in range(NUM_CONVERSATIONS)]
        await asyncio.sleep(BEFORE_S)
        rolling_s = loop.time()
        if rolls:
            assert await engine.restart_replicas() == [0, 1, 2]
        rolled_s = loop.time()
        await asyncio.sleep(AFTER_S)
        assert not any(task.done() for task in tasks), "no conversation failed"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        times = (4.0, rolling_s, rolled_s, rolled_s + AFTER_S)
        seen = [ClientView.within(turns, *times[place : place + 2]) for place in range(3)] if rolls else []
        await engine.close()
        return answers, seen

    return run_virtually(scenario())


def test_a_rolling_restart_fails_nothing_and_hardly_shows() -> None:
    expected, _ = conversations(rolls=False)
    found, (before, during, after) = conversations(rolls=True)
    both = [name for name in found if len(found[name]) == len(expected.get(name, ())) == 30]
    assert len(both) > 100 and all(found[name] == expected[name] for name in both)
    # Conversations that rest when their core ends have lost their cache: their next prompt is computed whole.
    assert during.ttft_p99_s <= 4 * before.ttft_p99_s and after.ttft_p99_s <= 1.5 * before.ttft_p99_s
    assert after.cached >= 0.8 * before.cached
