"""From checkpoint tensors to the kernels' panels. The numbers of the file are kept: nothing is rounded again.

Block formats without a packed form of their own are expanded and kept as float16; the smallest error of all choices
(relative 2^-11) at the price of memory. Plain tensors keep their type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from tokenmill.ops.cpu.availability import native
from tokenmill.ops.raw import RawTensor

PACKED_QUANTS = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
_PLAIN_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Dense = Callable[[RawTensor], torch.Tensor]
"""Plain values of a raw tensor, in float32."""
Quantization = Literal["none", "int8"]


def pack_matrix(raw: RawTensor, dense: Dense, quantization: Quantization = "none", threads: int = 1) -> Any:
    """A matrix [rows, columns] as the kernels read it."""
    rows, columns = raw.shape
    if raw.quant in PACKED_QUANTS:
        return native().pack(raw.quant, rows, columns, raw.data.contiguous().numpy(), threads)
    values = dense(raw).to(torch.float16) if raw.quant else raw.data.contiguous()
    if quantization == "int8" and columns % 32 == 0:
        return native().pack("Q8_0", rows, columns, quantized_q8(values.float()).numpy(), threads)
    if values.dtype not in _PLAIN_KINDS:
        values = values.float()
    return native().pack(_PLAIN_KINDS[values.dtype], rows, columns, values.view(torch.uint8).numpy(), threads)


def pack_experts(raw: RawTensor, dense: Dense, quantization: Quantization = "none", threads: int = 1) -> list[Any]:
    """[experts, rows, columns] as one matrix per expert."""
    parts = (RawTensor(raw.name, raw.shape[1:], raw.data[index], raw.quant) for index in range(raw.shape[0]))
    return [pack_matrix(part, dense, quantization, threads) for part in parts]


def quantized_q8(values: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns] → Q8_0 blocks, uint8 [rows, columns / 32 * 34]"""
    blocks = values.view(values.shape[0], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)  # rounded first: numbers fit what is stored
    divisor = torch.where(scales == 0, 1.0, scales.float())
    numbers = (blocks / divisor).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], dim=-1).flatten(1)
