"""The adapters that lie in the runner's slots, and who uses them.

    slots:  [ unused | idle, used longest ago | ... | idle, used last | used by running groups ]
              ▲ a new adapter goes here: into an unused slot, else over the idle one that was used longest ago

An adapter stays in its slot when its last group leaves, for the next request that asks for it. One that a running group
uses is never replaced: a group whose adapter has no slot waits, as it does for rows and blocks. The runner hears of new
ones with the next plan, which it carries out behind all plans before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class ResidentAdapters:
    def __init__(self, num_slots: int) -> None:
        self._unused = list(range(num_slots, 0, -1))  # slots are numbered from 1: 0 is no adapter
        self._slots: OrderedDict[str, int] = OrderedDict()  # by adapter, the one used longest ago first
        self._users: Counter[str] = Counter()  # running groups
        self._loads: dict[int, str] = {}  # by slot, since the last plan

    def num_free(self) -> int:
        """Slots that an adapter could have which is in none."""
        return len(self._unused) + len(self._slots) - len(self._users)

    def num_needed(self, adapter: str) -> int:
        return int(bool(adapter) and adapter not in self._slots)

    def num_held(self, adapter: str) -> int:
        """Slots that come free when one group less uses an adapter."""
        return int(self._users[adapter] == 1) if adapter in self._users else 0

    def acquire(self, adapter: str) -> int:
        """The slot of an adapter for one more running group; room was checked."""
        if adapter not in self._slots:
            self._slots[adapter] = slot = self._unused.pop() if self._unused else self._evict()
            self._loads[slot] = adapter
        self._slots.move_to_end(adapter)
        self._users[adapter] += 1
        return self._slots[adapter]

    def release(self, adapter: str) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]

    def _evict(self) -> int:
        oldest = next(adapter for adapter in self._slots if adapter not in self._users)
        return self._slots.pop(oldest)

    def pop_loads(self) -> list[tuple[int, str]]:
        """(slot, adapter) for those that the runner has yet to load."""
        loads, self._loads = self._loads, {}
        return list(loads.items())

    def reload(self) -> None:
        """Load again what is in use and forget the rest: the runner may not have heard of the last plans."""
        for adapter, slot in list(self._slots.items()):
            if adapter in self._users:
                self._loads[slot] = adapter
            else:
                del self._slots[adapter]
                self._loads.pop(slot, None)
                self._unused.append(slot)
