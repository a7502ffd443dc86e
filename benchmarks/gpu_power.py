"""Seconds and joules of the parts of a step, one after another and side by side, each for seconds: at its power limit a
GPU is slower than a short measurement says, and what takes fewer joules is what is faster.

    python benchmarks/gpu_power.py [--rows 600,2048] [--attending 500] [--context 600]

Llama-3.1-8B's layer: its four products by cuBLAS, and decoding attention by our kernel. NVML counts the joules.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_kernels import DIM, HEADS, paged

from tokenmill.ops.interface import AttentionArgs
from tokenmill.ops.triton.attention.decode import decode_attention

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # qkv, o, gate and up, down
LAYERS = 8
Work = Callable[[], None]


class JouleMeter:
    """The first GPU's counter of joules and its clock."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._nvml.nvmlInit_v2()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        return value.value / 1e3

    def mhz(self) -> int:
        value = ctypes.c_uint()
        self._nvml.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(value))
        return value.value


def captured(*chains: Work) -> torch.cuda.CUDAGraph:
    """A graph of chains that do not wait for one another."""
    for work in chains:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    beside = [torch.cuda.Stream() for _ in chains[1:]]
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for stream, work in zip(beside, chains[1:], strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                work()
        chains[0]()
        for stream in beside:
            here.wait_stream(stream)
    return graph


def sustained(meter: JouleMeter, graph: torch.cuda.CUDAGraph, seconds: float = 1.5, settling: float = 0.5) -> str:
    """Replays for so long, after the clock has settled; per replay."""
    clocks: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            clocks.append(meter.mhz())

    _replay_for(graph, settling)
    watcher = threading.Thread(target=watch)
    watcher.start()
    began, spent = time.perf_counter(), meter.joules()
    count = _replay_for(graph, seconds)
    took, spent = time.perf_counter() - began, meter.joules() - spent
    is_over.set()
    watcher.join()
    mean = sum(clocks) / max(1, len(clocks))
    return f"{took / count * 1e3:8.3f} ms {spent / count:7.3f} J {spent / took:5.0f} W {mean:5.0f} MHz"


def _replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        count += 4
    return count


def products(num_rows: int) -> Work:
    matrices = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in SHAPES]
    inputs = [torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16) for shape in SHAPES]
    outputs = [torch.empty(num_rows, shape[0], device="cuda", dtype=torch.bfloat16) for shape in SHAPES]

    def work() -> None:
        for x, matrix, out in zip(inputs, matrices, outputs, strict=True):
            torch.mm(x, matrix.t(), out=out)

    return work


def attention(num_rows: int, context: int) -> Work:
    caches, tables, contexts = paged(num_rows, context, 1)
    queries = torch.randn(num_rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(queries)
    return lambda: decode_attention(queries, caches[0], tables, contexts, AttentionArgs(DIM**-0.5), out, 1)


def repeated(*works: Work) -> Work:
    def work() -> None:
        for _ in range(LAYERS):
            for one in works:
                one()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="600,2048")
    parser.add_argument("--attending", type=int, default=500)
    parser.add_argument("--context", type=int, default=600)
    given = parser.parse_args()
    meter, attend = JouleMeter(), attention(given.attending, given.context)
    print(f"{LAYERS} layers' attention       {sustained(meter, captured(repeated(attend)))}", flush=True)
    for num_rows in map(int, given.rows.split(",")):
        multiply = products(num_rows)
        print(f"products, {num_rows} rows", flush=True)
        print(f"  alone                  {sustained(meter, captured(repeated(multiply)))}", flush=True)
        print(f"  and attention in turn  {sustained(meter, captured(repeated(multiply, attend)))}", flush=True)
        side_by_side = captured(repeated(multiply), repeated(attend))
        print(f"  beside attention       {sustained(meter, side_by_side)}", flush=True)


if __name__ == "__main__":
    main()
