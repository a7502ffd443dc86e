"""The small reference ops against torch and transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tokenmill.arch.spec import Activation, RoutingSpec
from tokenmill.ops.interface import Routing
from tokenmill.ops.raw import RawTensor
from tokenmill.ops.reference import REFERENCE_OPS

OPS = REFERENCE_OPS


def raw(values: torch.Tensor) -> RawTensor:
    return RawTensor("test", tuple(values.shape), values)


def dense(tensor: RawTensor) -> torch.Tensor:
    return tensor.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 5, 16, dtype=dtype), torch.rand(16) + 0.5
    expected = functional.rms_norm(x.float(), (16,), weight, 1e-5).to(dtype)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), expected)


def test_add_rms_norm_returns_the_sum_too() -> None:
    x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.rand(16)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, functional.rms_norm(x + residual, (16,), weight, 1e-6))


def test_rotate_equals_transformers() -> None:
    x, angles = torch.randn(6, 3, 16), torch.randn(6, 8)
    both = torch.cat((angles, angles), -1)
    expected, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos()[None], both.sin()[None]
    )
    torch.testing.assert_close(OPS.rotate(x, angles.cos(), angles.sin()), expected[0].transpose(0, 1))


def test_rotate_leaves_the_dimensions_beyond() -> None:
    x, angles = torch.randn(2, 3, 16), torch.randn(2, 4)
    turned = OPS.rotate(x, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8], OPS.rotate(x[..., :8], angles.cos(), angles.sin()))


@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_gated_activations(ours: Activation, theirs: str) -> None:
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    torch.testing.assert_close(OPS.act_mul(torch.cat((gate, up), -1), ours), ACT2FN[theirs](gate) * up)


def test_linear_stacks_parts_and_adds_the_bias() -> None:
    first, second, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(8)
    weight = OPS.pack_linear([raw(first), raw(second)], bias, dense)
    x = torch.randn(4, 8)
    assert (weight.rows, weight.columns) == (8, 8)
    expected = torch.cat((x @ first.T, x @ second.T), -1) + bias
    torch.testing.assert_close(OPS.linear(x, weight), expected)


def test_an_embedding_is_also_a_head() -> None:
    matrix = torch.randn(10, 4)
    weight = OPS.pack_embedding(raw(matrix), dense)
    assert torch.equal(OPS.embed(torch.tensor([3, 0]), weight), matrix[[3, 0]])
    torch.testing.assert_close(OPS.linear(matrix[:2], weight), matrix[:2] @ matrix.T)


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_equal_a_plain_loop(renormalize: bool) -> None:
    x, router = torch.randn(7, 6), torch.randn(7, 5)
    gate, up, down = torch.randn(5, 9, 6), torch.randn(5, 9, 6), torch.randn(5, 6, 9)
    weights, ids = OPS.route(router, Routing(2, RoutingSpec(renormalize=renormalize)))
    found = OPS.experts(x, weights, ids, OPS.pack_experts(raw(gate), raw(up), raw(down), dense), "silu")
    for token in range(7):
        shares = torch.softmax(router[token], -1)
        best = shares.argsort(descending=True)[:2]
        total = shares[best].sum() if renormalize else 1.0
        expected = sum(
            shares[e] / total * (down[e] @ (functional.silu(gate[e] @ x[token]) * (up[e] @ x[token]))) for e in best
        )
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-5)


def test_of_equal_experts_the_first_are_taken() -> None:
    """As by every kernel: which ones `topk` takes is left to it."""
    logits = torch.tensor([[0.0, 1.0, 5.0, 1.0, 1.0], [2.0] * 5]).repeat(3, 1)
    _, ids = OPS.route(logits, Routing(3))
    assert ids.tolist() == [[2, 1, 3], [0, 1, 2]] * 3
