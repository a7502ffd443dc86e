"""Sampling on the device against the sampler on the CPU, in the interpreter: the same tokens for the same requests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenmill.ops.triton.sampling import penalties, sample
from tokenmill.params import Guided, SamplingParams
from tokenmill.runner.device_sampler import DeviceSampler
from tokenmill.sampling.sampler import Sampler
from tokenmill.types import RowInit, RowPlan

VOCAB, ROWS, STEPS = 150, 14, 6


@pytest.fixture(autouse=True)
def several_blocks_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BLOCK", 64)
    monkeypatch.setattr(penalties, "BLOCK", 64)
    monkeypatch.setattr(sample, "FEW", 16)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 1, 7, 500)),
        top_p=rng.choice((1.0, 0.0, 0.4, 0.95)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, -0.4)),
        logit_bias=rng.choice((None, {3: 5.0, 77: -2.0})),
        banned_token_ids=rng.choice((None, [1, 3, 9])),
        min_tokens=rng.choice((0, 3)),
    )


def new_rows(rng: random.Random) -> list[RowInit]:
    return [
        RowInit(
            row=row,
            params=random_params(rng),
            seed=rng.getrandbits(60),
            prompt_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))],
            output_token_ids=[rng.randrange(VOCAB) for _ in range(rng.choice((0, 3)))],
            stop_token_ids=[2, 40],
        )
        for row in range(ROWS)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_same_tokens_as_on_the_cpu(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sampler, device = Sampler(VOCAB, ROWS, "cpu"), DeviceSampler(VOCAB, ROWS, torch.device("cpu"))
    rows = new_rows(rng)
    for new in rows:
        sampler.add_row(new)
    assert all(device.can_draw(new) for new in rows)
    device.take(rows)
    newest = torch.zeros(ROWS, dtype=torch.int64)
    for step in range(STEPS):
        logits = (torch.randn(ROWS, VOCAB) * 3).bfloat16().float()  # with equal values among them
        order = rng.sample(range(ROWS), ROWS)
        indices = [len(rows[row].output_token_ids) + step for row in order]
        drawing = zip(order, indices, strict=True)
        plans = [RowPlan(row=row, start=0, token_ids=[0], output_index=index) for row, index in drawing]
        expected = [drawn.token_id for drawn in sampler.sample(logits, plans)]
        numbers = torch.tensor([*order, -1], dtype=torch.int32)
        places = torch.tensor([*indices, 0], dtype=torch.int32)
        if step:  # feed the last step's tokens; twice, as when a launched step is discarded
            for _ in range(2):
                device.count_fed(numbers, places, torch.cat((newest[order], torch.zeros(1, dtype=torch.int64))))
        uniforms = torch.tensor([*device.uniforms(order, indices), 0.0], dtype=torch.float64)
        padded = torch.cat((logits, torch.randn(1, VOCAB)))
        drawn = device.draw(padded, numbers, places, uniforms, newest)
        assert drawn[:-1].tolist() == expected, (seed, step)
        assert newest[order].tolist() == expected


class RowMasks:
    """Random masks, as the sampler on the CPU reads them"""

    def __init__(self) -> None:
        self.table = np.random.default_rng(1).integers(-(2**31), 2**31, (ROWS, -(-VOCAB // 32)), dtype=np.int32)

    def bits(self, rows: list[int], num_drafts: list[int]) -> NDArray[np.uint8]:
        return self.table[rows].view(np.uint8)

    @property
    def num_words(self) -> int:
        return self.table.shape[1]

    def copy_to(self, room: NDArray[np.int32], rows: list[int]) -> None:
        room[:] = self.table[rows]


def test_masks_keep_what_a_grammar_allows() -> None:
    """Every second row has a grammar; a NaN under a mask is still found."""
    sampler, device = Sampler(VOCAB, ROWS, "cpu"), DeviceSampler(VOCAB, ROWS, torch.device("cpu"))
    rows = []
    for row in range(ROWS):
        guided = Guided("regex", "x") if row % 2 else None
        params = SamplingParams(temperature=row % 3 / 2, top_p=0.8, logit_bias={5: 3.0}, guided=guided)
        ids = [1]
        rows.append(
            RowInit(row=row, params=params, seed=row, prompt_token_ids=ids, output_token_ids=[], stop_token_ids=[])
        )
        sampler.add_row(rows[-1])
    assert all(device.can_draw(new) for new in rows)
    device.take(rows)
    masks: Any = RowMasks()
    logits = torch.randn(ROWS, VOCAB) * 3
    taken = int(np.flatnonzero(~masks.table[3:4].view(np.uint8) & 1)[0]) * 8  # a token that the fourth row may not draw
    logits[3, taken] = torch.nan
    plans = [RowPlan(row=row, start=0, token_ids=[0], output_index=0) for row in range(ROWS)]
    expected = [-1 if drawn.error else drawn.token_id for drawn in sampler.sample(logits, plans, masks)]
    numbers = torch.arange(ROWS, dtype=torch.int32)
    zeros, newest = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int64)
    device.keep_allowed(logits, numbers[1::2].clone(), masks, list(range(1, ROWS, 2)))
    uniforms = torch.tensor(device.uniforms(range(ROWS), [0] * ROWS), dtype=torch.float64)
    assert device.draw(logits, numbers, zeros, uniforms, newest).tolist() == expected
    assert expected[3] == -1 and sum(token >= 0 for token in expected) == ROWS - 1


def test_rows_that_cannot_be_sampled_are_marked() -> None:
    device = DeviceSampler(VOCAB, 3, torch.device("cpu"))
    params = (SamplingParams(), SamplingParams(banned_token_ids=list(range(VOCAB))), SamplingParams(temperature=0.0))
    device.take([
        RowInit(row=row, params=one, seed=1, prompt_token_ids=[1], output_token_ids=[], stop_token_ids=[])
        for row, one in enumerate(params)
    ])  # fmt: skip
    logits = torch.randn(3, VOCAB)
    logits[0, 70] = float("nan")
    logits[2, [100, 101]] = 50.0
    rows, zeros = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    newest = torch.zeros(3, dtype=torch.int64)
    drawn = device.draw(logits, rows, zeros, torch.full((3,), 0.5, dtype=torch.float64), newest)
    assert drawn.tolist() == [-1, -2, 100]


def test_requests_that_the_device_refuses() -> None:
    device = DeviceSampler(VOCAB, 1, torch.device("cpu"))

    def can(params: SamplingParams) -> bool:
        return device.can_draw(
            RowInit(row=0, params=params, seed=1, prompt_token_ids=[1], output_token_ids=[], stop_token_ids=[2])
        )

    assert can(SamplingParams(temperature=0.5, top_p=0.5)) and can(SamplingParams(temperature=0.0, min_tokens=2))
    assert not can(SamplingParams(typical_p=0.5)) and not can(SamplingParams(logprobs=1))
    assert not can(SamplingParams(temperature=1e-40)), "one over it is no float32"
    assert not can(SamplingParams(logit_bias={VOCAB: 1.0})), "an id that the model does not have"
    assert not can(SamplingParams(logit_bias={2: 1.0}, min_tokens=2))
    guided = Guided("regex", "[a-z]+")
    assert can(SamplingParams(guided=guided, top_k=5)) and not can(SamplingParams(guided=guided, min_tokens=2))
    assert not can(SamplingParams(guided=guided, presence_penalty=1.0)), "forced tokens would not be counted"
    assert not can(SamplingParams(guided=guided, ignore_eos=True)), "the end of a grammar is an exception"
    assert not can(SamplingParams(banned_token_ids=list(range(VOCAB)) * 4, allowed_token_ids=[1]))
