"""The probes against what the system itself says, and against made-up systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tokenmill.hardware.cgroup import cpu_quota, memory_limit_bytes, memory_used_bytes
from tokenmill.hardware.cpu import known_sets, probe_cpu, usable_cores
from tokenmill.hardware.gpu import visible_indices
from tokenmill.hardware.machine import probe_machine
from tokenmill.hardware.memory import probe_memory, within_limit


def test_the_probe_agrees_with_psutil() -> None:
    machine = probe_machine()
    assert machine.cpu.logical_cores == psutil.cpu_count()
    if psutil.cpu_count(logical=False):
        assert machine.cpu.physical_cores == psutil.cpu_count(logical=False)
    assert 1 <= machine.cpu.usable_cores <= machine.cpu.logical_cores
    if machine.memory.limit_bytes is None:
        assert machine.memory.total_bytes == psutil.virtual_memory().total
    assert 0 < machine.memory.available_bytes <= machine.memory.total_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are Linux's")
def test_affinity_is_respected() -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); from tokenmill.hardware.cpu import probe_cpu; "
    code += "print(probe_cpu().usable_cores)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"


def test_probing_imports_nothing_heavy() -> None:
    code = "import sys; from tokenmill.hardware.machine import probe_machine; probe_machine(); "
    code += "print([m for m in ('torch', 'numpy', 'psutil', 'pynvml') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_quota_of_version_2_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (inner / "memory.max").write_text("2000\n")
    (tmp_path / "a" / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("900\n")
    (inner / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert cpu_quota(tmp_path, "0::/a/b") == 1.5
    assert memory_limit_bytes(tmp_path, "0::/a/b") == 2000
    assert memory_used_bytes(tmp_path, "0::/a/b") == 600


def test_quota_of_version_1(tmp_path: Path) -> None:
    for controller in ("cpu", "memory"):
        (tmp_path / controller / "x").mkdir(parents=True)
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "memory" / "x" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    listing = "4:cpu,cpuacct:/x\n3:memory:/x"
    assert cpu_quota(tmp_path, listing) == 0.5
    assert memory_limit_bytes(tmp_path, listing) is None


@pytest.mark.parametrize(("cores", "quota", "usable"), [(8, None, 8), (8, 1.5, 2), (8, 0.2, 1), (2, 16.0, 2)])
def test_usable_cores(cores: int, quota: float | None, usable: int) -> None:
    assert usable_cores(cores, quota) == usable


def test_memory_within_a_group() -> None:
    assert within_limit(100, 80, None, None).available_bytes == 80
    limited = within_limit(100, 80, 50, 20)
    assert (limited.total_bytes, limited.available_bytes, limited.limit_bytes) == (50, 30, 50)
    assert within_limit(100, 80, 50, 60).available_bytes == 0


def test_instruction_sets_keep_their_order_and_drop_noise() -> None:
    assert known_sets("fpu vme avx512f avx2 sse4_2 nonsense") == ("sse4_2", "avx2", "avx512f")
    if os.uname().machine == "x86_64":
        assert "sse4_2" in probe_cpu().instruction_sets


@pytest.mark.parametrize(
    ("setting", "visible"),
    [(None, [0, 1, 2]), ("", []), ("-1", []), ("2,0", [2, 0]), ("0,9,1", [0]), ("GPU-abc", [0, 1, 2])],
)
def test_cuda_visible_devices(setting: str | None, visible: list[int]) -> None:
    assert visible_indices(setting, 3) == visible


def test_memory_of_this_process_is_plausible() -> None:
    assert probe_memory().total_bytes > 64 << 20
