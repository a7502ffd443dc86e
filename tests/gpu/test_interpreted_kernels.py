"""The Triton kernels on a machine without a GPU: a process of its own runs them in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [f"interpreted_{room}.py" for room in ("kernels", "invariance", "draws", "streams")])
def test_kernels_agree_with_the_reference(name: str) -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name(name)
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all kernels agree" in done.stdout
