"""Matrices and experts of NVFP4, MXFP4 and fp8 blocks multiplied as a checkpoint has them, in the interpreter"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.small_floats import raw_matrix
from tests.support.triton_inputs import assert_near, gpu_with
from tokenmill.arch.packed_formats import StoredFormat, packed_int_format
from tokenmill.ops.compose import PlainStream
from tokenmill.ops.interface import LinearWeight, Norm, Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm import linear
from tokenmill.ops.triton.gemm.splitk import SplitKConfig
from tokenmill.ops.triton.moe import small_floats
from tokenmill.ops.triton.moe.gemv import add_norm_experts, kind_of
from tokenmill.ops.triton.quant import fp4, gemm_fp4, gemm_fp8_blocks, gemm_fp8_split, packed_fp4, quantized
from tokenmill.ops.triton.quant.fused_norm_quant import norm_and_quantize
from tokenmill.weights.dequantize import dequantize

OPS = build_ops()
DENSE = partial(dequantize, dtype=torch.bfloat16)
KEPT: dict[str, type] = dict.fromkeys(("NV4", "NV4D", "MXFP4"), packed_fp4.PackedFp4Matrix)
KEPT["F8"] = quantized.Fp8BlockMatrix


def tensor_bytes(matrix: Any) -> int:
    return sum(value.nbytes for value in vars(matrix).values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("quant", ["NV4", "NV4D"])
def test_nvfp4_is_expanded_bit_for_bit(quant: str) -> None:
    """Every scale there is: subnormal ones and 0 too"""
    raw = raw_matrix(quant, (40, 512), seed=1)
    blocks = raw.data.view(40, 16, 22)
    blocks[:, :, 4:6] = torch.arange(40 * 32).remainder(127).to(torch.uint8).view(40, 16, 2)
    blocks[:, :, :4] = torch.full((1, 1, 1), 0.25).view(torch.uint8)  # a power of two: nothing else is rounded
    matrix = fp4.fp4_from_blocks(raw.data, quant)
    assert torch.equal(fp4.dequantize_fp4(matrix, slice(8, 40), torch.float32), dequantize(raw)[8:])
    packed = packed_fp4.packed_fp4_from_blocks(raw.data, quant)
    assert torch.equal(packed_fp4.dequantize_packed_fp4(packed, slice(8, 40), torch.float32), dequantize(raw)[8:])


@pytest.mark.parametrize("quant", ["NV4", "NV4D", "MXFP4"])
def test_where_expanding_is_slow_4_bits_become_integers_of_the_same_values(quant: str) -> None:
    """Two of them stacked, in few rows and in many; what is planned is what is taken."""
    raws = [raw_matrix(quant, (num_out, 384), seed=num_out) for num_out in (24, 56)]
    with patch.object(linear, "keeps_fp4_on", lambda device, dtype: False):
        packed = OPS.pack_linear(raws, None, DENSE)
    assert isinstance(packed.packed, quantized.PackedIntMatrix) and packed.packed.bits == 8
    stored = StoredFormat(quant, is_widened=True)
    forms = [packed_int_format(raw.name, raw.shape, stored) for raw in raws]
    planned = sum(form.num_bytes(raw.shape) for form, raw in zip(forms, raws, strict=True) if form is not None)
    assert tensor_bytes(packed.packed) == planned
    matrix = torch.cat([dequantize(raw) for raw in raws])
    for num_rows in (1, 3, 200):
        x = torch.randn(num_rows, 384)
        assert_near(OPS.linear(x, packed), x @ matrix.T, tolerance=1e-3)


@pytest.mark.parametrize("quant", KEPT)
def test_matrices_are_multiplied_as_they_are(quant: str) -> None:
    """Two of them stacked, in few rows and in many; what is planned is what is taken."""
    raws = [raw_matrix(quant, (num_out, 384), seed=num_out) for num_out in (24, 56)]
    bias, matrix = torch.randn(80), torch.cat([dequantize(raw) for raw in raws])
    packed = OPS.pack_linear(raws, bias, DENSE)
    assert type(packed.packed) is KEPT[quant] and (packed.rows, packed.columns) == (80, 384)
    forms = [packed_int_format(raw.name, raw.shape, StoredFormat(quant, raw.blocks_per_scale)) for raw in raws]
    planned = sum(form.num_bytes(raw.shape) for form, raw in zip(forms, raws, strict=True) if form is not None)
    assert planned == tensor_bytes(packed.packed)
    for rows, tolerance in ((1, 6e-3), (9, 6e-3), (40, 0.04), (130, 0.04)):
        x = torch.randn(rows, 384)
        limit = tolerance if quant == "F8" else 1e-3
        assert_near(OPS.linear(x, packed), x @ matrix.T + bias, tolerance=limit)


@pytest.mark.parametrize(("rows", "splits"), [(3, 1), (9, 3)])
def test_columns_are_split(rows: int, splits: int) -> None:
    """More splits than there are groups of columns leave some with nothing to do."""
    x, bias = torch.randn(rows, 512), torch.randn(72)
    raw = raw_matrix("F8", (72, 512), seed=3)
    blocks = quantized.fp8_blocks_from_blocks(raw.data)
    config = SplitKConfig(64, 128, splits, 2)
    rounded = gemm_fp8_split.quantize_rows(x)
    found = gemm_fp8_blocks.gemm_fp8_blocks_split(rounded, blocks, bias, config, torch.float32)
    assert_near(found, x @ dequantize(raw).T + bias, tolerance=6e-3)
    raw = raw_matrix("NV4", (72, 512), seed=3)
    matrix = packed_fp4.packed_fp4_from_blocks(raw.data, "NV4")
    found = gemm_fp4.splitk_fp4_linear(x, matrix, bias, SplitKConfig(64, 128, splits, 2))
    assert_near(found, x @ dequantize(raw).T + bias, tolerance=1e-4)


def test_rows_that_a_norm_left_in_fp8() -> None:
    raw = raw_matrix("F8", (64, 256), seed=4)
    packed = OPS.pack_linear([raw], None, DENSE)
    norm, x = Norm(torch.rand(256) + 0.5, 1e-5), torch.randn(5, 256)
    rows, _ = norm_and_quantize(PlainStream(x), norm, "fp8")
    assert isinstance(rows, gemm_fp8_split.Fp8Rows)
    found = linear.fp8_gemm(rows, packed.packed, None, torch.float32, "eager")
    assert_near(found, PLAIN.rms_norm(x, norm.weight, norm.eps) @ dequantize(raw).T, tolerance=6e-3)


def test_what_the_kernels_cannot_multiply_is_not_kept() -> None:
    raw = raw_matrix("NV4", (8, 128), seed=1)
    raw.data.view(8, 4, 22)[3, 1, 4] |= 128  # a scale below 0
    assert isinstance(OPS.pack_linear([raw], None, DENSE).packed, torch.Tensor)
    with patch.object(linear, "has_fp8", lambda device: False):
        assert isinstance(OPS.pack_linear([raw_matrix("F8", (8, 256), seed=1)], None, DENSE).packed, torch.Tensor)
    for name in ("layers.0.router.weight", "head.weight"):
        plain = OPS.pack_linear([replace(raw_matrix("F8", (8, 256), seed=1), name=name)], None, DENSE)
        assert isinstance(plain.packed, torch.Tensor)


EXPERTS, HIDDEN, INTER, ACTIVE = 3, 256, 128, 2


def raw_experts(*quants: str) -> list[RawTensor]:
    shapes = {"gate": (EXPERTS, INTER, HIDDEN), "up": (EXPERTS, INTER, HIDDEN), "down": (EXPERTS, HIDDEN, INTER)}
    return [
        raw_matrix(quant, shape, seed=number, name=f"layers.0.experts.{part}.weight")
        for number, (quant, (part, shape)) in enumerate(zip(quants, shapes.items(), strict=True))
    ]


@pytest.fixture
def few_programs() -> Iterator[None]:
    """The interpreter runs one after the other."""
    with patch.multiple(small_floats, capabilities_of=lambda device: gpu_with(moe_gemv_programs=8), DOWN_ROWS=32):
        yield


@pytest.mark.parametrize("quant", ["NV4", "F8"])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.usefixtures("few_programs")
def test_experts_with_biases(quant: str, tokens: int) -> None:
    """Each pair by itself, and sorted pairs in tiles"""
    raws = raw_experts(quant, quant, quant)
    biases = {"gate_up_bias": torch.randn(EXPERTS, 2 * INTER), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    packed = replace(OPS.pack_experts(raws[0], raws[1], raws[2], DENSE), **biases)
    exact = replace(PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize), **biases)
    assert kind_of(packed) == ("fp4" if quant == "NV4" else "fp8_blocks")
    x, chosen = torch.randn(tokens, HIDDEN), PLAIN.route(torch.randn(tokens, EXPERTS), Routing(ACTIVE))
    expected = PLAIN.experts(x, *chosen, exact, "swiglu_oai")
    limit = 1e-4 if tokens == 1 or quant == "NV4" else 0.05  # many tokens are rounded to fp8
    assert_near(OPS.experts(x, *chosen, packed, "swiglu_oai"), expected, tolerance=limit)


def test_some_tokens_more_than_are_streamed_are_two_numbers_each() -> None:
    raws = raw_experts("F8", "F8", "F8")
    packed = OPS.pack_experts(raws[0], raws[1], raws[2], DENSE)
    exact = PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize)
    x, chosen = torch.randn(7, HIDDEN), PLAIN.route(torch.randn(7, EXPERTS), Routing(ACTIVE))
    expected = PLAIN.experts(x, *chosen, exact, "silu")
    assert_near(OPS.experts(x, *chosen, packed, "silu"), expected, tolerance=8e-3)


def test_gates_and_ups_of_different_forms() -> None:
    raws = raw_experts("NV4", "MXFP4", "F8")
    packed = OPS.pack_experts(raws[0], raws[1], raws[2], DENSE)
    assert kind_of(packed) == "mixed" and isinstance(packed.packed[0], tuple)
    exact = PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize)
    x, chosen = torch.randn(3, HIDDEN), PLAIN.route(torch.randn(3, EXPERTS), Routing(ACTIVE))
    expected = PLAIN.experts(x, *chosen, exact, "silu")
    assert_near(OPS.experts(x, *chosen, packed, "silu"), expected, tolerance=8e-3)


@pytest.mark.usefixtures("few_programs")
def test_a_token_from_its_stream_on() -> None:
    """Norm, router and experts, as one region has them"""
    raws = raw_experts("F8", "F8", "F8")
    packed = OPS.pack_experts(raws[0], raws[1], raws[2], DENSE)
    exact = PLAIN.pack_experts(raws[0], raws[1], raws[2], dequantize)
    x, residual, norm = torch.randn(1, HIDDEN), torch.randn(1, HIDDEN), torch.rand(HIDDEN) + 0.5
    router = LinearWeight(EXPERTS, HIDDEN, torch.randn(EXPERTS, HIDDEN) * 0.3)
    done = add_norm_experts(x, residual, norm, 1e-5, router, packed, Routing(ACTIVE), "silu")
    normed, _ = PLAIN.add_rms_norm(x, residual, norm, 1e-5)
    chosen = PLAIN.route(normed @ router.packed.T, Routing(ACTIVE))
    assert_near(done.result, PLAIN.experts(normed, *chosen, exact, "silu"), tolerance=1e-4)
