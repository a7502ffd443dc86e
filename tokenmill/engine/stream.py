"""The stream of one request's events, from the engine to the caller.

    engine ─► EventBuffer (held by the engine) ─► EventStream (held by the caller)

The engine holds no reference to the `EventStream`: most callers leave by dropping it (`break` out of `async for`).
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
    """The unread events of a request, folded into one per choice.

    A slow reader gets fewer, larger events, so the cost per token falls the further behind it is. There is a single
    reader and a single future, because this code runs for every streamed token.
    """

    def __init__(self, output_processor: OutputProcessor) -> None:
        self.output_processor = output_processor
        self._waiting: dict[int, EventFold] = {}  # by choice; the one with the newest event is the last
        self._error: TokenmillError | None = None
        self._is_over = False
        self._num_unread_logprobs = 0
        self._wake: asyncio.Future[None] | None = None

    def process(self, output: SequenceOutput) -> TokenmillError | None:
        """Buffer the events of an output; return the error if the request ends with one.

        A failure while decoding one request's text becomes an error of that request and does not affect others.
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
                    return RequestFailed("the client reads the answer too slowly: too many logprobs are unread")
        except TokenmillError as error:  # a stop pattern that takes too long
            return error
        except Exception:
            log.exception("request %s: decoding its tokens to text failed", self.output_processor.request_id)
            return RequestFailed("the answer's tokens could not be decoded to text")
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
        """True if the reader has to wait: no event is unread, and the request has not ended."""
        return not self._waiting and not self._is_over

    def arrival(self) -> asyncio.Future[None]:
        self._wake = asyncio.get_running_loop().create_future()
        return self._wake

    def pop(self) -> Event | None:
        """Return the unread events of one choice as one event; None at the end. A failure is raised once."""
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
        """`route`: which of several cores the request was assigned to, and why."""
        self._buffer = buffer
        self.route = route
        self._on_leave = on_leave
        weakref.finalize(self, _leave_later, loop, on_leave, buffer).atexit = False

    @property
    def request_id(self) -> str:
        return self._buffer.output_processor.request_id

    @property
    def device_s(self) -> float:
        """Device time spent on the request so far."""
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
        """Abort the request; a reader that waits for the next event gets the end of the stream."""
        self._on_leave(self._buffer)
        self._buffer.end()

    async def aclose(self) -> None:
        self._on_leave(self._buffer)


def _leave_later(loop: asyncio.AbstractEventLoop, on_leave: OnLeave, buffer: EventBuffer) -> None:
    """Call `on_leave` in the event loop's thread: a finaliser may run in any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_leave, buffer)
