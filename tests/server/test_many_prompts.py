"""A request with many prompts takes its turn with all others while it is tokenised."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from fake_engine import INFO, FakeEngine

from tokenmill.errors import ContextLengthExceeded
from tokenmill.server.native import Job, Run
from tokenmill.server.openai.render import CompletionRendering
from tokenmill.server.record import Record
from tokenmill.types import PromptRequest

RENDERING = CompletionRendering(
    INFO, num_choices=1, include_usage=False, echoes=None, wants_logprobs=False, wants_prompt_logprobs=False
)


def run_of(engine: FakeEngine, prompts: list[str]) -> Run:
    return Run(engine, Job([PromptRequest(prompt=prompt) for prompt in prompts], RENDERING), Record("id", "POST", "/"))


async def turns_during_accept(run: Run) -> int:
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
