"""A weight as stored in a checkpoint, before a backend packs it.

An unquantised tensor has its values in `data`. A quantised one has the file's blocks as bytes, a row of blocks for each
row of the tensor; `quant` names the block format as GGUF does ("Q4_0", "Q6_K", ...).

With act order, the columns of a quantisation group are not neighbours. Then `data` holds dequantised values, and
`ordered` holds the blocks with their columns reordered, for kernels that reorder their inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RawTensor:
    name: str
    shape: tuple[int, ...]  # of the values, also where `data` holds blocks
    data: torch.Tensor  # values of any float dtype; or uint8 blocks [..., bytes per row] when `quant` is set
    quant: str | None = None
    blocks_per_scale: int = 1  # this many neighbouring blocks share one scale: larger groups, stored as blocks
    ordered: Ordered | None = None
    is_rounded: bool = False  # dequantised from a format without blocks: float16 keeps all of their precision


@dataclass(frozen=True)
class Ordered:
    """A matrix with reordered columns: column c of `blocks` is column order[c] of the matrix."""

    blocks: RawTensor
    order: torch.Tensor  # int64 [columns]
