"""Matrices in MXFP4: values of 4 bits (e2m1), and a power of two for each 32 of them.

    gpt-oss              X_blocks [..., rows, groups, 16], X_scales [..., rows, groups]: exponents with bias 127
    compressed-tensors   X.weight_packed uint8 [rows, columns / 2], X.weight_scale uint8 [rows, groups]
    DeepSeek V4          X.weight int8 [rows, columns / 2], X.scale e8m0 [rows, groups]

The first value of a pair is in the low nibble. The values are converted, without rounding, to GGUF's blocks, which
every backend supports: an exponent, then 16 bytes whose low nibbles are the first half of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.stored_matrix import StoredMatrix, refuse_parts

GROUP, BYTES = 32, 16
BLOCKS, SCALES = "_blocks", "_scales"
PACKED = ".weight_packed"


def scale_beside(weight: str) -> str:
    """Return the name of a matrix's scales in DeepSeek V4's files."""
    return weight.removesuffix("weight") + "scale"


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    found = {}
    for name, shape in checkpoint.shapes.items():
        last = shape[-1] if shape else 0  # a scalar is refused below
        if name.endswith(BLOCKS):
            weight = name.removesuffix(BLOCKS)
            parts, blocks = (name, weight + SCALES), shape
        elif name.endswith(PACKED) and checkpoint.dtypes.get(f"{name.removesuffix('_packed')}_scale") == "U8":
            weight = name.removesuffix("_packed")
            parts, blocks = (name, f"{weight}_scale"), (*shape[:-1], last // BYTES, BYTES)
        elif checkpoint.dtypes[name] in ("I8", "U8") and scale_beside(name) in checkpoint.shapes:
            weight = name
            parts, blocks = (name, scale_beside(name)), (*shape[:-1], last // BYTES, BYTES)
        else:
            continue
        scales = checkpoint.shapes.get(parts[1], ())
        if len(blocks) < 3 or blocks[-1] != BYTES or blocks[:-1] != scales or last % BYTES:
            refuse_parts(checkpoint.place, weight, blocks=shape, scales=scales)
        whole = (*blocks[:-2], blocks[-2] * GROUP)
        found[weight] = StoredMatrix(parts, whole, partial(_load, checkpoint, parts, whole))
    return found


def _load(checkpoint: SafetensorsCheckpoint, parts: tuple[str, str], shape: tuple[int, ...], name: str) -> RawTensor:
    blocks, scales = (checkpoint.tensor(part) for part in parts)
    return RawTensor(name, shape, as_gguf_blocks(blocks.reshape(*scales.shape, BYTES), scales), "MXFP4")


def as_gguf_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [..., groups, 16] and [..., groups] to GGUF's blocks, uint8 [..., groups * 17]."""
    blocks, scales = blocks.view(torch.uint8), scales.view(torch.uint8)
    out = torch.empty(*scales.shape, BYTES + 1, dtype=torch.uint8)
    out[..., 0] = scales
    # theirs: byte j has values 2j and 2j + 1; GGUF's: byte k has values k and k + 16
    low, high = blocks & 15, blocks >> 4
    half = BYTES // 2
    out[..., 1::2] = low[..., :half] | (low[..., half:] << 4)
    out[..., 2::2] = high[..., :half] | (high[..., half:] << 4)
    return out.flatten(-2)
