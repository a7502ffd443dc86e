"""What a step moves through memory: the weights it reads, and the keys and values of its sequences.

A step of few tokens is as slow as these bytes are: every weight is read once, however many sequences there are, and
each sequence adds its own KV. Two kinds of weights are not read whole: an embedding that is not also the head is only
looked up, and experts are read only where some token was sent to them:

    share of experts read by B tokens, k of E each  =  1 - (1 - k/E)^B        (tokens choose independently)
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.cost import bytes_per_value, decode_flops, kv_bytes, weight_bytes
from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.outline import Model, outline_of


@dataclass(frozen=True)
class WeightParts:
    """Bytes of the weights by how a step reads them."""

    embedding: int
    experts: int
    rest: int

    @property
    def total(self) -> int:
        return self.embedding + self.experts + self.rest


def weight_parts(
    model: Model, dtype: str, *, vector_dtype: str | None = None, expert_dtype: str | None = None
) -> WeightParts:
    """All matrices stored in `dtype`, those of routed experts in `expert_dtype` where it differs, norms and biases in
    `vector_dtype` where it differs."""
    outline = outline_of(model)
    expert_values = sum(layer.experts for layer in outline.layers)
    embedding = int(outline.vocab_size * outline.hidden_size * bytes_per_value(dtype))
    all_bytes = weight_bytes(outline, dtype, vector_dtype=vector_dtype)
    rest = all_bytes - embedding - int(expert_values * bytes_per_value(dtype))
    return WeightParts(embedding, int(expert_values * bytes_per_value(expert_dtype or dtype)), rest)


def gguf_weight_parts(gguf: GGUFFile) -> WeightParts:
    embedding = sum(t.num_bytes for name, t in gguf.tensors.items() if name.startswith("token_embd."))
    experts = sum(t.num_bytes for name, t in gguf.tensors.items() if "_exps." in name)
    total = sum(t.num_bytes for t in gguf.tensors.values())
    return WeightParts(embedding, experts, total - embedding - experts)


def weights_read_bytes(model: Model, parts: WeightParts, num_tokens: int) -> int:
    """By one step of `num_tokens` tokens."""
    head = parts.embedding if model.tied_head else 0
    return head + parts.rest + int(parts.experts * share_of_experts(model, num_tokens))


def share_of_experts(model: Model, num_tokens: int) -> float:
    """Share of all expert weights that at least one of `num_tokens` tokens is expected to need."""
    shares = [
        1.0 - (1.0 - layer.num_active / layer.num_experts) ** num_tokens
        for layer in outline_of(model).layers
        if layer.experts
    ]
    return sum(shares) / len(shares) if shares else 1.0


def decode_step_bytes(model: Model, parts: WeightParts, kv_dtype: str, batch: int, context: int) -> int:
    """One token for each of `batch` sequences of `context` tokens."""
    return weights_read_bytes(model, parts, batch) + batch * kv_bytes(model, kv_dtype, context)


def decode_step_flops(model: Model, batch: int, context: int) -> int:
    return batch * decode_flops(model, context)
