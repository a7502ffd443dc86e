"""A vocabulary of bytes for what is about grammars, a tiny trained model for what is about the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill import LLM
from tokenmill.guided.vocabulary import Vocabulary
from tokenmill.text.tokenizer import EOS_ID, byte_tokenizer


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), 258, [EOS_ID])


@pytest.fixture(scope="module")
def llm(stories_dir: Path) -> Iterator[LLM]:
    with_reference = LLM(str(stories_dir), backend="reference", threads=1)
    yield with_reference
    with_reference.close()
