"""Prompts and answers on cores of their own, on a virtual clock: what that is worth, without a machine that all of them
share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.fleet.test_virtual_fleet import ask, prompt
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.bench.measures import percentile
from tokenmill.engine.roles import Role
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import VirtualDevice, run_virtually, virtual_engine
from tokenmill.types import PromptRequest

# Steps of eight streams take 7 ms, a prompt of 4,096 tokens 1.6 s, and a block half a millisecond.
DEVICE = VirtualDevice(
    step_s=0.004, token_s=0.4e-3, num_blocks=20_000, max_running=32, token_budget=512, block_s=0.5e-3
)
NUM_STREAMS, LENGTH, NUM_PROMPTS = 8, 4096, 3
SPLIT: tuple[Role, ...] = ("prefill", "decode")


async def note_times(engine: AsyncEngine, number: int, rng: random.Random, times: list[float]) -> None:
    """Note when the tokens of a stream come."""
    params = SamplingParams(max_tokens=4000, seed=number)
    asked = PromptRequest(prompt=prompt(rng, 50), params=params, request_id=f"stream {number}")
    async for _ in engine.submit(asked):
        times += [asyncio.get_running_loop().time()]


async def gaps_beside_prompts(roles: Sequence[Role]) -> tuple[float, float, list[int]]:
    """Return the 99th percentile of the gaps of streams alone and beside long prompts, and the tokens of the prompts
    that each core computed."""
    loop, rng = asyncio.get_running_loop(), random.Random(4)
    engine = virtual_engine(DEVICE, 2, PrefixRouter(2), roles=roles, gives_blocks=True)
    await engine.open()
    found: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    streams = [asyncio.create_task(note_times(engine, number, rng, times)) for number, times in enumerate(found)]
    await asyncio.sleep(2.0)
    began_s = loop.time()
    computed = [core["step_tokens"] for core in engine.replicas()]
    for number in range(NUM_PROMPTS):
        await ask(engine, prompt(rng, LENGTH), f"prompt {number}", max_tokens=1)
    ended_s = loop.time()
    computed = [core["step_tokens"] - before for core, before in zip(engine.replicas(), computed, strict=True)]
    decoding = [core["role"] != "prefill" for core in engine.replicas()]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await engine.close()
    gaps = [(after, after - before) for times in found for before, after in pairwise(times)]
    alone = percentile([gap for at, gap in gaps if 1.0 < at <= began_s], 99)
    beside = [gap for at, gap in gaps if began_s < at <= ended_s]
    computed = [number - len(beside) * is_decoding for number, is_decoding in zip(computed, decoding, strict=True)]
    return alone, percentile(beside, 99), computed


def test_prompts_on_a_core_of_their_own_hold_up_no_stream() -> None:
    alone, beside, computed = run_virtually(gaps_beside_prompts(SPLIT))
    assert beside <= 1.2 * alone
    assert computed[0] == NUM_PROMPTS * LENGTH and computed[1] <= NUM_PROMPTS * DEVICE.block_size + 2 * NUM_STREAMS
    alone, beside, _ = run_virtually(gaps_beside_prompts(("any", "any")))
    assert beside >= 2 * alone


@pytest.mark.parametrize("dying", [0, 1])
def test_either_core_may_die_while_blocks_are_on_their_way(dying: int) -> None:
    async def scenario(kills: bool) -> list[list[int]]:
        rng, engine = random.Random(5), virtual_engine(DEVICE, 2, PrefixRouter(2), roles=SPLIT, gives_blocks=True)
        await engine.open()
        asked = [asyncio.create_task(ask(engine, prompt(rng, 1000), str(number))) for number in range(6)]
        while kills and not all(task.done() for task in asked):
            await asyncio.sleep(0.33)
            client = engine._replicas.all[dying].supervisor._client
            if client is not None and engine.stats().restarts < 5:
                client.kill()
        found = [tokens for tokens, _ in await asyncio.gather(*asked)]
        assert not kills or engine.stats().restarts >= 2
        await engine.close()
        return found

    assert run_virtually(scenario(True)) == run_virtually(scenario(False))
