"""Rows are cut into slices for the sampler, and nobody notices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tokenmill.guided.masks import StepMasks
from tokenmill.params import SamplingParams
from tokenmill.runner import runner as model_runner
from tokenmill.runner.runner import SlicedSampler
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.samples import Sample
from tokenmill.types import RowInit, RowPlan

VOCAB, ROWS = 50, 7


class WatchedSampler(Sampler):
    def __init__(self) -> None:
        super().__init__(VOCAB, ROWS, "cpu")
        self.slices: list[int] = []

    def sample(self, logits: torch.Tensor, rows: list[RowPlan], masks: StepMasks | None = None) -> list[Sample]:
        self.slices.append(len(rows))
        return super().sample(logits, rows, masks)


def drawn(sampler: Sampler | SlicedSampler, logits: torch.Tensor) -> Sequence[Sample]:
    for row in range(ROWS):
        params = SamplingParams(temperature=0.9, top_p=0.8)
        sampler.add_row(
            RowInit(row=row, params=params, seed=row, prompt_token_ids=[1], output_token_ids=[], stop_token_ids=[])
        )
    return sampler.sample(logits, [RowPlan(row=row, start=0, token_ids=[1]) for row in range(ROWS)])


def test_slices_draw_what_all_rows_together_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_HOST_LOGITS", 3 * VOCAB + 1)
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    watched = WatchedSampler()
    assert drawn(SlicedSampler(watched, VOCAB), logits) == drawn(Sampler(VOCAB, ROWS, "cpu"), logits)
    assert watched.slices == [3, 3, 1]


def test_a_vocabulary_larger_than_a_slice_is_drawn_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_HOST_LOGITS", 10)
    watched = WatchedSampler()
    drawn(SlicedSampler(watched, VOCAB), torch.zeros(ROWS, VOCAB))
    assert watched.slices == [1] * ROWS


def test_rows_with_drafts_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_HOST_LOGITS", 4 * VOCAB)
    logits = torch.randn(ROWS + 5, VOCAB, generator=torch.Generator().manual_seed(1))
    plans = [
        RowPlan(row=row, start=0, token_ids=[1, *[2] * drafts], num_drafts=drafts, sample=True)
        for row, drafts in enumerate((0, 2, 0, 0, 3, 0, 0))
    ]
    found = []
    for sampler in (SlicedSampler(Sampler(VOCAB, ROWS, "cpu"), VOCAB), Sampler(VOCAB, ROWS, "cpu")):
        for row in range(ROWS):
            params = SamplingParams(temperature=0.9)
            sampler.add_row(
                RowInit(row=row, params=params, seed=row, prompt_token_ids=[1], output_token_ids=[], stop_token_ids=[])
            )
        found.append(sampler.verify(logits, plans))
    assert found[0] == found[1] and len(found[0]) == ROWS
