"""The wheel for other machines: what it is called, and that it installs without a compiler and answers."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(command: list[str | Path], folder: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not sys.platform.startswith("linux"):
        pytest.skip("wheels are built on Linux")
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, ROOT / "tools" / "build_wheel.py", folder])
    (built,) = folder.glob("*.whl")
    return built


def test_it_is_for_older_systems_and_holds_the_kernels(wheel: Path) -> None:
    assert "-manylinux_2_28_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("tokenmill/ops/cpu/_native.") and name.endswith(".so")]
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "nanobind/"))]


def test_it_installs_without_a_compiler_and_answers(wheel: Path, tmp_path: Path, smollm2_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=True)
    binaries = tmp_path / "fresh" / "bin"
    no_compiler = {"PATH": str(binaries)}
    # Not in the root of the repository: Python would find its package there.
    run([binaries / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], tmp_path, **no_compiler)
    asked = ["run", smollm2_path, "What is the capital of France?", "--temperature", "0"]
    said = run([binaries / "tokenmill", *asked], tmp_path, **no_compiler)
    assert "Paris" in said
    kernels = run(
        [binaries / "python", "-c", "import tokenmill.ops.cpu._native as n; print(n.__file__)"], tmp_path, **no_compiler
    )
    assert "fresh" in kernels
