"""Electric power of this machine's devices, where it can be read.

GPUs          NVML, as the driver reports it, averaged over a second or less
processors    RAPL: counters of energy under /sys/class/powercap; power is their difference over the time between
              two looks. Linux lets only root read them unless it is told otherwise.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.hardware.gpu import NVML_OK, load_nvml, visible_indices

POWERCAP = Path("/sys/class/powercap")
LEAST_S = 0.05  # between two readings of an energy counter: sooner, the last power is returned


class PowerMeter:
    """Reads the power of all devices that tell it; others are not in its answers."""

    def __init__(
        self,
        powercap: Path = POWERCAP,
        nvml: ctypes.CDLL | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nvml`: the driver's library; by default the one of this machine, if there is one."""
        self._powercap = powercap
        self._clock = clock
        self._nvml = nvml or load_nvml()
        if self._nvml is not None and self._nvml.nvmlInit_v2() != NVML_OK:
            self._nvml = None
        self._energy: dict[Path, tuple[float, int]] = {}  # when, and microjoules
        self._watts: dict[str, float] = {}

    def watts(self) -> dict[str, float]:
        """Power by device: `cpu0`, `gpu0`. A processor's is known from the second look on."""
        self._read_gpus()
        self._read_processors()
        return self._watts

    def _read_gpus(self) -> None:
        if self._nvml is None:
            return
        count, milliwatts, device = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_void_p()
        if self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != NVML_OK:
            return
        for place, index in enumerate(visible_indices(os.environ.get("CUDA_VISIBLE_DEVICES"), count.value)):
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == NVML_OK and (
                self._nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts)) == NVML_OK
            ):
                self._watts[f"gpu{place}"] = milliwatts.value / 1e3

    def _read_processors(self) -> None:
        for counter in sorted(self._powercap.glob("intel-rapl:?/energy_uj")):  # whole sockets; AMD's are named so too
            try:
                microjoules = int(counter.read_text())
            except (OSError, ValueError):
                continue
            now_s = self._clock()
            before_s, before = self._energy.get(counter, (now_s, microjoules))
            if now_s - before_s >= LEAST_S and microjoules >= before:  # smaller: the counter began anew
                self._watts[f"cpu{counter.parent.name[-1]}"] = (microjoules - before) / 1e6 / (now_s - before_s)
            if now_s - before_s >= LEAST_S or counter not in self._energy:
                self._energy[counter] = now_s, microjoules
