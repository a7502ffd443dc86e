"""A fleet that grows and shrinks with its load, on a virtual clock. All but the model is the true thing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tokenmill import AsyncEngine, SamplingParams
from tokenmill.config.promises import ServiceLevel
from tokenmill.errors import InvalidRequest
from tokenmill.fleet.autoscale import CALM_S, Autoscaler, Demand, LoadMeter, ScaleRange, ScaleRule
from tokenmill.fleet.virtual import END_TOKEN, FIRST_TOKEN, VirtualDevice, run_virtually, virtual_engine
from tokenmill.types import PromptRequest

DEVICE = VirtualDevice(step_s=0.008, token_s=0.4e-3, num_blocks=20_000, max_running=64, start_s=2.0)
SLO = ServiceLevel(ttft_s=1.0, tpot_s=0.05)
MOST = 8
ANY_NUMBER = ScaleRange(1, MOST)


@dataclass
class Fleet:
    """An elastic fleet of virtual cores, and what its clients have seen."""

    allowed: ScaleRange = ANY_NUMBER
    idle_s: float = CALM_S
    max_tokens: int = 100
    seen: list[tuple[float, float, float]] = field(default_factory=list)  # arrival, TTFT and TPOT of each request

    def __post_init__(self) -> None:
        self.meter = LoadMeter(MOST, SLO)
        self.scaler = Autoscaler(ScaleRule(self.allowed, SLO.ttft_s, self.idle_s), self.meter)
        num_started = max(1, self.allowed.least)
        self.engine: AsyncEngine = virtual_engine(
            DEVICE, MOST, self.meter, keepers=[self.scaler], num_started=num_started
        )

    def num_ready(self) -> int:
        return sum(one["state"] == "ready" for one in self.engine.replicas())

    async def ask(self, rng: random.Random, max_tokens: int | None = None) -> list[int]:
        max_tokens = max_tokens or self.max_tokens
        loop = asyncio.get_running_loop()
        began_s, times, tokens = loop.time(), [], []
        prompt = [rng.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(rng.randrange(50, 350))]
        asked = PromptRequest(prompt=prompt, params=SamplingParams(max_tokens=max_tokens, seed=1))
        async for event in self.engine.submit(asked):
            tokens += event.token_ids
            times.append(loop.time())
        assert len(tokens) == max_tokens
        self.seen.append((began_s, times[0] - began_s, (times[-1] - times[0]) / (len(tokens) - 1)))
        return tokens

    async def load(self, per_s: Callable[[float], float], until_s: float) -> None:
        """Requests at a rate that follows the clock, with a fifth of noise."""
        rng, loop, asked = random.Random(3), asyncio.get_running_loop(), []
        while loop.time() < until_s:
            await asyncio.sleep(rng.expovariate(per_s(loop.time()) * rng.uniform(0.8, 1.2)))
            asked.append(asyncio.create_task(self.ask(rng)))
        await asyncio.gather(*asked)

    def share_within(self, from_s: float, to_s: float) -> float:
        """The share of the requests of a while that were answered as promised."""
        assert SLO.ttft_s is not None and SLO.tpot_s is not None
        found = [ttft <= SLO.ttft_s and tpot <= SLO.tpot_s for at, ttft, tpot in self.seen if from_s <= at < to_s]
        return sum(found) / len(found)

    def reversals(self) -> list[float]:
        """When the number of cores changed its direction."""
        numbers = [(0.0, max(1, self.allowed.least)), *self.scaler.changes]
        signs = [(later[0], later[1] > before[1]) for before, later in pairwise(numbers)]
        return [later[0] for before, later in pairwise(signs) if later[1] != before[1]]


CALM_RATE = 5.0


@pytest.mark.parametrize(
    ("up_s", "down_s", "end_s", "max_tokens"),
    [(10.0, 30.0, 105.0, 40), pytest.param(60.0, 180.0, 420.0, 100, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_six_times_the_load_is_within_the_promise_after_ten_seconds(
    up_s: float, down_s: float, end_s: float, max_tokens: int
) -> None:
    fleet = Fleet(max_tokens=max_tokens)

    async def scenario() -> None:
        await fleet.engine.open()
        load = asyncio.create_task(fleet.load(lambda now: CALM_RATE * (6 if up_s <= now < down_s else 1), end_s))
        await asyncio.sleep(up_s - 1)
        calm = fleet.num_ready()
        await asyncio.sleep(down_s - 1 - asyncio.get_running_loop().time())
        assert fleet.num_ready() >= 3 * calm, "it has grown"
        await load
        assert fleet.num_ready() <= calm + 1, "and shrunk"
        assert fleet.engine.stats().restarts == 0
        await fleet.engine.close()

    run_virtually(scenario())  # a request that fails would end it
    assert fleet.share_within(2, up_s) >= 0.95
    assert fleet.share_within(up_s + 10, down_s) >= 0.95
    assert fleet.share_within(down_s, end_s) >= 0.95
    reversals = fleet.reversals()
    assert all(later - earlier >= 60 for earlier, later in pairwise(reversals)), fleet.scaler.changes


def test_from_zero_the_first_token_comes_within_three_seconds_and_idle_cores_end() -> None:
    fleet = Fleet(ScaleRange(0, 4), idle_s=30.0)

    async def scenario() -> None:
        await fleet.engine.open()
        rng = random.Random(5)
        expected = await fleet.ask(rng)
        await asyncio.sleep(29)
        assert fleet.num_ready() == 1
        await asyncio.sleep(3)
        assert fleet.num_ready() == 0 and fleet.engine.health().state == "ready"
        assert [one["state"] for one in fleet.engine.replicas()] == ["stopped"] * MOST
        found = await fleet.ask(random.Random(5))
        assert found == expected
        await asyncio.gather(*(fleet.ask(rng) for _ in range(20)))
        await fleet.engine.close()

    run_virtually(scenario())
    assert DEVICE.start_s < fleet.seen[1][1] < 3.0


def test_a_fleet_follows_the_numbers_that_it_is_told() -> None:
    fleet = Fleet(ScaleRange(1, 2))

    async def scenario() -> None:
        await fleet.engine.open()
        stream = asyncio.create_task(fleet.ask(random.Random(1), max_tokens=2000))
        await asyncio.sleep(1)
        fleet.scaler.set_limits(3, 5)
        await asyncio.sleep(4)
        assert fleet.num_ready() == 3
        fleet.scaler.set_limits(1, 1)
        await asyncio.sleep(1)
        assert fleet.num_ready() == 1 and not stream.done()
        for least, most in ((-1, 2), (3, 2), (0, 0), (1, MOST + 1)):
            with pytest.raises(InvalidRequest, match="must be between"):
                fleet.scaler.set_limits(least, most)
        await stream
        await fleet.engine.close()

    run_virtually(scenario())


def test_cores_are_started_once_however_often_the_autoscaler_is_woken() -> None:
    """Several machines that join wake it again before the cores that it has just decided on begin to start."""
    fleet_failures: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: fleet_failures.append(context))
        fleet = Fleet()
        await fleet.engine.open()
        fleet.scaler.set_limits(3, MOST)
        fleet.scaler.look()
        fleet.scaler.look()
        await asyncio.sleep(2 * DEVICE.start_s)
        assert fleet.num_ready() == 3 and [number for _, number in fleet.scaler.changes] == [3]
        await fleet.engine.close()

    run_virtually(scenario())
    assert not fleet_failures


def test_a_core_that_is_stopped_leaves_its_requests_to_others() -> None:
    fleet = Fleet(ScaleRange(3, 3))

    async def scenario() -> list[list[int]]:
        await fleet.engine.open()
        asked = [asyncio.create_task(fleet.ask(random.Random(number), 400)) for number in range(12)]
        await asyncio.sleep(0.5)
        fleet.scaler.set_limits(1, 3)
        for replica in fleet.engine._replicas.all[:2]:
            await fleet.engine._replicas.stop(replica)
        found = await asyncio.gather(*asked)
        await fleet.engine.close()
        return found

    found = run_virtually(scenario())
    fleet.allowed = ScaleRange(1, 1)
    fleet.__post_init__()

    async def alone() -> list[list[int]]:
        await fleet.engine.open()
        expected = await asyncio.gather(*(fleet.ask(random.Random(number), 400) for number in range(12)))
        await fleet.engine.close()
        return expected

    assert found == run_virtually(alone())


# ── the rule alone ─────────────────────────────────────────────────────────────────────────────────────


def test_the_rule_goes_up_at_once_and_down_after_a_minute() -> None:
    rule = ScaleRule(ScaleRange(1, 10), ttft_s=1.0)
    assert rule.num_needed(0, 2, Demand(work=1.6, num_requests=5)) == 2, "80 % is not too busy"
    assert rule.num_needed(1, 2, Demand(work=1.8, num_requests=5)) == 3
    assert rule.num_needed(2, 3, Demand(rows=4.0, num_requests=50)) == 6
    assert rule.num_needed(3, 6, Demand(backlog_s=7.5, num_requests=50)) == 8
    assert rule.num_needed(4, 8, Demand(work=50, num_requests=500)) == 10
    for second in range(5, 64):
        assert rule.num_needed(second, 10, Demand(work=1.0, num_requests=5)) == 10
    assert rule.num_needed(65, 10, Demand(work=1.0, num_requests=5)) == 2
    rule.note_change()
    assert rule.num_needed(66, 2, Demand(num_requests=1)) == 2, "the minute begins anew"


def test_the_rule_ends_the_last_core_only_where_it_may() -> None:
    for least, wanted in ((0, 0), (1, 1)):
        rule = ScaleRule(ScaleRange(least, 3), idle_s=10.0)
        assert rule.num_needed(0, 1, Demand(num_requests=1)) == 1
        assert rule.num_needed(9, 1, Demand()) == 1
        assert rule.num_needed(10, 1, Demand()) == wanted
        assert rule.num_needed(11, 0, Demand(num_requests=1)) == 1
