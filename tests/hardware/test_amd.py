"""AMD GPUs found in a made-up machine's files, and what a doctor and a planner make of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tokenmill.bench import offline
from tokenmill.bench.traffic import Lengths
from tokenmill.cli.doctor import gpu_advice, hardware_rows
from tokenmill.config import EngineConfig, OpsConfig
from tokenmill.config.engine import GPU_LIMITS
from tokenmill.engine import resolve
from tokenmill.hardware.gpu import Gpu, architecture_name, probe_amd
from tokenmill.hardware.machine import probe_machine
from tokenmill.hardware.peaks import find_device

GIB = 1 << 30
INSTINCT = Gpu(0, "AMD Instinct MI300X OAM", 192 * GIB, 190 * GIB, "gfx942", "amd")
RADEON = Gpu(1, "AMD Radeon RX 7900 XTX", 24 * GIB, 24 * GIB, "gfx1100", "amd")
UNNAMED = Gpu(2, "AMD GPU gfx90a", 64 * GIB, 64 * GIB, "gfx90a", "amd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A processor and three GPUs, of which the driver, a list and nobody knows the name."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, version, render in ((0, 0, 0), (1, 90402, 128), (2, 110000, 129), (10, 90010, 130)):
        (nodes / str(number)).mkdir(parents=True)
        text = (
            f"simd_count 4\ngfx_target_version {version}\ndrm_render_minor {render}\nunique_id 18446744073709551615\n"
        )
        (nodes / str(number) / "properties").write_text(text)
    files = {
        128: {"product_name": INSTINCT.name, "mem_info_vram_total": 192 * GIB, "mem_info_vram_used": 2 * GIB},
        129: {"device": "0x744c", "revision": "0xc8", "mem_info_vram_total": 24 * GIB, "mem_info_vram_used": 0},
        130: {"device": "0x7408", "revision": "0x00", "mem_info_vram_total": 64 * GIB},
    }  # fmt: skip
    for render, texts in files.items():
        folder = tmp_path / f"sys/class/drm/renderD{render}/device"
        folder.mkdir(parents=True)
        for name, value in texts.items():
            (folder / name).write_text(f"{value}\n")
    names = tmp_path / "usr/share/libdrm/amdgpu.ids"
    names.parent.mkdir(parents=True)
    names.write_text("# List of AMDGPU IDs\n1.0.0\n744C, C4, AMD Radeon RX 7900\n744C, C8, AMD Radeon RX 7900 XTX\n")
    return tmp_path


def test_what_the_kernel_tells_is_found_in_its_order(root: Path) -> None:
    assert probe_amd(root, {}) == [INSTINCT, RADEON, UNNAMED]
    assert probe_amd(root / "nothing", {}) == []


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, [RADEON.name]),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1,0"}, [INSTINCT.name, UNNAMED.name]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_hidden_devices_are_not_seen(root: Path, environment: dict[str, str], names: list[str]) -> None:
    found = probe_amd(root, environment)
    assert [gpu.name for gpu in found] == names


@pytest.mark.parametrize(("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110001, "gfx1101")])
def test_architectures_have_the_compilers_names(version: int, name: str) -> None:
    assert architecture_name(version) == name


def test_a_doctor_and_a_planner_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(probe_machine(), gpus=(INSTINCT, UNNAMED))
    told = dict(hardware_rows(machine))
    assert "gfx942, 204.0 GB free, " in told["gpu 0"] and "TFLOP/s" in told["gpu 0"]
    assert told["gpu 2"].startswith("AMD GPU gfx90a, gfx90a, 68.7 GB free")
    assert find_device(INSTINCT.name) == find_device("MI300X") and find_device(RADEON.name) is not None
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpu_advice(INSTINCT).startswith(f"{INSTINCT.name} is not used: this torch is built without ROCm")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for can_open, told in ((False, "may be too old for ROCm 6.4"), (True, "")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda can_open=can_open: can_open)
        assert gpu_advice(INSTINCT).endswith(told) and bool(gpu_advice(INSTINCT)) != can_open


def test_a_gpu_that_torch_can_t_use_does_not_set_the_limits_of_a_benchmark() -> None:
    workload = offline.OfflineWorkload(Lengths(8, 8), Lengths(2, 2), (300,))
    machine = replace(probe_machine(), gpus=(INSTINCT,))
    on_cpu = EngineConfig(ops=OpsConfig(device="cpu"))
    for config, can_use, rows in ((EngineConfig(), True, None), (EngineConfig(), False, 300), (on_cpu, True, 300)):
        with (
            patch.object(resolve, "probe_machine", return_value=machine),
            patch.object(torch.cuda, "is_available", return_value=can_use),
            patch.object(torch.cuda, "mem_get_info", return_value=(INSTINCT.free_bytes, INSTINCT.memory_bytes)),
        ):
            assert offline.config_for(config, workload).scheduler.max_running == rows
    assert GPU_LIMITS[0] >= 300
