"""What must hold between any two steps: no block lost, leaked or shared wrongly, the budget kept, nobody left out."""

from __future__ import annotations

from collections import Counter

from tokenmill.config.engine import SchedulerConfig
from tokenmill.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence
from tokenmill.types import StepPlan


def running(scheduler: Scheduler) -> list[Sequence]:
    return [sequence for group in scheduler._running.groups for sequence in group.members]


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
            gone = min(cache.first_visible_block(group, sequence.computed), len(blocks))
            assert not any(blocks[:gone]), "a block behind the window is still held"


def check_rows(scheduler: Scheduler) -> None:
    groups = scheduler._running.groups
    taken = [s.row for s in running(scheduler)] + [row for group in groups for row in group.spare_rows]
    assert len(set(taken)) == len(taken), "two sequences on one row"
    assert len(taken) + scheduler._running.row_allocator.num_free == scheduler._num_rows, "a row is lost"
    assert [group.key for group in groups] == sorted(group.key for group in groups)
    for group in scheduler._waiting._heap:
        assert group[1].is_gone or all(s.table is None and s.computed == 0 for s in group[1].members)


def check_plan(scheduler: Scheduler, plan: StepPlan, config: SchedulerConfig) -> None:
    assert 0 < plan.num_tokens <= config.token_budget
    rows = [row.row for row in plan.rows]
    assert len(set(rows)) == len(rows) <= config.max_running
    planned = {one.sequence for one in scheduler._planned}
    newborn = {s for s in running(scheduler) if not s.is_on_runner}
    for group in scheduler._running.groups:
        for sequence in group.members:
            assert sequence in planned or sequence in newborn or not group.wants(sequence), "a running sequence starves"


def check_all(scheduler: Scheduler) -> None:
    check_blocks(scheduler)
    check_windows(scheduler)
    check_rows(scheduler)
