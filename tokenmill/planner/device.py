"""The device of a plan: memory and peaks from the table or from this machine, and the share that a program reaches.

MFU is the share of peak arithmetic a prefill reaches, MBU the share of peak bandwidth a decode step reaches. The
defaults are what good engines reach on large models; `calibrate.py` replaces them by measurements.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tokenmill.engine.backends import NATIVE, TRITON, Backend, Device
from tokenmill.errors import InvalidConfig
from tokenmill.hardware.machine import Machine, probe_machine
from tokenmill.hardware.measured import measure_cpu
from tokenmill.hardware.peaks import DevicePeaks, PeakDType, Vendor, device_names, find_device
from tokenmill.planner.links import Link, find_link

DEFAULT_MFU = {"gpu": 0.5, "accelerator": 0.4, "cpu": 0.5}
DEFAULT_MBU = {"gpu": 0.78, "accelerator": 0.6, "cpu": 0.8}
FAST_LINKED = ("SXM", "NVL", "H20", "GH200", "B200", "B300", "MI300", "MI325", "MI35", "MI250", "TPU", "Gaudi")
PCIE5 = ("PRO 6000", "RTX 50", "H100 PCIe", "H100 NVL")


@dataclass(frozen=True)
class PlanDevice:
    peaks: DevicePeaks
    available_bytes: int  # for weights, KV cache and everything else
    mfu: float
    mbu: float
    source: str  # "listed" or "measured"
    linked_by: Link | None = None  # None: as such devices usually are

    @property
    def name(self) -> str:
        return self.peaks.name

    @property
    def is_cpu(self) -> bool:
        return self.peaks.kind == "cpu"

    @property
    def backend(self) -> Backend:
        """Return the backend that would run here; accelerators that the engine does not support are planned like
        GPUs."""
        return NATIVE if self.is_cpu else TRITON

    @property
    def runs_on(self) -> Device:
        return self.backend.devices[0]

    @property
    def link(self) -> Link:
        """Return the link between several of these devices: the requested one, or the usual one."""
        if self.linked_by is not None:
            return self.linked_by
        if self.is_cpu:
            return find_link("shared")
        if any(mark in self.name for mark in FAST_LINKED):
            return find_link("nvlink")
        return find_link("pcie5" if any(mark in self.name for mark in PCIE5) else "pcie4")

    def peak_flops(self, weight_dtype: str) -> float:
        return self.peaks.flops_for(compute_dtype(weight_dtype, on_cpu=self.is_cpu))


def compute_dtype(weight_dtype: str, *, on_cpu: bool) -> PeakDType:
    """Return the dtype of matrix products: GPUs expand small integers to 16 bits, CPUs quantise the activations."""
    if weight_dtype == "float32":
        return "fp32"
    if weight_dtype in ("bfloat16", "float16", "BF16", "F16"):
        return "bf16"
    if weight_dtype == "fp8":
        return "fp8"
    return "int8" if on_cpu or weight_dtype == "int8" else "bf16"


def plan_device(name: str, *, mfu: float | None = None, mbu: float | None = None) -> PlanDevice:
    if name == "auto":
        return this_machine(mfu=mfu, mbu=mbu)
    peaks = find_device(name)
    if peaks is None:
        near = difflib.get_close_matches(name, device_names(), n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"some are {', '.join(device_names()[:8])}"
        raise InvalidConfig(f"unknown device {name!r}", param="device", hint=hint)
    return _device(peaks, peaks.memory_bytes, mfu, mbu, "listed")


def this_machine(
    *, mfu: float | None = None, mbu: float | None = None, use_gpu: bool = True, threads: int | None = None
) -> PlanDevice:
    """Return this machine: a known GPU with its listed peaks and real memory, otherwise the measured processor."""
    machine = probe_machine()
    if use_gpu and (gpu := _known_gpu(machine)) is not None:
        return _device(gpu[0], gpu[1], mfu, mbu, "listed")
    return _device(measured_cpu(machine, threads), machine.memory.available_bytes, mfu, mbu, "measured")


def unmeasured_machine(*, use_gpu: bool = True) -> PlanDevice:
    """Return this machine for plans of memory alone: the peaks of its processor are not measured."""
    machine = probe_machine()
    if use_gpu and (gpu := _known_gpu(machine)) is not None:
        return _device(gpu[0], gpu[1], None, None, "listed")
    peaks = DevicePeaks(machine.cpu.name, _vendor(machine), "cpu", machine.memory.total_bytes, 0.0, {}, 0.0)
    return _device(peaks, machine.memory.available_bytes, None, None, "listed")


def _known_gpu(machine: Machine) -> tuple[DevicePeaks, int] | None:
    """Return the first GPU's listed peaks and its real memory, if it is listed."""
    peaks = find_device(machine.gpus[0].name) if machine.gpus else None
    return None if peaks is None else (peaks, machine.gpus[0].memory_bytes)


def _vendor(machine: Machine) -> Vendor:
    return "arm" if machine.cpu.architecture in ("aarch64", "arm64") else "intel"


def measured_cpu(machine: Machine, threads: int | None = None) -> DevicePeaks:
    found = measure_cpu(threads or machine.cpu.usable_cores)
    flops = {"fp32": found.fp32_flops}
    if found.int8_flops is not None:
        flops["int8"] = found.int8_flops
    name = f"{machine.cpu.name}, {found.threads} core{'' if found.threads == 1 else 's'}"
    memory = machine.memory.total_bytes
    return DevicePeaks(name, _vendor(machine), "cpu", memory, found.bandwidth_bytes_s, flops, 0.0)


def _device(peaks: DevicePeaks, available: int, mfu: float | None, mbu: float | None, source: str) -> PlanDevice:
    used_mfu = DEFAULT_MFU[peaks.kind] if mfu is None else mfu
    used_mbu = DEFAULT_MBU[peaks.kind] if mbu is None else mbu
    for label, value in (("mfu", used_mfu), ("mbu", used_mbu)):
        if not 0 < value <= 1:
            raise InvalidConfig(f"{label} {value} is not a share between 0 and 1", param=label)
    return PlanDevice(peaks, available, used_mfu, used_mbu, source)
