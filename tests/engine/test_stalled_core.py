"""A core that is stopped or stuck is noticed: new requests are refused, running ones go on with it or fail by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.engine import core_supervisor
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.heartbeat import Heartbeat
from tokenmill.errors import EngineDead
from tokenmill.params import SamplingParams
from tokenmill.types import PromptRequest

SAID = "one two three four five six seven eight nine ten " * 4
ASKED = PromptRequest(prompt="Count:", params=SamplingParams(max_tokens=200))


async def until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_a_stopped_core_is_noticed_and_given_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_supervisor, "STALLED_AFTER_S", 2.5)
    monkeypatch.setattr(core_supervisor, "HEALTH_CHECK_S", 0.1)
    file = tmp_path / "script.json"
    file.write_text(json.dumps([{"say": SAID, "token_delay_s": 0.01}]))

    async def try_it() -> None:
        engine = await AsyncEngine.start(f"scripted:{file}")
        try:
            pid = engine.core.pid
            stream = engine.submit(ASKED)
            text = (await anext(stream)).text
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: engine.health().state == "stalled")
            with pytest.raises(EngineDead, match="no heartbeat"):
                engine.submit(ASKED)
            os.kill(pid, signal.SIGCONT)
            text += "".join([event.text async for event in stream])
            assert text == SAID, "a request goes on with its core"
            await until(lambda: engine.health().state == "ready")

            stream = engine.submit(ASKED)
            text = (await anext(stream)).text
            monkeypatch.setattr(core_supervisor, "KILLED_AFTER_S", 3.0)
            os.kill(pid, signal.SIGSTOP)
            assert text + "".join([event.text async for event in stream]) == SAID, "or with the next one"
            assert engine.core.pid != pid
        finally:
            await engine.close()

    asyncio.run(try_it())


@pytest.mark.parametrize(("turns", "works", "beats"), [(5, False, False), (5, True, True), (-1, False, True)])
def test_a_loop_that_is_stuck_has_no_heartbeat(turns: int, works: bool, beats: bool) -> None:
    seen: list[float] = []
    heart = Heartbeat(lambda: seen.append(0), lambda: turns, time.monotonic if works else lambda: 0.0, 0.02)
    heart.start()
    deadline = time.monotonic() + (30.0 if beats else 0.2)
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    heart.stop()
    assert bool(seen) is beats
