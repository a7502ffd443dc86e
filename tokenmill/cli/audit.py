"""`tokenmill audit verify | list`: the audit log of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from tokenmill.cli.output import print_table
from tokenmill.errors import InvalidConfig
from tokenmill.server import audit
from tokenmill.server.keys import default_keys_file

command = App(help="Show and verify the audit log of a server.", help_flags=["--help", "-h"], version_flags=[])

File = Annotated[Path | None, Parameter(help="The file; audit.jsonl in TOKENMILL_HOME by default.")]
FRAME = ("entry", "time", "event", "previous", "hash")


@command.command
def verify(file: File = None, *, contains: str | None = None) -> int:
    """Check that no entry was changed, removed or slipped in: exit code 1 names the first place that is wrong.

    Parameters
    ----------
    contains
        The hash of an entry that was newest once, as the server's log tells at its start: finds out whether the end of
        the log was cut off, or all of it written anew.
    """
    path = _existing(file)
    chain = audit.verify(path)
    if contains is not None and contains not in chain.hashes:
        raise audit.BrokenChain(f"{path} does not contain the entry {contains[:80]!r}: it was cut off or written anew")
    older = f"; older ones than {chain.first} are not here" if chain.first > 1 else ""
    broken = f"; {chain.num_unreadable} lines are no entries" if chain.num_unreadable else ""
    print(f"{path}: {chain.last} entries, none altered{older}{broken}; the hash of the newest is {chain.hash}")
    return 0


@command.command(name="list")
def list_entries(file: File = None, *, last: int = 50, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show the newest entries.

    Parameters
    ----------
    last
        How many.
    json
        One JSON array for programs.
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
        raise InvalidConfig(f"there is no audit log {path}", hint="a server with API keys keeps one")
    return path
