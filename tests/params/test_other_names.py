"""Sampling parameters by the names and spellings of other engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenmill.errors import InvalidRequest
from tokenmill.params import Guided, SamplingParams

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": None, "stop_token_ids": None}, {}),
        ({"include_stop_str_in_output": True}, {"include_stop": True}),
        ({"guided_decoding": {"regex": "a+"}}, {"guided": Guided.regex("a+")}),
        ({"structured_outputs": SimpleNamespace(json=SCHEMA)}, {"guided": Guided.json(SCHEMA)}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"guided": Guided.choice(["a", "b"])}),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, {"guided": Guided("gbnf", 'root ::= "x"')}),
        ({"structured_outputs": {"json_object": True}}, {"guided": Guided("json_object")}),
        ({"structured_outputs": Guided.grammar('start: "x"')}, {"guided": Guided("lark", 'start: "x"')}),
        ({"bad_words": [], "detokenize": True, "truncate_prompt_tokens": None}, {}),
    ],
)
def test_the_same_meaning_is_taken(given: dict[str, Any], ours: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert params == SamplingParams(**ours)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"bad_words": ["x"]}, "banned_token_ids"),
        ({"max_new_tokens": 5}, "use max_tokens"),
        ({"use_beam_search": True}, "BeamParams"),
        ({"temprature": 1}, "did you mean temperature"),
        ({"include_stop": True, "include_stop_str_in_output": True}, "means the same as include_stop"),
        ({"guided_decoding": {"json": SCHEMA, "regex": "a"}}, "exactly one of"),
        ({"top_k": -2}, "top_k must be between"),
    ],
)
def test_another_meaning_is_refused_with_the_name_to_use(given: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        SamplingParams(**given)
