"""A pool in parts: a sequence's blocks are of one part, and ids are told as the part's rank counts them."""

from __future__ import annotations

from tokenmill.kv.parted_cache import PartedKVCache

BLOCK = 4


def make_cache(num_blocks: int = 6, num_parts: int = 2) -> PartedKVCache:
    return PartedKVCache(num_parts=num_parts, windows=[None], num_blocks=num_blocks, block_size=BLOCK)


def test_sequences_go_to_the_emptier_part_and_stay_there() -> None:
    cache = make_cache()
    first, second = cache.open(cache.miss()), None
    assert cache.reserve(first, 0, 2 * BLOCK) == []
    second = cache.open(cache.miss())
    assert cache.reserve(second, 0, 5 * BLOCK) == []
    assert (first.part, second.part) == (0, 1)
    assert first.groups == [[1, 2]] and second.groups == [[6, 7, 8, 9, 10]]
    assert [update.blocks for update in second.updates()] == [[1, 2, 3, 4, 5]], "as its rank counts them"
    assert cache.reserve(second, 5 * BLOCK, 6 * BLOCK) is None, "the other part's blocks are of no use"
    assert cache.reserve(first, 2 * BLOCK, 5 * BLOCK) == []
    assert not cache.may_help(first, second) and cache.may_help(first, first)
    assert (cache.num_usable, cache.num_free) == (10, 0)


def test_any_number_of_parts_has_blocks() -> None:
    cache = make_cache(num_parts=5)
    assert [cache.region_name(part) for part in cache.regions] == ["blocks"] * 5


def test_a_fork_writes_into_its_own_part() -> None:
    cache = make_cache()
    cache.open(cache.miss())
    cache.reserve(blocker := cache.open(cache.miss()), 0, BLOCK)
    parent = cache.open(cache.miss())
    cache.reserve(parent, 0, BLOCK + 1)
    fork = cache.fork(parent)
    copies = cache.reserve(fork, BLOCK + 1, BLOCK + 2)
    assert blocker.part == 0 and fork.part == parent.part == 1
    assert copies == [(7, 8)]


def test_a_prefix_is_found_where_it_is_unless_another_part_is_much_emptier() -> None:
    cache = make_cache(num_blocks=9)
    tokens = list(range(4 * BLOCK))
    chain = cache.chain("")
    table = cache.open(cache.miss())
    cache.reserve(table, 0, len(tokens))
    cache.commit(table, len(tokens), tokens, chain)
    hit = cache.match(tokens, cache.chain(""), len(tokens) - 1)
    assert (hit.part, hit.num_tokens, hit.groups) == (0, 3 * BLOCK, [[1, 2, 3]])
    assert cache.blocks_to_open(len(tokens), len(tokens), hit, 0) == 1
    assert cache.blocks_to_open(len(tokens), len(tokens), hit, 1) == 0
    cache.reserve(table, len(tokens), len(tokens) + BLOCK)
    elsewhere = cache.match(tokens, cache.chain(""), len(tokens) - 1)
    assert (elsewhere.part, elsewhere.num_tokens) == (1, 0)
