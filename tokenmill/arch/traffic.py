"""What a step moves through memory: the weights it reads, and the keys and values of its sequences.

A step of few tokens is as slow as these bytes are: every weight is read once, however many sequences there are, and
each sequence adds its own KV. Two kinds of weights are not read whole: an embedding that is not also the head is only
looked up, and experts are read only where some token was sent to them:

    share of experts read by B tokens, k of E each  =  1 - (1 - k/E)^B        (tokens choose independently)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tokenmill.arch.cost import bytes_per_value, decode_flops, kv_bytes
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.spec import ModelSpec, MoeSpec, TensorSpec
from tokenmill.arch.tensors import tensors_of


@dataclass(frozen=True)
class WeightParts:
    """Bytes of the weights by how a step reads them."""

    embedding: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        return self.embedding + self.experts + self.rest


def weight_parts(spec: ModelSpec, dtype: str, *, vector_dtype: str | None = None) -> WeightParts:
    """All matrices stored in `dtype`; norms and biases in `vector_dtype` where it differs."""
    sizes = {"embedding": 0.0, "experts": 0.0, "rest": 0.0}
    for tensor in tensors_of(spec).values():
        stored = (vector_dtype or dtype) if tensor.kind == "vector" else dtype
        sizes[_part_of(tensor)] += prod(tensor.shape) * bytes_per_value(stored)
    return WeightParts(**{part: int(size) for part, size in sizes.items()})


def gguf_weight_parts(gguf: GGUFFile) -> WeightParts:
    embedding = sum(t.num_bytes for name, t in gguf.tensors.items() if name.startswith("token_embd."))
    experts = sum(t.num_bytes for name, t in gguf.tensors.items() if "_exps." in name)
    total = sum(t.num_bytes for t in gguf.tensors.values())
    return WeightParts(embedding, experts, total - embedding - experts)


def _part_of(tensor: TensorSpec) -> str:
    if tensor.kind == "embedding":
        return "embedding"
    return "experts" if ".experts." in tensor.name else "rest"


def weights_read_bytes(spec: ModelSpec, parts: WeightParts, num_tokens: int) -> int:
    """By one step of `num_tokens` tokens."""
    head = parts.embedding if spec.tied_head else 0
    return head + parts.rest + int(parts.experts * share_of_experts(spec, num_tokens))


def share_of_experts(spec: ModelSpec, num_tokens: int) -> float:
    """Of all expert weights, how much at least one of `num_tokens` tokens is expected to need."""
    shares = [
        1.0 - (1.0 - layer.mlp.num_active / layer.mlp.num_experts) ** num_tokens
        for layer in spec.layers
        if isinstance(layer.mlp, MoeSpec)
    ]
    return sum(shares) / len(shares) if shares else 1.0


def decode_step_bytes(spec: ModelSpec, parts: WeightParts, kv_dtype: str, batch: int, context: int) -> int:
    """One token for each of `batch` sequences of `context` tokens."""
    return weights_read_bytes(spec, parts, batch) + batch * kv_bytes(spec, kv_dtype, context)


def decode_step_flops(spec: ModelSpec, batch: int, context: int) -> int:
    return batch * decode_flops(spec, context)
