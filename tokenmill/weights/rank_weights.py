"""The weights of one rank: of each matrix the rows that it has. Of a mapped file the other rows are not touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.ops.raw import RawTensor
from tokenmill.parallel.cuts import Cuts
from tokenmill.weights.source import CheckpointWeights, WeightSource


@dataclass(frozen=True)
class RankWeights:
    source: WeightSource
    cuts: Cuts
    layers: range  # of the model that this rank has: no others are asked for

    @property
    def recipe(self) -> str:
        """A text that changes whenever what this rank has does."""
        return f"{self.cuts.recipe} {self.layers}"

    def names(self) -> list[str]:
        return self.source.names()

    def check(self) -> None:
        self.source.check()

    def get(self, name: str) -> RawTensor:
        own = self.cuts.own_experts(name)
        if own is not None:
            return some_experts(self.source.get(name), own)
        rows = self.cuts.rows(name)
        if rows is None:
            return self.source.get(name)
        if isinstance(self.source, CheckpointWeights):
            return self.source.get(name, rows)
        return some_rows(self.source.get(name), rows)


def some_experts(raw: RawTensor, own: list[int]) -> RawTensor:
    """Whole experts of a tensor [experts, ...]; neighbours are not copied."""
    first, count = own[0] if own else 0, len(own)
    is_span = own == list(range(first, first + count))
    data = raw.data.narrow(0, first, count) if is_span else raw.data[own]
    return replace(raw, shape=(count, *raw.shape[1:]), data=data, ordered=None)


def some_rows(raw: RawTensor, rows: tuple[int, int]) -> RawTensor:
    """Rows of a matrix, or numbers of a vector; of experts likewise in each."""
    is_matrix = raw.name.endswith(".weight") and len(raw.shape) > 1
    axis = len(raw.shape) - (2 if is_matrix else 1)
    count = rows[1] - rows[0]
    shape = (*raw.shape[:axis], count, *raw.shape[axis + 1 :])
    return replace(raw, shape=shape, data=raw.data.narrow(axis, rows[0], count), ordered=None)
