"""An index of the blocks that each core has in its prefix cache, by their hashes.

Cores report changes (`KVCacheEvents`) with their outputs, through the same ordered pipe: a snapshot first, then
differences. Reports are numbered; after a gap a new snapshot is requested, and until it arrives nothing is assumed
about that core. So the index is outdated by no more than the reports that are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.kv.blocks import HashChain
from tokenmill.types import KVCacheEvents

HASH_BATCH = 16  # blocks that are hashed at a time


class BlockIndex:
    def __init__(self, num_replicas: int) -> None:
        self._blocks: list[set[bytes]] = [set() for _ in range(num_replicas)]
        self._next: list[int | None] = [None] * num_replicas  # number of the next report; None: a snapshot is needed

    def forget(self, replica: int) -> None:
        """Remove all blocks of a core that was restarted, or whose reports have a gap."""
        self._blocks[replica] = set()
        self._next[replica] = None

    def apply(self, replica: int, events: KVCacheEvents) -> bool:
        """Apply a report of a core; return False if an earlier one was lost, so that a snapshot must be requested."""
        if events.is_snapshot:
            self._blocks[replica] = set(events.stored)
        elif events.number != self._next[replica]:
            self.forget(replica)
            return False
        else:
            self._blocks[replica].difference_update(events.gone)
            self._blocks[replica].update(events.stored)
        self._next[replica] = events.number + 1
        return True

    def blocks(self, replica: int) -> frozenset[bytes]:
        """Return the hashes of all blocks that a core is known to have."""
        return frozenset(self._blocks[replica])

    def matches(
        self, token_ids: Sequence[int], chain: HashChain, block_size: int, replicas: Sequence[int]
    ) -> list[int]:
        """Return how many leading blocks of a prompt each of these cores has. Hashes are computed only as far as some
        core has them, and for one block more, which usually identifies the conversation."""
        num_blocks, hashes = len(token_ids) // block_size, chain.hashes
        found = dict.fromkeys(replicas, 0)
        going_on = list(replicas)
        for index in range(num_blocks):
            if index == len(hashes):
                chain.extend(token_ids, min(index + HASH_BATCH, num_blocks))
            going_on = [one for one in going_on if hashes[index] in self._blocks[one]]
            if not going_on:
                break
            for one in going_on:
                found[one] = index + 1
        return [found[one] for one in replicas]
