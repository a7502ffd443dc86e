"""NVIDIA GPUs as the driver's own library (NVML) reports them, through ctypes: no CUDA context, no torch, no package.

Without a driver there is no library and the answer is "none". CUDA_VISIBLE_DEVICES hides devices as it does from torch.
"""

from __future__ import annotations

import ctypes
import os

from tokenmill.hardware.gpu import Gpu, visible_indices

_OK = 0
_NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def probe_nvidia() -> list[Gpu]:
    nvml = _library()
    if nvml is None or nvml.nvmlInit_v2() != _OK:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _OK:
            return []
        visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), count.value)
        return [gpu for index in visible if (gpu := _describe(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str | None:
    nvml = _library()
    if nvml is None or nvml.nvmlInit_v2() != _OK:
        return None
    try:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        return text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, _NAME_BYTES) == _OK else None
    finally:
        nvml.nvmlShutdown()


def _library() -> ctypes.CDLL | None:
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _describe(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    device, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _OK:
        return None
    answers = (
        nvml.nvmlDeviceGetName(device, name, _NAME_BYTES),
        nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
        nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)),
    )
    if any(answer != _OK for answer in answers):
        return None
    return Gpu(index, name.value.decode(), memory.total, memory.free, f"sm_{major.value}{minor.value}")
