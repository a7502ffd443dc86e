"""Trained tiny models of every architecture: golden answers, and the same tokens alone and together, on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.hybrids import WrongDrafts
from tests.support.mixed_requests import make_requests, run_together
from tests.support.trained_models import GREEDY, MORE, NAMES, STREAMED, golden_cases, num_equal_tokens
from tokenmill import LLM
from tokenmill.arch.read import read_spec
from tokenmill.errors import InvalidConfig, TokenmillError
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.ops.cpu import is_available, unsupported_reason

SETTINGS: dict[str, dict[str, Any]] = {
    "small odd chunks": {"token_budget": 37, "max_running": 23},
    "a pool that is far too small": {"num_blocks": 60, "max_running": 32},
    "n-gram drafts": {"speculate": "ngram", "token_budget": 96},
}


def backends_of(folder: Path) -> list[str]:
    if not is_available()[0]:
        return ["reference"]
    assert unsupported_reason(ComputeRequest(read_spec(folder), "cpu", "float32", "float32", 16)) is None
    return ["reference", "cpu"]


def setting_of(folder: Path, name: str) -> dict[str, Any]:
    """Settings of an engine; a sequence of DeepSeek V4 has tables of nine kinds."""
    setting = SETTINGS[name]
    return {**setting, "num_blocks": 150} if folder.name == "deepseek_v4" and "num_blocks" in setting else setting


@pytest.fixture(params=[*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in (*MORE, *STREAMED))])
def trained_dir(request: pytest.FixtureRequest, shared_dir: Path) -> Path:
    return shared_dir / "goldens" / "tiny" / str(request.param)


def test_golden_answers(trained_dir: Path) -> None:
    """Prompts cut into odd chunks, four at a time; logprobs of prompts too."""
    cases = golden_cases(trained_dir)
    for backend in backends_of(trained_dir):
        llm = LLM(str(trained_dir), backend=backend, threads=1, kv_dtype="float32", token_budget=47, max_running=4)
        answers = llm.generate([case["prompt_ids"] for case in cases], GREEDY, progress=False)
        assert num_equal_tokens(cases, answers, 1e-3) >= 500


@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize("name", ["gemma4", "gpt_oss"])
def test_some_mixed_requests_together_and_alone(name: str, shared_dir: Path) -> None:
    """Windows, shared keys and values, embeddings of each layer; sinks, biases and experts: to the last bit."""
    folder, asks = str(shared_dir / "goldens" / "tiny" / name), make_requests(7, 24)
    alone = run_together(LLM(folder, backend="cpu", threads=1, prefix_caching=False, speculate="off"), asks, rng=None)
    llm = LLM(folder, backend="cpu", threads=1, speculate="off", token_budget=37, max_running=13)
    assert run_together(llm, asks, random.Random(0)) == alone


@pytest.mark.slow
@pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_200_mixed_requests_together_and_alone(setting: str, trained_dir: Path) -> None:
    """To the last bit of every logprob; with samples of n > 1, prefix hits, preemption and drafts."""
    common: dict[str, Any] = {"backend": "cpu", "threads": 1}
    alone = run_together(
        LLM(str(trained_dir), **common, prefix_caching=False, speculate="off"), make_requests(7), rng=None
    )
    llm = LLM(str(trained_dir), **{**common, "speculate": "off", **setting_of(trained_dir, setting)})
    assert run_together(llm, make_requests(7), random.Random(setting)) == alone
    assert llm.core.stats().kv_blocks_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMED)
def test_mixed_requests_on_the_reference(name: str, shared_dir: Path) -> None:
    """The same tokens alone and together, cut, preempted, after prefix hits and behind wrong drafts; torch's sums may
    differ in their last bits."""
    folder, asks = shared_dir / "goldens" / "tiny" / name, make_requests(7)
    common: dict[str, Any] = {"backend": "reference", "device": "cpu", "threads": 1}
    alone = run_together(LLM(str(folder), **common, prefix_caching=False, speculate="off"), asks, rng=None)
    for number, setting in enumerate(setting_of(folder, name) for name in SETTINGS):
        llm = LLM(str(folder), **{**common, "speculate": "off", **setting})
        if setting.get("speculate") == "ngram":
            llm.core._scheduler._drafter = WrongDrafts()
        together = run_together(llm, asks, random.Random(number))
        assert {key: tokens for key, (tokens, _) in together.items()} == {key: one for key, (one, _) in alone.items()}
        worst = max(abs(a - b) for key in alone for a, b in zip(alone[key][1], together[key][1], strict=True))
        assert worst < 1e-4
        assert llm.core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v4"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_latents_are_not_rounded_to_bytes(name: str, backend: str, shared_dir: Path) -> None:
    with pytest.raises(TokenmillError, match="latent attention"):
        LLM(str(shared_dir / "goldens" / "tiny" / name), backend=backend, kv_dtype="int8")


def test_blocks_are_as_long_as_compressed_entries(tmp_path: Path, shared_dir: Path) -> None:
    """Blocks of a DeepSeek V4 have by default as many tokens as it compresses to an entry, here 32; more will do."""
    config = json.loads((shared_dir / "goldens" / "tiny" / "deepseek_v4" / "config.json").read_text())
    config["compress_rates"]["heavily_compressed_attention"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    common: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "threads": 1, "max_context": 512}
    prompt, answers = [1, *range(100, 400)], []
    for asked, expected in ((None, 32), (32, 32), (64, 64)):
        llm = LLM(str(tmp_path), block_size=asked, **common)
        assert llm.core.runner.storage.block_size == expected  # type: ignore[attr-defined]
        answers.append(llm.generate([prompt], GREEDY, progress=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(InvalidConfig, match="multiple of 32"):
        LLM(str(tmp_path), block_size=16, **common)
