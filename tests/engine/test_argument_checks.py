"""Mistakes made in Python, each refused by name before anything is loaded or run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tokenmill import LLM, AsyncEngine, SamplingParams
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.config.by_name import engine_config
from tokenmill.engine.argument_checks import conversations_from, params_from, prompts_from, template_args_from
from tokenmill.errors import InvalidConfig, InvalidRequest
from tokenmill.types import Message

HELLO = {"role": "user", "content": "hello"}


def test_settings_find_their_part() -> None:
    config = engine_config("m", {"max_context": 64, "threads": 2, "memory_fraction": 1, "num_blocks": None})
    assert (config.model.model, config.model.max_context, config.ops.threads) == ("m", 64, 2)
    given = EngineConfig(ModelConfig(model="x", dtype="float16"))
    assert engine_config(given, {}) == given


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (None, {}, "a name, a path or an EngineConfig, got None"),
        ("m", {"max_contxt": 1}, "did you mean max_context"),
        ("m", {"threads": "two"}, "threads must be an integer or None, got 'two'"),
        ("m", {"threads": True}, "threads must be an integer"),
        ("m", {"device": "gpu"}, "device must be one of 'auto', 'cpu', 'cuda', got 'gpu'"),
        ("m", {"prefix_caching": "no"}, "prefix_caching must be True or False"),
        ("m", {"activation_bits": 8}, "'8', 'mixed', '16', got 8"),
    ],
)
def test_wrong_settings(model: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        engine_config(model, settings)


@pytest.mark.parametrize("given", [5, None, b"abc", {"prompt": "x"}, {"x"}, ["a", 3], [1, "x"], ["a", ["b"]]])
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is a string or a list of token ids"):
        prompts_from(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("hello", "list of messages, got str"),
        (HELLO, "list of messages, got dict"),
        (None, "list of messages"),
        (["hello"], "list of messages, got str"),
        ([[HELLO], HELLO], "list of messages, got dict"),
        ([{"role": "user"}], "content must be a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text parts"),
        ([{"content": "hello"}], "no role"),
        ([HELLO | {"colour": "red"}], "unknown keys .'colour'"),
    ],
)
def test_what_is_no_conversation(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        conversations_from(given)


def test_conversations_in_all_their_forms() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    plain = [Message(role="user", content="hello")]
    assert conversations_from([parts]) == conversations_from([HELLO]) == conversations_from([plain]) == [plain]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    assert conversations_from(([HELLO], [called]))[1][0].content is None and conversations_from([]) == []


@pytest.mark.parametrize("given", [{"temperature": 0}, SamplingParams, "greedy", [None]])
def test_what_are_no_params(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
        params_from(given, 1)
    with pytest.raises(InvalidRequest, match=r"chat\(messages, SamplingParams\(temperature"):
        template_args_from({"temperature": 0})


@pytest.mark.parametrize("kind", [LLM, AsyncEngine, SamplingParams])
def test_help_explains(kind: type) -> None:
    assert kind.__doc__ and kind.__name__ in kind.__doc__
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    undocumented = [name for name in methods if not getattr(kind, name).__doc__]
    assert undocumented == []
