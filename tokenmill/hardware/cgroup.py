"""Limits of this process's Linux control group (container, service manager), version 2 and 1.

A limit may sit on any group between ours and the root: each file is looked for on the whole way up, the smallest wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as a number near 2**63


def cpu_quota(root: Path = ROOT, membership: str | None = None) -> float | None:
    """Cores' worth of time that may be used; None without a limit."""
    quotas = []
    for folder in _folders(root, "cpu", membership):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = ROOT, membership: str | None = None) -> int | None:
    limits = [int(text) for text in _values(root, membership, "memory.max", "memory.limit_in_bytes") if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def memory_used_bytes(root: Path = ROOT, membership: str | None = None) -> int | None:
    """Return the memory that our group uses now, without reclaimable page cache."""
    for folder in _folders(root, "memory", membership):
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if used.isdigit():
            return max(int(used) - _inactive_file_bytes(folder), 0)
    return None


def _inactive_file_bytes(folder: Path) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _values(root: Path, membership: str | None, *files: str) -> Iterator[str]:
    for folder in _folders(root, "memory", membership):
        for file in files:
            yield _text(folder / file)


def _folders(root: Path, controller: str, membership: str | None) -> Iterator[Path]:
    """Our group's directory and every one above it, nearest first."""
    listing = membership if membership is not None else _text(Path("/proc/self/cgroup"))
    for line in listing.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        top = root if number == "0" else root / controller
        inside = Path(group.lstrip("/"))
        for part in [inside, *inside.parents]:
            yield top / part


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
