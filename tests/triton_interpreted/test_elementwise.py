"""Norms, activations, look-ups and the highest logit: Triton kernels in the interpreter against the reference ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.triton_inputs import assert_near, paged_batch
from tokenmill.arch.streams import HyperConnections
from tokenmill.ops.batch import GroupTables
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.streams import Addend, AltUpNumbers, JoinedStreams, StreamConnection
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.sampling.argmax import argmax

OPS = build_ops()
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 0.01}  # a number more or less in the last place


@pytest.mark.parametrize(("rows", "size"), [(3, 48), (1, 200)])
def test_rms_norm_with_and_without_residual(rows: int, size: int) -> None:
    x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    assert_near(OPS.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    found, expected = (ops.add_rms_norm(x, residual, weight, 1e-5) for ops in (OPS, PLAIN))
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_activation(kind: str) -> None:
    x = torch.randn(3, 2 * 1100)
    assert_near(OPS.act_mul(x, kind), PLAIN.act_mul(x, kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_that_are_mostly_cut_off(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * 300).to(dtype)
    assert_near(OPS.cut_act_mul(x, "gelu_tanh", 0.7), PLAIN.cut_act_mul(x, "gelu_tanh", 0.7), ROUNDED[dtype])


@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_streams(dtype: torch.dtype, has_scale: bool) -> None:
    """Predicted, corrected, and made as long as others; 3 streams of 48 numbers"""
    scale = torch.randn(48) if has_scale else None
    numbers = AltUpNumbers(
        torch.rand(48) + 0.5, 1e-6, torch.randn(3, 48) * 7, torch.randn(9, 3), torch.randn(3, 3), scale
    )
    streams, result = torch.randn(5, 3, 48).to(dtype), torch.randn(5, 48).to(dtype)
    tolerance = ROUNDED[dtype]
    assert_near(OPS.altup.predict(streams, numbers), PLAIN.altup.predict(streams, numbers), tolerance)
    for ours, theirs in zip(*(ops.altup.correct(streams, result, numbers) for ops in (OPS, PLAIN)), strict=True):
        assert_near(ours, theirs, tolerance)
    zeros = torch.zeros_like(result)
    for one, other in ((result, streams[:, 1]), (zeros, result), (result, zeros)):
        assert_near(OPS.altup.as_long(one, other), PLAIN.altup.as_long(one, other), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "size", "tokens"), [(4, 300, 18), (3, 40, 1)])
def test_mixtures_of_streams(count: int, size: int, tokens: int, dtype: torch.dtype) -> None:
    """Read with and without a result that is added before, and behind all layers"""
    spec = HyperConnections(count, 5)
    rows = spec.num_coefficients
    connection = StreamConnection(spec, torch.randn(rows, count * size) * 0.1, torch.randn(rows), torch.rand(3) + 0.5)
    end = StreamConnection(spec, torch.randn(count, count * size) * 0.1, torch.randn(count), torch.rand(1) + 0.5)
    streams, result = torch.randn(tokens, count, size).to(dtype), torch.randn(tokens, size).to(dtype)
    addend = Addend(result, torch.rand(tokens, count), torch.rand(tokens, count, count))
    for joined in (JoinedStreams(streams), JoinedStreams(streams, addend)):
        for ours, theirs in zip(OPS.hyper.read(joined, connection), PLAIN.hyper.read(joined, connection), strict=True):
            assert_near(ours, theirs, ROUNDED[dtype])
        assert_near(OPS.hyper.end(joined, end), PLAIN.hyper.end(joined, end), ROUNDED[dtype])


def test_rows_with_a_gate_of_their_own() -> None:
    y, x, gate = torch.randn(3, 200), torch.randn(3, 200), torch.randn(200)
    assert_near(OPS.gate_rows(y, x, gate), PLAIN.gate_rows(y, x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "has_bias"), [(3, False), (4, True), (1, True)])
@pytest.mark.parametrize(
    "lengths", [[(1, 1), (1, 2), (1, 40)], [(1, 17), (5, 5), (2, 19), (33, 70), (1, 3)], [(40, 40)]]
)
def test_short_convolution(lengths: list[tuple[int, int]], kernel: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Single tokens, whole prompts and chunks: outputs, and what is left in the cache for later steps."""
    width, batch = 600, paged_batch(lengths, 16)
    tokens = sum(queries for queries, _ in lengths)
    slots = []
    for (queries, context), table in zip(lengths, batch.groups[0].block_tables.tolist(), strict=True):
        slots += [table[at // 16] * 16 + at % 16 for at in range(context - queries, context)]
    group = GroupTables(batch.groups[0].block_tables, torch.tensor(slots))
    batch = replace(batch, groups=(group,), token_ids=torch.zeros(tokens, dtype=torch.int64))
    projected = torch.randn(tokens, 3 * width).to(dtype)
    weight, bias = torch.randn(width, kernel), torch.randn(width) if has_bias else None
    kept = torch.randn(1 + batch.groups[0].block_tables.numel(), 16, width).to(dtype)
    caches = [kept.clone(), kept.clone()]
    found, expected = (
        ops.short_conv(projected, cache, ops.plan_short_conv(batch, 0, kernel), weight, bias)
        for ops, cache in zip((OPS, PLAIN), caches, strict=True)
    )
    assert_near(found, expected, 1e-5 if dtype == torch.float32 else 1e-2)
    assert_near(*caches, 1e-7 if dtype == torch.float32 else 1e-2)  # the interpreter rounds to bfloat16 its own way


def test_gathered_rows_and_embeddings_are_copies() -> None:
    tables, numbers = torch.randn(2, 9, 20), torch.tensor([3, 8, 0, 3, 5])
    assert torch.equal(OPS.gather_rows(tables, numbers), PLAIN.gather_rows(tables, numbers))
    weight = LinearWeight(9, 20, tables[0].bfloat16())
    assert torch.equal(OPS.embed(numbers, weight), PLAIN.embed(numbers, weight))


def test_argmax_takes_the_first_of_equals_and_marks_broken_rows() -> None:
    logits = torch.randn(5, 9000)
    logits[1, 7000] = logits[1, 20] = 9.0
    logits[2, 8999] = 9.0
    logits[3, 4100], logits[4, 3] = float("nan"), float("inf")
    tokens, values = argmax(logits)
    assert tokens.tolist() == [int(logits[0].argmax()), 20, 8999, -1, -1]
    assert values[:3].equal(logits.amax(1)[:3]) and values[3:].isnan().all()
    assert argmax(logits.bfloat16())[0].tolist()[1:] == [20, 8999, -1, -1]
