"""Several cores on a virtual clock: where requests go, and that none is lost when cores die.

All but the model is the real thing, and the same every time, however busy the machine is."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.engine.core_supervisor import KILLED_AFTER_S, STALLED_AFTER_S
from tokenmill.engine.messages import Failed
from tokenmill.engine.replicas import MAX_DEATHS
from tokenmill.errors import InvalidRequest, RequestFailed
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import END_TOKEN, FIRST_TOKEN, VirtualDevice, run_virtually, virtual_engine
from tokenmill.types import PromptRequest

DEVICE = VirtualDevice(num_blocks=20_000, start_s=2.0)
SLOW_DEVICE = VirtualDevice(step_s=0.06, token_s=25e-6, num_blocks=20_000, max_running=128, start_s=2.0)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(num_tokens)]


async def ask(engine: AsyncEngine, tokens: Sequence[int], request_id: str, **params: int) -> tuple[list[int], float]:
    """The tokens of all choices, and the longest time between two of them."""
    asked = SamplingParams(**{"max_tokens": 16, "seed": 5, **params})
    choices: dict[int, list[int]] = {}
    times: list[float] = []
    async for event in engine.submit(PromptRequest(prompt=list(tokens), params=asked, request_id=request_id)):
        choices.setdefault(event.index, []).extend(event.token_ids)
        times.append(asyncio.get_running_loop().time())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return [token for _, ids in sorted(choices.items()) for token in ids], max(gaps, default=0.0)


def place_of(engine: AsyncEngine, request_id: str) -> int:
    """The core that a running request is on."""
    (place,) = [one.index for one in engine._replicas.all if request_id in one.runs]
    return place


# ── where requests go ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("gap_s", [0.5, 0.02], ids=["idle cores", "busy cores"])
def test_a_shared_system_prompt_pulls_nothing_to_one_core(gap_s: float) -> None:
    """50 conversations of 6 turns that all begin alike."""
    rng = random.Random(1)
    system = prompt(rng, 1500)
    places: dict[int, list[int]] = {}

    async def talk(engine: AsyncEngine, number: int, starts_s: float) -> None:
        own = random.Random(number)
        await asyncio.sleep(starts_s)
        told = system + prompt(own, 60)
        for turn in range(6):
            name = f"{number}.{turn}"
            answering = asyncio.create_task(ask(engine, told, name, max_tokens=40))
            await asyncio.sleep(0)
            places.setdefault(number, []).append(place_of(engine, name))
            answer, _ = await answering
            await asyncio.sleep(own.uniform(0.5, 4.0))
            told = told + answer + prompt(own, 30)

    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 3, PrefixRouter(3))
        await engine.open()
        await asyncio.gather(*(talk(engine, number, number * gap_s) for number in range(50)))
        await engine.close()

    run_virtually(scenario())
    counted = Counter(place for turns in places.values() for place in turns)
    fullest = max(counted.values()) / (sum(counted.values()) / 3)
    staying = [now == before for turns in places.values() for before, now in pairwise(turns)]
    assert fullest <= 1.15, counted
    assert sum(staying) / len(staying) >= 0.95


def test_tenants_and_adapters_share_no_cache_and_draw_nobody() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 2, PrefixRouter(2))
        await engine.open()
        tokens = prompt(random.Random(4), 4000)
        await ask(engine, tokens, "first")
        first = next(one["replica"] for one in engine.replicas() if one["steps"])
        asked = PromptRequest(prompt=tokens, params=SamplingParams(max_tokens=4), cache_salt="other", request_id="o")
        stream = engine.submit(asked)
        assert place_of(engine, "o") != first, "what others have cached is nothing to it, so the idler core is better"
        async for _ in stream:
            pass
        stream = engine.submit(PromptRequest(prompt=tokens, params=SamplingParams(max_tokens=4), request_id="same"))
        assert place_of(engine, "same") == first
        async for _ in stream:
            pass
        routes = [one["num_placed"] for one in engine.replicas()]
        assert sum(one.get("cached", 0) for one in routes) == 1
        await engine.close()

    run_virtually(scenario())


def test_a_busy_core_sends_a_conversation_away() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 2, PrefixRouter(2))
        await engine.open()
        rng = random.Random(6)
        tokens = prompt(rng, 320)
        await ask(engine, tokens, "first")
        first = next(one["replica"] for one in engine.replicas() if one["steps"])
        long = asyncio.create_task(ask(engine, tokens + prompt(rng, 60_000), "long"))
        await asyncio.sleep(0)
        assert place_of(engine, "long") == first
        following = asyncio.create_task(ask(engine, tokens + prompt(rng, 8), "next"))
        await asyncio.sleep(0)
        assert place_of(engine, "next") != first
        await asyncio.gather(long, following)
        assert sum(one["num_placed"].get("busy", 0) for one in engine.replicas()) == 1
        await engine.close()

    run_virtually(scenario())


# ── deaths ─────────────────────────────────────────────────────────────────────────────────────────────


# Half of all streams on one core, their prompts and what was given of them: nothing of it is cached elsewhere.
RECOMPUTE_TOKENS = 30 * 1000
RECOMPUTE_S = RECOMPUTE_TOKENS * SLOW_DEVICE.token_s + RECOMPUTE_TOKENS / SLOW_DEVICE.token_budget * SLOW_DEVICE.step_s


def longest_gap_s(found: Sequence[tuple[list[int], float]]) -> float:
    return max(gap_s for _, gap_s in found)


async def sixty_streams(engine: AsyncEngine) -> list[tuple[list[int], float]]:
    rng = random.Random(8)
    asked = [
        ask(
            engine,
            prompt(rng, rng.randrange(20, 1200)),
            str(number),
            max_tokens=rng.randrange(150, 450),
            seed=number,
            n=rng.choice([1, 1, 3]),
        )
        for number in range(60)
    ]
    return await asyncio.gather(*asked)


def test_killing_a_core_every_three_seconds_loses_nothing() -> None:
    async def scenario(kills: bool) -> tuple[list[tuple[list[int], float]], int]:
        engine = virtual_engine(SLOW_DEVICE, 3, PrefixRouter(3))
        await engine.open()

        async def kill() -> None:
            rng = random.Random(9)
            while True:
                await asyncio.sleep(3.0)
                alive = [one for one in engine._replicas.all if one.is_ready]
                client = rng.choice(alive).supervisor._client
                assert client is not None
                client.kill()

        killing = asyncio.create_task(kill() if kills else asyncio.sleep(0))
        found = await sixty_streams(engine)
        killing.cancel()
        stats = engine.stats()
        await engine.close()
        assert stats.restarts == 0 or stats.resumed > stats.restarts
        return found, stats.restarts

    expected, _ = run_virtually(scenario(kills=False))
    found, num_restarts = run_virtually(scenario(kills=True))
    assert num_restarts >= 6
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert longest_gap_s(expected) < 0.2 < longest_gap_s(found) <= RECOMPUTE_S + 0.5


def test_a_request_that_kills_cores_dies_alone_and_others_go_on() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 3, PrefixRouter(3))
        await engine.open()
        others = asyncio.create_task(sixty_streams(engine))
        await asyncio.sleep(0.3)
        poison = asyncio.create_task(ask(engine, [7] * 100, "poison", max_tokens=500))
        deaths = 0
        while not poison.done():
            await asyncio.sleep(0.001)
            for replica in engine._replicas.all:
                run = next((one for one in replica.runs.values() if one.request.request_id == "poison"), None)
                if run is not None and engine.num_generated("poison") >= 20:
                    deaths += 1
                    client = replica.supervisor._client
                    assert client is not None
                    client.kill()
        with pytest.raises(RequestFailed, match="died while computing"):
            await poison
        assert deaths == MAX_DEATHS
        expected = engine.stats().restarts
        found = await others
        assert engine.stats().restarts == expected == MAX_DEATHS
        assert all(tokens for tokens, _ in found)
        await engine.close()

    run_virtually(scenario())


def stand_still(client: Any) -> None:
    """Let a virtual core say nothing more until it is killed."""
    loop, receive = asyncio.get_running_loop(), client._receive
    since_s = loop.time()
    client.silent_s = lambda: loop.time() - since_s
    client._receive = lambda message: receive(message) if isinstance(message, Failed) else None


def test_a_request_that_hangs_cores_dies_alone_and_others_go_on() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 3, PrefixRouter(3))
        await engine.open()
        others = asyncio.create_task(sixty_streams(engine))
        await asyncio.sleep(0.3)
        poison = asyncio.create_task(ask(engine, [7] * 100, "poison", max_tokens=500))
        hung: set[object] = set()
        while not poison.done():
            await asyncio.sleep(0.001)
            for replica in engine._replicas.all:
                client = replica.supervisor._client
                has_poison = any(run.request.request_id == "poison" for run in replica.runs.values())
                if has_poison and client not in hung and engine.num_generated("poison") >= 20:
                    hung.add(client)
                    stand_still(client)
        with pytest.raises(RequestFailed, match="died while computing"):
            await poison
        assert len(hung) == MAX_DEATHS
        found = await others
        assert all(tokens for tokens, _ in found)
        assert STALLED_AFTER_S < longest_gap_s(found) < KILLED_AFTER_S, "they do not wait for the cores that hang"
        await engine.close()

    run_virtually(scenario())


def test_a_core_that_was_kept_for_a_suspect_works_again_when_its_client_leaves() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 1)
        await engine.open()
        stream = asyncio.create_task(ask(engine, [40] * 40, "first", max_tokens=300))
        await asyncio.sleep(0.1)
        replicas = engine._replicas
        left = engine.submit(PromptRequest(prompt=[40] * 10, params=SamplingParams(max_tokens=4), request_id="suspect"))
        suspect = replicas.all[0].runs["suspect"]
        replicas.withdraw(suspect, replicas.all[0], tell_core=True)
        suspect.num_deaths = 2
        replicas.submit(suspect)
        assert suspect.replica is None and replicas.all[0].is_reserved, "it waits until the core is empty"
        later = asyncio.create_task(ask(engine, [40] * 20, "later"))
        await asyncio.sleep(0.1)
        assert engine.num_generated("later") == 0
        await left.aclose()
        tokens, _ = await later
        assert len(tokens) == 16 and not stream.done()
        await stream
        await engine.close()

    run_virtually(scenario())


# ── moving ─────────────────────────────────────────────────────────────────────────────────────────────


def test_draining_and_restarting_cores_loses_nothing() -> None:
    """Each core is drained, let work again, and then all are started anew one after the other, under load."""

    async def scenario(moves: bool) -> list[tuple[list[int], float]]:
        engine = virtual_engine(SLOW_DEVICE, 3, PrefixRouter(3))
        await engine.open()
        streams = asyncio.create_task(sixty_streams(engine))
        if moves:
            for index in range(3):
                await asyncio.sleep(2.0)
                assert engine.replicas()[index]["requests"]
                engine.drain_replica(index)
                async with asyncio.timeout(10.0):  # of the virtual clock
                    while engine.replicas()[index]["requests"]:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)
                engine.drain_replica(index, is_drained=False)
            assert await engine.restart_replicas() == [0, 1, 2]
            engine.drain_replica(0)
            engine.drain_replica(1)
            with pytest.raises(InvalidRequest, match="no other"):
                engine.drain_replica(2)
            assert engine.stats().restarts == 0, "nothing died"
        found = await streams
        await engine.close()
        return found

    expected, found = run_virtually(scenario(moves=False)), run_virtually(scenario(moves=True))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert longest_gap_s(found) <= 2 * RECOMPUTE_S + 0.5, "in the end all streams are on one core"


def test_a_single_core_can_be_started_anew_too() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 1)
        await engine.open()
        expected, _ = await ask(engine, [5] * 40, "first", max_tokens=200)
        stream = asyncio.create_task(ask(engine, [5] * 40, "second", max_tokens=200))
        await asyncio.sleep(0.3)
        assert 0 < engine.num_generated("second") < 200
        await engine.restart_replicas()
        found, gap_s = await stream
        assert found == expected and gap_s >= DEVICE.start_s
        await engine.close()

    run_virtually(scenario())
