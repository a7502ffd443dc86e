"""A kernel of ours, launched as Triton's are: `kernel[grid](tensor, ...)`.

Making one takes half a second. Whatever is called inside `compile_beside` has its kernels made side by side instead of
run: each is asked for once in every form, and left to processes of their own (`compile_workers.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextvars import ContextVar, copy_context
from functools import cached_property, partial
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources

from tokenmill.ops.triton.launch import compile_workers, preload
from tokenmill.ops.triton.launch.compile_workers import CompileWorkers, source_of

CACHED_NAME_LENGTH = 150  # to which Triton cuts the names of kernels in its cache
USUAL_STAGES = 3  # where a launch does not say
FUSED = {"enable_fp_fusion": True}  # multiplications with additions, unless a launch says otherwise
_asked: ContextVar[set[Any] | None] = ContextVar("asked", default=None)  # forms; None: kernels run

BINDER_NAMES = frozenset(("params", "specialization", "options"))  # locals of Triton's generated argument binder


class Kernel:
    """Remembers what was compiled for which kinds of arguments: a look-up of our own takes a third of the time that
    Triton's does, and a step of a few tokens is made of hundreds of launches."""

    def __init__(
        self, function: Callable[..., None], numbers: Sequence[str] = (), jit: Callable[..., Any] = triton.jit
    ) -> None:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        assert not BINDER_NAMES.intersection(names), (
            f"{function.__name__}: Triton's argument binder uses {BINDER_NAMES}"
        )
        self._function = function
        self._numbers = numbers
        self._jit = jit
        self._made: dict[Any, Any] = {}

    @property
    def name(self) -> str:
        return self._function.__name__

    @cached_property
    def _jitted(self) -> Any:
        """Triton reads the source then, which takes milliseconds: most models need a third of all kernels."""
        return self._jit(do_not_specialize=self._numbers)(self._function)

    @cached_property
    def _is_constant(self) -> list[bool]:
        return [parameter.is_constexpr for parameter in getattr(self._jitted, "params", ())]

    def constants(self, args: Sequence[Any]) -> list[Any]:
        """The compile-time constants among the arguments of a launch"""
        return [arg for arg, is_constant in zip(args, self._is_constant, strict=False) if is_constant]

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
    return _form(arg) if hasattr(arg, "block_shape") else type(arg)


def _form(arg: Any) -> Any:
    """The same, or more than that, where integers and constants are not told apart"""
    if hasattr(arg, "block_shape"):  # a descriptor of a tensor, Triton's or Gluon's
        return arg.base.dtype, *arg.block_shape
    return (arg.dtype, arg.data_ptr() % 16) if isinstance(arg, torch.Tensor) else arg


def is_asking() -> bool:
    """Tell whether kernels are asked for here, and not run."""
    return _asked.get() is not None


def kernel(function: Callable[..., None]) -> Kernel:
    return Kernel(function)


def kernel_unspecialized(
    *numbers: str, jit: Callable[..., Any] = triton.jit, is_large: bool = False
) -> Callable[[Callable[..., None]], Kernel]:
    """The same, for `numbers` (or addresses) that differ from step to step: one compiled kernel serves all their
    values, where otherwise 1 and multiples of 16 get one of their own. `jit`: of the language it is written in;
    `is_large`: it takes longest to compile."""

    def made(function: Callable[..., None]) -> Kernel:
        if is_large:
            compile_workers.note_large(function)
        return Kernel(function, numbers, jit)

    return made


class Compiling(Executor):
    """Kernels that were asked for, each of them once. Whatever is called here asks for kernels and runs none (what they
    would have written is undefined, so nothing there may look anything up by it)."""

    def __init__(self) -> None:
        preload.finish()
        self._kernels: list[tuple[Any, Callable[[], Any]]] = []  # futures, to which Triton adds the kernel's key
        self._num_begun = 0
        from triton.runtime._async_compile import AsyncCompileMode  # Triton's own, and not in all of its versions

        self._mode = AsyncCompileMode(self)
        self._context = copy_context()
        self._context.run(_asked.set, set())
        self._context.run(self._mode.__enter__)
        self._loading = threading.Thread()

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Triton's own way to ask"""
        future: Future[Any] = Future()
        self._kernels.append((future, partial(compiled, *args, **options)))
        return future

    def note(self, ask: Callable[[], object]) -> None:
        """What `ask` asks for will be made later."""
        self._context.run(ask)

    def make(self, *asks: Callable[[], object]) -> None:
        """What was noted is made from now on; what one of `asks` asks for, while the next one is called. What an
        earlier start has left on disk is loaded from there, without a process to compile it."""
        compilers, first = CompileWorkers(), self._num_begun
        kept: list[int] = []
        for ask in (nothing_more, *asks):
            self.note(ask)
            new = range(self._num_begun, len(self._kernels))
            missing = [number for number in new if not self._is_on_disk(number)]
            kept += [number for number in new if number not in missing]
            compilers.start([self._kernels[number][1] for number in missing], missing)
            self._num_begun = len(self._kernels)
        numbers, made = range(first, self._num_begun), chain(kept, compilers.finished())
        self._loading = threading.Thread(target=self._load_all, args=(numbers, made), name="compilers", daemon=True)
        self._loading.start()

    def _is_on_disk(self, number: int) -> bool:
        """Tell whether Triton's cache has a kernel, by the key and the file that Triton looks for."""
        key: str = self._kernels[number][0]._key
        file = f"{source_of(self._kernels[number][1]).name[:CACHED_NAME_LENGTH]}.json"
        group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file)
        return group is not None and file in group

    @property
    def is_working(self) -> bool:
        """Tell whether something that is being made is not ready yet."""
        return self._loading.is_alive()

    def join(self) -> None:
        """Returns when all that is being made is ready to be launched."""
        self._loading.join()

    def _load_all(self, numbers: Iterable[int], made: Iterator[int]) -> None:
        """What is done elsewhere is found on disk, and the rest compiled here. What failed there fails here, and again,
        aloud, when it is launched."""
        left = set(numbers)
        for number in made:
            left.discard(number)
            self._load(number)
        for number in left:
            self._load(number)

    def _load(self, number: int) -> None:
        future, compiled = self._kernels[number]
        try:
            made = compiled()
            assert made.run is not None  # who asks for this has it loaded
            future.set_result(made)
        except Exception as error:
            future.set_exception(error)
        list(self._mode.future_kernels.values())[number].result(ignore_errors=True)  # known to Triton from now on


def nothing_more() -> None:
    pass


class CompileOnLaunch:
    """The ordinary way: a kernel is compiled when it is first launched, and nothing is asked for beforehand."""

    is_working = False

    def note(self, ask: Callable[[], object]) -> None:
        pass

    def make(self, *asks: Callable[[], object]) -> None:
        pass

    def join(self) -> None:
        pass


def compile_beside(*asks: Callable[[], object]) -> Compiling | CompileOnLaunch:
    """Have kernels compiled by copies of this process, made while no import is running; where workers are not enabled
    (`compile_workers`), kernels are compiled when they are launched."""
    if not compile_workers.is_enabled():
        return CompileOnLaunch()
    compiling = Compiling()
    compiling.make(*asks)
    return compiling


# Triton's own functions of these names work in kernels too, and take so much longer on the host that a short prompt
# would notice.


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


def precision_of(x: torch.Tensor) -> str:
    """The precision of `tl.dot`: float32 is multiplied as float32, not in the matrix units' shortened form of it."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
