"""A core dies, and its requests go on with the next token: the same tokens, texts and logprobs as if nothing had been.
A request that kills its cores fails alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.every_kind_of_request import (
    Answer,
    answer,
    assert_same,
    config_of,
    mixed_requests,
    special_requests,
)
from tests.support.mortal_core import Kills, crashing_clients
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.engine.build import build_core
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.replicas import MAX_DEATHS
from tokenmill.errors import RequestFailed
from tokenmill.types import PromptRequest, SequenceOutput

LONG = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)


def answers(
    config: EngineConfig, asked: list[ClientRequest], lives: list[int], kills: Kills = lambda _: False
) -> tuple[list[Answer | BaseException], AsyncEngine]:
    frontend = load_frontend(config)

    async def scenario() -> tuple[list[Answer | BaseException], AsyncEngine]:
        make = crashing_clients(lambda: build_core(frontend.config, frontend.model_path), iter(lives), kills)
        engine = AsyncEngine(frontend, make)
        await engine.open()
        try:
            return await asyncio.gather(*(answer(engine, one) for one in asked), return_exceptions=True), engine
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(scenario(), 120))


def test_all_kinds_of_requests_go_on_with_the_same_tokens(stories_dir: Path) -> None:
    config, rng = config_of(stories_dir), random.Random(5)
    asked = special_requests() + mixed_requests(20)
    expected, undisturbed = answers(config, asked, [])
    assert not any(isinstance(one, BaseException) for one in expected), expected
    assert undisturbed.stats().restarts == 0
    lives = [rng.randrange(150, 300) for _ in range(4)]
    found, engine = answers(config, asked, lives)
    assert_same(asked, found, expected)
    assert engine.stats().restarts == len(lives)
    assert engine.stats().step_tokens > undisturbed.stats().step_tokens, "the totals of dead cores count"


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_many_requests_over_many_deaths(stories_dir: Path, speculate: str) -> None:
    config, rng = config_of(stories_dir, speculate=speculate), random.Random(speculate)
    asked = special_requests() + mixed_requests(120)
    expected, _ = answers(config, asked, [])
    found, engine = answers(config, asked, [rng.randrange(900, 1200) for _ in range(4)])
    assert_same(asked, found, expected)
    assert engine.stats().restarts == 4


def poison(num_tokens: int) -> Kills:
    """Kill by the output that follows so many tokens of the request called poison; they were given before."""
    given = 0

    def kills(output: SequenceOutput) -> bool:
        nonlocal given
        if output.request_id.partition("#")[0] != "poison":
            return False
        if given >= num_tokens:
            return True
        given += len(output.token_ids)
        return False

    return kills


@pytest.mark.parametrize("at", [0, 12], ids=["at its first token", "in the middle"])
def test_a_request_that_kills_cores_fails_alone(stories_dir: Path, at: int) -> None:
    config = config_of(stories_dir, speculate="off")
    asked: list[ClientRequest] = mixed_requests(10)
    expected, _ = answers(config, asked, [])
    deadly = PromptRequest(prompt="The", params=LONG, request_id="poison")
    found, engine = answers(config, [*asked, deadly], [], poison(at))
    assert_same(asked, found[:-1], expected)
    failed = found[-1]
    assert isinstance(failed, RequestFailed) and "killed by the test" in failed.message
    assert engine.stats().restarts == MAX_DEATHS


def test_requests_that_no_core_is_left_for_fail(stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.engine.core_supervisor.MAX_RESTARTS", 0)
    found, engine = answers(config_of(stories_dir), mixed_requests(3), [], kills=lambda _: True)
    assert all(isinstance(one, Exception) and "died 1 times" in str(one) for one in found)
    assert engine.stats().restarts == 0
