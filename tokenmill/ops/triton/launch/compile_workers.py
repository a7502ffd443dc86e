"""Worker processes that compile kernels into Triton's cache on disk.

Threads would not help: most of a kernel's half second holds the GIL, and would delay requests that are served
meanwhile. A worker is forked from this process, so it has everything imported; it does not use the device, and exits
without cleanup. The parent is notified of each finished kernel and loads it from disk; a kernel that a worker failed to
compile is compiled by the parent when it is needed.

There are more workers than cores. The largest kernels take several times as long as the others, and startup waits for
the last one: workers with a small kernel lower their priority, so that each large kernel has a core.

    this process ──fork──► first worker ──fork──► the others        copying takes milliseconds each: one of them here
         ▲                      │                    │
         └── indices of finished kernels ────────────┘              the pipe closes when all workers have ended
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

_is_enabled = False  # only in our own processes: forking with threads and a CUDA context needs care
MAX_WORKERS = 32
WORKERS_PER_CORE = 2  # half of a kernel's time is spent waiting: for ptxas, and for the C compiler of its launcher
COMPILE_TIMEOUT_S = 60.0
NUMBER_BYTES = 2
NICE_INCREMENT = 10  # of workers with small kernels; a process can't undo it
_large: set[Any] = set()  # functions of the kernels that take longest to compile


def enable() -> None:
    """Enable compilation by forked copies of this process. Called by `engine/startup` only."""
    global _is_enabled
    _is_enabled = True


def is_enabled() -> bool:
    return _is_enabled


def note_large(function: Any) -> None:
    """Register a kernel that takes several times as long to compile as most. Called where kernels are defined."""
    _large.add(function)


class CompileWorkers:
    """Processes that compile kernels, and a pipe through which they report the indices of finished ones."""

    def __init__(self) -> None:
        self._done_reader, self._done_writer = os.pipe()  # indices of finished kernels
        self._groups: list[int] = []  # process groups, by the pid of their first worker

    def start(self, kernels: Sequence[Callable[[], Any]], numbers: Sequence[int]) -> None:
        """Start workers on `kernels`, functions that compile one kernel each, and report its number. Some take ten
        times as long as others, so a free worker reads the next index from a pipe."""
        if not kernels:
            return
        queue_reader, queue_writer = os.pipe()
        try:
            os.write(queue_writer, b"".join(index.to_bytes(NUMBER_BYTES) for index in range(len(kernels))))
            os.close(queue_writer)
            num_workers = min(len(kernels), MAX_WORKERS, WORKERS_PER_CORE * len(os.sched_getaffinity(0)))
            worker = _fork()
            if worker == 0:
                _work(kernels, numbers, num_workers, queue_reader, self._done_writer)
            self._groups.append(worker)
        finally:
            os.close(queue_reader)

    def finished(self) -> Iterator[int]:
        """Yield the numbers of finished kernels until all workers have ended or timed out. No kernels can be started
        after this call."""
        os.close(self._done_writer)  # immediately: a process forked later must not keep the pipe open
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
    """Run the first worker: it forks the others, works, and ends as the last of them, so that all are reaped."""
    num_others = 0
    try:
        os.setpgid(0, 0)
        gc.disable()  # no device memory may be freed in a forked process
        while num_others < num_workers - 1 and _fork():
            num_others += 1
        num_others = num_others if num_others == num_workers - 1 else 0  # only the first worker has children
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
            os.nice(NICE_INCREMENT)
        launcher = beside.submit(_build_launcher, kernel)
        made = kernel()
        wait((launcher,))
        driver.active.launcher_cls(made.src, made.metadata)  # builds the launcher, unless it is cached
        os.write(done, numbers[place].to_bytes(NUMBER_BYTES))


def _build_launcher(kernel: Any) -> None:
    """Compile a kernel's launcher in C, which takes a third of a second. It needs only the signature; kernels with
    tensor descriptors need more."""
    source = source_of(kernel)
    if not any(str(kind).startswith("tensordesc") for kind in source.signature.values()):
        driver.active.launcher_cls(source, _Unknown())


def _is_large(kernel: Any) -> bool:
    source = getclosurevars(kernel.func).nonlocals.get("src")
    return getattr(getattr(source, "fn", None), "fn", None) in _large


def source_of(kernel: Any) -> Any:
    """Return the `ASTSource` that Triton's compile closure was created for."""
    return getclosurevars(kernel.func).nonlocals["src"]


class _Unknown:
    """Placeholder metadata of a kernel that is not compiled yet, for a launcher that is only built and then
    discarded."""

    def __getattr__(self, name: str) -> None:
        return None


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: compilation needs none of their locks
        return os.fork()
