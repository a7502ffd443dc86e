"""`tokenmill audit verify | list`: check or show a server's audit log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from tokenmill.cli.output import print_table
from tokenmill.errors import InvalidConfig
from tokenmill.server import audit
from tokenmill.server.keys import default_keys_file

command = App(help="Show and verify a server's audit log.", help_flags=["--help", "-h"], version_flags=[])

File = Annotated[Path | None, Parameter(help="The file; by default audit.jsonl in TOKENMILL_HOME.")]
FRAME = ("entry", "time", "event", "previous", "hash")


@command.command
def verify(file: File = None, *, contains: str | None = None) -> int:
    """Check that no entry was changed, removed or inserted. Otherwise report the first wrong entry and exit with code
    1.

    Parameters
    ----------
    contains
        Hash of an earlier entry, as logged by the server at its start, to detect that the end of the log was removed or
        the whole log rewritten.
    """
    path = _existing(file)
    chain = audit.verify(path)
    if contains is not None and contains not in chain.hashes:
        raise audit.BrokenChain(f"{path} does not contain the entry {contains[:80]!r}: it was truncated or rewritten")
    older = f"; entries before {chain.first} are missing" if chain.first > 1 else ""
    broken = f"; {chain.num_unreadable} lines are not entries" if chain.num_unreadable else ""
    print(f"{path}: {chain.last} entries, none altered{older}{broken}; the hash of the newest is {chain.hash}")
    return 0


@command.command(name="list")
def list_entries(file: File = None, *, last: int = 50, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show the newest entries.

    Parameters
    ----------
    last
        Number of entries.
    json
        Print one JSON array.
    """
    entries = [line for _, line in audit.read_entries(_existing(file)) if line][-last:] if last > 0 else []
    if json:
        print(msgspec.json.encode(entries).decode())
        return 0
    rows = [tuple(str(line.get(name, "")) for name in FRAME[:3]) + (_details(line),) for line in entries]
    print_table(("ENTRY", "TIME", "EVENT", "DETAILS"), rows)
    return 0


def _details(line: dict[str, object]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in line.items() if name not in FRAME and value != [])


def _existing(file: Path | None) -> Path:
    path = file or audit.file_beside(default_keys_file())
    if not path.exists():
        raise InvalidConfig(f"there is no audit log {path}", hint="a server with API keys writes one")
    return path
