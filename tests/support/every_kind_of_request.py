"""Requests of every kind that has state besides its tokens, and their answers from an undisturbed engine. Answers
must be the same when cores die, move, or run on other machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.mixed_requests import make_requests
from tokenmill import AsyncEngine, SamplingParams
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.params import BeamParams, Guided
from tokenmill.types import EmbedRequest, PromptRequest

STORY = "Once upon a time, there was a little"
Answer = list[Any]


def config_of(stories: Path, *, speculate: str = "auto") -> EngineConfig:
    return EngineConfig(
        ModelConfig(model=str(stories)),
        CacheConfig(context_shift=True),
        SchedulerConfig(max_running=64, token_budget=512, speculate=speculate),
        OpsConfig(threads=1),
    )


def special_requests() -> list[ClientRequest]:
    """Return one request of each kind that has state besides its tokens."""
    words = Guided.regex(r"(the|a) (cat|dog|bird)( (sat|ran|saw a tree)){2,6}\.")
    object_schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    each = {
        "mirostat": SamplingParams(mirostat=2, seed=1, max_tokens=40),
        "samples": SamplingParams(n=3, temperature=1.1, seed=2, max_tokens=30),
        "guided samples": SamplingParams(n=3, guided=words, seed=3, max_tokens=40),
        "schema": SamplingParams(guided=Guided.schema(object_schema), seed=4, max_tokens=40),
        "beams": SamplingParams(n=2, beam=BeamParams(width=3), temperature=0, max_tokens=16),
        "best": SamplingParams(n=2, best_of=4, temperature=1.0, seed=5, max_tokens=20),
        "prompt logprobs": SamplingParams(prompt_logprobs=2, logprobs=3, n=2, seed=6, max_tokens=20),
        "stop string": SamplingParams(stop=["zebra", "the"], n=2, temperature=1.0, seed=7, max_tokens=60),
        "past the context": SamplingParams(temperature=0.7, seed=8, max_tokens=600, ignore_eos=True),
        "penalties": SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, dry_multiplier=0.8, seed=9),
    }
    requests: list[ClientRequest] = [
        PromptRequest(prompt=STORY, params=params, request_id=name) for name, params in each.items()
    ]
    return [*requests, EmbedRequest(prompt=STORY, request_id="embedding")]


def mixed_requests(count: int) -> list[ClientRequest]:
    return [
        PromptRequest(prompt=drawn.prompt, params=drawn.params, request_id=f"mixed {number}")
        for number, drawn in enumerate(make_requests(11, count))
    ]


async def answer(engine: AsyncEngine, request: ClientRequest) -> Answer:
    """Return all that a client sees, by choice. The number of cached tokens is left out, since it may differ."""
    choices: dict[int, dict[str, Any]] = {}
    prompt_logprobs: list[Any] = []
    async for event in engine.submit(request):
        choice = choices.setdefault(event.index, {"text": "", "ids": [], "logprobs": []})
        choice["text"] += event.text
        choice["ids"] += event.token_ids
        choice["logprobs"] += event.logprobs or []
        prompt_logprobs += [list(event.prompt_logprobs)] if event.prompt_logprobs else []
        if event.finish_reason:
            assert event.usage is not None
            choice["end"] = (event.finish_reason, event.stop_reason, event.cumulative_logprob, event.embedding)
            choice["tokens"] = event.usage.prompt_tokens
    return [sorted(choices.items()), prompt_logprobs]


async def undisturbed_answers(config: EngineConfig, requests: list[ClientRequest]) -> list[Answer]:
    engine = await AsyncEngine.start(config, in_process=True)
    try:
        return await asyncio.gather(*(answer(engine, one) for one in requests))
    finally:
        await engine.close()


def assert_same(requests: list[ClientRequest], found: list[Any], expected: list[Any]) -> None:
    for one, there, wanted in zip(requests, found, expected, strict=True):
        assert there == wanted, one.request_id


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)
