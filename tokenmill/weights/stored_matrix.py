"""A quantised matrix in a checkpoint: the tensors that it consists of, and how they are combined."""

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
    """One quantised matrix of a checkpoint."""

    parts: tuple[str, ...]  # names of the tensors that store it
    shape: tuple[int, ...]
    load: Callable[[str], RawTensor]  # reads the matrix, given its name


def refuse_parts(place: str, name: str, /, **shapes: tuple[int, ...]) -> NoReturn:
    """Refuse parts whose shapes do not match: a wrong number of scales is a damaged file, never broadcast."""
    found = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
    raise DamagedFile(f"{place}: the shapes of the parts of {name!r} do not match: {found}")


def finite(checkpoint: SafetensorsCheckpoint, name: str) -> torch.Tensor:
    """Return scales as float32; refuse NaN and infinity, which would otherwise only show in answers."""
    scales = checkpoint.tensor(name)
    values = _powers(scales) if scales.dtype in (torch.float8_e8m0fnu, torch.uint8) else scales.float()
    if not bool(torch.isfinite(values).all()):
        raise DamagedFile(f"{checkpoint.place}: {name!r} has scales that are not finite numbers")
    return values


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Convert exponents with bias 127 (e8m0) to powers of two in float32; the highest, which is NaN, becomes
    infinity."""
    bits = exponents.view(torch.uint8).int()
    return torch.where(bits == 0, 0x00400000, bits << 23).view(torch.float32)


Grid = tuple[torch.Tensor, int, int]


def grid_of(
    place: str, name: str, shape: tuple[int, ...], scales: torch.Tensor, blocks: Sequence[tuple[int, int]]
) -> Grid:
    """Return the scales [..., r, c] of a matrix [..., rows, columns], and the numbers of rows and columns that share
    one.

    [..., 1, 1]      one for the matrix          also [], [1], and [experts] for stacked matrices
    [..., rows, 1]   one per row                 also [rows]
    [..., r, c]      one per block, of one of the sizes in the config; the last blocks may be smaller
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
