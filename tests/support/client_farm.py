"""Third-party clients as users install them: virtual environments and Node packages, created on demand.

They are in `build/clients` (or $TOKENMILL_CLIENTS), each with a file that records what was installed; if the
requirements change, they are reinstalled. Without a package index the tests that need them are skipped.

A client runs with a home directory of its own, and with a proxy for every host but this machine: the `Canary`, which
answers nothing and records all callers. A client that contacts another host fails its test.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.server_process import ServerProcess, free_port, running

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests" / "clients"
FARM = Path(os.environ.get("TOKENMILL_CLIENTS", ROOT / "build" / "clients"))
INSTALL_TIMEOUT_S = 900
INSTALL_SCRIPTS = (
    "@anthropic-ai/claude-code/install.cjs",
    "opencode-ai/postinstall.mjs",
)  # these install scripts put the packages' binaries in place


def python_with(name: str) -> Path:
    """Return the Python of an environment with the packages of `tests/clients/requirements-NAME.txt`."""
    requirements = CLIENTS / f"requirements-{name}.txt"
    place = FARM / name
    python = place / "bin" / "python"

    def install() -> None:
        _run([sys.executable, "-m", "venv", "--clear", str(place)])
        _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(requirements)])

    _once(place, requirements, install)
    return python


def node_modules() -> tuple[Path, Path]:
    """Return a sufficiently new Node, and the folder with the packages of `tests/clients/package.json`; its
    subfolder `programs` has the programs that import them."""
    node = python_with("node").parent / "node"
    place = FARM / "node-modules"
    package = CLIENTS / "package.json"

    def install() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        shutil.copy(package, place)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(place)]
        environment = {**os.environ, "PATH": f"{node.parent}:{os.environ['PATH']}"}
        _run(npm, environment)
        for script in INSTALL_SCRIPTS:
            _run([str(node), str(place / "node_modules" / script)], environment)

    _once(place, package, install)
    shutil.copytree(CLIENTS / "programs", place / "programs", dirs_exist_ok=True)
    return node, place


def node_program(name: str) -> list[str]:
    """Return the command that starts a program installed by npm."""
    return [str(node_modules()[1] / "node_modules" / ".bin" / name)]


def _once(place: Path, wanted: Path, install: object) -> None:
    """Install unless the recorded requirements are the wanted ones; one test process at a time."""
    assert callable(install)
    FARM.mkdir(parents=True, exist_ok=True)
    mark = place / ".installed"
    digest = hashlib.sha256(wanted.read_bytes()).hexdigest()
    with FileLock(FARM / f"{place.name}.lock"):
        if mark.is_file() and mark.read_text() == digest:
            return
        try:
            install()
        except (subprocess.SubprocessError, OSError) as problem:
            said = getattr(problem, "stderr", None) or str(problem)
            pytest.skip(f"no package index that has {wanted.name}: {str(said)[-300:]}")
        mark.write_text(digest)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)


# ── clients without network access ───────────────────────────────────────────────────────────────────────


@dataclass
class Canary:
    """A proxy that fails the test if a client uses it."""

    url: str
    callers: list[bytes] = field(default_factory=list)


@contextmanager
def listening_canary() -> Iterator[Canary]:
    listener = socket.create_server(("127.0.0.1", 0))
    canary = Canary(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed at the end of the test
                return
            with connection:
                connection.settimeout(1)
                try:
                    canary.callers.append(connection.recv(200))
                except OSError:
                    canary.callers.append(b"")

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield canary
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def environment_of(home: Path, canary: Canary, **extra: str) -> dict[str, str]:
    """Return a client's environment variables: its own home, and the canary as its proxy."""
    home.mkdir(parents=True, exist_ok=True)
    proxies = {name: canary.url for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")}
    here = {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM", "TMPDIR") if name in os.environ}
    return {**kept, **proxies, **here, "HOME": str(home), **extra}


# ── the server that they call ───────────────────────────────────────────────────────────────────────────


@contextmanager
def script_process(folder: Path, script: dict[str, Any], template: Path, *options: str) -> Iterator[ServerProcess]:
    """Run `tokenmill serve scripted:FILE` as a separate process. The model's name is `scripted` unless the options
    set another."""
    file = folder / "scripted.json"
    file.write_text(json.dumps(script))
    port = free_port()
    arguments = ["serve", f"scripted:{file}", "--chat-template", str(template), "--port", str(port), *options]
    with running(["-m", "tokenmill", *arguments], port, TOKENMILL_HOME=str(folder / "store")) as server:
        server.wait_for("ready")
        yield server
        server.terminate()
        assert server.wait() == 0, server.output()


@contextmanager
def serving_script(folder: Path, script: dict[str, Any], template: Path) -> Iterator[str]:
    """Run such a process and return its URL."""
    with script_process(folder, script, template) as server:
        yield server.url
