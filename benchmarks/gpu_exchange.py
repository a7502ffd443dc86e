"""Exchanges between ranks on one GPU, inside captured graphs: the kernel and the windows that `--tp` uses.

    python benchmarks/gpu_exchange.py [--ranks 2] [--rows 8,32,128] [--widths 4096,14336] [--mps]

Each rank is a process. Every exchange is checked, then 128 of them, captured as one graph, are timed: microseconds of
one. Without CUDA MPS (`--mps` starts its daemon for the time of the run) processes take turns on a GPU, and an exchange
takes as long as such a turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from tokenmill.parallel.cuts import split_rows
from tokenmill.parallel.device import DeviceGroup

EXCHANGES, REPLAYS = 128, 10


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """CUDA's multi-process service, in a folder of its own; the environment of its clients."""
    with tempfile.TemporaryDirectory() as folder:
        there = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **there}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True, timeout=30)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the daemon must not stay behind
        try:
            yield there
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", env=env, check=False, timeout=60)


def measure(group: DeviceGroup, rows: int, width: int) -> float:
    """Seconds of an exchange, after a check that all parts arrive."""
    cut, device = split_rows(width, group.size), torch.device("cuda")
    draw = torch.Generator().manual_seed(rows * width)
    start, stop = cut.spans[group.rank]
    for _ in range(5):
        whole = torch.randn(rows, width, generator=draw).to(torch.bfloat16)
        found = group.join(whole[:, start:stop].to(device), cut.widths)
        assert torch.equal(found.cpu(), whole), f"rank {group.rank}: {rows} rows of {width} came back changed"
    own, graph = torch.zeros(rows, stop - start, dtype=torch.bfloat16, device=device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(EXCHANGES):
            found = group.join(own, cut.widths)
    seconds = []
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(REPLAYS):
        own.fill_(number + group.rank)
        graph.replay()  # in which the ranks meet: they do not begin at the same time
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3 / EXCHANGES)
        expected = torch.cat([torch.full((w,), number + r) for r, w in enumerate(cut.widths)]).to(torch.bfloat16)
        assert torch.equal(found.cpu(), expected.expand(rows, -1)), "a captured exchange came back changed"
    return median(seconds)


def rank_main(asked: argparse.Namespace) -> None:
    group = DeviceGroup.over_file(
        asked.descriptor, asked.rank, asked.ranks, torch.device("cuda"), ranks_of_device=asked.ranks
    )
    for width in asked.widths:
        for rows in asked.rows:
            seconds = measure(group, rows, width)
            if asked.rank == 0:
                print(json.dumps({"rows": rows, "width": width, "us": round(seconds * 1e6, 2)}), flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=numbers, default=[8, 32, 128])
    parser.add_argument("--widths", type=numbers, default=[4096, 14336])
    parser.add_argument("--mps", action="store_true", help="start CUDA's multi-process service for the run")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank_main(asked)
        return 0
    if asked.mps:
        with mps_daemon() as there:
            return start_ranks(asked.ranks, there)
    return start_ranks(asked.ranks, {})


def start_ranks(size: int, there: dict[str, str]) -> int:
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, DeviceGroup.file_bytes(size))
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--rank", str(rank), "--descriptor", str(descriptor)],
            env={**os.environ, **there},
            pass_fds=[descriptor],
        )
        for rank in range(size)
    ]
    try:
        return max(abs(one.wait(timeout=90)) for one in started)
    finally:
        for one in started:
            one.kill()


if __name__ == "__main__":
    sys.exit(main())
