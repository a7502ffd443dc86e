"""Safetensors checkpoints: one file, or shards. Tensors are views of the mapped file, read as they are touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.ops.raw import RawTensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_HINT = "the file is damaged or cut short; download it again"


class SafetensorsCheckpoint:
    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self.place = str(files[0] if len(files) == 1 else files[0].parent)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for path in files:
            self._add(path)

    def _add(self, path: Path) -> None:
        self._open[path] = file = _opened(path)
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name in self._files:
                raise DamagedFile(f"{path}: tensor {name!r} is in {self._files[name].name} too")
            self._files[name] = path
            self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def load(self, name: str) -> RawTensor:
        data = self.tensor(name)
        if data.dtype not in FLOATS:
            raise UnsupportedModel(
                f"{self._files[name]}: tensor {name!r} has dtype {data.dtype}, which is not supported"
            )
        return RawTensor(name, tuple(data.shape), data)

    def tensor(self, name: str) -> torch.Tensor:
        """As the file has it, of whatever dtype."""
        path = self._files[name]
        try:
            found: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise DamagedFile(f"{path}: tensor {name!r} cannot be read: {str(error)[:200]}", hint=_HINT) from None
        return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, RuntimeError) as error:
        raise DamagedFile(f"{path}: {_diagnosis(path) or str(error)[:200]}", hint=_HINT) from None


def _diagnosis(path: Path) -> str | None:
    """Name the tensor that a truncated file loses; the library's own check says only that something is wrong."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            return f"its {size} bytes end inside the header"
        return next(_lost_tensors(file.read(header_bytes), size - 8 - header_bytes), None)


def _lost_tensors(header: bytes, data_bytes: int) -> Iterator[str]:
    try:
        entries = json.loads(header).items()
        ends = sorted((entry["data_offsets"][1], name) for name, entry in entries if name != "__metadata__")
        for end, name in ends:
            if end > data_bytes:
                yield f"tensor {name!r} ends at data byte {end}, but only {data_bytes} bytes follow the header"
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        yield "its header is not valid"
