"""Packs checkpoint tensors into the kernels' panels. The values of the file are kept: nothing is rounded again.

Block formats without a packed form of their own are expanded and kept as float16; the smallest error of all choices
(relative 2^-11) at the price of memory. Plain tensors keep their type.

Packed matrices may come from elsewhere (`PackedMatrices`): then the checkpoint's tensor is not touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.ops.cpu.availability import native
from tokenmill.ops.raw import RawTensor

PACKED_QUANTS = frozenset(
    {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS"}
    | {"G4", "G8", "NF4", "FP4", "NV4", "F8"}
)
GROUPED = ("G4", "G8", "NF4", "FP4", "F8")  # scales of a few blocks are kept once where they are the same: "G4:4"
_PLAIN_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ORDERED = "@"
ALIGNMENT = 64  # of a packed matrix, in bytes

Dense = Callable[[RawTensor], torch.Tensor]
"""Plain values of a raw tensor, in float32."""
Quantization = Literal["none", "int8"]
Bytes = NDArray[np.uint8]


class Weights(Protocol):
    def get(self, name: str) -> RawTensor: ...


class PackedSection(Protocol):
    """Some matrices of one kind and shape."""

    @property
    def kind(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def count(self) -> int: ...


class PackedMatrices(Protocol):
    """Where packed matrices come from and go to, by the names of their weights."""

    def find(self, name: str) -> tuple[PackedSection, Bytes] | None: ...

    def reserve(self, name: str, kind: str, rows: int, cols: int, count: int, num_bytes: int) -> Bytes | None:
        """Memory to pack into; None: wherever there is some."""
        ...


@dataclass(frozen=True)
class Packer:
    """The matrices of a checkpoint, packed."""

    weights: Weights
    dense: Dense
    quantization: Quantization = "none"
    threads: int = 1
    kept: PackedMatrices | None = None

    def matrix(self, name: str) -> Any:
        """The weight [rows, columns]."""
        return self._matrices(name, lambda: [self.weights.get(name)])[0]

    def experts(self, name: str) -> list[Any]:
        """The weight [experts, rows, columns] as one matrix per expert."""
        return self._matrices(name, lambda: _slices(self.weights.get(name)))

    def row_groups(self, name: str, count: int) -> list[Any]:
        """The weight [count * rows, columns] as so many matrices."""

        def groups() -> list[RawTensor]:
            raw = self.weights.get(name)
            shape = (raw.shape[0] // count, raw.shape[1])
            return [replace(raw, shape=shape, data=data, ordered=None) for data in raw.data.view(count, shape[0], -1)]

        return self._matrices(name, groups)

    def _matrices(self, name: str, load: Callable[[], list[RawTensor]]) -> list[Any]:
        found = None if self.kept is None else self.kept.find(name)
        if found is not None:
            section, packed = found
            each = packed.reshape(section.count, -1)
            return [native().matrix_over(section.kind, section.rows, section.cols, one) for one in each]
        raws = load()
        kind = kind_of(raws[0], self.quantization)
        (rows, cols), count = raws[0].shape, len(raws)
        num_bytes = native().packed_bytes(kind, rows, cols)
        room = None if self.kept is None else self.kept.reserve(name, kind, rows, cols, count, count * num_bytes)
        places = [None] * count if room is None else list(room.reshape(count, -1))
        return [pack_as(kind, raw, self.dense, self.threads, to) for raw, to in zip(raws, places, strict=True)]


def _as_g8(blocks: torch.Tensor) -> torch.Tensor:
    """bitsandbytes' int8 as G8: a third number in front, and unsigned"""
    scales = blocks[..., :4].contiguous().view(torch.float32) * (1 / 127)
    header = torch.cat((scales, torch.full_like(scales, 128.0)), dim=-1)
    return torch.cat((header.view(torch.uint8), blocks[..., 4:] ^ 128), dim=-1)


def _as_nv4(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of the number by which scales are divided"""
    inverse = 1 / blocks[..., :4].contiguous().view(torch.float32)
    return torch.cat((inverse.view(torch.uint8), blocks[..., 4:]), dim=-1)


# Formats that differ from a packed one in the order in which their maker rounds.
_VARIANTS: dict[str, tuple[str, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "B8": ("G8", 36, _as_g8),
    "NV4D": ("NV4", 22, _as_nv4),
}


def _without_variant(raw: RawTensor) -> RawTensor:
    if raw.quant not in _VARIANTS:
        return raw
    quant, block_bytes, converted = _VARIANTS[raw.quant]
    data = converted(raw.data.reshape(*raw.data.shape[:-1], -1, block_bytes)).flatten(-2)
    return replace(raw, data=data, quant=quant)


def kind_of(raw: RawTensor, quantization: Quantization) -> str:
    """The packed form that a tensor gets; with "@" where its columns are put into another order."""
    if raw.ordered is not None:
        return f"{kind_of(raw.ordered.blocks, quantization)}{ORDERED}"
    quant = _VARIANTS[raw.quant][0] if raw.quant in _VARIANTS else raw.quant
    if quant in GROUPED:
        num_blocks = raw.shape[-1] // 32
        group = next(size for size in (4, 2, 1) if raw.same_scales % size == 0 and num_blocks % size == 0)
        return str(quant) if group == 1 else f"{quant}:{group}"
    if quant in PACKED_QUANTS:
        return str(quant)
    if quantization == "int8" and raw.shape[-1] % 32 == 0:
        return "Q8_0"
    return "F16" if raw.quant or raw.is_rounded else _PLAIN_KINDS.get(raw.data.dtype, "F32")


def pack_as(kind: str, raw: RawTensor, dense: Dense, threads: int = 1, to: Bytes | None = None) -> Any:
    rows, columns = raw.shape
    if raw.ordered is not None:
        blocks, order = raw.ordered.blocks.data.contiguous(), raw.ordered.order.int()
        return native().pack(kind, rows, columns, blocks.numpy(), threads, to, order.numpy())
    raw = _without_variant(raw)
    if raw.quant == kind.partition(":")[0]:
        return native().pack(kind, rows, columns, raw.data.contiguous().numpy(), threads, to)
    values = dense(raw).to(torch.float16) if raw.quant or raw.is_rounded else raw.data.contiguous()
    if kind == "Q8_0":
        return native().pack(kind, rows, columns, quantized_q8(values.float()).numpy(), threads, to)
    if values.dtype not in _PLAIN_KINDS:
        values = values.float()
    return native().pack(kind, rows, columns, values.view(torch.uint8).numpy(), threads, to)


def _slices(raw: RawTensor) -> list[RawTensor]:
    return [replace(raw, shape=raw.shape[1:], data=raw.data[index], ordered=None) for index in range(raw.shape[0])]


@cache
def layout_digest() -> str:
    """A digest of how the kernels lay out every kind; a cache of packed bytes is valid for one digest only."""
    rows, cols = 40, 512  # panels that are full and one that is not, super-blocks and blocks
    digest = hashlib.sha256()
    for kind in (*sorted(PACKED_QUANTS), *(f"{kind}:4" for kind in GROUPED), *_PLAIN_KINDS.values()):
        row_bytes = native().source_row_bytes(kind, cols)
        source = (np.arange(rows * row_bytes, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)
        packed = aligned_bytes(native().packed_bytes(kind, rows, cols))
        native().pack(kind, rows, cols, source.reshape(rows, row_bytes), 1, packed)
        digest.update(kind.encode() + packed.tobytes())
    return digest.hexdigest()


def aligned_bytes(count: int) -> Bytes:
    whole = np.zeros(count + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + count]


def quantized_q8(values: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns] → Q8_0 blocks, uint8 [rows, columns / 32 * 34]"""
    blocks = values.view(values.shape[0], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)  # rounded first: numbers fit what is stored
    divisor = torch.where(scales == 0, 1.0, scales.float())
    numbers = (blocks / divisor).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=-1).flatten(1)
