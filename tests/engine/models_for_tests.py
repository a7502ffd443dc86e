"""Real models by name, for tests that run over several of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def model_path(shared: Path, name: str) -> Path:
    done = subprocess.run([sys.executable, str(shared / "tools" / "get-model"), name], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"model {name} could not be fetched: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip().splitlines()[-1])
