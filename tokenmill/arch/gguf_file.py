"""Reader of a GGUF file's header: its metadata and the position of each tensor. The weights themselves are not read.

    magic "GGUF" | version | tensor count | pair count
    pairs:    key | value type | value            (a value may be an array of one type)
    tensors:  name | dimension count | dimensions, fastest first | type | offset into the data
    padding to `general.alignment`
    data

Every length is checked against the file's size before it is used, so a damaged file raises one `DamagedFile` that names
the file, and never causes a crash or a huge allocation. Little endian, versions 2 and 3. A model may be split over
several files (`name-00001-of-00003.gguf`, ...): the first has the metadata, each has some of the tensors.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from tokenmill.errors import DamagedFile, ModelError, UnsupportedModel

# ── storage types ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class GGMLType:
    name: str
    block_size: int
    block_bytes: int

    def row_bytes(self, row_length: int) -> int:
        return row_length // self.block_size * self.block_bytes


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}

GGML_TYPE_BY_NAME: dict[str, GGMLType] = {kind.name: kind for kind in GGML_TYPES.values()}


# ── one file ───────────────────────────────────────────────────────────────────────────────────────

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_ARRAY_VALUES = 1 << 23  # of one metadata key; a vocabulary has a few hundred thousand
MAX_DIMENSIONS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type id → struct code; sizes follow from the code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_U64 = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class GGUFTensor:
    """The type, shape and position of one tensor. `shape` has rows first; blocks run along the last dimension."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int  # from the file's first byte
    num_bytes: int
    path: Path  # the file that contains it; a model may be split over several


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_floats(tensor: GGUFTensor) -> list[float]:
    """Read a small F32 tensor that describes the architecture."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        numbers = array("f", file.read(tensor.num_bytes))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def read_gguf(path: Path | str) -> GGUFFile:
    path = Path(path)
    try:
        seen = path.stat()
        return _read(path, (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns))
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read: {error.strerror or error}") from None


@lru_cache(maxsize=1)  # spec, tokenizer and weights are loaded one after another, and large vocabularies take long
def _read(path: Path, _identity: tuple[int, ...]) -> GGUFFile:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise DamagedFile(f"{path}: the file is empty", hint="download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()


class _Header:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def read(self) -> GGUFFile:
        self._check_magic()
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_pairs = self._count("metadata pairs", _MIN_PAIR_BYTES)
        metadata = self._metadata(num_pairs)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        start = self._data_start(metadata)
        return GGUFFile(self.path, metadata, self._locate_all(entries, start, self._alignment(metadata)))

    # ── numbers and strings ──

    def damaged(self, problem: str) -> NoReturn:
        raise DamagedFile(f"{self.path}: {problem}", hint="the file is damaged or cut short; download it again")

    def _need(self, num_bytes: int, what: str) -> int:
        """Advance by `num_bytes` and return their start."""
        start, end = self.at, self.at + num_bytes
        if end > self.size:
            self.damaged(f"ends at byte {self.size} inside {what}, which needs {num_bytes} bytes at byte {start}")
        self.at = end
        return start

    def _u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.data, self._need(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64(self.data, self._need(8, what))[0])

    def _count(self, what: str, min_bytes: int) -> int:
        """Read a count of items that take at least `min_bytes` each; refuse one that the rest of the file is too small
        for."""
        count = self._u64(f"the number of {what}")
        if count > (self.size - self.at) // min_bytes:
            self.damaged(f"claims {count} {what}, more than fit into the file")
        return count

    def _string(self, what: str) -> str:
        start = self._need(self._u64(what), what)
        return self.data[start : self.at].decode("utf-8", "replace")

    # ── header ──

    def _check_magic(self) -> None:
        if self.data[self._need(4, "the magic number") : 4] != MAGIC:
            self.damaged("is not a GGUF file (wrong magic number)")
        version = self._u32("the version")
        if version in (2, 3):
            return
        if version in (0x02000000, 0x03000000):
            raise UnsupportedModel(f"{self.path}: big-endian GGUF is not supported")
        raise UnsupportedModel(f"{self.path}: GGUF version {version} is not supported", hint="versions 2 and 3 are")

    def _metadata(self, num_pairs: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            if key in metadata:
                self.damaged(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._u32(f"the type of {key!r}"), key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"{key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            self.damaged(f"metadata key {key!r} has unknown value type {kind}")
        value = struct.unpack_from("<" + _SCALARS[kind], self.data, self._need(_size(kind), f"{key!r}"))[0]
        return self._bool(value, key) if kind == _BOOL else value

    def _bool(self, value: int, key: str) -> bool:
        if value > 1:
            self.damaged(f"metadata key {key!r} is {value}, expected a boolean")
        return bool(value)

    def _array(self, key: str) -> list[Any]:
        kind = self._u32(f"the element type of {key!r}")
        if kind == _STRING:
            return self._strings(self._bounded(self._count(f"strings in {key!r}", 8), key), key)
        if kind == _ARRAY:
            raise UnsupportedModel(f"{self.path}: metadata key {key!r} is an array of arrays")
        if kind not in _SCALARS:
            self.damaged(f"metadata key {key!r} has unknown element type {kind}")
        count = self._bounded(self._count(f"values in {key!r}", _size(kind)), key)
        return self._numbers(kind, count, key)

    def _bounded(self, count: int, key: str) -> int:
        """Return an array's length; refuse too many values, which take far more memory as Python objects than in the
        file."""
        if count > MAX_ARRAY_VALUES:
            raise UnsupportedModel(
                f"{self.path}: metadata key {key!r} has {count} values, more than {MAX_ARRAY_VALUES}"
            )
        return count

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        start = self._need(count * _size(kind), f"{key!r}")
        numbers = array(_SCALARS[kind])
        numbers.frombytes(self.data[start : self.at])
        if sys.byteorder == "big":
            numbers.byteswap()
        if kind == _BOOL:
            return [self._bool(value, key) for value in numbers]
        return numbers.tolist()

    def _strings(self, count: int, key: str) -> list[str]:
        """Read an array of strings. This is the reader's hot loop: a vocabulary has hundreds of thousands."""
        data, size, at, u64 = self.data, self.size, self.at, _U64
        strings: list[str] = []
        append: Callable[[str], None] = strings.append
        for _ in range(count):
            start = at + 8
            if start > size:
                self.damaged(f"ends inside {key!r}")
            at = start + u64(data, start - 8)[0]
            if at > size:
                self.damaged(f"ends inside {key!r}")
            append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return strings

    # ── tensors ──

    def _tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        num_dims = self._u32(f"tensor {name!r}")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            self.damaged(f"tensor {name!r} claims {num_dims} dimensions")
        dims = tuple(self._u64(f"tensor {name!r}") for _ in range(num_dims))
        kind = self._u32(f"tensor {name!r}")
        return name, kind, dims[::-1], self._u64(f"tensor {name!r}")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_count = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_count or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.damaged(f"general.alignment is {alignment!r}, not a power of two")
        return int(alignment)

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = self._alignment(metadata)
        return (self.at + alignment - 1) // alignment * alignment

    def _locate_all(
        self, entries: list[tuple[str, int, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                self.damaged(f"tensor {name!r} appears twice")
            if offset % alignment:
                self.damaged(f"tensor {name!r} at offset {offset} is not aligned to {alignment}")
            tensors[name] = self._locate(name, kind, shape, start + offset)
        self._check_overlap(tensors)
        return tensors

    def _locate(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GGUFTensor:
        if kind not in GGML_TYPES:
            raise UnsupportedModel(f"{self.path}: tensor {name!r} has unknown storage type {kind}")
        ggml = GGML_TYPES[kind]
        if 0 in shape or shape[-1] % ggml.block_size:
            self.damaged(f"tensor {name!r} of type {ggml.name} cannot have the shape {list(shape)}")
        num_bytes = prod(shape[:-1]) * ggml.row_bytes(shape[-1])
        if offset + num_bytes > self.size:
            self.damaged(f"tensor {name!r} ends at byte {offset + num_bytes}, beyond the file's {self.size} bytes")
        return GGUFTensor(name, ggml.name, shape, offset, num_bytes, self.path)

    def _check_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self.damaged(f"tensors {previous!r} and {tensor.name!r} overlap")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name


def _size(kind: int) -> int:
    return struct.calcsize("<" + _SCALARS[kind])


# ── a model in several files ───────────────────────────────────────────────────────────────────────

MAX_PARTS = 1000
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_gguf_model(path: Path | str) -> GGUFFile:
    """Read the header of a whole model; for a split model `path` is its first part."""
    path = Path(path)
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    tensors: dict[str, GGUFTensor] = {}
    for part in _parts(path, count):
        for name, tensor in (first if part == path else read_gguf(part)).tensors.items():
            if name in tensors:
                raise DamagedFile(f"{part}: tensor {name!r} is also in {tensors[name].path.name}")
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
