"""A weight as a checkpoint holds it, before an op packs it for its kernel.

Plain tensors carry their values in `data`. A quantised one carries its file's blocks as bytes: one row of blocks per
row of the tensor, `quant` naming the block format in GGUF's words ("Q4_0", "Q6_K", ...).

Columns that are quantised in groups which do not lie together (act order) are expanded in `data`, like a plain tensor;
`ordered` has them as blocks too, for kernels that put their inputs into the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RawTensor:
    name: str
    shape: tuple[int, ...]  # of the values, whatever the storage
    data: torch.Tensor  # values of any float dtype; or uint8 blocks [..., bytes per row] when `quant` is set
    quant: str | None = None
    same_scales: int = 1  # so many neighbouring blocks have theirs in common: a matrix of larger groups, in blocks
    ordered: Ordered | None = None
    is_rounded: bool = False  # values of a quantised form that has no blocks: 11 bits hold what is left of them


@dataclass(frozen=True)
class Ordered:
    """A matrix whose columns were put into another order: column c of `blocks` is column order[c] of the matrix."""

    blocks: RawTensor
    order: torch.Tensor  # int64 [columns]
