"""Large requests and large answers take their turn with all others: many prompts while they are tokenised, many
logprobs while they are written."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
from starlette.responses import Response

from tests.support.fake_engine import INFO, FakeEngine
from tests.support.loopback import RunningServer
from tokenmill.errors import ContextLengthExceeded
from tokenmill.server import generation
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.generation import GenerationFacts, GenerationJob, GenerationRun
from tokenmill.server.openai import routes
from tokenmill.server.openai.render import CompletionRendering
from tokenmill.types import Event, PromptRequest

RENDERING = CompletionRendering(
    INFO, num_choices=1, include_usage=False, echoes=None, wants_logprobs=False, wants_prompt_logprobs=False
)


def run_of(engine: FakeEngine, prompts: list[str]) -> GenerationRun:
    job = GenerationJob(engine, [PromptRequest(prompt=prompt) for prompt in prompts], RENDERING)
    return GenerationRun(job, RequestRecord("id", "POST", "/"))


async def turns_during_accept(run: GenerationRun) -> int:
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        await run.accept()
    finally:
        counting.cancel()
        with suppress(asyncio.CancelledError):
            await counting
    return num_turns


def test_others_get_their_turn_between_two_prompts() -> None:
    engine = FakeEngine()
    assert asyncio.run(turns_during_accept(run_of(engine, ["Hi"] * 50))) >= 49
    assert len(engine.running) == 50


def test_one_prompt_too_many_ends_all() -> None:
    engine = FakeEngine()
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(turns_during_accept(run_of(engine, ["Hi"] * 9 + ["x" * 1000])))
    assert engine.running == {} and len(engine.aborted) == 9


@pytest.mark.parametrize(("most", "is_elsewhere"), [(5, True), (500, False)])
def test_many_logprobs_are_written_in_a_thread(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, most: int, is_elsewhere: bool
) -> None:
    threads: list[int] = []

    class WatchedRendering(CompletionRendering):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            threads.append(threading.get_ident())

        def whole(self, choices: list[Event], facts: GenerationFacts) -> Response:
            threads.append(threading.get_ident())
            return super().whole(choices, facts)

    monkeypatch.setattr(generation, "THREAD_LOGPROBS", most)
    monkeypatch.setattr(routes, "CompletionRendering", WatchedRendering)
    asked = {"model": "fake/tiny", "prompt": "Hi", "logprobs": 2, "max_tokens": 10}
    assert len(server.post("/v1/completions", asked).json()["choices"][0]["logprobs"]["tokens"]) == 10
    made, written = threads
    assert (made != written) is is_elsewhere
