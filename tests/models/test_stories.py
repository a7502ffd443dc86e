"""A trained model against a float64 reference: 260,000 parameters, ten prompts, greedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paged_run import PagedRun, feed_in_chunks
from tokenmill.arch.read import read_spec
from tokenmill.models.decoder import Decoder
from tokenmill.models.linear import Loader
from tokenmill.ops.reference import REFERENCE_OPS
from tokenmill.weights.source import open_weights

CLOSE_CALL = 1e-3  # a smaller margin in the reference may fall either way


@pytest.fixture(scope="module")
def stories(stories_dir: Path) -> Decoder:
    spec = read_spec(stories_dir)
    weights = open_weights(stories_dir, spec)
    return Decoder(spec, Loader(weights, REFERENCE_OPS, torch.float32, torch.device("cpu")))


@pytest.fixture(scope="module")
def cases(stories_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((stories_dir.parent / "golden_greedy.json").read_text())["cases"]
    return found


def test_greedy_tokens_and_logprobs_of_all_prompts(stories: Decoder, cases: list[dict[str, Any]]) -> None:
    compared = 0
    for case in cases:
        prompt, golden = case["prompt_ids"], case["greedy"]
        tokens = prompt + [step["id"] for step in golden[:-1]]
        run = PagedRun(stories, num_rows=1, max_len=len(tokens), block_size=16)
        logprobs = torch.log_softmax(feed_in_chunks(run, 0, tokens, chunk=32), -1)[len(prompt) - 1 :]
        for step, ours in zip(golden, logprobs, strict=True):
            if step["margin"] < CLOSE_CALL:
                break
            assert int(ours.argmax()) == step["id"]
            assert float(ours[step["id"]]) == pytest.approx(step["logprob"], abs=1e-3)
            compared += 1
    assert compared > 200


def test_prompt_logprobs(stories: Decoder, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        prompt = case["prompt_ids"]
        logits = feed_in_chunks(PagedRun(stories, num_rows=1, max_len=len(prompt)), 0, prompt, chunk=5)
        ours = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(prompt[1:]).view(-1, 1)).flatten()
        assert ours.tolist() == pytest.approx(case["prompt_logprobs_from_second_token"], abs=1e-3)
