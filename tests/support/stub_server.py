"""A server that speaks OpenAI's chat stream on a known schedule. Runs as a script: prints its port.

    schedule   first token after `ttft` seconds, then one every `itl` seconds
    share      one machine shared by all: a token of each of n running streams takes n × `itl` seconds
    queue      one at a time: a request waits for all before it (`ttft` seconds each), so a queue grows under load

Each piece of text is the time at which it was written, on the clock that all processes of this machine share. The
server never sleeps: waking up, or a timer with a resolution of milliseconds, would make it late by more than is
measured. `GET /stolen` lists the times at which something else nevertheless had its processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from heapq import heappop, heappush
from itertools import count
from typing import cast

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STOLEN_S = 0.0005
MODELS = b'{"object": "list", "data": [{"id": "stub", "object": "model"}]}'


class Timetable:
    """Runs due events to the microsecond, by polling the clock continuously."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, StubStream]] = []
        self._numbers = count()
        self._looked, self._computed = time.perf_counter(), time.thread_time()
        self.stolen: list[tuple[float, float]] = []

    def add(self, at: float, stream: StubStream) -> None:
        heappush(self._due, (at, next(self._numbers), stream))

    def run(self) -> None:
        now, computed = time.perf_counter(), time.thread_time()
        if now - self._looked > STOLEN_S and computed - self._computed < (now - self._looked) / 2:
            self.stolen.append((self._looked, now))
        self._looked, self._computed = now, computed
        if self._due and self._due[0][0] <= now:
            heappop(self._due)[2].token()
        asyncio.get_running_loop().call_soon(self.run)


class StubStream(asyncio.Protocol):
    settings: argparse.Namespace
    timetable = Timetable()
    running = 0
    free_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.data, self.is_open = cast(asyncio.Transport, transport), b"", True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            answer = json.dumps(self.timetable.stolen).encode() if head.startswith(b"GET /stolen") else MODELS
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            self.data = b""
            return
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        if len(body) < length:
            return
        self.data = b""
        self.begin()

    def begin(self) -> None:
        s, now = StubStream.settings, time.perf_counter()
        StubStream.running += 1
        self.left, self.due = s.tokens, now + s.ttft
        if s.mode == "queue":
            StubStream.free_at = self.due = max(StubStream.free_at, now) + s.ttft
        self.timetable.add(self.due, self)
        self.transport.write(HEAD)

    def token(self) -> None:
        s = StubStream.settings
        self.left -= 1
        payload = b'{"choices":[{"index":0,"delta":{"content":"%r "}}]}' % time.perf_counter()
        self.write(b"data: " + payload + b"\n\n")
        if self.left:
            self.due += s.itl * StubStream.running if s.mode == "share" else s.itl
            self.timetable.add(self.due, self)
            return
        StubStream.running -= 1
        usage = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}' % s.tokens
        self.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")
        if self.is_open:
            self.transport.write(b"0\r\n\r\n")

    def write(self, data: bytes) -> None:
        if self.is_open:
            self.transport.write(b"%x\r\n" % len(data) + data + b"\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(StubStream, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    StubStream.timetable.run()
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="schedule")
    parser.add_argument("--ttft", type=float, default=0.05)
    parser.add_argument("--itl", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=10)
    StubStream.settings = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
