"""Layers as what happens to the residual stream, on a real GPU and on the shapes of an 8B model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenmill.ops.interface import LinearWeight
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
def test_a_layer_s_products_are_what_the_ops_they_are_made_of_are(kind: str) -> None:
    from tokenmill.ops.triton.quant import quantized
    from tokenmill.ops.triton.quant.fused_norm_quant import STREAMS

    pack: Any = {"fp8": quantized.to_fp8, "int4": quantized.to_int4}[kind]
    ops = STREAMS[kind]
    x, delta = normal(200, HIDDEN) * 3, normal(200, HIDDEN)
    norm = torch.rand(HIDDEN, device="cuda") + 0.5
    gate_up, down = pack(normal(2 * INTER, HIDDEN) * 0.02), pack(normal(HIDDEN, INTER) * 0.02)
    weights = [LinearWeight(2 * INTER, HIDDEN, gate_up, normal(2 * INTER)), LinearWeight(HIDDEN, INTER, down)]
    total = (x.float() + delta.float()).bfloat16().float()
    inner = PLAIN.rms_norm(total, norm, EPS) @ quantized.expanded(gate_up).float().T + weights[0].bias
    gated = PLAIN.act_mul(inner, "silu")
    expected = gated @ quantized.expanded(down).float().T
    for count in (1, 2, 8, 17, 32, 200):
        assert ops.takes(count) or (kind == "int4" and count > 1)
        if not ops.takes(count):
            continue
        tolerance = 0.05 if count > 32 else 0.006  # where the rows are rounded to fp8 too
        rows = slice(200 - count, 200)
        stream = ops.join(delta[rows], ops.join(x[rows], None, norm, EPS), norm, EPS)
        assert torch.equal(stream.total.float(), total[rows])
        near(ops.normed_linear(stream, weights[0]), inner[rows], tolerance)
        near(ops.any_linear(ops.gated_linear(stream, weights[0], "silu"), weights[1]), expected[rows], 2 * tolerance)
        near(ops.any_linear(gated[rows].bfloat16(), weights[1]), expected[rows], tolerance)
