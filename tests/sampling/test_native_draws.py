"""Native draws give exactly the token that the steps give: any parameters, any distribution, any instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampler_rows import new_row, plan
from tokenmill.ops.batch import DrawParams
from tokenmill.ops.cpu import instruction_sets, is_available
from tokenmill.ops.cpu.availability import native
from tokenmill.sampling import samples
from tokenmill.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

SETS = instruction_sets() if is_available()[0] else []
VOCAB = 3001  # no whole number of vectors
PARAM_NAMES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.0 - 1e-12},  # 1 as a float32, and yet a step
    {"temperature": 1e-5},
    {"temperature": 80.0},
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.8},
    {"top_k": 190, "temperature": 1.7},
    {"top_k": 1500},
    {"top_k": VOCAB - 1},
    {"top_k": 1_000_000},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.999999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 1e-12},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 0.7},
    {"top_p": 0.5, "min_p": 0.3, "temperature": 2.0},
]


def distributions() -> torch.Tensor:
    """Peaked, flat, all equal, many equals, parts excluded, hardly anything left, nearly underflowing."""
    draw = torch.Generator().manual_seed(5)
    noise = torch.randn(7, VOCAB, generator=draw)
    rows = [noise[0] * 8, noise[1] * 0.01, torch.zeros(VOCAB), noise[3].round(), noise[4] * 3, noise[5], noise[6] * 100]
    rows[4][::2] = -torch.inf
    rows[5][3:] = -torch.inf
    return torch.stack(rows)


def drawn_tokens(logits: torch.Tensor) -> list[int]:
    """Draw from every distribution with all parameters and some random numbers, many rows per call."""
    sampler = Sampler(VOCAB, len(PARAM_NAMES), "cpu")
    for row, params in enumerate(PARAM_NAMES):
        sampler.add_row(new_row(row, seed=row, **params))
    tokens = []
    for line in logits:
        for index in range(6):
            plans = [plan(row, index) for row in range(len(PARAM_NAMES))]
            tokens += [one.token_id for one in sampler.sample(line.repeat(len(plans), 1), plans)]
    return tokens


def test_the_same_tokens_as_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = distributions()
    found = drawn_tokens(logits)
    monkeypatch.setattr(samples, "is_available", lambda: (False, "switched off"))
    assert found == drawn_tokens(logits)


def test_other_rows_and_broken_ones_keep_their_places() -> None:
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.8},
        {"temperature": 0.0},
        {"typical_p": 0.7},
        {"top_k": 5},
        {"min_p": 0.2},
    ]
    sampler = Sampler(VOCAB, len(kinds), "cpu")
    for row, params in enumerate(kinds):
        sampler.add_row(new_row(row, seed=row, **params))
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(1))
    alone = [sampler.sample(logits[row : row + 1], [plan(row)])[0] for row in range(len(kinds))]
    logits[3, 7] = torch.nan
    together = sampler.sample(logits, [plan(row) for row in range(len(kinds))])
    assert together[3].error is not None
    assert [one for row, one in enumerate(together) if row != 3] == [one for row, one in enumerate(alone) if row != 3]


@pytest.mark.parametrize("isa", SETS)
def test_every_instruction_set_has_the_same_softmax_and_draws(isa: str) -> None:
    logits = torch.cat([distributions(), torch.full((1, VOCAB), -torch.inf), torch.full((1, VOCAB), torch.nan)])
    found, best = torch.empty_like(logits), torch.empty_like(logits)
    native().softmax_rows(logits, found, isa)
    native().softmax_rows(logits, best, SETS[0])
    assert torch.allclose(found[:-2], torch.softmax(logits[:-2].double(), -1).float(), rtol=2e-6, atol=1e-15)
    assert (found[-2:] == 0).all()
    if isa == "portable":  # has no fused multiply-add: the last bit may differ
        return
    assert torch.equal(found, best)
    lines, rng = list(range(len(logits))), np.random.default_rng(0)
    for number in range(30):
        params = DrawParams(
            temperatures=[(0.0, 0.7, 9.0)[number % 3]] * len(lines),
            top_ks=[(0, 1, 33, 700, 2999)[number % 5]] * len(lines),
            top_ps=[(1.0, 0.9, 0.3)[number % 3]] * len(lines),
            min_ps=[(0.0, 0.1)[number % 2]] * len(lines),
            uniforms=rng.random(len(lines)).tolist(),
            is_greedy=[number == 7] * len(lines),
        )
        drawn = native().draw_rows(logits, lines, *params, isa)
        assert drawn == native().draw_rows(logits, lines, *params, SETS[0])
        assert drawn[-2:] == [-1, -1] and min(drawn[:-2]) >= 0
