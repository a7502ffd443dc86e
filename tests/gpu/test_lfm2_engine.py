"""LFM2 on a real GPU: golden answers of trained weights through graphs, chunks, prefix hits and forks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mixed_requests import ALONE, make_requests, run_together
from tokenmill import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_golden_answers(deterministic: bool, kv_dtype: str, lfm2_dir: Path) -> None:
    cases: list[dict[str, Any]] = json.loads((lfm2_dir / "golden_greedy.json").read_text())["cases"]
    llm = LLM(
        str(lfm2_dir), device="cuda", dtype="float32", kv_dtype=kv_dtype, deterministic=deterministic,
        token_budget=48, max_running=6, num_blocks=400,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    answers = llm.generate([case["prompt_ids"] for case in cases], params, progress=False)
    tolerance, compared = (2e-3, 0) if kv_dtype == "float32" else (0.05, 0)
    for case, answer in zip(cases, answers, strict=True):
        output = answer.outputs[0]
        assert output.logprobs is not None
        for step, token, info in zip(case["greedy"], output.token_ids, output.logprobs, strict=True):
            if step["margin"] < 2 * tolerance:
                break
            assert token == step["id"]
            assert info.logprob == pytest.approx(step["logprob"], abs=tolerance)
            compared += 1
    assert compared >= (400 if kv_dtype == "float32" else 100)


def test_the_same_tokens_alone_and_together(lfm2_dir: Path) -> None:
    """Deterministic kernels: 60 mixed requests, with samples of n > 1, prefix hits and preemption."""
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "deterministic": True}
    alone = run_together(LLM(str(lfm2_dir), **settings, prefix_caching=False, **ALONE), make_requests(7, 60), rng=None)
    llm = LLM(str(lfm2_dir), **settings, token_budget=64, max_running=24, num_blocks=90)
    assert run_together(llm, make_requests(7, 60), random.Random(1)) == alone
