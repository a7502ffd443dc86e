"""Conversion of matrices with separate values and scales to blocks (`arch/block_formats.py`).

Integers whose scales are exact in half precision and whose zero points are in the middle become GGUF's Q4_0 and Q8_0,
which every kernel supports; all others keep scales and zero points in float32. What no block format can store (groups
of odd sizes, columns of a group that are not neighbours) is dequantized to the precision of its scales, as the
quantiser does. For columns that are not neighbours there are also blocks with the columns sorted by group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tokenmill.arch.block_formats import BLOCK
from tokenmill.ops.raw import Ordered, RawTensor
from tokenmill.weights.dequantize import dequantize

WIDER = {"Q4_0": "G4", "Q8_0": "G8"}  # the same values with scales in single precision
HEADER_BYTES = 2  # of Q4_0 and Q8_0
CHUNK_VALUES = 1 << 20  # values dequantized at a time, in single precision


@dataclass(frozen=True)
class Groups:
    """The parts of a matrix of integers: a value is scale * (code - zero)."""

    codes: torch.Tensor  # uint8 [out, in]
    bits: int  # of a code
    zeros: torch.Tensor  # [out, groups], of any type
    scales: torch.Tensor  # [out, groups], of any floating type
    owners: torch.Tensor | None = None  # int64 [in]: the group of each column, if its columns are not neighbours


def integer_blocks(name: str, groups: Groups) -> RawTensor:
    (num_out, num_in), num_groups = groups.codes.shape, groups.scales.shape[1]
    size = num_in // num_groups
    if size % BLOCK or not _is_in_order(groups.owners, num_in, size):
        return RawTensor(name, (num_out, num_in), _dequantized(groups, size), ordered=_ordered(name, groups, size))
    is_small = groups.bits <= 4
    every = size // BLOCK
    scales, zeros = groups.scales.float(), groups.zeros.float()
    if _fits_half(scales, zeros, 8 if is_small else 128):
        codes = groups.codes if is_small else groups.codes ^ 128
        header = _repeated(scales.to(torch.float16), every).unsqueeze(2).view(torch.uint8)
        quant = "Q4_0" if is_small else "Q8_0"
    else:
        codes, quant = groups.codes, "G4" if is_small else "G8"
        header = _repeated(torch.stack((scales, zeros), dim=2), every).view(torch.uint8)
    numbers = codes.view(num_out, -1, BLOCK)
    packed = torch.cat((header, nibble_pairs(numbers) if is_small else numbers), dim=2)
    return RawTensor(name, (num_out, num_in), packed.flatten(1), quant, blocks_per_scale=every)


def _ordered(name: str, groups: Groups, size: int) -> Ordered | None:
    """Return the matrix with columns sorted by group; None if groups are not whole blocks."""
    owners = groups.owners
    if owners is None or size % BLOCK or bool((owners.bincount(minlength=groups.scales.shape[1]) != size).any()):
        return None
    order = owners.argsort(stable=True)
    blocks = integer_blocks(name, replace(groups, codes=groups.codes[:, order].contiguous(), owners=None))
    return Ordered(blocks, order)


def _repeated(values: torch.Tensor, times: int) -> torch.Tensor:
    return values.repeat_interleave(times, dim=1).contiguous()


def _fits_half(scales: torch.Tensor, zeros: torch.Tensor, middle: int) -> bool:
    return bool((zeros == middle).all()) and torch.equal(scales.to(torch.float16).float(), scales)


def _is_in_order(owners: torch.Tensor | None, num_in: int, size: int) -> bool:
    return owners is None or torch.equal(owners, torch.arange(num_in) // size)


def _dequantized(groups: Groups, size: int) -> torch.Tensor:
    """Dequantize to [out, in], some rows at a time; differences and products of such small integers are exact until the
    result is rounded."""
    num_out, num_in = groups.codes.shape
    owners = groups.owners if groups.owners is not None else torch.arange(num_in) // size
    result = torch.empty(num_out, num_in, dtype=groups.scales.dtype)
    each = max(1, CHUNK_VALUES // num_in)
    for first in range(0, num_out, each):
        rows = slice(first, first + each)
        zeros, scales = (part[rows][:, owners].float() for part in (groups.zeros, groups.scales))
        result[rows] = (groups.codes[rows].float() - zeros) * scales
    return result


def in_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape [..., n * size] to [..., n, size]."""
    return values.reshape(*values.shape[:-1], -1, size)


def nibble_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Pack uint8 [..., 32], each below 16, to uint8 [..., 16]: the first half in the low nibbles."""
    return numbers[..., : BLOCK // 2] | (numbers[..., BLOCK // 2 :] << 4)


def with_headers(name: str, shape: tuple[int, ...], header: torch.Tensor, numbers: torch.Tensor, quant: str,
                 blocks_per_scale: int = 1) -> RawTensor:  # fmt: skip
    """Return a tensor of blocks from headers [..., blocks, n] of any type and values uint8 [..., blocks, bytes]."""
    data = torch.cat((header.contiguous().view(torch.uint8), numbers), dim=-1).flatten(-2)
    return RawTensor(name, shape, data, quant, blocks_per_scale)


def alike(parts: Sequence[RawTensor]) -> list[RawTensor]:
    """Convert matrices of one shape (experts) to one format, so that they can be stacked: the one with wider scales if
    only the scales differ, else all are dequantized."""
    if len({(part.quant, part.blocks_per_scale, part.data.dtype) for part in parts}) == 1:
        return list(parts)
    every = math.gcd(*(part.blocks_per_scale for part in parts))
    wide = [replace(_widened(part) if part.quant in WIDER else part, blocks_per_scale=every) for part in parts]
    if len({part.quant for part in wide}) == 1 and wide[0].quant is not None:
        return wide
    return [replace(part, data=dequantize(part), quant=None, blocks_per_scale=1, ordered=None) for part in parts]


def _widened(raw: RawTensor) -> RawTensor:
    """Convert Q4_0 to G4 or Q8_0 to G8."""
    size, middle = (BLOCK // 2, 8.0) if raw.quant == "Q4_0" else (BLOCK, 128.0)
    blocks = in_blocks(raw.data, HEADER_BYTES + size)
    scales = blocks[..., :HEADER_BYTES].contiguous().view(torch.float16).float()
    numbers = blocks[..., HEADER_BYTES:] if raw.quant == "Q4_0" else blocks[..., HEADER_BYTES:] ^ 128
    header = torch.cat((scales, torch.full_like(scales, middle)), dim=-1)
    return with_headers(raw.name, raw.shape, header, numbers, WIDER[str(raw.quant)], raw.blocks_per_scale)
