"""A server as a separate process: its output, its exit and its child processes.

Run as a script, it serves a scripted engine; the words after the port select how that engine misbehaves; numbers are
further ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
RESERVED: list[socket.socket] = []  # held by `free_port` until this process ends
REAL = """
import sys, json
from tokenmill.config import CacheConfig, EngineConfig, ModelConfig, OpsConfig, SchedulerConfig
from tokenmill.cli.serve import planned_memory
from tokenmill.config.served_models import ServedModelConfig
from tokenmill.config.server import ServerConfig
from tokenmill.server.run import run_server
asked = json.loads(sys.argv[1])
config = EngineConfig(
    model=ModelConfig(
        model=asked["model"], served_name="tiny", dtype=asked.get("dtype", "auto"), **asked.get("adapters", {})
    ),
    cache=CacheConfig(num_blocks=asked.get("num_blocks")),
    scheduler=SchedulerConfig(**asked.get("scheduler", {})),
    ops=OpsConfig(threads=1),
)
server = ServerConfig(port=(asked["port"],), drain_timeout_s=asked.get("drain_timeout_s", 30))
sys.exit(run_server([ServedModelConfig(config, is_pinned=True)], server, planned_memory))
"""


class ServerProcess:
    def __init__(self, command: list[str], port: int, settings: Mapping[str, str]) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **settings}
        # A file, since a pipe that is not read would fill up and block the server. Closed in `close`.
        self._printed = tempfile.NamedTemporaryFile("w")  # noqa: SIM115
        self.child = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=self._printed, stderr=self._printed
        )
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False, limits=httpx.Limits(max_connections=None))

    def health(self) -> str:
        try:
            return str(self.http.get("/health").json()["status"])
        except httpx.TransportError:
            return "unreachable"

    def wait_for(self, state: str, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while (seen := self.health()) != state:
            assert self.child.poll() is None, f"the server ended: {self.output()}"
            assert time.monotonic() < deadline, f"still {seen} after {within_s} s"
            time.sleep(0.02)

    def make_ready(self) -> None:
        """Let a scripted engine started with `unready` finish loading. It must be loading already, since it handles
        the signal only then."""
        self.child.send_signal(signal.SIGUSR1)

    def terminate(self) -> None:
        self.child.send_signal(signal.SIGTERM)

    def wait(self, within_s: float = 30.0) -> int:
        return self.child.wait(within_s)

    def output(self) -> str:
        """Everything printed so far. The file is opened again, since the server shares the position of ours: reading
        there would move where the server writes next, over what it has already printed."""
        return Path(self._printed.name).read_text(errors="replace")

    def close(self) -> None:
        self.http.close()
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait(10)
        failed = [line for line in self.output().splitlines() if is_failed_step(line)]
        self._printed.close()
        assert not failed, failed

    def children(self) -> list[int]:
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.child.pid)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split() if is_alive(int(pid))]


def is_failed_step(line: str) -> bool:
    """Tell whether a log line reports that a step raised, whatever became of its requests."""
    return "a step with" in line and "rows failed" in line


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextmanager
def running(command: list[str], port: int, **settings: str) -> Iterator[ServerProcess]:
    """Run a server process; `settings` are additional environment variables."""
    process = ServerProcess(command, port, settings)
    try:
        yield process
    finally:
        process.close()


async def wait_for_ready_signal() -> None:
    is_ready = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, is_ready.set)
    await is_ready.wait()


def main(port: int, words: list[str]) -> int:
    from tests.support.fake_engine import STORY, FakeEngine
    from tokenmill.config.server import ServerConfig
    from tokenmill.errors import DamagedFile, TokenmillError
    from tokenmill.observe.log import configure_logging
    from tokenmill.observe.metrics import Metrics
    from tokenmill.server import run

    run.FLUSH_S = 1 if "talkative" in words else 60  # short for the tests of clients that do not read
    configure_logging()

    async def start() -> FakeEngine:
        if "unready" in words:
            await wait_for_ready_signal()
        if "damaged" in words:
            raise DamagedFile("model.gguf is truncated", hint="pull it again")
        if "talkative" in words:
            return FakeEngine(answer=STORY * 60)
        return FakeEngine(delay_s=5.0 if "slow" in words else 0.05, is_held="held" in words)

    ports = (port, *(int(word) for word in words if word.isdigit()))
    keys = next((Path(word.removeprefix("keys:")) for word in words if word.startswith("keys:")), None)
    config = ServerConfig(port=ports, drain_timeout_s=0.5 if "impatient" in words else 20, keys_file=keys)
    try:
        return run.serve(start, config, Metrics())
    except TokenmillError as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        return error.exit_code


def free_port() -> int:
    """Return a port for a server to be started later. It is outside the range from which the system assigns ports,
    and a Unix socket's name, held until this process ends, keeps other tests from choosing it too."""
    for port in random.sample(range(10_000, 32_000), 200):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0tokenmill-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
            continue
        RESERVED.append(name)
        return port
    raise AssertionError("no port is free")


def real_server(model: Path, **settings: Any) -> Any:
    port = free_port()
    return running(["-c", REAL, json.dumps({"model": str(model), "port": port, **settings})], port)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
