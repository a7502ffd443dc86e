"""Code shared by `run` and `chat`: open a model, and stream one answer at a time."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TextIO

import msgspec

from tokenmill.cli.answer_screen import DIM, PLAIN, AnswerScreen, has_colours
from tokenmill.cli.output import PullScreen
from tokenmill.config import EngineConfig
from tokenmill.config.adapters import named_adapters
from tokenmill.config.sampling import SamplingConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.customized import customized, own_adapter
from tokenmill.engine.results import reasoning_of
from tokenmill.engine.startup.core_prestart import take_core
from tokenmill.engine.stream import EventStream
from tokenmill.errors import InvalidConfig
from tokenmill.params import SamplingParams
from tokenmill.report.units import counted, duration
from tokenmill.store import Customization, ResolvedModel, resolve_model
from tokenmill.types import ChatRequest, Event, Message, PromptRequest, Usage

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

LOADING_AFTER_S = 0.7


class Events(Protocol):
    """The stream of an answer's events."""

    def __iter__(self) -> Iterator[Event]: ...
    def __next__(self) -> Event: ...

    def stop(self) -> None:
        """Stop the answer: the stream ends with the next event. May be called by a signal handler."""

    def close(self) -> None: ...


class ChatModel(Protocol):
    """An open model, as `run` and `chat` use it."""

    @property
    def max_context(self) -> int | None:
        """Return the context length in tokens; None if it is unknown."""

    def stream(self, prompt: str, params: SamplingParams) -> Events: ...
    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Events: ...
    def close(self) -> None: ...


def open_model(config: EngineConfig) -> ChatModel:
    """Download the model if necessary, with a progress bar, and load it."""
    found = fetch(config.model.model)
    with loading_sign(found.name):
        return ServedModel(config, take_core(fast_start=bool(config.ops.fast_start)), found.custom)


@contextmanager
def loading_sign(name: str, out: TextIO = sys.stderr) -> Generator[None, None, None]:
    """Show on a terminal that the model is loading, if it takes a while; erase the line afterwards."""
    if not has_colours(out):
        yield
        return
    is_done = threading.Event()

    def show() -> None:
        began, is_shown = time.monotonic(), False
        while not is_done.wait(0.1 if is_shown else LOADING_AFTER_S):
            is_shown = True
            out.write(f"\r{DIM}loading {name} … {time.monotonic() - began:.0f} s{PLAIN}")
            out.flush()
        if is_shown:
            out.write("\r\x1b[K")
            out.flush()

    sign = threading.Thread(target=show, daemon=True)
    sign.start()
    try:
        yield
    finally:
        is_done.set()
        sign.join()


def fetch(name: str) -> ResolvedModel:
    """Download the model if necessary and return its files."""
    with PullScreen() as screen:
        return resolve_model(name, progress=screen)


class ServedModel:
    """An engine whose core is a child process, used for one answer at a time. The child imports while this process
    parses flags and reads the tokenizer, which saves a second."""

    def __init__(self, config: EngineConfig, child: CoreProcess | None, custom: Customization | None = None) -> None:
        """`custom`: system prompt, parameters and messages of a created model."""
        self._custom = custom
        self._adapter = the_adapter(config)
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(AsyncEngine.start(config, child=child))

    def stream(self, prompt: str, params: SamplingParams) -> ServedEvents:
        own = None if self._custom is None else own_adapter(self._custom)
        return self._events(PromptRequest(prompt=prompt, params=params, adapter=self._adapter or own))

    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> ServedEvents:
        conversation = [Message(**message) for message in messages]
        asked = ChatRequest(messages=conversation, params=params, adapter=self._adapter)
        asked = with_settings(asked, self._engine.info.defaults)
        return self._events(asked if self._custom is None else with_custom(asked, self._custom))

    @property
    def max_context(self) -> int:
        return self._engine.info.max_context

    def close(self) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def _events(self, asked: PromptRequest | ChatRequest) -> ServedEvents:
        async def submit() -> EventStream:  # a stream must be created in the running loop
            return self._engine.submit(asked)

        return ServedEvents(self._runner, self._runner.run(submit()))


def the_adapter(config: EngineConfig) -> str | None:
    """Return the name of the adapter to use, of which there may be only one."""
    names = list(named_adapters(config.model.adapter))
    if len(names) > 1:
        raise InvalidConfig("only one --adapter may be given", param="adapter")
    return names[0] if names else None


def with_custom(asked: ChatRequest, custom: Customization) -> ChatRequest:
    """Apply a created model's parameters, messages and template to a request."""
    from tokenmill.server.ollama.options import sampling_settings

    return customized(with_settings(asked, sampling_settings(custom.parameters, max_context=None)), custom)


def with_settings(asked: ChatRequest, settings: dict[str, Any]) -> ChatRequest:
    """Apply a model's own sampling parameters to a request, except where a flag differs from its default."""
    usual = SamplingConfig().params()
    changes = {name: value for name, value in settings.items() if getattr(asked.params, name) == getattr(usual, name)}
    return msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, **changes)) if changes else asked


class ServedEvents(Iterator[Event]):
    """Events of one request as a plain iterator. The event loop runs only while it waits for the next event."""

    def __init__(self, runner: asyncio.Runner, stream: EventStream) -> None:
        self._runner, self._stream = runner, stream

    def __next__(self) -> Event:
        event = self._runner.run(next_event(self._stream))
        if event is None:
            raise StopIteration
        return event

    def stop(self) -> None:
        self._runner.get_loop().call_soon_threadsafe(self._stream.stop)

    def close(self) -> None:
        self._runner.run(self._stream.aclose())


async def next_event(stream: AsyncIterator[Event]) -> Event | None:
    """Return the next event; None after the last one."""
    return await anext(stream, None)


class Stop:
    """Handler of Ctrl-C during an answer: the first one stops the answer, the second one the program."""

    def __init__(self, events: Events) -> None:
        self.asked = False
        self._events = events

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._events.stop()


@contextmanager
def stoppable(events: Events) -> Generator[Stop, None, None]:
    """Make Ctrl-C stop the answer, also during prefill, and keep the engine."""
    stop = Stop(events)
    before = signal.signal(signal.SIGINT, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Answer:
    """The text of an answer so far, how long it took, and how it ended."""

    def __init__(self, asked_at: float | None = None) -> None:
        """`asked_at`: time of the request by the monotonic clock; by default now."""
        self.text = ""
        self._reported: Usage | None = None  # by the engine or server, at the first and last event
        self._num_tokens = 0  # received
        self.finish_reason: str | None = None
        self.was_stopped = False
        self._began = time.monotonic() if asked_at is None else asked_at
        self.first_s: float | None = None  # until the first token
        self.total_s = 0.0

    def add(self, event: Event) -> None:
        self.text += event.text
        self._reported = event.usage or self._reported
        self._num_tokens += len(event.token_ids) or bool(
            event.text or event.parts
        )  # a server sends one token per event
        self.finish_reason = event.finish_reason or self.finish_reason
        self.total_s = time.monotonic() - self._began
        if self.first_s is None and (event.text or event.parts or event.token_ids):
            self.first_s = self.total_s

    @property
    def usage(self) -> Usage | None:
        """Return the usage so far; for a stopped answer, the number of received tokens."""
        if self._reported is None or self.finish_reason is not None:
            return self._reported
        return msgspec.structs.replace(
            self._reported, completion_tokens=max(self._reported.completion_tokens, self._num_tokens)
        )

    @property
    def ending(self) -> str:
        """Return a note on why the answer ended; empty if the model ended it."""
        if self.was_stopped:
            return "(stopped)"
        return "(cut off: the answer reached its maximum length)" if self.finish_reason == "length" else ""

    def stats(self) -> str:
        """Return one line with tokens and speed of the prompt and of the answer."""
        usage = self.usage
        if self.first_s is None:
            return f"no tokens, {duration(self.total_s)}"
        answer_s = self.total_s - self.first_s
        if usage is None:  # stopped: the server reports usage only at the end
            return f"answer about {counted(self._num_tokens, 'token')} ({duration(answer_s)})"
        computed = usage.prompt_tokens - usage.cached_tokens
        cached = f", {usage.cached_tokens:,} of them cached" if usage.cached_tokens else ""
        speed_in = f"{computed / self.first_s:,.0f} tokens/s" if self.first_s else ""
        rate = f", {(usage.completion_tokens - 1) / answer_s:,.1f} tokens/s" if answer_s > 0 else ""
        prompt = f"prompt {counted(usage.prompt_tokens, 'token')}{cached} ({duration(self.first_s)}, {speed_in})"
        return f"{prompt}; answer {counted(usage.completion_tokens, 'token')} ({duration(answer_s)}{rate})"


def write_answer(
    events: Events, out: TextIO = sys.stdout, thoughts: TextIO = sys.stderr, *, asked_at: float | None = None
) -> Answer:
    """Stream the text to `out`, end with a line break, and free the sequence if it is stopped early.

    `asked_at` is the time of the request, since a server's first token may arrive before its events are read.

    Reasoning is shown dimmed on `thoughts` if that is a terminal, so that redirected output contains only the answer.
    """
    answer = Answer(asked_at)
    thinking, screen = ThoughtScreen(thoughts), AnswerScreen(out)
    try:
        with stoppable(events) as stop, without_echo():
            for event in events:
                thinking.show(event)
                answer.add(event)
                screen.write(event.text)
                out.flush()
                if stop.asked:
                    break
            answer.was_stopped = stop.asked
    finally:
        thinking.close()
        screen.close()
        events.close()
    if not answer.text.endswith("\n"):
        out.write("\n")
    out.flush()
    return answer


@contextmanager
def without_echo() -> Generator[None, None, None]:
    """Do not echo typed keys into the answer; they are kept for the next prompt."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class ThoughtScreen:
    """Shows a model's reasoning, dimmed, on a terminal; nothing elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_shown = out.isatty()
        self._styles = has_colours(out)
        self._is_dim = False

    def show(self, event: Event) -> None:
        if not self._is_shown:
            return
        thought = reasoning_of(event)
        if thought:
            self._out.write(thought if self._is_dim or not self._styles else DIM + thought)
            self._is_dim = True
            self._out.flush()
        if event.text:
            self.close()

    def close(self) -> None:
        """End the reasoning, before the answer or at the end."""
        if self._is_dim:
            self._out.write(f"{PLAIN}\n\n" if self._styles else "\n\n")
            self._out.flush()
        self._is_dim = False
