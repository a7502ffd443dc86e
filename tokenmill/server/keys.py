"""API keys as records: the id of the holder, the expiry date, and what the key may use.

    keys.toml      [[key]]                     written by `tokenmill keys`, or by hand; read at the start, and again
                   id = "alice"                on SIGHUP. It holds digests, not keys, so a reader of the file can't
                   sha256 = "9f86d081…"        use them.
                   expires = "2027-01-01"

A key is looked up by its digest in a dict, so the time of the lookup reveals nothing about other keys.
Plain keys (`--api-key`) become records without limits, whose id is their digest.
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
from tokenmill.server.errors import MissingKey
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
    """One API key. `id` names its holder and stays the same when the key is replaced."""

    id: str
    sha256: str  # of the key
    created: str = ""
    expires: str = ""  # a date, or a date and a time (UTC); empty: never
    models: list[str] = []  # model names, with wildcards; empty: all
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers together
    tokens_per_day: Limit | None = None
    max_running: Limit | None = None  # concurrent requests; further ones are refused
    max_sequences: Limit | None = None  # sequences computed at a time; further ones wait
    weight: Weight = 1.0  # share of the engine, relative to the other keys
    min_priority: Priority | None = None  # smallest `priority` its requests may set; None: the server's setting
    sees_all: bool = False  # an operator's key: sees and aborts the requests of all keys, and may change models

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
    """All API keys of a server."""

    def __init__(self, plain: Sequence[bytes] = (), path: Path | None = None) -> None:
        """`plain`: keys without records, as clients send them; `path`: the file of key records."""
        self._plain = [_digest(key) for key in plain]
        self.path = path
        self._by_digest: dict[str, tuple[KeyRecord, float]] = {}  # digest ─► record, expiry time in seconds
        self._by_id: dict[str, KeyRecord] = {}
        self._had_several = False
        self.reload()

    def __bool__(self) -> bool:
        """Return whether clients need a key. With a keys file they do, even if it holds none."""
        return bool(self._plain) or self.path is not None

    def __len__(self) -> int:
        return len(self._by_digest)

    def reload(self) -> None:
        """Read the file again. An invalid file raises InvalidConfig, and the previous keys stay."""
        records = [] if self.path is None else read_keys(self.path)
        in_file = {record.sha256 for record in records}  # a plain key that is also in the file has the file's limits
        records += [KeyRecord(id=digest, sha256=digest) for digest in self._plain if digest not in in_file]
        self._had_several |= len(records) > 1
        if len(records) == 1 and not self._had_several:  # the holder of the only key is the operator
            records = [msgspec.structs.replace(records[0], sees_all=True)]
        self._by_id = {record.id: record for record in records}
        self._by_digest = {record.sha256: (record, record.expires_s) for record in records}

    def find(self, offered: Sequence[bytes]) -> KeyRecord | None:
        """Return the record of the first offered key that is known and has not expired."""
        known = [self._by_digest[digest] for digest in map(_digest, offered) if digest in self._by_digest]
        now_s = time.time()
        return next((record for record, expires_s in known if now_s < expires_s), None)

    def get(self, key_id: str) -> KeyRecord | None:
        """Return a key's record by its id, for batches and background responses; None if the key was removed."""
        return self._by_id.get(key_id)

    def require(self, key_id: str) -> KeyRecord:
        """Return a key's current record, for work that starts later than its request; MissingKey if the key was
        revoked or has expired."""
        record = self._by_id.get(key_id)
        if record is None or time.time() >= record.expires_s:
            raise MissingKey("the API key of the request is no longer valid")
        return record

    def records(self) -> dict[str, KeyRecord]:
        """Return all records by their ids."""
        return self._by_id

    def refusal_reason(self, offered: Sequence[bytes]) -> str:
        """Return why none of these keys is valid, for the audit log."""
        if not any(offered):
            return "no key"
        return "expired key" if any(_digest(key) in self._by_digest for key in offered) else "unknown key"


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def load_keys(config: ServerConfig, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the plain keys from flags, the environment (comma-separated) and the file of plain keys."""
    if not all(key.strip() for key in config.api_key):
        raise InvalidConfig("an API key is empty, which would leave the server open", param="api_key")
    keys = [*config.api_key, *environment.get(ENVIRONMENT_NAME, "").split(",")]
    if config.api_key_file is not None:
        keys += _keys_in_file(config.api_key_file)
    return tuple(dict.fromkeys(key.strip().encode() for key in keys if key.strip()))


def key_ring(config: ServerConfig, environment: Mapping[str, str]) -> KeyRing:
    """Return all keys of a server: plain keys, and the records of `--keys-file` or else of the default file."""
    path = config.keys_file or (default_keys_file() if default_keys_file().exists() else None)
    return KeyRing(load_keys(config, environment), path)


def default_keys_file() -> Path:
    return store_root() / "keys.toml"


def _keys_in_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the API key file {path} cannot be read: {error}", param="api_key_file") from None
    keys = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidConfig(f"the API key file {path} holds no key", param="api_key_file", hint="one key per line")
    return keys


# ── the file ───────────────────────────────────────────────────────────────────────────────────────────


def read_keys(path: Path) -> list[KeyRecord]:
    """Read and check the records of a file. The InvalidConfig of a wrong file never quotes a digest."""
    try:
        text = path.read_text(encoding="utf-8")
        records = msgspec.convert(tomllib.loads(text), KeyFile).key
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidConfig(f"the keys in {path} cannot be read: {error}", param="keys_file") from None
    ids: set[str] = set()
    owners: dict[str, str] = {}  # by digest: which of two records holds for a key would be chance
    for number, record in enumerate(records, 1):
        problem = _problem(record, ids)
        if problem is None and (owner := owners.get(record.sha256)) is not None:
            problem = f"({record.id!r}) has the same sha256 as {owner!r}"
        if problem or number > MAX_KEYS:
            raise InvalidConfig(f"{path}: key {number} {problem or 'exceeds the limit of keys'}", param="keys_file")
        ids.add(record.id)
        owners[record.sha256] = record.id
    return records


def _problem(record: KeyRecord, ids: set[str]) -> str | None:
    if not _ID.fullmatch(record.id):
        return "has an invalid id: up to 64 letters, digits and the characters _ . @ - (a letter or digit first)"
    if record.id in ids:
        return f"has the id {record.id!r} of another key"
    if not _DIGEST.fullmatch(record.sha256):
        return "needs sha256: 64 hexadecimal digits"
    if record.expires:
        try:
            seconds_of(record.expires)
        except ValueError:
            return f"expires at {record.expires!r}, which is not a date"
    return None


def seconds_of(date: str) -> float:
    """Convert a date, or a date and a time, to seconds since the epoch; ValueError if it is neither."""
    moment = datetime.fromisoformat(date)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def new_key(records: Sequence[KeyRecord], record: KeyRecord) -> tuple[str, list[KeyRecord]]:
    """Create a random key; return it, and the records with the new one added. `record` has all fields but the
    digest."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    made = msgspec.structs.replace(
        record, sha256=_digest(key.encode()), created=datetime.now(UTC).isoformat(timespec="seconds")
    )
    problem = _problem(made, {one.id for one in records})
    if problem:
        raise InvalidConfig(f"the key {problem}", param="id")
    try:
        msgspec.convert(msgspec.to_builtins(made), KeyRecord)  # checks the limits: the file must stay readable
    except msgspec.ValidationError as error:
        raise InvalidConfig(f"the key has an invalid limit: {error}") from None
    return key, [*records, made]


def write_keys(path: Path, records: Sequence[KeyRecord]) -> None:
    """Replace the file atomically, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "# API keys, written by `tokenmill keys`. A running server reads them again on SIGHUP.\n"
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
    """Return the fields of a record as TOML; strings, numbers and lists of strings are written as in JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in msgspec.to_builtins(record).items())
