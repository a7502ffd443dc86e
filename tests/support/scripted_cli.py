"""The real command line with a scripted model instead of an engine; tests run it as a separate process.

The model echoes its input as JSON. A prompt with "forever" is answered with dots until the stream is closed, one with
"fail" raises an expected error, and one with "bug" an unexpected one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

from tokenmill.cli import main, session
from tokenmill.config import EngineConfig
from tokenmill.errors import RequestFailed
from tokenmill.params import SamplingParams
from tokenmill.types import Event, Usage


class ScriptedEvents(Iterator[Event]):
    def __init__(self, events: Generator[Event, None, None]) -> None:
        self._events, self.close = events, events.close

    def __next__(self) -> Event:
        return next(self._events)

    def stop(self) -> None:
        """Do nothing: the next event always comes soon."""


class ScriptedCliModel:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def stream(self, prompt: str, params: SamplingParams) -> ScriptedEvents:
        return ScriptedEvents(self._answer({"raw": prompt}, prompt, params))

    max_context = 100

    def stream_chat(self, messages: list[dict[str, Any]], params: SamplingParams) -> ScriptedEvents:
        return ScriptedEvents(self._answer({"messages": messages}, messages[-1]["content"], params))

    def _answer(self, asked: dict[str, Any], prompt: str, params: SamplingParams) -> Generator[Event, None, None]:
        if "fail" in prompt:
            raise RequestFailed("the answer could not be computed")
        if "bug" in prompt:
            raise KeyError("bug")
        try:
            if "forever" in prompt:
                while True:
                    yield Event(request_id="r", text=".")
                    time.sleep(0.01)
            asked |= {"model": self.config.model.model, "max_context": self.config.model.max_context}
            asked |= {"temperature": params.temperature, "seed": params.seed, "threads": self.config.ops.threads}
            asked |= {"stop": params.stop, "weights_seed": self.config.model.seed}
            asked |= {"context_shift": params.context_shift}
            text = json.dumps(asked, ensure_ascii=False)
            for at in range(0, len(text), 7):
                yield Event(request_id="r", text=text[at : at + 7])
            usage = Usage(prompt_tokens=3, completion_tokens=5)
            yield Event(request_id="r", finish_reason="stop", usage=usage)
        finally:
            print("stream closed", file=sys.stderr)

    def close(self) -> None:
        print("model closed", file=sys.stderr)


if __name__ == "__main__":
    session.open_model = ScriptedCliModel
    sys.exit(main())
