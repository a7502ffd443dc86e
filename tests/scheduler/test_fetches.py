"""Blocks on their way: a group waits for them beside others, goes on without those that do not come, and nothing is
lost when it ends, is preempted or has waited long enough. The simulated runner reads every block back, so one with
wrong contents is an error."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.scheduler_bench import SchedulerBench, ask, tokens_of
from tests.support.simulated_runner import expected_tokens
from tokenmill.kv.names import BlockName, Fetch
from tokenmill.scheduler.step_time import StepSize
from tokenmill.types import SequenceProgress


class ByHand:
    """A fetcher with blocks of its own, which answers and brings when it is told to."""

    has_tiers = True

    def __init__(self) -> None:
        self.kept: dict[BlockName, list[tuple[int, int] | None]] = {}
        self.asked: list[Fetch] = []
        self.loading: list[Fetch] = []
        self.num_loaded = 0
        self.is_slow = False
        self.bench: SchedulerBench | None = None

    def keep_all(self, bench: SchedulerBench) -> None:
        """Keep a copy of every block that a pool has registered."""
        index = bench.cache.prefix
        for block_hash in index.hashes(0):
            block = index.find(0, block_hash)
            assert block is not None
            self.kept[BlockName(0, block_hash)] = list(bench.runner.memory[block])

    def look_up(self, fetch: Fetch) -> None:
        self.asked.append(fetch)

    def expect(self, fetch: Fetch) -> None:
        fetch.found = dict.fromkeys(fetch.names, "hand")
        fetch.is_looked_up = True

    def load(self, fetch: Fetch) -> None:
        self.loading.append(fetch)

    def end(self, fetch: Fetch) -> None:
        pass

    def seconds(self, found: dict[BlockName, str]) -> float:
        return 1e9 if self.is_slow else 0.0

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass

    def answer(self) -> None:
        for fetch in self.asked:
            fetch.found = {name: "hand" for name in fetch.names if name in self.kept}
            fetch.is_looked_up = True
        self.asked = []

    def bring(self, most: int = 1000) -> None:
        assert self.bench is not None
        for fetch in self.loading:
            for name, block in fetch.targets[:most]:
                if name in self.kept:
                    self.bench.runner.memory[block] = list(self.kept[name])
                    fetch.arrived.add(name)
                    self.num_loaded += 1
            fetch.is_loaded = True
        self.loading = []


def benches(num_blocks: int = 200) -> tuple[SchedulerBench, ByHand]:
    """A bench whose fetcher has what another bench has computed of a request "first" with 41 prompt tokens."""
    before = SchedulerBench(num_blocks=num_blocks)
    before.scheduler.add(ask("first", 41))
    before.drain()
    fetcher = ByHand()
    fetcher.keep_all(before)
    fetcher.bench = SchedulerBench(num_blocks=num_blocks, fetcher=fetcher)
    return fetcher.bench, fetcher


def is_right(outputs: object, *names: tuple[str, int]) -> None:
    for name, length in names:
        assert tokens_of(outputs, name) == expected_tokens(ask(name, length), 0)  # type: ignore[arg-type]


def test_a_group_waits_beside_others_and_computes_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.scheduler.fetches.LATE_S", 50.0)  # a step of the bench takes a second
    bench, fetcher = benches()
    bench.scheduler.add(ask("first", 41))
    bench.scheduler.add(ask("other", 3))
    outputs = bench.step()
    assert [row.row for row in bench.plans[-1].rows] == [1], "the other one is not kept waiting"
    fetcher.answer()
    outputs += bench.step() + bench.step()
    assert fetcher.loading and bench.cache.num_used >= 10
    fetcher.bring()
    outputs += bench.drain()
    is_right(outputs, ("first", 41), ("other", 3))
    assert fetcher.num_loaded == 10
    stats = bench.scheduler.stats()
    assert stats.fetched_tokens == 40 and stats.computed_tokens == 1 + 3 + 2 * 4
    assert {one.num_cached_tokens for one in outputs if one.request_id == "first"} == {40}


def test_what_does_not_come_is_computed() -> None:
    for most, computed in ((0, 41), (3, 41 - 12)):
        bench, fetcher = benches()
        bench.scheduler.add(ask("first", 41))
        assert bench.scheduler.plan() is None
        fetcher.answer()
        assert bench.scheduler.plan() is None
        fetcher.bring(most)
        is_right(bench.drain(), ("first", 41))
        assert bench.scheduler.stats().computed_tokens == computed + 4


@pytest.mark.parametrize("num_gone", [0, 3])
def test_a_request_that_was_moved_is_fetched_at_once(num_gone: int) -> None:
    """The fetch starts without a lookup; blocks that the other core has evicted meanwhile are computed."""
    bench, fetcher = benches()
    for name in list(fetcher.kept)[10 - num_gone : 10]:
        del fetcher.kept[name]
    tokens = expected_tokens(ask("first", 41), 0)
    earlier = [SequenceProgress(token_ids=tokens[:2])]
    bench.scheduler.add(msgspec.structs.replace(ask("first", 41), progress=earlier, fetch_from="/another/core"))
    assert bench.scheduler.plan() is None
    assert len(fetcher.loading[0].targets) == 10 and not fetcher.asked
    fetcher.bring()
    assert tokens_of(bench.drain(), "first") == tokens[2:]
    assert fetcher.num_loaded == 10 - num_gone


def test_a_gap_makes_what_is_behind_it_useless() -> None:
    bench, fetcher = benches()
    del fetcher.kept[list(fetcher.kept)[2]]
    bench.scheduler.add(ask("first", 41))
    assert bench.scheduler.plan() is None
    fetcher.answer()
    assert bench.scheduler.plan() is None
    assert len(fetcher.loading[0].targets) == 2
    fetcher.bring()
    is_right(bench.drain(), ("first", 41))


def test_a_fetch_slower_than_computing_is_not_begun() -> None:
    bench, fetcher = benches()
    fetcher.is_slow = True
    bench.scheduler.step_time.note(StepSize(tokens=32, samples=0, context=500), 0.01)
    bench.scheduler.add(ask("first", 41))
    assert bench.scheduler.plan() is None
    fetcher.answer()
    is_right(bench.drain(), ("first", 41))
    assert not fetcher.num_loaded and not fetcher.loading


def test_a_late_fetch_is_not_waited_for_and_its_blocks_come_back() -> None:
    bench, fetcher = benches()
    bench.scheduler.add(ask("first", 41))
    assert bench.scheduler.plan() is None
    fetcher.answer()
    assert bench.scheduler.plan() is None
    bench.now += 100.0
    outputs = bench.step() + bench.step()
    bench.scheduler.check_integrity()
    while not any(one.finish_reason for one in outputs):
        outputs += bench.step()
    is_right(outputs, ("first", 41))
    assert bench.cache.num_used == 10, "the thread may still write them"
    fetcher.bring()
    assert bench.scheduler.plan() is None and bench.cache.num_used == 0
    bench.scheduler.check_integrity()


def test_an_aborted_request_leaves_what_arrives_to_others() -> None:
    bench, fetcher = benches()
    bench.scheduler.add(ask("first", 41))
    assert bench.scheduler.plan() is None
    bench.scheduler.abort("first")
    assert bench.scheduler.plan() is None and not bench.scheduler.has_work, "nothing was being loaded"
    bench.scheduler.add(ask("first", 41))
    assert bench.scheduler.plan() is None
    fetcher.answer()
    assert bench.scheduler.plan() is None
    bench.scheduler.abort("first")
    bench.scheduler.check_integrity()
    fetcher.bring()
    assert bench.scheduler.plan() is None and not bench.scheduler.has_work
    bench.scheduler.check_integrity()
    bench.scheduler.add(ask("first", 41))
    is_right(bench.drain(), ("first", 41))
    assert bench.scheduler.stats().computed_tokens == 1 + 4


def test_samples_fork_once_their_prompt_has_arrived() -> None:
    bench, fetcher = benches()
    bench.scheduler.add(ask("first", 41, n=3))
    assert bench.scheduler.plan() is None
    fetcher.answer()
    assert bench.scheduler.plan() is None
    fetcher.bring()
    outputs = bench.drain()
    for index in range(3):
        assert tokens_of(outputs, "first", index) == expected_tokens(ask("first", 41, n=3), index)


def test_a_preempted_group_asks_again() -> None:
    bench, fetcher = benches(num_blocks=14)
    bench.scheduler.add(ask("first", 41, priority=5))
    assert bench.scheduler.plan() is None
    fetcher.answer()
    assert bench.scheduler.plan() is None
    bench.scheduler.add(ask("urgent", 30, priority=0))
    plan = bench.scheduler.plan()
    bench.scheduler.check_integrity()
    fetcher.bring()
    outputs = [] if plan is None else bench.scheduler.apply(bench.runner.run(plan))
    while bench.scheduler.has_work:
        fetcher.answer()
        fetcher.bring()
        if (plan := bench.scheduler.plan()) is not None:
            outputs += bench.scheduler.apply(bench.runner.run(plan))
        bench.scheduler.check_integrity()
    is_right(outputs, ("first", 41), ("urgent", 30))
    assert bench.cache.num_used == 0
