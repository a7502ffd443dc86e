"""GGUF checkpoints, whole or split. A tensor is a view of the mapped file: values, or rows of quantised blocks."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME, GGUFFile, GGUFTensor
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.ops.raw import RawTensor

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
INTEGERS = ("I8", "I16", "I32", "I64")


class GGUFCheckpoint:
    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.place = str(gguf.path)
        self.shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
        self.files = list(dict.fromkeys(tensor.path for tensor in gguf.tensors.values()))
        self._bytes = {path: _mapped(path) for path in self.files}  # uint8 [file size]

    def load(self, name: str) -> RawTensor:
        tensor = self.gguf.tensors[name]
        stored = self._bytes[tensor.path][tensor.offset : tensor.offset + tensor.num_bytes]
        if stored.numel() != tensor.num_bytes:
            raise DamagedFile(f"{tensor.path}: tensor {name!r} lies beyond the end of the file")
        if tensor.type in INTEGERS:
            raise UnsupportedModel(f"{tensor.path}: tensor {name!r} holds integers ({tensor.type})")
        if tensor.type in FLOATS:
            return RawTensor(name, tensor.shape, _as_floats(stored, tensor))
        row_bytes = GGML_TYPE_BY_NAME[tensor.type].row_bytes(tensor.shape[-1])
        return RawTensor(name, tensor.shape, stored.view(*tensor.shape[:-1], row_bytes), tensor.type)


def _as_floats(stored: torch.Tensor, tensor: GGUFTensor) -> torch.Tensor:
    dtype = FLOATS[tensor.type]
    if tensor.offset % dtype.itemsize:  # a file may choose an alignment smaller than its numbers
        stored = stored.clone()
    return stored.view(dtype).view(tensor.shape)


def _mapped(path: Path) -> torch.Tensor:
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise DamagedFile(f"{path}: cannot be mapped: {str(error)[:200]}") from None
