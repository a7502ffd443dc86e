"""Whether the compiled kernels are here. They are absent where the package was installed without a C++ compiler."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        module = import_module("tokenmill.ops.cpu._native")
    except ImportError as error:
        return None, f"the native kernels were not built ({error}); install a C++ compiler and reinstall tokenmill"
    return module, f"native kernels for {module.instruction_set()}"


def is_available() -> tuple[bool, str]:
    """(can it be used, why or why not)"""
    module, reason = _load()
    return module is not None, reason


def native() -> ModuleType:
    """The compiled module; call `is_available` first."""
    module, reason = _load()
    if module is None:
        raise RuntimeError(reason)
    return module


def load_library(path: str) -> bool:
    """Loads a shared library while other threads run, which Python's own loading would stop; False where it can't."""
    module, _ = _load()
    return module is not None and bool(module.load_library(path))


def instruction_set() -> str:
    """The variant of the kernels that this processor runs: amx, avx512, avxvnni, avx2 or portable."""
    return str(native().instruction_set())


def instruction_sets() -> list[str]:
    """All variants this processor can run, best first."""
    return list(native().instruction_sets())
