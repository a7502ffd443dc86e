"""Attention with compressed entries before its window, as data (DeepSeek V4).

A token looks at the entries of its window one by one, and at everything further back through entries of several tokens:

    tokens     0 ........ rate | rate ..... 2 rate | ........ p - window + 1 ......... p
    entries    [      0        ] [       1         ] ...      each is a weighted mean, number by number, of its tokens'
    seen by p  every entry that is complete, and the tokens of the window

Weights are a softmax over the tokens of a gate and a bias for each place. Where entries overlap, a token has two sets
of numbers: one for its own entry, one for the next. With an indexer only the best `top_k` entries are seen; it
compresses its keys in the same way.

An entry is kept in the blocks of its own tokens, each of which holds its share: `head_dim / rate` numbers. So a block
must hold whole entries, and what it holds depends on its tokens and those before it alone, as with keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.cache_parts import CacheField, CachePart
from tokenmill.arch.indexer import Indexer


@dataclass(frozen=True)
class Compression:
    rate: int  # tokens of an entry
    overlaps: bool = False  # an entry is made of the tokens of the one before it too
    indexer: Indexer | None = None

    @property
    def num_series(self) -> int:
        """Sets of numbers that a token has for entries"""
        return 2 if self.overlaps else 1

    @property
    def reach(self) -> int:
        """Tokens that an entry is made of"""
        return self.num_series * self.rate

    def inputs_size(self, head_dim: int) -> int:
        """Numbers of a token that entries are made of: values, then gates"""
        return 2 * self.num_series * head_dim

    def cache_parts(self, head_dim: int) -> tuple[CachePart, ...]:
        found = self._parts("", head_dim)
        return found if self.indexer is None else found + self._parts("index_", self.indexer.head_dim)

    def _parts(self, prefix: str, head_dim: int) -> tuple[CachePart, CachePart]:
        inputs = CacheField(f"{prefix}inputs_of_entries", (self.inputs_size(head_dim),), "compute")
        entries = CacheField(f"{prefix}compressed", (head_dim // self.rate,))
        return CachePart("paged", (inputs,), self.reach), CachePart("paged", (entries,))
