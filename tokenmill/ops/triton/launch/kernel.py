"""A launcher for Triton kernels, called as Triton's own: `kernel[grid](tensor, ...)`.

Compiling a kernel takes half a second. Code that is called by `compile_in_parallel` only records its launches: each
variant of a kernel is compiled once, in parallel, by worker processes (`compile_workers.py`), and nothing is run.
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

CACHED_NAME_LENGTH = 150  # Triton truncates the names of kernels in its cache to this length
DEFAULT_STAGES = 3  # Triton's default of `num_stages`
FUSED = {"enable_fp_fusion": True}  # allow fused multiply-add by default
_recorded: ContextVar[set[Any] | None] = ContextVar("recorded", default=None)  # forms; None: kernels run

BINDER_NAMES = frozenset(("params", "specialization", "options"))  # locals of Triton's generated argument binder


class Kernel:
    """Caches compiled variants by the kinds of their arguments: this look-up takes a third of the time of Triton's, and
    a step of a few tokens has hundreds of launches."""

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
        """Create Triton's function lazily: it reads the source, which takes milliseconds, and most models need only a
        third of all kernels."""
        return self._jit(do_not_specialize=self._numbers)(self._function)

    @cached_property
    def _is_constant(self) -> list[bool]:
        return [parameter.is_constexpr for parameter in getattr(self._jitted, "params", ())]

    def constants(self, args: Sequence[Any]) -> list[Any]:
        """Return the compile-time constants among the arguments of a launch."""
        return [arg for arg, is_constant in zip(args, self._is_constant, strict=False) if is_constant]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        recorded = _recorded.get()
        if recorded is not None:
            self._record(recorded, grid, args, options)
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
        """Compile and run a new variant; with fewer pipeline stages if the GPU has less shared memory than an H200."""
        while True:
            try:
                return self._jitted[grid](*args, **FUSED | options)
            except OutOfResources:
                stages = options.get("num_stages", DEFAULT_STAGES)
                if stages == 1:
                    raise
                options = {**options, "num_stages": stages - 1}

    def _record(
        self, recorded: set[Any], grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        form = (self, *map(_form, args), *options.items())
        if form not in recorded:
            recorded.add(form)
            self._jitted.warmup(*args, grid=grid, **FUSED | options)

    def _make(self, key: Any, made: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if isinstance(made, CompiledKernel):  # not in the interpreter, and not while it is still being compiled
            named = tuple(options[parameter.name] for parameter in self._jitted.params[len(args) :])
            self._made[key] = (made.run, made.function, made.packed_metadata, named)


def _kind(arg: Any) -> Any:
    """Return the properties of an argument that select a compiled variant."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype if not arg.data_ptr() & 15 else (arg.dtype,)
    if isinstance(arg, int):
        return (arg == 1, not arg & 15, -(2**31) <= arg < 2**31)
    return _form(arg) if hasattr(arg, "block_shape") else type(arg)


def _form(arg: Any) -> Any:
    """Return a key that is at least as specific as `_kind`, without knowing which integers are constants."""
    if hasattr(arg, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        return arg.base.dtype, *arg.block_shape
    return (arg.dtype, arg.data_ptr() % 16) if isinstance(arg, torch.Tensor) else arg


def is_recording() -> bool:
    """Return whether launches are only recorded here, and not run."""
    return _recorded.get() is not None


def kernel(function: Callable[..., None]) -> Kernel:
    return Kernel(function)


def kernel_unspecialized(
    *numbers: str, jit: Callable[..., Any] = triton.jit, is_large: bool = False
) -> Callable[[Callable[..., None]], Kernel]:
    """Like `kernel`, without specialisation on the arguments `numbers` (integers or addresses), which differ from step
    to step: one variant serves all values, where otherwise 1 and multiples of 16 are separate variants. `jit`: the
    decorator of the kernel's language; `is_large`: it takes longer to compile than most."""

    def made(function: Callable[..., None]) -> Kernel:
        if is_large:
            compile_workers.note_large(function)
        return Kernel(function, numbers, jit)

    return made


class Compiling(Executor):
    """Records launches and compiles each recorded variant once, in worker processes.

    Recorded code runs no kernels, so its outputs are undefined, and it must not depend on their values.
    """

    def __init__(self) -> None:
        preload.finish()
        self._kernels: list[tuple[Any, Callable[[], Any]]] = []  # futures, to which Triton adds the kernel's key
        self._num_begun = 0
        from triton.runtime._async_compile import AsyncCompileMode  # private, and missing in some versions of Triton

        self._mode = AsyncCompileMode(self)
        self._context = copy_context()
        self._context.run(_recorded.set, set())
        self._context.run(self._mode.__enter__)
        self._loading = threading.Thread()

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Receive a compilation from Triton, as an Executor; it is not started yet."""
        future: Future[Any] = Future()
        self._kernels.append((future, partial(compiled, *args, **options)))
        return future

    def note(self, ask: Callable[[], object]) -> None:
        """Record the launches of `ask`, to be compiled by the next `make`."""
        self._context.run(ask)

    def make(self, *asks: Callable[[], object]) -> None:
        """Start to compile what was recorded, then record and compile each of `asks` in turn: workers compile one while
        the next one is recorded. Kernels in Triton's cache on disk are loaded from there instead."""
        compilers, first = CompileWorkers(), self._num_begun
        kept: list[int] = []
        for ask in (_no_launches, *asks):
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
        """Return whether Triton's cache has a kernel, by the key and the file name that Triton uses."""
        key: str = self._kernels[number][0]._key
        file = f"{source_of(self._kernels[number][1]).name[:CACHED_NAME_LENGTH]}.json"
        group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file)
        return group is not None and file in group

    @property
    def is_working(self) -> bool:
        """Return whether a compilation is not finished yet."""
        return self._loading.is_alive()

    def join(self) -> None:
        """Wait until all kernels that were started are ready to be launched."""
        self._loading.join()

    def _load_all(self, numbers: Iterable[int], made: Iterator[int]) -> None:
        """Load the kernels that workers compiled from disk, and compile the rest here. A kernel that fails to compile
        fails here silently, and raises when it is launched."""
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
            assert made.run is not None  # accessing `run` loads the binary
            future.set_result(made)
        except Exception as error:
            future.set_exception(error)
        list(self._mode.future_kernels.values())[number].result(ignore_errors=True)  # registers the kernel with Triton


def _no_launches() -> None:
    pass


class CompileOnLaunch:
    """Stands in for `Compiling` where workers are disabled: kernels are compiled when they are first launched."""

    is_working = False

    def note(self, ask: Callable[[], object]) -> None:
        pass

    def make(self, *asks: Callable[[], object]) -> None:
        pass

    def join(self) -> None:
        pass


def compile_in_parallel(*asks: Callable[[], object]) -> Compiling | CompileOnLaunch:
    """Compile the kernels that `asks` launch in forked copies of this process; no import may run meanwhile. If workers
    are not enabled (`compile_workers`), kernels are compiled when they are launched."""
    if not compile_workers.is_enabled():
        return CompileOnLaunch()
    compiling = Compiling()
    compiling.make(*asks)
    return compiling


# Triton's functions of these names, which also work in kernels, are so slow on the host that a short prompt's latency
# would increase.


def cdiv(number: int, by: int) -> int:
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 1


def precision_of(x: torch.Tensor) -> str:
    """Return the precision of `tl.dot`: full float32 instead of TF32 for float32 inputs."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
