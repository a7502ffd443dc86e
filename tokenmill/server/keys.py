"""API keys as records: who has one, until when, and what it may use.

    keys.toml      [[key]]                     written by `tokenmill keys`, or by hand; read at the start, and again
                   id = "alice"                on SIGHUP. It holds no key, only digests: who reads it can use none.
                   sha256 = "9f86d081…"
                   expires = "2027-01-01"

A key is found by its digest in a table, so the time that takes tells nothing about other keys, however many there are.
Keys that are given as plain text (`--api-key`) are records without limits; their id is their digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import msgspec

from tokenmill.config.server import ServerConfig
from tokenmill.errors import InvalidConfig
from tokenmill.store.layout import store_root

KEY_PREFIX = "tm-"
MAX_KEYS = 1_000_000
ENVIRONMENT_NAME = "TOKENMILL_API_KEY"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


Limit = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=1000.0)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One key. Its holder is known by `id`, which stays the same when the key is replaced."""

    id: str
    sha256: str  # of the key
    created: str = ""
    expires: str = ""  # a date, or a date and a time (UTC); empty: never
    models: list[str] = []  # names, with wildcards; empty: all
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers
    tokens_per_day: Limit | None = None
    max_running: Limit | None = None  # requests at a time; further ones are refused
    max_sequences: Limit | None = None  # computed at a time; further ones wait
    weight: Weight = 1.0  # its share of the engine beside that of others
    min_priority: Priority | None = None  # the smallest that its requests may ask for; None: as for all
    sees_all: bool = False  # an operator's: it sees the requests of all keys, may abort them, and may change models

    @property
    def has_limits(self) -> bool:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_day, self.max_running)
        return any(limit is not None for limit in limits)

    @property
    def expires_s(self) -> float:
        return seconds_of(self.expires) if self.expires else float("inf")

    def may_use(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    key: list[KeyRecord] = []


class KeyRing:
    """The keys of a server."""

    def __init__(self, plain: Sequence[bytes] = (), path: Path | None = None) -> None:
        """`plain`: keys as they are; `path`: a file of records."""
        self._plain = [_digest(key) for key in plain]
        self.path = path
        self._by_digest: dict[str, KeyRecord] = {}
        self._by_id: dict[str, KeyRecord] = {}
        self._expiry_s: dict[str, float] = {}
        self.reload()

    def __bool__(self) -> bool:
        """Tell whether keys are needed: with a file they are, even if it holds none."""
        return bool(self._plain) or self.path is not None

    def __len__(self) -> int:
        return len(self._by_digest)

    def reload(self) -> None:
        """Read the file again; one that is wrong raises InvalidConfig and changes nothing."""
        records = [] if self.path is None else read_keys(self.path)
        records += [KeyRecord(id=digest, sha256=digest) for digest in self._plain]
        if len(records) == 1:  # its holder is who runs the server
            records = [msgspec.structs.replace(records[0], sees_all=True)]
        self._by_digest = {record.sha256: record for record in records}
        self._by_id = {record.id: record for record in records}
        self._expiry_s = {record.sha256: record.expires_s for record in records if record.expires}

    def find(self, offered: Sequence[bytes]) -> KeyRecord | None:
        """Return the record of the first offered key that is known and has not expired."""
        found = [self._by_digest.get(_digest(key)) for key in offered]
        return next((record for record in found if record is not None and not self._is_expired(record)), None)

    def get(self, key_id: str) -> KeyRecord | None:
        """The record of a key by its id, for work that goes on without a client; None if there is none any more."""
        return self._by_id.get(key_id)

    def records(self) -> dict[str, KeyRecord]:
        """Return all records by their ids."""
        return self._by_id

    def why_not(self, offered: Sequence[bytes]) -> str:
        """Why none of these keys admits, for the operator."""
        if not any(offered):
            return "no key"
        return "expired key" if any(_digest(key) in self._by_digest for key in offered) else "unknown key"

    def _is_expired(self, record: KeyRecord) -> bool:
        expiry_s = self._expiry_s.get(record.sha256)
        return expiry_s is not None and time.time() >= expiry_s


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def load_keys(config: ServerConfig, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Keys from flags, the environment (comma-separated) and the file of plain keys together."""
    if not all(key.strip() for key in config.api_key):
        raise InvalidConfig("an API key is empty, which would leave the server open", param="api_key")
    keys = [*config.api_key, *environment.get(ENVIRONMENT_NAME, "").split(",")]
    if config.api_key_file is not None:
        keys += _keys_in_file(config.api_key_file)
    return tuple(dict.fromkeys(key.strip().encode() for key in keys if key.strip()))


def key_ring(config: ServerConfig, environment: Mapping[str, str]) -> KeyRing:
    """Return all keys of a server: plain ones, and records in the named file, or in the default one if it exists."""
    path = config.keys_file or (usual_file() if usual_file().exists() else None)
    return KeyRing(load_keys(config, environment), path)


def usual_file() -> Path:
    return store_root() / "keys.toml"


def _keys_in_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the API key file {path} cannot be read: {error}", param="api_key_file") from None
    keys = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidConfig(f"the API key file {path} holds no key", param="api_key_file", hint="one key a line")
    return keys


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────


def read_keys(path: Path) -> list[KeyRecord]:
    """The records of a file; InvalidConfig names what is wrong with it, never a digest."""
    try:
        text = path.read_text(encoding="utf-8")
        records = msgspec.convert(tomllib.loads(text), KeyFile).key
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidConfig(f"the keys in {path} cannot be read: {error}", param="keys_file") from None
    ids: set[str] = set()
    for number, record in enumerate(records, 1):
        problem = _problem(record, ids)
        if problem or number > MAX_KEYS:
            raise InvalidConfig(f"{path}: key {number} {problem or 'is too many'}", param="keys_file")
        ids.add(record.id)
    return records


def _problem(record: KeyRecord, ids: set[str]) -> str | None:
    if not _ID.fullmatch(record.id):
        return "has an invalid id: it must be letters, digits, dots and dashes, up to 64 of them"
    if record.id in ids:
        return f"has the id {record.id!r}, which another one has"
    if not _DIGEST.fullmatch(record.sha256):
        return "needs sha256: 64 hexadecimal digits"
    if record.expires:
        try:
            seconds_of(record.expires)
        except ValueError:
            return f"expires at {record.expires!r}, which is no date"
    return None


def seconds_of(date: str) -> float:
    """Seconds since the epoch of a date, or of a date and a time; ValueError for what is none."""
    moment = datetime.fromisoformat(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def new_key(records: Sequence[KeyRecord], record: KeyRecord) -> tuple[str, list[KeyRecord]]:
    """Make a new random key, and return it with the records, its own added. `record` has all fields but the digest."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    made = msgspec.structs.replace(
        record, sha256=_digest(key.encode()), created=datetime.now(UTC).isoformat(timespec="seconds")
    )
    problem = _problem(made, {one.id for one in records})
    if problem:
        raise InvalidConfig(f"the key {problem}", param="id")
    try:
        msgspec.convert(msgspec.to_builtins(made), KeyRecord)  # its limits too: the file must be readable
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"the key can't have such a limit: {error}") from None
    return key, [*records, made]


def write_keys(path: Path, records: Sequence[KeyRecord]) -> None:
    """Write the file whole, readable by its owner only: a reader finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "# API keys of this server, by `tokenmill keys`. A running server reads them again on SIGHUP.\n"
    text += "".join(f"\n[[key]]\n{_fields(record)}" for record in records)
    handle, name = tempfile.mkstemp(prefix=".keys-", dir=path.parent)
    with ExitStack() as undo:
        undo.callback(Path(name).unlink, missing_ok=True)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)


def _fields(record: KeyRecord) -> str:
    """The fields of a record as TOML: strings, numbers and lists of strings are written as in JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in msgspec.to_builtins(record).items())
