"""Products with quantised matrices, and the steps of layers around them, in Triton's interpreter: the same as the plain
ops, one after another, with the matrices expanded.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from interpreted_kernels import random_raw, same

from tokenmill.arch.packed_formats import Stored, packed_int_format
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.gemm.splitk import SplitKConfig
from tokenmill.ops.triton.quant import fused_norm_quant, gemm_fp8_split, gemv_int4, quantized

EPS = 1e-5


def kept(quant: str, num_out: int, num_in: int, same_scales: int = 1) -> quantized.PackedIntMatrix:
    raw = random_raw(quant, num_in, same_scales, num_out)
    form = packed_int_format(raw.name, raw.shape, Stored(quant, same_scales))
    assert form is not None
    return quantized.packed_from_blocks(raw.data, quant, form)


def check_halves() -> None:
    """Of a plain row; those of norms and gates: see below."""
    plain = [(quantized.to_int4(torch.randn(48, 512)), 1), (quantized.to_int4(torch.randn(40, 1024)), 3)]
    files = [
        (kept("Q4_0", 40, 512), 1),
        (kept("Q4_0", 40, 512, same_scales=8), 1),
        (kept("Q4_K", 40, 1024), 3),
        (kept("Q4_1", 48, 512, same_scales=4), 1),
    ]
    for packed, splits in plain + files:
        num_out, num_in = len(packed.words), packed.num_columns
        assert quantized.has_gemv_int4(packed)
        bias, x = torch.randn(num_out), torch.randn(1, num_in)
        found = gemv_int4.gemv_int4(
            x, packed.words, packed.scales if packed.row_scales is None else packed.row_scales, packed.group, bias,
            torch.float32, gemv_int4.GemvInt4Config(16, splits),
        )  # fmt: skip
        same(found, x @ quantized.expanded(packed).float().T + bias, tolerance=1e-3)


def check_planes() -> None:
    for num_out, num_in, rows, splits in ((48, 512, 3, 1), (72, 384, 9, 2)):
        packed, bias = quantized.to_fp8(torch.randn(num_out, num_in)), torch.randn(num_out)
        x = torch.randn(rows, num_in) * torch.logspace(-6, 0, num_in)  # of every size, subnormal ones too
        rounded = gemm_fp8_split.quantize_rows(x)
        first, second = rounded.planes.float().unbind(1)
        assert float((first * rounded.scales - x).norm() / x.norm()) > 0.02
        # A GPU would be closer still: the interpreter forgets to carry into fp8's exponent.
        same((first + second / 16) * rounded.scales, x, tolerance=0.01)
        cut = SplitKConfig(64, 256, splits, 2)
        found = gemm_fp8_split.gemm_fp8_split(rounded, packed.values, packed.scales, bias, torch.float32, cut)
        same(found, x @ quantized.expanded(packed).T + bias, tolerance=0.01)


def check_layer(kind: str, num_rows: int, tolerance: float) -> None:
    hidden, inter = 256, 1280
    ops = fused_norm_quant.STREAMS.get(kind, fused_norm_quant.IN_HALVES)
    assert ops.takes(num_rows)
    x, delta, norm = torch.randn(num_rows, hidden), torch.randn(num_rows, hidden), torch.rand(hidden) + 0.5
    if kind in ("fp8", "int4"):
        pack = {"fp8": quantized.to_fp8, "int4": quantized.to_int4}[kind]
        gate_up, down = pack(torch.randn(2 * inter, hidden)), pack(torch.randn(hidden, inter))
    else:
        gate_up, down = kept(kind, 2 * inter, hidden), kept(kind, hidden, inter)
    weights = [LinearWeight(2 * inter, hidden, gate_up), LinearWeight(hidden, inter, down)]
    assert all(map(ops.can_multiply, weights))
    stream = ops.join(delta, ops.join(x, None, norm, EPS), norm, EPS)
    same(stream.total, x + delta)
    expected = PLAIN.act_mul(PLAIN.rms_norm(x + delta, norm, EPS) @ quantized.expanded(gate_up).float().T, "silu")
    gated = ops.gated_linear(stream, weights[0], "silu")
    matrix = quantized.expanded(down).float()
    same(ops.any_linear(gated, weights[1]), expected @ matrix.T, tolerance)
    same(ops.any_linear(expected, weights[1]), expected @ matrix.T, tolerance)


def main() -> None:
    torch.manual_seed(0)
    check_halves()
    check_planes()
    check_layer("int4", 1, tolerance=1e-3)
    check_layer("Q4_K", 1, tolerance=1e-3)
    check_layer("fp8", 2, tolerance=0.01)
    print("all kernels agree with the reference")


if __name__ == "__main__":
    main()
