"""Wrong bodies for TGI's and llama.cpp's routes: refused by name, in the dialect's own form; nothing else suffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from jsonschema import Draft202012Validator

from tests.support.fake_engine import STORY
from tests.support.loopback import RunningServer
from tests.support.malformed_requests import NOT_NUMBERS, WRONG_BODIES, with_raw
from tokenmill.server.dialect import Dialect
from tokenmill.server.llamacpp.render import LLAMACPP
from tokenmill.server.tgi.render import TGI

COMPLETION: dict[str, Any] = {"prompt": "Hi"}
TGI_NUMBERS = ["temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed"]
TGI_NUMBERS += ["max_new_tokens", "best_of", "top_n_tokens", "truncate"]
NATIVE_NUMBERS = ["n_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n"]
NATIVE_NUMBERS += ["seed", "n_probs", "n_keep", "mirostat", "mirostat_tau", "dynatemp_range", "xtc_probability"]
NATIVE_NUMBERS += ["dry_multiplier", "presence_penalty", "frequency_penalty", "top_n_sigma", "id_slot", "min_keep"]
TGI_CASES: list[tuple[str, Any]] = [
    ("do_sample", 1),
    ("details", "yes"),
    ("stop", "x"),
    ("stop", [""]),
    ("stop", ["x"] * 1000),
    ("grammar", "x"),
    ("grammar", {}),
    ("grammar", {"type": "xml", "value": ""}),
    ("grammar", {"type": "json", "value": "{"}),
    ("grammar", {"type": "json", "value": 5}),
    ("grammar", {"type": "regex", "value": ""}),
    ("watermark", True),
    ("adapter_id", 5),
]
NATIVE_CASES: list[tuple[str, Any]] = [
    *(("prompt", value) for value in (None, 5, [], {}, [[]], [1.5], [True], [-1], [512], {"prompt_string": 5})),
    ("prompt", "x" * 100_000),
    ("prompt", ["x"] * 10_000),
    ("logit_bias", 5),
    ("logit_bias", [[1, 2, 3]]),
    ("logit_bias", [[9999, 1]]),
    ("logit_bias", [[1, 1e9]]),
    ("grammar", 5),
    ("json_schema", "x"),
    ("cache_prompt", 1),
    ("stream", "yes"),
    ("return_tokens", 1),
    ("stop", [5]),
    ("model", "other"),
    ("lora", [{"id": 0}]),
]


def cases() -> Iterator[tuple[Dialect, str, bytes, str | None]]:
    """(dialect, path, body, a word of the answer)"""
    for path in ("/generate", "/generate_stream", "/"):
        for body in (*WRONG_BODIES, b'{"inputs": 5}', b'{"inputs": ""}', b'{"inputs": "a", "parameters": 5}'):
            yield TGI, path, body, None
    for path in ("/completion", "/infill", "/apply-template"):
        for body in WRONG_BODIES:
            yield LLAMACPP, path, body, None
    for name in TGI_NUMBERS:
        for value in NOT_NUMBERS:
            parameters = with_raw({"details": True}, name, value)
            word = name if value not in NOT_NUMBERS[:4] else None
            yield TGI, "/generate", b'{"inputs":"Hi","parameters":' + parameters + b"}", word
    for name in NATIVE_NUMBERS:
        for value in NOT_NUMBERS:
            word = name if value not in NOT_NUMBERS[:4] else None
            yield LLAMACPP, "/completion", with_raw(COMPLETION, name, value), word
    for name, wrong in TGI_CASES:
        yield TGI, "/generate", orjson.dumps({"inputs": "Hi", "parameters": {name: wrong}}), name
    for name, wrong in NATIVE_CASES:
        yield LLAMACPP, "/completion", orjson.dumps({**COMPLETION, name: wrong}), name


def test_every_wrong_body_is_refused_in_the_dialects_form(server: RunningServer) -> None:
    count = 0
    for dialect, path, body, word in cases():
        reply = server.http.post(server.url + path, content=body, headers={"content-type": "application/json"})
        where = f"{path} {body[:120]!r} → {reply.status_code} {reply.text[:300]}"
        assert 400 <= reply.status_code < 500, where
        Draft202012Validator(dialect.error_schema).validate(reply.json())
        assert word is None or word in reply.text, where
        count += 1
    assert count > 300 and server.engine.running == {}
    assert server.post("/generate", {"inputs": "Hi"}).json() == {"generated_text": STORY}
    assert server.post("/completion", COMPLETION).json()["content"] == STORY
