"""Streams that leave a core on a virtual clock: they go on while they are prepared elsewhere, and hardly stall."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.fleet.test_virtual_fleet import ask, prompt
from tokenmill import AsyncEngine
from tokenmill.engine.moves import MIN_FETCHED_BLOCKS, Moves
from tokenmill.engine.replica import Replica
from tokenmill.fleet.router import PrefixRouter
from tokenmill.fleet.virtual import VirtualDevice, run_virtually, virtual_engine
from tokenmill.types import SequenceOutput

DEVICE = VirtualDevice(step_s=0.06, token_s=25e-6, num_blocks=20_000, max_running=128, start_s=2.0)
NUM_STREAMS, NUM_MOVES = 8, 10
Answers = list[tuple[list[int], float]]
Scene = Callable[[AsyncEngine], Awaitable[None]]


def answers(scene: Scene, num_tokens: int = 700, n: int = 1, first_end: int = 0) -> tuple[Answers, int]:
    """What streams that begin on the first of two cores answer while something happens; how often they moved.
    `first_end`: tokens after which the first half of them ends, if not with the others."""
    lengths = [first_end or num_tokens] * (NUM_STREAMS // 2) + [num_tokens] * (NUM_STREAMS // 2)

    async def scenario() -> tuple[Answers, int]:
        rng, engine = random.Random(3), virtual_engine(DEVICE, 2, PrefixRouter(2))
        await engine.open()
        engine.drain_replica(1)
        asked = [
            asyncio.create_task(ask(engine, prompt(rng, 1500), f"{place}", max_tokens=lengths[place], seed=place, n=n))
            for place in range(NUM_STREAMS)
        ]
        await asyncio.sleep(3.0)
        engine.drain_replica(1, False)
        await scene(engine)
        found = await asyncio.gather(*asked)
        num_moved = engine.stats().resumed
        assert not any(one.preparations or one.departing or one.num_prefilling for one in engine._replicas.all)
        await engine.close()
        return found, num_moved

    return run_virtually(scenario())


async def nothing(engine: AsyncEngine) -> None:
    pass


async def to_and_fro(engine: AsyncEngine) -> None:
    for turn in range(NUM_MOVES):
        engine.drain_replica(1 - turn % 2, False)
        engine.drain_replica(turn % 2)
        async with asyncio.timeout(10.0):  # of the virtual clock
            while engine.replicas()[turn % 2]["requests"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_stalls_for_two_steps_when_it_moves(n: int) -> None:
    """With n > 1 nothing is prepared: the prompt and what was given are computed again, in the streams' pause."""
    expected, _ = answers(nothing, n=n)
    found, num_moved = answers(to_and_fro, n=n)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert num_moved == NUM_STREAMS * NUM_MOVES
    # The step that runs there when it comes, and its own, in which the tokens behind its prepared blocks are computed.
    own_s = (NUM_STREAMS + MIN_FETCHED_BLOCKS * DEVICE.block_size) * DEVICE.token_s
    longest_s = max(gap_s for _, gap_s in found)
    assert longest_s <= 2.5 * (DEVICE.step_s + own_s) if n == 1 else longest_s > 3 * DEVICE.step_s


def test_a_stream_goes_on_where_it_is_while_it_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moves, "note_prepared", lambda self, replica, output: replica.preparations.clear())
    expected, _ = answers(nothing, 150)

    async def drain(engine: AsyncEngine) -> None:
        engine.drain_replica(0)

    found, num_moved = answers(drain, 150)
    assert num_moved == 0 and found == expected


def test_a_drain_that_is_undone_leaves_streams_where_they_are() -> None:
    async def undo(engine: AsyncEngine) -> None:
        engine.drain_replica(0)
        assert engine._replicas.all[1].preparations
        engine.drain_replica(0, False)
        assert not engine._replicas.all[1].preparations

    expected, _ = answers(nothing, 150)
    found, num_moved = answers(undo, 150)
    assert num_moved == 0 and [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_streams_that_end_while_they_are_prepared_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def note_prepared(self: Moves, replica: Replica, output: SequenceOutput) -> None:
        if int(output.request_id.partition("#")[0]) >= NUM_STREAMS // 2:
            noted(self, replica, output)

    noted = Moves.note_prepared
    monkeypatch.setattr(Moves, "note_prepared", note_prepared)

    async def drain(engine: AsyncEngine) -> None:
        engine.drain_replica(0)

    expected, _ = answers(nothing, 150, first_end=60)
    found, num_moved = answers(drain, 150, first_end=60)
    assert num_moved == NUM_STREAMS // 2
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("dying", [0, 1])
def test_either_core_may_die_while_a_move_is_prepared(dying: int) -> None:
    async def die(engine: AsyncEngine) -> None:
        engine.drain_replica(0)
        assert engine._replicas.all[1].preparations
        client = engine._replicas.all[dying].supervisor._client
        assert client is not None
        client.kill()
        await asyncio.sleep(3.0)
        engine.drain_replica(0, False)

    expected, _ = answers(nothing, 150)
    found, _ = answers(die, 150)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_a_client_that_leaves_ends_what_is_prepared_for_it() -> None:
    async def scenario() -> None:
        engine = virtual_engine(DEVICE, 2, PrefixRouter(2))
        await engine.open()
        engine.drain_replica(1)
        left = asyncio.create_task(ask(engine, [40] * 100, "left", max_tokens=500))
        await asyncio.sleep(1.0)
        engine.drain_replica(1, False)
        engine.drain_replica(0)
        assert engine._replicas.all[1].preparations
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert not engine._replicas.all[1].preparations
        await asyncio.sleep(1.0)
        assert [one["running"] for one in engine.replicas()] == [0, 0]
        await engine.close()

    run_virtually(scenario())
