"""Latent attention: decode rows with and without splits, chunks of prompts, both beside each other; kernels in the
interpreter against the reference op."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.support.fixed_order import sums_in_fixed_order
from tests.support.triton_inputs import assert_near, paged_batch
from tokenmill.ops.interface import LatentInputs, Norm
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.attention import latent, latent_prompts
from tokenmill.ops.triton.build import build_ops

OPS, DETERMINISTIC = build_ops(), build_ops(deterministic=True)
DECODE, MIXED = [(1, 90), (1, 3), (1, 200)], [(1, 70), (37, 37), (5, 50)]


def random_inputs(
    lengths: list[tuple[int, int]], heads: int, *, is_rotated: bool = True
) -> tuple[LatentInputs, LatentInputs]:
    """The same inputs twice, with a cache and a plan of its own for each backend."""
    rank, rope, nope, value, block = 24, 8, 12, 20, 16
    batch = paged_batch(lengths, block)
    tables = batch.groups[0].block_tables.tolist()
    slots = [
        tables[row][position // block] * block + position % block
        for row, (count, context) in enumerate(lengths)
        for position in range(context - count, context)
    ]
    num_tokens = len(slots)
    projected = torch.randn(num_tokens, heads * (nope + rope) + rank + rope)
    queries, entries = projected.split([heads * (nope + rope), rank + rope], dim=1)  # as a layer hands them over
    angles = (torch.randn(num_tokens, rope // 2), torch.randn(num_tokens, rope // 2)) if is_rotated else None
    cache = torch.randn(1 + batch.groups[0].block_tables.numel(), block, rank + rope)
    shared = (Norm(torch.randn(rank), 1e-6), angles, torch.randn(heads, rank, nope), torch.randn(heads, value, rank))
    made = [
        LatentInputs(
            queries, entries, cache.clone(), torch.tensor(slots), *shared, ops.plan_attention(batch, 0, None), 0.3
        )
        for ops in (OPS, PLAIN)
    ]
    return made[0], made[1]


@pytest.mark.parametrize("heads", [2, 5, 20])
@pytest.mark.parametrize("lengths", [DECODE, MIXED, [(21, 33)], [(1, 90)]], ids=["decode", "mixed", "chunk", "row"])
def test_equal_to_the_reference(lengths: list[tuple[int, int]], heads: int) -> None:
    mine, plain = random_inputs(lengths, heads)
    expected = PLAIN.latent_attend(plain)
    assert_near(OPS.latent_attend(mine), expected)
    assert_near(mine.latents, plain.latents)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_any_number_of_splits_gives_the_same(splits: int) -> None:
    mine, plain = random_inputs(DECODE, 4)
    with patch.object(latent, "num_latent_splits", lambda *_: splits):
        assert_near(OPS.latent_attend(mine), PLAIN.latent_attend(plain))


@pytest.mark.parametrize("memory", [1, 1 << 20], ids=["a head at a time", "all heads"])
def test_whole_prompts_are_expanded(memory: int) -> None:
    """Beside a row that decodes and a chunk; the reference attends in the absorbed form."""
    mine, plain = random_inputs([(1, 70), (5, 50), (37, 37), (21, 21)], 5)
    plan = replace(mine.plan, prompts=(37, 21))
    with (
        patch.object(latent, "can_be_expanded", lambda _: True),  # float32 too
        patch.object(latent_prompts, "EXPANDED_BYTES", memory),
    ):
        assert_near(OPS.latent_attend(mine._replace(plan=plan)), PLAIN.latent_attend(plain))
    assert_near(mine.latents, plain.latents)


def test_without_rotation() -> None:
    mine, plain = random_inputs(MIXED, 3, is_rotated=False)
    assert_near(OPS.latent_attend(mine), PLAIN.latent_attend(plain))


def test_deterministic_rows_do_not_depend_on_their_step() -> None:
    """A query's result is the same, bit for bit, whether its row is computed token by token or as a chunk."""
    chunk, plain = random_inputs([(9, 40)], 4)
    with sums_in_fixed_order():
        whole = DETERMINISTIC.latent_attend(chunk)
    assert_near(whole, PLAIN.latent_attend(plain))
    for number in range(9):
        plan = replace(
            chunk.plan,
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            contexts=torch.tensor([32 + number], dtype=torch.int32),
            num_single=1,
            max_queries=1,
        )
        one = slice(number, number + 1)
        angles = chunk.cos_sin and (chunk.cos_sin[0][one], chunk.cos_sin[1][one])
        alone = chunk._replace(
            queries=chunk.queries[one], entries=chunk.entries[one], slots=chunk.slots[one], cos_sin=angles, plan=plan
        )
        with sums_in_fixed_order():
            assert torch.equal(DETERMINISTIC.latent_attend(alone), whole[one])
