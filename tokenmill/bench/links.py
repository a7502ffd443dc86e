"""Links between ranks of this machine, measured: the latency of a gather, and the bytes per second of a large one.

    shared     processes that share memory, as ranks with native kernels do
    loopback   processes over gloo, as ranks with torch's ops do
    pipe       the connection from one stage of a pipeline to the next

Each is timed between this process and one child (`link_peer.py`), both with the code that ranks use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from tokenmill.bench.link_peer import LARGE, ROUNDS, SMALL, join, play
from tokenmill.ops.cpu import is_available
from tokenmill.parallel.shared import SharedGroup
from tokenmill.parallel.stage_link import StageLink

KINDS = {"shared": "shared memory", "loopback": "gloo over loopback", "pipe": "pipe between stages"}


@dataclass(frozen=True)
class MeasuredLink:
    name: str
    title: str
    latency_s: float
    bytes_s: float

    def flat(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.title, "latency_s": self.latency_s, "bytes_s": self.bytes_s}


def measure_links(kinds: tuple[str, ...] = tuple(KINDS)) -> list[MeasuredLink]:
    """Measure the kinds that this machine can have."""
    usable = [kind for kind in kinds if kind != "shared" or is_available()[0]]
    return [_measure(kind) for kind in usable]


def _measure(kind: str) -> MeasuredLink:
    descriptor = os.memfd_create("tokenmill-links", os.MFD_CLOEXEC)
    try:
        if kind == "shared":
            os.ftruncate(descriptor, SharedGroup.file_bytes(2))
        there, back = Pipe(duplex=False), Pipe(duplex=False)
        with there[0], back[1]:
            passed = [descriptor, there[0].fileno(), back[1].fileno()]
            command = [sys.executable, "-m", "tokenmill.bench.link_peer", kind, *map(str, passed)]
            peer = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)
        try:
            return _timed(kind, descriptor, back[0], there[1])
        finally:
            back[0].close()
            there[1].close()
            if peer.wait(60) != 0:
                raise RuntimeError(f"the other process of {kind} failed")
    finally:
        os.close(descriptor)


def _timed(kind: str, descriptor: int, before: Connection, behind: Connection) -> MeasuredLink:
    link = StageLink(before, behind, reads_ahead=False) if kind == "pipe" else None
    group = None if kind == "pipe" else join(kind, 0, descriptor)
    exchange = play(group, link, is_first=True)
    one_way = 2 if link is not None else 1  # there and back
    small_s, large_s = (_median_s(exchange, size) / one_way for size in (SMALL, LARGE))
    return MeasuredLink(kind, KINDS[kind], small_s, LARGE / max(1e-9, large_s - small_s))


def _median_s(exchange: Callable[[torch.Tensor], None], size: int) -> float:
    sent = torch.zeros(1, size // 4)
    seconds = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        exchange(sent)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)
