"""AMD GPUs as the kernel's driver reports them in files: no ROCm, no torch, no package.

    /sys/class/kfd/kfd/topology/nodes/N/properties   what can compute, in ROCm's order: architecture, render number R
    /sys/class/drm/renderDR/device/                  the same device for graphics: memory, name or number of the model

A number becomes a name by the list that libdrm installs. ROCR_VISIBLE_DEVICES hides devices, then HIP_VISIBLE_DEVICES
(or CUDA_VISIBLE_DEVICES, which HIP heeds too) chooses among the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenmill.hardware.gpu import Gpu, visible_indices

NODES, DRM = "sys/class/kfd/kfd/topology/nodes", "sys/class/drm"
NAMES = "usr/share/libdrm/amdgpu.ids"  # "74A1, 00, AMD Instinct MI300X OAM"


def probe_amd(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    found = [gpu for node in _nodes(root) if (gpu := _describe(root, _properties(node))) is not None]
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


def _describe(root: Path, properties: dict[str, int]) -> Gpu | None:
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
