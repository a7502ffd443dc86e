"""The promise: same prompt, same parameters, same seed → same tokens, whatever else is in the batch, however the
prompt was chunked, cached or preempted. 200 mixed requests run alone, then together in many ways; 80 with the torch
reference, which takes ten times as long for each.

With native kernels every logprob is the same to the last bit; torch's own matrix products vary a little with the
number of rows, so the reference is held to 1e-5.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.ops.cpu import is_available
from tokenmill.params import Watermark
from tokenmill.types import PromptRequest

NUM_REQUESTS = 200
REQUESTS_OF = {"reference": 80, "cpu": NUM_REQUESTS}
PREEMPTIONS_OF = {"reference": 6, "cpu": 24}  # at least, where the pool is too small
TOLERANCE = {"reference": 5e-5, "cpu": 0.0}  # torch adds up in another order for other shapes, and on other CPUs
SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one token at a time": {"token_budget": 16, "max_running": 16},
    "small odd chunks": {"token_budget": 37, "max_running": 23},
    "large chunks, no prefix cache": {"token_budget": 512, "prefix_caching": False},
    "a pool that is far too small": {"num_blocks": 30, "max_running": 32},
    "too small, no prefix cache, small chunks": {
        "num_blocks": 30, "max_running": 32, "token_budget": 48, "prefix_caching": False,
    },
}  # fmt: skip
CHUNK_OF_ONE = {"token_budget": 1, "max_running": 1, "prefix_caching": False}

Answers = dict[tuple[int, int], tuple[list[int], list[float]]]  # (request, choice) → tokens, logprobs


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    params: SamplingParams


def make_asks(seed: int, count: int = NUM_REQUESTS) -> list[Ask]:
    rng = random.Random(seed)
    stems = [[1, *(rng.randrange(3, 512) for _ in range(rng.choice([0, 15, 40, 90])))] for _ in range(12)]
    return [Ask(rng.choice(stems) + _tail(rng), _params_of(rng)) for _ in range(count)]


def _tail(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(rng.randrange(0, 40))]


def _params_of(rng: random.Random) -> SamplingParams:
    params = _common_knobs(rng)
    assert params.seed is not None
    rng = random.Random(params.seed)  # of its own: how many and how long the requests are is left as it was
    return msgspec.structs.replace(
        params,
        mirostat=rng.choice([0, 0, 0, 2]),
        mirostat_tau=rng.choice([3.0, 5.0]),
        dry_multiplier=rng.choice([0.0, 0.0, 0.8]),
        dry_sequence_breakers=rng.choice([None, []]),
        dynatemp_range=rng.choice([0.0, 0.0, 0.5]),
        eta_cutoff=rng.choice([0.0, 0.0, 1e-3]),
        watermark=rng.choice([None, None, None, Watermark(key=rng.randrange(100), context=rng.choice([1, 3]))]),
    )


def _common_knobs(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.4]),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        typical_p=rng.choice([1.0, 1.0, 0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        logit_bias=rng.choice([None, None, {rng.randrange(512): 3.0}]),
        seed=rng.randrange(-(2**63), 2**63),
        min_tokens=rng.choice([0, 0, 4]),
        max_tokens=rng.choice([rng.randrange(4, 20), rng.randrange(4, 20), rng.randrange(40, 90)]),
        logprobs=0,
    )


def run_together(llm: LLM, asks: list[Ask], rng: random.Random | None) -> Answers:
    """With `rng` the requests arrive in random order at random moments, else one after the other, each alone."""
    waiting = list(enumerate(asks))
    if rng is not None:
        rng.shuffle(waiting)
    answers: Answers = {}
    while waiting or llm.core.has_work:
        arriving = rng.randrange(0, 12) if rng is not None else int(not llm.core.has_work)
        for number, ask in waiting[:arriving]:
            asked = PromptRequest(prompt=ask.prompt, params=ask.params, request_id=str(number))
            llm.core.add(llm.frontend.input_processor(512).process(asked))
        waiting = waiting[arriving:]
        for output in llm.core.step():
            assert output.error is None, output
            tokens, logprobs = answers.setdefault((int(output.request_id), output.index), ([], []))
            tokens += output.token_ids
            logprobs += [one.logprob for one in output.logprobs or []]
    return answers


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not is_available()[0]:
        pytest.skip(is_available()[1])
    return str(request.param)


@pytest.fixture(scope="module")
def alone(backend: str, stories_dir: Path) -> Answers:
    llm = LLM(str(stories_dir), backend=backend, threads=1, prefix_caching=False)
    return run_together(llm, make_asks(7, REQUESTS_OF[backend]), rng=None)


@pytest.mark.parametrize("setting", SETTINGS)
def test_batches_change_nothing(setting: str, backend: str, alone: Answers, stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), backend=backend, threads=1, speculate="off", **SETTINGS[setting])
    together = run_together(llm, make_asks(7, REQUESTS_OF[backend]), random.Random(setting))
    _assert_same(alone, together, TOLERANCE[backend])
    stats = llm.core.stats()
    assert stats.kv_blocks_used == 0
    if "num_blocks" in SETTINGS[setting]:
        assert stats.preemptions >= PREEMPTIONS_OF[backend], "the pool was meant to be too small"
    if SETTINGS[setting].get("prefix_caching", True):
        assert stats.prefix_hit_tokens > 0


def test_a_prompt_fed_token_by_token_changes_nothing(backend: str, alone: Answers, stories_dir: Path) -> None:
    few = [(number, ask) for number, ask in enumerate(make_asks(7, REQUESTS_OF[backend])) if ask.params.n == 1][:10]
    llm = LLM(str(stories_dir), backend=backend, threads=1, **CHUNK_OF_ONE)
    together = run_together(llm, [ask for _, ask in few], rng=None)
    expected = {(place, 0): alone[(number, 0)] for place, (number, _) in enumerate(few)}
    _assert_same(expected, together, TOLERANCE[backend])


def _assert_same(expected: Answers, found: Answers, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, (tokens, logprobs) in expected.items():
        assert found[key][0] == tokens, key
        worst = max(abs(a - b) for a, b in zip(found[key][1], logprobs, strict=True))
        assert worst <= tolerance, (key, worst)
