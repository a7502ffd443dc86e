"""Blocks that a sequence could use and the pool does not have: how the scheduler asks for them. No tensors.

    Fetch       the blocks of one sequence that are asked for, then those that are on their way
    Fetcher     who knows where blocks are and brings them, in threads of its own (`kv/traffic.py`)

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
    """What a block holds: the keys and values that a cache group has of the tokens behind a hash."""

    group: int
    block_hash: bytes


class ExpectedBlock(NamedTuple):
    """A block on its way, and the block of the pool that it is written into."""

    name: BlockName
    block: int


@dataclass(eq=False)
class Fetch:
    """Blocks of one sequence that others may have. The fields below the line are a thread's to set, the flags last."""

    names: Sequence[BlockName]
    source: str = ""  # another core's address, asked after this core's own tiers
    targets: list[ExpectedBlock] = field(default_factory=list)
    is_over: bool = False  # nobody waits for it
    # ──
    found: dict[BlockName, str] = field(default_factory=dict)  # who has it, by the name of a tier
    arrived: set[BlockName] = field(default_factory=set)
    is_asked: bool = False
    is_loaded: bool = False


class Fetcher(Protocol):
    """Finds blocks elsewhere and brings them."""

    has_tiers: bool  # of its own, so that every request may ask

    def ask(self, fetch: Fetch) -> None:
        """Find out in a thread who has which of `fetch.names`; sets `found`, then `is_asked`."""
        ...

    def expect(self, fetch: Fetch) -> None:
        """Take it that `fetch.source` has all of `fetch.names`, as it had a moment ago; sets `found` and `is_asked` at
        once. What it has not does not arrive."""
        ...

    def load(self, fetch: Fetch) -> None:
        """Bring `fetch.targets` in a thread; sets `arrived`, then `is_loaded`. The targets' blocks are its own until
        then."""
        ...

    def end(self, fetch: Fetch) -> None:
        """Let go of what a fetch keeps open; nothing more is asked for it."""
        ...

    def seconds(self, found: dict[BlockName, str]) -> float:
        """How long these blocks would take, by what others took lately; 0 where nothing is known yet."""
        ...

    def wait(self, patience_s: float) -> None:
        """Wait until a thread has set a flag."""
        ...

    def close(self) -> None:
        """Finish what is being saved, within a moment."""
        ...


Save = Callable[[int, tuple[int, bytes]], None]  # a block and what it is registered as
