"""Attention with compressed entries before its window, as data (DeepSeek V4).

A token attends to the tokens of its window individually, and to everything before it through entries that each compress
several tokens:

    tokens     0 ........ rate | rate ..... 2 rate | ........ p - window + 1 ......... p
    entries    [      0        ] [       1         ] ...      each an element-wise weighted mean over its tokens
    seen by p  every complete entry, and the tokens of the window

The weights are a softmax over the entry's tokens of a gate plus a bias per position. If entries overlap, a token has
two sets of values: one for its own entry, one for the next. With an indexer only the best `top_k` entries are used; it
compresses its keys in the same way.

An entry is stored in the blocks of its own tokens, `head_dim / rate` values with each. So a block must contain whole
entries, and its content depends only on its tokens and those before it, as with keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.cache_parts import CacheField, CachePart
from tokenmill.arch.indexer import Indexer


@dataclass(frozen=True)
class Compression:
    rate: int  # tokens per entry
    overlaps: bool = False  # an entry also includes the tokens of the previous one
    indexer: Indexer | None = None

    @property
    def num_series(self) -> int:
        """The number of sets of values that a token contributes to entries."""
        return 2 if self.overlaps else 1

    @property
    def reach(self) -> int:
        """The number of tokens that an entry is computed from."""
        return self.num_series * self.rate

    def inputs_size(self, head_dim: int) -> int:
        """Return the size of a token's inputs to entries: values, then gates."""
        return 2 * self.num_series * head_dim

    def cache_parts(self, head_dim: int) -> tuple[CachePart, ...]:
        found = self._parts("", head_dim)
        return found if self.indexer is None else found + self._parts("index_", self.indexer.head_dim)

    def _parts(self, prefix: str, head_dim: int) -> tuple[CachePart, CachePart]:
        inputs = CacheField(f"{prefix}inputs_of_entries", (self.inputs_size(head_dim),), "compute")
        entries = CacheField(f"{prefix}compressed", (head_dim // self.rate,))
        return CachePart("paged", (inputs,), self.reach), CachePart("paged", (entries,))
