"""Requests for blocks that a sequence could use and the pool does not have: the interface between scheduler and tiers.
No tensors.

    Fetch       the blocks of one sequence that are asked for, then those that are on their way
    Fetcher     finds blocks elsewhere and copies them into the pool, in threads of its own (`kv/traffic.py`)

A fetch is asked for, looked at again when the answer is there, and loaded into blocks that the scheduler has taken for
it; only those that have arrived whole are registered.

    scheduler    ask(fetch)               load(fetch)                        register, go on
    threads              find names ─► is_asked       read, check, copy ─► is_loaded
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
    """A block that is being fetched, and the block of the pool that it is written into."""

    name: BlockName
    block: int


@dataclass(eq=False)
class Fetch:
    """Blocks of one sequence that a tier may have. Fields below the line are set by a thread, the flags last."""

    names: Sequence[BlockName]
    source: str = ""  # another core's address, asked after this core's own tiers
    targets: list[ExpectedBlock] = field(default_factory=list)
    is_over: bool = False  # no sequence waits for it
    # ──
    found: dict[BlockName, str] = field(default_factory=dict)  # the tier that has it
    arrived: set[BlockName] = field(default_factory=set)
    is_asked: bool = False
    is_loaded: bool = False


class Fetcher(Protocol):
    """Finds blocks elsewhere and brings them."""

    has_tiers: bool  # of its own, so that every request may ask

    def ask(self, fetch: Fetch) -> None:
        """Find in a thread which tier has which of `fetch.names`; sets `found`, then `is_asked`."""
        ...

    def expect(self, fetch: Fetch) -> None:
        """Assume that `fetch.source` still has all of `fetch.names`; sets `found` and `is_asked` at once. Blocks that
        it no longer has do not arrive."""
        ...

    def load(self, fetch: Fetch) -> None:
        """Load `fetch.targets` in a thread; sets `arrived`, then `is_loaded`. Only that thread may touch the targets'
        blocks until then."""
        ...

    def end(self, fetch: Fetch) -> None:
        """Release the resources of a fetch that is over."""
        ...

    def seconds(self, found: dict[BlockName, str]) -> float:
        """Estimate the seconds of fetching these blocks from recent fetches; 0 where there were none yet."""
        ...

    def wait(self, patience_s: float) -> None:
        """Wait until a thread has set a flag."""
        ...

    def close(self) -> None:
        """Finish what is being saved, within a moment."""
        ...


Save = Callable[[int, tuple[int, bytes]], None]  # a block and what it is registered as
