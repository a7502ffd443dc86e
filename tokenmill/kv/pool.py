"""The pool: every KV block of the machine, each with the number of tables that hold it.

A block nobody holds is free, but what was computed into it stays readable until it is handed out again. The free list
is therefore in eviction order: blocks whose contents nobody can find again come first, then the registered
ones, least recently released first.

    free:  [ nameless | nameless | registered, oldest | ... | registered, newest ]
             ▲ take() hands out from here

Block 0 is the null block: table entries outside a sliding window point there, it is never handed out or counted.
"""

from __future__ import annotations

from collections import OrderedDict

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and at least one other"
        self.num_usable = num_blocks - 1
        self.refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def take(self) -> int:
        """The block that is missed least; the caller forgets what was registered under it."""
        block, _ = self._free.popitem(last=False)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table holds `block`; a free block comes back to life with its contents."""
        if block == NULL_BLOCK:
            return
        if self.refs[block] == 0:
            del self._free[block]
        self.refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One table less; a block that is free now is evicted late when `keep`, else reused first."""
        if block == NULL_BLOCK:
            return
        assert self.refs[block] > 0, f"block {block} was released more often than taken"
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._free[block] = None
            if not keep:
                self._free.move_to_end(block, last=False)
