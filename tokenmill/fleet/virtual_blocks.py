"""Simulated transfers of KV blocks between virtual cores: nothing is copied, but the transfer time passes.

VirtualBlocks    the prefix caches of all virtual cores, by address
VirtualFetcher   a core's `Fetcher` on the loop's clock (`kv/names.py`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from tokenmill.kv.blocks import PrefixIndex
from tokenmill.kv.names import BlockName, Fetch

PEER = "peer"


class VirtualBlocks:
    """The registered blocks of virtual cores."""

    def __init__(self) -> None:
        self._indexes: dict[str, PrefixIndex] = {}
        self._numbers = count()

    def add(self, index: PrefixIndex) -> str:
        """Register a core's prefix cache; return its address."""
        address = f"virtual:{next(self._numbers)}"
        self._indexes[address] = index
        return address

    def remove(self, address: str) -> None:
        self._indexes.pop(address, None)

    def has(self, address: str, name: BlockName) -> bool:
        index = self._indexes.get(address)
        return index is not None and index.find(*name) is not None


class VirtualFetcher:
    """Fetches blocks of other virtual cores, one fetch after another, each block in `block_s`."""

    has_tiers = False

    def __init__(self, blocks: VirtualBlocks, block_s: float, pass_time: Callable[[float], None]) -> None:
        """`pass_time`: advances the core's clock."""
        self._blocks = blocks
        self._block_s = block_s
        self._pass_time = pass_time
        self._free_s = 0.0  # when the last fetch will have ended

    def look_up(self, fetch: Fetch) -> None:
        fetch.found = {name: PEER for name in fetch.names if self._blocks.has(fetch.source, name)}
        fetch.is_looked_up = True

    def expect(self, fetch: Fetch) -> None:
        fetch.found = dict.fromkeys(fetch.names, PEER)
        fetch.is_looked_up = True

    def load(self, fetch: Fetch) -> None:
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + len(fetch.targets) * self._block_s
        loop.call_at(self._free_s, self._arrive, fetch)

    def _arrive(self, fetch: Fetch) -> None:
        """Mark the blocks that the other core still has as arrived."""
        fetch.arrived |= {target.name for target in fetch.targets if self._blocks.has(fetch.source, target.name)}
        fetch.is_loaded = True

    def end(self, fetch: Fetch) -> None:
        fetch.is_over = True

    def seconds(self, found: dict[BlockName, str]) -> float:
        return len(found) * self._block_s

    def wait(self, timeout_s: float) -> None:
        self._pass_time(timeout_s)

    def close(self) -> None:
        pass
