"""`tokenmill keys add | list | revoke`: the API keys of a server, as records in a file."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from tokenmill.cli.output import print_table
from tokenmill.errors import InvalidConfig
from tokenmill.server.audit import append, by_operator, file_beside
from tokenmill.server.keys import KeyRecord, default_keys_file, new_key, read_keys, write_keys

command = App(help="Make, list and revoke the API keys of a server.", help_flags=["--help", "-h"], version_flags=[])

File = Annotated[Path | None, Parameter(name="--keys-file", help="The file; keys.toml in TOKENMILL_HOME by default.")]
AuditFile = Annotated[
    Path | None, Parameter(name="--audit-log", help="The audit log; audit.jsonl beside the file of keys by default.")
]
TOLD = "A running server reads its keys again on SIGHUP."
_LIFETIME = re.compile(r"(\d{1,5})([dhw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


@command.command
def add(
    name: str,
    *,
    expires: str = "",
    model: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    tokens_per_day: int | None = None,
    max_running: int | None = None,
    max_sequences: int | None = None,
    weight: float = 1.0,
    min_priority: int | None = None,
    sees_all: Annotated[bool, Parameter(negative="")] = False,
    keys_file: File = None,
    audit_log: AuditFile = None,
) -> int:
    """Make a key and print it: it is kept nowhere, only its digest is.

    Parameters
    ----------
    name
        Who it is for; unique.
    expires
        A date (2027-01-31), or a time from now: 12h, 90d, 8w.
    model
        A model that it may use, with wildcards; may be given several times. All by default.
    requests_per_minute
        Most requests that it may send in a minute.
    tokens_per_minute
        Most tokens of prompts and answers in a minute.
    tokens_per_day
        Most tokens of prompts and answers in a day.
    max_running
        Most requests at a time; further ones are refused.
    max_sequences
        Most sequences computed at a time; further ones wait.
    weight
        Its share of the engine while others want theirs: with 2 it gets twice as much as with 1.
    min_priority
        Smallest `priority` that its requests may ask for: smaller runs first. As for all keys by default
        (`serve --min-priority`).
    sees_all
        For operators: on the server's page it sees the requests of all keys and may abort them; of several keys only
        such a one reads /metrics, and changes models where clients may.
    """
    path = keys_file or default_keys_file()
    wanted = KeyRecord(
        id=name,
        sha256="",
        expires=_date_of(expires),
        models=list(model),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        max_running=max_running,
        max_sequences=max_sequences,
        weight=weight,
        min_priority=min_priority,
        sees_all=sees_all,
    )
    key, records = new_key(_known(path), wanted)
    write_keys(path, records)
    _record(audit_log or file_beside(path), "key_added", name)
    print(key)
    return 0


@command.command(name="list")
def list_keys(*, json: Annotated[bool, Parameter(negative="")] = False, keys_file: File = None) -> int:
    """List the keys, without what would let anyone use them.

    Parameters
    ----------
    json
        One JSON array for programs.
    """
    records = _known(keys_file or default_keys_file())
    if json:
        rows = [{**msgspec.to_builtins(record), "sha256": record.sha256[:12]} for record in records]
        print(msgspec.json.encode(rows).decode())
    else:
        rows_of_words = [
            (one.id, one.created[:10], one.expires or "never", ", ".join(one.models) or "all", _limits(one))
            for one in records
        ]
        print_table(("ID", "CREATED", "EXPIRES", "MODELS", "LIMITS"), rows_of_words)
    return 0


@command.command
def revoke(name: str, *, keys_file: File = None, audit_log: AuditFile = None) -> int:
    """Remove a key.

    Parameters
    ----------
    name
        The id it was made with.
    """
    path = keys_file or default_keys_file()
    records = _known(path)
    left = [record for record in records if record.id != name]
    if len(left) == len(records):
        raise InvalidConfig(f"there is no key {name!r} in {path}", hint="tokenmill keys list")
    write_keys(path, left)
    _record(audit_log or file_beside(path), "key_revoked", name)
    print(f"{name} is revoked. {TOLD}")
    return 0


def _record(path: Path, event: str, key_id: str) -> None:
    """Write a change to the audit log; a disk that does not take it does not undo the change."""
    try:
        append(path, [(time.time(), event, {"id": key_id, "by": by_operator()})])
    except OSError as problem:
        print(f"tokenmill: the audit log {path} could not be written: {problem.strerror}", file=sys.stderr)


def _limits(record: KeyRecord) -> str:
    given = {
        "requests/min": record.requests_per_minute,
        "tokens/min": record.tokens_per_minute,
        "tokens/day": record.tokens_per_day,
        "at a time": record.max_running,
        "sequences": record.max_sequences,
    }
    told = [f"{limit} {what}" for what, limit in given.items() if limit is not None]
    told += [] if record.weight == 1.0 else [f"weight {record.weight:g}"]
    told += [] if record.min_priority is None else [f"priority from {record.min_priority}"]
    told += ["sees all"] if record.sees_all else []
    return ", ".join(told) or "none"


def _known(path: Path) -> list[KeyRecord]:
    return read_keys(path) if path.exists() else []


def _date_of(expires: str) -> str:
    lifetime = _LIFETIME.fullmatch(expires)
    if lifetime is None:
        return expires
    return (datetime.now(UTC) + int(lifetime[1]) * _UNITS[lifetime[2]]).isoformat(timespec="seconds")
