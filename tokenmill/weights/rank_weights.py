"""The weights of one rank: of each matrix the rows or columns that it has. Of a mapped file the other rows are not
touched, and of other columns only what lies in the same pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenmill.ops.raw import RawTensor
from tokenmill.parallel.cuts import Cuts
from tokenmill.weights.dequantize import dequantize
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
        found = self._own(name)
        if self.cuts.columns(name) is not None:
            found = replace(found, data=found.data.contiguous())
        return found if self.cuts.has_bias(name) else replace(found, data=torch.zeros_like(found.data))

    def _own(self, name: str) -> RawTensor:
        own = self.cuts.own_experts(name)
        rows, columns = self.cuts.rows(name), self.cuts.columns(name)
        if isinstance(self.source, CheckpointWeights):
            return self.source.get(name, rows, own, columns)
        if columns is not None:
            return some_columns(self.source.get(name), columns)
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
    return replace(raw, shape=shape, data=_kept(raw.data.narrow(axis, rows[0], count)), ordered=None)


def some_columns(raw: RawTensor, columns: tuple[int, int]) -> RawTensor:
    """Columns of a matrix, as plain values: blocks lie along them."""
    count = columns[1] - columns[0]
    values = raw.data if raw.quant is None else dequantize(raw)
    return RawTensor(raw.name, (*raw.shape[:-1], count), values.narrow(-1, columns[0], count))


def _kept(part: torch.Tensor) -> torch.Tensor:
    """A part of a tensor without the rest of it, where that is memory rather than a mapped file."""
    return part if part.device.type == "cpu" else part.clone()
