"""What a client may say about the shifting context, and how long its prompt may then be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fake_engine import INFO
from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidRequest
from tokenmill.server.openai.parse import parse_chat, parse_completion

COMPLETION: dict[str, Any] = {"model": INFO.name, "prompt": "Once"}
CHAT: dict[str, Any] = {"model": INFO.name, "messages": [{"role": "user", "content": "Hi"}]}
SHIFTING = replace(INFO, shifts_context=True)
TOO_LONG = [5] * (INFO.max_context + 1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"context_shift": None}, (None, None)),
        ({"context_shift": True, "context_keep": 9}, (True, 9)),
        ({"context_shift": False}, (False, None)),
        ({"context_keep": 0}, (None, 0)),
    ],
)
def test_fields_arrive(fields: dict[str, Any], expected: tuple[bool | None, int | None]) -> None:
    for params in (
        parse_completion({**COMPLETION, **fields}, INFO, ServerConfig()).requests[0].params,
        parse_chat({**CHAT, **fields}, INFO, ServerConfig()).request.params,
    ):
        assert (params.context_shift, params.context_keep) == expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"context_shift": "yes"}, "context_shift"),
        ({"context_shift": True, "context_keep": INFO.max_context // 2 + 1}, "context_keep"),
        ({"context_shift": True, "context_keep": -1}, "context_keep"),
        ({"context_shift": True, "context_keep": 1.5}, "context_keep"),
        ({"context_shift": False, "context_keep": 4}, "context_keep"),
        ({"context_shift": True, "use_beam_search": True, "n": 2}, "context_shift"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_completion({**COMPLETION, **fields}, INFO, ServerConfig())
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("info", "fields", "fits"),
    [
        (INFO, {}, False),
        (INFO, {"context_shift": True}, True),
        (SHIFTING, {}, True),
        (SHIFTING, {"context_shift": False}, False),
        (SHIFTING, {"use_beam_search": True, "n": 2}, False),
    ],
)
def test_a_prompt_longer_than_the_context(info: Any, fields: dict[str, Any], fits: bool) -> None:
    ids = {**COMPLETION, **fields, "prompt": TOO_LONG}
    text = {**CHAT, **fields, "messages": [{"role": "user", "content": "x" * (64 * INFO.max_context + 1)}]}
    for parse, body in ((parse_completion, ids), (parse_chat, text)):
        if fits:
            parse(body, info, ServerConfig())
        else:
            with pytest.raises(InvalidRequest, match="fit"):
                parse(body, info, ServerConfig())
