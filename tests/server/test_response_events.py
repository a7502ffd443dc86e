"""The writer of a response's events, fed with answers of every shape: the newest SDK's accumulator takes all of them,
and what it adds up is what the whole response says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tokenmill.engine.results import EventFold
from tokenmill.errors import RequestFailed
from tokenmill.server.generation import GenerationFacts
from tokenmill.server.openai.responses.events import ResponseRendering, ResponseWriter
from tokenmill.server.openai.responses.parse import ResponseCall, ResponseReferences
from tokenmill.server.openai.responses.tools import CalledTool
from tokenmill.server.signatures import ThoughtKeys
from tokenmill.types import CallArguments, CallEnd, CallStart, ChatRequest, Event, Part, TextPart, ThoughtPart, Usage

CALLED = {
    "plain": CalledTool("function", "plain"),
    "space__inner": CalledTool("function", "inner", "space"),
    "patch": CalledTool("custom", "patch"),
    "tool_search": CalledTool("tool_search", "tool_search"),
}
USAGE = Usage(prompt_tokens=3, completion_tokens=5)
FACTS = GenerationFacts("r", USAGE, None, None, 0.0)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def call_of(*, has_summary: bool, is_sealed: bool) -> ResponseCall:
    repeated = {"instructions": None, "metadata": {}, "model": "m", "parallel_tool_calls": True, "temperature": 1.0}
    repeated |= {"tool_choice": "auto", "tools": [], "top_p": 1.0, "background": False}
    references = ResponseReferences(None, None, (), is_stored=False, is_background=False, is_stream=True)
    return ResponseCall(
        ChatRequest(messages=[]), repeated, CALLED, [], references, has_summary, is_sealed, truncates=False
    )


def random_parts(rng: random.Random) -> list[Part]:
    """An answer of some thoughts, texts and calls; perhaps cut off anywhere."""
    parts: list[Part] = []
    num_calls = 0
    for _ in range(rng.randrange(7)):
        kind = rng.choice(("text", "thought", "call"))
        if kind == "call":
            name = rng.choice(list(CALLED))
            text = json.dumps({"query": "é" * rng.randrange(4), "n": rng.randrange(100)})
            cut = sorted(rng.sample(range(len(text) + 1), 2))
            parts.append(CallStart(num_calls, f"call_{num_calls}", name, "custom" if name == "patch" else "function"))
            pieces = (text[: cut[0]], text[cut[0] : cut[1]], text[cut[1] :])
            parts += [CallArguments(num_calls, piece) for piece in pieces if piece]
            parts.append(CallEnd(num_calls))
            num_calls += 1
        else:
            make = TextPart if kind == "text" else ThoughtPart
            parts += [make(word) for word in rng.choices(("a ", "🌞", '"quoted" ', "\n", "\\", "data: x\n\n"), k=3)]
    return parts[: rng.randrange(len(parts) + 1)] if rng.random() < 0.3 else parts


def events_of(parts: list[Part], rng: random.Random, finish: str) -> list[Event]:
    """The parts in events of one or several each; plain text sometimes as an event without parts."""
    events = []
    while parts:
        taken, parts = parts[: (size := rng.randrange(1, 4))], parts[size:]
        text = "".join(part.text for part in taken if isinstance(part, TextPart))
        is_plain = len(taken) == 1 and isinstance(taken[0], TextPart) and rng.random() < 0.5
        events.append(Event(request_id="r", text=text, parts=None if is_plain else taken, token_ids=[1]))
    return [*events, Event(request_id="r", parts=[], finish_reason=finish, usage=USAGE)]  # type: ignore[arg-type]


def frames_of(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for frame in stream.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**item, "id": None, "encrypted_content": None} for item in items]


@pytest.mark.parametrize("seed", range(60))
def test_every_answer_accumulates_to_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    call = call_of(has_summary=rng.random() < 0.5, is_sealed=rng.random() < 0.5)
    finish = rng.choice(("stop", "length", "tool_calls", "failure"))
    events = events_of(random_parts(rng), rng, "stop" if finish == "failure" else finish)
    signer = ThoughtKeys().signer("")

    streamed = ResponseRendering(ResponseWriter("resp_1", 1.0, call, signer))
    stream = b"".join(streamed.event(0, event) for event in events)
    is_failure = finish == "failure"
    stream += streamed.failure(RequestFailed("broken"), "r") if is_failure else streamed.end(FACTS)
    found = frames_of(stream)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in found:
        state.handle_event(EVENTS.validate_python(event))
    last = found[-1]
    names = {"length": "incomplete", "failure": "failed"}
    assert last["type"] == f"response.{names.get(finish, 'completed')}"
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done] and done == last["response"]["output"]
    assert all(item["status"] in ("completed", "incomplete") for item in done)
    assert [item["status"] for item in done[:-1]] == ["completed"] * len(done[:-1])
    for item in done:
        deltas = [event["delta"] for event in found if event.get("item_id") == item["id"] and "delta" in event]
        assert "".join(deltas) == text_of(item)
    if is_failure:
        return
    fold = EventFold()
    for one in events:
        fold.add(one)
    whole = json.loads(
        bytes(ResponseRendering(ResponseWriter("resp_1", 1.0, call, signer)).whole([fold.event], FACTS).body)
    )
    assert without_ids(whole["output"]) == without_ids(done)
    assert {**whole, "output": [], "completed_at": 0} == {**last["response"], "output": [], "completed_at": 0}


def text_of(item: dict[str, Any]) -> str:
    """What an item's deltas add up to; a search for tools has none."""
    match item["type"]:
        case "message" | "reasoning":
            return str(item["content"][0]["text"])
        case "function_call":
            return str(item["arguments"])
        case "custom_tool_call":
            return str(item["input"])
        case _:
            return ""
