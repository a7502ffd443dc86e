"""Kernels are compiled by copies of the process: each of them once, by whoever is free, even if one comes to grief."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton import language as tl
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key

from tests.support.compiled_launches import HOPPER
from tokenmill.ops.triton.launch import compile_workers, preload
from tokenmill.ops.triton.launch.compile_workers import CompileWorkers, source_of
from tokenmill.ops.triton.launch.kernel import FUSED, Compiling

NUM_KERNELS = 9


def compiled(folder: Path, number: int) -> SimpleNamespace:
    """The first takes as long as all others together; the second can't be made."""
    if number == 1:
        raise ValueError("no kernel")
    deadline = time.monotonic() + 60
    while number == 0 and len(list(folder.iterdir())) < NUM_KERNELS - 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with (folder / str(number)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return SimpleNamespace(src=None, metadata=None)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_who_is_free_takes_the_next_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr(compile_workers, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    kernels: list[Callable[[], SimpleNamespace]] = [
        partial(compiled, tmp_path, number) for number in range(NUM_KERNELS)
    ]
    workers = CompileWorkers()
    workers.start(kernels[:6], range(6))
    workers.start(kernels[6:], range(6, 9))
    done = list(workers.finished())
    made_by = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert sorted(done) == sorted(map(int, made_by)) == [number for number in range(9) if number != 1]
    assert all(len(makers) == 1 for makers in made_by.values())
    # The first one's maker was busy with it until others had made all the others; the second's had ended.
    assert made_by["0"] not in [makers for name, makers in made_by.items() if name != "0"]
    assert not leftovers()


def kernel_of(folder: Path, number: int, kind: str) -> Callable[[], SimpleNamespace]:
    """As Triton makes them; this one needs its launcher's file to be compiled."""
    src = SimpleNamespace(file=folder / str(number), signature={"x": "*bf16", "y": kind})

    def async_compile() -> SimpleNamespace:
        deadline = time.monotonic() + 60
        while not src.file.exists() and time.monotonic() < deadline and kind == "i32":
            time.sleep(0.01)
        assert src.file.exists() == (kind == "i32")
        return SimpleNamespace(src=src, metadata=SimpleNamespace(num_ctas=1))

    return partial(async_compile)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_launchers_are_built_beside_their_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher whose source depends on its compiled kernel is not built beside it."""

    def launcher_of(src: SimpleNamespace, metadata: Any) -> None:
        with src.file.open("a") as file:
            file.write(f"{metadata.num_ctas} ")

    monkeypatch.setattr(compile_workers, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher_of)))
    workers = CompileWorkers()
    workers.start([kernel_of(tmp_path, 0, "i32"), kernel_of(tmp_path, 1, "tensordesc<bf16[64, 64]>")], [0, 1])
    assert sorted(workers.finished()) == [0, 1]
    assert [(tmp_path / name).read_text() for name in "01"] == ["None 1 ", "1 "]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_workers_with_small_kernels_step_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start waits for the largest ones."""

    def large() -> None: ...

    def small() -> None: ...

    def compiling(function: Callable[[], None]) -> Callable[[], SimpleNamespace]:
        src = SimpleNamespace(fn=SimpleNamespace(fn=function), signature={})

        def async_compile() -> SimpleNamespace:
            (tmp_path / function.__name__).write_text(str(os.nice(0)))
            return SimpleNamespace(src=src, metadata=None)

        return partial(async_compile)

    active = SimpleNamespace(launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr(compile_workers, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compile_workers, "_large", set())
    monkeypatch.setattr(compile_workers, "WORKERS_PER_CORE", 4)
    compile_workers.note_large(large)
    workers = CompileWorkers()
    workers.start([compiling(large)], [0])
    workers.start([compiling(small)], [1])
    assert sorted(workers.finished()) == [0, 1]
    assert int((tmp_path / "large").read_text()) == os.nice(0)
    assert int((tmp_path / "small").read_text()) > os.nice(0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_who_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_workers, "COMPILE_TIMEOUT_S", 0.1)
    workers = CompileWorkers()
    workers.start([partial(time.sleep, 60)] * 3, range(3))
    assert list(workers.finished()) == []
    assert not leftovers()


def leftovers() -> bool:
    """Return whether this process has children that it has not waited for."""
    try:
        return os.waitpid(-1, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return False


def test_what_failed_ahead_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> str:
        raise RuntimeError("no driver")

    monkeypatch.setattr(preload, "triton_key", lambda: "key")
    monkeypatch.setattr(preload, "_driver_key", no_driver)
    preload.begin.cache_clear()
    try:
        preload.finish()
        key, driver_key = (part.exception() for part in preload.begin())
        assert key is None
        assert isinstance(driver_key, RuntimeError)
    finally:
        preload.begin.cache_clear()


@triton.jit
def _copy(x, out, count: tl.constexpr):
    numbers = tl.arange(0, count)
    tl.store(out + numbers, tl.load(x + numbers))


def test_a_kernel_that_an_earlier_start_has_compiled_is_found_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    types = {"x": "*fp32", "out": "*fp32", "count": "constexpr"}
    compiling = object.__new__(Compiling)
    compiling._kernels = []
    for count in (64, 128):
        src, options = ASTSource(_copy, types, {(2,): count}), make_backend(HOPPER).parse_options(dict(FUSED))
        key = get_cache_key(src, make_backend(HOPPER), options, get_cache_invalidating_env_vars())
        compiling._kernels.append((SimpleNamespace(_key=key), partial(closure_over(src))))
    assert not compiling._is_on_disk(0)
    triton.compile(source_of(compiling._kernels[0][1]), target=HOPPER, options=FUSED)
    assert compiling._is_on_disk(0) and not compiling._is_on_disk(1)


def closure_over(src: ASTSource) -> Callable[[], ASTSource]:
    """A function with what Triton's own has in its closure."""

    def async_compile() -> ASTSource:
        return src

    return async_compile
