"""Trained tiny models of every architecture on a real GPU: golden answers through graphs and chunks, and with
deterministic kernels the same tokens alone and together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hybrids import MODELS as HYBRIDS
from tests.support.mixed_requests import ALONE, make_requests, run_together
from tests.support.trained_models import GREEDY, MORE, NAMES, STREAMED, golden_cases, num_equal_tokens
from tokenmill import LLM
from tokenmill.arch.read import read_spec
from tokenmill.ops.compute_request import ComputeRequest
from tokenmill.ops.triton import unsupported_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


MODELS = [name for name in (*NAMES, *MORE, *STREAMED, *HYBRIDS) if name != "lfm2"]  # which has tests of its own


@pytest.fixture(params=MODELS)
def trained_dir(request: pytest.FixtureRequest, shared_dir: Path) -> Path:
    return shared_dir / "goldens" / "tiny" / str(request.param)


def settings_of(folder: Path, *, deterministic: bool) -> dict[str, Any]:
    reason = unsupported_reason(
        ComputeRequest(read_spec(folder), "cuda", "float32", "float32", deterministic=deterministic)
    )
    if reason:
        pytest.skip(f"not computed by the GPU's kernels yet: {reason}")
    return {"device": "cuda", "dtype": "float32", "deterministic": deterministic}


def require_golden(llm: LLM, trained_dir: Path) -> None:
    cases = golden_cases(trained_dir)
    answers = llm.generate([case["prompt_ids"] for case in cases], GREEDY, progress=False)
    assert num_equal_tokens(cases, answers, 4e-3) >= 400


def test_golden_answers(trained_dir: Path) -> None:
    settings = settings_of(trained_dir, deterministic=False)
    require_golden(LLM(str(trained_dir), **settings, token_budget=48, max_running=6, num_blocks=900), trained_dir)


def test_the_same_tokens_alone_and_together(trained_dir: Path) -> None:
    """60 mixed requests, with samples of n > 1, prefix hits and preemption; then golden answers in that company."""
    settings = settings_of(trained_dir, deterministic=True)
    more = 3 if trained_dir.name == "deepseek_v4" else 1  # a sequence has tables of seven kinds
    small = LLM(str(trained_dir), **settings, prefix_caching=False, **{**ALONE, "num_blocks": 200 * more})
    alone = run_together(small, make_requests(7, 60), rng=None)
    llm = LLM(str(trained_dir), **settings, token_budget=64, max_running=24, num_blocks=90 * more)
    assert run_together(llm, make_requests(7, 60), random.Random(1)) == alone
    require_golden(llm, trained_dir)
