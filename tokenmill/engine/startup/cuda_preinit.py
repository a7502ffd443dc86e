"""The GPU is opened while torch is imported: making its context takes a third of a second and no Python.

A process has one such context of a device (the "primary" one), so torch finds it made.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER, FIRST = "libcuda.so.1", 0
TORCH_FOR_GPUS = Path("lib/libtorch_cuda.so")


@contextmanager
def cuda_preinit(device: str) -> Iterator[None]:
    """Inside, torch is imported. `device`: as in the config. Nothing is opened for a torch that can't use it, nor for
    one that was imported before: another device may have been chosen with it."""
    if device == "cpu" or "torch" in sys.modules or not _has_torch_for_gpus():
        yield
        return
    thread = threading.Thread(target=open_first_device, name="device-ahead")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def open_first_device() -> bool:
    """False where there is none; torch will say why, if anybody wants to know."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), FIRST) != 0:
        return False
    return bool(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0)


def _has_torch_for_gpus() -> bool:
    """Finding torch must not import it."""
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None and (Path(found.origin).parent / TORCH_FOR_GPUS).is_file()
