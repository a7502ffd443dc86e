"""Find the files with a model's weights under a path, and their format. Only a shard index is opened.

Pickle files are refused, because reading one executes code in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Literal

from tokenmill.errors import DamagedFile, ModelError

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAX_INDEX_BYTES = 256 << 20
FIRST_PART = "-00001-of-"  # in the name of the first part of a split GGUF model
_INDEX = "model.safetensors.index.json"

Format = Literal["safetensors", "gguf"]


@dataclass(frozen=True)
class Location:
    format: Format
    files: tuple[Path, ...]  # GGUF: the file, or the first part


def locate(path: Path | str) -> Location:
    path = Path(path)
    if path.is_dir():
        return _in_directory(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.suffix in PICKLES:
        raise _pickle(path)
    if path.suffix == ".safetensors":
        return Location("safetensors", (path,))
    if path.suffix == ".gguf" or _has_gguf_magic(path):
        return Location("gguf", (path,))
    raise ModelError(f"{path} is neither a .gguf nor a .safetensors file")


def stored_bytes(path: Path) -> int:
    """Return the total size of all files with the weights, including all parts of a split GGUF model."""
    files = set(locate(path).files)
    for first in [file for file in files if FIRST_PART in file.name]:
        stem, _, rest = first.name.partition(FIRST_PART)
        files |= set(first.parent.glob(f"{escape(stem)}-*-of-{escape(rest)}"))
    return sum(file.stat().st_size for file in files)


def _has_gguf_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {error.strerror or error}") from None


def _in_directory(directory: Path) -> Location:
    files = sorted(file for file in directory.iterdir() if file.is_file())
    if (directory / "config.json").is_file():
        return Location("safetensors", _safetensors(directory, files))
    ggufs = [file for file in files if file.suffix == ".gguf"]
    if len(ggufs) == 1 or (ggufs and FIRST_PART in ggufs[0].name):
        return Location("gguf", (ggufs[0],))
    raise _nothing_usable(directory, files, ggufs)


def _nothing_usable(directory: Path, files: list[Path], ggufs: list[Path]) -> ModelError:
    if not files:
        return ModelError(f"{directory} is empty", hint="was the download interrupted?")
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        return ModelError(f"{directory} contains several GGUF files: {names}", hint="name one of them")
    return ModelError(f"{directory} has no config.json", hint="a model directory has config.json and *.safetensors")


def _safetensors(directory: Path, files: list[Path]) -> tuple[Path, ...]:
    if (directory / _INDEX).is_file():
        return _indexed(directory)
    found = [file for file in files if file.suffix == ".safetensors"]
    # Some repositories contain the weights twice; the files named model*.safetensors have the standard tensor names.
    found = [file for file in found if file.name.startswith("model")] or found
    if found:
        return tuple(found)
    pickles = [file for file in files if file.suffix in PICKLES]
    if pickles:
        raise _pickle(pickles[0])
    raise ModelError(f"{directory} has a config.json but no *.safetensors file", hint="was the download interrupted?")


def _indexed(directory: Path) -> tuple[Path, ...]:
    index = directory / _INDEX
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise DamagedFile(f"{index}: larger than {MAX_INDEX_BYTES} bytes")
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{index}: not a usable index of shards ({type(error).__name__})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise DamagedFile(f"{index}: names {name!r}, which is not a safetensors file in the same directory")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{directory}: shards are missing: {', '.join(missing)}", hint="download the rest")
    return tuple(directory / name for name in names)


def _pickle(path: Path) -> ModelError:
    return ModelError(
        f"{path.name}: pickle files are refused, because reading one executes code in it",
        hint="use the model's safetensors or GGUF files",
    )
