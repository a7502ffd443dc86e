"""The entries of its block tables that a cache group needs, by kind. Pure arithmetic on positions.

    kind     an entry holds                       a query at position p needs entries from
    paged    the tokens of a block                0, or that of token p - window + 1
    cells    the tokens of a block                that of token p // 64 * 64, where p's chunk begins
    state    the state behind 64 more tokens      p // 64 - 1, the one before p's chunk

Block ids of all kinds are numbers of one space, cut into a region for each kind; 0 is the null block of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from tokenmill.arch.cache_parts import CHUNK, CacheKind
from tokenmill.errors import InvalidConfig

REGIONS: tuple[CacheKind, ...] = ("paged", "cells", "state")


@dataclass(frozen=True)
class EntryRule:
    kind: CacheKind
    window: int | None
    block_size: int
    chunk: int = CHUNK  # tokens between two states

    def __post_init__(self) -> None:
        if self.kind != "paged" and self.chunk % self.block_size:
            raise InvalidConfig(
                f"block_size must divide {self.chunk} for models with recurrent layers, got {self.block_size}",
                param="block_size",
            )

    @cached_property
    def region(self) -> int:
        return REGIONS.index(self.kind)

    @cached_property
    def tokens(self) -> int:
        """Tokens between two entries."""
        return self.chunk if self.kind == "state" else self.block_size

    @property
    def keeps_all(self) -> bool:
        """True where queries see every entry from the first on."""
        return self.kind == "paged" and self.window is None

    def first_visible(self, position: int) -> int:
        """The first entry that a query at `position` or later needs.

        keys:  [ ... | position - window + 1 ............ position ]
                       ▲ in this block
        """
        if self.kind == "state":
            return max(0, position // self.chunk - 1)
        if self.kind == "cells":
            return position // self.chunk * self.chunk // self.block_size
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def written(self, start: int, end: int) -> range:
        """The entries that computing tokens [start, end) writes."""
        if self.kind == "state":
            return range(start // self.chunk, end // self.chunk)
        return range(start // self.block_size, (end - 1) // self.block_size + 1)

    def required(self, start: int, end: int, *, is_certain: bool) -> range:
        """Those of the written entries that must be kept: where the tokens are certain (no drafts), only what a query
        at `end` sees of cells and states."""
        written = self.written(start, end)
        if self.kind == "paged" or not is_certain:
            return written
        return range(max(written.start, min(self.first_visible(end), written.stop)), written.stop)

    def most_held(self, num_tokens: int, max_step: int) -> int:
        """Entries that one sequence holds at most on its way to `num_tokens`, in steps of up to `max_step` tokens.

        A window group holds what the queries of a step see:  [ window - 1 tokens before | step ], which may begin
        anywhere in a block, hence one block more. Of cells there are those of the chunk that a step begins in and of
        the one it ends in, of states the one it reads and the one it writes.
        """
        everything = num_tokens // self.chunk if self.kind == "state" else ceil(num_tokens / self.block_size)
        if self.kind == "state":
            return min(everything, 2)
        if self.kind == "cells":
            return min(everything, 2 * self.chunk // self.block_size)
        if self.window is None:
            return everything
        return min(everything, ceil((self.window - 1 + max_step) / self.block_size) + 1)

    def last_block(self, entry: int) -> int:
        """The block of tokens behind which an entry is complete: it is found by that block's hash."""
        return (entry + 1) * self.tokens // self.block_size - 1
