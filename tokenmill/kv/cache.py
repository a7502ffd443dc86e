"""The KV cache manager used by the scheduler: match, open, reserve, commit, fork, release. No tensors.

    match    find the cached prefix of a sequence                    [hit blocks |                          ]
    open     make a block table that holds those blocks
    reserve  allocate blocks for the next tokens, all or none        [hit blocks | reserved |               ]
    commit   mark those tokens as computed: register full blocks, release blocks before a sliding window
    fork     make a second table with the same blocks
    release  release all blocks of a table

All groups share one pool of blocks, except those of recurrent layers, which have separate regions (`kv/layout.py`
defines which entries a group needs). A block that several tables hold is never written: `reserve` gives the writer a
copy (it returns pairs of blocks, which the runner copies before the step writes). Only full blocks are registered, and
a full block is never written again, so registered contents never change.

A state is written as a whole, at a multiple of 64 tokens, into a slot that no sequence reads yet. A step must keep the
last state that it passes; earlier ones are kept too while at least half of the slots are free, so that other sequences
with the same prefix can use them: all, or those at multiples of 128, 256, ... tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from typing import NamedTuple

from tokenmill.arch.cache_parts import CHUNK, CacheKind
from tokenmill.kv.blocks import NULL_BLOCK, BlockEvents, BlockPool, BlockTable, HashChain, PrefixIndex, RowIds
from tokenmill.kv.layout import REGIONS, EntryRule
from tokenmill.kv.names import BlockName, ExpectedBlock

Copies = list[tuple[int, int]]  # (from block, to block)
NO_COPIES: Copies = []
Has = Callable[[int, bytes], bool]  # (group, hash) → whether that block is available
STATES = REGIONS.index("state")
REGION_NAMES = ("blocks", "cells", "states")


class PrefixMatch(NamedTuple):
    """The longest cached prefix: full blocks, with null entries before a sliding window."""

    num_tokens: int
    groups: list[list[int]]
    part: int = 0  # the part of the pool, if it has several (`kv/parted_cache.py`)


class KVCache:
    def __init__(
        self,
        *,
        windows: Seq[int | None],
        num_blocks: int,
        block_size: int = 16,
        prefix_caching: bool = True,
        rows_per_block: Seq[int] = (),
        kinds: Seq[CacheKind] = (),
        num_cells: int = 0,
        num_states: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        """`windows`: one entry per cache group, None for full attention; `rows_per_block` (see `KVLayout`) and `kinds`
        have one entry per group too, by default 1 and "paged". `num_blocks`, `num_cells` and `num_states` count the
        null block. `chunk`: tokens between two states."""
        kind_of: Seq[CacheKind] = kinds or ["paged"] * len(windows)
        self.rules = tuple(EntryRule(*pair, block_size, chunk) for pair in zip(kind_of, windows, strict=True))
        self.block_size = block_size
        self._chunk = chunk
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, num_cells, num_states)
        self.prefix = PrefixIndex(len(self.rules))
        rows = tuple(rows_per_block) or (1,) * len(windows)
        self._row_ids = tuple(
            RowIds(self.pool.firsts[rule.region], number) for rule, number in zip(self.rules, rows, strict=True)
        )
        self._by_token = [group for group, rule in enumerate(self.rules) if rule.kind != "state"]
        # Groups of which later queries see all entries, and those of which they see some.
        self._full_groups = [group for group, rule in enumerate(self.rules) if rule.keeps_all]
        self._partial_groups = [group for group, rule in enumerate(self.rules) if not rule.keeps_all]
        self.regions = tuple(dict.fromkeys(rule.region for rule in self.rules))
        self.is_recurrent = STATES in self.regions

    def watch_blocks(self) -> BlockEvents:
        """Start recording changes of the registered blocks: of the first group without a window, or else of the first
        group."""
        self.prefix.events = BlockEvents(self.prefix, self._full_groups[0] if self._full_groups else 0)
        return self.prefix.events

    def chain(self, salt: str, adapter: str = "") -> HashChain:
        return HashChain(salt, self.block_size, adapter)

    # ── numbers of blocks ──────────────────────────────────────────────────────────────────────────────

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    @property
    def num_usable(self) -> int:
        return self.pool.num_usable

    def region_name(self, region: int) -> str:
        return REGION_NAMES[region]

    def num_groups(self, region: int) -> int:
        return sum(rule.region == region for rule in self.rules)

    def blocks_for(self, num_tokens: int, chunk: int, region: int = 0) -> int:
        """Return the most blocks of a region that one sequence holds at a time until `num_tokens` are computed, in
        steps of up to `chunk` tokens."""
        return sum(rule.max_held(num_tokens, chunk) for rule in self.rules if rule.region == region)

    def has_spare(self, num_drafts: int, num_sequences: int) -> bool:
        """Tell whether there are free blocks for drafts besides one block per sequence and group to grow into."""
        return all(
            self.pool.free_in(region) - num_sequences * self.num_groups(region)
            >= sum(max(1, rule.max_held(num_drafts, 1)) for rule in self.rules if rule.region == region)
            for region in self.regions
        )

    def blocks_to_open(self, num_tokens: int, chunk: int, match: PrefixMatch, region: int) -> int:
        """Return how many free blocks of a region a sequence needs for `num_tokens` if it starts with a match."""
        return self.blocks_for(num_tokens, chunk, region) - self.num_shared(match, region)

    def may_help(self, table: BlockTable, other: BlockTable) -> bool:
        """Tell whether blocks released by one table can be used by another."""
        return True

    def grows_in(self, table: BlockTable, region: int) -> bool:
        """Tell whether a table allocates blocks from a region."""
        return True

    def num_held(self, table: BlockTable, region: int = 0) -> int:
        return sum(
            sum(map(bool, blocks))
            for rule, blocks in zip(self.rules, table.groups, strict=True)
            if rule.region == region
        )

    # ── matching ───────────────────────────────────────────────────────────────────────────────────────

    def match(self, token_ids: Seq[int], chain: HashChain, limit: int) -> PrefixMatch:
        """Find the longest prefix of at most `limit` tokens for which all blocks that later queries see are cached."""
        if not self.prefix_caching:
            return self.miss()
        num_blocks = min(limit, len(token_ids)) // self.block_size
        hashes = chain.extend(token_ids, num_blocks)
        num_blocks = self._num_leading(hashes, num_blocks, self._is_cached)
        groups = [self._hit_blocks(group, hashes, num_blocks) for group in range(len(self.rules))]
        return PrefixMatch(num_blocks * self.block_size, groups)

    def _is_cached(self, group: int, block_hash: bytes) -> bool:
        return self.prefix.find(group, block_hash) is not None

    def _num_leading(self, hashes: list[bytes], num_blocks: int, has: Has) -> int:
        """Return the number of blocks of the longest prefix for which all blocks that later queries see are
        available."""
        return self._last_visible_block(hashes, self._full_attention_run(hashes, num_blocks, has), has)

    def num_shared(self, hit: PrefixMatch, region: int = 0) -> int:
        """Count the blocks of a hit that are already in use, so that they do not reduce the free blocks."""
        found = (blocks for rule, blocks in zip(self.rules, hit.groups, strict=True) if rule.region == region)
        return sum(self.pool.refs[block] > 0 for blocks in found for block in blocks)

    def miss(self) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in self.rules])

    def _full_attention_run(self, hashes: list[bytes], num_blocks: int, has: Has) -> int:
        """Count the leading blocks that are available in all groups without a window, which need every block from the
        first on."""
        for index in range(num_blocks):
            if not all(has(group, hashes[index]) for group in self._full_groups):
                return index
        return num_blocks

    def _last_visible_block(self, hashes: list[bytes], num_blocks: int, has: Has) -> int:
        """Return the length of the longest prefix, up to `num_blocks`, for which all blocks that later queries see in
        groups with a window are available."""
        if not self._partial_groups:
            return num_blocks
        best = 0
        missing = dict.fromkeys(self._partial_groups, -1)  # per group: the last missing entry so far
        for index in range(num_blocks):
            end = (index + 1) * self.block_size
            for group in self._partial_groups:
                rule = self.rules[group]
                entry = end // rule.tokens - 1
                if rule.last_block(entry) == index and not has(group, hashes[index]):
                    missing[group] = entry
            if all(missing[group] < self.first_visible_block(group, end) for group in self._partial_groups):
                best = index + 1
        return best

    def first_visible_block(self, group: int, position: int) -> int:
        """Return the first entry that a query at `position` or later can see."""
        return self.rules[group].first_visible(position)

    def _hit_blocks(self, group: int, hashes: list[bytes], num_blocks: int) -> list[int]:
        rule = self.rules[group]
        num_entries = num_blocks * self.block_size // rule.tokens
        first = min(rule.first_visible(num_blocks * self.block_size), num_entries)
        found = (self.prefix.find(group, hashes[rule.last_block(entry)]) for entry in range(first, num_entries))
        return [NULL_BLOCK] * first + [block for block in found if block is not None]

    # ── fetching from tiers ────────────────────────────────────────────────────────────────────────────

    def absent(self, hashes: list[bytes], start: int, end: int) -> list[BlockName]:
        """Return the blocks of a prefix of `end` blocks that are not cached and that queries from block `start` on
        see."""
        names = []
        for group, rule in enumerate(self.rules):
            first = rule.first_visible(start * self.block_size)
            for entry in range(first, end * self.block_size // rule.tokens):
                block_hash = hashes[rule.last_block(entry)]
                if self.prefix.find(group, block_hash) is None:
                    names.append(BlockName(group, block_hash))
        return names

    def num_with(self, hashes: list[bytes], limit: int, found: Container[BlockName]) -> int:
        """Return the number of blocks of the longest prefix that would be usable if the blocks in `found` were
        fetched."""
        return self._num_leading(
            hashes, limit, lambda group, one: self._is_cached(group, one) or BlockName(group, one) in found
        )

    def open_absent(
        self, hashes: list[bytes], num_blocks: int, owner: str
    ) -> tuple[BlockTable, list[ExpectedBlock]] | None:
        """Open a table for a prefix of which some blocks will be fetched, and return it with those blocks; None if the
        pool has too few free blocks."""
        groups: list[list[int | None]] = []
        for group, rule in enumerate(self.rules):
            num_entries = num_blocks * self.block_size // rule.tokens
            first = min(rule.first_visible(num_blocks * self.block_size), num_entries)
            cached = [self.prefix.find(group, hashes[rule.last_block(entry)]) for entry in range(first, num_entries)]
            groups.append([*[NULL_BLOCK] * first, *cached])
        for region in self.regions:
            of_region = (blocks for rule, blocks in zip(self.rules, groups, strict=True) if rule.region == region)
            if not self._has_room(region, [block for blocks in of_region for block in blocks]):
                return None
        for blocks in groups:
            for block in blocks:
                if block is not None:
                    self.pool.share(block)
        targets: list[ExpectedBlock] = []
        tables = [self._filled(group, blocks, hashes, targets) for group, blocks in enumerate(groups)]
        return BlockTable(tables, [0] * len(tables), 0, self._row_ids, owner), targets

    def _has_room(self, region: int, entries: list[int | None]) -> bool:
        """Tell whether a region has free blocks for the missing entries of a prefix in addition to the cached ones."""
        found = sum(one is not None and one != NULL_BLOCK and self.pool.refs[one] == 0 for one in entries)
        return self.pool.free_in(region) >= found + entries.count(None)

    def _filled(
        self, group: int, blocks: list[int | None], hashes: list[bytes], targets: list[ExpectedBlock]
    ) -> list[int]:
        """Return a table's entries, with a new block for each that will be fetched; the new blocks are added to
        `targets`."""
        rule, filled = self.rules[group], []
        for entry, block in enumerate(blocks):
            if block is None:
                block = self._take(rule.region)
                targets.append(ExpectedBlock(BlockName(group, hashes[rule.last_block(entry)]), block))
            filled.append(block)
        return filled

    # ── block tables ───────────────────────────────────────────────────────────────────────────────────

    def open(self, hit: PrefixMatch, owner: str = "") -> BlockTable:
        """Return a table that holds the blocks of a hit; `owner`: the tenant that owns its blocks once they are cached
        and free."""
        for blocks in hit.groups:
            for block in blocks:
                self.pool.share(block)
        live_from = [
            min(rule.first_visible(hit.num_tokens), len(blocks))
            for rule, blocks in zip(self.rules, hit.groups, strict=True)
        ]
        num_blocks = hit.num_tokens // self.block_size
        return BlockTable([list(blocks) for blocks in hit.groups], live_from, num_blocks, self._row_ids, owner)

    def _region(self, table: BlockTable, group: int) -> int:
        """Return the region of the pool that a table's blocks of a group come from."""
        return self.rules[group].region

    def reserve(self, table: BlockTable, start: int, end: int, *, is_certain: bool = True) -> Copies | None:
        """Make [start, end) writable for this table only and return the blocks to copy; None (without a change) if the
        pool has too few free blocks.

        `is_certain`: False for drafts, of which any number may be accepted, so that all their entries must be kept.
        """
        first, last = start // self.block_size, (end - 1) // self.block_size
        passes_state = self.is_recurrent and start // self._chunk != end // self._chunk
        if first == last and not passes_state and self._is_own(table, last):  # the usual case when decoding
            return NO_COPIES
        shared = self._shared_entries(table, start, end)
        new = self._new_entries(table, start, end, is_certain=is_certain)
        if not shared and not new and not self.is_recurrent:
            return NO_COPIES
        if not self._suffices(table, shared, new):
            return None
        copies = [pair for group, index in shared if (pair := self._copy_on_write(table, group, index))]
        for group, indices in new.items():
            self._fill(table, group, indices)
        if self.is_recurrent:
            self._null_unkept_entries(table, start, end)
        if passes_state and is_certain:
            self._keep_earlier_states(table, start, end)
        return copies

    def _null_unkept_entries(self, table: BlockTable, start: int, end: int) -> None:
        """Append null entries for those that a step writes and no later query reads: the runner's copy of the table may
        have other blocks there."""
        for group, (rule, blocks) in enumerate(zip(self.rules, table.groups, strict=True)):
            if (gap := rule.written(start, end).stop - len(blocks)) > 0:
                table.append(group, [NULL_BLOCK] * gap)

    def _is_own(self, table: BlockTable, index: int) -> bool:
        """Tell whether every group has the entry and no other table holds its block."""
        refs, groups = self.pool.refs, table.groups
        for group in self._by_token:  # a hot loop: runs for every row of every step
            blocks = groups[group]
            if index >= len(blocks) or refs[blocks[index]] != 1:
                return False
        return True

    def _shared_entries(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]]:
        refs = self.pool.refs
        return [
            (group, index)
            for group, (rule, blocks) in enumerate(zip(self.rules, table.groups, strict=True))
            for index in rule.written(start, end)[: max(0, len(blocks) - rule.written(start, end).start)]
            if refs[blocks[index]] > 1
        ]

    def _new_entries(self, table: BlockTable, start: int, end: int, *, is_certain: bool) -> dict[int, list[int]]:
        """Return, by group, the entries that must be kept and have no block yet, including null entries that an
        earlier, longer plan did not need."""
        new = {}
        for group, (rule, blocks) in enumerate(zip(self.rules, table.groups, strict=True)):
            required = rule.required(start, end, is_certain=is_certain)
            indices = [index for index in required if index >= len(blocks) or blocks[index] == NULL_BLOCK]
            if indices:
                new[group] = indices
        return new

    def _suffices(self, table: BlockTable, shared: list[tuple[int, int]], new: dict[int, list[int]]) -> bool:
        needed = dict.fromkeys(self.regions, 0)
        for group, _ in shared:
            needed[self._region(table, group)] += 1
        for group, indices in new.items():
            needed[self._region(table, group)] += len(indices)
        return all(number <= self.pool.free_in(region) for region, number in needed.items())

    def _fill(self, table: BlockTable, group: int, indices: list[int]) -> None:
        """Allocate blocks for these entries (ascending); skipped entries after the table's end become null."""
        region, num_entries = self._region(table, group), len(table.groups[group])
        inside = bisect_left(indices, num_entries)
        for index in indices[:inside]:
            table.replace(group, index, self._take(region))
        if behind := indices[inside:]:
            gaps = [NULL_BLOCK] * (behind[0] - num_entries)
            table.append(group, gaps + [self._take(region) for _ in behind])

    def _copy_on_write(self, table: BlockTable, group: int, index: int) -> tuple[int, int] | None:
        """Replace a shared block of a table by a new one and return the pair to copy; None if the new block will be
        overwritten as a whole."""
        rule, old = self.rules[group], table.groups[group][index]
        new = self._take(self._region(table, group))
        table.replace(group, index, new)
        self._release_block(old, table.owner)
        return None if rule.kind == "state" else (old, new)

    def _keep_earlier_states(self, table: BlockTable, start: int, end: int) -> None:
        """Keep states before the last one that a step passes, as long as less than half of the slots are in use."""
        group = next(number for number, rule in enumerate(self.rules) if rule.kind == "state")
        entries = self.rules[group].written(start, end)[:-1]
        room = self.pool.free_in(STATES) - self.pool.usable[STATES] // 2
        if not entries or room <= 0:
            return
        stride = 1
        while len(entries) // stride > room:
            stride *= 2
        for index in entries:
            if (index + 1) % stride == 0 and room > 0 and table.groups[group][index] == NULL_BLOCK:
                table.replace(group, index, self._take(STATES))
                room -= 1

    def commit(self, table: BlockTable, num_computed: int, token_ids: Seq[int], chain: HashChain | None) -> None:
        """Note that tokens [0, num_computed) are in the cache. Without a chain their blocks are not registered."""
        num_full = num_computed // self.block_size
        if num_full > table.num_registered:
            if chain is not None and self.prefix_caching:
                self._register(table, num_full, chain.extend(token_ids, num_full))
            table.num_registered = num_full
        for group in self._partial_groups:
            self._drop_unseen(table, group, num_computed)

    def _register(self, table: BlockTable, num_full: int, hashes: list[bytes]) -> None:
        for group, (rule, blocks) in enumerate(zip(self.rules, table.groups, strict=True)):
            first, end = (number * self.block_size // rule.tokens for number in (table.num_registered, num_full))
            for index in range(first, min(end, len(blocks))):
                if blocks[index] != NULL_BLOCK:
                    self.prefix.register(group, hashes[rule.last_block(index)], blocks[index])

    def _drop_unseen(self, table: BlockTable, group: int, num_computed: int) -> None:
        end = min(self.first_visible_block(group, num_computed), len(table.groups[group]))
        if end > table.live_from[group]:
            for block in reversed(table.drop_before(group, end)):
                self._release_block(block, table.owner)

    def fork(self, table: BlockTable) -> BlockTable:
        for blocks in table.groups:
            for block in blocks:
                self.pool.share(block)
        return table.fork()

    def release(self, table: BlockTable) -> None:
        """Release all blocks, the last ones first: shared prefixes are evicted last."""
        for blocks in table.groups:
            for block in reversed(blocks):
                self._release_block(block, table.owner)
            blocks.clear()
        table.live_from = [0] * len(self.rules)

    def _take(self, region: int) -> int:
        block = self.pool.take(region)
        self.prefix.forget(block)
        return block

    def _release_block(self, block: int, owner: str) -> None:
        self.pool.release(block, keep=self.prefix.has(block), owner=owner)
