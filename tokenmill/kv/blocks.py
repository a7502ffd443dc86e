"""The bookkeeping of cache blocks: the pool they are taken from, the table of one sequence, and the hashes under which
full blocks are found again. No tensors.

BlockPool     every block, each with the number of tables that hold it
BlockTable    where the tokens of one sequence lie, per cache group
HashChain     the hashes of one sequence's full blocks
PrefixIndex   registered blocks by hash
BlockNews     what changes among them
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
from tokenmill.types import BlockTableUpdate, KVNews

NULL_BLOCK = 0
LOST_IN_A_ROW = 16  # blocks that one tenant loses before the tenant with the most blocks is determined again
DIGEST_BYTES = 16


class FreeBlocks:
    """The free blocks of one region, in the order in which they are handed out again.

    Those with nothing in them come first. Of those whose contents may be found again the tenant with the most of them
    loses one, the one it released longest ago: who fills the cache evicts its own blocks, not those of others.

        empty | tenant A: oldest ... newest | tenant B: oldest ... newest
    """

    def __init__(self, blocks: range) -> None:
        self._empty = OrderedDict.fromkeys(blocks)
        self._cached: dict[str, OrderedDict[int, None]] = {}  # by owner
        self._owners: dict[int, str] = {}
        self._loser = ""  # the tenant that loses the next blocks
        self._num_to_lose = 0

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
        if self._num_to_lose <= 0 or self._loser not in self._cached:
            self._loser = max(self._cached, key=lambda owner: len(self._cached[owner]))
            self._num_to_lose = LOST_IN_A_ROW
        self._num_to_lose -= 1
        block = next(iter(self._cached[self._loser]))
        self.remove(block)
        return block


class BlockPool:
    """All blocks, in use or free.

    A block that no table holds is free, but what was computed into it stays readable until it is handed out again. The
    free list is therefore in eviction order: blocks whose contents cannot be found again come first, then the
    registered ones, least recently released first (`FreeBlocks`: of the tenant that has most of them).

        free:  [ not registered | not registered | registered, oldest | ... | registered, newest ]
                 ▲ take() hands out from here

    Block 0 is the null block: table entries outside a sliding window point there, it is never handed out or counted.
    Blocks of other sizes (`kv/layout.py`: cells, states) are numbered on in regions of their own, each with its free
    list:

        ids:  0 | 1 ... num_blocks - 1 | cells ... | states ... |
    """

    def __init__(self, num_blocks: int, *others: int) -> None:
        """`others`: as `num_blocks`, which counts the null block, for each further region; 0 where there is none."""
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
        """Hand out the first block in eviction order; the caller forgets what was registered under it."""
        block = self._free[region].pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Let one more table hold `block`; a free block is in use again, with its contents."""
        if block == NULL_BLOCK:
            return
        if self.refs[block] == 0:
            self._free[self.region_of(block)].remove(block)
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool, owner: str = "") -> None:
        """Let one table less hold `block`; once free, it is evicted late when `keep`, among its owner's blocks, else
        reused first."""
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
    """The conversion of a group's block ids into rows of its tensors: a block spans `rows_per_block` of them (see
    `KVLayout`)."""

    first: int = 1  # id of the block whose row follows that of the null block
    rows_per_block: int = 1

    def of(self, blocks: list[int]) -> list[int]:
        if self == PLAIN_IDS:
            return list(blocks)
        return [(block - self.first + 1) * self.rows_per_block if block else 0 for block in blocks]


PLAIN_IDS = RowIds()


class BlockTable:
    """The blocks of one sequence, per cache group.

    Entry i of a group holds tokens [i * block_size, (i + 1) * block_size), or the state behind so many chunks. The
    runner keeps its own copy of every table and receives changes only; a table it has not seen yet (new, forked, back
    from preemption) is sent whole. Ids are sent as rows of the group's tensors.
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
        self.groups = groups  # block ids, one list a group; NULL_BLOCK where the window has passed
        self.live_from = live_from  # per group: entries before this one are null
        self.num_registered = num_registered  # leading entries already offered to the prefix cache
        self.owner = owner  # the tenant whose cached blocks they are when they are free
        self.part = part  # of the pool that its blocks are taken from (`kv/parted_cache.py`)
        self._row_ids = row_ids or (PLAIN_IDS,) * len(groups)
        self._pending: list[BlockTableUpdate] | None = None  # None: the runner has nothing of this table

    def append(self, group: int, blocks: list[int]) -> None:
        self._note(group, len(self.groups[group]), blocks)
        self.groups[group].extend(blocks)

    def replace(self, group: int, index: int, block: int) -> None:
        self.groups[group][index] = block
        self._note(group, index, [block])

    def drop_before(self, group: int, end: int) -> list[int]:
        """Make the entries before `end` null; returns the blocks that stood there."""
        start = self.live_from[group]
        dropped = self.groups[group][start:end]
        nulls = [NULL_BLOCK] * len(dropped)
        self.groups[group][start:end] = nulls
        self._note(group, start, nulls)
        self.live_from[group] = end
        return dropped

    def fork(self) -> BlockTable:
        """A second table with the same entries; the caller counts the references."""
        groups = [list(blocks) for blocks in self.groups]
        return BlockTable(groups, list(self.live_from), self.num_registered, self._row_ids, self.owner, self.part)

    def resend_all(self) -> None:
        """Send the whole table with the next updates: the runner has dropped its copy."""
        self._pending = None

    def updates(self) -> list[BlockTableUpdate]:
        """Take what the runner has not received yet; the caller sends it."""
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

    The hash of a block covers its tokens and the hash of the block before it, so equal hashes mean equal tokens from
    the very first one (128 bits of BLAKE2b). The chain begins at the salt: tenants with different salts share nothing,
    and cannot learn from timing what the others asked.

        salt ──► h0 = H(salt) ──► h1 = H(h0, tokens 0..15) ──► h2 = H(h1, tokens 16..31) ──► ...

    Keys and values that an adapter has changed are of use to that adapter alone: its digest is the key of the first
    hash, so no salt gives another adapter, or none, the same beginning.
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
        """The hash of the first block; None where there is no full one."""
        return self.extend(token_ids, 1)[0] if len(token_ids) >= self._block_size else None

    def fresh(self) -> HashChain:
        """An empty chain with the same salt, for other tokens."""
        twin = HashChain.__new__(HashChain)
        twin._block_size, twin._root, twin._last, twin.hashes = self._block_size, self._root, self._root, []
        return twin

    def fork(self) -> HashChain:
        twin = self.fresh()
        twin._last, twin.hashes = self._last, list(self.hashes)
        return twin


class PrefixIndex:
    """Registered blocks by hash, one index a cache group (the groups' layers differ, so do their contents)."""

    def __init__(self, num_groups: int) -> None:
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._hashes: dict[int, tuple[int, bytes]] = {}
        self.news: BlockNews | None = None  # None: changes are not watched
        self.save: Save | None = None  # called with each registered block, where blocks are kept elsewhere too

    def find(self, group: int, block_hash: bytes) -> int | None:
        return self._blocks[group].get(block_hash)

    def register(self, group: int, block_hash: bytes, block: int) -> None:
        """Let `block` be found by its hash; where an equal block is registered already, that one stays."""
        if block not in self._hashes and block_hash not in self._blocks[group]:
            self._blocks[group][block_hash] = block
            self._hashes[block] = (group, block_hash)
            if self.news is not None:
                self.news.note(group, block_hash, is_stored=True)
            if self.save is not None:
                self.save(block, self._hashes[block])

    def registration(self, block: int) -> tuple[int, bytes] | None:
        """Return a block's registration: the same object as long as nothing else was written into the block. Threads
        that copy a block compare it before and after."""
        return self._hashes.get(block)

    def forget(self, block: int) -> None:
        if registered := self._hashes.pop(block, None):
            group, block_hash = registered
            del self._blocks[group][block_hash]
            if self.news is not None:
                self.news.note(group, block_hash, is_stored=False)

    def hashes(self, group: int) -> list[bytes]:
        """The hashes of all registered blocks of a group."""
        return list(self._blocks[group])

    def has(self, block: int) -> bool:
        return block in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def check_integrity(self) -> None:
        """Assert that every registered block is found by its own hash."""
        assert all(self.find(group, block_hash) == block for block, (group, block_hash) in self._hashes.items())


class BlockNews:
    """The changes of one cache group's registered blocks since they were last asked for, for a router that sends
    requests to where their prefix is cached. A block that was registered and evicted in between is not mentioned."""

    def __init__(self, index: PrefixIndex, group: int) -> None:
        """News begin with a snapshot."""
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

    def pop(self) -> KVNews | None:
        """Return the changes since the last call; None: there are none."""
        number, self._number = self._number, self._number + 1
        if number == 0:
            self._is_stored = {}
            return KVNews(number=0, is_snapshot=True, stored=self._index.hashes(self._group))
        if not self._is_stored:
            self._number = number
            return None
        changed, self._is_stored = self._is_stored, {}
        stored = [block_hash for block_hash, is_stored in changed.items() if is_stored]
        return KVNews(number=number, stored=stored, gone=[one for one, is_stored in changed.items() if not is_stored])
