"""The KV cache manager for data-parallel attention (`--dp-attention`): each rank has the contexts of some sequences.

    ids:  0 | part 0: 1 ... n - 1 | part 1: n ... 2 (n - 1) | ...        a rank's own ids: 1 ... n - 1

The pool has one part per rank. All blocks of a sequence are in one part, which is chosen when its table is opened: the
part with the longest cached prefix, unless another part is much emptier; forks stay in their parent's part. A runner
gets ids in its rank's numbering, and with a new row the rank that has its blocks. Sequences in different parts share no
blocks: of equal blocks in several parts, only the first one is registered.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tokenmill.kv.blocks import BlockPool, BlockTable, HashChain, RowIds
from tokenmill.kv.cache import REGION_NAMES, KVCache, PrefixMatch

MUCH_EMPTIER_RATIO = 2  # a part with more than twice as many free blocks is preferred to one with a longer prefix


class PartedKVCache(KVCache):
    def __init__(
        self,
        *,
        num_parts: int,
        windows: Seq[int | None],
        num_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = True,
        rows_per_block: Seq[int] = (),
    ) -> None:
        """`num_blocks`: of each part, including its null block. Models with recurrent layers are not supported."""
        super().__init__(
            windows=windows,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_caching=prefix_caching,
            rows_per_block=rows_per_block,
        )
        self.pool = BlockPool(num_blocks, *[num_blocks] * (num_parts - 1))  # a part is a region of the pool
        self.regions = tuple(range(num_parts))
        rows = tuple(rows_per_block) or (1,) * len(windows)
        self._part_rows = [tuple(RowIds(first, number) for number in rows) for first in self.pool.firsts]

    # ── numbers of blocks ──────────────────────────────────────────────────────────────────────────────

    @property
    def num_free(self) -> int:
        return sum(map(self.pool.free_in, self.regions))

    @property
    def num_usable(self) -> int:
        return sum(self.pool.usable)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def region_name(self, region: int) -> str:
        return REGION_NAMES[0]

    def num_groups(self, region: int) -> int:
        return len(self.rules)

    def blocks_for(self, num_tokens: int, chunk: int, region: int = 0) -> int:
        return sum(rule.max_held(num_tokens, chunk) for rule in self.rules)

    def blocks_to_open(self, num_tokens: int, chunk: int, match: PrefixMatch, region: int) -> int:
        if region != match.part:
            return 0
        shared = sum(self.pool.refs[block] > 0 for blocks in match.groups for block in blocks)
        return self.blocks_for(num_tokens, chunk) - shared

    def may_help(self, table: BlockTable, other: BlockTable) -> bool:
        return table.part == other.part

    def grows_in(self, table: BlockTable, region: int) -> bool:
        return table.part == region

    def num_held(self, table: BlockTable, region: int = 0) -> int:
        return sum(sum(map(bool, blocks)) for blocks in table.groups) if table.part == region else 0

    def has_spare(self, num_drafts: int, num_sequences: int) -> bool:
        num_needed = sum(max(1, rule.max_held(num_drafts, 1)) for rule in self.rules)
        num_free = min(map(self.pool.free_in, self.regions))
        return num_free - num_sequences * len(self.rules) >= num_needed

    # ── choosing a part ────────────────────────────────────────────────────────────────────────────────

    def match(self, token_ids: Seq[int], chain: HashChain, limit: int) -> PrefixMatch:
        """Find the part with the longest cached prefix, or use the emptiest part if it has many more free blocks."""
        emptiest = self._emptiest()
        if not self.prefix_caching:
            return self.miss()
        num_blocks = min(limit, len(token_ids)) // self.block_size
        hashes = chain.extend(token_ids, num_blocks)
        found = {part: self._num_in(part, hashes, num_blocks) for part in self.regions}
        part = max(self.regions, key=lambda one: (found[one], one == emptiest))
        if self.pool.free_in(part) * MUCH_EMPTIER_RATIO < self.pool.free_in(emptiest):
            part = emptiest
        groups = [self._hit_blocks(group, hashes, found[part]) for group in range(len(self.rules))]
        return PrefixMatch(found[part] * self.block_size, groups, part)

    def miss(self) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in self.rules], self._emptiest())

    def _emptiest(self) -> int:
        return max(self.regions, key=lambda part: (self.pool.free_in(part), -part))

    def _num_in(self, part: int, hashes: list[bytes], num_blocks: int) -> int:
        """Return the number of blocks of the longest prefix for which a part has all blocks that later queries see."""

        def has(group: int, block_hash: bytes) -> bool:
            block = self.prefix.find(group, block_hash)
            return block is not None and self.pool.region_of(block) == part

        return self._num_leading(hashes, num_blocks, has)

    def open(self, hit: PrefixMatch, owner: str = "") -> BlockTable:
        table = super().open(hit, owner)
        rows = self._part_rows[hit.part]
        return BlockTable(table.groups, table.live_from, table.num_registered, rows, owner, hit.part)

    def _region(self, table: BlockTable, group: int) -> int:
        return table.part
