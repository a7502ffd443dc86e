"""Packs checkpoint tensors into the panels that the native kernels read. Quantised values are not requantised.

Block formats without a packed form are expanded to float16, which has the smallest error of the available types
(relative 2^-11) but takes more memory. Unquantised tensors keep their dtype.

Packed matrices may also come from a cache (`PackedMatrices`); then the checkpoint's tensor is not read.
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
GROUPED = ("G4", "G8", "NF4", "FP4", "F8")  # equal scales of neighbouring blocks are stored once: "G4:4"
_PLAIN_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ORDERED = "@"
ALIGNMENT = 64  # bytes, of a packed matrix

Dense = Callable[[RawTensor], torch.Tensor]
"""Returns the dequantised values of a raw tensor, in float32."""
Quantization = Literal["none", "int8"]
Bytes = NDArray[np.uint8]


class Weights(Protocol):
    def get(self, name: str) -> RawTensor: ...


class PackedSection(Protocol):
    """Packed matrices of one kind and shape, stored together."""

    @property
    def kind(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def count(self) -> int: ...


class PackedMatrices(Protocol):
    """A cache of packed matrices, by name of the weight."""

    def find(self, name: str) -> tuple[PackedSection, Bytes] | None: ...

    def reserve(self, name: str, kind: str, rows: int, cols: int, count: int, num_bytes: int) -> Bytes | None:
        """Return memory to pack into; None if the packer shall allocate it."""
        ...


@dataclass(frozen=True)
class Packer:
    """Packs the matrices of a checkpoint."""

    weights: Weights
    dense: Dense
    quantization: Quantization = "none"
    threads: int = 1
    kept: PackedMatrices | None = None

    def matrix(self, name: str) -> Any:
        """Pack a weight [rows, columns]."""
        return self._matrices(name, lambda: [self.weights.get(name)])[0]

    def experts(self, name: str) -> list[Any]:
        """Pack a weight [experts, rows, columns] as one matrix per expert."""
        return self._matrices(name, lambda: _slices(self.weights.get(name)))

    def row_groups(self, name: str, count: int) -> list[Any]:
        """Pack a weight [count * rows, columns] as `count` matrices."""

        def groups() -> list[RawTensor]:
            raw = self.weights.get(name)
            shape = (raw.shape[0] // count, raw.shape[1])
            return [replace(raw, shape=shape, data=data, ordered=None) for data in raw.data.view(count, shape[0], -1)]

        return self._matrices(name, groups)

    def _matrices(self, name: str, load: Callable[[], list[RawTensor]]) -> list[Any]:
        found = None if self.kept is None else self.kept.find(name)
        if found is not None:
            section, packed = found
            matrices = packed.reshape(section.count, -1)
            return [native().matrix_over(section.kind, section.rows, section.cols, one) for one in matrices]
        raws = load()
        kind = kind_of(raws[0], self.quantization)
        (rows, cols), count = raws[0].shape, len(raws)
        num_bytes = native().packed_bytes(kind, rows, cols)
        buffer = None if self.kept is None else self.kept.reserve(name, kind, rows, cols, count, count * num_bytes)
        outputs = [None] * count if buffer is None else list(buffer.reshape(count, -1))
        return [pack_as(kind, raw, self.dense, self.threads, to) for raw, to in zip(raws, outputs, strict=True)]


def _as_g8(blocks: torch.Tensor) -> torch.Tensor:
    """Convert bitsandbytes' int8 blocks to G8: scale / 127, a zero point of 128, and unsigned codes."""
    scales = blocks[..., :4].contiguous().view(torch.float32) * (1 / 127)
    header = torch.cat((scales, torch.full_like(scales, 128.0)), dim=-1)
    return torch.cat((header.view(torch.uint8), blocks[..., 4:] ^ 128), dim=-1)


def _as_nv4(blocks: torch.Tensor) -> torch.Tensor:
    """Convert NV4D blocks to NV4: the divisor of the scales becomes a factor."""
    inverse = 1 / blocks[..., :4].contiguous().view(torch.float32)
    return torch.cat((inverse.view(torch.uint8), blocks[..., 4:]), dim=-1)


# Formats that equal a packed format but for the order of roundings in their reference implementation.
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
    """Return the packed kind of a tensor; with a suffix "@" if its columns are reordered (act order)."""
    if raw.ordered is not None:
        return f"{kind_of(raw.ordered.blocks, quantization)}{ORDERED}"
    quant = _VARIANTS[raw.quant][0] if raw.quant in _VARIANTS else raw.quant
    if quant in GROUPED:
        num_blocks = raw.shape[-1] // 32
        group = next(size for size in (4, 2, 1) if raw.blocks_per_scale % size == 0 and num_blocks % size == 0)
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
    """Return a digest of the kernels' memory layout of every kind; a cache of packed bytes is valid for one digest."""
    rows, cols = 40, 512  # covers full and partial panels, super-blocks and blocks
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
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)  # codes are computed from the stored scale
    divisor = torch.where(scales == 0, 1.0, scales.float())
    numbers = (blocks / divisor).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=-1).flatten(1)
