"""A model split over several GGUF files (`name-00001-of-00003.gguf`, ...): one header out of all of them.

The first part has the metadata; each part has some of the tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenmill.arch.gguf_file import GGUFFile, GGUFTensor, read_gguf
from tokenmill.errors import DamagedFile, ModelError

MAX_PARTS = 1000
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_gguf_model(path: Path | str) -> GGUFFile:
    """A whole model's header; for a split one `path` is its first part."""
    path = Path(path)
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    tensors: dict[str, GGUFTensor] = {}
    for part in _parts(path, count):
        for name, tensor in (first if part == path else read_gguf(part)).tensors.items():
            if name in tensors:
                raise DamagedFile(f"{part}: tensor {name!r} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    return GGUFFile(path, first.metadata, tensors)


def _parts(path: Path, count: int) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or count > MAX_PARTS:
        raise ModelError(f"{path}: one of {count} parts, but not named like NAME-00001-of-{count:05d}.gguf")
    parts = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if path != parts[0]:
        raise ModelError(
            f"{path}: part {int(match['number'])} of {count}", hint=f"name the first part, {parts[0].name}"
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"{path}: parts are missing: {', '.join(missing)}")
    return parts
