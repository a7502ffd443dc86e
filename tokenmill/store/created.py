"""Created models: a model in the store with its own system prompt, parameters or chat template.

    tokenmill create mario -f Modelfile        POST /api/create {"model": "mario", "from": "smollm2", "system": …}

A created model is a further manifest. It links the same blobs as the model it was made from, so it takes no space, and
either may be removed without the other. One made from a path outside the store records that path.

Content can also be uploaded first under its SHA-256 (`BlobUpload`), and then be used by name (`stored_files`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tokenmill.errors import InvalidRequest, UnknownModel
from tokenmill.store.catalog import find_entry
from tokenmill.store.fetched import require_space
from tokenmill.store.layout import Customization, Manifest, Store, StoredFile, checked_file_name, directory_name
from tokenmill.store.names import HUB_HOSTS, shown

MAX_CUSTOM_BYTES = 1 << 20  # of a created model's customization as JSON
LATEST = ":latest"
DAY_S = 86_400
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,3}(:[A-Za-z0-9._-]+)?")


def plain_name(name: str) -> str:
    """Return a name without its optional parts: the tag `:latest`, and the hub's host."""
    name = name.removesuffix(LATEST)
    return next((name.removeprefix(host) for host in HUB_HOSTS if name.startswith(host)), name)


def require_new_name(name: str) -> str:
    """Check a created model's name, and return its plain form; names in the catalog are refused."""
    plain = plain_name(name)
    if not _NAME.fullmatch(plain):
        raise InvalidRequest(f"{shown(name)} can't be the name of a model", param="model")
    directory_name(plain)
    if find_entry(plain) is not None:
        raise InvalidRequest(f"{shown(name)} is a name in the catalog", param="model", hint="choose another one")
    return plain


def find_created(name: str, store: Store) -> Manifest | None:
    """Return the created model of this name; None if there is none."""
    try:
        manifest = store.get(plain_name(name))
    except UnknownModel:  # not a valid name
        return None
    return manifest if manifest is not None and manifest.custom is not None else None


def combined(base: Customization | None, own: Customization) -> Customization:
    """Return the customization of a model made from a created one: its own values, and the base's where it has none."""
    if base is None:
        return own
    return Customization(
        system=own.system or base.system,
        template=own.template or base.template,
        parameters={**base.parameters, **own.parameters},
        messages=own.messages or base.messages,
        license=own.license or base.license,
        adapter=own.adapter or base.adapter,
    )


def create_model(store: Store, name: str, base: Manifest, own: Customization) -> Manifest:
    """Install a created model. `base` may be a manifest outside the store, of a path or of uploaded content."""
    custom = combined(base.custom, own)
    if len(msgspec.json.encode(custom)) > MAX_CUSTOM_BYTES:
        raise InvalidRequest(f"a created model may add at most {MAX_CUSTOM_BYTES} bytes of text", param="system")
    parent = base.parent or base.name
    source = f"created from {parent}" if parent else "uploaded"
    plain = require_new_name(name)
    return store.publish(
        Manifest(name=plain, source=source, files=base.files, parent=parent, weights=base.weights, custom=custom)
    )


def copy_model(store: Store, source: Manifest, name: str) -> Manifest:
    """Install the same model under another name."""
    custom, parent = source.custom or Customization(), source.parent or source.name
    return store.publish(msgspec.structs.replace(source, name=require_new_name(name), parent=parent, custom=custom))


# ── uploaded content ─────────────────────────────────────────────────────────────────────────────────


class BlobUpload:
    """A file that is uploaded in pieces; it is kept only if its SHA-256 is the announced one."""

    def __init__(self, store: Store, sha256: str, max_bytes: int) -> None:
        store.blob_path(sha256)  # refuses what is not a digest
        store.prepare()
        _delete_old_uploads(store.root / "partial")
        self._store, self._sha256, self._max_bytes = store, sha256, max_bytes
        self._path = store.root / "partial" / f"upload-{uuid.uuid4().hex}"
        self._file = open(self._path, "xb")  # noqa: SIM115  # closed by `close`
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise InvalidRequest(f"an uploaded file may have at most {self._max_bytes} bytes", param="body")
        require_space(self._path.parent, len(data))
        self._hash.update(data)
        self._file.write(data)

    def finish(self) -> None:
        """Move the file into the store if its digest is the announced one."""
        self._file.close()
        got = self._hash.hexdigest()
        if got != self._sha256:
            raise InvalidRequest(f'digest mismatch, expected "sha256:{self._sha256}", got "sha256:{got}"')
        self._store.keep_blob(self._sha256, self._path)

    def close(self) -> None:
        """Delete the file unless it was moved into the store."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _delete_old_uploads(folder: Path) -> None:
    """Delete the uploads of killed processes."""
    for leftover in folder.glob("upload-*"):
        with contextlib.suppress(OSError):  # another process has deleted it
            if time.time() - leftover.stat().st_mtime > DAY_S:
                leftover.unlink()


def stored_files(store: Store, files: Mapping[str, str]) -> list[StoredFile]:
    """Return uploaded blobs as the files of a model; `files` maps their names to digests."""
    found = []
    for name, sha256 in files.items():
        plain = checked_file_name(Path(name).name)
        path = store.blob_path(sha256)
        if not path.is_file():
            raise InvalidRequest(f"the store has no content sha256:{sha256}", param="files", hint="upload it first")
        found.append(StoredFile(plain, sha256, path.stat().st_size))
    if len({file.name for file in found}) < len(found):
        raise InvalidRequest("two files have the same name", param="files")
    return found
