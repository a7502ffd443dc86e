"""The sampler as a whole: distribution, independence of rows bit for bit, history, and rows that fail alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch

from tests.support import plain_sampler as plain
from tests.support.sampler_rows import draw_alone, new_row, plan
from tokenmill.params import INT64_MAX, INT64_MIN, Watermark
from tokenmill.sampling.sampler import Sampler

MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 50},
    {"top_p": 0.999},
    {"typical_p": 0.8},
    {"min_p": 0.02, "temperature": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {1: 4.0, 900: -3.0}},
    {"allowed_token_ids": list(range(100, 700))},
    {"banned_token_ids": [5, 6, 7]},
    {"min_tokens": 5, "stops": [2, 3]},
    {"top_k": 400, "top_p": 0.7, "min_p": 0.001, "typical_p": 0.95, "temperature": 0.9},
    {"repetition_penalty": 0.8, "top_p": 0.5},
    {"temperature": 1e-5},
    {"top_n_sigma": 1.5, "top_a": 0.1, "epsilon_cutoff": 1e-4, "no_repeat_ngram_size": 2, "xtc_probability": 0.5},
    {"eta_cutoff": 2e-3, "temperature": 1.5},
    {"dynatemp_range": 0.5, "dynatemp_exponent": 1.3, "temperature": 0.9},
    {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.8},
    {"dry_multiplier": 0.8, "dry_allowed_length": 0, "dry_break_ids": [3]},
    {"watermark": Watermark(key=5), "temperature": 0.7},
    {"watermark": Watermark(key=5, context=2), "temperature": 0.0},
    {"thinking_budget": 3, "think_start_ids": [1], "think_end_ids": [7, 8], "starts_thinking": True},
    {"logits_processors": [lambda output, logits: logits.index_fill(0, torch.tensor(output[:1]), 9.0)], "top_k": 9},
]


def draws(logits: list[float], count: int, **params: Any) -> Counter[int]:
    """`count` draws from one distribution, by consecutive positions of one seed."""
    sampler = Sampler(len(logits), 1, "cpu")
    sampler.add_row(new_row(seed=123, **params))
    batch = torch.tensor(logits).repeat(50, 1)
    plans = [[plan(0, start + i) for i in range(50)] for start in range(0, count, 50)]
    return Counter(drawn.token_id for part in plans for drawn in sampler.sample(batch, part))


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        ({}, []),
        ({"temperature": 0.6}, [plain.temperature]),
        ({"top_k": 5}, [plain.top_k]),
        ({"top_p": 0.8}, [plain.top_p]),
        ({"min_p": 0.2}, [plain.min_p]),
        ({"typical_p": 0.7}, [plain.typical]),
        ({"eta_cutoff": 0.2}, [plain.eta]),
        ({"dynatemp_range": 0.4, "temperature": 0.9, "dynatemp_exponent": 0.7}, [plain.dynatemp]),
        ({"temperature": 0.7, "min_p": 0.1, "eta_cutoff": 0.05}, [plain.temperature, plain.min_p, plain.eta]),
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any], steps: list[Any]) -> None:
    rng = random.Random(4)
    logits = [rng.gauss(0, 1.2) for _ in range(17)]
    wanted = logits
    for step in steps:
        wanted = step(wanted, new_row(**params).params)
    value, freedom = plain.chi_square(draws(logits, 20000, **params), plain.softmax(wanted))
    assert value < plain.chi_square_limit(freedom)


@pytest.mark.parametrize(("vocab", "num_threads"), [(1000, 1), (1024, 1), (1024, 2), (33001, 2)])
def test_a_row_does_not_see_its_neighbours(vocab: int, num_threads: int) -> None:
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    history = [random.Random(i).choices(range(vocab), k=30) for i in range(len(MIXED))]
    rows = [
        new_row(i, seed=i * 7 - 50, prompt=history[i][:20], output=history[i][20:], **params)
        for i, params in enumerate(MIXED)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = [draw_alone(logits[i], rows[i], output_index=i, num_logprobs=i % 4) for i in range(len(rows))]
        many = len(MIXED)
        for order in (range(many - 1, -1, -1), random.Random(1).sample(range(many), many), [3, 0, 16, 5, 19]):
            sampler = Sampler(vocab, many, "cpu")
            for row in rows:
                sampler.add_row(row)
            together = sampler.sample(logits[list(order)], [plan(i, i, i % 4) for i in order])
            assert together == [alone[i] for i in order]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [INT64_MIN, -1, 0, 1, INT64_MAX])
def test_any_seed_draws_and_repeats(seed: int) -> None:
    logits = torch.zeros(5000)
    first = [draw_alone(logits, new_row(seed=seed), i).token_id for i in range(8)]
    assert first == [draw_alone(logits, new_row(seed=seed), i).token_id for i in range(8)]
    assert len(set(first)) > 1
    assert first != [draw_alone(logits, new_row(seed=seed ^ 2), i).token_id for i in range(8)]


def test_resumed_row_equals_the_row_that_was_never_interrupted() -> None:
    params: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "top_p": 0.9,
    }
    steps = torch.randn(30, 200, generator=torch.Generator().manual_seed(0))
    whole, broken = Sampler(200, 1, "cpu"), Sampler(200, 4, "cpu")
    whole.add_row(new_row(0, 9, prompt=[1, 2, 3], **params))
    broken.add_row(new_row(0, 9, prompt=[1, 2, 3], **params))
    output: list[int] = []
    row = 0
    for index, logits in enumerate(steps.split(1)):
        if index % 7 == 6:  # preempted, and resumed in another row
            broken.free_row(row)
            row = (row + 1) % 4
            broken.add_row(new_row(row, 9, prompt=[1, 2, 3], output=output, **params))
        drawn = whole.sample(logits, [plan(0, index, 2)])
        assert broken.sample(logits, [plan(row, index, 2)]) == drawn
        output.append(drawn[0].token_id)


def test_xtc_strikes_as_often_as_asked() -> None:
    logits = [3.0, 2.0, 1.0, 0.0]
    params = {"xtc_probability": 0.3, "xtc_threshold": 0.1}
    struck = plain.softmax(plain.xtc(logits, new_row(**params).params))
    mixed = [0.7 * a + 0.3 * b for a, b in zip(plain.softmax(logits), struck, strict=True)]
    value, freedom = plain.chi_square(draws(logits, 20000, **params), mixed)
    assert value < plain.chi_square_limit(freedom)


def test_drawn_tokens_enter_the_ngrams() -> None:
    sampler = Sampler(3, 1, "cpu")
    sampler.add_row(new_row(temperature=0.0, no_repeat_ngram_size=2, prompt=[0]))
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    tokens = [0] + [sampler.sample(logits, [plan(0, i)])[0].token_id for i in range(5)]
    pairs = list(itertools.pairwise(tokens))
    assert tokens[:3] == [0, 0, 1]
    assert len(set(pairs)) == len(pairs)
    spent = sampler.sample(logits, [plan(0, 5)])[0]  # 0 has been followed by every token
    assert spent.error is not None
    assert "no_repeat_ngram_size" in spent.error


def test_drawn_tokens_enter_the_penalties() -> None:
    sampler = Sampler(50, 1, "cpu")
    sampler.add_row(new_row(temperature=0.0, frequency_penalty=2.0))
    logits = torch.arange(50, dtype=torch.float32).unsqueeze(0)
    tokens = [sampler.sample(logits, [plan(0, i)])[0].token_id for i in range(5)]
    wanted: list[int] = []
    for _ in range(5):
        p = new_row(frequency_penalty=2.0).params
        edited = plain.penalties(logits[0].tolist(), p, [], wanted)
        wanted.append(edited.index(max(edited)))
    assert tokens == wanted


def test_adding_a_row_again_replaces_all_it_held() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    sampler = Sampler(3, 1, "cpu")
    sampler.add_row(new_row(temperature=0.0, banned_token_ids=[1], repetition_penalty=5.0, output=[2]))
    sampler.add_row(new_row(temperature=0.0))
    assert sampler.sample(logits, [plan()])[0].token_id == 1
    sampler.add_row(new_row(temperature=0.0, frequency_penalty=2.0, output=[1]))
    assert sampler.sample(logits, [plan()])[0].token_id == 2


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 40)
    logits[1, [7, 30]] = 1.0
    logits[2, [39]] = 1.0
    sampler = Sampler(40, 3, "cpu")
    for row, params in itertools.product(
        range(3), [{"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {0: 0.0}}]
    ):
        sampler.add_row(new_row(row, **params))
        drawn = sampler.sample(logits[row : row + 1], [plan(row)])
        assert drawn[0].token_id == [0, 7, 39][row]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9, "typical_p": 0.9}, {"top_k": 3}])
@pytest.mark.parametrize("damage", ["nan", "all nan", "-inf", "+inf"])
def test_a_broken_row_fails_alone(params: dict[str, Any], damage: str) -> None:
    logits = torch.randn(3, 333, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(333, 3, "cpu")
    for row in range(3):
        sampler.add_row(new_row(row, seed=row, **params))
    sound = sampler.sample(logits, [plan(row, 0, 2) for row in range(3)])
    broken = logits.clone()
    if damage == "nan":
        broken[1, 200] = torch.nan
    elif damage == "+inf":
        broken[1, 200] = torch.inf
    else:
        broken[1] = torch.nan if damage == "all nan" else -torch.inf
    result = sampler.sample(broken, [plan(row, 0, 2) for row in range(3)])
    assert (result[0], result[2]) == (sound[0], sound[2])
    assert result[1].error is not None
    assert "NaN" in result[1].error
    assert result[1].logprobs is None


def test_a_row_that_excludes_every_token_says_so() -> None:
    row = new_row(allowed_token_ids=[1, 2], min_tokens=3, stops=[1, 2])
    drawn = draw_alone(torch.zeros(10), row)
    assert drawn.error is not None
    assert "allowed_token_ids" in drawn.error


@pytest.mark.parametrize(
    "params", [{"logit_bias": {10: 1.0}}, {"allowed_token_ids": [-1]}, {"banned_token_ids": [10**9]}]
)
def test_a_foreign_token_id_fails_its_row_only(params: dict[str, Any]) -> None:
    sampler = Sampler(10, 2, "cpu")
    sampler.add_row(new_row(0, **params))
    sampler.add_row(new_row(1, seed=3))
    refused, fine = sampler.sample(torch.zeros(2, 10), [plan(0), plan(1)])
    assert refused.error is not None
    assert next(iter(params)) in refused.error
    assert fine == draw_alone(torch.zeros(10), new_row(0, seed=3))


def test_the_callers_logits_stay_as_they_were() -> None:
    logits = torch.randn(len(MIXED), 1008, generator=torch.Generator().manual_seed(3))
    copy = logits.clone()
    sampler = Sampler(1008, len(MIXED), "cpu")
    for row, params in enumerate(MIXED):
        sampler.add_row(new_row(row, prompt=[1, 2], **params))
    sampler.sample(logits, [plan(row, 0, 3) for row in range(len(MIXED))])
    assert torch.equal(logits, copy)


def test_no_rows_no_tokens() -> None:
    assert Sampler(10, 1, "cpu").sample(torch.zeros(0, 10), []) == []
