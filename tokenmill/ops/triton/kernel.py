"""A kernel of ours, launched as Triton's are: `kernel[grid](tensor, ...)`.

Making one takes half a second, half of it outside Python's lock (an assembler, a C compiler for what launches it).
Whatever is called inside `compile_beside` has its kernels made side by side instead of run: each is asked for once in
every form, and left to a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime._async_compile import AsyncCompileMode

NUM_COMPILERS = 6
_asked: ContextVar[set[Any] | None] = ContextVar("asked", default=None)  # forms; None: kernels run


class Kernel:
    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        asked = _asked.get()
        if asked is None:
            self._jitted[grid](*args, **options)
        elif (form := (self, *map(_form, args), *options.items())) not in asked:
            asked.add(form)
            self._jitted.warmup(*args, grid=grid, **options)


def _form(arg: Any) -> Any:
    """What a compiled kernel depends on, or more than that."""
    return (arg.dtype, arg.data_ptr() % 16) if isinstance(arg, torch.Tensor) else arg


def kernel(function: Callable[..., None]) -> Kernel:
    return Kernel(triton.jit(function))


def kernel_for_any(*numbers: str) -> Callable[[Callable[..., None]], Kernel]:
    """The same, for `numbers` (or addresses) that differ from step to step: one compiled kernel serves all their
    values, where otherwise 1 and multiples of 16 get one of their own."""
    return lambda function: Kernel(triton.jit(do_not_specialize=numbers)(function))


class _Compilers(ThreadPoolExecutor):
    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        return super().submit(lambda: _loaded(compiled(*args, **options)))


def _loaded(made: Any) -> Any:
    """A compiled kernel is loaded, and its launcher made, when it is first asked for this."""
    assert made.run is not None
    return made


def compile_beside(ask: Callable[[], None]) -> threading.Thread:
    """Calls `ask`, in which no kernel of ours runs (what they would have written is undefined, so nothing there may
    look anything up by it); the thread that comes back ends when all of them are made."""
    compilers = _Compilers(NUM_COMPILERS, "compiler")
    mode = AsyncCompileMode(compilers)

    def asking() -> None:
        _asked.set(set())
        mode.__enter__()
        ask()

    copy_context().run(asking)
    compilers.shutdown(wait=False)  # takes nothing more, and ends what it has
    finishing = threading.Thread(target=mode.__exit__, args=(None, None, None), name="compilers", daemon=True)
    finishing.start()
    return finishing
