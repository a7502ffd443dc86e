"""Requests for models with recurrent layers, whose states lie at multiples of 64 tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.mixed_requests import add_greedy
from tokenmill import LLM, SamplingParams

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "falcon_h1")
"""Trained tiny ones"""


def story(length: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 512, length - 1).tolist()]


def greedy(llm: LLM, prompt: list[int], max_tokens: int = 6, **changes: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)
    (answer,) = llm.generate([prompt], params)
    return [output.token_ids for output in answer.outputs]


def interrupted(llm: LLM, prompt: list[int], max_tokens: int, position: int) -> list[int]:
    """The tokens of a request beside which an urgent one arrives once `position` of its tokens are known."""
    tokens: list[int] = []
    add_greedy(llm, "patient", prompt, max_tokens, priority=1)
    while llm.core.has_work:
        if len(prompt) + len(tokens) == position:
            add_greedy(llm, "urgent", story(20, seed=1), max_tokens=2, priority=0)
            position = -1
        tokens += [token for one in llm.core.step() if one.request_id == "patient" for token in one.token_ids]
    return tokens


def scored(llm: LLM, prompt: list[int], **changes: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of each choice."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0, **changes})
    (answer,) = llm.generate([prompt], params)
    return [(output.token_ids, [one.logprob for one in output.logprobs or []]) for output in answer.outputs]
