"""The events of one request between the engine, which puts them, and whoever awaits them.

    engine ─► Arrivals (kept by the engine) ─► EventStream (kept by the caller)

The engine must not keep the caller's end alive: dropping it is how most callers leave (`break` out of `async for`).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable

from tokenmill.engine.outlet import Outlet
from tokenmill.errors import RequestFailed, TokenmillError, error_with_code
from tokenmill.types import Event, SequenceOutput

log = logging.getLogger(__name__)


class Arrivals:
    """What has come of a request and was not taken yet."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self._events: asyncio.Queue[Event | TokenmillError | None] = asyncio.Queue()

    def take_in(self, output: SequenceOutput) -> TokenmillError | None:
        """An output's events; or why the request ends here. A mistake in the text of one is no other's business."""
        if output.finish_reason == "error":
            return error_with_code(output.error_code, output.error or "the request failed")
        try:
            for event in self.outlet.push(output):
                self._events.put_nowait(event)
        except Exception:
            log.exception("request %s: its tokens could not be made text", self.outlet.request_id)
            return RequestFailed("the answer's tokens could not be made text")
        return None

    def end(self) -> None:
        self._events.put_nowait(None)

    def fail(self, error: TokenmillError) -> None:
        self._events.put_nowait(error)
        self.end()

    async def take(self) -> Event | TokenmillError | None:
        """The next event, or why there is none; None after the last one."""
        return await self._events.get()


OnLeave = Callable[[Arrivals], None]


class EventStream(AsyncIterator[Event]):
    """`aclose`, being cancelled and being dropped all abort what is not finished."""

    def __init__(self, arrivals: Arrivals, on_leave: OnLeave, loop: asyncio.AbstractEventLoop) -> None:
        self._arrivals = arrivals
        self._on_leave = on_leave
        weakref.finalize(self, _leave_later, loop, on_leave, arrivals).atexit = False

    @property
    def request_id(self) -> str:
        return self._arrivals.outlet.request_id

    async def __anext__(self) -> Event:
        try:
            event = await self._arrivals.take()
        except asyncio.CancelledError:
            self._on_leave(self._arrivals)
            raise
        if event is None:
            self._arrivals.end()  # an exhausted iterator stays exhausted
            raise StopAsyncIteration
        if isinstance(event, TokenmillError):
            raise event
        return event

    async def aclose(self) -> None:
        self._on_leave(self._arrivals)


def _leave_later(loop: asyncio.AbstractEventLoop, on_leave: OnLeave, arrivals: Arrivals) -> None:
    """Objects die in any thread; the engine is the event loop's."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_leave, arrivals)
