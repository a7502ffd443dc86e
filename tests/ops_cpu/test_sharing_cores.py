"""The kernels' threads share a machine: idle ones sleep, and more threads than cores finish their work all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.ops.cpu import is_available
from tokenmill.ops.cpu.availability import native

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])

SHAPE = (256, 512)


def run_products(threads: int, times: int) -> tuple[Any, np.ndarray]:
    """The bench, which keeps its threads, and the last product."""
    bench = native().Bench(threads)
    return bench, repeat_product(bench, times)


def repeat_product(bench: Any, times: int) -> np.ndarray:
    source = np.random.default_rng(0).integers(0, 60, (SHAPE[0], SHAPE[1] // 32 * 34), np.uint8)
    matrix = native().pack("Q8_0", *SHAPE, source)
    x = np.random.default_rng(1).standard_normal((3, SHAPE[1])).astype(np.float32)
    out = np.empty((3, SHAPE[0]), np.float32)
    for _ in range(times):
        bench.linear(matrix, None, x, out)
    return out


def test_threads_without_work_sleep() -> None:
    bench, _ = run_products(threads=8, times=20)
    time.sleep(0.05)  # they spin for some microseconds first
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1  # spinning, seven of them would have burnt all they were given
    assert bench is not None


def test_more_threads_than_cores_compute_the_same() -> None:
    _, alone = run_products(threads=1, times=1)
    _, crowded = run_products(threads=4 * (os.cpu_count() or 1), times=200)
    assert np.array_equal(alone, crowded)


@contextmanager
def two_cores() -> Iterator[None]:
    """For this thread and for those that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def busy_loop() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def cores_of_threads() -> dict[str, set[int]]:
    return {task.name: os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


def may_use(before: dict[str, set[int]]) -> bool:
    """Return whether each thread may use the cores it could before; more, where it was bound just then."""
    return all(cores >= before.get(thread, set()) for thread, cores in cores_of_threads().items())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are moved on Linux only")
def test_a_thread_pushed_off_its_core_is_pulled_over_and_may_use_the_cores_it_could_before() -> None:
    _, alone = run_products(threads=1, times=1)
    with two_cores():
        if len(os.sched_getaffinity(0)) < 2:
            pytest.skip("needs two cores")
        bench, _ = run_products(threads=2, times=1)
        before = cores_of_threads()
        with busy_loop():
            deadline = time.monotonic() + 20
            while bench.rescues < 5 and time.monotonic() < deadline:
                out = repeat_product(bench, times=200)
                assert np.array_equal(alone, out)
        assert bench.rescues >= 5
        while not may_use(before) and time.monotonic() < deadline + 10:
            time.sleep(0.01)  # one that waits for its turn on the crowded core is bound to it until it comes
        assert may_use(before), (cores_of_threads(), before)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K", "F16"])
def test_packing_by_several_threads_gives_the_same_matrix(kind: str) -> None:
    rows, columns = 3001, 512  # above the size that is worth threads, and no whole number of panels
    source = np.random.default_rng(2).integers(0, 60, (rows, native().source_row_bytes(kind, columns)), np.uint8)
    x = np.random.default_rng(3).standard_normal((2, columns)).astype(np.float32)
    products = []
    for threads in (1, 5):
        matrix = native().pack(kind, rows, columns, source, threads)
        products.append(np.empty((2, rows), np.float32))
        native().Bench(1).linear(matrix, None, x, products[-1])
    assert np.isfinite(products[0]).all()
    assert np.array_equal(*products)
