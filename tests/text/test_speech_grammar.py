"""A model that refuses to call tools is bent into calls that follow their schemas, in every format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.support.speech_samples import (
    TOOLS,
    expected_parts,
    marker_vocabulary,
    parsed,
    random_call,
    read,
    read_ids,
    texts_of,
)
from tests.support.stubborn_model import constrained_answer, random_schema
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided
from tokenmill.text.load import load_tokenizer
from tokenmill.text.speech import Speech, SpeechStart
from tokenmill.text.speech.call_format import CallFormat
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.text.speech.thinking import CHANNEL_FORMATS, THINKING_FORMATS, ThinkingFormat
from tokenmill.text.tokenizer import EOS_ID, Tokenizer
from tokenmill.types import CallArguments, CallStart, TextPart, ThoughtPart, Tool, ToolCall, ToolChoice

# One row for each way to write arguments.
STYLES = (
    "hermes",
    "mistral",
    "qwen3-coder",
    "glm-4.7",
    "deepseek-v3.2",
    "kimi-k3",
    "seed-oss",
    "minimax-m3",
    "pythonic",
    "gemma-4",
)
ROWS = {row.name: row for row in CALL_FORMATS}
ENDINGS = ('"', "'", '<|"|>', "]", "}", ")", "1", " ")


@pytest.fixture(scope="module")
def tokenizer(stories_dir: Path) -> Tokenizer:
    return load_tokenizer(stories_dir)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def calls_of(
    row: CallFormat, tools: list[Tool], choice: ToolChoice, vocabulary: Vocabulary, tokenizer: Tokenizer, random: Random
) -> list[tuple[str, dict[str, object]]]:
    """Return the calls that a stubborn model makes under the row's grammar."""
    speech = Speech(calls=row)
    last = row.arg_pieces[-1] if row.arg_pieces else ""
    endings = [*ENDINGS, last] if isinstance(last, str) and last else list(ENDINGS)
    if row.values == "nested":
        endings += [str(row.arg_pieces[-3])] * 3
    if row.name in CHANNEL_FORMATS:
        endings += [CHANNEL_FORMATS[row.name].ends[0] + CHANNEL_FORMATS[row.name].prompt] * 3
    tokens = constrained_answer(vocabulary, tokenizer, speech.grammar(tools, choice), endings, random)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    parts = read(speech.reader(tools), [text])
    names = [part.name for part in parts if isinstance(part, CallStart)]
    arguments = [json.loads(part.fragment) for part in parts if isinstance(part, CallArguments)]
    assert names and len(names) == len(arguments), text
    others = [part for part in parts if isinstance(part, TextPart | ThoughtPart)]
    assert not others or row.name in CHANNEL_FORMATS, text
    return list(zip(names, arguments, strict=True))


def bend(row: CallFormat, seed: int, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    random = Random(f"{row.name} {seed}")
    tools = [Tool(name=name, parameters=random_schema(random)) for name in ("get", "get_weather", "ask")]
    parallel = random.random() < 0.5
    calls = calls_of(row, tools, ToolChoice(mode="required", parallel=parallel), vocabulary, tokenizer, random)
    assert parallel or len(calls) == 1
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_follow_their_schemas(style: str, seed: int, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    bend(ROWS[style], seed, vocabulary, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_forced_calls_follow_thirty_schemas(row: CallFormat, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    for seed in range(100, 130):
        bend(row, seed, vocabulary, tokenizer)


# ── control tokens, choices, thinking ────────────────────────────────────────────────────────────────────

CITY = Tool(name="get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
CITY_REQUIRED = Tool(name="ask", parameters={**(CITY.parameters or {}), "required": ["city"]})
THINK = next(row for row in THINKING_FORMATS if row.name == "think")


@dataclass(frozen=True)
class Controlled:
    """A row whose markers are control tokens of a vocabulary of bytes."""

    speech: Speech
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    def accepts(self, lark: str, text: str) -> bool:
        matcher = LLMatcher(self.vocabulary.ll, LLMatcher.grammar_from_lark(lark))
        assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def controlled(row: CallFormat, thinking: ThinkingFormat | None = None, is_special: bool = True) -> Controlled:
    channels = CHANNEL_FORMATS.get(row.name)
    texts = texts_of(row) + ([thinking.opener, thinking.closer, *thinking.ignored] if thinking else [])
    texts += [*channels.begins, channels.message, *channels.ends, *channels.call_headers] if channels else []
    tokenizer = marker_vocabulary(texts, is_special)
    control = {text: token_id for text, token_id in tokenizer.added_tokens.items() if token_id > EOS_ID}
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [EOS_ID])
    return Controlled(Speech(calls=row, thinking=thinking, control=control), tokenizer, vocabulary)


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_written_calls_are_allowed_and_read_by_token_id(row: CallFormat, is_special: bool) -> None:
    """In every mode the grammar allows what the writer writes, and the reader reads it back from token ids."""
    random = Random(row.name)
    model = controlled(row, is_special=is_special)
    calls = [random_call(random, row) for _ in range(2)]
    if row.args_indent:  # a schema in one piece keeps the order of its properties
        calls = [ToolCall(id="", name="get", arguments='{"city": "X", "days": 3}') for _ in range(2)]
    text = row.write(calls)
    for mode in ("auto", "required"):
        assert model.accepts(model.speech.grammar(TOOLS, ToolChoice(mode=mode)), text), (mode, text)
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert parsed(read_ids(model.speech.reader(TOOLS), model.tokenizer, ids)) == parsed(expected_parts(calls))


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_choices(row: CallFormat) -> None:
    model = controlled(row)
    grammar, accepts = model.speech.grammar, model.accepts
    call = ToolCall(id="abcd12345", name="get_weather", arguments='{"city": "Rome"}')
    other = ToolCall(id="abcd12346", name="ask", arguments='{"city": "Oslo"}')
    one, two = row.write([call]), row.write([call, other])
    both = [CITY, CITY_REQUIRED]
    required = ToolChoice(mode="required")
    assert accepts(grammar(both, required), two)
    assert not accepts(grammar(both, required), "no")
    assert not accepts(grammar(both, ToolChoice(mode="required", parallel=False)), two)
    assert accepts(grammar(both, ToolChoice(mode="required", parallel=False)), one)
    assert accepts(grammar([CITY], required), one), "named, or the only one allowed"
    assert not accepts(grammar([CITY_REQUIRED], required), one), "a tool that is not among those allowed"
    assert not accepts(grammar(both, required), row.write([ToolCall(id="abcd12345", name="ask")])), "city is required"
    if row.header:
        return  # answers made of messages have headers around all text
    assert accepts(grammar(both, ToolChoice()), "Just an answer.")
    assert not accepts(grammar(both, ToolChoice(parallel=False)), two)
    answer = grammar(both, ToolChoice(mode="none"), answer='"yes" | "no"')
    assert accepts(answer, "yes") and not accepts(answer, one) and not accepts(answer, "maybe")


@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_thinking_comes_before_a_forced_call(row: CallFormat) -> None:
    model = controlled(row, THINK)
    if row.header:
        return
    call = row.write([ToolCall(id="abcd12345", name="get_weather", arguments='{"city": "Rome"}')])
    required = ToolChoice(mode="required")
    closed = model.speech.grammar([CITY], required)
    assert model.accepts(closed, f"<think>hm</think>{call}") and model.accepts(closed, call)
    assert not model.accepts(model.speech.grammar([CITY], required, may_think=False), f"<think>hm</think>{call}")
    opened = model.speech.grammar([CITY], required, SpeechStart(is_thinking=True))
    assert model.accepts(opened, f"hm</think>\n\n{call}") and not model.accepts(opened, call)
    answer = model.speech.grammar([], ToolChoice(mode="none"), SpeechStart(is_thinking=True), answer='"yes"')
    assert model.accepts(answer, "hm</think>\n\nyes") and not model.accepts(answer, "yes")


def test_messages_with_headers() -> None:
    row, thinking = ROWS["harmony"], next(row for row in THINKING_FORMATS if row.name == "harmony")
    model = controlled(row, thinking)
    start = model.speech.start("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert start.primer == "<|start|>assistant"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    same = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    final = "<|channel|>final<|message|>Sunny."
    required = model.speech.grammar([CITY], ToolChoice(mode="required"), start)
    auto = model.speech.grammar([CITY], ToolChoice(), start)
    for text in (call, thought + call, thought + thought + same):
        assert model.accepts(required, text) and model.accepts(auto, text)
        parts = read_ids(
            model.speech.reader([CITY], start), model.tokenizer, model.tokenizer.encode(text, add_special_tokens=False)
        )
        assert [part for part in parts if isinstance(part, CallArguments)] == [CallArguments(0, '{"city": "Rome"}')]
        assert not [part for part in parts if isinstance(part, TextPart)]
    assert model.accepts(auto, thought + final) and not model.accepts(required, thought + final)
    ids = model.tokenizer.encode(thought + final, add_special_tokens=False)
    parts = read_ids(model.speech.reader([CITY], start), model.tokenizer, ids)
    assert parts == [ThoughtPart("hm"), TextPart("Sunny.")]


@pytest.mark.parametrize("kind", ["regex", "lark"])
@pytest.mark.parametrize("style", STYLES)
def test_custom_tools_follow_their_own_grammar(style: str, kind: Literal["regex", "lark"]) -> None:
    row, text = ROWS[style], {"regex": "[0-9]{2,3}(a|b)", "lark": 'start: NUMBER ("a" | "b")\nNUMBER: /[0-9]{2,3}/'}
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = Tool(name="calc", kind="custom", parameters=parameters, input_grammar=Guided(kind, text[kind]))
    model = controlled(row)
    grammar = model.speech.grammar([tool], ToolChoice(mode="required"))
    for given, is_allowed in {"12a": True, "123b": True, "1a": False, "12c": False, "12a ": False}.items():
        written = row.write([ToolCall(id="abcd12345", name="calc", arguments=json.dumps({"input": given}))])
        if (style, kind) == ("pythonic", "lark"):  # a grammar for text between double quotes
            written = written.replace("'", '"')
        assert model.accepts(grammar, written) == is_allowed, written


@pytest.mark.parametrize("style", STYLES)
def test_objects_without_declared_properties_and_with_many(style: str) -> None:
    row, model = ROWS[style], controlled(ROWS[style])
    free = Tool(name="ask", parameters={"type": "object"})
    extra = Tool(name="ask", parameters={**(CITY.parameters or {}), "additionalProperties": {"type": "integer"}})
    none = Tool(name="ask")
    many = {f"p{place}": {"type": "integer"} for place in range(70)}
    wide = Tool(name="ask", parameters={"type": "object", "properties": many, "required": ["p3", "p69"]})

    def accepts(tool: Tool, arguments: dict[str, Any]) -> bool:
        written = row.write([ToolCall(id="abcd12345", name="ask", arguments=json.dumps(arguments))])
        return model.accepts(model.speech.grammar([tool], ToolChoice(mode="required")), written)

    is_open = row.values != "nested"  # a grammar can't repeat a name that it does not know
    assert accepts(free, {}) and accepts(free, {"x": 3, "y": "z"}) == is_open
    assert accepts(extra, {"city": "X", "n": 3}) == is_open and not accepts(extra, {"city": "X", "n": [3]})
    assert accepts(none, {}) and not accepts(none, {"x": 3})
    assert accepts(wide, {"p3": 1, "p69": 2}) and accepts(wide, {"p3": 1, "p69": 2, "p5": 7})
    assert not accepts(wide, {"p3": 1})


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("row", CALL_FORMATS, ids=lambda row: row.name)
def test_after_an_opening_marker_only_a_valid_call_is_allowed(row: CallFormat, is_special: bool) -> None:
    model = controlled(row, is_special=is_special)
    written = row.write([ToolCall(id="abcd12345", name="unknown", arguments='{"city": "Rome"}')])
    if row.header:
        return
    auto = model.speech.grammar([CITY, CITY_REQUIRED], ToolChoice())
    assert model.accepts(auto, "Just an answer.")
    if row.name not in (
        "llama3",
        "pythonic-bare",
        "functionary-3.2",
    ):  # without a marker of its own, a call of an unknown tool is text
        assert not model.accepts(auto, f"Well. {written}")
    invalid = row.write([ToolCall(id="abcd12345", name="ask", arguments='{"town": "Rome"}')])
    assert not model.accepts(auto, invalid)


PROSE = "A function call is [fine]: Action: none. >>> f(x) > 3 <b>{}</b> `call:` [f(x)] functools `;` </p> 'x' \"y\""


@pytest.mark.parametrize("row", [row for row in CALL_FORMATS if not row.header], ids=lambda row: row.name)
def test_prose_is_free(row: CallFormat) -> None:
    """Text with brackets, quotes and the words of other formats is text, for the grammar and for the reader."""
    model = controlled(row)
    for speech in (model.speech, Speech(calls=row)):
        model = Controlled(speech, model.tokenizer, model.vocabulary)
        assert model.accepts(speech.grammar([CITY, CITY_REQUIRED], ToolChoice()), PROSE)
        assert model.accepts(speech.grammar([CITY], ToolChoice(parallel=False)), PROSE)
    assert read(Speech(calls=row).reader([CITY]), PROSE) == [TextPart(PROSE)]
