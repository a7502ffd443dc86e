"""A server that speaks OpenAI's chat stream on a schedule known beforehand. Runs as a script: prints its port.

    schedule   first token after `ttft` seconds, then one every `itl` seconds
    share      one machine shared by all: a token of each of n running streams takes n × `itl` seconds
    queue      one at a time: a request waits for all before it (`ttft` seconds each), so a queue grows under load

Each piece of text is the moment it was written, on the clock that all processes of this machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import cast

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'{"object": "list", "data": [{"id": "stub", "object": "model"}]}'


class Stream(asyncio.Protocol):
    settings: argparse.Namespace
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
            size = str(len(MODELS)).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: " + size + b"\r\n\r\n" + MODELS)
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
        s, loop = Stream.settings, asyncio.get_running_loop()
        Stream.running += 1
        self.transport.write(HEAD)
        self.left, self.due = s.tokens, loop.time() + s.ttft
        if s.mode == "queue":
            Stream.free_at = self.due = max(Stream.free_at, loop.time()) + s.ttft
        loop.call_at(self.due, self.token)

    def token(self) -> None:
        s = Stream.settings
        self.left -= 1
        payload = b'{"choices":[{"index":0,"delta":{"content":"%r "}}]}' % time.perf_counter()
        self.write(b"data: " + payload + b"\n\n")
        if self.left:
            self.due += s.itl * Stream.running if s.mode == "share" else s.itl
            asyncio.get_running_loop().call_at(self.due, self.token)
            return
        Stream.running -= 1
        usage = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}' % s.tokens
        self.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")
        if self.is_open:
            self.transport.write(b"0\r\n\r\n")

    def write(self, data: bytes) -> None:
        if self.is_open:
            self.transport.write(b"%x\r\n" % len(data) + data + b"\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="schedule")
    parser.add_argument("--ttft", type=float, default=0.05)
    parser.add_argument("--itl", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=10)
    Stream.settings = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
