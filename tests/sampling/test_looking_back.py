"""Steps that look back: DRY, the thinking budget, the watermark, the user's own functions, mirostat's memory.

Each against its definition in plain Python; resumed rows, forks and rows that draw on are the same row.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import plain_sampler as plain
from tests.support.sampler_rows import draw_alone, new_row, plan
from tokenmill.params import SamplingParams, Watermark
from tokenmill.sampling.history import Breakers, RepeatRuns, ThinkingBudget, suffix_runs
from tokenmill.sampling.rows import SamplerRows
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.steps import LOGITS_STEPS, run_steps, steps_used
from tokenmill.sampling.watermark import detect_watermark, green_tokens, is_green

few_tokens = st.lists(st.integers(0, 5), max_size=60)
breaker_lists = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3)


def after_steps(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    row = new_row(**params)
    rows = SamplerRows(logits.shape[-1], 1, torch.device("cpu"))
    rows.take(row, steps_used(row.params))
    return run_steps(logits.unsqueeze(0), rows.gather([plan(0, len(row.output_token_ids))]), LOGITS_STEPS)[0]


# ── DRY ────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, deadline=None)
@given(
    prompt=few_tokens,
    output=few_tokens,
    breakers=breaker_lists,
    allowed=st.integers(0, 4),
    last_n=st.sampled_from([-1, 1, 5, 20, 100]),
    base=st.sampled_from([1.0, 1.3, 1.75]),
)
def test_dry(
    prompt: list[int], output: list[int], breakers: list[list[int]], allowed: int, last_n: int, base: float
) -> None:
    params: dict[str, Any] = {
        "dry_multiplier": 0.8,
        "dry_base": base,
        "dry_allowed_length": allowed,
        "dry_penalty_last_n": last_n,
    }
    single = [b[0] for b in breakers if len(b) == 1]
    longer = [b for b in breakers if len(b) > 1]
    logits = torch.zeros(6)
    result = after_steps(logits, prompt=prompt, output=output, dry_break_ids=single, dry_breakers=longer, **params)
    wanted = plain.dry([0.0] * 6, SamplingParams(**params), [*prompt, *output], breakers)
    torch.testing.assert_close(result, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@given(tokens=few_tokens)
def test_runs_kept_up_to_date_are_the_runs_of_the_whole(tokens: list[int]) -> None:
    grown = RepeatRuns((), Breakers((), ()))
    for token in tokens:
        grown.record(token)
    assert grown._runs[: len(tokens)].tolist() == suffix_runs(tokens)


def test_dry_breaks_a_loop_that_greedy_search_is_caught_in() -> None:
    steps = torch.zeros(40, 30)
    steps[torch.arange(40), torch.arange(40) % 3] = 5.0  # 0 1 2 0 1 2 ...
    tokens = {}
    for multiplier in (0.0, 1.0):
        sampler = Sampler(30, 1, "cpu")
        sampler.add_row(new_row(temperature=0.0, dry_multiplier=multiplier))
        tokens[multiplier] = [sampler.sample(steps[i : i + 1], [plan(0, i)])[0].token_id for i in range(40)]
    assert tokens[0.0] == [i % 3 for i in range(40)]
    assert tokens[1.0][:8] == tokens[0.0][:8]  # 1.75 ** 3 = 5.4: a repeat of five tokens is the longest
    assert tokens[1.0][8] != tokens[0.0][8]


# ── mirostat ───────────────────────────────────────────────────────────────────────────────────────────


def test_mirostat_keeps_and_remembers_as_defined() -> None:
    params = SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3)
    sampler = Sampler(50, 1, "cpu")
    sampler.add_row(new_row(seed=4, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3))
    mu = 4.0
    for index in range(60):
        logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(index)) * 2
        drawn = sampler.sample(logits, [plan(0, index)])[0]
        cut = plain.mirostat(logits[0].double().tolist(), mu)
        assert math.isfinite(cut[drawn.token_id])
        mu = plain.mirostat_mu(mu, drawn.token_id, cut, params)
        assert drawn.mirostat_mu == pytest.approx(mu, abs=1e-4)


def test_mirostat_brings_the_surprise_to_tau() -> None:
    """Over many draws from one broad distribution the mean surprise is what was asked for."""
    rng = random.Random(1)
    logits = torch.tensor([[rng.gauss(0, 2.0) for _ in range(2000)]])
    sampler = Sampler(2000, 1, "cpu")
    sampler.add_row(new_row(seed=2, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.1))
    mus = [sampler.sample(logits, [plan(0, index)])[0].mirostat_mu for index in range(2000)]
    # mu after n draws is 2 tau - eta * sum(surprise - tau)
    assert mus[-1] is not None
    mean_surprise = 3.0 - (mus[-1] - 6.0) / (0.1 * 2000)
    assert mean_surprise == pytest.approx(3.0, abs=0.1)


def test_mirostat_draws_follow_the_cut_distribution() -> None:
    logits = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0]
    seen: Counter[int] = Counter()
    for seed in range(6000):
        row = new_row(seed=seed, mirostat=2, mirostat_mu=3.0)
        seen[draw_alone(torch.tensor(logits), row).token_id] += 1
    value, freedom = plain.chi_square(seen, plain.softmax(plain.mirostat(logits, 3.0)))
    assert 1 < freedom < 6
    assert value < plain.chi_square_limit(freedom)


# ── all of them, interrupted ───────────────────────────────────────────────────────────────────────────

LOOKING_BACK: list[dict[str, Any]] = [
    {"mirostat": 2, "mirostat_tau": 2.5},
    {"mirostat": 2, "mirostat_tau": 4.0, "frequency_penalty": 0.3, "top_p": 0.95},
    {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_break_ids": [2]},
    {"watermark": Watermark(key=99, context=2)},
    {"thinking_budget": 6, "think_start_ids": [1, 2], "think_end_ids": [3, 4, 5], "starts_thinking": True},
    {"logits_processors": [lambda prompt, output, logits: logits - 0.1 * len(output) * logits.sign()]},
]


@pytest.mark.parametrize("params", LOOKING_BACK)
def test_resumed_row_equals_the_row_that_was_never_interrupted(params: dict[str, Any]) -> None:
    steps = torch.randn(40, 25, generator=torch.Generator().manual_seed(0))
    whole, broken = Sampler(25, 1, "cpu"), Sampler(25, 3, "cpu")
    for sampler in (whole, broken):
        sampler.add_row(new_row(0, 9, prompt=[1, 2, 3], **params))
    output: list[int] = []
    row, mu = 0, None
    for index, logits in enumerate(steps.split(1)):
        if index % 7 == 6:
            broken.free_row(row)
            row = (row + 1) % 3
            broken.add_row(new_row(row, 9, prompt=[1, 2, 3], output=output, mirostat_mu=mu, **params))
        drawn = whole.sample(logits, [plan(0, index, 2)])
        assert broken.sample(logits, [plan(row, index, 2)]) == drawn
        output.append(drawn[0].token_id)
        mu = drawn[0].mirostat_mu


# ── thinking budget ────────────────────────────────────────────────────────────────────────────────────


def thought(budget: int, drawn: list[int], *, is_open: bool) -> list[int]:
    """`drawn` with what is forced in place of what was drawn."""
    thinking = ThinkingBudget(budget, [1, 2], [3, 4], is_open=is_open)
    output = []
    for token in drawn:
        output.append(token if (forced := thinking.forced()) is None else forced)
        thinking.record(output[-1])
    return output


@pytest.mark.parametrize(
    ("budget", "drawn", "is_open", "wanted"),
    [
        (3, [9] * 6, True, [9, 9, 9, 3, 4, 9]),
        (0, [9] * 4, True, [3, 4, 9, 9]),
        (3, [9] * 6, False, [9] * 6),
        (2, [9, 1, 2, 9, 9, 9, 9, 9], False, [9, 1, 2, 9, 9, 3, 4, 9]),
        (3, [9, 3, 4, 9, 9, 9, 9], True, [9, 3, 4, 9, 9, 9, 9]),  # it ended by itself
        (2, [9, 3, 9, 9, 9, 9], True, [9, 3, 9, 3, 4, 9]),  # a beginning that came to nothing is thought
        (3, [9, 9, 3, 9, 9, 9], True, [9, 9, 3, 9, 3, 4]),
        (2, [9, 3, 4, 1, 2, 9, 9, 9, 9], True, [9, 3, 4, 1, 2, 9, 3, 4, 9]),  # one budget for all sections
        (1, [9, 3, 3, 3, 3], True, [9, 3, 4, 3, 3]),
    ],
)
def test_thinking_ends_when_the_budget_is_spent(
    budget: int, drawn: list[int], is_open: bool, wanted: list[int]
) -> None:
    assert thought(budget, drawn, is_open=is_open) == wanted


def test_the_budget_outweighs_every_other_knob() -> None:
    row = new_row(
        thinking_budget=0, think_end_ids=[7], think_start_ids=[1], starts_thinking=True, banned_token_ids=[7], top_k=1
    )
    assert draw_alone(torch.arange(10.0), row).token_id == 7


# ── watermark ──────────────────────────────────────────────────────────────────────────────────────────


def test_green_lists_are_what_the_hash_says() -> None:
    for context in ([5], [1, 2, 3], []):
        mark = Watermark(key=2**63 - 1, gamma=0.3, context=max(1, len(context)))
        lines = green_tokens(mark, context, 200).tolist()
        assert lines == [plain.green(mark, context, token) for token in range(200)]
        assert lines == [is_green(mark, context, token) for token in range(200)]
    share = green_tokens(Watermark(key=1, gamma=0.25), [7], 100_000).mean()
    assert share == pytest.approx(0.25, abs=0.01)
    assert not (green_tokens(Watermark(key=1), [7], 500) == green_tokens(Watermark(key=2), [7], 500)).all()


def test_watermark_adds_delta_to_green_tokens_and_only_them() -> None:
    mark = Watermark(key=8, gamma=0.4, delta=1.5, context=2)
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1))
    result = after_steps(logits, watermark=mark, prompt=[1, 2], output=[3])
    wanted = [x + 1.5 * plain.green(mark, [2, 3], token) for token, x in enumerate(logits.tolist())]
    torch.testing.assert_close(result, torch.tensor(wanted))


def test_watermarked_draws_follow_the_shifted_distribution() -> None:
    mark = Watermark(key=8, gamma=0.4, delta=1.5)
    logits = [random.Random(3).gauss(0, 1) for _ in range(20)]
    seen: Counter[int] = Counter()
    for seed in range(6000):
        seen[draw_alone(torch.tensor(logits), new_row(seed=seed, prompt=[4], watermark=mark)).token_id] += 1
    shifted = [x + 1.5 * plain.green(mark, [4], token) for token, x in enumerate(logits)]
    value, freedom = plain.chi_square(seen, plain.softmax(shifted))
    assert value < plain.chi_square_limit(freedom)


def test_reading_counts_each_pair_once() -> None:
    mark = Watermark(key=3, gamma=0.5)
    tokens = [1, 2, 1, 2, 1, 2, 3]
    pairs = [(1, 2), (2, 1), (2, 3)]
    reading = detect_watermark(mark, tokens)
    green = sum(plain.green(mark, [a], b) for a, b in pairs)
    assert (reading.num_scored, reading.num_green) == (3, green)
    assert reading.z_score == pytest.approx((green - 1.5) / math.sqrt(3 * 0.25))
    assert detect_watermark(mark, [1]).num_scored == 0


# ── the user's own functions ───────────────────────────────────────────────────────────────────────────


def test_processors_see_the_row_and_change_it_in_order() -> None:
    seen: list[tuple[list[int], list[int], int]] = []

    def watch(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt, output, len(logits)))
        return logits

    def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[7] = 100.0  # the row's own copy: changing it in place is fine
        return logits

    logits = torch.zeros(11)
    row = new_row(temperature=0.0, prompt=[1, 2], output=[3], logits_processors=[watch, force])
    assert draw_alone(logits, row).token_id == 7
    assert seen == [([1, 2], [3], 11)]
    assert not logits.any()


@pytest.mark.parametrize("wrong", [lambda o, x: x[:3], lambda o, x: None, lambda o, x: x / 0 + o[99]])
def test_a_processor_that_fails_ends_its_own_row(wrong: Any) -> None:
    sampler = Sampler(10, 2, "cpu")
    sampler.add_row(new_row(0, logits_processors=[wrong]))
    sampler.add_row(new_row(1, seed=3))
    failed, fine = sampler.sample(torch.zeros(2, 10), [plan(0), plan(1)])
    assert failed.error is not None and "logits processor" in failed.error
    assert fine == draw_alone(torch.zeros(10), new_row(0, seed=3))
