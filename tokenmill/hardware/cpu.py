"""Facts about the processor: how many cores this process really has, and what they can compute."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenmill.hardware.cgroup import cpu_quota

# What kernels ask for; the rest of a processor's flags are noise.
INSTRUCTION_SETS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip


@dataclass(frozen=True)
class Cpu:
    name: str
    architecture: str  # "x86_64", "aarch64", "arm64"
    logical_cores: int  # of the machine
    physical_cores: int  # of the machine
    usable_cores: int  # physical cores this process may really use: affinity and quota taken into account
    quota: float | None  # cores' worth of time a control group allows
    instruction_sets: tuple[str, ...]
    cache_bytes: dict[str, int]  # "L1d", "L2", "L3": of one core, or of the cluster that shares it


def probe_cpu() -> Cpu:
    return _probe_mac() if sys.platform == "darwin" else _probe_linux()


def _probe_linux() -> Cpu:
    processors = _read_cpuinfo(Path("/proc/cpuinfo"))
    first = processors[0] if processors else {}
    logical = os.cpu_count() or 1
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(logical))
    physical = _physical_cores(set(range(logical)))
    quota = cpu_quota()
    return Cpu(
        name=first.get("model name") or platform.processor() or "unknown",
        architecture=platform.machine(),
        logical_cores=logical,
        physical_cores=physical,
        usable_cores=usable_cores(_physical_cores(allowed), quota),
        quota=quota,
        instruction_sets=known_sets(first.get("flags") or first.get("Features") or ""),
        cache_bytes=_linux_caches(),
    )


def usable_cores(allowed_physical: int, quota: float | None) -> int:
    """Threads worth starting: a quota of 1.5 cores keeps two threads busy, but never fewer than one."""
    return max(1, min(allowed_physical, math.ceil(quota))) if quota else max(1, allowed_physical)


def known_sets(flags: str) -> tuple[str, ...]:
    present = set(flags.split())
    return tuple(name for name in INSTRUCTION_SETS if name in present)


def _read_cpuinfo(path: Path) -> list[dict[str, str]]:
    try:
        blocks = path.read_text().strip().split("\n\n")
    except OSError:
        return []
    return [
        {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in block.splitlines())} for block in blocks
    ]


def _physical_cores(logical: set[int]) -> int:
    """Distinct cores behind these logical ones: hyper-threads of one core share `thread_siblings_list`."""
    topology = Path("/sys/devices/system/cpu")
    siblings = {_read(topology / f"cpu{number}" / "topology" / "thread_siblings_list") for number in logical}
    siblings.discard("")
    return len(siblings) or len(logical)


def _linux_caches() -> dict[str, int]:
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(index / part) for part in ("level", "type", "size"))
        if kind != "Instruction" and size[:-1].isdigit():
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
            caches[f"L{level}{'d' if kind == 'Data' else ''}"] = int(size[:-1]) * unit
    return caches


def _probe_mac() -> Cpu:
    facts = _sysctl()
    logical = int(facts.get("hw.logicalcpu", os.cpu_count() or 1))
    physical = int(facts.get("hw.physicalcpu", logical))
    fast = int(facts.get("hw.perflevel0.physicalcpu", physical))
    caches = {"L1d": "hw.l1dcachesize", "L2": "hw.perflevel0.l2cachesize", "L3": "hw.l3cachesize"}
    return Cpu(
        name=facts.get("machdep.cpu.brand_string", "unknown"),
        architecture=platform.machine(),
        logical_cores=logical,
        physical_cores=physical,
        usable_cores=fast,  # slow cores would hold up every step
        quota=None,
        instruction_sets=_mac_sets(facts),
        cache_bytes={level: int(facts[key]) for level, key in caches.items() if int(facts.get(key, 0)) > 0},
    )


def _mac_sets(facts: dict[str, str]) -> tuple[str, ...]:
    arm = {
        "FEAT_FP16": "asimdhp",
        "FEAT_DotProd": "asimddp",
        "FEAT_I8MM": "i8mm",
        "FEAT_BF16": "bf16",
        "FEAT_SME": "sme",
    }
    flags = [name for feature, name in arm.items() if facts.get(f"hw.optional.arm.{feature}") == "1"]
    if platform.machine() == "arm64":
        flags.append("asimd")
    intel = f"{facts.get('machdep.cpu.features', '')} {facts.get('machdep.cpu.leaf7_features', '')}"
    return known_sets(" ".join(flags) + " " + intel.lower().replace("sse4.2", "sse4_2"))


def _sysctl() -> dict[str, str]:
    done = subprocess.run(["sysctl", "hw", "machdep.cpu"], capture_output=True, text=True, timeout=5)
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in done.stdout.splitlines())}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
