"""States of recurrent layers: where they are kept, what a prefix hit needs, what drafts and forks leave."""

from __future__ import annotations

import pytest

from tokenmill.kv.blocks import BlockTable
from tokenmill.kv.cache import STATES, KVCache
from tokenmill.kv.layout import EntryRule

TOKENS = list(range(1000, 1400))
KV, CELLS, STATE = 0, 1, 2  # groups


def recurrent_cache(num_states: int = 40, num_cells: int = 60) -> KVCache:
    return KVCache(
        windows=(None, None, None),
        kinds=("paged", "cells", "state"),
        num_blocks=100,
        num_cells=num_cells,
        num_states=num_states,
    )


def computed(cache: KVCache, num_tokens: int, step: int) -> BlockTable:
    table, chain = cache.open(cache.miss()), cache.chain("")
    for start in range(0, num_tokens, step):
        end = min(num_tokens, start + step)
        assert cache.reserve(table, start, end) is not None
        cache.commit(table, end, TOKENS, chain)
    return table


def hit_len(cache: KVCache, tokens: list[int]) -> int:
    return cache.match(tokens, cache.chain(""), len(tokens) - 1).num_tokens


@pytest.mark.parametrize("step", [1, 16, 50, 300])
def test_a_sequence_holds_the_state_before_its_chunk_and_the_cells_of_it(step: int) -> None:
    cache = recurrent_cache()
    table = computed(cache, 300, step)
    assert [bool(slot) for slot in table.groups[STATE]] == [False, False, False, True]
    assert [index for index, block in enumerate(table.groups[CELLS]) if block] == [16, 17, 18]  # tokens 256 to 299
    cache.release(table)
    assert hit_len(cache, TOKENS) == 288


def test_a_prompt_leaves_every_state_while_half_of_them_are_free() -> None:
    cache = recurrent_cache()
    cache.release(computed(cache, 300, 300))
    for shared in (63, 64, 100, 128, 200, 256):
        assert hit_len(cache, [*TOKENS[:shared], *range(50)]) == shared // 64 * 64
    few = recurrent_cache(num_states=6)  # two may be kept beside the last
    few.release(computed(few, 300, 300))
    assert hit_len(few, [*TOKENS[:200], 1]) == 128
    assert hit_len(few, [*TOKENS[:70], 1]) == 0


def test_drafts_past_a_state_keep_all_that_they_leave() -> None:
    cache = recurrent_cache()
    table = computed(cache, 62, 62)
    assert cache.reserve(table, 62, 63) == []
    assert cache.reserve(table, 63, 70, is_certain=False) == []
    assert all(table.groups[CELLS][:5]) and table.groups[STATE][0]
    cache.commit(table, 63, TOKENS, cache.chain(""))  # all drafts were wrong
    assert all(table.groups[CELLS][:4])


def test_forks_share_a_state_and_write_the_next_alone() -> None:
    cache = recurrent_cache()
    table = computed(cache, 120, 120)
    twin = cache.fork(table)
    assert twin.groups[STATE] == table.groups[STATE]
    for one in (table, twin):
        copies = cache.reserve(one, 120, 130)
        assert copies is not None and all(source < cache.pool.firsts[STATES] for source, _ in copies)
    assert table.groups[STATE][0] == twin.groups[STATE][0] and table.groups[STATE][1] != twin.groups[STATE][1]


def test_without_a_free_slot_nothing_is_reserved() -> None:
    cache = recurrent_cache(num_states=3)
    tables = [computed(cache, 70, 70) for _ in range(2)]
    assert cache.reserve(tables[0], 70, 130) is None
    assert cache.num_held(tables[0], STATES) == 1
    cache.release(tables[1])
    assert cache.reserve(tables[0], 70, 130) is not None


def test_what_entries_are_needed() -> None:
    state, cells = (EntryRule(kind, None, 16) for kind in ("state", "cells"))
    assert [state.first_visible(position) for position in (0, 63, 64, 127, 128, 200)] == [0, 0, 0, 0, 1, 2]
    assert list(state.written(60, 200)) == [0, 1, 2]
    assert list(state.required(60, 200, is_certain=True)) == [2]
    assert list(cells.required(0, 200, is_certain=True)) == [12]
    assert list(cells.required(0, 128, is_certain=True)) == []
    assert state.max_held(63, 1) == 0 and state.max_held(4000, 512) == 2
