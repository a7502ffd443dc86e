"""The reader on what chat templates themselves write: calls and thoughts of 60 models, read back."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.proved_templates import PROVED, template_and_speech
from tests.support.speech_samples import cut, folded
from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.speech import Speech
from tokenmill.text.template import ChatTemplate
from tokenmill.types import CallArguments, CallStart, Part, TextPart, ThoughtPart, Tool

USER = {"role": "user", "content": "What now?"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "c"},
        "days": {"type": "integer", "description": "n"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "t"},
    },
}
TOOLS = [Tool(name=name, parameters=PARAMETERS) for name in ("get_weather", "get_time")]
FUNCTIONS = [
    {"type": "function", "function": {"name": tool.name, "description": "d", "parameters": PARAMETERS}}
    for tool in TOOLS
]
ARGUMENTS: list[dict[str, Any]] = [{"city": 'São "P"\n', "days": 3, "tags": ["a", "it's"]}, {"city": "X"}]
EXTRA = {"functions": "", "datetime": ""}


def spoken(template: ChatTemplate, answer: dict[str, Any], **variables: Any) -> tuple[str, str]:
    """Return the prompt before an answer, and the answer with its markers, as the template writes both."""
    extra = {**EXTRA, **variables}
    asked = template.render([USER], tools=FUNCTIONS, add_generation_prompt=True, extra=extra)
    told = template.render([USER, answer], tools=FUNCTIONS, add_generation_prompt=False, extra=extra)
    length = next(place for place, pair in enumerate(zip(asked + "\0", told + "\1", strict=False)) if len({*pair}) == 2)
    if asked[length:]:  # the prompt opens a thought that this answer has not: go back to before the marker
        length = max(told.rfind("<", 0, length), told.rfind("\n", 0, length) + 1)
    return told[:length], told[length:]


def read_in_pieces(speech: Speech, prompt: str, answer: str, longest: int) -> list[Part]:
    reader = speech.reader(TOOLS, speech.start(prompt[-200:]))
    pieces = cut(Random(longest), answer, longest)
    return folded([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def called(num_calls: int, arguments_as: str) -> dict[str, Any]:
    calls = [
        {
            "id": f"abcd1234{place}",
            "type": "function",
            "function": {
                "name": tool.name,
                "arguments": arguments if arguments_as == "object" else json.dumps(arguments, ensure_ascii=False),
            },
        }
        for place, (tool, arguments) in enumerate(zip(TOOLS, ARGUMENTS, strict=True))
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls[:num_calls]}


@pytest.mark.parametrize("name", PROVED)
def test_calls_that_a_template_writes_are_read(shared_dir: Path, name: str) -> None:
    template, speech = template_and_speech(shared_dir, name)
    for num_calls in (2, 1):
        try:
            prompt, answer = spoken(template, called(num_calls, speech.arguments_as))
        except (InvalidRequest, ModelError):
            assert num_calls == 2, "a template refuses two calls, never one"
            continue
        if answer.count(TOOLS[0].name) == 0:  # templates that want no content at all beside calls
            prompt, answer = spoken(template, {**called(num_calls, speech.arguments_as), "content": None})
        for longest in (1, len(answer)):
            parts = read_in_pieces(speech, prompt, answer, longest)
            names = [part.name for part in parts if isinstance(part, CallStart)]
            arguments = [json.loads(part.fragment) for part in parts if isinstance(part, CallArguments)]
            num_written = sum(tool.name in answer for tool in TOOLS)
            assert names == [tool.name for tool in TOOLS[:num_written]], answer
            assert arguments == ARGUMENTS[:num_written], answer


@pytest.mark.parametrize("name", [name for name, (_, thinking) in PROVED.items() if thinking])
def test_thoughts_that_a_template_writes_are_read(shared_dir: Path, name: str) -> None:
    template, speech = template_and_speech(shared_dir, name)
    thought = {"reasoning_content": "Hm, so.", "thinking": "Hm, so.", "reasoning": "Hm, so."}
    answer: dict[str, Any] = {"role": "assistant", "content": "The answer.", **thought}
    prompt, said = spoken(template, answer, enable_thinking=True, thinking=True)
    assert speech.thinking is not None
    if "Hm, so." not in said or speech.thinking.opener.strip() not in prompt + said:
        # Templates that keep thoughts only beside calls, or without the opener that ends their prompts.
        asked = template.render([USER], tools=FUNCTIONS, add_generation_prompt=True, extra=EXTRA)
        opener = "" if speech.start(asked).is_thinking else speech.thinking.opener
        prompt, said = asked, f"{opener}Hm, so.{speech.thinking.closer}The answer."
    for longest in (1, len(said)):
        parts = read_in_pieces(speech, prompt, said, longest)
        assert parts[0] == ThoughtPart("Hm, so."), said
        assert isinstance(parts[1], TextPart) and parts[1].text.startswith("The answer."), said
        assert len(parts) == 2, said


# How a prompt ends: the template's variables, and whether the answer begins with a thought.
OPENED = {
    "Qwen-Qwen3-0.6B": ({}, False),
    "Qwen-QwQ-32B": ({"enable_thinking": True}, True),
    "Qwen3.5-4B": ({"enable_thinking": True}, True),
    "GLM-4.7-Flash": ({"enable_thinking": True}, True),
    "MiniMax-M2": ({}, True),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ({"enable_thinking": True}, True),
    "StepFun3.5-Flash": ({}, True),
    "deepseek-ai-DeepSeek-V3.1": ({"thinking": True}, True),
    "Cohere2MoE": ({}, True),
    "Kimi-K3": ({}, True),
    "Apriel-1.6-15b-Thinker-fixed": ({}, True),
    "openai-gpt-oss-120b": ({}, False),
}
CLOSED = {
    "Qwen-Qwen3-0.6B": {"enable_thinking": False},
    "Qwen3.5-4B": {"enable_thinking": False},
    "GLM-4.7-Flash": {"enable_thinking": False},
    "deepseek-ai-DeepSeek-V3.1": {"thinking": False},
    "Kimi-K3": {"thinking": False},
    "tencent-Hy3": {},
    "google-gemma-4-31B-it": {},
}


@pytest.mark.parametrize("name", OPENED)
def test_a_prompt_tells_whether_the_answer_begins_with_a_thought(shared_dir: Path, name: str) -> None:
    variables, is_open = OPENED[name]
    template, speech = template_and_speech(shared_dir, name)
    prompt = template.render([USER], tools=FUNCTIONS, add_generation_prompt=True, extra={**EXTRA, **variables})
    assert speech.start(prompt[-200:]).is_thinking == is_open


@pytest.mark.parametrize("name", CLOSED)
def test_where_thinking_is_off_no_thought_is_reported(shared_dir: Path, name: str) -> None:
    template, speech = template_and_speech(shared_dir, name)
    prompt = template.render([USER], tools=FUNCTIONS, add_generation_prompt=True, extra={**EXTRA, **CLOSED[name]})
    assert not speech.start(prompt[-200:]).is_thinking
    assert read_in_pieces(speech, prompt, "Just text.", 3) == [TextPart("Just text.")]
