"""An indexer, as data: it selects the tokens of the context that latent attention attends to (DeepSeek's sparse
attention).

Each token caches one short key. A query scores every key before it, and attention uses those with the highest scores:

    score(t, s) = Σ_h w_h(t) · max(0, q_h(t) · k(s))          selected: the `top_k` best s <= t, of ties the earliest

The indexer's queries are projected from the same latent vector as attention's; keys have a LayerNorm. The first
dimensions of both are rotated, as many as attention rotates. A context of up to `top_k` tokens is used completely.
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
