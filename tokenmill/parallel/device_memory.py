"""GPU memory shared between processes by CUDA IPC, on the same GPU or on peers that can access it.

One process allocates the memory and sends its IPC handle; others map it. This uses the driver API directly, because
torch's own sharing of CUDA tensors leaves files behind when a process is killed.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from tokenmill.errors import InvalidConfig

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: other GPUs' memory is mapped on first use


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), IpcHandle, ctypes.c_uint]
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    driver.cuMemsetD8_v2.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(IpcHandle), ctypes.c_uint64]
    driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    driver.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    return driver


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        raise InvalidConfig(
            f"ranks can't access each other's GPU memory: {name}: {reason}",
            param="tp",
            hint="GPUs of several ranks must be able to map each other's memory (nvidia-smi topo -p2p r)",
        )


class SharedMemory:
    """Zeroed memory of the current device; the driver frees it at the latest when this process ends."""

    def __init__(self, num_bytes: int) -> None:
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        self.address = address.value
        _call("cuMemsetD8_v2", self.address, 0, num_bytes)
        _call("cuCtxSynchronize")

    def handle(self) -> bytes:
        """Return the IPC handle by which other processes map this memory."""
        handle = IpcHandle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), self.address)
        return bytes(handle)

    def close(self) -> None:
        _call("cuMemFree_v2", self.address)


class MappedMemory:
    """Memory of another process, mapped for kernels of the current device."""

    def __init__(self, handle: bytes) -> None:
        address = ctypes.c_uint64()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
        self.address = address.value

    def close(self) -> None:
        _call("cuIpcCloseMemHandle", self.address)
