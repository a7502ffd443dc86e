"""One conversation in every dialect at temperature 0: the same text, token counts that agree, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess, real_server

SYSTEM = "You are a helpful teacher."
TURNS = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy? Answer in one sentence."},
]
CHAT = [{"role": "system", "content": SYSTEM}, *TURNS]
MAX_TOKENS = 24
Reply = tuple[str, int, int]  # text, tokens of the prompt, tokens of the answer
Ask = Callable[[ServerProcess], Reply]


@pytest.fixture(scope="module")
def process(smollm2_path: Path) -> Iterator[ServerProcess]:
    with real_server(smollm2_path, num_blocks=512) as started:
        started.wait_for("ready", 120)
        yield started


def post(process: ServerProcess, path: str, body: dict[str, Any]) -> str:
    reply = process.http.post(path, json={"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    return reply.text


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def openai_whole(process: ServerProcess) -> Reply:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": MAX_TOKENS}
    reply = json.loads(post(process, "/v1/chat/completions", body))
    usage = reply["usage"]
    return reply["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"]


def openai_stream(process: ServerProcess) -> Reply:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True}
    chunks = events(post(process, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    usage = chunks[-1]["usage"]
    return text, usage["prompt_tokens"], usage["completion_tokens"]


RESPONSE = {"instructions": SYSTEM, "input": TURNS, "temperature": 0, "max_output_tokens": MAX_TOKENS, "store": False}


def response_reply(response: dict[str, Any]) -> Reply:
    usage = response["usage"]
    return response["output"][0]["content"][0]["text"], usage["input_tokens"], usage["output_tokens"]


def responses_whole(process: ServerProcess) -> Reply:
    return response_reply(json.loads(post(process, "/v1/responses", RESPONSE)))


def responses_stream(process: ServerProcess) -> Reply:
    seen = events(post(process, "/v1/responses", {**RESPONSE, "stream": True}))
    text = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
    assert text == response_reply(seen[-1]["response"])[0]
    return response_reply(seen[-1]["response"])


ANTHROPIC = {"system": SYSTEM, "messages": TURNS, "temperature": 0, "max_tokens": MAX_TOKENS}


def input_tokens(usage: dict[str, Any]) -> int:
    return int(sum(usage.get(name) or 0 for name in usage if name.endswith("input_tokens")))


def anthropic_whole(process: ServerProcess) -> Reply:
    reply = json.loads(post(process, "/v1/messages", ANTHROPIC))
    text = "".join(block.get("text", "") for block in reply["content"])
    return text, input_tokens(reply["usage"]), reply["usage"]["output_tokens"]


def anthropic_stream(process: ServerProcess) -> Reply:
    seen = events(post(process, "/v1/messages", {**ANTHROPIC, "stream": True}))
    text = "".join(event["delta"]["text"] for event in seen if event["type"] == "content_block_delta")
    start = next(event["message"]["usage"] for event in seen if event["type"] == "message_start")
    end = next(event["usage"] for event in seen if event["type"] == "message_delta")
    return text, input_tokens(start), end["output_tokens"]


OPTIONS = {"options": {"temperature": 0, "num_predict": MAX_TOKENS}}


def ollama_chat(process: ServerProcess) -> Reply:
    reply = json.loads(post(process, "/api/chat", {**OPTIONS, "messages": CHAT, "stream": False}))
    return reply["message"]["content"], reply["prompt_eval_count"], reply["eval_count"]


def ollama_stream(process: ServerProcess) -> Reply:
    lines = [json.loads(line) for line in post(process, "/api/chat", {**OPTIONS, "messages": CHAT}).splitlines()]
    last = lines[-1]
    return "".join(line["message"]["content"] for line in lines), last["prompt_eval_count"], last["eval_count"]


def rendered(process: ServerProcess) -> str:
    """The conversation as a text, for dialects that know none."""
    return str(json.loads(post(process, "/apply-template", {"messages": CHAT}))["prompt"])


def llamacpp_whole(process: ServerProcess) -> Reply:
    body = {"prompt": rendered(process), "temperature": 0, "n_predict": MAX_TOKENS}
    reply = json.loads(post(process, "/completion", body))
    return reply["content"], reply["tokens_evaluated"], reply["tokens_predicted"]


def llamacpp_stream(process: ServerProcess) -> Reply:
    body = {"prompt": rendered(process), "temperature": 0, "n_predict": MAX_TOKENS, "stream": True}
    chunks = events(post(process, "/completion", body))
    last = chunks[-1]
    return "".join(chunk["content"] for chunk in chunks), last["tokens_evaluated"], last["tokens_predicted"]


def tgi_body(process: ServerProcess) -> dict[str, Any]:
    return {"inputs": rendered(process), "parameters": {"max_new_tokens": MAX_TOKENS, "details": True}}


def tgi_whole(process: ServerProcess) -> Reply:
    reply = process.http.post("/generate", json=tgi_body(process))
    content = reply.json()
    return content["generated_text"], int(reply.headers["x-prompt-tokens"]), content["details"]["generated_tokens"]


def tgi_stream(process: ServerProcess) -> Reply:
    lines = post(process, "/generate_stream", tgi_body(process)).splitlines()
    chunks = [json.loads(line.removeprefix("data:")) for line in lines if line]
    details = chunks[-1]["details"]
    text = "".join(chunk["token"]["text"] for chunk in chunks)
    return text, details["input_length"], details["generated_tokens"]


ASKED: dict[str, Ask] = {
    "OpenAI, streamed": openai_stream,
    "Responses": responses_whole,
    "Responses, streamed": responses_stream,
    "Anthropic": anthropic_whole,
    "Anthropic, streamed": anthropic_stream,
    "Ollama": ollama_chat,
    "Ollama, streamed": ollama_stream,
    "llama.cpp": llamacpp_whole,
    "llama.cpp, streamed": llamacpp_stream,
    "TGI": tgi_whole,
    "TGI, streamed": tgi_stream,
}


@pytest.mark.parametrize("dialect", ASKED)
def test_the_same_text_and_counts(process: ServerProcess, dialect: str) -> None:
    expected = openai_whole(process)
    assert len(expected[0]) > 10 and expected[2] > 4
    assert ASKED[dialect](process) == expected


PROMPT = "The capital of France is"


def test_a_plain_prompt_goes_on_alike_everywhere(process: ServerProcess) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS}
    reply = json.loads(post(process, "/v1/completions", body))
    text, num_prompt = reply["choices"][0]["text"], reply["usage"]["prompt_tokens"]
    num_new = reply["usage"]["completion_tokens"]
    raw = json.loads(post(process, "/api/generate", {**OPTIONS, "prompt": PROMPT, "raw": True, "stream": False}))
    assert (raw["response"], raw["prompt_eval_count"], raw["eval_count"]) == (text, num_prompt, num_new)
    tgi = {"inputs": PROMPT, "parameters": {"max_new_tokens": MAX_TOKENS, "details": True}}
    generated = json.loads(post(process, "/generate", tgi))
    assert (generated["generated_text"], generated["details"]["generated_tokens"]) == (text, num_new)
    native = json.loads(post(process, "/completion", {"prompt": PROMPT, "temperature": 0, "n_predict": MAX_TOKENS}))
    assert (native["content"], native["tokens_evaluated"], native["tokens_predicted"]) == (text, num_prompt, num_new)


def test_what_is_counted_beforehand_is_what_is_used(process: ServerProcess) -> None:
    _, num_prompt, _ = openai_whole(process)
    assert json.loads(post(process, "/tokenize", {"messages": CHAT}))["count"] == num_prompt
    counted = {key: ANTHROPIC[key] for key in ("system", "messages")}
    assert json.loads(post(process, "/v1/messages/count_tokens", counted))["input_tokens"] == num_prompt
    single = {"system": SYSTEM, "prompt": "Hello", "stream": False, **OPTIONS}
    generated = json.loads(post(process, "/api/generate", single))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
    chatted = json.loads(post(process, "/api/chat", {**OPTIONS, "messages": messages, "stream": False}))
    assert generated["prompt_eval_count"] == chatted["prompt_eval_count"]
    assert generated["response"] == chatted["message"]["content"]
    assert len(generated["context"]) == generated["prompt_eval_count"] + generated["eval_count"]
