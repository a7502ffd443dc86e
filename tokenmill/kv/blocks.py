"""The bookkeeping of KV cache blocks: the pool that allocates them, block tables, and the index of full blocks by hash.
No tensors.

BlockPool     all blocks with their reference counts, and the free lists
BlockTable    the blocks of one sequence, per cache group
HashChain     the hashes of one sequence's full blocks
PrefixIndex   registered blocks by hash
BlockEvents   the changes of the registered blocks, for routers
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence as Seq
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from tokenmill.kv.names import Save
from tokenmill.types import BlockTableUpdate, KVCacheEvents

NULL_BLOCK = 0
EVICTIONS_PER_TENANT = 16  # blocks evicted from one tenant before the tenant with the most blocks is determined again
DIGEST_BYTES = 16


class FreeBlocks:
    """The free blocks of one region, in the order in which they are allocated again.

    Blocks without cached contents come first. Of the cached ones, the tenant with the most blocks loses the one it
    released longest ago: a tenant that fills the cache evicts its own blocks, not those of others.

        empty | tenant A: oldest ... newest | tenant B: oldest ... newest
    """

    def __init__(self, blocks: range) -> None:
        self._empty = OrderedDict.fromkeys(blocks)
        self._cached: dict[str, OrderedDict[int, None]] = {}  # by owner
        self._owners: dict[int, str] = {}
        self._victim = ""  # the tenant whose blocks are evicted next
        self._num_evictions_left = 0

    def __len__(self) -> int:
        return len(self._empty) + len(self._owners)

    def __contains__(self, block: int) -> bool:
        return block in self._empty or block in self._owners

    def add_empty(self, block: int) -> None:
        self._empty[block] = None
        self._empty.move_to_end(block, last=False)

    def add_cached(self, block: int, owner: str) -> None:
        self._owners[block] = owner
        self._cached.setdefault(owner, OrderedDict())[block] = None

    def remove(self, block: int) -> None:
        owner = self._owners.pop(block, None)
        if owner is None:
            del self._empty[block]
            return
        blocks = self._cached[owner]
        del blocks[block]
        if not blocks:
            del self._cached[owner]

    def pop(self) -> int:
        if self._empty:
            return self._empty.popitem(last=False)[0]
        if self._num_evictions_left <= 0 or self._victim not in self._cached:
            self._victim = max(self._cached, key=lambda owner: len(self._cached[owner]))
            self._num_evictions_left = EVICTIONS_PER_TENANT
        self._num_evictions_left -= 1
        block = next(iter(self._cached[self._victim]))
        self.remove(block)
        return block


class BlockPool:
    """All blocks, used and free.

    A block that no table holds is free, but its contents stay readable until it is allocated again. So the free list is
    in eviction order: blocks that are not registered come first, then the registered ones, least recently released
    first (of the tenant that has most of them, see `FreeBlocks`).

        free:  [ not registered | not registered | registered, oldest | ... | registered, newest ]
                 ▲ take() allocates from here

    Block 0 is the null block: table entries outside a sliding window point there; it is never allocated or counted.
    Blocks of other sizes (`kv/layout.py`: cells, states) have the ids after these, in separate regions, each with its
    own free list:

        ids:  0 | 1 ... num_blocks - 1 | cells ... | states ... |
    """

    def __init__(self, num_blocks: int, *others: int) -> None:
        """`others`: the number of blocks of each further region; 0 if the region is empty. Like `num_blocks`, each
        counts the null block."""
        assert num_blocks >= 2, "a pool needs the null block and at least one other"
        self.usable = (num_blocks - 1, *(max(0, number - 1) for number in others))
        self.firsts = tuple(accumulate((1, *self.usable[:-1])))  # the first id of each region
        self.refs = [0] * (1 + sum(self.usable))
        self._free = [
            FreeBlocks(range(first, first + count)) for first, count in zip(self.firsts, self.usable, strict=True)
        ]

    @property
    def num_usable(self) -> int:
        return self.usable[0]

    @property
    def num_free(self) -> int:
        return len(self._free[0])

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def free_in(self, region: int) -> int:
        return len(self._free[region])

    def region_of(self, block: int) -> int:
        return bisect_right(self.firsts, block) - 1

    def is_free(self, block: int) -> bool:
        return block in self._free[self.region_of(block)]

    def take(self, region: int = 0) -> int:
        """Allocate the first block in eviction order; the caller must remove its registration."""
        block = self._free[region].pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more table that holds `block`; a free block is in use again, with its contents."""
        if block == NULL_BLOCK:
            return
        if self.refs[block] == 0:
            self._free[self.region_of(block)].remove(block)
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool, owner: str = "") -> None:
        """Count one table less that holds `block`. Once free, it is kept among its owner's cached blocks if `keep`,
        otherwise it is reused first."""
        if block == NULL_BLOCK:
            return
        assert self.refs[block] > 0, f"block {block} was released more often than taken"
        self.refs[block] -= 1
        if self.refs[block] == 0:
            free = self._free[self.region_of(block)]
            if keep:
                free.add_cached(block, owner)
            else:
                free.add_empty(block)


class RowIds(NamedTuple):
    """Converts a group's block ids to rows of its tensors: a block spans `rows_per_block` rows (see `KVLayout`)."""

    first: int = 1  # id of the region's first block, whose rows follow those of the null block
    rows_per_block: int = 1

    def of(self, blocks: list[int]) -> list[int]:
        if self == PLAIN_IDS:
            return list(blocks)
        return [(block - self.first + 1) * self.rows_per_block if block else 0 for block in blocks]


PLAIN_IDS = RowIds()


class BlockTable:
    """The blocks of one sequence, per cache group.

    Entry i of a group holds tokens [i * block_size, (i + 1) * block_size), or the state after chunk i. The runner has a
    copy of every table and receives changes only; a table that it does not have yet (new, forked, back from preemption)
    is sent completely. Ids are sent as rows of the group's tensors.
    """

    __slots__ = ("_pending", "_row_ids", "groups", "live_from", "num_registered", "owner", "part")

    def __init__(
        self,
        groups: list[list[int]],
        live_from: list[int],
        num_registered: int = 0,
        row_ids: Seq[RowIds] = (),
        owner: str = "",
        part: int = 0,
    ) -> None:
        self.groups = groups  # block ids, one list per group; NULL_BLOCK for entries before the window
        self.live_from = live_from  # per group: entries before this one are null
        self.num_registered = num_registered  # leading blocks that were already registered in the prefix cache
        self.owner = owner  # the tenant that owns the blocks while they are cached and free
        self.part = part  # the part of the pool that its blocks come from (`kv/parted_cache.py`)
        self._row_ids = row_ids or (PLAIN_IDS,) * len(groups)
        self._pending: list[BlockTableUpdate] | None = None  # changes to send; None: the runner does not have the table

    def append(self, group: int, blocks: list[int]) -> None:
        self._note(group, len(self.groups[group]), blocks)
        self.groups[group].extend(blocks)

    def replace(self, group: int, index: int, block: int) -> None:
        self.groups[group][index] = block
        self._note(group, index, [block])

    def drop_before(self, group: int, end: int) -> list[int]:
        """Set the entries before `end` to null; return the blocks that they held."""
        start = self.live_from[group]
        dropped = self.groups[group][start:end]
        nulls = [NULL_BLOCK] * len(dropped)
        self.groups[group][start:end] = nulls
        self._note(group, start, nulls)
        self.live_from[group] = end
        return dropped

    def fork(self) -> BlockTable:
        """Return a second table with the same entries; the caller counts the references."""
        groups = [list(blocks) for blocks in self.groups]
        return BlockTable(groups, list(self.live_from), self.num_registered, self._row_ids, self.owner, self.part)

    def resend_all(self) -> None:
        """Send the whole table with the next updates, because the runner has dropped its copy."""
        self._pending = None

    def updates(self) -> list[BlockTableUpdate]:
        """Return the changes that the runner has not received yet, for the caller to send."""
        pending, self._pending = self._pending, []
        if pending is None:
            return [self._update(group, 0, blocks) for group, blocks in enumerate(self.groups) if blocks]
        return pending

    def _note(self, group: int, start: int, blocks: list[int]) -> None:
        if self._pending is not None:
            self._pending.append(self._update(group, start, blocks))

    def _update(self, group: int, start: int, blocks: list[int]) -> BlockTableUpdate:
        return BlockTableUpdate(group, start, self._row_ids[group].of(blocks))


class HashChain:
    """The hashes of a sequence's full blocks, computed once each.

    The hash of a block covers its tokens and the hash of the previous block, so equal hashes mean equal tokens from the
    first one on (128 bits of BLAKE2b). The chain starts with the salt: tenants with different salts share no blocks,
    and can't infer the prompts of others from response times.

        salt ──► h0 = H(salt) ──► h1 = H(h0, tokens 0..15) ──► h2 = H(h1, tokens 16..31) ──► ...

    Keys and values computed with an adapter are valid for that adapter only: its digest is the key of the first hash,
    so no salt leads to the same hashes for another adapter, or for none.
    """

    __slots__ = ("_block_size", "_last", "_root", "hashes")

    def __init__(self, salt: str, block_size: int, adapter: str = "") -> None:
        self._block_size = block_size
        self._root = blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=adapter.encode()).digest()
        self._last = self._root
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Seq[int], num_blocks: int) -> list[bytes]:
        """Return at least the first `num_blocks` hashes; `token_ids` may only have grown since the last call."""
        for index in range(len(self.hashes), num_blocks):
            start = index * self._block_size
            tokens = array("q", token_ids[start : start + self._block_size])
            self._last = blake2b(self._last + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
            self.hashes.append(self._last)
        return self.hashes

    def first(self, token_ids: Seq[int]) -> bytes | None:
        """Return the hash of the first block; None if it is not full."""
        return self.extend(token_ids, 1)[0] if len(token_ids) >= self._block_size else None

    def fresh(self) -> HashChain:
        """Return an empty chain with the same salt and adapter, for other tokens."""
        twin = HashChain.__new__(HashChain)
        twin._block_size, twin._root, twin._last, twin.hashes = self._block_size, self._root, self._root, []
        return twin

    def fork(self) -> HashChain:
        twin = self.fresh()
        twin._last, twin.hashes = self._last, list(self.hashes)
        return twin


class PrefixIndex:
    """Registered blocks by hash, with one index per cache group (the groups' layers differ, so their contents do)."""

    def __init__(self, num_groups: int) -> None:
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._hashes: dict[int, tuple[int, bytes]] = {}
        self.events: BlockEvents | None = None  # None: changes are not recorded
        self.save: Save | None = None  # called with each registered block, if there are tiers

    def find(self, group: int, block_hash: bytes) -> int | None:
        return self._blocks[group].get(block_hash)

    def register(self, group: int, block_hash: bytes, block: int) -> None:
        """Register `block` under its hash, unless an equal block is already registered."""
        if block not in self._hashes and block_hash not in self._blocks[group]:
            self._blocks[group][block_hash] = block
            self._hashes[block] = (group, block_hash)
            if self.events is not None:
                self.events.note(group, block_hash, is_stored=True)
            if self.save is not None:
                self.save(block, self._hashes[block])

    def registration(self, block: int) -> tuple[int, bytes] | None:
        """Return a block's registration: the same object as long as the block was not reused. Threads that copy a block
        compare it before and after the copy."""
        return self._hashes.get(block)

    def forget(self, block: int) -> None:
        if registered := self._hashes.pop(block, None):
            group, block_hash = registered
            del self._blocks[group][block_hash]
            if self.events is not None:
                self.events.note(group, block_hash, is_stored=False)

    def hashes(self, group: int) -> list[bytes]:
        """Return the hashes of all registered blocks of a group."""
        return list(self._blocks[group])

    def has(self, block: int) -> bool:
        return block in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def check_integrity(self) -> None:
        """Assert that every registered block is found by its own hash."""
        assert all(self.find(group, block_hash) == block for block, (group, block_hash) in self._hashes.items())


class BlockEvents:
    """Records the changes of one cache group's registered blocks, for a router that sends requests to the core with
    their cached prefix. A block that was registered and evicted between two reports is not reported."""

    def __init__(self, index: PrefixIndex, group: int) -> None:
        """The first report is a snapshot of all registered blocks."""
        self._index = index
        self._group = group
        self._number = 0
        self._is_stored: dict[bytes, bool] = {}

    def note(self, group: int, block_hash: bytes, *, is_stored: bool) -> None:
        if group != self._group:
            return
        before = self._is_stored.pop(block_hash, None)
        if before is None or before is is_stored:
            self._is_stored[block_hash] = is_stored

    def pop(self) -> KVCacheEvents | None:
        """Return the changes since the last call; None if there are none."""
        number, self._number = self._number, self._number + 1
        if number == 0:
            self._is_stored = {}
            return KVCacheEvents(number=0, is_snapshot=True, stored=self._index.hashes(self._group))
        if not self._is_stored:
            self._number = number
            return None
        changed, self._is_stored = self._is_stored, {}
        stored = [block_hash for block_hash, is_stored in changed.items() if is_stored]
        return KVCacheEvents(
            number=number, stored=stored, gone=[one for one, is_stored in changed.items() if not is_stored]
        )
