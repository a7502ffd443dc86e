"""What a model costs, from its spec alone: parameters, bytes, KV bytes, FLOPs. Exact counts, no fudge factors.

A multiply-add is two operations. Counted are the matrix products: projections, attention scores and values, MLP or
active experts, head. Norms, rotations and softmax are left out; they are well under a percent.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.arch.gguf_file import GGUFFile
from tokenmill.arch.gguf_types import GGML_TYPE_BY_NAME
from tokenmill.arch.outline import LayerOutline, Model, outline_of

DTYPE_BYTES: Mapping[str, float] = {
    "float64": 8.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 0.53125,  # a byte of scale for 32 values
    "nvfp4": 0.5625,  # a byte of scale for 16
}
KV_SCALE_BYTES: Mapping[str, int] = {"int8": 4, "fp8": 4}  # float32, one a head and token


def bytes_per_value(dtype: str) -> float:
    """Bytes that a value of a torch-like dtype or a GGUF type takes ("Q4_K": 4.5 bits)."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    kind = GGML_TYPE_BY_NAME[dtype]
    return kind.block_bytes / kind.block_size


# ── parameters and weights ─────────────────────────────────────────────────────────────────────────────


def num_parameters(model: Model) -> int:
    outline = outline_of(model)
    ends = outline.vocab_size * outline.hidden_size * (1 if outline.tied_head else 2) + outline.end_vectors
    return ends + sum(layer.total for layer in outline.layers)


def num_active_parameters(model: Model) -> int:
    """What one token's forward pass goes through: experts it is not sent to are left out."""
    return num_parameters(model) - sum(layer.experts - layer.active_experts for layer in outline_of(model).layers)


def weight_bytes(model: Model, dtype: str, *, vector_dtype: str | None = None) -> int:
    """All weights stored in `dtype`; norms and biases in `vector_dtype` where it differs (float32 in GGUF files)."""
    outline = outline_of(model)
    vectors = outline.end_vectors + sum(layer.vectors for layer in outline.layers)
    matrices = num_parameters(outline) - vectors
    return int(matrices * bytes_per_value(dtype) + vectors * bytes_per_value(vector_dtype or dtype))


def gguf_weight_bytes(gguf: GGUFFile) -> int:
    """What a GGUF file's tensors really take, each in its own type."""
    return sum(tensor.num_bytes for tensor in gguf.tensors.values())


# ── KV cache ───────────────────────────────────────────────────────────────────────────────────────────


def kv_bytes_per_token(model: Model, dtype: str) -> int:
    """What one token leaves behind in all layers, as long as every layer keeps it."""
    return sum(_kept_bytes(layer, dtype) for layer in outline_of(model).layers)


def kv_bytes(model: Model, dtype: str, context: int) -> int:
    """KV bytes of a sequence of `context` tokens; a windowed layer keeps its window only, a recurrent one its state."""
    layers = outline_of(model).layers
    kept = sum(_kept_bytes(layer, dtype) * _visible(layer, context) for layer in layers)
    return kept + int(sum(layer.state_values for layer in layers) * bytes_per_value(dtype))


def kv_vector_bytes(head_dim: int, dtype: str) -> int:
    """One head's key (or value) of one token: its numbers, and the scale that they are rounded with where they are."""
    return int(head_dim * bytes_per_value(dtype)) + KV_SCALE_BYTES.get(dtype, 0)


def _kept_bytes(layer: LayerOutline, dtype: str) -> int:
    """Bytes that one token keeps in one layer."""
    scales = 2 * layer.num_kv_heads * KV_SCALE_BYTES.get(dtype, 0) if layer.kv_values else 0
    return int(layer.kv_values * bytes_per_value(dtype)) + scales


def _visible(layer: LayerOutline, context: int) -> int:
    return min(context, layer.window) if layer.window else context


# ── FLOPs ──────────────────────────────────────────────────────────────────────────────────────────────


def prefill_flops(model: Model, num_tokens: int, *, start: int = 0, num_logits: int = 1, causal: bool = True) -> int:
    """`num_tokens` fed after `start` cached ones; the head computed for `num_logits` of them.

    `causal=False` counts hidden pairs too: the full square that much of the literature quotes.
    """
    outline = outline_of(model)
    linear = num_tokens * 2 * sum(layer.linear + layer.active_experts for layer in outline.layers)
    full = num_tokens * (start + num_tokens)
    pairs = {
        window: num_visible_pairs(num_tokens, start, window) if causal else full
        for window in {layer.window for layer in outline.layers}
    }
    # q·k and weights·v: a multiply-add each per head, dimension and query-key pair
    attention = sum(2 * layer.pair_values * pairs[layer.window] for layer in outline.layers)
    return linear + attention + num_logits * 2 * outline.vocab_size * outline.hidden_size


def decode_flops(model: Model, context: int) -> int:
    """One token, the last of a context of `context` tokens."""
    return prefill_flops(model, 1, start=context - 1)


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
