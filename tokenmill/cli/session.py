"""An open model and one answer at a time: what `run` and `chat` share."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TextIO

from tokenmill.cli.screen import PullScreen
from tokenmill.config import EngineConfig
from tokenmill.params import SamplingParams
from tokenmill.store import ResolvedModel, resolve_model
from tokenmill.types import Event


class Model(Protocol):
    """What is asked of an open model; `tokenmill.LLM` is one."""

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Event]: ...
    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> Iterator[Event]: ...
    def close(self) -> None: ...


def open_model(config: EngineConfig) -> Model:
    """Fetch the model if need be, with a progress bar, and load it."""
    fetch(config.model.model)
    from tokenmill.engine.llm import LLM

    model: Model = LLM(config)
    return model


def fetch(name: str) -> ResolvedModel:
    """Make sure that the model is on this machine; where it is."""
    with PullScreen() as screen:
        return resolve_model(name, progress=screen)


class Stop:
    """Whether Ctrl-C was pressed during an answer. The second time interrupts for good."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stoppable() -> Generator[Stop, None, None]:
    """Inside, Ctrl-C lets the step under way finish and then ends the answer, so that the engine stays whole."""
    stop = Stop()
    before = signal.signal(signal.SIGINT, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Answer:
    """The text so far and how it ended."""

    def __init__(self) -> None:
        self.text = ""
        self.last: Event | None = None
        self.was_stopped = False


def write_answer(events: Iterator[Event], out: TextIO = sys.stdout) -> Answer:
    """Write the text as it comes; end with a line break; free the sequence when it is stopped early."""
    answer = Answer()
    try:
        with stoppable() as stop:
            for event in events:
                answer.text += event.text
                answer.last = event
                out.write(event.text)
                out.flush()
                if stop.asked:
                    answer.was_stopped = True
                    break
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
    if not answer.text.endswith("\n"):
        out.write("\n")
        out.flush()
    return answer
