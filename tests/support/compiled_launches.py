"""Records launches of Triton kernels instead of running them, and compiles them for a GPU that is not present."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from triton import compile as compiled_for
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenmill.ops.triton.launch.kernel import FUSED, Kernel
from tokenmill.ops.triton.launch.pdl import launch_options

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_SHARED = 227 * 1024  # shared memory of a program, at most
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


class KernelLaunch:
    """A kernel and its arguments, as the compiler sees them."""

    def __init__(self, jitted: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        named = [parameter.name for parameter in jitted.params]
        values = dict(zip(named, args, strict=False)) | {name: options[name] for name in named if name in options}
        self.jitted = jitted
        self.options = {name: value for name, value in options.items() if name not in named}
        self.types: dict[str, str] = {}
        self.constants: dict[tuple[int], Any] = {}
        self.facts: dict[tuple[int], Any] = {}
        for number, parameter in enumerate(jitted.params):
            self._add(number, parameter, values[parameter.name])

    def _add(self, number: int, parameter: Any, value: Any) -> None:
        is_number = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_number and value == 1):
            self.types[parameter.name], self.constants[(number,)] = "constexpr", value
            return
        if isinstance(value, torch.Tensor) or (is_number and value % 16 == 0):
            self.facts[(number,)] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            self.types[parameter.name] = "*" + NAMES[value.dtype]
        else:
            self.types[parameter.name] = "i32" if isinstance(value, int) else "fp32"

    @property
    def form(self) -> Any:
        return self.jitted.fn.__name__, str(self.types), str(self.constants), str(self.facts), str(self.options)

    @property
    def name(self) -> str:
        return str(self.jitted.fn.__name__)

    def compiled(self, target: GPUTarget, num_stages: int | None = None) -> Any:
        source = ASTSource(self.jitted, self.types, self.constants, self.facts)
        stages = {} if num_stages is None else {"num_stages": num_stages}
        return compiled_for(source, target=target, options=FUSED | self.options | stages)

    def shared_bytes(self, target: GPUTarget, num_stages: int | None = None) -> int:
        return int(self.compiled(target, num_stages).metadata.shared)


@contextmanager
def launches_on_hopper(*modules: ModuleType) -> Iterator[dict[Any, KernelLaunch]]:
    """Record the kernels launched inside the block, each distinct form once: with programmatic dependent launch, and
    with PTX for the kernels in `modules`. Their outputs are undefined."""
    found: dict[Any, KernelLaunch] = {}

    def launch(self: Kernel, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        one = KernelLaunch(self._jitted, args, options)
        found.setdefault(one.form, one)

    launch_options.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(Kernel, "_launch", launch))
        stack.enter_context(patch("tokenmill.ops.triton.launch.pdl.overlaps", lambda: True))
        for module in modules:
            stack.enter_context(patch.object(module, "has_ptx", lambda: True))
        yield found
    launch_options.cache_clear()
