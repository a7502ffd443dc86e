"""Native draws give exactly the token that the steps give: any knobs, any distribution, any instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rows_for_tests import new_row, plan

from tokenmill.ops.cpu import instruction_sets, is_available
from tokenmill.ops.cpu.availability import native
from tokenmill.sampling import native_draws
from tokenmill.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

SETS = instruction_sets() if is_available()[0] else []
VOCAB = 3001  # no whole number of vectors
KNOBS: list[dict[str, Any]] = [
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
    """Of every distribution with all knobs and some random numbers, many rows to a call."""
    sampler = Sampler(VOCAB, len(KNOBS), "cpu")
    for row, knobs in enumerate(KNOBS):
        sampler.add_row(new_row(row, seed=row, **knobs))
    tokens = []
    for line in logits:
        for index in range(6):
            plans = [plan(row, index) for row in range(len(KNOBS))]
            tokens += [one.token_id for one in sampler.sample(line.repeat(len(plans), 1), plans)]
    return tokens


def test_the_same_tokens_as_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = distributions()
    found = drawn_tokens(logits)
    monkeypatch.setattr(native_draws, "is_available", lambda: (False, "switched off"))
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
    for row, knobs in enumerate(kinds):
        sampler.add_row(new_row(row, seed=row, **knobs))
    logits = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(1))
    alone = [sampler.sample(logits[row : row + 1], [plan(row)])[0] for row in range(len(kinds))]
    logits[3, 7] = torch.nan
    together = sampler.sample(logits, [plan(row) for row in range(len(kinds))])
    assert together[3].error is not None
    assert [one for row, one in enumerate(together) if row != 3] == [one for row, one in enumerate(alone) if row != 3]


@pytest.mark.parametrize("isa", SETS)
def test_every_instruction_set_shapes_and_draws_alike(isa: str) -> None:
    logits = distributions()
    knobs = [(temperature, top_k) for temperature in (0.0, 0.7, 9.0) for top_k in (0, 1, 33, 700, 2999)]
    for temperature, top_k in knobs:
        shaped, sound = shaped_rows(logits, temperature, top_k, isa)
        plain = logits if temperature == 0.0 else (logits - logits.amax(-1, keepdim=True)) / temperature
        if top_k:
            plain = plain.masked_fill(plain < plain.topk(top_k).values[:, -1:], -torch.inf)
        assert sound.all()
        assert torch.equal(shaped[:, :VOCAB], plain)
        assert (shaped[:, VOCAB:] == -torch.inf).all()
        best = drawn_rows(torch.softmax(shaped, -1), SETS[0])
        assert np.array_equal(drawn_rows(torch.softmax(shaped, -1), isa), best)


def shaped_rows(logits: torch.Tensor, temperature: float, top_k: int, isa: str) -> tuple[torch.Tensor, np.ndarray]:
    count = len(logits)
    out, sound = torch.empty(count, VOCAB + -VOCAB % 16), np.zeros(count, np.uint8)
    temperatures, top_ks = np.full(count, temperature, np.float32), np.full(count, top_k)
    native().shape_rows(logits, np.arange(count), temperatures, top_ks, out, sound, isa)
    return out, sound


def drawn_rows(probs: torch.Tensor, isa: str) -> np.ndarray:
    count, rng = len(probs), np.random.default_rng(0)
    tokens = [np.zeros(count, np.int64) for _ in range(9)]
    for number, into in enumerate(tokens):
        top_ps, min_ps = np.full(count, (1.0, 0.9, 0.3)[number % 3]), np.full(count, (0.0, 0.1)[number % 2])
        native().draw_rows(probs, top_ps, min_ps, rng.random(count), np.ones(count, np.uint8), into, isa)
    return np.stack(tokens)
