"""A kernel of ours, launched as Triton's are: `kernel[grid](tensor, ...)`.

Making one takes half a second. Whatever is called inside `compile_beside` has its kernels made side by side instead of
run: each is asked for once in every form, and left to processes of their own (see `compilers`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.ops.triton import ahead
from tokenmill.ops.triton.compilers import start_workers, wait_for

USUAL_STAGES = 3  # where a launch does not say
FUSED = {"enable_fp_fusion": True}  # multiplications with additions, unless a launch says otherwise
_asked: ContextVar[set[Any] | None] = ContextVar("asked", default=None)  # forms; None: kernels run


class Kernel:
    """Remembers what was compiled for which kinds of arguments: a look-up of our own takes a third of the time that
    Triton's does, and a step of a few tokens is made of hundreds of launches."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._is_constant = [parameter.is_constexpr for parameter in getattr(jitted, "params", ())]
        self._made: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        asked = _asked.get()
        if asked is not None:
            self._ask(asked, grid, args, options)
            return
        kinds = [arg if is_constant else _kind(arg) for arg, is_constant in zip(args, self._is_constant, strict=False)]
        key = (*kinds, *options.values())
        found = self._made.get(key)
        if found is None:
            self._make(key, self._run_first(grid, args, options), args, options)
            return
        run, function, metadata, named = found
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        run(*grid, *(1, 1, 1)[len(grid) :], stream, function, metadata, None, None, None, *args, *named)

    def _run_first(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """With fewer tiles on their way at once where a multiprocessor has less memory of its own than an H200's."""
        while True:
            try:
                return self._jitted[grid](*args, **FUSED | options)
            except OutOfResources:
                stages = options.get("num_stages", USUAL_STAGES)
                if stages == 1:
                    raise
                options = {**options, "num_stages": stages - 1}

    def _ask(self, asked: set[Any], grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        form = (self, *map(_form, args), *options.items())
        if form not in asked:
            asked.add(form)
            self._jitted.warmup(*args, grid=grid, **FUSED | options)

    def _make(self, key: Any, made: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if isinstance(made, CompiledKernel):  # and not one that is interpreted, or still being made
            named = tuple(options[parameter.name] for parameter in self._jitted.params[len(args) :])
            self._made[key] = (made.run, made.function, made.packed_metadata, named)


def _kind(arg: Any) -> Any:
    """What a compiled kernel depends on"""
    if isinstance(arg, torch.Tensor):
        return arg.dtype if not arg.data_ptr() & 15 else (arg.dtype,)
    if isinstance(arg, int):
        return (arg == 1, not arg & 15, -(2**31) <= arg < 2**31)
    return _form(arg) if isinstance(arg, TensorDescriptor) else type(arg)


def _form(arg: Any) -> Any:
    """The same, or more than that, where whole numbers and constants are not told apart"""
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    return (arg.dtype, arg.data_ptr() % 16) if isinstance(arg, torch.Tensor) else arg


def kernel(function: Callable[..., None]) -> Kernel:
    return Kernel(triton.jit(function))


def kernel_for_any(*numbers: str) -> Callable[[Callable[..., None]], Kernel]:
    """The same, for `numbers` (or addresses) that differ from step to step: one compiled kernel serves all their
    values, where otherwise 1 and multiples of 16 get one of their own."""
    return lambda function: Kernel(triton.jit(do_not_specialize=numbers)(function))


class _Asked(Executor):
    """Takes note of what is to be compiled."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._workers: list[int] = []
        self._num_begun = 0

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.kernels.append((future, partial(compiled, *args, **options)))
        return future

    def begin(self) -> None:
        """What was asked for since the last time is compiled elsewhere, from now on."""
        self._workers += start_workers([compiled for _, compiled in self.kernels[self._num_begun :]])
        self._num_begun = len(self.kernels)

    def finish(self) -> None:
        """Elsewhere first; then here, where they are found on disk. What failed there fails here."""
        wait_for(self._workers)
        for future, compiled in self.kernels:
            try:
                made = compiled()
                assert made.run is not None  # who asks for this has it loaded
                future.set_result(made)
            except Exception as error:
                future.set_exception(error)


def compile_beside(*asks: Callable[[], None]) -> threading.Thread:
    """Calls `asks`, in which no kernel of ours runs (what they would have written is undefined, so nothing there may
    look anything up by it). What one of them asks for is being made while the next one is called; the thread that
    comes back ends when all of it is."""
    ahead.finish()
    asked = _Asked()
    mode = AsyncCompileMode(asked)

    context = copy_context()
    context.run(_asked.set, set())
    context.run(mode.__enter__)
    for ask in asks:
        context.run(ask)
        asked.begin()  # by copies of this process, made while nobody is in the middle of an import

    def finish() -> None:
        asked.finish()
        mode.__exit__(None, None, None)

    finishing = threading.Thread(target=finish, name="compilers", daemon=True)
    finishing.start()
    return finishing
