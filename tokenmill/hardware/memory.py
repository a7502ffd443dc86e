"""Memory available to this process: the machine's, or less where a control group limits it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenmill.hardware.cgroup import memory_limit_bytes, memory_used_bytes


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    available_bytes: int  # without swapping
    limit_bytes: int | None = None  # of the control group, where smaller than the machine


def probe_memory() -> Memory:
    total, available = _mac() if sys.platform == "darwin" else _linux(Path("/proc/meminfo"))
    return within_limit(total, available, memory_limit_bytes(), memory_used_bytes())


def within_limit(total: int, available: int, limit: int | None, used: int | None) -> Memory:
    if limit is None or limit >= total:
        return Memory(total, available)
    return Memory(limit, max(min(available, limit - (used or 0)), 0), limit)


def _linux(meminfo: Path) -> tuple[int, int]:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    kib = {key: int(value.split()[0]) for key, value in rows.items()}
    return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemFree"]) * 1024


def _mac() -> tuple[int, int]:
    total = int(subprocess.run(["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, timeout=5).stdout)
    lines = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5).stdout.splitlines()
    page = int(lines[0].split("page size of")[1].split()[0])
    pages = {key: int(value.strip(" .")) for key, _, value in (line.partition(":") for line in lines[1:]) if value}
    free = sum(pages.get(f"Pages {kind}", 0) for kind in ("free", "inactive", "speculative", "purgeable"))
    return total, free * page
