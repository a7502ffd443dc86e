"""Stages of a pipeline that join their core over TCP, as from other machines: the same answers. None without a key."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ROOT, free_port, is_alive
from tokenmill import LLM, SamplingParams
from tokenmill.engine.joined_ranks import KEY_VARIABLE, RANK, RankListener, connect
from tokenmill.errors import InvalidConfig, PeerDied
from tokenmill.ops.cpu import is_available

KEY = "a key that all ranks have"
SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 120, "max_context": 128}
needs_native = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
PROMPTS = ["Once upon a time", "One day, a girl", "Tom and his dog went to the park to"]
PARAMS = SamplingParams(max_tokens=16, temperature=0.8, seed=3, n=2, logprobs=1)


def said(llm: LLM) -> list[Any]:
    answers = llm.generate(PROMPTS, PARAMS, progress=False)
    return [(list(one.token_ids), one.logprobs) for answer in answers for one in answer.outputs]


@contextmanager
def stage(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another machine's process, which joins whatever core waits there."""
    command = [sys.executable, "-m", "tokenmill", "host", "--join", f"tcp://127.0.0.1:{port}", "--ends-with-parent"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, KEY_VARIABLE: KEY})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def children(pid: int) -> list[int]:
    """The processes that any thread of this one has started."""
    found = [task.joinpath("children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for each in found for child in each if is_alive(int(child))]


def test_stages_on_other_machines_say_what_one_rank_says(stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    expected, port = said(LLM(str(stories_dir), **SETTINGS)), free_port()
    with stage(port) as other, stage(port):
        llm = LLM(str(stories_dir), pp=3, stages_at=f"127.0.0.1:{port}", **SETTINGS)
        assert said(llm) == expected
        other.terminate()
        other.wait(60)
        with pytest.raises(PeerDied):
            said(llm)
        llm.close()
        with stage(port):  # the other one has come back by itself
            assert said(LLM(str(stories_dir), pp=3, stages_at=f"127.0.0.1:{port}", **SETTINGS)) == expected


def wait_until_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline, "nothing is left"
        time.sleep(0.05)


@needs_native
@pytest.mark.parametrize(
    ("lost", "number"),
    [
        ("second", signal.SIGKILL),
        pytest.param("first", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("second", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("own", signal.SIGKILL, marks=pytest.mark.slow),
    ],
    ids=["killed", "first stopped", "second stopped", "killed here"],
)
def test_a_stage_on_another_machine_may_have_several_ranks(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, lost: str, number: signal.Signals
) -> None:
    """A rank that is killed or stopped ends the group on both machines, and the machine waits for the next one."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    expected, port = said(LLM(str(stories_dir), **SETTINGS)), free_port()
    with stage(port) as machine:
        llm = LLM(str(stories_dir), tp=2, pp=2, stages_at=f"127.0.0.1:{port}", **SETTINGS)
        assert said(llm) == expected
        (first,) = children(machine.pid)
        (second,) = children(first)
        own = [pid for pid in children(os.getpid()) if Path(f"/proc/{pid}/comm").read_text().startswith("rank-")]
        assert len(own) == 1, "the other rank of the first stage"
        os.kill({"first": first, "second": second, "own": own[0]}[lost], number)
        with pytest.raises(PeerDied):
            said(llm)
        llm.close()
        wait_until_gone([first, second, *own])
        if number == signal.SIGSTOP or lost == "own":
            llm = LLM(str(stories_dir), tp=2, pp=2, stages_at=f"127.0.0.1:{port}", **SETTINGS)
            assert said(llm) == expected
            llm.close()
        started = children(machine.pid)
    wait_until_gone(started)


def test_nobody_joins_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = RankListener("127.0.0.1", 0, KEY.encode())
    found: list[str] = []

    def accept() -> None:
        with suppress(OSError):
            found.append(listener.accept(RANK, time.monotonic() + 60)[1])

    waiting = threading.Thread(target=accept)
    waiting.start()
    with pytest.raises(InvalidConfig, match="different key"):
        connect("127.0.0.1", listener.port, RANK, b"a key that is wrong", time.monotonic() + 60)
    with socket.create_connection(("127.0.0.1", listener.port)) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert not found
    connect("127.0.0.1", listener.port, RANK, KEY.encode(), time.monotonic() + 60).close()
    waiting.join(60)
    assert found == ["127.0.0.1"]
    listener.close()


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"pp": 2, "stages_at": "127.0.0.1:0"}, ""), ({"stages_at": "127.0.0.1:0"}, KEY),
     ({"pp": 2, "link": "threads", "stages_at": "127.0.0.1:0"}, KEY), ({"pp": 2, "stages_at": "nowhere"}, KEY)],
)  # fmt: skip
def test_what_other_machines_cannot_do_is_refused_by_name(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(InvalidConfig) as refusal:
        LLM(str(stories_dir), **settings, **SETTINGS)
    assert refusal.value.param == "stages_at"
