"""Events of an answer with thoughts and tool calls, folded into one."""

from tokenmill.engine.results import EventFold, reasoning_of, tool_calls_of
from tokenmill.types import CallArguments, CallEnd, CallStart, Event, Part, TextPart, ThoughtPart, ToolCall


def folded(*events: Event) -> Event:
    fold = EventFold()
    for event in events:
        fold.add(event)
    return fold.event


def event(text: str = "", parts: list[Part] | None = None) -> Event:
    return Event(request_id="r", text=text, parts=parts)


def test_text_alone_has_no_parts() -> None:
    assert folded(event("a"), event("b"), event("c")) == event("abc")


def test_parts_keep_their_order_and_neighbours_are_joined() -> None:
    whole = folded(
        event(parts=[ThoughtPart("hm")]),
        event("Let", parts=[ThoughtPart("m"), TextPart("Let")]),
        event(" me"),
        event(" see", parts=[TextPart(" see"), CallStart(0, "a", "f"), CallArguments(0, '{"x"')]),
        event(parts=[CallArguments(0, ": 1}"), CallEnd(0), CallStart(1, "b", "g"), CallArguments(1, "{}")]),
        event("!", parts=[CallEnd(1), TextPart("!")]),
    )
    assert whole.text == "Let me see!"
    assert whole.parts == [
        ThoughtPart("hmm"),
        TextPart("Let me see"),
        CallStart(0, "a", "f"),
        CallArguments(0, '{"x": 1}'),
        CallEnd(0),
        CallStart(1, "b", "g"),
        CallArguments(1, "{}"),
        CallEnd(1),
        TextPart("!"),
    ]
    assert reasoning_of(whole) == "hmm"
    assert tool_calls_of(whole) == [
        ToolCall(id="a", name="f", arguments='{"x": 1}'),
        ToolCall(id="b", name="g", arguments="{}"),
    ]


def test_text_before_the_first_part_and_after_the_last_is_kept() -> None:
    whole = folded(event("a"), event("b"), event(parts=[ThoughtPart("t")]), event("c"))
    assert whole.text == "abc" and whole.parts == [TextPart("ab"), ThoughtPart("t"), TextPart("c")]
    last = folded(event("a"), event("b", parts=[TextPart("b"), CallStart(0, "i", "f")]))
    assert last.parts == [TextPart("ab"), CallStart(0, "i", "f")]
    assert tool_calls_of(last)[0].arguments == ""
