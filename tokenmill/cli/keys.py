"""`tokenmill keys add | list | revoke`: manage the file of a server's API keys."""

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

command = App(help="Create, list and revoke the API keys of a server.", help_flags=["--help", "-h"], version_flags=[])

File = Annotated[
    Path | None, Parameter(name="--keys-file", help="File of keys; by default keys.toml in TOKENMILL_HOME.")
]
AuditFile = Annotated[
    Path | None, Parameter(name="--audit-log", help="Audit log; by default audit.jsonl next to the file of keys.")
]
RELOAD_NOTE = "A running server reloads its keys on SIGHUP."
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
    """Create a key and print it. Only its digest is stored.

    Parameters
    ----------
    name
        Unique name of the key, such as its owner.
    expires
        Expiry: a date (2027-01-31) or a time from now (12h, 90d, 8w).
    model
        Allowed model, optionally with wildcards; may be given several times. By default all.
    requests_per_minute
        Maximum requests per minute.
    tokens_per_minute
        Maximum tokens of prompts and answers per minute.
    tokens_per_day
        Maximum tokens of prompts and answers per day.
    max_running
        Maximum concurrent requests; further ones are refused.
    max_sequences
        Maximum running sequences; further ones wait.
    weight
        Weight in fair scheduling under load: 2 gets twice the share of 1.
    min_priority
        Minimum `priority` of its requests; smaller values run first. By default that of all keys
        (`serve --min-priority`).
    sees_all
        Operator key: may see and abort the requests of all keys on the web page. If there are several keys, only such
        keys may read /metrics and load, unload or change models.
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
    """List the keys, without secrets.

    Parameters
    ----------
    json
        Print one JSON array.
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
        Name of the key.
    """
    path = keys_file or default_keys_file()
    records = _known(path)
    left = [record for record in records if record.id != name]
    if len(left) == len(records):
        raise InvalidConfig(f"there is no key {name!r} in {path}", hint="tokenmill keys list")
    write_keys(path, left)
    _record(audit_log or file_beside(path), "key_revoked", name)
    print(f"{name} is revoked. {RELOAD_NOTE}")
    return 0


def _record(path: Path, event: str, key_id: str) -> None:
    """Record a change in the audit log; the change stays even if that fails."""
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
