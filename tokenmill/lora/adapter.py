"""An adapter as it is held in memory: what it adds to each of a model's matrices, under our own names.

    layers.3.q                   a matrix [rows, columns], named as its tensor without ".weight"
    layers.3.experts.up.7        the matrix of one expert
    embed                        the embedding; its `a` is [rank, vocabulary], its `b` [hidden, rank]
    head                         the head, also where the model itself has the embedding in its place

Its digest, of all bytes it was read from, is its identity: two files with the same digest answer alike, and a file that
was changed under the same name is another adapter.
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
        """The largest of its matrices'."""
        return max(matrix.rank for matrix in self.matrices.values())

    @property
    def num_values(self) -> int:
        return sum(matrix.num_values for matrix in self.matrices.values())
