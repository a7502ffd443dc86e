"""Kernels compiled by processes of their own, which leave them in Triton's cache on disk.

Threads would take turns: most of a kernel's half second holds Python's lock, and requests served meanwhile would wait
for it too. A worker is a copy of this process, so it has everything imported; it touches no device, and ends without
cleaning up. Whoever asked hears of each kernel as it is done and finds it on disk; what no worker made, because it came
to grief, he compiles after all.

    this process ──fork──► first worker ──fork──► the others        copying takes milliseconds each: one of them here
         ▲                      │                    │
         └── numbers of kernels that are done ───────┘              the pipe ends when all workers have
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from inspect import getclosurevars
from select import POLLIN, poll
from typing import Any

from triton.runtime.driver import driver

_is_enabled = False  # forking a process that has threads and a CUDA context is for processes of our own
MAX_WORKERS = 32
WORKERS_A_CORE = 2  # half of a kernel's time is spent waiting: for ptxas, for the C compiler that makes its launcher
PATIENCE_S = 60.0
NUMBER_BYTES = 2


def enable() -> None:
    """Let kernels be compiled by copies of this process from now on. Called by `engine/startup` only."""
    global _is_enabled
    _is_enabled = True


def is_enabled() -> bool:
    return _is_enabled


class Compilers:
    def __init__(self) -> None:
        self._heard, self._told = os.pipe()  # numbers of kernels that are done
        self._groups: list[int] = []  # of processes, by their first

    def start(self, kernels: Sequence[Callable[[], Any]], first_number: int) -> None:
        """`kernels`: what compiles each of them; they are numbered from `first_number` on. Some take ten times as long
        as others, so whoever is free takes the next one: their places in the list lie in a pipe."""
        if not kernels:
            return
        taken, given = os.pipe()
        try:
            os.write(given, b"".join(place.to_bytes(NUMBER_BYTES) for place in range(len(kernels))))
            os.close(given)
            num_workers = min(len(kernels), MAX_WORKERS, WORKERS_A_CORE * len(os.sched_getaffinity(0)))
            worker = _fork()
            if worker == 0:
                _work(kernels, first_number, num_workers, taken, self._told)
            self._groups.append(worker)
        finally:
            os.close(taken)

    def made(self) -> Iterator[int]:
        """Numbers of kernels as they are done, until all workers have ended, of themselves or because they take too
        long. Nothing can be started any more."""
        os.close(self._told)  # at once: whoever forks meanwhile must not hold the pipe open
        return self._as_they_are_done(time.monotonic() + PATIENCE_S)

    def _as_they_are_done(self, deadline: float) -> Iterator[int]:
        hearing = poll()
        hearing.register(self._heard, POLLIN)
        try:
            while hearing.poll(1000 * max(0.0, deadline - time.monotonic())):
                number = os.read(self._heard, NUMBER_BYTES)
                if not number:
                    return
                yield int.from_bytes(number)
            for first in self._groups:
                os.killpg(first, signal.SIGKILL)
        finally:
            os.close(self._heard)
            for first in self._groups:
                os.waitpid(first, 0)


def _work(kernels: Sequence[Callable[[], Any]], first_number: int, num_workers: int, taken: int, told: int) -> None:
    """In the first worker: starts the others, works, and ends as the last of them, so that all are waited for."""
    num_others = 0
    try:
        os.setpgid(0, 0)
        gc.disable()  # nothing of the device may be freed here
        while num_others < num_workers - 1 and _fork():
            num_others += 1
        num_others = num_others if num_others == num_workers - 1 else 0  # the others have none
        _compile(kernels, first_number, taken, told)
    finally:
        os.close(told)
        for _ in range(num_others):
            os.wait()
        os._exit(0)


def _compile(kernels: Sequence[Callable[[], Any]], first_number: int, taken: int, told: int) -> None:
    beside = ThreadPoolExecutor(1)
    while place := os.read(taken, NUMBER_BYTES):
        kernel = kernels[int.from_bytes(place)]
        launcher = beside.submit(_build_launcher, kernel)
        made = kernel()
        wait((launcher,))
        driver.active.launcher_cls(made.src, made.metadata)  # which is there, or else is built now
        os.write(told, (first_number + int.from_bytes(place)).to_bytes(NUMBER_BYTES))


def _build_launcher(kernel: Any) -> None:
    """The C compiler's part of a kernel, a third of a second, needs nothing but its signature: Triton's own function
    that compiles it has that in `src`. Descriptors of tensors are another matter."""
    source = getclosurevars(kernel.func).nonlocals["src"]
    if not any(str(kind).startswith("tensordesc") for kind in source.signature.values()):
        driver.active.launcher_cls(source, _Unknown())


class _Unknown:
    """What is known of a kernel before it is compiled; a launcher keeps it, and this one is given up."""

    def __getattr__(self, name: str) -> None:
        return None


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads' locks: none that a compiler needs
        return os.fork()
