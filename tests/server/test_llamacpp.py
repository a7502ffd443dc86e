"""llama.cpp's native routes over a whole engine: completion, infill, templates, tokens, properties, slots, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.scripted_server import ScriptedServer, scripted_server

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
SCRIPT = {
    "control_tokens": FIM,
    "max_context": 500,
    "answers": [
        {"match": r"file_sep\|>a.py\nA = 1\n<\|file_sep\|>.*\n<\|fim_prefix", "say": "with files"},
        {"match": r"fim_prefix\|>def f\(\):\n  x<\|fim_suffix\|> \+ 1\n<\|fim_middle\|>$", "say": "y"},
        {"match": "fail", "say": ["some ", {"fail": True}]},
        {"match": "refuse", "say": "No, never!", "stubborn": True},
        {"match": "second", "say": "two\nlines"},
        {"say": "Hello – you."},
    ],
}
SAID = "Hello – you."


@pytest.fixture(scope="module")
def native() -> Iterator[ScriptedServer]:
    with scripted_server(SCRIPT) as server:
        yield server


def ask(server: ScriptedServer, path: str = "/completion", **body: Any) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    blocks = [block for block in reply.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_a_whole_completion(native: ScriptedServer) -> None:
    reply = ask(native, prompt="Hi", n_predict=64, return_tokens=True, n_probs=2)
    assert (reply["content"], reply["stop"], reply["stop_type"], reply["prompt"]) == (SAID, True, "eos", "Hi")
    assert bytes(reply["tokens"][:-1]).decode() == SAID and reply["tokens_evaluated"] == 3
    assert reply["tokens_predicted"] == len(reply["tokens"]) and reply["model"] == "scripted"
    assert b"".join(bytes(one["bytes"]) for one in reply["completion_probabilities"]).decode() == SAID
    assert all(len(one["top_logprobs"]) == 2 for one in reply["completion_probabilities"])
    timings = reply["timings"]
    assert timings["predicted_n"] == reply["tokens_predicted"] and timings["prompt_n"] + timings["cache_n"] == 3
    assert timings["predicted_ms"] > 0 and timings["prompt_ms"] > 0
    settings = reply["generation_settings"]
    assert (settings["temperature"], settings["top_k"], settings["n_predict"]) == (0.8, 40, 64)


def test_how_it_ends(native: ScriptedServer) -> None:
    limited = ask(native, prompt="Hi", n_predict=5)
    assert (limited["content"], limited["stop_type"]) == ("Hello", "limit")
    stopped = ask(native, prompt="Hi", stop=["you"])
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("Hello – ", "word", "you")
    assert ask(native, prompt="Hi", n_predict=0)["content"] == ""
    assert ask(native, prompt="second")["has_new_line"] is True and limited["has_new_line"] is False


def test_a_stream_joins_to_the_whole(native: ScriptedServer) -> None:
    reply = native.post("/completion", {"prompt": "Hi", "stream": True})
    received = chunks(reply)
    assert reply.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in reply.text
    assert "".join(chunk["content"] for chunk in received) == SAID
    assert [chunk["stop"] for chunk in received] == [False] * (len(received) - 1) + [True]
    assert received[-1]["stop_type"] == "eos" and received[-1]["tokens_predicted"] == len(SAID.encode()) + 1


def test_prompts_in_every_form(native: ScriptedServer) -> None:
    ids = ask(native, "/tokenize", content="Hi", add_special=True)["tokens"]
    for prompt in (ids, [256, "Hi"], ["H", 105], {"prompt_string": "Hi"}):
        reply = ask(native, prompt=prompt)
        assert (reply["content"], reply["tokens_evaluated"]) == (SAID, 3), prompt
    several = native.post("/completion", {"prompt": ["Hi", [256, 72], "second"]}).json()
    assert [(one["index"], one["content"]) for one in several] == [(0, SAID), (1, SAID), (2, "two\nlines")]
    streamed = chunks(native.post("/completion", {"prompt": ["Hi", "second"], "stream": True}))
    for index, text in ((0, SAID), (1, "two\nlines")):
        own = [chunk for chunk in streamed if chunk["index"] == index]
        assert "".join(chunk["content"] for chunk in own) == text and own[-1]["stop"]


def test_parameters_act(native: ScriptedServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert json.loads(ask(native, prompt="refuse", json_schema=schema)["content"]) == {"a": "No, never!"}
    assert ask(native, prompt="refuse", grammar='root ::= "No" "!"')["content"] == "No!"
    assert ask(native, prompt="Hi", logit_bias=[["H", False]])["content"] == "", "a script that is contradicted ends"
    forms: list[Any] = [[[72, -100]], {"72": -100}]
    assert [ask(native, prompt="Hi", logit_bias=form)["content"] for form in forms] == ["", ""]
    prompt = "a prompt that is longer than one block of the cache, twice"
    ask(native, prompt=prompt)
    assert ask(native, prompt=prompt)["timings"]["cache_n"] >= 32
    assert ask(native, prompt=prompt, cache_prompt=False)["timings"]["cache_n"] == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt is required"),
        ({"prompt": []}, "prompt is required"),
        ({"prompt": [1, 9999]}, "token ids"),
        ({"prompt": "Hi", "mirostat": 1}, "mirostat"),
        ({"prompt": "Hi", "samplers": ["top_k"]}, "samplers"),
        ({"prompt": "Hi", "id_slot": 2}, "id_slot"),
        ({"prompt": "Hi", "t_max_predict_ms": 100}, "t_max_predict_ms"),
        ({"prompt": "Hi", "repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"prompt": "Hi", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "Hi", "logit_bias": [[1, "x"]]}, "logit_bias"),
        ({"prompt": "Hi", "grammar": "x", "json_schema": {}}, "json_schema"),
        ({"prompt": "Hi", "n_predict": "5"}, "n_predict"),
        ({"prompt": "Hi", "temperature": -1}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(native: ScriptedServer, body: dict[str, Any], words: str) -> None:
    reply = native.post("/completion", body)
    assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_errors(native: ScriptedServer) -> None:
    long = native.post("/completion", {"prompt": "x" * 600})
    assert (long.status_code, long.json()["error"]["type"]) == (400, "exceed_context_size_error")
    failed = native.post("/completion", {"prompt": "fail"})
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
    assert "error" in chunks(native.post("/completion", {"prompt": "fail", "stream": True}))[-1]
    assert native.get("/completion").json()["error"]["code"] == 405


def test_infill(native: ScriptedServer) -> None:
    body = {"input_prefix": "def f():\n", "prompt": "  x", "input_suffix": " + 1\n", "temperature": 0}
    assert ask(native, "/infill", **body)["content"] == "y"
    files = [{"filename": "a.py", "text": "A = 1"}]
    assert ask(native, "/infill", **body, input_extra=files)["content"] == "with files"
    assert "".join(chunk["content"] for chunk in chunks(native.post("/infill", {**body, "stream": True}))) == "y"
    assert native.post("/infill", {"input_prefix": "a"}).status_code == 400
    with scripted_server([{"say": "x"}]) as plain:
        refused = plain.post("/infill", body)
        assert refused.status_code == 400 and "fill-in-the-middle" in refused.json()["error"]["message"]


def test_templates_and_tokens(native: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = ask(native, "/apply-template", messages=messages)["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert native.post("/apply-template", {}).status_code == 400
    assert ask(native, "/tokenize", content="é<|file_sep|>", with_pieces=True)["tokens"] == [
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
        {"id": 261, "piece": "<|file_sep|>"},
    ]
    assert len(ask(native, "/tokenize", content="<|file_sep|>", parse_special=False)["tokens"]) == 12
    assert ask(native, "/detokenize", tokens=[72, 105]) == {"prompt": "Hi", "content": "Hi"}
    both = native.post("/tokenize", {"content": "a", "prompt": "a"})
    assert both.status_code == 400 and "only one" in both.json()["error"]["message"]


def test_properties_and_slots(native: ScriptedServer) -> None:
    props = native.get("/props").json()
    assert (props["total_slots"], props["model_alias"], props["eos_token"]) == (64, "scripted", "</s>")
    assert props["default_generation_settings"]["n_ctx"] == 500
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    slots = native.get("/slots").json()
    assert len(slots) == 64 and not any(slot["is_processing"] for slot in slots)
    assert native.get("/slots?fail_on_no_slot=1").status_code == 200
