"""Tiny trained models of current architectures, and the comparison with their golden answers.

Golden answers are greedy tokens and logprobs computed in float64. If the two best tokens of a position are closer than
the tolerance, either may be chosen, and the comparison of that prompt ends there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenmill import SamplingParams
from tokenmill.engine.results import RequestOutput

NAMES = ("deepseek_v2", "deepseek_v3", "gemma4", "gpt_oss", "lfm2", "llama4", "mixtral", "qwen3_moe")
MORE = ("exaone4", "gemma4_moe", "glm4_moe", "lfm2_moe", "minimax_m2", "ministral3", "olmo3", "smollm3")
"""Names whose answers are compared without the engine too, in less time (`tests/models/test_current_families.py`)"""
STREAMED = ("deepseek_v4", "gemma3n")
"""Models of several residual streams"""
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)


def golden_cases(folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((folder / "golden_greedy.json").read_text())["cases"]
    return cases


def num_equal_tokens(cases: Sequence[dict[str, Any]], answers: Sequence[RequestOutput], tolerance: float) -> int:
    """Require each answer to equal its golden one, up to a close call; return how many tokens were compared."""
    compared = 0
    for case, answer in zip(cases, answers, strict=True):
        output = answer.outputs[0]
        assert output.logprobs is not None
        for step, token, info in zip(case["greedy"], output.token_ids, output.logprobs, strict=True):
            if step["margin"] < max(1e-3, tolerance):
                break
            assert token == step["id"]
            assert info.logprob == pytest.approx(step["logprob"], abs=tolerance)
            compared += 1
    return compared
