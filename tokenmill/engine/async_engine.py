"""The serving front of a model: submit a request, get an async iterator of events.

    AsyncEngine      requests: checks and tokenises them, hands them to the core, turns outputs into events
    CoreSupervisor   the core behind a `CoreClient`: starts it, knows its health, restarts it after a death

A core that gives no sign of life for some seconds is stalled: `submit` refuses, running requests wait, and go on if it
comes back; after 40 seconds it is killed. If the core dies, running requests fail at once and a new core is started;
until it is ready, `submit` refuses. Leaving an iterator early (a client disconnected) aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.config.adapters import require_adapter_name
from tokenmill.config.by_name import engine_config
from tokenmill.engine.core_client import CoreClient, ProcessCoreClient, ThreadCoreClient, own_core_process
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.frontend import ModelFrontend, load_frontend
from tokenmill.engine.input_processor import ClientRequest, InputProcessor, PreparedRequest
from tokenmill.engine.messages import (
    Abort,
    AdapterRead,
    Failed,
    FromCore,
    LoadAdapter,
    Outputs,
    Ready,
    Submit,
    ToCore,
    UnloadAdapter,
)
from tokenmill.engine.model_text import ModelText
from tokenmill.engine.status import CoreInfo, EngineStats, Health, LoadedAdapter, ModelInfo, require_ready
from tokenmill.engine.stream import EventBuffer, EventStream
from tokenmill.engine.text_workers import TextWorkers, text_size
from tokenmill.engine.tool_use import describe_speech
from tokenmill.errors import (
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestAborted,
    TokenmillError,
    UnknownModel,
    error_with_code,
)
from tokenmill.types import ChatRequest, SequenceOutput

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
FIRST_RESTART_DELAY_S = 0.2

STALLED_S = 8.0  # without a sign of life
GIVEN_UP_S = 40.0
LIFE_CHECK_S = 1.0

MakeClient = Callable[[], CoreClient]


class AsyncEngine:
    """A model for asyncio programs, in a process of its own: `submit` a request, iterate over its events.

    engine = await AsyncEngine.start("smollm2:135m", max_context=2048)
    asked = PromptRequest(prompt="The sky is", params=SamplingParams(max_tokens=16))
    async for event in engine.submit(asked):
        print(event.text, end="")
    await engine.close()
    """

    def __init__(self, frontend: ModelFrontend, make_client: MakeClient) -> None:
        self._frontend = frontend
        self._core = CoreSupervisor(make_client, self._core_is_ready, self._receive, self._fail_all)
        self._input_processor: InputProcessor | None = None
        self._info: ModelInfo | None = None
        self._workers = TextWorkers()
        self._num_preparing = 0
        self._running: dict[str, EventBuffer] = {}
        self._adapters: dict[str, LoadedAdapter] = {}
        self._has_started = False
        self._loading: dict[str, tuple[Path, asyncio.Future[LoadedAdapter]]] = {}  # adapters, by name
        self._stats = EngineStats()
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(
        cls,
        model: str | Path | EngineConfig = "smollm2:135m",
        *,
        in_process: bool = False,
        child: CoreProcess | None = None,
        frontend: ModelFrontend | None = None,
        **settings: Any,
    ) -> AsyncEngine:
        """Load the model and return once it answers; model and settings are those of `LLM`.

        `in_process` keeps the core in a thread of this process. `child` is a core's process that was started
        beforehand; it imports its libraries while the front reads the tokenizer. `frontend`: what an earlier engine
        read of the same model.
        """
        config = engine_config(model, settings)
        unused = [] if in_process else [child or own_core_process(config)]
        with contextlib.ExitStack() as undo:
            for one in unused:
                undo.callback(one.kill)
            read = await asyncio.to_thread(load_frontend, config) if frontend is None else frontend
            undo.pop_all()

        def make_client() -> CoreClient:
            return open_core_client(read, in_process=in_process, child=unused.pop() if unused else None)

        engine = cls(read, make_client)
        await engine.open()
        return engine

    async def open(self) -> None:
        """Connect to a core and wait until it answers; `start` does this."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._core.open()
            undo.pop_all()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, asked: ClientRequest) -> PreparedRequest:
        """Check and tokenise a request, in a thread if it is long, so that the event loop goes on meanwhile."""
        self._require_room()
        input_processor = self._loaded_input_processor()
        self._num_preparing += 1
        try:
            request = await self._workers.run(text_size(asked), lambda: input_processor.process(asked))
            return PreparedRequest(asked, request)
        finally:
            self._num_preparing -= 1

    def submit(self, asked: ClientRequest | PreparedRequest) -> EventStream:
        """Hand a request to the core. Everything wrong with it is raised here, before the first event.

        A request that was not prepared is tokenised now, however long it is.
        """
        self._require_room()
        if not isinstance(asked, PreparedRequest):
            asked = PreparedRequest(asked, self._loaded_input_processor().process(asked))
        request = asked.request
        if request.params.logits_processors:
            raise InvalidRequest(
                "logits_processors are functions of your own process, and the engine runs in another",
                param="logits_processors",
                hint="use tokenmill.LLM",
            )
        if request.request_id in self._running:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        buffer = EventBuffer(self._frontend.output_processor(asked.asked, request))
        self._core.send(Submit(request))
        self._running[request.request_id] = buffer
        self._idle.clear()
        return EventStream(buffer, self._leave, asyncio.get_running_loop())

    async def abort(self, request_id: str) -> None:
        """End a request; a reader of its events gets a `RequestAborted`."""
        buffer = self._running.get(request_id)
        if buffer is not None:
            self._forget(buffer, tell_core=True)
            buffer.fail(RequestAborted("the request was aborted"))

    def num_generated(self, request_id: str) -> int:
        """How many tokens a running request has so far, all of its choices together."""
        buffer = self._running.get(request_id)
        return buffer.output_processor.num_completion_tokens if buffer is not None else 0

    def _require_room(self) -> None:
        """Refuse a request while the engine is not ready or full: as many as may run and wait are in it already."""
        require_ready(self.health())
        num_requests = len(self._running) + self._num_preparing
        if num_requests >= self._frontend.config.scheduler.max_waiting + self.core.max_running:
            raise Overloaded("too many requests are waiting", retry_after_s=1)

    def _leave(self, buffer: EventBuffer) -> None:
        if self._running.get(buffer.output_processor.request_id) is buffer:
            self._forget(buffer, tell_core=True)

    def _forget(self, buffer: EventBuffer, *, tell_core: bool) -> None:
        self._running.pop(buffer.output_processor.request_id, None)
        if tell_core:
            self._core.send(Abort(buffer.output_processor.request_id))
        if not self._running:
            self._idle.set()

    def _fail_all(self, error: TokenmillError) -> None:
        for name in list(self._loading):
            self._settle_loading(name, error)
        for buffer in list(self._running.values()):
            self._forget(buffer, tell_core=False)
            buffer.fail(error)

    # ── adapters ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The adapters that requests may name."""
        return list(self._adapters.values())

    async def load_adapter(self, name: str, path: Path) -> LoadedAdapter:
        """Load an adapter; one of the same name is replaced for requests that come from then on."""
        require_ready(self.health())
        require_adapter_name(name)
        if name in self._loading:
            asked, loading = self._loading[name]
            if asked != path:
                raise InvalidRequest(f"another adapter {name!r} is being loaded", param="lora_name")
            return await asyncio.shield(loading)
        loading = asyncio.get_running_loop().create_future()
        self._loading[name] = path, loading
        self._core.send(LoadAdapter(name, str(path)))
        return await asyncio.shield(loading)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name; requests that run with it go on."""
        if name not in self._adapters:
            raise UnknownModel(f"the adapter {name[:200]!r} is not loaded", param="lora_name")
        self._set_adapters([one for one in self.adapters if one.name != name])
        self._core.send(UnloadAdapter(name))

    def _adapter_read(self, message: AdapterRead) -> None:
        if (loaded := message.loaded) is not None:
            self._set_adapters([*(one for one in self.adapters if one.name != loaded.name), loaded])
            self._settle_loading(loaded.name, loaded)
        elif (failed := message.failed) is not None:
            self._settle_loading(failed.name, error_with_code(failed.code, failed.message))

    def _settle_loading(self, name: str, result: LoadedAdapter | TokenmillError) -> None:
        _, loading = self._loading.pop(name, (None, None))
        if loading is None or loading.done():
            return
        if isinstance(result, LoadedAdapter):
            loading.set_result(result)
        else:
            loading.set_exception(result)

    def _set_adapters(self, adapters: list[LoadedAdapter]) -> None:
        self._adapters = {one.name: one for one in adapters}
        self._info = None  # names them
        if self._input_processor is not None:
            self._input_processor.adapters = {one.name: one.digest for one in adapters}

    # ── outputs of the core ────────────────────────────────────────────────────────────────────────────

    def _receive(self, message: Outputs | AdapterRead) -> None:
        if isinstance(message, AdapterRead):
            self._adapter_read(message)
            return
        self._stats = message.stats
        for output in message.outputs:
            self._deliver(output)

    def _deliver(self, output: SequenceOutput) -> None:
        buffer = self._running.get(output.request_id)
        if buffer is None:  # aborted meanwhile
            return
        if (error := buffer.process(output)) is not None:
            self._forget(buffer, tell_core=output.finish_reason is None)
            buffer.fail(error)
            return
        for index in buffer.output_processor.pop_stopped():
            self._core.send(Abort(output.request_id, index))
        if buffer.output_processor.is_finished:
            self._forget(buffer, tell_core=False)
            buffer.end()

    # ── text ───────────────────────────────────────────────────────────────────────────────────────────

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of a text; `parse_special`: control tokens in it are those tokens, not their characters."""
        return self._text().tokenize(text, add_special_tokens, parse_special)

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        """The token ids of a conversation in the model's chat template."""
        return self._text().tokenize_chat(request)

    def detokenize(self, ids: list[int]) -> str:
        """The text of token ids, special ones included."""
        return self._text().detokenize(ids)

    def chat_text(self, request: ChatRequest) -> str:
        """A conversation in the model's chat template."""
        return self._text().chat_text(request)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        """The bytes of each token on its own, with its leading space."""
        return self._text().token_bytes(ids)

    def _text(self) -> ModelText:
        return ModelText(self._loaded_input_processor())

    def _loaded_input_processor(self) -> InputProcessor:
        if self._input_processor is None:
            raise EngineDead("the model is still loading")
        return self._input_processor

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def info(self) -> ModelInfo:
        """Name and limits of the model."""
        if self._info is None:
            info = self._frontend.info(self._loaded_input_processor().max_context)
            self._info = replace(
                info,
                device=self.core.device,
                kv_block_size=self.core.block_size,
                max_running=self.core.max_running,
                adapters=tuple(self._adapters),
                num_adapter_slots=self.core.num_adapter_slots,
            )
        return self._info

    @property
    def frontend(self) -> ModelFrontend:
        """The model without its core, for the next engine of it."""
        return self._frontend

    @property
    def core(self) -> CoreInfo:
        """What the core settled while loading, and why."""
        assert self._core.info is not None, "the engine is not loaded"
        return self._core.info

    @property
    def reasons(self) -> list[str]:
        """What was chosen for this model, and why: for the log."""
        return [*self.core.reasons, describe_speech(self._frontend.speech)]

    def health(self) -> Health:
        """The state of the engine: ready if it takes requests."""
        return self._core.health

    def stats(self) -> EngineStats:
        """Running and waiting requests, the KV cache, sums since the start."""
        return msgspec.structs.replace(self._stats, restarts=self._core.num_restarts)

    def is_idle(self) -> bool:
        """Return whether no request is here, not even one that is being tokenised."""
        return not self._running and not self._num_preparing

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running at the end."""
        self._core.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._running

    async def close(self) -> None:
        """End the core; running requests fail."""
        self._workers.close()
        await self._core.close()

    def _core_is_ready(self, info: CoreInfo) -> None:
        self._input_processor = self._frontend.input_processor(info.max_context)
        known = self._adapters if self._has_started else {one.name: one for one in info.adapters}
        self._has_started = True
        # A core that was started anew has the adapters of the config: what came and went since is repeated.
        kept = [one for one in info.adapters if one.name in known and one.path == known[one.name].path]
        for adapter in info.adapters:
            if adapter.name not in known:
                self._core.send(UnloadAdapter(adapter.name))
        for adapter in known.values():
            if adapter.name not in {one.name for one in kept}:
                self._core.send(LoadAdapter(adapter.name, adapter.path))
        self._set_adapters(kept)


class CoreSupervisor:
    """Keeps a core running: starts it, hands on what it says, and starts it again after a death, a few times."""

    def __init__(
        self,
        make_client: MakeClient,
        on_ready: Callable[[CoreInfo], None],
        on_outputs: Callable[[Outputs | AdapterRead], None],
        on_death: Callable[[TokenmillError], None],
    ) -> None:
        self.health = Health("loading")
        self.info: CoreInfo | None = None
        self._make_client = make_client
        self._on_ready, self._on_outputs, self._on_death = on_ready, on_outputs, on_death
        self._client: CoreClient | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._life_checks: asyncio.Task[None] | None = None
        self._deaths: list[float] = []
        self.num_restarts = 0
        self._is_closed = False

    async def open(self) -> None:
        """Start the first core and wait until it is ready; what keeps it from that is raised."""
        self._first_ready = asyncio.get_running_loop().create_future()
        await self._connect()
        await self._first_ready
        self._life_checks = asyncio.create_task(self._check_life())

    def send(self, message: ToCore) -> None:
        """Send to the core, if there is one at the moment: a dead one has forgotten its requests anyway."""
        if self._client is not None:
            self._client.send(message)

    def drain(self) -> None:
        self.health = Health("draining", "finishing running requests")

    async def close(self) -> None:
        self._is_closed = True
        for task in (self._restart, self._life_checks):
            if task is not None:
                task.cancel()
        self.health = Health("dead", "closed")
        self._on_death(EngineDead("the engine was closed"))
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _connect(self) -> None:
        self._client = self._make_client()
        await self._client.start(self._receive)

    def _receive(self, message: FromCore) -> None:
        match message:
            case Outputs() | AdapterRead():
                self._on_outputs(message)
            case Ready(info):
                self._become_ready(info)
            case Failed():
                self._core_died(message)

    def _become_ready(self, info: CoreInfo) -> None:
        self.info = info
        self._on_ready(info)
        if self.health.state == "loading":
            self.health = Health("ready")
        assert self._first_ready is not None
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    async def _check_life(self) -> None:
        """Look for signs of life of a ready core, now and then."""
        while True:
            slept_from_s = time.monotonic()
            await asyncio.sleep(LIFE_CHECK_S)
            # Where this process itself was held up, its core's messages may lie unread.
            if self._client is not None and time.monotonic() - slept_from_s < LIFE_CHECK_S + STALLED_S / 2:
                self._judge_silence(self._client, self._client.silent_s())

    def _judge_silence(self, client: CoreClient, silent_s: float) -> None:
        if self.health.state == "ready" and silent_s > STALLED_S:
            self.health = Health("stalled", f"the engine gives no sign of life for {silent_s:.0f} s")
            log.warning("%s; requests wait, new ones are refused", self.health.detail)
        elif self.health.state == "stalled" and silent_s <= STALLED_S:
            self.health = Health("ready")
            log.warning("the engine is alive again")
        elif self.health.state == "stalled" and silent_s > GIVEN_UP_S:
            log.error("%s: it is killed", self.health.detail)
            client.kill()

    def _core_died(self, failure: Failed) -> None:
        if self._is_closed or self.health.state == "dead":
            return
        error = EngineDead(failure.message, hint=failure.hint)
        self._on_death(error)
        assert self._first_ready is not None
        if not self._first_ready.done():  # it never started: `open` raises this
            error.exit_code = failure.exit_code
            self._first_ready.set_exception(error)
            self.health = Health("dead", failure.message)
        elif self.health.state != "draining":
            self.health = Health("dead", failure.message)
            self._restart = asyncio.create_task(self._restart_core(failure.message))

    async def _drop_client(self) -> None:
        """Let go of a dead core, and of the folder of its sockets."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _restart_core(self, why: str) -> None:
        now = time.monotonic()
        self._deaths = [died for died in self._deaths if now - died < RESTART_WINDOW_S] + [now]
        if len(self._deaths) > MAX_RESTARTS:
            why_dead = f"the engine died {len(self._deaths)} times in {RESTART_WINDOW_S:.0f} s"
            self.health = Health("dead", why_dead, is_given_up=True)
            log.error(
                "%s; %s: it is not started again. Stop this server, mend what ended it, start anew",
                why,
                self.health.detail,
            )
            await self._drop_client()
            return
        log.error("%s; starting it again", why)
        self.num_restarts += 1
        await self._drop_client()
        await asyncio.sleep(FIRST_RESTART_DELAY_S * 2 ** (len(self._deaths) - 1))
        self.health = Health("loading", "starting again after a failure")
        try:
            await self._connect()
        except OSError as problem:  # no memory or no disk for a process: perhaps the next time
            self._core_died(Failed(f"the engine could not be started again: {problem.strerror or problem}"))


def open_core_client(frontend: ModelFrontend, *, in_process: bool, child: CoreProcess | None = None) -> CoreClient:
    """The client of a core in a process of its own, or in a thread of this one."""
    if not in_process:
        return ProcessCoreClient(frontend.config, frontend.model_path, child)
    from tokenmill.engine.build import build_core  # torch, only where the core lives in this process

    return ThreadCoreClient(lambda: build_core(frontend.config, frontend.model_path))
