"""The prefix cache: full blocks found again by what stands before them.

The name of a block is the hash of its tokens and of the name of the block before it, so equal names mean equal
tokens from the very first one (128 bits of BLAKE2b: nobody finds a collision). The chain begins at the salt: tenants
with different salts share nothing, and can't learn from timing what the others asked.

    salt ──► h0 = H(salt) ──► h1 = H(h0, tokens 0..15) ──► h2 = H(h1, tokens 16..31) ──► ...

A sequence owns its chain and extends it when a block fills up; nothing is hashed twice. Which blocks are free, and
which one is evicted next, is the pool's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b

DIGEST_BYTES = 16


class HashChain:
    """Names of a sequence's full blocks, computed once each."""

    __slots__ = ("_block_size", "_last", "_root", "names")

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
        self._last = self._root
        self.names: list[bytes] = []

    def extend(self, token_ids: Seq[int], num_blocks: int) -> list[bytes]:
        """At least the first `num_blocks` names; `token_ids` may only have grown since the last call."""
        for index in range(len(self.names), num_blocks):
            start = index * self._block_size
            tokens = array("q", token_ids[start : start + self._block_size])
            self._last = blake2b(self._last + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
            self.names.append(self._last)
        return self.names

    def fresh(self) -> HashChain:
        """An empty chain with the same salt, for other tokens."""
        twin = HashChain.__new__(HashChain)
        twin._block_size, twin._root, twin._last, twin.names = self._block_size, self._root, self._root, []
        return twin

    def fork(self) -> HashChain:
        twin = self.fresh()
        twin._last, twin.names = self._last, list(self.names)
        return twin


class PrefixIndex:
    """Registered blocks by name, one index a KV group (the groups' layers differ, so do their contents)."""

    def __init__(self, num_groups: int) -> None:
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._names: dict[int, tuple[int, bytes]] = {}

    def find(self, group: int, name: bytes) -> int | None:
        return self._blocks[group].get(name)

    def register(self, group: int, name: bytes, block: int) -> None:
        """The first block of a name keeps it; a twin computed meanwhile stays nameless."""
        if block not in self._names and name not in self._blocks[group]:
            self._blocks[group][name] = block
            self._names[block] = (group, name)

    def forget(self, block: int) -> None:
        if named := self._names.pop(block, None):
            group, name = named
            del self._blocks[group][name]

    def has(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)
