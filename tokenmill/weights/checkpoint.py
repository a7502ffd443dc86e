"""Checkpoint formats: memory-mapped tensors under the checkpoint's own names.

GGUF          one file or split. A tensor is a view of the mapped file: values, or rows of quantised blocks
safetensors   one file or shards. Tensors are views of the mapped files, read on first access
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME, GGUFFile, GGUFTensor
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.ops.raw import RawTensor
from tokenmill.weights.mapped_pages import read_no_page_ahead


class Checkpoint(Protocol):
    @property
    def place(self) -> str:
        """Path shown in errors: a file or a directory."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """Files that contain the tensors."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors in the files."""
        ...

    def load(self, name: str) -> RawTensor:
        """Return one tensor, without a copy if the file allows that."""
        ...

    @property
    def reads_parts(self) -> bool:
        """Return whether read-ahead is off, so that only requested pages are read (`mapped_pages.py`)."""
        ...

    def read_parts(self) -> None:
        """Turn off read-ahead, because only some rows of most tensors will be used."""
        ...


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────────────

GGUF_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
METADATA_WEIGHTS = ("xielu.",)  # prefixes of keys
GGUF_INTEGERS = ("I8", "I16", "I32", "I64")


class GGUFCheckpoint:
    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.place = str(gguf.path)
        self._numbers = dict(_metadata_numbers(gguf))
        self.shapes: dict[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in gguf.tensors.items()}
        self.shapes |= dict.fromkeys(self._numbers, ())
        self.files = list(dict.fromkeys(tensor.path for tensor in gguf.tensors.values()))
        self._bytes = {path: _mapped(path) for path in self.files}  # uint8 [file size]
        self.reads_parts = False

    def read_parts(self) -> None:
        self.reads_parts = True
        for mapped in self._bytes.values():
            read_no_page_ahead(mapped)

    def load(self, name: str) -> RawTensor:
        if name in self._numbers:
            return RawTensor(name, (), torch.tensor(self._numbers[name], dtype=torch.float32))
        tensor = self.gguf.tensors[name]
        stored = self._bytes[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
        if stored.numel() != tensor.num_bytes:
            raise DamagedFile(f"{tensor.path}: tensor {name!r} is beyond the end of the file")
        if tensor.type in GGUF_INTEGERS:
            raise UnsupportedModel(f"{tensor.path}: tensor {name!r} contains integers ({tensor.type})")
        if tensor.type in GGUF_FLOATS:
            return RawTensor(name, tensor.shape, _as_floats(stored, tensor))
        row_bytes = GGML_TYPE_BY_NAME[tensor.type].row_bytes(tensor.shape[-1])
        return RawTensor(name, tensor.shape, stored.view(*tensor.shape[:-1], row_bytes), tensor.type)


def _metadata_numbers(gguf: GGUFFile) -> Iterator[tuple[str, float]]:
    """Yield the weights that files have as lists in the metadata, one number per layer, as `key[layer]`."""
    for key, values in gguf.metadata.items():
        if key.startswith(METADATA_WEIGHTS) and isinstance(values, Sequence) and not isinstance(values, str):
            yield from ((f"{key}[{layer}]", float(value)) for layer, value in enumerate(values))


def _as_floats(stored: torch.Tensor, tensor: GGUFTensor) -> torch.Tensor:
    dtype = GGUF_FLOATS[tensor.type]
    if tensor.offset % dtype.itemsize:  # a file's alignment may be smaller than a value
        stored = stored.clone()
    return stored.view(dtype).view(tensor.shape)


def _mapped(path: Path) -> torch.Tensor:
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise DamagedFile(f"{path}: cannot be mapped: {str(error)[:200]}") from None


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_HINT = "the file is damaged or cut short; download it again"


class SafetensorsCheckpoint:
    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self.place = str(files[0] if len(files) == 1 else files[0].parent)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # by the format's names: "BF16", "F8_E4M3", ...
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._parts: dict[str, torch.Tensor] = {}  # views of the mapped files, after `read_parts`
        for path in files:
            self._add(path)

    def _add(self, path: Path) -> None:
        self._open[path] = file = _opened(path)
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name in self._files:
                raise DamagedFile(f"{path}: tensor {name!r} is also in {self._files[name].name}")
            self._files[name] = path
            found = file.get_slice(name)
            self.shapes[name], self.dtypes[name] = tuple(found.get_shape()), str(found.get_dtype())

    @property
    def reads_parts(self) -> bool:
        return bool(self._parts)

    def read_parts(self) -> None:
        for path in self.files:
            mapped = _mapped(path)
            read_no_page_ahead(mapped)
            self._parts |= _views(path, mapped)

    def load(self, name: str) -> RawTensor:
        data = self._parts[name] if name in self._parts else self.tensor(name)
        if data.dtype not in SAFETENSORS_FLOATS and data.dtype is not torch.int64:  # expert tables are int64
            raise UnsupportedModel(
                f"{self._files[name]}: tensor {name!r} has dtype {data.dtype}, which is not supported"
            )
        return RawTensor(name, tuple(data.shape), data)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as stored, of any dtype."""
        path = self._files[name]
        try:
            found: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, RuntimeError) as error:
            raise DamagedFile(f"{path}: tensor {name!r} cannot be read: {str(error)[:200]}", hint=_HINT) from None
        return found


def _views(path: Path, mapped: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of a file's tensors without reading them (the library reads whole tensors). Tensors that are not
    aligned to their dtype are left out."""
    start = 8 + int.from_bytes(mapped[:8].numpy().tobytes(), "little")
    header: dict[str, Any] = json.loads(mapped[8:start].numpy().tobytes())
    found = {}
    for name, entry in header.items():
        dtype = None if name == "__metadata__" else SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            continue
        first, end = (start + offset for offset in entry["data_offsets"])
        if first % dtype.itemsize == 0 and end > first:
            found[name] = mapped[first:end].view(dtype).view(entry["shape"])
    return found


def _opened(path: Path) -> Any:
    try:
        _read_header(path)
        return safe_open(str(path), framework="pt")
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {error.strerror or error}") from None
    except (SafetensorError, RuntimeError) as error:
        raise DamagedFile(f"{path}: {_diagnosis(path) or str(error)[:200]}", hint=_HINT) from None


def _read_header(path: Path) -> None:
    """Read the header before the library maps the file, whose read-ahead would also load the megabytes after it."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES))


def _diagnosis(path: Path) -> str | None:
    """Return which tensor a truncated file lacks; the library only reports that something is wrong."""
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
