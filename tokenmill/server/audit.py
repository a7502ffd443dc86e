"""The audit log: refused keys and changes of keys, models and engines, as a chain of hashes.

    {"entry": 7, "time": "2027-01-31T12:00:00.123Z", "event": "key_added", "id": "alice", …, "previous": H6, "hash": H7}

The hash of a line covers all other fields of the line and, by `previous`, all lines before it, so `tokenmill audit
verify` finds a line that was changed, removed or inserted later. Someone with write access can still rewrite the whole
file or cut off its end. To detect that, the server logs the newest hash at its start and at its end, and `verify
--contains HASH` reports whether such a hash is still part of the chain.

The server and `tokenmill keys` append to the same file under a lock. Beyond `ROTATE_BYTES` the file is renamed with the
number of its last entry (`audit.7.jsonl`) and the chain continues in a new file. Neither keys nor texts are ever
written.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from tokenmill.errors import InvalidConfig, TokenmillError

FIRST = "0" * 64  # `previous` of the first entry
ROTATE_BYTES = 16 << 20
MAX_LINE_BYTES = 64 << 10

Detail = str | int | float | Sequence[str]
Entry = tuple[float, str, Mapping[str, Detail]]  # time, event name, details


class BrokenChain(TokenmillError):
    """The audit log was altered: a line was changed, removed or added."""

    code = "audit_log_altered"


FILE_NAME = "audit.jsonl"


def file_beside(keys_file: Path) -> Path:
    """Return the path of the audit log next to a keys file. The commands that change keys and the server share it."""
    return keys_file.with_name(FILE_NAME)


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────


def append(path: Path, entries: Sequence[Entry]) -> None:
    """Append entries to the chain; they are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    is_written = False
    while not is_written:
        with _locked(path) as file:
            number, previous = _last(path, file)
            if os.fstat(file.fileno()).st_size > ROTATE_BYTES:
                os.rename(path, rotated_name(path, number))  # the next writer begins the new file
            else:
                _write(file, number, previous, entries)
                is_written = True


def newest(path: Path) -> tuple[int, str]:
    """Return the number and the hash of the newest entry."""
    with _locked(path) as file:
        return _last(path, file)


def _write(file: IO[str], number: int, previous: str, entries: Sequence[Entry]) -> None:
    lines = []
    for entry_number, (time_s, event, details) in enumerate(entries, number + 1):
        line = line_of(entry_number, time_s, event, details, previous)
        previous = line["hash"]
        lines.append(json.dumps(line, ensure_ascii=True) + "\n")
    file.write("".join(lines))
    file.flush()
    os.fsync(file.fileno())


def line_of(number: int, time_s: float, event: str, details: Mapping[str, Detail], previous: str) -> dict[str, Any]:
    moment = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"entry": number, "time": moment, "event": event, **details, "previous": previous}
    return {**line, "hash": hash_of(line)}


def hash_of(line: Mapping[str, object]) -> str:
    """Return the hash of a line without its field `hash`. The order of fields and JSON escapes do not matter."""
    hashed = {name: value for name, value in line.items() if name != "hash"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def rotated_name(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Open the file for reading and appending under an exclusive lock; open it again if it was rotated meanwhile."""
    while True:
        with open(path, "a+", opener=_private, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_named(file, path):
                yield file
                return


def _is_named(file: IO[str], path: Path) -> bool:
    """Return whether an open file still has this name: another process may have rotated it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _last(path: Path, file: IO[str]) -> tuple[int, str]:
    """Return the number and the hash of the newest entry. If a crash cut the last line short, end that line, so that
    the next entry begins a new one."""
    end = file.seek(0, os.SEEK_END)
    if not end:
        older = rotated_files(path)
        return (0, FIRST) if not older else _last_in(older[-1].read_bytes(), older[-1])
    with open(path, "rb") as whole:
        whole.seek(max(0, end - 2 * MAX_LINE_BYTES))
        tail = whole.read()
    if not tail.endswith(b"\n"):
        file.write("\n")
    return _last_in(tail, path)


def _last_in(tail: bytes, path: Path) -> tuple[int, str]:
    for text in reversed(tail.splitlines()):
        try:
            line = json.loads(text)
            return int(line["entry"]), str(line["hash"])
        except (ValueError, KeyError, TypeError):
            continue
    raise BrokenChain(f"{path} holds no entry of an audit log", hint="move the file away to start a new log")


def rotated_files(path: Path) -> list[Path]:
    """Return the older files of the same chain, the oldest first."""
    name = re.compile(re.escape(path.stem) + r"\.(\d+)" + re.escape(path.suffix))
    found = [
        (int(match[1]), one)
        for one in path.parent.glob(f"{path.stem}.*{path.suffix}")
        if (match := name.fullmatch(one.name))
    ]
    return [one for _, one in sorted(found)]


def read_entries(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each entry of the chain with its position (file, line); the entry is empty if its line can't be parsed."""
    for file in [*rotated_files(path), path]:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as problem:
            raise InvalidConfig(f"{file} cannot be read: {problem.strerror}") from None
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield f"{file.name}, line {number}", line if isinstance(line, dict) else {}


@dataclass(frozen=True)
class ChainState:
    """The result of verifying an intact chain."""

    first: int  # number of the oldest entry in the files
    last: int
    hash: str  # of the newest entry
    hashes: frozenset[str]
    num_unreadable: int  # lines cut short by a crash, which are not part of the chain


def verify(path: Path) -> ChainState:
    """Check the chain from its oldest entry; BrokenChain names the first line that does not fit."""
    first, number, previous, num_unreadable = 0, 0, FIRST, 0
    hashes = {FIRST}
    for position, line in read_entries(path):
        if not line:
            num_unreadable += 1
            continue
        if not first:
            oldest = line.get("entry")
            first = oldest if isinstance(oldest, int) else 1
            number, previous = first - 1, FIRST if first == 1 else str(line.get("previous"))
        if line.get("entry") != number + 1 or line.get("previous") != previous:
            raise BrokenChain(f"{position}: entry {line.get('entry')!r} does not follow on entry {number}")
        if line.get("hash") != hash_of(line):
            raise BrokenChain(f"{position}: entry {number + 1} was changed after it was written")
        number, previous = number + 1, str(line["hash"])
        hashes.add(previous)
    return ChainState(first, number, previous, frozenset(hashes), num_unreadable)


def by_operator() -> str:
    """Return the name of the user who runs this process, for entries written by commands."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
