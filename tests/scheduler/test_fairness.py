"""Many tenants on one device, on a virtual clock: none gets more than its share while others want theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.virtual_device import RequestTimeline, SimulatedDevice, VirtualServer, jain, quantile

POLITE = tuple(f"polite{number}" for number in range(9))


@dataclass
class FloodScene:
    """One tenant that sends a thousand requests at once, and nine polite ones, each with a few under way at a time."""

    is_fair: bool = True
    num_flooding: int = 1000
    until_s: float = 60.0
    num_asked: int | None = None  # by each polite one; None: as long as there is time
    flood: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    has_aborts: bool = False
    num_polite: int = 9
    num_under_way: int = 1
    pause_s: float = 2.5  # between two requests of a polite one

    def __post_init__(self) -> None:
        self.server = VirtualServer()
        self.polite: dict[str, list[RequestTimeline]] = {name: [] for name in POLITE}
        self._owner: dict[str, str] = {}
        server = self.server
        server.on_end = self._again
        for _ in range(self.num_flooding):
            server.at(0.0, lambda: self._flood())
        for place, name in enumerate(POLITE[: self.num_polite]):
            for number in range(self.num_under_way):
                server.at(0.3 + 0.2 * place + 0.007 * number, self._sender(name))
        server.run(self.until_s)
        server.scheduler.check_integrity()

    def _flood(self) -> None:
        life = self.server.ask("flood" if self.is_fair else "", **{"prompt": 100, **self.flood})
        if self.has_aborts and len(self.server.lives) % 3 == 0:
            later_s = 0.5 + len(self.server.lives) / 100
            self.server.at(later_s, lambda: self.server.scheduler.abort(life.request.request_id))

    def _sender(self, name: str) -> Callable[[], None]:
        def send() -> None:
            life = self.server.ask(name if self.is_fair else "", **{"prompt": 200, **self.asked})
            self.polite[name].append(life)
            self._owner[life.request.request_id] = name

        return send

    def _again(self, life: RequestTimeline) -> None:
        name = self._owner.get(life.request.request_id)
        if name is not None and (self.num_asked is None or len(self.polite[name]) < self.num_asked):
            pause_s = self.pause_s * (1 + 0.17 * POLITE.index(name))  # so that they do not march in step
            self.server.at(self.server.now + pause_s, self._sender(name))

    @property
    def p95_ttft_s(self) -> float:
        """TTFT of requests sent after the first two seconds, before which nothing is cached and no cost is known."""
        lives = [life for lives in self.polite.values() for life in lives if life.token_times]
        return quantile([life.ttft_s for life in lives if life.sent_s > 2.0], 0.95)


FLOODS = {
    "plain": {},
    "cached prefixes": {"flood": {"prefix": 64}, "asked": {"prefix": 64}},
    "several samples": {"flood": {"n": 4}},
    "long answers": {"flood": {"output": 300}},
    "long prompts": {"flood": {"prompt": 2000}},
    "aborts": {"has_aborts": True},
}


MORE = ("cached prefixes", "long answers", "long prompts", "aborts")
SLOWLY = [pytest.param(kind, marks=pytest.mark.slow) for kind in MORE]


@cache
def quiet_p95_s(prefix: int) -> float:
    return FloodScene(num_flooding=0, asked={"prefix": prefix}).p95_ttft_s


@pytest.mark.parametrize("kind", ["plain", "several samples", *SLOWLY])
def test_a_flood_of_one_tenant_is_hardly_noticed_by_the_others(kind: str) -> None:
    """First tokens of clients that ask for less than their share come as soon as without the flood, nearly."""
    flooded = FloodScene(**FLOODS[kind])  # type: ignore[arg-type]
    assert flooded.p95_ttft_s <= 2.0 * quiet_p95_s(flooded.asked.get("prefix", 0))


@pytest.mark.parametrize("kind", ["plain", "several samples", *SLOWLY])
def test_tenants_that_want_their_share_all_get_it(kind: str) -> None:
    settings = {**FLOODS[kind], "num_under_way": 4, "pause_s": 0.0, "until_s": 12.0}
    scene = FloodScene(**settings)  # type: ignore[arg-type]
    served = [scene.server.served_s(name) for name in (*POLITE, "flood")]
    assert jain(served) >= 0.95, served


def test_the_flood_does_hurt_without_tenants() -> None:
    flooded = FloodScene(is_fair=False)
    assert not any(life.token_times for lives in flooded.polite.values() for life in lives)


@pytest.mark.parametrize("kind", ["plain", pytest.param("long answers", marks=pytest.mark.slow)])
def test_fairness_costs_little(kind: str) -> None:
    """The same work, whoever sends it, in hardly more time."""
    work = {"num_flooding": 150, "num_asked": 10, "pause_s": 0.0, "until_s": float("inf"), **FLOODS[kind]}
    fair, first_come = (FloodScene(is_fair=is_fair, **work).server for is_fair in (True, False))  # type: ignore[arg-type]
    assert len(fair.lives) == len(first_come.lives) and all(life.ended_s for life in fair.lives.values())
    assert fair.now <= first_come.now / 0.97


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=5),
    sizes=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60)), min_size=5, max_size=5),
    rows=st.integers(2, 12),
    tokens=st.sampled_from([32, 200, 512]),
    num_blocks=st.sampled_from([400, 3000]),
)
def test_of_tenants_that_always_wait_none_gets_ahead_by_more_than_what_it_can_have_running(
    weights: list[float], sizes: list[tuple[int, int]], rows: int, tokens: int, num_blocks: int
) -> None:
    """Counters differ by at most the cost of all rows' requests, over the weight; so does what was really served, twice
    that (VTC's theorem)."""
    device = SimulatedDevice()
    server = VirtualServer(device, rows=rows, tokens=max(rows, tokens), num_blocks=num_blocks)
    names = [f"t{number}" for number in range(len(weights))]
    for name, weight, (prompt, output) in zip(names, weights, sizes, strict=False):
        for _ in range(60):
            server.ask(name, prompt, output, weight=weight)
    step_s = device.base_s + device.token_s + device.sample_s
    whole = max(device.token_s * prompt + output * step_s for prompt, output in sizes)
    bound = 2 * rows * 1.2 * whole / min(weights)  # 1.2: prices are estimates
    while server.now < 20.0:
        server.run(server.now + 0.5)
        waiting = {group.state.account.tenant.id for group in server.scheduler._waiting.groups}
        if waiting != set(names):
            break
        served = [server.served_s(name) / weight for name, weight in zip(names, weights, strict=True)]
        assert max(served) - min(served) <= bound
    server.scheduler.check_integrity()


def test_weights_are_shares() -> None:
    server = VirtualServer()
    for _ in range(300):
        server.ask("heavy", weight=3.0)
        server.ask("light")
    server.run(12.0)
    assert server.served_s("heavy") / server.served_s("light") == pytest.approx(3.0, rel=0.1)


def test_idle_time_is_not_saved_up() -> None:
    server = VirtualServer()
    for _ in range(400):
        server.ask("early")
    server.run(10.0)
    for _ in range(400):
        server.ask("late")
    before = server.served_s("early")
    server.run(20.0)
    assert server.served_s("early") - before == pytest.approx(server.served_s("late"), rel=0.15)


def test_a_tenant_has_no_more_sequences_than_it_may() -> None:
    server = VirtualServer()
    for _ in range(20):
        server.ask("capped", max_sequences=3, n=2)
        server.ask("other")
    most = 0
    while server.scheduler.has_work:
        server.run(server.now + 0.01)
        running = [one.state.request.tenant.id for one in server.scheduler.running]
        most = max(most, running.count("capped"))
    assert most == 3
    assert all(life.ended_s for life in server.lives.values())


def test_requests_that_begin_alike_follow_each_other_within_a_quantum() -> None:
    """A tenant's conversation whose prefix was just computed is admitted before its other conversation."""
    server = VirtualServer(rows=2)
    server.ask("other", 16, 200)
    for talk in (1, 2, 1, 2, 1, 2):
        server.ask("talks", 40, 3, prefix=32, talk=talk)
    server.run()
    order = sorted(server.of("talks"), key=lambda life: life.token_times[0])
    begins = [life.request.prompt_token_ids[0] for life in order]
    assert sum(before != after for before, after in pairwise(begins)) == 1


# ── backfill ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_without_room_stops_no_others_and_starts_in_the_end() -> None:
    """A long prompt needs most of the blocks; short requests pass it until it would fit without them."""
    server = VirtualServer(rows=8, num_blocks=101)
    first = [server.ask(prompt=80, output=10 + 8 * number) for number in range(8)]
    large = server.ask(prompt=1200, output=4)
    short = [server.ask(prompt=20, output=6) for _ in range(60)]
    server.run()
    assert all(life.ended_s for life in (*first, large, *short))
    passed = [life for life in short if life.token_times[0] < large.token_times[0]]
    assert len(passed) >= 5, "rows were idle for it"
    assert len(passed) < 40, "it starved"


def test_a_flood_of_urgent_requests_does_not_keep_others_out_for_ever() -> None:
    server = VirtualServer(rows=2)
    usual = server.ask(prompt=50, output=5)
    server.run(0.0)

    def flood() -> None:
        for _ in range(4):
            server.ask(prompt=50, output=40, priority=-20)
        if server.now < 150:
            server.at(server.now + 1.0, flood)

    server.at(0.0, flood)
    server.run(200.0)
    assert usual.ended_s is not None and usual.ended_s < 150


def test_a_flood_of_new_prompts_evicts_its_own_cached_blocks() -> None:
    """A quiet tenant's prompt is still cached after others have filled the cache several times."""

    def cached_after(flooder: str) -> int:
        server = VirtualServer(num_blocks=201)
        server.ask("quiet", prompt=640, output=2, prefix=640)
        server.run()
        for _ in range(20):
            server.ask(flooder, prompt=480, output=2)
            server.run()
        before = server.scheduler.stats().prefix_hit_tokens
        server.ask("quiet", prompt=640, output=2, prefix=640)
        server.run()
        server.scheduler.check_integrity()
        return server.scheduler.stats().prefix_hit_tokens - before

    assert cached_after("flood") >= 600
    assert cached_after("quiet") == 0, "one tenant's own prompts leave in the order of their last use"


# ── what requests cost ─────────────────────────────────────────────────────────────────────────────────


def test_the_time_of_steps_is_put_down_to_requests() -> None:
    """All of it, to those that cause it: ten times the prompt costs more, and a neighbour's prompt costs nothing."""
    server = VirtualServer(step_limit_s=None)
    lives = [server.ask("a", prompt=size, output=20) for size in (50, 500, 50)]
    costs: dict[str, float] = {}
    server.on_output = lambda output: costs.update({output.request_id: output.device_s or costs[output.request_id]})
    server.run()
    small, large, other = (costs[life.request.request_id] for life in lives)
    assert sum(costs.values()) == pytest.approx(server.busy_s)
    assert large > 3 * small and other == pytest.approx(small, rel=0.1)
