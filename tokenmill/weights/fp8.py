"""Matrices in fp8 (e4m3) with scales: DeepSeek's and Qwen's blocks, compressed-tensors, ModelOpt, FBGEMM, mxfp8.

    X.weight              e4m3 [rows, columns], or [experts, rows, columns]
    X.weight_scale_inv    one per block, a factor despite its name                     (or X.weight_scale)
    X.weight_scale        one for the matrix, per row or per block, or a power of two per 32 columns
    X.scale               a power of two per block (DeepSeek V4)

A value is its e4m3 number times its scale. All forms become F8 blocks with float32 scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tokenmill.arch.block_formats import BLOCK
from tokenmill.arch.quantization import block_sizes
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.mxfp4 import scale_beside
from tokenmill.weights.scaled_blocks import in_blocks, with_headers
from tokenmill.weights.stored_matrix import StoredMatrix, finite, grid_of, refuse_parts

SCALES = ("_scale_inv", "_scale")
NAN = 0x7F  # NaN in e4m3, without the sign bit


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    blocks = block_sizes(config)
    found = {}
    for name, dtype in checkpoint.dtypes.items():
        if dtype == "F8_E5M2":
            raise UnsupportedModel(f"{checkpoint.place}: {name!r} is fp8 in e5m2, which is not supported: e4m3 is")
        if dtype != "F8_E4M3" or len(checkpoint.shapes[name]) < 2:
            continue
        names = (*(name + suffix for suffix in SCALES), scale_beside(name))
        scales = next((one for one in names if one in checkpoint.shapes and one != name), None)
        if scales is None:
            if name.endswith("_scale"):
                continue  # a scale of NVFP4
            raise DamagedFile(f"{checkpoint.place}: {name!r} is fp8, but its scales are missing")
        shape, of_scales = checkpoint.shapes[name], torch.empty(checkpoint.shapes[scales], device="meta")
        grid_of(checkpoint.place, name, shape, of_scales, blocks)
        found[name] = StoredMatrix((name, scales), shape, partial(_load, checkpoint, scales, blocks))
    return found


def _load(
    checkpoint: SafetensorsCheckpoint, scales_name: str, sizes: Sequence[tuple[int, int]], name: str
) -> RawTensor:
    numbers = checkpoint.tensor(name)
    scales = finite(checkpoint, scales_name)
    shape = tuple(numbers.shape)
    bits = numbers.view(torch.uint8)
    if bool(((bits & NAN) == NAN).any()):
        raise DamagedFile(f"{checkpoint.place}: {name!r} contains NaN")
    grid, rows, columns = grid_of(checkpoint.place, name, shape, scales, sizes)
    if shape[-1] % BLOCK or (columns % BLOCK and grid.shape[-1] > 1):
        return RawTensor(name, shape, numbers.float() * _spread(grid, rows, columns, shape))
    num_blocks = shape[-1] // BLOCK
    every = columns // BLOCK if grid.shape[-1] > 1 else num_blocks
    per_block = grid.repeat_interleave(every, dim=-1)[..., :num_blocks]
    if per_block.shape[-1] != num_blocks:
        refuse_parts(checkpoint.place, name, matrix=shape, scales=tuple(grid.shape))
    header = per_block.repeat_interleave(rows, dim=-2)[..., : shape[-2], :].unsqueeze(-1)
    blocks = in_blocks(bits, BLOCK)
    return with_headers(name, shape, header, blocks, "F8", blocks_per_scale=every)


def _spread(grid: torch.Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> torch.Tensor:
    whole = grid.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
    return whole[..., : shape[-2], : shape[-1]]
