"""A real model calls a tool through the openai, anthropic and ollama packages, and goes on with the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.support.server_process import real_server

pytestmark = pytest.mark.slow
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
GREEDY: Any = {"model": "tiny", "temperature": 0, "tools": [WEATHER], "max_completion_tokens": 100}


@pytest.fixture(scope="module")
def client(qwen_coder_path: Path) -> Iterator[openai.OpenAI]:
    with (
        real_server(qwen_coder_path, num_blocks=512) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=300) as client,
    ):
        process.wait_for("ready", 300)
        yield client


def city_of(message: Any) -> str:
    (call,) = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    return str(json.loads(call.function.arguments)["city"])


def test_the_right_city(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0]
    assert city_of(reply.message) == "Paris" and reply.finish_reason == "tool_calls"
    with client.chat.completions.stream(messages=QUESTION, **GREEDY) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == reply.message.tool_calls[0].function.arguments


def test_the_result_is_told(client: openai.OpenAI) -> None:
    call = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Snow, -7 degrees Celsius"}
    told: Any = [*QUESTION, call.to_dict(), result]
    reply = client.chat.completions.create(messages=told, tool_choice="none", **GREEDY).choices[0]
    assert reply.message.tool_calls is None and "-7" in reply.message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    forced: Any = {"tool_choice": choice, "parallel_tool_calls": False}  # else this model says it again
    reply = client.chat.completions.create(messages=QUESTION, **forced, **GREEDY).choices[0]
    assert city_of(reply.message) == "Paris" and reply.finish_reason == "tool_calls"


def url_of(client: openai.OpenAI) -> str:
    return str(client.base_url).removesuffix("/v1/")


def test_the_right_city_for_anthropics_client(client: openai.OpenAI) -> None:
    function = WEATHER["function"]
    tool: Any = {"name": function["name"], "description": function["description"]}
    tool["input_schema"] = function["parameters"]
    asked: Any = {"model": "tiny", "max_tokens": 100, "tools": [tool], "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=url_of(client), api_key="unused", max_retries=0, timeout=300) as claude:
        reply = claude.messages.create(messages=QUESTION, **asked)
        (call,) = [block for block in reply.content if block.type == "tool_use"]
        assert (call.name, call.input, reply.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
        with claude.messages.stream(messages=QUESTION, **asked) as stream:
            assert stream.get_final_message().content[-1].input == call.input
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Snow, -7 degrees Celsius"}
        turns: Any = [
            *QUESTION,
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result]},
        ]
        told = claude.messages.create(messages=turns, tool_choice={"type": "none"}, **asked)
    assert told.stop_reason == "end_turn" and "-7" in told.content[0].text


def test_the_right_city_for_ollamas_client(client: openai.OpenAI) -> None:
    asked: Any = {"options": {"temperature": 0, "num_predict": 100}, "tools": [WEATHER]}
    with ollama.Client(host=url_of(client), timeout=300) as llama:
        (call,) = llama.chat("tiny", QUESTION, **asked).message.tool_calls or ()
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
