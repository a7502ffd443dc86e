"""An adapter in memory: its low-rank update of each of a model's matrices, by our tensor names.

    layers.3.q                   a matrix [rows, columns], named as its tensor without ".weight"
    layers.3.experts.up.7        the matrix of one expert
    embed                        the embedding; its `a` is [rank, vocabulary], its `b` [hidden, rank]
    head                         the head, also if the model's head is tied to its embedding

Its digest, over all bytes that it was read from, is its identity: files with the same digest give the same answers, and
a changed file of the same name is another adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.ops.low_rank import LowRank


@dataclass(frozen=True)
class Adapter:
    digest: str
    matrices: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """Return the largest rank of its matrices."""
        return max(matrix.rank for matrix in self.matrices.values())

    @property
    def num_values(self) -> int:
        return sum(matrix.num_values for matrix in self.matrices.values())
