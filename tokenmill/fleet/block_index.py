"""An index of the blocks that each core has in its prefix cache, by their hashes.

Cores tell it with their outputs (`KVNews`), over the ordered pipe that exists anyway: a snapshot first, then what
changes. Where the pipe was cut, the numbers show a gap, and a new snapshot is asked for; until it comes, nothing is
known of that core. So the index is never wrong for longer than news are under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.kv.blocks import HashChain
from tokenmill.types import KVNews

STRIDE = 16  # blocks that are hashed at a time


class BlockIndex:
    def __init__(self, num_replicas: int) -> None:
        self._blocks: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self._next: list[int | None] = [None] * num_replicas  # number of the next news; None: a snapshot is needed

    def forget(self, replica: int) -> None:
        """A core was started anew, or its pipe: nothing is known of it."""
        self._blocks[replica] = set()
        self._next[replica] = None

    def apply(self, replica: int, news: KVNews) -> bool:
        """Take in news of a core; False: some were lost, and a snapshot must be asked for."""
        if news.is_snapshot:
            self._blocks[replica] = set(news.stored)
        elif news.number != self._next[replica]:
            self.forget(replica)
            return False
        else:
            self._blocks[replica].difference_update(news.gone)
            self._blocks[replica].update(news.stored)
        self._next[replica] = news.number + 1
        return True

    def blocks(self, replica: int) -> frozenset[bytes]:
        """All that a core has, as far as it is known."""
        return frozenset(self._blocks[replica])

    def matches(
        self, token_ids: Sequence[int], chain: HashChain, block_size: int, replicas: Sequence[int]
    ) -> list[int]:
        """How many leading blocks of a prompt each of these cores has. Hashes are computed only as far as one has
        them, and one block further: mostly that is what sets this conversation apart from others."""
        num_blocks, hashes = len(token_ids) // block_size, chain.hashes
        found = dict.fromkeys(replicas, 0)
        going_on = list(replicas)
        for index in range(num_blocks):
            if index == len(hashes):
                chain.extend(token_ids, min(index + STRIDE, num_blocks))
            going_on = [one for one in going_on if hashes[index] in self._blocks[one]]
            if not going_on:
                break
            for one in going_on:
                found[one] = index + 1
        return [found[one] for one in replicas]
