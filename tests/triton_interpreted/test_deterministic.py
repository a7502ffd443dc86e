"""Kernels of `--deterministic` in the interpreter: right, and equal bits however a batch or a prompt is divided.

The interpreter adds up in a fixed order here (see `tests/support/fixed_order.py`), so that equal bits depend on the
kernels alone and not on the matrix library of the processor.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.fixed_order import sums_in_fixed_order
from tests.support.triton_inputs import assert_near, paged_batch, random_cache
from tokenmill.ops.interface import AttentionArgs, ExpertsWeight, LinearWeight, Routing
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.attention import deterministic
from tokenmill.ops.triton.attention.deterministic import deterministic_attention
from tokenmill.ops.triton.attention.plan import plan_attention
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.gemm.deterministic import DeterministicConfig, deterministic_linear

FASTEST, STEADY = build_ops(), build_ops(deterministic=True)
DECODE, MIXED = [(1, 90), (1, 300)], [(1, 270), (20, 20), (5, 275)]


@pytest.fixture(autouse=True)
def fixed_order() -> Iterator[None]:
    with sums_in_fixed_order():
        yield


@pytest.mark.parametrize(
    ("num_out", "num_in", "border"), [(40, 384, 384), pytest.param(72, 520, 256, marks=pytest.mark.slow)]
)
def test_products_do_not_depend_on_the_number_of_rows(num_out: int, num_in: int, border: int) -> None:
    matrix, bias, x = torch.randn(num_out, num_in), torch.randn(num_out), torch.randn(21, num_in)
    weight = LinearWeight(num_out, num_in, matrix, bias)
    together = deterministic_linear(x, weight, border=border)
    assert_near(together, x @ matrix.T + bias)
    for rows in (slice(0, 1), slice(3, 10)):
        assert torch.equal(deterministic_linear(x[rows], weight, border=border), together[rows])
    in_turn = deterministic_linear(x.repeat(7, 1), weight, config=DeterministicConfig(16, 2, 32, 4, 2), border=border)
    assert torch.equal(in_turn[:21], together), "one program for both segments, or one for each"
    longer_tiles = deterministic_linear(x, weight, config=DeterministicConfig(32, 16, 128, 4, 2), border=border)
    assert torch.equal(longer_tiles, together), "columns are added in order, whatever the tiles"


def test_a_product_with_another_border_has_other_bits() -> None:
    """What the test above would see if the order of sums depended on the number of rows."""
    matrix, x = torch.randn(72, 520), torch.randn(21, 520)
    weight = LinearWeight(72, 520, matrix)
    assert not torch.equal(deterministic_linear(x, weight, border=256), deterministic_linear(x, weight, border=288))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "dtype", "lengths"),
    [
        (4, 2, 20, None, torch.float32, DECODE),
        (3, 1, 16, 262, torch.float8_e4m3fn, DECODE),
        (2, 1, 16, 23, torch.int8, MIXED),
        (2, 1, 20, None, torch.float32, MIXED),
        (2, 1, 300, None, torch.float32, DECODE),
    ],
)
def test_attention_agrees_with_the_reference(
    heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    args = AttentionArgs(0.3, window=window)
    if dtype == torch.int8:
        args = AttentionArgs(0.3, window=window, softcap=2.0, sinks=torch.randn(2))
    batch = paged_batch(lengths, 16)
    cache = random_cache(1 + batch.groups[0].block_tables.numel(), kv_heads, dim, dtype)
    queries = torch.randn(sum(count for count, _ in lengths), heads, dim)
    expected = PLAIN.attention(queries, cache, PLAIN.plan_attention(batch, 0, args.window), args)
    plan = plan_attention(batch, 0, args.window)
    for ops in (FASTEST, STEADY):
        assert_near(ops.attention(queries, cache, plan, args), expected, tolerance=1e-4)
    if batch.max_query_len == 1:
        ways = [deterministic_attention(queries, cache, plan, args, in_turn=in_turn) for in_turn in (True, False)]
        assert torch.equal(*ways), "one program for all segments, or one for each"


def attend_part(whole: torch.Tensor, first: int, last: int, args: AttentionArgs) -> torch.Tensor:
    """Attend with the queries [first, last) of a prompt whose random keys and values are always the same."""
    batch = paged_batch([(290, 290)], 16)
    torch.manual_seed(7)
    tables = batch.groups[0].block_tables
    cache = random_cache(1 + tables.numel(), 1, 16, torch.float32)
    part = paged_batch([(last - first, last)], 16)
    part.groups[0].block_tables.copy_(tables[:, : part.groups[0].block_tables.shape[1]])
    return deterministic_attention(whole[first:last], cache, plan_attention(part, 0, args.window), args)


@pytest.mark.parametrize("window", [None, 70])
def test_attention_does_not_depend_on_how_a_prompt_is_cut(window: int | None) -> None:
    args = AttentionArgs(0.3) if window is None else AttentionArgs(0.3, window=window, sinks=torch.randn(2))
    queries = torch.randn(290, 2, 16)
    whole = attend_part(queries, 0, 290, args)
    for first, last in ((230, 277), (277, 290), (289, 290)):
        assert torch.equal(attend_part(queries, first, last, args), whole[first:last]), (first, last)


def test_attention_with_other_segments_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see if segments began elsewhere for another cut."""
    queries, args = torch.randn(290, 2, 16), AttentionArgs(0.3)
    whole = attend_part(queries, 230, 290, args)
    monkeypatch.setattr(deterministic, "SEGMENT", 128)
    assert not torch.equal(attend_part(queries, 230, 290, args), whole)


def test_experts_do_not_depend_on_the_number_of_tokens() -> None:
    packed = ExpertsWeight(5, (torch.randn(5, 48, 32), torch.randn(5, 32, 24)))
    x, logits = torch.randn(19, 32), torch.randn(19, 5)
    chosen = STEADY.route(logits, Routing(2))
    together = STEADY.experts(x, *chosen, packed, "silu")
    assert_near(together, PLAIN.experts(x, *chosen, packed, "silu"))
    for rows in (slice(0, 1), slice(7, 12)):
        alone = STEADY.experts(x[rows], chosen[0][rows], chosen[1][rows], packed, "silu")
        assert torch.equal(alone, together[rows])
