"""Random requests with all kinds of parameters, run alone or together, to compare their tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.params import Watermark
from tokenmill.types import PromptRequest

NUM_REQUESTS = 200
ALONE = {"token_budget": 512, "max_running": 4, "num_blocks": 200}  # room for one request and its samples


Answers = dict[tuple[int, int], tuple[list[int], list[float]]]  # (request, choice) → tokens, logprobs


@dataclass(frozen=True)
class RandomRequest:
    prompt: list[int]
    params: SamplingParams


def slow_but(default: Iterable[str], settings: Iterable[str]) -> list[object]:
    """Return test parameters: the settings in `default` run always, all others only with the slow tests."""
    kept = set(default)
    assert kept <= set(settings)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in settings]


def make_requests(seed: int, count: int = NUM_REQUESTS) -> list[RandomRequest]:
    rng = random.Random(seed)
    stems = [[1, *(rng.randrange(3, 512) for _ in range(rng.choice([0, 15, 40, 90])))] for _ in range(12)]
    return [RandomRequest(rng.choice(stems) + _tail(rng), _params_of(rng)) for _ in range(count)]


def _tail(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(rng.randrange(0, 40))]


def _params_of(rng: random.Random) -> SamplingParams:
    params = _common_params(rng)
    assert params.seed is not None
    rng = random.Random(params.seed)  # a separate generator: the number and the lengths of the requests stay the same
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


def _common_params(rng: random.Random) -> SamplingParams:
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


def run_together(llm: LLM, requests: list[RandomRequest], rng: random.Random | None) -> Answers:
    """Run the requests: with `rng` they arrive in random order at random times, else one after another, each alone."""
    waiting = list(enumerate(requests))
    if rng is not None:
        rng.shuffle(waiting)
    answers: Answers = {}
    while waiting or llm.core.has_work:
        arriving = rng.randrange(0, 12) if rng is not None else int(not llm.core.has_work)
        for number, drawn in waiting[:arriving]:
            request = PromptRequest(prompt=drawn.prompt, params=drawn.params, request_id=str(number))
            llm.core.add(llm.frontend.input_processor(512).process(request))
        waiting = waiting[arriving:]
        for output in llm.core.step():
            assert output.error is None, output
            tokens, logprobs = answers.setdefault((int(output.request_id), output.index), ([], []))
            tokens += output.token_ids
            logprobs += [one.logprob for one in output.logprobs or []]
    return answers


def add_greedy(llm: LLM, name: str, prompt: list[int], max_tokens: int, priority: int) -> None:
    """Add a greedy request to a core that may be running others."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    request = PromptRequest(prompt=prompt, params=params, request_id=name, priority=priority)
    llm.core.add(llm.frontend.input_processor(512).process(request))
