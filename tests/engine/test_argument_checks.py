"""Mistakes made in Python, each refused by name before anything is loaded or run."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tokenmill import LLM, AsyncEngine, SamplingParams
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.config.by_name import engine_config
from tokenmill.engine.argument_checks import (
    RequestRows,
    conversations_in,
    messages_from,
    prompt_from,
    prompts_in,
    template_args_from,
)
from tokenmill.errors import InvalidConfig, InvalidRequest
from tokenmill.types import Message, PromptRequest

HELLO = {"role": "user", "content": "hello"}


def test_settings_by_the_names_of_vllm() -> None:
    given = {"max_model_len": 64, "max_num_seqs": 2, "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9}
    same = {"dtype": "half", "quantization": None, "trust_remote_code": False, "enforce_eager": False}
    ours = engine_config("m", {"max_context": 64, "max_running": 2, "dtype": "float16"})
    assert engine_config("m", {**given, **same}) == ours


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
        ("m", {"max_model_len": 5, "max_context": 5}, "means the same as max_context"),
        ("m", {"data_parallel_size": 2}, "--tp"),
        ("m", {"trust_remote_code": True}, "never run"),
        ("m", {"seed": 1}, "SamplingParams"),
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


@pytest.mark.parametrize("given", [5, None, b"abc", {"x"}, b""])
def test_what_are_no_prompts(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt must be a string or a list of token ids"):
        prompts_in(given)


def test_prompts_of_vllm_are_dicts() -> None:
    (one,) = prompts_in({"prompt": "x"})  # type: ignore[arg-type]  # which the types do not propose
    assert prompt_from(one) == "x" and prompt_from({"prompt": None, "prompt_token_ids": [1, 2]}) == [1, 2]
    with pytest.raises(InvalidRequest, match="multi_modal_data"):
        prompt_from({"prompt": "x", "multi_modal_data": {"image": 1}})


@pytest.mark.parametrize("given", [3, [1, "x"], ["b"], None, {}, {"prompt": 3}])
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt must be a string or a list of token ids"):
        prompt_from(given)


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
        conversations(given)


def conversations(given: Any) -> list[list[Message]]:
    return [messages_from(one) for one in conversations_in(given)]


def test_conversations_in_all_their_forms() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    plain = [Message(role="user", content="hello")]
    assert conversations([parts]) == conversations([HELLO]) == conversations([plain]) == [plain]
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    assert conversations(([HELLO], [called]))[1][0].content is None and conversations([]) == []


@pytest.mark.parametrize("given", [{"temperature": 0}, SamplingParams, "greedy", [None]])
def test_what_are_no_params(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="params must be SamplingParams"):
        RequestRows(["a"], given, asked)
    with pytest.raises(InvalidRequest, match=r"chat\(messages, SamplingParams\(temperature"):
        template_args_from({"temperature": 0})


def asked(prompt: Any, params: SamplingParams) -> PromptRequest:
    return PromptRequest(prompt=prompt_from(prompt), params=params)


def test_rows_are_read_one_by_one_with_their_params() -> None:
    def endless() -> Iterator[Any]:
        yield from ("a", 5)
        raise AssertionError("read too far")

    params = (SamplingParams(max_tokens=number) for number in count(1))
    rows = RequestRows(endless(), params, asked)
    first, second = islice(rows, 2)
    assert rows.total is None and isinstance(first, PromptRequest) and first.params.max_tokens == 1
    assert isinstance(second, InvalidRequest) and "got int" in second.message


@pytest.mark.parametrize("num_params", [1, 3])
def test_params_must_be_as_many_as_rows(num_params: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{num_params} sampling params for 2 prompts"):
        RequestRows(["a", "b"], [SamplingParams()] * num_params, asked)
    with pytest.raises(InvalidRequest, match="1 sampling params for more prompts"):
        list(RequestRows(iter(["a", "b"]), iter([SamplingParams()]), asked))


@pytest.mark.parametrize("kind", [LLM, AsyncEngine, SamplingParams])
def test_help_explains(kind: type) -> None:
    assert kind.__doc__ and kind.__name__ in kind.__doc__
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]
    undocumented = [name for name in methods if not getattr(kind, name).__doc__]
    assert undocumented == []


# ── what editors see ───────────────────────────────────────────────────────────────────────────────────


def test_tab_completion_sees_public_names_and_settings() -> None:
    assert {"LLM", "AsyncEngine", "SamplingParams", "Guided", "RequestOutput"} <= set(dir(tokenmill))
    settings = inspect.signature(tokenmill.LLM).parameters
    assert settings["max_context"].default is None and settings["threads"].kind is inspect.Parameter.KEYWORD_ONLY
    assert {"temperature", "max_tokens", "guided"} <= set(inspect.signature(tokenmill.SamplingParams).parameters)


PROGRAM = """\
from tokenmill import LLM, AsyncEngine, SamplingParams

llm = LLM("m", max_context=2048, max_model_len=4, dtype="half", quantization=None)
LLM("m", max_contxt=1)
LLM("m", threads="two")
SamplingParams(temprature=0)
text: str = llm.generate(["x"], SamplingParams(temperature=0))[0].outputs[0].text
number: int = llm.chat([{"role": "user", "content": "x"}])[0].outputs[0].text


async def start() -> AsyncEngine:
    return await AsyncEngine.start("m", max_runing=3)
"""


@pytest.mark.slow
def test_type_checkers_know_settings_parameters_and_outputs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(tokenmill.__file__).parents[1])
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "c")]
    done = subprocess.run([*command, "program.py"], cwd=tmp_path, env={**os.environ, "MYPYPATH": root},
                          capture_output=True, text=True, timeout=280)  # fmt: skip
    faults = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line}
    assert set(faults) == {4, 5, 6, 8, 12}, done.stdout + done.stderr
    for line, words in ((4, "max_context"), (5, '"int | None"'), (6, "temperature"), (8, '"str"'), (12, "max_running")):
        assert words in faults[line], faults[line]
