"""The pool, the prefix cache and the door, one property each."""

from __future__ import annotations

import pytest

from tokenmill.kv.blocks import BlockPool, BlockTable, HashChain
from tokenmill.kv.cache import KVCache

TOKENS = list(range(100, 140))


def computed(cache: KVCache, tokens: list[int], salt: str = "") -> BlockTable:
    """A table with all of `tokens` reserved and committed."""
    table = cache.open(cache.miss())
    assert cache.reserve(table, 0, len(tokens)) is not None
    cache.commit(table, len(tokens), tokens, cache.chain(salt))
    return table


def hit_len(cache: KVCache, tokens: list[int], salt: str = "") -> int:
    return cache.match(tokens, cache.chain(salt), len(tokens) - 1).num_tokens


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_released_too_often_is_caught() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.release(block, keep=False)
    with pytest.raises(AssertionError):
        pool.release(block, keep=False)


def test_kept_blocks_are_evicted_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    first, second, third, fourth = (pool.take() for _ in range(4))
    for block, keep in ((first, True), (second, False), (third, True), (fourth, False)):
        pool.release(block, keep=keep)
    order = [pool.take() for _ in range(4)]
    assert set(order[:2]) == {second, fourth} and order[2:] == [first, third]


def test_equal_names_only_for_equal_histories_and_salts() -> None:
    def names(tokens: list[int], salt: str = "") -> list[bytes]:
        return HashChain(salt, 4).extend(tokens, 2)

    assert names([1, 2, 3, 4, 5, 6, 7, 8]) == names([1, 2, 3, 4, 5, 6, 7, 8])
    assert names([9, 2, 3, 4, 5, 6, 7, 8])[1] != names([1, 2, 3, 4, 5, 6, 7, 8])[1]
    assert not set(names([1, 2, 3, 4, 5, 6, 7, 8], "a")) & set(names([1, 2, 3, 4, 5, 6, 7, 8], "b"))


def test_a_name_is_computed_once() -> None:
    chain = HashChain("", 4)
    before = list(chain.extend(TOKENS, 3))
    assert chain.extend([0] * 12 + TOKENS[12:], 5)[:3] == before


def test_a_prefix_is_found_again_in_full_blocks_and_leaves_a_token_to_compute() -> None:
    cache = KVCache(windows=[None], num_blocks=20, block_size=4)
    table = computed(cache, TOKENS[:16])
    assert hit_len(cache, TOKENS[:16]) == 12
    assert hit_len(cache, TOKENS[:17]) == 16
    assert hit_len(cache, TOKENS[:10] + [0] * 10) == 8
    cache.release(table)
    assert cache.num_used == 0
    assert hit_len(cache, TOKENS[:17]) == 16, "released blocks stay findable until they are taken"


def test_salt_separates_tenants_and_the_switch_switches_off() -> None:
    cache = KVCache(windows=[None], num_blocks=20, block_size=4)
    computed(cache, TOKENS[:16], salt="a")
    assert hit_len(cache, TOKENS[:17], salt="a") == 16
    assert hit_len(cache, TOKENS[:17], salt="b") == hit_len(cache, TOKENS[:17]) == 0
    off = KVCache(windows=[None], num_blocks=20, block_size=4, prefix_caching=False)
    computed(off, TOKENS[:16])
    assert hit_len(off, TOKENS[:17]) == 0 and len(off.prefix) == 0


def test_eviction_takes_the_end_of_a_prefix_before_its_beginning() -> None:
    cache = KVCache(windows=[None], num_blocks=6, block_size=4)
    cache.release(computed(cache, TOKENS[:16]))
    other = cache.open(cache.miss())
    assert cache.reserve(other, 0, 12) is not None  # the one unused block and two of the four cached ones
    assert hit_len(cache, TOKENS[:17]) == 8


def test_reserve_is_all_or_nothing() -> None:
    cache = KVCache(windows=[None, 8], num_blocks=8, block_size=4)
    table = cache.open(cache.miss())
    assert cache.reserve(table, 0, 16) is None
    assert cache.num_used == 0 and cache.num_held(table) == 0 and table.updates() == []
    assert cache.reserve(table, 0, 12) == []
    assert cache.num_used == 6


def test_a_shared_partial_block_is_copied_once_for_the_first_writer() -> None:
    cache = KVCache(windows=[None], num_blocks=20, block_size=4)
    parent = computed(cache, TOKENS[:6])
    child = cache.fork(parent)
    full, partial = parent.groups[0]
    assert cache.num_used == 2
    copies = cache.reserve(parent, 6, 7)
    assert copies == [(partial, parent.groups[0][1])] and child.groups[0] == [full, partial]
    assert cache.reserve(child, 6, 7) == [], "the last holder writes in place"
    cache.release(parent)
    cache.release(child)
    assert cache.num_used == 0


def test_the_runner_hears_of_changes_only() -> None:
    cache = KVCache(windows=[None], num_blocks=20, block_size=4)
    table = computed(cache, TOKENS[:8])
    assert [(u.start, len(u.blocks)) for u in table.updates()] == [(0, 2)]
    assert table.updates() == []
    cache.reserve(table, 8, 9)
    assert [(u.start, len(u.blocks)) for u in table.updates()] == [(2, 1)]
    cache.reserve(table, 9, 10)
    assert table.updates() == []


def test_a_window_gives_back_what_it_can_no_longer_see() -> None:
    cache = KVCache(windows=[None, 5], num_blocks=40, block_size=4)
    table = computed(cache, TOKENS[:16])
    # The next query is at 16 and sees 12..16: blocks 0, 1 and 2 of the windowed group are gone.
    assert table.groups[1][:3] == [0, 0, 0] and table.groups[1][3] != 0
    assert all(table.groups[0]) and cache.num_used == 4 + 1


def test_a_windowed_hit_needs_only_the_blocks_in_sight() -> None:
    cache = KVCache(windows=[None, 5], num_blocks=40, block_size=4)
    cache.release(computed(cache, TOKENS[:16]))
    hit = cache.match(TOKENS[:17], cache.chain(""), 16)
    assert hit.num_tokens == 16 and hit.groups[1][:3] == [0, 0, 0]
    seen = hit.groups[1][3]
    cache.prefix.forget(seen)
    shorter = cache.match(TOKENS[:17], cache.chain(""), 16)
    assert shorter.num_tokens == 12, "the window at 12 is still complete"


def test_blocks_for_bounds_what_a_windowed_sequence_holds() -> None:
    cache = KVCache(windows=[7], num_blocks=400, block_size=4)
    tokens = list(range(300))
    for chunk in (1, 3, 8):
        table, most = cache.open(cache.miss()), 0
        for start in range(0, 300, chunk):
            cache.reserve(table, start, min(300, start + chunk))
            most = max(most, cache.num_held(table))
            cache.commit(table, min(300, start + chunk), tokens, None)
        assert most <= cache.blocks_for(300, chunk) < 300 // 4
        cache.release(table)
