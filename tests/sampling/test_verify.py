"""Drafts are accepted exactly where they equal what would have been drawn one token at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.sampler_rows import new_row
from tokenmill.params import Watermark
from tokenmill.sampling.sampler import Sampler
from tokenmill.types import RowPlan

VOCAB = 40
PARAM_NAMES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "cut": {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "penalised greedy": {"temperature": 0.0, "presence_penalty": 1.5},
    "no repeats": {"temperature": 0.5, "no_repeat_ngram_size": 2},
    "held back": {"temperature": 1.0, "min_tokens": 3},
    "mirostat": {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0},
    "dry": {"temperature": 0.6, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    "watermarked": {"temperature": 1.0, "watermark": Watermark(key=7)},
}


def logits_after(history: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(history) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 2


def one_by_one(params: dict[str, Any], seed: int, count: int) -> list[int]:
    sampler = Sampler(VOCAB, 1, "cpu")
    sampler.add_row(new_row(0, seed, prompt=[1, 2, 3], stops=[5, 6], **params))
    tokens: list[int] = []
    for index in range(count):
        plan = RowPlan(row=0, start=2 + index, token_ids=[0], sample=True, output_index=index)
        tokens.append(sampler.sample(logits_after(tuple(tokens))[None], [plan])[0].token_id)
    return tokens


def drafted(sampler: Sampler, row: int, tokens: list[int], drafts: list[int]) -> tuple[RowPlan, torch.Tensor]:
    """The plan of a row that has said `tokens`, and its logits after each draft."""
    last = tokens[-1] if tokens else 3
    plan = RowPlan(
        row=row,
        start=2 + len(tokens),
        token_ids=[last, *drafts],
        sample=True,
        output_index=len(tokens),
        num_drafts=len(drafts),
        num_logprobs=0,
    )
    lines = [logits_after((*tokens, *drafts[:count])) for count in range(len(drafts) + 1)]
    return plan, torch.stack(lines)


@pytest.mark.parametrize("wrong", [0.0, 0.25, 1.0])
def test_rows_with_drafts_say_what_they_would_without(wrong: float) -> None:
    """All kinds of rows in one batch, each at its own pace."""
    rng = random.Random(wrong)
    expected = [one_by_one(params, row, 24) for row, params in enumerate(PARAM_NAMES.values())]
    sampler = Sampler(VOCAB, len(PARAM_NAMES), "cpu")
    for row, params in enumerate(PARAM_NAMES.values()):
        sampler.add_row(new_row(row, row, prompt=[1, 2, 3], stops=[5, 6], **params))
    said: list[list[int]] = [[] for _ in PARAM_NAMES]
    for _ in range(6):
        step = []
        for row, tokens in enumerate(said):
            right = expected[row][len(tokens) : len(tokens) + rng.randrange(4)]
            guesses = [token if rng.random() >= wrong else rng.randrange(VOCAB) for token in right]
            step.append(drafted(sampler, row, tokens, guesses))
        plans = [plan for plan, _ in step]
        sampler.observe(plans)
        drawn = sampler.verify(torch.cat([lines for _, lines in step]), plans)
        for tokens, plan, found in zip(said, plans, drawn, strict=True):
            assert 1 <= len(found) <= plan.num_drafts + 1
            assert wrong or len(found) == plan.num_drafts + 1
            assert all(one.error is None and one.logprobs is not None for one in found)
            tokens += [one.token_id for one in found]
    for tokens, right in zip(said, expected, strict=True):
        assert tokens == right[: len(tokens)]


def test_an_error_behind_a_right_draft_waits_for_its_own_step() -> None:
    sampler = Sampler(VOCAB, 1, "cpu")
    sampler.add_row(new_row(0, temperature=0.0))
    plan, logits = drafted(sampler, 0, [], [7])
    logits[0] = torch.nn.functional.one_hot(torch.tensor(7), VOCAB) * 5.0
    logits[1] = torch.nan
    (found,) = sampler.verify(logits, [plan])
    assert [one.token_id for one in found] == [7] and found[0].error is None


def test_an_error_at_the_first_place_is_the_row_s() -> None:
    sampler = Sampler(VOCAB, 1, "cpu")
    sampler.add_row(new_row(0, temperature=0.0))
    plan, logits = drafted(sampler, 0, [], [7])
    logits[0] = torch.nan
    (found,) = sampler.verify(logits, [plan])
    assert len(found) == 1 and found[0].error is not None
