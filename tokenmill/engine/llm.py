"""The offline front: a list of prompts in, a list of answers out in the same order, with a progress bar.

The same core as in serving, in this process, stepped by whoever waits for the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.engine.collector import seldom_full
from tokenmill.engine.core import EngineCore
from tokenmill.engine.device_ahead import device_ahead
from tokenmill.engine.front import Front, load_front
from tokenmill.engine.intake import ClientRequest
from tokenmill.engine.outlet import Outlet
from tokenmill.engine.progress import progress_over
from tokenmill.engine.results import EmbeddingOutput, RequestOutput, empty_output
from tokenmill.engine.torch_import import import_meta_kernels, libraries_ahead, uncollected, without_meta_kernels
from tokenmill.errors import InvalidConfig, InvalidRequest, TokenmillError, error_with_code
from tokenmill.params import SamplingParams
from tokenmill.types import ChatRequest, EmbedRequest, Event, Message, Pooling, PromptRequest, Request, SequenceOutput

Prompt = str | list[int]
Conversation = Sequence[Message | dict[str, Any]]


class LLM:
    def __init__(self, model: str | Path | EngineConfig = "smollm2:135m", **settings: Any) -> None:
        """`settings` are fields of the config dataclasses by name: `max_context=2048`, `threads=2`, ..."""
        config = model if isinstance(model, EngineConfig) else EngineConfig(ModelConfig(model=str(model)))
        # A list of prompts is as long as it is: nothing is refused for waiting.
        self.config = with_settings(config, {"max_waiting": sys.maxsize, **settings})
        with libraries_ahead():
            self._front: Front = load_front(self.config)
        with uncollected(), without_meta_kernels(), device_ahead(self.config.ops.device):
            from tokenmill.engine.build import build_core  # torch, and with it most of a start's time
        try:
            self._core: EngineCore = build_core(self.config, self._front.model_path, import_meta_kernels)
        finally:
            import_meta_kernels()
        self._core.use_spare_time()  # compilers that work beside the first requests
        self._intake = self._front.intake(self._core.info.max_context)
        self._outlets: dict[str, Outlet] = {}

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def front(self) -> Front:
        return self._front

    # ── whole answers ──────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts. Wrong input raises; a request that fails says so in `error`."""
        many = as_prompts(prompts)
        asked = [PromptRequest(prompt=p, params=q) for p, q in zip(many, spread(params, len(many)), strict=True)]
        return self._answer(asked, progress=progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """One conversation or a list of them; a message is a dict with `role` and `content`."""
        conversations = as_conversations(messages)
        asked = [
            ChatRequest(messages=as_messages(c), params=q, template_args=template_args)
            for c, q in zip(conversations, spread(params, len(conversations)), strict=True)
        ]
        return self._answer(asked, progress=progress)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None) -> list[EmbeddingOutput]:
        asked = [EmbedRequest(prompt=p, pooling=pooling) for p in as_prompts(prompts)]
        requests = [self._submit(one) for one in asked]
        vectors: dict[str, list[float]] = {}
        while self._outlets:
            for output in self._core.step():
                for event in self._deliver(output):
                    vectors[event.request_id] = event.embedding or []
        return [EmbeddingOutput(r.request_id, r.prompt_token_ids, vectors[r.request_id]) for r in requests]

    # ── answers as they come ───────────────────────────────────────────────────────────────────────────

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        return self._stream(PromptRequest(prompt=prompt, params=params or SamplingParams()))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **template_args: Any
    ) -> Iterator[Event]:
        return self._stream(
            ChatRequest(messages=as_messages(messages), params=params or SamplingParams(), template_args=template_args)
        )

    def close(self) -> None:
        for request_id in list(self._outlets):
            self._abort(request_id)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, asked: Sequence[ChatRequest | PromptRequest], *, progress: bool) -> list[RequestOutput]:
        requests = [self._taken(one) for one in asked]  # all are checked before any is run
        answers = {
            request.request_id: empty_output(request, prompt_text(one), one.params.n)
            for one, request in zip(asked, requests, strict=True)
        }
        for one, request in zip(asked, requests, strict=True):
            self._outlets[request.request_id] = self._front.outlet(one, request)
            self._core.add(request)
        with progress_over(len(requests), enabled=progress) as report, seldom_full():
            self._run_until_done(answers, report)
        return [answers[request.request_id] for request in requests]

    def _run_until_done(self, answers: dict[str, RequestOutput], report: Any) -> None:
        while self._outlets:
            for output in self._core.step():
                try:
                    for event in self._deliver(output):
                        answers[event.request_id].add(event)
                except TokenmillError as error:
                    answers[output.request_id].error = error.message
                report(done=len(answers) - len(self._outlets), new_tokens=len(output.token_ids))

    def _stream(self, asked: ChatRequest | PromptRequest) -> Iterator[Event]:
        request = self._submit(asked)
        try:
            while request.request_id in self._outlets:
                for output in self._core.step():
                    yield from self._deliver(output)
        finally:
            self._abort(request.request_id)

    def _taken(self, asked: ClientRequest) -> Request:
        request = self._intake.take(asked)
        self._core.prepare(request)
        return request

    def _submit(self, asked: ClientRequest) -> Request:
        request = self._taken(asked)
        self._outlets[request.request_id] = self._front.outlet(asked, request)
        self._core.add(request)
        return request

    def _deliver(self, output: SequenceOutput) -> list[Event]:
        outlet = self._outlets.get(output.request_id)
        if outlet is None:
            return []
        if output.finish_reason == "error":
            del self._outlets[output.request_id]
            raise error_with_code(output.error_code, output.error or "the request failed")
        events = outlet.push(output)
        for index in outlet.take_stopped():
            self._core.abort(output.request_id, index)
        if outlet.is_finished:
            del self._outlets[output.request_id]
        return events

    def _abort(self, request_id: str) -> None:
        if self._outlets.pop(request_id, None) is not None:
            self._core.abort(request_id)


def with_settings(config: EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    """The config with some fields replaced, each found by its name in whichever part has it."""
    parts = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "ops": OpsConfig}
    changed: dict[str, dict[str, Any]] = {name: {} for name in parts}
    for key, value in settings.items():
        homes = [name for name, kind in parts.items() if key in {f.name for f in fields(kind)}]
        if not homes:
            raise InvalidConfig(f"there is no setting {key!r}", param=key)
        changed[homes[0]][key] = value
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in changed.items()})


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(part, int) for part in prompts):
        return [cast(list[int], list(prompts))]
    return cast(list[Prompt], list(prompts))


def as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    first = messages[0] if messages else None
    return [messages] if isinstance(first, dict | Message) else list(messages)  # type: ignore[list-item,arg-type]


def as_messages(conversation: Conversation) -> list[Message]:
    return [m if isinstance(m, Message) else message_from(m) for m in conversation]


def message_from(given: dict[str, Any]) -> Message:
    known = set(Message.__struct_fields__)
    unknown = set(given) - known
    if unknown or "role" not in given:
        problem = f"unknown keys {sorted(unknown)}" if unknown else "no role"
        raise InvalidRequest(f"a message has {problem}; it takes {sorted(known)}", param="messages")
    return Message(**given)


def spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling params for {count} prompts", param="params")
    return list(params)


def prompt_text(asked: ChatRequest | PromptRequest) -> str | None:
    return asked.prompt if isinstance(asked, PromptRequest) and isinstance(asked.prompt, str) else None
