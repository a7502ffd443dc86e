"""A matcher against the truth spelled out: languages small enough to list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.guided.compile import compile_grammar
from tokenmill.guided.matcher import Matcher
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.params import Guided
from tokenmill.text.tokenizer import EOS_ID, byte_tokenizer

BYTES = Vocabulary(byte_tokenizer(), 258, [EOS_ID])
WORDS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=6)


def matcher_of(guided: Guided) -> Matcher:
    return compile_grammar(guided, BYTES).matcher.fork()


def allowed(matcher: Matcher) -> set[int]:
    line = np.zeros(-(-258 // 32), np.int32)
    matcher.fill(line)
    return set(np.nonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))[0].tolist())


def continuations(words: list[str], prefix: str) -> set[int]:
    """What may follow a prefix in the language of these words, end included."""
    longer = {ord(word[len(prefix)]) for word in words if word.startswith(prefix) and word != prefix}
    return longer | ({EOS_ID} if prefix in words else set())


@settings(max_examples=60, deadline=None)
@given(WORDS, st.data())
def test_masks_are_the_language(words: list[str], data: st.DataObject) -> None:
    matcher = matcher_of(Guided.choice(words))
    word = data.draw(st.sampled_from(words))
    for length in range(len(word)):
        assert allowed(matcher) == continuations(words, word[:length])
        assert matcher.advance(word[length].encode())
    assert matcher.is_complete
    assert allowed(matcher) == continuations(words, word)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.data())
def test_forced_is_what_all_words_share(words: list[str], data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from(words))[: data.draw(st.integers(0, 6))]
    matcher = matcher_of(Guided.choice(words))
    assert matcher.advance(prefix.encode())
    expected: list[int] = []
    while len(following := continuations(words, prefix)) == 1 and EOS_ID not in following:
        expected += following
        prefix += chr(expected[-1])
    if not expected and following == {EOS_ID}:
        expected = [EOS_ID]
    assert matcher.forced() == expected


@settings(max_examples=40, deadline=None)
@given(WORDS, st.data())
def test_a_fork_stays_where_it_was_made(words: list[str], data: st.DataObject) -> None:
    word = data.draw(st.sampled_from(words))
    whole = [*word.encode(), EOS_ID]
    length = data.draw(st.integers(0, len(whole)))
    matcher = matcher_of(Guided.choice(words))
    assert matcher.advance(whole[:length])
    twin = matcher.fork()
    assert matcher.advance(whole[length:])
    if length < len(whole):
        assert allowed(twin) == continuations(words, word[:length])
    assert twin.advance(whole[length:])
    assert matcher.is_complete and twin.is_complete
    assert matcher.forced() == []


def test_a_wrong_token_is_an_error_of_this_matcher_only() -> None:
    matcher = matcher_of(Guided("regex", "a+b"))
    twin = matcher.fork()
    assert not matcher.advance(b"x")
    assert matcher.error is not None and twin.error is None
    assert twin.advance(b"aab") and twin.is_complete


def test_drafts_are_judged_without_moving() -> None:
    matcher = matcher_of(Guided("regex", "a+b"))
    assert matcher.num_allowed(b"aax") == 2
    assert matcher.num_allowed(b"aab") == 3
    assert allowed(matcher) == {ord("a")}


@pytest.mark.parametrize(
    ("guided", "right", "wrong"),
    [
        (Guided("json_object"), '{"a": [1, 2.5, null]}', "[1]"),
        (Guided.schema({"const": "42"}), '"42"', '"43"'),
        (Guided("regex", r"\d{3}-[a-f]+"), "123-abc", "12-abc"),
        (Guided.choice(['say "hi"', "línea\n"]), 'say "hi"', "say"),
        (Guided("lark", 'start: "a" n\nn: /[0-9]+/'), "a12", "ab"),
        (Guided("gbnf", 'root ::= "a" num ("," num)*\nnum ::= [0-9]+ # digits'), "a1,22", "a,1"),
    ],
)
def test_every_kind(guided: Guided, right: str, wrong: str) -> None:
    matcher = matcher_of(guided)
    assert matcher.advance(right.encode()) and matcher.is_complete
    other = matcher_of(guided)
    assert not (other.advance(wrong.encode()) and other.is_complete)
