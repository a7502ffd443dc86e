"""A server whose model runs on two ranks: a rank that is killed or stopped costs a pause, and no stream its tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, free_port, is_alive, running
from tokenmill.ops.cpu import is_available

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_available()[0], reason=is_available()[1])]
ASKED = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 80, "temperature": 0.0, "ignore_eos": True}


def rank_of(process: ServerProcess) -> int:
    """The process of rank 1, once there is one."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        for core in process.children():
            listed = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(core)], capture_output=True, text=True)
            for line in listed.stdout.splitlines():
                pid, _, command = line.strip().partition(" ")
                if command == "rank-1":
                    return int(pid)
        time.sleep(0.05)
    raise AssertionError(f"there is no rank: {process.output()}")


def answer(process: ServerProcess) -> str:
    reply = process.http.post("/v1/completions", json=ASKED, timeout=240)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_streams_go_on_with_the_same_tokens_when_a_rank_dies_or_stops(stories_dir: Path) -> None:
    port = free_port()
    command = ["-m", "tokenmill", "serve", str(stories_dir), "--served-name", "tiny", "--tp", "2", "--threads", "1",
               "--port", str(port), "--max-context", "256", "--num-blocks", "100"]  # fmt: skip
    with running(command, port) as process:
        process.wait_for("ready", 240)
        expected = answer(process)
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP):
            rank = rank_of(process)
            with process.http.stream("POST", "/v1/completions", json={**ASKED, "stream": True}, timeout=240) as reply:
                lines = reply.iter_lines()
                first = next(lines)
                os.kill(rank, number)
                rest = list(lines)
            assert "[DONE]" in rest[-2], rest[-3:]
            pieces = [json.loads(line[6:]) for line in (first, *rest) if line.startswith("data: {")]
            assert "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"]) == expected
            deadline_s = time.monotonic() + 60
            while is_alive(rank):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            rank_of(process)  # of the next group: until then the server may not know yet that this one is gone
            process.wait_for("ready", 240)
            assert answer(process) == expected
        assert "was stopped" in process.output() and "Current thread" in process.output(), "stacks are logged"
        last = rank_of(process)
        process.terminate()
        process.wait(60)
    assert not is_alive(last)
