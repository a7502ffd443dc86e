"""Matrices quantised while they are loaded, and the products with them.

fp8     e4m3 values, one float32 scale a row; half the bytes of bfloat16
int4    values of -8 to 7 in groups of 128 columns with a scale each; a quarter of the bytes

A few rows are multiplied while the matrix streams through (see `skinny`), in the activations' precision. Many rows:
fp8 rounds the activations too, row by row, and takes the fp8 matrix units; 4-bit matrices are expanded first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tokenmill.ops.triton.overlap import launch_options, let_next_begin, wait_for_previous
from tokenmill.ops.triton.skinny import GROUP, MAX_ROWS, expand_4bit, skinny_linear, skinny_linear_4bit

FP8 = torch.float8_e4m3fn
FP8_MAX = tl.constexpr(448.0)
GROUP_SIZE: int = GROUP.value
MAX_4BIT_ROWS = 64  # for more, expanding the matrix first is worth it


@dataclass(frozen=True)
class Fp8Matrix:
    values: torch.Tensor  # fp8 [rows, columns]
    scales: torch.Tensor  # float32 [rows]


@dataclass(frozen=True)
class Int4Matrix:
    values: torch.Tensor  # uint8 [rows, columns / 2]
    scales: torch.Tensor  # [rows, columns / 128]


def to_fp8(matrix: torch.Tensor) -> Fp8Matrix:
    scales = (matrix.abs().amax(dim=1).float() / 448.0).clamp_(min=1e-12)
    values = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    for rows in torch.arange(len(matrix), device="cpu").split(8192):  # float32 copies of a part at a time
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        values[part] = (matrix[part].float() / scales[part, None]).clamp_(-448, 448).to(FP8)
    return Fp8Matrix(values, scales)


def to_int4(matrix: torch.Tensor) -> Int4Matrix:
    num_rows, num_columns = matrix.shape
    values = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(num_rows, num_columns // GROUP_SIZE, dtype=matrix.dtype, device=matrix.device)
    for rows in torch.arange(num_rows, device="cpu").split(8192):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        groups = matrix[part].float().view(len(rows), -1, GROUP_SIZE)
        # The value of largest magnitude becomes -8: that end of the range reaches one further.
        extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale = (extreme / -8.0).to(matrix.dtype)
        safe = torch.where(scale == 0, torch.ones_like(scale), scale).float()
        codes = ((groups / safe).round().clamp_(-8, 7) + 8).to(torch.uint8)
        # Columns of a group as [byte of a word, half of a byte, word] → [word, byte, half]; see `skinny`.
        halves = codes.view(len(rows), -1, 4, 2, GROUP_SIZE // 8).permute(0, 1, 4, 2, 3)
        values[part] = (halves[..., 0] | (halves[..., 1] << 4)).flatten(1)
        scales[part] = scale.squeeze(2)
    return Int4Matrix(values, scales)


def expanded(matrix: Int4Matrix) -> torch.Tensor:
    """[rows, columns] in the scales' dtype, in plain torch: what the kernels are held against"""
    bytes_of_words = matrix.values.view(len(matrix.values), -1, GROUP_SIZE // 8, 4)
    halves = torch.stack((bytes_of_words & 15, bytes_of_words >> 4), dim=4).permute(0, 1, 3, 4, 2)
    groups = halves.flatten(2).to(matrix.scales.dtype) - 8
    return (groups * matrix.scales.unsqueeze(2)).flatten(1)


@triton.jit
def _quantize_rows(x, out, scales, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr) -> None:
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / FP8_MAX, 1e-12)
    tl.store(out + row * size + columns, (values / scale).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 [T, columns] and the scale of each row, float32 [T, 1]"""
    num_rows, size = x.shape
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    _quantize_rows[(num_rows,)](
        x.contiguous(), out, scales, size, triton.next_power_of_2(size), num_warps=8, **launch_options()
    )  # fmt: skip
    return out, scales


def fp8_linear(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    if len(x) <= MAX_ROWS:
        return skinny_linear(x, matrix.values, bias, matrix.scales)
    values, scales = quantized_rows(x)
    return torch._scaled_mm(
        values, matrix.values.t(), scales, matrix.scales.unsqueeze(0), bias=bias, out_dtype=x.dtype
    )  # fmt: skip


def int4_linear(x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    if len(x) <= MAX_4BIT_ROWS:
        return skinny_linear_4bit(x, matrix.values, matrix.scales, bias)
    return functional.linear(x, expand_4bit(matrix.values, matrix.scales), bias)
