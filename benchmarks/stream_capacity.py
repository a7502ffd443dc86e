"""How many tokens a second the server can carry around a model: scheduler, link, text, SSE, sockets; no arithmetic.

Three real processes: a core whose steps take a given time and draw one token for every sequence, the front of
`tokenmill serve` before it, and a client that reads all streams as plainly as possible.

    core: plan, apply, encode ══ unix socket ══ front: decode, detokenise, render, write ══ TCP ══ client

What counts is CPU time a token, of each thread that does it, because a busy machine does not change it: a thread that
takes 20 us a token carries 50,000 tokens a second. Prints a table and, as the last line, one JSON object.

    python benchmarks/stream_capacity.py [--streams 1,16,128,512] [--step-ms 5] [--tokens 256] [--model smollm2:135m]

`--traces` lets the front send spans to a collector that takes everything and reads nothing; `front_whole_us` is all CPU
time of the front for one answer, until its span is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenmill.config.by_name import engine_config
from tokenmill.config.engine import SchedulerConfig
from tokenmill.config.server import ServerConfig
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.core import EngineCore
from tokenmill.engine.core_client import ProcessCoreClient
from tokenmill.engine.core_main import SocketMailbox
from tokenmill.engine.core_process import CoreProcess
from tokenmill.engine.frontend import load_frontend
from tokenmill.engine.loop import run_loop
from tokenmill.engine.status import CoreInfo
from tokenmill.guided.masks import StepMasks
from tokenmill.kv.cache import KVCache
from tokenmill.observe.metrics import Metrics
from tokenmill.scheduler import Scheduler
from tokenmill.server.gate import ServedEngine
from tokenmill.server.run import serve
from tokenmill.types import RowInit, RowResult, StepPlan, StepResult

MAX_CONTEXT = 2048
BLOCK_SIZE = 16
MAX_ROWS = 1024
TOKEN_S = 20e-6  # what a step takes longer for each token fed; 8 GB of weights on a large GPU behave like that
WORD = " the"  # what the model always says
SPANS_SENT_S = 7.0  # spans are sent every five seconds


# ── the core's process ─────────────────────────────────────────────────────────────────────────────────


class Metronome:
    """A runner without a model: a step takes its time and brings a token to each row that wants one."""

    depth = 1

    def __init__(self, step_s: float, token_id: int, token_s: float = TOKEN_S) -> None:
        self._step_s, self._token_s = step_s, token_s
        self._token_id = token_id
        self._launched: dict[int, StepPlan] = {}

    def continues(self, new: RowInit) -> bool:
        return False

    def launch(self, plan: StepPlan) -> int:
        self._launched[plan.step] = plan
        return plan.step

    def draw(self, ticket: int, masks: StepMasks) -> None:
        pass

    def collect(self, ticket: int) -> StepResult:
        plan = self._launched.pop(ticket)
        ends = time.monotonic() + self._step_s + plan.num_tokens * self._token_s
        drawn = [RowResult(row=row.row, token_ids=[self._token_id]) for row in plan.rows if row.sample]
        time.sleep(max(0.0, ends - time.monotonic()))
        return StepResult(step=ticket, rows=drawn)

    def run_largest_step(self, token_budget: int, step_bytes: int, while_compiling: Callable[[], object]) -> None:
        pass

    def next_idle_task(self) -> bool:
        return False


def run_core(
    runner: Metronome,
    folder: str,
    parent_pid: int,
    *,
    max_context: int = MAX_CONTEXT,
    num_blocks: int = MAX_ROWS * MAX_CONTEXT // BLOCK_SIZE,
    token_budget: int = 8192,
    max_running: int = MAX_ROWS,
) -> int:
    cache = KVCache(windows=(None,), num_blocks=num_blocks, block_size=BLOCK_SIZE)
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget)
    scheduler = Scheduler(config=config, cache=cache, max_rows=MAX_ROWS, clock=time.monotonic)
    info = CoreInfo(
        max_context=max_context,
        num_blocks=cache.num_usable,
        block_size=BLOCK_SIZE,
        max_running=max_running,
        pid=os.getpid(),
    )
    mailbox = SocketMailbox(folder, parent_pid)
    mailbox.receive(None)  # the message to start, which names a model
    run_loop(EngineCore(scheduler, runner, info), mailbox)
    mailbox.close()
    return 0


# ── the front's process ────────────────────────────────────────────────────────────────────────────────


def run_front(model: str, port: int, core: list[str], otlp_endpoint: str | None = None) -> int:
    """Serve before a core that `python *core TOKEN_ID` starts."""
    config = engine_config(model, {})

    async def start_engine() -> ServedEngine:
        frontend = load_frontend(config)
        assert frontend.tokenizer is not None
        (token_id,) = frontend.tokenizer.encode(WORD, add_special_tokens=False)
        child = CoreProcess([*core, str(token_id)])
        engine = AsyncEngine(frontend, lambda: ProcessCoreClient(config, frontend.model_path, child))
        await engine.open()
        return engine

    settings = ServerConfig(
        port=(port,), any_model_name=True, state=False, log_level="warning", otlp_endpoint=otlp_endpoint
    )
    return serve(start_engine, settings, Metrics(model=model))


@contextmanager
def serving(model: str, step_s: float, otlp_endpoint: str) -> Iterator[tuple[int, int]]:
    """Process id and port of a front that answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "frontend", model, str(port), str(step_s), otlp_endpoint]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as frontend:
        try:
            while not answers(port):
                if frontend.poll() is not None:
                    raise SystemExit(f"the server ended with exit code {frontend.returncode}")
                time.sleep(0.05)
            yield frontend.pid, port
        finally:
            frontend.send_signal(signal.SIGTERM)
            frontend.wait(60)


@contextmanager
def collecting(is_wanted: bool) -> Iterator[str]:
    """The address of a collector of spans; empty where none is wanted."""

    class Taken(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    if not is_wanted:
        yield ""
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Taken) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{collector.server_port}"
        collector.shutdown()


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            return connection.recv(16).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


# ── the client's process ───────────────────────────────────────────────────────────────────────────────


class StreamCounter:
    """Many answers read at once: words and chunks are counted, nothing is parsed."""

    def __init__(self, port: int, num_streams: int, num_tokens: int) -> None:
        self.num_words = self.num_chunks = 0
        self._talking: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        for number in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request(number, num_tokens))
            self._selector.register(connection, selectors.EVENT_READ)

    @property
    def num_talking(self) -> int:
        return len(self._talking)

    @property
    def num_open(self) -> int:
        return len(self._selector.get_map())

    def read(self) -> None:
        for key, _ in self._selector.select():
            connection: Any = key.fileobj
            data = connection.recv(1 << 16)
            self._talking.add(connection)
            self.num_words += data.count(WORD.encode())  # one that is cut in two is missed: one in thousands
            self.num_chunks += data.count(b"data: {")
            if not data or b"[DONE]" in data:
                self._selector.unregister(connection)
                connection.close()


def request(number: int, num_tokens: int) -> bytes:
    words = f"Story {number}. " + "Once upon a time a miller lived beside a quiet river. " * 10
    params = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({"messages": [{"role": "user", "content": words}], **params}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────────


def cpu_s(pid: int) -> dict[str, float]:
    """CPU time so far of the process's first thread and of all others together (the socket library's)."""
    used = {"main": 0.0, "other": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent_ns = int((task / "schedstat").read_text().split()[0])
        used["main" if task.name == str(pid) else "other"] += spent_ns / 1e9
    return used


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def snapshot(pids: dict[str, int], streams: StreamCounter) -> dict[str, float]:
    times = {f"{name}_{part}": used for name, pid in pids.items() for part, used in cpu_s(pid).items()}
    return {**times, "wall": time.perf_counter(), "words": streams.num_words, "chunks": streams.num_chunks}


def measure(model: str, num_streams: int, num_tokens: int, step_s: float, *, traces: bool = False) -> dict[str, Any]:
    with collecting(traces) as otlp_endpoint, serving(model, step_s, otlp_endpoint) as (pid, port):
        pids = {"front": pid, "core": child_of(pid)}
        requests_cost(pids, port, 2)  # a warm-up
        asking = requests_cost(pids, port, max(16, num_streams))
        before_s = sum(cpu_s(pid).values())
        spent = streaming_cost(pids, StreamCounter(port, num_streams, num_tokens), num_streams)
        time.sleep(SPANS_SENT_S if traces else 0.0)
        whole_s = sum(cpu_s(pid).values()) - before_s
    tokens = spent["words"]
    return {
        "streams": num_streams,
        "tokens_per_s": round(tokens / spent["wall"]),
        "of_ideal": round(tokens / spent["wall"] * (step_s / num_streams + TOKEN_S), 3),
        "tokens_per_chunk": round(tokens / spent["chunks"], 2),
        **{f"{name}_us": round(spent[name] / tokens * 1e6, 1) for name in sorted(spent) if "_" in name},
        "front_tokens_per_s": round(tokens / spent["front_main"]),
        "core_tokens_per_s": round(tokens / spent["core_main"]),
        "front_whole_us": round(whole_s / num_streams * 1e6),
        "front_us_a_request": round(asking["front_main"] * 1e6),
        "core_us_a_request": round(asking["core_main"] * 1e6),
    }


def requests_cost(pids: dict[str, int], port: int, num_requests: int) -> dict[str, float]:
    """What a request costs beside its tokens: each asks for one."""
    streams = StreamCounter(port, 0, 1)
    before = snapshot(pids, streams)
    streams = StreamCounter(port, num_requests, 1)
    while streams.num_open:
        streams.read()
    return {name: (value - before[name]) / num_requests for name, value in snapshot(pids, streams).items()}


def streaming_cost(pids: dict[str, int], streams: StreamCounter, num_streams: int) -> dict[str, float]:
    """Between the moment when every stream has begun and the one when the first has ended."""
    while streams.num_talking < num_streams:
        streams.read()
    before = snapshot(pids, streams)
    while streams.num_open == num_streams:
        streams.read()
    after = snapshot(pids, streams)
    while streams.num_open:
        streams.read()
    return {name: after[name] - before[name] for name in before}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m", help="whose tokenizer and settings the front has")
    parser.add_argument("--streams", default="1,16,128,512")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of a step of no tokens; each adds 0.02")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--traces", action="store_true")
    options = parser.parse_args()
    rows = []
    for num_streams in map(int, options.streams.split(",")):
        row = measure(options.model, num_streams, options.tokens, options.step_ms / 1e3, traces=options.traces)
        rows.append(row)
        if len(rows) == 1:
            print(" ".join(rows[0]))
        print(" ".join(f"{value:>{len(name)}}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps({"benchmark": "stream_capacity", "step_ms": options.step_ms, "rows": rows}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["core"]:
        runner = Metronome(step_s=float(sys.argv[2]), token_id=int(sys.argv[3]))
        sys.exit(run_core(runner, sys.argv[4], int(sys.argv[5])))
    if sys.argv[1:2] == ["frontend"]:
        sys.exit(run_front(sys.argv[2], int(sys.argv[3]), [__file__, "core", sys.argv[4]], sys.argv[5] or None))
    sys.exit(main())
