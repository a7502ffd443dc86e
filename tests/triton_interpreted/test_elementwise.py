"""Norms, activations, look-ups and the highest logit: Triton kernels in the interpreter against the reference ops."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_inputs import assert_near
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.sampling.argmax import argmax

OPS = build_ops()


@pytest.mark.parametrize(("rows", "size"), [(3, 48), (1, 200)])
def test_rms_norm_with_and_without_residual(rows: int, size: int) -> None:
    x, residual, weight = torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)
    assert_near(OPS.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    found, expected = (ops.add_rms_norm(x, residual, weight, 1e-5) for ops in (OPS, PLAIN))
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation(kind: str) -> None:
    x = torch.randn(3, 2 * 1100)
    assert_near(OPS.act_mul(x, kind), PLAIN.act_mul(x, kind))


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
