"""Kernels compiled by processes of their own, which leave them in Triton's cache on disk.

Threads would take turns: most of a kernel's half second holds Python's lock, and requests served meanwhile would wait
for it too. A worker is a copy of this process, so it has everything imported; it touches no device, and ends without
cleaning up. The parent is told of each kernel as it is done and finds it on disk; a kernel that a worker failed to
compile is compiled by the parent when it is needed.

There are more workers than cores. The largest kernels take several times as long as the others, and the start waits for
the last one: workers with a small kernel step back, so that each large one has a core.

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
COMPILE_TIMEOUT_S = 60.0
NUMBER_BYTES = 2
STEP_BACK = 10  # of niceness, which a process can't take back
_large: set[Any] = set()  # functions of the kernels that take longest to compile


def enable() -> None:
    """Let kernels be compiled by copies of this process from now on. Called by `engine/startup` only."""
    global _is_enabled
    _is_enabled = True


def is_enabled() -> bool:
    return _is_enabled


def note_large(function: Any) -> None:
    """Note that a kernel takes several times as long to compile as most. Called where kernels are defined."""
    _large.add(function)


class CompileWorkers:
    """Processes that compile kernels, and a pipe in which they report the numbers of those that are done."""

    def __init__(self) -> None:
        self._done_reader, self._done_writer = os.pipe()  # numbers of kernels that are done
        self._groups: list[int] = []  # process groups, by the pid of their first worker

    def start(self, kernels: Sequence[Callable[[], Any]], numbers: Sequence[int]) -> None:
        """Start workers on `kernels`, functions that compile one each; they report its number. Some take ten times as
        long as others, so a free worker takes the next index from a pipe."""
        if not kernels:
            return
        queue_reader, queue_writer = os.pipe()
        try:
            os.write(queue_writer, b"".join(index.to_bytes(NUMBER_BYTES) for index in range(len(kernels))))
            os.close(queue_writer)
            num_workers = min(len(kernels), MAX_WORKERS, WORKERS_A_CORE * len(os.sched_getaffinity(0)))
            worker = _fork()
            if worker == 0:
                _work(kernels, numbers, num_workers, queue_reader, self._done_writer)
            self._groups.append(worker)
        finally:
            os.close(queue_reader)

    def finished(self) -> Iterator[int]:
        """Numbers of kernels as they are done, until all workers have ended or run out of time. No kernels can be
        started after this call."""
        os.close(self._done_writer)  # at once: a process forked meanwhile must not hold the pipe open
        return self._read_finished(time.monotonic() + COMPILE_TIMEOUT_S)

    def _read_finished(self, deadline: float) -> Iterator[int]:
        poller = poll()
        poller.register(self._done_reader, POLLIN)
        try:
            while poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                number = os.read(self._done_reader, NUMBER_BYTES)
                if not number:
                    return
                yield int.from_bytes(number)
            for first in self._groups:
                os.killpg(first, signal.SIGKILL)
        finally:
            os.close(self._done_reader)
            for first in self._groups:
                os.waitpid(first, 0)


def _work(
    kernels: Sequence[Callable[[], Any]], numbers: Sequence[int], num_workers: int, queue: int, done: int
) -> None:
    """Run the first worker: it starts the others, works, and ends as the last of them, so that all are waited for."""
    num_others = 0
    try:
        os.setpgid(0, 0)
        gc.disable()  # nothing of the device may be freed here
        while num_others < num_workers - 1 and _fork():
            num_others += 1
        num_others = num_others if num_others == num_workers - 1 else 0  # the others have none
        _compile(kernels, numbers, queue, done)
    finally:
        os.close(done)
        for _ in range(num_others):
            os.wait()
        os._exit(0)


def _compile(kernels: Sequence[Callable[[], Any]], numbers: Sequence[int], queue: int, done: int) -> None:
    """Compile kernels until the queue is empty; the C compiler builds a launcher meanwhile."""
    beside, has_stepped_back = ThreadPoolExecutor(1), False
    while index := os.read(queue, NUMBER_BYTES):
        place = int.from_bytes(index)
        kernel = kernels[place]
        if not has_stepped_back and not _is_large(kernel):
            has_stepped_back = True
            os.nice(STEP_BACK)
        launcher = beside.submit(_build_launcher, kernel)
        made = kernel()
        wait((launcher,))
        driver.active.launcher_cls(made.src, made.metadata)  # built already, or else now
        os.write(done, numbers[place].to_bytes(NUMBER_BYTES))


def _build_launcher(kernel: Any) -> None:
    """Compile a kernel's launcher in C, a third of a second. It needs only the signature; kernels with tensor
    descriptors need more."""
    source = source_of(kernel)
    if not any(str(kind).startswith("tensordesc") for kind in source.signature.values()):
        driver.active.launcher_cls(source, _Unknown())


def _is_large(kernel: Any) -> bool:
    source = getclosurevars(kernel.func).nonlocals.get("src")
    return getattr(getattr(source, "fn", None), "fn", None) in _large


def source_of(kernel: Any) -> Any:
    """What Triton's own function that compiles a kernel was made for."""
    return getclosurevars(kernel.func).nonlocals["src"]


class _Unknown:
    """Metadata of a kernel that is not compiled yet: a launcher keeps it, and this launcher is thrown away."""

    def __getattr__(self, name: str) -> None:
        return None


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads' locks: none that a compiler needs
        return os.fork()
