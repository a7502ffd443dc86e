"""Answers that go on past the context, with a real model: each token is the one that its window alone would bring."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.mixed_requests import slow_but
from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequest
from tokenmill.ops.cpu import is_available
from tokenmill.params import BeamParams
from tokenmill.types import PromptRequest

CONTEXT, KEEP = 64, 4
BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not is_available()[0], reason=is_available()[1]))]
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "small odd chunks": {"token_budget": 13, "max_running": 5},
    "no prefix cache": {"prefix_caching": False},
    "a pool that is far too small": {"num_blocks": 11, "max_running": 8},
}


def opened(stories_dir: Path, backend: str, **settings: Any) -> LLM:
    return LLM(str(stories_dir), backend=backend, threads=1, max_context=CONTEXT, speculate="off", **settings)


def in_sight(tokens: list[int], keep: int = KEEP) -> list[int]:
    drop = (CONTEXT - keep) // 2
    while len(tokens) > CONTEXT:
        tokens = tokens[:keep] + tokens[keep + drop :]
    return tokens


def params(max_tokens: int = 100, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, "context_shift": True, **settings}
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, 512) for _ in range(length - 1))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt_len", [10, 150])
def test_each_token_is_what_its_window_would_bring_as_a_prompt(
    backend: str, prompt_len: int, stories_dir: Path
) -> None:
    llm, prompt = opened(stories_dir, backend), prompt_of(prompt_len)
    (answer,) = llm.generate([prompt], params(), progress=False)
    tokens = answer.outputs[0].token_ids
    assert len(tokens) == 100 and answer.outputs[0].finish_reason == "length"
    befores = [in_sight(prompt + tokens[:count]) for count in range(100)]
    # A window that fills the context leaves an ordinary prompt no room for its answer; those are left to the next test.
    asked = [(before, token) for before, token in zip(befores, tokens, strict=True) if len(before) < CONTEXT]
    alone = llm.generate(
        [before for before, _ in asked], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), progress=False
    )
    assert [one.outputs[0].token_ids for one in alone] == [[token] for _, token in asked]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_logprobs_and_drawn_ones_agree_across_shifts(backend: str, stories_dir: Path) -> None:
    llm, prompt = opened(stories_dir, backend), prompt_of(20)
    (drawn,) = llm.generate([prompt], params(logprobs=0), progress=False)
    whole = prompt + drawn.outputs[0].token_ids
    (scored,) = llm.generate([whole], params(max_tokens=1, prompt_logprobs=0), progress=False)
    assert scored.prompt_logprobs is not None and drawn.outputs[0].logprobs is not None
    there = [info.logprob for info in scored.prompt_logprobs[20:] if info is not None]
    assert there == pytest.approx([info.logprob for info in drawn.outputs[0].logprobs], abs=1e-4)


def run(llm: LLM, asks: list[tuple[list[int], SamplingParams]], together: bool) -> dict[tuple[str, int], list[int]]:
    answers: dict[tuple[str, int], list[int]] = {}
    waiting = [(str(number), *ask) for number, ask in enumerate(asks)]
    while waiting or llm.core.has_work:
        arriving = len(waiting) if together else int(not llm.core.has_work)
        for name, prompt, params in waiting[:arriving]:
            asked = PromptRequest(prompt=prompt, params=params, request_id=name)
            llm.core.add(llm.frontend.input_processor(CONTEXT).process(asked))
        waiting = waiting[arriving:]
        for output in llm.core.step():
            assert output.error is None, output
            answers.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return answers


def mixed_asks() -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            prompt_of(5 + 17 * number, seed=number % 3),
            params(
                max_tokens=70 + number,
                n=1 + number % 2,
                temperature=number % 3 / 2,
                seed=number,
                frequency_penalty=number % 2 / 4,
                context_shift=number % 4 != 3 or None,  # some end with the context
                context_keep=9 if number % 4 == 1 else None,
            ),
        )
        for number in range(12)
        if number % 4 != 3 or 5 + 17 * number < CONTEXT
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", slow_but(["small odd chunks", "a pool that is far too small"], SETTINGS))
def test_neighbours_chunks_and_preemption_change_nothing(setting: str, backend: str, stories_dir: Path) -> None:
    alone = run(opened(stories_dir, backend, prefix_caching=False), mixed_asks(), together=False)
    llm = opened(stories_dir, backend, **SETTINGS[setting])
    assert run(llm, mixed_asks(), together=True) == alone
    stats = llm.core.stats()
    assert stats.kv_blocks_used == 0
    assert stats.preemptions >= 5 or "num_blocks" not in SETTINGS[setting]


def test_the_engine_setting_holds_unless_a_request_says_otherwise(stories_dir: Path) -> None:
    llm, prompt = opened(stories_dir, "reference", context_shift=True, context_keep=7), prompt_of(10)
    plain = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 100}
    beam = SamplingParams(**plain, beam=BeamParams(2))  # type: ignore[arg-type]
    for params, length in (
        (SamplingParams(**plain), 100),  # type: ignore[arg-type]
        (SamplingParams(**plain, context_shift=False), CONTEXT - 10),  # type: ignore[arg-type]
        (beam, CONTEXT - 10),
        (SamplingParams(temperature=0.0, ignore_eos=True), CONTEXT),
    ):
        (answer,) = llm.generate([prompt], params, progress=False)
        assert (len(answer.outputs[0].token_ids), answer.outputs[0].finish_reason) == (length, "length")
    request = llm.frontend.input_processor(CONTEXT).process(PromptRequest(prompt=prompt, params=SamplingParams()))
    assert request.shift is not None and request.shift.keep == 7


def test_without_the_option_nothing_changes(stories_dir: Path) -> None:
    llm = opened(stories_dir, "reference")
    with pytest.raises(InvalidRequest, match=r"must fit in 64.*context_shift"):
        llm.generate([prompt_of(64)], SamplingParams(), progress=False)
    (answer,) = llm.generate([prompt_of(60)], params(context_shift=None), progress=False)
    assert len(answer.outputs[0].token_ids) == 4 and answer.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"context_shift": True, "beam": BeamParams(2)}, "context_shift does not combine with beam search"),
        ({"context_shift": False, "context_keep": 3}, "context_keep needs context_shift"),
        ({"context_keep": 3}, "context_keep needs context_shift"),
        ({"context_shift": True, "context_keep": 33}, "at most half of the context"),
        ({"context_shift": True, "context_keep": -1}, "context_keep must be between"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], problem: str, stories_dir: Path) -> None:
    llm = opened(stories_dir, "reference")
    with pytest.raises(InvalidRequest, match=problem):
        llm.generate([prompt_of(5)], SamplingParams(**settings), progress=False)


def test_a_prompt_beyond_all_bounds_is_refused(stories_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="with a shifting context"):
        opened(stories_dir, "reference").generate([[5] * 70_000], params(), progress=False)
