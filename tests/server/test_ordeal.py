"""The ordeal passes on this server, and finds a fault that was built in; the ledger adds up, also after kills."""

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


@pytest.mark.slow
def test_the_ledger_adds_up_over_many_requests_and_kills() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "ledger_sums.py"), "--requests", "1000", "--kills", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1])["sums"]["requests"] == 1000
