"""Build a wheel that installs on other machines: `python tools/build_wheel.py [FOLDER] [--arch aarch64]`.

The kernels are compiled by zig (`pip install ziglang`, fetched into an environment of its own), which brings the C
library of an older system along: the wheel runs wherever glibc is 2.28 or newer, whatever this machine has, and for
another processor too. What the wheel claims is checked with auditwheel. `make wheel` builds the one for this machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = (2, 28)
TOOLS = ("ziglang", "auditwheel", "wheel", "build", "scikit-build-core", "nanobind", "cmake", "ninja")
ARCHS = ("x86_64", "aarch64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="where the wheel goes")
    parser.add_argument("--arch", choices=ARCHS, default=platform.machine())
    parser.add_argument(
        "--tools", type=Path, default=ROOT / "build" / "wheel-tools", help="environment of the builders"
    )
    options = parser.parse_args()
    python = tool_environment(options.tools.absolute())
    with tempfile.TemporaryDirectory() as scratch:
        plain = build(python, options.arch, Path(scratch))
        wheel = retag(python, plain, options.arch, options.folder)
    check(python, wheel, options.arch)
    print(wheel)
    return 0


def tool_environment(folder: Path) -> Path:
    """The interpreter of an environment that has the builders; made where it is not there."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *TOOLS])
        (folder / "complete").touch()
    return python


def build(python: Path, arch: str, scratch: Path) -> Path:
    """A wheel of this interpreter's version whose kernels zig has compiled."""
    folder = ROOT / "build" / f"wheel-{arch}"  # kept: what was compiled once stays compiled
    compiler = program(folder / "zig-c++", f"{python} -m ziglang c++ -target {arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}")
    archiver = program(folder / "zig-ar", f"{python} -m ziglang ar")
    suffix = f".cpython-{sys.version_info.major}{sys.version_info.minor}-{arch}-linux-gnu.so"
    defines = {
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_AR": archiver,
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": arch,
        "NB_SUFFIX": suffix,
    }
    settings = [f"-Ccmake.define.{name}={value}" for name, value in defines.items()]
    settings += [f"-Cbuild-dir={folder / 'build'}"]
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = [python, "-m", "build", "--wheel", "--no-isolation", "--outdir", scratch / "plain", *settings, ROOT]
    run(command, {"PATH": path, "CXX": str(compiler)})
    (wheel,) = (scratch / "plain").glob("*.whl")
    return wheel


def program(path: Path, command: str) -> Path:
    """A program of its own for a command with arguments, as CMake wants its compilers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


def retag(python: Path, wheel: Path, arch: str, folder: Path) -> Path:
    """The wheel under the name of the systems that it runs on."""
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
    run([python, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel])
    (named,) = wheel.parent.glob("*.whl")
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(named, folder / named.name))


def check(python: Path, wheel: Path, arch: str) -> None:
    """Stop where the binary needs a newer system than the wheel's name says."""
    shown = run([python, "-m", "auditwheel", "show", wheel])
    found = re.search(rf"manylinux_2_(\d+)_{arch}", shown.replace("\n", " ").split("constrains the platform tag")[-1])
    if found is None or int(found.group(1)) > GLIBC[1]:
        raise SystemExit(f"the binary does not run where the wheel's name says:\n{shown}")


def run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, **(environment or {})}, cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, command[:4]))} … ended with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
