"""Products of many rows with a fused epilogue. Many rows run a GPU at its power limit, where less memory traffic makes
the arithmetic faster: cuBLAS adds the residual stream itself, and gated activations are fused by our own kernel, which
multiplies as efficiently as cuBLAS.

    matrix [gate | up], 2 * inter rows, viewed as [2, inter, H]: a tile has the same rows of both halves, so that the
    thread that holds a gate also holds its up

One persistent program per multiprocessor processes TALL tiles of inputs for the same matrix rows before the next ones,
so that inputs and matrix stay in the L2 cache.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.arch.spec import Activation
from tokenmill.ops.triton.elementwise.activation import activate
from tokenmill.ops.triton.gemm.product import GemmKernel
from tokenmill.ops.triton.launch.kernel import cdiv, kernel_unspecialized

ROWS, TILE_N, STRIDE = 128, 128, 64  # tile: inputs, matrix rows of gate (and as many of up); columns per iteration
TALL = 8


@kernel_unspecialized("num_rows")
def _gated(
    x, matrix, out, num_rows, inter, num_in,
    KIND: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr, STRIDE: tl.constexpr, TALL: tl.constexpr,
) -> None:  # fmt: skip
    num_high, num_wide = tl.cdiv(num_rows, ROWS), tl.cdiv(inter, TILE_N)
    for tile in tl.range(tl.program_id(0), num_high * num_wide, tl.num_programs(0), flatten=True):
        first = tile // (TALL * num_wide) * TALL
        tall = tl.minimum(num_high - first, TALL)
        within = tile % (TALL * num_wide)
        row, matrix_row = (first + within % tall) * ROWS, within // tall * TILE_N
        sums = tl.zeros((ROWS, 2 * TILE_N), tl.float32)
        for column in range(0, num_in, STRIDE):
            factors = matrix.load([0, matrix_row, column]).reshape(2 * TILE_N, STRIDE)
            sums = tl.dot(x.load([row, column]), factors.T, sums)
        gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, TILE_N)), (0, 2, 1)))
        out.store([row, matrix_row], (activate(gate, KIND) * up).to(out.dtype))


def gated_product(x: torch.Tensor, matrix: torch.Tensor, activation: Activation) -> torch.Tensor:
    """x [T, H], matrix [2 * inter, H] → act(gate) * up [T, inter]; rows of either are multiples of 16 bytes"""
    (num_rows, num_in), inter = x.shape, len(matrix) // 2
    out = x.new_empty(num_rows, inter)
    tiles = cdiv(num_rows, ROWS) * cdiv(inter, TILE_N)
    _gated[(min(tiles, _num_multiprocessors(x.device)),)](
        TensorDescriptor.from_tensor(x, [ROWS, STRIDE]),
        TensorDescriptor.from_tensor(matrix.view(2, inter, num_in), [2, TILE_N, STRIDE]),
        TensorDescriptor.from_tensor(out, [ROWS, TILE_N]),
        num_rows, inter, num_in, activation, ROWS, TILE_N, STRIDE, TALL, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _launch_gated(
    x: torch.Tensor,
    matrix: torch.Tensor,
    _bias: torch.Tensor | None,
    _config: None,
    _dtype: torch.dtype,
    activation: Activation,
) -> torch.Tensor:
    return gated_product(x.contiguous(), matrix, activation)


GATED_GEMM = GemmKernel(lambda _product: None, _launch_gated)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
