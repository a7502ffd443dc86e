"""The size of an adapter from its headers alone, without torch: its largest rank and how many numbers it has.

What a slot must hold is known from this before a model is loaded, and by the planner.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.arch.gguf_file import read_gguf
from tokenmill.arch.spec import ModelSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import DamagedFile, ModelError

WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 1024
PANEL = 16  # ranks that kernels take at a time


class AdapterSize(NamedTuple):
    rank: int
    num_values: int


def adapter_size(path: Path) -> AdapterSize:
    shapes = _safetensors_shapes(path / WEIGHTS) if path.is_dir() else _gguf_shapes(path)
    ranks = [shape[0] for name, shape in shapes.items() if ".lora_A" in name or ".lora_embedding_A" in name]
    ranks += [shape[-2] for name, shape in shapes.items() if name.endswith(".lora_a") and len(shape) > 1]
    values = sum(prod(shape) for name, shape in shapes.items() if ".lora_" in name)
    return AdapterSize(max(ranks, default=0), values)


def slot_values(spec: ModelSpec, rank: int) -> int:
    """Numbers of an adapter of this rank that changes every matrix but those of experts."""
    ranks = -(-rank // PANEL) * PANEL
    kinds = ("linear", "embedding")
    matrices = [tensor.shape for tensor in tensors_of(spec).values() if tensor.kind in kinds and len(tensor.shape) == 2]
    if spec.tied_head:
        matrices.append((spec.vocab_size, spec.hidden_size))
    return sum(ranks * sum(shape) for shape in matrices)


def _gguf_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix != ".gguf" or not path.exists():
        raise ModelError(f"{path} is no adapter", hint="name a PEFT folder or a GGUF file")
    return {name: tensor.shape for name, tensor in read_gguf(path).tensors.items()}


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        hint = "name a PEFT folder with adapter_model.safetensors, or a GGUF file"
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}", hint=hint) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedFile(f"{path}: its header is not valid") from None
