"""Kernels compiled by processes of their own, which leave them in Triton's cache on disk.

Threads would take turns: most of a kernel's half second holds Python's lock, and requests served meanwhile would wait
for it too. A worker is a copy of this process, so it has everything imported; it touches no device, and ends without
cleaning up. Whoever asked finds the kernels on disk, or, if a worker came to grief, compiles them after all.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime.driver import driver

MAX_WORKERS = 16
PATIENCE_S = 60.0
LOOK_EVERY_S = 0.01


def start_workers(kernels: Sequence[Callable[[], Any]]) -> list[int]:
    """Process ids; `kernels`: what compiles each of them. Some take ten times as long as others, so whoever is free
    takes the next one: their numbers lie in a pipe, two bytes each."""
    taken, given = os.pipe()
    try:
        os.write(given, b"".join(number.to_bytes(2) for number in range(len(kernels))))
        os.close(given)
        num_workers = min(len(kernels), MAX_WORKERS, len(os.sched_getaffinity(0)))
        return [_start_worker(kernels, taken) for _ in range(num_workers)]
    finally:
        os.close(taken)


def _start_worker(kernels: Sequence[Callable[[], Any]], numbers: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads' locks: none that a compiler needs
        worker = os.fork()
    if worker == 0:
        try:
            gc.disable()  # nothing of the device may be freed here
            while number := os.read(numbers, 2):
                made = kernels[int.from_bytes(number)]()
                driver.active.launcher_cls(made.src, made.metadata)
        finally:
            os._exit(0)
    return worker


def wait_for(workers: Sequence[int]) -> None:
    """Until all have ended, of themselves or because they take too long."""
    deadline = time.monotonic() + PATIENCE_S
    left = set(workers)
    while left:
        left -= {worker for worker in left if os.waitpid(worker, os.WNOHANG)[0]}
        if left and time.monotonic() > deadline:
            for worker in left:
                os.kill(worker, signal.SIGKILL)
            deadline += PATIENCE_S
        time.sleep(LOOK_EVERY_S)
