"""How long a huge prompt holds up the streams beside it.

32 streams run; beside them a client sends, one after another, a prompt of 2 MB and a chat of 8,192 tiny messages. Every
stream's longest gap between two pieces is measured while that request is being read and answered, and in quiet
stretches of the same length between. Parsing, chat template and tokenising must not hold up the event loop.

By default the core is one without a model whose steps take 5 ms, and whose context is that of most large models:
131,072 tokens. The chat fits and is computed; the prompt, half a million tokens, is refused once it was tokenised.
`--serve MODEL` measures `tokenmill serve MODEL` instead, where the processors are shared with the model.

    python benchmarks/front_stall.py [--rounds 5] [--streams 32] [--limit-ms 20] [--serve smollm2:135m]

Prints a table and, as the last line, one JSON object; exit code 1 if a gap grew by more than the limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_CONTEXT = 1 << 17
NUM_BLOCKS = 1 << 16
STEP_S = 0.005
SENTENCE = "Once upon a time a miller lived beside a quiet river. "
PROMPT_BYTES = 2_000_000
NUM_MESSAGES = 8192
SETTLE_S = 1.0


# ── a server whose core has no model ───────────────────────────────────────────────────────────────────


def run_core(token_id: int, folder: str, parent_pid: int) -> int:
    import stream_capacity

    runner = stream_capacity.Metronome(STEP_S, token_id, token_s=0.0)
    limits = {"max_context": MAX_CONTEXT, "num_blocks": NUM_BLOCKS, "token_budget": 512}
    return stream_capacity.run_core(runner, folder, parent_pid, **limits)


def run_front(port: int) -> int:
    import stream_capacity

    return stream_capacity.run_front("smollm2:135m", port, [__file__, "core"])


@contextmanager
def serving(model: str | None) -> Iterator[int]:
    """The port of a server that is ready."""
    import stream_capacity

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    real = ["-m", "tokenmill", "serve", str(model), "--any-model-name", "--port", str(port), "--log-level", "warning"]
    command = [sys.executable, __file__, "front", str(port)] if model is None else [sys.executable, *real]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as front:
        try:
            while not stream_capacity.answers(port):
                if front.poll() is not None:
                    raise SystemExit(f"the server ended with exit code {front.returncode}")
                time.sleep(0.05)
            yield port
        finally:
            front.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            front.send_signal(signal.SIGTERM)  # streams that still run are not waited for
            front.wait(60)


# ── clients ────────────────────────────────────────────────────────────────────────────────────────────


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content


def huge_prompt(number: int) -> bytes:
    """Different every time, so that no prefix is cached."""
    text = f"Story {number}. " + SENTENCE * (PROMPT_BYTES // len(SENTENCE))
    return request({"messages": [{"role": "user", "content": text}], "max_tokens": 1, "context_shift": True})


def huge_chat(number: int) -> bytes:
    roles = ("user", "assistant")
    chat = [{"role": roles[turn % 2], "content": f"hi {number} {turn}"} for turn in range(NUM_MESSAGES)]
    return request({"messages": chat, "max_tokens": 1, "context_shift": True})


HUGE = {"2 MB": huge_prompt, "8,192 messages": huge_chat}


class StreamReader:
    """Reads many streams in a thread of its own and keeps the times at which pieces came."""

    def __init__(self, port: int, num_streams: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._times: list[list[float]] = []
        for number in range(num_streams):
            connection = socket.create_connection(("127.0.0.1", port))
            message = {"role": "user", "content": f"Story {number}. {SENTENCE}"}
            asked = {"max_tokens": 100_000, "ignore_eos": True, "stream": True, "context_shift": True}
            connection.sendall(request({"messages": [message], **asked}))
            self._selector.register(connection, selectors.EVENT_READ, number)
            self._times.append([])
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]  # a socket
                    self._selector.unregister(key.fileobj)
                self._times[key.data].append(time.perf_counter())

    def wait_until_all_run(self) -> None:
        while any(len(times) < 10 for times in self._times):
            time.sleep(0.05)

    def longest_gap_s(self, begin: float, end: float) -> float:
        """The longest time without a piece that any stream had between two moments."""
        longest = 0.0
        for times in self._times:
            before = [moment for moment in times[-20_000:] if moment <= begin][-1:]
            within = [moment for moment in times[-20_000:] if begin < moment <= end]
            edges = [*before, *within, end]
            longest = max(longest, *(b - a for a, b in itertools.pairwise(edges)))
        return longest


def ask(port: int, data: bytes) -> tuple[float, int]:
    """Seconds until the answer's head came, and its status."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        head = connection.recv(64)
    return time.perf_counter() - began, int(head.split()[1])


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────────


def measure(port: int, num_streams: int, num_rounds: int) -> list[dict[str, Any]]:
    streams = StreamReader(port, num_streams)
    streams.wait_until_all_run()
    rows = []
    for name, make in HUGE.items():
        ask(port, make(0))  # a warm-up
        quiet, beside, answers = [], [], []
        for number in range(num_rounds):
            data = make(number + 1)
            time.sleep(SETTLE_S)
            began = time.perf_counter()
            answers.append(ask(port, data))
            ended = time.perf_counter()
            time.sleep(0.05)
            beside.append(streams.longest_gap_s(began, ended + 0.05))
            time.sleep(SETTLE_S)
            began = time.perf_counter()
            time.sleep(answers[-1][0] + 0.05)
            quiet.append(streams.longest_gap_s(began, time.perf_counter()))
        more = statistics.median(beside) - statistics.median(quiet)
        rows.append(
            {
                "beside": f"{name:>14}",
                "status": answers[-1][1],
                "answered_s": round(statistics.median(s for s, _ in answers), 3),
                "quiet_gap_ms": round(statistics.median(quiet) * 1e3, 1),
                "gap_ms": round(statistics.median(beside) * 1e3, 1),
                "worst_quiet_gap_ms": round(max(quiet) * 1e3, 1),
                "worst_gap_ms": round(max(beside) * 1e3, 1),
                "more_ms": round(more * 1e3, 1),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--limit-ms", type=float, default=20.0, help="more longest gap than this is exit code 1")
    parser.add_argument(
        "--serve", metavar="MODEL", help="measure `tokenmill serve MODEL`, not the core without a model"
    )
    options = parser.parse_args()
    with serving(options.serve) as port:
        rows = measure(port, options.streams, options.rounds)
    print("  ".join(f"{name:>{len(str(rows[0][name]))}}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>{len(name)}}" for name, value in row.items()))
    print(json.dumps({"benchmark": "front_stall", "streams": options.streams, "serve": options.serve, "rows": rows}))
    return 0 if all(row["more_ms"] <= options.limit_ms for row in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["core"]:
        sys.exit(run_core(int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    if sys.argv[1:2] == ["front"]:
        sys.exit(run_front(int(sys.argv[2])))
    sys.exit(main())
