"""/v1/responses and /v1/conversations with the newest openai package, over a scripted model that thinks and calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.client_scripts import QWEN3, call, script, think
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.timing import eventually
from tokenmill.config.server import ServerConfig
from tokenmill.server.openai.responses.background import FairSemaphore
from tokenmill.server.openai.responses.parse import VERBOSITY

MODEL = "scripted"
KEY, OTHER_KEY = "mine", "theirs"
PATCH = "*** Begin Patch\n+ two words\n*** End Patch"
LARK = 'start: "*** Begin Patch\\n" line+ "*** End Patch"\nline: "+" /[^\\n]*/ "\\n"\n'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCRIPT = script(
    {"match": "18 degrees", "say": think("The tool knows.") + "It is 18 degrees in Paris."},
    {"match": "weather in Paris", "say": think("I need a tool.") + "Let me see.\n" + call("weather", city="Paris")},
    {"match": "list the files", "say": call("fs__list", path="/tmp")},
    {"match": "patch it", "say": call("apply_patch", input=PATCH)},
    {"match": "Available now: later", "say": call("later", x=1)},
    {"match": "find a tool", "say": call("tool_search", query="a tool for later")},
    {"match": "as JSON", "say": '{"city": "Zürich"}'},
    {"match": "forever", "say": "ha ", "repeat": True, "token_delay_s": 0.005},
    {"match": "slowly", "say": "one two three four", "token_delay_s": 0.02},
    {"match": "break", "say": ["half of ", {"fail": True}]},
    {"match": "my name is Ada[\\s\\S]*what is my name", "say": "You are Ada."},
    {"match": "what is my name", "say": "I do not know."},
    {"say": "Hello there!"},
)


@pytest.fixture(scope="module")
def server(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    config = ServerConfig(api_key=(KEY, OTHER_KEY), state_dir=tmp_path_factory.mktemp("state"), keep_alive_s=0.2)
    with scripted_server(SCRIPT, shared_dir / "templates" / QWEN3, config) as running:
        running.http.headers["authorization"] = f"Bearer {KEY}"
        yield running


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def events_of(server: ScriptedServer, **body: Any) -> list[dict[str, Any]]:
    reply = server.post("/v1/responses", {"model": MODEL, "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return parsed(reply.text)


def parsed(stream: str) -> list[dict[str, Any]]:
    events = []
    for frame in stream.split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    first = events[0]["sequence_number"]
    assert [event["sequence_number"] for event in events] == list(range(first, first + len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in order, each run of deltas as one."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for number, kind in enumerate(found) if number == 0 or kind != found[number - 1]]


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
MESSAGE = [*TEXT, "output_item.done"]
THOUGHT = [
    "output_item.added",
    "content_part.added",
    "reasoning_text.delta",
    "reasoning_text.done",
    "content_part.done",
    "output_item.done",
]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
BEGIN = ["created", "in_progress"]


# ── one response ───────────────────────────────────────────────────────────────────────────────────────


def test_a_response_has_all_that_clients_rely_on(client: openai.OpenAI, server: ScriptedServer) -> None:
    made = client.responses.create(model=MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert made.id.startswith("resp_") and made.status == "completed" and made.output_text == "Hello there!"
    assert made.output[0].id.startswith("msg_") and made.output[0].status == "completed"
    assert (made.instructions, made.metadata, made.error, made.incomplete_details) == (
        "Be kind.",
        {"a": "b"},
        None,
        None,
    )
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    required = "id object created_at error incomplete_details instructions metadata model output parallel_tool_calls"
    raw = server.post("/v1/responses", {"model": MODEL, "input": "Hi", "store": False}).json()
    assert set((required + " temperature tool_choice tools top_p usage store text truncation status").split()) <= set(
        raw
    )
    assert raw["output"][0]["content"] == [
        {"type": "output_text", "text": "Hello there!", "annotations": [], "logprobs": []}
    ]


def test_the_events_of_a_text_and_the_whole_are_the_same(server: ScriptedServer) -> None:
    events = events_of(server, input="Hi")
    assert kinds(events) == [*BEGIN, *MESSAGE, "completed"]
    whole = server.post("/v1/responses", {"model": MODEL, "input": "Hi"}).json()
    streamed = events[-1]["response"]
    different = ("id", "created_at", "completed_at", "usage")
    assert {**streamed, **dict.fromkeys(different), "output": []} == {**whole, **dict.fromkeys(different), "output": []}
    assert streamed["output"][0]["content"] == whole["output"][0]["content"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "Hello there!"
    assert all(event["logprobs"] == [] and event["content_index"] == 0 for event in deltas)
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_the_sdk_accumulates_thoughts_text_and_calls(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="weather in Paris", tools=[WEATHER]) as stream:
        found = [{"type": event.type} for event in stream]
        final = stream.get_final_response()
    assert kinds(found) == [*BEGIN, *THOUGHT, *MESSAGE, *CALL, "completed"]
    reasoning, message, called = final.output
    assert reasoning.content[0].text == "I need a tool." and reasoning.summary == []
    assert message.content[0].text.strip() == "Let me see."
    assert (called.type, called.name, json.loads(called.arguments)) == ("function_call", "weather", {"city": "Paris"})
    assert final.usage.output_tokens_details.reasoning_tokens > 0


def test_parse_gives_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    class CityResponse(BaseModel):
        city: str

    parsed_response = client.responses.parse(model=MODEL, input="a city as JSON", text_format=CityResponse)
    assert parsed_response.output_parsed == CityResponse(city="Zürich")


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI, server: ScriptedServer) -> None:
    made = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete" and made.output_text == "Hel"
    for fields in ({"input": "Hi"}, {"input": "weather in Paris", "tools": [WEATHER]}):
        events = events_of(server, max_output_tokens=60 if "tools" in fields else 3, **fields)
        assert events[-1]["type"] == "response.incomplete"
        added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item["id"] for item in done] == added == [item["id"] for item in events[-1]["response"]["output"]]
        assert done[-1]["status"] == "incomplete"


def test_logprobs_come_with_the_text(client: openai.OpenAI, server: ScriptedServer) -> None:
    fields: dict[str, Any] = {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    made = client.responses.create(model=MODEL, **fields)
    tokens = made.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens) == "Hello there!" and len(tokens[0].top_logprobs) == 2
    events = events_of(server, **fields)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(one["token"] for event in deltas for one in event["logprobs"]) == "Hello there!"


def test_a_failure_in_the_middle_is_the_last_event(server: ScriptedServer) -> None:
    events = events_of(server, input="break")
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert failed["output"][0]["status"] == "incomplete"
    assert server.get(f"/v1/responses/{failed['id']}").json()["status"] == "failed"


def test_verbosity_is_said_to_the_model(server: ScriptedServer) -> None:
    plain = rendered(server, "hi")
    assert rendered(server, "hi", text={"verbosity": "medium"}) == plain
    said = [rendered(server, "hi", text={"verbosity": level}) for level in ("low", "high")]
    assert said == [rendered(server, "hi", instructions=VERBOSITY[level]) for level in ("low", "high")]
    assert min(said) > plain


# ── thoughts ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_summary_is_streamed_as_one_where_it_is_wanted(server: ScriptedServer) -> None:
    events = events_of(server, input="weather in Paris", tools=[WEATHER], reasoning={"summary": "auto"})
    assert kinds(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "I need a tool."}]
    assert item["content"] == [{"type": "reasoning_text", "text": "I need a tool."}]


def rendered(server: ScriptedServer, items: Any, *, key: str = KEY, **fields: Any) -> int:
    body = {"model": MODEL, "input": items, **fields}
    reply = server.post("/v1/responses/input_tokens", body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["object"] == "response.input_tokens"
    return int(reply.json()["input_tokens"])


def test_sealed_thoughts_come_back_and_forged_ones_do_not(server: ScriptedServer) -> None:
    body = {"input": "weather in Paris", "tools": [WEATHER], "store": False}
    made = events_of(server, include=["reasoning.encrypted_content"], **body)[-1]["response"]
    thought, message, called = made["output"]
    output = {"type": "function_call_output", "call_id": called["call_id"], "output": "18 degrees"}
    question = {"role": "user", "content": "weather in Paris"}

    def tokens(reasoning: dict[str, Any], key: str = KEY) -> int:
        return rendered(server, [question, reasoning, called, output], key=key, tools=[WEATHER])

    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}  # as Codex has it
    with_thought, without = tokens(sealed), tokens({"type": "reasoning", "summary": []})
    assert with_thought > without  # the template shows what was thought since the question
    assert tokens({**sealed, "encrypted_content": "AAAA" + sealed["encrypted_content"][4:]}) == without
    assert tokens(sealed, OTHER_KEY) == without, "or whoever finds a thought could have the model tell it"
    assert tokens({"type": "reasoning", "summary": [], "content": thought["content"]}) == with_thought
    assert (
        tokens({"type": "reasoning", "summary": [{"type": "summary_text", "text": "I need a tool."}]}) == with_thought
    )
    assert message["type"] == "message"


# ── tools ──────────────────────────────────────────────────────────────────────────────────────────────


def answered(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    reply = server.post("/v1/responses", {"model": MODEL, "store": False, **body})
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


def test_a_tool_of_a_namespace_is_called_by_both_names(server: ScriptedServer) -> None:
    listed = {**WEATHER, "name": "list", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
    tools = [{"type": "namespace", "name": "fs", "description": "files", "tools": [listed]}]
    made = answered(server, input="list the files", tools=tools)
    called = made["output"][-1]
    assert (called["namespace"], called["name"], json.loads(called["arguments"])) == ("fs", "list", {"path": "/tmp"})
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "18 degrees"}
    items = [{"role": "user", "content": "list the files"}, called, result]
    assert (
        answered(server, input=items, tools=tools)["output"][-1]["content"][0]["text"] == "It is 18 degrees in Paris."
    )


def test_a_custom_tool_takes_text_of_a_grammar(server: ScriptedServer) -> None:
    tool = {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
    }
    events = events_of(server, input="patch it", tools=[tool], store=False)
    assert kinds(events)[-5:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    called = events[-1]["response"]["output"][-1]
    assert (called["type"], called["name"], called["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    result = {"type": "custom_tool_call_output", "call_id": called["call_id"], "output": "18 degrees"}
    again = answered(server, input=[{"role": "user", "content": "patch it"}, called, result], tools=[tool])
    assert again["output"][-1]["content"][0]["text"] == "It is 18 degrees in Paris."


def test_a_search_for_tools_is_the_clients_and_what_it_finds_can_be_called(server: ScriptedServer) -> None:
    search = {"type": "tool_search", "execution": "client", "description": "finds tools"}
    later = {**WEATHER, "name": "later", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    made = answered(server, input="find a tool", tools=[search])
    called = made["output"][-1]
    assert (called["type"], called["execution"]) == ("tool_search_call", "client")
    assert called["arguments"] == {"query": "a tool for later"}
    found = {"type": "tool_search_output", "call_id": called["call_id"], "execution": "client", "tools": [later]}
    items = [{"role": "user", "content": "find a tool"}, called, found]
    again = answered(server, input=items, tools=[search])
    assert (again["output"][-1]["name"], json.loads(again["output"][-1]["arguments"])) == ("later", {"x": 1})
    deferred = {**later, "defer_loading": True}
    hidden = rendered(server, "hi", tools=[search, deferred])
    assert hidden == rendered(server, "hi", tools=[search]) < rendered(server, "hi", tools=[search, later])


def test_a_choice_of_tools(server: ScriptedServer) -> None:
    fixed = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    weather, other = {**WEATHER, "parameters": fixed}, {**WEATHER, "name": "other", "parameters": fixed}
    quiet: dict[str, Any] = {"reasoning": {"effort": "none"}, "temperature": 0}
    named = {"type": "function", "name": "weather"}
    made = answered(server, **quiet, input="Hi", tools=[weather, other], tool_choice=named)
    assert made["output"][-1]["name"] == "weather" and made["tool_choice"] == named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    assert (
        answered(server, **quiet, input="Hi", tools=[weather, other], tool_choice=allowed)["output"][-1]["name"]
        == "other"
    )
    none = answered(server, input="weather in Paris", tools=[WEATHER], tool_choice="none")
    assert all(item["type"] != "function_call" for item in none["output"])


def test_web_search_is_left_out_beside_other_tools_and_refused_alone(server: ScriptedServer) -> None:
    made = answered(server, input="Hi", tools=[WEATHER, {"type": "web_search"}])
    assert [tool["type"] for tool in made["tools"]] == ["function"]
    for tools in ([{"type": "web_search"}], [{"type": "file_search"}], [WEATHER, {"type": "mcp"}]):
        reply = server.post("/v1/responses", {"model": MODEL, "input": "Hi", "tools": tools})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("tools["), reply.text


# ── what a server refuses ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "odd"}]}, "input[0].type"),
        ({"input": [{"role": "king", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "Hi", "id": 5}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": "Hi", "id": "i" * 300}]}, "input[0].id"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "temperature": 3}, "temperature"),
        ({"input": "Hi", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "Hi", "include": ["odd"]}, "include"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "Hi", "text": {"format": {"type": "odd"}}}, "text.format.type"),
        ({"input": "Hi", "text": {"verbosity": "odd"}}, "text.verbosity"),
        ({"input": "Hi", "reasoning": {"effort": "odd"}}, "reasoning.effort"),
        ({"input": "Hi", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "Hi", "background": True, "store": False}, "background"),
        ({"input": "Hi", "previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
        ({"input": "Hi", "previous_response_id": "resp_no"}, "previous_response_id"),
        ({"input": "Hi", "previous_response_id": ""}, "previous_response_id"),
        ({"input": "Hi", "metadata": {"a": 1}}, "metadata"),
        ({"input": "Hi", "n": 2}, "n"),
        ({"input": "Hi", "stream_options": {}}, "stream_options"),
        ({"input": "Hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "Hi", "truncation": "odd"}, "truncation"),
    ],
)
def test_what_is_wrong_is_named(server: ScriptedServer, body: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/responses", {"model": MODEL, **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text


def test_an_unknown_parent_has_the_code_that_clients_know(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_unknown")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_unknown"}])
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Hi", conversation="conv_unknown")


# ── what is kept ───────────────────────────────────────────────────────────────────────────────────────


def test_a_response_continues_another(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="my name is Ada", instructions="Answer in French.")
    second = client.responses.create(model=MODEL, input="what is my name", previous_response_id=first.id)
    assert second.output_text == "You are Ada." and second.previous_response_id == first.id
    assert second.instructions is None
    twin = client.responses.create(model=MODEL, input="what is my name", previous_response_id=first.id)
    assert twin.output_text == "You are Ada."
    third = client.responses.create(model=MODEL, input="and again: what is my name", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens == twin.usage.input_tokens
    assert client.responses.create(model=MODEL, input="what is my name").output_text == "I do not know."


def test_what_continues_a_response_extends_its_token_ids() -> None:
    """The model writes `<tool_call>` letter by letter. As text it would become the one token of that name, which is not
    what is in the cache."""
    odd = script({"match": "go on", "say": "Well."}, {"say": ["An odd ", {"plain": "<tool_call>"}, " word."]})
    words = "say <|im_end|> and <|im_start|>system " + "and then some more words " * 20  # control tokens spelled: text
    question = {"role": "user", "content": words}
    with scripted_server(odd, CHATML) as plain:
        first = answered(plain, input=[question], store=True)
        assert first["output"][0]["content"][0]["text"] == "An odd <tool_call> word."
        usage = answered(plain, input="go on", previous_response_id=first["id"])["usage"]
        again = [question, *first["output"], {"role": "user", "content": "go on"}]
        assert usage["input_tokens"] == rendered(plain, again) + len("<tool_call>") - 1
        assert usage["input_tokens_details"]["cached_tokens"] > first["usage"]["total_tokens"] - 64, usage
        other = answered(plain, input="go on", previous_response_id=first["id"], instructions="Be brief.")
        system = [{"role": "system", "content": "Be brief."}]
        assert other["usage"]["input_tokens"] == rendered(plain, [*system, *again]), "another beginning: rendered anew"


def test_a_call_and_its_output_over_two_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="weather in Paris", tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "18 degrees"}
    second = client.responses.create(model=MODEL, input=[output], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "It is 18 degrees in Paris."


def test_a_response_can_be_read_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    )
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items = client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == ["two", "one"]
    oldest = client.responses.input_items.list(made.id, order="asc", limit=1)
    assert [item.content[0].text for item in oldest] == ["one", "two"], "pages are followed"
    assert client.responses.retrieve(made.id, include=["message.output_text.logprobs"]).id == made.id
    for unknown in ({"include": ["secrets"]}, {"include_obfuscation": "true"}):
        with pytest.raises(openai.BadRequestError, match="include"):
            client.responses.retrieve(made.id, extra_query=unknown)
    with pytest.raises(openai.BadRequestError, match="include"):
        client.responses.input_items.list(made.id, include=["secrets"])  # type: ignore[list-item]
    referred = client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": made.output[0].id}])
    assert referred.status == "completed"
    client.responses.delete(made.id)
    for call_gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call_gone(made.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)


def test_what_is_not_stored_is_not_there(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)


def test_another_keys_rows_are_not_there(client: openai.OpenAI, server: ScriptedServer) -> None:
    made = client.responses.create(model=MODEL, input="my name is Ada")
    conversation = client.conversations.create()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=OTHER_KEY, max_retries=0) as other:
        for name, call_it in (
            (made.id, other.responses.retrieve),
            (made.id, other.responses.delete),
            (made.id, other.responses.cancel),
            (made.id, other.responses.input_items.list),
            (conversation.id, other.conversations.retrieve),
            (conversation.id, other.conversations.items.list),
            (conversation.id, other.conversations.delete),
        ):
            with pytest.raises(openai.NotFoundError):
                call_it(name)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            other.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model=MODEL, input=[{"type": "item_reference", "id": made.output[0].id}])
    assert client.responses.retrieve(made.id).status == "completed"


def test_a_conversation_grows_with_each_completed_response(client: openai.OpenAI) -> None:
    talk = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "my name is Ada"}], metadata={"topic": "names"}
    )
    assert talk.id.startswith("conv_") and talk.metadata == {"topic": "names"}
    made = client.responses.create(model=MODEL, input="what is my name", conversation=talk.id)
    assert made.output_text == "You are Ada." and made.conversation.id == talk.id
    listed = list(client.conversations.items.list(talk.id, order="asc"))
    assert [item.role for item in listed] == ["user", "user", "assistant"]
    client.responses.create(model=MODEL, input="Hi", conversation={"id": talk.id}, max_output_tokens=1)  # incomplete
    assert len(list(client.conversations.items.list(talk.id))) == 3
    added = client.conversations.items.create(
        talk.id, items=[{"role": "user", "content": "one more", "type": "message"}]
    )
    assert client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id).role == "user"
    client.conversations.items.delete(added.data[0].id, conversation_id=talk.id)
    assert len(list(client.conversations.items.list(talk.id))) == 3
    assert client.conversations.update(talk.id, metadata={"topic": "none"}).metadata == {"topic": "none"}
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(talk.id)


def test_truncation_leaves_out_the_oldest(shared_dir: Path) -> None:
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"{number} " + "x" * 80} for number in range(20)]
    body = {"model": MODEL, "input": [*turns, {"role": "user", "content": "Hi"}], "max_output_tokens": 20}
    with scripted_server(SCRIPT, shared_dir / "templates" / QWEN3, max_context=512) as small:
        refused = small.post("/v1/responses", body)
        assert refused.status_code == 400
        assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == (
            "context_length_exceeded",
            "input",
        )
        made = small.post("/v1/responses", {**body, "truncation": "auto"})
        assert made.status_code == 200, made.text
        assert 200 < made.json()["usage"]["input_tokens"] <= 511


# ── in the background ──────────────────────────────────────────────────────────────────────────────────


def over(client: openai.OpenAI, name: str) -> Any:
    assert eventually(lambda: client.responses.retrieve(name).status not in ("queued", "in_progress"))
    return client.responses.retrieve(name)


def test_a_response_in_the_background(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="slowly", background=True)
    assert made.status == "queued" and made.output == []
    assert over(client, made.id).output_text == "one two three four"
    chained = client.responses.create(model=MODEL, input="what is my name", previous_response_id=made.id)
    assert chained.status == "completed"


def test_a_stream_can_be_left_and_taken_up_again(client: openai.OpenAI, server: ScriptedServer) -> None:
    body = {"model": MODEL, "input": "slowly", "background": True, "stream": True}
    seen: list[dict[str, Any]] = []
    with server.http.stream("POST", f"{server.url}/v1/responses", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
            if len(seen) == 8:
                break
    name = seen[0]["response"]["id"]
    assert kinds(seen)[:3] == ["created", "queued", "in_progress"]
    live = [event.to_dict() for event in client.responses.retrieve(name, stream=True, starting_after=7)]
    everything = [*seen, *live]
    assert [event["sequence_number"] for event in everything] == list(range(len(everything)))
    assert everything[-1]["type"] == "response.completed"
    deltas = [event["delta"] for event in everything if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "one two three four"
    replayed = parsed(server.get(f"/v1/responses/{name}?stream=true").text)
    assert replayed == everything, "from the disk as it was live"
    assert parsed(server.get(f"/v1/responses/{name}?stream=true&starting_after=10").text) == everything[11:]
    plain = client.responses.create(model=MODEL, input="Hi")
    assert server.get(f"/v1/responses/{plain.id}?stream=true").status_code == 400


def test_a_response_in_the_background_can_be_cancelled(client: openai.OpenAI, server: ScriptedServer) -> None:
    made = client.responses.create(model=MODEL, input="forever", background=True)
    assert eventually(lambda: client.responses.retrieve(made.id).status != "queued")
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert eventually(lambda: server.engine.stats().running == 0)
    plain = client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(plain.id)


def test_a_running_response_can_be_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="forever", background=True)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_places_in_the_background_are_shared_by_keys() -> None:
    async def run() -> None:
        permits, begun, may_end = FairSemaphore(2), list[str](), asyncio.Event()

        async def work(owner: str) -> None:
            async with permits.permit(owner):
                begun.append(owner)
                await may_end.wait()
                may_end.clear()

        flood = [asyncio.create_task(work("flood")) for _ in range(6)]
        await asyncio.sleep(0)
        leaving, staying = asyncio.create_task(work("polite")), asyncio.create_task(work("polite"))
        await asyncio.sleep(0)
        leaving.cancel()
        for _ in range(5):
            may_end.set()
            await asyncio.sleep(0.01)
        assert begun[:4] == ["flood", "flood", "polite", "flood"]
        flood[-1].cancel()
        while not all(task.done() for task in (*flood, staying)):
            may_end.set()
            await asyncio.sleep(0)
        async with permits.permit("a"), permits.permit("b"):
            pass  # all of them came back

    asyncio.run(run())


def test_a_failure_in_the_background_is_told(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="break", background=True)
    failed = over(client, made.id)
    assert failed.status == "failed" and failed.error.code == "server_error"
