"""The weights of one rank: its rows or columns of each matrix. From a mapped file, other rows are not read, and other
columns only where they share pages."""

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
    layers: range  # the model's layers on this rank; other layers are never requested

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
    """Return rows of a matrix or elements of a vector; for stacked experts, those of each."""
    is_matrix = raw.name.endswith(".weight") and len(raw.shape) > 1
    axis = len(raw.shape) - (2 if is_matrix else 1)
    count = rows[1] - rows[0]
    shape = (*raw.shape[:axis], count, *raw.shape[axis + 1 :])
    return replace(raw, shape=shape, data=_detached(raw.data.narrow(axis, rows[0], count)), ordered=None)


def some_columns(raw: RawTensor, columns: tuple[int, int]) -> RawTensor:
    """Return columns of a matrix, dequantized: blocks run along columns and can't be split."""
    count = columns[1] - columns[0]
    values = raw.data if raw.quant is None else dequantize(raw)
    return RawTensor(raw.name, (*raw.shape[:-1], count), values.narrow(-1, columns[0], count))


def _detached(part: torch.Tensor) -> torch.Tensor:
    """Return a view's data so that the rest of the tensor can be freed; a CPU tensor is a mapped file and stays a
    view."""
    return part if part.device.type == "cpu" else part.clone()
