"""Describes the kernels that would compute a model on a GPU, for `tokenmill doctor --kernels`: for each kind of matrix,
attention and experts, with 1 to 4,096 rows.

The answers come from the same selection tables as at run time (`gemm/select.py`, `attention/select.py`,
`moe/select.py`). Neither a GPU nor Triton is needed, and no weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from tokenmill.arch.packed_formats import (
    FP8_GROUP,
    INT4_GROUP,
    MX_GROUP,
    UNQUANTIZED,
    StoredFormat,
    packed_int_format,
    widened,
)
from tokenmill.arch.spec import RMS_NORM, FeedSpec, Gqa, LayerSpec, ModelSpec, MoeSpec
from tokenmill.arch.tensors import tensors_of
from tokenmill.ops.batch import Mode
from tokenmill.ops.interface import Routing
from tokenmill.ops.triton.attention.select import AttentionStep, choose_attention, num_splits_for
from tokenmill.ops.triton.gemm.product import (
    FP8,
    FP8_BLOCKS,
    FP8_SQUARES,
    INTERLEAVE,
    MXFP4,
    NVFP4,
    PLAIN,
    TABLE_FORMS,
    Epilogue,
    WeightForm,
    int_form,
)
from tokenmill.ops.triton.gemm.select import choose, takes_norm_gemv
from tokenmill.ops.triton.launch.capabilities import Capabilities, keeps_fp4
from tokenmill.ops.triton.moe.select import ExpertsKind, ExpertsProduct, ExpertsSizes, choose_experts

MAX_ROWS = 4096
STACKED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
EPILOGUES: dict[str, Epilogue] = {"gate_up": "gated", "o": "add", "down": "add", "conv_out": "add"}
MIXER_INPUTS = ("qkv", "kv_down")
EXPERTS_KINDS: dict[str, ExpertsKind] = {"plain": "plain", "int": "int", "fp4": "fp4", "fp8_blocks": "fp8_blocks"}
Answer = TypeVar("Answer")


class PlannedWeights(NamedTuple):
    """The formats in which a model's weights are stored and computed."""

    dtype: torch.dtype  # of activations
    quantization: str = "none"  # of unquantised weights, at load
    stored: Mapping[str, StoredFormat] = {}  # formats of tensors that are quantised in the checkpoint


class Kind(NamedTuple):
    """Matrices of a model that use the same kernels."""

    name: str  # name of the tensor without its layer
    num_rows: int
    num_columns: int
    form: WeightForm
    has_bias: bool
    has_post_norm: bool  # between the product and the residual stream
    is_normed: bool = False  # a mixer's input projection after an RMS norm


@dataclass(frozen=True)
class Range:
    """A range of row counts for which the same kernels are chosen."""

    first: int
    last: int
    eager: str
    captured: str  # for steps that are captured into a graph
    why: str


@dataclass(frozen=True)
class Section:
    """The kernels chosen for one part of a model."""

    title: str
    unit: str  # rows or tokens
    ranges: tuple[Range, ...]


def planned_form(name: str, shape: tuple[int, ...], weights: PlannedWeights) -> WeightForm:
    """Return the form into which a matrix is packed for a GPU."""
    dtype, stored = weights.dtype, weights.stored.get(name)
    if stored is not None and (dtype != torch.float32 or weights.quantization != "none"):
        found = packed_int_format(name, shape, stored)
        if found is not None and found.is_fp8:
            if found.group == shape[-1] and len(shape) == 2:
                return FP8[dtype]
            return FP8_BLOCKS[dtype] if shape[-2] % FP8_GROUP else FP8_SQUARES[dtype]
        if found is not None and found.table:
            return TABLE_FORMS[found.table, dtype]
        if found is not None and found.is_fp4:
            return MXFP4[dtype] if found.group == MX_GROUP else NVFP4[dtype]
        if found is not None:
            return int_form(dtype, found.bits, found.span)
    is_expert = len(shape) == 3
    if weights.quantization == "none" or shape[-1] % INT4_GROUP or (name.endswith(UNQUANTIZED) and not is_expert):
        return PLAIN[dtype]
    if weights.quantization == "int4":
        return int_form(dtype, 4, INTERLEAVE if shape[-1] % (8 * INTERLEAVE) == 0 else INTERLEAVE // 2)
    return int_form(dtype, 8, INTERLEAVE) if weights.quantization == "int8" or is_expert else FP8[dtype]


def matrix_kinds(spec: ModelSpec, weights: PlannedWeights) -> list[Kind]:
    """Return the kinds of matrices of a model, in the order of their use. Matrices with the same input are stacked,
    unless they are stored in different formats."""
    tensors = tensors_of(spec)
    found: dict[Kind, None] = {}
    rows: dict[tuple[str, str], dict[WeightForm, int]] = {}
    for name, tensor in tensors.items():
        if tensor.kind != "linear" or len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        owner, own = _split_name(name)
        if own.startswith("shared.") and _num_shared(spec.layers[_layer(owner)].mlp, owner, weights):
            continue  # a shared expert that is appended to the routed ones
        stack = rows.setdefault((owner, own), {})
        form = planned_form(name, tensor.shape, weights)
        stack[form] = stack.get(form, 0) + tensor.shape[0]
    for (owner, own), stack in rows.items():
        parts = [part for part in tensors if _split_name(part) == (owner, own)] if owner else []
        columns = next((tensors[part].shape[1] for part in parts), spec.hidden_size)
        has_bias = any(f"{part.removesuffix('.weight')}.bias" in tensors for part in parts)
        has_post_norm = own in EPILOGUES and _has_post_norm(spec.layers[_layer(owner)], own)
        is_normed = own in MIXER_INPUTS and spec.norm == RMS_NORM and not spec.layers[_layer(owner)].is_parallel
        for form, num_rows in stack.items():
            found[Kind(own, num_rows, columns, form, has_bias, has_post_norm, is_normed)] = None
    if spec.tied_head:
        form = planned_form("embed.weight", (spec.vocab_size, spec.hidden_size), weights._replace(quantization="none"))
        found[Kind("head", spec.vocab_size, spec.hidden_size, form, False, False)] = None
    return list(found)


def _split_name(name: str) -> tuple[str, str]:
    """layers.3.shared.gate.weight → (layers.3, shared.gate_up)"""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] != "layers":
        return "", parts[0]
    *folder, last = parts[2:]
    return ".".join(parts[:2]), ".".join((*folder, STACKED.get(last, last)))


def _has_post_norm(layer: LayerSpec, own: str) -> bool:
    return layer.has_mlp_post_norm if own == "down" else layer.has_post_norms


def _layer(owner: str) -> int:
    return int(owner.split(".")[1])


def product_section(kind: Kind, gpu: Capabilities) -> Section:
    shown = f"{kind.name} [{kind.num_rows}, {kind.num_columns}] {kind.form}"
    return Section(shown, "rows", tuple(_ranges(lambda m: _products(kind, m, gpu))))


def _products(kind: Kind, m: int, gpu: Capabilities) -> tuple[str, str, str]:
    eager, _ = _product(kind, m, gpu, "eager")
    captured, why = _product(kind, m, gpu, "captured")
    return eager, captured, why


def _product(kind: Kind, m: int, gpu: Capabilities, mode: Mode) -> tuple[str, str]:
    if m == 1 and kind.is_normed and takes_norm_gemv(kind.num_rows, kind.num_columns, kind.form):
        return "norm_gemv", "one row and a small matrix: all of it is on its way before the row is normed"
    shape, epilogue = (m, kind.num_rows, kind.num_columns, kind.form, gpu, mode), EPILOGUES.get(_last(kind.name))
    if epilogue is not None and not (epilogue == "add" and kind.has_post_norm):
        fused = choose(*shape, epilogue, kind.has_bias)
        if fused is not None:
            return fused.name if epilogue == "add" else f"{fused.name} with its gate", fused.why
    plain = choose(*shape)
    assert plain is not None
    return f"{plain.name}, then its gate" if epilogue == "gated" else plain.name, plain.why


def _last(name: str) -> str:
    return name.split(".")[-1]


def _num_shared(feed: FeedSpec | None, owner: str, weights: PlannedWeights) -> int:
    """Return as how many routed experts the shared expert is computed; 0 unless it is unquantised like them."""
    if not isinstance(feed, MoeSpec) or feed.shared is None or not feed.is_shared_like_experts:
        return 0
    is_plain = weights.quantization == "none" and not any(name.startswith(f"{owner}.") for name in weights.stored)
    return feed.shared.intermediate_size // feed.expert.intermediate_size if is_plain else 0


def experts_section(moe: MoeSpec, hidden: int, name: str, weights: PlannedWeights, gpu: Capabilities) -> Section:
    experts, inter = moe.num_experts, moe.expert.intermediate_size
    shapes = {"gate": (experts, inter, hidden), "up": (experts, inter, hidden), "down": (experts, hidden, inter)}
    forms = [planned_form(f"{name}.experts.{part}.weight", shape, weights) for part, shape in shapes.items()]
    kinds = {form.kind for form in forms}
    is_apart = forms[0] != forms[1]  # gates and ups of different forms are not stacked
    kind: ExpertsKind = "mixed" if len(kinds) > 1 or is_apart else EXPERTS_KINDS[kinds.pop()]
    expert_bytes = 2 * inter * hidden * weights.dtype.itemsize

    shared = _num_shared(moe, name, weights)
    is_usual = weights.dtype == torch.bfloat16 and moe.expert.activation == "silu" and not moe.expert.bias
    is_plain = is_usual and moe.expert.is_gated and Routing(moe.num_active, moe.routing).is_plain
    sizes = ExpertsSizes(shared, experts, moe.num_active, hidden, inter) if is_plain else None

    def answer(num_tokens: int) -> tuple[str, str, str]:
        is_fused = moe.shared is None
        row = choose_experts(
            ExpertsProduct(num_tokens, moe.num_active, experts, kind, expert_bytes, is_fused, gpu, sizes)
        )
        return row.name, row.name, row.why

    of_all = f", and {shared} for all tokens" if shared else ""
    title = f"experts {experts} × [{2 * inter}, {hidden}] {forms[0]}, {moe.num_active} a token{of_all}"
    return Section(title, "tokens", tuple(_ranges(answer)))


def attention_sections(mixer: Gqa, weights: PlannedWeights, context: int, gpu: Capabilities) -> Iterator[Section]:
    has_extras = mixer.window is not None or mixer.softcap is not None or mixer.has_sinks
    seen = context if mixer.window is None else min(context, mixer.window)
    shown = f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} KV heads"

    def step(num_rows: int, num_queries: int, visible: int) -> AttentionStep:
        heads, kv_heads, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
        return AttentionStep(num_rows, num_queries, visible, heads, kv_heads, dim, weights.dtype, has_extras, gpu)

    def decode(num_rows: int) -> tuple[str, str, str]:
        row = choose_attention(step(num_rows, 1, seen))
        splits = num_splits_for(num_rows, mixer.num_kv_heads, seen, gpu)
        name = f"{row.name}, {splits} splits" if splits > 1 else row.name
        return name, name, row.why

    def prompt(length: int) -> tuple[str, str, str]:
        row = choose_attention(step(1, max(2, length), max(2, length)))
        return row.name, row.name, row.why

    yield Section(f"attention of decoding rows ({shown}, context {seen})", "rows", tuple(_ranges(decode)))
    yield Section(f"attention of a whole prompt ({shown})", "tokens", tuple(_ranges(prompt)))


def _ranges(answer: Callable[[int], tuple[str, str, str]]) -> Iterator[Range]:
    """Yield the answers for 1 to MAX_ROWS rows, grouped in ranges of equal answers."""
    for first, last, (eager, captured, why) in _runs((number, answer(number)) for number in range(1, MAX_ROWS + 1)):
        yield Range(first, last, eager, captured, why)


def _runs(answers: Iterable[tuple[int, Answer]]) -> Iterator[tuple[int, int, Answer]]:
    numbers = iter(answers)
    first, current = next(numbers)
    last = first
    for number, found in numbers:
        if found != current:
            yield first, last, current
            first, current = number, found
        last = number
    yield first, last, current


def describe_kernels(spec: ModelSpec, weights: PlannedWeights, context: int, gpu: Capabilities) -> list[Section]:
    """Return the kernels that would compute a model, by part; equal layers are described once."""
    if not keeps_fp4(gpu, weights.dtype):
        weights = weights._replace(stored=widened(weights.stored))
    sections = [product_section(kind, gpu) for kind in matrix_kinds(spec, weights)]
    for mixer in dict.fromkeys(spec.attentions):
        sections += attention_sections(mixer, weights, context, gpu)
    moes = {layer.mlp: number for number, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoeSpec)}
    sections += [
        experts_section(moe, spec.hidden_size, f"layers.{number}", weights, gpu) for moe, number in moes.items()
    ]
    return list({section.title: section for section in sections}.values())
