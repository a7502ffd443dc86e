"""An indexer, as data: it chooses which tokens of the context latent attention looks at (DeepSeek's sparse attention).

Each token leaves one short key. A query scores every key before it, and attention sees those with the highest scores:

    score(t, s) = Σ_h w_h(t) · max(0, q_h(t) · k(s))          seen: the `top_k` best s <= t, of equals the earliest

Queries are made of the latent vector that attention's own queries are made of; keys have a LayerNorm; the first numbers
of both are rotated, as many as attention rotates. In a context of up to `top_k` tokens everything is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.arch.cache_parts import CacheField, CachePart

INDEX_KEYS = "index_keys"  # the field in which a token leaves its key
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
        """Numbers that are projected from the layer's input: a key, and a weight for each head."""
        return self.head_dim + self.num_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied by: keys' and heads' numbers under a root."""
        return 1.0 / math.sqrt(self.head_dim * self.num_heads)

    def cache_part(self) -> CachePart:
        return CachePart("paged", (CacheField(INDEX_KEYS, (self.head_dim,)),))
