"""An ordeal for a server: faults and hostile clients, for some minutes, beside requests whose answers are known.

A `tokenmill serve` process is started (a scripted model, unless `--model` names another). Golden requests run all the
time; beside them one trial after another is made: its engine is killed and stopped, its clock jumps, its disk refuses
writes, its descriptors run out, clients vanish, do not read, come by the thousand, and send what nobody should. After
each trial the server has to be ready again. A golden request may be refused with a reason while an engine is down, and
is sent again; a wrong answer, a stream that is cut without an error, or a request that hangs is a fault.

    python benchmarks/ordeal.py [--minutes 10] [--model smollm2:135m] [--seed 1] [--only kill_engine] [--broken]

`--broken` serves with a fault built in (now and then a piece of an answer is lost): the ordeal has to find it, and ends
with exit code 1. Prints a table and, as the last line, one JSON object; exit code 1 if anything was lost, deviated or
kept growing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

HANG_S = 90.0
READY_S = 120.0
SCRIPT = [{"say": "word and another word " * 40, "token_delay_s": 0.001}]
BROKEN = """
import sys, itertools, msgspec
from tokenmill.engine.stream import EventBuffer
put, count = EventBuffer.put, itertools.count(1)
def lose(self, event):
    put(self, msgspec.structs.replace(event, text="") if next(count) % 997 == 0 else event)
EventBuffer.put = lose
from tokenmill.cli import main
sys.exit(main(sys.argv[1:]))
"""
JUMPING_CLOCK = """
import os, time
real, jump, read = time.time, os.path.join(os.path.dirname(__file__), "clock"), [float("-inf"), 0.0]
def jumping():
    now = time.monotonic()
    if now - read[0] > 0.2:
        try:  # a link tells without a descriptor, of which none may be left
            read[:] = now, float(os.readlink(jump))
        except (OSError, ValueError):
            pass
    return real() + read[1]
time.time = jumping
"""
EXPECTED_REFUSALS = {429, 500, 503}  # while an engine is down or a server is full; with a reason in the dialect


class TestedServer:
    """The process under trial."""

    def __init__(self, model: str, folder: Path, *, is_broken: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        start = ["-c", BROKEN] if is_broken else ["-m", "tokenmill"]
        self.log = folder / "server.log"
        self.clock = folder / "site" / "clock"  # seconds by which the clock of the server's processes is wrong
        self.clock.parent.mkdir()
        (self.clock.parent / "sitecustomize.py").write_text(JUMPING_CLOCK)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.clock.parent), *sys.path[1:]])}
        if model.startswith("scripted:"):
            environment["TOKENMILL_HOME"] = str(folder / "home")
        flags = ["--port", str(self.port), "--state-dir", str(folder / "state"), "--ledger", "--log-level", "warning"]
        with self.log.open("w") as output:
            self.child = subprocess.Popen(
                [sys.executable, *start, "serve", model, *flags],
                stdout=output,
                stderr=output,
                env=environment,
            )
        self.url = f"http://127.0.0.1:{self.port}"

    def set_clock(self, jump_s: float) -> None:
        aside = self.clock.with_name("aside")
        aside.symlink_to(str(jump_s))
        aside.replace(self.clock)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise SystemExit(f"the server ended with {self.child.returncode}:\n{self.log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server was not ready again within {READY_S:.0f} s")

    def engine(self) -> psutil.Process:
        """Return the engine process, the server's largest child; wait for its restart if it has just died."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                if children := psutil.Process(self.child.pid).children():
                    return max(children, key=lambda child: child.memory_info().rss)
            time.sleep(0.1)
        raise RuntimeError(f"the server had no engine within {READY_S:.0f} s")

    def held(self) -> dict[str, float]:
        front = psutil.Process(self.child.pid)
        return {
            "front_mb": front.memory_info().rss / 1e6,
            "descriptors": front.num_fds(),
            "threads": front.num_threads(),
            "processes": len(front.children(recursive=True)),
        }

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def close(self) -> int:
        self.child.terminate()
        try:
            return self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            return -9


def chat(number: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Question {number}"}
    return {"model": "golden", "messages": [message], "max_tokens": 24, "temperature": 0, "seed": 1, **more}


class Goldens:
    """Requests whose answers are known, sent all the time by several clients."""

    def __init__(self, server: TestedServer, name: str) -> None:
        self._server, self._name = server, name
        self._http = httpx.Client(timeout=HANG_S)
        self.expected = [self._answer(number, stream=False) for number in range(8)]
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(place,)) for place in range(4)]

    def _answer(self, number: int, *, stream: bool) -> str:
        body = {**chat(number), "model": self._name, "stream": stream}
        reply = self._http.post(self._server.url + "/v1/chat/completions", json=body)
        if reply.status_code != 200:
            raise Refused(reply.status_code, reply.text)
        if not stream:
            return str(reply.json()["choices"][0]["message"]["content"])
        text, is_whole = "", False
        for line in reply.text.splitlines():
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise Refused(503, line)
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if not is_whole:
            raise RuntimeError("a stream was cut without an error")
        return text

    def _run(self, place: int) -> None:
        rng = random.Random(place)
        while not self._ends.is_set():
            number = rng.randrange(len(self.expected))
            try:
                said = self._answer(number, stream=rng.random() < 0.5)
            except Refused as refused:
                self.counts["refused"] += 1
                if refused.status not in EXPECTED_REFUSALS:
                    self.faults.append(f"golden {number}: {refused}")
                time.sleep(0.2)
            except httpx.ConnectError:
                self.counts["not connected"] += 1
                time.sleep(0.2)
            except (httpx.HTTPError, RuntimeError, ValueError, KeyError) as problem:
                self.faults.append(f"golden {number}: {type(problem).__name__}: {problem}")
                time.sleep(0.2)
            else:
                self.counts["answered"] += 1
                if said != self.expected[number]:
                    self.faults.append(f"golden {number} deviates: {said[:80]!r}")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self._http.close()


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:200]}")
        self.status = status


# ── trials ─────────────────────────────────────────────────────────────────────────────────────────────


def kill_engine(server: TestedServer, rng: random.Random) -> None:
    server.engine().kill()


def stop_engine(server: TestedServer, rng: random.Random) -> None:
    engine = server.engine()
    engine.suspend()
    time.sleep(rng.uniform(2, 12))
    with contextlib.suppress(psutil.NoSuchProcess):  # the watchdog has ended it
        engine.resume()


def clock_jumps(server: TestedServer, rng: random.Random) -> None:
    """An hour back, a day ahead, and to 1970, as by a machine whose clock is put right."""
    for jump_s in (-3600.0, 86_400.0, -time.time(), 0.0):
        server.set_clock(jump_s)
        time.sleep(1.5)


def disk_refuses(server: TestedServer, rng: random.Random) -> None:
    """No file can grow, as on a full disk, for some seconds."""
    with limited(server, resource.RLIMIT_FSIZE, 0):
        time.sleep(3)


def descriptors_run_out(server: TestedServer, rng: random.Random) -> None:
    open_now = psutil.Process(server.child.pid).num_fds()
    with limited(server, resource.RLIMIT_NOFILE, open_now + 8), contextlib.ExitStack() as stack:
        for _ in range(60):
            with contextlib.suppress(OSError):
                stack.enter_context(server.connect())
        time.sleep(2)


@contextlib.contextmanager
def limited(server: TestedServer, what: int, limit: int) -> Iterator[None]:
    """Limit the server's process for a while; an engine that was started meanwhile has inherited the limit."""
    before = resource.prlimit(server.child.pid, what)
    resource.prlimit(server.child.pid, what, (limit, before[1]))
    try:
        yield
    finally:
        for pid in (server.child.pid, *(child.pid for child in psutil.Process(server.child.pid).children())):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, what, before)


def vanishing_clients(server: TestedServer, rng: random.Random) -> None:
    for number in range(100):
        with contextlib.closing(server.connect()) as connection:
            connection.sendall(post(chat(number, stream=True, max_tokens=200)))
            if number % 2:
                connection.recv(200)


def clients_that_do_not_read(server: TestedServer, rng: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(40):
            connection = stack.enter_context(server.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.sendall(post(chat(number, stream=True, max_tokens=400, logprobs=True, top_logprobs=5)))
        time.sleep(4)


def thousand_connections(server: TestedServer, rng: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            connection = stack.enter_context(server.connect())
            if number % 3 == 0:
                connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{")
        time.sleep(1)


HOSTILE: tuple[object, ...] = (
    b"[" * 200_000,
    b'{"a":' * 50_000,
    b"\xff\xfe\x00" * 1000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    {"messages": "x" * 1_000_000},
    {"messages": [{"role": "user", "content": "a"}] * 8192},
    chat(0, max_tokens=-1),
    chat(0, n=10**9),
    chat(0, temperature=float(10**300)),
    chat(0, stop=["x"] * 10_000),
    chat(0, logit_bias={str(number): 1e308 for number in range(5000)}),
    chat(0, cache_salt="\x00\x1b[2J"),
    chat(0, priority=-(2**31)),
    chat(0, chat_template="{% set x = [1] %}{% for i in range(9999999) %}{{ x * 9999999 }}{% endfor %}"),
    chat(0, guided_regex="(((a{1,500}){1,500}){1,500}){1,500}"),
    chat(0, guided_json={"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(3000)}}),
    chat(0, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/a/b"}}}),
    chat(0, stop_regex="[ab ]*a[ab ]{290}Z"),
)


def hostile_bodies(server: TestedServer, rng: random.Random) -> None:
    with httpx.Client(timeout=HANG_S) as client:
        for body in rng.sample(HOSTILE, len(HOSTILE)):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            reply = client.post(server.url + "/v1/chat/completions", content=content, headers=headers)
            if reply.status_code >= 500 and reply.status_code != 503:
                raise RuntimeError(f"{reply.status_code} for {content[:80]!r}: {reply.text[:200]}")


def hostile_heads(server: TestedServer, rng: random.Random) -> None:
    heads = (
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        b"".join([b"GET / HTTP/1.1\r\n", *(b"x%d: 1\r\n" % number for number in range(20_000)), b"\r\n"]),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
        bytes(rng.randrange(256) for _ in range(5000)),
        b"GET /ping\r\n\r\n",
    )
    for head in heads:
        with contextlib.closing(server.connect()) as connection, contextlib.suppress(OSError):
            connection.sendall(head)
            connection.recv(1000)


def malformed_models(server: TestedServer, rng: random.Random) -> None:
    """Files that are no models end `tokenmill run` with one line and exit code 1 or 2, without a traceback."""
    with tempfile.TemporaryDirectory(prefix="ordeal-") as folder:
        for number, content in enumerate((b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, rng.randbytes(4096))):
            file = Path(folder) / f"{number}.gguf"
            file.write_bytes(content)
            command = [sys.executable, "-m", "tokenmill", "run", "--model", str(file), "Hi"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
            if ended.returncode not in (1, 2) or "Traceback" in ended.stderr:
                raise RuntimeError(f"a malformed file ended with {ended.returncode}: {ended.stderr[-200:]}")


def post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


Trial = Callable[[TestedServer, random.Random], None]
TRIALS: dict[str, Trial] = {
    trial.__name__: trial
    for trial in (
        kill_engine,
        stop_engine,
        clock_jumps,
        disk_refuses,
        descriptors_run_out,
        vanishing_clients,
        clients_that_do_not_read,
        thousand_connections,
        hostile_bodies,
        hostile_heads,
        malformed_models,
    )
}
KILLS = 60.0  # seconds at least between two kills: six in five minutes, and the engine is given up


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", help="a model instead of a scripted one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TRIALS, action="append", help="make these trials alone")
    parser.add_argument("--broken", action="store_true", help="serve with a fault that the ordeal has to find")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ordeal-") as folder:
        script = Path(folder) / "golden.json"
        script.write_text(json.dumps(SCRIPT))
        model = asked.model or f"scripted:{script}"
        server = TestedServer(model, Path(folder), is_broken=asked.broken)
        try:
            server.wait_ready()
            report = ordeal(server, asked.model or "golden", asked)
        finally:
            exit_code = server.close()
    report["exit_code"] = exit_code
    if exit_code != 0:
        report["faults"].append(f"the server ended with exit code {exit_code}")
    for name, count in report["trials"].items():
        print(f"{name:28} {count}")
    print(f"golden requests: {report['golden']}; held before {report['before']}, after {report['after']}")
    for fault in report["faults"][:20]:
        print("FAULT", fault)
    print(json.dumps(report))
    return 1 if report["faults"] else 0


def ordeal(server: TestedServer, name: str, asked: argparse.Namespace) -> dict[str, Any]:
    rng, done, faults = random.Random(asked.seed), Counter[str](), list[str]()
    goldens = Goldens(server, name)
    chosen = asked.only or list(TRIALS)
    goldens.start()
    time.sleep(2)
    before, killed_s = server.held(), 0.0
    deadline, waiting = time.monotonic() + asked.minutes * 60, list[str]()
    try:
        while time.monotonic() < deadline:
            waiting = waiting or rng.sample(chosen, len(chosen))
            trial = waiting.pop()
            if trial == "kill_engine" and time.monotonic() - killed_s < KILLS:
                if chosen == ["kill_engine"]:
                    time.sleep(1)
                continue
            killed_s = time.monotonic() if trial == "kill_engine" else killed_s
            try:
                TRIALS[trial](server, rng)
                done[trial] += 1
                server.wait_ready()
            except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as problem:
                faults.append(f"{trial}: {type(problem).__name__}: {problem}")
        time.sleep(5)
    finally:
        goldens.stop()
    after = server.held()
    if after["descriptors"] > before["descriptors"] + 30:
        faults.append(f"descriptors grew from {before['descriptors']} to {after['descriptors']}")
    if after["front_mb"] > before["front_mb"] * 1.5 + 100:
        faults.append(f"memory of the front grew from {before['front_mb']:.0f} to {after['front_mb']:.0f} MB")
    if not goldens.counts["answered"]:
        faults.append("no golden request was answered")
    return {
        "benchmark": "ordeal",
        "minutes": asked.minutes,
        "trials": dict(done),
        "golden": dict(goldens.counts),
        "before": {key: round(value) for key, value in before.items()},
        "after": {key: round(value) for key, value in after.items()},
        "faults": goldens.faults + faults,
    }


if __name__ == "__main__":
    sys.exit(main())
