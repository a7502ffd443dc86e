"""The offline front: a list of prompts in, a list of answers out in the same order, with a progress bar.

The same core as in serving, in this process, stepped by the thread that waits for the answers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

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
    reasoning_from,
    template_args_from,
    tool_choice_from,
    tools_from,
)
from tokenmill.engine.core import EngineCore
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.results import EmbeddingOutput, EventFold, RequestOutput, request_output
from tokenmill.engine.startup.garbage_collection import relaxed_gc
from tokenmill.engine.startup.torch_import import import_meta_kernels, preload_libraries, torch_import
from tokenmill.errors import InvalidRequest, TokenmillError, error_with_code
from tokenmill.params import SamplingParams
from tokenmill.types import (
    ChatRequest,
    EmbedRequest,
    Event,
    Pooling,
    PromptRequest,
    Request,
    SequenceOutput,
    Tool,
    ToolChoice,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Asked = tuple[ClientRequest, Request]
Arrived = Event | TokenmillError
ADDED_PER_STEP = 128  # requests: 20 ms of work


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
        self.config = engine_config(model, settings)
        fast_start = bool(self.config.ops.fast_start)  # this process is the program's: only where it asks
        with preload_libraries(fast_start=fast_start):
            self._frontend: ModelFrontend = load_frontend(self.config)
        with torch_import(fast_start=fast_start, device=self.config.ops.device):
            from tokenmill.engine.build import build_core  # torch, and with it most of a start's time
        try:
            self._core: EngineCore = build_core(
                self.config, self._frontend.model_path, fast_start=fast_start, while_compiling=import_meta_kernels
            )
        finally:
            import_meta_kernels()  # what a fast import has left out
        self._core.run_idle_task()  # compilers that work beside the first requests
        self._input_processor = self._frontend.input_processor(self._core.info.max_context)
        self._lock = threading.RLock()  # held by the thread that steps the core
        self._output_processors: dict[str, OutputProcessor] = {}  # of running requests
        self._unread: dict[str, list[Arrived]] = {}  # by stream: what has come for it and was not read yet

    @property
    def core(self) -> EngineCore:
        """The engine core; `core.info` says what was chosen and why."""
        return self._core

    @property
    def frontend(self) -> ModelFrontend:
        """The text side of the model: tokenizer, chat template, name."""
        return self._frontend

    # ── whole answers ──────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, a string or a list of token ids; answers come in the order of the prompts.

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
        tools: Sequence[Tool | dict[str, Any]] | None = None,
        tool_choice: ToolChoice | str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        progress: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """The next turn of a conversation, or of each of several; a message is a dict with `role` and `content`.

        `tools` are functions that the model may call, as OpenAI's clients write them; an answer has its calls in
        `tool_calls` and what the model thought in `reasoning`. `template_args` are variables of the model's chat
        template: `enable_thinking=False`.
        """
        conversations = conversations_from(messages)
        first = ChatRequest(
            messages=[],
            tools=tools_from(tools),
            tool_choice=tool_choice_from(tool_choice, parallel=parallel_tool_calls),
            reasoning=reasoning_from(reasoning_effort),
            template_args=template_args_from(template_args),
        )
        asked = [
            msgspec.structs.replace(first, messages=c, params=q)
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

        def receive(request_id: str, arrived: Arrived) -> None:
            if isinstance(arrived, TokenmillError):
                raise arrived
            vectors[request_id] = arrived.embedding or []

        with self._lock:
            requests = [self._processed(one) for one in asked]  # all are checked before any is run
            self._run_until_done(deque(zip(asked, requests, strict=True)), receive)
        return [EmbeddingOutput(r.request_id, r.prompt_token_ids, vectors[r.request_id]) for r in requests]

    # ── answers as they come ───────────────────────────────────────────────────────────────────────────

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Event]:
        """Continue one prompt, in pieces as they come. Leaving the iterator early ends the request."""
        (params,) = params_from(params, 1)
        return self._stream(PromptRequest(prompt=prompt_from(prompt), params=params))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | dict[str, Any]] | None = None,
        tool_choice: ToolChoice | str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        **template_args: Any,
    ) -> Iterator[Event]:
        """The next turn of one conversation, in pieces as they come; thoughts and calls are in their `parts`."""
        (params,) = params_from(params, 1)
        return self._stream(
            ChatRequest(
                messages=messages_from(messages),
                params=params,
                tools=tools_from(tools),
                tool_choice=tool_choice_from(tool_choice, parallel=parallel_tool_calls),
                reasoning=reasoning_from(reasoning_effort),
                template_args=template_args_from(template_args),
            )
        )

    def close(self) -> None:
        """Abort all running requests. The model's memory is freed with this object."""
        with self._lock:
            for request_id in list(self._output_processors):
                self._abort(request_id)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, asked: Sequence[ChatRequest | PromptRequest], *, progress: bool) -> list[RequestOutput]:
        with self._lock:
            return self._answer_now(asked, progress)

    def _answer_now(self, asked: Sequence[ChatRequest | PromptRequest], progress: bool) -> list[RequestOutput]:
        pairs = [(one, self._processed(one)) for one in asked]  # all are checked before any is run
        folds = {request.request_id: [EventFold() for _ in range(one.params.n)] for one, request in pairs}
        errors: dict[str, str] = {}

        def receive(request_id: str, arrived: Arrived) -> None:
            if isinstance(arrived, TokenmillError):
                errors[request_id] = arrived.message
            else:
                folds[request_id][arrived.index].add(arrived)

        with progress_over(len(pairs), enabled=progress) as report, relaxed_gc():
            self._run_until_done(deque(pairs), receive, report)
        return [
            request_output(request, prompt_text(one), folds[request.request_id], errors.get(request.request_id))
            for one, request in pairs
        ]

    def _run_until_done(
        self, waiting: deque[Asked], receive: Callable[[str, Arrived], None], report: Report | None = None
    ) -> None:
        """Step the core until all requests have ended; an exception on the way aborts the rest of them."""
        unfinished = {request.request_id for _, request in waiting}
        total = len(unfinished)
        try:
            while unfinished:
                self._add_some(waiting)
                for output in self._core.step():
                    for arrived in self._arrived(output, unfinished):
                        receive(output.request_id, arrived)
                    if output.request_id not in self._output_processors:
                        unfinished.discard(output.request_id)
                    if report is not None:
                        report(done=total - len(unfinished), new_tokens=len(output.token_ids))
        finally:
            for request_id in unfinished:
                self._abort(request_id)

    def _arrived(self, output: SequenceOutput, mine: Container[str]) -> Sequence[Arrived]:
        """Return what an output brings to these requests; what it brings to a stream that is not being read is kept."""
        arrived = self._deliver(output)
        if output.request_id in mine:
            return arrived
        if output.request_id in self._unread:
            self._unread[output.request_id] += arrived
        return []

    def _add_some(self, waiting: deque[Asked]) -> None:
        """Add the next requests: not all of a long list, so that the first step begins soon."""
        count = min(len(waiting), ADDED_PER_STEP)
        for _ in range(count):
            self._add(*waiting.popleft())

    def _stream(self, asked: ChatRequest | PromptRequest) -> Iterator[Event]:
        with self._lock:
            request = self._submit(asked)
            unread = self._unread[request.request_id] = []
        try:
            while unread or request.request_id in self._output_processors:
                if not unread:
                    self._step_for(request.request_id)
                    continue
                if isinstance(first := unread.pop(0), TokenmillError):
                    raise first
                yield first
        finally:
            with self._lock:
                del self._unread[request.request_id]
                self._abort(request.request_id)

    def _step_for(self, request_id: str) -> None:
        """Run one step, unless another thread's step brought this stream something while this one waited."""
        with self._lock:
            if not self._unread[request_id] and request_id in self._output_processors:
                for output in self._core.step():
                    self._arrived(output, mine=())

    def _processed(self, asked: ClientRequest) -> Request:
        request = self._input_processor.process(asked)
        self._core.prepare(request)
        return request

    def _submit(self, asked: ClientRequest) -> Request:
        request = self._processed(asked)
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
        events = output_processor.process(output)
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


# ── progress bar ─────────────────────────────────────────────────────────────────────────────────────────


class Report(Protocol):
    def __call__(self, *, done: int, new_tokens: int) -> None: ...


@contextmanager
def progress_over(total: int, *, enabled: bool, patience_s: float = 1.0) -> Iterator[Report | None]:
    """A progress bar for work that takes over a second; none when it does not, or without a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    bar = LateBar(total, patience_s)
    try:
        yield bar.report
    finally:
        bar.close()


class LateBar:
    """A bar that appears only once the work has taken `patience_s`."""

    def __init__(self, total: int, patience_s: float) -> None:
        self._total = total
        self._started = time.monotonic()
        self._patience_s = patience_s
        self._num_tokens = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def report(self, *, done: int, new_tokens: int) -> None:
        self._num_tokens += new_tokens
        elapsed = time.monotonic() - self._started
        if elapsed < self._patience_s:
            return
        if self._bar is None:
            self._bar, self._task = shown_bar(self._total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, speed=f"{self._num_tokens / elapsed:,.0f} tokens/s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def shown_bar(total: int) -> tuple[Progress, TaskID]:
    # most runs end before a bar is worth the import
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task("answers", total=total, speed="")
    bar.start()
    return bar, task
