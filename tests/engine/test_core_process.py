"""The core's process as its parent starts it: what it may know, and what stays of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.timing import eventually
from tokenmill.config import EngineConfig, ModelConfig
from tokenmill.engine import core_process
from tokenmill.engine.core_client import ProcessCoreClient
from tokenmill.engine.core_process import CoreProcess, lock_folder, remove_abandoned
from tokenmill.engine.messages import Shutdown

WAITS = ("-c", "import sys, time; time.sleep(60)")
OWNER = (
    "import sys, time; from tokenmill.engine.core_process import lock_folder\n"
    "lock_folder(sys.argv[1]); print(1, flush=True); time.sleep(60)"
)


def test_a_core_knows_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_API_KEY", "a secret")
    monkeypatch.setenv("TOKENMILL_TEST", "no secret")
    process = CoreProcess(WAITS)
    try:
        environment = Path(f"/proc/{process._process.pid}/environ")
        assert eventually(lambda: b"TOKENMILL_TEST" in environment.read_bytes())  # empty while it is started
        assert b"a secret" not in environment.read_bytes()
    finally:
        process.kill()


def test_a_core_is_ended_by_a_message_that_arrived_before_it_read_any(stories_dir: Path) -> None:
    """A stop during a start, while the core imports its libraries."""
    core = CoreProcess()
    link = ProcessCoreClient(EngineConfig(ModelConfig(model=str(stories_dir))), stories_dir, core)

    async def scenario() -> None:
        await link.start(lambda message: None)
        link.send(Shutdown())
        await asyncio.wait_for(asyncio.to_thread(core.wait), 60)
        await link.close()

    try:
        asyncio.run(scenario())
    finally:
        core.kill()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="cores-", dir="/tmp") as folder:
        yield Path(folder)


def test_folders_of_killed_processes_go(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process.tempfile, "gettempdir", lambda: str(short_path))
    abandoned, alive, other = (short_path / f"tokenmill-{name}" for name in ("abandoned", "alive", "other"))
    for folder in (abandoned, alive, other):
        folder.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(abandoned)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        owner.stdout.readline()
        lock = lock_folder(str(alive))
        remove_abandoned(str(short_path))
        assert abandoned.exists() and alive.exists(), "their owners live"
        owner.kill()
        owner.wait()
    remove_abandoned(str(short_path))
    assert abandoned.exists(), "too young to be sure"
    for folder in (abandoned, alive, other):
        os.utime(folder, (1, 1))
    process = CoreProcess(WAITS)
    try:
        assert not abandoned.exists() and alive.exists()
        assert other.exists(), "without a lock it is not ours"
        own = Path(process.folder)
    finally:
        process.kill()
        os.close(lock)
    assert not own.exists()
    process.stop()  # once more does no harm
