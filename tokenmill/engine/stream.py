"""The events of one request between the engine, which puts them, and whoever awaits them.

    engine ─► ArrivalProcess (kept by the engine) ─► EventStream (kept by the caller)

The engine must not keep the caller's end alive: dropping it is how most callers leave (`break` out of `async for`).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable

from tokenmill.engine.merge import merge_events
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.errors import RequestFailed, TokenmillError, error_with_code
from tokenmill.types import Event, SequenceOutput

log = logging.getLogger(__name__)


class EventBuffer:
    """What has come of a request and was not taken yet. Whoever is behind finds what waits for him in one event a
    choice, so the further he is behind the less an event costs a token. One reader, one future: this is passed once
    for every token that is streamed."""

    def __init__(self, output_processor: OutputProcessor) -> None:
        self.output_processor = output_processor
        self._waiting: dict[int, list[Event]] = {}  # by choice; the one that spoke last is the last
        self._error: TokenmillError | None = None
        self._is_over = False
        self._wake: asyncio.Future[None] | None = None

    def take_in(self, output: SequenceOutput) -> TokenmillError | None:
        """An output's events; or why the request ends here. A mistake in the text of one is no other's business."""
        if output.finish_reason == "error":
            return error_with_code(output.error_code, output.error or "the request failed")
        try:
            for event in self.output_processor.push(output):
                self.put(event)
        except Exception:
            log.exception("request %s: its tokens could not be made text", self.output_processor.request_id)
            return RequestFailed("the answer's tokens could not be made text")
        return None

    def put(self, event: Event) -> None:
        events = self._waiting.pop(event.index, [])
        events.append(event)
        self._waiting[event.index] = events
        self._wake_reader()

    def end(self) -> None:
        self._is_over = True
        self._wake_reader()

    def fail(self, error: TokenmillError) -> None:
        self._error = error
        self.end()

    @property
    def is_awaited(self) -> bool:
        """Nothing is here, and something may still come."""
        return not self._waiting and not self._is_over

    def arrival(self) -> asyncio.Future[None]:
        self._wake = asyncio.get_running_loop().create_future()
        return self._wake

    def take(self) -> Event | None:
        """What has come of a choice since the last time; None when all was taken. A failure is raised once."""
        if self._waiting:
            return merge_events(self._waiting.pop(next(iter(self._waiting))))
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


OnLeave = Callable[[EventBuffer], None]


class EventStream(AsyncIterator[Event]):
    """`aclose`, being cancelled and being dropped all abort what is not finished."""

    def __init__(self, arrivals: EventBuffer, on_leave: OnLeave, loop: asyncio.AbstractEventLoop) -> None:
        self._arrivals = arrivals
        self._on_leave = on_leave
        weakref.finalize(self, _leave_later, loop, on_leave, arrivals).atexit = False

    @property
    def request_id(self) -> str:
        return self._arrivals.output_processor.request_id

    async def __anext__(self) -> Event:
        arrivals = self._arrivals
        while arrivals.is_awaited:
            try:
                await arrivals.arrival()
            except asyncio.CancelledError:
                self._on_leave(arrivals)
                raise
        event = arrivals.take()
        if event is None:
            raise StopAsyncIteration
        return event

    def stop(self) -> None:
        """Abort what is not finished; whoever waits for the next event finds the end."""
        self._on_leave(self._arrivals)
        self._arrivals.end()

    async def aclose(self) -> None:
        self._on_leave(self._arrivals)


def _leave_later(loop: asyncio.AbstractEventLoop, on_leave: OnLeave, arrivals: EventBuffer) -> None:
    """Objects die in any thread; the engine is the event loop's."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_leave, arrivals)
