"""The front's index of cached blocks against the registries of the cores, over pipes that lose messages."""

from __future__ import annotations

import random

import pytest

from tokenmill.fleet.block_index import HASH_BATCH, BlockIndex
from tokenmill.kv.blocks import HashChain
from tokenmill.kv.cache import KVCache
from tokenmill.types import KVCacheEvents

BLOCK = 4


class BusyCache:
    """A small cache that sequences come to and leave, so that blocks are stored and evicted all the time."""

    def __init__(self, seed: int) -> None:
        self.cache = KVCache(windows=(None,), num_blocks=65, block_size=BLOCK)
        self._rng = random.Random(seed)
        self.num_changes = 0

    def serve_one(self) -> None:
        tokens = [self._rng.randrange(3)] * BLOCK + [self._rng.randrange(9) for _ in range(self._rng.randrange(1, 80))]
        chain = self.cache.chain("")
        table = self.cache.open(self.cache.match(tokens, chain, len(tokens) - 1))
        start = table.num_registered * BLOCK
        assert self.cache.reserve(table, start, len(tokens)) is not None
        self.num_changes += len(tokens) // BLOCK - table.num_registered
        self.cache.commit(table, len(tokens), tokens, chain)
        self.cache.release(table)

    def registered(self) -> frozenset[bytes]:
        return frozenset(self.cache.prefix.hashes(0))


@pytest.mark.parametrize(
    ("num_changes", "least_cuts"), [(4_000, 5), pytest.param(100_000, 100, marks=pytest.mark.slow)]
)
def test_the_index_is_what_the_cores_have_after_every_cut(num_changes: int, least_cuts: int) -> None:
    """Stores and evictions, over a pipe that is cut now and then."""
    core, index, rng = BusyCache(1), BlockIndex(1), random.Random(2)
    news = core.cache.watch_blocks()
    num_cuts = 0
    while core.num_changes < num_changes or num_cuts < least_cuts:
        for _ in range(rng.randrange(1, 60)):
            core.serve_one()
        told = news.pop()
        if told is None:
            continue
        if rng.random() < 0.1:  # lost
            num_cuts += 1
            continue
        if not index.apply(0, told):
            assert index.blocks(0) == frozenset(), "nothing is known until the snapshot comes"
            news = core.cache.watch_blocks()
            snapshot = news.pop()
            assert snapshot is not None and snapshot.is_snapshot and index.apply(0, snapshot)
        assert index.blocks(0) == core.registered()


def test_what_comes_and_goes_between_two_news_is_not_mentioned() -> None:
    core = BusyCache(3)
    news = core.cache.watch_blocks()
    assert news.pop() == KVCacheEvents(number=0, is_snapshot=True)
    assert news.pop() is None
    prefix = core.cache.prefix
    prefix.register(0, b"a", 1)
    prefix.register(0, b"b", 2)
    prefix.forget(1)
    assert news.pop() == KVCacheEvents(number=1, stored=[b"b"])
    prefix.forget(2)
    prefix.register(0, b"b", 3)
    assert news.pop() is None
    prefix.forget(3)
    assert news.pop() == KVCacheEvents(number=2, gone=[b"b"])


def test_hashes_are_computed_only_as_far_as_a_core_has_them() -> None:
    index, tokens = BlockIndex(2), list(range(BLOCK * 400))
    hashes = list(HashChain("", BLOCK).extend(tokens, 400))
    chain = HashChain("", BLOCK)
    assert index.matches(tokens, chain, BLOCK, [0, 1]) == [0, 0]
    assert len(chain.hashes) == HASH_BATCH
    assert index.apply(0, KVCacheEvents(number=0, is_snapshot=True, stored=hashes[:70]))
    assert index.apply(1, KVCacheEvents(number=0, is_snapshot=True, stored=[*hashes[:5], *hashes[6:90]]))
    chain = HashChain("", BLOCK)
    assert index.matches(tokens, chain, BLOCK, [1, 0]) == [5, 70]
    assert 70 < len(chain.hashes) <= 70 + HASH_BATCH
    index.forget(0)
    assert index.matches(tokens, HashChain("", BLOCK), BLOCK, [0, 1]) == [0, 5]
    assert index.matches(tokens, HashChain("other salt", BLOCK), BLOCK, [0, 1]) == [0, 0]
