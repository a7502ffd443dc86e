"""The promise: same prompt, same parameters, same seed → same tokens, whatever else is in the batch, however the
prompt was chunked, cached or preempted. 200 mixed requests run alone, then together in many ways; 60 with the torch
reference, which takes ten times as long for each.

With native kernels every logprob is the same to the last bit; torch's own matrix products vary a little with the
number of rows, so the reference is held to 1e-5.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.mixed_requests import (
    NUM_REQUESTS,
    Answers,
    make_requests,
    run_together,
    slow_but,
)
from tokenmill import LLM
from tokenmill.ops.cpu import is_available

REQUESTS_OF = {"reference": 60, "cpu": NUM_REQUESTS}
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
DEFAULT_SETTINGS = ("all at once", "small odd chunks", "too small, no prefix cache, small chunks")
CHUNK_OF_ONE = {"token_budget": 1, "max_running": 1, "prefix_caching": False}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not is_available()[0]:
        pytest.skip(is_available()[1])
    return str(request.param)


@pytest.fixture(scope="module")
def alone(backend: str, stories_dir: Path) -> Answers:
    llm = LLM(str(stories_dir), backend=backend, threads=1, prefix_caching=False)
    return run_together(llm, make_requests(7, REQUESTS_OF[backend]), rng=None)


@pytest.mark.parametrize("setting", slow_but(DEFAULT_SETTINGS, SETTINGS))
def test_batches_change_nothing(setting: str, backend: str, alone: Answers, stories_dir: Path) -> None:
    llm = LLM(str(stories_dir), backend=backend, threads=1, speculate="off", **SETTINGS[setting])
    together = run_together(llm, make_requests(7, REQUESTS_OF[backend]), random.Random(setting))
    _assert_same(alone, together, TOLERANCE[backend])
    stats = llm.core.stats()
    assert stats.kv_blocks_used == 0
    if "num_blocks" in SETTINGS[setting]:
        assert stats.preemptions >= PREEMPTIONS_OF[backend], "the pool was meant to be too small"
    if SETTINGS[setting].get("prefix_caching", True):
        assert stats.prefix_hit_tokens > 0


def test_a_prompt_fed_token_by_token_changes_nothing(backend: str, alone: Answers, stories_dir: Path) -> None:
    few = [(number, ask) for number, ask in enumerate(make_requests(7, REQUESTS_OF[backend])) if ask.params.n == 1][:10]
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
