"""The tier in host memory for a pool on a GPU: pinned, so that the copy engine reaches the full speed of the bus.

The memory is allocated once, in slots of one record each. A new block replaces the least recently used one that no
thread is copying from; the GPU writes into its slot directly.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

from tokenmill.kv.names import BlockName
from tokenmill.kv.records import BufferOf, Record


class HostTier:
    name = "host"

    def __init__(
        self, empty: Callable[[int, int], list[Record]], sizes: Sequence[int], regions: Sequence[int], max_bytes: int
    ) -> None:
        """`empty`: allocates records of a region; `sizes`: bytes of a record, by region; `regions`: the region of each
        cache group."""
        self._lock = threading.Lock()
        self._slots: dict[int, list[Record]] = {}  # free slots, by region
        self._kept: dict[int, OrderedDict[BlockName, Record]] = {}  # by region, least recently used first
        self._copied: Counter[BlockName] = Counter()  # threads that are copying from a slot
        self._regions = regions
        used = sorted(set(regions))
        per_set = sum(sizes[region] for region in used)
        for region in used:
            self._slots[region] = empty(region, max(1, max_bytes // per_set))[::-1]  # used in memory order
            self._kept[region] = OrderedDict()
        self._num_slots = {region: len(slots) for region, slots in self._slots.items()}

    def num_slots(self, region: int) -> int:
        return self._num_slots[region]

    def has(self, name: BlockName) -> bool:
        return name in self._kept[self._regions[name.group]]

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        return [self.has(name) for name in names]

    def scratch(self, region: int, buffer: BufferOf) -> Sequence[Record]:
        return ()

    @contextlib.contextmanager
    def records(self, names: Sequence[BlockName], scratch: Sequence[Record]) -> Iterator[list[Record | None]]:
        """Return the slots of these blocks, which are not overwritten inside the context; None for a missing block."""
        found: list[Record | None] = []
        with self._lock:
            for name in names:
                kept = self._kept[self._regions[name.group]]
                found.append(kept.get(name))
                if name in kept:
                    kept.move_to_end(name)
            held = [name for name, record in zip(names, found, strict=True) if record is not None]
            self._copied.update(held)
        try:
            yield found
        finally:
            with self._lock:
                self._copied.subtract(held)
                self._copied += Counter()  # remove zero counts

    def take_slots(self, names: Sequence[BlockName]) -> list[Record | None]:
        """Allocate slots for some blocks, which the caller fills and returns with `put_slot`; None for a block that is
        already stored, or if no slot is available."""
        with self._lock:
            return [self._take_slot(name) for name in names]

    def _take_slot(self, name: BlockName) -> Record | None:
        kept, slots = self._kept[self._regions[name.group]], self._slots[self._regions[name.group]]
        if name in kept:
            return None
        if not slots:
            oldest = next((one for one in kept if not self._copied[one]), None)
            if oldest is None:
                return None
            slots.append(kept.pop(oldest))
        return slots.pop()

    def put_slot(self, name: BlockName, slot: Record, *, is_whole: bool) -> int:
        """Store the block in a filled slot, or free the slot if it is not whole; return the bytes that are stored."""
        region = self._regions[name.group]
        with self._lock:
            if not is_whole or name in self._kept[region]:
                self._slots[region].append(slot)
                return 0
            self._kept[region][name] = slot
        return slot.numel()
