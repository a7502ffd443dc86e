"""Formats proved with the chat templates of 68 models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.proved_templates import PROVED, template_and_speech
from tokenmill.errors import InvalidRequest
from tokenmill.text.speech import Speech, call_format_names, detect_speech
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.text.template import CHATML, ChatTemplate
from tokenmill.text.tokenizer import byte_tokenizer

# These write no calls: the row whose markers they mention, or the fallback.
MENTIONED = {
    "HuggingFaceTB-SmolLM3-3B": ("hermes", "think"),
    "LFM2-8B-A1B": ("pythonic", None),
    "LFM2.5-Instruct": ("pythonic", None),
    "google-gemma-2-2b-it": ("hermes", None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite-3", "granite"),
    "llama-cpp-deepseek-r1": ("deepseek-r1", "think"),
    "llama-cpp-rwkv-world": ("hermes", "think"),
    "microsoft-Phi-3.5-mini-instruct": ("hermes", None),
}


@cache
def speech_of(shared_dir: Path, name: str) -> Speech:
    return template_and_speech(shared_dir, name)[1]


def named(speech: Speech) -> tuple[str | None, str | None]:
    return speech.calls and speech.calls.name, speech.thinking and speech.thinking.name


@pytest.mark.parametrize("name", PROVED)
def test_a_template_proves_its_row(shared_dir: Path, name: str) -> None:
    speech = speech_of(shared_dir, name)
    assert (named(speech), speech.is_proved) == (PROVED[name], True)


@pytest.mark.parametrize("name", MENTIONED)
def test_a_template_that_writes_no_calls_gets_the_row_it_mentions(shared_dir: Path, name: str) -> None:
    speech = speech_of(shared_dir, name)
    assert (named(speech), speech.is_proved) == (MENTIONED[name], False)


def test_every_template_is_listed(shared_dir: Path) -> None:
    assert {path.stem for path in (shared_dir / "templates").glob("*.jinja")} == PROVED.keys() | MENTIONED.keys()


def test_a_template_without_tools_needs_a_system_message() -> None:
    speech = detect_speech(ChatTemplate(CHATML, {}), byte_tokenizer())
    assert named(speech) == ("hermes", None)
    assert not speech.describes_tools


def test_a_row_can_be_chosen_by_name() -> None:
    template, tokenizer = ChatTemplate(CHATML, {}), byte_tokenizer()
    assert named(detect_speech(template, tokenizer, "qwen3-coder"))[0] == "qwen3-coder"
    assert detect_speech(template, tokenizer, "none").calls is None
    with pytest.raises(InvalidRequest, match="no tool-call format is called 'qwen9'"):
        detect_speech(template, tokenizer, "qwen9")


def test_names_are_unique() -> None:
    names = call_format_names()
    assert len(names) == len(set(names)) == len(CALL_FORMATS)
