"""The trained 260K-parameter model against a float64 reference and against what llama.cpp's own tests assert."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.engine.results import RequestOutput
from tokenmill.text.template import CHATML
from tokenmill.types import ChatRequest, Message

CLOSE = 1e-3


@pytest.fixture(scope="module")
def cases(shared_dir: Path) -> list[dict[str, Any]]:
    return json.loads((shared_dir / "goldens" / "stories260K" / "golden_greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def anchors(shared_dir: Path) -> dict[str, Any]:
    return json.loads((shared_dir / "goldens" / "stories260K" / "anchors.json").read_text())


@pytest.fixture(scope="module")
def answers(stories: LLM, cases: list[dict[str, Any]]) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=0, max_tokens=len(case["greedy"]), ignore_eos=True, logprobs=5, prompt_logprobs=0)
        for case in cases
    ]
    return stories.generate([case["prompt_ids"] for case in cases], params)


def test_greedy_ids_equal_the_reference(answers: list[RequestOutput], cases: list[dict[str, Any]]) -> None:
    for answer, case in zip(answers, cases, strict=True):
        assert answer.outputs[0].token_ids == [token["id"] for token in case["greedy"]], case["prompt"]


def test_logprobs_are_the_references(answers: list[RequestOutput], cases: list[dict[str, Any]]) -> None:
    for answer, case in zip(answers, cases, strict=True):
        assert answer.outputs[0].logprobs is not None
        for info, token in zip(answer.outputs[0].logprobs, case["greedy"], strict=True):
            assert abs(info.logprob - token["logprob"]) < CLOSE
            for (_, _, _, ours), (_, theirs) in zip(info.top, token["top5"], strict=True):
                assert abs(ours - theirs) < CLOSE


def test_prompt_logprobs_are_the_references(answers: list[RequestOutput], cases: list[dict[str, Any]]) -> None:
    for answer, case in zip(answers, cases, strict=True):
        assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
        ours = [info.logprob for info in answer.prompt_logprobs[1:] if info is not None]
        assert ours == pytest.approx(case["prompt_logprobs_from_second_token"], abs=CLOSE)


def test_prompts_become_the_references_ids(stories: LLM, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        assert stories.frontend.input_processor(512).tokenizer.encode(case["prompt"]) == case["prompt_ids"]


def test_token_counts_equal_the_anchors(stories: LLM, anchors: dict[str, Any]) -> None:
    input_processor = stories.frontend.input_processor(512)
    for anchor in anchors["prompt_token_counts"]:
        assert len(input_processor.tokenizer.encode(anchor["prompt"])) == anchor["tokens"], anchor["prompt"]
    for anchor in anchors["chatml_token_counts"]:
        messages = [Message(role=role, content=anchor[role]) for role in ("system", "user")]
        asked = ChatRequest(messages=messages, chat_template=CHATML)  # the model has no template of its own
        assert len(input_processor.chat_ids(asked)) == anchor["tokens"], anchor


def test_texts_match_the_anchors(stories: LLM, anchors: dict[str, Any]) -> None:
    wanted = anchors["greedy_text_must_match"]
    answers = stories.generate([one["prompt"] for one in wanted], SamplingParams(temperature=0, max_tokens=64))
    for answer, one in zip(answers, wanted, strict=True):
        text = answer.outputs[0].text
        assert text.lstrip().startswith(one["prefix"].lstrip()) if "prefix" in one else re.search(one["regex"], text)
