"""MXFP4 experts on a real GPU, as gpt-oss has them: every cut of the grouped kernel, kernels of a few tokens and the
expansion, against the reference with the same numbers in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenmill.ops.interface import ExpertsWeight, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import random_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
EXPERTS, ACTIVE = 6, 3


def both(hidden: int, inter: int) -> tuple[ExpertsWeight, ExpertsWeight]:
    """As the GPU keeps them, and exactly"""
    from tokenmill.ops.triton.build import build_ops

    torch.manual_seed(1)
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = {"gate": (EXPERTS, inter, hidden), "up": (EXPERTS, inter, hidden), "down": (EXPERTS, hidden, inter)}
    gate, up, down = (
        RawTensor(f"layers.0.experts.{part}.weight", shape, random_blocks(shape, "MXFP4", generator), "MXFP4")
        for part, shape in shapes.items()
    )
    for raw in (gate, up, down):
        blocks = raw.data.view(-1, 17)
        blocks[:, 0] = torch.randint(117, 123, (len(blocks),), generator=generator, device="cuda")
    biases = [torch.randn(EXPERTS, 2 * inter, device="cuda") * 0.1, torch.randn(EXPERTS, hidden, device="cuda") * 0.1]
    half = [bias.bfloat16() for bias in biases]
    packed = build_ops().pack_experts(gate, up, down, lambda raw: dequantize(raw, torch.bfloat16).cuda())
    exact = REFERENCE_OPS.pack_experts(gate, up, down, lambda raw: dequantize(raw).cuda())
    return (
        replace(packed, gate_up_bias=half[0], down_bias=half[1]),
        replace(exact, gate_up_bias=half[0].float(), down_bias=half[1].float()),
    )


@pytest.mark.parametrize(("hidden", "inter"), [(192, 320), (2880, 2880)])
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 40, 150, 700])
def test_experts_of_any_number_of_tokens(num_tokens: int, hidden: int, inter: int) -> None:
    from tokenmill.ops.triton.build import build_ops

    packed, exact = both(hidden, inter)
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    logits = torch.randn(num_tokens, EXPERTS, device="cuda")
    logits[:, 1] -= 20  # nobody's
    weights, ids = REFERENCE_OPS.route(logits, Routing(ACTIVE))
    found = build_ops().experts(x, weights, ids, packed, "swiglu_oai")
    wanted = REFERENCE_OPS.experts(x.float(), weights, ids, exact, "swiglu_oai")
    assert float((found.float() - wanted).norm() / wanted.norm()) < 6e-3


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("ahead", [2, 4])
def test_every_cut_of_the_grouped_kernel(rows: int, ahead: int) -> None:
    from tokenmill.ops.triton.launch.capabilities import capabilities_of

    if not capabilities_of(torch.device("cuda")).has_gluon:
        pytest.skip("this kernel is Hopper's")
    from tokenmill.ops.triton.moe.hopper_fp4 import HopperFp4Config, hopper_grouped_fp4
    from tokenmill.ops.triton.moe.pairs import sort_pairs
    from tokenmill.ops.triton.quant.fp4 import dequantize_fp4

    packed, exact = both(320, 192)
    down, plain = packed.packed[1], exact.packed[1]
    expanded = dequantize_fp4(down, slice(0, EXPERTS * 320), torch.bfloat16)
    assert torch.equal(expanded.float(), plain.flatten(0, 1))
    ids = torch.randint(0, EXPERTS, (75, 1), device="cuda")
    weights, x = torch.rand(75, 1, device="cuda"), torch.randn(75, 192, device="cuda").bfloat16()
    pairs = sort_pairs(weights, ids, EXPERTS)
    config = HopperFp4Config(rows, ahead)
    found = hopper_grouped_fp4(x[pairs.order], down, pairs, is_gathered=False, config=config)
    wanted = torch.einsum("th,toh->to", x.float(), plain[ids[:, 0]]) * weights
    assert float((found.float() - wanted).norm() / wanted.norm()) < 6e-3
