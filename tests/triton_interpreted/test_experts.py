"""Mixture-of-experts kernels in the interpreter: routing, few tokens at once, and quantised experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.triton_inputs import assert_near, gpu_with
from tokenmill.arch.packed_formats import StoredFormat
from tokenmill.arch.spec import Activation, MlpSpec, MoeSpec, RoutingSpec, TensorSpec
from tokenmill.ops.interface import ExpertsWeight, LinearWeight, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.moe import gemv as moe_gemv
from tokenmill.ops.triton.moe import gemv as moe_gemv_int
from tokenmill.ops.triton.moe import grouped_gemm as moe_grouped_gemm
from tokenmill.ops.triton.quant import fp4, quantized
from tokenmill.runner import memory
from tokenmill.weights.dequantize import dequantize
from tokenmill.weights.dummy import random_blocks

OPS = build_ops()


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [2, 19])
def test_routing_and_grouped_products(tokens: int, renormalize: bool) -> None:
    num_experts, hidden, inter, k = 5, 32, 24, 2
    packed = ExpertsWeight(
        num_experts, (torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter))
    )
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, num_experts)
    routing = Routing(k, RoutingSpec(renormalize=renormalize))
    ours, theirs = OPS.route(logits, routing), PLAIN.route(logits, routing)
    assert_near(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert_near(OPS.experts(x, *ours, packed, "silu"), PLAIN.experts(x, *ours, packed, "silu"))


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "silu_to_10"])
@pytest.mark.parametrize("tokens", [2, 19])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_with_biases(tokens: int, activation: Activation, deterministic: bool) -> None:
    num_experts, hidden, inter, k = 5, 32, 24, 3
    packed = ExpertsWeight(
        num_experts,
        (torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter)),
        gate_up_bias=torch.randn(num_experts, 2 * inter),
        down_bias=torch.randn(num_experts, hidden),
    )
    x, (weights, ids) = torch.randn(tokens, hidden), PLAIN.route(torch.randn(tokens, num_experts), Routing(k))
    found = build_ops(deterministic=deterministic).experts(x, weights, ids, packed, activation)
    assert_near(found, PLAIN.experts(x, weights, ids, packed, activation))


@pytest.mark.parametrize(("quant", "deterministic"), [(None, False), (None, True), ("Q8_0", False)])
def test_experts_without_gates(quant: str | None, deterministic: bool) -> None:
    """Squares of what is above 0, as Nemotron has them; one token is not streamed"""
    num_experts, hidden, inter, k = 3, 128, 128, 2
    shapes = {"up": (num_experts, inter, hidden), "down": (num_experts, hidden, inter)}
    up, down = (
        RawTensor(
            f"layers.0.experts.{part}.weight",
            shape,
            torch.randn(shape) if quant is None else random_blocks(shape, quant, torch.Generator()),
            quant,
        )
        for part, shape in shapes.items()
    )
    ops, dtype = build_ops(deterministic=deterministic), torch.float32 if quant is None else torch.float16
    packed = ops.pack_experts(None, up, down, partial(dequantize, dtype=dtype))
    exact = PLAIN.pack_experts(None, up, down, dequantize)
    assert not packed.is_gated and moe_gemv.kind_of(packed) == ("plain" if quant is None else "int")
    for tokens in (1, 19):
        x, (weights, ids) = torch.randn(tokens, hidden), PLAIN.route(torch.randn(tokens, num_experts), Routing(k))
        found = ops.experts(x, weights, ids, packed, "relu2")
        expected = PLAIN.experts(x, weights, ids, exact, "relu2")
        assert_near(found, expected, tolerance=1e-5 if quant is None else 4e-3)


def test_experts_that_are_looked_up() -> None:
    """Expert weights are those of the router, and a shared expert follows the routed ones."""
    spec = RoutingSpec("sqrt_softplus", epsilon=1e-20, scale=1.5, table_rows=9)
    logits, chosen = torch.randn(7, 12) * 3, torch.randint(0, 12, (7, 3))
    plain, ours = (
        PLAIN.route(logits, Routing(3, spec, chosen=chosen)),
        OPS.route(logits, Routing(3, spec, chosen=chosen)),
    )
    assert_near(ours[0], plain[0])
    assert torch.equal(ours[1], chosen)
    _, ids = OPS.route(logits, Routing(3, spec, num_shared=1, chosen=chosen))
    assert torch.equal(ids[:, :3], chosen) and ids[:, 3].tolist() == [12] * 7


def test_few_tokens_with_another_kind_of_routing() -> None:
    """Sigmoids with a bias for the choice, from the stream on."""
    num_experts, hidden, inter, k = 5, 48, 40, 2
    x, residual, norm = torch.randn(2, hidden), torch.randn(2, hidden), torch.rand(hidden) + 0.5
    router = torch.randn(num_experts, hidden) * 0.3
    packed = ExpertsWeight(
        num_experts, (torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter))
    )
    routing = Routing(k, RoutingSpec("sigmoid", has_choice_bias=True, scale=1.5), torch.randn(num_experts))
    weight = LinearWeight(num_experts, hidden, router)
    done = moe_gemv.add_norm_experts(x, residual, norm, 1e-5, weight, packed, routing, "silu")
    normed, total = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
    chosen = PLAIN.route(normed @ router.T, routing)
    assert_near(done.result, PLAIN.experts(normed, *chosen, packed, "silu"), tolerance=1e-4)
    assert_near(done.normed, normed)
    assert_near(done.total, total)
    alone = moe_gemv.add_norm_experts(total, None, norm, 1e-5, weight, packed, routing, "silu")
    assert_near(alone.result, done.result)
    assert torch.equal(alone.total, total)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(("num_groups", "kept", "group_score"), [(1, 1, "best"), (3, 2, "two_best"), (4, 1, "best")])
def test_every_kind_of_routing(score: Any, num_groups: int, kept: int, group_score: Any) -> None:
    spec = RoutingSpec(
        score, renormalize=score != "softmax", epsilon=1e-20, has_choice_bias=True, num_groups=num_groups,
        kept_groups=kept, group_score=group_score, scale=2.5, has_expert_scales=True,
    )  # fmt: skip
    routing = Routing(3, spec, torch.randn(12), torch.rand(12) + 0.5)
    logits = torch.randn(7, 12) * 3
    (weights, ids), (expected, expected_ids) = OPS.route(logits, routing), PLAIN.route(logits, routing)
    assert torch.equal(ids, expected_ids)
    assert_near(weights, expected)


@pytest.mark.parametrize(
    "spec",
    [
        RoutingSpec("sigmoid", has_choice_bias=True, is_bias_on_logits=True),
        RoutingSpec(renormalize=False, jitter=0.01),
        RoutingSpec(renormalize=False, jitter=0.4),
    ],
)
def test_experts_chosen_by_their_logits(spec: RoutingSpec) -> None:
    routing = Routing(2, spec, torch.randn(12) if spec.has_choice_bias else None)
    logits = torch.randn(9, 12) * 3
    (weights, ids), (expected, expected_ids) = OPS.route(logits, routing), PLAIN.route(logits, routing)
    assert torch.equal(ids, expected_ids)
    assert_near(weights, expected)


@pytest.mark.parametrize(("num_tokens", "num_experts", "renormalize"), [(1, 9, True), (3, 4, False)])
def test_norm_router_and_experts_in_one_op(num_tokens: int, num_experts: int, renormalize: bool) -> None:
    """Two experts have equal logits: the first one counts."""
    hidden, inter, k = 48, 40, 3
    x, residual, norm = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden), torch.rand(hidden) + 0.5
    router = torch.randn(num_experts, hidden) * 0.3
    router[3] = router[1]
    packed = ExpertsWeight(
        num_experts, (torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter))
    )
    spec = MoeSpec(num_experts, k, MlpSpec(inter, "silu"), RoutingSpec(renormalize=renormalize))
    assert moe_gemv.kind_of(packed) == "plain"
    weight = LinearWeight(num_experts, hidden, router)
    done = moe_gemv.add_norm_experts(x, residual, norm, 1e-5, weight, packed, Routing(k, spec.routing), "silu")
    normed, total = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
    logits = normed @ router.T
    logits[:, 3] = logits[:, 1]  # a matrix library may add these two in different orders
    weights, ids = PLAIN.route(logits, Routing(k, RoutingSpec(renormalize=renormalize)))
    assert_near(done.result, PLAIN.experts(normed, weights, ids, packed, "silu"), tolerance=1e-4)
    assert_near(done.total, total)


@pytest.mark.parametrize(("num_tokens", "score"), [(1, "softmax"), (2, "sigmoid"), (9, "softmax")])
def test_a_shared_expert_is_some_more_experts(num_tokens: int, score: Any) -> None:
    """Twice as wide as the others: two that every token has. Not where it is stored otherwise than they are."""
    num_experts, hidden, inter, k = 5, 48, 40, 2
    shapes = {"gate": (num_experts, inter, hidden), "up": (num_experts, inter, hidden)}
    shapes |= {"down": (num_experts, hidden, inter)}
    gate, up, down = (RawTensor(name, shape, torch.randn(shape)) for name, shape in shapes.items())
    wide = {"gate": (2 * inter, hidden), "up": (2 * inter, hidden), "down": (hidden, 2 * inter)}
    first, second, third = (RawTensor(name, shape, torch.randn(shape)) for name, shape in wide.items())
    packed = OPS.pack_experts(gate, up, down, dequantize, (first, second, third))
    assert (packed.num_experts, packed.num_shared) == (7, 2)
    quantized_one = replace(third, quant="Q8_0")
    assert OPS.pack_experts(gate, up, down, dequantize, (first, second, quantized_one)).num_shared == 0

    x, residual, norm = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden), torch.rand(hidden) + 0.5
    router, spec = torch.randn(num_experts, hidden) * 0.3, RoutingSpec(score, renormalize=False)
    normed, _ = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
    logits = normed @ router.T
    chosen = PLAIN.route(logits, Routing(k, spec))
    expected = PLAIN.experts(normed, *chosen, PLAIN.pack_experts(gate, up, down, dequantize), "silu")
    expected += PLAIN.act_mul(normed @ torch.cat((first.data, second.data)).T, "silu") @ third.data.T
    routing = Routing(k, spec, num_shared=2)
    found = OPS.route(logits, routing)
    assert torch.equal(found[1][:, :k], chosen[1]) and found[1][:, k:].tolist() == [[5, 6]] * num_tokens
    assert_near(OPS.experts(normed, *found, packed, "silu"), expected, tolerance=1e-4)
    if num_tokens <= 2:
        weight = LinearWeight(num_experts, hidden, router)
        done = moe_gemv.add_norm_experts(x, residual, norm, 1e-5, weight, packed, routing, "silu")
        assert_near(done.result, expected, tolerance=1e-4)


def check_quantised_experts(
    quants: tuple[str | None, ...],
    hidden: int,
    inter: int,
    *,
    k: int = 2,
    quantization: str = "none",
    is_fused: bool = True,
) -> None:
    """Run experts as a file has them quantised, or rounded while they load: one token, and several sorted by expert."""
    ops, num_experts = build_ops(quantization), 3
    shapes = {"gate": (num_experts, inter, hidden), "up": (num_experts, inter, hidden)}
    raws = []
    for (part, shape), quant in zip({**shapes, "down": (num_experts, hidden, inter)}.items(), quants, strict=True):
        drawn = random_blocks(shape, quant, torch.Generator().manual_seed(3)) if quant else torch.randn(shape) * 0.05
        raws.append(RawTensor(f"layers.0.experts.{part}.weight", shape, drawn, quant))
    packed = ops.pack_experts(raws[0], raws[1], raws[2], partial(dequantize, dtype=torch.float16))
    exact = PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize)
    if quantization != "none":
        rounded_ones = tuple(
            quantized.expanded(one).float().view(num_experts, -1, one.num_columns) for one in packed.packed
        )
        for ours, theirs in zip(rounded_ones, exact.packed, strict=True):
            assert_near(ours, theirs, tolerance=0.15)
        exact = ExpertsWeight(num_experts, rounded_ones)
    formats = {raw.name: StoredFormat(raw.quant) for raw in raws if raw.quant is not None}
    kept = [part for one in packed.packed for part in (one if isinstance(one, tuple) else (one,))]
    taken = sum(one.words.nbytes + one.scales.nbytes for one in kept)
    planned = [TensorSpec(raw.name, raw.shape, "linear") for raw in raws]
    assert taken == sum(memory.kept_bytes(one, 2, quantization, formats.get(one.name)) for one in planned)
    router, norm = torch.randn(num_experts, hidden) * 0.3, torch.rand(hidden) + 0.5
    for tokens in (1, 6):
        x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        normed, _ = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
        chosen = PLAIN.route(normed @ router.T, Routing(k))
        expected = PLAIN.experts(normed, *chosen, exact, "silu")
        assert_near(ops.experts(normed, *chosen, packed, "silu"), expected, tolerance=2e-3)
        if quantization != "none":
            continue  # the same kernels, and the interpreter is slow
        assert (moe_gemv.kind_of(packed) != "mixed") == is_fused
        if is_fused and tokens == 1:
            weight = LinearWeight(num_experts, hidden, router)
            done = moe_gemv.add_norm_experts(x, residual, norm, 1e-5, weight, packed, Routing(k), "silu")
            assert_near(done.result, expected, tolerance=2e-3)


@pytest.mark.parametrize(
    ("quants", "hidden", "inter", "k"),
    [
        (("Q4_K", "Q4_K", "Q8_0"), 256, 64, 1),
        pytest.param(("Q5_0", "Q5_0", "Q5_1"), 64, 64, 2, marks=pytest.mark.slow),
        pytest.param(("Q8_0", "Q8_0", "Q4_1"), 64, 128, 1, marks=pytest.mark.slow),
        (("MXFP4", "MXFP4", "MXFP4"), 192, 128, 2),
    ],
)
def test_quantised_experts_of_a_file(quants: tuple[str, ...], hidden: int, inter: int, k: int) -> None:
    gpu = gpu_with(moe_gemv_programs=8)
    with patch.multiple(moe_gemv_int, capabilities_of=lambda device: gpu, ROWS=32):
        check_quantised_experts(quants, hidden, inter, k=k)


def test_experts_of_mixed_formats_are_not_fused() -> None:
    check_quantised_experts(("Q4_K", "Q6_K", "Q5_0"), 256, 64, is_fused=False)
    check_quantised_experts(("MXFP4", "Q8_0", "MXFP4"), 64, 64, is_fused=False)


def mxfp4(shape: tuple[int, ...], part: str, seed: int) -> RawTensor:
    """Any numbers, with scales from 2 ** -124 to 2 ** 1 (the interpreter knows no subnormal bfloat16)"""
    generator = torch.Generator().manual_seed(seed)
    blocks = random_blocks(shape, "MXFP4", generator).view(-1, fp4.BLOCK_BYTES)
    blocks[:, 0] = torch.randint(3, fp4.MAX_EXPONENT + 1, (len(blocks),), generator=generator)
    return RawTensor(f"layers.0.experts.{part}.weight", shape, blocks.view(*shape[:-1], -1), "MXFP4")


@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_expanded_bit_for_bit(columns: int, dtype: torch.dtype) -> None:
    raw = mxfp4((2, 40, columns), "up", 5)
    matrix = fp4.fp4_from_blocks(raw.data.flatten(0, 1))
    expected = dequantize(raw).flatten(0, 1)
    assert torch.equal(fp4.dequantize_fp4(matrix, slice(8, 72), dtype).float(), expected[8:72])


def test_mxfp4_experts_with_biases_as_gpt_oss_has_them() -> None:
    """One token, and many that fill several tiles of an expert; with other scales they are not kept so."""
    num_experts, hidden, inter, k = 3, 64, 128, 2
    shapes = {"gate": (num_experts, inter, hidden), "up": (num_experts, inter, hidden)}
    raws = [
        RawTensor(f"layers.0.experts.{part}.weight", shape, random_blocks(shape, "MXFP4", torch.Generator()), "MXFP4")
        for part, shape in {**shapes, "down": (num_experts, hidden, inter)}.items()
    ]
    biases = {"gate_up_bias": torch.randn(num_experts, 2 * inter), "down_bias": torch.randn(num_experts, hidden)}
    dense = partial(dequantize, dtype=torch.bfloat16)
    packed = replace(OPS.pack_experts(raws[0], raws[1], raws[2], dense), **biases)
    exact = replace(PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize), **biases)
    assert moe_gemv.kind_of(packed) == "fp4"
    for tokens in (1, 40):
        x, chosen = torch.randn(tokens, hidden), PLAIN.route(torch.randn(tokens, num_experts), Routing(k))
        expected = PLAIN.experts(x, *chosen, exact, "swiglu_oai")
        assert_near(OPS.experts(x, *chosen, packed, "swiglu_oai"), expected, tolerance=1e-4)
    raws[0].data.view(-1, fp4.BLOCK_BYTES)[0, 0] = fp4.MAX_EXPONENT + 1
    assert moe_gemv.kind_of(OPS.pack_experts(raws[0], raws[1], raws[2], dense)) == "mixed"


def test_experts_rounded_while_loading_and_expanded_two_at_a_time() -> None:
    gpu = gpu_with(moe_expand_min_pairs=0)
    with (
        patch.object(moe_grouped_gemm, "capabilities_of", lambda device: gpu),
        patch("tokenmill.ops.triton.moe.select.EXPANDED_BYTES", 2 * 256 * 128 * 4),
    ):
        check_quantised_experts((None, None, None), 128, 128, quantization="int4")
