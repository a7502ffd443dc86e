"""Latent attention over entries that an indexer chooses, in the interpreter, against the reference"""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from tests.support.triton_inputs import assert_near, paged_batch
from tokenmill.arch.indexer import Indexer
from tokenmill.ops.interface import IndexInputs, LatentInputs, Norm, Ops
from tokenmill.ops.reference import REFERENCE_OPS as PLAIN
from tokenmill.ops.triton.attention import sparse
from tokenmill.ops.triton.build import build_ops

OPS = build_ops()
RANK, ROPE, NOPE, VALUE, HEADS, BLOCK = 24, 8, 12, 20, 5, 16
INDEXER = Indexer(num_heads=3, head_dim=12, top_k=20)
DECODE, MIXED = [(1, 90), (1, 3), (1, 20), (1, 130)], [(1, 70), (37, 37), (5, 50)]


class Step(NamedTuple):
    """Inputs of one backend, with caches of its own"""

    index: IndexInputs
    attention: LatentInputs

    def run(self, ops: Ops) -> torch.Tensor:
        return ops.latent_attend(self.attention._replace(choice=ops.choose_entries(self.index)))


def steps(lengths: list[tuple[int, int]], *, is_equal: bool = False) -> tuple[Step, Step]:
    """The same for both backends; `is_equal`: many scores are exactly 0, or alike"""
    batch = paged_batch(lengths, BLOCK)
    tables = batch.groups[0].block_tables
    slots = torch.tensor(
        [
            int(tables[row, position // BLOCK]) * BLOCK + position % BLOCK
            for row, (count, context) in enumerate(lengths)
            for position in range(context - count, context)
        ]
    )
    count, width, dim = len(slots), RANK + ROPE, INDEXER.head_dim
    angles = (torch.randn(count, ROPE // 2), torch.randn(count, ROPE // 2))
    queries, entries = torch.randn(count, HEADS * (NOPE + ROPE)), torch.randn(count, width)
    matrices = torch.randn(HEADS, RANK, NOPE), torch.randn(HEADS, VALUE, RANK)
    latents, kept = torch.randn(1 + tables.numel(), BLOCK, width), torch.randn(1 + tables.numel(), BLOCK, dim)
    if is_equal:
        kept = kept.sign()
        kept[:, ::3] = 0.0
    index_queries, keys, weights = torch.randn(count, 3 * dim), torch.randn(count, dim), torch.randn(count, 3)
    index_queries = index_queries.sign() if is_equal else index_queries
    norm, key_norm = Norm(torch.randn(RANK), 1e-6), Norm(torch.randn(dim), 1e-6, torch.randn(dim), is_centred=True)
    found = []
    for ops in (OPS, PLAIN):
        plan = ops.plan_attention(batch, 0, None)
        turned = None if is_equal else angles
        index = IndexInputs(index_queries, keys, weights, kept.clone(), slots, key_norm, turned, plan, INDEXER)
        found.append(
            Step(index, LatentInputs(queries, entries, latents.clone(), slots, norm, angles, *matrices, plan, 0.3))
        )
    return found[0], found[1]


@pytest.mark.parametrize("lengths", [DECODE, MIXED, [(21, 33)]], ids=["decode", "mixed", "chunk"])
def test_equal_to_the_reference(lengths: list[tuple[int, int]]) -> None:
    mine, plain = steps(lengths)
    assert_near(mine.run(OPS), plain.run(PLAIN))
    assert_near(mine.index.kept, plain.index.kept)
    assert_near(mine.attention.latents, plain.attention.latents)


@pytest.mark.parametrize("programs", [0, 100, 1000], ids=["one program a token", "few", "several"])
def test_of_equal_scores_the_first_are_chosen(programs: int) -> None:
    """Tokens before the last, whose sums are the same in any order; in tiles smaller than a context"""
    mine, plain = steps([(1, 90), (30, 60)], is_equal=True)
    with patch.multiple(sparse, CHOOSE_TILE=16, CHOOSE_PROGRAMS=programs):
        chosen = OPS.choose_entries(mine.index)
    expected: dict[int, list[int]] = {}
    for task, seen in zip(plain.index.plan, PLAIN.choose_entries(plain.index), strict=True):
        tokens = torch.arange(31)[task.tokens].tolist()
        expected |= dict(zip(tokens, (one.nonzero().flatten().tolist() for one in seen.flatten(0, 1)), strict=True))
    found = [row[:count].tolist() for row, count in zip(chosen.positions, chosen.counts.tolist(), strict=True)]
    assert found == [expected[token] for token in range(31)] and max(map(len, found)) == INDEXER.top_k


def test_in_a_short_context_everything_is_seen() -> None:
    mine, plain = steps([(1, INDEXER.top_k), (3, 7)])
    assert OPS.choose_entries(mine.index) is None
    assert_near(mine.run(OPS), plain.run(PLAIN))
    assert_near(mine.index.kept, plain.index.kept)


@pytest.mark.parametrize("splits", [2, 4])
def test_any_number_of_splits_and_of_tokens_at_a_time(splits: int) -> None:
    mine, plain = steps(DECODE)
    with patch.multiple(sparse, num_latent_splits=lambda *_: splits, MAX_SCORES=300):
        assert_near(mine.run(OPS), plain.run(PLAIN))
