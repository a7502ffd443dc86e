"""The weights of one rank: of each matrix the rows that it has. Of a mapped file the other rows are not touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.ops.raw import RawTensor
from tokenmill.parallel.cuts import Cuts
from tokenmill.weights.source import CheckpointWeights, WeightSource, some_experts


@dataclass(frozen=True)
class RankWeights:
    source: WeightSource
    cuts: Cuts
    layers: range  # of the model that this rank has: no others are asked for

    def __post_init__(self) -> None:
        if isinstance(self.source, CheckpointWeights):
            self.source.checkpoint.read_parts()

    @property
    def recipe(self) -> str:
        """Return a text that identifies this rank's part of the weights."""
        return f"{self.cuts.recipe} {self.layers}"

    def names(self) -> list[str]:
        return self.source.names()

    def check(self) -> None:
        self.source.check()

    def get(self, name: str) -> RawTensor:
        own = self.cuts.own_experts(name)
        rows = self.cuts.rows(name)
        if isinstance(self.source, CheckpointWeights):
            return self.source.get(name, rows, own)
        if own is not None:
            return some_experts(self.source.get(name), own)
        if rows is None:
            return self.source.get(name)
        return some_rows(self.source.get(name), rows)


def some_rows(raw: RawTensor, rows: tuple[int, int]) -> RawTensor:
    """Rows of a matrix, or numbers of a vector; of experts likewise in each."""
    is_matrix = raw.name.endswith(".weight") and len(raw.shape) > 1
    axis = len(raw.shape) - (2 if is_matrix else 1)
    count = rows[1] - rows[0]
    shape = (*raw.shape[:axis], count, *raw.shape[axis + 1 :])
    return replace(raw, shape=shape, data=raw.data.narrow(axis, rows[0], count), ordered=None)
