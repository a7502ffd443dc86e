"""Every logits step against its definition in plain Python, and against transformers where it has the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from tests.support import plain_sampler as plain
from tests.support.sampler_rows import new_row, plan
from tokenmill.params import SamplingParams
from tokenmill.sampling.fixed_point import to_fixed_probs
from tokenmill.sampling.rows import SamplerRows
from tokenmill.sampling.steps import LOGITS_STEPS, PROBS_STEPS, run_steps, steps_used

seeds = st.integers(0, 2**32 - 1)
vocabs = st.integers(2, 300)


def random_logits(seed: int, rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def after_steps(logits: torch.Tensor, lines: list[dict[str, Any]], output_index: int = 0) -> torch.Tensor:
    """The logits [S, vocab] after all steps, where line i has the parameters lines[i]."""
    rows = SamplerRows(logits.shape[-1], len(lines), torch.device("cpu"))
    for number, params in enumerate(lines):
        row = new_row(number, **params)
        rows.take(row, steps_used(row.params))
    in_use = rows.gather([plan(number, output_index) for number in range(len(lines))])
    shaped = run_steps(logits, in_use, LOGITS_STEPS)
    fixed_probs = to_fixed_probs(shaped)
    left = run_steps(fixed_probs, in_use, PROBS_STEPS)
    return shaped if left is fixed_probs else shaped.masked_fill((left == 0) & (fixed_probs > 0), -torch.inf)


def kept(logits: torch.Tensor | list[float]) -> set[int]:
    return set(torch.as_tensor(logits).isfinite().nonzero().flatten().tolist())


REFERENCES = {
    "top_k": (plain.top_k, st.integers(1, 320)),
    "top_p": (plain.top_p, st.floats(0.01, 0.999)),
    "min_p": (plain.min_p, st.floats(0.001, 1.0)),
    "typical_p": (plain.typical, st.floats(0.01, 0.999)),
    # never 2: two logits lie exactly two standard deviations apart
    "top_n_sigma": (plain.top_n_sigma, st.floats(0.1, 5.0).map(lambda n: n * 1.001)),
    "top_a": (plain.top_a, st.floats(0.001, 1.0)),
    "epsilon_cutoff": (plain.epsilon, st.floats(0.0001, 1.0)),
    "eta_cutoff": (plain.eta, st.floats(0.0001, 0.9)),
    "xtc_threshold": (plain.xtc, st.floats(0.001, 1.0)),
}
ALSO: dict[str, dict[str, Any]] = {"xtc_threshold": {"xtc_probability": 1.0}}


@pytest.mark.parametrize("param", REFERENCES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=seeds, vocab=vocabs)
def test_cut_keeps_what_its_definition_keeps(param: str, data: st.DataObject, seed: int, vocab: int) -> None:
    reference, values = REFERENCES[param]
    logits = random_logits(seed, 3, vocab)
    lines = [{param: data.draw(values), **ALSO.get(param, {})} for _ in range(3)]
    result = after_steps(logits, lines)
    for row, params, out in zip(logits, lines, result, strict=True):
        wanted = reference(row.double().tolist(), new_row(**params).params)
        assert kept(out) == kept(wanted)
        assert torch.equal(out[out.isfinite()], row[out.isfinite()])


HF_CUTS = [
    ("top_k", 7, hf.TopKLogitsWarper(7)),
    ("top_p", 0.8, hf.TopPLogitsWarper(0.8)),
    ("min_p", 0.05, hf.MinPLogitsWarper(0.05)),
    ("typical_p", 0.6, hf.TypicalLogitsWarper(0.6)),
    ("epsilon_cutoff", 0.003, hf.EpsilonLogitsWarper(0.003)),
    ("eta_cutoff", 0.003, hf.EtaLogitsWarper(0.003)),
]


@pytest.mark.parametrize(("param", "value", "warper"), HF_CUTS, ids=[param for param, _, _ in HF_CUTS])
@pytest.mark.parametrize("vocab", [50, 1000, 20011])
def test_cut_keeps_what_transformers_keeps(param: str, value: float, warper: Any, vocab: int) -> None:
    logits = random_logits(vocab, 8, vocab)
    ours = after_steps(logits, [{param: value}] * 8)
    theirs = warper(torch.zeros(8, 1, dtype=torch.long), logits.clone())
    assert torch.equal(ours, theirs)


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(1, 4, 500)
    history = torch.randint(0, 500, (4, 60), generator=torch.Generator().manual_seed(2))
    lines = [{"repetition_penalty": 1.3, "prompt": ids[:40], "output": ids[40:]} for ids in history.tolist()]
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    torch.testing.assert_close(after_steps(logits, lines), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeat_ngram_equals_transformers(size: int) -> None:
    logits = random_logits(1, 4, 12)
    history = torch.randint(0, 12, (4, 30), generator=torch.Generator().manual_seed(size))
    lines = [{"no_repeat_ngram_size": size, "prompt": ids[:20], "output": ids[20:]} for ids in history.tolist()]
    theirs = hf.NoRepeatNGramLogitsProcessor(size)(history, logits.clone())
    assert theirs.isinf().any()
    assert torch.equal(after_steps(logits, lines), theirs)


tokens = st.lists(st.integers(0, 39), max_size=80)


@settings(max_examples=60, deadline=None)
@given(
    seed=seeds,
    prompt=tokens,
    output=tokens,
    repetition=st.floats(0.5, 2.0),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalties(
    seed: int, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> None:
    logits = random_logits(seed, 2, 40)
    params = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "prompt": prompt,
        "output": output,
    }
    result = after_steps(logits, [params, {}])
    wanted = plain.penalties(logits[0].tolist(), new_row(**params).params, prompt, output)
    torch.testing.assert_close(result[0], torch.tensor(wanted), rtol=1e-5, atol=1e-4)
    assert torch.equal(result[1], logits[1])


def test_bias_allowed_banned_and_stops_touch_their_rows_only() -> None:
    logits = random_logits(3, 5, 20)
    lines: list[dict[str, Any]] = [
        {"logit_bias": {3: 5.0, 19: -100.0}},
        {"allowed_token_ids": [1, 2, 2, 7]},
        {"banned_token_ids": [0, 19]},
        {"min_tokens": 4, "stops": [5, 6]},
        {},
    ]
    result = after_steps(logits, lines, output_index=3)
    wanted = plain.bias(logits[0].tolist(), new_row(**lines[0]).params)
    torch.testing.assert_close(result[0], torch.tensor(wanted))
    assert kept(result[1]) == {1, 2, 7}
    assert kept(result[2]) == set(range(20)) - {0, 19}
    assert kept(result[3]) == set(range(20)) - {5, 6}
    assert torch.equal(result[4], logits[4])


def test_stops_are_free_once_min_tokens_are_out() -> None:
    logits = random_logits(3, 1, 20)
    assert torch.equal(after_steps(logits, [{"min_tokens": 4, "stops": [5, 6]}], output_index=4), logits)


def test_steps_compose_in_the_documented_order() -> None:
    params: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "temperature": 0.7,
        "top_k": 40,
        "typical_p": 0.9,
        "top_p": 0.8,
        "min_p": 0.05,
    }
    for seed in range(20):
        logits = random_logits(seed, 1, 100)
        p = new_row(**params).params
        wanted = plain.penalties(logits[0].double().tolist(), p, [1, 2, 3], [4, 5])
        for step in (plain.temperature, plain.top_k, plain.typical, plain.top_p, plain.min_p):
            wanted = step(wanted, p)
        result = after_steps(logits, [{**params, "prompt": [1, 2, 3], "output": [4, 5]}])
        assert kept(result[0]) == kept(wanted)
        ours, theirs = result[0].double().softmax(-1), torch.tensor(wanted, dtype=torch.float64).softmax(-1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"typical_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}])
def test_the_strictest_cut_leaves_one_token(params: dict[str, Any]) -> None:
    assert len(kept(after_steps(random_logits(5, 1, 1000), [params])[0])) == 1


def test_top_p_of_a_flat_distribution_widens_its_search() -> None:
    logits = random_logits(6, 2, 20000, scale=0.01)
    result = after_steps(logits, [{"top_p": 0.95}] * 2)
    theirs = hf.TopPLogitsWarper(0.95)(torch.zeros(2, 1, dtype=torch.long), logits.double())
    for ours, theirs_row in zip(result, theirs, strict=True):
        # neighbours in this distribution differ by less than float32 resolves
        assert abs(len(kept(ours)) - len(kept(theirs_row))) <= 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-44, 1e-30, 1e-6, 100.0])
def test_extreme_temperatures_stay_numbers(temperature: float) -> None:
    result = after_steps(random_logits(7, 1, 100, scale=50.0), [{"temperature": temperature}])
    assert not result.isnan().any()
    assert result.amax() == 0.0


def test_rows_without_knobs_run_no_step() -> None:
    logits = random_logits(8, 3, 50)
    assert after_steps(logits, [{}, {"temperature": 0.0, "top_p": 0.1, "top_k": 3}, {"seed": 7}]) is logits


def test_the_documented_order_is_the_real_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "SAMPLING.md").read_text()
    told = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    names = {step.name for step in (*LOGITS_STEPS, *PROBS_STEPS)}
    assert [name for name in told if name in names] == [step.name for step in (*LOGITS_STEPS, *PROBS_STEPS)]


def test_every_knob_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "SAMPLING.md").read_text()
    told_elsewhere = {"n", "beam", "max_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens"}
    told_elsewhere |= {"context_shift", "context_keep"}
    missing = [name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in page]
    assert set(missing) <= told_elsewhere
