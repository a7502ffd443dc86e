"""Assertions of the scheduler's invariants, which hold between any two calls; for tests and debugging."""

from __future__ import annotations

from collections import Counter

from tokenmill.kv.blocks import NULL_BLOCK, BlockTable
from tokenmill.kv.cache import KVCache
from tokenmill.scheduler.request import Sequence
from tokenmill.scheduler.running import RunningSet
from tokenmill.scheduler.waiting import WaitingQueue


def check_integrity(cache: KVCache, running: RunningSet, waiting: WaitingQueue) -> None:
    members = [sequence for group in running.groups for sequence in group.members]
    _check_blocks(cache, [sequence.held_table for sequence in members], running)
    _check_windows(cache, members)
    _check_rows(running, members)
    assert len(waiting) == len(waiting.groups), "waiting groups are miscounted"
    for group in waiting.groups:
        assert not group.is_running and not group.is_gone, "a running or ended group is in the waiting queue"
        no_blocks = all(member.table is None and not member.planned for member in group.members)
        assert no_blocks, "a waiting group has blocks or computed tokens"


def _check_blocks(cache: KVCache, tables: list[BlockTable], running: RunningSet) -> None:
    """Assert that reference counts match the tables that hold a block, and that no block is free which a step in flight
    may write."""
    holders: Counter[int] = Counter()
    group_of: dict[int, int] = {}
    for table in [*tables, *running.loading, *(holding.table for holding in running.in_flight.releases)]:
        for group, blocks in enumerate(table.groups):
            held = [block for block in blocks if block != NULL_BLOCK]
            assert len(set(held)) == len(held), "a table holds a block twice"
            assert all(block == NULL_BLOCK for block in blocks[: table.live_from[group]])
            holders.update(held)
            for block in held:
                assert group_of.setdefault(block, group) == group, "two groups share a block"
    assert cache.pool.refs[NULL_BLOCK] == 0
    for block in range(1, len(cache.pool.refs)):
        assert cache.pool.refs[block] == holders[block], f"block {block}: count and holders differ"
        assert cache.pool.is_free(block) == (holders[block] == 0), f"block {block} is lost"
    cache.prefix.check_integrity()


def _check_windows(cache: KVCache, members: list[Sequence]) -> None:
    """Assert that blocks which no later query can see were released."""
    for sequence in members:
        for group, blocks in enumerate(sequence.held_table.groups):
            gone = min(cache.first_visible_block(group, sequence.computed), len(blocks))
            assert not any(blocks[:gone]), "a block before the window is still held"


def _check_rows(running: RunningSet, members: list[Sequence]) -> None:
    rows = running.row_allocator
    taken = [sequence.row for sequence in members] + [row for group in running.groups for row in group.spare_rows]
    taken += [holding.row for holding in running.in_flight.releases]
    assert len(set(taken)) == len(taken), "two sequences on one row"
    assert len(taken) + rows.num_free == rows.num_rows, "a row is lost"
    keys = [group.key for group in running.groups]
    assert keys == sorted(keys), "running groups are out of order"
