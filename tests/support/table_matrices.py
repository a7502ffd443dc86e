"""Random matrices of indices into a table of values, as files have them, with a scale for each group; and matrices
of integers in act order."""

from __future__ import annotations

import torch

from tokenmill.arch.block_formats import BLOCK_TYPES
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.scaled_blocks import Groups, integer_blocks


def table_matrix(
    quant: str, shape: tuple[int, ...], seed: int, blocks_per_scale: int = 1, name: str = "layers.0.q.weight"
) -> RawTensor:
    """Make a random matrix. nf4 and fp4 have scales for `blocks_per_scale` blocks of 32 columns, IQ4_NL for one
    block, IQ4_XS for 256 and for 32 columns."""
    drawing, kind = torch.Generator().manual_seed(seed), BLOCK_TYPES[quant]
    each = (*shape[:-1], shape[-1] // kind.block_size, kind.block_bytes)
    blocks = torch.randint(0, 256, each, generator=drawing, dtype=torch.uint8)
    scales = torch.rand((*each[:-1], 1), generator=drawing) * 0.01 + 0.001
    if quant in ("NF4", "FP4"):
        scales = scales[..., ::blocks_per_scale, :].repeat_interleave(blocks_per_scale, dim=-2)
        blocks[..., :4] = scales.contiguous().view(torch.uint8)
    else:
        smaller = 127 if quant == "IQ4_NL" else 127 * 16
        blocks[..., :2] = (scales / smaller).to(torch.float16).contiguous().view(torch.uint8)
    return RawTensor(name, shape, blocks.flatten(-2), quant, blocks_per_scale)


def act_order(bits: int, num_out: int, order: torch.Tensor, *, is_symmetric: bool, group: int) -> RawTensor:
    """Make a matrix as it is read from a checkpoint; `order` gives the group of each column."""
    shape, owners = (num_out, len(order) // group), torch.empty_like(order)
    owners[order] = torch.arange(len(order)) // group
    codes = torch.randint(0, 1 << bits, (num_out, len(order)), dtype=torch.uint8)
    zeros = torch.full(shape, 1 << (bits - 1)) if is_symmetric else torch.randint(0, 1 << bits, shape)
    scales = (torch.rand(shape) * 0.01 + 0.001).half()
    return integer_blocks("a.weight", Groups(codes, bits, zeros, scales, owners))
