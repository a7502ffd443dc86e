"""Blocks in host memory beside a GPU: pinned, so that the copy engine moves them at the bus's full speed.

The memory is taken once, as slots of one record each. A new block takes the least recently used slot that no thread is
copying from.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

from tokenmill.kv.names import BlockName
from tokenmill.kv.records import Record


class HostTier:
    name = "host"
    needs_scratch = False

    def __init__(
        self, empty: Callable[[int, int], list[Record]], sizes: Sequence[int], regions: Sequence[int], max_bytes: int
    ) -> None:
        """`empty`: room for records of a region; `sizes`: bytes of a record by region; `regions`: by cache group."""
        self._lock = threading.Lock()
        self._slots: dict[int, list[Record]] = {}  # free ones, by region
        self._kept: dict[int, OrderedDict[BlockName, Record]] = {}  # by region, the one used last at the end
        self._copied: Counter[BlockName] = Counter()  # how many copies are made from a slot
        self._regions = regions
        used = sorted(set(regions))
        per_set = sum(sizes[region] for region in used)
        for region in used:
            self._slots[region] = empty(region, max(1, max_bytes // per_set))[::-1]  # taken in the order of memory
            self._kept[region] = OrderedDict()

    def has(self, name: BlockName) -> bool:
        return name in self._kept[self._regions[name.group]]

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        return [self.has(name) for name in names]

    @contextlib.contextmanager
    def records(self, names: Sequence[BlockName], scratch: Sequence[Record]) -> Iterator[list[Record | None]]:
        """Return the slots of these blocks, which are not overwritten while the context lasts; None for a missing
        block."""
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
                self._copied += Counter()  # forget those at zero

    def keep(self, name: BlockName, record: Record) -> int:
        """Copy a record into a slot; its bytes, 0 where it is there already, or no slot can be had."""
        kept, slots = self._kept[self._regions[name.group]], self._slots[self._regions[name.group]]
        with self._lock:
            if name in kept:
                return 0
            if not slots:
                oldest = next((one for one in kept if not self._copied[one]), None)
                if oldest is None:
                    return 0
                slots.append(kept.pop(oldest))
            slot = slots.pop()
        slot.copy_(record)
        with self._lock:
            kept[name] = slot
        return slot.numel()
