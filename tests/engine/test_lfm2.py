"""LFM2, whose short convolutions look back a few tokens: golden answers of trained weights, and the same tokens after
prefix hits, forks, preemption at any position, rejected drafts and odd chunks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.mixed_requests import Answers, add_greedy, make_requests, run_together, slow_but
from tokenmill import LLM, SamplingParams
from tokenmill.arch.cost import kv_bytes, kv_bytes_per_token
from tokenmill.arch.read import read_spec
from tokenmill.arch.spec import ShortConv
from tokenmill.ops.cpu import is_available
from tokenmill.params import BeamParams

CLOSE_CALL = 1e-3  # a smaller margin in the golden answers may fall either way
SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "small odd chunks": {"token_budget": 37, "max_running": 23},
    "no prefix cache": {"token_budget": 512, "prefix_caching": False},
    "a pool that is far too small": {"num_blocks": 60, "max_running": 32},
    "n-gram drafts": {"speculate": "ngram", "token_budget": 96},
    "wrong drafts, too small a pool": {"speculate": "draft:random", "num_blocks": 60, "max_running": 24},
}
native = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])


@pytest.fixture(scope="module")
def cases(lfm2_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((lfm2_dir / "golden_greedy.json").read_text())["cases"]
    return found


@pytest.fixture(scope="module")
def random_dir(lfm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and vocabulary with random weights, whose drafts are nearly all wrong."""
    folder = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(lfm2_dir, folder)
    (folder / "model.safetensors").unlink()
    generator = torch.Generator().manual_seed(0)
    weights = load_file(lfm2_dir / "model.safetensors")
    noise = {name: torch.randn(weight.shape, generator=generator) * 0.1 for name, weight in weights.items()}
    save_file(noise, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ── golden answers ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "reference"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_golden_answers(backend: str, kv_dtype: str, lfm2_dir: Path, cases: list[dict[str, Any]]) -> None:
    """Greedy tokens of a float64 computation; with an int8 cache, attention is rounded but not the convolutions."""
    llm = LLM(str(lfm2_dir), backend=backend, threads=1, kv_dtype=kv_dtype, token_budget=48, max_running=4)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    answers = llm.generate([case["prompt_ids"] for case in cases], params)
    tolerance = 1e-3 if kv_dtype == "float32" else 0.05
    compared = 0
    for case, answer in zip(cases, answers, strict=True):
        output = answer.outputs[0]
        assert output.logprobs is not None and answer.prompt_logprobs is not None
        prompt = [one.logprob for one in answer.prompt_logprobs[1:] if one is not None]
        assert prompt == pytest.approx(case["prompt_logprobs_from_second_token"], abs=tolerance)
        for step, token, info in zip(case["greedy"], output.token_ids, output.logprobs, strict=True):
            if step["margin"] < (CLOSE_CALL if kv_dtype == "float32" else 2 * tolerance):
                break
            assert token == step["id"]
            assert info.logprob == pytest.approx(step["logprob"], abs=tolerance)
            compared += 1
    assert compared >= (640 if kv_dtype == "float32" else 100)


def test_the_cache_is_counted_in_bytes(lfm2_dir: Path) -> None:
    """Keys and values of two layers for every token, two inputs of each convolution for a sequence."""
    spec = read_spec(lfm2_dir)
    convs = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, ShortConv)]
    assert [(conv.width, conv.kernel) for conv in convs] == [(64, 3)] * 3
    assert kv_bytes_per_token(spec, "float16") == 2 * 2 * 2 * 16 * 2
    assert kv_bytes(spec, "float16", 100) == 100 * kv_bytes_per_token(spec, "float16") + 3 * 2 * 64 * 2
    llm = LLM(str(lfm2_dir), threads=1, max_context=128, max_running=4)
    storage = llm.core.runner.storage  # type: ignore[attr-defined]
    assert storage.num_bytes == storage.num_blocks * storage.layout.block_bytes(16)


# ── the same tokens ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def alone(lfm2_dir: Path) -> Answers:
    llm = LLM(str(lfm2_dir), backend="cpu", threads=1, prefix_caching=False, speculate="off")
    return run_together(llm, make_requests(7), rng=None)


@native
@pytest.mark.parametrize("setting", slow_but(["all at once", "wrong drafts, too small a pool"], SETTINGS))
def test_200_mixed_requests_together_and_alone(setting: str, alone: Answers, lfm2_dir: Path, random_dir: Path) -> None:
    """To the last bit of every logprob; with samples of n > 1, which are forks."""
    settings = {"speculate": "off", **SETTINGS[setting]}
    settings["speculate"] = settings["speculate"].replace("random", str(random_dir))
    llm = LLM(str(lfm2_dir), backend="cpu", threads=1, **settings)
    assert run_together(llm, make_requests(7), random.Random(setting)) == alone
    stats = llm.core.stats()
    assert stats.kv_blocks_used == 0
    if "num_blocks" in settings:
        assert stats.preemptions > 0, "the pool was meant to be too small"
    if settings.get("prefix_caching", True):
        assert stats.prefix_hit_tokens > 0
    if settings["speculate"] != "off":
        assert stats.drafted_tokens > stats.accepted_tokens


def greedy(llm: LLM, prompt: list[int], max_tokens: int = 12, **changes: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)
    (answer,) = llm.generate([prompt], params)
    return [output.token_ids for output in answer.outputs]


def story(length: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 512, length - 1).tolist()]


@native
def test_prefix_hits_of_every_length(lfm2_dir: Path) -> None:
    """A prompt that shares its first tokens with another one, up to every position of two blocks."""
    plain = LLM(str(lfm2_dir), backend="cpu", threads=1, prefix_caching=False, speculate="off")
    cached = LLM(str(lfm2_dir), backend="cpu", threads=1, speculate="off")
    first = story(70)
    greedy(cached, first)
    for shared in range(30, 68):
        prompt = first[:shared] + story(20, seed=shared)[1:]
        assert greedy(cached, prompt) == greedy(plain, prompt), shared
    assert cached.core.stats().prefix_hit_tokens >= 38 * 16


@native
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preemption_at_every_position(prefix_caching: bool, lfm2_dir: Path) -> None:
    """An urgent request takes the only row from a running one, at each position of two blocks; the tokens computed so
    far are computed again, or found in the cache."""
    llm = LLM(str(lfm2_dir), backend="cpu", threads=1, speculate="off", max_running=1, prefix_caching=prefix_caching)
    expected = greedy(llm, story(20), max_tokens=60)[0]
    for position in range(1, 36):
        before = llm.core.stats().preemptions
        assert interrupted(llm, story(20), 60, position) == expected, position
        assert llm.core.stats().preemptions == before + 1, position


def interrupted(llm: LLM, prompt: list[int], max_tokens: int, position: int) -> list[int]:
    """The tokens of a request beside which an urgent one arrives once it has `position` tokens."""
    tokens: list[int] = []
    add_greedy(llm, "patient", prompt, max_tokens, priority=1)
    while llm.core.has_work:
        if len(tokens) == position:
            add_greedy(llm, "urgent", story(90, seed=1), max_tokens=40, priority=0)
            position = -1
        tokens += [token for one in llm.core.step() if one.request_id == "patient" for token in one.token_ids]
    return tokens


@native
@pytest.mark.parametrize("length", [14, 15, 16, 17, 31, 33])
def test_forks_and_beams_around_a_block_border(length: int, lfm2_dir: Path) -> None:
    """Samples and beams share their prompt's blocks; each writes behind it alone."""
    plain = LLM(str(lfm2_dir), backend="cpu", threads=1, prefix_caching=False, speculate="off")
    chunked = LLM(str(lfm2_dir), backend="cpu", threads=1, token_budget=5, max_running=5, speculate="ngram")
    sampled = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    beams = SamplingParams(n=3, temperature=0.0, max_tokens=20, ignore_eos=True, beam=BeamParams(width=4))
    for params in (sampled, beams):
        (expected,), (found,) = (llm.generate([story(length)], params) for llm in (plain, chunked))
        assert [output.token_ids for output in found.outputs] == [output.token_ids for output in expected.outputs]
        assert len({tuple(output.token_ids) for output in found.outputs}) > 1
    assert greedy(plain, story(length), n=1) == greedy(chunked, story(length), n=1)
