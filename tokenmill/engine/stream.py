"""The events of one request, between the engine that puts them and the caller who awaits them.

    engine ─► EventBuffer (held by the engine) ─► EventStream (held by the caller)

The engine does not refer to the caller's end: dropping that is how most callers leave (`break` out of `async for`).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Sequence

from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.results import EventFold
from tokenmill.errors import Overloaded, RequestFailed, TokenmillError, error_with_code
from tokenmill.types import Event, SequenceOutput, TokenInfo

log = logging.getLogger(__name__)

MAX_UNREAD_LOGPROBS = 1_000_000  # of one request, alternatives included: about 200 bytes each


class EventBuffer:
    """The events of a request that were not read yet, folded into one per choice.

    A reader who is behind gets fewer, larger events, so the further behind, the less an event costs per token. One
    reader, one future: this code runs once for every streamed token.
    """

    def __init__(self, output_processor: OutputProcessor) -> None:
        self.output_processor = output_processor
        self._waiting: dict[int, EventFold] = {}  # by choice; the one with the newest event is the last
        self._error: TokenmillError | None = None
        self._is_over = False
        self._num_unread_logprobs = 0
        self._wake: asyncio.Future[None] | None = None

    def process(self, output: SequenceOutput) -> TokenmillError | None:
        """Buffer the events of an output; return the reason if the request ends here.

        A failure in the text of one request must not reach the others, so it becomes that request's error.
        """
        if output.finish_reason == "error":
            error = error_with_code(output.error_code, output.error or "the request failed", output.error_param)
            if isinstance(error, Overloaded) and output.retry_after_s:
                error.retry_after_s = output.retry_after_s
            return error
        try:
            for event in self.output_processor.process(output):
                self.put(event)
                if event.logprobs and self._is_too_far_behind(event.logprobs):
                    return RequestFailed("the reader of the answer is too far behind with its logprobs")
        except TokenmillError as error:  # a stop pattern that takes too long
            return error
        except Exception:
            log.exception("request %s: its tokens could not be made text", self.output_processor.request_id)
            return RequestFailed("the answer's tokens could not be made text")
        return None

    def _is_too_far_behind(self, logprobs: Sequence[TokenInfo]) -> bool:
        self._num_unread_logprobs += sum(1 + len(info.top) for info in logprobs)
        return self._num_unread_logprobs > MAX_UNREAD_LOGPROBS

    def put(self, event: Event) -> None:
        fold = self._waiting.pop(event.index, None) or EventFold()
        fold.add(event)
        self._waiting[event.index] = fold
        self._wake_reader()

    def end(self) -> None:
        self._is_over = True
        self._wake_reader()

    def fail(self, error: TokenmillError) -> None:
        self._error = error
        self.end()

    @property
    def is_awaited(self) -> bool:
        """True while a reader has to wait: nothing is here, and something may still come."""
        return not self._waiting and not self._is_over

    def arrival(self) -> asyncio.Future[None]:
        self._wake = asyncio.get_running_loop().create_future()
        return self._wake

    def pop(self) -> Event | None:
        """Return the events of one choice since the last time as one; None after the last. A failure is raised once."""
        if self._waiting:
            event = self._waiting.pop(next(iter(self._waiting))).event
            if not self._waiting:
                self._num_unread_logprobs = 0
            return event
        error, self._error = self._error, None
        if error is not None:
            raise error
        return None

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


OnLeave = Callable[[EventBuffer], None]


class EventStream(AsyncIterator[Event]):
    """Iterates over a request's events. `aclose`, cancelling a read and dropping the stream all abort the request."""

    def __init__(
        self, buffer: EventBuffer, on_leave: OnLeave, loop: asyncio.AbstractEventLoop, route: str | None = None
    ) -> None:
        """`route`: which of several cores the request went to, and why."""
        self._buffer = buffer
        self.route = route
        self._on_leave = on_leave
        weakref.finalize(self, _leave_later, loop, on_leave, buffer).atexit = False

    @property
    def request_id(self) -> str:
        return self._buffer.output_processor.request_id

    @property
    def device_s(self) -> float:
        """Return the device seconds that were spent on the request so far."""
        return self._buffer.output_processor.device_s

    async def __anext__(self) -> Event:
        buffer = self._buffer
        while buffer.is_awaited:
            try:
                await buffer.arrival()
            except asyncio.CancelledError:
                self._on_leave(buffer)
                raise
        event = buffer.pop()
        if event is None:
            raise StopAsyncIteration
        return event

    def stop(self) -> None:
        """Abort the request; a reader that waits for the next event finds the end."""
        self._on_leave(self._buffer)
        self._buffer.end()

    async def aclose(self) -> None:
        self._on_leave(self._buffer)


def _leave_later(loop: asyncio.AbstractEventLoop, on_leave: OnLeave, buffer: EventBuffer) -> None:
    """Tell the engine in the event loop's thread: objects are collected in any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_leave, buffer)
