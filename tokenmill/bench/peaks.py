"""What the machine could do at best, to hold an achieved speed against: measured on a CPU, listed for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.hardware.machine import Machine, probe_machine
from tokenmill.hardware.measured import measure_cpu
from tokenmill.hardware.peaks import DevicePeaks, PeakDType, find_device

MEASURE_S = 1.5


@dataclass(frozen=True)
class Peaks:
    device: str
    source: str  # "measured" or "listed"
    bandwidth_bytes_s: float
    flops: float
    flops_dtype: str

    def as_dict(self) -> dict[str, Any]:
        return {f"peak_{name}": value for name, value in vars(self).items()}


def machine_peaks(device: str, dtype: str, threads: int | None) -> Peaks | None:
    """None for a GPU that the table does not know."""
    if device == "cpu":
        return measured_peaks(dtype, threads)
    machine = probe_machine()
    listed = listed_device(machine)
    if listed is None:
        return None
    kinds: dict[str, PeakDType] = {"float32": "fp32", "fp8": "fp8"}  # 4-bit matrices are expanded for many rows
    kind = kinds.get(dtype, "bf16")
    return Peaks(listed.name, "listed", listed.bandwidth_bytes_s, listed.flops_for(kind), kind)


def measured_peaks(dtype: str, threads: int | None) -> Peaks:
    found = measure_cpu(threads, MEASURE_S)
    uses_int8 = dtype not in ("float32", "bfloat16", "float16") and found.int8_flops is not None
    flops = found.int8_flops if uses_int8 and found.int8_flops else found.fp32_flops
    name = probe_machine().cpu.name
    return Peaks(name, "measured", found.bandwidth_bytes_s, flops, "int8" if uses_int8 else "fp32")


def listed_device(machine: Machine) -> DevicePeaks | None:
    return find_device(machine.gpus[0].name) if machine.gpus else None
