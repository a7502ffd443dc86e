"""Integer matrices of compressed-tensors (LLM Compressor): packed into words, or plain int8.

    pack-quantized   X.weight_packed int32 [out, in * bits / 32]: values packed without gaps along the inputs, with an
                     offset of 2 ** (bits - 1); X.weight_scale [out, groups]; X.weight_zero_point int32, packed along
                     the outputs; X.weight_shape; X.weight_g_idx if columns of a group are not neighbours
    int-quantized    X.weight int8 [out, in]; X.weight_scale [out, 1], [1] or [out, groups]; X.weight_zero_point int8
    (naive-quantized the same)

A value is scale * (number - zero point). The floating-point formats are in `fp8.py`, `nvfp4.py` and `mxfp4.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.arch.quantization import read_quantization
from tokenmill.errors import DamagedFile
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint
from tokenmill.weights.group_quantized import WORD_BITS, unpacked
from tokenmill.weights.scaled_blocks import Groups, integer_blocks
from tokenmill.weights.stored_matrix import StoredMatrix, finite, refuse_parts

_PARTS = ("_packed", "_scale", "_zero_point", "_shape", "_g_idx")


def find(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    found = {}
    for name, dtype in checkpoint.dtypes.items():
        if name.endswith(".weight_packed") and dtype == "I32":
            weight = name.removesuffix("_packed")
            found[weight] = _PackedIntegers(checkpoint, weight, _bits(checkpoint, config, weight)).matrix()
        if name.endswith(".weight") and dtype == "I8" and f"{name}_scale" in checkpoint.shapes:
            found[name] = _PlainIntegers(checkpoint, name).matrix()
    return found


def _bits(checkpoint: SafetensorsCheckpoint, config: Mapping[str, Any], weight: str) -> int:
    scheme = read_quantization(config).scheme_of(weight.removesuffix(".weight")) if config else None
    if scheme is None or not scheme.bits:
        raise DamagedFile(f"{checkpoint.place}: the config does not give the number of bits of {weight!r}")
    return scheme.bits


@dataclass(frozen=True)
class _PackedIntegers:
    checkpoint: SafetensorsCheckpoint
    weight: str
    bits: int

    def matrix(self) -> StoredMatrix:
        parts = tuple(self.weight + part for part in _PARTS if self.weight + part in self.checkpoint.shapes)
        return StoredMatrix(parts, self._shape(), self._load)

    def _shape(self) -> tuple[int, int]:
        """Return [out, in]; the last word of a row is always full at the widths in use."""
        packed, scales = (self.checkpoint.shapes.get(self.weight + part, ()) for part in ("_packed", "_scale"))
        if len(packed) != 2 or len(scales) != 2 or scales[0] != packed[0]:
            refuse_parts(self.checkpoint.place, self.weight, packed=packed, scales=scales)
        num_out, num_in = packed[0], packed[1] * WORD_BITS // self.bits
        zeros = self.checkpoint.shapes.get(f"{self.weight}_zero_point")
        packed_zeros = (-(-num_out * self.bits // WORD_BITS), scales[1])
        if num_in % scales[1] or (zeros is not None and zeros != packed_zeros):
            refuse_parts(self.checkpoint.place, self.weight, packed=packed, scales=scales, zeros=zeros or ())
        return num_out, num_in

    def _load(self, name: str) -> RawTensor:
        num_out, num_in = self._shape()
        self._check_stated_shape(num_out, num_in)
        codes = unpacked(self.checkpoint.tensor(f"{self.weight}_packed"), self.bits)
        scales = self.checkpoint.tensor(f"{self.weight}_scale")
        finite(self.checkpoint, f"{self.weight}_scale")
        zeros = torch.full(scales.shape, 1 << (self.bits - 1), dtype=torch.uint8)
        if f"{self.weight}_zero_point" in self.checkpoint.shapes:
            words = self.checkpoint.tensor(f"{self.weight}_zero_point")
            zeros = unpacked(words.t().contiguous(), self.bits)[:, :num_out].t().contiguous()
        return integer_blocks(name, Groups(codes, self.bits, zeros, scales, self._owners(num_in, scales.shape[1])))

    def _check_stated_shape(self, num_out: int, num_in: int) -> None:
        stated = f"{self.weight}_shape"
        if stated in self.checkpoint.shapes and self.checkpoint.tensor(stated).tolist() != [num_out, num_in]:
            refuse_parts(
                self.checkpoint.place,
                self.weight,
                packed=self.checkpoint.shapes[f"{self.weight}_packed"],
                shape=tuple(self.checkpoint.tensor(stated).tolist()),
            )

    def _owners(self, num_in: int, num_groups: int) -> torch.Tensor | None:
        if f"{self.weight}_g_idx" not in self.checkpoint.shapes:
            return None
        owners = self.checkpoint.tensor(f"{self.weight}_g_idx").long()
        if owners.shape == (num_in,) and int(owners.max()) == -1:  # not in use
            return None
        if owners.shape != (num_in,) or int(owners.min()) < 0 or int(owners.max()) >= num_groups:
            raise DamagedFile(
                f"{self.checkpoint.place}: {self.weight}_g_idx does not assign {num_in} columns to {num_groups} groups"
            )
        return owners


@dataclass(frozen=True)
class _PlainIntegers:
    checkpoint: SafetensorsCheckpoint
    weight: str

    def matrix(self) -> StoredMatrix:
        names = (self.weight, f"{self.weight}_scale", f"{self.weight}_zero_point", f"{self.weight}_g_idx")
        shape = self.checkpoint.shapes[self.weight]
        if len(shape) != 2:
            refuse_parts(self.checkpoint.place, self.weight, weight=shape)
        self._along(shape, self.checkpoint.shapes[f"{self.weight}_scale"])
        return StoredMatrix(tuple(name for name in names if name in self.checkpoint.shapes), shape, self._load)

    def _along(self, shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales as (out or 1, groups)."""
        size = (1, 1) if scales in ((), (1,)) else (scales[0], 1) if len(scales) == 1 else scales
        if len(size) != 2 or size[0] not in (1, shape[0]) or shape[1] % max(1, size[1]):
            refuse_parts(self.checkpoint.place, self.weight, weight=shape, scales=scales)
        return size[0], size[1]

    def _load(self, name: str) -> RawTensor:
        numbers, scales = (self.checkpoint.tensor(f"{self.weight}{part}") for part in ("", "_scale"))
        finite(self.checkpoint, f"{self.weight}_scale")
        size = self._along(tuple(numbers.shape), tuple(scales.shape))
        full = (numbers.shape[0], size[1])
        scales = scales.reshape(size).expand(full)
        zeros = torch.full(full, 128)
        if f"{self.weight}_zero_point" in self.checkpoint.shapes:
            found = self.checkpoint.tensor(f"{self.weight}_zero_point")
            if found.numel() != size[0] * size[1]:
                refuse_parts(self.checkpoint.place, self.weight, scales=size, zeros=tuple(found.shape))
            zeros = found.reshape(size).expand(full).int() + 128
        codes = numbers.view(torch.uint8) ^ 128
        return integer_blocks(name, Groups(codes, 8, zeros, scales))
