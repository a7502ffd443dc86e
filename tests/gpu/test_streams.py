"""Regions of quantised layers, on a real GPU and on the shapes of an 8B model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenmill.models.linear import Projection
from tokenmill.ops.compose import BatchClasses, PlainStream
from tokenmill.ops.interface import GatedMlpWeights, LayerWeights, LinearWeight, Norm
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
HIDDEN, INTER, EPS = 4096, 14336, 1e-5


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == exact.shape
    error = float((ours.float() - exact).norm() / exact.norm())
    assert error < tolerance, error


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_fused_regions_equal_the_ops_they_are_made_of(kind: str) -> None:
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.quant import quantized
    from tokenmill.ops.triton.quant.fused_norm_quant import QuantizedRegions

    ops = build_ops(kind)
    classes = BatchClasses(ops.row_borders(torch.device("cuda")))
    pack: Any = {"fp8": quantized.to_fp8, "int4": quantized.to_int4}[kind]
    x, delta = normal(200, HIDDEN) * 3, normal(200, HIDDEN)
    norm = Norm(torch.rand(HIDDEN, device="cuda") + 0.5, EPS)
    gate_up, down = pack(normal(2 * INTER, HIDDEN) * 0.02), pack(normal(HIDDEN, INTER) * 0.02)
    bias = normal(2 * INTER)
    first = Projection(ops, LinearWeight(2 * INTER, HIDDEN, gate_up, bias))
    second = Projection(ops, LinearWeight(HIDDEN, INTER, down))
    layer = LayerWeights(norm, first, second, None, GatedMlpWeights(norm, first, second, "silu"))
    total = (x.float() + delta.float()).bfloat16().float()
    inner = PLAIN.rms_norm(total, norm.weight, norm.eps) @ quantized.expanded(gate_up).float().T + bias
    gated = PLAIN.act_mul(inner, "silu")
    expected = gated @ quantized.expanded(down).float().T
    for count in (1, 2, 8, 17, 32, 200):
        (regions,) = ops.choose_regions(ops, [layer], classes.of(count, "eager"))
        is_fused = isinstance(getattr(regions.gated_mlp, "__self__", None), QuantizedRegions)
        assert is_fused == (kind == "fp8" or count == 1)
        if not is_fused:
            continue
        tolerance = 0.05 if count > 32 else 0.006  # where the rows are rounded to fp8 too
        rows = slice(200 - count, 200)
        projected, stream = regions.norm_project(PlainStream(x[rows], delta[rows]), norm, first)
        assert torch.equal(stream.residual.float(), total[rows]) and stream.delta is None
        near(projected, inner[rows], tolerance)
        near(regions.gated_mlp(PlainStream(x[rows], delta[rows]), layer.feed).delta, expected[rows], 2 * tolerance)
        added = regions.project_add(gated[rows].bfloat16(), second, stream, None)
        near(added.delta, expected[rows], tolerance)
