"""Stop regexes: the first complete match ends the text, however it is cut into pieces, at a bounded cost."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest
from tokenmill.text.stops import MAX_CACHED_STATES, MAX_MATCH_CHARS, StopPatterns, StopRegexes, Stops, stop_patterns

PATTERNS = [
    "ab",
    "a+b",
    "(a|b)c",
    "a.c",
    "[^a]b+",
    "a{2}",
    "a{2,3}b",
    "a{,2}c",
    "(ab)*c",
    "(?:a|bc|c)+?b",
    r"\w\n",
    r"\d+",
    "(?i)AB",
    "(?s)b.b",
    "((a?)b)?c",
    "a{0}b",
    r"[\w-]\.",
    "[]a]b",
    "[a-]c",
    "b{x",
    r"\x61\u0062",
    "(?P<name>a)b",
]


def run(patterns: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    stops = StopRegexes(stop_patterns(tuple(patterns)), include_stop)
    sent = ""
    for piece in pieces:
        new, matched = stops.push(piece)
        sent += new
        if matched is not None:
            return sent, matched
    return sent + stops.flush(), None


def by_trying(patterns: list[str], text: str) -> tuple[str, str | None]:
    """The match that ends first; of those the one that begins first; of those the first pattern."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for pattern in patterns:
                if re.fullmatch(pattern, text[start:end]):
                    return text[:start], pattern
    return text, None


texts = st.text("abcAB1\n.{x", max_size=25)


@given(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True), texts, st.data())
def test_the_first_complete_match_ends_the_text(patterns: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    borders = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert run(patterns, pieces) == by_trying(patterns, text)


def test_only_what_may_begin_a_match_is_held_back() -> None:
    stops = StopRegexes(stop_patterns((r"\d+ apples",)))
    assert stops.push("I have 12") == ("I have ", None)
    assert stops.push("3 app") == ("", None)
    assert stops.push("s, ") == ("123 apps, ", None)
    assert stops.push("7 apples!") == ("", r"\d+ apples")
    assert stops.push("more") == ("", r"\d+ apples")


def test_the_match_may_stay() -> None:
    assert run([r"b\w"], ["ab", "cd"], include_stop=True) == ("abc", r"b\w")


def test_a_match_that_grows_too_long_is_given_up() -> None:
    stops = StopRegexes(stop_patterns(("(?s)a.*b",)))
    sent, _ = stops.push("a" + "x" * (MAX_MATCH_CHARS + 10))
    assert len(sent) > 5
    assert stops.push("b")[1] is None
    assert stops.push("a b")[1] == "(?s)a.*b"


@pytest.mark.parametrize("pattern", ["a*b", "(?s).*b", "(a|c)*b"])
def test_what_is_given_up_makes_way_for_what_begins_later(pattern: str) -> None:
    """Where every place may begin a match, and the first match of all stands in front of the others."""
    stops = StopRegexes(stop_patterns((pattern,)))
    sent = "".join(stops.push("a" * 100)[0] for _ in range(30))
    assert len(sent) >= 3000 - MAX_MATCH_CHARS - 1
    assert stops.push("b")[1] == pattern


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(a", "never closed"),
        ("a)", "unmatched"),
        ("*a", "repeats nothing"),
        ("a**", "repeats a repeat"),
        ("a++", "repeats a repeat"),
        ("^a", "^"),
        ("a$", "$"),
        (r"\bword", r"\b"),
        (r"(a)\1", r"\1"),
        ("(?=a)b", "lookaround"),
        ("(?<!a)b", "lookaround"),
        ("a*", "empty"),
        ("(a|)", "empty"),
        ("[b-a]", "range"),
        ("[abc", "ends unexpectedly"),
        ("a\\", "ends unexpectedly"),
        (r"\x1", "digits"),
        ("a{3,2}", "out of order"),
        ("a{1001}", "1000"),
        ("(a{100}){100}", "too large"),
        ("((((a{9}){9}){9}){9}){9}", "too large"),
        ("(" * 60 + "a" + ")" * 60, "nested"),
        ("a" * 601, "too large"),
    ],
)
def test_what_can_t_be_followed_is_refused(pattern: str, word: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=re.escape(word)) as refused:
        stop_patterns((pattern,))
    assert refused.value.param == "stop_regex"
    assert time.process_time() - began < 5.0


def test_patterns_have_one_budget_together() -> None:
    with pytest.raises(InvalidRequest, match="together"):
        stop_patterns(tuple(letter * 150 for letter in "abcde"))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+b", "a" * 3000),
        ("(a|a)*b", "a" * 3000),
        ("(a?){100}a{100}", "a" * 99 + "b" * 3000),
        ("(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)=", "x" * 3000),
        ("(x+x+)+y", "x" * 3000),
        (r"(\w+\s?)+!", "word " * 600),
    ],
)
def test_catastrophes_of_other_engines_cost_little(pattern: str, text: str) -> None:
    stops = StopRegexes(stop_patterns((pattern,)))
    began = time.process_time()
    for place in range(0, len(text), 4):
        stops.push(text[place : place + 4])
    assert time.process_time() - began < 20.0  # backtracking takes longer than the universe is old


def test_strings_and_regexes_together() -> None:
    def shown(text: str, **kinds: bool) -> tuple[str, str | None]:
        stops = Stops(["END"], [r"\d\d"], **kinds)
        sent = "".join(stops.push(char)[0] for char in text)
        return sent + stops.flush(), stops.matched

    assert shown("abc 12 END") == ("abc ", r"\d\d")
    assert shown("abc 1 END 12") == ("abc 1 ", "END")
    assert shown("abc 1END2") == ("abc 1", "END")  # what follows a stop is not there
    assert shown("abc EN1") == ("abc EN1", None)
    assert shown("abc END", include_stop=True) == ("abc END", "END")


def test_a_pattern_with_hundreds_of_threads_ends_its_own_request() -> None:
    """Half a millisecond a character would take all of a processor from the other streams."""
    stops = StopRegexes(stop_patterns(("[ab ]*a[ab ]{290}Z",)))
    with pytest.raises(InvalidRequest, match="too long"):
        for _ in range(4000):
            stops.push("ab a")
    ordinary = StopRegexes(stop_patterns((r"\n\n", r"Question: [A-Z][a-z]{3,20}")))
    for _ in range(5000):
        ordinary.push("an ordinary text with a Question of nobody\n")


def test_remembered_moves_are_bounded_by_their_states() -> None:
    patterns = StopPatterns(("[ab]*a[ab]{200}Z",))
    stops, drawing = StopRegexes(patterns), random.Random(1)
    with pytest.raises(InvalidRequest):
        for _ in range(100_000):
            stops.push(drawing.choice("ab"))
    assert sum(len(states) for states, _ in patterns._moves) <= MAX_CACHED_STATES
