"""NVFP4, MXFP4 and fp8 blocks multiplied as a checkpoint has them, on a real GPU"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.large_model import relative_error
from tests.support.small_floats import raw_matrix
from tokenmill.ops.compose import MODES
from tokenmill.ops.interface import ExpertsWeight, LinearWeight, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.dequantize import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
EXPERTS, ACTIVE = 6, 3


def dense(raw: RawTensor) -> torch.Tensor:
    return dequantize(raw, torch.bfloat16).cuda()


def exactly(raw: RawTensor) -> torch.Tensor:
    return dequantize(raw).cuda()


@pytest.mark.parametrize("quant", ["F8", "NV4", "NV4D", "MXFP4"])
@pytest.mark.parametrize("num_in", [2048, 1408])
def test_products_of_any_number_of_rows(quant: str, num_in: int) -> None:
    """Two matrices stacked, whose rows are no whole tiles; fp8 rounds many rows to fp8 too."""
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.quant.packed_fp4 import PackedFp4Matrix
    from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix

    torch.manual_seed(0)
    ops = build_ops()
    raws = [raw_matrix(quant, (num_out, num_in), seed=num_out) for num_out in (1536, 576)]
    bias = torch.randn(2112, device="cuda").bfloat16()
    packed = ops.pack_linear(raws, bias, dense)
    assert isinstance(packed.packed, Fp8BlockMatrix if quant == "F8" else PackedFp4Matrix)
    exact = torch.cat([exactly(raw) for raw in raws])
    for num_rows in (1, 2, 8, 17, 32, 33, 64, 100, 128, 300, 700, 2000):
        for mode in MODES:
            x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
            error = relative_error(ops.linear(x, packed, mode), x.float() @ exact.T + bias.float())
            assert error < (0.04 if quant == "F8" and num_rows > 32 else 0.004), (num_rows, mode, error)


def test_rows_of_a_large_matrix_are_all_written() -> None:
    """More tiles than a GPU runs at once, in columns that are split; into memory that holds other things"""
    from tokenmill.ops.triton.build import build_ops

    torch.manual_seed(0)
    ops, raw = build_ops(), raw_matrix("F8", (28672, 4096), seed=1)
    packed, exact = ops.pack_linear([raw], None, dense), exactly(raw)
    for num_rows in (1, 16, 500):
        x = torch.randn(num_rows, 4096, device="cuda").bfloat16()
        expected = x.float() @ exact.T
        for _ in range(3):
            torch.full((num_rows, 28672), float("nan"), device="cuda", dtype=torch.bfloat16)  # and is given back
            assert relative_error(ops.linear(x, packed), expected) < 0.04


def both(quant: str, hidden: int, inter: int) -> tuple[ExpertsWeight, ExpertsWeight]:
    """As the GPU keeps them, and exactly"""
    from tokenmill.ops.triton.build import build_ops

    shapes = {"gate": (EXPERTS, inter, hidden), "up": (EXPERTS, inter, hidden), "down": (EXPERTS, hidden, inter)}
    gate, up, down = (
        raw_matrix(quant, shape, seed=number, name=f"layers.0.experts.{part}.weight")
        for number, (part, shape) in enumerate(shapes.items())
    )
    biases = [torch.randn(EXPERTS, size, device="cuda").bfloat16() * 0.1 for size in (2 * inter, hidden)]
    packed = build_ops().pack_experts(gate, up, down, dense)
    exact = REFERENCE_OPS.pack_experts(gate, up, down, exactly)
    return (
        replace(packed, gate_up_bias=biases[0], down_bias=biases[1]),
        replace(exact, gate_up_bias=biases[0].float(), down_bias=biases[1].float()),
    )


@pytest.mark.parametrize("quant", ["F8", "NV4"])
@pytest.mark.parametrize(("hidden", "inter"), [(256, 384), (2048, 768)])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_experts_of_any_number_of_tokens(quant: str, hidden: int, inter: int, activation: str) -> None:
    from tokenmill.ops.triton.build import build_ops
    from tokenmill.ops.triton.moe.gemv import kind_of

    torch.manual_seed(1)
    packed, exact = both(quant, hidden, inter)
    assert kind_of(packed) == ("fp4" if quant == "NV4" else "fp8_blocks")
    for num_tokens in (1, 3, 7, 31, 40, 150, 700):
        x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
        logits = torch.randn(num_tokens, EXPERTS, device="cuda")
        logits[:, 1] -= 20  # nobody's
        weights, ids = REFERENCE_OPS.route(logits, Routing(ACTIVE))
        found = build_ops().experts(x, weights, ids, packed, activation)  # type: ignore[arg-type]
        wanted = REFERENCE_OPS.experts(x.float(), weights, ids, exact, activation)  # type: ignore[arg-type]
        error = relative_error(found, wanted)
        assert error < (0.06 if quant == "F8" and num_tokens > 32 else 0.01), (num_tokens, error)


@pytest.mark.parametrize("quant", ["F8", "NV4"])
def test_a_few_tokens_from_their_stream_on(quant: str) -> None:
    """Norm, router and experts in one region, as decoding steps have them"""
    from tokenmill.ops.triton.moe.gemv import add_norm_experts

    torch.manual_seed(2)
    hidden = 2048
    packed, exact = (replace(one, gate_up_bias=None, down_bias=None) for one in both(quant, hidden, 768))
    router = LinearWeight(EXPERTS, hidden, (torch.randn(EXPERTS, hidden, device="cuda") * 0.05).bfloat16())
    norm = torch.rand(hidden, device="cuda") + 0.5
    for tokens in (1, 4):
        x, residual = torch.randn(2, tokens, hidden, device="cuda").bfloat16()
        done = add_norm_experts(x, residual, norm, 1e-6, router, packed, Routing(ACTIVE), "silu")
        normed, _ = REFERENCE_OPS.add_rms_norm(x, residual, norm, 1e-6)
        chosen = REFERENCE_OPS.route(normed.float() @ router.packed.float().T, Routing(ACTIVE))
        assert relative_error(done.result, REFERENCE_OPS.experts(normed.float(), *chosen, exact, "silu")) < 0.01


def test_nvfp4_on_hopper_s_own_kernel_in_every_cut() -> None:
    from tokenmill.ops.triton.launch.capabilities import capabilities_of

    if not capabilities_of(torch.device("cuda")).has_gluon:
        pytest.skip("this kernel is Hopper's")
    from tokenmill.ops.triton.moe.hopper_fp4 import HopperFp4Config, hopper_grouped_fp4
    from tokenmill.ops.triton.moe.pairs import sort_pairs

    packed, exact = both("NV4", 320, 192)
    down, plain = packed.packed[1], exact.packed[1]
    ids = torch.randint(0, EXPERTS, (75, 1), device="cuda")
    weights, x = torch.rand(75, 1, device="cuda"), torch.randn(75, 192, device="cuda").bfloat16()
    pairs = sort_pairs(weights, ids, EXPERTS)
    wanted = torch.einsum("th,toh->to", x.float(), plain[ids[:, 0]]) * weights
    for rows in (16, 32, 64, 128):
        for ahead in (2, 4):
            config = HopperFp4Config(rows, ahead)
            found = hopper_grouped_fp4(x[pairs.order], down, pairs, is_gathered=False, config=config)
            assert relative_error(found, wanted) < 6e-3, config
