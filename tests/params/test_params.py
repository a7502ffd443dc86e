"""Wrong parameters are refused by name, whatever type they come in; right ones stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.params import MAX_GUIDED_BYTES, MAX_LENGTH_PENALTY, BeamParams, Guided, SamplingParams, Watermark

PARTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Watermark(key=-1), "watermark.key"),
    (lambda: Watermark(key=True), "watermark.key"),
    (lambda: Watermark(key=1, gamma=1.0), "watermark.gamma"),
    (lambda: Watermark(key=1, delta=math.nan), "watermark.delta"),
    (lambda: Watermark(key=1, context=0), "watermark.context"),
    (lambda: BeamParams(0), "beam.width"),
    (lambda: BeamParams("4"), "beam.width"),  # type: ignore[arg-type]
    (lambda: BeamParams(2, length_penalty=math.inf), "beam.length_penalty"),
    (lambda: Guided("xml", "a"), "guided.kind"),  # type: ignore[arg-type]
    (lambda: Guided("regex"), "guided.text"),
    (lambda: Guided("json_object", "{}"), "guided.text"),
    (lambda: Guided("regex", "é" * MAX_GUIDED_BYTES), "guided.text"),
    (lambda: Guided("regex", "\ud800"), "guided.text"),
    (lambda: Guided.choice(["\ud800"]), "guided.text"),
    (lambda: Guided.schema({"const": object()}), "guided.text"),
    (lambda: BeamParams(2, length_penalty=MAX_LENGTH_PENALTY + 1), "beam.length_penalty"),
]


@pytest.mark.parametrize(("make", "param"), PARTS)
def test_wrong_parts_are_named(make: Callable[[], Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 10**400}, "temperature"),  # no float is that large
        ({"seed": 10**5000}, "seed"),  # nor does Python write it down
        ({"stop": ["\ud800"]}, "stop"),  # half a character can't be sent to the engine
        ({"n": 2.0}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"min_tokens": 2, "max_tokens": 1}, "min_tokens"),
        ({"mirostat": 1}, "mirostat"),
        ({"mirostat": 2, "beam": BeamParams(2)}, "mirostat"),
        ({"top_p": 0.5, "beam": BeamParams(2)}, "top_p"),
        ({"temperature": 0.5, "beam": BeamParams(2)}, "temperature"),
        ({"n": 3, "beam": BeamParams(2)}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a" * 1025]}, "stop"),
        ({"stop_regex": ["a"] * 9}, "stop_regex"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"banned_token_ids": "1,2"}, "banned_token_ids"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {5: "much"}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"beam": 3}, "beam"),
        ({"guided": "[0-9]+"}, "guided"),
        ({"watermark": 42}, "watermark"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"logits_processors": print}, "logits_processors"),
        ({"thinking_markers": ("a", "b")}, "thinking_markers"),
        ({"thinking_markers": ("a", ""), "thinking_budget": 1}, "thinking_markers"),
        ({"thinking_markers": ("a",), "thinking_budget": 1}, "thinking_markers"),
        ({"context_shift": False, "context_keep": 1}, "context_keep"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"eta_cutoff": 2}, "eta_cutoff"),
    ],
)
def test_wrong_values_are_named(params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**params)
    assert refused.value.param == param


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_any_length_to_the_largest_penalty_is_a_number(penalty: float) -> None:
    assert math.isfinite(-1e9 / (2**31) ** penalty)


def test_sequences_of_every_kind_are_taken() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 5}, allowed_token_ids=[1, 2], seed=-(2**63), best_of=4, n=2)
    assert params.num_sequences == 4 and SamplingParams(beam=BeamParams(3)).num_sequences == 3
    assert SamplingParams(stop=("a", "b")).stop == ("a", "b")  # type: ignore[arg-type]  # a tuple does as well
