"""The cost of a model, computed from its spec: parameters, bytes, KV bytes, FLOPs, and the bytes that a step reads.
Exact counts, no fudge factors.

A multiply-add is two operations. Matrix products are counted: projections, attention scores and values, MLP or active
experts, head. Norms, rotations and softmax are left out; they are well under one percent.

The time of a step with few tokens is determined by the bytes it reads: every weight once, however many sequences there
are, and each sequence's KV. Two kinds of weights are read only in part: an embedding that is not tied to the head is
only looked up, and an expert is read only if some token is routed to it:

    share of experts read by B tokens, k of E each  =  1 - (1 - k/E)^B        (tokens choose independently)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokenmill.arch.families import BY_NAME
from tokenmill.arch.gguf_file import GGML_TYPE_BY_NAME, GGUFFile
from tokenmill.arch.outline import LayerOutline, Model, outline_of

DTYPE_BYTES: Mapping[str, float] = {
    "float64": 8.0,
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 0.53125,  # one scale byte per 32 values
    "nvfp4": 0.5625,  # one scale byte per 16 values
}
KV_SCALE_BYTES: Mapping[str, int] = {"int8": 4, "fp8": 4}  # float32, one per head and token


def bytes_per_value(dtype: str) -> float:
    """Return the bytes of one value in a torch-like dtype or a GGUF type ("Q4_K": 4.5 bits)."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    kind = GGML_TYPE_BY_NAME[dtype]
    return kind.block_bytes / kind.block_size


# ── parameters and weights ─────────────────────────────────────────────────────────────────────────────


def num_parameters(model: Model) -> int:
    outline = outline_of(model)
    ends = outline.vocab_size * outline.hidden_size * (1 if outline.tied_head else 2) + outline.end_vectors
    ends += outline.end_matrices + outline.tables
    return ends + sum(layer.total for layer in outline.layers)


def num_active_parameters(model: Model) -> int:
    """Return the parameters that one token's forward pass uses; experts that it is not routed to are left out."""
    return num_parameters(model) - sum(layer.experts - layer.active_experts for layer in outline_of(model).layers)


def weight_bytes(model: Model, dtype: str, *, vector_dtype: str | None = None) -> int:
    """Return the bytes of all weights stored in `dtype`; norms and biases in `vector_dtype` where it differs (float32
    in GGUF files)."""
    outline = outline_of(model)
    vectors = outline.end_vectors + sum(layer.vectors for layer in outline.layers)
    matrices = num_parameters(outline) - vectors
    return int(matrices * bytes_per_value(dtype) + vectors * bytes_per_value(vector_dtype or dtype))


def gguf_weight_bytes(gguf: GGUFFile) -> int:
    """Return the bytes of a GGUF file's tensors, each in its own type."""
    return sum(tensor.num_bytes for tensor in gguf.tensors.values())


# ── KV cache ───────────────────────────────────────────────────────────────────────────────────────────


def kv_bytes_per_token(model: Model, dtype: str) -> int:
    """Return the bytes that one token takes in the caches of all layers, windowed ones included."""
    return sum(_cached_bytes(layer, dtype) for layer in outline_of(model).layers)


def kv_bytes(model: Model, dtype: str, context: int) -> int:
    """Return the cache bytes of a sequence of `context` tokens; a windowed layer caches its window, a recurrent one its
    state."""
    layers = outline_of(model).layers
    cached = sum(_cached_bytes(layer, dtype) * _visible(layer, context) for layer in layers)
    return cached + int(sum(layer.state_values for layer in layers) * bytes_per_value(dtype))


def kv_vector_bytes(head_dim: int, dtype: str) -> int:
    """Return the bytes of one head's key (or value) of one token, including its scale in quantised caches."""
    return int(head_dim * bytes_per_value(dtype)) + KV_SCALE_BYTES.get(dtype, 0)


def _cached_bytes(layer: LayerOutline, dtype: str) -> int:
    """Return the bytes that one token takes in the cache of one layer."""
    scales = 2 * layer.num_kv_heads * KV_SCALE_BYTES.get(dtype, 0) if layer.kv_values else 0
    return int(layer.kv_values * bytes_per_value(dtype)) + scales


def _visible(layer: LayerOutline, context: int) -> int:
    return min(context, layer.window) if layer.window else context


# ── FLOPs ──────────────────────────────────────────────────────────────────────────────────────────────


def prefill_flops(model: Model, num_tokens: int, *, start: int = 0, num_logits: int = 1, causal: bool = True) -> int:
    """Return the operations for `num_tokens` tokens after `start` cached ones, with logits for `num_logits` of them.

    `causal=False` also counts the masked query-key pairs, the full square that much of the literature quotes.
    """
    outline = outline_of(model)
    linear = num_tokens * 2 * sum(layer.linear + layer.active_experts for layer in outline.layers)
    linear += num_tokens * 2 * outline.end_matrices
    full = num_tokens * (start + num_tokens)
    pairs = {
        window: num_visible_pairs(num_tokens, start, window) if causal else full
        for window in {layer.window for layer in outline.layers}
    }
    # q·k and weights·v: a multiply-add each per head, dimension and query-key pair
    attention = sum(2 * layer.pair_values * pairs[layer.window] for layer in outline.layers)
    return linear + attention + num_logits * 2 * outline.vocab_size * outline.hidden_size


def decode_flops(model: Model, context: int) -> int:
    """Return the operations of one token, the last of a context of `context` tokens."""
    return prefill_flops(model, 1, start=context - 1)


def num_visible_pairs(num_tokens: int, start: int, window: int | None) -> int:
    """Return the number of query-key pairs under the causal mask.

    query t (start <= t < start + num_tokens) sees min(t + 1, window) keys:   1 2 3 ... window window window
    """
    end = start + num_tokens
    if window is None or window >= end:
        return _triangle(end) - _triangle(start)
    ramp_end = max(start, min(end, window))  # from here on every query sees a full window
    return _triangle(ramp_end) - _triangle(start) + (end - ramp_end) * window


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


# ── memory traffic of a step ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class WeightParts:
    """The bytes of a model's weights, grouped by how a step reads them."""

    embedding: int
    experts: int
    rest: int
    tables: int = 0  # further embeddings, whose rows are looked up

    @property
    def total(self) -> int:
        return self.embedding + self.experts + self.rest + self.tables


def weight_parts(
    model: Model, dtype: str, *, vector_dtype: str | None = None, expert_dtype: str | None = None
) -> WeightParts:
    """Return the weight bytes with all matrices in `dtype`, routed experts in `expert_dtype` if given, and norms and
    biases in `vector_dtype` if given."""
    outline = outline_of(model)
    expert_values = sum(layer.experts for layer in outline.layers)
    embedding = int(outline.vocab_size * outline.hidden_size * bytes_per_value(dtype))
    all_bytes = weight_bytes(outline, dtype, vector_dtype=vector_dtype)
    tables = int(outline.tables * bytes_per_value(dtype))
    rest = all_bytes - embedding - tables - int(expert_values * bytes_per_value(dtype))
    return WeightParts(embedding, int(expert_values * bytes_per_value(expert_dtype or dtype)), rest, tables)


def gguf_weight_parts(gguf: GGUFFile, num_layers: int | None = None) -> WeightParts:
    """Return the weight bytes of a GGUF file. `num_layers`: leave out the MTP blocks after these layers."""
    embedding = sum(t.num_bytes for name, t in gguf.tensors.items() if name.startswith("token_embd."))
    experts = sum(t.num_bytes for name, t in gguf.tensors.items() if "_exps." in name)
    tables = sum(t.num_bytes for name, t in gguf.tensors.items() if name.startswith("per_layer_token_embd."))
    total = sum(t.num_bytes for t in gguf.tensors.values())
    if gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.nextn_predict_layers") and num_layers:
        further = {name: t for name, t in gguf.tensors.items() if _block_number(name) >= num_layers}
        experts -= sum(t.num_bytes for name, t in further.items() if "_exps." in name)
        total -= sum(t.num_bytes for t in further.values())
    return WeightParts(embedding, experts, total - embedding - experts - tables, tables)


def _block_number(name: str) -> int:
    """Return the block number in a GGUF tensor's name; -1 if it has none."""
    number = name.removeprefix("blk.").partition(".")[0]
    return int(number) if name.startswith("blk.") and number.isdigit() else -1


def weights_read_bytes(model: Model, parts: WeightParts, num_tokens: int) -> int:
    """Return the weight bytes that one step of `num_tokens` tokens reads."""
    head = parts.embedding if model.tied_head else 0
    return head + parts.rest + int(parts.experts * share_of_experts(model, num_tokens))


def share_of_experts(model: Model, num_tokens: int) -> float:
    """Return the expected share of all expert weights that at least one of `num_tokens` tokens is routed to."""
    shares = [
        1.0 - (1.0 - layer.num_active / layer.num_experts) ** num_tokens
        for layer in outline_of(model).layers
        if layer.experts
    ]
    return sum(shares) / len(shares) if shares else 1.0


def decode_step_bytes(model: Model, parts: WeightParts, kv_dtype: str, batch: int, context: int) -> int:
    """Return the bytes read by a decode step: one token for each of `batch` sequences of `context` tokens."""
    return weights_read_bytes(model, parts, batch) + batch * kv_bytes(model, kv_dtype, context)


def decode_step_flops(model: Model, batch: int, context: int) -> int:
    return batch * decode_flops(model, context)


# ── precision ──────────────────────────────────────────────────────────────────────────────────────
#
# The default compute dtype on a GPU, shared by the engine and the planner.
#
#               mantissa   largest number   largest values of residual streams (`docs/experiments/gpu-precision.md`)
#     bfloat16    8 bits      3e38
#     float16    11 bits     65,504         SmolLM2-135M 27,000, Gemma 3 270M 104,000, 27B 700,000
#     float32    24 bits      3e38
#
# Large models are trained and served with 8 bits of mantissa. In a small model these sometimes change an answer, where
# two tokens are almost equally likely, and a GPU computes a small model fast enough in float32. So a small model uses
# float32, unless it is stored in bfloat16, when its answers are expected to be those of bfloat16. Float16 is precise
# enough, but the range of a model's activations is not known in advance (180 in TinyLlama, of SmolLM2's family),
# so it is used only for files stored in float16, and not for families known to exceed its range.


ComputeDType = Literal["float32", "bfloat16", "float16"]
SMALL_MODEL_PARAMETERS = 600_000_000  # in smaller models, activations of 8 bits visibly change answers


def is_small(model: Model) -> bool:
    return num_parameters(model) < SMALL_MODEL_PARAMETERS


def gpu_dtype(model: Model, *, prefers_16_bits: bool = False) -> ComputeDType:
    """Return the default compute dtype on a GPU.

    `prefers_16_bits`: use 16 bits for small models too, because weights are quantised while they load, or because
    float32 is slow (`--deterministic`: an eighth of the speed).
    """
    if model.dtype == "bfloat16":
        return "bfloat16"
    if is_small(model) and not prefers_16_bits:
        return "float32"
    return "float16" if model.dtype == "float16" and not _exceeds_float16(model) else "bfloat16"


def _exceeds_float16(model: Model) -> bool:
    family = BY_NAME.get(model.family)
    return family is not None and family.exceeds_float16
