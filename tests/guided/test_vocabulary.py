"""Forced text is cut into tokens as the model's tokenizer cuts it, and always spells exactly that text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.arch.read import read_spec
from tokenmill.engine.frontend import tokenizer_of
from tokenmill.errors import InvalidRequest
from tokenmill.guided.vocabulary import Vocabulary, _SplittingTokenizer
from tokenmill.text.tokenizer import Tokenizer, byte_tokenizer


@pytest.fixture(scope="module")
def stories(stories_dir: Path) -> Tokenizer:
    tokenizer = tokenizer_of(stories_dir)
    assert tokenizer is not None
    return tokenizer


def test_sentencepiece_text_has_no_space_that_nobody_wrote(stories: Tokenizer) -> None:
    split = _SplittingTokenizer(stories, 512, 2)
    for text in ('"name": "', " once", "Lily", "é€", '{"first_name": '):
        assert b"".join(stories.token_bytes(i) for i in split(text)) == text.encode()
    assert split(" once upon a time") == stories.encode("once upon a time", add_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), cut_at=st.integers(0, 5))
def test_any_bytes_are_spelled(text: str, cut_at: int) -> None:
    raw = text.encode()[cut_at:]
    assert bytes(_SplittingTokenizer(byte_tokenizer(), 258, 257)(raw)) == raw


def test_forced_names_are_the_tokenizer_s_own_tokens(smollm2_path: Path) -> None:
    tokenizer = tokenizer_of(smollm2_path)
    assert tokenizer is not None
    vocabulary = Vocabulary(tokenizer, read_spec(smollm2_path).vocab_size, tokenizer.eos_token_ids)
    text = '"first_name_of_the_person": "'
    assert vocabulary.ll.tokenize_str(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_model_without_an_end_can_t_be_constrained() -> None:
    with pytest.raises(InvalidRequest, match="no end token"):
        Vocabulary(byte_tokenizer(), 258, [])
