"""Products of dozens of rows on a real Hopper GPU, in every cut, with plain and with fp8 matrices: as plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from tokenmill.models.linear import Projection
from tokenmill.ops.batch import Mode
from tokenmill.ops.compose import BatchClasses, PlainStream
from tokenmill.ops.interface import GatedMlpWeights, LayerWeights, LinearWeight, Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
SHAPES = ((4096, 4096), (4096, 14336), (1000, 1040), (6144, 512), (40, 32))  # lines, columns


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, "silu"),
        (torch.bfloat16, "gelu"),
        (torch.float16, "gelu_tanh"),
        (torch.float8_e4m3fn, None),
        (torch.float8_e4m3fn, "silu"),
    ],
)
def test_wide_products_in_every_cut(dtype: torch.dtype, activation: str | None) -> None:
    from tokenmill.ops.triton.launch.capabilities import capabilities_of

    gpu = capabilities_of(torch.device("cuda"))
    if not gpu.has_gluon:
        pytest.skip("wide products are Hopper's")
    from tokenmill.ops.triton.gemm.hopper import HopperConfig, hopper_gemm, pick_hopper_config
    from tokenmill.ops.triton.gemm.product import FP8, PLAIN, Product
    from tokenmill.ops.triton.quant.gemm_fp8_split import quantize_rows
    from tokenmill.ops.triton.quant.quantized import to_fp8

    torch.manual_seed(0)
    is_fp8 = dtype == torch.float8_e4m3fn
    acts = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    for lines, columns in SHAPES:
        matrix = (torch.randn(lines, columns, device="cuda") / columns**0.5).half()
        bias = torch.randn(lines, device="cuda").half()
        for num_rows in (33, 64, 100, 128):
            x, scales = torch.randn(num_rows, columns, device="cuda").half(), (None, None)
            left, right = x.to(dtype), matrix.to(dtype)
            wanted = left.float() @ right.float().t()
            if is_fp8:
                rows, rounded = quantize_rows(x), to_fp8(matrix)
                left, right, scales = rows.planes.squeeze(1), rounded.values, (rows.scales, rounded.scales)
                wanted = (left.float() * rows.scales) @ (right.float() * rounded.scales[:, None]).t()
            wanted += bias.float()
            if activation:
                gate, up = wanted.chunk(2, dim=1)
                wanted = acts[activation](gate) * up
            out = torch.float16 if is_fp8 else dtype
            form, epilogue = FP8[out] if is_fp8 else PLAIN[dtype], "gated" if activation else "none"
            usual = pick_hopper_config(Product(num_rows, lines, columns, form, gpu, "captured", epilogue))
            other = HopperConfig(64, 128, 3, 3) if num_rows <= 64 else HopperConfig(128, 128, 2, 4)
            merged = replace(other, splits=5, is_merged=True), HopperConfig(128, 256, 2, 4, 8, is_merged=True)
            for cut in (usual, other, *(() if is_fp8 else merged)):
                for _ in range(2):  # counters are set back
                    found = hopper_gemm(left, scales[0], right, scales[1], bias.to(out), out, cut, activation)
                assert off_by(found, wanted) < (0.006 if is_fp8 else 0.003), (lines, columns, num_rows, cut)


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_who_multiplies_dozens_of_rows(quantization: str, mode: Mode) -> None:
    """The ops' products, gated and not, are the same with 32 rows, 33, 128 and 129, in graphs and outside of them:
    whoever computes them."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.gemm.linear import gated_linear
    from tokenmill.ops.triton.quant.quantized import to_fp8

    torch.manual_seed(0)
    ops = build_ops(quantization)
    classes = BatchClasses(ops.row_borders(torch.device("cuda")))
    x = torch.randn(129, 1024, device="cuda").bfloat16()
    matrix = (torch.randn(2048, 1024, device="cuda") / 32).bfloat16()
    weight = LinearWeight(2048, 1024, to_fp8(matrix) if quantization == "fp8" else matrix)
    wanted = x.float() @ matrix.float().t()
    gate, up = wanted.chunk(2, dim=1)
    gated = functional.silu(gate) * up
    for num_rows in (32, 33, 64, 65, 128, 129):
        near = 0.06 if quantization == "fp8" else 0.006
        assert off_by(ops.linear(x[:num_rows], weight, mode), wanted[:num_rows]) < near
        if quantization == "none":
            assert off_by(gated_linear(x[:num_rows], weight, "silu", mode), gated[:num_rows]) < near
        else:
            norms = x[:num_rows].float().square().mean(1, keepdim=True).rsqrt()
            gate, up = (wanted[:num_rows] * norms).chunk(2, dim=1)
            back = Projection(ops, LinearWeight(1024, 1024, to_fp8(torch.eye(1024, device="cuda").bfloat16())))
            norm = Norm(torch.ones(1024, device="cuda"), 1e-6)
            feed = GatedMlpWeights(norm, Projection(ops, weight), back, "silu")
            layer = LayerWeights(norm, back, back, None, feed)
            (regions,) = ops.choose_regions(ops, [layer], classes.of(num_rows, mode))
            found = regions.gated_mlp(PlainStream(x[:num_rows]), feed).delta
            assert off_by(found, functional.silu(gate) * up) < near
