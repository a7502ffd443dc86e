"""Matrices of HQQ: integers with a floating-point scale and zero point for each group of columns (or of rows).

    X.W_q          uint8, several values per byte: the first part of all groups in the high bits, the next below ...
                   (ten values of 3 bits per int32); [groups, group size] for axis 1, [group size, groups] for 0
    X.scale, X.zero     one value per group            value = (number - zero) * scale
    X.shape, X.nbits, X.group_size, X.axis, X.packing, ...     settings, each a tensor

Groups along the columns (axis 1) become G4 and G8 blocks. Groups of axis 0 consist of rows `rows / size` apart, with
scales per column. No block of columns shares a scale, so such matrices are dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.scaled_blocks import Groups, integer_blocks
from tokenmill.weights.stored_matrix import StoredMatrix, finite, refuse_parts

_SETTINGS = (
    "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "channel_wise", "optimize", "round_zero",
    "view_as_float", "unpack_view_dtype", "compute_dtype", "quant_zero", "quant_scale", "offload_meta",
    "encoded_state_dict", "stores_quant_config",
)  # fmt: skip
LARGEST_HALF = 65504.0
_PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # values per byte; of 3 bits per int32


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    stems = [name.removesuffix(".W_q") for name in checkpoint.shapes if name.endswith(".W_q")]
    return {f"{stem}.weight": _Matrix(checkpoint, stem).stored() for stem in stems}


@dataclass(frozen=True)
class _Matrix:
    checkpoint: SafetensorsCheckpoint
    stem: str

    def _setting(self, name: str) -> list[int]:
        full = f"{self.stem}.{name}"
        if full not in self.checkpoint.shapes:
            raise DamagedFile(f"{self.checkpoint.place}: {full!r} is missing")
        values = [int(value) for value in self.checkpoint.tensor(full).flatten().tolist()]
        if not values:
            raise DamagedFile(f"{self.checkpoint.place}: {full!r} is empty")
        return values

    def stored(self) -> StoredMatrix:
        parts = tuple(f"{self.stem}.{name}" for name in _SETTINGS if f"{self.stem}.{name}" in self.checkpoint.shapes)
        shape = tuple(self._setting("shape"))
        if len(shape) != 2 or min(shape) < 1:
            refuse_parts(self.checkpoint.place, self.stem, shape=shape)
        for name in ("zero_q", "scale_q", "zero_scale"):
            if f"{self.stem}.{name}" in self.checkpoint.shapes:
                raise UnsupportedModel(f"{self.checkpoint.place}: {self.stem!r} has quantised scales or zeros of HQQ")
        return StoredMatrix(parts, shape, lambda name: self._load(name, (shape[0], shape[1])))

    def _load(self, name: str, shape: tuple[int, int]) -> RawTensor:
        bits, axis = self._setting("nbits")[0], self._setting("axis")[0]
        if bits not in _PER_WORD or axis not in (0, 1):
            raise UnsupportedModel(f"{self.checkpoint.place}: {self.stem!r} is HQQ of {bits} bits, axis {axis}")
        place, stem = self.checkpoint.place, self.stem
        scales, zeros = (self.checkpoint.tensor(f"{stem}.{part}") for part in ("scale", "zero"))
        for part in ("scale", "zero"):
            finite(self.checkpoint, f"{stem}.{part}")
        num_groups = scales.numel()
        size = prod(shape) // max(1, num_groups)
        numbers = unpacked(self.checkpoint.tensor(f"{stem}.W_q"), bits, num_groups if axis == 1 else size)
        expected = (num_groups, size) if axis == 1 else (size, num_groups)
        if zeros.numel() != num_groups or tuple(numbers.shape) != expected or prod(expected) != prod(shape):
            refuse_parts(place, stem, matrix=shape, numbers=tuple(numbers.shape), scales=tuple(scales.shape),
                         zeros=tuple(zeros.shape))  # fmt: skip
        if axis == 0 or shape[1] % size:
            scales, zeros = (part.float().view(1, -1) if axis == 0 else part.float().view(-1, 1)
                             for part in (scales, zeros))  # fmt: skip
            values = ((numbers.float() - zeros) * scales).view(shape)
            return RawTensor(name, shape, values, is_rounded=float(values.abs().max()) <= LARGEST_HALF)
        codes, of_rows = numbers.view(shape), (shape[0], shape[1] // size)
        return integer_blocks(name, Groups(codes, bits, zeros.view(of_rows), scales.view(of_rows)))


def unpacked(words: torch.Tensor, bits: int, num_lines: int) -> torch.Tensor:
    """Unpack [n, m] to uint8 [num_lines, m]: first the highest bits of all words."""
    if words.is_floating_point():  # the same bytes under another dtype
        words = words.view(torch.int32 if bits == 3 else torch.uint8)
    if bits == 8:
        return words
    count, mask = _PER_WORD[bits], (1 << bits) - 1
    parts = [(words >> (bits * (count - 1 - index))) & mask for index in range(count)]
    return torch.cat(parts)[:num_lines].to(torch.uint8)
