"""Adapters by Triton kernels in the interpreter: the sums of the reference, for any mix of adapters in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.adapted_models import adaptable_model
from tests.support.paged_run import PagedRun
from tests.support.triton_inputs import assert_near
from tokenmill.ops.low_rank import LowRank
from tokenmill.ops.reference.low_rank import ReferenceLowRankOps
from tokenmill.ops.triton.adapters.low_rank import MAX_SINGLE, TritonLowRankOps
from tokenmill.ops.triton.build import build_ops

SIZES, COLUMNS = (40, 24, 8), 72


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
