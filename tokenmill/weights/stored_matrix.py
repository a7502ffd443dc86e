"""A quantised matrix as a checkpoint stores it: which tensors it is made of, and how they become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NoReturn

import torch

from tokenmill.errors import DamagedFile
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint


@dataclass(frozen=True)
class StoredMatrix:
    parts: tuple[str, ...]  # names of the tensors that it is stored in
    shape: tuple[int, ...]
    load: Callable[[str], RawTensor]  # its name → itself


def refuse_parts(place: str, name: str, /, **shapes: tuple[int, ...]) -> NoReturn:
    """Parts that do not fit together: a scale too many or too few is a damaged file, never broadcast."""
    found = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
    raise DamagedFile(f"{place}: the parts of {name!r} do not fit together: {found}")


def finite(checkpoint: SafetensorsCheckpoint, name: str) -> torch.Tensor:
    """Scales as float32; one that is no number would be seen in answers only."""
    scales = checkpoint.tensor(name)
    values = _powers(scales) if scales.dtype in (torch.float8_e8m0fnu, torch.uint8) else scales.float()
    if not bool(torch.isfinite(values).all()):
        raise DamagedFile(f"{checkpoint.place}: {name!r} has scales that are no finite numbers")
    return values


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents of two, 127 too high (e8m0) → float32; the highest, which is no number, becomes infinite."""
    bits = exponents.view(torch.uint8).int()
    return torch.where(bits == 0, 0x00400000, bits << 23).view(torch.float32)


Grid = tuple[torch.Tensor, int, int]


def grid_of(
    place: str, name: str, shape: tuple[int, ...], scales: torch.Tensor, blocks: Sequence[tuple[int, int]]
) -> Grid:
    """Scales [..., r, c] of a matrix [..., rows, columns], and how many rows and columns have one in common.

    [..., 1, 1]      one for the matrix          also [], [1], and [experts] for a stack of them
    [..., rows, 1]   one for each row            also [rows]
    [..., r, c]      one for each block, of one of the sizes that the config names; the last ones may be smaller
    """
    (rows, columns), leading, found = shape[-2:], shape[:-2], tuple(scales.shape)
    if len(found) == 4 and len(shape) == 2 and found[1::2] == (1, 1):  # ModelOpt's blocks
        scales, found = scales.reshape(found[::2]), found[::2]
    if (scales.numel() == 1 and len(shape) == 2) or found == leading:
        return scales.reshape(*leading, 1, 1), rows, columns
    if found == (rows,) and not leading:
        return scales.reshape(rows, 1), 1, columns
    if found[:-2] == leading and len(found) == len(shape):
        if found[-2:] in ((rows, 1), (1, 1)):
            return scales, rows // found[-2], columns
        for block in blocks:
            if found[-2:] == (ceil(rows / block[0]), ceil(columns / block[1])):
                return scales, *block
    refuse_parts(place, name, matrix=shape, scales=found)
