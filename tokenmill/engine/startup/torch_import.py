"""Shortening the import of torch, which takes more than a second of every start.

preload_libraries       a thread loads torch's largest library while the tokenizer is read
without_meta_kernels    skips the Python kernels of meta tensors, nearly half of the import time
cuda_preinit            a thread creates the GPU's context meanwhile: a third of a second without the GIL
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tokenmill.engine.startup.garbage_collection import gc_paused
from tokenmill.engine.startup.versions import is_tested
from tokenmill.ops.cpu.availability import load_library

LIBRARY, GPU_LIBRARY = Path("lib/libtorch_cpu.so"), Path("lib/libtorch_cuda.so")
META_KERNELS = "_meta_registrations"  # shapes of a thousand ops in Python; compilers and device="meta" use them
DRIVER, FIRST_GPU = "libcuda.so.1", 0


@contextmanager
def torch_import(*, fast_start: bool, device: str = "cpu") -> Iterator[None]:
    """Import torch inside this context. `device`: the configured device, if known. Without `fast_start`, or with an
    untested version of torch, do nothing."""
    if not fast_start or not is_tested("torch"):
        yield
        return
    with gc_paused(), without_meta_kernels(), cuda_preinit(device):
        yield


@contextmanager
def preload_libraries(*, fast_start: bool = True) -> Iterator[None]:
    """Load torch's largest library in a thread while the body runs. The body should not import compiled modules: the
    system loads one library at a time, so that import would wait."""
    path = _torch_file(LIBRARY) if fast_start else None
    if path is None:
        yield
        return
    thread = threading.Thread(target=load_library, args=(str(path),), name="torch-libraries")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _torch_file(name: Path) -> Path | None:
    """Return the path of a file of torch, None if it does not exist; must not import torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / name
    return path if path.is_file() else None


# ── meta kernels ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def without_meta_kernels() -> Iterator[None]:
    """Import torch inside without its kernels for meta tensors; a later import of their module adds them. Core
    processes never need them. Other processes must call `import_meta_kernels` before the start ends, because their
    program may use such tensors."""
    name = f"torch.{META_KERNELS}"
    if "torch" in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]
        vars(sys.modules.get("torch", ModuleType("torch"))).pop(META_KERNELS, None)


def import_meta_kernels() -> None:
    with gc_paused():
        import_module(f"torch.{META_KERNELS}")


# ── the GPU's context ──────────────────────────────────────────────────────────────────────────────────


@contextmanager
def cuda_preinit(device: str) -> Iterator[None]:
    """Create the first GPU's primary context in a thread while the body runs; torch will use it. Do nothing if torch
    can't use a GPU, or was imported before: the program may have selected another device."""
    if device == "cpu" or "torch" in sys.modules or _torch_file(GPU_LIBRARY) is None:
        yield
        return
    thread = threading.Thread(target=open_first_gpu, name="cuda-preinit")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def open_first_gpu() -> bool:
    """Create the first GPU's primary context; return False if that fails, for which torch raises an error later."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), FIRST_GPU) != 0:
        return False
    return bool(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0)
