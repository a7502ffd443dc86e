"""Matrices in NVFP4: values of 4 bits (e2m1), a scale in e4m3 for each 16 of them, and a global scale.

    compressed-tensors   X.weight_packed uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16],
                         X.weight_global_scale, a divisor of the scales
    ModelOpt             X.weight, X.weight_scale, X.weight_scale_2, a factor of the scales

The first value of a pair is in the low nibble. Matrices of experts may have a third dimension in front.
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
# (suffix of the values, suffix of the global scale, block format); the format defines how the global scale is used
_LAYOUTS = (("_packed", "_global_scale", "NV4D"), ("", "_scale_2", "NV4"))


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    found = {}
    for name, dtype in checkpoint.dtypes.items():
        for suffix, global_suffix, quant in _LAYOUTS:
            weight = name.removesuffix(suffix)
            if dtype != "U8" or not name.endswith(suffix) or weight + global_suffix not in checkpoint.shapes:
                continue
            parts = (name, f"{weight}_scale", weight + global_suffix)
            found[weight] = StoredMatrix(parts, _shape(checkpoint, parts), partial(_load, checkpoint, parts, quant))
    return found


def _shape(checkpoint: SafetensorsCheckpoint, parts: tuple[str, str, str]) -> tuple[int, ...]:
    values, scales, global_scale = (checkpoint.shapes.get(part, ()) for part in parts)
    shape = (*values[:-1], 2 * values[-1]) if values else ()
    is_e4m3 = checkpoint.dtypes.get(parts[1]) == "F8_E4M3"
    is_match = len(shape) >= 2 and scales == (*shape[:-1], shape[-1] // GROUP) and shape[-1] % BLOCK == 0
    if not is_e4m3 or not is_match or global_scale not in ((), (1,), shape[:-2], (*shape[:-2], 1)):
        refuse_parts(checkpoint.place, parts[0], values=values, scales=scales, global_scale=global_scale)
    return shape


def _load(checkpoint: SafetensorsCheckpoint, parts: tuple[str, str, str], quant: str, name: str) -> RawTensor:
    packed, shape = checkpoint.tensor(parts[0]), _shape(checkpoint, parts)
    finite(checkpoint, parts[1])
    global_scale = finite(checkpoint, parts[2])
    num_blocks = shape[-1] // BLOCK
    values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scales = in_blocks(checkpoint.tensor(parts[1]).view(torch.uint8), 2)
    is_per_expert = global_scale.numel() > 1
    global_scale = global_scale.reshape(*shape[:-2], 1, 1, 1) if is_per_expert else global_scale.reshape(())
    header = global_scale.expand(*shape[:-1], num_blocks, 1)
    blocks = torch.cat((scales, nibble_pairs(in_blocks(values, BLOCK))), dim=-1)
    return with_headers(name, shape, header, blocks, quant)
