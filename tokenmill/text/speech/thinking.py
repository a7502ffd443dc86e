"""Reasoning markers of model families, one row each.

    tags       <think> … </think> answer          the model opens the section, or the prompt ends with the opener
    channels   <|channel|>analysis<|message|> … <|end|><|start|>assistant<|channel|>final<|message|> answer

Tags enclose the reasoning. With channels, an answer consists of messages whose headers say what each one is: reasoning,
text, or the arguments of a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkingFormat:
    """One row: the markers of a think section, and markers around the answer that are not part of its text."""

    name: str
    opener: str
    closer: str
    ignored: tuple[str, ...] = ()
    mention: str = ""  # text in templates of this row, to tell it from another row with the same markers

    def is_open_at_end(self, prompt: str) -> bool:
        """Return whether the prompt ends with an open think section."""
        return prompt.rstrip().endswith(self.opener.strip())


@dataclass(frozen=True)
class ChannelFormat:
    """An answer made of messages: `begins` starts a header, `message` ends it, `ends` ends the message."""

    name: str
    begins: tuple[str, ...]
    message: str
    ends: tuple[str, ...]
    thought: str  # regex on the header
    text: str  # regex on the header
    call: str  # regex on the header; group 1 is the tool's name
    prompt: str  # the end of the prompt, which is the beginning of a header
    # For the grammar: the rest of each kind of header. A message with the first of `text_headers` ends the answer.
    thought_header: str
    text_headers: tuple[str, ...]
    call_headers: tuple[str, ...]

    def is_thought(self, header: str) -> bool:
        return re.fullmatch(self.thought, header) is not None

    def is_text(self, header: str) -> bool:
        return re.fullmatch(self.text, header) is not None

    def called(self, header: str) -> str | None:
        """Return the name of the tool whose arguments the message contains; None for other messages."""
        found = re.fullmatch(self.call, header)
        return found.group(1) if found else None


THINKING_FORMATS = (
    ThinkingFormat(
        "granite", "<think>", "</think>", ignored=("<response>", "</response>"), mention="<response></response>"
    ),
    ThinkingFormat("think", "<think>", "</think>"),
    ThinkingFormat("mistral", "[THINK]", "[/THINK]"),
    ThinkingFormat("seed", "<seed:think>", "</seed:think>"),
    ThinkingFormat("minimax-m3", "<mm:think>", "</mm:think>"),
    ThinkingFormat("hunyuan-3", "<think:opensource>", "</think:opensource>"),
    ThinkingFormat(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ThinkingFormat("gemma-4", "<|channel>thought\n", "<channel|>"),
    ThinkingFormat("apriel", "Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
    ThinkingFormat(
        "kimi-k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ignored=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ThinkingFormat("solar", "<|think|>", "<|end|>", ignored=("<|begin|>assistant", "<|content|>", "<|end|>")),
    ThinkingFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>"),
    ThinkingFormat("muse", "<|start|>assistant to=self<|message|>", "<|eom|>"),
    ThinkingFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkingFormat("thinking", "<thinking>", "</thinking>"),
    ThinkingFormat("reasoning", "<reasoning>", "</reasoning>"),
    ThinkingFormat("thought", "<thought>", "</thought>"),
    ThinkingFormat("kimi-vl", "◁think▷", "◁/think▷"),
)

CHANNEL_FORMATS = {
    "harmony": ChannelFormat(
        "harmony",
        begins=("<|start|>", "<|channel|>"),
        message="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        thought=r"(<\|start\|>assistant)?\s*<\|channel\|>analysis\s*",
        text=r"(<\|start\|>assistant)?\s*(<\|channel\|>(final|commentary)\s*)?(<\|constrain\|>\s*\w+\s*)?",
        call=(
            r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>(?:commentary|analysis))?\s*to=(?:functions\.)?([^\s<]+)\s*"
            r"(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*"
        ),
        prompt="<|start|>assistant",
        thought_header="<|channel|>analysis",
        text_headers=("<|channel|>final", "<|channel|>commentary"),
        call_headers=(
            " to=functions.§name<|channel|>commentary json",
            "<|channel|>commentary to=functions.§name <|constrain|>json",
        ),
    ),
    "muse": ChannelFormat(
        "muse",
        begins=("<|start|>",),
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        thought=r"<\|start\|>assistant to=self\s*",
        text=r"<\|start\|>assistant( to=user)?\s*",
        call=r"<\|start\|>assistant to=(\S+)\s*",
        prompt="<|start|>assistant",
        thought_header=" to=self",
        text_headers=(" to=user",),
        call_headers=(" to=§name",),
    ),
}
