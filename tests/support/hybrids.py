"""Requests for models with recurrent layers, whose states are stored at multiples of 64 tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.support.mixed_requests import add_greedy
from tokenmill import LLM, SamplingParams
from tokenmill.scheduler.request import Sequence, SequenceGroup
from tokenmill.scheduler.speculation import room_for_drafts
from tokenmill.types import StepPlan, StepResult

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "falcon_h1", "kimi_linear")
"""Trained tiny ones"""
RANDOM = ("olmo_hybrid", "bailing_hybrid", "jamba", "mamba", "falcon_mamba", "mamba2")
"""Those that there are with random weights only"""


_made: dict[str, TemporaryDirectory[str]] = {}  # keeps models with random weights until the process ends


def tiny(shared_dir: Path, name: str) -> Path:
    """Return the folder of a tiny model: a trained one, or one that transformers makes with random weights."""
    trained = shared_dir / "goldens" / "tiny"
    if name not in RANDOM:
        return trained / name
    if name not in _made:
        from tests.support.tiny_models import NATIVE_SIZES, make_reference  # imports transformers, which takes seconds

        _made[name] = TemporaryDirectory(prefix=name)
        sizes = {"vocab_size": 512, "max_position_embeddings": 1024, **NATIVE_SIZES.get(name, {})}
        make_reference(name, **sizes).save_pretrained(_made[name].name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            copy(trained / "kimi_linear" / file, _made[name].name)
    return Path(_made[name].name)


class WrongDrafts:
    """A proposer of random tokens, for every sequence in every step; hardly any is accepted."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.num_proposed = 0

    def propose(self, groups: Iterable[SequenceGroup]) -> dict[Sequence, list[int]]:
        drafts = {sequence: self._drafts(group, sequence) for group in groups for sequence in group.members}
        self.num_proposed += sum(map(len, drafts.values()))
        return {sequence: tokens for sequence, tokens in drafts.items() if tokens}

    def _drafts(self, group: SequenceGroup, sequence: Sequence) -> list[int]:
        return [self._random.randrange(3, 512) for _ in range(min(4, room_for_drafts(group, sequence)))]

    def note_step(self, plan: StepPlan, result: StepResult) -> None:
        pass

    def note_end(self, sequence: Sequence) -> None:
        pass


def story(length: int, seed: int = 0) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 512, length - 1).tolist()]


def greedy(llm: LLM, prompt: list[int], max_tokens: int = 6, **changes: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **changes)
    (answer,) = llm.generate([prompt], params)
    return [output.token_ids for output in answer.outputs]


def interrupted(llm: LLM, prompt: list[int], max_tokens: int, position: int) -> list[int]:
    """Return the tokens of a request that an urgent one preempts once `position` tokens are known."""
    tokens: list[int] = []
    add_greedy(llm, "patient", prompt, max_tokens, priority=1)
    while llm.core.has_work:
        if len(prompt) + len(tokens) == position:
            add_greedy(llm, "urgent", story(20, seed=1), max_tokens=2, priority=0)
            position = -1
        tokens += [token for one in llm.core.step() if one.request_id == "patient" for token in one.token_ids]
    return tokens


def scored(llm: LLM, prompt: list[int], **changes: Any) -> list[tuple[list[int], list[float]]]:
    """Return tokens and logprobs of each choice."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0, **changes})
    (answer,) = llm.generate([prompt], params)
    return [(output.token_ids, [one.logprob for one in output.logprobs or []]) for output in answer.outputs]
