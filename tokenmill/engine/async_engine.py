"""The serving front: submit a request, get an async iterator of events.

The core lives behind a `CoreClient`. If it dies, the running requests hear of it at once, and a new core is started;
until that one is ready, `submit` refuses. Leaving an iterator early (a client went away) aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.config.by_name import engine_config
from tokenmill.engine.core_client import CoreClient, ThreadCoreClient
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.input_processor import ClientRequest, InputProcessor
from tokenmill.engine.messages import Abort, Failed, FromCore, Outputs, Ready, Submit
from tokenmill.engine.process_core_client import ProcessCoreClient
from tokenmill.engine.status import CoreInfo, EngineStats, Health, ModelInfo
from tokenmill.engine.stream import EventBuffer, EventStream
from tokenmill.errors import Draining, EngineDead, InvalidRequest, Overloaded, RequestFailed, TokenmillError
from tokenmill.types import ChatRequest, SequenceOutput

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
FIRST_RESTART_DELAY_S = 0.2


class AsyncEngine:
    """A model for asyncio programs, in a process of its own: `submit` a request, iterate over its events.

    engine = await AsyncEngine.start("smollm2:135m", max_context=2048)
    asked = PromptRequest(prompt="The sky is", params=SamplingParams(max_tokens=16))
    async for event in engine.submit(asked):
        print(event.text, end="")
    await engine.close()
    """

    def __init__(self, frontend: ModelFrontend, make_link: Callable[[], CoreClient]) -> None:
        self._frontend = frontend
        self._make_link = make_link
        self._link: CoreClient | None = None
        self._core: CoreInfo | None = None
        self._input_processor: InputProcessor | None = None
        self._info: ModelInfo | None = None
        self._running: dict[str, EventBuffer] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = EngineStats()
        self._health = Health("loading")
        self._first_ready: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._deaths: list[float] = []
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(
        cls,
        model: str | Path | EngineConfig = "smollm2:135m",
        *,
        in_process: bool = False,
        child: CoreProcess | None = None,
        **settings: Any,
    ) -> AsyncEngine:
        """Load the model and return once it answers; model and settings are those of `LLM`.

        `in_process` keeps the core in a thread of this process. `child` is a core's process that was started
        beforehand; it imports while the front reads the tokenizer.
        """
        config = engine_config(model, settings)
        waiting = [] if in_process else [child or CoreProcess()]
        with contextlib.ExitStack() as undo:
            for one in waiting:
                undo.callback(one.discard)
            frontend = await asyncio.to_thread(load_frontend, config)
            undo.pop_all()

        def make_link() -> CoreClient:
            return open_core_client(frontend, in_process=in_process, child=waiting.pop() if waiting else None)

        engine = cls(frontend, make_link)
        await engine.open()
        return engine

    async def open(self) -> None:
        """Connect to a core and wait until it answers; `start` does."""
        self._loop = asyncio.get_running_loop()
        self._first_ready = self._loop.create_future()
        await self._connect()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._first_ready
            undo.pop_all()

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, asked: ClientRequest) -> EventStream:
        """Everything wrong with the request is raised here, before the first event."""
        input_processor = self._accepting_input_processor()
        request = input_processor.take(asked)
        if request.params.logits_processors:
            raise InvalidRequest(
                "logits_processors are functions of your own process, and the engine runs in another",
                param="logits_processors",
                hint="use tokenmill.LLM",
            )
        if request.request_id in self._running:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        arrivals = EventBuffer(self._frontend.output_processor(asked, request))
        assert self._link is not None and self._loop is not None
        self._link.send(Submit(request))
        self._running[request.request_id] = arrivals
        self._idle.clear()
        return EventStream(arrivals, self._leave, self._loop)

    async def abort(self, request_id: str) -> None:
        """End a request; whoever iterates over it gets a `RequestFailed`."""
        arrivals = self._running.get(request_id)
        if arrivals is not None:
            self._forget(arrivals, tell_core=True)
            arrivals.fail(RequestFailed("the request was aborted"))

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self._loaded_input_processor().tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        """The token ids of a conversation in the model's chat template."""
        return self._loaded_input_processor().chat_ids(request)

    def detokenize(self, ids: list[int]) -> str:
        """The text of token ids, special ones included."""
        return self._loaded_input_processor().tokenizer.decode(ids, skip_special_tokens=False)

    def token_texts(self, ids: list[int]) -> list[str]:
        """What each of them spells on its own, with its space."""
        tokenizer = self._loaded_input_processor().tokenizer
        return [tokenizer.token_text(token_id) for token_id in ids]

    # ── being ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            self._info = self._frontend.info(self._loaded_input_processor().max_context)
        return self._info

    @property
    def core(self) -> CoreInfo:
        assert self._core is not None, "the engine is not loaded"
        return self._core

    def health(self) -> Health:
        """Whether a request would be answered now."""
        return self._health

    def stats(self) -> EngineStats:
        """Running and waiting requests, the KV cache, sums since the start."""
        return self._stats

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running at the end."""
        self._health = Health("draining", "finishing running requests")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._running

    async def close(self) -> None:
        """End the core; running requests fail."""
        self._is_closed = True
        if self._restart is not None:
            self._restart.cancel()
        self._health = Health("dead", "closed")
        self._fail_all(EngineDead("the engine was closed"))
        if self._link is not None:
            await self._link.close()
            self._link = None

    # ── hearing from the core ──────────────────────────────────────────────────────────────────────────

    def _receive(self, message: FromCore) -> None:
        match message:
            case Outputs(outputs, stats):
                self._stats = stats
                for output in outputs:
                    self._deliver(output)
            case Ready(info):
                self._become_ready(info)
            case Failed():
                self._core_died(message)

    def _deliver(self, output: SequenceOutput) -> None:
        arrivals = self._running.get(output.request_id)
        if arrivals is None:  # aborted meanwhile
            return
        if (error := arrivals.take_in(output)) is not None:
            self._forget(arrivals, tell_core=output.finish_reason is None)
            arrivals.fail(error)
            return
        for index in arrivals.output_processor.pop_stopped():
            assert self._link is not None
            self._link.send(Abort(output.request_id, index))
        if arrivals.output_processor.is_finished:
            self._forget(arrivals, tell_core=False)
            arrivals.end()

    def _become_ready(self, info: CoreInfo) -> None:
        self._core = info
        self._input_processor = self._frontend.input_processor(info.max_context)
        if self._health.state == "loading":
            self._health = Health("ready")
        assert self._first_ready is not None
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    def _core_died(self, failure: Failed) -> None:
        if self._is_closed or self._health.state == "dead":
            return
        error = EngineDead(failure.message, hint=failure.hint)
        self._fail_all(error)
        assert self._first_ready is not None
        if not self._first_ready.done():  # it never came up: that is the starter's to hear
            error.exit_code = failure.exit_code
            self._first_ready.set_exception(error)
            self._health = Health("dead", failure.message)
        elif self._health.state != "draining":
            self._health = Health("dead", failure.message)
            self._restart = asyncio.create_task(self._restart_core(failure.message))

    async def _restart_core(self, why: str) -> None:
        now = time.monotonic()
        self._deaths = [died for died in self._deaths if now - died < RESTART_WINDOW_S] + [now]
        if len(self._deaths) > MAX_RESTARTS:
            self._health = Health("dead", f"the engine died {len(self._deaths)} times in {RESTART_WINDOW_S:.0f} s")
            log.error(
                "%s; %s: it is not started again. Stop this server, mend what ended it, start anew",
                why,
                self._health.detail,
            )
            return
        log.error("%s; starting it again", why)
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        await asyncio.sleep(FIRST_RESTART_DELAY_S * 2 ** (len(self._deaths) - 1))
        self._health = Health("loading", "starting again after a failure")
        try:
            await self._connect()
        except OSError as problem:  # no memory or no disk for a process: perhaps the next time
            self._core_died(Failed(f"the engine could not be started again: {problem.strerror or problem}"))

    async def _connect(self) -> None:
        self._link = self._make_link()
        await self._link.start(self._receive)

    # ── one request ────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, arrivals: EventBuffer) -> None:
        if self._running.get(arrivals.output_processor.request_id) is arrivals:
            self._forget(arrivals, tell_core=True)

    def _forget(self, arrivals: EventBuffer, *, tell_core: bool) -> None:
        self._running.pop(arrivals.output_processor.request_id, None)
        if tell_core and self._link is not None:
            self._link.send(Abort(arrivals.output_processor.request_id))
        if not self._running:
            self._idle.set()

    def _fail_all(self, error: TokenmillError) -> None:
        for arrivals in list(self._running.values()):
            self._forget(arrivals, tell_core=False)
            arrivals.fail(error)

    def _loaded_input_processor(self) -> InputProcessor:
        if self._input_processor is None:
            raise EngineDead("the model is still loading")
        return self._input_processor

    def _accepting_input_processor(self) -> InputProcessor:
        if self._health.state == "draining":
            raise Draining("the server is shutting down", retry_after_s=5)
        if self._health.state != "ready":
            raise EngineDead(f"the engine is not ready: {self._health.detail or self._health.state}")
        most_running = self._core.max_running if self._core else 0
        if len(self._running) >= self._frontend.config.scheduler.max_waiting + most_running:
            raise Overloaded("too many requests are waiting", retry_after_s=1)
        return self._loaded_input_processor()


def open_core_client(frontend: ModelFrontend, *, in_process: bool, child: CoreProcess | None = None) -> CoreClient:
    if not in_process:
        return ProcessCoreClient(frontend.config, frontend.model_path, child)
    from tokenmill.engine.build import build_core  # torch, only where the core lives in this process

    return ThreadCoreClient(lambda: build_core(frontend.config, frontend.model_path))
