"""The serving front of a model: submit a request, get an async iterator of events.

    AsyncEngine   checks and tokenises requests, submits them to a core, turns outputs into events
    Replicas      the cores (`replicas.py`), one by default, each in a separate process

A core that dies is restarted, and its requests continue with the next token: on another core if there is one, otherwise
on the new one. While no core is ready, `submit` refuses requests. Leaving an iterator early (the client disconnected)
aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from tokenmill.config import EngineConfig
from tokenmill.config.by_name import engine_config
from tokenmill.config.setting_types import EngineSettings
from tokenmill.engine.core_client import CoreClient, ProcessCoreClient, ThreadCoreClient, start_core_process
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.core_supervisor import MakeClient
from tokenmill.engine.frontend import ModelFrontend, ModelText, load_frontend
from tokenmill.engine.input_processor import ClientRequest, InputProcessor, PreparedRequest
from tokenmill.engine.messages import Abort, AdapterRead
from tokenmill.engine.replica import Replica, RequestRun
from tokenmill.engine.replicas import FleetKeeper, Replicas, Router
from tokenmill.engine.roles import Role
from tokenmill.engine.served_adapters import ServedAdapters
from tokenmill.engine.startup.spare_core import SpareCore
from tokenmill.engine.status import CoreInfo, EngineStats, Health, LoadedAdapter, ModelInfo, require_ready
from tokenmill.engine.stream import EventBuffer, EventStream
from tokenmill.engine.text_workers import TextWorkers, text_size
from tokenmill.engine.tool_use import describe_speech
from tokenmill.errors import EngineDead, InvalidRequest, Overloaded, RequestAborted, RequestFailed, TokenmillError
from tokenmill.types import ChatRequest, SequenceOutput


class AsyncEngine:
    """A model for asyncio programs, computed in a separate process: `submit` a request, iterate over its events.

    engine = await AsyncEngine.start("smollm2:135m", max_context=2048)
    request = PromptRequest(prompt="The sky is", params=SamplingParams(max_tokens=16))
    async for event in engine.submit(request):
        print(event.text, end="")
    await engine.close()
    """

    def __init__(
        self,
        frontend: ModelFrontend,
        make_client: MakeClient | Sequence[MakeClient],
        *,
        router: Router | None = None,
        spare: SpareCore | None = None,
        keepers: Sequence[FleetKeeper] = (),
        num_started: int | None = None,
        roles: Sequence[Role] = (),
    ) -> None:
        """`make_client`: the client factory of each core. `router`: chooses among several cores. `spare`: a pre-started
        process that replaces one that dies; this engine refills and ends it. `keepers`: services that start and end
        with the cores, and may start and stop cores in between. `num_started`: how many cores `open` starts, by default
        all. `roles`: the role of each core."""
        self._frontend = frontend
        self._spare = spare
        self._keepers = keepers
        self._num_started = num_started
        self._replicas = Replicas(
            [make_client] if callable(make_client) else make_client,
            deliver=self._deliver,
            fail=self._fail,
            on_ready=self._core_is_ready,
            on_adapter=self._adapter_read,
            on_death=self._core_died,
            router=router,
            roles=roles,
        )
        self._adapters = ServedAdapters(self._replicas.all, self._set_adapters)
        self._input_processor: InputProcessor | None = None
        self._info: ModelInfo | None = None
        self._workers = TextWorkers()
        self._num_preparing = 0
        self._num_by_tenant: Counter[str] = Counter()  # requests that are prepared or run
        self._running: dict[str, RequestRun] = {}
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
        **settings: Unpack[EngineSettings],
    ) -> AsyncEngine:
        """Load the model and return once it is ready; model and settings are those of `LLM`.

        `in_process` runs the core in a thread of this process. `child` is a core process that was started beforehand;
        it imports its libraries while the front reads the tokenizer. `frontend`: the front of an earlier engine of the
        same model.
        """
        config = engine_config(model, settings)
        unused = [] if in_process else [child or start_core_process(config)]
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
        """Start the cores and wait until they are ready; `start` calls this."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            for keeper in self._keepers:
                await keeper.start(self._replicas)
            num_all = len(self._replicas.all)
            await self._replicas.open(num_all if self._num_started is None else self._num_started)
            for keeper in self._keepers:
                keeper.note_open()
            undo.pop_all()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, client_request: ClientRequest) -> PreparedRequest:
        """Check and tokenise a request, in a thread if it is long, so that the event loop is not blocked."""
        self._require_capacity(client_request.tenant.id)
        input_processor = self._loaded_input_processor()
        self._num_preparing += 1
        self._num_by_tenant[client_request.tenant.id] += 1
        try:
            request = await self._workers.run(
                text_size(client_request), lambda: input_processor.process(client_request)
            )
            return PreparedRequest(client_request, request)
        finally:
            self._num_preparing -= 1
            self._count_down(client_request.tenant.id)

    def submit(self, client_request: ClientRequest | PreparedRequest) -> EventStream:
        """Submit a request to a core. An invalid request raises here, before the first event.

        A request that was not prepared is tokenised now, in this thread, however long it is.
        """
        if isinstance(client_request, PreparedRequest):
            prepared = client_request
            self._require_capacity(prepared.client_request.tenant.id)
        else:
            self._require_capacity(client_request.tenant.id)
            prepared = PreparedRequest(client_request, self._loaded_input_processor().process(client_request))
        request = prepared.request
        if request.params.logits_processors:
            raise InvalidRequest(
                "logits_processors are functions of the calling process, but the engine runs in another process",
                param="logits_processors",
                hint="use tokenmill.LLM",
            )
        if request.request_id in self._running:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        buffer = EventBuffer(self._frontend.output_processor(prepared.client_request, request))
        run = self._running[request.request_id] = RequestRun(buffer, request)
        self._num_by_tenant[request.tenant.id] += 1
        self._replicas.submit(run)
        self._idle.clear()
        route = f"{run.replica.index} {run.why}" if run.replica is not None and len(self._replicas.all) > 1 else None
        return EventStream(buffer, self._leave, asyncio.get_running_loop(), route)

    async def abort(self, request_id: str) -> None:
        """End a request; a reader of its events gets a `RequestAborted`."""
        run = self._running.get(request_id)
        if run is not None:
            self._forget(run, tell_core=True)
            run.buffer.fail(RequestAborted("the request was aborted"))

    def num_generated(self, request_id: str) -> int:
        """Return how many tokens a running request has generated so far, over all of its choices."""
        run = self._running.get(request_id)
        return run.buffer.output_processor.num_completion_tokens if run is not None else 0

    def _require_capacity(self, tenant: str) -> None:
        """Refuse a request while the engine is not ready, or has as many requests as may run and wait. A tenant has a
        share of these places even if others have taken them all, so k tenants have at most 1 + 1/2 + … + 1/k times as
        many places as one."""
        require_ready(self.health())
        num_requests = len(self._running) + self._num_preparing
        num_places = self._frontend.config.scheduler.max_waiting + self._max_running
        num_tenants = len(self._num_by_tenant) + (tenant not in self._num_by_tenant)
        if num_requests >= num_places and self._num_by_tenant[tenant] >= num_places // num_tenants:
            wait_s = min(replica.stats.wait_s for replica in self._replicas.all)
            raise Overloaded("too many requests are waiting", retry_after_s=max(1.0, wait_s))

    @property
    def _max_running(self) -> int:
        """The most sequences that all cores together compute in a step, including a core that is being restarted."""
        return sum(one.info.max_running for one in self._replicas.all if one.supervisor.info is not None)

    def _leave(self, buffer: EventBuffer) -> None:
        run = self._running.get(buffer.output_processor.request_id)
        if run is not None and run.buffer is buffer:
            self._forget(run, tell_core=True)

    def _count_down(self, tenant: str) -> None:
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]

    def _forget(self, run: RequestRun, *, tell_core: bool) -> None:
        if self._running.pop(run.request.request_id, None) is not None:
            self._count_down(run.request.tenant.id)
        self._replicas.forget(run, tell_core=tell_core)
        if not self._running:
            self._idle.set()

    # ── callbacks of `Replicas` ────────────────────────────────────────────────────────────────────────

    def _deliver(self, run: RequestRun, output: SequenceOutput) -> None:
        buffer = run.buffer
        if (error := buffer.process(output)) is not None:
            self._forget(run, tell_core=output.finish_reason is None)
            buffer.fail(error)
            return
        for index in buffer.output_processor.pop_stopped():
            if run.replica is not None:
                run.replica.send(Abort(run.core_id, index))
        if buffer.output_processor.is_finished:
            self._forget(run, tell_core=False)
            buffer.end()

    def _fail(self, run: RequestRun, error: TokenmillError) -> None:
        self._forget(run, tell_core=False)
        run.buffer.fail(error)

    def _core_is_ready(self, replica: Replica, info: CoreInfo) -> None:
        known = [one.info.max_context for one in self._replicas.all if one.supervisor.info is not None]
        self._input_processor = self._frontend.input_processor(min(known))
        self._adapters.note_ready(replica, info)
        if self._spare is not None and all(one.is_ready or one.is_stopped for one in self._replicas.all):
            asyncio.get_running_loop().run_in_executor(None, self._spare.refill)

    def _core_died(self, replica: Replica, error: TokenmillError) -> None:
        self._adapters.note_death(replica, error)

    # ── adapters ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The adapters that requests may name."""
        return self._adapters.usable()

    async def load_adapter(self, name: str, path: Path) -> LoadedAdapter:
        """Load an adapter; for later requests it replaces one of the same name."""
        require_ready(self.health())
        return await self._adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter's name; running requests keep using the adapter."""
        self._adapters.unload(name)

    def _adapter_read(self, replica: Replica, message: AdapterRead) -> None:
        self._adapters.note_read(replica, message)
        self._replicas.fail_parked(
            lambda run: bool(run.request.adapter) and not self._adapters.may_come(run.request.adapter),
            RequestFailed("the engine died, and the request's adapter could not be reloaded"),
        )

    def _set_adapters(self, adapters: list[LoadedAdapter]) -> None:
        self._info = None  # it lists the adapters
        if self._input_processor is not None:
            self._input_processor.adapters = {one.name: one.digest for one in adapters}

    # ── text ───────────────────────────────────────────────────────────────────────────────────────────

    def tokenize(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text; `parse_special`: control tokens written in it become those tokens."""
        return self._text().tokenize(text, add_special_tokens, parse_special)

    def tokenize_chat(self, request: ChatRequest) -> list[int]:
        """Return the token ids of a conversation in the model's chat template."""
        return self._text().tokenize_chat(request)

    def detokenize(self, ids: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._text().detokenize(ids)

    def chat_text(self, request: ChatRequest) -> str:
        """Return the text of a conversation in the model's chat template."""
        return self._text().chat_text(request)

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        """Return the bytes of each token separately, including its leading space."""
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
                is_deterministic=self.core.device == "cpu" or self._frontend.config.ops.deterministic,
                max_running=self._max_running,
                adapters=tuple(one.name for one in self.adapters),
                num_adapter_slots=self.core.num_adapter_slots,
            )
        return self._info

    @property
    def frontend(self) -> ModelFrontend:
        """The front of the model, which another engine of the same model can reuse."""
        return self._frontend

    @property
    def core(self) -> CoreInfo:
        """The settings that the first core resolved while loading, and the reasons."""
        return self._replicas.all[0].info

    @property
    def reasons(self) -> list[str]:
        """The choices made for this model and their reasons, for the log."""
        return [*self.core.reasons, describe_speech(self._frontend.speech)]

    def health(self) -> Health:
        """Return the state of the engine: ready if it accepts requests."""
        return self._replicas.health

    def stats(self) -> EngineStats:
        """Return statistics: running and waiting requests, KV cache use, counters since the start."""
        return self._replicas.stats()

    def replicas(self) -> list[dict[str, Any]]:
        """Return a description of each core's state, for monitoring."""
        return self._replicas.describe()

    def drain_replica(self, index: int, is_drained: bool = True) -> None:
        """Assign no more requests to one of several cores and move its requests to other cores; or put it back into
        use."""
        self._replicas.set_drained(self._replica(index), is_drained)

    async def restart_replicas(self, index: int | None = None) -> list[int]:
        """Replace running cores by new ones, one after the other; by default all. No request fails: the requests of a
        core continue on other cores meanwhile, or wait for the new one if it is the only one."""
        started = [replica for replica in self._replicas.all if not replica.is_stopped]
        selected = started if index is None else [self._replica(index)]
        if any(replica.is_stopped for replica in selected):
            raise InvalidRequest(f"replica {index} is stopped", param="replica")
        for replica in selected:
            await self._replicas.restart(replica)
        return [replica.index for replica in selected]

    def scale_replicas(self, min_replicas: int, max_replicas: int) -> None:
        """Set the limits between which the number of running cores follows the load."""
        if not any([keeper.set_limits(min_replicas, max_replicas) for keeper in self._keepers]):
            raise InvalidRequest(
                "the number of this server's replicas is fixed", param="replicas", hint="start it with tokenmill up"
            )

    def _replica(self, index: int) -> Replica:
        if not 0 <= index < len(self._replicas.all):
            raise InvalidRequest(f"there are {len(self._replicas.all)} replicas, counted from 0", param="replica")
        return self._replicas.all[index]

    def is_idle(self) -> bool:
        """Tell whether the engine has no request, not even one that is being tokenised."""
        return not self._running and not self._num_preparing

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; return False if some still run after the timeout."""
        self._replicas.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._running

    async def close(self) -> None:
        """End the cores; running requests fail."""
        self._workers.close()
        for keeper in self._keepers:
            await keeper.stop()
        await self._replicas.close()
        for keeper in self._keepers:
            await keeper.close()
        if self._spare is not None:
            await asyncio.to_thread(self._spare.discard)


def open_core_client(frontend: ModelFrontend, *, in_process: bool, child: CoreProcess | None = None) -> CoreClient:
    """Return the client of a core in a separate process, or in a thread of this one."""
    if not in_process:
        return ProcessCoreClient(frontend.config, frontend.model_path, child)
    from tokenmill.engine.build import build_core  # imports torch, needed only if the core runs in this process

    return ThreadCoreClient(lambda: build_core(frontend.config, frontend.model_path))
