"""Adapters by Triton kernels in the interpreter: the sums of the reference, for any mix of adapters in a batch."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.support.adapted_models import adaptable_model
from tests.support.paged_run import PagedRun
from tests.support.triton_inputs import assert_near
from tokenmill.ops.interface import LinearWeight
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.reference.low_rank import ReferenceLowRankOps
from tokenmill.ops.triton.adapters import low_rank as low_rank_module
from tokenmill.ops.triton.adapters.adapted_product import MAX_PRODUCTS, MAX_ROWS
from tokenmill.ops.triton.adapters.low_rank import TritonLowRank
from tokenmill.ops.triton.adapters.ops import TritonLowRankOps
from tokenmill.ops.triton.adapters.token_slots import MAX_SINGLE
from tokenmill.ops.triton.build import build_ops
from tokenmill.ops.triton.launch.pdl import split_counters

SIZES, COLUMNS = (40, 24, 8), 72
ONE = torch.ones(1, dtype=torch.int32)


def low_rank(rows: int, columns: int, rank: int, *, has_gain: bool = False) -> LowRank:
    gain = torch.randn(rows) * 0.1 if has_gain else None
    return LowRank(torch.randn(rank, columns), torch.randn(rows, rank), gain)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [7, MAX_SINGLE + 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_stacked_matrices(num_tokens: int, has_bias: bool, deterministic: bool) -> None:
    adapters = [
        [low_rank(rows, COLUMNS, rank) for rows, rank in zip(SIZES, (1, 8, 17), strict=True)],
        [low_rank(SIZES[0], COLUMNS, 24, has_gain=True), None, low_rank(SIZES[2], COLUMNS, 3)],
        [None, None, None],
    ]
    slots = torch.randint(0, 4, (num_tokens,), dtype=torch.int32)
    x, out = torch.randn(num_tokens, COLUMNS), torch.randn(num_tokens, sum(SIZES))
    bias = torch.randn(sum(SIZES)) if has_bias else None
    results = []
    for ops in (ReferenceLowRankOps(), TritonLowRankOps(deterministic=deterministic)):
        held = ops.hold(SIZES, COLUMNS, 3, 24, x[:0])
        for slot, parts in enumerate(adapters, start=1):
            held.put(slot, parts)
        results.append(held.add(x, out.clone(), bias, ops.plan(slots)))
    assert_near(results[1], results[0], 1e-4)


@pytest.mark.parametrize("sizes", [(40, 24, 8), (128, 128), (256,), (130, 70)])
@pytest.mark.parametrize("rank", [16, 40])
def test_adapters_below_a_plain_matrix(sizes: tuple[int, ...], rank: int) -> None:
    """One product for the matrix and what its adapters shrink; and with gates above ups, the activation behind it."""
    rows, has_bias = sum(sizes), len(sizes) > 1
    plain, reference = build_ops(), ReferenceLowRankOps()
    x, matrix, bias = torch.randn(9, COLUMNS), torch.randn(rows, COLUMNS), torch.randn(rows)
    weight = LinearWeight(rows, COLUMNS, matrix, bias if has_bias else None)
    slots = torch.tensor([1, 0, 2, 2, 0, 1, 1, 2, 3], dtype=torch.int32)
    ops = TritonLowRankOps()
    held, expected = (kind.hold(sizes, COLUMNS, 3, rank, x[:0]) for kind in (ops, reference))
    limit, low_rank_module.MAX_JOINED = low_rank_module.MAX_JOINED, 100.0
    try:
        kept = held.adopt(weight)
    finally:
        low_rank_module.MAX_JOINED = limit
    assert torch.equal(kept.packed, matrix) and kept.packed.is_contiguous()
    plan, plan_of_reference = ops.plan(slots), reference.plan(slots)
    assert held.matrix(kept, plan) is kept, "no adapter adds anything yet"
    for slot in (1, 2):
        parts = [low_rank(size, COLUMNS, rank - 3, has_gain=slot == 2) for size in sizes]
        held.put(slot, parts)
        expected.put(slot, parts)
    assert held.matrix(kept, TritonLowRankOps(deterministic=True).plan(slots)) is kept
    joined = held.matrix(kept, plan)
    assert joined.rows == len(joined.packed) > rows and joined.packed.data_ptr() == kept.packed.data_ptr()
    exact = expected.add(x, plain.linear(x, weight), weight.bias, plan_of_reference)
    assert_near(held.add(x, plain.linear(x, joined), weight.bias, plan), exact, 1e-4)
    assert_near(held.add(x, plain.linear(x, weight), weight.bias, plan), exact, 1e-4)
    found = held.add_gated(x, plain.linear(x, joined), weight.bias, plan, "silu")
    assert_near(found, plain.act_mul(exact, "silu"), 1e-4)
    held.put(1, [None] * len(sizes))
    found = held.add(x, plain.linear(x, joined), weight.bias, plan)
    assert_near(found[slots == 1], plain.linear(x, weight)[slots == 1], 1e-5)


@pytest.mark.parametrize(
    ("sizes", "columns", "rank", "num_tokens", "num_slots"),
    [((128, 64, 64), 512, 9, 32, 16), ((192, 192), 256, 16, 17, 5), ((64,), 128, 120, 9, 40), ((64,), 1024, 16, 2, 1)],
)
def test_adapters_inside_the_product(
    sizes: tuple[int, ...], columns: int, rank: int, num_tokens: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter's `b` is read once for all of its tokens; more adapters are present than a program holds at once, or
    one, or none."""
    monkeypatch.setattr(low_rank_module, "MAX_JOINED", 1000.0)
    reference, ops, rows = ReferenceLowRankOps(), TritonLowRankOps(), sum(sizes)
    bias = torch.randn(rows).half() if len(sizes) > 1 else None
    weight = LinearWeight(rows, columns, (torch.randn(rows, columns) * 0.05).half(), bias)
    held, expected = (
        kind.hold(sizes, columns, num_slots, rank, torch.empty(0, dtype=dtype))
        for kind, dtype in ((ops, torch.half), (reference, torch.float32))
    )
    kept = held.adopt(weight)
    for slot in range(1, 1 + num_slots):
        parts = [LowRank(torch.randn(rank, columns) * 0.05, torch.randn(size, rank) * 0.2) for size in sizes]
        parts = [LowRank(part.a.half().float(), part.b.half().float()) for part in parts]
        held.put(slot, parts)
        expected.put(slot, parts)
    x = torch.randn(num_tokens, columns).half()
    mixes = torch.randint(0, num_slots + 1, (num_tokens,)), torch.zeros(num_tokens), torch.ones(num_tokens)
    for slots in (mix.int() for mix in mixes):
        plan, own = ops.plan(slots), None if bias is None else bias.float()
        exact = x.float() @ weight.packed.float().t() + (0.0 if own is None else own)
        exact = expected.add(x.float(), exact, own, reference.plan(slots))
        for _ in range(2):  # products of a plan have counters of their own
            found = held.product(x, kept, plan)
            assert found is not None
            assert_near(found.float(), exact, 0.02)
        assert not split_counters(x.device).any(), "the next launch would not join its splits"


def half_product(rank: int = 16) -> tuple[TritonLowRankOps, TritonLowRank, LinearWeight]:
    """Return a matrix of 16 bits with two slots, of which the first has an adapter."""
    ops, rows, columns = TritonLowRankOps(), 64, 128
    held = ops.hold((rows,), columns, 2, rank, torch.empty(0, dtype=torch.half))
    weight = held.adopt(LinearWeight(rows, columns, torch.randn(rows, columns).half()))
    assert held.product(torch.randn(2, columns).half(), weight, ops.plan(ONE.expand(2))) is None, "nothing is loaded"
    assert held.put(1, [low_rank(rows, columns, rank)]), "other kernels"
    return ops, held, weight


def test_steps_that_no_kernel_adapts_inside_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_module, "MAX_JOINED", 100.0)
    ops, held, weight = half_product()
    some, plan = torch.randn(2, 128).half(), ops.plan(ONE.expand(2))
    assert held.product(some[:1], weight, ops.plan(ONE)) is None, "one row"
    assert ops.plan(ONE.expand(MAX_ROWS + 1)).present is None
    assert TritonLowRankOps(deterministic=True).plan(ONE.expand(2)).present is None
    with patch("tokenmill.ops.triton.adapters.ops.has_adapted_products", return_value=False):  # an older GPU
        assert held.product(some, weight, ops.plan(ONE.expand(2))) is None
    assert held.product(some, weight, plan) is not None and plan.present is not None
    assert len([*plan.present.numbers]) == MAX_PRODUCTS - 1
    assert held.product(some, weight, plan) is None, "all counters are used"
    assert held.put(2, [low_rank(64, 128, 16, has_gain=True)])
    assert held.product(some, weight, ops.plan(ONE.expand(2))) is None, "DoRA"
    _, wide, weight = half_product(48)
    assert wide.product(some, weight, ops.plan(ONE.expand(2))) is None, "48 ranks"


def test_plans_that_are_used_in_turns_do_not_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the last layer have a plan of their own, and so has the head; and every step has new ones."""
    monkeypatch.setattr(low_rank_module, "MAX_JOINED", 100.0)
    ops, held, weight = half_product()
    mixes = torch.tensor([[0, 1, 1], [0, 0, 0]], dtype=torch.int32)
    plans, x = [ops.plan(slots) for slots in mixes], torch.randn(3, 128).half()
    for _ in range(3):
        for plan, slots in zip(plans, mixes, strict=True):
            found, alone = held.product(x, weight, plan), held.product(x, weight, plans[1])
            assert found is not None and alone is not None
            exact = held.add(x, build_ops().linear(x, held.matrix(weight, plan)), None, plan)
            assert_near(found.float(), exact.float(), 0.05)
            assert torch.equal(found[slots == 0], alone[slots == 0])
    first, second = (plan.present for plan in plans)
    assert first is not None and second is not None
    assert first.ready[:3].all() and not first.ready[3:].any() and not second.ready.any()
    fresh = ops.plan(mixes[0]).present
    assert fresh is not None and next(fresh.numbers) == 0 and not fresh.ready.any()


def test_infinite_values_of_one_adapter_reach_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_module, "MAX_JOINED", 100.0)
    ops, held, weight = half_product()
    bad, x = low_rank(64, 128, 16), torch.randn(3, 128).half()
    bad.b[3, 3] = torch.inf
    plan = ops.plan(torch.tensor([1, 2, 0], dtype=torch.int32))
    assert held.product(x, weight, plan) is not None
    assert held.put(2, [bad]), "other kernels"
    assert held.product(x, weight, plan) is None
    found = held.add(x, build_ops().linear(x, weight), None, plan)
    assert found[[0, 2]].isfinite().all() and not found[1].isfinite().all()
    assert held.put(2, [low_rank(64, 128, 16)])
    found = held.product(x, weight, plan)
    assert found is not None and found.isfinite().all()


def test_a_slot_that_is_filled_again_forgets_what_it_held() -> None:
    ops, reference = TritonLowRankOps(), ReferenceLowRankOps()
    slots, x = torch.ones(5, dtype=torch.int32), torch.randn(5, COLUMNS)
    held, expected = ops.hold((16,), COLUMNS, 1, 32, x[:0]), reference.hold((16,), COLUMNS, 1, 32, x[:0])
    held.put(1, [low_rank(16, COLUMNS, 32, has_gain=True)])
    smaller = low_rank(16, COLUMNS, 5)
    assert not held.put(1, [smaller])  # no other kernels
    expected.put(1, [smaller])
    found = held.add(x, torch.zeros(5, 16), None, ops.plan(slots))
    assert_near(found, expected.add(x, torch.zeros(5, 16), None, reference.plan(slots)), 1e-4)
    held.put(1, [None])
    assert not held.add(x, torch.zeros(5, 16), None, ops.plan(slots)).any()


@pytest.mark.parametrize("num_tokens", [5, MAX_SINGLE + 3])
def test_rows_of_an_embedding(num_tokens: int) -> None:
    part = LowRank(torch.randn(6, 50), torch.randn(32, 6))
    numbers, slots = torch.randint(0, 50, (num_tokens,)), torch.randint(0, 3, (num_tokens,), dtype=torch.int32)
    results = []
    for ops in (ReferenceLowRankOps(), TritonLowRankOps()):
        held = ops.hold((32,), 50, 2, 16, torch.empty(0), is_embedding=True)
        held.put(2, [part])
        results.append(held.add_rows(numbers, torch.zeros(num_tokens, 32), ops.plan(slots)))
    assert_near(results[1], results[0], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_with_trained_adapters(stories_dir: Path, shared_dir: Path, deterministic: bool) -> None:
    """Rows with different adapters and without one, in a prompt and behind it: the logits of the reference."""
    root = shared_dir / "goldens" / "tiny" / "adapters"
    results = []
    for ops in (None, build_ops(deterministic=deterministic)):
        kinds = {} if ops is None else {"ops": ops}
        loaded = adaptable_model(stories_dir, "ops", 2, max_rank=16, **kinds)
        loaded.put(1, root / "dora_r8_robots")
        loaded.put(2, root / "rslora_r16_bang")
        run = PagedRun(loaded.model, 3, 32, block_size=16, adapters=[2, 0, 1])
        prompt = [1, 403, 407, 261, 378]
        results.append(torch.cat([run.feed({0: prompt, 1: prompt, 2: prompt}), run.feed({0: [7], 1: [7], 2: [7]})]))
    torch.testing.assert_close(results[1], results[0], atol=2e-4, rtol=1e-4)
