"""Events into OpenAI's replies. A chunk is the same bytes every time but for index, delta and finish reason, so the
rest is made once a request; per token there is one small `orjson.dumps`.

    role chunk a choice ─► content deltas ─► `delta: {}` with finish_reason a choice ─► (usage) ─► [DONE]
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from tokenmill.engine.status import ModelInfo
from tokenmill.errors import TokenmillError
from tokenmill.server import sse
from tokenmill.server.generation import FoldedChoice
from tokenmill.server.openai.errors import error_body, error_response
from tokenmill.server.openai.logprobs import LegacyLogprobs, chat_logprobs, echoed_logprobs, prompt_logprobs
from tokenmill.types import Event, TokenInfo, Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "speculation": {"proposed": usage.drafted_tokens, "accepted": usage.accepted_tokens},
    }


class Envelope:
    """What all chunks of one answer share: id, object, created, model, fingerprint."""

    def __init__(self, info: ModelInfo, prefix: str, kind: str, include_usage: bool) -> None:
        self.fields = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": info.fingerprint,
        }
        self._include_usage = include_usage
        self._head = b"data: " + orjson.dumps(self.fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, Any]) -> bytes:
        return self._head + orjson.dumps(choice) + self._tail

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return sse.frame(orjson.dumps({**self.fields, "choices": [], "usage": usage_object(usage)})) + sse.DONE

    def whole(self, choices: list[dict[str, Any]], usage: Usage, extra: dict[str, Any]) -> bytes:
        return orjson.dumps({**self.fields, "choices": choices, "usage": usage_object(usage), **extra})


class TextChunks:
    """Chunks with nothing but text, as nearly all are: what stands around it is made once a choice."""

    HOLE = "\0"

    def __init__(self, chunk: Callable[[int, str], bytes]) -> None:
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def render(self, choice: int, text: str) -> bytes:
        around = self._around.get(choice)
        if around is None:
            before, _, after = self._chunk(choice, self.HOLE).rpartition(orjson.dumps(self.HOLE))
            around = self._around[choice] = before, after
        return around[0] + orjson.dumps(text) + around[1]


class ErrorRendering:
    """Errors look the same in all of OpenAI's replies."""

    def failure(self, error: TokenmillError) -> bytes:
        return sse.frame(error_body(error))

    def refusal(self, error: TokenmillError) -> Response:
        return error_response(error)


# ── chat ───────────────────────────────────────────────────────────────────────────────────────────────


class ChatRendering(ErrorRendering):
    def __init__(self, info: ModelInfo, *, num_choices: int, is_stream: bool, include_usage: bool) -> None:
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        self._envelope = Envelope(info, "chatcmpl", kind, include_usage)
        self._num_choices = num_choices
        self._texts = TextChunks(lambda choice, text: self._chunk(choice, {"content": text}))
        self._held: dict[int, list[TokenInfo]] = {}  # logprobs whose text is not out yet

    def begin(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice, delta) for choice in range(self._num_choices))

    def event(self, choice: int, event: Event) -> bytes:
        if event.logprobs is None and event.finish_reason is None:
            return self._texts.render(choice, event.text) if event.text else b""
        logprobs = self._logprobs(choice, event)
        if event.finish_reason is None:
            return self._chunk(choice, {"content": event.text}, logprobs) if event.text else b""
        if not event.text:
            return self._chunk(choice, {}, logprobs, event.finish_reason)
        return self._chunk(choice, {"content": event.text}, logprobs) + self._chunk(
            choice, {}, None, event.finish_reason
        )

    def _logprobs(self, choice: int, event: Event) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        infos = [*self._held.pop(choice, []), *event.logprobs]
        if not event.text and event.finish_reason is None:
            self._held[choice] = infos
            return None
        return chat_logprobs(infos) if infos else None

    def _chunk(
        self, choice: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        return self._envelope.chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish})

    def end(self, usage: Usage) -> bytes:
        return self._envelope.end(usage)

    def whole(self, choices: list[FoldedChoice], usage: Usage) -> bytes:
        prompt = choices[0].prompt_logprobs
        extra = {} if prompt is None else {"prompt_logprobs": prompt_logprobs(prompt)}
        rendered = [_chat_choice(index, choice) for index, choice in enumerate(choices)]
        return self._envelope.whole(rendered, usage, extra)


def _chat_choice(index: int, choice: FoldedChoice) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


# ── completions ────────────────────────────────────────────────────────────────────────────────────────


class CompletionRendering(ErrorRendering):
    """`echoes`: the prompt of every choice, where the client wants it back in front of the answer."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        num_choices: int,
        include_usage: bool,
        echoes: list[str] | None,
        wants_logprobs: bool,
        wants_prompt_logprobs: bool,
    ) -> None:
        self._envelope = Envelope(info, "cmpl", "text_completion", include_usage)
        self._echoes = echoes
        self._wants_logprobs = wants_logprobs
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self._texts = TextChunks(self._chunk)
        self._legacy = [LegacyLogprobs(len(echoes[choice]) if echoes else 0) for choice in range(num_choices)]
        self._held: dict[int, list[TokenInfo]] = {}

    def begin(self) -> bytes:
        chunks = [self._chunk(choice, text) for choice, text in enumerate(self._echoes or []) if text]
        return b"".join(chunks)

    def event(self, choice: int, event: Event) -> bytes:
        if event.logprobs is None and event.finish_reason is None:
            return self._texts.render(choice, event.text) if event.text else b""
        if event.finish_reason is None and not event.text:
            self._held.setdefault(choice, []).extend(event.logprobs or [])
            return b""
        return self._chunk(choice, event.text, self._logprobs(choice, event), event.finish_reason)

    def _logprobs(self, choice: int, event: Event) -> dict[str, Any] | None:
        infos = [*self._held.pop(choice, []), *(event.logprobs or [])]
        return self._legacy[choice].render(infos) if infos else None

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        return self._envelope.chunk({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish})

    def end(self, usage: Usage) -> bytes:
        return self._envelope.end(usage)

    def whole(self, choices: list[FoldedChoice], usage: Usage) -> bytes:
        rendered = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._envelope.whole(rendered, usage, {})

    def _choice(self, index: int, choice: FoldedChoice) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else ""
        rendered = {
            "index": index,
            "text": echo + choice.text,
            "logprobs": self._choice_logprobs(index, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._wants_prompt_logprobs:
            rendered["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or [])
        return rendered

    def _choice_logprobs(self, index: int, choice: FoldedChoice) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        infos = choice.logprobs or []
        if self._echoes is None:
            return self._legacy[index].render(infos)
        return echoed_logprobs(self._echoes[index], choice.prompt_logprobs or [None], infos)
