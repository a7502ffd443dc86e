"""The path of every generation, whatever the dialect of its request.

    GenerationJob ──► GenerationRun: engine requests, their events merged ──► GenerationResponse: rendered to the client

A reply starts only once the engine has accepted all requests of the job, so a refusal always has its own HTTP status.
A `GenerationResponse` watches for a disconnect of the client while it works, and closes the run in any case.

This module knows no wire format: the job's `Rendering` makes the bytes, including their framing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.engine.input_processor import ClientRequest, PreparedRequest
from tokenmill.engine.results import EventFold
from tokenmill.errors import ContextLengthExceeded, InvalidRequest, RequestAborted, RequestFailed, TokenmillError
from tokenmill.observe.log import get_log
from tokenmill.server.accounting import RequestRecord
from tokenmill.server.errors import InternalError
from tokenmill.server.gate import ServedEngine
from tokenmill.server.live import LiveRequests
from tokenmill.server.quotas import RunQuota
from tokenmill.server.request_ids import engine_ids
from tokenmill.server.response_cache import ResponseCache, replay
from tokenmill.types import Event, Request, Usage

log = get_log("server")
THREAD_LOGPROBS = 500  # replies with more are rendered in a thread: it takes tens of milliseconds
MAX_REPLY_LOGPROBS = 1_000_000  # in one reply that is not streamed; each takes about 200 bytes until it is rendered


@dataclass(frozen=True)
class GenerationFacts:
    """A generation's counts and times at one moment. At the start of a stream only the prompt's counts are known: its
    tokens, and (unless a ping was sent before the first event) how many of them were cached."""

    request_id: str
    usage: Usage
    queue_s: float | None
    first_token_s: float | None  # since the request arrived
    elapsed_s: float
    prompt_token_ids: Sequence[int] = ()  # of the first request
    accepted_s: float = 0.0  # when the engine accepted it, with the model loaded and the prompt tokenised

    @property
    def begun_s(self) -> float:
        """Return the seconds from arrival to the first token, or until now."""
        return self.elapsed_s if self.first_token_s is None else self.first_token_s

    @property
    def waited_s(self) -> float:
        """Return the seconds that the request waited: until it was accepted, and then in the engine's queue."""
        return min(self.accepted_s + (self.queue_s or 0.0), self.begun_s)


class Rendering(Protocol):
    """Renders one reply in a dialect. A reply that is not streamed is made from the same events, merged per choice; it
    is a Response, so that the dialect also chooses its status, headers and media type."""

    stream_headers: Sequence[tuple[bytes, bytes]]
    ping: bytes  # sent while a stream has no output, to keep the connection open; empty: no pings

    def begin(self, facts: GenerationFacts) -> bytes: ...
    def event(self, choice: int, event: Event) -> bytes: ...
    def end(self, facts: GenerationFacts) -> bytes: ...  # sent in one write with the end of the HTTP body
    def failure(self, error: TokenmillError, request_id: str) -> bytes: ...
    def whole(self, choices: list[Event], facts: GenerationFacts) -> Response: ...


Shorten = Callable[[ClientRequest, ContextLengthExceeded], ClientRequest | None]
Finish = Callable[[GenerationFacts], Awaitable[None]]


@dataclass(frozen=True)
class GenerationJob:
    """A parsed body: engine requests with `num_choices` answers each, and their rendering."""

    engine: ServedEngine
    requests: Sequence[ClientRequest]
    rendering: Rendering
    is_stream: bool = False
    num_choices: int = 1
    prompt_param: str = "messages"  # the field that errors name for a prompt that is too long
    guided_param: str | None = None  # ... and for a schema or grammar that is not supported
    max_in_flight: int | None = None  # None: submit all requests together, so all are accepted before the first byte
    check: Callable[[Request], None] | None = None  # refuses a request that the dialect forbids, once it is tokenised
    shorten: Shorten | None = None  # shortens a request that is too long; None if it can't
    finish: Finish | None = None  # awaited before the end of the reply is sent
    keep_model: Callable[[], None] | None = None  # sets the model's keep-alive time to the one of the request


# ── towards the engine ─────────────────────────────────────────────────────────────────────────────────


class GenerationRun:
    """All engine requests of one job; iterating yields (choice, event) until every choice has finished."""

    def __init__(
        self,
        job: GenerationJob,
        record: RequestRecord,
        live: LiveRequests | None = None,
        quota: RunQuota | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        """`live`: lists the run while it is in progress, so that it can be seen and aborted. `quota`: the limits of its
        key. `cache`: answers of earlier identical requests."""
        self._cache = cache
        self.job = job
        self.record = record
        ids = engine_ids(record.request_id, len(job.requests))
        self.run_id = ids[0]  # unique, unlike an id chosen by a client
        self._requests = [
            msgspec.structs.replace(request, request_id=request_id)
            for request, request_id in zip(job.requests, ids, strict=True)
        ]
        self._live = live
        self._quota = quota
        self._is_aborted = False
        self._open: dict[str, AsyncIterator[Event]] = {}  # accepted and not yet finished
        self._usages: dict[str, Usage] = {}
        self._num_seen: dict[str, int] = {}  # tokens in the events so far
        self._prompt_token_ids: Sequence[int] = ()
        self._num_logprobs = 0  # kept in memory: of prompts, and of answers that are not streamed
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        totals = self._usages.values()
        if len(totals) == 1:  # by far the most common case
            return next(iter(totals))
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in totals),
            completion_tokens=sum(usage.completion_tokens for usage in totals),
            cached_tokens=sum(usage.cached_tokens for usage in totals),
            drafted_tokens=sum(usage.drafted_tokens for usage in totals),
            accepted_tokens=sum(usage.accepted_tokens for usage in totals),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in totals),
            device_s=sum(usage.device_s for usage in totals),
        )

    def facts(self) -> GenerationFacts:
        record = self.record
        return GenerationFacts(
            record.request_id,
            self.usage,
            record.queue_s,
            record.first_token_s,
            record.elapsed_s(),
            self._prompt_token_ids,
            record.accepted_s,
        )

    async def accept(self) -> None:
        """Submit the requests to the engine; if it refuses one, none of them runs."""
        if self._quota is not None:
            self._quota.begin()
        if self._live is not None:
            self._live.add(self)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            for request in self._requests[: self.job.max_in_flight]:
                await self._submit(request)
                await asyncio.sleep(0)  # short prompts are tokenised on the event loop: let other tasks run in between
            undo.pop_all()
        self.record.accepted_s = self.record.elapsed_s()

    async def _submit(self, request: ClientRequest) -> AsyncIterator[Event]:
        try:
            prepared = await self._prepared(request)
            if self.job.check is not None:
                self.job.check(prepared.request)
            if (num_alternatives := prepared.request.params.prompt_logprobs) is not None:
                num_kept = len(prepared.request.prompt_token_ids) * (1 + num_alternatives)
                self._count_logprobs(num_kept, "prompt_logprobs")
            if self._quota is not None:
                self._quota.reserve(max_total_tokens(prepared.request))
            if self._is_aborted:
                raise RequestAborted("the request was aborted")
            events = self._answer(prepared)
        except ContextLengthExceeded as error:
            error.param = self.job.prompt_param
            raise
        self.record.route = self.record.route or getattr(events, "route", None)
        self._prompt_token_ids = self._prompt_token_ids or prepared.request.prompt_token_ids
        num_tokens = len(prepared.request.prompt_token_ids)
        self.record.max_tokens = max(self.record.max_tokens, prepared.request.max_tokens)
        self._usages[request.request_id] = Usage(prompt_tokens=num_tokens, completion_tokens=0)
        self._open[request.request_id] = events
        return events

    def _answer(self, prepared: PreparedRequest) -> AsyncIterator[Event]:
        """Return the events of an answer, from the engine or from the response cache."""
        key = None if self._cache is None else self._cache.key_of(prepared, self.job.engine.info)
        if self._cache is None or key is None:
            return self.job.engine.submit(prepared)
        cached = self._cache.find(key, prepared.request.request_id)
        if cached is not None:
            self.record.cache = self.record.cache or "hit"
            return replay(cached)
        self.record.cache = "miss"  # a job with several prompts is a hit only if all of them are
        return self._cache.keep(key, self.job.engine.submit(prepared), prepared.request.params.num_sequences)

    async def _prepared(self, request: ClientRequest) -> PreparedRequest:
        while True:
            try:
                return await self.job.engine.prepare(request)
            except ContextLengthExceeded as error:
                shorter = None if self.job.shorten is None else self.job.shorten(request, error)
                if shorter is None:
                    raise
                request = shorter

    def _count_logprobs(self, num_more: int, param: str) -> None:
        """Refuse a reply with more than MAX_REPLY_LOGPROBS logprobs."""
        self._num_logprobs += num_more
        if self._num_logprobs > MAX_REPLY_LOGPROBS:
            raise InvalidRequest(
                f"{param}: a reply holds at most {MAX_REPLY_LOGPROBS} logprobs, alternatives included",
                param=param,
                hint="request fewer alternatives, fewer tokens or fewer prompts at a time, or stream the reply",
            )

    async def close(self) -> None:
        """End the run: abort the requests that still run, release their KV blocks and settle usage and quota."""
        if self._live is not None:
            self._live.remove(self)
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # also if the caller is cancelled meanwhile
            self.settle_usage()
            if self._quota is not None:
                self._quota.end(self.usage.prompt_tokens + self.usage.completion_tokens)
            for request_id in list(self._open):
                await self._abandon(request_id)

    def settle_usage(self) -> None:
        """Record the tokens and device time so far, including those of requests that end early."""
        for request_id, events in self._open.items():
            usage, num_generated = self._usages[request_id], self.job.engine.num_generated(request_id)
            num_tokens = max(usage.completion_tokens, self._num_seen.get(request_id, 0), num_generated)
            device_s = max(usage.device_s, getattr(events, "device_s", 0.0))
            self._usages[request_id] = msgspec.structs.replace(usage, completion_tokens=num_tokens, device_s=device_s)
        if self._usages:
            self.record.usage = self.usage

    async def abort(self) -> None:
        """Abort the run by an operator's or another client's request; its own client gets a `RequestAborted`."""
        self._is_aborted = True
        for request_id in list(self._open):
            await self.job.engine.abort(request_id)

    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens that the engine has accepted so far."""
        return sum(usage.prompt_tokens for usage in self._usages.values())

    def num_generated(self) -> int:
        """Return the number of tokens that its requests have generated so far."""
        finished = sum(usage.completion_tokens for one, usage in self._usages.items() if one not in self._open)
        return finished + sum(self.job.engine.num_generated(request_id) for request_id in self._open)

    async def _abandon(self, request_id: str) -> None:
        events = self._open.pop(request_id)
        close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
        if close is not None:
            await close()
        await self.job.engine.abort(request_id)  # closing an iterator that was never started runs none of its code

    async def _events_of(self, number: int) -> AsyncIterator[tuple[int, Event]]:
        request = self._requests[number]
        events = self._open.get(request.request_id) or await self._submit(request)
        try:
            async for event in events:
                choice = number * self.job.num_choices + event.index
                self._note(request.request_id, choice, event)
                yield choice, event
        except InvalidRequest as error:
            error.param = self.job.guided_param if error.param == "guided" else error.param
            raise
        self._open.pop(request.request_id, None)

    def _note(self, request_id: str, choice: int, event: Event) -> None:
        if event.finish_reason in ("abort", "error"):
            raise RequestFailed(f"the request was ended by the engine ({event.finish_reason})")
        self._num_seen[request_id] = self._num_seen.get(request_id, 0) + len(event.token_ids)
        if event.usage is not None:
            self._usages[request_id] = event.usage
        if event.finish_reason is not None:
            self.record.usage = self.usage
        self.record.note_event(event, choice)
        if self.record.texts is not None:
            self.record.texts.add(choice, event)

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        return self._events_of(0) if len(self._requests) == 1 else self._merged()

    async def _merged(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of several requests in the order of their arrival; the first failure ends all."""
        queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue()
        waiting = iter(range(len(self._requests)))

        async def work() -> None:
            for number in waiting:  # shared by the workers: each takes the next request
                async for item in self._events_of(number):
                    queue.put_nowait(item)

        num_workers = min(len(self._requests), self.job.max_in_flight or len(self._requests))
        self._tasks = [asyncio.create_task(work()) for _ in range(num_workers)]
        for task in self._tasks:  # a finished worker puts its exception, or None
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

    async def whole(self) -> Response:
        """Return the complete reply, with the events of each choice merged."""
        folds = [EventFold() for _ in range(len(self._requests) * self.job.num_choices)]
        async for index, event in self:
            if event.logprobs:
                self._count_logprobs(sum(1 + len(info.top) for info in event.logprobs), "logprobs")
            folds[index].add(event)
        reply = await self._rendered(self._with_prompt_logprobs([fold.event for fold in folds]))
        await self.finish()
        return reply

    async def finish(self) -> None:
        """Await the job's `finish`, after the answer is complete and rendered and before its end is sent."""
        if self.job.finish is not None:
            await self.job.finish(self.facts())

    def _with_prompt_logprobs(self, choices: list[Event]) -> list[Event]:
        """Copy the logprobs of each prompt, which only its first choice has, to its other choices."""
        first = [choices[index - index % self.job.num_choices] for index in range(len(choices))]
        if all(choice.prompt_logprobs is None for choice in choices):
            return choices
        pairs = zip(choices, first, strict=True)
        return [msgspec.structs.replace(choice, prompt_logprobs=one.prompt_logprobs) for choice, one in pairs]

    async def _rendered(self, choices: list[Event]) -> Response:
        """Render the whole reply, in a thread if it has many logprobs, which take up to seconds."""
        num_logprobs = sum(len(choice.logprobs or ()) + len(choice.prompt_logprobs or ()) for choice in choices)
        render = partial(self.job.rendering.whole, choices, self.facts())
        return await asyncio.to_thread(render) if num_logprobs > THREAD_LOGPROBS else render()


def max_total_tokens(request: Request) -> int:
    """Return the most tokens that a request can take: its prompt, and all of its answers at full length."""
    return len(request.prompt_token_ids) + request.max_tokens * request.params.num_sequences


# ── towards the client ─────────────────────────────────────────────────────────────────────────────────


class GenerationResponse(Response):
    """The ASGI response of a generation, sent while it is generated.

    An error before the first byte is raised, so that it gets its HTTP status and the dialect's error body; a later one
    is rendered as the last event of the stream.
    """

    def __init__(self, run: GenerationRun, keep_alive_s: float) -> None:
        super().__init__()
        self._run = run
        self._job = run.job
        self._keep_alive_s = keep_alive_s
        self._has_head = False  # status and headers were sent
        self._has_begun = False  # ... and the start of the rendered stream
        self._is_accepted = False
        self._num_sent = 0
        self._beginning = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        departure = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, departure}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._run.record.note_disconnect()
        finally:
            departure.cancel()
            work.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await work
            finally:
                await self._run.close()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._job.is_stream:
                await self._stream(send)
            else:
                await self._run.accept()
                await self._whole(scope, receive, send)
        except TokenmillError as error:
            await self._fail(error, send)
        except OSError:  # the connection broke while we were writing
            self._run.record.note_disconnect()
        except Exception:
            log.exception("request %s failed", self._run.record.request_id)
            await self._fail(InternalError(), send)

    async def _fail(self, error: TokenmillError, send: Send) -> None:
        if not self._has_head:
            raise error
        self._run.settle_usage()
        self._run.record.note_failure(error)
        failure = self._job.rendering.failure(error, self._run.record.request_id)
        await self._run.finish()
        await self._emit(send, failure, more=False, begins=self._is_accepted)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._run.whole()
        await reply(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send events as they arrive. The headers are sent with the first event, so that an earlier failure still has
        its own status, or with the first ping, if the model takes long to load."""
        pinger = asyncio.create_task(self._ping(send))
        try:
            await self._run.accept()
            self._is_accepted = True
            async for choice, event in self._run:
                data = self._job.rendering.event(choice, event)
                if data:
                    await self._emit(send, data)
        finally:
            pinger.cancel()
        end = self._job.rendering.end(self._run.facts())
        await self._run.finish()
        await self._emit(send, end, more=False)

    async def _ping(self, send: Send) -> None:
        """Send a ping after every period without output. This takes one timer per period, not one per token."""
        while self._job.rendering.ping:
            num_before = self._num_sent
            await asyncio.sleep(self._keep_alive_s)
            if self._num_sent == num_before:
                await self._emit(send, self._job.rendering.ping, begins=self._is_accepted)

    async def _emit(self, send: Send, data: bytes, more: bool = True, *, begins: bool = True) -> None:
        """Send some bytes. `begins`: send the start of the stream before them, if it was not sent; a ping before the
        run is accepted can't, because the prompt's counts are unknown."""
        self._num_sent += 1
        if self._has_begun and not self._beginning.locked():
            await send({"type": "http.response.body", "body": data, "more_body": more})
        else:
            await self._emit_first(send, data, more, begins)

    async def _emit_first(self, send: Send, data: bytes, more: bool, begins: bool) -> None:
        """Send the head first, whether it goes with the first event or with the first ping."""
        async with self._beginning:
            if not self._has_head:
                self._has_head = True
                headers = list(self._job.rendering.stream_headers)
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if begins and not self._has_begun:
                self._has_begun = True
                data = self._job.rendering.begin(self._run.facts()) + data
            await send({"type": "http.response.body", "body": data, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
