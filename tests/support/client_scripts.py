"""Model scripts for tests of clients, in the format of Qwen3: tool calls and thoughts between tags."""

from __future__ import annotations

import json
from typing import Any

QWEN3 = "Qwen-Qwen3-0.6B.jinja"


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def script(*answers: dict[str, Any]) -> dict[str, Any]:
    return {
        "control_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
        "eos": "<|im_end|>",
        "answers": list(answers),
    }
