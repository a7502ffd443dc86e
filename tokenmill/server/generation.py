"""The one path every generation takes, whatever dialect asked for it.

    Job ──► Run: engine requests, their events merged ──► Reply: rendered to the client, folded or streamed

A `Run` exists only once the engine has accepted all its requests, so a refusal always has its own HTTP status.
A `Reply` watches for the client's departure while it works and ends the run when either is over.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.errors import ContextLengthExceeded, RequestFailed, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server import sse
from tokenmill.server.errors import InternalError
from tokenmill.server.gate import NativeRequest, ServedEngine
from tokenmill.server.request_record import RequestRecord
from tokenmill.types import Event, TokenInfo, Usage

log = get_log("server")
MANY_LOGPROBS = 500  # take some tens of milliseconds
SSE_HEADERS = [(name.encode(), value.encode()) for name, value in sse.HEADERS.items()]


@dataclass
class FoldedChoice:
    """One answer, folded from its events."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenInfo] | None = None
    prompt_logprobs: list[TokenInfo | None] | None = None
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    embedding: list[float] | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_logprobs(self) -> int:
        """Tokens that have them, each perhaps with its alternatives."""
        return len(self.logprobs or ()) + len(self.prompt_logprobs or ())

    def add(self, event: Event) -> None:
        if event.text:
            self.texts.append(event.text)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += event.logprobs
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.embedding is not None:
            self.embedding = event.embedding
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


class Rendering(Protocol):
    """How a dialect writes an answer. The whole reply is made from the same events that a stream shows."""

    def begin(self) -> bytes: ...
    def event(self, choice: int, event: Event) -> bytes: ...
    def end(self, usage: Usage) -> bytes: ...
    def failure(self, error: TokenmillError) -> bytes: ...
    def whole(self, choices: list[FoldedChoice], usage: Usage) -> bytes: ...
    def refusal(self, error: TokenmillError) -> Response: ...


@dataclass(frozen=True)
class GenerationJob:
    """What a dialect's parser makes of a body: engine requests, each with `num_choices` answers."""

    requests: Sequence[NativeRequest]
    rendering: Rendering
    is_stream: bool = False
    num_choices: int = 1
    prompt_param: str = "messages"  # the field to blame for a prompt that does not fit
    max_in_flight: int | None = None  # None: all requests at once, so that all are accepted before the first byte


# ── the engine's side ──────────────────────────────────────────────────────────────────────────────────


class GenerationRun:
    """All engine requests of one job; iterating yields (choice, event) until every choice has finished."""

    def __init__(self, engine: ServedEngine, job: GenerationJob, record: RequestRecord) -> None:
        self._engine = engine
        self._record = record
        self._job = job
        name = f"{record.request_id}-{uuid.uuid4().hex[:12]}"  # proxies give all that follows from one call one id
        self._requests = [
            msgspec.structs.replace(request, request_id=f"{name}-{place}") for place, request in enumerate(job.requests)
        ]
        self._open: dict[str, AsyncIterator[Event]] = {}  # accepted and not yet finished
        self._usages: dict[str, Usage] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        totals = self._usages.values()
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in totals),
            completion_tokens=sum(usage.completion_tokens for usage in totals),
            cached_tokens=sum(usage.cached_tokens for usage in totals),
            drafted_tokens=sum(usage.drafted_tokens for usage in totals),
            accepted_tokens=sum(usage.accepted_tokens for usage in totals),
        )

    async def accept(self) -> None:
        """Hands the requests to the engine; if one is refused none of them runs. Each is tokenised here, so others
        get their turn between two of them."""
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            for request in self._requests[: self._job.max_in_flight]:
                self._submit(request)
                await asyncio.sleep(0)
            undo.pop_all()

    def _submit(self, request: NativeRequest) -> AsyncIterator[Event]:
        try:
            events = self._engine.submit(request)
        except ContextLengthExceeded as error:
            error.param = self._job.prompt_param
            raise
        self._open[request.request_id] = events
        return events

    async def close(self) -> None:
        """Ends whatever still runs; its KV blocks are free afterwards."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for request_id in list(self._open):
            await self._abandon(request_id)

    async def _abandon(self, request_id: str) -> None:
        events = self._open.pop(request_id)
        close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
        if close is not None:
            await close()
        await self._engine.abort(request_id)  # an iterator that was never started does not notice being closed

    async def _events_of(self, place: int) -> AsyncIterator[tuple[int, Event]]:
        request = self._requests[place]
        events = self._open.get(request.request_id) or self._submit(request)
        async for event in events:
            self._note(request.request_id, event)
            yield place * self._job.num_choices + event.index, event
        self._open.pop(request.request_id, None)

    def _note(self, request_id: str, event: Event) -> None:
        if event.finish_reason in ("abort", "error"):
            raise RequestFailed(f"the request was ended by the engine ({event.finish_reason})")
        if event.usage is not None:
            self._usages[request_id] = event.usage
            self._record.usage = self.usage
        self._record.note_event(event)

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        return self._events_of(0) if len(self._requests) == 1 else self._merged()

    async def _merged(self) -> AsyncIterator[tuple[int, Event]]:
        """Events of several requests in the order in which they come; the first failure ends all."""
        queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()
        waiting = iter(range(len(self._requests)))

        async def work() -> None:
            for place in waiting:  # shared: each worker takes the next one
                async for item in self._events_of(place):
                    queue.put_nowait(item)

        num_workers = min(len(self._requests), self._job.max_in_flight or len(self._requests))
        self._tasks = [asyncio.create_task(work()) for _ in range(num_workers)]
        for task in self._tasks:  # done: None, or why not
            task.add_done_callback(lambda done: queue.put_nowait(None if done.cancelled() else done.exception()))
        num_finished = 0
        while num_finished < num_workers:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_finished += 1
            else:
                yield item


# ── the client's side ──────────────────────────────────────────────────────────────────────────────────


class GenerationResponse(Response):
    """An answer in the making, as an ASGI response."""

    def __init__(self, run: GenerationRun, job: GenerationJob, record: RequestRecord, keep_alive_s: float) -> None:
        super().__init__()
        self._run = run
        self._job = job
        self._record = record
        self._keep_alive_s = keep_alive_s
        self._has_begun = False
        self._num_sent = 0
        self._beginning = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        departure = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait({work, departure}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._record.note_departure()
        finally:
            departure.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await self._run.close()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._job.is_stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        except TokenmillError as error:
            await self._fail(error, scope, receive, send)
        except OSError:  # the connection broke while we were writing
            self._record.note_departure()
        except Exception:
            log.exception("request %s failed", self._record.request_id)
            await self._fail(InternalError(), scope, receive, send)

    async def _fail(self, error: TokenmillError, scope: Scope, receive: Receive, send: Send) -> None:
        self._record.note_failure(error)
        if self._has_begun:
            await self._emit(send, self._job.rendering.failure(error), more=False)
        else:
            await self._job.rendering.refusal(error)(scope, receive, send)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [FoldedChoice() for _ in range(len(self._job.requests) * self._job.num_choices)]
        async for index, event in self._run:
            choices[index].add(event)
        for place, choice in enumerate(choices):  # a prompt's logprobs come once, with its first choice
            choice.prompt_logprobs = choices[place - place % self._job.num_choices].prompt_logprobs
        body = await self._rendered(choices)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _rendered(self, choices: list[FoldedChoice]) -> bytes:
        """The logprobs of a hundred long answers take seconds to write: in a thread, so that others go on meanwhile."""
        is_long = sum(choice.num_logprobs for choice in choices) > MANY_LOGPROBS
        render = partial(self._job.rendering.whole, choices, self._run.usage)
        return await asyncio.to_thread(render) if is_long else render()

    async def _stream(self, send: Send) -> None:
        """Headers wait for the first event, so that a failure before it still has its own status."""
        pinger = asyncio.create_task(self._ping(send))
        try:
            async for choice, event in self._run:
                data = self._job.rendering.event(choice, event)
                if data:
                    await self._emit(send, data)
        finally:
            pinger.cancel()
        await self._emit(send, self._job.rendering.end(self._run.usage), more=False)

    async def _ping(self, send: Send) -> None:
        """A comment whenever a whole period brought nothing: one timer a period, none per token."""
        while True:
            num_before = self._num_sent
            await asyncio.sleep(self._keep_alive_s)
            if self._num_sent == num_before:
                await self._emit(send, sse.PING)

    async def _emit(self, send: Send, data: bytes, more: bool = True) -> None:
        self._num_sent += 1
        if self._has_begun and not self._beginning.locked():
            await send({"type": "http.response.body", "body": data, "more_body": more})
        else:
            await self._emit_first(send, data, more)

    async def _emit_first(self, send: Send, data: bytes, more: bool) -> None:
        """The head comes before all else, whether it is a first event that waits for the socket or a first ping."""
        async with self._beginning:
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                data = self._job.rendering.begin() + data
            await send({"type": "http.response.body", "body": data, "more_body": more})


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
