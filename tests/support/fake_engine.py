"""A scripted engine with the interface of the real one, so that server tests run in milliseconds.

A token is a byte (ids 0 to 255); 256 begins a prompt. Every answer is `engine.answer`, word by word, unless the test
sets something else. `engine.running` has the open requests, `engine.aborted` the aborted ones.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.arch.spec import Gqa, LayerSpec, MlpSpec, ModelSpec
from tokenmill.engine.input_processor import ClientRequest, PreparedRequest
from tokenmill.engine.status import EngineStats, Health, ModelInfo
from tokenmill.errors import ContextLengthExceeded, Draining, EngineDead, Overloaded, TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.types import (
    CallStart,
    ChatRequest,
    EmbedRequest,
    Event,
    Part,
    Request,
    TextPart,
    ThoughtPart,
    TokenInfo,
    Usage,
)

BOS = 256
STORY = "Once upon a time, there was a little girl named Lily. She loved to play – outside 🌞 in the park."
LAYER = LayerSpec(Gqa(8, 4, 8, 0.35, None), MlpSpec(64))
SPEC = ModelSpec("llama", 512, 16, (LAYER,), 1e-5, 512, tied_head=True)
INFO = ModelInfo("fake/tiny", 512, 512, 1_700_000_000, "fp_fake", SPEC, can_embed=True, max_running=8)


@dataclass
class FakeEngine:
    info: ModelInfo = INFO
    answer: str = STORY
    parts: list[Part] | None = None  # the answer instead of `answer`, one event each
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    prepare_delay_s: float = 0.0
    num_preparing: int = 0
    is_held: bool = False  # streams pause after their first event until the engine drains
    max_running: int = 1000
    most_running: int = 0  # highest number of requests at one time
    failure: TokenmillError | None = None  # raised after `fail_after` events
    fail_after: int = 3
    state: str = "ready"
    running: dict[str, FakeStream] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    seen: list[ClientRequest] = field(default_factory=list)

    async def prepare(self, client_request: ClientRequest) -> PreparedRequest:
        self._require_room()
        self.num_preparing += 1
        try:
            await asyncio.sleep(self.prepare_delay_s)
        finally:
            self.num_preparing -= 1
        ids = self._prompt_ids(client_request)
        # An embedding needs no room for an answer.
        if len(ids) >= self.info.max_context + isinstance(client_request, EmbedRequest):
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens",
                param="messages",
                num_tokens=len(ids),
                limit=self.info.max_context - 1,
            )
        params = SamplingParams() if isinstance(client_request, EmbedRequest) else client_request.params
        request = Request(
            request_id=client_request.request_id, prompt_token_ids=ids, params=params, max_tokens=0, seed=0
        )
        return PreparedRequest(client_request, request)

    def submit(self, prepared: PreparedRequest) -> FakeStream:
        self._require_room()
        self.seen.append(prepared.client_request)
        stream = FakeStream(self, prepared.client_request, prepared.request.prompt_token_ids)
        self.running[prepared.client_request.request_id] = stream
        self.most_running = max(self.most_running, len(self.running))
        return stream

    def _require_room(self) -> None:
        if self.state == "draining":
            raise Draining("the server is shutting down")
        if self.state != "ready":
            raise EngineDead(f"the engine is {self.state}")
        if len(self.running) >= self.max_running:
            raise Overloaded("too many requests are waiting", retry_after_s=3)

    def _prompt_ids(self, request: ClientRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            return self.tokenize_chat(request)
        return self.tokenize(request.prompt) if isinstance(request.prompt, str) else request.prompt

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        return self.tokenize("".join(f"<{m.role}>{m.content}" for m in request.messages))

    def chat_text(self, request: ChatRequest) -> str:
        return "".join(f"<{m.role}>{m.content}" for m in request.messages)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        return [bytes([token_id]) if token_id < BOS else b"" for token_id in ids]

    def detokenize(self, ids: list[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < BOS).decode(errors="replace")

    async def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None):
            self.aborted.append(request_id)

    def is_idle(self) -> bool:
        return not self.running and not self.num_preparing

    def num_generated(self, request_id: str) -> int:
        stream = self.running.get(request_id)
        return 0 if stream is None else stream.num_sent

    async def drain(self, timeout_s: float) -> bool:
        self.state = "draining"
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return not self.running

    def health(self) -> Health:
        return Health(self.state)  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running), kv_blocks_used=len(self.running), kv_blocks_total=100)

    def replicas(self) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        self.state = "dead"


class FakeStream(AsyncIterator[Event]):
    def __init__(self, engine: FakeEngine, request: ClientRequest, prompt_ids: list[int]) -> None:
        self._engine = engine
        self._request = request
        self._events = self._script(prompt_ids)
        self.num_sent = 0

    async def __anext__(self) -> Event:
        engine, request_id = self._engine, self._request.request_id
        try:
            await self._pause(engine.delay_s if self.num_sent else engine.first_delay_s)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if engine.state == "dead":
            raise EngineDead("the engine was closed")
        if engine.failure is not None and self.num_sent >= engine.fail_after:
            engine.running.pop(request_id, None)
            raise engine.failure
        if self.num_sent == len(self._events):
            engine.running.pop(request_id, None)
            raise StopAsyncIteration
        self.num_sent += 1
        return self._events[self.num_sent - 1]

    async def _pause(self, seconds: float) -> None:
        """Sleep in short portions, so that closing the engine is noticed."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0 and self._engine.state != "dead":
            await asyncio.sleep(min(left, 0.05))
        while self._engine.is_held and self._engine.state == "ready" and self.num_sent:
            await asyncio.sleep(0.01)

    async def aclose(self) -> None:
        await self._engine.abort(self._request.request_id)

    def _script(self, prompt_ids: list[int]) -> list[Event]:
        request_id, usage = self._request.request_id, Usage(prompt_tokens=len(prompt_ids), completion_tokens=0)
        if isinstance(self._request, EmbedRequest):
            vector = [float(value) for value in (prompt_ids * 16)[:16]]
            length = sum(value * value for value in vector) ** 0.5
            vector = [value / length for value in vector]
            return [Event(request_id=request_id, embedding=vector, finish_reason="stop", usage=usage)]
        params = self._request.params
        choices = [self._choice(index, params, prompt_ids) for index in range(params.n)]
        events: list[Event] = []
        for step in range(max(map(len, choices))):  # interleaved, as by a batch
            events += [choice[step] for choice in choices if step < len(choice)]
        return events

    def _choice(self, index: int, params: SamplingParams, prompt_ids: list[int]) -> list[Event]:
        if self._engine.parts is not None:
            return self._parts(index, self._engine.parts, prompt_ids)
        words = re.findall(r"\S+\s*", self._engine.answer)
        limit = len(words) if params.max_tokens is None else min(params.max_tokens, len(words))
        text = "".join(words[:limit])
        cuts = [text.find(stop) for stop in params.stop if stop in text]
        finish = "stop" if cuts or limit == len(words) else "length"
        shown = re.findall(r"\S+\s*", text[: min(cuts)] if cuts else text)
        usage = Usage(prompt_tokens=len(prompt_ids), completion_tokens=limit * params.n, cached_tokens=2)
        request_id = self._request.request_id
        events = [
            Event(request_id=request_id, index=index, text=word, logprobs=_logprobs(params, word)) for word in shown
        ]
        if index == 0 and params.prompt_logprobs is not None:
            tokenized = [None, *(_info(chr(token_id), params.prompt_logprobs) for token_id in prompt_ids[1:])]
            events.insert(0, Event(request_id=request_id, prompt_logprobs=tokenized))
        last = Event(
            request_id=request_id,
            index=index,
            finish_reason=finish,  # type: ignore[arg-type]
            stop_reason=min(params.stop, key=lambda stop: text.find(stop) % (1 << 30)) if cuts else None,
            usage=usage,
        )
        return [*events, last]

    def _parts(self, index: int, parts: list[Part], prompt_ids: list[int]) -> list[Event]:
        request_id = self._request.request_id
        num_thoughts = sum(isinstance(part, ThoughtPart) for part in parts)
        has_calls = any(isinstance(part, CallStart) for part in parts)
        usage = Usage(
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(parts),
            cached_tokens=2,
            reasoning_tokens=num_thoughts,
            drafted_tokens=5,
            accepted_tokens=2,
        )
        texts = [part.text if isinstance(part, TextPart) else "" for part in parts]
        events = [
            Event(request_id=request_id, index=index, text=text, parts=[part])
            for part, text in zip(parts, texts, strict=True)
        ]
        finish = "tool_calls" if has_calls else "stop"
        last = Event(request_id=request_id, index=index, finish_reason=finish, usage=usage)  # type: ignore[arg-type]
        return [*events, last]


def _logprobs(params: SamplingParams, word: str) -> list[TokenInfo] | None:
    return None if params.logprobs is None else [_info(word, params.logprobs)]


def _info(text: str, num_top: int) -> TokenInfo:
    top = [(place, f"{text}{place}" if place else text, b"", -0.5 - place) for place in range(num_top)]
    return TokenInfo(len(text), text, text.encode(), -0.5, 1, top)
