"""The ordeal passes on this server, and finds a fault that was built in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_ordeal(is_broken: bool) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "ordeal.py"), "--minutes", "0.5"]
    command += ["--broken", "--only", "hostile_heads"] if is_broken else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["golden"]["answered"] > 20 and report["exit_code"] == 0
    assert any("deviates" in fault for fault in report["faults"]) == is_broken, ended.stdout[-2000:]
    assert ended.returncode == is_broken
