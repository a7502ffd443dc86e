"""The reader of one answer: custom inputs unwrapped from JSON, tokens of visible text."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.answer_reader import CustomInput, VisibleTokens
from tokenmill.types import CallStart, Part, TextPart, ThoughtPart, TokenInfo


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_a_custom_input_is_the_string_in_its_json(text: str, cuts: list[int], is_ascii: bool) -> None:
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    given = CustomInput()
    assert "".join(given.push(piece) for piece in pieces(written, cuts)) + given.finish() == text


def test_arguments_of_another_form_are_the_input_as_they_are() -> None:
    given = CustomInput()
    assert given.push('{"code": ') + given.push('"x"}') + given.finish() == '{"code": "x"}'


def test_a_half_of_a_surrogate_pair_does_not_wait_for_ever() -> None:
    given = CustomInput()
    assert given.push('{"input": "\\ud83d') == ""
    assert given.push('x"}') == "\ufffdx"


def info(text: str) -> TokenInfo:
    return TokenInfo(0, text, text.encode(), -1.0, 1)


def visible(script: list[tuple[str, list[Part]]]) -> tuple[list[str], list[int]]:
    tokens = VisibleTokens()
    for text, parts in script:
        tokens.add(info(text), text)
        if parts:
            tokens.see(parts)
    found = tokens.pop()
    return [one.text for _, one in found], [end for end, _ in found]


def test_tokens_of_thoughts_and_markers_are_not_visible() -> None:
    script: list[tuple[str, list[Part]]] = [
        ("hm", [ThoughtPart("hm")]),
        ("</th", []),
        ("ink>", []),
        ("\n\n", []),  # left out by the reader
        ("Hel", [TextPart("Hel")]),
        ("lo <", [TextPart("lo ")]),  # "<" may begin a call
        ("b", [TextPart("<b")]),
        (" <tool", [TextPart(" ")]),
        ("_call>", []),
        ("f{}", [CallStart(0, "i", "f")]),
        ("!", [TextPart("!")]),
    ]
    texts, ends = visible(script)
    assert texts == ["Hel", "lo <", "b", "!"] and ends == [3, 7, 8, 10]


def test_a_character_of_several_tokens_brings_them_all() -> None:
    tokens = VisibleTokens()
    tokens.add(info("\ufffd"), "")
    tokens.add(info("\ufffd"), "é")
    tokens.see([TextPart("é")])
    assert [end for end, _ in tokens.pop()] == [0, 1]
