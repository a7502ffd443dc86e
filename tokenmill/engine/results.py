"""Merging a stream of events into one result.

    Event, Event, Event ──► EventFold ──► one Event with all the text

`EventFold` serves slow readers of a stream, non-streaming HTTP replies, `best_of` and the outputs of `LLM`.
`RequestOutput` and `CompletionOutput` are what `LLM` returns; their shape is the same as in other engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import groupby

import msgspec

from tokenmill.types import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    FinishReason,
    Part,
    Request,
    TextPart,
    ThoughtPart,
    TokenInfo,
    ToolCall,
    Usage,
)


class EventFold:
    """Merges the events of one choice. A single event, the usual case in a stream, is returned unchanged."""

    __slots__ = ("_earlier", "_last")

    def __init__(self) -> None:
        self._last: Event | None = None
        self._earlier: _Sums | None = None  # of all events before the last one

    def add(self, event: Event) -> None:
        if self._last is not None:
            if self._earlier is None:
                self._earlier = _Sums()
            self._earlier.add(self._last)
        self._last = event

    @property
    def is_empty(self) -> bool:
        return self._last is None

    @property
    def event(self) -> Event:
        """Return one event with all text, tokens and logprobs in order, and the last event's finish reason and
        usage."""
        assert self._last is not None, "no event was added"
        return self._last if self._earlier is None else self._earlier.merged_with(self._last)


class _Sums:
    def __init__(self) -> None:
        self._text = StringIO()
        self._parts: list[Part] | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenInfo] | None = None
        self._prompt_logprobs: Sequence[TokenInfo | None] | None = None
        self._queue_s: float | None = None
        self._usage: Usage | None = None

    def add(self, event: Event) -> None:
        if event.parts is not None and self._parts is None:
            self._parts = text_parts(self._text.getvalue())
        if self._parts is not None:
            self._parts += text_parts(event.text) if event.parts is None else event.parts
        self._text.write(event.text)
        self._token_ids += event.token_ids
        if event.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += event.logprobs
        if self._prompt_logprobs is None:
            self._prompt_logprobs = event.prompt_logprobs
        if self._queue_s is None:
            self._queue_s = event.queue_s
        if event.usage is not None:
            self._usage = event.usage

    def merged_with(self, last: Event) -> Event:
        text = self._text.getvalue()
        return msgspec.structs.replace(
            last,
            text=text + last.text,
            parts=self._merged_parts(text, last),
            token_ids=self._token_ids + last.token_ids,
            logprobs=_joined(self._logprobs, last.logprobs),
            prompt_logprobs=last.prompt_logprobs if self._prompt_logprobs is None else self._prompt_logprobs,
            queue_s=last.queue_s if self._queue_s is None else self._queue_s,
            usage=self._usage if last.usage is None else last.usage,
        )

    def _merged_parts(self, text: str, last: Event) -> list[Part] | None:
        if self._parts is None and last.parts is None:
            return None
        before = text_parts(text) if self._parts is None else self._parts
        return merge_parts([*before, *(text_parts(last.text) if last.parts is None else last.parts)])


def text_parts(text: str) -> list[Part]:
    return [TextPart(text)] if text else []


def merge_parts(parts: Iterable[Part]) -> list[Part]:
    """Join neighbours of one kind: texts, thoughts, the arguments of one call."""
    merged: list[Part] = []
    for _, group in groupby(parts, key=_joins_with):
        run = list(group)
        first = run[0]
        match first:
            case TextPart():
                merged.append(TextPart("".join(part.text for part in run if isinstance(part, TextPart))))
            case ThoughtPart():
                merged.append(ThoughtPart("".join(part.text for part in run if isinstance(part, ThoughtPart))))
            case CallArguments(index):
                fragments = "".join(part.fragment for part in run if isinstance(part, CallArguments))
                merged.append(CallArguments(index, fragments))
            case _:
                merged += run
    return merged


def _joins_with(part: Part) -> tuple[type, int]:
    """Return the key of a part; consecutive parts with the same key are merged."""
    match part:
        case CallStart(index) | CallArguments(index) | CallEnd(index):
            return type(part), index
        case _:
            return type(part), 0


def reasoning_of(event: Event) -> str | None:
    """Return the reasoning text of an answer; None if there is none."""
    return "".join(part.text for part in event.parts or () if isinstance(part, ThoughtPart)) or None


def tool_calls_of(event: Event) -> list[ToolCall]:
    """Return the tool calls of a merged answer. A call that was cut off has the arguments up to there."""
    parts = event.parts or ()
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] = arguments.get(part.index, "") + part.fragment
    return [
        ToolCall(id=part.id, name=part.name, arguments=arguments.get(part.index, ""), kind=part.kind)
        for part in parts
        if isinstance(part, CallStart)
    ]


def _joined(before: list[TokenInfo] | None, more: list[TokenInfo] | None) -> list[TokenInfo] | None:
    if before is None or more is None:
        return more if before is None else before
    return before + more


# ── what `LLM` returns ─────────────────────────────────────────────────────────────────────────────────


@dataclass
class CompletionOutput:
    """One answer to a prompt: the visible text, the reasoning and the tool calls."""

    index: int
    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """All answers to a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0  # draft tokens of speculation, all outputs together
    num_accepted_tokens: int = 0  # draft tokens that were accepted
    prompt_logprobs: list[TokenInfo | None] | None = None
    error: str | None = None  # why this request failed; other requests of the same call are not affected
    number: int = 0  # index of the prompt within the call, from 0

    @property
    def finished(self) -> bool:
        return self.error is not None or all(output.finish_reason for output in self.outputs)


@dataclass
class EmbeddingOutput:
    """The embedding vector of a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]

    @property
    def outputs(self) -> EmbeddingOutput:
        """The output itself, so that vLLM's `output.outputs.embedding` works."""
        return self

    @property
    def finished(self) -> bool:
        return True


def request_output(
    request: Request, prompt: str | None, folds: Sequence[EventFold], error: str | None = None
) -> RequestOutput:
    """Build a request's result from the merged events of its choices; a failed request keeps its text so far."""
    events = [None if fold.is_empty else fold.event for fold in folds]
    output = RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(index, event) for index, event in enumerate(events)],
        prompt_logprobs=next(
            (list(event.prompt_logprobs) for event in events if event and event.prompt_logprobs), None
        ),
        error=error,
    )
    usages = [event.usage for event in events if event is not None and event.usage is not None]
    if usages:
        usage = max(usages, key=lambda one: one.completion_tokens)  # the usage in the last choice's final event
        output.num_cached_tokens = usage.cached_tokens
        output.num_drafted_tokens = usage.drafted_tokens
        output.num_accepted_tokens = usage.accepted_tokens
    return output


def _completion(index: int, event: Event | None) -> CompletionOutput:
    if event is None:
        return CompletionOutput(index)
    return CompletionOutput(
        index=index,
        text=event.text,
        reasoning=reasoning_of(event),
        tool_calls=tool_calls_of(event),
        token_ids=event.token_ids,
        logprobs=event.logprobs,
        cumulative_logprob=event.cumulative_logprob,
        finish_reason=event.finish_reason,
        stop_reason=event.stop_reason,
    )
