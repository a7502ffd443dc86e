"""What `make` says where it can't work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLD = "import sys; sys.version_info = (3, 10, 4, 'final', 0); exec(sys.argv[1])"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    old, venv = tmp_path / "python3.10", tmp_path / "venv"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{OLD}" "$2"\n')
    old.chmod(0o700)
    asked = ["make", "install", f"PYTHON={old}", f"VENV={venv}"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "needs Python 3.11 to 3.13" in done.stderr and "is 3.10" in done.stderr
    assert "make PYTHON=python3.12 install" in done.stderr and not venv.exists()


def test_the_list_of_long_files_names_files() -> None:
    listed = [line.split()[-1] for line in (ROOT / "tests/long_files.txt").read_text(encoding="utf-8").splitlines()]
    assert listed and [file for file in listed if not (ROOT / file).is_file()] == []
