"""Real models by name, fetched once into a cache of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

MODELS = Path(os.environ.get("TOKENMILL_TEST_MODELS", Path.home() / ".cache" / "tokenmill-test-models"))


def fetched_model(shared: Path, name: str) -> Path:
    """Return the path of a real model, fetched once into the test cache, by one test process at a time."""
    MODELS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(shared / "tools" / "get-model"), name, str(MODELS)]
    with FileLock(MODELS / f"{name}.lock"):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"model {name} could not be fetched: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip().splitlines()[-1])
