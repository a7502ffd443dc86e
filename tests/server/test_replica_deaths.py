"""60 mixed streams over three engine processes, one of which is killed every three seconds: all end as they should."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess, free_port, running

NUM_STREAMS = 60
KILL_EVERY_S = 3.0
LEAST_KILLS = 6


def bodies() -> list[dict[str, Any]]:
    """A mix of what keeps something besides its tokens."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "n": 3},
        {"guided_regex": r"(the (cat|dog) (sat|ran)\. ){40,80}", "temperature": 1.0},
        {"mirostat_mode": 2, "mirostat_tau": 4.0},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"logprobs": 2, "temperature": 0.7},
    ]
    return [
        {
            "model": "stories",
            "prompt": f"Once upon a time, {number} little",
            "seed": number,
            "max_tokens": 1200,
            "ignore_eos": True,
            **kinds[number % len(kinds)],
        }
        for number in range(NUM_STREAMS)
    ]


def answers(process: ServerProcess) -> list[Any]:
    def ask(body: dict[str, Any]) -> Any:
        reply = process.http.post("/v1/completions", json=body, timeout=300)
        return reply.json().get("choices", (reply.status_code, reply.text))

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(ask, bodies()))


def kill_now_and_then(process: ServerProcess, ends: threading.Event, killed: list[int]) -> None:
    rng = random.Random(3)
    while not ends.wait(KILL_EVERY_S):
        ready = [one for one in process.http.get("/replicas").json()["data"] if one["state"] == "ready"]
        if len(ready) > 1:
            victim = rng.choice(ready)["engine_pid"]
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)


@pytest.mark.slow
def test_streams_end_as_if_no_engine_had_died(stories_dir: Path) -> None:
    port = free_port()
    command = ["-m", "tokenmill", "serve", str(stories_dir), "--served-name", "stories", "--replicas", "3"]
    command += ["--threads", "1", "--context-shift", "--num-blocks", "2000", "--port", str(port), "--no-state"]
    with running(command, port) as process:
        process.wait_for("ready")
        expected = answers(process)
        assert all(isinstance(one, list) for one in expected), [one for one in expected if not isinstance(one, list)]
        ends, killed = threading.Event(), list[int]()
        killing = threading.Thread(target=kill_now_and_then, args=(process, ends, killed))
        killing.start()
        try:
            deadline = time.monotonic() + 300
            while len(killed) < LEAST_KILLS and time.monotonic() < deadline:
                assert answers(process) == expected
        finally:
            ends.set()
            killing.join()
        assert len(killed) >= LEAST_KILLS
