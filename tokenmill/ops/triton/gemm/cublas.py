"""Products of many rows by cuBLAS. Matrices of packed integers, 4-bit floats or table codes are expanded first, in
parts of limited size."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenmill.arch.packed_formats import EXPANDED_BYTES, FP8_GROUP
from tokenmill.ops.triton.gemm.product import GemmKernel, Product
from tokenmill.ops.triton.quant.fp4 import Fp4Matrix, dequantize_fp4
from tokenmill.ops.triton.quant.gemm_fp8_split import Fp8Rows, padded_plane
from tokenmill.ops.triton.quant.packed_fp4 import PackedFp4Matrix, dequantize_packed_fp4
from tokenmill.ops.triton.quant.packed_table import TableMatrix, dequantize_table
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix, Fp8Matrix, PackedIntMatrix, dequantized_rows


def _no_config(_product: Product) -> None:
    return None


def _linear(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, _config: None, _dtype: torch.dtype
) -> torch.Tensor:
    return functional.linear(x, matrix, bias)


def _add(
    x: torch.Tensor,
    matrix: torch.Tensor,
    _bias: torch.Tensor | None,
    _config: None,
    _dtype: torch.dtype,
    residual: torch.Tensor,
) -> torch.Tensor:
    """residual + x @ matrix.T, written over the residual"""
    return residual.addmm_(x, matrix.t())


def _fp8_linear(
    rows: Fp8Rows, matrix: Fp8Matrix, bias: torch.Tensor | None, _config: None, dtype: torch.dtype
) -> torch.Tensor:
    scales = matrix.scales.unsqueeze(0)
    return torch._scaled_mm(
        rows.planes.squeeze(1), matrix.values.t(), rows.scales, scales, bias=bias, out_dtype=dtype
    )  # fmt: skip


def _fp8_squares_linear(
    rows: Fp8Rows, matrix: Fp8BlockMatrix, bias: torch.Tensor | None, _config: None, dtype: torch.dtype
) -> torch.Tensor:
    """fp8 by cuBLAS with block scales: one per row and 128 columns of the inputs, consecutive over rows, and one per
    128 x 128 block of the matrix, consecutive over the blocks of 128 matrix rows."""
    x, num_rows = padded_plane(rows), len(rows.planes)
    of_rows = torch.empty(len(matrix.scales), len(x), dtype=torch.float32, device=x.device)
    of_rows[:, :num_rows] = rows.scales.t()
    of_squares = matrix.scales[:, ::FP8_GROUP].t().contiguous().t()
    out = torch._scaled_mm(x, matrix.values.t(), of_rows.t(), of_squares, out_dtype=dtype)[:num_rows]
    return out if bias is None else out.add_(bias)


Expandable = PackedIntMatrix | Fp4Matrix | PackedFp4Matrix | TableMatrix


def expanded_rows(matrix: Expandable, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Expand some rows of a matrix to `dtype`, [rows, columns]."""
    if isinstance(matrix, PackedFp4Matrix):
        return dequantize_packed_fp4(matrix, part, dtype)
    if isinstance(matrix, Fp4Matrix):
        return dequantize_fp4(matrix, part, dtype)
    if isinstance(matrix, TableMatrix):
        return dequantize_table(matrix, part, dtype)
    return dequantized_rows(matrix, part, dtype)


def _expanded_linear(
    x: torch.Tensor, matrix: Expandable, bias: torch.Tensor | None, _config: None, _dtype: torch.dtype
) -> torch.Tensor:
    num_rows, most = len(matrix.words), max(1, EXPANDED_BYTES // (matrix.num_columns * x.element_size()))
    if num_rows <= most:
        return functional.linear(x, expanded_rows(matrix, slice(None), x.dtype), bias)
    out = x.new_empty(len(x), num_rows)
    for start in range(0, num_rows, most):
        part = slice(start, start + most)
        torch.mm(x, expanded_rows(matrix, part, x.dtype).t(), out=out[:, part])
    return out if bias is None else out.add_(bias)


CUBLAS = GemmKernel(_no_config, _linear)
CUBLAS_ADD = GemmKernel(_no_config, _add)
CUBLAS_FP8 = GemmKernel(_no_config, _fp8_linear)
CUBLAS_FP8_SQUARES = GemmKernel(_no_config, _fp8_squares_linear)
EXPAND_CUBLAS = GemmKernel(_no_config, _expanded_linear)
