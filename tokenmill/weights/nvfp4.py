"""Matrices in NVFP4: numbers of 4 bits (e2m1), a scale in e4m3 for each 16 of them, and one for all.

    compressed-tensors   X.weight_packed uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16],
                         X.weight_global_scale, by which scales are divided
    ModelOpt             X.weight, X.weight_scale, X.weight_scale_2, by which scales are multiplied

The first of two numbers is in the low nibble. Matrices of experts may have a third dimension in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tokenmill.arch.block_formats import BLOCK
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.scaled_blocks import in_blocks, nibble_pairs, with_headers
from tokenmill.weights.stored_matrix import StoredMatrix, finite, refuse_parts

GROUP = 16
# (ending of the numbers, ending of the scale of all, block format): how the latter is used is part of the format
_MAKERS = (("_packed", "_global_scale", "NV4D"), ("", "_scale_2", "NV4"))


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    found = {}
    for name, dtype in checkpoint.dtypes.items():
        for ending, of_all, quant in _MAKERS:
            weight = name.removesuffix(ending)
            if dtype != "U8" or not name.endswith(ending) or weight + of_all not in checkpoint.shapes:
                continue
            parts = (name, f"{weight}_scale", weight + of_all)
            found[weight] = StoredMatrix(parts, _shape(checkpoint, parts), partial(_load, checkpoint, parts, quant))
    return found


def _shape(checkpoint: SafetensorsCheckpoint, parts: tuple[str, str, str]) -> tuple[int, ...]:
    numbers, scales, of_all = (checkpoint.shapes.get(part, ()) for part in parts)
    shape = (*numbers[:-1], 2 * numbers[-1])
    is_of_scales = checkpoint.dtypes.get(parts[1]) == "F8_E4M3"
    is_fit = len(shape) >= 2 and scales == (*shape[:-1], shape[-1] // GROUP) and shape[-1] % BLOCK == 0
    if not is_of_scales or not is_fit or of_all not in ((), (1,), shape[:-2], (*shape[:-2], 1)):
        refuse_parts(checkpoint.place, parts[0], numbers=numbers, scales=scales, scale_of_all=of_all)
    return shape


def _load(checkpoint: SafetensorsCheckpoint, parts: tuple[str, str, str], quant: str, name: str) -> RawTensor:
    packed, shape = checkpoint.tensor(parts[0]), _shape(checkpoint, parts)
    finite(checkpoint, parts[1])
    of_all = finite(checkpoint, parts[2])
    num_blocks = shape[-1] // BLOCK
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scales = in_blocks(checkpoint.tensor(parts[1]).view(torch.uint8), 2)
    whole = of_all.reshape(*shape[:-2], 1, 1, 1) if of_all.numel() > 1 else of_all.reshape(())
    header = whole.expand(*shape[:-1], num_blocks, 1)
    blocks = torch.cat((scales, nibble_pairs(in_blocks(numbers, BLOCK))), dim=-1)
    return with_headers(name, shape, header, blocks, quant)
