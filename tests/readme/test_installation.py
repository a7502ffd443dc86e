"""What an installation is made of: pins that every machine can meet, the Pythons that are promised, a Makefile that
follows modules that move, a source archive with all that its build reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-")


def test_everything_is_pinned_but_what_torch_pins_itself() -> None:
    """PyPI's torch for Linux asks for one version of triton, its builds without CUDA for none."""
    pinned = {name.lower().replace("_", "-") for name in PINS}
    wanted = {name_of(one) for one in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]}
    assert wanted - pinned == {"triton"}


def test_the_readme_names_the_pythons_of_the_package() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert "You need Python 3.11 to 3.13" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_a_module_that_moves_is_installed_anew(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "tokenmill"
    package.mkdir()
    (package / "params.py").touch()
    assert "pip install" in would_run(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / touched(would_run(tmp_path))).touch()
    assert "pip install" not in would_run(tmp_path)
    (package / "params.py").rename(package / "parameters.py")
    assert "pip install" in would_run(tmp_path)


def test_the_source_archive_has_what_its_build_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    compiled = set(re.findall(r"csrc/[\w./]+\.cpp", (ROOT / "CMakeLists.txt").read_text()))
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert compiled <= kept <= packed
    assert {"LICENSE", "README.md", "tokenmill/py.typed", "tokenmill/store/catalog.toml"} <= packed
    assert not [name for name in packed if name.startswith(("tests/", ".ci/")) or name.endswith(".so")]


def would_run(folder: Path) -> str:
    return subprocess.run(["make", "-n", "serve"], cwd=folder, capture_output=True, text=True, check=True).stdout


def touched(printed: str) -> str:
    return printed.partition("touch ")[2].splitlines()[0]
