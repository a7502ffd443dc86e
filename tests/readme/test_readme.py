"""The README and the pages for users, executed: every command in them runs, and what they show is what comes out.

A `console` block holds commands (`$ …`, continued by a trailing backslash) and what they print; `…` stands for
anything. Shown lines must come in the shown order; lines between them may be left out. A block preceded by "`NAME`:" is
that file. All `python` blocks of a page run as one program, whose `# → text` comments are its output. Servers are
started on free ports instead of the ones in the text, and stay until the end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server_process import free_port
from tests.support.terminal import ROOT, Terminal, require_shown

EXECUTED = (
    "command-line", "server", "several-models", "clients", "responses", "batches", "tools", "ollama", "python",
    "configuration", "planning", "troubleshooting", "first-hour",
)  # fmt: skip
PAGES = [ROOT / "README.md", *[ROOT / "docs" / f"{name}.md" for name in EXECUTED]]
FENCE = re.compile(r"(?:`(?P<file>[\w.-]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SAME_AS = {"make serve": "tokenmill serve"}  # once installed; the slow test below runs the real thing


@dataclass(frozen=True)
class Block:
    page: str
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


BLOCKS = [
    Block(page.stem, match["kind"], match["text"], match["file"])
    for page in PAGES
    for match in FENCE.finditer(page.read_text(encoding="utf-8"))
]
COMMANDS = [(block.page, *pair) for block in BLOCKS if block.kind == "console" for pair in block.commands()]
PROGRAMS = list(dict.fromkeys(block.page for block in BLOCKS if block.kind == "python"))


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Terminal]:
    place = Terminal(tmp_path_factory.mktemp("readme"), smollm2_path)
    for block in BLOCKS:
        if block.file:
            (place.folder / block.file).write_text(place.typed(block.text))
    yield place
    place.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(command, shown, id=f"{page}: {command[:60]}") for page, command, shown in COMMANDS],
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
@pytest.mark.parametrize("page", PROGRAMS)
def test_python_blocks_of_a_page_are_one_program(terminal: Terminal, page: str) -> None:
    blocks = [block.text for block in BLOCKS if block.kind == "python" and block.page == page]
    program = terminal.typed("\n\n".join(blocks))
    if "http://" in program:
        terminal.serve("tokenmill serve")
    (terminal.folder / "program.py").write_text(program)
    code, printed = terminal.run("python -W error::ResourceWarning program.py")
    assert code == 0, printed
    require_shown(re.findall(r"# → (.+)", program), printed)


def test_every_folder_named_in_the_tree_exists() -> None:
    (tree,) = [block.text for block in BLOCKS if block.kind == "tree" and block.page == "README"]
    assert [line for line in tree.splitlines() if not (ROOT / line.split()[0]).is_dir()] == []


def test_the_table_of_packages_names_every_one_and_no_other() -> None:
    page = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \|", page.split("\n## Packages\n")[1], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"csrc"}
    modules = {path.stem for path in (ROOT / "tokenmill").glob("[!_]*.py")} - {"version"}
    assert named == {path.parent.name for path in (ROOT / "tokenmill").glob("*/[!_]*.py")} | modules


def linked_from(page: Path) -> list[Path]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text)
    return [(page.parent / link).resolve() for link in links if "://" not in link]


def every_page() -> list[Path]:
    return [
        *ROOT.glob("*.md"),
        *[page for folder in ("docs", "benchmarks", "examples") for page in (ROOT / folder).rglob("*.md")],
    ]


def test_every_page_that_is_linked_to_is_there() -> None:
    assert [(page.name, link) for page in every_page() for link in linked_from(page) if not link.exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        links = {link / "README.md" if link.is_dir() else link for page in new for link in linked_from(page)}
        new = {link for link in links if link.suffix == ".md" and link.exists()} - reached
    assert set(every_page()) - reached == set()


def test_every_file_that_a_page_names_exists() -> None:
    """Files in backquotes, from the repository's root or from the package; experiments and changes tell of old ones."""
    named = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|h|cpp|toml|md))`")
    for page in every_page():
        if page.parent.name == "experiments" or page.name == "CHANGELOG.md":
            continue
        for name in named.findall(page.read_text(encoding="utf-8")):
            folders = (ROOT, ROOT / "tokenmill", page.parent)
            assert "NAME" in name or any((folder / name).exists() for folder in folders), f"{name} in {page.name}"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_make_serve_on_a_fresh_clone(tmp_path: Path) -> None:
    """Virtual environment, install, model and server; the second time nothing but the server."""
    (tmp_path / "home").mkdir()
    clone = tmp_path / "tokenmill"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    port, log = free_port(), tmp_path / "log"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "HOME": str(tmp_path / "home"), "TOKENMILL_HOME": "", "TOKENMILL_PORT": str(port)}
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
