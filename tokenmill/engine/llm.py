"""The offline front: a list of prompts in, a list of answers out in the same order, with a progress bar.

The same core as in serving, in this process, stepped by whoever waits for the answers.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.config.by_name import engine_config
from tokenmill.engine.argument_checks import (
    Conversation,
    Prompt,
    conversations_from,
    messages_from,
    params_from,
    prompt_from,
    prompts_from,
    template_args_from,
)
from tokenmill.engine.core import EngineCore
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.progress import Report, no_report, progress_over
from tokenmill.engine.results import EmbeddingOutput, RequestOutput, empty_output
from tokenmill.engine.startup.cuda_preinit import cuda_preinit
from tokenmill.engine.startup.garbage_collection import relaxed_gc
from tokenmill.engine.startup.torch_import import (
    gc_paused,
    import_meta_kernels,
    preload_libraries,
    without_meta_kernels,
)
from tokenmill.errors import InvalidRequest, TokenmillError, error_with_code
from tokenmill.params import SamplingParams
from tokenmill.types import ChatRequest, EmbedRequest, Event, Pooling, PromptRequest, Request, SequenceOutput

Asked = tuple[ClientRequest, Request]
Arrived = Event | TokenmillError
TAKEN_IN_A_STEP = 128  # requests: 20 ms of work


class LLM:
    """A model in this process: prompts in, answers out, many at a time.

        llm = LLM("smollm2:135m", max_context=2048)
        answers = llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0, max_tokens=16))
        print(answers[0].outputs[0].text)

    The model is a short name, the path of a GGUF file or model directory, or a Hugging Face id; it is
    fetched if need be. Threads may share an `LLM`: their calls take turns, streams step by step.
    """

    def __init__(self, model: str | Path | EngineConfig = "smollm2:135m", **settings: Any) -> None:
        """Load a model. Settings are those of `tokenmill run --help` by name: `max_context=2048`, `threads=2` ..."""
        # A list of prompts is as long as it is: nothing is refused for waiting.
        self.config = engine_config(model, {"max_waiting": sys.maxsize, **settings})
        with preload_libraries():
            self._frontend: ModelFrontend = load_frontend(self.config)
        with gc_paused(), without_meta_kernels(), cuda_preinit(self.config.ops.device):
            from tokenmill.engine.build import build_core  # torch, and with it most of a start's time
        try:
            self._core: EngineCore = build_core(self.config, self._frontend.model_path, import_meta_kernels)
        finally:
            import_meta_kernels()
        self._core.run_idle_task()  # compilers that work beside the first requests
        self._input_processor = self._frontend.input_processor(self._core.info.max_context)
        self._turn = threading.RLock()  # whoever computes has it, or two threads would step the same core at once
        self._output_processors: dict[str, OutputProcessor] = {}  # of requests that run
        self._kept: dict[str, list[Arrived]] = {}  # by stream: what has come for it and was not taken yet

    @property
    def core(self) -> EngineCore:
        """What computes: `core.info` tells what was chosen and why."""
        return self._core

    @property
    def frontend(self) -> ModelFrontend:
        """What reads and writes text: the tokenizer, the chat template, the model's name."""
        return self._frontend

    # ── whole answers ──────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Go on from each prompt, a string or a list of token ids; answers come in the order of the prompts.

        `params` are for all of them, or a list with one each. Wrong input raises; a request that fails says so in the
        `error` of its answer.
        """
        many = prompts_from(prompts)
        asked = [PromptRequest(prompt=p, params=q) for p, q in zip(many, params_from(params, len(many)), strict=True)]
        return self._answer(asked, progress=progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """The next turn of a conversation, or of each of several; a message is a dict with `role` and `content`.

        `template_args` are variables of the model's chat template: `enable_thinking=False`.
        """
        conversations = conversations_from(messages)
        asked = [
            ChatRequest(messages=c, params=q, template_args=template_args_from(template_args))
            for c, q in zip(conversations, params_from(params, len(conversations)), strict=True)
        ]
        return self._answer(asked, progress=progress)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None) -> list[EmbeddingOutput]:
        """One vector for each prompt, of length one: the mean over its tokens unless `pooling` says otherwise."""
        given: Any = pooling
        if given is not None and not isinstance(given, Pooling):
            raise InvalidRequest(f"pooling must be a Pooling, got {given!r}", param="pooling", hint='Pooling("last")')
        asked = [EmbedRequest(prompt=p, pooling=pooling) for p in prompts_from(prompts)]
        vectors: dict[str, list[float]] = {}

        def take(request_id: str, arrived: Arrived) -> None:
            if isinstance(arrived, TokenmillError):
                raise arrived
            vectors[request_id] = arrived.embedding or []

        with self._turn:
            requests = [self._taken(one) for one in asked]  # all are checked before any is run
            self._run_until_done(deque(zip(asked, requests, strict=True)), take)
        return [EmbeddingOutput(r.request_id, r.prompt_token_ids, vectors[r.request_id]) for r in requests]

    # ── answers as they come ───────────────────────────────────────────────────────────────────────────

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Go on from one prompt, in pieces as they come. Leaving the iterator early ends the request."""
        (params,) = params_from(params, 1)
        return self._stream(PromptRequest(prompt=prompt_from(prompt), params=params))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **template_args: Any
    ) -> Iterator[Event]:
        """The next turn of one conversation, in pieces as they come."""
        (params,) = params_from(params, 1)
        return self._stream(
            ChatRequest(
                messages=messages_from(messages), params=params, template_args=template_args_from(template_args)
            )
        )

    def close(self) -> None:
        """End whatever still runs. The model itself goes when nobody refers to this object any more."""
        with self._turn:
            for request_id in list(self._output_processors):
                self._abort(request_id)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, asked: Sequence[ChatRequest | PromptRequest], *, progress: bool) -> list[RequestOutput]:
        with self._turn:
            return self._answer_now(asked, progress)

    def _answer_now(self, asked: Sequence[ChatRequest | PromptRequest], progress: bool) -> list[RequestOutput]:
        requests = [self._taken(one) for one in asked]  # all are checked before any is run
        answers = {
            request.request_id: empty_output(request, prompt_text(one), one.params.n)
            for one, request in zip(asked, requests, strict=True)
        }

        def take(request_id: str, arrived: Arrived) -> None:
            if isinstance(arrived, TokenmillError):
                answers[request_id].error = arrived.message
            else:
                answers[request_id].add(arrived)

        with progress_over(len(requests), enabled=progress) as report, relaxed_gc():
            self._run_until_done(deque(zip(asked, requests, strict=True)), take, report)
        return [answers[request.request_id] for request in requests]

    def _run_until_done(
        self, waiting: deque[Asked], take: Callable[[str, Arrived], None], report: Report = no_report
    ) -> None:
        """All that wait, to their ends; whoever breaks off leaves nothing of them behind."""
        unfinished = {request.request_id for _, request in waiting}
        total = len(unfinished)
        try:
            while unfinished:
                self._add_some(waiting)
                for output in self._core.step():
                    for arrived in self._arrived(output, unfinished):
                        take(output.request_id, arrived)
                    if output.request_id not in self._output_processors:
                        unfinished.discard(output.request_id)
                    report(done=total - len(unfinished), new_tokens=len(output.token_ids))
        finally:
            for request_id in unfinished:
                self._abort(request_id)

    def _arrived(self, output: SequenceOutput, mine: Container[str]) -> Sequence[Arrived]:
        """What an output brings to these requests; what it brings to others, streams that stand still, is kept."""
        arrived = self._deliver(output)
        if output.request_id in mine:
            return arrived
        if output.request_id in self._kept:
            self._kept[output.request_id] += arrived
        return []

    def _add_some(self, waiting: deque[Asked]) -> None:
        """The first step begins while most of a long list is still to be taken in; a static batch is one as a whole."""
        count = len(waiting) if self.config.scheduler.policy == "static" else min(len(waiting), TAKEN_IN_A_STEP)
        for _ in range(count):
            self._add(*waiting.popleft())

    def _stream(self, asked: ChatRequest | PromptRequest) -> Iterator[Event]:
        with self._turn:
            request = self._submit(asked)
            kept = self._kept[request.request_id] = []
        try:
            while kept or request.request_id in self._output_processors:
                if not kept:
                    self._bring_some(request.request_id)
                    continue
                if isinstance(first := kept.pop(0), TokenmillError):
                    raise first
                yield first
        finally:
            with self._turn:
                del self._kept[request.request_id]
                self._abort(request.request_id)

    def _bring_some(self, request_id: str) -> None:
        """One step, unless another thread's has brought something, or the end, while this one waited for its turn."""
        with self._turn:
            if not self._kept[request_id] and request_id in self._output_processors:
                for output in self._core.step():
                    self._arrived(output, mine=())

    def _taken(self, asked: ClientRequest) -> Request:
        request = self._input_processor.take(asked)
        self._core.prepare(request)
        return request

    def _submit(self, asked: ClientRequest) -> Request:
        request = self._taken(asked)
        self._add(asked, request)
        return request

    def _add(self, asked: ClientRequest, request: Request) -> None:
        self._output_processors[request.request_id] = self._frontend.output_processor(asked, request)
        self._core.add(request)

    def _deliver(self, output: SequenceOutput) -> Sequence[Arrived]:
        output_processor = self._output_processors.get(output.request_id)
        if output_processor is None:
            return []
        if output.finish_reason == "error":
            del self._output_processors[output.request_id]
            return [error_with_code(output.error_code, output.error or "the request failed")]
        events = output_processor.push(output)
        for index in output_processor.pop_stopped():
            self._core.abort(output.request_id, index)
        if output_processor.is_finished:
            del self._output_processors[output.request_id]
        return events

    def _abort(self, request_id: str) -> None:
        if self._output_processors.pop(request_id, None) is not None:
            self._core.abort(request_id)


def prompt_text(asked: ChatRequest | PromptRequest) -> str | None:
    return asked.prompt if isinstance(asked, PromptRequest) and isinstance(asked.prompt, str) else None
