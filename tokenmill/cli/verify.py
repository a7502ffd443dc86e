"""`tokenmill verify`: check the files of stored models and their packed weights for damage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenmill.cli.output import print_table, size
from tokenmill.errors import DamagedFile, UnknownModel
from tokenmill.store import Store, plain_name
from tokenmill.store.layout import Manifest
from tokenmill.weights.packed_cache import packed_folder
from tokenmill.weights.packed_file import Unusable, require_sums
from tokenmill.weights.packed_sums import SUFFIX


class Finding(NamedTuple):
    what: str
    file: str
    num_bytes: int
    problem: str | None


def command(*models: str) -> int:
    """Compare the files of downloaded models and their packed weights with their SHA-256. If one is damaged, report it
    and exit with code 1. Damaged packed weights are deleted; the next start writes them again.

    Parameters
    ----------
    models
        Names shown by `tokenmill list`; by default all models and packed weights.
    """
    store = Store()
    findings = [finding for manifest in _chosen(store, models) for finding in stored_files(store, manifest)]
    findings += [] if models else packed_files(packed_folder())
    rows = [(one.what, one.file, size(one.num_bytes), one.problem or "ok") for one in findings]
    if not rows:
        print("the store is empty")
        return 0
    print_table(("MODEL", "FILE", "SIZE", "FOUND"), rows)
    if damaged := [one for one in findings if one.problem is not None]:
        raise DamagedFile(
            f"{len(damaged)} of {len(findings)} files are damaged, {damaged[0].file} first: {damaged[0].problem}",
            hint=f"tokenmill rm {damaged[0].what}, then tokenmill pull it again",
        )
    return 0


def _chosen(store: Store, names: tuple[str, ...]) -> Iterator[Manifest]:
    for name in names or store.names():
        manifest = store.get(plain_name(name))
        if manifest is None:
            raise UnknownModel(f"{name} is not in the store, or one of its files is missing or truncated")
        yield manifest


def stored_files(store: Store, manifest: Manifest) -> Iterator[Finding]:
    """Check the files of a model against their stored digests."""
    for file in manifest.files:
        with store.blob_path(file.sha256).open("rb") as content:
            is_same = hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        yield Finding(manifest.name, file.name, file.size_bytes, None if is_same else "its SHA-256 differs")


def packed_files(folder: Path) -> Iterator[Finding]:
    """Check completed packed weights, and delete damaged ones."""
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in (SUFFIX, ".tmp"):
            continue
        found, problem = path.stat(), None
        if found.st_mode & 0o200:
            continue  # still being written
        try:
            require_sums(path, always=True)
        except Unusable as unusable:
            problem = str(unusable)
            path.unlink(missing_ok=True)
        yield Finding("(packed weights)", path.name[:16], found.st_size, problem)
