"""Torch's import, a second and more of every start, made shorter.

preload_libraries       its largest library is loaded by a thread while the tokenizer is read
without_meta_kernels    what only tensors without memory need, nearly half of the time, is left out
cuda_preinit            the GPU's context, a third of a second without any Python, is made meanwhile
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
    """Inside, import torch. `device`: as in the config, where it is known. Without `fast_start`, or with a torch that
    this was not tested with, nothing is done."""
    if not fast_start or not is_tested("torch"):
        yield
        return
    with gc_paused(), without_meta_kernels(), cuda_preinit(device):
        yield


@contextmanager
def preload_libraries(*, fast_start: bool = True) -> Iterator[None]:
    """Inside, torch's largest library is loaded beside what is done. Not the place to import compiled modules: the
    system loads one library at a time, and an import of a second one waits."""
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
    """A file of torch, None where it has none; finding it must not import torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / name
    return path if path.is_file() else None


# ── meta kernels ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def without_meta_kernels() -> Iterator[None]:
    """Inside, torch is imported without its kernels for tensors on "meta"; a later import of their module brings them.
    A process of our own never needs them. In any other `import_meta_kernels` must follow, while the start waits for
    something else or at its end: code there may use such tensors and not know that anything is missing."""
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
    """Inside, the first GPU's primary context is made, of which a process has one: torch finds it made. Nothing is
    opened for a torch that can't use a GPU, nor for one that was imported before: the program may have chosen another
    device with it."""
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
    """Make the first GPU's primary context; False where there is none, which torch will explain where it matters."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), FIRST_GPU) != 0:
        return False
    return bool(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0)
