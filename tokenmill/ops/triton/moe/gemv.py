"""Experts of a few tokens, from the router's logits on, in two kernels:

    logits, x ─► act(gate) * up of each chosen expert ─► down of each, weighted and summed

With softmax routing the chosen experts are not stored: a program finds its expert in its token's logits, and then
streams rows of that expert's matrices. Other kinds of routing run as a separate kernel before. A program is a single
warp if possible, and there are about as many programs as fit on the GPU. Shared experts are known in advance: their
matrices are prefetched while the router is still being computed.

On Hopper one token of a model with shared experts has kernels of its own (`hopper_gemv.py`).

Experts of packed integers have their own kernels: a matrix row is processed in chunks of neighbouring words whose i-th
values share a scale, and multiplied in pairs of float16 values (`quant/fp16x2.py`). The intermediate result between the
two kernels is stored in such pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.arch.spec import Activation
from tokenmill.ops.interface import ExpertsWeight, LinearWeight, Routing
from tokenmill.ops.triton.elementwise.activation import gated
from tokenmill.ops.triton.elementwise.norm import norm_and_multiply
from tokenmill.ops.triton.launch.capabilities import capabilities_of
from tokenmill.ops.triton.launch.kernel import cdiv, kernel, next_power_of_2
from tokenmill.ops.triton.launch.pdl import fetch_early, launch_dependents, launch_options, wait_for_previous
from tokenmill.ops.triton.moe.hopper_gemv import ring_experts
from tokenmill.ops.triton.moe.select import ExpertsKind, ExpertsSizes, takes_ring
from tokenmill.ops.triton.moe.small_floats import stream_experts
from tokenmill.ops.triton.moe.topk import choice_of, logit_of, next_choice, ordered_logits, route
from tokenmill.ops.triton.quant.fp4 import Fp4Matrix
from tokenmill.ops.triton.quant.fp16x2 import SMALLER, as_pair, times_weighed
from tokenmill.ops.triton.quant.packed_int import has_ptx
from tokenmill.ops.triton.quant.quantized import Fp8BlockMatrix, PackedIntMatrix

ROWS = 2  # rows of down per program
DOWN_STAGES = 3  # pipeline stages over experts, if a program chooses them itself


@triton.jit
def _fetch_shared(gate_up, expert, is_shared, first, last, hidden, inter, THREADS: tl.constexpr):
    """Prefetch rows [first, last) of an expert's gate and up, if it is a shared expert."""
    if is_shared:
        rows = gate_up.to(tl.int64) + (expert * 2 * inter + first).to(tl.int64) * hidden * 2
        part = (last - first) * hidden * 2 // THREADS
        fetch_early(rows + tl.arange(0, THREADS) * part, part)
        fetch_early(rows + tl.cast(inter, tl.int64) * hidden * 2 + tl.arange(0, THREADS) * part, part)


@kernel
def _moe_gemv_up(
    x, choices, gate_up, bias, out, hidden, inter, num_experts, rows_each,
    K: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ARE_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, THREADS: tl.constexpr, FETCHES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T * (K + SHARED), inter] = act(gate x) * up x; choices: the router's logits [T, num_experts], or ids [T, K]
    including shared experts. FETCHES: a program's rows divide evenly among its threads, and are prefetched."""
    pair = tl.program_id(0)
    token, choice = pair // (K + SHARED), pair % (K + SHARED)
    first = tl.program_id(1) * rows_each
    last = tl.minimum(first + rows_each, inter)
    if OVERLAPS and FETCHES and SHARED > 0:
        _fetch_shared(gate_up, num_experts + choice - K, choice >= K, first, last, hidden, inter, THREADS)
    wait_for_previous(OVERLAPS)
    launch_dependents(OVERLAPS)  # only when the choices are ready: the next kernel reads them without waiting
    columns = tl.arange(0, WIDTH)
    inside = columns < hidden
    factors = tl.load(x + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)
    if ARE_IDS:
        expert = tl.load(choices + pair)
    elif SHARED == 0:
        expert = choice_of(choices, token, choice, num_experts, K, BLOCK)
    else:
        expert = (num_experts + choice - K).to(tl.int64)
        if choice < K:
            expert = choice_of(choices, token, choice, num_experts, K, BLOCK)
    source = gate_up + (expert * 2 * inter + first) * hidden + columns
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + inter * hidden, mask=inside, other=0.0)
    for row in range(first, last):
        source += hidden
        is_next = inside & (columns * 0 + row + 1 < last)
        next_gate = tl.load(source, mask=is_next, other=0.0)
        next_up = tl.load(source + inter * hidden, mask=is_next, other=0.0)
        gates = tl.sum(gate.to(tl.float32) * factors, axis=0)
        ups = tl.sum(up.to(tl.float32) * factors, axis=0)
        if HAS_BIAS:
            gates += tl.load(bias + expert * 2 * inter + row).to(tl.float32)
            ups += tl.load(bias + expert * 2 * inter + inter + row).to(tl.float32)
        tl.store(out + pair * inter + row, gated(gates, ups, KIND).to(out.dtype.element_ty))
        gate, up = next_gate, next_up


@triton.jit
def _rows_of_down(down, hidden, inter, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's columns of down and which exist, its rows, and the addresses in the first expert's matrix
    [ROWS, WIDTH], after which of them exist."""
    columns = tl.arange(0, WIDTH)
    inside = columns < inter
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_there = (rows < hidden)[:, None] & inside[None, :]
    return columns, inside, rows, is_there, down + rows[:, None] * inter + columns[None, :]


@kernel
def _moe_gemv_down(
    inner, logits, down, out, hidden, inter, num_experts,
    K: tl.constexpr, SHARED: tl.constexpr, COUNT_PADDED: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, hidden], ROWS of one token per program: loops over the experts, with the next ones' rows prefetched into
    shared memory. Shared experts come first. Experts are chosen before `inner` is ready."""
    launch_dependents(OVERLAPS)
    token = tl.program_id(1)
    columns, inside, rows, is_there, source = _rows_of_down(down, hidden, inter, ROWS, WIDTH)
    ordered = ordered_logits(logits, token, num_experts, BLOCK)
    highest = logit_of(tl.max(ordered, axis=0))
    numbers = tl.arange(0, COUNT_PADDED)
    experts = (num_experts + numbers).to(tl.int64)
    weights, whole, left = tl.full((COUNT_PADDED,), 1.0, tl.float32), 0.0, ordered
    for number in tl.static_range(SHARED, SHARED + K):
        expert, logit, left = next_choice(left, BLOCK)
        weight = tl.exp(logit - highest)
        whole += weight
        experts = tl.where(numbers == number, expert, experts)
        weights = tl.where(numbers == number, weight, weights)
    if not RENORMALIZE:
        whole = tl.sum(tl.where(tl.arange(0, BLOCK) < num_experts, tl.exp(logit_of(ordered) - highest), 0.0), axis=0)
    weights = tl.where(numbers < SHARED, weights, weights / whole)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for number in tl.range(0, SHARED + K, num_stages=STAGES):
        expert = tl.sum(tl.where(numbers == number, experts, 0), axis=0)
        weight = tl.sum(tl.where(numbers == number, weights, 0.0), axis=0)
        index = tl.where(number < SHARED, K + number, number - SHARED)  # in `inner` the routed ones come first
        part = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0)
        factors = tl.load(inner + (token * (K + SHARED) + index) * inter + columns, mask=inside, other=0.0)
        sums += part.to(tl.float32) * (factors.to(tl.float32) * weight)[None, :]
    tl.store(out + token * hidden + rows, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=rows < hidden)


@kernel
def _moe_gemv_down_narrow(
    inner, logits, down, out, hidden, inter, num_experts,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The same without shared experts, by a single warp with two experts' rows prefetched into registers: the first
    ones arrive while later experts are still being chosen."""
    launch_dependents(OVERLAPS)
    token = tl.program_id(1)
    columns, inside, rows, is_there, source = _rows_of_down(down, hidden, inter, ROWS, WIDTH)
    ordered = ordered_logits(logits, token, num_experts, BLOCK)
    expert, highest, left = next_choice(ordered, BLOCK)
    part, logit = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0), highest
    second, second_logit = part, logit
    if K > 1:
        expert, second_logit, left = next_choice(left, BLOCK)
        second = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    whole = 0.0
    for choice in tl.static_range(K):
        third, third_logit = second, second_logit
        if choice + 2 < K:
            expert, third_logit, left = next_choice(left, BLOCK)
            third = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0)
        weight = tl.exp(logit - highest)
        whole += weight
        factors = tl.load(inner + (token * K + choice) * inter + columns, mask=inside, other=0.0)
        sums += part.to(tl.float32) * (factors.to(tl.float32) * weight)[None, :]
        part, logit, second, second_logit = second, second_logit, third, third_logit
    if not RENORMALIZE:
        whole = tl.sum(tl.where(tl.arange(0, BLOCK) < num_experts, tl.exp(logit_of(ordered) - highest), 0.0), axis=0)
    tl.store(out + token * hidden + rows, (tl.sum(sums, axis=1) / whole).to(out.dtype.element_ty), mask=rows < hidden)


@kernel
def _moe_gemv_down_of(
    inner, ids, weights, down, bias, out, hidden, inter,
    K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """The same for given experts and weights, [T, K] each."""
    launch_dependents(OVERLAPS)
    token = tl.program_id(1)
    columns, inside, rows, is_there, source = _rows_of_down(down, hidden, inter, ROWS, WIDTH)
    chosen = ids + token * K
    part = tl.load(source + tl.load(chosen, cache_modifier=".cg") * hidden * inter, mask=is_there, other=0.0)
    second = part
    if K > 1:
        second = tl.load(source + tl.load(chosen + 1, cache_modifier=".cg") * hidden * inter, mask=is_there, other=0.0)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for choice in tl.static_range(K):
        third = second
        if choice + 2 < K:
            expert = tl.load(chosen + choice + 2, cache_modifier=".cg")
            third = tl.load(source + expert * hidden * inter, mask=is_there, other=0.0)
        expert_weight = tl.load(weights + token * K + choice, cache_modifier=".cg")
        factors = tl.load(inner + (token * K + choice) * inter + columns, mask=inside, other=0.0)
        sums += part.to(tl.float32) * (factors.to(tl.float32) * expert_weight)[None, :]
        part, second = second, third
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        for choice in tl.static_range(K):
            own = bias + tl.load(chosen + choice, cache_modifier=".cg") * hidden + rows
            expert_weight = tl.load(weights + token * K + choice, cache_modifier=".cg")
            total += expert_weight * tl.load(own, mask=rows < hidden, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + rows, total.to(out.dtype.element_ty), mask=rows < hidden)


def moe_gemv_chosen(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: ExpertsWeight, activation: Activation
) -> torch.Tensor:
    """x [T, H], experts and their weights [T, k] → weighted sum of the chosen experts [T, H]"""
    _, down = packed.packed
    weights, ids = weights.contiguous(), ids.contiguous()
    if isinstance(down, Fp4Matrix | Fp8BlockMatrix):
        return stream_experts(x, weights, ids, packed, activation)
    (num_tokens, hidden), k, inter = x.shape, ids.shape[1], down.shape[2]
    inner, out, wide = _gate_up(x, ids, packed, k, 0, activation), torch.empty_like(x), next_power_of_2(inter)
    _moe_gemv_down_of[(cdiv(hidden, ROWS), num_tokens)](
        inner, ids, weights, down, down if packed.down_bias is None else packed.down_bias, out, hidden, inter, k, ROWS,
        wide, packed.has_bias, num_warps=_warps_for(wide, 1024), **launch_options(),
    )  # fmt: skip
    return out


def _gate_up(
    x: torch.Tensor,
    choices: torch.Tensor,
    packed: ExpertsWeight,
    num_active: int,
    num_shared: int,
    activation: Activation,
) -> torch.Tensor:
    """→ [T * (k + shared), inter]; choices: ids [T, k], or logits of any other type"""
    gate_up, _ = packed.packed
    (num_tokens, hidden), inter = x.shape, gate_up.shape[1] // 2
    pairs, wide, num_routed = num_tokens * (num_active + num_shared), next_power_of_2(hidden), choices.shape[1]
    inner = x.new_empty(pairs, inter)
    each = cdiv(inter, max(1, capabilities_of(x.device).tuning.moe_gemv_programs // pairs))
    warps = _warps_for(wide, 2048)
    _moe_gemv_up[(pairs, cdiv(inter, each))](
        x, choices, gate_up, x if packed.gate_up_bias is None else packed.gate_up_bias, inner, hidden, inter,
        num_routed, each, num_active, num_shared, activation, wide, next_power_of_2(num_routed),
        choices.dtype == torch.int64, packed.has_bias, 32 * warps, hidden % (256 * warps) == 0,
        num_warps=warps, **launch_options(),
    )  # fmt: skip
    return inner


def _takes_ring(
    x: torch.Tensor, logits: torch.Tensor, packed: ExpertsWeight, num_active: int, activation: Activation
) -> bool:
    is_plain = activation == "silu" and packed.is_gated and not packed.has_bias
    dtypes = {tensor.dtype for tensor in (x, logits, *packed.packed)}
    sizes = ExpertsSizes(packed.num_shared, logits.shape[1], num_active, x.shape[1], packed.packed[1].shape[2])
    return is_plain and dtypes == {torch.bfloat16} and takes_ring(len(x), sizes, capabilities_of(x.device))


def is_narrow(num_tokens: int, inter: int, num_shared: int) -> bool:
    """Return whether a single warp computes rows of down: for one token, if the rows fit in a warp's registers."""
    return num_tokens == 1 and inter <= 1024 and num_shared == 0


def _down_tile(wide: int, num_tokens: int) -> tuple[int, int]:
    """Return the rows of down per program, and its warps: the fastest on an H200 for widths of 768 and 1408."""
    if wide > 1024:
        return 8, 8
    return (4 if num_tokens == 1 else 8), 4


def moe_gemv(
    x: torch.Tensor,
    logits: torch.Tensor,
    packed: ExpertsWeight,
    num_active: int,
    activation: Activation,
    *,
    renormalize: bool,
) -> torch.Tensor:
    """x [T, H], router logits [T, experts] → weighted sum of the chosen experts [T, H]"""
    gate_up, down = packed.packed
    x, logits = x.contiguous(), logits.contiguous()
    if isinstance(gate_up, PackedIntMatrix):
        return moe_gemv_int(x, logits, gate_up, down, num_active, activation, renormalize=renormalize)
    if _takes_ring(x, logits, packed, num_active, activation):
        return ring_experts(x, logits, packed, num_active, activation, renormalize=renormalize)
    (num_tokens, hidden), inter, shared, num_routed = x.shape, down.shape[2], packed.num_shared, logits.shape[1]
    inner, out = _gate_up(x, logits, packed, num_active, shared, activation), torch.empty_like(x)
    wide = next_power_of_2(inter)
    if is_narrow(num_tokens, inter, shared):
        _moe_gemv_down_narrow[(cdiv(hidden, ROWS), num_tokens)](
            inner, logits, down, out, hidden, inter, num_routed, num_active, renormalize, ROWS, wide,
            next_power_of_2(num_routed), num_warps=1, **launch_options(),
        )  # fmt: skip
        return out
    rows, num_warps = _down_tile(wide, num_tokens)
    _moe_gemv_down[(cdiv(hidden, rows), num_tokens)](
        inner, logits, down, out, hidden, inter, num_routed, num_active, shared, next_power_of_2(num_active + shared),
        renormalize, rows, wide, next_power_of_2(num_routed), DOWN_STAGES, num_warps=num_warps, **launch_options(),
    )  # fmt: skip
    return out


def kind_of(packed: ExpertsWeight) -> ExpertsKind:
    """Return the form of the experts' matrices."""
    kinds = {type(matrix) for matrix in packed.packed}
    return KINDS[kinds.pop()] if len(kinds) == 1 and kinds <= KINDS.keys() else "mixed"


KINDS: dict[type, ExpertsKind] = {
    torch.Tensor: "plain",
    PackedIntMatrix: "int",
    Fp4Matrix: "fp4",
    Fp8BlockMatrix: "fp8_blocks",
}


class FewExperts(NamedTuple):
    """The results of `add_norm_experts`, [T, H] each."""

    result: torch.Tensor  # weighted sum of the chosen experts
    normed: torch.Tensor  # the experts' input
    total: torch.Tensor  # the residual stream before the norm


def add_norm_experts(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    router: LinearWeight,
    packed: ExpertsWeight,
    routing: Routing,
    activation: Activation,
) -> FewExperts:
    """Compute the chosen experts of rms_norm(x + residual), or of rms_norm(x), for a few rows x, residual [T, H]."""
    logits, normed, total = norm_and_multiply(x, residual, norm, eps, router.packed)
    if routing.is_plain and kind_of(packed) in ("plain", "int"):
        renormalize = routing.spec.renormalize
        result = moe_gemv(normed, logits, packed, routing.num_active, activation, renormalize=renormalize)
    else:
        result = moe_gemv_chosen(normed, *route(logits, routing), packed, activation)
    return FewExperts(result, normed, total)


def _warps_for(width: int, each: int) -> int:
    """One where that is enough: its threads need no barrier to add up."""
    return max(1, min(8, width // each))


ROWS_TOGETHER = 8  # a program has a multiple of this many gate and up rows: their scales are neighbours


@triton.jit
def _row_pairs(row, chunks, num_in, CHUNK: tl.constexpr, SPAN: tl.constexpr, BITS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Load a row's columns in float16 pairs, in the order of the chunks' words; zero beyond the row: int32 [chunks,
    CHUNK] each."""
    values_each: tl.constexpr = 32 // BITS
    parts: tl.constexpr = SPAN // CHUNK
    first = chunks // parts * (SPAN * values_each) + chunks % parts * CHUNK
    columns = first[:, None] + tl.arange(0, CHUNK)[None, :]
    is_inside = columns < num_in
    found = ()
    for i in tl.static_range(values_each // 2):
        low = tl.load(row + columns + i * SPAN, mask=is_inside, other=0.0)
        high = tl.load(row + columns + (i + values_each // 2) * SPAN, mask=is_inside, other=0.0)
        found = found + (as_pair(low, high, HAS_PTX),)  # type: ignore[assignment]
    return found


@triton.jit
def _index_of(row, SPAN: tl.constexpr, BITS: tl.constexpr):
    """Return the index of a column among the float16 values of its row's pairs."""
    half_span: tl.constexpr = SPAN * 16 // BITS
    return row // (2 * half_span) * (2 * half_span) + row % half_span * 2 + row // half_span % 2


@triton.jit
def _pairs_from(row, chunks, is_there, CHUNK: tl.constexpr, SPAN: tl.constexpr, BITS: tl.constexpr):
    """The same for a row that is stored in pairs: int32 [rows, CHUNK] each."""
    parts: tl.constexpr = SPAN // CHUNK
    first = chunks // parts * (SPAN * 16 // BITS) + chunks % parts * CHUNK
    indices = first[:, None] + tl.arange(0, CHUNK)[None, :]
    found = ()
    for i in tl.static_range(16 // BITS):
        found = found + (tl.load(row + indices + i * SPAN, mask=is_there[:, None], other=0),)  # type: ignore[assignment]
    return found


@triton.jit
def _scales(
    rows, stride, chunks, is_there, CHUNK: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Load the scales of the first, second, … group of each chunk, [rows] each; `rows` points at the first scales."""
    parts: tl.constexpr = SPAN // CHUNK
    groups: tl.constexpr = CHUNK * 32 // BITS // GROUP
    first = chunks // parts * (groups * parts) + chunks % parts
    found = (tl.load(rows + first * stride, mask=is_there, other=0),)
    for i in tl.static_range(1, groups):
        found = found + (tl.load(rows + (first + i * parts) * stride, mask=is_there, other=0),)  # type: ignore[assignment]
    return found


@kernel
def _moe_gemv_int_up(
    x, logits, words, scales, out, hidden, inter, num_experts, rows_each,
    K: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, DOWN_SPAN: tl.constexpr, DOWN_BITS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_PTX: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """out [T * K, inter] = act(gate x) * up x, scaled down, in the pairs that down is multiplied by. A program computes
    some rows of gate and the same rows of up, one at a time."""
    wait_for_previous(OVERLAPS)
    launch_dependents(OVERLAPS)  # only when the logits are ready: the next kernel reads them without waiting
    pair = tl.program_id(0)
    token, choice = pair // K, pair % K
    chunks = tl.arange(0, CHUNKS)
    row_words, stride = tl.multiple_of(hidden * BITS // 32, CHUNK), num_experts * 2 * inter
    pairs = _row_pairs(x + token * hidden, chunks, hidden, CHUNK, SPAN, BITS, HAS_PTX)
    expert = choice_of(logits, token, choice, num_experts, K, BLOCK)
    first = tl.program_id(1) * rows_each
    last = tl.minimum(first + rows_each, inter)
    is_chunk = chunks * CHUNK < row_words
    begin = expert * 2 * inter + first
    source = words + begin * row_words + (chunks * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    row_scales = scales + begin
    to_up = inter * row_words
    gate = tl.load(source, mask=is_chunk[:, None], other=0)
    up = tl.load(source + to_up, mask=is_chunk[:, None], other=0)
    gate_scales = _scales(row_scales, stride, chunks, is_chunk, CHUNK, SPAN, GROUP, BITS)
    up_scales = _scales(row_scales + inter, stride, chunks, is_chunk, CHUNK, SPAN, GROUP, BITS)
    for row in range(first, last):
        source += row_words
        row_scales += 1
        is_next = is_chunk & (chunks * 0 + row + 1 < last)
        next_gate = tl.load(source, mask=is_next[:, None], other=0)
        next_up = tl.load(source + to_up, mask=is_next[:, None], other=0)
        next_gate_scales = _scales(row_scales, stride, chunks, is_next, CHUNK, SPAN, GROUP, BITS)
        next_up_scales = _scales(row_scales + inter, stride, chunks, is_next, CHUNK, SPAN, GROUP, BITS)
        gates = times_weighed(gate, pairs, gate_scales, CHUNK, GROUP, BITS, HAS_PTX)
        ups = times_weighed(up, pairs, up_scales, CHUNK, GROUP, BITS, HAS_PTX)
        gates, ups = tl.sum(tl.sum(gates, axis=1), axis=0) / SMALLER, tl.sum(tl.sum(ups, axis=1), axis=0) / SMALLER
        value = gated(gates, ups, KIND) * SMALLER
        tl.store(out + pair * inter + _index_of(row, DOWN_SPAN, DOWN_BITS), value.to(tl.float16))
        gate, up, gate_scales, up_scales = next_gate, next_up, next_gate_scales, next_up_scales


@kernel
def _moe_gemv_int_down(
    inner, logits, words, scales, out, hidden, inter, num_experts,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, HAS_PTX: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """inner: pairs, int32 [T * K, inter / 2]; out [T, hidden], ROWS of one token per program, consecutively in a tile's
    chunks. The first experts' rows are prefetched before `inner` is ready."""
    launch_dependents(OVERLAPS)
    token = tl.program_id(1)
    all_chunks = tl.arange(0, ROWS * CHUNKS)
    rows, chunks = tl.program_id(0) * ROWS + all_chunks // CHUNKS, all_chunks % CHUNKS
    row_words, stride = tl.multiple_of(inter * BITS // 32, CHUNK), num_experts * hidden
    is_chunk = (chunks * CHUNK < row_words) & (rows < hidden)
    source = words + (rows * row_words + chunks * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    ordered = ordered_logits(logits, token, num_experts, BLOCK)
    expert, highest, left = next_choice(ordered, BLOCK)
    logit = highest
    part = tl.load(source + expert * hidden * row_words, mask=is_chunk[:, None], other=0)
    begins = scales + rows
    part_scales = _scales(begins + expert * hidden, stride, chunks, is_chunk, CHUNK, SPAN, GROUP, BITS)
    expert, second_logit, left = next_choice(left, BLOCK)
    is_second = is_chunk & (K > 1)
    second = tl.load(source + expert * hidden * row_words, mask=is_second[:, None], other=0)
    second_scales = _scales(begins + expert * hidden, stride, chunks, is_second, CHUNK, SPAN, GROUP, BITS)
    wait_for_previous(OVERLAPS)
    sums = tl.zeros((ROWS * CHUNKS, CHUNK), tl.float32)
    whole = 0.0
    for choice in range(K):
        expert, third_logit, left = next_choice(left, BLOCK)
        is_third = is_chunk & (all_chunks * 0 + choice + 2 < K)
        third = tl.load(source + expert * hidden * row_words, mask=is_third[:, None], other=0)
        third_scales = _scales(begins + expert * hidden, stride, chunks, is_third, CHUNK, SPAN, GROUP, BITS)
        expert_weight = tl.exp(logit - highest)
        whole += expert_weight
        row = inner + tl.multiple_of((token * K + choice) * (inter // 2), 4)
        pairs = _pairs_from(row, chunks, is_chunk, CHUNK, SPAN, BITS)
        sums += times_weighed(part, pairs, part_scales, CHUNK, GROUP, BITS, HAS_PTX) * expert_weight
        part, part_scales, logit = second, second_scales, second_logit
        second, second_scales, second_logit = third, third_scales, third_logit
    if not RENORMALIZE:
        expert_weights = tl.where(tl.arange(0, BLOCK) < num_experts, tl.exp(logit_of(ordered) - highest), 0.0)
        whole = tl.sum(expert_weights, axis=0)
    total = tl.sum(tl.reshape(tl.sum(sums, axis=1), (ROWS, CHUNKS)), axis=1) / (whole * SMALLER)
    targets = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + token * hidden + targets, total.to(out.dtype.element_ty), mask=targets < hidden)


def moe_gemv_int(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: PackedIntMatrix,
    down: PackedIntMatrix,
    num_active: int,
    activation: Activation,
    *,
    renormalize: bool,
) -> torch.Tensor:
    """x [T, H], router logits [T, experts]; gate and up rows of all experts stacked [experts * 2 inter, H], and down
    rows [experts * H, inter] → weighted sum of the chosen experts [T, H]"""
    (num_tokens, hidden), num_experts, inter = x.shape, logits.shape[1], down.num_columns
    block, pairs = next_power_of_2(num_experts), num_tokens * num_active
    inner, out = x.new_empty(pairs, inter, dtype=torch.float16), torch.empty_like(x)
    programs = capabilities_of(x.device).tuning.moe_gemv_programs
    each = cdiv(cdiv(inter, max(1, programs // pairs)), ROWS_TOGETHER) * ROWS_TOGETHER
    _moe_gemv_int_up[(pairs, cdiv(inter, each))](
        x, logits, gate_up.words, gate_up.scales, inner, hidden, inter, num_experts, each, num_active, activation,
        *_layout(gate_up), down.interleave, down.bits, block, has_ptx(),
        num_warps=_int_warps_for(hidden), **launch_options(),
    )  # fmt: skip
    _moe_gemv_int_down[(cdiv(hidden, ROWS), num_tokens)](
        inner.view(torch.int32), logits, down.words, down.scales, out, hidden, inter, num_experts, num_active,
        renormalize, ROWS, *_layout(down), block, has_ptx(),
        num_warps=_int_warps_for(inter * ROWS), **launch_options(),
    )  # fmt: skip
    return out


def _layout(matrix: PackedIntMatrix) -> tuple[int, int, int, int, int]:
    """Return chunks per row, words per chunk, words per span, columns that share a scale, and bits per value."""
    chunk = min(matrix.interleave, matrix.group)
    return next_power_of_2(matrix.words.shape[1] // chunk), chunk, matrix.interleave, matrix.group, matrix.bits


def _int_warps_for(num_columns: int) -> int:
    """One where that is enough: its threads need no barrier to add up."""
    return max(1, min(8, next_power_of_2(num_columns) // 2048))
