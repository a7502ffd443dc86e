"""Random matrices of small floats as in checkpoints: every matrix, group and row has its own scale."""

from __future__ import annotations

import torch

from tokenmill.arch.block_formats import BLOCK_TYPES
from tokenmill.ops.raw import RawTensor

GROUP = 128  # columns, and rows, of a block of fp8


def raw_matrix(quant: str, shape: tuple[int, ...], seed: int, name: str = "a.weight") -> RawTensor:
    """Make a random matrix. F8 has a scale for each 128 x 128 values; NV4 and NV4D have one for each 16 values and
    one for each expert's matrix; or MXFP4."""
    drawing, num_blocks = torch.Generator().manual_seed(seed), shape[-1] // 32
    each = (*shape[:-1], num_blocks, BLOCK_TYPES[quant].block_bytes)
    blocks = torch.randint(0, 256, each, generator=drawing, dtype=torch.uint8)
    if quant == "F8":
        blocks[..., 4:] &= 0xBF  # the highest codes are NaN
        grid = (*shape[:-2], -(-shape[-2] // GROUP), shape[-1] // GROUP)
        scales = torch.rand(grid, generator=drawing) * 0.01 + 0.001
        scales = scales.repeat_interleave(GROUP, dim=-2)[..., : shape[-2], :].repeat_interleave(GROUP // 32, dim=-1)
        blocks[..., :4] = scales.unsqueeze(-1).view(torch.uint8)
        return RawTensor(name, shape, blocks.flatten(-2), quant, GROUP // 32)
    if quant == "MXFP4":
        blocks[..., 0] = torch.randint(117, 123, each[:-1], generator=drawing, dtype=torch.uint8)
        return RawTensor(name, shape, blocks.flatten(-2), quant)
    blocks[..., 4:6] = torch.randint(30, 90, (*each[:-1], 2), generator=drawing, dtype=torch.uint8)
    whole = torch.rand((*shape[:-2], 1, 1, 1), generator=drawing) * 0.01 + 0.001
    whole = (1 / whole if quant == "NV4D" else whole).expand(*each[:-1], 1)
    blocks[..., :4] = whole.contiguous().view(torch.uint8)
    return RawTensor(name, shape, blocks.flatten(-2), quant)
