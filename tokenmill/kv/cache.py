"""The KV cache as the scheduler uses it: match, open, reserve, commit, fork, release. Bookkeeping only, no tensors.

    match    how much of a sequence is already computed              [hit blocks |                          ]
    open     a table that holds those blocks
    reserve  room for the next tokens, all of it or nothing          [hit blocks | reserved |               ]
    commit   those tokens are computed: full blocks become findable, blocks behind a sliding window go back
    fork     a second table on the same blocks
    release  all blocks of a table go back

All groups take their blocks from one pool. A block that several tables hold is never written: `reserve` gives the
writer a copy of its own (the pairs it returns are copied by the runner before anything is written). Only full blocks
are registered, and nothing is written into a full block, so registered contents never change.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from tokenmill.kv.blocks import NULL_BLOCK, BlockPool, BlockTable, HashChain, PrefixIndex
from tokenmill.kv.layout import blocks_in_group

Copies = list[tuple[int, int]]  # (from block, to block)
NO_COPIES: Copies = []


class PrefixMatch(NamedTuple):
    """The longest computed prefix: full blocks, null where a window can't see them any more."""

    num_tokens: int
    groups: list[list[int]]


class KVCache:
    def __init__(
        self,
        *,
        windows: Seq[int | None],
        num_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = True,
        rows_per_block: Seq[int] = (),
    ) -> None:
        """`windows`: one entry a cache group, None for full attention; `rows_per_block` likewise (see `KVLayout`), 1 by
        default. `num_blocks` counts the null block."""
        self.windows = tuple(windows)
        self.rows_per_block = tuple(rows_per_block) or (1,) * len(self.windows)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixIndex(len(self.windows))

    def chain(self, salt: str) -> HashChain:
        return HashChain(salt, self.block_size)

    # ── how much ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    @property
    def num_usable(self) -> int:
        return self.pool.num_usable

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Blocks one sequence holds at most on its way to `num_tokens`, computed in steps of up to `chunk` tokens."""
        return sum(blocks_in_group(window, num_tokens, chunk, self.block_size) for window in self.windows)

    # ── what is there already ──────────────────────────────────────────────────────────────────────────

    def match(self, token_ids: Seq[int], chain: HashChain, limit: int) -> PrefixMatch:
        """The longest prefix of at most `limit` tokens whose blocks (those still in sight) are all here."""
        if not self.prefix_caching:
            return self.miss()
        num_blocks = min(limit, len(token_ids)) // self.block_size
        hashes = chain.extend(token_ids, num_blocks)
        num_blocks = self._full_attention_run(hashes, num_blocks)
        num_blocks = self._last_visible_block(hashes, num_blocks)
        groups = [self._hit_blocks(group, hashes, num_blocks) for group in range(len(self.windows))]
        return PrefixMatch(num_blocks * self.block_size, groups)

    def num_shared(self, hit: PrefixMatch) -> int:
        """Count the blocks of a hit that running sequences hold already: they are not taken from the free ones."""
        return sum(self.pool.refs[block] > 0 for blocks in hit.groups for block in blocks)

    def miss(self) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in self.windows])

    def _full_attention_run(self, hashes: list[bytes], num_blocks: int) -> int:
        """Count the leading blocks that all groups without a window have: those need every block from the first on."""
        full = [group for group, window in enumerate(self.windows) if window is None]
        for index in range(num_blocks):
            if any(self.prefix.find(group, hashes[index]) is None for group in full):
                return index
        return num_blocks

    def _last_visible_block(self, hashes: list[bytes], num_blocks: int) -> int:
        """The longest prefix of at most `num_blocks` whose windows are complete at its end."""
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        best = num_blocks if not windowed else 0
        missing = dict.fromkeys(windowed, -1)  # per group: the last absent block so far
        for index in range(num_blocks if windowed else 0):
            for group in windowed:
                if self.prefix.find(group, hashes[index]) is None:
                    missing[group] = index
            end = (index + 1) * self.block_size
            if all(missing[group] < self.first_visible_block(group, end) for group in windowed):
                best = index + 1
        return best

    def first_visible_block(self, group: int, position: int) -> int:
        """The first entry that a query at `position` or later can see.

        keys:  [ ... | position - window + 1 ............ position ]
                       ▲ in this block
        """
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _hit_blocks(self, group: int, hashes: list[bytes], num_blocks: int) -> list[int]:
        first = min(self.first_visible_block(group, num_blocks * self.block_size), num_blocks)
        found = (self.prefix.find(group, block_hash) for block_hash in hashes[first:num_blocks])
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    # ── a table's life ─────────────────────────────────────────────────────────────────────────────────

    def open(self, hit: PrefixMatch) -> BlockTable:
        for blocks in hit.groups:
            for block in blocks:
                self.pool.share(block)
        num_blocks = hit.num_tokens // self.block_size
        live_from = [
            min(self.first_visible_block(group, hit.num_tokens), num_blocks) for group in range(len(self.windows))
        ]
        return BlockTable([list(blocks) for blocks in hit.groups], live_from, num_blocks, self.rows_per_block)

    def reserve(self, table: BlockTable, start: int, end: int) -> Copies | None:
        """Make [start, end) writable for this table alone; None (and nothing changed) when the pool is short."""
        first, last = start // self.block_size, (end - 1) // self.block_size
        if first == last and self._is_own(table, last):  # decoding, nearly always
            return NO_COPIES
        shared = self._shared_entries(table, first, last)
        num_new = sum(max(0, last + 1 - len(blocks)) for blocks in table.groups)
        if not shared and not num_new:
            return NO_COPIES
        if len(shared) + num_new > self.pool.num_free:
            return None
        copies = [self._copy_on_write(table, group, index) for group, index in shared]
        for group, blocks in enumerate(table.groups):
            if last >= len(blocks):
                table.append(group, [self._take() for _ in range(last + 1 - len(blocks))])
        return copies

    def _is_own(self, table: BlockTable, index: int) -> bool:
        """True where every group has the entry and no other table holds it."""
        refs = self.pool.refs
        return all(index < len(blocks) and refs[blocks[index]] == 1 for blocks in table.groups)

    def _shared_entries(self, table: BlockTable, first: int, last: int) -> list[tuple[int, int]]:
        refs = self.pool.refs
        return [
            (group, index)
            for group, blocks in enumerate(table.groups)
            for index in range(first, min(last + 1, len(blocks)))
            if refs[blocks[index]] > 1
        ]

    def _copy_on_write(self, table: BlockTable, group: int, index: int) -> tuple[int, int]:
        old, new = table.groups[group][index], self._take()
        table.replace(group, index, new)
        self._release_block(old)
        return old, new

    def commit(self, table: BlockTable, num_computed: int, token_ids: Seq[int], chain: HashChain | None) -> None:
        """Record that tokens [0, num_computed) are in the cache. Without a chain others do not find them."""
        num_full = num_computed // self.block_size
        if num_full > table.num_registered:
            if chain is not None and self.prefix_caching:
                self._register(table, num_full, chain.extend(token_ids, num_full))
            table.num_registered = num_full
        for group, window in enumerate(self.windows):
            if window is not None:
                self._drop_unseen(table, group, num_computed)

    def _register(self, table: BlockTable, num_full: int, hashes: list[bytes]) -> None:
        for group, blocks in enumerate(table.groups):
            for index in range(table.num_registered, num_full):
                if blocks[index] != NULL_BLOCK:
                    self.prefix.register(group, hashes[index], blocks[index])

    def _drop_unseen(self, table: BlockTable, group: int, num_computed: int) -> None:
        end = min(self.first_visible_block(group, num_computed), len(table.groups[group]))
        if end > table.live_from[group]:
            for block in reversed(table.drop_before(group, end)):
                self._release_block(block)

    def fork(self, table: BlockTable) -> BlockTable:
        for blocks in table.groups:
            for block in blocks:
                self.pool.share(block)
        return table.fork()

    def release(self, table: BlockTable) -> None:
        """Give back all blocks, the last first: beginnings are what others share, so they are evicted last."""
        for blocks in table.groups:
            for block in reversed(blocks):
                self._release_block(block)
            blocks.clear()
        table.live_from = [0] * len(self.windows)

    def _take(self) -> int:
        block = self.pool.take()
        self.prefix.forget(block)
        return block

    def _release_block(self, block: int) -> None:
        self.pool.release(block, keep=self.prefix.has(block))
