"""The facts of this machine in one value. Probing costs a few milliseconds and imports nothing heavy."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from tokenmill.hardware.cpu import Cpu, probe_cpu
from tokenmill.hardware.gpu import Gpu, probe_amd, probe_nvidia
from tokenmill.hardware.memory import Memory, probe_memory


@dataclass(frozen=True)
class Machine:
    system: str
    python: str
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...]


def probe_machine() -> Machine:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    gpus = (*probe_nvidia(), *probe_amd())
    return Machine(system, platform.python_version(), probe_cpu(), probe_memory(), gpus)
