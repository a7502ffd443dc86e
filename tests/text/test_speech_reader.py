"""Every format: what its writer writes, its reader reads, in any pieces; whatever else is said, nothing is lost."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from random import Random

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.support.speech_samples import (
    TOOLS,
    controlled_text,
    cut,
    expected_parts,
    folded,
    mutated,
    parsed,
    random_call,
    read,
    texts_of,
)
from tokenmill.text.speech import Speech, SpeechStart
from tokenmill.text.speech.call_format import CallFormat
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.text.speech.markers import ControlAlphabet
from tokenmill.text.speech.tape import Tape
from tokenmill.text.speech.thinking import THINKING_FORMATS, ThinkingFormat
from tokenmill.types import CallArguments, CallEnd, CallStart, Part, TextPart, ThoughtPart, ToolCall

THINKING = {row.name: row for row in THINKING_FORMATS}
ROWS = {row.name: row for row in CALL_FORMATS}
BYTES = LLTokenizer("byte")
OWN_IDS = re.compile(r'"(?:id|tool_call_id)": "[^"]*"')  # calls get ids of ours where theirs come too late
ANY_JSON = LLMatcher.grammar_from_json_schema({"type": "object"}, defaults={"whitespace_flexible": True})


def assert_fragments_begin_json(parts: Iterable[Part]) -> None:
    """Every fragment keeps the arguments the beginning of a JSON object, and at their end they are one."""
    matcher: LLMatcher | None = None
    arguments = ""
    for part in parts:
        if isinstance(part, CallStart):
            matcher, arguments = LLMatcher(BYTES, ANY_JSON), ""
        elif isinstance(part, CallArguments):
            assert matcher is not None
            ids = BYTES.tokenize_str(part.fragment)
            arguments += part.fragment
            assert matcher.try_consume_tokens(ids) == len(ids), arguments
        elif isinstance(part, CallEnd):
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_written_calls_are_read(row: CallFormat) -> None:
    random = Random(row.name)
    speech = Speech(calls=row)
    for _ in range(5):
        calls = [random_call(random, row) for _ in range(random.randint(1, 3))]
        text = row.write(calls)
        wanted = parsed(expected_parts(calls))
        for pieces in ([text], cut(random, text, 1), cut(random, text, 8)):
            reader = speech.reader(TOOLS)
            parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
            assert parsed(folded(parts)) == wanted, text
            assert_fragments_begin_json(parts)


@pytest.mark.parametrize("row", [row for row in CALL_FORMATS if row.arg is None], ids=lambda row: row.name)
def test_json_arguments_are_passed_on_as_they_stand(row: CallFormat) -> None:
    arguments = '{ "days":3e0 ,"city" : "S\\u00e3o\\/\\n",\n\t"where": {"b":[ ],"a":-0.10}}'
    marker = '{"city": "marker"}'
    text = row.write([ToolCall(id="abcd12345", name="get", arguments=marker)])
    spelled = marker if row.args_indent is None else text[text.index("{\n            ") : text.index('"marker"') + 18]
    text = text.replace(spelled, arguments)
    assert arguments in text
    parts = read(Speech(calls=row).reader(TOOLS), [text])
    assert [part.fragment for part in parts if isinstance(part, CallArguments)] == [arguments]


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_text_around_calls_stays(row: CallFormat) -> None:
    random = Random(row.name)
    calls = [random_call(random, row) for _ in range(2)]
    before, after = "Let me <look> {that} up.", "\nDone, [as] I said."
    if row.name in ("llama3", "pythonic-bare"):
        before = ""  # without a marker, calls are calls only at the beginning
    header = "<|start|>assistant<|message|>" if row.header else ""
    text = before + row.write(calls) + header + after
    wanted = parsed(expected_parts(calls, before, after))
    for longest in (1, 5, len(text)):
        parts = parsed(read(Speech(calls=row).reader(TOOLS), cut(random, text, longest)))
        if row.header:
            parts = [part for part in parts if part != TextPart(after)]
            assert parts[: len(wanted) - 1] == wanted[:-1], text
        else:
            assert parts == wanted, text


def test_ids_as_families_want_them() -> None:
    def ids(row: str, text: str) -> list[str]:
        reader = Speech(calls=ROWS[row]).reader(TOOLS)
        return [part.id for part in reader.push(text) + reader.finish() if isinstance(part, CallStart)]

    calls = [ToolCall(id="abcd12345", name="get"), ToolCall(id="abcd12346", name="get_weather")]
    assert ids("mistral-id", ROWS["mistral-id"].write(calls)) == ["abcd12345", "abcd12346"]
    assert ids("solar", ROWS["solar"].write(calls)) == ["abcd12345", "abcd12346"]
    kimi = ROWS["kimi-k2"].write(calls).replace(":1<", ":7<")
    assert ids("kimi-k2", kimi) == ["functions.get:0", "functions.get_weather:7"]
    for row in ("mistral", "mistral-nemo"):
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids(row, ROWS[row].write(calls)))
    assert all(re.fullmatch("call_[a-zA-Z0-9]{24}", one) for one in ids("hermes", ROWS["hermes"].write(calls)))


def test_ids_of_other_servers_become_ids_that_a_template_accepts() -> None:
    nine, any_id = ROWS["mistral"].history_id, ROWS["hermes"].history_id
    assert nine("abcd12345") == "abcd12345" and any_id("call_x") == "call_x"
    mapped = {nine(f"call_{place}") for place in range(1000)}
    assert len(mapped) == 1000 and all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in mapped)
    assert nine("call_7") == nine("call_7")


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_markers_that_are_tokens_count_by_their_id_only(row: CallFormat) -> None:
    """A call spelled in other tokens, as in a file that the model quotes, is text; so is half of one."""
    control, _ = controlled_text("", texts_of(row))
    calls = [ToolCall(id="abcd12345", name="get", arguments='{"city": "X"}')]
    written = row.write(calls)
    opener = row.header or row.section[0] or row.call.partition("§")[0]
    if not any(marker in opener for marker in control):
        return  # this row's opening text is no token of any vocabulary
    text = f"Look: {written} and {written[: len(written) // 2]}"
    speech = Speech(calls=row, control=control)
    assert read(speech.reader(TOOLS), cut(Random(0), text, 5)) == [TextPart(text)]
    closer = next((marker for marker in control if marker in (row.section[1] or row.call.rpartition("§")[2])), None)
    if closer is not None:  # the closing marker, spelled, is part of a value
        inside = [ToolCall(id="abcd12345", name="get", arguments=json.dumps({"city": f"a {closer} b"}))]
        spoken = (
            ControlAlphabet(control)
            .encode(row.write(inside))
            .replace(ControlAlphabet(control).encode(f"a {closer} b"), f"a {closer} b")
        )
        assert parsed(read(speech.reader(TOOLS), [spoken])) == parsed(expected_parts(inside))


# ── nothing is lost ──────────────────────────────────────────────────────────────────────────────────────


def said(parts: Iterable[Part]) -> str:
    """Return all that a client gets to see."""
    found = []
    for part in parts:
        match part:
            case TextPart(text) | ThoughtPart(text):
                found.append(text)
            case CallArguments(_, fragment):
                found.append(fragment)
            case CallStart(_, call_id, name):
                found += [call_id, name]
    return "\n".join(found)


def break_and_read(row: CallFormat, num_trials: int, thinking: ThinkingFormat | None, with_control: bool) -> None:
    """Read broken answers: the reader never fails, tells the same however the text is cut, and loses no word."""
    random = Random(f"{row.name} {with_control}")
    for _ in range(num_trials):
        calls = [random_call(random, row) for _ in range(random.randint(1, 2))]
        opened = f"{thinking.opener}hm{thinking.closer}" if thinking and random.random() < 0.5 else ""
        text, words = mutated(random, f"Well. {opened}{row.write(calls)} So.", texts_of(row))
        control, text = controlled_text(text, texts_of(row)) if with_control else ({}, text)
        speech = Speech(calls=row, thinking=thinking, control=control)
        start = SpeechStart(is_thinking=thinking is not None and random.random() < 0.2)
        reader = speech.reader(TOOLS, start)
        whole = reader.push(text) + reader.finish()
        shown = said(whole) + "".join(OWN_IDS.findall(text))
        assert all(word in shown for word in words), (text, whole)
        assert_fragments_begin_json(whole)
        for longest in (1, 7):
            reader = speech.reader(TOOLS, start)
            parts = [part for piece in cut(random, text, longest) for part in reader.push(piece)] + reader.finish()
            assert folded(parts) == folded(whole), text
            assert_fragments_begin_json(parts)


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_broken_calls_are_read_without_loss(row: CallFormat) -> None:
    for with_control in (False, True):
        break_and_read(row, 6, None, with_control)


@pytest.mark.slow
@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_two_hundred_broken_calls_are_read_without_loss(row: CallFormat) -> None:
    for with_control in (False, True):
        break_and_read(row, 100, None, with_control)
        break_and_read(row, 100, None if row.header else THINKING["think"], with_control)


# ── linear time ──────────────────────────────────────────────────────────────────────────────────────────

LONG = {
    "text": ("hermes", "Some text with <b>tags</b> and {braces}.\n", "{}"),
    "false openers": ("hermes", "<tool_call>\n", "{}"),
    "calls": ("hermes", '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n', "{}"),
    "string": ("hermes", "x\\n é", '<tool_call>\n{{"name": "get", "arguments": {{"city": "{}"}}}}\n</tool_call>'),
    "space": ("hermes", " \n", '<tool_call>\n{{"name": "get", "arguments": {{"days": {} 3}}}}\n</tool_call>'),
    "numbers": ("hermes", "123456, ", '<tool_call>\n{{"name": "get", "arguments": {{"tags": [{}1]}}}}\n</tool_call>'),
    "early": ("hermes", "x ", '<tool_call>\n{{"arguments": {{"city": "{}"}}, "name": "get"}}\n</tool_call>'),
    "raw": (
        "qwen3-coder",
        "a </p> b\n",
        "<tool_call>\n<function=get>\n<parameter=city>\n{}\n</parameter>\n</function>",
    ),
    "closers": ("qwen3-coder", "</parameter> ", "<tool_call>\n<function=get>\n<parameter=city>\n{}\n</parameter>\n"),
    "python": ("pythonic", "it\\'s ", "<|tool_call_start|>[get(city='{}')]<|tool_call_end|>"),
    "gemma": ("gemma-4", "<| x", '<|tool_call>call:get{{city:<|"|>{}<|"|>}}<tool_call|>'),
}


def work_for(row: CallFormat, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many characters lie on the tape, summed over all pieces, and how many calls of functions there are."""
    total = 0
    add = Tape.add

    def counted(tape: Tape, more: str) -> None:
        nonlocal total
        add(tape, more)
        total += len(tape.text)

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal total
        total += event == "call"

    reader = Speech(calls=row, thinking=THINKING["think"]).reader(TOOLS)
    with monkeypatch.context() as patched:
        patched.setattr(Tape, "add", counted)
        sys.setprofile(count_call)
        try:
            for start in range(0, len(text), 3):
                reader.push(text[start : start + 3])
            reader.finish()
        finally:
            sys.setprofile(None)
    return total


@pytest.mark.parametrize("kind", LONG)
def test_work_grows_with_the_length_of_the_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, unit, around = LONG[kind]
    short, long = (around.format(unit * count) for count in (60, 600))
    few, many = work_for(ROWS[name], short, monkeypatch), work_for(ROWS[name], long, monkeypatch)
    assert many <= 11 * few
