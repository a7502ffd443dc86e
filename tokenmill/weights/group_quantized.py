"""Checkpoints made by GPTQ and AWQ: 4-bit weights with a scale and a zero for each group of columns.

A matrix [out, in] is stored transposed, eight values per int32:

    GPTQ   qweight [in / 8, out], eight inputs a word     qzeros [groups, out / 8], stored one too low (not in v2)
    AWQ    qweight [in, out / 8], eight outputs a word in the order 0 2 4 6 1 3 5 7        qzeros in the same order
    both   scales [groups, out]        value = scale * (q - zero)

They are repacked into GGUF's blocks of 32 columns, which every backend knows. Where all zeros are 8 that is Q4_0 and
nothing is rounded; else Q4_1, whose -zero * scale has half precision. Where the columns of a group do not lie together
(GPTQ's act order) the values are expanded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill.errors import DamagedFile
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.checkpoint import SafetensorsCheckpoint

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = 32
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True)
class Groups:
    """The parts of a quantised matrix."""

    codes: torch.Tensor  # uint8 [out, in]
    zeros: torch.Tensor  # uint8 [out, groups]
    scales: torch.Tensor  # float16 [out, groups]
    owners: torch.Tensor  # int64 [in]: the group of each column


class GroupQuantizedCheckpoint:
    """A view of a checkpoint with `X.weight` in place of `X.qweight`, `X.qzeros` and `X.scales`."""

    def __init__(self, inner: SafetensorsCheckpoint, config: Mapping[str, Any]) -> None:
        """`config`: the quantization_config of its config.json, which the reader of the spec has checked."""
        self._inner = inner
        self._is_awq = config.get("quant_method") == "awq"
        self._zeros_are_low = not self._is_awq and config.get("checkpoint_format") != "gptq_v2"
        self._matrices = [name.removesuffix(".qweight") for name in inner.shapes if name.endswith(".qweight")]
        parts = {matrix + part for matrix in self._matrices for part in _PARTS}
        self.shapes = {name: shape for name, shape in inner.shapes.items() if name not in parts}
        self.shapes |= {f"{matrix}.weight": self._shape(matrix) for matrix in self._matrices}

    @property
    def place(self) -> str:
        return self._inner.place

    @property
    def files(self) -> Sequence[Path]:
        return self._inner.files

    def load(self, name: str) -> RawTensor:
        matrix = name.removesuffix(".weight")
        if name in self._inner.shapes or f"{matrix}.qweight" not in self._inner.shapes:
            return self._inner.load(name)
        return as_blocks(name, self._groups(matrix))

    def _shape(self, matrix: str) -> tuple[int, int]:
        """Return [out, in], after a check that all parts fit together."""
        shapes = [self._inner.shapes.get(matrix + part, ()) for part in (".qweight", ".qzeros", ".scales")]
        if any(len(shape) != 2 for shape in shapes):
            raise DamagedFile(f"{self.place}: {matrix!r} lacks one of {', '.join(_PARTS[:3])}")
        (first, second), zeros, (num_groups, num_out) = shapes
        num_in, packed_out = (first, second * 8) if self._is_awq else (first * 8, second)
        if packed_out != num_out or zeros != (num_groups, num_out // 8) or num_in % max(1, num_groups):
            raise DamagedFile(f"{self.place}: the parts of {matrix!r} do not fit together: {shapes}")
        return num_out, num_in

    def _groups(self, matrix: str) -> Groups:
        num_out, num_in = self._shape(matrix)
        words = self._inner.tensor(f"{matrix}.qweight")
        if self._is_awq:
            codes = nibbles(words)[..., inverse(AWQ_ORDER)].reshape(num_in, num_out).t()
        else:
            codes = nibbles(words.t().contiguous()).reshape(num_out, num_in)
        zeros = nibbles(self._inner.tensor(f"{matrix}.qzeros"))
        zeros = zeros[..., inverse(AWQ_ORDER)] if self._is_awq else zeros
        zeros = zeros.reshape(-1, num_out).t() + int(self._zeros_are_low)
        scales = self._inner.tensor(f"{matrix}.scales").to(torch.float16).t()
        return Groups(codes.contiguous(), zeros.contiguous(), scales.contiguous(), self._owners(matrix, num_in, scales))

    def _owners(self, matrix: str, num_in: int, scales: torch.Tensor) -> torch.Tensor:
        num_groups = scales.shape[1]
        plain = torch.arange(num_in) // (num_in // num_groups)
        if f"{matrix}.g_idx" not in self._inner.shapes:
            return plain
        owners = self._inner.tensor(f"{matrix}.g_idx").long()
        if owners.shape != plain.shape or int(owners.min()) < 0 or int(owners.max()) >= num_groups:
            raise DamagedFile(f"{self.place}: {matrix}.g_idx does not number {num_groups} groups of {num_in} columns")
        return owners


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [..., n] to uint8 [..., n, 8], lowest bits first."""
    halves = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2)


def inverse(order: Sequence[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


def as_blocks(name: str, groups: Groups) -> RawTensor:
    num_out, num_in = groups.codes.shape
    size = num_in // groups.scales.shape[1]
    if size % BLOCK or not torch.equal(groups.owners, torch.arange(num_in) // size):
        return RawTensor(name, (num_out, num_in), expanded(groups))
    heads = [groups.scales]
    if not bool((groups.zeros == 8).all()):
        heads.append((groups.scales.float() * -groups.zeros.float()).to(torch.float16))
    numbers = torch.stack(
        [head.repeat_interleave(size // BLOCK, dim=1) for head in heads], dim=2
    )  # [out, blocks, heads]
    blocks = groups.codes.view(num_out, -1, 2, BLOCK // 2)
    packed = torch.cat((numbers.view(torch.uint8), blocks[:, :, 0] | (blocks[:, :, 1] << 4)), dim=2)
    quant = "Q4_0" if len(heads) == 1 else "Q4_1"
    return RawTensor(name, (num_out, num_in), packed.flatten(1), quant, same_scales=size // BLOCK)


def expanded(groups: Groups) -> torch.Tensor:
    """Dequantise to float32 [out, in]."""
    zeros, scales = (part[:, groups.owners].float() for part in (groups.zeros, groups.scales))
    return (groups.codes.float() - zeros) * scales
