"""The size of an adapter from its headers, without torch: its largest rank and its number of values.

Loading and the planner size adapter slots by it, before the model is loaded.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.arch.gguf_file import read_gguf
from tokenmill.arch.spec import ModelSpec, MoeSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import DamagedFile, ModelError

WEIGHTS = "adapter_model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_RANK = 1024
PANEL = 16  # kernels pad ranks to multiples of this

# Parts of the names of experts' matrices, in checkpoints and in GGUF; and of the shared expert's.
_EXPERTS = re.compile(r"\.experts\.|_exps\.")
_SHARED = re.compile(r"\.shared_(experts?|mlp)\.|_shexp\.")
_STACKED = re.compile(r"\.experts\.(base_layer\.)*lora_A")  # of a parameter that stacks the matrices of all experts


class AdapterSize(NamedTuple):
    rank: int
    num_values: int
    expert_rank: int = 0  # the largest rank of experts' matrices; 0: it changes none


def adapter_size(path: Path, spec: ModelSpec | None = None) -> AdapterSize:
    """Read the size of the adapter at `path`. `spec`: the model that it adapts, if known."""
    shapes = _safetensors_shapes(path / WEIGHTS) if path.is_dir() else _gguf_shapes(path)
    moes = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)] if spec else []
    count, is_joined = max((moe.num_experts for moe in moes), default=1), any(m.is_shared_like_experts for m in moes)
    ranks = {name: shape[0] for name, shape in shapes.items() if ".lora_A" in name or ".lora_embedding_A" in name}
    ranks |= {name: shape[-2] for name, shape in shapes.items() if name.endswith(".lora_a") and len(shape) > 1}
    ranks = {name: rank // count if _STACKED.search(name) else rank for name, rank in ranks.items()}
    of_experts = [rank for name, rank in ranks.items() if _EXPERTS.search(name) or (is_joined and _SHARED.search(name))]
    values = sum(prod(shape) for name, shape in shapes.items() if ".lora_" in name)
    return AdapterSize(max(ranks.values(), default=0), values, max(of_experts, default=0))


def slot_values(spec: ModelSpec, rank: int, expert_rank: int = 0) -> int:
    """Return the number of values of an adapter of this rank that changes every matrix, and experts' matrices with
    `expert_rank`, which may be 0."""
    ranks, of_experts = (-(-one // PANEL) * PANEL for one in (rank, expert_rank))
    kinds = ("linear", "embedding")
    tensors = [tensor for tensor in tensors_of(spec).values() if tensor.kind in kinds]
    matrices = [tensor.shape for tensor in tensors if len(tensor.shape) == 2]
    if spec.tied_head:
        matrices.append((spec.vocab_size, spec.hidden_size))
    experts = [tensor.shape for tensor in tensors if len(tensor.shape) == 3 and ".experts." in tensor.name]
    return sum(ranks * sum(shape) for shape in matrices) + sum(
        of_experts * count * (rows + columns) for count, rows, columns in experts
    )


def _gguf_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    if path.suffix != ".gguf" or not path.exists():
        raise ModelError(f"{path}: not an adapter", hint="name a PEFT folder or a GGUF file")
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
