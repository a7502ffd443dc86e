"""What a model costs, from its spec alone: parameters, bytes, KV bytes, FLOPs. Exact counts, no fudge factors.

A multiply-add is two operations. Counted are the matrix products: projections, attention scores and values, MLP or
active experts, head. Norms, rotations and softmax are left out; they are well under a percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.gguf_types import GGML_TYPE_BY_NAME
from tokenmill.arch.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, TensorSpec
from tokenmill.arch.tensors import layer_tensors, tensors_of

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}


def bytes_per_value(dtype: str) -> float:
    """Of a torch-like dtype or a GGUF type ("Q4_K": 4.5 bits)."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    kind = GGML_TYPE_BY_NAME[dtype]
    return kind.block_bytes / kind.block_size


# ── parameters and weights ─────────────────────────────────────────────────────────────────────────────


def num_parameters(spec: ModelSpec) -> int:
    return sum(prod(tensor.shape) for tensor in tensors_of(spec).values())


def num_active_parameters(spec: ModelSpec) -> int:
    """What one token's forward pass goes through: experts it is not sent to are left out."""
    idle = sum(_idle_parameters(layer, spec.hidden_size) for layer in spec.layers)
    return num_parameters(spec) - idle


def _idle_parameters(layer: LayerSpec, hidden: int) -> int:
    if not isinstance(layer.mlp, MoeSpec):
        return 0
    return (layer.mlp.num_experts - layer.mlp.num_active) * 3 * hidden * layer.mlp.expert.intermediate_size


def weight_bytes(spec: ModelSpec, dtype: str, *, vector_dtype: str | None = None) -> int:
    """All weights stored in `dtype`; norms and biases in `vector_dtype` where it differs (float32 in GGUF files)."""
    matrix, vector = bytes_per_value(dtype), bytes_per_value(vector_dtype or dtype)
    return int(sum(prod(t.shape) * (vector if t.kind == "vector" else matrix) for t in tensors_of(spec).values()))


def gguf_weight_bytes(gguf: GGUFFile) -> int:
    """What a GGUF file's tensors really take, each in its own type."""
    return sum(tensor.num_bytes for tensor in gguf.tensors.values())


# ── KV cache ───────────────────────────────────────────────────────────────────────────────────────────


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Keys and values of one token over all layers, as long as every layer keeps it."""
    return int(sum(2 * layer.attention.kv_size for layer in spec.layers) * bytes_per_value(dtype))


def kv_bytes(spec: ModelSpec, dtype: str, context: int) -> int:
    """Of one sequence with `context` tokens; a windowed layer keeps its window only."""
    values = sum(2 * layer.attention.kv_size * _visible(layer.attention, context) for layer in spec.layers)
    return int(values * bytes_per_value(dtype))


def _visible(attention: AttentionSpec, context: int) -> int:
    return min(context, attention.window) if attention.window else context


# ── FLOPs ──────────────────────────────────────────────────────────────────────────────────────────────


def prefill_flops(spec: ModelSpec, num_tokens: int, *, start: int = 0, num_logits: int = 1, causal: bool = True) -> int:
    """`num_tokens` fed after `start` cached ones; the head computed for `num_logits` of them.

    `causal=False` counts hidden pairs too: the full square that much of the literature quotes.
    """
    linear = num_tokens * 2 * sum(_linear_parameters(layer, spec.hidden_size) for layer in spec.layers)
    full = num_tokens * (start + num_tokens)
    attention = sum(
        _attention_flops(
            layer.attention, num_visible_pairs(num_tokens, start, layer.attention.window) if causal else full
        )
        for layer in spec.layers
    )
    return linear + attention + num_logits * 2 * spec.vocab_size * spec.hidden_size


def decode_flops(spec: ModelSpec, context: int) -> int:
    """One token, the last of a context of `context` tokens."""
    return prefill_flops(spec, 1, start=context - 1)


def _linear_parameters(layer: LayerSpec, hidden: int) -> int:
    """Weights one token is multiplied by in one layer."""
    total = sum(_size(tensor) for tensor in layer_tensors(layer, hidden) if tensor.kind == "linear")
    return total - _idle_parameters(layer, hidden)


def _size(tensor: TensorSpec) -> int:
    return prod(tensor.shape)


def _attention_flops(attention: AttentionSpec, num_pairs: int) -> int:
    """q·k and weights·v: a multiply-add each per head, dimension and query-key pair."""
    return 4 * attention.q_size * num_pairs


def num_visible_pairs(num_tokens: int, start: int, window: int | None) -> int:
    """Query-key pairs under the causal mask.

    query t (start <= t < start + num_tokens) sees min(t + 1, window) keys:   1 2 3 ... window window window
    """
    end = start + num_tokens
    if window is None or window >= end:
        return _triangle(end) - _triangle(start)
    ramp_end = max(start, min(end, window))  # from here on every query sees a full window
    return _triangle(ramp_end) - _triangle(start) + (end - ramp_end) * window


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
