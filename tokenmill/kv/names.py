"""The interface between the scheduler and the KV tiers: fetching blocks that a sequence can use and the pool does not
have. No tensors.

    Fetch       the blocks of one sequence that are looked up, then those that are loaded
    Fetcher     finds blocks in tiers and copies them into the pool, in background threads (`kv/traffic.py`)

The blocks of a fetch are looked up, then loaded into blocks that the scheduler has allocated for them; only completely
loaded blocks are registered.

    scheduler    look_up(fetch)                         load(fetch)                     register, resume the group
    threads              find blocks ─► is_looked_up            read, check, copy ─► is_loaded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class BlockName(NamedTuple):
    """The identity of a block's contents: the cache group, and the hash of all tokens up to the block's end."""

    group: int
    block_hash: bytes


class ExpectedBlock(NamedTuple):
    """A block that is being fetched, and the block of the pool that it is loaded into."""

    name: BlockName
    block: int


@dataclass(eq=False)
class Fetch:
    """Blocks of one sequence that a tier may have. Background threads set the fields below the line, the flags last."""

    names: Sequence[BlockName]
    source: str = ""  # another core's address, searched after this core's own tiers
    targets: list[ExpectedBlock] = field(default_factory=list)
    is_over: bool = False  # no sequence waits for it
    # ──
    found: dict[BlockName, str] = field(default_factory=dict)  # the tier that has each block
    arrived: set[BlockName] = field(default_factory=set)
    is_looked_up: bool = False
    is_loaded: bool = False


class Fetcher(Protocol):
    """Finds blocks in tiers and other cores, and loads them into the pool."""

    has_tiers: bool  # it has tiers of its own, so a lookup is useful for every request

    def look_up(self, fetch: Fetch) -> None:
        """Find in a background thread which tiers have `fetch.names`; sets `found`, then `is_looked_up`."""
        ...

    def expect(self, fetch: Fetch) -> None:
        """Assume without a lookup that `fetch.source` has all of `fetch.names`; sets `found` and `is_looked_up`. Blocks
        that it does not have will not be loaded."""
        ...

    def load(self, fetch: Fetch) -> None:
        """Load `fetch.targets` in a background thread; sets `arrived`, then `is_loaded`. Until then only that thread
        may access the targets' blocks."""
        ...

    def end(self, fetch: Fetch) -> None:
        """Release the resources of a fetch that has ended."""
        ...

    def seconds(self, found: dict[BlockName, str]) -> float:
        """Estimate the seconds to fetch these blocks from recent fetches; 0 if there were none."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a background thread has set a flag."""
        ...

    def close(self) -> None:
        """Stop; queued blocks are saved as far as a short time limit allows."""
        ...


Save = Callable[[int, tuple[int, bytes]], None]  # (block, its registration: group and hash)
