"""Detection of a model's tool-call and reasoning formats, verified with its own chat template.

The template renders a conversation with two calls (one, if it refuses two). The format is the row whose writer produces
the same text, byte for byte. So detection needs neither model names nor a setting; if no row reproduces what a template
writes, its format is not proved.

Templates that show the model how to call but write no calls themselves mention the opening marker: the first row with
that marker is used. Others get the fallback, and the system message must describe the tools (`speech.system_text`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.speech.call_format import CallFormat
from tokenmill.text.speech.formats import CALL_FORMATS
from tokenmill.text.speech.markers import opening_marker
from tokenmill.text.speech.speech import Speech
from tokenmill.text.speech.thinking import CHANNEL_FORMATS, THINKING_FORMATS, ThinkingFormat
from tokenmill.text.template import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.types import ToolCall

FALLBACK = "hermes"
NONE, AUTO = "none", "auto"

_QUESTION, _TEXT, _THOUGHT = "QQQ?", "TTT.", "RRR!"
_NAMES = ("probe_weather", "probe_time")
_PROPERTIES = {
    "city": {"type": "string", "description": "c"},
    "days": {"type": "integer", "description": "n"},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "t"},
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
        },
    }
    for name in _NAMES
]
_CALLS = (
    ToolCall(id="abcd12345", name=_NAMES[0], arguments='{"city": "São \\"P\\"", "days": 3, "tags": ["a", "b"]}'),
    ToolCall(id="abcd12346", name=_NAMES[1], arguments='{"city": "X"}'),
)
_THINKING_ON: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True, "thinking": True})


def call_format_names() -> list[str]:
    """Return the names of all rows."""
    return [row.name for row in CALL_FORMATS]


def detect_speech(template: ChatTemplate, tokenizer: Tokenizer, override: str | None = None) -> Speech:
    """Return the formats of a model with this template and vocabulary. `override`: a row's name, "none" or "auto"."""
    proof = _prove_calls(template)
    calls: CallFormat | None = proof.row if proof else _mentioned(template.source)
    is_proved = proof is not None
    if override not in (None, AUTO):
        calls, is_proved = _named(str(override)), proof is not None and proof.row.name == override
    thinking = _find_thinking(template)
    return Speech(
        calls=calls,
        thinking=thinking,
        control=_control_tokens(tokenizer, calls, thinking),
        lead=proof.lead if proof and is_proved else "",
        arguments_as=proof.arguments_as if proof else "object",
        describes_tools=_NAMES[0] in _rendered(template, [_message("user", _QUESTION)]),
        is_proved=is_proved,
    )


def _named(name: str) -> CallFormat | None:
    if name == NONE:
        return None
    found = next((row for row in CALL_FORMATS if row.name == name), None)
    if found is None:
        known = ", ".join(call_format_names())
        raise InvalidRequest(f"no tool-call format is called {name!r}", param="tool_format", hint=f"one of: {known}")
    return found


# ── rendering probes ─────────────────────────────────────────────────────────────────────────────────────


def _message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _rendered(template: ChatTemplate, messages: Sequence[dict[str, Any]], **more: Any) -> str:
    """Return what the template writes after the user's question; "" if it refuses the conversation."""
    variables = {"functions": "", "datetime": "", **more}  # some templates fail where these are missing
    ask = bool(variables.pop("ask", False))
    try:
        text = template.render(messages, tools=_TOOLS, add_generation_prompt=ask, extra=variables)
    except (InvalidRequest, ModelError):
        return ""
    if len(messages) == 1 and not ask:
        return text
    return text[text.rfind(_QUESTION) + len(_QUESTION) :]


def _called(calls: Sequence[ToolCall], arguments_as: str) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.loads(call.arguments) if arguments_as == "object" else call.arguments,
            },
        }
        for call in calls
    ]


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Proof:
    row: CallFormat
    arguments_as: Literal["object", "text"]
    lead: str


def _prove_calls(template: ChatTemplate) -> _Proof | None:
    for calls in (_CALLS, _CALLS[:1]):
        for arguments_as in ("object", "text"):
            called = _called(calls, arguments_as)
            for content in ("", None, _TEXT):
                answer = _message("assistant", content, tool_calls=called)
                row = _reproducing(_rendered(template, [_message("user", _QUESTION), answer]), calls)
                if row is not None:
                    return _Proof(row, arguments_as, _lead(template, row, calls, called))
    return None


def _reproducing(text: str, calls: Sequence[ToolCall]) -> CallFormat | None:
    """Return the row whose rendering of the calls occurs in the text; of several, the one with the longest."""
    if _NAMES[0] not in text:
        return None
    written = [(row.write(calls), row) for row in CALL_FORMATS]
    fitting = [(len(rendering), row) for rendering, row in written if rendering in text]
    if not fitting:
        return None
    longest = max(length for length, _ in fitting)
    return next(row for length, row in fitting if length == longest)


def _lead(template: ChatTemplate, row: CallFormat, calls: Sequence[ToolCall], called: list[dict[str, Any]]) -> str:
    messages = [_message("user", _QUESTION), _message("assistant", _TEXT, tool_calls=called)]
    before, found, _ = _rendered(template, messages).partition(row.write(calls))
    _, answer_text, lead = before.rpartition(_TEXT)
    return lead if found and answer_text and not lead.strip() else ""


def _mentioned(source: str) -> CallFormat:
    """Return the first row whose markers the template mentions, else the fallback."""
    for row in CALL_FORMATS:
        markers = row.mentions or _outer_markers(row)
        if markers and all(marker in source for marker in markers):
            return row
    return next(row for row in CALL_FORMATS if row.name == FALLBACK)


def _outer_markers(row: CallFormat) -> list[str]:
    head, tail = row.section if row.section[0] else (row.call.partition("§")[0], row.call.rpartition("§args")[2])
    markers = [opening_marker(text.strip("[]{}\n ")) for text in (head, tail) if text.strip("[]{}\n ")]
    return markers if all(marker[0] in "<[" for marker in markers) else []


# ── thinking ─────────────────────────────────────────────────────────────────────────────────────────────


def _find_thinking(template: ChatTemplate) -> ThinkingFormat | None:
    """Return the row with which the template writes reasoning, ends its prompts, or which it at least mentions."""
    written = list(_thoughts_written(template))
    for row in _thinking_rows(template.source):
        opener, closer = re.escape(row.opener.strip()), re.escape(row.closer.strip())
        if any(re.search(rf"{opener}\s*{re.escape(_THOUGHT)}\s*{closer}", text) for text in written):
            return row
    prompts = [_rendered(template, [_message("user", _QUESTION)], ask=True, **on) for on in _THINKING_ON]
    for row in _thinking_rows(template.source):
        if any(row.is_open_at_end(text) for text in prompts):
            return row
    mentioned = (row for row in _thinking_rows(template.source) if row.opener.strip() in template.source)
    return next((row for row in mentioned if row.closer.strip() in template.source), None)


def _thinking_rows(source: str) -> Iterator[ThinkingFormat]:
    return (row for row in THINKING_FORMATS if row.mention in source)


def _thoughts_written(template: ChatTemplate) -> Iterator[str]:
    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT, "reasoning": _THOUGHT}
    question, answer = _message("user", _QUESTION), _message("assistant", _TEXT, **thought)
    yield _rendered(template, [question, answer])
    for arguments_as in ("object", "text"):
        called = _called(_CALLS[:1], arguments_as)
        for content in (_TEXT, ""):
            asking = _message("assistant", content, tool_calls=called, **thought)
            result = _message("tool", "42", name=_NAMES[0], tool_call_id=_CALLS[0].id)
            yield _rendered(template, [question, asking, result])


# ── control tokens ───────────────────────────────────────────────────────────────────────────────────────


def _control_tokens(tokenizer: Tokenizer, calls: CallFormat | None, thinking: ThinkingFormat | None) -> dict[str, int]:
    """Return the tokens added to the vocabulary that occur in the formats' texts."""
    texts = list(_fixed_texts(calls, thinking))
    return {
        token: token_id
        for token, token_id in tokenizer.added_tokens.items()
        if len(token) > 2 and not token.isspace() and any(token in text for text in texts)
    }


def _fixed_texts(calls: CallFormat | None, thinking: ThinkingFormat | None) -> Iterator[str]:
    if calls is not None:
        yield from (calls.call, calls.arg or "", calls.header, calls.join, *calls.section)
        yield from (*calls.also_opens, *calls.ignored)
        yield '<|"|>' if calls.values == "gemma" else ""
    if thinking is not None:
        yield from (thinking.opener, thinking.closer, *thinking.ignored)
        channels = CHANNEL_FORMATS.get(thinking.name)
        if channels is not None:
            yield from (*channels.begins, channels.message, *channels.ends)
