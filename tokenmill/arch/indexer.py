"""Indexers, as data: they select what attention attends to. `Indexer` selects the tokens of the context that latent
attention reads (DeepSeek's sparse attention), `BlockIndexer` the blocks of tokens that grouped-query attention reads.

Each token caches one short key. A query scores every key before it, and attention uses those with the highest scores:

    score(t, s) = Σ_h w_h(t) · max(0, q_h(t) · k(s))          selected: the `top_k` best s <= t, of ties the earliest

The indexer's queries are projected from the same latent vector as attention's; keys have a LayerNorm. The first
dimensions of both are rotated, as many as attention rotates. A context of up to `top_k` tokens is used completely.

A `BlockIndexer` (MiniMax-M3) has one head for each key and value head. A block's score is the largest q · k of its
tokens s <= t; the last `num_local` blocks up to the query's own are selected in any case, and of the others the best:

    blocks of 128 tokens   │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │      `top_k` = 3, `num_local` = 1, the query in block 5:
    largest q · k          │ 2 │ 7 │ 1 │ 5 │ 3 │ 0 │      1, 3 and 5
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.arch.cache_parts import CacheField, CachePart

INDEX_KEYS = "index_keys"  # the cache field of the keys
KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Indexer:
    num_heads: int
    head_dim: int
    top_k: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def projected_size(self) -> int:
        """The number of values projected from the layer's input: a key, and a weight for each head."""
        return self.head_dim + self.num_heads

    @property
    def scale(self) -> float:
        """The factor of the scores: 1 / sqrt(head_dim * num_heads)."""
        return 1.0 / math.sqrt(self.head_dim * self.num_heads)

    def cache_part(self) -> CachePart:
        return CachePart("paged", (CacheField(INDEX_KEYS, (self.head_dim,)),))


@dataclass(frozen=True)
class BlockIndexer:
    num_heads: int
    head_dim: int
    block_size: int  # tokens per selected block; independent of the size of KV blocks
    top_k: int  # blocks, the local ones included
    num_local: int = 1

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def projected_size(self) -> int:
        """The number of values projected from the layer's input: the queries, and a key."""
        return self.q_size + self.head_dim

    @property
    def full_context(self) -> int:
        """The longest context of which every query sees all."""
        return self.block_size * self.top_k

    def cache_part(self) -> CachePart:
        return CachePart("paged", (CacheField(INDEX_KEYS, (self.head_dim,)),))
