"""Constrained answers over HTTP, from a real engine in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.server_process import ServerProcess, real_server
from tests.support.timing import SOON_S

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 200}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = 'root ::= name " is " [0-9] [0-9]\nname ::= "Tim" | "Lily"'
REFUSED: list[tuple[str, Any, str]] = [
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}},
        "/a/not",
    ),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}, "hiccup"),
    ("guided_regex", "(", "regex"),
    ("stop_regex", ["(?=x)y"], "lookaround"),
    ("stop_regex", "(a{99}){99}", "too large"),
    ("guided_grammar", "start: nowhere", "nowhere"),
    ("guided_json", '{"$ref": "#/nowhere"}', "#/$ref"),
]


@pytest.fixture(scope="module")
def process(stories_dir: Path) -> Iterator[ServerProcess]:
    with real_server(stories_dir, dtype="float32") as started:
        started.wait_for("ready", 60)
        yield started
        started.terminate()
        started.wait(20)


def answer(process: ServerProcess, **changes: Any) -> str:
    reply = process.http.post("/v1/chat/completions", json={**CHAT, **changes}, timeout=60)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_by_the_sdk(process: ServerProcess, strict: bool | None) -> None:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": strict}}
        reply = client.chat.completions.create(**CHAT, response_format=wanted)
    person = json.loads(reply.choices[0].message.content or "")
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99


def test_every_way_to_ask(process: ServerProcess) -> None:
    constant = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "42"}, "strict": True}}
    assert answer(process, response_format=constant) == '"42"'
    assert answer(process, guided_choice=["yes", "no"]) in ("yes", "no")
    assert answer(process, guided_regex="[ab]{3}x").endswith("x")
    assert answer(process, guided_grammar=GBNF).startswith(("Tim is ", "Lily is "))
    assert answer(process, guided_grammar='start: "a" "b"') == "ab"
    assert set(json.loads(answer(process, guided_json=json.dumps(PERSON)))) == {"name", "age"}
    assert answer(process, response_format={"type": "text"}, guided_choice=["yes"]) == "yes"
    assert answer(process, structured_outputs={"choice": ["yes"]}) == "yes"
    assert answer(process, structured_outputs={"regex": "[ab]{3}x", "json": None}).endswith("x")
    assert set(json.loads(answer(process, structured_outputs={"json": PERSON}))) == {"name", "age"}


def test_fields_of_other_engines_are_honoured(process: ServerProcess) -> None:
    """llama.cpp's, SGLang's and Ollama's, which their clients send to any server with OpenAI's paths."""
    constant: dict[str, Any] = {"const": "42"}
    assert answer(process, json_schema=constant) == answer(process, format=constant) == '"42"'
    assert answer(process, response_format={"type": "json_object", "schema": constant}) == '"42"'
    assert answer(process, response_format={"type": "json_schema", "schema": constant}) == '"42"'
    assert answer(process, grammar='root ::= "ab"') == answer(process, ebnf='root ::= "ab"') == "ab"
    assert answer(process, regex="[ab]{3}x").endswith("x")


def test_usage_counts_forced_tokens(process: ServerProcess) -> None:
    reply = process.http.post("/v1/chat/completions", json={**CHAT, "guided_choice": ["one two three"]}).json()
    assert reply["choices"][0]["message"]["content"] == "one two three"
    assert reply["usage"]["completion_tokens"] > 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value", "word"), REFUSED)
def test_a_refusal_is_a_400_before_the_first_byte(
    process: ServerProcess, field: str, value: Any, word: str, stream: bool
) -> None:
    began = time.monotonic()
    reply = process.http.post("/v1/chat/completions", json={**CHAT, field: value, "stream": stream}, timeout=60)
    assert reply.status_code == 400, reply.text
    assert word in reply.json()["error"]["message"]
    assert time.monotonic() - began < SOON_S


def test_two_constraints_are_one_too_many(process: ServerProcess) -> None:
    body = {**CHAT, "guided_regex": "a", "response_format": {"type": "json_object"}}
    reply = process.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "guided_regex"
    reply = process.http.post("/v1/chat/completions", json={**CHAT, "guided_regex": "a", "regex": "a"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "regex"
