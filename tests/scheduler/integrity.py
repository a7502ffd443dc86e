"""What must hold between any two steps: no block lost, leaked or shared wrongly, the budget kept, nobody left out."""

from __future__ import annotations

from collections import Counter

from tokenmill.config.engine import SchedulerConfig
from tokenmill.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import StepPlan


def running(scheduler: Scheduler) -> list[Sequence]:
    return [sequence for gang in scheduler._floor.gangs for sequence in gang.members]


def check_blocks(scheduler: Scheduler) -> None:
    cache = scheduler._cache
    holders: Counter[int] = Counter()
    group_of: dict[int, int] = {}
    for sequence in running(scheduler):
        for group, blocks in enumerate(sequence.held_table.groups):
            held = [block for block in blocks if block]
            assert len(set(held)) == len(held), "a table holds a block twice"
            assert all(blocks[i] == 0 for i in range(sequence.held_table.live_from[group]))
            holders.update(held)
            for block in held:
                assert group_of.setdefault(block, group) == group, "two groups share a block"
    assert cache.pool.refs[0] == 0
    for block in range(1, cache.num_usable + 1):
        assert cache.pool.refs[block] == holders[block], f"block {block}: count and holders differ"
        assert (block in cache.pool._free) == (holders[block] == 0), f"block {block} is lost"
    for block, (group, name) in cache.prefix._names.items():
        assert cache.prefix.find(group, name) == block


def check_windows(scheduler: Scheduler) -> None:
    """Blocks that no later query can see have gone back."""
    cache = scheduler._cache
    for sequence in running(scheduler):
        for group, blocks in enumerate(sequence.held_table.groups):
            gone = min(cache.first_in_sight(group, sequence.computed), len(blocks))
            assert not any(blocks[:gone]), "a block behind the window is still held"


def check_rows(scheduler: Scheduler) -> None:
    gangs = scheduler._floor.gangs
    taken = [s.row for s in running(scheduler)] + [row for gang in gangs for row in gang.spare_rows]
    assert len(set(taken)) == len(taken), "two sequences on one row"
    assert len(taken) + scheduler._floor.seats.num_free == scheduler._num_rows, "a row is lost"
    assert [gang.key for gang in gangs] == sorted(gang.key for gang in gangs)
    for gang in scheduler._waiting._heap:
        assert gang[1].is_gone or all(s.table is None and s.computed == 0 for s in gang[1].members)


def check_plan(scheduler: Scheduler, plan: StepPlan, config: SchedulerConfig) -> None:
    assert 0 < plan.num_tokens <= config.token_budget
    rows = [row.row for row in plan.rows]
    assert len(set(rows)) == len(rows) <= config.max_running
    planned = {one.sequence for one in scheduler._planned}
    newborn = {s for s in running(scheduler) if not s.is_seated}
    for gang in scheduler._floor.gangs:
        for sequence in gang.members:
            assert sequence in planned or sequence in newborn or not gang.wants(sequence), "a running sequence starves"


def check_all(scheduler: Scheduler) -> None:
    check_blocks(scheduler)
    check_windows(scheduler)
    check_rows(scheduler)
