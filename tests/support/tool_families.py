"""Model families with different tool-call formats, the tools that tests offer, and how calls are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.speaker import Speaker
from tokenmill.types import Message, Tool, ToolCall

HELLO = [Message(role="user", content="Weather in Paris?")]
WEATHER = Tool(
    name="get_weather",
    description="Weather of a city",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOW = Tool(name="now")
FAMILIES = {
    "Qwen-Qwen2.5-7B-Instruct": ("<tool_call>", "</tool_call>"),
    "Qwen-Qwen3-0.6B": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "Qwen3-Coder": ("<tool_call>", "</tool_call>"),
    "GLM-4.6": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "meta-llama-Llama-3.1-8B-Instruct": (),
    "mistralai-Mistral-Nemo-Instruct-2407": ("[TOOL_CALLS]",),
}


def family_speaker(shared_dir: Path, name: str) -> Speaker:
    return Speaker((shared_dir / "templates" / f"{name}.jinja").read_text(), special=FAMILIES[name])


def written(speaker: Speaker, calls: list[ToolCall]) -> str:
    assert speaker.frontend.speech is not None and speaker.frontend.speech.calls is not None
    return speaker.frontend.speech.calls.write(calls)


def called(calls: list[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]
