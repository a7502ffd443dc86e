"""GPUs of this machine, found without opening a context: no torch, no package.

NVIDIA   as the driver's own library (NVML) reports them, through ctypes. Without a driver there is no library and the
         answer is "none". CUDA_VISIBLE_DEVICES hides devices as it does from torch.
AMD      as the kernel's driver reports them in files, without ROCm:

    /sys/class/kfd/kfd/topology/nodes/N/properties   what can compute, in ROCm's order: architecture, render number R
    /sys/class/drm/renderDR/device/                  the same device for graphics: memory, name or number of the model

         A number becomes a name by the list that libdrm installs. ROCR_VISIBLE_DEVICES hides devices, then
         HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP heeds too) chooses among the others.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    architecture: str  # as compilers call it: sm_90, gfx942
    vendor: Literal["nvidia", "amd"] = "nvidia"


def visible_indices(setting: str | None, count: int) -> list[int]:
    """Return the visible devices as CUDA and HIP do: indices up to the first that does not exist.

    UUIDs can't be resolved here and hide nothing.
    """
    if setting is None:
        return list(range(count))
    chosen: list[int] = []
    for part in filter(None, (part.strip() for part in setting.split(","))):
        if part.startswith(("GPU-", "MIG-")):
            return list(range(count))
        if not part.isdigit() or int(part) >= count:
            break
        chosen.append(int(part))
    return chosen


# ── NVIDIA ───────────────────────────────────────────────────────────────────────────────────────────────

NVML_OK = 0
_NAME_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def probe_nvidia() -> list[Gpu]:
    nvml = load_nvml()
    if nvml is None or nvml.nvmlInit_v2() != NVML_OK:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != NVML_OK:
            return []
        visible = visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), count.value)
        return [gpu for index in visible if (gpu := _describe_nvidia(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str | None:
    nvml = load_nvml()
    if nvml is None or nvml.nvmlInit_v2() != NVML_OK:
        return None
    try:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        return text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, _NAME_BYTES) == NVML_OK else None
    finally:
        nvml.nvmlShutdown()


def load_nvml() -> ctypes.CDLL | None:
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _describe_nvidia(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    device, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != NVML_OK:
        return None
    answers = (
        nvml.nvmlDeviceGetName(device, name, _NAME_BYTES),
        nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
        nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)),
    )
    if any(answer != NVML_OK for answer in answers):
        return None
    return Gpu(index, name.value.decode(), memory.total, memory.free, f"sm_{major.value}{minor.value}")


# ── AMD ──────────────────────────────────────────────────────────────────────────────────────────────────

NODES, DRM = "sys/class/kfd/kfd/topology/nodes", "sys/class/drm"
NAMES = "usr/share/libdrm/amdgpu.ids"  # "74A1, 00, AMD Instinct MI300X OAM"


def probe_amd(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    found = [gpu for node in _nodes(root) if (gpu := _describe_amd(root, _properties(node))) is not None]
    first = visible_indices(environment.get("ROCR_VISIBLE_DEVICES"), len(found))
    chosen = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    left = [found[index] for index in first]
    return [Gpu(**{**vars(left[index]), "index": index}) for index in visible_indices(chosen, len(left))]


def architecture_name(version: int) -> str:
    """90402 → gfx942, 90010 → gfx90a, 110000 → gfx1100"""
    major, minor, step = version // 10_000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def _nodes(root: Path) -> list[Path]:
    folder = root / NODES
    return sorted(folder.iterdir(), key=lambda node: int(node.name)) if folder.is_dir() else []


def _properties(node: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(node / "properties").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _describe_amd(root: Path, properties: dict[str, int]) -> Gpu | None:
    """Describe a node; None for processors, and for devices of unknown memory."""
    version = properties.get("gfx_target_version", 0)
    device = root / DRM / f"renderD{properties.get('drm_render_minor', 0)}" / "device"
    total, used = _text(device / "mem_info_vram_total"), _text(device / "mem_info_vram_used")
    if not version or not total.isdigit():
        return None
    architecture = architecture_name(version)
    free = int(total) - (int(used) if used.isdigit() else 0)
    return Gpu(0, _name(root, device) or f"AMD GPU {architecture}", int(total), free, architecture, "amd")


def _name(root: Path, device: Path) -> str | None:
    if told := _text(device / "product_name"):
        return told
    model = _text(device / "device").removeprefix("0x"), _text(device / "revision").removeprefix("0x")
    for line in _text(root / NAMES).splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3 and all(ours.lower() == theirs.lower() for ours, theirs in zip(model, parts, strict=False)):
            return parts[2]
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
