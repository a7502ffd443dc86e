"""Measured peaks of this machine's processor: read bandwidth and float32 arithmetic, timed briefly with numpy.

    bandwidth   threads search slices of a buffer larger than the caches   (numpy releases the interpreter lock)
    float32     small matrix products on one core, times the cores
    int8        four times float32 where dot-product instructions exist (VNNI, i8mm, dotprod)

The best of several short rounds counts: on a shared machine the others measure other processes. So there are some of
them also where the first one took all of the time.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tokenmill.hardware.cpu import Cpu, probe_cpu

BUFFER_BYTES = 128 << 20
WINDOW_BYTES = 32 << 20
MATRIX = 64
PRODUCTS = 10
LEAST_ROUNDS = 12
INT8_SETS = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}


@dataclass(frozen=True)
class MeasuredPeaks:
    bandwidth_bytes_s: float
    fp32_flops: float
    int8_flops: float | None
    threads: int


def measure_cpu(threads: int | None = None, seconds: float = 0.2) -> MeasuredPeaks:
    cpu = probe_cpu()
    num = threads or cpu.usable_cores
    fp32 = num * core_flops(seconds / 2)
    return MeasuredPeaks(read_bandwidth(num, seconds / 2), fp32, int8_flops(cpu, fp32), num)


def read_bandwidth(threads: int, seconds: float) -> float:
    """Bytes per second that `threads` threads read together, over windows too large for any cache to keep."""
    windows = np.ones((BUFFER_BYTES // WINDOW_BYTES, threads, WINDOW_BYTES // threads // 8), dtype=np.float64)
    best, number = 0.0, 0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while number < LEAST_ROUNDS or time.perf_counter() < end:
            window = windows[number % len(windows)]
            began = time.perf_counter()
            list(pool.map(np.max, window))
            best = max(best, window.nbytes / (time.perf_counter() - began))
            number += 1
    return best


def core_flops(seconds: float) -> float:
    """float32 operations per second of one core: products small enough that numpy's library keeps to one thread."""
    a = np.ones((MATRIX, MATRIX), dtype=np.float32)
    out = np.empty_like(a)
    best, number = 0.0, 0
    end = time.perf_counter() + seconds
    while number < LEAST_ROUNDS or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            np.matmul(a, a, out=out)
        best = max(best, PRODUCTS * 2 * MATRIX**3 / (time.perf_counter() - began))
        number += 1
    return best


def int8_flops(cpu: Cpu, fp32: float) -> float | None:
    return 4 * fp32 if INT8_SETS & set(cpu.instruction_sets) else None
