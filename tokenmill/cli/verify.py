"""`tokenmill verify`: whether the files of stored models, and their packed weights, are what they were."""

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
    """Read all files of models in the store again and compare them with their SHA-256, and packed weights with theirs.
    Exit code 1 names what is damaged; packed weights that are damaged are removed, and made anew by the next start.

    Parameters
    ----------
    models
        Names as `tokenmill list` shows them; all models and packed weights without one.
    """
    store = Store()
    findings = [finding for manifest in _chosen(store, models) for finding in stored_files(store, manifest)]
    findings += [] if models else packed_files(packed_folder())
    rows = [(one.what, one.file, size(one.num_bytes), one.problem or "as it was") for one in findings]
    if not rows:
        print("there is nothing to verify in the store")
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
            raise UnknownModel(f"{name} is not in the store, or a file of it is missing or cut short")
        yield manifest


def stored_files(store: Store, manifest: Manifest) -> Iterator[Finding]:
    """Check the files of a model against the digests that they were stored with."""
    for file in manifest.files:
        with store.blob_path(file.sha256).open("rb") as content:
            is_same = hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        yield Finding(manifest.name, file.name, file.size_bytes, None if is_same else "its SHA-256 is another one")


def packed_files(folder: Path) -> Iterator[Finding]:
    """Packed weights that are complete. Damaged ones are removed."""
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix in (SUFFIX, ".tmp"):
            continue
        found, problem = path.stat(), None
        if found.st_mode & 0o200:
            continue  # still being written out
        try:
            require_sums(path, always=True)
        except Unusable as unusable:
            problem = str(unusable)
            path.unlink(missing_ok=True)
        yield Finding("(packed weights)", path.name[:16], found.st_size, problem)
