"""How service managers stop a server: SIGTERM to every one of its processes at once."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from tests.support.server_process import ServerProcess, is_alive, real_server

NUM_STREAMS = 4


def last_line(process: ServerProcess, all_have_begun: Barrier) -> str:
    asked = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "n": 2, "stream": True, "ignore_eos": True}
    with process.http.stream("POST", "/v1/completions", json=asked) as reply:
        lines = reply.iter_lines()
        next(lines)
        all_have_begun.wait(60)
        return [line for line in lines if line][-1]


def test_sigterm_to_all_processes_lets_streams_end(stories_dir: Path) -> None:
    all_have_begun = Barrier(NUM_STREAMS + 1)
    with real_server(stories_dir, dtype="float32") as process, ThreadPoolExecutor(NUM_STREAMS) as pool:
        process.wait_for("ready", 120)
        (engine,) = process.children()
        lines = [pool.submit(last_line, process, all_have_begun) for _ in range(NUM_STREAMS)]
        all_have_begun.wait(60)
        for pid in (engine, process.child.pid):
            os.kill(pid, signal.SIGTERM)
        assert {line.result() for line in lines} == {"data: [DONE]"}
        assert process.wait(20) == 0 and not is_alive(engine)
