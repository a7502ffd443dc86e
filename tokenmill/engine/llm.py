"""The offline front: prompts in, answers out, in input order or as they finish, with a progress bar.

It uses the same core as serving, in this process; the thread that waits for answers runs the steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack

from tokenmill.config import EngineConfig
from tokenmill.config.adapters import require_adapter_name
from tokenmill.config.by_name import engine_config, settings_signature
from tokenmill.config.setting_types import EngineSettings
from tokenmill.engine.argument_checks import (
    Conversation,
    ParamsGiven,
    Prompt,
    RequestRows,
    chat_request_maker,
    conversations_in,
    no_attribute,
    one_of_two,
    params_from,
    prompt_from,
    prompt_request,
    prompts_in,
    template_args_from,
    with_adapter,
)
from tokenmill.engine.core import EngineCore
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.input_processor import ClientRequest
from tokenmill.engine.offline import (
    INTERRUPTED,
    Arrived,
    Interrupted,
    OfflineRow,
    OfflineRun,
    interrupt_noted,
    progress_over,
)
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.results import EmbeddingOutput, RequestOutput
from tokenmill.engine.startup.garbage_collection import gc_paused, relaxed_gc
from tokenmill.engine.startup.torch_import import import_meta_kernels, preload_libraries, torch_import
from tokenmill.engine.status import LoadedAdapter
from tokenmill.errors import InvalidRequest, TokenmillError, UnknownModel, error_with_code
from tokenmill.observe.log import get_log
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import Tokenizer
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

log = get_log("engine")
Receive = Callable[[SequenceOutput, Sequence[Arrived], bool], None]  # (output, its events, whether the request ended)


class OpenRequest(NamedTuple):
    """A running request: what makes its events, and the callback that gets them."""

    output_processor: OutputProcessor
    receive: Receive


class LoraRequest(Protocol):
    """The attributes of vLLM's LoRARequest that are read."""

    @property
    def lora_name(self) -> str: ...

    @property
    def lora_path(self) -> str: ...


Adapters = str | Sequence[str | None] | None  # one adapter name for all rows, or one (or None) for each row


def without_step_limit(config: EngineConfig) -> EngineConfig:
    """Return the config without a limit on the step time, unless one is set: that limit protects streams, and an
    offline program waits for whole answers."""
    if config.scheduler.step_ms is not None or config.scheduler.slo is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, step_ms=0.0))


class LLM:
    """A model in this process that answers many prompts at a time.

        llm = LLM("smollm2:135m", max_context=2048)
        answers = llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(temperature=0, max_tokens=16))
        print(answers[0].outputs[0].text)

    The model is a short name, the path of a GGUF file or model directory, or a Hugging Face id; it is
    downloaded if necessary. Threads may share an `LLM`: their calls run one after the other, their streams
    alternate step by step.
    """

    __signature__ = settings_signature()

    def __init__(self, model: str | Path | EngineConfig = "smollm2:135m", **settings: Unpack[EngineSettings]) -> None:
        """Load a model. The settings are the flags of `tokenmill run --help`: `max_context=2048`, `threads=2` ..."""
        self.config = without_step_limit(engine_config(model, settings))
        fast_start = bool(self.config.ops.fast_start)  # off by default: the process belongs to the calling program
        with preload_libraries(fast_start=fast_start):
            self._frontend: ModelFrontend = load_frontend(self.config)
        with gc_paused(fast_start=fast_start):
            self._core = self._load_core(fast_start=fast_start)
        self._input_processor = self._frontend.input_processor(self._core.info.max_context)
        self._note_adapters()
        self._lock = threading.RLock()  # held by the thread that steps the core
        self._open: dict[str, OpenRequest] = {}  # by request id

    def _load_core(self, *, fast_start: bool) -> EngineCore:
        with torch_import(fast_start=fast_start, device=self.config.ops.device):
            from tokenmill.engine.build import build_core  # imports torch, which takes most of the start
        try:
            return build_core(
                self._frontend.config,
                self._frontend.model_path,
                fast_start=fast_start,
                while_compiling=import_meta_kernels,
            )
        finally:
            import_meta_kernels()  # which a fast import skips

    if not TYPE_CHECKING:  # a type checker knows all attributes

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(name)

    @property
    def core(self) -> EngineCore:
        """The engine core; `core.info` has the resolved settings and the reasons for them."""
        return self._core

    @property
    def frontend(self) -> ModelFrontend:
        """The front's part of the model: tokenizer, chat template, name."""
        return self._frontend

    # ── whole answers ──────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: ParamsGiven = None,
        *,
        adapter: Adapters = None,
        lora_request: LoraRequest | None = None,
        progress: bool = True,
        sampling_params: ParamsGiven = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, a string or a list of token ids; the answers are in the order of the prompts.

        `params` apply to all prompts, or are one for each; so is `adapter`, the name of a loaded adapter. vLLM's names
        work too: `lora_request`, an object with `lora_name` and `lora_path` (loaded if necessary), `sampling_params`
        for `params` and `use_tqdm` for `progress`.

        An invalid prompt raises if it is the only one; among several, its answer has an `error` with the reason and a
        `number` with the prompt's index, as for a request that fails. Ctrl-C raises `Interrupted`, a KeyboardInterrupt
        with the finished answers in its `outputs`.
        """
        params = one_of_two(params, sampling_params)
        shows_progress = progress if use_tqdm is None else use_tqdm
        make_request = with_adapter(prompt_request, self._adapter_of(adapter, lora_request))
        return self._answer(
            RequestRows(prompts_in(prompts), self._or_defaults(params), make_request), progress=shows_progress
        )

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: ParamsGiven = None,
        *,
        tools: Sequence[Tool | dict[str, Any]] | None = None,
        tool_choice: ToolChoice | str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        adapter: Adapters = None,
        lora_request: LoraRequest | None = None,
        progress: bool = True,
        sampling_params: ParamsGiven = None,
        use_tqdm: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; a message is a dict with `role` and `content`.

        `tools` are functions that the model may call, in OpenAI's format; an answer has its calls in `tool_calls` and
        the model's reasoning in `reasoning`. `template_args` are variables of the model's chat template, such as
        `enable_thinking=False`; vLLM's `chat_template_kwargs` are the same. Adapters, invalid conversations, Ctrl-C and
        vLLM's other names work as in `generate`.
        """
        params = one_of_two(params, sampling_params)
        shows_progress = progress if use_tqdm is None else use_tqdm
        template_args = self._template_args({**(chat_template_kwargs or {}), **template_args})
        make_request = chat_request_maker(tools, tool_choice, parallel_tool_calls, reasoning_effort, template_args)
        make_request = with_adapter(make_request, self._adapter_of(adapter, lora_request))
        return self._answer(
            RequestRows(conversations_in(messages), self._or_defaults(params), make_request), progress=shows_progress
        )

    def embed(
        self, prompts: Prompt | Iterable[Prompt], *, pooling: Pooling | None = None, adapter: Adapters = None
    ) -> list[EmbeddingOutput]:
        """Return a unit vector for each prompt: by default the mean over its tokens; see `pooling`."""
        unchecked: Any = pooling
        if unchecked is not None and not isinstance(unchecked, Pooling):
            problem = f"pooling must be a Pooling, got {unchecked!r}"
            raise InvalidRequest(problem, param="pooling", hint='Pooling("last")')

        def make_request(prompt: Any, params: SamplingParams) -> EmbedRequest:
            return EmbedRequest(prompt=prompt_from(prompt), pooling=pooling)

        run = OfflineRun(
            RequestRows(prompts_in(prompts), None, with_adapter(make_request, adapter)), self._core.info.max_running
        )
        with self._lock, relaxed_gc(), closing(self._rows(run)) as rows:
            vectors = {row.number: row.embedding() for row in rows}
        return [vectors[number] for number in sorted(vectors)]

    # ── streaming ──────────────────────────────────────────────────────────────────────────────────────

    def generate_iter(
        self,
        prompts: Iterable[Prompt],
        params: ParamsGiven = None,
        *,
        adapter: Adapters = None,
        progress: bool = True,
    ) -> Iterator[RequestOutput]:
        """Continue each prompt of an iterable of any length, and yield each answer once it is finished.

        A bounded number of prompts is read ahead, so memory use does not grow. Answers are in the order in which they
        finish; `number` is the index of an answer's prompt, from 0. An invalid prompt, and a request that fails, yields
        an answer with an `error`. Leaving the iterator, or Ctrl-C, aborts the running requests.
        """
        make_request = with_adapter(prompt_request, adapter)
        return self._answer_iter(
            RequestRows(prompts_in(prompts), self._or_defaults(params), make_request), progress=progress
        )

    def chat_iter(
        self,
        conversations: Iterable[Conversation],
        params: ParamsGiven = None,
        *,
        tools: Sequence[Tool | dict[str, Any]] | None = None,
        tool_choice: ToolChoice | str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        adapter: Adapters = None,
        progress: bool = True,
        **template_args: Any,
    ) -> Iterator[RequestOutput]:
        """Answer each conversation of an iterable of any length; otherwise like `generate_iter` and `chat`."""
        make_request = chat_request_maker(
            tools, tool_choice, parallel_tool_calls, reasoning_effort, self._template_args(template_args)
        )
        make_request = with_adapter(make_request, adapter)
        return self._answer_iter(
            RequestRows(conversations_in(conversations), self._or_defaults(params), make_request), progress=progress
        )

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Event]:
        """Continue one prompt and yield the text as it is generated. Leaving the iterator early aborts the request."""
        return self._stream(with_adapter(prompt_request, adapter)(prompt, params_from(self._or_defaults(params))))

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool | dict[str, Any]] | None = None,
        tool_choice: ToolChoice | str | dict[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        adapter: str | None = None,
        **template_args: Any,
    ) -> Iterator[Event]:
        """Answer one conversation and yield the text as it is generated; reasoning and calls are in `parts`."""
        make_request = chat_request_maker(
            tools, tool_choice, parallel_tool_calls, reasoning_effort, self._template_args(template_args)
        )
        return self._stream(with_adapter(make_request, adapter)(messages, params_from(self._or_defaults(params))))

    # ── adapters ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The loaded adapters."""
        return self._core.adapters.loaded

    def load_adapter(self, name: str, path: str | Path) -> LoadedAdapter:
        """Load an adapter; for later requests it replaces one of the same name."""
        require_adapter_name(name)
        with self._lock:
            loaded = self._core.adapters.load(name, Path(path).expanduser())
            self._note_adapters()
        return loaded

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter's name; running requests keep using the adapter."""
        with self._lock:
            if all(one.name != name for one in self.adapters):
                raise UnknownModel(f"the adapter {name!r} is not loaded", param="adapter")
            self._core.adapters.unload(name)
            self._note_adapters()

    def _note_adapters(self) -> None:
        self._input_processor.adapters = {one.name: one.digest for one in self.adapters}

    def _adapter_of(self, adapter: Adapters, request: LoraRequest | None) -> Adapters:
        if request is None:
            return adapter
        if adapter is not None:
            raise InvalidRequest(
                "adapter and lora_request are the same setting: give one of them", param="lora_request"
            )
        name, path = request.lora_name, Path(request.lora_path).expanduser()
        if all((one.name, one.path) != (name, str(path)) for one in self.adapters):
            self.load_adapter(name, path)
        return name

    def close(self) -> None:
        """Abort all running requests. The model's memory is freed with this object."""
        with self._lock:
            for request_id in list(self._open):
                self._abort(request_id)
            self._core.close()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the params used by calls without any: the model's own (see the setting `sampling_defaults`)."""
        return SamplingParams(**self._frontend.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode` and `decode`."""
        return self._input_processor.tokenizer

    # ── implementation ─────────────────────────────────────────────────────────────────────────────────

    def _or_defaults(self, params: ParamsGiven) -> ParamsGiven:
        return self.get_default_sampling_params() if params is None else params

    def _template_args(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Check the keywords of `chat` that are variables of the chat template; refuse one that it never reads."""
        known = self._input_processor.template_variables
        for name in template_args_from(keywords):
            if name not in known:
                hint = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
                raise InvalidRequest(f"the chat template of this model has no variable {name!r}", param=name, hint=hint)
        return keywords

    def _answer(self, rows: RequestRows, *, progress: bool) -> list[RequestOutput]:
        """Return all answers in order. If the only request is refused, raise its error."""
        outputs: dict[int, RequestOutput] = {}
        raises = rows.total == 1
        with self._lock, relaxed_gc(), progress_over(rows.total, enabled=progress) as report:
            run = OfflineRun(rows, self._core.info.max_running, report)
            try:
                with closing(self._rows(run, prepares=raises)) as finished:
                    for row in finished:
                        if raises and row.error is not None and row.request is None:
                            raise row.error
                        outputs[row.number] = row.output()
            except KeyboardInterrupt:
                outputs |= {row.number: row.output(INTERRUPTED) for row in run.under_way.values()}
                raise Interrupted(in_order(outputs)) from None
        warn_about_failures(outputs)
        return in_order(outputs)

    def _answer_iter(self, rows: RequestRows, *, progress: bool) -> Iterator[RequestOutput]:
        with (
            progress_over(rows.total, enabled=progress) as report,
            closing(self._rows(OfflineRun(rows, self._core.info.max_running, report))) as finished,
        ):
            for row in finished:
                yield row.output()

    def _rows(self, run: OfflineRun, *, prepares: bool = False) -> Generator[OfflineRow, None, None]:
        """Step the core until all rows have ended; abort the rest if the iterator is left or raises.

        `prepares`: compile grammars before requests are added, so that a request with an invalid one is refused.
        """
        try:
            while not run.is_over:
                rows = run.read()  # may run the caller's code, so without the lock
                with self._lock, interrupt_noted() as interrupt:
                    for row in rows:
                        self._begin(run, row, prepares)
                    if run.under_way:
                        self._step()
                yield from run.pop_ended()
                interrupt.raise_if_pressed()
        finally:
            with self._lock:
                for request_id in run.under_way:
                    self._abort(request_id)

    def _begin(self, run: OfflineRun, row: OfflineRow, prepares: bool) -> None:
        assert row.client_request is not None
        try:
            request = (
                self._processed(row.client_request) if prepares else self._input_processor.process(row.client_request)
            )
        except TokenmillError as error:
            row.error = error
            run.end(row)
        else:
            run.begin(row, request)
            self._add(row.client_request, request, run.receive)

    def _step(self) -> None:
        """Run one step and pass the events of each open request to its receiver."""
        for output in self._core.step():
            if (request := self._open.get(output.request_id)) is not None:
                events = self._events_of(output, request.output_processor)
                request.receive(output, events, output.request_id not in self._open)

    def _events_of(self, output: SequenceOutput, output_processor: OutputProcessor) -> Sequence[Arrived]:
        """Return the events that an output completes; the request is closed with its last output."""
        if output.finish_reason == "error":
            del self._open[output.request_id]
            return [error_with_code(output.error_code, output.error or "the request failed", output.error_param)]
        events = output_processor.process(output)
        for index in output_processor.pop_stopped():
            self._core.abort(output.request_id, index)
        if output_processor.is_finished:
            del self._open[output.request_id]
        return events

    def _stream(self, client_request: ChatRequest | PromptRequest) -> Iterator[Event]:
        unread: deque[Arrived] = deque()
        with self._lock:
            request = self._submit(client_request, lambda output, arrived, is_over: unread.extend(arrived))
        try:
            while unread or request.request_id in self._open:
                if not unread:
                    self._step_for(request.request_id, unread)
                    continue
                if isinstance(first := unread.popleft(), TokenmillError):
                    raise first
                yield first
        finally:
            with self._lock:
                self._abort(request.request_id)

    def _step_for(self, request_id: str, unread: deque[Arrived]) -> None:
        """Run one step, unless another thread's step produced events for this stream while this thread waited."""
        with self._lock:
            if not unread and request_id in self._open:
                self._step()

    def _processed(self, client_request: ClientRequest) -> Request:
        request = self._input_processor.process(client_request)
        if request.params.guided is not None:
            self._core.prepare(request)
        return request

    def _submit(self, client_request: ClientRequest, receive: Receive) -> Request:
        request = self._processed(client_request)
        self._add(client_request, request, receive)
        return request

    def _add(self, client_request: ClientRequest, request: Request, receive: Receive) -> None:
        self._open[request.request_id] = OpenRequest(self._frontend.output_processor(client_request, request), receive)
        self._core.add(request)

    def _abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None:
            self._core.abort(request_id)


def in_order(outputs: dict[int, RequestOutput]) -> list[RequestOutput]:
    return [outputs[number] for number in sorted(outputs)]


def warn_about_failures(outputs: dict[int, RequestOutput]) -> None:
    failed = [output for output in in_order(outputs) if output.error is not None]
    if failed:
        first = failed[0]
        log.warning(
            "%d of %d rows failed; the first is row %d: %s", len(failed), len(outputs), first.number, first.error
        )
