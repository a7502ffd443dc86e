"""An adapter in a GGUF file, as llama.cpp writes and reads it.

    general.type = "adapter", adapter.type = "lora", adapter.lora.alpha
    <tensor>.lora_a    [rank, columns], of experts [experts, rank, columns]
    <tensor>.lora_b    [rows, rank], of experts [experts, rows, rank]

Tensors are named as in a GGUF file of the model, and their rows are in that file's order. The scale is alpha / rank, or
1 without an alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tokenmill.arch.gguf_file import read_gguf
from tokenmill.arch.spec import ModelSpec
from tokenmill.errors import DamagedFile, UnsupportedModel
from tokenmill.lora.peft_file import scaled
from tokenmill.lora.sizes import MAX_RANK
from tokenmill.lora.targets import EXPERTS, AdapterTarget, gguf_targets
from tokenmill.ops.low_rank import LowRank
from tokenmill.weights.checkpoint import GGUFCheckpoint
from tokenmill.weights.dequantize import dequantize

A, B = ".lora_a", ".lora_b"


def gguf_matrices(path: Path, spec: ModelSpec) -> dict[str, LowRank]:
    file = read_gguf(path)
    kind, method = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != "adapter" or method != "lora":
        raise UnsupportedModel(f"{path}: general.type is {kind!r} and adapter.type {method!r}, expected a LoRA adapter")
    if tokens := file.metadata.get("adapter.alora.invocation_tokens"):
        raise UnsupportedModel(f"{path}: adapter.alora.invocation_tokens ({len(tokens)}) is not implemented")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise DamagedFile(f"{path}: adapter.lora.alpha is {alpha!r}")
    checkpoint = GGUFCheckpoint(file)
    names = {name.removesuffix(A).removesuffix(B) for name in checkpoint.shapes}
    for name in checkpoint.shapes:
        if not name.endswith((A, B)):
            raise UnsupportedModel(f"{path}: tensor {name!r} is not implemented")
    targets = gguf_targets(spec).modules
    found: dict[str, LowRank] = {}
    for name in sorted(names):
        for part in (A, B):
            if name + part not in checkpoint.shapes:
                raise DamagedFile(f"{path}: {name} has no {part[1:]}")
        a, b = (_values(checkpoint, name + part) for part in (A, B))
        for target in _targets(path, targets, name):
            found.update(_matrices(path, name, target, a, b, float(alpha)))
    if not found:
        raise DamagedFile(f"{path}: no adapter is in the file")
    return found


def _values(checkpoint: GGUFCheckpoint, name: str) -> torch.Tensor:
    raw = checkpoint.load(name)
    values = dequantize(raw) if raw.quant else raw.data.clone()
    if not bool(values.isfinite().all()):
        raise DamagedFile(f"{checkpoint.place}: tensor {name!r} has numbers that are not finite")
    return values


def _targets(path: Path, targets: Mapping[str, tuple[AdapterTarget, ...]], name: str) -> tuple[AdapterTarget, ...]:
    if (found := targets.get(name.removesuffix(".weight"))) is None:
        raise UnsupportedModel(
            f"{path}: the adapter changes {name}, which this model does not have as a matrix",
            hint="the adapter belongs to another model, or changes a part that is not implemented",
        )
    return found


def _matrices(
    path: Path, name: str, target: AdapterTarget, a: torch.Tensor, b: torch.Tensor, alpha: float
) -> Iterator[tuple[str, LowRank]]:
    rank = a.shape[-2] if a.dim() >= 2 else 0
    is_embedding = target.name == "embed"
    if is_embedding:  # llama.cpp stores `a` transposed, token by token
        a = a.transpose(-1, -2).contiguous() if a.shape[0] == target.rows else a
        rank = a.shape[0]
    sizes = (target.columns, target.rows) if is_embedding else (target.rows, target.columns)
    experts = target.source.shape[:-2]  # (number of experts,), or () for a single matrix
    fits = a.shape[:-2] == b.shape[:-2] == experts and (b.shape[-2:], a.shape[-1:]) == ((sizes[0], rank), sizes[1:])
    if not fits or not 0 < rank <= MAX_RANK:
        raise DamagedFile(
            f"{path}: {name} has factors {list(b.shape)} and {list(a.shape)}, the matrix is {list(sizes)}"
        )
    scale = alpha / rank if alpha else 1.0
    if EXPERTS in f"{target.name}.":
        for expert, (own_a, own_b) in enumerate(zip(a, b, strict=True)):
            yield f"{target.name}.{expert}", LowRank(own_a, scaled(target.own_rows(own_b), scale))
        return
    rows = b if is_embedding else target.own_rows(b)
    yield target.name, LowRank(a, scaled(rows, scale))
