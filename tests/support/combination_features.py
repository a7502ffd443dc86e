"""Features of requests and engines that are tested in pairs: each has fields of an OpenAI body and a check that it took
effect.

`check` receives the trial of a pair and checks one feature of it. The reference is the same request without that
feature, so that only the other one remains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jsonschema
import pytest

from tokenmill.engine.results import CompletionOutput, RequestOutput

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "many": {"enum": [1, 2, 3]}},
    "required": ["ok", "many"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [0-9]{2} (cats|dogs)"
TOLERANCE = 1e-4


class FeatureTrial(Protocol):
    """The result of running a pair of features."""

    body: dict[str, Any]
    answer: RequestOutput

    def has(self, name: str) -> bool: ...

    def without(self, name: str) -> RequestOutput:
        """Return the answer to the same request without one feature."""
        ...

    def rescored(self, choice: CompletionOutput) -> list[float]:
        """Return the logprobs of a choice's tokens when they are part of the prompt."""
        ...


@dataclass(frozen=True)
class Feature:
    name: str
    check: Callable[[FeatureTrial], None]
    body: dict[str, Any] = field(default_factory=dict)


def tokens(answer: RequestOutput) -> list[list[int]]:
    return [choice.token_ids for choice in answer.outputs]


def keeps_tokens(trial: FeatureTrial, name: str) -> None:
    assert tokens(trial.answer) == tokens(trial.without(name)), f"{name} changes tokens"


# ── features that a request selects ─────────────────────────────────────────────────────────────────────


def check_n(trial: FeatureTrial) -> None:
    alone = trial.without("n > 1").outputs
    assert len(trial.answer.outputs) == 3
    assert trial.answer.outputs[0].token_ids == alone[0].token_ids, "the first of several is not the single one"


def check_beam(trial: FeatureTrial) -> None:
    if not trial.has("penalties"):  # penalties are part of a beam's score
        for choice in trial.answer.outputs:
            assert choice.cumulative_logprob == pytest.approx(sum(trial.rescored(choice)), abs=1e-3)
    sums = [choice.cumulative_logprob / len(choice.token_ids) for choice in trial.answer.outputs]  # type: ignore[operator]
    assert sums == sorted(sums, reverse=True)


def check_logprobs(trial: FeatureTrial) -> None:
    keeps_tokens(trial, "logprobs")
    for choice in trial.answer.outputs:
        assert choice.logprobs is not None and all(len(info.top) == 2 for info in choice.logprobs)
        found = [info.logprob for info in choice.logprobs]
        assert found == pytest.approx(trial.rescored(choice)[: len(found)], abs=TOLERANCE)


def check_prompt_logprobs(trial: FeatureTrial) -> None:
    keeps_tokens(trial, "prompt logprobs")
    infos = trial.answer.prompt_logprobs
    assert infos is not None and len(infos) == len(trial.answer.prompt_token_ids)
    given = [info.token_id for info in infos[1:] if info is not None]
    assert given == trial.answer.prompt_token_ids[1:]


def check_schema(trial: FeatureTrial) -> None:
    for choice in trial.answer.outputs:
        if not trial.has("stop string"):  # its own check compares the truncated text
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.text), SCHEMA)


def check_regex(trial: FeatureTrial) -> None:
    for choice in trial.answer.outputs:
        if not trial.has("stop string"):
            assert choice.finish_reason == "stop" and re.fullmatch(REGEX, choice.text), choice.text


def check_penalties(trial: FeatureTrial) -> None:
    """Require fewer repeated tokens than without penalties, if the tokens are free to vary."""
    if not (trial.has("schema") or trial.has("regex") or trial.has("stop string")):
        assert num_repeats(trial.answer) < num_repeats(trial.without("penalties"))


def num_repeats(answer: RequestOutput) -> int:
    return sum(len(choice.token_ids) - len(set(choice.token_ids)) for choice in answer.outputs)


def check_seed(trial: FeatureTrial) -> None:
    same = tokens(trial.answer) == tokens(trial.without("seed"))
    if trial.has("beam"):
        assert same, "beams draw nothing"
    elif not (trial.has("schema") or trial.has("regex") or trial.has("stop string")):
        assert not same, "another seed draws other tokens"


def check_stop(trial: FeatureTrial) -> None:
    """Require the text that is generated without the stop string, truncated where the string first occurs."""
    (stop,) = trial.body["stop"]
    assert any(choice.stop_reason == stop for choice in trial.answer.outputs)
    if trial.has("beam"):  # a hypothesis that ends is replaced by another
        assert not any(stop in choice.text for choice in trial.answer.outputs)
        return
    for choice, free in zip(trial.answer.outputs, trial.without("stop string").outputs, strict=True):
        assert choice.text == free.text.split(stop)[0]
        assert (choice.stop_reason == stop) is (stop in free.text)


def check_shift(trial: FeatureTrial) -> None:
    """Require an answer of full length although the prompt nearly fills the context."""
    if not (trial.has("schema") or trial.has("regex") or trial.has("stop string")):
        assert all(len(choice.token_ids) == trial.body["max_tokens"] for choice in trial.answer.outputs)


# ── features of the engine ─────────────────────────────────────────────────────────────────────────────


def check_prefix_cache(trial: FeatureTrial) -> None:
    keeps_tokens(trial, "prefix cache")
    # Every position of a prompt whose logprobs are wanted must be computed.
    assert (trial.answer.num_cached_tokens > 0) is not trial.has("prompt logprobs")


def check_speculation(trial: FeatureTrial) -> None:
    keeps_tokens(trial, "speculation")
    # No tokens are drafted for beams.
    assert (trial.answer.num_drafted_tokens > 0) is not trial.has("beam")


def check_preemption(trial: FeatureTrial) -> None:
    keeps_tokens(trial, "preemption")


FEATURES = (
    Feature("n > 1", check_n, {"n": 3}),
    Feature("beam", check_beam, {"use_beam_search": True, "n": 3, "temperature": 0}),
    Feature("logprobs", check_logprobs, {"logprobs": 2}),
    Feature("prompt logprobs", check_prompt_logprobs, {"prompt_logprobs": 1}),
    Feature("schema", check_schema, {"guided_json": SCHEMA}),
    Feature("regex", check_regex, {"guided_regex": REGEX}),
    Feature("speculation", check_speculation),
    Feature("penalties", check_penalties, {"frequency_penalty": 2.0, "presence_penalty": 1.0}),
    Feature("seed", check_seed, {"seed": 99}),
    Feature("stop string", check_stop, {"stop": ["the"]}),
    Feature("prefix cache", check_prefix_cache),
    Feature("preemption", check_preemption, {"priority": 1}),
    Feature("context shift", check_shift, {"context_shift": True}),
)
BY_NAME = {feature.name: feature for feature in FEATURES}
